/*
 * vocab_override: an adapter's changes of the embedding and the head, for the forward passes of
 * serving and of training.
 *
 * Invariant: a row's result does not depend on the other rows of a call.
 */
#include "model/model.h"

#include <string.h>

enum {
    RANK_CHUNK = VOCAB_RANK_CHUNK,
    MIN_PARALLEL = 1 << 15, /* multiply-adds below which waking threads costs more than it saves */
};

const float *vocab_override_row(const struct vocab_override *t, int32_t id, int64_t d) {
    int32_t i = vocab_override_index(t, id);
    if (i >= 0) return t->rows + i * d;
    return t->full ? t->full + id * d : NULL;
}

int32_t vocab_override_index(const struct vocab_override *t, int32_t id) {
    int32_t lo = 0, hi = t->n;
    while (lo < hi) {
        int32_t mid = (lo + hi) / 2;
        if (t->ids[mid] < id)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < t->n && t->ids[lo] == id ? lo : -1;
}

void embed_lora_add(const struct model_config *c, const struct lora *lo, int32_t id, float *x) {
    const struct kernels *k = kernels_get();
    float t[RANK_CHUNK];
    int64_t vocab = c->vocab_size;
    for (int64_t r0 = 0; r0 < lo->r; r0 += RANK_CHUNK) {
        int64_t r = MIN(lo->r - r0, RANK_CHUNK);
        for (int64_t i = 0; i < r; i++) t[i] = lo->scale * lo->a[(r0 + i) * vocab + id];
        for (int64_t n = 0; n < c->d_model; n++) x[n] += k->dot(t, lo->b + n * lo->r + r0, r);
    }
}

struct head_job {
    const struct kernels *k;
    const struct vocab_override *t;
    int64_t d, vocab;
    const float *hidden; /* [rows][D] */
    float *logits;       /* [rows][V] */
};

/* Recomputes the logits of the head's rows that the adapter replaces. */
static void head_replace_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct head_job *j = ctx;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        for (int32_t k = 0; k < j->t->n; k++)
            j->logits[i * j->vocab + j->t->ids[k]] =
                j->k->dot(j->hidden + i * j->d, j->t->rows + k * j->d, j->d);
}

static void head_scale(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct head_job *j = ctx;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        for (int64_t n = 0; n < j->vocab; n++)
            j->logits[i * j->vocab + n] *= j->t->lora.dora_scale[n];
}

void head_override_apply(const struct model_config *c, const struct vocab_override *t,
                         const float *hidden, int64_t rows, float *low, float *logits,
                         struct pool *pool) {
    const struct lora *lo = &t->lora;
    int64_t d = c->d_model, vocab = c->vocab_size;
    struct head_job j = {kernels_get(), t, d, vocab, hidden, logits};
    if (t->full) gemm(logits, vocab, hidden, d, rows, t->full, d, d, vocab, false, pool);
    pool_run(rows * t->n * d < MIN_PARALLEL ? NULL : pool, head_replace_rows, &j, rows, 1);
    for (int64_t r0 = 0; r0 < lo->r; r0 += RANK_CHUNK) {
        int64_t r = MIN(lo->r - r0, RANK_CHUNK);
        gemm(low, RANK_CHUNK, hidden, d, rows, lo->a + r0 * d, d, d, r, false, pool);
        for (int64_t i = 0; i < rows; i++) j.k->scale(low + i * RANK_CHUNK, lo->scale, r);
        gemm(logits, vocab, low, RANK_CHUNK, rows, lo->b + r0, lo->r, r, vocab, true, pool);
    }
    if (lo->dora_scale)
        pool_run(rows * vocab < MIN_PARALLEL ? NULL : pool, head_scale, &j, rows, 1);
}
