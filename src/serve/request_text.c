/*
 * request_text: which text of a JSON body cannot be a text of a request, and why.
 *
 * It is called after the JSON parser has refused a body, so that the error can name the field.
 * Where the body is not JSON, or is nested too deeply, the scan stops without a finding. The same
 * scan finds a member of a body before its memory is reserved and it is parsed.
 */
#define _GNU_SOURCE
#include "serve/request_fields.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unistr.h>

enum { MAX_DEPTH = 100 }; /* as in json_request_limits */

struct text_scan {
    const char *p, *end;
    struct buf path;     /* path of the value at p: messages[0].content */
    const char *problem; /* NULL: all texts before p are valid */
    bool in_key;
};

static bool value_scan(struct text_scan *s, int depth);

static void path_cut(struct text_scan *s, size_t len) {
    s->path.len = len;
    s->path.data[len] = 0;
}

static void blanks_skip(struct text_scan *s) {
    while (s->p < s->end && strchr(" \t\r\n", *s->p)) s->p++;
}

/* Moves past the character c and blanks around it; false: another one follows. */
static bool char_skip(struct text_scan *s, char c) {
    blanks_skip(s);
    if (s->p == s->end || *s->p != c) return false;
    s->p++;
    blanks_skip(s);
    return true;
}

/* The code unit of the escape \uXXXX at p, or -1. */
static int escape_unit(const char *p, const char *end) {
    char digits[5] = {0};
    if (end - p < 6 || p[0] != '\\' || p[1] != 'u') return -1;
    memcpy(digits, p + 2, 4);
    for (int i = 0; i < 4; i++)
        if (!isxdigit((uint8_t)digits[i])) return -1;
    return (int)strtol(digits, NULL, 16);
}

static bool is_high_surrogate(int unit) {
    return unit >= 0xd800 && unit < 0xdc00;
}

static bool is_low_surrogate(int unit) {
    return unit >= 0xdc00 && unit < 0xe000;
}

/* Moves past the escape at p; sets the problem if a text cannot have it. */
static void escape_scan(struct text_scan *s) {
    int unit = escape_unit(s->p, s->end), next = unit < 0 ? -1 : escape_unit(s->p + 6, s->end);
    bool pair = is_high_surrogate(unit) && is_low_surrogate(next);
    if (unit == 0) s->problem = "contains the character U+0000, which a text cannot have";
    if (!pair && (is_high_surrogate(unit) || is_low_surrogate(unit)))
        s->problem = "contains half of a surrogate pair, which is not a character";
    s->p = MIN(s->end, s->p + (pair ? 12 : unit >= 0 ? 6 : 2));
}

/* Scans the string at p. Returns whether it ends and has no problem. */
static bool string_scan(struct text_scan *s) {
    const char *begin = ++s->p;
    while (s->p < s->end && *s->p != '"' && !s->problem) {
        if (*s->p == '\\')
            escape_scan(s);
        else
            s->p++;
    }
    if (u8_check((const uint8_t *)begin, (size_t)(s->p - begin))) s->problem = "is not UTF-8";
    return s->p < s->end && !s->problem && *s->p++ == '"';
}

/* Scans a member of an object, and adds its key to the path while it does. */
static bool member_scan(struct text_scan *s, int depth) {
    size_t path_len = s->path.len;
    const char *key = s->p + 1;
    s->in_key = true;
    if (s->p == s->end || *s->p != '"' || !string_scan(s)) return false;
    s->in_key = false;
    if (path_len) buf_puts(&s->path, ".");
    buf_add(&s->path, key, (size_t)(s->p - key) - 1);
    if (!char_skip(s, ':') || !value_scan(s, depth + 1)) return false;
    path_cut(s, path_len);
    return true;
}

static bool item_scan(struct text_scan *s, int depth, int i) {
    size_t path_len = s->path.len;
    buf_printf(&s->path, "[%d]", i);
    if (!value_scan(s, depth + 1)) return false;
    path_cut(s, path_len);
    return true;
}

/* Scans a list or an object. */
static bool container_scan(struct text_scan *s, int depth) {
    bool object = *s->p == '{';
    char close = object ? '}' : ']';
    if (depth == MAX_DEPTH || !char_skip(s, *s->p)) return false;
    if (char_skip(s, close)) return true;
    for (int i = 0; object ? member_scan(s, depth) : item_scan(s, depth, i); i++) {
        if (char_skip(s, close)) return true;
        if (!char_skip(s, ',')) return false;
    }
    return false;
}

static bool value_scan(struct text_scan *s, int depth) {
    blanks_skip(s);
    if (s->p == s->end) return false;
    if (*s->p == '"') return string_scan(s);
    if (*s->p == '{' || *s->p == '[') return container_scan(s, depth);
    while (s->p < s->end && !strchr(",]} \t\r\n", *s->p)) s->p++; // a number, true, false or null
    return true;
}

int request_text_check(const char *text, size_t len, struct error *err) {
    struct text_scan s = {.p = text, .end = text + len};
    value_scan(&s, 0);
    const char *path = s.path.len ? s.path.data : "the body";
    if (s.problem && s.in_key)
        error_set(err, ERR_USAGE,
                  s.path.len ? "'%.100s' has a name that %s" : "%s has a name that %s", path,
                  s.problem);
    else if (s.problem)
        error_set(err, ERR_USAGE, s.path.len ? "'%.100s' %s" : "%s %s", path, s.problem);
    buf_release(&s.path);
    return s.problem ? ERR_USAGE : OK;
}

const char *request_text_member(const char *text, size_t len, const char *key, size_t *n) {
    struct text_scan s = {.p = text, .end = text + len};
    const char *found = NULL;
    bool go_on = text && char_skip(&s, '{');
    while (go_on && !found && s.p < s.end && *s.p == '"') {
        const char *name = s.p + 1;
        go_on = string_scan(&s);
        size_t name_len = go_on ? (size_t)(s.p - name) - 1 : 0;
        go_on = go_on && char_skip(&s, ':');
        const char *value = s.p;
        go_on = go_on && value_scan(&s, 1);
        *n = (size_t)(s.p - value);
        if (go_on && name_len == strlen(key) && memcmp(name, key, name_len) == 0) found = value;
        go_on = go_on && char_skip(&s, ',');
    }
    buf_release(&s.path);
    return found;
}

json_t *request_body_member(const struct exchange *x, const char *key) {
    const struct buf *body = exchange_body(x);
    size_t n;
    const char *text = request_text_member(body->data, body->len, key, &n);
    return text ? json_loadb(text, n, JSON_DECODE_ANY, NULL) : NULL;
}
