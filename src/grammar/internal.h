/*
 * grammar_internal: what the grammar's source files share. Private to this folder.
 *
 * A front end (grammar_regex.c, grammar_gbnf.c, schema.c) makes rules out of expressions with a
 * `struct builder`; grammar_build.c turns them into a recursive transition network, and grammar.c
 * walks it. In the network every rule is an automaton over bytes with three kinds of edges: read a
 * byte in [lo, hi], go on for nothing, or call a rule and return to `to`.
 */
#ifndef SHOAL_GRAMMAR_INTERNAL_H
#define SHOAL_GRAMMAR_INTERNAL_H

#include "grammar/grammar.h"

/* Limits: a grammar comes from outside, its size must not hurt. */
enum {
    GRAMMAR_MAX_TEXT = 1 << 18,  /* bytes of source */
    GRAMMAR_MAX_NODES = 1 << 17, /* of the network */
    GRAMMAR_MAX_REPEAT = 65536,  /* {m,n} */
    GRAMMAR_MAX_NAMES = 8192,    /* named rules, references */
    GRAMMAR_MAX_NESTING = 200,   /* groups in groups, schemas in schemas */
};
#define GRAMMAR_MAX_ARENA ((size_t)32 << 20) /* bytes of expressions */
#define GRAMMAR_NEVER (INT32_MAX / 4)        /* a length that no text has */

struct range {
    uint32_t lo, hi;
};
/* Code points; zero-initialise. Ranges may overlap and come in any order. */
struct ranges {
    struct range *v;
    int32_t n, cap;
};
void ranges_add(struct ranges *r, uint32_t lo, uint32_t hi);
void ranges_normalise(struct ranges *r); /* sorted, merged, without surrogates */
void ranges_negate(struct ranges *r);
void ranges_release(struct ranges *r);
/* Adds \p{name}; false when the name is unknown. */
bool ranges_add_property(struct ranges *r, const char *name, size_t len);

/* Expressions are trees in the builder's arena; a NULL expression matches nothing. */
enum expr_kind { EXPR_TEXT, EXPR_SET, EXPR_CAT, EXPR_ALT, EXPR_REPEAT, EXPR_RULE };
struct expr {
    enum expr_kind kind;
    int32_t n;           /* TEXT: bytes; SET: ranges; CAT, ALT: kids */
    int32_t min, max;    /* REPEAT; max -1: no end */
    int32_t rule;        /* RULE */
    int32_t cost;        /* nodes that it takes, about */
    const char *text;    /* TEXT */
    struct range *range; /* SET */
    struct expr **kids;  /* CAT, ALT; REPEAT: kids[0] */
};
/* A growing list of expressions: kids in the making. */
struct exprs {
    struct expr **v;
    int32_t n, cap;
};
void exprs_add(struct exprs *l, struct expr *e);

struct rule {
    const char *name; /* NULL: made by the builder */
    struct expr *body;
    bool defined;
    int32_t start, end; /* nodes */
};
struct builder {
    struct arena arena;
    struct rule *rules;
    int32_t n_rules, cap_rules;
    int32_t *names; /* open addressing from a name's hash to its rule + 1 */
    uint64_t names_mask;
    int32_t n_names;
};
void builder_release(struct builder *b);
/* Front ends ask now and then, and refuse the source. */
bool builder_full(const struct builder *b);
/* A new rule; `name` may be NULL and is copied. */
int32_t builder_rule(struct builder *b, const char *name);
int32_t builder_find(const struct builder *b, const char *name); /* -1: none */
void builder_define(struct builder *b, int32_t rule, struct expr *body);

struct expr *expr_text(struct builder *b, const char *p, size_t n);
struct expr *expr_puts(struct builder *b, const char *s);
struct expr *expr_set(struct builder *b, struct ranges *r); /* normalises and releases r */
struct expr *expr_rule(struct builder *b, int32_t rule);
struct expr *expr_repeat(struct builder *b, struct expr *e, int32_t min, int32_t max);
/* Take the list's kids and release it. */
struct expr *expr_cat(struct builder *b, struct exprs *l);
struct expr *expr_alt(struct builder *b, struct exprs *l);
/* The same for a few: the last argument is NULL. */
struct expr *expr_seq(struct builder *b, ...) __attribute__((sentinel));
struct expr *expr_any(struct builder *b, ...) __attribute__((sentinel));
struct expr *expr_optional(struct builder *b, struct expr *e);

struct edge {
    int32_t to;
    int32_t rule;   /* CALL_NONE, or the rule to call before `to` */
    uint8_t lo, hi; /* a byte of this range; lo > hi: none is read */
};
#define CALL_NONE (-1)

struct grammar {
    struct arena arena;
    int32_t n_nodes, n_rules, root;
    const int32_t *edge_begin; /* [n_nodes + 1] */
    const struct edge *edges;
    const struct rule *rules; /* names only while it is compiled */
    const int32_t *rest;     /* [n_nodes] bytes of the shortest way to the end of the node's rule */
    const uint8_t *is_end;   /* [n_nodes] the end of its rule */
    const uint8_t *reads;    /* [n_nodes] has an edge that reads */
    uint8_t class_of[256];   /* bytes that no edge tells apart share a class */
    uint8_t class_byte[256]; /* [n_classes] the first byte of each, ascending */
    int32_t n_classes;
    char hash[HASH_LEN];
    const char *kind, *source;
    size_t source_len;
};
#define REGEX_KIND "regular expression"
#define GBNF_KIND "grammar"
#define SCHEMA_KIND "JSON schema"
#define COMPACT_KIND "compact JSON schema"
#define CHOICES_KIND "list of choices"

/* Compiles from `root` and releases the builder in every case. `kind`, one of those above, and the
 * source make the hash. */
struct grammar *grammar_build(struct builder *b, int32_t root, const char *kind, const char *text,
                              size_t len, struct error *err);

/* One code point at p[0..left), or -1; *n is its length. */
int32_t utf8_get(const char *p, size_t left, int *n);
/* Refuses what is too long or no UTF-8. `what` is "regular expression" ... */
int grammar_check_text(const char *what, const char *text, size_t len, struct error *err);

/*
 * grammar_regex.c. In JSON-string mode the language is that of the strings whose characters match,
 * each in its canonical JSON spelling (without the quotes), and the pattern may match anywhere
 * unless anchored, as JSON schema says. NULL on error.
 */
struct expr *regex_expr(struct builder *b, const char *text, size_t len, bool json,
                        struct error *err);
/* A set of characters as they stand inside JSON quotes. Releases r. */
struct expr *expr_json_set(struct builder *b, struct ranges *r);

#endif
