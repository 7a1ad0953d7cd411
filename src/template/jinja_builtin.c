/*
 * jinja_builtin: Jinja's filters, tests and global functions, and the methods of Python's strings,
 * lists and dicts, as tables.
 *
 * A row without a function is a feature of Jinja that is not supported: using it is an error with
 * its name. `map`, `select` and similar filters return generators, as in Jinja. A generator is true
 * even when it is empty, has no length, and is empty after one iteration.
 */
#define _GNU_SOURCE
#include "template/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* arguments */

struct value arg_get(const struct args *a, size_t i, const char *name, struct value fallback) {
    if (i < a->n) return a->v[i];
    for (size_t k = 0; name && k < a->n_named; k++)
        if (str_is(a->named[k].key.s, name)) return a->named[k].value;
    return fallback;
}

/* Whether a list of names between single spaces contains `name`. */
static bool name_is_in_list(const char *names, struct str name) {
    for (const char *p = names; p && *p && name.n; p++) {
        if (*p == name.p[0] && strcspn(p, " ") == name.n && memcmp(p, name.p, name.n) == 0)
            return true;
        p = strchr(p, ' ');
        if (!p) break;
    }
    return false;
}

/* str_is, faster for a search in a table, where most names begin with another letter. */
static bool name_is(struct str s, const char *name) {
    return s.n && s.p[0] == name[0] && str_is(s, name);
}

/* Fails for fewer than `min` arguments, more than `max` positional ones, or a name that is not in
 * the space-separated list. */
static void args_check(struct jinja_ctx *w, const struct args *a, const char *what, size_t min,
                       size_t max, const char *names) {
    if (a->n > max) jinja_fail(w, "'%s' takes at most %zu arguments", what, max);
    if (a->n + a->n_named < min) jinja_fail(w, "'%s' needs %zu arguments", what, min);
    for (size_t i = 0; i < a->n_named; i++) {
        struct str s = a->named[i].key.s;
        if (!name_is_in_list(names, s))
            jinja_fail(w, "'%s' has no argument '%.*s'", what, (int)MIN(s.n, 60u), s.p);
    }
}

static struct str require_str(struct jinja_ctx *w, struct value v, const char *what) {
    if (v.kind != V_STR) jinja_fail(w, "'%s' needs a string, not a %s", what, value_type(v));
    return v.s;
}

static int64_t require_int(struct jinja_ctx *w, struct value v, const char *what) {
    if (v.kind != V_INT && v.kind != V_BOOL)
        jinja_fail(w, "'%s' needs an integer, not a %s", what, value_type(v));
    return v.i;
}

/* lists */

/* A dotted path of names and indices: "function.name", "0". */
static struct value path_get(struct jinja_ctx *w, struct value v, struct value path) {
    if (path.kind == V_INT) return value_item(w, v, path);
    struct str s = require_str(w, path, "attribute");
    for (size_t begin = 0; begin <= s.n;) {
        size_t dot = str_find(w, s, STR("."), begin);
        if (dot == SIZE_MAX) dot = s.n;
        struct str part = str_slice(s, begin, dot);
        bool digits = part.n > 0 && part.n < 10;
        for (size_t i = 0; i < part.n; i++) digits &= part.p[i] >= '0' && part.p[i] <= '9';
        struct value index = STRING(part);
        if (digits) index = INT(strtol(str_from(w, part.p, part.n, 0).p, NULL, 10));
        v = value_item(w, v, index);
        begin = dot + 1;
    }
    return v;
}

/* The key that sort, unique, min and max compare: the value or its attribute; strings in lower case
 * unless `cased`. */
static struct value sort_key(struct jinja_ctx *w, struct value v, struct value attribute,
                             bool cased) {
    if (attribute.kind != V_NONE) v = path_get(w, v, attribute);
    return v.kind == V_STR && !cased ? STRING(str_case(w, v.s, TO_LOWER)) : v;
}

struct keyed {
    struct value key, value;
};

/* Stable; `reverse` also keeps the order of equal values. */
static void keyed_sort(struct jinja_ctx *w, struct keyed *v, struct keyed *scratch, size_t n,
                       bool reverse) {
    if (n < 2) return;
    size_t half = n / 2, a = 0, b = half, out = 0;
    keyed_sort(w, v, scratch, half, reverse);
    keyed_sort(w, v + half, scratch, n - half, reverse);
    while (a < half && b < n) {
        int c = reverse ? value_compare(w, v[a].key, v[b].key) < 0
                        : value_compare(w, v[b].key, v[a].key) == -1;
        scratch[out++] = c == 1 ? v[b++] : v[a++];
    }
    while (a < half) scratch[out++] = v[a++];
    while (b < n) scratch[out++] = v[b++];
    memcpy(v, scratch, n * sizeof *v);
    jinja_charge_bytes(w, n * sizeof *v);
}

static struct value list_sort(struct jinja_ctx *w, const struct list *l, struct value attribute,
                              bool cased, bool reverse) {
    struct keyed *v = jinja_alloc(w, (l->n + 1) * sizeof *v);
    for (size_t i = 0; i < l->n; i++)
        v[i] = (struct keyed){sort_key(w, l->v[i], attribute, cased), l->v[i]};
    keyed_sort(w, v, jinja_alloc(w, (l->n + 1) * sizeof *v), l->n, reverse);
    struct list *out = list_new(w, LIST);
    for (size_t i = 0; i < l->n; i++) list_add(w, out, v[i].value);
    return LIST_VALUE(out);
}

static struct value filter_sort(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "sort", 0, 3, "reverse case_sensitive attribute");
    bool reverse = value_truth(arg_get(a, 0, "reverse", BOOL(false)));
    bool cased = value_truth(arg_get(a, 1, "case_sensitive", BOOL(false)));
    struct value attribute = arg_get(a, 2, "attribute", NONE);
    if (attribute.kind == V_STR && str_find(w, attribute.s, STR(","), 0) != SIZE_MAX)
        jinja_fail(w, "'sort' by several attributes is not supported");
    return list_sort(w, value_items(w, v), attribute, cased, reverse);
}

static struct value filter_dictsort(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "dictsort", 0, 3, "case_sensitive by reverse");
    bool cased = value_truth(arg_get(a, 0, "case_sensitive", BOOL(false)));
    struct str by = require_str(w, arg_get(a, 1, "by", STRING(STR("key"))), "dictsort");
    bool reverse = value_truth(arg_get(a, 2, "reverse", BOOL(false)));
    if (v.kind != V_DICT) jinja_fail(w, "'dictsort' needs a dict, not a %s", value_type(v));
    if (!str_is(by, "key") && !str_is(by, "value"))
        jinja_fail(w, "'dictsort' is by 'key' or 'value'");
    struct list *pairs = list_new(w, LIST);
    for (size_t i = 0; i < v.dict->n; i++) {
        struct list *pair = list_new(w, TUPLE);
        list_add(w, pair, v.dict->v[i].key);
        list_add(w, pair, v.dict->v[i].value);
        list_add(w, pairs, LIST_VALUE(pair));
    }
    return list_sort(w, pairs, INT(str_is(by, "value")), cased, reverse);
}

static struct value filter_unique(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "unique", 0, 2, "case_sensitive attribute");
    bool cased = value_truth(arg_get(a, 0, "case_sensitive", BOOL(false)));
    struct value attribute = arg_get(a, 1, "attribute", NONE);
    const struct list *l = value_items(w, v);
    struct list *out = list_new(w, GENERATOR);
    struct dict *seen = dict_new(w);
    for (size_t i = 0; i < l->n; i++) {
        struct value key = sort_key(w, l->v[i], attribute, cased);
        size_t before = seen->n;
        dict_set(w, seen, key, NONE);
        if (seen->n > before) list_add(w, out, l->v[i]);
    }
    return LIST_VALUE(out);
}

static struct value min_or_max(struct jinja_ctx *w, struct value v, const struct args *a,
                               const char *name, int sign) {
    args_check(w, a, name, 0, 2, "case_sensitive attribute");
    bool cased = value_truth(arg_get(a, 0, "case_sensitive", BOOL(false)));
    struct value attribute = arg_get(a, 1, "attribute", NONE);
    const struct list *l = value_items(w, v);
    size_t best = 0;
    struct value best_key = l->n > 1 ? sort_key(w, l->v[0], attribute, cased) : NONE;
    for (size_t i = 1; i < l->n; i++) {
        struct value key = sort_key(w, l->v[i], attribute, cased);
        if (value_compare(w, key, best_key) != sign) continue;
        best = i;
        best_key = key;
    }
    return l->n ? l->v[best] : UNDEFINED;
}

static struct value filter_min(struct jinja_ctx *w, struct value v, const struct args *a) {
    return min_or_max(w, v, a, "min", -1);
}

static struct value filter_max(struct jinja_ctx *w, struct value v, const struct args *a) {
    return min_or_max(w, v, a, "max", 1);
}

static struct value filter_sum(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "sum", 0, 2, "attribute start");
    struct value attribute = arg_get(a, 0, "attribute", NONE), sum = arg_get(a, 1, "start", INT(0));
    if (sum.kind == V_STR) jinja_fail(w, "'sum' of strings is not possible");
    const struct list *l = value_items(w, v);
    for (size_t i = 0; i < l->n; i++)
        sum = value_binary(w, '+', sum,
                           attribute.kind == V_NONE ? l->v[i] : path_get(w, l->v[i], attribute));
    return sum;
}

static struct value filter_list(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "list", 0, 0, NULL);
    const struct list *l = value_items(w, v);
    struct list *out = list_new(w, LIST);
    for (size_t i = 0; i < l->n; i++) list_add(w, out, l->v[i]);
    return LIST_VALUE(out);
}

static struct value filter_first(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "first", 0, 0, NULL);
    if (v.kind == V_LIST && v.list->kind == GENERATOR)
        return v.list->n ? (v.list->n--, *v.list->v++) : UNDEFINED;
    const struct list *l = value_items(w, v);
    return l->n ? l->v[0] : UNDEFINED;
}

static struct value filter_last(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "last", 0, 0, NULL);
    if (v.kind == V_LIST && v.list->kind == GENERATOR)
        jinja_fail(w, "'last' of a generator is not possible");
    const struct list *l = value_items(w, v);
    return l->n ? l->v[l->n - 1] : UNDEFINED;
}

static struct value filter_reverse(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "reverse", 0, 0, NULL);
    if (v.kind == V_LIST && v.list->kind == GENERATOR)
        jinja_fail(w, "'reverse' of a generator is not supported");
    if (v.kind == V_STR) return value_slice(w, v, (struct value[]){NONE, NONE, INT(-1)});
    const struct list *l = value_items(w, v);
    struct list *out = list_new(w, GENERATOR);
    for (size_t i = l->n; i-- > 0;) list_add(w, out, l->v[i]);
    return LIST_VALUE(out);
}

static struct value filter_length(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "length", 0, 0, NULL);
    if (v.kind == V_STR) return INT((int64_t)str_length(w, v.s));
    if (v.kind == V_DICT) return INT((int64_t)v.dict->n);
    if (v.kind == V_UNDEFINED) return INT(0);
    if (v.kind != V_LIST || v.list->kind == GENERATOR)
        jinja_fail(w, "a %s has no length", value_type(v));
    return INT((int64_t)v.list->n);
}

static struct value filter_join(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "join", 0, 2, "d attribute");
    struct str between = value_str(w, arg_get(a, 0, "d", STRING(STR(""))));
    struct value attribute = arg_get(a, 1, "attribute", NONE);
    const struct list *l = value_items(w, v);
    struct text t = {0};
    for (size_t i = 0; i < l->n; i++) {
        if (i) text_add(w, &t, between);
        struct value item = attribute.kind == V_NONE ? l->v[i] : path_get(w, l->v[i], attribute);
        text_add(w, &t, value_str(w, item));
    }
    return STRING(text_str(&t));
}

static struct value dict_pairs(struct jinja_ctx *w, struct value v, enum list_kind kind) {
    struct list *out = list_new(w, kind);
    for (size_t i = 0; v.kind == V_DICT && i < v.dict->n; i++) {
        struct list *pair = list_new(w, TUPLE);
        list_add(w, pair, v.dict->v[i].key);
        list_add(w, pair, v.dict->v[i].value);
        list_add(w, out, LIST_VALUE(pair));
    }
    return LIST_VALUE(out);
}

static struct value filter_items(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "items", 0, 0, NULL);
    if (v.kind != V_DICT && v.kind != V_UNDEFINED)
        jinja_fail(w, "'items' needs a dict, not a %s", value_type(v));
    return dict_pairs(w, v, GENERATOR);
}

/* The items for map and select; a false value counts as empty. */
static struct list *items_if_true(struct jinja_ctx *w, struct value v) {
    return value_truth(v) ? value_items(w, v) : list_new(w, LIST);
}

/* The arguments after the first n. */
static struct args args_rest(const struct args *a, size_t n) {
    struct args rest = *a;
    n = MIN(n, a->n);
    rest.v += n;
    rest.n -= n;
    return rest;
}

static struct value filter_map(struct jinja_ctx *w, struct value v, const struct args *a) {
    const struct list *l = items_if_true(w, v);
    struct list *out = list_new(w, GENERATOR);
    struct value attribute = arg_get(a, a->n, "attribute", NONE);
    if (a->n == 0 && attribute.kind != V_NONE) {
        args_check(w, a, "map", 0, 0, "attribute default");
        struct value fallback = arg_get(a, 0, "default", UNDEFINED);
        for (size_t i = 0; i < l->n; i++) {
            struct value item = path_get(w, l->v[i], attribute);
            list_add(w, out,
                     item.kind == V_UNDEFINED && fallback.kind != V_UNDEFINED ? fallback : item);
        }
        return LIST_VALUE(out);
    }
    struct str name = require_str(w, arg_get(a, 0, NULL, NONE), "map");
    struct args rest = args_rest(a, 1);
    if (!filter_exists(name))
        jinja_fail(w, "there is no filter '%.*s'", (int)MIN(name.n, 60u), name.p);
    for (size_t i = 0; i < l->n; i++) list_add(w, out, filter_apply(w, name, l->v[i], &rest));
    return LIST_VALUE(out);
}

/* select, reject, selectattr, rejectattr */
static struct value select_items(struct jinja_ctx *w, struct value v, const struct args *a,
                                 bool attribute, bool wanted) {
    struct value path = attribute ? arg_get(a, 0, NULL, UNDEFINED) : NONE;
    struct args rest = args_rest(a, attribute);
    struct list *out = list_new(w, GENERATOR);
    const struct list *l = items_if_true(w, v);
    if (path.kind == V_UNDEFINED) jinja_fail(w, "the name of an attribute is missing");
    struct str name = {0};
    if (rest.n) {
        name = require_str(w, rest.v[0], "select");
        rest = args_rest(&rest, 1);
        if (!jinja_test_exists(name))
            jinja_fail(w, "there is no test '%.*s'", (int)MIN(name.n, 60u), name.p);
    }
    for (size_t i = 0; i < l->n; i++) {
        struct value item = attribute ? path_get(w, l->v[i], path) : l->v[i];
        bool yes = name.n ? jinja_test_apply(w, name, item, &rest) : value_truth(item);
        if (yes == wanted) list_add(w, out, l->v[i]);
    }
    return LIST_VALUE(out);
}

static struct value filter_select(struct jinja_ctx *w, struct value v, const struct args *a) {
    return select_items(w, v, a, false, true);
}

static struct value filter_reject(struct jinja_ctx *w, struct value v, const struct args *a) {
    return select_items(w, v, a, false, false);
}

static struct value filter_selectattr(struct jinja_ctx *w, struct value v, const struct args *a) {
    return select_items(w, v, a, true, true);
}

static struct value filter_rejectattr(struct jinja_ctx *w, struct value v, const struct args *a) {
    return select_items(w, v, a, true, false);
}

static struct value filter_attr(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "attr", 1, 1, "name");
    struct str name = require_str(w, arg_get(a, 0, "name", NONE), "attr");
    if (v.kind == V_DICT && !method_exists(v, name))
        return (struct value){.kind = V_UNDEFINED, .s = name};
    return value_attr(w, v, name);
}

/* strings */

static struct value filter_trim(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "trim", 0, 1, "chars");
    struct value chars = arg_get(a, 0, "chars", NONE);
    struct str set = chars.kind == V_NONE ? STR("") : require_str(w, chars, "trim");
    return STRING(str_strip(w, value_str(w, v), chars.kind == V_NONE ? NULL : &set,
                            STRIP_LEFT | STRIP_RIGHT));
}

static struct value filter_upper(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "upper", 0, 0, NULL);
    return STRING(str_case(w, value_str(w, v), TO_UPPER));
}

static struct value filter_lower(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "lower", 0, 0, NULL);
    return STRING(str_case(w, value_str(w, v), TO_LOWER));
}

/* First character upper case, the others lower case. */
static struct str capitalize(struct jinja_ctx *w, struct str s) {
    struct text t = {0};
    int len = 0;
    if (s.n) char_at(s.p, &len);
    text_add(w, &t, str_case(w, str_slice(s, 0, (size_t)len), TO_UPPER));
    text_add(w, &t, str_case(w, str_slice(s, (size_t)len, s.n), TO_LOWER));
    return text_str(&t);
}

static struct value filter_capitalize(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "capitalize", 0, 0, NULL);
    return STRING(capitalize(w, value_str(w, v)));
}

/* Words begin after white space and -({[<; unlike str.title, not after an apostrophe. */
static struct value filter_title(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "title", 0, 0, NULL);
    struct str s = value_str(w, v);
    struct text t = {0};
    int len;
    bool begins = true;
    for (size_t i = 0; i < s.n; i += (size_t)len) {
        uint32_t c = char_at(s.p + i, &len);
        struct str one = str_slice(s, i, i + (size_t)len);
        text_add(w, &t, str_case(w, one, begins ? TO_UPPER : TO_LOWER));
        begins = char_is_space(c) || (c && c < 0x80 && strchr("-({[<", (int)c));
    }
    return STRING(text_str(&t));
}

static struct value filter_replace(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "replace", 2, 3, "old new count");
    struct value count = arg_get(a, 2, "count", NONE);
    return STRING(str_replace(w, value_str(w, v), value_str(w, arg_get(a, 0, "old", NONE)),
                              value_str(w, arg_get(a, 1, "new", NONE)),
                              count.kind == V_NONE ? -1 : require_int(w, count, "replace")));
}

/* Length of the line end at s.p + i, or 0. */
static size_t line_end_len(struct str s, size_t i) {
    int len;
    uint32_t c = char_at(s.p + i, &len);
    if (c == '\r' && i + 1 < s.n && s.p[i + 1] == '\n') return 2;
    bool ends =
        (c >= 10 && c <= 13) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 || c == 0x2029;
    return ends ? (size_t)len : 0;
}

static struct list *split_lines(struct jinja_ctx *w, struct str s, bool keep) {
    struct list *out = list_new(w, LIST);
    size_t begin = 0;
    for (size_t i = 0; i < s.n;) {
        size_t end = line_end_len(s, i);
        if (!end) {
            i++;
            while (i < s.n && ((uint8_t)s.p[i] & 0xC0) == 0x80) i++;
            continue;
        }
        list_add(w, out, STRING(str_slice(s, begin, keep ? i + end : i)));
        begin = i += end;
    }
    jinja_charge_scan(w, s.n);
    if (begin < s.n) list_add(w, out, STRING(str_slice(s, begin, s.n)));
    return out;
}

static struct value filter_indent(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "indent", 0, 3, "width first blank");
    struct value width = arg_get(a, 0, "width", INT(4));
    bool first = value_truth(arg_get(a, 1, "first", BOOL(false)));
    bool blank = value_truth(arg_get(a, 2, "blank", BOOL(false)));
    struct str prefix =
        width.kind == V_STR
            ? width.s
            : value_binary(w, '*', STRING(STR(" ")), INT(require_int(w, width, "indent"))).s;
    struct text whole = {0}, t = {0};
    text_add(w, &whole, require_str(w, v, "indent"));
    text_puts(w, &whole, "\n");
    const struct list *lines = split_lines(w, text_str(&whole), false);
    for (size_t i = 0; i < lines->n; i++) {
        struct str line = lines->v[i].s;
        if (i) text_puts(w, &t, "\n");
        if (i ? blank || line.n : first) text_add(w, &t, prefix);
        text_add(w, &t, line);
    }
    return STRING(text_str(&t));
}

static struct value filter_string(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "string", 0, 0, NULL);
    return STRING(value_str(w, v));
}

static struct value filter_format(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "format", 0, SIZE_MAX, NULL);
    struct list *l = list_new(w, TUPLE);
    for (size_t i = 0; i < a->n; i++) list_add(w, l, a->v[i]);
    return STRING(value_percent(w, value_str(w, v), LIST_VALUE(l)));
}

static struct value filter_wordcount(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "wordcount", 0, 0, NULL);
    struct str s = value_str(w, v);
    int64_t n = 0;
    bool in_word = false;
    jinja_charge_scan(w, s.n);
    for (size_t i = 0; i < s.n; i++) {
        uint8_t c = (uint8_t)s.p[i];
        if (c >= 0x80) jinja_fail(w, "'wordcount' of this text is not supported");
        bool word = c == '_' || (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z');
        n += word && !in_word;
        in_word = word;
    }
    return INT(n);
}

static struct value filter_safe(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "safe", 0, 0, NULL);
    return (struct value){.kind = V_MARKUP, .s = value_str(w, v)};
}

static struct value filter_escape(struct jinja_ctx *w, struct value v, const struct args *a) {
    static const char *const names[] = {"&",    "&amp;", "<",     "&lt;", ">",
                                        "&gt;", "'",     "&#39;", "\"",   "&#34;"};
    args_check(w, a, "escape", 0, 0, NULL);
    if (v.kind == V_MARKUP) return v;
    struct str s = value_str(w, v);
    for (size_t i = 0; i < ARRAY_LEN(names); i += 2) {
        struct str old = {names[i], 1, NULL}, new = {names[i + 1], strlen(names[i + 1]), NULL};
        s = str_replace(w, s, old, new, -1);
    }
    return (struct value){.kind = V_MARKUP, .s = s};
}

static struct value filter_tojson(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "tojson", 0, 4, "ensure_ascii indent separators sort_keys");
    struct value indent = arg_get(a, 1, "indent", NONE), parts = arg_get(a, 2, "separators", NONE);
    struct str indent_text = STR("");
    if (indent.kind == V_STR)
        indent_text = indent.s;
    else if (indent.kind != V_NONE)
        indent_text =
            value_binary(w, '*', STRING(STR(" ")), INT(require_int(w, indent, "tojson"))).s;
    struct json_style style = {.ascii = value_truth(arg_get(a, 0, "ensure_ascii", BOOL(false))),
                               .sort_keys = value_truth(arg_get(a, 3, "sort_keys", BOOL(false))),
                               .item = indent.kind == V_NONE ? STR(", ") : STR(","),
                               .key = STR(": "),
                               .indent = indent.kind == V_NONE ? NULL : &indent_text};
    if (parts.kind != V_NONE) {
        const struct list *l = value_items(w, parts);
        if (l->n != 2) jinja_fail(w, "'tojson' needs two separators");
        style.item = require_str(w, l->v[0], "tojson");
        style.key = require_str(w, l->v[1], "tojson");
    }
    return STRING(value_json(w, v, &style));
}

/* numbers */

static bool is_digits_only(const char *p) {
    size_t n = strspn(p, "0123456789");
    return n > 0 && p[n] == 0;
}

/* Python's int() of a string in base 10; false if the string is not a sign and digits. */
static bool int_parse(struct jinja_ctx *w, struct str s, int64_t *out) {
    s = str_strip(w, s, NULL, STRIP_LEFT | STRIP_RIGHT);
    const char *p = str_from(w, s.p, s.n, 0).p;
    jinja_charge_scan(w, s.n);
    if (strlen(p) != s.n || !is_digits_only(p + (*p == '+' || *p == '-'))) {
        if (memchr(s.p, '_', s.n)) jinja_fail(w, "'int' of this string is not supported");
        return false;
    }
    if (s.n > 18) jinja_fail(w, "an integer is too large");
    *out = atoll(p);
    return true;
}

static bool float_parse(struct jinja_ctx *w, struct str s, double *out) {
    s = str_strip(w, s, NULL, STRIP_LEFT | STRIP_RIGHT);
    const char *p = str_from(w, s.p, s.n, 0).p;
    char *end;
    jinja_add_steps(w, 8 + s.n);
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] == '_') jinja_fail(w, "'float' of this string is not supported");
        if (s.p[i] == 'x' || s.p[i] == 'X' || s.p[i] == '(' || s.p[i] == 0) return false;
    }
    *out = strtod(p, &end);
    return s.n > 0 && end == p + s.n;
}

static struct value filter_int(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "int", 0, 2, "default base");
    struct value fallback = arg_get(a, 0, "default", INT(0));
    int64_t base = require_int(w, arg_get(a, 1, "base", INT(10)), "int"), i;
    double f = 0;
    if (base != 10) jinja_fail(w, "'int' in base %lld is not supported", (long long)base);
    if (v.kind == V_INT || v.kind == V_BOOL) return INT(v.i);
    if (v.kind == V_UNDEFINED) jinja_fail(w, "'int' of an undefined value is not possible");
    if (v.kind == V_STR && int_parse(w, v.s, &i)) return INT(i);
    if (v.kind == V_FLOAT)
        f = v.f;
    else if (v.kind != V_STR || !float_parse(w, v.s, &f))
        return fallback;
    if (isnan(f)) return fallback;
    if (!(fabs(f) < 9e18)) jinja_fail(w, "'int' of this float is not possible");
    return INT((int64_t)f);
}

static struct value filter_float(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "float", 0, 1, "default");
    double f;
    if (value_is_number(v)) return FLOAT(value_float(v));
    if (v.kind == V_UNDEFINED) jinja_fail(w, "'float' of an undefined value is not possible");
    if (v.kind == V_STR && float_parse(w, v.s, &f)) return FLOAT(f);
    return arg_get(a, 0, "default", FLOAT(0.0));
}

static struct value filter_abs(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "abs", 0, 0, NULL);
    if (!value_is_number(v)) jinja_fail(w, "'abs' needs a number, not a %s", value_type(v));
    if (v.kind == V_FLOAT) return FLOAT(fabs(v.f));
    return v.i < 0 ? value_binary(w, '-', INT(0), INT(v.i)) : INT(v.i);
}

/* Halves round to the even neighbour of the exact value, as in Python's round. */
static struct value filter_round(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "round", 0, 2, "precision method");
    int64_t precision = require_int(w, arg_get(a, 0, "precision", INT(0)), "round");
    struct str method = require_str(w, arg_get(a, 1, "method", STRING(STR("common"))), "round");
    if (!value_is_number(v)) jinja_fail(w, "'round' needs a number, not a %s", value_type(v));
    if (precision < 0 || precision > 20)
        jinja_fail(w, "this precision of 'round' is not supported");
    bool up = str_is(method, "ceil");
    if (up || str_is(method, "floor")) {
        if (precision)
            jinja_fail(w, "'round' to digits by '%s' is not supported", up ? "ceil" : "floor");
        return value_is_number(v) && v.kind != V_FLOAT ? FLOAT((double)v.i)
                                                       : FLOAT(up ? ceil(v.f) : floor(v.f));
    }
    if (!str_is(method, "common")) jinja_fail(w, "'round' is 'common', 'ceil' or 'floor'");
    if (v.kind != V_FLOAT) return INT(v.i);
    if (!isfinite(v.f)) return v;
    char text[400];
    jinja_add_steps(w, 400);
    snprintf(text, sizeof text, "%.*f", (int)precision, v.f);
    return FLOAT(strtod(text, NULL));
}

static struct value filter_default(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "default", 0, 2, "default_value boolean");
    bool falsy = value_truth(arg_get(a, 1, "boolean", BOOL(false)));
    bool missing = v.kind == V_UNDEFINED || (falsy && !value_truth(v));
    return missing ? arg_get(a, 0, "default_value", STRING(STR(""))) : v;
}

/* Sorted by name. NULL: a filter of Jinja that is not supported. */
static const struct jinja_filter {
    const char *name;
    struct value (*apply)(struct jinja_ctx *w, struct value v, const struct args *a);
} filters[] = {
    {"abs", filter_abs},
    {"attr", filter_attr},
    {"batch", NULL},
    {"capitalize", filter_capitalize},
    {"center", NULL},
    {"count", filter_length},
    {"d", filter_default},
    {"default", filter_default},
    {"dictsort", filter_dictsort},
    {"e", filter_escape},
    {"escape", filter_escape},
    {"filesizeformat", NULL},
    {"first", filter_first},
    {"float", filter_float},
    {"forceescape", NULL},
    {"format", filter_format},
    {"groupby", NULL},
    {"indent", filter_indent},
    {"int", filter_int},
    {"items", filter_items},
    {"join", filter_join},
    {"last", filter_last},
    {"length", filter_length},
    {"list", filter_list},
    {"lower", filter_lower},
    {"map", filter_map},
    {"max", filter_max},
    {"min", filter_min},
    {"pprint", NULL},
    {"random", NULL},
    {"reject", filter_reject},
    {"rejectattr", filter_rejectattr},
    {"replace", filter_replace},
    {"reverse", filter_reverse},
    {"round", filter_round},
    {"safe", filter_safe},
    {"select", filter_select},
    {"selectattr", filter_selectattr},
    {"slice", NULL},
    {"sort", filter_sort},
    {"string", filter_string},
    {"striptags", NULL},
    {"sum", filter_sum},
    {"title", filter_title},
    {"tojson", filter_tojson},
    {"trim", filter_trim},
    {"truncate", NULL},
    {"unique", filter_unique},
    {"upper", filter_upper},
    {"urlencode", NULL},
    {"urlize", NULL},
    {"wordcount", filter_wordcount},
    {"wordwrap", NULL},
    {"xmlattr", NULL},
};

static const struct jinja_filter *filter_find(struct str name) {
    for (size_t i = 0; i < ARRAY_LEN(filters); i++)
        if (name_is(name, filters[i].name)) return &filters[i];
    return NULL;
}

bool filter_exists(struct str name) {
    return filter_find(name) != NULL;
}

struct value filter_apply(struct jinja_ctx *w, struct str name, struct value v,
                          const struct args *a) {
    const struct jinja_filter *f = filter_find(name);
    if (!f->apply) jinja_fail(w, "the filter '%s' is not supported", f->name);
    if (v.kind == V_MARKUP && f->apply != filter_escape && f->apply != filter_safe)
        jinja_fail(w, "a result of 'safe' or 'escape' can only be printed");
    jinja_add_steps(w, 6);
    return f->apply(w, v, a);
}

/* tests */

static struct value test_arg(struct jinja_ctx *w, const struct args *a, const char *name) {
    args_check(w, a, name, 1, 1, NULL);
    return a->v[0];
}

static bool test_defined(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "defined", 0, 0, NULL);
    return v.kind != V_UNDEFINED;
}

static bool test_undefined(struct jinja_ctx *w, struct value v, const struct args *a) {
    return !test_defined(w, v, a);
}

#define TEST_OF(name, condition)                                                                   \
    static bool test_##name(struct jinja_ctx *w, struct value v, const struct args *a) {           \
        args_check(w, a, #name, 0, 0, NULL);                                                       \
        return condition;                                                                          \
    }
TEST_OF(none, v.kind == V_NONE)
TEST_OF(boolean, v.kind == V_BOOL)
TEST_OF(true, v.kind == V_BOOL && v.i)
TEST_OF(false, v.kind == V_BOOL && !v.i)
TEST_OF(integer, v.kind == V_INT)
TEST_OF(float, v.kind == V_FLOAT)
TEST_OF(number, value_is_number(v))
TEST_OF(string, v.kind == V_STR || v.kind == V_MARKUP)
TEST_OF(mapping, v.kind == V_DICT)
TEST_OF(escaped, v.kind == V_MARKUP)
TEST_OF(callable,
        v.kind == V_MACRO || v.kind == V_METHOD || v.kind == V_FUNCTION || v.kind == V_UNDEFINED)
TEST_OF(filter, v.kind == V_STR && filter_exists(v.s))
TEST_OF(test, v.kind == V_STR && jinja_test_exists(v.s))
TEST_OF(iterable, v.kind == V_STR || v.kind == V_MARKUP || v.kind == V_LIST || v.kind == V_DICT ||
                      v.kind == V_UNDEFINED || v.kind == V_LOOP)
TEST_OF(sequence, v.kind == V_STR || v.kind == V_MARKUP || v.kind == V_DICT ||
                      v.kind == V_UNDEFINED ||
                      (v.kind == V_LIST && v.list->kind != GENERATOR && v.list->kind != VIEW))
#undef TEST_OF

static bool test_lower(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "lower", 0, 0, NULL);
    return str_is_case(w, value_str(w, v), TO_LOWER);
}

static bool test_upper(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "upper", 0, 0, NULL);
    return str_is_case(w, value_str(w, v), TO_UPPER);
}

static bool remainder_is(struct jinja_ctx *w, struct value v, struct value divisor,
                         int64_t wanted) {
    return value_equal(w, value_binary(w, '%', v, divisor), INT(wanted));
}

static bool test_even(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "even", 0, 0, NULL);
    return remainder_is(w, v, INT(2), 0);
}

static bool test_odd(struct jinja_ctx *w, struct value v, const struct args *a) {
    args_check(w, a, "odd", 0, 0, NULL);
    return remainder_is(w, v, INT(2), 1);
}

static bool test_divisibleby(struct jinja_ctx *w, struct value v, const struct args *a) {
    return remainder_is(w, v, test_arg(w, a, "divisibleby"), 0);
}

static bool test_in(struct jinja_ctx *w, struct value v, const struct args *a) {
    return value_in(w, v, test_arg(w, a, "in"));
}

static bool test_eq(struct jinja_ctx *w, struct value v, const struct args *a) {
    return value_equal(w, v, test_arg(w, a, "eq"));
}

static bool test_ne(struct jinja_ctx *w, struct value v, const struct args *a) {
    return !test_eq(w, v, a);
}

/* Supported only for the constants None, True and False, as one of the operands: the identity of
 * other values depends on how Python stores them. */
static bool test_sameas(struct jinja_ctx *w, struct value v, const struct args *a) {
    struct value b = test_arg(w, a, "sameas");
    bool single = v.kind == V_NONE || v.kind == V_BOOL || b.kind == V_NONE || b.kind == V_BOOL;
    if (single) return v.kind == b.kind && (v.kind == V_NONE || v.i == b.i);
    jinja_fail(w, "'sameas' of a %s is not supported", value_type(v));
}

static bool test_lt(struct jinja_ctx *w, struct value v, const struct args *a) {
    return value_compare(w, v, test_arg(w, a, "lt")) == -1;
}

static bool test_gt(struct jinja_ctx *w, struct value v, const struct args *a) {
    return value_compare(w, v, test_arg(w, a, "gt")) == 1;
}

static bool test_le(struct jinja_ctx *w, struct value v, const struct args *a) {
    return value_compare(w, v, test_arg(w, a, "le")) <= 0;
}

static bool test_ge(struct jinja_ctx *w, struct value v, const struct args *a) {
    int c = value_compare(w, v, test_arg(w, a, "ge"));
    return c == 0 || c == 1;
}

static const struct jinja_test {
    const char *name;
    bool (*apply)(struct jinja_ctx *w, struct value v, const struct args *a);
} tests[] = {
    {"boolean", test_boolean},
    {"callable", test_callable},
    {"defined", test_defined},
    {"divisibleby", test_divisibleby},
    {"eq", test_eq},
    {"equalto", test_eq},
    {"escaped", test_escaped},
    {"even", test_even},
    {"false", test_false},
    {"filter", test_filter},
    {"float", test_float},
    {"ge", test_ge},
    {"greaterthan", test_gt},
    {"gt", test_gt},
    {"in", test_in},
    {"integer", test_integer},
    {"iterable", test_iterable},
    {"le", test_le},
    {"lessthan", test_lt},
    {"lower", test_lower},
    {"lt", test_lt},
    {"mapping", test_mapping},
    {"ne", test_ne},
    {"none", test_none},
    {"number", test_number},
    {"odd", test_odd},
    {"sameas", test_sameas},
    {"sequence", test_sequence},
    {"string", test_string},
    {"test", test_test},
    {"true", test_true},
    {"undefined", test_undefined},
    {"upper", test_upper},
    {"==", test_eq},
    {"!=", test_ne},
    {"<", test_lt},
    {">", test_gt},
    {"<=", test_le},
    {">=", test_ge},
};

static const struct jinja_test *test_find(struct str name) {
    for (size_t i = 0; i < ARRAY_LEN(tests); i++)
        if (name_is(name, tests[i].name)) return &tests[i];
    return NULL;
}

bool jinja_test_exists(struct str name) {
    return test_find(name) != NULL;
}

bool jinja_test_apply(struct jinja_ctx *w, struct str name, struct value v, const struct args *a) {
    jinja_add_steps(w, 4);
    return test_find(name)->apply(w, v, a);
}

/* methods of strings */

static struct value strip_method(struct jinja_ctx *w, struct str s, const struct args *a,
                                 const char *name, int sides) {
    args_check(w, a, name, 0, 1, NULL);
    struct value chars = arg_get(a, 0, NULL, NONE);
    struct str set = chars.kind == V_NONE ? STR("") : require_str(w, chars, name);
    return STRING(str_strip(w, s, chars.kind == V_NONE ? NULL : &set, sides));
}

static struct value str_strip_both(struct jinja_ctx *w, struct str s, const struct args *a) {
    return strip_method(w, s, a, "strip", STRIP_LEFT | STRIP_RIGHT);
}

static struct value str_lstrip(struct jinja_ctx *w, struct str s, const struct args *a) {
    return strip_method(w, s, a, "lstrip", STRIP_LEFT);
}

static struct value str_rstrip(struct jinja_ctx *w, struct str s, const struct args *a) {
    return strip_method(w, s, a, "rstrip", STRIP_RIGHT);
}

/* Words between white space; after `max` words the rest is one word. */
static struct list *split_space(struct jinja_ctx *w, struct str s, int64_t max) {
    struct list *out = list_new(w, LIST);
    s = str_strip(w, s, NULL, STRIP_LEFT);
    while (s.n) {
        if (max >= 0 && (int64_t)out->n == max) {
            list_add(w, out, STRING(str_strip(w, s, NULL, STRIP_RIGHT)));
            break;
        }
        size_t end = 0;
        int len;
        while (end < s.n && !char_is_space(char_at(s.p + end, &len))) end += (size_t)len;
        list_add(w, out, STRING(str_slice(s, 0, end)));
        size_t next = end;
        while (next < s.n && char_is_space(char_at(s.p + next, &len))) next += (size_t)len;
        jinja_charge_scan(w, 2 * next);
        s = str_slice(s, next, s.n);
    }
    return out;
}

static struct value str_split(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "split", 0, 2, "sep maxsplit");
    struct value sep_value = arg_get(a, 0, "sep", NONE);
    int64_t max = require_int(w, arg_get(a, 1, "maxsplit", INT(-1)), "split");
    if (sep_value.kind == V_NONE) return LIST_VALUE(split_space(w, s, max));
    struct str sep = require_str(w, sep_value, "split");
    if (sep.n == 0) jinja_fail(w, "'split' by an empty string is not possible");
    struct list *out = list_new(w, LIST);
    size_t from = 0, hit;
    while ((max < 0 || (int64_t)out->n < max) && (hit = str_find(w, s, sep, from)) != SIZE_MAX) {
        list_add(w, out, STRING(str_slice(s, from, hit)));
        from = hit + sep.n;
    }
    list_add(w, out, STRING(str_slice(s, from, s.n)));
    return LIST_VALUE(out);
}

static struct value str_rsplit(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "rsplit", 0, 2, "sep maxsplit");
    struct value sep_value = arg_get(a, 0, "sep", NONE);
    int64_t max = require_int(w, arg_get(a, 1, "maxsplit", INT(-1)), "rsplit");
    if (max < 0) return str_split(w, s, a);
    struct str sep = require_str(w, sep_value, "rsplit");
    if (sep.n == 0) jinja_fail(w, "'rsplit' by an empty string is not possible");
    struct list *reversed = list_new(w, LIST), *out = list_new(w, LIST);
    size_t hit;
    while ((int64_t)reversed->n < max && (hit = str_rfind(w, s, sep)) != SIZE_MAX) {
        list_add(w, reversed, STRING(str_slice(s, hit + sep.n, s.n)));
        s = str_slice(s, 0, hit);
    }
    list_add(w, out, STRING(s));
    for (size_t i = reversed->n; i-- > 0;) list_add(w, out, reversed->v[i]);
    return LIST_VALUE(out);
}

/* partition and rpartition */
static struct value partition_at(struct jinja_ctx *w, struct str s, const struct args *a,
                                 bool right) {
    const char *name = right ? "rpartition" : "partition";
    args_check(w, a, name, 1, 1, NULL);
    struct str sep = require_str(w, a->v[0], name), none = STR("");
    if (sep.n == 0) jinja_fail(w, "'partition' by an empty string is not possible");
    size_t hit = right ? str_rfind(w, s, sep) : str_find(w, s, sep, 0);
    struct list *out = list_new(w, TUPLE);
    struct str parts[3] = {right ? none : s, none, right ? s : none};
    if (hit != SIZE_MAX) {
        parts[0] = str_slice(s, 0, hit);
        parts[1] = str_slice(s, hit, hit + sep.n);
        parts[2] = str_slice(s, hit + sep.n, s.n);
    }
    for (int i = 0; i < 3; i++) list_add(w, out, STRING(parts[i]));
    return LIST_VALUE(out);
}

static struct value str_partition(struct jinja_ctx *w, struct str s, const struct args *a) {
    return partition_at(w, s, a, false);
}

static struct value str_rpartition(struct jinja_ctx *w, struct str s, const struct args *a) {
    return partition_at(w, s, a, true);
}

static struct value str_splitlines(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "splitlines", 0, 1, "keepends");
    return LIST_VALUE(split_lines(w, s, value_truth(arg_get(a, 0, "keepends", BOOL(false)))));
}

/* startswith and endswith: a string, or a tuple of which one matches. */
static bool has_affix(struct jinja_ctx *w, struct str s, struct value what, bool end) {
    if (what.kind == V_LIST && what.list->kind == TUPLE) {
        for (size_t i = 0; i < what.list->n; i++)
            if (has_affix(w, s, STRING(require_str(w, what.list->v[i], "startswith")), end))
                return true;
        return false;
    }
    struct str part = require_str(w, what, end ? "endswith" : "startswith");
    jinja_charge_bytes(w, part.n);
    return part.n <= s.n &&
           str_equal(end ? str_slice(s, s.n - part.n, s.n) : str_slice(s, 0, part.n), part);
}

static struct value str_startswith(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "startswith", 1, 1, NULL);
    return BOOL(has_affix(w, s, a->v[0], false));
}

static struct value str_endswith(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "endswith", 1, 1, NULL);
    return BOOL(has_affix(w, s, a->v[0], true));
}

static struct value remove_affix(struct jinja_ctx *w, struct str s, const struct args *a,
                                 bool end) {
    args_check(w, a, end ? "removesuffix" : "removeprefix", 1, 1, NULL);
    struct str part = require_str(w, a->v[0], "removeprefix");
    if (!has_affix(w, s, a->v[0], end)) return STRING(s);
    return STRING(end ? str_slice(s, 0, s.n - part.n) : str_slice(s, part.n, s.n));
}

static struct value str_removeprefix(struct jinja_ctx *w, struct str s, const struct args *a) {
    return remove_affix(w, s, a, false);
}

static struct value str_removesuffix(struct jinja_ctx *w, struct str s, const struct args *a) {
    return remove_affix(w, s, a, true);
}

/* find, rfind, index, rindex: the position in characters. */
static struct value find_index(struct jinja_ctx *w, struct str s, const struct args *a, bool right,
                               bool required) {
    args_check(w, a, right ? "rfind" : "find", 1, 1, NULL);
    struct str part = require_str(w, a->v[0], "find");
    size_t offset = right ? str_rfind(w, s, part) : str_find(w, s, part, 0);
    if (offset == SIZE_MAX && required) jinja_fail(w, "'index' does not find the string");
    return INT(offset == SIZE_MAX ? -1 : (int64_t)str_length(w, str_slice(s, 0, offset)));
}

static struct value str_find_method(struct jinja_ctx *w, struct str s, const struct args *a) {
    return find_index(w, s, a, false, false);
}

static struct value str_rfind_method(struct jinja_ctx *w, struct str s, const struct args *a) {
    return find_index(w, s, a, true, false);
}

static struct value str_index(struct jinja_ctx *w, struct str s, const struct args *a) {
    return find_index(w, s, a, false, true);
}

static struct value str_rindex(struct jinja_ctx *w, struct str s, const struct args *a) {
    return find_index(w, s, a, true, true);
}

static struct value str_count(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "count", 1, 1, NULL);
    struct str part = require_str(w, a->v[0], "count");
    int64_t n = 0;
    if (part.n == 0) return INT((int64_t)str_length(w, s) + 1);
    for (size_t pos = 0; (pos = str_find(w, s, part, pos)) != SIZE_MAX; pos += part.n) n++;
    return INT(n);
}

static struct value str_replace_method(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "replace", 2, 3, NULL);
    return STRING(str_replace(w, s, require_str(w, a->v[0], "replace"),
                              require_str(w, a->v[1], "replace"),
                              require_int(w, arg_get(a, 2, NULL, INT(-1)), "replace")));
}

static struct value str_join(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "join", 1, 1, NULL);
    const struct list *l = value_items(w, a->v[0]);
    struct text t = {0};
    for (size_t i = 0; i < l->n; i++) {
        if (i) text_add(w, &t, s);
        text_add(w, &t, require_str(w, l->v[i], "join"));
    }
    return STRING(text_str(&t));
}

static struct value str_upper(struct jinja_ctx *w, struct str s, const struct args *a) {
    return filter_upper(w, STRING(s), a);
}

static struct value str_lower(struct jinja_ctx *w, struct str s, const struct args *a) {
    return filter_lower(w, STRING(s), a);
}

static struct value str_capitalize(struct jinja_ctx *w, struct str s, const struct args *a) {
    return filter_capitalize(w, STRING(s), a);
}

static struct value str_title_method(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "title", 0, 0, NULL);
    return STRING(str_title(w, s));
}

static struct value str_isupper(struct jinja_ctx *w, struct str s, const struct args *a) {
    return BOOL(test_upper(w, STRING(s), a));
}

static struct value str_islower(struct jinja_ctx *w, struct str s, const struct args *a) {
    return BOOL(test_lower(w, STRING(s), a));
}

/* Letters without case: kana, Chinese characters, Hangul. */
static bool char_is_east_asian(uint32_t c) {
    return (c >= 0x3041 && c <= 0x3096) || (c >= 0x30A1 && c <= 0x30FA) || c == 0x30FC ||
           (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0xAC00 && c <= 0xD7A3);
}

/* isdigit and similar methods for ASCII and East Asian letters; another character is an error. */
static struct value all_chars_are(struct jinja_ctx *w, struct str s, const struct args *a,
                                  const char *name, bool letters, bool digits) {
    args_check(w, a, name, 0, 0, NULL);
    bool all = s.n > 0;
    int len;
    jinja_add_steps(w, 1 + s.n / 4);
    for (size_t i = 0; i < s.n; i += (size_t)len) {
        uint32_t c = char_at(s.p + i, &len);
        if (c >= 0x80 && !char_is_east_asian(c))
            jinja_fail(w, "'%s' of U+%04X is not supported", name, (unsigned)c);
        bool letter = c >= 0x80 || ((c | 32) >= 'a' && (c | 32) <= 'z');
        all &= (letters && letter) || (digits && c >= '0' && c <= '9');
    }
    return BOOL(all);
}

static struct value str_isdigit(struct jinja_ctx *w, struct str s, const struct args *a) {
    return all_chars_are(w, s, a, "isdigit", false, true);
}

static struct value str_isalpha(struct jinja_ctx *w, struct str s, const struct args *a) {
    return all_chars_are(w, s, a, "isalpha", true, false);
}

static struct value str_isalnum(struct jinja_ctx *w, struct str s, const struct args *a) {
    return all_chars_are(w, s, a, "isalnum", true, true);
}

static struct value str_isspace(struct jinja_ctx *w, struct str s, const struct args *a) {
    args_check(w, a, "isspace", 0, 0, NULL);
    return BOOL(s.n > 0 && str_strip(w, s, NULL, STRIP_LEFT).n == 0);
}

/* Python's str.format with "{}", "{0}" and "{name}". Conversions, formats and attributes are
 * errors. */
static struct value str_format(struct jinja_ctx *w, struct str s, const struct args *a) {
    struct text t = {0};
    size_t used = 0, end;
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];
        if ((c == '{' || c == '}') && i + 1 < s.n && s.p[i + 1] == c) {
            i++;
        } else if (c == '}') {
            jinja_fail(w, "'format' has a '}' alone");
        } else if (c == '{') {
            end = str_find(w, s, STR("}"), i);
            if (end == SIZE_MAX) jinja_fail(w, "'format' has a '{' alone");
            struct str name = str_slice(s, i + 1, end);
            const char *p = str_from(w, name.p, name.n, 0).p;
            if (strpbrk(p, ":!.[{")) jinja_fail(w, "'{%s}' in a format is not supported", p);
            if (name.n > 9) p = str_from(w, name.p, name.n, 0).p;
            size_t pos = name.n == 0 ? used++ : is_digits_only(p) ? (size_t)atoi(p) : SIZE_MAX;
            jinja_add_steps(w, 8 + a->n_named);
            struct value v = arg_get(a, pos, name.n && !is_digits_only(p) ? p : NULL, UNDEFINED);
            if (pos != SIZE_MAX && pos >= a->n) jinja_fail(w, "'format' has too few values");
            if (v.kind == V_UNDEFINED) jinja_fail(w, "'format' has no value for '%s'", p);
            text_add(w, &t, value_str(w, v));
            i = end;
            continue;
        }
        text_add(w, &t, str_slice(s, i, i + 1));
    }
    return STRING(text_str(&t));
}

static const struct str_method {
    const char *name;
    struct value (*call)(struct jinja_ctx *w, struct str s, const struct args *a);
} str_methods[] = {
    {"capitalize", str_capitalize},
    {"count", str_count},
    {"endswith", str_endswith},
    {"find", str_find_method},
    {"format", str_format},
    {"index", str_index},
    {"isalnum", str_isalnum},
    {"isalpha", str_isalpha},
    {"isdigit", str_isdigit},
    {"islower", str_islower},
    {"isspace", str_isspace},
    {"isupper", str_isupper},
    {"join", str_join},
    {"lower", str_lower},
    {"lstrip", str_lstrip},
    {"partition", str_partition},
    {"removeprefix", str_removeprefix},
    {"removesuffix", str_removesuffix},
    {"replace", str_replace_method},
    {"rfind", str_rfind_method},
    {"rindex", str_rindex},
    {"rpartition", str_rpartition},
    {"rsplit", str_rsplit},
    {"rstrip", str_rstrip},
    {"split", str_split},
    {"splitlines", str_splitlines},
    {"startswith", str_startswith},
    {"strip", str_strip_both},
    {"title", str_title_method},
    {"upper", str_upper},
};

/* methods of dicts and lists */

static struct value dict_method(struct jinja_ctx *w, struct value v, struct str name,
                                const struct args *a) {
    if (str_is(name, "get")) {
        args_check(w, a, "get", 1, 2, NULL);
        struct value *found = dict_find(w, v.dict, a->v[0]);
        return found ? *found : arg_get(a, 1, NULL, NONE);
    }
    args_check(w, a, "items", 0, 0, NULL);
    if (str_is(name, "items")) return dict_pairs(w, v, VIEW);
    struct list *out = list_new(w, VIEW);
    if (str_is(name, "copy")) {
        struct dict *copy = dict_new(w);
        for (size_t i = 0; i < v.dict->n; i++)
            dict_set(w, copy, v.dict->v[i].key, v.dict->v[i].value);
        copy->message = v.dict->message;
        return (struct value){.kind = V_DICT, .dict = copy};
    }
    for (size_t i = 0; i < v.dict->n; i++)
        list_add(w, out, str_is(name, "keys") ? v.dict->v[i].key : v.dict->v[i].value);
    return LIST_VALUE(out);
}

static struct value list_method(struct jinja_ctx *w, struct value v, struct str name,
                                const struct args *a) {
    if (str_is(name, "copy")) return filter_list(w, v, a);
    args_check(w, a, "index", 1, 1, NULL);
    int64_t n = 0;
    for (size_t i = 0; i < v.list->n; i++) {
        bool same = value_equal(w, v.list->v[i], a->v[0]);
        if (same && str_is(name, "index")) return INT((int64_t)i);
        n += same;
    }
    if (str_is(name, "index")) jinja_fail(w, "'index' does not find the value");
    return INT(n);
}

static struct value loop_method(struct jinja_ctx *w, struct loop *l, struct str name,
                                const struct args *a) {
    if (str_is(name, "cycle")) {
        args_check(w, a, "cycle", 1, SIZE_MAX, NULL);
        return a->v[l->i % a->n];
    }
    struct list *values = list_new(w, TUPLE);
    args_check(w, a, "changed", 0, SIZE_MAX, NULL);
    for (size_t i = 0; i < a->n; i++) list_add(w, values, a->v[i]);
    bool changed = !l->changed || !value_equal(w, *l->changed, LIST_VALUE(values));
    l->changed = jinja_alloc(w, sizeof *l->changed);
    *l->changed = LIST_VALUE(values);
    return BOOL(changed);
}

/* The attributes of Python's types that this subset has, and those that it lacks: using one of
 * these is an error with its name. */
static const struct attributes {
    const char *supported, *unsupported;
} str_attributes =
    {NULL, "capitalize casefold center count encode endswith expandtabs find format format_map "
           "index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric "
           "isprintable isspace istitle isupper join ljust lower lstrip maketrans partition "
           "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split "
           "splitlines startswith strip swapcase title translate upper zfill"},
  dict_attributes = {"get items keys values copy", "clear fromkeys pop popitem setdefault update"},
  list_attributes = {"copy count index", "append clear extend insert pop remove reverse sort"},
  tuple_attributes = {"count index", ""}, view_attributes = {"", "isdisjoint mapping"},
  generator_attributes = {"", "close gi_code gi_frame gi_running gi_suspended gi_yieldfrom send "
                              "throw"},
  range_attributes = {"count index", "start stop step"}, loop_attributes = {"cycle changed", ""},
  number_attributes = {"", "as_integer_ratio bit_count bit_length conjugate denominator "
                           "from_bytes fromhex hex imag is_integer numerator real to_bytes"},
  no_attributes = {"", ""};

static const struct attributes *attributes_of(struct value v) {
    if (v.kind == V_STR) return &str_attributes;
    if (v.kind == V_DICT) return &dict_attributes;
    if (v.kind == V_LOOP) return &loop_attributes;
    if (value_is_number(v)) return &number_attributes;
    if (v.kind != V_LIST) return &no_attributes;
    return v.list->kind == LIST        ? &list_attributes
           : v.list->kind == TUPLE     ? &tuple_attributes
           : v.list->kind == GENERATOR ? &generator_attributes
           : v.list->kind == VIEW      ? &view_attributes
                                       : &range_attributes;
}

bool method_exists(struct value v, struct str name) {
    const struct attributes *a = attributes_of(v);
    return name_is_in_list(a->supported, name) || name_is_in_list(a->unsupported, name);
}

struct value method_call(struct jinja_ctx *w, const struct jinja_method *m, const struct args *a) {
    struct value v = m->self;
    jinja_add_steps(w, 8);
    if (v.kind == V_STR)
        for (size_t i = 0; i < ARRAY_LEN(str_methods); i++)
            if (name_is(m->name, str_methods[i].name)) return str_methods[i].call(w, v.s, a);
    if (!name_is_in_list(attributes_of(v)->supported, m->name))
        jinja_fail(w, "the method '%.*s' of a %s is not supported", (int)m->name.n, m->name.p,
                   value_type(v));
    if (v.kind == V_DICT) return dict_method(w, v, m->name, a);
    if (v.kind == V_LOOP) return loop_method(w, v.loop, m->name, a);
    return list_method(w, v, m->name, a);
}

/* global functions */

enum { MAX_RANGE = 100000 }; /* the limit of Jinja's sandbox */

static struct value function_range(struct jinja_ctx *w, const struct args *a) {
    args_check(w, a, "range", 1, 3, NULL);
    int64_t v[3] = {0, 0, 1};
    for (size_t i = 0; i < a->n; i++) v[a->n == 1 ? 1 : i] = require_int(w, a->v[i], "range");
    if (v[2] == 0) jinja_fail(w, "the step of 'range' is 0");
    struct list *out = list_new(w, RANGE);
    int64_t i = v[0];
    while (v[2] > 0 ? i < v[1] : i > v[1]) {
        if (out->n == MAX_RANGE) jinja_fail(w, "'range' is longer than %d", MAX_RANGE);
        list_add(w, out, INT(i));
        if (__builtin_add_overflow(i, v[2], &i)) break;
    }
    return LIST_VALUE(out);
}

/* A dict from another dict or from pairs, and from named arguments. */
static struct dict *dict_make(struct jinja_ctx *w, const struct args *a, const char *what) {
    struct dict *d = dict_new(w);
    if (a->n > 1) jinja_fail(w, "'%s' takes at most 1 argument without a name", what);
    if (a->n && a->v[0].kind == V_DICT) {
        for (size_t i = 0; i < a->v[0].dict->n; i++)
            dict_set(w, d, a->v[0].dict->v[i].key, a->v[0].dict->v[i].value);
        d->message = a->v[0].dict->message;
    } else if (a->n) {
        const struct list *l = value_items(w, a->v[0]);
        for (size_t i = 0; i < l->n; i++) {
            const struct list *pair = value_items(w, l->v[i]);
            if (pair->n != 2) jinja_fail(w, "'%s' needs pairs", what);
            dict_set(w, d, pair->v[0], pair->v[1]);
        }
    }
    for (size_t i = 0; i < a->n_named; i++) dict_set(w, d, a->named[i].key, a->named[i].value);
    return d;
}

static struct value function_dict(struct jinja_ctx *w, const struct args *a) {
    return (struct value){.kind = V_DICT, .dict = dict_make(w, a, "dict")};
}

static struct value function_namespace(struct jinja_ctx *w, const struct args *a) {
    return (struct value){.kind = V_NAMESPACE, .dict = dict_make(w, a, "namespace")};
}

_Noreturn static struct value function_raise(struct jinja_ctx *w, const struct args *a) {
    args_check(w, a, "raise_exception", 1, 1, "message");
    struct str s = value_str(w, arg_get(a, 0, "message", NONE));
    error_set(w->err, ERR_MISMATCH, "it refuses this conversation: %.*s", (int)MIN(s.n, 1000u),
              s.p);
    longjmp(w->fail_jump, 1);
}

static struct value function_strftime(struct jinja_ctx *w, const struct args *a) {
    args_check(w, a, "strftime_now", 1, 1, "format");
    struct str format = require_str(w, arg_get(a, 0, "format", NONE), "strftime_now");
    char out[512];
    time_t seconds = (time_t)a->now;
    struct tm tm;
    gmtime_r(&seconds, &tm);
    if (format.n > 200) jinja_fail(w, "a date's format is too long");
    jinja_add_steps(w, 400);
    size_t n = strftime(out, sizeof out, str_from(w, format.p, format.n, 0).p, &tm);
    return STRING(str_from(w, out, n, 0));
}

static struct value function_unsupported(struct jinja_ctx *w, const struct args *a) {
    (void)a;
    jinja_fail(w, "the functions 'lipsum', 'cycler' and 'joiner' are not supported");
}

const struct function *function_find(struct str name) {
    static const struct function functions[] = {
        {"range", function_range},           {"dict", function_dict},
        {"namespace", function_namespace},   {"raise_exception", function_raise},
        {"strftime_now", function_strftime}, {"lipsum", function_unsupported},
        {"cycler", function_unsupported},    {"joiner", function_unsupported},
    };
    for (size_t i = 0; i < ARRAY_LEN(functions); i++)
        if (name_is(name, functions[i].name)) return &functions[i];
    return NULL;
}
