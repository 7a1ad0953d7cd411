/*
 * harness_task: task files of EleutherAI's lm-evaluation-harness (YAML).
 *
 * The file names a data set, templates for context, choices and answer, and how an answer is
 * scored. Local data is read; nothing is downloaded. Keys that need Python code are refused, with
 * the key and the remedy. The rules of composition are those of lm-evaluation-harness 0.4:
 *
 *     description | examples: context delimiter answer separator | context
 *
 * A harness_task is used by one thread; it owns its texts.
 */
#ifndef SHOAL_EVAL_HARNESS_TASK_H
#define SHOAL_EVAL_HARNESS_TASK_H

#include "eval/eval.h"
#include "grade/grade.h"
#include "template/template.h"

/* doc_to_text, doc_to_target or doc_to_choice: a column's name, a template, or a constant. */
struct harness_field {
    const char *key;
    const json_t *value;    /* as written; NULL: absent */
    bool is_column;         /* the first question has a column of this name */
    struct jinja *template; /* or NULL */
};

struct harness_task {
    json_t *keys, *places; /* merged with the included files; places: key → "'FILE', line N" */
    struct harness_field text, target, choice;
    struct jinja *print; /* {{ value }}: Python's str() */
    bool has_columns;    /* is_column of the fields is known */

    char *name;
    enum eval_output_type output_type; /* EVAL_LOGLIKELIHOOD: multiple_choice */
    bool is_continuation; /* output_type loglikelihood: the target continues the text */
    bool reports_acc_norm;
    const char *form; /* static name of the kind of task */
    const char *description, *target_delimiter, *fewshot_delimiter;
    int64_t n_shots;                /* num_fewshot */
    struct strings files, shots;    /* local files of the questions and of the examples */
    char *patterns, *shot_patterns; /* or glob patterns in the data folder, separated by blanks */
    const json_t *samples;          /* or the examples themselves, a list of rows */
    bool own_examples;              /* the examples are the first questions */
    struct strings stops;
    int32_t max_tokens;
    struct answer_filter *filter,
        *gold_filter; /* filters of generated and of gold answers, or NULL */
};

/* Whether a YAML file is a task of the harness and no recipe of this program. */
bool harness_task_detect(const json_t *root);
/* Reads the task. `y`: from yaml_load_functions. data: the folder with the data sets that are not
 * local, or the file of the questions; may be NULL. Call harness_task_release also after an error.
 */
int harness_task_open(struct harness_task *h, const struct yaml *y, const char *data,
                      struct error *err);
void harness_task_release(struct harness_task *h);
/* Makes the question of a row, which has no subject. The caller releases `q` also after an error.
 */
int harness_question_make(struct harness_task *h, const json_t *row, struct eval_question *q,
                          struct error *err);
/* Calls fn with each row of a CSV file as an object; the first row has the names. Cells that are
 * integers are numbers. */
int harness_csv_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err);

/* The value of a Python literal (text, number, True, False, None, list, tuple) as JSON, which
 * templates write for lists; NULL: the text is not such a literal. */
json_t *python_literal_parse(const char *text);

#endif
