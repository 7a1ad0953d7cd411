/*
 * grade: what of a text is the answer, whether it is right, and whether two answers are one.
 *
 * A grader is a row of a table: `letter`, `number`, `math`, `exact`, `regex`, `f1`, `rouge_l`,
 * `bleu`. The same normal form decides grading and votes, so that two answers which are both right
 * count as one in a vote. A text without an answer is counted apart from a wrong one.
 *
 * Everything here is pure and may be called from any thread. Texts are UTF-8; what is not counts as
 * U+FFFD. Hostile texts cost time linear in their length and a bounded sum on top; scores do not
 * depend on the C library's mathematics.
 */
#ifndef SHOAL_GRADE_H
#define SHOAL_GRADE_H

#include "base/base.h"

struct grader;
/* NULL and ERR_USAGE with the names there are. */
const struct grader *grader_find(const char *name, struct error *err);
const struct grader *grader_at(int i); /* NULL behind the last */
const char *grader_name(const struct grader *g);
const char *grader_about(const struct grader *g); /* one line, for help */

/* Refuses a gold answer that nothing could match: a pattern that does not compile, a letter that is
 * none, an empty text. */
int grader_check(const struct grader *g, const char *gold, struct error *err);

struct grade {
    double score; /* 0..1; f1, rouge_l and bleu use all of it, the others 0 and 1 */
    bool found;   /* false: the text holds no answer in the grader's form, and the score is 0 */
};
/* A model's whole text against golds[n_golds], the best of which counts. Golds have passed
 * grader_check. */
struct grade grader_grade(const struct grader *g, const char *text, const char *const *golds,
                          int n_golds);

/*
 * Appends the answer inside a text in the grader's normal form; false, and nothing, when there is
 * none. Equal forms are the same answer. For all graders but `math` the reverse holds too, so the
 * form is a key to group by. Extracting from a form gives that form again, unless
 * a mark (answer:, \boxed) stands inside it.
 */
bool grader_extract(const struct grader *g, const char *text, struct buf *out);

/* Whether two texts give the same answer; false when either gives none. */
bool grader_equivalent(const struct grader *g, const char *a, const char *b);
/* For votes: group[i] is the number of text i's group in order of first appearance, -1 without an
 * answer. Returns how many groups there are. A text joins the first group whose first text is the
 * same. */
int grader_group_answers(const struct grader *g, const char *const *texts, int n, int *group);

/* PCRE2's code of a pattern over Unicode, for pcre2_code_free; NULL names the character that is
 * wrong. */
struct pcre2_real_code_8 *regex_compile(const char *text, struct error *err);

/* Appends `text` in small letters of ordinary width, runs of white space as one blank, and none
 * beside scripts that are written without them: at most twice its bytes. */
void text_normalize(const char *text, size_t len, struct buf *out);

#endif
