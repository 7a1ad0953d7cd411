/*
 * cross_entropy: final norm, logits, cross-entropy and their gradient, fused and in chunks.
 *
 * Only rows that predict a target are computed, trainer.head_chunk of them at a time, so the logits
 * of all rows never exist at once. Logits are replaced by their gradient in place. It is the
 * gradient of the *sum* of losses; the update divides it by the sum of the samples' counts. A loss
 * over choices (a policy that chooses between the actions t->choices, see backprop.h) needs only
 * the logits of the choices, so only the panels of the head that contain the choices are
 * multiplied. These logits have the same bits as in a product with the whole head. LoRA training in
 * the fast class uses cross_entropy_tiles.c instead, except for choices.
 *
 * Invariant: the size of a chunk depends only on the size of the vocabulary, so sums over rows keep
 * their order.
 */
#include "backprop/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct loss_job {
    struct trainer *t;
    int64_t first; /* first target of the chunk */
};

/* Copies the last layer's output for the chunk's targets to hx, and sets hn to these rows after the
 * final norm. */
static void head_input_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct loss_job *job = ctx;
    struct trainer *t = job->t;
    int64_t d = t->c.d_model;
    const float *x = t->acts[t->c.n_layers].x;
    for (int64_t i = begin; i < end; i++) {
        memcpy(t->hx + i * d, x + t->target_row[job->first + i] * d, (size_t)d * sizeof(float));
        norm_row(t->k, t->hn + i * d, t->hx + i * d, t->model->final_norm,
                 t->model->final_norm_bias, t->c.rms_norm_eps, d);
    }
}

/* The logit of choice i in a row of t->logits. Its panel begins at column i · CHOICE_PANEL. */
static float *choice_logit(const struct trainer *t, float *row, int32_t i) {
    return row + i * CHOICE_PANEL + t->choices[i] % CHOICE_PANEL;
}

void head_logits(const struct trainer *t, const struct gemm_input *in, int64_t n0, int64_t n1,
                 float *logits, int64_t ld) {
    // matrix_mul_range writes output n0 to column n0, so the matrix that it gets begins n0 columns
    // earlier.
    uintptr_t shifted = (uintptr_t)logits - (size_t)n0 * sizeof *logits;
    matrix_mul_range((float *)shifted, ld, in, &t->model->head, n0, n1, false);
}

/* Computes the logits of each choice's panel, which begins at column i · CHOICE_PANEL. */
static void choice_logits_compute(struct trainer *t, const struct gemm_input *in) {
    for (int32_t i = 0; i < t->n_choices; i++) {
        int64_t n0 = t->choices[i] / CHOICE_PANEL * CHOICE_PANEL;
        head_logits(t, in, n0, MIN(n0 + CHOICE_PANEL, t->model->head.n),
                    t->logits + i * CHOICE_PANEL, t->columns);
    }
}

/* Computes log-probabilities over the choices, and the target's nll. Then replaces the choices'
 * logits by their gradients, (w - p · Σ w) · logit_scale, where w are the derivatives of the loss
 * with respect to the log-probabilities, and p the probabilities. The other logits of the panels
 * are not used. */
static void choice_cross_entropy(struct trainer *t, int64_t target, float *row) {
    int32_t n = t->n_choices;
    double *logp = t->choice_logp + target * n, max = -INFINITY, sum = 0, weight_sum = 0;
    const float *w = t->choice_weight + target * n;
    for (int32_t i = 0; i < n; i++) {
        logp[i] = *choice_logit(t, row, i) * t->logit_scale;
        max = fmax(max, logp[i]);
        weight_sum += w[i];
    }
    for (int32_t i = 0; i < n; i++) sum += math_exp(logp[i] - max);
    for (int32_t i = 0; i < n; i++) {
        logp[i] -= max + math_log(sum);
        if (t->choices[i] == t->target_token[target]) t->target_nll[target] = -logp[i];
    }
    for (int32_t i = 0; i < n; i++)
        *choice_logit(t, row, i) = (float)(w[i] - math_exp(logp[i]) * weight_sum) * t->logit_scale;
}

/* Computes each row's nll from its logits times logit_scale, and replaces the logits by
 * their gradients: target_weight · logit_scale · (softmax - one-hot of the target). */
static void cross_entropy_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct loss_job *job = ctx;
    struct trainer *t = job->t;
    int64_t v = t->columns;
    for (int64_t i = begin; i < end; i++) {
        float *row = t->logits + i * v;
        if (t->choices) {
            choice_cross_entropy(t, job->first + i, row);
            continue;
        }
        int32_t token = t->target_token[job->first + i];
        if (t->logit_scale != 1) t->k->scale(row, t->logit_scale, v);
        double target_logit = row[token], max = t->k->max(row, v);
        float sum = t->k->softmax(row, v);
        t->target_nll[job->first + i] = math_log((double)sum) + max - target_logit;
        float weight = t->target_weight[job->first + i] * t->logit_scale;
        t->k->scale(row, weight / sum, v);
        row[token] -= weight;
    }
}

/* Computes dhn, the gradient of hn, of n rows from the gradients of the choices' logits. Training
 * of all weights (t->full) also adds to the gradient of the head. */
static void choices_backward(struct trainer *t, int64_t n) {
    int64_t d = t->c.d_model;
    float *w = xmalloc((size_t)d * sizeof *w);
    memset(t->dhn, 0, (size_t)(n * d) * sizeof *t->dhn);
    for (int32_t k = 0; k < t->n_choices; k++) {
        matrix_get_row(&t->model->head, t->choices[k], w);
        for (int64_t i = 0; i < n; i++) {
            float dy = *choice_logit(t, t->logits + i * t->columns, k);
            t->k->axpy(t->dhn + i * d, dy, w, d);
            if (t->full) t->k->axpy(t->g_head + t->choices[k] * d, dy, t->hn + i * d, d);
        }
    }
    free(w);
}

static void lm_head_backward(struct trainer *t, int64_t first, int64_t n) {
    const struct matrix *w = &t->model->head;
    int64_t d = t->c.d_model;
    if (t->vocab) {
        vocab_head_backward(t, first, n);
        return;
    }
    matrix_mul_backward(t->dhn, d, t->logits, w->n, n, w, t->grad_path, false, t->backward_scratch,
                        t->pool);
    if (t->full) weight_grad_add(t, t->g_head, t->logits, w->n, t->hn, d, n);
}

/* Computes target_nll of targets [first, first + n) and, for the backward pass, the gradients of
 * the logits; cross_entropy_tiles computes dhn instead. */
static void chunk_cross_entropy(struct trainer *t, int64_t first, int64_t n, bool backward) {
    const struct matrix *w = &t->model->head;
    struct loss_job job = {.t = t, .first = first};
    struct gemm_input in = gemm_input_for(w, 1, t->hn, n, t->row_path, t->input_scratch, t->pool);
    if (!t->choices && cross_entropy_uses_tiles(t)) {
        cross_entropy_tiles(t, first, &in, backward);
        return;
    }
    if (t->choices)
        choice_logits_compute(t, &in);
    else if (vocab_base_head_needed(t, first, n))
        matrix_mul(t->logits, w->n, &in, w, false, t->pool);
    if (t->vocab) vocab_head_forward(t, first, n);
    pool_run(t->pool, cross_entropy_rows, &job, n, 1);
}

/* Sets t->dx in the rows that predict targets [first, first + n). */
static void chunk_backward(struct trainer *t, int64_t first, int64_t n) {
    int64_t d = t->c.d_model;
    if (t->choices)
        choices_backward(t, n);
    else if (!cross_entropy_uses_tiles(t))
        lm_head_backward(t, first, n);
    norm_backward(t, t->dhn, t->dhn, t->hx,
                  (struct norm_params){t->model->final_norm, t->model->final_norm_bias,
                                       t->g_final_norm, t->g_final_norm_bias},
                  n, d, false);
    for (int64_t i = 0; i < n; i++)
        memcpy(t->dx + t->target_row[first + i] * d, t->dhn + i * d, (size_t)d * sizeof(float));
}

int64_t head_columns(const struct trainer *t, const struct loss_fn *loss) {
    if (loss && loss->choices) return (int64_t)loss->n_choices * CHOICE_PANEL;
    return cross_entropy_uses_tiles(t) ? 0 : t->c.vocab_size;
}

int fused_cross_entropy(struct trainer *t, bool backward, struct error *err) {
    int64_t d = t->c.d_model;
    if (backward) memset(t->dx, 0, (size_t)(t->rows * d) * sizeof(float));
    for (int64_t first = 0; first < t->targets; first += t->head_chunk) {
        int64_t n = MIN(t->head_chunk, t->targets - first);
        struct loss_job job = {.t = t, .first = first};
        pool_run(t->pool, head_input_rows, &job, n, 8);
        chunk_cross_entropy(t, first, n, backward);
        for (int64_t i = first; i < first + n; i++)
            if (!isfinite(t->target_nll[i]))
                return error_set(
                    err, ERR_NUMERIC,
                    "the loss of a token is not a finite number; lower the learning rate");
        if (backward) chunk_backward(t, first, n);
    }
    return OK;
}
