/* cmd_pull: `shoal pull`: downloads models and adapters from a hub, and lists the downloaded ones.
 */
#include "cli/cli.h"
#include "hub/hub.h"

#include <string.h>

static int64_t record_size(const json_t *record, int *n) {
    const json_t *v;
    size_t i;
    int64_t size = 0;
    json_array_foreach (json_object_get(record, "files"), i, v) {
        size += json_integer_value(json_object_get(v, "size"));
    }
    *n = (int)i;
    return size;
}

static const char *record_text(const json_t *record, const char *key) {
    const char *text = json_string_value(json_object_get(record, key));
    return text ? text : "?";
}

static int list_pulled(const struct cli_options *c, struct error *err) {
    json_t *all = hub_list(err), *v;
    size_t i;
    if (!all) return err->code;
    json_array_foreach (all, i, v) {
        int n;
        double mb = 1e-6 * (double)record_size(v, &n);
        bool complete = json_is_true(json_object_get(v, "complete"));
        if (c->json)
            cli_print_json(json_incref(v));
        else
            printf("hf:%s@%s  %.12s  %d files, %.1f MB  %s%s\n", record_text(v, "repo"),
                   record_text(v, "revision"), record_text(v, "commit"), n, mb,
                   record_text(v, "path"), complete ? "" : "  (not complete)");
    }
    json_decref(all);
    return OK;
}

static int run_pull(const struct cli_options *c, const void *options, const struct strings *args,
                    struct error *err) {
    if (strcmp(args->v[0], "list") == 0) return list_pulled(c, err);
    const struct hub_options *o = options;
    if (o->dry_run) {
        json_t *plan = hub_plan(args->v[0], o, err);
        if (plan) cli_print_dry_run(c, plan);
        return plan ? OK : err->code;
    }
    json_t *record = hub_pull(args->v[0], o, err);
    if (!record) return err->code;
    int n;
    double mb = 1e-6 * (double)record_size(record, &n);
    log_info("hf:%s at %.12s: %d files, %.1f MB, of which %.1f MB were loaded now",
             record_text(record, "repo"), record_text(record, "commit"), n, mb,
             1e-6 * (double)json_integer_value(json_object_get(record, "loaded")));
    if (c->json) {
        cli_print_json(record);
        return OK;
    }
    puts(record_text(record, "path"));
    json_decref(record);
    return OK;
}

static const struct option_row pull_rows[] = {
    {"include", OPT_LIST, offsetof(struct hub_options, include), NULL, 0, 0, "GLOB",
     "download these files instead of the default ones; '*' matches '/' too"},
    {"out", OPT_STRING, offsetof(struct hub_options, to), NULL, 0, 0, "DIR",
     "target folder, instead of the cache"},
    {"dry-run", OPT_BOOL, offsetof(struct hub_options, dry_run), NULL, 0, 0, NULL,
     "print what would be downloaded and where to, and exit"},
    {"to", OPT_ALIAS, 0, "out"},
    {0},
};

const struct cli_command cmd_pull = {
    .name = "pull",
    .args = "hf:OWNER/REPO[/FILE][@REVISION]|list",
    .summary = "download a model or adapter from a hub, or list the downloaded ones",
    .about =
        "Downloads a model or an adapter: its configuration, tokenizer and safetensors weights,\n"
        "never a pickle file. The same command continues an interrupted download, and checks\n"
        "every hash of a complete one. It prints the folder; other commands accept\n"
        "hf:OWNER/REPO instead of it.\n"
        "\n"
        "  shoal pull hf:HuggingFaceTB/SmolLM2-135M-Instruct\n"
        "  shoal run hf:HuggingFaceTB/SmolLM2-135M-Instruct -p 'Hello'\n"
        "  shoal pull hf:OWNER/REPO-GGUF/model-q8_0.gguf\n"
        "  shoal pull hf:OWNER/REPO@v1.0 --include '*.json' '*.safetensors' --out models/it\n"
        "  shoal pull list\n"
        "\n"
        "HF_TOKEN (or the token file of the hub's own client) gives access to gated and private\n"
        "models; HF_ENDPOINT names another hub; SHOAL_CACHE names a folder other than\n"
        "~/.cache/shoal.",
    .rows = pull_rows,
    .size = sizeof(struct hub_options),
    .min_args = 1,
    .max_args = 1,
    .run = run_pull,
};
