/*
 * libshoal: the parts of include/shoal.h that all others use: errors, options, callbacks, models.
 * Its structs are opaque, so that the internals may change.
 */
#define _GNU_SOURCE
#include "lib/internal.h"

#include "hub/hub.h"

#include <stdlib.h>
#include <string.h>

/* errors and results */

int error_copy(struct shoal_error *out, const struct error *err) {
    if (out) {
        out->code = err->code;
        snprintf(out->text, sizeof out->text, "%s", err->text);
    }
    return err->code;
}

const char *shoal_version(void) {
    return SHOAL_VERSION;
}

const char *shoal_error_name(int code) {
    return error_name(code);
}

void shoal_free(void *p) {
    free(p);
}

char *json_result(json_t *v) {
    if (!v) return NULL;
    char *text = json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
    CHECK(text != NULL);
    json_decref(v);
    return text;
}

/* options */

static const struct option_row *option_row_of(const struct option_row *rows, const char *option) {
    char *name = xstrndup(option, strcspn(option, "="));
    const struct option_row *row = option_find(rows, name);
    free(name);
    return row;
}

/* Whether an earlier text sets the same option, which is not a list. */
static bool option_is_repeated(const struct option_row *rows, const char *const *options, int i) {
    const struct option_row *row = option_row_of(rows, options[i]);
    if (!row || option_is_list(row)) return false;
    for (int k = 0; k < i; k++)
        if (option_row_of(rows, options[k]) == row) return true;
    return false;
}

/* "name=value" becomes the flag "--name=value", so that options and flags have one parser. */
int call_options_apply(const struct option_row *rows, void *out, const char *const *options,
                       struct error *err) {
    struct strings flags = {0}, positional = {0};
    int rc = OK;
    for (int i = 0; rc == OK && options && options[i]; i++) {
        const char *equals = strchr(options[i], '=');
        if (!equals || equals == options[i]) {
            rc = error_set(err, ERR_USAGE, "option '%s' must be NAME=VALUE", options[i]);
            break;
        }
        if (option_is_repeated(rows, options, i)) {
            rc = error_set(err, ERR_USAGE, "option '%.*s' is given twice",
                           (int)(equals - options[i]), options[i]);
            break;
        }
        char *flag = xasprintf("--%s", options[i]);
        strings_add(&flags, flag);
        free(flag);
    }
    if (rc == OK) rc = options_parse(rows, out, flags.n, flags.v, &positional, err);
    strings_release(&flags);
    strings_release(&positional);
    return rc;
}

int call_options_parse(const struct option_row *rows, void *out, const char *const *options,
                       struct error *err) {
    options_default(rows, out);
    return call_options_apply(rows, out, options, err);
}

static bool is_named(const char *const *names, const char *name) {
    while (*names && strcmp(*names, name) != 0) names++;
    return *names != NULL;
}

struct option_row *options_select(const struct option_row *rows, const char *const *names) {
    struct option_row *out = xcalloc(options_count(rows) + 1, sizeof *out);
    size_t n = 0;
    for (; rows->name; rows++)
        if (is_named(names, rows->type == OPT_ALIAS ? rows->default_value : rows->name))
            out[n++] = *rows;
    return out;
}

/* callbacks */

static void call_message(void *ctx, const char *text) {
    const struct call *c = ctx;
    if (c->callbacks && c->callbacks->message) c->callbacks->message(c->callbacks->ctx, text);
}

static bool call_progress(void *ctx, const struct progress *p, const char *detail) {
    const struct call *c = ctx;
    if (!c->callbacks || !c->callbacks->progress) return false;
    const struct shoal_progress out = {.task = p->title,
                                       .done = p->done,
                                       .total = p->total,
                                       .seconds = clock_now() - p->start,
                                       .detail = detail ? detail : ""};
    return c->callbacks->progress(c->callbacks->ctx, &out) != 0;
}

void call_begin(struct call *c, const struct shoal_callbacks *callbacks) {
    *c = (struct call){.callbacks = callbacks,
                       .sink = {.message = call_message, .progress = call_progress, .ctx = c}};
    c->outer = log_set_sink(&c->sink);
}

int call_end(struct call *c, int rc, const struct error *err, struct shoal_error *out) {
    log_set_sink(c->outer);
    return rc == OK ? OK : error_copy(out, err);
}

/* models */

struct open_options {
    int64_t threads, max_seqs, max_len;
    bool exact, fast;
    char *kv, *lora;
};
#define ROW(name, type, field, fallback, min, max)                                                 \
    { name, type, offsetof(struct open_options, field), fallback, min, max, NULL, NULL }
static const struct option_row open_rows[] = {
    ROW("threads", OPT_INT, threads, "0", 0, 1024),
    ROW("exact", OPT_BOOL, exact, NULL, 0, 0),
    ROW("fast", OPT_BOOL, fast, NULL, 0, 0),
    ROW("kv-cache-dtype", OPT_STRING, kv, "auto", 0, 0),
    ROW("lora-dtype", OPT_STRING, lora, "f32", 0, 0),
    ROW("max-num-seqs", OPT_INT, max_seqs, "64", 1, 4096),
    ROW("max-model-len", OPT_INT, max_len, "0", 0, 1e9),
    {0},
};
#undef ROW

/* The KV cache has pages for this many tokens, or for two sequences of the maximum length: not all
 * sequences reach it. */
enum { KV_CACHE_TOKENS = 65536 };

int numeric_class_choose(bool exact, bool fast, enum numeric_class *out, struct error *err) {
    if (exact && fast) return error_set(err, ERR_USAGE, "'exact' and 'fast' exclude each other");
    *out = numeric_class_of(exact, fast);
    return OK;
}

/* The context is chosen, and the engine fitted into the available memory, as by the commands. */
static int engine_plan(struct shoal *s, const struct open_options *o, enum numeric_class cls,
                       struct error *err) {
    struct memory_plan_input in = {.half = true};
    struct memory_plan plan;
    struct engine_options *e = &in.max_options;
    if (model_measure(s->path, cls, &in.model, err) != OK) return err->code;
    int32_t longest = in.model.config.max_seq_len;
    if (o->max_len > longest)
        return error_set(err, ERR_USAGE,
                         "max-model-len '%lld' is more than the %d tokens of the model's context",
                         (long long)o->max_len, longest);
    if (kv_cache_dtype_parse(o->kv, cls, &e->kv_elem, err) != OK ||
        dtype_parse(o->lora, &e->lora_elem, err) != OK)
        return err->code;
    in.available = memory_limit_get() ? memory_room(NULL) : memory_usable();
    e->pool = s->pool;
    e->max_rows = ENGINE_DEFAULT_ROWS;
    e->max_seqs = (int32_t)o->max_seqs;
    s->named_len = (int32_t)o->max_len;
    e->max_len = s->named_len ? s->named_len : memory_plan_context(&in);
    e->n_pages = MIN(kv_cache_pages_for(MAX(KV_CACHE_TOKENS, 2 * e->max_len)),
                     e->max_seqs * kv_cache_pages_for(e->max_len));
    int rc = memory_plan_make(&in, &plan, err);
    s->engine_options = plan.engine;
    return rc;
}

static int engine_open(struct shoal *s, enum numeric_class cls, struct error *err) {
    s->model = model_open(s->path, cls, err);
    if (!s->model) return err->code;
    if (!s->model->tok) return error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", s->path);
    s->engine = engine_new(s->model, &s->engine_options, err);
    return s->engine ? OK : err->code;
}

struct shoal *shoal_open(const char *model, const char *const *options, struct shoal_error *err) {
    struct error inner = {0};
    struct open_options o;
    struct shoal *s = xcalloc(1, sizeof *s);
    enum numeric_class cls = NUMERIC_EXACT;
    int rc = call_options_parse(open_rows, &o, options, &inner);
    if (rc == OK) rc = numeric_class_choose(o.exact, o.fast, &cls, &inner);
    if (rc == OK) {
        s->path = path_absolute(model);
        s->pool = pool_new((int)o.threads);
        rc = engine_plan(s, &o, cls, &inner);
    }
    if (rc == OK) rc = engine_open(s, cls, &inner);
    options_release(open_rows, &o);
    if (rc == OK) return s;
    error_copy(err, &inner);
    shoal_close(s);
    return NULL;
}

void shoal_close(struct shoal *s) {
    if (!s) return;
    CHECK(!s->server);
    engine_free(s->engine);
    model_close(s->model);
    pool_free(s->pool);
    free(s->path);
    free(s);
}

int model_check_idle(const struct shoal *s, struct error *err) {
    return s->server ? error_set(err, ERR_STATE, "a server uses the model; stop it first") : OK;
}

char *shoal_info(struct shoal *s, struct shoal_error *err) {
    struct error inner = {0};
    const struct model_config *c = &s->model->config;
    const char *hash = model_hash(s->model, &inner);
    if (!hash) {
        error_copy(err, &inner);
        return NULL;
    }
    return json_result(json_pack(
        "{s:s,s:s,s:s,s:I,s:i,s:i,s:i,s:i,s:s,s:s,s:i}", "name", s->model->name, "hash", hash,
        "architecture", c->arch->name, "parameters", (json_int_t)model_param_count(c), "layers",
        c->n_layers, "width", c->d_model, "vocabulary", c->vocab_size, "max_seq_len",
        engine_max_len(s->engine), "class", numeric_class_name(s->model->cls), "level",
        kernels_get()->name, "threads", pool_size(s->pool)));
}

/* tokens */

int messages_encode(const struct shoal *s, const struct shoal_message *messages, int n,
                    bool generation_prompt, struct token_ids *out, struct buf *mask,
                    struct error *err) {
    struct chat_message *chat = xcalloc((size_t)MAX(n, 1), sizeof *chat);
    int rc = n > 0 ? OK : error_set(err, ERR_USAGE, "a conversation needs a message");
    for (int i = 0; rc == OK && i < n; i++) {
        chat[i] = (struct chat_message){messages[i].role, messages[i].content};
        if (!chat[i].role || !chat[i].content)
            rc = error_set(err, ERR_USAGE, "message %d has no role or no content", i);
    }
    if (rc == OK) rc = chat_encode(s->model->tok, chat, n, generation_prompt, out, mask, err);
    free(chat);
    return rc;
}

int shoal_tokenize(const struct shoal *s, const char *text, int *out, int max) {
    struct token_ids ids = {0};
    tokenizer_encode(s->model->tok, text, strlen(text), 0, &ids);
    for (int i = 0; i < MIN(ids.n, max); i++) out[i] = ids.v[i];
    int n = ids.n;
    token_ids_release(&ids);
    return n;
}

char *shoal_detokenize(const struct shoal *s, const int *tokens, int n, struct shoal_error *err) {
    struct buf text = {0};
    struct error inner;
    for (int i = 0; i < n; i++) {
        if (tokens[i] >= 0 && tokens[i] < s->model->config.vocab_size) continue;
        error_set(&inner, ERR_USAGE, "token %d is not in the vocabulary", tokens[i]);
        error_copy(err, &inner);
        return NULL;
    }
    buf_puts(&text, "");
    tokenizer_decode(s->model->tok, tokens, n, false, &text);
    return text.data;
}
