/*
 * regex: regular expressions as expressions over sets of characters.
 *
 * The syntax is the common part of PCRE, Python and ECMAScript. Only the language matters here, so
 * lazy quantifiers and kinds of groups make no difference; constructs that are not regular or
 * depend on the matcher (look-around, back-references, possessive quantifiers, flags) are refused
 * by name. \d, \w and \s are ASCII, '.' is everything but a line feed.
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

static struct expr *refuse(struct regex_parser *p, const char *what) {
    error_set(p->err, ERR_FORMAT, "regular expression, at byte %zu of '%.80s': %s", p->pos, p->text,
              what);
    return NULL;
}

/* True if the rest of the pattern begins with `s`. */
static bool at(const struct regex_parser *p, const char *s) {
    size_t n = strlen(s);
    return p->len - p->pos >= n && memcmp(p->text + p->pos, s, n) == 0;
}

static bool take(struct regex_parser *p, const char *s) {
    bool is = at(p, s);
    if (is) p->pos += strlen(s);
    return is;
}

static int hex_value(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Reads between `least` and `most` hex digits; -1 when there are fewer. */
static int32_t take_hex(struct regex_parser *p, int least, int most) {
    int32_t c = 0, n = 0;
    while (n < most && p->pos < p->len && hex_value(p->text[p->pos]) >= 0) {
        c = c * 16 + hex_value(p->text[p->pos++]);
        n++;
    }
    return n >= least ? c : -1;
}

/* The code point of \x.., \u.... or \x{...}; the cursor is after the letter. */
static int32_t escape_hex(struct regex_parser *p, char letter) {
    bool braced = take(p, "{");
    int digits = letter == 'x' ? 2 : 4;
    int32_t c = braced ? take_hex(p, 1, 6) : take_hex(p, digits, digits);
    if (c >= 0xD800 && c < 0xDC00 && !braced && take(p, "\\u")) { // a pair of surrogates
        int32_t low = take_hex(p, 4, 4);
        c = low >= 0xDC00 && low < 0xE000 ? 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00) : -1;
    }
    if (c < 0 || c > 0x10FFFF || (c >= 0xD800 && c < 0xE000) || (braced && !take(p, "}"))) {
        refuse(p, "this is not a hexadecimal code of a character");
        return -1;
    }
    return c;
}

/* \p{Name}, \pL, \P{...}; the cursor is after the p. */
static bool escape_property(struct regex_parser *p, bool negative, struct codepoint_set *out) {
    const char *name = p->text + p->pos;
    size_t n = p->pos < p->len ? 1 : 0;
    if (take(p, "{")) {
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
        refuse(p, "unknown property; known are L Lu Ll M N Nd P S Z and the scripts Han, Hiragana, "
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

/* \d \w \s and their opposites; false for any other c. */
static bool escape_class(char c, struct codepoint_set *out) {
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

/* An escape for one character; -1 after an error. The cursor is on its letter. */
static int32_t escape_char(struct regex_parser *p, bool in_class) {
    static const char from[] = "tnrfvae0", to[] = "\t\n\r\f\v\a\x1B";
    char c = p->text[p->pos++];
    const char *known = c ? strchr(from, c) : NULL;
    if (c == 'x' || c == 'u') return escape_hex(p, c);
    if (c == '0' && p->pos < p->len && p->text[p->pos] >= '0' && p->text[p->pos] <= '7')
        known = NULL; // octal
    if (known) return to[known - from];
    if (c == 'b' && in_class) return '\b';
    p->pos--;
    if ((c >= '0' && c <= '9') || c == 'k' || c == 'g')
        refuse(p, "back-references are not regular and not supported");
    else if (c == 'b' || c == 'B')
        refuse(p, "word boundaries are not supported");
    else if (strchr("AzZG", c))
        refuse(p, "this anchor is not supported, the pattern matches the whole text anyway");
    else if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (uint8_t)c >= 0x80)
        refuse(p, "unknown escape");
    else
        return (uint8_t)p->text[p->pos++];
    return -1;
}

/* An escape: adds its characters. *single is the character if it is a single one, else -1. */
static bool escape(struct regex_parser *p, bool in_class, struct codepoint_set *out,
                   int32_t *single) {
    *single = -1;
    if (++p->pos >= p->len) return refuse(p, "the pattern ends in a backslash"), false;
    char c = p->text[p->pos];
    if (escape_class(c, out)) return p->pos++, true;
    if (c == 'p' || c == 'P') return p->pos++, escape_property(p, c == 'P', out);
    *single = escape_char(p, in_class);
    if (*single >= 0) codepoint_set_add(out, (uint32_t)*single, (uint32_t)*single);
    return *single >= 0;
}

/* One member of a class; *single as above. */
static bool class_member(struct regex_parser *p, struct codepoint_set *out, int32_t *single) {
    if (at(p, "[:") || at(p, "[.") || at(p, "[="))
        return refuse(p, "POSIX classes are not supported, use \\d \\w \\s or \\p{...}"), false;
    if (p->text[p->pos] == '\\') return escape(p, true, out, single);
    int n;
    *single = utf8_decode(p->text + p->pos, p->len - p->pos, &n);
    codepoint_set_add(out, (uint32_t)*single, (uint32_t)*single);
    p->pos += (size_t)n;
    return true;
}

/* The cursor is after '['. */
static bool class_parse(struct regex_parser *p, struct codepoint_set *out) {
    bool negative = take(p, "^");
    for (bool first = true; first || !at(p, "]"); first = false) {
        int32_t lo, hi;
        if (p->pos >= p->len) return refuse(p, "a class lacks its ']'"), false;
        if (out->n > 1 << 17) return refuse(p, "the class is too large"), false;
        if (!class_member(p, out, &lo)) return false;
        if (!at(p, "-") || p->pos + 1 >= p->len || p->text[p->pos + 1] == ']') continue;
        p->pos++;
        if (!class_member(p, out, &hi)) return false;
        if (lo < 0 || hi < lo) return refuse(p, "a range in a class must go up"), false;
        codepoint_set_add(out, (uint32_t)lo, (uint32_t)hi);
    }
    p->pos++;
    if (negative) codepoint_set_negate(out);
    return true;
}

/* All characters that JSON escapes are at or below the backslash, so only that part is processed
 * character by character. */
struct expr *expr_json_set(struct grammar_builder *b, struct codepoint_set *r) {
    static const char short_from[] = "\"\\\b\f\n\r\t", short_to[] = "\"\\bfnrt";
    struct codepoint_set raw = {0};
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
            if (known || (c < 0x20 && c > 0)) // U+0000 is left out: few readers accept it
                exprs_add(&l, expr_puts(b, code));
            else if (c > 0)
                codepoint_set_add(&raw, c, c);
        }
        if (r->v[i].hi > '\\') codepoint_set_add(&raw, MAX(r->v[i].lo, '\\' + 1), r->v[i].hi);
    }
    codepoint_set_release(r);
    struct expr *set = expr_set(b, &raw);
    if (set->n > 0) exprs_add(&l, set);
    return expr_alt(b, &l);
}

static struct expr *set_make(struct regex_parser *p, struct codepoint_set *r) {
    if (p->json) return expr_json_set(p->b, r);
    return expr_set(p->b, r);
}

static struct expr *alternatives(struct regex_parser *p);

/* The cursor is after '('. */
static struct expr *group(struct regex_parser *p) {
    if (take(p, "?")) {
        if (at(p, "=") || at(p, "!") || at(p, "<=") || at(p, "<!"))
            return refuse(p, "look-around is not supported");
        if (take(p, "<") || take(p, "P<") || take(p, "'")) {
            while (p->pos < p->len && !strchr(">'", p->text[p->pos])) p->pos++;
            p->pos += p->pos < p->len;
        } else if (!take(p, ":")) {
            return refuse(p, "flags, comments and special groups are not supported");
        }
    } else if (at(p, "*")) {
        return refuse(p, "verbs are not supported");
    }
    if (++p->nesting > GRAMMAR_MAX_NESTING) return refuse(p, "groups are nested too deeply");
    struct expr *e = alternatives(p);
    p->nesting--;
    if (e && !take(p, ")")) return refuse(p, "a group lacks its ')'");
    return e;
}

/* NULL without an error: a class that has no characters. */
static struct expr *atom(struct regex_parser *p) {
    struct codepoint_set r = {0};
    int32_t c;
    int n;
    switch (p->text[p->pos]) {
    case '(':
        p->pos++;
        return group(p);
    case '[':
        p->pos++;
        if (!class_parse(p, &r)) return codepoint_set_release(&r), NULL;
        return set_make(p, &r);
    case '\\':
        if (!escape(p, false, &r, &c)) return codepoint_set_release(&r), NULL;
        return set_make(p, &r);
    case '.':
        p->pos++;
        codepoint_set_add(&r, '\n', '\n');
        codepoint_set_negate(&r);
        return set_make(p, &r);
    case '^':
    case '$':
        return refuse(p,
                      "'^' and '$' are supported only where a whole alternative begins and ends");
    case '*':
    case '+':
    case '?':
        return refuse(p, "a quantifier follows nothing that it could repeat");
    }
    c = utf8_decode(p->text + p->pos, p->len - p->pos, &n);
    p->pos += (size_t)n;
    codepoint_set_add(&r, (uint32_t)c, (uint32_t)c);
    return set_make(p, &r);
}

/* "{m}", "{m,}" or "{m,n}": the counts; false with the cursor unmoved for any other text. */
static bool counts(struct regex_parser *p, int64_t *min, int64_t *max) {
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
static struct expr *quantified(struct regex_parser *p, struct expr *e) {
    int64_t min = 1, max = 1;
    if (take(p, "*"))
        min = 0, max = -1;
    else if (take(p, "+"))
        max = -1;
    else if (take(p, "?"))
        min = 0;
    else if (!at(p, "{") || !counts(p, &min, &max))
        return e; // a brace without counts is a character
    if (take(p, "+")) return refuse(p, "possessive quantifiers are not supported");
    take(p, "?"); // lazy: the same texts match
    int64_t more;
    if (at(p, "*") || at(p, "+") || at(p, "?") || (at(p, "{") && counts(p, &more, &more)))
        return refuse(p, "a quantifier follows another one");
    if (max >= 0 && max < min) return refuse(p, "a repetition's limits are the wrong way round");
    if (MAX(min, max) > GRAMMAR_MAX_REPEAT)
        return refuse(p, "a repetition of more than 65536 is not supported");
    struct expr *r = expr_repeat(p->b, e, (int32_t)min, (int32_t)max);
    return r ? r : e;
}

/* An empty class matches nothing; as an expression it must not be NULL. */
static struct expr *or_nothing(struct regex_parser *p, struct expr *e) {
    struct codepoint_set none = {0};
    return e || p->err->code < 0 ? e : expr_set(p->b, &none);
}

/* The arbitrary text before and after a JSON schema's pattern without anchors. */
static struct expr *anything(struct regex_parser *p) {
    struct codepoint_set all = {0};
    codepoint_set_add(&all, 0, 0x10FFFF);
    return expr_repeat(p->b, expr_json_set(p->b, &all), 0, -1);
}

/* An alternative. Anchors are accepted only where they are redundant: at the ends of an outermost
 * one. */
static struct expr *sequence(struct regex_parser *p) {
    struct exprs l = {0};
    bool outer = p->nesting == 0, ended = false;
    if (!(outer && take(p, "^")) && outer && p->json) exprs_add(&l, anything(p));
    while (p->pos < p->len && !at(p, "|") && !at(p, ")")) {
        size_t begin = p->pos;
        if (outer && take(p, "$")) {
            ended = p->pos == p->len || at(p, "|");
            if (ended) break;
            p->pos = begin;
        }
        struct expr *e = grammar_builder_is_full(p->b) ? refuse(p, "the pattern is too large")
                                                       : or_nothing(p, atom(p));
        if (e) e = quantified(p, e);
        if (!e || p->err->code < 0) return free(l.v), NULL;
        exprs_add(&l, e);
    }
    if (outer && p->json && !ended) exprs_add(&l, anything(p));
    return expr_cat(p->b, &l);
}

static struct expr *alternatives(struct regex_parser *p) {
    struct exprs l = {0};
    do {
        struct expr *e = sequence(p);
        if (!e) return free(l.v), NULL;
        exprs_add(&l, e);
    } while (take(p, "|"));
    return expr_alt(p->b, &l);
}

struct expr *regex_expr(struct grammar_builder *b, const char *text, size_t len, bool json,
                        struct error *err) {
    // err->code distinguishes an error from an empty class; both are passed up as NULL
    struct regex_parser p = {.b = b, .text = text, .len = len, .json = json, .err = err};
    err->code = OK;
    if (grammar_check_text("regular expression", text, len, err) != OK) return NULL;
    struct expr *e = alternatives(&p);
    if (e && p.pos < p.len) return refuse(&p, "a ')' closes nothing");
    return e;
}

struct grammar *grammar_new_regex(const char *text, size_t len, struct error *err) {
    struct grammar_builder b = {0};
    char *copy = xmalloc(len + 1); // with the zero byte that messages need
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
