/*
 * kernel: weight matrices, and all numeric loops: matrix products, attention, and operations on
 * rows.
 *
 * A `struct kernels` is a table of function pointers: scalar functions first, then overwritten by
 * those that the processor and the system allow (feature bits, XCR0, the AMX permission call),
 * capped by SHOAL_CPU=scalar|avx2|avxvnni|avx512|avx512bf16|amx. Callers never name a level. The first call
 * of kernels_get() builds the tables; afterwards they are read-only and shared by threads.
 *
 * Arithmetic (a contract that holds at all levels; test/kernel/test_kernels.c checks it):
 *   exact class  f32 dot: 16 lanes, lane l sums k = l, l+16, … by fused multiply-add from +0, the
 *                tail padded with zeros. Then the lanes are added in a fixed tree: lanes l and
 *                l+8, then l and l+4, l and l+2, l and l+1.
 *                bf16 and f16 weights are widened to f32 and follow the same rule.
 *                q8/q4 dot: block b of 32 products (q6_k: 16) gives an exact integer s_b. With
 *                the scales dw_b of the weights and dx_b of the activations,
 *                acc = fma((float)s_b, dw_b * dx_b, acc) for b = 0, 1, … in order.
 *                Types with minima then add the f32 dot of minima and activation sums.
 *                nf4: dw_b is the block's byte, and the result is acc * (row_scale / 32385).
 *   fast class   with AVX512_BF16 or AMX, these products run in bf16 tiles (gemm_tiles): all rows
 *                times bf16 weights; with AMX, rows whose tokens are known before a step (prompts,
 *                scored text, training) times quantised weights; in full training also f32
 *                weights. w = bf16(matrix_get_row), x = bf16(x), in steps of 32 inputs in ascending
 *                order; each step is one TDPBF16PS, or sixteen VDPBF16PS (avx512bf16.c), whose bits
 *                differ. Rows that are being sampled are multiplied with quantised weights as in
 *                the exact class, which is faster for few rows. So the path depends on the row,
 *                never on the batch. For a known row, the sum of an adapter's low-rank part
 *                continues the sum of the base product (gemm_low_rank). Gradients of weights are
 *                computed in tiles too, in groups of 32 rows (gemm_tiles_grad).
 *                At lower levels, bf16 weights are multiplied with f32 activations
 *                (gemm_bf16_fast), without a conversion of the activations: one chain of fused
 *                multiply-adds per output, k ascending, from +0, the same bits at every level.
 *                Everything else is as in the exact class.
 * In both classes, the bits of output row m depend only on row m of x and on w: not on the number
 * of rows, not on threads. exp and similar functions are polynomials of this project, evaluated
 * with the same operations at every level.
 */
#ifndef SHOAL_KERNEL_H
#define SHOAL_KERNEL_H

#include "base/base.h"

enum cpu_level { CPU_SCALAR, CPU_AVX2, CPU_AVXVNNI, CPU_AVX512, CPU_AVX512BF16, CPU_AMX, CPU_LEVELS };
enum numeric_class { NUMERIC_EXACT, NUMERIC_FAST };

/* Weight types, numbered as in GGUF. NF4 exists only in Shoal (see NF4 below): its number spells
 * "SNF4" in a file, so that other programs refuse the file. */
enum tensor_type {
    TENSOR_F32 = 0,
    TENSOR_F16 = 1,
    TENSOR_Q4_0 = 2,
    TENSOR_Q4_1 = 3,
    TENSOR_Q5_0 = 6,
    TENSOR_Q5_1 = 7,
    TENSOR_Q8_0 = 8,
    TENSOR_Q4_K = 12,
    TENSOR_Q5_K = 13,
    TENSOR_Q6_K = 14,
    TENSOR_BF16 = 30,
    TENSOR_NF4 = 0x34464E53,
};
bool tensor_type_is_known(uint32_t number);       /* whether `number` is one of these types */
const char *tensor_type_name(enum tensor_type t); /* "q8_0" */
int tensor_type_parse(const char *name, enum tensor_type *out); /* OK or ERR_USAGE */
const char *tensor_type_list(void); /* "f32, f16, …" for messages and help */
int tensor_type_block_size(
    enum tensor_type t); /* 1, 32 or 256; the length of a row is a multiple of it */
bool tensor_type_is_quantized(
    enum tensor_type t); /* in the exact class multiplied with int8 activations */
size_t tensor_row_bytes(enum tensor_type t, int64_t k); /* bytes of a row of k values in a file */
/* The type in which rows of k values are written when t is requested: t if its block size divides
 * k, else llama.cpp's fallback (q4_k → q5_0, q5_k → q5_1, q6_k → q8_0), and f16 if 32 does not
 * divide k either. */
enum tensor_type tensor_type_fallback(enum tensor_type t, int64_t k);

/*
 * Blocks in a file, little-endian, scales in f16 (`d`, and for minima `m` or `dmin`):
 *   q8_0  d, 32 signed bytes                  value = q d
 *   q4_0  d, 16 bytes of nibbles              value = (q - 8) d; low nibbles: first 16 weights
 *   q4_1  d, m, 16 bytes of nibbles           value = q d + m
 *   q5_0  d, 4 bytes of fifth bits, nibbles   value = (q - 16) d; bit i belongs to weight i
 *   q5_1  d, m, fifth bits, nibbles           value = q d + m
 *   q4_k  d, dmin, 12 bytes of eight 6-bit scales s and minima u, 128 bytes of nibbles:
 *         256 weights, value = q (d s) - dmin u
 *   q5_k  the same with 32 bytes of fifth bits before the nibbles
 *   q6_k  128 bytes of nibbles, 64 of upper bit pairs, 16 signed scales s, d:
 *         256 weights, value = (q - 32) (d s)
 *   nf4   a row: f32 scale (the largest magnitude of the row), a byte u for each 64 weights (the
 *         last block may have 32), nibbles in the order of q4_0;
 *         value = (u code) (scale / 32385), 32385 = 255 · 127
 * NF4: the codes are QLoRA's 16 quantiles of the normal distribution (Dettmers et al. 2023) times
 * 127, rounded to whole numbers, so that a product is an integer dot. The byte u is the block's
 * scale relative to the row's scale, which corresponds to QLoRA's double quantisation. A weight
 * takes 4.125 + 32/K bits.
 */
struct block_q8_0 {
    uint16_t d;
    int8_t q[32];
};
struct block_q4_0 {
    uint16_t d;
    uint8_t q[16];
};
extern const int8_t nf4_codes[16];

float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f); /* round to nearest even */
float bf16_to_f32(uint16_t h);
uint16_t f32_to_bf16(float f); /* round to nearest even, NaN stays NaN */
/* Convert n values, whole blocks; for nf4 exactly one row. Quantisation follows llama.cpp's
 * reference, so files are byte-equal. Values that are not finite give a block that matrix_init
 * refuses, or a block with meaningless values. */
void tensor_to_f32(enum tensor_type t, const void *src, float *dst, int64_t n);
void tensor_from_f32(enum tensor_type t, const float *src, void *dst, int64_t n);

/* Element types of rows that are not stored in quantised blocks: KV pages, adapters. */
enum dtype { DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I8, N_DTYPE };

/* The layout of a matrix in memory. */
enum matrix_layout {
    LAYOUT_ROW_MAJOR, /* as in a file: f32, f16, bf16 */
    LAYOUT_BF16,      /* panels for the fast class */
    LAYOUT_ROWS_I8,   /* matrix_view: rows of int8 */
    LAYOUT_PAIRS_I8,  /* matrix_view: pairs of rows of int8, [N / 2][K][2] */
    LAYOUT_Q8,        /* int8, a scale for 32 weights */
    LAYOUT_Q8_K,      /* int8, super-blocks of 256 with scales and minima for 32 */
    LAYOUT_Q6,        /* int8, super-blocks of 256 with scales for 16 */
    LAYOUT_Q4,        /* nibbles, a scale for 32, weight = (nibble - zero) · scale */
    LAYOUT_Q4_K,      /* nibbles, super-blocks of 256 with scales and minima for 32 */
    LAYOUT_NF4,       /* nibbles, indices of nf4_codes; a scale byte for 64, an f32 for a row */
};

/*
 * A dense weight, N outputs × K inputs, ready to be multiplied. f32, f16, and bf16 in the exact
 * class, are used in the layout of the file: rows of K. Quantised types, and bf16 in the fast
 * class, are packed in panels of 16 outputs (the AMX B-tile order, which AVX2 and AVX-512 read as
 * well), N padded to 16 with zeros:
 *   int8    a group of 32 inputs (q6_k: 16) has [group / 4 quads][16 outputs][4]: byte j of quad p
 *           is weight 4p + j;
 *           q8_0, q5_0 (q - 16), q5_1 and q5_k (0..31 and minima), q6_k (q - 32);
 *   nibble  a group of 32 inputs has [4][16 outputs][4]: byte (p, n, j) has weight 4p + j in its
 *           low nibble and weight 16 + 4p + j in its high one;
 *           q4_0 (zero = 8), q4_1 and q4_k (zero = 0 and minima), nf4;
 *   bf16    data[panel][Kp/2 pairs][16 outputs][2] with Kp = K rounded up to 32, zero padded.
 * A panel of a quantised type is one ascending stream of records. A record has its scales (and
 * minima) first, as precise as in the file, and then its groups. The last record may have fewer:
 *   layout        groups  head
 *   Q8, Q4             2  f16 scales [2][16], and for types with minima f16 minima [2][16]
 *   Q8_K, Q4_K         8  f16 d [16] and dmin [16], bytes s [8][16] and u [8][16]: group g has the
 *                         scale d s[g] and the minimum -(dmin u[g])
 *   Q6                16  f16 d [16], 32 bytes of padding, signed bytes s [16][16]: scale d s[g]
 *   NF4                8  bytes [4][16], each for two groups; row_scales
 * The minimum is added to every weight of the group: a product adds
 * Σ_g min[n][g] · gemm_input.sum[g].
 */
struct matrix {
    enum tensor_type type;
    enum matrix_layout layout;
    bool packed; /* layout is not LAYOUT_ROW_MAJOR */
    bool mins;   /* the type has minima */
    int8_t zero; /* LAYOUT_Q4: the nibble that means 0 */
    int64_t n, k;
    const void *data;                 /* rows or panels; aligned to 64 when packed */
    int32_t head_bytes, record_bytes; /* of a whole record */
    int64_t panel_bytes;
    const float *row_scales; /* nf4: [N padded] */
};

/* Initialises `m` from rows in file order, with the threads of `pool` (may be NULL). `rows` must
 * outlive m if m uses them in place (f32, f16, and bf16 in the exact class). Packing allocates in
 * `arena`. `row_order` (may be NULL) maps output i to
 * its source row; it is used to permute rows for RoPE. */
int matrix_init(struct matrix *m, enum tensor_type type, int64_t n, int64_t k, const void *rows,
                const int32_t *row_order, enum numeric_class cls, struct pool *pool,
                struct arena *arena, struct error *err);
/* Initialises `m` without rows and reserves their space in `arena`. The caller then sets each of
 * the n rows once with matrix_set_row, in the file layout of `type`. */
int matrix_alloc(struct matrix *m, enum tensor_type type, int64_t n, int64_t k,
                 enum numeric_class cls, struct arena *arena, struct error *err);
int matrix_set_row(struct matrix *m, int64_t i, const void *row, struct error *err);
/* Initialises `m` from rows of any type that stay where they are, for matrix_get_row and
 * matrix_encode_row alone. */
int matrix_init_unpacked(struct matrix *m, enum tensor_type type, int64_t n, int64_t k,
                         const void *rows, struct error *err);
/* Writes row i of a quantised matrix to `out` with the same bytes as in the file. Returns false for
 * f32, f16 and bf16: the caller then uses matrix_get_row and tensor_from_f32, which are exact. */
bool matrix_encode_row(const struct matrix *m, int64_t i, void *out);
/* Whether products in the exact class read gemm_input.q and .d (and .sum, if m has minima). */
bool matrix_needs_int8(const struct matrix *m);

/* The numeric path of a product's rows of inputs. */
enum row_path {
    ROWS_EXACT,    /* the exact class; fast class: rows that are being sampled */
    ROWS_KNOWN,    /* fast class: rows whose tokens are known before the step */
    ROWS_TRAINING, /* fast class, full training: like ROWS_KNOWN, but f32 weights become bf16 too */
};
/* Whether products of m with rows of this path read gemm_input.tiles; false without tiles. */
bool matrix_uses_tiles(const struct matrix *m, enum row_path path);
/* A matrix over an adapter's rows, which the tiles of the fast class read in place. The scale of
 * int8 rows is not applied. `pairs`: int8 rows are stored in pairs. */
struct matrix matrix_view(enum dtype e, bool pairs, const void *rows, int64_t n, int64_t k);
/* Dequantises row i to f32 (embedding look-up, tests, copies for training). */
void matrix_get_row(const struct matrix *m, int64_t i, float *out);
size_t matrix_bytes(const struct matrix *m); /* bytes of its rows or panels, scales and minima */
/* The matrix_bytes of such a matrix, even if matrix_init would use the rows in place. */
size_t matrix_bytes_of(enum tensor_type type, int64_t n, int64_t k, enum numeric_class cls);

/* Memory that will be read soon. A packed product whose gemm_input has such a list prefetches a few
 * cache lines after every few rows and panels, so that the loads overlap with arithmetic. */
struct prefetch_range {
    const void *address;
    int64_t bytes;
};
struct prefetch_list {
    const struct prefetch_range *ranges; /* [n] ranges that are not yet prefetched completely */
    /* bytes_done: bytes of ranges[0] that are prefetched already; lines_per_step: cache lines that
     * a step of the current product prefetches */
    int64_t n, bytes_done, lines_per_step;
};

/*
 * Low-rank parts of a product in tiles: for rows [begin, end) the product is x wᵀ + t v, and t v
 * continues the chain of sums of x wᵀ. t is in bf16. Arrays of two have the part of gate in [0] and
 * that of up in [1]; a product that is not gated uses only [0].
 */
enum { LOW_RANK_MAX = 64, LOW_RANK_STEPS = LOW_RANK_MAX / 32 };
struct low_rank_part {
    struct matrix v; /* a matrix_view [ranks][N] */
    int64_t column;  /* the column of t for row 0 of v: even; all columns are below LOW_RANK_MAX */
};
struct low_rank_rows {
    int64_t begin, end;
    int n_parts[2];
    const struct low_rank_part *parts[2]; /* [n_parts] */
};
struct gemm_low_rank {
    const uint16_t *t[2]; /* [rows / 16 rounded up][LOW_RANK_STEPS][16][32], zero padded */
    const struct low_rank_rows *rows; /* [n] ascending; other rows have no parts */
    int n;
};

/*
 * The inputs of a product, prepared once for all matrices that read them: f32 rows, and (if a
 * matrix needs them) the same rows in int8 blocks of 32 (d = amax / 127, q = round-half-even(x *
 * (1/d))) or in tiles of bf16.
 */
struct gemm_input {
    enum row_path path;
    int64_t rows, k, ldx;
    int64_t skip;   /* tiles: number of rows at the start, below 16, whose outputs are not stored */
    const float *x; /* [rows][ldx] */
    int8_t *q;      /* [rows][K] */
    float *d;       /* [rows][K/32] */
    float *sum;     /* [rows][K/32]: d · Σ q of the block */
    int32_t *q_sum; /* [rows][K/32]: Σ q of the block; NULL: products compute it */
    int8_t *q_tiles; /* q in tiles of int8_tile_rows: [tiles][K/32][tile rows][32]; or NULL */
    float *d_tiles;  /* d in the same tiles: [tiles][K/32][tile rows] */
    uint16_t *tiles; /* [rows / 16 rounded up][K / 32 rounded up][16][32] bf16, zero padded */
    const struct gemm_low_rank *low_rank; /* tiles: low-rank parts of the product, or NULL */
    int64_t low_rank_row; /* the row of low_rank that belongs to row 0 here; a multiple of 16 */
    struct prefetch_list *prefetch; /* prefetches of one thread, or NULL */
};

/* The arguments of kernels.gated_backward: one row. A row of tiles has values [32 i, 32 i + 32)
 * from element 512 i on. */
struct gated_backward_row {
    const uint16_t *gate, *up; /* rows of tiles: x gateᵀ and x upᵀ */
    const float *dact;
    uint16_t *act_tiles, *dgate_tiles, *dup_tiles; /* outputs: rows of tiles */
    float *act, *dgate, *dup;                      /* the same in f32; or all NULL */
};

/* The matrices and outputs of a gated MLP. act = silu(x gateᵀ) · (x upᵀ), in tiles of bf16 that can
 * be gemm_input.tiles of the next product. gate_out and up_out are x gateᵀ and x upᵀ, which
 * training needs; otherwise they are NULL. */
struct gemm_gated {
    const struct matrix *gate, *up;
    uint16_t *act, *gate_out, *up_out; /* [rows / 16 rounded up][N / 32 rounded up][16][32] */
};

/* A product in tiles whose outputs are the logits v = scale · x wᵀ of a softmax. They are not
 * stored; it computes e = exp(v - shift[row]). Arrays of rows have a multiple of 16 rows. */
struct gemm_softmax {
    float scale;
    const float *shift;
    float (*sums)[16]; /* [rows]: += e of columns 0, 16, 32 … in lane 0, 1, 17 … in lane 1, …; or
                          NULL */
    const float *weight; /* [rows]; 0 in rows that do not exist */
    uint16_t *grads;     /* bf16(weight · e), in tiles of 32 columns from n0 on; or NULL */
};

/* The gradient of a weight matrix in tiles: dW[n][k] += Σ over rows of dY[row][n] X[row][k]. Each
 * step of the tiles adds a group of 32 rows, in order; the last group may have fewer rows. */
struct weight_grad_job {
    float *dw;           /* [n][k] */
    const float *dy, *x; /* [rows][n], [rows][k] */
    int64_t rows, n, k;
    uint16_t *pairs; /* x packed: [K / 16 rounded up][groups][16 pairs of rows][16][2], bf16 */
};

/* The gradient of a low-rank factor in tiles: g[r][c] += Σ over rows of factor · t[row][r] ·
 * x[row][c]. Each step of the tiles adds a group of 32 rows, in order; the last group may have
 * fewer rows. */
struct low_rank_grad_job {
    float *g; /* [ranks][ld], or transposed [columns][ld] */
    int64_t ld, ranks;
    bool transposed;
    const float *t; /* [rows][ldt] */
    int64_t ldt;
    float factor;
    const struct gemm_input *x; /* its tiles are read, from row `row` on */
    int64_t row, rows;
};

/* n columns of the input of a norm, and the statistics of its rows. */
struct norm_rows {
    const float *x, *dy; /* [rows][ld], n columns */
    const float *mean, *rstd;
    int64_t ld, rows, n;
};

/* How affine_fit searches: q in 0..top; the ranges tried are top + from + by · step, step in
 * 0..steps. */
struct affine_search {
    int top, steps;
    float from, by;
};

struct attention_job;
struct attention_backward_job;

struct kernels {
    enum cpu_level level;
    const char *name;
    /* Whether known rows times quantised weights run in tiles; below AMX the int8 products of the
     * exact class are faster. */
    bool quantized_tiles;

    /* y[m][n] (+)= Σ_k x[m][k] w[n][k] for n in [n0, n1); y is [rows][ldy]. With `add` the finished
     * dot is added to y; otherwise y is overwritten. */
    void (*gemm_f32)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     const float *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
    void (*gemm_bf16)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                      const uint16_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
    /* The same for weights in f16 and int8 (KV pages and adapters), which are widened to f32. The
     * caller applies the scale of int8 weights. */
    void (*gemm_f16)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     const uint16_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
    void (*gemm_i8)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                    const int8_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
    /* y += t v, with v not transposed: y[m][c] = fma(t(m, j), v[j][c], y[m][c]) for j = 0, 1, … k-1
     * in order, c in [0, n), with t(m, j) = t[m * tm + j * tj]. Uses: probabilities times values in
     * attention; h Bᵀ of a low-rank product, with v = Bᵀ; and the products of a backward pass, dX =
     * dY W with v the rows of W, and dW = dYᵀ X with tm = 1 and v the rows of X. */
    void (*gemm_nn_f32)(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj, int64_t rows,
                        const float *v, int64_t ldv, int64_t k, int64_t n);
    void (*gemm_nn_bf16)(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
                         int64_t rows, const uint16_t *v, int64_t ldv, int64_t k, int64_t n);
    void (*gemm_nn_f16)(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj, int64_t rows,
                        const uint16_t *v, int64_t ldv, int64_t k, int64_t n);
    void (*gemm_nn_i8)(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj, int64_t rows,
                       const int8_t *v, int64_t ldv, int64_t k, int64_t n);
    /* int8 inputs times int8 weights, for adapters over a quantised base: y[m][n] = Σ_k (d q)[m][k]
     * w[n][k]. There are 8 lanes. For each block b = 0, 1, …, lane l sums the products of bytes 4l
     * to 4l+3 as an exact integer p, and lane = fma((float)p, d_b, lane). Then lanes l and l+4 are
     * added, then l and l+2, then l and l+1. */
    void (*gemm_i8_i8)(float *y, int64_t ldy, const struct gemm_input *in, const int8_t *w,
                       int64_t ldw, int64_t n0, int64_t n1);
    /* y[m][c] = fma((float)Σ_j (t[m][2j] v[j][c][0] + t[m][2j+1] v[j][c][1]), s[m], y[m][c]), j in
     * [0, pairs), c in [0, n). There are at most 256 pairs, so that the integer sum fits into 32
     * bits. ldv counts pairs of bytes. */
    void (*gemm_nn_i16_i8)(float *y, int64_t ldy, const int16_t *t, int64_t ldt, const float *s,
                           int64_t rows, const int8_t *v, int64_t ldv, int64_t pairs, int64_t n);
    /* Products of packed layouts. n0 is a multiple of 16; n1 too, unless it is N. */
    /* gemm_q8: int8 panels; gemm_q4: nibble panels. gemm_mins adds the minima afterwards: y[m][n]
     * += the f32 dot of in->sum[m] and the minima of output n, by the rule of gemm_f32. n0 is a
     * multiple of 16. */
    void (*gemm_q8)(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                    int64_t n0, int64_t n1, bool add);
    void (*gemm_q4)(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                    int64_t n0, int64_t n1, bool add);
    void (*gemm_mins)(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                      int64_t n0, int64_t n1);
    /* The scales (nf4: the scale bytes) and, unless `mins` is NULL, the minima of group g of a
     * record, for its 16 outputs. */
    void (*record_read)(float *scales, float *mins, const uint8_t *record, int g,
                        enum matrix_layout l);
    /* The number of rows of a tile in gemm_input.q_tiles for an input of `rows` rows; 0: gemm_q8
     * and gemm_q4 read q instead. NULL below AMX. */
    int64_t (*int8_tile_rows)(int64_t rows);
    /* LAYOUT_BF16 times f32 rows: the fast class without tiles. */
    void (*gemm_bf16_fast)(float *y, int64_t ldy, const struct gemm_input *in,
                           const struct matrix *w, int64_t n0, int64_t n1, bool add);
    /* From here to gated_backward: the fast class with tiles; NULL below avx512bf16.
     * gemm_tiles: y (+)= x wᵀ from in->tiles, for weights of every layout except LAYOUT_PAIRS_I8,
     * which only gemm_tiles_backward and low-rank parts read. Weights may be a matrix_view.
     * gemm_tiles_backward: dx[m][i] (+)= Σ_o dy[m][o] w[o0 + o][i] for inputs [k0, k1), from
     * dy->tiles; k0 and o0 are multiples of 32.
     * tiles_pack_row: writes values [32 i, 32 i + 32) of x to out from element 512 i on, in bf16,
     * zero padded. */
    void (*gemm_tiles)(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                       int64_t n0, int64_t n1, bool add);
    /* The products of a gated MLP for outputs [n0, n1) of gate and up, with the bits of gemm_tiles,
     * silu_mul and tiles_pack_row. n0 is a multiple of 32; n1 too, unless it is N. */
    void (*gemm_tiles_silu)(const struct gemm_gated *g, const struct gemm_input *in, int64_t n0,
                            int64_t n1);
    /* Outputs [n0, n1); n0 is a multiple of 32. The logits have the bits of gemm_tiles. */
    void (*gemm_tiles_softmax)(const struct gemm_softmax *s, const struct gemm_input *in,
                               const struct matrix *w, int64_t n0, int64_t n1);
    void (*gemm_tiles_backward)(float *dx, int64_t lddx, const struct gemm_input *dy,
                                const struct matrix *w, int64_t o0, int64_t k0, int64_t k1,
                                bool add);
    void (*tiles_pack_row)(const float *x, int64_t k, uint16_t *out);
    /* Copies a row of tiles of k values; those whose bit of `mask` is 0 become 0. */
    void (*tiles_mask_row)(uint16_t *out, const uint16_t *row, const uint8_t *mask, int64_t k);
    /* gemm_tiles_grad computes outputs [n0, n1) of the gradient from job->pairs and job->dy; n0 is
     * a multiple of 32. dY and X are rounded to bf16; sums start from dW and are f32.
     * tiles_pack_pairs packs one group of 32 rows of job->x into job->pairs. */
    void (*gemm_tiles_grad)(const struct weight_grad_job *job, int64_t n0, int64_t n1);
    void (*tiles_pack_pairs)(const struct weight_grad_job *job, int64_t group);
    /* Columns [c0, c1) of the gradient; c0 is a multiple of 32. factor · t is rounded to bf16; sums
     * start from g and are f32. */
    void (*gemm_tiles_low_rank_grad)(const struct low_rank_grad_job *job, int64_t c0, int64_t c1);
    /* Backward of one row of a gated MLP: recomputes act = y · up with y = gate · sigmoid(gate),
     * and computes dgate and dup from dact with the bits of act_backward. */
    void (*gated_backward)(const struct gated_backward_row *r, int64_t n);

    void (*quantize_row)(const float *x, int64_t k, int8_t *q,
                         float *d); /* see struct gemm_input */
    /* Of each int8 block b: q_sum[b] = Σ q, by which products multiply the offsets of weights, and
     * sum[b] = d[b] · Σ q, by which they multiply the minima. */
    void (*block_sums)(int32_t *q_sum, float *sum, const int8_t *q, const float *d, int64_t blocks);
    /* The same to 16 bits: d = amax / 32512, which is 256 · 127 (QUANTIZED16_MAX). */
    void (*quantize_row16)(const float *x, int64_t k, int16_t *q, float *d);
    /* q = x · by / 2^23 of 16-bit quantised values, in -127..127. It is rounded in two steps:
     * h(h(x, by), 128) with h(a, b) = (a b + 2^14) >> 15. */
    void (*multiply_to_int8)(const int16_t *x, const int16_t *by, int64_t k, int8_t *q);

    /* The searches of the quantisers (quant.c) in one super-block x [256]; each block or group is
     * independent of the others. The results are unspecified if x has a NaN.
     * affine_fit, of q4_k and q5_k: x ≈ scale q + min with min <= 0, in each of 8 blocks of 32. The
     * first candidate maps the range of the block to 0..top. Each further one maps it to another
     * range (struct affine_search) from the minimum of the best one so far, as in llama.cpp, clips,
     * and has the scale and minimum with the smallest error for its integers. The candidate with
     * the smallest error, weighted by |x| + rms(x), is the result.
     * symmetric_fit, of q6_k: x ≈ scale q with q in -32..31, in each of 16 groups of 16. Tries
     * nineteen ranges, and for the integers of each the scale with the smallest error, weighted by
     * x². */
    void (*affine_fit)(const float *x, const struct affine_search *s, float *scale, float *min,
                       int8_t *q);
    void (*symmetric_fit)(const float *x, float *scale, int8_t *q);

    float (*dot)(const float *a, const float *b, int64_t n); /* the 16-lane rule */
    float (*sum)(const float *a, int64_t n);                 /* 16 lanes of adds, same tree */
    float (*max)(const float *a, int64_t n);                 /* NaN is ignored; -inf when n == 0 */
    void (*axpy)(float *y, float a, const float *x, int64_t n); /* y = fma(a, x, y) */
    void (*scale)(float *y, float a, int64_t n);
    /* Dropout. mask_random sets n bits of `mask`, two from each of (n + 1) / 2 random numbers, that
     * of the low half first: 1 if the half is at least `threshold`, below 65536. Further bits of
     * the last byte become 0. mask_multiply: y = x · factor where a bit is 1 and x · 0 elsewhere,
     * or with `add` y + that product. */
    void (*mask_random)(uint8_t *mask, const uint32_t *random, int64_t n, uint32_t threshold);
    void (*mask_multiply)(float *y, const float *x, const uint8_t *mask, float factor, int64_t n,
                          bool add);
    void (*rmsnorm)(float *y, const float *x, const float *g, float eps,
                    int64_t n); /* y = x * (1/sqrt(dot(x,x)/n+eps)) * g */
    void (*rope)(float *x, const float *cos, const float *sin,
                 int64_t half); /* pairs (i, i+half): HF order */
    void (*silu_mul)(float *y, const float *gate, const float *up,
                     int64_t n); /* y = gate*sigmoid(gate)*up */
    void (*gelu)(float *y, const float *x,
                 int64_t n); /* the tanh form ("gelu_new"); see GELU_LINEAR */
    /* Backward of y = f(x) · up, where f is silu or gelu: dx = f'(x) · (dy · up), dup = dy · f(x).
     * If `up` is NULL: y = f(x), dx = f'(x) · dy, and dup is not written. */
    void (*act_backward)(float *dx, float *dup, const float *dy, const float *x, const float *up,
                         int64_t n, bool gelu);
    void (*exp)(float *y, const float *x, int64_t n); /* in [0, FLT_MAX], or NaN; exp(-inf) = 0 */
    /* y = exp(x - max) in place, returns the sum by the `sum` rule (the caller divides). */
    float (*softmax)(float *x, int64_t n);
    /* Backward of a softmax of scaled scores: dp = p (dp - mean) scale, where mean is Σ p dp. */
    void (*softmax_backward)(float *dp, const float *p, float mean, float scale, int64_t n);
    /* Backward of a norm y = x̂ ⊙ g (+ b), x̂ = (x - mean) rstd. norm_gain_backward: dg += dy x̂ and
     * (unless db is NULL) db += dy, in the order of rows. norm_backward, for one row: u = dy ⊙ g
     * replaces dy, and dx (+)= rstd (u - mean(u) - x̂ mean(u ⊙ x̂)). A LayerNorm is `centred`; an RMS
     * norm is not: its mean is 0 and it has no term mean(u). dx may be dy unless `add`. */
    void (*norm_gain_backward)(const struct norm_rows *rows, float *dg, float *db);
    void (*norm_backward)(float *dx, float *dy, const float *x, const float *g, float mean,
                          float rstd, bool centred, int64_t n, bool add);
    /* dst[c][r] = src[r][c]. */
    void (*transpose)(float *dst, int64_t ld_dst, const float *src, int64_t ld_src, int64_t rows,
                      int64_t cols);
    /* AdamW on n values: m, v, w updated in place; bc1/bc2 are the bias corrections 1-β^t.
     * Elementwise. */
    void (*adamw)(float *w, const float *g, float *m, float *v, int64_t n, float lr, float beta1,
                  float beta2, float eps, float decay, float bc1, float bc2);

    /* Causal attention of the fast class (struct attention_job). These four are NULL without
     * tiles. */
    void (*attention)(const struct attention_job *job);
    size_t (*attention_scratch)(int64_t head_dim); /* bytes for one thread */
    void (*attention_backward)(const struct attention_backward_job *job);
    size_t (*attention_backward_scratch)(int64_t head_dim, int64_t rows);
};

/* gelu(x) = x σ(x (GELU_LINEAR + GELU_CUBIC x²)); GELU_LINEAR = 2 sqrt(2/π), GELU_CUBIC = 0.044715
 * GELU_LINEAR. */
#define GELU_LINEAR 0x1.988454p+0f
#define GELU_CUBIC 0x1.2444f2p-4f

/* The table for this process: that of the best available level, capped by SHOAL_CPU. An invalid
 * SHOAL_CPU does not limit the level; kernels_check_level then returns ERR_USAGE. */
const struct kernels *kernels_get(void);
int kernels_check_level(struct error *err);
/* The table of one level, or NULL if the machine does not support it. For tests and benches. */
const struct kernels *kernels_for_level(enum cpu_level level);
/* The class that the options "exact" and "fast" select, which exclude each other; neither:
 * fast where the level has tiles, else exact. */
enum numeric_class numeric_class_of(bool exact, bool fast);
/* The name of the bits that a class has in this process: "exact", or for the fast class by level
 * "fast-f32", "fast-avx512bf16", "fast-amx". */
const char *numeric_class_name(enum numeric_class cls);
/* Sets *out to the class of such a name, and returns whether this process gives its bits. Files of
 * earlier versions have "fast" and the level. */
bool numeric_class_find(const char *name, const char *level, enum numeric_class *out);
const char *cpu_level_name(enum cpu_level level);
bool cpu_has_level(enum cpu_level level);

/* Bytes of one element. */
size_t dtype_size(enum dtype e);
int dtype_parse(const char *name, enum dtype *out,
                struct error *err); /* "f32", "bf16", "f16", "i8" */
const char *dtype_name(enum dtype e);
/* Converts n values. i8: writes value / d, rounded half to even, and returns d = amax / 127 (0 if
 * that is below FLT_MIN). The other dtypes return 1. */
float dtype_from_f32(enum dtype e, const float *src, void *dst, int64_t n);
/* Writes n values divided by d, rounded half to even and clamped to -127..127. NaN becomes 0. If d
 * is 0, all become 0. */
void i8_from_f32(const float *src, float d, int8_t *dst, int64_t n);
float row_amax(const float *x, int64_t n); /* the largest |x|; unspecified if x has a NaN */
/* Call the slot gemm_* (x wᵀ) or gemm_nn_* (t v) of dtype `e`. */
void gemm_nt(enum dtype e, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
             const void *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
void gemm_nn(enum dtype e, float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
             int64_t rows, const void *v, int64_t ldv, int64_t k, int64_t n);
/* y += Σ_r t_r v_r over n int8 rows v_r of `width` values, stored in pairs, [n / 2][ldv][2]. t is
 * rounded to 16 bits relative to its row's largest value, so that the sum is an integer sum. n is
 * even and at most 64. */
void gemm_nn_i8_pairs(float *y, int64_t ldy, const float *t, int64_t ldt, int64_t rows,
                      const int8_t *v, int64_t ldv, int64_t n, int64_t width);

/*
 * Attention of one kv head in bf16: out = softmax(scale q Kᵀ) V for every query. q, K and V are
 * rounded to bf16 (to nearest even; int8 after its scale), so keys in f32 and the same keys in bf16
 * give the same bits. Scores, sums and the running maximum are f32. exp(score - maximum) is summed
 * in f32, then rounded to bf16 for the product with V; it is +0 for a masked key.
 *
 * The bits of a query's result depend only on that query, its range of positions, and the keys and
 * values in this range: keys are processed in blocks that begin at fixed positions, whatever the
 * other rows of the job are. Exception: an infinity or a NaN in the values of one position can
 * appear in the results of queries of the same job that do not attend to this position, because 0 ·
 * Inf is NaN.
 */
#define ATTENTION_MAX_DIM 256
struct attention_page { /* positions of one page: rows of keys and of values */
    const void *k, *v;
    const uint16_t *k_scale, *v_scale; /* int8: the scale of each position in f16; else unused */
};
struct attention_keys {
    enum dtype dtype;
    int64_t page; /* positions in a page: a multiple of 32, or all positions */
    int64_t ld;   /* elements between positions */
    struct attention_page (*get_page)(const void *ctx, int64_t page); /* page 0, 1, … */
    const void *ctx;
};
struct attention_job {
    int64_t head_dim; /* E, at most ATTENTION_MAX_DIM */
    int64_t n_heads;  /* query heads that share the keys */
    int64_t rows;     /* of one sequence */
    const float *q;   /* head h of row r begins at q + r ldq + h E; of `out` at out + r ldo + h E */
    float *out;
    int64_t ldq, ldo;
    /* If not NULL, results are written to tiles->tiles, the inputs of the next product, instead of
     * `out`: row 0 to row tiles_row, head 0 from column tiles_column on. E and tiles_column are
     * multiples of 32. */
    const struct gemm_input *tiles;
    int64_t tiles_row, tiles_column;
    const int32_t *first, *end; /* [rows] positions [first, end): not empty; both arrays ascend */
    float scale;                /* positive */
    struct attention_keys keys;
    /* NULL, or [rows][ld_stats]: elements 2h and 2h + 1 are, for head h, log2(e) · the largest
     * scaled score, and 1 / the sum of exp(score - largest). */
    float *stats;
    int64_t ld_stats;
    void *scratch; /* attention_scratch bytes, aligned to 64 */
};

/*
 * Backward of the attention of one kv head of a sequence, in which row i attends to the positions
 * [max(i + 1 - window, 0), i]. dq, dk and dv are overwritten; dk and dv are sums over the query
 * heads. Queries, keys, values, probabilities and the gradients of scores are rounded to bf16, sums
 * are f32, in an order that depends on `rows` and `n_heads` only. `stats` are those of the forward
 * pass. The scratch size is linear in `rows`.
 */
struct attention_backward_job {
    int64_t head_dim, n_heads, rows, window;
    const float *q, *out, *dout; /* rows of ldq, as in attention_job */
    float *dq;
    int64_t ldq;
    const float *k, *v; /* [rows][ldk] */
    float *dk, *dv;
    int64_t ldk;
    const float *stats;
    int64_t ld_stats;
    float scale;
    void *scratch; /* attention_backward_scratch bytes, aligned to 64 */
};

/* matrix products on a thread pool */

/* Prepares rows of x, with int8 blocks and bf16 tiles if requested, in `scratch` of
 * gemm_input_scratch bytes. in->path becomes ROWS_EXACT; the caller may change it. */
size_t gemm_input_scratch(int64_t max_rows, int64_t max_k);
void gemm_input_prepare(struct gemm_input *in, const float *x, int64_t ldx, int64_t rows, int64_t k,
                        bool int8, bool tiles, void *scratch, struct pool *pool);
/* The same for contiguous rows of w[0].k values, with the int8 blocks or tiles that products with
 * the n matrices need. The result's path is `path`. */
struct gemm_input gemm_input_for(const struct matrix *w, int n, const float *x, int64_t rows,
                                 enum row_path path, void *scratch, struct pool *pool);
/* Inputs that have tiles only. The caller packs each row once with gemm_input_pack_row. */
struct gemm_input gemm_input_tiles(int64_t rows, int64_t k, enum row_path path, void *scratch);
void gemm_input_pack_row(const struct gemm_input *in, int64_t row, const float *x);
/* The address of a row's first value in the tiles; the value of column k, a multiple of 32, is 16 k
 * elements further. */
uint16_t *gemm_input_tile_row(const struct gemm_input *in, int64_t row);
/* A view of rows [begin, end). It has no q_tiles, and bf16 tiles only if `begin` is a multiple of
 * 16. */
struct gemm_input gemm_input_rows(const struct gemm_input *in, int64_t begin, int64_t end);
/* A view of the tiles of rows [begin, end), for any `begin`. It starts at the tile that contains
 * row `begin`; its first `skip` rows have no outputs. So the output address that the caller passes
 * is `skip` rows before the address of the output of row `begin`. */
struct gemm_input gemm_input_tile_rows(const struct gemm_input *in, int64_t begin, int64_t end);
/* Fills the unused rows of the last tile with zeros. */
void gemm_input_pad_tiles(const struct gemm_input *in);
/* Packs in->x into in->tiles, which the caller provides, and pads the last tile. */
void gemm_input_pack_tiles(struct gemm_input *in, struct pool *pool);
/* Packs t [rows][ld], of which `ranks` columns exist, into rows at, at + 1, … of gemm_low_rank.t.
 */
void gemm_low_rank_pack(uint16_t *tiles, int64_t at, const float *t, int64_t ld, int64_t rows,
                        int64_t ranks);
/* y[rows][ldy] (+)= x wᵀ; threads of the pool compute ranges of outputs or of rows. `in` must have
 * the int8 blocks or tiles that w needs (see gemm_input_for). */
void matrix_mul(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                bool add, struct pool *pool);
/* matrix_mul for outputs [n0, n1), in the calling thread; n0 is a multiple of 16. */
void matrix_mul_range(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                      int64_t n0, int64_t n1, bool add);
/* Plain f32: y[m][n] (+)= Σ_k x[m][k] w[n][k]. */
void gemm(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows, const float *w,
          int64_t ldw, int64_t k, int64_t n, bool add, struct pool *pool);
void transpose(float *dst, int64_t ld_dst, const float *src, int64_t ld_src, int64_t rows,
               int64_t cols, struct pool *pool); /* dst[c][r] = src[r][c] */
/* The gemm_nn_* slots over the pool: y[m][c] (+)= Σ_j t(m, j) v[j][c], one chain of fused
 * multiply-adds in the order of j. The chain starts from y, or without `add` from +0. Example: dW =
 * dYᵀ X is gemm_nn_parallel(…, dW, K, dY, 1, lddy, N, X, ldx, rows, K, …). */
void gemm_nn_parallel(enum dtype e, float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
                      int64_t rows, const void *v, int64_t ldv, int64_t k, int64_t n, bool add,
                      struct pool *pool);

/* The arithmetic of a backward product. */
enum grad_path { GRAD_F32, GRAD_INT8, GRAD_TILES };

/*
 * The backward pass of matrix_mul: dX[rows][lddx] (+)= dY[rows][lddy] W, over the pool, for every
 * layout.
 *   f32   dX[m][i] = fma(dY[m][o], W[o][i], dX[m][i]) for o = 0, 1, … N-1, W as matrix_get_row
 *         gives it, starting from dX or +0.
 *   tiles (if matrix_uses_tiles(w, ROWS_TRAINING), else as int8) dY and W in bf16, as in
 *         gemm_tiles_backward.
 *   int8  (if matrix_needs_int8(w), else as f32) Σ_o over blocks b of 32 outputs. scale[o] is the
 *         scale of output o for the 32 inputs (q6_k: 16) that include i. dY[m][o] and scale[o] are
 *         quantised to 16 bits each; q_u is multiply_to_int8 of the two quantised values, and d_u
 *         = d_dy · 2^23 · d_scale. acc = fma((float)Σ q_u q_w, d_u, acc) for b = 0, 1, …; for
 *         q6_k a block has 16 outputs. The sums of slices of 4,096 outputs are added to dX one
 *         after another. For types with minima, dX first gets Σ_o dY[m][o] · (mins[o] + c ·
 *         scale[o]) as one chain, and q_w - c replaces q_w; c is 8 for nibbles, else 16. nf4: the
 *         scale is byte · (row_scale / 32385).
 * A row of dX depends only on the same row of dY. `scratch` has matrix_mul_backward_scratch(max_n,
 * threads of the pool) bytes, where max_n is the largest N. The path f32 of LAYOUT_ROW_MAJOR does
 * not use it.
 */
size_t matrix_mul_backward_scratch(int64_t max_n, int threads);
void matrix_mul_backward(float *dx, int64_t lddx, const float *dy, int64_t lddy, int64_t rows,
                         const struct matrix *w, enum grad_path path, bool add, void *scratch,
                         struct pool *pool);
/* The path GRAD_TILES for dY [rows][N] that is in dy->tiles already. All N outputs are one sum, not
 * slices of 4,096. */
void matrix_mul_backward_tiles(float *dx, int64_t lddx, const struct gemm_input *dy,
                               const struct matrix *w, bool add, struct pool *pool);
/* dW[N][K] += dY[rows][N]ᵀ X[rows][K] in tiles, in groups of 32 rows from row 0 on, over the pool.
 * `scratch` has weight_grad_scratch(max_rows, max_k) bytes. */
size_t weight_grad_scratch(int64_t max_rows, int64_t max_k);
void weight_grad_tiles(float *dw, const float *dy, int64_t n, const float *x, int64_t k,
                       int64_t rows, void *scratch, struct pool *pool);

#endif
