/*
 * cmd_synth: `shoal synth`: samples answers to prompts, filters them, and writes the remaining ones
 * as training data with their source; --then-train runs `shoal train` on it.
 *
 * The options of the training are those after "--" and those in the section train of the recipe.
 */
#define _GNU_SOURCE
#include "cli/settings.h"
#include "cli/setup.h"
#include "data/data.h"

#include <stdlib.h>
#include <string.h>

struct options {
    struct synth_options synth;
    struct setup_options setup;
    char *model, *prompts, *topics, *adapter, *judge, *out, *then_train;
    bool train_section; /* the recipe has a section train */
};
#define ROW(name, field, metavar, help)                                                            \
    { name, OPT_STRING, offsetof(struct options, field), NULL, 0, 0, metavar, help }

/* Flags, and keys at the top level of a recipe. */
static const struct option_row command_rows[] = {
    ROW("model", model, "MODEL", "base model, if it is not the first argument"),
    ROW("prompts", prompts, "FILE", "prompts: JSON Lines of {prompt} or {messages}"),
    ROW("topics", topics, "FILE",
        "topics instead of prompts, one per line, inserted into --template"),
    ROW("out", out, "FILE", "output file of kept samples, as JSON Lines"),
    ROW("adapter", adapter, "DIR", "adapter that generates the samples; default: the base model"),
    ROW("judge", judge, "DIR", "adapter that computes the perplexity; default: the base model"),
    ROW("then-train", then_train, "DIR",
        "train an adapter on the kept samples; options of 'shoal train' follow --"),
    SETUP_ROWS(struct options, setup),
    CLUSTER_ROWS(struct options, setup.cluster),
    SETUP_ROW("record", OPT_BOOL, struct options, setup.record, "true", NULL,
              "store every call with its result, for 'shoal replay' and to continue"),
    SETUP_ROW("store", OPT_STRING, struct options, setup.store, SETUP_STORE, "FILE",
              "database of stored calls"),
    {0},
};
#undef ROW

/* The top level fills command_rows, the section synth the filters; the section train is read later.
 */
static int recipe_load(void *options, const char *path, struct error *err) {
    struct options *o = options;
    struct yaml y;
    char *found = cli_find_file(path);
    int rc = yaml_load(&y, found, err);
    free(found);
    if (rc != OK) return rc;
    rc = options_from_yaml(synth_option_rows, &o->synth, &y, "synth", err);
    o->train_section = json_object_get(y.root, "train") != NULL;
    json_object_del(y.root, "synth");
    json_object_del(y.root, "train");
    if (rc == OK) rc = options_from_yaml(command_rows, o, &y, NULL, err);
    yaml_release(&y);
    return rc;
}

/* Reads the section train of a recipe as options of that command. */
static int train_section(const struct option_row *rows, void *block, const char *recipe,
                         struct error *err) {
    struct yaml y;
    char *found = cli_find_file(recipe);
    int rc = yaml_load(&y, found, err);
    free(found);
    if (rc != OK) return rc;
    rc = options_from_yaml(rows, block, &y, "train", err);
    yaml_release(&y);
    return rc;
}

/* Reads the options of train: files from synth, overridden by the recipe's section, then by flags.
 * This is done first, so that a wrong option is found before anything is generated. */
static int train_options_read(const struct option_row *rows, const struct options *o,
                              const char *model, const char *recipe, const struct strings *flags,
                              void *block, struct error *err) {
    char *arguments[] = {"--model",    (char *)(uintptr_t)model, "--data", o->out, "--out",
                         o->then_train};
    struct strings positional = {0};
    options_default(rows, block);
    int rc = options_parse(rows, block, ARRAY_LEN(arguments), arguments, &positional, err);
    if (rc == OK && recipe) rc = train_section(rows, block, recipe, err);
    if (rc == OK) rc = options_parse(rows, block, flags->n, flags->v, &positional, err);
    if (rc == OK && positional.n)
        rc = error_set(err, ERR_USAGE, "'%s' is not a flag of 'shoal train'", positional.v[0]);
    strings_release(&positional);
    return rc;
}

enum { BYTES_PER_TOKEN = 16 }; /* id and text of a token, in a request and in a line of output */

static struct setup_needs synth_needs(const struct synth *s, const struct strings *adapters) {
    int64_t n = (int64_t)s->prompts.n * s->o->samples;
    size_t len = s->prompts.longest + (size_t)s->o->max_tokens;
    return (struct setup_needs){.engine = {.max_rows = 256,
                                           .max_seqs = (int32_t)MIN(n, 64),
                                           .max_len = (int32_t)MIN(len, 1 << 30)},
                                .adapters = adapters,
                                .work = (size_t)(s->o->max_tokens * n) * BYTES_PER_TOKEN +
                                        len * BYTES_PER_TOKEN * SYNTH_BATCH_SIZE};
}

static int setup_adapter_load(struct setup *su, const char *path, struct adapter **out,
                              struct error *err) {
    if (!path || strcmp(path, "base") == 0) return OK;
    *out = setup_adapter(su, path, err);
    return *out ? OK : err->code;
}

static int generate_and_write(struct synth *s, struct setup *su, const struct options *o,
                              struct synth_filter_set *filters, struct error *err) {
    struct buf lines = {0};
    int rc = synth_generate(s, err);
    if (rc == OK && s->n_reused)
        log_info("%d of %d answers were recorded before", s->n_reused, s->n);
    if (rc == OK) rc = synth_filter(s, filters, err);
    if (rc == OK && synth_count_kept(s)) rc = synth_format_jsonl(s, &lines, err);
    if (rc == OK && lines.len) rc = file_write(o->out, lines.data, lines.len, err);
    if (rc == OK && su->c->json) {
        cli_print_json(synth_report_json(s));
    } else if (rc == OK) {
        struct buf text = {0};
        synth_report_text(s, &text);
        fwrite(text.data, 1, text.len, stdout);
        buf_release(&text);
    }
    if (rc == OK && !lines.len)
        rc = error_set(err, ERR_STATE, "no answer passed the filters; '%s' is not written", o->out);
    if (rc == OK && !su->c->json) printf("wrote '%s'\n", o->out);
    buf_release(&lines);
    return rc;
}

static int model_run(struct synth *s, struct setup *su, const struct options *o,
                     struct error *err) {
    s->model = su->m;
    if (synth_tokenize_prompts(s, err) != OK) return err->code;
    struct synth_filter_set *filters = synth_filter_set_new(&o->synth, su->m->tok, err);
    int rc = filters ? OK : err->code;
    if (rc == OK) rc = setup_adapter_load(su, o->adapter, &s->adapter, err);
    if (rc == OK) rc = setup_adapter_load(su, o->judge, &s->judge, err);
    su->engine.max_len = s->max_len;
    if (rc == OK) rc = setup_engine(su, err);
    s->engine = su->e;
    s->kv = su->engine.kv_elem;
    s->lora = su->engine.lora_elem;
    s->calls = su->recorder.store;
    if (rc == OK) rc = generate_and_write(s, su, o, filters, err);
    synth_filter_set_free(filters);
    return rc;
}

static int synth_run(const struct cli_options *c, const struct options *o, const char *model,
                     struct error *err) {
    struct synth s = {.o = &o->synth};
    struct strings adapters = {0};
    struct setup su;
    int rc = o->prompts ? synth_prompts_read(&s.prompts, o->prompts, &o->synth, err)
                        : synth_topics_read(&s.prompts, o->topics, &o->synth, err);
    if (rc != OK) return rc;
    if (o->adapter) strings_add(&adapters, o->adapter);
    if (o->judge) strings_add(&adapters, o->judge);
    struct setup_needs w = synth_needs(&s, &adapters);
    rc = setup_open(&su, c, &o->setup, model, &w, err);
    if (rc == OK && su.m) rc = model_run(&s, &su, o, err);
    rc = setup_close(&su, rc, err);
    strings_release(&adapters);
    synth_release(&s);
    return rc;
}

/* Refuses flags that would have no effect, and missing ones. */
static int flags_check(const struct options *o, const char *model, int n_train, struct error *err) {
    const struct synth_options *s = &o->synth;
    if (!model)
        return error_set(err, ERR_USAGE, "the base is missing; name it first or with --model");
    if (!o->prompts == !o->topics)
        return error_set(err, ERR_USAGE, "give one of --prompts FILE and --topics FILE");
    if (!o->out) return error_set(err, ERR_USAGE, "--out is missing");
    if ((n_train || o->train_section) && !o->then_train)
        return error_set(err, ERR_USAGE, "options of 'shoal train' need --then-train DIR");
    if (o->topics == NULL && strcmp(s->template, "{topic}") != 0)
        return error_set(err, ERR_USAGE, "'--template' is for --topics");
    if (o->judge && !s->min_perplexity && !s->max_perplexity)
        return error_set(err, ERR_USAGE,
                         "'--judge' has no effect without --min-perplexity or --max-perplexity");
    if (s->temperature > 0 && s->top_p <= 0)
        return error_set(err, ERR_USAGE, "'--top-p' must be above 0");
    return OK;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    const char *first = args->n && args->v[0][0] != '-' ? args->v[0] : NULL;
    const char *recipe = first && cli_is_recipe(first) ? first : NULL;
    const char *model = first && !recipe ? first : o->model;
    struct strings flags = {args->v + !!first, args->n - !!first};
    if (first && !recipe && o->model)
        return error_set(err, ERR_USAGE, "two bases are named, '%s' and '%s'", first, o->model);
    if (flags_check(o, model, flags.n, err) != OK) return err->code;
    void *train = o->then_train ? xcalloc(1, cmd_train.size) : NULL;
    struct option_row *train_rows = train ? settings_command_rows(&cmd_train) : NULL;
    int rc = train ? train_options_read(train_rows, o, model, recipe, &flags, train, err) : OK;
    if (rc == OK) rc = synth_run(c, o, model, err);
    if (rc == OK && train && !o->setup.dry_run) {
        static const struct strings none;
        rc = cmd_train.run(c, train, &none, err);
        if (rc != OK) error_wrap(err, "the samples are in '%s', but training", o->out);
    }
    if (train) options_release(train_rows, train);
    free(train_rows);
    free(train);
    return rc;
}

const struct cli_command cmd_synth = {
    .name = "synth",
    .args = "MODEL|RECIPE --prompts FILE --out FILE [-- TRAIN FLAGS]",
    .summary = "generate and filter training data with a model",
    .about =
        "Answers every prompt several times in one batch. Filters remove answers that are\n"
        "malformed, truncated, in another language, duplicates, in disagreement with the other\n"
        "answers to the prompt, or improbable; the report counts them and shows the first of\n"
        "each kind. A kept sample is a line of {messages, source}; source names the recorded\n"
        "call, model, adapter, seed and scores. Equal inputs give equal bytes. A recipe is a\n"
        "YAML file with the options at its top level and in the sections synth and train.\n"
        "\n"
        "  shoal synth models/fry --prompts p.jsonl --out s.jsonl --samples 8 --min-agreement 0.5\n"
        "  shoal synth models/fry --topics t.txt --template '{topic}とは?' --language ja --out "
        "s.jsonl\n"
        "  shoal synth models/fry --prompts p.jsonl --out s.jsonl --then-train /tmp/a -- --r 8 "
        "--lr 4e-3\n"
        "  shoal replay KEY    (a sample's \"call\")",
    .recipe_load = recipe_load,
    .main_options =
        "model prompts topics out adapter judge then-train samples max-tokens temperature seed "
        "language require forbid json-schema min-agreement held-out max-memory dry-run",
    .rows = command_rows,
    .more =
        (const struct option_table[]){{synth_option_rows, offsetof(struct options, synth)}, {0}},
    .size = sizeof(struct options),
    .min_args = 0,
    .max_args = -1,
    .run = run,
};
