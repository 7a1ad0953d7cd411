/*
 * sequential: the wealth of the bettors, and the confidence interval (see eval.h).
 *
 * For μ = 0 the logarithm of the wealth is updated with each pair; the wealth itself may be too
 * large for a double. For another μ the wealth is recomputed from all differences on each query.
 * The wealth of a bettor falls as μ rises, so bisection finds the end of the interval.
 */
#include "eval/eval.h"

#include <math.h>
#include <stdlib.h>

enum { BISECTION_STEPS = 40, FACTORS_PER_LOG = 32 };

const char *sequential_decision_name(enum sequential_decision d) {
    static const char *const names[] = {"continue", "b_better", "b_worse", "no_difference"};
    return names[d];
}

/* λ of bettor k: 2^-(k + 1). */
static double bet_fraction(int k) {
    return 1.0 / (double)(2 << k);
}

/* The logarithm of the bettors' mean wealth, from the logarithms v of their wealths. */
static double log_mean_exp(const double v[SEQUENTIAL_BETS]) {
    double max = v[0], sum = 0;
    for (int k = 1; k < SEQUENTIAL_BETS; k++) max = fmax(max, v[k]);
    for (int k = 0; k < SEQUENTIAL_BETS; k++) sum += math_exp(v[k] - max);
    return max + math_log(sum / SEQUENTIAL_BETS);
}

void sequential_init(struct sequential_test *s, const struct sequential_options *o) {
    CHECK(o->alpha > 0 && o->alpha < 1 && o->min_pairs >= 1 && o->min_pairs <= o->max_pairs &&
          o->max_pairs <= SEQUENTIAL_PAIRS_MAX);
    *s = (struct sequential_test){.o = *o};
}

void sequential_release(struct sequential_test *s) {
    free(s->diff);
    *s = (struct sequential_test){0};
}

double sequential_threshold(const struct sequential_test *s) {
    return 2 / s->o.alpha;
}

static enum sequential_decision decide(const struct sequential_test *s) {
    double threshold = math_log(sequential_threshold(s));
    if (s->n < s->o.min_pairs) return SEQUENTIAL_CONTINUE;
    if (log_mean_exp(s->log_wealth[0]) >= threshold) return SEQUENTIAL_B_BETTER;
    if (log_mean_exp(s->log_wealth[1]) >= threshold) return SEQUENTIAL_B_WORSE;
    return s->n < s->o.max_pairs ? SEQUENTIAL_CONTINUE : SEQUENTIAL_NO_DIFFERENCE;
}

enum sequential_decision sequential_add(struct sequential_test *s, double a, double b) {
    CHECK(a >= 0 && a <= 1 && b >= 0 && b <= 1);
    if (s->decision != SEQUENTIAL_CONTINUE) return s->decision;
    if (s->n == s->cap) {
        s->cap = MAX(2 * s->cap, 64);
        s->diff = xrealloc(s->diff, sizeof *s->diff * (size_t)s->cap);
    }
    double d = s->diff[s->n++] = b - a;
    s->sum[0] += a;
    s->sum[1] += b;
    for (int k = 0; k < SEQUENTIAL_BETS; k++) {
        s->log_wealth[0][k] += math_log(1 + bet_fraction(k) * d);
        s->log_wealth[1][k] += math_log(1 - bet_fraction(k) * d);
    }
    return s->decision = decide(s);
}

double sequential_e_value(const struct sequential_test *s, int side) {
    return fmin(math_exp(log_mean_exp(s->log_wealth[side])), 1e307);
}

/* The logarithm of the wealth of a bettor that stakes λ on "the mean of sign·d is above μ".
 * Logarithms are expensive, so one is computed for the product of FACTORS_PER_LOG factors. For λ <=
 * 1/4 each factor is at least 1/2. For λ = 1/2 the product may underflow; this only reduces the
 * wealth, which is conservative. */
static double log_wealth_at(const struct sequential_test *s, double sign, double mu,
                            double lambda) {
    double log_sum = 0;
    for (int64_t i = 0; i < s->n;) {
        double product = 1;
        for (int64_t end = MIN(i + FACTORS_PER_LOG, s->n); i < end; i++)
            product *= 1 + lambda * (sign * s->diff[i] - mu);
        log_sum += math_log(fmax(product, 0));
    }
    return log_sum;
}

/* Whether the bettors on this side have reached the threshold for the hypothesis μ. */
static bool is_ruled_out(const struct sequential_test *s, double sign, double mu) {
    double v[SEQUENTIAL_BETS];
    for (int k = 0; k < SEQUENTIAL_BETS; k++) v[k] = log_wealth_at(s, sign, mu, bet_fraction(k));
    return log_mean_exp(v) >= math_log(sequential_threshold(s));
}

/* A lower bound, by bisection, of the smallest mean of sign·d that is not ruled out. */
static double confidence_lower_bound(const struct sequential_test *s, double sign) {
    double lo = -1, hi = 1;
    if (!is_ruled_out(s, sign, lo)) return lo;
    for (int i = 0; i < BISECTION_STEPS; i++) {
        double mid = (lo + hi) / 2;
        *(is_ruled_out(s, sign, mid) ? &lo : &hi) = mid;
    }
    return lo;
}

struct stats_interval sequential_difference(const struct sequential_test *s) {
    if (s->n == 0) return (struct stats_interval){0, -1, 1};
    double mean = (s->sum[1] - s->sum[0]) / (double)s->n;
    return (struct stats_interval){mean, confidence_lower_bound(s, 1),
                                   -confidence_lower_bound(s, -1)};
}
