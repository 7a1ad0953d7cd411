/*
 * prompt_profile: the training questions of an adapter, for a choice by similarity. The
 * features are those of question_features.c: no model is called. A file from another source can
 * make the choice bad, and nothing else: its size is checked, its numbers are finite.
 */
#define _GNU_SOURCE
#include "data/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FORMAT "shoal-prompt-profile-1"
/* Bounds the products of a similarity; each question adds at most 1 to a sum. */
#define SUM_MAX 1e12

void prompt_profile_add(struct prompt_profile *p, const char *question) {
    struct question_features f;
    question_features_init(&f, question);
    for (int k = 0; k < f.n; k++) p->sum[f.v[k].index - 1] += (double)f.v[k].value;
    p->n++;
    free(f.v);
}

static void question_add(void *ctx, const char *question) {
    prompt_profile_add(ctx, question);
}

int prompt_profile_add_file(struct prompt_profile *p, const char *path, struct error *err) {
    return training_questions_each(path, question_add, p, err);
}

static double dot(const struct prompt_profile *a, const struct prompt_profile *b) {
    double sum = 0;
    for (int j = 0; j < QUESTION_DIM; j++) sum += a->sum[j] * b->sum[j];
    return sum;
}

double prompt_profile_similarity(const struct prompt_profile *a, const struct prompt_profile *b) {
    double lengths = sqrt(dot(a, a)) * sqrt(dot(b, b));
    return lengths > 0 ? dot(a, b) / lengths : 0;
}

/* files */

char *prompt_profile_path(const char *adapter) {
    return path_is_dir(adapter) ? path_join(adapter, "prompt_profile.json")
                                : xasprintf("%s.prompt_profile.json", adapter);
}

int prompt_profile_write(const struct prompt_profile *p, const char *path, struct error *err) {
    json_t *sum = json_array();
    for (int j = 0; j < QUESTION_DIM; j++) json_array_append_new(sum, json_real(p->sum[j]));
    json_t *v =
        json_pack("{s:s,s:I,s:o}", "format", FORMAT, "questions", (json_int_t)p->n, "sum", sum);
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(17));
    int rc = file_write(path, text, strlen(text), err);
    free(text);
    json_decref(v);
    return rc;
}

static int document_read(struct prompt_profile *p, const json_t *root, struct error *err) {
    const json_t *sum = json_object_get(root, "sum"), *v;
    size_t j;
    if (strcmp(json_get_string(root, "format"), FORMAT) != 0)
        return error_set(err, ERR_FORMAT,
                         "the 'format' is not '%s'; make it again with 'shoal adapter profile'",
                         FORMAT);
    p->n = json_integer_value(json_object_get(root, "questions"));
    if (p->n < 1) return error_set(err, ERR_FORMAT, "a positive number is expected in 'questions'");
    if (json_array_size(sum) != QUESTION_DIM)
        return error_set(err, ERR_FORMAT, "%d numbers are expected in 'sum'", QUESTION_DIM);
    json_array_foreach ((json_t *)(uintptr_t)sum, j, v) {
        p->sum[j] = json_number_value(v);
        if (!json_is_number(v) || !(fabs(p->sum[j]) <= SUM_MAX))
            return error_set(err, ERR_FORMAT, "a number of at most %g is expected at 'sum.%zu'",
                             SUM_MAX, j);
    }
    return OK;
}

int prompt_profile_parse(struct prompt_profile *p, const char *text, size_t len, const char *path,
                         struct error *err) {
    *p = (struct prompt_profile){0};
    json_t *root = json_parse(text, len, path, err);
    if (!root) return err->code;
    int rc = document_read(p, root, err);
    json_decref(root);
    return rc == OK ? OK : error_wrap(err, "profile '%s'", path);
}

int prompt_profile_read(struct prompt_profile *p, const char *path, struct error *err) {
    struct buf text = {0};
    int rc = file_read(path, PROMPT_PROFILE_MAX_BYTES, &text, err);
    if (rc == OK) rc = prompt_profile_parse(p, text.data ? text.data : "", text.len, path, err);
    buf_release(&text);
    return rc;
}
