/*
 * select: parent selection, survival, and partners in co-evolution.
 *
 * The caller passes in the random stream, and only an archive keeps state between calls. Larger
 * fitness is better; fitness may be negative, and adding a constant to all values changes no
 * decision. NaN counts as the worst. The lower index wins a tie, so a fixed order of candidates
 * gives the same choice on every machine. In array sizes, N is the number of candidates and M the
 * number of scores of each.
 */
#ifndef SHOAL_EVOLVE_SELECT_H
#define SHOAL_EVOLVE_SELECT_H

#include "base/base.h"

/* Inputs of a selection. */
struct select_pool {
    int n;
    const double *fitness; /* [N] */
    const double *scores;  /* [N][M] objectives for pareto, items for lexicase; else unused */
    int n_scores;
    double truncation_ratio;   /* truncation: fraction of the pool that may be chosen */
    int tournament;            /* candidates per tournament */
    double selection_pressure; /* rank: expected children of the best, 1 (all equal) to 2 */
};
struct selection {
    const char *name;
    bool by_scores; /* selects by `scores` instead of `fitness` */
    /* out[k]: indices of the chosen candidates, with repetitions. */
    void (*pick)(const struct select_pool *p, struct rng *r, int *out, int k);
};
/* elite, truncation, tournament, rank, roulette, pareto, lexicase; ended by a row without name. */
extern const struct selection selections[];
const struct selection *selection_find(const char *name); /* NULL when unknown */

/* An index sampled in proportion to weight[N], all non-negative with the given sum; 0 if all are
 * 0. */
int select_roulette_wheel(const double *weight, double sum, int n, struct rng *r);

/* order[N]: best first. */
void select_argsort(const double *fitness, int n, int *order);

/* Non-dominated sorting of [N][M] objectives (Deb et al. 2002, NSGA-II). front[N]: 0 is not
 * dominated by any candidate. crowding[N]: crowding distance within the front, INFINITY at its
 * ends. */
void pareto_sort(const double *scores, int n, int m, int *front, double *crowding);
/* order[N]: by front, then by larger crowding distance. */
void pareto_order(const double *scores, int n, int m, int *order);

/*
 * Fitness sharing (Goldberg & Richardson 1987): each value, measured from just below the worst one,
 * is divided by its niche count, Σ_j max(0, 1 - distance/radius). These values are never negative:
 * dividing a negative fitness would reward crowded niches. distance: [N][N].
 */
void fitness_share(const double *fitness, const double *distance, int n, double radius,
                   double *out);

/*
 * MAP-Elites (Mouret & Clune 2015): the best candidate of each cell of a behaviour grid. Adding is
 * commutative: the lower id wins a tie, whatever the order.
 */
enum { ARCHIVE_DIMS = 4 };
struct archive_axis {
    double lo, hi; /* values outside are in the first or last bin */
    int bins;
};
struct archive {
    struct archive_axis axis[ARCHIVE_DIMS];
    int dims, n_cells;
    int64_t *id;     /* [n_cells], -1: empty */
    double *fitness; /* [n_cells] */
};
/* ERR_USAGE if an axis is empty or there are more than 2^20 cells. */
int archive_init(struct archive *a, const struct archive_axis *axis, int dims, struct error *err);
void archive_release(struct archive *a);
/* Returns whether the candidate was added. A NaN fitness or descriptor is never added. */
bool archive_add(struct archive *a, const double *descriptor, double fitness, int64_t id);
double archive_coverage(const struct archive *a); /* share of filled cells */
/* Σ (fitness - floor) over filled cells; floor is the lowest possible fitness. */
double archive_qd_score(const struct archive *a, double floor);
int64_t archive_pick(const struct archive *a,
                     struct rng *r); /* id of a random filled cell; -1 when empty */

/*
 * Co-evolution by role: partner[q] is the member of role q that works with the candidates of `role`
 * in evaluation `slot`; partner[role] is -1. Slot 0 uses the best of each role (ranked[q][0]; the
 * representatives of Potter & De Jong 2000), slots from 1 on cycle through all members in a seeded
 * order. All candidates of a role get the same partners, so that their fitness differs only because
 * of themselves.
 */
void coevolve_partners(const int *const *ranked, const int *size, int n_roles, int role, int slot,
                       uint64_t seed, int generation, int *partner);

#endif
