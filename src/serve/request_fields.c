/*
 * request_fields: one row per field; a field that some routes support and others do not has a row
 * for each.
 *
 * A field that would change the reply and cannot be supported is rejected, because the client
 * relies on it. A field that concerns only the server (caching, priorities, storing, billing) is
 * accepted and has no effect. Null counts as absent.
 */
#define _GNU_SOURCE
#include "serve/request_fields.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { C = FIELD_CHAT, P = FIELD_COMPLETION, E = FIELD_EMBEDDING, CP = C | P, ALL = C | P | E };

#define YES(name, routes)                                                                          \
    { name, routes, FIELD_SUPPORTED, NULL, NULL }
#define NO_EFFECT(name, routes)                                                                    \
    { name, routes, FIELD_IGNORED, NULL, NULL }
#define NO(name, routes, neutral, why)                                                             \
    { name, routes, FIELD_REJECTED, why, neutral }

const struct request_field request_fields[] = {
    YES("model", ALL),
    YES("user", CP),
    NO_EFFECT("user", E),
    YES("lora", ALL),
    YES("parameters", ALL),
    /* input */
    YES("messages", C),
    YES("prompt", P),
    YES("input", E),
    YES("tools", C),
    YES("tool_choice", C),
    YES("parallel_tool_calls", C),
    YES("add_generation_prompt", C),
    YES("continue_final_message", C),
    YES("chat_template", C),
    YES("chat_template_kwargs", C),
    YES("choices", C),
    YES("include_reasoning", C),
    YES("echo", P),
    /* output */
    YES("max_tokens", CP),
    YES("max_completion_tokens", C),
    YES("n", CP),
    YES("best_of", P),
    YES("temperature", CP),
    YES("top_p", CP),
    YES("top_k", CP),
    YES("min_p", CP),
    YES("typical_p", CP),
    YES("repetition_penalty", CP),
    YES("presence_penalty", CP),
    YES("frequency_penalty", CP),
    YES("logit_bias", CP),
    YES("seed", CP),
    YES("stop", CP),
    YES("stop_token_ids", CP),
    YES("ignore_eos", CP),
    YES("stream", CP),
    YES("stream_options", CP),
    YES("logprobs", CP),
    YES("top_logprobs", C),
    YES("prompt_logprobs", CP),
    YES("response_format", CP),
    YES("structured_outputs", CP),
    YES("guided_json", CP),
    YES("guided_regex", CP),
    YES("guided_grammar", CP),
    YES("guided_choice", CP),
    YES("encoding_format", E),
    YES("dimensions", E),
    /* internal to the server */
    NO_EFFECT("metadata", ALL),
    NO_EFFECT("store", CP),
    NO_EFFECT("service_tier", CP),
    NO_EFFECT("safety_identifier", ALL),
    NO_EFFECT("prompt_cache_key", CP),
    NO_EFFECT("prompt_cache_retention", CP),
    NO_EFFECT("prediction", C),
    NO_EFFECT("cache_prompt", CP),
    NO_EFFECT("cache_salt", ALL),
    NO_EFFECT("id_slot", CP),
    NO_EFFECT("timings_per_token", CP),
    NO_EFFECT("priority", ALL),
    NO_EFFECT("request_id", ALL),
    NO_EFFECT("keep_alive", ALL),
    NO_EFFECT("guided_decoding_backend", CP),
    NO_EFFECT("chat_template_content_format", C),
    NO_EFFECT("spaces_between_special_tokens", CP),
    /* fields that would change the reply */
    NO("functions", C, "[]", "it is the old form of 'tools'; use those"),
    NO("function_call", C, "[\"none\", \"auto\"]", "it is the old form of 'tool_choice'; use that"),
    NO("audio", C, "[]", "models here write text only"),
    NO("modalities", C, "[[\"text\"]]", "models here write text only"),
    NO("web_search_options", C, "[]", "the server does not search the web"),
    NO("documents", C, "[[]]", "put documents into 'messages'"),
    NO("reasoning_effort", C, "[\"none\"]", "no model here has efforts of reasoning"),
    NO("thinking", C, "[]", "say it in 'chat_template_kwargs'"),
    NO("enable_thinking", C, "[]", "say it in 'chat_template_kwargs'"),
    NO("verbosity", C, "[\"medium\"]", "no model here has verbosities"),
    NO("max_tool_calls", C, "[]", "set 'parallel_tool_calls' to false for one call"),
    NO("suffix", P, "[\"\"]", "no model here fills in middles"),
    NO("prompt_embeds", P, "[]", "prompts are text or token ids"),
    NO("best_of", C, "[1]", "it is of /v1/completions"),
    NO("echo", C, "[false]", "it is of /v1/completions"),
    NO("min_tokens", CP, "[0]", "set 'ignore_eos' for a reply of 'max_tokens'"),
    NO("length_penalty", CP, "[1]", "there is no beam search"),
    NO("early_stopping", CP, "[false]", "there is no beam search"),
    NO("use_beam_search", CP, "[false]", "there is no beam search"),
    NO("bad_words", CP, "[[]]", "use 'logit_bias' with -100"),
    NO("allowed_token_ids", CP, "[]", "use a grammar"),
    NO("logits_processors", CP, "[[]]", "programs are not run by requests"),
    NO("include_stop_str_in_output", CP, "[false]", "a stop text is left out"),
    NO("skip_special_tokens", CP, "[true]", "special tokens are left out of the text"),
    NO("detokenize", CP, "[true]", "replies are text"),
    NO("truncate_prompt_tokens", ALL, "[]", "a prompt that is too long is refused"),
    NO("add_special_tokens", C, "[false]", "the chat template adds them"),
    NO("add_special_tokens", P | E, "[true]", "send token ids for a prompt without them"),
    NO("return_token_ids", CP, "[false]", "/tokenize has them"),
    NO("return_tokens_as_token_ids", CP, "[false]", "log-probabilities are listed by text"),
    NO("guided_whitespace_pattern", CP, "[]", "white space follows the grammar"),
    NO("mm_processor_kwargs", CP, "[{}]", "models here read text only"),
    NO("kv_transfer_params", CP, "[]", "the KV cache stays in this server"),
    NO("vllm_xargs", CP, "[{}]", "nothing of it is known here"),
    NO("grammar", CP, "[\"\"]", "use 'guided_grammar'"),
    NO("json_schema", CP, "[]", "use 'response_format'"),
    NO("n_predict", CP, "[]", "use 'max_tokens'"),
    NO("n_probs", CP, "[0]", "use 'logprobs'"),
    NO("repeat_penalty", CP, "[1]", "use 'repetition_penalty'"),
    NO("repeat_last_n", CP, "[]", "penalties apply to the whole text here"),
    NO("samplers", CP, "[]", "the order of samplers is fixed"),
    NO("mirostat", CP, "[0]", "the engine does not have this sampler"),
    NO("dry_multiplier", CP, "[0]", "the engine does not have this sampler"),
    NO("xtc_probability", CP, "[0]", "the engine does not have this sampler"),
    NO("dynatemp_range", CP, "[0]", "the engine does not have this sampler"),
    NO("tfs_z", CP, "[1]", "the engine does not have this sampler"),
    NO("top_a", CP, "[0]", "the engine does not have this sampler"),
    NO("options", CP, "[{}]", "it is of Ollama's /api/chat"),
    {0},
};

static const struct request_field *field_find(enum field_route route, const char *name) {
    for (const struct request_field *f = request_fields; f->name; f++)
        if ((f->routes & (int)route) && strcmp(f->name, name) == 0) return f;
    return NULL;
}

bool request_field_is_known(const char *name) {
    return field_find(FIELD_CHAT, name) || field_find(FIELD_COMPLETION, name) ||
           field_find(FIELD_EMBEDDING, name);
}

/* 1 and 1.0 are the same number. */
static bool values_same(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static bool asks_nothing(const struct request_field *f, const json_t *v) {
    json_t *list = json_loads(f->neutral, 0, NULL), *item;
    bool same = false;
    size_t i;
    CHECK(json_is_array(list));
    json_array_foreach (list, i, item) same = same || values_same(item, v);
    json_decref(list);
    return same;
}

static int field_unknown(enum field_route route, const char *name, struct error *err) {
    enum { MOST = 256 };
    const char *names[MOST];
    int n = 0;
    for (const struct request_field *f = request_fields; f->name; f++)
        if ((f->routes & (int)route) && f->use == FIELD_SUPPORTED && n < MOST) names[n++] = f->name;
    const char *near = strlen(name) < 64 ? name_suggest(names, n, name) : NULL;
    if (near)
        return error_set(err, ERR_USAGE,
                         "'%.80s' is not a field of this request; did you mean '%s'?", name, near);
    return error_set(err, ERR_USAGE, "'%.80s' is not a field of this request", name);
}

int request_fields_check(enum field_route route, const json_t *body, struct error *err) {
    const char *name;
    json_t *v;
    json_object_foreach ((json_t *)(uintptr_t)body, name, v) {
        const struct request_field *f = field_find(route, name);
        if (json_is_null(v)) continue;
        if (!f) return field_unknown(route, name, err);
        if (f->use == FIELD_REJECTED && !asks_nothing(f, v))
            return error_set(err, ERR_USAGE, "'%s' is not supported: %s", name, f->why);
    }
    return OK;
}

/* docs */

static void names_list(struct buf *out, int routes, enum field_support use) {
    const char *between = "";
    for (const struct request_field *f = request_fields; f->name; f++) {
        if (f->use != use || f->routes != routes) continue;
        buf_printf(out, "%s`%s`", between, f->name);
        between = ", ";
    }
}

static const struct {
    int routes;
    const char *name;
} groups[] = {{ALL, "all three"}, {CP, "chat, completions"}, {P | E, "completions, embeddings"},
              {C, "chat"},        {P, "completions"},        {E, "embeddings"}};

static const char *group_name(int routes) {
    for (size_t i = 0; i < ARRAY_LEN(groups); i++)
        if (groups[i].routes == routes) return groups[i].name;
    check_failed(__FILE__, __LINE__, "a field of routes without a name");
}

static void names_table(struct buf *out, const char *title, enum field_support use) {
    buf_printf(out, "| %s | fields |\n|---|---|\n", title);
    for (size_t i = 0; i < ARRAY_LEN(groups); i++) {
        struct buf list = {0};
        names_list(&list, groups[i].routes, use);
        if (list.len) buf_printf(out, "| %s | %s |\n", groups[i].name, list.data);
        buf_release(&list);
    }
    buf_puts(out, "\n");
}

void request_fields_markdown(struct buf *out) {
    names_table(out, "honoured by", FIELD_SUPPORTED);
    names_table(out, "without effect in", FIELD_IGNORED);
    buf_puts(out, "| refused | in | unless it is | because |\n|---|---|---|---|\n");
    for (const struct request_field *f = request_fields; f->name; f++) {
        if (f->use != FIELD_REJECTED) continue;
        json_t *list = json_loads(f->neutral, 0, NULL), *v;
        size_t i;
        buf_printf(out, "| `%s` | %s | null", f->name, group_name(f->routes));
        json_array_foreach (list, i, v) {
            char *text = json_dumps(v, JSON_ENCODE_ANY);
            buf_printf(out, ", `%s`", text);
            free(text);
        }
        buf_printf(out, " | %s |\n", f->why);
        json_decref(list);
    }
}

/* reading */

json_t *json_get_nonnull(const json_t *o, const char *key) {
    json_t *v = json_object_get(o, key);
    return v && !json_is_null(v) ? v : NULL;
}

int json_read_number(const json_t *o, const char *key, double lo, double hi, double *out,
                     struct error *err) {
    const json_t *v = json_get_nonnull(o, key);
    double x = v ? json_number_value(v) : lo;
    if (!v) return OK;
    if (!json_is_number(v) || !(x >= lo && x <= hi))
        return error_set(err, ERR_USAGE, "'%s' must be a number from %g to %g", key, lo, hi);
    *out = x;
    return OK;
}

int json_read_int(const json_t *o, const char *key, int64_t lo, int64_t hi, int64_t *out,
                  struct error *err) {
    const json_t *v = json_get_nonnull(o, key);
    if (!v) return OK;
    /* clients in languages with a single number type send 16.0 */
    double x = json_number_value(v);
    bool whole = json_is_integer(v) || (json_is_real(v) && fabs(x) < 9e18 && x == floor(x));
    int64_t n = json_is_integer(v) ? json_integer_value(v) : whole ? (int64_t)x : 0;
    if (!whole || n < lo || n > hi)
        return error_set(err, ERR_USAGE, "'%s' must be a whole number from %lld to %lld", key,
                         (long long)lo, (long long)hi);
    *out = n;
    return OK;
}

int json_read_bool(const json_t *o, const char *key, bool *out, struct error *err) {
    const json_t *v = json_get_nonnull(o, key);
    if (!v) return OK;
    if (!json_is_boolean(v)) return error_set(err, ERR_USAGE, "'%s' must be true or false", key);
    *out = json_is_true(v);
    return OK;
}

int json_read_string(const json_t *o, const char *key, const char **out, struct error *err) {
    const json_t *v = json_get_nonnull(o, key);
    if (!v) return OK;
    if (!json_is_string(v)) return error_set(err, ERR_USAGE, "'%s' must be a string", key);
    *out = json_string_value(v);
    return OK;
}

int json_read_name(const json_t *o, const char *key, const char **out, struct error *err) {
    if (json_read_string(o, key, out, err) != OK) return err->code;
    if (!json_get_nonnull(o, key) || strlen(*out) <= JSON_NAME_MAX) return OK;
    return error_set(err, ERR_USAGE, "'%s' may have at most %d bytes", key, JSON_NAME_MAX);
}

int json_read_strings(const json_t *o, const char *key, int most, struct strings *out,
                      struct error *err) {
    const json_t *v = json_get_nonnull(o, key), *item;
    size_t i;
    if (!v) return OK;
    if (json_is_string(v)) {
        strings_add(out, json_string_value(v));
        return OK;
    }
    if (!json_is_string_array(v) || json_array_size(v) > (size_t)most)
        return error_set(err, ERR_USAGE, "'%s' must be a string or a list of at most %d", key,
                         most);
    json_array_foreach (v, i, item) strings_add(out, json_string_value(item));
    return OK;
}
