/*
 * calibrate: the probability that an answer is right, from its confidence: Platt scaling (Platt
 * 1999, with his smoothed targets), fitted by Newton's method with step halving (Lin, Lin and Weng
 * 2007). A monotone map of two parameters does not overfit a few hundred answers.
 */
#define _GNU_SOURCE
#include "agent/agent.h"

#include <math.h>
#include <stdlib.h>

enum { ITERATIONS = 100, HALVINGS = 20 };

/* The logarithm of the odds; confidences of 0 and 1 have finite ones. */
static double log_odds(double p) {
    const double least = 1e-12;
    p = fmin(fmax(p, least), 1 - least);
    return log(p) - log1p(-p);
}

static double logistic(double x) {
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

double agent_calibrated(const struct agent_calibration *c, double confidence) {
    return logistic(c->a * log_odds(confidence) + c->b);
}

/* The cross entropy of the targets t[n]; a small penalty keeps `a` finite for separable answers. */
static double loss(const double *x, const double *t, int n, struct agent_calibration c) {
    double sum = 1e-6 * (c.a * c.a + c.b * c.b);
    for (int i = 0; i < n; i++) {
        double z = c.a * x[i] + c.b;
        sum += (z >= 0 ? log1p(exp(-z)) : log1p(exp(z)) - z) + (1 - t[i]) * z;
    }
    return sum;
}

/* One Newton step with halving. False: no step lowers the loss. */
static bool newton_step(const double *x, const double *t, int n, struct agent_calibration *c) {
    double ga = 2e-6 * c->a, gb = 2e-6 * c->b, haa = 2e-6, hab = 0, hbb = 2e-6;
    for (int i = 0; i < n; i++) {
        double p = logistic(c->a * x[i] + c->b), d = p - t[i], w = p * (1 - p);
        ga += d * x[i];
        gb += d;
        haa += w * x[i] * x[i];
        hab += w * x[i];
        hbb += w;
    }
    double det = haa * hbb - hab * hab, before = loss(x, t, n, *c);
    if (det <= 0) return false;
    double da = -(hbb * ga - hab * gb) / det, db = -(haa * gb - hab * ga) / det, step = 1;
    for (int k = 0; k < HALVINGS; k++, step /= 2) {
        struct agent_calibration next = {c->a + step * da, c->b + step * db};
        if (loss(x, t, n, next) >= before) continue;
        *c = next;
        return true;
    }
    return false;
}

int agent_calibrate(const double *confidence, const bool *right, int n,
                    struct agent_calibration *out, struct error *err) {
    int n_right = 0;
    for (int i = 0; i < n; i++) n_right += right[i];
    if (n < AGENT_CALIBRATION_MIN || n_right == 0 || n_right == n)
        return error_set(err, ERR_USAGE,
                         "a calibration needs at least %d answers, some of them right and some "
                         "wrong; there are %d, of which %d are right",
                         AGENT_CALIBRATION_MIN, n, n_right);
    double *x = xcalloc((size_t)n, sizeof *x), *t = xcalloc((size_t)n, sizeof *t);
    for (int i = 0; i < n; i++) {
        x[i] = log_odds(confidence[i]);
        t[i] = right[i] ? (n_right + 1.0) / (n_right + 2.0) : 1.0 / (n - n_right + 2.0);
    }
    *out = (struct agent_calibration){0, log((n_right + 1.0) / (n - n_right + 1.0))};
    for (int i = 0; i < ITERATIONS && newton_step(x, t, n, out); i++) continue;
    free(x);
    free(t);
    return OK;
}
