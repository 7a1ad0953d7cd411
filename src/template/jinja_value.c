/*
 * jinja_value: values of templates with Python's semantics: equality, order, arithmetic, indexing,
 * printing, JSON.
 *
 * Integers have 64 bits; a result that does not fit is an error. Powers are supported only for
 * integers, because the C library's pow differs between machines.
 */
#include "template/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* containers */

struct list *list_new(struct jinja_ctx *w, enum list_kind kind) {
    struct list *l = jinja_alloc(w, sizeof *l);
    l->kind = kind;
    return l;
}

void list_add(struct jinja_ctx *w, struct list *l, struct value v) {
    l->v = jinja_grow(w, l->v, l->n, &l->cap, sizeof *l->v);
    l->v[l->n++] = v;
}

struct dict *dict_new(struct jinja_ctx *w) {
    struct dict *d = jinja_alloc(w, sizeof *d);
    d->message = -1;
    return d;
}

static bool is_hashable(struct jinja_ctx *w, struct value v) {
    bool result = v.kind != V_DICT && (v.kind != V_LIST || v.list->kind != LIST);
    jinja_enter(w);
    for (size_t i = 0; result && v.kind == V_LIST && v.list->kind == TUPLE && i < v.list->n; i++)
        result = is_hashable(w, v.list->v[i]);
    w->depth--;
    return result;
}

/* Equal numbers of different kinds have equal hashes: integral floats are hashed as integers. */
static uint64_t number_hash(struct value v) {
    int64_t i = v.i;
    if (v.kind == V_FLOAT && v.f >= -0x1p63 && v.f < 0x1p63 && v.f == (double)(int64_t)v.f)
        i = (int64_t)v.f;
    else if (v.kind == V_FLOAT)
        memcpy(&i, &v.f, sizeof i);
    return hash_siphash(&i, sizeof i);
}

/* Returns false if keys of this kind are not hashed. Equal keys have equal hashes. */
static bool key_hash(struct jinja_ctx *w, struct value key, uint64_t *out) {
    if (key.kind == V_STR) {
        jinja_charge_bytes(w, 4 * key.s.n);
        *out = hash_siphash(key.s.p, key.s.n);
        return true;
    }
    jinja_add_steps(w, 1);
    if (value_is_number(key)) *out = number_hash(key);
    if (key.kind == V_NONE || key.kind == V_UNDEFINED) *out = key.kind;
    if (key.kind != V_LIST || key.list->kind != TUPLE)
        return value_is_number(key) || key.kind == V_NONE || key.kind == V_UNDEFINED;
    uint64_t parts[2] = {key.list->n, 0};
    bool all = true;
    jinja_enter(w);
    for (size_t i = 0; all && i < key.list->n; i++) {
        all = key_hash(w, key.list->v[i], &parts[1]);
        parts[0] = hash_siphash(parts, sizeof parts);
    }
    w->depth--;
    *out = parts[0];
    return all;
}

static bool keys_equal(struct jinja_ctx *w, struct value a, struct value b) {
    if (a.kind != V_STR || b.kind != V_STR) return value_equal(w, a, b);
    if (a.s.n != b.s.n) return false;
    jinja_charge_bytes(w, a.s.n);
    return str_equal(a.s, b.s);
}

/* The slot that has the key, or the free slot in which to store it. */
static struct dict_bucket *dict_slot(struct jinja_ctx *w, struct dict *d, struct value key,
                                     uint64_t hash) {
    for (size_t i = hash & (d->n_slots - 1);; i = (i + 1) & (d->n_slots - 1)) {
        struct dict_bucket *s = &d->slots[i];
        if (!s->pair_plus_1 ||
            (s->hash_tag == hash >> 32 && keys_equal(w, d->v[s->pair_plus_1 - 1].key, key)))
            return s;
    }
}

/* Adds the pairs that the hash table lacks, and first enlarges it if it would be more than half
 * full. */
static void dict_update_table(struct jinja_ctx *w, struct dict *d) {
    uint64_t hash;
    if (2 * d->n > d->n_slots) {
        d->n_slots = MAX(d->n_slots, (size_t)16);
        while (d->n_slots < 4 * d->n) d->n_slots *= 2;
        d->slots = jinja_alloc(w, d->n_slots * sizeof *d->slots);
        d->hashed = 0;
    }
    for (; d->hashed < d->n && !d->has_unhashable_key; d->hashed++) {
        struct value key = d->v[d->hashed].key;
        d->has_unhashable_key = !key_hash(w, key, &hash);
        if (!d->has_unhashable_key)
            *dict_slot(w, d, key, hash) = (struct dict_bucket){(uint32_t)d->hashed + 1, hash >> 32};
    }
}

static struct value *dict_scan(struct jinja_ctx *w, struct dict *d, struct value key) {
    jinja_charge_scan(w, d->n);
    for (size_t i = 0; i < d->n; i++)
        if (keys_equal(w, d->v[i].key, key)) return &d->v[i].value;
    return NULL;
}

struct value *dict_find(struct jinja_ctx *w, struct dict *d, struct value key) {
    const size_t few = 8;
    uint64_t hash;
    if (d->n <= few || d->has_unhashable_key || !key_hash(w, key, &hash))
        return dict_scan(w, d, key);
    dict_update_table(w, d);
    if (d->has_unhashable_key) return dict_scan(w, d, key);
    const struct dict_bucket *s = dict_slot(w, d, key, hash);
    return s->pair_plus_1 ? &d->v[s->pair_plus_1 - 1].value : NULL;
}

static struct value *dict_get(struct jinja_ctx *w, struct dict *d, const char *key) {
    return dict_find(w, d, STRING(((struct str){key, strlen(key), NULL})));
}

/* Appends without a lookup: the key must be new. */
static void dict_append(struct jinja_ctx *w, struct dict *d, struct value key, struct value v) {
    d->v = jinja_grow(w, d->v, d->n, &d->cap, sizeof *d->v);
    d->v[d->n++] = (struct pair){key, v};
}

void dict_set(struct jinja_ctx *w, struct dict *d, struct value key, struct value v) {
    if (key.kind != V_STR && !is_hashable(w, key))
        jinja_fail(w, "a %s cannot be a key", value_type(key));
    struct value *existing = dict_find(w, d, key);
    if (existing)
        *existing = v;
    else
        dict_append(w, d, key, v);
}

struct list *value_items(struct jinja_ctx *w, struct value v) {
    struct list *out;
    int len;
    switch (v.kind) {
    case V_LIST:
        if (v.list->kind != GENERATOR) return v.list;
        out = list_new(w, GENERATOR);
        *out = *v.list;
        v.list->n = 0;
        return out;
    case V_UNDEFINED:
        return list_new(w, LIST);
    case V_DICT:
        out = list_new(w, LIST);
        for (size_t i = 0; i < v.dict->n; i++) list_add(w, out, v.dict->v[i].key);
        return out;
    case V_STR:
        out = list_new(w, LIST);
        for (size_t i = 0; i < v.s.n; i += (size_t)len) {
            char_at(v.s.p + i, &len);
            list_add(w, out, STRING(str_slice(v.s, i, i + (size_t)len)));
        }
        return out;
    case V_MARKUP:
        jinja_fail(w, "a result of 'safe' or 'escape' can only be printed");
    default:
        jinja_fail(w, "a %s cannot be iterated", value_type(v));
    }
}

/* kinds, truth, order */

const char *value_type(struct value v) {
    static const char *const names[] = {
        "undefined value", "none",    "bool", "integer",   "float", "string",
        "safe string",     "list",    "dict", "namespace", "loop",  "macro",
        "method",          "function"};
    static const char *const lists[] = {"list", "tuple", "generator", "dict view", "range"};
    return v.kind == V_LIST ? lists[v.list->kind] : names[v.kind];
}

bool value_truth(struct value v) {
    switch (v.kind) {
    case V_UNDEFINED:
    case V_NONE:
        return false;
    case V_BOOL:
    case V_INT:
        return v.i != 0;
    case V_FLOAT:
        return v.f != 0;
    case V_STR:
    case V_MARKUP:
        return v.s.n > 0;
    case V_LIST:
        return v.list->kind == GENERATOR || v.list->n > 0;
    case V_DICT:
        return v.dict->n > 0;
    default:
        return true;
    }
}

bool value_is_number(struct value v) {
    return v.kind == V_BOOL || v.kind == V_INT || v.kind == V_FLOAT;
}

double value_float(struct value v) {
    return v.kind == V_FLOAT ? v.f : (double)v.i;
}

/* -1, 0, 1, or 2 for NaN. Integers beyond 2^53 are compared exactly with floats. */
static int number_compare(struct value a, struct value b) {
    if (a.kind != V_FLOAT && b.kind != V_FLOAT) return (a.i > b.i) - (a.i < b.i);
    long double x = a.kind == V_FLOAT ? (long double)a.f : (long double)a.i;
    long double y = b.kind == V_FLOAT ? (long double)b.f : (long double)b.i;
    return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2;
}

static void markup_check(struct jinja_ctx *w, struct value a, struct value b) {
    if (a.kind == V_MARKUP || b.kind == V_MARKUP)
        jinja_fail(w, "a result of 'safe' or 'escape' can only be printed");
}

static bool lists_equal(struct jinja_ctx *w, const struct list *a, const struct list *b) {
    if (a == b) return true;
    if (a->kind != b->kind || a->kind == GENERATOR) return false;
    if (a->kind == VIEW) jinja_fail(w, "comparing dict views is not supported");
    if (a->n != b->n) return false;
    for (size_t i = 0; i < a->n; i++)
        if (!value_equal(w, a->v[i], b->v[i])) return false;
    return true;
}

static bool dicts_equal(struct jinja_ctx *w, const struct dict *a, struct dict *b) {
    if (a->n != b->n) return false;
    for (size_t i = 0; i < a->n; i++) {
        const struct value *v = dict_find(w, b, a->v[i].key);
        if (!v || !value_equal(w, a->v[i].value, *v)) return false;
    }
    return true;
}

bool value_equal(struct jinja_ctx *w, struct value a, struct value b) {
    bool same;
    jinja_add_steps(w, 1);
    if (value_is_number(a) && value_is_number(b)) return number_compare(a, b) == 0;
    markup_check(w, a, b);
    if (a.kind != b.kind) return false;
    switch (a.kind) {
    case V_UNDEFINED:
    case V_NONE:
        return true;
    case V_STR:
        jinja_charge_bytes(w, MIN(a.s.n, b.s.n));
        return str_equal(a.s, b.s);
    case V_LIST:
        jinja_enter(w);
        same = lists_equal(w, a.list, b.list);
        w->depth--;
        return same;
    case V_DICT:
        jinja_enter(w);
        same = dicts_equal(w, a.dict, b.dict);
        w->depth--;
        return same;
    case V_NAMESPACE:
        return a.dict == b.dict;
    default:
        return a.macro == b.macro;
    }
}

static bool is_sequence(struct value v) {
    return v.kind == V_LIST && (v.list->kind == LIST || v.list->kind == TUPLE);
}

int value_compare(struct jinja_ctx *w, struct value a, struct value b) {
    jinja_add_steps(w, 1);
    if (value_is_number(a) && value_is_number(b)) return number_compare(a, b);
    if (a.kind == V_STR && b.kind == V_STR) {
        int c = memcmp(a.s.p, b.s.p, MIN(a.s.n, b.s.n));
        jinja_charge_bytes(w, MIN(a.s.n, b.s.n));
        return c ? (c > 0) - (c < 0) : (a.s.n > b.s.n) - (a.s.n < b.s.n);
    }
    markup_check(w, a, b);
    if (!is_sequence(a) || !is_sequence(b) || a.list->kind != b.list->kind)
        jinja_fail(w, "a %s and a %s have no order", value_type(a), value_type(b));
    jinja_enter(w);
    int c = 0;
    size_t n = MIN(a.list->n, b.list->n);
    for (size_t i = 0; c == 0 && i < n; i++)
        if (!value_equal(w, a.list->v[i], b.list->v[i]))
            c = value_compare(w, a.list->v[i], b.list->v[i]);
    w->depth--;
    return c ? c : (a.list->n > b.list->n) - (a.list->n < b.list->n);
}

bool value_in(struct jinja_ctx *w, struct value needle, struct value hay) {
    if (hay.kind == V_STR) {
        markup_check(w, needle, hay);
        if (needle.kind != V_STR)
            jinja_fail(w, "'in' a string needs a string, not a %s", value_type(needle));
        return str_find(w, hay.s, needle.s, 0) != SIZE_MAX;
    }
    if (hay.kind == V_DICT) {
        if (!is_hashable(w, needle)) jinja_fail(w, "a %s cannot be a key", value_type(needle));
        return dict_find(w, hay.dict, needle) != NULL;
    }
    const struct list *l = value_items(w, hay);
    for (size_t i = 0; i < l->n; i++)
        if (value_equal(w, l->v[i], needle)) return true;
    return false;
}

/* printing */

static struct str float_repr(struct jinja_ctx *w, double f) {
    char digits[40], out[48];
    if (isnan(f)) return STR("nan");
    if (isinf(f)) return f > 0 ? STR("inf") : STR("-inf");
    int precision = 1;
    jinja_add_steps(w, 200); /* up to 17 conversions both ways */
    do snprintf(digits, sizeof digits, "%.*e", precision - 1, f);
    while (strtod(digits, NULL) != f && ++precision <= 17);
    int exponent = atoi(strchr(digits, 'e') + 1);
    if (exponent >= -4 && exponent < 16) {
        snprintf(out, sizeof out, "%.*f", MAX(precision - 1 - exponent, 1), f);
    } else {
        *strchr(digits, 'e') = 0;
        snprintf(out, sizeof out, "%se%+03d", digits, exponent);
    }
    return str_from(w, out, strlen(out), 0);
}

/* Assigned characters that Python's repr writes as escapes. */
static bool char_is_escaped(uint32_t c) {
    return c < 0x20 || (c >= 0x7F && c < 0xA0) || (c != ' ' && char_is_space(c)) || c == 0xAD ||
           (c >= 0x600 && c <= 0x605) || (c >= 0x200B && c <= 0x200F) ||
           (c >= 0x202A && c <= 0x202E) || (c >= 0x2060 && c <= 0x206F) ||
           (c >= 0xE000 && c <= 0xF8FF) || c == 0xFEFF || (c >= 0xFFF0 && c <= 0xFFFB) ||
           (c >= 0xE0000 && c <= 0xE0FFF) || c >= 0xF0000;
}

/* Adds the bytes from i on that need no escape in JSON or repr; returns the end of these bytes.
 * `wide`: bytes beyond ASCII and the single quote need no escape either. */
static size_t add_unescaped(struct jinja_ctx *w, struct text *t, struct str s, size_t i,
                            bool wide) {
    size_t end = i;
    for (; end < s.n; end++) {
        uint8_t c = (uint8_t)s.p[end];
        if (c < 0x20 || (c >= 0x7F && !wide) || c == '"' || c == '\\' || (c == '\'' && !wide))
            break;
    }
    if (end > i) text_add(w, t, str_slice(s, i, end));
    return end;
}

static void repr_char(struct jinja_ctx *w, struct text *t, struct str s, uint32_t c, char quote) {
    char b[12];
    jinja_add_steps(w, char_is_escaped(c) ? 6 : 1);
    if (c == '\n' || c == '\r' || c == '\t')
        snprintf(b, sizeof b, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    else if (c == '\\' || c == (uint32_t)quote)
        snprintf(b, sizeof b, "\\%c", (char)c);
    else if (!char_is_escaped(c))
        return text_add(w, t, s);
    else
        snprintf(b, sizeof b,
                 c < 0x100     ? "\\x%02x"
                 : c < 0x10000 ? "\\u%04x"
                               : "\\U%08x",
                 (unsigned)c);
    text_puts(w, t, b);
}

static void repr_str(struct jinja_ctx *w, struct text *t, struct str s) {
    bool has_single = memchr(s.p, '\'', s.n), has_double = memchr(s.p, '"', s.n);
    char quote[] = {has_single && !has_double ? '"' : '\'', 0};
    int len;
    text_puts(w, t, quote);
    jinja_charge_scan(w, s.n);
    for (size_t i = 0; (i = add_unescaped(w, t, s, i, false)) < s.n; i += (size_t)len) {
        uint32_t c = char_at(s.p + i, &len);
        repr_char(w, t, str_slice(s, i, i + (size_t)len), c, quote[0]);
    }
    text_puts(w, t, quote);
}

static struct str value_repr(struct jinja_ctx *w, struct value v);

static void repr_list(struct jinja_ctx *w, struct text *t, const struct list *l) {
    if (l->kind != LIST && l->kind != TUPLE)
        jinja_fail(w, "printing a %s is not supported", value_type(LIST_VALUE((struct list *)l)));
    text_puts(w, t, l->kind == LIST ? "[" : "(");
    for (size_t i = 0; i < l->n; i++) {
        if (i) text_puts(w, t, ", ");
        text_add(w, t, value_repr(w, l->v[i]));
    }
    text_puts(w, t, l->kind == LIST ? "]" : l->n == 1 ? ",)" : ")");
}

static void repr_dict(struct jinja_ctx *w, struct text *t, const struct dict *d) {
    text_puts(w, t, "{");
    for (size_t i = 0; i < d->n; i++) {
        if (i) text_puts(w, t, ", ");
        text_add(w, t, value_repr(w, d->v[i].key));
        text_puts(w, t, ": ");
        text_add(w, t, value_repr(w, d->v[i].value));
    }
    text_puts(w, t, "}");
}

/* Python's repr() */
static struct str value_repr(struct jinja_ctx *w, struct value v) {
    struct text t = {0};
    char number[24];
    jinja_enter(w);
    switch (v.kind) {
    case V_UNDEFINED:
        text_puts(w, &t, "Undefined");
        break;
    case V_NONE:
        text_puts(w, &t, "None");
        break;
    case V_BOOL:
        text_puts(w, &t, v.i ? "True" : "False");
        break;
    case V_INT:
        jinja_add_steps(w, 4);
        snprintf(number, sizeof number, "%lld", (long long)v.i);
        text_puts(w, &t, number);
        break;
    case V_FLOAT:
        text_add(w, &t, float_repr(w, v.f));
        break;
    case V_STR:
        repr_str(w, &t, v.s);
        break;
    case V_LIST:
        repr_list(w, &t, v.list);
        break;
    case V_DICT:
        repr_dict(w, &t, v.dict);
        break;
    default:
        jinja_fail(w, "printing a %s is not supported", value_type(v));
    }
    w->depth--;
    return text_str(&t);
}

struct str value_str(struct jinja_ctx *w, struct value v) {
    if (v.kind == V_STR) return v.s;
    if (v.kind == V_UNDEFINED) return STR("");
    return value_repr(w, v);
}

/* JSON */

static void json_char(struct jinja_ctx *w, struct text *t, struct str s, uint32_t c, bool ascii) {
    static const char from[] = "\"\\\n\r\t\f\b", to[] = "\"\\nrtfb";
    const char *known = c && c < 0x80 ? strchr(from, (int)c) : NULL;
    char b[16];
    jinja_add_steps(w, 4);
    if (known)
        snprintf(b, sizeof b, "\\%c", to[known - from]);
    else if (c >= 0x20 && (c < 0x7F || !ascii))
        return text_add(w, t, s);
    else if (c < 0x10000)
        snprintf(b, sizeof b, "\\u%04x", (unsigned)c);
    else
        snprintf(b, sizeof b, "\\u%04x\\u%04x", 0xD800 + (unsigned)((c - 0x10000) >> 10),
                 0xDC00 + (unsigned)(c & 0x3FF));
    text_puts(w, t, b);
}

static void json_str(struct jinja_ctx *w, struct text *t, struct str s, bool ascii) {
    int len;
    text_puts(w, t, "\"");
    jinja_charge_scan(w, s.n);
    for (size_t i = 0; (i = add_unescaped(w, t, s, i, !ascii)) < s.n; i += (size_t)len) {
        uint32_t c = char_at(s.p + i, &len);
        json_char(w, t, str_slice(s, i, i + (size_t)len), c, ascii);
    }
    text_puts(w, t, "\"");
}

static struct str json_scalar(struct jinja_ctx *w, struct value v) {
    if (v.kind == V_NONE) return STR("null");
    if (v.kind == V_BOOL) return v.i ? STR("true") : STR("false");
    if (v.kind == V_FLOAT && isnan(v.f)) return STR("NaN");
    if (v.kind == V_FLOAT && isinf(v.f)) return v.f > 0 ? STR("Infinity") : STR("-Infinity");
    if (v.kind == V_INT || v.kind == V_FLOAT) return value_repr(w, v);
    jinja_fail(w, "a %s cannot be written as JSON", value_type(v));
}

static void json_break(struct jinja_ctx *w, struct text *t, const struct json_style *s, int level) {
    if (!s->indent) return;
    text_puts(w, t, "\n");
    for (int i = 0; i < level; i++) text_add(w, t, *s->indent);
}

/* A stable merge sort by key. */
static void pairs_sort(struct jinja_ctx *w, struct pair *v, struct pair *scratch, size_t n) {
    size_t half = n / 2, a = 0, b = half, out = 0;
    if (n < 2) return;
    pairs_sort(w, v, scratch, half);
    pairs_sort(w, v + half, scratch, n - half);
    while (a < half && b < n)
        scratch[out++] = value_compare(w, v[b].key, v[a].key) < 0 ? v[b++] : v[a++];
    while (a < half) scratch[out++] = v[a++];
    while (b < n) scratch[out++] = v[b++];
    jinja_charge_bytes(w, 2 * n * sizeof *v);
    memcpy(v, scratch, n * sizeof *v);
}

static const struct dict *dict_sorted(struct jinja_ctx *w, const struct dict *d) {
    struct dict *out = dict_new(w);
    out->v = jinja_alloc(w, 2 * (d->n + 1) * sizeof *out->v);
    out->n = d->n;
    if (d->n) memcpy(out->v, d->v, d->n * sizeof *out->v);
    pairs_sort(w, out->v, out->v + d->n, d->n);
    return out;
}

static void json_add_value(struct jinja_ctx *w, struct text *t, struct value v,
                           const struct json_style *s, int level);

static void json_dict(struct jinja_ctx *w, struct text *t, const struct dict *d,
                      const struct json_style *s, int level) {
    if (s->sort_keys) d = dict_sorted(w, d);
    for (size_t i = 0; i < d->n; i++) {
        if (i) text_add(w, t, s->item);
        json_break(w, t, s, level);
        struct value key = d->v[i].key;
        json_str(w, t, key.kind == V_STR ? key.s : json_scalar(w, key), s->ascii);
        text_add(w, t, s->key);
        json_add_value(w, t, d->v[i].value, s, level);
    }
}

static void json_list(struct jinja_ctx *w, struct text *t, const struct list *l,
                      const struct json_style *s, int level) {
    for (size_t i = 0; i < l->n; i++) {
        if (i) text_add(w, t, s->item);
        json_break(w, t, s, level);
        json_add_value(w, t, l->v[i], s, level);
    }
}

static void json_add_value(struct jinja_ctx *w, struct text *t, struct value v,
                           const struct json_style *s, int level) {
    bool list = is_sequence(v), empty;
    if (v.kind == V_STR) return json_str(w, t, v.s, s->ascii);
    if (v.kind != V_DICT && !list) return text_add(w, t, json_scalar(w, v));
    jinja_enter(w);
    empty = list ? v.list->n == 0 : v.dict->n == 0;
    text_puts(w, t, list ? "[" : "{");
    if (list)
        json_list(w, t, v.list, s, level + 1);
    else
        json_dict(w, t, v.dict, s, level + 1);
    if (!empty) json_break(w, t, s, level);
    text_puts(w, t, list ? "]" : "}");
    w->depth--;
}

struct str value_json(struct jinja_ctx *w, struct value v, const struct json_style *style) {
    struct text t = {0};
    json_add_value(w, &t, v, style, 0);
    return text_str(&t);
}

static struct value dict_from_json(struct jinja_ctx *w, const json_t *v, uint8_t origin) {
    struct dict *d = dict_new(w);
    const char *key;
    json_t *item;
    json_object_foreach ((json_t *)(uintptr_t)v, key, item) {
        struct value name = STRING(str_from(w, key, strlen(key), origin));
        dict_append(w, d, name, value_from_json(w, item, origin));
    }
    return (struct value){.kind = V_DICT, .dict = d};
}

struct value value_from_json(struct jinja_ctx *w, const json_t *v, uint8_t origin) {
    struct value out = NONE;
    jinja_enter(w);
    if (json_is_boolean(v)) {
        out = BOOL(json_is_true(v));
    } else if (json_is_integer(v)) {
        out = INT(json_integer_value(v));
    } else if (json_is_real(v)) {
        out = FLOAT(json_real_value(v));
    } else if (json_is_string(v)) {
        out = STRING(str_from(w, json_string_value(v), json_string_length(v), origin));
    } else if (json_is_array(v)) {
        out = LIST_VALUE(list_new(w, LIST));
        for (size_t i = 0; i < json_array_size(v); i++)
            list_add(w, out.list, value_from_json(w, json_array_get(v, i), origin));
    } else if (json_is_object(v)) {
        out = dict_from_json(w, v, origin);
    }
    w->depth--;
    return out;
}

/* The roles that templates print within special tokens. */
static bool role_is_known(const char *role) {
    static const char *const roles[] = {"system", "user",     "assistant", "tool",
                                        "model",  "function", "ipython",   "developer"};
    for (size_t i = 0; role && i < ARRAY_LEN(roles); i++)
        if (strcmp(role, roles[i]) == 0) return true;
    return false;
}

struct value value_messages(struct jinja_ctx *w, const json_t *list) {
    struct list *out = list_new(w, LIST);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *m = json_array_get(list, i);
        const char *role = json_string_value(json_object_get(m, "role"));
        bool is_assistant = role && strcmp(role, "assistant") == 0;
        struct value v =
            value_from_json(w, m, is_assistant ? JINJA_DATA | JINJA_ASSISTANT : JINJA_DATA);
        list_add(w, out, v);
        if (v.kind != V_DICT) continue;
        v.dict->message = (int)i;
        struct value *r = role_is_known(role) ? dict_get(w, v.dict, "role") : NULL;
        if (r) r->s.origins = NULL;
    }
    return LIST_VALUE(out);
}

/* arithmetic */

_Noreturn static void operator_fail(struct jinja_ctx *w, int op, struct value a, struct value b) {
    char name[] = {(char)op, (char)(op >> 8), 0};
    markup_check(w, a, b);
    if (a.kind == V_UNDEFINED || b.kind == V_UNDEFINED) {
        struct str s = a.kind == V_UNDEFINED ? a.s : b.s;
        jinja_fail(w, "'%.*s' is undefined", (int)MIN(s.n, 60u), s.p ? s.p : "");
    }
    jinja_fail(w, "'%s' of a %s and a %s is not possible", name, value_type(a), value_type(b));
}

static struct value int_power(struct jinja_ctx *w, int64_t base, int64_t exponent) {
    int64_t out = 1;
    if (exponent < 0) jinja_fail(w, "negative powers are not supported");
    if (base == 1 || exponent == 0) return INT(1);
    if (base == 0) return INT(0);
    if (base == -1) return INT(exponent % 2 ? -1 : 1);
    for (int64_t i = 0; i < exponent; i++)
        if (__builtin_mul_overflow(out, base, &out)) jinja_fail(w, "an integer is too large");
    return INT(out);
}

static struct value int_binary(struct jinja_ctx *w, int op, int64_t a, int64_t b) {
    int64_t out = 0;
    bool overflow = false;
    if ((op == '/' || op == OP('/', '/') || op == '%') && b == 0) jinja_fail(w, "division by zero");
    if (op == '+') overflow = __builtin_add_overflow(a, b, &out);
    if (op == '-') overflow = __builtin_sub_overflow(a, b, &out);
    if (op == '*') overflow = __builtin_mul_overflow(a, b, &out);
    if (op == '/') {
        int64_t exact = (int64_t)1 << 53;
        if (a > exact || a < -exact || b > exact || b < -exact)
            jinja_fail(w, "'/' of integers beyond 2^53 is not supported");
        return FLOAT((double)a / (double)b);
    }
    if (op == OP('*', '*')) return int_power(w, a, b);
    if (op == OP('/', '/') || op == '%') {
        if (b == -1) {
            overflow = op != '%' && __builtin_sub_overflow(0, a, &out);
        } else {
            int64_t q = a / b, r = a % b;
            bool floor_differs = r != 0 && (r < 0) != (b < 0);
            out = op == '%' ? r + (floor_differs ? b : 0) : q - floor_differs;
        }
    }
    if (overflow) jinja_fail(w, "an integer is too large");
    return INT(out);
}

/* Python's float.__mod__ and __floordiv__. */
static double float_mod(double a, double b) {
    double m = fmod(a, b);
    if (m == 0) return copysign(0.0, b);
    return (m < 0) != (b < 0) ? m + b : m;
}

static double float_floordiv(double a, double b) {
    double m = fmod(a, b), q = (a - m) / b;
    if (m != 0 && (b < 0) != (m < 0)) q -= 1;
    if (q == 0) return copysign(0.0, a / b);
    double f = floor(q);
    return q - f > 0.5 ? f + 1 : f;
}

static struct value float_binary(struct jinja_ctx *w, int op, double a, double b) {
    if (op == '+') return FLOAT(a + b);
    if (op == '-') return FLOAT(a - b);
    if (op == '*') return FLOAT(a * b);
    if (op == OP('*', '*')) jinja_fail(w, "powers of floats are not supported");
    if (b == 0) jinja_fail(w, "division by zero");
    if (op == '/') return FLOAT(a / b);
    return FLOAT(op == '%' ? float_mod(a, b) : float_floordiv(a, b));
}

/* Memory with n copies of the `size` bytes at p; p NULL: without content. */
static void *repeat_bytes(struct jinja_ctx *w, const void *p, size_t size, size_t n) {
    char *out = jinja_alloc(w, n * size + 1);
    jinja_charge_bytes(w, n * size);
    jinja_add_steps(w, n);
    for (size_t i = 0; p && i < n; i++) memcpy(out + i * size, p, size);
    return out;
}

static struct value value_repeat(struct jinja_ctx *w, struct value v, int64_t times) {
    bool text = v.kind == V_STR;
    size_t size = text ? v.s.n : v.list->n, n = times > 0 ? (size_t)times : 0;
    if (size && n > w->max_bytes / size) n = w->max_bytes / size + 1; /* will be refused */
    if (size == 0) n = 0;
    if (text)
        return STRING(((struct str){repeat_bytes(w, v.s.p, size, n), n * size,
                                    v.s.origins ? repeat_bytes(w, v.s.origins, size, n) : NULL}));
    struct list *out = list_new(w, v.list->kind);
    out->v = repeat_bytes(w, v.list->v, size * sizeof *out->v, n);
    out->n = out->cap = n * size;
    return LIST_VALUE(out);
}

static struct value concatenate(struct jinja_ctx *w, struct value a, struct value b) {
    if (a.kind == V_STR) {
        struct text t = {0};
        text_add(w, &t, a.s);
        text_add(w, &t, b.s);
        return STRING(text_str(&t));
    }
    struct list *out = list_new(w, a.list->kind);
    for (size_t i = 0; i < a.list->n; i++) list_add(w, out, a.list->v[i]);
    for (size_t i = 0; i < b.list->n; i++) list_add(w, out, b.list->v[i]);
    return LIST_VALUE(out);
}

static bool is_repeat(struct value v, struct value times) {
    return (v.kind == V_STR || is_sequence(v)) && (times.kind == V_INT || times.kind == V_BOOL);
}

struct value value_binary(struct jinja_ctx *w, int op, struct value a, struct value b) {
    jinja_add_steps(w, 1);
    if (value_is_number(a) && value_is_number(b)) {
        if (a.kind == V_FLOAT || b.kind == V_FLOAT)
            return float_binary(w, op, value_float(a), value_float(b));
        return int_binary(w, op, a.i, b.i);
    }
    if (op == '%' && a.kind == V_STR) return STRING(value_percent(w, a.s, b));
    if (op == '*' && is_repeat(a, b)) return value_repeat(w, a, b.i);
    if (op == '*' && is_repeat(b, a)) return value_repeat(w, b, a.i);
    bool lists = is_sequence(a) && is_sequence(b) && a.list->kind == b.list->kind;
    if (op == '+' && ((a.kind == V_STR && b.kind == V_STR) || lists)) return concatenate(w, a, b);
    operator_fail(w, op, a, b);
}

/* Formats one "%5.2f" at p (after the '%'); returns the length of the specification. */
static size_t percent_one(struct jinja_ctx *w, struct text *t, const char *p, struct value v) {
    char spec[16] = "%", out[512];
    size_t n = strspn(p, "-+ #0123456789.");
    if (n > 8) jinja_fail(w, "the format '%%%.*s' is not supported", (int)n, p);
    memcpy(spec + 1, p, n);
    char type = p[n];
    if ((type == 's' || type == 'r') && n == 0) {
        text_add(w, t, type == 's' ? value_str(w, v) : value_repr(w, v));
        return 1;
    }
    if (type == 0 || !strchr("dixXfFeEgG", type) || strtol(p + strspn(p, "-+ #0"), NULL, 10) > 100)
        jinja_fail(w, "the format '%%%.*s%c' is not supported", (int)n, p, type ? type : ' ');
    if (!value_is_number(v)) jinja_fail(w, "'%%%c' needs a number, not a %s", type, value_type(v));
    const char *dot = memchr(p, '.', n);
    if (dot && strtol(dot + 1, NULL, 10) > 100) jinja_fail(w, "a format's precision is too large");
    jinja_add_steps(w, strchr("fFeEgG", type) ? 400 : 8);
    if (strchr("fFeEgG", type)) {
        spec[n + 1] = type;
        snprintf(out, sizeof out, spec, value_float(v));
    } else {
        if (v.kind == V_FLOAT && (!(fabs(v.f) < 9e18) || type == 'x' || type == 'X'))
            jinja_fail(w, "'%%%c' of this float is not possible", type);
        int64_t i = v.kind == V_FLOAT ? (int64_t)v.f : v.i;
        if (i < 0 && (type == 'x' || type == 'X'))
            jinja_fail(w, "'%%%c' of a negative number is not supported", type);
        memcpy(spec + n + 1, "ll", 2);
        spec[n + 3] = type == 'i' ? 'd' : type;
        snprintf(out, sizeof out, spec, (long long)i);
    }
    text_puts(w, t, out);
    return n + 1;
}

struct str value_percent(struct jinja_ctx *w, struct str format, struct value args) {
    struct text t = {0};
    bool tuple = args.kind == V_LIST && args.list->kind == TUPLE;
    size_t n = tuple ? args.list->n : 1, used = 0, from = 0;
    const char *copy = str_from(w, format.p, format.n, 0).p; /* a copy that ends with NUL */
    jinja_charge_scan(w, format.n);
    for (size_t i = 0; i < format.n; i++) {
        if (format.p[i] != '%') continue;
        text_add(w, &t, str_slice(format, from, i));
        if (copy[i + 1] == '%') {
            text_puts(w, &t, "%");
            from = ++i + 1;
            continue;
        }
        if (copy[i + 1] == '(') jinja_fail(w, "'%%(' in a format is not supported");
        if (used == n) jinja_fail(w, "a format has more places than values");
        struct value v = tuple ? args.list->v[used] : args;
        used++;
        i += percent_one(w, &t, copy + i + 1, v);
        from = i + 1;
    }
    text_add(w, &t, str_slice(format, from, format.n));
    bool subscripted =
        args.kind == V_DICT || args.kind == V_UNDEFINED ||
        (args.kind == V_LIST && (args.list->kind == LIST || args.list->kind == RANGE));
    if (used < n && !subscripted) jinja_fail(w, "a format has fewer places than values");
    return text_str(&t);
}

/* indexing */

static struct value undefined_named(struct str name) {
    return (struct value){.kind = V_UNDEFINED, .s = name};
}

static struct value loop_attr(const struct loop *l, struct str name) {
    int64_t i = (int64_t)l->i, n = (int64_t)l->items->n;
    const struct {
        const char *name;
        struct value v;
    } attrs[] = {
        {"index", INT(i + 1)},    {"index0", INT(i)},
        {"revindex", INT(n - i)}, {"revindex0", INT(n - i - 1)},
        {"first", BOOL(i == 0)},  {"last", BOOL(i == n - 1)},
        {"length", INT(n)},       {"depth", INT(1)},
        {"depth0", INT(0)},
    };
    for (size_t k = 0; k < ARRAY_LEN(attrs); k++)
        if (str_is(name, attrs[k].name)) return attrs[k].v;
    if (str_is(name, "previtem")) return i > 0 ? l->items->v[i - 1] : undefined_named(name);
    if (str_is(name, "nextitem")) return i + 1 < n ? l->items->v[i + 1] : undefined_named(name);
    return undefined_named(name);
}

struct value value_attr(struct jinja_ctx *w, struct value v, struct str name) {
    if (v.kind == V_UNDEFINED)
        jinja_fail(w, "'%.*s' is undefined", (int)MIN(v.s.n, 60u), v.s.p ? v.s.p : "");
    if (name.n > 1 && name.p[0] == '_' && name.p[1] == '_')
        jinja_fail(w, "the attribute '%.*s' is not allowed", (int)MIN(name.n, 60u), name.p);
    jinja_add_steps(w, v.kind == V_STR || v.kind == V_LOOP ? 8 : 4);
    if (method_exists(v, name)) {
        struct jinja_method *m = jinja_alloc(w, sizeof *m);
        *m = (struct jinja_method){v, name};
        return (struct value){.kind = V_METHOD, .method = m};
    }
    if (v.kind == V_LOOP) return loop_attr(v.loop, name);
    if (v.kind == V_MARKUP || v.kind == V_MACRO || v.kind == V_METHOD || v.kind == V_FUNCTION)
        jinja_fail(w, "attributes of a %s are not supported", value_type(v));
    const struct value *found = NULL;
    if (v.kind == V_DICT || v.kind == V_NAMESPACE) found = dict_find(w, v.dict, STRING(name));
    return found ? *found : undefined_named(name);
}

/* Byte offset of character i <= length. */
static size_t char_offset(struct jinja_ctx *w, struct str s, size_t i, size_t length) {
    if (s.n == length) return i;
    size_t offset = 0;
    jinja_charge_scan(w, i);
    for (int len; i > 0; i--, offset += (size_t)len) char_at(s.p + offset, &len);
    return offset;
}

static struct value index_at(struct jinja_ctx *w, struct value v, int64_t i) {
    if (v.kind == V_LIST) {
        int64_t n = (int64_t)v.list->n;
        bool indexed = v.list->kind != GENERATOR && v.list->kind != VIEW;
        if (i < 0) i += n;
        return indexed && i >= 0 && i < n ? v.list->v[i] : UNDEFINED;
    }
    int64_t n = (int64_t)str_length(w, v.s);
    if (i < 0) i += n;
    if (i < 0 || i >= n) return UNDEFINED;
    int len;
    size_t at = char_offset(w, v.s, (size_t)i, (size_t)n);
    char_at(v.s.p + at, &len);
    return STRING(str_slice(v.s, at, at + (size_t)len));
}

struct value value_item(struct jinja_ctx *w, struct value v, struct value index) {
    if (v.kind == V_UNDEFINED)
        jinja_fail(w, "'%.*s' is undefined", (int)MIN(v.s.n, 60u), v.s.p ? v.s.p : "");
    if (v.kind == V_DICT) {
        const struct value *found = is_hashable(w, index) ? dict_find(w, v.dict, index) : NULL;
        if (found) return *found;
    }
    bool whole = index.kind == V_INT || index.kind == V_BOOL;
    if (whole && (v.kind == V_LIST || v.kind == V_STR)) return index_at(w, v, index.i);
    if (index.kind == V_STR) return value_attr(w, v, index.s);
    return UNDEFINED;
}

static int64_t slice_part(struct jinja_ctx *w, struct value v, int64_t fallback) {
    if (v.kind == V_NONE) return fallback;
    if (v.kind != V_INT && v.kind != V_BOOL)
        jinja_fail(w, "a slice needs integers, not a %s", value_type(v));
    return v.i;
}

/* A bound of a slice as Python's slice.indices computes it, in [low, high]; `fallback` for None. */
static int64_t slice_bound(struct jinja_ctx *w, struct value v, int64_t n, int64_t low,
                           int64_t high, int64_t fallback) {
    int64_t i = slice_part(w, v, fallback);
    if (v.kind == V_NONE) return i;
    if (i < 0) i += n;
    return MIN(MAX(i, low), high);
}

/* Characters begin, begin + step … of a string of n. */
static struct value slice_str(struct jinja_ctx *w, struct str s, int64_t n, int64_t begin,
                              int64_t end, int64_t step) {
    struct text t = {0};
    if (step == 1) {
        end = MAX(begin, end);
        return STRING(str_slice(s, char_offset(w, s, (size_t)begin, (size_t)n),
                                char_offset(w, s, (size_t)end, (size_t)n)));
    }
    const struct list *items = value_items(w, STRING(s));
    for (int64_t i = begin; step < 0 ? i > end : i < end; i += step) text_add(w, &t, items->v[i].s);
    return STRING(text_str(&t));
}

struct value value_slice(struct jinja_ctx *w, struct value v, const struct value part[3]) {
    bool list = v.kind == V_LIST && v.list->kind != GENERATOR && v.list->kind != VIEW;
    if (v.kind == V_UNDEFINED)
        jinja_fail(w, "'%.*s' is undefined", (int)MIN(v.s.n, 60u), v.s.p ? v.s.p : "");
    if (!list && v.kind != V_STR) jinja_fail(w, "a %s cannot be sliced", value_type(v));
    int64_t step = slice_part(w, part[2], 1);
    if (step == 0) jinja_fail(w, "a slice's step is 0");
    step = MAX(step, -INT64_MAX / 2);
    step = MIN(step, INT64_MAX / 2);
    int64_t n = (int64_t)(list ? v.list->n : str_length(w, v.s));
    int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    int64_t begin = slice_bound(w, part[0], n, low, high, step < 0 ? high : low);
    int64_t end = slice_bound(w, part[1], n, low, high, step < 0 ? low : high);
    if (!list) return slice_str(w, v.s, n, begin, end, step);
    struct list *out = list_new(w, v.list->kind);
    for (int64_t i = begin; step < 0 ? i > end : i < end; i += step) list_add(w, out, v.list->v[i]);
    return LIST_VALUE(out);
}
