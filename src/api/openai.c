/*
 * openai: OpenAI's API for chat, completions, embeddings and models, with vLLM's additional fields.
 * request_fields.c lists the known fields and refuses unknown ones.
 *
 * Requests are read into a generation_spec; two dialects write the replies. In the
 * log-probabilities of /v1/completions and of prompts a token is always among its own alternatives,
 * with the same value, so that clients may compare the two values for equality.
 */
#define _GNU_SOURCE
#include "api/go_template.h"
#include "api/internal.h"
#include "serve/auto_model.h"
#include "serve/generation.h"
#include "serve/request_fields.h"
#include "serve/sample_filter.h"

#include <math.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum {
    MAX_COMPLETIONS = SAMPLE_FILTER_MAX,
    MAX_PROMPTS = 2048,
    MAX_STOPS = 16,
    MAX_STOP_BYTES = 1024,
    MAX_INPUTS = 2048,
    MAX_LOGIT_BIASES = 1024,
    EMBED_BATCH_TOKENS = 512,
    MAX_MESSAGES = 65536,
    MAX_TEMPLATE_BYTES = 64 << 10,
    MAX_TEMPLATE_KWARGS = 1024,
    RENDER_SECONDS = 10
};

/* Clients parse the arguments of a call as JSON, so empty arguments are an object. */
static const char NO_ARGUMENTS[] = "{}";

/* settings */

uint64_t random_seed(void) {
    uint64_t v = 0;
    CHECK(getrandom(&v, sizeof v, 0) == sizeof v);
    return v >> 12; // at most 52 bits, so that clients in any language can send it back
}

void sampling_set_penalties(struct sampling_params *s, double repeat, double presence,
                            double frequency, int64_t last_n) {
    s->repetition_penalty = last_n ? (float)repeat : 1.0f;
    s->presence_penalty = last_n ? (float)presence : 0.0f;
    s->frequency_penalty = last_n ? (float)frequency : 0.0f;
    bool any = s->repetition_penalty != 1.0f || s->presence_penalty != 0.0f ||
               s->frequency_penalty != 0.0f;
    s->penalty_last_n = any ? (int32_t)(last_n < 0 ? INT32_MAX : last_n) : 0;
}

int logit_bias_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                    struct error *err) {
    json_t *o = json_get_nonnull(body, "logit_bias"), *v;
    const char *key;
    if (!o) return OK;
    if (!json_is_object(o) || json_object_size(o) > MAX_LOGIT_BIASES)
        return error_set(err, ERR_USAGE,
                         "'logit_bias' must be an object of at most %d token ids and numbers",
                         MAX_LOGIT_BIASES);
    spec->bias = xcalloc(json_object_size(o) + 1, sizeof *spec->bias);
    json_object_foreach (o, key, v) {
        char *end;
        long id = strtol(key, &end, 10);
        double x = json_number_value(v);
        if (*end || end == key || id < 0 || id >= tokenizer_vocab_size(s->model->tok) ||
            !json_is_number(v) || !(x >= -100 && x <= 100))
            return error_set(
                err, ERR_USAGE,
                "'logit_bias' has '%.40s', which is not a token id with a bias from -100 to 100",
                key);
        spec->bias[spec->sampling.n_bias++] =
            (struct logit_bias){(int32_t)id, x <= -100 ? -INFINITY : (float)x};
    }
    return OK;
}

int stop_conditions_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                         struct error *err) {
    const struct tokenizer *tok = s->model->tok;
    bool ignore_eos = false;
    int64_t loop = 0;
    json_t *ids = json_get_nonnull(body, "stop_token_ids"), *v;
    size_t i;
    if (json_read_strings(body, "stop", MAX_STOPS, &spec->stop_texts, err) != OK ||
        json_read_bool(body, "ignore_eos", &ignore_eos, err) != OK)
        return err->code;
    if (!ignore_eos) loop = s->options->loop_tokens;
    if (json_read_int(body, "loop_tokens", 0, INT32_MAX, &loop, err) != OK) return err->code;
    spec->loop_tokens = (int32_t)loop;
    for (int k = spec->stop_texts.n - 1; k >= 0; k--) // some clients send "", which is ignored
        if (!*spec->stop_texts.v[k]) {
            free(spec->stop_texts.v[k]);
            spec->stop_texts.v[k] = spec->stop_texts.v[--spec->stop_texts.n];
        }
    // limited, because each text is searched for after every token
    for (int k = 0; k < spec->stop_texts.n; k++)
        if (strlen(spec->stop_texts.v[k]) > MAX_STOP_BYTES)
            return error_set(err, ERR_USAGE, "'stop' has a text of more than %d bytes",
                             MAX_STOP_BYTES);
    if (!ignore_eos && tokenizer_eos(tok) >= 0)
        spec->stop_ids[spec->n_stop_ids++] = tokenizer_eos(tok);
    if (!ignore_eos && tokenizer_eot(tok) != tokenizer_eos(tok) && tokenizer_eot(tok) >= 0)
        spec->stop_ids[spec->n_stop_ids++] = tokenizer_eot(tok);
    if (ids && (!json_is_array(ids) || json_array_size(ids) > 16))
        return error_set(err, ERR_USAGE, "'stop_token_ids' must be a list of at most 16 ids");
    json_array_foreach (ids, i, v) {
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id >= tokenizer_vocab_size(tok))
            return error_set(err, ERR_USAGE, "'stop_token_ids' has a value that is not a token id");
        spec->stop_ids[spec->n_stop_ids++] = (int32_t)id;
    }
    return OK;
}

int context_shift_read(const struct server *s, const json_t *body, const char *shift,
                       const json_t *options, const char *keep, struct generation_spec *spec,
                       struct error *err) {
    int64_t n = s->options->n_keep;
    spec->context_shift = s->options->context_shift;
    if (json_read_bool(body, shift, &spec->context_shift, err) != OK ||
        json_read_int(options, keep, -1, INT32_MAX, &n, err) != OK)
        return err->code;
    spec->n_keep = (int32_t)n;
    return OK;
}

/* Reads the settings that chat and completions share. */
static int settings_read(const struct server *s, const json_t *body, struct generation_spec *spec,
                         struct error *err) {
    double temperature = 1, top_p = 1, min_p = 0, typical_p = 1, repetition = 1, presence = 0,
           frequency = 0;
    int64_t n = 1, top_k = 0, seed = -1, truncate = 0;
    const json_t *stream_options = json_get_nonnull(body, "stream_options");
    if (json_read_number(body, "temperature", 0, 100, &temperature, err) != OK ||
        json_read_number(body, "top_p", 0, 1, &top_p, err) != OK ||
        json_read_number(body, "min_p", 0, 1, &min_p, err) != OK ||
        json_read_number(body, "typical_p", 0, 1, &typical_p, err) != OK ||
        json_read_number(body, "repetition_penalty", 1e-3, 100, &repetition, err) != OK ||
        json_read_number(body, "presence_penalty", -2, 2, &presence, err) != OK ||
        json_read_number(body, "frequency_penalty", -2, 2, &frequency, err) != OK ||
        json_read_int(body, "top_k", -1, 1 << 30, &top_k, err) != OK ||
        json_read_int(body, "n", 1, MAX_COMPLETIONS, &n, err) != OK ||
        json_read_int(body, "seed", INT64_MIN, INT64_MAX, &seed, err) != OK ||
        json_read_int(body, "truncate_prompt_tokens", -1, INT32_MAX, &truncate, err) != OK ||
        json_read_bool(body, "stream", &spec->stream, err) != OK ||
        (stream_options &&
         json_read_bool(stream_options, "include_usage", &spec->include_usage, err) != OK))
        return err->code;
    const char *user = NULL;
    if (json_read_name(body, "user", &user, err) != OK) return err->code;
    if (user) spec->user = xstrdup(user);
    spec->n = (int)n;
    spec->truncate_prompt_tokens = (int32_t)truncate;
    spec->sampling = (struct sampling_params){
        .temperature = (float)temperature,
        .top_k = (int32_t)MAX(top_k, 0),
        .top_p = top_p > 0 ? (float)top_p : 1e-6f,
        .min_p = (float)min_p,
        .typical_p = (float)typical_p,
        .repetition_penalty = (float)repetition,
        .presence_penalty = (float)presence,
        .frequency_penalty = (float)frequency,
        .seed = json_get_nonnull(body, "seed") ? (uint64_t)seed : random_seed()};
    if (logit_bias_read(s, body, spec, err) != OK) return err->code;
    if (context_shift_read(s, body, "context_shift", body, "n_keep", spec, err) != OK)
        return err->code;
    return stop_conditions_read(s, body, spec, err);
}

static const char *const filter_fields[] = {"check", "samples", "check_item"};

/* Reads the filter's fields; call it after n and the prompts are set. question: the text
 * to be answered, or NULL. */
static int filter_read(struct server *s, const json_t *body, const char *question,
                       struct generation_spec *spec, struct error *err) {
    int samples;
    if (sample_filter_read(s, body, question, &spec->filter, &samples, &spec->bad_field, err) != OK)
        return err->code;
    if (!spec->filter) return OK;
    if (spec->n > 1)
        return error_set(err, ERR_USAGE, "'%s' must be 1 with 'check', which selects one reply",
                         spec->n_best ? "best_of" : "n");
    if (spec->n_prompts > 1)
        return error_set(err, ERR_USAGE, "'check' takes one prompt, not %d", spec->n_prompts);
    if (spec->tool_choice != TOOL_CHOICE_NONE)
        return error_set(err, ERR_USAGE, "'check' selects among texts, not among calls of 'tools'");
    spec->n = samples;
    return OK;
}

int generation_set_grammar(struct server *s, struct generation_spec *spec, const char *kind,
                           const json_t *v, struct error *err) {
    /* json_dumps keeps the order of keys in the request; the reply has the same order */
    char *text = json_is_string(v) ? xstrdup(json_string_value(v))
                                   : json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY);
    CHECK(text != NULL);
    spec->grammar = server_grammar(s, kind, text, strlen(text), err);
    free(text);
    return spec->grammar ? OK : error_wrap(err, "the grammar");
}

/* generation_set_grammar for the value of a field, which an error is about. */
static int field_set_grammar(struct server *s, struct generation_spec *spec, const char *field,
                             const char *kind, const json_t *v, struct error *err) {
    spec->bad_field = field;
    int rc = generation_set_grammar(s, spec, kind, v, err);
    if (rc == OK) spec->bad_field = NULL;
    return rc;
}

/* Reads vLLM's fields for constrained decoding, under their old and new names. */
static int guided_read(struct server *s, const json_t *body, struct generation_spec *spec,
                       struct error *err) {
    static const struct {
        const char *old, *now, *kind;
    } known[] = {{"guided_json", "json", "json_schema"},
                 {"guided_regex", "regex", "regex"},
                 {"guided_grammar", "grammar", "gbnf"},
                 {"guided_choice", "choice", "choices"}};
    const json_t *in = json_get_nonnull(body, "structured_outputs"), *item;
    for (size_t i = 0; i < ARRAY_LEN(known) && !spec->grammar; i++) {
        const json_t *v = json_get_nonnull(body, known[i].old);
        const char *field = v ? known[i].old : "structured_outputs";
        size_t k;
        if (!v && in) v = json_get_nonnull(in, known[i].now);
        if (!v) continue;
        if (strcmp(known[i].kind, "choices") != 0) {
            if (field_set_grammar(s, spec, field, known[i].kind, v, err) != OK) return err->code;
            continue;
        }
        struct buf all = {0};
        spec->bad_field = field;
        if (!json_is_string_array(v) || json_array_size(v) == 0)
            return error_set(err, ERR_USAGE,
                             "the choices of '%s' must be a list of at least one "
                             "string",
                             field);
        json_array_foreach (v, k, item)
            buf_add(&all, json_string_value(item), json_string_length(item) + 1);
        spec->grammar = server_grammar(s, "choices", all.data, all.len, err);
        buf_release(&all);
        if (!spec->grammar) return err->code;
        spec->bad_field = NULL;
    }
    return OK;
}

static int format_read(struct server *s, const json_t *body, struct generation_spec *spec,
                       struct error *err) {
    const json_t *f = json_get_nonnull(body, "response_format");
    const char *type = f ? json_get_string(f, "type") : "text";
    if (strcmp(type, "json_object") == 0)
        spec->grammar = server_grammar(s, "json_object", "", 0, err);
    else if (strcmp(type, "json_schema") == 0) {
        const json_t *schema = json_get_nonnull(json_object_get(f, "json_schema"), "schema");
        if (!schema)
            return error_set(err, ERR_USAGE, "'response_format.json_schema' has no 'schema'");
        return field_set_grammar(s, spec, "response_format", "json_schema", schema, err);
    } else if (strcmp(type, "text") != 0)
        return error_set(err, ERR_USAGE,
                         "'response_format.type' must be text, json_object or json_schema");
    if (strcmp(type, "json_object") == 0 && !spec->grammar) return err->code;
    return spec->grammar ? OK : guided_read(s, body, spec, err);
}

/* tools */

/* The JSON schema of a call of a tool: {"name": "f", "arguments": {…}}. */
static json_t *call_schema(const json_t *tool) {
    const json_t *f = json_object_get(tool, "function");
    json_t *params = json_incref(json_object_get(f, "parameters"));
    if (!json_is_object(params) || json_object_size(params) == 0) {
        json_decref(params);
        params = json_pack("{s:s}", "type", "object");
    }
    return json_pack("{s:s,s:{s:{s:[s]},s:o},s:[s,s],s:b}", "type", "object", "properties", "name",
                     "enum", json_get_string(f, "name"), "arguments", params, "required", "name",
                     "arguments", "additionalProperties", 0);
}

/* Sets a grammar that requires a call of the tool `chosen`, or of any tool if it is NULL. */
static int tools_force(struct server *s, const json_t *tools, const char *chosen,
                       struct generation_spec *spec, struct error *err) {
    json_t *any = json_array(), *tool;
    size_t i;
    json_array_foreach (tools, i, tool) {
        const char *name = json_get_string(json_object_get(tool, "function"), "name");
        if (!chosen || strcmp(name, chosen) == 0) json_array_append_new(any, call_schema(tool));
    }
    if (json_array_size(any) == 0) {
        json_decref(any);
        return error_set(err, ERR_USAGE, "'tool_choice' names '%s', which is not in 'tools'",
                         chosen ? chosen : "");
    }
    json_t *schema = json_array_size(any) == 1 ? json_incref(json_array_get(any, 0))
                                               : json_pack("{s:O}", "anyOf", any);
    spec->tool_choice = TOOL_CHOICE_REQUIRED;
    if (spec->grammar) server_grammar_release(s, spec->grammar); // a forced call replaces a format
    int rc = field_set_grammar(s, spec, "tools", "json_schema", schema, err);
    json_decref(schema);
    json_decref(any);
    return rc;
}

static int tools_check(const json_t *tools, struct error *err) {
    const json_t *tool;
    size_t i;
    bool valid = json_is_array(tools) && json_array_size(tools) <= 128;
    if (valid)
        json_array_foreach (tools, i, tool) {
            size_t n = strlen(json_get_string(json_object_get(tool, "function"), "name"));
            valid &= n > 0 && n <= JSON_NAME_MAX;
        }
    return valid ? OK
                 : error_set(err, ERR_USAGE,
                             "'tools' must be a list of at most 128 {type: function, function: "
                             "{name, …}}, each 'name' of at most %d bytes",
                             JSON_NAME_MAX);
}

static bool template_has_tools(const struct server *s) {
    return s->model->chat_template && strstr(s->model->chat_template, "tools");
}

int tool_choice_read(struct server *s, const json_t *body, struct generation_spec *spec,
                     struct error *err) {
    const json_t *tools = json_get_nonnull(body, "tools"),
                 *choice = json_get_nonnull(body, "tool_choice"), *tool;
    size_t i;
    const char *how = json_is_string(choice) ? json_string_value(choice) : NULL;
    bool parallel = true;
    bool forced = json_is_object(choice) || (how && strcmp(how, "required") == 0);
    if (choice && !how && !json_is_object(choice))
        return error_set(err, ERR_USAGE, "'tool_choice' must be a string or an object");
    if (tools && !json_is_array(tools)) return tools_check(tools, err);
    if (forced && json_array_size(tools) == 0)
        return error_set(err, ERR_USAGE, "'tool_choice' requires 'tools'");
    if (!tools || json_array_size(tools) == 0) return OK;
    const char *template = json_string_value(json_get_nonnull(body, "chat_template"));
    spec->tool_form = tool_form_find(template ? template : s->model->chat_template);
    if (tools_check(tools, err) != OK ||
        json_read_bool(body, "parallel_tool_calls", &parallel, err) != OK)
        return err->code;
    spec->single_tool_call = !parallel;
    if (json_is_object(choice))
        return tools_force(s, tools, json_get_string(json_object_get(choice, "function"), "name"),
                           spec, err);
    if (forced) return tools_force(s, tools, NULL, spec, err);
    if (how && strcmp(how, "none") == 0) return OK;
    if (how && strcmp(how, "auto") != 0)
        return error_set(err, ERR_USAGE,
                         "'tool_choice' must be none, auto, required or a function's name");
    if (!template_has_tools(s))
        return error_set(err, ERR_USAGE,
                         "'tool_choice' must be required or a function's name, because this "
                         "model's chat template does not support tools");
    spec->tool_choice = TOOL_CHOICE_AUTO;
    json_array_foreach (tools, i, tool)
        strings_add(&spec->tool_names, json_get_string(json_object_get(tool, "function"), "name"));
    return OK;
}

/* chat */

/* Replaces a list of parts by their joined texts, because templates expect a string; other parts
 * are rejected. */
static int content_join(json_t *message, struct error *err) {
    json_t *content = json_get_nonnull(message, "content"), *part;
    size_t i;
    if (!content) {
        json_object_set_new(message, "content", json_string(""));
        return OK;
    }
    if (json_is_string(content)) return OK;
    if (!json_is_array(content)) return error_set(err, ERR_USAGE, "it must be a string or a list");
    struct buf b = {0};
    json_array_foreach (content, i, part) {
        if (strcmp(json_get_string(part, "type"), "text") != 0) {
            buf_release(&b);
            return error_set(err, ERR_USAGE, "this model reads text only, and it has '%.40s'",
                             json_get_string(part, "type"));
        }
        buf_puts(&b, json_get_string(part, "text"));
    }
    json_object_set_new(message, "content", json_stringn(b.data ? b.data : "", b.len));
    buf_release(&b);
    return OK;
}

/* Replaces `arguments` that are JSON text by the list or object; any other text is unchanged.
 * `left` is the remaining budget for all such texts of a request. */
static int arguments_parse(json_t *function, struct json_limits *left, struct error *err) {
    const json_t *text = json_object_get(function, "arguments");
    if (!json_is_string(text)) return OK;
    json_t *v = json_parse_limited(json_string_value(text), json_string_length(text),
                                   "tool_calls.function.arguments", left, err);
    if (!v && err->code != ERR_FORMAT) return err->code;
    if (json_is_array(v) || json_is_object(v)) json_object_set(function, "arguments", v);
    json_decref(v);
    return OK;
}

/* Parses the arguments of tool calls in a message: clients send them as a string, but templates
 * expect objects. */
static int tool_calls_parse(json_t *message, struct json_limits *left, struct error *err) {
    json_t *calls = json_object_get(message, "tool_calls"), *call;
    size_t i;
    json_array_foreach (calls, i, call)
        if (arguments_parse(json_object_get(call, "function"), left, err) != OK) return err->code;
    return OK;
}

static int messages_read(json_t *body, json_t **out, struct error *err) {
    static const char *const roles[] = {"system",    "developer", "user",
                                        "assistant", "tool",      "function"};
    json_t *messages = json_get_nonnull(body, "messages"), *m;
    struct json_limits left = {json_request_limits.depth, json_request_limits.cost / 4, true};
    size_t i;
    if (!json_is_array(messages) || json_array_size(messages) == 0)
        return error_set(err, ERR_USAGE, "'messages' must be a list of at least one message");
    if (json_array_size(messages) > MAX_MESSAGES)
        return error_set(err, ERR_USAGE, "'messages' has more than %d of them", MAX_MESSAGES);
    json_array_foreach (messages, i, m) {
        const char *role = json_get_string(m, "role");
        bool known = false;
        for (size_t k = 0; k < ARRAY_LEN(roles); k++) known |= strcmp(role, roles[k]) == 0;
        if (!known)
            return error_set(err, ERR_USAGE,
                             "'messages[%zu].role' is '%.40s'; there are system, "
                             "developer, user, assistant and tool",
                             i, role);
        if (strcmp(role, "developer") == 0) json_object_set_new(m, "role", json_string("system"));
        if (content_join(m, err) != OK) return error_wrap(err, "'messages[%zu].content'", i);
        if (tool_calls_parse(m, &left, err) != OK) return err->code;
    }
    *out = messages;
    return OK;
}

int chat_template_check(const struct server *s, const json_t *body, struct generation_spec *spec,
                        struct error *err) {
    const char *template = NULL;
    spec->bad_field = "chat_template";
    if (json_read_string(body, "chat_template", &template, err) != OK) return err->code;
    if (template && !s->options->trust_template)
        return error_set(err, ERR_USAGE,
                         "'chat_template' in a request is refused by this server; start it with "
                         "--trust-request-chat-template to allow it");
    if (template && strlen(template) > MAX_TEMPLATE_BYTES)
        return error_set(err, ERR_USAGE, "'chat_template' is larger than %d bytes",
                         MAX_TEMPLATE_BYTES);
    spec->bad_field = NULL;
    return OK;
}

static int kwargs_check(const json_t *kwargs, struct generation_spec *spec, struct error *err) {
    spec->bad_field = "chat_template_kwargs";
    if (kwargs && !json_is_object(kwargs))
        return error_set(err, ERR_USAGE, "'chat_template_kwargs' must be an object");
    if (json_object_size(kwargs) > MAX_TEMPLATE_KWARGS)
        return error_set(err, ERR_USAGE, "'chat_template_kwargs' has more than %d names",
                         MAX_TEMPLATE_KWARGS);
    spec->bad_field = NULL;
    return OK;
}

/* Whether to stop rendering: the client has disconnected, or the deadline for all renderings of
 * this request has passed (Ollama's chats are rendered repeatedly until they fit). */
static bool render_should_stop(void *ctx) {
    const struct generation_spec *spec = ctx;
    return (spec->x && exchange_is_disconnected(spec->x)) || clock_now() > spec->render_deadline;
}

/* The index after the last occurrence of `tokens` in the prompt, or the prompt's length. */
static int32_t find_last_end(const struct token_ids *prompt, const struct token_ids *tokens) {
    int32_t end = prompt->n, k = 0, *prefix_len = tokens->n ? xcalloc((size_t)tokens->n, 4) : NULL;
    /* Knuth, Morris and Pratt: prefix_len[i] is the length of the longest proper prefix of tokens
     * that is a suffix of tokens[0..i] */
    for (int32_t i = 1; i < tokens->n; i++) {
        while (k > 0 && tokens->v[i] != tokens->v[k]) k = prefix_len[k - 1];
        k += tokens->v[i] == tokens->v[k];
        prefix_len[i] = k;
    }
    k = 0;
    for (int32_t i = 0; tokens->n && i < prompt->n; i++) {
        while (k > 0 && (k == tokens->n || prompt->v[i] != tokens->v[k])) k = prefix_len[k - 1];
        k += prompt->v[i] == tokens->v[k];
        if (k == tokens->n) end = i + 1;
    }
    free(prefix_len);
    return end;
}

/* For continue_final_message: removes the tokens that the template puts after the last message.
 * Returns the text of this message. */
static const char *prompt_cut_to_final_message(const struct server *s, const json_t *messages,
                                               struct token_ids *prompt) {
    const char *text =
        json_get_string(json_array_get(messages, json_array_size(messages) - 1), "content");
    struct token_ids tokens = {0};
    tokenizer_encode(s->model->tok, text, strlen(text), 0, &tokens);
    prompt->n = find_last_end(prompt, &tokens);
    token_ids_release(&tokens);
    return text;
}

int chat_prompt_render(const struct server *s, json_t *body, struct generation_spec *spec,
                       struct error *err) {
    bool generation = true, continue_final = false;
    json_t *messages = NULL, *kwargs = json_get_nonnull(body, "chat_template_kwargs");
    const char *template = NULL;
    if (messages_read(body, &messages, err) != OK ||
        json_read_string(body, "chat_template", &template, err) != OK ||
        json_read_bool(body, "add_generation_prompt", &generation, err) != OK ||
        json_read_bool(body, "continue_final_message", &continue_final, err) != OK ||
        kwargs_check(kwargs, spec, err) != OK)
        return err->code;
    /* a grammar can force a call even if the template does not support tools */
    bool show_tools = spec->tool_choice != TOOL_CHOICE_NONE && template_has_tools(s);
    spec->request_json = json_pack("{s:O}", "messages", messages);
    spec->prompts = xcalloc(1, sizeof *spec->prompts);
    spec->prompts->may_fail = true;
    spec->n_prompts = 1;
    json_t *extra = template ? go_template_variables(messages) : json_object();
    if (kwargs) json_object_update(extra, kwargs);
    if (spec->render_deadline <= 0) spec->render_deadline = clock_now() + RENDER_SECONDS;
    struct chat_template_input chat = {.messages = messages,
                                       .tools = show_tools ? json_get_nonnull(body, "tools") : NULL,
                                       .extra = extra,
                                       .template = template,
                                       .generation_prompt = generation && !continue_final,
                                       .stop = render_should_stop,
                                       .stop_ctx = spec};
    int rc = chat_template_encode(s->model->tok, &chat, spec->prompts, NULL, err);
    json_decref(extra);
    if (rc == OK) rc = token_ids_check_memory(spec->prompts, err);
    if (rc != OK) return error_wrap(err, "'messages'");
    const char *continued =
        continue_final ? prompt_cut_to_final_message(s, messages, spec->prompts) : NULL;
    reasoning_expect(s, spec, continued);
    return OK;
}

static int prompt_tops_read(const json_t *body, struct generation_spec *spec, struct error *err) {
    int64_t top = 0;
    spec->prompt_tops = json_get_nonnull(body, "prompt_logprobs") &&
                        !json_is_false(json_get_nonnull(body, "prompt_logprobs"));
    if (!spec->prompt_tops) return OK;
    if (json_read_int(body, "prompt_logprobs", 0, ENGINE_TOP_MAX, &top, err) != OK)
        return err->code;
    spec->bad_field = spec->stream ? "prompt_logprobs" : NULL;
    if (spec->stream)
        return error_set(err, ERR_USAGE, "`prompt_logprobs` are not available when `stream=True`.");
    spec->n_prompt_top = (int)top;
    spec->prompt_logprobs = true;
    return OK;
}

/* Reads the fields for log-probabilities and the maximal length of a reply. */
static int chat_limits_read(const struct server *s, const json_t *body,
                            struct generation_spec *spec, struct error *err) {
    int64_t max = s->options->max_tokens, top = 0;
    if (json_read_bool(body, "logprobs", &spec->logprobs, err) != OK ||
        json_read_int(body, "top_logprobs", 0, ENGINE_TOP_MAX, &top, err) != OK ||
        json_read_int(body, "max_tokens", 1, INT32_MAX, &max, err) != OK ||
        json_read_int(body, "max_completion_tokens", 1, INT32_MAX, &max, err) != OK)
        return err->code;
    if (top && !spec->logprobs)
        return error_set(err, ERR_USAGE, "'top_logprobs' requires 'logprobs' to be true");
    spec->n_top = (int)top;
    spec->max_tokens = (int32_t)max;
    return prompt_tops_read(body, spec, err);
}

/* A token in OpenAI's form: {token, logprob, bytes}. */
static json_t *token_logprob_json(const struct server *s, int32_t id, float logprob) {
    struct buf b = {0};
    json_t *bytes = json_array();
    tokenizer_decode_token(s->model->tok, id, true, &b);
    for (size_t i = 0; i < b.len; i++)
        json_array_append_new(bytes, json_integer((uint8_t)b.data[i]));
    buf_release(&b);
    return json_pack("{s:o,s:o,s:o}", "token", json_token_text(s, id), "logprob",
                     json_logprob(logprob), "bytes", bytes);
}

json_t *token_logprobs(const struct generation *g, const struct completion *a, int32_t i) {
    const struct engine_request *r = &a->batch_request.request;
    json_t *v = token_logprob_json(g->s, r->out[i], r->out_logprob[i]), *top = json_array();
    for (int32_t k = 0; k < g->spec.n_top; k++)
        json_array_append_new(top, token_logprob_json(g->s, r->top_ids[i * r->n_top + k],
                                                      r->top_logprob[i * r->n_top + k]));
    json_object_set_new(v, "top_logprobs", top);
    return v;
}

void token_logprobs_write(const struct generation *g, const struct lazy_list *l, struct buf *out) {
    const struct completion *a = &g->completions[l->index];
    buf_puts(out, "[");
    for (int32_t i = l->from; i < l->to; i++)
        if (!lazy_list_add(g, l, token_logprobs(g, a, i), out)) return;
    buf_puts(out, "]");
}

/* The kinds of lazily written lists in these dialects. */
enum { LIST_TOKENS, LIST_PROMPT_TOPS, LIST_LEGACY_LOGPROBS, LIST_LEGACY_LOGPROBS_ECHO };

static json_t *chat_logprobs_json(const struct generation *g, const struct completion *a,
                                  int32_t from, int32_t to) {
    const struct lazy_list l = {.kind = LIST_TOKENS, .index = a->index, .from = from, .to = to};
    if (!g->spec.logprobs) return json_null();
    return json_pack("{s:o,s:n}", "content", lazy_list_placeholder(g, &l), "refusal");
}

static void prompt_top_add(const struct server *s, json_t *tops, int32_t id, float logprob,
                           int rank) {
    char key[16];
    snprintf(key, sizeof key, "%d", id);
    json_object_set_new(tops, key,
                        json_pack("{s:o,s:o,s:o}", "logprob", json_logprob(logprob), "rank",
                                  rank ? json_integer(rank) : json_null(), "decoded_token",
                                  json_token_text(s, id)));
}

/* The alternatives of a prompt token by id, including the token itself, in vLLM's form; null for
 * the first token. The rank of a token outside the top n is unknown. */
static json_t *prompt_tops_json(const struct generation *g, const struct completion *a, int32_t i) {
    const struct engine_request *r = &a->batch_request.request;
    if (i == 0 || !r->prompt_logprob) return json_null();
    const int32_t *ids = r->prompt_top_ids + (int64_t)i * r->n_top;
    const float *logprobs = r->prompt_top_logprob + (int64_t)i * r->n_top;
    json_t *tops = json_object();
    int rank = 0;
    for (int k = r->n_top; k > 0; k--)
        if (ids[k - 1] == r->prompt[i]) rank = k;
    prompt_top_add(g->s, tops, r->prompt[i], r->prompt_logprob[i], rank);
    for (int k = 0; k < g->spec.n_prompt_top; k++)
        if (k + 1 != rank) prompt_top_add(g->s, tops, ids[k], logprobs[k], k + 1);
    return tops;
}

static void prompt_tops_write(const struct generation *g, const struct lazy_list *l,
                              struct buf *out) {
    const struct completion *a = &g->completions[l->index];
    buf_puts(out, "[");
    for (int32_t i = l->from; i < l->to; i++)
        if (!lazy_list_add(g, l, prompt_tops_json(g, a, i), out)) return;
    buf_puts(out, "]");
}

static json_t *prompt_tops_list(const struct generation *g, const struct completion *a) {
    const struct engine_request *r = &a->batch_request.request;
    // no prompt_logprob: the request was cancelled before the prefill
    const struct lazy_list l = {.kind = LIST_PROMPT_TOPS,
                                .index = a->index,
                                .to = r->prompt_logprob ? r->n_prompt : MIN(r->n_prompt, 1)};
    return lazy_list_placeholder(g, &l);
}

static void chat_list_write(const struct generation *g, const struct lazy_list *l,
                            struct buf *out) {
    (l->kind == LIST_TOKENS ? token_logprobs_write : prompt_tops_write)(g, l, out);
}

static json_t *usage_json(const struct generation *g) {
    struct token_usage u = generation_usage(g);
    json_t *v = json_pack("{s:I,s:I,s:I,s:{s:I}}", "prompt_tokens", (json_int_t)u.prompt,
                          "completion_tokens", (json_int_t)u.completion, "total_tokens",
                          (json_int_t)(u.prompt + u.completion), "prompt_tokens_details",
                          "cached_tokens", (json_int_t)u.cached);
    if (g->spec.reasoning_begin)
        json_object_set_new(v, "completion_tokens_details",
                            json_pack("{s:I}", "reasoning_tokens", (json_int_t)u.reasoning));
    return v;
}

/* The object that every reply and chunk consists of. choices: a list, which may be empty; taken
 * over. */
static json_t *envelope(const struct generation *g, const char *object, json_t *choices) {
    json_t *v = json_pack("{s:s,s:s,s:I,s:s,s:s,s:o}", "id", g->id, "object", object, "created",
                          (json_int_t)g->created, "model", g->target.name, "system_fingerprint",
                          g->fingerprint, "choices", choices);
    if (g->spec.stream && g->spec.include_usage) json_object_set_new(v, "usage", json_null());
    if (g->spec.filter) json_object_set_new(v, "shoal", sample_filter_json(g->spec.filter));
    return v;
}

/* extension: the member "shoal" of the choice, or NULL. */
static void extended_chunk_add(const struct generation *g, const struct completion *a,
                               json_t *delta, json_t *logprobs, const char *reason,
                               json_t *extension, struct buf *out) {
    json_t *choices =
        json_pack("[{s:i,s:o,s:o,s:s?,s:o*}]", "index", reply_index(g, a), "delta", delta,
                  "logprobs", logprobs, "finish_reason", reason, "shoal", extension);
    json_t *v = envelope(g, "chat.completion.chunk", choices);
    if (reason) router_report_add(g, v);
    sse_add(g, v, out);
}

static void chunk_add(const struct generation *g, const struct completion *a, json_t *delta,
                      json_t *logprobs, const char *reason, struct buf *out) {
    extended_chunk_add(g, a, delta, logprobs, reason, NULL, out);
}

static void chat_begin(const struct generation *g, struct completion *a, struct buf *out) {
    chunk_add(g, a, json_pack("{s:s,s:s}", "role", "assistant", "content", ""), json_null(), NULL,
              out);
}

static void tool_delta(const struct generation *g, struct completion *a, int i, struct buf *out) {
    struct tool_call *c = &a->tool_calls[i];
    if (!c->name) return;
    if (!c->start_sent)
        chunk_add(g, a,
                  json_pack("{s:[{s:i,s:s,s:s,s:{s:s,s:s}}]}", "tool_calls", "index", i, "id",
                            c->id, "type", "function", "function", "name", c->name, "arguments",
                            ""),
                  json_null(), NULL, out);
    c->start_sent = true;
    size_t end = c->args_end ? c->args_end : a->shown;
    bool none = !c->args && a->done && c->sent == 0;
    if (!none && (!c->args || c->args + c->sent >= end)) return;
    json_t *arguments =
        none ? json_string(NO_ARGUMENTS)
             : json_string_lossy(a->text.data + c->args + c->sent, end - c->args - c->sent);
    chunk_add(g, a,
              json_pack("{s:[{s:i,s:{s:o}}]}", "tool_calls", "index", i, "function", "arguments",
                        arguments),
              json_null(), NULL, out);
    c->sent = none ? strlen(NO_ARGUMENTS) : end - c->args;
}

/* Sends the reasoning, the turns of a team or the steps of an agent, which precede the answer. */
static void reasoning_delta(const struct generation *g, struct completion *a, struct buf *out) {
    size_t n = a->reasoning.len - a->reasoning_sent;
    if (n == 0) return;
    json_t *content = json_string_lossy(a->reasoning.data + a->reasoning_sent, n);
    a->reasoning_sent = a->reasoning.len;
    int32_t from = a->tokens_sent, to = MAX(from, a->n_reasoning_tokens);
    chunk_add(g, a, json_pack("{s:o}", "reasoning_content", content),
              chat_logprobs_json(g, a, from, to), NULL, out);
    a->tokens_sent = to;
}

/* Sends each new step of an agent in a chunk. */
static void steps_delta(const struct generation *g, struct completion *a, struct buf *out) {
    const json_t *step;
    size_t i;
    json_array_foreach (a->steps, i, step)
        extended_chunk_add(g, a, json_object(), json_null(), NULL, json_pack("{s:O}", "step", step),
                           out);
    json_array_clear(a->steps);
}

/* Adds a chunk with content. Without log-probabilities, chunks differ only in the content, so the
 * rest is serialised once per completion. Takes ownership of content and logprobs. */
static void content_chunk_add(const struct generation *g, struct completion *a, json_t *content,
                              json_t *logprobs, struct buf *out) {
    static const char empty_content[] = "\"content\":\"\"";
    if (!json_is_null(logprobs)) {
        chunk_add(g, a, json_pack("{s:o}", "content", content), logprobs, NULL, out);
        return;
    }
    if (!a->chunk.len)
        chunk_add(g, a, json_pack("{s:s}", "content", ""), json_null(), NULL, &a->chunk);
    const char *value = strstr(a->chunk.data, empty_content);
    char *text = json_dumps(content, JSON_ENCODE_ANY);
    CHECK(value && text);
    value +=
        sizeof empty_content - 3; // the two quotes of "" are replaced by the serialised content
    buf_add(out, a->chunk.data, (size_t)(value - a->chunk.data));
    buf_puts(out, text);
    buf_puts(out, value + 2);
    free(text);
    json_decref(content);
}

static void chat_delta(const struct generation *g, struct completion *a, struct buf *out) {
    reasoning_delta(g, a, out);
    steps_delta(g, a, out);
    if (a->content_end > a->sent) {
        json_t *content = json_string_lossy(a->text.data + a->sent, a->content_end - a->sent);
        a->sent = a->content_end;
        int32_t to = completion_tokens_sent(a);
        content_chunk_add(g, a, content, chat_logprobs_json(g, a, a->tokens_sent, to), out);
        a->tokens_sent = to;
    }
    for (int i = 0; i < a->n_tool_calls; i++) tool_delta(g, a, i, out);
}

/* Adds the last chunk, with the log-probabilities of tokens that produced no text. */
static void chat_finish(const struct generation *g, struct completion *a, struct buf *out) {
    int32_t from = a->tokens_sent, to = a->async ? from : completion_tokens_sent(a);
    json_t *extension = a->run ? json_pack("{s:O}", "agent", a->run) : NULL;
    extended_chunk_add(g, a, json_object(),
                       from < to ? chat_logprobs_json(g, a, from, to) : json_null(),
                       completion_finish_reason(a), extension, out);
}

static void usage_end(const struct generation *g, const char *object, struct buf *out) {
    if (g->spec.include_usage) {
        json_t *v = envelope(g, object, json_array());
        json_object_set_new(v, "usage", usage_json(g));
        sse_add(g, v, out);
    }
    buf_puts(out, "data: [DONE]\n\n");
}

static void chat_end(const struct generation *g, struct buf *out) {
    usage_end(g, "chat.completion.chunk", out);
}

static json_t *chat_message(const struct generation *g, const struct completion *a) {
    json_t *calls = json_array();
    for (int i = 0; i < a->n_tool_calls; i++) {
        const struct tool_call *c = &a->tool_calls[i];
        size_t end = c->args_end ? c->args_end : a->shown;
        json_t *args = c->args ? json_string_lossy(a->text.data + c->args, end - c->args)
                               : json_string(NO_ARGUMENTS);
        json_array_append_new(calls,
                              json_pack("{s:s,s:s,s:{s:s,s:o}}", "id", c->id, "type", "function",
                                        "function", "name", c->name, "arguments", args));
    }
    bool forced = g->spec.tool_choice == TOOL_CHOICE_REQUIRED;
    json_t *content = a->content_end == a->content_begin && (a->n_tool_calls || forced)
                          ? json_null()
                          : completion_content_json(a);
    json_t *m = json_pack("{s:s,s:o,s:n}", "role", "assistant", "content", content, "refusal");
    if (a->reasoning.len)
        json_object_set_new(m, "reasoning_content",
                            json_string_lossy(a->reasoning.data, a->reasoning.len));
    if (a->n_tool_calls)
        json_object_set_new(m, "tool_calls", calls);
    else
        json_decref(calls);
    return m;
}

/* {"agent": the run of an agent with its steps}; NULL: the completion is not an agent's. */
static json_t *run_json(const struct completion *a) {
    if (!a->run) return NULL;
    json_t *run = json_copy(a->run);
    if (a->steps) json_object_set(run, "steps", a->steps);
    return json_pack("{s:o}", "agent", run);
}

static json_t *chat_whole(const struct generation *g) {
    json_t *choices = json_array();
    for (int i = 0; i < g->n_choices; i++) {
        const struct completion *a = reply_completion(g, i);
        json_array_append_new(
            choices, json_pack("{s:i,s:o,s:o,s:s,s:o*}", "index", i, "message", chat_message(g, a),
                               "logprobs", chat_logprobs_json(g, a, 0, completion_tokens_kept(a)),
                               "finish_reason", completion_finish_reason(a), "shoal", run_json(a)));
    }
    json_t *v = envelope(g, "chat.completion", choices);
    router_report_add(g, v);
    json_object_set_new(v, "usage", usage_json(g));
    if (g->spec.prompt_tops)
        json_object_set_new(v, "prompt_logprobs", prompt_tops_list(g, g->completions));
    return v;
}

static const struct api_dialect chat_dialect = {.stream_type = "text/event-stream",
                                                .keepalive = ": waiting\n\n",
                                                .write_list = chat_list_write,
                                                .begin = chat_begin,
                                                .delta = chat_delta,
                                                .finish = chat_finish,
                                                .end = chat_end,
                                                .write_reply = chat_whole};

/* the model reference of a body */

/* Reads LoRAX's merged_adapters {ids, weights, merge_strategy} as a weighted sum. */
static int model_ref_from_merged(struct server *s, const json_t *merged, struct model_ref *t,
                                 struct error *err) {
    const json_t *ids = json_get_nonnull(merged, "ids"),
                 *weights = json_get_nonnull(merged, "weights"), *id;
    const char *strategy = "linear";
    struct buf sum = {0};
    size_t i;
    if (json_read_string(merged, "merge_strategy", &strategy, err) != OK) return err->code;
    if (strcmp(strategy, "linear") != 0)
        return error_set(err, ERR_USAGE,
                         "'merge_strategy' is linear in requests; make others with 'shoal adapter "
                         "merge' and load the result");
    if (!json_is_string_array(ids) || json_array_size(ids) == 0 ||
        (weights && json_array_size(weights) != json_array_size(ids)))
        return error_set(err, ERR_USAGE, "'merged_adapters' must have 'ids' and as many 'weights'");
    json_array_foreach (ids, i, id) {
        const json_t *w = json_array_get(weights, i);
        if (weights && !json_is_number(w)) {
            buf_release(&sum);
            return error_set(err, ERR_USAGE, "'weights' must be numbers");
        }
        buf_printf(&sum, "%s%s*%.9f", i ? "+" : "", json_string_value(id),
                   weights ? json_number_value(w) : 1.0);
    }
    int rc = model_ref_resolve(s, sum.data, t, err);
    buf_release(&sum);
    return rc;
}

/* Reads LoRAX's adapter_id: a name, or, with the source "local", the path from which an adapter was
 * loaded. */
static int model_ref_from_lorax(struct server *s, const json_t *parameters, const char *id,
                                struct model_ref *t, struct error *err) {
    static const char *const sources[] = {"hub", "local", "s3", "pbase"};
    const char *source = "hub";
    bool known = false;
    int n, index = 0;
    if (json_read_string(parameters, "adapter_source", &source, err) != OK) return err->code;
    for (size_t i = 0; i < ARRAY_LEN(sources); i++) known |= strcmp(source, sources[i]) == 0;
    if (!known)
        return error_set(err, ERR_USAGE, "'adapter_source' must be hub, local, s3 or pbase");
    struct adapter_entry *v = server_adapters(s, &n);
    while (index < n && strcmp(v[index].path, id) != 0) index++;
    bool by_path = index < n && strcmp(source, "local") == 0;
    int rc = model_ref_resolve(s, by_path ? v[index].name : id, t, err);
    server_adapters_free(v, n);
    return rc;
}

int model_ref_read(struct server *s, const json_t *body, struct model_ref *t, struct error *err) {
    const json_t *lora = json_get_nonnull(body, "lora"),
                 *parameters = json_get_nonnull(body, "parameters"),
                 *merged = json_get_nonnull(parameters, "merged_adapters");
    const char *model = NULL, *id = NULL;
    if (lora) return model_ref_from_list(s, lora, t, err);
    if (json_read_string(body, "model", &model, err) != OK ||
        json_read_string(parameters, "adapter_id", &id, err) != OK)
        return err->code;
    if (merged) return model_ref_from_merged(s, merged, t, err);
    if (id && *id) return model_ref_from_lorax(s, parameters, id, t, err);
    if (auto_model_is(s, model)) return auto_model_ref(s, t, err);
    return model_ref_resolve(s, model, t, err);
}

void generation_handle(struct server *s, struct exchange *x, const struct api_dialect *d,
                       const char *prefix,
                       int (*read)(struct server *s, const json_t *body, struct model_ref *t,
                                   struct generation_spec *spec, struct error *err)) {
    struct generation_spec spec = {0};
    struct model_ref t = {0};
    struct error err;
    json_t *body = request_memory_json(s, x, &err);
    int rc = body ? read(s, body, &t, &spec, &err) : err.code;
    if (rc == OK)
        generation_start(s, x, d, prefix, &t, &spec);
    else
        generation_fail(s, x, &t, &spec, &err);
    json_decref(body);
}

/* Handles a chat with a team, or replies that the team is unknown. False: the model is not a
 * team. */
static bool team_chat_handle(struct server *s, struct exchange *x, json_t *body) {
    struct generation_spec spec = {0};
    struct error err;
    json_t *messages;
    const char *model = json_string_value(json_get_nonnull(body, "model"));
    const struct team_entry *t = team_find(s, model, &err);
    if (!t && err.code == OK) return false;
    int rc = t ? request_fields_check(FIELD_CHAT, body, &err) : err.code;
    if (rc == OK) rc = settings_read(s, body, &spec, &err);
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(filter_fields); i++)
        if (json_get_nonnull(body, filter_fields[i]))
            rc = error_set(&err, ERR_USAGE, "'%s' is for replies of a model, not of a team",
                           filter_fields[i]);
    if (rc == OK) rc = json_read_bool(body, "include_reasoning", &spec.reasoning, &err);
    if (rc == OK) rc = messages_read(body, &messages, &err);
    if (rc == OK) {
        spec.request_json = json_pack("{s:O}", "messages", messages);
        team_chat_start(s, x, &chat_dialect, t, body, &spec);
    } else {
        api_fail_error(x, &err, NULL);
        generation_spec_release(&spec);
    }
    return true;
}

/* Refuses fields that would change the reply of a model and that an agent does not use. */
static int agent_fields_check(const json_t *body, struct error *err) {
    static const char *const used[] = {"model",
                                       "user",
                                       "messages",
                                       "include_reasoning",
                                       "max_tokens",
                                       "n",
                                       "seed",
                                       "stream",
                                       "max_completion_tokens",
                                       "stream_options",
                                       "temperature",
                                       "top_p",
                                       "top_k",
                                       "min_p",
                                       "typical_p",
                                       "repetition_penalty",
                                       "presence_penalty",
                                       "frequency_penalty"};
    int rc = request_fields_check(FIELD_CHAT, body, err);
    for (const struct request_field *f = request_fields; rc == OK && f->name; f++) {
        bool is_used = f->support != FIELD_SUPPORTED || !(f->routes & FIELD_CHAT);
        for (size_t i = 0; i < ARRAY_LEN(used); i++) is_used |= strcmp(used[i], f->name) == 0;
        if (!is_used && json_get_nonnull(body, f->name))
            rc = error_set(err, ERR_USAGE, "'%s' is for replies of a model, not of an agent",
                           f->name);
    }
    return rc;
}

static int agent_chat_read(struct server *s, const struct agent_entry *a, json_t *body,
                           struct generation_spec *spec, struct error *err) {
    json_t *messages;
    spec->reasoning = true;
    agent_fields_apply(a, body);
    if (settings_read(s, body, spec, err) != OK || chat_limits_read(s, body, spec, err) != OK ||
        json_read_bool(body, "include_reasoning", &spec->reasoning, err) != OK ||
        messages_read(body, &messages, err) != OK)
        return err->code;
    spec->request_json = json_pack("{s:O}", "messages", messages);
    return agent_messages_check(messages, err) == OK ? OK : error_wrap(err, "'messages'");
}

/* Handles a chat with an agent, or replies that the agent is unknown. False: the model is not an
 * agent. */
static bool agent_chat_handle(struct server *s, struct exchange *x, json_t *body) {
    struct generation_spec spec = {0};
    struct error err;
    const char *model = json_string_value(json_get_nonnull(body, "model"));
    const struct agent_entry *a = agent_find(s, model, &err);
    if (!a && err.code == OK) return false;
    int rc = a ? agent_fields_check(body, &err) : err.code;
    if (rc == OK) rc = agent_chat_read(s, a, body, &spec, &err);
    if (rc == OK) {
        agent_chat_start(s, x, &chat_dialect, a, &spec);
    } else {
        api_fail_error(x, &err, NULL);
        generation_spec_release(&spec);
    }
    return true;
}

json_t *thinking_variables(bool on) {
    return json_pack("{s:b,s:b}", "enable_thinking", on, "thinking", on);
}

/* Reads which form the reasoning of the reply has; call it before the prompt is rendered. The only
 * effort is "none". *separate: false: the reasoning remains part of the content. */
static int reasoning_read(json_t *body, struct generation_spec *spec, bool *separate,
                          struct error *err) {
    const char *format = "auto";
    spec->reasoning = true;
    if (json_read_bool(body, "include_reasoning", &spec->reasoning, err) != OK ||
        json_read_string(body, "reasoning_format", &format, err) != OK)
        return err->code;
    *separate = strcmp(format, "none") != 0;
    if (*separate && strcmp(format, "auto") != 0 && strcmp(format, "deepseek") != 0)
        return error_set(err, ERR_USAGE, "'reasoning_format' must be none, auto or deepseek");
    if (!json_get_nonnull(body, "reasoning_effort")) return OK;
    if (!json_get_nonnull(body, "chat_template_kwargs"))
        json_object_set_new(body, "chat_template_kwargs", json_object());
    json_t *off = thinking_variables(false);
    json_object_update_missing(json_object_get(body, "chat_template_kwargs"), off);
    json_decref(off);
    return OK;
}

/* The text of a chat's last message; NULL: it has none. */
static const char *last_message_text(const json_t *body) {
    const json_t *messages = json_object_get(body, "messages");
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    return json_string_value(json_object_get(last, "content"));
}

int openai_chat_read(struct server *s, json_t *body, struct model_ref *t,
                     struct generation_spec *spec, struct error *err) {
    bool separate = true;
    int rc = request_fields_check(FIELD_CHAT, body, err);
    if (rc == OK) rc = model_ref_read(s, body, t, err);
    if (rc == OK) rc = chat_template_check(s, body, spec, err);
    if (rc == OK) derived_settings_apply(s, t, body);
    if (rc == OK) rc = settings_read(s, body, spec, err);
    if (rc == OK) rc = chat_limits_read(s, body, spec, err);
    if (rc == OK) rc = format_read(s, body, spec, err);
    if (rc == OK) rc = tool_choice_read(s, body, spec, err);
    if (rc == OK) rc = reasoning_read(body, spec, &separate, err);
    if (rc == OK) rc = chat_prompt_render(s, body, spec, err);
    if (!separate) spec->reasoning_begin = REASONING_NONE;
    return rc == OK ? filter_read(s, body, last_message_text(body), spec, err) : rc;
}

static void chat_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct generation_spec spec = {.x = x};
    struct model_ref t = {0};
    struct error err;
    json_t *body = request_memory_json(ctx, x, &err);
    if (body && (team_chat_handle(s, x, body) || agent_chat_handle(s, x, body))) {
        json_decref(body);
        return;
    }
    int rc = body ? openai_chat_read(s, body, &t, &spec, &err) : err.code;
    if (rc == OK)
        generation_start(s, x, &chat_dialect, "chatcmpl-", &t, &spec);
    else
        generation_fail(s, x, &t, &spec, &err);
    json_decref(body);
}

/* completions */

static int ids_read(const struct server *s, const json_t *list, struct token_ids *out,
                    struct error *err) {
    const json_t *v;
    size_t i;
    json_array_foreach (list, i, v) {
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v) || id < 0 || id >= tokenizer_vocab_size(s->model->tok))
            return error_set(err, ERR_USAGE,
                             "value %zu of a prompt is not one of this model's %d token ids", i,
                             tokenizer_vocab_size(s->model->tok));
        token_ids_add(out, (int32_t)id);
    }
    return OK;
}

static int prompt_read(const struct server *s, const json_t *v, struct token_ids *out,
                       struct error *err) {
    if (json_is_array(v)) return ids_read(s, v, out, err);
    if (!json_is_string(v))
        return error_set(err, ERR_USAGE, "a prompt must be a string or a list of token ids");
    tokenizer_encode(s->model->tok, json_string_value(v), json_string_length(v),
                     TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_BOS, out);
    return OK;
}

int prompts_tokenize(const struct server *s, const json_t *v, int max_prompts,
                     struct token_ids **out, int *n, struct error *err) {
    bool is_list = json_is_array(v) && !json_is_integer(json_array_get(v, 0));
    *n = is_list ? (int)json_array_size(v) : 1;
    if (!v || *n < 1 || *n > max_prompts) {
        *n = 0;
        return error_set(err, ERR_USAGE,
                         "a prompt must be a string, a list of token ids, or a list of 1 to %d of "
                         "those",
                         max_prompts);
    }
    *out = xcalloc((size_t)*n, sizeof **out);
    for (int i = 0; i < *n; i++) (*out)[i].may_fail = true;
    for (int i = 0; i < *n; i++)
        if (prompt_read(s, is_list ? json_array_get(v, (size_t)i) : v, &(*out)[i], err) != OK ||
            token_ids_check_memory(&(*out)[i], err) != OK ||
            ((*out)[i].n == 0 && error_set(err, ERR_USAGE, "prompt %d is empty", i) != OK))
            return err->code;
    return OK;
}

static int completion_limits_read(struct server *s, const json_t *body,
                                  struct generation_spec *spec, struct error *err) {
    int64_t max = 16, logprobs = -1, best_of = spec->n, n = spec->n;
    const char *suffix = NULL;
    if (json_read_int(body, "max_tokens", 0, INT32_MAX, &max, err) != OK ||
        json_read_int(body, "logprobs", 0, ENGINE_TOP_MAX, &logprobs, err) != OK ||
        json_read_int(body, "best_of", 1, MAX_COMPLETIONS, &best_of, err) != OK ||
        json_read_bool(body, "echo", &spec->echo, err) != OK ||
        json_read_string(body, "suffix", &suffix, err) != OK)
        return err->code;
    if (suffix && *suffix)
        return error_set(err, ERR_USAGE,
                         "'suffix' is not supported: no model here fills in middles");
    if (best_of < n || (best_of > n && spec->stream))
        return error_set(err, ERR_USAGE,
                         "'best_of' must not be less than 'n', and is not for streams");
    if (best_of > n) {
        spec->n_best = (int)n;
        spec->n = (int)best_of;
    }
    spec->max_tokens = (int32_t)max;
    spec->logprobs = logprobs >= 0;
    spec->n_top = spec->logprobs ? (int)MAX(logprobs, 1) : 0;
    spec->prompt_logprobs = spec->logprobs && spec->echo;
    if (prompt_tops_read(body, spec, err) != OK) return err->code;
    if (spec->echo && spec->logprobs && max == 1)
        spec->n_stop_ids = 0; // return this token even if it is a stop token
    /* ratings refer to the first completion; with best_of it may not be the returned one */
    if (json_is_string(json_get_nonnull(body, "prompt")) && !spec->n_best)
        spec->request_json = json_pack("{s:O}", "prompt", json_get_nonnull(body, "prompt"));
    spec->bad_field = "prompt";
    int rc = prompts_tokenize(s, json_get_nonnull(body, "prompt"), MAX_PROMPTS, &spec->prompts,
                              &spec->n_prompts, err);
    if (rc == OK) spec->bad_field = NULL;
    return rc;
}

/* Adds an alternative under the token's text. Tokens that are not valid text may have the same
 * text; a second one is added as "token_id:ID". */
static void top_add(const struct server *s, json_t *top, int32_t id, float logprob) {
    json_t *name = json_token_text(s, id);
    const char *key = json_string_value(name);
    char other[32];
    snprintf(other, sizeof other, "token_id:%d", id);
    if (json_object_get(top, key)) key = other;
    json_object_set_new(top, key, json_logprob(logprob));
    json_decref(name);
}

/* A token of the prompt (if it is echoed) or of its completion; the prompt's tokens come first. */
struct scored_token {
    int32_t id;
    float logprob;
    const int32_t *top_ids; /* [n_top]; NULL: unknown, as for the first token of the prompt */
    const float *top;
};

static struct scored_token scored_token_get(const struct completion *a, int32_t i, bool prompt) {
    const struct engine_request *r = &a->batch_request.request;
    int64_t n = r->n_top;
    if (prompt && i < r->n_prompt && !r->prompt_logprob) // cancelled before the prefill
        return (struct scored_token){.id = r->prompt[i]};
    if (prompt && i < r->n_prompt)
        return (struct scored_token){r->prompt[i], r->prompt_logprob[i],
                                     i && n ? r->prompt_top_ids + i * n : NULL,
                                     n ? r->prompt_top_logprob + i * n : NULL};
    if (prompt) i -= r->n_prompt;
    return (struct scored_token){r->out[i], r->out_logprob[i], r->top_ids + i * n,
                                 r->top_logprob + i * n};
}

static json_t *scored_token_tops(const struct generation *g, const struct scored_token *t) {
    json_t *tops = json_object();
    bool has = false;
    for (int32_t k = 0; k < g->spec.n_top; k++) {
        top_add(g->s, tops, t->top_ids[k], t->top[k]);
        has |= t->top_ids[k] == t->id;
    }
    if (!has) top_add(g->s, tops, t->id, t->logprob);
    return tops;
}

static json_int_t token_characters(const struct server *s, int32_t id) {
    struct buf text = {0};
    json_int_t n = 0;
    tokenizer_decode_token(s->model->tok, id, false, &text);
    for (size_t i = 0; i < text.len; i++) n += ((uint8_t)text.data[i] & 0xC0) != 0x80;
    buf_release(&text);
    return n;
}

enum { SCORED_TOKENS, SCORED_VALUES, SCORED_TOPS, SCORED_OFFSETS, SCORED_LISTS };

static json_t *scored_token_json(const struct generation *g, const struct scored_token *t,
                                 int which, json_int_t *offset) {
    json_int_t start = *offset;
    if (which == SCORED_TOKENS) return json_token_text(g->s, t->id);
    if (which == SCORED_VALUES) return t->top_ids ? json_logprob(t->logprob) : json_null();
    if (which == SCORED_TOPS) return t->top_ids ? scored_token_tops(g, t) : json_null();
    *offset += token_characters(g->s, t->id);
    return json_integer(start);
}

/* Writes the four lists item by item, so that no list is in memory as a tree of JSON values. */
static void legacy_logprobs_write(const struct generation *g, const struct lazy_list *l,
                                  struct buf *out) {
    static const char *const names[SCORED_LISTS] = {"tokens", "token_logprobs", "top_logprobs",
                                                    "text_offset"};
    const struct completion *a = &g->completions[l->index];
    bool prompt = l->kind == LIST_LEGACY_LOGPROBS_ECHO;
    json_int_t offset = l->offset;
    for (int which = 0; which < SCORED_LISTS; which++) {
        buf_printf(out, "%s\"%s\":[", which ? "]," : "{", names[which]);
        for (int32_t i = l->from; i < l->to; i++) {
            struct scored_token t = scored_token_get(a, i, prompt);
            if (!lazy_list_add(g, l, scored_token_json(g, &t, which, &offset), out)) return;
        }
    }
    buf_puts(out, "]}");
}

static void completion_list_write(const struct generation *g, const struct lazy_list *l,
                                  struct buf *out) {
    (l->kind == LIST_PROMPT_TOPS ? prompt_tops_write : legacy_logprobs_write)(g, l, out);
}

/* The log-probabilities of the completion's tokens from … to - 1, after those of the prompt if
 * `prompt`. */
static json_t *completion_logprobs(const struct generation *g, const struct completion *a,
                                   int32_t from, int32_t to, bool prompt, json_int_t *offset) {
    const struct engine_request *r = &a->batch_request.request;
    prompt = prompt && r->prompt_logprob; // NULL: cancelled before the prefill
    struct lazy_list l = {.kind = prompt ? LIST_LEGACY_LOGPROBS_ECHO : LIST_LEGACY_LOGPROBS,
                          .index = a->index,
                          .from = from,
                          .to = to + (prompt ? r->n_prompt : 0),
                          .offset = *offset};
    for (int32_t i = l.from; i < l.to; i++)
        *offset += token_characters(g->s, scored_token_get(a, i, prompt).id);
    return lazy_list_placeholder(g, &l);
}

/* Appends the text of the prompt, if it is echoed. */
static void echo_add(const struct generation *g, const struct completion *a, struct buf *out) {
    const struct token_ids *p = &g->spec.prompts[a->prompt];
    if (g->spec.echo) tokenizer_decode(g->s->model->tok, p->v, p->n, false, out);
}

/* The finish reason; also "stop" for a completion that ends with the end-of-text token. */
static const char *completion_reason(const struct generation *g, const struct completion *a) {
    const struct engine_request *r = &a->batch_request.request;
    bool eos = a->done && r->n_out > 0 && r->out[r->n_out - 1] == tokenizer_eos(g->s->model->tok);
    return eos ? "stop" : completion_finish_reason(a);
}

static json_t *completion_choice(int index, json_t *text, json_t *logprobs, const char *reason) {
    return json_pack("{s:i,s:o,s:o,s:s?}", "index", index, "text", text, "logprobs", logprobs,
                     "finish_reason", reason);
}

static json_t *choice_whole(const struct generation *g, const struct completion *a, int index) {
    struct buf text = {0};
    json_int_t offset = 0;
    bool with_prompt = g->spec.echo && g->spec.logprobs;
    /* clients that read a prompt's log-probabilities expect those of the token after it too */
    int32_t to = with_prompt ? a->n_decoded : completion_tokens_kept(a);
    echo_add(g, a, &text);
    buf_add(&text, a->text.data, a->content_end);
    json_t *v = completion_choice(
        index, json_string_lossy(text.data, text.len),
        g->spec.logprobs ? completion_logprobs(g, a, 0, to, with_prompt, &offset) : json_null(),
        completion_reason(g, a));
    if (g->spec.prompt_tops) json_object_set_new(v, "prompt_logprobs", prompt_tops_list(g, a));
    buf_release(&text);
    return v;
}

static double mean_logprob(const struct completion *a) {
    const struct engine_request *r = &a->batch_request.request;
    double sum = 0;
    for (int32_t i = 0; i < r->n_out; i++) sum += (double)r->out_logprob[i];
    return r->n_out ? sum / r->n_out : 0;
}

/* Appends the n_best completions of a prompt with the highest mean log-probability, the best
 * first. */
static void choices_best(const struct generation *g, int prompt, json_t *choices) {
    const struct completion *all = g->completions + (ptrdiff_t)prompt * g->spec.n;
    bool taken[MAX_COMPLETIONS] = {false};
    for (int k = 0; k < g->spec.n_best; k++) {
        int best = -1;
        for (int i = 0; i < g->spec.n; i++)
            if (!taken[i] && (best < 0 || mean_logprob(&all[i]) > mean_logprob(&all[best])))
                best = i;
        taken[best] = true;
        json_array_append_new(choices, choice_whole(g, &all[best], prompt * g->spec.n_best + k));
    }
}

static json_t *completion_whole(const struct generation *g) {
    json_t *choices = json_array();
    for (int i = 0; g->spec.n_best && i < g->spec.n_prompts; i++) choices_best(g, i, choices);
    for (int i = 0; !g->spec.n_best && i < g->n_choices; i++)
        json_array_append_new(choices, choice_whole(g, reply_completion(g, i), i));
    json_t *v = envelope(g, "text_completion", choices);
    router_report_add(g, v);
    json_object_set_new(v, "usage", usage_json(g));
    return v;
}

static void completion_chunk(const struct generation *g, const struct completion *a, json_t *text,
                             json_t *logprobs, const char *reason, struct buf *out) {
    json_t *choice = completion_choice(reply_index(g, a), text, logprobs, reason);
    json_t *v = envelope(g, "text_completion", json_pack("[o]", choice));
    if (reason) router_report_add(g, v);
    sse_add(g, v, out);
}

/* The echoed prompt is sent with the first content, when its log-probabilities are known. */
static void completion_delta(const struct generation *g, struct completion *a, struct buf *out) {
    bool first = g->spec.echo && !a->finished && a->tokens_sent == 0 && a->sent == 0;
    if (a->content_end == a->sent && !(first && a->done)) return;
    struct buf text = {0};
    if (first) echo_add(g, a, &text);
    buf_add(&text, a->text.data + a->sent, a->content_end - a->sent);
    a->sent = a->content_end;
    int32_t to = completion_tokens_sent(a);
    json_t *logprobs = g->spec.logprobs
                           ? completion_logprobs(g, a, a->tokens_sent, to,
                                                 first && g->spec.prompt_logprobs, &a->offset)
                           : json_null();
    completion_chunk(g, a, json_string_lossy(text.data, text.len), logprobs, NULL, out);
    a->tokens_sent = to;
    buf_release(&text);
}

static void completion_finish(const struct generation *g, struct completion *a, struct buf *out) {
    int32_t from = a->tokens_sent, to = completion_tokens_sent(a);
    bool more = g->spec.logprobs && from < to;
    json_t *logprobs = more ? completion_logprobs(g, a, from, to, false, &a->offset) : json_null();
    completion_chunk(g, a, json_string(""), logprobs, completion_reason(g, a), out);
}

static void completion_end(const struct generation *g, struct buf *out) {
    usage_end(g, "text_completion", out);
}

static const struct api_dialect completion_dialect = {.stream_type = "text/event-stream",
                                                      .keepalive = ": waiting\n\n",
                                                      .write_list = completion_list_write,
                                                      .delta = completion_delta,
                                                      .finish = completion_finish,
                                                      .end = completion_end,
                                                      .write_reply = completion_whole};

int openai_completion_read(struct server *s, const json_t *body, struct model_ref *t,
                           struct generation_spec *spec, struct error *err) {
    int rc = request_fields_check(FIELD_COMPLETION, body, err);
    if (rc == OK) rc = model_ref_read(s, body, t, err);
    if (rc == OK) rc = settings_read(s, body, spec, err);
    if (rc == OK) rc = format_read(s, body, spec, err);
    if (rc == OK) rc = completion_limits_read(s, body, spec, err);
    const char *prompt = json_string_value(json_object_get(body, "prompt"));
    return rc == OK ? filter_read(s, body, prompt, spec, err) : rc;
}

static void completion_handle(void *ctx, struct exchange *x) {
    generation_handle(ctx, x, &completion_dialect, "cmpl-", openai_completion_read);
}

/* embeddings */

struct openai_embedding {
    struct token_ids *texts;
    int n, dims;
    float *v; /* [n][D] */
    bool base64;
    const char *bad_field; /* the field that an error is about, or NULL */
};

static int embedding_read(const struct server *s, const json_t *body, struct openai_embedding *e,
                          struct error *err) {
    const char *format = "float";
    int64_t dims = s->model->config.d_model;
    if (json_read_string(body, "encoding_format", &format, err) != OK ||
        json_read_int(body, "dimensions", 1, s->model->config.d_model, &dims, err) != OK)
        return err->code;
    e->base64 = strcmp(format, "base64") == 0;
    e->dims = (int)dims;
    if (!e->base64 && strcmp(format, "float") != 0)
        return error_set(err, ERR_USAGE, "'encoding_format' must be float or base64");
    e->bad_field = "input";
    return prompts_tokenize(s, json_get_nonnull(body, "input"), MAX_INPUTS, &e->texts, &e->n, err);
}

/* The number of texts that are embedded at once: those within EMBED_BATCH_TOKENS, about one or two
 * steps of the engine, but at least one. */
static int embed_batch_size(const struct token_seq *seqs, int n) {
    int64_t tokens = 0;
    int k = 0;
    while (k < n && (k == 0 || tokens + seqs[k].n <= EMBED_BATCH_TOKENS)) tokens += seqs[k++].n;
    return k;
}

int embed_texts(struct server *s, struct exchange *x, const struct model_ref *t,
                const struct token_ids *texts, int n, float **out, struct error *err) {
    struct token_seq *seqs = xcalloc((size_t)n, sizeof *seqs);
    size_t d = (size_t)s->model->config.d_model;
    if (t->n > 1 || t->is_auto) {
        free(seqs);
        return error_set(err, ERR_USAGE,
                         "'model' must be one adapter, not a mix or auto, for embeddings");
    }
    for (int i = 0; i < n; i++) seqs[i] = (struct token_seq){texts[i].v, texts[i].n};
    if (request_memory_reserve_list(s, x, (int64_t)n * (int64_t)d, sizeof **out + JSON_REAL_BYTES,
                                    "input", err) != OK ||
        !(*out = try_calloc((size_t)n * d, sizeof **out, err))) {
        free(seqs);
        return err->code;
    }
    struct adapter *a = t->n ? t->terms[0].adapter : NULL;
    int rc = OK;
    for (int i = 0, k; i < n && rc == OK; i += k) {
        k = embed_batch_size(seqs + i, n - i);
        if (exchange_is_disconnected(x))
            rc = error_set(err, ERR_STATE, "the client has disconnected");
        else
            rc = batcher_embed(s->batcher, seqs + i, k, a, *out + (size_t)i * d, err);
    }
    free(seqs);
    return rc;
}

void embedding_truncate(float *v, int dims) {
    double sum = 0;
    for (int i = 0; i < dims; i++) sum += (double)v[i] * (double)v[i];
    float scale = sum > 0 ? (float)(1 / sqrt(sum)) : 0;
    for (int i = 0; i < dims; i++) v[i] *= scale;
}

static json_t *embedding_value(const float *v, int dims, bool base64) {
    json_t *list;
    if (base64) {
        size_t bytes = sizeof *v * (size_t)dims;
        size_t room = sodium_base64_ENCODED_LEN(bytes, sodium_base64_VARIANT_ORIGINAL);
        char *text = xmalloc(room);
        sodium_bin2base64(text, room, (const unsigned char *)v, bytes,
                          sodium_base64_VARIANT_ORIGINAL);
        list = json_string(text);
        free(text);
        return list;
    }
    list = json_array();
    for (int i = 0; i < dims; i++) json_array_append_new(list, json_real((double)v[i]));
    return list;
}

static json_t *embedding_reply(const struct server *s, const struct model_ref *t,
                               const struct openai_embedding *e) {
    json_t *data = json_array();
    int64_t tokens = 0;
    for (int i = 0; i < e->n; i++) {
        float *v = e->v + (int64_t)i * s->model->config.d_model;
        embedding_truncate(v, e->dims);
        tokens += e->texts[i].n;
        json_array_append_new(data, json_pack("{s:s,s:i,s:o}", "object", "embedding", "index", i,
                                              "embedding", embedding_value(v, e->dims, e->base64)));
    }
    return json_pack("{s:s,s:o,s:s,s:{s:I,s:I}}", "object", "list", "data", data, "model", t->name,
                     "usage", "prompt_tokens", (json_int_t)tokens, "total_tokens",
                     (json_int_t)tokens);
}

static void embedding_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct openai_embedding e = {0};
    struct model_ref t = {0};
    struct error err;
    json_t *body = request_memory_json(ctx, x, &err);
    int rc = body ? request_fields_check(FIELD_EMBEDDING, body, &err) : err.code;
    if (rc == OK) rc = model_ref_read(s, body, &t, &err);
    if (rc == OK) rc = embedding_read(s, body, &e, &err);
    if (rc == OK) e.bad_field = NULL;
    if (rc == OK) rc = embed_texts(s, x, &t, e.texts, e.n, &e.v, &err);
    if (rc == OK) {
        request_metrics_add_prompts(s, x, &t, e.texts, e.n);
        exchange_reply_json(x, 200, embedding_reply(s, &t, &e));
    } else
        api_fail_error(x, &err, e.bad_field);
    for (int i = 0; i < e.n; i++) token_ids_release(&e.texts[i]);
    free(e.texts);
    free(e.v);
    model_ref_release(&t);
    json_decref(body);
}

/* models */

/* The permissions of a model, which OpenAI has removed and vLLM still has. */
static json_t *permission_json(const char *model, int64_t created) {
    char *id = xasprintf("modelperm-%s", model);
    json_t *v =
        json_pack("{s:s,s:s,s:I,s:b,s:b,s:b,s:b,s:b,s:b,s:s,s:n,s:b}", "id", id, "object",
                  "model_permission", "created", (json_int_t)created, "allow_create_engine", 0,
                  "allow_sampling", 1, "allow_logprobs", 1, "allow_search_indices", 0, "allow_view",
                  1, "allow_fine_tuning", 0, "organization", "*", "group", "is_blocking", 0);
    free(id);
    return v;
}

static json_t *model_card(struct server *s, const char *id, const char *root, const char *parent,
                          int64_t created) {
    json_t *path = json_from_path(root);
    return json_pack("{s:s,s:s,s:I,s:s,s:o,s:s?,s:i,s:[o]}", "id", id, "object", "model", "created",
                     (json_int_t)created, "owned_by", "vllm", "root", path, "parent", parent,
                     "max_model_len", base_max_len(s), "permission", permission_json(id, created));
}

/* Adds the cards of a base under all its names, and those of its adapters. */
static void model_cards_add(struct server *s, json_t *data) {
    int n;
    struct adapter_entry *v = server_adapters(s, &n);
    json_array_append_new(data, model_card(s, s->name, s->path, NULL, s->started));
    for (int i = 0; i < s->options->names.n; i++)
        if (strcmp(s->options->names.v[i], s->name) != 0)
            json_array_append_new(data,
                                  model_card(s, s->options->names.v[i], s->path, NULL, s->started));
    for (int i = 0; i < n; i++)
        json_array_append_new(data, model_card(s, v[i].name, v[i].path, s->name, v[i].created));
    server_adapters_free(v, n);
}

static void models_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx, *base;
    json_t *data = json_array();
    for (int i = 0; (base = base_at(s, i)); i++) model_cards_add(base, data);
    if (auto_model_exists(s))
        json_array_append_new(data, model_card(s, AUTO_MODEL, s->path, s->name, s->started));
    if (sleep_model_exists(s, x))
        json_array_append_new(data, model_card(s, "sleep", s->path, s->name, s->started));
    for (int i = 0; i < s->n_teams; i++) {
        char *id = xasprintf("team:%s", s->teams[i].name);
        json_array_append_new(data, model_card(s, id, s->path, s->name, s->started));
        free(id);
    }
    for (int i = 0; i < s->n_agents; i++) {
        char *id = xasprintf("agent:%s", s->agents[i].name);
        json_array_append_new(data, model_card(s, id, s->path, s->name, s->started));
        free(id);
    }
    const char *chain;
    for (int i = 0; (chain = fallback_name_at(s, i)); i++)
        if (fallback_is_only(s, chain))
            json_array_append_new(data, model_card(s, chain, s->path, NULL, s->started));
    exchange_reply_json(x, 200, json_pack("{s:s,s:o}", "object", "list", "data", data));
}

/* The card of a base that is loaded on demand, or of an adapter of it; it need not be loaded. */
static json_t *base_card(struct server *s, const char *id) {
    int n, index = 0;
    struct adapter_entry *v = server_adapters(s, &n);
    const char *colon = strpbrk(id, ":@");
    while (index < n && strcmp(v[index].name, id) != 0 &&
           !(colon && strcmp(v[index].name, colon + 1) == 0))
        index++;
    json_t *card = index < n ? model_card(s, id, v[index].path, s->name, v[index].created)
                             : model_card(s, id, s->path, NULL, s->started);
    server_adapters_free(v, n);
    return card;
}

static void model_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const char *id = exchange_wildcard(x);
    struct model_ref t;
    struct error err = {0};
    if (auto_model_is(s, id) || team_find(s, id, &err) || (!err.code && agent_find(s, id, &err)) ||
        (!err.code && fallback_is_only(s, id))) {
        exchange_reply_json(x, 200, model_card(s, id, s->path, s->name, s->started));
        return;
    }
    if (!err.code && base_find(s, id) != s) {
        exchange_reply_json(x, 200, base_card(base_find(s, id), id));
        return;
    }
    if (err.code || model_ref_resolve(s, id, &t, &err) != OK) {
        api_fail_error(x, &err, "model");
        return;
    }
    int n, index = 0;
    struct adapter_entry *v = server_adapters(s, &n);
    while (index < n && strcmp(v[index].name, t.label) != 0) index++;
    json_t *card;
    if (t.n == 0)
        card = model_card(s, id, s->path, NULL, s->started);
    else if (t.n == 1 && index < n)
        card = model_card(s, id, v[index].path, s->name, v[index].created);
    else // a mix is not listed
        card = model_card(s, id, id, s->name, s->started);
    exchange_reply_json(x, 200, card);
    server_adapters_free(v, n);
    model_ref_release(&t);
}

static const struct http_route routes[] = {
    {"POST", "/v1/chat/completions", SCOPE_CHAT | ROUTE_BASE, chat_handle},
    {"POST", "/v1/completions", SCOPE_CHAT | ROUTE_BASE, completion_handle},
    {"POST", "/v1/embeddings", SCOPE_CHAT | ROUTE_SLOW | ROUTE_BASE, embedding_handle},
    {"GET", "/v1/models", SCOPE_CHAT, models_handle},
    {"GET", "/v1/models/*", SCOPE_CHAT, model_handle},
    {0},
};

const struct server_module openai_module = {.routes = routes};
