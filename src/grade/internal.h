/*
 * grade_internal: what the graders share, between grade.c and the files of single graders.
 */
#ifndef SHOAL_GRADE_INTERNAL_H
#define SHOAL_GRADE_INTERNAL_H

#include "grade/grade.h"

/* Bytes that are looked at, not NUL-terminated. */
struct text_span {
    const char *at;
    size_t len;
};
struct text_span text_span_of(const char *text);
struct text_span text_span_trim(struct text_span s); /* white space of any script at both ends */

/* What follows the text's last "answer:", "answer is", 答え, 答案 or the like, up to the line's
 * end; false when no marker stands there. */
bool find_marked_answer(struct text_span text, struct text_span *out);
/* The inside of the last \boxed{…} that is closed. */
bool find_boxed_answer(struct text_span text, struct text_span *out);
/* The last line that is not blank. */
struct text_span text_span_last_line(struct text_span text);

bool number_extract(const char *text, struct buf *out);
bool math_extract(const char *text, struct buf *out);
/* Whether two answers mean the same in mathematics. `steps` of some 100 ns it took: it ends, with
 * "no", soon after MATH_MAX_STEPS at the latest. */
enum { MATH_MAX_STEPS = 3200000 };
bool math_equivalent(const char *a, const char *b, int64_t *steps);

double f1_score(const char *answer, const char *gold);
double rouge_l_score(const char *answer, const char *gold);
double bleu_score(const char *answer, const char *gold);
/* The words that F1 compares, in order, with a blank between them. */
void f1_words(const char *text, struct buf *out);

/* the tree of a formula, between math_parse.c and math_equivalent.c */

enum math_kind {
    MATH_NUMBER, /* text[at .. at + len), `repeat` digits of which repeat for ever */
    MATH_NAME,   /* a variable, ∞, …: `name` is a hash of how it is written */
    MATH_PI,
    MATH_E,
    MATH_I,
    MATH_ADD, /* any number of terms */
    MATH_NEGATE,
    MATH_MULTIPLY, /* any number of factors */
    MATH_INVERT,
    MATH_POWER,
    MATH_ROOT,    /* radicand, degree */
    MATH_CALL,    /* `op`: enum math_function; argument, and a logarithm's base */
    MATH_PM,      /* 0 plus or minus its child: the two go together through a formula */
    MATH_PERCENT, /* its child / 100 */
    MATH_DEGREE,  /* its child π / 180 */
    MATH_LIST,    /* in any order */
    MATH_SET,
    MATH_UNION,
    MATH_TUPLE,    /* `op`: bit 0 for [, bit 1 for ]: a point, a vector, an interval */
    MATH_MATRIX,   /* `op` columns, row by row */
    MATH_RELATION, /* parts; `name` holds an enum math_relation in 4 bits for each between them */
};
enum math_function {
    FN_SIN,
    FN_COS,
    FN_TAN,
    FN_COT,
    FN_SEC,
    FN_CSC,
    FN_ASIN,
    FN_ACOS,
    FN_ATAN,
    FN_SINH,
    FN_COSH,
    FN_TANH,
    FN_EXP,
    FN_LN,
    FN_LOG, /* to its second child, else to 10 */
    FN_SQRT,
    FN_ABS,
    FN_FLOOR,
    FN_CEIL,
    FN_FACTORIAL,
    FN_BINOMIAL,
};
enum math_relation { REL_EQ = 1, REL_LT, REL_LE, REL_GT, REL_GE, REL_NE, REL_IN };

enum {
    MATH_MAX_BYTES = 2048, /* longer answers are compared as words */
    MATH_MAX_NODES = 512,
    MATH_MAX_DEPTH = 32, /* of nesting in the text */
    MATH_NONE = -1,
};
struct math_node {
    uint8_t kind, op;
    int16_t first, next; /* child and sibling, or MATH_NONE */
    int16_t at, len, repeat;
    uint64_t name;
};
/* What may be read in two ways is read in one; the other is asked for by these bits. */
enum math_reading {
    READ_SEPARATE = 1, /* 1,000 is a list */
    READ_LETTERS = 2,  /* the m of "5 m" is a variable */
};
struct math_expr {
    struct math_node node[MATH_MAX_NODES];
    int n, root;     /* root: MATH_NONE for what is no formula but words */
    int other;       /* the readings that would differ */
    uint64_t unit;   /* of the whole, a hash of its name; 0: none that is known */
    struct buf text; /* rewritten: see math_parse.c */
};
void math_parse(struct math_expr *m, const char *text, int reading);
void math_release(struct math_expr *m);
int math_children(const struct math_expr *m, int node);

#endif
