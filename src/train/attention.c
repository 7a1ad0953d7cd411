/*
 * attention: causal attention of the packed samples, forward and backward.
 *
 * A work item is one sample and one kv head (forward: one query head), so no two threads write the
 * same place and the gradients of a shared kv head are summed over its query heads in order.
 * Queries go in blocks of BLOCK rows against all keys that any of them sees; probabilities are
 * recomputed in the backward pass instead of being kept, because they would be the only activation
 * that grows with the square of the length.
 *
 * Invariant: a sample's numbers depend on its own rows only.
 */
#include "train/internal.h"

#include <math.h>
#include <string.h>

#define BLOCK 64

/* One thread's scratch. */
struct scratch {
    float *p, *dp;   /* [BLOCK][n] */
    float *pt, *dst; /* [n][BLOCK] */
    float *kt, *vt;  /* [E][n] */
    float *qt, *dot; /* [E][BLOCK] */
};

struct attend_job {
    struct trainer *t;
    const struct activations *a;
};

static int64_t length_padded(int64_t n) {
    return (n + 15) / 16 * 16;
}

size_t attention_scratch(const struct model_config *c, int64_t longest) {
    int64_t n = length_padded(longest);
    return (size_t)(4 * BLOCK * n + 2 * c->head_dim * n + 2 * c->head_dim * BLOCK) * sizeof(float);
}

static struct scratch scratch_view(const struct trainer *t, int thread) {
    int64_t n = length_padded(t->longest), e = t->c.head_dim;
    float *f = t->att_scratch[thread];
    struct scratch s;
    s.p = f, f += BLOCK * n;
    s.dp = f, f += BLOCK * n;
    s.pt = f, f += BLOCK * n;
    s.dst = f, f += BLOCK * n;
    s.kt = f, f += e * n;
    s.vt = f, f += e * n;
    s.qt = f, f += e * BLOCK;
    s.dot = f;
    return s;
}

/* Probabilities of queries [i0, i1) of a sample over its keys [0, i1): p [i1 - i0][ldp], zero where
 * masked. */
static void block_probabilities(const struct trainer *t, float *p, int64_t ldp, const float *q,
                                const float *k, int64_t i0, int64_t i1) {
    int64_t e = t->c.head_dim, ldq = t->c.n_heads * e, ldk = t->c.n_kv_heads * e;
    float scale = 1.0f / sqrtf((float)e);
    t->k->gemm_f32(p, ldp, q + i0 * ldq, ldq, i1 - i0, k, ldk, e, 0, i1, false);
    for (int64_t i = i0; i < i1; i++) {
        float *row = p + (i - i0) * ldp;
        t->k->scale(row, scale, i + 1);
        t->k->scale(row, 1.0f / t->k->softmax(row, i + 1), i + 1);
        memset(row + i + 1, 0, (size_t)(i1 - i - 1) * sizeof(float));
    }
}

static void attend_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct attend_job *job = ctx;
    const struct trainer *t = job->t;
    int64_t h_n = t->c.n_heads, e = t->c.head_dim, group = h_n / t->c.n_kv_heads;
    int64_t ldq = h_n * e, ldk = t->c.n_kv_heads * e;
    struct scratch s = scratch_view(t, thread);
    for (int64_t item = begin; item < end; item++) {
        const struct span *sp = &t->spans[item / h_n];
        int64_t h = item % h_n, n = sp->end - sp->begin, ld = length_padded(n);
        const float *q = job->a->q + sp->begin * ldq + h * e;
        const float *k = job->a->k + sp->begin * ldk + h / group * e;
        const float *v = job->a->v + sp->begin * ldk + h / group * e;
        float *out = job->a->att + sp->begin * ldq + h * e;
        transpose(s.vt, ld, v, ldk, n, e, NULL);
        for (int64_t i0 = 0; i0 < n; i0 += BLOCK) {
            int64_t i1 = MIN(i0 + BLOCK, n);
            block_probabilities(t, s.p, ld, q, k, i0, i1);
            t->k->gemm_f32(out + i0 * ldq, ldq, s.p, ld, i1 - i0, s.vt, ld, i1, 0, e, false);
        }
    }
}

void attention_forward(struct trainer *t, const struct activations *a) {
    struct attend_job job = {.t = t, .a = a};
    pool_run(t->pool, attend_items, &job, (int64_t)t->n_spans * t->c.n_heads, 1);
}

/* Softmax backward on one block: dp becomes the gradient of the raw scores. */
static void scores_backward(const struct trainer *t, const float *p, float *dp, int64_t ld,
                            int64_t i0, int64_t i1) {
    float scale = 1.0f / sqrtf((float)t->c.head_dim);
    for (int64_t i = i0; i < i1; i++) {
        const float *pr = p + (i - i0) * ld;
        float *dr = dp + (i - i0) * ld;
        float mean = t->k->dot(pr, dr, i + 1);
        for (int64_t j = 0; j <= i; j++) dr[j] = pr[j] * (dr[j] - mean) * scale;
        memset(dr + i + 1, 0, (size_t)(i1 - i - 1) * sizeof(float));
    }
}

/* One query head of one sample; dk and dv of its kv head are added to. */
static void head_backward(const struct trainer *t, const struct activations *a,
                          const struct span *sp, int64_t h, const struct scratch *s) {
    int64_t e = t->c.head_dim, kv = h / (t->c.n_heads / t->c.n_kv_heads), n = sp->end - sp->begin;
    int64_t ldq = t->c.n_heads * e, ldk = t->c.n_kv_heads * e, ld = length_padded(n);
    int64_t at_q = sp->begin * ldq + h * e, at_k = sp->begin * ldk + kv * e;
    for (int64_t i0 = 0; i0 < n; i0 += BLOCK) {
        int64_t i1 = MIN(i0 + BLOCK, n), nb = i1 - i0, row = at_q + i0 * ldq;
        block_probabilities(t, s->p, ld, a->q + at_q, a->k + at_k, i0, i1);
        t->k->gemm_f32(s->dp, ld, t->datt + row, ldq, nb, a->v + at_k, ldk, e, 0, i1, false);
        scores_backward(t, s->p, s->dp, ld, i0, i1);
        t->k->gemm_f32(t->dq + row, ldq, s->dp, ld, nb, s->kt, ld, i1, 0, e, false);
        transpose(s->pt, BLOCK, s->p, ld, nb, i1, NULL);
        transpose(s->dst, BLOCK, s->dp, ld, nb, i1, NULL);
        transpose(s->qt, BLOCK, a->q + row, ldq, nb, e, NULL);
        transpose(s->dot, BLOCK, t->datt + row, ldq, nb, e, NULL);
        t->k->gemm_f32(t->dk + at_k, ldk, s->dst, BLOCK, i1, s->qt, BLOCK, nb, 0, e, true);
        t->k->gemm_f32(t->dv + at_k, ldk, s->pt, BLOCK, i1, s->dot, BLOCK, nb, 0, e, true);
    }
}

static void attend_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct attend_job *job = ctx;
    const struct trainer *t = job->t;
    int64_t kv_n = t->c.n_kv_heads, e = t->c.head_dim, group = t->c.n_heads / kv_n, ldk = kv_n * e;
    struct scratch s = scratch_view(t, thread);
    for (int64_t item = begin; item < end; item++) {
        const struct span *sp = &t->spans[item / kv_n];
        int64_t kv = item % kv_n, n = sp->end - sp->begin;
        transpose(s.kt, length_padded(n), job->a->k + sp->begin * ldk + kv * e, ldk, n, e, NULL);
        for (int64_t i = sp->begin; i < sp->end; i++) {
            memset(t->dk + i * ldk + kv * e, 0, (size_t)e * sizeof(float));
            memset(t->dv + i * ldk + kv * e, 0, (size_t)e * sizeof(float));
        }
        for (int64_t h = kv * group; h < (kv + 1) * group; h++) head_backward(t, job->a, sp, h, &s);
    }
}

void attention_backward(struct trainer *t, const struct activations *a) {
    struct attend_job job = {.t = t, .a = a};
    pool_run(t->pool, attend_backward_items, &job, (int64_t)t->n_spans * t->c.n_kv_heads, 1);
}
