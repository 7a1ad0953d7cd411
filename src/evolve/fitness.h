/*
 * fitness: what a measurement of candidates is worth, and how few items it needs.
 *
 * Everything is item-wise: a candidate's score on an item is 0 or 1, or any number, and candidates
 * are compared on the same items (common random numbers), so that an item's own difficulty cancels.
 * Items come in an order that the caller has shuffled once for all. Pure; nothing here asks a
 * model.
 */
#ifndef SHOAL_FITNESS_H
#define SHOAL_FITNESS_H

#include "eval/eval.h"

/* One part of a fitness: performance, cooperation, novelty. */
struct fitness_term {
    double weight;
    const double *items;         /* [n_items]; NULL: measured apart, or exactly, */
    struct stats_interval value; /* as this says; with items it is filled in */
};
/* Σ weight · value with its 95 % interval. Terms with items are summed item by item, which keeps
 * what they have in common; the others' intervals are independent and add in squares. */
struct stats_interval fitness_combine(struct fitness_term *t, int n_terms, int n_items);

/* Is the mean of a - b above 0, by a one-sided paired t test at level alpha? The items must not be
 * those that a was chosen by. */
bool fitness_better(const double *a, const double *b, int n, double alpha);

/* racing */

/*
 * A race finds the best of N candidates with few evaluations. It is asked for the next items of all
 * that are still in, and told their scores. Rules:
 *   halving    successive halving (Karnin et al. 2013): the budget in equal parts, the worse half
 *              goes after each; always uses its budget, says nothing of certainty
 *   paired     who is behind the leader by a paired t test goes; its level is alpha over the other
 *              candidates and, as 1/(k(k+1)), over the looks k
 *   bernstein  the same with the empirical Bernstein bound on paired differences (Maurer & Pontil
 *              2009), hoeffding with Hoeffding's: no assumption but the scores' range, later
 * The latter three stop when one is left, so easy races are short.
 */
struct race_options { /* filled from option rows */
    char *rule;       /* halving */
    int64_t budget;   /* evaluations (candidate × item); 0: a tenth of all */
    int64_t block;    /* items between looks; not of halving */
    double alpha;
    double range; /* largest minus smallest possible score */
};
extern const struct option_row race_option_rows[];
struct race;
/* ERR_USAGE where the rule is not known or the budget not enough for one item each. */
struct race *race_new(const struct race_options *o, int n, int n_items, struct error *err);
void race_free(struct race *r);
/* Items [*from, *to) are wanted of the candidates in who[] (room for N); returns how many those
 * are, 0 when the race is over. */
int race_next(const struct race *r, int *who, int *from, int *to);
/* scores: [as many as race_next said][to - from]. */
void race_tell(struct race *r, const double *scores);
int race_winner(const struct race *r); /* who is left with the best mean; ties: lower index */
int64_t race_spent(const struct race *r);
int race_seen(const struct race *r, int candidate);             /* how many items it was asked */
const double *race_scores(const struct race *r, int candidate); /* [race_seen] */
/* Is the winner alone, or did budget or items end first? */
bool race_decided(const struct race *r);

/* The winner's curse: the best of many looks better than it is. */

/* Shrinks the means of [N][n_items] scores on common items toward their mean by what of their
 * spread is noise (James & Stein with the mean estimated; N ≥ 4, else nothing is shrunk). The least
 * error; of the best's excess about a thirtieth stays where candidates differ as much as their
 * noise, an eighth where they do not differ at all. */
void fitness_shrink(const double *scores, int n, int n_items, double *out);
/* Chooses on the even items and measures on the odd, and the other way round: the mean of the two
 * is unbiased for what is so chosen. *winner: the best on all. */
struct stats_interval fitness_split(const double *scores, int n, int n_items, int *winner);

/* operators */

/*
 * Which operator breeds: adaptive pursuit (Thierens 2005) of the best mean gain, every live one
 * keeping p_min. A gain is a child's fitness minus its parents' in [-1, 1], theirs measured on
 * items that did not choose them; else every operator seems to harm. An operator is dropped when a
 * sequential test finds that its mean gain is below -margin: a betting martingale (Waudby-Smith &
 * Ramdas 2024), so alpha holds however often one looks, shared among the operators.
 */
enum { MAX_OPERATORS = 32 };
struct operator_stats {
    double quality, p;           /* mean gain, recent ones more; probability */
    double sum, squares, wealth; /* of gains + margin; of the bet that it harms, as a logarithm */
    int64_t used, improved;
    bool dropped;
};
struct operator_selector {
    int n;
    double rate, pursuit, p_min, alpha, margin;
    struct operator_stats v[MAX_OPERATORS];
};
void operator_selector_init(struct operator_selector *o, int n, double alpha, double margin);
int operator_selector_pick(const struct operator_selector *o, struct rng *r);
/* The last live operator is never dropped. */
void operator_selector_update(struct operator_selector *o, int which, double gain);

/* ERR_MISMATCH, naming how many and one of them, where a test item's key is among fitness's. */
int fitness_disjoint(const char *const *fitness_keys, int n, const char *const *test_keys, int m,
                     struct error *err);

#endif
