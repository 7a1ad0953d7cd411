/*
 * cmd_quantize: `shoal quantize`: writes a model with fewer bits per weight, and measures the loss.
 *
 * Both models are evaluated on the same tokens. Perplexity, KL divergence and agreement of the most
 * probable token are printed together with size and bits, because a size alone does not show the
 * loss. Without --text the tokens are chats: questions and answers of the starter model's families
 * in English, Japanese and Chinese, of which only answers are scored. A text of the user's domain
 * gives more relevant numbers. With --kv-cache-dtype the same is measured of keys and values: the
 * model is compared with itself, and nothing is written.
 *
 * One model at a time is in memory: the copy is written from the mapped original, then the original
 * predicts the tokens, its logits are stored in a file, and the copy is compared with them.
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
#define LOGITS_FILE_BYTES ((int64_t)1 << 30) /* 1,024 predictions of the largest vocabulary */

/* The token sequences on which both models are evaluated. */
struct text_passages {
    struct token_ids ids;
    struct buf scored; /* chats: 1 for tokens of the assistant, which are scored; else empty */
    int32_t begin[MAX_SEQS + 1]; /* passage i is ids[begin[i], begin[i + 1]) */
    int n;
    struct scored_sequence seqs[MAX_SEQS]; /* the passages, cut to the model's context */
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
static double bits_per_weight(const struct model_config *c, const struct quant_scheme *q) {
    return 8.0 * (double)quant_bytes(q, c) / (double)model_param_count(c);
}

/* Bytes of a written GGUF file, or of the configuration and weights in a written directory. */
static int64_t written_bytes(const char *out) {
    struct stat st;
    int64_t bytes = 0;
    if (path_has_extension(out, ".gguf")) return stat(out, &st) == 0 ? st.st_size : 0;
    for (int i = 0; i < 2; i++) {
        char *file = path_join(out, i ? "model.safetensors" : "config.json");
        if (stat(file, &st) == 0) bytes += st.st_size;
        free(file);
    }
    return bytes;
}

static int64_t file_bytes(const struct model *m) {
    int64_t n = 0;
    for (int i = 0; i < m->n_maps; i++) n += (int64_t)m->maps[i].size;
    return n;
}

/* The memory of the steps, of which one at a time is in memory: upper bounds in bytes. */
struct memory_steps {
    size_t limit;          /* --max-memory; 0: none */
    size_t used;           /* when the command starts */
    size_t writing;        /* from the mapped original */
    size_t original, copy; /* the comparison of each on the tokens; 0: none */
};

static size_t steps_most(const struct memory_steps *s) {
    return MAX(s->writing, MAX(s->original, s->copy));
}

static void steps_measure(struct memory_steps *s, const struct model_size *size,
                          const struct quant_scheme *q, const struct options *o,
                          enum numeric_class cls, bool gguf, struct pool *pool) {
    enum { TEXT_BYTES = 4 << 20 };
    const struct model_config *c = &size->config;
    int32_t longest = WINDOW;
    for (int f = 0; f < fry_count(); f++) longest = MAX(longest, family_max_tokens(f));
    struct model_size copy;
    quant_measure(q, c, cls, &copy);
    // tokenizer.json is longer than the same tokenizer in GGUF
    copy.tokenizer = gguf ? size->tokenizer : 2 * size->tokenizer;
    const struct model_size tokenizers = {.tokenizer = size->tokenizer + copy.tokenizer};
    size_t compare =
        TEXT_BYTES + model_divergence_bytes(c, MIN(longest, c->max_seq_len), o->tokens, pool);
    *s = (struct memory_steps){.used = memory_used(NULL)};
    s->writing = model_loading_bytes(&tokenizers) + model_writing_bytes(c, pool);
    if (!o->compare) return;
    s->original = model_with_bytes(size, compare);
    s->copy = model_with_bytes(&copy, compare);
}

/* Leaves the comparison out of *s if it does not fit into the available memory. */
static void comparison_check(struct memory_steps *s) {
    const struct memory_step step = {.what = "the comparison of both models",
                                     .least = MAX(s->original, s->copy)};
    struct error why;
    if (memory_check(NULL, &step, &why) == OK) return;
    log_warn("the copy is not compared with the original: %s", why.text);
    s->original = s->copy = 0;
}

/* Refuses too little memory, and prints the plan, which *steps receives. */
static int memory_limit_check(const struct cli_options *c, const struct options *o,
                              const char *path, const char *out, const struct quant_scheme *q,
                              struct pool *pool, struct memory_steps *steps, struct error *err) {
    struct model_size size;
    if (memory_limit_parse(o->max_memory, err) != OK ||
        model_measure(path, cli_numeric_class(c), &size, err) != OK)
        return err->code;
    steps_measure(steps, &size, q, o, cli_numeric_class(c), path_has_extension(out, ".gguf"), pool);
    const struct memory_step step = {.what = "quantising this model", .least = steps->writing};
    int rc = memory_check(NULL, &step, err);
    if (rc == OK && o->compare) comparison_check(steps);
    steps->limit = memory_limit_named();
    if (rc == OK && steps->limit)
        log_info("memory: at most %.1f MB of %.1f",
                 (double)(steps->used + steps_most(steps)) / (1 << 20),
                 (double)steps->limit / (1 << 20));
    memory_limit_set(0);
    return rc;
}

static json_t *steps_json(const struct memory_steps *s) {
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I}", "limit", (json_int_t)s->limit, "used",
                     (json_int_t)s->used, "writing", (json_int_t)s->writing, "original",
                     (json_int_t)s->original, "copy", (json_int_t)s->copy, "total",
                     (json_int_t)(s->used + steps_most(s)));
}

static int plan(const struct cli_options *c, const struct model *m, const char *out,
                const struct quant_scheme *q, const struct memory_steps *memory,
                struct error *err) {
    if (format_check(out, q, err) != OK) return err->code;
    cli_print_dry_run(c, json_pack("{s:o,s:s,s:I,s:I,s:f,s:b,s:o}", "writes", json_from_path(out),
                                   "type", q->name, "bytes of weights",
                                   (json_int_t)quant_bytes(q, &m->config), "original bytes",
                                   (json_int_t)file_bytes(m), "bits a weight",
                                   bits_per_weight(&m->config, q), "replaces",
                                   (int)path_exists(out), "memory", steps_json(memory)));
    return OK;
}

/* What is printed of the original after it is closed. */
struct original {
    struct model_config config;
    enum tensor_type type;
    int64_t bytes;
};

/* `after`: bytes of the copy. Without a comparison d->n is 0. */
static void print_result(const struct cli_options *c, const struct original *m, int64_t after,
                         const char *out, const struct quant_scheme *q,
                         const struct model_divergence *d) {
    int64_t before = m->bytes;
    if (c->json) {
        json_t *v = json_pack("{s:s,s:s,s:I,s:I,s:f,s:b,s:I}", "out", out, "type", q->name, "bytes",
                              (json_int_t)after, "original_bytes", (json_int_t)before,
                              "bits_per_weight", bits_per_weight(&m->config, q), "requantised",
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
           1e-6 * (double)after, 1e-6 * (double)before, bits_per_weight(&m->config, q));
    if (d->n == 0) return;
    printf("  perplexity      %.4f (original %.4f) on %lld tokens\n", d->perplexity[1],
           d->perplexity[0], (long long)d->n);
    printf("  KL divergence   mean %.6f, 99th percentile %.6f nats\n", d->kl_mean, d->kl_p99);
    printf("  same top token  %.2f %%\n", 100 * d->same_top);
}

/* Reads the tokens of the comparison; none if the model has no tokenizer. */
static int passages_read(struct text_passages *r, const struct options *o, const struct model *m,
                         struct error *err) {
    int rc = OK;
    if (!m->tok)
        log_warn("'%s' has no tokenizer: the copy is not compared", m->name);
    else if (o->text)
        rc = text_read(r, m, o->text, o->tokens, err);
    else
        rc = chats_read(r, m->tok, o->tokens, err);
    for (int i = 0; i < r->n; i++) {
        int32_t at = r->begin[i], n = MIN(r->begin[i + 1] - at, m->config.max_seq_len);
        r->seqs[i] =
            (struct scored_sequence){r->ids.v + at, r->scored.data ? r->scored.data + at : NULL, n};
    }
    return rc;
}

static void passages_free(struct text_passages *r) {
    token_ids_release(&r->ids);
    buf_release(&r->scored);
    free(r);
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
    struct text_passages *r = xcalloc(1, sizeof *r);
    struct model *m = model_open(path, cli_numeric_class(c), err);
    int rc = m ? passages_read(r, o, m, err) : err->code;
    for (int i = 0; rc == OK && i < o->kv.n; i++) {
        const struct model *const both[2] = {m, m};
        enum dtype kv[2] = {DTYPE_F32};
        struct progress bar;
        rc = kv_cache_dtype_parse(o->kv.v[i], m->cls, &kv[1], err);
        if (rc != OK || r->n == 0) continue;
        progress_start(&bar, "comparison", r->ids.n);
        const struct model_divergence d =
            model_divergence_measure(both, kv, r->seqs, r->n, pool, &bar);
        progress_finish(&bar, NULL);
        if (d.n > 0) print_kv(c, kv[1], &d);
    }
    model_close(m);
    passages_free(r);
    pool_free(pool);
    free(path);
    return rc;
}

/* Writes the copy, or prints the plan (`memory`), from the mapped original; reads the tokens of the
 * comparison. */
static int copy_make(const struct cli_options *c, const struct options *o, const char *path,
                     const char *out, const struct quant_scheme *q, struct pool *pool,
                     const struct memory_steps *memory, struct original *info,
                     struct text_passages *r, struct error *err) {
    struct model *m = model_open_for_writing(path, err);
    if (!m) return err->code;
    int rc = OK;
    *info = (struct original){m->config, m->type, file_bytes(m)};
    if (tensor_type_is_quantized(m->type))
        log_warn("'%s' is quantised already (%s): the figures do not include that loss", m->name,
                 tensor_type_name(m->type));
    if (o->dry_run)
        rc = plan(c, m, out, q, memory, err);
    else if ((rc = model_set_source(m, err)) == OK)
        rc = copy_write(m, out, q, pool, err);
    if (rc == OK && memory->copy > 0 && !o->dry_run) rc = passages_read(r, o, m, err);
    model_close(m);
    return rc;
}

static int quantize(const struct cli_options *c, const struct options *o, const char *path,
                    const char *out, const struct quant_scheme *q, struct pool *pool,
                    struct error *err) {
    static const enum dtype f32[2] = {DTYPE_F32, DTYPE_F32};
    const char *const both[2] = {path, out};
    struct memory_steps steps = {0};
    struct original info;
    struct model_divergence d = {0};
    struct text_passages *r = xcalloc(1, sizeof *r);
    int rc = memory_limit_check(c, o, path, out, q, pool, &steps, err);
    if (rc == OK && same_file(path, out))
        rc = error_set(err, ERR_USAGE, "'%s' is the model itself: name another file", out);
    if (rc == OK) rc = copy_make(c, o, path, out, q, pool, &steps, &info, r, err);
    if (rc == OK && r->n > 0)
        rc = model_divergence_measure_in_turn(both, cli_numeric_class(c), f32,
                                              info.config.vocab_size, r->seqs, r->n, out,
                                              LOGITS_FILE_BYTES, pool, &d, err);
    if (rc == OK && !o->dry_run) print_result(c, &info, written_bytes(out), out, q, &d);
    if (rc == OK && !o->dry_run) setup_print_peak_memory(c, steps.limit);
    passages_free(r);
    return rc;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const struct options *o = options;
    if (o->kv.n > 0 && (o->type || args->n > 1))
        return error_set(err, ERR_USAGE,
                         "--kv-cache-dtype only measures: leave OUT and --type out");
    if (o->kv.n > 0) return kv_compare(c, o, args->v[0], err);
    if (args->n < 2) return error_set(err, ERR_USAGE, "argument 'OUT' is missing");
    struct quant_scheme q;
    if (!o->type) return error_set(err, ERR_USAGE, "--type is missing: %s", tensor_type_list());
    if (quant_parse(o->type, &q, err) != OK) return err->code;
    char *path = cli_find_file(args->v[0]);
    struct pool *pool = pool_new((int)c->threads);
    int rc = quantize(c, o, path, args->v[1], &q, pool, err);
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
     "compare the copy with the original; --no-compare only writes it, in less time and memory"},
    {"max-memory", OPT_STRING, offsetof(struct options, max_memory), NULL, 0, 0, "SIZE",
     "memory limit of the process, such as 500M or 2G, checked before anything is loaded",
     JOB_ARG_TEXT},
    {"dry-run", OPT_BOOL, offsetof(struct options, dry_run), NULL, 0, 0, NULL,
     "print the size of the result and the memory plan, and exit"},
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
