/*
 * cmd_quantize: `shoal quantize`: writes a model with fewer bits per weight, and measures the loss.
 *
 * Both models are evaluated on the same tokens. Perplexity, KL divergence and agreement of the most
 * probable token are printed together with size and bits, because a size alone does not show the
 * loss. Without --text the tokens are chats: questions and answers of the starter model's families
 * in English, Japanese and Chinese, of which only answers are scored. A text of the user's domain
 * gives more relevant numbers. With --kv-cache-dtype the same is measured of keys and values: the
 * model is compared with itself, and nothing is written.
 */
#define _GNU_SOURCE
#include "cli/setup.h"
#include "eval/eval.h"
#include "model/model.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct options {
    char *type, *text, *max_memory;
    struct strings kv; /* types of keys and values */
    int64_t tokens;
    bool compare, dry_run;
};

enum { TEXT_LIMIT = 64 << 20, WINDOW = 512, MAX_SEQS = 4096 };

/* The token sequences on which both models are evaluated. */
struct text_passages {
    struct token_ids ids;
    struct buf scored; /* chats: 1 for tokens of the assistant, which are scored; else empty */
    int32_t begin[MAX_SEQS + 1]; /* passage i is ids[begin[i], begin[i + 1]) */
    int n;
};

static void passage_end(struct text_passages *r) {
    if (r->n < MAX_SEQS && r->ids.n > r->begin[r->n]) r->begin[++r->n] = r->ids.n;
}

/* Adds one item of every family in turn, each as a separate chat, until there are enough tokens. */
static int chats_read(struct text_passages *r, const struct tokenizer *tok, int64_t tokens,
                      struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && r->ids.n < tokens && r->n < MAX_SEQS; i++) {
        struct task_item it;
        family_item(i % fry_count(), SPLIT_TEST, 1, (uint32_t)(i / fry_count()), false, &it);
        char *reply =
            xasprintf(WORK_PREFIX " %s\n" ANSWER_PREFIX " %s", it.work, it.choices[it.correct]);
        const struct chat_message chat[] = {{"user", it.question}, {"assistant", reply}};
        rc = chat_encode(tok, chat, 2, false, &r->ids, &r->scored, err);
        passage_end(r);
        free(reply);
        task_item_release(&it);
    }
    return rc;
}

/* Splits a text into windows; each begins with the model's BOS token, if it has one. */
static int text_read(struct text_passages *r, const struct model *m, const char *path,
                     int64_t tokens, struct error *err) {
    struct buf text = {0};
    struct token_ids ids = {0};
    int32_t bos = tokenizer_add_bos(m->tok) ? tokenizer_bos(m->tok) : -1,
            len = MIN(WINDOW, m->config.max_seq_len);
    int rc = file_read(path, TEXT_LIMIT, &text, err);
    if (rc == OK && text.len) tokenizer_encode(m->tok, text.data, text.len, 0, &ids);
    for (int i = 0; i < MIN(ids.n, tokens); i++) {
        if (r->ids.n - r->begin[r->n] == len) passage_end(r);
        if (r->ids.n == r->begin[r->n] && bos >= 0) token_ids_add(&r->ids, bos);
        token_ids_add(&r->ids, ids.v[i]);
    }
    passage_end(r);
    if (rc == OK && ids.n < 2)
        rc = error_set(err, ERR_FORMAT, "'%s' has fewer than two tokens", path);
    token_ids_release(&ids);
    buf_release(&text);
    return rc;
}

static bool same_file(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static int format_check(const char *out, const struct quant_scheme *q, struct error *err) {
    if (path_has_extension(out, ".gguf") || q->mix == QUANT_PURE) return OK;
    return error_set(err, ERR_USAGE, "'%s' does not end in .gguf, which %s needs", out, q->name);
}

static int copy_write(const struct model *m, const char *out, const struct quant_scheme *q,
                      struct pool *pool, struct error *err) {
    struct progress bar;
    if (format_check(out, q, err) != OK) return err->code;
    if (!path_has_extension(out, ".gguf")) return model_write_hf(m, out, q->type, err);
    progress_start(&bar, "weights", model_param_count(&m->config));
    int rc = model_quantize_gguf(m, out, q, pool, &bar, err);
    progress_finish(&bar, NULL);
    return rc;
}

/* Bits per weight, without tokenizer and padding. */
static double bits_per_weight(const struct model *m, const struct quant_scheme *q) {
    return 8.0 * (double)quant_bytes(q, &m->config) / (double)model_param_count(&m->config);
}

/* Bytes of a written GGUF file, or of the weights in a written directory. */
static int64_t written_bytes(const char *out) {
    struct stat st = {0};
    char *weights = path_join(out, "model.safetensors");
    if (stat(path_has_extension(out, ".gguf") ? out : weights, &st) != 0) st.st_size = 0;
    free(weights);
    return st.st_size;
}

static int64_t file_bytes(const struct model *m) {
    int64_t n = 0;
    for (int i = 0; i < m->n_maps; i++) n += (int64_t)m->maps[i].size;
    return n;
}

/* An upper bound of the memory: the original, and its quantised file while it is written again. For
 * the comparison also a second tokenizer and the copy, in which packed weights have at most twice
 * their bytes in the file. */
static size_t memory_least(const struct model_size *size, const struct quant_scheme *q,
                           const struct options *o, struct pool *pool) {
    enum { TEXT_BYTES = 4 << 20 };
    const struct model_config *c = &size->config;
    int32_t longest = WINDOW;
    for (int f = 0; f < fry_count(); f++) longest = MAX(longest, family_max_tokens(f));
    size_t copy = 2 * (size_t)quant_bytes(q, c),
           file = tensor_type_is_quantized(size->type) ? size->file : 0,
           compare = model_divergence_bytes(c, MIN(longest, c->max_seq_len), o->tokens, pool);
    const struct model_size second = {.tokenizer = size->tokenizer};
    size_t writing = model_loading_bytes(size) + file + TEXT_BYTES;
    return o->compare ? writing + model_loading_bytes(&second) + copy + compare : writing;
}

/* Refuses too little memory, and prints the plan. *limit receives the named limit, or 0. */
static int memory_limit_check(const struct cli_options *c, const struct options *o,
                              const char *path, const struct quant_scheme *q, struct pool *pool,
                              size_t *limit, struct error *err) {
    struct model_size size;
    if (memory_limit_parse(o->max_memory, err) != OK ||
        model_measure(path, cli_numeric_class(c), &size, err) != OK)
        return err->code;
    const struct memory_step step = {.what = o->compare ? "the comparison of both models"
                                                        : "quantising this model",
                                     .least = memory_least(&size, q, o, pool)};
    int rc = memory_check(NULL, &step, err);
    *limit = memory_limit_named();
    if (rc == OK && *limit)
        log_info("memory: at most %.1f MB of %.1f",
                 (double)(memory_used(NULL) + step.least) / (1 << 20), (double)*limit / (1 << 20));
    memory_limit_set(0);
    return rc;
}

static int plan(const struct cli_options *c, const struct model *m, const char *out,
                const struct quant_scheme *q, struct error *err) {
    if (format_check(out, q, err) != OK) return err->code;
    cli_print_dry_run(c,
                      json_pack("{s:o,s:s,s:I,s:I,s:f,s:b}", "writes", json_from_path(out), "type",
                                q->name, "bytes of weights", (json_int_t)quant_bytes(q, &m->config),
                                "original bytes", (json_int_t)file_bytes(m), "bits a weight",
                                bits_per_weight(m, q), "replaces", (int)path_exists(out)));
    return OK;
}

/* `after`: bytes of the copy. Without a comparison d->n is 0. */
static void print_result(const struct cli_options *c, const struct model *m, int64_t after,
                         const char *out, const struct quant_scheme *q,
                         const struct model_divergence *d) {
    int64_t before = file_bytes(m);
    if (c->json) {
        json_t *v = json_pack("{s:s,s:s,s:I,s:I,s:f,s:b,s:I}", "out", out, "type", q->name, "bytes",
                              (json_int_t)after, "original_bytes", (json_int_t)before,
                              "bits_per_weight", bits_per_weight(m, q), "requantised",
                              (int)tensor_type_is_quantized(m->type), "tokens", (json_int_t)d->n);
        json_object_update_new(v, d->n ? json_pack("{s:f,s:f,s:f,s:f,s:f}", "perplexity",
                                                   d->perplexity[1], "original_perplexity",
                                                   d->perplexity[0], "kl_mean", d->kl_mean,
                                                   "kl_p99", d->kl_p99, "same_top", d->same_top)
                                       : json_object());
        cli_print_json(v);
        return;
    }
    printf("%s: %s, %.1f MB (from %.1f MB), %.2f bits per weight\n", out, q->name,
           1e-6 * (double)after, 1e-6 * (double)before, bits_per_weight(m, q));
    if (d->n == 0) return;
    printf("  perplexity      %.4f (original %.4f) on %lld tokens\n", d->perplexity[1],
           d->perplexity[0], (long long)d->n);
    printf("  KL divergence   mean %.6f, 99th percentile %.6f nats\n", d->kl_mean, d->kl_p99);
    printf("  same top token  %.2f %%\n", 100 * d->same_top);
}

/* Compares both models on the same tokens; skipped if the model has no tokenizer. */
static int models_compare(const struct options *o, const struct model *const m[2],
                          const enum dtype kv[2], struct pool *pool, struct model_divergence *d,
                          struct error *err) {
    if (!m[0]->tok) {
        log_warn("'%s' has no tokenizer: the copy is not compared", m[0]->name);
        return OK;
    }
    struct text_passages *r = xcalloc(1, sizeof *r);
    struct scored_sequence *passages = xcalloc(MAX_SEQS, sizeof *passages);
    struct progress bar;
    int rc = OK;
    if (o->text)
        rc = text_read(r, m[0], o->text, o->tokens, err);
    else
        rc = chats_read(r, m[0]->tok, o->tokens, err);
    for (int i = 0; i < r->n; i++) {
        int32_t at = r->begin[i], n = MIN(r->begin[i + 1] - at, m[0]->config.max_seq_len);
        passages[i] =
            (struct scored_sequence){r->ids.v + at, r->scored.data ? r->scored.data + at : NULL, n};
    }
    if (rc == OK) {
        progress_start(&bar, "comparison", r->ids.n);
        *d = model_divergence_measure(m, kv, passages, r->n, pool, &bar);
        progress_finish(&bar, NULL);
    }
    token_ids_release(&r->ids);
    buf_release(&r->scored);
    free(passages);
    free(r);
    return rc;
}

static void print_kv(const struct cli_options *c, enum dtype kv, const struct model_divergence *d) {
    if (c->json)
        cli_print_json(json_pack("{s:s,s:I,s:f,s:f,s:f,s:f,s:f}", "kv_cache_dtype", dtype_name(kv),
                                 "tokens", (json_int_t)d->n, "perplexity", d->perplexity[1],
                                 "f32_perplexity", d->perplexity[0], "kl_mean", d->kl_mean,
                                 "kl_p99", d->kl_p99, "same_top", d->same_top));
    else
        printf("%-5s perplexity %.4f (f32 %.4f), KL divergence mean %.2e, 99th percentile %.2e "
               "nats, same top token %.2f %%\n",
               dtype_name(kv), d->perplexity[1], d->perplexity[0], d->kl_mean, d->kl_p99,
               100 * d->same_top);
}

/* Compares the model with each type of keys and values with itself and f32. */
static int kv_compare(const struct cli_options *c, const struct options *o, const char *name,
                      struct error *err) {
    char *path = cli_find_file(name);
    struct pool *pool = pool_new((int)c->threads);
    struct model *m = model_open(path, cli_numeric_class(c), err);
    int rc = m ? OK : err->code;
    for (int i = 0; rc == OK && i < o->kv.n; i++) {
        const struct model *const both[2] = {m, m};
        enum dtype kv[2] = {DTYPE_F32};
        struct model_divergence d = {0};
        rc = kv_cache_dtype_parse(o->kv.v[i], m->cls, &kv[1], err);
        if (rc == OK) rc = models_compare(o, both, kv, pool, &d, err);
        if (rc == OK && d.n > 0) print_kv(c, kv[1], &d);
    }
    model_close(m);
    pool_free(pool);
    free(path);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    static const enum dtype f32[2] = {DTYPE_F32, DTYPE_F32};
    const struct options *o = options;
    if (o->kv.n > 0 && (o->type || args->n > 1))
        return error_set(err, ERR_USAGE,
                         "--kv-cache-dtype only measures: leave OUT and --type out");
    if (o->kv.n > 0) return kv_compare(c, o, args->v[0], err);
    if (args->n < 2) return error_set(err, ERR_USAGE, "argument 'OUT' is missing");
    const char *out = args->v[1];
    struct quant_scheme q;
    struct model_divergence d = {0};
    if (!o->type) return error_set(err, ERR_USAGE, "--type is missing: %s", tensor_type_list());
    if (quant_parse(o->type, &q, err) != OK) return err->code;
    char *path = cli_find_file(args->v[0]);
    struct pool *pool = pool_new((int)c->threads);
    struct model *original = NULL, *copy = NULL;
    size_t limit = 0;
    int rc = memory_limit_check(c, o, path, &q, pool, &limit, err);
    if (rc == OK && same_file(path, out))
        rc = error_set(err, ERR_USAGE, "'%s' is the model itself: name another file", out);
    if (rc == OK && !(original = model_open(path, cli_numeric_class(c), err))) rc = err->code;
    if (rc == OK && tensor_type_is_quantized(original->type))
        log_warn("'%s' is quantised already (%s): the figures do not include that loss",
                 original->name, tensor_type_name(original->type));
    if (rc == OK && o->dry_run)
        rc = plan(c, original, out, &q, err);
    else if (rc == OK && (rc = model_set_source(original, err)) == OK)
        rc = copy_write(original, out, &q, pool, err);
    bool compare = o->compare && !o->dry_run;
    if (rc == OK && compare && !(copy = model_open(out, cli_numeric_class(c), err))) rc = err->code;
    const struct model *const both[2] = {original, copy};
    if (rc == OK && compare) rc = models_compare(o, both, f32, pool, &d, err);
    if (rc == OK && !o->dry_run)
        print_result(c, original, copy ? file_bytes(copy) : written_bytes(out), out, &q, &d);
    if (rc == OK && !o->dry_run) setup_print_peak_memory(c, limit);
    model_close(copy);
    model_close(original);
    pool_free(pool);
    free(path);
    return rc;
}

static const struct option_row rows[] = {
    {"type", OPT_STRING, offsetof(struct options, type), NULL, 0, 0, "TYPE",
     "f32 f16 bf16 q8_0 q6_k q5_k q5_1 q5_0 q4_k q4_1 q4_0 nf4; q4_k_s q4_k_m q5_k_s q5_k_m",
     JOB_ARG_TEXT},
    {"text", OPT_STRING, offsetof(struct options, text), NULL, 0, 0, "FILE",
     "text for the comparison; default: chats in English, Japanese and Chinese",
     JOB_ARG_INPUT_PATH},
    {"tokens", OPT_INT, offsetof(struct options, tokens), "1024", 2, 1e6, "N",
     "maximum tokens of the text"},
    {"kv-cache-dtype", OPT_LIST, offsetof(struct options, kv), NULL, 0, 0, "ELEM",
     "write nothing, and compare keys and values in these number formats with f32: bf16 f16 i8",
     JOB_ARG_TEXT},
    {"compare", OPT_BOOL, offsetof(struct options, compare), "true", 0, 0, NULL,
     "compare the copy with the original; --no-compare only writes it, in half the time and "
     "memory"},
    {"max-memory", OPT_STRING, offsetof(struct options, max_memory), NULL, 0, 0, "SIZE",
     "memory limit of the process, such as 500M or 2G, checked before anything is loaded",
     JOB_ARG_TEXT},
    {"dry-run", OPT_BOOL, offsetof(struct options, dry_run), NULL, 0, 0, NULL,
     "print the size of the result, and exit"},
    {0},
};

const struct cli_command cmd_quantize = {
    .name = "quantize",
    .args = "MODEL [OUT]",
    .summary = "write a model with fewer bits per weight, and measure the loss",
    .about =
        "Writes a model with fewer bits per weight, and prints size, perplexity, KL divergence\n"
        "and agreement of the most probable token. OUT ends in .gguf, or is a directory (f32,\n"
        "f16, bf16). Blocks, and the choice of tensors in mixtures such as q4_k_m, equal\n"
        "llama.cpp's byte for byte; nf4 is not a type of llama.cpp. If a type's block size does\n"
        "not divide a row, the next type that fits is used: q5_0 for q4_k, q5_1 for q5_k, q8_0\n"
        "for q6_k, else f16.\n"
        "\n"
        "  shoal quantize models/fry fry-nf4.gguf --type nf4\n"
        "  shoal quantize model.gguf small.gguf --type q4_k_m --text notes.txt\n"
        "  shoal quantize models/fry --kv-cache-dtype bf16 f16 i8",
    .job_args =
        (const struct job_args[]){{NULL, {JOB_ARG_INPUT_PATH, JOB_ARG_OUTPUT_PATH}, false}, {0}},
    .rows = rows,
    .size = sizeof(struct options),
    .min_args = 1,
    .max_args = 2,
    .run = run,
};
