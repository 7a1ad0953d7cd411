/*
 * regex: a parser that converts regular expressions to grammar expressions.
 *
 * The syntax is the common part of PCRE, Python and ECMAScript. Only the set of matching texts
 * matters, so lazy and greedy quantifiers are equal, and so are capturing and other groups.
 * Look-around, back-references, possessive quantifiers and flags are refused with a message. \d, \w
 * and \s are ASCII; '.' is any character except a line feed.
 *
 * Grammar:
 *
 *     alternatives = sequence ('|' sequence)* ;  sequence = item* ;
 *     item = atom quantifier? ;  atom = character | class | '(' alternatives ')'
 */
#include "grammar/internal.h"

#include <stdlib.h>
#include <string.h>

struct regex_parser {
    struct grammar_builder *b;
    const char *text;
    size_t len, pos;
    int nesting;
    bool json;
    struct error *err;
};

static struct expr *syntax_error(struct regex_parser *p, const char *what) {
    error_set(p->err, ERR_FORMAT, "regular expression, at byte %zu of '%.80s': %s", p->pos, p->text,
              what);
    return NULL;
}

/* True if the rest of the pattern begins with `s`. */
static bool next_is(const struct regex_parser *p, const char *s) {
    size_t n = strlen(s);
    return p->len - p->pos >= n && memcmp(p->text + p->pos, s, n) == 0;
}

static bool consume(struct regex_parser *p, const char *s) {
    bool found = next_is(p, s);
    if (found) p->pos += strlen(s);
    return found;
}

static int hex_value(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Parses `min` to `max` hexadecimal digits and returns their value; -1 when there are fewer than
 * `min`. */
static int32_t parse_hex(struct regex_parser *p, int min, int max) {
    int32_t c = 0, n = 0;
    while (n < max && p->pos < p->len && hex_value(p->text[p->pos]) >= 0) {
        c = c * 16 + hex_value(p->text[p->pos++]);
        n++;
    }
    return n >= min ? c : -1;
}

/* The code point of \x.., \u.... or \x{...}; the cursor is after the letter. */
static int32_t parse_hex_escape(struct regex_parser *p, char letter) {
    bool braced = consume(p, "{");
    int digits = letter == 'x' ? 2 : 4;
    int32_t c = braced ? parse_hex(p, 1, 6) : parse_hex(p, digits, digits);
    if (c >= 0xD800 && c < 0xDC00 && !braced && consume(p, "\\u")) { // a pair of surrogates
        int32_t low = parse_hex(p, 4, 4);
        c = low >= 0xDC00 && low < 0xE000 ? 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00) : -1;
    }
    if (c < 0 || c > 0x10FFFF || (c >= 0xD800 && c < 0xE000) || (braced && !consume(p, "}"))) {
        syntax_error(p, "this is not a hexadecimal code of a character");
        return -1;
    }
    return c;
}

/* Parses \p{Name}, \pL or \P{...}; the cursor is after the letter p. */
static bool parse_property(struct regex_parser *p, bool negative, struct codepoint_set *out) {
    const char *name = p->text + p->pos;
    size_t n = p->pos < p->len ? 1 : 0;
    if (consume(p, "{")) {
        name++;
        const char *end = memchr(name, '}', p->len - p->pos);
        n = end ? (size_t)(end - name) : 0;
        p->pos += end ? 1 : 0;
        if (n > 0 && name[0] == '^') name++, n--, p->pos++, negative = !negative;
        static const char *const keys[] = {"Script=", "sc=", "gc=", "General_Category="};
        for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
            size_t k = strlen(keys[i]);
            if (n > k && memcmp(name, keys[i], k) == 0) name += k, n -= k, p->pos += k;
        }
    }
    struct codepoint_set r = {0};
    if (!codepoint_set_add_property(&r, name, n)) {
        syntax_error(
            p, "unknown property; known are L Lu Ll M N Nd P S Z and the scripts Han, Hiragana, "
               "Katakana, Hangul, Bopomofo, Latin, Greek, Cyrillic, Arabic, Hebrew, Thai, "
               "Devanagari");
        return false;
    }
    p->pos += n;
    if (negative) codepoint_set_negate(&r);
    for (int32_t i = 0; i < r.n; i++) codepoint_set_add(out, r.v[i].lo, r.v[i].hi);
    codepoint_set_release(&r);
    return true;
}

/* Adds the characters of \d \w \s \D \W \S; false for any other c. */
static bool add_escape_class(char c, struct codepoint_set *out) {
    struct codepoint_set r = {0};
    switch (c | 0x20) {
    case 'd':
        codepoint_set_add(&r, '0', '9');
        break;
    case 'w':
        codepoint_set_add(&r, '0', '9');
        codepoint_set_add(&r, 'A', 'Z');
        codepoint_set_add(&r, '_', '_');
        codepoint_set_add(&r, 'a', 'z');
        break;
    case 's':
        codepoint_set_add(&r, '\t', '\r');
        codepoint_set_add(&r, ' ', ' ');
        break;
    default:
        return false;
    }
    if (c < 'a') codepoint_set_negate(&r);
    for (int32_t i = 0; i < r.n; i++) codepoint_set_add(out, r.v[i].lo, r.v[i].hi);
    codepoint_set_release(&r);
    return true;
}

/* Parses an escape for one character; -1 after an error. The cursor is on its letter. */
static int32_t parse_char_escape(struct regex_parser *p, bool in_class) {
    static const char from[] = "tnrfvae0", to[] = "\t\n\r\f\v\a\x1B";
    char c = p->text[p->pos++];
    const char *known = c ? strchr(from, c) : NULL;
    if (c == 'x' || c == 'u') return parse_hex_escape(p, c);
    if (c == '0' && p->pos < p->len && p->text[p->pos] >= '0' && p->text[p->pos] <= '7')
        known = NULL; // octal
    if (known) return to[known - from];
    if (c == 'b' && in_class) return '\b';
    p->pos--;
    if ((c >= '0' && c <= '9') || c == 'k' || c == 'g')
        syntax_error(p, "back-references are not regular and not supported");
    else if (c == 'b' || c == 'B')
        syntax_error(p, "word boundaries are not supported");
    else if (strchr("AzZG", c))
        syntax_error(p, "this anchor is not supported, the pattern matches the whole text anyway");
    else if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (uint8_t)c >= 0x80)
        syntax_error(p, "unknown escape");
    else
        return (uint8_t)p->text[p->pos++];
    return -1;
}

/* Parses an escape and adds its characters. *single is the character if there is only one, else -1.
 */
static bool parse_escape(struct regex_parser *p, bool in_class, struct codepoint_set *out,
                         int32_t *single) {
    *single = -1;
    if (++p->pos >= p->len) return syntax_error(p, "the pattern ends in a backslash"), false;
    char c = p->text[p->pos];
    if (add_escape_class(c, out)) return p->pos++, true;
    if (c == 'p' || c == 'P') return p->pos++, parse_property(p, c == 'P', out);
    *single = parse_char_escape(p, in_class);
    if (*single >= 0) codepoint_set_add(out, (uint32_t)*single, (uint32_t)*single);
    return *single >= 0;
}

/* Parses a member of a class; *single as in parse_escape. */
static bool parse_class_member(struct regex_parser *p, struct codepoint_set *out, int32_t *single) {
    if (next_is(p, "[:") || next_is(p, "[.") || next_is(p, "[="))
        return syntax_error(p, "POSIX classes are not supported, use \\d \\w \\s or \\p{...}"),
               false;
    if (p->text[p->pos] == '\\') return parse_escape(p, true, out, single);
    int n;
    *single = utf8_decode(p->text + p->pos, p->len - p->pos, &n);
    codepoint_set_add(out, (uint32_t)*single, (uint32_t)*single);
    p->pos += (size_t)n;
    return true;
}

/* Parses a class; the cursor is after '['. */
static bool parse_class(struct regex_parser *p, struct codepoint_set *out) {
    bool negative = consume(p, "^");
    for (bool first = true; first || !next_is(p, "]"); first = false) {
        int32_t lo, hi;
        if (p->pos >= p->len) return syntax_error(p, "a class lacks its ']'"), false;
        if (out->n > 1 << 17) return syntax_error(p, "the class is too large"), false;
        if (!parse_class_member(p, out, &lo)) return false;
        if (!next_is(p, "-") || p->pos + 1 >= p->len || p->text[p->pos + 1] == ']') continue;
        p->pos++;
        if (!parse_class_member(p, out, &hi)) return false;
        if (lo < 0 || hi < lo) return syntax_error(p, "a range in a class must go up"), false;
        codepoint_set_add(out, (uint32_t)lo, (uint32_t)hi);
    }
    p->pos++;
    if (negative) codepoint_set_negate(out);
    return true;
}

/* No character above the backslash is escaped in JSON, so only the characters up to it are
 * processed one by one. */
struct expr *expr_json_set(struct grammar_builder *b, struct codepoint_set *r) {
    static const char short_from[] = "\"\\\b\f\n\r\t", short_to[] = "\"\\bfnrt";
    struct codepoint_set unescaped = {0};
    struct exprs l = {0};
    codepoint_set_normalize(r);
    for (int32_t i = 0; i < r->n; i++) {
        for (uint32_t c = r->v[i].lo; c <= MIN(r->v[i].hi, '\\'); c++) {
            char code[8];
            const char *known = c ? strchr(short_from, (int)c) : NULL;
            if (known)
                snprintf(code, sizeof code, "\\%c", short_to[known - short_from]);
            else
                snprintf(code, sizeof code, "\\u%04X", c);
            // U+0000 is left out, because few JSON parsers accept it
            if (known || (c < 0x20 && c > 0))
                exprs_add(&l, expr_puts(b, code));
            else if (c > 0)
                codepoint_set_add(&unescaped, c, c);
        }
        if (r->v[i].hi > '\\') codepoint_set_add(&unescaped, MAX(r->v[i].lo, '\\' + 1), r->v[i].hi);
    }
    codepoint_set_release(r);
    struct expr *unescaped_set = expr_set(b, &unescaped);
    if (unescaped_set->n > 0) exprs_add(&l, unescaped_set);
    return expr_alt(b, &l);
}

static struct expr *set_expr(struct regex_parser *p, struct codepoint_set *r) {
    if (p->json) return expr_json_set(p->b, r);
    return expr_set(p->b, r);
}

static struct expr *parse_alternatives(struct regex_parser *p);

/* Parses a group; the cursor is after '('. */
static struct expr *parse_group(struct regex_parser *p) {
    if (consume(p, "?")) {
        if (next_is(p, "=") || next_is(p, "!") || next_is(p, "<=") || next_is(p, "<!"))
            return syntax_error(p, "look-around is not supported");
        if (consume(p, "<") || consume(p, "P<") || consume(p, "'")) {
            while (p->pos < p->len && !strchr(">'", p->text[p->pos])) p->pos++;
            p->pos += p->pos < p->len;
        } else if (!consume(p, ":")) {
            return syntax_error(p, "flags, comments and special groups are not supported");
        }
    } else if (next_is(p, "*")) {
        return syntax_error(p, "verbs are not supported");
    }
    if (++p->nesting > GRAMMAR_MAX_NESTING) return syntax_error(p, "groups are nested too deeply");
    struct expr *e = parse_alternatives(p);
    p->nesting--;
    if (e && !consume(p, ")")) return syntax_error(p, "a group lacks its ')'");
    return e;
}

/* Parses one atom. NULL without an error in `err`: a class without characters. */
static struct expr *parse_atom(struct regex_parser *p) {
    struct codepoint_set r = {0};
    int32_t c;
    int n;
    switch (p->text[p->pos]) {
    case '(':
        p->pos++;
        return parse_group(p);
    case '[':
        p->pos++;
        if (!parse_class(p, &r)) return codepoint_set_release(&r), NULL;
        return set_expr(p, &r);
    case '\\':
        if (!parse_escape(p, false, &r, &c)) return codepoint_set_release(&r), NULL;
        return set_expr(p, &r);
    case '.':
        p->pos++;
        codepoint_set_add(&r, '\n', '\n');
        codepoint_set_negate(&r);
        return set_expr(p, &r);
    case '^':
    case '$':
        return syntax_error(
            p, "'^' and '$' are supported only where a whole alternative begins and ends");
    case '*':
    case '+':
    case '?':
        return syntax_error(p, "a quantifier follows nothing that it could repeat");
    }
    c = utf8_decode(p->text + p->pos, p->len - p->pos, &n);
    p->pos += (size_t)n;
    codepoint_set_add(&r, (uint32_t)c, (uint32_t)c);
    return set_expr(p, &r);
}

/* Parses "{m}", "{m,}" or "{m,n}". For any other text it returns false and does not move the
 * cursor. */
static bool parse_counts(struct regex_parser *p, int64_t *min, int64_t *max) {
    size_t i = p->pos + 1, begin = i;
    int64_t v[2] = {0, -1};
    int k = 0;
    for (; i < p->len && p->text[i] != '}'; i++) {
        char c = p->text[i];
        if (c == ',' && k == 0 && i > begin) {
            k = 1;
        } else if (c >= '0' && c <= '9') {
            v[k] = MIN(MAX(v[k], 0) * 10 + (c - '0'), INT32_MAX);
        } else {
            return false;
        }
    }
    if (i >= p->len || i == begin) return false;
    *min = v[0];
    *max = k ? v[1] : v[0];
    p->pos = i + 1;
    return true;
}

/* Applies the quantifier that follows, if any. */
static struct expr *parse_quantifier(struct regex_parser *p, struct expr *e) {
    int64_t min = 1, max = 1;
    if (consume(p, "*"))
        min = 0, max = -1;
    else if (consume(p, "+"))
        max = -1;
    else if (consume(p, "?"))
        min = 0;
    else if (!next_is(p, "{") || !parse_counts(p, &min, &max))
        return e; // a brace that begins no counts is a character
    if (consume(p, "+")) return syntax_error(p, "possessive quantifiers are not supported");
    consume(p, "?"); // lazy: the same texts match
    int64_t more;
    if (next_is(p, "*") || next_is(p, "+") || next_is(p, "?") ||
        (next_is(p, "{") && parse_counts(p, &more, &more)))
        return syntax_error(p, "a quantifier follows another one");
    if (max >= 0 && max < min)
        return syntax_error(p, "a repetition's limits are the wrong way round");
    if (MAX(min, max) > GRAMMAR_MAX_REPEAT)
        return syntax_error(p, "a repetition of more than 65536 is not supported");
    struct expr *r = expr_repeat(p->b, e, (int32_t)min, (int32_t)max);
    return r ? r : e;
}

/* If e is NULL without an error (an empty class), returns an empty set, which matches nothing; else
 * e. */
static struct expr *expr_or_empty_set(struct regex_parser *p, struct expr *e) {
    struct codepoint_set none = {0};
    return e || p->err->code < 0 ? e : expr_set(p->b, &none);
}

/* Any text, which may precede and follow a JSON schema's pattern that has no anchors. */
static struct expr *any_text_expr(struct regex_parser *p) {
    struct codepoint_set all = {0};
    codepoint_set_add(&all, 0, 0x10FFFF);
    return expr_repeat(p->b, expr_json_set(p->b, &all), 0, -1);
}

/* Parses one alternative. Anchors are accepted only at the ends of a top-level alternative. */
static struct expr *parse_sequence(struct regex_parser *p) {
    struct exprs l = {0};
    bool outermost = p->nesting == 0, has_end_anchor = false;
    if (!(outermost && consume(p, "^")) && outermost && p->json) exprs_add(&l, any_text_expr(p));
    while (p->pos < p->len && !next_is(p, "|") && !next_is(p, ")")) {
        size_t begin = p->pos;
        if (outermost && consume(p, "$")) {
            has_end_anchor = p->pos == p->len || next_is(p, "|");
            if (has_end_anchor) break;
            p->pos = begin;
        }
        struct expr *e = grammar_builder_is_full(p->b) ? syntax_error(p, "the pattern is too large")
                                                       : expr_or_empty_set(p, parse_atom(p));
        if (e) e = parse_quantifier(p, e);
        if (!e || p->err->code < 0) return free(l.v), NULL;
        exprs_add(&l, e);
    }
    if (outermost && p->json && !has_end_anchor) exprs_add(&l, any_text_expr(p));
    return expr_cat(p->b, &l);
}

static struct expr *parse_alternatives(struct regex_parser *p) {
    struct exprs l = {0};
    do {
        struct expr *e = parse_sequence(p);
        if (!e) return free(l.v), NULL;
        exprs_add(&l, e);
    } while (consume(p, "|"));
    return expr_alt(p->b, &l);
}

struct expr *regex_expr(struct grammar_builder *b, const char *text, size_t len, bool json,
                        struct error *err) {
    // err->code distinguishes an error from an empty class: both are returned as NULL
    struct regex_parser p = {.b = b, .text = text, .len = len, .json = json, .err = err};
    err->code = OK;
    if (grammar_check_text("regular expression", text, len, err) != OK) return NULL;
    struct expr *e = parse_alternatives(&p);
    if (e && p.pos < p.len) return syntax_error(&p, "a ')' closes nothing");
    return e;
}

struct grammar *grammar_new_regex(const char *text, size_t len, struct error *err) {
    struct grammar_builder b = {0};
    char *copy = xmalloc(len + 1); // zero-terminated for messages
    if (len > 0) memcpy(copy, text, len);
    copy[len] = 0;
    struct expr *e = regex_expr(&b, copy, len, false, err);
    struct grammar *g = NULL;
    if (e) {
        int32_t root = grammar_builder_add_rule(&b, "root");
        grammar_builder_define_rule(&b, root, e);
        g = grammar_build(&b, root, GRAMMAR_KIND_REGEX, text, len, err);
    } else {
        grammar_builder_release(&b);
    }
    free(copy);
    return g;
}
