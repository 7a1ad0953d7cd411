/*
 * llamacpp: the API of llama.cpp's server: completions, adapters by number and scale, slots,
 * properties, and tokenization.
 *
 * A global scale is the weight of an adapter in requests that name neither a model nor adapters.
 * Requests have no fixed slots in the batch, so id_slot is read but not used, and -1 is returned.
 * Samplers that the engine does not have (dry, xtc, mirostat, a dynamic temperature) are rejected
 * if a request enables them, because the reply would be different without them.
 */
#define _GNU_SOURCE
#include "api/internal.h"
#include "serve/generation.h"

#include <stdlib.h>
#include <string.h>
#include <unistr.h>

enum { MAX_PROMPTS = 2048, MAX_ANSWERS = 128 };

/* adapters */

static void list_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    json_t *list = json_array();
    int n;
    struct adapter_entry *v = server_adapters(s, &n);
    for (int i = 0; i < n; i++)
        if (!v[i].is_base)
            json_array_append_new(list, json_pack("{s:i,s:o,s:s,s:f}", "id", v[i].id, "path",
                                                  json_from_path(v[i].path), "name", v[i].name,
                                                  "scale", v[i].scale));
    server_adapters_free(v, n);
    exchange_reply_json(x, 200, list);
}

static void scale_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    json_t *body = request_memory_json(ctx, x, &err);
    int rc = body ? server_set_scales(s, body, &err) : err.code;
    if (rc == OK)
        exchange_reply_json(x, 200, json_pack("{s:b}", "success", 1));
    else
        api_fail_error(x, &err, NULL);
    json_decref(body);
}

/* prompts */

/* Tokenizes a text, a token id, a list of both, or {prompt_string: text}. Only a text at the
 * beginning gets the BOS token. */
static int prompt_add(const struct server *s, const json_t *v, int flags, struct token_ids *out,
                      struct error *err) {
    const struct tokenizer *tok = s->model->tok;
    const json_t *item;
    size_t i;
    if (json_is_object(v)) {
        if (json_get_nonnull(v, "multimodal_data"))
            return error_set(err, ERR_USAGE,
                             "'prompt.multimodal_data' cannot be read: this model reads text only");
        v = json_get_nonnull(v, "prompt_string");
    }
    if (json_is_string(v)) {
        tokenizer_encode(tok, json_string_value(v), json_string_length(v),
                         TOKENIZER_PARSE_SPECIAL | flags, out);
        return OK;
    }
    if (json_is_integer(v) && json_integer_value(v) >= 0 &&
        json_integer_value(v) < tokenizer_vocab_size(tok)) {
        token_ids_add(out, (int32_t)json_integer_value(v));
        return OK;
    }
    if (!json_is_array(v))
        return error_set(err, ERR_USAGE,
                         "'prompt' must be a string, a token id below %d, a list of both, or a "
                         "list of such prompts",
                         tokenizer_vocab_size(tok));
    json_array_foreach (v, i, item) {
        bool is_first_text = i == 0 && json_is_string(item);
        if (json_is_array(item) || json_is_object(item))
            return error_set(err, ERR_USAGE, "'prompt' must be a list of strings and token ids");
        if (prompt_add(s, item, is_first_text ? TOKENIZER_ADD_BOS : 0, out, err) != OK)
            return err->code;
    }
    return OK;
}

/* Whether `prompt` is a list of prompts. A list that contains a token id is one prompt. */
static bool is_prompt_list(const json_t *v) {
    const json_t *item;
    size_t i;
    json_array_foreach (v, i, item)
        if (json_is_integer(item)) return false;
    return json_is_array(v);
}

static int prompts_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                        struct error *err) {
    const json_t *v = json_get_nonnull(body, "prompt");
    bool is_list = is_prompt_list(v);
    size_t n = is_list ? json_array_size(v) : 1;
    if (!v || n < 1 || n > MAX_PROMPTS)
        return error_set(err, ERR_USAGE, "'prompt' must be a prompt or 1 to %d of them",
                         MAX_PROMPTS);
    spec->prompts = xcalloc(n, sizeof *spec->prompts);
    for (size_t i = 0; i < n; i++) {
        struct token_ids *out = &spec->prompts[spec->n_prompts++];
        out->may_fail = true;
        if (prompt_add(s, is_list ? json_array_get(v, i) : v, TOKENIZER_ADD_BOS, out, err) != OK ||
            token_ids_check_memory(out, err) != OK)
            return err->code;
        if (out->n == 0) return error_set(err, ERR_USAGE, "'prompt[%zu]' is empty", i);
    }
    if (json_is_string(v)) spec->request_json = json_pack("{s:O}", "prompt", v);
    return OK;
}

/* settings */

/* Adds a pair [id or text, bias or false] to `out`, an object {id: bias} as in OpenAI's API. */
static int logit_bias_add(const struct server *s, const json_t *pair, json_t *out,
                          struct error *err) {
    json_t *token = json_array_get(pair, 0), *bias = json_array_get(pair, 1);
    struct token_ids ids = {0};
    char key[24];
    if (json_is_integer(token)) {
        snprintf(key, sizeof key, "%lld", (long long)json_integer_value(token));
        json_object_set(out, key, bias);
    } else if (json_is_string(token)) {
        tokenizer_encode(s->model->tok, json_string_value(token), json_string_length(token), 0,
                         &ids);
    }
    for (int i = 0; i < ids.n; i++) {
        snprintf(key, sizeof key, "%d", ids.v[i]);
        json_object_set(out, key, bias);
    }
    token_ids_release(&ids);
    if (bias && (json_is_integer(token) || json_is_string(token))) return OK;
    return error_set(err, ERR_USAGE, "'logit_bias' must be a list of [token id or text, bias]");
}

static int logit_bias_from_list(const struct server *s, const json_t *body,
                                struct generation_spec *spec, struct error *err) {
    const json_t *list = json_get_nonnull(body, "logit_bias"), *pair;
    json_t *fields = json_object(), *o = json_object(), *bias;
    const char *key;
    int rc = OK;
    size_t i;
    if (json_is_array(list)) {
        json_array_foreach (list, i, pair)
            if (rc == OK) rc = logit_bias_add(s, pair, o, err);
    } else if (list && json_object_update(o, (json_t *)(uintptr_t)list) != 0) {
        rc = error_set(err, ERR_USAGE, "'logit_bias' must be a list or an object");
    }
    json_object_foreach (o, key, bias)
        if (json_is_false(bias)) json_object_set_new(o, key, json_integer(-100));
    if (list) json_object_set(fields, "logit_bias", o);
    if (rc == OK) rc = logit_bias_read(s, fields, spec, err);
    json_decref(o);
    json_decref(fields);
    return rc;
}

static int grammar_read(struct server *s, const json_t *body, struct generation_spec *spec,
                        struct error *err) {
    const json_t *schema = json_get_nonnull(body, "json_schema"),
                 *grammar = json_get_nonnull(body, "grammar");
    if (json_is_string(grammar) && json_string_length(grammar) == 0) grammar = NULL;
    if (schema && grammar)
        return error_set(err, ERR_USAGE,
                         "Either \"json_schema\" or \"grammar\" can be specified, but not both");
    if (schema) return generation_set_grammar(s, spec, "json_schema", schema, err);
    if (grammar && !json_is_string(grammar))
        return error_set(err, ERR_USAGE, "'grammar' must be a text in GBNF");
    return grammar ? generation_set_grammar(s, spec, "gbnf", grammar, err) : OK;
}

int llamacpp_samplers_reject(const json_t *o, struct error *err) {
    static const char *const others[] = {"dry_multiplier", "xtc_probability", "mirostat",
                                         "dynatemp_range", "post_sampling_probs"};
    for (size_t i = 0; i < ARRAY_LEN(others); i++) {
        const json_t *v = json_get_nonnull(o, others[i]);
        if (v && !json_is_false(v) && !(json_is_number(v) && json_number_value(v) == 0))
            return error_set(err, ERR_USAGE, "'%s' is not supported; leave it out", others[i]);
    }
    return OK;
}

int llamacpp_sampling_read(const json_t *o, const struct llamacpp_sampling *defaults,
                           struct sampling_params *out, struct error *err) {
    double temperature = 0.8, top_p = defaults->top_p, min_p = defaults->min_p, typical_p = 1,
           repeat = 1, presence = 0, frequency = 0;
    int64_t top_k = 40, last_n = 64, seed = -1;
    if (json_read_number(o, "temperature", defaults->min_temperature, 100, &temperature, err) !=
            OK ||
        json_read_number(o, "top_p", 0, 1, &top_p, err) != OK ||
        json_read_number(o, "min_p", 0, 1, &min_p, err) != OK ||
        json_read_number(o, "typical_p", 0, 1, &typical_p, err) != OK ||
        json_read_number(o, "repeat_penalty", 1e-3, 100, &repeat, err) != OK ||
        json_read_number(o, "presence_penalty", -100, 100, &presence, err) != OK ||
        json_read_number(o, "frequency_penalty", -100, 100, &frequency, err) != OK ||
        json_read_int(o, "top_k", -1, 1 << 30, &top_k, err) != OK ||
        json_read_int(o, "repeat_last_n", -1, INT32_MAX, &last_n, err) != OK ||
        json_read_int(o, "seed", defaults->min_seed, INT64_MAX, &seed, err) != OK)
        return err->code;
    *out = (struct sampling_params){.temperature = temperature > 0 ? (float)temperature : 0,
                                    .top_k = (int32_t)MAX(top_k, 0),
                                    .top_p = top_p > 0 ? (float)top_p : 1e-6f,
                                    .min_p = (float)min_p,
                                    .typical_p = (float)typical_p,
                                    .seed = seed >= 0 ? (uint64_t)seed : random_seed()};
    sampling_set_penalties(out, repeat, presence, frequency, last_n);
    return OK;
}

static int sampling_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                         struct error *err) {
    static const struct llamacpp_sampling defaults = {
        .min_temperature = -100, .top_p = 0.95, .min_p = 0.05, .min_seed = -1};
    if (llamacpp_sampling_read(body, &defaults, &spec->sampling, err) != OK) return err->code;
    if (logit_bias_from_list(s, body, spec, err) != OK) return err->code;
    return stop_conditions_read(s, body, spec, err);
}

/* Reads the limits of a reply, and which fields the reply contains. Sets spec->extra to {tokens:
 * whether to return token ids, lora: as in the request}. */
static int limits_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                       struct error *err) {
    int64_t predict = s->options->max_tokens, n = 1, probs = 0, slot = -1;
    bool tokens = false, cache = true;
    if (json_read_int(body, "n_predict", -2, INT32_MAX, &predict, err) != OK ||
        json_read_int(body, "n_cmpl", 1, MAX_ANSWERS, &n, err) != OK ||
        json_read_int(body, "n_probs", 0, ENGINE_TOP_MAX, &probs, err) != OK ||
        json_read_int(body, "id_slot", -1, engine_max_seqs(s->engine) - 1, &slot, err) != OK ||
        json_read_bool(body, "stream", &spec->stream, err) != OK ||
        json_read_bool(body, "cache_prompt", &cache, err) != OK ||
        json_read_bool(body, "return_tokens", &tokens, err) != OK ||
        context_shift_read(s, body, "context_shift", body, "n_keep", spec, err) != OK)
        return err->code;
    if (predict == -2) spec->context_shift = false; // until the context is full
    spec->n = (int)n;
    spec->max_tokens = predict < 0 ? INT32_MAX : (int32_t)predict;
    spec->n_top = (int)probs;
    spec->logprobs = probs > 0;
    spec->extra = json_pack("{s:b,s:O*}", "tokens", tokens || spec->stream, "lora",
                            json_get_nonnull(body, "lora"));
    return OK;
}

static int body_read(struct server *s, const json_t *body, struct model_ref *t,
                     struct generation_spec *spec, struct error *err) {
    int rc = model_ref_read(s, body, t, err);
    if (rc == OK) rc = llamacpp_samplers_reject(body, err);
    if (rc == OK) rc = sampling_read(s, body, spec, err);
    if (rc == OK) rc = limits_read(s, body, spec, err);
    if (rc == OK) rc = grammar_read(s, body, spec, err);
    return rc == OK ? prompts_read(s, body, spec, err) : rc;
}

/* The effective settings of a request, with the field names of llama.cpp. */
static json_t *settings_json(const struct server *s, const struct generation_spec *spec) {
    const struct sampling_params *p = &spec->sampling;
    json_t *stops = json_array(), *lora = json_object_get(spec->extra, "lora");
    bool eos = false;
    for (int i = 0; i < spec->stop_texts.n; i++)
        json_array_append_new(stops, json_string(spec->stop_texts.v[i]));
    for (int i = 0; i < spec->n_stop_ids; i++)
        eos |= spec->stop_ids[i] == tokenizer_eos(s->model->tok);
    int predict = spec->max_tokens == INT32_MAX ? -1 : spec->max_tokens;
    json_t *v = json_pack("{s:i,s:i,s:i,s:i,s:I,s:f,s:i,s:f,s:f,s:f,s:f,s:f,s:f,s:i}", "n_ctx",
                          engine_max_len(s->engine), "n_predict", predict, "max_tokens", predict,
                          "n_keep", spec->n_keep, "seed", (json_int_t)p->seed, "temperature",
                          (double)p->temperature, "top_k", p->top_k, "top_p", (double)p->top_p,
                          "min_p", (double)p->min_p, "typical_p", (double)p->typical_p,
                          "repeat_penalty", (double)p->repetition_penalty, "presence_penalty",
                          (double)p->presence_penalty, "frequency_penalty",
                          (double)p->frequency_penalty, "repeat_last_n", p->penalty_last_n);
    json_t *more =
        json_pack("{s:o,s:b,s:b,s:i,s:[s,s,s,s,s,s],s:o}", "stop", stops, "ignore_eos", !eos,
                  "stream", spec->stream, "n_probs", spec->logprobs ? spec->n_top : 0, "samplers",
                  "penalties", "temperature", "top_k", "typ_p", "top_p", "min_p", "lora",
                  lora ? json_incref(lora) : json_array());
    json_object_update(v, more);
    json_decref(more);
    return v;
}

/* replies */

/* The log-probabilities of a token in OpenAI's form, with token ids. */
static json_t *token_probs_json(const struct generation *g, const struct completion *a, int32_t i) {
    const struct engine_request *r = &a->batch_request.request;
    json_t *v = token_logprobs(g, a, i), *tops = json_object_get(v, "top_logprobs");
    json_object_set_new(v, "id", json_integer(r->out[i]));
    for (int k = 0; k < g->spec.n_top; k++)
        json_object_set_new(json_array_get(tops, (size_t)k), "id",
                            json_integer(r->top_ids[i * r->n_top + k]));
    return v;
}

static void probs_write(const struct generation *g, const struct lazy_list *l, struct buf *out) {
    const struct completion *a = &g->completions[l->index];
    buf_puts(out, "[");
    for (int32_t i = l->from; i < l->to; i++)
        if (!lazy_list_add(g, l, token_probs_json(g, a, i), out)) return;
    buf_puts(out, "]");
}

static json_t *probs_json(const struct generation *g, const struct completion *a, int32_t from,
                          int32_t to) {
    const struct lazy_list l = {.index = a->index, .from = from, .to = to};
    return lazy_list_placeholder(g, &l);
}

static json_t *tokens_json(const struct generation *g, const struct completion *a, int32_t from,
                           int32_t to) {
    json_t *list = json_array();
    if (json_is_true(json_object_get(g->spec.extra, "tokens")))
        for (int32_t i = from; i < to; i++)
            json_array_append_new(list, json_integer(a->batch_request.request.out[i]));
    return list;
}

/* The fields of every chunk and of the whole reply. */
static json_t *chunk_json(const struct generation *g, const struct completion *a, json_t *content,
                          int32_t from, int32_t to, bool stop) {
    struct token_usage u = completion_usage(a);
    json_t *v =
        json_pack("{s:i,s:o,s:o,s:b,s:i,s:i,s:i}", "index", a->index, "content", content, "tokens",
                  tokens_json(g, a, from, to), "stop", stop, "id_slot", -1, "tokens_predicted",
                  stop ? (int)u.completion : to, "tokens_evaluated", (int)u.prompt);
    if (g->spec.logprobs && from < to)
        json_object_set_new(v, "completion_probabilities", probs_json(g, a, from, to));
    return v;
}

static double ratio(double a, double b) {
    return b > 0 ? a / b : 0;
}

static json_t *timings_json(const struct completion *a) {
    const struct batcher_request *c = &a->batch_request;
    int cached = c->request.n_cached, n_prefilled = c->request.n_prompt - cached,
        n_generated = c->request.n_generated;
    double first = c->first > 0 ? c->first : c->ended;
    double prompt_ms = c->started > 0 ? (first - c->started) * 1e3 : 0,
           decode_ms = (c->ended - first) * 1e3;
    return json_pack(
        "{s:i,s:i,s:f,s:f,s:f,s:i,s:f,s:f,s:f}", "cache_n", cached, "prompt_n", n_prefilled,
        "prompt_ms", prompt_ms, "prompt_per_token_ms", ratio(prompt_ms, n_prefilled),
        "prompt_per_second", ratio(n_prefilled * 1e3, prompt_ms), "predicted_n", n_generated,
        "predicted_ms", decode_ms, "predicted_per_token_ms", ratio(decode_ms, n_generated),
        "predicted_per_second", ratio(n_generated * 1e3, decode_ms));
}

/* The stop text that ended the reply, or NULL. */
static const char *stopping_word(const struct generation *g, const struct completion *a) {
    for (int i = 0; i < g->spec.stop_texts.n; i++) {
        const char *stop = g->spec.stop_texts.v[i];
        if (strncmp(a->text.data + a->shown, stop, strlen(stop)) == 0) return stop;
    }
    return NULL;
}

static void final_fields_add(const struct generation *g, const struct completion *a, json_t *v) {
    const struct engine_request *r = &a->batch_request.request;
    const struct token_ids *prompt = &g->spec.prompts[a->prompt];
    const char *word = a->shown < a->text.len ? stopping_word(g, a) : NULL;
    const char *stop_type = completion_was_cut(a)      ? "limit"
                            : r->finish == FINISH_NONE ? "none"
                                                       : "eos";
    bool context_full =
        r->n_dropped || (r->finish == FINISH_LENGTH && r->n_generated < g->spec.max_tokens);
    struct buf text = {0};
    tokenizer_decode(g->s->model->tok, prompt->v, prompt->n, true, &text);
    json_t *more = json_pack(
        "{s:s,s:o,s:o,s:b,s:b,s:s,s:s,s:i,s:o}", "model", g->target.name, "generation_settings",
        settings_json(g->s, &g->spec), "prompt", json_string_lossy(text.data, text.len),
        "has_new_line", a->shown > 0 && memchr(a->text.data, '\n', a->shown) != NULL, "truncated",
        context_full, "stop_type", word ? "word" : stop_type, "stopping_word", word ? word : "",
        "tokens_cached", r->n_cached, "timings", timings_json(a));
    json_object_update(v, more);
    router_report_add(g, v);
    json_decref(more);
    buf_release(&text);
}

static void completion_delta(const struct generation *g, struct completion *a, struct buf *out) {
    if (a->content_end == a->sent) return;
    json_t *content = json_string_lossy(a->text.data + a->sent, a->content_end - a->sent);
    a->sent = a->content_end;
    int32_t from = a->tokens_sent;
    a->tokens_sent = completion_tokens_sent(a);
    sse_add(g, chunk_json(g, a, content, from, a->tokens_sent, false), out);
}

static void completion_finish(const struct generation *g, struct completion *a, struct buf *out) {
    json_t *v = chunk_json(g, a, json_string(""), a->tokens_sent, completion_tokens_sent(a), true);
    final_fields_add(g, a, v);
    sse_add(g, v, out);
}

static void completion_end(const struct generation *g, struct buf *out) {
    (void)g, (void)out;
}

/* One object, or a list if there are several completions. */
static json_t *completion_whole(const struct generation *g) {
    json_t *list = json_array();
    for (int i = 0; i < g->n_completions; i++) {
        const struct completion *a = &g->completions[i];
        json_t *v = chunk_json(g, a, json_string_lossy(a->text.data, a->content_end), 0,
                               completion_tokens_kept(a), true);
        final_fields_add(g, a, v);
        json_array_append_new(list, v);
    }
    if (g->n_completions > 1) return list;
    json_t *one = json_incref(json_array_get(list, 0));
    json_decref(list);
    return one;
}

static const struct api_dialect completion_dialect = {.stream_type = "text/event-stream",
                                                      .keepalive = ": waiting\n\n",
                                                      .write_list = probs_write,
                                                      .delta = completion_delta,
                                                      .finish = completion_finish,
                                                      .end = completion_end,
                                                      .write_reply = completion_whole};

static void completion_handle(void *ctx, struct exchange *x) {
    generation_handle(ctx, x, &completion_dialect, "llamacpp-", body_read);
}

/* slots and properties */

static json_t *slot_json(const struct server *s, int id, bool busy) {
    return json_pack("{s:i,s:i,s:i,s:b,s:b}", "id", id, "id_task", -1, "n_ctx",
                     engine_max_len(s->engine), "speculative", 0, "is_processing", busy);
}

/* The slot of a running request. The server's lock must be held, so that g stays valid. */
static json_t *busy_slot_json(const struct generation *g, const struct completion *a, int id) {
    const struct engine_request *r = &a->batch_request.request;
    int n_decoded = __atomic_load_n(&a->batch_request.n_visible, __ATOMIC_ACQUIRE);
    json_t *v = slot_json(g->s, id, true);
    json_object_set_new(v, "id_task", json_integer(id));
    json_object_set_new(v, "params",
                        json_pack("{s:f,s:I,s:i,s:b,s:s}", "temperature",
                                  (double)r->sampling.temperature, "seed",
                                  (json_int_t)r->sampling.seed, "n_predict", r->max_tokens,
                                  "stream", g->spec.stream, "model", g->target.name));
    json_object_set_new(v, "next_token",
                        json_pack("{s:b,s:i,s:i}", "has_next_token", 1, "n_remain",
                                  r->max_tokens - n_decoded, "n_decoded", n_decoded));
    return v;
}

static json_t *slots_json(struct server *s) {
    json_t *list = json_array();
    int n = 0, n_slots = engine_max_seqs(s->engine);
    pthread_mutex_lock(&s->lock);
    for (const struct generation *g = s->generations; g; g = g->next)
        for (int i = 0; i < g->n_completions && n < n_slots; i++) {
            const struct completion *a = &g->completions[i];
            if (a->async || __atomic_load_n(&a->batch_request.n_visible, __ATOMIC_ACQUIRE) == 0 ||
                __atomic_load_n(&a->batch_request.done, __ATOMIC_ACQUIRE))
                continue;
            json_array_append_new(list, busy_slot_json(g, a, n++));
        }
    pthread_mutex_unlock(&s->lock);
    for (; n < n_slots; n++) json_array_append_new(list, slot_json(s, n, false));
    return list;
}

static void slots_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const char *fail = exchange_query(x, "fail_on_no_slot");
    json_t *list = slots_json(s), *last = json_array_get(list, json_array_size(list) - 1);
    if (fail && *fail && json_is_true(json_object_get(last, "is_processing")))
        api_fail(x, 503, "unavailable_error", NULL, NULL, "no slot available");
    else
        exchange_reply_json(x, 200, json_incref(list));
    json_decref(list);
}

/* The settings of a request without fields. */
static json_t *default_settings(struct server *s) {
    struct generation_spec spec = {0};
    struct error err;
    json_t *nothing = json_object(), *settings = slot_json(s, 0, false);
    CHECK(sampling_read(s, nothing, &spec, &err) == OK &&
          limits_read(s, nothing, &spec, &err) == OK);
    json_t *params = settings_json(s, &spec);
    json_object_set_new(params, "seed", json_integer(-1));
    json_object_set_new(params, "repeat_last_n", json_integer(64));
    json_object_set_new(settings, "params", params);
    generation_spec_release(&spec);
    json_decref(nothing);
    return settings;
}

static json_t *special_token_json(const struct server *s, int32_t id) {
    return json_string(id < 0 ? "" : tokenizer_id_to_piece(s->model->tok, id, NULL));
}

static void props_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const struct tokenizer *t = s->model->tok;
    json_t *path = json_from_path(s->path);
    exchange_reply_json(
        x, 200,
        json_pack("{s:o,s:i,s:s,s:o,s:s,s:o,s:o,s:{s:b,s:b},s:s,s:b}",
                  "default_generation_settings", default_settings(s), "total_slots",
                  engine_max_seqs(s->engine), "model_alias", s->name, "model_path", path,
                  "chat_template",
                  s->model->chat_template ? s->model->chat_template : chatml_template, "bos_token",
                  special_token_json(s, tokenizer_bos(t)), "eos_token",
                  special_token_json(s, tokenizer_eos(t)), "modalities", "vision", 0, "audio", 0,
                  "build_info", "shoal " SHOAL_VERSION, "is_sleeping", 0));
}

/* tokens */

/* A token as text, or as bytes if they are not valid UTF-8. */
static json_t *piece_json(const struct server *s, int32_t id) {
    struct buf b = {0};
    tokenizer_decode_token(s->model->tok, id, true, &b);
    json_t *v = json_array();
    if (b.len == 0 || !u8_check((const uint8_t *)b.data, b.len)) {
        json_decref(v);
        v = json_stringn(b.data ? b.data : "", b.len);
    }
    for (size_t i = 0; json_is_array(v) && i < b.len; i++)
        json_array_append_new(v, json_integer((uint8_t)b.data[i]));
    buf_release(&b);
    return v;
}

void llamacpp_tokenize(struct server *s, struct exchange *x, const json_t *body) {
    struct token_ids ids = {.may_fail = true};
    struct error err;
    const char *text = "";
    bool add = false, parse = true, pieces = false;
    if (json_read_string(body, "content", &text, &err) != OK ||
        json_read_bool(body, "add_special", &add, &err) != OK ||
        json_read_bool(body, "parse_special", &parse, &err) != OK ||
        json_read_bool(body, "with_pieces", &pieces, &err) != OK) {
        api_fail_error(x, &err, NULL);
        return;
    }
    tokenizer_encode(s->model->tok, text, strlen(text),
                     (add ? TOKENIZER_ADD_BOS : 0) | (parse ? TOKENIZER_PARSE_SPECIAL : 0), &ids);
    if (token_ids_check_memory(&ids, &err) != OK ||
        request_memory_reserve_list(s, x, ids.n,
                                    pieces ? JSON_TOKEN_TEXT_BYTES : JSON_INTEGER_BYTES, "content",
                                    &err) != OK) {
        api_fail_error(x, &err, NULL);
        token_ids_release(&ids);
        return;
    }
    json_t *list = json_array();
    for (int i = 0; i < ids.n; i++)
        json_array_append_new(
            list, pieces ? json_pack("{s:i,s:o}", "id", ids.v[i], "piece", piece_json(s, ids.v[i]))
                         : json_integer(ids.v[i]));
    exchange_reply_json(x, 200, json_pack("{s:o}", "tokens", list));
    token_ids_release(&ids);
}

static const struct http_route routes[] = {
    {"GET", "/lora-adapters", SCOPE_CHAT, list_handle},
    {"POST", "/lora-adapters", SCOPE_ADMIN, scale_handle},
    {"POST", "/completion", SCOPE_CHAT | ROUTE_BASE, completion_handle},
    {"POST", "/completions", SCOPE_CHAT | ROUTE_BASE, completion_handle},
    {"GET", "/slots", SCOPE_CHAT | ROUTE_BASE, slots_handle},
    {"GET", "/props", SCOPE_CHAT | ROUTE_BASE, props_handle},
    {0},
};

const struct server_module llamacpp_module = {.routes = routes};
