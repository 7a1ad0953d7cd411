/*
 * attention: causal attention of the packed samples, forward and backward.
 *
 * A work item is one sample and one kv head (in the f32 forward pass: one query head), so no two
 * threads write to the same memory, and the gradients of a shared kv head are summed over its query
 * heads in order. Blocks of BLOCK query rows are multiplied with all keys to which one of these
 * rows attends. The backward pass computes probabilities again instead of storing them, because
 * they would be the only activation that grows with the square of the length (as in Dao et al.
 * 2022).
 *
 * In the fast class with tiles, kernels.attention and kernels.attention_backward compute an item in
 * bf16.
 *
 * kv_round rounds keys and values as the engine's KV cache does. The backward pass uses the rounded
 * values, and takes the derivative of the rounding as 1 (straight-through estimator, Bengio et al.
 * 2013): dk and dv are those of the values before rounding.
 *
 * Invariant: a sample's results do not depend on rows of other samples. The results of the forward
 * pass have the engine's bits. The f32 backward pass computes its scores from keys that are
 * transposed once: they differ from the forward pass by rounding, and are computed twice as fast.
 */
#include "backprop/internal.h"

#include <math.h>
#include <string.h>

#define BLOCK 64

/* Rounds one row of one kv head to f16 or bf16, in place. */
static void row_round(enum dtype type, float *x, int64_t n) {
    enum { STEP = 64 };
    uint16_t half[STEP];
    for (int64_t i = 0; i < n; i += STEP) {
        int64_t m = MIN(n - i, STEP);
        dtype_from_f32(type, x + i, half, m);
        for (int64_t j = 0; j < m; j++)
            x[i + j] = type == DTYPE_F16 ? f16_to_f32(half[j]) : bf16_to_f32(half[j]);
    }
}

/* Quantises row `row` of kv head `head` and replaces it by the product of integers and scale, which
 * is exact in f32. */
static void row_quantize(const struct trainer *t, float *x, const struct i8_rows *to, int64_t row,
                         int64_t head) {
    int64_t e = t->c.head_dim, at = (row * t->c.n_kv_heads + head) * e;
    uint16_t *scale = to->scale + head * t->cap_rows + row;
    *scale = kv_row_quantize(x + at, to->q + at, e);
    for (int64_t i = 0; i < e; i++) x[at + i] = (float)to->q[at + i] * f16_to_f32(*scale);
}

struct attend_job {
    struct trainer *t;
    const struct activations *a;
    int l;
};

static void kv_round_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct attend_job *job = ctx;
    const struct trainer *t = job->t;
    const struct activations *a = job->a;
    int64_t heads = t->c.n_kv_heads, width = heads * t->c.head_dim;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        if (t->kv_elem != DTYPE_I8) {
            row_round(t->kv_elem, a->k + i * width, width);
            row_round(t->kv_elem, a->v + i * width, width);
            continue;
        }
        for (int64_t h = 0; h < heads; h++) {
            row_quantize(t, a->k, &a->k_i8, i, h);
            row_quantize(t, a->v, &a->v_i8, i, h);
        }
    }
}

void kv_round(struct trainer *t, int l) {
    struct attend_job job = {.t = t, .a = &t->acts[l], .l = l};
    if (t->kv_elem != DTYPE_F32) pool_run(t->pool, kv_round_rows, &job, t->rows, 16);
}

/* One query head of one sample, of n rows: the offsets of its first row in the arrays of the shapes
 * of q and k, and the row strides of these arrays. */
struct head {
    int64_t offset_q, offset_k, ldq, ldk, n;
    int64_t window; /* number of keys that a row attends to, including its own */
    float scale;
};

static int64_t length_padded(int64_t n) {
    return (n + 15) / 16 * 16;
}

/* One thread's scratch for a sample of n rows. */
struct scratch {
    int64_t ld;
    float *p, *dp;  /* [BLOCK][ld] probabilities of a block, and their gradients */
    float *kt, *vt; /* [E][ld] transposed keys and values of a kv head */
};

bool attention_uses_tiles(const struct trainer *t) {
    return t->k->attention && t->model->cls == NUMERIC_FAST && t->c.head_dim <= ATTENTION_MAX_DIM;
}

/* Fast class: one thread's key ranges of a sample's rows, and the scratch of the kernel. */
struct tile_scratch {
    int32_t *first, *end; /* [length padded] */
    void *kernel;
};

static struct tile_scratch tile_scratch_view(float *base, int64_t n) {
    int32_t *ranges = (int32_t *)base;
    return (struct tile_scratch){ranges, ranges + length_padded(n), ranges + 2 * length_padded(n)};
}

size_t attention_scratch(const struct trainer *t, int64_t longest) {
    size_t e = (size_t)t->c.head_dim, n = (size_t)length_padded(longest);
    if (!attention_uses_tiles(t)) return (2 * BLOCK + 2 * e) * n * sizeof(float);
    return 2 * n * sizeof(int32_t) + MAX(t->k->attention_scratch(t->c.head_dim),
                                         t->k->attention_backward_scratch(t->c.head_dim, longest));
}

static struct scratch scratch_view(const struct trainer *t, int thread, int64_t n) {
    struct scratch s = {.ld = length_padded(n), .p = t->att_scratch[thread]};
    s.dp = s.p + BLOCK * s.ld;
    s.kt = s.dp + BLOCK * s.ld;
    s.vt = s.kt + t->c.head_dim * s.ld;
    return s;
}

static struct head head_of(const struct trainer *t, int l, const struct packed_seq *sp, int64_t h) {
    const struct model_config *c = &t->c;
    int64_t e = c->head_dim, kv = h / (c->n_heads / c->n_kv_heads);
    struct head r = {.ldq = c->n_heads * e, .ldk = c->n_kv_heads * e, .n = sp->end - sp->begin};
    r.offset_q = sp->begin * r.ldq + h * e;
    r.offset_k = sp->begin * r.ldk + kv * e;
    r.window = layer_is_sliding(c, l) ? c->sliding_window : r.n;
    r.scale = 1.0f / sqrtf(c->query_pre_attn_scalar > 0.0f ? c->query_pre_attn_scalar : (float)e);
    return r;
}

/* The first key that row i attends to. */
static int64_t first_key(const struct head *h, int64_t i) {
    return MAX(i + 1 - h->window, 0);
}

/* Replaces the scores p [i1 - i0][ldp] of queries [i0, i1) and keys [j0, i1) by exp(score - max),
 * or by zero for masked keys; j0 is first_key of i0. by[i - i0] is set to the factor that makes row
 * i probabilities. */
static void softmax_block(const struct trainer *t, const struct head *h, float *p, int64_t ldp,
                          float *by, int64_t i0, int64_t i1) {
    int64_t j0 = first_key(h, i0);
    for (int64_t i = i0; i < i1; i++) {
        float *row = p + (i - i0) * ldp;
        int64_t first = first_key(h, i) - j0, end = i + 1 - j0;
        memset(row, 0, (size_t)first * sizeof *row);
        t->k->scale(row + first, h->scale, end - first);
        by[i - i0] = 1.0f / t->k->softmax(row + first, end - first);
        memset(row + end, 0, (size_t)(i1 - i - 1) * sizeof *row);
    }
}

/* y [rows][ldy] = x [rows][ldx] · m [E][ldm], the first n columns. m has transposed keys or values.
 */
static void scores_from_transposed(const struct trainer *t, float *y, int64_t ldy, const float *x,
                                   int64_t ldx, int64_t rows, const float *m, int64_t ldm,
                                   int64_t n) {
    for (int64_t i = 0; i < rows; i++) memset(y + i * ldy, 0, (size_t)n * sizeof *y);
    t->k->gemm_nn_f32(y, ldy, x, ldx, 1, rows, m, ldm, t->c.head_dim, n);
}

/* The keys and values of a query head: row j begins at k + j · ldk. */
struct head_rows {
    enum dtype type; /* f32 or i8 */
    const void *k, *v;
    const uint16_t *k_scale, *v_scale; /* i8: of row 0 */
};

static struct head_rows head_rows_of(const struct trainer *t, const struct activations *a,
                                     const struct head *h, const struct packed_seq *sp,
                                     int64_t kv) {
    if (t->kv_elem != DTYPE_I8)
        return (struct head_rows){DTYPE_F32, a->k + h->offset_k, a->v + h->offset_k, NULL, NULL};
    int64_t at = kv * t->cap_rows + sp->begin;
    return (struct head_rows){DTYPE_I8, a->k_i8.q + h->offset_k, a->v_i8.q + h->offset_k,
                              a->k_i8.scale + at, a->v_i8.scale + at};
}

/* Multiplies row i of p by the scales of the keys or values to which query i attends. */
static void scores_multiply(const struct head *h, float *p, int64_t ldp, const uint16_t *scale,
                            int64_t i0, int64_t i1) {
    int64_t j0 = first_key(h, i0);
    for (int64_t i = i0; i < i1; i++)
        for (int64_t j = first_key(h, i); j <= i; j++)
            p[(i - i0) * ldp + j - j0] *= f16_to_f32(scale[j]);
}

/* The rows [i0, i1) of one query head, f32 forward pass. The order of operations is that of
 * model/forward.c. */
static void block_attend(const struct trainer *t, const struct activations *a, const struct head *h,
                         const struct head_rows *r, const struct scratch *s, int64_t i0,
                         int64_t i1) {
    int64_t e = t->c.head_dim, j0 = first_key(h, i0),
            skip = j0 * h->ldk * (int64_t)dtype_size(r->type);
    float *out = a->att + h->offset_q + i0 * h->ldq, by[BLOCK];
    gemm_nt(r->type, s->p, s->ld, a->q + h->offset_q + i0 * h->ldq, h->ldq, i1 - i0,
            (const char *)r->k + skip, h->ldk, e, 0, i1 - j0, false);
    if (r->k_scale) scores_multiply(h, s->p, s->ld, r->k_scale, i0, i1);
    softmax_block(t, h, s->p, s->ld, by, i0, i1);
    if (r->v_scale) scores_multiply(h, s->p, s->ld, r->v_scale, i0, i1);
    for (int64_t i = 0; i < i1 - i0; i++) memset(out + i * h->ldq, 0, (size_t)e * sizeof *out);
    gemm_nn(r->type, out, h->ldq, s->p, s->ld, 1, i1 - i0, (const char *)r->v + skip, h->ldk,
            i1 - j0, e);
    for (int64_t i = 0; i < i1 - i0; i++) t->k->scale(out + i * h->ldq, by[i], e);
}

/* f32 forward pass; items are query heads of samples. */
static void attend_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct attend_job *job = ctx;
    const struct trainer *t = job->t;
    int64_t heads = t->c.n_heads, group = heads / t->c.n_kv_heads;
    for (int64_t item = begin; item < end; item++) {
        const struct packed_seq *sp = &t->seqs[item / heads];
        struct head h = head_of(t, job->l, sp, item % heads);
        struct scratch s = scratch_view(t, thread, h.n);
        struct head_rows r = head_rows_of(t, job->a, &h, sp, item % heads / group);
        for (int64_t i0 = 0; i0 < h.n; i0 += BLOCK)
            block_attend(t, job->a, &h, &r, &s, i0, MIN(i0 + BLOCK, h.n));
    }
}

/* The keys and values of one kv head of a sample are one page. */
static struct attention_page sample_page(const void *ctx, int64_t page) {
    (void)page;
    return *(const struct attention_page *)ctx;
}

/* Fast class: all query heads of one kv head of one sample. */
static void head_attend_tiles(const struct attend_job *job, const struct packed_seq *sp, int64_t kv,
                              float *scratch) {
    const struct trainer *t = job->t;
    const struct activations *a = job->a;
    int64_t group = t->c.n_heads / t->c.n_kv_heads, ld_stats = 2 * t->c.n_heads;
    struct head h = head_of(t, job->l, sp, kv * group);
    struct tile_scratch s = tile_scratch_view(scratch, h.n);
    for (int64_t i = 0; i < h.n; i++) {
        s.first[i] = (int32_t)first_key(&h, i);
        s.end[i] = (int32_t)i + 1;
    }
    const struct head_rows r = head_rows_of(t, a, &h, sp, kv);
    struct attention_page rows = {r.k, r.v, r.k_scale, r.v_scale};
    struct attention_job kernel = {
        .head_dim = t->c.head_dim,
        .n_heads = group,
        .rows = h.n,
        .q = a->q + h.offset_q,
        .out = a->att + h.offset_q,
        .ldq = h.ldq,
        .ldo = h.ldq,
        .first = s.first,
        .end = s.end,
        .scale = h.scale,
        .keys = {.dtype = r.type, .page = h.n, .ld = h.ldk, .get_page = sample_page, .ctx = &rows},
        .stats = a->att_stats + sp->begin * ld_stats + kv * group * 2,
        .ld_stats = ld_stats,
        .scratch = s.kernel,
    };
    t->k->attention(&kernel);
}

static void attend_tiles_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct attend_job *job = ctx;
    int64_t heads = job->t->c.n_kv_heads;
    for (int64_t item = begin; item < end; item++)
        head_attend_tiles(job, &job->t->seqs[item / heads], item % heads,
                          job->t->att_scratch[thread]);
}

void attention_forward(struct trainer *t, int l) {
    struct attend_job job = {.t = t, .a = &t->acts[l], .l = l};
    if (attention_uses_tiles(t)) {
        pool_run(t->pool, attend_tiles_items, &job, (int64_t)t->n_seqs * t->c.n_kv_heads, 1);
        return;
    }
    pool_run(t->pool, attend_items, &job, (int64_t)t->n_seqs * t->c.n_heads, 1);
}

/* Softmax backward of one block: p [i1 - i0][ld] becomes probabilities, and dp, their gradients,
 * becomes the gradients of the scores before scaling. */
static void softmax_block_backward(const struct trainer *t, const struct head *h, float *p,
                                   float *dp, int64_t ld, const float *by, int64_t i0, int64_t i1) {
    int64_t j0 = first_key(h, i0);
    for (int64_t i = i0; i < i1; i++) {
        float *pr = p + (i - i0) * ld, *dr = dp + (i - i0) * ld;
        int64_t first = first_key(h, i) - j0, end = i + 1 - j0;
        t->k->scale(pr + first, by[i - i0], end - first);
        float mean = t->k->dot(pr + first, dr + first, end - first);
        memset(dr, 0, (size_t)first * sizeof *dr);
        t->k->softmax_backward(dr + first, pr + first, mean, h->scale, end - first);
        memset(dr + end, 0, (size_t)(i1 - i - 1) * sizeof *dr);
    }
}

/* f32 backward pass of one query head of one sample: sets dq, adds to dk and dv of its kv head. */
static void head_backward(const struct trainer *t, const struct activations *a,
                          const struct head *h, const struct scratch *s) {
    int64_t e = t->c.head_dim, ld = s->ld;
    float by[BLOCK];
    for (int64_t i0 = 0; i0 < h->n; i0 += BLOCK) {
        int64_t i1 = MIN(i0 + BLOCK, h->n), nb = i1 - i0, j0 = first_key(h, i0), nk = i1 - j0;
        int64_t row = h->offset_q + i0 * h->ldq, key = h->offset_k + j0 * h->ldk;
        scores_from_transposed(t, s->p, ld, a->q + row, h->ldq, nb, s->kt + j0, ld, nk);
        softmax_block(t, h, s->p, ld, by, i0, i1);
        scores_from_transposed(t, s->dp, ld, t->datt + row, h->ldq, nb, s->vt + j0, ld, nk);
        softmax_block_backward(t, h, s->p, s->dp, ld, by, i0, i1);
        for (int64_t i = 0; i < nb; i++)
            memset(t->dq + row + i * h->ldq, 0, (size_t)e * sizeof(float));
        t->k->gemm_nn_f32(t->dq + row, h->ldq, s->dp, ld, 1, nb, a->k + key, h->ldk, nk, e);
        t->k->gemm_nn_f32(t->dk + key, h->ldk, s->dp, 1, ld, nk, a->q + row, h->ldq, nb, e);
        t->k->gemm_nn_f32(t->dv + key, h->ldk, s->p, 1, ld, nk, t->datt + row, h->ldq, nb, e);
    }
}

/* f32 backward pass; items are kv heads of samples. */
static void attend_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct attend_job *job = ctx;
    const struct trainer *t = job->t;
    int64_t kv_n = t->c.n_kv_heads, e = t->c.head_dim, group = t->c.n_heads / kv_n, ldk = kv_n * e;
    for (int64_t item = begin; item < end; item++) {
        const struct packed_seq *sp = &t->seqs[item / kv_n];
        int64_t kv = item % kv_n, n = sp->end - sp->begin, at = sp->begin * ldk + kv * e;
        struct scratch s = scratch_view(t, thread, n);
        t->k->transpose(s.kt, s.ld, job->a->k + at, ldk, n, e);
        t->k->transpose(s.vt, s.ld, job->a->v + at, ldk, n, e);
        for (int64_t i = sp->begin; i < sp->end; i++) {
            memset(t->dk + i * ldk + kv * e, 0, (size_t)e * sizeof(float));
            memset(t->dv + i * ldk + kv * e, 0, (size_t)e * sizeof(float));
        }
        for (int64_t g = kv * group; g < (kv + 1) * group; g++) {
            struct head h = head_of(t, job->l, sp, g);
            head_backward(t, job->a, &h, &s);
        }
    }
}

static void head_backward_tiles(const struct attend_job *job, const struct packed_seq *sp,
                                int64_t kv, float *scratch) {
    const struct trainer *t = job->t;
    const struct activations *a = job->a;
    int64_t group = t->c.n_heads / t->c.n_kv_heads, ld_stats = 2 * t->c.n_heads;
    struct head h = head_of(t, job->l, sp, kv * group);
    struct attention_backward_job kernel = {
        .head_dim = t->c.head_dim,
        .n_heads = group,
        .rows = h.n,
        .window = h.window,
        .q = a->q + h.offset_q,
        .out = a->att + h.offset_q,
        .dout = t->datt + h.offset_q,
        .dq = t->dq + h.offset_q,
        .ldq = h.ldq,
        .k = a->k + h.offset_k,
        .v = a->v + h.offset_k,
        .dk = t->dk + h.offset_k,
        .dv = t->dv + h.offset_k,
        .ldk = h.ldk,
        .stats = a->att_stats + sp->begin * ld_stats + kv * group * 2,
        .ld_stats = ld_stats,
        .scale = h.scale,
        .scratch = scratch,
    };
    t->k->attention_backward(&kernel);
}

static void attend_backward_tiles_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct attend_job *job = ctx;
    int64_t heads = job->t->c.n_kv_heads;
    for (int64_t item = begin; item < end; item++)
        head_backward_tiles(job, &job->t->seqs[item / heads], item % heads,
                            job->t->att_scratch[thread]);
}

void attention_backward(struct trainer *t, int l) {
    struct attend_job job = {.t = t, .a = &t->acts[l], .l = l};
    pool_run(t->pool, attention_uses_tiles(t) ? attend_backward_tiles_items : attend_backward_items,
             &job, (int64_t)t->n_seqs * t->c.n_kv_heads, 1);
}
