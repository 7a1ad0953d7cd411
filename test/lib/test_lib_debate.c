/*
 * test_lib_debate: shoal_debate equals the debate of the layers below, which `shoal debate --json`
 * prints; names, choices and tasks; errors; progress and cancelling.
 */
#define _GNU_SOURCE
#include "shoal.h"
#include "swarm/swarm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char MODEL[] = "test/models/fry-1";
static const char *const open_options[] = {"threads=2", "exact=true", NULL};
static const char *const names[] = {"base", "twin", "other"};
static struct shoal *s;
static struct shoal_adapter *adapters[3]; /* the first is NULL: the base model */

static int open_model(void **state) {
    (void)state;
    s = shoal_open(MODEL, open_options, NULL);
    if (!s) return -1;
    const struct shoal_adapter *plain = shoal_adapter_new(s, NULL, NULL);
    for (int i = 1; i < 3; i++) {
        char *seed = xasprintf("seed=%d", i);
        const char *const options[] = {"step=0.3", seed, NULL};
        adapters[i] = shoal_adapter_combine(s, "noise_absolute", &plain, NULL, 1, options, NULL);
        free(seed);
    }
    shoal_adapter_free((struct shoal_adapter *)(uintptr_t)plain);
    return adapters[1] && adapters[2] ? 0 : -1;
}

static int close_model(void **state) {
    (void)state;
    for (int i = 1; i < 3; i++) shoal_adapter_free(adapters[i]);
    shoal_close(s);
    return 0;
}

static const struct shoal_adapter *const *agents(void) {
    return (const struct shoal_adapter *const *)adapters;
}

/* The layers below, on an engine of their own. */
struct session {
    struct pool *pool;
    struct model *model;
    struct engine *engine;
    struct team team;
    struct engine_client engine_client;
    struct llm_client client;
};

static struct adapter *adapter_of(void *ctx, const char *path, struct error *err) {
    (void)ctx, (void)err;
    for (int i = 1; i < 3; i++)
        if (strcmp(path, names[i]) == 0) return (struct adapter *)(uintptr_t)adapters[i];
    return NULL;
}

static void session_open(struct session *x, const char *protocol, const struct debate_request *r) {
    struct error err = {0};
    struct strings list = {(char **)(uintptr_t)names, 3};
    x->pool = pool_new(2);
    x->model = model_open(MODEL, NUMERIC_EXACT, &err);
    x->engine = engine_new(x->model,
                           &(struct engine_options){.max_seqs = 128,
                                                    .max_len = x->model->config.max_seq_len,
                                                    .n_pages = 1024,
                                                    .kv_elem = DTYPE_F16,
                                                    .pool = x->pool},
                           &err);
    if (!x->engine || team_from_flags(&x->team, protocol, &list, &r->personas, &err) != OK ||
        team_load_adapters(&x->team, adapter_of, NULL, &err) != OK ||
        debate_request_apply(r, &x->team.options, &err) != OK)
        fail_msg("%s", err.text);
    x->engine_client = (struct engine_client){.engine = x->engine, .model = x->model};
    x->client = engine_client_as_llm(&x->engine_client);
}

static void session_close(struct session *x) {
    team_release(&x->team);
    engine_free(x->engine);
    model_close(x->model);
    pool_free(x->pool);
}

/* The request of options that are "name=value". */
static struct debate_request request_parse(const char *const *options) {
    struct debate_request r;
    struct strings flags = {0}, positional = {0};
    struct error err = {0};
    for (; *options; options++) {
        char *flag = xasprintf("--%s", *options);
        strings_add(&flags, flag);
        free(flag);
    }
    options_default(debate_request_rows, &r);
    if (options_parse(debate_request_rows, &r, flags.n, flags.v, &positional, &err) != OK)
        fail_msg("%s", err.text);
    strings_release(&flags);
    return r;
}

static void assert_json(char *text, json_t *expected, const struct shoal_error *err) {
    if (!text) fail_msg("%s", err->text);
    json_t *v = json_loads(text, 0, NULL);
    if (!json_equal(v, expected)) {
        char *other = json_dumps(expected, 0);
        fail_msg("%s\nis not\n%s", text, other);
    }
    json_decref(v);
    json_decref(expected);
    shoal_free(text);
}

static void assert_topic(const char *protocol, const char *const *options) {
    struct error err = {0};
    struct shoal_error lib_err = {0};
    struct debate_request r = request_parse(options);
    struct debate_questions q;
    struct session x = {0};
    struct debate d;
    session_open(&x, protocol, &r);
    if (debate_questions_open(&r, &q, &err) != OK ||
        debate_run(&x.client, x.team.v, 3, q.topic, 1, &x.team.options, &d, NULL, &err) != OK)
        fail_msg("%s", err.text);
    char *text = shoal_debate(s, agents(), names, 3, options, NULL, &lib_err);
    assert_json(text, debate_transcript_json(&d, x.team.v, q.topic, 0), &lib_err);
    debate_release(&d);
    debate_questions_release(&q);
    options_release(debate_request_rows, &r);
    session_close(&x);
}

static void test_topic(void **state) {
    (void)state;
    assert_topic("brief",
                 (const char *const[]){"topic=pick the smallest of 41, 3, 907", "choices=answer: 3",
                                       "choices=answer: 41", "choices=answer: 907", "rounds=3",
                                       "max-tokens=24", "personas=You trust the first answer.",
                                       "personas=You check every answer.", NULL});
    assert_topic("brief", (const char *const[]){"topic=3 + 4", "grader=number", "max-tokens=16",
                                                "temperature=1", "seed=9", NULL});
    assert_topic("revise",
                 (const char *const[]){"topic=pick the smallest of 41, 3, 907", "choices=answer: 3",
                                       "choices=answer: 41", "protocol=revise", "vote=borda",
                                       "max-tokens=16", NULL});
}

static void test_tasks(void **state) {
    (void)state;
    static const char *const options[] = {"tasks=pick,route",      "n=20",      "rounds=2",
                                          "max-tokens=24",         "samples=4", "credit=vote",
                                          "chain-of-thought=true", NULL};
    struct error err = {0};
    struct shoal_error lib_err = {0};
    struct debate_request r = request_parse(options);
    struct debate_questions q;
    struct session x = {0};
    json_t *expected = json_array();
    session_open(&x, "brief", &r);
    if (debate_questions_open(&r, &q, &err) != OK) fail_msg("%s", err.text);
    assert_int_equal(q.n_tasks, 2);
    for (int i = 0; i < q.n_tasks; i++)
        json_array_append_new(expected,
                              debate_request_run_task(&r, &x.client, &x.team, &q.tasks[i], &err));
    assert_int_equal(json_array_size(expected), 2);
    assert_json(shoal_debate(s, agents(), names, 3, options, NULL, &lib_err), expected, &lib_err);
    debate_questions_release(&q);
    options_release(debate_request_rows, &r);
    session_close(&x);
}

/* Adapters NULL: all agents are the base model. An agent's name, which its seed depends on, is the
 * caller's, even one that looks like a path or "base". */
static void test_names(void **state) {
    (void)state;
    static const char *const paths[] = {"a/b", "a/c"};
    static const char *const options[] = {"topic=3 or 4?", "choices=3", "choices=4", "max-tokens=8",
                                          NULL};
    const struct shoal_adapter *const none[] = {NULL, NULL}, *const twin[] = {adapters[1]};
    static const char *const base[] = {"base"};
    char *text = shoal_debate(s, NULL, paths, 2, options, NULL, NULL),
         *same = shoal_debate(s, none, paths, 2, options, NULL, NULL);
    assert_non_null(strstr(text, "\"name\":\"a/c\""));
    assert_string_equal(text, same);
    shoal_free(text);
    shoal_free(same);
    text = shoal_debate(s, twin, base, 1, options, NULL, NULL);
    same = shoal_debate(s, NULL, base, 1, options, NULL, NULL);
    assert_string_not_equal(text, same); // the adapter named "base" is used
    shoal_free(text);
    shoal_free(same);
}

static void test_errors(void **state) {
    (void)state;
    static const char *const twice[] = {"a", "a", "b"}, *const unnamed[] = {"a", NULL, "b"};
    static const struct {
        const char *const *names;
        int n;
        const char *options[3];
        int code;
        const char *text;
    } cases[] = {
        {names, 3, {"topik=x"}, SHOAL_ERR_USAGE, "topik"},
        {names, 3, {"team=x"}, SHOAL_ERR_USAGE, "team"},
        {names, 3, {NULL}, SHOAL_ERR_USAGE, "--topic"},
        {names, 3, {"topic=x", "tasks=pick"}, SHOAL_ERR_USAGE, "one of"},
        {names, 3, {"topic=x", "choices=1"}, SHOAL_ERR_USAGE, "2 to"},
        {names, 3, {"topic=x", "vote=dice"}, SHOAL_ERR_USAGE, "dice"},
        {names, 3, {"topic=x", "grader=dice"}, SHOAL_ERR_USAGE, "dice"},
        {names, 3, {"tasks=pick", "credit=dice"}, SHOAL_ERR_USAGE, "dice"},
        {names, 3, {"topic=x", "rounds=0"}, SHOAL_ERR_USAGE, "one round"},
        {names, 3, {"topic=x", "protocol=/nowhere"}, SHOAL_ERR_MISSING, "/nowhere"},
        {names, 3, {"tasks=/nowhere.jsonl"}, SHOAL_ERR_MISSING, "/nowhere"},
        {names, 0, {"topic=x"}, SHOAL_ERR_USAGE, "1 to 17"},
        {names, 18, {"topic=x"}, SHOAL_ERR_USAGE, "1 to 17"},
        {NULL, 3, {"topic=x"}, SHOAL_ERR_USAGE, "names"},
        {twice, 3, {"topic=x"}, SHOAL_ERR_USAGE, "'a'"},
        {unnamed, 3, {"topic=x"}, SHOAL_ERR_USAGE, "agent 1"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const char *const options[] = {cases[i].options[0], cases[i].options[1], NULL};
        struct shoal_error err = {0};
        assert_null(shoal_debate(s, agents(), cases[i].names, cases[i].n, options, NULL, &err));
        assert_null(shoal_debate(s, agents(), cases[i].names, cases[i].n, options, NULL, NULL));
        if (err.code != cases[i].code || !strstr(err.text, cases[i].text))
            fail_msg("case %zu: %d %s", i, err.code, err.text);
    }
}

struct watch {
    int calls, cancel_at; /* 0: never */
    long long done;
    char task[32];
};

static int on_progress(void *ctx, const struct shoal_progress *p) {
    struct watch *w = ctx;
    w->calls++;
    assert_true(p->done >= 0 && p->seconds >= 0);
    w->done = p->done;
    snprintf(w->task, sizeof w->task, "%s", p->task);
    return w->calls == w->cancel_at;
}

static void assert_cancelled(const char *const *options, const char *task) {
    struct watch all = {0}, first = {.cancel_at = 1};
    struct shoal_callbacks callbacks = {.progress = on_progress, .ctx = &all};
    struct shoal_error err = {0};
    char *text = shoal_debate(s, agents(), names, 3, options, &callbacks, &err);
    if (!text) fail_msg("%s", err.text);
    assert_true(all.calls > 1 && all.done > 0);
    assert_string_equal(all.task, task);
    callbacks.ctx = &first;
    assert_null(shoal_debate(s, agents(), names, 3, options, &callbacks, &err));
    assert_int_equal(err.code, SHOAL_ERR_STATE);
    assert_string_equal(err.text, "cancelled");
    assert_int_equal(first.calls, 1);
    char *again = shoal_debate(s, agents(), names, 3, options, NULL, &err);
    assert_string_equal(again, text);
    shoal_free(text);
    shoal_free(again);
}

static void test_cancel(void **state) {
    (void)state;
    assert_cancelled((const char *const[]){"topic=3 or 4?", "choices=3", "choices=4",
                                           "max-tokens=8", "rounds=3", NULL},
                     "debate");
    assert_cancelled(
        (const char *const[]){"tasks=pick,route", "n=4", "samples=2", "max-tokens=8", NULL},
        "route");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_topic),  cmocka_unit_test(test_tasks),  cmocka_unit_test(test_names),
        cmocka_unit_test(test_errors), cmocka_unit_test(test_cancel),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
