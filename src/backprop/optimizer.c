/*
 * optimizer: learning-rate schedules, gradient clipping and the step: AdamW (Loshchilov & Hutter
 * 2019), AdamW with 8-bit states (Dettmers et al. 2022), SGD with momentum.
 *
 * 8-bit states hold both moments in blocks of MOMENT_BLOCK with two scales: m as the sign and
 * square root of its ratio to the block's largest value, v as the fourth root of its ratio. Small
 * values keep most of their precision that way, and v, a divisor, never rounds to zero.
 *
 * Each group (an adapter, or the whole model) is averaged over its own targets, clipped by its own
 * norm and stepped by its own count, so groups that train together take the same steps as alone. A
 * group without a target since the last update is not stepped.
 *
 * Invariant: norms are summed in double over fixed pieces in a fixed order; no parameter changes
 * before all norms are known to be finite.
 */
#include "backprop/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PIECE 4096

float lr_schedule_at(enum lr_schedule s, double lr, double min_ratio, int64_t step, int64_t warmup,
                     int64_t total) {
    if (step < warmup) return (float)(lr * (double)(step + 1) / (double)warmup);
    if (s == LR_CONSTANT || total <= warmup) return (float)lr;
    double done = (double)MIN(step - warmup, total - warmup) / (double)(total - warmup);
    double left = s == LR_LINEAR ? 1 - done : 0.5 * (1 + math_cos(done * 3.14159265358979323846));
    return (float)(lr * (min_ratio + (1 - min_ratio) * left));
}

struct step_job {
    struct trainer *t;
    int tensor;
    double *pieces; /* sum of squares of each piece */
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
static double grad_norm_squared(struct trainer *t, const struct param_group *g) {
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

size_t optimizer_state_bytes(enum optim o, int64_t n) {
    int64_t blocks = (n + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
    if (o == OPTIM_ADAMW) return (size_t)n * 2 * sizeof(float);
    if (o == OPTIM_SGD) return (size_t)n * sizeof(float);
    if (o == OPTIM_SGD_NO_MOMENTUM) return 0;
    return (size_t)blocks * (2 * sizeof(float) + 2 * MOMENT_BLOCK);
}

/* One block of AdamW's moments in 8 bits. */
struct adam8bit_block {
    float m_scale, v_scale;
    int8_t m[MOMENT_BLOCK];
    uint8_t v[MOMENT_BLOCK];
};

static void adam8bit_dequantize(const struct adam8bit_block *b, float *m, float *v, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float r = (float)b->m[i] / 127.0f, s = (float)b->v[i] / 255.0f;
        m[i] = (r < 0 ? -r * r : r * r) * b->m_scale;
        v[i] = s * s * (s * s) * b->v_scale;
    }
}

static void adam8bit_quantize(struct adam8bit_block *b, const float *m, const float *v, int64_t n) {
    b->m_scale = row_amax(m, n);
    b->v_scale = row_amax(v, n);
    for (int64_t i = 0; i < n; i++) {
        float r = b->m_scale > 0 ? sqrtf(fabsf(m[i]) / b->m_scale) * 127.0f + 0.5f : 0.0f;
        float s = b->v_scale > 0 ? sqrtf(sqrtf(v[i] / b->v_scale)) * 255.0f + 0.5f : 0.0f;
        b->m[i] = (int8_t)(m[i] < 0 ? -(int)r : (int)r);
        b->v[i] = (uint8_t)MAX((int)s, v[i] > 0);
    }
}

static void adamw_8bit(const struct step_job *j, struct train_tensor *x, int64_t begin,
                       int64_t end) {
    const struct trainer *t = j->t;
    struct adam8bit_block *blocks = t->moments[j->tensor].data;
    float m[MOMENT_BLOCK], v[MOMENT_BLOCK];
    for (int64_t at = begin; at < end; at += MOMENT_BLOCK) {
        int64_t n = MIN(MOMENT_BLOCK, end - at);
        adam8bit_dequantize(&blocks[at / MOMENT_BLOCK], m, v, n);
        t->k->adamw(x->w + at, x->g + at, m, v, n, j->lr, t->beta1, t->beta2, t->eps, j->decay,
                    j->bc1, j->bc2);
        adam8bit_quantize(&blocks[at / MOMENT_BLOCK], m, v, n);
    }
}

/* m = momentum · m + g + decay · w, w -= lr · m. */
static void sgd(const struct step_job *j, struct train_tensor *x, int64_t begin, int64_t end) {
    float *m = j->t->moments[j->tensor].data;
    for (int64_t i = begin; i < end; i++) {
        m[i] = j->t->momentum * m[i] + (x->g[i] + j->decay * x->w[i]);
        x->w[i] -= j->lr * m[i];
    }
}

static void sgd_bare(const struct step_job *j, struct train_tensor *x, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) x->w[i] -= j->lr * (x->g[i] + j->decay * x->w[i]);
}

/* Pieces begin at multiples of MOMENT_BLOCK. */
static void step_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct step_job *j = ctx;
    struct trainer *t = j->t;
    struct train_tensor *x = &t->tensors[j->tensor];
    float *m = t->moments[j->tensor].data;
    t->k->scale(x->g + begin, j->factor, end - begin);
    if (t->optim == OPTIM_SGD)
        sgd(j, x, begin, end);
    else if (t->optim == OPTIM_SGD_NO_MOMENTUM)
        sgd_bare(j, x, begin, end);
    else if (t->optim == OPTIM_ADAMW_8BIT)
        adamw_8bit(j, x, begin, end);
    else
        t->k->adamw(x->w + begin, x->g + begin, m + begin, m + x->n + begin, end - begin, j->lr,
                    t->beta1, t->beta2, t->eps, j->decay, j->bc1, j->bc2);
    memset(x->g + begin, 0, (size_t)(end - begin) * sizeof(float));
}

static void param_group_step(struct trainer *t, struct param_group *g, double norm, float lr) {
    double factor = 1.0 / g->count;
    if (t->max_grad_norm > 0 && norm > t->max_grad_norm) factor *= t->max_grad_norm / norm;
    g->updates++;
    struct step_job job = {.t = t, .factor = (float)factor, .lr = lr};
    job.bc1 = (float)(1 - math_pow(t->beta1, (double)g->updates));
    job.bc2 = (float)(1 - math_pow(t->beta2, (double)g->updates));
    for (job.tensor = g->first; job.tensor < g->first + g->n_tensors; job.tensor++) {
        job.decay = t->tensors[job.tensor].decay ? t->decay : 0;
        pool_run(t->pool, step_items, &job, t->tensors[job.tensor].n, 1024);
    }
    g->loss = g->nll / g->count;
}

/* Fills `norms` with the norm of each group's mean gradient; fails if one is not finite. */
static int grad_norms_compute(struct trainer *t, double *norms, struct error *err) {
    for (int i = 0; i < t->n_groups; i++) {
        const struct param_group *g = &t->groups[i];
        norms[i] = g->count > 0 ? sqrt(grad_norm_squared(t, g)) / g->count : 0;
        if (!isfinite(norms[i]))
            return error_set(
                err, ERR_NUMERIC,
                "the gradient's norm is not a number in update %lld; lower the learning rate",
                (long long)t->updates + 1);
    }
    return OK;
}

int trainer_update(struct trainer *t, float lr, struct update_stats *out, struct error *err) {
    struct update_stats s = {.tokens = t->tokens, .targets = t->seen};
    double count = 0;
    for (int i = 0; i < t->n_groups; i++) count += t->groups[i].count;
    if (count <= 0) return error_set(err, ERR_STATE, "an update without a single target token");
    double *norms = xcalloc((size_t)t->n_groups, sizeof *norms);
    int rc = grad_norms_compute(t, norms, err);
    for (int i = 0; !rc && i < t->n_groups; i++) {
        struct param_group *g = &t->groups[i];
        s.loss += g->nll;
        s.grad_norm = MAX(s.grad_norm, norms[i]);
        if (g->count > 0) param_group_step(t, g, norms[i], lr);
        g->samples = 0;
        g->nll = g->count = 0;
    }
    free(norms);
    if (rc) return rc;
    s.loss /= count;
    t->tokens = t->seen = 0;
    t->derived_stale = true;
    t->updates++;
    if (out) *out = s;
    return OK;
}
