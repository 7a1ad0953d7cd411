/* sample_check: selects the answer of each prompt among its samples by a check. */
#ifndef SHOAL_CLI_SAMPLE_CHECK_H
#define SHOAL_CLI_SAMPLE_CHECK_H

#include "check/check.h"
#include "cli/prompts.h"
#include "cli/setup.h"
#include "swarm/swarm.h"

struct sample_check {
    struct check *check;
    struct engine_client engine;        /* the caller may set `run` */
    struct check_questioner questioner; /* the base model */
    struct check_model model;
    int n_prompts, n_samples;
    json_t **items; /* [n_prompts] what the check sees of each prompt */
    struct checked_samples samples;
    int *selected; /* [n_prompts] sample; -1: no sample has an answer */
};
/* Opens the check and verifies that the prompts have the fields that it needs. Call
 * sample_check_release also after an error. */
int sample_check_open(struct sample_check *c, const char *spec, bool sandbox,
                      const struct prompts *p, int n_samples, struct error *err);
/* The same for one question at a time (sample_check_set_question). */
int sample_check_open_lines(struct sample_check *c, const char *spec, bool sandbox, int n_samples,
                            struct error *err);
/* Whether `n_samples` has an effect; else ERR_USAGE. */
int sample_check_options(int64_t n_samples, const char *spec, struct error *err);
/* Replaces the text of a prompt. */
void sample_check_set_question(struct sample_check *c, int prompt, const char *text);
/* Checks and selects. texts[i] is sample i % n_samples of prompt i / n_samples; s has an engine.
 * The tokens of the check's questions are those of `questioner`. */
int sample_check_run(struct sample_check *c, struct setup *s, char *const *texts,
                     struct error *err);
/* The number of samples of a prompt that passed. */
int sample_check_passed(const struct sample_check *c, int prompt);
/* Reports for people how many samples of prompt 0 passed, and the tokens of samples and check. */
void sample_check_log(const struct sample_check *c, int64_t prefilled, int64_t generated);
/* Adds {samples, passed} of prompt 0. */
void sample_check_add_json(const struct sample_check *c, json_t *v);
void sample_check_release(struct sample_check *c);

#endif
