/*
 * scalar: the functions of struct kernels in plain C, one number at a time. Those that only tiles have
 * are NULL.
 *
 * The other levels are compared with these functions, so they are written to be read, not to be
 * fast. fmaf() of the C library rounds once on every machine. The sums follow the order of kernel.h
 * literally: sixteen partial sums, the tail padded with zeros, then the fixed tree.
 *
 * Invariant: no result depends on how a caller divides rows or outputs into ranges.
 */
#include <math.h>
#include <string.h>

#include "kernel/internal.h"

#define LANES 16

/* The fixed tree: adds lanes l and l+8, then l and l+4, l and l+2, l and l+1. */
static float lanes_sum(const float lane[LANES]) {
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
    return lanes_sum(lane);
}

/* Element i of a row as f32. */
static float elem_at(const void *w, int64_t i, enum dtype e) {
    switch (e) {
    case DTYPE_F32:
        return ((const float *)w)[i];
    case DTYPE_BF16:
        return bf16_to_f32(((const uint16_t *)w)[i]);
    case DTYPE_F16:
        return f16_to_f32(((const uint16_t *)w)[i]);
    default:
        return (float)((const int8_t *)w)[i];
    }
}

static float dot_elems(const float *a, const void *b, int64_t at, int64_t n, enum dtype e) {
    float lane[LANES] = {0};
    for (int64_t i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] = i + l < n ? fmaf(a[i + l], elem_at(b, at + i + l, e), lane[l])
                                : fmaf(0.0f, 0.0f, lane[l]);
    return lanes_sum(lane);
}

static void output_store(float *y, float v, bool add) {
    *y = add ? *y + v : v;
}

static void gemm_f32(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     const float *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add) {
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < rows; m++)
            output_store(&y[m * ldy + n], dot_row(x + m * ldx, w + n * ldw, k), add);
}

#define GEMM_ELEMS(name, type, e)                                                                  \
    static void name(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,             \
                     const type *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add) {    \
        for (int64_t n = n0; n < n1; n++)                                                          \
            for (int64_t m = 0; m < rows; m++)                                                     \
                output_store(&y[m * ldy + n], dot_elems(x + m * ldx, w, n * ldw, k, e), add);      \
    }
GEMM_ELEMS(gemm_bf16, uint16_t, DTYPE_BF16)
GEMM_ELEMS(gemm_f16, uint16_t, DTYPE_F16)
GEMM_ELEMS(gemm_i8, int8_t, DTYPE_I8)

static void gemm_bf16_fast(float *y, int64_t ldy, const struct gemm_input *in,
                           const struct matrix *w, int64_t n0, int64_t n1, bool add) {
    for (int64_t n = n0; n < n1; n++) {
        const uint16_t *pairs = bf16_panel(w, n / PANEL) + n % PANEL * 2;
        for (int64_t m = 0; m < in->rows; m++) {
            float sum = 0;
            for (int64_t k = 0; k < w->k; k++)
                sum = fmaf(in->x[m * in->ldx + k], bf16_to_f32(pairs[k / 2 * PANEL * 2 + k % 2]),
                           sum);
            output_store(&y[m * ldy + n], sum, add);
        }
    }
}

#define GEMM_NN_ELEMS(name, type, e)                                                               \
    static void name(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj, int64_t rows,  \
                     const type *v, int64_t ldv, int64_t k, int64_t n) {                           \
        for (int64_t m = 0; m < rows; m++)                                                         \
            for (int64_t j = 0; j < k; j++)                                                        \
                for (int64_t c = 0; c < n; c++)                                                    \
                    y[m * ldy + c] =                                                               \
                        fmaf(t[m * tm + j * tj], elem_at(v, j * ldv + c, e), y[m * ldy + c]);      \
    }
GEMM_NN_ELEMS(gemm_nn_f32, float, DTYPE_F32)
GEMM_NN_ELEMS(gemm_nn_bf16, uint16_t, DTYPE_BF16)
GEMM_NN_ELEMS(gemm_nn_f16, uint16_t, DTYPE_F16)
GEMM_NN_ELEMS(gemm_nn_i8, int8_t, DTYPE_I8)

/* One output of gemm_i8_i8. q: int8 inputs, d: the scale of each of their blocks. */
static float dot_i8(const int8_t *q, const float *d, const int8_t *w, int64_t k) {
    enum { I8_LANES = 8 };
    float lane[I8_LANES] = {0};
    for (int64_t b = 0; b < k / QK; b++, q += QK, w += QK)
        for (int l = 0; l < I8_LANES; l++) {
            int32_t p = 0;
            for (int i = 4 * l; i < 4 * l + 4; i++) p += q[i] * w[i];
            lane[l] = fmaf((float)p, d[b], lane[l]);
        }
    for (int half = I8_LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

static void gemm_i8_i8(float *y, int64_t ldy, const struct gemm_input *in, const int8_t *w,
                       int64_t ldw, int64_t n0, int64_t n1) {
    for (int64_t m = 0; m < in->rows; m++)
        for (int64_t n = n0; n < n1; n++)
            y[m * ldy + n] =
                dot_i8(in->q + m * in->k, in->d + m * (in->k / QK), w + n * ldw, in->k);
}

static void gemm_nn_i16_i8(float *y, int64_t ldy, const int16_t *t, int64_t ldt, const float *s,
                           int64_t rows, const int8_t *v, int64_t ldv, int64_t pairs, int64_t n) {
    for (int64_t m = 0; m < rows; m++)
        for (int64_t c = 0; c < n; c++) {
            int32_t sum = 0;
            for (int64_t j = 0; j < pairs; j++)
                for (int i = 0; i < 2; i++)
                    sum += t[m * ldt + 2 * j + i] * v[2 * (j * ldv + c) + i];
            y[m * ldy + c] = fmaf((float)sum, s[m], y[m * ldy + c]);
        }
}

/* Dot product of x and the `weights` int8 weights that output n of a panel has in one block. w: the
 * bytes of the block for all outputs of the panel, four weights of each output in turn. */
static int32_t block_q8(const int8_t *x, const int8_t *w, int weights, int n) {
    int32_t s = 0;
    for (int p = 0; p < weights / 4; p++)
        for (int j = 0; j < 4; j++) s += x[4 * p + j] * w[(p * PANEL + n) * 4 + j];
    return s;
}

/* The same for a block of 32 4-bit weights, which are indices of `codes`. */
static int32_t block_q4(const int8_t *x, const uint8_t *w, const int8_t codes[16], int n) {
    int32_t s = 0;
    for (int p = 0; p < 4; p++)
        for (int j = 0; j < 4; j++) {
            uint8_t byte = w[(p * PANEL + n) * 4 + j];
            s += x[4 * p + j] * codes[byte & 15] + x[16 + 4 * p + j] * codes[byte >> 4];
        }
    return s;
}

/* Sets codes[i] to the integer that the 4-bit weight i stands for. */
static void codes_fill(const struct matrix *w, int8_t codes[16]) {
    for (int i = 0; i < 16; i++)
        codes[i] = w->layout == LAYOUT_NF4 ? nf4_codes[i] : (int8_t)(i - w->zero);
}

/* One output of a packed quantised matrix. For the groups g in order: acc = fma((float)s_g, dw_g *
 * dx_g, acc), with the integer dot product s_g and the scales dw_g of the weights and dx_g of the
 * input. */
static float dot_packed(const struct gemm_input *in, int64_t m, const struct matrix *w, int64_t n) {
    const enum matrix_layout l = w->layout;
    const int group = layout_group(l), lane = (int)(n % PANEL);
    const float *d = in->d + m * (w->k / QK);
    const int8_t *x = in->q + m * in->k;
    int8_t codes[16];
    float acc = 0;
    codes_fill(w, codes);
    for (int64_t g = 0; g < w->k / group; g++) {
        const uint8_t *block = group_at(w, n / PANEL, g);
        int32_t s = l < LAYOUT_Q4 ? block_q8(x + g * group, (const int8_t *)block, group, lane)
                                  : block_q4(x + g * group, block, codes, lane);
        acc = fmaf((float)s, group_scale(w, n, g) * d[g * group / QK], acc);
    }
    return l == LAYOUT_NF4 ? acc * (w->row_scales[n] / NF4_UNIT) : acc;
}

static void gemm_packed(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                        int64_t n0, int64_t n1, bool add) {
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < in->rows; m++)
            output_store(&y[m * ldy + n], dot_packed(in, m, w, n), add);
}

static void record_read(float *scales, float *mins, const uint8_t *record, int g,
                        enum matrix_layout l) {
    for (int i = 0; i < PANEL; i++) {
        scales[i] = record_scale(record, g, i, l);
        if (mins) mins[i] = record_min(record, g, i, l);
    }
}

static void gemm_mins(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                      int64_t n0, int64_t n1) {
    const int64_t blocks = w->k / QK;
    for (int64_t n = n0; n < n1; n++)
        for (int64_t m = 0; m < in->rows; m++) {
            float lane[LANES] = {0};
            for (int64_t b = 0; b < (blocks + LANES - 1) / LANES * LANES; b++) {
                float sum = b < blocks ? in->sum[m * blocks + b] : 0.0f,
                      min = b < blocks ? group_min(w, n, b) : 0.0f;
                lane[b % LANES] = fmaf(sum, min, lane[b % LANES]);
            }
            y[m * ldy + n] += lanes_sum(lane);
        }
}

static int8_t value_quantize(float x, float inverse) {
    float u = x * inverse;
    if (u != u) return 0;
    u = u < -127.0f ? -127.0f : u > 127.0f ? 127.0f : u;
    return (int8_t)round_even(u);
}

static void quantize_row(const float *x, int64_t k, int8_t *q, float *d) {
    for (int64_t b = 0; b < k / QK; b++, x += QK, q += QK) {
        float amax = 0;
        for (int i = 0; i < QK; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
        amax = amax > FLT_MAX ? FLT_MAX : amax;
        float scale = amax / 127.0f;
        if (scale < FLT_MIN) { // 1 / scale could overflow
            d[b] = 0;
            memset(q, 0, QK);
            continue;
        }
        d[b] = scale;
        for (int i = 0; i < QK; i++) q[i] = value_quantize(x[i], 1.0f / scale);
    }
}

static void block_sums(int32_t *q_sum, float *sum, const int8_t *q, const float *d,
                       int64_t blocks) {
    for (int64_t b = 0; b < blocks; b++, q += QK) {
        q_sum[b] = block_sum(q);
        sum[b] = d[b] * (float)q_sum[b];
    }
}

static void quantize_row16(const float *x, int64_t k, int16_t *q, float *d) {
    const float limit = QUANTIZED16_MAX;
    for (int64_t b = 0; b < k / QK; b++, x += QK, q += QK) {
        float amax = 0;
        for (int i = 0; i < QK; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
        amax = amax > FLT_MAX ? FLT_MAX : amax;
        float scale = amax / limit, inverse = scale < FLT_MIN ? 0.0f : 1.0f / scale;
        d[b] = scale < FLT_MIN ? 0.0f : scale;
        for (int i = 0; i < QK; i++) {
            float u = x[i] * inverse;
            u = u != u ? 0.0f : u < -limit ? -limit : u > limit ? limit : u;
            q[i] = (int16_t)round_even(u);
        }
    }
}

/* The result of the instruction PMULHRSW: a b / 2^15, rounded to the nearest integer. */
static int multiply_high_rounded(int a, int b) {
    return (a * b + 0x4000) >> 15;
}

static void multiply_to_int8(const int16_t *x, const int16_t *by, int64_t k, int8_t *q) {
    for (int64_t i = 0; i < k; i++)
        q[i] = (int8_t)multiply_high_rounded(multiply_high_rounded(x[i], by[i]), 128);
}

static float sum_row(const float *a, int64_t n) {
    float lane[LANES] = {0};
    for (int64_t i = 0; i < n; i++) lane[i % LANES] += a[i];
    return lanes_sum(lane);
}

static float max_row(const float *a, int64_t n) {
    float m = -INFINITY;
    for (int64_t i = 0; i < n; i++) m = a[i] > m ? a[i] : m;
    return m + 0.0f; // -0 becomes +0
}

static void axpy_row(float *y, float a, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

static void scale_row(float *y, float a, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] *= a;
}

static void mask_random_row(uint8_t *mask, const uint32_t *random, int64_t n, uint32_t threshold) {
    mask_random_from(mask, random, 0, n, threshold);
}

static void mask_multiply_row(float *y, const float *x, const uint8_t *mask, float factor,
                              int64_t n, bool add) {
    for (int64_t i = 0; i < n; i++) {
        float v = x[i] * (mask[i / 8] >> i % 8 & 1 ? factor : 0.0f);
        y[i] = add ? y[i] + v : v;
    }
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

/* 2^n for n in -126..127; the result for other n (only after a NaN) is unspecified. */
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
    // Two factors, because 2^n alone can overflow or be a denormal; only the last product rounds.
    float y = p * power_of_two(n >> 1) * power_of_two(n - (n >> 1));
    return FLT_MAX < y ? FLT_MAX : y;
}

static void silu_mul_row(float *y, const float *gate, const float *up, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = gate[i] / (1.0f + exp_value(-gate[i])) * up[i];
}

static void gelu_row(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float u = x[i] * fmaf(x[i] * x[i], GELU_CUBIC, GELU_LINEAR);
        y[i] = x[i] / (1.0f + exp_value(-u));
    }
}

static void exp_row(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = exp_value(x[i]);
}

static void act_backward(float *dx, float *dup, const float *dy, const float *x, const float *up,
                         int64_t n, bool gelu) {
    act_backward_with(exp_row, dx, dup, dy, x, up, n, gelu);
}

static void softmax_backward(float *dp, const float *p, float mean, float scale, int64_t n) {
    softmax_backward_with(dp, p, mean, scale, n);
}

static void norm_gain_backward(const struct norm_rows *rows, float *dg, float *db) {
    norm_gain_backward_with(rows, dg, db);
}

static void norm_backward(float *dx, float *dy, const float *x, const float *g, float mean,
                          float rstd, bool centred, int64_t n, bool add) {
    norm_backward_with(dot_row, sum_row, dx, dy, x, g, mean, rstd, centred, n, add);
}

static float softmax_row(float *x, int64_t n) {
    float m = max_row(x, n);
    for (int64_t i = 0; i < n; i++) x[i] = exp_value(x[i] - m);
    return sum_row(x, n);
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

/* A candidate of affine_fit: integers q for x, the scale and minimum with the smallest weighted
 * error for these integers, and this error. */
struct affine {
    float scale, min, error;
    uint8_t q[QK];
};

static float affine_error(const struct affine *a, const float *x, const float *w) {
    float error = 0;
    for (int i = 0; i < QK; i++) {
        float diff = a->scale * (float)a->q[i] + a->min - x[i];
        error += w[i] * (diff * diff);
    }
    return error;
}

/* Sets a->q to (x - lo) · inverse, rounded and clipped to 0..top. */
static void affine_round(struct affine *a, const float *x, float inverse, float lo, int top) {
    for (int i = 0; i < QK; i++)
        a->q[i] = (uint8_t)clip(round_to_int(inverse * (x[i] - lo)), 0, top);
}

/* Sets the scale and minimum with the smallest weighted error for a->q; returns false if there is
 * no unique solution. */
static bool affine_solve(struct affine *a, const float *x, const float *w, float sum_w,
                         float sum_x) {
    float l = 0, l2 = 0, xl = 0;
    for (int i = 0; i < QK; i++) {
        float q = a->q[i];
        l += w[i] * q;
        l2 += w[i] * q * q;
        xl += w[i] * q * x[i];
    }
    float det = sum_w * l2 - l * l;
    if (!(det > 0)) return false;
    a->scale = (sum_w * xl - sum_x * l) / det;
    a->min = (l2 * sum_x - l * xl) / det;
    if (a->min > 0) {
        a->min = 0;
        a->scale = xl / l2;
    }
    return true;
}

static void affine_fit_block(struct affine *best, const float *x, const struct affine_search *s) {
    const struct value_range r = range_of(x, QK);
    float w[QK], squares = 0;
    for (int i = 0; i < QK; i++) squares += x[i] * x[i];
    const float mean = sqrtf(squares / QK);
    for (int i = 0; i < QK; i++) w[i] = mean + fabsf(x[i]);
    float sum_w = w[0], sum_x = sum_w * x[0];
    for (int i = 1; i < QK; i++) {
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    const float lo = r.lo > 0 ? 0 : r.lo;
    *best = (struct affine){.min = lo};
    if (r.hi == lo) return;
    float inverse = (float)s->top / (r.hi - lo);
    best->scale = 1 / inverse;
    affine_round(best, x, inverse, lo, s->top);
    best->error = affine_error(best, x, w);
    for (int step = 0; step <= s->steps; step++) {
        struct affine a;
        inverse = (s->from + s->by * (float)step + (float)s->top) / (r.hi - best->min);
        affine_round(&a, x, inverse, best->min, s->top);
        if (!affine_solve(&a, x, w, sum_w, sum_x)) continue;
        a.error = affine_error(&a, x, w);
        if (a.error < best->error) *best = a;
    }
}

static void affine_fit(const float *x, const struct affine_search *s, float *scale, float *min,
                       int8_t *q) {
    for (int j = 0; j < SUB_BLOCKS; j++) {
        struct affine best;
        affine_fit_block(&best, x + j * QK, s);
        scale[j] = best.scale;
        min[j] = best.min;
        memcpy(q + j * QK, best.q, QK);
    }
}

static float symmetric_fit_group(const float *x, int8_t *q) {
    float extreme = extreme_of(x, Q6_GROUP), scale = 0, best = 0;
    memset(q, -32, Q6_GROUP); // the result of the reference when all values are near zero
    if (fabsf(extreme) < 1e-15f) return 0;
    for (int t = 0; t < SYMMETRIC_RANGES; t++) {
        float inverse = -symmetric_range(t) / extreme, xl = 0, l2 = 0;
        int8_t tried[Q6_GROUP];
        for (int i = 0; i < Q6_GROUP; i++) {
            tried[i] = (int8_t)clip(round_to_int(inverse * x[i]), -32, 31);
            float w = x[i] * x[i], l = tried[i];
            xl += w * x[i] * l;
            l2 += w * l * l;
        }
        if (t == 0 || (l2 > 0 && xl * xl > best * l2)) {
            memcpy(q, tried, Q6_GROUP);
            scale = l2 != 0 ? xl / l2 : 0.0f;
            best = scale * xl;
        }
    }
    return scale;
}

static void symmetric_fit(const float *x, float *scale, int8_t *q) {
    for (int j = 0; j < Q6_GROUPS; j++)
        scale[j] = symmetric_fit_group(x + j * Q6_GROUP, q + j * Q6_GROUP);
}

/* Transposes in tiles of 16 by 16, which use few cache lines at a time. */
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
        .gemm_f16 = gemm_f16,
        .gemm_i8 = gemm_i8,
        .gemm_nn_f32 = gemm_nn_f32,
        .gemm_nn_bf16 = gemm_nn_bf16,
        .gemm_nn_f16 = gemm_nn_f16,
        .gemm_nn_i8 = gemm_nn_i8,
        .gemm_i8_i8 = gemm_i8_i8,
        .gemm_nn_i16_i8 = gemm_nn_i16_i8,
        .gemm_q8 = gemm_packed,
        .gemm_q4 = gemm_packed,
        .gemm_mins = gemm_mins,
        .record_read = record_read,
        .gemm_bf16_fast = gemm_bf16_fast,
        .quantize_row = quantize_row,
        .block_sums = block_sums,
        .quantize_row16 = quantize_row16,
        .multiply_to_int8 = multiply_to_int8,
        .affine_fit = affine_fit,
        .symmetric_fit = symmetric_fit,
        .transpose = transpose_tiles,
        .dot = dot_row,
        .sum = sum_row,
        .max = max_row,
        .axpy = axpy_row,
        .scale = scale_row,
        .mask_random = mask_random_row,
        .mask_multiply = mask_multiply_row,
        .rmsnorm = rmsnorm_row,
        .rope = rope_row,
        .silu_mul = silu_mul_row,
        .gelu = gelu_row,
        .exp = exp_row,
        .softmax = softmax_row,
        .act_backward = act_backward,
        .softmax_backward = softmax_backward,
        .norm_gain_backward = norm_gain_backward,
        .norm_backward = norm_backward,
        .adamw = adamw_row,
    };
}
