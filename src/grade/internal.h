/* grade: declarations that grade.c and the files of single graders share. */
#ifndef SHOAL_GRADE_INTERNAL_H
#define SHOAL_GRADE_INTERNAL_H

#include "grade/grade.h"

/* Borrowed bytes, not NUL-terminated. */
struct text_span {
    const char *ptr;
    size_t len;
};
struct text_span text_span_of(const char *text);
struct text_span text_span_trim(struct text_span s); /* white space of any script, both ends */

/* Finds the text after the last "answer:", "answer is", 答え, 答案 or the like, up to the end of
 * the line; false without a marker. */
bool find_marked_answer(struct text_span text, struct text_span *out);
/* Finds the content of the last \boxed{…} that is closed. */
bool find_boxed_answer(struct text_span text, struct text_span *out);

bool number_extract(const char *text, struct buf *out);
/* Whether two answers are mathematically equivalent. *steps: the steps used, about 100 ns each. The
 * comparison ends with "no" soon after MATH_MAX_STEPS at the latest. */
enum { MATH_MAX_STEPS = 3200000 };
bool math_equivalent(const char *a, const char *b, int64_t *steps);

double f1_score(const char *answer, const char *gold);
double rouge_l_score(const char *answer, const char *gold);
double bleu_score(const char *answer, const char *gold);
/* Appends the words that F1 compares, in order, with a blank between them. */
void f1_words(const char *text, struct buf *out);

/* the tree of a formula, which math_parse.c builds and math_equivalent.c compares */

enum math_kind {
    MATH_NUMBER, /* text[pos .. pos + len); its last `repeat` digits are a repeating decimal */
    MATH_NAME,   /* a variable, ∞, …: `name` is a hash of its spelling */
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
    MATH_PM,      /* 0 plus or minus its child: all signs of a formula change together */
    MATH_PERCENT, /* its child / 100 */
    MATH_DEGREE,  /* its child π / 180 */
    MATH_LIST,    /* items in any order */
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
    FN_LOG, /* logarithm to the base of its second child, else to 10 */
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
    MATH_MAX_DEPTH = 32, /* nesting depth of the text */
    MATH_NONE = -1,
};
struct math_node {
    uint8_t kind, op;
    int16_t first, next; /* child and sibling, or MATH_NONE */
    int16_t pos, len, repeat;
    uint64_t name;
};
/* An ambiguous text is parsed in its default reading; these bits select the other one. */
enum math_reading {
    READING_COMMA_SEPARATES = 1,  /* 1,000 is a list */
    READING_UNIT_IS_VARIABLE = 2, /* the m of "5 m" is a variable */
};
struct math_expr {
    struct math_node node[MATH_MAX_NODES];
    int n, root;        /* root: MATH_NONE if the text is words and not a formula */
    int other_readings; /* readings that would give another tree */
    uint64_t unit;      /* unit of the whole value, a hash of its name; 0: no known unit */
    struct buf text;    /* rewritten: see math_parse.c */
};
void math_parse(struct math_expr *m, const char *text, int reading);
void math_release(struct math_expr *m);
int math_child_count(const struct math_expr *m, int node);

#endif
