/*
 * go_template: writes the Jinja equivalent of each action of a Go template, in one pass.
 *
 * Text is written as a string literal, so Jinja's rules for white space do not apply to it. A
 * template without .Messages describes one turn, so it is put into a loop over the turns. The last
 * turn ends at its response, where the model continues.
 */
#define _GNU_SOURCE
#include "api/go_template.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 32, MAX_BYTES = 64 << 10 };

/* The kinds of open blocks. _ELSE: {{ else }} has occurred, so another one is an error. */
enum block { BLOCK_IF, BLOCK_RANGE, BLOCK_IF_ELSE, BLOCK_RANGE_ELSE };
struct writer_state {
    struct buf *out;
    struct error *err;
    enum block blocks[MAX_DEPTH];
    int depth, ranges;
    bool turns;        /* the template has no .Messages */
    bool has_response; /* .Response has occurred */
};

static int unsupported_error(struct writer_state *w, const char *p, size_t n) {
    return error_set(w->err, ERR_USAGE, "'{{ %.*s }}' in the template is not understood",
                     (int)MIN(n, 80), p);
}

static void literal_write(struct buf *out, const char *p, size_t n) {
    buf_puts(out, "'");
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '\\' || p[i] == '\'') buf_puts(out, "\\");
        buf_add(out, &p[i], 1);
    }
    buf_puts(out, "'");
}

/* expressions */

struct expression {
    struct writer_state *w;
    const char *p, *end;
    int depth;
};

static void blanks_skip(struct expression *e) {
    while (e->p < e->end && isspace((unsigned char)*e->p)) e->p++;
}

static size_t word_length(const struct expression *e) {
    size_t n = 0;
    while (e->p + n < e->end && (isalnum((unsigned char)e->p[n]) || e->p[n] == '_')) n++;
    return n;
}

/* The Jinja expression for the Go variable .NAME, or $.NAME if `root`; NULL: it is not supported.
 */
static const char *variable_find(const struct writer_state *w, const char *name, size_t n,
                                 bool root) {
    static const struct {
        const char *go, *turn, *conversation, *message;
    } variables[] = {{"System", "turn.system", "system", NULL},
                     {"Prompt", "turn.prompt", "''", NULL},
                     {"Response", "turn.response", "''", NULL},
                     {"Messages", NULL, "messages", NULL},
                     {"Tools", "''", "''", NULL}, // the model's own template handles tools
                     {"Suffix", "''", "''", NULL},
                     {"Role", NULL, NULL, "message.role"},
                     {"Content", NULL, NULL, "message.content"},
                     {"ToolCalls", NULL, NULL, "''"},
                     {"Thinking", NULL, NULL, "message.reasoning_content"}};
    for (size_t i = 0; i < ARRAY_LEN(variables); i++)
        if (strlen(variables[i].go) == n && memcmp(variables[i].go, name, n) == 0)
            return w->ranges && !root ? variables[i].message
                   : w->turns         ? variables[i].turn
                                      : variables[i].conversation;
    return NULL;
}

static bool expression(struct expression *e, struct buf *out);

static bool string_convert(struct expression *e, struct buf *out) {
    struct buf text = {0};
    for (e->p++; e->p < e->end && *e->p != '"'; e->p++) {
        char c = *e->p;
        if (c == '\\' && e->p + 1 < e->end) {
            c = *++e->p;
            if (c == 'n')
                c = '\n';
            else if (c == 't')
                c = '\t';
        }
        buf_add(&text, &c, 1);
    }
    literal_write(out, text.data ? text.data : "", text.len);
    buf_release(&text);
    return e->p++ < e->end;
}

static bool operand_convert(struct expression *e, struct buf *out) {
    blanks_skip(e);
    if (e->p == e->end) return false;
    if (*e->p == '"') return string_convert(e, out);
    if (*e->p == '(') {
        e->p++;
        if (!expression(e, out)) return false;
        blanks_skip(e);
        return e->p < e->end && *e->p++ == ')';
    }
    bool root = *e->p == '$';
    if (root) e->p++;
    if (e->p == e->end || *e->p++ != '.') return false;
    size_t n = word_length(e);
    const char *name = variable_find(e->w, e->p, n, root);
    e->p += n;
    if (name) buf_puts(out, name);
    return name != NULL;
}

/* Converts a function, which Go writes before its operands and Jinja between them. */
static bool function_convert(struct expression *e, struct buf *out) {
    static const struct {
        const char *go, *jinja;
        int max_operands;
    } functions[] = {
        {"eq", " == ", 2}, {"ne", " != ", 2}, {"and", " and ", 16}, {"or", " or ", 16}};
    size_t n = word_length(e), i = 0;
    if (n == 3 && memcmp(e->p, "not", 3) == 0) {
        e->p += n;
        buf_puts(out, "(not ");
        bool ok = operand_convert(e, out);
        buf_puts(out, ")");
        return ok;
    }
    while (i < ARRAY_LEN(functions) &&
           (strlen(functions[i].go) != n || memcmp(functions[i].go, e->p, n)))
        i++;
    if (i == ARRAY_LEN(functions)) return false;
    e->p += n;
    buf_puts(out, "(");
    int k = 0;
    for (blanks_skip(e); e->p < e->end && *e->p != ')'; blanks_skip(e), k++) {
        if (k) buf_puts(out, functions[i].jinja);
        if (!operand_convert(e, out)) return false;
    }
    buf_puts(out, ")");
    return k >= 2 && k <= functions[i].max_operands;
}

static bool expression(struct expression *e, struct buf *out) {
    if (e->depth++ > MAX_DEPTH) return false;
    blanks_skip(e);
    bool ok = word_length(e) ? function_convert(e, out) : operand_convert(e, out);
    e->depth--;
    return ok;
}

/* Writes a whole expression between `before` and `after`. */
static int expression_write(struct writer_state *w, const char *before, const char *p, size_t n,
                            const char *after) {
    struct expression e = {.w = w, .p = p, .end = p + n};
    struct buf text = {0};
    bool ok = expression(&e, &text);
    blanks_skip(&e);
    if (ok && e.p == e.end) buf_printf(w->out, "%s%s%s", before, text.data, after);
    buf_release(&text);
    return ok && e.p == e.end ? OK : unsupported_error(w, p, n);
}

/* actions */

static bool starts_with_word(const char *p, size_t n, const char *word) {
    size_t k = strlen(word);
    return n >= k && memcmp(p, word, k) == 0 && (n == k || isspace((unsigned char)p[k]));
}

static int block_open(struct writer_state *w, enum block b, const char *p, size_t n) {
    if (w->depth == MAX_DEPTH) return unsupported_error(w, p, n);
    w->blocks[w->depth++] = b;
    if (b == BLOCK_IF) return expression_write(w, "{% if ", p, n, " %}");
    while (n && isspace((unsigned char)*p)) p++, n--;
    bool messages =
        (n == 9 && memcmp(p, ".Messages", 9) == 0) || (n == 10 && memcmp(p, "$.Messages", 10) == 0);
    if (!messages || w->ranges++) return unsupported_error(w, p, n);
    buf_puts(w->out, "{% for message in messages %}");
    return OK;
}

static int block_end(struct writer_state *w, const char *p, size_t n) {
    if (w->depth == 0) return unsupported_error(w, p, n);
    enum block b = w->blocks[--w->depth];
    if (b == BLOCK_RANGE) w->ranges--;
    bool condition = b == BLOCK_IF || b == BLOCK_IF_ELSE;
    buf_puts(w->out, condition ? "{% endif %}" : "{% endfor %}");
    return OK;
}

/* Converts {{ else }} and {{ else if … }}; p points after the word. */
static int block_else(struct writer_state *w, const char *p, size_t n) {
    enum block *b = &w->blocks[w->depth - 1];
    while (n && isspace((unsigned char)*p)) p++, n--;
    if (n && *b == BLOCK_IF && starts_with_word(p, n, "if"))
        return expression_write(w, "{% elif ", p + 2, n - 2, " %}");
    if (n || *b == BLOCK_IF_ELSE || *b == BLOCK_RANGE_ELSE) return unsupported_error(w, "else", 4);
    if (*b == BLOCK_RANGE) w->ranges--;
    *b = *b == BLOCK_IF ? BLOCK_IF_ELSE : BLOCK_RANGE_ELSE;
    buf_puts(w->out, "{% else %}");
    return OK;
}

/* Writes .Response, where the last turn ends. */
static int response_write(struct writer_state *w, const char *p, size_t n) {
    if (w->depth || w->has_response) return unsupported_error(w, p, n);
    w->has_response = true;
    buf_puts(w->out, "{{ turn.response }}{% if not loop.last %}");
    return OK;
}

static int action_convert(struct writer_state *w, const char *p, size_t n) {
    while (n && isspace((unsigned char)*p)) p++, n--;
    while (n && isspace((unsigned char)p[n - 1])) n--;
    if (n >= 2 && memcmp(p, "/*", 2) == 0) return OK;
    if (starts_with_word(p, n, "if")) return block_open(w, BLOCK_IF, p + 2, n - 2);
    if (starts_with_word(p, n, "range")) return block_open(w, BLOCK_RANGE, p + 5, n - 5);
    if (starts_with_word(p, n, "end"))
        return n == 3 ? block_end(w, p, n) : unsupported_error(w, p, n);
    if (starts_with_word(p, n, "else") && w->depth) return block_else(w, p + 4, n - 4);
    if (w->turns && n == 9 && memcmp(p, ".Response", 9) == 0) return response_write(w, p, n);
    return expression_write(w, "{{ ", p, n, " }}");
}

static void text_write(struct writer_state *w, const char *p, size_t n, bool trim_left,
                       bool trim_right) {
    while (trim_left && n && isspace((unsigned char)*p)) p++, n--;
    while (trim_right && n && isspace((unsigned char)p[n - 1])) n--;
    if (n == 0) return;
    buf_puts(w->out, "{{ ");
    literal_write(w->out, p, n);
    buf_puts(w->out, " }}");
}

static int actions_convert(struct writer_state *w, const char *p) {
    bool trimmed = false;
    for (const char *open; (open = strstr(p, "{{"));) {
        const char *close = strstr(open, "}}"), *from = open + 2;
        if (!close) return error_set(w->err, ERR_USAGE, "a '{{' in the template is not closed");
        const char *to = close;
        bool left = *from == '-' && isspace((unsigned char)from[1]);
        bool right = to - 1 > from && to[-1] == '-' && isspace((unsigned char)to[-2]);
        text_write(w, p, (size_t)(open - p), trimmed, left);
        from += left;
        to -= right;
        if (action_convert(w, from, (size_t)(to - from)) != OK) return w->err->code;
        trimmed = right;
        p = close + 2;
    }
    text_write(w, p, strlen(p), trimmed, false);
    if (w->depth)
        return error_set(w->err, ERR_USAGE, "the template has fewer '{{ end }}' than blocks");
    return OK;
}

int go_template_jinja(const char *text, bool bos, struct buf *out, struct error *err) {
    struct writer_state w = {.out = out, .err = err, .turns = !strstr(text, ".Messages")};
    if (strlen(text) > MAX_BYTES)
        return error_set(err, ERR_USAGE, "the template is larger than %d bytes", MAX_BYTES);
    if (bos) buf_puts(out, "{{ bos_token }}");
    if (w.turns) buf_puts(out, "{% for turn in turns %}");
    if (actions_convert(&w, text) != OK) return err->code;
    if (w.turns)
        buf_puts(out,
                 w.has_response ? "{% endif %}{% endfor %}" : "{{ turn.response }}{% endfor %}");
    return OK;
}

/* variables */

/* Appends a text; an empty line separates it from an earlier text. */
static void text_join(struct buf *b, const char *text) {
    if (b->len) buf_puts(b, "\n\n");
    buf_puts(b, text);
}

struct ollama_turn {
    struct buf system, prompt, response;
};

/* The turn as {system, prompt, response}; empties t. */
static json_t *turn_json(struct ollama_turn *t) {
    struct buf *texts[] = {&t->system, &t->prompt, &t->response};
    for (size_t i = 0; i < 3; i++) buf_puts(texts[i], ""); /* so that data is not NULL */
    json_t *v = json_pack("{s:s,s:s,s:s}", "system", t->system.data, "prompt", t->prompt.data,
                          "response", t->response.data);
    for (size_t i = 0; i < 3; i++) buf_release(texts[i]);
    return v;
}

json_t *go_template_variables(const json_t *messages) {
    json_t *turns = json_array();
    struct ollama_turn turn = {0};
    struct buf system_text = {0};
    const json_t *m;
    size_t i;
    json_array_foreach (messages, i, m) {
        const char *role = json_get_string(m, "role"), *text = json_get_string(m, "content");
        bool system = strcmp(role, "system") == 0, answer = strcmp(role, "assistant") == 0;
        bool has_turn = turn.prompt.len || turn.response.len;
        if ((system && has_turn) || (!answer && turn.response.len))
            json_array_append_new(turns, turn_json(&turn));
        if (system) text_join(&system_text, text);
        text_join(system ? &turn.system : answer ? &turn.response : &turn.prompt, text);
    }
    json_array_append_new(turns, turn_json(&turn));
    json_t *v =
        json_pack("{s:o,s:s}", "turns", turns, "system", system_text.data ? system_text.data : "");
    buf_release(&system_text);
    return v;
}
