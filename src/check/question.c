/*
 * question: the check question. The item's check.question, rendered with the answer of a text, is
 * put to a model, which must give check.answer. All questions of a run are put together.
 */
#define _GNU_SOURCE
#include "check/internal.h"
#include "grade/grade.h"
#include "template/template.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* Limits of a rendered template: an item may come from a request that is not trusted. */
enum { MAX_STEPS = 1 << 14, MAX_BYTES = 16 << 10 };

static int question_open(struct check *c, const char *argument, const struct check_options *o,
                         struct error *err) {
    (void)argument;
    (void)err;
    struct check_model *model = c->state = xmalloc(sizeof *model);
    *model = *o->model;
    return OK;
}

/* Renders the template check.KEY, malloc'ed; a number is its own text. NULL with `err` set. */
static char *template_render(const json_t *item, const char *key, const char *answer,
                             struct error *err) {
    const json_t *v = item_check_get(item, key);
    if (json_is_number(v)) return json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
    struct jinja *j = jinja_parse_strict(json_string_value(v), json_string_length(v), err);
    if (!j) return NULL;
    json_t *vars = json_pack("{s:o}", "answer", json_string_lossy(answer, strlen(answer)));
    struct jinja_output out = {0};
    const struct jinja_input in = {.vars = vars, .now = -1, .max_steps = MAX_STEPS};
    int rc = jinja_render(j, &in, &out, err);
    if (rc == OK && out.n > MAX_BYTES)
        rc = error_set(err, ERR_FORMAT, "'check.%s' has more than %d bytes", key, MAX_BYTES);
    char *text = rc ? NULL : xstrndup(out.text, out.n);
    jinja_output_release(&out);
    json_decref(vars);
    jinja_free(j);
    return text;
}

static int template_check(const struct check *c, const json_t *item, const char *key, bool number,
                          struct error *err) {
    const json_t *v = item_check_get(item, key);
    if (number && json_is_number(v)) return OK;
    if (json_string_length(v) == 0)
        return error_set(err, ERR_FORMAT, "'check.%s' %s, which %s question renders", key,
                         v ? "must be a text" : "is missing", c->label);
    struct jinja *j = jinja_parse_strict(json_string_value(v), json_string_length(v), err);
    jinja_free(j);
    return j ? OK : error_wrap(err, "'check.%s'", key);
}

static int question_item(const struct check *c, const json_t *item, struct error *err) {
    int rc = template_check(c, item, "question", false, err);
    return rc ? rc : template_check(c, item, "answer", true, err);
}

/* The question about a text and the expected answer; a text for which one of them cannot be made
 * fails. */
static bool question_make(struct check *c, struct check_case *k, char **question, char **expected) {
    const struct grader *exact = grader_find("exact", &(struct error){0});
    struct error why;
    char *answer = grader_answer(exact, k->text);
    *question = *expected = NULL;
    if (!answer) {
        case_fail(c, k, "the text has no answer");
        return false;
    }
    *question = template_render(k->item, "question", answer, &why);
    *expected = *question ? template_render(k->item, "answer", answer, &why) : NULL;
    free(answer);
    if (*expected) return true;
    case_fail(c, k, "its question: %s", why.text);
    free(*question);
    return false;
}

static bool is_number(const char *text) {
    char *end;
    if (!isdigit((unsigned char)text[strspn(text, " \t\r\n+-.")])) return false;
    strtod(text, &end);
    return end > text && !end[strspn(end, " \t\r\n")];
}

/* Compares as numbers if a number is expected, and otherwise as texts. */
static void reply_judge(struct check *c, struct check_case *k, const char *reply,
                        const char *expected) {
    const struct grader *g =
        grader_find(is_number(expected) ? "number" : "exact", &(struct error){0});
    k->score = grader_grade(g, reply, &expected, 1).score > 0;
    if (k->score == 0)
        case_fail(c, k, "the model answers '%.80s' and not '%.80s'", reply, expected);
}

static int question_run(struct check *c, struct check_case *cases, int n, struct error *err) {
    const struct check_model *model = c->state;
    size_t room = (size_t)MAX(n, 1);
    char **questions = xcalloc(room, sizeof *questions),
         **expected = xcalloc(room, sizeof *expected), **replies = xcalloc(room, sizeof *replies);
    struct check_case **asked = xcalloc(room, sizeof(struct check_case *));
    int n_asked = 0, rc = OK;
    for (int i = 0; i < n; i++)
        if (question_make(c, &cases[i], &questions[n_asked], &expected[n_asked]))
            asked[n_asked++] = &cases[i];
    if (n_asked)
        rc = model->answer(model->ctx, (const char *const *)questions, n_asked, replies, err);
    c->cost.questions += n_asked;
    for (int i = 0; i < n_asked; i++) {
        if (!rc) reply_judge(c, asked[i], replies[i], expected[i]);
        free(questions[i]);
        free(expected[i]);
        free(replies[i]);
    }
    free(questions);
    free(expected);
    free(replies);
    free(asked);
    return rc ? error_wrap(err, "%s question", c->label) : OK;
}

const struct check_kind question_check = {.name = "question",
                                          .usage = "question",
                                          .argument = ARGUMENT_NONE,
                                          .needs_model = true,
                                          .pure = true,
                                          .open = question_open,
                                          .item = question_item,
                                          .run_all = question_run,
                                          .free = free};
