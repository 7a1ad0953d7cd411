/*
 * stats: statistics for reported results, as pure functions. Exact binomial tails are computed in
 * log space; the source of every other formula is named in its comment. Logarithms and exponentials
 * are Shoal's, so results do not depend on the C library.
 */
#include "eval/eval.h"

#include <math.h>
#include <stdlib.h>

#define Z95 1.959963984540054
#define Z90 1.6448536269514722 /* quantile of a one-sided test at 5 % */
#define Z80 0.8416212335729143

json_t *stats_interval_json(struct stats_interval v) {
    return json_pack("{s:f,s:f,s:f}", "value", v.value, "lo", v.lo, "hi", v.hi);
}

json_t *stats_mean_json(struct stats_interval v, int64_t n) {
    if (n > 1) return stats_interval_json(v);
    return json_pack("{s:f,s:n,s:n}", "value", v.value, "lo", "hi");
}

/* Score interval of Wilson 1927. z: the normal quantile of its level. */
static struct stats_interval wilson_interval(int64_t correct, int64_t n, double z) {
    if (n <= 0) return (struct stats_interval){0, 0, 1};
    double p = (double)correct / (double)n, z2 = z * z, d = 1 + z2 / (double)n;
    double mid = (p + z2 / (2 * (double)n)) / d;
    double half = z / d * sqrt(p * (1 - p) / (double)n + z2 / (4.0 * (double)n * (double)n));
    /* At 0 and n, one end equals the proportion except for rounding. */
    return (struct stats_interval){p, fmin(p, fmax(0, mid - half)), fmax(p, fmin(1, mid + half))};
}

struct stats_interval stats_wilson(int64_t correct, int64_t n) {
    return wilson_interval(correct, n, Z95);
}

/* Two-sided exact binomial p for k of m at 1/2: twice the smaller tail, at most 1. */
static double sign_test(int64_t k, int64_t m) {
    if (m == 0) return 1;
    int64_t low = MIN(k, m - k);
    double log_c = 0, total = 0, log_half = (double)m * math_log(0.5);
    for (int64_t i = 0; i <= low; i++) {
        total += math_exp(log_c + log_half);
        log_c += math_log((double)(m - i)) - math_log((double)(i + 1));
    }
    return fmin(1, 2 * total);
}

struct stats_mcnemar stats_mcnemar(const uint8_t *a, const uint8_t *b, int64_t n) {
    struct stats_mcnemar r = {.n = n, .p = 1};
    for (int64_t i = 0; i < n; i++) {
        r.both += a[i] && b[i];
        r.only_a += a[i] && !b[i];
        r.only_b += b[i] && !a[i];
    }
    if (n == 0) return r;
    r.diff = stats_paired_interval(&r, 1);
    r.p = sign_test(r.only_a, r.only_a + r.only_b);
    return r;
}

/* Correlation of the two vectors, with Newcombe's continuity correction; 0 if one of them is
 * constant. */
static double paired_correlation(const struct stats_mcnemar *d) {
    double n = (double)d->n, both = (double)d->both,
           none = (double)(d->n - d->both - d->only_a - d->only_b),
           a = (double)(d->both + d->only_a), b = (double)(d->both + d->only_b);
    double product = a * (n - a) * b * (n - b),
           excess = both * none - (double)d->only_a * (double)d->only_b;
    if (product <= 0) return 0;
    if (excess > 0) excess = fmax(excess - n / 2, 0);
    return excess / sqrt(product);
}

struct stats_interval stats_paired_interval(const struct stats_mcnemar *d, int comparisons) {
    double z = comparisons > 1 ? stats_upper_quantile(0.025 / comparisons) : Z95;
    if (d->n <= 0) return (struct stats_interval){0, -1, 1};
    struct stats_interval a = wilson_interval(d->both + d->only_a, d->n, z),
                          b = wilson_interval(d->both + d->only_b, d->n, z);
    double phi = paired_correlation(d), diff = (double)(d->only_a - d->only_b) / (double)d->n;
    double a_lower = a.value - a.lo, a_upper = a.hi - a.value, b_lower = b.value - b.lo,
           b_upper = b.hi - b.value;
    double below = a_lower * a_lower - 2 * phi * a_lower * b_upper + b_upper * b_upper,
           above = a_upper * a_upper - 2 * phi * a_upper * b_lower + b_lower * b_lower;
    return (struct stats_interval){diff, fmax(diff - sqrt(fmax(below, 0)), -1),
                                   fmin(diff + sqrt(fmax(above, 0)), 1)};
}

struct stats_interval stats_contribution(const uint8_t *a, const uint8_t *b, int64_t n) {
    const struct stats_mcnemar d = stats_mcnemar(a, b, n);
    if (n <= 0) return (struct stats_interval){0, 0, 0};
    double mean = (double)(d.only_a - d.only_b) / (double)n;
    double var = ((double)(d.only_a + d.only_b) / (double)n - mean * mean) / (double)MAX(n - 1, 1);
    double half = Z95 * sqrt(fmax(0, var));
    return (struct stats_interval){mean, mean - half, mean + half};
}

double stats_upper_quantile(double p) {
    double a = sqrt(-2 * math_log(fmax(p, 1e-300)));
    return a - (2.515517 + a * (0.802853 + a * 0.010328)) /
                   (1 + a * (1.432788 + a * (0.189269 + a * 0.001308)));
}

double stats_t_quantile(double z, int64_t dof) {
    double v = (double)dof, z3 = z * z * z, z5 = z3 * z * z, z7 = z5 * z * z, z9 = z7 * z * z;
    return z + (z3 + z) / (4 * v) + (5 * z5 + 16 * z3 + 3 * z) / (96 * v * v) +
           (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * v * v * v) +
           (79 * z9 + 776 * z7 + 1482 * z5 - 1920 * z3 - 945 * z) / (92160 * v * v * v * v);
}

/* The 97.5 % quantile of Student's t. For 1 and 2 degrees of freedom it is a constant, because the
 * expansion is too inaccurate there. */
static double t975(int64_t dof) {
    return dof == 1 ? 12.706204736 : dof == 2 ? 4.302652730 : stats_t_quantile(Z95, dof);
}

struct stats_interval stats_mean_interval(const double *v, int64_t n) {
    if (n <= 0) return (struct stats_interval){0, 0, 0};
    double sum = 0, dev = 0;
    for (int64_t i = 0; i < n; i++) sum += v[i];
    double mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++) dev += (v[i] - mean) * (v[i] - mean);
    double half = n > 1 ? t975(n - 1) * sqrt(dev / (double)(n - 1) / (double)n) : 0;
    return (struct stats_interval){mean, mean - half, mean + half};
}

enum { SAMPLED_FLIPS = 9999, MAX_EXHAUSTIVE_N = 16 };

/* Sum of the differences, each negated if its random bit is set. The rng yields 32 bits at a
 * time. */
static double flipped_sum(const double *diff, int64_t n, struct rng *r) {
    double sum = 0;
    uint32_t bits = 0;
    for (int64_t i = 0; i < n; i++, bits >>= 1) {
        if (i % 32 == 0) bits = rng_u32(r);
        sum += bits & 1 ? -diff[i] : diff[i];
    }
    return sum;
}

/* A flipped sum whose distance from zero is within rounding error of the observed sum's counts as
 * equally far from zero. */
double stats_sign_flip_test(const double *diff, int64_t n) {
    double sum = 0, abs_sum = 0;
    int64_t n_extreme = 0,
            n_flips = n <= MAX_EXHAUSTIVE_N ? (int64_t)1 << MAX(n, 0) : SAMPLED_FLIPS;
    for (int64_t i = 0; i < n; i++) {
        sum += diff[i];
        abs_sum += fabs(diff[i]);
    }
    double threshold = fabs(sum) - 1e-12 * abs_sum;
    for (int64_t k = 0; k < n_flips; k++) {
        struct rng r = rng_make(0, RNG_BOOTSTRAP, 0, (uint32_t)k);
        double flipped = 0;
        for (int64_t i = 0; n <= MAX_EXHAUSTIVE_N && i < n; i++)
            flipped += k >> i & 1 ? -diff[i] : diff[i];
        if (n > MAX_EXHAUSTIVE_N) flipped = flipped_sum(diff, n, &r);
        n_extreme += fabs(flipped) >= threshold;
    }
    return n <= MAX_EXHAUSTIVE_N ? (double)n_extreme / (double)n_flips
                                 : (double)(n_extreme + 1) / (double)(n_flips + 1);
}

/* Connor 1987's normal approximation for McNemar's test, solved for the difference: d = (z_α +
 * z_β)·sqrt(ψ/n). */
double stats_min_detectable_effect(int64_t n, double discordant) {
    return n > 0 ? fmin(1, (Z95 + Z80) * sqrt(discordant / (double)n)) : 1;
}

enum { BOOTSTRAPS = 1000 };

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct stats_interval stats_cluster_bootstrap(const double *v, const int32_t *cluster_of, int64_t n,
                                              int32_t n_clusters, uint64_t seed) {
    struct stats_interval out = {0};
    if (n <= 0 || n_clusters <= 0) return out;
    double *sum = xcalloc((size_t)n_clusters, sizeof *sum), mean[BOOTSTRAPS], sum_of_all = 0;
    int64_t *size = xcalloc((size_t)n_clusters, sizeof *size);
    for (int64_t i = 0; i < n; i++) {
        sum[cluster_of[i]] += v[i];
        size[cluster_of[i]]++;
        sum_of_all += v[i];
    }
    for (uint32_t k = 0; k < BOOTSTRAPS; k++) {
        struct rng r = rng_make(seed, RNG_BOOTSTRAP, 1, k);
        double total = 0;
        int64_t count = 0;
        for (int32_t c = 0; c < n_clusters; c++) {
            uint32_t sampled = rng_below(&r, (uint32_t)n_clusters);
            total += sum[sampled];
            count += size[sampled];
        }
        mean[k] = total / (double)MAX(count, 1);
    }
    qsort(mean, BOOTSTRAPS, sizeof *mean, by_value);
    // the 25th value from either end
    out = (struct stats_interval){sum_of_all / (double)n, mean[BOOTSTRAPS / 40 - 1],
                                  mean[BOOTSTRAPS - BOOTSTRAPS / 40]};
    free(sum);
    free(size);
    return out;
}

bool stats_tost(const double *diff, int64_t n, double margin) {
    double sum = 0, dev = 0;
    if (n < 2) return false;
    for (int64_t i = 0; i < n; i++) sum += diff[i];
    double mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++) dev += (diff[i] - mean) * (diff[i] - mean);
    double half = Z90 * sqrt(dev / (double)(n - 1) / (double)n);
    return mean - half > -margin && mean + half < margin;
}

struct ranked_p {
    double p;
    int index;
};

static int by_p(const void *a, const void *b) {
    const struct ranked_p *x = a, *y = b;
    return x->p < y->p ? -1 : x->p > y->p ? 1 : x->index - y->index;
}

/* Holm 1979, step-down: the i-th smallest of n values is multiplied by n - i (i from 0); adjusted
 * values do not decrease in this order and are at most 1. */
void stats_holm(const double *p, int n, double *adjusted) {
    struct ranked_p *v = xcalloc((size_t)MAX(n, 1), sizeof *v);
    for (int i = 0; i < n; i++) v[i] = (struct ranked_p){p[i], i};
    qsort(v, (size_t)n, sizeof *v, by_p);
    double floor = 0;
    for (int i = 0; i < n; i++) {
        floor = fmax(floor, fmin(1, (double)(n - i) * v[i].p));
        adjusted[v[i].index] = floor;
    }
    free(v);
}

json_t *stats_pairs_json(const struct stats_pair *v, int n_pairs, int64_t n) {
    const size_t size = (size_t)MAX(n_pairs, 1);
    struct stats_mcnemar *d = xcalloc(size, sizeof *d);
    double *p = xcalloc(size, 2 * sizeof *p), *holm = p + size;
    json_t *list = json_array();
    for (int i = 0; i < n_pairs; i++) {
        d[i] = stats_mcnemar(v[i].a, v[i].b, n);
        p[i] = d[i].p;
    }
    stats_holm(p, n_pairs, holm);
    for (int i = 0; i < n_pairs; i++) {
        const struct stats_interval diff = stats_paired_interval(&d[i], n_pairs);
        json_array_append_new(list, json_pack("{s:s*,s:s*,s:f,s:f,s:f,s:f,s:f}", "a", v[i].a_name,
                                              "b", v[i].b_name, "diff", diff.value, "lo", diff.lo,
                                              "hi", diff.hi, "p", p[i], "p_holm", holm[i]));
    }
    free(d);
    free(p);
    return list;
}
