/*
 * json_schema: the check json-schema. The text is JSON that a schema accepts, as src/grammar reads
 * schemas: an object with `properties` has no others unless `additionalProperties` allows them.
 *
 * A grammar reads an object's properties in the schema's order and bounds white space, but neither
 * matters to a JSON schema. So the JSON is first copied without white space, with the members of
 * each object in the order of the schema's `properties`; references are followed, branches (anyOf,
 * oneOf, allOf) are not. Numbers and strings are copied as written.
 */
#define _GNU_SOURCE
#include "check/internal.h"
#include "grammar/grammar.h"

#include <stdlib.h>
#include <string.h>

enum { SCHEMA_MAX_BYTES = 4 << 20 };

struct json_schema {
    json_t *root;
    struct grammar *grammar;
};

/* The schema at the end of the references of `v`, within the document; NULL: none. */
static const json_t *schema_resolve(const struct json_schema *s, const json_t *v) {
    const char *ref;
    for (int i = 0; i < 16 && (ref = json_string_value(json_object_get(v, "$ref"))); i++) {
        if (*ref++ != '#') return NULL;
        for (v = s->root; v && *ref == '/';) {
            size_t n = strcspn(++ref, "/");
            char *key = xstrndup(ref, n);
            v = json_object_get(v, key);
            free(key);
            ref += n;
        }
    }
    return v;
}

/* A valid JSON text, read from `p` on. */
struct json_copy {
    const struct json_schema *schema;
    const char *p;
};

static void skip_blanks(struct json_copy *c) {
    while (*c->p && strchr(" \t\r\n", *c->p)) c->p++;
}

/* A string, number or word, as written. */
static void copy_scalar(struct json_copy *c, struct buf *out) {
    const char *begin = c->p;
    if (*c->p == '"') {
        for (c->p++; *c->p != '"'; c->p++) c->p += *c->p == '\\';
        c->p++;
    } else {
        c->p += strcspn(c->p, " \t\r\n,:]}");
    }
    buf_add(out, begin, (size_t)(c->p - begin));
}

static void copy_value(struct json_copy *c, const json_t *schema, struct buf *out);

static void copy_array(struct json_copy *c, const json_t *schema, struct buf *out) {
    const json_t *prefix = json_object_get(schema, "prefixItems");
    buf_puts(out, "[");
    c->p++;
    skip_blanks(c);
    for (size_t i = 0; *c->p != ']'; i++) {
        const json_t *item = json_array_get(prefix, i);
        copy_value(c, item ? item : json_object_get(schema, "items"), out);
        if (*c->p == ',') buf_puts(out, ","), c->p++;
        skip_blanks(c);
    }
    buf_puts(out, "]");
    c->p++;
}

struct json_member {
    struct buf text; /* "key":value */
    size_t rank;     /* position in the schema's properties, or after all of them */
    size_t index;    /* in the text */
};

static int member_compare(const void *a, const void *b) {
    const struct json_member *x = a, *y = b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* The position of a key, which is a JSON string as written, among the properties. *schema: the
 * schema of its value. */
static size_t property_rank(const json_t *properties, const struct buf *key,
                            const json_t **schema) {
    json_t *name = json_loadb(key->data, key->len, JSON_DECODE_ANY, NULL);
    const char *wanted = json_string_value(name), *have;
    size_t rank = 0;
    json_t *value;
    json_object_foreach ((json_t *)properties, have, value) {
        if (wanted && strcmp(have, wanted) == 0) {
            *schema = value;
            break;
        }
        rank++;
    }
    json_decref(name);
    return rank;
}

static void copy_member(struct json_copy *c, const json_t *schema, struct json_member *m) {
    const json_t *of_value = json_object_get(schema, "additionalProperties");
    copy_scalar(c, &m->text);
    m->rank = property_rank(json_object_get(schema, "properties"), &m->text, &of_value);
    skip_blanks(c);
    c->p++; // the colon
    buf_puts(&m->text, ":");
    copy_value(c, of_value, &m->text);
    if (*c->p == ',') c->p++;
    skip_blanks(c);
}

static void copy_object(struct json_copy *c, const json_t *schema, struct buf *out) {
    struct json_member *v = NULL;
    size_t n = 0, cap = 0;
    c->p++;
    skip_blanks(c);
    while (*c->p != '}') {
        if (n == cap) v = xrealloc(v, (cap = cap * 2 + 8) * sizeof *v);
        v[n] = (struct json_member){.index = n};
        copy_member(c, schema, &v[n++]);
    }
    c->p++;
    if (n) qsort(v, n, sizeof *v, member_compare);
    buf_puts(out, "{");
    for (size_t i = 0; i < n; i++) {
        if (i) buf_puts(out, ",");
        buf_add(out, v[i].text.data, v[i].text.len);
        buf_release(&v[i].text);
    }
    buf_puts(out, "}");
    free(v);
}

/* Copies a value, and skips the white space after it. */
static void copy_value(struct json_copy *c, const json_t *schema, struct buf *out) {
    schema = schema_resolve(c->schema, schema);
    skip_blanks(c);
    if (*c->p == '{')
        copy_object(c, schema, out);
    else if (*c->p == '[')
        copy_array(c, schema, out);
    else
        copy_scalar(c, out);
    skip_blanks(c);
}

static bool schema_accepts(const struct json_schema *s, const struct buf *json, bool *hit_limit) {
    struct grammar_machine *machine = grammar_machine_new(s->grammar, NULL, 0);
    struct grammar_state state = grammar_state_new(machine);
    bool accepts = grammar_accept_bytes(&state, json->data, json->len) && grammar_is_final(&state);
    *hit_limit = grammar_machine_hit_limit(machine);
    grammar_state_release(&state);
    grammar_machine_free(machine);
    return accepts;
}

static int json_schema_run(struct check *c, struct check_case *k, struct error *err) {
    const struct json_schema *s = c->state;
    struct code_block block = code_block_last(k->text);
    json_error_t why;
    json_t *v = json_loadb(block.ptr, block.len, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &why);
    (void)err;
    if (!v) {
        case_fail(c, k, "no JSON: line %d: %s", why.line, why.text);
        return OK;
    }
    char *text = xstrndup(block.ptr, block.len);
    struct json_copy copy = {s, text};
    struct buf json = {0};
    bool hit_limit;
    copy_value(&copy, s->root, &json);
    k->score = schema_accepts(s, &json, &hit_limit);
    if (k->score == 0)
        case_fail(c, k,
                  hit_limit ? "the JSON exceeds the limits of the schema's grammar"
                            : "the schema does not accept the JSON");
    buf_release(&json);
    free(text);
    json_decref(v);
    return OK;
}

static void json_schema_free(void *state) {
    struct json_schema *s = state;
    if (!s) return;
    json_decref(s->root);
    grammar_free(s->grammar);
    free(s);
}

static int json_schema_open(struct check *c, const char *argument, const struct check_options *o,
                            struct error *err) {
    struct json_schema *s = c->state = xcalloc(1, sizeof *s);
    struct buf text = {0};
    (void)o;
    int rc = file_read(argument, SCHEMA_MAX_BYTES, &text, err);
    if (!rc) {
        s->root = json_parse(text.data ? text.data : "", text.len, argument, err);
        rc = s->root ? OK : err->code;
    }
    if (!rc) {
        s->grammar = grammar_new_json_schema(text.data, text.len, true, err);
        rc = s->grammar ? OK : error_wrap(err, "'%s'", argument);
    }
    buf_release(&text);
    return rc;
}

const struct check_kind json_schema_check = {.name = "json-schema",
                                             .usage = "json-schema:FILE",
                                             .argument = ARGUMENT_REQUIRED,
                                             .open = json_schema_open,
                                             .run_one = json_schema_run,
                                             .free = json_schema_free};
