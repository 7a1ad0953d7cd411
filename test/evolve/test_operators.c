/*
 * test_operators: every operator on adapters: crossovers, PEFT's combination types and mutations.
 *
 * Children are compared with a slow and simple computation on whole matrices in double: ΔW entry by
 * entry, the rules as in their papers with sorting instead of radix selection, singular values by
 * Jacobi rotations. Operators that use random numbers are checked by properties of every possible
 * child. Every operator must be reproducible, refuse invalid operands, and give a valid child or an
 * error for random parents.
 *
 * A struct operands is written as {parents, weights, n, rank, step, seed}; weights NULL: equal
 * ones; rank 0, step NAN: the default.
 */
#define _GNU_SOURCE
#include "evolve/evolve.h"
#include "fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct model_config shape_small(void) {
    return fixture_shape(2, 24, 3, 1, 8, 40);
}

static int n_modules(const struct adapter *a) {
    return a->shape.n_layers * N_PROJ;
}

/* All values of A and B are drawn from N(0, 1). targets: used if c.modules is NULL. */
static struct adapter *adapter_random(const struct model_config *s, struct adapter_config c,
                                      const char *targets, uint64_t seed) {
    struct error err;
    if (!c.modules) assert_int_equal(adapter_targets_parse(targets, c.target, &err), OK);
    size_t n = adapter_param_count(s, &c);
    float *data = xmalloc(n * sizeof *data);
    struct rng rng = rng_make(seed, RNG_TEST, 0, 0);
    for (size_t i = 0; i < n; i++) data[i] = rng_normal(&rng);
    return adapter_from_owned_data(s, &c, data, NULL);
}

static struct adapter *adapter_random_lora(const struct model_config *s, int r, float alpha,
                                           const char *targets, uint64_t seed) {
    return adapter_random(s, (struct adapter_config){.r = r, .alpha = alpha}, targets, seed);
}

static int rows_of(const struct adapter *a, int i) {
    return proj_out(&a->shape, i % N_PROJ);
}
static int columns_of(const struct adapter *a, int i) {
    return proj_in(&a->shape, i % N_PROJ);
}
static size_t size_of(const struct adapter *a, int i) {
    return (size_t)rows_of(a, i) * (size_t)columns_of(a, i);
}

/* ΔW of module i, [out][in]; zeros if the adapter lacks it. */
static double *dense_delta(const struct adapter *a, int i) {
    const struct lora *lo = &a->loras[i];
    int in = columns_of(a, i), out = rows_of(a, i);
    double *w = xcalloc(size_of(a, i), sizeof *w);
    for (int o = 0; o < out; o++)
        for (int j = 0; j < in; j++)
            for (int c = 0; c < lo->r; c++)
                w[(size_t)o * in + j] +=
                    (double)lo->scale * lo->b[o * lo->r + c] * lo->a[c * in + j];
    return w;
}

static double vector_norm(const double *w, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += w[i] * w[i];
    return sqrt(s);
}

/* ‖ΔW_got - want‖ / ‖want‖ of module i; ‖ΔW_got‖ if want is zero. */
static double module_error(const struct adapter *got, int i, const double *want) {
    size_t n = size_of(got, i);
    double *g = dense_delta(got, i), size = vector_norm(want, n);
    for (size_t k = 0; k < n; k++) g[k] -= want[k];
    double e = vector_norm(g, n);
    free(g);
    return size > 0 ? e / size : e;
}

/* Σ w · ΔW of module i. */
static double *dense_sum(struct adapter *const *p, const double *w, int n, int i) {
    double *sum = xcalloc(size_of(p[0], i), sizeof *sum);
    for (int k = 0; k < n; k++) {
        double *x = dense_delta(p[k], i);
        for (size_t e = 0; e < size_of(p[0], i); e++) sum[e] += w[k] * x[e];
        free(x);
    }
    return sum;
}

/* The largest relative error of a module of `got`, which should be Σ w · ΔW. */
static double sum_error(const struct adapter *got, struct adapter *const *p, const double *w,
                        int n) {
    double worst = 0;
    for (int i = 0; i < n_modules(got); i++) {
        double *want = dense_sum(p, w, n, i);
        worst = fmax(worst, module_error(got, i, want));
        free(want);
    }
    return worst;
}

static int compare_descending(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a < b) - (a > b);
}

/* The error of the best approximation of w [out][in] with rank r: the norm of all singular values
 * except the r largest, computed by one-sided Jacobi rotations of the columns. */
static double best_rank_error(const double *w, int out, int in, int r) {
    double *t = xcalloc((size_t)in * (size_t)out, sizeof *t);
    double *s = xcalloc((size_t)in, sizeof *s), rest = 0;
    for (int o = 0; o < out; o++)
        for (int j = 0; j < in; j++) t[j * out + o] = w[o * in + j];
    for (int sweep = 0; sweep < 30; sweep++) {
        for (int x = 0; x < in; x++) {
            for (int y = x + 1; y < in; y++) {
                double *p = t + x * out, *q = t + y * out, pp = 0, qq = 0, pq = 0;
                for (int o = 0; o < out; o++)
                    pp += p[o] * p[o], qq += q[o] * q[o], pq += p[o] * q[o];
                if (fabs(pq) <= 1e-15 * sqrt(pp * qq)) continue;
                double angle = 0.5 * atan2(2 * pq, pp - qq), c = cos(angle), d = sin(angle);
                for (int o = 0; o < out; o++) {
                    double u = p[o], v = q[o];
                    p[o] = c * u + d * v;
                    q[o] = c * v - d * u;
                }
            }
        }
    }
    for (int j = 0; j < in; j++) s[j] = vector_norm(t + j * out, (size_t)out);
    qsort(s, (size_t)in, sizeof *s, compare_descending);
    for (int j = r; j < in; j++) rest += s[j] * s[j];
    free(t);
    free(s);
    return sqrt(rest);
}

static const struct adapter_operator *find_operator(const char *name) {
    struct error err = {0};
    const struct adapter_operator *op = operator_find(name, &err);
    assert_non_null(op);
    return op;
}

static struct adapter *apply_ok(const char *name, struct operands x) {
    struct error err = {0};
    struct adapter *child = operator_apply(find_operator(name), &x, &err);
    if (!child) fprintf(stderr, "%s: %s\n", name, err.text);
    assert_non_null(child);
    return child;
}

static void assert_refused(const char *name, struct operands x, enum error_code code,
                           const char *want) {
    struct error err = {0};
    assert_null(operator_apply(find_operator(name), &x, &err));
    assert_int_equal(err.code, code);
    if (!strstr(err.text, want)) fprintf(stderr, "'%s' lacks '%s'\n", err.text, want);
    assert_non_null(strstr(err.text, want));
}

/* The relative error of the truncation to the rank, which the lineage reports. */
static double lineage_error(const struct adapter *a) {
    const char *text = json_string_value(json_object_get(a->lineage, "error"));
    assert_non_null(text);
    return strtod(text, NULL);
}

/* Three dissimilar parents: ranks 3, 5, 5; scales 2, 0.5 and 4/√5; the second lacks half of the
 * targets. */
static void parents_make(struct adapter *p[3]) {
    struct model_config s = shape_small();
    p[0] = adapter_random_lora(&s, 3, 6, "all-linear", 1);
    p[1] = adapter_random_lora(&s, 5, 2.5f, "q_proj,v_proj,down_proj", 2);
    p[2] = adapter_random(&s, (struct adapter_config){.r = 5, .alpha = 4, .rslora = true},
                          "all-linear", 3);
}

static void parents_release(struct adapter *p[3]) {
    for (int k = 0; k < 3; k++) adapter_release(p[k]);
}

static void test_delta_exact(void **state) {
    (void)state;
    struct adapter *p[3];
    const float f[] = {0.7f, 0.3f, -0.4f};
    const double w[] = {(double)f[0], (double)f[1], (double)f[2]};
    parents_make(p);
    for (int n = 2; n <= 3; n++) {
        struct adapter *c = apply_ok("delta", (struct operands){p, f, n, 13, NAN, 0});
        assert_true(sum_error(c, p, w, n) < 1e-6);
        assert_true(lineage_error(c) < 1e-7);
        adapter_release(c);
    }
    parents_release(p);
}

/* The truncated sum is the best approximation of rank r. */
static void test_delta_best(void **state) {
    (void)state;
    struct adapter *p[3];
    const double w[] = {0.5, 0.5};
    parents_make(p);
    for (int r = 1; r <= 6; r++) {
        struct adapter *c = apply_ok("delta", (struct operands){p, NULL, 2, r, NAN, 0});
        double lost2 = 0, size2 = 0;
        for (int i = 0; i < n_modules(c); i++) {
            double *want = dense_sum(p, w, 2, i), size = vector_norm(want, size_of(c, i));
            double best = best_rank_error(want, rows_of(c, i), columns_of(c, i), r);
            assert_true(fabs(module_error(c, i, want) * size - best) < 1e-6 * size);
            if (c->loras[i].r < p[0]->loras[i].r + p[1]->loras[i].r) {
                lost2 += best * best;
                size2 += size * size;
            }
            free(want);
        }
        assert_true(fabs(lineage_error(c) - sqrt(lost2 / size2)) < 0.01 * lineage_error(c) + 1e-7);
        adapter_release(c);
    }
    parents_release(p);
}

/* Operators whose child is a weighted sum of the parents. */
static void test_weighted_sums(void **state) {
    (void)state;
    struct adapter *p[3];
    parents_make(p);
    struct adapter *c = apply_ok("extrapolate", (struct operands){p, NULL, 2, 8, 0.25f, 0});
    assert_true(sum_error(c, p, (const double[]){1.25, -0.25}, 2) < 1e-6);
    adapter_release(c);
    static const struct {
        float fitness[2];
        double share; /* of the first parent; if a fitness is negative, the lower one counts as 0 */
    } cases[] = {{{3, 1}, 0.75}, {{0, 0}, 0.5}, {{-1, -3}, 1}, {{-3, 1}, 0}, {{2, 0}, 1}};
    for (size_t k = 0; k < ARRAY_LEN(cases); k++) {
        double share = cases[k].share;
        c = apply_ok("ratio", (struct operands){p, cases[k].fitness, 2, 8, NAN, 0});
        assert_true(sum_error(c, p, (const double[]){share, 1 - share}, 2) < 1e-6);
        adapter_release(c);
    }
    /* factor_blend: A with A and B with B, by the second parent's weight. */
    c = apply_ok("factor_blend",
                 (struct operands){(struct adapter *[]){p[1], p[2]}, NULL, 2, 0, NAN, 0});
    const struct lora *x = &p[1]->loras[PROJ_Q], *y = &p[2]->loras[PROJ_Q];
    for (int k = 0; k < 5 * 24; k++)
        assert_true(c->loras[PROJ_Q].a[k] == 0.5f * x->a[k] + 0.5f * y->a[k]);
    adapter_release(c);
    parents_release(p);
}

/* The ends are the parents; the middle has equal angles to both and the mean of their lengths;
 * between parallel vectors of different length the path is a straight line. */
static void test_slerp(void **state) {
    (void)state;
    struct adapter *p[3];
    parents_make(p);
    struct adapter *pair[] = {p[0], p[2]};
    const float ends[3][2] = {{1, 0}, {0, 1}, {0.5f, 0.5f}};
    for (int k = 0; k < 2; k++) {
        struct adapter *c = apply_ok("slerp", (struct operands){pair, ends[k], 2, 8, NAN, 0});
        assert_true(operator_relative_change(c, pair[k]) < 1e-6);
        adapter_release(c);
    }
    struct adapter *c = apply_ok("slerp", (struct operands){pair, ends[2], 2, 8, NAN, 0});
    for (int i = 0; i < n_modules(c); i++) {
        size_t n = size_of(c, i);
        double *a = dense_delta(pair[0], i), *b = dense_delta(pair[1], i), *m = dense_delta(c, i),
               am = 0, bm = 0;
        for (size_t k = 0; k < n; k++) am += a[k] * m[k], bm += b[k] * m[k];
        double na = vector_norm(a, n), nb = vector_norm(b, n), nm = vector_norm(m, n);
        assert_true(fabs(nm - (na + nb) / 2) < 1e-5 * nm);
        assert_true(fabs(am / (na * nm) - bm / (nb * nm)) < 1e-6);
        free(a);
        free(b);
        free(m);
    }
    adapter_release(c);
    struct adapter *twin[] = {p[0], adapter_scale(p[0], 3)};
    c = apply_ok("slerp", (struct operands){twin, ends[2], 2, 3, NAN, 0});
    assert_true(fabs(operator_relative_change(c, p[0]) - 1) < 1e-6);
    adapter_release(c);
    adapter_release(twin[1]);
    parents_release(p);
}

/* The parent from which the child has module i; -1: none. */
static int parent_of_module(const struct adapter *c, struct adapter *const *p, int n, int i) {
    for (int k = 0; k < n; k++) {
        double *want = dense_delta(p[k], i), e = module_error(c, i, want);
        bool there = p[k]->loras[i].r > 0;
        free(want);
        if (there && e < 1e-6) return k;
    }
    return -1;
}

/* Each module comes from one parent: by layer, by module, or by the side of a split. */
static void test_modules_from_one_parent(void **state) {
    (void)state;
    struct model_config s = fixture_shape(6, 24, 3, 1, 8, 40);
    struct adapter *p[] = {adapter_random_lora(&s, 2, 4, "all-linear", 1),
                           adapter_random_lora(&s, 4, 4, "all-linear", 2)};
    int seen[2] = {0}, module_changes = 0;
    for (uint64_t seed = 0; seed < 8; seed++) {
        struct adapter *by_layer = apply_ok("layer", (struct operands){p, NULL, 2, 0, NAN, seed});
        struct adapter *by_module = apply_ok("module", (struct operands){p, NULL, 2, 0, NAN, seed});
        struct adapter *split =
            apply_ok("split", (struct operands){p, (const float[]){1, 0}, 2, 0, 0, seed});
        int split_changes = 0;
        for (int i = 0; i < n_modules(by_layer); i++) {
            int layer_parent = parent_of_module(by_layer, p, 2, i),
                split_parent = parent_of_module(split, p, 2, i);
            assert_true(layer_parent >= 0 && split_parent >= 0 &&
                        parent_of_module(by_module, p, 2, i) >= 0);
            if (i % N_PROJ) assert_int_equal(layer_parent, parent_of_module(by_layer, p, 2, i - 1));
            if (i % N_PROJ)
                module_changes += parent_of_module(by_module, p, 2, i) !=
                                  parent_of_module(by_module, p, 2, i - 1);
            if (i) split_changes += split_parent != parent_of_module(split, p, 2, i - 1);
            seen[layer_parent]++;
        }
        assert_int_equal(split_changes, 1); /* the first parent up to the split, then the second */
        assert_int_equal(parent_of_module(split, p, 2, 0), 0);
        adapter_release(by_layer);
        adapter_release(by_module);
        adapter_release(split);
    }
    assert_true(seen[0] > 0 && seen[1] > 0 && module_changes > 0);
    /* A parent with weight 0 gives only the modules that the other one lacks. */
    struct adapter *q[] = {adapter_random_lora(&s, 2, 4, "q_proj", 3), p[1]};
    struct adapter *c =
        apply_ok("module", (struct operands){q, (const float[]){1, 0}, 2, 0, NAN, 1});
    for (int i = 0; i < n_modules(c); i++)
        assert_int_equal(parent_of_module(c, q, 2, i), i % N_PROJ != 0);
    adapter_release(c);
    adapter_release(q[0]);
    adapter_release(p[0]);
    adapter_release(p[1]);
}

/* With a wide transition, the share of the first parent decreases from module to module, from its
 * weight to the second parent's. */
static void test_split_transition(void **state) {
    (void)state;
    struct model_config s = fixture_shape(4, 24, 3, 1, 8, 40);
    struct adapter *p[] = {adapter_random_lora(&s, 2, 4, "q_proj,k_proj", 1),
                           adapter_random_lora(&s, 2, 4, "q_proj,k_proj", 2)};
    for (uint64_t seed = 0; seed < 5; seed++) {
        struct adapter *c = apply_ok(
            "split_linear", (struct operands){p, (const float[]){0.9f, 0.1f}, 2, 4, 1, seed});
        double before = 1;
        for (int i = 0; i < n_modules(c); i++) {
            if (c->loras[i].r == 0) continue;
            double *a = dense_delta(p[0], i), *b = dense_delta(p[1], i), share = -1,
                   *got = dense_delta(c, i);
            size_t n = size_of(c, i);
            double ga = 0, gb = 0, aa = 0, ab = 0, bb = 0;
            for (size_t k = 0; k < n; k++)
                ga += got[k] * a[k], gb += got[k] * b[k], aa += a[k] * a[k], ab += a[k] * b[k],
                    bb += b[k] * b[k];
            share = (ga * bb - gb * ab) / (aa * bb - ab * ab);
            assert_true(share <= before + 1e-6 && share < 0.9 + 1e-6 && share > 0.1 - 1e-6);
            before = share;
            free(a);
            free(b);
            free(got);
        }
        adapter_release(c);
    }
    adapter_release(p[0]);
    adapter_release(p[1]);
}

/* Every component of the child is a singular triplet of one of the parents: it satisfies W v = s u.
 */
static void test_svd_mix(void **state) {
    (void)state;
    struct adapter *p[3];
    int from[2] = {0};
    parents_make(p);
    struct adapter *pair[] = {p[0], p[2]};
    struct adapter *c = apply_ok("svd_mix", (struct operands){pair, NULL, 2, 5, NAN, 4});
    for (int i = 0; i < n_modules(c); i++) {
        const struct lora *lo = &c->loras[i];
        int in = columns_of(c, i), out = rows_of(c, i);
        double *w[] = {dense_delta(pair[0], i), dense_delta(pair[1], i)};
        assert_int_equal(lo->r, 5);
        for (int k = 0; k < lo->r; k++) {
            int hits = 0;
            double length = 0;
            for (int j = 0; j < in; j++) length += (double)lo->a[k * in + j] * lo->a[k * in + j];
            for (int q = 0; q < 2; q++) {
                double off = 0, size = 0;
                for (int o = 0; o < out; o++) {
                    double wv = 0, su = (double)lo->b[o * lo->r + k] * length;
                    for (int j = 0; j < in; j++) wv += w[q][o * in + j] * lo->a[k * in + j];
                    off += (wv - su) * (wv - su);
                    size += su * su;
                }
                if (sqrt(off / size) >= 1e-5) continue;
                assert_true(q == 1 || k < 3); /* the first parent has rank 3 */
                from[q]++, hits++;
            }
            assert_int_equal(hits, 1);
        }
        free(w[0]);
        free(w[1]);
    }
    assert_true(from[0] > 5 && from[1] > 5);
    adapter_release(c);
    c = apply_ok("svd_mix", (struct operands){p, (const float[]){1, 0, 0}, 3, 3, NAN, 4});
    assert_true(operator_relative_change(c, p[0]) < 1e-6);
    adapter_release(c);
    parents_release(p);
}

/* merging rules, in a simple form */

/* Keeps the density · n largest magnitudes. */
static void naive_trim(double *x, size_t n, double density) {
    double *sorted = xmalloc(n * sizeof *sorted);
    size_t keep = (size_t)(density * (double)n);
    for (size_t i = 0; i < n; i++) sorted[i] = fabs(x[i]);
    qsort(sorted, n, sizeof *sorted, compare_descending);
    for (size_t i = 0; i < n; i++)
        if (keep == 0 || fabs(x[i]) < sorted[keep - 1]) x[i] = 0;
    free(sorted);
}

/* TIES after the sparsification of n tensors x[k]: elects a sign for each element, and averages the
 * elements with this sign. delta_ties: the votes are w·x; the mean is weighted by |w|, and
 * multiplied by Σ|w| of all tensors. PEFT: the votes are x; Σ w·x is divided by the number of
 * elements. */
static double *naive_elect(double **x, const double *w, int n, size_t size, bool peft) {
    double *out = xcalloc(size, sizeof *out);
    for (size_t i = 0; i < size; i++) {
        double vote = 0, sum = 0, weight = 0, all = 0;
        for (int k = 0; k < n; k++) vote += peft ? x[k][i] : w[k] * x[k][i], all += fabs(w[k]);
        for (int k = 0; k < n; k++) {
            double v = peft ? x[k][i] : w[k] * x[k][i];
            if (v == 0 || (vote >= 0) != (v > 0)) continue;
            sum += w[k] * x[k][i];
            weight += peft ? 1 : fabs(w[k]);
        }
        if (weight > 0) out[i] = peft ? sum / weight : sum / weight * all;
    }
    return out;
}

static void test_ties(void **state) {
    (void)state;
    struct adapter *p[3];
    const float f[] = {0.5f, 0.3f, 0.2f};
    parents_make(p);
    for (int peft = 0; peft < 2; peft++) {
        const char *name = peft ? "ties_svd" : "delta_ties";
        struct adapter *whole = apply_ok(name, (struct operands){p, f, 3, 40, 0.3f, 0});
        struct adapter *small = apply_ok(name, (struct operands){p, f, 3, 4, 0.3f, 0});
        for (int i = 0; i < n_modules(whole); i++) {
            double *x[3], w[3];
            int n = 0;
            for (int k = 0; k < 3; k++) {
                if (peft && p[k]->loras[i].r == 0) continue;
                w[n] = (double)f[k] * (peft ? p[k]->loras[i].scale : 1);
                x[n] = dense_delta(p[k], i);
                naive_trim(x[n++], size_of(whole, i), (double)0.3f);
            }
            double *want = naive_elect(x, w, n, size_of(whole, i), peft);
            assert_true(module_error(whole, i, want) < 1e-5);
            double best = best_rank_error(want, rows_of(whole, i), columns_of(whole, i), 4);
            double got = module_error(small, i, want) * vector_norm(want, size_of(whole, i));
            assert_true(got >= best * (1 - 1e-6) && got < best * 1.01);
            for (int k = 0; k < n; k++) free(x[k]);
            free(want);
        }
        assert_true(lineage_error(small) > 0.3 && lineage_error(whole) < 1e-6);
        adapter_release(whole);
        adapter_release(small);
    }
    parents_release(p);
}

/* An element of a child of DARE is the sum of w · ΔW / density of the parents that keep it; the
 * mean over many seeds is Σ w · ΔW. */
static void test_dare(void **state) {
    (void)state;
    struct model_config s = fixture_shape(1, 16, 2, 1, 8, 24);
    struct adapter *p[] = {adapter_random_lora(&s, 3, 3, "q_proj", 1),
                           adapter_random_lora(&s, 3, 6, "q_proj", 2)};
    const float f[] = {0.75f, 0.25f};
    size_t n = size_of(p[0], 0);
    double *a = dense_delta(p[0], 0), *b = dense_delta(p[1], 0), *mean = xcalloc(n, sizeof *mean);
    int kept = 0, rounds = 200; /* kept: elements of the first parent */
    for (int seed = 0; seed < rounds; seed++) {
        struct adapter *c =
            apply_ok("delta_dare", (struct operands){p, f, 2, 16, 0.4f, (uint64_t)seed});
        struct adapter *t =
            apply_ok("delta_dare_ties", (struct operands){p, f, 2, 16, 0.4f, (uint64_t)seed});
        double *g = dense_delta(c, 0), *h = dense_delta(t, 0);
        for (size_t i = 0; i < n; i++) {
            double x = 0.75 * a[i] / 0.4, y = 0.25 * b[i] / 0.4, eps = 1e-4;
            bool both = fabs(g[i] - x - y) < eps, first = fabs(g[i] - x) < eps,
                 second = fabs(g[i] - y) < eps, none = fabs(g[i]) < eps;
            assert_true(both || first || second || none);
            kept += both + first;
            mean[i] += g[i] / rounds;
            /* dare_ties drops the same random elements, and then elects signs. */
            double want = none                ? 0
                          : both && x * y < 0 ? (fabs(x) > fabs(y) ? x / 0.75 : y / 0.25)
                          : both              ? x + y
                          : first             ? x / 0.75
                                              : y / 0.25;
            bool close = fabs(fabs(x) - fabs(y)) < 1e-3 || fabs(x) < 1e-3 || fabs(y) < 1e-3;
            assert_true(close || fabs(h[i] - want) < 1e-3);
        }
        free(g);
        free(h);
        adapter_release(c);
        adapter_release(t);
    }
    double share = (double)kept / (double)(n * (size_t)rounds);
    assert_true(fabs(share - 0.4) < 5 * sqrt(0.24 / (double)(n * (size_t)rounds)));
    for (size_t i = 0; i < n; i++) mean[i] -= 0.75 * a[i] + 0.25 * b[i];
    assert_true(vector_norm(mean, n) <
                0.15 * vector_norm(a, n)); /* √(1.5 / 200) = 0.09 is the expected deviation */
    free(a);
    free(b);
    free(mean);
    adapter_release(p[0]);
    adapter_release(p[1]);
}

/* Keeps density · n magnitudes: the largest after the outliers, which are 1 % of all or, with a
 * high density, the rest. As in mergekit. */
static void naive_breadcrumbs(double *x, size_t n, double density) {
    double *sorted = xmalloc(n * sizeof *sorted);
    size_t keep = (size_t)(density * (double)n), n_top = n / 100;
    if (keep + n_top > n) n_top = n - keep;
    for (size_t i = 0; i < n; i++) sorted[i] = fabs(x[i]);
    qsort(sorted, n, sizeof *sorted, compare_descending);
    for (size_t i = 0; i < n; i++)
        if (fabs(x[i]) > sorted[n_top] || fabs(x[i]) < sorted[n_top + keep - 1]) x[i] = 0;
    free(sorted);
}

static double *naive_sum(double **x, const double *w, int n, size_t size) {
    double *sum = xcalloc(size, sizeof *sum);
    for (int k = 0; k < n; k++)
        for (size_t i = 0; i < size; i++) sum[i] += w[k] * x[k][i];
    return sum;
}

static void test_breadcrumbs(void **state) {
    (void)state;
    struct adapter *p[3];
    const float f[] = {0.5f, 0.3f, -0.2f};
    const double w[] = {(double)f[0], (double)f[1], (double)f[2]};
    parents_make(p);
    for (int k = 0; k < 4; k++) {
        const char *name = k % 2 ? "delta_breadcrumbs_ties" : "delta_breadcrumbs";
        float density = k < 2 ? 0.3f : 0.995f; /* 0.995: more than remains without 1 % outliers */
        struct adapter *c = apply_ok(name, (struct operands){p, f, 3, 40, density, 0});
        for (int i = 0; i < n_modules(c); i++) {
            double *x[3];
            size_t n = size_of(c, i);
            for (int q = 0; q < 3; q++) {
                x[q] = dense_delta(p[q], i);
                naive_breadcrumbs(x[q], n, (double)density);
            }
            double *want = k % 2 ? naive_elect(x, w, 3, n, false) : naive_sum(x, w, 3, n);
            assert_true(module_error(c, i, want) < 1e-5);
            free(want);
            for (int q = 0; q < 3; q++) free(x[q]);
        }
        adapter_release(c);
    }
    parents_release(p);
}

/* The probability with which MAGPRUNE keeps element i of a row of n. */
static double naive_magprune_probability(const double *row, int n, int i, double density) {
    int rank = 0;
    double band = fmin(0.15, fmin(density / 2, 1 - density));
    for (int j = 0; j < n; j++) rank += fabs(row[j]) < fabs(row[i]);
    return density - band + 2 * band * rank / (n - 1);
}

/* delta_della_linear: an element is x / probability with that probability, else 0. delta_della
 * keeps the same elements for the same seed, and elects signs among them. */
static void test_della(void **state) {
    (void)state;
    struct model_config s = fixture_shape(1, 16, 2, 1, 8, 24);
    struct adapter *p[] = {adapter_random_lora(&s, 3, 3, "k_proj", 1),
                           adapter_random_lora(&s, 3, 6, "k_proj", 2)};
    const float only[2][2] = {{1, 0}, {0, 1}}, f[] = {0.75f, 0.25f};
    const double w[] = {0.75, 0.25};
    const int m = PROJ_K, in = columns_of(p[0], m), rounds = 300;
    size_t n = size_of(p[0], m);
    double *x = dense_delta(p[0], m), expected = 0, expected_large = 0;
    int kept = 0, kept_large = 0;
    for (int seed = 0; seed < rounds; seed++) {
        struct adapter *single[2];
        double *sparse[2];
        for (int k = 0; k < 2; k++) {
            single[k] = apply_ok("delta_della_linear",
                                 (struct operands){p, only[k], 2, 16, 0.4f, (uint64_t)seed});
            sparse[k] = dense_delta(single[k], m);
        }
        for (size_t i = 0; i < n; i++) {
            double probability =
                naive_magprune_probability(x + i / in * in, in, (int)i % in, (double)0.4f);
            bool is_kept = fabs(sparse[0][i]) > 1e-4;
            if (fabs(x[i]) < 1e-2) continue;
            assert_true(!is_kept ||
                        fabs(sparse[0][i] - x[i] / probability) < 1e-4 * (1 + fabs(x[i])));
            expected += probability;
            kept += is_kept;
            if (probability < 0.5) continue;
            expected_large += probability;
            kept_large += is_kept;
        }
        for (int k = 0; k < 2; k++)
            for (size_t i = 0; i < n; i++)
                if (fabs(sparse[k][i]) < 1e-4) sparse[k][i] = 0; /* it was 0 before the SVD */
        struct adapter *c =
            apply_ok("delta_della", (struct operands){p, f, 2, 16, 0.4f, (uint64_t)seed});
        double *want = naive_elect(sparse, w, 2, n, false);
        assert_true(module_error(c, m, want) < 1e-3);
        free(want);
        adapter_release(c);
        for (int k = 0; k < 2; k++) {
            free(sparse[k]);
            adapter_release(single[k]);
        }
    }
    assert_true(fabs(kept - expected) < 5 * sqrt(0.25 * expected / 0.4));
    assert_true(expected_large > 1000 &&
                fabs(kept_large - expected_large) < 5 * sqrt(0.5 * expected_large));
    struct adapter *whole = apply_ok("delta_della_linear", (struct operands){p, f, 2, 16, 1, 0});
    assert_true(sum_error(whole, p, w, 2) < 1e-5);
    adapter_release(whole);
    free(x);
    adapter_release(p[0]);
    adapter_release(p[1]);
}

/* The three steps of SCE, in the paper's order, on x[k] = n · w · ΔW: select the elements with the
 * largest variance, calculate coefficients from their squares, erase minority signs. */
static double *naive_sce(double **x, int n, size_t size, double density) {
    double *out = xcalloc(size, sizeof *out), *var = xcalloc(size, sizeof *var), coef[3], all = 0;
    double *sorted = xmalloc(size * sizeof *sorted);
    size_t differ = 0;
    for (size_t i = 0; i < size; i++) {
        double mean = 0;
        for (int k = 0; k < n; k++) mean += x[k][i] / n;
        for (int k = 0; k < n; k++) var[i] += (x[k][i] - mean) * (x[k][i] - mean) / n;
        differ += var[i] > 0;
        sorted[i] = var[i];
    }
    qsort(sorted, size, sizeof *sorted, compare_descending);
    size_t keep = (size_t)(density * (double)differ);
    for (int k = 0; k < n; k++) {
        coef[k] = 0;
        for (size_t i = 0; i < size; i++) {
            if (density < 1 && var[i] < sorted[keep - 1]) x[k][i] = 0;
            coef[k] += x[k][i] * x[k][i];
        }
        all += coef[k];
    }
    for (size_t i = 0; i < size; i++) {
        double sum = 0, weight = 0, vote = 0;
        for (int k = 0; k < n; k++) vote += x[k][i];
        for (int k = 0; k < n; k++) {
            if (x[k][i] == 0 || (vote >= 0) != (x[k][i] > 0)) continue;
            sum += coef[k] / all * x[k][i];
            weight += coef[k] / all;
        }
        if (weight > 0) out[i] = sum / weight;
    }
    free(var);
    free(sorted);
    return out;
}

/* x [n][size] := n · w · ΔW of module i; ΔW if the weights are equal (NULL). */
static void deltas_scaled(double **x, struct adapter *const *p, const float *weights, int n,
                          int i) {
    for (int k = 0; k < n; k++) {
        x[k] = dense_delta(p[k], i);
        for (size_t e = 0; weights && e < size_of(p[k], i); e++) x[k][e] *= n * (double)weights[k];
    }
}

static void assert_sce(struct adapter *const *p, const float *weights, int n, float density) {
    struct adapter *c = apply_ok("delta_sce", (struct operands){p, weights, n, 40, density, 0});
    for (int i = 0; i < n_modules(c); i++) {
        double *x[3];
        deltas_scaled(x, p, weights, n, i);
        double *want = naive_sce(x, n, size_of(c, i), (double)density);
        assert_true(module_error(c, i, want) < 1e-5);
        free(want);
        for (int k = 0; k < n; k++) free(x[k]);
    }
    adapter_release(c);
}

/* A copy in which the first half of the rows of each B is zero. */
static struct adapter *adapter_half_zeroed(const struct adapter *a) {
    struct adapter *b = adapter_from_data(&a->shape, &a->config, a->data, NULL);
    for (int i = 0; i < n_modules(a); i++) {
        size_t n = (size_t)(rows_of(a, i) / 2 * a->loras[i].r);
        if (n > 0) memset(b->data + (a->loras[i].b - a->data), 0, n * sizeof *b->data);
    }
    return b;
}

static void test_sce(void **state) {
    (void)state;
    struct adapter *p[3];
    parents_make(p);
    assert_sce(p, NULL, 3, 0.4f);
    assert_sce(p, NULL, 3, 0.1f);
    assert_sce(p, NULL, 3, 1);
    assert_sce(p, (const float[]){0.5f, 0.3f, -0.2f}, 3, 0.4f);
    struct adapter *half[] = {adapter_half_zeroed(p[0]), adapter_half_zeroed(p[2])};
    assert_sce(half, NULL, 2, 0.4f); /* 0.4 of the elements that differ, about half of all */
    adapter_release(half[0]);
    adapter_release(half[1]);
    parents_release(p);
}

/* ‖Σ share · log_m(u)‖ of module i, which is 0 at the Karcher mean; m: the child's direction, u: a
 * parent's. *length_error: relative difference between the child's length and the mean of the
 * parents'. */
static double karcher_pull(const struct adapter *c, struct adapter *const *p, const double *share,
                           int n, int i, double *length_error) {
    size_t len = size_of(c, i);
    double *m = dense_delta(c, i), *pull = xcalloc(len, sizeof *pull), nm = vector_norm(m, len),
           sum = 0;
    *length_error = nm;
    for (int k = 0; k < n; k++) sum += p[k]->loras[i].r > 0 ? share[k] : 0;
    for (int k = 0; k < n; k++) {
        double *u = dense_delta(p[k], i), nu = vector_norm(u, len), d = 0;
        *length_error -= share[k] * nu;
        for (size_t e = 0; e < len && nu > 0; e++) d += u[e] / nu * (m[e] / nm);
        double angle = acos(fmin(1, fmax(-1, d))), w = angle > 0 ? angle / sin(angle) : 1;
        for (size_t e = 0; e < len && nu > 0; e++)
            pull[e] += share[k] / sum * w * (u[e] / nu - d * m[e] / nm);
        free(u);
    }
    double e = vector_norm(pull, len);
    *length_error /= nm;
    free(m);
    free(pull);
    return e;
}

static void test_karcher(void **state) {
    (void)state;
    struct adapter *p[3];
    parents_make(p);
    struct adapter *turned = adapter_scale(p[0], -2);
    const float f[] = {1, 0.3f, 0.7f};
    const double w[] = {0.5, 0.15, 0.35}; /* the same, scaled to the sum 1 */
    for (int n = 2; n <= 3; n++) {
        struct adapter *c = apply_ok("karcher", (struct operands){p, f, n, 13, NAN, 0});
        for (int i = 0; i < n_modules(c); i++) {
            double part = n == 2 ? 0.65 : 1, share[3], off;
            for (int k = 0; k < n; k++) share[k] = w[k] / part;
            assert_true(karcher_pull(c, p, share, n, i, &off) < 1e-5 && fabs(off) < 1e-5);
        }
        adapter_release(c);
    }
    struct adapter *pair[] = {p[0], p[2]}, *opposed[] = {p[0], turned};
    for (int k = 0; k < 2; k++) { /* between the parents, and beyond one of them */
        const float t[2][2] = {{0.3f, 0.7f}, {1.2f, -0.2f}};
        struct adapter *c = apply_ok("karcher", (struct operands){pair, t[k], 2, 8, NAN, 0});
        struct adapter *s = apply_ok("slerp", (struct operands){pair, t[k], 2, 8, NAN, 0});
        assert_true(operator_relative_change(c, s) < 1e-6);
        adapter_release(c);
        adapter_release(s);
    }
    struct adapter *c = apply_ok("karcher", (struct operands){opposed, NULL, 2, 0, NAN, 0});
    /* The first parent's direction; the mean of the lengths is 1.5 times its own. */
    assert_true(fabs(operator_relative_change(c, p[0]) - 0.5) < 1e-6);
    adapter_release(c);
    assert_refused("karcher", (struct operands){p, (const float[]){1, -1, 0}, 3, 0, NAN, 0},
                   ERR_USAGE, "cancel");
    assert_refused("karcher", (struct operands){p, (const float[]){9, 9, -17}, 3, 0, NAN, 0},
                   ERR_NUMERIC, "does not converge; use weights");
    adapter_release(turned);
    parents_release(p);
}

static void test_model_stock(void **state) {
    (void)state;
    struct adapter *p[3], *q[3];
    const double third[] = {1.0 / 3, 1.0 / 3, 1.0 / 3};
    parents_make(p);
    for (int k = 0; k < 3; k++) /* parents with small angles between them */
        q[k] = apply_ok("delta", (struct operands){(struct adapter *[]){p[0], p[k]},
                                                   (const float[]){1, 0.5f}, 2, 8, NAN, 0});
    struct adapter *c = apply_ok("model_stock", (struct operands){q, NULL, 3, 13, NAN, 0});
    for (int i = 0; i < n_modules(c); i++) {
        size_t n = size_of(c, i);
        double *x[3], cosine = 0;
        for (int k = 0; k < 3; k++) x[k] = dense_delta(q[k], i);
        for (int a = 0; a < 3; a++)
            for (int b = 0; b < a; b++)
                for (size_t e = 0; e < n; e++)
                    cosine += x[a][e] * x[b][e] / (vector_norm(x[a], n) * vector_norm(x[b], n)) / 3;
        double *want = naive_sum(x, third, 3, n), t = 3 * cosine / (1 + 2 * cosine);
        assert_true(t > 0.5 && t <= 1 + 1e-9);
        for (size_t e = 0; e < n; e++) want[e] *= t;
        assert_true(module_error(c, i, want) < 1e-6);
        free(want);
        for (int k = 0; k < 3; k++) free(x[k]);
    }
    adapter_release(c);
    struct adapter *same[] = {p[0], p[0]}, *opposed[] = {p[0], adapter_scale(p[0], -1)};
    c = apply_ok("model_stock", (struct operands){same, NULL, 2, 0, NAN, 0});
    assert_true(operator_relative_change(c, p[0]) < 1e-6);
    adapter_release(c);
    assert_refused("model_stock", (struct operands){opposed, NULL, 2, 0, NAN, 0}, ERR_STATE,
                   "nothing of the parents is left");
    c = apply_ok("model_stock",
                 (struct operands){opposed, (const float[]){0.5f, -0.5f}, 2, 0, NAN, 0});
    assert_true(operator_relative_change(c, p[0]) < 1e-6);
    adapter_release(c);
    adapter_release(opposed[1]);
    for (int k = 0; k < 3; k++) adapter_release(q[k]);
    parents_release(p);
}

static double *doubles_of(const float *v, size_t n) {
    double *d = xmalloc(n * sizeof *d);
    for (size_t i = 0; i < n; i++) d[i] = v[i];
    return d;
}

/* linear, ties and magnitude_prune merge A and B separately, each with the weight √|w·scale|; A
 * also has the sign. */
static void test_peft_factors(void **state) {
    (void)state;
    struct adapter *p[3];
    parents_make(p);
    struct adapter *pair[] = {p[1], p[2]};
    const float f[] = {0.6f, -0.9f};
    static const char *const names[] = {"linear", "magnitude_prune", "ties"};
    for (int kind = 0; kind < 3; kind++) {
        struct adapter *c = apply_ok(names[kind], (struct operands){pair, f, 2, 0, 0.5f, 0});
        for (int i = 0; i < n_modules(c); i++) {
            for (int is_b = 0; is_b < 2; is_b++) {
                const struct lora *got = &c->loras[i];
                size_t n = 5 * (size_t)(is_b ? rows_of(c, i) : columns_of(c, i));
                double *x[2], w[2];
                int m = 0;
                for (int k = 0; k < 2; k++) {
                    const struct lora *lo = &pair[k]->loras[i];
                    if (lo->r == 0) continue;
                    double weight = (double)f[k] * lo->scale;
                    w[m] = sqrt(fabs(weight)) * (weight < 0 && !is_b ? -1 : 1);
                    x[m] = doubles_of(is_b ? lo->b : lo->a, n);
                    if (kind) naive_trim(x[m], n, 0.5);
                    m++;
                }
                double *want = kind == 2 ? naive_elect(x, w, m, n, true) : xcalloc(n, sizeof *want);
                for (int k = 0; k < m; k++)
                    for (size_t e = 0; e < n && kind < 2; e++) want[e] += w[k] * x[k][e];
                assert_true(got->r == 5 && got->scale == 1);
                for (size_t e = 0; e < n; e++)
                    assert_true(fabs((is_b ? got->b : got->a)[e] - want[e]) < 1e-5);
                for (int k = 0; k < m; k++) free(x[k]);
                free(want);
            }
        }
        adapter_release(c);
    }
    assert_refused("ties", (struct operands){p, NULL, 2, 0, NAN, 0}, ERR_MISMATCH,
                   "the parents' ranks differ (3 and 5 in 'q_proj')");
    parents_release(p);
}

static void test_peft_delta(void **state) {
    (void)state;
    struct adapter *p[3];
    const float f[] = {0.6f, 0.3f, -0.9f};
    const double w[] = {(double)f[0], (double)f[1], (double)f[2]};
    parents_make(p);
    struct adapter *c = apply_ok("cat", (struct operands){p, f, 3, 0, NAN, 0});
    assert_int_equal(c->loras[PROJ_Q].r, 13);
    assert_true(sum_error(c, p, w, 3) < 1e-6);
    adapter_release(c);
    double twice[3]; /* weights for operators that count the scale twice, as in PEFT */
    for (int k = 0; k < 3; k++) twice[k] = w[k] * p[k]->loras[PROJ_Q].scale;
    c = apply_ok("svd", (struct operands){p, f, 3, 13, NAN, 0});
    assert_true(sum_error(c, p, twice, 3) < 1e-6);
    adapter_release(c);
    c = apply_ok("magnitude_prune_svd", (struct operands){p, f, 3, 40, 1, 0});
    assert_true(sum_error(c, p, twice, 3) < 1e-5);
    adapter_release(c);
    c = apply_ok("dare_linear_svd", (struct operands){p, f, 3, 40, 1, 0});
    assert_true(sum_error(c, p, twice, 3) < 1e-5);
    adapter_release(c);
    struct adapter *pair[] = {p[2], p[2]};
    /* Nothing is dropped: the child is √(scale / 2) A and √(scale / 2) B, half of ΔW. */
    c = apply_ok("dare_ties", (struct operands){pair, NULL, 2, 0, 1, 0});
    assert_true(fabs(operator_relative_change(c, p[2]) - 0.5) < 1e-6);
    adapter_release(c);
    parents_release(p);
}

/* The error of the truncation is near the best one, for singular values that decrease fast and for
 * those that hardly decrease. */
static void test_randomized_svd(void **state) {
    (void)state;
    const int sizes[][2] = {{40, 30}, {30, 40}, {50, 50}, {12, 60}, {60, 9}, {1, 7}, {7, 1}};
    for (size_t k = 0; k < ARRAY_LEN(sizes); k++) {
        int out = sizes[k][0], in = sizes[k][1], r = MIN(4, MIN(out, in));
        for (int graded = 0; graded < 2; graded++) {
            struct rng rng = rng_make(k, RNG_TEST, 0, 0);
            float *w = xmalloc(sizeof *w * (size_t)(out * in));
            for (int i = 0; i < out * in; i++)
                w[i] = rng_normal(&rng) * (graded ? powf(0.5f, (float)(i % in)) : 1);
            double *d = doubles_of(w, (size_t)(out * in));
            struct arena ar = {0};
            struct svd sv = randomized_svd(w, out, in, r, &ar);
            double kept2 = 0, all = vector_norm(d, (size_t)(out * in)),
                   best = best_rank_error(d, out, in, r);
            for (int c = 0; c < r; c++) kept2 += sv.s[c] * sv.s[c];
            double got = sqrt(fmax(0, all * all - kept2));
            assert_true(got > best - 1e-6 * all &&
                        got < best * (graded ? 1.0001 : 1.02) + 1e-6 * all);
            arena_release(&ar);
            free(w);
            free(d);
        }
    }
}

static void test_energy_rank(void **state) {
    (void)state;
    double s[] = {3, 2, 1};
    const struct svd sv = {.n = 3, .s = s};
    assert_int_equal(svd_energy_rank(&sv, 14, 9.0 / 14, 3), 1);
    assert_int_equal(svd_energy_rank(&sv, 14, 0.65, 3), 2);
    assert_int_equal(svd_energy_rank(&sv, 14, 0.95, 3), 3);
    assert_int_equal(svd_energy_rank(&sv, 14, 0.95, 2), 2);
    assert_int_equal(svd_energy_rank(&sv, 20, 0.95, 3), 3);
}

/* spectrum and rotate keep ‖ΔW‖ of each module. */
static void test_norm_is_preserved(void **state) {
    (void)state;
    struct adapter *p[3];
    parents_make(p);
    for (int k = 0; k < 3; k++) {
        for (uint64_t seed = 0; seed < 4; seed++) {
            struct adapter *s = apply_ok("spectrum", (struct operands){&p[k], NULL, 1, 0, 1, seed});
            struct adapter *r = apply_ok("rotate", (struct operands){&p[k], NULL, 1, 0, 1, seed});
            for (int i = 0; i < n_modules(s); i++) {
                size_t n = size_of(s, i);
                double *x = dense_delta(p[k], i), *y = dense_delta(s, i), *z = dense_delta(r, i),
                       size = vector_norm(x, n);
                assert_true(fabs(vector_norm(y, n) - size) <= 1e-6 * size);
                assert_true(fabs(vector_norm(z, n) - size) <= 1e-6 * size);
                free(x);
                free(y);
                free(z);
            }
            assert_true(operator_relative_change(s, p[k]) > 0.1 &&
                        operator_relative_change(r, p[k]) > 0.1);
            adapter_release(s);
            adapter_release(r);
        }
    }
    parents_release(p);
}

/* A larger step causes a larger change; the adaptation of steps relies on it. */
static void test_change_increases_with_step(void **state) {
    (void)state;
    static const char *const names[] = {"noise", "noise_absolute", "spectrum", "rotate"};
    struct adapter *p[3];
    parents_make(p);
    for (size_t k = 0; k < ARRAY_LEN(names); k++) {
        double before = -1;
        for (float step = 0; step <= 0.5f; step = step * 2 + 0.01f) {
            struct adapter *c = apply_ok(names[k], (struct operands){p, NULL, 1, 0, step, 7});
            double change = operator_relative_change(c, p[0]);
            assert_true(change > before && (step > 0 || change < 1e-6));
            before = change;
            adapter_release(c);
        }
    }
    parents_release(p);
}

/* Mutations that change components, ranks or whole modules: drop, rank and reinit. */
static void test_structural_mutations(void **state) {
    (void)state;
    struct adapter *p[3];
    parents_make(p);
    for (uint64_t seed = 0; seed < 6; seed++) {
        struct adapter *dropped =
            apply_ok("drop", (struct operands){&p[2], NULL, 1, 0, 0.2f, seed});
        struct adapter *minimal = apply_ok("drop", (struct operands){&p[2], NULL, 1, 0, 1, seed});
        struct adapter *resized =
            apply_ok("rank", (struct operands){&p[2], NULL, 1, 0, 0.05f, seed});
        struct adapter *reinit = apply_ok("reinit", (struct operands){&p[2], NULL, 1, 0, 0, seed});
        int replaced = 0;
        for (int i = 0; i < n_modules(dropped); i++) {
            assert_true(dropped->loras[i].r >= 1 && dropped->loras[i].r < 5);
            assert_int_equal(minimal->loras[i].r, 1);
            assert_true(resized->loras[i].r == 4 || resized->loras[i].r == 6);
            double *x = dense_delta(reinit, i);
            replaced += vector_norm(x, size_of(reinit, i)) == 0;
            free(x);
        }
        assert_int_equal(replaced, 1);
        double change = operator_relative_change(resized, p[2]);
        assert_true(resized->loras[0].r == 6 ? change > 0.01 && change < 0.2 : change < 0.9);
        adapter_release(dropped);
        adapter_release(minimal);
        adapter_release(resized);
        adapter_release(reinit);
    }
    struct adapter *r = apply_ok("rank", (struct operands){&p[2], NULL, 1, 2, 0.05f, 0});
    double *want = dense_delta(p[2], PROJ_DOWN);
    double best = best_rank_error(want, rows_of(r, PROJ_DOWN), columns_of(r, PROJ_DOWN), 2);
    assert_int_equal(r->loras[PROJ_DOWN].r, 2);
    assert_true(fabs(module_error(r, PROJ_DOWN, want) * vector_norm(want, size_of(r, PROJ_DOWN)) -
                     best) < 1e-5 * best);
    free(want);
    adapter_release(r);
    r = apply_ok("reinit", (struct operands){&p[2], NULL, 1, 0, 1, 0});
    assert_true(adapter_dot(r, r) == 0 && r->config.rslora);
    adapter_release(r);
    parents_release(p);
}

static void test_relative_change(void **state) {
    (void)state;
    struct adapter *p[3];
    parents_make(p);
    struct adapter *x2 = adapter_scale(p[0], 1.5f), *zero = adapter_scale(p[0], 0);
    assert_true(fabs(operator_relative_change(x2, p[0]) - 0.5) < 1e-7);
    assert_true(operator_relative_change(p[0], p[0]) == 0);
    assert_true(isinf(operator_relative_change(p[0], zero)) &&
                operator_relative_change(zero, zero) == 0);
    adapter_release(x2);
    adapter_release(zero);
    parents_release(p);
}

/* For every operator: the same seed gives the same hash; another seed gives another one only if the
 * operator uses random numbers; the lineage has the operator, the parents and the step. */
static void test_operators_are_reproducible(void **state) {
    (void)state;
    struct model_config s = fixture_shape(4, 24, 3, 1, 8, 40);
    struct adapter *p[] = {adapter_random_lora(&s, 4, 8, "all-linear", 1),
                           adapter_random_lora(&s, 4, 4, "all-linear", 2)};
    const struct adapter_operator *op;
    int n = 0;
    for (; (op = operator_at(n)); n++) {
        bool is_random = op->options & OPERAND_SEED, differs = false;
        struct operands x = {p, NULL, MIN(2, op->max_parents), 0, NAN, 0};
        struct adapter *first = apply_ok(op->name, x);
        for (x.seed = 0; x.seed < 6; x.seed++) {
            struct adapter *a = apply_ok(op->name, x), *b = apply_ok(op->name, x);
            assert_string_equal(a->hash, b->hash);
            differs |= strcmp(a->hash, first->hash) != 0;
            assert_string_equal(json_string_value(json_object_get(a->lineage, "operator")),
                                operator_stored_name(op));
            assert_non_null(
                strstr(json_string_value(json_object_get(a->lineage, "parents")), p[0]->hash));
            assert_int_equal(json_object_get(a->lineage, "step") != NULL, op->unit != NULL);
            adapter_release(a);
            adapter_release(b);
        }
        if (differs != is_random) fprintf(stderr, "operator '%s'\n", op->name);
        assert_int_equal(differs, is_random);
        assert_ptr_equal(find_operator(op->name), op);
        assert_true(op->about && op->about[0] && op->min_parents >= 1 &&
                    op->max_parents >= op->min_parents);
        assert_true(!op->unit || (op->step >= op->step_min && op->step <= op->step_max));
        adapter_release(first);
    }
    assert_int_equal(n, 39);
    adapter_release(p[0]);
    adapter_release(p[1]);
}

static void test_invalid_operands_are_refused(void **state) {
    (void)state;
    struct adapter *p[3];
    struct model_config s = shape_small(), t = fixture_shape(1, 24, 3, 1, 8, 40);
    struct error err = {0};
    parents_make(p);
    struct adapter *dora = adapter_random(
        &s, (struct adapter_config){.r = 2, .alpha = 2, .dora = true}, "all-linear", 1);
    struct adapter *other = adapter_random_lora(&t, 2, 2, "q_proj", 1);
    struct adapter *with_dora[] = {p[0], dora}, *unlike[] = {p[0], other}, *one[] = {dora};
    const struct adapter_operator *op;
    for (int i = 0; (op = operator_at(i)); i++) {
        int n = MIN(2, op->max_parents);
        assert_refused(op->name, (struct operands){n == 1 ? one : with_dora, NULL, n, 0, NAN, 0},
                       ERR_MISMATCH, "DoRA");
        if (n == 2)
            assert_refused(op->name, (struct operands){unlike, NULL, 2, 0, NAN, 0}, ERR_MISMATCH,
                           "differ in shape");
        if (op->unit)
            assert_refused(op->name, (struct operands){p, NULL, n, 0, op->step_max + 1, 0},
                           ERR_USAGE, "is not in");
        assert_refused(op->name, (struct operands){p, NULL, 0, 0, NAN, 0}, ERR_USAGE, "not 0");
    }
    assert_refused("slerp", (struct operands){p, NULL, 3, 0, NAN, 0}, ERR_USAGE,
                   "operator 'slerp' takes 2 parents, not 3");
    assert_refused("delta", (struct operands){p, (const float[]){1, NAN}, 2, 0, NAN, 0}, ERR_USAGE,
                   "not a finite number");
    assert_refused("delta", (struct operands){p, NULL, 2, -1, NAN, 0}, ERR_USAGE, "rank -1");
    assert_refused("slerp", (struct operands){p, (const float[]){1, -1}, 2, 0, NAN, 0}, ERR_USAGE,
                   "cancel");
    assert_refused("delta", (struct operands){p, (const float[]){3e38f, 3e38f}, 2, 5, NAN, 0},
                   ERR_NUMERIC, "'delta' overflows");
    assert_refused("delta", (struct operands){p, (const float[]){0, 0}, 2, 5, NAN, 0}, ERR_STATE,
                   "nothing of the parents is left");
    assert_null(operator_find("融合", &err));
    assert_non_null(strstr(err.text, "no operator '融合'; there are delta, factor_blend, ratio"));
    adapter_release(dora);
    adapter_release(other);
    parents_release(p);
}

/* A random adapter: some modules, different ranks and alphas; sometimes with a zero B, a zero
 * alpha, rank-stabilised, or of extreme size. */
static struct adapter *adapter_random_any(const struct model_config *s, struct rng *rng) {
    struct adapter_module *m = xcalloc((size_t)s->n_layers * N_PROJ, sizeof *m);
    struct adapter_config c = {.r = 1, .alpha = 1, .rslora = rng_below(rng, 3) == 0, .modules = m};
    for (int i = 0; i < s->n_layers * N_PROJ; i++)
        if (i == 0 || rng_below(rng, 3))
            m[i] = (struct adapter_module){1 + (int32_t)rng_below(rng, 12),
                                           (float)((int)rng_below(rng, 9) - 1)};
    struct adapter *a = adapter_random(s, c, NULL, rng_u64(rng));
    struct adapter *b = adapter_scale(a, (const float[]){1, 1, 0, 1e-12f, 1e9f}[rng_below(rng, 5)]);
    adapter_release(a);
    free(m);
    return b;
}

/* For every operator: an option that its row names changes the child, or is refused for this value;
 * other options do not change it, and operator_check_option refuses them with the list. */
static void test_operator_options(void **state) {
    (void)state;
    static const char *const names[] = {"weights", "rank", "step", "seed", "alpha", "mut"};
    struct model_config s = fixture_shape(4, 24, 3, 1, 8, 40);
    struct adapter *p[] = {adapter_random_lora(&s, 4, 8, "all-linear", 1),
                           adapter_random_lora(&s, 4, 4, "all-linear", 2)};
    const struct adapter_operator *op;
    struct error err;
    for (int i = 0; (op = operator_at(i)); i++) {
        struct operands plain = {.parents = p, .n_parents = MIN(2, op->max_parents), .step = NAN};
        struct operands changed[] = {plain, plain};
        const unsigned bits[] = {OPERAND_WEIGHTS, OPERAND_RANK};
        struct adapter *before = apply_ok(op->name, plain);
        changed[0].weights = (const float[]){0.1f, 0.9f};
        changed[1].rank = 2;
        for (int k = 0; k < 2; k++) {
            bool is_option = op->options & bits[k];
            struct adapter *after = operator_apply(op, &changed[k], &err);
            /* layer and module sample whole modules: that may select the same ones */
            if (after && strcmp(op->name, "layer") != 0 && strcmp(op->name, "module") != 0 &&
                (strcmp(before->hash, after->hash) != 0) != is_option)
                fail_msg("'%s', %s", op->name, names[k]);
            if (!after) assert_true(!is_option && err.code == ERR_USAGE);
            adapter_release(after);
        }
        for (size_t k = 0; k < ARRAY_LEN(names); k++) {
            bool has = k < 2    ? op->options & bits[k]
                       : k == 2 ? op->unit != NULL
                                : k == 3 && (op->options & OPERAND_SEED);
            assert_int_equal(operator_check_option(op, names[k], &err), has ? OK : ERR_USAGE);
        }
        adapter_release(before);
    }
    assert_int_equal(operator_check_option(find_operator("slerp"), "alpha", &err), ERR_USAGE);
    assert_string_equal(err.text, "operator 'slerp' has no option 'alpha'; it has weights, rank");
    for (int k = 0; k < 2; k++) adapter_release(p[k]);
}

/* A child has the base that its parents have in common, and their names. */
static void test_operator_base(void **state) {
    (void)state;
    static const char *const hashes[] = {"aa", "bb", "cc"};
    /* base and source of two parents (-1: none), and of the child */
    static const int rows[][6] = {
        {0, -1, 0, -1, 0, -1}, {0, -1, -1, -1, 0, -1}, {0, -1, 1, -1, -1, -1},  {0, 2, 0, 2, 0, 2},
        {0, -1, 1, 0, 0, -1},  {1, 0, 2, 0, 0, -1},    {-1, -1, -1, -1, -1, -1}};
    struct model_config s = fixture_shape(4, 24, 3, 1, 8, 40);
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct adapter *p[2];
        for (int k = 0; k < 2; k++) {
            const int *v = rows[i] + 2 * k;
            json_t *lineage = json_object();
            if (v[0] >= 0)
                json_object_set_new(lineage, ADAPTER_BASE_HASH, json_string(hashes[v[0]]));
            if (v[1] >= 0)
                json_object_set_new(lineage, ADAPTER_BASE_SOURCE, json_string(hashes[v[1]]));
            p[k] =
                operator_set_lineage(adapter_random_lora(&s, 4, 8, "all-linear", 1 + k), lineage);
            json_decref(lineage);
        }
        struct operands x = {
            .parents = p, .n_parents = 2, .step = NAN, .names = (const char *const[]){"a b", "ü"}};
        struct adapter *child = apply_ok("slerp", x);
        const char *base = json_string_value(json_object_get(child->lineage, ADAPTER_BASE_HASH)),
                   *source =
                       json_string_value(json_object_get(child->lineage, ADAPTER_BASE_SOURCE));
        assert_string_equal(base ? base : "", rows[i][4] < 0 ? "" : hashes[rows[i][4]]);
        assert_string_equal(source ? source : "", rows[i][5] < 0 ? "" : hashes[rows[i][5]]);
        assert_string_equal(json_string_value(json_object_get(child->lineage, "parent_names")),
                            "[\"a b\",\"ü\"]");
        adapter_release(child);
        for (int k = 0; k < 2; k++) adapter_release(p[k]);
    }
}

static void test_random_adapters(void **state) {
    (void)state;
    struct rng rng = rng_make(9, RNG_TEST, 1, 0);
    int made = 0, refused = 0;
    for (int round = 0; round < 25; round++) {
        int heads = 1 + (int)rng_below(&rng, 3), dim = 2 * (1 + (int)rng_below(&rng, 4));
        struct model_config s =
            fixture_shape(1 + (int)rng_below(&rng, 2), 1 + (int)rng_below(&rng, 20), heads, 1, dim,
                          1 + (int)rng_below(&rng, 30));
        struct adapter *p[3];
        float w[3];
        for (int k = 0; k < 3; k++)
            p[k] = adapter_random_any(&s, &rng), w[k] = 2 * rng_normal(&rng);
        const struct adapter_operator *op;
        for (int i = 0; (op = operator_at(i)); i++) {
            struct error err = {0};
            struct operands x = {p,
                                 rng_below(&rng, 3) ? w : NULL,
                                 MIN(op->max_parents, 1 + (int)rng_below(&rng, 3)),
                                 (int32_t)(rng_below(&rng, 2) * rng_below(&rng, 30)),
                                 op->step_min + (op->step_max - op->step_min) * rng_uniform(&rng),
                                 rng_u64(&rng)};
            x.n_parents = MAX(x.n_parents, op->min_parents);
            struct adapter *c = operator_apply(op, &x, &err);
            if (!c) {
                refused++;
                bool nothing_left = err.code == ERR_STATE && strcmp(op->name, "model_stock") == 0;
                assert_true(err.code == ERR_MISMATCH || err.code == ERR_USAGE ||
                            err.code == ERR_NUMERIC || nothing_left);
                continue;
            }
            made++;
            assert_true(adapter_fits(c, &s));
            for (int k = 0; k < n_modules(c); k++)
                assert_true(c->loras[k].r <= 40 && isfinite(c->loras[k].scale));
            for (int k = 0; k < x.n_parents; k++)
                assert_false(isnan(operator_relative_change(c, p[k])));
            adapter_release(c);
        }
        for (int k = 0; k < 3; k++) adapter_release(p[k]);
    }
    /* Most are refused by PEFT's operators, which require equal ranks. */
    assert_true(made > 400 && refused > 20);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_delta_exact),
        cmocka_unit_test(test_delta_best),
        cmocka_unit_test(test_weighted_sums),
        cmocka_unit_test(test_slerp),
        cmocka_unit_test(test_modules_from_one_parent),
        cmocka_unit_test(test_split_transition),
        cmocka_unit_test(test_svd_mix),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_dare),
        cmocka_unit_test(test_breadcrumbs),
        cmocka_unit_test(test_della),
        cmocka_unit_test(test_sce),
        cmocka_unit_test(test_karcher),
        cmocka_unit_test(test_model_stock),
        cmocka_unit_test(test_peft_factors),
        cmocka_unit_test(test_peft_delta),
        cmocka_unit_test(test_randomized_svd),
        cmocka_unit_test(test_energy_rank),
        cmocka_unit_test(test_norm_is_preserved),
        cmocka_unit_test(test_change_increases_with_step),
        cmocka_unit_test(test_structural_mutations),
        cmocka_unit_test(test_relative_change),
        cmocka_unit_test(test_operators_are_reproducible),
        cmocka_unit_test(test_invalid_operands_are_refused),
        cmocka_unit_test(test_operator_options),
        cmocka_unit_test(test_operator_base),
        cmocka_unit_test(test_random_adapters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
