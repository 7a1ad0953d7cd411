/*
 * gbnf: a parser of grammars in llama.cpp's notation (GBNF).
 *
 *     root   ::= answer | list       # a comment
 *     list   ::= "- " item ("\n- " item){1,4}
 *     item   ::= [a-zA-Z0-9 ぁ-ん]+
 *
 * A rule ends at the end of the line, except inside parentheses and next to a '|'. Sets and escapes
 * are code points. Tokens (<...>) are an error, because grammars in Shoal describe text. A rule
 * that is defined twice is an error too.
 */
#include "grammar/internal.h"

#include <stdlib.h>
#include <string.h>

struct gbnf_parser {
    struct grammar_builder *b;
    const char *text;
    size_t len, pos;
    int nesting;
    struct error *err;
};

static struct expr *syntax_error(const struct gbnf_parser *p, const char *what) {
    int line = 1;
    for (size_t i = 0; i < p->pos && i < p->len; i++) line += p->text[i] == '\n';
    size_t n = 0;
    while (n < 24 && p->pos + n < p->len && p->text[p->pos + n] != '\n') n++;
    error_set(p->err, ERR_FORMAT, "grammar, line %d, at '%.*s': %s", line, (int)n, p->text + p->pos,
              what);
    return NULL;
}

static char peek(const struct gbnf_parser *p) {
    return p->pos < p->len ? p->text[p->pos] : 0;
}

/* Skips spaces, tabs and comments; with `lines` also line breaks. */
static void skip_space(struct gbnf_parser *p, bool lines) {
    while (p->pos < p->len) {
        char c = p->text[p->pos];
        if (c == '#')
            while (p->pos < p->len && !strchr("\r\n", p->text[p->pos])) p->pos++;
        else if (c == ' ' || c == '\t' || (lines && (c == '\n' || c == '\r')))
            p->pos++;
        else
            break;
    }
}

static bool is_name_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_';
}

/* Parses a rule's name and returns the rule, which is created if it is new; -1 after an error. */
static int32_t parse_rule_name(struct gbnf_parser *p) {
    size_t n = 0;
    while (p->pos + n < p->len && is_name_char(p->text[p->pos + n])) n++;
    if (n == 0) return syntax_error(p, "a rule's name was expected"), -1;
    char *name = xmalloc(n + 1);
    memcpy(name, p->text + p->pos, n);
    name[n] = 0;
    int32_t rule = grammar_builder_find_rule(p->b, name);
    if (rule < 0 && p->b->n_rules < GRAMMAR_MAX_NAMES) rule = grammar_builder_add_rule(p->b, name);
    free(name);
    if (rule < 0) return syntax_error(p, "there are too many rules"), -1;
    p->pos += n;
    return rule;
}

static int32_t parse_hex(struct gbnf_parser *p, int digits) {
    int32_t c = 0;
    for (int i = 0; i < digits; i++) {
        char d = peek(p);
        int v = d >= '0' && d <= '9'                     ? d - '0'
                : (d | 0x20) >= 'a' && (d | 0x20) <= 'f' ? (d | 0x20) - 'a' + 10
                                                         : -1;
        if (v < 0 || c > 0x10FFFF) return syntax_error(p, "this is not a hexadecimal code"), -1;
        c = c * 16 + v;
        p->pos++;
    }
    if (c > 0x10FFFF || (c >= 0xD800 && c < 0xE000))
        return syntax_error(p, "this is not the code of a character"), -1;
    return c;
}

/* Parses a character or an escape in a literal or a set; -1 after an error. */
static int32_t parse_char(struct gbnf_parser *p) {
    static const char from[] = "tnr\"[]\\", to[] = "\t\n\r\"[]\\";
    int n;
    if (peek(p) != '\\') {
        int32_t c = utf8_decode(p->text + p->pos, p->len - p->pos, &n);
        if (c < 0) return syntax_error(p, "the text ends inside quotes or brackets"), -1;
        p->pos += (size_t)n;
        return c;
    }
    p->pos++;
    char c = peek(p);
    const char *known = c ? strchr(from, c) : NULL;
    if (known) return p->pos++, to[known - from];
    int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits == 0) return syntax_error(p, "unknown escape"), -1;
    p->pos++;
    return parse_hex(p, digits);
}

/* Parses a literal; the cursor is after the opening quote. */
static struct expr *parse_literal(struct gbnf_parser *p) {
    struct exprs l = {0};
    while (peek(p) != '"') {
        struct codepoint_set r = {0};
        int32_t c = parse_char(p);
        if (c < 0) return free(l.v), NULL;
        codepoint_set_add(&r, (uint32_t)c, (uint32_t)c);
        exprs_add(&l, expr_set(p->b, &r));
    }
    p->pos++;
    return expr_cat(p->b, &l);
}

/* Parses a set; the cursor is after '['. */
static struct expr *parse_set(struct gbnf_parser *p) {
    struct codepoint_set r = {0};
    bool negative = peek(p) == '^';
    p->pos += negative;
    while (peek(p) != ']') {
        int32_t lo = parse_char(p), hi = lo;
        if (lo >= 0 && peek(p) == '-' && p->pos + 1 < p->len && p->text[p->pos + 1] != ']') {
            p->pos++;
            hi = parse_char(p);
            if (hi >= 0 && hi < lo) hi = (syntax_error(p, "a range must go up"), -1);
        }
        if (lo < 0 || hi < 0) return codepoint_set_release(&r), NULL;
        codepoint_set_add(&r, (uint32_t)lo, (uint32_t)hi);
    }
    p->pos++;
    if (negative) codepoint_set_negate(&r);
    return expr_set(p->b, &r);
}

static struct expr *parse_alternatives(struct gbnf_parser *p);

static struct expr *parse_group(struct gbnf_parser *p) {
    if (++p->nesting > GRAMMAR_MAX_NESTING) return syntax_error(p, "groups are nested too deeply");
    struct expr *e = parse_alternatives(p);
    p->nesting--;
    if (!e) return NULL;
    if (peek(p) != ')') return syntax_error(p, "a group lacks its ')'");
    p->pos++;
    return e;
}

/* Parses a rule's name, a literal, a set, a group or '.', without its repetitions. */
static struct expr *parse_symbol(struct gbnf_parser *p) {
    struct codepoint_set all = {0};
    char c = peek(p);
    if (is_name_char(c)) {
        int32_t rule = parse_rule_name(p);
        return rule < 0 ? NULL : expr_rule(p->b, rule);
    }
    if (c == '<' || c == '!')
        return syntax_error(p, "tokens are not supported in grammars, only text");
    if (c == 0 || !strchr("\"[(.", c))
        return syntax_error(p, "a rule, a literal, a set or a group was expected");
    p->pos++;
    if (c == '"') return parse_literal(p);
    if (c == '[') return parse_set(p);
    if (c == '(') return parse_group(p);
    codepoint_set_add(&all, 0, 0x10FFFF);
    return expr_set(p->b, &all);
}

static bool parse_count(struct gbnf_parser *p, int64_t *out) {
    size_t begin = p->pos;
    *out = 0;
    for (char c; (c = peek(p)) >= '0' && c <= '9'; p->pos++)
        *out = MIN(*out * 10 + (c - '0'), INT32_MAX);
    skip_space(p, p->nesting > 0);
    return p->pos > begin;
}

/* Parses the counts of "{m}", "{m,}" or "{m,n}"; the cursor is after '{'. *max is -1 for "{m,}". */
static bool parse_counts(struct gbnf_parser *p, int64_t *min, int64_t *max) {
    skip_space(p, p->nesting > 0);
    if (!parse_count(p, min))
        return syntax_error(p, "a number was expected in a repetition"), false;
    *max = *min;
    if (peek(p) == ',') {
        p->pos++;
        skip_space(p, p->nesting > 0);
        if (peek(p) < '0' || peek(p) > '9')
            *max = -1;
        else
            parse_count(p, max);
    }
    if (peek(p) != '}') return syntax_error(p, "a repetition lacks its '}'"), false;
    p->pos++;
    if (*max >= 0 && *max < *min)
        return syntax_error(p, "a repetition's limits are the wrong way round"), false;
    if (MAX(*min, *max) > GRAMMAR_MAX_REPEAT)
        return syntax_error(p, "a repetition of more than 65536 is not supported"), false;
    return true;
}

/* Applies all repetitions that follow; several, as in a**, are allowed. */
static struct expr *parse_repetitions(struct gbnf_parser *p, struct expr *e) {
    char c;
    for (int n = 0; e && (c = peek(p)) != 0 && strchr("*+?{", c); n++) {
        int64_t min = c == '+', max = c == '?' ? 1 : -1;
        if (n == GRAMMAR_MAX_NESTING) return syntax_error(p, "there are too many repetitions");
        p->pos++;
        if (c == '{' && !parse_counts(p, &min, &max)) return NULL;
        e = expr_repeat(p->b, e, (int32_t)min, (int32_t)max);
        skip_space(p, p->nesting > 0);
    }
    return e;
}

static bool at_sequence_end(const struct gbnf_parser *p) {
    char c = peek(p);
    return p->pos >= p->len || c == '|' || c == ')' || c == '\n' || c == '\r';
}

static struct expr *parse_sequence(struct gbnf_parser *p) {
    struct exprs l = {0};
    for (skip_space(p, p->nesting > 0); !at_sequence_end(p); skip_space(p, p->nesting > 0)) {
        struct expr *e = parse_symbol(p);
        skip_space(p, p->nesting > 0);
        if (e) e = parse_repetitions(p, e);
        if (e && grammar_builder_is_full(p->b)) e = syntax_error(p, "the grammar is too large");
        if (!e) return free(l.v), NULL;
        exprs_add(&l, e);
    }
    return expr_cat(p->b, &l);
}

/* Outside of parentheses, a line break ends the rule unless a '|' is before or after it. */
static struct expr *parse_alternatives(struct gbnf_parser *p) {
    struct exprs l = {0};
    for (;;) {
        struct expr *e = parse_sequence(p);
        if (!e) return free(l.v), NULL;
        exprs_add(&l, e);
        size_t before_space = p->pos;
        skip_space(p, true);
        if (peek(p) != '|') {
            if (p->nesting == 0) p->pos = before_space;
            return expr_alt(p->b, &l);
        }
        p->pos++;
        skip_space(p, true);
    }
}

static bool parse_rule(struct gbnf_parser *p) {
    int32_t rule = parse_rule_name(p);
    if (rule < 0) return false;
    if (p->b->rules[rule].defined) return syntax_error(p, "this rule is defined twice"), false;
    skip_space(p, false);
    if (p->len - p->pos < 3 || memcmp(p->text + p->pos, "::=", 3) != 0)
        return syntax_error(p, "'::=' was expected"), false;
    p->pos += 3;
    skip_space(p, true);
    struct expr *e = parse_alternatives(p);
    if (!e) return false;
    grammar_builder_define_rule(p->b, rule, e);
    if (p->pos < p->len && !strchr("\r\n", p->text[p->pos]))
        return syntax_error(p, "the end of the line was expected"), false;
    skip_space(p, true);
    return true;
}

/* Checks that all rules are defined; returns the rule `root`, or an error. */
static int32_t rules_check(const struct gbnf_parser *p) {
    for (int32_t i = 0; i < p->b->n_rules; i++)
        if (!p->b->rules[i].defined)
            return error_set(p->err, ERR_FORMAT, "grammar: rule '%.100s' is used but not defined",
                             p->b->rules[i].name);
    int32_t root = grammar_builder_find_rule(p->b, "root");
    if (root < 0) return error_set(p->err, ERR_FORMAT, "grammar: it has no rule 'root'");
    return root;
}

struct grammar *grammar_new_gbnf(const char *text, size_t len, struct error *err) {
    struct grammar_builder b = {0};
    struct gbnf_parser p = {.b = &b, .text = text, .len = len, .err = err};
    bool good = grammar_check_text("grammar", text, len, err) == OK;
    if (good) skip_space(&p, true);
    while (good && p.pos < len) good = parse_rule(&p);
    int32_t root = good ? rules_check(&p) : -1;
    if (root >= 0) return grammar_build(&b, root, GRAMMAR_KIND_GBNF, text, len, err);
    grammar_builder_release(&b);
    return NULL;
}
