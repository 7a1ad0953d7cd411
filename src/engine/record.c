/*
 * record: results of calls as JSON, and the recorder. request_inputs.c has the inputs.
 *
 * Not here: finding models and adapters again (the replay command).
 */
#include "engine/internal.h"

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

json_t *record_outputs_json(const struct engine_request *r) {
    int32_t n = r->n_out, n_prompt = r->prompt_logprobs ? r->n_prompt : 0;
    return json_pack("{s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:i,s:s,s:i,s:i}", "out",
                     json_from_tokens(r->out, n), "logprobs", reals_json(r->out_logprob, n), "top",
                     tops_json(r->top_ids, r->top_logprob, n, r->n_top), "prompt_logprobs",
                     reals_json(r->prompt_logprob, n_prompt), "prompt_top",
                     tops_json(r->prompt_top_ids, r->prompt_top_logprob, n_prompt, r->n_top),
                     "choice_logprobs", reals_json(r->choice_logprob, r->n_choices), "choice_probs",
                     reals_json(r->choice_prob, r->n_choices), "choice", r->choice, "finish",
                     finish_reason_name(r->finish), "prefilled", r->n_prefilled, "generated",
                     r->n_generated);
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
