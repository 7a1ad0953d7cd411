/*
 * test_search: selection, search algorithms and fitness estimates on functions whose optimum is
 * known.
 *
 * Hand-written cases are in test/cases/select.txt. Numbers of evaluations are compared with
 * published ones; error rates (of a race, of a test's level, of a corrected estimate) with counts
 * over hundreds of simulated populations, which are printed.
 */
/* levels: once */
#define _GNU_SOURCE
#include "evolve/fitness.h"
#include "evolve/search.h"
#include "evolve/select.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct error err;

static double uniform(struct rng *r) {
    return (double)rng_uniform(r);
}

static double normal(struct rng *r) {
    return (double)rng_normal(r);
}

static void assert_ok(int rc) {
    if (rc != OK) fail_msg("%s", err.text);
}

/* cases */

enum { CELLS = 64 };
struct rows {
    double v[CELLS];
    int n, rows, columns; /* numbers, rows, numbers of the last row */
};

static struct rows rows_parse(const char *text) {
    struct rows r = {.rows = 1};
    for (char *end; *text; text = end) {
        if (*text == ';') r.rows++, r.columns = 0, text++;
        r.v[r.n] = strtod(text, &end);
        if (end == text) break;
        r.n++, r.columns++;
        while (*end == ' ') end++;
        assert_true(r.n < CELLS);
    }
    return r;
}

static void ints_to_doubles(const int *v, int n, double *out) {
    for (int i = 0; i < n; i++) out[i] = v[i];
}

/* Frequencies over 4,000 single choices. */
static void selection_frequencies(const struct selection *s, double number, const struct rows *in,
                                  double *out) {
    struct select_pool p = {.n = s->by_scores ? in->rows : in->n,
                            .fitness = in->v,
                            .scores = in->v,
                            .n_scores = in->columns,
                            .truncation_ratio = number,
                            .tournament = (int)number,
                            .selection_pressure = number};
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    for (int i = 0, at; i < 4000; i++) {
        s->pick(&p, &r, &at, 1);
        assert_in_range(at, 0, p.n - 1);
        out[at] += 1 / 4000.0;
    }
}

static void case_run(const char *what, double number, const struct rows *in, double *out) {
    int order[CELLS], n = in->rows, m = in->columns;
    double crowding[CELLS];
    const struct selection *s = selection_find(what);
    if (s) {
        selection_frequencies(s, number, in, out);
    } else if (strcmp(what, "order") == 0) {
        select_argsort(in->v, in->n, order);
        ints_to_doubles(order, in->n, out);
    } else if (strcmp(what, "survive") == 0) {
        pareto_order(in->v, n, m, order);
        ints_to_doubles(order, n, out);
    } else if (strcmp(what, "share") == 0) {
        fitness_share(in->v, in->v + m, m, number, out);
    } else {
        pareto_sort(in->v, n, m, order, crowding);
        ints_to_doubles(order, n, out);
        if (strcmp(what, "crowding") == 0) memcpy(out, crowding, sizeof crowding);
    }
}

static void case_check(char *line, int n_line) {
    char *text = strstr(line, " | "), *want_text = text ? strstr(text + 3, " | ") : NULL;
    if (!want_text) fail_msg("line %d: no two bars", n_line);
    *text = *want_text = 0;
    char *number = strchr(line, ' ');
    if (number) *number++ = 0;
    struct rows in = rows_parse(text + 3), want = rows_parse(want_text + 3);
    double got[CELLS] = {0}, room = selection_find(line) ? 0.03 : 6e-4;
    case_run(line, number ? strtod(number, NULL) : 0, &in, got);
    for (int i = 0; i < want.n; i++)
        if (!(got[i] == want.v[i] || fabs(got[i] - want.v[i]) <= room))
            fail_msg("line %d: number %d is %g, not %g", n_line, i + 1, got[i], want.v[i]);
}

static void test_cases(void **state) {
    (void)state;
    struct buf file = {0};
    int n_line = 0, n = 0;
    assert_ok(file_read("test/cases/select.txt", 1 << 20, &file, &err));
    for (char *rest = file.data, *line; (line = strsep(&rest, "\n")) != NULL;) {
        n_line++;
        if (*line == 0 || *line == '#') continue;
        case_check(line, n_line);
        n++;
    }
    assert_true(n > 30);
    buf_release(&file);
}

/* The archive's content does not depend on the order, and a better candidate is never replaced by a
 * worse one. */
static void test_archive(void **state) {
    (void)state;
    const struct archive_axis axis[2] = {{0, 1, 4}, {-1, 1, 2}};
    struct archive a, b;
    assert_ok(archive_init(&a, axis, 2, &err));
    assert_ok(archive_init(&b, axis, 2, &err));
    double d[60][2], f[60];
    struct rng r = rng_make(3, RNG_TEST, 0, 0);
    for (int i = 0; i < 60; i++) {
        d[i][0] = 1.4 * uniform(&r) - 0.2, d[i][1] = 2 * uniform(&r) - 1;
        f[i] = (double)rng_below(&r, 5) - 3; // many ties
    }
    for (int i = 0; i < 60; i++) archive_add(&a, d[i], f[i], i);
    for (int i = 60; i-- > 0;) archive_add(&b, d[i], f[i], i);
    assert_memory_equal(a.id, b.id, 8 * sizeof *a.id);
    assert_true(archive_coverage(&a) == 1);
    assert_true(archive_qd_score(&a, -3) == archive_qd_score(&b, -3));
    for (int i = 0; i < 50; i++) assert_in_range(archive_pick(&a, &r), 0, 59);
    archive_release(&b);
    assert_ok(archive_init(&b, axis, 2, &err));
    assert_true(archive_pick(&b, &r) == -1);
    assert_true(archive_add(&b, (double[]){9, -9}, -1, 7)); // beyond the ends: the corner
    assert_true(b.id[6] == 7 && archive_coverage(&b) == 1.0 / 8);
    assert_false(archive_add(&b, (double[]){9, -9}, -2, 8));
    assert_false(archive_add(&b, (double[]){9, -9}, NAN, 8));
    assert_false(archive_add(&b, (double[]){NAN, 0}, 5, 8));
    assert_true(archive_qd_score(&b, -3) == 2 && archive_pick(&b, &r) == 7);
    archive_release(&a);
    archive_release(&b);
    const struct archive_axis bad[4] = {{0, 0, 4}, {0, 1, 0}, {0, 1, 2000}, {0, 1, 2000}};
    assert_int_equal(archive_init(&a, bad, 1, &err), ERR_USAGE);
    assert_int_equal(archive_init(&a, bad + 1, 1, &err), ERR_USAGE);
    assert_int_equal(archive_init(&a, bad + 2, 2, &err), ERR_USAGE);
    assert_int_equal(archive_init(&a, axis, 5, &err), ERR_USAGE);
}

/* Each candidate is paired with the best of each role first, and then with each member once per
 * cycle. */
static void test_partners(void **state) {
    (void)state;
    const int critics[3] = {2, 0, 1}, solvers[5] = {4, 3, 2, 1, 0}, *ranked[2] = {critics, solvers};
    const int size[2] = {3, 5};
    int met[5] = {0}, again[2], partner[2], differs = 0;
    coevolve_partners(ranked, size, 2, 0, 0, 9, 1, partner);
    assert_true(partner[0] == -1 && partner[1] == 4);
    for (int slot = 1; slot <= 10; slot++) {
        coevolve_partners(ranked, size, 2, 0, slot, 9, 1, partner);
        met[partner[1]]++;
        coevolve_partners(ranked, size, 2, 0, slot, 9, 1, again);
        assert_memory_equal(again, partner, sizeof again);
        coevolve_partners(ranked, size, 2, 0, slot, 9, 2, again);
        differs += again[1] != partner[1];
    }
    for (int i = 0; i < 5; i++) assert_int_equal(met[i], 2);
    assert_true(differs > 2);
}

/* objective functions; the optimum is 0 */

typedef double (*objective_fn)(const double *x, int n);

static double sphere(const double *x, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    return -sum;
}

static double rosenbrock(const double *x, int n) {
    double sum = 0;
    for (int i = 0; i + 1 < n; i++) {
        double a = x[i + 1] - x[i] * x[i], b = 1 - x[i];
        sum += 100 * a * a + b * b;
    }
    return -sum;
}

static double rastrigin(const double *x, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i] + 10 - 10 * math_cos(6.283185307179586 * x[i]);
    return -sum;
}

/* Orders points as sphere does, with other values. */
static double sphere_bent(const double *x, int n) {
    double s = sphere(x, n);
    return s * s * s - 7;
}

static double shifted(const double *x, int n) {
    double y[SEARCH_MAX_DIM_CMA];
    for (int i = 0; i < n; i++) y[i] = x[i] - 4;
    return sphere(y, n);
}

static struct search_options options_for(const char *searcher) {
    struct search_options o;
    options_default(search_option_rows, &o);
    free(o.searcher);
    o.searcher = (char *)(uintptr_t)searcher; // static, never freed
    return o;
}

static struct search *search_start(const char *searcher, int batch, double sigma, double coordinate,
                                   int n, uint64_t seed) {
    struct search_options o = options_for(searcher);
    double start[SEARCH_MAX_DIM_CMA];
    o.batch = batch;
    o.sigma = sigma;
    for (int i = 0; i < n; i++) start[i] = coordinate;
    struct search *s = search_new(&o, start, 1, n, seed, &err);
    if (!s) fail_msg("%s", err.text);
    return s;
}

/* One generation. */
static void run_generation(struct search *s, objective_fn f, int n) {
    const double *x = search_ask(s);
    double fitness[256];
    for (int m = 0; m < search_batch(s); m++) fitness[m] = f(x + m * n, n);
    search_tell(s, fitness);
}

/* Number of evaluations until the objective is below 1e-8; 0: not reached. */
static int count_evaluations(objective_fn f, double start, uint64_t seed) {
    struct search *s = search_start("cma", 0, 0.5, start, 10, seed);
    double best = -INFINITY;
    int n = 0;
    while (best < -1e-8 && n < 20000) {
        run_generation(s, f, 10);
        search_best(s, &best);
        n += search_batch(s);
    }
    search_free(s);
    return best < -1e-8 ? 0 : n;
}

/* Hansen's pure Python implementation needs, from the same start, 1,350 to 1,560 evaluations on the
 * sphere (median of 11 runs 1,450) and 5,070 to 8,070 on Rosenbrock's function (6,240), where one
 * run of 11 ends in the local minimum; libcmaes reports 1,525 and 5,565 (with active updates). */
static void test_cma_evaluations(void **state) {
    (void)state;
    double sum[2] = {0};
    int solved = 0;
    for (uint64_t seed = 1; seed <= 9; seed++) {
        int a = count_evaluations(sphere, 1, seed), b = count_evaluations(rosenbrock, 0, seed);
        assert_in_range(a, 1200, 1750);
        sum[0] += a;
        if (!b) continue;
        assert_in_range(b, 4500, 9000);
        sum[1] += b;
        solved++;
    }
    assert_true(solved >= 7);
    print_message("cma to 1e-8 in 10 dimensions: sphere %.0f, rosenbrock %.0f evaluations (%d of 9 "
                  "solved)\n",
                  sum[0] / 9, sum[1] / solved, solved);
    assert_true(fabs(sum[0] / 9 - 1450) < 150 && fabs(sum[1] / solved - 6240) < 950);
}

/* Under noise the mean of the distribution is near the optimum, and its width does not fall below
 * the bound. */
static void test_cma_noise(void **state) {
    (void)state;
    struct search_options o = options_for("cma");
    double start[5] = {3, 3, 3, 3, 3}, fitness[16];
    o.batch = 16;
    o.sigma = 1;
    o.sigma_min = 0.2;
    struct search *s = search_new(&o, start, 1, 5, 4, &err);
    double spread = 0;
    for (int g = 0; g < 150; g++) {
        const double *x = search_ask(s);
        struct rng r = rng_make(2, RNG_TEST, (uint32_t)g, 0);
        for (int m = 0; m < 16; m++) fitness[m] = sphere(x + 5 * m, 5) + 0.1 * normal(&r);
        for (int m = 0; g == 149 && m < 16 * 5; m++)
            spread = fmax(spread, fabs(x[m] - search_center(s)[m % 5]));
        search_tell(s, fitness);
    }
    assert_true(sphere(search_center(s), 5) > -0.25);
    assert_true(spread > 0.1 && spread < 3);
    search_free(s);
}

/* From eight founders around the optimum; *first: the best of them. */
static double best_of_search(const char *searcher, objective_fn f, int n, int rounds, uint64_t seed,
                             double *first) {
    struct search_options o = options_for(searcher);
    struct rng r = rng_make(seed, RNG_TEST, 0, 5);
    double starts[8 * 6], best;
    assert_true(n <= 6);
    *first = -INFINITY;
    for (int i = 0; i < 8 * n; i++) starts[i] = 6 * uniform(&r) - 2.5;
    for (int i = 0; i < 8; i++) *first = fmax(*first, f(starts + i * n, n));
    o.batch = 20;
    o.sigma = 1.5;
    struct search *s = search_new(&o, starts, 8, n, seed, &err);
    for (int g = 0; g < rounds; g++) run_generation(s, f, n);
    assert_true(search_best(s, &best) && search_generation(s) == rounds);
    search_free(s);
    return best;
}

/* 2,000 evaluations each: all are better than the best founder, and the two that keep their
 * diversity are better than random search around the founders' mean. */
static void test_search_beats_random(void **state) {
    (void)state;
    static const char *const names[4] = {"cma", "pso", "ga", "random"};
    static const struct {
        const char *name;
        objective_fn f;
    } on[3] = {{"sphere", sphere}, {"rosenbrock", rosenbrock}, {"rastrigin", rastrigin}};
    for (int l = 0; l < 3; l++) {
        double mean[4] = {0}, founder = 0, first;
        for (int k = 0; k < 4; k++)
            for (uint64_t seed = 1; seed <= 10; seed++) {
                mean[k] += best_of_search(names[k], on[l].f, 6, 100, seed, &first) / 10;
                founder += first / 40;
            }
        print_message("%s, 6 dimensions, 2000 evaluations: cma %.3g, pso %.3g, ga %.3g, random "
                      "%.3g, best founder %.3g\n",
                      on[l].name, mean[0], mean[1], mean[2], mean[3], founder);
        for (int k = 0; k < 3; k++) assert_true(mean[k] > 0.5 * founder);
        assert_true(mean[0] > mean[3] && mean[2] > mean[3]);
    }
}

/* Coefficients of four founders: particles stay affine combinations of them, and the swarm's result
 * is better than the best founder and the best of the first round. */
static void test_model_swarm(void **state) {
    (void)state;
    struct search_options o = options_for("pso");
    double unit[16] = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, fitness[20];
    o.batch = 20;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        struct search *s = search_new(&o, unit, 4, 4, seed, &err);
        double first = -INFINITY, best;
        for (int g = 0; g < 40; g++) {
            const double *x = search_ask(s);
            for (int m = 0; m < 20; m++) {
                double sum = 0, d[4];
                for (int i = 0; i < 4; i++) sum += x[4 * m + i], d[i] = x[4 * m + i] - 0.25;
                assert_true(fabs(sum - 1) < 1e-12);
                fitness[m] = sphere(d, 4);
                if (g == 0) first = fmax(first, fitness[m]);
            }
            for (int i = 0; g == 0 && i < 16; i++) assert_true(x[i] == unit[i]);
            search_tell(s, fitness);
        }
        search_best(s, &best);
        assert_true(first < -0.2 && best > -0.02);
        search_free(s);
    }
}

static const char *const searchers[] = {"cma", "pso", "ga", "random"};

static struct search *save_and_load(const struct search *s) {
    json_t *v = search_save(s);
    char *text = json_canonical(v);
    json_decref(v);
    v = json_parse(text, strlen(text), "search", &err);
    struct search *copy = search_load(v, &err);
    if (!copy) fail_msg("%s", err.text);
    json_decref(v);
    free(text);
    return copy;
}

/* Saved as JSON text and loaded at any moment, also between ask and tell. */
static void test_saved_and_loaded(void **state) {
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(searchers); k++) {
        struct search *a = search_start(searchers[k], 9, 0.7, 1, 7, 5), *b = save_and_load(a);
        for (int g = 0; g < 30; g++) {
            const double *x = search_ask(a);
            double fitness[9];
            if (g % 7 == 3) {
                search_free(b);
                b = save_and_load(a);
            }
            assert_memory_equal(x, search_ask(b), 9 * 7 * sizeof *x);
            for (int m = 0; m < 9; m++) fitness[m] = rastrigin(x + 7 * m, 7);
            fitness[g % 9] = g % 4 ? fitness[g % 9] : NAN;
            search_tell(a, fitness);
            if (g % 5 == 2) {
                struct search *c = save_and_load(b);
                search_free(b);
                b = c;
            }
            search_tell(b, fitness);
        }
        search_free(a);
        search_free(b);
    }
}

/* All algorithms depend on the order only: a monotone function of fitness changes no bit. */
static void test_rank_invariance(void **state) {
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(searchers); k++) {
        struct search *a = search_start(searchers[k], 9, 0.7, 1, 6, 5),
                      *b = search_start(searchers[k], 9, 0.7, 1, 6, 5);
        for (int g = 0; g < 30; g++) {
            assert_memory_equal(search_ask(a), search_ask(b), 9 * 6 * sizeof(double));
            run_generation(a, sphere, 6);
            run_generation(b, sphere_bent, 6);
        }
        search_free(a);
        search_free(b);
    }
}

/* A search whose start and optimum are shifted by four gives the same result shifted by four, up to
 * rounding. */
static void test_translation_invariance(void **state) {
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(searchers); k++) {
        struct search *a = search_start(searchers[k], 9, 0.7, 1, 6, 5),
                      *b = search_start(searchers[k], 9, 0.7, 5, 6, 5);
        for (int g = 0; g < 15; g++) {
            const double *x = search_ask(a), *y = search_ask(b);
            for (int i = 0; i < 9 * 6; i++)
                if (!(fabs(y[i] - x[i] - 4) < 1e-9))
                    fail_msg("%s, generation %d: %g", searchers[k], g, y[i] - x[i] - 4);
            run_generation(a, sphere, 6);
            run_generation(b, shifted, 6);
        }
        search_free(a);
        search_free(b);
    }
}

static void test_box(void **state) {
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(searchers); k++) {
        struct search_options o = options_for(searchers[k]);
        double start[3] = {0.5, 0.5, 0.5}, best;
        o.sigma = 2;
        o.lower_bound = 0.25;
        o.upper_bound = 1;
        struct search *s = search_new(&o, start, 1, 3, 1, &err);
        for (int g = 0; g < 60; g++) {
            const double *x = search_ask(s);
            for (int i = 0; i < 3 * search_batch(s); i++) assert_true(x[i] >= 0.25 && x[i] <= 1);
            run_generation(s, sphere, 3);
        }
        search_best(s, &best); // the corner is the optimum
        assert_true(best <= -3 * 0.0625 && best > (k == 3 ? -0.5 : -0.2));
        search_free(s);
    }
}

static void assert_load_refused(const char *key, json_t *value, const char *want) {
    struct search *s = search_start("cma", 5, 1, 0, 2, 1);
    json_t *v = search_save(s);
    if (value)
        json_object_set_new(
            strchr(key, '-') || !json_object_get(v, key) ? json_object_get(v, "options") : v, key,
            value);
    else
        json_object_del(v, key);
    if (search_load(v, &err)) fail_msg("'%s' was taken", key);
    if (!strstr(err.text, want)) fail_msg("'%s': %s", key, err.text);
    json_decref(v);
    search_free(s);
}

static void test_refusals(void **state) {
    (void)state;
    assert_load_refused("state", NULL, "lacks");
    assert_load_refused("searcher", json_string("海"), "'海' is not known");
    assert_load_refused("searcher", json_string("pso"), "is not");
    assert_load_refused("numbers", json_integer(3), "is not");
    assert_load_refused("numbers", json_integer(65), "1 to 64");
    assert_load_refused("numbers", json_integer(1 << 30), "numbers");
    assert_load_refused("generation", json_integer(-1), "generation");
    assert_load_refused("state", json_pack("[s]", "nan"), "is not");
    assert_load_refused("sigma", json_string("x"), "'sigma'");
    assert_load_refused("sigma-min", json_real(-1), "'sigma-min'");
    assert_load_refused("batch", json_integer(1 << 20), "'batch'");
    struct search_options o = options_for("cma");
    double start = 0;
    o.batch = 1;
    assert_null(search_new(&o, &start, 1, 1, 0, &err));
    assert_int_equal(err.code, ERR_USAGE);
    o = options_for("hill");
    assert_null(search_new(&o, &start, 1, 1, 0, &err));
    assert_non_null(strstr(err.text, "'hill'"));
}

/* An invalid state gives meaningless candidates, but no crash. */
static void test_invalid_states(void **state) {
    (void)state;
    for (size_t k = 0; k < ARRAY_LEN(searchers); k++)
        for (uint32_t seed = 0; seed < 20; seed++) {
            struct search *s = search_start(searchers[k], 5, 1, 0, 4, 1);
            json_t *v = search_save(s), *numbers = json_object_get(v, "state");
            static const double odd[6] = {0, -1, 1e308, -1e308, 1e-310, 3};
            struct rng r = rng_make(seed, RNG_TEST, 0, 6);
            for (size_t i = 0; i < json_array_size(numbers); i++) {
                uint32_t pick = rng_below(&r, 8);
                json_array_set_new(numbers, i,
                                   pick < 6 ? json_real(odd[pick])
                                            : json_string(pick == 6 ? "inf" : "-inf"));
            }
            search_free(s);
            s = search_load(v, &err);
            assert_non_null(s);
            for (int g = 0; g < 3; g++) run_generation(s, sphere, 4);
            search_free(s);
            json_decref(v);
        }
}

/* For any power law between step and behaviour, the adaptation finds the step with the target
 * change. */
static void test_step_adapts(void **state) {
    (void)state;
    for (int k = 0; k < 3; k++) {
        double step = k == 1 ? 1e-6 : 100, power = 0.5 * (k + 1);
        for (int i = 0; i < 60; i++)
            step = mutation_step_adapt(step, math_pow(step, power), 0.1, 0.5);
        assert_true(fabs(math_pow(step, power) - 0.1) < 1e-3);
    }
    assert_true(mutation_step_adapt(1, 0, 0.1, 1) == 2 &&
                mutation_step_adapt(1, 1e9, 0.1, 1) == 0.5);
}

/* fitness */

static void test_combination(void **state) {
    (void)state;
    const double a[4] = {1, 0, 1, 1}, b[4] = {0, 1, 0, 0}; // b = 1 - a: the sum has no variance
    struct fitness_term t[3] = {{.weight = 0.5, .items = a},
                                {.weight = 0.5, .items = b},
                                {.weight = 2, .value = {0.1, 0.05, 0.25}}};
    struct stats_interval v = fitness_combine(t, 3, 4);
    assert_true(fabs(v.value - 0.7) < 1e-12);
    assert_true(fabs(v.lo - 0.6) < 1e-12 && fabs(v.hi - 1.0) < 1e-12);
    assert_true(t[0].value.value == 0.75 && t[1].value.value == 0.25);
    t[2].weight = -2; // a negative weight exchanges the bounds
    v = fitness_combine(t, 3, 4);
    assert_true(fabs(v.value - 0.3) < 1e-12 && fabs(v.lo - 0.0) < 1e-12);
}

/* Of 1,000 populations, the interval of a weighted sum contains the true value about 950 times. */
static void test_combination_covers(void **state) {
    (void)state;
    int held = 0;
    for (uint32_t k = 0; k < 1000; k++) {
        struct rng r = rng_make(8, RNG_TEST, k, 0);
        double right[100], help[100], x = normal(&r);
        for (int i = 0; i < 100; i++) {
            right[i] = uniform(&r) < 0.6;
            help[i] = right[i] * (uniform(&r) < 0.5) - 0.1; // goes with the other
        }
        struct fitness_term t[3] = {
            {.weight = 0.6, .items = right},
            {.weight = 0.3, .items = help},
            {.weight = 0.1,
             .value = {0.2 + 0.3 * x, 0.2 + 0.3 * (x - 1.96), 0.2 + 0.3 * (x + 1.96)}}};
        struct stats_interval v = fitness_combine(t, 3, 100);
        double truth = 0.6 * 0.6 + 0.3 * (0.3 - 0.1) + 0.1 * 0.2;
        held += v.lo <= truth && truth <= v.hi;
    }
    print_message("95 %% interval of a combined fitness: holds the truth in %d of 1000\n", held);
    assert_in_range(held, 930, 970);
}

enum { N = 32, ITEMS = 1000 };

/* Populations: abilities, and answers on common items. An answer is correct if ability plus random
 * luck exceeds the item's difficulty; with `real` the score is the difference itself. */
struct ability_model {
    const char *name;
    double (*ability)(int i, struct rng *r);
    double luck, difficulty; /* deviations */
    bool real;
};

static double ability_ladder(int i, struct rng *r) {
    (void)r;
    return 1 - 0.25 * (i * 5 % N);
}

static double ability_normal(int i, struct rng *r) {
    (void)i;
    return normal(r);
}

/* Most mutants regress, few improve: minus an exponential, plus an offset for one in eight. */
static double ability_mutants(int i, struct rng *r) {
    double lift = i % 8 == 0 ? 1 : 0;
    return lift * (0.4 + 0.8 * uniform(r)) + 0.5 * math_log(1 - uniform(r));
}

static double ability_standout(int i, struct rng *r) {
    (void)r;
    return i == 17 ? 0.6 : 0;
}

static double ability_ties(int i, struct rng *r) {
    (void)i;
    return 0.02 * normal(r);
}

static const struct ability_model ability_models[] = {
    {"ladder", ability_ladder, 0.5, 1, false},     {"normal", ability_normal, 0.3, 1, false},
    {"mutants", ability_mutants, 0.3, 1, false},   {"standout", ability_standout, 0.5, 1, false},
    {"real scores", ability_normal, 0.5, 2, true}, {"near ties", ability_ties, 0.3, 1, false},
};

/* scores: [N][ITEMS]; returns the candidate with the highest ability. */
static int ability_model_sample(const struct ability_model *l, uint32_t k, double *ability,
                                double *scores) {
    struct rng r = rng_make(77, RNG_TEST, k, 1);
    int best = 0;
    double *item = xcalloc(ITEMS, sizeof *item);
    for (int i = 0; i < N; i++) {
        ability[i] = l->ability(i, &r);
        if (ability[i] > ability[best]) best = i;
    }
    for (int j = 0; j < ITEMS; j++) item[j] = l->difficulty * normal(&r);
    for (int i = 0; i < N; i++)
        for (int j = 0; j < ITEMS; j++) {
            double excess = ability[i] + l->luck * (2 * uniform(&r) - 1) * 1.732 - item[j];
            scores[i * ITEMS + j] = l->real ? excess : excess > 0;
        }
    free(item);
    return best;
}

static struct race_options race_options(const char *rule, int64_t budget) {
    struct race_options o;
    options_default(race_option_rows, &o);
    free(o.rule);
    o.rule = (char *)(uintptr_t)rule;
    o.budget = budget;
    return o;
}

/* Runs a race over known scores. */
static struct race *race_run(const struct race_options *o, const double *scores, int n, int items) {
    struct race *r = race_new(o, n, items, &err);
    double *answers = xcalloc((size_t)n * (size_t)items, sizeof *answers);
    int who[N], from, to, k;
    if (!r) fail_msg("%s", err.text);
    while ((k = race_next(r, who, &from, &to)) > 0) {
        for (int i = 0; i < k; i++)
            memcpy(answers + i * (to - from), scores + who[i] * items + from,
                   (size_t)(to - from) * sizeof *answers);
        race_add_scores(r, answers);
    }
    free(answers);
    return r;
}

static double mean_score(const double *scores, int i) {
    double sum = 0;
    for (int j = 0; j < ITEMS; j++) sum += scores[i * ITEMS + j];
    return sum / ITEMS;
}

static int full_winner(const double *scores) {
    double top = -INFINITY;
    int best = 0;
    for (int i = 0; i < N; i++) {
        double sum = 0;
        for (int j = 0; j < ITEMS; j++) sum += scores[i * ITEMS + j];
        if (sum > top) top = sum, best = i;
    }
    return best;
}

/* Counts of races. same, spent: by rule, how often the winner is that of a full evaluation, and
 * percent of its evaluations. near, lost: halving's winner is within 2 points of that winner, and
 * ability that it lacks. best: the winner of a full evaluation, of halving, has the highest
 * ability. */
struct tally {
    int same[2], near, best[2];
    double spent[2], lost;
};

static void race_population(const struct ability_model *l, uint32_t k, double *scores,
                            struct tally *t) {
    static const char *const rules[2] = {"halving", "paired"};
    double ability[N];
    int best = ability_model_sample(l, k, ability, scores), full = full_winner(scores);
    t->best[0] += full == best;
    for (int rule = 0; rule < 2; rule++) {
        struct race_options o = race_options(rules[rule], 0);
        struct race *r = race_run(&o, scores, N, ITEMS);
        int winner = race_winner(r);
        assert_true(race_spent(r) <= N * ITEMS / 10);
        t->same[rule] += winner == full;
        t->spent[rule] += 100.0 * (double)race_spent(r) / (N * ITEMS);
        race_free(r);
        if (rule) continue;
        t->best[1] += winner == best;
        t->near += mean_score(scores, full) - mean_score(scores, winner) <= 0.02;
        t->lost += ability[full] - ability[winner];
    }
}

/* 250 populations of 32 candidates and 1,000 items for each function, with a tenth of the
 * evaluations. If candidates are almost equal no method finds the best; there the loss must be
 * small. */
static void test_racing(void **state) {
    (void)state;
    enum { POPULATIONS = 250 };
    double *scores = xcalloc(N * ITEMS, sizeof *scores);
    for (size_t l = 0; l < ARRAY_LEN(ability_models); l++) {
        struct tally t = {0};
        for (uint32_t k = 0; k < POPULATIONS; k++)
            race_population(&ability_models[l], k, scores, &t);
        print_message("racing, %-11s: of %d winners of a full evaluation halving picks %d for "
                      "%.1f %% of the evaluations (%d within 2 points), paired %d for %.1f %%; the "
                      "truly best: full %d, halving %d\n",
                      ability_models[l].name, POPULATIONS, t.same[0], t.spent[0] / POPULATIONS,
                      t.near, t.same[1], t.spent[1] / POPULATIONS, t.best[0], t.best[1]);
        bool ties = ability_models[l].ability == ability_ties;
        for (int rule = 0; rule < 2 && !ties; rule++)
            assert_true(t.same[rule] * 10 >= 9 * POPULATIONS);
        assert_true(t.near * 10 >= 9 * POPULATIONS && t.lost / POPULATIONS < 0.02);
    }
    free(scores);
}

/* With unlimited evaluations, a race eliminates the best at most at the rate alpha, and rules with
 * weaker assumptions need more evaluations. */
static void test_race_errors(void **state) {
    (void)state;
    static const char *const rules[3] = {"paired", "bernstein", "hoeffding"};
    double *scores = xcalloc(N * ITEMS, sizeof *scores), ability[N], spent[3] = {0};
    int wrong[3] = {0}, decided = 0;
    for (uint32_t k = 0; k < 200; k++) {
        int best = ability_model_sample(&ability_models[0], k, ability, scores);
        for (int rule = 0; rule < 3; rule++) {
            struct race_options o = race_options(rules[rule], N * ITEMS);
            struct race *r = race_run(&o, scores, N, ITEMS);
            if (race_is_decided(r)) wrong[rule] += race_winner(r) != best, decided += rule == 0;
            if (race_items_seen(r, best) < race_items_seen(r, race_winner(r)))
                wrong[rule] += !race_is_decided(r);
            spent[rule] += (double)race_spent(r) / 200;
            race_free(r);
        }
    }
    print_message("races to the end: %d decided, best thrown out %d %d %d of 200, evaluations %.0f "
                  "%.0f %.0f of "
                  "%d\n",
                  decided, wrong[0], wrong[1], wrong[2], spent[0], spent[1], spent[2], N * ITEMS);
    for (int rule = 0; rule < 3; rule++) assert_true(wrong[rule] <= 10);
    assert_true(decided > 100 && spent[0] < spent[1] && spent[1] < N * ITEMS);
    free(scores);
}

static void test_race_refusals(void **state) {
    (void)state;
    struct race_options o = race_options("coin", 0);
    assert_null(race_new(&o, 4, 100, &err));
    assert_non_null(strstr(err.text, "'coin'"));
    o = race_options("halving", 3);
    assert_null(race_new(&o, 4, 100, &err));
    assert_int_equal(err.code, ERR_USAGE);
    o = race_options("halving", 0);
    struct race *r = race_new(&o, 1, 100, &err);
    int who[N], from, to;
    assert_int_equal(race_next(r, who, &from, &to), 0);
    assert_true(race_winner(r) == 0 && race_is_decided(r));
    race_free(r);
}

enum { CURSE_ITEMS = 100 };

/* The mean ability of the two candidates that are best on one half of the items each. */
static double mean_ability_of_half_winners(const double *scores, const double *truth) {
    double chosen = 0;
    for (int half = 0; half < 2; half++) {
        double top = -1, of = 0;
        for (int i = 0; i < N; i++) {
            double sum = 0;
            for (int j = half; j < CURSE_ITEMS; j += 2) sum += scores[i * CURSE_ITEMS + j];
            if (sum > top) top = sum, of = truth[i];
        }
        chosen += of / 2;
    }
    return chosen;
}

/* error[3]: of the winner's measured score, the shrunk one, and the split estimate. */
static void winners_curse_run(uint32_t k, double spread, double *scores, double *error) {
    struct rng r = rng_make(6, RNG_TEST, k, 2);
    double truth[N], shrunk[N], mean = 0;
    int winner;
    for (int i = 0; i < N; i++) truth[i] = 0.5 + spread * normal(&r);
    for (int i = 0; i < N * CURSE_ITEMS; i++) scores[i] = uniform(&r) < truth[i / CURSE_ITEMS];
    struct stats_interval split = fitness_split_half(scores, N, CURSE_ITEMS, &winner);
    fitness_shrink(scores, N, CURSE_ITEMS, shrunk);
    for (int j = 0; j < CURSE_ITEMS; j++) mean += scores[winner * CURSE_ITEMS + j] / CURSE_ITEMS;
    error[0] = mean - truth[winner];
    error[1] = shrunk[winner] - truth[winner];
    error[2] = split.value - mean_ability_of_half_winners(scores, truth);
}

/* Best of 32 on 100 items, with equal and with different abilities: the winner's score is biased
 * upwards; shrinkage removes nearly all of the bias; measuring on the other half removes all. */
static void test_winners_curse(void **state) {
    (void)state;
    enum { RUNS = 1500 };
    static const double spreads[2] = {0, 0.04};
    double *scores = xcalloc(N * CURSE_ITEMS, sizeof *scores);
    for (int l = 0; l < 2; l++) {
        double bias[3] = {0}, square = 0, error[3];
        for (uint32_t k = 0; k < RUNS; k++) {
            winners_curse_run(k, spreads[l], scores, error);
            for (int e = 0; e < 3; e++) bias[e] += error[e] / RUNS;
            square += error[2] * error[2] / RUNS;
        }
        double se = sqrt((square - bias[2] * bias[2]) / RUNS);
        print_message(
            "winner's curse, candidates' deviation %.2f: as measured %+.4f, shrunk %+.4f, "
            "split %+.4f ± %.4f\n",
            spreads[l], bias[0], bias[1], bias[2], 1.96 * se);
        assert_true(bias[0] > 0.05 && fabs(bias[2]) < 1.96 * se);
        assert_true(fabs(bias[1]) < bias[0] / (l ? 20 : 6));
    }
    free(scores);
}

/* 1,000 runs with equal abilities: the best of eight on 200 items is tested against the champion on
 * 200 other items. On the items of the selection it would nearly always seem better. Also races
 * between two equal candidates. */
static void test_nothing_to_select(void **state) {
    (void)state;
    enum { RUNS = 1000, FEW = 200, WHO = 9 };
    double *old = xcalloc(WHO * FEW, sizeof *old), *fresh = xcalloc(2 * FEW, sizeof *fresh);
    int held_out = 0, same_items = 0, raced = 0;
    for (uint32_t k = 0; k < RUNS; k++) {
        struct rng r = rng_make(15, RNG_TEST, k, 3);
        int winner;
        for (int j = 0; j < FEW; j++) {
            double p = uniform(&r); // the item's probability of a correct answer
            for (int i = 0; i < WHO; i++) old[i * FEW + j] = uniform(&r) < p;
            p = uniform(&r);
            for (int i = 0; i < 2; i++) fresh[i * FEW + j] = uniform(&r) < p;
        }
        fitness_split_half(old, WHO - 1, FEW, &winner);
        held_out += fitness_is_better(fresh, fresh + FEW, FEW, 0.05);
        same_items += fitness_is_better(old + winner * FEW, old + (WHO - 1) * FEW, FEW, 0.05);
        struct race_options o = race_options("paired", 2 * FEW);
        struct race *race = race_run(&o, old, 2, FEW);
        raced += race_is_decided(race);
        race_free(race);
    }
    print_message("A/A at 5 %%: %d of %d select on fresh items, %d on the items that chose; %d "
                  "races of two decide\n",
                  held_out, RUNS, same_items, raced);
    assert_in_range(held_out, 35, 65);
    assert_true(same_items > 200 && raced <= 65);
    free(old);
    free(fresh);
}

/* Four operators: one improves, one has no effect, two regress. */
static void test_operators(void **state) {
    (void)state;
    enum { RUNS = 200 };
    static const double gain[4] = {0.03, 0, -0.08, -0.2};
    int dropped[4] = {0}, favourite = 0;
    double used_before_drop = 0;
    for (uint32_t k = 0; k < RUNS; k++) {
        struct operator_selector o;
        struct rng r = rng_make(19, RNG_TEST, k, 4);
        operator_selector_init(&o, 4, 0.05, 0);
        for (int t = 0; t < 2000; t++) {
            int i = operator_selector_pick(&o, &r);
            assert_false(o.v[i].dropped);
            operator_selector_update(&o, i, gain[i] + 0.1 * normal(&r));
        }
        double p = 0;
        for (int i = 0; i < 4; i++) dropped[i] += o.v[i].dropped, p += o.v[i].p;
        assert_true(fabs(p - 1) < 1e-9);
        favourite += o.v[0].p > 0.5;
        used_before_drop += (double)o.v[3].used / RUNS;
    }
    print_message("operators: +.03, 0, -.08, -.2 dropped in %d %d %d %d of %d; the best is the "
                  "favourite in %d; the worst goes after %.0f uses\n",
                  dropped[0], dropped[1], dropped[2], dropped[3], RUNS, favourite,
                  used_before_drop);
    assert_true(dropped[0] + dropped[1] <= RUNS / 20);
    assert_true(dropped[2] > RUNS * 95 / 100 && dropped[3] == RUNS && favourite > RUNS * 9 / 10);
    struct operator_selector one; // the last operator stays, and non-finite gains have no effect
    operator_selector_init(&one, 2, 0.05, 0);
    for (int t = 0; t < 500; t++) operator_selector_update(&one, t % 2, NAN);
    assert_true(one.v[0].dropped != one.v[1].dropped);
}

static void test_disjoint(void **state) {
    (void)state;
    const char *const dev[3] = {"二足す二", "1+1", "3+3"}, *const test[3] = {"9", "二足す二",
                                                                             "1+1"};
    assert_ok(fitness_check_disjoint(dev, 3, test, 1, &err));
    assert_ok(fitness_check_disjoint(NULL, 0, test, 3, &err));
    assert_int_equal(fitness_check_disjoint(dev, 3, test, 3, &err), ERR_MISMATCH);
    assert_non_null(strstr(err.text, "2 of 3 test items are among those of fitness, '二足す二'"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_archive),
        cmocka_unit_test(test_partners),
        cmocka_unit_test(test_cma_evaluations),
        cmocka_unit_test(test_cma_noise),
        cmocka_unit_test(test_search_beats_random),
        cmocka_unit_test(test_model_swarm),
        cmocka_unit_test(test_saved_and_loaded),
        cmocka_unit_test(test_rank_invariance),
        cmocka_unit_test(test_translation_invariance),
        cmocka_unit_test(test_box),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_invalid_states),
        cmocka_unit_test(test_step_adapts),
        cmocka_unit_test(test_combination),
        cmocka_unit_test(test_combination_covers),
        cmocka_unit_test(test_racing),
        cmocka_unit_test(test_race_errors),
        cmocka_unit_test(test_race_refusals),
        cmocka_unit_test(test_winners_curse),
        cmocka_unit_test(test_nothing_to_select),
        cmocka_unit_test(test_operators),
        cmocka_unit_test(test_disjoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
