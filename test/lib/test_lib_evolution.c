/*
 * test_lib_evolution: evolution by include/shoal.h: shoal_evolve equals the run of the layer below
 * it, also after it was cancelled and resumed; a population equals struct population with the same
 * fitness, checks scores, and is unchanged after an error.
 */
/* levels: once */
#define _GNU_SOURCE
#include "evolve/evolve.h"
#include "folder.h"
#include "lib/internal.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define OPTIONS(...)                                                                               \
    (const char *const[]) {                                                                        \
        __VA_ARGS__, NULL                                                                          \
    }
enum { FOUNDERS = 3, ITEMS = 12, GENERATIONS = 3 };

static struct shoal *s;
static struct shoal_error err;
static char root[64], recipe[80], runs[80];
static struct shoal_adapter *founders[FOUNDERS];
static const char *const names[FOUNDERS] = {"ann", "bea", "cid"};

static const char recipe_text[] =
    "model: test/models/fry-1\n"
    "seed: 5\n"
    "personas:\n"
    "  - critic=data/personas/critic.jsonl\n"
    "  - explorer=data/personas/explorer.jsonl\n"
    "tasks: [pick]\n"
    "rounds: 0\n"
    "chain_of_thought: false\n"
    "test_items: 8\n"
    "curve: false\n"
    "train: {r: 2, max_steps: 3, lr: 0.01, bsz: 2, grad_accum: 1, save_steps: 1}\n"
    "evolve: {generations: 2, population: 3, elites: 1, rank: 2}\n"
    "fitness: {items: 8}\n";

static void assert_ok(int rc) {
    if (rc != SHOAL_OK) fail_msg("%s", err.text);
}

static void assert_error(int rc, int code, const char *text) {
    if (rc != code || err.code != code || !strstr(err.text, text))
        fail_msg("code %d, '%s' instead of code %d, '%s'", rc, err.text, code, text);
}

/* Founders that differ: noise on a trained adapter. */
static int make_founders(void) {
    static const struct shoal_message talk[] = {{"user", "order down: b y g"},
                                                {"assistant", "answer: y g b"}};
    struct shoal_adapter *a = shoal_adapter_new(s, OPTIONS("r=2"), &err);
    const struct shoal_adapter *list = a, *parent;
    struct shoal_trainer *t = a ? shoal_trainer_new(s, &list, 1, NULL, &err) : NULL;
    if (!t || shoal_trainer_add(t, 0, talk, 2, 1, &err) != 0) return -1;
    if (shoal_trainer_update(t, 0.05, NULL, &err) != 0) return -1;
    parent = founders[0] = shoal_trainer_adapter(t, 0, &err);
    founders[1] = shoal_adapter_combine(s, "noise", &parent, NULL, 1, OPTIONS("seed=1"), &err);
    founders[2] = shoal_adapter_combine(s, "rotate", &parent, NULL, 1, OPTIONS("seed=2"), &err);
    shoal_trainer_free(t);
    shoal_adapter_free(a);
    return founders[1] && founders[2] ? 0 : -1;
}

static int set_up(void **state) {
    (void)state;
    struct error e;
    snprintf(root, sizeof root, "/tmp/shoal-test-lib-evolution-%d", (int)getpid());
    snprintf(recipe, sizeof recipe, "%s/r.yaml", root);
    snprintf(runs, sizeof runs, "runs=%s/runs", root);
    folder_remove(root);
    s = shoal_open("test/models/fry-1", OPTIONS("exact=true", "threads=2"), &err);
    if (!s || dir_make(root, &e) != OK) return -1;
    if (file_write(recipe, recipe_text, strlen(recipe_text), &e) != OK) return -1;
    return make_founders();
}

static int tear_down(void **state) {
    (void)state;
    for (int i = 0; i < FOUNDERS; i++) shoal_adapter_free(founders[i]);
    shoal_close(s);
    return folder_remove(root);
}

static json_t *parse(char *text) {
    struct error e;
    if (!text) fail_msg("%s", err.text);
    json_t *v = json_parse(text, strlen(text), "result", &e);
    assert_non_null(v);
    shoal_free(text);
    return v;
}

/* runs */

struct watcher {
    int calls, stop_at, messages;
};

static int on_progress(void *ctx, const struct shoal_progress *p) {
    struct watcher *w = ctx;
    assert_true(p->done <= p->total);
    return ++w->calls == w->stop_at;
}

static void on_message(void *ctx, const char *text) {
    struct watcher *w = ctx;
    assert_non_null(text);
    w->messages++;
}

static json_t *layer_run(const char *id) {
    struct evolve_recipe o;
    struct error e = {0};
    const struct evolve_env env = {
        .pool = s->pool, .cls = NUMERIC_EXACT, .root = runs + strlen("runs="), .find = xstrdup};
    assert_int_equal(evolve_recipe_load(&o, recipe, &e), OK);
    json_t *v = evolve_run_execute(&env, &o, id, &e);
    if (!v) fail_msg("%s", e.text);
    evolve_recipe_release(&o);
    return v;
}

static void assert_same_run(const json_t *a, const json_t *b) {
    assert_true(json_object_size(json_object_get(a, "adapters")) > 3);
    assert_true(json_equal(json_object_get(a, "adapters"), json_object_get(b, "adapters")));
    assert_true(json_equal(json_object_get(a, "generations"), json_object_get(b, "generations")));
    assert_true(json_equal(json_object_get(a, "table"), json_object_get(b, "table")));
}

static void test_evolve(void **state) {
    (void)state;
    struct watcher w = {0};
    const struct shoal_callbacks callbacks = {on_progress, on_message, &w};
    json_t *layer = layer_run("layer"),
           *v = parse(shoal_evolve(recipe, OPTIONS(runs, "id=whole", "exact=1"), &callbacks, &err));
    assert_string_equal(json_get_string(v, "run"), "whole");
    assert_same_run(v, layer);
    assert_true(w.calls > 5 && w.messages > 0);
    json_decref(v);
    /* cancelled in the founders' training, and when generations are bred */
    for (int stop_at = 2; stop_at <= 5; stop_at += 3) {
        char id[32], option[40];
        struct watcher stopped = {.stop_at = stop_at};
        const struct shoal_callbacks stop = {on_progress, NULL, &stopped};
        snprintf(id, sizeof id, "parts%d", stop_at);
        snprintf(option, sizeof option, "id=%s", id);
        assert_null(
            shoal_evolve(recipe, OPTIONS(runs, option, "exact=1", "threads=1"), &stop, &err));
        assert_int_equal(err.code, SHOAL_ERR_STATE);
        v = parse(shoal_evolve_resume(id, OPTIONS(runs, "threads=2"), NULL, &err));
        assert_same_run(v, layer);
        json_decref(v);
    }
    json_decref(layer);
    v = parse(shoal_evolve(recipe, OPTIONS(runs, "id=other", "exact=1", "seed=6"), NULL, &err));
    assert_int_equal(json_integer_value(json_object_get(json_object_get(v, "manifest"), "seed")),
                     6);
    json_decref(v);
}

static void assert_refused(const char *path, const char *const *options, int code,
                           const char *text) {
    assert_null(shoal_evolve(path, options, NULL, &err));
    assert_error(err.code, code, text);
}

static void test_evolve_errors(void **state) {
    (void)state;
    assert_refused(recipe, OPTIONS(runs, "id=../x"), SHOAL_ERR_USAGE, "'../x'");
    assert_refused(recipe, OPTIONS(runs, "ids=x"), SHOAL_ERR_USAGE, "'--ids'");
    assert_refused(recipe, OPTIONS(runs, "exact=1", "fast=1"), SHOAL_ERR_USAGE, "exclude");
    assert_refused("/nowhere.yaml", OPTIONS(runs), SHOAL_ERR_MISSING, "nowhere");
    assert_refused(NULL, NULL, SHOAL_ERR_USAGE, "recipe");
    assert_null(shoal_evolve_resume("none", OPTIONS(runs), NULL, &err));
    assert_error(err.code, SHOAL_ERR_MISSING, "none");
    assert_null(shoal_evolve_resume("../x", OPTIONS(runs), NULL, &err));
    assert_error(err.code, SHOAL_ERR_MISSING, "../x");
    assert_null(shoal_evolve_resume("none", OPTIONS(runs, "seed=1"), NULL, &err));
    assert_error(err.code, SHOAL_ERR_USAGE, "seed");
    assert_null(shoal_evolve_resume(NULL, NULL, NULL, NULL));
}

/* populations */

/* The score of an adapter for an item: a number that depends on both, 0 to 1. */
static double score_of(const struct adapter *a, int item) {
    char *key = xasprintf("%s %d", a->hash, item);
    double v = (double)(hash_fnv1a(key, strlen(key)) % 1000) / 999;
    free(key);
    return v;
}

struct scorer {
    int calls, n_last, result;
    double first; /* score of the first item, or NAN: as score_of */
    bool lazy;    /* sets no scores */
};

static int fitness(void *ctx, int n, const struct shoal_adapter *const *adapters,
                   const char *const *list, int n_items, double *scores) {
    struct scorer *f = ctx;
    f->calls++;
    f->n_last = n;
    for (int i = 0; i < n && !f->lazy; i++) {
        assert_true(strlen(list[i]) > 0);
        for (int k = 0; k < n_items; k++)
            scores[i * n_items + k] = score_of(adapter_unwrap(adapters[i]), k);
    }
    if (!isnan(f->first)) scores[0] = f->first;
    return f->result;
}

static int layer_fitness(void *ctx, int generation, struct candidate *c, int n, int n_reevaluated,
                         struct evaluation *out, struct error *e) {
    (void)ctx, (void)generation, (void)n_reevaluated, (void)e;
    out->n_items = ITEMS;
    out->scores = xcalloc((size_t)n * ITEMS, sizeof *out->scores);
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < ITEMS; k++) out->scores[i * ITEMS + k] = score_of(c[i].adapter, k);
        c[i].performance = stats_mean_interval(out->scores + i * ITEMS, ITEMS);
        c[i].n_items = ITEMS;
    }
    return OK;
}

static struct shoal_population *new_population(const char *const *options) {
    struct shoal_population *p = shoal_population_new(
        s, (const struct shoal_adapter *const *)founders, names, FOUNDERS, options, &err);
    if (!p) fail_msg("%s", err.text);
    return p;
}

#define POPULATION "population=5", "elites=2", "rank=2", "seed=9", "crossovers=delta,slerp"

static void assert_same_generation(const struct shoal_population *p, const struct population *q) {
    assert_int_equal(shoal_population_size(p), q->n);
    for (int i = 0; i < q->n; i++) {
        assert_string_equal(shoal_population_name(p, i), q->c[i].name);
        assert_string_equal(shoal_adapter_hash(shoal_population_adapter(p, i)),
                            q->c[i].adapter->hash);
    }
}

/* The information has the candidates, fittest first. */
static void check_info(const struct shoal_population *p, int generation) {
    json_t *v = parse(shoal_population_info(p)), *candidates = json_object_get(v, "candidates"), *c;
    double last = 1;
    size_t i;
    assert_int_equal(json_integer_value(json_object_get(v, "generation")), generation);
    assert_int_equal(json_array_size(candidates), shoal_population_size(p));
    json_array_foreach (candidates, i, c) {
        double value = json_number_value(json_object_get(json_object_get(c, "fitness"), "value"));
        assert_string_equal(json_get_string(c, "name"), shoal_population_name(p, (int)i));
        assert_true(value <= last && value >= 0);
        last = value;
    }
    assert_true(json_array_size(json_object_get(v, "operators")) > 3);
    json_decref(v);
}

static void test_population(void **state) {
    (void)state;
    struct evolve_options o;
    const struct fitness_options f = {.performance = 1};
    const struct fitness_function function = {NULL, layer_fitness};
    struct population *q = xcalloc(1, sizeof *q);
    struct scorer scorer = {.first = NAN};
    struct error e;
    struct shoal_population *p = new_population(OPTIONS(POPULATION));
    assert_int_equal(
        call_options_parse(evolve_option_rows, &o,
                           OPTIONS("population=5", "elites=2", "rank=2", "crossovers=delta,slerp"),
                           &e),
        OK);
    o.target_step_divergence = 0; // needs distances of behaviour
    assert_int_equal(
        population_init(q, &o, &f, 9, (struct adapter *const *)founders, names, FOUNDERS, &e), OK);
    for (int g = 0; g <= GENERATIONS; g++) {
        if (g > 0) {
            assert_ok(shoal_population_breed(p, &err));
            assert_int_equal(population_breed(q, &e), OK);
        }
        assert_null(shoal_population_info(p));
        assert_same_generation(p, q);
        int n_all = q->n + q->n_reevaluated;
        assert_ok(shoal_population_evaluate(p, fitness, &scorer, ITEMS, &err));
        assert_int_equal(population_evaluate(q, &function, &e), OK);
        assert_int_equal(scorer.n_last, n_all);
        assert_same_generation(p, q);
        check_info(p, g);
    }
    assert_int_equal(scorer.calls, GENERATIONS + 1);
    assert_null(shoal_population_name(p, 5));
    assert_null(shoal_population_name(p, -1));
    assert_null(shoal_population_adapter(p, 5));
    population_release(q);
    free(q);
    options_release(evolve_option_rows, &o);
    shoal_population_free(p);
}

static void assert_not_made(const struct shoal_adapter *const *list, const char *const *labels,
                            int n, const char *const *options, const char *text) {
    assert_null(shoal_population_new(s, list, labels, n, options, &err));
    assert_error(err.code, SHOAL_ERR_USAGE, text);
}

static void test_population_errors(void **state) {
    (void)state;
    const struct shoal_adapter *const *all = (const struct shoal_adapter *const *)founders;
    const struct shoal_adapter *gap[] = {founders[0], NULL};
    assert_not_made(all, names, 1, NULL, "2 to");
    assert_not_made(gap, names, 2, NULL, "founder 1");
    assert_not_made(all, OPTIONS("ann", "ann"), 2, NULL, "two founders are named 'ann'");
    assert_not_made(all, OPTIONS("ann", "g1c0"), 2, NULL, "'g1c0'");
    assert_not_made(all, OPTIONS("ann", "\xff"), 2, NULL, "UTF-8");
    assert_not_made(all, names, 3, OPTIONS("generations=3"), "generations");
    assert_not_made(all, names, 3, OPTIONS("crossovers=sl"), "sl");
    assert_not_made(all, names, 3, OPTIONS("elites=9", "population=4"), "elites");
    assert_not_made(NULL, NULL, 3, NULL, "founders");

    struct shoal_adapter *dora = shoal_adapter_new(s, OPTIONS("use-dora=1"), &err);
    const struct shoal_adapter *mixed[] = {founders[0], dora};
    assert_null(shoal_population_new(s, mixed, names, 2, NULL, &err));
    assert_int_equal(err.code, SHOAL_ERR_MISMATCH);
    shoal_adapter_free(dora);

    struct shoal_population *p = new_population(OPTIONS(POPULATION)),
                            *whole = new_population(OPTIONS(POPULATION));
    struct scorer high = {.first = 1.5}, lazy = {.first = NAN, .lazy = true},
                  failing = {.first = NAN, .result = 3}, good = {.first = NAN};
    for (int g = 0; g < 2; g++) {
        assert_error(shoal_population_breed(p, &err), SHOAL_ERR_STATE, "evaluate");
        assert_error(shoal_population_evaluate(p, fitness, &high, ITEMS, &err), SHOAL_ERR_USAGE,
                     "has score 1.5 for item 0");
        assert_error(shoal_population_evaluate(p, fitness, &lazy, ITEMS, &err), SHOAL_ERR_NUMERIC,
                     "score nan");
        assert_error(shoal_population_evaluate(p, fitness, &failing, ITEMS, &err), SHOAL_ERR_STATE,
                     "returned 3");
        assert_error(shoal_population_evaluate(p, fitness, &good, 0, &err), SHOAL_ERR_USAGE,
                     "items");
        assert_error(shoal_population_evaluate(p, NULL, NULL, 1, &err), SHOAL_ERR_USAGE, "fitness");
        assert_ok(shoal_population_evaluate(p, fitness, &good, ITEMS, &err));
        assert_error(shoal_population_evaluate(p, fitness, &good, ITEMS, &err), SHOAL_ERR_STATE,
                     "breed");
        assert_ok(shoal_population_evaluate(whole, fitness, &good, ITEMS, &err));
        for (int i = 0; i < shoal_population_size(p); i++)
            assert_string_equal(shoal_adapter_hash(shoal_population_adapter(p, i)),
                                shoal_adapter_hash(shoal_population_adapter(whole, i)));
        assert_ok(shoal_population_breed(p, &err));
        assert_ok(shoal_population_breed(whole, &err));
    }
    shoal_population_free(p);
    shoal_population_free(whole);
    shoal_population_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_evolve),
        cmocka_unit_test(test_evolve_errors),
        cmocka_unit_test(test_population),
        cmocka_unit_test(test_population_errors),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
