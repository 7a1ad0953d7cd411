/*
 * ollama: Ollama's API for text, chats, embeddings and the list of models. The base model and every
 * adapter is a model NAME:latest. ollama_models.c creates models that are derived from them.
 *
 * Requests are read into a generation_spec, as those of OpenAI's API. The dialects of this file
 * write the replies: NDJSON unless "stream" is false, arguments of tools as objects, durations in
 * nanoseconds. api_fail writes errors in Ollama's form for these paths.
 *
 * One default differs from Ollama's: repeat_penalty is 1 (off), so that replies are unmodified
 * samples of the model. The default base is never unloaded: keep_alive has no effect on it, but a
 * request without a prompt and with keep_alive 0 is answered as if it had been unloaded. num_ctx
 * bounds the tokens of a prompt and its reply; messages that do not fit are left out, the oldest
 * first, unless truncate is false. `shift` has the server's default (--context-shift), and not
 * true.
 */
#define _GNU_SOURCE
#include "api/ollama.h"
#include "api/go_template.h"
#include "api/internal.h"
#include "serve/auto_model.h"

#include <ctype.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_INPUTS = 2048 };

/* shared by all requests */

/* Formats a time as Ollama does. */
static char *time_format(int64_t seconds, long nanoseconds, char out[40]) {
    time_t t = (time_t)seconds;
    struct tm tm;
    gmtime_r(&t, &tm);
    size_t n = strftime(out, 40, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(out + n, 40 - n, ".%09ldZ", nanoseconds);
    return out;
}

static json_t *current_time_json(void) {
    struct timespec now;
    char text[40];
    clock_gettime(CLOCK_REALTIME, &now);
    return json_string(time_format(now.tv_sec, now.tv_nsec, text));
}

int ollama_name(const json_t *body, const char **name, struct error *err) {
    *name = "";
    if (json_read_name(body, "name", name, err) != OK ||
        json_read_name(body, "model", name, err) != OK)
        return err->code;
    return **name ? OK : error_set(err, ERR_USAGE, "'model' must name a model");
}

int ollama_target(struct server *s, const char *name, struct model_ref *t, struct error *err) {
    if (model_ref_resolve(s, name, t, err) == OK) return OK;
    if (err->code == ERR_MISSING) error_set(err, ERR_MISSING, "model '%s' not found", name);
    return err->code;
}

char *ollama_template_to_jinja(const struct server *s, const char *template, struct error *err) {
    struct buf b = {0};
    if (go_template_jinja(template, tokenizer_add_bos(s->model->tok), &b, err) == OK) return b.data;
    buf_release(&b);
    return NULL;
}

/* Parses keep_alive. *seconds: as of base_set_keep_alive, or NAN if the field is absent. */
static int keep_alive_read(const json_t *v, double *seconds, struct error *err) {
    double number = json_number_value(v);
    *seconds = json_is_number(v) ? (number < 0 ? -1 : number) : (double)NAN;
    if (!v || json_is_null(v) || json_is_number(v)) return OK;
    if (json_is_string(v) && keep_alive_parse(json_string_value(v), seconds)) return OK;
    return error_set(err, ERR_USAGE, "'keep_alive' must be seconds or a duration such as \"5m\"");
}

/* Reads how long the base remains loaded after this request. *unload: not at all. */
static int keep_alive_apply(struct server *s, const json_t *body, bool *unload, struct error *err) {
    double seconds;
    if (keep_alive_read(json_object_get(body, "keep_alive"), &seconds, err) != OK) return err->code;
    *unload = seconds == 0; // NAN: false
    if (!isnan(seconds)) base_set_keep_alive(s, seconds);
    return OK;
}

/* Ollama, too, bounds num_ctx by the model's context with a message in its log. */
static void num_ctx_note(const struct server *s, int64_t num_ctx) {
    static atomic_flag noted = ATOMIC_FLAG_INIT;
    if (!s->engine || num_ctx <= engine_max_len(s->engine) || atomic_flag_test_and_set(&noted))
        return;
    log_warn("a request has num_ctx %lld, and the context of '%s' is %d tokens: its contexts have "
             "at most these; --max-model-len changes it",
             (long long)num_ctx, s->name, engine_max_len(s->engine));
}

int ollama_options_read(const struct server *s, const json_t *body, const json_t *o,
                        struct generation_spec *spec, struct error *err) {
    static const struct llamacpp_sampling defaults = {
        .min_temperature = 0, .top_p = 0.9, .min_p = 0, .min_seed = INT64_MIN};
    int64_t predict = s->options->max_tokens, ctx = 0;
    if (llamacpp_sampling_read(o, &defaults, &spec->sampling, err) != OK ||
        json_read_int(o, "num_ctx", 0, INT32_MAX, &ctx, err) != OK ||
        json_read_int(o, "num_predict", -2, INT32_MAX, &predict, err) != OK ||
        context_shift_read(s, body, "shift", o, "num_keep", spec, err) != OK)
        return err->code;
    spec->n = 1;
    spec->context = (int32_t)ctx;
    num_ctx_note(s, ctx);
    spec->max_tokens = predict > 0 ? (int32_t)predict : INT32_MAX; // limited by the context only
    if (predict == -2) spec->context_shift = false;                // until the context is full
    return stop_conditions_read(s, o, spec, err);
}

/* Reads `format`: "json" or a JSON schema. */
static int format_read(struct server *s, const json_t *body, struct generation_spec *spec,
                       struct error *err) {
    const json_t *f = json_get_nonnull(body, "format");
    const char *text = json_string_value(f);
    if (!f || (text && !*text)) return OK;
    if (json_is_object(f)) return generation_set_grammar(s, spec, "json_schema", f, err);
    if (!text || strcmp(text, "json") != 0)
        return error_set(err, ERR_USAGE, "'format' must be \"json\" or a JSON schema");
    spec->grammar = server_grammar(s, "json_object", "", 0, err);
    return spec->grammar ? OK : err->code;
}

static int logprobs_read(const json_t *body, struct generation_spec *spec, struct error *err) {
    int64_t top = 0;
    if (json_read_bool(body, "logprobs", &spec->logprobs, err) != OK ||
        json_read_int(body, "top_logprobs", 0, ENGINE_TOP_MAX, &top, err) != OK)
        return err->code;
    spec->n_top = spec->logprobs ? (int)top : 0;
    return OK;
}

static int images_reject(const json_t *v, struct error *err) {
    const json_t *images = json_get_nonnull(v, "images");
    if (!images || (json_is_array(images) && json_array_size(images) == 0)) return OK;
    return error_set(err, ERR_USAGE, "'images' cannot be read: this model reads text only");
}

/* A request for a completion or chat, while it is being read. */
struct ollama_request {
    json_t *body, *derived, *options;
    struct model_ref target;
    struct generation_spec spec;
    const json_t *think; /* true, false or a level; NULL: the template's default */
    bool unload;         /* keep_alive is 0 */
};

static void ollama_request_release(struct ollama_request *q) {
    json_decref(q->body);
    json_decref(q->derived);
    json_decref(q->options);
}

static int think_read(const struct server *s, const char *model, struct ollama_request *q,
                      struct error *err) {
    static const char *const levels[] = {"low", "medium", "high"};
    const char *level = json_string_value(json_get_nonnull(q->body, "think"));
    q->think = json_get_nonnull(q->body, "think");
    bool known = !q->think || json_is_boolean(q->think);
    for (size_t i = 0; level && i < ARRAY_LEN(levels); i++) known |= strcmp(level, levels[i]) == 0;
    if (!known)
        return error_set(err, ERR_USAGE, "'think' must be true, false, low, medium or high");
    if (!q->think || json_is_false(q->think) || s->reasoning_form) return OK;
    return error_set(err, ERR_USAGE, "'%s' does not support thinking", model);
}

/* Merges the request's options with the model's; the request's take precedence. */
static int options_read(struct server *s, struct ollama_request *q, struct error *err) {
    const json_t *request_options = json_get_nonnull(q->body, "options");
    if (request_options && !json_is_object(request_options))
        return error_set(err, ERR_USAGE, "'options' must be an object");
    if (llamacpp_samplers_reject(request_options, err) != OK) return error_wrap(err, "'options'");
    q->options = request_options ? json_copy((json_t *)(uintptr_t)request_options) : json_object();
    json_object_update_missing(q->options, json_object_get(q->derived, "parameters"));
    return ollama_options_read(s, q->body, q->options, &q->spec, err);
}

static int ollama_request_read(struct server *s, struct exchange *x, struct ollama_request *q,
                               struct error *err) {
    const char *name;
    *q = (struct ollama_request){.spec.stream = true, .spec.reasoning = true, .spec.x = x};
    q->body = request_memory_json(s, x, err);
    if (!q->body || ollama_name(q->body, &name, err) != OK) return err->code;
    int rc = auto_model_is(s, name) ? auto_model_ref(s, &q->target, err)
                                    : ollama_target(s, name, &q->target, err);
    if (rc != OK) return rc;
    /* `user` is not a field of Ollama's API; A/B tests assign each user to an adapter. */
    const char *user = NULL;
    if (json_read_name(q->body, "user", &user, err) != OK) return err->code;
    if (user) q->spec.user = xstrdup(user);
    q->derived = server_derived_spec(s, q->target.label);
    if (keep_alive_apply(s, q->body, &q->unload, err) != OK || options_read(s, q, err) != OK ||
        json_read_bool(q->body, "stream", &q->spec.stream, err) != OK ||
        think_read(s, name, q, err) != OK || logprobs_read(q->body, &q->spec, err) != OK)
        return err->code;
    return format_read(s, q->body, &q->spec, err);
}

/* replies */

static json_int_t nanoseconds(double from, double to) {
    return from > 0 && to > from ? (json_int_t)((to - from) * 1e9) : 0;
}

static json_t *reply_json(const struct generation *g) {
    return json_pack("{s:s,s:o}", "model", g->target.name, "created_at", current_time_json());
}

/* Adds the fields of the last object, except the text. load_duration is the time in the queue. */
static void final_fields_add(const struct generation *g, const struct completion *a, json_t *v) {
    const struct batcher_request *c = &a->batch_request;
    struct token_usage u = completion_usage(a);
    bool stopped = a->async ? !a->async->truncated
                            : !completion_was_cut(a) && c->request.finish != FINISH_NONE;
    double first = c->first > 0 ? c->first : c->ended;
    json_object_set_new(v, "done", json_true());
    json_object_set_new(v, "done_reason", json_string(stopped ? "stop" : "length"));
    json_object_set_new(v, "total_duration", json_integer(nanoseconds(g->started_at, c->ended)));
    json_object_set_new(v, "load_duration", json_integer(nanoseconds(c->submitted, c->started)));
    json_object_set_new(v, "prompt_eval_count", json_integer(u.prompt));
    json_object_set_new(v, "prompt_eval_duration", json_integer(nanoseconds(c->started, first)));
    json_object_set_new(v, "eval_count", json_integer(u.completion));
    json_object_set_new(v, "eval_duration", json_integer(nanoseconds(first, c->ended)));
    router_report_add(g, v);
}

/* Adds the log-probabilities of the tokens from … to - 1. */
static void logprobs_add(const struct generation *g, const struct completion *a, int32_t from,
                         int32_t to, json_t *v) {
    const struct lazy_list l = {.index = a->index, .from = from, .to = to};
    if (g->spec.logprobs) json_object_set_new(v, "logprobs", lazy_list_placeholder(g, &l));
}

static void stream_end(const struct generation *g, struct buf *out) {
    (void)g, (void)out;
}

/* Whether there is text that was not sent yet. */
static bool has_more_text(const struct completion *a) {
    return a->content_end > a->sent || a->reasoning.len > a->reasoning_sent;
}

/* Returns the content that was not sent yet and marks it as sent; adds the log-probabilities of it
 * and of the reasoning before it to v. */
static json_t *content_take(const struct generation *g, struct completion *a, json_t *v) {
    size_t n = a->content_end > a->sent ? a->content_end - a->sent : 0;
    json_t *content = json_string_lossy(a->text.data + a->sent, n);
    a->sent += n;
    int32_t to = completion_tokens_sent(a);
    logprobs_add(g, a, a->tokens_sent, to, v);
    a->tokens_sent = to;
    return content;
}

/* Adds the reasoning after the byte `from`, if there is any. */
static void thinking_add(const struct completion *a, size_t from, json_t *v) {
    if (a->reasoning.len > from)
        json_object_set_new(v, "thinking",
                            json_string_lossy(a->reasoning.data + from, a->reasoning.len - from));
}

/* text */

/* Adds the tokens of the prompt and the reply, for a request that continues them; with the
 * end-of-turn token if it was generated. */
static void context_add(const struct generation *g, const struct completion *a, json_t *v) {
    const struct engine_request *r = &a->batch_request.request;
    if (!json_is_true(g->spec.extra)) return;
    json_t *context = json_array();
    for (int32_t i = 0; i < r->n_prompt + r->n_out; i++) {
        bool dropped = i >= r->n_keep && i < r->n_keep + r->n_dropped;
        int32_t id = i < r->n_prompt ? r->prompt[i] : r->out[i - r->n_prompt];
        if (!dropped) json_array_append_new(context, json_integer(id));
    }
    if (r->n_generated > r->n_out)
        json_array_append_new(context, json_integer(tokenizer_eot(g->s->model->tok)));
    json_object_set_new(v, "context", context);
}

static void generate_delta(const struct generation *g, struct completion *a, struct buf *out) {
    if (!has_more_text(a)) return;
    json_t *v = reply_json(g);
    json_object_set_new(v, "response", content_take(g, a, v));
    thinking_add(a, a->reasoning_sent, v);
    a->reasoning_sent = a->reasoning.len;
    json_object_set_new(v, "done", json_false());
    ndjson_add(g, v, out);
}

static void generate_finish(const struct generation *g, struct completion *a, struct buf *out) {
    json_t *v = reply_json(g);
    json_object_set_new(v, "response", json_string(""));
    final_fields_add(g, a, v);
    context_add(g, a, v);
    ndjson_add(g, v, out);
}

static json_t *generate_whole(const struct generation *g) {
    const struct completion *a = &g->completions[0];
    json_t *v = reply_json(g);
    json_object_set_new(v, "response", completion_content_json(a));
    thinking_add(a, 0, v);
    logprobs_add(g, a, 0, completion_tokens_kept(a), v);
    final_fields_add(g, a, v);
    context_add(g, a, v);
    return v;
}

static const struct api_dialect generate_dialect = {.stream_type = "application/x-ndjson",
                                                    .write_list = token_logprobs_write,
                                                    .delta = generate_delta,
                                                    .finish = generate_finish,
                                                    .end = stream_end,
                                                    .write_reply = generate_whole};

/* chats */

/* Returns the complete tool calls and marks them as sent; without those that were sent before,
 * unless `include_sent`. */
static json_t *tool_calls_take(const struct completion *a, bool include_sent) {
    json_t *calls = json_array();
    for (int i = 0; i < a->n_tool_calls; i++) {
        struct tool_call *c = &a->tool_calls[i];
        if (!c->name || (c->start_sent && !include_sent) || !(c->args_end || a->done)) continue;
        size_t n = c->args_end ? c->args_end - c->args : 0;
        json_t *args = json_loadb(a->text.data + c->args, n, 0, NULL);
        if (!args && c->args) continue; // truncated, as done_reason "length" reports
        json_array_append_new(calls, json_pack("{s:s,s:{s:i,s:s,s:o}}", "id", c->id, "function",
                                               "index", i, "name", c->name, "arguments",
                                               args ? args : json_object()));
        c->start_sent = true;
    }
    return calls;
}

static json_t *message_json(json_t *content, json_t *calls) {
    json_t *m = json_pack("{s:s,s:o}", "role", "assistant", "content", content);
    if (json_array_size(calls))
        json_object_set_new(m, "tool_calls", calls);
    else
        json_decref(calls);
    return m;
}

static void chat_delta(const struct generation *g, struct completion *a, struct buf *out) {
    json_t *calls = tool_calls_take(a, false);
    if (!has_more_text(a) && json_array_size(calls) == 0) {
        json_decref(calls);
        return;
    }
    json_t *v = reply_json(g);
    json_t *content = has_more_text(a) ? content_take(g, a, v) : json_string("");
    json_t *message = message_json(content, calls);
    thinking_add(a, a->reasoning_sent, message);
    a->reasoning_sent = a->reasoning.len;
    json_object_set_new(v, "message", message);
    json_object_set_new(v, "done", json_false());
    ndjson_add(g, v, out);
}

static void chat_finish(const struct generation *g, struct completion *a, struct buf *out) {
    json_t *v = reply_json(g);
    json_object_set_new(v, "message", message_json(json_string(""), json_array()));
    final_fields_add(g, a, v);
    ndjson_add(g, v, out);
}

static json_t *chat_whole(const struct generation *g) {
    const struct completion *a = &g->completions[0];
    json_t *v = reply_json(g);
    json_t *message = message_json(completion_content_json(a), tool_calls_take(a, true));
    thinking_add(a, 0, message);
    json_object_set_new(v, "message", message);
    logprobs_add(g, a, 0, completion_tokens_kept(a), v);
    final_fields_add(g, a, v);
    return v;
}

static const struct api_dialect chat_dialect = {.stream_type = "application/x-ndjson",
                                                .write_list = token_logprobs_write,
                                                .delta = chat_delta,
                                                .finish = chat_finish,
                                                .end = stream_end,
                                                .write_reply = chat_whole};

/* prompts */

/* Renders the prompt for `messages`, of which it takes ownership, by way of a chat body in OpenAI's
 * form. */
static int prompt_render(struct server *s, struct ollama_request *q, json_t *messages,
                         const char *template, struct error *err) {
    json_t *chat = json_pack("{s:o}", "messages", messages),
           *tools = json_get_nonnull(q->body, "tools");
    char *jinja = NULL;
    int rc = OK;
    if (template && !(jinja = ollama_template_to_jinja(s, template, err))) rc = err->code;
    if (jinja) json_object_set_new(chat, "chat_template", json_string(jinja));
    if (tools) json_object_set(chat, "tools", tools);
    if (q->think) {
        json_t *variables = thinking_variables(!json_is_false(q->think));
        if (json_is_string(q->think))
            json_object_set(variables, "reasoning_effort", json_object_get(q->body, "think"));
        json_object_set_new(chat, "chat_template_kwargs", variables);
    }
    if (q->derived) ollama_derived_apply(q->derived, chat);
    if (rc == OK) rc = chat_prompt_render(s, chat, &q->spec, err);
    json_decref(chat);
    free(jinja);
    return rc;
}

/* Appends the tokens that the template puts after an assistant's turn, such as a newline. */
static void tokens_after_turn(const struct tokenizer *t, struct token_ids *out) {
    const struct chat_message msgs[] = {{"user", "x"}, {"assistant", "y"}};
    struct token_ids ids = {0};
    struct buf mask = {0};
    struct error err;
    int last = -1;
    if (chat_encode(t, msgs, 2, false, &ids, &mask, &err) == OK)
        for (int i = 0; i < ids.n; i++)
            if (mask.data[i]) last = i;
    for (int i = last + 1; last >= 0 && i < ids.n; i++) token_ids_add(out, ids.v[i]);
    token_ids_release(&ids);
    buf_release(&mask);
}

/* Prepends the tokens of `context`, from earlier turns, to the prompt. */
static int context_prepend(const struct server *s, struct ollama_request *q, struct error *err) {
    const json_t *context = json_get_nonnull(q->body, "context");
    const struct tokenizer *t = s->model->tok;
    struct token_ids *earlier, *prompt = q->spec.prompts;
    int n;
    if (!context || (json_is_array(context) && json_array_size(context) == 0)) return OK;
    if (!json_is_array(context) || !json_is_integer(json_array_get(context, 0)))
        return error_set(err, ERR_USAGE, "'context' must be the list of an earlier reply");
    int rc = prompts_tokenize(s, context, 1, &earlier, &n, err);
    if (rc == OK && earlier->v[earlier->n - 1] == tokenizer_eot(t)) tokens_after_turn(t, earlier);
    for (int i = 0; rc == OK && i < prompt->n; i++)
        if (i > 0 || prompt->v[0] != tokenizer_bos(t)) token_ids_add(earlier, prompt->v[i]);
    if (rc == OK) {
        token_ids_release(prompt);
        *prompt = *earlier;
        *earlier = (struct token_ids){0};
    }
    for (int i = 0; i < n; i++) token_ids_release(&earlier[i]);
    free(earlier);
    return rc;
}

static int ollama_generate_read(struct server *s, struct ollama_request *q, const char **prompt,
                                struct error *err) {
    const char *suffix = "", *system = NULL, *template = NULL;
    bool raw = false;
    if (json_read_string(q->body, "prompt", prompt, err) != OK ||
        json_read_string(q->body, "suffix", &suffix, err) != OK ||
        json_read_string(q->body, "system", &system, err) != OK ||
        json_read_string(q->body, "template", &template, err) != OK ||
        json_read_bool(q->body, "raw", &raw, err) != OK || images_reject(q->body, err) != OK)
        return err->code;
    if (*suffix)
        return error_set(err, ERR_USAGE, "'%s' does not support insert: leave 'suffix' out",
                         q->target.name);
    if (!**prompt) return OK;
    q->spec.extra = json_boolean(!raw);
    if (raw && (system || template || json_get_nonnull(q->body, "context")))
        return error_set(err, ERR_USAGE, "raw mode does not support template, system, or context");
    if (raw)
        q->spec.request_json = json_pack("{s:O}", "prompt", json_object_get(q->body, "prompt"));
    if (raw && prompts_tokenize(s, json_object_get(q->body, "prompt"), 1, &q->spec.prompts,
                                &q->spec.n_prompts, err) != OK)
        return err->code;
    if (raw) reasoning_expect(s, &q->spec, NULL);
    if (raw) return OK;
    json_t *messages = json_array();
    if (system)
        json_array_append_new(messages,
                              json_pack("{s:s,s:s}", "role", "system", "content", system));
    json_array_append_new(messages, json_pack("{s:s,s:s}", "role", "user", "content", *prompt));
    if (template && !*template) template = NULL;
    if (prompt_render(s, q, messages, template, err) != OK) return err->code;
    return context_prepend(s, q, err);
}

/* Replies to a request without a prompt, which loads or unloads a model. */
static void load_reply(struct exchange *x, struct ollama_request *q, bool chat) {
    json_t *v =
        json_pack("{s:s,s:o,s:b,s:s}", "model", q->target.name, "created_at", current_time_json(),
                  "done", 1, "done_reason", q->unload ? "unload" : "load");
    if (chat)
        json_object_set_new(v, "message", message_json(json_string(""), json_array()));
    else
        json_object_set_new(v, "response", json_string(""));
    exchange_reply_json(x, 200, v);
}

/* Starts the generation, which takes ownership of spec and target, or replies without one and
 * releases them. */
static void ollama_request_start(struct server *s, struct exchange *x, struct ollama_request *q,
                                 const struct api_dialect *dialect, int rc, bool empty,
                                 const struct error *err) {
    if (rc == OK && !empty) {
        generation_start(s, x, dialect, "ollama-", &q->target, &q->spec);
    } else if (rc == OK) {
        load_reply(x, q, dialect == &chat_dialect);
        if (q->spec.grammar) server_grammar_release(s, q->spec.grammar);
        generation_spec_release(&q->spec);
        model_ref_release(&q->target);
    } else {
        generation_fail(s, x, &q->target, &q->spec, err);
    }
    ollama_request_release(q);
}

/* A member of the body; NULL: it is absent or null. The caller releases it. */
static json_t *body_member(const struct exchange *x, const char *key) {
    json_t *v = request_body_member(x, key);
    if (!json_is_null(v)) return v;
    json_decref(v);
    return NULL;
}

/* Answers a request that only unloads a model, which is not loaded. */
static bool unload_answer(struct server *base, struct exchange *x) {
    struct error err;
    double seconds = (double)NAN;
    bool chat = strcmp(exchange_path(x), "/api/chat") == 0,
         generate = strcmp(exchange_path(x), "/api/generate") == 0;
    if (!chat && !generate) return false;
    json_t *keep_alive = body_member(x, "keep_alive"),
           *input = body_member(x, chat ? "messages" : "prompt");
    bool empty = json_is_string(input) ? !json_string_length(input) : !json_array_size(input),
         unload = empty && keep_alive_read(keep_alive, &seconds, &err) == OK && seconds == 0;
    struct ollama_request q = {.unload = true, .target.name = base->name};
    if (unload) load_reply(x, &q, chat);
    json_decref(keep_alive);
    json_decref(input);
    return unload;
}

static void generate_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    struct ollama_request q;
    const char *prompt = "";
    int rc = ollama_request_read(s, x, &q, &err);
    if (rc == OK) rc = ollama_generate_read(s, &q, &prompt, &err);
    ollama_request_start(s, x, &q, &generate_dialect, rc, !*prompt, &err);
}

/* The messages without the oldest `skip` messages; system messages are kept and not counted. */
static json_t *messages_skip_oldest(const json_t *messages, size_t skip) {
    json_t *list = json_array(), *m;
    size_t i;
    json_array_foreach (messages, i, m) {
        bool keep = skip == 0 || strcmp(json_get_string(m, "role"), "system") == 0;
        if (keep)
            json_array_append(list, m);
        else
            skip--;
    }
    return list;
}

static int prompt_render_without_oldest(struct server *s, struct ollama_request *q,
                                        const json_t *messages, size_t skip, struct error *err) {
    struct generation_spec *spec = &q->spec;
    for (int i = 0; i < spec->n_prompts; i++) token_ids_release(&spec->prompts[i]);
    free(spec->prompts);
    json_decref(spec->request_json);
    spec->prompts = NULL;
    spec->request_json = NULL;
    spec->n_prompts = 0;
    return prompt_render(s, q, messages_skip_oldest(messages, skip), NULL, err);
}

/* Renders the prompt. If it does not fit into the context, leaves out as few of the oldest messages
 * as necessary, but never the last message. Uses binary search, because each attempt renders the
 * whole prompt. */
static int prompt_render_fitting(struct server *s, struct ollama_request *q, const json_t *messages,
                                 struct error *err) {
    bool truncate = true;
    json_t *m;
    size_t i, low = 0, high = 0;
    if (json_read_bool(q->body, "truncate", &truncate, err) != OK) return err->code;
    int rc = prompt_render_without_oldest(s, q, messages, 0, err);
    json_array_foreach (messages, i, m) high += strcmp(json_get_string(m, "role"), "system") != 0;
    if (!truncate || high < 2 || rc != OK || prompt_fits(s, &q->spec)) return rc;
    for (high--; rc == OK && low + 1 < high;) {
        size_t half = low + (high - low) / 2;
        rc = prompt_render_without_oldest(s, q, messages, half, err);
        *(rc == OK && prompt_fits(s, &q->spec) ? &high : &low) = half;
    }
    return rc == OK ? prompt_render_without_oldest(s, q, messages, high, err) : rc;
}

static int ollama_chat_read(struct server *s, struct ollama_request *q, bool *empty,
                            struct error *err) {
    json_t *messages = json_get_nonnull(q->body, "messages"), *m;
    size_t i;
    *empty = !messages || (json_is_array(messages) && json_array_size(messages) == 0);
    if (*empty) return OK;
    json_array_foreach (messages, i, m) {
        json_t *tool = json_object_get(m, "tool_name"), *thinking = json_object_get(m, "thinking");
        if (images_reject(m, err) != OK) return err->code;
        if (json_is_string(tool)) json_object_set(m, "name", tool);
        if (json_is_string(thinking)) json_object_set(m, "reasoning_content", thinking);
    }
    if (!json_is_array(messages))
        return error_set(err, ERR_USAGE, "'messages' must be a list of {role, content}");
    if (tool_choice_read(s, q->body, &q->spec, err) != OK) return err->code;
    return prompt_render_fitting(s, q, messages, err);
}

static void chat_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    struct ollama_request q;
    bool empty = false;
    int rc = ollama_request_read(s, x, &q, &err);
    if (rc == OK) rc = ollama_chat_read(s, &q, &empty, &err);
    ollama_request_start(s, x, &q, &chat_dialect, rc, empty, &err);
}

/* embeddings */

static json_t *vector_json(const float *v, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, json_real((double)v[i]));
    return list;
}

struct ollama_embedding {
    json_t *body;
    struct model_ref target;
    struct token_ids *texts;
    int n, dims;
    float *v; /* [n][D] */
};

static void embedding_release(struct ollama_embedding *e) {
    for (int i = 0; i < e->n; i++) token_ids_release(&e->texts[i]);
    free(e->texts);
    free(e->v);
    model_ref_release(&e->target);
    json_decref(e->body);
}

/* Tokenizes the texts under a key, truncated to the context if the request allows it. n is 0 if the
 * key is absent. */
static int texts_read(const struct server *s, const char *key, struct ollama_embedding *e,
                      struct error *err) {
    const json_t *v = json_get_nonnull(e->body, key);
    bool truncate = true;
    int32_t max_len = engine_max_len(s->engine);
    if (json_read_bool(e->body, "truncate", &truncate, err) != OK) return err->code;
    if (v && !json_is_string(v) && !json_is_string_array(v))
        return error_set(err, ERR_USAGE, "'%s' must be a string or a list of strings", key);
    if (!v || (json_is_string(v) ? json_string_length(v) : json_array_size(v)) == 0) return OK;
    if (prompts_tokenize(s, v, MAX_INPUTS, &e->texts, &e->n, err) != OK) return err->code;
    for (int i = 0; i < e->n; i++) {
        if (e->texts[i].n > max_len && !truncate)
            return error_set(err, ERR_USAGE, "input %d has %d tokens, and the context is %d", i,
                             e->texts[i].n, max_len);
        e->texts[i].n = MIN(e->texts[i].n, max_len);
    }
    return OK;
}

static int embedding_read(struct server *s, struct exchange *x, const char *key,
                          struct ollama_embedding *e, struct error *err) {
    const char *name;
    bool unload;
    int64_t dims = s->model->config.d_model;
    e->body = request_memory_json(s, x, err);
    if (!e->body || ollama_name(e->body, &name, err) != OK ||
        ollama_target(s, name, &e->target, err) != OK ||
        keep_alive_apply(s, e->body, &unload, err) != OK ||
        json_read_int(e->body, "dimensions", 1, s->model->config.d_model, &dims, err) != OK ||
        texts_read(s, key, e, err) != OK)
        return err->code;
    e->dims = (int)dims;
    if (e->n == 0) return OK;
    if (embed_texts(s, x, &e->target, e->texts, e->n, &e->v, err) != OK) return err->code;
    request_metrics_add_prompts(s, x, &e->target, e->texts, e->n);
    return OK;
}

static void embed_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct ollama_embedding e = {0};
    struct error err;
    if (embedding_read(s, x, "input", &e, &err) == OK) {
        json_t *list = json_array();
        json_int_t tokens = 0;
        for (int i = 0; i < e.n; i++) {
            float *v = e.v + (int64_t)i * s->model->config.d_model;
            embedding_truncate(v, e.dims);
            json_array_append_new(list, vector_json(v, e.dims));
            tokens += e.texts[i].n;
        }
        exchange_reply_json(x, 200,
                            json_pack("{s:s,s:o,s:I,s:i,s:I}", "model", e.target.name, "embeddings",
                                      list, "total_duration",
                                      nanoseconds(exchange_start_time(x), clock_now()),
                                      "load_duration", 0, "prompt_eval_count", tokens));
    } else {
        api_fail_error(x, &err, NULL);
    }
    embedding_release(&e);
}

/* The older route: one text, and its vector without scaling. */
static void embeddings_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct ollama_embedding e = {0};
    struct error err;
    int rc = embedding_read(s, x, "prompt", &e, &err);
    if (rc == OK && e.n > 1) rc = error_set(&err, ERR_USAGE, "'prompt' must be one string");
    if (rc == OK)
        exchange_reply_json(
            x, 200,
            json_pack("{s:o}", "embedding", vector_json(e.v, e.n ? s->model->config.d_model : 0)));
    else
        api_fail_error(x, &err, NULL);
    embedding_release(&e);
}

/* models */

/* 134500000 → "134.5M" */
static json_t *count_json(int64_t n) {
    static const struct {
        double of;
        char letter;
    } units[] = {{1e9, 'B'}, {1e6, 'M'}, {1e3, 'K'}};
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)n);
    for (size_t i = 0; i < ARRAY_LEN(units); i++)
        if ((double)n >= units[i].of) {
            snprintf(text, sizeof text, "%.1f%c", (double)n / units[i].of, units[i].letter);
            break;
        }
    return json_string(text);
}

static json_t *details_json(const struct server *s, const char *parent) {
    const struct model_config *c = &s->size.config;
    const struct arch *arch = c->arch;
    const char *path = s->base_entry ? s->path : s->model->path,
               *family = arch->gguf ? arch->gguf : arch->name;
    char type[32];
    snprintf(type, sizeof type, "%s", tensor_type_name(s->size.type));
    for (char *p = type; *p; p++) *p = (char)toupper((unsigned char)*p);
    return json_pack("{s:s,s:s,s:s,s:[s],s:o,s:s}", "parent_model", parent, "format",
                     path_is_dir(path) ? "safetensors" : "gguf", "family", family, "families",
                     family, "parameter_size", count_json(model_param_count(c)),
                     "quantization_level", type);
}

/* Sets the digest and the size of a base. */
static json_int_t base_measure(struct server *s, char digest[HASH_LEN]) {
    struct model_size size = {0};
    struct error err;
    if (s->base_entry) {
        strcpy(digest, base_status(s).hash);
        return (json_int_t)s->size.file;
    }
    const char *hash = model_hash(s->model, &err);
    strcpy(digest, hash ? hash : "");
    return model_measure(s->model->path, s->model->cls, &size, &err) == OK ? (json_int_t)size.file
                                                                           : 0;
}

/* The fields of a model that both lists (tags and ps) have. entry NULL: the base model. loaded:
 * whether the base is. Returns NULL if the adapter cannot be loaded. */
static json_t *model_card_json(struct server *s, const struct adapter_entry *entry, bool loaded) {
    char digest[HASH_LEN], *name = xasprintf("%s:latest", entry ? entry->name : s->name);
    json_int_t bytes = 0;
    struct error err = {.code = ERR_STATE};
    if (entry && entry->is_base) {
        char *text = json_canonical(entry->derived_spec);
        sha256_bytes(text, strlen(text), digest);
        free(text);
    } else if (entry) {
        struct adapter *a = loaded ? adapter_pool_get(s->pool, entry->name, &err) : NULL;
        if (!a && err.code != ERR_STATE) {
            free(name);
            return NULL;
        }
        strcpy(digest, a ? a->hash : ""); // NULL: there is no room to load it now
        bytes = a ? (json_int_t)(a->n_data * sizeof *a->data) : 0;
        adapter_release(a);
    } else {
        bytes = base_measure(s, digest);
    }
    json_t *v = json_pack("{s:s,s:s,s:I,s:s,s:o}", "name", name, "model", name, "size", bytes,
                          "digest", digest, "details", details_json(s, entry ? s->name : ""));
    free(name);
    return v;
}

static void tags_add(struct server *s, const struct adapter_entry *entry, bool loaded,
                     json_t *models) {
    char when[40];
    json_t *v = model_card_json(s, entry, loaded);
    if (!v) return;
    json_object_set_new(v, "modified_at",
                        json_string(time_format(entry ? entry->created : s->started, 0, when)));
    json_array_append_new(models, v);
}

static void base_tags_add(struct server *s, json_t *models) {
    int n;
    struct adapter_entry *v = server_adapters(s, &n);
    bool loaded = base_retain(s);
    tags_add(s, NULL, loaded, models);
    for (int i = 0; i < n; i++) tags_add(s, &v[i], loaded, models);
    if (loaded) base_release(s, false);
    server_adapters_free(v, n);
}

static void tags_handle(void *ctx, struct exchange *x) {
    struct server *s;
    json_t *models = json_array();
    for (int i = 0; (s = base_at(ctx, i)); i++) base_tags_add(s, models);
    exchange_reply_json(x, 200, json_pack("{s:o}", "models", models));
}

static bool pool_has(const struct adapter_pool_item *items, int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (items[i].bytes && strcmp(items[i].name, name) == 0) return true;
    return false;
}

/* When a loaded base is unloaded, if no further request comes. */
static json_t *expiry_json(double seconds) {
    struct timespec now;
    char text[40];
    if (seconds < 0 || seconds > 1e9) return json_string("2318-01-01T00:00:00Z"); // never
    clock_gettime(CLOCK_REALTIME, &now);
    return json_string(time_format(now.tv_sec + (time_t)seconds, now.tv_nsec, text));
}

static void ps_add(struct server *s, const struct adapter_entry *entry, double expires,
                   json_t *models) {
    json_t *v = model_card_json(s, entry, true);
    if (!v) return;
    json_object_set_new(v, "expires_at", expiry_json(expires));
    json_object_set_new(v, "size_vram", json_integer(0));
    json_object_set_new(v, "context_length", json_integer(engine_max_len(s->engine)));
    json_array_append_new(models, v);
}

/* Lists a loaded base and the adapters in its pool. */
static void base_ps_add(struct server *s, double expires, json_t *models) {
    struct arena mem = {0};
    int n, n_items;
    const struct adapter_pool_item *items = adapter_pool_list(s->pool, &mem, &n_items);
    struct adapter_entry *v = server_adapters(s, &n);
    ps_add(s, NULL, expires, models);
    for (int i = 0; i < n; i++)
        if (pool_has(items, n_items, v[i].name)) ps_add(s, &v[i], expires, models);
    server_adapters_free(v, n);
    arena_release(&mem);
}

static void ps_handle(void *ctx, struct exchange *x) {
    struct server *s;
    json_t *models = json_array();
    for (int i = 0; (s = base_at(ctx, i)); i++) {
        double expires = s->base_entry ? base_status(s).expires : -1;
        if (!base_retain(s)) continue;
        base_ps_add(s, expires, models);
        base_release(s, false);
    }
    exchange_reply_json(x, 200, json_pack("{s:o}", "models", models));
}

/* one model */

static json_t *info_json(const struct server *s) {
    const struct model_config *c = &s->model->config;
    const char *arch = c->arch->gguf ? c->arch->gguf : c->arch->name;
    const struct {
        const char *key;
        double value;
        bool real;
    } rows[] = {{"context_length", c->max_seq_len, false},
                {"embedding_length", c->d_model, false},
                {"block_count", c->n_layers, false},
                {"feed_forward_length", c->d_ff, false},
                {"attention.head_count", c->n_heads, false},
                {"attention.head_count_kv", c->n_kv_heads, false},
                {"attention.key_length", c->head_dim, false},
                {"attention.value_length", c->head_dim, false},
                {"attention.layer_norm_rms_epsilon", (double)c->rms_norm_eps, true},
                {"rope.freq_base", (double)c->rope_theta, true},
                {"vocab_size", c->vocab_size, false}};
    json_t *v = json_pack("{s:s,s:s,s:I}", "general.architecture", arch, "general.basename",
                          s->name, "general.parameter_count", (json_int_t)model_param_count(c));
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        char key[80];
        snprintf(key, sizeof key, "%s.%s", arch, rows[i].key);
        json_object_set_new(v, key,
                            rows[i].real ? json_real(rows[i].value)
                                         : json_integer((json_int_t)rows[i].value));
    }
    return v;
}

/* Writes one line per parameter; each line begins with `prefix`. */
static void parameters_write(const json_t *derived, const char *prefix, struct buf *out) {
    const char *key;
    json_t *v, *item;
    size_t i;
    json_object_foreach (json_object_get(derived, "parameters"), key, v) {
        json_t *list = json_is_array(v) ? json_incref(v) : json_pack("[O]", v);
        json_array_foreach (list, i, item) {
            char *text = json_dumps(item, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
            buf_printf(out, "%s%-*s %s\n", prefix, *prefix ? 0 : 30, key, text);
            free(text);
        }
        json_decref(list);
    }
}

static void modelfile_write(const struct server *s, const json_t *derived, const char *adapter,
                            struct buf *out) {
    const json_t *v;
    size_t i;
    buf_printf(out, "# Modelfile made by shoal\nFROM %s\n", s->name);
    json_array_foreach (json_object_get(derived, "adapters"), i, v)
        buf_printf(out, "ADAPTER %s\n", json_is_string(v) ? json_string_value(v) : "(uploaded)");
    if (!derived && adapter) buf_printf(out, "ADAPTER %s\n", adapter);
    if (*json_get_string(derived, "template"))
        buf_printf(out, "TEMPLATE \"\"\"%s\"\"\"\n", json_get_string(derived, "template"));
    if (*json_get_string(derived, "system"))
        buf_printf(out, "SYSTEM \"\"\"%s\"\"\"\n", json_get_string(derived, "system"));
    parameters_write(derived, "PARAMETER ", out);
    json_array_foreach (json_object_get(derived, "messages"), i, v)
        buf_printf(out, "MESSAGE %s \"\"\"%s\"\"\"\n", json_get_string(v, "role"),
                   json_get_string(v, "content"));
}

static json_t *capabilities_json(const struct server *s) {
    json_t *v = json_pack("[s,s]", "completion", "embedding");
    if (s->model->chat_template && strstr(s->model->chat_template, "tools"))
        json_array_append_new(v, json_string("tools"));
    if (s->reasoning_form) json_array_append_new(v, json_string("thinking"));
    return v;
}

const struct adapter_entry *ollama_find_adapter(const struct adapter_entry *v, int n,
                                                const char *name) {
    for (int i = 0; i < n; i++)
        if (strcmp(v[i].name, name) == 0) return &v[i];
    return NULL;
}

static json_t *show_json(struct server *s, const struct model_ref *t) {
    struct buf file = {0}, parameters = {0};
    char when[40];
    int n;
    struct adapter_entry *all = server_adapters(s, &n);
    const struct adapter_entry *row = ollama_find_adapter(all, n, t->label);
    const json_t *derived = row ? row->derived_spec : NULL;
    const char *template = json_get_string(derived, "template");
    modelfile_write(s, derived, row ? row->path : NULL, &file);
    parameters_write(derived, "", &parameters);
    if (!*template) template = s->model->chat_template ? s->model->chat_template : chatml_template;
    json_t *v = json_pack(
        "{s:o,s:o,s:s,s:o,s:o,s:o,s:s}", "modelfile", json_string_lossy(file.data, file.len),
        "parameters", json_string_lossy(parameters.data ? parameters.data : "", parameters.len),
        "template", template, "details", details_json(s, row || t->n ? s->name : ""), "model_info",
        info_json(s), "capabilities", capabilities_json(s), "modified_at",
        time_format(row ? row->created : s->started, 0, when));
    for (size_t i = 0; i < 3; i++) {
        static const char *const keys[] = {"system", "messages", "license"};
        json_t *value = json_object_get(derived, keys[i]);
        if (value) json_object_set(v, keys[i], value);
    }
    server_adapters_free(all, n);
    buf_release(&file);
    buf_release(&parameters);
    return v;
}

static void show_handle(void *ctx, struct exchange *x) {
    struct model_ref t = {0};
    struct error err;
    const char *name;
    json_t *body = request_memory_json(ctx, x, &err);
    int rc = body ? ollama_name(body, &name, &err) : err.code;
    if (rc == OK) rc = ollama_target(ctx, name, &t, &err);
    if (rc == OK)
        exchange_reply_json(x, 200, show_json(ctx, &t));
    else
        api_fail_error(x, &err, NULL);
    model_ref_release(&t);
    json_decref(body);
}

/* the server itself */

static void registry_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    api_fail(
        x, 501, NULL, NULL, NULL,
        "this server does not access registries: add models with 'shoal pull' and --adapter, or "
        "through /api/create");
}

static void version_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    exchange_reply_json(x, 200, json_pack("{s:s}", "version", SHOAL_VERSION));
}

static void root_handle(void *ctx, struct exchange *x) {
    static const char text[] = "Ollama is running";
    const char *accept = exchange_header(x, "Accept");
    if (accept && strcasestr(accept, "text/html"))
        web_ui_handle(ctx, x);
    else
        exchange_reply(x, 200, "text/plain; charset=utf-8", text, sizeof text - 1);
}

static const struct http_route routes[] = {
    {"GET", "/", SCOPE_OPEN, root_handle},
    {"POST", "/api/generate", SCOPE_CHAT | ROUTE_BASE, generate_handle},
    {"POST", "/api/chat", SCOPE_CHAT | ROUTE_BASE, chat_handle},
    {"POST", "/api/embed", SCOPE_CHAT | ROUTE_SLOW | ROUTE_BASE, embed_handle},
    {"POST", "/api/embeddings", SCOPE_CHAT | ROUTE_SLOW | ROUTE_BASE, embeddings_handle},
    {"GET", "/api/tags", SCOPE_CHAT, tags_handle},
    {"POST", "/api/show", SCOPE_CHAT | ROUTE_BASE, show_handle},
    {"GET", "/api/ps", SCOPE_CHAT, ps_handle},
    {"POST", "/api/create", SCOPE_ADMIN, ollama_create_handle},
    {"GET", "/api/blobs/*", SCOPE_ADMIN, ollama_blob_handle},
    {"POST", "/api/blobs/*", SCOPE_ADMIN, ollama_upload_handle},
    {"POST", "/api/copy", SCOPE_ADMIN, ollama_copy_handle},
    {"DELETE", "/api/delete", SCOPE_ADMIN, ollama_delete_handle},
    {"POST", "/api/pull", SCOPE_ADMIN, registry_handle},
    {"POST", "/api/push", SCOPE_ADMIN, registry_handle},
    {"GET", "/api/version", SCOPE_OPEN | ROUTE_IO_THREAD, version_handle},
    {0},
};

const struct server_module ollama_module = {.routes = routes,
                                            .load = ollama_models_load,
                                            .body_sink = ollama_sink,
                                            .answer_unloaded = unload_answer};
