/*
 * head: final norm, logits, cross-entropy and their gradient, fused and in chunks.
 *
 * Only rows that predict a target are computed, `head_chunk` of them at a time, so the logits never
 * exist all at once; they become their own gradient in place. The gradient is of the *sum* over
 * targets: the update divides.
 *
 * Invariant: chunks are a function of the vocabulary's size alone, so sums over rows keep their
 * order.
 */
#include "train/internal.h"

#include <math.h>
#include <string.h>

struct loss_job {
    struct trainer *t;
    int64_t first; /* target that the chunk begins with */
};

static void gather_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct loss_job *job = ctx;
    struct trainer *t = job->t;
    int64_t d = t->c.d_model;
    const float *x = t->acts[t->c.n_layers].x;
    for (int64_t i = begin; i < end; i++) {
        memcpy(t->hx + i * d, x + t->target_row[job->first + i] * d, (size_t)d * sizeof(float));
        t->k->rmsnorm(t->hn + i * d, t->hx + i * d, t->final_norm, t->c.rms_norm_eps, d);
    }
}

/* Logits → nll, and logits → softmax minus the target's one-hot, in place. */
static void loss_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct loss_job *job = ctx;
    struct trainer *t = job->t;
    int64_t v = t->c.vocab_size;
    for (int64_t i = begin; i < end; i++) {
        float *row = t->logits + i * v;
        int32_t token = t->target_token[job->first + i];
        double at_target = row[token], max = t->k->max(row, v);
        float sum = t->k->softmax(row, v);
        t->target_nll[job->first + i] = math_log((double)sum) + max - at_target;
        t->k->scale(row, 1.0f / sum, v);
        row[token] -= 1.0f;
    }
}

static void chunk_backward(struct trainer *t, int64_t first, int64_t n, const float *wt) {
    int64_t d = t->c.d_model, v = t->c.vocab_size, ld = t->head_chunk;
    gemm(t->dhn, d, t->logits, v, n, wt, v, v, d, false, t->pool);
    if (t->full) {
        transpose(t->logits_t, ld, t->logits, v, n, v, t->pool);
        transpose(t->hx_t, ld, t->hn, d, n, d, t->pool);
        gemm(t->head.g, d, t->logits_t, ld, v, t->hx_t, ld, n, d, true, t->pool);
    }
    /* hn is free now: it takes the gradient of the gathered rows */
    rmsnorm_backward(t, t->hn, t->dhn, t->hx, t->final_norm, t->g_final_norm, n, d, false);
    for (int64_t i = 0; i < n; i++)
        memcpy(t->dx + t->target_row[first + i] * d, t->hn + i * d, (size_t)d * sizeof(float));
}

int head_loss(struct trainer *t, bool backward, struct error *err) {
    int64_t d = t->c.d_model, v = t->c.vocab_size;
    const float *wt = backward ? weight_transposed(t, &t->head, t->head_wt) : NULL;
    if (backward) memset(t->dx, 0, (size_t)(t->rows * d) * sizeof(float));
    for (int64_t first = 0; first < t->targets; first += t->head_chunk) {
        int64_t n = MIN(t->head_chunk, t->targets - first);
        struct loss_job job = {.t = t, .first = first};
        pool_run(t->pool, gather_rows, &job, n, 8);
        gemm(t->logits, v, t->hn, d, n, t->head.w, d, d, v, false, t->pool);
        pool_run(t->pool, loss_rows, &job, n, 1);
        for (int64_t i = first; i < first + n; i++)
            if (!isfinite(t->target_nll[i]))
                return error_set(
                    err, ERR_NUMERIC,
                    "the head gives a loss that is no number; lower the learning rate");
        if (backward) chunk_backward(t, first, n, wt);
    }
    return OK;
}
