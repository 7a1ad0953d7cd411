/*
 * kernel: the declarations that the level files share, and the formulas that they all evaluate.
 *
 * Only the files of this folder and its tests include it. Every function that is defined here is
 * `static inline`: a level file is compiled with instructions that the processor may lack, so it
 * must not emit a symbol that the linker could choose for other files.
 *
 * Invariant: each slot that exists at several levels computes the same IEEE operations in the same
 * order at each of them. The vector levels compute several lanes at once, scalar.c one at a time.
 * fma(a, b, c) below is always the fused operation, a * b + c never is. The order of the sums of
 * dot, sum and the q types is in kernel.h.
 */
// clang-format off
/*
 * The elementwise formulas:
 *
 *   exp       x' = EXP_HI < x ? EXP_HI : x, then EXP_LO > x' ? EXP_LO : x' (the constant first, so NaN passes);
 *             t = fma(x', LOG2E, EXP_MAGIC), n = bits(t) - bits(EXP_MAGIC) as int32, z = t - EXP_MAGIC;
 *             r = fma(z, -LN2_LO, fma(z, -LN2_HI, x'));
 *             p = C6, then p = fma(p, r, C5) … C2, 1, 1;
 *             y = (p * 2^(n >> 1)) * 2^(n - (n >> 1)); y = FLT_MAX < y ? FLT_MAX : y
 *   silu_mul  y = (g / (1 + exp(-g))) * up
 *   gelu      u = x * fma(x * x, GELU_CUBIC, GELU_LINEAR), y = x / (1 + exp(-u)): x/2 (1 + tanh(u/2))
 *   rope      a' = fma(a, cos, -(b * sin)), b' = fma(b, cos, a * sin) with a = x[i], b = x[i + half]
 *   rmsnorm   r = 1 / sqrt(dot(x, x) / (float)n + eps), y = (x * r) * g
 *   max       lane = x > lane ? x : lane from -inf, at the end + 0.0f (so that -0 and +0 cannot differ)
 *   softmax   y = exp(x - max)
 *   adamw     m = fma(beta1, m, (1 - beta1) * g); v = fma(beta2, v, (1 - beta2) * (g * g));
 *             w = fma(-lr, (m / bc1) / (sqrt(v / bc2) + eps), w * (1 - lr * decay))
 *   quantize  amax over the block's |x| (NaN ignored, capped at FLT_MAX); d = amax / 127;
 *             when d < FLT_MIN the block is d = 0 and zeros; else u = x * (1 / d),
 *             u = u < -127 ? -127 : u > 127 ? 127 : u, q = round half even, NaN becomes 0.
 *             No input is undefined behaviour.
 */
// clang-format on
#ifndef SHOAL_KERNEL_INTERNAL_H
#define SHOAL_KERNEL_INTERNAL_H

#include <float.h>
#include <string.h>

#include "kernel/kernel.h"

/* Each function overwrites the slots of `k` for which its level has a faster function. They are
 * called in this order, lowest level first. */
void kernels_fill_scalar(struct kernels *k);
void kernels_fill_avx2(struct kernels *k);
void kernels_fill_avx512(struct kernels *k);
void kernels_fill_avx512bf16(struct kernels *k);
void kernels_fill_avxvnni(struct kernels *k); /* in avx2.c */
void kernels_fill_amx(struct kernels *k);

/* Asks the system for permission to use tiles in this process; returns whether it is granted. The
 * caller checks the processor's feature bits and XCR0 first. */
bool amx_request(void);

/* exp: e^r on |r| <= ln(2)/2 as 1 + r + r^2 (C2 + C3 r + … + C6 r^4), a weighted minimax fit with a
 * relative error of 3.2e-9. */
#define EXP_HI 89.0f     /* above ln(FLT_MAX): the result is capped at FLT_MAX */
#define EXP_LO (-104.0f) /* below ln(2^-150): the result rounds to 0 */
#define EXP_MAGIC 0x1.8p+23f
#define EXP_LOG2E 0x1.715476p+0f
#define EXP_LN2_HI 0x1.62e43p-1f
#define EXP_LN2_LO (-0x1.05c61p-29f)
#define EXP_C2 0x1.fffffcp-2f
#define EXP_C3 0x1.555492p-3f
#define EXP_C4 0x1.5558aep-5f
#define EXP_C5 0x1.12397cp-7f
#define EXP_C6 0x1.6a4f4ap-10f

/* One decoded file block of a quantised type: value i = q[i] · scale[i / group] (+ min[i / 32]). */
struct quant_block {
    int8_t q[256];
    float scale[16], min[8];
    /* The same scales and minima as in the file. A block of 32 weights has the scale d and the
     * minimum m, in f16; a super-block the scales d · s[…] (q6_k: s is signed) and the minima
     * -(m · u[…]). */
    uint16_t d, m;
    uint8_t s[16], u[8];
};
/* A row of the type table in quant.c. */
struct tensor_type_traits {
    enum tensor_type type;
    const char *name;
    int block, bytes; /* weights in a block, and its bytes; of nf4 without the scales */
    int group;        /* weights under one scale; 0 for types without `decode` */
    enum matrix_layout layout;
    int8_t zero; /* matrix.zero */
    bool mins;   /* the type has minima */
    void (*decode)(const uint8_t *block, struct quant_block *s);
    void (*quantize)(const float *x, uint8_t *block);
    void (*encode)(const struct quant_block *s,
                   uint8_t *block); /* the inverse of decode; NULL: decode has no inverse */
};
const struct tensor_type_traits *
tensor_type_traits_find(enum tensor_type t); /* NULL when unknown */

/* Inputs [k0, k1) of matrix_get_row; k0 and k1 are multiples of 32 if the type has blocks. */
void matrix_get_row_part(const struct matrix *m, int64_t i, int64_t k0, int64_t k1, float *out);
/* Returns `pool`, or NULL if a product of this size is faster in the calling thread. */
struct pool *matrix_pool_for(struct pool *pool, int64_t rows, int64_t n, int64_t k);

#define QK 32    /* weights in a block of the q types */
#define PANEL 16 /* outputs in a panel of a packed matrix */

enum { SUPER_BLOCK = 256, SUB_BLOCKS = SUPER_BLOCK / QK };
enum { Q6_GROUP = 16, Q6_GROUPS = SUPER_BLOCK / Q6_GROUP }; /* weights under one scale of q6_k */

#define NF4_BLOCK 64             /* weights under one byte of scale */
#define QUANTIZED16_MAX 32512.0f /* 256 · 127 */
#define NF4_UNIT 32385.0f        /* 255 · 127 */
#define NF4_OFFSET 128           /* makes every code an unsigned byte */

/* For the quantised layouts: the number of weights in a group, which share one scale (in LAYOUT_NF4
 * two groups share it), the bytes of one group of all 16 outputs of a panel, and the groups of a
 * record. */
static inline int layout_group(enum matrix_layout l) {
    return l == LAYOUT_Q6 ? 16 : QK;
}
static inline int layout_bytes(enum matrix_layout l) {
    return l == LAYOUT_Q8 || l == LAYOUT_Q8_K ? QK * PANEL : QK * PANEL / 2;
}
static inline int record_groups(enum matrix_layout l) {
    return l == LAYOUT_Q8 || l == LAYOUT_Q4 ? 2 : l == LAYOUT_Q6 ? 16 : 8;
}
/* The record of group g of a panel, and the group itself. */
static inline const uint8_t *record_at(const struct matrix *w, int64_t panel, int64_t g) {
    return (const uint8_t *)w->data + panel * w->panel_bytes +
           g / record_groups(w->layout) * w->record_bytes;
}
static inline const uint8_t *group_at(const struct matrix *w, int64_t panel, int64_t g) {
    return record_at(w, panel, g) + w->head_bytes +
           g % record_groups(w->layout) * layout_bytes(w->layout);
}
/* Sets the sizes of records and panels; w->layout, mins and k are set. */
static inline void record_sizes_set(struct matrix *w) {
    const int groups = record_groups(w->layout);
    const int64_t n = w->k / layout_group(w->layout);
    w->head_bytes = w->layout == LAYOUT_NF4                            ? 4 * PANEL
                    : w->layout != LAYOUT_Q8 && w->layout != LAYOUT_Q4 ? 20 * PANEL
                    : w->mins                                          ? 8 * PANEL
                                                                       : 4 * PANEL;
    w->record_bytes = w->head_bytes + groups * layout_bytes(w->layout);
    w->panel_bytes = (n + groups - 1) / groups * w->head_bytes + n * layout_bytes(w->layout);
}
static inline uint16_t half_at(const uint8_t *p, int i) {
    uint16_t h;
    memcpy(&h, p + 2 * i, sizeof h);
    return h;
}
/* The scale (nf4: the scale byte) and the minimum of group i of a record, for one output. */
static inline float record_scale(const uint8_t *record, int i, int output, enum matrix_layout l) {
    const int at = i * PANEL + output;
    if (l == LAYOUT_NF4) return (float)record[i / 2 * PANEL + output];
    if (l == LAYOUT_Q8 || l == LAYOUT_Q4) return f16_to_f32(half_at(record, at));
    const uint8_t s = record[4 * PANEL + at];
    return f16_to_f32(half_at(record, output)) * (l == LAYOUT_Q6 ? (float)(int8_t)s : (float)s);
}
static inline float record_min(const uint8_t *record, int i, int output, enum matrix_layout l) {
    const int at = i * PANEL + output;
    if (l == LAYOUT_Q8 || l == LAYOUT_Q4) return f16_to_f32(half_at(record + 4 * PANEL, at));
    return -(f16_to_f32(half_at(record + 2 * PANEL, output)) * (float)record[12 * PANEL + at]);
}

/* The scale (nf4: the scale byte) and the minimum of group g of output i. */
static inline float group_scale(const struct matrix *w, int64_t i, int64_t g) {
    return record_scale(record_at(w, i / PANEL, g), (int)(g % record_groups(w->layout)),
                        (int)(i % PANEL), w->layout);
}
static inline float group_min(const struct matrix *w, int64_t i, int64_t g) {
    return record_min(record_at(w, i / PANEL, g), (int)(g % record_groups(w->layout)),
                      (int)(i % PANEL), w->layout);
}

enum { MINS_BLOCKS = 256 }; /* blocks of a panel whose minima are widened at a time: 16 KiB */

/* Widens the minima of blocks [b0, b0 + n) of a panel; blocks up to the next multiple of 16 get
 * zeros. b0 is the first block of a record. `read` is the function of a level for one group. */
static inline void mins_widen_with(void (*read)(float *mins, const uint8_t *record, int g,
                                                enum matrix_layout l),
                                   float (*mins)[PANEL], const struct matrix *w, int64_t panel,
                                   int64_t b0, int64_t n) {
    const uint8_t *record = record_at(w, panel, b0);
    int64_t b = 0;
    for (; b < n; record += w->record_bytes)
        for (int g = 0; g < record_groups(w->layout) && b < n; g++, b++)
            read(mins[b], record, g, w->layout);
    for (; b % 16 != 0; b++) memset(mins[b], 0, sizeof mins[b]);
}

/* The sum of the integers of one int8 block. */
static inline int32_t block_sum(const int8_t *q) {
    int32_t s = 0;
    for (int i = 0; i < QK; i++) s += q[i];
    return s;
}

/* dtype_size, as a constant where `e` is one. */
static inline int elem_bytes(enum dtype e) {
    return e == DTYPE_F32 ? 4 : e == DTYPE_I8 ? 1 : 2;
}

/* Copies k inputs of one row, values q [K] and scales d [K/32], to row r of a tile of `rows` rows:
 * x [K/32][rows][32] and dx [K/32][rows]. */
static inline void int8_row_pack_tile(int8_t *x, float *dx, const int8_t *q, const float *d,
                                      int64_t k, int64_t r, int64_t rows) {
    for (int64_t b = 0; b < k / QK; b++) {
        memcpy(x + (b * rows + r) * QK, q + b * QK, QK);
        dx[b * rows + r] = d[b];
    }
}

/* Rounds half to even, for magnitudes below 2^22: the sum with 1.5 · 2^23 has no bit for a
 * fraction.
 */
static inline float round_even(float u) {
    return (u + 0x1.8p+23f) - 0x1.8p+23f;
}

static inline int clip(int v, int lo, int hi) {
    return v < lo ? lo : v > hi ? hi : v;
}

/* Rounds to the nearest integer, halves to even, for |v| < 2^22; the result for other values is
 * unspecified. After the addition the low bits of the mantissa are the integer. */
static inline int round_to_int(float v) {
    float shifted = v + 0x1.8p+23f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    return (bits & 0x7fffff) - 0x400000;
}

/* The value with the largest magnitude, with its sign; of equal magnitudes the first one. */
static inline float extreme_of(const float *x, int n) {
    float amax = 0, extreme = 0;
    for (int i = 0; i < n; i++) {
        const float magnitude = x[i] < 0 ? -x[i] : x[i];
        if (magnitude > amax) {
            amax = magnitude;
            extreme = x[i];
        }
    }
    return extreme;
}

struct value_range {
    float lo, hi;
};
static inline struct value_range range_of(const float *x, int n) {
    struct value_range r = {x[0], x[0]};
    for (int i = 1; i < n; i++) {
        r.lo = x[i] < r.lo ? x[i] : r.lo;
        r.hi = x[i] > r.hi ? x[i] : r.hi;
    }
    return r;
}

/* Bits [begin, n) of kernels.mask_random; `begin` is a multiple of 8. */
static inline void mask_random_from(uint8_t *mask, const uint32_t *random, int64_t begin, int64_t n,
                                    uint32_t threshold) {
    memset(mask + begin / 8, 0, (size_t)((n - begin + 7) / 8));
    for (int64_t i = begin; i < n; i++) {
        uint32_t half = random[i / 2] >> 16 * (i % 2) & 0xffff;
        mask[i / 8] |= (uint8_t)((half >= threshold) << i % 8);
    }
}

/* Candidate t of symmetric_fit maps the extreme value of its group to -(32 + order[t] / 10). */
enum { SYMMETRIC_RANGES = 19 };
static inline float symmetric_range(int t) {
    const int order = t == 0 ? 0 : t <= 9 ? t - 10 : t - 9;
    return 32.0f + 0.1f * (float)order;
}

/* The functions *_with are bodies of slots that each level file compiles with its own instructions;
 * `exp`, `dot` and `sum` are the functions of that level. */
static inline void act_backward_with(void (*exp)(float *, const float *, int64_t),
                                     float *restrict dx, float *restrict dup,
                                     const float *restrict dy, const float *restrict x,
                                     const float *restrict up, int64_t n, bool gelu) {
    for (int64_t c = 0; c < n; c++)
        dx[c] = gelu ? -x[c] * (GELU_LINEAR + GELU_CUBIC * (x[c] * x[c])) : -x[c];
    exp(dx, dx, n);
    for (int64_t c = 0; c < n; c++) {
        float sigma = 1.0f / (1.0f + dx[c]), y = x[c] * sigma,
              slope = gelu ? GELU_LINEAR + 3.0f * GELU_CUBIC * (x[c] * x[c]) : 1.0f,
              d = sigma + y * (1.0f - sigma) * slope;
        dx[c] = d * (up ? dy[c] * up[c] : dy[c]);
        if (up) dup[c] = y * dy[c];
    }
}

static inline void softmax_backward_with(float *restrict dp, const float *restrict p, float mean,
                                         float scale, int64_t n) {
    for (int64_t c = 0; c < n; c++) dp[c] = p[c] * (dp[c] - mean) * scale;
}

static inline void norm_gain_backward_with(const struct norm_rows *r, float *restrict dg,
                                           float *restrict db) {
    for (int64_t i = 0; i < r->rows; i++) {
        const float *x = r->x + i * r->ld, *dy = r->dy + i * r->ld, mean = r->mean[i],
                    rstd = r->rstd[i];
        for (int64_t c = 0; c < r->n; c++) dg[c] += dy[c] * ((x[c] - mean) * rstd);
        for (int64_t c = 0; db && c < r->n; c++) db[c] += dy[c];
    }
}

/* On entry u is dy. dx may be equal to u. */
static inline void norm_backward_with(float (*dot)(const float *, const float *, int64_t),
                                      float (*sum)(const float *, int64_t), float *dx, float *u,
                                      const float *x, const float *g, float mean, float rstd,
                                      bool centred, int64_t n, bool add) {
    for (int64_t c = 0; c < n; c++) u[c] *= g[c];
    float mean_u = centred ? sum(u, n) / (float)n : 0;
    float projection = dot(u, x, n) - mean * (mean_u * (float)n);
    projection = projection / (float)n * rstd * rstd * rstd;
    float offset = rstd * mean_u - projection * mean; // constant subtracted from all columns
    for (int64_t c = 0; c < n; c++) {
        float d = rstd * u[c] - projection * x[c] - offset;
        dx[c] = add ? dx[c] + d : d;
    }
}

/*
 * Large gemm_nn products. v is processed in slabs of GEMM_NN_KC rows. The columns of a slab are
 * packed as f32 in panels as wide as a tile of outputs; a panel stays in the first-level cache
 * while a block of rows of t is multiplied with it. Between two slabs an output is stored in y, so
 * it remains the one chain of multiply-adds that kernel.h defines. A row-major t (tj = 1) is read
 * in place, in blocks of GEMM_NN_MC_DIRECT rows. Another t is packed, in blocks of GEMM_NN_MC rows.
 * Exception: a column-major t (tm = 1) is read in place if v has at most GEMM_NN_NARROW columns (a
 * head's keys and values), too few for the packing to be worth its time.
 */
enum { GEMM_NN_KC = 256, GEMM_NN_MC = 96, GEMM_NN_MC_DIRECT = 384, GEMM_NN_NARROW = 64 };

struct gemm_nn_args { /* as in kernels.gemm_nn_f32 */
    float *y;
    const float *t;
    const void *v;
    int64_t ldy, tm, tj, rows, ldv, k, n;
};
/* The tile functions of a level. `tile` adds to y the product of up to `rows` rows of t and the
 * first n columns of a panel (all `width` columns if n is larger). */
struct gemm_nn_tiles {
    int rows, width;
    void (*pack)(float *panel, const void *v, int64_t ldv, int64_t k, int64_t n);
    void (*tile)(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj, const float *panel,
                 int64_t k, int64_t n, int rows);
};

/* Whether packing saves more time than it takes, as measured on AVX2. */
static inline bool gemm_nn_is_large(const struct gemm_nn_args *p) {
    return p->rows >= 16 && p->k >= 64 && p->n >= 16;
}

/* out[g][j][r] = t(g * group + r, j) */
static inline void gemm_nn_pack_a(float *out, const float *t, int64_t tm, int64_t tj, int64_t rows,
                                  int64_t k, int64_t group) {
    for (int64_t j = 0; j < k; j++)
        for (int64_t m = 0; m < rows; m += group) {
            float *to = out + m * k + j * group;
            const float *from = t + m * tm + j * tj;
            for (int64_t r = 0; r < MIN(group, rows - m); r++) to[r] = from[r * tm];
        }
}

/* Multiplies rows [m, m + rows) of t with the slab of v that begins at row j. `size`: bytes of an
 * element of v. */
static inline void gemm_nn_block(const struct gemm_nn_args *p, const struct gemm_nn_tiles *l,
                                 int64_t size, int64_t j, int64_t m, int64_t rows) {
    _Alignas(64) float panel[GEMM_NN_KC * 32], packed[GEMM_NN_KC * GEMM_NN_MC];
    int64_t k = MIN(p->k - j, GEMM_NN_KC), tm = p->tm, tj = p->tj;
    int64_t groups = (rows + l->rows - 1) / l->rows, group = (rows + groups - 1) / groups;
    const float *t = p->t + m * tm + j * tj;
    int64_t step = group * tm; // from one group of rows to the next
    if (tj != 1 && (tm != 1 || p->n > GEMM_NN_NARROW)) {
        gemm_nn_pack_a(packed, t, tm, tj, rows, k, group);
        t = packed, tm = 1, tj = group, step = group * k;
    }
    for (int64_t c = 0; c < p->n; c += l->width) {
        l->pack(panel, (const char *)p->v + (j * p->ldv + c) * size, p->ldv, k, p->n - c);
        for (int64_t g = 0; g < groups; g++)
            l->tile(p->y + (m + g * group) * p->ldy + c, p->ldy, t + g * step, tm, tj, panel, k,
                    p->n - c, (int)MIN(group, rows - g * group));
    }
}

static inline void gemm_nn_blocked(const struct gemm_nn_args *p, const struct gemm_nn_tiles *l,
                                   int64_t size) {
    const int64_t rows_at_once = p->tj == 1 ? GEMM_NN_MC_DIRECT : GEMM_NN_MC;
    for (int64_t j = 0; j < p->k; j += GEMM_NN_KC)
        for (int64_t m = 0; m < p->rows; m += rows_at_once)
            gemm_nn_block(p, l, size, j, m, MIN(p->rows - m, rows_at_once));
}

/*
 * A core reads memory at full speed (30 GB/s measured) only along one ascending run of cache lines,
 * and at a third of it from several short rows side by side. A product that reads rows side by side
 * therefore prefetches the bytes STREAM_AHEAD further on, in the order of addresses: the rows of a
 * tile are one run, of which each step of K prefetches as many bytes as it reads. Shorter rows than
 * STREAM_ROW bytes (an attention page, an adapter) are in the caches.
 */
enum { STREAM_AHEAD = 8192, STREAM_ROW = 1152 };

/* Spreads the prefetches over the steps of a product. A step prefetches at most PACE_MAX lines, so
 * that its own loads are not delayed; lines beyond that are not prefetched. */
static inline void prefetch_begin(struct prefetch_list *a, int64_t steps) {
    enum { PACE_MAX = 32 };
    int64_t lines = 0;
    for (int64_t i = 0; a && i < a->n; i++) lines += a->ranges[i].bytes / 64 + 1;
    if (a) a->lines_per_step = MIN((lines + steps - 1) / MAX(steps, 1), PACE_MAX);
}

static inline void prefetch_step(struct prefetch_list *a) {
    for (int64_t i = 0; a && i < a->lines_per_step && a->n > 0; i++) {
        __builtin_prefetch((const char *)a->ranges->address + a->bytes_done, 0, 3);
        if ((a->bytes_done += 64) < a->ranges->bytes) continue;
        a->ranges++, a->n--;
        a->bytes_done = 0;
    }
}

/* The dtype of weights that are rows, not panels. */
static inline enum dtype rows_dtype(const struct matrix *w) {
    if (w->layout != LAYOUT_ROW_MAJOR) return DTYPE_I8;
    return w->type == TENSOR_BF16 ? DTYPE_BF16 : w->type == TENSOR_F16 ? DTYPE_F16 : DTYPE_F32;
}

/* The weights of one panel of LAYOUT_BF16: [K rounded up to 32, / 2][16 outputs][2]. */
static inline const uint16_t *bf16_panel(const struct matrix *w, int64_t panel) {
    return (const uint16_t *)w->data + panel * PANEL * ((w->k + 31) / 32 * 32);
}

/*
 * The fast class without tiles: every output is one chain of multiply-adds, so the lanes of a vector
 * are adjacent outputs and no sum across lanes is needed. A tile is some rows by some panels of
 * such chains over the whole K. The weights are widened as they are loaded from the second-level
 * cache; widening takes one operation for each vector. With fewer rows, a tile has more panels, so
 * that there are enough independent chains to hide the latency of a multiply-add.
 */
struct bf16_gemm {
    float *y;
    int64_t ldy;
    const struct gemm_input *in;
    const struct matrix *w;
    int64_t n1; /* outputs from n1 on are not stored */
    bool add;
};
/* The functions for one number of rows; both start at row m and panel `panel`. */
struct bf16_gemm_tile {
    int panels; /* panels that multiply_panels computes */
    void (*multiply_panels)(const struct bf16_gemm *c, int64_t m, int64_t panel);
    void (*multiply_panel)(const struct bf16_gemm *c, int64_t m, int64_t panel); /* one panel */
};

/* Computes outputs [n0, c->n1) of all rows. tiles[r - 1] is for r rows, r at most `max_rows`. */
static inline void bf16_gemm_run(const struct bf16_gemm *c, int64_t n0,
                                 const struct bf16_gemm_tile *tiles, int64_t max_rows) {
    enum { CHAIN_BYTES = 262144 }; /* bytes of weights that all rows use at a time */
    const int64_t rows = c->in->rows, first = n0 / PANEL, end = (c->n1 + PANEL - 1) / PANEL;
    const int64_t width = MAX(CHAIN_BYTES / (bf16_panel(c->w, 1) - bf16_panel(c->w, 0)) / 2, 1);
    const int64_t step = rows > max_rows ? width : end;
    prefetch_begin(c->in->prefetch, (end - first) / tiles[MIN(rows, max_rows) - 1].panels *
                                        ((rows + max_rows - 1) / max_rows));
    for (int64_t p0 = first; p0 < end; p0 += step) {
        for (int64_t m = 0; m < rows; m += max_rows) {
            const struct bf16_gemm_tile *t = &tiles[MIN(rows - m, max_rows) - 1];
            const int64_t p1 = MIN(p0 + step, end);
            for (int64_t p = p0; p < p1; p += p + t->panels <= p1 ? t->panels : 1) {
                (p + t->panels <= p1 ? t->multiply_panels : t->multiply_panel)(c, m, p);
                prefetch_step(c->in->prefetch);
            }
        }
    }
}

#endif
