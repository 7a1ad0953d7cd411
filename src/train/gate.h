/*
 * gate: is a trained adapter better than what it would replace? A paired test on samples that
 * training did not see decides, and another keeps what must not be lost.
 *
 * Both compare, sample by sample, the mean negative log-likelihood of the targets before and after
 * (nats a token), as the serving forward pass computes it. gate_compare and gate_decide are pure.
 */
#ifndef SHOAL_TRAIN_GATE_H
#define SHOAL_TRAIN_GATE_H

#include "train/train.h"

/* nll[i]: mean over the targets of sample i, under an adapter (ready; NULL: the bare base). */
int gate_eval_nll(const struct model *m, const struct adapter *a, const struct dataset *d,
                 struct pool *pool, double *nll, struct error *err);

struct gate_comparison {
    int64_t n; /* 0: nothing was measured */
    double before, after;
    struct stats_interval gain; /* of before - after, 95 % t interval */
    double p;             /* two-sided, sign flips */
};
struct gate_comparison gate_compare(const double *before, const double *after, int64_t n);

struct gate {
    struct gate_comparison eval, retain;
    bool publish;
    char why[256]; /* one line, for people */
};
/* Publishes when the gain is above 0 with p <= alpha, and, where retention was measured, a loss
 * of more than `tolerance` nats a token is excluded by its interval. Sets publish and why. */
void gate_decide(struct gate *g, double alpha, double tolerance);
json_t *gate_json(const struct gate *g);

#endif
