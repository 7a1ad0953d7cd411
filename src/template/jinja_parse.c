/*
 * jinja_parse: template text → tokens → tree, after Jinja2's own lexer and parser.
 *
 * White space: `trim_blocks` removes the newline after a block or a comment, `lstrip_blocks` the
 * blanks before a tag that is first in its line. '-' removes all white space on its side of a tag,
 * '+' keeps it. One newline at the end of the template is removed. jinja_parse_strict removes white
 * space only for '-'. Nothing is evaluated here. A
 * filter or test that Jinja does not have is an error here; a filter of Jinja that is not supported
 * is an error when it is used.
 *
 * Invariant: tokens end with T_END, and the parser never moves past it.
 */
#include "template/internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistr.h>

enum token_kind {
    T_TEXT,
    T_PRINT,
    T_PRINT_END,
    T_BLOCK,
    T_BLOCK_END,
    T_NAME,
    T_VALUE,
    T_OP,
    T_END
};
struct jinja_token {
    enum token_kind kind;
    int line, op;
    struct str name; /* text of T_NAME and T_TEXT */
    struct value value;
};

struct jinja_parser {
    struct jinja_ctx *w;
    const char *p;
    size_t n, pos; /* bytes of p; the lexer's position */
    int line;
    struct jinja_token *tokens;
    size_t n_tokens, cap;
    size_t next_token;
    bool strict;
    int loops;          /* number of enclosing for-loops within the macro */
    struct node *macro; /* the enclosing macro, or NULL */
};

/* lexer */

static void token_add(struct jinja_parser *p, struct jinja_token t) {
    t.line = p->line;
    p->tokens = jinja_grow(p->w, p->tokens, p->n_tokens, &p->cap, sizeof t);
    p->tokens[p->n_tokens++] = t;
}

static void lex_advance(struct jinja_parser *p, size_t to) {
    for (; p->pos < to; p->pos++) p->line += p->p[p->pos] == '\n';
    p->w->line = p->line;
}

static bool matches_at(const struct jinja_parser *p, size_t pos, const char *s) {
    size_t n = strlen(s);
    return p->n - pos >= n && memcmp(p->p + pos, s, n) == 0;
}

static size_t skip_space(const struct jinja_parser *p, size_t pos) {
    int len;
    while (pos < p->n && char_is_space(char_at(p->p + pos, &len))) pos += (size_t)len;
    return pos;
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool is_word_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || is_digit(c);
}

/* The digits of a number and the underscores between them; only the digits are kept. */
static size_t lex_digits(const struct jinja_parser *p, size_t pos, char *out, size_t *n) {
    while (pos < p->n && (is_digit(p->p[pos]) ||
                          (p->p[pos] == '_' && *n && pos + 1 < p->n && is_digit(p->p[pos + 1])))) {
        if (*n >= 60) jinja_fail(p->w, "a number is too long");
        if (p->p[pos] != '_') out[(*n)++] = p->p[pos];
        pos++;
    }
    return pos;
}

static void lex_number(struct jinja_parser *p) {
    char text[64];
    size_t n = 0, pos = lex_digits(p, p->pos, text, &n);
    bool after_dot = p->pos > 0 && p->p[p->pos - 1] == '.', real = false;
    if (!after_dot && pos + 1 < p->n && p->p[pos] == '.' && is_digit(p->p[pos + 1])) {
        text[n++] = '.';
        pos = lex_digits(p, pos + 1, text, &n);
        real = true;
    }
    size_t e = pos + 1;
    if (e < p->n && (p->p[e] == '+' || p->p[e] == '-')) e++;
    if (!after_dot && e < p->n && (p->p[pos] == 'e' || p->p[pos] == 'E') && is_digit(p->p[e])) {
        text[n++] = 'e';
        if (p->p[e - 1] == '-') text[n++] = '-';
        pos = lex_digits(p, e, text, &n);
        real = true;
    }
    text[n] = 0;
    if (!real && text[0] == '0' && strspn(text, "0") != n)
        jinja_fail(p->w, "the number '%s' begins with 0", text);
    if (pos < p->n && is_word_char(p->p[pos]))
        jinja_fail(p->w, "a number like '%s%c' is not supported", text, p->p[pos]);
    if (!real && n > 18) jinja_fail(p->w, "the integer '%s' is too large", text);
    token_add(p,
              (struct jinja_token){.kind = T_VALUE,
                                   .value = real ? FLOAT(strtod(text, NULL)) : INT(atoll(text))});
    lex_advance(p, pos);
}

static void text_add_char(struct jinja_parser *p, struct text *t, uint32_t c) {
    char b[4];
    int n = 0;
    if (c > 0x10FFFF || (c >= 0xD800 && c < 0xE000))
        jinja_fail(p->w, "\\u%04x is no character", (unsigned)c);
    if (c < 0x80) {
        b[n++] = (char)c;
    } else if (c < 0x800) {
        b[n++] = (char)(0xC0 | c >> 6);
        b[n++] = (char)(0x80 | (c & 63));
    } else if (c < 0x10000) {
        b[n++] = (char)(0xE0 | c >> 12);
        b[n++] = (char)(0x80 | (c >> 6 & 63));
        b[n++] = (char)(0x80 | (c & 63));
    } else {
        b[n++] = (char)(0xF0 | c >> 18);
        b[n++] = (char)(0x80 | (c >> 12 & 63));
        b[n++] = (char)(0x80 | (c >> 6 & 63));
        b[n++] = (char)(0x80 | (c & 63));
    }
    text_add(p->w, t, (struct str){b, (size_t)n, NULL});
}

/* Adds the character whose code is at `pos`: `count` digits of base 16, or at most `count` digits
 * of base 8. Returns the position after the code. */
static size_t lex_code_escape(struct jinja_parser *p, struct text *t, size_t pos, int count,
                              int base) {
    char digits[9] = {0};
    int n = 0;
    for (; n < count && pos + (size_t)n < p->n; n++) {
        char c = p->p[pos + (size_t)n];
        bool ok = base == 8 ? c >= '0' && c <= '7' : strchr("0123456789abcdefABCDEF", c) && c;
        if (!ok) break;
        digits[n] = c;
    }
    if (base == 16 && n < count) jinja_fail(p->w, "an escape in a string is cut short");
    text_add_char(p, t, (uint32_t)strtoul(digits, NULL, base));
    return pos + (size_t)n;
}

/* Adds the text of one of Python's escapes; an unknown escape stays unchanged. `pos` is after the
 * backslash. Returns the position after the escape. */
static size_t lex_escape(struct jinja_parser *p, struct text *t, size_t pos) {
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = p->p[pos];
    const char *simple = c ? strchr(from, c) : NULL;
    if (simple) {
        text_add(p->w, t, (struct str){to + (simple - from), 1, NULL});
        return pos + 1;
    }
    if (c == '\n') return pos + 1;
    if (c == 'x') return lex_code_escape(p, t, pos + 1, 2, 16);
    if (c == 'u') return lex_code_escape(p, t, pos + 1, 4, 16);
    if (c == 'U') return lex_code_escape(p, t, pos + 1, 8, 16);
    if (c >= '0' && c <= '7') return lex_code_escape(p, t, pos, 3, 8);
    if (c == 'N') jinja_fail(p->w, "\\N in a string is not supported");
    text_puts(p->w, t, "\\");
    return pos;
}

static void lex_string(struct jinja_parser *p) {
    char quote = p->p[p->pos];
    struct text t = {0};
    size_t pos = p->pos + 1;
    while (pos < p->n && p->p[pos] != quote) {
        if (p->p[pos] == '\\' && pos + 1 < p->n) {
            pos = lex_escape(p, &t, pos + 1);
        } else {
            text_add(p->w, &t, (struct str){p->p + pos++, 1, NULL});
        }
    }
    if (pos >= p->n) jinja_fail(p->w, "a string is not closed");
    token_add(p, (struct jinja_token){.kind = T_VALUE, .value = STRING(text_str(&t))});
    lex_advance(p, pos + 1);
}

static void lex_operator(struct jinja_parser *p, char *stack, int *depth) {
    static const char *const two[] = {"//", "**", "==", "!=", ">=", "<="};
    char c = p->p[p->pos];
    int op = c;
    for (size_t i = 0; i < ARRAY_LEN(two); i++)
        if (matches_at(p, p->pos, two[i])) op = OP(two[i][0], two[i][1]);
    if (op == c && (!c || !strchr("+-/*%~[](){}><=.:|,;", c))) {
        int len;
        uint32_t u = char_at(p->p + p->pos, &len);
        jinja_fail(p->w,
                   u < 0x80 ? "unexpected character '%.*s'"
                            : "the character '%.*s' outside of strings is not supported",
                   len, p->p + p->pos);
    }
    if (c == '(' || c == '[' || c == '{') {
        if (*depth == JINJA_MAX_DEPTH) jinja_fail(p->w, "nested too deeply");
        stack[(*depth)++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
        if (*depth == 0) jinja_fail(p->w, "unexpected '%c'", c);
        if (stack[--*depth] != c)
            jinja_fail(p->w, "unexpected '%c', expected '%c'", c, stack[*depth]);
    }
    token_add(p, (struct jinja_token){.kind = T_OP, .op = op});
    lex_advance(p, p->pos + (op == c ? 1 : 2));
}

/* The length of a tag's end at the current position, including the white space that this end
 * removes; 0: no end is here. */
static size_t tag_end(const struct jinja_parser *p, const char *end, bool block) {
    size_t pos = p->pos;
    char sign = p->p[pos];
    if (sign == '-' || (sign == '+' && block)) pos++;
    if (!matches_at(p, pos, end)) return 0;
    pos += 2;
    if (sign == '-') return skip_space(p, pos) - p->pos;
    if (block && !p->strict && sign != '+' && pos < p->n && p->p[pos] == '\n') pos++;
    return pos - p->pos;
}

/* Reads tokens from after the opening of a block or a print through its end. */
static void lex_tag(struct jinja_parser *p, bool block) {
    const char *end = block ? "%}" : "}}";
    char stack[JINJA_MAX_DEPTH];
    int depth = 0;
    while (p->pos < p->n) {
        char c = p->p[p->pos];
        size_t n = depth == 0 ? tag_end(p, end, block) : 0, space = skip_space(p, p->pos);
        if (n) {
            token_add(p, (struct jinja_token){.kind = block ? T_BLOCK_END : T_PRINT_END});
            lex_advance(p, p->pos + n);
            return;
        }
        if (space > p->pos) {
            lex_advance(p, space);
        } else if (is_digit(c)) {
            lex_number(p);
        } else if (is_word_char(c)) {
            size_t to = p->pos;
            while (to < p->n && is_word_char(p->p[to])) to++;
            token_add(p, (struct jinja_token){.kind = T_NAME,
                                              .name = {p->p + p->pos, to - p->pos, NULL}});
            lex_advance(p, to);
        } else if (c == '\'' || c == '"') {
            lex_string(p);
        } else {
            lex_operator(p, stack, &depth);
        }
    }
    jinja_fail(p->w, "'%s' is missing before the template's end", end);
}

/* Adds the text before a tag, without the white space that the tag removes. */
static void lex_text(struct jinja_parser *p, size_t end, char sign, bool lstrip) {
    struct str s = {p->p + p->pos, end - p->pos, NULL};
    bool line_starts = p->pos == 0 || p->p[p->pos - 1] == '\n';
    if (sign == '-') {
        s = str_strip(p->w, s, NULL, STRIP_RIGHT);
    } else if (sign != '+' && lstrip && !p->strict) {
        size_t from = s.n;
        while (from > 0 && s.p[from - 1] != '\n') from--;
        bool blank = skip_space(p, p->pos + from) >= end;
        if (blank && from < s.n && (from > 0 || line_starts)) s.n = from;
    }
    if (s.n) token_add(p, (struct jinja_token){.kind = T_TEXT, .name = s});
    lex_advance(p, end);
}

static void lex_comment(struct jinja_parser *p) {
    size_t sign = p->pos + 2 < p->n && (p->p[p->pos + 2] == '-' || p->p[p->pos + 2] == '+');
    for (lex_advance(p, p->pos + 2 + sign); p->pos < p->n; lex_advance(p, p->pos + 1)) {
        size_t n = tag_end(p, "#}", true);
        if (!n) continue;
        lex_advance(p, p->pos + n);
        return;
    }
    jinja_fail(p->w, "a comment is not closed");
}

/* The length of a {% raw %} or {% endraw %} tag at `pos`, or 0. */
static size_t raw_tag(const struct jinja_parser *p, size_t pos, const char *word, bool closing) {
    size_t from = pos;
    if (!matches_at(p, pos, "{%")) return 0;
    pos += 2;
    if (pos < p->n && (p->p[pos] == '-' || p->p[pos] == '+')) pos++;
    pos = skip_space(p, pos);
    if (!matches_at(p, pos, word)) return 0;
    pos = skip_space(p, pos + strlen(word));
    struct jinja_parser end = *p;
    end.pos = pos;
    size_t n = pos < p->n ? tag_end(&end, "%}", true) : 0;
    if (n && !closing && p->p[pos] == '+') return 0;
    /* The newline after the opening tag is not removed. */
    if (n && !closing && p->p[pos] != '-') n = 2;
    return n ? pos + n - from : 0;
}

static void lex_raw(struct jinja_parser *p, size_t n) {
    lex_advance(p, p->pos + n);
    for (size_t end = p->pos; end < p->n; end++) {
        size_t m = p->p[end] == '{' ? raw_tag(p, end, "endraw", true) : 0;
        if (!m) continue;
        lex_text(p, end, p->p[end + 2], true);
        lex_advance(p, end + m);
        return;
    }
    jinja_fail(p->w, "'{%% endraw %%}' is missing");
}

static void lex(struct jinja_parser *p) {
    while (p->pos < p->n) {
        size_t end = p->pos;
        while (end < p->n && !(p->p[end] == '{' && end + 1 < p->n && strchr("%{#", p->p[end + 1]) &&
                               p->p[end + 1]))
            end++;
        if (end == p->n) {
            lex_text(p, end, '+', false);
            break;
        }
        char what = p->p[end + 1], sign = end + 2 < p->n ? p->p[end + 2] : 0;
        lex_text(p, end, sign, what != '{');
        size_t raw = what == '%' ? raw_tag(p, end, "raw", false) : 0;
        if (raw) {
            lex_raw(p, raw);
        } else if (what == '#') {
            lex_comment(p);
        } else {
            token_add(p, (struct jinja_token){.kind = what == '%' ? T_BLOCK : T_PRINT});
            lex_advance(p, end + 2 + (sign == '-' || sign == '+'));
            lex_tag(p, what == '%');
        }
    }
    token_add(p, (struct jinja_token){.kind = T_END});
}

/* tokens */

static const struct jinja_token *peek(const struct jinja_parser *p) {
    return &p->tokens[p->next_token];
}

static const struct jinja_token *peek_second(const struct jinja_parser *p) {
    return &p->tokens[MIN(p->next_token + 1, p->n_tokens - 1)];
}

static const struct jinja_token *take(struct jinja_parser *p) {
    const struct jinja_token *t = peek(p);
    if (t->kind != T_END) p->next_token++;
    p->w->line = peek(p)->line;
    return t;
}

_Noreturn static void unexpected(struct jinja_parser *p, const char *wanted) {
    static const char *const names[] = {
        "text",    "'{{'",        "the end of '{{'",   "'{%'", "the end of '{%'", "a name",
        "a value", "an operator", "the template's end"};
    const struct jinja_token *t = peek(p);
    p->w->line = t->line;
    char op[] = {'\'', (char)t->op, (char)(t->op >> 8), 0};
    if (t->kind == T_NAME)
        jinja_fail(p->w, "unexpected '%.*s', expected %s", (int)MIN(t->name.n, 40u), t->name.p,
                   wanted);
    if (t->kind == T_OP) jinja_fail(p->w, "unexpected %s', expected %s", op, wanted);
    jinja_fail(p->w, "unexpected %s, expected %s", names[t->kind], wanted);
}

static bool next_is_op(const struct jinja_parser *p, int op) {
    return peek(p)->kind == T_OP && peek(p)->op == op;
}

static bool token_is(const struct jinja_token *t, const char *name) {
    return t->kind == T_NAME && str_is(t->name, name);
}

static bool next_is_name(const struct jinja_parser *p, const char *name) {
    return token_is(peek(p), name);
}

static bool skip_op(struct jinja_parser *p, int op) {
    bool found = next_is_op(p, op);
    if (found) take(p);
    return found;
}

static bool skip_name(struct jinja_parser *p, const char *name) {
    bool found = next_is_name(p, name);
    if (found) take(p);
    return found;
}

static void expect_op(struct jinja_parser *p, int op) {
    char wanted[] = {'\'', (char)op, '\'', 0};
    if (!skip_op(p, op)) unexpected(p, wanted);
}

static struct str expect_name(struct jinja_parser *p) {
    if (peek(p)->kind != T_NAME) unexpected(p, "a name");
    return take(p)->name;
}

static void expect_keyword(struct jinja_parser *p, const char *name) {
    if (!skip_name(p, name)) unexpected(p, name);
}

static struct node *node_new(struct jinja_parser *p, enum node_kind kind) {
    struct node *n = jinja_alloc(p->w, sizeof *n);
    n->kind = kind;
    n->line = peek(p)->line;
    return n;
}

static struct node *node_of(struct jinja_parser *p, enum node_kind kind, struct node *a,
                            struct node *b) {
    struct node *n = node_new(p, kind);
    n->a = a;
    n->b = b;
    return n;
}

static void nodes_add(struct jinja_parser *p, struct nodes *list, struct node *n) {
    list->v = jinja_grow(p->w, list->v, list->n, &list->cap, sizeof *list->v);
    list->v[list->n++] = n;
}

/* expressions */

static struct node *parse_expression(struct jinja_parser *p);
static struct node *parse_or(struct jinja_parser *p);
static struct node *parse_unary(struct jinja_parser *p, bool filters);

enum tuple_form { TUPLE_FULL, TUPLE_NO_COND, TUPLE_PARENTHESES, TUPLE_TARGET, TUPLE_TARGET_SET };
static struct node *parse_primary(struct jinja_parser *p, bool namespaces);

static bool tuple_ends(const struct jinja_parser *p, enum tuple_form form) {
    const struct jinja_token *t = peek(p);
    return t->kind == T_PRINT_END || t->kind == T_BLOCK_END || next_is_op(p, ')') ||
           (form == TUPLE_TARGET && next_is_name(p, "in")) ||
           (form == TUPLE_NO_COND && next_is_name(p, "recursive"));
}

static struct node *parse_tuple(struct jinja_parser *p, enum tuple_form form) {
    struct node *t = node_new(p, NODE_TUPLE);
    bool comma = false;
    while (!tuple_ends(p, form)) {
        bool target = form == TUPLE_TARGET || form == TUPLE_TARGET_SET;
        nodes_add(p, &t->list,
                  target                  ? parse_primary(p, form == TUPLE_TARGET_SET)
                  : form == TUPLE_NO_COND ? parse_or(p)
                                          : parse_expression(p));
        if (!skip_op(p, ',')) break;
        comma = true;
    }
    if (!comma && t->list.n) return t->list.v[0];
    if (!comma && form != TUPLE_PARENTHESES) unexpected(p, "an expression");
    return t;
}

static struct node *parse_name(struct jinja_parser *p, bool namespaces) {
    struct node *n = node_new(p, NODE_NAME);
    n->name = take(p)->name;
    bool yes = str_is(n->name, "true") || str_is(n->name, "True");
    if (yes || str_is(n->name, "false") || str_is(n->name, "False")) {
        n->kind = NODE_CONST;
        n->value = BOOL(yes);
    } else if (str_is(n->name, "none") || str_is(n->name, "None")) {
        n->kind = NODE_CONST;
        n->value = NONE;
    } else if (namespaces && skip_op(p, '.')) {
        n->kind = NODE_NSREF;
        n->name2 = expect_name(p);
    }
    if (p->macro && (str_is(n->name, "varargs") || str_is(n->name, "kwargs")))
        jinja_fail(p->w, "'%.*s' in a macro is not supported", (int)n->name.n, n->name.p);
    if (p->macro && str_is(n->name, "caller")) p->macro->uses_caller = true;
    return n;
}

/* Adjacent string literals are one string. */
static struct node *parse_value(struct jinja_parser *p) {
    struct node *n = node_new(p, NODE_CONST);
    n->value = take(p)->value;
    if (n->value.kind != V_STR) return n;
    struct text t = {0};
    text_add(p->w, &t, n->value.s);
    while (peek(p)->kind == T_VALUE && peek(p)->value.kind == V_STR)
        text_add(p->w, &t, take(p)->value.s);
    n->value.s = text_str(&t);
    return n;
}

static struct node *parse_list(struct jinja_parser *p, bool dict) {
    struct node *n = node_new(p, dict ? NODE_DICT : NODE_LIST);
    int close = dict ? '}' : ']';
    take(p);
    while (!next_is_op(p, close)) {
        if (n->list.n) expect_op(p, ',');
        if (next_is_op(p, close)) break;
        nodes_add(p, &n->list, parse_expression(p));
        if (!dict) continue;
        expect_op(p, ':');
        nodes_add(p, &n->list2, parse_expression(p));
    }
    expect_op(p, close);
    return n;
}

static struct node *parse_primary(struct jinja_parser *p, bool namespaces) {
    const struct jinja_token *t = peek(p);
    if (t->kind == T_NAME) return parse_name(p, namespaces);
    if (t->kind == T_VALUE) return parse_value(p);
    if (next_is_op(p, '[')) return parse_list(p, false);
    if (next_is_op(p, '{')) return parse_list(p, true);
    if (!skip_op(p, '(')) unexpected(p, "an expression");
    struct node *n = parse_tuple(p, TUPLE_PARENTHESES);
    expect_op(p, ')');
    return n;
}

static struct node *parse_subscribed(struct jinja_parser *p) {
    struct node *first = next_is_op(p, ':') ? NULL : parse_expression(p);
    if (!next_is_op(p, ':')) return first;
    struct node *n = node_new(p, NODE_SLICE);
    nodes_add(p, &n->list, first);
    for (int i = 0; i < 2; i++) {
        bool present =
            skip_op(p, ':') && !next_is_op(p, ':') && !next_is_op(p, ']') && !next_is_op(p, ',');
        nodes_add(p, &n->list, present ? parse_expression(p) : NULL);
    }
    return n;
}

static struct node *parse_subscript(struct jinja_parser *p, struct node *a) {
    struct node *n = node_of(p, NODE_ITEM, a, NULL);
    if (skip_op(p, '.')) {
        const struct jinja_token *t = peek(p);
        if (t->kind == T_NAME) {
            n->kind = NODE_ATTR;
            n->name = take(p)->name;
        } else if (t->kind == T_VALUE && t->value.kind == V_INT) {
            n->b = node_new(p, NODE_CONST);
            n->b->value = take(p)->value;
        } else {
            unexpected(p, "a name or a number");
        }
        return n;
    }
    expect_op(p, '[');
    struct node *t = node_new(p, NODE_TUPLE);
    while (!next_is_op(p, ']')) {
        if (t->list.n) expect_op(p, ',');
        nodes_add(p, &t->list, parse_subscribed(p));
    }
    expect_op(p, ']');
    if (t->list.n != 1) jinja_fail(p->w, "an index of several parts is not supported");
    n->b = t->list.v[0];
    return n;
}

static void parse_args(struct jinja_parser *p, struct nodes *out) {
    bool named = false;
    expect_op(p, '(');
    for (bool first = true; !next_is_op(p, ')'); first = false) {
        if (!first) expect_op(p, ',');
        if (next_is_op(p, ')')) break;
        if (next_is_op(p, '*') || next_is_op(p, OP('*', '*')))
            jinja_fail(p->w, "'*' before an argument is not supported");
        if (peek(p)->kind == T_NAME && peek_second(p)->kind == T_OP && peek_second(p)->op == '=') {
            struct node *n = node_new(p, NODE_KWARG);
            n->name = take(p)->name;
            take(p);
            n->a = parse_expression(p);
            nodes_add(p, out, n);
            named = true;
        } else {
            if (named) jinja_fail(p->w, "an argument without a name follows one with a name");
            nodes_add(p, out, parse_expression(p));
        }
    }
    expect_op(p, ')');
}

static struct node *parse_call(struct jinja_parser *p, struct node *a) {
    struct node *n = node_of(p, NODE_CALL, a, NULL);
    parse_args(p, &n->list);
    return n;
}

static struct node *parse_postfix(struct jinja_parser *p, struct node *n) {
    for (;;) {
        if (next_is_op(p, '.') || next_is_op(p, '['))
            n = parse_subscript(p, n);
        else if (next_is_op(p, '('))
            n = parse_call(p, n);
        else
            return n;
    }
}

static struct node *parse_filter(struct jinja_parser *p, struct node *a) {
    struct node *n = node_of(p, NODE_FILTER, a, NULL);
    n->name = expect_name(p);
    if (!filter_exists(n->name))
        jinja_fail(p->w, "there is no filter '%.*s'", (int)n->name.n, n->name.p);
    if (next_is_op(p, '(')) parse_args(p, &n->list);
    return n;
}

static struct node *parse_filters(struct jinja_parser *p, struct node *a) {
    while (skip_op(p, '|')) a = parse_filter(p, a);
    return a;
}

static bool test_argument_follows(const struct jinja_parser *p) {
    const struct jinja_token *t = peek(p);
    if (t->kind == T_VALUE) return true;
    if (t->kind == T_NAME)
        return !next_is_name(p, "else") && !next_is_name(p, "or") && !next_is_name(p, "and");
    return next_is_op(p, '[') || next_is_op(p, '{');
}

static struct node *parse_test(struct jinja_parser *p, struct node *a) {
    struct node *n = node_of(p, NODE_TEST, a, NULL);
    take(p);
    bool negated = skip_name(p, "not");
    n->name = expect_name(p);
    if (!jinja_test_exists(n->name))
        jinja_fail(p->w, "there is no test '%.*s'", (int)n->name.n, n->name.p);
    if (next_is_op(p, '(')) {
        parse_args(p, &n->list);
    } else if (test_argument_follows(p)) {
        if (next_is_name(p, "is")) jinja_fail(p->w, "tests cannot be chained with 'is'");
        nodes_add(p, &n->list, parse_postfix(p, parse_primary(p, false)));
    }
    return negated ? node_of(p, NODE_NOT, n, NULL) : n;
}

static struct node *parse_unary(struct jinja_parser *p, bool filters) {
    struct node *n;
    jinja_enter(p->w);
    if (next_is_op(p, '-') || next_is_op(p, '+')) {
        n = node_new(p, take(p)->op == '-' ? NODE_NEG : NODE_POS);
        n->a = parse_unary(p, false);
    } else {
        n = parse_primary(p, false);
    }
    n = parse_postfix(p, n);
    while (filters) {
        if (next_is_op(p, '|'))
            n = parse_filters(p, n);
        else if (next_is_name(p, "is"))
            n = parse_test(p, n);
        else if (next_is_op(p, '('))
            n = parse_call(p, n);
        else
            break;
    }
    p->w->depth--;
    return n;
}

static bool op_of_level(const struct jinja_parser *p, int level) {
    int op = peek(p)->op;
    if (peek(p)->kind != T_OP) return false;
    if (level == 0) return op == '+' || op == '-';
    if (level == 2) return op == '*' || op == '/' || op == OP('/', '/') || op == '%';
    return op == OP('*', '*');
}

/* Levels: 0 sums, 1 '~', 2 products, 3 powers; each binds tighter than the one before. */
static struct node *parse_math(struct jinja_parser *p, int level) {
    if (level > 3) return parse_unary(p, true);
    struct node *a = parse_math(p, level + 1);
    if (level == 1 && next_is_op(p, '~')) {
        struct node *n = node_new(p, NODE_CONCAT);
        nodes_add(p, &n->list, a);
        while (skip_op(p, '~')) nodes_add(p, &n->list, parse_math(p, level + 1));
        return n;
    }
    while (level != 1 && op_of_level(p, level)) {
        struct node *n = node_of(p, NODE_BINARY, a, NULL);
        n->op = take(p)->op;
        n->b = parse_math(p, level + 1);
        a = n;
    }
    return a;
}

static int compare_op(struct jinja_parser *p) {
    static const int ops[] = {OP('=', '='), OP('!', '='), '<', '>', OP('<', '='), OP('>', '=')};
    for (size_t i = 0; i < ARRAY_LEN(ops); i++)
        if (skip_op(p, ops[i])) return ops[i];
    if (skip_name(p, "in")) return OP_IN;
    if (!next_is_name(p, "not") || !token_is(peek_second(p), "in")) return 0;
    take(p);
    take(p);
    return OP_NOT_IN;
}

static struct node *parse_compare(struct jinja_parser *p) {
    struct node *a = parse_math(p, 0), *n = NULL;
    for (int op; (op = compare_op(p)) != 0;) {
        if (!n) n = node_of(p, NODE_COMPARE, a, NULL);
        struct node *operand = node_new(p, NODE_OPERAND);
        operand->op = op;
        operand->a = parse_math(p, 0);
        nodes_add(p, &n->list, operand);
    }
    return n ? n : a;
}

static struct node *parse_not(struct jinja_parser *p) {
    if (!next_is_name(p, "not")) return parse_compare(p);
    jinja_enter(p->w);
    struct node *n = node_new(p, NODE_NOT);
    take(p);
    n->a = parse_not(p);
    p->w->depth--;
    return n;
}

static struct node *parse_and(struct jinja_parser *p) {
    struct node *a = parse_not(p);
    while (skip_name(p, "and")) {
        a = node_of(p, NODE_AND, a, NULL);
        a->b = parse_not(p);
    }
    return a;
}

static struct node *parse_or(struct jinja_parser *p) {
    struct node *a = parse_and(p);
    while (skip_name(p, "or")) {
        a = node_of(p, NODE_OR, a, NULL);
        a->b = parse_and(p);
    }
    return a;
}

static struct node *parse_expression(struct jinja_parser *p) {
    jinja_enter(p->w);
    struct node *a = parse_or(p);
    while (skip_name(p, "if")) {
        a = node_of(p, NODE_COND, a, NULL);
        a->b = parse_or(p);
        if (skip_name(p, "else")) a->c = parse_expression(p);
    }
    p->w->depth--;
    return a;
}

/* statements */

static void parse_body(struct jinja_parser *p, struct nodes *out, const char *const *ends);

/* Parses the rest of an opening tag, then everything up to a tag whose name is in `ends` (such as
 * "else", "endfor", NULL: the closing tag is last). The name of that tag is not consumed. */
static void parse_block(struct jinja_parser *p, struct nodes *out, const char *const *ends) {
    skip_op(p, ':');
    if (peek(p)->kind != T_BLOCK_END) unexpected(p, "the end of '{%'");
    take(p);
    parse_body(p, out, ends);
}

static void parse_block_whole(struct jinja_parser *p, struct nodes *out, const char *end) {
    const char *const ends[] = {end, NULL};
    parse_block(p, out, ends);
    take(p);
}

static void target_check(struct jinja_parser *p, const struct node *n) {
    if (n->kind == NODE_TUPLE || n->kind == NODE_LIST) {
        for (size_t i = 0; i < n->list.n; i++) target_check(p, n->list.v[i]);
    } else if (n->kind != NODE_NAME && n->kind != NODE_NSREF) {
        jinja_fail(p->w, "only names can be assigned to");
    }
}

static struct node *parse_target(struct jinja_parser *p, enum tuple_form form) {
    struct node *n = parse_tuple(p, form);
    target_check(p, n);
    return n;
}

static struct node *parse_set(struct jinja_parser *p) {
    struct node *n = node_new(p, NODE_SET);
    n->a = parse_target(p, TUPLE_TARGET_SET);
    if (skip_op(p, '=')) {
        n->b = parse_tuple(p, TUPLE_FULL);
        return n;
    }
    n->kind = NODE_SET_BLOCK;
    n->b = parse_filters(p, NULL);
    parse_block_whole(p, &n->list, "endset");
    return n;
}

static struct node *parse_for(struct jinja_parser *p) {
    static const char *const ends[] = {"else", "endfor", NULL};
    struct node *n = node_new(p, NODE_FOR);
    n->a = parse_target(p, TUPLE_TARGET);
    expect_keyword(p, "in");
    n->b = parse_tuple(p, TUPLE_NO_COND);
    if (skip_name(p, "if")) n->c = parse_expression(p);
    if (next_is_name(p, "recursive")) jinja_fail(p->w, "recursive loops are not supported");
    p->loops++;
    parse_block(p, &n->list, ends);
    p->loops--;
    if (token_is(take(p), "else")) parse_block_whole(p, &n->list2, "endfor");
    return n;
}

static struct node *parse_if(struct jinja_parser *p) {
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct node *first = node_new(p, NODE_IF), *n = first;
    for (;;) {
        n->a = parse_tuple(p, TUPLE_NO_COND);
        parse_block(p, &n->list, ends);
        const struct jinja_token *t = take(p);
        if (token_is(t, "else")) parse_block_whole(p, &n->list2, "endif");
        if (!token_is(t, "elif")) return first;
        struct node *next = node_new(p, NODE_IF);
        nodes_add(p, &n->list2, next);
        n = next;
    }
}

/* Parameters and body of a macro or a call block. */
static void parse_signature(struct jinja_parser *p, struct node *n) {
    expect_op(p, '(');
    while (!next_is_op(p, ')')) {
        if (n->list.n) expect_op(p, ',');
        struct node *param = node_new(p, NODE_NAME);
        param->name = expect_name(p);
        nodes_add(p, &n->list, param);
        if (skip_op(p, '='))
            nodes_add(p, &n->list2, parse_expression(p));
        else if (n->list2.n)
            jinja_fail(p->w, "a parameter without a default follows one with a default");
    }
    expect_op(p, ')');
}

static void parse_macro_body(struct jinja_parser *p, struct node *n, const char *end) {
    struct node *outer = p->macro;
    int loops = p->loops;
    p->macro = n;
    p->loops = 0;
    parse_block_whole(p, &n->list3, end);
    p->macro = outer;
    p->loops = loops;
}

static struct node *parse_macro(struct jinja_parser *p) {
    struct node *n = node_new(p, NODE_MACRO);
    n->name = expect_name(p);
    parse_signature(p, n);
    parse_macro_body(p, n, "endmacro");
    return n;
}

static struct node *parse_call_block(struct jinja_parser *p) {
    struct node *n = node_new(p, NODE_CALL_BLOCK);
    if (next_is_op(p, '(')) parse_signature(p, n);
    n->a = parse_expression(p);
    if (n->a->kind != NODE_CALL) jinja_fail(p->w, "'call' needs a call");
    parse_macro_body(p, n, "endcall");
    return n;
}

static struct node *parse_generation(struct jinja_parser *p) {
    struct node *n = node_new(p, NODE_GENERATION);
    int loops = p->loops;
    p->loops = 0;
    parse_block_whole(p, &n->list, "endgeneration");
    p->loops = loops;
    return n;
}

static struct node *parse_filter_block(struct jinja_parser *p) {
    struct node *n = node_new(p, NODE_FILTER_BLOCK);
    n->b = parse_filters(p, parse_filter(p, NULL));
    parse_block_whole(p, &n->list, "endfilter");
    return n;
}

static struct node *parse_with(struct jinja_parser *p) {
    struct node *n = node_new(p, NODE_WITH);
    while (peek(p)->kind != T_BLOCK_END) {
        if (n->list.n) expect_op(p, ',');
        nodes_add(p, &n->list, parse_target(p, TUPLE_TARGET));
        expect_op(p, '=');
        nodes_add(p, &n->list2, parse_expression(p));
    }
    parse_block_whole(p, &n->list3, "endwith");
    return n;
}

static struct node *parse_loop_exit(struct jinja_parser *p, enum node_kind kind, const char *name) {
    if (p->loops == 0) jinja_fail(p->w, "'%s' outside of a loop", name);
    return node_new(p, kind);
}

static struct node *parse_break(struct jinja_parser *p) {
    return parse_loop_exit(p, NODE_BREAK, "break");
}

static struct node *parse_continue(struct jinja_parser *p) {
    return parse_loop_exit(p, NODE_CONTINUE, "continue");
}

/* `parse` NULL: a tag of Jinja that is not supported. Names outside the table are unknown tags. */
static const struct statement {
    const char *name;
    struct node *(*parse)(struct jinja_parser *p);
} statements[] = {
    {"set", parse_set},
    {"for", parse_for},
    {"if", parse_if},
    {"macro", parse_macro},
    {"call", parse_call_block},
    {"filter", parse_filter_block},
    {"with", parse_with},
    {"generation", parse_generation},
    {"break", parse_break},
    {"continue", parse_continue},
    {"print", NULL},
    {"include", NULL},
    {"import", NULL},
    {"from", NULL},
    {"extends", NULL},
    {"block", NULL},
    {"autoescape", NULL},
};

static struct node *parse_statement(struct jinja_parser *p) {
    struct str name = expect_name(p);
    for (size_t i = 0; i < ARRAY_LEN(statements); i++) {
        if (!str_is(name, statements[i].name)) continue;
        if (!statements[i].parse) jinja_fail(p->w, "'%s' is not supported", statements[i].name);
        return statements[i].parse(p);
    }
    jinja_fail(p->w, "unexpected tag '%.*s'", (int)MIN(name.n, 40u), name.p);
}

static bool next_is_end_tag(const struct jinja_parser *p, const char *const *ends) {
    for (; ends && *ends; ends++)
        if (next_is_name(p, *ends)) return true;
    return false;
}

/* Parses text and tags up to a tag whose name is in `ends`, or, if `ends` is NULL, up to the
 * template's end. */
static void parse_body(struct jinja_parser *p, struct nodes *out, const char *const *ends) {
    jinja_enter(p->w);
    for (;;) {
        const struct jinja_token *t = peek(p);
        p->w->line = t->line;
        if (t->kind == T_END) {
            while (ends && ends[1]) ends++;
            if (ends) jinja_fail(p->w, "'%s' is missing before the template's end", *ends);
            break;
        }
        struct node *n;
        take(p);
        if (t->kind == T_TEXT) {
            n = node_new(p, NODE_TEXT);
            n->value = STRING(t->name);
        } else if (t->kind == T_PRINT) {
            n = node_new(p, NODE_PRINT);
            n->a = parse_tuple(p, TUPLE_FULL);
            if (peek(p)->kind != T_PRINT_END) unexpected(p, "the end of '{{'");
            take(p);
        } else {
            if (next_is_end_tag(p, ends)) break;
            n = parse_statement(p);
            if (peek(p)->kind != T_BLOCK_END) unexpected(p, "the end of '{%'");
            take(p);
        }
        nodes_add(p, out, n);
    }
    p->w->depth--;
}

/* Copies the template to p: \r\n and \r become \n, and one newline at the end is removed, if the
 * parser is not strict. Text that is not UTF-8 is an error. */
static void source_normalize(struct jinja_parser *p, const char *text, size_t len) {
    char *copy = jinja_alloc(p->w, len + 8);
    jinja_charge_scan(p->w, len);
    if (u8_check((const uint8_t *)text, len)) jinja_fail(p->w, "the template is not UTF-8");
    for (size_t i = 0; i < len; i++) {
        bool pair = text[i] == '\r' && i + 1 < len && text[i + 1] == '\n';
        if (!pair) copy[p->n++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (!p->strict && p->n > 0 && copy[p->n - 1] == '\n') p->n--;
    copy[p->n] = 0;
    p->p = copy;
}

static struct jinja *parse(const char *text, size_t len, bool strict, struct error *err) {
    if (len > JINJA_MAX_TEXT) {
        error_set(err, ERR_FORMAT, "the template is larger than %zu bytes", JINJA_MAX_TEXT);
        return NULL;
    }
    struct jinja *j = xcalloc(1, sizeof *j);
    j->strict = strict;
    jinja_ctx_init(&j->w, err, NULL, NULL);
    if (setjmp(j->w.fail_jump) == 0) {
        struct jinja_parser *p = jinja_alloc(&j->w, sizeof *p);
        *p = (struct jinja_parser){.w = &j->w, .line = 1, .strict = strict};
        source_normalize(p, text, len);
        lex(p);
        parse_body(p, &j->body, NULL);
        return j;
    }
    jinja_free(j);
    return NULL;
}

struct jinja *jinja_parse(const char *text, size_t len, struct error *err) {
    return parse(text, len, false, err);
}

struct jinja *jinja_parse_strict(const char *text, size_t len, struct error *err) {
    return parse(text, len, true, err);
}

void jinja_free(struct jinja *j) {
    if (!j) return;
    arena_release(&j->w.arena);
    free(j);
}
