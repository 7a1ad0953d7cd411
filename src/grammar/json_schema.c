/*
 * json_schema: converts a JSON schema to a grammar of JSON texts.
 *
 * The grammar is for generation: every text of the grammar is valid under the schema, but not every
 * valid text is in the grammar. Properties are in the schema's order. An object with `properties`
 * has no other properties unless `additionalProperties` allows them. A value without `type` has one
 * of the types that its other keywords imply. Numbers have at most 18 digits before and 17 after
 * the decimal point. Strings do not contain U+0000.
 *
 * Supported: type, enum, const, properties, required, additionalProperties, items, prefixItems,
 * minItems, maxItems, minLength, maxLength, pattern, format (table below), minimum, maximum,
 * exclusiveMinimum, exclusiveMaximum, anyOf, oneOf (its branches must be provably disjoint), allOf
 * (merged), $ref within the document, $defs, definitions, nullable. Annotations are ignored, and so
 * is `format` for values other than strings. Any other keyword is an error, whose message has the
 * keyword and its place. The name of an additional property may occur twice in an object, because a
 * grammar cannot remember names.
 *
 * An object with properties a (optional) and b (required) is, in GBNF,
 *
 *     object    ::= "{" blank ( a "," blank b others | b others ) blank "}"
 *     a         ::= "\"a\":" value-of-a          others ::= ( "," blank other-key ":" value )*
 *
 * The continuation after each property is a separate rule, so that n optional properties need about
 * 3n rules instead of 2^n paths.
 *
 * Invariant: all references to the same pointer become one rule, which is named by the pointer.
 * Compilation of recursive schemas therefore ends, and a schema that is referenced twice is
 * compiled once.
 */
#include "grammar/internal.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum {
    DIGITS_WHOLE = 18,
    DIGITS_FRACTION = 17,
    VISIT_LIMIT = 1 << 16, /* schemas visited; merging may multiply their number */
};

struct schema {
    struct grammar_builder *b;
    json_t *root;
    json_t *retained; /* array that owns the values that schema_retain received */
    bool compact;
    int nesting, visits;
    struct buf path; /* pointer to the current schema, for messages */
    struct error *err;
};

static struct expr *schema_expr(struct schema *s, json_t *v);

static struct expr *schema_error(struct schema *s, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
static struct expr *schema_error(struct schema *s, const char *fmt, ...) {
    char text[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    error_set(s->err, ERR_FORMAT, "JSON schema, at '#%.200s': %s", s->path.len ? s->path.data : "",
              text);
    return NULL;
}

/* The expression of schema v, which is at keyword/key below the current schema; `key` may be NULL.
 */
static struct expr *child_expr(struct schema *s, json_t *v, const char *keyword, const char *key) {
    size_t len = s->path.len;
    buf_printf(&s->path, key ? "/%s/%s" : "/%s", keyword, key);
    struct expr *e = schema_expr(s, v);
    s->path.len = len;
    s->path.data[len] = 0;
    return e;
}

/* Takes ownership of a new value, which is valid until the grammar is compiled. */
static json_t *schema_retain(struct schema *s, json_t *v) {
    json_array_append_new(s->retained, v);
    return v;
}

/* Makes the expression a rule, so that it is compiled once if it is used in several places. */
static struct expr *shared_rule_expr(struct schema *s, struct expr *e) {
    int32_t rule = grammar_builder_add_rule(s->b, NULL);
    grammar_builder_define_rule(s->b, rule, e);
    return expr_rule(s->b, rule);
}

static struct expr *empty_expr(struct schema *s) {
    struct codepoint_set none = {0};
    return expr_set(s->b, &none);
}

/* keywords */

enum keyword_kind { ANNOTATION, CORE, ON_OBJECT, ON_ARRAY, ON_STRING, ON_NUMBER };
static const struct keyword {
    const char *name;
    enum keyword_kind kind;
} keywords[] = {
    {"title", ANNOTATION},
    {"description", ANNOTATION},
    {"default", ANNOTATION},
    {"example", ANNOTATION},
    {"examples", ANNOTATION},
    {"deprecated", ANNOTATION},
    {"readOnly", ANNOTATION},
    {"writeOnly", ANNOTATION},
    {"$schema", ANNOTATION},
    {"$id", ANNOTATION},
    {"$comment", ANNOTATION},
    {"$anchor", ANNOTATION},
    {"$defs", ANNOTATION},
    {"definitions", ANNOTATION},
    {"discriminator", ANNOTATION},
    {"type", CORE},
    {"enum", CORE},
    {"const", CORE},
    {"anyOf", CORE},
    {"oneOf", CORE},
    {"allOf", CORE},
    {"$ref", CORE},
    {"nullable", CORE},
    {"properties", ON_OBJECT},
    {"required", ON_OBJECT},
    {"additionalProperties", ON_OBJECT},
    {"items", ON_ARRAY},
    {"prefixItems", ON_ARRAY},
    {"minItems", ON_ARRAY},
    {"maxItems", ON_ARRAY},
    {"minLength", ON_STRING},
    {"maxLength", ON_STRING},
    {"pattern", ON_STRING},
    {"format", ON_STRING},
    {"minimum", ON_NUMBER},
    {"maximum", ON_NUMBER},
    {"exclusiveMinimum", ON_NUMBER},
    {"exclusiveMaximum", ON_NUMBER},
};

static const struct keyword *keyword_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(keywords); i++)
        if (strcmp(keywords[i].name, name) == 0) return &keywords[i];
    return NULL;
}

/* False, with an error, if a keyword is unknown. JSON schema ignores unknown keywords, but that
 * could allow invalid texts. */
static bool keywords_check(struct schema *s, json_t *v) {
    const char *key;
    json_t *value;
    json_object_foreach (v, key, value) {
        bool off = strcmp(key, "uniqueItems") == 0 && json_is_false(value);
        if (!off && !keyword_find(key) && strncmp(key, "x-", 2) != 0)
            return schema_error(s, "keyword '%.60s' is not supported", key), false;
    }
    return true;
}

/* True if the schema has assertions besides the keyword `except`. */
static bool asserts_more(json_t *v, const char *except) {
    const char *key;
    json_t *value;
    json_object_foreach (v, key, value) {
        const struct keyword *k = keyword_find(key);
        if (k && k->kind != ANNOTATION && strcmp(key, except) != 0) return true;
    }
    return false;
}

/* A copy of the schema without one keyword, to merge into the branches of that keyword. */
static json_t *schema_without_keyword(struct schema *s, json_t *v, const char *keyword) {
    json_t *copy = schema_retain(s, json_copy(v));
    json_object_del(copy, keyword);
    return copy;
}

/* Reads a number from 0 to GRAMMAR_MAX_REPEAT at `keyword`; `absent` is the default. False after an
 * error. */
static bool keyword_count(struct schema *s, json_t *v, const char *keyword, int32_t absent,
                          int32_t *out) {
    json_t *n = json_object_get(v, keyword);
    *out = absent;
    if (!n) return true;
    if (!json_is_integer(n) || json_integer_value(n) < 0)
        return schema_error(s, "'%s' must be a whole number, 0 or more", keyword), false;
    if (json_integer_value(n) > GRAMMAR_MAX_REPEAT)
        return schema_error(s, "'%s' is above %d", keyword, GRAMMAR_MAX_REPEAT), false;
    *out = (int32_t)json_integer_value(n);
    return true;
}

/* references and merging */

/* The value at a JSON pointer "#/a/b~1c/0", or NULL after an error. */
static json_t *pointer_get(struct schema *s, const char *pointer) {
    json_t *v = s->root;
    if (pointer[0] != '#' || (pointer[1] && pointer[1] != '/')) {
        schema_error(s, "reference '%.100s' is not of this document, only '#/...' is", pointer);
        return NULL;
    }
    for (const char *p = pointer + 1; v && *p;) {
        struct buf name = {0};
        for (p++; *p && *p != '/'; p++) {
            bool tilde = *p == '~' && (p[1] == '0' || p[1] == '1');
            buf_add(&name, tilde ? (p[1] == '0' ? "~" : "/") : p, 1);
            p += tilde;
        }
        const char *key = name.data ? name.data : "";
        if (json_is_array(v))
            v = *key >= '0' && *key <= '9' ? json_array_get(v, strtoul(key, NULL, 10)) : NULL;
        else
            v = json_object_get(v, key);
        buf_release(&name);
    }
    if (!v) schema_error(s, "reference '%.100s' leads nowhere", pointer);
    return v;
}

/* Follows $ref until the schema has no $ref. Keywords next to $ref are merged into its target. NULL
 * after an error. */
static json_t *schema_resolve_ref(struct schema *s, json_t *v);

static bool type_has(json_t *type, const char *name) {
    size_t i;
    json_t *t;
    if (json_is_string(type)) return strcmp(json_string_value(type), name) == 0;
    json_array_foreach (type, i, t) {
        if (json_is_string(t) && strcmp(json_string_value(t), name) == 0) return true;
    }
    return false;
}

static const char *const type_names[] = {"object",  "array",   "string", "number",
                                         "integer", "boolean", "null"};

/* The types that both values of `type` allow. An integer is also a number. */
static json_t *types_common(json_t *a, json_t *b) {
    json_t *out = json_array();
    for (size_t i = 0; i < ARRAY_LEN(type_names); i++) {
        const char *n = type_names[i];
        bool is_integer = strcmp(n, "integer") == 0;
        bool in_a = type_has(a, n) || (is_integer && type_has(a, "number"));
        bool in_b = type_has(b, n) || (is_integer && type_has(b, "number"));
        if (in_a && in_b && !(is_integer && type_has(out, "number")))
            json_array_append_new(out, json_string(n));
    }
    return out;
}

static bool array_has(json_t *list, json_t *value) {
    size_t i;
    json_t *x;
    json_array_foreach (list, i, x) {
        if (json_equal(x, value)) return true;
    }
    return false;
}

static json_t *lists_common(json_t *a, json_t *b) {
    json_t *out = json_array(), *x;
    size_t i;
    json_array_foreach (a, i, x) {
        if (array_has(b, x)) json_array_append(out, x);
    }
    return out;
}

static json_t *lists_union(json_t *a, json_t *b) {
    json_t *out = json_copy(a), *x;
    size_t i;
    json_array_foreach (b, i, x) {
        if (!array_has(out, x)) json_array_append(out, x);
    }
    return out;
}

/* The properties of a and of b. A property that is in a and b must satisfy both of its schemas. */
static json_t *properties_merge(json_t *a, json_t *b) {
    json_t *out = json_copy(a), *value;
    const char *key;
    json_object_foreach (b, key, value) {
        json_t *old = json_object_get(out, key);
        if (old)
            json_object_set_new(out, key, json_pack("{s:[O,O]}", "allOf", old, value));
        else
            json_object_set(out, key, value);
    }
    return out;
}

/* False, with an error, if b has a property that a lacks, and a's additionalProperties is set but
 * not true. */
static bool closed_object_check(struct schema *s, json_t *a, json_t *b) {
    json_t *more = json_object_get(a, "additionalProperties"), *value;
    const char *key;
    if (!more || json_is_true(more)) return true;
    json_object_foreach (json_object_get(b, "properties"), key, value) {
        if (!json_object_get(json_object_get(a, "properties"), key))
            return schema_error(
                       s,
                       "property '%.60s' is added to an object whose 'additionalProperties' "
                       "is not true",
                       key),
                   false;
    }
    return true;
}

/* The merged value of a keyword that has the values a and b, or NULL when they cannot be merged. */
static json_t *keyword_merge(const char *key, json_t *a, json_t *b) {
    bool is_min = strncmp(key, "min", 3) == 0 || strcmp(key, "exclusiveMinimum") == 0;
    bool is_max = strncmp(key, "max", 3) == 0 || strcmp(key, "exclusiveMaximum") == 0;
    if (json_array_size(a) > 4096 || json_array_size(b) > 4096) return NULL;
    if (strcmp(key, "properties") == 0) return properties_merge(a, b);
    if (strcmp(key, "required") == 0) return lists_union(a, b);
    if (strcmp(key, "type") == 0) return types_common(a, b);
    if (strcmp(key, "enum") == 0) return lists_common(a, b);
    if ((is_min || is_max) && json_is_number(a) && json_is_number(b)) {
        bool a_more = json_number_value(a) > json_number_value(b);
        return json_incref(a_more == is_min ? a : b);
    }
    return json_equal(a, b) ? json_incref(a) : NULL;
}

/* A schema with the assertions of a and b; NULL after an error. */
static json_t *schemas_merge(struct schema *s, json_t *a, json_t *b) {
    const char *key;
    json_t *value;
    if (json_is_true(b)) return a;
    if (!json_is_object(b)) return schema_error(s, "'false' cannot be merged"), NULL;
    if (!keywords_check(s, a) || !keywords_check(s, b)) return NULL;
    if (!closed_object_check(s, a, b) || !closed_object_check(s, b, a)) return NULL;
    json_t *out = schema_retain(s, json_copy(a));
    json_object_foreach (b, key, value) {
        json_t *old = json_object_get(out, key);
        const struct keyword *k = keyword_find(key);
        if (!old || !k) {
            json_object_set(out, key, value);
        } else if (k->kind != ANNOTATION) {
            json_t *both = keyword_merge(key, old, value);
            if (!both) return schema_error(s, "two different '%s' cannot be merged", key), NULL;
            json_object_set_new(out, key, both);
        }
    }
    return out;
}

static json_t *schema_resolve_ref(struct schema *s, json_t *v) {
    for (int i = 0; json_is_object(v) && json_object_get(v, "$ref"); i++) {
        json_t *ref = json_object_get(v, "$ref");
        if (i == 32 || !json_is_string(ref))
            return schema_error(s, i == 32 ? "the references form a cycle"
                                           : "'$ref' must be a string"),
                   NULL;
        json_t *target = pointer_get(s, json_string_value(ref));
        if (target && asserts_more(v, "$ref")) {
            target = json_is_object(target)
                         ? schemas_merge(s, schema_without_keyword(s, v, "$ref"), target)
                         : (schema_error(s, "'$ref' leads to no object"), NULL);
        }
        if (!target) return NULL;
        v = target;
    }
    return v;
}

/* A call of the rule for a JSON pointer, which is created and compiled on the first call. */
static struct expr *ref_expr(struct schema *s, const char *pointer) {
    int32_t rule = grammar_builder_find_rule(s->b, pointer);
    if (rule >= 0) return expr_rule(s->b, rule);
    json_t *target = pointer_get(s, pointer);
    if (!target) return NULL;
    if (s->b->n_rules >= 4 * GRAMMAR_MAX_NAMES)
        return schema_error(s, "there are too many references");
    rule = grammar_builder_add_rule(s->b, pointer);
    struct expr *e = schema_expr(s, target);
    if (!e) return NULL;
    grammar_builder_define_rule(s->b, rule, e);
    return expr_rule(s->b, rule);
}

/* rules that all schemas share, created on first use */

static struct expr *pattern_rule_expr(struct schema *s, const char *name, const char *pattern) {
    int32_t rule = grammar_builder_find_rule(s->b, name);
    if (rule < 0) {
        struct error err;
        rule = grammar_builder_add_rule(s->b, name);
        struct expr *e = regex_expr(s->b, pattern, strlen(pattern), false, &err);
        CHECK(e != NULL);
        grammar_builder_define_rule(s->b, rule, e);
    }
    return expr_rule(s->b, rule);
}

/* A character in a JSON string, written in any way that JSON allows, except U+0000 and lone
 * surrogates. */
#define CHARACTER                                                                                  \
    "(?:[^\"\\\\\\x00-\\x1F]|\\\\(?:[\"\\\\/bfnrt]|u(?:"                                           \
    "[1-9a-cA-CefEF][0-9a-fA-F]{3}|0[1-9a-fA-F][0-9a-fA-F]{2}|"                                    \
    "00[1-9a-fA-F][0-9a-fA-F]|000[1-9a-fA-F]|[dD][0-7][0-9a-fA-F]{2}|"                             \
    "[dD][89abAB][0-9a-fA-F]{2}\\\\u[dD][c-fC-F][0-9a-fA-F]{2})))"

/* Any string. It is one rule, so that all strings of a grammar share masks. */
static struct expr *any_string_expr(struct schema *s) {
    return pattern_rule_expr(s, " string", "\"" CHARACTER "*\"");
}

/* Any characters, each in its one canonical spelling. For property names: with other spellings a
 * name could equal a known name that keys_except_expr excludes. */
static struct expr *any_key_rest_expr(struct schema *s) {
    int32_t rule = grammar_builder_find_rule(s->b, " key");
    if (rule < 0) {
        struct codepoint_set all = {0};
        rule = grammar_builder_add_rule(s->b, " key");
        codepoint_set_add(&all, 0, 0x10FFFF);
        grammar_builder_define_rule(s->b, rule,
                                    expr_repeat(s->b, expr_json_set(s->b, &all), 0, -1));
    }
    return expr_rule(s->b, rule);
}

/* Optional white space after brackets and commas: a space, or a line break and indentation. */
static struct expr *blank_expr(struct schema *s) {
    if (s->compact) return expr_puts(s->b, "");
    return pattern_rule_expr(s, " blank", "(?: |\\n[ \\t]{0,20})?");
}

static struct expr *colon_expr(struct schema *s) {
    return s->compact ? expr_puts(s->b, ":") : pattern_rule_expr(s, " colon", ": ?");
}

static struct expr *comma_expr(struct schema *s) {
    return expr_cat_of(s->b, expr_puts(s->b, ","), blank_expr(s), NULL);
}

static struct expr *quoted_expr(struct schema *s, struct expr *inside) {
    return expr_cat_of(s->b, expr_puts(s->b, "\""), inside, expr_puts(s->b, "\""), NULL);
}

/* literals */

static const char *json_type_name(json_t *v) {
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "object";
    case JSON_ARRAY:
        return "array";
    case JSON_STRING:
        return "string";
    case JSON_INTEGER:
        return "integer";
    case JSON_REAL:
        return "number";
    case JSON_NULL:
        return "null";
    default:
        return "boolean";
    }
}

static bool type_allows(json_t *type, json_t *value) {
    const char *name = json_type_name(value);
    // JSON schema counts 1.0 as an integer
    bool is_whole = json_is_real(value) && type_has(type, "integer") &&
                    json_real_value(value) == (double)(int64_t)json_real_value(value);
    return !type || type_has(type, name) || is_whole ||
           (json_is_integer(value) && type_has(type, "number"));
}

/* A JSON text of the value, with the fewest digits, from 15 on, with which it parses as the same
 * value. */
static struct expr *literal_expr(struct schema *s, json_t *value) {
    char *text = NULL;
    bool same = false;
    for (int digits = 15; digits <= 17 && !same; digits++) {
        free(text);
        text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(digits));
        CHECK(text != NULL);
        json_t *back = json_loads(text, JSON_DECODE_ANY, NULL);
        same = json_equal(back, value);
        json_decref(back);
    }
    struct expr *e = expr_puts(s->b, text);
    free(text);
    return e;
}

/* enum and const. Other assertions would have to be evaluated for each value, so only `type` may be
 * combined with them. */
static struct expr *literals_expr(struct schema *s, json_t *v) {
    json_t *list = json_object_get(v, "enum"), *one = json_object_get(v, "const"), *value;
    json_t *type = json_object_get(v, "type");
    const char *key;
    struct exprs l = {0};
    json_object_foreach (v, key, value) {
        const struct keyword *k = keyword_find(key);
        if (k && k->kind > CORE)
            return schema_error(s, "'%s' together with '%s' is not supported", key,
                                list ? "enum" : "const");
    }
    if (list && (!json_is_array(list) || json_array_size(list) == 0))
        return schema_error(s, "'enum' must be a list of at least one value");
    // `enum` and `const` together allow the constant if it is in the list
    if (list && one) list = array_has(list, one) ? NULL : schema_retain(s, json_array());
    if (!list) list = schema_retain(s, json_pack("[O]", one));
    for (size_t i = 0; i < json_array_size(list); i++)
        if (type_allows(type, json_array_get(list, i)))
            exprs_add(&l, literal_expr(s, json_array_get(list, i)));
    struct expr *e = expr_alt(s->b, &l);
    return e ? e : empty_expr(s);
}

/* strings */

#define HOST "[A-Za-z0-9](?:[A-Za-z0-9-]{0,60}[A-Za-z0-9])?"
#define BYTE "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define DATE                                                                                       \
    "(?:[12]\\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|"                                \
    "(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|02-(?:0[1-9]|1\\d|2[0-8]))|"                              \
    "(?:[12]\\d(?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)-02-29)"
#define TIME                                                                                       \
    "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,6})?(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)"
/* The formats are narrower than the standards: four-digit years from 1000 to 2999, no leap seconds,
 * IPv6 without "::", lower-case UUIDs. A new format needs only a new row. */
static const struct format {
    const char *name, *pattern;
} formats[] = {
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE "T" TIME},
    {"duration", "P(?:\\d{1,4}[DWMY]|T\\d{1,4}[HMS])"},
    {"uuid", "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"},
    {"email", "[A-Za-z0-9_+-]{1,32}(?:\\.[A-Za-z0-9_+-]{1,32}){0,3}@" HOST "(?:\\." HOST "){1,4}"},
    {"hostname", HOST "(?:\\." HOST "){0,3}"},
    {"ipv4", BYTE "(?:\\." BYTE "){3}"},
    {"ipv6", "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}"},
    {"uri",
     "https?://" HOST "(?:\\." HOST "){0,4}(?::[1-9]\\d{0,3})?(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*"},
};
#undef HOST
#undef BYTE
#undef DATE
#undef TIME

/* A quoted JSON string that matches the pattern. */
static struct expr *pattern_expr(struct schema *s, const char *pattern) {
    struct error err = {0};
    struct expr *e = regex_expr(s->b, pattern, strlen(pattern), true, &err);
    return e ? quoted_expr(s, e) : schema_error(s, "'pattern': %s", err.text);
}

static struct expr *format_expr(struct schema *s, json_t *format) {
    const char *name = json_is_string(format) ? json_string_value(format) : "?";
    for (size_t i = 0; i < ARRAY_LEN(formats); i++) {
        if (strcmp(formats[i].name, name) != 0) continue;
        char *pattern = xasprintf("^(?:%s)$", formats[i].pattern);
        struct expr *e = pattern_expr(s, pattern);
        free(pattern);
        return e;
    }
    return schema_error(
        s,
        "format '%.60s' is not supported; known are date, time, date-time, duration, "
        "uuid, email, hostname, ipv4, ipv6, uri",
        name);
}

static struct expr *string_expr(struct schema *s, json_t *v) {
    json_t *pattern = json_object_get(v, "pattern"), *format = json_object_get(v, "format");
    int32_t min, max;
    if (!keyword_count(s, v, "minLength", 0, &min) || !keyword_count(s, v, "maxLength", -1, &max))
        return NULL;
    bool counted = min > 0 || max >= 0;
    if ((pattern != NULL) + (format != NULL) + counted > 1)
        return schema_error(
            s, "'pattern', 'format' and lengths cannot be combined; put the length into "
               "the pattern");
    if (format) return format_expr(s, format);
    if (pattern && !json_is_string(pattern)) return schema_error(s, "'pattern' must be a string");
    if (pattern) return pattern_expr(s, json_string_value(pattern));
    if (max >= 0 && max < min) return empty_expr(s);
    if (!counted) return any_string_expr(s);
    struct expr *character = pattern_rule_expr(s, " character", CHARACTER);
    return quoted_expr(s, expr_repeat(s->b, character, min, max));
}

/* numbers */

/* A bound as decimal digits, without unnecessary zeros. */
struct schema_bound {
    bool is_set, exclusive, negative;
    char whole[330], frac[24];
    int n_whole, n_frac;
};

/* Writes the number in decimal, with the fewest digits after the point with which it parses as the
 * same number. False: more than DIGITS_FRACTION digits are needed. */
static bool bound_digits(json_t *n, char *out, size_t size) {
    if (json_is_integer(n)) {
        snprintf(out, size, "%lld", (long long)json_integer_value(n));
        return true;
    }
    for (int digits = 0; digits <= DIGITS_FRACTION; digits++) {
        snprintf(out, size, "%.*f", digits, json_real_value(n));
        if (strtod(out, NULL) == json_real_value(n)) return true;
    }
    return false;
}

/* Reads a bound from keyword `closed` (inclusive) or `open` (exclusive). False after an error. */
static bool bound_read(struct schema *s, json_t *v, const char *closed, const char *open,
                       struct schema_bound *out) {
    json_t *a = json_object_get(v, closed), *b = json_object_get(v, open), *n = a ? a : b;
    char text[360];
    *out = (struct schema_bound){.is_set = n != NULL, .exclusive = !a};
    if (!n) return true;
    if (a && b)
        return schema_error(s, "'%s' together with '%s' is not supported", closed, open), false;
    if (!json_is_number(n))
        return schema_error(s, "'%s' must be a number", a ? closed : open), false;
    if (!bound_digits(n, text, sizeof text))
        return schema_error(s, "'%s' has too many digits", a ? closed : open), false;
    out->negative = text[0] == '-';
    const char *digits = text + out->negative, *point = strchr(digits, '.');
    out->n_whole = (int)(point ? (size_t)(point - digits) : strlen(digits));
    memcpy(out->whole, digits, (size_t)out->n_whole);
    if (point) out->n_frac = (int)strlen(point + 1);
    if (point) memcpy(out->frac, point + 1, (size_t)out->n_frac);
    while (out->n_frac > 0 && out->frac[out->n_frac - 1] == '0') out->n_frac--;
    if (strcmp(out->whole, "0") == 0 && out->n_frac == 0) out->negative = false;
    return true;
}

/* Expressions for the absolute values between two bounds, digit by digit. In the functions below
 * `low` means that all digits so far are equal to those of the lower bound, so that it limits the
 * next digit; `high` means the same for the upper bound. */
struct magnitudes {
    struct schema *s;
    const struct schema_bound *lo, *hi;
    int n_whole; /* number of digits before the point */
    bool integer;
};

static struct expr *digit_expr(struct schema *s, char lo, char hi) {
    struct codepoint_set r = {0};
    if (lo <= hi) codepoint_set_add(&r, (uint32_t)lo, (uint32_t)hi);
    return expr_set(s->b, &r);
}

/* An expression for the next digit, from `lo` to `hi`, followed by the digits of `next`. */
typedef struct expr *(*digits_fn)(const struct magnitudes *m, int pos, bool low, bool high);
static struct expr *next_digit_expr(const struct magnitudes *m, digits_fn next, int pos, bool low,
                                    bool high, char lo, char hi) {
    struct schema *s = m->s;
    struct exprs l = {0};
    if (lo > hi) return empty_expr(s);
    if (lo == hi)
        return expr_cat_of(s->b, digit_expr(s, lo, lo), next(m, pos + 1, low, high), NULL);
    // after the digit of a bound, that bound limits the next digit; after a digit between the
    // bounds, none does
    char first = (char)(lo + low), last = (char)(hi - high);
    if (low)
        exprs_add(&l,
                  expr_cat_of(s->b, digit_expr(s, lo, lo), next(m, pos + 1, true, false), NULL));
    if (first <= last)
        exprs_add(&l, expr_cat_of(s->b, digit_expr(s, first, last), next(m, pos + 1, false, false),
                                  NULL));
    if (high)
        exprs_add(&l,
                  expr_cat_of(s->b, digit_expr(s, hi, hi), next(m, pos + 1, false, true), NULL));
    return expr_alt(s->b, &l);
}

/* True if the number may end after `n_digits` digits after the point. */
static bool digits_may_end(const struct magnitudes *m, int n_digits, bool low, bool high) {
    bool above = !low || (n_digits >= m->lo->n_frac && !m->lo->exclusive);
    bool below = !high || n_digits < m->hi->n_frac || !m->hi->exclusive;
    return above && below;
}

/* The digits after the point from position `pos` on. At least one digit follows the point, and none
 * follows the last digit of an upper bound that all digits equal. */
static struct expr *fraction_expr(const struct magnitudes *m, int pos, bool low, bool high) {
    struct schema *s = m->s;
    if (low && pos >= m->lo->n_frac && !m->lo->exclusive) low = false; // the lower bound is reached
    bool end = pos > 0 && digits_may_end(m, pos, low, high);
    if (!low && !high)
        return expr_repeat(s->b, digit_expr(s, '0', '9'), pos == 0, DIGITS_FRACTION - pos);
    struct expr *more = empty_expr(s);
    if (pos < DIGITS_FRACTION && !(high && pos >= m->hi->n_frac)) {
        char lo = low && pos < m->lo->n_frac ? m->lo->frac[pos] : '0';
        more = next_digit_expr(m, fraction_expr, pos, low, high, lo, high ? m->hi->frac[pos] : '9');
    }
    return end ? expr_alt_of(s->b, expr_puts(s->b, ""), more, NULL) : more;
}

/* The digits before the point from position `pos` on, and the fraction. */
static struct expr *whole_digits_expr(const struct magnitudes *m, int pos, bool low, bool high) {
    struct schema *s = m->s;
    if (pos < m->n_whole && !low && !high && pos > 0) {
        struct expr *free_digits =
            expr_repeat(s->b, digit_expr(s, '0', '9'), m->n_whole - pos, m->n_whole - pos);
        return expr_cat_of(s->b, free_digits, whole_digits_expr(m, m->n_whole, false, false), NULL);
    }
    if (pos < m->n_whole) {
        char min_digit = pos == 0 && m->n_whole > 1 ? '1' : '0';
        return next_digit_expr(m, whole_digits_expr, pos, low, high,
                               low ? m->lo->whole[pos] : min_digit, high ? m->hi->whole[pos] : '9');
    }
    struct expr *end = digits_may_end(m, 0, low, high) ? expr_puts(s->b, "") : empty_expr(s);
    if (m->integer) return end;
    struct expr *fraction_part =
        expr_cat_of(s->b, expr_puts(s->b, "."), fraction_expr(m, 0, low, high), NULL);
    return expr_alt_of(s->b, end, fraction_part, NULL);
}

/* Absolute values from `lo` to `hi`: one alternative for each number of digits before the point. */
static struct expr *magnitudes_expr(struct schema *s, const struct schema_bound *lo,
                                    const struct schema_bound *hi, bool integer) {
    struct exprs l = {0};
    struct magnitudes m = {s, lo, hi, 0, integer};
    int max_digits = hi->is_set ? MIN(hi->n_whole, DIGITS_WHOLE) : DIGITS_WHOLE;
    for (m.n_whole = lo->n_whole; m.n_whole <= max_digits; m.n_whole++)
        exprs_add(&l, whole_digits_expr(&m, 0, m.n_whole == lo->n_whole,
                                        hi->is_set && m.n_whole == hi->n_whole));
    struct expr *e = expr_alt(s->b, &l);
    return e ? e : empty_expr(s);
}

/* Negative numbers are "-" and an absolute value between the swapped bounds. "-0" is not generated.
 */
static struct expr *bounded_number_expr(struct schema *s, const struct schema_bound *min,
                                        const struct schema_bound *max, bool integer) {
    struct schema_bound zero = {.is_set = true, .whole = "0", .n_whole = 1}, above_zero = zero;
    struct schema_bound no_bound = {0};
    struct exprs l = {0};
    above_zero.exclusive = true;
    if (!max->is_set || !max->negative) {
        const struct schema_bound *lo = min->is_set && !min->negative ? min : &zero;
        exprs_add(&l, magnitudes_expr(s, lo, max, integer));
    }
    if (!min->is_set || min->negative) {
        const struct schema_bound *lo = max->is_set && max->negative ? max : &above_zero;
        struct expr *e = magnitudes_expr(s, lo, min->is_set ? min : &no_bound, integer);
        exprs_add(&l, expr_cat_of(s->b, expr_puts(s->b, "-"), e, NULL));
    }
    struct expr *e = expr_alt(s->b, &l);
    return e ? e : empty_expr(s);
}

static struct expr *number_expr(struct schema *s, json_t *v, bool integer) {
    struct schema_bound min, max;
    if (!bound_read(s, v, "minimum", "exclusiveMinimum", &min) ||
        !bound_read(s, v, "maximum", "exclusiveMaximum", &max))
        return NULL;
    if (min.is_set || max.is_set) return bounded_number_expr(s, &min, &max, integer);
    if (integer) return pattern_rule_expr(s, " integer", "0|-?[1-9][0-9]{0,17}");
    return pattern_rule_expr(s, " number",
                             "-?(?:0|[1-9][0-9]{0,17})(?:\\.[0-9]{1,17})?(?:[eE][+-]?[0-9]{1,2})?");
}

/* arrays */

struct items_spec {
    json_t *prefix, *rest; /* rest: schema of the items after `prefix`; NULL: any value */
    int32_t n_prefix, min, max;
};

/* The items from item i on, with a comma before each item except item 0. */
static struct expr *items_expr(struct schema *s, const struct items_spec *t, int32_t i) {
    struct grammar_builder *b = s->b;
    struct expr *e, *empty = expr_puts(b, "");
    if (i == t->max) return empty;
    if (i >= t->n_prefix) {
        if (json_is_false(t->rest)) return i >= t->min ? empty : empty_expr(s);
        e = child_expr(s, t->rest ? t->rest : json_true(), "items", NULL);
        if (!e) return NULL;
        e = shared_rule_expr(s, e);
        int32_t min_more = MAX(t->min - i, 0), max_more = t->max < 0 ? -1 : t->max - i;
        struct expr *more = expr_cat_of(b, comma_expr(s), e, NULL);
        if (i > 0) return expr_repeat(b, more, min_more, max_more);
        more = expr_repeat(b, more, MAX(min_more - 1, 0), max_more < 0 ? -1 : max_more - 1);
        e = expr_cat_of(b, e, more, NULL);
    } else {
        char index[16];
        snprintf(index, sizeof index, "%d", i);
        e = child_expr(s, json_array_get(t->prefix, (size_t)i), "prefixItems", index);
        struct expr *more = e ? items_expr(s, t, i + 1) : NULL;
        if (!more) return NULL;
        e = i > 0 ? expr_cat_of(b, comma_expr(s), e, more, NULL) : expr_cat_of(b, e, more, NULL);
    }
    return i >= t->min ? expr_optional(b, e) : e;
}

/* "[" first ("," next)* "]" with the number of items that the schema allows. */
static struct expr *array_expr(struct schema *s, json_t *v) {
    struct items_spec t = {json_object_get(v, "prefixItems"), json_object_get(v, "items"), 0, 0, 0};
    if (!keyword_count(s, v, "minItems", 0, &t.min) || !keyword_count(s, v, "maxItems", -1, &t.max))
        return NULL;
    if (t.prefix && !json_is_array(t.prefix))
        return schema_error(s, "'prefixItems' must be a list");
    t.n_prefix = (int32_t)json_array_size(t.prefix);
    if (t.n_prefix > GRAMMAR_MAX_NESTING)
        return schema_error(s, "'prefixItems' has more than %d schemas", GRAMMAR_MAX_NESTING);
    if (json_is_array(t.rest))
        return schema_error(s, "a list in 'items' belongs to an old draft: use 'prefixItems'");
    if (t.max >= 0 && t.max < t.min) return empty_expr(s);
    struct expr *e = items_expr(s, &t, 0);
    if (!e) return NULL;
    return expr_cat_of(s->b, expr_puts(s->b, "["), blank_expr(s), e, blank_expr(s),
                       expr_puts(s->b, "]"), NULL);
}

/* objects */

/* A property's name as code points. */
struct property_keys {
    uint32_t *v;
    int32_t n;
};

static int key_compare(const void *a, const void *b) {
    const struct property_keys *x = a, *y = b;
    for (int32_t i = 0; i < x->n && i < y->n; i++)
        if (x->v[i] != y->v[i]) return x->v[i] < y->v[i] ? -1 : 1;
    return (x->n > y->n) - (x->n < y->n);
}

/* The rest, after `pos` characters, of all strings that begin with these characters and are not in
 * keys[0..n). The keys are sorted and have their first `pos` characters in common. */
static struct expr *keys_except_expr(struct schema *s, const struct property_keys *keys, int32_t n,
                                     int32_t pos) {
    struct exprs l = {0};
    struct codepoint_set others = {0};
    int32_t i = 0;
    if (n > 0 && keys[0].n == pos)
        i++;
    else
        exprs_add(&l, expr_puts(s->b, ""));
    for (int32_t k; i < n; i = k) {
        struct codepoint_set one = {0};
        uint32_t c = keys[i].v[pos];
        for (k = i + 1; k < n && keys[k].v[pos] == c; k++) {}
        codepoint_set_add(&others, c, c);
        codepoint_set_add(&one, c, c);
        struct expr *e = expr_json_set(s->b, &one);
        if (e)
            exprs_add(&l,
                      expr_cat_of(s->b, e, keys_except_expr(s, keys + i, k - i, pos + 1), NULL));
    }
    codepoint_set_negate(&others);
    exprs_add(&l, expr_cat_of(s->b, expr_json_set(s->b, &others), any_key_rest_expr(s), NULL));
    return expr_alt(s->b, &l);
}

/* A quoted name that is not in `known`. NULL after an error. */
static struct expr *other_key_expr(struct schema *s, json_t *known) {
    int32_t n = (int32_t)json_object_size(known), i = 0;
    struct property_keys *keys = xcalloc((size_t)n + 1, sizeof *keys);
    const char *name;
    json_t *value;
    struct expr *e = NULL;
    bool good = true;
    json_object_foreach (known, name, value) {
        size_t len = strlen(name);
        struct property_keys *k = &keys[i++];
        k->v = xcalloc(len + 1, sizeof *k->v);
        for (size_t pos = 0; pos < len;) {
            int bytes = 1;
            k->v[k->n++] = (uint32_t)utf8_decode(name + pos, len - pos, &bytes);
            pos += (size_t)bytes;
        }
        good = good && k->n <= 1000;
    }
    qsort(keys, (size_t)n, sizeof *keys, key_compare);
    if (good)
        e = quoted_expr(s, keys_except_expr(s, keys, n, 0));
    else
        schema_error(s, "a property's name is too long");
    for (i = 0; i < n; i++) free(keys[i].v);
    free(keys);
    return e;
}

/* A property (name and value) whose name is not in `known`. NULL after an error. */
static struct expr *other_member_expr(struct schema *s, json_t *known, json_t *value) {
    struct expr *key = other_key_expr(s, known);
    struct expr *e = key ? child_expr(s, value, "additionalProperties", NULL) : NULL;
    return e ? shared_rule_expr(s, expr_cat_of(s->b, key, colon_expr(s), e, NULL)) : NULL;
}

/* A property: its name, a colon and its value. NULL after an error. */
static struct expr *member_expr(struct schema *s, const char *name, json_t *value) {
    json_t *text = json_string(name);
    struct expr *key = literal_expr(s, text), *e = child_expr(s, value, "properties", name);
    json_decref(text);
    return e ? expr_cat_of(s->b, key, colon_expr(s), e, NULL) : NULL;
}

/*
 * The properties of an object, built from the last property to the first. tail[1] is the expression
 * of the remaining properties when a property precedes them, so that they begin with a comma;
 * tail[0], when none does. An optional property may be skipped.
 */
static struct expr *members_expr(struct schema *s, json_t *known, json_t *required, json_t *more) {
    struct grammar_builder *b = s->b;
    struct expr *tail[2] = {expr_puts(b, ""), expr_puts(b, "")};
    if (!json_is_false(more)) {
        struct expr *other = other_member_expr(s, known, more);
        if (!other) return NULL;
        tail[1] = expr_repeat(b, expr_cat_of(b, comma_expr(s), other, NULL), 0, -1);
        tail[0] = expr_optional(b, expr_cat_of(b, other, tail[1], NULL));
    }
    json_t *names = schema_retain(s, json_array()), *value;
    const char *name;
    json_object_foreach (known, name, value) json_array_append_new(names, json_string(name));
    for (size_t i = json_array_size(names); i-- > 0;) {
        name = json_string_value(json_array_get(names, i));
        struct expr *e = member_expr(s, name, json_object_get(known, name));
        if (!e) return NULL;
        bool is_required = array_has(required, json_array_get(names, i));
        struct expr *next = shared_rule_expr(s, tail[1]), *this = shared_rule_expr(s, e);
        struct expr *included[2] = {expr_cat_of(b, this, next, NULL),
                                    expr_cat_of(b, comma_expr(s), this, next, NULL)};
        for (int k = 0; k < 2; k++) {
            struct expr *skipped = k ? next : tail[0];
            tail[k] = is_required ? included[k] : expr_alt_of(b, included[k], skipped, NULL);
        }
        tail[0] = shared_rule_expr(s, tail[0]);
    }
    return tail[0];
}

/* A required property that is not in `properties` has the schema of additionalProperties, or any
 * value if that is not set. */
static struct expr *object_expr(struct schema *s, json_t *v) {
    json_t *properties = json_object_get(v, "properties"), *name;
    json_t *required = json_object_get(v, "required");
    json_t *more = json_object_get(v, "additionalProperties");
    size_t i;
    if (properties && !json_is_object(properties))
        return schema_error(s, "'properties' must be an object");
    if (required && !json_is_array(required)) return schema_error(s, "'required' must be a list");
    if (!more) more = properties ? json_false() : json_true();
    json_t *known = schema_retain(s, properties ? json_copy(properties) : json_object());
    json_array_foreach (required, i, name) {
        if (!json_is_string(name)) return schema_error(s, "'required' must be a list of names");
        const char *key = json_string_value(name);
        if (json_object_get(known, key)) continue;
        if (json_is_false(more) && json_object_get(v, "additionalProperties")) return empty_expr(s);
        json_object_set(known, key, json_is_false(more) ? json_true() : more);
    }
    struct expr *e = members_expr(s, known, required, more);
    if (!e) return NULL;
    struct grammar_builder *b = s->b;
    return expr_cat_of(b, expr_puts(b, "{"), blank_expr(s), e, blank_expr(s), expr_puts(b, "}"),
                       NULL);
}

/* values */

/* Any JSON value: a rule that refers to itself. */
static struct expr *any_value_expr(struct schema *s) {
    int32_t rule = grammar_builder_find_rule(s->b, " value");
    if (rule >= 0) return expr_rule(s->b, rule);
    rule = grammar_builder_add_rule(s->b, " value");
    json_t *any = schema_retain(s, json_object());
    struct expr *object = object_expr(s, any), *array = object ? array_expr(s, any) : NULL;
    if (!array) return NULL;
    grammar_builder_define_rule(s->b, rule,
                                expr_alt_of(s->b, object, array, string_expr(s, any),
                                            number_expr(s, any, false), expr_puts(s->b, "true"),
                                            expr_puts(s->b, "false"), expr_puts(s->b, "null"),
                                            NULL));
    return expr_rule(s->b, rule);
}

static struct expr *type_expr(struct schema *s, json_t *v, const char *type) {
    if (strcmp(type, "object") == 0) return object_expr(s, v);
    if (strcmp(type, "array") == 0) return array_expr(s, v);
    if (strcmp(type, "string") == 0) return string_expr(s, v);
    if (strcmp(type, "number") == 0) return number_expr(s, v, false);
    if (strcmp(type, "integer") == 0) return number_expr(s, v, true);
    if (strcmp(type, "null") == 0) return expr_puts(s->b, "null");
    if (strcmp(type, "boolean") == 0)
        return expr_alt_of(s->b, expr_puts(s->b, "true"), expr_puts(s->b, "false"), NULL);
    return schema_error(s, "type '%.60s' is unknown", type);
}

/* The types that the keywords of a schema without `type` imply. */
static json_t *types_implied(struct schema *s, json_t *v) {
    static const char *const of_kind[] = {[ON_OBJECT] = "object",
                                          [ON_ARRAY] = "array",
                                          [ON_STRING] = "string",
                                          [ON_NUMBER] = "number"};
    json_t *out = schema_retain(s, json_array()), *value;
    const char *key;
    json_object_foreach (v, key, value) {
        const struct keyword *k = keyword_find(key);
        if (k && k->kind > CORE && !type_has(out, of_kind[k->kind]))
            json_array_append_new(out, json_string(of_kind[k->kind]));
    }
    return out;
}

static struct expr *types_expr(struct schema *s, json_t *v) {
    json_t *types = json_object_get(v, "type"), *type;
    struct exprs l = {0};
    size_t i;
    if (!types) types = types_implied(s, v);
    if (json_is_string(types)) return type_expr(s, v, json_string_value(types));
    if (!json_is_array(types)) return schema_error(s, "'type' must be a name or a list of names");
    if (json_array_size(types) == 0 && !json_object_get(v, "type")) return any_value_expr(s);
    json_array_foreach (types, i, type) {
        const char *name = json_is_string(type) ? json_string_value(type) : "?";
        struct expr *e = type_expr(s, v, name);
        if (!e) return free(l.v), NULL;
        exprs_add(&l, e);
    }
    struct expr *e = expr_alt(s->b, &l);
    return e ? e : empty_expr(s);
}

/* True if it is certain that no value generated for `a` is valid under `b`. */
static bool schemas_disjoint(struct schema *s, json_t *a, json_t *b, int depth);

static bool required_has(json_t *v, const char *name) {
    json_t *list = json_object_get(v, "required"), *x;
    size_t i;
    json_array_foreach (list, i, x) {
        if (json_is_string(x) && strcmp(json_string_value(x), name) == 0) return true;
    }
    return false;
}

/* For two schemas of objects: true if b requires a property that is never generated for a, or if a
 * requires a property whose schemas in a and b are disjoint. */
static bool objects_disjoint(struct schema *s, json_t *a, json_t *b, int depth) {
    json_t *known = json_object_get(a, "properties"), *more, *name, *value;
    const char *key;
    size_t i;
    more = json_object_get(a, "additionalProperties");
    /* these keywords may add properties */
    bool branched =
        json_object_get(a, "anyOf") || json_object_get(a, "oneOf") || json_object_get(a, "allOf");
    json_array_foreach (json_object_get(b, "required"), i, name) {
        bool never = known && !branched && (!more || json_is_false(more)) && json_is_string(name) &&
                     !json_object_get(known, json_string_value(name)) &&
                     !required_has(a, json_string_value(name));
        if (never) return true;
    }
    json_object_foreach (known, key, value) {
        json_t *other = json_object_get(json_object_get(b, "properties"), key);
        if (other && required_has(a, key) && schemas_disjoint(s, value, other, depth + 1))
            return true;
    }
    return false;
}

/* The schema's `type`, or the types that its literals or keywords imply. */
static json_t *schema_types(struct schema *s, json_t *v) {
    json_t *list = json_object_get(v, "enum"), *out = schema_retain(s, json_array());
    json_t *one = json_object_get(v, "const"), *type = json_object_get(v, "type");
    if (type) return type;
    for (size_t i = 0; i < json_array_size(list); i++)
        json_array_append_new(out, json_string(json_type_name(json_array_get(list, i))));
    if (one) json_array_append_new(out, json_string(json_type_name(one)));
    return json_array_size(out) ? out : types_implied(s, v);
}

static json_t *schema_values(struct schema *s, json_t *v) {
    json_t *one = json_object_get(v, "const");
    return one ? schema_retain(s, json_pack("[O]", one)) : json_object_get(v, "enum");
}

static bool schemas_disjoint(struct schema *s, json_t *a, json_t *b, int depth) {
    a = schema_resolve_ref(s, a);
    b = schema_resolve_ref(s, b);
    if (depth > 4 || ++s->visits > VISIT_LIMIT || !json_is_object(a) || !json_is_object(b))
        return false;
    json_t *va = schema_values(s, a), *vb = schema_values(s, b);
    if (va && vb) return json_array_size(schema_retain(s, lists_common(va, vb))) == 0;
    if (json_object_get(a, "nullable") || json_object_get(b, "nullable")) return false;
    json_t *ta = schema_types(s, a), *tb = schema_types(s, b);
    bool typed = json_object_get(b, "type") || vb;
    if (json_array_size(ta) || json_is_string(ta))
        if (typed && json_array_size(schema_retain(s, types_common(ta, tb))) == 0) return true;
    bool only_object = type_has(ta, "object") && (json_is_string(ta) || json_array_size(ta) == 1);
    return only_object && objects_disjoint(s, a, b, depth);
}

/* oneOf is generated like anyOf, which is correct only if no text is valid under two branches. */
static bool branches_check(struct schema *s, json_t *branches) {
    for (size_t i = 0; i < json_array_size(branches); i++)
        for (size_t k = 0; k < json_array_size(branches); k++) {
            json_t *a = json_array_get(branches, i), *b = json_array_get(branches, k);
            if (i == k || schemas_disjoint(s, a, b, 0)) continue;
            if (s->err->code < 0) return false;
            return schema_error(s,
                                "branches %zu and %zu of 'oneOf' may both be valid; give them a "
                                "'const' that differs, or write 'anyOf'",
                                MIN(i, k), MAX(i, k)),
                   false;
        }
    return true;
}

/* Assertions next to anyOf or oneOf are merged into every branch. */
static struct expr *branches_expr(struct schema *s, json_t *v, const char *keyword) {
    json_t *branches = json_object_get(v, keyword), *branch;
    json_t *assertions = asserts_more(v, keyword) ? schema_without_keyword(s, v, keyword) : NULL;
    struct exprs l = {0};
    size_t i;
    if (!json_is_array(branches) || json_array_size(branches) == 0)
        return schema_error(s, "'%s' must be a list of at least one schema", keyword);
    if (strcmp(keyword, "oneOf") == 0 && !branches_check(s, branches)) return NULL;
    json_array_foreach (branches, i, branch) {
        char index[24];
        snprintf(index, sizeof index, "%zu", i);
        if (assertions && !(branch = schema_resolve_ref(s, branch))) return free(l.v), NULL;
        if (assertions && !(branch = schemas_merge(s, assertions, branch))) return free(l.v), NULL;
        struct expr *e = child_expr(s, branch, keyword, index);
        if (!e) return free(l.v), NULL;
        exprs_add(&l, e);
    }
    return expr_alt(s->b, &l);
}

static struct expr *all_of_expr(struct schema *s, json_t *v) {
    json_t *parts = json_object_get(v, "allOf"), *out = schema_without_keyword(s, v, "allOf"),
           *part;
    size_t i;
    if (!json_is_array(parts)) return schema_error(s, "'allOf' must be a list of schemas");
    json_array_foreach (parts, i, part) {
        if (!(part = schema_resolve_ref(s, part)) || !(out = schemas_merge(s, out, part)))
            return NULL;
    }
    return schema_expr(s, out);
}

static struct expr *schema_object_expr(struct schema *s, json_t *v) {
    json_t *ref = json_object_get(v, "$ref"), *nullable = json_object_get(v, "nullable");
    if (!keywords_check(s, v)) return NULL;
    if (json_is_true(nullable)) {
        struct expr *e = schema_expr(s, schema_without_keyword(s, v, "nullable"));
        return e ? expr_alt_of(s->b, e, expr_puts(s->b, "null"), NULL) : NULL;
    }
    if (ref && json_is_string(ref) && !asserts_more(v, "$ref"))
        return ref_expr(s, json_string_value(ref));
    if (ref) return (v = schema_resolve_ref(s, v)) ? schema_expr(s, v) : NULL;
    if (json_object_get(v, "allOf")) return all_of_expr(s, v);
    if (json_object_get(v, "anyOf")) return branches_expr(s, v, "anyOf");
    if (json_object_get(v, "oneOf")) return branches_expr(s, v, "oneOf");
    if (json_object_get(v, "enum") || json_object_get(v, "const")) return literals_expr(s, v);
    return types_expr(s, v);
}

static struct expr *schema_expr(struct schema *s, json_t *v) {
    if (json_is_true(v)) return any_value_expr(s);
    if (json_is_false(v)) return empty_expr(s);
    if (!json_is_object(v)) return schema_error(s, "a schema must be an object, true or false");
    if (s->nesting == GRAMMAR_MAX_NESTING) return schema_error(s, "schemas are nested too deeply");
    if (++s->visits > VISIT_LIMIT || grammar_builder_is_full(s->b))
        return schema_error(s, "the schema is too large");
    s->nesting++;
    struct expr *e = schema_object_expr(s, v);
    s->nesting--;
    return e;
}

/* Compiles s->root; `text` is the source of the grammar. then: NULL, or what follows the value,
 * before which a space may be. */
static struct grammar *schema_compile(struct schema *s, const char *then, const char *kind,
                                      const char *text, size_t len) {
    struct grammar *g = NULL;
    s->retained = json_array();
    buf_puts(&s->path, "");
    struct expr *e = ref_expr(s, "#");
    if (e && then)
        e = expr_cat_of(s->b, pattern_rule_expr(s, " space", " ?"), e, expr_puts(s->b, then), NULL);
    if (e) {
        int32_t root = grammar_builder_add_rule(s->b, NULL);
        grammar_builder_define_rule(s->b, root, e);
        g = grammar_build(s->b, root, kind, text, len, s->err);
    } else {
        grammar_builder_release(s->b);
    }
    json_decref(s->retained);
    buf_release(&s->path);
    return g;
}

struct grammar *grammar_new_json_schema(const char *text, size_t len, bool compact,
                                        struct error *err) {
    struct grammar_builder b = {0};
    struct schema s = {.b = &b, .compact = compact, .err = err};
    err->code = OK;
    if (grammar_check_text("JSON schema", text, len, err) != OK) return NULL;
    struct json_limits left = json_request_limits;
    s.root = json_parse_limited(text, len, "JSON schema", &left, err);
    if (!s.root) return NULL;
    struct grammar *g = schema_compile(
        &s, NULL, compact ? GRAMMAR_KIND_COMPACT_JSON_SCHEMA : GRAMMAR_KIND_JSON_SCHEMA, text, len);
    json_decref(s.root);
    return g;
}

struct grammar *grammar_new_json_value(const json_t *schema, const char *then, struct error *err) {
    struct grammar_builder b = {0};
    struct schema s = {.b = &b, .err = err, .root = (json_t *)(uintptr_t)schema};
    json_t *source = json_pack("{s:O,s:s}", "schema", schema, "then", then);
    char *text = source ? json_dumps(source, JSON_COMPACT) : NULL;
    struct grammar *g = NULL;
    err->code = OK;
    if (!text)
        error_set(err, ERR_FORMAT, "the JSON schema, or the text after its value, is not UTF-8");
    else if (grammar_check_text("JSON schema", text, strlen(text), err) == OK)
        g = schema_compile(&s, then, GRAMMAR_KIND_JSON_VALUE, text, strlen(text));
    free(text);
    json_decref(source);
    return g;
}

struct grammar *grammar_from_json_value_source(const char *text, size_t len, struct error *err) {
    struct json_limits left = json_request_limits;
    json_t *v = json_parse_limited(text, len, "JSON schema", &left, err);
    const char *then = json_string_value(json_object_get(v, "then"));
    struct grammar *g = NULL;
    if (then)
        g = grammar_new_json_value(json_object_get(v, "schema"), then, err);
    else if (v)
        error_set(err, ERR_FORMAT, "the source of a grammar needs 'schema' and 'then'");
    json_decref(v);
    return g;
}

struct grammar *grammar_new_json_object(struct error *err) {
    static const char text[] = "{\"type\":\"object\"}";
    return grammar_new_json_schema(text, strlen(text), false, err);
}
