/*
 * test_kernels: every function of struct kernels at every level that this machine has, compared
 * with scalar.c, bit for bit.
 *
 * Most sizes do not fill the last vector, pointers are unaligned, values are special (NaN,
 * infinities, denormals, signed zeros), and canaries follow every output. scalar.c itself is
 * compared with plain loops in double. Row results must not depend on the number of rows, the
 * division of outputs or the threads. NaN equals NaN: payloads are not part of the contract.
 *
 * With --bench [TYPE] it prints speeds instead. It reads no files.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "attention_check.h"
#include "kernel/internal.h"
#include "kernel/kernel.h"
#include "kernel/tile_cases.h"

#define CANARY 12345.678f
#define N_CANARIES 20

static struct rng rng;
static const struct kernels *ref; /* the scalar level */

/* n floats that begin one float after a 64-byte boundary, followed by canaries. */
struct floats {
    float *base, *v;
    int64_t n;
};

static struct floats floats_new(int64_t n) {
    struct floats f = {.n = n};
    size_t bytes = ((size_t)(n + 1 + N_CANARIES) * sizeof(float) + 63) / 64 * 64;
    f.base = aligned_alloc(64, bytes);
    assert_non_null(f.base);
    f.v = f.base + 1;
    for (int64_t i = 0; i < n + N_CANARIES; i++) f.v[i] = i < n ? 0 : CANARY;
    return f;
}

static void floats_free(struct floats f) {
    for (int64_t i = f.n; i < f.n + N_CANARIES; i++)
        if (f.v[i] != CANARY)
            fail_msg("value %lld of %lld was overwritten", (long long)i, (long long)f.n);
    free(f.base);
}

static float bits_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static float special_value(void) {
    static const float special[] = {
        0.0f,   -0.0f,          INFINITY, -INFINITY, NAN,    1e-45f,  -1e-45f, 1e-39f, 3e38f,
        -3e38f, 1.1754944e-38f, 88.7f,    88.73f,    -87.4f, -103.9f, -104.1f, 1.0f,   0.5f};
    uint32_t pick = rng_below(&rng, 24);
    if (pick < ARRAY_LEN(special)) return special[pick];
    return pick < 21 ? bits_float(rng_u32(&rng)) : rng_normal(&rng);
}

/* `nasty` 0: normally distributed values; 1: of these, one in eight is replaced by a special value;
 * 2: finite values that are so small that products of two are denormal, and zeros. */
static void fill(float *v, int64_t n, int nasty) {
    for (int64_t i = 0; i < n; i++) {
        v[i] = rng_normal(&rng) * 2;
        if (nasty == 1 && rng_below(&rng, 8) == 0) v[i] = special_value();
        if (nasty == 2) v[i] *= rng_below(&rng, 4) ? 1e-22f : rng_below(&rng, 2) ? 1e-40f : -0.0f;
    }
}

static struct floats filled(int64_t n, int nasty) {
    struct floats f = floats_new(n);
    fill(f.v, n, nasty);
    return f;
}

static struct floats copied(struct floats from) {
    struct floats f = floats_new(from.n);
    memcpy(f.v, from.v, (size_t)from.n * sizeof(float));
    return f;
}

static bool same(float a, float b) {
    return (a != a && b != b) || memcmp(&a, &b, sizeof a) == 0;
}

static void same_all(const float *a, const float *b, int64_t n, const char *what,
                     const struct kernels *k, int64_t size) {
    for (int64_t i = 0; i < n; i++)
        if (!same(a[i], b[i]))
            fail_msg("%s at level %s, size %lld: value %lld is %a, scalar has %a", what, k->name,
                     (long long)size, (long long)i, (double)b[i], (double)a[i]);
}

static void same_one(float a, float b, const char *what, const struct kernels *k, int64_t size) {
    same_all(&a, &b, 1, what, k, size);
}

static const int64_t sizes[] = {576, 1537};
#define SIZE_COUNT (71 + (int)ARRAY_LEN(sizes))
static int64_t size_at(int i) {
    return i <= 70 ? i : sizes[i - 71];
}

/* A check of one level with inputs of n values; `nasty` as in `fill`. */
typedef void (*size_check)(const struct kernels *k, int64_t n, int nasty);

static void each_size(size_check check) {
    for (int l = CPU_AVX2; l < CPU_LEVELS; l++) {
        const struct kernels *k = kernels_for_level((enum cpu_level)l);
        for (int i = 0; k && i < SIZE_COUNT; i++)
            for (int nasty = 0; nasty < 3; nasty++) check(k, size_at(i), nasty);
    }
}

static void check_reductions(const struct kernels *k, int64_t n, int nasty) {
    struct floats a = filled(n, nasty), b = filled(n, nasty);
    same_one(ref->dot(a.v, b.v, n), k->dot(a.v, b.v, n), "dot", k, n);
    same_one(ref->sum(a.v, n), k->sum(a.v, n), "sum", k, n);
    same_one(ref->max(a.v, n), k->max(a.v, n), "max", k, n);
    for (int64_t i = 0; i < n; i++) a.v[i] = nasty == 1 ? NAN : -0.0f;
    same_one(ref->max(a.v, n), k->max(a.v, n), "max of equal values", k, n);
    same_one(ref->dot(a.v, b.v, n), k->dot(a.v, b.v, n), "dot of equal values", k, n);
    floats_free(a);
    floats_free(b);
}

static void check_updates(const struct kernels *k, int64_t n, int nasty) {
    struct floats x = filled(n, nasty), y = filled(n, nasty), z = copied(y), w = filled(n, 0);
    float a = rng_normal(&rng);
    ref->axpy(y.v, a, x.v, n);
    k->axpy(z.v, a, x.v, n);
    same_all(y.v, z.v, n, "axpy", k, n);
    ref->scale(y.v, a, n);
    k->scale(z.v, a, n);
    same_all(y.v, z.v, n, "scale", k, n);
    ref->mask_multiply(y.v, x.v, (const uint8_t *)w.v, a, n, nasty);
    k->mask_multiply(z.v, x.v, (const uint8_t *)w.v, a, n, nasty);
    same_all(y.v, z.v, n, "mask_multiply", k, n);
    ref->rmsnorm(y.v, x.v, y.v, 1e-5f, n);
    k->rmsnorm(z.v, x.v, z.v, 1e-5f, n);
    same_all(y.v, z.v, n, "rmsnorm", k, n);
    floats_free(x);
    floats_free(y);
    floats_free(z);
    floats_free(w);
}

/* n bits; the bytes after them are guards. */
static void check_masks(const struct kernels *k, int64_t n, int nasty) {
    const uint32_t threshold = nasty ? rng_u32(&rng) >> 16 : 0;
    const size_t bytes = (size_t)n / 8 + 9;
    uint32_t *random = xcalloc((size_t)n / 2 + 1, sizeof *random);
    uint8_t *a = xcalloc(bytes, 1), *b = xcalloc(bytes, 1);
    for (int64_t i = 0; i <= n / 2; i++) random[i] = rng_u32(&rng);
    random[0] = threshold << 16 | (threshold - (threshold > 0));
    ref->mask_random(a, random, n, threshold);
    k->mask_random(b, random, n, threshold);
    if (memcmp(a, b, bytes) != 0)
        fail_msg("mask_random at level %s, %lld bits", k->name, (long long)n);
    free(random), free(a), free(b);
}

static void check_rope(const struct kernels *k, int64_t n, int nasty) {
    struct floats c = filled(n, nasty), s = filled(n, nasty), x = filled(2 * n, nasty),
                  y = copied(x);
    ref->rope(x.v, c.v, s.v, n);
    k->rope(y.v, c.v, s.v, n);
    same_all(x.v, y.v, 2 * n, "rope", k, n);
    floats_free(c);
    floats_free(s);
    floats_free(x);
    floats_free(y);
}

/* n columns of three rows: the gradients of a norm's gain and bias, and a row of the norm's
 * backward pass, also in place. */
static void check_norm_backward(const struct kernels *k, int64_t n, bool nasty) {
    static const float mean[3] = {0, 0.25f, -1}, rstd[3] = {1.5f, 0.3f, 7};
    struct floats x = filled(3 * n, nasty), dy = filled(3 * n, nasty), g = filled(n, 0),
                  a = filled(n, 0), b = filled(n, 0), c = copied(a), d = copied(b), u = copied(dy);
    const struct norm_rows rows = {x.v, dy.v, mean, rstd, n, 3, n};
    ref->norm_gain_backward(&rows, a.v, b.v);
    k->norm_gain_backward(&rows, c.v, d.v);
    same_all(a.v, c.v, n, "norm_gain_backward", k, n);
    same_all(b.v, d.v, n, "norm_gain_backward's bias", k, n);
    for (int variant = 0; variant < 4; variant++) { // centred or not, added or not
        ref->norm_backward(a.v, dy.v, x.v, g.v, mean[2], rstd[1], variant & 1, n, variant & 2);
        k->norm_backward(c.v, u.v, x.v, g.v, mean[2], rstd[1], variant & 1, n, variant & 2);
        same_all(a.v, c.v, n, "norm_backward", k, n);
        same_all(dy.v, u.v, n, "norm_backward's dy", k, n);
    }
    k->norm_backward(u.v, u.v, x.v, g.v, mean[2], rstd[1], false, n, false);
    ref->norm_backward(a.v, dy.v, x.v, g.v, mean[2], rstd[1], false, n, false);
    same_all(a.v, u.v, n, "norm_backward in place", k, n);
    struct floats all[] = {x, dy, g, a, b, c, d, u};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) floats_free(all[i]);
}

static void check_activations_and_norms(const struct kernels *k, int64_t n, int nasty) {
    struct floats x = filled(n, nasty), u = filled(n, nasty), y = floats_new(n), z = floats_new(n);
    if (nasty == 2)
        for (int64_t i = 0; i < n; i++) x.v[i] = rng_uniform(&rng) * 220 - 120;
    ref->exp(y.v, x.v, n);
    k->exp(z.v, x.v, n);
    same_all(y.v, z.v, n, "exp", k, n);
    ref->silu_mul(y.v, x.v, u.v, n);
    k->silu_mul(z.v, x.v, u.v, n);
    same_all(y.v, z.v, n, "silu_mul", k, n);
    ref->gelu(y.v, x.v, n);
    k->gelu(z.v, x.v, n);
    same_all(y.v, z.v, n, "gelu", k, n);
    for (int variant = 0; variant < 4; variant++) { // silu and gelu, gated or not
        struct floats dy = filled(n, nasty), up = copied(y), up2 = copied(y);
        const float *by = variant & 2 ? u.v : NULL;
        ref->act_backward(y.v, up.v, dy.v, x.v, by, n, variant & 1);
        k->act_backward(z.v, up2.v, dy.v, x.v, by, n, variant & 1);
        same_all(y.v, z.v, n, "act_backward", k, n);
        same_all(up.v, up2.v, n, "act_backward's dup", k, n);
        floats_free(dy), floats_free(up), floats_free(up2);
    }
    memcpy(z.v, y.v, (size_t)n * sizeof(float));
    ref->softmax_backward(y.v, x.v, 0.3f, 0.125f, n);
    k->softmax_backward(z.v, x.v, 0.3f, 0.125f, n);
    same_all(y.v, z.v, n, "softmax_backward", k, n);
    check_norm_backward(k, n, nasty);
    memcpy(y.v, x.v, (size_t)n * sizeof(float));
    memcpy(z.v, x.v, (size_t)n * sizeof(float));
    same_one(ref->softmax(y.v, n), k->softmax(z.v, n), "softmax's sum", k, n);
    same_all(y.v, z.v, n, "softmax", k, n);
    floats_free(x);
    floats_free(u);
    floats_free(y);
    floats_free(z);
}

static void check_adamw(const struct kernels *k, int64_t n, int nasty) {
    struct floats w = filled(n, nasty), g = filled(n, nasty), m = filled(n, 0), v = filled(n, 0);
    for (int64_t i = 0; i < n; i++) v.v[i] = fabsf(v.v[i]);
    struct floats w2 = copied(w), m2 = copied(m), v2 = copied(v);
    ref->adamw(w.v, g.v, m.v, v.v, n, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f, 0.1f, 0.001f);
    k->adamw(w2.v, g.v, m2.v, v2.v, n, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f, 0.1f, 0.001f);
    same_all(w.v, w2.v, n, "adamw w", k, n);
    same_all(m.v, m2.v, n, "adamw m", k, n);
    same_all(v.v, v2.v, n, "adamw v", k, n);
    struct floats all[] = {w, g, m, v, w2, m2, v2};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) floats_free(all[i]);
}

static void check_quantize_rows(const struct kernels *k, int64_t n, int nasty) {
    int64_t kq = n / 32 * 32;
    struct floats x = filled(n, nasty);
    int8_t *q = malloc((size_t)kq * 2 + 1);
    float *d = malloc((size_t)(kq / 32) * 2 * sizeof(float) + 1);
    uint16_t *h = malloc((size_t)n * 2 * sizeof(uint16_t) + 1);
    if (nasty == 2)
        for (int64_t i = 0; i < n; i++)
            x.v[i] *= 1e-16f; // scales near the smallest one whose inverse is finite
    ref->quantize_row(x.v, kq, q, d);
    k->quantize_row(x.v, kq, q + kq, d + kq / 32);
    assert_memory_equal(q, q + kq, (size_t)kq);
    same_all(d, d + kq / 32, kq / 32, "quantize_row", k, n);
    int32_t *sums = malloc((size_t)(kq / 32) * 2 * sizeof *sums + 1);
    float *scaled = malloc((size_t)(kq / 32) * 2 * sizeof *scaled + 1);
    ref->block_sums(sums, scaled, q, d, kq / 32);
    k->block_sums(sums + kq / 32, scaled + kq / 32, q, d, kq / 32);
    if (kq > 0) assert_memory_equal(sums, sums + kq / 32, (size_t)(kq / 32) * sizeof *sums);
    same_all(scaled, scaled + kq / 32, kq / 32, "block_sums", k, n);
    free(sums);
    free(scaled);
    int16_t *words = malloc((size_t)kq * 2 * sizeof *words + 1);
    ref->quantize_row16(x.v, kq, words, d);
    k->quantize_row16(x.v, kq, words + kq, d + kq / 32);
    assert_memory_equal(words, words + kq, (size_t)kq * sizeof *words);
    same_all(d, d + kq / 32, kq / 32, "quantize_row16", k, n);
    for (int64_t i = 0; i < kq; i++) words[kq + i] = words[kq - 1 - i];
    ref->multiply_to_int8(words, words + kq, kq, q);
    k->multiply_to_int8(words, words + kq, kq, q + kq);
    assert_memory_equal(q, q + kq, (size_t)kq);
    free(words);
    free(q);
    free(d);
    free(h);
    floats_free(x);
}

/* Super-blocks with equal values, zeros, one sign or tiny values as well: blocks and groups end
 * early or have no solution. `n` is the seed. */
static void check_quantizer_searches(const struct kernels *k, int64_t n, int nasty) {
    static const struct affine_search searches[] = {{15, 20, -1.0f, 0.1f}, {31, 15, -0.5f, 0.1f}};
    struct floats x = filled(256, nasty), scale = floats_new(16), min = floats_new(8),
                  scale2 = floats_new(16), min2 = floats_new(8);
    int8_t q[256], q2[256];
    for (int i = 0; i < 256; i++) {
        const int64_t kind = (i / 16 + n) % 7;
        if (x.v[i] != x.v[i]) x.v[i] = NAN; // the results depend on the bits of a NaN
        if (kind == 1) x.v[i] = 0.25f;
        if (kind == 2) x.v[i] = i % 2 ? 0.0f : -0.0f;
        if (kind == 3) x.v[i] = fabsf(x.v[i]);
        if (kind == 4) x.v[i] *= 1e-20f;
    }
    for (size_t i = 0; i < ARRAY_LEN(searches); i++) {
        ref->affine_fit(x.v, &searches[i], scale.v, min.v, q);
        k->affine_fit(x.v, &searches[i], scale2.v, min2.v, q2);
        same_all(scale.v, scale2.v, 8, "affine_fit scale", k, n);
        same_all(min.v, min2.v, 8, "affine_fit min", k, n);
        assert_memory_equal(q, q2, sizeof q);
    }
    ref->symmetric_fit(x.v, scale.v, q);
    k->symmetric_fit(x.v, scale2.v, q2);
    same_all(scale.v, scale2.v, 16, "symmetric_fit", k, n);
    assert_memory_equal(q, q2, sizeof q);
    struct floats all[] = {x, scale, min, scale2, min2};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) floats_free(all[i]);
}

static void test_reductions(void **state) {
    (void)state;
    each_size(check_reductions);
}
static void test_updates(void **state) {
    (void)state;
    each_size(check_updates);
    each_size(check_masks);
}
static void test_rope(void **state) {
    (void)state;
    each_size(check_rope);
}
static void test_activations_and_norms(void **state) {
    (void)state;
    each_size(check_activations_and_norms);
}
static void test_adamw(void **state) {
    (void)state;
    each_size(check_adamw);
}
static void test_quantize_rows(void **state) {
    (void)state;
    each_size(check_quantize_rows);
}
static void test_quantizer_searches(void **state) {
    (void)state;
    each_size(check_quantizer_searches);
}

/* exp of every 4099th bit pattern of a float, so that every exponent occurs. */
static void test_exp_range(void **state) {
    (void)state;
    enum { N = 4096 };
    static float x[N], y[N], z[N];
    for (uint64_t u = 0; u < 1ull << 32;) {
        int n = 0;
        for (; n < N && u < 1ull << 32; n++, u += 4099) x[n] = bits_float((uint32_t)u);
        ref->exp(y, x, n);
        for (int l = CPU_AVX2; l < CPU_LEVELS; l++) {
            const struct kernels *k = kernels_for_level((enum cpu_level)l);
            if (!k) continue;
            k->exp(z, x, n);
            same_all(y, z, n, "exp", k, n);
        }
    }
}

/* n floats converted to every dtype. */
struct typed_rows {
    void *v[N_DTYPE];
};

static void near(double got, double want, double tolerance, const char *what) {
    if (!(fabs(got - want) <= tolerance)) fail_msg("%s is %.9g, expected %.9g", what, got, want);
}

static struct typed_rows typed_rows_new(const float *x, int64_t n) {
    struct typed_rows r;
    for (int e = 0; e < N_DTYPE; e++) {
        r.v[e] = malloc((size_t)n * dtype_size((enum dtype)e));
        dtype_from_f32((enum dtype)e, x, r.v[e], n);
    }
    return r;
}

static void typed_rows_free(struct typed_rows e) {
    for (int i = 0; i < N_DTYPE; i++) free(e.v[i]);
}

static void check_gemm(const struct kernels *k, int64_t rows, int64_t n, int64_t width, int nasty) {
    int64_t ldx = width + 3, ldw = width + 1, ldy = n + 2;
    struct floats x = filled(rows * ldx, nasty), w = filled(n * ldw, nasty),
                  y = filled(rows * ldy, 0), z = copied(y);
    struct typed_rows h = typed_rows_new(w.v, n * ldw);
    for (int add = 0; add < 2; add++) {
        ref->gemm_f32(y.v, ldy, x.v, ldx, rows, w.v, ldw, width, 0, n, add);
        k->gemm_f32(z.v, ldy, x.v, ldx, rows, w.v, ldw, width, 0, n, add);
        same_all(y.v, z.v, rows * ldy, "gemm_f32", k, width);
        ref->gemm_bf16(y.v, ldy, x.v, ldx, rows, h.v[DTYPE_BF16], ldw, width, 0, n, add);
        k->gemm_bf16(z.v, ldy, x.v, ldx, rows, h.v[DTYPE_BF16], ldw, width, 0, n, add);
        same_all(y.v, z.v, rows * ldy, "gemm_bf16", k, width);
        ref->gemm_f16(y.v, ldy, x.v, ldx, rows, h.v[DTYPE_F16], ldw, width, 0, n, add);
        k->gemm_f16(z.v, ldy, x.v, ldx, rows, h.v[DTYPE_F16], ldw, width, 0, n, add);
        same_all(y.v, z.v, rows * ldy, "gemm_f16", k, width);
        ref->gemm_i8(y.v, ldy, x.v, ldx, rows, h.v[DTYPE_I8], ldw, width, 0, n, add);
        k->gemm_i8(z.v, ldy, x.v, ldx, rows, h.v[DTYPE_I8], ldw, width, 0, n, add);
        same_all(y.v, z.v, rows * ldy, "gemm_i8", k, width);
    }
    typed_rows_free(h);
    floats_free(x);
    floats_free(w);
    floats_free(y);
    floats_free(z);
}

/* `transposed`: t(m, j) and t(m, j + 1) are far apart in memory, else adjacent. */
static void check_gemm_nn(const struct kernels *k, int64_t rows, int64_t n, int64_t width,
                          int nasty, bool transposed) {
    int64_t ldv = n + 1, ldy = n + 2, tm = transposed ? 1 : width + 3,
            tj = transposed ? rows + 3 : 1;
    struct floats t = filled((rows + 3) * (width + 3), nasty), v = filled(width * ldv, nasty),
                  y = filled(rows * ldy, 0), z = copied(y);
    struct typed_rows h = typed_rows_new(v.v, width * ldv);
    ref->gemm_nn_f32(y.v, ldy, t.v, tm, tj, rows, v.v, ldv, width, n);
    k->gemm_nn_f32(z.v, ldy, t.v, tm, tj, rows, v.v, ldv, width, n);
    same_all(y.v, z.v, rows * ldy, "gemm_nn_f32", k, width);
    ref->gemm_nn_bf16(y.v, ldy, t.v, tm, tj, rows, h.v[DTYPE_BF16], ldv, width, n);
    k->gemm_nn_bf16(z.v, ldy, t.v, tm, tj, rows, h.v[DTYPE_BF16], ldv, width, n);
    same_all(y.v, z.v, rows * ldy, "gemm_nn_bf16", k, width);
    ref->gemm_nn_f16(y.v, ldy, t.v, tm, tj, rows, h.v[DTYPE_F16], ldv, width, n);
    k->gemm_nn_f16(z.v, ldy, t.v, tm, tj, rows, h.v[DTYPE_F16], ldv, width, n);
    same_all(y.v, z.v, rows * ldy, "gemm_nn_f16", k, width);
    ref->gemm_nn_i8(y.v, ldy, t.v, tm, tj, rows, h.v[DTYPE_I8], ldv, width, n);
    k->gemm_nn_i8(z.v, ldy, t.v, tm, tj, rows, h.v[DTYPE_I8], ldv, width, n);
    same_all(y.v, z.v, rows * ldy, "gemm_nn_i8", k, width);
    typed_rows_free(h);
    struct floats all[] = {t, v, y, z};
    for (size_t j = 0; j < ARRAY_LEN(all); j++) floats_free(all[j]);
}

static void test_gemm_nn(void **state) {
    (void)state;
    static const int64_t ns[] = {1, 7, 8, 16, 31, 64, 100, 130}, ks[] = {1, 2, 5, 8, 33},
                         ms[] = {1, 2, 4, 7, 13, 24};
    for (int l = CPU_AVX2; l < CPU_LEVELS; l++) {
        const struct kernels *k = kernels_for_level((enum cpu_level)l);
        for (size_t i = 0; k && i < ARRAY_LEN(ns) * ARRAY_LEN(ks) * ARRAY_LEN(ms); i++)
            for (int transposed = 0; transposed < 2; transposed++)
                check_gemm_nn(k, ms[i % 6], ns[i / 6 % ARRAY_LEN(ns)], ks[i / 6 / ARRAY_LEN(ns)],
                              i % 5 == 4, transposed);
        // more than one block of rows, and of the sum, at every level
        static const int64_t large[][3] = {
            {97, 40, 257}, {203, 17, 600}, {400, 33, 70}, {26, 96, 512}};
        for (size_t i = 0; k && i < 2 * ARRAY_LEN(large); i++)
            check_gemm_nn(k, large[i / 2][0], large[i / 2][1], large[i / 2][2], i == 3, i % 2);
    }
}

static void test_gemm(void **state) {
    (void)state;
    static const int64_t widths[] = {1, 7, 8, 15, 16, 17, 31, 33, 48, 63, 64, 70, 192, 577};
    for (int l = CPU_AVX2; l < CPU_LEVELS; l++) {
        const struct kernels *k = kernels_for_level((enum cpu_level)l);
        for (size_t i = 0; k && i < ARRAY_LEN(widths); i++)
            for (int64_t rows = 1; rows <= 6; rows++)
                for (int64_t n = 1; n <= 14; n += rows == 3 ? 1 : 4)
                    check_gemm(k, rows, n, widths[i], (int)(rows + n) % 3);
        // Larger than the blocks that fit in the caches; and enough rows for the outputs to be
        // transposed (gemm_lanes in avx2.c), with K in one block and in several, and with
        // remainders of rows and outputs.
        static const int64_t large[][3] = {{37, 41, 1537}, {3, 50, 6000},  {61, 37, 192},
                                           {53, 16, 32},   {49, 20, 1600}, {51, 33, 3072}};
        for (size_t i = 0; k && i < ARRAY_LEN(large); i++)
            check_gemm(k, large[i][0], large[i][1], large[i][2], (int)i % 3);
    }
}

/* A matrix of any type with random rows; `file` receives the rows in file order (free it).
 * `extreme`: the bytes are random, half of them 0x80, except the scales of q8_0 and q4_0. */
static void matrix_random(struct matrix *m, enum tensor_type t, int64_t n, int64_t k,
                          enum numeric_class cls, struct arena *arena, uint8_t **file,
                          bool extreme) {
    size_t bytes = tensor_row_bytes(t, k);
    float *row = malloc((size_t)k * sizeof(float));
    *file = aligned_alloc(64, ((size_t)n * bytes + 63) / 64 * 64);
    for (int64_t i = 0; i < n; i++) {
        uint8_t *to = *file + (size_t)i * bytes;
        fill(row, k, 0);
        tensor_from_f32(t, row, to, k);
        // a file may contain any byte: in q8_0 also -128, which quantisation never writes
        for (size_t j = 0; extreme && j < bytes; j++)
            if (j % (t == TENSOR_Q8_0 ? 34 : 18) >= 2)
                to[j] = rng_below(&rng, 2) ? 0x80 : (uint8_t)rng_u32(&rng);
    }
    struct error err;
    assert_int_equal(matrix_init(m, t, n, k, *file, NULL, cls, NULL, arena, &err), OK);
    free(row);
}

static struct gemm_input inputs_of(const struct kernels *k, struct floats x, int64_t rows,
                                   int64_t width, void **scratch) {
    struct gemm_input in;
    *scratch = calloc(1, gemm_input_scratch(rows, width));
    gemm_input_prepare(&in, x.v, width, rows, width, width % 32 == 0, false, *scratch, NULL);
    for (int64_t m = 0; in.q && m < rows; m++)
        k->quantize_row(x.v + m * width, width, in.q + m * width, in.d + m * width / 32);
    return in;
}

static void fill_i8(int8_t *p, int64_t n) {
    for (int64_t i = 0; i < n; i++) p[i] = (int8_t)((int)rng_below(&rng, 255) - 127);
}

/* Int8 times int8: the bits of scalar at every level, and scalar is near the sum in double. */
static void check_gemm_i8_i8(const struct kernels *k, int64_t rows, int64_t n, int64_t width) {
    void *scratch;
    struct floats x = filled(rows * width, 0), y = filled(rows * (n + 1), 0), z = copied(y);
    int8_t *w = malloc((size_t)(n * width));
    fill_i8(w, n * width);
    struct gemm_input in = inputs_of(ref, x, rows, width, &scratch);
    ref->gemm_i8_i8(y.v, n + 1, &in, w, width, n > 2, n);
    k->gemm_i8_i8(z.v, n + 1, &in, w, width, n > 2, n);
    same_all(y.v, z.v, rows * (n + 1), "gemm_i8_i8", k, width);
    for (int64_t i = 0; i < rows * n; i++) {
        if (i % n < (n > 2)) continue;
        double want = 0, magnitude = 0;
        for (int64_t j = 0; j < width; j++) {
            double v = (double)in.q[i / n * width + j] * (double)w[i % n * width + j] *
                       (double)in.d[(i / n * width + j) / 32];
            want += v, magnitude += fabs(v);
        }
        near((double)y.v[i / n * (n + 1) + i % n], want, 1e-6 * magnitude, "gemm_i8_i8");
    }
    free(scratch);
    free(w);
    floats_free(x);
    floats_free(y);
    floats_free(z);
}

/* The same for int8 in pairs times t, whose values are in the whole range of 16 bits. */
static void check_gemm_nn_i16_i8(const struct kernels *k, int64_t rows, int64_t n, int64_t pairs) {
    int64_t ldv = n + 3, ldt = 2 * pairs + 1, ldy = n + 2;
    int16_t *t = malloc((size_t)(rows * ldt) * sizeof *t);
    int8_t *v = malloc((size_t)(2 * ldv * pairs));
    struct floats s = filled(rows, 0), y = filled(rows * ldy, 0), z = copied(y), y0 = copied(y);
    for (int64_t i = 0; i < rows * ldt; i++) t[i] = (int16_t)((int)rng_below(&rng, 65535) - 32767);
    fill_i8(v, 2 * ldv * pairs);
    ref->gemm_nn_i16_i8(y.v, ldy, t, ldt, s.v, rows, v, ldv, pairs, n);
    k->gemm_nn_i16_i8(z.v, ldy, t, ldt, s.v, rows, v, ldv, pairs, n);
    same_all(y.v, z.v, rows * ldy, "gemm_nn_i16_i8", k, n);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t c = 0; c < n; c++) {
            double sum = 0, by = (double)s.v[m], old = (double)y0.v[m * ldy + c];
            for (int64_t j = 0; j < 2 * pairs; j++)
                sum += (double)t[m * ldt + j] * (double)v[2 * (j / 2 * ldv + c) + j % 2];
            near((double)y.v[m * ldy + c], old + by * sum, 2e-7 * (fabs(old) + fabs(by * sum)),
                 "gemm_nn_i16_i8");
        }
    free(t);
    free(v);
    struct floats all[] = {s, y, z, y0};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) floats_free(all[i]);
}

static void test_int8_rows(void **state) {
    (void)state;
    static const int64_t widths[] = {32, 64, 192, 576}, ns[] = {1, 7, 8, 9, 16, 48, 64, 100, 130},
                         pairs[] = {1, 2, 4, 32};
    for (int l = CPU_SCALAR; l < CPU_LEVELS; l++) {
        const struct kernels *k = kernels_for_level((enum cpu_level)l);
        for (int64_t rows = 1; k && rows <= 6; rows++)
            for (size_t i = 0; i < ARRAY_LEN(ns); i++) {
                check_gemm_i8_i8(k, rows, ns[i] % 20, widths[i % ARRAY_LEN(widths)]);
                check_gemm_nn_i16_i8(k, rows, ns[i], pairs[(i + (size_t)rows) % ARRAY_LEN(pairs)]);
            }
    }
}

/* t is rounded to 16 bits. An output's error is at most the sum of half a rounding step times |v|
 * over the ranks. A NaN in a row of t makes all outputs of the row NaN. */
static void test_gemm_nn_i8_pairs(void **state) {
    (void)state;
    enum { ROWS = 35, N = 40, RANKS = 10 };
    struct floats t = filled(ROWS * 64, 0), y = filled(ROWS * N, 0), y0 = copied(y);
    int8_t v[RANKS * N];
    fill_i8(v, RANKS * N);
    memset(t.v + 64, 0, 64 * sizeof(float));
    t.v[2 * 64 + 3] = NAN;
    gemm_nn_i8_pairs(y.v, N, t.v, 64, ROWS, v, N, RANKS, N);
    for (int m = 0; m < ROWS; m++)
        for (int c = 0; c < N; c++) {
            double want = (double)y0.v[m * N + c], tolerance = 1e-6 * fabs(want);
            double step = (double)row_amax(t.v + 64 * m, RANKS) / 32767;
            for (int j = 0; j < RANKS; j++) {
                double b = v[2 * (j / 2 * N + c) + j % 2];
                want += (double)t.v[64 * m + j] * b;
                tolerance += 0.51 * step * fabs(b) + 1e-6 * fabs((double)t.v[64 * m + j] * b);
            }
            if (m == 2)
                assert_true(isnan(y.v[m * N + c]));
            else
                near((double)y.v[m * N + c], want, tolerance, "gemm_nn_i8_pairs");
        }
    struct floats all[] = {t, y, y0};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) floats_free(all[i]);
}

static void packed_mul(const struct kernels *k, float *y, int64_t ldy, const struct gemm_input *in,
                       const struct matrix *w, bool add) {
    (w->layout == LAYOUT_BF16 ? k->gemm_bf16_fast
     : w->layout < LAYOUT_Q4  ? k->gemm_q8
                              : k->gemm_q4)(y, ldy, in, w, 0, w->n, add);
    if (w->mins) k->gemm_mins(y, ldy, in, w, 0, w->n);
}

/* A product with packed weights has the bits of scalar, with and without `add`. The class is fast,
 * because bf16 is packed in the fast class only. */
static void check_packed(const struct kernels *k, enum tensor_type t, int64_t rows, int64_t n,
                         int64_t width, bool extreme) {
    struct arena arena = {0};
    struct matrix w;
    uint8_t *file;
    void *scratch;
    matrix_random(&w, t, n, width, NUMERIC_FAST, &arena, &file, extreme);
    struct floats x = filled(rows * width, extreme), y = filled(rows * (n + 1), 0), z = copied(y);
    struct gemm_input in = inputs_of(ref, x, rows, width, &scratch);
    const struct prefetch_range soon[] = {{y.v, 1}, {file, 300}, {x.v, 0}, {w.data, 64}};
    for (int add = 0; add < 2; add++) {
        struct prefetch_list ahead = {soon, ARRAY_LEN(soon), 0, 0};
        packed_mul(ref, y.v, n + 1, &in, &w, add);
        in.prefetch = add ? &ahead : NULL; // prefetches change no result
        packed_mul(k, z.v, n + 1, &in, &w, add);
        same_all(y.v, z.v, rows * (n + 1), tensor_type_name(t), k, width);
    }
    free(scratch);
    free(file);
    arena_release(&arena);
    floats_free(x);
    floats_free(y);
    floats_free(z);
}

/* Every number of rows up to several tiles; K in one chunk (amx_int8.c) and in several. `extreme`
 * is for q8_0 and q4_0, the first two types. */
static void test_packed(void **state) {
    (void)state;
    static const enum tensor_type packed_types[] = {TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_Q4_1,
                                                    TENSOR_Q4_K, TENSOR_Q6_K, TENSOR_NF4};
    static const int64_t widths[] = {32, 64, 96, 192, 256, 288, 576, 768},
                         counts[] = {1, 7, 8, 9, 15, 16, 17, 40, 50};
    for (int l = CPU_AVX2; l < CPU_LEVELS; l++) {
        const struct kernels *k = kernels_for_level((enum cpu_level)l);
        for (size_t i = 0; k && i < 70 * 2 * ARRAY_LEN(packed_types); i++) {
            const size_t t = i % ARRAY_LEN(packed_types),
                         block = (size_t)tensor_type_block_size(packed_types[t]);
            const int64_t rows = 1 + (int64_t)(i / ARRAY_LEN(packed_types) % 70),
                          variant = (int64_t)(i / 7);
            const int64_t width = widths[(size_t)variant % ARRAY_LEN(widths)];
            check_packed(k, packed_types[t], rows, counts[(size_t)variant % ARRAY_LEN(counts)],
                         (width + (int64_t)block - 1) / (int64_t)block * (int64_t)block,
                         t < 2 && variant % 3 == 2);
        }
        for (size_t t = 0; k && t < ARRAY_LEN(packed_types); t += 2)
            check_packed(k, packed_types[t], 67, 150, 4096, false);
        if (k) check_packed(k, TENSOR_Q4_0, 3, 20, 32 * 1100, false);
        if (k) check_packed(k, TENSOR_Q8_0, 3, 20, 32 * 600, true);
        if (k) check_packed(k, TENSOR_Q4_1, 7, 20, 32 * 600, false); // minima in three parts
        if (k) check_packed(k, TENSOR_Q4_K, 70, 33, 32 * 280, false);
        if (k) check_packed(k, TENSOR_Q8_0, 131, 20, 32 * 70, true);
    }
}

/* Without tiles the fast class has scalar's bits too: every number of rows, odd and long K, panels
 * that do not fill the last tile or block. */
static void test_bf16_fast(void **state) {
    (void)state;
    static const int64_t widths[] = {1, 31, 64, 75}, counts[] = {1, 16, 17, 50, 100};
    for (int l = CPU_AVX2; l < CPU_AVX512BF16; l++) {
        const struct kernels *k = kernels_for_level((enum cpu_level)l);
        for (int64_t rows = 1; k && rows <= 20; rows++)
            for (size_t i = 0; i < ARRAY_LEN(counts); i++)
                check_packed(k, TENSOR_BF16, rows, counts[i],
                             widths[(i + (size_t)rows) % ARRAY_LEN(widths)],
                             (i + (size_t)rows) % 3);
        if (k) check_packed(k, TENSOR_BF16, 13, 100, 1501, false);
    }
}

/* Outputs [n0, n1) of `rows` rows from m0 on, by the function of struct kernels for w's type. */
static void product(const struct kernels *k, const struct matrix *w, struct gemm_input in,
                    int64_t m0, int64_t rows, int64_t n0, int64_t n1, float *y, int64_t ldy) {
    in = gemm_input_rows(&in, m0, m0 + rows);
    y += m0 * ldy;
    if (w->type == TENSOR_Q8_0)
        k->gemm_q8(y, ldy, &in, w, n0, n1, false);
    else if (w->type == TENSOR_Q4_0)
        k->gemm_q4(y, ldy, &in, w, n0, n1, false);
    else if (w->packed)
        k->gemm_bf16_fast(y, ldy, &in, w, n0, n1, false);
    else if (w->type == TENSOR_BF16)
        k->gemm_bf16(y, ldy, in.x, in.ldx, rows, w->data, w->k, w->k, n0, n1, false);
    else if (w->type == TENSOR_F16)
        k->gemm_f16(y, ldy, in.x, in.ldx, rows, w->data, w->k, w->k, n0, n1, false);
    else
        k->gemm_f32(y, ldy, in.x, in.ldx, rows, w->data, w->k, w->k, n0, n1, false);
}

static void check_invariance(const struct kernels *k, enum tensor_type t, enum numeric_class cls) {
    enum { ROWS = 64, N = 83, K = 160 };
    static float whole[ROWS * N], part[ROWS * N];
    struct arena arena = {0};
    struct matrix w;
    uint8_t *file;
    void *scratch;
    matrix_random(&w, t, N, K, cls, &arena, &file, false);
    struct floats x = filled(ROWS * K, 0);
    struct gemm_input in = inputs_of(k, x, ROWS, K, &scratch);
    product(k, &w, in, 0, ROWS, 0, N, whole, N);
    for (int rows = 1; rows <= 9; rows++) {
        memset(part, 0, sizeof part);
        for (int m = 0; m < ROWS; m += rows)
            product(k, &w, in, m, MIN(rows, ROWS - m), 0, N, part, N);
        same_all(whole, part, ROWS * N, "fewer rows", k, rows);
    }
    for (int step = 16; step < N; step += 16) {
        memset(part, 0, sizeof part);
        for (int n = 0; n < N; n += step) product(k, &w, in, 0, ROWS, n, MIN(n + step, N), part, N);
        same_all(whole, part, ROWS * N, "fewer outputs", k, step);
    }
    free(scratch);
    free(file);
    floats_free(x);
    arena_release(&arena);
}

static const enum tensor_type types[] = {TENSOR_F32, TENSOR_F16, TENSOR_BF16, TENSOR_Q8_0,
                                         TENSOR_Q4_0};

static void test_invariance(void **state) {
    (void)state;
    for (int l = 0; l < CPU_LEVELS; l++) {
        const struct kernels *k = kernels_for_level((enum cpu_level)l);
        for (size_t t = 0; k && t < ARRAY_LEN(types); t++)
            check_invariance(k, types[t], NUMERIC_EXACT);
        if (k) check_invariance(k, TENSOR_BF16, NUMERIC_FAST);
    }
}

/* Each output compared with a sum in double over the quantised operands, and with a larger
 * tolerance over the original inputs. */
static void product_verify(const struct matrix *w, const struct gemm_input *in, const float *y,
                           int64_t ldy) {
    float *row = malloc((size_t)w->k * sizeof(float));
    bool rounded = in->tiles, is_quantized = !rounded && tensor_type_is_quantized(w->type);
    for (int64_t n = 0; n < w->n; n++) {
        matrix_get_row(w, n, row);
        for (int64_t m = 0; m < in->rows; m++) {
            double quantized_sum = 0, exact = 0, magnitude = 0;
            for (int64_t k = 0; k < w->k; k++) {
                double x = (double)in->x[m * in->ldx + k];
                double xq = is_quantized
                                ? (double)in->q[m * w->k + k] * (double)in->d[(m * w->k + k) / 32]
                                : x;
                quantized_sum += xq * (double)row[k];
                exact += x * (double)row[k];
                magnitude += fabs(x * (double)row[k]);
            }
            assert_true(fabs((double)y[m * ldy + n] - quantized_sum) <=
                        (rounded ? 1e-2 : 2e-6) * magnitude);
            assert_true(fabs((double)y[m * ldy + n] - exact) <=
                        (is_quantized || rounded ? 2e-2 : 2e-6) * magnitude);
        }
    }
    free(row);
}

static void check_matrix_mul(enum tensor_type t, enum numeric_class cls, enum row_path path,
                             int64_t rows, int64_t n, int64_t k) {
    struct arena arena = {0};
    struct matrix w;
    uint8_t *file;
    matrix_random(&w, t, n, k, cls, &arena, &file, false);
    struct floats x = filled(rows * k, 0), first = floats_new(rows * n),
                  other = floats_new(rows * n);
    void *scratch = malloc(gemm_input_scratch(rows, k));
    for (int threads = 1; threads <= 3; threads++) {
        struct pool *pool = pool_new(threads);
        struct gemm_input in = gemm_input_for(&w, 1, x.v, rows, path, scratch, pool);
        float *y = threads == 1 ? first.v : other.v;
        matrix_mul(y, n, &in, &w, false, pool);
        if (threads == 1)
            product_verify(&w, &in, y, n);
        else
            same_all(first.v, y, rows * n, "threads", kernels_get(), threads);
        pool_free(pool);
    }
    free(scratch);
    free(file);
    arena_release(&arena);
    floats_free(x);
    floats_free(first);
    floats_free(other);
}

static void test_matrix_mul(void **state) {
    (void)state;
    for (size_t t = 0; t < ARRAY_LEN(types); t++) {
        for (int p = ROWS_EXACT; p <= ROWS_TRAINING; p++) {
            enum numeric_class cls = p == ROWS_EXACT ? NUMERIC_EXACT : NUMERIC_FAST;
            check_matrix_mul(types[t], cls, (enum row_path)p, 1, 70, 96);
            check_matrix_mul(types[t], cls, (enum row_path)p, 9, 531, 192);
            check_matrix_mul(types[t], cls, (enum row_path)p, 400, 8, 192);
        }
    }
    check_matrix_mul(TENSOR_BF16, NUMERIC_FAST, ROWS_EXACT, 33, 531, 200);
    check_matrix_mul(TENSOR_BF16, NUMERIC_FAST, ROWS_EXACT, 400, 8, 192);
}

static void check_gemm_pool(int64_t rows, int64_t n, int64_t k) {
    struct floats x = filled(rows * k, 0), w = filled(n * k, 0), y = floats_new(rows * n),
                  z = floats_new(rows * n);
    ref->gemm_f32(y.v, n, x.v, k, rows, w.v, k, k, 0, n, false);
    for (int threads = 1; threads <= 3; threads++) {
        struct pool *pool = pool_new(threads);
        gemm(z.v, n, x.v, k, rows, w.v, k, k, n, false, pool);
        same_all(y.v, z.v, rows * n, "gemm over a pool", kernels_get(), threads);
        pool_free(pool);
    }
    floats_free(x);
    floats_free(w);
    floats_free(y);
    floats_free(z);
}

static void test_gemm_pool(void **state) {
    (void)state;
    check_gemm_pool(3, 5, 7);
    check_gemm_pool(130, 70, 33);
    check_gemm_pool(70, 131, 65);
}

static const enum tensor_type all_types[] = {TENSOR_F32,  TENSOR_F16,  TENSOR_BF16, TENSOR_Q8_0,
                                             TENSOR_Q4_0, TENSOR_Q4_1, TENSOR_Q5_0, TENSOR_Q5_1,
                                             TENSOR_Q4_K, TENSOR_Q5_K, TENSOR_Q6_K, TENSOR_NF4};

/* dX = dY W in double, from the rows that matrix_get_row returns. */
static double *backward_naive(const struct matrix *w, const float *dy, int64_t lddy, int64_t rows) {
    double *dx = calloc((size_t)(rows * w->k), sizeof *dx);
    float *row = malloc((size_t)w->k * sizeof *row);
    for (int64_t o = 0; o < w->n; o++) {
        matrix_get_row(w, o, row);
        for (int64_t i = 0; i < rows * w->k; i++)
            dx[i] += (double)dy[i / w->k * lddy + o] * (double)row[i % w->k];
    }
    free(row);
    return dx;
}

/* Checks dx against `want`: the norm of the difference relative to the norm of `want`, and the
 * cosine. */
static void backward_near(const float *dx, int64_t lddx, const double *want, int64_t rows,
                          int64_t k, enum grad_path path, const char *what) {
    static const char *const names[] = {"f32", "int8", "tiles"};
    const bool f32 = path == GRAD_F32;
    double error2 = 0, dot = 0, got2 = 1e-300, want2 = 1e-300;
    for (int64_t i = 0; i < rows * k; i++) {
        double got = (double)dx[i / k * lddx + i % k];
        error2 += (got - want[i]) * (got - want[i]);
        dot += got * want[i], got2 += got * got, want2 += want[i] * want[i];
    }
    if (!(sqrt(error2 / want2) <= (f32 ? 2e-6 : 1.5e-2)) ||
        dot / sqrt(got2 * want2) < (f32 ? 1 - 1e-9 : 0.9999))
        fail_msg("%s %s: error %g of the norm, cosine %.9f", what, names[path],
                 sqrt(error2 / want2), dot / sqrt(got2 * want2));
}

/* One, two and three threads and rows one at a time give the same bits; added to dX they give about
 * twice the values. */
static void check_backward(enum tensor_type t, enum numeric_class cls, enum grad_path path,
                           int64_t rows, int64_t n, int64_t k) {
    struct arena arena = {0};
    struct matrix w;
    uint8_t *file;
    matrix_random(&w, t, n, k, cls, &arena, &file, false);
    int64_t lddx = k + 5, lddy = n + 3;
    struct floats dy = filled(rows * lddy, 0), first = floats_new(rows * lddx);
    double *want = backward_naive(&w, dy.v, lddy, rows);
    void *scratch = malloc(matrix_mul_backward_scratch(n, 3));
    matrix_mul_backward(first.v, lddx, dy.v, lddy, rows, &w, path, false, scratch, NULL);
    backward_near(first.v, lddx, want, rows, k, path, tensor_type_name(t));
    for (int threads = 1; threads <= 3; threads++) {
        struct floats other = floats_new(rows * lddx);
        struct pool *pool = pool_new(threads);
        for (int64_t m = 0, n_rows = threads == 1 ? 1 : rows; m < rows; m += n_rows)
            matrix_mul_backward(other.v + m * lddx, lddx, dy.v + m * lddy, lddy, n_rows, &w, path,
                                false, scratch, pool);
        same_all(first.v, other.v, rows * lddx, "matrix_mul_backward, divided", kernels_get(),
                 threads);
        matrix_mul_backward(other.v, lddx, dy.v, lddy, rows, &w, path, true, scratch, pool);
        for (int64_t i = 0; i < rows * k; i++)
            near((double)other.v[i / k * lddx + i % k], 2 * (double)first.v[i / k * lddx + i % k],
                 1e-4 + 1e-4 * fabs(want[i]), "matrix_mul_backward, added");
        pool_free(pool);
        floats_free(other);
    }
    free(want);
    free(scratch);
    free(file);
    arena_release(&arena);
    floats_free(dy);
    floats_free(first);
}

static void test_matrix_mul_backward(void **state) {
    (void)state;
    for (size_t i = 0; i < 3 * ARRAY_LEN(all_types); i++) {
        enum tensor_type t = all_types[i / 3];
        enum grad_path path = (enum grad_path)(i % 3);
        enum numeric_class cls = path == GRAD_TILES ? NUMERIC_FAST : NUMERIC_EXACT;
        if (path == GRAD_INT8 && !tensor_type_is_quantized(t)) continue;
        if (path == GRAD_TILES && !kernels_get()->gemm_tiles) continue;
        check_backward(t, cls, path, 1, 70, 512);
        check_backward(t, cls, path, 37, 275, 256);
        check_backward(t, cls, path, 3, 5, 768);
    }
    check_backward(TENSOR_F32, NUMERIC_EXACT, GRAD_F32, 70, 40, 33);
    check_backward(TENSOR_BF16, NUMERIC_FAST, GRAD_F32, 40, 300, 200);
    check_backward(TENSOR_Q4_0, NUMERIC_EXACT, GRAD_INT8, 2, 9000, 64);
    check_backward(TENSOR_Q4_0, NUMERIC_FAST, kernels_get()->gemm_tiles ? GRAD_TILES : GRAD_F32,
                   600, 4200, 64);
}

/* Gradients of weights in tiles: near the exact sums, and the same bits for one, two and three
 * threads and for rows that are divided at a multiple of 32. */
static void check_weight_grad(int64_t rows, int64_t n, int64_t k) {
    struct floats dy = filled(rows * n, 0), x = filled(rows * k, 0), first = floats_new(n * k);
    const int64_t cut = rows / 2 / 32 * 32;
    void *scratch = malloc(weight_grad_scratch(rows, k));
    memset(first.v, 0, (size_t)(n * k) * sizeof *first.v);
    weight_grad_tiles(first.v, dy.v, n, x.v, k, rows, scratch, NULL);
    for (int64_t i = 0; i < n * k; i++) {
        double want = 0, magnitude = 0;
        for (int64_t m = 0; m < rows; m++) {
            const double term = (double)dy.v[m * n + i / k] * (double)x.v[m * k + i % k];
            want += term, magnitude += fabs(term);
        }
        near((double)first.v[i], want, 1e-6 + 0x1p-7 * magnitude, "weight_grad_tiles");
    }
    for (int threads = 1; threads <= 3; threads++) {
        struct floats other = floats_new(n * k);
        struct pool *pool = pool_new(threads);
        memset(other.v, 0, (size_t)(n * k) * sizeof *other.v);
        weight_grad_tiles(other.v, dy.v, n, x.v, k, cut, scratch, pool);
        weight_grad_tiles(other.v, dy.v + cut * n, n, x.v + cut * k, k, rows - cut, scratch, pool);
        same_all(first.v, other.v, n * k, "weight_grad_tiles", kernels_get(), threads);
        pool_free(pool);
        floats_free(other);
    }
    free(scratch);
    floats_free(dy), floats_free(x), floats_free(first);
}

static void test_weight_grad(void **state) {
    (void)state;
    if (!kernels_get()->gemm_tiles_grad) return;
    check_weight_grad(1, 40, 33);
    check_weight_grad(70, 192, 64);
    check_weight_grad(1100, 100, 70);
}

/* The scale and the minimum by which weight i of output o is quantised. */
static float scale_of(const struct matrix *w, int64_t o, int64_t i) {
    float scale = group_scale(w, o, i / layout_group(w->layout));
    return w->type == TENSOR_NF4 ? scale * (w->row_scales[o] / 32385) : scale;
}

static float min_of(const struct matrix *w, int64_t o, int64_t i) {
    return w->mins ? group_min(w, o, i / 32) : 0;
}

/* The quantised integer of that weight, whose value is `value`, minus c. */
static int quantized_of(const struct matrix *w, int64_t o, int64_t i, float value, int c) {
    float scale = scale_of(w, o, i), min = min_of(w, o, i);
    return (scale == 0 ? 0 : (int)lrintf((value - min) / scale)) - c;
}

/* The int8 path from its contract in kernel.h, one value at a time. */
static float backward_int8_naive(const struct matrix *w, const float *dy, int64_t i, float **rows) {
    int64_t slice = 4096, group = w->type == TENSOR_Q6_K ? 16 : 32;
    int c = !w->mins ? 0 : w->layout >= LAYOUT_Q4 ? 8 : 16;
    float dx = 0;
    for (int64_t o = 0; w->mins && o < w->n; o++)
        dx = fmaf(dy[o], min_of(w, o, i) + (float)c * scale_of(w, o, i), dx);
    for (int64_t o0 = 0; o0 < w->n; o0 += slice) {
        int64_t n = MIN(w->n - o0, slice);
        float acc = 0;
        for (int64_t b = 0; b < n; b += 32) {
            float u[32] = {0}, by[32] = {0}, d, d_by;
            int16_t q_u[32], q_by[32];
            int8_t q[32];
            for (int64_t o = b; o < MIN(b + 32, n); o++)
                u[o - b] = dy[o0 + o], by[o - b] = scale_of(w, o0 + o, i);
            ref->quantize_row16(u, 32, q_u, &d);
            ref->quantize_row16(by, 32, q_by, &d_by);
            ref->multiply_to_int8(q_u, q_by, 32, q);
            d = d * 0x1p23f * d_by;
            for (int64_t half = 0; half < 32; half += group) {
                int32_t s = 0;
                for (int64_t o = b + half; o < MIN(b + half + group, n); o++)
                    s += q[o - b] * quantized_of(w, o0 + o, i, rows[o0 + o][i], c);
                acc = fmaf((float)s, d, acc);
            }
        }
        dx = o0 || w->mins ? dx + acc : acc;
    }
    return dx;
}

static void test_backward_int8(void **state) {
    (void)state;
    static const enum tensor_type of[] = {TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_Q4_1,
                                          TENSOR_Q5_0, TENSOR_Q5_1, TENSOR_Q4_K,
                                          TENSOR_Q5_K, TENSOR_Q6_K, TENSOR_NF4};
    static const int64_t ns[] = {1, 31, 48, 83, 4130};
    for (size_t c = 0; c < ARRAY_LEN(of) * ARRAY_LEN(ns); c++) {
        int64_t n = ns[c / ARRAY_LEN(of)], k = 256;
        struct arena arena = {0};
        struct matrix w;
        uint8_t *file;
        matrix_random(&w, of[c % ARRAY_LEN(of)], n, k, NUMERIC_EXACT, &arena, &file, false);
        struct floats dy = filled(n, c % 3 == 1), dx = floats_new(k);
        float **rows = malloc((size_t)n * sizeof *rows);
        void *scratch = malloc(matrix_mul_backward_scratch(n, 1));
        for (int64_t o = 0; o < n; o++)
            matrix_get_row(&w, o, rows[o] = malloc((size_t)k * sizeof(float)));
        matrix_mul_backward(dx.v, k, dy.v, n, 1, &w, GRAD_INT8, false, scratch, NULL);
        for (int64_t i = 0; i < k; i++)
            same_one(backward_int8_naive(&w, dy.v, i, rows), dx.v[i], tensor_type_name(w.type),
                     kernels_get(), n);
        for (int64_t o = 0; o < n; o++) free(rows[o]);
        free(rows);
        free(scratch);
        free(file);
        arena_release(&arena);
        floats_free(dy);
        floats_free(dx);
    }
}

static void test_gemm_nn_pool(void **state) {
    (void)state;
    static const int64_t shapes[][3] = {{3, 5, 7}, {300, 70, 33}, {70, 300, 65}};
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        int64_t rows = shapes[i][0], n = shapes[i][1], k = shapes[i][2];
        struct floats t = filled(k * rows, 0), v = filled(k * n, 0), y = floats_new(rows * n);
        ref->gemm_nn_f32(y.v, n, t.v, 1, rows, rows, v.v, n, k, n);
        for (int threads = 1; threads <= 3; threads++) {
            struct floats z = filled(rows * n, 1);
            struct pool *pool = pool_new(threads);
            gemm_nn_parallel(DTYPE_F32, z.v, n, t.v, 1, rows, rows, v.v, n, k, n, false, pool);
            same_all(y.v, z.v, rows * n, "gemm_nn over a pool", kernels_get(), threads);
            pool_free(pool);
            floats_free(z);
        }
        struct floats all[] = {t, v, y};
        for (size_t j = 0; j < ARRAY_LEN(all); j++) floats_free(all[j]);
    }
}

static void test_transpose(void **state) {
    (void)state;
    enum { R = 203, C = 411 };
    struct floats a = filled(R * (C + 1), 0), b = floats_new(C * (R + 2));
    struct pool *pool = pool_new(3);
    for (int round = 0; round < 2; round++) {
        transpose(b.v, R + 2, a.v, C + 1, round ? R : 5, C, round ? pool : NULL);
        for (int r = 0; r < (round ? R : 5); r++)
            for (int c = 0; c < C; c++)
                assert_true(same(b.v[c * (R + 2) + r], a.v[r * (C + 1) + c]));
    }
    pool_free(pool);
    floats_free(a);
    floats_free(b);
}

static void test_scalar_reductions(void **state) {
    (void)state;
    for (int i = 0; i < SIZE_COUNT; i++) {
        int64_t n = size_at(i);
        struct floats a = filled(n, 0), b = filled(n, 0), y = floats_new(n);
        double dot = 0, sum = 0, square = 0, magnitude = 1e-30;
        float most = -INFINITY;
        for (int64_t j = 0; j < n; j++) {
            dot += (double)a.v[j] * (double)b.v[j];
            square += (double)a.v[j] * (double)a.v[j];
            sum += (double)a.v[j];
            magnitude += fabs((double)a.v[j] * (double)b.v[j]) + fabs((double)a.v[j]);
            most = a.v[j] > most ? a.v[j] : most;
        }
        near((double)ref->dot(a.v, b.v, n), dot, 1e-6 * magnitude, "dot");
        near((double)ref->sum(a.v, n), sum, 1e-6 * magnitude, "sum");
        assert_true(ref->max(a.v, n) == most);
        if (n > 0) ref->rmsnorm(y.v, a.v, b.v, 1e-5f, n);
        for (int64_t j = 0; j < n; j++) {
            double want = (double)a.v[j] / sqrt(square / (double)n + 1e-5) * (double)b.v[j];
            near((double)y.v[j], want, 1e-6 * fabs(want), "rmsnorm");
        }
        floats_free(a);
        floats_free(b);
        floats_free(y);
    }
}

static void test_scalar_exp(void **state) {
    (void)state;
    for (int i = 0; i < 200000; i++) {
        float x = rng_uniform(&rng) * 175 - 87, y;
        ref->exp(&y, &x, 1);
        double want = math_exp((double)x);
        near((double)y, want, want * 1.2e-7, "exp"); // one unit in the last place is 6e-8 to 1.2e-7
    }
    static const float in[] = {0.0f, -0.0f, 1e-45f, -INFINITY, -1000, -104, INFINITY, 89, 88.73f};
    static const float out[] = {1, 1, 1, 0, 0, 0, 3.40282347e38f, 3.40282347e38f, 3.40282347e38f};
    for (size_t i = 0; i < ARRAY_LEN(in); i++) {
        float y;
        ref->exp(&y, &in[i], 1);
        assert_true(same(y, out[i]));
    }
    float x = NAN, y;
    ref->exp(&y, &x, 1);
    assert_true(y != y);
}

static void test_scalar_silu(void **state) {
    (void)state;
    for (int i = 0; i < 10000; i++) {
        float g = rng_normal(&rng) * 10, u = rng_normal(&rng), y;
        ref->silu_mul(&y, &g, &u, 1);
        double want = (double)g / (1 + math_exp(-(double)g)) * (double)u;
        near((double)y, want, fabs(want) * 5e-7 + 1e-40, "silu_mul");
    }
}

static void test_scalar_gelu(void **state) {
    (void)state;
    for (int i = 0; i < 10000; i++) {
        float x = rng_normal(&rng) * 4, y;
        ref->gelu(&y, &x, 1);
        double u = sqrt(2 / 3.14159265358979323846) * ((double)x + 0.044715 * pow((double)x, 3));
        /* for large negative x, 1 + tanh is mostly rounding error: hence the absolute bound */
        near((double)y, 0.5 * (double)x * (1 + tanh(u)), fabs((double)y) * 5e-6 + 1e-12, "gelu");
    }
}

static void test_scalar_rope(void **state) {
    (void)state;
    struct floats x = filled(64, 0), y = copied(x), c = filled(32, 0), s = filled(32, 0);
    ref->rope(y.v, c.v, s.v, 32);
    for (int i = 0; i < 32; i++) {
        double a = (double)x.v[i], b = (double)x.v[i + 32], co = (double)c.v[i],
               si = (double)s.v[i];
        near((double)y.v[i], a * co - b * si, 1e-6 * (fabs(a * co) + fabs(b * si)),
             "rope, first half");
        near((double)y.v[i + 32], b * co + a * si, 1e-6 * (fabs(b * co) + fabs(a * si)),
             "rope, second half");
    }
    floats_free(x);
    floats_free(y);
    floats_free(c);
    floats_free(s);
}

/* gemm_nn with rows of every dtype, compared with sums in double. */
static void test_scalar_gemm_nn(void **state) {
    (void)state;
    enum { M = 3, N = 24, K = 37 };
    struct floats t = filled(M * K, 0), v = filled(K * N, 0), y0 = filled(M * N, 0);
    struct typed_rows h = typed_rows_new(v.v, K * N);
    float d = dtype_from_f32(DTYPE_I8, v.v, h.v[DTYPE_I8], K * N);
    for (int e = 0; e < N_DTYPE; e++) {
        struct floats y = copied(y0);
        gemm_nn((enum dtype)e, y.v, N, t.v, K, 1, M, h.v[e], N, K, N);
        for (int i = 0; i < M * N; i++) {
            double want = (double)y0.v[i], tolerance = e == DTYPE_F32   ? 1e-4
                                                       : e == DTYPE_F16 ? 5e-2
                                                                        : 2e-1;
            for (int j = 0; j < K; j++)
                want += (double)t.v[i / N * K + j] *
                        (e == DTYPE_I8 ? (double)((int8_t *)h.v[e])[j * N + i % N]
                                       : (double)v.v[j * N + i % N]);
            near((double)y.v[i], want, tolerance, "gemm_nn");
        }
        floats_free(y);
    }
    for (int i = 0; i < K * N; i++)
        near((double)((int8_t *)h.v[DTYPE_I8])[i] * (double)d, (double)v.v[i], (double)d * 0.501,
             "i8");
    typed_rows_free(h);
    struct floats all[] = {t, v, y0};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) floats_free(all[i]);
}

static void test_scalar_adamw(void **state) {
    (void)state;
    for (int i = 0; i < 1000; i++) {
        float w = rng_normal(&rng), g = rng_normal(&rng), m = rng_normal(&rng),
              v = fabsf(rng_normal(&rng));
        double mm = 0.9 * (double)m + 0.1 * (double)g,
               vv = 0.99 * (double)v + 0.01 * (double)g * (double)g;
        double want = (double)w * (1 - 0.01 * 0.1) - 0.01 * (mm / 0.3) / (sqrt(vv / 0.2) + 1e-8);
        ref->adamw(&w, &g, &m, &v, 1, 0.01f, 0.9f, 0.99f, 1e-8f, 0.1f, 0.3f, 0.2f);
        near((double)w, want, 1e-5, "adamw w");
        near((double)m, mm, 1e-5, "adamw m");
        near((double)v, vv, 1e-5, "adamw v");
    }
}

static void test_scalar_quantize(void **state) {
    (void)state;
    float x[32] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-45f};
    int8_t q[32];
    float d;
    ref->quantize_row(x, 32, q, &d);
    assert_int_equal(q[0], 0);
    assert_int_equal(q[1], 127);
    assert_int_equal(q[2], -127);
    assert_true(d > 0 && d < INFINITY);
    memset(x, 0, sizeof x);
    x[3] = 127, x[4] = 0.5f, x[5] = 1.5f, x[6] = -2.5f, x[7] = -127;
    ref->quantize_row(x, 32, q, &d);
    assert_true(d == 1.0f && q[3] == 127 && q[4] == 0 && q[5] == 2 && q[6] == -2 && q[7] == -127);
    for (int i = 0; i < 32; i++) x[i] = 1e-40f;
    ref->quantize_row(x, 32, q, &d);
    assert_true(d == 0 && q[0] == 0);
}

static void test_f16(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = f16_to_f32((uint16_t)h);
        if (f != f)
            assert_true((h & 0x7c00) == 0x7c00 && (h & 0x3ff) && isnan(f16_to_f32(f32_to_f16(f))));
        else
            assert_int_equal(f32_to_f16(f), h);
    }
    assert_true(f16_to_f32(0x3c00) == 1.0f && f16_to_f32(1) == 0x1p-24f &&
                f16_to_f32(0xfbff) == -65504.0f);
    for (uint32_t h = 0; h < 0x7bff; h++) { // between adjacent values: nearest, half to even
        float lo = f16_to_f32((uint16_t)h), hi = f16_to_f32((uint16_t)(h + 1)),
              middle = (lo + hi) / 2;
        assert_int_equal(f32_to_f16(middle), h % 2 ? h + 1 : h);
        assert_int_equal(f32_to_f16(nextafterf(middle, 0)), h);
        assert_int_equal(f32_to_f16(-nextafterf(middle, 1e9f)), (h + 1) | 0x8000);
    }
    assert_int_equal(f32_to_f16(65519.99f), 0x7bff);
    assert_int_equal(f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(f32_to_f16(1e-30f), 0);
}

static void test_bf16(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = bf16_to_f32((uint16_t)h);
        if (f != f)
            assert_true(isnan(bf16_to_f32(f32_to_bf16(f))));
        else
            assert_int_equal(f32_to_bf16(f), h);
    }
    assert_int_equal(f32_to_bf16(bits_float(0x3f808000)), 0x3f80);
    assert_int_equal(f32_to_bf16(bits_float(0x3f818000)), 0x3f82);
    assert_int_equal(f32_to_bf16(bits_float(0x3f808001)), 0x3f81);
    assert_int_equal(f32_to_bf16(bits_float(0x7f7fffff)), 0x7f80);
    assert_true(isnan(bf16_to_f32(f32_to_bf16(bits_float(0x7f800001)))));
}

/* Blocks that were computed by hand from the formulas of llama.cpp. */
static void test_block_bytes(void **state) {
    (void)state;
    float x[32] = {0}, back[32];
    x[0] = -254, x[1] = 5, x[2] = 3, x[31] = 1;
    struct block_q8_0 b8;
    tensor_from_f32(TENSOR_Q8_0, x, &b8, 32);
    assert_int_equal(b8.d, 0x4000); // 254 / 127 = 2
    assert_true(b8.q[0] == -127 && b8.q[1] == 3 && b8.q[2] == 2 &&
                b8.q[31] == 1); // halves round away from zero
    struct block_q4_0 b4;
    x[0] = -8, x[1] = 7, x[2] = 0.5f, x[16] = -3, x[31] = 20;
    x[31] = 1;
    tensor_from_f32(TENSOR_Q4_0, x, &b4, 32);
    assert_int_equal(b4.d, 0x3c00); // -8 / -8 = 1
    assert_int_equal(b4.q[0], 0 | 5 << 4);
    assert_int_equal(b4.q[1], 15 | 8 << 4);
    assert_int_equal(b4.q[2], 9 | 8 << 4);
    assert_int_equal(b4.q[15], 8 | 9 << 4);
    tensor_to_f32(TENSOR_Q4_0, &b4, back, 32);
    assert_true(back[0] == -8 && back[1] == 7 && back[16] == -3 && back[31] == 1);
    // the largest magnitude is that of a positive value: the scale is -1, and 8 = -8 * -1 is exact
    x[0] = 8;
    tensor_from_f32(TENSOR_Q4_0, x, &b4, 32);
    tensor_to_f32(TENSOR_Q4_0, &b4, back, 32);
    assert_int_equal(b4.d, 0xbc00);
    assert_true(back[0] == 8 && back[1] == 7);
}

static void test_blocks_round_trip(void **state) {
    (void)state;
    for (size_t t = 0; t < ARRAY_LEN(types); t++)
        for (int nasty = 0; nasty < 2; nasty++) {
            struct floats x = filled(32 * 20, nasty), y = floats_new(32 * 20);
            uint8_t *bytes = malloc(tensor_row_bytes(types[t], 32 * 20));
            tensor_from_f32(types[t], x.v, bytes, 32 * 20);
            tensor_to_f32(types[t], bytes, y.v, 32 * 20);
            float unit = types[t] == TENSOR_Q4_0   ? 1.05f / 8
                         : types[t] == TENSOR_Q8_0 ? 0.57f / 127
                                                   : 0.005f;
            for (int b = 0; b < 20 && !nasty; b++) {
                float amax = 0;
                for (int i = 0; i < 32; i++) amax = fmaxf(amax, fabsf(x.v[32 * b + i]));
                for (int i = 32 * b; i < 32 * (b + 1); i++)
                    near((double)y.v[i], (double)x.v[i], (double)(unit * amax),
                         tensor_type_name(types[t]));
            }
            free(bytes);
            floats_free(x);
            floats_free(y);
        }
}

/* matrix_get_row returns the values of the file's rows, reordered if requested, by any number of
 * threads. */
static void test_matrix_rows(void **state) {
    (void)state;
    enum { N = 37, K = 96 };
    int32_t order[N];
    float got[K], want[K];
    struct pool *pool = pool_new(3);
    for (int i = 0; i < N; i++) order[i] = (i * 7 + 3) % N;
    for (size_t i = 0; i < 2 * ARRAY_LEN(types); i++) {
        struct arena arena = {0};
        struct matrix m, plain;
        struct error err;
        enum tensor_type t = types[i / 2];
        enum numeric_class cls = i % 2 ? NUMERIC_FAST : NUMERIC_EXACT;
        uint8_t *file;
        matrix_random(&plain, t, N, K, cls, &arena, &file, false);
        assert_int_equal(matrix_init(&m, t, N, K, file, order, cls, pool, &arena, &err), OK);
        for (int r = 0; r < N; r++) {
            tensor_to_f32(t, file + (size_t)r * tensor_row_bytes(t, K), want, K);
            matrix_get_row(&plain, r, got);
            assert_memory_equal(got, want, sizeof got);
            tensor_to_f32(t, file + (size_t)order[r] * tensor_row_bytes(t, K), want, K);
            matrix_get_row(&m, r, got);
            assert_memory_equal(got, want, sizeof got);
        }
        assert_true(matrix_bytes(&m) >= tensor_row_bytes(t, K) * N);
        free(file);
        arena_release(&arena);
    }
    pool_free(pool);
}

static void test_matrix_refused(void **state) {
    (void)state;
    struct arena arena = {0};
    struct matrix m;
    struct error err;
    struct block_q8_0 block = {.d = 0x7c00}, rows[40] = {0};
    struct pool *pool = pool_new(3);
    rows[33] = block;
    assert_int_equal(
        matrix_init(&m, TENSOR_Q8_0, 40, 32, rows, NULL, NUMERIC_EXACT, pool, &arena, &err),
        ERR_NUMERIC);
    pool_free(pool);
    assert_int_equal(
        matrix_init(&m, TENSOR_Q8_0, 1, 33, &block, NULL, NUMERIC_EXACT, NULL, &arena, &err),
        ERR_FORMAT);
    assert_int_equal(
        matrix_init(&m, TENSOR_Q8_0, 1, 32, &block, NULL, NUMERIC_EXACT, NULL, &arena, &err),
        ERR_NUMERIC);
    assert_int_equal(
        matrix_init(&m, TENSOR_F32, 0, 32, &block, NULL, NUMERIC_EXACT, NULL, &arena, &err),
        ERR_FORMAT);
    assert_int_equal(matrix_init(&m, (enum tensor_type)10, 1, 256, &block, NULL, NUMERIC_EXACT,
                                 NULL, &arena, &err),
                     ERR_FORMAT);
    assert_non_null(strstr(err.text, "10"));
    arena_release(&arena);
}

static void test_type_names(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        enum tensor_type t;
        assert_int_equal(tensor_type_parse(tensor_type_name(types[i]), &t), OK);
        assert_int_equal(t, types[i]);
    }
    enum tensor_type t;
    assert_int_equal(tensor_type_parse("q2_k", &t), ERR_USAGE);
    assert_int_equal(tensor_row_bytes(TENSOR_Q4_0, 64), 36);
    assert_int_equal(tensor_row_bytes(TENSOR_Q8_0, 64), 68);
}

/* The level that a new process chooses with this SHOAL_CPU, or 102 if it is invalid. Must be
 * called before this process chooses a level. */
static int level_with_shoal_cpu(const char *name) {
    pid_t pid = fork();
    if (pid == 0) {
        struct error err;
        setenv("SHOAL_CPU", name, 1);
        _exit(kernels_check_level(&err) == OK ? 50 + (int)kernels_get()->level : 2);
    }
    int status = 0;
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status) >= 50 ? WEXITSTATUS(status) - 50 : 100 + WEXITSTATUS(status);
}

static void test_levels(void **state) {
    (void)state;
    for (int l = 0; l < CPU_LEVELS; l++) {
        const struct kernels *k = kernels_for_level((enum cpu_level)l);
        assert_true((k != NULL) == cpu_has_level((enum cpu_level)l));
        assert_int_equal(level_with_shoal_cpu(cpu_level_name((enum cpu_level)l)), k ? l : 102);
        if (k) assert_string_equal(k->name, cpu_level_name((enum cpu_level)l));
    }
    assert_int_equal(level_with_shoal_cpu("sse9"), 102);
}

/* Runs `check` with the table of every level that has tiles; skips the test if there is none. */
static void tile_levels_run(void (*check)(const struct kernels *k)) {
    if (!cpu_has_level(CPU_AVX512BF16)) {
        print_message("no level with tiles here: test_emulated runs such cases\n");
        skip();
    }
    for (int l = CPU_AVX512BF16; l <= CPU_AMX; l++)
        if (cpu_has_level((enum cpu_level)l)) check(kernels_for_level((enum cpu_level)l));
}

static void attention_cases_run(const struct kernels *k) {
    static const int64_t dims[] = {8, 16, 24, 32, 64, 80, 128, 256}, heads[] = {1, 3, 4};
    for (int64_t rows = 1; rows <= 70; rows += rows < 18 ? 1 : 13) {
        for (size_t i = 0; i < ARRAY_LEN(dims) * N_DTYPE; i++) {
            attention_case_check(k, &rng,
                                 (struct attention_case){
                                     .head_dim = dims[i / N_DTYPE],
                                     .n_heads = heads[(i + (size_t)rows) % ARRAY_LEN(heads)],
                                     .rows = rows,
                                     .at = (int32_t)(rows * 37 % 200),
                                     .window = rows % 3 ? INT32_MAX : (int32_t)rows + 5,
                                     .dtype = (enum dtype)(i % N_DTYPE),
                                     .page = rows % 2 ? 32 : 96,
                                 });
        }
    }
}

static void test_attention(void **state) {
    (void)state;
    tile_levels_run(attention_cases_run);
}

/* Jobs with more than one block of queries and several blocks of keys. */
static void attention_rows_cases_run(const struct kernels *k) {
    static const int64_t steps[] = {1, 7, 40, 64, 100};
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        struct attention_case c = {.head_dim = i % 2 ? 64 : 80,
                                   .n_heads = 1 + (int64_t)i % 3,
                                   .rows = 160 + (int64_t)i,
                                   .at = i % 2 ? 0 : 201,
                                   .window = i == 3 ? 45 : INT32_MAX,
                                   .dtype = (enum dtype)(i % N_DTYPE),
                                   .page = 32};
        attention_case_check(k, &rng, c);
        attention_division_check(k, &rng, c, steps[i]);
        attention_tiles_check(k, &rng, c, steps[i]);
        c.dtype = DTYPE_F32;
        attention_neighbour_check(k, &rng, c, c.at + 70, 130);
        attention_neighbour_check(k, &rng, c, c.at ? 180 : 3, 9);
        c.window = 50;
        attention_outside_check(k, &rng, c);
    }
}

static void test_attention_rows(void **state) {
    (void)state;
    tile_levels_run(attention_rows_cases_run);
}

static void attention_backward_cases_run(const struct kernels *k) {
    static const int64_t dims[] = {8, 16, 24, 32, 64, 80, 128, 256}, heads[] = {1, 3, 4},
                         lengths[] = {1, 2, 15, 16, 17, 31, 33, 64, 70, 127, 200, 293};
    // a separate seed: with few rows the error varies with the data
    struct rng r = rng_make(23, RNG_TEST, 0, 0);
    for (size_t i = 0; i < ARRAY_LEN(dims) * ARRAY_LEN(lengths); i++) {
        const int64_t rows = lengths[i / ARRAY_LEN(dims)];
        attention_backward_check(k, &r,
                                 (struct attention_case){
                                     .head_dim = dims[i % ARRAY_LEN(dims)],
                                     .n_heads = heads[i % ARRAY_LEN(heads)],
                                     .rows = rows,
                                     .window = i % 4 == 3 ? (int32_t)rows / 2 + 1 : INT32_MAX,
                                 });
    }
}

static void test_attention_backward(void **state) {
    (void)state;
    tile_levels_run(attention_backward_cases_run);
}

static const int64_t shapes[][3] = {{512, 192, 192},  {512, 192, 512},  {512, 512, 192},
                                    {512, 192, 1024}, {256, 576, 1536}, {64, 192, 512},
                                    {8, 192, 512},    {1, 576, 1536}};

/* Giga-operations per second of one product, the best of several rounds. */
static double product_speed(const struct kernels *k, enum tensor_type t, enum numeric_class cls,
                            const int64_t *shape) {
    int64_t rows = shape[0], width = shape[1], n = shape[2];
    struct arena arena = {0};
    struct matrix w;
    uint8_t *file;
    void *scratch;
    struct floats x = filled(rows * width, 0), y = floats_new(rows * n);
    matrix_random(&w, t, n, width, cls, &arena, &file, false);
    struct gemm_input in = inputs_of(k, x, rows, width, &scratch);
    bool tiles = cls == NUMERIC_FAST && k->gemm_tiles;
    if (tiles) gemm_input_prepare(&in, x.v, width, rows, width, false, true, scratch, NULL);
    double ops = 2.0 * (double)(rows * width * n), best = 1e9;
    int64_t repeat = (int64_t)(1e7 / ops) + 1;
    for (int round = 0; round < (k->level == CPU_SCALAR ? 7 : 100); round++) {
        double start = clock_now();
        for (int64_t i = 0; i < repeat; i++) {
            if (tiles)
                k->gemm_tiles(y.v, n, &in, &w, 0, n, false);
            else
                product(k, &w, in, 0, rows, 0, n, y.v, n);
        }
        best = MIN(best, (clock_now() - start) / (double)repeat);
    }
    free(scratch);
    free(file);
    arena_release(&arena);
    floats_free(x);
    floats_free(y);
    return ops / best / 1e9;
}

/* The same for dX = dY W. TENSOR_F16 selects dW = dYᵀ X instead, in f32 or, with GRAD_TILES, in
 * tiles. */
static double backward_speed(enum tensor_type t, enum grad_path path, const int64_t *shape) {
    int64_t rows = shape[0], k = shape[1], n = shape[2];
    struct arena arena = {0};
    struct matrix w;
    uint8_t *file;
    struct floats x = filled(rows * k, 0), dy = filled(rows * n, 0), dw = floats_new(n * k);
    void *scratch = malloc(MAX(matrix_mul_backward_scratch(n, 1), weight_grad_scratch(rows, k)));
    matrix_random(&w, t, n, k, path == GRAD_TILES ? NUMERIC_FAST : NUMERIC_EXACT, &arena, &file,
                  false);
    double ops = 2.0 * (double)(rows * k * n), best = 1e9;
    for (int round = 0; round < 100; round++) {
        double start = clock_now();
        if (t == TENSOR_F16 && path == GRAD_TILES)
            weight_grad_tiles(dw.v, dy.v, n, x.v, k, rows, scratch, NULL);
        else if (t == TENSOR_F16)
            kernels_get()->gemm_nn_f32(dw.v, k, dy.v, 1, n, n, x.v, k, rows, k);
        else
            matrix_mul_backward(x.v, k, dy.v, n, rows, &w, path, false, scratch, NULL);
        best = MIN(best, clock_now() - start);
    }
    free(scratch);
    free(file);
    arena_release(&arena);
    struct floats all[] = {x, dy, dw};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) floats_free(all[i]);
    return ops / best / 1e9;
}

static void bench_backward(const char *type_name, enum tensor_type type) {
    const bool tiles = kernels_get()->gemm_tiles;
    printf("%s, backward, Gop/s on one thread (rows, K, N): dX = dY W by f32%s, dW = dYᵀ X\n",
           kernels_get()->name, tiles ? ", in tiles" : "");
    for (size_t s = 0; s < ARRAY_LEN(shapes); s++) {
        printf("  %4d %4d %4d  dX %7.1f", (int)shapes[s][0], (int)shapes[s][1], (int)shapes[s][2],
               backward_speed(type, GRAD_F32, shapes[s]));
        if (type_name) printf(" int8 %7.1f", backward_speed(type, GRAD_INT8, shapes[s]));
        if (tiles) printf(" tiles %7.1f", backward_speed(type, GRAD_TILES, shapes[s]));
        printf(" dW %7.1f", backward_speed(TENSOR_F16, GRAD_F32, shapes[s]));
        if (tiles) printf(" tiles %7.1f", backward_speed(TENSOR_F16, GRAD_TILES, shapes[s]));
        printf("\n");
    }
}

/* `type_name`: the name of the type to measure; NULL: all of `types` except f16. */
static void bench_run(const char *type_name) {
    enum tensor_type type = TENSOR_F32;
    if (type_name && tensor_type_parse(type_name, &type) != OK) {
        fprintf(stderr, "no type '%s': one of %s\n", type_name, tensor_type_list());
        exit(2);
    }
    for (int l = 0; l < CPU_LEVELS; l++) {
        const struct kernels *k = kernels_for_level((enum cpu_level)l);
        if (!k) continue;
        printf("%s, Gop/s on one thread (rows, K, N)\n", k->name);
        for (size_t s = 0; s < ARRAY_LEN(shapes); s++) {
            printf("  %4d %4d %4d ", (int)shapes[s][0], (int)shapes[s][1], (int)shapes[s][2]);
            if (type_name)
                printf(" %s %7.1f", type_name, product_speed(k, type, NUMERIC_EXACT, shapes[s]));
            if (type_name && k->gemm_tiles)
                printf(" tiles %7.1f", product_speed(k, type, NUMERIC_FAST, shapes[s]));
            for (size_t t = 0; !type_name && t < ARRAY_LEN(types); t++)
                if (types[t] != TENSOR_F16)
                    printf(" %s %7.1f", tensor_type_name(types[t]),
                           product_speed(k, types[t], NUMERIC_EXACT, shapes[s]));
            if (!type_name)
                printf(" bf16 fast %7.1f", product_speed(k, TENSOR_BF16, NUMERIC_FAST, shapes[s]));
            printf("\n");
        }
    }
    bench_backward(type_name, type);
}

static void product_cases_run(const struct kernels *k) {
    tile_twin_by_pairs = k->level == CPU_AVX512BF16;
    tile_cases_run(k, true);
}

static void test_tiles(void **state) {
    (void)state;
    tile_levels_run(product_cases_run);
}

int main(int argc, char **argv) {
    rng = rng_make(1, RNG_TEST, 0, 0);
    ref = kernels_for_level(CPU_SCALAR);
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        bench_run(argc > 2 ? argv[2] : NULL);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_f16),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_block_bytes),
        cmocka_unit_test(test_blocks_round_trip),
        cmocka_unit_test(test_matrix_rows),
        cmocka_unit_test(test_matrix_refused),
        cmocka_unit_test(test_type_names),
        cmocka_unit_test(test_scalar_reductions),
        cmocka_unit_test(test_scalar_exp),
        cmocka_unit_test(test_scalar_silu),
        cmocka_unit_test(test_scalar_gelu),
        cmocka_unit_test(test_scalar_rope),
        cmocka_unit_test(test_scalar_gemm_nn),
        cmocka_unit_test(test_scalar_adamw),
        cmocka_unit_test(test_scalar_quantize),
        cmocka_unit_test(test_reductions),
        cmocka_unit_test(test_updates),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_activations_and_norms),
        cmocka_unit_test(test_exp_range),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_quantize_rows),
        cmocka_unit_test(test_quantizer_searches),
        cmocka_unit_test(test_gemm_nn),
        cmocka_unit_test(test_int8_rows),
        cmocka_unit_test(test_gemm_nn_i8_pairs),
        cmocka_unit_test(test_gemm),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_bf16_fast),
        cmocka_unit_test(test_invariance),
        cmocka_unit_test(test_matrix_mul),
        cmocka_unit_test(test_gemm_pool),
        cmocka_unit_test(test_gemm_nn_pool),
        cmocka_unit_test(test_matrix_mul_backward),
        cmocka_unit_test(test_weight_grad),
        cmocka_unit_test(test_backward_int8),
        cmocka_unit_test(test_transpose),
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_rows),
        cmocka_unit_test(test_attention_backward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
