/*
 * test_team: teams from files and flags, and their effect on a debate, with a scripted client.
 *
 * The reasons for which a team file is refused are in test/cases/team-refused.txt. Paths in a team
 * file are relative to the file; here that is test/cases, whose files take the place of adapters.
 */
/* levels: once */
#define _GNU_SOURCE
#include "fixture.h"
#include "swarm/swarm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
#define PATH "test/cases/t.yaml"

static int quiet(void **state) {
    (void)state;
    log_quiet = true;
    return 0;
}

static struct team team_of_text(const char *text) {
    struct team t;
    if (team_parse(&t, text, strlen(text), PATH, &err) != OK) fail_msg("%s", err.text);
    return t;
}

static struct adapter opened[8];

static struct adapter *open_by_number(void *ctx, const char *path, struct error *e) {
    int *n = ctx;
    if (strstr(path, "mad")) {
        error_set(e, ERR_FORMAT, "no adapter is '%s'", path);
        return NULL;
    }
    return &opened[(*n)++];
}

/* A file with every key. */
static void test_whole_file(void **state) {
    (void)state;
    int n = 0;
    struct team t = team_of_text(
        "name: 慎重\nabout: 疑う人たち。\nprotocol: mad\nrounds: 3\nvote: borda\ntemperature: 0.5\n"
        "max_tokens: 40\nworking: false\nagents:\n"
        "  - {name: 花, adapter: workflow-du.txt, system: 疑え。, role: judge, temperature: 0.3}\n"
        "  - {name: ada, adapter: [workflow-du.txt=0.7, ./workflow-revise.txt]}\n"
        "  - adapter: workflow-du.txt\n  - {adapter: workflow-du.txt, system: あ}\n"
        "  - adapter: workflow-du.txt=-0.5\n  - system: alone\n");
    const struct debate_options *o = &t.options;
    assert_string_equal(t.name, "慎重");
    assert_string_equal(t.description, "疑う人たち。");
    assert_string_equal(workflow_name(o->workflow), "mad");
    assert_true(o->rounds == 3 && strcmp(o->vote->name, "borda") == 0 && o->temperature == 0.5f);
    assert_true(o->max_tokens == 40 && !o->chain_of_thought && t.n == 6 && t.adapters.n == 7);
    assert_string_equal(t.adapters.v[0], "test/cases/workflow-du.txt");
    assert_string_equal(t.adapters.v[2], "test/cases/./workflow-revise.txt");
    assert_string_equal(t.adapters.v[6], "base");
    assert_int_equal(team_load_adapters(&t, open_by_number, &n, &err), OK);
    assert_int_equal(n, 6);
    const struct agent *v = t.v;
    assert_string_equal(v[0].role, "judge");
    assert_string_equal(v[0].system, "疑え。");
    assert_true(v[0].temperature == 0.3f && v[0].adapter == &opened[0] && !v[0].mix);
    assert_true(!v[1].adapter && v[1].n_mix == 2 && !v[1].role && !v[1].system);
    assert_true(v[1].mix[0].adapter == &opened[1] && v[1].mix[0].weight == 0.7f);
    assert_true(v[1].mix[1].adapter == &opened[2] && v[1].mix[1].weight == 1);
    assert_string_equal(v[2].name, "workflow-du.txt");
    assert_string_equal(v[3].name, "workflow-du.txt#2");
    assert_true(v[4].n_mix == 1 && v[4].mix->weight == -0.5f && !v[4].adapter);
    assert_string_equal(v[4].name, "workflow-du.txt#3");
    assert_true(!v[5].adapter && !v[5].mix && v[5].temperature == 0);
    assert_string_equal(v[5].name, "base");
    for (int i = 0; i < t.n; i++) assert_int_equal(v[i].view, i);
    team_release(&t);
}

/* A key that the file omits has the protocol's value. */
static void test_minimal_file(void **state) {
    (void)state;
    struct team t = team_of_text("agents: [{}]");
    assert_string_equal(t.name, "t");
    assert_string_equal(t.description, "");
    assert_string_equal(workflow_name(t.options.workflow), "brief");
    assert_true(t.options.rounds == 2 && t.options.vote == vote_find("confidence"));
    assert_true(t.options.chain_of_thought && t.options.temperature == -1 && !t.options.max_tokens);
    assert_true(t.n == 1 && strcmp(t.v[0].name, "base") == 0);
    team_release(&t);
    t = team_of_text("protocol: ../../protocols/legacy.yaml\nagents: [{}]"); // a file, by its path
    assert_string_equal(workflow_name(t.options.workflow), "legacy");
    team_release(&t);
}

static void test_files_are_read(void **state) {
    (void)state;
    char path[] = "/tmp/shoal-team-XXXXXX";
    static const char text[] = "agents: [{adapter: base}, {adapter: nowhere}]";
    struct team t;
    int fd = mkstemp(path);
    assert_true(fd >= 0 && close(fd) == 0);
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    assert_int_equal(team_read(&t, path, &err), ERR_FORMAT);
    assert_non_null(strstr(err.text, "line 1: there is no adapter 'nowhere'"));
    team_release(&t);
    assert_int_equal(file_write(path, text, 0, &err), OK);
    assert_int_equal(team_read(&t, path, &err), ERR_FORMAT);
    team_release(&t);
    unlink(path);
    assert_int_equal(team_read(&t, path, &err), ERR_MISSING);
    team_release(&t);
}

static struct strings strings_of(const char *list) {
    struct strings s = {0};
    char *copy = xstrdup(list), *rest = copy;
    for (char *w; (w = strsep(&rest, " ")) != NULL;)
        if (*w) strings_add(&s, w);
    free(copy);
    return s;
}

static void test_flags(void **state) {
    (void)state;
    int n = 0;
    struct team t;
    struct strings agents = strings_of("a/critic base b/critic/ base x=0.5"),
                   said = strings_of("疑え。 Go.");
    assert_int_equal(team_from_flags(&t, "du", &agents, &said, &err), OK);
    static const char *const names[] = {"critic", "base", "critic#2", "base#2", "x=0.5"};
    for (int i = 0; i < 5; i++) assert_string_equal(t.v[i].name, names[i]);
    assert_string_equal(t.v[0].system, "疑え。");
    assert_string_equal(t.v[1].system, "Go.");
    assert_null(t.v[2].system);
    assert_string_equal(workflow_name(t.options.workflow), "du");
    assert_int_equal(team_load_adapters(&t, open_by_number, &n, &err), OK);
    assert_true(n == 3 && t.v[0].adapter == &opened[0] && !t.v[1].adapter && !t.v[3].adapter);
    assert_true(t.v[2].adapter == &opened[1] && t.v[4].adapter == &opened[2] && !t.v[4].mix);
    team_release(&t);
    assert_int_equal(team_from_flags(&t, "nosuch", &agents, &said, &err), ERR_USAGE);
    team_release(&t);
    assert_int_equal(team_from_flags(&t, "du", &said, &agents, &err), ERR_USAGE);
    team_release(&t);
    struct strings none = {0}, many = strings_of("a a a a a a a a a a a a a a a a a a");
    assert_int_equal(team_from_flags(&t, "du", &none, &none, &err), ERR_USAGE);
    team_release(&t);
    assert_int_equal(team_from_flags(&t, "du", &many, &none, &err), ERR_USAGE);
    team_release(&t);
    struct strings bad = strings_of("mad");
    assert_int_equal(team_from_flags(&t, "du", &bad, &none, &err), OK);
    assert_int_equal(team_load_adapters(&t, open_by_number, &n, &err), ERR_FORMAT);
    team_release(&t);
    strings_release(&agents);
    strings_release(&said);
    strings_release(&many);
    strings_release(&bad);
}

/* Records the called agents and answers by the agent's name. */
static int ask_by_name(void *ctx, struct llm_call *calls, int n, struct error *e) {
    struct buf *log = ctx;
    (void)e;
    for (int i = 0; i < n; i++) {
        struct llm_call *c = &calls[i];
        buf_printf(log, "%s %.1f\n", c->agent->name, (double)c->temperature);
        c->answer.choice = strcmp(c->agent->name, "no") == 0;
        c->answer.prob[c->answer.choice] = 0.6f;
        c->text = xstrdup("well");
    }
    return OK;
}

/* Roles in the file take precedence over roles by position: here the first agent is the judge. */
static void test_roles_and_temperatures(void **state) {
    (void)state;
    static char which[] = "which?", yes[] = "はい", no[] = "いいえ";
    const struct task_item it = {
        .question = which, .choices = {yes, no}, .n_choices = 2, .lang = "ja"};
    struct team t = team_of_text("protocol: mad\nrounds: 2\nagents:\n  - {name: no, role: judge}\n"
                                 "  - {name: a, role: affirmative, temperature: 0.9}\n"
                                 "  - {name: b, role: negative}\n");
    struct buf log = {0};
    const struct llm_client a = {&log, ask_by_name};
    struct debate d;
    assert_int_equal(debate_run(&a, t.v, t.n, &it, 1, &t.options, &d, NULL, &err), OK);
    assert_int_equal(strncmp(log.data, "a 0.9\nb ", 8), 0);
    assert_string_equal(log.data + log.len - 7, "no 0.0\n");
    assert_int_equal(d.transcripts[0].answer, 1);
    debate_release(&d);
    buf_release(&log);
    team_release(&t);
}

/* teams on tasks */

static struct eval_task task_of_text(const char *name, const char *text) {
    char *path = xasprintf("/tmp/shoal-team-%d-%s", (int)getpid(), name);
    struct eval_task b;
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    if (eval_task_open(&b, path, &(struct eval_task_options){0}, &err) != OK)
        fail_msg("%s", err.text);
    unlink(path);
    free(path);
    return b;
}

static struct eval_task task_generated(void) {
    char *items = xasprintf("/tmp/shoal-team-%d-items.jsonl", (int)getpid());
    char *recipe = xasprintf("file: %s\ngrader: number\nmax_tokens: 40\n", items);
    static const char text[] = "{\"question\": \"2 + 3?\", \"answer\": \"5\"}\n"
                               "{\"question\": \"八割る二は？\", \"answer\": \"4\"}\n"
                               "{\"question\": \"9?\", \"answer\": \"9\"}\n";
    assert_int_equal(file_write(items, text, strlen(text), &err), OK);
    struct eval_task b = task_of_text("sums.yaml", recipe);
    unlink(items);
    free(items);
    free(recipe);
    return b;
}

/* Questions of files: context, options as choices; contexts that differ are shown from where they
 * differ; a gold answer for questions without choices. */
static void test_items_of_task_files(void **state) {
    (void)state;
    struct eval_task b =
        task_of_text("own.jsonl", "{\"question\": \"空は？\", \"choices\": [\"青\", \"赤\"], "
                                  "\"answer\": 0}\n");
    struct task_item *v = eval_task_items(&b);
    assert_string_equal(v->question, "Question: 空は？\nAnswer:");
    assert_true(v->n_choices == 2 && v->correct == 0 && !v->gold && strcmp(v->lang, "ja") == 0);
    assert_string_equal(v->choices[1], "赤");
    task_items_release(v, b.n_questions);
    eval_task_release(&b);
    b = task_generated();
    v = eval_task_items(&b);
    assert_string_equal(v[1].question, "Question: 八割る二は？\nAnswer:");
    assert_true(v[1].n_choices == 0 && strcmp(v[1].gold, "4") == 0);
    task_items_release(v, b.n_questions);
    eval_task_release(&b);
    struct eval_question q = {.n = 2, .correct = 1};
    static char *const contexts[] = {"Ann met Bo so Ann", "Ann met Bo so Bo"}, *const apart[] = {
                                                                                   "Ann", "Bo"};
    struct eval_subject subject = {.preamble = (char *)(uintptr_t) ""};
    b = (struct eval_task){.n_questions = 1, .family = -1, .questions = &q, .subjects = &subject};
    b.delimiter = (char *)(uintptr_t) " ";
    q.options[0] = q.options[1] = (char *)(uintptr_t) "left.";
    memcpy(q.contexts, contexts, sizeof contexts);
    v = eval_task_items(&b);
    assert_string_equal(v->question, "Ann met Bo so");
    assert_string_equal(v->choices[0], "Ann left.");
    assert_string_equal(v->choices[1], "Bo left.");
    task_items_release(v, 1);
    memcpy(q.contexts, apart, sizeof apart);
    v = eval_task_items(&b);
    assert_string_equal(v->question, "Which is right?");
    assert_string_equal(v->choices[1], "Bo left.");
    task_items_release(v, 1);
    b = (struct eval_task){.n_questions = 2,
                           .family = split_evidence_find("largest"),
                           .is_split_evidence = true,
                           .split = SPLIT_DEV};
    v = eval_task_items(&b);
    assert_true(v[0].n_views == 3 && family_split_of(v[1].key) == SPLIT_DEV);
    task_items_release(v, 2);
}

/* The first agent answers every question wrong, the others correctly; no agent answers "9?". */
static int ask_numbers(void *ctx, struct llm_call *calls, int n, struct error *e) {
    int *max_tokens = ctx;
    (void)e;
    for (int i = 0; i < n; i++) {
        struct llm_call *c = &calls[i];
        bool first = strcmp(c->agent->name, "a") == 0;
        *max_tokens = c->max_tokens;
        c->n_prefilled = 7;
        c->n_generated = 2;
        c->answer.choice = c->item->n_choices ? !first : -1;
        if (c->item->n_choices) c->answer.prob[c->answer.choice] = 0.8f;
        const char *gold = c->item->gold && c->item->gold[0] != '9' ? c->item->gold : "who knows";
        c->text = first ? xstrdup("答えは 1 です。") : xasprintf("so it is %s.", gold);
        if (first && gold[0] == 'w') c->failed = "no room";
    }
    return OK;
}

static void test_teams_are_eval_candidates(void **state) {
    (void)state;
    struct team t = team_of_text("rounds: 2\nagents: [{name: a}, {name: b}, {name: c}]");
    int max_tokens = 0;
    const struct llm_client a = {&max_tokens, ask_numbers};
    struct team_solver player = {&t, &a, 3};
    struct eval_result out[3];
    struct eval_cost cost = {.calls = 1};
    struct eval_task b = task_generated();
    assert_int_equal(team_solver_answer(&player, &b, out, &cost, NULL, 0, &err), OK);
    assert_int_equal(max_tokens, 40); // the task's
    for (int i = 0; i < 2; i++) {
        assert_true(out[i].right && !out[i].no_answer && out[i].score == 1);
        assert_true(out[i].prob > 0.66f && out[i].prob < 0.67f);
    }
    assert_true(!out[2].right && out[2].no_answer && out[2].choice == -1 && out[2].prob == 0);
    assert_true(cost.calls == 1 + 18 && cost.prefilled == 18 * 7 && cost.generated == 18 * 2);
    eval_task_release(&b);
    b = task_of_text("own.jsonl",
                     "{\"question\": \"x?\", \"choices\": [\"青\", \"赤\"], \"answer\": 1}\n");
    assert_int_equal(team_solver_answer(&player, &b, out, &cost, NULL, 0, &err), OK);
    assert_true(out[0].right && out[0].choice == 1);
    eval_task_release(&b);
    team_release(&t);
}

static void test_refused(void **state) {
    (void)state;
    struct buf file = {0};
    int n = 0;
    if (file_read("test/cases/team-refused.txt", 1 << 20, &file, &err) != OK)
        fail_msg("%s", err.text);
    for (char *at = file.data, *want; (want = strstr(at, "\n=> ")); n++) {
        struct team t;
        at += strspn(at, "\n");
        char *end = strchr(want + 4, '\n');
        want[1] = *end = 0;
        if (team_parse(&t, at, strlen(at), PATH, &err) == OK) fail_msg("accepted:\n%s", at);
        if (strcmp(err.text, want + 4) != 0)
            fail_msg("refused with\n%s\nnot with\n%s\n:\n%s", err.text, want + 4, at);
        team_release(&t);
        at = end + 1;
    }
    assert_true(n > 25);
    buf_release(&file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_file),
        cmocka_unit_test(test_minimal_file),
        cmocka_unit_test(test_files_are_read),
        cmocka_unit_test(test_flags),
        cmocka_unit_test(test_roles_and_temperatures),
        cmocka_unit_test(test_items_of_task_files),
        cmocka_unit_test(test_teams_are_eval_candidates),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, quiet, NULL);
}
