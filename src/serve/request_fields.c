/*
 * request_fields: the table of OpenAI's API has one row per field; a field that only some routes
 * support has several rows. The other APIs have one row per path, with the names of its fields.
 *
 * A field that would change the reply and is not supported is rejected, because the client relies
 * on it. A field that concerns only the server (caching, priorities, storing, billing) is accepted
 * and ignored. Null counts as absent.
 */
#define _GNU_SOURCE
#include "serve/request_fields.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { C = FIELD_CHAT, P = FIELD_COMPLETION, E = FIELD_EMBEDDING, CP = C | P, ALL = C | P | E };

#define SUPPORTED(name, routes)                                                                    \
    { name, routes, FIELD_SUPPORTED, NULL, NULL }
#define IGNORED(name, routes)                                                                      \
    { name, routes, FIELD_IGNORED, NULL, NULL }
#define REJECTED(name, routes, neutral, why)                                                       \
    { name, routes, FIELD_REJECTED, why, neutral }

const struct request_field request_fields[] = {
    SUPPORTED("model", ALL),
    SUPPORTED("user", CP),
    IGNORED("user", E),
    SUPPORTED("lora", ALL),
    SUPPORTED("parameters", ALL),
    /* input */
    SUPPORTED("messages", C),
    SUPPORTED("prompt", P),
    SUPPORTED("input", E),
    SUPPORTED("tools", C),
    SUPPORTED("tool_choice", C),
    SUPPORTED("parallel_tool_calls", C),
    SUPPORTED("add_generation_prompt", C),
    SUPPORTED("continue_final_message", C),
    SUPPORTED("chat_template", C),
    SUPPORTED("chat_template_kwargs", C),
    SUPPORTED("choices", C),
    SUPPORTED("include_reasoning", C),
    SUPPORTED("reasoning_format", C),
    SUPPORTED("echo", P),
    /* output */
    SUPPORTED("max_tokens", CP),
    SUPPORTED("max_completion_tokens", C),
    SUPPORTED("n", CP),
    SUPPORTED("best_of", P),
    SUPPORTED("samples", CP),
    SUPPORTED("check", CP),
    SUPPORTED("check_item", CP),
    SUPPORTED("temperature", CP),
    SUPPORTED("top_p", CP),
    SUPPORTED("top_k", CP),
    SUPPORTED("min_p", CP),
    SUPPORTED("typical_p", CP),
    SUPPORTED("repetition_penalty", CP),
    SUPPORTED("presence_penalty", CP),
    SUPPORTED("frequency_penalty", CP),
    SUPPORTED("logit_bias", CP),
    SUPPORTED("seed", CP),
    SUPPORTED("stop", CP),
    SUPPORTED("stop_token_ids", CP),
    SUPPORTED("ignore_eos", CP),
    SUPPORTED("loop_tokens", CP),
    SUPPORTED("truncate_prompt_tokens", CP),
    SUPPORTED("context_shift", CP),
    SUPPORTED("n_keep", CP),
    SUPPORTED("stream", CP),
    SUPPORTED("stream_options", CP),
    SUPPORTED("logprobs", CP),
    SUPPORTED("top_logprobs", C),
    SUPPORTED("prompt_logprobs", CP),
    SUPPORTED("response_format", CP),
    SUPPORTED("structured_outputs", CP),
    SUPPORTED("guided_json", CP),
    SUPPORTED("guided_regex", CP),
    SUPPORTED("guided_grammar", CP),
    SUPPORTED("guided_choice", CP),
    SUPPORTED("encoding_format", E),
    SUPPORTED("dimensions", E),
    /* internal to the server */
    IGNORED("metadata", ALL),
    IGNORED("store", CP),
    IGNORED("service_tier", CP),
    IGNORED("safety_identifier", ALL),
    IGNORED("prompt_cache_key", CP),
    IGNORED("prompt_cache_retention", CP),
    IGNORED("prediction", C),
    IGNORED("cache_prompt", CP),
    IGNORED("cache_salt", ALL),
    IGNORED("id_slot", CP),
    IGNORED("timings_per_token", CP),
    IGNORED("priority", ALL),
    IGNORED("request_id", ALL),
    IGNORED("keep_alive", ALL),
    IGNORED("guided_decoding_backend", CP),
    IGNORED("chat_template_content_format", C),
    IGNORED("spaces_between_special_tokens", CP),
    /* fields that would change the reply */
    REJECTED("functions", C, "[]", "it is the old form of 'tools'; use those"),
    REJECTED("function_call", C, "[\"none\", \"auto\"]",
             "it is the old form of 'tool_choice'; use that"),
    REJECTED("audio", C, "[]", "models here write text only"),
    REJECTED("modalities", C, "[[\"text\"]]", "models here write text only"),
    REJECTED("web_search_options", C, "[]", "the server does not search the web"),
    REJECTED("documents", C, "[[]]", "put documents into 'messages'"),
    REJECTED("reasoning_effort", C, "[\"none\"]", "no model here has efforts of reasoning"),
    REJECTED("thinking", C, "[]", "say it in 'chat_template_kwargs'"),
    REJECTED("enable_thinking", C, "[]", "say it in 'chat_template_kwargs'"),
    REJECTED("verbosity", C, "[\"medium\"]", "no model here has verbosities"),
    REJECTED("max_tool_calls", C, "[]", "set 'parallel_tool_calls' to false for one call"),
    REJECTED("suffix", P, "[\"\"]", "no model here fills in middles"),
    REJECTED("prompt_embeds", P, "[]", "prompts are text or token ids"),
    REJECTED("best_of", C, "[1]", "it is of /v1/completions"),
    REJECTED("echo", C, "[false]", "it is of /v1/completions"),
    REJECTED("min_tokens", CP, "[0]", "set 'ignore_eos' for a reply of 'max_tokens'"),
    REJECTED("length_penalty", CP, "[1]", "there is no beam search"),
    REJECTED("early_stopping", CP, "[false]", "there is no beam search"),
    REJECTED("use_beam_search", CP, "[false]", "there is no beam search"),
    REJECTED("bad_words", CP, "[[]]", "use 'logit_bias' with -100"),
    REJECTED("allowed_token_ids", CP, "[]", "use a grammar"),
    REJECTED("logits_processors", CP, "[[]]", "programs are not run by requests"),
    REJECTED("include_stop_str_in_output", CP, "[false]", "a stop text is left out"),
    REJECTED("skip_special_tokens", CP, "[true]", "special tokens are left out of the text"),
    REJECTED("detokenize", CP, "[true]", "replies are text"),
    REJECTED("truncate_prompt_tokens", E, "[]", "an input that is too long is refused"),
    REJECTED("add_special_tokens", C, "[false]", "the chat template adds them"),
    REJECTED("add_special_tokens", P | E, "[true]", "send token ids for a prompt without them"),
    REJECTED("return_token_ids", CP, "[false]", "/tokenize has them"),
    REJECTED("return_tokens_as_token_ids", CP, "[false]", "log-probabilities are listed by text"),
    REJECTED("guided_whitespace_pattern", CP, "[]", "white space follows the grammar"),
    REJECTED("mm_processor_kwargs", CP, "[{}]", "models here read text only"),
    REJECTED("kv_transfer_params", CP, "[]", "the KV cache stays in this server"),
    REJECTED("vllm_xargs", CP, "[{}]", "nothing of it is known here"),
    REJECTED("grammar", CP, "[\"\"]", "use 'guided_grammar'"),
    REJECTED("json_schema", CP, "[]", "use 'response_format'"),
    REJECTED("n_predict", CP, "[]", "use 'max_tokens'"),
    REJECTED("n_probs", CP, "[0]", "use 'logprobs'"),
    REJECTED("repeat_penalty", CP, "[1]", "use 'repetition_penalty'"),
    REJECTED("repeat_last_n", CP, "[]", "penalties apply to the whole text here"),
    REJECTED("samplers", CP, "[]", "the order of samplers is fixed"),
    REJECTED("mirostat", CP, "[0]", "the engine does not have this sampler"),
    REJECTED("dry_multiplier", CP, "[0]", "the engine does not have this sampler"),
    REJECTED("xtc_probability", CP, "[0]", "the engine does not have this sampler"),
    REJECTED("dynatemp_range", CP, "[0]", "the engine does not have this sampler"),
    REJECTED("tfs_z", CP, "[1]", "the engine does not have this sampler"),
    REJECTED("top_a", CP, "[0]", "the engine does not have this sampler"),
    REJECTED("options", CP, "[{}]", "it is of Ollama's /api/chat"),
    {0},
};

static const struct request_field *field_find(enum field_route route, const char *name) {
    for (const struct request_field *f = request_fields; f->name; f++)
        if ((f->routes & (int)route) && strcmp(f->name, name) == 0) return f;
    return NULL;
}

/* The fields of the other APIs: those that the path reads, and those that have no effect. A path
 * that ends with "*" is a prefix. */
static const struct body_fields {
    const char *path, *read, *ignored;
} body_fields[] = {
    {"/v1/ask",
     "model question agents iterations role_type language conversation max_tokens seed stream "
     "samples check check_item",
     ""},
    {"/v1/debate", "team question choices rounds seed temperature trace stream", ""},
    {"/v1/feedback", "id rating correction comment", ""},
    {"/v1/ab", "name model a b share once_per_user alpha min_pairs max_pairs", ""},
    {"/v1/jobs", "kind args options priority retries deadline in_process publish_steps", ""},
    {"/v1/sleep", "options", ""},
    {"/v1/sleep/rollback", "to", ""},
    {"/v1/adapters/*", "to", ""},
    {"/v1/load_lora_adapter", "lora_name lora_path load_inplace is_3d_lora_weight base_model_name",
     ""},
    {"/v1/unload_lora_adapter", "lora_name base_model_name", "lora_int_id"},
    {"/tokenize",
     "prompt messages content add_special_tokens add_special parse_special with_pieces "
     "return_token_strs add_generation_prompt continue_final_message tools chat_template "
     "chat_template_kwargs",
     "model"},
    {"/detokenize", "tokens", "model"},
    {"/completion*",
     "model prompt n_predict n_cmpl temperature top_k top_p min_p typical_p repeat_penalty "
     "repeat_last_n presence_penalty frequency_penalty logit_bias seed stop stop_token_ids "
     "ignore_eos loop_tokens grammar json_schema n_probs return_tokens stream lora parameters "
     "mirostat "
     "dry_multiplier xtc_probability dynatemp_range post_sampling_probs context_shift n_keep",
     "cache_prompt id_slot timings_per_token min_keep mirostat_tau mirostat_eta dry_base "
     "dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold dynatemp_exponent"},
    {"/api/chat",
     "model messages tools tool_choice format options stream think logprobs top_logprobs truncate "
     "user keep_alive chat_template_kwargs shift",
     ""},
    {"/api/generate",
     "model prompt suffix images system template context raw format options stream think logprobs "
     "top_logprobs truncate user keep_alive shift",
     ""},
    {"/api/embed", "model input truncate dimensions keep_alive", "options"},
    {"/api/embeddings", "model prompt", "options keep_alive"},
    {"/api/show", "model name", "verbose"},
    {"/api/create",
     "model name from adapters template system license parameters messages modelfile "
     "quantize stream",
     ""},
    {"/api/copy", "source destination", ""},
    {"/api/delete", "model name", ""},
};

/* Names in objects of a request, by which errors call them. */
static const char nested_names[] = "adapter_id adapter_source merged_adapters merge_strategy "
                                   "weights include_usage scale";

/* Whether a list of names, separated by blanks, has the name of length n. */
static bool names_have(const char *names, const char *name, size_t n) {
    for (size_t len; *names; names += len + (names[len] == ' ')) {
        len = strcspn(names, " ");
        if (len == n && memcmp(names, name, n) == 0) return true;
    }
    return false;
}

static bool body_fields_have(const struct body_fields *f, const char *name, size_t n) {
    return names_have(f->read, name, n) || names_have(f->ignored, name, n);
}

bool request_field_is_known(const char *path) {
    size_t n = strcspn(path, ".[");
    for (const struct request_field *f = request_fields; f->name; f++)
        if (strlen(f->name) == n && memcmp(f->name, path, n) == 0) return true;
    for (size_t i = 0; i < ARRAY_LEN(body_fields); i++)
        if (body_fields_have(&body_fields[i], path, n)) return true;
    return names_have(nested_names, path, n);
}

/* 1 and 1.0 are the same number. */
static bool json_values_equal(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static bool is_neutral(const struct request_field *f, const json_t *v) {
    json_t *list = json_loads(f->neutral_values, 0, NULL), *item;
    bool same = false;
    size_t i;
    CHECK(json_is_array(list));
    json_array_foreach (list, i, item) same = same || json_values_equal(item, v);
    json_decref(list);
    return same;
}

static int error_unknown_field(const char *const *names, int n, const char *name,
                               struct error *err) {
    const char *near = strlen(name) < 64 ? name_suggest(names, n, name) : NULL;
    if (near)
        return error_set(err, ERR_USAGE,
                         "'%.80s' is not a field of this request; did you mean '%s'?", name, near);
    return error_set(err, ERR_USAGE, "'%.80s' is not a field of this request", name);
}

static int error_unknown_request_field(enum field_route route, const char *name,
                                       struct error *err) {
    enum { MOST = 256 };
    const char *names[MOST];
    int n = 0;
    for (const struct request_field *f = request_fields; f->name; f++)
        if ((f->routes & (int)route) && f->support == FIELD_SUPPORTED && n < MOST)
            names[n++] = f->name;
    return error_unknown_field(names, n, name, err);
}

static bool path_matches(const char *pattern, const char *path) {
    size_t n = strcspn(pattern, "*");
    return strncmp(pattern, path, n) == 0 && (pattern[n] == '*' || !path[n]);
}

static const struct body_fields *body_fields_find(const char *path) {
    for (size_t i = 0; i < ARRAY_LEN(body_fields); i++)
        if (path_matches(body_fields[i].path, path)) return &body_fields[i];
    return NULL;
}

static int error_unknown_body_field(const struct body_fields *f, const char *name,
                                    struct error *err) {
    enum { MOST = 64 };
    const char *names[MOST];
    char *copy = xstrdup(f->read), *rest = copy;
    int n = 0;
    for (char *word; n < MOST && (word = strsep(&rest, " "));) names[n++] = word;
    error_unknown_field(names, n, name, err);
    free(copy);
    return err->code;
}

int body_fields_check(const char *path, const json_t *body, struct error *err) {
    const struct body_fields *f = body_fields_find(path);
    const char *name;
    json_t *v;
    if (!f) return OK;
    json_object_foreach ((json_t *)(uintptr_t)body, name, v)
        if (!json_is_null(v) && !body_fields_have(f, name, strlen(name)))
            return error_unknown_body_field(f, name, err);
    return OK;
}

int request_fields_check(enum field_route route, const json_t *body, struct error *err) {
    const char *name;
    json_t *v;
    json_object_foreach ((json_t *)(uintptr_t)body, name, v) {
        const struct request_field *f = field_find(route, name);
        if (json_is_null(v)) continue;
        if (!f) return error_unknown_request_field(route, name, err);
        if (f->support == FIELD_REJECTED && !is_neutral(f, v))
            return error_set(err, ERR_USAGE, "'%s' is not supported: %s", name, f->reason);
    }
    return OK;
}

/* docs */

static void field_names_write(struct buf *out, int routes, enum field_support use) {
    const char *between = "";
    for (const struct request_field *f = request_fields; f->name; f++) {
        if (f->support != use || f->routes != routes) continue;
        buf_printf(out, "%s`%s`", between, f->name);
        between = ", ";
    }
}

static const struct {
    int routes;
    const char *name;
} route_groups[] = {
    {ALL, "all three"}, {CP, "chat, completions"}, {P | E, "completions, embeddings"},
    {C, "chat"},        {P, "completions"},        {E, "embeddings"}};

static const char *route_group_name(int routes) {
    for (size_t i = 0; i < ARRAY_LEN(route_groups); i++)
        if (route_groups[i].routes == routes) return route_groups[i].name;
    check_failed(__FILE__, __LINE__, "a field of routes without a name");
}

static void field_table_write(struct buf *out, const char *title, enum field_support use) {
    buf_printf(out, "| %s | fields |\n|---|---|\n", title);
    for (size_t i = 0; i < ARRAY_LEN(route_groups); i++) {
        struct buf list = {0};
        field_names_write(&list, route_groups[i].routes, use);
        if (list.len) buf_printf(out, "| %s | %s |\n", route_groups[i].name, list.data);
        buf_release(&list);
    }
    buf_puts(out, "\n");
}

static void names_write(struct buf *out, const char *names) {
    const char *between = "";
    for (size_t len; *names; names += len + (names[len] == ' ')) {
        len = strcspn(names, " ");
        buf_printf(out, "%s`%.*s`", between, (int)len, names);
        between = ", ";
    }
}

static void body_fields_markdown(struct buf *out) {
    buf_puts(out, "\n| other paths | fields | without effect |\n|---|---|---|\n");
    for (size_t i = 0; i < ARRAY_LEN(body_fields); i++) {
        buf_printf(out, "| `%s` | ", body_fields[i].path);
        names_write(out, body_fields[i].read);
        buf_puts(out, " | ");
        names_write(out, body_fields[i].ignored);
        buf_puts(out, " |\n");
    }
}

void request_fields_markdown(struct buf *out) {
    field_table_write(out, "honoured by", FIELD_SUPPORTED);
    field_table_write(out, "without effect in", FIELD_IGNORED);
    buf_puts(out, "| refused | in | unless it is | because |\n|---|---|---|---|\n");
    for (const struct request_field *f = request_fields; f->name; f++) {
        if (f->support != FIELD_REJECTED) continue;
        json_t *list = json_loads(f->neutral_values, 0, NULL), *v;
        size_t i;
        buf_printf(out, "| `%s` | %s | null", f->name, route_group_name(f->routes));
        json_array_foreach (list, i, v) {
            char *text = json_dumps(v, JSON_ENCODE_ANY);
            buf_printf(out, ", `%s`", text);
            free(text);
        }
        buf_printf(out, " | %s |\n", f->reason);
        json_decref(list);
    }
    body_fields_markdown(out);
}

/* reading */

json_t *json_get_nonnull(const json_t *o, const char *key) {
    json_t *v = json_object_get(o, key);
    return v && !json_is_null(v) ? v : NULL;
}

/* *out = v, unless it is not `valid` or out of range. */
static int number_set(const char *key, bool valid, double v, double lo, double hi, double *out,
                      struct error *err) {
    if (!valid || !(v >= lo && v <= hi))
        return error_set(err, ERR_USAGE, "'%s' must be a number from %g to %g", key, lo, hi);
    *out = v;
    return OK;
}

static int int_set(const char *key, bool valid, int64_t v, int64_t lo, int64_t hi, int64_t *out,
                   struct error *err) {
    if (!valid || v < lo || v > hi)
        return error_set(err, ERR_USAGE, "'%s' must be a whole number from %lld to %lld", key,
                         (long long)lo, (long long)hi);
    *out = v;
    return OK;
}

int json_read_number(const json_t *o, const char *key, double lo, double hi, double *out,
                     struct error *err) {
    const json_t *v = json_get_nonnull(o, key);
    return v ? number_set(key, json_is_number(v), json_number_value(v), lo, hi, out, err) : OK;
}

int json_read_int(const json_t *o, const char *key, int64_t lo, int64_t hi, int64_t *out,
                  struct error *err) {
    const json_t *v = json_get_nonnull(o, key);
    if (!v) return OK;
    /* clients in languages with a single number type send 16.0 */
    double x = json_number_value(v);
    bool whole = json_is_integer(v) || (json_is_real(v) && fabs(x) < 9e18 && x == floor(x));
    int64_t n = json_is_integer(v) ? json_integer_value(v) : whole ? (int64_t)x : 0;
    return int_set(key, whole, n, lo, hi, out, err);
}

int query_read_int(const struct exchange *x, const char *key, int64_t lo, int64_t hi, int64_t *out,
                   struct error *err) {
    const char *text = exchange_query(x, key);
    char *end;
    if (!text) return OK;
    errno = 0;
    int64_t n = strtoll(text, &end, 10);
    return int_set(key, end != text && !*end && !errno, n, lo, hi, out, err);
}

int query_read_number(const struct exchange *x, const char *key, double lo, double hi, double *out,
                      struct error *err) {
    const char *text = exchange_query(x, key);
    char *end;
    if (!text) return OK;
    double v = strtod(text, &end);
    return number_set(key, end != text && !*end, v, lo, hi, out, err);
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

int json_read_strings(const json_t *o, const char *key, int max_items, struct strings *out,
                      struct error *err) {
    const json_t *v = json_get_nonnull(o, key), *item;
    size_t i;
    if (!v) return OK;
    if (json_is_string(v)) {
        strings_add(out, json_string_value(v));
        return OK;
    }
    if (!json_is_string_array(v) || json_array_size(v) > (size_t)max_items)
        return error_set(err, ERR_USAGE, "'%s' must be a string or a list of at most %d", key,
                         max_items);
    json_array_foreach (v, i, item) strings_add(out, json_string_value(item));
    return OK;
}
