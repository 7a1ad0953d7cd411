/*
 * questions: the questions of a run, from families and from files, in the order in which rounds ask
 * them.
 *
 * A check and a prompt see a question without its answer: members of a line that may hold the
 * answer are removed here, before anything else reads the line.
 */
#define _GNU_SOURCE
#include "grow/grow.h"
#include "grow/internal.h"

#include <stdlib.h>
#include <string.h>

static const char *const answer_members[] = {
    "answer", "answers", "target",   "gold",    "label",     "solution", "canonical_solution",
    "output", "chosen",  "rejected", "choices", "completion"};

static struct grow_question *question_add(struct grow_questions *q) {
    if (!(q->n & (q->n - 1))) q->v = xrealloc(q->v, sizeof *q->v * (size_t)MAX(2 * q->n, 1));
    q->v[q->n] = (struct grow_question){0};
    return &q->v[q->n++];
}

static void measure_question(struct grow_questions *q, const char *text) {
    q->longest = MAX(q->longest, strlen(text));
}

/* files */

/* The right answer of a line, malloc'ed; NULL: unknown. GSM8K writes it after "####". */
static char *line_answer(const json_t *v) {
    char *text = json_scalar_text(json_object_get(v, "answer"));
    const char *last = text ? strstr(text, "#### ") : NULL;
    if (!last) return text;
    char *answer = text_trimmed(last + strlen("#### "));
    free(text);
    return answer;
}

/* Sets the one message of a line as the question. A last message from the assistant is an answer
 * and is dropped. */
static int messages_read(struct task_item *it, const json_t *v, int line, struct error *err) {
    json_t *messages = json_copy(json_object_get(v, "messages"));
    size_t n = json_array_size(messages);
    if (n && strcmp(json_get_string(json_array_get(messages, n - 1), "role"), "assistant") == 0)
        json_array_remove(messages, --n);
    const char *last = n ? json_get_string(json_array_get(messages, n - 1), "content") : "";
    int rc = n == 1 && *last ? OK
                             : error_set(err, ERR_FORMAT,
                                         "line %d: 'messages' must be one question with 'content', "
                                         "and may have its answer",
                                         line);
    if (rc == OK) it->question = xstrdup(last);
    json_decref(messages);
    return rc;
}

static int line_read(void *ctx, const json_t *v, int line, struct error *err) {
    const json_t *question = json_object_get(v, "question"), *kind = json_object_get(v, "kind");
    if (!question) question = json_object_get(v, "prompt");
    if (!json_is_string(question) && !json_is_array(json_object_get(v, "messages")))
        return error_set(err, ERR_FORMAT,
                         "line %d: expected {\"question\": text}, {\"prompt\": text} or "
                         "{\"messages\": […]}",
                         line);
    struct grow_question *q = question_add(ctx);
    struct task_item *it = &q->item;
    it->correct = -1;
    it->lang = "en";
    q->kind = xstrdup(json_is_string(kind) ? json_string_value(kind) : "");
    it->gold = line_answer(v);
    it->check_item = json_copy((json_t *)(uintptr_t)v);
    for (size_t i = 0; i < ARRAY_LEN(answer_members); i++)
        json_object_del(it->check_item, answer_members[i]);
    if (!json_is_string(question)) {
        int rc = messages_read(it, v, line, err);
        if (rc != OK) return rc;
        json_object_del(it->check_item, "messages");
    } else {
        it->question = xstrdup(json_string_value(question));
    }
    json_object_set_new(it->check_item, "question", json_string(it->question));
    measure_question(ctx, it->question);
    return OK;
}

static int file_open(struct grow_questions *q, const char *path, struct error *err) {
    int n = q->n, rc = json_file_each(path, line_read, q, err);
    if (rc == OK && q->n == n) rc = error_set(err, ERR_FORMAT, "'%s' has no questions", path);
    return rc == OK || strstr(err->text, path) ? rc : error_wrap(err, "'%s'", path);
}

/* families */

/* With `checked`, families without a check question are refused. */
static int families_open(struct grow_questions *q, const char *list, const struct grow_options *o,
                         int64_t n, enum data_split split, bool checked, struct error *err) {
    bool pick[MAX_FAMILIES] = {false};
    int rc = families_parse(list, pick, err);
    for (int f = 0; rc == OK && f < family_count(); f++) {
        if (!pick[f]) continue;
        rc = checked ? family_check_questions(f, err) : OK;
        for (uint32_t i = 0; rc == OK && i < (uint32_t)n; i++) {
            struct grow_question *v = question_add(q);
            family_item(f, split, (uint64_t)o->learn.train.seed, i, false, &v->item);
            v->kind = xasprintf("%s%s", task_families[f]->name, v->item.rare ? ", rare" : "");
            task_item_make_free(&v->item);
            measure_question(q, v->item.question);
        }
    }
    return rc;
}

static void hash_text(struct sha256 *h, const char *text) {
    sha256_update(h, text ? text : "", text ? strlen(text) + 1 : 1);
}

/* Of everything that a run uses of the questions. */
static void questions_hash(struct grow_questions *q) {
    struct sha256 h;
    sha256_init(&h);
    for (int i = 0; i < q->n + q->n_rehearsal; i++) {
        const struct task_item *it = &q->v[i].item;
        char *check = it->check_item ? json_canonical(it->check_item) : NULL;
        hash_text(&h, it->question);
        hash_text(&h, q->v[i].kind);
        hash_text(&h, it->gold);
        hash_text(&h, it->check_question);
        hash_text(&h, it->check_answer);
        hash_text(&h, check);
        free(check);
    }
    sha256_final(&h, q->hash);
}

static int list_open(struct grow_questions *q, const struct strings *list,
                     const struct grow_options *o, int64_t n, enum data_split split, bool checked,
                     struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < list->n; i++)
        rc = path_exists(list->v[i]) ? file_open(q, list->v[i], err)
                                     : families_open(q, list->v[i], o, n, split, checked, err);
    return rc;
}

int grow_questions_open_split(const struct grow_options *o, enum data_split split,
                              struct grow_questions *out, struct error *err) {
    *out = (struct grow_questions){0};
    int rc = list_open(out, &o->prompts, o, o->n, split, true, err);
    if (rc != OK) return rc;
    struct rng r = rng_make((uint64_t)o->learn.train.seed, RNG_SHUFFLE, 0, 0);
    for (int i = out->n - 1; i > 0; i--) {
        const int j = (int)rng_below(&r, (uint32_t)i + 1);
        struct grow_question swapped = out->v[i];
        out->v[i] = out->v[j];
        out->v[j] = swapped;
    }
    const int n = out->n;
    rc = list_open(out, &o->rehearse, o, o->rehearse_n, split, false, err);
    out->n_rehearsal = out->n - n;
    out->n = n;
    questions_hash(out);
    return rc;
}

int grow_questions_open(const struct grow_options *o, struct grow_questions *out,
                        struct error *err) {
    return grow_questions_open_split(o, SPLIT_TRAIN, out, err);
}

void grow_questions_release(struct grow_questions *q) {
    for (int i = 0; i < q->n + q->n_rehearsal; i++) {
        task_item_release(&q->v[i].item);
        free(q->v[i].kind);
    }
    free(q->v);
    *q = (struct grow_questions){0};
}
