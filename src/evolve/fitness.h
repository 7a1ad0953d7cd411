/*
 * fitness: statistics of candidate evaluations, and methods that reduce the number of items.
 *
 * A candidate has one score per item: 0 or 1, or any number. Candidates are compared on the same
 * items (common random numbers), so that the difficulty of an item cancels. The caller shuffles the
 * items once, before any call. No function does I/O or calls a model.
 */
#ifndef SHOAL_EVOLVE_FITNESS_H
#define SHOAL_EVOLVE_FITNESS_H

#include "eval/eval.h"

/* One part of a fitness: performance, cooperation, novelty. */
struct fitness_term {
    double weight;
    const double *items;         /* [n_items]; NULL: only `value` is given */
    struct stats_interval value; /* input if `items` is NULL, else output */
};
/* Σ weight · value with its 95 % interval. Terms with items are summed item by item, which keeps
 * their covariance; the intervals of other terms are independent and add in squares. */
struct stats_interval fitness_combine(struct fitness_term *t, int n_terms, int n_items);

/* Whether the mean of a - b is above 0, by a one-sided paired t test at level alpha. The items must
 * not be those that selected a. */
bool fitness_is_better(const double *a, const double *b, int n, double alpha);

/* racing */

/*
 * A race finds the best of N candidates with few evaluations. The caller evaluates the next items
 * for all remaining candidates and passes in the scores. Rules:
 *   halving    successive halving (Karnin et al. 2013): splits the budget into equal parts and
 *              drops the worse half after each; always uses its budget, guarantees no error rate
 *   paired     drops a candidate that is below the leader by a paired t test, whose level is alpha
 *              divided by the number of other candidates, times 1/(k(k+1)) at the k-th test
 *   bernstein  as paired, with the empirical Bernstein bound on paired differences (Maurer & Pontil
 *              2009)
 *   hoeffding  as paired, with Hoeffding's bound: assumes only the range of scores, and needs more
 *              items
 * paired, bernstein and hoeffding stop when one candidate remains, so easy races are short.
 */
struct race_options { /* filled from option rows */
    char *rule;       /* halving, paired, bernstein or hoeffding */
    int64_t budget;   /* evaluations (pairs of candidate and item); 0: a tenth of all pairs */
    int64_t block;    /* items between two tests; unused by halving */
    double alpha;
    double range; /* largest minus smallest possible score */
};
extern const struct option_row race_option_rows[];
struct race;
/* ERR_USAGE if the rule is unknown or the budget does not cover one item per candidate. */
struct race *race_new(const struct race_options *o, int n, int n_items, struct error *err);
void race_free(struct race *r);
/* The next work: items [*from, *to) for the candidates whose indices are written to `candidates`
 * (room for N). Returns their number, 0 when the race is over. */
int race_next(const struct race *r, int *candidates, int *from, int *to);
/* Adds the scores that race_next requested, [candidates][to - from], and eliminates candidates by
 * the rule. */
void race_add_scores(struct race *r, const double *scores);
/* The remaining candidate with the best mean; ties: lower index. */
int race_winner(const struct race *r);
int64_t race_spent(const struct race *r); /* evaluations so far */
int race_items_seen(const struct race *r,
                    int candidate); /* number of items with scores of the candidate */
/* Whether one candidate remains; false if budget or items ended first. */
bool race_is_decided(const struct race *r);

/* The winner's curse: the best of many candidates looks better than it is. */

/* Shrinks the means of [N][n_items] scores on common items toward their mean by the share of noise
 * in their variance (James & Stein with estimated mean; N ≥ 4, else unchanged). Minimises the
 * squared error. About 1/30 of the best candidate's bias remains if the candidates differ as much
 * as their noise, 1/8 if they do not differ. */
void fitness_shrink(const double *scores, int n, int n_items, double *out);
/* Split-half estimate of the best candidate's mean: selects on the even items and evaluates on the
 * odd ones, then selects on the odd items and evaluates on the even ones. The mean of the two
 * evaluations is unbiased for a candidate that is selected on half of the items. *winner: the best
 * on all items. */
struct stats_interval fitness_split_half(const double *scores, int n, int n_items, int *winner);

/* operators */

/*
 * Adaptive operator selection: adaptive pursuit (Thierens 2005) of the operator with the best mean
 * gain; every operator that is not dropped keeps probability p_min. A gain is a child's fitness
 * minus the mean fitness of its parents, clipped to [-1, 1]. The parents' fitness must come from
 * items that did not select them; otherwise every operator seems to lower the fitness (regression
 * to the mean). An operator is dropped when a sequential test finds that its mean gain is below
 * -margin: a betting martingale (Waudby-Smith & Ramdas 2024), so the error probability alpha,
 * divided among the operators, holds at any number of tests.
 */
enum { MAX_OPERATORS = 32 };
struct operator_stats {
    double quality, p; /* mean gain with larger weights for recent ones; selection probability */
    double sum, squares, wealth; /* sums of (gain + margin) and of its square; logarithm of the
                                    martingale's wealth */
    int64_t used, improved;
    bool dropped;
};
struct operator_selector {
    int n;
    /* rate: smallest weight of a new gain in `quality`; pursuit: speed at which `p` moves; p_min:
     * smallest p; alpha: error probability of dropping; margin: see above */
    double rate, pursuit, p_min, alpha, margin;
    struct operator_stats v[MAX_OPERATORS];
};
void operator_selector_init(struct operator_selector *o, int n, double alpha, double margin);
int operator_selector_pick(const struct operator_selector *o, struct rng *r);
/* The last operator that remains is never dropped. */
void operator_selector_update(struct operator_selector *o, int which, double gain);

/* ERR_MISMATCH, with the count and one key, if a test item has the key of a fitness item. */
int fitness_check_disjoint(const char *const *fitness_keys, int n, const char *const *test_keys,
                           int m, struct error *err);

#endif
