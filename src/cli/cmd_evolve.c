/* shoal evolve, demo and resume: runs of evolve/run.c. The demo is the evolve command on the recipe
 * that ships. */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "evolve/evolve.h"

#include <stdlib.h>

struct options {
    char *runs, *id;
    int64_t seed;
    bool zero_adapters;
};
#define ROOT_ROW                                                                                   \
    {                                                                                              \
        "runs", OPT_STRING, offsetof(struct options, runs), "runs", 0, 0, "DIR",                   \
            "folder of runs and of shoal.db"                                                       \
    }
static const struct option_row rows[] = {
    ROOT_ROW,
    {"id", OPT_STRING, offsetof(struct options, id), NULL, 0, 0, "ID",
     "name of the run; default: date, time and seed"},
    {"seed", OPT_INT, offsetof(struct options, seed), "-1", -1, 9e15, "N",
     "of everything random; -1: the recipe's"},
    {"zero-adapters", OPT_BOOL, offsetof(struct options, zero_adapters), NULL, 0, 0, NULL,
     "control: replace trained founders by zero adapters, so that every effect must vanish"},
    {0},
};
static const struct option_row resume_rows[] = {ROOT_ROW, {0}};

static const struct recipe_section sections[] = {{"", run_option_rows},
                                                 {"train", train_option_rows},
                                                 {"evolve", evolve_option_rows},
                                                 {"fitness", fitness_option_rows},
                                                 {0}};

static void print_result(const struct common *c, const struct options *o, json_t *result) {
    const char *id = json_string_value(json_object_get(result, "run"));
    if (!c->json) {
        run_print(result, stdout);
        printf("\n%s/%s/report.html shows it; adapters are beside it, everything else is in "
               "%s/shoal.db\n",
               o->runs, id, o->runs);
        json_decref(result);
        return;
    }
    json_object_del(result, "debate");
    json_object_del(result, "generations");
    json_object_del(result, "manifest");
    cli_print(result);
}

static bool id_is_safe(const char *id) {
    for (const char *p = id; *p; p++)
        if (!((*p >= 'a' && *p <= 'z') || (*p >= 'A' && *p <= 'Z') || (*p >= '0' && *p <= '9') ||
              *p == '-' || *p == '_'))
            return false;
    return *id != 0;
}

static int start(const struct common *c, const struct options *o, const char *recipe,
                 struct error *err) {
    struct run_options ro;
    char *path = cli_find(recipe);
    struct pool *pool = pool_new((int)c->threads);
    struct run_env env = {.pool = pool, .cls = cli_class(c), .root = o->runs, .find = cli_find};
    json_t *result = NULL;
    int rc = run_recipe_load(&ro, path, err);
    if (rc == OK && o->id && !id_is_safe(o->id))
        rc = error_set(err, ERR_USAGE, "'%s' is no name for a run; use letters, digits, - and _",
                       o->id);
    if (rc == OK) {
        if (o->seed >= 0) ro.seed = o->seed;
        ro.zero_adapters |= o->zero_adapters;
        result = run_execute(&env, &ro, o->id, NULL, err);
        rc = result ? OK : err->code;
    }
    if (result) print_result(c, o, result);
    run_options_release(&ro);
    pool_free(pool);
    free(path);
    return rc;
}

static int run_demo(const struct common *c, const void *options, const struct strings *args,
                    struct error *err) {
    (void)args;
    return start(c, options, "examples/demo.yaml", err);
}

static int run_evolve(const struct common *c, const void *options, const struct strings *args,
                      struct error *err) {
    return start(c, options, args->v[0], err);
}

static int run_again(const struct common *c, const void *options, const struct strings *args,
                     struct error *err) {
    const struct options *o = options;
    struct pool *pool = pool_new((int)c->threads);
    struct run_env env = {.pool = pool, .cls = cli_class(c), .root = o->runs, .find = cli_find};
    json_t *result = id_is_safe(args->v[0]) ? run_resume(&env, args->v[0], err) : NULL;
    if (!id_is_safe(args->v[0])) error_set(err, ERR_MISSING, "no run '%s'", args->v[0]);
    if (result) print_result(c, o, result);
    pool_free(pool);
    return result ? OK : err->code;
}

const struct command cmd_demo = {
    .name = "demo",
    .args = "",
    .summary = "the main job on the starter model, in three minutes",
    .about =
        "Trains three persona adapters in one base pass, lets them answer alone and in debate, "
        "breeds generations, and\n"
        "prints what helped and what did not. Runs examples/demo.yaml; leaves runs/ID/report.html.",
    .rows = rows,
    .size = sizeof(struct options),
    .max_args = 0,
    .run = run_demo,
};
const struct command cmd_evolve = {
    .name = "evolve",
    .args = "RECIPE",
    .summary = "train founders, debate, breed and measure, as a recipe says",
    .about =
        "A recipe is YAML: model, personas, tasks, and the sections train, evolve and fitness. "
        "Everything a run does is\n"
        "kept in runs/shoal.db and runs/ID; a killed run is continued with 'shoal resume ID'.\n\n"
        "  shoal evolve examples/demo.yaml --seed 7",
    .recipe = sections,
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run_evolve,
};
const struct command cmd_resume = {
    .name = "resume",
    .args = "ID",
    .summary = "continue a killed run, to the same result",
    .about = "Continues runs/ID where it was killed. The result has the hashes of an uninterrupted "
             "run. A finished run prints\n"
             "its result again.",
    .rows = resume_rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run_again,
};
