/*
 * lora: the adapters' part of a projection, forward and backward, each adapter on its own rows.
 *
 *   h = scale · A drop(x)    z = W x + B h       y = z; with DoRA y = (m / ‖W + scale B A‖) ⊙ z
 *   dh = scale · Bᵀ dz       dA += dhᵀ drop(x)   dB += dzᵀ h   dx += drop(Aᵀ dh)
 *
 * LoRA: Hu et al. 2022. DoRA: Liu et al. 2024; as in PEFT its norm is a constant for the gradient.
 * Dropout applies before A only, also with DoRA. The rows of a range are processed run by run
 * (neighbouring samples of one adapter), all runs in one parallel region, so that twenty adapters
 * cost as many wake-ups as one.
 *
 * Invariant: see internal.h. Sums over rows are chains in their order, and threads split outputs.
 */
#include "backprop/internal.h"

#include <stdlib.h>
#include <string.h>

struct low_job {
    struct trainer *t;
    int l, p;
    struct row_range s;
    float *y, *dora_out;
    const float *x, *dy;
};

/* Iterator over runs of rows of one adapter: lora_rows_next returns the next one within [begin,
 * end). */
struct lora_rows {
    int span;           /* next index in trainer.spans */
    int64_t begin, end; /* rows of the batch */
    const struct lora_params *lp;
};

static bool lora_rows_next(const struct low_job *j, struct lora_rows *r, int64_t begin,
                           int64_t end) {
    const struct trainer *t = j->t;
    while (r->span < t->n_spans && t->seqs[r->span].end <= begin) r->span++;
    if (r->span >= t->n_spans || t->seqs[r->span].begin >= end) return false;
    int adapter = t->seqs[r->span].adapter;
    r->begin = MAX(t->seqs[r->span].begin, begin);
    for (; r->span < t->n_spans && t->seqs[r->span].begin < end &&
           t->seqs[r->span].adapter == adapter;
         r->span++)
        r->end = MIN(t->seqs[r->span].end, end);
    r->lp = trainer_lora(t, adapter, j->l, j->p);
    return true;
}

/* In units of 1/65536, so that the scaling factor makes the kept values exactly unbiased. */
static uint32_t dropout_threshold(const struct trainer *t) {
    return MIN((uint32_t)(t->dropout * 65536.0f + 0.5f), 65535u);
}

/* The decisions of a row, two per random number, into zeroed bits. */
static void dropout_mask_row(struct rng *r, uint8_t *bits, int64_t width, uint32_t threshold) {
    enum { MANY = 64 };
    uint32_t draws[MANY];
    for (int64_t c = 0; c < width; c += 2 * MANY) {
        int64_t n = MIN((width - c + 1) / 2, MANY);
        rng_fill(r, draws, (size_t)n);
        for (int64_t i = 0; i < n; i++) {
            uint32_t low = (draws[i] & 0xffff) >= threshold, high = (draws[i] >> 16) >= threshold;
            if (c + 2 * i + 1 == width) high = 0;
            bits[(c + 2 * i) / 8] |= (uint8_t)((low | high << 1) << 2 * i % 8);
        }
    }
}

/* One random stream per sample, layer and projection. Items are samples. */
static void dropout_mask_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct low_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t width = proj_in(&t->c, (enum proj)j->p), stride = (width + 7) / 8;
    uint32_t threshold = dropout_threshold(t);
    for (int64_t s = begin; s < end; s++) {
        const struct packed_seq *sp = &t->seqs[s];
        uint32_t id = (uint32_t)(sp->ordinal * t->c.n_layers * N_PROJ + j->l * N_PROJ + j->p);
        struct rng r = rng_make(t->seed, RNG_DROPOUT, id, (uint32_t)t->groups[sp->adapter].updates);
        uint8_t *bits = t->acts[j->l].keep[j->p] + sp->begin * stride;
        memset(bits, 0, (size_t)((sp->end - sp->begin) * stride));
        for (int64_t i = sp->begin; i < sp->end; i++, bits += stride)
            dropout_mask_row(&r, bits, width, threshold);
    }
}

void lora_dropout_mask(struct trainer *t, int l, int p) {
    struct low_job j = {.t = t, .l = l, .p = p};
    if (t->dropout_active && t->acts[l].h[p])
        pool_run(t->pool, dropout_mask_items, &j, t->n_spans, 1);
}

/* y (+)= x where kept, scaled up; else (+)= 0. Four columns at a time: four decision bits select a
 * row of factors. */
static void dropout_row(float *restrict y, const float *restrict x, const uint8_t *bits,
                        const float (*factors)[4], int64_t width, bool add) {
    int64_t c = 0;
    for (; c + 4 <= width; c += 4) {
        const float *f = factors[bits[c / 8] >> (c % 8) & 15];
        if (add)
            for (int i = 0; i < 4; i++) y[c + i] += x[c + i] * f[i];
        else
            for (int i = 0; i < 4; i++) y[c + i] = x[c + i] * f[i];
    }
    for (; c < width; c++) {
        float v = x[c] * factors[bits[c / 8] >> (c % 8) & 1][0];
        y[c] = add ? y[c] + v : v;
    }
}

/* Rows [begin, end) of the range; y and x point to the range's first row. */
static void dropout_rows(const struct low_job *j, float *y, const float *x, int64_t begin,
                         int64_t end, bool add) {
    const struct trainer *t = j->t;
    int64_t width = proj_in(&t->c, (enum proj)j->p), stride = (width + 7) / 8;
    const uint8_t *keep = t->acts[j->l].keep[j->p] + j->s.r0 * stride;
    float factor = 65536.0f / (float)(65536 - dropout_threshold(t)), factors[16][4];
    for (int bits = 0; bits < 16; bits++)
        for (int i = 0; i < 4; i++) factors[bits][i] = bits >> i & 1 ? factor : 0.0f;
    for (int64_t i = begin; i < end; i++)
        dropout_row(y + i * width, x + i * width, keep + i * stride, factors, width, add);
}

/* y (+)= x ⊙ by */
static void times(float *restrict y, const float *restrict x, const float *restrict by, int64_t n,
                  bool add) {
    for (int64_t i = 0; i < n; i++) y[i] = add ? y[i] + x[i] * by[i] : x[i] * by[i];
}

static void forward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct low_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t in = proj_in(&t->c, (enum proj)j->p), out = proj_out(&t->c, (enum proj)j->p),
            ld = t->max_r, r0 = j->s.r0;
    struct activations *a = &t->acts[j->l];
    const float *x = j->x;
    if (t->dropout_active) {
        dropout_rows(j, t->drop, x, begin, end, false);
        x = t->drop;
    }
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, r0 + begin, r0 + end)) {
        int64_t at = r.begin - r0, rows = r.end - r.begin;
        float *h = a->h[j->p] + r.begin * ld, *y = j->y ? j->y + at * out : NULL, *to = y;
        if (j->dora_out && r.lp->m) to = j->dora_out + at * out;
        if (j->dora_out && !r.lp->m) t->k->axpy(y, 1.0f, j->dora_out + at * out, rows * out);
        if (!r.lp->r) continue;
        t->k->gemm_f32(h, ld, x + at * in, in, rows, r.lp->a, in, in, 0, r.lp->r, false);
        for (int64_t i = 0; i < rows; i++) t->k->scale(h + i * ld, r.lp->scale, r.lp->r);
        if (!y) continue;
        t->k->mix_f32(to, out, h, ld, 1, rows, r.lp->bt, out, r.lp->r, out);
        if (!r.lp->m) continue;
        float *z = a->z[j->p] + r.begin * out;
        memcpy(z, to, (size_t)(rows * out) * sizeof *z);
        for (int64_t i = 0; i < rows; i++)
            times(y + i * out, z + i * out, r.lp->mult, out, j->dora_out != NULL);
    }
}

void lora_forward(struct trainer *t, int l, int p, struct row_range s, float *y, float *aside,
                  const float *x) {
    struct low_job j = {.t = t, .l = l, .p = p, .s = s, .y = y, .dora_out = aside, .x = x};
    if (!t->full && t->acts[l].h[p]) pool_run(t->pool, forward_items, &j, s.rows, 8);
}

/* dm[o] += Σ over rows of dy z / norm. Items are outputs. */
static void magnitude_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct low_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t out = proj_out(&t->c, (enum proj)j->p);
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, j->s.r0, j->s.r0 + j->s.rows)) {
        if (!r.lp->m) continue;
        for (int64_t i = r.begin; i < r.end; i++) {
            const float *dy = j->dy + (i - j->s.r0) * out, *z = t->acts[j->l].z[j->p] + i * out;
            for (int64_t o = begin; o < end; o++) r.lp->gm[o] += dy[o] * (z[o] / r.lp->norm[o]);
        }
    }
}

/* dz = mult ⊙ dy, in t->aside. */
static void dora_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct low_job *j = ctx;
    int64_t out = proj_out(&j->t->c, (enum proj)j->p);
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, j->s.r0 + begin, j->s.r0 + end))
        for (int64_t i = r.begin - j->s.r0; i < r.end - j->s.r0; i++)
            if (r.lp->m)
                times(j->y + i * out, j->dy + i * out, r.lp->mult, out, false);
            else
                memcpy(j->y + i * out, j->dy + i * out, (size_t)out * sizeof(float));
}

const float *dora_backward(struct trainer *t, int l, int p, struct row_range s, const float *dy) {
    if (t->full || !t->acts[l].z[p]) return dy;
    struct low_job j = {.t = t, .l = l, .p = p, .s = s, .y = t->dora_out, .dy = dy};
    pool_run(t->pool, magnitude_items, &j, proj_out(&t->c, (enum proj)p), 16);
    pool_run(t->pool, dora_backward_items, &j, s.rows, 8);
    return t->dora_out;
}

/* dh, the inputs after dropout (which dA needs), and dx. Items are rows. */
static void backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct low_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t in = proj_in(&t->c, (enum proj)j->p), out = proj_out(&t->c, (enum proj)j->p),
            ld = t->max_r, r0 = j->s.r0;
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, r0 + begin, r0 + end)) {
        int64_t at = r.begin - r0, rows = r.end - r.begin, rank = r.lp->r;
        float *dh = t->dh + at * ld;
        if (!rank) continue;
        for (int64_t i = 0; i < rows; i++) memset(dh + i * ld, 0, (size_t)rank * sizeof *dh);
        t->k->mix_f32(dh, ld, j->dy + at * out, out, 1, rows, r.lp->b, rank, out, rank);
        for (int64_t i = 0; i < rows; i++) t->k->scale(dh + i * ld, r.lp->scale, rank);
        if (!j->y) continue;
        float *dx = (t->dropout_active ? t->drop : j->y) + at * in;
        if (t->dropout_active) memset(dx, 0, (size_t)(rows * in) * sizeof *dx);
        t->k->mix_f32(dx, in, dh, ld, 1, rows, r.lp->a, in, rank, in);
        if (t->dropout_active) dropout_rows(j, j->y, t->drop, at, at + rows, true);
    }
    if (t->dropout_active) dropout_rows(j, t->drop, j->x, begin, end, false);
}

/* dA[:, i] += Σ dhᵀ x and dB[o] += Σ dzᵀ h: items are columns of A, then rows of B. */
static void lora_grad_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct low_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t in = proj_in(&t->c, (enum proj)j->p), out = proj_out(&t->c, (enum proj)j->p),
            ld = t->max_r, i0 = MIN(begin, in), i1 = MIN(end, in), o0 = MAX(begin - in, 0),
            o1 = MAX(end - in, 0);
    const float *x = t->dropout_active ? t->drop : j->x;
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, j->s.r0, j->s.r0 + j->s.rows)) {
        int64_t at = r.begin - j->s.r0, rows = r.end - r.begin, rank = r.lp->r;
        if (!rank) continue;
        if (i0 < i1)
            t->k->mix_f32(r.lp->ga + i0, in, t->dh + at * ld, 1, ld, rank, x + at * in + i0, in,
                          rows, i1 - i0);
        if (o0 < o1)
            t->k->mix_f32(r.lp->gb + o0 * rank, rank, j->dy + at * out + o0, 1, out, o1 - o0,
                          t->acts[j->l].h[j->p] + r.begin * ld, ld, rows, rank);
    }
}

void lora_backward(struct trainer *t, int l, int p, struct row_range s, float *dx, const float *dy,
                   const float *x) {
    struct low_job j = {.t = t, .l = l, .p = p, .s = s, .y = dx, .dy = dy, .x = x};
    if (t->full || !t->acts[l].h[p]) return;
    pool_run(t->pool, backward_items, &j, s.rows, 8);
    pool_run(t->pool, lora_grad_items, &j,
             proj_in(&t->c, (enum proj)p) + proj_out(&t->c, (enum proj)p), 16);
}

struct dora_job {
    const struct matrix *w;
    const struct lora_params *lp;
};

static void dora_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct dora_job *j = ctx;
    const struct lora_params *lp = j->lp;
    struct lora lo = {.a = lp->a, .b = lp->b, .r = lp->r, .scale = lp->scale};
    float *row = xmalloc((size_t)j->w->k * sizeof *row);
    for (int64_t o = begin; o < end; o++) {
        matrix_get_row(j->w, o, row);
        double norm = lora_row_norm(&lo, o, row, j->w->k);
        lp->norm[o] = (float)norm;
        lp->mult[o] = (float)((double)lp->m[o] / norm);
    }
    free(row);
}

void lora_prepare(struct trainer *t) {
    if (t->full || !t->derived_stale) return;
    for (int i = 0; i < t->n_adapters; i++)
        for (int l = 0; l < t->c.n_layers; l++)
            for (int p = 0; p < N_PROJ; p++) {
                const struct lora_params *lp = trainer_lora(t, i, l, p);
                int64_t out = proj_out(&t->c, (enum proj)p);
                if (!lp->r) continue;
                transpose(lp->bt, out, lp->b, lp->r, out, lp->r, NULL);
                struct dora_job j = {&t->model->layers[l].proj[p], lp};
                if (lp->m) pool_run(t->pool, dora_items, &j, out, 16);
            }
    t->derived_stale = false;
}
