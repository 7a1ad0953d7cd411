/*
 * grade: extracts the answer from a text, scores it, and tells whether two answers are the same.
 *
 * A grader is a row of a table: `letter`, `number`, `math`, `exact`, `regex`, `f1`, `rouge_l`,
 * `bleu`. Grading and voting use the same normal form, so two answers that are both right count as
 * one in a vote. A text without an answer is counted separately from a wrong answer.
 *
 * All functions are pure and may be called from any thread. Texts are UTF-8; an invalid byte counts
 * as U+FFFD. A hostile text costs time linear in its length plus a bounded amount; scores do not
 * depend on the C library's mathematics.
 */
#ifndef SHOAL_GRADE_H
#define SHOAL_GRADE_H

#include "base/base.h"

struct grader;
/* Returns NULL and ERR_USAGE, with a list of the names, if the name is unknown. */
const struct grader *grader_find(const char *name, struct error *err);
const struct grader *grader_at(int i); /* NULL past the last */
const char *grader_name(const struct grader *g);

/* Refuses a gold answer that no text can match: a pattern that does not compile, an invalid letter,
 * an empty text. */
int grader_check(const struct grader *g, const char *gold, struct error *err);

struct grade {
    double score; /* 0..1; f1, rouge_l and bleu use the whole range, the others 0 and 1 */
    bool found;   /* false: the text holds no answer in the grader's form, and the score is 0 */
};
/* Grades a model's whole text against golds[n_golds]; the best score counts. The golds have passed
 * grader_check. */
struct grade grader_grade(const struct grader *g, const char *text, const char *const *golds,
                          int n_golds);

/*
 * Appends the answer of a text in the grader's normal form. If there is no answer, it appends
 * nothing and returns false. Equal forms are the same answer. For all graders except `math` the
 * reverse also holds, so the form is a key to group by. Extraction from a form returns that form
 * again, unless it contains a mark (answer:, \boxed).
 */
bool grader_extract(const struct grader *g, const char *text, struct buf *out);

/* Whether two texts give the same answer; false if either has no answer. */
bool grader_equivalent(const struct grader *g, const char *a, const char *b);
/* For votes: group[i] is the group of text i, numbered in order of first appearance, -1 without an
 * answer. Returns the number of groups. A text joins the first group whose first text is the
 * same. */
int grader_group_answers(const struct grader *g, const char *const *texts, int n, int *group);

/* Compiles a pattern over Unicode; free the result with pcre2_code_free. On failure it returns
 * NULL, and the error names the character that is wrong. */
struct pcre2_real_code_8 *regex_compile(const char *text, struct error *err);

/* Appends `text` in lower case and ordinary width. A run of white space becomes one blank, or
 * nothing next to a script that is written without blanks. Output: at most twice the input's
 * bytes. */
void text_normalize(const char *text, size_t len, struct buf *out);

#endif
