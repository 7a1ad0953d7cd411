/*
 * evaluate: parts of an answer that models on an engine (evaluate.c) and models of a server
 * (remote_solver.c) share.
 */
#ifndef SHOAL_EVAL_EVALUATE_H
#define SHOAL_EVAL_EVALUATE_H

#include "eval/eval.h"

/* The preamble and the context of an option, malloc'ed. */
char *question_context(const struct eval_task *task, const struct eval_question *q, int option);
/* Puts the place of a question before the message; returns err->code. */
int question_error_wrap(const struct eval_task *task, const struct eval_question *q, int64_t index,
                        struct error *err);
/* Sets score, right and no_answer of a generated text, which the task's filter may change. */
void text_grade(const struct eval_task *task, const struct grader *grader,
                const struct eval_question *q, struct buf *text, struct eval_result *result);

#endif
