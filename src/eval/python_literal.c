/*
 * python_literal: values that a template writes in Python's notation, as ast.literal_eval reads
 * them: ['it\'s', "a"], (1, 2.5), True. Dicts, sets, bytes, complex numbers and adjacent strings
 * are not read.
 */
#include "eval/harness_task.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistr.h>

enum { DEPTH_LIMIT = 16 };

struct literal {
    const char *p;
    int depth;
};

static json_t *value_read(struct literal *l);

static void blanks_skip(struct literal *l) {
    l->p += strspn(l->p, " \t\r\n");
}

/* Appends the character of a numeric escape with `digits` digits, which begin at l->p. */
static bool code_point_read(struct literal *l, int digits, struct buf *out) {
    char number[9] = "";
    uint8_t bytes[6];
    if (strspn(l->p, "0123456789abcdefABCDEF") < (size_t)digits) return false;
    memcpy(number, l->p, (size_t)digits);
    int n = u8_uctomb(bytes, (ucs4_t)strtoul(number, NULL, 16), sizeof bytes);
    if (n <= 0 || strtoul(number, NULL, 16) == 0) return false;
    buf_add(out, bytes, (size_t)n);
    l->p += digits;
    return true;
}

/* Reads an escape after its backslash. Python keeps the backslash of an unknown escape. */
static bool escape_read(struct literal *l, struct buf *out) {
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = *l->p++;
    const char *known = c ? strchr(from, c) : NULL;
    if (!c || (c >= '0' && c <= '7') || c == 'N') return false;
    if (c == 'x' || c == 'u' || c == 'U')
        return code_point_read(l, c == 'x' ? 2 : c == 'u' ? 4 : 8, out);
    if (c == '\n') return true;
    if (!known) buf_puts(out, "\\");
    buf_add(out, known ? to + (known - from) : l->p - 1, 1);
    return true;
}

static json_t *string_read(struct literal *l) {
    char quote = *l->p++;
    struct buf b = {0};
    bool ok = true;
    buf_puts(&b, "");
    if (l->p[0] == quote && l->p[1] == quote) ok = false; // three quotes
    while (ok && *l->p && *l->p != quote && *l->p != '\n') {
        char c = *l->p++;
        if (c == '\\')
            ok = escape_read(l, &b);
        else
            buf_add(&b, &c, 1);
    }
    json_t *v = ok && *l->p == quote ? json_stringn(b.data, b.len) : NULL;
    l->p += v != NULL;
    buf_release(&b);
    return v;
}

static json_t *number_read(struct literal *l) {
    char *end;
    size_t sign = *l->p == '-' || *l->p == '+', n = strspn(l->p + sign, "0123456789.eE+-");
    bool integer = strspn(l->p + sign, "0123456789") == n;
    double real = strtod(l->p, &end);
    if (n == 0 || (size_t)(end - l->p) != sign + n || !isfinite(real)) return NULL;
    json_t *v = integer && n < 19 ? json_integer(strtoll(l->p, NULL, 10)) : json_real(real);
    l->p = end;
    return v;
}

static json_t *word_read(struct literal *l) {
    static const char *const words[] = {"True", "False", "None"};
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if (strncmp(l->p, words[i], n) != 0) continue;
        l->p += n;
        return i == 2 ? json_null() : json_boolean(i == 0);
    }
    return NULL;
}

/* Reads a list or a tuple; (x) is x. */
static json_t *list_read(struct literal *l) {
    char close = *l->p++ == '[' ? ']' : ')';
    json_t *list = json_array(), *v;
    bool comma = true;
    for (blanks_skip(l); comma && *l->p && *l->p != close; blanks_skip(l)) {
        if (!(v = value_read(l))) break;
        json_array_append_new(list, v);
        blanks_skip(l);
        comma = *l->p == ',';
        l->p += comma;
    }
    bool ok = *l->p == close, only = close == ')' && !comma && json_array_size(list) == 1;
    l->p += ok;
    v = !ok ? NULL : json_incref(only ? json_array_get(list, 0) : list);
    json_decref(list);
    return v;
}

static json_t *value_read(struct literal *l) {
    json_t *v = NULL;
    blanks_skip(l);
    if (++l->depth > DEPTH_LIMIT) return NULL;
    if (*l->p == '\'' || *l->p == '"')
        v = string_read(l);
    else if (*l->p == '[' || *l->p == '(')
        v = list_read(l);
    else if (!(v = word_read(l)))
        v = number_read(l);
    l->depth--;
    return v;
}

json_t *python_literal_parse(const char *text) {
    struct literal l = {.p = text};
    json_t *v = value_read(&l);
    blanks_skip(&l);
    if (v && !*l.p) return v;
    json_decref(v);
    return NULL;
}
