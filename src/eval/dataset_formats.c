/*
 * dataset_formats: reads lines of question files in common formats.
 *
 * The fields of a line determine its format, so no option is needed: a file may be the Hugging Face
 * dump of a data set, a file of llm-foundry or a user's file. This file extracts only question,
 * choices and the index of the right choice; task.c builds the text for the model.
 *
 * Invariants: a result owns all its strings. A line has either 2 to EVAL_MAX_OPTIONS choices, and
 * `correct` is the index of one of them; or no choices and a text answer, and `correct` is -1.
 */
#define _GNU_SOURCE
#include "eval/eval.h"

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
    free(f->answer);
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

/* llm-foundry: the field `query` begins with "Question: " or "Passage: ". */
static int llm_foundry_read(const json_t *row, struct dataset_row *f, struct error *err) {
    if (question_choices_read(f, row, "query", "choices", "gold", err) != OK) return err->code;
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

/* ARC: each choice has a label, which is a letter or a number; answerKey is the right label. */
static int arc_read(const json_t *row, struct dataset_row *f, struct error *err) {
    if (question_read(f, row, "question", err) != OK ||
        choices_read(f, row, "choices.text", err) != OK)
        return err->code;
    const json_t *labels = json_path_get(row, "choices.label"),
                 *key = json_path_get(row, "answerKey");
    int index = -1;
    for (int i = 0; i < f->n; i++)
        if (json_equal(json_array_get(labels, (size_t)i), key)) index = i;
    return correct_set(f, row, "answerKey", index, err);
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

/* A question without choices: the answer is a text for a grader. */
static int free_answer_read(const json_t *row, struct dataset_row *f, struct error *err) {
    f->correct = -1;
    if (question_read(f, row, "question", err) != OK) return err->code;
    return (f->answer = field_text(row, "answer", err)) ? OK : err->code;
}

/* The first format whose required fields are all present is used. So a format comes before formats
 * that require only some of its fields. */
static const struct dataset_format {
    const char *required_fields[4];
    int (*read)(const json_t *row, struct dataset_row *out, struct error *err);
} formats[] = {
    {{"context_options", "continuation", "gold"}, llm_foundry_winogrande_read},
    {{"query", "choices", "gold"}, llm_foundry_read},
    {{"question", "choices.text", "choices.label", "answerKey"}, arc_read},
    {{"question", "mc1_targets.choices"}, mc1_read},
    {{"sentence", "option1", "option2", "answer"}, winogrande_read},
    {{"ctx", "endings", "label"}, hellaswag_read},
    {{"question", "choice0", "choice1", "label"}, numbered_choices_read},
    {{"question", "passage"}, boolq_read},
    {{"question", "choices", "answer"}, choice_list_read},
    {{"question", "answer"}, free_answer_read},
};

static bool format_matches(const struct dataset_format *f, const json_t *row) {
    for (size_t i = 0; i < ARRAY_LEN(f->required_fields) && f->required_fields[i]; i++)
        if (!json_path_get(row, f->required_fields[i])) return false;
    return true;
}

static int format_unknown_error(const json_t *row, struct error *err) {
    struct buf b = {0};
    const char *key;
    json_t *value;
    json_object_foreach ((json_t *)(uintptr_t)row, key, value)
        if (b.len < 200) buf_printf(&b, "%s'%.40s'", b.len ? ", " : "", key);
    error_set(
        err, ERR_FORMAT,
        "the fields %s match no known format; map them in a recipe (question, choices, answer)",
        b.len ? b.data : "(none)");
    buf_release(&b);
    return err->code;
}

int dataset_row_parse(const json_t *row, struct dataset_row *out, struct error *err) {
    *out = (struct dataset_row){0};
    if (!json_is_object(row)) return error_set(err, ERR_FORMAT, "the line is not a JSON object");
    for (size_t i = 0; i < ARRAY_LEN(formats); i++) {
        if (!format_matches(&formats[i], row)) continue;
        out->subject = json_scalar_text(json_path_get(row, "subject"));
        return formats[i].read(row, out, err);
    }
    return format_unknown_error(row, err);
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
