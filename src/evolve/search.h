/*
 * search: searchers over vectors of numbers, asked for a batch and told its fitness.
 *
 * A searcher is one row of a table and works on plain data: all that it knows is an array of
 * doubles, which search_save writes as JSON and search_load reads back to the bit, between any two
 * calls. What it draws comes from (seed, generation, member): its seed is its own. All look at the
 * order of fitness only, so any increasing function of it gives the same search. Fitness is
 * larger-is-better; NaN counts as the worst. One thread at a time.
 *
 * What a number means is the caller's. Over the coefficients of K founders (founder i begins at the
 * i-th unit vector), pso is Model Swarms itself: its moves are linear, so particles never leave the
 * founders' span, and a particle is evaluated as a mix without being made.
 */
#ifndef SHOAL_SEARCH_H
#define SHOAL_SEARCH_H

#include "base/base.h"

enum { SEARCH_MAX_DIM = 1024, SEARCH_MAX_DIM_CMA = 64, SEARCH_MAX_BATCH = 4096 };

struct search_options {                       /* filled from option rows */
    char *searcher;                           /* cma, pso, ga, random */
    int64_t batch;                            /* 0: the searcher's own */
    double sigma;                             /* first step */
    double sigma_min;                         /* cma: the longest axis never gets shorter */
    double lo, hi;                            /* box, where hi > lo */
    double inertia, cognitive, social, repel; /* pso */
    double step, step_decay, step_min;
    int64_t restart;    /* pso: rounds without a new personal best before a restart */
    double blx, mutate; /* ga: how far beyond two parents; genes with noise */
    int64_t tournament;
};
extern const struct option_row search_option_rows[];

struct search;
/*
 * starts: [n_starts][n]. cma and random begin around their mean; the first members of pso and ga
 * are the starts themselves, then points between two of them (Model Swarms), or around a lone one.
 * ERR_USAGE where the options or sizes make no sense; the options are copied.
 */
struct search *search_new(const struct search_options *o, const double *starts, int n_starts, int n,
                          uint64_t seed, struct error *err);
void search_free(struct search *s);
int search_batch(const struct search *s);
int64_t search_generation(const struct search *s); /* how often it was told */
/* [batch][n], the same until it is told. */
const double *search_ask(struct search *s);
void search_tell(struct search *s, const double *fitness); /* [batch] */
/* The best that was ever told, as [n]; NULL before. With noisy fitness its figure is too good. */
const double *search_best(const struct search *s, double *fitness);
/* cma: the middle of what it samples, the better answer under noise; else as search_best. */
const double *search_center(const struct search *s);
json_t *search_save(const struct search *s);
/* Strict: ERR_FORMAT names what is missing or wrong. */
struct search *search_load(const json_t *v, struct error *err);

/* Rechenberg's 1/5 rule with behaviour in the place of success: the step after a mutation of size
 * `step` has moved behaviour by `measured` where `target` was wanted. It is
 * step · (target/measured)^gain, at most doubled or halved. */
double mutation_step_adapt(double step, double measured, double target, double gain);

#endif
