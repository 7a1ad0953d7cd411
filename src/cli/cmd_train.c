/*
 * shoal train: makes adapters from conversations, or prints what that would take.
 *
 * The base and the options come from the command line or from a recipe in the place of the base;
 * flags go before the recipe. Option names of the first predecessor's script, of PEFT and of TRL
 * work as aliases.
 */
#define _GNU_SOURCE
#include "cli/train_plan.h"
#include "cli/train_run.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct train_command {
    struct train_options train; /* first, because its rows are copied unchanged */
    struct strings data;
    struct rl_options policy;
    struct es_options es;
    char *model, *out, *method, *start;
    bool dry_run;
    struct train_gate_options gate;
};
#define ROW(name, type, field, metavar, ...)                                                       \
    { name, type, offsetof(struct train_command, field), NULL, 0, 0, metavar, __VA_ARGS__ }
#define ALIAS(name, row)                                                                           \
    { name, OPT_ALIAS, 0, row, 0, 0, NULL, NULL }

/* Flags, and keys at the top level of a recipe. */
static const struct option_row own_rows[] = {
    ROW("model", OPT_STRING, model, "MODEL", "base model, if it is not the first argument",
        JOB_INPUT),
    ROW("data", OPT_LIST, data, "FILE",
        "conversations; several NAME=FILE train several adapters in one pass of the base model",
        JOB_NAMED),
    ROW("out", OPT_STRING, out, "DIR",
        "adapter directory; with several adapters, their parent folder", JOB_OUTPUT),
    {"method", OPT_STRING, offsetof(struct train_command, method), "sft", 0, 0, "NAME",
     "sft; dpo from preferences; reinforce, rloo or grpo from rewards; es: sft without gradients",
     JOB_TEXT},
    ROW("init-adapter", OPT_STRING, start, "DIR",
        "initial adapter: training starts from its weights", JOB_INPUT),
    ROW("dry-run", OPT_BOOL, dry_run, NULL,
        "read the data, compute one pass, print the plan of the run and its first batch; reward "
        "methods also sample some completions"),
    GATE_ROWS(struct train_command, gate),
    ALIAS("base-model", "model"),
    ALIAS("model-name-or-path", "model"),
    ALIAS("output-dir", "out"),
    {0},
};

/* All tables: own_rows, the trainer's rows, and the rows of the other methods. */
static struct option_row train_rows[128];

static size_t rows_append(size_t at, const struct option_row *rows, size_t offset) {
    for (; rows->name; rows++, at++) {
        CHECK(at + 1 < ARRAY_LEN(train_rows));
        train_rows[at] = *rows;
        train_rows[at].offset += offset;
    }
    return at;
}

__attribute__((constructor)) static void train_rows_fill(void) {
    size_t n = rows_append(0, own_rows, 0);
    n = rows_append(n, train_option_rows, offsetof(struct train_command, train));
    n = rows_append(n, rl_option_rows, offsetof(struct train_command, policy));
    rows_append(n, es_option_rows, offsetof(struct train_command, es));
}

/* The top level fills own_rows; the sections fill the other tables. */
static int recipe_load(void *options, const char *path, struct error *err) {
    struct train_command *o = options;
    const struct {
        const char *name;
        const struct option_row *rows;
        void *at;
    } sections[] = {{"train", train_option_rows, &o->train},
                    {"policy", rl_option_rows, &o->policy},
                    {"es", es_option_rows, &o->es}};
    struct yaml y;
    char *found = cli_find_file(path);
    int rc = yaml_load(&y, found, err);
    free(found);
    if (rc != OK) return rc;
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(sections); i++) {
        rc = options_from_yaml(sections[i].rows, sections[i].at, &y, sections[i].name, err);
        json_object_del(y.root, sections[i].name);
    }
    if (rc == OK) rc = options_from_yaml(own_rows, o, &y, NULL, err);
    yaml_release(&y);
    return rc;
}

static int dry_run(const struct cli_options *c, const struct train_command *o,
                   const struct model *m, struct train_job *jobs, int n, struct pool *pool,
                   struct error *err) {
    struct train_plan_request q = {.m = m,
                                   .jobs = jobs,
                                   .n = n,
                                   .train = &o->train,
                                   .policy = &o->policy,
                                   .es = &o->es,
                                   .pool = pool};
    int rc = train_method_parse(o->method, &q.method, err);
    return rc ? rc : train_plan_print(c, &q, err);
}

static int method_run(const struct train_command *o, struct train_run *run, const struct model *m,
                      struct train_job *jobs, int n, struct pool *pool, const char *checkpoint,
                      struct error *err) {
    const struct train_callbacks watch = train_run_callbacks(run);
    enum train_method method;
    int rc = train_method_parse(o->method, &method, err);
    if (rc != OK) return rc;
    if (method == METHOD_SFT || method == METHOD_ES)
        return sft_run_with_callbacks(m, jobs, n, &o->train, method == METHOD_ES ? &o->es : NULL,
                                      pool, checkpoint, &watch, err);
    return rl_run_with_callbacks(m, jobs, n, &o->train, method, &o->policy, NULL, pool, checkpoint,
                                 &watch, err);
}

/* All options that determine the training, including those of the method. */
static json_t *run_options(const struct train_command *o) {
    json_t *all = options_json(train_option_rows, &o->train), *own;
    if (strcmp(o->method, "sft") == 0) return all;
    own = strcmp(o->method, "es") == 0 ? options_json(es_option_rows, &o->es)
                                       : options_json(rl_option_rows, &o->policy);
    json_object_set_new(all, "method", json_string(o->method));
    json_object_update(all, own);
    json_decref(own);
    return all;
}

static int out_train(const struct cli_options *c, const struct train_command *o, struct model *m,
                     struct train_job *jobs, int n, struct pool *pool, struct error *err) {
    int rc;
    char *checkpoint = path_join(o->out, "checkpoint.bin"),
         **dirs = xcalloc((size_t)n, sizeof *dirs);
    bool several = n > 1 || strchr(o->data.v[0], '=');
    struct train_run run;
    for (int i = 0; i < n; i++)
        dirs[i] = several ? path_join(o->out, jobs[i].name) : xstrdup(o->out);
    json_t *options = run_options(o);
    rc = train_run_open(&run, c, &o->gate, options, m, pool, o->out, jobs, dirs, n, err);
    json_decref(options);
    if (rc == OK) rc = method_run(o, &run, m, jobs, n, pool, checkpoint, err);
    if (rc == OK && train_run_finish(&run, jobs, err) != OK)
        rc = error_wrap(err, "training is done and kept in '%s', but cannot be saved", checkpoint);
    if (rc == OK) unlink(checkpoint);
    rc = train_run_close(&run, rc, err);
    for (int i = 0; i < n; i++) free(dirs[i]);
    free(dirs);
    free(checkpoint);
    return rc;
}

/* Holds a lock: the output folder has one checkpoint, so it takes one run at a time. */
static int train_and_publish(const struct cli_options *c, const struct train_command *o,
                             struct model *m, struct train_job *jobs, int n, struct pool *pool,
                             struct error *err) {
    int rc = dir_make(o->out, err), held = -1;
    if (rc == OK && (held = dir_lock(o->out, "folder", err)) < 0) rc = held;
    if (rc == OK) rc = out_train(c, o, m, jobs, n, pool, err);
    dir_unlock(held, o->out);
    return rc;
}

enum { MAX_JOBS = 32 };

static int train(const struct cli_options *c, const struct train_command *o, struct model *m,
                 struct pool *pool, struct error *err) {
    struct adapter *start = o->start ? adapter_open(o->start, m, err) : NULL;
    struct train_job jobs[MAX_JOBS] = {{0}};
    char *names[MAX_JOBS] = {0};
    int n = o->data.n;
    for (int i = 0; i < n; i++) {
        const char *eq = strchr(o->data.v[i], '=');
        names[i] = eq ? strndup(o->data.v[i], (size_t)(eq - o->data.v[i])) : xstrdup("adapter");
        jobs[i] =
            (struct train_job){.name = names[i],
                               .data = eq ? eq + 1 : o->data.v[i],
                               .eval_data = data_file_for_adapter(&o->gate.eval_data, names[i]),
                               .start = start};
    }
    int rc = o->start && !start ? err->code
             : o->dry_run       ? dry_run(c, o, m, jobs, n, pool, err)
                                : train_and_publish(c, o, m, jobs, n, pool, err);
    for (int i = 0; i < n; i++) {
        adapter_release(jobs[i].result);
        free(names[i]);
    }
    adapter_release(start);
    return rc;
}

static int method_check(const struct train_command *o, struct error *err) {
    enum train_method method;
    int rc = train_method_parse(o->method, &method, err);
    return rc == OK && method == METHOD_ES ? es_options_check(&o->es, &o->train, err) : rc;
}

/* Each name becomes a folder below --out. */
static int names_check(const struct strings *data, struct error *err) {
    for (int i = 0; i < data->n; i++) {
        const char *v = data->v[i];
        size_t n = strcspn(v, "=");
        bool dots = (n == 1 && v[0] == '.') || (n == 2 && v[0] == '.' && v[1] == '.');
        if (v[n] == '=' && (dots || n > NAME_MAX || memchr(v, '/', n)))
            return error_set(err, ERR_USAGE,
                             "'%.*s' is not a valid adapter name: it becomes a folder below --out",
                             (int)MIN(n, 64), v);
    }
    return OK;
}

static int command_check(const struct train_command *o, const char *model, struct error *err) {
    int n = o->data.n;
    enum lr_schedule schedule;
    enum optim optim;
    if (!model)
        return error_set(err, ERR_USAGE, "the base is missing; name it first or with --model");
    if (n < 1 || n > MAX_JOBS) return error_set(err, ERR_USAGE, "--data wants 1 to 32 files");
    if (!o->out && !o->dry_run) return error_set(err, ERR_USAGE, "--out is missing");
    for (int i = 0; n > 1 && i < n; i++)
        if (!strchr(o->data.v[i], '='))
            return error_set(err, ERR_USAGE, "'%s': with several files each is NAME=FILE",
                             o->data.v[i]);
    int rc = names_check(&o->data, err);
    if (rc == OK) rc = optim_parse(o->train.optim, &optim, err);
    if (rc == OK) rc = lr_schedule_parse(o->train.lr_scheduler, &schedule, err);
    return rc == OK ? method_check(o, err) : rc;
}

static int run_train(const struct cli_options *c, const void *options, const struct strings *args,
                     struct error *err) {
    const struct train_command *o = options;
    const char *first = args->n && !cli_is_recipe(args->v[0]) ? args->v[0] : NULL;
    const char *model = first ? first : o->model;
    if (first && o->model)
        return error_set(err, ERR_USAGE, "two bases are named, '%s' and '%s'", first, o->model);
    if (command_check(o, model, err) != OK) return err->code;
    char *path = cli_find_file(model);
    struct pool *pool = pool_new((int)c->threads);
    struct model *m = model_open(path, cli_numeric_class(c), err);
    int rc = m ? OK : err->code;
    if (m && !m->tok) rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", path);
    if (rc == OK && !o->dry_run && !model_hash(m, err)) rc = err->code; // for lineage
    if (rc == OK) rc = train(c, o, m, pool, err);
    model_close(m);
    pool_free(pool);
    free(path);
    return rc;
}

const struct cli_command cmd_train = {
    .name = "train",
    .args = "MODEL|RECIPE --data FILE --out DIR",
    .summary = "fine-tune LoRA adapters on conversations",
    .about =
        "Conversations are {\"messages\": [...]}, {\"prompt\", \"completion\"} or {\"text\"}: "
        "one object a line, objects one after\n"
        "another, or an array. Loss is taken on the assistant's words. Interrupted training "
        "continues. A recipe is YAML with\n"
        "these names: model, data, out, eval_data, method, start, and the others in the sections "
        "train, policy and es; flags go\n"
        "before it. Method dpo takes {\"prompt\", \"chosen\", \"rejected\"}; reinforce, rloo and "
        "grpo take prompts without answers,\n"
        "with what --reward looks for, and learn from what they write themselves.\n"
        "With --eval-data, a version that is not better on it than the one before is set aside "
        "and the exit code is 1;\n"
        "what was at --out before can be had again with 'shoal adapter rollback DIR'.\n\n"
        "  shoal train models/fry --data data/personas/critic.jsonl --out /tmp/critic --r 8 "
        "--lr 4e-3\n"
        "  shoal train models/fry --data a=a.jsonl b=b.jsonl --out /tmp/both --dry-run\n"
        "  shoal train models/fry --method rloo --data fry:pick --prefix answer: --out /tmp/pick "
        "--r 8 --lr 2e-3",
    .recipe_load = recipe_load,
    .job_args = (const struct job_args[]){{NULL, {JOB_INPUT}, false}, {0}},
    .job_keeps = "runs",
    .rows = train_rows,
    .size = sizeof(struct train_command),
    .min_args = 0,
    .max_args = 1,
    .run = run_train,
};
