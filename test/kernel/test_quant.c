/*
 * test_quant: the quantised weight types, their products at every level, and models that use them.
 *
 * There are three independent references. The hashes of encoded blocks and of decoded numbers were
 * computed with llama.cpp's library (libggml-base of node-llama-cpp 3.22.1: quantize_row_*_ref and
 * dequantize_row_* on golden_input); if one changes, files no longer agree byte for byte. Products
 * are compared with sums in double over the values of matrix_get_row. Levels are compared with each
 * other, bit by bit. nf4's layout is Shoal's, and a second decoder here follows its description.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "eval/eval.h"
#include "fixture.h"
#include "model/internal.h"

static const enum tensor_type all_types[] = {
    TENSOR_F32,  TENSOR_F16,  TENSOR_BF16, TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_Q4_1,
    TENSOR_Q5_0, TENSOR_Q5_1, TENSOR_Q4_K, TENSOR_Q5_K, TENSOR_Q6_K, TENSOR_NF4,
};
enum { FIRST_QUANT = 3 };

/* Super-blocks of five kinds: normal values, their cubes (outliers), one-sided, sparse with zeros
 * and steps, and a coarse grid (ties). */
enum { GOLDEN = 256 * 60 };

static void golden_input(float *x) {
    struct rng r = rng_make(7, RNG_TEST, 0, 0);
    for (int i = 0; i < GOLDEN; i++) {
        float v = rng_normal(&r);
        int kind = i / 256 % 5;
        x[i] = kind == 0   ? v * 0.02f
               : kind == 1 ? v * v * v
               : kind == 2 ? fabsf(v) + 0.5f
               : kind == 3 ? (i / 32 % 3 == 0   ? 0.0f
                              : i / 16 % 4 == 1 ? 0.125f
                                                : v * 1e-3f)
                           : (float)((int)rng_below(&r, 9) - 4) * 0.25f;
    }
}

static const struct {
    enum tensor_type type;
    const char *blocks, *values; /* SHA-256 */
} golden[] = {
    {TENSOR_Q8_0, "d7297314042326c5ef49fa863ee61e98f98599c36052be609de19746328ac379",
     "e07db3f05efa0ab09a63ca0e848f9cfbd02bd5b762260d016c6662d5292ee82f"},
    {TENSOR_Q4_0, "112e415150d7e488518c20fc6861203de246b2caeb2f08fe49ade68c9867c271",
     "73b5c43942f334a2f24ca14d4c50ab2c59974b8266aeabff27bfaeb1614875ef"},
    {TENSOR_Q4_1, "9bc76d39612b8f08448a1a36d70bbf705a994b5b3ab6920b002c0f6a790d8f1c",
     "d2915cd7c45d9240e416d71edc278c46175260955b17c2a42e3ff817894fb953"},
    {TENSOR_Q5_0, "e73f0d4579c0d3962e2eee349636591369f1cb65ea91188b8dee0cc9eb10bdaf",
     "3e6492baa2cdaf68bb106a97f396ebac958cb3fb22ea8489d8755c66efdae586"},
    {TENSOR_Q5_1, "7b358e7912bbade89d5c53683f1683e07e64ad0dfcb900f8ff6adacd0188e4a5",
     "86d93ecfb64b2c8efb4e5da7fb5a1585ebdaebc0f6f3f4547ce4c2d3320f84f7"},
    {TENSOR_Q4_K, "f1098925884c7d654938107dff72069024525d29d7ce0dccdbf23b815535d437",
     "f51e998034237d26c2fb193b87b970367777121647dac4cb5078bd4475aed749"},
    {TENSOR_Q5_K, "1880974f4791b2ccc8b86633bf1b7d9010e8fd10de8ab7e1e43f09616f690eec",
     "a294a1684cdf7d71e904336d9748996d0abaa881ac095ed0bb82bd4723e9a8e1"},
    {TENSOR_Q6_K, "056f5e2d5d6c10e37b46c18a151f8cfa9c9842599c5a97d1213ca1474e36c844",
     "a36e5aefa5a899ce15910c67606cf8d60c488b19f3ff193a48baa9873b3f7e2e"},
};

static void test_golden(void **state) {
    (void)state;
    static float x[GOLDEN];
    static uint8_t blocks[2 * GOLDEN];
    char hash[HASH_LEN];
    golden_input(x);
    for (size_t i = 0; i < ARRAY_LEN(golden); i++) {
        size_t size = tensor_row_bytes(golden[i].type, GOLDEN);
        float back[GOLDEN];
        tensor_from_f32(golden[i].type, x, blocks, GOLDEN);
        sha256_bytes(blocks, size, hash);
        assert_string_equal(hash, golden[i].blocks);
        tensor_to_f32(golden[i].type, blocks, back, GOLDEN);
        sha256_bytes(back, sizeof back, hash);
        assert_string_equal(hash, golden[i].values);
    }
}

/* Largest root mean square error on normal values, relative to their deviation. */
static const struct {
    enum tensor_type type;
    double error;
} quality[] = {
    {TENSOR_Q8_0, 0.006}, {TENSOR_Q6_K, 0.019}, {TENSOR_Q5_K, 0.038},
    {TENSOR_Q5_1, 0.040}, {TENSOR_Q5_0, 0.044}, {TENSOR_Q4_K, 0.073},
    {TENSOR_Q4_1, 0.080}, {TENSOR_Q4_0, 0.088}, {TENSOR_NF4, 0.089},
};

static void test_quality(void **state) {
    (void)state;
    enum { K = 768 };
    float x[K], back[K];
    uint8_t row[K * 4];
    for (size_t i = 0; i < ARRAY_LEN(quality); i++) {
        double error = 0, power = 0;
        struct rng r = rng_make(1, RNG_TEST, 0, 0);
        for (int n = 0; n < 40; n++) {
            for (int k = 0; k < K; k++) x[k] = rng_normal(&r);
            tensor_from_f32(quality[i].type, x, row, K);
            tensor_to_f32(quality[i].type, row, back, K);
            for (int k = 0; k < K; k++) {
                error += pow((double)back[k] - (double)x[k], 2);
                power += pow((double)x[k], 2);
            }
        }
        if (!(sqrt(error / power) < quality[i].error))
            fail_msg("%s misses %g", tensor_type_name(quality[i].type), sqrt(error / power));
    }
}

/* From the description in kernel.h: f32 scale | one byte per 64 weights | nibbles, low ones first,
 * of 32. */
static void nf4_naive(const uint8_t *row, int k, double *out) {
    static const double quantiles[16] = {-1.0,          -0.6961928010, -0.5250730515, -0.3949174881,
                                         -0.2844413817, -0.1847734302, -0.0910500363, 0.0,
                                         0.0795802996,  0.1609302014,  0.2461123019,  0.3379152417,
                                         0.4407098293,  0.5626170039,  0.7229568362,  1.0};
    float scale;
    memcpy(&scale, row, sizeof scale);
    const uint8_t *bytes = row + 4, *nibbles = bytes + (k + 63) / 64;
    for (int i = 0; i < k; i++) {
        int byte = nibbles[i / 32 * 16 + i % 16], code = i % 32 < 16 ? byte % 16 : byte / 16;
        out[i] = (double)scale * (bytes[i / 64] / 255.0) * round(127 * quantiles[code]) / 127;
    }
}

static void test_nf4(void **state) {
    (void)state;
    static const int widths[] = {32, 64, 96, 576};
    struct rng r = rng_make(2, RNG_TEST, 0, 0);
    for (size_t n = 0; n < ARRAY_LEN(widths); n++) {
        int k = widths[n];
        float x[576], back[576];
        double twin[576];
        uint8_t row[4 + 9 + 288];
        assert_int_equal(tensor_row_bytes(TENSOR_NF4, k), 4 + (k + 63) / 64 + k / 2);
        for (int i = 0; i < k; i++) x[i] = rng_normal(&r) * (i < 64 ? 1.0f : 0.1f);
        tensor_from_f32(TENSOR_NF4, x, row, k);
        tensor_to_f32(TENSOR_NF4, row, back, k);
        nf4_naive(row, k, twin);
        for (int i = 0; i < k; i++) {
            assert_true(fabs((double)back[i] - twin[i]) <= 1e-6 * fabs(twin[i]));
            assert_true(fabsf(back[i] - x[i]) < (i < 64 ? 0.7f : 0.07f));
        }
    }
}

static void test_names_and_fit(void **state) {
    (void)state;
    static const struct {
        const char *requested;
        int64_t k;
        const char *got;
    } fits[] = {
        {"q4_k", 512, "q4_k"}, {"q4_k", 288, "q5_0"}, {"q5_k", 288, "q5_1"}, {"q6_k", 576, "q8_0"},
        {"q4_k", 40, "f16"},   {"q6_k", 40, "f16"},   {"nf4", 96, "nf4"},    {"nf4", 48, "f16"},
        {"q4_1", 33, "f16"},   {"f32", 7, "f32"},     {"bf16", 7, "bf16"},   {"q5_0", 64, "q5_0"},
    };
    for (size_t i = 0; i < ARRAY_LEN(fits); i++) {
        enum tensor_type t;
        assert_int_equal(tensor_type_parse(fits[i].requested, &t), OK);
        assert_string_equal(tensor_type_name(tensor_type_fallback(t, fits[i].k)), fits[i].got);
    }
    for (size_t ti = 0; ti < ARRAY_LEN(all_types); ti++) {
        enum tensor_type t = all_types[ti];
        assert_true(tensor_type_is_known((uint32_t)t));
        assert_non_null(strstr(tensor_type_list(), tensor_type_name(t)));
    }
    assert_false(tensor_type_is_known(10));
    struct quant_scheme q;
    struct error err;
    assert_int_equal(quant_parse("q3_k_m", &q, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "q4_k_m"));
}

/* Products of any level, without the choice that matrix_mul makes once per process. */

static void product(const struct kernels *k, const struct matrix *w, const struct gemm_input *in,
                    int64_t n0, int64_t n1, bool add, float *y, int64_t ldy) {
    if (w->layout >= LAYOUT_Q4)
        k->gemm_q4(y, ldy, in, w, n0, n1, add);
    else
        k->gemm_q8(y, ldy, in, w, n0, n1, add);
    if (w->mins) k->gemm_mins(y, ldy, in, w, n0, n1);
}

struct product_case {
    struct arena arena;
    struct matrix w;
    struct gemm_input in;
    uint8_t *file;
    float *x;
};

static void case_make(struct product_case *c, enum tensor_type t, int64_t n, int64_t k,
                      int64_t rows, bool extreme) {
    struct error err;
    struct rng r = rng_make(3, RNG_TEST, (uint32_t)k, (uint32_t)rows);
    size_t bytes = tensor_row_bytes(t, k), scales = t == TENSOR_NF4 ? 4 + (size_t)(k + 63) / 64 : 4;
    *c = (struct product_case){0};
    float *row = arena_alloc(&c->arena, sizeof *row * (size_t)k);
    c->file = arena_alloc(&c->arena, bytes * (size_t)n);
    c->x = arena_alloc(&c->arena, sizeof *row * (size_t)(rows * k));
    for (int64_t i = 0; i < n; i++) {
        uint8_t *to = c->file + (size_t)i * bytes;
        for (int64_t j = 0; j < k; j++) row[j] = rng_normal(&r) + (extreme ? 0.5f : 0.0f);
        tensor_from_f32(t, row, to, k);
        // A file may contain any numbers after its scales; nf4's scales are at the front.
        for (size_t j = scales; extreme && t == TENSOR_NF4 && j < bytes; j++)
            to[j] = (uint8_t)rng_u32(&r);
    }
    for (int64_t i = 0; i < rows * k; i++) c->x[i] = rng_normal(&r) * (extreme ? 30.0f : 1.0f);
    assert_int_equal(
        matrix_init(&c->w, t, n, k, c->file, NULL, NUMERIC_EXACT, NULL, &c->arena, &err), OK);
    gemm_input_prepare(&c->in, c->x, k, rows, k, true, false,
                       arena_alloc(&c->arena, gemm_input_scratch(rows, k)), NULL);
}

/* Compared with a sum in double over the quantised operands. */
static void product_verify(const struct product_case *c, const float *y, int64_t ldy,
                           const float *before) {
    const struct matrix *w = &c->w;
    float row[1024];
    for (int64_t n = 0; n < w->n; n++) {
        matrix_get_row(w, n, row);
        for (int64_t m = 0; m < c->in.rows; m++) {
            double sum = before ? (double)before[m * ldy + n] : 0, size = fabs(sum);
            for (int64_t k = 0; k < w->k; k++) {
                double x = (double)c->in.q[m * w->k + k] * (double)c->in.d[(m * w->k + k) / 32];
                sum += x * (double)row[k];
                size += fabs(x * (double)row[k]);
            }
            if (!(fabs((double)y[m * ldy + n] - sum) <= 4e-6 * size))
                fail_msg("%s: %g, in double %g", tensor_type_name(w->type), (double)y[m * ldy + n],
                         sum);
        }
    }
}

static void check_product(enum tensor_type t, int64_t n, int64_t k, int64_t rows, bool extreme) {
    struct product_case c;
    case_make(&c, t, n, k, rows, extreme);
    size_t size = (size_t)(rows * (n + 1));
    float *want = arena_alloc(&c.arena, size * sizeof *want),
          *got = arena_alloc(&c.arena, size * sizeof *got),
          *before = arena_alloc(&c.arena, size * sizeof *got);
    for (size_t i = 0; i < size; i++) before[i] = (float)(i % 7) - 3.0f;
    for (int add = 0; add < 2; add++) {
        memcpy(want, before, size * sizeof *want);
        product(kernels_for_level(CPU_SCALAR), &c.w, &c.in, 0, n, add, want, n + 1);
        product_verify(&c, want, n + 1, add ? before : NULL);
        for (int l = CPU_AVX2; l < CPU_LEVELS; l++) {
            const struct kernels *level = kernels_for_level((enum cpu_level)l);
            if (!level) continue;
            memcpy(got, before, size * sizeof *got);
            product(level, &c.w, &c.in, 0, n, add, got, n + 1);
            if (memcmp(got, want, size * sizeof *got) != 0)
                fail_msg("%s at %s: not scalar's bits", tensor_type_name(t), level->name);
        }
    }
    arena_release(&c.arena);
}

static void test_products(void **state) {
    (void)state;
    static const struct {
        int64_t n, k, rows;
    } shapes[] = {{1, 256, 1}, {37, 512, 5}, {16, 768, 2}, {50, 256, 19}, {48, 1024, 4}};
    for (size_t ti = FIRST_QUANT; ti < ARRAY_LEN(all_types); ti++) {
        enum tensor_type t = all_types[ti];
        for (size_t i = 0; i < ARRAY_LEN(shapes); i++)
            for (int extreme = 0; extreme < 2; extreme++)
                check_product(t, shapes[i].n, shapes[i].k, shapes[i].rows, extreme);
        if (tensor_type_block_size(t) == 32) check_product(t, 20, 96, 3, false);
        if (tensor_type_block_size(t) == 32) check_product(t, 33, 32, 6, true);
    }
}

/* Weights and activations at the ends of their ranges, where narrow sums would overflow. */
static void test_products_ends(void **state) {
    (void)state;
    enum { N = 48, K = 512, ROWS = 7 };
    static float x[ROWS * K], row[K], want[ROWS * N], got[ROWS * N];
    static uint8_t bytes[K * sizeof(float)];
    for (int i = 0; i < ROWS * K; i++) x[i] = i / K % 2 ? 1.0f : -1.0f;
    for (size_t ti = FIRST_QUANT; ti < ARRAY_LEN(all_types); ti++) {
        enum tensor_type t = all_types[ti];
        struct error err = {0};
        struct arena arena = {0};
        struct matrix w;
        struct gemm_input in;
        assert_int_equal(matrix_alloc(&w, t, N, K, NUMERIC_EXACT, &arena, &err), OK);
        for (int n = 0; n < N; n++) {
            for (int k = 0; k < K; k++) row[k] = n % 3 && k % 32 == 0 ? 0.0f : n % 2 ? 1.0f : -1.0f;
            tensor_from_f32(t, row, bytes, K);
            assert_int_equal(matrix_set_row(&w, n, bytes, &err), OK);
        }
        gemm_input_prepare(&in, x, K, ROWS, K, true, false,
                           arena_alloc(&arena, gemm_input_scratch(ROWS, K)), NULL);
        assert_int_equal(abs(in.q[0]), 127);
        product(kernels_for_level(CPU_SCALAR), &w, &in, 0, N, false, want, N);
        for (int l = CPU_AVX2; l < CPU_LEVELS; l++) {
            const struct kernels *level = kernels_for_level((enum cpu_level)l);
            if (!level) continue;
            product(level, &w, &in, 0, N, false, got, N);
            if (memcmp(got, want, sizeof got) != 0)
                fail_msg("%s at %s: not scalar's bits", tensor_type_name(t), level->name);
        }
        arena_release(&arena);
    }
}

/* Fewer rows, fewer outputs, more threads: the same bits. */
static void test_products_do_not_depend_on_the_batch(void **state) {
    (void)state;
    enum { ROWS = 23, N = 83, K = 512 };
    static float whole[ROWS * N], part[ROWS * N];
    for (size_t ti = FIRST_QUANT; ti < ARRAY_LEN(all_types); ti++) {
        enum tensor_type t = all_types[ti];
        struct product_case c;
        case_make(&c, t, N, K, ROWS, false);
        matrix_mul(whole, N, &c.in, &c.w, false, NULL);
        for (int threads = 2; threads <= 3; threads++) {
            struct pool *pool = pool_new(threads);
            matrix_mul(part, N, &c.in, &c.w, false, pool);
            assert_memory_equal(whole, part, sizeof whole);
            pool_free(pool);
        }
        for (int rows = 1; rows <= 9; rows += 4) {
            for (int m = 0; m < ROWS; m += rows) {
                struct gemm_input in = gemm_input_rows(&c.in, m, MIN(m + rows, ROWS));
                for (int n = 0; n < N; n += 32)
                    matrix_mul_range(part + m * N, N, &in, &c.w, n, MIN(n + 32, N), false);
            }
            assert_memory_equal(whole, part, sizeof whole);
        }
        arena_release(&c.arena);
    }
}

/* Rows in memory decode to the bits of the file's rows, and encode to the file's bytes. */
static void test_rows_round_trip(void **state) {
    (void)state;
    enum { N = 21, K = 256 };
    for (size_t ti = FIRST_QUANT; ti < ARRAY_LEN(all_types); ti++) {
        enum tensor_type t = all_types[ti];
        struct product_case c;
        struct matrix ordered, set_by_row;
        struct error err;
        int32_t order[N];
        float want[K], got[K];
        uint8_t file[K * 4];
        size_t bytes = tensor_row_bytes(t, K);
        case_make(&c, t, N, K, 1, true);
        for (int i = 0; i < N; i++) order[i] = (i * 8 + 3) % N;
        assert_int_equal(
            matrix_init(&ordered, t, N, K, c.file, order, NUMERIC_EXACT, NULL, &c.arena, &err), OK);
        assert_int_equal(matrix_alloc(&set_by_row, t, N, K, NUMERIC_EXACT, &c.arena, &err), OK);
        for (int i = 0; i < N; i++) {
            const uint8_t *row = c.file + (size_t)order[i] * bytes;
            assert_int_equal(matrix_set_row(&set_by_row, i, row, &err), OK);
            tensor_to_f32(t, row, want, K);
            matrix_get_row(&ordered, i, got);
            assert_memory_equal(got, want, sizeof got);
            matrix_get_row(&set_by_row, i, got);
            assert_memory_equal(got, want, sizeof got);
            assert_true(matrix_encode_row(&ordered, i, file));
            assert_memory_equal(file, row, bytes);
            assert_true(matrix_encode_row(&set_by_row, i, file));
            assert_memory_equal(file, row, bytes);
        }
        assert_true(matrix_bytes(&set_by_row) >= bytes * N);
        arena_release(&c.arena);
    }
}

/* Any bytes decode, any floats encode; a non-finite scale is refused, all else is computed. */
static void test_garbage(void **state) {
    (void)state;
    enum { N = 16, K = 256 };
    static const float special[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-45f, 0.0f, -0.0f};
    struct rng r = rng_make(4, RNG_TEST, 0, 0);
    for (size_t ti = FIRST_QUANT; ti < ARRAY_LEN(all_types); ti++) {
        enum tensor_type t = all_types[ti];
        int refused = 0;
        for (int turn = 0; turn < 60; turn++) {
            struct arena arena = {0};
            struct matrix w;
            struct error err;
            float x[K], back[K];
            size_t bytes = tensor_row_bytes(t, K);
            uint8_t *file = arena_alloc(&arena, bytes * N);
            for (int i = 0; i < K; i++)
                x[i] = rng_below(&r, 3) ? rng_normal(&r) : special[rng_below(&r, 8)];
            tensor_from_f32(t, x, file, K);
            for (size_t i = turn % 2 ? bytes : 0; i < bytes * N; i++)
                file[i] = turn % 3 ? (uint8_t)rng_u32(&r) : 0xff;
            for (int i = 0; i < N; i++) tensor_to_f32(t, file + (size_t)i * bytes, back, K);
            int rc = matrix_init(&w, t, N, K, file, NULL, NUMERIC_EXACT, NULL, &arena, &err);
            assert_true(rc == OK || rc == ERR_NUMERIC);
            refused += rc != OK;
            for (int i = 0; rc == OK && i < N; i++) matrix_get_row(&w, i, back);
            arena_release(&arena);
        }
        assert_true(refused >= 20); // all bytes 0xff is a NaN scale in every type
    }
}

/* models */

static const char *tmp_path(const char *name) {
    static char dir[64], path[8][128];
    static int turn;
    if (!*dir) {
        snprintf(dir, sizeof dir, "/tmp/shoal-quant-XXXXXX");
        assert_non_null(mkdtemp(dir));
    }
    char *p = path[turn++ % 8];
    snprintf(p, sizeof path[0], "%s/%s", dir, name);
    return p;
}

static struct model_config small_config_of(const char *shape, bool tied) {
    struct model_config c;
    struct error err;
    assert_int_equal(model_preset_find(shape, &c, &err), OK);
    c.n_layers = 2;
    c.d_model = c.d_ff = 256;
    c.head_dim = 64;
    c.vocab_size = 300;
    c.tied = tied;
    return c;
}

static struct model_config small_config(bool tied) {
    return small_config_of("tiny-llama", tied);
}

/* Weights large enough for distinct predictions. */
static struct model *small_model(bool tied) {
    const struct model_config c = small_config(tied);
    struct model *m = model_new_random(&c, 9, NUMERIC_EXACT);
    for (int32_t i = 0; i < weight_count(&c); i++) {
        struct weight_info w;
        weight_at(&c, i, NAMING_HF, &w);
        float *v = w.is_vector ? NULL : (float *)(uintptr_t)weight_matrix(m, &w)->data;
        for (int64_t j = 0; v && j < w.n * w.k; j++) v[j] *= 4.0f;
    }
    return m;
}

static void assert_rows_equal(const struct model *a, const struct model *b) {
    float x[1024], y[1024], scratch[1024];
    for (int32_t i = 0; i < weight_count(&a->config); i++) {
        struct weight_info w;
        weight_at(&a->config, i, NAMING_HF, &w);
        for (int64_t r = 0; r < w.n; r++) {
            weight_row(a, &w, r, TENSOR_F32, scratch, x);
            weight_row(b, &w, r, TENSOR_F32, scratch, y);
            if (memcmp(x, y, sizeof *x * (size_t)w.k) != 0)
                fail_msg("%s row %d differs", w.name, (int)r);
        }
    }
}

static void assert_files_equal(const char *a, const char *b) {
    char x[HASH_LEN], y[HASH_LEN];
    struct error err;
    assert_int_equal(sha256_file(a, x, &err), OK);
    assert_int_equal(sha256_file(b, y, &err), OK);
    assert_string_equal(x, y);
}

static struct model *open_ok(const char *path, enum numeric_class cls) {
    struct error err;
    struct model *m = model_open(path, cls, &err);
    if (!m) fail_msg("%s", err.text);
    return m;
}

/* Text of several scripts as the byte tokens of the small model. */
static int text_tokens(const struct model *m, struct token_ids *ids,
                       struct scored_sequence out[2]) {
    static const char *const texts[] = {"Forty-two boxes, three more than the day before.",
                                        "四十二箱、前の日より三つ多い。一共四十二箱。"};
    for (int i = 0; i < 2; i++) tokenizer_encode(m->tok, texts[i], strlen(texts[i]), 0, &ids[i]);
    for (int i = 0; i < 2; i++)
        out[i] = (struct scored_sequence){ids[i].v, NULL, MIN(ids[i].n, 60)};
    return 2;
}

static const enum dtype f32[2] = {DTYPE_F32, DTYPE_F32};

static struct model_divergence divergence_of(const struct model *a, const struct model *b) {
    struct token_ids ids[2] = {0};
    struct scored_sequence text[2];
    const struct model *const both[2] = {a, b};
    struct pool *pool = pool_new(2);
    struct model_divergence d =
        model_divergence_measure(both, f32, text, text_tokens(a, ids, text), pool, NULL);
    pool_free(pool);
    token_ids_release(&ids[0]);
    token_ids_release(&ids[1]);
    return d;
}

/* Largest mean KL divergence, about twice the measured one, of a model that is written, opened and
 * run. Random weights are harder than trained ones. */
static const struct {
    const char *name;
    double kl;
} models[] = {
    {"f16", 1e-5},  {"bf16", 2e-4},  {"q8_0", 2e-3},  {"q6_k", 0.015},  {"q5_k", 0.06},
    {"q5_1", 0.06}, {"q5_0", 0.08},  {"q4_k", 0.2},   {"q4_1", 0.25},   {"q4_0", 0.3},
    {"nf4", 0.3},   {"q4_k_s", 0.2}, {"q4_k_m", 0.2}, {"q5_k_m", 0.06},
};

static void test_models(void **state) {
    (void)state;
    struct error err;
    struct model *m = small_model(true);
    struct pool *pool = pool_new(2);
    m->name = arena_strdup(&m->arena, "m");
    dir_make(tmp_path("again"), &err);
    for (size_t i = 0; i < ARRAY_LEN(models); i++) {
        struct quant_scheme q;
        struct progress bar = {.total = 1};
        assert_int_equal(quant_parse(models[i].name, &q, &err), OK);
        progress_start(&bar, "weights", 1);
        assert_int_equal(model_quantize_gguf(m, tmp_path("m.gguf"), &q, pool, &bar, &err), OK);
        struct model *back = open_ok(tmp_path("m.gguf"), NUMERIC_EXACT);
        assert_int_equal(model_quantize_gguf(back, tmp_path("again/m.gguf"), &q, NULL, NULL, &err),
                         OK);
        assert_files_equal(tmp_path("m.gguf"), tmp_path("again/m.gguf"));
        struct model_divergence d = divergence_of(m, back);
        if (!(d.kl_mean < models[i].kl && d.kl_mean > 0))
            fail_msg("%s: mean KL %g", models[i].name, d.kl_mean);
        assert_true(d.kl_p99 >= d.kl_mean && d.same_top > 0.3 && d.n > 60);
        model_close(back);
    }
    struct model_divergence self = divergence_of(m, m);
    assert_true(self.kl_mean == 0 && self.same_top == 1 &&
                self.perplexity[0] == self.perplexity[1] && self.perplexity[0] > 1);
    pool_free(pool);
    model_close(m);
}

/* A writer makes the same file from a mapped model as from an opened one, for every type of it;
 * q and k are permuted. A mapped block with a scale that is not finite is refused. */
static void test_mapped_models(void **state) {
    (void)state;
    static const char *const to[] = {"f32", "q8_0", "q4_k_m", "nf4"};
    struct error err;
    struct pool *pool = pool_new(2);
    for (size_t i = 0; i < ARRAY_LEN(models) * 2; i++) {
        struct quant_scheme q;
        struct model *m = small_model(i % 2);
        assert_int_equal(quant_parse(models[i / 2].name, &q, &err), OK);
        assert_int_equal(model_quantize_gguf(m, tmp_path("m.gguf"), &q, pool, NULL, &err), OK);
        model_close(m);
        struct model *opened = open_ok(tmp_path("m.gguf"), NUMERIC_EXACT),
                     *mapped = model_open_for_writing(tmp_path("m.gguf"), &err);
        assert_non_null(mapped);
        assert_true(mapped->type == opened->type && mapped->layers[1].proj[PROJ_Q].data);
        for (size_t j = 0; j <= ARRAY_LEN(to); j++) { // the last one: its own type
            struct quant_scheme other = q;
            if (j < ARRAY_LEN(to)) assert_int_equal(quant_parse(to[j], &other, &err), OK);
            for (int k = 0; k < 2; k++)
                assert_int_equal(model_quantize_gguf(k ? mapped : opened,
                                                     tmp_path(k ? "b.gguf" : "a.gguf"), &other,
                                                     pool, NULL, &err),
                                 OK);
            assert_files_equal(tmp_path("a.gguf"), tmp_path("b.gguf"));
        }
        for (int k = 0; k < 2; k++)
            assert_int_equal(
                model_write_hf(k ? mapped : opened, tmp_path(k ? "b" : "a"), TENSOR_BF16, &err),
                OK);
        assert_files_equal(tmp_path("a/model.safetensors"), tmp_path("b/model.safetensors"));
        model_close(opened);
        const struct matrix w = mapped->layers[1].proj[PROJ_DOWN];
        if (q.type == TENSOR_Q8_0) { // the mapping is private
            static const uint8_t nan[2] = {0xff, 0x7f};
            uintptr_t page = (uintptr_t)w.data / 4096 * 4096;
            assert_int_equal(mprotect((void *)page, 8192, PROT_READ | PROT_WRITE), 0);
            memcpy((void *)(uintptr_t)w.data, nan, sizeof nan);
            // no writer evicts the changed page before it is read: it is in one matrix only
            assert_int_equal(model_quantize_gguf(mapped, tmp_path("a.gguf"), &q, pool, NULL, &err),
                             ERR_NUMERIC);
            assert_int_equal(mprotect((void *)page, 8192, PROT_READ), 0);
        }
        model_close(mapped);
    }
    pool_free(pool);
}

/* Models that are opened in turn give the bits of models that are in memory together, whether the
 * file of logits holds all predictions or those of one sequence. */
static void test_divergence_in_turn(void **state) {
    (void)state;
    struct error err;
    struct model *m = small_model(true);
    struct pool *pool = pool_new(2);
    struct token_ids ids[2] = {0};
    struct scored_sequence text[2];
    char scored[60] = {0};
    const char *const paths[2] = {tmp_path("original.gguf"), tmp_path("copy.gguf")};
    for (int i = 0; i < 60; i++) scored[i] = i % 3 != 0;
    int n = text_tokens(m, ids, text);
    text[1].scored = scored;
    assert_int_equal(model_write_gguf(m, paths[0], TENSOR_F32, &err), OK);
    assert_int_equal(model_write_gguf(m, paths[1], TENSOR_Q4_0, &err), OK);
    struct model *const both[2] = {open_ok(paths[0], NUMERIC_EXACT),
                                   open_ok(paths[1], NUMERIC_EXACT)};
    const struct model_divergence want =
        model_divergence_measure((const struct model *const *)both, f32, text, n, pool, NULL);
    assert_true(want.n == text[0].n - 1 + 40 && want.kl_mean > 0);
    for (int i = 0; i < 2; i++) {
        struct model_divergence got;
        assert_int_equal(model_divergence_measure_in_turn(paths, NUMERIC_EXACT, f32, 300, text, n,
                                                          paths[1], i ? 1 << 20 : 1, pool, &got,
                                                          &err),
                         OK);
        assert_memory_equal(&got, &want, sizeof got);
    }
    assert_int_equal(model_divergence_measure_in_turn(paths, NUMERIC_EXACT, f32, 301, text, n,
                                                      paths[1], 1, pool,
                                                      &(struct model_divergence){0}, &err),
                     ERR_MISMATCH);
    for (int i = 0; i < 2; i++) {
        model_close(both[i]);
        token_ids_release(&ids[i]);
    }
    pool_free(pool);
    model_close(m);
}

/* Perplexity and divergence compared with a plain double computation over the same logits. */
static void test_divergence(void **state) {
    (void)state;
    struct model *a = small_model(true), *b = small_model(true);
    float *w = (float *)(uintptr_t)b->embed.data;
    for (int i = 0; i < 3000; i++) w[i * 5] *= 1.3f;
    static const int32_t ids[] = {5, 80, 81, 7, 200, 299, 12, 40};
    static const char scored[] = {1, 0, 1, 1, 0, 1, 1, 1};
    enum { N = 8, V = 300 };
    static float logits[2][N * V];
    const struct model *const both[2] = {a, b};
    const struct lora_segment base_only = {.end = N};
    for (int i = 0; i < 2; i++) {
        struct forward_options o = {.max_rows = N, .n_slots = 1, .slot_len = N};
        struct forward *f = forward_new(both[i], &o);
        struct batch_row rows[N];
        int32_t out[N];
        for (int t = 0; t < N; t++) rows[t] = (struct batch_row){ids[t], t, 0}, out[t] = t;
        forward_run(f, rows, N, &base_only, 1, out, N, logits[i]);
        forward_free(f);
    }
    double nll[2] = {0, 0}, kl = 0;
    int n = 0;
    for (int t = 0; t + 1 < N; t++) {
        if (!scored[t + 1]) continue;
        double z[2] = {0, 0};
        for (int i = 0; i < 2; i++) {
            for (int v = 0; v < V; v++) z[i] += exp((double)logits[i][t * V + v]);
            nll[i] += log(z[i]) - (double)logits[i][t * V + ids[t + 1]];
        }
        for (int v = 0; v < V; v++) {
            double p = exp((double)logits[0][t * V + v]) / z[0],
                   q = exp((double)logits[1][t * V + v]) / z[1];
            kl += p * log(p / q);
        }
        n++;
    }
    const struct scored_sequence text = {ids, scored, N};
    struct model_divergence d = model_divergence_measure(both, f32, &text, 1, NULL, NULL);
    assert_int_equal(d.n, n);
    assert_true(kl > 1e-4 && fabs(d.kl_mean - kl / n) < 1e-6 + 1e-5 * kl);
    for (int i = 0; i < 2; i++) assert_true(fabs(d.perplexity[i] / exp(nll[i] / n) - 1) < 1e-5);
    model_close(a);
    model_close(b);
}

/* A model created in a type and one that is written and opened have the same weights, and for
 * blocks of 32 the same file. */
static void check_typed(const struct model_config *c, enum tensor_type t) {
    struct error err;
    struct model *plain = model_new_random(c, 4, NUMERIC_EXACT);
    struct model *typed = model_new_quantized(c, 4, t, NUMERIC_EXACT);
    assert_int_equal(model_write_gguf(plain, tmp_path("t.gguf"), t, &err), OK);
    struct model *opened = open_ok(tmp_path("t.gguf"), NUMERIC_EXACT);
    assert_rows_equal(typed, opened);
    assert_int_equal(opened->type, t);
    if (tensor_type_block_size(t) <= 32) {
        typed->name = arena_strdup(&typed->arena, plain->name);
        assert_int_equal(model_write_gguf(typed, tmp_path("again/t.gguf"), t, &err), OK);
        assert_files_equal(tmp_path("t.gguf"), tmp_path("again/t.gguf"));
    }
    model_close(opened);
    model_close(typed);
    model_close(plain);
}

/* Without a file: every row of a matrix is converted to its type once, vectors never. */
static void check_typed_rows(const struct model_config *c, enum tensor_type t) {
    struct model *plain = model_new_random(c, 4, NUMERIC_EXACT);
    struct model *typed = model_new_quantized(c, 4, t, NUMERIC_EXACT);
    const struct quant_scheme q = quant_pure(t);
    float want[256], got[256], scratch[256], bytes[260];
    for (int32_t i = 0; i < weight_count(c); i++) {
        struct weight_info w;
        weight_at(c, i, NAMING_HF, &w);
        enum tensor_type as = quant_weight_type(&q, c, &w);
        for (int64_t r = 0; r < w.n; r++) {
            weight_row(plain, &w, r, TENSOR_F32, scratch, want);
            tensor_from_f32(as, want, bytes, w.k);
            tensor_to_f32(as, bytes, want, w.k);
            weight_row(typed, &w, r, TENSOR_F32, scratch, got);
            if (memcmp(want, got, sizeof *got * (size_t)w.k) != 0)
                fail_msg("%s row %d differs", w.name, (int)r);
        }
    }
    model_close(typed);
    model_close(plain);
}

static void test_model_new_typed(void **state) {
    (void)state;
    static const char *const shapes[] = {"tiny-llama", "tiny-qwen2", "tiny-gemma3", "tiny-gpt-neo"};
    struct error err;
    dir_make(tmp_path("again"), &err);
    log_quiet = true; // GGUF has no key for a field of Gemma, which the error names
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        const struct model_config c = small_config_of(shapes[i], true);
        for (size_t ti = 0; ti < ARRAY_LEN(all_types); ti++) {
            enum tensor_type t = all_types[ti];
            check_typed_rows(&c, t);
            if (c.arch->gguf) check_typed(&c, t);
        }
    }
    log_quiet = false;
}

/* The type of each tensor, as `llama-quantize` prints it for a model of this shape. */
static void test_mixtures(void **state) {
    (void)state;
    static const struct {
        const char *quant;
        int n_layers, d_model;
        bool tied;
        const char *tensor, *type;
    } rows[] = {
        {"q4_k_m", 12, 512, false, "token_embd.weight", "q4_k"},
        {"q4_k_m", 12, 512, false, "output.weight", "q6_k"},
        {"q4_k_m", 12, 512, true, "token_embd.weight", "q6_k"},
        {"q4_k_m", 12, 512, false, "blk.0.attn_v.weight", "q6_k"},
        {"q4_k_m", 12, 512, false, "blk.1.attn_v.weight", "q4_k"},
        {"q4_k_m", 12, 512, false, "blk.3.ffn_down.weight", "q6_k"},
        {"q4_k_m", 12, 512, false, "blk.4.ffn_down.weight", "q4_k"},
        {"q4_k_m", 12, 512, false, "blk.11.ffn_down.weight", "q6_k"},
        {"q4_k_m", 12, 512, false, "blk.11.attn_q.weight", "q4_k"},
        {"q4_k_m", 12, 288, true, "token_embd.weight", "q8_0"},
        {"q4_k_m", 12, 288, true, "blk.1.attn_q.weight", "q5_0"},
        {"q4_k_m", 12, 288, true, "blk.0.attn_v.weight", "q8_0"},
        {"q4_k_s", 12, 512, false, "blk.3.attn_v.weight", "q5_k"},
        {"q4_k_s", 12, 512, false, "blk.4.attn_v.weight", "q4_k"},
        {"q4_k_s", 12, 512, false, "blk.0.ffn_down.weight", "q5_k"},
        {"q4_k_s", 12, 512, false, "blk.1.ffn_down.weight", "q4_k"},
        {"q5_k_m", 12, 512, false, "blk.0.attn_v.weight", "q6_k"},
        {"q5_k_s", 12, 512, false, "blk.0.attn_v.weight", "q5_k"},
        {"q5_k_s", 12, 512, false, "output.weight", "q6_k"},
        {"nf4", 12, 512, false, "output.weight", "nf4"},
        {"q4_k_m", 12, 512, false, "output_norm.weight", "f32"},
    };
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct model_config c = small_config(rows[i].tied);
        struct quant_scheme q;
        struct error err;
        bool found = false;
        c.n_layers = rows[i].n_layers;
        c.d_model = rows[i].d_model;
        c.head_dim = rows[i].d_model / c.n_heads;
        assert_int_equal(quant_parse(rows[i].quant, &q, &err), OK);
        for (int32_t j = 0; j < weight_count(&c); j++) {
            struct weight_info w;
            weight_at(&c, j, NAMING_GGUF, &w);
            if (strcmp(w.name, rows[i].tensor) != 0) continue;
            found = true;
            if (strcmp(tensor_type_name(quant_weight_type(&q, &c, &w)), rows[i].type) != 0)
                fail_msg("%s: %s is %s", rows[i].quant, w.name,
                         tensor_type_name(quant_weight_type(&q, &c, &w)));
        }
        assert_true(found);
    }
}

/* Weights that no scale can represent are refused by name and leave no file; a file with them is
 * refused too. */
static void test_refused(void **state) {
    (void)state;
    struct error err;
    for (size_t ti = FIRST_QUANT; ti < ARRAY_LEN(all_types); ti++) {
        enum tensor_type t = all_types[ti];
        const struct quant_scheme q = quant_pure(t);
        struct model *m = small_model(false);
        float *v = (float *)(uintptr_t)m->layers[1].proj[PROJ_UP].data;
        v[777] = t % 2 ? NAN : 1e9f;
        unlink(tmp_path("bad.gguf"));
        assert_int_equal(model_quantize_gguf(m, tmp_path("bad.gguf"), &q, NULL, NULL, &err),
                         ERR_NUMERIC);
        assert_non_null(strstr(err.text, "blk.1.ffn_up.weight"));
        assert_false(path_exists(tmp_path("bad.gguf")));
        v[777] = 1.0f;
        assert_int_equal(model_quantize_gguf(m, tmp_path("bad.gguf"), &q, NULL, NULL, &err), OK);
        struct buf file = {0};
        assert_int_equal(file_read(tmp_path("bad.gguf"), 1 << 24, &file, &err), OK);
        memset(file.data + file.len - 256, 0xff, 256); // within the head's last row
        assert_int_equal(file_write(tmp_path("bad.gguf"), file.data, file.len, &err), OK);
        struct model *back = model_open(tmp_path("bad.gguf"), NUMERIC_EXACT, &err);
        assert_true(!back && err.code == ERR_NUMERIC);
        buf_release(&file);
        model_close(m);
    }
}

static int files_remove(void **state) {
    (void)state;
    static const char *const names[] = {"m.gguf",       "again/m.gguf",  "t.gguf",
                                        "again/t.gguf", "bad.gguf",      "a.gguf",
                                        "b.gguf",       "original.gguf", "copy.gguf"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) unlink(tmp_path(names[i]));
    dir_delete(tmp_path("a"));
    dir_delete(tmp_path("b"));
    rmdir(tmp_path("again"));
    return rmdir(tmp_path(""));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_quality),
        cmocka_unit_test(test_nf4),
        cmocka_unit_test(test_names_and_fit),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_products_ends),
        cmocka_unit_test(test_products_do_not_depend_on_the_batch),
        cmocka_unit_test(test_rows_round_trip),
        cmocka_unit_test(test_garbage),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_mapped_models),
        cmocka_unit_test(test_divergence_in_turn),
        cmocka_unit_test(test_divergence),
        cmocka_unit_test(test_model_new_typed),
        cmocka_unit_test(test_mixtures),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("quant", tests, NULL, files_remove);
}
