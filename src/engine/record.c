/*
 * record: results of requests as JSON, and the recorder. The inputs are in request_inputs.c.
 *
 * These functions open no files: the replay command opens a record's model and adapters.
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

void record_key(const struct engine_request *r, const char *model_hash, enum numeric_class cls,
                enum dtype kv, enum dtype lora, char out[HASH_LEN]) {
    engine_request_key(r, model_hash, cls, out);
    if (kv == DTYPE_F32 && lora == DTYPE_F32) return;
    char text[HASH_LEN + 32];
    int n = snprintf(text, sizeof text, "%s kv %s lora %s", out, dtype_name(kv), dtype_name(lora));
    sha256_bytes(text, (size_t)n, out);
}

bool finish_reason_find(const char *name, enum finish_reason *out) {
    for (int f = FINISH_NONE; f <= FINISH_LOOP; f++)
        if (strcmp(finish_reason_name((enum finish_reason)f), name) == 0) {
            *out = (enum finish_reason)f;
            return true;
        }
    return false;
}

json_t *json_from_float(float v) {
    if (isfinite(v)) return json_real((double)v);
    return json_string(isnan(v) ? "nan" : v > 0 ? "inf" : "-inf");
}

bool json_to_float(const json_t *v, float *out) {
    const char *text = json_string_value(v);
    if (json_is_number(v))
        *out = (float)json_number_value(v);
    else if (text && strcmp(text, "nan") == 0)
        *out = NAN;
    else if (text && (strcmp(text, "inf") == 0 || strcmp(text, "-inf") == 0))
        *out = *text == '-' ? -INFINITY : INFINITY;
    else
        return false;
    return true;
}

static json_t *floats_json(const float *v, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_from_float(v[i]));
    return list;
}

/* [[id, logprob], …] for position `pos` of arrays [n][n_top]. */
static json_t *top_json(const int32_t *ids, const float *logprobs, int32_t pos, int32_t n_top) {
    json_t *list = json_array();
    for (int64_t i = (int64_t)pos * n_top; i < ((int64_t)pos + 1) * n_top; i++)
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
                     json_from_tokens(r->out, n), "logprobs", floats_json(r->out_logprob, n), "top",
                     tops_json(r->top_ids, r->top_logprob, n, r->n_top), "prompt_logprobs",
                     floats_json(r->prompt_logprob, n_prompt), "prompt_top",
                     tops_json(r->prompt_top_ids, r->prompt_top_logprob, n_prompt, r->n_top),
                     "choice_logprobs", floats_json(r->choice_logprob, r->n_choices),
                     "choice_probs", floats_json(r->choice_prob, r->n_choices), "choice", r->choice,
                     "finish", finish_reason_name(r->finish), "prefilled", r->n_prefilled,
                     "generated", r->n_generated);
}

json_t *record_tokens_json(const struct engine_request *r, int32_t from) {
    int32_t n = r->n_out - from;
    int64_t tops = (int64_t)from * r->n_top;
    bool has_tops = r->n_top > 0;
    return json_pack("{s:o,s:o,s:o}", "out", json_from_tokens(r->out + from, n), "logprobs",
                     floats_json(r->out_logprob + from, n), "top",
                     tops_json(has_tops ? r->top_ids + tops : NULL,
                               has_tops ? r->top_logprob + tops : NULL, n, r->n_top));
}

/* the inverse */

/* Reads a list of n numbers. False: it is none. */
static bool floats_parse(const json_t *list, int32_t n, float *out) {
    if (!json_is_array(list) || json_array_size(list) != (size_t)n) return false;
    for (int32_t i = 0; i < n; i++)
        if (!json_to_float(json_array_get(list, (size_t)i), &out[i])) return false;
    return true;
}

static bool tokens_parse(const json_t *list, int32_t n, int32_t *out) {
    if (!json_is_array(list) || json_array_size(list) != (size_t)n) return false;
    for (int32_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX)
            return false;
        out[i] = (int32_t)json_integer_value(v);
    }
    return true;
}

/* Reads [n][n_top] pairs of an id and a number. */
static bool tops_parse(const json_t *list, int32_t n, int32_t n_top, int32_t *ids,
                       float *logprobs) {
    if (n_top == 0) return true;
    if (!json_is_array(list) || json_array_size(list) != (size_t)n) return false;
    for (int64_t i = 0; i < (int64_t)n * n_top; i++) {
        const json_t *top = json_array_get(list, (size_t)(i / n_top)),
                     *pair = json_array_get(top, (size_t)(i % n_top)),
                     *id = json_array_get(pair, 0);
        if (json_array_size(top) != (size_t)n_top || !json_is_integer(id) ||
            !json_to_float(json_array_get(pair, 1), &logprobs[i]))
            return false;
        ids[i] = (int32_t)json_integer_value(id);
    }
    return true;
}

static bool number_parse(const json_t *outputs, const char *key, int32_t min, int32_t max,
                         int32_t *out) {
    const json_t *v = json_object_get(outputs, key);
    int64_t n = json_integer_value(v);
    *out = (int32_t)n;
    return json_is_integer(v) && n >= min && n <= max;
}

int record_outputs_parse(const struct engine *e, const json_t *outputs, struct engine_request *r,
                         struct error *err) {
    const json_t *out = json_object_get(outputs, "out");
    int32_t n = (int32_t)MIN(json_array_size(out), INT32_MAX), n_choices = MAX(r->n_choices, 0),
            n_prompt = r->prompt_logprobs ? r->n_prompt : 0;
    if (request_results_alloc(r, err) != OK) goto failed;
    if (n > r->max_tokens || !tokens_parse(out, n, r->out) ||
        !floats_parse(json_object_get(outputs, "logprobs"), n, r->out_logprob) ||
        !tops_parse(json_object_get(outputs, "top"), n, r->n_top, r->top_ids, r->top_logprob) ||
        !floats_parse(json_object_get(outputs, "prompt_logprobs"), n_prompt, r->prompt_logprob) ||
        !tops_parse(json_object_get(outputs, "prompt_top"), n_prompt, n_prompt ? r->n_top : 0,
                    r->prompt_top_ids, r->prompt_top_logprob) ||
        !floats_parse(json_object_get(outputs, "choice_logprobs"), n_choices, r->choice_logprob) ||
        !floats_parse(json_object_get(outputs, "choice_probs"), n_choices, r->choice_prob) ||
        !number_parse(outputs, "choice", -1, n_choices - 1, &r->choice) ||
        !finish_reason_find(json_get_string(outputs, "finish"), &r->finish) ||
        !number_parse(outputs, "prefilled", 0, INT32_MAX, &r->n_prefilled) ||
        !number_parse(outputs, "generated", 0, INT32_MAX, &r->n_generated)) {
        error_set(err, ERR_FORMAT, "the outputs are not those of the request");
        goto failed;
    }
    if (engine_check_tokens("the output", r->out, n, e->vocab, err) != OK ||
        engine_check_tokens("the top tokens", r->top_ids, n * r->n_top, e->vocab, err) != OK ||
        engine_check_tokens("the top tokens of the prompt", r->prompt_top_ids, n_prompt * r->n_top,
                            e->vocab, err) != OK)
        goto failed;
    r->n_out = n;
    engine_text_replay(e, r);
    r->done = true;
    return OK;
failed:
    engine_request_release(r);
    return err->code;
}

/* results that become known one after another */

/* The tokens of `t` begin at position `at` of r. */
static int tokens_merge(const struct engine_request *t, int32_t at, struct engine_request *r,
                        struct error *err) {
    if (at > r->n_out) return OK; // a message is lost; the last one has all tokens
    int32_t known = MIN(r->n_out - at, t->n_out), n = t->n_out - known, end = at + t->n_out;
    size_t top = (size_t)r->n_top, from = (size_t)(at + known);
    bool equal = true;
#define MERGE(array, width)                                                                        \
    if (known > 0 && (width) > 0)                                                                  \
        equal &= memcmp(t->array, r->array + (size_t)at * (width),                                 \
                        sizeof *t->array * (size_t)known * (width)) == 0;                          \
    if (equal && n > 0 && (width) > 0)                                                             \
        memcpy(r->array + from * (width), t->array + (size_t)known * (width),                      \
               sizeof *t->array * (size_t)n * (width));
    MERGE(out, 1)
    MERGE(out_logprob, 1)
    MERGE(top_ids, top)
    MERGE(top_logprob, top)
#undef MERGE
    if (!equal) return error_set(err, ERR_MISMATCH, "its tokens differ from those sent before");
    r->n_out = MAX(r->n_out, end);
    return OK;
}

int record_tokens_merge(const struct engine *e, const json_t *tokens, int32_t at,
                        struct engine_request *r, struct error *err) {
    const json_t *out = json_object_get(tokens, "out");
    size_t n = json_array_size(out);
    if (at < 0 || at > r->max_tokens || n > (size_t)(r->max_tokens - at))
        return error_set(err, ERR_FORMAT, "there are more tokens than requested");
    struct engine_request t = {.max_tokens = (int32_t)n, .n_top = r->n_top, .n_out = (int32_t)n};
    int rc = request_results_alloc(&t, err);
    if (rc == OK &&
        (!tokens_parse(out, t.n_out, t.out) ||
         !floats_parse(json_object_get(tokens, "logprobs"), t.n_out, t.out_logprob) ||
         !tops_parse(json_object_get(tokens, "top"), t.n_out, t.n_top, t.top_ids, t.top_logprob)))
        rc = error_set(err, ERR_FORMAT, "the tokens are not those of the request");
    if (rc == OK) rc = engine_check_tokens("the output", t.out, t.n_out, e->vocab, err);
    if (rc == OK)
        rc = engine_check_tokens("the top tokens", t.top_ids, t.n_out * t.n_top, e->vocab, err);
    if (rc == OK) rc = tokens_merge(&t, at, r, err);
    engine_request_release(&t);
    return rc;
}

static void array_copy(void *to, const void *from, int64_t n, size_t size) {
    if (n > 0) memcpy(to, from, (size_t)n * size);
}

int record_outputs_merge(const struct engine *e, const json_t *outputs, struct engine_request *r,
                         struct error *err) {
    struct engine_request t = *r;
    t.out = t.top_ids = t.prompt_top_ids = NULL;
    t.out_logprob = t.top_logprob = t.prompt_logprob = t.prompt_top_logprob = NULL;
    t.choice_logprob = t.choice_prob = NULL;
    t.text = (struct buf){0};
    if (record_outputs_parse(e, outputs, &t, err) != OK) return err->code;
    int rc = tokens_merge(&t, 0, r, err);
    if (rc == OK && r->n_out != t.n_out)
        rc = error_set(err, ERR_MISMATCH, "it has fewer tokens than were sent before");
    if (rc == OK) {
        int64_t n_prompt = r->prompt_logprobs ? r->n_prompt : 0, n_choices = MAX(r->n_choices, 0);
        array_copy(r->prompt_logprob, t.prompt_logprob, n_prompt, sizeof(float));
        array_copy(r->prompt_top_ids, t.prompt_top_ids, n_prompt * r->n_top, sizeof(int32_t));
        array_copy(r->prompt_top_logprob, t.prompt_top_logprob, n_prompt * r->n_top, sizeof(float));
        array_copy(r->choice_logprob, t.choice_logprob, n_choices, sizeof(float));
        array_copy(r->choice_prob, t.choice_prob, n_choices, sizeof(float));
        buf_release(&r->text);
        r->text = t.text;
        t.text = (struct buf){0};
        r->choice = t.choice;
        r->finish = t.finish;
        r->n_prefilled = t.n_prefilled;
        r->n_generated = t.n_generated;
    }
    engine_request_release(&t);
    return rc;
}

static const char *adapter_path(const struct adapter *a, const struct recorded_adapter *adapters,
                                int n) {
    for (int i = 0; i < n; i++)
        if (strcmp(adapters[i].adapter->hash, a->hash) == 0) return adapters[i].path;
    return "";
}

/* One term of a mix. It has the adapter's path, to open the adapter, and its hash, to verify it. */
static json_t *term_json(const struct weighted_adapter *t, const struct recorded_adapter *adapters,
                         int n) {
    if (t->adapter)
        return json_pack("{s:s,s:s,s:o}", "path", adapter_path(t->adapter, adapters, n), "hash",
                         t->adapter->hash, "weight", json_from_float(t->weight));
    return json_pack("{s:{s:I,s:I},s:o}", "noise", "seed", (json_int_t)t->noise.seed, "member",
                     (json_int_t)t->noise.member, "weight", json_from_float(t->weight));
}

json_t *record_adapters_json(const struct engine_request *r,
                             const struct recorded_adapter *adapters, int n) {
    json_t *list = json_array();
    if (r->adapter)
        json_array_append_new(list,
                              json_pack("{s:s,s:s}", "path", adapter_path(r->adapter, adapters, n),
                                        "hash", r->adapter->hash));
    for (int32_t i = 0; i < r->n_mix; i++)
        json_array_append_new(list, term_json(&r->mix[i], adapters, n));
    return list;
}

/* The value may be a long list, so it is truncated. */
static void value_append(const json_t *v, struct buf *out) {
    char *text = v ? json_canonical(v) : xstrdup("nothing");
    buf_printf(out, "'%.80s'", text);
    free(text);
}

static void difference_add(const char *key, int64_t index, const json_t *before,
                           const json_t *after, struct buf *out) {
    buf_printf(out, "%s", key);
    if (index >= 0) buf_printf(out, " at %lld", (long long)index);
    buf_puts(out, ": was ");
    value_append(before, out);
    buf_puts(out, ", is ");
    value_append(after, out);
    buf_puts(out, "\n");
}

/* Only the first difference of a list is reported, because after a different token the rest usually
 * differs too. */
bool record_outputs_diff(const json_t *before, const json_t *after, struct buf *out) {
    const char *key;
    json_t *a;
    bool differ = false;
    json_object_foreach ((json_t *)(uintptr_t)before, key, a) {
        const json_t *b = json_object_get(after, key);
        if (json_equal(a, b)) continue;
        differ = true;
        if (!json_is_array(a) || !json_is_array(b)) {
            difference_add(key, -1, a, b, out);
            continue;
        }
        size_t index = 0;
        while (json_equal(json_array_get(a, index), json_array_get(b, index))) index++;
        difference_add(key, (int64_t)index, json_array_get(a, index), json_array_get(b, index),
                       out);
    }
    return differ;
}

/* Called within engine_step or engine_cancel. Stores the first error in the recorder and does not
 * stop the engine. */
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
