/* cmd_model: `shoal model new|info|data` and `shoal convert`. */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "eval/eval.h"
#include "model/model.h"

#include <stdlib.h>
#include <string.h>

struct options {
    char *shape, *quant, *tasks, *split, *tokenizer, *out;
    int64_t seed, n;
    bool critic, chain_of_thought, preferences, dry_run;
};

/* Writes GGUF if `out` ends in .gguf, else a Hugging Face directory. */
static int write_model(const struct cli_options *c, const struct model *m, const char *out,
                       enum tensor_type type, struct error *err) {
    if (!path_has_extension(out, ".gguf")) return model_write_hf(m, out, type, err);
    const struct quant_scheme q = quant_pure(type);
    struct pool *pool = pool_new((int)c->threads);
    int rc = model_quantize_gguf(m, out, &q, pool, NULL, err);
    pool_free(pool);
    return rc;
}

static void print_model(const struct cli_options *c, struct model *m, const char *hash) {
    const struct model_config *k = &m->config;
    int64_t n = model_param_count(k);
    if (c->json) {
        cli_print_json(json_pack("{s:s,s:s,s:s,s:I,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:b,s:s}", "name",
                                 m->name, "arch", k->arch->name, "type", tensor_type_name(m->type),
                                 "parameters", (json_int_t)n, "layers", k->n_layers, "d_model",
                                 k->d_model, "heads", k->n_heads, "kv_heads", k->n_kv_heads, "d_ff",
                                 k->d_ff, "vocab", k->vocab_size, "context", k->max_seq_len, "tied",
                                 (int)k->tied, "hash", hash));
        return;
    }
    printf("%s: %s, %.2f million parameters in %s\n", m->name, k->arch->name, 1e-6 * (double)n,
           tensor_type_name(m->type));
    printf("  %d layers, width %d, %d heads (%d for keys and values), feed-forward %d\n",
           k->n_layers, k->d_model, k->n_heads, k->n_kv_heads, k->d_ff);
    printf("  vocabulary %d%s, context %d\n  sha-256 %s\n", k->vocab_size, k->tied ? " (tied)" : "",
           k->max_seq_len, hash);
}

static int model_info(const struct cli_options *c, const char *arg, struct error *err) {
    char *path = cli_find_file(arg);
    struct model *m = model_open(path, cli_numeric_class(c), err);
    const char *hash = m ? model_hash(m, err) : NULL;
    if (hash) print_model(c, m, hash);
    model_close(m);
    free(path);
    return hash ? OK : err->code;
}

static void print_plan(const struct cli_options *c, const char *out, enum tensor_type type,
                       const struct model_config *config) {
    struct quant_scheme q = quant_pure(type);
    cli_print_dry_run(c, json_pack("{s:o,s:s,s:I,s:b}", "writes", json_from_path(out), "type",
                                   tensor_type_name(type), "bytes of weights",
                                   (json_int_t)quant_bytes(&q, config), "replaces",
                                   (int)path_exists(out)));
}

/* Gives a model for writing the tokenizer and the chat template of another model; its further
 * embedding rows get unused tokens. */
static int tokenizer_take(struct model *m, const char *arg, struct error *err) {
    char *path = cli_find_file(arg);
    struct model *from = model_open(path, NUMERIC_EXACT, err);
    free(path);
    if (!from) return err->code;
    int rc = OK;
    if (!from->tok)
        rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", arg);
    else if (tokenizer_vocab_size(from->tok) > m->config.vocab_size)
        rc = error_set(err, ERR_MISMATCH, "'%s' has %d tokens, shape '%s' only %d", arg,
                       (int)tokenizer_vocab_size(from->tok), m->name, (int)m->config.vocab_size);
    if (rc == OK) {
        tokenizer_free(m->tok);
        m->tok = from->tok;
        from->tok = NULL;
        if (from->chat_template) m->chat_template = arena_strdup(&m->arena, from->chat_template);
    }
    model_close(from);
    return rc;
}

static int model_create(const struct cli_options *c, const struct options *o, const char *out,
                        struct error *err) {
    struct model_config config;
    enum tensor_type type;
    if (model_preset_find(o->shape, &config, err) != OK) return err->code;
    if (tensor_type_parse(o->quant, &type) != OK)
        return error_set(err, ERR_USAGE, "no weight type '%s'; there are %s", o->quant,
                         tensor_type_list());
    struct model *m = model_new_for_writing(&config, (uint64_t)o->seed);
    m->name = arena_strdup(&m->arena, o->shape);
    int rc = o->tokenizer ? tokenizer_take(m, o->tokenizer, err) : OK;
    if (rc == OK && o->dry_run)
        print_plan(c, out, type, &config);
    else if (rc == OK)
        rc = write_model(c, m, out, type, err);
    model_close(m);
    return rc;
}

static int write_task_data(const struct options *o, const char *path, struct error *err) {
    bool pick[MAX_FAMILIES] = {0}, residents = strcmp(o->tasks, "residents") == 0;
    int kind = split_evidence_find(o->tasks);
    enum data_split split;
    if (o->critic + o->chain_of_thought + o->preferences + (kind >= 0) + residents > 1)
        return error_set(err, ERR_USAGE,
                         "choose one of --critic, --chain-of-thought, --preferences and the tasks "
                         "that need communication or tools");
    int rc = data_split_parse(o->split, &split, err);
    if (rc == OK && split != SPLIT_TRAIN && !residents)
        return error_set(err, ERR_USAGE, "--split is for --tasks residents");
    if (rc == OK && residents)
        return residents_write(split, (int)o->n, (uint64_t)o->seed, path, err);
    if (rc == OK && kind >= 0)
        return split_evidence_write(kind, (int)o->n, (uint64_t)o->seed, path, err);
    if (rc == OK) rc = families_parse(o->tasks, pick, err);
    if (rc == OK && o->critic)
        return families_write_critiques(pick, (int)o->n, (uint64_t)o->seed, path, err);
    if (rc == OK && o->preferences)
        return families_write_preferences(pick, (int)o->n, (uint64_t)o->seed, path, err);
    return rc == OK ? families_write_questions(pick, o->chain_of_thought, (int)o->n,
                                               (uint64_t)o->seed, path, err)
                    : rc;
}

static int write_persona_data(const struct options *o, const char *dir, struct error *err) {
    if (o->critic || o->chain_of_thought || o->preferences)
        return error_set(err, ERR_USAGE, "%s needs --tasks",
                         o->critic        ? "--critic"
                         : o->preferences ? "--preferences"
                                          : "--chain-of-thought");
    int rc = dir_make(dir, err);
    for (int i = 0; rc == OK && i < 3; i++) {
        char *path = xasprintf("%s/%s.jsonl", dir, built_in_personas[i].name);
        rc = persona_write(&built_in_personas[i], (int)o->n, (uint64_t)o->seed, path, err);
        free(path);
    }
    return rc;
}

static int run_model(const struct cli_options *c, const void *options, const struct strings *args,
                     struct error *err) {
    const struct options *o = options;
    const char *verb = args->v[0];
    if ((o->dry_run || o->tokenizer) && strcmp(verb, "new") != 0)
        return error_set(err, ERR_USAGE, "'--%s' is an option of new",
                         o->dry_run ? "dry-run" : "tokenizer");
    if (strcmp(verb, "info") == 0) return model_info(c, args->v[1], err);
    if (strcmp(verb, "new") == 0) return model_create(c, o, args->v[1], err);
    if (strcmp(verb, "data") == 0)
        return o->tasks ? write_task_data(o, args->v[1], err)
                        : write_persona_data(o, args->v[1], err);
    return error_set(err, ERR_USAGE, "no '%s'; there are new, info and data", verb);
}

static int run_convert(const struct cli_options *c, const void *options, const struct strings *args,
                       struct error *err) {
    const struct options *o = options;
    enum tensor_type type = TENSOR_F32;
    if (!o->out)
        return error_set(err, ERR_USAGE,
                         "--out is missing: a path ending in .gguf, or a directory");
    if (o->quant && tensor_type_parse(o->quant, &type) != OK)
        return error_set(err, ERR_USAGE, "no weight type '%s'; there are %s", o->quant,
                         tensor_type_list());
    char *path = cli_find_file(args->v[0]);
    struct model *m = o->tokenizer ? llama2c_open(path, o->tokenizer, NUMERIC_EXACT, err)
                                   : model_open(path, NUMERIC_EXACT, err);
    int rc = m ? OK : err->code;
    if (m && !o->quant && (m->type == TENSOR_BF16 || m->type == TENSOR_F16)) type = m->type;
    if (rc == OK && o->dry_run)
        print_plan(c, o->out, type, &m->config);
    else if (rc == OK && (rc = model_set_source(m, err)) == OK)
        rc = write_model(c, m, o->out, type, err);
    if (rc == OK && !o->dry_run) log_info("wrote '%s'", o->out);
    model_close(m);
    free(path);
    return rc;
}

static const struct option_row model_rows[] = {
    {"shape", OPT_STRING, offsetof(struct options, shape), "fry", 0, 0, "NAME",
     "new: shape: smollm-135m, qwen3-0.6b, gemma3-270m, tinystories-33m, fry, … (a wrong name "
     "lists all)"},
    {"type", OPT_STRING, offsetof(struct options, quant), "f32", 0, 0, "TYPE",
     "new: weight type: f32, f16, bf16, q8_0, q4_0, nf4, q4_k … (see 'shoal quantize')"},
    {"tokenizer", OPT_STRING, offsetof(struct options, tokenizer), NULL, 0, 0, "MODEL",
     "new: model with the tokenizer and the chat template; default: one token per byte"},
    {"seed", OPT_INT, offsetof(struct options, seed), "1", 0, 9e15, "N",
     "seed of the weights or conversations"},
    {"n", OPT_INT, offsetof(struct options, n), "600", 1, 1e7, "N",
     "data: conversations per persona; with --tasks, in total"},
    {"tasks", OPT_STRING, offsetof(struct options, tasks), NULL, 0, 0, "LIST",
     "data: write questions and answers of these task families to one file, instead of personas; "
     "or of largest, earliest, which need communication; or, to a folder, of residents, which "
     "needs tools (docs/AGENT.md)"},
    {"split", OPT_STRING, offsetof(struct options, split), "train", 0, 0, "NAME",
     "data --tasks residents: split of the names and numbers: train, dev or test"},
    {"critic", OPT_BOOL, offsetof(struct options, critic), NULL, 0, 0, NULL,
     "data --tasks: conversations that judge three first answers, half of them correct"},
    {"chain-of-thought", OPT_BOOL, offsetof(struct options, chain_of_thought), NULL, 0, 0, NULL,
     "data --tasks: answers with the derivations of the families that have one"},
    {"preferences", OPT_BOOL, offsetof(struct options, preferences), NULL, 0, 0, NULL,
     "data --tasks: pairs of a right and a wrong answer, for 'train --method dpo'"},
    {"dry-run", OPT_BOOL, offsetof(struct options, dry_run), NULL, 0, 0, NULL,
     "new: print the size of the model, and exit"},
    {"quant", OPT_ALIAS, 0, "type"},
    {0},
};
static const struct option_row convert_rows[] = {
    {"out", OPT_STRING, offsetof(struct options, out), NULL, 0, 0, "OUT",
     "file ending in .gguf, or a directory"},
    {"tokenizer", OPT_STRING, offsetof(struct options, tokenizer), NULL, 0, 0, "FILE",
     "tokenizer of a llama2.c .bin model"},
    {"dry-run", OPT_BOOL, offsetof(struct options, dry_run), NULL, 0, 0, NULL,
     "print the size of the result, and exit"},
    {"type", OPT_STRING, offsetof(struct options, quant), NULL, 0, 0, "TYPE",
     "f32, f16, bf16, q8_0, q4_0, nf4, q4_k … (see 'shoal quantize')"},
    {"o", OPT_ALIAS, 0, "out"},
    {"quant", OPT_ALIAS, 0, "type"},
    {0},
};

const struct cli_command cmd_model = {
    .name = "model",
    .args = "new|info|data PATH",
    .summary = "describe a model, create one with random weights, write training data",
    .about =
        "info describes a model; new writes one with random weights; data writes training data,\n"
        "for three personas or, with --tasks, questions and answers of task families.\n"
        "\n"
        "  shoal model info models/fry\n"
        "  shoal model new --shape smollm-135m --type q8_0 --seed 1 /tmp/smollm.gguf\n"
        "  shoal model data --n 600 data/personas\n"
        "  shoal model data --tasks pick --n 4000 /tmp/pick.jsonl",
    .rows = model_rows,
    .size = sizeof(struct options),
    .min_args = 2,
    .max_args = 2,
    .run = run_model,
};
const struct cli_command cmd_convert = {
    .name = "convert",
    .args = "MODEL --out OUT",
    .summary = "convert models between GGUF, Hugging Face directories and llama2.c",
    .about =
        "Converts a model between GGUF, Hugging Face directories and llama2.c, and optionally\n"
        "its weight type. 'shoal quantize' also measures the loss.\n"
        "\n"
        "  shoal convert model.gguf --out directory\n"
        "  shoal convert stories.bin --tokenizer tok512.bin --out stories.gguf\n"
        "  shoal convert models/fry --type q8_0 --out fry-q8.gguf",
    .rows = convert_rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 1,
    .run = run_convert,
};
