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
/* Removes white space of any script at both ends. */
struct text_span text_span_trim(struct text_span s);

/* Finds the text after the last mark (####, "answer:", "answer is", 答えは, 答案： and the like) up
 * to the end of the line. False if there is no mark or no text after it. */
bool find_marked_answer(struct text_span text, struct text_span *out);
/* Finds the content of the last \boxed{…} that is closed. */
bool find_boxed_answer(struct text_span text, struct text_span *out);

/* Appends the final number of a text in normal form; false: there is no number. */
bool number_extract(const char *text, struct buf *out);
/* Whether two answers are mathematically equivalent. *steps: number of steps used, about 100 ns
 * each. If about MATH_MAX_STEPS steps do not decide, the result is false. */
enum { MATH_MAX_STEPS = 3200000 };
bool math_equivalent(const char *a, const char *b, int64_t *steps);

/* Scores in 0..1 of an answer compared with a gold answer. */
double f1_score(const char *answer, const char *gold);
double rouge_l_score(const char *answer, const char *gold);
double bleu_score(const char *answer, const char *gold);
/* Appends the words of a text that F1 compares, in order, with a blank between words. */
void f1_words(const char *text, struct buf *out);

/* the tree of a formula, which math_parse.c builds and math_equivalent.c compares */

enum math_kind {
    MATH_NUMBER, /* text[pos .. pos + len); its last `repeat` digits repeat without end */
    MATH_NAME,   /* a variable, ∞, …: `name` is a hash of its spelling */
    MATH_PI,
    MATH_E,
    MATH_I,
    MATH_ADD, /* any number of terms */
    MATH_NEGATE,
    MATH_MULTIPLY, /* any number of factors */
    MATH_INVERT,
    MATH_POWER,
    MATH_ROOT,    /* children: radicand, degree */
    MATH_CALL,    /* `op`: enum math_function; children: the argument, a logarithm's base */
    MATH_PM,      /* plus or minus its child; all ± of a formula have the same sign */
    MATH_PERCENT, /* its child / 100 */
    MATH_DEGREE,  /* its child π / 180 */
    MATH_LIST,    /* items in any order; the kinds before MATH_LIST are single values */
    MATH_SET,
    MATH_UNION,
    MATH_TUPLE,  /* a point, a vector, an interval; `op`: bit 0: opened by [, bit 1: closed by ] */
    MATH_MATRIX, /* `op` columns; the children are the elements row by row */
    MATH_RELATION, /* a = b < c: bits 4i to 4i + 3 of `name` are the enum math_relation between
                      child i and child i + 1 */
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
    FN_LOG, /* logarithm to the base that is its second child; without one, to base 10 */
    FN_SQRT,
    FN_ABS,
    FN_FLOOR,
    FN_CEIL,
    FN_FACTORIAL,
    FN_BINOMIAL,
};
enum math_relation { REL_EQ = 1, REL_LT, REL_LE, REL_GT, REL_GE, REL_NE, REL_IN };

enum {
    MATH_MAX_BYTES = 2048, /* answers of this length or more are compared as words */
    MATH_MAX_NODES = 512,
    MATH_MAX_DEPTH = 32, /* nesting depth of the text */
    MATH_NONE = -1,
};
struct math_node {
    uint8_t kind, op;
    int16_t first, next;      /* index of the first child and of the next sibling, or MATH_NONE */
    int16_t pos, len, repeat; /* position of a number in math_expr.text */
    uint64_t name;
};
/* An ambiguous text has a default reading; each bit selects the other reading of one ambiguity. */
enum math_reading {
    READING_COMMA_SEPARATES = 1,  /* 1,234 is a list, not a number */
    READING_UNIT_IS_VARIABLE = 2, /* the m of "5 m" is a variable */
};
struct math_expr {
    struct math_node node[MATH_MAX_NODES];
    int n, root;        /* number of nodes; root: MATH_NONE if the text is words, not a formula */
    int other_readings; /* bits of enum math_reading that would give another tree */
    uint64_t unit;      /* hash of the name of the value's unit; 0: no known unit */
    struct buf text;    /* the text after rewriting, see math_parse.c */
};
/* `reading`: bits of enum math_reading. The caller calls math_release. */
void math_parse(struct math_expr *m, const char *text, int reading);
void math_release(struct math_expr *m);
int math_child_count(const struct math_expr *m, int node);

#endif
