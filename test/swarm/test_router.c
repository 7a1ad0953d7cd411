/*
 * test_router: routers and their fit (swarm/router.c, router_fit.c, team_fit.c), with made-up
 * answers and a scripted client.
 *
 * In the separable case each of three agents answers one kind of question, of which one is in
 * Japanese and one in Chinese. The minimum of a fit is checked by its gradient, which the test
 * computes from the definition.
 */
/* levels: once */
#define _GNU_SOURCE
#include "swarm/internal.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { N = 240, AGENTS = 3 };
static struct error err;
static char *questions[N];
static uint8_t right[AGENTS * N];

static int quiet(void **state) {
    (void)state;
    log_quiet = true;
    return 0;
}

static int kind_of(const char *question) {
    return strstr(question, "りんご") ? 1 : strstr(question, "苹果") ? 2 : 0;
}

/* Questions of three kinds, with numbers that differ. */
static int questions_init(void **state) {
    static const char *const texts[] = {"How many apples are %d and %d apples?",
                                        "りんごが%d個あります。%d個もらうと何個ですか？",
                                        "有%d个苹果，再买%d个，一共几个？"};
    for (int i = 0; i < N; i++) questions[i] = xasprintf(texts[i % 3], 3 + i, 7 + 11 * i);
    return quiet(state);
}

static int questions_free(void **state) {
    (void)state;
    for (int i = 0; i < N; i++) free(questions[i]);
    return 0;
}

static void separable_init(void) {
    for (int a = 0; a < AGENTS; a++)
        for (int i = 0; i < N; i++) right[a * N + i] = kind_of(questions[i]) == a;
}

static struct router_fit fit(struct pool *pool) {
    const struct router_data d = {(const char *const *)questions, right, N, AGENTS};
    struct router_fit f;
    router_fit(&d, pool, &f);
    for (int a = 0; a < AGENTS; a++) f.router->names[a] = xasprintf("花%d", a);
    return f;
}

static int64_t right_routes(const int *route) {
    int64_t n = 0;
    for (int i = 0; i < N; i++) n += right[route[i] * N + i];
    return n;
}

static void test_separable(void **state) {
    (void)state;
    separable_init();
    struct router_fit f = fit(NULL);
    double prob[AGENTS];
    assert_int_equal(right_routes(f.route), N);
    static const char *const new[] = {"How many apples are 5000 and 6 apples?",
                                      "りんごを9個もらうと、何個ですか？",
                                      "有９个苹果，一共几个？"};
    for (int k = 0; k < AGENTS; k++) {
        assert_int_equal(router_route(f.router, new[k], prob), k);
        for (int a = 0; a < AGENTS; a++) assert_true(a == k || prob[a] < prob[k]);
    }
    router_fit_release(&f);
}

/* Whole texts, empty ones and bytes that are not UTF-8 have features. A task's frame adds no
 * feature. */
static void test_features(void **state) {
    (void)state;
    static const char *const texts[] = {"", " ", "a", "\xff\xfe", "花", "１２ 34"};
    struct question_features f, g;
    for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
        double squares = 0;
        question_features_init(&f, texts[i]);
        for (int k = 0; k < f.n; k++) {
            assert_in_range(f.v[k].index, 1, ROUTER_DIM);
            assert_true(k == 0 || f.v[k].index > f.v[k - 1].index);
            squares += (double)f.v[k].value * (double)f.v[k].value;
        }
        assert_true(f.n == 0 || fabs(squares - 1) < 1e-6);
        free(f.v);
    }
    question_features_init(&f, "Question: 12 + 7 = ?\nAnswer:");
    question_features_init(&g, "45 + 1 = ?");
    assert_int_equal(f.n, g.n);
    assert_memory_equal(f.v, g.v, (size_t)f.n * sizeof *f.v);
    free(f.v);
    free(g.v);
}

/* Right answers that depend on nothing in the question. */
static void noise_init(void) {
    static const uint32_t percent[AGENTS] = {60, 70, 55};
    struct rng rng = rng_make(2, RNG_TEST, 0, 0);
    for (int i = 0; i < AGENTS * N; i++) right[i] = rng_below(&rng, 100) < percent[i / N];
}

/* The gradient of Σ log-loss + l2/2 |w|² at the weights is 0. */
static void test_fit_is_the_minimum(void **state) {
    (void)state;
    noise_init();
    struct router_fit f = fit(NULL);
    for (int a = 0; a < AGENTS; a++) {
        const double *w = f.router->weights + (size_t)a * ROUTER_WEIGHTS;
        double g[ROUTER_WEIGHTS], squares = 0;
        for (int j = 0; j < ROUTER_WEIGHTS; j++) g[j] = j ? f.router->l2 * w[j] : 0;
        g[0] += 1 / (1 + exp(-w[0])) - 0.5;
        for (int i = 0; i < N; i++) {
            struct question_features x;
            double z = w[0];
            question_features_init(&x, questions[i]);
            for (int k = 0; k < x.n; k++) z += w[x.v[k].index] * (double)x.v[k].value;
            double residual = 1 / (1 + exp(-z)) - right[a * N + i];
            g[0] += residual;
            for (int k = 0; k < x.n; k++) g[x.v[k].index] += residual * (double)x.v[k].value;
            free(x.v);
        }
        for (int j = 0; j < ROUTER_WEIGHTS; j++) squares += g[j] * g[j];
        assert_true(sqrt(squares) < 1e-3);
    }
    router_fit_release(&f);
}

/* A second fit, also by several threads, has the same bits. */
static void test_same_bits(void **state) {
    (void)state;
    noise_init();
    struct pool *pool = pool_new(3);
    struct router_fit f[3] = {fit(NULL), fit(NULL), fit(pool)};
    for (int k = 1; k < 3; k++) {
        assert_memory_equal(f[k].route, f[0].route, N * sizeof *f[0].route);
        assert_memory_equal(f[k].fold_l2, f[0].fold_l2, sizeof f[0].fold_l2);
        assert_memory_equal(f[k].router->weights, f[0].router->weights,
                            AGENTS * ROUTER_WEIGHTS * sizeof(double));
    }
    for (int k = 0; k < 3; k++) router_fit_release(&f[k]);
    pool_free(pool);
}

/* The questions of one kind, which only agent 2 answers, are all in one fold. So the router without
 * this fold has no reason to choose agent 2, and the final router has. */
static void test_folds_are_left_out(void **state) {
    (void)state;
    enum { FOLD = 2 };
    static const char *const formats[] = {"apples %d", "有%d个苹果", "りんごは%d"};
    char *texts[N];
    struct router_fit f;
    for (int i = 0, number = 0; i < N; number++) {
        int kind = i % 3;
        texts[i] = xasprintf(formats[kind], number);
        for (int a = 0; a < AGENTS; a++) right[a * N + i] = a == kind;
        if ((router_fold(texts[i]) == FOLD) == (kind == 2))
            i++;
        else
            free(texts[i]);
    }
    const struct router_data d = {(const char *const *)texts, right, N, AGENTS};
    router_fit(&d, NULL, &f);
    for (int i = 0; i < N; i++) {
        if (i % 3 == 2)
            assert_int_not_equal(f.route[i], 2);
        else
            assert_int_equal(f.route[i], i % 3);
        assert_int_equal(router_route(f.router, texts[i], NULL), i % 3);
        free(texts[i]);
    }
    router_fit_release(&f);
}

/* files */

static char *text_of(const struct router *r) {
    json_t *v = router_json(r, NULL);
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(v);
    return text;
}

static void test_round_trip(void **state) {
    (void)state;
    noise_init();
    struct router_fit f = fit(NULL);
    char *text = text_of(f.router);
    struct router *r = router_parse(text, strlen(text), "r.json", &err);
    if (!r) fail_msg("%s", err.text);
    assert_int_equal(r->n_agents, AGENTS);
    assert_string_equal(r->names[1], "花1");
    assert_true(r->l2 == f.router->l2);
    assert_memory_equal(r->weights, f.router->weights, AGENTS * ROUTER_WEIGHTS * sizeof(double));
    assert_true(hash_is_valid(r->hash));
    router_free(r);
    free(text);
    router_fit_release(&f);
}

/* Refuses the text after `old` is replaced; `old` NULL: only the text's beginning is kept. */
static void refuse(const char *text, const char *old, const char *new, const char *message) {
    const char *at = old ? strstr(text, old) : text + strlen(text) / 2;
    assert_non_null(at);
    char *bad = old ? xasprintf("%.*s%s%s", (int)(at - text), text, new, at + strlen(old))
                    : xstrndup(text, (size_t)(at - text));
    struct router *r = router_parse(bad, strlen(bad), "r.json", &err);
    if (r) fail_msg("accepted with '%s' for '%s'", new, old ? old : "the rest");
    if (!strstr(err.text, message)) fail_msg("'%s' lacks '%s'", err.text, message);
    assert_non_null(strstr(err.text, "r.json"));
    free(bad);
}

static void test_corrupted(void **state) {
    (void)state;
    separable_init();
    struct router_fit f = fit(NULL);
    char *text = text_of(f.router), *first = strstr(text, "\"weights\":[[");
    char number[64];
    snprintf(number, sizeof number, "[[%.*s,", (int)strcspn(first + 12, ","), first + 12);
    refuse(text, NULL, "", "r.json");
    refuse(text, "shoal-router-1", "shoal-router-2", "'format'");
    refuse(text, "\"l2\"", "\"12\"", "unknown key '12'");
    refuse(text, "\"l2\":", "\"l2\":-", "'l2'");
    refuse(text, "[\"花0\",", "[", "weights for each of 2 agents");
    refuse(text, "[\"花0\",", "[7,", "'agents.0'");
    refuse(text, "[\"花0\",\"花1\",\"花2\"]", "[]", "1 to 17 names");
    refuse(text, number, "[[", "1025 numbers are expected at 'weights.0'");
    refuse(text, number, "[[null,", "'weights.0.0'");
    refuse(text, number, "[[1e7,", "'weights.0.0'");
    refuse(text, number, "[[1e999,", "r.json");
    refuse(text, "\"weights\":[", "\"weights\":[[],", "weights for each of 3 agents");
    assert_null(router_parse(text, ROUTER_MAX_BYTES + 1, "r.json", &err));
    assert_null(router_parse("[]", 2, "r.json", &err));
    for (size_t n = 0; n < strlen(text); n += 997)
        assert_null(router_parse(text, n, "r.json", &err));
    free(text);
    router_fit_release(&f);
}

/* teams */

/* Answers a question with choices: agent k is right on kind k only, agent a, b or c on all kinds
 * but 0, 1 or 2, agent x on all, others on none. */
static int script_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    int *n_calls = ctx;
    (void)e;
    for (int i = 0; i < n; i++) {
        const int kind = kind_of(calls[i].item->question), name = calls[i].agent->name[0];
        bool knows =
            kind == name - '0' || name == 'x' || (name >= 'a' && name <= 'c' && kind != name - 'a');
        calls[i].answer.choice = knows ? calls[i].item->correct : !calls[i].item->correct;
        calls[i].answer.prob[calls[i].answer.choice] = 0.6f;
        calls[i].text = xstrdup("well");
        ++*n_calls;
    }
    return OK;
}

/* A task of the questions, in a folder with files that teams of `text` may name. */
struct case_files {
    char dir[64], *team, *out;
    struct eval_task task;
};

static struct case_files files_open(const char *text) {
    struct case_files c = {.dir = "/tmp/shoal-router-XXXXXX"};
    struct buf lines = {0};
    assert_non_null(mkdtemp(c.dir));
    c.team = path_join(c.dir, "team.yaml");
    c.out = path_join(c.dir, "routed.yaml");
    for (int i = 0; i < N; i++)
        buf_printf(&lines, "{\"question\": \"%s\", \"choices\": [\"1\", \"2\"], \"answer\": %d}\n",
                   questions[i], i % 2);
    char *items = path_join(c.dir, "items.jsonl");
    assert_int_equal(file_write(items, lines.data, lines.len, &err), OK);
    assert_int_equal(file_write(c.team, text, strlen(text), &err), OK);
    if (eval_task_open(&c.task, items, &(struct eval_task_options){0}, &err) != OK)
        fail_msg("%s", err.text);
    free(items);
    buf_release(&lines);
    return c;
}

static void files_close(struct case_files *c) {
    eval_task_release(&c->task);
    tree_delete(c->dir);
    free(c->team);
    free(c->out);
}

static void fit_team(const struct case_files *c, struct team *t, struct team_fit *f) {
    struct team_answers answers;
    int n_calls = 0;
    const struct llm_client client = {&n_calls, script_ask};
    if (team_read(t, c->team, &err) != OK) fail_msg("%s", err.text);
    if (team_answers_run(&client, t, &c->task, 1, 1, &answers, NULL, &err) != OK)
        fail_msg("%s", err.text);
    assert_int_equal(n_calls, N * t->n);
    if (team_fit_run(&answers, NULL, f, &err) != OK) fail_msg("%s", err.text);
    team_answers_release(&answers);
}

static double row_acc(const struct team_fit *f, const char *name) {
    size_t i;
    json_t *v;
    json_array_foreach (json_object_get(f->report, "rows"), i, v)
        if (strcmp(json_get_string(v, "name"), name) == 0) return json_get_number(v, "acc");
    fail_msg("no row '%s'", name);
    return 0;
}

/* Of two agents that are always wrong and three that are wrong on different thirds, the three vote
 * without an error. Of equal sub-teams the smallest is chosen. */
static void test_fitted_subteam(void **state) {
    (void)state;
    struct case_files c = files_open("agents:\n  - name: z\n  - name: a\n  - name: b\n"
                                     "  - name: y\n  - name: c\n");
    struct team t, small;
    struct team_fit f;
    fit_team(&c, &t, &f);
    assert_true(f.better[TEAM_DECIDE_SUBTEAM] && f.subteam == 0x16);
    assert_true(row_acc(&f, "sub-team") == 1 && row_acc(&f, "unweighted vote") == 0);
    if (team_fit_write(&f, TEAM_DECIDE_SUBTEAM, &t, c.team, c.out, NULL, &err) != OK)
        fail_msg("%s", err.text);
    if (team_read(&small, c.out, &err) != OK) fail_msg("%s", err.text);
    assert_true(small.n == 3 && !small.router);
    assert_string_equal(small.v[0].name, "a");
    assert_string_equal(small.v[2].name, "c");
    team_release(&small);
    team_release(&t);
    team_fit_release(&f);
    files_close(&c);
    c = files_open("agents:\n  - name: a\n  - name: x\n  - name: b\n");
    fit_team(&c, &t, &f);
    assert_true(f.subteam == 2 && !f.better[TEAM_DECIDE_SUBTEAM]);
    team_release(&t);
    team_fit_release(&f);
    files_close(&c);
}

/* The fitted team calls one agent for each question, which is the one that knows the answer. */
static void test_fitted_team(void **state) {
    (void)state;
    struct case_files c = files_open("about: 慎重\nagents:\n  - name: '0'\n  - {name: '1', system: "
                                     "\"a \\\"b\\\" 花\"}\n  - name: '2'\n");
    struct team t, routed;
    struct team_fit f;
    int n_calls = 0;
    const struct llm_client client = {&n_calls, script_ask};
    fit_team(&c, &t, &f);
    assert_true(f.better[TEAM_DECIDE_ROUTER] && !f.better[TEAM_DECIDE_WEIGHTED]);
    assert_true(row_acc(&f, "router") == 1 && row_acc(&f, "oracle") == 1);
    assert_true(row_acc(&f, "unweighted vote") == 0 && row_acc(&f, "1") < 0.4);
    if (team_fit_write(&f, TEAM_DECIDE_ROUTER, &t, c.team, c.out, NULL, &err) != OK)
        fail_msg("%s", err.text);
    if (team_read(&routed, c.out, &err) != OK) fail_msg("%s", err.text);
    assert_true(routed.options.rounds == 1 && routed.router && routed.n == 3);
    assert_string_equal(routed.v[1].system, "a \"b\" 花");
    assert_string_equal(routed.description, "慎重");
    struct eval_result out[N];
    struct eval_cost cost = {0};
    const struct team_solver solver = {&routed, &client, 1};
    assert_int_equal(
        team_solver_answer((void *)(uintptr_t)&solver, &c.task, out, &cost, NULL, 0, &err), OK);
    for (int i = 0; i < N; i++) assert_true(out[i].right && out[i].prob == 1);
    assert_true(n_calls == N && cost.calls == N);
    routed.options.rounds = 2;
    assert_int_equal(
        team_solver_answer((void *)(uintptr_t)&solver, &c.task, out, &cost, NULL, 0, &err),
        ERR_USAGE);
    team_release(&routed);
    team_release(&t);
    team_fit_release(&f);
    files_close(&c);
}

/* The report of a routed team asks all agents once, and its decision is that of the router. */
static void test_debate_report(void **state) {
    (void)state;
    struct case_files c = files_open("agents: [{name: '0'}, {name: '1'}, {name: '2'}]");
    struct team t, routed;
    struct team_fit f;
    int n_calls = 0;
    const struct llm_client client = {&n_calls, script_ask};
    const struct debate_report_options needs = {.name = "routed", .credit_none = true};
    size_t i;
    json_t *row;
    fit_team(&c, &t, &f);
    assert_int_equal(team_fit_write(&f, TEAM_DECIDE_ROUTER, &t, c.team, c.out, NULL, &err), OK);
    if (team_read(&routed, c.out, &err) != OK) fail_msg("%s", err.text);
    struct task_item *items = eval_task_items(&c.task);
    json_t *r = debate_report_run(&client, routed.v, routed.n, items, N, &routed.options, &needs,
                                  NULL, &err);
    assert_non_null(r);
    assert_int_equal(n_calls, 3 * N);
    bool found = false;
    json_array_foreach (json_object_get(r, "rows"), i, row) {
        if (strcmp(json_get_string(row, "kind"), "router") != 0) continue;
        assert_true(json_get_number(row, "acc") == 1 && json_get_number(row, "calls") == N);
        found = true;
    }
    assert_true(found);
    row = json_array_get(json_object_get(r, "comparisons"), 0);
    assert_string_equal(json_get_string(row, "a"), "router");
    assert_true(json_get_number(row, "diff") == 1);
    json_decref(r);
    task_items_release(items, N);
    team_release(&routed);
    team_release(&t);
    team_fit_release(&f);
    files_close(&c);
}

/* Agent x is always right: nothing is gained, and the report has no gain. */
static void test_no_gain(void **state) {
    (void)state;
    struct case_files c = files_open("agents: [{name: '1'}, {name: x}]");
    struct team t, weighted;
    struct team_fit f;
    char *text = NULL;
    size_t len = 0;
    fit_team(&c, &t, &f);
    assert_true(!f.better[TEAM_DECIDE_ROUTER] && !f.better[TEAM_DECIDE_WEIGHTED]);
    assert_string_equal(json_get_string(f.report, "best"), "x");
    assert_true(f.weight[0] == 0 && f.weight[1] > 4);
    FILE *out = open_memstream(&text, &len);
    team_fit_print(f.report, out);
    fclose(out);
    assert_non_null(strstr(text, "the router is not better than its best agent, 'x'"));
    assert_non_null(strstr(text, "the weighted vote is not better"));
    free(text);
    assert_int_equal(team_fit_write(&f, TEAM_DECIDE_WEIGHTED, &t, c.team, c.out, NULL, &err), OK);
    if (team_read(&weighted, c.out, &err) != OK) fail_msg("%s", err.text);
    assert_true(!weighted.router && weighted.options.vote == vote_find("weighted"));
    assert_true(weighted.v[0].weight == 0 &&
                fabs((double)weighted.v[1].weight - f.weight[1]) < 1e-3);
    team_release(&weighted);
    team_release(&t);
    team_fit_release(&f);
    files_close(&c);
}

/* A router of other agents is refused, with file and line. */
static void test_other_agents(void **state) {
    (void)state;
    struct case_files c = files_open("agents: [{name: '1'}, {name: x}]");
    static const char *const texts[] = {
        "router: routed.router.json\nagents: [{name: x}, {name: '1'}]",
        "name: t\nrouter: routed.router.json\nagents: [{name: '1'}]"};
    struct team t, other;
    struct team_fit f;
    fit_team(&c, &t, &f);
    assert_int_equal(team_fit_write(&f, TEAM_DECIDE_ROUTER, &t, c.team, c.out, NULL, &err), OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(team_parse(&other, texts[i], strlen(texts[i]), c.out, &err), ERR_MISMATCH);
        assert_non_null(strstr(err.text, i ? "line 2: " : "line 1: "));
        team_release(&other);
    }
    team_release(&t);
    team_fit_release(&f);
    files_close(&c);
}

static void test_too_few_questions(void **state) {
    (void)state;
    struct case_files c = files_open("agents: [{name: '1'}, {name: x}]");
    struct team_answers answers;
    struct team_fit f;
    struct team t;
    int n_calls = 0;
    const struct llm_client client = {&n_calls, script_ask};
    assert_int_equal(team_read(&t, c.team, &err), OK);
    int64_t n = c.task.n_questions;
    c.task.n_questions = 20;
    assert_int_equal(team_answers_run(&client, &t, &c.task, 1, 1, &answers, NULL, &err), OK);
    assert_int_equal(team_fit_run(&answers, NULL, &f, &err), ERR_USAGE);
    team_fit_release(&f);
    team_answers_release(&answers);
    c.task.n_questions = n;
    team_release(&t);
    files_close(&c);
}

/* One agent with a large weight outvotes two; without positive weights all count the same. */
static void test_weighted_vote(void **state) {
    (void)state;
    struct agent_answer a[] = {
        {.choice = 0, .weight = 2.5f}, {.choice = 1, .weight = 1}, {.choice = 1, .weight = 1.25f}};
    assert_int_equal(vote_decide(vote_find("weighted"), a, 3, 2), 0);
    a[0].weight = 2;
    assert_int_equal(vote_decide(vote_find("weighted"), a, 3, 2), 1);
    for (int i = 0; i < 3; i++) a[i].weight = 0;
    assert_int_equal(vote_decide(vote_find("weighted"), a, 3, 2), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_features),
        cmocka_unit_test(test_separable),
        cmocka_unit_test(test_fit_is_the_minimum),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_folds_are_left_out),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_corrupted),
        cmocka_unit_test(test_fitted_team),
        cmocka_unit_test(test_fitted_subteam),
        cmocka_unit_test(test_debate_report),
        cmocka_unit_test(test_no_gain),
        cmocka_unit_test(test_other_agents),
        cmocka_unit_test(test_too_few_questions),
        cmocka_unit_test(test_weighted_vote),
    };
    return cmocka_run_group_tests(tests, questions_init, questions_free);
}
