/*
 * lora: the adapters' parts of a projection, forward and backward, each adapter on its own rows.
 *
 *   h = scale · A drop(x)    z = W x + B h       y = z; with DoRA y = (m / ‖W + scale B A‖) ⊙ z
 *   dh = scale · Bᵀ dz       dA += dhᵀ drop(x)   dB += dzᵀ h   dx += drop(Aᵀ dh)
 *
 * drop is dropout. LoRA: Hu et al. 2022. DoRA: Liu et al. 2024; as in PEFT, the gradient treats the
 * norm as a constant. Dropout applies only before A, also with DoRA. The rows of a range are
 * processed in runs: rows of adjacent samples of one adapter, or, with activated LoRA, rows that no
 * adapter changes. All runs are one parallel region, so that threads are woken once for any number
 * of adapters. If the base product runs in tiles, B h (forward) and Aᵀ dh (backward) can continue
 * its chains of sums (part_in_chain).
 *
 * Invariant: see internal.h. A sum over rows is one chain in the order of the rows; threads divide
 * rows or columns of the results, never a sum. In tiles, a step of the chain is a group of 32 rows
 * of one sample, counted from the first row that the adapter changes.
 */
#include "backprop/internal.h"

#include <stdlib.h>
#include <string.h>

struct lora_job {
    struct trainer *t;
    int l, p;
    struct row_range range;
    float *y, *dora_out;
    const float *x, *dy;
    /* inputs of the first low-rank product: forward x, or NULL if x has no tiles; backward dY */
    const struct gemm_input *in;
    const struct gemm_input *x_tiles; /* lora_grad_tiles_items */
    bool backward;
    bool by_sample;  /* the runs of lora_rows_next end with their sample */
    bool chain;      /* the base product runs in tiles */
    uint16_t *tiles; /* h or dh of the parts that continue the chains of the base product */
};

/* Whether an adapter's part continues the chain of sums of the base product. The forward pass uses
 * the same rule as serving, so that the trained model is the served model. */
static bool part_in_chain(const struct lora_job *j, const struct lora_params *lp) {
    if (!j->chain || lp->r > LOW_RANK_MAX) return false;
    return j->backward ? !j->t->dropout_active : !lp->m;
}

enum { TILE_ROWS = 64 }; /* rows of a low-rank product whose inputs are packed at once */

size_t lora_tile_scratch(const struct trainer *t) {
    return gemm_input_scratch(TILE_ROWS, t->max_r);
}

/* y = j->in wᵀ for rows [at, at + rows) of the inputs, w [n][K] in f32; y has rows of max_r. */
static void lora_down_tiles(const struct lora_job *j, float *y, int64_t at, int64_t rows,
                            const float *w, int64_t n) {
    const struct matrix m = matrix_view(DTYPE_F32, false, w, n, j->in->k);
    const struct gemm_input in = gemm_input_tile_rows(j->in, at, at + rows);
    j->t->k->gemm_tiles(y - in.skip * j->t->max_r, j->t->max_r, &in, &m, 0, n, false);
}

/* y[rows][width] (+)= h w, w [n][width] in f32, in tiles; rows of h are max_r apart. */
static void lora_up_tiles(const struct lora_job *j, float *y, int64_t width, const float *h,
                          int64_t rows, const float *w, int64_t n, bool add, int thread) {
    const struct trainer *t = j->t;
    const struct matrix m = matrix_view(DTYPE_F32, false, w, n, width);
    for (int64_t i = 0; i < rows; i += TILE_ROWS) {
        struct gemm_input in;
        gemm_input_prepare(&in, h + i * t->max_r, t->max_r, MIN(rows - i, TILE_ROWS), n, false,
                           true, t->lora_scratch + (size_t)thread * lora_tile_scratch(t), NULL);
        t->k->gemm_tiles_backward(y + i * width, width, &in, &m, 0, 0, width, add);
    }
}

enum { NO_ADAPTER = -1 };

/* Iterator over runs of rows of one adapter; zero-initialise it. lora_rows_next sets the next run
 * within [begin, end), or returns false. The runs cover the range. */
struct lora_rows {
    int seq;            /* next index in trainer.seqs */
    int64_t begin, end; /* rows of the batch */
    int adapter;        /* or NO_ADAPTER: rows before their sample's activation */
    /* the adapter's LoRA of the projection; of NO_ADAPTER a LoRA of rank 0 */
    const struct lora_params *lp;
};

static int adapter_at(const struct packed_seq *s, int64_t row) {
    return row < s->active ? NO_ADAPTER : s->adapter;
}

static bool lora_rows_next(const struct lora_job *j, struct lora_rows *r, int64_t begin,
                           int64_t end) {
    static const struct lora_params none;
    const struct trainer *t = j->t;
    int64_t at = MAX(r->end, begin);
    while (r->seq < t->n_seqs && t->seqs[r->seq].end <= at) r->seq++;
    if (r->seq >= t->n_seqs || at >= end) return false;
    r->begin = at;
    r->adapter = adapter_at(&t->seqs[r->seq], at);
    while (r->seq < t->n_seqs && at < end && adapter_at(&t->seqs[r->seq], at) == r->adapter) {
        const struct packed_seq *s = &t->seqs[r->seq];
        at = MIN(at < s->active ? s->active : s->end, end);
        r->seq += at == s->end;
        if (j->by_sample) break;
    }
    r->end = at;
    r->lp = r->adapter == NO_ADAPTER ? &none : trainer_lora(t, r->adapter, j->l, j->p);
    return true;
}

/* The probability of dropout, rounded to 1/65536, in this unit. dropout_factor is computed from the
 * rounded probability, so that dropout does not change the expected value. */
static uint32_t dropout_threshold(const struct trainer *t) {
    return MIN((uint32_t)(t->dropout * 65536.0f + 0.5f), 65535u);
}

/* Sets the mask bits of one row, 1 where a value is kept. One random number gives two bits. */
static void dropout_mask_row(const struct trainer *t, struct rng *r, uint8_t *bits, int64_t width) {
    enum { MANY = 256 };
    uint32_t random[MANY];
    for (int64_t c = 0; c < width; c += 2 * MANY) {
        int64_t n = MIN(width - c, 2 * MANY);
        rng_fill(r, random, (size_t)((n + 1) / 2));
        t->k->mask_random(bits + c / 8, random, n, dropout_threshold(t));
    }
}

/* The masks of all projections. One random stream per sample, layer and projection. Items are rows
 * of the batch. */
static void dropout_mask_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct lora_job *j = ctx;
    const struct trainer *t = j->t;
    for (int64_t s = 0; s < t->n_seqs; s++) {
        const struct packed_seq *sp = &t->seqs[s];
        const int64_t first = MAX(begin, sp->begin), last = MIN(end, sp->end);
        for (int p = 0; p < N_PROJ && first < last; p++) {
            if (!t->acts[j->l].h[p]) continue;
            int64_t width = proj_in(&t->c, (enum proj)p), stride = (width + 7) / 8;
            uint32_t id = (uint32_t)(sp->ordinal * t->c.n_layers * N_PROJ + j->l * N_PROJ + p);
            struct rng r =
                rng_make(t->seed, RNG_DROPOUT, id, (uint32_t)t->groups[sp->adapter].updates);
            rng_skip(&r, (uint64_t)((first - sp->begin) * ((width + 1) / 2)));
            uint8_t *bits = t->acts[j->l].dropout_mask[p] + first * stride;
            for (int64_t i = first; i < last; i++, bits += stride)
                dropout_mask_row(t, &r, bits, width);
        }
    }
}

void lora_dropout_masks(struct trainer *t, int l) {
    struct lora_job j = {.t = t, .l = l};
    if (t->dropout_active) pool_run(t->pool, dropout_mask_items, &j, t->rows, 32);
}

static float dropout_factor(const struct trainer *t) {
    return 65536.0f / (float)(65536 - dropout_threshold(t));
}

/* y (+)= drop(x) for rows [begin, end) of the range; y and x begin at the range's first row. */
static void dropout_rows(const struct lora_job *j, float *y, const float *x, int64_t begin,
                         int64_t end, bool add) {
    const struct trainer *t = j->t;
    int64_t width = proj_in(&t->c, (enum proj)j->p), stride = (width + 7) / 8;
    const uint8_t *dropout_mask = t->acts[j->l].dropout_mask[j->p] + j->range.r0 * stride;
    for (int64_t i = begin; i < end; i++)
        t->k->mask_multiply(y + i * width, x + i * width, dropout_mask + i * stride,
                            dropout_factor(t), width, add);
}

/* Applies dropout to inputs in tiles, without dropout_factor, which is applied to h instead. Items
 * are rows. */
static void dropout_tiles_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct lora_job *j = ctx;
    const struct trainer *t = j->t;
    const int64_t stride = (j->in->k + 7) / 8;
    const uint8_t *dropout_mask = t->acts[j->l].dropout_mask[j->p] + j->range.r0 * stride;
    for (int64_t i = begin; i < end; i++) {
        const uint16_t *row = gemm_input_tile_row(j->in, i);
        t->k->tiles_mask_row(t->drop_tiles + (row - j->in->tiles), row, dropout_mask + i * stride,
                             j->in->k);
    }
}

/* y (+)= x ⊙ factor, the element-wise product */
static void mul_rows(float *restrict y, const float *restrict x, const float *restrict factor,
                     int64_t n, bool add) {
    for (int64_t i = 0; i < n; i++) y[i] = add ? y[i] + x[i] * factor[i] : x[i] * factor[i];
}

/* t->drop = drop(x). Items are rows. */
static void dropout_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct lora_job *j = ctx;
    dropout_rows(j, j->t->drop, j->x, begin, end, false);
}

/* Computes h. Items are rows. */
static void lora_down_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct lora_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t in = proj_in(&t->c, (enum proj)j->p), ld = t->max_r, r0 = j->range.r0;
    const float factor = j->in && t->dropout_active ? dropout_factor(t) : 1.0f;
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, r0 + begin, r0 + end)) {
        int64_t at = r.begin - r0, rows = r.end - r.begin;
        float *h = t->acts[j->l].h[j->p] + r.begin * ld;
        if (!r.lp->r) continue;
        if (j->in)
            lora_down_tiles(j, h, at, rows, r.lp->a, r.lp->r);
        else
            t->k->gemm_f32(h, ld, j->x + at * in, in, rows, r.lp->a, in, in, 0, r.lp->r, false);
        for (int64_t i = 0; i < rows; i++) t->k->scale(h + i * ld, r.lp->scale * factor, r.lp->r);
        if (part_in_chain(j, r.lp)) gemm_low_rank_pack(j->tiles, at, h, ld, rows, r.lp->r);
    }
}

/* Adds B h and applies DoRA, as lora_up. Items are rows. */
static void lora_up_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct lora_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t out = proj_out(&t->c, (enum proj)j->p), ld = t->max_r, r0 = j->range.r0;
    const struct activations *a = &t->acts[j->l];
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, r0 + begin, r0 + end)) {
        int64_t at = r.begin - r0, rows = r.end - r.begin;
        float *h = a->h[j->p] + r.begin * ld, *y = j->y + at * out, *to = y;
        if (j->dora_out && r.lp->m) to = j->dora_out + at * out;
        if (j->dora_out && !r.lp->m) t->k->axpy(y, 1.0f, j->dora_out + at * out, rows * out);
        if (!r.lp->r || part_in_chain(j, r.lp)) continue;
        if (j->in)
            lora_up_tiles(j, to, out, h, rows, r.lp->bt, r.lp->r, true, thread);
        else
            t->k->gemm_nn_f32(to, out, h, ld, 1, rows, r.lp->bt, out, r.lp->r, out);
        if (!r.lp->m) continue;
        float *z = a->z[j->p] + r.begin * out;
        memcpy(z, to, (size_t)(rows * out) * sizeof *z);
        for (int64_t i = 0; i < rows; i++)
            mul_rows(y + i * out, z + i * out, r.lp->mult, out, j->dora_out != NULL);
    }
}

/* The grain of pool_run: more rows in tiles, because every work item packs the weights again. */
static int64_t rows_per_item(const struct trainer *t) {
    return t->lora_tiles ? 32 : 8;
}

/* Returns the parts that continue the chains of sums of one product (n = 1), or of gate and up (n =
 * 2); NULL if there are no such parts. The matrices are B in the forward pass, A in the backward
 * pass. */
static const struct gemm_low_rank *chained_low_rank(const struct lora_job *first, int n) {
    struct trainer *t = first->t;
    struct lora_rows r = {0};
    t->low_rank = (struct gemm_low_rank){.t = {t->low_rank_tiles[0], t->low_rank_tiles[1]},
                                         .rows = t->low_rank_rows};
    while (lora_rows_next(first, &r, first->range.r0, first->range.r0 + first->range.rows)) {
        const int at = t->low_rank.n;
        if (r.adapter == NO_ADAPTER) continue;
        struct low_rank_rows *rows = &t->low_rank_rows[at];
        *rows = (struct low_rank_rows){.begin = r.begin - first->range.r0,
                                       .end = r.end - first->range.r0};
        for (int i = 0; i < n; i++) {
            const struct lora_params *lp = trainer_lora(t, r.adapter, first->l, first->p + i);
            const enum proj p = (enum proj)(first->p + i);
            const float *v = first->backward ? lp->a : lp->bt;
            const int64_t width = first->backward ? proj_in(&t->c, p) : proj_out(&t->c, p);
            struct low_rank_part *part = &t->low_rank_parts[i][at];
            if (!lp->r || !part_in_chain(first, lp)) continue;
            *part = (struct low_rank_part){.v = matrix_view(DTYPE_F32, false, v, lp->r, width)};
            rows->parts[i] = part;
            rows->n_parts[i] = 1;
        }
        if (rows->n_parts[0] + rows->n_parts[1] > 0) t->low_rank.n++;
    }
    return t->low_rank.n > 0 ? &t->low_rank : NULL;
}

static bool product_uses_tiles(const struct trainer *t, int l, int p) {
    return matrix_uses_tiles(&t->model->layers[l].proj[p], t->row_path);
}

static struct lora_job forward_job(struct trainer *t, int l, int p, struct row_range range,
                                   const struct gemm_input *x) {
    return (struct lora_job){.t = t,
                             .l = l,
                             .p = p,
                             .range = range,
                             .x = x->x,
                             .in = x->tiles ? x : NULL, // the same rule as in serving
                             .chain = x->tiles && product_uses_tiles(t, l, p)};
}

bool lora_in_chain(const struct trainer *t, int l, int p) {
    const struct lora_job j = {.t = (struct trainer *)(uintptr_t)t,
                               .chain = t->lora_tiles && product_uses_tiles(t, l, p)};
    for (int i = 0; i < t->n_adapters; i++) {
        const struct lora_params *lp = trainer_lora(t, i, l, p);
        if (lp->r && !part_in_chain(&j, lp)) return false;
    }
    return true;
}

const struct gemm_low_rank *lora_down(struct trainer *t, int l, int p, int n,
                                      struct row_range range, const struct gemm_input *x) {
    const struct lora_job first = forward_job(t, l, p, range, x);
    if (t->full) return NULL;
    for (int i = 0; i < n; i++) {
        struct lora_job j = forward_job(t, l, p + i, range, x);
        struct gemm_input dropped = *x;
        if (!t->acts[l].h[p + i]) continue;
        j.tiles = t->low_rank_tiles[i];
        if (t->dropout_active && j.in) {
            pool_run(t->pool, dropout_tiles_items, &j, range.rows, 16);
            dropped.tiles = t->drop_tiles;
            j.in = &dropped;
        } else if (t->dropout_active) {
            pool_run(t->pool, dropout_items, &j, range.rows, 8);
            j.x = t->drop;
        }
        pool_run(t->pool, lora_down_items, &j, range.rows, rows_per_item(t));
    }
    return first.chain ? chained_low_rank(&first, n) : NULL;
}

void lora_up(struct trainer *t, int l, int p, struct row_range range, float *y, float *base_out,
             const struct gemm_input *x) {
    struct lora_job j = forward_job(t, l, p, range, x);
    j.y = y, j.dora_out = base_out;
    if (t->full || !t->acts[l].h[p] || (!base_out && lora_in_chain(t, l, p))) return;
    pool_run(t->pool, lora_up_items, &j, range.rows, rows_per_item(t));
}

/* gm[o] += Σ over rows of dy[o] z[o] / norm[o]. Items are outputs. */
static void magnitude_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct lora_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t out = proj_out(&t->c, (enum proj)j->p);
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, j->range.r0, j->range.r0 + j->range.rows)) {
        if (!r.lp->m) continue;
        for (int64_t i = r.begin; i < r.end; i++) {
            const float *dy = j->dy + (i - j->range.r0) * out, *z = t->acts[j->l].z[j->p] + i * out;
            for (int64_t o = begin; o < end; o++) r.lp->gm[o] += dy[o] * (z[o] / r.lp->norm[o]);
        }
    }
}

/* Sets dz = mult ⊙ dy in t->dora_out; without DoRA dz = dy. Items are rows. */
static void dora_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct lora_job *j = ctx;
    int64_t out = proj_out(&j->t->c, (enum proj)j->p);
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, j->range.r0 + begin, j->range.r0 + end))
        for (int64_t i = r.begin - j->range.r0; i < r.end - j->range.r0; i++)
            if (r.lp->m)
                mul_rows(j->y + i * out, j->dy + i * out, r.lp->mult, out, false);
            else
                memcpy(j->y + i * out, j->dy + i * out, (size_t)out * sizeof(float));
}

const float *dora_backward(struct trainer *t, int l, int p, struct row_range range,
                           const float *dy) {
    if (t->full || !t->acts[l].z[p]) return dy;
    struct lora_job j = {.t = t, .l = l, .p = p, .range = range, .y = t->dora_out, .dy = dy};
    pool_run(t->pool, magnitude_items, &j, proj_out(&t->c, (enum proj)p), 16);
    pool_run(t->pool, dora_backward_items, &j, range.rows, 8);
    return t->dora_out;
}

/* Computes dh. Items are rows. */
static void lora_backward_down_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct lora_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t out = proj_out(&t->c, (enum proj)j->p), ld = t->max_r, r0 = j->range.r0;
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, r0 + begin, r0 + end)) {
        int64_t at = r.begin - r0, rows = r.end - r.begin, rank = r.lp->r;
        float *dh = t->dh + at * ld;
        if (!rank) continue;
        for (int64_t i = 0; !t->lora_tiles && i < rows; i++)
            memset(dh + i * ld, 0, (size_t)rank * sizeof *dh);
        if (t->lora_tiles)
            lora_down_tiles(j, dh, at, rows, r.lp->bt, rank);
        else
            t->k->gemm_nn_f32(dh, ld, j->dy + at * out, out, 1, rows, r.lp->b, rank, out, rank);
        for (int64_t i = 0; i < rows; i++) t->k->scale(dh + i * ld, r.lp->scale, rank);
        if (part_in_chain(j, r.lp)) gemm_low_rank_pack(j->tiles, at, dh, ld, rows, rank);
    }
}

/* Adds drop(Aᵀ dh) to dx. Items are rows. */
static void lora_backward_up_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct lora_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t in = proj_in(&t->c, (enum proj)j->p), ld = t->max_r, r0 = j->range.r0;
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, r0 + begin, r0 + end)) {
        int64_t at = r.begin - r0, rows = r.end - r.begin, rank = r.lp->r;
        const float *dh = t->dh + at * ld;
        float *dx = (t->dropout_active ? t->drop : j->y) + at * in;
        if (!rank || part_in_chain(j, r.lp)) continue;
        if (t->lora_tiles) {
            lora_up_tiles(j, dx, in, dh, rows, r.lp->a, rank, !t->dropout_active, thread);
        } else {
            if (t->dropout_active) memset(dx, 0, (size_t)(rows * in) * sizeof *dx);
            t->k->gemm_nn_f32(dx, in, dh, ld, 1, rows, r.lp->a, in, rank, in);
        }
        if (t->dropout_active) dropout_rows(j, j->y, t->drop, at, at + rows, true);
    }
}

/* ga += dhᵀ drop(x) and gb += dzᵀ h. Items are the columns of A, then the rows of B. */
static void lora_grad_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct lora_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t in = proj_in(&t->c, (enum proj)j->p), out = proj_out(&t->c, (enum proj)j->p),
            ld = t->max_r, i0 = MIN(begin, in), i1 = MIN(end, in), o0 = MAX(begin - in, 0),
            o1 = MAX(end - in, 0);
    const float *x = t->dropout_active ? t->drop : j->x;
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, j->range.r0, j->range.r0 + j->range.rows)) {
        int64_t at = r.begin - j->range.r0, rows = r.end - r.begin, rank = r.lp->r;
        if (!rank) continue;
        if (i0 < i1)
            t->k->gemm_nn_f32(r.lp->ga + i0, in, t->dh + at * ld, 1, ld, rank, x + at * in + i0, in,
                              rows, i1 - i0);
        if (o0 < o1)
            t->k->gemm_nn_f32(r.lp->gb + o0 * rank, rank, j->dy + at * out + o0, 1, out, o1 - o0,
                              t->acts[j->l].h[j->p] + r.begin * ld, ld, rows, rank);
    }
}

/* The same in tiles: j->in is dz, j->x_tiles x after dropout, but without dropout_factor. Items are
 * 32 columns of A, then 32 rows of B. */
static void lora_grad_tiles_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct lora_job *j = ctx;
    const struct trainer *t = j->t;
    const int64_t in = proj_in(&t->c, (enum proj)j->p), out = proj_out(&t->c, (enum proj)j->p),
                  a_items = (in + 31) / 32, i0 = 32 * begin, i1 = MIN(32 * end, in),
                  o0 = 32 * MAX(begin - a_items, 0), o1 = MIN(32 * (end - a_items), out);
    struct lora_rows r = {0};
    while (lora_rows_next(j, &r, j->range.r0, j->range.r0 + j->range.rows)) {
        struct low_rank_grad_job g = {.ranks = r.lp->r,
                                      .ldt = t->max_r,
                                      .row = r.begin - j->range.r0,
                                      .rows = r.end - r.begin};
        if (!g.ranks) continue;
        if (i0 < i1) {
            g.g = r.lp->ga, g.ld = in;
            g.t = t->dh + g.row * t->max_r;
            g.factor = t->dropout_active ? dropout_factor(t) : 1.0f;
            g.x = j->x_tiles;
            t->k->gemm_tiles_low_rank_grad(&g, i0, i1);
        }
        if (o0 < o1) {
            g.g = r.lp->gb, g.ld = g.ranks, g.transposed = true;
            g.t = t->acts[j->l].h[j->p] + r.begin * t->max_r;
            g.factor = 1.0f;
            g.x = j->in;
            t->k->gemm_tiles_low_rank_grad(&g, o0, o1);
        }
    }
}

bool lora_grads_in_tiles(const struct trainer *t) {
    return t->lora_tiles && t->grad_path == GRAD_TILES;
}

static struct lora_job backward_job(struct trainer *t, int l, int p, struct row_range range,
                                    const struct gemm_input *dy, bool chain) {
    return (struct lora_job){.t = t,
                             .l = l,
                             .p = p,
                             .range = range,
                             .dy = dy->x,
                             .in = dy,
                             .backward = true,
                             .chain = chain,
                             .tiles = t->low_rank_tiles[0]};
}

const struct gemm_low_rank *lora_backward_down(struct trainer *t, int l, int p,
                                               struct row_range range, const struct gemm_input *dy,
                                               bool chain) {
    struct lora_job j = backward_job(t, l, p, range, dy, chain);
    if (t->full || !t->acts[l].h[p]) return NULL;
    pool_run(t->pool, lora_backward_down_items, &j, range.rows, rows_per_item(t));
    return chain ? chained_low_rank(&j, 1) : NULL;
}

void lora_backward_up(struct trainer *t, int l, int p, struct row_range range, float *dx,
                      const struct gemm_input *dy, bool chain) {
    struct lora_job j = backward_job(t, l, p, range, dy, chain);
    j.y = dx;
    if (t->full || !t->acts[l].h[p]) return;
    pool_run(t->pool, lora_backward_up_items, &j, range.rows, rows_per_item(t));
}

/* ga and gb in tiles; packs x if it has no tiles. */
static void lora_grad_tiles(struct lora_job *j, const struct gemm_input *x) {
    struct trainer *t = j->t;
    const int64_t in = proj_in(&t->c, (enum proj)j->p), out = proj_out(&t->c, (enum proj)j->p);
    struct lora_job dropout = *j;
    struct gemm_input tiles = *x;
    if (!x->tiles)
        gemm_input_prepare(&tiles, x->x, x->ldx, x->rows, in, false, true, t->input_scratch,
                           t->pool);
    if (t->dropout_active) {
        dropout.in = &tiles;
        pool_run(t->pool, dropout_tiles_items, &dropout, x->rows, 16);
        tiles.tiles = t->drop_tiles;
    }
    j->x_tiles = &tiles;
    j->by_sample = true;
    pool_run(t->pool, lora_grad_tiles_items, j, (in + 31) / 32 + (out + 31) / 32, 1);
}

void lora_backward_weights(struct trainer *t, int l, int p, struct row_range range,
                           const struct gemm_input *dy, const struct gemm_input *x) {
    struct lora_job j = backward_job(t, l, p, range, dy, false);
    j.x = x->x;
    if (t->full || !t->acts[l].h[p]) return;
    if (lora_grads_in_tiles(t)) {
        lora_grad_tiles(&j, x);
        return;
    }
    if (t->dropout_active) pool_run(t->pool, dropout_items, &j, range.rows, 8);
    pool_run(t->pool, lora_grad_items, &j,
             proj_in(&t->c, (enum proj)p) + proj_out(&t->c, (enum proj)p), 16);
}

struct dora_job {
    const struct matrix *w;
    const struct lora_params *lp;
};

/* Computes norm and mult. Items are outputs. */
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
