/*
 * test_agent_run: steps of agents with the starter model and tools that know a small table, in
 * three languages; both forms of calls; limits; many runs at once compared with each alone.
 */
/* levels: once */
#define _GNU_SOURCE
#include "agent/agent.h"
#include "fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct error err;
static struct model *fry;

/* tools: ages and friends; each counts its calls */

struct table {
    const char *name, *key, *value[8][2];
    int calls;
};
static struct table ages = {
    "get_age", "age", {{"tom", "34"}, {"mia", "27"}, {"けん", "41"}, {"小明", "52"}}, 0};
static struct table friends = {"get_friend", "friend", {{"tom", "\"mia\""}, {"leo", "\"tom\""}}, 0};

static int table_call(void *ctx, const json_t *arguments, struct buf *out, struct error *e) {
    struct table *t = ctx;
    const char *name = json_string_value(json_object_get(arguments, "name"));
    t->calls++;
    for (int i = 0; t->value[i][0]; i++)
        if (strcmp(t->value[i][0], name) == 0) {
            buf_printf(out, "{\"%s\": %s}", t->key, t->value[i][1]);
            return OK;
        }
    return error_set(e, ERR_MISSING, "there is no person '%s'", name);
}

static void add(struct agent_tools *tools, struct table *t, const char *description) {
    const struct agent_tool tool = {.name = xstrdup(t->name),
                                    .description = xstrdup(description),
                                    .parameters = json_pack("{s:s,s:{s:{s:s}},s:[s]}", "type",
                                                            "object", "properties", "name", "type",
                                                            "string", "required", "name"),
                                    .call = table_call,
                                    .ctx = t};
    t->calls = 0;
    if (agent_tools_add(tools, &tool, &err) != OK) fail_msg("%s", err.text);
}

static struct agent_tools tools_new(void) {
    struct agent_tools tools = {0};
    add(&tools, &ages, "the age of a person");
    add(&tools, &friends, "the friend of a person");
    return tools;
}

static struct engine *engine_of(const struct model *m, int32_t max_len, struct pool *pool) {
    const struct engine_options o = {.max_seqs = 8, .max_len = max_len, .pool = pool};
    struct engine *e = engine_new(m, &o, &err);
    if (!e) fail_msg("%s", err.text);
    return e;
}

static json_t *question(const char *text) {
    return json_pack("[{s:s,s:s}]", "role", "user", "content", text);
}

static int setup(void **state) {
    (void)state;
    fry = model_open("models/fry", NUMERIC_EXACT, &err);
    if (!fry) print_error("%s\n", err.text);
    return fry ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    model_close(fry);
    return 0;
}

/* The starter model knows calls: one step calls the right tool, the next answers with its result.
 */
static void test_native(void **state) {
    (void)state;
    static const struct {
        const char *question, *name, *answer;
    } cases[] = {{"how old is tom?", "tom", "34 years old."},
                 {"けんは何さい？", "けん", "41さいです。"},
                 {"小明几岁？", "小明", "52岁。"}};
    struct engine *e = engine_of(fry, 768, NULL);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct agent_tools tools = tools_new();
        const struct agent_options o = {.model = fry, .engine = e, .tools = &tools};
        json_t *messages = question(cases[i].question);
        struct agent_run r = {.messages = messages};
        assert_int_equal(agent_run_all(&o, &r, 1, &err), OK);
        assert_int_equal(r.end, AGENT_ANSWERED);
        assert_int_equal(r.n_steps, 2);
        assert_int_equal(r.steps[0].tool, 0);
        assert_string_equal(json_string_value(json_object_get(r.steps[0].arguments, "name")),
                            cases[i].name);
        assert_false(r.steps[0].failed);
        assert_int_equal(ages.calls, 1);
        assert_int_equal(friends.calls, 0);
        assert_string_equal(r.answer, cases[i].answer);
        double sum = 0;
        for (int k = 0; k <= tools.n; k++) sum += r.steps[0].prob[k];
        assert_true(fabs(sum - 1) < 1e-4 && r.steps[0].prob[0] > 0.5);
        assert_true(r.confidence > 0.5 && r.confidence <= 1);
        agent_run_release(&r);
        json_decref(messages);
        agent_tools_release(&tools);
    }
    engine_free(e);
}

/* The JSON of a run, without times and without the number of tokens found in the cache. */
static char *run_text(const struct agent_run *r, const struct agent_tools *t) {
    json_t *v = agent_run_json(r, t), *step;
    static const char *const changing[] = {"seconds", "cached"};
    size_t i;
    for (size_t k = 0; k < ARRAY_LEN(changing); k++) json_object_del(v, changing[k]);
    json_array_foreach (json_object_get(v, "steps"), i, step)
        for (size_t k = 0; k < ARRAY_LEN(changing); k++) json_object_del(step, changing[k]);
    char *text = json_dumps(v, JSON_SORT_KEYS);
    json_decref(v);
    return text;
}

/* Runs that advance together, with more threads, give the bits of each alone. */
static void test_batch(void **state) {
    (void)state;
    static const char *const questions[] = {"how old is tom?",
                                            "who is the friend of leo?",
                                            "how old is the friend of tom?",
                                            "sort: k b x",
                                            "小明几岁？",
                                            "how old is sam?"};
    enum { N = ARRAY_LEN(questions), RUNS = 2 * N };
    struct agent_tools tools = tools_new();
    struct pool *pool = pool_new(2);
    struct engine *many = engine_of(fry, 768, pool), *one = engine_of(fry, 768, NULL);
    struct agent_options o = {.model = fry,
                              .engine = many,
                              .tools = &tools,
                              .sampling = {.temperature = 0.8f, .top_p = 1}};
    struct agent_run runs[RUNS] = {0};
    json_t *messages[N];
    for (int i = 0; i < N; i++) messages[i] = question(questions[i]);
    for (int i = 0; i < RUNS; i++)
        runs[i] = (struct agent_run){.messages = messages[i % N], .seed = (uint64_t)i};
    assert_int_equal(agent_run_all(&o, runs, RUNS, &err), OK);
    o.engine = one;
    for (int i = 0; i < RUNS; i++) {
        struct agent_run alone = {.messages = messages[i % N], .seed = (uint64_t)i};
        assert_int_equal(agent_run_all(&o, &alone, 1, &err), OK);
        char *got = run_text(&runs[i], &tools), *want = run_text(&alone, &tools);
        assert_string_equal(got, want);
        free(got);
        free(want);
        agent_run_release(&alone);
        agent_run_release(&runs[i]);
    }
    for (int i = 0; i < N; i++) json_decref(messages[i]);
    engine_free(many);
    engine_free(one);
    pool_free(pool);
    agent_tools_release(&tools);
}

/* A model of random weights in the form REACT: its text has no meaning, but every call is one
 * of a tool with arguments of its schema, and every run ends. */
static void test_react(void **state) {
    (void)state;
    enum { RUNS = 24, STEPS = 3 };
    struct agent_tools tools = tools_new();
    struct engine *e = engine_of(fry, 2048, NULL);
    const struct agent_options o = {.model = fry,
                                    .engine = e,
                                    .tools = &tools,
                                    .form = AGENT_REACT,
                                    .system = "you are a clerk.",
                                    .max_steps = STEPS,
                                    .max_tokens = 48,
                                    .thought_tokens = 16,
                                    .sampling = {.temperature = 2, .top_p = 1}};
    struct agent_run runs[RUNS] = {0};
    json_t *messages = question("how old is tom?");
    for (int i = 0; i < RUNS; i++) runs[i] = (struct agent_run){messages, .seed = (uint64_t)i};
    assert_int_equal(agent_run_all(&o, runs, RUNS, &err), OK);
    int calls = 0;
    for (int i = 0; i < RUNS; i++) {
        const struct agent_run *r = &runs[i];
        assert_true(r->end == AGENT_ANSWERED || r->end == AGENT_STEP_LIMIT);
        assert_non_null(r->answer);
        assert_true(r->n_steps >= 1 && r->n_steps <= STEPS + 1);
        for (int k = 0; k < r->n_steps; k++) {
            double sum = 0;
            for (int p = 0; p <= tools.n; p++) sum += r->steps[k].prob[p];
            assert_true(fabs(sum - 1) < 1e-4);
            assert_true((r->steps[k].tool < 0) == (k == r->n_steps - 1));
            if (r->steps[k].tool < 0) continue;
            calls++;
            assert_true(json_is_string(json_object_get(r->steps[k].arguments, "name")));
        }
        agent_run_release(&runs[i]);
    }
    assert_int_equal(calls, ages.calls + friends.calls);
    json_decref(messages);
    engine_free(e);
    agent_tools_release(&tools);
}

/* A limit of steps or time demands the answer. */
static void test_limits(void **state) {
    (void)state;
    struct agent_tools tools = tools_new();
    struct engine *e = engine_of(fry, 768, NULL);
    struct agent_options o = {
        .model = fry, .engine = e, .tools = &tools, .max_steps = 1, .max_tokens = 32};
    json_t *messages = question("how old is the friend of tom?");
    struct agent_run r = {.messages = messages};
    assert_int_equal(agent_run_all(&o, &r, 1, &err), OK);
    assert_int_equal(r.end, AGENT_STEP_LIMIT);
    assert_int_equal(r.n_steps, 2);
    assert_non_null(r.answer);
    agent_run_release(&r);
    o.max_steps = 8;
    o.max_seconds = 1e-9;
    assert_int_equal(agent_run_all(&o, &r, 1, &err), OK);
    assert_int_equal(r.end, AGENT_TIME_LIMIT);
    assert_int_equal(r.n_steps, 1);
    assert_int_equal(r.steps[0].tool, -1);
    agent_run_release(&r);
    json_decref(messages);
    engine_free(e);
    agent_tools_release(&tools);
}

/* A run without room ends alone; wrong messages are refused. */
static void test_errors(void **state) {
    (void)state;
    struct agent_tools tools = tools_new();
    struct engine *e = engine_of(fry, 512, NULL);
    const struct agent_options o = {.model = fry, .engine = e, .tools = &tools};
    struct buf text = {0};
    for (int i = 0; i < 400; i++) buf_puts(&text, "how old is tom? ");
    json_t *longer = question(text.data), *shorter = question("how old is tom?"),
           *wrong = json_pack("[{s:s}]", "role", "user"), *none = json_array();
    struct agent_run runs[2] = {{.messages = longer}, {.messages = shorter}};
    assert_int_equal(agent_run_all(&o, runs, 2, &err), OK);
    assert_int_equal(runs[0].end, AGENT_FAILED);
    assert_null(runs[0].answer);
    assert_non_null(strstr(runs[0].error, "--max-model-len"));
    assert_int_equal(runs[1].end, AGENT_ANSWERED);
    agent_run_release(&runs[0]);
    agent_run_release(&runs[1]);
    struct agent_run r = {.messages = wrong};
    assert_int_equal(agent_run_all(&o, &r, 1, &err), ERR_USAGE);
    agent_run_release(&r);
    r.messages = none;
    assert_int_equal(agent_run_all(&o, &r, 1, &err), ERR_USAGE);
    agent_run_release(&r);
    buf_release(&text);
    json_decref(longer);
    json_decref(shorter);
    json_decref(wrong);
    json_decref(none);
    engine_free(e);
    agent_tools_release(&tools);
}

/* A failed call is a result that the model reads. */
static void test_failed_call(void **state) {
    (void)state;
    struct agent_tools tools = tools_new();
    struct engine *e = engine_of(fry, 768, NULL);
    const struct agent_options o = {.model = fry, .engine = e, .tools = &tools};
    json_t *messages = question("how old is zoe?");
    struct agent_run r = {.messages = messages};
    assert_int_equal(agent_run_all(&o, &r, 1, &err), OK);
    assert_true(r.n_steps >= 2 && r.steps[0].failed);
    assert_string_equal(r.steps[0].observation, "error: there is no person 'zoe'");
    agent_run_release(&r);
    json_decref(messages);
    engine_free(e);
    agent_tools_release(&tools);
}

/* The tools ask and debate answer as the team itself does, and their tokens count. */
static void test_team(void **state) {
    (void)state;
    static const char text[] = "protocol: brief\nrounds: 2\nchain_of_thought: false\n"
                               "agents: [{name: a}, {name: b}, {name: c}]\n";
    struct pool *pool = pool_new(1);
    struct engine *e = engine_of(fry, 512, pool);
    struct team file = {0};
    if (team_parse(&file, text, strlen(text), "team.yaml", &err) != OK) fail_msg("%s", err.text);
    struct agent_team team = {.team = &file};
    const struct agent_tool_options o = {.team = &team};
    struct agent_tools tools = {0};
    if (agent_tools_add_builtin(&tools, "ask,debate", &o, &err) != OK) fail_msg("%s", err.text);
    team.engine = e; /* known when the tools are open */
    team.model = fry;
    struct buf out = {0};
    int64_t prefilled, generated;
    json_t *sorted = json_pack("{s:s,s:s}", "question", "sort: k b x", "choices",
                               "x k b | b k x | k b x"),
           *one = json_pack("{s:s,s:s}", "question", "sort: k b x", "choices", "b k x |"),
           *free_text = json_pack("{s:s}", "question", "sort: k b x");
    assert_true(agent_tool_call(&tools.v[1], sorted, &out));
    assert_string_equal(out.data, "b k x");
    tools.v[1].spent(tools.v[1].ctx, &prefilled, &generated);
    assert_true(prefilled > 0);
    tools.v[1].spent(tools.v[1].ctx, &prefilled, &generated);
    assert_int_equal(prefilled, 0);
    out.len = 0;
    assert_true(agent_tool_call(&tools.v[0], free_text, &out));
    assert_non_null(strstr(out.data, "b k x"));
    out.len = 0;
    assert_false(agent_tool_call(&tools.v[1], one, &out));
    assert_non_null(strstr(out.data, "at least two choices"));
    json_decref(sorted);
    json_decref(one);
    json_decref(free_text);
    buf_release(&out);
    agent_tools_release(&tools);
    assert_int_equal(agent_tools_add_builtin(&tools, "ask", &(struct agent_tool_options){0}, &err),
                     ERR_USAGE);
    assert_non_null(strstr(err.text, "--team"));
    agent_tools_release(&tools);
    team_release(&file);
    engine_free(e);
    pool_free(pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_native),      cmocka_unit_test(test_batch),
        cmocka_unit_test(test_react),       cmocka_unit_test(test_limits),
        cmocka_unit_test(test_errors),      cmocka_unit_test(test_team),
        cmocka_unit_test(test_failed_call),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
