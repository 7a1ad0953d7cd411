/*
 * select: who breeds, who stays, who plays with whom.
 *
 * Pure: everything random comes from the caller's stream, nothing is kept between calls but in an
 * archive. Fitness is larger-is-better and may be negative; no decision changes when a constant is
 * added to all of it. NaN counts as the worst. Ties go to the lower index, so a caller that keeps
 * its candidates in a fixed order gets the same choice anywhere. Letters: N candidates, M scores
 * each.
 */
#ifndef SHOAL_SELECT_H
#define SHOAL_SELECT_H

#include "base/base.h"

/* What a selection sees of a generation. */
struct select_pool {
    int n;
    const double *fitness; /* [N] */
    const double *scores;  /* [N][M] objectives for pareto, items for lexicase; else unused */
    int n_scores;
    double keep;    /* truncation: share of the pool that may breed */
    int tournament; /* how many meet */
    double slope;   /* rank: expected children of the best, 1 (all alike) to 2 */
};
struct selection {
    const char *name;
    bool by_scores; /* it reads `scores` and not `fitness` */
    /* out[k]: indices of those chosen, the same one perhaps several times. */
    void (*pick)(const struct select_pool *p, struct rng *r, int *out, int k);
};
/* elite, truncation, tournament, rank, roulette, pareto, lexicase; a row without name ends it. */
extern const struct selection selections[];
const struct selection *selection_find(const char *name); /* NULL when unknown */

/* An index drawn in proportion to weight[N], none of it negative, whose sum is given; 0 where all
 * is 0. */
int select_roulette_wheel(const double *weight, double sum, int n, struct rng *r);

/* order[N]: best first. */
void select_argsort(const double *fitness, int n, int *order);

/* Fronts of [N][M] objectives (0: nobody is better in one and as good in all) and the crowding
 * distance within them, INFINITY at a front's ends (Deb et al. 2002, NSGA-II). */
void pareto_sort(const double *scores, int n, int m, int *front, double *crowding);
/* order[N]: by front, then the less crowded: who stays. */
void pareto_order(const double *scores, int n, int m, int *order);

/*
 * Fitness sharing (Goldberg & Richardson 1987): each value, counted from just under the worst, is
 * divided by how many share its niche, Σ_j max(0, 1 - distance/radius). Division would reward
 * crowds where fitness is negative; what is counted from the worst never is. distance: [N][N].
 */
void fitness_share(const double *fitness, const double *distance, int n, double radius,
                   double *out);

/*
 * MAP-Elites (Mouret & Clune 2015): the best of each cell of a grid over what candidates do.
 * Adding is commutative: of equals the lower id stays, whoever came first.
 */
enum { ARCHIVE_DIMS = 4 };
struct archive_axis {
    double lo, hi; /* what lies outside counts to the end cells */
    int bins;
};
struct archive {
    struct archive_axis axis[ARCHIVE_DIMS];
    int dims, n_cells;
    int64_t *id;     /* [n_cells], -1: empty */
    double *fitness; /* [n_cells] */
};
/* ERR_USAGE where axes are empty or more than 2^20 cells. */
int archive_init(struct archive *a, const struct archive_axis *axis, int dims, struct error *err);
void archive_release(struct archive *a);
/* Was it kept? A NaN fitness or descriptor never is. */
bool archive_add(struct archive *a, const double *descriptor, double fitness, int64_t id);
double archive_coverage(const struct archive *a); /* share of cells that are filled */
/* Σ (fitness - floor) over filled cells; floor is the least fitness that there can be. */
double archive_qd_score(const struct archive *a, double floor);
int64_t archive_pick(const struct archive *a,
                     struct rng *r); /* of any filled cell; -1 when empty */

/*
 * Co-evolution by role: partner[q] is the member of role q that the candidates of `role` meet in
 * evaluation `slot`; partner[role] is -1. Slot 0 meets the best of each role (ranked[q][0]; the
 * representatives of Potter & De Jong 2000), slots from 1 on go through all members in a seeded
 * order before one comes again. All candidates of a role meet the same partners, so that their
 * difference is their own.
 */
void coevolve_partners(const int *const *ranked, const int *size, int n_roles, int role, int slot,
                       uint64_t seed, int generation, int *partner);

#endif
