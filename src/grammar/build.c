/*
 * build: compiles expressions into a recursive transition network over bytes, and checks it.
 *
 * Characters become ranges of UTF-8 bytes here, so later stages only see bytes. Counted repetition
 * is unrolled: the repeated expression is copied. A large repeated expression first becomes a
 * separate rule, which the copies call, so that the sizes of nested repetitions add up instead of
 * multiplying. Alternatives that are plain texts share their prefixes.
 *
 *     root ::= "a" item{1,2} | "ab"
 *
 *     start --a--> 1 --call item--> 2 --call item--> end
 *                                   2 --epsilon--> end       (the second item is optional)
 *     start --a--> 3 --b--> end
 *
 * Invariants of a finished grammar: no rule can call itself before it has read a byte (else a stack
 * could grow without limit); min_len is exact. A node whose min_len is GRAMMAR_INFINITE_LENGTH
 * cannot reach the end of its rule; grammar.c never takes an edge to it, so an end can be reached
 * from every configuration.
 */
#include "grammar/internal.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* sets of code points */

void codepoint_set_add(struct codepoint_set *r, uint32_t lo, uint32_t hi) {
    if (r->n == r->cap) {
        r->cap = r->cap ? 2 * r->cap : 8;
        r->v = xrealloc(r->v, (size_t)r->cap * sizeof *r->v);
    }
    r->v[r->n++] = (struct codepoint_range){lo, hi};
}

void codepoint_set_release(struct codepoint_set *r) {
    free(r->v);
    *r = (struct codepoint_set){0};
}

static int range_compare(const void *a, const void *b) {
    uint32_t x = ((const struct codepoint_range *)a)->lo,
             y = ((const struct codepoint_range *)b)->lo;
    return (x > y) - (x < y);
}

/* Sorts and merges the ranges; keeps surrogates. */
static void ranges_merge(struct codepoint_set *r) {
    int32_t n = 0;
    if (r->n > 1) qsort(r->v, (size_t)r->n, sizeof *r->v, range_compare);
    for (int32_t i = 0; i < r->n; i++) {
        struct codepoint_range x = r->v[i];
        if (n > 0 && x.lo <= r->v[n - 1].hi + 1)
            r->v[n - 1].hi = MAX(r->v[n - 1].hi, x.hi);
        else
            r->v[n++] = x;
    }
    r->n = n;
}

/* Surrogates are complemented too; codepoint_set_normalize removes them later. */
void codepoint_set_negate(struct codepoint_set *r) {
    struct codepoint_set out = {0};
    uint32_t next = 0;
    ranges_merge(r);
    for (int32_t i = 0; i < r->n; i++) {
        if (r->v[i].lo > next) codepoint_set_add(&out, next, r->v[i].lo - 1);
        next = r->v[i].hi + 1;
    }
    if (next <= 0x10FFFF) codepoint_set_add(&out, next, 0x10FFFF);
    codepoint_set_release(r);
    *r = out;
}

void codepoint_set_normalize(struct codepoint_set *r) {
    struct codepoint_set out = {0};
    ranges_merge(r);
    for (int32_t i = 0; i < r->n; i++) {
        struct codepoint_range x = r->v[i];
        if (x.lo < 0xD800) codepoint_set_add(&out, x.lo, MIN(x.hi, 0xD7FF));
        if (x.hi > 0xDFFF && x.lo <= 0x10FFFF)
            codepoint_set_add(&out, MAX(x.lo, 0xE000), MIN(x.hi, 0x10FFFF));
    }
    codepoint_set_release(r);
    *r = out;
}

/* The code points first, first + step, …, last. */
struct stride {
    uint32_t first, last, step;
};
struct property {
    const char *name;
    const struct stride *rows;
    int n;
};
#include "grammar/unicode_ranges.inc"

bool codepoint_set_add_property(struct codepoint_set *r, const char *name, size_t len) {
    for (size_t i = 0; i < ARRAY_LEN(properties); i++) {
        const struct property *p = &properties[i];
        if (strlen(p->name) != len || memcmp(p->name, name, len) != 0) continue;
        for (int k = 0; k < p->n; k++) {
            const struct stride *s = &p->rows[k];
            if (s->step == 1) codepoint_set_add(r, s->first, s->last);
            for (uint32_t c = s->first; s->step > 1 && c <= s->last; c += s->step)
                codepoint_set_add(r, c, c);
        }
        return true;
    }
    return false;
}

int32_t utf8_decode(const char *p, size_t left, int *n) {
    static const uint32_t min_of_length[] = {0, 0, 0x80, 0x800, 0x10000};
    if (left == 0) return -1;
    uint8_t first = (uint8_t)p[0];
    int len = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (len == 0 || first > 0xF4 || left < (size_t)len) return -1;
    uint32_t c = len == 1 ? first : first & (0x7Fu >> len);
    for (int i = 1; i < len; i++) {
        if (((uint8_t)p[i] & 0xC0) != 0x80) return -1;
        c = c << 6 | ((uint8_t)p[i] & 0x3F);
    }
    if (c < min_of_length[len] || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) return -1;
    *n = len;
    return (int32_t)c;
}

int grammar_check_text(const char *what, const char *text, size_t len, struct error *err) {
    if (len > GRAMMAR_MAX_TEXT) {
        return error_set(err, ERR_MEMORY, "%s of %zu bytes is above the limit of %d", what, len,
                         GRAMMAR_MAX_TEXT);
    }
    int n = 0;
    for (size_t i = 0; i < len; i += (size_t)n)
        if (utf8_decode(text + i, len - i, &n) < 0)
            return error_set(err, ERR_FORMAT, "%s is not UTF-8 at byte %zu", what, i);
    return OK;
}

/* expressions */

void grammar_builder_release(struct grammar_builder *b) {
    free(b->rules);
    free(b->names);
    arena_release(&b->arena);
    *b = (struct grammar_builder){0};
}

/* See grammar_set_build_budget. */
static _Thread_local int32_t build_budget_divisor = 1;
static _Thread_local bool build_budget_exceeded;

void grammar_set_build_budget(int32_t share) {
    build_budget_divisor = MAX(share, 1);
    build_budget_exceeded = false;
}

bool grammar_build_budget_exceeded(void) {
    return build_budget_exceeded;
}

/* Records `over` for grammar_build_budget_exceeded and returns it. */
static bool over_build_budget(bool over) {
    build_budget_exceeded |= over;
    return over;
}

bool grammar_builder_is_full(const struct grammar_builder *b) {
    return over_build_budget(b->arena.used > GRAMMAR_MAX_ARENA / (size_t)build_budget_divisor);
}

static uint64_t name_hash(const char *s) {
    uint64_t h = 0xCBF29CE484222325u;
    for (; *s; s++) h = (h ^ (uint8_t)*s) * 0x100000001B3u;
    return h ^ h >> 32;
}

/* The slot of the name in the hash table, or the free slot in which to insert it. */
static int32_t *name_slot(const struct grammar_builder *b, const char *name) {
    uint64_t i = name_hash(name) & b->names_mask;
    while (b->names[i] && strcmp(b->rules[b->names[i] - 1].name, name) != 0)
        i = (i + 1) & b->names_mask;
    return &b->names[i];
}

static void names_grow(struct grammar_builder *b) {
    b->names_mask = b->names ? 2 * b->names_mask + 1 : 63;
    free(b->names);
    b->names = xcalloc(b->names_mask + 1, sizeof *b->names);
    for (int32_t i = 0; i < b->n_rules; i++)
        if (b->rules[i].name) {
            int32_t *slot = name_slot(b, b->rules[i].name);
            if (!*slot) *slot = i + 1;
        }
}

int32_t grammar_builder_add_rule(struct grammar_builder *b, const char *name) {
    if (b->n_rules == b->cap_rules) {
        b->cap_rules = b->cap_rules ? 2 * b->cap_rules : 16;
        b->rules = xrealloc(b->rules, (size_t)b->cap_rules * sizeof *b->rules);
    }
    b->rules[b->n_rules] =
        (struct grammar_rule){.name = name ? arena_strdup(&b->arena, name) : NULL};
    if (name && 2 * (uint64_t)b->n_names >= b->names_mask) names_grow(b);
    if (name) {
        int32_t *slot = name_slot(b, name);
        if (!*slot) *slot = b->n_rules + 1; // if several rules have the name, the first is found
        b->n_names++;
    }
    return b->n_rules++;
}

int32_t grammar_builder_find_rule(const struct grammar_builder *b, const char *name) {
    return b->names ? *name_slot(b, name) - 1 : -1;
}

void grammar_builder_define_rule(struct grammar_builder *b, int32_t rule, struct expr *body) {
    b->rules[rule].body = body;
    b->rules[rule].defined = true;
}

void exprs_add(struct exprs *l, struct expr *e) {
    if (l->n == l->cap) {
        l->cap = l->cap ? 2 * l->cap : 8;
        l->v = xrealloc(l->v, (size_t)l->cap * sizeof *l->v);
    }
    l->v[l->n++] = e;
}

static struct expr *expr_new(struct grammar_builder *b, enum expr_kind kind) {
    struct expr *e = arena_alloc(&b->arena, sizeof *e);
    e->kind = kind;
    return e;
}

static int32_t cost_add(int32_t a, int64_t more) {
    return (int32_t)MIN((int64_t)a + more, GRAMMAR_INFINITE_LENGTH);
}

static struct expr *expr_text(struct grammar_builder *b, const char *p, size_t n) {
    struct expr *e = expr_new(b, EXPR_TEXT);
    char *copy = arena_alloc(&b->arena, n + 1);
    if (n > 0) memcpy(copy, p, n);
    e->text = copy;
    e->n = e->cost = (int32_t)n;
    return e;
}

struct expr *expr_puts(struct grammar_builder *b, const char *s) {
    return expr_text(b, s, strlen(s));
}

static int utf8_put(uint32_t c, uint8_t out[4]) {
    int n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (int i = n - 1; i > 0; i--, c >>= 6) out[i] = (uint8_t)(0x80 | (c & 0x3F));
    out[0] = (uint8_t)(lead[n] | c);
    return n;
}

struct expr *expr_set(struct grammar_builder *b, struct codepoint_set *r) {
    codepoint_set_normalize(r);
    if (r->n == 1 && r->v[0].lo == r->v[0].hi) {
        uint8_t text[4];
        int n = utf8_put(r->v[0].lo, text);
        codepoint_set_release(r);
        return expr_text(b, (const char *)text, (size_t)n);
    }
    struct expr *e = expr_new(b, EXPR_SET);
    e->n = r->n;
    e->range = arena_alloc(&b->arena, (size_t)(r->n + 1) * sizeof *e->range);
    if (r->n > 0) memcpy(e->range, r->v, (size_t)r->n * sizeof *e->range);
    e->cost = 1;
    for (int32_t i = 0; i < r->n; i++) e->cost += r->v[i].hi < 0x80 ? 0 : 3;
    codepoint_set_release(r);
    return e;
}

struct expr *expr_rule(struct grammar_builder *b, int32_t rule) {
    struct expr *e = expr_new(b, EXPR_RULE);
    e->rule = rule;
    e->cost = 1;
    return e;
}

/* Makes the expression a rule, so that each copy costs only one call. */
static struct expr *expr_as_rule(struct grammar_builder *b, struct expr *e) {
    int32_t rule = grammar_builder_add_rule(b, NULL);
    grammar_builder_define_rule(b, rule, e);
    return expr_rule(b, rule);
}

struct expr *expr_repeat(struct grammar_builder *b, struct expr *e, int32_t min, int32_t max) {
    int64_t copies = MAX(max, min) + (max < 0);
    if (!e) return min == 0 ? expr_puts(b, "") : NULL;
    if (e->kind == EXPR_TEXT && e->n == 0) return e;
    // only for large expressions, because each call adds a frame at run time
    if (copies > 1 && e->cost > 2 && copies * e->cost > 32) e = expr_as_rule(b, e);
    struct expr *r = expr_new(b, EXPR_REPEAT);
    r->kids = arena_alloc(&b->arena, sizeof *r->kids);
    r->kids[0] = e;
    r->min = min;
    r->max = max;
    r->cost = cost_add(1, copies * (e->cost + 1));
    return r;
}

static struct expr *expr_list(struct grammar_builder *b, enum expr_kind kind, struct exprs *l) {
    struct expr *e = expr_new(b, kind);
    e->kids = arena_alloc(&b->arena, (size_t)(l->n + 1) * sizeof *e->kids);
    e->cost = 1;
    for (int32_t i = 0; i < l->n; i++) {
        if (!l->v[i]) continue;
        e->cost = cost_add(e->cost, l->v[i]->cost);
        e->kids[e->n++] = l->v[i];
    }
    // a sequence matches no text if one part matches none; alternatives, if all parts match none
    bool matches_nothing = kind == EXPR_CAT ? e->n < l->n : e->n == 0;
    free(l->v);
    *l = (struct exprs){0};
    if (matches_nothing) return NULL;
    return e->n == 1 ? e->kids[0] : e;
}

/* Merges adjacent texts into one, so that a literal of several characters is one text; removes
 * empty texts. */
static void exprs_merge_texts(struct grammar_builder *b, struct exprs *l) {
    int32_t n = 0;
    struct buf text = {0};
    for (int32_t i = 0, k; i < l->n; i = k) {
        text.len = 0;
        for (k = i; k < l->n && l->v[k] && l->v[k]->kind == EXPR_TEXT; k++)
            buf_add(&text, l->v[k]->text, (size_t)l->v[k]->n);
        bool empty = k > i && text.len == 0 && l->n > 1;
        if (!empty) l->v[n++] = k > i + 1 ? expr_text(b, text.data, text.len) : l->v[i];
        k = MAX(k, i + 1);
    }
    buf_release(&text);
    if (n == 0) l->v[n++] = expr_puts(b, "");
    l->n = n;
}

struct expr *expr_cat(struct grammar_builder *b, struct exprs *l) {
    if (l->n == 0) exprs_add(l, expr_puts(b, ""));
    exprs_merge_texts(b, l);
    return expr_list(b, EXPR_CAT, l);
}

struct expr *expr_alt(struct grammar_builder *b, struct exprs *l) {
    return expr_list(b, EXPR_ALT, l);
}

/* NULL ends the arguments, so an expression that matches nothing (NULL) cannot be passed. */
struct expr *expr_cat_of(struct grammar_builder *b, ...) {
    struct exprs l = {0};
    va_list ap;
    va_start(ap, b);
    for (struct expr *e; (e = va_arg(ap, struct expr *)) != NULL;) exprs_add(&l, e);
    va_end(ap);
    return expr_cat(b, &l);
}

struct expr *expr_alt_of(struct grammar_builder *b, ...) {
    struct exprs l = {0};
    va_list ap;
    va_start(ap, b);
    for (struct expr *e; (e = va_arg(ap, struct expr *)) != NULL;) exprs_add(&l, e);
    va_end(ap);
    return expr_alt(b, &l);
}

struct expr *expr_optional(struct grammar_builder *b, struct expr *e) {
    return expr_repeat(b, e, 0, 1);
}

/* the network */

/* While expressions are compiled, the edges of a node are a linked list. */
struct linked_edge {
    struct grammar_edge edge;
    int32_t next;
};
struct network {
    struct grammar_builder *b;
    struct linked_edge *edges;
    int32_t *first, *last; /* [n_nodes] lists of edges in order of creation, -1: empty */
    int32_t n_nodes, cap_nodes, n_edges, cap_edges;
    struct error *err;
    bool failed; /* out of memory, see `err`; later additions are discarded */
};

/* True if the network is too large or out of memory. Every loop whose length depends on the source
 * calls this function. */
static bool network_full(const struct network *w) {
    int32_t max_nodes = GRAMMAR_MAX_NODES / build_budget_divisor;
    return w->failed || over_build_budget(w->n_nodes > max_nodes || w->n_edges > 4 * max_nodes);
}

/* Reallocates an array for `cap` elements; returns it unchanged on error. */
static void *network_realloc(struct network *w, void *v, int32_t cap, size_t size) {
    void *grown = w->failed ? NULL : try_realloc(v, (size_t)cap * size, w->err);
    w->failed |= !grown;
    return grown ? grown : v;
}

static int32_t node_new(struct network *w) {
    if (w->n_nodes == w->cap_nodes) {
        int32_t cap = w->cap_nodes ? 2 * w->cap_nodes : 256;
        w->first = network_realloc(w, w->first, cap, sizeof *w->first);
        w->last = network_realloc(w, w->last, cap, sizeof *w->last);
        if (w->failed) return 0;
        w->cap_nodes = cap;
    }
    w->first[w->n_nodes] = w->last[w->n_nodes] = -1;
    return w->n_nodes++;
}

static void edge_add(struct network *w, int32_t from, struct grammar_edge edge) {
    if (w->failed) return;
    if (w->n_edges == w->cap_edges) {
        int32_t cap = w->cap_edges ? 2 * w->cap_edges : 256;
        w->edges = network_realloc(w, w->edges, cap, sizeof *w->edges);
        if (w->failed) return;
        w->cap_edges = cap;
    }
    int32_t id = w->n_edges++;
    w->edges[id] = (struct linked_edge){edge, -1};
    if (w->last[from] < 0)
        w->first[from] = id;
    else
        w->edges[w->last[from]].next = id;
    w->last[from] = id;
}

static void edge_add_byte(struct network *w, int32_t from, int32_t to, uint8_t lo, uint8_t hi) {
    edge_add(w, from, (struct grammar_edge){to, EDGE_NO_CALL, lo, hi});
}

static void edge_add_epsilon(struct network *w, int32_t from, int32_t to) {
    edge_add(w, from, (struct grammar_edge){to, EDGE_NO_CALL, 1, 0});
}

/* A node whose only edge reads a byte in [lo, hi] and leads to `to`. Characters that end with the
 * same bytes share it. */
struct utf8_suffix {
    int32_t node, to;
    uint8_t lo, hi;
};
struct utf8_suffixes {
    struct utf8_suffix *v;
    int32_t n, cap;
};

static int32_t suffix_find_or_add(struct network *w, struct utf8_suffixes *s, int32_t to,
                                  uint8_t lo, uint8_t hi) {
    for (int32_t i = s->n - 1; i >= 0; i--)
        if (s->v[i].to == to && s->v[i].lo == lo && s->v[i].hi == hi) return s->v[i].node;
    if (s->n == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 32;
        s->v = xrealloc(s->v, (size_t)s->cap * sizeof *s->v);
    }
    int32_t node = node_new(w);
    edge_add_byte(w, node, to, lo, hi);
    s->v[s->n++] = (struct utf8_suffix){node, to, lo, hi};
    return node;
}

/*
 * Splits the code points [lo, hi] into parts whose UTF-8 bytes have one range per position: first
 * by the length of the sequence, then so that all bytes after the first byte that differs have
 * their full range.
 */
static void range_compile(struct network *w, struct utf8_suffixes *s, uint32_t lo, uint32_t hi,
                          int32_t from, int32_t to) {
    static const uint32_t last_of_length[] = {0x7F, 0x7FF, 0xFFFF};
    for (int i = 0; i < 3; i++)
        if (lo <= last_of_length[i] && hi > last_of_length[i]) {
            range_compile(w, s, lo, last_of_length[i], from, to);
            lo = last_of_length[i] + 1;
        }
    for (int i = 1; i < 4 && hi > 0x7F; i++) { // i: number of bytes after the one that differs
        uint32_t tail = (1u << (6 * i)) - 1;
        if ((lo & ~tail) == (hi & ~tail)) continue;
        if (lo & tail) {
            range_compile(w, s, lo, lo | tail, from, to);
            lo = (lo | tail) + 1;
        }
        if ((hi & tail) != tail) {
            if (lo < (hi & ~tail)) range_compile(w, s, lo, (hi & ~tail) - 1, from, to);
            lo = MAX(lo, hi & ~tail);
        }
    }
    uint8_t a[4], z[4];
    int n = utf8_put(lo, a);
    utf8_put(hi, z);
    for (int i = n - 1; i > 0; i--) to = suffix_find_or_add(w, s, to, a[i], z[i]);
    edge_add_byte(w, from, to, a[0], z[0]);
}

/* Compiles a set. Characters with the same last bytes share nodes. */
static void set_compile(struct network *w, const struct expr *e, int32_t from, int32_t to) {
    struct utf8_suffixes s = {0};
    for (int32_t i = 0; i < e->n; i++)
        range_compile(w, &s, e->range[i].lo, e->range[i].hi, from, to);
    free(s.v);
}

static int text_compare(const void *a, const void *b) {
    const struct expr *x = *(struct expr *const *)a, *y = *(struct expr *const *)b;
    int d = memcmp(x->text, y->text, (size_t)MIN(x->n, y->n));
    return d ? d : (x->n > y->n) - (x->n < y->n);
}

/* Compiles sorted texts, which have their first `depth` bytes in common, to a trie from node
 * `from`, where these bytes have been read. */
static void texts_compile(struct network *w, struct expr **v, int32_t n, int32_t depth,
                          int32_t from, int32_t to) {
    while (n > 0 && v[0]->n == depth) { // the prefix itself and its duplicates
        edge_add_epsilon(w, from, to);
        do v++, n--;
        while (n > 0 && v[0]->n == depth);
    }
    for (int32_t i = 0, k; i < n; i = k) {
        uint8_t byte = (uint8_t)v[i]->text[depth];
        for (k = i + 1; k < n && (uint8_t)v[k]->text[depth] == byte; k++) {}
        int32_t p = depth, node = from;
        // v[i..k) have the first p bytes in common; the texts are sorted, so compare the first and
        // the last
        do {
            int32_t next = p + 1 == v[i]->n && k == i + 1 ? to : node_new(w);
            edge_add_byte(w, node, next, (uint8_t)v[i]->text[p], (uint8_t)v[i]->text[p]);
            node = next;
            p++;
        } while (p < v[i]->n && p < v[k - 1]->n && v[i]->text[p] == v[k - 1]->text[p]);
        if (node != to && !network_full(w)) texts_compile(w, v + i, k - i, p, node, to);
    }
}

static void expr_compile(struct network *w, const struct expr *e, int32_t from, int32_t to);

/* Compiles alternatives. Texts share their prefixes, so that ten thousand words begin with one
 * node. */
static void alt_compile(struct network *w, const struct expr *e, int32_t from, int32_t to) {
    struct expr **texts = xmalloc((size_t)e->n * sizeof *texts);
    int32_t n = 0;
    for (int32_t i = 0; i < e->n; i++) {
        if (e->kids[i]->kind == EXPR_TEXT)
            texts[n++] = e->kids[i];
        else
            expr_compile(w, e->kids[i], from, to);
    }
    if (n > 1) qsort(texts, (size_t)n, sizeof *texts, text_compare);
    texts_compile(w, texts, n, 0, from, to);
    free(texts);
}

/* x{2,4} is x x (x (x)?)?: each optional copy may be skipped to the end. x{2,} is x x x*. */
static void repeat_compile(struct network *w, const struct expr *e, int32_t from, int32_t to) {
    int32_t copies = MAX(e->min, e->max), node = from;
    for (int32_t i = 0; i < copies && !network_full(w); i++) {
        if (i >= e->min) edge_add_epsilon(w, node, to);
        int32_t next = i + 1 == copies && e->max >= 0 ? to : node_new(w);
        expr_compile(w, e->kids[0], node, next);
        node = next;
    }
    if (copies == 0 && e->max == 0) edge_add_epsilon(w, from, to);
    if (e->max >= 0) return;
    // the loop has a separate node, because other edges of `from` or `to` must not enter it
    int32_t loop = node_new(w);
    edge_add_epsilon(w, node, loop);
    expr_compile(w, e->kids[0], loop, loop);
    edge_add_epsilon(w, loop, to);
}

/* Adds paths from `from` to `to` that read e. Adds no edge that leads into `from` or out of `to`.
 */
static void expr_compile(struct network *w, const struct expr *e, int32_t from, int32_t to) {
    if (network_full(w)) return;
    switch (e->kind) {
    case EXPR_TEXT:
        texts_compile(w, (struct expr *[]){(struct expr *)(uintptr_t)e}, 1, 0, from, to);
        break;
    case EXPR_SET:
        set_compile(w, e, from, to);
        break;
    case EXPR_CAT:
        for (int32_t i = 0; i < e->n; i++) {
            int32_t next = i + 1 == e->n ? to : node_new(w);
            expr_compile(w, e->kids[i], from, next);
            from = next;
        }
        break;
    case EXPR_ALT:
        alt_compile(w, e, from, to);
        break;
    case EXPR_REPEAT:
        repeat_compile(w, e, from, to);
        break;
    case EXPR_RULE:
        edge_add(w, from, (struct grammar_edge){to, e->rule, 1, 0});
        break;
    }
}

/* Compiles the body of every rule into paths from its node `start` to its node `end`. */
static int rules_compile(struct network *w, struct error *err) {
    for (int32_t i = 0; i < w->b->n_rules; i++) {
        struct grammar_rule *r = &w->b->rules[i];
        CHECK(r->defined);
        r->start = node_new(w);
        r->end = node_new(w);
        if (r->body) expr_compile(w, r->body, r->start, r->end);
        if (w->failed) return err->code;
        if (network_full(w)) {
            return error_set(err, ERR_MEMORY,
                             "grammar is too large: it takes more than %d states; shorten its "
                             "repetitions",
                             GRAMMAR_MAX_NODES / build_budget_divisor);
        }
    }
    return OK;
}

/* Reserves memory in the grammar's arena for grammar_copy_network and grammar_min_lengths. */
static int grammar_reserve(struct grammar *g, const struct network *w, struct error *err) {
    size_t node = 2 * sizeof(int32_t) + 2;
    return arena_reserve(&g->arena,
                         (size_t)(w->n_nodes + 1) * node +
                             (size_t)(w->n_edges + 1) * sizeof(struct grammar_edge) +
                             (size_t)w->b->n_rules * sizeof(struct grammar_rule) + 6 * 64,
                         err);
}

/* Copies the network into the grammar: the lists of edges become one array. */
static void grammar_copy_network(struct grammar *g, const struct network *w) {
    int32_t *begin = arena_alloc(&g->arena, (size_t)(w->n_nodes + 1) * sizeof *begin), n = 0;
    struct grammar_edge *edges = arena_alloc(&g->arena, (size_t)(w->n_edges + 1) * sizeof *edges);
    uint8_t *is_end = arena_alloc(&g->arena, (size_t)w->n_nodes);
    uint8_t *reads = arena_alloc(&g->arena, (size_t)w->n_nodes);
    for (int32_t i = 0; i < w->n_nodes; i++) {
        begin[i] = n;
        for (int32_t k = w->first[i]; k >= 0; k = w->edges[k].next) edges[n++] = w->edges[k].edge;
    }
    begin[w->n_nodes] = n;
    struct grammar_rule *rules = arena_alloc(&g->arena, (size_t)w->b->n_rules * sizeof *rules);
    memcpy(rules, w->b->rules, (size_t)w->b->n_rules * sizeof *rules);
    for (int32_t i = 0; i < w->b->n_rules; i++) is_end[rules[i].end] = 1;
    for (int32_t i = 0; i < w->n_nodes; i++)
        for (int32_t k = begin[i]; k < begin[i + 1]; k++) reads[i] |= edges[k].lo <= edges[k].hi;
    g->n_nodes = w->n_nodes;
    g->n_rules = w->b->n_rules;
    g->edge_begin = begin;
    g->edges = edges;
    g->rules = rules;
    g->is_end = is_end;
    g->reads = reads;
}

/* checks and lengths */

/* Minimum number of bytes to the end of the rule along this edge. */
static int32_t edge_length(const struct grammar *g, const int32_t *min_len,
                           const struct grammar_edge *e) {
    int32_t len = e->lo <= e->hi ? 1 : e->rule >= 0 ? min_len[g->rules[e->rule].start] : 0;
    return MIN(len + min_len[e->to], GRAMMAR_INFINITE_LENGTH);
}

/* For every node, the edges whose length depends on its min_len: edges to it, and calls of the rule
 * that starts at it. */
struct incoming_edges {
    int32_t *begin; /* [n_nodes + 1] */
    int32_t *edge, *from;
};

static void incoming_edges_fill(const struct grammar *g, struct incoming_edges *u, bool fill) {
    for (int32_t i = 0; i < g->n_nodes; i++)
        for (int32_t k = g->edge_begin[i]; k < g->edge_begin[i + 1]; k++) {
            const struct grammar_edge *e = &g->edges[k];
            int32_t targets[2] = {e->to, e->rule >= 0 ? g->rules[e->rule].start : -1};
            for (int j = 0; j < 2 && targets[j] >= 0; j++) {
                int32_t index = u->begin[targets[j]]++;
                if (fill) u->edge[index] = k, u->from[index] = i;
            }
        }
}

static struct incoming_edges incoming_edges_new(const struct grammar *g, struct arena *scratch) {
    struct incoming_edges u = {
        .begin = arena_alloc(scratch, ((size_t)g->n_nodes + 2) * sizeof *u.begin)};
    int32_t n = 0;
    incoming_edges_fill(g, &u, false);
    for (int32_t i = 0; i <= g->n_nodes; i++) {
        int32_t count = u.begin[i];
        u.begin[i] = n;
        n += count;
    }
    u.edge = arena_alloc(scratch, ((size_t)n + 1) * sizeof *u.edge);
    u.from = arena_alloc(scratch, ((size_t)n + 1) * sizeof *u.from);
    incoming_edges_fill(g, &u, true); // begin[i] is now the end of node i's edges
    memmove(u.begin + 1, u.begin, (size_t)g->n_nodes * sizeof *u.begin);
    u.begin[0] = 0;
    return u;
}

/* Computes min_len as a least fixed point: it starts at the ends of rules, and a node whose value
 * decreases updates the nodes that depend on it. */
static int grammar_min_lengths(struct grammar *g, struct error *err) {
    struct arena scratch = {0};
    size_t nodes = (size_t)g->n_nodes + 2, edges = (size_t)g->edge_begin[g->n_nodes] + 1;
    size_t size = nodes * (2 * sizeof(int32_t) + 1) + edges * 4 * sizeof(int32_t) + 5 * 64;
    if (arena_reserve(&scratch, size, err) != OK) return err->code;
    int32_t *min_len = arena_alloc(&g->arena, (size_t)g->n_nodes * sizeof *min_len);
    struct incoming_edges incoming =
        incoming_edges_new(g, &scratch); // an edge is in at most two of the lists
    int32_t *queue = arena_alloc(&scratch, (size_t)g->n_nodes * sizeof *queue), head = 0, n = 0;
    bool *queued = arena_alloc(&scratch, (size_t)g->n_nodes);
    for (int32_t i = 0; i < g->n_nodes; i++) {
        min_len[i] = g->is_end[i] ? 0 : GRAMMAR_INFINITE_LENGTH;
        if (g->is_end[i]) queue[n++] = i, queued[i] = true;
    }
    for (; n > 0; n--) { // `queue` is a ring buffer; no node is in it twice
        int32_t node = queue[head];
        head = head + 1 == g->n_nodes ? 0 : head + 1;
        queued[node] = false;
        for (int32_t k = incoming.begin[node]; k < incoming.begin[node + 1]; k++) {
            int32_t len = edge_length(g, min_len, &g->edges[incoming.edge[k]]),
                    from = incoming.from[k];
            if (len >= min_len[from]) continue;
            min_len[from] = len;
            if (queued[from]) continue;
            queued[from] = true;
            queue[(head + n - 1) % g->n_nodes] = from;
            n++;
        }
    }
    g->min_len = min_len;
    arena_release(&scratch);
    return OK;
}

/* Left recursion is a cycle in the graph of first calls. There is one exactly if some rules are
 * left after those without remaining first calls have been removed repeatedly. */

/* `caller` may call `callee` before it reads a byte. */
struct first_call {
    int32_t caller, callee;
};
struct first_calls {
    struct first_call *v;
    int32_t n, cap;
};

static void first_calls_add(struct first_calls *l, int32_t caller, int32_t callee) {
    if (l->n == l->cap) {
        l->cap = l->cap ? 2 * l->cap : 64;
        l->v = xrealloc(l->v, (size_t)l->cap * sizeof *l->v);
    }
    l->v[l->n++] = (struct first_call){caller, callee};
}

/* Adds the first calls of one rule. `seen` and `todo` [n_nodes] are scratch; rules share no nodes.
 */
static void first_calls_collect(const struct grammar *g, int32_t rule, uint8_t *seen, int32_t *todo,
                                struct first_calls *l) {
    int32_t n = 0;
    todo[n++] = g->rules[rule].start;
    while (n > 0) {
        int32_t node = todo[--n];
        for (int32_t k = g->edge_begin[node]; k < g->edge_begin[node + 1]; k++) {
            const struct grammar_edge *e = &g->edges[k];
            if (e->lo <= e->hi) continue;
            if (e->rule >= 0) first_calls_add(l, rule, e->rule);
            if (e->rule >= 0 && g->min_len[g->rules[e->rule].start] > 0) continue;
            if (!seen[e->to]) seen[e->to] = 1, todo[n++] = e->to;
        }
    }
}

static int first_call_compare(const void *a, const void *b) {
    const struct first_call *x = a, *y = b;
    if (x->callee != y->callee) return (x->callee > y->callee) - (x->callee < y->callee);
    return (x->caller > y->caller) - (x->caller < y->caller);
}

/* Removes rules without remaining first calls until none can be removed. n_open[r] is then the
 * number of first calls of rule r that lead into a cycle. */
static void acyclic_rules_remove(const struct first_calls *l, int32_t *n_open, int32_t n_rules) {
    int32_t *begin = xcalloc((size_t)n_rules + 1, sizeof *begin);
    int32_t *todo = xmalloc((size_t)n_rules * sizeof *todo), n = 0;
    for (int32_t i = 0; i < l->n; i++) begin[l->v[i].callee + 1]++, n_open[l->v[i].caller]++;
    for (int32_t i = 0; i < n_rules; i++) begin[i + 1] += begin[i];
    for (int32_t i = 0; i < n_rules; i++)
        if (n_open[i] == 0) todo[n++] = i;
    while (n > 0) {
        int32_t callee = todo[--n];
        for (int32_t i = begin[callee]; i < begin[callee + 1]; i++)
            if (--n_open[l->v[i].caller] == 0) todo[n++] = l->v[i].caller;
    }
    free(begin);
    free(todo);
}

/* The name of a rule in the cycle that `rule` leads into. */
static const char *cycle_rule_name(const struct grammar *g, const struct first_calls *l,
                                   const int32_t *n_open, int32_t rule) {
    int32_t *next = xcalloc((size_t)g->n_rules, sizeof *next);
    const char *name = NULL;
    for (int32_t i = 0; i < l->n; i++)
        if (n_open[l->v[i].callee] > 0) next[l->v[i].caller] = l->v[i].callee;
    for (int32_t i = 0; i < g->n_rules; i++) rule = next[rule]; // now it is in the cycle
    for (int32_t i = 0; i < g->n_rules && !name; i++, rule = next[rule]) name = g->rules[rule].name;
    free(next);
    return name ? name : "a repeated group";
}

/* Refuses a grammar in which a rule may call itself before it reads a byte, because it would push
 * frames without end. */
static int grammar_check_left_recursion(const struct grammar *g, struct error *err) {
    struct first_calls l = {0};
    uint8_t *seen = xcalloc((size_t)g->n_nodes, 1);
    int32_t *todo = xmalloc((size_t)g->n_nodes * sizeof *todo);
    int32_t *n_open = xcalloc((size_t)g->n_rules, sizeof *n_open);
    for (int32_t i = 0; i < g->n_rules; i++) first_calls_collect(g, i, seen, todo, &l);
    if (l.n > 1) qsort(l.v, (size_t)l.n, sizeof *l.v, first_call_compare);
    acyclic_rules_remove(&l, n_open, g->n_rules);
    int rc = OK;
    for (int32_t i = 0; i < g->n_rules && rc == OK; i++)
        if (n_open[i] > 0)
            rc = error_set(err, ERR_FORMAT,
                           "'%s' refers to itself before it reads anything (left recursion); "
                           "put the text that comes first in front, or use repetition",
                           cycle_rule_name(g, &l, n_open, i));
    free(l.v);
    free(seen);
    free(todo);
    free(n_open);
    return rc;
}

/* Computes byte classes: ranges of bytes that no edge separates. A JSON grammar has about thirty
 * classes, so a state's row of next states is short. */
static void grammar_compute_byte_classes(struct grammar *g) {
    bool begins[257] = {[0] = true};
    for (int32_t k = 0; k < g->edge_begin[g->n_nodes]; k++) {
        const struct grammar_edge *e = &g->edges[k];
        if (e->lo <= e->hi) begins[e->lo] = begins[e->hi + 1] = true;
    }
    for (int i = 0; i < 256; i++) {
        if (begins[i]) g->class_byte[g->n_classes++] = (uint8_t)i;
        g->class_of[i] = (uint8_t)(g->n_classes - 1);
    }
}

/* Refuses a grammar whose start state exceeds the limits of a step, because some of its texts could
 * never be generated. */
static int grammar_check_start(const struct grammar *g, struct error *err) {
    struct grammar_machine *m = grammar_machine_new(g, NULL, 0);
    bool limited = grammar_machine_hit_limit(m);
    grammar_machine_free(m);
    if (!limited) return OK;
    return error_set(err, ERR_MEMORY, "grammar is too ambiguous: it has too many ways to begin");
}

static void grammar_set_identity(struct grammar *g, const char *kind, const char *text,
                                 size_t len) {
    struct sha256 h;
    sha256_init(&h);
    sha256_update(&h, kind, strlen(kind) + 1);
    sha256_update(&h, text, len);
    sha256_final(&h, g->hash);
    char *copy = arena_alloc(&g->arena, len + 1);
    memcpy(copy, text, len);
    copy[len] = 0;
    g->kind = kind;
    g->source = copy;
    g->source_len = len;
}

struct grammar *grammar_build(struct grammar_builder *b, int32_t root, const char *kind,
                              const char *text, size_t len, struct error *err) {
    struct network w = {.b = b, .err = err};
    struct grammar *g = NULL;
    if (rules_compile(&w, err) != OK) goto out;
    g = xcalloc(1, sizeof *g);
    g->root = root;
    int rc = grammar_reserve(g, &w, err);
    if (rc == OK) grammar_copy_network(g, &w);
    if (rc == OK) rc = grammar_min_lengths(g, err);
    if (rc == OK) {
        grammar_compute_byte_classes(g);
        grammar_set_identity(g, kind, text, len);
        rc = grammar_check_left_recursion(g, err);
    }
    if (rc == OK && grammar_min_length(g) >= GRAMMAR_INFINITE_LENGTH)
        rc = error_set(err, ERR_FORMAT, "no text can match this %s", kind);
    if (rc == OK) rc = grammar_check_start(g, err);
    if (rc != OK) {
        grammar_free(g);
        g = NULL;
    } else {
        for (int32_t i = 0; i < g->n_rules; i++) // grammar_builder_release frees the names
            ((struct grammar_rule *)(uintptr_t)g->rules)[i].name = NULL;
    }
out:
    free(w.edges);
    free(w.first);
    free(w.last);
    grammar_builder_release(b);
    return g;
}

void grammar_free(struct grammar *g) {
    if (!g) return;
    arena_release(&g->arena);
    free(g);
}

size_t grammar_bytes(const struct grammar *g) {
    return sizeof *g + g->arena.used;
}

const char *grammar_hash(const struct grammar *g) {
    return g->hash;
}

const char *grammar_kind(const struct grammar *g) {
    return g->kind;
}

const char *grammar_source(const struct grammar *g, size_t *len) {
    *len = g->source_len;
    return g->source;
}

int32_t grammar_min_length(const struct grammar *g) {
    return g->min_len[g->rules[g->root].start];
}

struct grammar *grammar_new_choices(const char *const *texts, int n, struct error *err) {
    struct grammar_builder b = {0};
    struct exprs l = {0};
    struct buf all = {0};
    for (int i = 0; i < n; i++) {
        buf_add(&all, texts[i], strlen(texts[i]) + 1);
        exprs_add(&l, expr_puts(&b, texts[i]));
    }
    int32_t root = grammar_builder_add_rule(&b, "choices");
    grammar_builder_define_rule(&b, root, expr_alt(&b, &l));
    struct grammar *g = NULL;
    if (all.len <= GRAMMAR_MAX_TEXT) {
        g = grammar_build(&b, root, GRAMMAR_KIND_CHOICES, all.data ? all.data : "", all.len, err);
    } else {
        grammar_builder_release(&b);
        error_set(err, ERR_MEMORY, "choices of %zu bytes are above the limit of %d", all.len,
                  GRAMMAR_MAX_TEXT);
    }
    buf_release(&all);
    return g;
}

static struct grammar *grammar_from_choices_source(const char *text, size_t len,
                                                   struct error *err) {
    struct strings v = {0};
    struct grammar *g = NULL;
    if (len > 0 && text[len - 1] != 0) {
        error_set(err, ERR_FORMAT, "list of choices has no end");
        return NULL;
    }
    for (size_t pos = 0; pos < len; pos += strlen(text + pos) + 1) strings_add(&v, text + pos);
    g = grammar_new_choices((const char *const *)v.v, v.n, err);
    strings_release(&v);
    return g;
}

struct grammar *grammar_from_source(const char *kind, const char *text, size_t len,
                                    struct error *err) {
    if (strcmp(kind, GRAMMAR_KIND_REGEX) == 0) return grammar_new_regex(text, len, err);
    if (strcmp(kind, GRAMMAR_KIND_GBNF) == 0) return grammar_new_gbnf(text, len, err);
    if (strcmp(kind, GRAMMAR_KIND_JSON_SCHEMA) == 0)
        return grammar_new_json_schema(text, len, false, err);
    if (strcmp(kind, GRAMMAR_KIND_COMPACT_JSON_SCHEMA) == 0)
        return grammar_new_json_schema(text, len, true, err);
    if (strcmp(kind, GRAMMAR_KIND_JSON_VALUE) == 0)
        return grammar_from_json_value_source(text, len, err);
    if (strcmp(kind, GRAMMAR_KIND_CHOICES) == 0) return grammar_from_choices_source(text, len, err);
    error_set(err, ERR_FORMAT, "no kind of grammar is called '%.40s'", kind);
    return NULL;
}
