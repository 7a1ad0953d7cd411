/*
 * kernel: every loop that touches many numbers.
 *
 * A `struct kernels` is a table of function pointers filled scalar first, then overwritten by what the processor and
 * the system allow (feature bits, XCR0, the AMX permission call), capped by SHOAL_CPU=scalar|avx2|avx512|amx. Callers
 * never name a level. kernels_get() is made once per process; the table is read-only afterwards and shared by threads.
 *
 * Numbers (the contract that all levels keep, and test/test_kernels.c proves):
 *   exact class  f32 dot: 16 lanes, lane l sums k = l, l+16, … by fused multiply-add from +0, the tail padded with
 *                zeros; then a fixed tree: lanes l and l+8 are added, then l and l+4, l+2, l+1.
 *                bf16 weights are widened to f32 and follow the same rule.
 *                q8/q4 dot: block b of 32 gives an exact integer s_b; acc = fma((float)s_b, dw_b * dx_b, acc) for
 *                b = 0, 1, … in order.
 *   fast class   bf16 weights meet bf16 activations in AMX tiles (gemm_bf16_fast); everything else as exact.
 *   In both, the bits of output row m depend on row m of x and on w only: not on the number of rows, not on threads.
 *   exp and friends are our own polynomials, evaluated with the same operations at every level.
 */
#ifndef SHOAL_KERNEL_H
#define SHOAL_KERNEL_H

#include "base/base.h"

enum cpu_level { CPU_SCALAR, CPU_AVX2, CPU_AVX512, CPU_AMX, CPU_LEVELS };
enum numeric_class { CLASS_EXACT, CLASS_FAST };

/* Weight types, with GGUF's own numbers. */
enum tensor_type { TENSOR_F32 = 0, TENSOR_F16 = 1, TENSOR_Q4_0 = 2, TENSOR_Q8_0 = 8, TENSOR_BF16 = 30 };
const char *tensor_type_name(enum tensor_type t);        /* "q8_0" */
int tensor_type_parse(const char *name, enum tensor_type *out); /* OK or ERR_USAGE */
size_t tensor_row_bytes(enum tensor_type t, int64_t k);  /* k must be a multiple of 32 for q types */

/* GGUF blocks of 32 weights: f16 scale, then 32 signed bytes, or 16 bytes of two nibbles (low nibbles are the first 16;
 * value = (nibble - 8) * d). */
struct block_q8_0 { uint16_t d; int8_t q[32]; };
struct block_q4_0 { uint16_t d; uint8_t q[16]; };

float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);   /* round to nearest even */
float bf16_to_f32(uint16_t h);
uint16_t f32_to_bf16(float f);  /* round to nearest even, NaN stays NaN */
/* Whole rows: n values. Quantisation as llama.cpp's reference does it (byte-equal files). */
void tensor_to_f32(enum tensor_type t, const void *src, float *dst, int64_t n);
void tensor_from_f32(enum tensor_type t, const float *src, void *dst, int64_t n);

/*
 * A dense weight, N outputs × K inputs, ready to be multiplied. f32, and bf16 in the exact class, are used as they lie in
 * the file: rows of K. q8_0, q4_0, and bf16 in the fast class are packed in panels of 16 outputs (the AMX B-tile order,
 * which AVX2 and AVX-512 read as well), N padded to 16 with zeros:
 *   q8_0  data[panel][K/32 blocks][8 quads][16 outputs][4]: byte j of quad p is weight k = 32*block + 4p + j;
 *   q4_0  data[panel][K/32 blocks][4][16 outputs][4]: byte (p, n, j) is the file block's byte 4p + j of output n, so its
 *         low nibble is weight 4p + j and its high nibble weight 16 + 4p + j (value = nibble - 8);
 *   both  scales[panel][K/32 blocks][16 outputs] in f32;
 *   bf16  data[panel][Kp/2 pairs][16 outputs][2] with Kp = K rounded up to 32, zero padded.
 */
struct matrix {
    enum tensor_type type;
    bool packed;
    int64_t n, k;
    const void *data;    /* rows or panels; aligned to 64 when packed */
    const float *scales; /* q types: [panel][K/32][16] */
};

/* Makes `m` from rows in file order (`rows` must outlive m when it is used in place). Packing allocates in `arena`.
 * f16 is widened to f32. `row_order` (may be NULL) gives, for output i, the source row: used for RoPE row permutation. */
int matrix_init(struct matrix *m, enum tensor_type type, int64_t n, int64_t k, const void *rows,
                const int32_t *row_order, enum numeric_class cls, struct arena *arena, struct error *err);
/* Row i as f32 (embedding look-up, tests, training copies). */
void matrix_row(const struct matrix *m, int64_t i, float *out);
size_t matrix_bytes(const struct matrix *m);

/*
 * The inputs of a product, prepared once for all matrices that read them: f32 rows, and (where some matrix needs it) the
 * rows in int8 blocks of 32 (d = amax / 127, q = round-half-even(x * (1/d))) or in bf16.
 */
struct inputs {
    int64_t rows, k, ldx;
    const float *x;   /* [rows][ldx] */
    int8_t *q;        /* [rows][K] */
    float *d;         /* [rows][K/32] */
    uint16_t *bf16;   /* [rows][K rounded up to 32], zero padded */
};

struct kernels {
    enum cpu_level level;
    const char *name;

    /* y[m][n] (+)= Σ_k x[m][k] w[n][k] for n in [n0, n1); y is [rows][ldy]; add: accumulate into y after the dot. */
    void (*gemm_f32)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows, const float *w, int64_t ldw,
                     int64_t k, int64_t n0, int64_t n1, bool add);
    void (*gemm_bf16)(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows, const uint16_t *w, int64_t ldw,
                      int64_t k, int64_t n0, int64_t n1, bool add);
    /* Packed kinds: n0 and n1 are multiples of 16 (or n1 == n). */
    void (*gemm_q8)(float *y, int64_t ldy, const struct inputs *in, const struct matrix *w, int64_t n0, int64_t n1,
                    bool add);
    void (*gemm_q4)(float *y, int64_t ldy, const struct inputs *in, const struct matrix *w, int64_t n0, int64_t n1,
                    bool add);
    void (*gemm_bf16_fast)(float *y, int64_t ldy, const struct inputs *in, const struct matrix *w, int64_t n0,
                           int64_t n1, bool add); /* NULL below AMX */

    void (*quantize_row)(const float *x, int64_t k, int8_t *q, float *d); /* see struct inputs */
    void (*to_bf16_row)(const float *x, int64_t k, uint16_t *out);

    float (*dot)(const float *a, const float *b, int64_t n);              /* the 16-lane rule */
    float (*sum)(const float *a, int64_t n);                              /* 16 lanes of adds, same tree */
    float (*max)(const float *a, int64_t n);                              /* NaN is ignored; -inf when n == 0 */
    void (*axpy)(float *y, float a, const float *x, int64_t n);           /* y = fma(a, x, y) */
    void (*scale)(float *y, float a, int64_t n);
    void (*rmsnorm)(float *y, const float *x, const float *g, float eps, int64_t n); /* y = x * (1/sqrt(dot(x,x)/n+eps)) * g */
    void (*rope)(float *x, const float *cos, const float *sin, int64_t half); /* pairs (i, i+half): HF order */
    void (*silu_mul)(float *y, const float *gate, const float *up, int64_t n); /* y = gate*sigmoid(gate)*up */
    void (*gelu)(float *y, const float *x, int64_t n);                    /* the tanh form ("gelu_new") */
    void (*exp)(float *y, const float *x, int64_t n);                     /* clamps to [0, FLT_MAX]; exp(-inf) = 0 */
    /* y = exp(x - max) in place, returns the sum by the `sum` rule (the caller divides). */
    float (*softmax)(float *x, int64_t n);
    /* Single-head attention of one query over n cached positions: out[D] = softmax(q·K / sqrt-scaled) V, positions in
     * order. K and V rows are `stride` floats apart; `scores` is scratch of n floats. */
    void (*attend)(float *out, const float *q, const float *k, const float *v, int64_t stride, int64_t n, int64_t d,
                   float scale, float *scores);
    /* dst[c][r] = src[r][c]: moves bits, computes nothing. */
    void (*transpose)(float *dst, int64_t ld_dst, const float *src, int64_t ld_src, int64_t rows, int64_t cols);
    /* AdamW on n values: m, v, w updated in place; bc1/bc2 are the bias corrections 1-β^t. Elementwise. */
    void (*adamw)(float *w, const float *g, float *m, float *v, int64_t n, float lr, float beta1, float beta2,
                  float eps, float decay, float bc1, float bc2);
};

/* The table for this process: best level available, capped by SHOAL_CPU. An unknown or unavailable SHOAL_CPU is a
 * message and exit 2. */
const struct kernels *kernels_get(void);
/* A table for one level, or NULL when the machine lacks it. For tests and benches. */
const struct kernels *kernels_level(enum cpu_level level);
enum numeric_class kernels_default_class(void); /* fast where AMX is, else exact */
const char *cpu_level_name(enum cpu_level level);
bool cpu_has(enum cpu_level level);

/* products over a pool */

/* Prepares what `need` (a bit set of 1 << tensor_type of packed matrices) asks for; scratch comes from the caller. */
size_t inputs_scratch(int64_t max_rows, int64_t max_k);
void inputs_prepare(struct inputs *in, const float *x, int64_t ldx, int64_t rows, int64_t k, bool int8, bool bf16,
                    void *scratch, struct pool *pool);
/* y[rows][ldy] (+)= x wᵀ, over the pool, static ranges of outputs. `in` must hold what w->type/packed needs. */
void matrix_mul(float *y, int64_t ldy, const struct inputs *in, const struct matrix *w, bool add, struct pool *pool);
/* Outputs [n0, n1) of the same, in the calling thread; n0 is a multiple of 16. */
void matrix_mul_range(float *y, int64_t ldy, const struct inputs *in, const struct matrix *w, int64_t n0, int64_t n1,
                      bool add);
/* Plain f32: y[m][n] (+)= Σ_k x[m][k] w[n][k]. */
void gemm(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows, const float *w, int64_t ldw, int64_t k,
          int64_t n, bool add, struct pool *pool);
void transpose(float *dst, int64_t ld_dst, const float *src, int64_t ld_src, int64_t rows, int64_t cols,
               struct pool *pool); /* dst[c][r] = src[r][c] */

#endif
