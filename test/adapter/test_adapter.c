/*
 * test_adapter: struct adapter, PEFT directories, and the algebra of adapters.
 *
 * The algebra is compared with a dense reference: ΔW is computed in double, entry by entry, and
 * every operator is compared with its definition on that matrix. Adapters are saved, loaded and
 * saved again, and the files must be equal. Invalid inputs are in tables, one row per error, with
 * the expected parts of the message. An adapter that PEFT wrote is optional data (SHOAL_SHARED).
 */
#define _GNU_SOURCE
#include "adapter/adapter.h"
#include "fixture.h"

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

static struct model_config small_shape(void) {
    return fixture_shape(3, 24, 3, 1, 8, 40);
}

static struct adapter_config config_make(int r, float alpha, const char *targets) {
    struct adapter_config c = {.r = r, .alpha = alpha, .dropout = 0.05f};
    struct error err;
    assert_int_equal(adapter_targets_parse(targets, c.target, &err), OK);
    return c;
}

/* All tensors are N(0, 1), so that no B is zero. */
static struct adapter *random_adapter(const struct model_config *s, const struct adapter_config *c,
                                      uint64_t seed) {
    size_t n = adapter_param_count(s, c);
    float *data = xmalloc(n * sizeof *data);
    struct rng rng = rng_make(seed, RNG_TEST, 0, 0);
    for (size_t i = 0; i < n; i++) data[i] = rng_normal(&rng);
    struct adapter *a = adapter_from_data(s, c, data, NULL);
    free(data);
    return a;
}

static struct adapter *random_adapter_of_rank(const struct model_config *s, int r,
                                              const char *targets, uint64_t seed) {
    struct adapter_config c = config_make(r, (float)(2 * r), targets);
    return random_adapter(s, &c, seed);
}

static char *temp_dir(void) {
    const char *base = getenv("TMPDIR");
    char *path = xasprintf("%s/shoal-adapter-XXXXXX", base ? base : "/tmp");
    assert_non_null(mkdtemp(path));
    return path;
}

/* Removes the directory recursively and frees its name. */
static void temp_remove(char *dir) {
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        char *path = path_join(dir, e->d_name);
        if (path_is_dir(path))
            temp_remove(path);
        else {
            unlink(path);
            free(path);
        }
    }
    if (d) closedir(d);
    rmdir(dir);
    free(dir);
}

static int files_count(const char *dir) {
    DIR *d = opendir(dir);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n;
}

static void write_file(const char *dir, const char *name, const void *data, size_t n) {
    char *path = path_join(dir, name);
    FILE *f = fopen(path, "wb"); /* not file_write: hundreds of fsyncs would only take time */
    assert_true(f && fwrite(data, 1, n, f) == n && fclose(f) == 0);
    free(path);
}

static struct buf read_file(const char *dir, const char *name) {
    char *path = path_join(dir, name);
    struct buf b = {0};
    struct error err;
    assert_int_equal(file_read(path, 1 << 26, &b, &err), OK);
    free(path);
    return b;
}

static void assert_same_file(const char *a, const char *b, const char *name) {
    struct buf x = read_file(a, name), y = read_file(b, name);
    assert_int_equal(x.len, y.len);
    assert_memory_equal(x.data, y.data, x.len);
    buf_release(&x);
    buf_release(&y);
}

static struct adapter *load_ok(const char *dir, const struct model_config *s) {
    struct error err = {0};
    struct adapter *a = adapter_load(dir, s, &err);
    if (!a) fprintf(stderr, "%s\n", err.text);
    assert_non_null(a);
    return a;
}

static void save_ok(const struct adapter *a, const char *dir) {
    struct error err = {0};
    int rc = adapter_save(a, dir, "fry", &err);
    if (rc) fprintf(stderr, "%s\n", err.text);
    assert_int_equal(rc, OK);
}

static size_t module_size(const struct model_config *s, int i) {
    return (size_t)proj_in(s, i % N_PROJ) * (size_t)proj_out(s, i % N_PROJ);
}

/* ΔW of module i, [out][in], in double; zeros if the adapter lacks the module. */
static double *dense_delta(const struct adapter *a, int i) {
    const struct lora *lo = &a->loras[i];
    int in = proj_in(&a->shape, i % N_PROJ), out = proj_out(&a->shape, i % N_PROJ);
    double *w = xcalloc(module_size(&a->shape, i), sizeof *w);
    for (int o = 0; o < out; o++)
        for (int j = 0; j < in; j++)
            for (int c = 0; c < lo->r; c++)
                w[(size_t)o * in + j] +=
                    (double)lo->scale * lo->b[o * lo->r + c] * lo->a[c * in + j];
    return w;
}

static double norm(const double *w, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += w[i] * w[i];
    return sqrt(s);
}

/* The largest relative error over modules of `got` against x·a + y·b. */
static double blend_error(const struct adapter *got, const struct adapter *a, double x,
                          const struct adapter *b, double y) {
    double worst = 0;
    for (int i = 0; i < a->shape.n_layers * N_PROJ; i++) {
        size_t n = module_size(&a->shape, i);
        double *g = dense_delta(got, i), *wa = dense_delta(a, i), *wb = dense_delta(b, i);
        for (size_t k = 0; k < n; k++) wa[k] = x * wa[k] + y * wb[k], g[k] -= wa[k];
        double size = norm(wa, n), e = norm(g, n);
        worst = fmax(worst, size > 0 ? e / size : e);
        free(g);
        free(wa);
        free(wb);
    }
    return worst;
}

static struct adapter *blend_ok(const struct adapter *a, const struct adapter *b, float t, int r,
                                enum blend_kind k) {
    struct error err = {0};
    struct adapter *c = adapter_blend(a, b, t, r, k, &err);
    if (!c) fprintf(stderr, "%s\n", err.text);
    assert_non_null(c);
    return c;
}

enum fill {
    FILL_RANDOM,
    FILL_DEFICIENT,
    FILL_ZERO,
    FILL_GRADED,
    FILL_TWINS,
    FILL_HUGE,
    FILL_TINY,
    N_FILL
};

static double *matrix_fill(int m, int n, enum fill kind) {
    double *a = xcalloc((size_t)m * n, sizeof *a);
    struct rng rng = rng_make(7, RNG_TEST, (uint32_t)(m * 1000 + n), (uint32_t)kind);
    for (int i = 0; i < m * n && kind != FILL_ZERO; i++) a[i] = rng_normal(&rng);
    for (int i = 0; i < m; i++) {
        for (int c = 0; c < n; c++) {
            double *x = a + (size_t)i * n + c;
            if (kind == FILL_DEFICIENT && c >= (n + 1) / 2) *x = 3 * a[(size_t)i * n + c / 2];
            if (kind == FILL_TWINS) *x = a[(size_t)i * n];
            if (kind == FILL_GRADED) *x = ldexp(*x, -2 * c);
            if (kind == FILL_HUGE) *x *= 1e100;
            if (kind == FILL_TINY) *x *= 1e-100;
        }
    }
    return a;
}

/* max |QᵀQ - I| of the columns of q [m][n]. */
static double orthogonality(const double *q, int m, int n) {
    double worst = 0;
    for (int x = 0; x < n; x++) {
        for (int y = 0; y < n; y++) {
            double dot = 0;
            for (int i = 0; i < m; i++) dot += q[(size_t)i * n + x] * q[(size_t)i * n + y];
            worst = fmax(worst, fabs(dot - (x == y)));
        }
    }
    return worst;
}

/* max |left · diag(s) · right - a|, right as [k][n] or, when `t`, [n][k]; s may be NULL. */
static double rebuild_error(const double *a, int m, int n, const double *left, const double *s,
                            const double *right, bool t) {
    double worst = 0;
    for (int i = 0; i < m; i++) {
        for (int c = 0; c < n; c++) {
            double sum = 0;
            for (int k = 0; k < n; k++)
                sum += left[(size_t)i * n + k] * (s ? s[k] : 1) *
                       right[t ? (size_t)c * n + k : (size_t)k * n + c];
            worst = fmax(worst, fabs(sum - a[(size_t)i * n + c]));
        }
    }
    return worst;
}

static void test_qr(void **state) {
    (void)state;
    static const int sizes[][2] = {{1, 1}, {2, 2}, {5, 1}, {7, 3}, {16, 16}, {64, 64}, {200, 32}};
    for (size_t k = 0; k < ARRAY_LEN(sizes); k++) {
        for (int kind = 0; kind < N_FILL; kind++) {
            int m = sizes[k][0], n = sizes[k][1];
            double *a = matrix_fill(m, n, kind), *q = xcalloc((size_t)m * n, sizeof *q);
            double *r = xcalloc((size_t)n * n, sizeof *r);
            linalg_qr(a, m, n, q, r);
            assert_true(orthogonality(q, m, n) < 1e-13);
            assert_true(rebuild_error(a, m, n, q, NULL, r, false) <=
                        1e-14 * norm(a, (size_t)m * n));
            for (int i = 0; i < n; i++) {
                assert_true(r[i * n + i] >= 0);
                for (int c = 0; c < i; c++) assert_true(r[i * n + c] == 0);
            }
            free(a);
            free(q);
            free(r);
        }
    }
}

static void svd_check(const double *a, int n) {
    size_t nn = (size_t)n * n;
    double *u = xcalloc(nn, sizeof *u), *v = xcalloc(nn, sizeof *v),
           *s = xcalloc((size_t)n, sizeof *s);
    linalg_svd(a, n, u, s, v);
    assert_true(orthogonality(u, n, n) < 1e-13);
    assert_true(orthogonality(v, n, n) < 1e-13);
    assert_true(rebuild_error(a, n, n, u, s, v, true) <= 2e-14 * norm(a, nn));
    for (int j = 0; j < n; j++) {
        assert_true(s[j] >= 0 && (j == 0 || s[j] <= s[j - 1]));
        double top = 0;
        for (int i = 0; i < n; i++)
            if (fabs(u[i * n + j]) > fabs(top)) top = u[i * n + j];
        assert_true(top > 0);
    }
    free(u);
    free(v);
    free(s);
}

static void test_svd(void **state) {
    (void)state;
    static const int sizes[] = {1, 2, 3, 8, 33, 64};
    for (size_t k = 0; k < ARRAY_LEN(sizes); k++) {
        for (int kind = 0; kind < N_FILL; kind++) {
            double *a = matrix_fill(sizes[k], sizes[k], kind);
            svd_check(a, sizes[k]);
            free(a);
        }
    }
}

/* Known values: a rotation has ones; diag(1, -3, 2) sorts to 3, 2, 1; a graded diagonal keeps its
 * small values exactly. */
static void test_svd_known(void **state) {
    (void)state;
    double rot[4] = {0.6, -0.8, 0.8, 0.6}, diag[9] = {1, 0, 0, 0, -3, 0, 0, 0, 2}, u[9], s[3], v[9];
    linalg_svd(rot, 2, u, s, v);
    assert_true(fabs(s[0] - 1) < 1e-15 && fabs(s[1] - 1) < 1e-15);
    linalg_svd(diag, 3, u, s, v);
    assert_true(s[0] == 3 && s[1] == 2 && s[2] == 1);
    assert_true(u[3] == 1 && v[3] == -1);
    double small[4] = {1, 0, 0, 1e-30};
    linalg_svd(small, 2, u, s, v);
    assert_true(s[0] == 1 && fabs(s[1] - 1e-30) < 1e-44);
}

static void test_targets(void **state) {
    (void)state;
    bool t[N_PROJ];
    struct error err;
    assert_int_equal(adapter_targets_parse("v_proj,q_proj", t, &err), OK);
    for (int p = 0; p < N_PROJ; p++) assert_int_equal(t[p], p == PROJ_Q || p == PROJ_V);
    assert_int_equal(adapter_targets_parse("q_proj down_proj, ", t, &err), OK);
    assert_true(t[PROJ_Q] && t[PROJ_DOWN] && !t[PROJ_K]);
    assert_int_equal(adapter_targets_parse("all-linear", t, &err), OK);
    for (int p = 0; p < N_PROJ; p++) assert_true(t[p]);
    assert_int_equal(adapter_targets_parse("q_proj,c_attn", t, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "unknown target 'c_attn' (known: q_proj, "));
    assert_int_equal(adapter_targets_parse(" ,", t, &err), ERR_USAGE);
    assert_int_equal(adapter_targets_parse("q_pro", t, &err), ERR_USAGE);
}

static void test_new(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter_config c = config_make(4, 8, "q_proj,down_proj");
    struct adapter *a = adapter_new(&s, &c, 5), *b = adapter_new(&s, &c, 5),
                   *d = adapter_new(&s, &c, 6);
    assert_int_equal(a->n_data, 3u * 4u * (24 + 24 + 40 + 24));
    assert_string_equal(a->hash, b->hash);
    assert_string_not_equal(a->hash, d->hash);
    for (int i = 0; i < 3 * N_PROJ; i++) {
        const struct lora *lo = &a->loras[i];
        int p = i % N_PROJ, in = proj_in(&s, p);
        assert_int_equal(lo->r, p == PROJ_Q || p == PROJ_DOWN ? 4 : 0);
        if (lo->r == 0) continue;
        assert_true(lo->scale == 2);
        float bound = 1 / sqrtf((float)in), top = 0;
        for (int k = 0; k < 4 * in; k++) top = fmaxf(top, fabsf(lo->a[k]));
        assert_true(top <= bound && top > 0.8f * bound);
        for (int k = 0; k < 4 * proj_out(&s, p); k++) assert_true(lo->b[k] == 0);
    }
    /* A projection's initial values do not depend on the other targets. */
    struct adapter_config only = config_make(4, 8, "down_proj");
    struct adapter *e = adapter_new(&s, &only, 5);
    assert_memory_equal(e->loras[PROJ_DOWN].a, a->loras[PROJ_DOWN].a, 4 * 40 * sizeof(float));
    adapter_release(a);
    adapter_release(b);
    adapter_release(d);
    adapter_release(e);
    adapter_release(NULL);
}

static struct adapter *adapter_variant(const struct adapter *a, const struct model_config *s,
                                       struct adapter_config c, float change, json_t *lineage) {
    float *data = xmalloc(a->n_data * sizeof *data);
    memcpy(data, a->data, a->n_data * sizeof *data);
    data[a->n_data - 1] += change;
    struct adapter *v = adapter_from_data(s, &c, data, lineage);
    free(data);
    return v;
}

static void test_hash(void **state) {
    (void)state;
    struct model_config s = small_shape(), other = s;
    struct adapter_config c = config_make(4, 8, "q_proj,v_proj"), alpha = c, drop = c, rs = c;
    struct adapter *a = random_adapter(&s, &c, 1);
    json_t *lineage = json_pack("{s:s, s:s}", "operator", "by hand", "parents", "none");
    other.vocab_size = 99;
    alpha.alpha = 9;
    drop.dropout = 0;
    rs.rslora = true;
    struct adapter *same[] = {adapter_variant(a, &s, c, 0, lineage),
                              adapter_variant(a, &other, c, 0, NULL)};
    struct adapter *differ[] = {
        adapter_variant(a, &s, alpha, 0, NULL), adapter_variant(a, &s, drop, 0, NULL),
        adapter_variant(a, &s, rs, 0, NULL), adapter_variant(a, &s, c, 1, NULL)};
    for (size_t i = 0; i < ARRAY_LEN(same); i++) assert_string_equal(a->hash, same[i]->hash);
    for (size_t i = 0; i < ARRAY_LEN(differ); i++)
        assert_string_not_equal(a->hash, differ[i]->hash);
    assert_true(differ[2]->loras[0].scale == 4);
    assert_int_equal(strlen(a->hash), 64);
    for (size_t i = 0; i < ARRAY_LEN(same); i++) adapter_release(same[i]);
    for (size_t i = 0; i < ARRAY_LEN(differ); i++) adapter_release(differ[i]);
    adapter_release(a);
    json_decref(lineage);
}

/* Modules with equal values are normalised to the plain config, with the same hash. */
static void test_modules_normalised(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter_config c = config_make(4, 8, "q_proj,v_proj"),
                          spelled = {.r = 1, .dropout = 0.05f};
    struct adapter_module m[3 * N_PROJ] = {0};
    for (int i = 0; i < 3 * N_PROJ; i++)
        if (i % N_PROJ == PROJ_Q || i % N_PROJ == PROJ_V) m[i] = (struct adapter_module){4, 8};
    spelled.modules = m;
    struct adapter *a = random_adapter(&s, &c, 1), *b = random_adapter(&s, &spelled, 1);
    assert_string_equal(a->hash, b->hash);
    assert_null(b->config.modules);
    m[PROJ_Q].r = 2;
    struct adapter *d = random_adapter(&s, &spelled, 1);
    assert_non_null(d->config.modules);
    assert_int_equal(d->config.r, 4);
    assert_int_equal(d->loras[PROJ_Q].r, 2);
    assert_true(d->loras[PROJ_Q].scale == 4);
    adapter_release(a);
    adapter_release(b);
    adapter_release(d);
}

static void retain_many(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    for (int64_t i = begin; i < end; i++) adapter_release(adapter_retain(ctx));
}

static void test_refs(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 2, "q_proj", 1);
    struct pool *pool = pool_new(4);
    pool_run(pool, retain_many, a, 100000, 1);
    pool_free(pool);
    assert_int_equal(a->refs, 1);
    adapter_release(a);
}

static void test_blend_exact(void **state) {
    (void)state;
    static const float ts[] = {0, 0.25f, 0.5f, 1, 1.5f, -0.75f};
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 4, "all-linear", 1),
                   *b = random_adapter_of_rank(&s, 3, "all-linear", 2);
    for (size_t i = 0; i < ARRAY_LEN(ts); i++) {
        struct adapter *c = blend_ok(a, b, ts[i], 7, BLEND_DELTA);
        assert_true(blend_error(c, a, 1.0 - ts[i], b, ts[i]) < 1e-6);
        assert_int_equal(c->config.r, 7);
        assert_true(c->config.alpha == 7 && c->loras[0].scale == 1);
        adapter_release(c);
    }
    /* At the ends only one parent is left, and its rank suffices. */
    struct adapter *at0 = blend_ok(a, b, 0, 4, BLEND_DELTA),
                   *at1 = blend_ok(a, b, 1, 3, BLEND_DELTA);
    assert_true(blend_error(at0, a, 1, b, 0) < 1e-6);
    assert_true(blend_error(at1, a, 0, b, 1) < 1e-6);
    struct adapter *more = blend_ok(a, b, 0.5f, 12, BLEND_DELTA);
    assert_true(blend_error(more, a, 0.5, b, 0.5) < 1e-6);
    adapter_release(more);
    adapter_release(at0);
    adapter_release(at1);
    adapter_release(a);
    adapter_release(b);
}

/* √Σ of the squares of the singular values after the r-th of x·a + y·b in module i, from an SVD of
 * a dense square matrix. */
static double discarded_singular_values(const struct adapter *a, double x, const struct adapter *b,
                                        double y, int i, int r) {
    int in = proj_in(&a->shape, i % N_PROJ), out = proj_out(&a->shape, i % N_PROJ),
        n = MAX(in, out);
    size_t nn = (size_t)n * n;
    double *wa = dense_delta(a, i), *wb = dense_delta(b, i), *sq = xcalloc(nn, sizeof *sq), sum = 0;
    double *u = xcalloc(nn, sizeof *u), *v = xcalloc(nn, sizeof *v),
           *sv = xcalloc((size_t)n, sizeof *sv);
    for (int o = 0; o < out; o++)
        for (int j = 0; j < in; j++) sq[o * n + j] = x * wa[o * in + j] + y * wb[o * in + j];
    linalg_svd(sq, n, u, sv, v);
    for (int k = n - 1; k >= r; k--) sum += sv[k] * sv[k];
    free(wa);
    free(wb);
    free(sq);
    free(u);
    free(v);
    free(sv);
    return sqrt(sum);
}

static void test_blend_best(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 6, "all-linear", 3),
                   *b = random_adapter_of_rank(&s, 6, "all-linear", 4);
    struct adapter *c = blend_ok(a, b, 0.4f, 0, BLEND_DELTA);
    double t = 0.4f;
    assert_int_equal(c->config.r, 6);
    for (int i = 0; i < s.n_layers * N_PROJ; i++) {
        size_t n = module_size(&s, i);
        double *g = dense_delta(c, i), *wa = dense_delta(a, i), *wb = dense_delta(b, i);
        for (size_t k = 0; k < n; k++) g[k] -= (1 - t) * wa[k] + t * wb[k];
        double best = discarded_singular_values(a, 1 - t, b, t, i, 6);
        assert_true(best > 1 && fabs(norm(g, n) - best) < 1e-5 * best);
        free(g);
        free(wa);
        free(wb);
    }
    adapter_release(a);
    adapter_release(b);
    adapter_release(c);
}

/* Ranks above the matrix size: in and out are smaller than r_a + r_b, and k_proj has a single row.
 */
static void test_blend_tiny(void **state) {
    (void)state;
    struct model_config s = fixture_shape(2, 3, 2, 1, 1, 5);
    struct adapter *a = random_adapter_of_rank(&s, 4, "all-linear", 1),
                   *b = random_adapter_of_rank(&s, 2, "all-linear", 2);
    struct adapter *c = blend_ok(a, b, 0.3f, 0, BLEND_DELTA),
                   *d = blend_ok(a, b, 0.3f, 1, BLEND_DELTA);
    assert_true(blend_error(c, a, 1.0 - 0.3f, b, 0.3f) < 1e-6);
    assert_int_equal(d->loras[0].r, 1);
    adapter_release(a);
    adapter_release(b);
    adapter_release(c);
    adapter_release(d);
}

static void test_blend_targets(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 4, "q_proj,k_proj", 1),
                   *b = random_adapter_of_rank(&s, 6, "k_proj,up_proj", 2);
    struct adapter *c = blend_ok(a, b, 0.5f, 0, BLEND_DELTA),
                   *full = blend_ok(a, b, 0.5f, 10, BLEND_DELTA);
    for (int p = 0; p < N_PROJ; p++) {
        bool in = p == PROJ_Q || p == PROJ_K || p == PROJ_UP;
        assert_int_equal(c->config.target[p], in);
        assert_int_equal(c->loras[p].r, in ? 6 : 0);
    }
    assert_null(c->config.modules);
    assert_true(blend_error(full, a, 0.5, b, 0.5) < 1e-6);
    /* A new adapter is zero: blending with it scales the other exactly. */
    struct adapter_config fresh = config_make(4, 8, "q_proj,k_proj");
    struct adapter *zero = adapter_new(&s, &fresh, 1),
                   *half = blend_ok(a, zero, 0.5f, 0, BLEND_DELTA);
    struct adapter *none = blend_ok(zero, zero, 0.5f, 0, BLEND_DELTA);
    assert_true(blend_error(half, a, 0.5, zero, 0.5) < 1e-6);
    assert_true(adapter_dot(none, none) == 0);
    struct adapter *all[] = {a, b, c, full, zero, half, none};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) adapter_release(all[i]);
}

static void test_blend_seed(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 4, "q_proj,v_proj", 1),
                   *b = random_adapter_of_rank(&s, 4, "q_proj,v_proj", 2);
    struct adapter *c = blend_ok(a, b, 0.3f, 0, BLEND_LEGACY);
    float t = 0.3f;
    assert_int_equal(c->n_data, a->n_data);
    for (size_t i = 0; i < a->n_data; i++)
        assert_true(c->data[i] == (1 - t) * a->data[i] + t * b->data[i]);
    assert_true(c->config.alpha == a->config.alpha);
    struct adapter *first = blend_ok(a, b, 0, 4, BLEND_LEGACY),
                   *second = blend_ok(a, b, 1, 0, BLEND_LEGACY);
    assert_string_equal(first->hash, a->hash);
    assert_string_equal(second->hash, b->hash);
    /* Only modules that both have. */
    struct adapter *wide = random_adapter_of_rank(&s, 4, "v_proj,o_proj", 3),
                   *d = blend_ok(a, wide, 0.5f, 0, BLEND_LEGACY);
    assert_true(d->config.target[PROJ_V] && !d->config.target[PROJ_Q] && !d->config.target[PROJ_O]);
    assert_true(d->loras[PROJ_V].a[0] ==
                0.5f * a->loras[PROJ_V].a[0] + 0.5f * wide->loras[PROJ_V].a[0]);
    struct adapter *all[] = {a, b, c, first, second, wide, d};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) adapter_release(all[i]);
}

static void test_blend_refused(void **state) {
    (void)state;
    struct model_config s = small_shape(), t = s;
    t.n_layers = 2;
    struct error err;
    struct adapter *a = random_adapter_of_rank(&s, 4, "q_proj", 1),
                   *b = random_adapter_of_rank(&t, 4, "q_proj", 2);
    struct adapter *c = random_adapter_of_rank(&s, 3, "q_proj", 1),
                   *d = random_adapter_of_rank(&s, 4, "v_proj", 1);
    assert_null(adapter_blend(a, b, 0.5f, 0, BLEND_DELTA, &err));
    assert_non_null(strstr(err.text, "different shapes"));
    assert_null(adapter_blend(a, c, 0.5f, 0, BLEND_LEGACY, &err));
    assert_non_null(strstr(err.text, "ranks differ (4 and 3 in 'q_proj')"));
    assert_null(adapter_blend(a, d, 0.5f, 0, BLEND_LEGACY, &err));
    assert_non_null(strstr(err.text, "no projection in common"));
    assert_null(adapter_blend(a, a, 0.5f, 2, BLEND_LEGACY, &err));
    assert_int_equal(err.code, ERR_USAGE);
    assert_null(adapter_blend(a, c, NAN, 0, BLEND_DELTA, &err));
    assert_null(adapter_blend(a, c, 0.5f, -1, BLEND_DELTA, &err));
    assert_null(adapter_blend(a, c, 0.5f, ADAPTER_RANK_MAX + 1, BLEND_DELTA, &err));
    struct adapter *e = adapter_scale(a, 1e38f);
    assert_null(adapter_blend(e, a, -1e38f, 0, BLEND_LEGACY, &err));
    assert_int_equal(err.code, ERR_NUMERIC);
    adapter_release(e);
    struct adapter *all[] = {a, b, c, d};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) adapter_release(all[i]);
}

static void test_blend_repeats(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 8, "all-linear", 1),
                   *b = random_adapter_of_rank(&s, 8, "all-linear", 2);
    struct adapter *x = blend_ok(a, b, 0.37f, 0, BLEND_DELTA),
                   *y = blend_ok(a, b, 0.37f, 0, BLEND_DELTA);
    assert_string_equal(x->hash, y->hash);
    char *parents = xasprintf("%s %s", a->hash, b->hash);
    assert_string_equal(json_string_value(json_object_get(x->lineage, "parents")), parents);
    assert_string_equal(json_string_value(json_object_get(x->lineage, "operator")), "blend-delta");
    assert_string_equal(json_string_value(json_object_get(x->lineage, "t")), "0.37");
    free(parents);
    adapter_release(a);
    adapter_release(b);
    adapter_release(x);
    adapter_release(y);
}

static double dense_dot(const struct adapter *a, const struct adapter *b) {
    double sum = 0;
    for (int i = 0; i < a->shape.n_layers * N_PROJ; i++) {
        double *x = dense_delta(a, i), *y = dense_delta(b, i);
        for (size_t k = 0; k < module_size(&a->shape, i); k++) sum += x[k] * y[k];
        free(x);
        free(y);
    }
    return sum;
}

static void test_measures(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 4, "q_proj,k_proj,down_proj", 1),
                   *b = random_adapter_of_rank(&s, 7, "all-linear", 2);
    struct adapter *mix = blend_ok(a, b, 0.3f, 11, BLEND_DELTA);
    double aa = dense_dot(a, a), bb = dense_dot(mix, mix), ab = dense_dot(a, mix);
    assert_true(fabs(adapter_dot(a, mix) - ab) < 1e-12 * sqrt(aa * bb));
    assert_true(fabs(adapter_dot(a, a) - aa) < 1e-12 * aa);
    assert_true(fabs(adapter_cosine(a, mix) - ab / sqrt(aa * bb)) < 1e-12);
    double distance = sqrt(aa + bb - 2 * ab) / ((sqrt(aa) + sqrt(bb)) / 2);
    assert_true(fabs(adapter_distance(a, mix) - distance) < 1e-12);
    assert_true(adapter_distance(a, a) == 0 && fabs(adapter_cosine(a, a) - 1) < 1e-15);
    struct adapter *none = adapter_scale(a, 0), *minus = adapter_scale(a, -1);
    assert_true(adapter_cosine(a, none) == 0 && adapter_distance(none, none) == 0);
    assert_true(fabs(adapter_distance(a, none) - 2) < 1e-12 &&
                fabs(adapter_distance(a, minus) - 2) < 1e-12);
    assert_true(fabs(adapter_cosine(a, minus) + 1) < 1e-15);
    struct adapter *all[] = {a, b, mix, none, minus};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) adapter_release(all[i]);
}

static void test_scale(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 4, "all-linear", 1);
    struct adapter *one = adapter_scale(a, 1), *some = adapter_scale(a, -0.3f),
                   *none = adapter_scale(a, 0);
    assert_string_equal(one->hash, a->hash);
    assert_true(blend_error(some, a, -0.3f, a, 0) < 1e-6);
    assert_true(adapter_dot(none, none) == 0);
    assert_true(none->config.alpha == a->config.alpha);
    assert_memory_equal(none->loras[0].a, a->loras[0].a, 4 * 24 * sizeof(float));
    struct adapter *all[] = {a, one, some, none};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) adapter_release(all[i]);
}

/* Standard deviation of the difference b - a of one tensor: 0 if nothing changed. */
static double difference_std(const float *a, const float *b, size_t n, double *mean) {
    double sum = 0, square = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)b[i] - a[i];
        sum += d;
        square += d * d;
    }
    *mean = sum / (double)n;
    return sqrt(square / (double)n);
}

/* The number of tensors that differ; *std_sum receives the sum of the standard deviations of the
 * noise, whose mean must be near 0. */
static int changed_tensors(const struct adapter *a, const struct adapter *b, double *std_sum) {
    int changed = 0;
    for (int i = 0; i < a->shape.n_layers * N_PROJ * 2; i++) {
        const struct lora *x = &a->loras[i / 2], *y = &b->loras[i / 2];
        int p = i / 2 % N_PROJ;
        size_t n = (size_t)x->r * (size_t)(i % 2 ? proj_out(&a->shape, p) : proj_in(&a->shape, p));
        double mean, std = difference_std(i % 2 ? x->b : x->a, i % 2 ? y->b : y->a, n, &mean);
        changed += std > 0;
        *std_sum += std;
        if (std > 0) assert_true(fabs(mean) < 6 * std / sqrt((double)n));
    }
    return changed;
}

static void test_mutate_statistics(void **state) {
    (void)state;
    struct model_config s = fixture_shape(20, 24, 3, 1, 8, 40);
    struct adapter *a = random_adapter_of_rank(&s, 4, "all-linear", 1),
                   *twice = adapter_scale(a, 3);
    static const float ps[] = {0, 0.25f, 1};
    for (size_t i = 0; i < ARRAY_LEN(ps); i++) {
        struct adapter *b = adapter_mutate(a, ps[i], 0.02f, true, 9);
        double sum = 0;
        int changed = changed_tensors(a, b, &sum);
        double expect = 280 * ps[i], sigma = sqrt(280 * ps[i] * (1 - ps[i]));
        assert_true(fabs(changed - expect) <= 4 * sigma);
        if (changed) assert_true(fabs(sum / changed - 0.02) < 0.0005);
        if (ps[i] == 0) assert_string_equal(a->hash, b->hash);
        adapter_release(b);
    }
    /* Relative: tensors of deviation 1 (A) and 3 (B) get noise of a hundredth of each. */
    struct adapter *b = adapter_mutate(twice, 1, 0.01f, false, 9);
    double sum = 0;
    assert_int_equal(changed_tensors(twice, b, &sum), 280);
    assert_true(fabs(sum / 280 - 0.02) < 0.0005);
    adapter_release(a);
    adapter_release(b);
    adapter_release(twice);
}

static void test_mutate_streams(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter_config wide = config_make(4, 8, "all-linear"),
                          narrow = config_make(4, 8, "v_proj");
    struct adapter *a = adapter_new(&s, &wide, 1), *b = adapter_new(&s, &narrow, 1);
    struct adapter *x = adapter_mutate(a, 1, 0.1f, false, 3),
                   *y = adapter_mutate(a, 1, 0.1f, false, 3);
    struct adapter *z = adapter_mutate(a, 1, 0.1f, false, 4),
                   *w = adapter_mutate(b, 1, 0.1f, false, 3);
    assert_string_equal(x->hash, y->hash);
    assert_string_not_equal(x->hash, z->hash);
    /* The zero B of a new adapter has deviation 0; absolute noise changes it. */
    assert_true(x->loras[0].b[0] == 0 && x->loras[0].a[0] != a->loras[0].a[0]);
    struct adapter *v = adapter_mutate(a, 1, 0.1f, true, 3);
    assert_true(v->loras[0].b[0] != 0);
    /* A tensor's noise does not depend on the other modules. */
    assert_memory_equal(w->loras[PROJ_V].a, x->loras[PROJ_V].a, 4 * 24 * sizeof(float));
    assert_string_equal(json_string_value(json_object_get(x->lineage, "parents")), a->hash);
    struct adapter *all[] = {a, b, x, y, z, w, v};
    for (size_t i = 0; i < ARRAY_LEN(all); i++) adapter_release(all[i]);
}

static const char golden_config[] = "{\n"
                                    "  \"alpha_pattern\": {},\n"
                                    "  \"auto_mapping\": null,\n"
                                    "  \"base_model_name_or_path\": \"fry\",\n"
                                    "  \"bias\": \"none\",\n"
                                    "  \"exclude_modules\": null,\n"
                                    "  \"fan_in_fan_out\": false,\n"
                                    "  \"inference_mode\": true,\n"
                                    "  \"init_lora_weights\": true,\n"
                                    "  \"layers_pattern\": null,\n"
                                    "  \"layers_to_transform\": null,\n"
                                    "  \"lora_alpha\": 8,\n"
                                    "  \"lora_dropout\": 0.05,\n"
                                    "  \"modules_to_save\": null,\n"
                                    "  \"peft_type\": \"LORA\",\n"
                                    "  \"r\": 4,\n"
                                    "  \"rank_pattern\": {},\n"
                                    "  \"revision\": null,\n"
                                    "  \"target_modules\": [\n"
                                    "    \"q_proj\",\n"
                                    "    \"v_proj\"\n"
                                    "  ],\n"
                                    "  \"task_type\": \"CAUSAL_LM\",\n"
                                    "  \"use_dora\": false,\n"
                                    "  \"use_rslora\": false\n"
                                    "}";

/* Saves, loads, compares, and saves in another directory: the adapters and the files must be equal.
 */
static void round_trip(const struct adapter *a) {
    char *dir = temp_dir(), *one = path_join(dir, "one"), *two = path_join(dir, "two");
    save_ok(a, one);
    struct adapter *b = load_ok(one, &a->shape);
    assert_string_equal(a->hash, b->hash);
    assert_int_equal(a->n_data, b->n_data);
    assert_memory_equal(a->data, b->data, a->n_data * sizeof(float));
    for (int i = 0; i < a->shape.n_layers * N_PROJ; i++) {
        assert_int_equal(a->loras[i].r, b->loras[i].r);
        assert_true(a->loras[i].scale == b->loras[i].scale);
    }
    assert_int_equal(json_object_size(a->lineage), json_object_size(b->lineage));
    if (a->lineage) assert_true(json_equal(a->lineage, b->lineage));
    save_ok(b, two);
    assert_same_file(one, two, "adapter_config.json");
    assert_same_file(one, two, "adapter_model.safetensors");
    assert_int_equal(files_count(one), 2);
    adapter_release(b);
    free(one);
    free(two);
    temp_remove(dir);
}

static void test_round_trip(void **state) {
    (void)state;
    struct model_config s = fixture_shape(12, 8, 2, 1, 4, 16); /* layer 10 sorts before layer 2 */
    struct adapter_config plain = config_make(4, 8, "q_proj,v_proj"),
                          rs = config_make(3, 22.627417f, "all-linear"), activated = plain;
    activated.invocation = (const int32_t[]){5, 0, 5};
    activated.n_invocation = 3;
    rs.rslora = true;
    rs.dropout = 0;
    struct adapter *a = random_adapter(&s, &plain, 1), *b = random_adapter(&s, &rs, 2);
    struct adapter *child = blend_ok(a, b, 0.1f, 5, BLEND_DELTA),
                   *fresh = adapter_new(&s, &plain, 3), *alora = random_adapter(&s, &activated, 1);
    assert_true(fabs(b->loras[0].scale - 22.627417 / sqrt(3)) < 1e-5);
    struct adapter *all[] = {a, b, child, fresh, alora};
    assert_string_not_equal(alora->hash, a->hash);
    for (size_t i = 0; i < ARRAY_LEN(all); i++) round_trip(all[i]);
    for (size_t i = 0; i < ARRAY_LEN(all); i++) adapter_release(all[i]);
}

/* Mixed ranks and alphas, a subset of layers, and targets that differ between layers each have one
 * canonical form. */
static void test_round_trip_mixed(void **state) {
    (void)state;
    struct model_config s = fixture_shape(12, 8, 2, 1, 4, 16);
    struct adapter_module m[12 * N_PROJ];
    struct adapter_config c = {.r = 2, .alpha = 4, .dropout = 0.1f, .modules = m};
    for (int kind = 0; kind < 4; kind++) {
        memset(m, 0, sizeof m);
        for (int i = 0; i < 12 * N_PROJ; i++) {
            int l = i / N_PROJ, p = i % N_PROJ;
            if (kind == 0) m[i] = (struct adapter_module){p == PROJ_O ? 4 : 2, l == 7 ? 3.5f : 4};
            if (kind == 1 && (l == 2 || l == 11) && p < PROJ_O)
                m[i] = (struct adapter_module){3, 6};
            if (kind == 2 && l % 3 == p % 3) m[i] = (struct adapter_module){2, 4};
            if (kind == 3) m[i] = (struct adapter_module){1 + (l + p) % 4, (float)p};
        }
        struct adapter *a = random_adapter(&s, &c, 10 + (uint64_t)kind);
        round_trip(a);
        adapter_release(a);
    }
}

static void test_saved_config_text(void **state) {
    (void)state;
    struct model_config s = fixture_shape(11, 8, 2, 1, 4, 16);
    struct adapter *a = random_adapter_of_rank(&s, 4, "v_proj,q_proj", 1);
    char *dir = temp_dir(), *inside = path_join(dir, "a"), *path;
    struct safetensors st;
    struct error err;
    save_ok(a, inside);
    struct buf text = read_file(inside, "adapter_config.json");
    assert_string_equal(text.data, golden_config);
    path = path_join(inside, "adapter_model.safetensors");
    assert_int_equal(safetensors_open(&st, path, &err), OK);
    assert_int_equal(st.n_tensors, 11 * 2 * 2);
    const struct tensor_info *t =
        safetensors_find(&st, "base_model.model.model.layers.10.self_attn.v_proj.lora_B.weight");
    assert_non_null(t);
    assert_true(t->type == TENSOR_F32 && t->n_dims == 2 && t->dims[0] == 4 && t->dims[1] == 4);
    assert_string_equal(json_string_value(json_object_get(st.metadata, "format")), "pt");
    assert_int_equal(json_object_size(st.metadata), 1);
    /* The tensors in the file are in the order of their names. */
    struct buf raw = read_file(inside, "adapter_model.safetensors");
    const char *ten = memmem(raw.data, raw.len, "layers.10.", 10),
               *two = memmem(raw.data, raw.len, "layers.2.", 9);
    assert_true(ten && two && ten < two);
    assert_int_equal(adapter_save(a, inside, "\xff", &err), ERR_USAGE);
    safetensors_close(&st);
    buf_release(&text);
    buf_release(&raw);
    free(path);
    free(inside);
    temp_remove(dir);
    adapter_release(a);
}

/* The tensors of a PEFT directory that a test writes without adapter_save; they have short names
 * and random values. */
struct peft_files {
    struct tensor_info t[64];
    int n;
};

static void peft_files_add(struct peft_files *h, const char *name, enum tensor_type type,
                           int64_t rows, int64_t cols) {
    size_t count = (size_t)(rows * cols);
    float *x = xmalloc((count + 1) * sizeof *x);
    void *data = xmalloc((count + 1) * sizeof *x);
    struct rng rng = rng_make(1, RNG_TEST, (uint32_t)h->n, 0);
    for (size_t i = 0; i < count; i++) x[i] = rng_normal(&rng);
    tensor_from_f32(type, x, data, (int64_t)count);
    h->t[h->n++] = (struct tensor_info){.name = xasprintf("base_model.model.model.%s.weight", name),
                                        .type = type,
                                        .n_dims = 2,
                                        .dims = {rows, cols},
                                        .data = data,
                                        .size = count * (type == TENSOR_F32 ? 4 : 2)};
    free(x);
}

/* Adds A and B of a module such as "layers.0.self_attn.q_proj". */
static void peft_files_add_module(struct peft_files *h, const char *module, int r, int in,
                                  int out) {
    char *a = xasprintf("%s.lora_A", module), *b = xasprintf("%s.lora_B", module);
    peft_files_add(h, a, TENSOR_F32, r, in);
    peft_files_add(h, b, TENSOR_F32, out, r);
    free(a);
    free(b);
}

/* Writes the directory and frees the tensors. */
static void peft_files_write(struct peft_files *h, const char *dir, const char *config) {
    char *path = path_join(dir, "adapter_model.safetensors");
    struct error err = {0};
    int rc = safetensors_write(path, h->t, h->n, NULL, &err);
    if (rc) fprintf(stderr, "%s\n", err.text);
    assert_int_equal(rc, OK);
    write_file(dir, "adapter_config.json", config, strlen(config));
    for (int i = 0; i < h->n; i++) {
        free(h->t[i].name);
        free((void *)h->t[i].data);
    }
    h->n = 0;
    free(path);
}

static struct model_config tiny_shape(void) {
    return fixture_shape(2, 8, 2, 1, 4, 16);
}

/* The shortest valid config, other element types, and the adapter's name "default" in tensor names.
 */
static void test_load_lenient(void **state) {
    (void)state;
    struct model_config s = tiny_shape();
    struct peft_files h = {0};
    char *dir = temp_dir();
    peft_files_add(&h, "layers.0.self_attn.q_proj.lora_A.default", TENSOR_F16, 8, 8);
    peft_files_add(&h, "layers.0.self_attn.q_proj.lora_B.default", TENSOR_BF16, 8, 8);
    peft_files_add(&h, "layers.1.self_attn.q_proj.lora_A", TENSOR_BF16, 8, 8);
    peft_files_add(&h, "layers.1.self_attn.q_proj.lora_B", TENSOR_F32, 8, 8);
    float first;
    tensor_to_f32(TENSOR_F16, h.t[0].data, &first, 1);
    peft_files_write(
        &h, dir,
        "{\"peft_type\":\"LORA\",\"target_modules\":[\"q_proj\"],\"a_new_key\":{\"x\":[1]}}");
    struct adapter *a = load_ok(dir, &s);
    assert_true(a->loras[0].scale == 1 && a->loras[0].r == 8 && a->config.dropout == 0);
    assert_true(a->loras[0].a[0] == first);
    assert_null(a->lineage);
    round_trip(a);
    adapter_release(a);
    temp_remove(dir);
}

/* Expected ranks of layer 0's and layer 1's q, k, v, o for each way to select modules. */
static const struct target_selection {
    const char *config;
    int r[2][4];
} target_selections[] = {
    {"\"r\":2,\"target_modules\":[\"q_proj\",\"self_attn.v_proj\"]", {{2, 0, 2, 0}, {2, 0, 2, 0}}},
    {"\"r\":2,\"target_modules\":[\"model.layers.1.self_attn.k_proj\"]",
     {{0, 0, 0, 0}, {0, 2, 0, 0}}},
    {"\"r\":2,\"target_modules\":[\"q_proj\"],\"layers_to_transform\":[1]",
     {{0, 0, 0, 0}, {2, 0, 0, 0}}},
    {"\"r\":2,\"target_modules\":[\"q_proj\"],\"layers_to_transform\":0,\"layers_pattern\":"
     "\"layers\"",
     {{2, 0, 0, 0}, {0, 0, 0, 0}}},
    {"\"r\":2,\"target_modules\":[\"q_proj\",\"k_proj\"],\"layers_to_transform\":[],\"exclude_"
     "modules\":[\"k_proj\"]",
     {{2, 0, 0, 0}, {2, 0, 0, 0}}},
    {"\"r\":2,\"target_modules\":\".*\\\\.[qk]_proj\"", {{2, 2, 0, 0}, {2, 2, 0, 0}}},
    {"\"r\":2,\"target_modules\":\".*\\\\.self_attn\\\\..*\",\"exclude_modules\":\".*\\\\.1\\\\..*"
     "\"",
     {{2, 2, 2, 2}, {0, 0, 0, 0}}},
    {"\"r\":2,\"target_modules\":[\"q_proj\",\"v_proj\"],\"rank_pattern\":{\"layers.1.self_attn.v_"
     "proj\":3}",
     {{2, 0, 2, 0}, {2, 0, 3, 0}}},
    {"\"r\":2,\"target_modules\":[\"q_proj\",\"v_proj\"],\"rank_pattern\":{\"1.*v_proj\":3,\"v_"
     "proj\":1,\"x\":9}",
     {{2, 0, 1, 0}, {2, 0, 3, 0}}},
    {"\"r\":2,\"target_modules\":[\"o_proj\"],\"rank_pattern\":{\"proj\":3}",
     {{0, 0, 0, 2}, {0, 0, 0, 2}}},
};

static void test_load_target_selections(void **state) {
    (void)state;
    static const char *const names[] = {"q_proj", "k_proj", "v_proj", "o_proj"};
    struct model_config s = tiny_shape();
    char *dir = temp_dir();
    for (size_t i = 0; i < ARRAY_LEN(target_selections); i++) {
        struct peft_files h = {0};
        for (int m = 0; m < 8; m++) {
            char *name = xasprintf("layers.%d.self_attn.%s", m / 4, names[m % 4]);
            int r = target_selections[i].r[m / 4][m % 4];
            if (r) peft_files_add_module(&h, name, r, 8, proj_out(&s, m % 4));
            free(name);
        }
        char *config = xasprintf("{\"peft_type\":\"LORA\",%s}", target_selections[i].config);
        peft_files_write(&h, dir, config);
        free(config);
        struct adapter *a = load_ok(dir, &s);
        for (int m = 0; m < 8; m++)
            assert_int_equal(a->loras[m / 4 * N_PROJ + m % 4].r,
                             target_selections[i].r[m / 4][m % 4]);
        round_trip(a);
        adapter_release(a);
    }
    temp_remove(dir);
}

static void test_load_alphas(void **state) {
    (void)state;
    struct model_config s = tiny_shape();
    struct peft_files h = {0};
    char *dir = temp_dir();
    for (int l = 0; l < 2; l++) {
        peft_files_add_module(&h, l ? "layers.1.self_attn.q_proj" : "layers.0.self_attn.q_proj", 4,
                              8, 8);
        peft_files_add_module(&h, l ? "layers.1.mlp.up_proj" : "layers.0.mlp.up_proj", 4, 8, 16);
    }
    peft_files_write(
        &h, dir,
        "{\"peft_type\":\"LORA\",\"r\":4,\"lora_alpha\":6,\"use_rslora\":true,"
        "\"target_modules\":[\"q_proj\",\"up_proj\"],\"alpha_pattern\":{\"up_proj\":1.5}}");
    struct adapter *a = load_ok(dir, &s);
    assert_true(a->loras[PROJ_Q].scale == 3 && a->loras[PROJ_UP].scale == 0.75f);
    assert_true(a->loras[N_PROJ + PROJ_UP].scale == 0.75f);
    round_trip(a);
    adapter_release(a);
    temp_remove(dir);
}

/* Invalid configs for a file that has q_proj with rank 2 in both layers, and parts of the expected
 * errors. */
static const struct refused_config {
    const char *config, *words;
} refused_configs[] = {
    {"{\"peft_type\":\"LORA\",\"target_modules\":[\"q_proj\"]", "adapter_config.json"},
    {"[1]", "not a JSON object"},
    {"{\"target_modules\":[\"q_proj\"]}", "'peft_type' is missing"},
    {"{\"peft_type\":\"IA3\",\"target_modules\":[\"q_proj\"]}", "'peft_type' is 'IA3'"},
    {"{\"peft_type\":\"LORA\"}", "'target_modules' is missing"},
    {"{\"peft_type\":\"LORA\",\"target_modules\":[]}", "'target_modules' is missing or empty"},
    {"{\"peft_type\":\"LORA\",\"target_modules\":7}", "'target_modules' is neither"},
    {"{\"peft_type\":\"LORA\",\"target_modules\":[7]}", "not a string"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"target_modules\":\"(q_proj\"}",
     "'target_modules' is not a valid pattern"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"target_modules\":\".*nothing\"}", "selects no projection"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"target_modules\":\"(.*.*.*.*.*.*)[0-9]\"}",
     "too many steps"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"target_modules\":[\"q_proj\",\"c_attn\"]}",
     "target module 'c_attn'"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"use_dora\":true,\"target_modules\":[\"q_proj\"]}",
     "q_proj.lora_magnitude_vector' is missing"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"bias\":\"all\",\"target_modules\":[\"q_proj\"]}",
     "'bias' is set"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"lora_bias\":true,\"target_modules\":[\"q_proj\"]}",
     "'lora_bias' is set"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"fan_in_fan_out\":true,\"target_modules\":[\"q_proj\"]}",
     "'fan_in_fan_out'"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"modules_to_save\":[\"lm_head\"],\"target_modules\":[\"q_"
     "proj\"]}",
     "'base_model.model.lm_head.weight' is missing"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"init_lora_weights\":\"pissa_niter_4\",\"target_modules\":["
     "\"q_proj\"]}",
     "'init_lora_weights' is 'pissa_niter_4'"},
    {"{\"peft_type\":\"LORA\",\"r\":0,\"target_modules\":[\"q_proj\"]}", "'r' holds the rank 0"},
    {"{\"peft_type\":\"LORA\",\"r\":2.5,\"target_modules\":[\"q_proj\"]}",
     "'r' holds the rank 2.5"},
    {"{\"peft_type\":\"LORA\",\"r\":1e300,\"target_modules\":[\"q_proj\"]}", "'r' holds the rank"},
    {"{\"peft_type\":\"LORA\",\"r\":\"2\",\"target_modules\":[\"q_proj\"]}", "'r' is not a number"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":1e60,\"target_modules\":[\"q_proj\"]}",
     "'lora_alpha' holds"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"lora_dropout\":-1,\"target_modules\":[\"q_proj\"]}",
     "'lora_dropout' is -1"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"use_rslora\":1,\"target_modules\":[\"q_proj\"]}",
     "'use_rslora' is neither"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"rank_pattern\":[],\"target_modules\":[\"q_proj\"]}",
     "'rank_pattern' is not an object"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"rank_pattern\":{\"q_proj\":\"8\"},\"target_modules\":[\"q_"
     "proj\"]}",
     "'q_proj' in 'rank_pattern' is not a number"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"rank_pattern\":{\"q_proj\":0},\"target_modules\":[\"q_"
     "proj\"]}",
     "'rank_pattern' holds the rank 0"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"alpha_pattern\":{\"[\":1},\"target_modules\":[\"q_proj\"]}",
     "'alpha_pattern' is not a valid pattern"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"layers_to_transform\":[2],\"target_modules\":[\"q_proj\"]}",
     "layer 2 of a model with 2 layers"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"layers_to_transform\":[\"0\"],\"target_modules\":[\"q_"
     "proj\"]}",
     "something but integers"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"layers_to_transform\":[0],\"target_modules\":\".*q_proj\"}",
     "to be a list"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"layers_to_transform\":[0],\"layers_pattern\":\"h\","
     "\"target_modules\":[\"q_proj\"]}",
     "'layers_pattern' is set"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"alora_invocation_tokens\":[],\"target_modules\":[\"q_"
     "proj\"]}",
     "'alora_invocation_tokens' is not a list of 1 to 256 token ids"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"alora_invocation_tokens\":7,\"target_modules\":[\"q_"
     "proj\"]}",
     "'alora_invocation_tokens' is not a list"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"alora_invocation_tokens\":[1,64],\"target_modules\":[\"q_"
     "proj\"]}",
     "holds something but ids from 0 to 63"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"alora_invocation_tokens\":[1.0],\"target_modules\":[\"q_"
     "proj\"]}",
     "holds something but ids"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"invocation_string\":\"<check>\",\"target_modules\":[\"q_"
     "proj\"]}",
     "'invocation_string' is set, but not 'alora_invocation_tokens'"},
    {"{\"peft_type\":\"LORA\",\"r\":3,\"target_modules\":[\"q_proj\"]}",
     "'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' is [2, 8], expected [3, 8]"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"target_modules\":[\"q_proj\",\"v_proj\"]}",
     "'base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight' is missing"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"target_modules\":[\"v_proj\"]}", "(8 problems)"},
    {"{\"peft_type\":\"LORA\",\"r\":2,\"layers_to_transform\":[1],\"target_modules\":[\"q_proj\"]}",
     "layers.0.self_attn.q_proj.lora_B.weight' is not among the targets"},
};

static void assert_refused(const char *dir, const struct model_config *s, int code,
                           const char *words) {
    struct error err = {0};
    struct adapter *a = adapter_load(dir, s, &err);
    if (a || !strstr(err.text, words))
        fprintf(stderr, "wanted \"%s\", got \"%s\"\n", words, err.text);
    assert_null(a);
    assert_non_null(strstr(err.text, words));
    assert_true(err.code < 0 && (code == 0 || err.code == code));
}

static void test_load_refused_configs(void **state) {
    (void)state;
    struct model_config s = tiny_shape();
    char *dir = temp_dir();
    for (size_t i = 0; i < ARRAY_LEN(refused_configs); i++) {
        struct peft_files h = {0};
        peft_files_add_module(&h, "layers.0.self_attn.q_proj", 2, 8, 8);
        peft_files_add_module(&h, "layers.1.self_attn.q_proj", 2, 8, 8);
        peft_files_write(&h, dir, refused_configs[i].config);
        assert_refused(dir, &s, 0, refused_configs[i].words);
    }
    temp_remove(dir);
}

static void test_load_refused_tensors(void **state) {
    (void)state;
    static const char good[] = "{\"peft_type\":\"LORA\",\"r\":2,\"target_modules\":[\"q_proj\"],"
                               "\"layers_to_transform\":[0]}";
    struct model_config s = tiny_shape();
    struct peft_files h = {0};
    char *dir = temp_dir();
    peft_files_add_module(&h, "layers.0.self_attn.q_proj", 2, 8, 8);
    peft_files_add(&h, "layers.0.self_attn.q_proj.lora_magnitude_vector", TENSOR_F32, 8, 1);
    peft_files_add(&h, "layers.7.self_attn.q_proj.lora_A", TENSOR_F32, 2, 8);
    peft_files_write(&h, dir, good);
    assert_refused(dir, &s, ERR_MISMATCH,
                   "layers.7.self_attn.q_proj.lora_A.weight' belongs to no projection");
    assert_refused(dir, &s, ERR_MISMATCH, "(2 problems)");
    peft_files_add_module(&h, "layers.0.self_attn.q_proj", 2, 8, 8);
    peft_files_add(&h, "layers.0.self_attn.q_proj.lora_A.default", TENSOR_F32, 2, 8);
    peft_files_write(&h, dir, good);
    assert_refused(dir, &s, ERR_MISMATCH, "is there twice");
    peft_files_add_module(&h, "layers.0.self_attn.q_proj", 2, 8, 8);
    h.t[1].n_dims = 1;
    h.t[1].dims[0] = 16;
    peft_files_write(&h, dir, good);
    assert_refused(dir, &s, ERR_MISMATCH, "has 1 dimensions, not 2");
    peft_files_add_module(&h, "layers.0.self_attn.q_proj", 2, 8, 8);
    ((float *)h.t[1].data)[5] = NAN;
    peft_files_write(&h, dir, good);
    assert_refused(dir, &s, ERR_NUMERIC, "q_proj.lora_B.weight' of adapter");
    temp_remove(dir);
}

static void test_load_refused_dirs(void **state) {
    (void)state;
    struct model_config s = tiny_shape();
    char *dir = temp_dir(), *gone = path_join(dir, "gone"), *file = path_join(dir, "file");
    write_file(dir, "file", "x", 1);
    assert_refused(gone, &s, ERR_MISSING, "does not exist");
    assert_refused(file, &s, ERR_FORMAT, "is not a directory");
    assert_refused(dir, &s, ERR_MISSING, "has no adapter_config.json");
    write_file(dir, "adapter_config.json", golden_config, strlen(golden_config));
    assert_refused(dir, &s, ERR_MISSING, "has no adapter_model.safetensors");
    write_file(dir, "adapter_model.bin", "PK", 2);
    assert_refused(dir, &s, ERR_FORMAT, "convert it where you trust it: python -c");
    free(gone);
    free(file);
    temp_remove(dir);
}

/* A file that is truncated at any length, or has any byte of its header changed, is refused or is
 * still a complete adapter. */
static void test_load_damaged(void **state) {
    (void)state;
    struct model_config s = tiny_shape();
    struct adapter *a = random_adapter_of_rank(&s, 2, "q_proj,v_proj", 1);
    char *dir = temp_dir();
    struct error err;
    save_ok(a, dir);
    struct buf tensors = read_file(dir, "adapter_model.safetensors"),
               config = read_file(dir, "adapter_config.json");
    for (size_t n = 0; n < tensors.len; n += n < 1100 ? 7 : 97) {
        write_file(dir, "adapter_model.safetensors", tensors.data, n);
        assert_null(adapter_load(dir, &s, &err));
        assert_true(err.code < 0 && err.text[0]);
    }
    for (size_t i = 0; i < tensors.len && i < 1200; i += 3) {
        char old = tensors.data[i];
        tensors.data[i] = (char)(old ^ (1 << (i / 3 % 7)));
        write_file(dir, "adapter_model.safetensors", tensors.data, tensors.len);
        adapter_release(adapter_load(dir, &s, &err));
        tensors.data[i] = old;
    }
    write_file(dir, "adapter_model.safetensors", tensors.data, tensors.len);
    for (size_t n = 0; n < config.len; n += 3) {
        write_file(dir, "adapter_config.json", config.data, n);
        assert_null(adapter_load(dir, &s, &err));
    }
    buf_release(&tensors);
    buf_release(&config);
    adapter_release(a);
    temp_remove(dir);
}

/* Saves with a limit on file sizes, which has the effect of a full disk. */
static int save_limited(const struct adapter *a, const char *dir, rlim_t bytes, struct error *err) {
    struct rlimit old, low;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    low = old;
    low.rlim_cur = bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    int rc = adapter_save(a, dir, "fry", err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    return rc;
}

/* Every use of an offloaded adapter has the bits of the one in memory, and its folder has no file.
 */
static void test_offload(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *in_memory = random_adapter_of_rank(&s, 4, "all-linear", 1),
                   *a = random_adapter_of_rank(&s, 4, "all-linear", 1), *child[2];
    struct error err;
    char *dir = temp_dir(), *saved = path_join(dir, "saved");
    size_t bytes = a->n_data * sizeof *a->data, before = adapter_bytes(a);
    adapter_offload(a, dir);
    assert_true(a->is_offloaded);
    assert_int_equal(files_count(dir), 0);
    assert_int_equal(adapter_bytes(a), before - bytes);
    for (int round = 0; round < 2; round++) {
        assert_memory_equal(a->data, in_memory->data, bytes);
        assert_true(adapter_dot(a, in_memory) == adapter_dot(in_memory, in_memory));
        const struct lora_pack *x = adapter_pack(a, DTYPE_F32),
                               *y = adapter_pack(in_memory, DTYPE_F32);
        const struct lora_module *mx = lora_module_at(x, 2, PROJ_DOWN),
                                 *my = lora_module_at(y, 2, PROJ_DOWN);
        size_t in = (size_t)proj_in(&s, PROJ_DOWN);
        assert_memory_equal(mx->a, my->a, (size_t)mx->r * in * sizeof(float));
        child[0] = adapter_blend(a, in_memory, 0.3f, 4, BLEND_DELTA, &err);
        child[1] = adapter_blend(in_memory, in_memory, 0.3f, 4, BLEND_DELTA, &err);
        assert_string_equal(child[0]->hash, child[1]->hash);
        adapter_release(child[0]);
        adapter_release(child[1]);
        adapter_free_packs(a);
        adapter_free_pages(a);
        assert_int_equal(adapter_bytes(a), before - bytes);
    }
    save_ok(a, saved);
    struct adapter *again = load_ok(saved, &s);
    assert_string_equal(again->hash, in_memory->hash);
    adapter_offload(a, "/nowhere"); // it is offloaded already
    assert_true(a->is_offloaded);
    adapter_release(again);
    adapter_release(a);
    adapter_release(in_memory);
    free(saved);
    temp_remove(dir);
}

/* Without a folder or room on the disk, the adapter stays in memory and no file is left. */
static void test_offload_impossible(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 4, "all-linear", 1);
    char hash[HASH_LEN], *dir = temp_dir();
    struct rlimit old, small;
    memcpy(hash, a->hash, sizeof hash);
    adapter_offload(a, "/nowhere");
    assert_false(a->is_offloaded);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){5000, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    adapter_offload(a, dir);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_false(a->is_offloaded);
    assert_int_equal(files_count(dir), 0);
    struct adapter *copy = adapter_from_data(&s, &a->config, a->data, NULL);
    assert_string_equal(copy->hash, hash);
    adapter_release(copy);
    adapter_release(a);
    temp_remove(dir);
}

static void test_save_disk_full(void **state) {
    (void)state;
    struct model_config s = small_shape();
    struct adapter *a = random_adapter_of_rank(&s, 2, "q_proj", 1),
                   *b = random_adapter_of_rank(&s, 8, "all-linear", 2);
    char *dir = temp_dir(), *fresh = path_join(dir, "fresh"), *kept = path_join(dir, "kept");
    struct error err;
    signal(SIGXFSZ, SIG_IGN);
    save_ok(a, kept);
    static const rlim_t limits[] = {0, 100, 5000, 20000};
    for (size_t i = 0; i < ARRAY_LEN(limits); i++) {
        err = (struct error){0};
        assert_int_equal(save_limited(b, fresh, limits[i], &err), ERR_IO);
        assert_non_null(strstr(err.text, "saving adapter"));
        assert_int_equal(files_count(fresh), 0);
        assert_int_equal(save_limited(b, kept, limits[i], &err), ERR_IO);
        assert_int_equal(files_count(kept), 2);
        struct adapter *still = load_ok(kept, &s);
        assert_string_equal(still->hash, a->hash);
        adapter_release(still);
    }
    adapter_release(a);
    adapter_release(b);
    free(fresh);
    free(kept);
    temp_remove(dir);
}

/* A file that PEFT wrote for GPT-2: every unknown tensor is counted, many are named, the file is
 * not changed. */
static void test_other_model(void **state) {
    (void)state;
    const char *shared = getenv("SHOAL_SHARED");
    char *dir =
        xasprintf("%s/data/adapters/peft-gpt2-tiny-synthetic", shared ? shared : "../shared");
    char *file = path_join(dir, "adapter_model.safetensors"), before[HASH_LEN], after[HASH_LEN];
    struct model_config s = fixture_shape(12, 768, 12, 12, 64, 3072);
    struct error err;
    if (!path_exists(file)) {
        fprintf(stderr, "SKIP: '%s' does not exist (set SHOAL_SHARED)\n", file);
        free(dir);
        free(file);
        skip();
    }
    assert_int_equal(sha256_file(file, before, &err), OK);
    assert_refused(dir, &s, ERR_MISMATCH, "target module 'c_attn' is not a projection of it");
    assert_refused(dir, &s, ERR_MISMATCH,
                   "transformer.h.0.attn.c_attn.lora_A.weight' belongs to no projection");
    assert_refused(dir, &s, ERR_MISMATCH, " more");
    assert_int_equal(sha256_file(file, after, &err), OK);
    assert_string_equal(before, after);
    free(dir);
    free(file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_qr),
        cmocka_unit_test(test_svd),
        cmocka_unit_test(test_svd_known),
        cmocka_unit_test(test_targets),
        cmocka_unit_test(test_new),
        cmocka_unit_test(test_hash),
        cmocka_unit_test(test_modules_normalised),
        cmocka_unit_test(test_refs),
        cmocka_unit_test(test_blend_exact),
        cmocka_unit_test(test_blend_best),
        cmocka_unit_test(test_blend_tiny),
        cmocka_unit_test(test_blend_targets),
        cmocka_unit_test(test_blend_seed),
        cmocka_unit_test(test_blend_refused),
        cmocka_unit_test(test_blend_repeats),
        cmocka_unit_test(test_measures),
        cmocka_unit_test(test_scale),
        cmocka_unit_test(test_mutate_statistics),
        cmocka_unit_test(test_mutate_streams),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_round_trip_mixed),
        cmocka_unit_test(test_saved_config_text),
        cmocka_unit_test(test_load_lenient),
        cmocka_unit_test(test_load_target_selections),
        cmocka_unit_test(test_load_alphas),
        cmocka_unit_test(test_load_refused_configs),
        cmocka_unit_test(test_load_refused_tensors),
        cmocka_unit_test(test_load_refused_dirs),
        cmocka_unit_test(test_load_damaged),
        cmocka_unit_test(test_save_disk_full),
        cmocka_unit_test(test_offload),
        cmocka_unit_test(test_offload_impossible),
        cmocka_unit_test(test_other_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
