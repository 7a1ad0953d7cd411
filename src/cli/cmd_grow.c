/*
 * cmd_grow: `shoal grow`: agents propose answers, a check selects them, and one adapter, or each
 * agent's, learns from them (grow/grow.h).
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "grow/grow.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct grow_options grow; /* first: the tables of its options are those of the command */
    struct strings agents;
    bool dry_run;
};
#define ROW(name, type, field, metavar, ...)                                                       \
    { name, type, offsetof(struct options, field), NULL, 0, 0, metavar, __VA_ARGS__ }
static const struct option_row rows[] = {
    ROW("agents", OPT_LIST, agents, "DIR",
        "adapters that propose answers; 'base' is the base model; default: the base",
        JOB_ARG_BUILTIN_OR_PATH),
    ROW("dry-run", OPT_BOOL, dry_run, NULL,
        "check the options and files, print the plan, and exit"),
    {0},
};
#undef ROW

static int agents_open(struct team *t, const struct options *o, struct error *err) {
    static char *base[] = {"base"};
    const struct strings alone = {base, 1};
    int rc = team_from_flags(t, "brief", o->agents.n ? &o->agents : &alone,
                             &(const struct strings){0}, err);
    if (rc == OK && t->n >= TEAM_MAX)
        rc = error_set(err, ERR_USAGE, "%d agents; at most %d can propose with the grown adapter",
                       t->n, TEAM_MAX - 1);
    return rc;
}

struct adapters {
    struct model *m;
    struct adapter *v[TEAM_MAX];
    int n;
};

static struct adapter *agent_adapter_open(void *ctx, const char *path, struct error *err) {
    struct adapters *a = ctx;
    return a->v[a->n] = adapter_open(path, a->m, err), a->v[a->n] ? a->v[a->n++] : NULL;
}

/* Prints a command for the published adapters. */
static void next_print(const char *model, const json_t *result) {
    const json_t *learners = json_object_get(result, "learners"), *v;
    size_t i;
    if (!learners)
        printf("next: shoal chat %s --adapter %s\n", model, json_get_string(result, "dir"));
    else
        printf("next: shoal debate %s --agents", model);
    json_array_foreach (learners, i, v)
        if (json_is_true(json_object_get(v, "published"))) printf(" %s", json_get_string(v, "dir"));
    if (learners) printf("\n");
}

static int result_print(const struct cli_options *c, const char *model, const struct options *o,
                        json_t *result, double joules, struct error *err) {
    const bool published = json_is_true(json_object_get(result, "published"));
    if (c->json) {
        energy_add_json(result, joules, 0);
        cli_print_json(result);
    } else {
        grow_print(result, stdout);
        printf("\n%s/%s/report.html shows it\n", o->grow.learn.gate.runs,
               json_get_string(result, "run"));
        cli_energy_log(joules);
        if (published && !log_quiet) next_print(model, result);
        json_decref(result);
    }
    setup_print_peak_memory(c, memory_limit_named());
    if (published) return OK;
    return error_set(err, ERR_STATE, "no adapter passed the gate; nothing is published");
}

static int model_run(const struct cli_options *c, const struct options *o, const char *name,
                     const char *path, struct team *t, const struct grow_questions *q,
                     struct pool *pool, struct error *err) {
    struct adapters adapters = {.m = model_open(path, cli_numeric_class(c), err)};
    struct grow_env env = {.m = adapters.m, .pool = pool, .n_agents = t->n};
    json_t *result = NULL;
    double joules = energy_now();
    int rc = env.m ? OK : err->code;
    if (rc == OK && !env.m->tok) rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", path);
    if (rc == OK && !model_hash(env.m, err)) rc = err->code; // for lineage
    if (rc == OK) rc = team_load_adapters(t, agent_adapter_open, &adapters, err);
    memcpy(env.team, t->v, sizeof env.team);
    if (rc == OK) rc = (result = grow_run(&env, &o->grow, q, err)) ? OK : err->code;
    if (result) rc = result_print(c, name, o, result, energy_now() - joules, err);
    for (int i = 0; i < adapters.n; i++) adapter_release(adapters.v[i]);
    model_close(env.m);
    return rc;
}

static int plan_or_run(const struct cli_options *c, const struct options *o, const char *name,
                       struct team *t, const struct grow_questions *q, struct error *err) {
    const enum numeric_class cls = cli_numeric_class(c);
    char *path = cli_find_file(name);
    struct pool *pool = pool_new((int)c->threads);
    struct model_size size;
    int rc = memory_limit_parse(o->grow.learn.max_memory, err);
    if (rc == OK) rc = model_measure(path, cls, &size, err);
    if (rc == OK) rc = grow_memory_check(&o->grow, q, t->n, &size, cls, pool, err);
    if (rc == OK && o->dry_run) {
        json_t *plan = grow_plan(&o->grow, q, t->n, &size, cls, pool, err);
        if (plan) cli_print_dry_run(c, plan);
        rc = plan ? OK : err->code;
    } else if (rc == OK) {
        rc = model_run(c, o, name, path, t, q, pool, err);
    }
    memory_limit_set(0);
    pool_free(pool);
    free(path);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct grow_questions q = {0};
    struct team team = {0};
    if (grow_options_check(&o->grow, err) != OK) return err->code;
    int rc = agents_open(&team, o, err);
    if (rc == OK) rc = grow_questions_open(&o->grow, &q, err);
    if (rc == OK) rc = plan_or_run(c, o, args->v[0], &team, &q, err);
    grow_questions_release(&q);
    team_release(&team);
    return rc;
}

const struct cli_command cmd_grow = {
    .name = "grow",
    .args = "MODEL --agents A B C --prompts LIST --check CHECK --out DIR",
    .summary = "agents propose answers, a check selects, one adapter learns",
    .about =
        "In each round the agents, and the adapter of the round before, sample answers to\n"
        "questions; a check that does not know the right answers selects some; a new adapter\n"
        "is trained on the answers that were selected so far. It is accepted if its answers to\n"
        "held-out questions pass as often as before; the last accepted one is published if they\n"
        "pass more often than those of the current version, or of the base, beyond chance. The\n"
        "same command continues an interrupted run and ends with the same hashes. The exit code\n"
        "is 1 if nothing is published, or if too few questions have an answer that passes.\n"
        "\n"
        "  shoal grow models/fry --agents g/critic g/explorer --prompts arithmetic,order \\\n"
        "      --check question --out /tmp/one --r 8 --lr 4e-3\n"
        "  shoal grow MODEL --prompts gsm8k.jsonl --check calculator --grader number --out one\n"
        "  shoal grow MODEL --prompts humaneval.jsonl --check tests --max-tokens 512 --out one",
    .job_args = (const struct job_args[]){{NULL, {JOB_ARG_INPUT_PATH}, false}, {0}},
    .job_store_option = "runs",
    .main_options = "agents prompts n check out rounds samples passes max-tokens test compare "
                    "r lr max-steps seed "
                    "max-memory dry-run",
    .rows = rows,
    .more = grow_option_tables,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run,
};
