/*
 * test_lib_simulate: shoal_simulate equals the simulation of the layer below, which `shoal world`
 * prints; options of rules; errors; a cancelled simulation continues with equal rows.
 */
#define _GNU_SOURCE
#include "folder.h"
#include "shoal.h"
#include "world/world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { STEPS = 20, GENERATIONS = 2 };
#define SMALL "agents=4", "steps=20", "size=9", "eval-maps=2", "num-adapters=2", "generations=2"
static const char MODEL[] = "test/models/fry-1";
static char dir[] = "/tmp/test_lib_simulate.XXXXXX";
static struct shoal *s;

static int open_model(void **state) {
    (void)state;
    static const char *const options[] = {"threads=2", "exact=true", NULL};
    s = mkdtemp(dir) ? shoal_open(MODEL, options, NULL) : NULL;
    return s ? 0 : -1;
}

static int close_model(void **state) {
    (void)state;
    shoal_close(s);
    return folder_remove(dir);
}

/* The rows of a call, and its run folder "DIR/NAME/world-…", which is the only one. */
static json_t *simulate(const char *name, const char *extra,
                        const struct shoal_callbacks *callbacks, struct shoal_error *err) {
    char *runs = xasprintf("runs=%s/%s", dir, name);
    const char *const options[] = {runs, SMALL, extra, NULL};
    char *text = shoal_simulate(s, options, callbacks, err);
    json_t *rows = text ? json_loads(text, 0, NULL) : NULL;
    shoal_free(text);
    free(runs);
    return rows;
}

static void assert_rows(const json_t *a, const json_t *b) {
    assert_non_null(a);
    assert_non_null(b);
    if (json_equal(a, b)) return;
    char *x = json_dumps(a, JSON_SORT_KEYS), *y = json_dumps(b, JSON_SORT_KEYS);
    fail_msg("%s\nis not\n%s", x, y);
}

/* the layer below */

struct layer_run {
    json_t *rows;
    char id[64];
};

static void on_begin(void *ctx, const char *id, const struct simulation_options *o,
                     const json_t *manifest) {
    (void)o, (void)manifest;
    struct layer_run *l = ctx;
    snprintf(l->id, sizeof l->id, "%s", id);
}

static void on_row(void *ctx, const json_t *row) {
    struct layer_run *l = ctx;
    json_array_append_new(l->rows, json_deep_copy(row));
}

static void layer_simulate(struct layer_run *out) {
    struct error err = {0};
    struct simulation_run_options o = {0};
    struct world_rules rules = {0};
    options_default(simulation_run_option_rows, &o);
    options_default(simulation_option_rows, &o.simulation);
    options_default(learner_option_rows, &o.simulation.learn);
    free(o.runs);
    o.runs = xasprintf("%s/layer", dir);
    o.simulation.steps = STEPS;
    o.simulation.seed = 1;
    o.simulation.eval_maps = 2;
    o.simulation.n_adapters = 2;
    o.simulation.generations = GENERATIONS;
    if (world_rules_load(&rules, "repaired", &err) != OK) fail_msg("%s", err.text);
    rules.size = 9;
    struct pool *pool = pool_new(2);
    struct model *m = model_open(MODEL, NUMERIC_EXACT, &err);
    const struct simulation_request q = {
        .o = &o, .rules = &rules, .agents = 4, .m = m, .pool = pool};
    out->rows = json_array();
    const struct simulation_run_callbacks cb = {.begin = on_begin, .row = on_row, .ctx = out};
    if (!m || simulation_run(&q, &cb, &err) != OK) fail_msg("%s", err.text);
    model_close(m);
    pool_free(pool);
    world_rules_release(&rules);
    options_release(simulation_run_option_rows, &o);
    options_release(simulation_option_rows, &o.simulation);
    options_release(learner_option_rows, &o.simulation.learn);
}

struct watch {
    int calls, cancel_at; /* 0: never */
    long long total;
    bool continues;
};

static int on_progress(void *ctx, const struct shoal_progress *p) {
    struct watch *w = ctx;
    assert_string_equal(p->task, "simulation");
    assert_memory_equal(p->detail, "delivered ", strlen("delivered "));
    w->total = p->total;
    return ++w->calls == w->cancel_at;
}

static void on_message(void *ctx, const char *text) {
    struct watch *w = ctx;
    w->continues |= strstr(text, "continues after generation") != NULL;
}

/* The id of a run is a hash of the model and of all options. */
static void test_layer(void **state) {
    (void)state;
    struct layer_run layer = {0};
    struct watch w = {0};
    const struct shoal_callbacks callbacks = {on_progress, on_message, &w};
    struct shoal_error err = {0};
    layer_simulate(&layer);
    json_t *rows = simulate("lib", NULL, &callbacks, &err);
    if (!rows) fail_msg("%s", err.text);
    assert_rows(rows, layer.rows);
    assert_int_equal(json_array_size(rows), 2 + 1 + GENERATIONS);
    assert_int_equal(w.total, GENERATIONS * STEPS);
    assert_in_range(w.calls, GENERATIONS, GENERATIONS * STEPS);
    char *path = xasprintf("%s/lib/%s/state.json", dir, layer.id);
    assert_int_equal(access(path, F_OK), 0);
    free(path);
    json_decref(rows);
    json_decref(layer.rows);
}

/* The status of the only run in a folder of runs. */
static void assert_status(const char *runs, const char *status) {
    struct error err;
    char *folder = path_join(dir, runs), *path = path_join(folder, "shoal.db");
    struct store *store = store_open(path, &err);
    assert_non_null(store);
    json_t *list = store_run_list(store, folder, &err);
    assert_int_equal(json_array_size(list), 1);
    assert_string_equal(json_get_string(json_array_get(list, 0), "status"), status);
    json_decref(list);
    store_close(store);
    free(folder);
    free(path);
}

static void test_cancel(void **state) {
    (void)state;
    struct shoal_error err = {0};
    json_t *all = simulate("whole", NULL, NULL, &err);
    struct watch w = {.cancel_at = STEPS + STEPS / 2}; // in generation 2
    const struct shoal_callbacks callbacks = {on_progress, on_message, &w};
    assert_null(simulate("cut", NULL, &callbacks, &err));
    assert_int_equal(err.code, SHOAL_ERR_STATE);
    assert_string_equal(err.text, "cancelled");
    assert_int_equal(w.calls, w.cancel_at);
    assert_false(w.continues);
    assert_status("cut", "paused");
    w = (struct watch){0};
    json_t *rest = simulate("cut", NULL, &callbacks, &err);
    assert_true(w.continues);
    assert_rows(rest, all);
    assert_status("cut", "done");
    json_decref(rest);
    json_decref(all);
}

/* Rules: a world's name, and options over it. */
static void test_rules(void **state) {
    (void)state;
    struct shoal_error err = {0};
    json_t *repaired = simulate("rules", "world=repaired", NULL, &err),
           *food = simulate("rules", "food=0", NULL, &err);
    assert_null(simulate("rules", "world=worlds/maze.yaml", NULL, &err));
    assert_int_equal(err.code, SHOAL_ERR_USAGE);
    assert_non_null(strstr(err.text, "the map says size"));
    const json_t *rule = json_object_get(json_array_get(repaired, 0), "held_out"),
                 *hungry = json_object_get(json_array_get(food, 0), "held_out");
    assert_true(json_get_number(json_object_get(rule, "collected"), "value") > 0);
    assert_true(json_get_number(json_object_get(hungry, "collected"), "value") == 0);
    json_decref(repaired);
    json_decref(food);
}

static void test_errors(void **state) {
    (void)state;
    static const struct {
        const char *option;
        int code;
        const char *text;
    } cases[] = {
        {"stepps=3", SHOAL_ERR_USAGE, "stepps"},
        {"watch=true", SHOAL_ERR_USAGE, "watch"},
        {"dry-run=true", SHOAL_ERR_USAGE, "dry-run"},
        {"agents=65", SHOAL_ERR_USAGE, "agents"},
        {"rules=legacy", SHOAL_ERR_USAGE, "--world legacy"},
        {"world=/nowhere.yaml", SHOAL_ERR_USAGE, "/nowhere"},
        {"learn=guess", SHOAL_ERR_USAGE, "guess"},
        {"adapter=/nowhere", SHOAL_ERR_MISSING, "/nowhere"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct shoal_error err = {0};
        assert_null(simulate("errors", cases[i].option, NULL, &err));
        assert_null(simulate("errors", cases[i].option, NULL, NULL));
        if (err.code != cases[i].code || !strstr(err.text, cases[i].text))
            fail_msg("case %zu: %d %s", i, err.code, err.text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layer),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
