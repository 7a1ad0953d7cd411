/*
 * test_agent_tasks: files of tasks and their mistakes, the report about runs, demonstrations with
 * real results of the tools, traces of sampled runs, and the generated questions about residents.
 */
/* levels: once */
#define _GNU_SOURCE
#include "agent/agent.h"
#include "families/families.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct error err;
static struct model *fry;
static struct engine *engine;
static struct pool *pool;
static const struct grader *exact;
static char folder[] = "/tmp/shoal_agent_tasks_XXXXXX";

static int setup(void **state) {
    (void)state;
    if (!mkdtemp(folder)) return -1;
    fry = model_open("models/fry", NUMERIC_EXACT, &err);
    if (!fry) return -1;
    pool = pool_new(1);
    const struct engine_options o = {.max_seqs = 8, .max_len = 1024, .pool = pool};
    engine = engine_new(fry, &o, &err);
    exact = grader_find("exact", &err);
    return engine && exact ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    engine_free(engine);
    pool_free(pool);
    model_close(fry);
    return folder_remove(folder);
}

static char *file_of(const char *text) {
    char *path = xasprintf("%s/tasks.jsonl", folder);
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    return path;
}

static int tasks_of(const char *text, int limit, struct agent_tasks *out) {
    char *path = file_of(text);
    int rc = agent_tasks_read(path, limit, exact, out, &err);
    free(path);
    return rc;
}

static const char three[] =
    "{\"question\": \"7 * 8 = ?\", \"answer\": 56, \"kind\": \"long\", \"calls\": [{\"name\": "
    "\"calculator\", \"arguments\": {\"expression\": \"7 * 8\"}}], \"reply\": \"answer: 56\"}\n"
    "{\"question\": \"sort: k b x\", \"answer\": [\"b k x\", \"bkx\"], \"calls\": []}\n"
    "{\"messages\": [{\"role\": \"user\", \"content\": \"どこ？\"}], \"answer\": \"東京\"}\n";

static void reads_tasks(void **state) {
    (void)state;
    struct agent_tasks t;
    assert_int_equal(tasks_of(three, 0, &t), OK);
    assert_int_equal(t.n, 3);
    assert_string_equal(t.v[0].kind, "long");
    assert_string_equal(t.v[0].answers.v[0], "56");
    assert_string_equal(t.v[0].reply, "answer: 56");
    assert_int_equal(json_array_size(t.v[0].calls), 1);
    assert_int_equal(t.v[1].answers.n, 2);
    assert_string_equal(t.v[1].reply, "b k x");
    assert_non_null(t.v[1].calls);
    assert_null(t.v[2].calls);
    assert_string_equal(
        json_string_value(json_object_get(json_array_get(t.v[2].messages, 0), "content")),
        "どこ？");
    agent_tasks_release(&t);
    assert_int_equal(tasks_of(three, 2, &t), OK);
    assert_int_equal(t.n, 2);
    agent_tasks_release(&t);
}

static void refuses_wrong_tasks(void **state) {
    (void)state;
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "no tasks"},
        {"{\"answer\": \"1\"}", "line 1: a task needs the text 'question'"},
        {"{\"question\": \"x\"}", "'answer' is a text"},
        {"{\"question\": \"x\", \"answer\": []}", "'answer' is empty"},
        {"{\"question\": \"x\", \"answer\": \"1\", \"calls\": {}}", "'calls' is a list"},
        {"{\"question\": \"x\", \"answer\": \"1\", \"calls\": [{\"name\": \"clock\"}]}",
         "call 1 needs"},
        {"{\"messages\": 3, \"answer\": \"1\"}", "needs the text 'question'"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct agent_tasks t;
        assert_int_equal(tasks_of(cases[i].text, 0, &t), ERR_FORMAT);
        if (!strstr(err.text, cases[i].message)) fail_msg("%s: %s", cases[i].message, err.text);
        agent_tasks_release(&t);
    }
}

static struct agent_options options_of(const struct agent_tools *tools) {
    return (struct agent_options){
        .model = fry, .engine = engine, .tools = tools, .max_tokens = 32, .max_steps = 2};
}

static struct agent_tools calculator(void) {
    struct agent_tools tools = {0};
    const struct agent_tool_options none = {0};
    assert_int_equal(agent_tools_add_builtin(&tools, "calculator", &none, &err), OK);
    return tools;
}

/* The calls of a demonstration have the tool's own result; the trainer reads the line. */
static void demonstrates(void **state) {
    (void)state;
    struct agent_tools tools = calculator();
    struct agent_options o = options_of(&tools);
    struct agent_tasks t;
    struct buf text = {0};
    assert_int_equal(tasks_of(three, 0, &t), OK);
    assert_int_equal(agent_tasks_demonstrate(&t, &o, &text, &err), OK);
    json_t *line = json_loads(text.data, JSON_DISABLE_EOF_CHECK, NULL),
           *messages = json_object_get(line, "messages");
    assert_int_equal(json_array_size(json_object_get(line, "tools")), 1);
    assert_int_equal(json_array_size(messages), 4);
    assert_string_equal(json_get_string(json_array_get(messages, 2), "content"), "56");
    assert_string_equal(json_get_string(json_array_get(messages, 3), "content"), "answer: 56");
    assert_non_null(strstr(text.data, "b k x"));
    assert_null(strstr(text.data, "東京")); /* its calls are unknown */
    json_decref(line);
    text.len = 0;
    o.form = AGENT_REACT;
    assert_int_equal(agent_tasks_demonstrate(&t, &o, &text, &err), OK);
    assert_non_null(
        strstr(text.data, "Action: calculator\\nArguments: {\\\"expression\\\": \\\"7 * 8\\\"}"));
    assert_non_null(strstr(text.data, "Answer: answer: 56"));
    assert_null(strstr(text.data, "\"tools\""));
    agent_tools_release(&tools);
    assert_int_equal(agent_tasks_demonstrate(&t, &o, &text, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "calculator"));
    buf_release(&text);
    agent_tasks_release(&t);
}

/* A run with one call and an answer, as agent_run_all leaves it. */
static struct agent_run run_of(json_t *arguments, const char *answer, double confidence) {
    struct agent_run r = {.answer = xstrdup(answer), .end = AGENT_ANSWERED};
    r.confidence = confidence;
    r.calibrated = NAN;
    r.steps = xcalloc(2, sizeof *r.steps);
    for (int i = arguments ? 0 : 1; i < 2; i++)
        r.steps[r.n_steps++] = (struct agent_step){.thought = xstrdup(""),
                                                   .tool = i == 0 ? 0 : -1,
                                                   .arguments = i == 0 ? arguments : NULL,
                                                   .observation = i == 0 ? xstrdup("56") : NULL,
                                                   .prob = xcalloc(2, sizeof(double))};
    return r;
}

static double share(const json_t *report, const char *name) {
    return json_number_value(json_object_get(json_object_get(report, name), "value"));
}

static void reports_runs(void **state) {
    (void)state;
    struct agent_tools tools = calculator();
    struct agent_tasks t;
    assert_int_equal(tasks_of(three, 0, &t), OK);
    struct agent_run runs[3] = {
        run_of(json_pack("{s:s}", "expression", "7 * 8"), "answer: 56", 0.95),
        run_of(json_pack("{s:s}", "expression", "1"), "bkx", 0.75),
        run_of(NULL, "大阪", 0.45),
    };
    json_t *report = agent_tasks_report(&t, exact, runs, &tools),
           *kinds = json_object_get(report, "kinds");
    assert_float_equal(share(report, "accuracy"), 2.0 / 3, 1e-9);
    assert_float_equal(share(report, "right_calls"), 1, 1e-9);
    assert_float_equal(share(report, "unneeded"), 1, 1e-9);
    assert_float_equal(json_number_value(json_object_get(report, "calibration_error")),
                       (0.05 + 0.25 + 0.45) / 3, 1e-9);
    assert_int_equal(json_integer_value(json_object_get(report, "steps")), 5);
    assert_int_equal(json_integer_value(json_object_get(report, "calls")), 2);
    assert_int_equal(json_object_size(kinds), 2);
    assert_float_equal(share(json_object_get(kinds, "all"), "accuracy"), 0.5, 1e-9);
    json_decref(report);

    /* Another argument is a wrong call, also with a right answer. */
    json_object_set_new(runs[0].steps[0].arguments, "expression", json_string("8 * 7"));
    report = agent_tasks_report(&t, exact, runs, &tools);
    assert_float_equal(share(report, "right_calls"), 0, 1e-9);
    assert_float_equal(share(report, "accuracy"), 2.0 / 3, 1e-9);
    json_decref(report);
    for (int i = 0; i < 3; i++) agent_run_release(&runs[i]);
    agent_tools_release(&tools);
    agent_tasks_release(&t);
}

/* Overconfident answers: those of confidence 0.99 are right in 3 of 4 cases, those of 0.6 in 1
 * of 4. The fit tells these shares; it needs right and wrong answers. */
static void calibrates(void **state) {
    (void)state;
    enum { N = 400 };
    double confidence[N];
    bool right[N], none[N] = {false};
    struct agent_calibration c;
    for (int i = 0; i < N; i++) {
        bool sure = i % 2;
        confidence[i] = sure ? 0.99 : 0.6;
        right[i] = (i / 2 % 4 != 0) == sure;
    }
    assert_int_equal(agent_calibrate(confidence, right, N, &c, &err), OK);
    assert_float_equal(agent_calibrated(&c, 0.99), 0.75, 0.01);
    assert_float_equal(agent_calibrated(&c, 0.6), 0.25, 0.01);
    assert_true(agent_calibrated(&c, 1) < 1 && agent_calibrated(&c, 0) > 0);
    assert_int_equal(agent_calibrate(confidence, none, N, &c, &err), ERR_USAGE);
    assert_int_equal(agent_calibrate(confidence, right, 10, &c, &err), ERR_USAGE);

    /* Answers that a threshold separates have a finite fit. */
    for (int i = 0; i < N; i++) right[i] = i % 2;
    assert_int_equal(agent_calibrate(confidence, right, N, &c, &err), OK);
    assert_true(agent_calibrated(&c, 0.99) > 0.98 && agent_calibrated(&c, 0.6) < 0.02);
}

static int age_call(void *ctx, const json_t *arguments, struct buf *out, struct error *e) {
    (void)ctx, (void)arguments, (void)e;
    buf_puts(out, "{\"age\": 34}");
    return OK;
}

static void add_age_tool(struct agent_tools *tools, const char *name) {
    const struct agent_tool tool = {.name = xstrdup(name),
                                    .description = xstrdup("the age of a person"),
                                    .parameters = json_pack("{s:s,s:{s:{s:s}},s:[s]}", "type",
                                                            "object", "properties", "name", "type",
                                                            "string", "required", "name"),
                                    .call = age_call};
    assert_int_equal(agent_tools_add(tools, &tool, &err), OK);
}

/* Runs of tasks have the bits of single runs; sampled calls differ between seeds, and not
 * otherwise.
 */
static void samples_calls(void **state) {
    (void)state;
    struct agent_tools tools = {0};
    struct agent_options o = options_of(&tools);
    struct agent_tasks t;
    struct buf text = {0};
    enum { N = 24 };
    add_age_tool(&tools, "get_age");
    add_age_tool(&tools, "find_age");
    for (int i = 0; i < N; i++)
        buf_puts(&text, "{\"question\": \"how old is tom?\", \"answer\": \"34\"}\n");
    assert_int_equal(tasks_of(text.data, 0, &t), OK);
    buf_release(&text);
    o.sampling = (struct sampling_params){.temperature = 4, .top_p = 1};
    o.sample_calls = true;
    struct agent_run runs[N] = {{0}}, one = {.messages = t.v[7].messages, .seed = 107};
    assert_int_equal(agent_tasks_run(&t, &o, 100, runs, &err), OK);
    assert_int_equal(agent_run_all(&o, &one, 1, &err), OK);
    assert_true(json_equal(one.conversation, runs[7].conversation));
    int called = 0, different = 0;
    for (int i = 0; i < N; i++) {
        const struct agent_step *first = &runs[i].steps[0];
        json_t *json = agent_run_json(&runs[i], &tools);
        assert_non_null(json); /* at this temperature answers have bytes that are no UTF-8 */
        json_decref(json);
        called += first->tool == 0;
        different += i > 0 && !json_equal(runs[i].conversation, runs[0].conversation);
    }
    if (called == 0 || called == N)
        fail_msg("%d of %d runs called the tool, p %g", called, N, runs[0].steps[0].prob[0]);
    assert_true(different > N / 2);
    agent_run_release(&one);
    for (int i = 0; i < N; i++) agent_run_release(&runs[i]);
    agent_tools_release(&tools);
    agent_tasks_release(&t);
}

/* The calls of the generated questions lead to their answers, with the tools themselves. */
static void residents_are_consistent(void **state) {
    (void)state;
    char *dir = xasprintf("%s/residents", folder), *db = xasprintf("%s/k.db", dir),
         *documents = xasprintf("%s/documents.jsonl", dir),
         *questions = xasprintf("%s/questions.jsonl", dir);
    assert_int_equal(residents_write(SPLIT_TEST, 300, 5, dir, &err), OK);
    struct knowledge *k = knowledge_open(db, true, &err);
    const struct knowledge_options ko = {0};
    struct knowledge_report added;
    assert_int_equal(knowledge_add(k, documents, &ko, &added, &err), OK);
    assert_int_equal(added.documents, 300);
    knowledge_close(k);
    struct agent_tools tools = {0};
    const struct agent_tool_options to = {.knowledge = db};
    assert_int_equal(agent_tools_add_builtin(&tools, "calculator,knowledge", &to, &err), OK);
    struct agent_tasks t;
    assert_int_equal(agent_tasks_read(questions, 0, exact, &t, &err), OK);
    assert_int_equal(t.n, 300);
    int needed = 0;
    for (int i = 0; i < t.n; i++) {
        struct buf result = {0};
        size_t c;
        const json_t *call;
        json_array_foreach (t.v[i].calls, c, call) {
            int tool = agent_tools_find(&tools, json_get_string(call, "name"));
            assert_true(tool >= 0);
            result.len = 0;
            assert_true(
                agent_tool_call(&tools.v[tool], json_object_get(call, "arguments"), &result));
        }
        if (c && !strstr(result.data, t.v[i].answers.v[0]))
            fail_msg("%s: %s", t.v[i].answers.v[0], result.data);
        needed += c > 0;
        buf_release(&result);
    }
    assert_true(needed > 200 && needed < 280);
    agent_tasks_release(&t);
    agent_tools_release(&tools);
    free(dir);
    free(db);
    free(documents);
    free(questions);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_tasks),
        cmocka_unit_test(refuses_wrong_tasks),
        cmocka_unit_test(demonstrates),
        cmocka_unit_test(reports_runs),
        cmocka_unit_test(samples_calls),
        cmocka_unit_test(calibrates),
        cmocka_unit_test(residents_are_consistent),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
