/*
 * test_emulated: avx512.c and amx*.c, from the same source, with instructions emulated in plain C
 * (test/emulate).
 *
 * The test checks that every slot of the AVX-512 level and the int8 slots of the AMX level give the
 * bits of scalar.c, that the AMX bf16 product and attention are near the exact sums, and that their
 * rows do not depend on other rows. It does not measure speed, and executes no instruction that
 * this machine may lack. On a machine that has them, test_kernels compares the compiled levels too.
 *
 * Invariant: outputs are between guard values, inputs in blocks of exactly their size, so that the
 * test detects a write out of bounds, and the address sanitizer a read.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* The library has functions with the same names, compiled for the real instructions. */
#define kernels_fill_avx512 emulated_fill_avx512
#define kernels_fill_avx512bf16 emulated_fill_avx512bf16
#define kernels_fill_amx emulated_fill_amx
#define avx512_gemm_q_two_streams emulated_gemm_q_two_streams
#define amx_request emulated_amx_request
#define amx_configured emulated_amx_configured
#define amx_fill_int8 emulated_amx_fill_int8
#define amx_fill_bf16 emulated_amx_fill_bf16
#include "../../src/kernel/avx512.c"

#ifdef EMULATED_AVX512BF16
enum { STRICT = false }; // only vectors access memory
#include "../../src/kernel/avx512bf16.c"
#else
enum { STRICT = true };
/* The compiler barrier becomes the point at which emulated tiles and vectors share memory. */
#define tile_memory_barrier compiled_tile_memory_barrier
#include "../../src/kernel/amx.h"
#undef tile_memory_barrier
static void tile_memory_barrier(const void *p) {
    (void)p;
    emulated_memory_barrier();
}

#include "../../src/kernel/amx.c"
#include "../../src/kernel/amx_bf16.c"
#include "../../src/kernel/amx_int8.c"
#endif

#include "attention_check.h"
#include "tile_cases.h"

static const struct kernels *scalar;
static struct kernels wide, tiles;

#define GUARD 0x1.234p+99f

enum flavour { PLAIN, TINY, NASTY, FLAVOURS };

/* PLAIN: normal. TINY: products underflow, so that lanes have -0 and denormals. NASTY: one in four
 * is special. */
static float number(struct rng *r, enum flavour flavour) {
    static const float special[] = {
        0.0f,    -0.0f,    INFINITY, -INFINITY, NAN,   0x1p-149f, -0x1p-149f, 0x1.8p-127f, FLT_MIN,
        FLT_MAX, -FLT_MAX, 1.0f,     -127.5f,   88.8f, -104.1f,   0x1p-75f,   -0x1p-75f,
    };
    const float f = rng_normal(r);
    if (flavour == TINY) return f * 0x1p-74f;
    if (flavour == PLAIN || rng_below(r, 4) != 0) return f * 3.0f;
    return special[rng_below(r, ARRAY_LEN(special))];
}

static float *numbers(struct rng *r, int64_t n, enum flavour flavour) {
    float *v = xmalloc((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++) v[i] = number(r, flavour);
    return v;
}

static float *copy_of(const float *v, int64_t n) {
    float *c = xmalloc((size_t)n * sizeof *c);
    memcpy(c, v, (size_t)n * sizeof *c);
    return c;
}

/* Equal bits; all NaN are equal, because C does not define which operand's NaN an operation
 * returns. */
static bool same(float a, float b) {
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0;
}

static void assert_same(const float *got, const float *want, int64_t n, const char *what) {
    for (int64_t i = 0; i < n; i++) {
        if (!same(got[i], want[i])) {
            fail_msg("%s: value %lld of %lld is %a, scalar %a", what, (long long)i, (long long)n,
                     (double)got[i], (double)want[i]);
        }
    }
}

/* Two equal outputs: guard values, or numbers to be added to. */
static void outputs_make(struct rng *r, float **got, float **want, int64_t n, bool add) {
    *want = numbers(r, n, PLAIN);
    for (int64_t i = 0; i < n && !add; i++) (*want)[i] = GUARD;
    *got = copy_of(*want, n);
}

static void rows_case(struct rng *r, int64_t rows, int64_t k, int64_t n0, int64_t n1, bool add,
                      enum flavour flavour) {
    const int64_t n = n1 + 2, ldx = k + 3, ldw = k + 1, ldy = n + 1, size = (rows - 1) * ldy + n;
    float *x = numbers(r, (rows - 1) * ldx + k, flavour),
          *w = numbers(r, (n1 - 1) * ldw + k, flavour), *got, *want;
    uint16_t *half = xmalloc((size_t)((n1 - 1) * ldw + k) * sizeof *half);
    for (int64_t i = 0; i < (n1 - 1) * ldw + k; i++) half[i] = f32_to_bf16(w[i]);
    outputs_make(r, &got, &want, size, add);
    scalar->gemm_f32(want, ldy, x, ldx, rows, w, ldw, k, n0, n1, add);
    wide.gemm_f32(got, ldy, x, ldx, rows, w, ldw, k, n0, n1, add);
    assert_same(got, want, size, "gemm_f32");
    scalar->gemm_bf16(want, ldy, x, ldx, rows, half, ldw, k, n0, n1, add);
    wide.gemm_bf16(got, ldy, x, ldx, rows, half, ldw, k, n0, n1, add);
    assert_same(got, want, size, "gemm_bf16");
    for (int64_t i = 0; i < (n1 - 1) * ldw + k; i++) half[i] = f32_to_f16(w[i]);
    scalar->gemm_f16(want, ldy, x, ldx, rows, half, ldw, k, n0, n1, add);
    wide.gemm_f16(got, ldy, x, ldx, rows, half, ldw, k, n0, n1, add);
    assert_same(got, want, size, "gemm_f16");
    const int8_t *bytes = (const int8_t *)half;
    scalar->gemm_i8(want, ldy, x, ldx, rows, bytes, ldw, k, n0, n1, add);
    wide.gemm_i8(got, ldy, x, ldx, rows, bytes, ldw, k, n0, n1, add);
    assert_same(got, want, size, "gemm_i8");
    free(x), free(w), free(half), free(got), free(want);
}

static void test_rows(void **state) {
    (void)state;
    static const int64_t rows[] = {1, 2, 3, 5, 49, 52}, ks[] = {1, 15, 16, 17, 40, 64};
    static const int64_t spans[][2] = {{0, 1}, {0, 8}, {3, 18}, {5, 12}, {1, 27}};
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    int turn = 0;
    for (size_t a = 0; a < ARRAY_LEN(rows); a++) {
        for (size_t b = 0; b < ARRAY_LEN(ks); b++) {
            for (size_t c = 0; c < ARRAY_LEN(spans); c++, turn++) {
                rows_case(&r, rows[a], ks[b], spans[c][0], spans[c][1], turn % 2,
                          (enum flavour)(turn % FLAVOURS));
            }
        }
    }
}

struct packed_case {
    int64_t n, k, rows;
    struct matrix w;
    struct arena arena;
    uint8_t *file; /* the rows from which `w` was made */
    struct gemm_input in;
};

static int8_t quant(struct rng *r) {
    return rng_below(r, 8) == 0 ? (int8_t)(rng_below(r, 2) ? 127 : -127)
                                : (int8_t)((int)rng_below(r, 255) - 127);
}

/* Sums of the blocks of q, in an allocation of exactly that size. */
static int32_t *q_sums_of(const int8_t *q, int64_t blocks) {
    int32_t *q_sum = xcalloc((size_t)blocks, sizeof *q_sum);
    for (int64_t i = 0; i < blocks * 32; i++) q_sum[i / 32] += q[i];
    return q_sum;
}

static void f16_random_write(uint8_t *to, struct rng *r) {
    const uint16_t d = f32_to_f16(rng_normal(r));
    memcpy(to, &d, sizeof d);
}

/* Random bytes, all 256 values included, with scales and minima that are numbers. */
static void quant_rows_random(uint8_t *file, struct rng *r, enum tensor_type type, int64_t n,
                              int64_t k) {
    const size_t row = tensor_row_bytes(type, k),
                 block = tensor_row_bytes(type, tensor_type_block_size(type));
    for (size_t i = 0; i < row * (size_t)n; i++)
        file[i] = rng_below(r, 9) ? (uint8_t)rng_below(r, 256) : 0x80;
    for (size_t i = 0; type == TENSOR_NF4 && i < (size_t)n; i++) {
        const float scale = rng_normal(r);
        memcpy(file + i * row, &scale, sizeof scale);
    }
    for (size_t i = 0; type != TENSOR_NF4 && i < row * (size_t)n; i += block) {
        f16_random_write(file + i + (type == TENSOR_Q6_K ? 208 : 0), r);
        if (type == TENSOR_Q4_1 || type == TENSOR_Q4_K || type == TENSOR_Q5_K)
            f16_random_write(file + i + 2, r);
    }
}

/* Replaces all scales in f16 and f32. No file can contain infinities and NaN, but the bits must
 * agree for them too. */
static void scales_replace(const struct matrix *w, struct rng *r, enum flavour flavour) {
    const int64_t groups = w->k / layout_group(w->layout);
    const bool blocks = w->layout == LAYOUT_Q8 || w->layout == LAYOUT_Q4;
    if (w->layout == LAYOUT_NF4) {
        for (int64_t i = 0; i < (w->n + 15) / 16 * 16; i++)
            ((float *)(uintptr_t)w->row_scales)[i] = number(r, flavour);
        return;
    }
    for (int64_t panel = 0; panel < (w->n + 15) / 16; panel++)
        for (int64_t g = 0; g < groups; g += record_groups(w->layout))
            for (int i = 0; i < (blocks ? w->head_bytes / 2 : 32); i++) {
                const uint16_t d = f32_to_f16(number(r, flavour));
                memcpy((uint8_t *)(uintptr_t)record_at(w, panel, g) + 2 * i, &d, sizeof d);
            }
}

static void packed_make(struct packed_case *c, struct rng *r, enum tensor_type type, int64_t n,
                        int64_t k, int64_t rows, enum flavour flavour) {
    struct error err;
    *c = (struct packed_case){.n = n, .k = k, .rows = rows};
    c->file = xmalloc(tensor_row_bytes(type, k) * (size_t)n);
    quant_rows_random(c->file, r, type, n, k);
    assert_int_equal(
        matrix_init(&c->w, type, n, k, c->file, NULL, NUMERIC_FAST, NULL, &c->arena, &err), OK);
    c->in = (struct gemm_input){.rows = rows, .k = k, .ldx = k};
    c->in.q = xmalloc((size_t)(rows * k));
    for (int64_t i = 0; i < rows * k; i++) c->in.q[i] = quant(r);
    c->in.d = numbers(r, rows * (k / 32), flavour);
    c->in.sum = numbers(r, rows * (k / 32), flavour);
    if (flavour != PLAIN) scales_replace(&c->w, r, flavour);
}

static void packed_release(struct packed_case *c) {
    arena_release(&c->arena);
    free(c->file), free(c->in.q), free(c->in.d), free(c->in.sum);
    free((void *)(uintptr_t)c->in.x);
}

/* The product and the addition of the minima. `strict`: tile stores of the product are delayed. */
static void packed_mul(const struct kernels *k, float *y, int64_t ldy, const struct gemm_input *in,
                       const struct matrix *w, int64_t n0, int64_t n1, bool add, bool strict) {
    emulated_strict = strict && STRICT;
    (w->layout < LAYOUT_Q4 ? k->gemm_q8 : k->gemm_q4)(y, ldy, in, w, n0, n1, add);
    emulated_strict = false;
    if (w->mins) k->gemm_mins(y, ldy, in, w, n0, n1);
}

static void packed_compare(struct rng *r, const struct packed_case *c, int64_t n0, int64_t n1,
                           bool add) {
    const int64_t ldy = c->n + 1, size = (c->rows - 1) * ldy + c->n;
    float *got, *want, *before;
    outputs_make(r, &got, &want, size, add);
    before = copy_of(got, size);
    packed_mul(scalar, want, ldy, &c->in, &c->w, n0, n1, add, false);
    const struct prefetch_range soon[] = {{want, 1}, {before, size * 4}};
    struct prefetch_list ahead = {soon, ARRAY_LEN(soon), 0, 0};
    struct gemm_input in = c->in;
    in.prefetch = &ahead; // prefetches change no result
    packed_mul(&wide, got, ldy, &in, &c->w, n0, n1, add, false);
    assert_same(got, want, size, tensor_type_name(c->w.type));
    memcpy(got, before, (size_t)size * sizeof *got);
    in.q_sum = q_sums_of(in.q, c->rows * (c->k / 32));
    packed_mul(&wide, got, ldy, &in, &c->w, n0, n1, add, false);
    assert_same(got, want, size, "with sums made before");
    memcpy(got, before, (size_t)size * sizeof *got);
    packed_mul(&tiles, got, ldy, &in, &c->w, n0, n1, add, true);
    assert_int_equal(emulated_n_stores, 0);
    assert_same(got, want, size, tensor_type_name(c->w.type));
    free(in.q_sum);
    assert_true(ahead.n < (int64_t)ARRAY_LEN(soon) || size < 64);
    free(got), free(want), free(before);
}

static const enum tensor_type packed_types[] = {TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_Q4_1, TENSOR_Q4_K,
                                                TENSOR_Q5_K, TENSOR_Q6_K, TENSOR_NF4};

/* Every type; K is rounded up to its blocks. */
static void packed_check(struct rng *r, int64_t rows, int64_t k, int64_t n, int64_t n0, int64_t n1,
                         size_t turn) {
    for (size_t t = 0; t < ARRAY_LEN(packed_types); t++) {
        struct packed_case c;
        const int64_t block = tensor_type_block_size(packed_types[t]);
        packed_make(&c, r, packed_types[t], n, (k + block - 1) / block * block, rows,
                    (enum flavour)((turn + t) % FLAVOURS));
        packed_compare(r, &c, n0, n1, (turn + t) % 2);
        packed_release(&c);
    }
}

static void test_packed(void **state) {
    (void)state;
    static const struct {
        int64_t rows, k, n, n0, n1;
    } cases[] = {
        {3, 64, 33, 16, 33},    {4, 64, 48, 16, 32},  {8, 32, 20, 0, 20},    {20, 64, 160, 0, 160},
        {17, 32, 272, 32, 272}, {6, 2080, 16, 0, 16}, {37, 1056, 16, 0, 16}, {3, 8256, 24, 0, 24},
        {34, 8256, 40, 0, 40},  {131, 32, 16, 0, 16}, {1, 64, 1, 0, 1},
    };
    struct rng r = rng_make(2, RNG_TEST, 0, 0);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        packed_check(&r, cases[i].rows, cases[i].k, cases[i].n, cases[i].n0, cases[i].n1, i);
}

/* Every number of rows up to some tiles, with K shorter and longer than the pipeline of steps. */
static void test_packed_rows(void **state) {
    (void)state;
    static const int64_t ks[] = {32, 96, 224, 256, 288, 416};
    struct rng r = rng_make(10, RNG_TEST, 0, 0);
    for (int64_t rows = 1; rows <= 70; rows++) {
        const int64_t n = 16 + rows % 3, k = ks[(size_t)rows % ARRAY_LEN(ks)];
        packed_check(&r, rows, k, n, 0, n, (size_t)rows / ARRAY_LEN(ks));
    }
}

/* Inputs of adapter products: `rows` rows over k, n ranks or outputs, half as many pairs as k has
 * blocks. */
static void adapter_case(struct rng *r, int64_t rows, int64_t k, int64_t n, int64_t pairs) {
    const int64_t ldy = n + 1, ldv = n + 2, ldt = 2 * pairs + 2, size = (rows - 1) * ldy + n;
    const int64_t bytes = MAX(n * k, 2 * ((pairs - 1) * ldv + n));
    struct gemm_input in = {.rows = rows, .k = k, .q = xmalloc((size_t)(rows * k))};
    int8_t *w = xmalloc((size_t)bytes);
    int16_t *t = xmalloc((size_t)((rows - 1) * ldt + 2 * pairs) * sizeof *t);
    float *s = numbers(r, rows, PLAIN), *got, *want;
    in.d = numbers(r, rows * (k / 32), PLAIN);
    for (int64_t i = 0; i < rows * k; i++) in.q[i] = quant(r);
    for (int64_t i = 0; i < bytes; i++) w[i] = quant(r);
    for (int64_t i = 0; i < (rows - 1) * ldt + 2 * pairs; i++)
        t[i] = (int16_t)((int)rng_below(r, 65535) - 32767);
    outputs_make(r, &got, &want, size, true);
    scalar->gemm_i8_i8(want, ldy, &in, w, k, 0, n);
    wide.gemm_i8_i8(got, ldy, &in, w, k, 0, n);
    assert_same(got, want, size, "dots_i8");
    scalar->gemm_nn_i16_i8(want, ldy, t, ldt, s, rows, w, ldv, pairs, n);
    wide.gemm_nn_i16_i8(got, ldy, t, ldt, s, rows, w, ldv, pairs, n);
    assert_same(got, want, size, "gemm_nn_i16_i8");
    free(in.q), free(in.d), free(w), free(t), free(s), free(got), free(want);
}

static void test_adapters(void **state) {
    (void)state;
    static const int64_t rows[] = {1, 3, 4, 7, 8, 13}, ns[] = {1, 2, 5, 8, 11, 16, 40, 65};
    struct rng r = rng_make(9, RNG_TEST, 0, 0);
    for (size_t i = 0; i < ARRAY_LEN(rows); i++)
        for (size_t j = 0; j < ARRAY_LEN(ns); j++)
            adapter_case(&r, rows[i], 32 * (int64_t)(1 + (i + j) % 4), ns[j],
                         (int64_t)(1 + (i + 2 * j) % 9));
}

static void bf16_make(struct packed_case *c, struct rng *r, int64_t n, int64_t k, int64_t rows) {
    struct error err;
    *c = (struct packed_case){.n = n, .k = k, .rows = rows, .file = xmalloc((size_t)(n * k) * 2)};
    for (int64_t i = 0; i < n * k; i++) {
        const uint16_t half = f32_to_bf16(number(r, PLAIN));
        memcpy(c->file + 2 * i, &half, sizeof half);
    }
    assert_int_equal(
        matrix_init(&c->w, TENSOR_BF16, n, k, c->file, NULL, NUMERIC_FAST, NULL, &c->arena, &err),
        OK);
    assert_true(c->w.packed);
    c->in = (struct gemm_input){.rows = rows, .k = k, .ldx = k, .x = numbers(r, rows * k, PLAIN)};
}

/* Without tiles the fast class has the bits of scalar.c. */
static void bf16_compare(struct rng *r, const struct packed_case *c, int64_t n0, int64_t n1,
                         bool add) {
    const int64_t ldy = c->n + 2, size = (c->rows - 1) * ldy + c->n;
    float *got, *want;
    outputs_make(r, &got, &want, size, add);
    scalar->gemm_bf16_fast(want, ldy, &c->in, &c->w, n0, n1, add);
    wide.gemm_bf16_fast(got, ldy, &c->in, &c->w, n0, n1, add);
    assert_same(got, want, size, "gemm_bf16_fast");
    free(got), free(want);
}

static void test_bf16_fast(void **state) {
    (void)state;
    static const struct {
        int64_t rows, k, n, n0, n1;
    } cases[] = {
        {1, 32, 16, 0, 16},   {2, 33, 32, 0, 32},    {15, 64, 40, 0, 40}, {16, 20, 48, 16, 48},
        {17, 96, 33, 0, 33},  {31, 64, 16, 0, 16},   {32, 65, 32, 0, 32}, {33, 32, 160, 0, 160},
        {70, 100, 48, 0, 48}, {20, 96, 272, 0, 272}, {52, 32, 64, 0, 64},
    };
    struct rng r = rng_make(3, RNG_TEST, 0, 0);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct packed_case c;
        bf16_make(&c, &r, cases[i].n, cases[i].k, cases[i].rows);
        bf16_compare(&r, &c, cases[i].n0, cases[i].n1, i % 2);
        packed_release(&c);
    }
}

static void test_tiles(void **state) {
    (void)state;
    tile_cases_run(&tiles, false);
}

/* A decode step multiplies many matrices by the same number of rows: the tiles are configured
 * once. */
static void test_tile_config_kept(void **state) {
    (void)state;
    struct rng r = rng_make(4, RNG_TEST, 0, 0);
    struct packed_case c;
    float y[16 * 64];
    packed_make(&c, &r, TENSOR_Q8_0, 64, 32, 16, PLAIN);
    tiles.gemm_q8(y, 64, &c.in, &c.w, 0, 64, false);
    const long loads = emulated_loads;
    tiles.gemm_q8(y, 64, &c.in, &c.w, 0, 64, false);
    assert_int_equal(emulated_loads, loads);
    packed_release(&c);
}

static void reductions_case(const float *a, const float *b, int64_t n) {
    assert_true(same(wide.dot(a, b, n), scalar->dot(a, b, n)));
    assert_true(same(wide.sum(a, n), scalar->sum(a, n)));
    assert_true(same(wide.max(a, n), scalar->max(a, n)));
}

/* Runs `call` on table t with output y, for both tables, and compares n + 1 values: the last is the
 * guard. */
#define BOTH(what, call)                                                                           \
    do {                                                                                           \
        float *got_ = copy_of(a, n + 1), *want_ = copy_of(a, n + 1), *y;                           \
        got_[n] = want_[n] = GUARD;                                                                \
        const struct kernels *t = scalar;                                                          \
        y = want_;                                                                                 \
        call;                                                                                      \
        t = &wide;                                                                                 \
        y = got_;                                                                                  \
        call;                                                                                      \
        assert_same(got_, want_, n + 1, what);                                                     \
        free(got_), free(want_);                                                                   \
    } while (0)

/* a has n + 1 values, b and c have n. */
static void vectors_case(const float *a, const float *b, const float *c, int64_t n) {
    float sums[2] = {0, 0};
    BOTH("axpy", t->axpy(y, -1.7f, b, n));
    BOTH("scale", t->scale(y, 0.3f, n));
    BOTH("mask_multiply", t->mask_multiply(y, b, (const uint8_t *)c, 1.7f, n, false));
    BOTH("mask_multiply, added", t->mask_multiply(y, b, (const uint8_t *)c, 1.7f, n, true));
    BOTH("rmsnorm", t->rmsnorm(y, b, c, 1e-5f, n));
    BOTH("rmsnorm in place", t->rmsnorm(y, y, c, 1e-5f, n));
    BOTH("rope", t->rope(y, b, c, n / 2));
    BOTH("silu_mul", t->silu_mul(y, b, c, n));
    BOTH("silu_mul in place", t->silu_mul(y, y, c, n));
    BOTH("gelu", t->gelu(y, b, n));
    for (int way = 0; way < 4; way++) { // silu and gelu, gated or not
        float *dup[2] = {copy_of(a, n + 1), copy_of(a, n + 1)};
        BOTH("act_backward",
             t->act_backward(y, dup[t == scalar], a, b, way & 2 ? c : NULL, n, way & 1));
        assert_same(dup[0], dup[1], n + 1, "act_backward's dup");
        free(dup[0]), free(dup[1]);
    }
    BOTH("exp", t->exp(y, b, n));
    BOTH("exp in place", t->exp(y, y, n));
    BOTH("softmax", sums[t == scalar] = t->softmax(y, n));
    assert_true(same(sums[0], sums[1]));
}

/* Sets n bits of both masks; the byte after them is a guard. */
static void mask_random_case(struct rng *r, int64_t n, uint32_t threshold) {
    uint8_t got[80], want[80];
    uint32_t random[300];
    memset(got, 0xA5, sizeof got), memset(want, 0xA5, sizeof want);
    for (int64_t i = 0; i < (n + 1) / 2; i++) random[i] = rng_u32(r);
    random[0] = threshold << 16 | (threshold - (threshold > 0));
    wide.mask_random(got, random, n, threshold);
    scalar->mask_random(want, random, n, threshold);
    assert_memory_equal(got, want, sizeof got);
}

static void test_masks(void **state) {
    (void)state;
    struct rng r = rng_make(6, RNG_TEST, 0, 0);
    for (int64_t n = 0; n < 600; n++) mask_random_case(&r, n, n % 7 ? rng_u32(&r) >> 16 : 0);
}

static void test_vectors(void **state) {
    (void)state;
    struct rng r = rng_make(5, RNG_TEST, 0, 0);
    for (int turn = 0; turn < 3 * 100; turn++) {
        const enum flavour flavour = (enum flavour)(turn % FLAVOURS);
        const int64_t n = turn / 3 < 70 ? turn / 3 : 3 * (turn / 3) - 111;
        float *a = numbers(&r, n + 1, flavour), *b = numbers(&r, n, flavour),
              *c = numbers(&r, n, flavour);
        reductions_case(a, b, n);
        vectors_case(a, b, c, n);
        free(a), free(b), free(c);
    }
}

/* Values whose order matters: both zeros and NaN among numbers, without infinities. */
static void test_max(void **state) {
    (void)state;
    static const float few[] = {-0.0f, 0.0f, NAN, -1.0f, -2.5f};
    struct rng r = rng_make(8, RNG_TEST, 0, 0);
    for (int turn = 0; turn < 600; turn++) {
        const int64_t n = 1 + turn % 60;
        const uint32_t kinds = turn % 3 == 0 ? 1 : 5;
        float *a = xmalloc((size_t)n * sizeof *a);
        for (int64_t i = 0; i < n; i++) {
            a[i] = turn % 3 == 2 ? -fabsf(rng_normal(&r)) : few[rng_below(&r, kinds)];
            if (rng_below(&r, 4) == 0) a[i] = NAN;
        }
        assert_true(same(wide.max(a, n), scalar->max(a, n)));
        free(a);
    }
}

/* Every 8,191st bit pattern of a float. */
static void test_exp_everywhere(void **state) {
    (void)state;
    float x[256], got[256], want[256];
    for (uint64_t bits = 0; bits < 1ull << 32;) {
        for (size_t i = 0; i < ARRAY_LEN(x); i++, bits += 8191) {
            const uint32_t b = (uint32_t)bits;
            memcpy(&x[i], &b, sizeof b);
        }
        scalar->exp(want, x, ARRAY_LEN(x));
        wide.exp(got, x, ARRAY_LEN(x));
        assert_same(got, want, ARRAY_LEN(x), "exp");
    }
}

static void gemm_nn_case(struct rng *r, int64_t rows, int64_t k, int64_t n, bool transposed,
                         enum flavour flavour) {
    const int64_t tm = transposed ? 1 : k, tj = transposed ? rows : 1, ldv = n + 1, ldy = n + 2;
    float *t = numbers(r, rows * k, flavour), *v = numbers(r, k * ldv, flavour);
    float *want = numbers(r, rows * ldy, PLAIN), *got = malloc((size_t)(rows * ldy) * sizeof *got);
    uint16_t *half = malloc((size_t)(k * ldv) * sizeof *half);
    dtype_from_f32(DTYPE_BF16, v, half, k * ldv);
    memcpy(got, want, (size_t)(rows * ldy) * sizeof *got);
    scalar->gemm_nn_f32(want, ldy, t, tm, tj, rows, v, ldv, k, n);
    wide.gemm_nn_f32(got, ldy, t, tm, tj, rows, v, ldv, k, n);
    assert_same(got, want, rows * ldy, "gemm_nn_f32");
    scalar->gemm_nn_bf16(want, ldy, t, tm, tj, rows, half, ldv, k, n);
    wide.gemm_nn_bf16(got, ldy, t, tm, tj, rows, half, ldv, k, n);
    assert_same(got, want, rows * ldy, "gemm_nn_bf16");
    free(t), free(v), free(want), free(got), free(half);
}

static void test_gemm_nn(void **state) {
    (void)state;
    static const int64_t widths[] = {1, 8, 16, 33, 64, 80, 128, 150}, lengths[] = {1, 2, 8, 17};
    struct rng r = rng_make(6, RNG_TEST, 0, 0);
    for (size_t i = 0; i < ARRAY_LEN(widths); i++) {
        for (size_t j = 0; j < ARRAY_LEN(lengths); j++) {
            for (int64_t rows = 5; rows < 40; rows += 16)
                gemm_nn_case(&r, rows, lengths[j], widths[i], (i + j) % 2,
                             (enum flavour)((i + j) % FLAVOURS));
        }
    }
    gemm_nn_case(&r, 113, 300, 40, false, PLAIN);
    gemm_nn_case(&r, 113, 300, 40, true, PLAIN);
}

static void adamw_case(struct rng *r, int64_t n, enum flavour flavour) {
    float *state[2][3], *g = numbers(r, n, flavour);
    for (int i = 0; i < 3; i++) {
        state[0][i] = numbers(r, n + 1, flavour);
        state[1][i] = copy_of(state[0][i], n + 1);
    }
    for (int i = 0; i < 2; i++) {
        (i ? &wide : scalar)
            ->adamw(state[i][0], g, state[i][1], state[i][2], n, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f,
                    0.19f, 0.002f);
    }
    for (int i = 0; i < 3; i++) {
        assert_same(state[1][i], state[0][i], n + 1, "adamw");
        free(state[0][i]), free(state[1][i]);
    }
    free(g);
}

static void test_adamw(void **state) {
    (void)state;
    struct rng r = rng_make(7, RNG_TEST, 0, 0);
    for (int64_t n = 0; n < 99; n++) adamw_case(&r, n, (enum flavour)(n % FLAVOURS));
}

static void strict_attention(const struct attention_job *job) {
    emulated_strict = STRICT;
    tiles_attention(job);
    emulated_strict = false;
    assert_int_equal(emulated_n_stores, 0);
}

static void test_attention(void **state) {
    (void)state;
    static const int64_t dims[] = {16, 24, 80, 32, 64, 128, 256};
    static const int32_t rows[] = {1, 5, 16, 19, 3, 7, 2}, at[] = {0, 3, 140, 27, 250, 60, 130};
    struct rng r = rng_make(9, RNG_TEST, 0, 0);
    for (size_t i = 0; i < ARRAY_LEN(dims); i++) {
        struct attention_case c = {.head_dim = dims[i],
                                   .n_heads = 1 + (int64_t)i * 2 % 5,
                                   .rows = rows[i],
                                   .at = at[i],
                                   .window = i % 2 ? INT32_MAX : 40,
                                   .dtype = (enum dtype)(i % N_DTYPE),
                                   .page = 32};
        attention_case_check(&tiles, &r, c);
        attention_division_check(&tiles, &r, c, 1 + (int64_t)i % 4);
        attention_tiles_check(&tiles, &r, c, 1 + (int64_t)i % 4);
        c.dtype = DTYPE_F32;
        if (c.rows > 3) attention_neighbour_check(&tiles, &r, c, c.at + 3, 1);
        if (c.rows > 1) attention_outside_check(&tiles, &r, c);
    }
}

static void strict_attention_backward(const struct attention_backward_job *job) {
    emulated_strict = STRICT;
    tiles_attention_backward(job);
    emulated_strict = false;
    assert_int_equal(emulated_n_stores, 0);
}

static void test_attention_backward(void **state) {
    (void)state;
    static const int64_t dims[] = {16, 24, 80, 64, 128}, rows[] = {1, 37, 50, 131, 20};
    struct rng r = rng_make(10, RNG_TEST, 0, 0);
    for (size_t i = 0; i < ARRAY_LEN(dims); i++)
        attention_backward_check(&tiles, &r,
                                 (struct attention_case){.head_dim = dims[i],
                                                         .n_heads = 1 + (int64_t)i * 2 % 5,
                                                         .rows = rows[i],
                                                         .window = i % 2 ? INT32_MAX : 16});
}

static void strict_grad(const struct weight_grad_job *job, int64_t n0, int64_t n1) {
    emulated_strict = STRICT;
    tiles_gemm_grad(job, n0, n1);
    emulated_strict = false;
    assert_int_equal(emulated_n_stores, 0);
}

static void strict_low_rank_grad(const struct low_rank_grad_job *job, int64_t c0, int64_t c1) {
    emulated_strict = STRICT;
    tiles_gemm_low_rank_grad(job, c0, c1);
    emulated_strict = false;
    assert_int_equal(emulated_n_stores, 0);
}

/* Fills the tables of the levels, each starting from the table of the level below. */
static int tables_fill(void **state) {
    (void)state;
    scalar = kernels_for_level(CPU_SCALAR);
    if (scalar == NULL) return -1;
    wide = *scalar;
    emulated_fill_avx512(&wide);
    tiles = wide;
#ifdef EMULATED_AVX512BF16
    emulated_fill_avx512bf16(&tiles);
    tile_twin_by_pairs = true;
#else
    emulated_fill_amx(&tiles);
#endif
    tiles.gemm_tiles_grad = strict_grad;
    tiles.gemm_tiles_low_rank_grad = strict_low_rank_grad;
    tiles.attention = strict_attention;
    tiles.attention_backward = strict_attention_backward;
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_packed_rows),
        cmocka_unit_test(test_adapters),
        cmocka_unit_test(test_bf16_fast),
        cmocka_unit_test(test_tile_config_kept),
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_max),
        cmocka_unit_test(test_exp_everywhere),
        cmocka_unit_test(test_gemm_nn),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_backward),
    };
    return cmocka_run_group_tests_name("emulated", tests, tables_fill, NULL);
}
