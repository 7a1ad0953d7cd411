/*
 * kernel: weight matrices, and all numeric loops: matrix products, attention, and operations on
 * rows.
 *
 * A `struct kernels` is a table of function pointers: scalar functions first, then overwritten by
 * those that the processor and the system allow (feature bits, XCR0, the AMX permission call),
 * capped by SHOAL_CPU=scalar|avx2|avx512|amx. Callers never name a level. kernels_get() builds the
 * table once per process; the table is read-only afterwards and shared by threads.
 *
 * Arithmetic (a contract that holds at all levels; test/kernel/test_kernels.c checks it):
 *   exact class  f32 dot: 16 lanes, lane l sums k = l, l+16, … by fused multiply-add from +0, the
 *                tail padded with zeros; then a fixed tree: lanes l and l+8 are added, then l and
 *                l+4, l+2, l+1.
 *                bf16 weights are widened to f32 and follow the same rule.
 *                q8/q4 dot: block b of 32 (q6_k: 16) gives an exact integer s_b;
 *                acc = fma((float)s_b, dw_b * dx_b, acc) for b = 0, 1, … in order.
 *                Types with minima then add the f32 dot of minima and activation sums.
 *                nf4: dw_b is the block's byte, and the result is acc * (row_scale / 32385).
 *   fast class   with AMX, rows whose tokens are known before a step (prompts, scored text,
 *                training) and all rows over bf16 weights are multiplied in bf16 tiles
 *                (gemm_tiles): w = bf16(matrix_get_row), x = bf16(x), steps of 32 inputs in
 *                ascending order, each of them one TDPBF16PS. Rows that are being sampled are
 *                multiplied with quantised weights as in the exact class, which is faster for few
 *                rows: the path depends on the row, never on the batch. The sum of an adapter's
 *                low-rank part of a known row continues that of the base product (gemm_low_rank).
 *                Gradients of weights are computed in tiles too, in groups of 32 rows
 *                (gemm_tiles_grad).
 *                Below AMX, bf16 weights are multiplied with f32 activations (gemm_bf16_fast),
 *                which costs no conversion: one chain of fused multiply-adds per output, k
 *                ascending, from +0, the same bits at every level. Everything else is as in the
 *                exact class.
 * In both classes, the bits of output row m depend on row m of x and on w only: not on the number
 * of rows, not on threads. exp and similar functions are our own polynomials, evaluated with the
 * same operations at every level.
 */
#ifndef SHOAL_KERNEL_H
#define SHOAL_KERNEL_H

#include "base/base.h"

enum cpu_level { CPU_SCALAR, CPU_AVX2, CPU_AVX512, CPU_AMX, CPU_LEVELS };
enum numeric_class { NUMERIC_EXACT, NUMERIC_FAST };

/* Weight types, with GGUF's own numbers. NF4 is Shoal's (see NF4 below): its number spells "SNF4"
 * in a file, so that other programs refuse it. */
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
bool tensor_type_is_known(uint32_t number);
const char *tensor_type_name(enum tensor_type t);               /* "q8_0" */
int tensor_type_parse(const char *name, enum tensor_type *out); /* OK or ERR_USAGE */
const char *tensor_type_list(void);                /* "f32, f16, …" for messages and help */
int tensor_type_block_size(enum tensor_type t);    /* k must be a multiple of it: 1, 32 or 256 */
bool tensor_type_is_quantized(enum tensor_type t); /* multiplied with int8 activations */
size_t tensor_row_bytes(enum tensor_type t, int64_t k);
/* The type that rows of k are written in when t is requested: t if its blocks divide k, else the
 * fallback type of llama.cpp (q4_k q5_0, q5_k q5_1, q6_k q8_0), and f16 if 32 does not divide k
 * either. */
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
 * NF4: the 16 quantiles of the normal distribution of QLoRA (Dettmers et al. 2023) times 127,
 * rounded to whole numbers, so that a product is an integer dot; storing a block's scale as a
 * byte relative to the row's scale is QLoRA's double quantisation. 4.125 + 32/K bits per weight.
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
/* Whole rows: n values; nf4 one row at a time. Quantisation follows llama.cpp's reference
 * (byte-equal files); values that are not finite give a row that matrix_init refuses, or zeros. */
void tensor_to_f32(enum tensor_type t, const void *src, float *dst, int64_t n);
void tensor_from_f32(enum tensor_type t, const float *src, void *dst, int64_t n);

/* Element types of rows that are not stored in quantised blocks: KV pages, adapters. */
enum dtype { DTYPE_F32, DTYPE_BF16, DTYPE_F16, DTYPE_I8, N_DTYPE };

/* The layout of a matrix in memory. */
enum matrix_layout {
    LAYOUT_ROW_MAJOR, /* as in a file: f32, bf16 */
    LAYOUT_BF16,      /* panels for the fast class */
    LAYOUT_ROWS_I8,   /* matrix_view: rows of int8 */
    LAYOUT_PAIRS_I8,  /* matrix_view: pairs of rows of int8, [N / 2][K][2] */
    LAYOUT_Q8,        /* int8 panels, a scale for 32 weights */
    LAYOUT_Q6,        /* int8 panels, a scale for 16 */
    LAYOUT_Q4,        /* nibble panels, a scale for 32, value = nibble - zero */
    LAYOUT_NF4,       /* nibble panels, value = nf4_codes[nibble]; a byte per 64, an f32 per row */
};

/*
 * A dense weight, N outputs × K inputs, ready to be multiplied. f32, and bf16 in the exact class,
 * are used in the layout of the file: rows of K. Quantised types, and bf16 in the fast class, are
 * packed in panels of 16 outputs (the AMX B-tile order, which AVX2 and AVX-512 read as well), N
 * padded to 16 with zeros:
 *   int8    data[panel][K/32 blocks][8 quads][16 outputs][4]: byte j of quad p is weight
 *           k = 32*block + 4p + j;
 *           q8_0, q5_0 (q - 16), q5_1 and q5_k (0..31 and minima), q6_k (q - 32);
 *   nibble  data[panel][K/32 blocks][4][16 outputs][4]: byte (p, n, j) has weight 4p + j in its
 *           low nibble and weight 16 + 4p + j in its high one;
 *           q4_0 (zero = 8), q4_1 and q4_k (zero = 0 and minima), nf4;
 *   scales  [panel][K/32, in LAYOUT_Q6 K/16][16 outputs] in f32;
 *           nf4: scale_bytes[panel][K/64 rounded up][16], row_scales;
 *   mins    [N][K/32] in f32, added to every weight of the block: the product adds
 *           Σ_b mins[n][b] · sum_b;
 *   bf16    data[panel][Kp/2 pairs][16 outputs][2] with Kp = K rounded up to 32, zero padded.
 */
struct matrix {
    enum tensor_type type, file_type; /* file_type differs when f16 was widened to f32 */
    enum matrix_layout layout;
    bool packed; /* layout is not LAYOUT_ROW_MAJOR */
    int8_t zero; /* LAYOUT_Q4 */
    int64_t n, k;
    const void *data; /* rows or panels; aligned to 64 when packed */
    const float *scales;
    const float *mins; /* or NULL */
    const uint8_t *scale_bytes;
    const float *row_scales;  /* [N padded] */
    const uint8_t *file_rows; /* q4_k, q5_k, q6_k: the source rows, for writing to files; or NULL */
    const int32_t *file_order; /* their order, or NULL */
};

/* Initialises `m` from rows in file order (`rows` must outlive m when it is used in place). Packing
 * allocates in `arena`. f16 is widened to f32. `row_order` (may be NULL) maps output i to its
 * source row; it is used to permute rows for RoPE. */
int matrix_init(struct matrix *m, enum tensor_type type, int64_t n, int64_t k, const void *rows,
                const int32_t *row_order, enum numeric_class cls, struct arena *arena,
                struct error *err);
/* Initialises `m` without rows and reserves their space in `arena`. The caller then sets each of
 * the n rows once with matrix_set_row, in the file layout of `type`. */
int matrix_alloc(struct matrix *m, enum tensor_type type, int64_t n, int64_t k,
                 enum numeric_class cls, struct arena *arena, struct error *err);
int matrix_set_row(struct matrix *m, int64_t i, const void *row, struct error *err);
/* Writes row i to `out` with the same bytes as in the file. Returns false if these bytes are not
 * known any more (f16; q4_k, q5_k and q6_k set by matrix_set_row); matrix_get_row followed by
 * tensor_from_f32 then gives approximately these bytes. */
bool matrix_encode_row(const struct matrix *m, int64_t i, void *out);
bool matrix_needs_int8(const struct matrix *m); /* its products read gemm_input.q, .d and .sum */

/* The numeric path of some rows of inputs. */
enum row_path {
    ROWS_EXACT,    /* the exact class, and rows that are being sampled */
    ROWS_KNOWN,    /* fast class: rows whose tokens are known before the step */
    ROWS_TRAINING, /* the same in training, where f32 weights are rounded to bf16 as well */
};
/* Whether products of such rows read gemm_input.tiles; false below AMX. */
bool matrix_uses_tiles(const struct matrix *m, enum row_path path);
/* A matrix over an adapter's rows, which the tiles of the fast class read in place. The scale of
 * int8 rows is not applied. `pairs`: int8 rows are stored in pairs. */
struct matrix matrix_view(enum dtype e, bool pairs, const void *rows, int64_t n, int64_t k);
/* Dequantises row i to f32 (embedding look-up, tests, copies for training). */
void matrix_get_row(const struct matrix *m, int64_t i, float *out);
size_t matrix_bytes(const struct matrix *m);
/* The bytes that matrix_init allocates for rows of this type, including rows that could stay in a
 * file. */
size_t matrix_bytes_of(enum tensor_type type, int64_t n, int64_t k, enum numeric_class cls);

/* Memory that will be read soon. A packed product whose gemm_input has such a list prefetches a few
 * cache lines after every few rows and panels, so that the loads overlap with arithmetic. */
struct prefetch_range {
    const void *address;
    int64_t bytes;
};
struct prefetch_list {
    const struct prefetch_range *ranges;
    /* ranges left, bytes of the first one that are prefetched already */
    int64_t n, bytes_done, lines_per_step;
};

/*
 * Low-rank parts of a product in tiles: for rows [begin, end) the product is x wᵀ + t v, and t v
 * continues the chain of sums of x wᵀ. t is in bf16. A gated product has separate parts for gate
 * and up.
 */
enum { LOW_RANK_MAX = 64, LOW_RANK_STEPS = LOW_RANK_MAX / 32 };
struct low_rank_part {
    struct matrix v; /* a matrix_view [ranks][N] */
    int64_t column;  /* its first column of t: even; all its columns are below LOW_RANK_MAX */
};
struct low_rank_rows {
    int64_t begin, end;
    int n_parts[2];
    const struct low_rank_part *parts[2]; /* [n_parts] */
};
struct gemm_low_rank {
    const uint16_t *t[2]; /* [rows / 16 rounded up][LOW_RANK_STEPS][16][32], zero padded */
    const struct low_rank_rows *rows; /* [n] ascending; rows between them have no parts */
    int n;
};

/*
 * The inputs of a product, prepared once for all matrices that read them: f32 rows, and (where some
 * matrix needs it) the rows in int8 blocks of 32 (d = amax / 127, q = round-half-even(x * (1/d)))
 * or in tiles of bf16.
 */
struct gemm_input {
    enum row_path path;
    int64_t rows, k, ldx;
    int64_t skip;    /* tiles: first rows, fewer than 16, whose outputs are not stored */
    const float *x;  /* [rows][ldx] */
    int8_t *q;       /* [rows][K] */
    float *d;        /* [rows][K/32] */
    float *sum;      /* [rows][K/32]: d · Σ q of the block */
    int32_t *q_sum;  /* [rows][K/32]: Σ q; or NULL: products compute it themselves */
    int8_t *q_tiles; /* q in tiles of int8_tile_rows: [tiles][K/32][tile rows][32]; or NULL */
    float *d_tiles;  /* d in the same tiles: [tiles][K/32][tile rows] */
    uint16_t *tiles; /* [rows / 16 rounded up][K / 32 rounded up][16][32] bf16, zero padded */
    const struct gemm_low_rank *low_rank; /* tiles: low-rank parts of the product, or NULL */
    int64_t low_rank_row;           /* their number of row 0 of these inputs; a multiple of 16 */
    struct prefetch_list *prefetch; /* prefetches of one thread, or NULL */
};

struct gated_backward_row {
    const uint16_t *gate, *up; /* rows of tiles: 32 values at every 512th element */
    const float *dact;
    float *act, *dgate, *dup;
    uint16_t *dgate_tiles, *dup_tiles;
};

/* The matrices and outputs of a gated MLP. The outputs are tiles of bf16, which are the inputs of a
 * product with K = N: act = silu(x gateᵀ) · (x upᵀ); for training also x gateᵀ and x upᵀ, else
 * NULL. */
struct gemm_gated {
    const struct matrix *gate, *up;
    uint16_t *act, *gate_out, *up_out; /* [rows / 16 rounded up][N / 32 rounded up][16][32] */
};

/* The gradient of a weight matrix in tiles: dW[n][k] += Σ over rows of dY[row][n] X[row][k]. Each
 * step of the tiles adds a group of 32 rows, in order; the last group may have fewer. */
struct weight_grad_job {
    float *dw;           /* [n][k] */
    const float *dy, *x; /* [rows][n], [rows][k] */
    int64_t rows, n, k;
    uint16_t *pairs; /* x packed: [K / 16 rounded up][groups][16 pairs of rows][16][2], bf16 */
};

/* n columns of the input of a norm, and the statistics of its rows. */
struct norm_rows {
    const float *x, *dy; /* [rows][ld], n columns */
    const float *mean, *rstd;
    int64_t ld, rows, n;
};

struct attention_job;
struct attention_backward_job;

struct kernels {
    enum cpu_level level;
    const char *name;

    /* y[m][n] (+)= Σ_k x[m][k] w[n][k] for n in [n0, n1); y is [rows][ldy]; add: accumulate into y
     * after the dot. */
    void (*gemm_f32)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     const float *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
    void (*gemm_bf16)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                      const uint16_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
    /* The same for weights in f16 and int8, widened to f32: KV pages and adapters. The caller
     * applies the scale of int8. */
    void (*gemm_f16)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     const uint16_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
    void (*gemm_i8)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                    const int8_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
    /* y += t v, with v not transposed: y[m][c] = fma(t(m, j), v[j][c], y[m][c]) for j = 0, 1, … k-1
     * in order, c in [0, n), with t(m, j) = t[m * tm + j * tj]. Used for attention over values, for
     * the second half of a low-rank product with Bᵀ, and for both products of a backward pass: dX =
     * dY W with v the rows of W, dW = dYᵀ X with tm = 1 and v the rows of X. */
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
     * to 4l+3 as an exact integer p, and lane = fma((float)p, d_b, lane); then lanes l and l+4 are
     * added, then l+2, l+1. */
    void (*gemm_i8_i8)(float *y, int64_t ldy, const struct gemm_input *in, const int8_t *w,
                       int64_t ldw, int64_t n0, int64_t n1);
    /* y[m][c] = fma((float)Σ_j t[m][2j] v[j][c][0] + t[m][2j+1] v[j][c][1], s[m], y[m][c]), j in
     * [0, pairs), c in [0, n); at most 512 pairs, so that the integer is exact. ldv counts pairs of
     * bytes. */
    void (*gemm_nn_i16_i8)(float *y, int64_t ldy, const int16_t *t, int64_t ldt, const float *s,
                           int64_t rows, const int8_t *v, int64_t ldv, int64_t pairs, int64_t n);
    /* Packed layouts: n0 and n1 are multiples of 16 (or n1 == n). */
    /* int8 panels and nibble panels; the caller adds minima (matrix_mul does). */
    void (*gemm_q8)(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                    int64_t n0, int64_t n1, bool add);
    void (*gemm_q4)(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                    int64_t n0, int64_t n1, bool add);
    /* Rows of the tiles in which both read in->q_tiles when there are `rows` rows; 0: they read q.
     * NULL below AMX. */
    int64_t (*int8_tile_rows)(int64_t rows);
    void (*gemm_bf16_fast)(float *y, int64_t ldy, const struct gemm_input *in,
                           const struct matrix *w, int64_t n0, int64_t n1, bool add);
    /* The fast class with AMX; NULL below AMX. gemm_tiles multiplies in->tiles with weights of any
     * layout, y (+)= x wᵀ. Weights may be a matrix_view of f32, bf16, f16 or int8 rows;
     * LAYOUT_PAIRS_I8 is for gemm_tiles_backward only. gemm_tiles_backward: dx[m][i] (+)= Σ_o
     * dy[m][o] w[o0 + o][i] for inputs [k0, k1), k0 and o0 multiples of 32; `dy` has tiles.
     * tiles_pack_row writes a row of tiles: 32 values of x to every 512th element of `out`, zero
     * padded. */
    void (*gemm_tiles)(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                       int64_t n0, int64_t n1, bool add);
    /* The products of a gated MLP for outputs [n0, n1) of both matrices, with the bits of
     * gemm_tiles, silu_mul and tiles_pack_row. n0 is a multiple of 32; n1 too, unless it is N. */
    void (*gemm_tiles_silu)(const struct gemm_gated *g, const struct gemm_input *in, int64_t n0,
                            int64_t n1);
    void (*gemm_tiles_backward)(float *dx, int64_t lddx, const struct gemm_input *dy,
                                const struct matrix *w, int64_t o0, int64_t k0, int64_t k1,
                                bool add);
    void (*tiles_pack_row)(const float *x, int64_t k, uint16_t *out);
    /* gemm_tiles_grad computes outputs [n0, n1) of the gradient, n0 a multiple of 32, from packed
     * x: dY and X are rounded to bf16; sums start from dW and are f32. tiles_pack_pairs packs one
     * group of rows of x. */
    void (*gemm_tiles_grad)(const struct weight_grad_job *job, int64_t n0, int64_t n1);
    void (*tiles_pack_pairs)(const struct weight_grad_job *job, int64_t group);
    /* Backward of one row of a gated MLP: recomputes act = y · up with y = gate · sigmoid(gate),
     * and computes dgate and dup from dact with the bits of act_backward, also as rows of tiles. */
    void (*gated_backward)(const struct gated_backward_row *r, int64_t n);

    void (*quantize_row)(const float *x, int64_t k, int8_t *q,
                         float *d); /* see struct gemm_input */
    /* The same to 16 bits: d = amax / QUANTIZED16_MAX. */
    void (*quantize_row16)(const float *x, int64_t k, int16_t *q, float *d);
    /* q = h(h(x, by), 128) with h(a, b) = (a b + 2^14) >> 15: x by / 2^23, rounded in two steps,
     * of 16-bit quantised values; in -127..127. */
    void (*multiply_to_int8)(const int16_t *x, const int16_t *by, int64_t k, int8_t *q);

    float (*dot)(const float *a, const float *b, int64_t n); /* the 16-lane rule */
    float (*sum)(const float *a, int64_t n);                 /* 16 lanes of adds, same tree */
    float (*max)(const float *a, int64_t n);                 /* NaN is ignored; -inf when n == 0 */
    void (*axpy)(float *y, float a, const float *x, int64_t n); /* y = fma(a, x, y) */
    void (*scale)(float *y, float a, int64_t n);
    void (*rmsnorm)(float *y, const float *x, const float *g, float eps,
                    int64_t n); /* y = x * (1/sqrt(dot(x,x)/n+eps)) * g */
    void (*rope)(float *x, const float *cos, const float *sin,
                 int64_t half); /* pairs (i, i+half): HF order */
    void (*silu_mul)(float *y, const float *gate, const float *up,
                     int64_t n);                       /* y = gate*sigmoid(gate)*up */
    void (*gelu)(float *y, const float *x, int64_t n); /* the tanh form ("gelu_new"): GELU_LINE */
    /* Backward of y = f(x) · up, f silu or gelu: dx = f'(x) · (dy · up), dup = dy · f(x). With up
     * NULL, y = f(x), dx = f'(x) · dy. */
    void (*act_backward)(float *dx, float *dup, const float *dy, const float *x, const float *up,
                         int64_t n, bool gelu);
    void (*exp)(float *y, const float *x, int64_t n); /* clamps to [0, FLT_MAX]; exp(-inf) = 0 */
    /* y = exp(x - max) in place, returns the sum by the `sum` rule (the caller divides). */
    float (*softmax)(float *x, int64_t n);
    /* Backward of a softmax of scaled scores: dp = p (dp - mean) scale, where mean is Σ p dp. */
    void (*softmax_backward)(float *dp, const float *p, float mean, float scale, int64_t n);
    /* Backward of a norm, x̂ = (x - mean) rstd. norm_gain_backward: dg += dy x̂ and (unless NULL)
     * db += dy, in the order of rows. norm_backward, for one row: u = dy ⊙ g replaces dy, dx (+)=
     * rstd (u - mean(u) - x̂ mean(u ⊙ x̂)). Norms that are not `centred` (RMS norm) have mean 0 and
     * no term mean(u). dx may be dy unless `add`. */
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

    /* Causal attention of the fast class: NULL below AMX. See struct attention_job. */
    void (*attention)(const struct attention_job *job);
    size_t (*attention_scratch)(int64_t head_dim); /* bytes for one thread */
    void (*attention_backward)(const struct attention_backward_job *job);
    size_t (*attention_backward_scratch)(int64_t head_dim, int64_t rows);
};

/* gelu is x σ(x (LINE + CUBE x²)): LINE = 2 sqrt(2/π), CUBE = 0.044715 LINE. */
#define GELU_LINE 0x1.988454p+0f
#define GELU_CUBE 0x1.2444f2p-4f

/* The table for this process: that of the best available level, capped by SHOAL_CPU. An unknown or
 * unavailable SHOAL_CPU gives a message and exit status 2. */
const struct kernels *kernels_get(void);
/* The table of one level, or NULL if the machine does not support it. For tests and benches. */
const struct kernels *kernels_for_level(enum cpu_level level);
enum numeric_class
kernels_default_class(void); /* fast with AMX, else exact, whose bits are equal on every machine */
const char *cpu_level_name(enum cpu_level level);
bool cpu_has_level(enum cpu_level level);

/* Bytes of one element. */
size_t dtype_size(enum dtype e);
int dtype_parse(const char *name, enum dtype *out,
                struct error *err); /* "f32", "bf16", "f16", "i8" */
/* n values; i8 is value / d rounded half to even, with d = amax / 127 returned (0 for a row of
 * zeros); the other dtypes return 1. */
float dtype_from_f32(enum dtype e, const float *src, void *dst, int64_t n);
/* n values over d, rounded half to even, clamped to -127..127; NaN, and all when d is 0, become 0.
 */
void i8_from_f32(const float *src, float d, int8_t *dst, int64_t n);
float row_amax(const float *x, int64_t n); /* the largest |x|; NaN is ignored */
/* The slots gemm_* (x wᵀ) and gemm_nn_* (t v) of a dtype. */
void gemm_nt(enum dtype e, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
             const void *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add);
void gemm_nn(enum dtype e, float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
             int64_t rows, const void *v, int64_t ldv, int64_t k, int64_t n);
/* y += Σ_r t_r v_r of int8 rows that are stored in pairs, [n / 2][ldv][2]: t is rounded to 16 bits
 * relative to its row's largest value, so that the sum is an integer sum. n is even, at most 64. */
void gemm_nn_i8_pairs(float *y, int64_t ldy, const float *t, int64_t ldt, int64_t rows,
                      const int8_t *v, int64_t ldv, int64_t n, int64_t width);

/*
 * Attention of one kv head in bf16: out = softmax(scale q Kᵀ) V for every query. q, K and V are
 * rounded to bf16 (to nearest even; int8 after its scale), so keys in f32 and the same keys in bf16
 * give the same bits. Scores, sums and the running maximum are f32. Probabilities relative to the
 * maximum are summed in f32, then rounded to bf16; a masked one is +0.
 *
 * The bits of a query depend on that query, its range and the keys and values of its range only:
 * keys are taken in blocks that begin at fixed positions, whatever the other rows of the job are.
 * Exception: an infinity or a NaN in the values of one position can appear in the results of
 * queries of the same job that do not attend to this position, because 0 · Inf is NaN.
 */
#define ATTENTION_MAX_DIM 256
struct attention_page { /* positions of one page: rows of keys and of values */
    const void *k, *v;
    const uint16_t *k_scale, *v_scale; /* of each position, f16: int8 only */
};
struct attention_keys {
    enum dtype dtype;
    int64_t page; /* positions in a page: a multiple of 32, or all positions */
    int64_t ld;   /* elements between positions */
    struct attention_page (*get_page)(const void *ctx, int64_t page);
    const void *ctx;
};
struct attention_job {
    int64_t head_dim; /* E, at most ATTENTION_MAX_DIM */
    int64_t n_heads;  /* query heads that share the keys */
    int64_t rows;     /* of one sequence */
    const float *q;   /* head h of row r is q + r ldq + h E; out likewise with ldo */
    float *out;
    int64_t ldq, ldo;
    /* If not NULL, results are written to the tiles of these inputs of the next product instead of
     * `out`: row 0 to row tiles_row, head 0 from column tiles_column on. E and tiles_column are
     * multiples of 32. */
    const struct gemm_input *tiles;
    int64_t tiles_row, tiles_column;
    const int32_t *first, *end; /* [rows] positions [first, end), not empty, both ascending */
    float scale;                /* positive */
    struct attention_keys keys;
    float *stats; /* NULL, or [rows][ld_stats]: 2h, 2h + 1 are log2(e) max and 1 / sum of head h */
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

/* Prepares rows of x, with int8 blocks and bf16 tiles if requested, in scratch that the caller
 * provides. */
size_t gemm_input_scratch(int64_t max_rows, int64_t max_k);
void gemm_input_prepare(struct gemm_input *in, const float *x, int64_t ldx, int64_t rows, int64_t k,
                        bool int8, bool tiles, void *scratch, struct pool *pool);
/* The same for contiguous rows, with the int8 blocks or tiles that products with the n matrices
 * need. */
struct gemm_input gemm_input_for(const struct matrix *w, int n, const float *x, int64_t rows,
                                 enum row_path path, void *scratch, struct pool *pool);
/* Inputs with tiles only: the caller packs each row once with gemm_input_pack_row. */
struct gemm_input gemm_input_tiles(int64_t rows, int64_t k, enum row_path path, void *scratch);
void gemm_input_pack_row(const struct gemm_input *in, int64_t row, const float *x);
/* The address of a row's first value in the tiles; the value of column k, a multiple of 32, is 16 k
 * elements further. */
uint16_t *gemm_input_tile_row(const struct gemm_input *in, int64_t row);
/* A view of some rows; it has tiles only if `begin` is a multiple of 16. */
struct gemm_input gemm_input_rows(const struct gemm_input *in, int64_t begin, int64_t end);
/* A view of the tiles only, for any `begin`: it starts at the tile that contains row `begin` and
 * skips the rows before it, so the caller passes an output address that is `skip` rows before that
 * of row `begin`. */
struct gemm_input gemm_input_tile_rows(const struct gemm_input *in, int64_t begin, int64_t end);
/* Fills the unused rows of the last tile with zeros. */
void gemm_input_pad_tiles(const struct gemm_input *in);
/* Packs in->x into in->tiles, which the caller provides. */
void gemm_input_pack_tiles(struct gemm_input *in, struct pool *pool);
/* Packs t [rows][ld], of which `ranks` columns exist, into rows at, at + 1, … of gemm_low_rank.t.
 */
void gemm_low_rank_pack(uint16_t *tiles, int64_t at, const float *t, int64_t ld, int64_t rows,
                        int64_t ranks);
/* y[rows][ldy] (+)= x wᵀ; threads of the pool compute ranges of outputs or of rows. `in` must have
 * the int8 blocks or tiles that w needs (see gemm_input_for). */
void matrix_mul(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                bool add, struct pool *pool);
/* Outputs [n0, n1) of the same, in the calling thread; n0 is a multiple of 16. */
void matrix_mul_range(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                      int64_t n0, int64_t n1, bool add);
/* Plain f32: y[m][n] (+)= Σ_k x[m][k] w[n][k]. */
void gemm(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows, const float *w,
          int64_t ldw, int64_t k, int64_t n, bool add, struct pool *pool);
void transpose(float *dst, int64_t ld_dst, const float *src, int64_t ld_src, int64_t rows,
               int64_t cols, struct pool *pool); /* dst[c][r] = src[r][c] */
/* The gemm_nn_* slots over the pool: y[m][c] (+)= Σ_j t(m, j) v[j][c], one chain of fused
 * multiply-adds in the order of j. The chain starts from y, or without `add` from +0. dW = dYᵀ X is
 * gemm_nn_parallel(…, dW, K, dY, 1, lddy, N, X, ldx, rows, K, …). */
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
 *   tiles (AMX only; LAYOUT_ROW_MAJOR of f32) dY and W in bf16, as in gemm_tiles_backward.
 *   int8  (matrix_needs_int8(w), else f32) Σ_o over blocks of 32 outputs b: dY[m][o] and
 *         scale[o], the scale of o over the 32 inputs (q6_k: 16) of which i is one, are quantised
 *         to 16 bits each, q_u = multiply_to_int8 of the two and d_u = d_dy · 2^23 · d_scale;
 *         acc = fma((float)Σ q_u q_w, d_u, acc) for b = 0, 1, … (q6_k: of 16 outputs).
 *         Blocks of 4,096 outputs are added to dX one after another. For types with minima dX
 *         first gets Σ_o dY[m][o] · (mins[o] + c · scale[o]) as one chain, and q_w - c replaces
 * q_w; c is 8 for nibbles, else 16. nf4: the scale is byte · (row_scale / 32385). A row of dX
 * depends only on the same row of dY. `scratch` is matrix_mul_backward_scratch(max_n, threads of
 * the pool) bytes, max_n the largest N it serves; LAYOUT_ROW_MAJOR uses none.
 */
size_t matrix_mul_backward_scratch(int64_t max_n, int threads);
void matrix_mul_backward(float *dx, int64_t lddx, const float *dy, int64_t lddy, int64_t rows,
                         const struct matrix *w, enum grad_path path, bool add, void *scratch,
                         struct pool *pool);
/* GRAD_TILES for dY [rows][N] that is packed in tiles already, without slices of outputs. */
void matrix_mul_backward_tiles(float *dx, int64_t lddx, const struct gemm_input *dy,
                               const struct matrix *w, bool add, struct pool *pool);
/* dW[N][K] += dY[rows][N]ᵀ X[rows][K] in tiles, in groups of 32 rows from the first one, over the
 * pool; `scratch` is weight_grad_scratch(max_rows, max_k) bytes. */
size_t weight_grad_scratch(int64_t max_rows, int64_t max_k);
void weight_grad_tiles(float *dw, const float *dy, int64_t n, const float *x, int64_t k,
                       int64_t rows, void *scratch, struct pool *pool);

#endif
