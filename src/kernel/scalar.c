/*
 * kernel/scalar: every slot in plain C, one number at a time.
 *
 * This is the definition that the other levels are compared with, so it is written to be read, not
 * to be fast. It uses no instruction that C does not promise; fmaf() is the C library's, which is
 * exact on every machine. The naive order of kernel.h is spelled out here: sixteen partial sums,
 * the tail padded with zeros, then the fixed tree.
 *
 * Invariant: no result depends on how a caller cuts rows or outputs into ranges.
 */
#include <math.h>
#include <string.h>

#include "kernel/internal.h"

#define LANES 16

/* The fixed tree: l and l+8, then l+4, l+2, l+1. */
static float lanes_total(const float lane[LANES]) {
    float t[LANES];
    memcpy(t, lane, sizeof t);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int l = 0; l < step; l++) t[l] += t[l + step];
    return t[0];
}

static float dot_row(const float *a, const float *b, int64_t n) {
    float lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] = fmaf(a[i + l], b[i + l], lane[l]);
    // The padding is not a no-op: fma(0, 0, -0) is +0.
    if (i < n)
        for (int l = 0; l < LANES; l++)
            lane[l] = i + l < n ? fmaf(a[i + l], b[i + l], lane[l]) : fmaf(0.0f, 0.0f, lane[l]);
    return lanes_total(lane);
}

static float dot_bf16(const float *a, const uint16_t *b, int64_t n) {
    float lane[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] = fmaf(a[i + l], bf16_to_f32(b[i + l]), lane[l]);
    if (i < n)
        for (int l = 0; l < LANES; l++)
            lane[l] = i + l < n ? fmaf(a[i + l], bf16_to_f32(b[i + l]), lane[l])
                                : fmaf(0.0f, 0.0f, lane[l]);
    return lanes_total(lane);
}

static void output_put(float *y, float v, bool add) {
    *y = add ? *y + v : v;
}

static void gemm_f32(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     const float *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add) {
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < rows; m++)
            output_put(&y[m * ldy + n], dot_row(x + m * ldx, w + n * ldw, k), add);
}

static void gemm_bf16(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                      const uint16_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add) {
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < rows; m++)
            output_put(&y[m * ldy + n], dot_bf16(x + m * ldx, w + n * ldw, k), add);
}

/* Integer dot of one block: x is the row's 32 values, w the block's panel bytes, n the output
 * inside the panel. */
static int32_t block_q8(const int8_t *x, const int8_t *w, int n) {
    int32_t s = 0;
    for (int p = 0; p < 8; p++)
        for (int j = 0; j < 4; j++) s += x[4 * p + j] * w[(p * PANEL + n) * 4 + j];
    return s;
}

static int32_t block_q4(const int8_t *x, const uint8_t *w, int n) {
    int32_t s = 0;
    for (int p = 0; p < 4; p++)
        for (int j = 0; j < 4; j++) {
            uint8_t byte = w[(p * PANEL + n) * 4 + j];
            s += x[4 * p + j] * ((byte & 15) - 8) + x[16 + 4 * p + j] * ((byte >> 4) - 8);
        }
    return s;
}

/* One output of a packed q matrix: acc = fma((float)s_b, dw_b * dx_b, acc), blocks in order. */
static float dot_packed(const struct inputs *in, int64_t m, const struct matrix *w, int64_t n) {
    int64_t blocks = w->k / QK, panel = n / PANEL;
    int lane = (int)(n % PANEL), q4 = w->type == TENSOR_Q4_0;
    int64_t bytes = q4 ? QK / 2 * PANEL : QK * PANEL;
    const uint8_t *data = (const uint8_t *)w->data + panel * blocks * bytes;
    const float *scale = w->scales + panel * blocks * PANEL, *d = in->d + m * blocks;
    const int8_t *x = in->q + m * in->k;
    float acc = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *block = data + b * bytes;
        int32_t s = q4 ? block_q4(x + b * QK, block, lane)
                       : block_q8(x + b * QK, (const int8_t *)block, lane);
        acc = fmaf((float)s, scale[b * PANEL + lane] * d[b], acc);
    }
    return acc;
}

static void gemm_packed(float *y, int64_t ldy, const struct inputs *in, const struct matrix *w,
                        int64_t n0, int64_t n1, bool add) {
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < in->rows; m++)
            output_put(&y[m * ldy + n], dot_packed(in, m, w, n), add);
}

static int8_t value_quantize(float x, float inverse) {
    float u = x * inverse;
    if (u != u) return 0;
    u = u < -127.0f ? -127.0f : u > 127.0f ? 127.0f : u;
    // Adding 1.5 * 2^23 leaves no bit for a fraction: the addition itself rounds half to even.
    return (int8_t)((u + 0x1.8p+23f) - 0x1.8p+23f);
}

static void quantize_row(const float *x, int64_t k, int8_t *q, float *d) {
    for (int64_t b = 0; b < k / QK; b++, x += QK, q += QK) {
        float amax = 0;
        for (int i = 0; i < QK; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
        amax = amax > FLT_MAX ? FLT_MAX : amax;
        float scale = amax / 127.0f;
        if (scale < FLT_MIN) { // its inverse could overflow
            d[b] = 0;
            memset(q, 0, QK);
            continue;
        }
        d[b] = scale;
        for (int i = 0; i < QK; i++) q[i] = value_quantize(x[i], 1.0f / scale);
    }
}

static void to_bf16_row(const float *x, int64_t k, uint16_t *out) {
    for (int64_t i = 0; i < k; i++) out[i] = f32_to_bf16(x[i]);
}

static float sum_row(const float *a, int64_t n) {
    float lane[LANES] = {0};
    for (int64_t i = 0; i < n; i++) lane[i % LANES] += a[i];
    return lanes_total(lane);
}

static float max_row(const float *a, int64_t n) {
    float m = -INFINITY;
    for (int64_t i = 0; i < n; i++) m = a[i] > m ? a[i] : m;
    return m + 0.0f;
}

static void axpy_row(float *y, float a, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

static void scale_row(float *y, float a, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] *= a;
}

static void rmsnorm_row(float *y, const float *x, const float *g, float eps, int64_t n) {
    float r = 1.0f / sqrtf(dot_row(x, x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * r * g[i];
}

static void rope_row(float *x, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = fmaf(a, cosine[i], -(b * sine[i]));
        x[i + half] = fmaf(b, cosine[i], a * sine[i]);
    }
}

static int32_t float_bits(float f) {
    int32_t i;
    memcpy(&i, &f, sizeof i);
    return i;
}

/* 2^n for n in -126..127; any other n (met only beside a NaN) gives some float. */
static float power_of_two(int32_t n) {
    uint32_t bits = ((uint32_t)n + 127) << 23;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static float exp_value(float x) {
    x = EXP_HI < x ? EXP_HI : x;
    x = EXP_LO > x ? EXP_LO : x;
    float t = fmaf(x, EXP_LOG2E, EXP_MAGIC), z = t - EXP_MAGIC;
    int32_t n = (int32_t)((uint32_t)float_bits(t) - (uint32_t)float_bits(EXP_MAGIC));
    float r = fmaf(z, -EXP_LN2_LO, fmaf(z, -EXP_LN2_HI, x));
    float p = fmaf(EXP_C6, r, EXP_C5);
    p = fmaf(p, r, EXP_C4);
    p = fmaf(p, r, EXP_C3);
    p = fmaf(p, r, EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    // In two steps, so that 2^128 and the denormals are reached with one rounding.
    float y = p * power_of_two(n >> 1) * power_of_two(n - (n >> 1));
    return FLT_MAX < y ? FLT_MAX : y;
}

static void silu_mul_row(float *y, const float *gate, const float *up, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = gate[i] / (1.0f + exp_value(-gate[i])) * up[i];
}

static void gelu_row(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float u = x[i] * fmaf(x[i] * x[i], GELU_CUBE, GELU_LINE);
        y[i] = x[i] / (1.0f + exp_value(-u));
    }
}

static void exp_row(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = exp_value(x[i]);
}

static float softmax_row(float *x, int64_t n) {
    float m = max_row(x, n);
    for (int64_t i = 0; i < n; i++) x[i] = exp_value(x[i] - m);
    return sum_row(x, n);
}

static void attend_row(float *out, const float *q, const float *k, const float *v, int64_t stride,
                       int64_t n, int64_t d, float scale, float *scores) {
    for (int64_t j = 0; j < n; j++) scores[j] = dot_row(q, k + j * stride, d) * scale;
    float total = softmax_row(scores, n);
    memset(out, 0, (size_t)d * sizeof *out);
    for (int64_t j = 0; j < n; j++) axpy_row(out, scores[j], v + j * stride, d);
    scale_row(out, 1.0f / total, d);
}

static void adamw_row(float *w, const float *g, float *m, float *v, int64_t n, float lr,
                      float beta1, float beta2, float eps, float decay, float bc1, float bc2) {
    float keep = 1.0f - lr * decay, rest1 = 1.0f - beta1, rest2 = 1.0f - beta2;
    for (int64_t i = 0; i < n; i++) {
        m[i] = fmaf(beta1, m[i], rest1 * g[i]);
        v[i] = fmaf(beta2, v[i], rest2 * (g[i] * g[i]));
        w[i] = fmaf(-lr, m[i] / bc1 / (sqrtf(v[i] / bc2) + eps), w[i] * keep);
    }
}

/* In tiles that touch few cache lines at a time. */
static void transpose_tiles(float *dst, int64_t ld_dst, const float *src, int64_t ld_src,
                            int64_t rows, int64_t cols) {
    const int64_t tile = 16;
    for (int64_t r0 = 0; r0 < rows; r0 += tile)
        for (int64_t c0 = 0; c0 < cols; c0 += tile)
            for (int64_t c = c0; c < MIN(c0 + tile, cols); c++)
                for (int64_t r = r0; r < MIN(r0 + tile, rows); r++)
                    dst[c * ld_dst + r] = src[r * ld_src + c];
}

void kernels_fill_scalar(struct kernels *k) {
    *k = (struct kernels){
        .gemm_f32 = gemm_f32,
        .gemm_bf16 = gemm_bf16,
        .gemm_q8 = gemm_packed,
        .gemm_q4 = gemm_packed,
        .quantize_row = quantize_row,
        .to_bf16_row = to_bf16_row,
        .transpose = transpose_tiles,
        .dot = dot_row,
        .sum = sum_row,
        .max = max_row,
        .axpy = axpy_row,
        .scale = scale_row,
        .rmsnorm = rmsnorm_row,
        .rope = rope_row,
        .silu_mul = silu_mul_row,
        .gelu = gelu_row,
        .exp = exp_row,
        .softmax = softmax_row,
        .attend = attend_row,
        .adamw = adamw_row,
    };
}
