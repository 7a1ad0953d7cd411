/* cmd_sleep: `shoal sleep`: a user's memories become weights of the user's adapter. */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "sleep/sleep.h"

#include <stdlib.h>

struct options {
    struct sleep_options sleep; /* first: the tables of its options are those of the command */
    bool status, dry_run;
};
#define ROW(name, field, help)                                                                     \
    { name, OPT_BOOL, offsetof(struct options, field), NULL, 0, 0, NULL, help, JOB_ARG_FORBIDDEN }
static const struct option_row rows[] = {
    ROW("status", status,
        "print the versions, what they have learned, and which know forgotten memories"),
    ROW("dry-run", dry_run, "check the options and files, print the plan, and exit"),
    {0},
};
#undef ROW

static int status(const struct cli_options *c, const struct options *o, struct error *err) {
    json_t *v = sleep_status(&o->sleep, err);
    if (!v) return err->code;
    if (c->json) {
        cli_print_json(v);
    } else {
        sleep_status_print(v, stdout);
        json_decref(v);
    }
    return OK;
}

/* A refused result is printed, and an error. */
static int result_print(const struct cli_options *c, json_t *result, double joules,
                        struct error *err) {
    const bool done = json_is_true(json_object_get(result, "published")) ||
                      json_is_true(json_object_get(result, "up_to_date"));
    if (!done) error_set(err, ERR_STATE, "%s", json_get_string(result, "why"));
    if (c->json) {
        energy_add_json(result, joules, 0);
        cli_print_json(result);
    } else {
        sleep_print(result, stdout);
        cli_energy_log(joules);
        json_decref(result);
    }
    setup_print_peak_memory(c, memory_limit_named());
    return done ? OK : err->code;
}

/* Measurements use the exact class, whatever class trains. */
static int model_run(const struct cli_options *c, const struct options *o, const char *path,
                     struct pool *pool, struct error *err) {
    const enum numeric_class cls = cli_numeric_class(c);
    struct sleep_env env = {.m = model_open(path, cls, err), .pool = pool};
    json_t *result = NULL;
    const double joules = energy_now();
    int rc = env.m ? OK : err->code;
    if (rc == OK && !env.m->tok) rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", path);
    if (rc == OK && !model_hash(env.m, err)) rc = err->code; // for lineage
    if (rc == OK &&
        !(env.exact = cls == NUMERIC_EXACT ? env.m : model_open(path, NUMERIC_EXACT, err)))
        rc = err->code;
    if (rc == OK) rc = (result = sleep_run(&env, &o->sleep, err)) ? OK : err->code;
    if (result) rc = result_print(c, result, energy_now() - joules, err);
    if (env.exact != env.m) model_close(env.exact);
    model_close(env.m);
    return rc;
}

static int plan_or_run(const struct cli_options *c, const struct options *o, const char *name,
                       struct error *err) {
    const enum numeric_class cls = cli_numeric_class(c);
    char *path = cli_find_file(name);
    struct pool *pool = pool_new((int)c->threads);
    struct model_size size;
    int rc = memory_limit_parse(o->sleep.learn.max_memory, err);
    if (rc == OK) rc = model_measure(path, cls, &size, err);
    if (rc == OK) rc = sleep_memory_check(&o->sleep, &size, cls, pool, err);
    if (rc == OK && o->dry_run) {
        json_t *plan = sleep_plan(&o->sleep, &size, err);
        if (plan) cli_print_dry_run(c, plan);
        rc = plan ? OK : err->code;
    } else if (rc == OK) {
        rc = model_run(c, o, path, pool, err);
    }
    memory_limit_set(0);
    pool_free(pool);
    free(path);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    if (sleep_options_check(&o->sleep, err) != OK) return err->code;
    if (o->status) return status(c, o, err);
    if (args->n == 0) return error_set(err, ERR_USAGE, "MODEL is missing");
    return plan_or_run(c, o, args->v[0], err);
}

const struct cli_command cmd_sleep = {
    .name = "sleep",
    .args = "MODEL --memory DB --out DIR",
    .summary = "a user's memories become weights of an adapter",
    .about =
        "Turns the memories of 'shoal memory' into questions and answers in several wordings,\n"
        "and trains the user's adapter on them, from its current version. Before and after,\n"
        "other wordings and the tasks of --rehearse are measured by generation. A new version is\n"
        "published if recall improved and other tasks lost at most --retain-points; 'shoal\n"
        "adapter rollback DIR' restores the version before. Otherwise the exit code is 1. After\n"
        "a memory was deleted or ended, the next sleep trains from the adapter before the first\n"
        "sleep, and --status names the versions that still know it (docs/MEMORY.md).\n"
        "\n"
        "  shoal sleep models/fry --memory me.db --out me --rehearse copy,sort,compare\n"
        "  shoal sleep MODEL --memory me.db --user ann --out ann --rehearse chats.jsonl\n"
        "  shoal sleep --status --memory me.db --out me\n"
        "  shoal run models/fry --adapter me 'Do you know my name?'",
    .main_options = "memory user out init-adapter rehearse retain-points status r lr max-steps "
                    "seed max-memory dry-run",
    .rows = rows,
    .more = sleep_option_tables,
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = 1,
    .job_args = (const struct job_args[]){{NULL, {JOB_ARG_INPUT_PATH}, false}, {0}},
    .run = run,
};
