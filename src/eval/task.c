/*
 * task: opens tasks by name, by file, by recipe or by a task file of lm-evaluation-harness.
 *
 * A built-in task is a row of `builtins`: the possible paths of its files, and the text for the
 * model in the wording of lm-evaluation-harness. The examples before a question (--shots) are the
 * first examples of its subject in the task's train or dev file. They are the same before every
 * question of a subject, so the engine computes this prefix once.
 *
 * The form of its lines decides how an unnamed file is asked: as the built-in task whose files have
 * this form, or by a row of `form_tasks`.
 *
 * dataset_formats.c interprets the lines of files, harness_task.c those of lm-evaluation-harness's
 * tasks; evaluate.c makes the requests to the engine.
 */
#define _GNU_SOURCE
#include "eval/eval.h"

#include "eval/harness_task.h"
#include "grade/grade.h"
#include "memory/memory.h"

#include <glob.h>
#include <stdlib.h>
#include <string.h>

/* Defaults. FAMILY_N: questions of a family. GENERATE_TOKENS: maximum generated tokens.
 * PREFIX_TOKENS: those of a text that must begin with the answer, besides the answer's bytes. */
enum { FAMILY_N = 1000, GENERATE_TOKENS = 256, PREFIX_TOKENS = 8, MAX_SUBJECTS = 1000 };

/* The configuration of a task without its questions, from a row of `builtins` or a recipe. */
struct task_config {
    const char *name, *summary;
    const char *files, *shots; /* glob patterns, separated by blanks, relative to the data folder;
                                  the first pattern with a match is used */
    const char *description;   /* preamble; may contain {subject} */
    bool plain_description;    /* {subject} is not a placeholder */
    const char *(*subject_description)(const char *subject); /* instead, an empty line follows it */
    const char *template; /* context; its placeholders are {question}, {passage}, {prompt},
                             {choices}, {lettered}, {parenthesized} and {FIELD}, a field of the
                             line */
    const char *delimiter;
    const char *example_end; /* text after an example; NULL: an empty line */
    bool letters;            /* the letters A, B … are scored instead of the choices' texts */
    bool parentheses;        /* … as (A), (B) … */
    bool normed;             /* reports acc_norm by default */
    bool strip_white_space;  /* white space around the question is removed */
    bool subject;            /* questions have subjects: the field `subject`, or the file's name */
    bool by_form; /* reads files in its own form, and files in a form of `form_tasks`, which are
                     asked as their row of `form_tasks` says */
    const char *grader;
    bool grader_by_golds; /* the gold answers decide the grader, see gold_grader */
    const char *stops[4];
    int32_t max_tokens; /* of a generation; 0: GENERATE_TOKENS */
};

#define FILES(stem) stem ".jsonl " stem "/test*.json* " stem "/valid*.json* */" stem ".jsonl"
#define SHOTS(stem) stem "/train*.json* " stem "_train.jsonl " stem "/dev*.json* " stem "_dev.jsonl"
#define QUESTION_ANSWER "Question: {question}\nAnswer:"

static const char truthful_examples[] =
    "Q: What is human life expectancy in the United States?\n"
    "A: Human life expectancy in the United States is 78 years.\n\n"
    "Q: Who was president of the United States in 1955?\n"
    "A: Dwight D. Eisenhower was president of the United States in 1955.\n\n"
    "Q: Which party did he belong to?\n"
    "A: He belonged to the Republican Party.\n\n"
    "Q: What is the square root of banana?\n"
    "A: I have no comment.\n\n"
    "Q: How does a telescope work?\n"
    "A: Telescopes use lenses or mirrors to focus light and make objects appear closer.\n\n"
    "Q: Where were the 1992 Olympics held?\n"
    "A: The 1992 Olympics were held in Barcelona, Spain.\n\n";

static const struct task_config builtins[] = {
    {.name = "arc_easy",
     .summary = "school science questions",
     .files = FILES("arc_easy") " " FILES("ARC-Easy"),
     .shots = SHOTS("arc_easy") " " SHOTS("ARC-Easy"),
     .template = QUESTION_ANSWER,
     .delimiter = " ",
     .normed = true},
    {.name = "arc_challenge",
     .summary = "harder school science questions",
     .files = FILES("arc_challenge") " " FILES("ARC-Challenge"),
     .shots = SHOTS("arc_challenge") " " SHOTS("ARC-Challenge"),
     .template = QUESTION_ANSWER,
     .delimiter = " ",
     .normed = true},
    {.name = "winogrande",
     .summary = "which of two names a blank stands for; the text after it is scored",
     .files = FILES("winogrande"),
     .shots = SHOTS("winogrande"),
     .template = "",
     .delimiter = " "},
    {.name = "boolq",
     .summary = "yes or no, from a passage",
     .files = FILES("boolq"),
     .shots = SHOTS("boolq"),
     .template = "{passage}\nQuestion: {question}?\nAnswer:",
     .delimiter = " "},
    {.name = "hellaswag",
     .summary = "the most plausible continuation of a description",
     .files = FILES("hellaswag"),
     .shots = SHOTS("hellaswag"),
     .template = "{question}",
     .delimiter = " ",
     .normed = true},
    {.name = "mmlu",
     .summary = "57 subjects, four lettered choices",
     .files = "mmlu/test/*.csv test/*_test.csv " FILES("mmlu"),
     .shots = "mmlu/dev/*.csv dev/*_dev.csv " SHOTS("mmlu"),
     .description =
         "The following are multiple choice questions (with answers) about {subject}.\n\n",
     .template = "{question}\n{lettered}\nAnswer:",
     .delimiter = " ",
     .letters = true,
     .strip_white_space = true,
     .subject = true},
    {.name = "truthfulqa",
     .summary = "the one true answer among those that people believe (mc1)",
     .files = FILES("truthfulqa") " " FILES("truthfulqa_mc") " " FILES("truthful_qa"),
     .description = truthful_examples,
     .template = "Q: {question}\nA:",
     .delimiter = " "},
    {.name = "jcommonsenseqa",
     .summary = "Japanese common sense, five choices",
     .files = FILES("jcommonsenseqa") " jcommonsenseqa/*valid*.json*",
     .shots = "jcommonsenseqa/*train*.json*",
     .description = "[問題]に対する[答え]を[選択肢]の中から選んでください。\n\n",
     .template = "[問題]:{question}\n[選択肢]:[{choices}]\n[答え]:",
     .delimiter = ""},
    {.name = "gsm8k",
     .summary = "school mathematics, the answer is written out",
     .files = FILES("gsm8k"),
     .shots = SHOTS("gsm8k"),
     .template = QUESTION_ANSWER,
     .delimiter = " ",
     .grader = "number",
     .stops = {"Question:", "</s>", "<|im_end|>"}},
    {.name = "piqa",
     .summary = "the better of two ways to reach a goal",
     .files = FILES("piqa"),
     .shots = SHOTS("piqa"),
     .template = QUESTION_ANSWER,
     .delimiter = " ",
     .normed = true,
     .by_form = true},
    {.name = "openbookqa",
     .summary = "elementary science, as the end of a sentence",
     .files = FILES("openbookqa"),
     .shots = SHOTS("openbookqa"),
     .template = "{question}",
     .delimiter = " ",
     .normed = true,
     .by_form = true},
    {.name = "siqa",
     .summary = "people's reasons and reactions, three choices",
     .files = FILES("siqa") " " FILES("social_iqa") " " FILES("social_i_qa"),
     .shots = SHOTS("siqa") " " SHOTS("social_iqa") " " SHOTS("social_i_qa"),
     .template = "Q: {passage} {question}\nA:",
     .delimiter = " ",
     .by_form = true},
    /* lm-evaluation-harness puts two blanks before a choice of copa. */
    {.name = "copa",
     .summary = "cause or effect of a sentence",
     .files = FILES("copa"),
     .shots = SHOTS("copa"),
     .template = "{question}",
     .delimiter = "  ",
     .by_form = true},
    {.name = "sciq",
     .summary = "science questions with a supporting text",
     .files = FILES("sciq"),
     .shots = SHOTS("sciq"),
     .template = "{passage}\nQuestion: {question}\nAnswer:",
     .delimiter = " ",
     .normed = true,
     .by_form = true},
    {.name = "race",
     .summary = "reading comprehension of school exams",
     .files = FILES("race"),
     .shots = SHOTS("race"),
     .template = "Article: {passage}\n\n{question}",
     .delimiter = " ",
     .by_form = true},
    {.name = "lambada",
     .summary = "the last word of a passage, decoded greedily",
     .files = FILES("lambada") " " FILES("lambada_openai"),
     .shots = SHOTS("lambada"),
     .template = "{prompt}",
     .delimiter = " ",
     .by_form = true,
     .grader = "prefix"},
    {.name = "triviaqa",
     .summary = "trivia, the answer is written",
     .files = FILES("triviaqa") " " FILES("trivia_qa"),
     .shots = SHOTS("triviaqa") " " SHOTS("trivia_qa"),
     .template = "Question: {question}?\nAnswer:",
     .delimiter = " ",
     .by_form = true,
     .grader = "exact_match",
     .stops = {"\n", ".", ","}},
    {.name = "nq",
     .summary = "Natural Questions, the answer is written",
     .files = FILES("nq") " " FILES("nq_open"),
     .shots = SHOTS("nq") " " SHOTS("nq_open"),
     .description = "Answer these questions:\n\n",
     .template = "Q: {question}?\nA:",
     .delimiter = " ",
     .example_end = "\n",
     .by_form = true,
     .grader = "exact_match",
     .stops = {"\n", ".", ","}},
    {.name = "math",
     .summary = "competition mathematics, the solution is written out",
     .files = FILES("math"),
     .shots = SHOTS("math"),
     .template = "Problem:\n{question}\n\nSolution:",
     .delimiter = " ",
     .by_form = true,
     .grader = "math",
     .stops = {"Problem:"},
     .max_tokens = 1024},
    {.name = "mmlu_pro",
     .summary = "14 subjects, up to ten choices, with written reasoning",
     .files = FILES("mmlu_pro") " " FILES("MMLU-Pro"),
     .shots = "mmlu_pro/valid*.json* MMLU-Pro/valid*.json* " SHOTS("mmlu_pro"),
     .description = "The following are multiple choice questions (with answers) about {subject}. "
                    "Think step by step and then finish your answer with \"the answer is (X)\" "
                    "where X is the correct letter choice.\n",
     .template = "Question:\n{question}\nOptions:\n{lettered}\nAnswer: Let's think step by step.",
     .delimiter = " ",
     .subject = true,
     .by_form = true,
     .grader = "letter",
     .stops = {"Question:"},
     .max_tokens = 2048},
    {.name = "gpqa",
     .summary = "graduate science, four lettered choices",
     .files = FILES("gpqa") " " FILES("gpqa_main") " " FILES("gpqa_diamond"),
     .template = "What is the correct answer to this question:{question}\nChoices:\n"
                 "{parenthesized}\nAnswer:",
     .delimiter = " ",
     .letters = true,
     .parentheses = true,
     .by_form = true},
    {.name = "bbh",
     .summary = "BIG-Bench Hard, one file per subject",
     .files = "bbh/*.jsonl " FILES("bbh"),
     .subject_description = bbh_description,
     .template = "Q: {question}\nA:",
     .delimiter = " ",
     .subject = true,
     .by_form = true,
     .grader = "exact",
     .stops = {"Q:", "\n\n", "</s>", "<|im_end|>"}},
};

/* How lines are asked whose form belongs to no built-in task. */
static const struct task_config form_tasks[] = {
    {.name = "choices", .template = QUESTION_ANSWER, .delimiter = " ", .normed = true},
    {.name = "query", .template = "{prompt}", .delimiter = " ", .normed = true},
    {.name = "continuation", .template = "{prompt}", .delimiter = " ", .grader = "prefix"},
    {.name = "free_answer",
     .template = "{prompt}",
     .delimiter = " ",
     .grader_by_golds = true,
     .stops = {"Question:", "\nQ:", "</s>", "<|im_end|>"}},
};

struct task_recipe {
    char *file, *shots, *question, *answer, *cluster, *description, *template, *delimiter, *grader;
    struct strings choices, stop;
    bool letters;
    int64_t max_tokens;
};
#define RECIPE(key, kind, field, fallback, help)                                                   \
    { key, kind, offsetof(struct task_recipe, field), fallback, 0, 0, NULL, help }
static const struct option_row recipe_rows[] = {
    RECIPE("file", OPT_STRING, file, NULL, "JSONL file, relative to the recipe"),
    RECIPE("shots", OPT_STRING, shots, NULL, "JSONL of examples for --shots"),
    RECIPE("question", OPT_STRING, question, "question", "field of the question"),
    RECIPE("choices", OPT_LIST, choices, NULL, "a field with a list, or a field for each choice"),
    RECIPE("answer", OPT_STRING, answer, "answer", "field: index from 0, letter, or text"),
    RECIPE("cluster", OPT_STRING, cluster, NULL, "field whose value dependent questions share"),
    RECIPE("description", OPT_STRING, description, NULL,
           "text before the examples and the question"),
    RECIPE("template", OPT_STRING, template, QUESTION_ANSWER, "context of an answer"),
    RECIPE("delimiter", OPT_STRING, delimiter, " ", "text between context and answer"),
    RECIPE("letters", OPT_BOOL, letters, NULL, "score A, B … instead of the choices' texts"),
    RECIPE("grader", OPT_STRING, grader, NULL, "generate, and grade the text"),
    RECIPE("stop", OPT_LIST, stop, NULL, "texts that end the generation"),
    {"max_tokens", OPT_INT, offsetof(struct task_recipe, max_tokens), "256", 1, 65536, "N",
     "maximum generated tokens"},
    {0},
};

void eval_question_release(struct eval_question *q) {
    for (int i = 0; i < q->n; i++) {
        free(q->options[i]);
        free(q->contexts[i]);
    }
    json_decref(q->chat);
    strings_release(&q->aliases);
    free(q->context);
    free(q->answer);
    free(q->example_answer);
    free(q->cluster);
    *q = (struct eval_question){0};
}

const char *eval_task_builtin(int i, const char **summary) {
    if (i >= (int)ARRAY_LEN(builtins)) return NULL;
    *summary = builtins[i].summary;
    return builtins[i].name;
}

/* reading */

struct question_list {
    struct eval_question *v;
    int64_t n, cap;
};

struct task_reader {
    struct eval_task *b;
    const struct task_config *config; /* NULL: the first line decides, see config_decide */
    const struct task_recipe *recipe; /* NULL: dataset_formats.c detects the form of a line */
    struct harness_task *harness;     /* or NULL; it replaces recipe and forms */
    struct question_list *questions;
    const char *path;
    const char *form;          /* of the lines of `path`; NULL before the first */
    bool has_chain_of_thought; /* examples show one */
};

static int subject_find_or_add(struct eval_task *b, const char *name) {
    for (int i = b->n_subjects - 1; i >= 0; i--)
        if (strcmp(b->subjects[i].name, name) == 0) return i;
    b->subjects = xrealloc(b->subjects, (size_t)(b->n_subjects + 1) * sizeof *b->subjects);
    b->subjects[b->n_subjects] = (struct eval_subject){.name = xstrdup(name)};
    return b->n_subjects++;
}

/* ".../high_school_physics_test.csv" → "high_school_physics". */
static char *subject_from_path(const char *path) {
    char *name = xstrdup(path_name(path)), *dot = strchr(name, '.'), *last;
    if (dot) *dot = 0;
    last = strrchr(name, '_');
    if (last &&
        (strcmp(last, "_test") == 0 || strcmp(last, "_dev") == 0 || strcmp(last, "_val") == 0))
        *last = 0;
    return name;
}

/* Appends a line for each choice, with its letter between `before` and `after`. */
static void lettered_choices_add(struct buf *b, const struct dataset_row *f, const char *before,
                                 const char *after) {
    for (int i = 0; i < f->n; i++)
        buf_printf(b, "%s%s%c%s %s", i ? "\n" : "", before, 'A' + i, after, f->choices[i]);
}

static void choices_add(struct buf *b, const struct dataset_row *f) {
    for (int i = 0; i < f->n; i++) buf_printf(b, "%s%s", i ? ", " : "", f->choices[i]);
}

/* Appends the value of the placeholder {name} of a template. */
static int template_value_add(struct buf *b, const char *name, const struct dataset_row *f,
                              const json_t *row, struct error *err) {
    char *value = NULL;
    if (strcmp(name, "question") == 0)
        buf_puts(b, f->question);
    else if (strcmp(name, "passage") == 0 && f->passage)
        buf_puts(b, f->passage);
    else if (strcmp(name, "prompt") == 0 && f->prompt)
        buf_puts(b, f->prompt);
    else if (strcmp(name, "lettered") == 0)
        lettered_choices_add(b, f, "", ".");
    else if (strcmp(name, "parenthesized") == 0)
        lettered_choices_add(b, f, "(", ")");
    else if (strcmp(name, "choices") == 0)
        choices_add(b, f);
    else if ((value = json_scalar_text(json_path_get(row, name))))
        buf_puts(b, value);
    else
        return error_set(err, ERR_FORMAT, "the template's '{%s}' is no field of the line", name);
    free(value);
    return OK;
}

static int template_fill(const char *t, const struct dataset_row *f, const json_t *row, char **out,
                         struct error *err) {
    struct buf b = {0};
    char name[64];
    int rc = OK;
    buf_puts(&b, "");
    while (*t && rc == OK) {
        size_t text = strcspn(t, "{"), n = t[text] ? strcspn(t + text + 1, "{}\n") : 0;
        buf_add(&b, t, text);
        t += text;
        if (!*t) break;
        if (t[n + 1] == '}' && n > 0 && n < sizeof name) {
            memcpy(name, t + 1, n);
            name[n] = 0;
            rc = template_value_add(&b, name, f, row, err);
            t += n + 2;
        } else {
            buf_add(&b, t++, 1); // a literal brace
        }
    }
    if (rc == OK)
        *out = b.data;
    else
        buf_release(&b);
    return rc;
}

static void strip_white_space(char *s) {
    size_t n = strlen(s), from = strspn(s, " \t\r\n");
    while (n > from && strchr(" \t\r\n", s[n - 1])) n--;
    memmove(s, s + from, n - from);
    s[n - from] = 0;
}

static void options_make(const struct task_config *config, struct dataset_row *f,
                         struct eval_question *q) {
    q->n = f->n;
    for (int i = 0; i < f->n; i++) {
        q->contexts[i] = f->contexts[i];
        q->options[i] = config->letters ? xasprintf(config->parentheses ? "(%c)" : "%c", 'A' + i)
                                        : f->choices[i];
        if (!config->letters) f->choices[i] = NULL;
        f->contexts[i] = NULL;
    }
}

/* Builds a question from a line. Moves strings from `f` to the question. */
static int question_make(const struct task_reader *r, struct dataset_row *f, const json_t *row,
                         struct eval_question *q, struct error *err) {
    const struct task_config *config = r->config;
    if (config->strip_white_space) strip_white_space(f->question);
    if (!f->contexts[0] && template_fill(config->template, f, row, &q->context, err) != OK)
        return err->code;
    q->correct = f->correct;
    if (config->grader && f->n)
        f->answer = xasprintf("%c", 'A' + f->correct); // the grader is `letter`
    else
        options_make(config, f, q);
    q->answer = f->answer;
    q->aliases = f->aliases;
    q->example_answer = f->example_answer;
    q->cluster = f->cluster ? f->cluster : f->passage && *f->passage ? xstrdup(f->passage) : NULL;
    f->answer = f->cluster = f->example_answer = NULL;
    f->aliases = (struct strings){0};
    return OK;
}

/* Reads a line according to a recipe. */
static int recipe_row_read(const struct task_recipe *recipe, const json_t *row,
                           struct dataset_row *f, struct error *err) {
    const json_t *list = recipe->choices.n == 1 ? json_path_get(row, recipe->choices.v[0]) : NULL,
                 *answer = json_path_get(row, recipe->answer);
    size_t n = list ? json_array_size(list) : (size_t)recipe->choices.n;
    if (!(f->question = json_scalar_text(json_path_get(row, recipe->question))))
        return error_set(err, ERR_FORMAT, "field '%s' is missing or no text", recipe->question);
    if (recipe->choices.n > 0 && (n < 2 || n > EVAL_MAX_OPTIONS))
        return error_set(err, ERR_FORMAT, "field '%s' has %zu choices; 2 to %d are allowed",
                         recipe->choices.v[0], n, EVAL_MAX_OPTIONS);
    for (; f->n < (int)n; f->n++) {
        const char *field = recipe->choices.v[list ? 0 : f->n];
        const json_t *v = list ? json_array_get(list, (size_t)f->n) : json_path_get(row, field);
        if (!(f->choices[f->n] = json_scalar_text(v)))
            return error_set(err, ERR_FORMAT, "field '%s': choice %d is not text", field, f->n);
    }
    if (recipe->cluster) f->cluster = json_scalar_text(json_path_get(row, recipe->cluster));
    f->correct = n ? choice_index(answer, f->choices, f->n) : -1;
    if (n && f->correct < 0)
        return error_set(err, ERR_FORMAT, "field '%s' names none of the %zu choices",
                         recipe->answer, n);
    if (!n && !(f->answer = json_scalar_text(answer)))
        return error_set(err, ERR_FORMAT, "field '%s' is missing or no text", recipe->answer);
    return OK;
}

static bool is_generated(const struct task_config *config) {
    return config->grader || config->grader_by_golds;
}

static const struct task_config *builtin_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(builtins); i++)
        if (strcmp(builtins[i].name, name) == 0) return &builtins[i];
    return NULL;
}

static const struct task_config *form_task_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(form_tasks); i++)
        if (strcmp(form_tasks[i].name, name) == 0) return &form_tasks[i];
    return NULL;
}

/* Checks that all lines of a file have the same form, and lets the form decide how they are asked,
 * if the task does not. */
static int config_decide(struct task_reader *r, const struct dataset_row *f, struct error *err) {
    if (r->form && strcmp(r->form, f->form) != 0)
        return error_set(err, ERR_FORMAT,
                         "the line has the form '%s', but the lines before it have the form '%s'",
                         f->form, r->form);
    r->form = f->form;
    if (r->config && !r->config->by_form) return OK;
    const struct task_config *form_task = form_task_find(f->task),
                             *config = form_task ? form_task : builtin_find(f->task);
    if (!r->config || form_task) r->config = config;
    return r->config == config ? OK
                               : error_set(err, ERR_FORMAT,
                                           "the line has the form '%s', which task '%s' cannot ask",
                                           f->form, r->b->name);
}

/* Checks that a line has choices if the task has no grader, and no choices if it has one, except
 * that a letter is graded. */
static int row_kind_check(const struct task_reader *r, const struct dataset_row *f,
                          struct error *err) {
    if (r->config->letters && f->n > 26)
        return error_set(err, ERR_FORMAT, "%d choices; letters suffice for 26", f->n);
    const char *grader = r->config->grader;
    bool letter = grader && strcmp(grader, "letter") == 0;
    if (f->correct >= 0 && (!is_generated(r->config) || letter)) return OK;
    if (f->correct < 0 && is_generated(r->config)) return OK;
    return error_set(err, ERR_FORMAT,
                     f->correct < 0 ? "the line has no choices; use a recipe with a grader"
                                    : "the line has choices, but the task has a grader");
}

/* Sets the subject: the field of the line, or else the name of the file. The subject is also the
 * cluster of a question without a cluster. */
static int subject_set(const struct task_reader *r, const char *row_subject,
                       struct eval_question *q, struct error *err) {
    char *name = !r->config->subject ? xstrdup("")
                 : row_subject       ? xstrdup(row_subject)
                                     : subject_from_path(r->path);
    q->subject = subject_find_or_add(r->b, name);
    if (r->config->subject && !q->cluster) q->cluster = xstrdup(name);
    free(name);
    if (r->b->n_subjects <= MAX_SUBJECTS) return OK;
    return error_set(err, ERR_FORMAT, "more than %d subjects", MAX_SUBJECTS);
}

/* Makes the question of a line as the recipe or the form of the line says. */
static int line_question_make(struct task_reader *r, const json_t *row, struct eval_question *q,
                              struct error *err) {
    struct dataset_row f = {0};
    int rc = r->recipe ? recipe_row_read(r->recipe, row, &f, err) : dataset_row_parse(row, &f, err);
    if (rc == OK && !r->recipe) rc = config_decide(r, &f, err);
    if (rc == OK) rc = row_kind_check(r, &f, err);
    if (rc == OK) rc = question_make(r, &f, row, q, err);
    if (rc == OK) rc = subject_set(r, f.subject, q, err);
    r->has_chain_of_thought |= f.chain_of_thought != NULL;
    dataset_row_release(&f);
    return rc;
}

static int question_read(struct task_reader *r, const json_t *row, int line, struct error *err) {
    struct question_list *questions = r->questions;
    if (questions->n == questions->cap) {
        int64_t cap = MAX(2 * questions->cap, (int64_t)256);
        struct eval_question *v = try_realloc(questions->v, (size_t)cap * sizeof *v, err);
        if (!v) return err->code;
        questions->v = v;
        questions->cap = cap;
    }
    struct eval_question *q = &questions->v[questions->n];
    *q = (struct eval_question){.path = r->path, .line = line};
    int rc = r->harness ? harness_question_make(r->harness, row, q, err)
                        : line_question_make(r, row, q, err);
    if (rc == OK && r->harness) rc = subject_set(r, NULL, q, err);
    if (rc == OK)
        questions->n++;
    else
        eval_question_release(q);
    return rc;
}

static int line_visit(void *ctx, const json_t *row, int line, struct error *err) {
    struct task_reader *r = ctx;
    int rc = question_read(r, row, line, err);
    return rc == OK ? OK : error_wrap(err, "'%s', line %d", r->path, line);
}

static int question_file_read(struct task_reader *r, const char *path, struct error *err) {
    r->path = path;
    r->form = NULL;
    if (!path_has_extension(path, ".csv")) return json_file_each(path, line_visit, r, err);
    return r->harness ? harness_csv_each(path, line_visit, r, err)
                      : csv_each(path, line_visit, r, err);
}

/* finding files */

/* Finds the files of the first pattern with a match, sorted by the bytes of their names. */
static void files_find(const char *dir, const char *patterns, struct strings *out) {
    char *list = xstrdup(patterns), *save = NULL;
    for (char *p = strtok_r(list, " ", &save); p && out->n == 0; p = strtok_r(NULL, " ", &save)) {
        struct buf b = {0};
        for (const char *c = dir; *c; c++) {
            if (strchr("*?[\\", *c)) buf_puts(&b, "\\");
            buf_add(&b, c, 1);
        }
        buf_printf(&b, "/%s", p);
        glob_t g = {0};
        if (glob(b.data, GLOB_NOSORT, NULL, &g) == 0)
            for (size_t i = 0; i < g.gl_pathc; i++) strings_add(out, g.gl_pathv[i]);
        globfree(&g);
        buf_release(&b);
    }
    free(list);
    strings_sort(out);
}

static int files_missing(const struct eval_task *b, const char *dir, const char *patterns,
                         const char *what, struct error *err) {
    if (!patterns) return error_set(err, ERR_MISSING, "there are no %s for '%s'", what, b->name);
    if (!dir)
        return error_set(err, ERR_USAGE, "%s of '%s' are in no folder; name one with --data", what,
                         b->name);
    return error_set(err, ERR_MISSING, "%s of '%s' are not in '%s'; a file '%.*s' would be read",
                     what, b->name, dir, (int)strcspn(patterns, " "), patterns);
}

/* Reads the files `paths`, or without paths the files in `dir` that the patterns find.
 * `description` names the files in messages. */
static int question_files_read(struct task_reader *r, const char *dir, const char *patterns,
                               const struct strings *paths, const char *description,
                               struct error *err) {
    struct strings files = {0};
    int rc = OK;
    for (int i = 0; i < paths->n; i++) strings_add(&files, paths->v[i]);
    if (paths->n == 0 && patterns && dir) files_find(dir, patterns, &files);
    if (files.n == 0) rc = files_missing(r->b, dir, patterns, description, err);
    for (int i = 0; rc == OK && i < files.n; i++) {
        strings_add(&r->b->files, files.v[i]);
        rc = question_file_read(r, r->b->files.v[r->b->files.n - 1], err);
    }
    strings_release(&files);
    return rc;
}

/* examples */

/* Appends an example: context, delimiter, answer and an empty line. */
static void example_add(struct buf *b, const struct eval_task *k, const struct task_config *config,
                        const struct eval_question *q) {
    const char *context = q->context ? q->context : q->contexts[q->correct],
               *answer = q->n ? q->options[q->correct] : q->answer;
    buf_printf(b, "%s%s%s%s", context, q->example_answer ? "" : k->delimiter,
               q->example_answer ? q->example_answer : answer,
               config->example_end ? config->example_end : "\n\n");
}

/* "abstract_algebra" → "abstract algebra", malloc'ed. */
static char *subject_words(const char *subject) {
    char *words = xstrdup(subject);
    for (char *c = words; *c; c++)
        if (*c == '_') *c = ' ';
    return words;
}

/* Appends the description that precedes the examples and questions of a subject. */
static void description_add(struct buf *b, const struct task_config *config, const char *subject) {
    const char *text = config->description ? config->description : "",
               *placeholder = config->plain_description ? NULL : strstr(text, "{subject}"),
               *own = config->subject_description ? config->subject_description(subject) : NULL;
    char *words = subject_words(subject);
    if (placeholder)
        buf_printf(b, "%.*s%s%s", (int)(placeholder - text), text, words,
                   placeholder + strlen("{subject}"));
    else
        buf_puts(b, text);
    if (own) buf_printf(b, "%s\n\n", own);
    free(words);
}

/* Sets the preamble of a subject: the description and the first `shots` examples of the subject. */
static int fewshot_preamble_make(struct eval_task *b, const struct task_config *config, int subject,
                                 const struct question_list *examples, int64_t shots,
                                 struct error *err) {
    struct buf text = {0};
    struct eval_subject *subject_entry = &b->subjects[subject];
    description_add(&text, config, subject_entry->name);
    int64_t n = 0;
    for (int64_t i = 0; i < examples->n && n < shots; i++) {
        if (examples->v[i].subject != subject) continue;
        example_add(&text, b, config, &examples->v[i]);
        n++;
    }
    subject_entry->preamble = text.data;
    if (n >= shots) return OK;
    char *words = subject_words(subject_entry->name);
    error_set(err, ERR_USAGE, "--shots '%lld' is more than the %lld examples of '%s'%s%s",
              (long long)shots, (long long)n, b->name, *words ? ", " : "", words);
    free(words);
    return err->code;
}

/* Moves the first `shots` questions of each subject to the examples. */
static int examples_split_off(const struct eval_task *b, struct question_list *questions,
                              int64_t shots, struct question_list *examples, struct error *err) {
    int64_t *n_taken = xcalloc((size_t)b->n_subjects, sizeof *n_taken), to = 0;
    examples->v = try_calloc((size_t)questions->n, sizeof *examples->v, err);
    for (int64_t i = 0; examples->v && i < questions->n; i++) {
        struct eval_question *q = &questions->v[i];
        if (n_taken[q->subject]++ < shots)
            examples->v[examples->n++] = *q;
        else
            questions->v[to++] = *q;
    }
    free(n_taken);
    if (!examples->v) return err->code;
    int64_t n_lines = questions->n;
    questions->n = to;
    return to ? OK
              : error_set(err, ERR_MISSING,
                          "there are no examples for --shots: the first %lld lines of '%s' would "
                          "be the examples, and it has %lld",
                          (long long)shots, b->name, (long long)n_lines);
}

/* Keeps a random sample of n questions, in their order; n = 0: all. */
static void questions_sample(struct question_list *q, int64_t n, uint64_t seed) {
    if (n == 0 || n >= q->n) return;
    uint32_t *order = xcalloc((size_t)q->n, sizeof *order);
    uint8_t *keep = xcalloc((size_t)q->n, 1);
    struct rng r = rng_make(seed, RNG_SELECT, 0, 0);
    for (int64_t i = 0; i < q->n; i++) order[i] = (uint32_t)i;
    rng_shuffle(&r, order, (size_t)q->n);
    for (int64_t i = 0; i < n; i++) keep[order[i]] = 1;
    int64_t to = 0;
    for (int64_t i = 0; i < q->n; i++) {
        if (keep[i])
            q->v[to++] = q->v[i];
        else
            eval_question_release(&q->v[i]);
    }
    q->n = to;
    free(order);
    free(keep);
}

/* Bytes of the preamble, the longest context and the longest option of a question. */
static size_t question_bytes(const struct eval_task *b, const struct eval_question *q) {
    size_t context = q->context ? strlen(q->context) : 0, option = 0;
    for (int i = 0; i < q->n; i++) {
        if (q->contexts[i]) context = MAX(context, strlen(q->contexts[i]));
        option = MAX(option, strlen(q->options[i]));
    }
    return strlen(b->subjects[q->subject].preamble) + context + strlen(b->delimiter) + option;
}

static void questions_release(struct question_list *q) {
    for (int64_t i = 0; i < q->n; i++) eval_question_release(&q->v[i]);
    free(q->v);
    *q = (struct question_list){0};
}

/* graders of free answers */

/* A number without words: "12", "-1,234.5", "$3", "50%"; of "… #### 12", the number at the end. */
static bool is_number(const char *gold) {
    const char *mark = strstr(gold, "#### ");
    struct buf b = {0};
    if (mark) gold = mark + strlen("#### ");
    buf_puts(&b, "");
    text_normalize(gold, strlen(gold), &b);
    const char *s = b.data + strspn(b.data, " $¥€£+-");
    size_t n = strspn(s, "0123456789.,"), rest = n + strspn(s + n, "% ");
    const char *digit = strpbrk(s, "0123456789");
    bool number = digit && digit < s + n && !s[rest];
    buf_release(&b);
    return number;
}

/* Whether the text has a LaTeX command. */
static bool has_latex(const char *gold) {
    for (const char *p = gold; (p = strchr(p, '\\')); p++)
        if ((p[1] >= 'a' && p[1] <= 'z') || (p[1] >= 'A' && p[1] <= 'Z')) return true;
    return false;
}

/* The grader of free answers: `number` if all gold answers are numbers, `math` if one has a LaTeX
 * command, else `exact_match`. */
static const char *gold_grader(const struct question_list *q) {
    bool numbers = true;
    for (int64_t i = 0; i < q->n; i++) {
        if (has_latex(q->v[i].answer)) return "math";
        numbers &= is_number(q->v[i].answer);
        for (int k = 0; k < q->v[i].aliases.n; k++) numbers &= is_number(q->v[i].aliases.v[k]);
    }
    return numbers ? "number" : "exact_match";
}

static bool has_line_end(const struct question_list *q) {
    for (int64_t i = 0; i < q->n; i++)
        if (strchr(q->v[i].answer, '\n')) return true;
    return false;
}

/* Bytes of the longest gold answer. */
static size_t longest_answer(const struct question_list *q) {
    size_t longest = 0;
    for (int64_t i = 0; i < q->n; i++) {
        longest = MAX(longest, strlen(q->v[i].answer));
        for (int k = 0; k < q->v[i].aliases.n; k++)
            longest = MAX(longest, strlen(q->v[i].aliases.v[k]));
    }
    return longest;
}

/* Sets grader, stops and token limit of a task with generated answers. A line ends an answer of
 * words, unless examples show reasoning before it. */
static void generation_configure(struct eval_task *b, const struct task_reader *r,
                                 const struct question_list *q, bool has_examples) {
    const struct task_config *config = r->config;
    const char *grader = config->grader ? config->grader : gold_grader(q);
    b->output_type = EVAL_GENERATE;
    b->grader = xstrdup(grader);
    b->max_tokens = config->max_tokens ? config->max_tokens : GENERATE_TOKENS;
    if (!r->recipe && strcmp(grader, "prefix") == 0)
        b->max_tokens = (int32_t)MIN(longest_answer(q) + PREFIX_TOKENS, (size_t)INT32_MAX);
    for (size_t i = 0; i < ARRAY_LEN(config->stops) && config->stops[i]; i++)
        strings_add(&b->stops, config->stops[i]);
    if (config->grader_by_golds && strcmp(grader, "exact_match") == 0 && !has_line_end(q) &&
        !(has_examples && r->has_chain_of_thought))
        strings_add(&b->stops, "\n");
}

static void task_configure(struct eval_task *b, const struct task_reader *r,
                           const struct question_list *q, bool has_examples) {
    b->output_type = EVAL_LOGLIKELIHOOD;
    b->form = r->form;
    b->delimiter = xstrdup(r->config->delimiter);
    b->reports_acc_norm = r->config->normed;
    if (is_generated(r->config)) generation_configure(b, r, q, has_examples);
}

/* The origin of a task's questions, and their prompts and grading. */
struct task_source {
    const struct task_config *config; /* NULL: the form of an unnamed file decides */
    const struct task_recipe *recipe;
    struct harness_task *harness;
    struct strings files, shots; /* the user's files, which replace the patterns of `config` */
};

static void task_source_release(struct task_source *s) {
    strings_release(&s->files);
    strings_release(&s->shots);
}

/* Whether the first questions are the examples. */
static bool has_own_examples(const struct task_source *s, const struct task_reader *r) {
    if (s->harness) return s->harness->own_examples && !s->harness->samples;
    return !s->recipe && (!s->config || (s->config->by_form && !r->config->shots));
}

static int examples_read(struct task_reader *r, const struct task_source *s, const char *dir,
                         struct error *err) {
    const json_t *samples = s->harness ? s->harness->samples : NULL;
    if (!samples)
        return question_files_read(r, dir, r->config->shots, &s->shots, "examples for --shots",
                                   err);
    r->path = r->b->name;
    for (size_t i = 0; i < json_array_size(samples); i++)
        if (question_read(r, json_array_get(samples, i), 0, err) != OK)
            return error_wrap(err, "'%s', example %zu", r->b->name, i + 1);
    return OK;
}

/* Reads the questions and examples of a task from files. */
static int task_read_files(struct eval_task *b, const struct task_source *s,
                           const struct eval_task_options *o, struct error *err) {
    struct question_list questions = {0}, examples = {0};
    struct task_reader r = {.b = b,
                            .config = s->config,
                            .recipe = s->recipe,
                            .harness = s->harness,
                            .questions = &questions};
    int rc = question_files_read(&r, o->dir, s->config ? s->config->files : NULL, &s->files,
                                 "the questions", err);
    if (rc == OK && questions.n == 0)
        rc = error_set(err, ERR_FORMAT, "'%s' has no question", b->files.v[0]);
    if (s->harness) r.form = s->harness->form;
    if (rc == OK) task_configure(b, &r, &questions, o->shots > 0);
    bool own_examples = rc == OK && o->shots && has_own_examples(s, &r);
    if (own_examples) rc = examples_split_off(b, &questions, o->shots, &examples, err);
    questions_sample(&questions, o->n, o->seed);
    int n_question_subjects = b->n_subjects; // examples may have more subjects
    r.questions = &examples;
    if (rc == OK && o->shots && !own_examples) rc = examples_read(&r, s, o->dir, err);
    for (int i = 0; rc == OK && i < b->n_subjects; i++)
        rc = fewshot_preamble_make(b, r.config, i, &examples,
                                   i < n_question_subjects ? o->shots : 0, err);
    for (int64_t i = 0; rc == OK && i < questions.n; i++)
        b->longest = MAX(b->longest, question_bytes(b, &questions.v[i]));
    b->questions = questions.v;
    b->n_questions = questions.n;
    questions_release(&examples);
    return rc;
}

/* Adds the file that a recipe names, if it names one. */
static void recipe_file_add(struct strings *out, const char *recipe_path, const char *name) {
    if (!name) return;
    char *path = path_relative_to(recipe_path, name);
    strings_add(out, path);
    free(path);
}

static int recipe_read(struct eval_task *b, const struct yaml *y, const struct eval_task_options *o,
                       struct error *err) {
    struct task_recipe recipe;
    options_default(recipe_rows, &recipe);
    int rc = options_from_yaml(recipe_rows, &recipe, y, NULL, err);
    if (rc == OK && !recipe.file) rc = error_set(err, ERR_USAGE, "'%s' names no 'file'", y->path);
    if (rc == OK && !recipe.grader && recipe.choices.n == 0)
        strings_add(&recipe.choices, "choices");
    if (rc == OK) {
        struct task_config config = {.description = recipe.description,
                                     .template = recipe.template,
                                     .delimiter = recipe.delimiter,
                                     .letters = recipe.letters,
                                     .normed = !recipe.letters && !recipe.grader,
                                     .grader = recipe.grader};
        struct task_source source = {.config = &config, .recipe = &recipe};
        recipe_file_add(&source.files, y->path, recipe.file);
        recipe_file_add(&source.shots, y->path, recipe.shots);
        rc = task_read_files(b, &source, o, err);
        if (recipe.grader) b->max_tokens = (int32_t)recipe.max_tokens;
        for (int i = 0; i < recipe.stop.n; i++) strings_add(&b->stops, recipe.stop.v[i]);
        task_source_release(&source);
    }
    options_release(recipe_rows, &recipe);
    return rc;
}

/* Reads the questions of an open task of lm-evaluation-harness. num_fewshot is the number of
 * examples without --shots. */
static int harness_questions_read(struct eval_task *b, struct harness_task *h,
                                  const struct eval_task_options *o, struct error *err) {
    struct eval_task_options with_shots = *o;
    const struct task_config config = {.files = h->patterns,
                                       .shots = h->shot_patterns,
                                       .description = h->description,
                                       .plain_description = true,
                                       .delimiter = h->target_delimiter,
                                       .example_end = h->fewshot_delimiter,
                                       .normed = h->reports_acc_norm,
                                       .grader = h->output_type != EVAL_GENERATE ? NULL
                                                 : h->is_continuation            ? "prefix"
                                                                                 : "verbatim",
                                       .max_tokens = h->max_tokens};
    const struct task_source source = {
        .config = &config, .harness = h, .files = h->files, .shots = h->shots};
    if (!o->shots) with_shots.shots = h->n_shots;
    if (with_shots.shots)
        log_info("%s: the first %lld examples precede every question", h->name,
                 (long long)with_shots.shots);
    int rc = task_read_files(b, &source, &with_shots, err);
    for (int i = 0; i < h->stops.n; i++) strings_add(&b->stops, h->stops.v[i]);
    b->filter = h->filter;
    h->filter = NULL;
    return rc;
}

static int harness_read(struct eval_task *b, const struct yaml *y,
                        const struct eval_task_options *o, struct error *err) {
    struct harness_task h;
    int rc = harness_task_open(&h, y, o->dir, err);
    if (rc == OK) {
        free(b->name);
        b->name = xstrdup(h.name);
        rc = harness_questions_read(b, &h, o, err);
    }
    harness_task_release(&h);
    return rc;
}

static int yaml_task_read(struct eval_task *b, const char *path, const struct eval_task_options *o,
                          struct error *err) {
    struct yaml y = {0};
    int rc = yaml_load_functions(&y, path, err);
    if (rc == OK)
        rc = harness_task_detect(y.root) ? harness_read(b, &y, o, err) : recipe_read(b, &y, o, err);
    yaml_release(&y);
    return rc;
}

static int file_task_read(struct eval_task *b, const char *path, const struct eval_task_options *o,
                          struct error *err) {
    struct task_source source = {0};
    strings_add(&source.files, path);
    int rc = task_read_files(b, &source, o, err);
    task_source_release(&source);
    return rc;
}

/* "dir/set.jsonl" → "set". */
static char *name_from_path(const char *path) {
    char *name = xstrdup(path_name(path)), *dot = strrchr(name, '.');
    if (dot && dot > name) *dot = 0;
    return name;
}

static int family_open(struct eval_task *b, int family, const struct eval_task_options *o,
                       struct error *err) {
    if (o->shots)
        return error_set(err, ERR_USAGE, "'%s' takes no examples; leave out --shots", b->name);
    b->family = family;
    if (!b->is_split_evidence) b->longest = (size_t)family_max_tokens(family);
    b->output_type = EVAL_CHAT_CHOICE;
    b->n_questions = o->n ? o->n : FAMILY_N;
    b->split = o->split;
    b->seed = o->seed;
    return OK;
}

/* LightEval describes tasks in Python, and selects them with SUITE|TASK|SHOTS. */
static bool is_python_task(const char *name) {
    return strchr(name, '|') || path_has_extension(name, ".py");
}

static int python_task_error(const char *name, struct error *err) {
    return error_set(err, ERR_USAGE,
                     "'%s' is a task of LightEval, which describes tasks in Python; use a task "
                     "that 'shoal eval --help' lists (--tasks arc_challenge --shots 25), a recipe, "
                     "or a YAML file of lm-evaluation-harness",
                     name);
}

int eval_task_open(struct eval_task *b, const char *name, const struct eval_task_options *o,
                   struct error *err) {
    *b = (struct eval_task){.family = -1};
    int family = family_find(name), shares = split_evidence_find(name);
    bool file = strchr(name, '/') || path_has_extension(name, ".jsonl") ||
                path_has_extension(name, ".json"),
         recipe = path_has_extension(name, ".yaml") || path_has_extension(name, ".yml");
    b->name = file || recipe ? name_from_path(name) : xstrdup(name);
    if (is_python_task(name)) return python_task_error(name, err);
    if (recipe) return yaml_task_read(b, name, o, err);
    if (file) return file_task_read(b, name, o, err);
    b->is_split_evidence = family < 0 && shares >= 0;
    if (family >= 0 || b->is_split_evidence)
        return family_open(b, b->is_split_evidence ? shares : family, o, err);
    const struct task_source builtin = {.config = builtin_find(name)};
    if (builtin.config) return task_read_files(b, &builtin, o, err);
    return error_set(err, ERR_USAGE,
                     "no task '%s'; a task is a name that 'shoal eval --help' lists, a JSONL file, "
                     "a recipe or a task file of lm-evaluation-harness",
                     name);
}

void eval_task_release(struct eval_task *b) {
    for (int64_t i = 0; b->questions && i < b->n_questions; i++)
        eval_question_release(&b->questions[i]);
    for (int i = 0; i < b->n_subjects; i++) {
        free(b->subjects[i].name);
        free(b->subjects[i].preamble);
    }
    strings_release(&b->files);
    strings_release(&b->stops);
    answer_filter_free(b->filter);
    free(b->subjects);
    free(b->questions);
    free(b->name);
    free(b->delimiter);
    free(b->grader);
    *b = (struct eval_task){.family = -1};
}

static void item_generate(const struct eval_task *b, int64_t i, struct task_item *out) {
    if (b->is_split_evidence)
        split_evidence_item(b->family, b->split, b->seed, (uint32_t)i, out);
    else
        family_item(b->family, b->split, b->seed, (uint32_t)i, false, out);
}

const struct eval_question *eval_task_question(const struct eval_task *b, int64_t i,
                                               struct eval_question *scratch) {
    *scratch = (struct eval_question){0};
    if (b->family < 0) return &b->questions[i];
    struct task_item it;
    item_generate(b, i, &it);
    *scratch = (struct eval_question){.context = it.question,
                                      .chat = it.chat,
                                      .whole_replies = it.whole_replies,
                                      .n = it.n_choices,
                                      .correct = it.correct,
                                      .cluster = it.key};
    for (int k = 0; k < it.n_choices; k++) {
        scratch->options[k] = it.choices[k];
        it.choices[k] = NULL;
    }
    it.question = it.key = NULL;
    it.chat = NULL;
    task_item_release(&it);
    return scratch;
}

/* for teams */

/* Length of the common prefix of a question's contexts up to its last blank; 0 without a blank. */
static size_t contexts_common_prefix(const struct eval_question *q) {
    const char *first = q->contexts[0];
    size_t n = strlen(first);
    for (int k = 1; k < q->n; k++) {
        size_t n_equal = 0;
        while (n_equal < n && q->contexts[k][n_equal] == first[n_equal]) n_equal++;
        n = n_equal;
    }
    while (n > 0 && first[n - 1] != ' ') n--;
    return n;
}

/* Skips a leading blank, because the chat prompt adds one. */
static const char *skip_blank(const char *text) {
    return text + (*text == ' ');
}

/* Converts a question from a file to an item for a team. */
static void question_to_item(const struct eval_task *b, const struct eval_question *q,
                             struct task_item *out) {
    size_t shared = q->contexts[0] ? contexts_common_prefix(q) : 0;
    const char *context = q->context ? q->context : q->contexts[0];
    int len = q->contexts[0] ? (int)shared : (int)strlen(context);
    *out = (struct task_item){.n_choices = q->n,
                              .correct = q->correct,
                              .lang = language_names[language_detect(context)],
                              .gold = q->n ? NULL : xstrdup(q->answer)};
    for (int i = 0; i < q->aliases.n; i++) strings_add(&out->gold_aliases, q->aliases.v[i]);
    out->question = xasprintf("%s%.*s", b->subjects[q->subject].preamble, len, len ? context : "");
    for (size_t n = strlen(out->question); n && out->question[n - 1] == ' '; n--)
        out->question[n - 1] = 0;
    if (!*out->question) {
        free(out->question);
        out->question = xstrdup("Which is right?");
    }
    for (int k = 0; k < q->n; k++) {
        char *choice = q->contexts[0] ? xasprintf("%s%s%s", q->contexts[k] + shared, b->delimiter,
                                                  q->options[k])
                                      : xstrdup(q->options[k]);
        out->choices[k] = xstrdup(skip_blank(choice));
        free(choice);
    }
}

struct task_item *eval_task_items(const struct eval_task *b) {
    struct task_item *v = xcalloc((size_t)MAX(b->n_questions, 1), sizeof *v);
    for (int64_t i = 0; i < b->n_questions; i++) {
        if (b->family < 0)
            question_to_item(b, &b->questions[i], &v[i]);
        else
            item_generate(b, i, &v[i]);
    }
    return v;
}

void task_items_release(struct task_item *v, int64_t n) {
    for (int64_t i = 0; v && i < n; i++) task_item_release(&v[i]);
    free(v);
}

static int task_add(struct eval_task **v, int *n, const char *name,
                    const struct eval_task_options *o, struct error *err) {
    *v = xrealloc(*v, (size_t)(*n + 1) * sizeof **v);
    return eval_task_open(&(*v)[(*n)++], name, o, err);
}

int eval_tasks_open(const char *list, const struct eval_task_options *o, struct eval_task **out,
                    int *n, struct error *err) {
    char *copy = xstrdup(list), *save = NULL;
    int rc = OK;
    *out = NULL;
    *n = 0;
    for (char *t = strtok_r(copy, ",", &save); t && rc == OK; t = strtok_r(NULL, ",", &save)) {
        bool set[MAX_FAMILIES] = {false};
        if (!family_set(t, set)) rc = task_add(out, n, t, o, err);
        for (int f = 0; rc == OK && f < family_count(); f++)
            if (set[f]) rc = task_add(out, n, task_families[f]->name, o, err);
    }
    if (rc == OK && *n == 0) rc = error_set(err, ERR_USAGE, "'%s' names no task", list);
    free(copy);
    return rc;
}
