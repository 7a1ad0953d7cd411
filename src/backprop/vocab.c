/*
 * vocab: the adapters' changes of embedding and head, forward and backward: replacement tables,
 * replaced rows and low-rank parts, for each adapter's rows. No dropout applies to them.
 *
 *   embedding  x = E[id] + scale · B A[:, id]     dE[id] += dx    dB += dx ⊗ scale · A[:, id]
 *                                                 dA[:, id] += scale · Bᵀ dx
 *   head       h = scale · A x, y = W x + B h     dW += dyᵀ x     dB += dyᵀ h    dh = scale · Bᵀ dy
 *                                                 dA += dhᵀ x     dx = Wᵀ dy + Aᵀ dh
 *
 * The base's products are those without adapters. A row of the head that an adapter replaces has no
 * part in the base's backward product: its dy is set to 0 there, and its part is added afterwards.
 *
 * Invariant: see internal.h. If embedding and head are tied, a replaced row has two gradients, each
 * a chain over the rows of the batch; vocab_grads_join adds them before an update.
 */
#include "backprop/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Targets [begin, end) of the batch, all from samples of one adapter. */
struct vocab_run {
    int64_t begin, end;
    const struct vocab_params *v;
};

static int row_adapter(const struct trainer *t, int64_t row) {
    int lo = 0, hi = t->n_seqs - 1;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (t->seqs[mid].end <= row)
            lo = mid + 1;
        else
            hi = mid;
    }
    return t->seqs[lo].adapter;
}

static bool params_are_used(const struct vocab_params *v) {
    return v->w.full || v->w.n > 0 || v->w.lora.r > 0;
}

void vocab_embed_row(const struct trainer *t, int64_t row, float *x) {
    const struct vocab_override *w = &t->vocab[row_adapter(t, row)].embed.w;
    const int32_t id = t->tokens_in[row];
    const float *own = vocab_override_row(w, id, t->c.d_model);
    if (own)
        memcpy(x, own, (size_t)t->c.d_model * sizeof *x);
    else
        matrix_get_row(&t->model->embed, id, x);
    embed_lora_add(&t->c, &w->lora, id, x);
}

static float embedding_factor(const struct trainer *t) {
    return t->c.arch->scaled_embedding ? sqrtf((float)t->c.d_model) : 1.0f;
}

/* Gradients of tables, rows and B. Items are columns; each is summed over all rows in order. */
static void embed_column_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct trainer *t = ctx;
    const int64_t d = t->c.d_model, n = end - begin, vocab = t->c.vocab_size;
    const float factor = embedding_factor(t);
    for (int64_t i = 0; i < t->rows; i++) {
        const struct vocab_params *v = &t->vocab[row_adapter(t, i)].embed;
        const struct lora *lo = &v->w.lora;
        const int32_t id = t->tokens_in[i], k = vocab_override_index(&v->w, id);
        const float *dx = t->dx + i * d;
        if (v->w.full) t->k->axpy(v->g_full + id * d + begin, factor, dx + begin, n);
        if (k >= 0) t->k->axpy(v->g_rows + k * d + begin, factor, dx + begin, n);
        for (int64_t c = begin; lo->r > 0 && c < end; c++)
            for (int32_t r = 0; r < lo->r; r++)
                v->g_b[c * lo->r + r] += factor * dx[c] * (lo->scale * lo->a[r * vocab + id]);
    }
}

/* Gradients of A. Items are ranks; each is summed over all rows in order. */
static void embed_rank_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct trainer *t = ctx;
    const int64_t d = t->c.d_model;
    const float factor = embedding_factor(t);
    for (int64_t i = 0; i < t->rows; i++) {
        const struct vocab_params *v = &t->vocab[row_adapter(t, i)].embed;
        const struct lora *lo = &v->w.lora;
        for (int64_t r = begin; r < MIN(end, lo->r); r++) {
            float sum = 0;
            for (int64_t c = 0; c < d; c++) sum += t->dx[i * d + c] * lo->b[c * lo->r + r];
            v->g_a[r * t->c.vocab_size + t->tokens_in[i]] += factor * lo->scale * sum;
        }
    }
}

void vocab_embed_backward(struct trainer *t) {
    pool_run(t->pool, embed_column_items, t, t->c.d_model, 16);
    pool_run(t->pool, embed_rank_items, t, t->vocab_max_r, 1);
}

/* The next run of targets of one adapter within [run->end, end). */
static bool head_run_next(const struct trainer *t, struct vocab_run *run, int64_t end) {
    run->begin = run->end;
    if (run->begin >= end) return false;
    const int adapter = t->target_group[run->begin];
    while (run->end < end && t->target_group[run->end] == adapter) run->end++;
    run->v = &t->vocab[adapter].head;
    return true;
}

bool vocab_base_head_needed(const struct trainer *t, int64_t first, int64_t n) {
    for (int64_t i = first; i < first + n; i++)
        if (!t->vocab || !t->vocab[t->target_group[i]].head.w.full) return true;
    return false;
}

void vocab_head_forward(struct trainer *t, int64_t first, int64_t n) {
    struct vocab_run run = {.end = first};
    while (head_run_next(t, &run, first + n))
        if (params_are_used(run.v))
            head_override_apply(&t->c, &run.v->w, t->hn + (run.begin - first) * t->c.d_model,
                                run.end - run.begin, t->head_low,
                                t->logits + (run.begin - first) * t->c.vocab_size, t->pool);
}

/* The head's inputs, gradients of logits and of inputs of one run. */
struct head_rows {
    const float *x; /* [rows][D] */
    float *dy, *dx; /* [rows][V], [rows][D] */
    int64_t rows;
};

/* The base's part of dx, without the replaced rows, and then their part. */
static void head_inputs_backward(struct trainer *t, const struct vocab_override *w,
                                 const struct head_rows *h) {
    const int64_t vocab = t->c.vocab_size, d = t->c.d_model;
    if (w->full) {
        gemm_nn_parallel(DTYPE_F32, h->dx, d, h->dy, vocab, 1, h->rows, w->full, d, vocab, d, false,
                         t->pool);
        return;
    }
    for (int64_t i = 0; i < h->rows; i++)
        for (int32_t k = 0; k < w->n; k++) {
            t->head_rows_dy[i * w->n + k] = h->dy[i * vocab + w->ids[k]];
            h->dy[i * vocab + w->ids[k]] = 0;
        }
    matrix_mul_backward(h->dx, d, h->dy, vocab, h->rows, &t->model->head, t->grad_path, false,
                        t->backward_scratch, t->pool);
    if (w->n > 0)
        gemm_nn_parallel(DTYPE_F32, h->dx, d, t->head_rows_dy, w->n, 1, h->rows, w->rows, d, w->n,
                         d, true, t->pool);
}

/* Adds the gradients of the replaced rows. Items are the rows. */
struct head_rows_job {
    const struct trainer *t;
    const struct vocab_params *v;
    const struct head_rows *h;
};

static void head_row_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct head_rows_job *j = ctx;
    const int64_t vocab = j->t->c.vocab_size, d = j->t->c.d_model;
    for (int64_t k = begin; k < end; k++)
        for (int64_t i = 0; i < j->h->rows; i++)
            j->t->k->axpy(j->v->g_rows + k * d, j->h->dy[i * vocab + j->v->w.ids[k]],
                          j->h->x + i * d, d);
}

/* Adds the gradients of A and B, and sets t->head_dlow to dh, which head_low_rank_inputs reads. */
static void head_low_rank_backward(struct trainer *t, const struct vocab_params *v,
                                   const struct head_rows *h) {
    const struct lora *lo = &v->w.lora;
    const int64_t vocab = t->c.vocab_size, d = t->c.d_model, r = lo->r, n = h->rows;
    gemm(t->head_low, r, h->x, d, n, lo->a, d, d, r, false, t->pool);
    t->k->scale(t->head_low, lo->scale, n * r);
    gemm_nn_parallel(DTYPE_F32, v->g_b, r, h->dy, 1, vocab, vocab, t->head_low, r, n, r, true,
                     t->pool);
    gemm_nn_parallel(DTYPE_F32, t->head_dlow, r, h->dy, vocab, 1, n, lo->b, r, vocab, r, false,
                     t->pool);
    t->k->scale(t->head_dlow, lo->scale, n * r);
    gemm_nn_parallel(DTYPE_F32, v->g_a, d, t->head_dlow, 1, r, r, h->x, d, n, d, true, t->pool);
}

static void head_run_backward(struct trainer *t, const struct vocab_params *v,
                              const struct head_rows *h) {
    const int64_t vocab = t->c.vocab_size, d = t->c.d_model;
    const struct lora *lo = &v->w.lora;
    struct head_rows_job j = {t, v, h};
    if (v->w.full)
        gemm_nn_parallel(DTYPE_F32, v->g_full, d, h->dy, 1, vocab, vocab, h->x, d, h->rows, d, true,
                         t->pool);
    pool_run(t->pool, head_row_items, &j, v->w.n, 1);
    if (lo->r > 0) head_low_rank_backward(t, v, h);
    head_inputs_backward(t, &v->w, h);
    if (lo->r > 0)
        gemm_nn_parallel(DTYPE_F32, h->dx, d, t->head_dlow, lo->r, 1, h->rows, lo->a, d, lo->r, d,
                         true, t->pool);
}

void vocab_head_backward(struct trainer *t, int64_t first, int64_t n) {
    struct vocab_run run = {.end = first};
    while (head_run_next(t, &run, first + n)) {
        const int64_t at = run.begin - first;
        const struct head_rows h = {.x = t->hn + at * t->c.d_model,
                                    .dy = t->logits + at * t->c.vocab_size,
                                    .dx = t->dhn + at * t->c.d_model,
                                    .rows = run.end - run.begin};
        head_run_backward(t, run.v, &h);
    }
}

void vocab_grads_join(struct trainer *t) {
    for (int i = 0; t->vocab && i < t->n_adapters; i++) {
        const struct vocab_params *embed = &t->vocab[i].embed, *head = &t->vocab[i].head;
        const int64_t n = embed->w.n * (int64_t)t->c.d_model;
        if (!embed->w.rows || embed->w.rows != head->w.rows) continue;
        t->k->axpy(embed->g_rows, 1.0f, head->g_rows, n);
        memset(head->g_rows, 0, (size_t)n * sizeof *head->g_rows);
    }
}
