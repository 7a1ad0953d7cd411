/*
 * test_second_turns: training data from a team's own first answers (swarm/second_turns.c), with a
 * scripted client: the lines against the debate of the same team, their control, and refused
 * requests.
 *
 * Agent i of the script selects the right answer of question q if i and q have the same parity;
 * else it selects a wrong one. On every fifth question all agents are right.
 */
/* levels: once */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { N = 20, AGENTS = 3 };
static struct error err;

static int quiet(void **state) {
    (void)state;
    log_quiet = true;
    return 0;
}

struct script {
    const struct task_item *items; /* the task's, to find the number of a question */
    int n_calls;
};

static int question_number(const struct script *s, const char *question) {
    for (int i = 0; i < N; i++)
        if (strcmp(s->items[i].question, question) == 0) return i;
    fail_msg("no question '%s'", question);
    return -1;
}

static int choice_of(const struct task_item *it, int agent, int q) {
    bool right = q % 5 == 0 || agent % 2 == q % 2;
    return right ? it->correct : (it->correct + 1) % it->n_choices;
}

static int script_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    struct script *s = ctx;
    (void)e;
    for (int i = 0; i < n; i++, s->n_calls++) {
        struct llm_call *c = &calls[i];
        int q = question_number(s, c->item->question), agent = c->agent->name[0] - 'a';
        assert_int_equal(c->messages[c->n_messages - 1].role[0], 'u');
        assert_string_equal(c->messages[c->n_messages - 1].content, c->item->question);
        if (c->item->n_choices) {
            c->answer.choice = choice_of(&s->items[q], agent, q);
            c->answer.prob[c->answer.choice] = 0.75f;
        } else {
            const char *answer = s->items[q].choices[choice_of(&s->items[q], agent, q)];
            c->text = xasprintf(" %s", answer);
        }
    }
    return OK;
}

static struct team team_of_text(const char *text) {
    struct team t;
    if (team_parse(&t, text, strlen(text), "test/cases/t.yaml", &err) != OK)
        fail_msg("%s", err.text);
    return t;
}

static struct eval_task task_open(const char *name, enum data_split split) {
    const struct eval_task_options o = {.n = N, .split = split, .seed = 5};
    struct eval_task task;
    if (eval_task_open(&task, name, &o, &err) != OK) fail_msg("%s", err.text);
    return task;
}

/* The conversations of lines of JSON: an array of arrays of {role, content}. */
static json_t *conversations_of(const struct buf *lines) {
    json_t *list = json_array();
    char *copy = xstrdup(lines->len ? lines->data : ""), *rest = copy, *line;
    while ((line = strsep(&rest, "\n")))
        if (*line) {
            json_t *v = json_loads(line, 0, NULL);
            assert_non_null(v);
            json_array_append(list, json_object_get(v, "messages"));
            json_decref(v);
        }
    free(copy);
    return list;
}

static const char *message(const json_t *turns, int i, const char *role) {
    const json_t *v = json_array_get(turns, (size_t)i);
    assert_string_equal(json_get_string(v, "role"), role);
    return json_get_string(v, "content");
}

static bool is_target(const json_t *turns, int i) {
    const json_t *weight = json_object_get(json_array_get(turns, (size_t)i), "weight");
    return !weight || json_integer_value(weight) != 0;
}

struct fixture {
    struct team t;
    struct eval_task task;
    struct task_item *items;
    struct script script;
    struct second_turns s;
};

static struct fixture fixture_run(const char *team, const char *task, bool free_answers) {
    struct fixture x = {.t = team_of_text(team), .task = task_open(task, SPLIT_TRAIN)};
    x.items = eval_task_items(&x.task);
    x.script.items = x.items;
    const struct llm_client client = {&x.script, script_ask};
    if (second_turns_add(&x.s, &client, &x.t, &x.task, free_answers, &err) != OK)
        fail_msg("%s", err.text);
    return x;
}

static void fixture_release(struct fixture *x) {
    second_turns_release(&x->s);
    task_items_release(x->items, N);
    eval_task_release(&x->task);
    team_release(&x->t);
}

#define TEAM(protocol)                                                                             \
    "protocol: " protocol "\nchain-of-thought: false\nagents: [{name: a, system: You doubt.}, "    \
    "{name: b}, {name: c}]"

/* Line i of an agent: the question, its own first answer, the others' answers, the right answer. */
static void check_lines(const struct fixture *x, int agent, const int *questions, int n) {
    json_t *second = conversations_of(&x->s.v[agent].second),
           *direct = conversations_of(&x->s.v[agent].direct);
    const int p = x->t.v[agent].system != NULL; // messages before the question
    assert_int_equal(json_array_size(second), n);
    assert_int_equal(json_array_size(direct), n);
    for (int k = 0; k < n; k++) {
        const struct task_item *it = &x->items[questions[k]];
        const json_t *turns = json_array_get(second, (size_t)k),
                     *control = json_array_get(direct, (size_t)k);
        char *own = xasprintf("answer: %s", it->choices[choice_of(it, agent, questions[k])]),
             *right = task_item_reply(it, false);
        assert_int_equal(json_array_size(turns), p + 4);
        assert_int_equal(json_array_size(control), p + 2);
        if (p) assert_string_equal(message(turns, 0, "system"), "You doubt.");
        if (p) assert_string_equal(message(control, 0, "system"), "You doubt.");
        assert_string_equal(message(turns, p, "user"), it->question);
        assert_string_equal(message(control, p, "user"), it->question);
        assert_string_equal(message(turns, p + 1, "assistant"), own);
        assert_false(is_target(turns, p + 1));
        for (int a = 0; a < AGENTS; a++)
            if (a != agent)
                assert_non_null(strstr(message(turns, p + 2, "user"),
                                       it->choices[choice_of(it, a, questions[k])]));
        assert_string_equal(message(turns, p + 3, "assistant"), right);
        assert_string_equal(message(control, p + 1, "assistant"), right);
        assert_true(is_target(turns, p + 3) && is_target(control, p + 1));
        free(right);
        free(own);
    }
    json_decref(direct);
    json_decref(second);
}

/* Every question has a second turn in "brief". The client answers first turns only. */
static void test_every_question(void **state) {
    (void)state;
    struct fixture x = fixture_run(TEAM("brief"), "arithmetic", false);
    int all[N], n_right = 0;
    for (int i = 0; i < N; i++) all[i] = i;
    assert_int_equal(x.script.n_calls, N * AGENTS);
    for (int a = 0; a < AGENTS; a++) check_lines(&x, a, all, N);
    for (int i = 0; i < N; i++) n_right += choice_of(&x.items[i], 1, i) == x.items[i].correct;
    assert_int_equal(x.s.v[1].n_first_correct, n_right);
    for (int i = 0; i < N; i++) assert_int_equal(family_split_of(x.items[i].key), SPLIT_TRAIN);
    fixture_release(&x);
}

/* "confer" has no second turn where all agree; its message has names and probabilities. */
static void test_disagreements(void **state) {
    (void)state;
    struct fixture x = fixture_run(TEAM("confer"), "pick", false);
    int open[N], n = 0;
    for (int i = 0; i < N; i++)
        if (i % 5) open[n++] = i;
    for (int a = 0; a < AGENTS; a++) check_lines(&x, a, open, n);
    json_t *lines = conversations_of(&x.s.v[1].second);
    const char *text = message(json_array_get(lines, 0), 2, "user");
    assert_non_null(strstr(text, "(a, 75 %)"));
    assert_non_null(strstr(text, "(c, 75 %)"));
    assert_null(strstr(text, "(b,"));
    json_decref(lines);
    json_t *v = second_turns_json(&x.s, &x.t);
    assert_string_equal(json_get_string(v, "protocol"), "confer");
    assert_int_equal(json_get_number(json_array_get(json_object_get(v, "agents"), 2), "lines"), n);
    json_decref(v);
    fixture_release(&x);
}

/* Generated first answers are graded as in a report. */
static void test_free_answers(void **state) {
    (void)state;
    struct fixture x = fixture_run(TEAM("brief"), "arithmetic", true);
    int all[N], n_right = 0;
    for (int i = 0; i < N; i++) all[i] = i;
    for (int a = 0; a < AGENTS; a++) check_lines(&x, a, all, N);
    for (int i = 0; i < N; i++) n_right += choice_of(&x.items[i], 0, i) == x.items[i].correct;
    assert_int_equal(x.s.v[0].n_first_correct, n_right);
    fixture_release(&x);
}

/* Two tasks, and the files. */
static void test_files(void **state) {
    (void)state;
    char dir[] = "/tmp/shoal-second-turns-XXXXXX";
    assert_non_null(mkdtemp(dir));
    struct fixture x = fixture_run(TEAM("brief"), "arithmetic", false);
    const struct llm_client client = {&x.script, script_ask};
    struct eval_task other = task_open("order", SPLIT_TRAIN);
    task_items_release(x.items, N);
    x.script.items = x.items = eval_task_items(&other);
    assert_int_equal(second_turns_add(&x.s, &client, &x.t, &other, false, &err), OK);
    assert_int_equal(x.s.v[0].n, 2 * N);
    assert_int_equal(second_turns_write(&x.s, &x.t, dir, &err), OK);
    for (int k = 0; k < 2; k++) {
        struct buf file = {0};
        char *path = xasprintf("%s/%s/b.jsonl", dir, k ? "direct" : "second");
        const struct buf *want = k ? &x.s.v[1].direct : &x.s.v[1].second;
        assert_int_equal(file_read(path, 1 << 20, &file, &err), OK);
        assert_string_equal(file.data, want->data);
        buf_release(&file);
        free(path);
    }
    char *command = xasprintf("rm -r '%s'", dir);
    assert_int_equal(system(command), 0);
    free(command);
    eval_task_release(&other);
    fixture_release(&x);
}

static void refused(const char *team, struct eval_task task, const char *why) {
    struct team t = team_of_text(team);
    struct second_turns s = {0};
    struct script script = {0};
    const struct llm_client client = {&script, script_ask};
    if (second_turns_add(&s, &client, &t, &task, false, &err) != ERR_USAGE)
        fail_msg("accepted, not '%s'", why);
    if (!strstr(err.text, why)) fail_msg("'%s', not '%s'", err.text, why);
    second_turns_release(&s);
    eval_task_release(&task);
    team_release(&t);
}

static void test_refused(void **state) {
    (void)state;
    struct eval_task own = {.family = -1, .name = xstrdup("own"), .split = SPLIT_TRAIN};
    refused(TEAM("brief"), task_open("pick", SPLIT_TEST), "add --split train");
    refused(TEAM("brief"), task_open("pick", SPLIT_DEV), "add --split train");
    refused(TEAM("brief"), task_open("largest", SPLIT_TRAIN), "its part of the evidence");
    refused(TEAM("brief"), own, "'own' is read from files");
    refused("agents: [{name: a/b}]", task_open("pick", SPLIT_TRAIN), "'a/b' cannot be");
    refused("agents: [{name: ..}]", task_open("pick", SPLIT_TRAIN), "'..' cannot be");
    /* an agent alone has no second turn */
    struct fixture x = fixture_run("agents: [{name: a}]", "pick", false);
    assert_int_equal(second_turns_write(&x.s, &x.t, "/nowhere", &err), ERR_STATE);
    assert_non_null(strstr(err.text, "in protocol 'brief'"));
    fixture_release(&x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_question), cmocka_unit_test(test_disagreements),
        cmocka_unit_test(test_free_answers),   cmocka_unit_test(test_files),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("second turns", tests, quiet, NULL);
}
