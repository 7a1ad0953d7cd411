/*
 * Calls as JSON, and the recorder.
 *
 * Invariant: record_inputs_parse(record_inputs_json(r)) gives a request with the same key, to the
 * bit: floats are written as doubles of equal value, unsigned 64-bit seeds as the signed integer
 * with the same bits.
 *
 * Not here: finding models and adapters again (the replay command).
 */
#include "engine/engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *finish_reason_name(enum finish_reason f) {
    static const char *const names[] = {"none", "stop", "length", "choice", "loop"};
    CHECK((size_t)f < ARRAY_LEN(names));
    return names[f];
}

const char *numeric_class_name(enum numeric_class cls) {
    return cls == NUMERIC_EXACT ? "exact" : "fast";
}

const char *dtype_name(enum dtype e) {
    static const char *const names[N_DTYPE] = {"f32", "bf16", "f16", "i8"};
    return names[e];
}

void record_key(const struct engine_request *r, const char *model_hash, enum numeric_class cls,
                enum dtype kv, enum dtype lora, char out[HASH_LEN]) {
    engine_request_key(r, model_hash, cls, out);
    if (kv == DTYPE_F32 && lora == DTYPE_F32) return;
    char text[HASH_LEN + 32];
    int n = snprintf(text, sizeof text, "%s kv %s lora %s", out, dtype_name(kv), dtype_name(lora));
    sha256_bytes(text, (size_t)n, out);
}

json_t *json_from_float(float v) {
    if (isfinite(v)) return json_real((double)v);
    return json_string(isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
}

static json_t *reals_json(const float *v, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_from_float(v[i]));
    return list;
}

static json_t *tokens_json(const int32_t *v, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_integer(v[i]));
    return list;
}

/* [[id, logprob], …] for position `at` of arrays [n][n_top]. */
static json_t *top_json(const int32_t *ids, const float *logprobs, int32_t at, int32_t n_top) {
    json_t *list = json_array();
    for (int64_t i = (int64_t)at * n_top; i < ((int64_t)at + 1) * n_top; i++)
        json_array_append_new(list, json_pack("[i,o]", ids[i], json_from_float(logprobs[i])));
    return list;
}

static json_t *tops_json(const int32_t *ids, const float *logprobs, int32_t n, int32_t n_top) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n && n_top > 0; i++)
        json_array_append_new(list, top_json(ids, logprobs, i, n_top));
    return list;
}

static json_t *bias_json(const struct sampling_params *s) {
    json_t *list = json_array();
    for (int32_t i = 0; i < s->n_bias; i++)
        json_array_append_new(
            list, json_pack("[i,o]", s->bias[i].token, json_from_float(s->bias[i].bias)));
    return list;
}

static json_t *sampling_json(const struct sampling_params *s) {
    json_t *v = json_pack(
        "{s:o,s:i,s:o,s:o,s:I,s:o,s:o,s:o,s:o,s:o}", "temperature", json_from_float(s->temperature),
        "top_k", s->top_k, "top_p", json_from_float(s->top_p), "min_p", json_from_float(s->min_p),
        "seed", (json_int_t)s->seed, "typical_p", json_from_float(s->typical_p),
        "repetition_penalty", json_from_float(s->repetition_penalty), "presence_penalty",
        json_from_float(s->presence_penalty), "frequency_penalty",
        json_from_float(s->frequency_penalty), "bias", bias_json(s));
    if (s->penalty_last_n)
        json_object_set_new(v, "penalty_last_n", json_integer(s->penalty_last_n));
    return v;
}

/* The source as a text, or byte by byte if JSON cannot hold it. */
static json_t *grammar_json(const struct grammar *g) {
    if (!g) return json_null();
    size_t len;
    const char *text = grammar_source(g, &len);
    json_t *source = memchr(text, 0, len) ? NULL : json_stringn(text, len);
    if (!source) {
        source = json_array();
        for (size_t i = 0; i < len; i++)
            json_array_append_new(source, json_integer((unsigned char)text[i]));
    }
    return json_pack("{s:s,s:o}", "kind", grammar_kind(g), "source", source);
}

json_t *record_inputs_json(const struct engine_request *r) {
    json_t *texts = json_array(), *choices = json_array();
    for (int32_t i = 0; i < r->n_stop_texts; i++)
        json_array_append_new(texts, json_string(r->stop_texts[i]));
    for (int32_t i = 0; i < r->n_choices; i++)
        json_array_append_new(choices, tokens_json(r->choices[i].v, r->choices[i].n));
    return json_pack("{s:o,s:o,s:i,s:o,s:o,s:i,s:i,s:b,s:o,s:o,s:o,s:o}", "prompt",
                     tokens_json(r->prompt, r->n_prompt), "sampling", sampling_json(&r->sampling),
                     "max_tokens", r->max_tokens, "stop", tokens_json(r->stop, r->n_stop),
                     "stop_texts", texts, "loop_tokens", r->loop_tokens, "n_top", r->n_top,
                     "prompt_logprobs", (int)r->prompt_logprobs, "logprob_temperature",
                     json_from_float(r->logprob_temperature), "suffix",
                     tokens_json(r->suffix.v, r->suffix.n), "choices", choices, "grammar",
                     grammar_json(r->grammar));
}

json_t *record_outputs_json(const struct engine_request *r) {
    int32_t n = r->n_out, n_prompt = r->prompt_logprobs ? r->n_prompt : 0;
    return json_pack(
        "{s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:i,s:s,s:i,s:i}", "out", tokens_json(r->out, n), "logprobs",
        reals_json(r->out_logprob, n), "top", tops_json(r->top_ids, r->top_logprob, n, r->n_top),
        "prompt_logprobs", reals_json(r->prompt_logprob, n_prompt), "prompt_top",
        tops_json(r->prompt_top_ids, r->prompt_top_logprob, n_prompt, r->n_top), "choice_logprobs",
        reals_json(r->choice_logprob, r->n_choices), "choice_probs",
        reals_json(r->choice_prob, r->n_choices), "choice", r->choice, "finish",
        finish_reason_name(r->finish), "prefilled", r->n_prefilled, "generated", r->n_generated);
}

static const char *path_of(const struct adapter *a, const struct recorded_adapter *named, int n) {
    for (int i = 0; i < n; i++)
        if (strcmp(named[i].adapter->hash, a->hash) == 0) return named[i].path;
    return "";
}

/* A term names its adapter twice: by path, to find it, and by hash, to verify it. */
static json_t *term_json(const struct weighted_adapter *t, const struct recorded_adapter *named,
                         int n) {
    if (t->adapter)
        return json_pack("{s:s,s:s,s:o}", "path", path_of(t->adapter, named, n), "hash",
                         t->adapter->hash, "weight", json_from_float(t->weight));
    return json_pack("{s:{s:I,s:I},s:o}", "noise", "seed", (json_int_t)t->noise.seed, "member",
                     (json_int_t)t->noise.member, "weight", json_from_float(t->weight));
}

json_t *record_adapters_json(const struct engine_request *r, const struct recorded_adapter *named,
                             int n) {
    json_t *list = json_array();
    if (r->adapter)
        json_array_append_new(list, json_pack("{s:s,s:s}", "path", path_of(r->adapter, named, n),
                                              "hash", r->adapter->hash));
    for (int32_t i = 0; i < r->n_mix; i++)
        json_array_append_new(list, term_json(&r->mix[i], named, n));
    return list;
}

/* Parser state: keeps the first error; every later value parses as empty. */
struct reader {
    struct arena *arena;
    struct error *err;
    bool bad;
};

static void *refuse(struct reader *rd, const char *what) {
    if (!rd->bad) error_set(rd->err, ERR_FORMAT, "'%s' of the recorded call is damaged", what);
    rd->bad = true;
    return NULL;
}

static int64_t integer(struct reader *rd, const json_t *v, const char *key, int64_t lo,
                       int64_t hi) {
    if (key && json_is_object(v)) v = json_object_get(v, key);
    if (json_is_integer(v) && json_integer_value(v) >= lo && json_integer_value(v) <= hi)
        return json_integer_value(v);
    refuse(rd, key ? key : "a token");
    return 0;
}

static float real(struct reader *rd, const json_t *v, const char *key) {
    if (json_is_object(v)) v = json_object_get(v, key);
    if (json_is_number(v)) return (float)json_number_value(v);
    const char *text = json_string_value(v);
    if (text && strcmp(text, "inf") == 0) return INFINITY;
    if (text && strcmp(text, "-inf") == 0) return -INFINITY;
    refuse(rd, key);
    return 0;
}

static const json_t *list_get(struct reader *rd, const json_t *o, const char *key, int32_t *n) {
    const json_t *list = json_object_get(o, key);
    *n = (int32_t)json_array_size(list);
    return json_is_array(list) ? list : refuse(rd, key);
}

static struct token_seq tokens(struct reader *rd, const json_t *list) {
    int32_t n = (int32_t)json_array_size(list);
    int32_t *v = arena_alloc(rd->arena, (size_t)MAX(n, 1) * sizeof *v);
    if (!json_is_array(list)) refuse(rd, "tokens");
    for (int32_t i = 0; i < n; i++)
        v[i] = (int32_t)integer(rd, json_array_get(list, (size_t)i), NULL, 0, INT32_MAX);
    return (struct token_seq){v, n};
}

static void sampling_parse(struct reader *rd, const json_t *o, struct sampling_params *s) {
    int32_t n;
    const json_t *bias = list_get(rd, o, "bias", &n);
    struct logit_bias *v = arena_alloc(rd->arena, (size_t)MAX(n, 1) * sizeof *v);
    for (int32_t i = 0; i < n; i++) {
        const json_t *pair = json_array_get(bias, (size_t)i);
        v[i].token = (int32_t)integer(rd, json_array_get(pair, 0), NULL, 0, INT32_MAX);
        v[i].bias = real(rd, json_array_get(pair, 1), "bias");
    }
    *s = (struct sampling_params){.temperature = real(rd, o, "temperature"),
                                  .top_k = (int32_t)integer(rd, o, "top_k", INT32_MIN, INT32_MAX),
                                  .top_p = real(rd, o, "top_p"),
                                  .min_p = real(rd, o, "min_p"),
                                  .seed = (uint64_t)integer(rd, o, "seed", INT64_MIN, INT64_MAX),
                                  .typical_p = real(rd, o, "typical_p"),
                                  .repetition_penalty = real(rd, o, "repetition_penalty"),
                                  .presence_penalty = real(rd, o, "presence_penalty"),
                                  .frequency_penalty = real(rd, o, "frequency_penalty"),
                                  .bias = n ? v : NULL,
                                  .n_bias = n};
    if (json_object_get(o, "penalty_last_n"))
        s->penalty_last_n = (int32_t)integer(rd, o, "penalty_last_n", 0, INT32_MAX);
}

static void lists_parse(struct reader *rd, const json_t *o, struct engine_request *r) {
    const json_t *texts = list_get(rd, o, "stop_texts", &r->n_stop_texts),
                 *choices = list_get(rd, o, "choices", &r->n_choices);
    const char **text = arena_alloc(rd->arena, (size_t)MAX(r->n_stop_texts, 1) * sizeof *text);
    struct token_seq *seq = arena_alloc(rd->arena, (size_t)MAX(r->n_choices, 1) * sizeof *seq);
    for (int32_t i = 0; i < r->n_stop_texts; i++) {
        const char *s = json_string_value(json_array_get(texts, (size_t)i));
        if (!s) refuse(rd, "stop_texts");
        text[i] = arena_strdup(rd->arena, s ? s : "");
    }
    for (int32_t i = 0; i < r->n_choices; i++)
        seq[i] = tokens(rd, json_array_get(choices, (size_t)i));
    r->stop_texts = text;
    r->choices = seq;
}

/* Calls recorded before grammars existed have no such member. */
static struct grammar *grammar_parse(struct reader *rd, const json_t *v) {
    if (rd->bad || !v || json_is_null(v)) return NULL;
    const char *kind = json_string_value(json_object_get(v, "kind"));
    const json_t *source = json_object_get(v, "source");
    struct buf text = {0};
    if (!kind || !(json_is_string(source) || json_is_array(source))) return refuse(rd, "grammar");
    buf_add(&text, json_string_value(source), json_string_length(source));
    for (size_t i = 0; i < json_array_size(source); i++) {
        char byte = (char)integer(rd, json_array_get(source, i), NULL, 0, UINT8_MAX);
        buf_add(&text, &byte, 1);
    }
    struct grammar *g = NULL;
    if (!rd->bad) g = grammar_from_source(kind, text.data ? text.data : "", text.len, rd->err);
    rd->bad |= !g;
    buf_release(&text);
    return g;
}

int record_inputs_parse(const json_t *inputs, struct arena *arena, struct engine_request *out,
                        struct grammar **grammar, struct error *err) {
    struct reader rd = {.arena = arena, .err = err};
    struct token_seq prompt = tokens(&rd, json_object_get(inputs, "prompt")),
                     stop = tokens(&rd, json_object_get(inputs, "stop"));
    *out = (struct engine_request){.prompt = prompt.v, .n_prompt = prompt.n};
    out->stop = stop.v;
    out->n_stop = stop.n;
    out->suffix = tokens(&rd, json_object_get(inputs, "suffix"));
    out->max_tokens = (int32_t)integer(&rd, inputs, "max_tokens", 0, INT32_MAX);
    out->loop_tokens = (int32_t)integer(&rd, inputs, "loop_tokens", 0, INT32_MAX);
    out->n_top = (int32_t)integer(&rd, inputs, "n_top", 0, ENGINE_TOP_MAX);
    out->prompt_logprobs = json_is_true(json_object_get(inputs, "prompt_logprobs"));
    out->logprob_temperature = real(&rd, inputs, "logprob_temperature");
    sampling_parse(&rd, json_object_get(inputs, "sampling"), &out->sampling);
    lists_parse(&rd, inputs, out);
    out->grammar = *grammar = grammar_parse(&rd, json_object_get(inputs, "grammar"));
    return rd.bad ? err->code : OK;
}

/* A value may be a whole list: prints enough of it to recognise it. */
static void value_print(const json_t *v, struct buf *what) {
    char *text = v ? json_canonical(v) : xstrdup("nothing");
    buf_printf(what, "'%.80s'", text);
    free(text);
}

static void difference_add(const char *key, int64_t at, const json_t *was, const json_t *now,
                           struct buf *what) {
    buf_printf(what, "%s", key);
    if (at >= 0) buf_printf(what, " at %lld", (long long)at);
    buf_puts(what, ": was ");
    value_print(was, what);
    buf_puts(what, ", is ");
    value_print(now, what);
    buf_puts(what, "\n");
}

/* Lists are compared up to their first difference: after a different token, the texts diverge. */
bool record_outputs_diff(const json_t *was, const json_t *now, struct buf *what) {
    const char *key;
    json_t *a;
    bool differ = false;
    json_object_foreach ((json_t *)(uintptr_t)was, key, a) {
        const json_t *b = json_object_get(now, key);
        if (json_equal(a, b)) continue;
        differ = true;
        if (!json_is_array(a) || !json_is_array(b)) {
            difference_add(key, -1, a, b, what);
            continue;
        }
        size_t at = 0;
        while (json_equal(json_array_get(a, at), json_array_get(b, at))) at++;
        difference_add(key, (int64_t)at, json_array_get(a, at), json_array_get(b, at), what);
    }
    return differ;
}

/* Runs inside a step: keeps the first error for the caller and does not stop the engine. */
void recorder_finished(void *recorder, const struct engine_request *r) {
    struct recorder *rec = recorder;
    if (rec->err.code != OK) return;
    char key[HASH_LEN];
    record_key(r, rec->model_hash, rec->model->cls, rec->kv, rec->lora, key);
    json_t *call = json_pack(
        "{s:s,s:s,s:o,s:s,s:s,s:s,s:s,s:s,s:o,s:o}", "model", rec->model_path, "model_hash",
        rec->model_hash, "adapters", record_adapters_json(r, rec->adapters, rec->n_adapters),
        "class", numeric_class_name(rec->model->cls), "level", kernels_get()->name, "kv",
        dtype_name(rec->kv), "lora", dtype_name(rec->lora), "version", SHOAL_VERSION, "inputs",
        record_inputs_json(r), "outputs", record_outputs_json(r));
    CHECK(call != NULL);
    if (store_record_put(rec->store, key, call, &rec->err) == OK) rec->n++;
    json_decref(call);
}
