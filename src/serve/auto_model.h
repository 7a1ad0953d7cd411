/*
 * auto_model: the model "auto", whose adapter is chosen by the prompt.
 *
 * Candidates are the base and the adapters of the default base, oldest first, without those that
 * /api/create made, which have their own prompts. --router selects the method; without it, a
 * request has similarity if all adapters have a profile, else likelihood:
 *
 * likelihood: the mean log-probability of a token of the prompt, from one prefill under the base
 *     and under each adapter; the prefills run in one batch. The prefix cache keeps them, so the
 *     reply prefills the last token only.
 * similarity: the cosine of the prompt to the questions of each adapter's profile
 *     (prompt_profile.json, which training stores); adapters without one are left out. No prefill.
 * a router file of `shoal team fit`: the probability that an answer is right; the names of its
 *     agents are adapters or the base. No prefill.
 *
 * The candidate with the highest score answers, of equal ones the first. The reply is that of a
 * request that names the candidate. Neither batch nor threads change a score.
 */
#ifndef SHOAL_SERVE_AUTO_MODEL_H
#define SHOAL_SERVE_AUTO_MODEL_H

#include "serve/generation.h"

#define AUTO_MODEL "auto"
struct auto_model;
/* Reads the files that --router names. */
int auto_model_open(struct server *s, struct error *err);
void auto_model_close(struct server *s);
/* Whether there is a model "auto": with --router, or if there are two adapters; an adapter or the
 * base with that name replaces it. */
bool auto_model_exists(struct server *s);
/* Whether a request's model is "auto". */
bool auto_model_is(struct server *s, const char *model);
/* The reference of "auto", without its choice: by likelihood the adapters are its terms. */
int auto_model_ref(struct server *s, struct model_ref *out, struct error *err);
/* Chooses the adapter for the only prompt of spec, then starts the generation. Takes ownership of t
 * and spec, and replies to the exchange. Call it when memory for the reply is reserved. */
void auto_model_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                      const char *id_prefix, struct model_ref *t, struct generation_spec *spec);

/* The index of the highest of n scores, of equal ones the first; -1: all are NAN, or n is 0. */
int score_best(const double *scores, int n);
/* The mean of the log-probabilities of the tokens after the first one; NAN without any. */
double prompt_mean_logprob(const float *logprob, int32_t n);

#endif
