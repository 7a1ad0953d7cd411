/*
 * quant: the weight types, and the conversion of rows between f32 and the blocks of a file.
 *
 * One table has each type's name, block sizes, layout in memory and, for quantised types, its
 * functions. `decode` splits a block into integers, scales and minima, from which kernel.c computes
 * values and panels. `quantize` computes a block from f32 values. It chooses integers, scales and
 * minima with the same search and the same float operations in the same order as llama.cpp's
 * reference quantiser, so that files are equal byte for byte (test/kernel/test_quant.c has hashes
 * of the reference's blocks). `encode` is the inverse of `decode`.
 *
 * Not here: panels and products (kernel.c and the levels), and the choice of a type for each tensor
 * of a model (model/quant_mix.c).
 *
 * Invariant: any bytes can be decoded and any floats quantised without undefined behaviour. A block
 * with values that are not finite gets a scale that is not finite, which matrix_set_row refuses, or
 * meaningless integers.
 */
#include <math.h>
#include <string.h>

#include "kernel/internal.h"

const int8_t nf4_codes[16] = {-127, -88, -67, -50, -36, -23, -12, 0,
                              10,   20,  31,  43,  56,  71,  92,  127};

static float f16_read(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return f16_to_f32(h);
}

static void f16_write(uint8_t *p, float f) {
    uint16_t h = f32_to_f16(f);
    memcpy(p, &h, sizeof h);
}

/* Rounds towards zero and clips to lo..hi; NaN becomes 0. */
static int clip_float(float v, int lo, int hi) {
    if (v != v) return 0;
    return v <= (float)lo ? lo : v >= (float)hi ? hi : (int)v;
}

/* 1 / d, or 0 for d = 0. */
static float inverse_of(float d) {
    return d != 0 ? 1.0f / d : 0.0f;
}

static float amax_of(const float *x, int n) {
    float amax = 0;
    for (int i = 0; i < n; i++) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    return amax;
}

/* Decodes n bytes of nibbles: the low nibbles are the first n integers, the high nibbles the next
 * n. `zero` is subtracted from each. */
static void nibbles_decode(const uint8_t *bytes, int n, int zero, int8_t *q) {
    for (int i = 0; i < n; i++) {
        q[i] = (int8_t)((bytes[i] & 15) - zero);
        q[i + n] = (int8_t)((bytes[i] >> 4) - zero);
    }
}

static void nibbles_encode(const int8_t *q, int n, int zero, uint8_t *bytes) {
    for (int i = 0; i < n; i++)
        bytes[i] = (uint8_t)(((q[i] + zero) & 15) | ((q[i + n] + zero) & 15) << 4);
}

/* Reads the scale of a block of 32 weights. */
static void scale_decode(const uint8_t *b, struct quant_block *s) {
    memcpy(&s->d, b, sizeof s->d);
    s->scale[0] = f16_to_f32(s->d);
}

static void scale_and_min_decode(const uint8_t *b, struct quant_block *s) {
    scale_decode(b, s);
    memcpy(&s->m, b + 2, sizeof s->m);
    s->min[0] = f16_to_f32(s->m);
}

static void q8_0_decode(const uint8_t *b, struct quant_block *s) {
    scale_decode(b, s);
    memcpy(s->q, b + 2, QK);
}

static void q8_0_encode(const struct quant_block *s, uint8_t *b) {
    f16_write(b, s->scale[0]);
    memcpy(b + 2, s->q, QK);
}

static void q8_0_quantize(const float *x, uint8_t *b) {
    struct quant_block s = {.scale[0] = amax_of(x, QK) / 127.0f};
    float inverse = inverse_of(s.scale[0]);
    for (int i = 0; i < QK; i++) s.q[i] = (int8_t)clip_float(roundf(x[i] * inverse), -128, 127);
    q8_0_encode(&s, b);
}

/* Chooses the scale so that the value with the largest magnitude becomes the integer -zero. */
static void symmetric_quantize(const float *x, int zero, struct quant_block *s) {
    s->scale[0] = extreme_of(x, QK) / (float)-zero;
    float inverse = inverse_of(s->scale[0]), half = (float)zero + 0.5f;
    for (int i = 0; i < QK; i++)
        s->q[i] = (int8_t)(clip_float(x[i] * inverse + half, 0, 2 * zero - 1) - zero);
}

/* Chooses scale and minimum so that the smallest value becomes 0 and the largest value `top`. */
static void affine_quantize(const float *x, int top, struct quant_block *s) {
    struct value_range r = range_of(x, QK);
    s->scale[0] = (r.hi - r.lo) / (float)top;
    s->min[0] = r.lo;
    float inverse = inverse_of(s->scale[0]);
    for (int i = 0; i < QK; i++)
        s->q[i] = (int8_t)clip_float((x[i] - r.lo) * inverse + 0.5f, 0, top);
}

static void q4_0_decode(const uint8_t *b, struct quant_block *s) {
    scale_decode(b, s);
    nibbles_decode(b + 2, QK / 2, 8, s->q);
}

static void q4_0_encode(const struct quant_block *s, uint8_t *b) {
    f16_write(b, s->scale[0]);
    nibbles_encode(s->q, QK / 2, 8, b + 2);
}

static void q4_0_quantize(const float *x, uint8_t *b) {
    struct quant_block s;
    symmetric_quantize(x, 8, &s);
    q4_0_encode(&s, b);
}

static void q4_1_decode(const uint8_t *b, struct quant_block *s) {
    scale_and_min_decode(b, s);
    nibbles_decode(b + 4, QK / 2, 0, s->q);
}

static void q4_1_encode(const struct quant_block *s, uint8_t *b) {
    f16_write(b, s->scale[0]);
    f16_write(b + 2, s->min[0]);
    nibbles_encode(s->q, QK / 2, 0, b + 4);
}

static void q4_1_quantize(const float *x, uint8_t *b) {
    struct quant_block s;
    affine_quantize(x, 15, &s);
    q4_1_encode(&s, b);
}

/* Four bytes of fifth bits, then the nibbles. */
static void five_bits_decode(const uint8_t *b, int zero, int8_t *q) {
    uint32_t fifth;
    memcpy(&fifth, b, sizeof fifth);
    nibbles_decode(b + 4, QK / 2, zero, q);
    for (int i = 0; i < QK; i++) q[i] = (int8_t)(q[i] + (int)(fifth >> i & 1) * 16);
}

static void five_bits_encode(const int8_t *q, int zero, uint8_t *b) {
    uint32_t fifth = 0;
    for (int i = 0; i < QK; i++) fifth |= (uint32_t)((q[i] + zero) >> 4 & 1) << i;
    memcpy(b, &fifth, sizeof fifth);
    nibbles_encode(q, QK / 2, zero, b + 4);
}

static void q5_0_decode(const uint8_t *b, struct quant_block *s) {
    scale_decode(b, s);
    five_bits_decode(b + 2, 16, s->q);
}

static void q5_0_encode(const struct quant_block *s, uint8_t *b) {
    f16_write(b, s->scale[0]);
    five_bits_encode(s->q, 16, b + 2);
}

static void q5_0_quantize(const float *x, uint8_t *b) {
    struct quant_block s;
    symmetric_quantize(x, 16, &s);
    q5_0_encode(&s, b);
}

static void q5_1_decode(const uint8_t *b, struct quant_block *s) {
    scale_and_min_decode(b, s);
    five_bits_decode(b + 4, 0, s->q);
}

static void q5_1_encode(const struct quant_block *s, uint8_t *b) {
    f16_write(b, s->scale[0]);
    f16_write(b + 2, s->min[0]);
    five_bits_encode(s->q, 0, b + 4);
}

static void q5_1_quantize(const float *x, uint8_t *b) {
    struct quant_block s;
    affine_quantize(x, 31, &s);
    q5_1_encode(&s, b);
}

/* q4_k and q5_k: f16 d, f16 dmin, then 12 bytes with eight 6-bit scales and eight 6-bit minima. The
 * low six bits of bytes 0..3 are scales 0..3, those of bytes 4..7 are minima 0..3. The low nibbles
 * of bytes 8..11 are the low four bits of scales 4..7, the high nibbles those of minima 4..7. The
 * upper two bits of scales 4..7 are in bytes 0..3, those of minima 4..7 in bytes 4..7. */
static void six_bits_decode(const uint8_t *p, int j, int *scale, int *min) {
    if (j < 4) {
        *scale = p[j] & 63;
        *min = p[j + 4] & 63;
    } else {
        *scale = (p[j + 4] & 15) | p[j - 4] >> 6 << 4;
        *min = p[j + 4] >> 4 | p[j] >> 6 << 4;
    }
}

static void six_bits_encode(uint8_t *p, int j, int scale, int min) {
    if (j < 4) {
        p[j] = (uint8_t)scale;
        p[j + 4] = (uint8_t)min;
    } else {
        p[j + 4] = (uint8_t)((scale & 15) | (min & 15) << 4);
        p[j - 4] |= (uint8_t)(scale >> 4 << 6);
        p[j] |= (uint8_t)(min >> 4 << 6);
    }
}

static void k_scales_decode(const uint8_t *b, struct quant_block *s) {
    memcpy(&s->d, b, sizeof s->d);
    memcpy(&s->m, b + 2, sizeof s->m);
    float d = f16_to_f32(s->d), dmin = f16_to_f32(s->m);
    for (int j = 0; j < SUB_BLOCKS; j++) {
        int scale, min;
        six_bits_decode(b + 4, j, &scale, &min);
        s->s[j] = (uint8_t)scale;
        s->u[j] = (uint8_t)min;
        s->scale[j] = d * (float)scale;
        s->min[j] = -(dmin * (float)min);
    }
}

static void k_scales_encode(const struct quant_block *s, uint8_t *b) {
    memset(b, 0, 16);
    memcpy(b, &s->d, sizeof s->d);
    memcpy(b + 2, &s->m, sizeof s->m);
    for (int j = 0; j < SUB_BLOCKS; j++) six_bits_encode(b + 4, j, s->s[j], s->u[j]);
}

static void q4_k_decode(const uint8_t *b, struct quant_block *s) {
    k_scales_decode(b, s);
    for (int j = 0; j < SUPER_BLOCK; j += 64) nibbles_decode(b + 16 + j / 2, QK, 0, s->q + j);
}

static void q4_k_values_encode(const int8_t *q, uint8_t *b) {
    for (int j = 0; j < SUPER_BLOCK; j += 64) nibbles_encode(q + j, QK, 0, b + 16 + j / 2);
}

static void q4_k_encode(const struct quant_block *s, uint8_t *b) {
    k_scales_encode(s, b);
    q4_k_values_encode(s->q, b);
}

static void q5_k_decode(const uint8_t *b, struct quant_block *s) {
    k_scales_decode(b, s);
    for (int j = 0; j < SUPER_BLOCK; j += 64) nibbles_decode(b + 48 + j / 2, QK, 0, s->q + j);
    for (int i = 0; i < SUPER_BLOCK; i++)
        s->q[i] = (int8_t)(s->q[i] + (b[16 + i % QK] >> i / QK & 1) * 16);
}

static void q5_k_values_encode(const int8_t *q, uint8_t *b) {
    memset(b + 16, 0, QK);
    for (int i = 0; i < SUPER_BLOCK; i++) b[16 + i % QK] |= (uint8_t)((q[i] >> 4 & 1) << i / QK);
    for (int j = 0; j < SUPER_BLOCK; j += 64) nibbles_encode(q + j, QK, 0, b + 48 + j / 2);
}

static void q5_k_encode(const struct quant_block *s, uint8_t *b) {
    k_scales_encode(s, b);
    q5_k_values_encode(s->q, b);
}

/* Writes d, dmin and the twelve bytes of scales and minima of a super-block to b, and sets q to its
 * integers, computed with the rounded scales and minima. */
static void k_quantize(const float *x, uint8_t *b, const struct affine_search *search, int8_t *q) {
    float scales[SUB_BLOCKS], mins[SUB_BLOCKS], top_scale = 0, top_min = 0;
    kernels_get()->affine_fit(x, search, scales, mins, q);
    for (int j = 0; j < SUB_BLOCKS; j++) {
        top_scale = scales[j] > top_scale ? scales[j] : top_scale;
        top_min = -mins[j] > top_min ? -mins[j] : top_min;
    }
    float by_scale = top_scale > 0 ? 63.0f / top_scale : 0.0f,
          by_min = top_min > 0 ? 63.0f / top_min : 0.0f;
    memset(b, 0, 16);
    for (int j = 0; j < SUB_BLOCKS; j++) {
        // A negative scale wraps around to a large one before it is capped, as in the reference.
        uint8_t scale = (uint8_t)round_to_int(by_scale * scales[j]),
                min = (uint8_t)round_to_int(by_min * -mins[j]);
        six_bits_encode(b + 4, j, MIN(scale, 63), MIN(min, 63));
    }
    f16_write(b, top_scale / 63.0f);
    f16_write(b + 2, top_min / 63.0f);
    struct quant_block stored;
    k_scales_decode(b, &stored);
    for (int j = 0; j < SUB_BLOCKS; j++) {
        const float d = stored.scale[j], min = stored.min[j];
        for (int i = j * QK; d != 0 && i < (j + 1) * QK; i++)
            q[i] = (int8_t)clip(round_to_int((x[i] - min) / d), 0, search->top);
    }
}

static void q4_k_quantize(const float *x, uint8_t *b) {
    int8_t q[SUPER_BLOCK];
    k_quantize(x, b, &(struct affine_search){.top = 15, .from = -1.0f, .by = 0.1f, .steps = 20}, q);
    q4_k_values_encode(q, b);
}

static void q5_k_quantize(const float *x, uint8_t *b) {
    int8_t q[SUPER_BLOCK];
    k_quantize(x, b, &(struct affine_search){.top = 31, .from = -0.5f, .by = 0.1f, .steps = 15}, q);
    q5_k_values_encode(q, b);
}

/* A q6_k block has two halves of 128 weights, each with 64 bytes of nibbles and 32 bytes of bit
 * pairs. Weight 32 c + i of a half has its low four bits in byte 32 (c % 2) + i of the nibbles (the
 * low nibble if c < 2), and its upper two bits at bits 2 c and 2 c + 1 of byte i of the pairs. */
static void q6_k_decode(const uint8_t *b, struct quant_block *s) {
    memcpy(&s->d, b + 208, sizeof s->d);
    memcpy(s->s, b + 192, sizeof s->s);
    float d = f16_to_f32(s->d);
    for (int j = 0; j < Q6_GROUPS; j++) s->scale[j] = d * (float)(int8_t)s->s[j];
    for (int i = 0; i < SUPER_BLOCK; i++) {
        int half = i / 128, c = i / 32 % 4;
        int low = b[half * 64 + c % 2 * 32 + i % 32] >> c / 2 * 4 & 15;
        int high = b[128 + half * 32 + i % 32] >> 2 * c & 3;
        s->q[i] = (int8_t)((low | high << 4) - 32);
    }
}

static void q6_k_values_encode(const int8_t *q, uint8_t *b) {
    memset(b, 0, 192);
    for (int i = 0; i < SUPER_BLOCK; i++) {
        int half = i / 128, c = i / 32 % 4, v = q[i] + 32;
        b[half * 64 + c % 2 * 32 + i % 32] |= (uint8_t)((v & 15) << c / 2 * 4);
        b[128 + half * 32 + i % 32] |= (uint8_t)(v >> 4 << 2 * c);
    }
}

static void q6_k_encode(const struct quant_block *s, uint8_t *b) {
    q6_k_values_encode(s->q, b);
    memcpy(b + 192, s->s, sizeof s->s);
    memcpy(b + 208, &s->d, sizeof s->d);
}

static void q6_k_quantize(const float *x, uint8_t *b) {
    float scales[Q6_GROUPS];
    int8_t q[SUPER_BLOCK];
    kernels_get()->symmetric_fit(x, scales, q);
    float extreme = extreme_of(scales, Q6_GROUPS);
    if (fabsf(extreme) < 1e-15f) {
        memset(b, 0, 210);
        return;
    }
    float inverse = -128.0f / extreme;
    f16_write(b + 208, 1 / inverse);
    float d = f16_read(b + 208);
    for (int j = 0; j < Q6_GROUPS; j++)
        b[192 + j] = (uint8_t)clip(round_to_int(inverse * scales[j]), -128, 127);
    for (int j = 0; j < Q6_GROUPS; j++) {
        const float step = d * (float)(int8_t)b[192 + j];
        for (int i = j * Q6_GROUP; step != 0 && i < (j + 1) * Q6_GROUP; i++)
            q[i] = (int8_t)clip(round_to_int(x[i] / step), -32, 31);
    }
    q6_k_values_encode(q, b);
}

/* The fields are those of struct tensor_type_traits, in its order. */
static const struct tensor_type_traits tensor_type_table[] = {
    {.type = TENSOR_F32, .name = "f32", .block = 1, .bytes = 4},
    {.type = TENSOR_F16, .name = "f16", .block = 1, .bytes = 2},
    {.type = TENSOR_BF16, .name = "bf16", .block = 1, .bytes = 2},
    {TENSOR_Q8_0, "q8_0", QK, 34, QK, LAYOUT_Q8, 0, false, q8_0_decode, q8_0_quantize, q8_0_encode},
    {TENSOR_Q4_0, "q4_0", QK, 18, QK, LAYOUT_Q4, 8, false, q4_0_decode, q4_0_quantize, q4_0_encode},
    {TENSOR_Q4_1, "q4_1", QK, 20, QK, LAYOUT_Q4, 0, true, q4_1_decode, q4_1_quantize, q4_1_encode},
    {TENSOR_Q5_0, "q5_0", QK, 22, QK, LAYOUT_Q8, 0, false, q5_0_decode, q5_0_quantize, q5_0_encode},
    {TENSOR_Q5_1, "q5_1", QK, 24, QK, LAYOUT_Q8, 0, true, q5_1_decode, q5_1_quantize, q5_1_encode},
    {TENSOR_Q4_K, "q4_k", SUPER_BLOCK, 144, QK, LAYOUT_Q4_K, 0, true, q4_k_decode, q4_k_quantize,
     q4_k_encode},
    {TENSOR_Q5_K, "q5_k", SUPER_BLOCK, 176, QK, LAYOUT_Q8_K, 0, true, q5_k_decode, q5_k_quantize,
     q5_k_encode},
    {TENSOR_Q6_K, "q6_k", SUPER_BLOCK, 210, Q6_GROUP, LAYOUT_Q6, 0, false, q6_k_decode,
     q6_k_quantize, q6_k_encode},
    {.type = TENSOR_NF4, .name = "nf4", .block = QK, .bytes = QK / 2, .layout = LAYOUT_NF4},
};

const struct tensor_type_traits *tensor_type_traits_find(enum tensor_type t) {
    for (size_t i = 0; i < ARRAY_LEN(tensor_type_table); i++)
        if (tensor_type_table[i].type == t) return &tensor_type_table[i];
    return NULL;
}

bool tensor_type_is_known(uint32_t number) {
    return tensor_type_traits_find((enum tensor_type)number) != NULL;
}

const char *tensor_type_name(enum tensor_type t) {
    const struct tensor_type_traits *traits = tensor_type_traits_find(t);
    return traits ? traits->name : "unknown";
}

int tensor_type_parse(const char *name, enum tensor_type *out) {
    for (size_t i = 0; i < ARRAY_LEN(tensor_type_table); i++)
        if (strcmp(tensor_type_table[i].name, name) == 0) {
            *out = tensor_type_table[i].type;
            return OK;
        }
    return ERR_USAGE;
}

const char *tensor_type_list(void) {
    return "f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k or nf4";
}

int tensor_type_block_size(enum tensor_type t) {
    const struct tensor_type_traits *traits = tensor_type_traits_find(t);
    CHECK(traits);
    return traits->block;
}

bool tensor_type_is_quantized(enum tensor_type t) {
    return tensor_type_block_size(t) > 1;
}

static int64_t nf4_blocks(int64_t k) {
    return (k + NF4_BLOCK - 1) / NF4_BLOCK;
}

size_t tensor_row_bytes(enum tensor_type t, int64_t k) {
    const struct tensor_type_traits *traits = tensor_type_traits_find(t);
    CHECK(traits && k >= 0 && k % traits->block == 0);
    size_t scales = t == TENSOR_NF4 ? sizeof(float) + (size_t)nf4_blocks(k) : 0;
    return scales + (size_t)(k / traits->block) * (size_t)traits->bytes;
}

enum tensor_type tensor_type_fallback(enum tensor_type t, int64_t k) {
    if (k % tensor_type_block_size(t) == 0) return t;
    enum tensor_type next = t == TENSOR_Q4_K   ? TENSOR_Q5_0
                            : t == TENSOR_Q5_K ? TENSOR_Q5_1
                            : t == TENSOR_Q6_K ? TENSOR_Q8_0
                                               : TENSOR_F16;
    return tensor_type_fallback(next, k);
}

static void nf4_decode(const uint8_t *src, float *dst, int64_t k) {
    const uint8_t *bytes = src + sizeof(float), *nibbles = bytes + nf4_blocks(k);
    float scale;
    memcpy(&scale, src, sizeof scale);
    float unit = scale / NF4_UNIT;
    for (int64_t i = 0; i < k; i++) {
        uint8_t byte = nibbles[i / QK * (QK / 2) + i % (QK / 2)];
        int nibble = i % QK < QK / 2 ? byte & 15 : byte >> 4;
        dst[i] = (float)(bytes[i / NF4_BLOCK] * nf4_codes[nibble]) * unit;
    }
}

/* Sets codes[i] to the index of the value nf4_codes[…] · unit that is nearest to x[i] (the lower
 * one of two equally near values), and returns the squared error of all n weights. The index is the
 * number of midpoints between adjacent values that are below the weight. */
static float nf4_round_to_codes(const float *x, int n, float unit, uint8_t *codes) {
    float inverse = inverse_of(unit), v[NF4_BLOCK], error = 0;
    int32_t count[NF4_BLOCK] = {0};
    for (int i = 0; i < n; i++) v[i] = x[i] * inverse;
    for (int c = 0; c < 15; c++) {
        float middle = 0.5f * (float)(nf4_codes[c] + nf4_codes[c + 1]);
        for (int i = 0; i < n; i++) count[i] += v[i] > middle;
    }
    for (int i = 0; i < n; i++) {
        float diff = (float)nf4_codes[count[i]] * unit - x[i];
        error += diff * diff;
        codes[i] = (uint8_t)count[i];
    }
    return error;
}

/* Returns the scale byte with the smallest error, and sets `codes` for it. Tries bytes from the one
 * that represents the largest weight down to three quarters of it: a smaller byte clips the largest
 * weights but is more precise for the others. */
static uint8_t nf4_choose_scale(const float *x, int n, float unit, uint8_t *codes) {
    int top = clip_float(amax_of(x, n) * inverse_of(unit) / 127.0f + 0.5f, 0, 255), best = top;
    float least = nf4_round_to_codes(x, n, (float)top * unit, codes);
    for (int step = 1; step <= 8; step++) {
        uint8_t tried[NF4_BLOCK];
        int u = top - (top * step + 16) / 32;
        float error = nf4_round_to_codes(x, n, (float)u * unit, tried);
        if (error >= least) continue;
        least = error;
        best = u;
        memcpy(codes, tried, (size_t)n);
    }
    return (uint8_t)best;
}

static void nf4_quantize(const float *x, uint8_t *dst, int64_t k) {
    uint8_t *bytes = dst + sizeof(float), *nibbles = bytes + nf4_blocks(k), codes[NF4_BLOCK];
    float scale = 0;
    for (int64_t i = 0; i < k; i++) scale = fabsf(x[i]) > scale ? fabsf(x[i]) : scale;
    memcpy(dst, &scale, sizeof scale);
    for (int64_t i = 0; i < k; i += NF4_BLOCK) {
        int n = (int)MIN(NF4_BLOCK, k - i);
        bytes[i / NF4_BLOCK] = nf4_choose_scale(x + i, n, scale / NF4_UNIT, codes);
        for (int j = 0; j < n; j++) {
            uint8_t *to = &nibbles[(i + j) / QK * (QK / 2) + j % (QK / 2)];
            *to = (uint8_t)(j % QK < QK / 2 ? codes[j] : *to | codes[j] << 4);
        }
    }
}

static void block_decode(const struct tensor_type_traits *traits, const uint8_t *src, float *dst) {
    struct quant_block s;
    traits->decode(src, &s);
    for (int i = 0; i < traits->block; i++) {
        dst[i] = (float)s.q[i] * s.scale[i / traits->group];
        if (traits->mins) dst[i] += s.min[i / QK];
    }
}

static float half_decode(enum tensor_type t, const uint8_t *src) {
    uint16_t h;
    memcpy(&h, src, sizeof h);
    return t == TENSOR_F16 ? f16_to_f32(h) : bf16_to_f32(h);
}

void tensor_to_f32(enum tensor_type t, const void *src, float *dst, int64_t n) {
    const struct tensor_type_traits *traits = tensor_type_traits_find(t);
    const uint8_t *s = src; // rows in a file need not be aligned
    CHECK(traits && n % traits->block == 0);
    if (t == TENSOR_F32)
        memcpy(dst, src, (size_t)n * sizeof *dst);
    else if (t == TENSOR_NF4)
        nf4_decode(src, dst, n);
    else
        for (int64_t i = 0; i < n; i += traits->block, s += traits->bytes) {
            if (traits->decode)
                block_decode(traits, s, dst + i);
            else
                dst[i] = half_decode(t, s);
        }
}

void tensor_from_f32(enum tensor_type t, const float *src, void *dst, int64_t n) {
    const struct tensor_type_traits *traits = tensor_type_traits_find(t);
    uint8_t *out = dst;
    CHECK(traits && n % traits->block == 0);
    if (t == TENSOR_F32)
        memcpy(dst, src, (size_t)n * sizeof *src);
    else if (t == TENSOR_NF4)
        nf4_quantize(src, dst, n);
    else
        for (int64_t i = 0; i < n; i += traits->block, out += traits->bytes) {
            uint16_t h = t == TENSOR_F16 ? f32_to_f16(src[i]) : f32_to_bf16(src[i]);
            if (traits->quantize)
                traits->quantize(src + i, out);
            else
                memcpy(out, &h, sizeof h);
        }
}
