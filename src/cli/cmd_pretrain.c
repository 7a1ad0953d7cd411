/* cmd_pretrain: `shoal pretrain RECIPE`: trains a small base model from a recipe. */
#include "cli/setup.h"
#include "train/train.h"

#include <libgen.h>
#include <stdlib.h>

struct options {
    char *out, *max_memory, *kv;
    int64_t stop_at;
    struct engine_limits limits;
    bool dry_run, tensorboard;
};
static const struct option_row rows[] = {
    {"out", OPT_STRING, offsetof(struct options, out), NULL, 0, 0, "DIR",
     "output directory; default: the recipe's folder"},
    {"stop-at", OPT_INT, offsetof(struct options, stop_at), "0", 0, 1e9, "N",
     "stop after this update: write model and checkpoint; run again to continue"},
    {"max-memory", OPT_STRING, offsetof(struct options, max_memory), NULL, 0, 0, "SIZE",
     "memory limit of the process, such as 500M or 2G; default: the recipe's"},
    ENGINE_LIMIT_ROWS(struct options, limits),
    {"kv-cache-dtype", OPT_STRING, offsetof(struct options, kv), NULL, 0, 0, "ELEM",
     "number format of keys and values, in training and for accuracy lines; default: the recipe's"},
    {"tensorboard", OPT_BOOL, offsetof(struct options, tensorboard), NULL, 0, 0, NULL,
     "also write the figures of log.jsonl as event files for TensorBoard, in the output directory"},
    {"dry-run", OPT_BOOL, offsetof(struct options, dry_run), NULL, 0, 0, NULL,
     "check the recipe, print the plan, and exit"},
    {0},
};

static int plan(const struct cli_options *c, const struct pretrain_options *recipe, const char *dir,
                struct pool *pool, struct error *err) {
    json_t *v = pretrain_plan(recipe, dir, cli_numeric_class(c), pool, err);
    if (v) cli_print_dry_run(c, v);
    return v ? OK : err->code;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    struct pretrain_options recipe;
    struct yaml y;
    char *path = cli_find_file(args->v[0]), *copy = xstrdup(path);
    struct pool *pool = pool_new((int)c->threads);
    options_default(pretrain_option_rows, &recipe);
    int rc = yaml_load(&y, path, err);
    if (rc == OK) {
        rc = options_from_yaml(pretrain_option_rows, &recipe, &y, NULL, err);
        yaml_release(&y);
    }
    if (recipe.chat_template) {
        char *file = path_relative_to(path, recipe.chat_template);
        free(recipe.chat_template);
        recipe.chat_template = file;
    }
    if (o->max_memory) {
        free(recipe.max_memory);
        recipe.max_memory = xstrdup(o->max_memory);
    }
    if (o->kv) {
        free(recipe.kv_cache_dtype);
        recipe.kv_cache_dtype = xstrdup(o->kv);
    }
    recipe.limits = o->limits;
    const char *dir = o->out ? o->out : dirname(copy);
    if (rc == OK)
        rc = o->dry_run ? plan(c, &recipe, dir, pool, err)
                        : pretrain_run(&recipe, dir, o->stop_at, o->tensorboard,
                                       cli_numeric_class(c), pool, err);
    size_t limit = 0;
    if (rc == OK && !o->dry_run && recipe.max_memory &&
        (rc = size_parse(recipe.max_memory, &limit, err)) == OK)
        setup_print_peak_memory(c, limit);
    options_release(pretrain_option_rows, &recipe);
    pool_free(pool);
    free(path);
    free(copy);
    return rc;
}

static const struct recipe_section sections[] = {{"", pretrain_option_rows}, {0}};

const struct cli_command cmd_pretrain = {
    .name = "pretrain",
    .args = "RECIPE",
    .summary = "train a small base model from a recipe",
    .about = "Trains a tokenizer and then a model from random weights on generated tasks, by the\n"
             "YAML recipe. Writes a Hugging Face directory with log.jsonl. An interrupted run\n"
             "continues from its checkpoint.\n"
             "\n"
             "  shoal pretrain models/fry/recipe.yaml --out /tmp/fry",
    .recipe = sections,
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run,
};
