/*
 * sample_filter: a reply that a check (check/check.h) selects among its samples: the fields
 * samples, check and check_item of a request.
 *
 * The samples are the completions of a generation, so every limit of `n` holds for them. When all
 * are done, a separate thread checks them, because a check may put questions to the base model or
 * run a program.
 */
#ifndef SHOAL_SERVE_SAMPLE_FILTER_H
#define SHOAL_SERVE_SAMPLE_FILTER_H

#include "check/check.h"
#include "serve/server.h"

struct sample_filter {
    struct server *s;
    struct check *check;
    bool alone;                         /* see sample_filter.c */
    json_t *item;                       /* the request's fields for the check */
    struct check_questioner questioner; /* the base model; counts the tokens of the check */
    struct check_model model;
    struct engine_client client;
    const bool *stop; /* true once no client waits for the reply */
    /* the result */
    int n_samples, n_passed;
    struct error error; /* code OK: the samples were checked */
};

/* The most samples of a request. */
#define SAMPLE_FILTER_MAX 128
/* Reads the fields check, samples and check_item of a request, and opens the check. *out: NULL
 * without one. Requests may name calculator, regex, question and the checks of --allow-check;
 * ERR_USAGE or ERR_FORMAT for another one, for a wrong one, and for an item without the fields that
 * the check needs. *field: the request's field that an error is about, or NULL. question: the text
 * to be answered, or NULL; the item's own question replaces it. */
int sample_filter_read(struct server *s, const json_t *body, const char *question,
                       struct sample_filter **out, int *n_samples, const char **field,
                       struct error *err);
void sample_filter_free(struct sample_filter *f); /* may be NULL */
/* Bytes of a sample's check that the sample's tokens do not account for. */
size_t sample_filter_bytes(const struct sample_filter *f);
/* Checks n texts and sets the result. Returns the index of the first text with the most frequent
 * answer of those that passed, or if none did, of all; 0 without an answer. `stop`: atomic. */
int sample_filter_select(struct sample_filter *f, char *const *texts, int n, const bool *stop);
/* {"check": {kind, samples, passed, questions, prompt_tokens, completion_tokens}}: the result, with
 * the questions and tokens of the check. */
json_t *sample_filter_json(const struct sample_filter *f);

#endif
