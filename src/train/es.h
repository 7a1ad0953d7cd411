/*
 * es: gradients of an adapter estimated from forward passes alone (evolution strategies), for a
 * trainer that then updates as ever.
 *
 * A population of N members, N/2 antithetic pairs, is evaluated on the same samples; a member
 * differs from the adapter by a rank-2 map made from a counter. What is added to the trainer is
 *
 *     -1/(N σ) Σ_i f_i E_i       f_i fitness, shaped; E_i the member's direction in A and B
 *
 * which for unshaped fitness is an unbiased estimate of -∇f up to O(σ²). Nothing is differentiated:
 * any base and any fitness will do.
 *
 * One thread drives it; its results depend on the samples, the adapter, the options, the trainer's
 * seed and the adapter's count of updates, and on nothing else.
 */
#ifndef SHOAL_ES_H
#define SHOAL_ES_H

#include "train/train.h"

struct es_options {     /* filled from option rows */
    int64_t population; /* 32: N, even */
    double sigma;       /* 0.01 */
    char *fitness;      /* loss */
    char *shaping;      /* zscore */
    int64_t pass_rows;  /* 1024 */
};
extern const struct option_row es_option_rows[];
/* ERR_USAGE where one of them is wrong, or the training options ask for what ES has not. */
int es_options_check(const struct es_options *o, const struct train_options *train,
                     struct error *err);

struct es;
/* The options are checked and outlive it, as the model and the pool do. */
struct es *es_new(const struct model *m, const struct es_options *o, struct pool *pool);
void es_free(struct es *e);
/* Adds the estimate for adapter `index` of a LoRA trainer; the samples are shared by all members.
 * The loss it reports is the members' mean. Calls between two updates share their directions. */
int es_accumulate(struct es *e, struct trainer *t, int index, const struct train_sample *samples, int n,
                  struct error *err);
/* The members' fitness of the last call before it was shaped: its mean, and standard deviation. */
double es_fitness_mean(const struct es *e);
double es_fitness_std(const struct es *e);
/* The most bytes that it has held besides the trainer's. */
size_t es_bytes(const struct es *e);

/*
 * For who evaluates members elsewhere: they are adapter `index` as it is plus and minus a map of
 * rank 2, es_perturbation, made from the counter. Of fitness f, shaped, a pair's coefficient is
 * (f₊ - f₋) / (N σ).
 */
struct adapter *es_perturbation(const struct trainer *t, int index, const struct lora_perturbation *z,
                             double sigma);
int es_fitness_shaping_check(const char *name, struct error *err);
void es_shape_fitness(const char *shaping, double *f, int n); /* in place, by a name that there is; n > 1 */
/* Adds -Σ coef E of directions (seed, 0 … n - 1) to the adapter's gradient, counted as one. */
void es_add_gradient(struct trainer *t, int index, uint64_t seed, const double *coef, int n);

#endif
