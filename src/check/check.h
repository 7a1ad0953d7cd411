/*
 * check: scores an answer without the right answer: a program, a pattern, a schema, a calculation,
 * unit tests, or another question put to a model. Checks filter samples (swarm/checked.c) and are
 * rewards of training (--reward).
 *
 * A check is opened from a text `kind` or `kind:argument`, a row of the table in check.c:
 *
 *   exact              the answer is the item's "answer"; for rewards and measurements only, since
 *                      it needs the right answer
 *   regex[:PATTERN]    the pattern, or the item's "pattern", matches the text
 *   json-schema:FILE   the text's last fenced block (or the whole text) is JSON that the schema
 *                      accepts, as src/grammar reads schemas, with properties in any order
 *   calculator         every equation in the text holds in exact rational arithmetic, and if the
 *                      item's "question" (or "prompt", or its last message) is an arithmetic
 *                      expression, the answer is its value; a text without an equation fails unless
 *                      the question is an expression
 *   tests[:PYTHON]     the text's last fenced block (or the whole text) and the item's
 *                      check.tests, one after the other, run without an error in Python; neither
 *                      may end the process
 *   sql:FILE           the text's last fenced block (or the whole text) is one query that the
 *                      SQLite database answers with at least one row; with check.rows in the item,
 *                      a list of lists, with exactly these rows, in any order unless check.ordered
 *                      is true
 *   question           the item's check.question, about the answer, is put to a model, which must
 *                      give check.answer; both are Jinja templates with the variable `answer`
 *   command:WORDS      a program that prints a score for each text
 *   shell:LINE         the same for a line of /bin/sh
 *
 * Items are JSON objects: lines of task or training files; check.tests is the member "tests" of
 * their object "check". A model's text is untrusted: as a program it runs only in the
 * sandbox, without network, with limits of time, memory and output, and as a query only under an
 * authorizer that allows reading. A check whose limit is reached fails the text and does not end
 * the run. The answer of a text is what the grader `exact` extracts: the text after the last
 * "answer:", else the whole text.
 *
 * `tests` finds errors in code; it does not withstand code that is written to deceive it.
 *
 * A command reads a line {"item", "completion", "ended"} for each text and prints a number for
 * each. It runs in a sandbox (sandbox/sandbox.h); when it ends, all processes that it started are
 * killed. It may read the system, the working folder (unless that is /, /tmp, the home folder or a
 * parent of it), its program's folder, files among its arguments, and `read`. It may write a
 * private /tmp and `write`.
 *
 * Threads: one thread uses a check at a time. After check_open a check borrows only the model.
 */
#ifndef SHOAL_CHECK_H
#define SHOAL_CHECK_H

#include "base/base.h"

/* Puts n questions to a model, greedily, each alone. Sets answers[i] to a malloc'ed text. */
struct check_model {
    void *ctx;
    int (*answer)(void *ctx, const char *const *questions, int n, char **answers,
                  struct error *err);
};

struct check_options {
    /* The caller's word for a check, "reward": in messages, and the prefix of its options
     * --reward-read and --no-reward-sandbox. NULL: "check". */
    const char *label;
    double timeout; /* seconds of a batch of commands; 0: 60 */
    bool sandbox;   /* false: commands of the user run without it; never text of models */
    bool network;   /* commands of the user may use the network */
    struct strings read, write;      /* further paths for commands of the user; copied */
    const struct check_model *model; /* for `question`; NULL: the kind is not known */
};

/* A text to be checked, and the result. */
struct check_case {
    const json_t *item;
    const char *text;
    bool ended; /* the text ended with its end token */

    double score;       /* 0 or 1; a command's may be any finite number */
    bool passed;        /* score >= 0.5 */
    const char *reason; /* why it failed, else NULL; the check's until its next check_run */
};

struct check;
/* ERR_USAGE: an unknown kind, a missing argument or model. ERR_STATE, ERR_MISSING: commands cannot
 * run here. ERR_FORMAT: the pattern, schema or database is wrong. */
struct check *check_open(const char *spec, const struct check_options *o, struct error *err);
/* The same for a check that selects among samples: ERR_USAGE also if it needs the right answer. */
struct check *check_open_filter(const char *spec, const struct check_options *o, struct error *err);
void check_free(struct check *c); /* may be NULL */
/* The name of the kind. */
const char *check_kind(const struct check *c);
/* Whether a spec names a kind that opens no file and runs no program; a model that it asks is
 * the caller's. */
bool check_spec_is_pure(const char *spec);
/* Whether the kind needs the right answer, so that it cannot filter samples. */
bool check_needs_gold(const struct check *c);
/* Whether an item has the fields that the check needs; ERR_FORMAT names a missing one. */
int check_item(const struct check *c, const json_t *item, struct error *err);
/* Checks n texts, whose items check_item has accepted. Fails only if the check itself fails: a
 * command of the user ends with an error, prints no score, or a score that is not finite. */
int check_run(struct check *c, struct check_case *cases, int n, struct error *err);

/* The cost of all check_run of a check so far. */
struct check_cost {
    int64_t checked, passed, questions; /* questions: put to the model */
    double seconds;
};
struct check_cost check_cost(const struct check *c);

/* Error rates of a check on texts whose correctness is known. */
struct check_confusion {
    int64_t right_passed, right_failed, wrong_passed, wrong_failed;
};
void check_confusion_add(struct check_confusion *m, bool right, bool passed);

#endif
