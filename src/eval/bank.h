/*
 * bank: the questions of a task, from the program's own families or from local files.
 *
 * A task is a row of a table (bank.c), a recipe in YAML, or a JSONL file that explains itself. A
 * line of a file is recognised by the fields it has (forms.c); the task says what the model is
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

#define MAX_OPTIONS MAX_CHOICES

struct question {
    char *context;
    char *options[MAX_OPTIONS];  /* [n], without the delimiter */
    char *contexts[MAX_OPTIONS]; /* the same for one option only; NULL: `context` */
    int n, correct;
    char *answer;  /* generation: what the grader compares with */
    char *cluster; /* questions that share it are not independent; NULL: alone */
    int subject;
    const char *path; /* where it was read; NULL: drawn */
    int line;
};
void question_release(struct question *q);

/* CHAT: in the model's chat template, one of the choices is decoded. LIKELIHOOD: the option that is
 * most probable after the context. GENERATE: text, for a grader. */
enum ask { ASK_CHAT, ASK_LIKELIHOOD, ASK_GENERATE };

struct subject {
    char *name, *preamble;
};
struct bank {
    char *name;
    enum ask ask;
    int64_t n;
    bool normed;              /* acc_norm is usual for it */
    char *delimiter;          /* between a context and an option */
    struct strings files;     /* that were read */
    struct subject *subjects; /* [n_subjects] */
    int n_subjects;
    struct question *v; /* [n]; NULL for what is drawn */
    int family;         /* drawn: of fry_families, or of the tasks of shares.c; -1: read */
    bool shares;
    enum split split;
    uint64_t seed;
    char *grader; /* GENERATE */
    struct strings stops;
    int32_t max_tokens;
    size_t longest; /* bytes of the longest context with its preamble and option */
};

struct bank_options {
    const char *dir; /* where files of built-in tasks are */
    int64_t n;       /* questions of each task; 0: 1000 of a family, all of a file */
    int64_t shots;   /* examples before each question, the first of the task's own */
    enum split split;
    uint64_t seed; /* draws questions */
};
/* `name`: a family, a task of shares.c, a built-in task, a JSONL file, or a recipe (.yaml). */
int bank_open(struct bank *b, const char *name, const struct bank_options *o, struct error *err);
void bank_release(struct bank *b);
/* Borrowed from the bank, or made in `scratch`, which the caller releases in both cases. */
const struct question *bank_question(const struct bank *b, int64_t i, struct question *scratch);
/*
 * All of them for a team, [n], for bank_items_release. What a file's questions show a model is what
 * agents are asked; options are choices, and where contexts differ, what differs is a part of them.
 * Generated answers have a gold instead.
 */
struct item *bank_items(const struct bank *b);
void bank_items_release(struct item *v, int64_t n);
/* "a,b": each a name for bank_open; "fry" is every family. *out is malloc'ed. */
int banks_open(const char *list, const struct bank_options *o, struct bank **out, int *n,
               struct error *err);
/* Names and explanations of the built-in tasks; NULL past the end. */
const char *bank_builtin(int i, const char **about);

/* Lines of files (forms.c). */

/* What a line says, whatever its form; strings are its own. */
struct fields {
    char *question, *passage;
    char *choices[MAX_OPTIONS];
    char *contexts[MAX_OPTIONS]; /* one a choice, or NULL */
    int n, correct;              /* correct < 0: no choices */
    char *answer, *cluster, *subject;
};
void fields_release(struct fields *f);
/* Reads a line of any known form; the error says which field is wrong. */
int fields_read(const json_t *row, struct fields *out, struct error *err);
/* Which of n choices an answer names: an index from 0, the text of one, a letter, or an index as
 * text; -1: none. */
int choice_find(const json_t *answer, char *const *choices, int n);
/* "choices.text" → row["choices"]["text"], or NULL. */
const json_t *json_at(const json_t *row, const char *path);
/* A string, or a number as text; NULL otherwise. malloc'ed. */
char *json_words(const json_t *v);
/* Calls fn for every row of a CSV file of question, choices and answer (a letter or an index from
 * 0), as an object of those fields; a header with these names is skipped. */
int csv_each(const char *path, json_each_fn fn, void *ctx, struct error *err);

#endif
