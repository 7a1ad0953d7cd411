/*
 * grammar: declarations shared by the grammar's source files. Private to this folder.
 *
 * A front end (regex.c, gbnf.c, json_schema.c) builds expressions and rules with a `struct
 * grammar_builder`. build.c compiles them into a recursive transition network, and grammar.c runs
 * it. In the network every rule is an automaton over bytes with three kinds of edges: read a byte
 * in [lo, hi], move without reading (epsilon), or call a rule and return to `to`.
 */
#ifndef SHOAL_GRAMMAR_INTERNAL_H
#define SHOAL_GRAMMAR_INTERNAL_H

#include "grammar/grammar.h"

/* Limits: a grammar is untrusted input, so its size is bounded. */
enum {
    GRAMMAR_MAX_TEXT = 1 << 18,  /* bytes of source */
    GRAMMAR_MAX_NODES = 1 << 17, /* nodes of the network */
    GRAMMAR_MAX_REPEAT = 65536,  /* {m,n} */
    GRAMMAR_MAX_NAMES = 8192,    /* rules of a GBNF grammar; JSON schemas: four times as many */
    GRAMMAR_MAX_NESTING = 200,   /* groups in groups, schemas in schemas */
};
#define GRAMMAR_MAX_ARENA ((size_t)32 << 20)    /* bytes of expressions */
#define GRAMMAR_INFINITE_LENGTH (INT32_MAX / 4) /* longer than any text */

struct codepoint_range {
    uint32_t lo, hi;
};
/* Code points; zero-initialise. Ranges may overlap and are in any order until
 * codepoint_set_normalize. */
struct codepoint_set {
    struct codepoint_range *v;
    int32_t n, cap;
};
void codepoint_set_add(struct codepoint_set *r, uint32_t lo, uint32_t hi);
/* Sorts and merges the ranges and removes surrogates. */
void codepoint_set_normalize(struct codepoint_set *r);
void codepoint_set_negate(struct codepoint_set *r);
void codepoint_set_release(struct codepoint_set *r);
/* Adds the characters of the Unicode property \p{name}; false when the name is unknown. */
bool codepoint_set_add_property(struct codepoint_set *r, const char *name, size_t len);

/* Expressions are trees in the builder's arena. A NULL expression matches no text. */
enum expr_kind { EXPR_TEXT, EXPR_SET, EXPR_CAT, EXPR_ALT, EXPR_REPEAT, EXPR_RULE };
struct expr {
    enum expr_kind kind;
    int32_t n;                     /* TEXT: bytes; SET: ranges; CAT, ALT: kids */
    int32_t min, max;              /* REPEAT; max -1: unlimited */
    int32_t rule;                  /* RULE */
    int32_t cost;                  /* approximate number of nodes that it compiles to */
    const char *text;              /* TEXT */
    struct codepoint_range *range; /* SET */
    struct expr **kids;            /* CAT, ALT; REPEAT: kids[0] */
};
/* A growing list of expressions, used to build a CAT or ALT. */
struct exprs {
    struct expr **v;
    int32_t n, cap;
};
void exprs_add(struct exprs *l, struct expr *e);

struct grammar_rule {
    const char *name; /* NULL: a rule without a name */
    struct expr *body;
    bool defined;
    int32_t start, end; /* nodes */
};
struct grammar_builder {
    struct arena arena;
    struct grammar_rule *rules;
    int32_t n_rules, cap_rules;
    int32_t *names; /* hash table with open addressing: rule + 1, or 0 for a free slot */
    uint64_t names_mask;
    int32_t n_names;
};
void grammar_builder_release(struct grammar_builder *b);
/* True if the expressions need too much memory. Front ends call it while they parse and refuse the
 * source if it is true. */
bool grammar_builder_is_full(const struct grammar_builder *b);
/* A new rule; `name` may be NULL and is copied. */
int32_t grammar_builder_add_rule(struct grammar_builder *b, const char *name);
int32_t grammar_builder_find_rule(const struct grammar_builder *b, const char *name); /* or -1 */
void grammar_builder_define_rule(struct grammar_builder *b, int32_t rule, struct expr *body);

struct expr *expr_puts(struct grammar_builder *b, const char *s);
struct expr *expr_set(struct grammar_builder *b,
                      struct codepoint_set *r); /* normalises and releases r */
struct expr *expr_rule(struct grammar_builder *b, int32_t rule);
struct expr *expr_repeat(struct grammar_builder *b, struct expr *e, int32_t min, int32_t max);
/* A sequence and alternatives of the list's expressions. Both functions release the list. */
struct expr *expr_cat(struct grammar_builder *b, struct exprs *l);
struct expr *expr_alt(struct grammar_builder *b, struct exprs *l);
/* The same for expressions as arguments, of which the last is NULL. */
struct expr *expr_cat_of(struct grammar_builder *b, ...) __attribute__((sentinel));
struct expr *expr_alt_of(struct grammar_builder *b, ...) __attribute__((sentinel));
struct expr *expr_optional(struct grammar_builder *b, struct expr *e);

struct grammar_edge {
    int32_t to;
    int32_t rule;   /* EDGE_NO_CALL, or the rule to call before `to` */
    uint8_t lo, hi; /* reads a byte in [lo, hi]; lo > hi: reads no byte */
};
#define EDGE_NO_CALL (-1)

struct grammar {
    struct arena arena;
    int32_t n_nodes, n_rules, root;
    const int32_t *edge_begin; /* [n_nodes + 1] */
    const struct grammar_edge *edges;
    const struct grammar_rule *rules; /* names are valid during compilation only */
    const int32_t *min_len;           /* [n_nodes] minimum bytes to the end of the node's rule */
    const uint8_t *is_end;            /* [n_nodes] true at the end of its rule */
    const uint8_t *reads;             /* [n_nodes] true if an edge reads a byte */
    uint8_t class_of[256];   /* class of each byte; no edge distinguishes bytes of a class */
    uint8_t class_byte[256]; /* [n_classes] the first byte of each class, ascending */
    int32_t n_classes;
    char hash[HASH_LEN];
    const char *kind, *source;
    size_t source_len;
};
#define GRAMMAR_KIND_REGEX "regular expression"
#define GRAMMAR_KIND_GBNF "grammar"
#define GRAMMAR_KIND_JSON_SCHEMA "JSON schema"
#define GRAMMAR_KIND_COMPACT_JSON_SCHEMA "compact JSON schema"
#define GRAMMAR_KIND_JSON_VALUE "JSON schema of a value"
#define GRAMMAR_KIND_CHOICES "list of choices"

/* Compiles the rules, starting at `root`; always releases the builder. `kind` is one of
 * GRAMMAR_KIND_*; the hash covers the kind and the source. */
struct grammar *grammar_build(struct grammar_builder *b, int32_t root, const char *kind,
                              const char *text, size_t len, struct error *err);

/* A grammar of GRAMMAR_KIND_JSON_VALUE from its source, {schema, then}. */
struct grammar *grammar_from_json_value_source(const char *text, size_t len, struct error *err);

/* The code point at the beginning of p[0..left); *n receives its length in bytes. -1 if it is not
 * valid UTF-8. */
int32_t utf8_decode(const char *p, size_t left, int *n);
/* An error if the text is too long or not UTF-8. `what` names the text in the message ("regular
 * expression"). */
int grammar_check_text(const char *what, const char *text, size_t len, struct error *err);

/*
 * regex.c. With `json` the expression matches the contents of JSON strings whose characters match
 * the pattern, in their canonical JSON spelling without the quotes; unless it is anchored, the
 * pattern may match anywhere in the string, as JSON schema specifies. NULL on error.
 */
struct expr *regex_expr(struct grammar_builder *b, const char *text, size_t len, bool json,
                        struct error *err);
/* The characters of r as they are written in JSON strings, without U+0000; NULL for an empty set.
 * Releases r. */
struct expr *expr_json_set(struct grammar_builder *b, struct codepoint_set *r);

#endif
