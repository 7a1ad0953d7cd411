/*
 * cmd_train: `shoal train`: trains adapters, or prints the plan of the training.
 *
 * The first argument is the base or a recipe, which names the base; flags go before a recipe.
 * Option names of PEFT, TRL and an earlier script are aliases (docs/COMPATIBILITY.md).
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "cli/train_plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct train_command {
    struct train_settings settings; /* first: the tables of its options are those of the command */
    char *model;
    bool dry_run;
};
#define ROW(name, type, field, metavar, ...)                                                       \
    { name, type, offsetof(struct train_command, field), NULL, 0, 0, metavar, __VA_ARGS__ }
#define ALIAS(name, row)                                                                           \
    { name, OPT_ALIAS, 0, row, 0, 0, NULL, NULL }

static const struct option_row command_rows[] = {
    ROW("model", OPT_STRING, model, "MODEL", "base model, if it is not the first argument",
        JOB_ARG_INPUT_PATH),
    ROW("dry-run", OPT_BOOL, dry_run, NULL,
        "read the data, compute one pass, print the plan of the run and its first batch; reward "
        "methods also sample some completions"),
    ALIAS("base-model", "model"),
    ALIAS("model-name-or-path", "model"),
    {0},
};
static const struct option_table recipe_tables[] = {
    {train_settings_rows, 0},
    {gate_option_rows, offsetof(struct train_settings, gate)},
    {0},
};

/* The top level fills the command's own rows, those of the settings and of the gate; the sections
 * fill the other tables. */
static int recipe_load(void *options, const char *path, struct error *err) {
    struct train_command *o = options;
    const struct {
        const char *name;
        const struct option_row *rows;
        void *at;
    } sections[] = {{"train", train_option_rows, &o->settings.train},
                    {"policy", rl_option_rows, &o->settings.policy},
                    {"es", es_option_rows, &o->settings.es}};
    struct yaml y;
    char *found = cli_find_file(path);
    int rc = yaml_load(&y, found, err);
    free(found);
    if (rc != OK) return rc;
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(sections); i++) {
        rc = options_from_yaml(sections[i].rows, sections[i].at, &y, sections[i].name, err);
        json_object_del(y.root, sections[i].name);
    }
    struct option_row *top = options_join(command_rows, recipe_tables);
    if (rc == OK) rc = options_from_yaml(top, o, &y, NULL, err);
    free(top);
    yaml_release(&y);
    return rc;
}

/* results */

static void comparison_print(const char *what, const struct gate_comparison *p) {
    if (p->n == 0) return;
    printf("  %s: n = %lld, %.4f to %.4f nats per token, gain %+.4f (%+.4f … %+.4f), p = %.2g\n",
           what, (long long)p->n, p->before, p->after, p->gain.value, p->gain.lo, p->gain.hi, p->p);
}

/* The context of on_result. */
struct result_context {
    bool json;
    int n; /* adapters of the run */
};
enum { REPLY_COLUMNS = 100, MAX_ADAPTERS_WITH_REPLIES = 4 };

/* A line of a text, which may be of several. */
static void line_print(const char *label, const char *text) {
    struct buf one = {0}, clean = {0};
    for (const char *p = text; *p; p++) buf_add(&one, *p == '\n' ? " " : p, 1);
    buf_add(&one, "", 1);
    size_t n = text_fit(one.data, REPLY_COLUMNS);
    buf_add_sanitized(&clean, one.data, n);
    printf("  %-7s %s%s\n", label, clean.data ? clean.data : "", one.data[n] ? " …" : "");
    buf_release(&one);
    buf_release(&clean);
}

/* Replies before and after: all of one adapter, two of each of a few. */
static void replies_print(const struct train_effect *e, int n_adapters) {
    const json_t *row;
    size_t i;
    json_array_foreach (e->replies, i, row) {
        if (n_adapters > MAX_ADAPTERS_WITH_REPLIES || (n_adapters > 1 && i == 2)) return;
        const char *answer = json_get_string(row, "answer"), *after = json_get_string(row, "after");
        line_print("prompt", json_get_string(row, "prompt"));
        line_print("before", json_get_string(row, "before"));
        line_print("after", after);
        if (strcmp(answer, after) != 0) line_print("data", answer);
    }
}

/* Losses or rewards at the beginning and at the end. The loss of a policy gradient is near 0 in
 * every step, so rewards replace it. */
static void change_print(const struct train_result *r) {
    const struct train_effect *e = &r->effect;
    const struct train_job *job = r->job;
    bool rewards = !isnan(job->last_reward);
    if (rewards)
        printf("mean reward %.4f in the first step, %.4f in the last, ", job->first_reward,
               job->last_reward);
    if (e->n > 0)
        printf("loss %.4f to %.4f on %d %s, ", e->before, e->after, e->n,
               r->gate.eval.n ? "held-out samples" : "of its samples");
    else if (!rewards)
        printf("loss %.4f to %.4f, ", job->first_loss, job->last_loss);
    if (!isnan(job->last_accuracy))
        printf("%.1f %% of the last step's pairs ranked right, ", 100 * job->last_accuracy);
}

static void result_print(const struct train_result *r, int n_adapters) {
    const struct train_effect *e = &r->effect;
    printf("%s: ", r->job->name);
    change_print(r);
    printf("wrote '%s'\n", r->dir);
    if (!log_quiet) replies_print(e, n_adapters);
    comparison_print("held out", &r->gate.eval);
    comparison_print("to retain", &r->gate.retain);
    for (int i = 0; i < r->n_families; i++) {
        const struct family_result *f = &r->families[i];
        const struct stats_interval *d = &f->change.diff;
        printf("  %-14s n = %lld, %.1f %% to %.1f %%, %+.1f points (%+.1f … %+.1f), p = %.2g\n",
               task_families[f->family]->name, (long long)f->change.n, 100 * f->before.value,
               100 * f->after.value, 100 * d->value, 100 * d->lo, 100 * d->hi, f->p_holm);
    }
    if (r->gate.eval.n || r->gate.retain.n || r->n_families)
        printf("  %s: %s\n", r->gate.publish ? "published" : "not published", r->gate.why);
}

static void on_result(void *ctx, const struct train_result *r) {
    const struct result_context *c = ctx;
    if (c->json)
        cli_print_json(train_result_json(r));
    else
        result_print(r, c->n);
    train_effect_warn(r);
}

static int train_with_model(const struct cli_options *c, const struct train_command *o,
                            struct model *m, struct pool *pool, struct error *err) {
    struct train_request q;
    struct train_output out = train_settings_output(&o->settings);
    struct result_context context = {c->json, o->settings.data.n};
    out.on_result = on_result;
    out.ctx = &context;
    double joules = energy_now();
    int rc = train_request_open(&q, &o->settings, m, pool, err);
    if (rc == OK) rc = o->dry_run ? train_plan_print(c, &q, err) : train_and_publish(&q, &out, err);
    if (rc == OK && !o->dry_run) cli_energy_log(energy_now() - joules);
    if (rc == OK && !o->dry_run) setup_print_peak_memory(c, memory_limit_named());
    train_request_close(&q);
    return rc;
}

/* The command that uses the result. */
static void next_print(const char *model, const struct train_settings *s) {
    if (log_quiet) return;
    if (train_settings_output(s).subfolders)
        printf("next: shoal serve %s --adapter-dir %s\n", model, s->out);
    else
        printf("next: shoal chat %s --adapter %s\n", model, s->out);
}

/* Sets the memory limit, and refuses one that is too small for any training with this model. */
static int memory_limit_begin(const struct cli_options *c, const struct train_settings *s,
                              const char *path, struct pool *pool, struct error *err) {
    struct model_size size;
    if (memory_limit_parse(s->max_memory, err) != OK ||
        model_measure(path, cli_numeric_class(c), &size, err) != OK)
        return err->code;
    return train_memory_check(s, &size, cli_numeric_class(c), pool, err);
}

static int run_train(const struct cli_options *c, const void *options, const struct strings *args,
                     struct error *err) {
    const struct train_command *o = options;
    const char *first = args->n && !cli_is_recipe(args->v[0]) ? args->v[0] : NULL;
    const char *model = first ? first : o->model;
    if (first && o->model)
        return error_set(err, ERR_USAGE, "two bases are named, '%s' and '%s'", first, o->model);
    if (!model)
        return error_set(err, ERR_USAGE, "the base is missing; name it first or with --model");
    if (train_settings_check(&o->settings, o->dry_run, err) != OK) return err->code;
    char *path = cli_find_file(model);
    struct pool *pool = pool_new((int)c->threads);
    int rc = memory_limit_begin(c, &o->settings, path, pool, err);
    struct model *m = rc == OK ? model_open(path, cli_numeric_class(c), err) : NULL;
    if (!m) rc = err->code;
    if (m && !m->tok) rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", path);
    if (rc == OK && !o->dry_run && !model_hash(m, err)) rc = err->code; // for lineage
    if (rc == OK) rc = train_with_model(c, o, m, pool, err);
    if (rc == OK && !o->dry_run && !c->json) next_print(model, &o->settings);
    memory_limit_set(0);
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
        "Data are conversations {\"messages\": [...]}, {\"prompt\", \"completion\"} or {\"text\"}: "
        "JSON\n"
        "Lines, objects one after another, or an array. The loss covers the assistant's\n"
        "messages. --method dpo takes {\"prompt\", \"chosen\", \"rejected\"}; reinforce, rloo and\n"
        "grpo take prompts and what --reward needs, and learn from sampled completions.\n"
        "Interrupted training continues.\n"
        "\n"
        "With --eval-data, a new version that is not better on it than the previous one is not\n"
        "published, and the exit code is 1. 'shoal adapter rollback DIR' restores the previous\n"
        "version.\n"
        "\n"
        "A recipe is YAML: model, data, out, eval_data, method and start, and other options in\n"
        "the sections train, policy and es. Flags go before the recipe.\n"
        "\n"
        "  shoal train models/fry --data data/personas/critic.jsonl --out /tmp/critic --r 8 --lr "
        "4e-3\n"
        "  shoal train models/fry --data a=a.jsonl b=b.jsonl --out /tmp/both --dry-run\n"
        "  shoal train models/fry --method rloo --data fry:pick --prefix answer: --out /tmp/pick "
        "--r 8",
    .recipe_load = recipe_load,
    .job_args = (const struct job_args[]){{NULL, {JOB_ARG_INPUT_PATH}, false}, {0}},
    .job_store_option = "runs",
    .main_options = "data out method init-adapter dry-run eval-data r lora-alpha target "
                    "epochs lr bsz seed reward max-memory",
    .rows = command_rows,
    .more = train_settings_tables,
    .size = sizeof(struct train_command),
    .min_args = 0,
    .max_args = 1,
    .run = run_train,
};
