/*
 * task_hash: the hash of a task's questions, with everything that decides how they are asked and
 * graded. It depends on neither the task's name nor the place of its files, so equal hashes are
 * equal questions in equal order.
 */
#include "eval/eval.h"

#include "grade/grade.h"

#include <stdlib.h>
#include <string.h>

static void hash_number(struct sha256 *h, int64_t v) {
    sha256_update(h, &v, sizeof v);
}

/* With its length, because texts follow each other; NULL differs from "". */
static void hash_text(struct sha256 *h, const char *text) {
    hash_number(h, text ? (int64_t)strlen(text) : -1);
    if (text) sha256_update(h, text, strlen(text));
}

static void hash_texts(struct sha256 *h, const struct strings *texts) {
    hash_number(h, texts->n);
    for (int i = 0; i < texts->n; i++) hash_text(h, texts->v[i]);
}

static void hash_json(struct sha256 *h, const json_t *v) {
    char *text = v ? json_canonical(v) : NULL;
    hash_text(h, text);
    free(text);
}

static void hash_question(struct sha256 *h, const struct eval_task *t,
                          const struct eval_question *q) {
    hash_text(h, t->n_subjects > 0 ? t->subjects[q->subject].preamble : NULL);
    hash_text(h, q->context);
    hash_json(h, q->chat);
    hash_number(h, q->whole_replies);
    hash_number(h, q->n);
    hash_number(h, q->correct);
    for (int i = 0; i < q->n; i++) {
        hash_text(h, q->options[i]);
        hash_text(h, q->contexts[i]);
    }
    hash_text(h, q->answer);
    hash_texts(h, &q->aliases);
}

void eval_task_hash(const struct eval_task *t, char out[HASH_LEN]) {
    struct sha256 h;
    sha256_init(&h);
    hash_number(&h, t->output_type);
    hash_text(&h, t->delimiter);
    hash_text(&h, t->grader);
    hash_texts(&h, &t->stops);
    hash_number(&h, t->max_tokens);
    if (t->filter) hash_json(&h, answer_filter_steps(t->filter));
    hash_number(&h, t->n_questions);
    for (int64_t i = 0; i < t->n_questions; i++) {
        struct eval_question scratch;
        const struct eval_question *q = eval_task_question(t, i, &scratch);
        hash_question(&h, t, q);
        if (q == &scratch) eval_question_release(&scratch);
    }
    sha256_final(&h, out);
}

int eval_task_add_file_hashes(const struct eval_task *t, json_t *hashes, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < t->files.n; i++)
        rc = manifest_add_file(hashes, t->files.v[i], err);
    return rc;
}

int eval_task_add_hashes(const struct eval_task *t, json_t *hashes, struct error *err) {
    char hash[HASH_LEN];
    eval_task_hash(t, hash);
    manifest_add_hash(hashes, t->name, hash);
    return eval_task_add_file_hashes(t, hashes, err);
}
