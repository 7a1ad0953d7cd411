/* cmd_evolve: `shoal evolve`, `demo`, `resume` and `fork`: run evolve/run.c. demo is evolve with
 * the recipe examples/demo.yaml. */
#define _GNU_SOURCE
#include "cli/settings.h"
#include "cli/setup.h"
#include "evolve/evolve.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct options {
    char *runs, *id, *recipe, *max_memory, *kv;
    int64_t seed, at;
    bool zero_adapters, dry_run;
    int64_t max_seqs;
    struct cluster_flags cluster;
};
#define RUNS_ROW                                                                                   \
    {                                                                                              \
        "runs", OPT_STRING, offsetof(struct options, runs), "runs", 0, 0, "DIR",                   \
            "folder of runs and of shoal.db", JOB_ARG_SERVER_ONLY                                  \
    }
#define MEMORY_ROW                                                                                 \
    {                                                                                              \
        "max-memory", OPT_STRING, offsetof(struct options, max_memory), NULL, 0, 0, "SIZE",        \
            "memory limit of the process, such as 500M or 2G; the run has the same result with "   \
            "every limit",                                                                         \
            JOB_ARG_TEXT                                                                           \
    }
#define ENGINE_ROWS ENGINE_SEQS_ROW(struct options, max_seqs), CLUSTER_ROWS(struct options, cluster)
static const struct option_row rows[] = {
    RUNS_ROW,
    MEMORY_ROW,
    ENGINE_ROWS,
    {"id", OPT_STRING, offsetof(struct options, id), NULL, 0, 0, "ID",
     "name of the run; default: date, time and seed", JOB_ARG_NAME},
    {"seed", OPT_INT, offsetof(struct options, seed), "-1", -1, 9e15, "N",
     "seed of all random choices; -1: the recipe's"},
    {"zero-adapters", OPT_BOOL, offsetof(struct options, zero_adapters), NULL, 0, 0, NULL,
     "control: replace trained founders by zero adapters, so that all effects must be zero"},
    {"kv-cache-dtype", OPT_STRING, offsetof(struct options, kv), NULL, 0, 0, "ELEM",
     "number format of keys and values, of the engine and in training: f32, bf16, f16, i8 or auto; "
     "default: the recipe's",
     JOB_ARG_TEXT},
    {"dry-run", OPT_BOOL, offsetof(struct options, dry_run), NULL, 0, 0, NULL,
     "check the recipe and its files, print the plan and the estimated time, and exit"},
    {0},
};
#define PLAN_ROW                                                                                   \
    {                                                                                              \
        "dry-run", OPT_BOOL, offsetof(struct options, dry_run), NULL, 0, 0, NULL,                  \
            "check the run and its files, print the plan and the estimated time, and exit"         \
    }
static const struct option_row resume_rows[] = {RUNS_ROW, MEMORY_ROW, ENGINE_ROWS, PLAN_ROW, {0}};
static const struct option_row fork_rows[] = {
    RUNS_ROW,
    MEMORY_ROW,
    ENGINE_ROWS,
    PLAN_ROW,
    {"at", OPT_INT, offsetof(struct options, at), "0", 0, 1e6, "G",
     "the last generation that the two runs share"},
    {"recipe", OPT_STRING, offsetof(struct options, recipe), NULL, 0, 0, "FILE",
     "recipe of the later generations; default: the same", JOB_ARG_INPUT_PATH},
    {"seed", OPT_INT, offsetof(struct options, seed), "-1", -1, 9e15, "N",
     "seed of the later generations; -1: the same"},
    {"id", OPT_STRING, offsetof(struct options, id), NULL, 0, 0, "ID",
     "name of the new run; default: date, time and seed", JOB_ARG_NAME},
    {0},
};

/* The first Ctrl-C pauses at the next step, the second one stops at once. Neither loses results. */
static volatile bool pause_wanted;

static void on_interrupt(int signal_number) {
    static const char text[] = "\npausing at the next step; once more to stop at once\n";
    pause_wanted = true;
    signal(signal_number, SIG_DFL);
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) return;
}

/* The cluster of a run, or of nothing. */
struct run_cluster {
    const struct cli_options *c;
    const struct cluster_flags *flags;
    struct cluster *cluster;
};

static int engine_opened(void *ctx, struct engine *e, struct model *m, struct error *err) {
    struct run_cluster *r = ctx;
    r->cluster = cluster_flags_open(r->flags, r->c, memory_limit_named(), false, e, m, err);
    return r->cluster ? OK : err->code;
}

/* The caller frees the pool. */
static struct evolve_env env_init(const struct cli_options *c, const char *runs_dir,
                                  int64_t max_seqs) {
    signal(SIGINT, on_interrupt);
    return (struct evolve_env){.pool = pool_new((int)c->threads),
                               .cls = cli_numeric_class(c),
                               .max_seqs = (int32_t)max_seqs,
                               .root = runs_dir,
                               .find = cli_find_file,
                               .pause = &pause_wanted};
}

static struct evolve_env env_with_cluster(struct run_cluster *r, const struct cli_options *c,
                                          const struct options *o) {
    struct evolve_env env = env_init(c, o->runs, o->max_seqs);
    *r = (struct run_cluster){.c = c, .flags = &o->cluster};
    if (!o->cluster.address || o->dry_run) return env;
    env.engine_opened = engine_opened;
    env.engine_ctx = r;
    return env;
}

static void env_close(const struct evolve_env *env, struct run_cluster *r) {
    cluster_close(r->cluster);
    pool_free(env->pool);
}

static const struct recipe_section sections[] = {
    {"", evolve_recipe_rows},        {"train", train_option_rows},
    {"evolve", evolve_option_rows},  {"fitness", fitness_option_rows},
    {"search", search_option_rows},  {"race", race_option_rows},
    {"finetune", train_option_rows}, {"es", es_option_rows},
    {"genome", genome_option_rows},  {0}};

/* joules: those of this process. The stored result does not have them. */
static void print_result(const struct cli_options *c, const struct options *o, json_t *result,
                         double joules) {
    const char *id = json_string_value(json_object_get(result, "run"));
    if (!c->json) {
        evolve_run_print(result, stdout);
        printf("\n%s/%s/report.html shows it; adapters are next to it, everything else is in "
               "%s/shoal.db\n",
               o->runs, id, o->runs);
        cli_energy_log(joules);
        json_decref(result);
        return;
    }
    json_object_del(result, "debate");
    json_object_del(result, "generations");
    json_object_del(result, "manifest");
    energy_add_json(result, joules, 0);
    cli_print_json(result);
}

static int plan(const struct cli_options *c, const struct evolve_env *env,
                const struct evolve_recipe *o, const char *id, struct error *err) {
    json_t *v = evolve_id_check(id, err) == OK ? evolve_run_plan(env, o, err) : NULL;
    if (v) cli_print_dry_run(c, v);
    return v ? OK : err->code;
}

/* Prints how to chat with the last generation's adapters in a browser. */
static void print_next_step(const struct options *o, const struct evolve_recipe *loaded,
                            const char *id) {
    printf("to talk to the last generation: shoal serve %s --adapter-dir "
           "%s/%s/adapters/gen_%lld\nand open http://127.0.0.1:8000\n",
           loaded->model, o->runs, id, (long long)loaded->evolve.generations);
}

/* Adds the name of the run to `done`, if it is not NULL, when it is complete. */
static int run_recipe(const struct cli_options *c, const struct options *o, const char *recipe,
                      struct strings *done, struct error *err) {
    struct evolve_recipe loaded;
    if (memory_limit_parse(o->max_memory, err) != OK) return err->code;
    char *path = cli_find_file(recipe);
    struct run_cluster cluster;
    struct evolve_env env = env_with_cluster(&cluster, c, o);
    json_t *result = NULL;
    double joules = energy_now();
    int rc = evolve_recipe_load(&loaded, path, err);
    enum dtype kv;
    if (rc == OK && o->kv && kv_cache_dtype_parse(o->kv, env.cls, &kv, err) != OK) rc = err->code;
    if (rc == OK) {
        if (o->kv) evolve_recipe_set_kv(&loaded, o->kv);
        if (o->seed >= 0) loaded.seed = o->seed;
        loaded.zero_adapters |= o->zero_adapters;
    }
    if (rc == OK && o->dry_run) {
        rc = plan(c, &env, &loaded, o->id, err);
    } else if (rc == OK) {
        result = evolve_run_execute(&env, &loaded, o->id, err);
        rc = result ? OK : err->code;
    }
    if (result) {
        char *id = xstrdup(json_get_string(result, "run"));
        print_result(c, o, result, energy_now() - joules);
        if (!c->json && !done) print_next_step(o, &loaded, id);
        if (done) strings_add(done, id);
        setup_print_peak_memory(c, memory_limit_named());
        free(id);
    }
    evolve_recipe_release(&loaded);
    env_close(&env, &cluster);
    free(path);
    return rc;
}

/* Runs a command as if its words had been typed: those of `line`, separated by blanks, and `more`.
 */
static int command_run(const struct cli_options *c, const struct cli_command *command,
                       const char *line, const struct strings *more, struct error *err) {
    struct option_row *command_rows = settings_command_rows(command);
    struct strings words = {0}, args = {0};
    void *options = xcalloc(1, command->size);
    char *copy = xstrdup(line);
    for (char *word, *rest = copy; (word = strsep(&rest, " "));) strings_add(&words, word);
    for (int i = 0; i < more->n; i++) strings_add(&words, more->v[i]);
    options_default(command_rows, options);
    int rc = options_parse(command_rows, options, words.n, words.v, &args, err);
    if (rc == OK) rc = command->run(c, options, &args, err);
    options_release(command_rows, options);
    strings_release(&words), strings_release(&args);
    free(copy), free(options), free(command_rows);
    return rc;
}

static const char *const founders[] = {"critic", "practitioner", "explorer"};

/* Trains one adapter on the data of all founders, which have answers: a reference. */
static int pooled_train(const struct cli_options *c, const struct options *o, const char *out,
                        struct error *err) {
    struct buf joined = {0};
    char *path = xasprintf("%s.jsonl", out);
    int rc = OK;
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(founders); i++) {
        char *name = xasprintf("data/personas/%s.jsonl", founders[i]), *file = cli_find_file(name);
        rc = file_read(file, (size_t)1 << 30, &joined, err);
        free(file), free(name);
    }
    if (rc == OK) rc = file_write(path, joined.data, joined.len, err);
    char *own[] = {"--data", path, "--out", (char *)(uintptr_t)out, "--runs", o->runs};
    const struct strings more = {own, ARRAY_LEN(own)};
    const bool quiet = log_quiet;
    log_quiet = true;
    if (rc == OK)
        rc = command_run(c, &cmd_train,
                         "models/fry --r 8 --lr 4e-3 --epochs 1 --bsz 4 --grad-accum 4 "
                         "--lora-dropout 0",
                         &more, err);
    log_quiet = quiet;
    buf_release(&joined);
    free(path);
    return rc;
}

/* The founders of a run teach one adapter (shoal grow), from questions without answers and with a
 * check. */
static int founders_teach(const struct cli_options *c, const struct options *o, const char *run,
                          struct error *err) {
    char *id = xasprintf("%s-grow", run), *dir = path_join(o->runs, run),
         *out = path_join(dir, "grown"), *pooled = path_join(dir, "pooled data");
    struct strings more = {0};
    const char *const own[] = {"--runs", o->runs,        "--id", id,        "--out",
                               out,      "--references", pooled, "--agents"};
    printf("\nThe founders teach one adapter, from questions without answers and with a check. "
           "Compared with it: adapters\ngrown by votes, by the best founder alone and from the "
           "right answers, and one trained on all founders' data.\n\n");
    fflush(stdout);
    for (size_t i = 0; i < ARRAY_LEN(own); i++) strings_add(&more, own[i]);
    for (size_t i = 0; i < ARRAY_LEN(founders); i++) {
        char *path = xasprintf("%s/adapters/gen_0/%s", dir, founders[i]);
        strings_add(&more, path);
        free(path);
    }
    int rc = pooled_train(c, o, pooled, err);
    if (rc == OK)
        rc = command_run(c, &cmd_grow,
                         "models/fry --prompts arithmetic,order,route,pick --n 600 --rounds 1 "
                         "--rehearse deduction --r 8 --lr 4e-3 --max-steps 400 --bsz 16 "
                         "--grad-accum 1 --lora-dropout 0 --compare votes one gold "
                         "--test arithmetic,order,route,pick --test-n 125 "
                         "--test-retained deduction",
                         &more, err);
    if (rc == ERR_STATE) rc = OK; // nothing was published, which the report says
    strings_release(&more);
    free(pooled), free(out), free(dir), free(id);
    return rc;
}

static int run_demo(const struct cli_options *c, const void *options, const struct strings *args,
                    struct error *err) {
    const struct options *o = options;
    struct strings done = {0};
    (void)args;
    int rc = run_recipe(c, o, "examples/demo.yaml", &done, err);
    if (rc == OK && done.n && !c->json && !o->zero_adapters)
        rc = founders_teach(c, o, done.v[0], err);
    strings_release(&done);
    return rc;
}

static int run_evolve(const struct cli_options *c, const void *options, const struct strings *args,
                      struct error *err) {
    return run_recipe(c, options, args->v[0], NULL, err);
}

static int run_resume(const struct cli_options *c, const void *options, const struct strings *args,
                      struct error *err) {
    const struct options *o = options;
    if (memory_limit_parse(o->max_memory, err) != OK) return err->code;
    struct run_cluster cluster;
    struct evolve_env env = env_with_cluster(&cluster, c, o);
    double joules = energy_now();
    json_t *result = o->dry_run ? evolve_run_resume_plan(&env, args->v[0], err)
                                : evolve_run_resume(&env, args->v[0], err);
    if (result && o->dry_run)
        cli_print_dry_run(c, result);
    else if (result)
        print_result(c, o, result, energy_now() - joules);
    env_close(&env, &cluster);
    return result ? OK : err->code;
}

static int run_fork(const struct cli_options *c, const void *options, const struct strings *args,
                    struct error *err) {
    const struct options *o = options;
    if (memory_limit_parse(o->max_memory, err) != OK) return err->code;
    struct run_cluster cluster;
    struct evolve_env env = env_with_cluster(&cluster, c, o);
    double joules = energy_now();
    const struct evolve_fork fork = {.parent = args->v[0],
                                     .generation = (int)o->at,
                                     .recipe = o->recipe,
                                     .seed = o->seed,
                                     .id = o->id};
    json_t *result =
        o->dry_run ? evolve_run_fork_plan(&env, &fork, err) : evolve_run_fork(&env, &fork, err);
    if (result && o->dry_run)
        cli_print_dry_run(c, result);
    else if (result)
        print_result(c, o, result, energy_now() - joules);
    env_close(&env, &cluster);
    return result ? OK : err->code;
}

int cmd_evolve_replay(const struct cli_options *c, const char *runs, const char *id,
                      int64_t generation, struct error *err) {
    if (memory_limit_parse(NULL, err) != OK) return err->code;
    struct evolve_env env = env_init(c, runs, 0);
    json_t *v = evolve_run_replay(&env, id, (int)generation, err), *row;
    pool_free(env.pool);
    if (!v) return err->code;
    bool equal = json_is_true(json_object_get(v, "equal"));
    size_t i;
    json_array_foreach (json_object_get(v, "candidates"), i, row)
        if (!c->json)
            printf("%-12s %.12s  fitness %.6f  %s\n",
                   json_string_value(json_object_get(row, "name")),
                   json_string_value(json_object_get(row, "hash")),
                   json_number_value(json_object_get(json_object_get(row, "fitness"), "value")),
                   json_is_true(json_object_get(row, "equal")) ? "same bits" : "DIFFERS");
    if (c->json)
        cli_print_json(v);
    else
        json_decref(v);
    return equal ? OK
                 : error_set(err, ERR_MISMATCH, "generation %d of run '%s' came out differently",
                             (int)generation, id);
}

const struct cli_command cmd_demo = {
    .name = "demo",
    .args = "",
    .summary = "train, debate and breed on the starter model, in three minutes",
    .about =
        "Trains three persona adapters in one pass of the base model, evaluates them alone and\n"
        "in debate, breeds generations, and prints which step helped. It runs\n"
        "examples/demo.yaml and writes runs/ID/report.html. Then the personas teach one adapter\n"
        "from questions without answers ('shoal grow').",
    .rows = rows,
    .size = sizeof(struct options),
    .max_args = 0,
    .run = run_demo,
};
const struct cli_command cmd_evolve = {
    .name = "evolve",
    .args = "RECIPE",
    .summary = "train founders, debate, breed and measure, by a recipe",
    .about =
        "A recipe is a YAML file with a model, personas, tasks and sections; docs/EVOLUTION.md\n"
        "explains them. Everything that a run computes is kept in runs/shoal.db and runs/ID.\n"
        "Ctrl-C pauses a run. 'shoal resume ID' continues a paused or killed run, 'shoal fork\n"
        "ID' starts a different run from one of its generations, 'shoal lineage ID' prints its\n"
        "family tree.\n"
        "\n"
        "  shoal evolve examples/demo.yaml --seed 7",
    .recipe = sections,
    .job_args = (const struct job_args[]){{NULL, {JOB_ARG_INPUT_PATH}, false}, {0}},
    .job_resume = "resume",
    .job_store_option = "runs",
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run_evolve,
};
const struct cli_command cmd_resume = {
    .name = "resume",
    .args = "ID",
    .summary = "continue a paused or killed run, with the same result",
    .about =
        "Continues runs/ID where it was paused or killed. The result has the same hashes as an\n"
        "uninterrupted run. For a finished run it prints the result again.",
    .rows = resume_rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run_resume,
};
const struct cli_command cmd_fork = {
    .name = "fork",
    .args = "ID",
    .summary = "start a new run from a generation of another run",
    .about =
        "The new run shares the founders and the generations up to --at with run ID; they are\n"
        "not computed again. After that it follows its own recipe or seed. With neither it\n"
        "becomes the same run, bit for bit.\n"
        "\n"
        "  shoal fork 20261122-060712-s1 --at 2 --seed 9\n"
        "  shoal fork 20261122-060712-s1 --at 2 --recipe bolder.yaml --id bolder",
    .rows = fork_rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run_fork,
};
