/*
 * optimizer: learning-rate schedules, gradient clipping and the step: AdamW (Loshchilov & Hutter
 * 2019), AdamW with 8-bit states (Dettmers et al. 2022), SGD with momentum.
 *
 * 8-bit states store the moments m and v in blocks of MOMENT_BLOCK values with one scale for m and
 * one for v, the largest magnitude in the block. m is stored as its sign and the square root of |m|
 * / scale, v as the fourth root of v / scale. So small values keep most of their precision. v is a
 * divisor, so a positive v is never rounded to zero.
 *
 * The gradient of each group (an adapter, or the whole model) is divided by the group's count and
 * clipped by its norm, and the group has its own count of updates. So groups that train together
 * take the same steps as alone. A group without a target since the last update takes no step.
 *
 * Invariant: norms are summed in double over fixed pieces in a fixed order; no parameter changes
 * before all norms have been checked to be finite.
 */
#include "backprop/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIECE = 4096, /* a multiple of MOMENT_BLOCK */
    SUMS = 4,     /* pieces whose sums of squares are computed at the same time */
};

float lr_schedule_at(enum lr_schedule s, double lr, double min_ratio, int64_t step, int64_t warmup,
                     int64_t total) {
    if (step < warmup) return (float)(lr * (double)(step + 1) / (double)warmup);
    if (s == LR_CONSTANT || total <= warmup) return (float)lr;
    double done = (double)MIN(step - warmup, total - warmup) / (double)(total - warmup);
    double left = s == LR_LINEAR ? 1 - done : 0.5 * (1 + math_cos(done * 3.14159265358979323846));
    return (float)(lr * (min_ratio + (1 - min_ratio) * left));
}

/* Values [begin, begin + n) of a tensor of the group. */
struct piece {
    int tensor;
    int64_t begin, n;
    double squares; /* sum of squares of its gradient */
};

/* A step of a group: the pieces of all its tensors are the items of one parallel region. */
struct step_job {
    struct trainer *t;
    struct piece *pieces;
    int64_t n_pieces;
    float factor, lr, bc1, bc2; /* factor of the gradients (1 / count, clipping); see adamw */
};

static struct step_job step_job_new(struct trainer *t, const struct param_group *g) {
    struct step_job j = {.t = t};
    int64_t n = 0;
    for (int i = g->first_tensor; i < g->first_tensor + g->n_tensors; i++)
        n += (t->tensors[i].n + PIECE - 1) / PIECE;
    j.pieces = xcalloc((size_t)n, sizeof *j.pieces);
    for (int i = g->first_tensor; i < g->first_tensor + g->n_tensors; i++)
        for (int64_t e = 0; e < t->tensors[i].n; e += PIECE)
            j.pieces[j.n_pieces++] =
                (struct piece){.tensor = i, .begin = e, .n = MIN(t->tensors[i].n - e, PIECE)};
    return j;
}

/* Sums of squares of `many` arrays, each in order. The additions of several arrays are interleaved,
 * so that the processor overlaps them. */
static inline void squares_sum(const float *const g[SUMS], int64_t n, int many, double sum[SUMS]) {
    for (int64_t e = 0; e < n; e++)
        for (int i = 0; i < many; i++) sum[i] += (double)g[i][e] * (double)g[i][e];
}

static void square_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct step_job *j = ctx;
    for (int64_t i = begin; i < end;) {
        const float *g[SUMS];
        double sum[SUMS] = {0};
        int many = 0;
        for (; many < SUMS && i + many < end; many++) {
            const struct piece *p = &j->pieces[i + many];
            if (p->n != j->pieces[i].n) break;
            g[many] = j->t->tensors[p->tensor].g + p->begin;
        }
        if (many == SUMS)
            squares_sum(g, j->pieces[i].n, SUMS, sum);
        else
            squares_sum(g, j->pieces[i].n, many = 1, sum);
        for (int k = 0; k < many; k++) j->pieces[i++].squares = sum[k];
    }
}

/* Sum of squares of a group's gradients. */
static double grad_norm_squared(struct trainer *t, const struct param_group *g) {
    struct step_job job = step_job_new(t, g);
    double sum = 0;
    pool_run(t->pool, square_items, &job, job.n_pieces, SUMS);
    for (int64_t p = 0; p < job.n_pieces; p++) sum += job.pieces[p].squares;
    free(job.pieces);
    return sum;
}

static float decay_of(const struct trainer *t, int tensor) {
    return t->tensors[tensor].decay ? t->weight_decay : 0;
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

static void adamw_8bit(const struct step_job *j, int tensor, int64_t begin, int64_t end) {
    const struct trainer *t = j->t;
    const struct train_tensor *x = &t->tensors[tensor];
    struct adam8bit_block *blocks = t->moments[tensor].data;
    float m[MOMENT_BLOCK], v[MOMENT_BLOCK];
    for (int64_t at = begin; at < end; at += MOMENT_BLOCK) {
        int64_t n = MIN(MOMENT_BLOCK, end - at);
        adam8bit_dequantize(&blocks[at / MOMENT_BLOCK], m, v, n);
        t->k->adamw(x->w + at, x->g + at, m, v, n, j->lr, t->beta1, t->beta2, t->eps,
                    decay_of(t, tensor), j->bc1, j->bc2);
        adam8bit_quantize(&blocks[at / MOMENT_BLOCK], m, v, n);
    }
}

/* m = momentum · m + g + decay · w, w -= lr · m: here weight decay is a part of the gradient. */
static void sgd(const struct step_job *j, int tensor, int64_t begin, int64_t end) {
    struct train_tensor *x = &j->t->tensors[tensor];
    float *m = j->t->moments[tensor].data, decay = decay_of(j->t, tensor);
    for (int64_t i = begin; i < end; i++) {
        m[i] = j->t->momentum * m[i] + (x->g[i] + decay * x->w[i]);
        x->w[i] -= j->lr * m[i];
    }
}

static void sgd_no_momentum(const struct step_job *j, int tensor, int64_t begin, int64_t end) {
    struct train_tensor *x = &j->t->tensors[tensor];
    float decay = decay_of(j->t, tensor);
    for (int64_t i = begin; i < end; i++) x->w[i] -= j->lr * (x->g[i] + decay * x->w[i]);
}

static void piece_step(const struct step_job *j, const struct piece *p) {
    struct trainer *t = j->t;
    struct train_tensor *x = &t->tensors[p->tensor];
    int64_t begin = p->begin, end = p->begin + p->n;
    float *m = t->moments[p->tensor].data;
    t->k->scale(x->g + begin, j->factor, p->n);
    if (t->optim == OPTIM_SGD)
        sgd(j, p->tensor, begin, end);
    else if (t->optim == OPTIM_SGD_NO_MOMENTUM)
        sgd_no_momentum(j, p->tensor, begin, end);
    else if (t->optim == OPTIM_ADAMW_8BIT)
        adamw_8bit(j, p->tensor, begin, end);
    else
        t->k->adamw(x->w + begin, x->g + begin, m + begin, m + x->n + begin, p->n, j->lr, t->beta1,
                    t->beta2, t->eps, decay_of(t, p->tensor), j->bc1, j->bc2);
    memset(x->g + begin, 0, (size_t)p->n * sizeof(float));
}

static void step_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct step_job *j = ctx;
    for (int64_t i = begin; i < end; i++) piece_step(j, &j->pieces[i]);
}

static void param_group_step(struct trainer *t, struct param_group *g, double norm, float lr) {
    double factor = 1.0 / g->count;
    if (t->max_grad_norm > 0 && norm > t->max_grad_norm) factor *= t->max_grad_norm / norm;
    g->updates++;
    struct step_job job = step_job_new(t, g);
    job.factor = (float)factor, job.lr = lr;
    job.bc1 = (float)(1 - math_pow(t->beta1, (double)g->updates));
    job.bc2 = (float)(1 - math_pow(t->beta2, (double)g->updates));
    pool_run(t->pool, step_items, &job, job.n_pieces, 1);
    free(job.pieces);
    g->loss = g->nll / g->count;
}

/* Sets `norms` to the norm of each group's mean gradient; ERR_NUMERIC if one is not finite. */
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
    struct update_stats s = {.tokens = t->tokens_since_update, .targets = t->targets_since_update};
    double count = 0;
    vocab_grads_join(t);
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
    t->tokens_since_update = t->targets_since_update = 0;
    t->derived_stale = true;
    t->updates++;
    if (out) *out = s;
    return OK;
}
