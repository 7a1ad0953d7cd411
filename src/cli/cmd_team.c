/*
 * cmd_team: `shoal team fit TEAM`: fits a router, the weights of a vote and the sub-team that votes
 * best to the first answers of a team's agents, and writes the fitted team. The report is printed
 * before the team is refused or written, so that a fit that gains nothing is seen.
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct setup_options setup;
    char *model, *tasks, *data, *out, *decide;
    int64_t n, shots, seed;
    bool accept, use_cache;
};
#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    { name, type, offsetof(struct options, field), fallback, min, max, metavar, __VA_ARGS__ }
static const struct option_row rows[] = {
    ROW("model", OPT_STRING, model, "models/fry", 0, 0, "MODEL", "base model of the agents"),
    ROW("tasks", OPT_STRING, tasks, NULL, 0, 0, "LIST",
        "tasks to fit on, as for 'shoal eval': families, names, JSONL files, recipes; of families "
        "the questions of the split 'dev'"),
    ROW("data", OPT_STRING, data, NULL, 0, 0, "DIR", "folder of the files of named tasks"),
    ROW("n", OPT_INT, n, "0", 0, 20000, "N",
        "questions per task, sampled with the seed; 0: 1000 of a family, all of a file"),
    ROW("shots", OPT_INT, shots, "0", 0, 1000, "N",
        "few-shot examples, from the task's dev or train file"),
    ROW("out", OPT_STRING, out, NULL, 0, 0, "FILE",
        "write the fitted team to this file, and its router to a second one (routed.router.json "
        "for routed.yaml); without --out, only the report"),
    ROW("decide", OPT_STRING, decide, "router", 0, 0, "NAME",
        "decision of the fitted team: router, weighted for the weighted vote, or subteam for the "
        "vote of the agents that vote best together"),
    ROW("accept", OPT_BOOL, accept, NULL, 0, 0, NULL,
        "write a team also if the cross-validation shows no gain"),
    ROW("seed", OPT_INT, seed, "1", 0, 9e15, "N", "seed of questions and samples"),
    ROW("cache", OPT_BOOL, use_cache, "true", 0, 0, NULL,
        "reuse calls that are in --store, and store new ones"),
    SETUP_WORK_ROWS(struct options, setup),
    SETUP_RECORD_ROWS(struct options, setup),
    {0},
};
#undef ROW

/* Bytes of concurrent calls and of the fits; bytes of a question with its answers and features. */
enum { FIT_WORK = 96 << 20, ITEM_WORK = 24576 };

struct team_command {
    const struct cli_options *c;
    const struct options *o;
    const char *path; /* the team's file */
    enum team_decision decide;
    struct setup st;
    struct team team;
    struct eval_task *tasks;
    int n_tasks;
    struct engine_client engine_client;
    struct llm_client llm_client;
};

static int decide_parse(const char *name, enum team_decision *out, struct error *err) {
    static const char *const names[] = {"router", "weighted", "subteam"};
    for (int i = 0; i < (int)ARRAY_LEN(names); i++)
        if (strcmp(name, names[i]) == 0) return *out = (enum team_decision)i, OK;
    return error_set(err, ERR_USAGE, "--decide '%s': there are router, weighted and subteam", name);
}

/* The inputs of the fit. NULL: `err` is set. */
static json_t *manifest_of(struct team_command *r, struct error *err) {
    json_t *data = json_object();
    int rc = manifest_add_file(data, r->path, err);
    for (int i = 0; rc == OK && i < r->n_tasks; i++)
        rc = eval_task_add_hashes(&r->tasks[i], data, err);
    team_add_protocol_hash(&r->team, data);
    json_t *v = manifest_json(r->st.m, team_adapters_json(&r->team), data, r->o->seed);
    if (rc == OK) return v;
    json_decref(v);
    return NULL;
}

static int64_t questions(const struct team_command *r) {
    int64_t n = 0;
    for (int i = 0; i < r->n_tasks; i++) n += r->tasks[i].n_questions;
    return n;
}

static int client_open(struct team_command *r, struct error *err) {
    int rc = team_load_adapters(&r->team, setup_load_adapter, &r->st, err);
    if (rc == OK) rc = setup_engine(&r->st, err);
    if (rc != OK) return rc;
    r->engine_client = (struct engine_client){.engine = r->st.e, .model = r->st.m};
    r->llm_client = engine_client_as_llm(&r->engine_client);
    if (!r->o->use_cache) return OK;
    r->engine_client.store =
        r->o->setup.dry_run ? store_open(":memory:", err) : setup_store(&r->st, err);
    return r->engine_client.store ? OK : err->code;
}

static int answers_run(struct team_command *r, struct team_answers *out, struct progress *p,
                       struct error *err) {
    return team_answers_run(&r->llm_client, &r->team, r->tasks, r->n_tasks, (uint64_t)r->o->seed,
                            out, p, err);
}

/* Counts the calls, whose replies are made up, and prints the estimate. */
static int work_print(struct team_command *r, struct error *err) {
    struct work_counter *counter = work_counter_new(r->st.e, r->st.m);
    struct team_answers answers;
    r->engine_client.run = work_counter_run;
    r->engine_client.run_ctx = counter;
    int rc = answers_run(r, &answers, NULL, err);
    team_answers_release(&answers);
    if (rc == OK) rc = setup_print_work(&r->st, counter, err);
    work_counter_free(counter);
    return rc;
}

/* `fit` becomes a part of the router's file. */
static int team_save(const struct team_command *r, const struct team_fit *f, const json_t *fit,
                     struct error *err) {
    const char *subject = r->decide == TEAM_DECIDE_ROUTER     ? translate("the router")
                          : r->decide == TEAM_DECIDE_WEIGHTED ? translate("the weighted vote")
                                                              : translate("the sub-team");
    if (!r->o->out) return OK;
    if (!f->better[r->decide] && !r->o->accept)
        return error_set(err, ERR_STATE,
                         "%s gains nothing in the cross-validation, and '%s' is not written; keep "
                         "the best agent '%s', fit on other questions, or give --accept",
                         subject, r->o->out, json_get_string(f->report, "best"));
    int rc = team_fit_write(f, r->decide, &r->team, r->path, r->o->out, fit, err);
    if (rc == OK) log_info("wrote '%s'", r->o->out);
    return rc;
}

static int report_and_save(struct team_command *r, const struct team_fit *f, struct error *err) {
    json_t *manifest = manifest_of(r, err);
    if (!manifest) return err->code;
    json_t *line = json_copy(f->report);
    json_object_set_new(line, "manifest", manifest);
    if (!r->c->json) team_fit_print(f->report, stdout);
    if (r->c->json) cli_print_json(json_incref(line));
    fflush(stdout);
    int rc = team_save(r, f, line, err);
    json_decref(line);
    return rc;
}

static int fit(struct team_command *r, struct error *err) {
    struct team_answers answers;
    struct team_fit f = {0};
    struct progress bar;
    progress_start(&bar, "first answers", questions(r) * r->team.n);
    int rc = answers_run(r, &answers, &bar, err);
    progress_finish(&bar, NULL);
    if (rc == OK) rc = team_fit_run(&answers, r->st.pool, &f, err);
    if (rc == OK) rc = report_and_save(r, &f, err);
    if (rc == OK && r->engine_client.n_calls > r->engine_client.n_computed)
        log_info("%lld of %lld calls were in the store",
                 (long long)(r->engine_client.n_calls - r->engine_client.n_computed),
                 (long long)r->engine_client.n_calls);
    team_fit_release(&f);
    team_answers_release(&answers);
    return rc;
}

static int model_run(struct team_command *r, struct error *err) {
    struct setup_needs needs = {
        .engine = {.max_rows = 512,
                   .max_seqs = 128,
                   .max_len = team_max_tokens(r->tasks, r->n_tasks, INT32_MAX)},
        .adapters = &r->team.adapters,
        .work = FIT_WORK + (size_t)questions(r) * ITEM_WORK,
        .estimates = true};
    int rc = setup_open(&r->st, r->c, &r->o->setup, r->o->model, &needs, err);
    if (rc == OK && r->st.m) {
        if (!r->st.m->tok) rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", r->st.path);
        if (rc == OK) rc = client_open(r, err);
        if (rc == OK) rc = r->o->setup.dry_run ? work_print(r, err) : fit(r, err);
        store_close(r->engine_client.store);
    }
    return setup_close(&r->st, rc, err);
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct team_command r = {.c = c, .o = o, .path = args->v[1]};
    const struct eval_task_options t = {.dir = o->data,
                                        .n = o->n,
                                        .shots = o->shots,
                                        .split = SPLIT_DEV,
                                        .seed = (uint64_t)o->seed};
    if (strcmp(args->v[0], "fit") != 0)
        return error_set(err, ERR_USAGE, "no '%s'; there is fit", args->v[0]);
    if (!o->tasks) return error_set(err, ERR_USAGE, "--tasks is missing: the questions to fit on");
    int rc = decide_parse(o->decide, &r.decide, err);
    if (rc == OK) rc = team_read(&r.team, r.path, err);
    if (rc == OK) rc = eval_tasks_open(o->tasks, &t, &r.tasks, &r.n_tasks, err);
    if (rc == OK) rc = model_run(&r, err);
    for (int i = 0; i < r.n_tasks; i++) eval_task_release(&r.tasks[i]);
    free(r.tasks);
    team_release(&r.team);
    return rc;
}

const struct cli_command cmd_team = {
    .name = "team",
    .args = "fit TEAM",
    .summary = "fit a router, the weights of a vote, and the agents that vote best together",
    .about =
        "The agents of a team file answer the questions of --tasks. A router learns which agent\n"
        "is right on which question, from the question's text alone: then one agent answers,\n"
        "and the others are not called. The weights of the vote are the log-odds of the agents'\n"
        "accuracy. The sub-team is the one, of all, whose unweighted vote is right most often. "
        "The\nreport compares all three with the best agent and the unweighted vote, by 5-fold\n"
        "cross-validation (McNemar's exact test, Holm's correction).\n"
        "\n"
        "--out writes the team with its router, for 'shoal debate --team', 'shoal eval --team'\n"
        "and 'shoal serve --team'. It is refused if the cross-validation shows no gain over the\n"
        "best agent. Measure the fitted team on the split 'test' with 'shoal eval'. Fit again\n"
        "when an adapter has changed.\n"
        "\n"
        "  shoal team fit team.yaml --tasks route,order,pick --out routed.yaml\n"
        "  shoal team fit team.yaml --model model.gguf --tasks dev.jsonl --out routed.yaml\n"
        "  shoal team fit team.yaml --tasks pick --decide weighted --out weighted.yaml",
    .main_options = "model tasks data n out decide accept seed cache max-memory dry-run",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 2,
    .max_args = 2,
    .run = run,
};
