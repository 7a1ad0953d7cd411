/*
 * grade: extracts the answer from a text, scores it, and tells whether two answers are the same.
 *
 * A grader is a row of a table in grade.c: `letter`, `number`, `math`, `exact`, `exact_match`,
 * `prefix`, `verbatim`, `regex`, `f1`, `rouge_l`, `bleu`. Grading and voting use the same normal
 * form, so a vote counts different spellings of the same answer together. A text without an answer
 * is counted separately from a wrong answer.
 *
 * All functions are pure and may be called from any thread. Texts are UTF-8; an invalid byte counts
 * as U+FFFD. The time for any text is linear in its length plus a bounded amount. Scores do not
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

/* Fails for a gold answer that no text can match: a pattern that does not compile, an invalid
 * letter, an empty text. */
int grader_check(const struct grader *g, const char *gold, struct error *err);

struct grade {
    double score; /* 0..1; f1, rouge_l and bleu use the whole range, the others 0 and 1 */
    bool found;   /* false: the text holds no answer in the grader's form, and the score is 0 */
};
/* Grades a model's whole text against golds[n_golds]; the best score counts. The caller has checked
 * the golds with grader_check. */
struct grade grader_grade(const struct grader *g, const char *text, const char *const *golds,
                          int n_golds);
/* Whether more text after `text` cannot change the grade for this gold answer, so that a generation
 * may stop. Only `prefix` decides before the text ends. */
bool grader_is_decided(const struct grader *g, const char *text, const char *gold);

/*
 * Appends the answer of a text in the grader's normal form. If there is no answer, it appends
 * nothing and returns false. Equal forms are the same answer. For all graders except `math`,
 * different forms are different answers, so the form can be the key of a group. Extraction from a
 * form returns the same form, unless the form contains a mark (answer:, \boxed).
 */
bool grader_extract(const struct grader *g, const char *text, struct buf *out);

/* The same form, malloc'ed; NULL: there is no answer. */
char *grader_answer(const struct grader *g, const char *text);

/* Whether two texts give the same answer; false if either has no answer. */
bool grader_equivalent(const struct grader *g, const char *a, const char *b);
/* For votes. Sets group[i] to the group of text i, or -1 if the text has no answer. Groups are
 * numbered in order of first appearance. A text joins the first group whose first text has an
 * equivalent answer. Returns the number of groups. */
int grader_group_answers(const struct grader *g, const char *const *texts, int n, int *group);

/*
 * Steps that make the answer from a model's whole text, for the grader `verbatim`. `steps` is a
 * list of objects, which the filter takes over; it is immutable. Their key `step` is
 *   regex         the answer is match number `group` of `pattern` (negative: from the last), its
 *                 first group that is not empty, without white space at both ends; or `fallback`
 *   remove        matches of `pattern` are removed
 *   strip, lower, upper, punctuation, digits: white space at both ends, ASCII signs or digits are
 *                 removed, letters are changed
 *   map           the text becomes `map`[text], or `default`, or empty
 * NULL: a pattern is wrong.
 */
struct answer_filter;
struct answer_filter *answer_filter_new(json_t *steps, struct error *err);
const json_t *answer_filter_steps(const struct answer_filter *f);
/* Appends the answer. False: a regex matches nothing or a map lacks the text, so that the answer is
 * the fallback. */
bool answer_filter_apply(const struct answer_filter *f, const char *text, struct buf *out);
void answer_filter_free(struct answer_filter *f);

/* Compiles a Unicode regular expression; free the result with pcre2_code_free. NULL on failure; the
 * error names the byte (from 1) at which the pattern is wrong. */
struct pcre2_real_code_8 *regex_compile(const char *text, struct error *err);
/* Limits for matches of such patterns: steps for each start position, and heap memory. Free the
 * result with pcre2_match_context_free. */
struct pcre2_real_match_context_8 *regex_limits_new(void);

/* Appends `text` in lower case, with full-width ASCII in ordinary width. A run of white space
 * becomes one blank; at both ends, and next to a script that is written without blanks, it is
 * dropped. The output of valid UTF-8 has at most twice its bytes; an invalid byte becomes U+FFFD, 3
 * bytes. */
void text_normalize(const char *text, size_t len, struct buf *out);
/* Hashes of the n-grams of `order` words of a text, in their order; malloc'ed, [*n]. Words are as
 * in ROUGE: lower case, without signs; a character of a script that is written without blanks is a
 * word. At most 4,096 words of a text count. */
uint64_t *text_ngrams(const char *text, int order, int *n);

#endif
