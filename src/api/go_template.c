/*
 * go_template: one pass over a template's actions, each written as its Jinja equivalent.
 *
 * Text is written as a string literal, so Jinja's rules for white space never apply to it. A
 * template without .Messages describes one turn, so it is put into a loop over the turns. The last
 * turn ends with its response, since the model generates from there.
 */
#define _GNU_SOURCE
#include "api/go_template.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 32, MAX_BYTES = 64 << 10 };

/* _ELSE: after the block's {{ else }}, where a second one is an error. */
enum block { BLOCK_IF, BLOCK_RANGE, BLOCK_IF_ELSE, BLOCK_RANGE_ELSE };
struct writer_state {
    struct buf *out;
    struct error *err;
    enum block open[MAX_DEPTH];
    int depth, ranges;
    bool turns;    /* no .Messages */
    bool answered; /* .Response has occurred */
};

static int unknown(struct writer_state *w, const char *p, size_t n) {
    return error_set(w->err, ERR_USAGE, "'{{ %.*s }}' in the template is not understood",
                     (int)MIN(n, 80), p);
}

static void literal(struct buf *out, const char *p, size_t n) {
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

static void blanks(struct expression *e) {
    while (e->p < e->end && isspace((unsigned char)*e->p)) e->p++;
}

static size_t word_length(const struct expression *e) {
    size_t n = 0;
    while (e->p + n < e->end && (isalnum((unsigned char)e->p[n]) || e->p[n] == '_')) n++;
    return n;
}

/* The Jinja expression for .Name or $.Name; NULL: Jinja has no such variable. */
static const char *variable(const struct writer_state *w, const char *name, size_t n, bool root) {
    static const struct {
        const char *go, *turn, *all, *each;
    } known[] = {{"System", "turn.system", "system", NULL},
                 {"Prompt", "turn.prompt", "''", NULL},
                 {"Response", "turn.response", "''", NULL},
                 {"Messages", NULL, "messages", NULL},
                 {"Tools", "''", "''", NULL}, // the model's own template handles tools
                 {"Suffix", "''", "''", NULL},
                 {"Role", NULL, NULL, "message.role"},
                 {"Content", NULL, NULL, "message.content"},
                 {"ToolCalls", NULL, NULL, "''"},
                 {"Thinking", NULL, NULL, "''"}};
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        if (strlen(known[i].go) == n && memcmp(known[i].go, name, n) == 0)
            return w->ranges && !root ? known[i].each : w->turns ? known[i].turn : known[i].all;
    return NULL;
}

static bool expression(struct expression *e, struct buf *out);

static bool quoted(struct expression *e, struct buf *out) {
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
    literal(out, text.data ? text.data : "", text.len);
    buf_release(&text);
    return e->p++ < e->end;
}

static bool operand(struct expression *e, struct buf *out) {
    blanks(e);
    if (e->p == e->end) return false;
    if (*e->p == '"') return quoted(e, out);
    if (*e->p == '(') {
        e->p++;
        if (!expression(e, out)) return false;
        blanks(e);
        return e->p < e->end && *e->p++ == ')';
    }
    bool root = *e->p == '$';
    if (root) e->p++;
    if (e->p == e->end || *e->p++ != '.') return false;
    size_t n = word_length(e);
    const char *name = variable(e->w, e->p, n, root);
    e->p += n;
    if (name) buf_puts(out, name);
    return name != NULL;
}

/* A function, which Go writes before its operands and Jinja between them. */
static bool function(struct expression *e, struct buf *out) {
    static const struct {
        const char *go, *jinja;
        int most;
    } known[] = {{"eq", " == ", 2}, {"ne", " != ", 2}, {"and", " and ", 16}, {"or", " or ", 16}};
    size_t n = word_length(e), i = 0;
    if (n == 3 && memcmp(e->p, "not", 3) == 0) {
        e->p += n;
        buf_puts(out, "(not ");
        bool fine = operand(e, out);
        buf_puts(out, ")");
        return fine;
    }
    while (i < ARRAY_LEN(known) && (strlen(known[i].go) != n || memcmp(known[i].go, e->p, n))) i++;
    if (i == ARRAY_LEN(known)) return false;
    e->p += n;
    buf_puts(out, "(");
    int k = 0;
    for (blanks(e); e->p < e->end && *e->p != ')'; blanks(e), k++) {
        if (k) buf_puts(out, known[i].jinja);
        if (!operand(e, out)) return false;
    }
    buf_puts(out, ")");
    return k >= 2 && k <= known[i].most;
}

static bool expression(struct expression *e, struct buf *out) {
    if (e->depth++ > MAX_DEPTH) return false;
    blanks(e);
    bool fine = word_length(e) ? function(e, out) : operand(e, out);
    e->depth--;
    return fine;
}

/* Writes a whole expression between `before` and `after`. */
static int wrap(struct writer_state *w, const char *before, const char *p, size_t n,
                const char *after) {
    struct expression e = {.w = w, .p = p, .end = p + n};
    struct buf text = {0};
    bool fine = expression(&e, &text);
    blanks(&e);
    if (fine && e.p == e.end) buf_printf(w->out, "%s%s%s", before, text.data, after);
    buf_release(&text);
    return fine && e.p == e.end ? OK : unknown(w, p, n);
}

/* actions */

static bool begins(const char *p, size_t n, const char *word) {
    size_t k = strlen(word);
    return n >= k && memcmp(p, word, k) == 0 && (n == k || isspace((unsigned char)p[k]));
}

static int block_open(struct writer_state *w, enum block b, const char *p, size_t n) {
    if (w->depth == MAX_DEPTH) return unknown(w, p, n);
    w->open[w->depth++] = b;
    if (b == BLOCK_IF) return wrap(w, "{% if ", p, n, " %}");
    while (n && isspace((unsigned char)*p)) p++, n--;
    bool messages =
        (n == 9 && memcmp(p, ".Messages", 9) == 0) || (n == 10 && memcmp(p, "$.Messages", 10) == 0);
    if (!messages || w->ranges++) return unknown(w, p, n);
    buf_puts(w->out, "{% for message in messages %}");
    return OK;
}

static int block_end(struct writer_state *w, const char *p, size_t n) {
    if (w->depth == 0) return unknown(w, p, n);
    enum block b = w->open[--w->depth];
    if (b == BLOCK_RANGE) w->ranges--;
    bool condition = b == BLOCK_IF || b == BLOCK_IF_ELSE;
    buf_puts(w->out, condition ? "{% endif %}" : "{% endfor %}");
    return OK;
}

/* {{ else }} and {{ else if … }}; p is after the word. */
static int block_else(struct writer_state *w, const char *p, size_t n) {
    enum block *b = &w->open[w->depth - 1];
    while (n && isspace((unsigned char)*p)) p++, n--;
    if (n && *b == BLOCK_IF && begins(p, n, "if")) return wrap(w, "{% elif ", p + 2, n - 2, " %}");
    if (n || *b == BLOCK_IF_ELSE || *b == BLOCK_RANGE_ELSE) return unknown(w, "else", 4);
    if (*b == BLOCK_RANGE) w->ranges--;
    *b = *b == BLOCK_IF ? BLOCK_IF_ELSE : BLOCK_RANGE_ELSE;
    buf_puts(w->out, "{% else %}");
    return OK;
}

/* Writes .Response; the last turn ends here. */
static int response(struct writer_state *w, const char *p, size_t n) {
    if (w->depth || w->answered) return unknown(w, p, n);
    w->answered = true;
    buf_puts(w->out, "{{ turn.response }}{% if not loop.last %}");
    return OK;
}

static int action(struct writer_state *w, const char *p, size_t n) {
    while (n && isspace((unsigned char)*p)) p++, n--;
    while (n && isspace((unsigned char)p[n - 1])) n--;
    if (n >= 2 && memcmp(p, "/*", 2) == 0) return OK;
    if (begins(p, n, "if")) return block_open(w, BLOCK_IF, p + 2, n - 2);
    if (begins(p, n, "range")) return block_open(w, BLOCK_RANGE, p + 5, n - 5);
    if (begins(p, n, "end")) return n == 3 ? block_end(w, p, n) : unknown(w, p, n);
    if (begins(p, n, "else") && w->depth) return block_else(w, p + 4, n - 4);
    if (w->turns && n == 9 && memcmp(p, ".Response", 9) == 0) return response(w, p, n);
    return wrap(w, "{{ ", p, n, " }}");
}

static void text_put(struct writer_state *w, const char *p, size_t n, bool trim_left,
                     bool trim_right) {
    while (trim_left && n && isspace((unsigned char)*p)) p++, n--;
    while (trim_right && n && isspace((unsigned char)p[n - 1])) n--;
    if (n == 0) return;
    buf_puts(w->out, "{{ ");
    literal(w->out, p, n);
    buf_puts(w->out, " }}");
}

static int actions(struct writer_state *w, const char *p) {
    bool trimmed = false;
    for (const char *open; (open = strstr(p, "{{"));) {
        const char *close = strstr(open, "}}"), *from = open + 2;
        if (!close) return error_set(w->err, ERR_USAGE, "a '{{' in the template is not closed");
        const char *to = close;
        bool left = *from == '-' && isspace((unsigned char)from[1]);
        bool right = to - 1 > from && to[-1] == '-' && isspace((unsigned char)to[-2]);
        text_put(w, p, (size_t)(open - p), trimmed, left);
        from += left;
        to -= right;
        if (action(w, from, (size_t)(to - from)) != OK) return w->err->code;
        trimmed = right;
        p = close + 2;
    }
    text_put(w, p, strlen(p), trimmed, false);
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
    if (actions(&w, text) != OK) return err->code;
    if (w.turns)
        buf_puts(out, w.answered ? "{% endif %}{% endfor %}" : "{{ turn.response }}{% endfor %}");
    return OK;
}

/* variables */

/* Joins consecutive texts of one kind with an empty line. */
static void text_join(struct buf *b, const char *text) {
    if (b->len) buf_puts(b, "\n\n");
    buf_puts(b, text);
}

struct ollama_turn {
    struct buf system, prompt, response;
};

/* Moves the texts out of t. */
static json_t *turn_json(struct ollama_turn *t) {
    struct buf *texts[] = {&t->system, &t->prompt, &t->response};
    for (size_t i = 0; i < 3; i++) buf_puts(texts[i], ""); /* "" allocates data */
    json_t *v = json_pack("{s:s,s:s,s:s}", "system", t->system.data, "prompt", t->prompt.data,
                          "response", t->response.data);
    for (size_t i = 0; i < 3; i++) buf_release(texts[i]);
    return v;
}

json_t *go_template_variables(const json_t *messages) {
    json_t *turns = json_array();
    struct ollama_turn turn = {0};
    struct buf all = {0};
    const json_t *m;
    size_t i;
    json_array_foreach (messages, i, m) {
        const char *role = json_get_string(m, "role"), *text = json_get_string(m, "content");
        bool system = strcmp(role, "system") == 0, answer = strcmp(role, "assistant") == 0;
        bool said = turn.prompt.len || turn.response.len;
        if ((system && said) || (!answer && turn.response.len))
            json_array_append_new(turns, turn_json(&turn));
        if (system) text_join(&all, text);
        text_join(system ? &turn.system : answer ? &turn.response : &turn.prompt, text);
    }
    json_array_append_new(turns, turn_json(&turn));
    json_t *v = json_pack("{s:o,s:s}", "turns", turns, "system", all.data ? all.data : "");
    buf_release(&all);
    return v;
}
