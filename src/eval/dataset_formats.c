/*
 * dataset_formats: reads lines of question files in common formats.
 *
 * The fields of a line determine its form, so no option is needed: a file may be the Hugging Face
 * dump of a data set, a file of llm-foundry or a user's file. This file extracts question, choices
 * and the right answer; task.c builds the text for the model, except for lines that contain the
 * whole prompt (prompt_cue.c completes these).
 *
 * Invariants: a result owns its strings. A line has either 2 to EVAL_MAX_OPTIONS choices, and
 * `correct` is the index of one of them; or no choices and a text answer, and `correct` is -1.
 */
#define _GNU_SOURCE
#include "eval/eval.h"

#include "grade/grade.h"

#include <stdlib.h>
#include <string.h>
#include <unicase.h>

void dataset_row_release(struct dataset_row *f) {
    for (int i = 0; i < EVAL_MAX_OPTIONS; i++) {
        free(f->choices[i]);
        free(f->contexts[i]);
    }
    free(f->question);
    free(f->passage);
    free(f->prompt);
    free(f->answer);
    free(f->chain_of_thought);
    free(f->example_answer);
    strings_release(&f->aliases);
    free(f->cluster);
    free(f->subject);
    *f = (struct dataset_row){0};
}

const json_t *json_path_get(const json_t *row, const char *path) {
    char name[128];
    for (const char *dot; row && (dot = strchr(path, '.')); path = dot + 1) {
        if ((size_t)(dot - path) >= sizeof name) return NULL;
        memcpy(name, path, (size_t)(dot - path));
        name[dot - path] = 0;
        row = json_object_get(row, name);
    }
    return json_object_get(row, path);
}

char *json_scalar_text(const json_t *v) {
    if (json_is_string(v)) return xstrdup(json_string_value(v));
    return json_is_number(v) ? json_canonical(v) : NULL;
}

/* The text of a required field, or NULL and an error. */
static char *field_text(const json_t *row, const char *field, struct error *err) {
    char *text = json_scalar_text(json_path_get(row, field));
    if (!text) error_set(err, ERR_FORMAT, "field '%s' is missing or no text", field);
    return text;
}

int choice_index(const json_t *answer, char *const *choices, int n) {
    json_int_t index = -1;
    const char *s = json_string_value(answer);
    if (json_is_integer(answer)) index = json_integer_value(answer);
    if (json_is_boolean(answer)) index = json_is_true(answer);
    for (int i = 0; s && index < 0 && i < n; i++)
        if (strcmp(s, choices[i]) == 0) index = i;
    if (s && index < 0 && s[0] && !s[1]) index = *s >= 'A' && *s <= 'Z' ? *s - 'A' : *s - '0';
    return index >= 0 && index < n ? (int)index : -1;
}

/* Sets `correct` to `index`; -1: reports that `field` names no choice. */
static int correct_set(struct dataset_row *f, const json_t *row, const char *field, int index,
                       struct error *err) {
    const json_t *v = json_path_get(row, field);
    f->correct = index;
    if (index >= 0) return OK;
    if (!v) return error_set(err, ERR_FORMAT, "field '%s' is missing", field);
    char *text = json_canonical(v);
    error_set(err, ERR_FORMAT, "field '%s': '%.64s' names none of the %d choices", field, text,
              f->n);
    free(text);
    return err->code;
}

static int choice_add(struct dataset_row *f, const json_t *v, const char *field,
                      struct error *err) {
    if (f->n == EVAL_MAX_OPTIONS)
        return error_set(err, ERR_FORMAT, "field '%s' has more than %d choices", field,
                         EVAL_MAX_OPTIONS);
    if (!(f->choices[f->n] = json_scalar_text(v)))
        return error_set(err, ERR_FORMAT, "field '%s': choice %d is not text", field, f->n);
    f->n++;
    return OK;
}

static int choices_read(struct dataset_row *f, const json_t *row, const char *field,
                        struct error *err) {
    const json_t *v = json_path_get(row, field);
    for (size_t i = 0; i < json_array_size(v); i++)
        if (choice_add(f, json_array_get(v, i), field, err) != OK) return err->code;
    if (f->n < 2) return error_set(err, ERR_FORMAT, "field '%s' has fewer than 2 choices", field);
    return OK;
}

static int question_read(struct dataset_row *f, const json_t *row, const char *field,
                         struct error *err) {
    return (f->question = field_text(row, field, err)) ? OK : err->code;
}

/* Reads question, choices and answer from the named fields. */
static int question_choices_read(struct dataset_row *f, const json_t *row, const char *question,
                                 const char *choices, const char *answer, struct error *err) {
    if (question_read(f, row, question, err) != OK || choices_read(f, row, choices, err) != OK)
        return err->code;
    return correct_set(f, row, answer, choice_index(json_path_get(row, answer), f->choices, f->n),
                       err);
}

/* Removes `prefix` from s, in place. */
static void prefix_strip(char *s, const char *prefix) {
    size_t n = strlen(prefix);
    if (strncmp(s, prefix, n) == 0) memmove(s, s + n, strlen(s + n) + 1);
}

/* Splits a boolq question "Passage: …\nQuestion: …?" into passage and question; removes the
 * question mark. Leaves other questions unchanged. */
static void passage_split(struct dataset_row *f) {
    static const char separator_text[] = "\nQuestion: ";
    char *separator = NULL;
    if (strncmp(f->question, "Passage: ", 9) != 0) return;
    for (char *p = f->question; (p = strstr(p, separator_text)); p++) separator = p;
    if (!separator) return;
    char *question = xstrdup(separator + strlen(separator_text));
    size_t n = strlen(question);
    if (n > 0 && question[n - 1] == '?') question[n - 1] = 0;
    *separator = 0;
    prefix_strip(f->question, "Passage: ");
    f->passage = f->question;
    f->question = question;
}

/* llm-foundry: the field `query` is the prompt; named tasks use the question in it, which may begin
 * with "Question: " or "Passage: ". */
static int llm_foundry_read(const json_t *row, struct dataset_row *f, struct error *err) {
    if (question_choices_read(f, row, "query", "choices", "gold", err) != OK) return err->code;
    f->prompt = prompt_of_query(f->question);
    prefix_strip(f->question, "Question: ");
    passage_split(f);
    return OK;
}

/* llm-foundry's winogrande: two contexts with the same continuation. */
static int llm_foundry_winogrande_read(const json_t *row, struct dataset_row *f,
                                       struct error *err) {
    char *continuation = field_text(row, "continuation", err);
    int rc = continuation ? choices_read(f, row, "context_options", err) : err->code;
    for (int i = 0; rc == OK && i < f->n; i++) {
        f->contexts[i] = f->choices[i];
        f->choices[i] = xstrdup(continuation);
    }
    free(continuation);
    if (rc != OK) return rc;
    f->question = xstrdup(f->contexts[0]);
    return correct_set(f, row, "gold", choice_index(json_path_get(row, "gold"), f->contexts, f->n),
                       err);
}

/* winogrande: each option replaces '_' in the sentence; the text after '_' is scored. */
static int winogrande_read(const json_t *row, struct dataset_row *f, struct error *err) {
    char *sentence = field_text(row, "sentence", err),
         *blank = sentence ? strchr(sentence, '_') : NULL;
    if (sentence && !blank) error_set(err, ERR_FORMAT, "field 'sentence' has no '_'");
    const char *after_blank = blank ? blank + 1 + strspn(blank + 1, " \t\n") : "";
    for (int i = 0; blank && i < 2; i++) {
        char *option = field_text(row, i ? "option2" : "option1", err);
        if (!option) break;
        f->contexts[f->n] = xasprintf("%.*s%s", (int)(blank - sentence), sentence, option);
        f->choices[f->n++] = xstrdup(after_blank);
        free(option);
    }
    if (f->n == 2) f->question = xstrdup(sentence);
    free(sentence);
    if (f->n < 2) return err->code;
    char *answer = json_scalar_text(json_path_get(row, "answer"));
    int index =
        answer && (strcmp(answer, "1") == 0 || strcmp(answer, "2") == 0) ? *answer - '1' : -1;
    free(answer);
    return correct_set(f, row, "answer", index, err);
}

/* Each choice has a label, which is a letter or a number; answerKey is the right label. */
static int labelled_choices_read(struct dataset_row *f, const json_t *row, const char *question,
                                 struct error *err) {
    if (question_read(f, row, question, err) != OK ||
        choices_read(f, row, "choices.text", err) != OK)
        return err->code;
    const json_t *labels = json_path_get(row, "choices.label"),
                 *key = json_path_get(row, "answerKey");
    int index = -1;
    for (int i = 0; i < f->n; i++)
        if (json_equal(json_array_get(labels, (size_t)i), key)) index = i;
    return correct_set(f, row, "answerKey", index, err);
}

static int arc_read(const json_t *row, struct dataset_row *f, struct error *err) {
    return labelled_choices_read(f, row, "question", err);
}

/* boolq: the choices are "no" and "yes", in this order. */
static int boolq_read(const json_t *row, struct dataset_row *f, struct error *err) {
    const char *field = json_path_get(row, "label") ? "label" : "answer";
    f->choices[0] = xstrdup("no");
    f->choices[1] = xstrdup("yes");
    f->n = 2;
    if (!(f->passage = field_text(row, "passage", err))) return err->code;
    return question_read(f, row, "question", err) != OK
               ? err->code
               : correct_set(f, row, field, choice_index(json_path_get(row, field), f->choices, 2),
                             err);
}

/* jcommonsenseqa and the like: choice0, choice1 … and the index of the right one. */
static int numbered_choices_read(const json_t *row, struct dataset_row *f, struct error *err) {
    char field[24];
    for (int i = 0; i < EVAL_MAX_OPTIONS; i++) {
        snprintf(field, sizeof field, "choice%d", i);
        const json_t *v = json_path_get(row, field);
        if (!v) break;
        if (choice_add(f, v, field, err) != OK) return err->code;
    }
    if (f->n < 2) return error_set(err, ERR_FORMAT, "field 'choice1' is missing");
    return question_read(f, row, "question", err) != OK
               ? err->code
               : correct_set(f, row, "label",
                             choice_index(json_path_get(row, "label"), f->choices, f->n), err);
}

/* truthfulqa with one right answer (mc1): the label of the right answer is 1. */
static int mc1_read(const json_t *row, struct dataset_row *f, struct error *err) {
    if (question_read(f, row, "question", err) != OK ||
        choices_read(f, row, "mc1_targets.choices", err) != OK)
        return err->code;
    const json_t *labels = json_path_get(row, "mc1_targets.labels");
    int index = -1;
    for (int i = f->n - 1; i >= 0; i--)
        if (json_integer_value(json_array_get(labels, (size_t)i)) == 1) index = i;
    return correct_set(f, row, "mc1_targets.labels", index, err);
}

static void replace_all(struct buf *b, const char *from, const char *to) {
    struct buf out = {0};
    const char *p = b->data, *match;
    for (; (match = strstr(p, from)); p = match + strlen(from)) {
        buf_add(&out, p, (size_t)(match - p));
        buf_puts(&out, to);
    }
    buf_puts(&out, p);
    buf_release(b);
    *b = out;
}

/* Removes WikiHow's marks, malloc'ed: " [title]" becomes ". "; other brackets are deleted with
 * their content. */
static char *hellaswag_clean(const char *text) {
    size_t n = strlen(text);
    while (n > 0 && strchr(" \t\r\n", text[n - 1])) n--;
    size_t from = MIN(strspn(text, " \t\r\n"), n);
    struct buf b = {0}, out = {0};
    buf_add(&b, text + from, n - from);
    replace_all(&b, " [title]", ". ");
    const char *p = b.data;
    for (const char *open, *close; (open = strchr(p, '[')) && (close = strchr(open, ']')) &&
                                   !memchr(open, '\n', (size_t)(close - open));
         p = close + 1)
        buf_add(&out, p, (size_t)(open - p));
    buf_puts(&out, p);
    replace_all(&out, "  ", " ");
    buf_release(&b);
    return out.data;
}

/* Appends `s` with its first letter in upper case and the others in lower case. */
static void capitalized_add(const char *s, struct buf *out) {
    size_t n = 0, first = (*s & 0x80) ? 1 : (*s != 0);
    while (first && (s[first] & 0xC0) == 0x80) first++;
    uint8_t *head = u8_totitle((const uint8_t *)s, first, "", NULL, NULL, &n);
    if (head) buf_add(out, head, n);
    uint8_t *tail = u8_tolower((const uint8_t *)s + first, strlen(s + first), "", NULL, NULL, &n);
    if (tail) buf_add(out, tail, n);
    free(head);
    free(tail);
}

/* hellaswag: the question is "activity: first sentence Beginning of the second"; the choices are
 * its endings. */
static int hellaswag_read(const json_t *row, struct dataset_row *f, struct error *err) {
    struct buf b = {0};
    const char *label = json_string_value(json_path_get(row, "activity_label")),
               *first = json_string_value(json_path_get(row, "ctx_a")),
               *second = json_string_value(json_path_get(row, "ctx_b"));
    char *context = json_scalar_text(json_path_get(row, "ctx"));
    if (label) buf_printf(&b, "%s: ", label);
    if (first && second) {
        buf_printf(&b, "%s ", first);
        capitalized_add(second, &b);
    } else {
        buf_puts(&b, context ? context : "");
    }
    f->question = hellaswag_clean(b.data);
    buf_release(&b);
    free(context);
    if (choices_read(f, row, "endings", err) != OK) return err->code;
    for (int i = 0; i < f->n; i++) {
        char *raw = f->choices[i];
        f->choices[i] = hellaswag_clean(raw);
        free(raw);
    }
    return correct_set(f, row, "label", choice_index(json_path_get(row, "label"), f->choices, f->n),
                       err);
}

static int choice_list_read(const json_t *row, struct dataset_row *f, struct error *err) {
    return question_choices_read(f, row, "question", "choices", "answer", err);
}

/* free answers */

static void alias_add(struct dataset_row *f, const json_t *v) {
    char *text = json_scalar_text(v);
    if (text && text_trimmed_len(text) > 0 && strcmp(text, f->answer) != 0)
        strings_add(&f->aliases, text);
    free(text);
}

/* Reads the right answer and the texts of the list `aliases` (NULL: none), which are as right. An
 * answer that is a list has its aliases in itself. */
static int golds_read(struct dataset_row *f, const json_t *row, const char *field,
                      const char *aliases, struct error *err) {
    const json_t *v = json_path_get(row, field), *others = json_is_array(v) ? v
                                                           : aliases ? json_path_get(row, aliases)
                                                                     : NULL;
    f->correct = -1;
    f->answer = json_scalar_text(json_is_array(v) ? json_array_get(v, 0) : v);
    if (!f->answer) return error_set(err, ERR_FORMAT, "field '%s' is missing or no text", field);
    for (size_t i = 0; i < json_array_size(others); i++) alias_add(f, json_array_get(others, i));
    return OK;
}

/* Reads the field `chain_of_thought`, and sets the answer of an example to it and "The answer is
 * …". */
static void chain_of_thought_read(struct dataset_row *f, const json_t *row) {
    char *text = json_scalar_text(json_path_get(row, "chain_of_thought"));
    f->chain_of_thought = text ? text_trimmed(text) : NULL;
    if (f->chain_of_thought)
        f->example_answer = xasprintf(" %s The answer is %s", f->chain_of_thought, f->answer);
    free(text);
}

/* A question without choices, perhaps about a context: the answer is a text for a grader. */
static int free_answer_read(const json_t *row, struct dataset_row *f, struct error *err) {
    if (question_read(f, row, "question", err) != OK ||
        golds_read(f, row, "answer", "aliases", err) != OK)
        return err->code;
    const char *context = json_string_value(json_path_get(row, "context"));
    char *both = context ? xasprintf("%s\nQuestion: %s", context, f->question) : NULL;
    f->prompt = prompt_of_question(both ? both : f->question);
    free(both);
    chain_of_thought_read(f, row);
    return OK;
}

/* llm-foundry's generated answers, with other names of the right one and a derivation. */
static int llm_foundry_answer_read(const json_t *row, struct dataset_row *f, struct error *err) {
    if (question_read(f, row, "context", err) != OK ||
        golds_read(f, row, "answer", "aliases", err) != OK)
        return err->code;
    f->prompt = prompt_of_question(f->question);
    chain_of_thought_read(f, row);
    return OK;
}

/* Sets the prompt and the gold answer of a text and its continuation. The white space between them
 * belongs to neither; an example has a blank there if the file has none. */
static int continuation_set(struct dataset_row *f, const char *text, const char *continuation,
                            struct error *err) {
    size_t n = text_trimmed_len(text);
    bool blank_follows = text[n] || (*continuation && strchr(" \t\r\n", *continuation));
    f->correct = -1;
    f->prompt = xasprintf("%.*s", (int)MIN(n, (size_t)INT32_MAX), text);
    f->answer = text_trimmed(continuation);
    f->example_answer = xasprintf("%s%s%s", text + n, blank_follows ? "" : " ", continuation);
    return *f->answer ? OK : error_set(err, ERR_FORMAT, "the continuation is empty");
}

/* llm-foundry's language modelling: the text that must follow the context. */
static int llm_foundry_continuation_read(const json_t *row, struct dataset_row *f,
                                         struct error *err) {
    char *continuation = field_text(row, "continuation", err);
    int rc = continuation ? question_read(f, row, "context", err) : err->code;
    if (rc == OK) rc = continuation_set(f, f->question, continuation, err);
    free(continuation);
    return rc;
}

/* LAMBADA: the last word of the text must follow the words before it. */
static int lambada_read(const json_t *row, struct dataset_row *f, struct error *err) {
    char *text = json_scalar_text(json_path_get(row, "text"));
    if (!text) return error_set(err, ERR_FORMAT, "field 'text' is no text");
    text[text_trimmed_len(text)] = 0;
    char *last = strrchr(text, ' ');
    if (last) *last = 0;
    int rc = last ? continuation_set(f, text, last + 1, err)
                  : error_set(err, ERR_FORMAT, "field 'text' has a single word");
    f->question = text;
    return rc;
}

static int triviaqa_read(const json_t *row, struct dataset_row *f, struct error *err) {
    return question_read(f, row, "question", err) != OK
               ? err->code
               : golds_read(f, row, "answer.value", "answer.aliases", err);
}

static int nq_read(const json_t *row, struct dataset_row *f, struct error *err) {
    return question_read(f, row, "question", err) != OK ? err->code
                                                        : golds_read(f, row, "answer", NULL, err);
}

static int bbh_read(const json_t *row, struct dataset_row *f, struct error *err) {
    return question_read(f, row, "input", err) != OK ? err->code
                                                     : golds_read(f, row, "target", NULL, err);
}

/* MATH: the answer is the content of the last \boxed of the solution. */
static int math_read(const json_t *row, struct dataset_row *f, struct error *err) {
    struct buf answer = {0};
    const struct grader *g = grader_find("math", err);
    char *solution = field_text(row, "solution", err);
    if (!solution || question_read(f, row, "problem", err) != OK) {
        free(solution);
        return err->code;
    }
    bool boxed = strstr(solution, "\\boxed") || strstr(solution, "\\fbox");
    if (!boxed || !grader_extract(g, solution, &answer))
        error_set(err, ERR_FORMAT, "field 'solution' has no \\boxed{…}");
    else
        f->answer = xstrdup(answer.data);
    f->correct = -1;
    if (f->answer)
        f->example_answer =
            xasprintf(" %s\nFinal Answer: The final answer is $%s$. I hope it is correct.",
                      solution, f->answer);
    buf_release(&answer);
    free(solution);
    return f->answer ? OK : err->code;
}

static int code_refuse(const json_t *row, struct dataset_row *f, struct error *err) {
    (void)row, (void)f;
    return error_set(err, ERR_FORMAT,
                     "a programming problem with tests (HumanEval): its answer must be executed, "
                     "and eval executes no code");
}

/* public data sets of choices */

/* Adds the choices of the named fields. */
static int choice_fields_read(struct dataset_row *f, const json_t *row, const char *const *fields,
                              int n, struct error *err) {
    for (int i = 0; i < n; i++)
        if (choice_add(f, json_path_get(row, fields[i]), fields[i], err) != OK) return err->code;
    return OK;
}

/* The index that a letter names: "B" → 1; -1: `answer` is no letter of a choice. */
static int letter_index(const json_t *answer, int n) {
    const char *s = json_string_value(answer);
    return s && s[0] >= 'A' && s[0] < 'A' + n && !s[1] ? s[0] - 'A' : -1;
}

static int piqa_read(const json_t *row, struct dataset_row *f, struct error *err) {
    static const char *const fields[] = {"sol1", "sol2"};
    if (question_read(f, row, "goal", err) != OK ||
        choice_fields_read(f, row, fields, 2, err) != OK)
        return err->code;
    return correct_set(f, row, "label", choice_index(json_path_get(row, "label"), f->choices, 2),
                       err);
}

/* Social IQa: the label is "1", "2" or "3". */
static int siqa_read(const json_t *row, struct dataset_row *f, struct error *err) {
    static const char *const fields[] = {"answerA", "answerB", "answerC"};
    if (question_read(f, row, "question", err) != OK ||
        choice_fields_read(f, row, fields, 3, err) != OK ||
        !(f->passage = field_text(row, "context", err)))
        return err->code;
    char *label = json_scalar_text(json_path_get(row, "label"));
    int index = label && label[0] >= '1' && label[0] <= '3' && text_trimmed_len(label) == 1
                    ? label[0] - '1'
                    : -1;
    free(label);
    return correct_set(f, row, "label", index, err);
}

/* The length of the first character of s, in bytes. */
static size_t first_char_len(const char *s) {
    size_t n = *s != 0;
    while (n && (s[n] & 0xC0) == 0x80) n++;
    return n;
}

/* Replaces the first character of s by its lower case. */
static char *first_letter_lowered(char *s) {
    size_t n = 0, first = first_char_len(s);
    uint8_t *head = u8_tolower((const uint8_t *)s, first, "", NULL, NULL, &n);
    char *out = xasprintf("%.*s%s", (int)n, head ? (char *)head : "", s + first);
    free(head);
    free(s);
    return out;
}

/* COPA: "because" or "therefore" replaces the full stop of the premise. */
static int copa_read(const json_t *row, struct dataset_row *f, struct error *err) {
    static const char *const fields[] = {"choice1", "choice2"};
    const char *kind = json_string_value(json_path_get(row, "question")), *link = NULL;
    if (kind && strcmp(kind, "cause") == 0) link = "because";
    if (kind && strcmp(kind, "effect") == 0) link = "therefore";
    if (!link)
        return error_set(err, ERR_FORMAT, "field 'question' is neither 'cause' nor 'effect'");
    if (choice_fields_read(f, row, fields, 2, err) != OK) return err->code;
    char *raw = field_text(row, "premise", err);
    if (!raw) return err->code;
    char *premise = text_trimmed(raw);
    size_t last = strlen(premise);
    free(raw);
    while (last > 0 && (premise[--last] & 0xC0) == 0x80) continue;
    f->question = xasprintf("%.*s %s", (int)last, premise, link);
    free(premise);
    for (int i = 0; i < 2; i++) f->choices[i] = first_letter_lowered(f->choices[i]);
    return correct_set(f, row, "label", choice_index(json_path_get(row, "label"), f->choices, 2),
                       err);
}

static int sciq_read(const json_t *row, struct dataset_row *f, struct error *err) {
    static const char *const fields[] = {"distractor1", "distractor2", "distractor3",
                                         "correct_answer"};
    if (question_read(f, row, "question", err) != OK ||
        choice_fields_read(f, row, fields, 4, err) != OK ||
        !(f->passage = field_text(row, "support", err)))
        return err->code;
    size_t n_blanks = strspn(f->passage, " \t\r\n");
    memmove(f->passage, f->passage + n_blanks, strlen(f->passage + n_blanks) + 1);
    f->correct = 3;
    return OK;
}

static int race_read(const json_t *row, struct dataset_row *f, struct error *err) {
    if (question_read(f, row, "question", err) != OK ||
        choices_read(f, row, "options", err) != OK ||
        !(f->passage = field_text(row, "article", err)))
        return err->code;
    return correct_set(f, row, "answer", letter_index(json_path_get(row, "answer"), f->n), err);
}

/* OpenBookQA: as ARC, with another name of the question. */
static int openbookqa_read(const json_t *row, struct dataset_row *f, struct error *err) {
    return labelled_choices_read(f, row, "question_stem", err);
}

/* MMLU-Pro: up to ten options. Its field cot_content begins with "A: Let's think step by step.",
 * which is part of the prompt. */
static int mmlu_pro_read(const json_t *row, struct dataset_row *f, struct error *err) {
    char *work = json_scalar_text(json_path_get(row, "cot_content"));
    free(f->subject);
    f->subject = json_scalar_text(json_path_get(row, "category"));
    if (work) prefix_strip(work, "A: Let's think step by step. ");
    f->chain_of_thought = work && *work ? xstrdup(work) : NULL;
    free(work);
    if (question_read(f, row, "question", err) != OK || choices_read(f, row, "options", err) != OK)
        return err->code;
    for (int i = 0; i < f->n; i++) {
        char *raw = f->choices[i];
        f->choices[i] = text_trimmed(raw);
        free(raw);
    }
    int index = letter_index(json_path_get(row, "answer"), f->n);
    f->example_answer = f->chain_of_thought
                            ? xasprintf(" %s", f->chain_of_thought)
                            : xasprintf(" The answer is (%c).", 'A' + MAX(index, 0));
    return correct_set(f, row, "answer", index, err);
}

/* GPQA: removes white space at both ends, double blanks and marks. */
static char *gpqa_clean(char *raw) {
    char *text = text_trimmed(raw);
    struct buf b = {0};
    buf_puts(&b, text);
    replace_all(&b, " [title]", ". ");
    replace_all(&b, "  ", " ");
    free(text);
    free(raw);
    return b.data;
}

/* GPQA: the choices are shuffled by a generator whose seed is the hash of the question, so their
 * order depends on nothing else. */
static int gpqa_read(const json_t *row, struct dataset_row *f, struct error *err) {
    static const char *const fields[] = {"Incorrect Answer 1", "Incorrect Answer 2",
                                         "Incorrect Answer 3", "Correct Answer"};
    uint32_t order[4] = {0, 1, 2, 3};
    char *shuffled[4];
    if (question_read(f, row, "Question", err) != OK ||
        choice_fields_read(f, row, fields, 4, err) != OK)
        return err->code;
    struct rng r = rng_make(hash_fnv1a(f->question, strlen(f->question)), RNG_SHUFFLE, 0, 0);
    rng_shuffle(&r, order, 4);
    for (int i = 0; i < 4; i++) shuffled[i] = gpqa_clean(f->choices[order[i]]);
    for (int i = 0; i < 4; i++) {
        f->choices[i] = shuffled[i];
        if (order[i] == 3) f->correct = i;
    }
    return OK;
}

/* forms */

static bool has_no_question(const json_t *row) {
    return !json_path_get(row, "question");
}

static bool answer_is_list(const json_t *row) {
    return json_array_size(json_path_get(row, "answer")) > 0;
}

static bool has_text_only(const json_t *row) {
    return json_object_size(row) == 1 ||
           (json_object_size(row) == 2 && json_path_get(row, "domain"));
}

/* The first form whose required fields are all present is used. So a form comes before forms that
 * require only some of its fields. `task`: a built-in task or a row of form_tasks in task.c. */
static const struct dataset_form {
    const char *name;
    const char *required_fields[6];
    const char *task;
    int (*read)(const json_t *row, struct dataset_row *out, struct error *err);
    bool (*applies)(const json_t *row); /* a condition besides the fields, or NULL */
} forms[] = {
    {"llm-foundry, schema",
     {"context_options", "continuation", "gold"},
     "winogrande",
     llm_foundry_winogrande_read,
     NULL},
    {"llm-foundry, multiple choice", {"query", "choices", "gold"}, "query", llm_foundry_read, NULL},
    {"llm-foundry, language modelling",
     {"context", "continuation"},
     "continuation",
     llm_foundry_continuation_read,
     NULL},
    {"llm-foundry, answer",
     {"context", "answer"},
     "free_answer",
     llm_foundry_answer_read,
     has_no_question},
    {"HumanEval", {"prompt", "test", "entry_point"}, "", code_refuse, NULL},
    {"ARC", {"question", "choices.text", "choices.label", "answerKey"}, "arc_easy", arc_read, NULL},
    {"OpenBookQA",
     {"question_stem", "choices.text", "choices.label", "answerKey"},
     "openbookqa",
     openbookqa_read,
     NULL},
    {"TruthfulQA", {"question", "mc1_targets.choices"}, "truthfulqa", mc1_read, NULL},
    {"WinoGrande",
     {"sentence", "option1", "option2", "answer"},
     "winogrande",
     winogrande_read,
     NULL},
    {"HellaSwag", {"ctx", "endings", "label"}, "hellaswag", hellaswag_read, NULL},
    {"PIQA", {"goal", "sol1", "sol2", "label"}, "piqa", piqa_read, NULL},
    {"Social IQa",
     {"context", "question", "answerA", "answerB", "answerC", "label"},
     "siqa",
     siqa_read,
     NULL},
    {"COPA", {"premise", "choice1", "choice2", "question", "label"}, "copa", copa_read, NULL},
    {"SciQ",
     {"support", "question", "correct_answer", "distractor1", "distractor2", "distractor3"},
     "sciq",
     sciq_read,
     NULL},
    {"RACE", {"article", "question", "options", "answer"}, "race", race_read, NULL},
    {"MMLU-Pro", {"question", "options", "answer", "category"}, "mmlu_pro", mmlu_pro_read, NULL},
    {"GPQA",
     {"Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2",
      "Incorrect Answer 3"},
     "gpqa",
     gpqa_read,
     NULL},
    {"JCommonsenseQA",
     {"q_id", "question", "choice0", "choice1", "choice4", "label"},
     "jcommonsenseqa",
     numbered_choices_read,
     NULL},
    {"numbered choices",
     {"question", "choice0", "choice1", "label"},
     "choices",
     numbered_choices_read,
     NULL},
    {"BoolQ", {"question", "passage"}, "boolq", boolq_read, NULL},
    {"MMLU", {"question", "subject", "choices", "answer"}, "mmlu", choice_list_read, NULL},
    {"question and choices", {"question", "choices", "answer"}, "choices", choice_list_read, NULL},
    {"TriviaQA", {"question", "answer.value", "answer.aliases"}, "triviaqa", triviaqa_read, NULL},
    {"Natural Questions", {"question", "answer"}, "nq", nq_read, answer_is_list},
    {"question and answer", {"question", "answer"}, "free_answer", free_answer_read, NULL},
    {"MATH", {"problem", "solution"}, "math", math_read, NULL},
    {"BIG-Bench Hard", {"input", "target"}, "bbh", bbh_read, NULL},
    {"LAMBADA", {"text"}, "lambada", lambada_read, has_text_only},
};

static bool form_matches(const struct dataset_form *f, const json_t *row) {
    for (size_t i = 0; i < ARRAY_LEN(f->required_fields) && f->required_fields[i]; i++)
        if (!json_path_get(row, f->required_fields[i])) return false;
    return !f->applies || f->applies(row);
}

static int form_unknown_error(const json_t *row, struct error *err) {
    struct buf b = {0};
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)(uintptr_t)row, key, value)
        if (b.len < 200) buf_printf(&b, "%s'%.40s'", b.len ? ", " : "", key);
    error_set(err, ERR_FORMAT,
              "the fields %s match no known form; map them in a recipe (question, choices, answer)",
              b.len ? b.data : "(none)");
    buf_release(&b);
    return err->code;
}

int dataset_row_parse(const json_t *row, struct dataset_row *out, struct error *err) {
    *out = (struct dataset_row){0};
    if (!json_is_object(row)) return error_set(err, ERR_FORMAT, "the line is not a JSON object");
    for (size_t i = 0; i < ARRAY_LEN(forms); i++) {
        if (!form_matches(&forms[i], row)) continue;
        out->form = forms[i].name;
        out->task = forms[i].task;
        out->subject = json_scalar_text(json_path_get(row, "subject"));
        return forms[i].read(row, out, err);
    }
    return form_unknown_error(row, err);
}

/* CSV */

/* The index that a cell with one letter or digit names; NULL: the cell is neither. */
static json_t *csv_answer(const struct buf *cell) {
    char c = cell->len == 1 ? cell->data[0] : 0;
    if (c >= 'A' && c <= 'Z') return json_integer(c - 'A');
    return c >= '0' && c <= '9' ? json_integer(c - '0') : NULL;
}

enum { CSV_FIELDS = 2 + EVAL_MAX_OPTIONS }; /* maximum cells of a row */
struct csv_rows {
    const char *path;
    json_file_each_fn fn;
    void *ctx;
    bool header_passed;
};

/* Calls fn with the row as an object. */
static int row_visit(const struct csv_rows *c, const struct buf *cells, int n, int line,
                     struct error *err) {
    json_t *choices = json_array(), *answer = csv_answer(&cells[n - 1]);
    for (int i = 1; i < n - 1; i++)
        json_array_append_new(choices, json_stringn(cells[i].data, cells[i].len));
    json_t *question = json_stringn(cells[0].data, cells[0].len);
    int rc;
    if (!question || (int)json_array_size(choices) != n - 2) {
        rc = error_set(err, ERR_FORMAT, "'%s', line %d: not UTF-8", c->path, line);
    } else if (!answer) {
        rc = error_set(err, ERR_FORMAT,
                       "'%s', line %d: answer '%.32s' is neither a letter nor an index", c->path,
                       line, cells[n - 1].data);
    } else {
        json_t *row =
            json_pack("{s:O,s:O,s:O}", "question", question, "choices", choices, "answer", answer);
        rc = c->fn(c->ctx, row, line, err);
        json_decref(row);
    }
    json_decref(question);
    json_decref(choices);
    json_decref(answer);
    return rc;
}

static int cells_visit(void *ctx, const struct buf *cells, int n, int line, struct error *err) {
    struct csv_rows *c = ctx;
    bool header = !c->header_passed && strcmp(cells[0].data, "question") == 0;
    c->header_passed = true;
    if (header) return OK;
    if (n > CSV_FIELDS)
        return error_set(err, ERR_FORMAT, "'%s', line %d: more than %d cells", c->path, line,
                         CSV_FIELDS);
    if (n < 4)
        return error_set(err, ERR_FORMAT,
                         "'%s', line %d: %d cells; a question, choices and an answer are needed",
                         c->path, line, n);
    return row_visit(c, cells, n, line, err);
}

int csv_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err) {
    struct csv_rows rows = {.path = path, .fn = fn, .ctx = ctx};
    return csv_rows_each(path, ',', cells_visit, &rows, err);
}
