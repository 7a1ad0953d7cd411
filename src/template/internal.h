/*
 * template: the declarations that the template engine's source files share. Private to this folder.
 *
 * jinja_parse.c converts source text to tokens and a tree. jinja.c evaluates the tree with values
 * (jinja_value.c, Python's semantics), strings (jinja_text.c), and filters, tests, methods and
 * functions (jinja_builtin.c).
 *
 * All memory is in the arena of one `struct jinja_ctx` and is released at once. An error is a
 * longjmp to the entry point (jinja_parse or jinja_render), so these functions neither clean up nor
 * return a code. Every operation whose time or memory is proportional to its input calls
 * jinja_alloc, jinja_add_steps, jinja_charge_bytes or jinja_charge_scan.
 */
#ifndef SHOAL_TEMPLATE_INTERNAL_H
#define SHOAL_TEMPLATE_INTERNAL_H

#include "template/template.h"

#include <setjmp.h>

#define JINJA_MAX_DEPTH 400 /* limit of nested expressions, blocks, macro calls and values */

/*
 * The state of one parse or one rendering, and its budget. A step is at most about 25 ns on a
 * processor of 2020. jinja_charge_bytes charges for bytes that are copied, jinja_charge_scan for
 * bytes or elements that are examined one by one. Every loop whose length a template or its
 * variables determine is charged before it starts, in each iteration, or at its end.
 *
 * Invariant: steps < next_check between charges; jinja_check_limits runs when steps reach
 * next_check.
 */
struct jinja_ctx {
    jmp_buf fail_jump;
    struct error *err;
    struct arena arena;
    char *block_pos; /* next free byte of the arena's current block, which has block_left bytes */
    size_t block_left, bytes, max_bytes;
    uint64_t steps, next_check, max_steps; /* next_check: steps at which limits are checked */
    bool (*stop)(void *ctx);               /* or NULL */
    void *stop_ctx;
    int depth, line;
};
/* Sets the error "line N: ..." and jumps to the entry point. */
_Noreturn void jinja_fail(struct jinja_ctx *w, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void *jinja_alloc(struct jinja_ctx *w, size_t size); /* zeroed, 16-byte aligned */
/* Sets the limits of a parse, or of a rendering until its variables are known. `stop` may be
 * NULL. */
void jinja_ctx_init(struct jinja_ctx *w, struct error *err, bool (*stop)(void *ctx), void *ctx);
void jinja_check_limits(struct jinja_ctx *w); /* fails at a limit, or if `stop` returns true */
void jinja_enter(struct jinja_ctx *w);        /* one level deeper; w->depth-- leaves the level */

static inline void jinja_add_steps(struct jinja_ctx *w, uint64_t steps) {
    w->steps += steps;
    if (w->steps >= w->next_check) jinja_check_limits(w);
}

static inline void jinja_charge_bytes(struct jinja_ctx *w, size_t bytes) {
    jinja_add_steps(w, 1 + bytes / 32);
}

static inline void jinja_charge_scan(struct jinja_ctx *w, size_t n) {
    jinja_add_steps(w, 1 + n / 8);
}

/* Returns v, or a larger copy of it, with memory for one more element of `size` bytes after the n
 * in v. */
void *jinja_grow(struct jinja_ctx *w, void *v, size_t n, size_t *cap, size_t size);

/* values */

struct str {
    const char *p;
    size_t n;
    const uint8_t *origins; /* [n], or NULL: all 0 */
};
#define STR(literal) ((struct str){literal, sizeof(literal) - 1, NULL})

enum value_kind {
    V_UNDEFINED,
    V_NONE,
    V_BOOL,
    V_INT,
    V_FLOAT,
    V_STR,
    V_MARKUP, /* result of `safe` and `escape`: can only be printed */
    V_LIST,
    V_DICT,
    V_NAMESPACE,
    V_LOOP,
    V_MACRO,
    V_METHOD,
    V_FUNCTION,
};
struct value {
    enum value_kind kind;
    union {
        int64_t i; /* bool too */
        double f;
        struct str s; /* for an undefined value: its name */
        struct list *list;
        struct dict *dict; /* namespace too */
        struct loop *loop;
        struct macro *macro;
        struct jinja_method *method;
        const struct function *function;
    };
};
/* Python's lists, tuples and other iterables. A generator is empty after its first iteration; a
 * view (of a dict) has a length but no index. */
enum list_kind { LIST, TUPLE, GENERATOR, VIEW, RANGE };
struct list {
    struct value *v;
    size_t n, cap;
    enum list_kind kind;
};
struct pair {
    struct value key, value;
};
struct dict_bucket {
    uint32_t pair_plus_1, hash_tag; /* index of the pair + 1, 0: free; upper half of the hash */
};
/* Pairs in insertion order; none is ever removed. Beyond a few pairs, `slots` is a hash table of
 * the first `hashed` pairs. The hash has a secret key per process, so that a caller cannot choose
 * keys that collide. Neither results nor the steps that are charged depend on the hash. */
struct dict {
    struct pair *v;
    size_t n, cap;
    struct dict_bucket *slots;
    size_t n_slots, hashed;  /* n_slots: a power of 2 */
    bool has_unhashable_key; /* some key cannot be hashed, so lookups compare with all keys */
    int message;             /* index in messages, or -1 */
};
struct jinja_method {
    struct value self;
    struct str name;
};
struct macro {
    const struct node *node;   /* NODE_MACRO or NODE_CALL_BLOCK */
    struct jinja_scope *scope; /* the scope in which the macro was defined */
};
struct loop {
    struct list *items;
    size_t i;              /* current item */
    struct value *changed; /* last argument of loop.changed(), or NULL */
};
#define NONE ((struct value){.kind = V_NONE})
#define UNDEFINED ((struct value){.kind = V_UNDEFINED})
#define BOOL(x) ((struct value){.kind = V_BOOL, .i = (x)})
#define INT(x) ((struct value){.kind = V_INT, .i = (x)})
#define FLOAT(x) ((struct value){.kind = V_FLOAT, .f = (x)})
#define STRING(x) ((struct value){.kind = V_STR, .s = (x)})
#define LIST_VALUE(x) ((struct value){.kind = V_LIST, .list = (x)})

/* A string being built; `origins` is allocated once a byte has an origin. */
struct text {
    char *p;
    uint8_t *origins;
    size_t n, cap;
};
void text_add(struct jinja_ctx *w, struct text *t, struct str s);
void text_puts(struct jinja_ctx *w, struct text *t, const char *s);
struct str text_str(const struct text *t);

struct str str_from(struct jinja_ctx *w, const char *p, size_t n, uint8_t origin); /* copies */
struct str str_slice(struct str s, size_t begin, size_t end);                      /* bytes */
bool str_is(struct str s, const char *name);
bool str_equal(struct str a, struct str b);
size_t str_length(struct jinja_ctx *w, struct str s); /* characters */
/* Byte offset of needle in s from `from` on, or SIZE_MAX; an empty needle is found at `from`. */
size_t str_find(struct jinja_ctx *w, struct str s, struct str needle, size_t from);
size_t str_rfind(struct jinja_ctx *w, struct str s, struct str needle);
/* The character at p, and its length in bytes. s is valid UTF-8. */
uint32_t char_at(const char *p, int *len);
bool char_is_space(uint32_t c);
enum char_case { TO_LOWER, TO_UPPER };
struct str str_case(struct jinja_ctx *w, struct str s, enum char_case to);
/* First cased letter of each word upper, others lower (Python's str.title). */
struct str str_title(struct jinja_ctx *w, struct str s);
bool str_is_case(struct jinja_ctx *w, struct str s, enum char_case wanted); /* islower, isupper */
enum { STRIP_LEFT = 1, STRIP_RIGHT = 2 };
/* chars NULL: white space. */
struct str str_strip(struct jinja_ctx *w, struct str s, const struct str *chars, int sides);
struct str str_replace(struct jinja_ctx *w, struct str s, struct str old, struct str new,
                       int64_t max);

struct list *list_new(struct jinja_ctx *w, enum list_kind kind);
void list_add(struct jinja_ctx *w, struct list *l, struct value v);
struct dict *dict_new(struct jinja_ctx *w);
struct value *dict_find(struct jinja_ctx *w, struct dict *d, struct value key); /* or NULL */
void dict_set(struct jinja_ctx *w, struct dict *d, struct value key, struct value v);

const char *value_type(struct value v); /* Python's name of its type, for messages */
bool value_truth(struct value v);
bool value_is_number(struct value v); /* bool too */
double value_float(struct value v);
bool value_equal(struct jinja_ctx *w, struct value a, struct value b);
int value_compare(struct jinja_ctx *w, struct value a, struct value b); /* fails when unordered */
bool value_in(struct jinja_ctx *w, struct value needle, struct value hay);
struct str value_str(struct jinja_ctx *w, struct value v); /* Python's str() */
/* The items of an iteration over v; empties a generator. */
struct list *value_items(struct jinja_ctx *w, struct value v);
struct json_style {
    bool ascii, sort_keys;
    struct str item, key; /* separators */
    const struct str *indent;
};
struct str value_json(struct jinja_ctx *w, struct value v, const struct json_style *style);
struct value value_from_json(struct jinja_ctx *w, const json_t *v, uint8_t origin);
struct value value_messages(struct jinja_ctx *w, const json_t *list);
struct value value_binary(struct jinja_ctx *w, int op, struct value a, struct value b);
struct value value_attr(struct jinja_ctx *w, struct value v, struct str name);    /* v.name */
struct value value_item(struct jinja_ctx *w, struct value v, struct value index); /* v[index] */
struct value value_slice(struct jinja_ctx *w, struct value v, const struct value part[3]);
struct str value_percent(struct jinja_ctx *w, struct str format,
                         struct value args); /* format % args */

/* tree */

enum node_kind {
    NODE_CONST,
    NODE_NAME,
    NODE_LIST,
    NODE_TUPLE,
    NODE_DICT,   /* list: keys, list2: values */
    NODE_ATTR,   /* a.name */
    NODE_ITEM,   /* a[b] */
    NODE_SLICE,  /* list: start, stop, step, each may be NULL; as b of NODE_ITEM */
    NODE_CALL,   /* a(list) */
    NODE_KWARG,  /* name=a, within the list of a call, filter or test */
    NODE_FILTER, /* a|name(list); a NULL: the text of the block */
    NODE_TEST,   /* a is name(list) */
    NODE_NOT,
    NODE_NEG,
    NODE_POS,
    NODE_AND,
    NODE_OR,
    NODE_BINARY,  /* a op b */
    NODE_COMPARE, /* a, compared with each NODE_OPERAND(op, a) of list in turn */
    NODE_OPERAND,
    NODE_CONCAT,       /* list */
    NODE_COND,         /* a if b else c; c may be NULL */
    NODE_NSREF,        /* name.name2, as a target */
    NODE_TEXT,         /* value */
    NODE_PRINT,        /* a */
    NODE_IF,           /* a: list, else list2 */
    NODE_FOR,          /* a in b if c: list, else list2 */
    NODE_SET,          /* a = b */
    NODE_SET_BLOCK,    /* a = list through filters b (or NULL) */
    NODE_MACRO,        /* name(list): list3; list2: defaults of the last parameters */
    NODE_CALL_BLOCK,   /* a macro without a name; a: the call that gets it as `caller` */
    NODE_FILTER_BLOCK, /* b over list */
    NODE_WITH,         /* list = list2: list3 */
    NODE_GENERATION,   /* list */
    NODE_BREAK,
    NODE_CONTINUE,
};
struct nodes {
    struct node **v;
    size_t n, cap;
};
struct node {
    uint8_t kind;
    bool uses_caller; /* macros */
    int op, line;     /* op: characters, c1 | c2 << 8 */
    struct str name, name2;
    struct value value;
    struct node *a, *b, *c;
    struct nodes list, list2, list3;
};
#define OP(c1, c2) ((c1) | (c2) << 8)
enum { OP_IN = OP('i', 'n'), OP_NOT_IN = OP('!', 'i') };

struct jinja {
    struct jinja_ctx w;
    struct nodes body;
    bool strict; /* see jinja_parse_strict */
};

/* builtins */

/* Arguments of a call: positional values, then named ones. */
struct args {
    struct value *v;
    size_t n;
    struct pair *named;
    size_t n_named;
    int64_t now; /* for strftime_now */
};
/* Argument i, or the argument called `name`, or `fallback`. */
struct value arg_get(const struct args *a, size_t i, const char *name, struct value fallback);
struct function {
    const char *name;
    struct value (*call)(struct jinja_ctx *w, const struct args *a);
};
bool filter_exists(struct str name);
bool jinja_test_exists(struct str name);
const struct function *function_find(struct str name); /* global functions */
struct value filter_apply(struct jinja_ctx *w, struct str name, struct value v,
                          const struct args *a);
bool jinja_test_apply(struct jinja_ctx *w, struct str name, struct value v, const struct args *a);
struct value method_call(struct jinja_ctx *w, const struct jinja_method *m, const struct args *a);
/* Whether Python's type of v has this method, supported or not. */
bool method_exists(struct value v, struct str name);

#endif
