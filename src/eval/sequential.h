/*
 * sequential: is b better than a? Decided from pairs of scores as they come, looking after each.
 *
 * A fixed-sample test that is looked at after every pair finds something in nothing sooner or
 * later. This one may be looked at as often as one likes. It is a bet (Waudby-Smith & Ramdas 2024,
 * "Estimating means of bounded random variables by betting", JRSS B 86(1)): for the hypothesis that
 * the mean difference d = b - a is μ, a player begins with 1 and stakes a fixed share λ of what he
 * has on "more than μ" before each pair, so that his wealth is the product of 1 + λ(d_i - μ). It
 * cannot become negative while λ <= 1/2, and if μ is true nobody expects to win, whatever the
 * distribution of the scores and however each depends on those before: the wealth is an e-value at
 * every moment, and by Ville's inequality it ever reaches 1/p with probability p at most. Which λ
 * is best depends on what is not known, so the money is dealt out to eight players, λ = 2^-1 …
 * 2^-8: their mean is a wealth too, and loses at most a factor of 8 on the best of them. A second
 * eight bet on "less than μ". Each side decides at 2/α, so both together err with probability α.
 *
 * All μ whose players have not reached 2/α are the confidence sequence: it holds the true mean at
 * all times at once with probability 1 - α, and leaves 0 out exactly when the test decides.
 *
 * What is assumed is no more than that, under "no difference", the next pair's mean difference is
 * 0 given all pairs before. Pure; the state is a function of the options and the pairs, so whoever
 * has kept the pairs has kept the state, to the same bits on every machine.
 */
#ifndef SHOAL_EVAL_SEQUENTIAL_H
#define SHOAL_EVAL_SEQUENTIAL_H

#include "eval/eval.h"

enum { SEQUENTIAL_BETS = 8, SEQUENTIAL_PAIRS_MAX = 100000 };

enum sequential_decision {
    SEQUENTIAL_CONTINUE,
    SEQUENTIAL_B_BETTER,
    SEQUENTIAL_B_WORSE,
    SEQUENTIAL_NO_DIFFERENCE, /* max_pairs, and nothing was found: none, or too small a one */
};
const char *sequential_decision_name(enum sequential_decision d); /* "b_better" */

struct sequential_options {
    double alpha;                 /* of a wrong decision when there is no difference; in (0, 1) */
    int64_t min_pairs, max_pairs; /* 1 <= min_pairs <= max_pairs <= SEQUENTIAL_PAIRS_MAX */
};

struct sequential_test {
    struct sequential_options o;
    enum sequential_decision decision;
    double *diff; /* [n] b - a */
    int64_t n, cap;
    double sum[2];                         /* of a's scores, of b's */
    double log_wealth[2][SEQUENTIAL_BETS]; /* against μ = 0: of those who bet on more, on less */
};

void sequential_init(struct sequential_test *s, const struct sequential_options *o);
void sequential_release(struct sequential_test *s);
/* The next pair, both in [0, 1]. Once it is decided, pairs change nothing. */
enum sequential_decision sequential_add(struct sequential_test *s, double a, double b);
/* The e-value against "no difference" of those who bet on b (0), or on a (1); at most 1e307. */
double sequential_e_value(const struct sequential_test *s, int side);
double sequential_threshold(const struct sequential_test *s); /* what an e-value decides at: 2/α */
/* The mean difference with its confidence sequence. Takes time in proportion to the pairs: 1 ms for
 * a thousand. */
struct stats_interval sequential_difference(const struct sequential_test *s);

#endif
