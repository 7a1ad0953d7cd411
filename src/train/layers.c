/*
 * layers: one transformer layer, forward with what the backward pass needs kept, and backward.
 *
 * Every product is base's dot-form gemm: forward x Wᵀ; dX = dY W against a transposed copy of W; dW
 * += dYᵀ X against transposes of both, summed over rows by the 16-lane rule. What is cheap to
 * compute again from kept values (norms' outputs, the gated activation) is not kept. Attention is
 * in attention.c.
 *
 * Invariant: threads split outputs, never a sum; so results do not depend on their number. An
 * adapter's gradients are summed sample by sample (see internal.h).
 */
#include "train/internal.h"

#include <math.h>
#include <string.h>

struct rows_job {
    struct trainer *t;
    float *y, *z;
    const float *x, *g, *u;
    const uint8_t *keep;
    int64_t rows, width;
    int l, p;
    bool add;
};

static void rmsnorm_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = begin; i < end; i++)
        j->t->k->rmsnorm(j->y + i * j->width, j->x + i * j->width, j->g, j->t->c.rms_norm_eps,
                         j->width);
}

void rmsnorm_rows(struct trainer *t, float *y, const float *x, const float *g, int64_t rows,
                  int64_t width) {
    struct rows_job j = {.t = t, .y = y, .x = x, .g = g, .width = width};
    pool_run(t->pool, rmsnorm_items, &j, rows, 8);
}

static void rstd_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = begin; i < end; i++) {
        const float *x = j->x + i * j->width;
        float mean = j->t->k->dot(x, x, j->width) / (float)j->width;
        j->t->rstd[i] = 1.0f / sqrtf(mean + j->t->c.rms_norm_eps);
    }
}

/* Items are columns: each walks all rows in order. */
static void gain_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    float *restrict dg = j->y;
    for (int64_t i = 0; i < j->rows; i++) {
        const float *x = j->x + i * j->width, *dy = j->z + i * j->width;
        float rstd = j->t->rstd[i];
        for (int64_t c = begin; c < end; c++) dg[c] += dy[c] * x[c] * rstd;
    }
}

static void rmsnorm_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    const struct kernels *k = j->t->k;
    for (int64_t i = begin; i < end; i++) {
        const float *x = j->x + i * j->width;
        float *dy = j->z + i * j->width, *dx = j->y + i * j->width, rstd = j->t->rstd[i];
        for (int64_t c = 0; c < j->width; c++) dy[c] *= j->g[c];
        float along = k->dot(dy, x, j->width) / (float)j->width * rstd * rstd * rstd;
        if (j->add) {
            k->axpy(dx, rstd, dy, j->width);
            k->axpy(dx, -along, x, j->width);
        } else {
            for (int64_t c = 0; c < j->width; c++) dx[c] = rstd * dy[c] - along * x[c];
        }
    }
}

void rmsnorm_backward(struct trainer *t, float *dx, float *dy, const float *x, const float *g,
                      float *dg, int64_t rows, int64_t width, bool add) {
    struct rows_job j = {.t = t, .x = x, .z = dy, .g = g, .rows = rows, .width = width, .add = add};
    pool_run(t->pool, rstd_items, &j, rows, 8);
    if (dg) {
        j.y = dg;
        pool_run(t->pool, gain_items, &j, width, 16);
    }
    j.y = dx;
    pool_run(t->pool, rmsnorm_backward_items, &j, rows, 8);
}

static void silu_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = begin; i < end; i++)
        j->t->k->silu_mul(j->y + i * j->width, j->x + i * j->width, j->u + i * j->width, j->width);
}

/* act = gate · σ(gate) · up, so with s = σ(gate): dgate = dact·up·s·(1 + gate·(1 - s)), dup =
 * dact·gate·s. */
static void silu_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = begin; i < end; i++) {
        const float *restrict gate = j->x + i * j->width, *restrict up = j->u + i * j->width;
        const float *restrict dact = j->g + i * j->width;
        float *restrict dgate = j->y + i * j->width, *restrict dup = j->z + i * j->width;
        for (int64_t c = 0; c < j->width; c++) dup[c] = -gate[c];
        j->t->k->exp(dup, dup, j->width);
        for (int64_t c = 0; c < j->width; c++) {
            float s = 1.0f / (1.0f + dup[c]);
            dgate[c] = dact[c] * up[c] * s * (1.0f + gate[c] * (1.0f - s));
            dup[c] = dact[c] * gate[c] * s;
        }
    }
}

/* Rotates every head of y's rows; `u` is the sine table, negated for the backward pass. */
static void rope_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    int64_t e = j->t->c.head_dim, half = e / 2;
    for (int64_t i = begin; i < end; i++) {
        int64_t at = j->t->pos[i] * half;
        for (int64_t c = 0; c < j->width; c += e)
            j->t->k->rope(j->y + i * j->width + c, j->t->rope_cos + at, j->u + at, half);
    }
}

static void rope_rows(struct trainer *t, float *y, int64_t width, const float *sin) {
    struct rows_job j = {.t = t, .y = y, .width = width, .u = sin};
    pool_run(t->pool, rope_items, &j, t->rows, 8);
}

/* In 1/65536ths, so that the factor makes the kept values unbiased exactly. */
static uint32_t dropout_threshold(const struct trainer *t) {
    return MIN((uint32_t)(t->dropout * 65536.0f + 0.5f), 65535u);
}

/* One stream a (sample, layer, projection), two decisions a draw. Items are samples. */
static void keep_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    const struct trainer *t = j->t;
    int64_t stride = (j->width + 7) / 8;
    uint32_t threshold = dropout_threshold(t);
    for (int64_t s = begin; s < end; s++) {
        const struct span *sp = &t->spans[s];
        uint32_t id = (uint32_t)(sp->ordinal * t->c.n_layers * N_PROJ + j->l * N_PROJ + j->p);
        struct rng r = rng_make(t->seed, RNG_DROPOUT, id, (uint32_t)t->groups[sp->adapter].updates);
        uint8_t *bits = t->acts[j->l].keep[j->p] + sp->begin * stride;
        memset(bits, 0, (size_t)((sp->end - sp->begin) * stride));
        for (int64_t i = sp->begin; i < sp->end; i++, bits += stride)
            for (int64_t c = 0; c < j->width; c += 2) {
                uint32_t draw = rng_u32(&r);
                if ((draw & 0xffff) >= threshold) bits[c / 8] |= (uint8_t)(1u << c % 8);
                if ((draw >> 16) >= threshold && c + 1 < j->width)
                    bits[c / 8] |= (uint8_t)(2u << c % 8);
            }
    }
}

/* y (+)= x where kept, scaled up; else (+)= 0. Four at a time: a half byte of decisions picks its
 * row of factors. */
static void drop_row(float *restrict y, const float *restrict x, const uint8_t *bits,
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

static void drop_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    int64_t stride = (j->width + 7) / 8;
    float factor = 65536.0f / (float)(65536 - dropout_threshold(j->t)), factors[16][4];
    for (int bits = 0; bits < 16; bits++)
        for (int i = 0; i < 4; i++) factors[bits][i] = bits >> i & 1 ? factor : 0.0f;
    for (int64_t i = begin; i < end; i++)
        drop_row(j->y + i * j->width, j->x + i * j->width, j->keep + i * stride, factors, j->width,
                 j->add);
}

/* The adapters' input of one projection: x itself, or its dropped-out copy in t->drop. */
static const float *lora_inputs(struct trainer *t, int l, int p, const float *x) {
    if (!t->dropping) return x;
    struct rows_job j = {.t = t,
                         .y = t->drop,
                         .x = x,
                         .keep = t->acts[l].keep[p],
                         .width = t->layers[l].proj[p].k,
                         .l = l,
                         .p = p};
    pool_run(t->pool, drop_items, &j, t->rows, 8);
    return t->drop;
}

/* The next run of samples that share an adapter, from span `s`: its rows, and in the result where
 * the following begins. */
static int run_next(const struct trainer *t, int s, int64_t *begin, int64_t *end) {
    int e = s;
    while (e < t->n_spans && t->spans[e].adapter == t->spans[s].adapter) e++;
    *begin = t->spans[s].begin;
    *end = t->spans[e - 1].end;
    return e;
}

static struct lora_params *lora_of(const struct trainer *t, int adapter, int l, int p) {
    return &t->loras[((int64_t)adapter * t->c.n_layers + l) * N_PROJ + p];
}

static void scale_rows(const struct trainer *t, float *h, int64_t begin, int64_t end, int32_t r,
                       float scale) {
    for (int64_t i = begin; i < end; i++) t->k->scale(h + i * t->max_r, scale, r);
}

/* y += scale · B (A drop(x)), each adapter on its own rows; keeps h = scale · A drop(x). */
static void lora_forward(struct trainer *t, int l, int p, float *y, const float *x) {
    int64_t in = t->layers[l].proj[p].k, out = t->layers[l].proj[p].n, b, e;
    float *h = t->acts[l].h[p];
    if (!h) return;
    if (t->dropping) {
        struct rows_job j = {.t = t, .width = in, .l = l, .p = p};
        pool_run(t->pool, keep_items, &j, t->n_spans, 1);
    }
    x = lora_inputs(t, l, p, x);
    for (int s = 0, next; s < t->n_spans; s = next) {
        next = run_next(t, s, &b, &e);
        const struct lora_params *lp = lora_of(t, t->spans[s].adapter, l, p);
        if (!lp->r) continue;
        gemm(h + b * t->max_r, t->max_r, x + b * in, in, e - b, lp->a, in, in, lp->r, false,
             t->pool);
        scale_rows(t, h, b, e, lp->r, lp->scale);
        gemm(y + b * out, out, h + b * t->max_r, t->max_r, e - b, lp->b, lp->r, lp->r, out, true,
             t->pool);
    }
}

/* dB[o] += Σ over samples of dYᵀ h. Items are rows of B. */
static void lora_b_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    const struct trainer *t = j->t;
    for (int s = 0; s < t->n_spans; s++) {
        const struct span *sp = &t->spans[s];
        const struct lora_params *lp = lora_of(t, sp->adapter, j->l, j->p);
        if (!lp->r) continue;
        t->k->gemm_f32(lp->gb + begin * lp->r, lp->r, t->ty + begin * t->ldt + sp->begin, t->ldt,
                       end - begin, t->th + sp->begin, t->ldt, sp->end - sp->begin, 0, lp->r, true);
    }
}

/* dA[:, i] += Σ over samples of dhᵀ x. Items are columns of A. */
static void lora_a_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    const struct trainer *t = j->t;
    for (int s = 0; s < t->n_spans; s++) {
        const struct span *sp = &t->spans[s];
        const struct lora_params *lp = lora_of(t, sp->adapter, j->l, j->p);
        if (!lp->r) continue;
        t->k->gemm_f32(lp->ga, j->width, t->tdh + sp->begin, t->ldt, lp->r, t->tx + sp->begin,
                       t->ldt, sp->end - sp->begin, begin, end, true);
    }
}

/* dh = scale · dY B, on every adapter's rows. */
static void lora_hidden_backward(struct trainer *t, int l, int p, const float *dy) {
    int64_t out = t->layers[l].proj[p].n, b, e;
    for (int s = 0, next; s < t->n_spans; s = next) {
        next = run_next(t, s, &b, &e);
        const struct lora_params *lp = lora_of(t, t->spans[s].adapter, l, p);
        if (!lp->r) continue;
        transpose(t->wt, out, lp->b, lp->r, out, lp->r, t->pool);
        gemm(t->dh + b * t->max_r, t->max_r, dy + b * out, out, e - b, t->wt, out, out, lp->r,
             false, t->pool);
        scale_rows(t, t->dh, b, e, lp->r, lp->scale);
    }
}

/* dx += drop(dh A); t->drop is free by now. */
static void lora_inputs_backward(struct trainer *t, int l, int p, float *dx) {
    int64_t in = t->layers[l].proj[p].k, b, e;
    for (int s = 0, next; s < t->n_spans; s = next) {
        next = run_next(t, s, &b, &e);
        const struct lora_params *lp = lora_of(t, t->spans[s].adapter, l, p);
        if (!lp->r) continue;
        float *to = (t->dropping ? t->drop : dx) + b * in;
        transpose(t->wt, lp->r, lp->a, in, lp->r, in, t->pool);
        gemm(to, in, t->dh + b * t->max_r, t->max_r, e - b, t->wt, lp->r, lp->r, in, !t->dropping,
             t->pool);
        if (!t->dropping) continue;
        struct rows_job j = {.t = t,
                             .y = dx + b * in,
                             .x = to,
                             .width = in,
                             .add = true,
                             .keep = t->acts[l].keep[p] + b * ((in + 7) / 8)};
        pool_run(t->pool, drop_items, &j, e - b, 8);
    }
}

/* t->tx holds xᵀ unless there is dropout, when it is made here from the dropped-out inputs. dx may
 * be NULL. */
static void lora_backward(struct trainer *t, int l, int p, float *dx, const float *dy,
                          const float *x) {
    int64_t in = t->layers[l].proj[p].k, out = t->layers[l].proj[p].n;
    const float *h = t->acts[l].h[p];
    struct rows_job j = {.t = t, .width = in, .l = l, .p = p};
    if (!h) return;
    if (t->dropping) transpose(t->tx, t->ldt, lora_inputs(t, l, p, x), in, t->rows, in, t->pool);
    transpose(t->ty, t->ldt, dy, out, t->rows, out, t->pool);
    transpose(t->th, t->ldt, h, t->max_r, t->rows, t->max_r, t->pool);
    pool_run(t->pool, lora_b_items, &j, out, 16);
    lora_hidden_backward(t, l, p, dy);
    transpose(t->tdh, t->ldt, t->dh, t->max_r, t->rows, t->max_r, t->pool);
    pool_run(t->pool, lora_a_items, &j, in, 16);
    if (dx) lora_inputs_backward(t, l, p, dx);
}

const float *weight_transposed(struct trainer *t, const struct weight *w, float *scratch) {
    if (w->wt) return w->wt;
    transpose(scratch, w->n, w->w, w->k, w->n, w->k, t->pool);
    return scratch;
}

/* y (+)= x Wᵀ and the adapters' parts. */
static void linear_forward(struct trainer *t, int l, int p, float *y, const float *x, bool add) {
    const struct weight *w = &t->layers[l].proj[p];
    gemm(y, w->n, x, w->k, t->rows, w->w, w->k, w->k, w->n, add, t->pool);
    if (!t->full) lora_forward(t, l, p, y, x);
}

/* Prepares t->tx for the backward passes of the projections that read x. */
static void inputs_transpose(struct trainer *t, const float *x, int64_t width) {
    if (!t->dropping) transpose(t->tx, t->ldt, x, width, t->rows, width, t->pool);
}

/* dx (+)= dy W; dx may be NULL where nobody needs it. */
static void linear_backward(struct trainer *t, int l, int p, float *dx, const float *dy,
                            const float *x, bool add) {
    const struct weight *w = &t->layers[l].proj[p];
    if (dx)
        gemm(dx, w->k, dy, w->n, t->rows, weight_transposed(t, w, t->wt), w->n, w->n, w->k, add,
             t->pool);
    if (!t->full) {
        lora_backward(t, l, p, dx, dy, x);
        return;
    }
    transpose(t->ty, t->ldt, dy, w->n, t->rows, w->n, t->pool);
    gemm(w->g, w->k, t->ty, t->ldt, w->n, t->tx, t->ldt, t->rows, w->k, true, t->pool);
}

static void heads_norm_forward(struct trainer *t, const struct layer_params *lp,
                               struct activations *a) {
    int64_t e = t->c.head_dim, nq = t->rows * t->c.n_heads, nk = t->rows * t->c.n_kv_heads;
    memcpy(a->q_raw, a->q, (size_t)(nq * e) * sizeof(float));
    memcpy(a->k_raw, a->k, (size_t)(nk * e) * sizeof(float));
    rmsnorm_rows(t, a->q, a->q_raw, lp->q_norm, nq, e);
    rmsnorm_rows(t, a->k, a->k_raw, lp->k_norm, nk, e);
}

static void heads_norm_backward(struct trainer *t, const struct layer_params *lp,
                                const struct activations *a) {
    int64_t e = t->c.head_dim, nq = t->rows * t->c.n_heads, nk = t->rows * t->c.n_kv_heads;
    rmsnorm_backward(t, t->dq, t->dq, a->q_raw, lp->q_norm, lp->g_q_norm, nq, e, false);
    rmsnorm_backward(t, t->dk, t->dk, a->k_raw, lp->k_norm, lp->g_k_norm, nk, e, false);
}

static void silu_rows(struct trainer *t, const struct activations *a) {
    struct rows_job j = {.t = t, .y = t->act_buf, .x = a->gate, .u = a->up, .width = t->c.d_ff};
    pool_run(t->pool, silu_items, &j, t->rows, 8);
}

void layer_forward(struct trainer *t, int l) {
    const struct layer_params *lp = &t->layers[l];
    struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model, e = t->c.head_dim;
    size_t bytes = (size_t)(t->rows * d) * sizeof(float);
    rmsnorm_rows(t, t->xn, a->x, lp->attn_norm, t->rows, d);
    linear_forward(t, l, PROJ_Q, a->q, t->xn, false);
    linear_forward(t, l, PROJ_K, a->k, t->xn, false);
    linear_forward(t, l, PROJ_V, a->v, t->xn, false);
    if (lp->q_norm) heads_norm_forward(t, lp, a);
    rope_rows(t, a->q, t->c.n_heads * e, t->rope_sin);
    rope_rows(t, a->k, t->c.n_kv_heads * e, t->rope_sin);
    attention_forward(t, a);
    memcpy(a->mid, a->x, bytes);
    linear_forward(t, l, PROJ_O, a->mid, a->att, true);
    rmsnorm_rows(t, t->xn, a->mid, lp->ffn_norm, t->rows, d);
    linear_forward(t, l, PROJ_GATE, a->gate, t->xn, false);
    linear_forward(t, l, PROJ_UP, a->up, t->xn, false);
    silu_rows(t, a);
    memcpy(t->acts[l + 1].x, a->mid, bytes);
    linear_forward(t, l, PROJ_DOWN, t->acts[l + 1].x, t->act_buf, true);
}

static void ffn_backward(struct trainer *t, int l) {
    const struct layer_params *lp = &t->layers[l];
    struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model, f = t->c.d_ff;
    silu_rows(t, a);
    inputs_transpose(t, t->act_buf, f);
    linear_backward(t, l, PROJ_DOWN, t->dact, t->dx, t->act_buf, false);
    struct rows_job j = {
        .t = t, .x = a->gate, .u = a->up, .g = t->dact, .y = t->dgate, .z = t->dup, .width = f};
    pool_run(t->pool, silu_backward_items, &j, t->rows, 8);
    rmsnorm_rows(t, t->xn, a->mid, lp->ffn_norm, t->rows, d);
    inputs_transpose(t, t->xn, d);
    linear_backward(t, l, PROJ_GATE, t->dxn, t->dgate, t->xn, false);
    linear_backward(t, l, PROJ_UP, t->dxn, t->dup, t->xn, true);
    rmsnorm_backward(t, t->dx, t->dxn, a->mid, lp->ffn_norm, lp->g_ffn_norm, t->rows, d, true);
}

void layer_backward(struct trainer *t, int l) {
    const struct layer_params *lp = &t->layers[l];
    struct activations *a = &t->acts[l];
    int64_t d = t->c.d_model, e = t->c.head_dim, q = t->c.n_heads * e;
    float *dxn = t->full || l > 0 ? t->dxn : NULL; /* below the first layer everything is frozen */
    ffn_backward(t, l);
    inputs_transpose(t, a->att, q);
    linear_backward(t, l, PROJ_O, t->datt, t->dx, a->att, false);
    attention_backward(t, a);
    rope_rows(t, t->dq, q, t->rope_neg);
    rope_rows(t, t->dk, t->c.n_kv_heads * e, t->rope_neg);
    if (lp->q_norm) heads_norm_backward(t, lp, a);
    rmsnorm_rows(t, t->xn, a->x, lp->attn_norm, t->rows, d);
    inputs_transpose(t, t->xn, d);
    linear_backward(t, l, PROJ_Q, dxn, t->dq, t->xn, false);
    linear_backward(t, l, PROJ_K, dxn, t->dk, t->xn, true);
    linear_backward(t, l, PROJ_V, dxn, t->dv, t->xn, true);
    if (dxn)
        rmsnorm_backward(t, t->dx, dxn, a->x, lp->attn_norm, lp->g_attn_norm, t->rows, d, true);
}
