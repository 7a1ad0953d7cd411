/*
 * search: black-box optimizers over vectors of numbers, with the ask-and-tell interface of
 * libraries for evolution strategies: search_ask returns the points to evaluate, search_tell takes
 * their fitness.
 *
 * A searcher is one row of a table. Its state is one array of doubles, which search_save writes as
 * JSON and search_load restores to the bit, between any two calls. Its random numbers depend on
 * (seed, generation, member). All searchers use only the order of fitness, so any increasing
 * function of it gives the same search. Larger fitness is better; NaN counts as the worst. One
 * thread at a time.
 *
 * The caller defines the meaning of the numbers. Over the coefficients of K founders (founder i
 * starts at the i-th unit vector), pso equals Model Swarms: its moves are linear, so particles stay
 * in the span of the founders, and a particle is evaluated as a mix without a merge.
 */
#ifndef SHOAL_EVOLVE_SEARCH_H
#define SHOAL_EVOLVE_SEARCH_H

#include "base/base.h"

enum { SEARCH_MAX_DIM = 1024, SEARCH_MAX_DIM_CMA = 64, SEARCH_MAX_BATCH = 4096 };

struct search_options {                       /* filled from option rows */
    char *searcher;                           /* cma, pso, ga, random */
    int64_t batch;                            /* 0: the searcher's default */
    double sigma;                             /* initial step size */
    double sigma_min;                         /* cma: lower bound of σ times the longest axis */
    double lower_bound, upper_bound;          /* box constraint if upper > lower */
    double inertia, cognitive, social, repel; /* pso: weights of the velocity's terms */
    double step, step_decay, step_min;        /* pso: move = step · velocity; the step shrinks */
    int64_t patience;                /* pso: rounds without a new personal best before a restart */
    double blx_alpha, mutation_rate; /* ga: how far a child may be beyond its parents; share of
                                        coordinates with noise */
    int64_t tournament_size;         /* ga */
};
extern const struct option_row search_option_rows[];

struct search;
/*
 * starts: [n_starts][n]. cma and random start around their mean; the first members of pso and ga
 * are the starts, then points between two of them (Model Swarms), or around a single one. ERR_USAGE
 * if the options or sizes are invalid; the options are copied.
 */
struct search *search_new(const struct search_options *o, const double *starts, int n_starts, int n,
                          uint64_t seed, struct error *err);
void search_free(struct search *s);
int search_batch(const struct search *s);
int64_t search_generation(const struct search *s); /* number of search_tell calls */
/* The points of the generation, [batch][n]; unchanged until search_tell. */
const double *search_ask(struct search *s);
void search_tell(struct search *s, const double *fitness); /* [batch] of these points */
/* The best vector of all batches, [n], and its fitness (may be NULL); NULL before the first
 * search_tell. If fitness is noisy, the best fitness is an overestimate. */
const double *search_best(const struct search *s, double *fitness);
/* cma: the mean of the sampling distribution, which is the better result if fitness is noisy. Other
 * searchers: search_best. */
const double *search_center(const struct search *s);
json_t *search_save(const struct search *s);
/* Strict: ERR_FORMAT names the missing or wrong value. */
struct search *search_load(const json_t *v, struct error *err);

/* Adapts a mutation's step, as Rechenberg's 1/5 rule does, but by the divergence of behaviour
 * instead of the success rate. A mutation of size `step` caused a divergence of `measured` instead
 * of `target`; the next step is step · (target/measured)^gain, at most doubled or halved (doubled
 * if `measured` is 0). */
double mutation_step_adapt(double step, double measured, double target, double gain);

#endif
