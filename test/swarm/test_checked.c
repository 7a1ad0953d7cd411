/*
 * test_checked: samples of a team that a check filters (swarm/checked_samples.c), with a scripted
 * client and real checks, and the questions that a check puts to a model.
 *
 * The script answers a question "q I" of agent A with its sample number and item: the texts follow
 * from the table in script_text, so every count is known.
 */
#include "swarm/swarm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ITEMS = 4, AGENTS = 2, SAMPLES = 6 };

static struct error err;
static const struct agent team[AGENTS] = {{.name = "a"}, {.name = "b"}};
static int n_calls, n_greedy, n_drawn[ITEMS];

/* The answer of sample j of an item. Answers that begin with "ok" pass the check. */
static const char *script_text(int item, int j) {
    static const char *const texts[ITEMS][SAMPLES] = {
        {"answer: bad", "answer: ok1", "answer: ok2", "answer: ok2", "answer: bad", "answer: bad"},
        {"answer: bad", "answer: bad", "answer: worse", "answer: bad", "answer: bad", ""},
        {"answer: ok1", "answer: ok1", "answer: ok1", "answer: ok1", "answer: ok1", "answer: ok1"},
        {"", "", "", "", "", ""},
    };
    return texts[item][j];
}

static int script_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    (void)ctx, (void)e;
    for (int i = 0; i < n; i++) {
        const int item = calls[i].item->question[2] - '0', j = n_drawn[item]++;
        assert_ptr_equal(calls[i].agent, &team[j % AGENTS]);
        assert_int_equal(calls[i].temperature > 0, j >= AGENTS);
        n_greedy += calls[i].temperature <= 0;
        n_calls++;
        calls[i].text = xstrdup(script_text(item, j));
        calls[i].n_prefilled = 10;
        calls[i].n_generated = 3;
    }
    return OK;
}

static struct checked_samples samples_of(struct check *check, int passes) {
    char questions[ITEMS][16];
    struct task_item items[ITEMS] = {{0}};
    const struct llm_client client = {NULL, script_ask};
    const struct checked_options o = {.check = check,
                                      .max_samples = SAMPLES,
                                      .passes = passes,
                                      .temperature = 0.7f,
                                      .max_tokens = 8,
                                      .seed = 1};
    struct checked_samples s;
    n_calls = n_greedy = 0;
    memset(n_drawn, 0, sizeof n_drawn);
    for (int i = 0; i < ITEMS; i++) {
        snprintf(questions[i], sizeof questions[i], "q %d", i);
        items[i].question = questions[i];
    }
    assert_int_equal(checked_samples_run(&client, team, AGENTS, items, ITEMS, &o, &s, NULL, &err),
                     OK);
    return s;
}

static const char *decision(const struct checked_samples *s, int item, int n, bool checked) {
    const int i = checked_samples_decide(s, item, n, checked);
    return i < 0 ? "none" : s->v[item * s->max_samples + i].answer;
}

static struct check *regex_open(void) {
    const struct check_options o = {0};
    struct check *c = check_open("regex:ok", &o, &err);
    assert_non_null(c);
    return c;
}

/* Without a number of passes all samples are drawn; the check decides among them. */
static void test_decisions(void **state) {
    (void)state;
    struct check *check = regex_open();
    struct checked_samples s = samples_of(check, 0);
    assert_int_equal(n_calls, ITEMS * SAMPLES);
    assert_int_equal(n_greedy, ITEMS * AGENTS);
    assert_string_equal(decision(&s, 0, SAMPLES, false), "bad"); // 3 of 6
    assert_string_equal(decision(&s, 0, SAMPLES, true), "ok2");  // 2 of the 3 that passed
    assert_string_equal(decision(&s, 0, 3, true), "ok1");        // equal counts: the first
    assert_string_equal(decision(&s, 0, 1, true), "bad");        // none passed
    assert_string_equal(decision(&s, 1, SAMPLES, true), "bad");
    assert_string_equal(decision(&s, 3, SAMPLES, true), "none");
    assert_int_equal(checked_samples_used(&s, 0, SAMPLES, 1), 2);
    assert_int_equal(checked_samples_used(&s, 0, SAMPLES, 3), 4);
    assert_int_equal(checked_samples_used(&s, 1, SAMPLES, 1), SAMPLES);
    assert_int_equal(checked_samples_used(&s, 2, 4, 9), 4);
    checked_samples_release(&s);
    check_free(check);
}

/* An item is finished at its k-th pass; its samples are the first of those without a check. */
static void test_early_end(void **state) {
    (void)state;
    struct check *check = regex_open();
    struct checked_samples all = samples_of(NULL, 0);
    for (int passes = 1; passes <= 3; passes++) {
        struct checked_samples s = samples_of(check, passes);
        static const int drawn[][ITEMS] = {{2, 6, 1, 6}, {3, 6, 2, 6}, {4, 6, 3, 6}};
        for (int i = 0; i < ITEMS; i++) {
            assert_int_equal(s.n[i], drawn[passes - 1][i]);
            for (int j = 0; j < s.n[i]; j++)
                assert_string_equal(s.v[i * SAMPLES + j].text, all.v[i * SAMPLES + j].text);
        }
        checked_samples_release(&s);
    }
    assert_false(all.v[1].passed); // without a check nothing passes
    checked_samples_release(&all);
    check_free(check);
}

/* The base model's reply to "N + 6 = ?", in its own words. */
static int adder_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    (void)e;
    for (int i = 0; i < n; i++) {
        ++*(int *)ctx;
        assert_true(!calls[i].agent->adapter);
        assert_true(calls[i].temperature <= 0);
        calls[i].text = xasprintf(" %d", atoi(calls[i].item->question) + 6);
        calls[i].n_generated = 2;
    }
    return OK;
}

/* The check `question` asks about each answer and counts tokens; the item's own question and its
 * right answer are not passed on. */
static void test_question(void **state) {
    (void)state;
    int asked = 0;
    struct check_questioner q = {.client = {&asked, adder_ask}, .agent = {.name = "base"}};
    const struct check_model model = check_questioner_as_model(&q);
    const struct check_options o = {.model = &model};
    struct check *check = check_open("question", &o, &err);
    assert_non_null(check);
    json_t *item = json_pack("{s:s,s:{s:s,s:s}}", "question", "7325 - 6 = ?", "check", "question",
                             "{{ answer }} + 6 = ?", "answer", "7325");
    struct check_case cases[] = {{.item = item, .text = "answer: 7319"},
                                 {.item = item, .text = "work: 5 - 6\nanswer: 7318"},
                                 {.item = item, .text = "7319"}};
    assert_int_equal(check_run(check, cases, 3, &err), OK);
    assert_true(cases[0].passed && !cases[1].passed && cases[2].passed);
    assert_int_equal(asked, 3);
    assert_int_equal(q.generated, 6);
    assert_int_equal(check_cost(check).questions, 3);
    json_decref(item);
    check_free(check);
}

/* An error if the check can check no item. */
static void test_item_without_fields(void **state) {
    (void)state;
    int asked = 0;
    struct check_questioner q = {.client = {&asked, adder_ask}, .agent = {.name = "base"}};
    const struct check_model model = check_questioner_as_model(&q);
    const struct check_options co = {.model = &model};
    struct check *check = check_open("question", &co, &err);
    struct task_item item = {.question = "q 0"};
    const struct llm_client client = {NULL, script_ask};
    const struct checked_options o = {.check = check, .max_samples = 2, .max_tokens = 8};
    struct checked_samples s;
    assert_int_not_equal(checked_samples_run(&client, team, 1, &item, 1, &o, &s, NULL, &err), OK);
    assert_non_null(strstr(err.text, "check"));
    checked_samples_release(&s);
    check_free(check);
}

/* Items with choices become items whose answer is generated. */
static void test_free_item(void **state) {
    (void)state;
    struct task_item it = {.question = xstrdup("pick"), .n_choices = 2, .correct = 1};
    it.choices[0] = xstrdup("12");
    it.choices[1] = xstrdup("15");
    task_item_make_free(&it);
    assert_int_equal(it.n_choices, 0);
    assert_int_equal(it.correct, -1);
    assert_string_equal(it.gold, "15");
    assert_true(it.free_answer);
    task_item_release(&it);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decisions), cmocka_unit_test(test_early_end),
        cmocka_unit_test(test_question),  cmocka_unit_test(test_item_without_fields),
        cmocka_unit_test(test_free_item),
    };
    return cmocka_run_group_tests_name("checked", tests, NULL, NULL);
}
