/*
 * request_inputs: a table of all inputs of a request. The key, the JSON and its parser iterate over
 * it.
 *
 * Invariant: record_inputs_parse(record_inputs_json(r)) gives a request with the same key: floats
 * are written as doubles of equal value, and unsigned 64-bit seeds as signed integers with the same
 * bits. The order of the rows is part of the key. New rows must be optional, so that the keys of
 * older records do not change.
 *
 * Adapters are not in the table: the key covers their hashes, and a record also has their paths
 * (record.c).
 */
#include "engine/internal.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define FIELD_OFFSET(field) offsetof(struct engine_request, field)
#define SAMPLING(field) #field, .in_sampling = true, .value_offset = FIELD_OFFSET(sampling.field)
const struct request_input request_inputs[] = {
    {SAMPLING(temperature), .type = INPUT_FLOAT},
    {SAMPLING(top_k), .type = INPUT_INT, .min = INT32_MIN, .max = INT32_MAX},
    {SAMPLING(top_p), .type = INPUT_FLOAT},
    {SAMPLING(min_p), .type = INPUT_FLOAT},
    {SAMPLING(seed), .type = INPUT_SEED},
    {SAMPLING(typical_p), .type = INPUT_FLOAT},
    {SAMPLING(repetition_penalty), .type = INPUT_FLOAT},
    {SAMPLING(presence_penalty), .type = INPUT_FLOAT},
    {SAMPLING(frequency_penalty), .type = INPUT_FLOAT},
    {SAMPLING(bias), .type = INPUT_BIAS, .count_offset = FIELD_OFFSET(sampling.n_bias)},
    {SAMPLING(penalty_last_n), .type = INPUT_INT, .max = INT32_MAX, .optional = true},
    {"grammar", .type = INPUT_GRAMMAR, .value_offset = FIELD_OFFSET(grammar)},
    {"loop_tokens", .type = INPUT_INT, .value_offset = FIELD_OFFSET(loop_tokens), .max = INT32_MAX},
    {"n_top", .type = INPUT_INT, .value_offset = FIELD_OFFSET(n_top), .max = ENGINE_TOP_MAX},
    {"prompt_logprobs", .type = INPUT_BOOL, .value_offset = FIELD_OFFSET(prompt_logprobs)},
    {"logprob_temperature", .type = INPUT_FLOAT, .value_offset = FIELD_OFFSET(logprob_temperature)},
    {"stop_texts", .type = INPUT_TEXTS, .value_offset = FIELD_OFFSET(stop_texts),
     .count_offset = FIELD_OFFSET(n_stop_texts)},
    {"max_tokens", .type = INPUT_INT, .value_offset = FIELD_OFFSET(max_tokens), .max = INT32_MAX},
    {"prompt", .type = INPUT_TOKENS, .value_offset = FIELD_OFFSET(prompt),
     .count_offset = FIELD_OFFSET(n_prompt)},
    {"stop", .type = INPUT_TOKENS, .value_offset = FIELD_OFFSET(stop),
     .count_offset = FIELD_OFFSET(n_stop)},
    {"suffix", .type = INPUT_TOKENS, .value_offset = FIELD_OFFSET(suffix.v),
     .count_offset = FIELD_OFFSET(suffix.n)},
    {"choices", .type = INPUT_TOKEN_LISTS, .value_offset = FIELD_OFFSET(choices),
     .count_offset = FIELD_OFFSET(n_choices)},
    {"choices_only", .type = INPUT_BOOL, .value_offset = FIELD_OFFSET(choices_only),
     .optional = true},
    {"context_len", .type = INPUT_INT, .value_offset = FIELD_OFFSET(context_len), .max = INT32_MAX,
     .optional = true},
    {"n_keep", .type = INPUT_INT, .value_offset = FIELD_OFFSET(n_keep), .max = INT32_MAX,
     .optional = true},
    {"n_invocation_prompt", .type = INPUT_INT, .value_offset = FIELD_OFFSET(n_invocation_prompt),
     .max = INT32_MAX, .optional = true},
    {NULL},
};

/* The value of an input of any type. */
struct input_value {
    float real;
    int64_t integer; /* also a bool, or the length of a list */
    const void *p;   /* a list or a grammar */
};

static struct input_value input_get(const struct request_input *in,
                                    const struct engine_request *r) {
    const char *field = (const char *)r + in->value_offset;
    struct input_value v = {0};
    int32_t n;
    switch (in->type) {
    case INPUT_FLOAT:
        memcpy(&v.real, field, sizeof v.real);
        return v;
    case INPUT_SEED:
        memcpy(&v.integer, field, sizeof v.integer);
        return v;
    case INPUT_BOOL:
        v.integer = *(const bool *)field;
        return v;
    case INPUT_INT:
        memcpy(&n, field, sizeof n);
        v.integer = n;
        return v;
    default:
        memcpy(&v.p, field, sizeof v.p);
    }
    if (in->type == INPUT_GRAMMAR) return v;
    memcpy(&n, (const char *)r + in->count_offset, sizeof n);
    v.integer = n;
    return v;
}

static void input_set(const struct request_input *in, const struct input_value *v,
                      struct engine_request *r) {
    char *field = (char *)r + in->value_offset;
    int32_t n = (int32_t)v->integer;
    if (in->type == INPUT_FLOAT)
        memcpy(field, &v->real, sizeof v->real);
    else if (in->type == INPUT_SEED)
        memcpy(field, &v->integer, sizeof v->integer);
    else if (in->type == INPUT_BOOL)
        *(bool *)field = n;
    else if (in->type == INPUT_INT)
        memcpy(field, &n, sizeof n);
    else
        memcpy(field, &v->p, sizeof v->p);
    if (in->count_offset) memcpy((char *)r + in->count_offset, &n, sizeof n);
}

/* keys: each function adds a value to a hash */

static void hash_u64(struct sha256 *h, uint64_t v) {
    uint8_t b[8];
    for (int i = 0; i < 8; i++) b[i] = (uint8_t)(v >> 8 * i);
    sha256_update(h, b, sizeof b);
}

static void hash_float(struct sha256 *h, float v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    hash_u64(h, bits);
}

static void hash_text(struct sha256 *h, const char *s) {
    hash_u64(h, strlen(s));
    sha256_update(h, s, strlen(s));
}

static void hash_tokens(struct sha256 *h, const int32_t *v, int32_t n) {
    hash_u64(h, (uint64_t)n);
    for (int32_t i = 0; i < n; i++) hash_u64(h, (uint64_t)v[i]);
}

int32_t engine_activation(const struct engine_request *r) {
    int32_t n = r->n_invocation_prompt > 0 ? r->n_invocation_prompt : r->n_prompt;
    if (r->adapter) return adapter_activation(&r->adapter->config, r->prompt, n);
    return r->n_mix > 0 ? 0 : ADAPTER_INACTIVE;
}

void engine_adapters_key(const struct engine_request *r, char out[HASH_LEN]) {
    strcpy(out, r->adapter ? r->adapter->hash : "-");
    if (r->n_mix == 0) return;
    struct sha256 h;
    sha256_init(&h);
    for (int32_t i = 0; i < r->n_mix; i++) {
        hash_text(&h, r->mix[i].adapter ? r->mix[i].adapter->hash : "noise");
        hash_u64(&h, r->mix[i].noise.seed);
        hash_u64(&h, r->mix[i].noise.member);
        hash_float(&h, r->mix[i].weight);
    }
    sha256_final(&h, out);
}

static void hash_input(struct sha256 *h, const struct request_input *in,
                       const struct input_value *v) {
    const struct logit_bias *bias = v->p;
    const struct token_seq *lists = v->p;
    const char *const *texts = v->p;
    switch (in->type) {
    case INPUT_FLOAT:
        hash_float(h, v->real);
        return;
    case INPUT_GRAMMAR:
        hash_text(h, v->p ? grammar_hash(v->p) : "-");
        return;
    case INPUT_TOKENS:
        hash_tokens(h, v->p, (int32_t)v->integer);
        return;
    default:
        hash_u64(h, (uint64_t)v->integer);
    }
    for (int64_t i = 0; in->type == INPUT_TEXTS && i < v->integer; i++) hash_text(h, texts[i]);
    for (int64_t i = 0; in->type == INPUT_TOKEN_LISTS && i < v->integer; i++)
        hash_tokens(h, lists[i].v, lists[i].n);
    for (int64_t i = 0; in->type == INPUT_BIAS && i < v->integer; i++) {
        hash_u64(h, (uint64_t)bias[i].token);
        hash_float(h, bias[i].bias);
    }
}

/* Every field has a fixed size or is preceded by its length, so the hashed bytes of different
 * requests differ. */
void engine_request_key(const struct engine_request *r, const char *model_hash,
                        enum numeric_class cls, char out[HASH_LEN]) {
    struct sha256 h;
    char adapters[HASH_LEN];
    engine_adapters_key(r, adapters);
    sha256_init(&h);
    hash_text(&h, "shoal call 2");
    hash_text(&h, model_hash);
    hash_text(&h, adapters);
    hash_u64(&h, (uint64_t)cls);
    if (cls != NUMERIC_EXACT) hash_text(&h, numeric_class_name(cls));
    for (const struct request_input *in = request_inputs; in->name; in++) {
        struct input_value v = input_get(in, r);
        if (in->optional && v.integer == 0) continue;
        if (in->optional) hash_text(&h, in->name);
        hash_input(&h, in, &v);
    }
    sha256_final(&h, out);
}

/* JSON */

json_t *json_from_tokens(const int32_t *v, int32_t n) {
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) json_array_append_new(list, json_integer(v[i]));
    return list;
}

static json_t *bias_json(const struct logit_bias *v, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(list, json_pack("[i,o]", v[i].token, json_from_float(v[i].bias)));
    return list;
}

static json_t *texts_json(const char *const *v, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_string(v[i]));
    return list;
}

static json_t *token_lists_json(const struct token_seq *v, int64_t n) {
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++) json_array_append_new(list, json_from_tokens(v[i].v, v[i].n));
    return list;
}

/* The source as a string, or as an array of bytes if it is not a valid JSON string. */
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

static json_t *input_json(const struct request_input *in, const struct input_value *v) {
    switch (in->type) {
    case INPUT_FLOAT:
        return json_from_float(v->real);
    case INPUT_INT:
    case INPUT_SEED:
        return json_integer(v->integer);
    case INPUT_BOOL:
        return json_boolean(v->integer);
    case INPUT_TOKENS:
        return json_from_tokens(v->p, (int32_t)v->integer);
    case INPUT_TEXTS:
        return texts_json(v->p, v->integer);
    case INPUT_TOKEN_LISTS:
        return token_lists_json(v->p, v->integer);
    case INPUT_BIAS:
        return bias_json(v->p, v->integer);
    case INPUT_GRAMMAR:
        return grammar_json(v->p);
    }
    abort();
}

json_t *record_inputs_json(const struct engine_request *r) {
    json_t *all = json_object(), *sampling = json_object();
    for (const struct request_input *in = request_inputs; in->name; in++) {
        struct input_value v = input_get(in, r);
        if (in->optional && v.integer == 0) continue;
        json_object_set_new(in->in_sampling ? sampling : all, in->name, input_json(in, &v));
    }
    json_object_set_new(all, "sampling", sampling);
    return all;
}

/* Parser of recorded inputs. It stores the first error in `err` and sets `bad`; after an error the
 * functions below return empty values. */
struct inputs_parser {
    struct arena *arena;
    struct error *err;
    bool bad;
};

static void *parser_fail(struct inputs_parser *rd, const char *field) {
    if (!rd->bad) error_set(rd->err, ERR_FORMAT, "'%s' of the recorded call is damaged", field);
    rd->bad = true;
    return NULL;
}

static int64_t parse_integer(struct inputs_parser *rd, const json_t *v, const char *field,
                             int64_t lo, int64_t hi) {
    if (json_is_integer(v) && json_integer_value(v) >= lo && json_integer_value(v) <= hi)
        return json_integer_value(v);
    parser_fail(rd, field);
    return 0;
}

static int32_t parse_token(struct inputs_parser *rd, const json_t *v) {
    return (int32_t)parse_integer(rd, v, "a token", 0, INT32_MAX);
}

static float parse_real(struct inputs_parser *rd, const json_t *v, const char *field) {
    float out;
    if (json_to_float(v, &out) && !isnan(out)) return out;
    parser_fail(rd, field);
    return 0;
}

/* Allocates the items of a list; at least one, so that the result is not NULL. */
static void *items_alloc(struct inputs_parser *rd, int32_t n, size_t size) {
    return arena_alloc(rd->arena, (size_t)MAX(n, 1) * size);
}

static struct token_seq parse_tokens(struct inputs_parser *rd, const json_t *list) {
    int32_t n = (int32_t)json_array_size(list);
    int32_t *v = items_alloc(rd, n, sizeof *v);
    if (!json_is_array(list)) parser_fail(rd, "tokens");
    for (int32_t i = 0; i < n; i++) v[i] = parse_token(rd, json_array_get(list, (size_t)i));
    return (struct token_seq){v, n};
}

static const void *parse_texts(struct inputs_parser *rd, const json_t *list, int32_t n) {
    const char **v = items_alloc(rd, n, sizeof *v);
    for (int32_t i = 0; i < n; i++) {
        const char *text = json_string_value(json_array_get(list, (size_t)i));
        if (!text) parser_fail(rd, "stop_texts");
        v[i] = arena_strdup(rd->arena, text ? text : "");
    }
    return v;
}

static const void *parse_token_lists(struct inputs_parser *rd, const json_t *list, int32_t n) {
    struct token_seq *v = items_alloc(rd, n, sizeof *v);
    for (int32_t i = 0; i < n; i++) v[i] = parse_tokens(rd, json_array_get(list, (size_t)i));
    return v;
}

static const void *parse_bias(struct inputs_parser *rd, const json_t *list, int32_t n) {
    struct logit_bias *v = items_alloc(rd, n, sizeof *v);
    for (int32_t i = 0; i < n; i++) {
        const json_t *pair = json_array_get(list, (size_t)i);
        v[i].token = parse_token(rd, json_array_get(pair, 0));
        v[i].bias = parse_real(rd, json_array_get(pair, 1), "bias");
    }
    return n ? v : NULL;
}

/* NULL without an error: the record has no grammar, as in older versions. */
static struct grammar *parse_grammar(struct inputs_parser *rd, const json_t *v) {
    if (rd->bad || !v || json_is_null(v)) return NULL;
    const char *kind = json_string_value(json_object_get(v, "kind"));
    const json_t *source = json_object_get(v, "source");
    struct buf text = {0};
    if (!kind || !(json_is_string(source) || json_is_array(source)))
        return parser_fail(rd, "grammar");
    buf_add(&text, json_string_value(source), json_string_length(source));
    for (size_t i = 0; i < json_array_size(source); i++) {
        char byte = (char)parse_integer(rd, json_array_get(source, i), "a token", 0, UINT8_MAX);
        buf_add(&text, &byte, 1);
    }
    struct grammar *g = NULL;
    if (!rd->bad) g = grammar_from_source(kind, text.data ? text.data : "", text.len, rd->err);
    rd->bad |= !g;
    buf_release(&text);
    return g;
}

static struct input_value parse_input(struct inputs_parser *rd, const struct request_input *in,
                                      const json_t *v) {
    struct input_value out = {.integer = (int64_t)json_array_size(v)};
    int32_t n = (int32_t)out.integer;
    if (in->count_offset && !json_is_array(v)) parser_fail(rd, in->name);
    switch (in->type) {
    case INPUT_FLOAT:
        out.real = parse_real(rd, v, in->name);
        break;
    case INPUT_INT:
        out.integer = in->optional && !v ? 0 : parse_integer(rd, v, in->name, in->min, in->max);
        break;
    case INPUT_SEED:
        out.integer = parse_integer(rd, v, in->name, INT64_MIN, INT64_MAX);
        break;
    case INPUT_BOOL:
        out.integer = json_is_true(v);
        break;
    case INPUT_TOKENS:
        out.p = parse_tokens(rd, v).v;
        break;
    case INPUT_TEXTS:
        out.p = parse_texts(rd, v, n);
        break;
    case INPUT_TOKEN_LISTS:
        out.p = parse_token_lists(rd, v, n);
        break;
    case INPUT_BIAS:
        out.p = parse_bias(rd, v, n);
        break;
    case INPUT_GRAMMAR:
        out.p = parse_grammar(rd, v);
        break;
    }
    return out;
}

int record_inputs_parse(const json_t *inputs, struct arena *arena, struct engine_request *out,
                        struct grammar **grammar, struct error *err) {
    struct inputs_parser rd = {.arena = arena, .err = err};
    const json_t *sampling = json_object_get(inputs, "sampling");
    *out = (struct engine_request){0};
    *grammar = NULL;
    for (const struct request_input *in = request_inputs; in->name; in++) {
        const json_t *v = json_object_get(in->in_sampling ? sampling : inputs, in->name);
        struct input_value value = parse_input(&rd, in, v);
        if (in->type == INPUT_GRAMMAR) *grammar = (struct grammar *)(uintptr_t)value.p;
        input_set(in, &value, out);
    }
    if (!rd.bad) return OK;
    grammar_free(*grammar);
    out->grammar = *grammar = NULL;
    return err->code;
}
