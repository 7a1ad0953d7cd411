/*
 * bank: the questions of a task, from the program's own families or from local files.
 *
 * A task is a row of a table (task.c), a recipe in YAML, or a JSONL file that explains itself. A
 * line of a file is recognised by the fields it has (dataset_formats.c); the task says what the model is
 * shown. Built-in tasks use the words of lm-evaluation-harness, so that scores can be compared:
 *
 *     preamble of the subject | context of the question | delimiter | option
 *     (description, examples)                            `-- what is scored, one option a time
 *
 * A bank owns its texts and is immutable once it is open. Questions of files are held; those of a
 * family, or of a task whose evidence is split, are drawn again whenever they are asked for.
 */
#ifndef SHOAL_EVAL_BANK_H
#define SHOAL_EVAL_BANK_H

#include "eval/eval.h"

#define EVAL_MAX_OPTIONS EVAL_MAX_CHOICES

struct eval_question {
    char *context;
    char *options[EVAL_MAX_OPTIONS];  /* [n], without the delimiter */
    char *contexts[EVAL_MAX_OPTIONS]; /* the same for one option only; NULL: `context` */
    int n, correct;
    char *answer;  /* generation: what the grader compares with */
    char *cluster; /* questions that share it are not independent; NULL: alone */
    int subject;
    const char *path; /* where it was read; NULL: drawn */
    int line;
};
void eval_question_release(struct eval_question *q);

/* CHAT: in the model's chat template, one of the choices is decoded. LIKELIHOOD: the option that is
 * most probable after the context. GENERATE: text, for a grader. */
enum eval_output_type { EVAL_CHAT_CHOICE, EVAL_LOGLIKELIHOOD, EVAL_GENERATE };

struct eval_subject {
    char *name, *preamble;
};
struct eval_task {
    char *name;
    enum eval_output_type ask;
    int64_t n;
    bool normed;              /* acc_norm is usual for it */
    char *delimiter;          /* between a context and an option */
    struct strings files;     /* that were read */
    struct eval_subject *subjects; /* [n_subjects] */
    int n_subjects;
    struct eval_question *v; /* [n]; NULL for what is drawn */
    int family;         /* drawn: of fry_families, or of the tasks of split_evidence.c; -1: read */
    bool shares;
    enum data_split split;
    uint64_t seed;
    char *grader; /* GENERATE */
    struct strings stops;
    int32_t max_tokens;
    size_t longest; /* bytes of the longest context with its preamble and option */
};

struct eval_task_options {
    const char *dir; /* where files of built-in tasks are */
    int64_t n;       /* questions of each task; 0: 1000 of a family, all of a file */
    int64_t shots;   /* examples before each question, the first of the task's own */
    enum data_split split;
    uint64_t seed; /* draws questions */
};
/* `name`: a family, a task of split_evidence.c, a built-in task, a JSONL file, or a recipe (.yaml). */
int eval_task_open(struct eval_task *b, const char *name, const struct eval_task_options *o, struct error *err);
void eval_task_release(struct eval_task *b);
/* Borrowed from the bank, or made in `scratch`, which the caller releases in both cases. */
const struct eval_question *eval_task_question(const struct eval_task *b, int64_t i, struct eval_question *scratch);
/*
 * All of them for a team, [n], for task_items_release. What a file's questions show a model is what
 * agents are asked; options are choices, and where contexts differ, what differs is a part of them.
 * Generated answers have a gold instead.
 */
struct task_item *eval_task_items(const struct eval_task *b);
void task_items_release(struct task_item *v, int64_t n);
/* "a,b": each a name for eval_task_open; "fry" is every family. *out is malloc'ed. */
int eval_tasks_open(const char *list, const struct eval_task_options *o, struct eval_task **out, int *n,
               struct error *err);
/* Names and explanations of the built-in tasks; NULL past the end. */
const char *eval_task_builtin(int i, const char **about);

/* Lines of files (dataset_formats.c). */

/* What a line says, whatever its form; strings are its own. */
struct dataset_row {
    char *question, *passage;
    char *choices[EVAL_MAX_OPTIONS];
    char *contexts[EVAL_MAX_OPTIONS]; /* one a choice, or NULL */
    int n, correct;              /* correct < 0: no choices */
    char *answer, *cluster, *subject;
};
void dataset_row_release(struct dataset_row *f);
/* Reads a line of any known form; the error says which field is wrong. */
int dataset_row_parse(const json_t *row, struct dataset_row *out, struct error *err);
/* Which of n choices an answer names: an index from 0, the text of one, a letter, or an index as
 * text; -1: none. */
int choice_index(const json_t *answer, char *const *choices, int n);
/* "choices.text" → row["choices"]["text"], or NULL. */
const json_t *json_path_get(const json_t *row, const char *path);
/* A string, or a number as text; NULL otherwise. malloc'ed. */
char *json_scalar_text(const json_t *v);
/* Calls fn for every row of a CSV file of question, choices and answer (a letter or an index from
 * 0), as an object of those fields; a header with these names is skipped. */
int csv_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err);

#endif
