/*
 * optimizer: learning-rate schedules, gradient clipping and the AdamW step.
 *
 * Each group (an adapter, or the whole model) is averaged over its own targets, clipped by its own
 * norm and stepped by its own count, so groups trained together take the steps that they would take
 * alone. A group that saw no target since the last update stands still.
 *
 * Invariant: norms are summed in double over fixed pieces in a fixed order; nothing is changed
 * before all are known to be numbers.
 */
#include "train/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PIECE 4096

float schedule_lr(enum schedule s, double lr, double min_ratio, int64_t step, int64_t warmup,
                  int64_t total) {
    if (step < warmup) return (float)(lr * (double)(step + 1) / (double)warmup);
    if (s == SCHEDULE_CONSTANT || total <= warmup) return (float)lr;
    double done = (double)MIN(step - warmup, total - warmup) / (double)(total - warmup);
    double left =
        s == SCHEDULE_LINEAR ? 1 - done : 0.5 * (1 + math_cos(done * 3.14159265358979323846));
    return (float)(lr * (min_ratio + (1 - min_ratio) * left));
}

struct step_job {
    struct trainer *t;
    int tensor;
    double *pieces; /* sums of squares */
    float factor, lr, decay, bc1, bc2;
};

static void square_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct step_job *j = ctx;
    const struct train_tensor *x = &j->t->tensors[j->tensor];
    for (int64_t i = begin; i < end; i++) {
        double sum = 0;
        for (int64_t e = i * PIECE; e < MIN((i + 1) * PIECE, x->n); e++)
            sum += (double)x->g[e] * (double)x->g[e];
        j->pieces[i] = sum;
    }
}

/* Sum of squares of a group's gradients. */
static double group_squares(struct trainer *t, const struct group *g) {
    double sum = 0;
    for (int i = g->first; i < g->first + g->n_tensors; i++) {
        int64_t n = (t->tensors[i].n + PIECE - 1) / PIECE;
        struct step_job job = {.t = t, .tensor = i, .pieces = xmalloc((size_t)n * sizeof(double))};
        pool_run(t->pool, square_items, &job, n, 1);
        for (int64_t p = 0; p < n; p++) sum += job.pieces[p];
        free(job.pieces);
    }
    return sum;
}

static void step_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct step_job *j = ctx;
    struct trainer *t = j->t;
    struct train_tensor *x = &t->tensors[j->tensor];
    t->k->scale(x->g + begin, j->factor, end - begin);
    t->k->adamw(x->w + begin, x->g + begin, t->m[j->tensor] + begin, t->v[j->tensor] + begin,
                end - begin, j->lr, t->beta1, t->beta2, t->eps, j->decay, j->bc1, j->bc2);
    memset(x->g + begin, 0, (size_t)(end - begin) * sizeof(float));
}

static void group_step(struct trainer *t, struct group *g, double norm, float lr) {
    double factor = 1.0 / (double)g->targets;
    if (t->max_grad_norm > 0 && norm > t->max_grad_norm) factor *= t->max_grad_norm / norm;
    g->updates++;
    struct step_job job = {.t = t, .factor = (float)factor, .lr = lr};
    job.bc1 = (float)(1 - math_pow(t->beta1, (double)g->updates));
    job.bc2 = (float)(1 - math_pow(t->beta2, (double)g->updates));
    for (job.tensor = g->first; job.tensor < g->first + g->n_tensors; job.tensor++) {
        job.decay = t->tensors[job.tensor].decay ? t->decay : 0;
        pool_run(t->pool, step_items, &job, t->tensors[job.tensor].n, 1024);
    }
    g->loss = g->nll / (double)g->targets;
}

/* Fills `norms` with each group's norm of the mean gradient; refuses what is no number. */
static int norms_measure(struct trainer *t, double *norms, struct error *err) {
    for (int i = 0; i < t->n_groups; i++) {
        const struct group *g = &t->groups[i];
        norms[i] = g->targets ? sqrt(group_squares(t, g)) / (double)g->targets : 0;
        if (!isfinite(norms[i]))
            return error_set(
                err, ERR_NUMERIC,
                "the gradient's norm is no number in update %lld; lower the learning rate",
                (long long)t->updates + 1);
    }
    return OK;
}

int trainer_update(struct trainer *t, float lr, struct update_stats *out, struct error *err) {
    struct update_stats s = {.tokens = t->tokens};
    for (int i = 0; i < t->n_groups; i++) s.targets += t->groups[i].targets;
    if (!s.targets) return error_set(err, ERR_STATE, "an update without a single target token");
    double *norms = xcalloc((size_t)t->n_groups, sizeof *norms);
    int rc = norms_measure(t, norms, err);
    for (int i = 0; !rc && i < t->n_groups; i++) {
        struct group *g = &t->groups[i];
        s.loss += g->nll;
        s.grad_norm = MAX(s.grad_norm, norms[i]);
        if (g->targets) group_step(t, g, norms[i], lr);
        g->targets = g->samples = 0;
        g->nll = 0;
    }
    free(norms);
    if (rc) return rc;
    s.loss /= (double)s.targets;
    t->tokens = 0;
    t->updates++;
    if (out) *out = s;
    return OK;
}
