/*
 * The forward pass: rows of tokens, each in its own sequence and under its own adapter, through one
 * frozen base.
 *
 * Per layer the base is read once for all rows; adapters add their low-rank parts segment by
 * segment. Products that read the same input (q, k, v; gate, up) are one parallel region, in which
 * the first halves of the low-rank parts, t = scale · x Aᵀ, run beside the base; a second region
 * adds t Bᵀ. Work lies on a line of costs that is cut into equal parts, so twenty short segments
 * spread over threads as well as one long one. The residual stream is the output that o and down
 * accumulate into.
 *
 * Invariant: a row's bits depend on its own tokens and adapter only. Every number is made by one
 * kernel call whose arithmetic does not know how many rows or outputs lie beside it, so cuts and
 * chunks may fall anywhere.
 *
 * Not here: scheduling, sampling, gradients (train has its own pass, which keeps activations).
 */
#include "model/rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    RANK_CHUNK = 256, /* higher ranks are added in rounds of it: a fixed rule defines the bits */
    CUT = 16,         /* outputs: panels of packed weights, cache lines of f32 results */
    MIN_PARALLEL = 1 << 15, /* multiply-adds below which waking threads costs more than it gives */
    MAX_FUSED = 3,
};

enum job_kind { JOB_BASE, JOB_LOW_A, JOB_LOW_B };

/* One product y[rows][n] of which any range of outputs can be made alone. */
struct job {
    enum job_kind kind;
    const struct matrix *w;  /* JOB_BASE */
    const struct inputs *in; /* JOB_BASE */
    const float *x, *f;      /* low-rank: x [rows][ldx] times f [n][ldf], both k wide */
    float *y;
    int64_t ldx, ldf, ldy, rows, k, n;
    float scale; /* JOB_LOW_A: t = scale · x Aᵀ */
    bool add;
};

struct forward {
    const struct model *m;
    const struct kernels *kern;
    struct forward_options o;
    struct forward_stats stats;
    void *slab;

    float *x;                     /* [B, D] residual stream */
    float *h;                     /* [B, D] after a norm */
    float *q, *att;               /* [B, H·E] */
    float *k, *v;                 /* [B, K·E] before they enter the cache */
    float *gate, *up;             /* [B, F] */
    float *hidden;                /* [B, D] of out_rows */
    float *low;                   /* [MAX_FUSED][B, RANK_CHUNK] */
    float *scores;                /* [threads, slot_len] */
    float *cos, *sin;             /* [slot_len, E/2] */
    float *cos_local, *sin_local; /* the same of local layers */
    float *cache_k, *cache_v;     /* [slots, L, K, slot_len, E] */
    int64_t *attend_cost;         /* [B + 1] positions seen by the rows before row i */
    struct job *jobs;             /* [MAX_FUSED · (1 + B)] */
    void *in_scratch;

    /* the call in progress */
    const struct row *rows;
    const struct segment *segs;
    int32_t n_rows, n_segs, layer;
    int n_jobs;
    int64_t cost; /* of all jobs on the line */
    int parts;    /* the line is cut into */
};

static void *slab_take(uint8_t *base, size_t *used, size_t size) {
    size_t at = *used;
    *used = at + ((size + 63) & ~(size_t)63);
    return base ? base + at : NULL;
}

static size_t cache_floats(const struct model_config *c, const struct forward_options *o) {
    return (size_t)o->n_slots * (size_t)c->n_layers * (size_t)c->n_kv_heads * (size_t)o->slot_len *
           (size_t)c->head_dim;
}

/* Lays every array into `base` (NULL: only counts) and returns the bytes: the one place that knows
 * the sizes. */
static size_t slab_lay(struct forward *f, const struct model_config *c,
                       const struct forward_options *o, uint8_t *base) {
    size_t used = 0, fl = sizeof(float), rows = (size_t)o->max_rows;
    size_t q = (size_t)c->n_heads * (size_t)c->head_dim,
           kv = (size_t)c->n_kv_heads * (size_t)c->head_dim;
    size_t d = (size_t)c->d_model, ff = (size_t)c->d_ff, len = (size_t)o->slot_len;
    size_t rope = len * (size_t)c->head_dim / 2;
    f->x = slab_take(base, &used, rows * d * fl);
    f->h = slab_take(base, &used, rows * d * fl);
    f->q = slab_take(base, &used, rows * q * fl);
    f->att = slab_take(base, &used, rows * q * fl);
    f->k = slab_take(base, &used, rows * kv * fl);
    f->v = slab_take(base, &used, rows * kv * fl);
    f->gate = slab_take(base, &used, rows * ff * fl);
    f->up = slab_take(base, &used, rows * ff * fl);
    f->hidden = slab_take(base, &used, rows * d * fl);
    f->low = slab_take(base, &used, MAX_FUSED * rows * RANK_CHUNK * fl);
    f->scores = slab_take(base, &used, (size_t)pool_size(o->pool) * len * fl);
    f->cos = slab_take(base, &used, rope * fl);
    f->sin = slab_take(base, &used, rope * fl);
    if (c->rope_local_theta > 0.0f) {
        f->cos_local = slab_take(base, &used, rope * fl);
        f->sin_local = slab_take(base, &used, rope * fl);
    }
    f->cache_k = slab_take(base, &used, cache_floats(c, o) * fl);
    f->cache_v = slab_take(base, &used, cache_floats(c, o) * fl);
    f->attend_cost = slab_take(base, &used, (rows + 1) * sizeof(int64_t));
    f->jobs = slab_take(base, &used, MAX_FUSED * (1 + rows) * sizeof(struct job));
    f->in_scratch =
        slab_take(base, &used, inputs_scratch(o->max_rows, (int64_t)MAX(MAX(d, q), ff)));
    return used;
}

size_t forward_bytes(const struct model_config *c, const struct forward_options *o) {
    struct forward f;
    return sizeof f + 64 + slab_lay(&f, c, o, NULL);
}

struct forward *forward_new(const struct model *m, const struct forward_options *o) {
    CHECK(o->max_rows > 0 && o->n_slots > 0 && o->slot_len > 0);
    CHECK(m->config.n_heads % m->config.n_kv_heads == 0 && m->config.head_dim % 2 == 0);
    CHECK(!m->config.arch->learned_pos || o->slot_len <= m->config.max_seq_len);
    struct forward *f = xcalloc(1, sizeof *f);
    f->m = m;
    f->o = *o;
    f->kern = kernels_get();
    f->slab = xcalloc(1, slab_lay(f, &m->config, o, NULL) +
                             64); // pages of the cache are touched when used
    slab_lay(f, &m->config, o, (uint8_t *)(((uintptr_t)f->slab + 63) & ~(uintptr_t)63));
    rope_table(&m->config, o->slot_len, f->cos, f->sin);
    if (m->config.rope_local_theta > 0.0f)
        rope_table_local(&m->config, o->slot_len, f->cos_local, f->sin_local);
    return f;
}

void forward_free(struct forward *f) {
    if (!f) return;
    free(f->slab);
    free(f);
}

const struct forward_stats *forward_stats(const struct forward *f) {
    return &f->stats;
}

const float *forward_hidden(const struct forward *f) {
    return f->hidden;
}

/* First float of one head's positions in `cache`: [slot_len, E] from there. */
static size_t cache_at(const struct forward *f, int32_t slot, int32_t layer, int32_t kv_head) {
    const struct model_config *c = &f->m->config;
    size_t head = ((size_t)slot * (size_t)c->n_layers + (size_t)layer) * (size_t)c->n_kv_heads +
                  (size_t)kv_head;
    return head * (size_t)f->o.slot_len * (size_t)c->head_dim;
}

void forward_copy(struct forward *f, int32_t from, int32_t to, int32_t n) {
    const struct model_config *c = &f->m->config;
    CHECK(from >= 0 && from < f->o.n_slots && to >= 0 && to < f->o.n_slots && n >= 0 &&
          n <= f->o.slot_len);
    if (from == to) return;
    size_t size = (size_t)n * (size_t)c->head_dim * sizeof(float);
    for (int32_t l = 0; l < c->n_layers; l++)
        for (int32_t g = 0; g < c->n_kv_heads; g++) {
            size_t a = cache_at(f, from, l, g), b = cache_at(f, to, l, g);
            memcpy(f->cache_k + b, f->cache_k + a, size);
            memcpy(f->cache_v + b, f->cache_v + a, size);
        }
}

static struct pool *pool_for(const struct forward *f, int64_t cost) {
    return cost >= MIN_PARALLEL ? f->o.pool : NULL;
}

static void job_range(const struct kernels *k, const struct job *j, int64_t n0, int64_t n1) {
    if (j->kind == JOB_BASE) {
        matrix_mul_range(j->y, j->ldy, j->in, j->w, n0, n1, j->add);
        return;
    }
    k->gemm_f32(j->y, j->ldy, j->x, j->ldx, j->rows, j->f, j->ldf, j->k, n0, n1, j->add);
    if (j->kind == JOB_LOW_A)
        for (int64_t i = 0; i < j->rows; i++) k->scale(j->y + i * j->ldy + n0, j->scale, n1 - n0);
}

/* Which output of a job that begins at `start` on the line lies at `pos`: the same answer for both
 * its neighbours. */
static int64_t job_cut(const struct job *j, int64_t start, int64_t pos) {
    int64_t unit = j->rows * j->k;
    if (pos <= start) return 0;
    if (pos >= start + j->n * unit) return j->n;
    return (pos - start) / unit / CUT * CUT;
}

static void jobs_part(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    (void)thread;
    int64_t lo = f->cost * begin / f->parts, hi = f->cost * end / f->parts, start = 0;
    for (int i = 0; i < f->n_jobs; i++) {
        const struct job *j = &f->jobs[i];
        int64_t n0 = job_cut(j, start, lo), n1 = job_cut(j, start, hi);
        if (n0 < n1) job_range(f->kern, j, n0, n1);
        start += j->n * j->rows * j->k;
    }
}

static void job_add(struct forward *f, struct job j) {
    CHECK(f->n_jobs < MAX_FUSED * (1 + f->o.max_rows));
    f->jobs[f->n_jobs++] = j;
    f->cost += j.n * j.rows * j.k;
}

static void base_job(struct forward *f, const struct matrix *w, const struct inputs *in, float *y,
                     bool add) {
    job_add(f, (struct job){.kind = JOB_BASE,
                            .w = w,
                            .in = in,
                            .y = y,
                            .ldy = w->n,
                            .rows = in->rows,
                            .k = w->k,
                            .n = w->n,
                            .add = add});
    f->stats.weight_passes++;
}

/* Runs the jobs and clears the line. */
static void jobs_run(struct forward *f) {
    if (f->n_jobs == 0) return;
    double t0 = clock_now();
    struct pool *pool = pool_for(f, f->cost);
    f->parts = pool_size(pool);
    pool_run(pool, jobs_part, f, f->parts, 1);
    f->n_jobs = 0;
    f->cost = 0;
    f->stats.kernel_seconds += clock_now() - t0;
}

/* One half of the low-rank parts of projection `p` for ranks [r0, r0 + RANK_CHUNK): A reads the
 * input into `low`, B adds from there to y. Returns how many segments have such ranks. */
static int low_jobs(struct forward *f, enum job_kind kind, enum proj p, const struct inputs *in,
                    float *y, float *low, int64_t r0) {
    int n = 0;
    int64_t out = proj_out(&f->m->config, p);
    for (int32_t s = 0; s < f->n_segs; s++) {
        const struct segment *g = &f->segs[s];
        const struct lora *lo = g->loras ? &g->loras[f->layer * N_PROJ + p] : NULL;
        if (!lo || lo->r <= r0) continue;
        int64_t r = MIN(lo->r - r0, RANK_CHUNK), ld = (r + CUT - 1) / CUT * CUT,
                rows = g->end - g->begin;
        float *t =
            low + (int64_t)g->begin * RANK_CHUNK; // its own rows' place, packed to its own rank
        if (kind == JOB_LOW_A)
            job_add(f, (struct job){.kind = kind,
                                    .x = in->x + g->begin * in->ldx,
                                    .ldx = in->ldx,
                                    .f = lo->a + r0 * in->k,
                                    .ldf = in->k,
                                    .k = in->k,
                                    .y = t,
                                    .ldy = ld,
                                    .rows = rows,
                                    .n = r,
                                    .scale = lo->scale});
        else
            job_add(f, (struct job){.kind = kind,
                                    .x = t,
                                    .ldx = ld,
                                    .f = lo->b + r0,
                                    .ldf = lo->r,
                                    .k = r,
                                    .y = y + g->begin * out,
                                    .ldy = out,
                                    .rows = rows,
                                    .n = out,
                                    .add = true});
        n++;
    }
    return n;
}

struct product {
    enum proj p;
    float *y; /* [B, out] */
    bool add; /* into y, which holds the residual stream */
};

/* y (+)= x Wᵀ + scale · (x Aᵀ) Bᵀ for products that share one input. */
static void products_run(struct forward *f, const struct inputs *in, const struct product *v,
                         int n) {
    const struct layer *layer = &f->m->layers[f->layer];
    int64_t low = (int64_t)f->o.max_rows * RANK_CHUNK;
    for (int i = 0; i < n; i++) base_job(f, &layer->proj[v[i].p], in, v[i].y, v[i].add);
    for (int64_t r0 = 0;; r0 += RANK_CHUNK) {
        int found = 0;
        for (int i = 0; i < n; i++)
            found += low_jobs(f, JOB_LOW_A, v[i].p, in, v[i].y, f->low + i * low, r0);
        jobs_run(f);
        if (!found) return;
        for (int i = 0; i < n; i++)
            low_jobs(f, JOB_LOW_B, v[i].p, in, v[i].y, f->low + i * low, r0);
        jobs_run(f);
    }
}

/* Rows of x as all of the n matrices want them. */
static struct inputs inputs_for(struct forward *f, const float *x, int64_t rows,
                                const struct matrix *w, int n) {
    struct inputs in;
    bool int8 = false, bf16 = false;
    for (int i = 0; i < n; i++) {
        int8 |= w[i].type == TENSOR_Q8_0 || w[i].type == TENSOR_Q4_0;
        bf16 |= w[i].type == TENSOR_BF16 && w[i].packed;
    }
    int64_t k = w[0].k;
    inputs_prepare(&in, x, k, rows, k, int8, bf16, f->in_scratch, pool_for(f, 4 * rows * k));
    return in;
}

struct norm_job {
    const struct forward *f;
    const float *x, *g, *b; /* b: LayerNorm's bias, or NULL for an RMS norm */
    const int32_t *pick;    /* rows of x, or NULL: all in order */
    float *y;
};

static void norm_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct norm_job *j = ctx;
    const struct model_config *c = &j->f->m->config;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t from = j->pick ? j->pick[i] : i;
        norm_row(j->f->kern, j->y + i * c->d_model, j->x + from * c->d_model, j->g, j->b,
                 c->rms_norm_eps, c->d_model);
    }
}

static void rows_norm(struct forward *f, float *y, const float *x, const int32_t *pick,
                      int64_t rows, const float *g, const float *b) {
    struct norm_job j = {.f = f, .x = x, .g = g, .b = b, .pick = pick, .y = y};
    pool_run(pool_for(f, 4 * rows * f->m->config.d_model), norm_rows, &j, rows, 1);
}

static void embed_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    const struct model *m = f->m;
    int64_t d = m->config.d_model;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        float *x = f->x + i * d, *pos = f->h + i * d;
        matrix_row(&m->embed, f->rows[i].token, x);
        if (m->config.arch->scaled_embedding) f->kern->scale(x, sqrtf((float)d), d);
        if (!m->config.arch->learned_pos) continue;
        matrix_row(&m->pos_embed, f->rows[i].pos, pos);
        f->kern->axpy(x, 1.0f, pos, d);
    }
}

/* The input of the down projection, into f->gate. */
static void act_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    const struct layer *l = &f->m->layers[f->layer];
    int64_t n = f->m->config.d_ff;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        activation_row(f->kern, f->m->config.arch, f->gate + i * n, f->up + i * n,
                       l->bias[PROJ_GATE], l->bias[PROJ_UP], n);
}

/* What a branch ends with: its bias, and its norm before it joins the residual stream. */
struct branch {
    struct forward *f;
    const float *bias, *norm; /* either may be NULL */
};

/* With a norm the branch lies in f->h, without one it has been added to f->x already. */
static void branch_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct branch *b = ctx;
    const struct model_config *c = &b->f->m->config;
    int64_t d = c->d_model;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        float *x = b->f->x + i * d, *h = b->f->h + i * d;
        if (b->bias) b->f->kern->axpy(b->norm ? h : x, 1.0f, b->bias, d);
        if (!b->norm) continue;
        b->f->kern->rmsnorm(h, h, b->norm, c->rms_norm_eps, d);
        b->f->kern->axpy(x, 1.0f, h, d);
    }
}

/* The last projection of a branch, o or down, from `in` to the residual stream. */
static void branch_end(struct forward *f, const struct inputs *in, enum proj p, const float *norm) {
    struct branch b = {.f = f, .bias = f->m->layers[f->layer].bias[p], .norm = norm};
    products_run(f, in, &(struct product){p, norm ? f->h : f->x, !norm}, 1);
    if (b.bias || b.norm)
        pool_run(pool_for(f, 4 * in->rows * f->m->config.d_model), branch_rows, &b, in->rows, 1);
}

static void rope_row(const struct forward *f, float *x, int64_t pos) {
    const struct model_config *c = &f->m->config;
    int64_t half = c->head_dim / 2;
    bool local = c->rope_local_theta > 0.0f && layer_is_local(c, f->layer);
    if (c->arch->learned_pos) return;
    f->kern->rope(x, (local ? f->cos_local : f->cos) + pos * half,
                  (local ? f->sin_local : f->sin) + pos * half, half);
}

/* Biases, head norms and rotary embedding of q in place, of k on its way into the cache; v follows
 * with its bias. */
static void store_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    const struct model_config *c = &f->m->config;
    const struct layer *l = &f->m->layers[f->layer];
    const struct kernels *kern = f->kern;
    int64_t e = c->head_dim, kv = c->n_kv_heads * e;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t pos = f->rows[i].pos;
        if (l->bias[PROJ_Q])
            kern->axpy(f->q + i * c->n_heads * e, 1.0f, l->bias[PROJ_Q], c->n_heads * e);
        if (l->bias[PROJ_K]) kern->axpy(f->k + i * kv, 1.0f, l->bias[PROJ_K], kv);
        if (l->bias[PROJ_V]) kern->axpy(f->v + i * kv, 1.0f, l->bias[PROJ_V], kv);
        for (int32_t h = 0; h < c->n_heads; h++) {
            float *q = f->q + (i * c->n_heads + h) * e;
            if (l->q_norm) kern->rmsnorm(q, q, l->q_norm, c->rms_norm_eps, e);
            rope_row(f, q, pos);
        }
        for (int32_t g = 0; g < c->n_kv_heads; g++) {
            size_t at = cache_at(f, f->rows[i].slot, f->layer, g) + (size_t)(pos * e);
            const float *k = f->k + (i * c->n_kv_heads + g) * e;
            if (l->k_norm)
                kern->rmsnorm(f->cache_k + at, k, l->k_norm, c->rms_norm_eps, e);
            else
                memcpy(f->cache_k + at, k, (size_t)e * sizeof *k);
            rope_row(f, f->cache_k + at, pos);
            memcpy(f->cache_v + at, f->v + (i * c->n_kv_heads + g) * e, (size_t)e * sizeof *k);
        }
    }
}

/* How many positions a row sees in this layer, its own the last of them. */
static int64_t attend_len(const struct forward *f, const struct row *r) {
    const struct model_config *c = &f->m->config;
    return layer_is_local(c, f->layer) ? MIN(r->pos + 1, c->window) : r->pos + 1;
}

/* Items are (head, row) with rows inside, so that neighbours read the same keys; an item costs the
 * positions it sees. */
static void attend_item(const struct forward *f, int32_t head, int32_t i, float *scores) {
    const struct model_config *c = &f->m->config;
    int64_t e = c->head_dim, at = ((int64_t)i * c->n_heads + head) * e;
    const struct row *r = &f->rows[i];
    int64_t n = attend_len(f, r);
    size_t kv = cache_at(f, r->slot, f->layer, head / (c->n_heads / c->n_kv_heads)) +
                (size_t)((r->pos + 1 - n) * e);
    float scalar = c->query_pre_attn_scalar > 0.0f ? c->query_pre_attn_scalar : (float)e;
    f->kern->attend(f->att + at, f->q + at, f->cache_k + kv, f->cache_v + kv, e, n, e,
                    1.0f / sqrtf(scalar), scores);
}

/* First item that begins at or after `pos` on the line of attention costs. */
static int64_t attend_cut(const struct forward *f, int64_t pos) {
    int64_t per_head = f->attend_cost[f->n_rows], head = pos / per_head, rest = pos % per_head;
    int64_t lo = 0, hi = f->n_rows;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        if (f->attend_cost[mid] < rest)
            lo = mid + 1;
        else
            hi = mid;
    }
    return head * f->n_rows + lo;
}

static void attend_part(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    int64_t total = f->attend_cost[f->n_rows] * f->m->config.n_heads;
    int64_t to = attend_cut(f, total * end / f->parts);
    float *scores = f->scores + (int64_t)thread * f->o.slot_len;
    for (int64_t i = attend_cut(f, total * begin / f->parts); i < to; i++)
        attend_item(f, (int32_t)(i / f->n_rows), (int32_t)(i % f->n_rows), scores);
}

static void attend_run(struct forward *f) {
    const struct model_config *c = &f->m->config;
    f->attend_cost[0] = 0;
    for (int32_t i = 0; i < f->n_rows; i++)
        f->attend_cost[i + 1] = f->attend_cost[i] + attend_len(f, &f->rows[i]);
    struct pool *pool = pool_for(f, 2 * f->attend_cost[f->n_rows] * c->n_heads * c->head_dim);
    f->parts = pool_size(pool);
    pool_run(pool, attend_part, f, f->parts, 1);
}

static void layer_run(struct forward *f) {
    const struct model_config *c = &f->m->config;
    const struct layer *l = &f->m->layers[f->layer];
    int64_t rows = f->n_rows;
    rows_norm(f, f->h, f->x, NULL, rows, l->attn_norm, l->attn_norm_bias);
    struct inputs in = inputs_for(f, f->h, rows, &l->proj[PROJ_Q], 3);
    const struct product qkv[] = {
        {PROJ_Q, f->q, false}, {PROJ_K, f->k, false}, {PROJ_V, f->v, false}};
    products_run(f, &in, qkv, 3);
    pool_run(pool_for(f, 4 * rows * (c->n_heads + c->n_kv_heads) * c->head_dim), store_rows, f,
             rows, 1);
    attend_run(f);
    in = inputs_for(f, f->att, rows, &l->proj[PROJ_O], 1);
    branch_end(f, &in, PROJ_O, l->post_attn_norm);

    rows_norm(f, f->h, f->x, NULL, rows, l->ffn_norm, l->ffn_norm_bias);
    bool gated = !c->arch->ungated;
    in = inputs_for(f, f->h, rows, &l->proj[gated ? PROJ_GATE : PROJ_UP], gated ? 2 : 1);
    const struct product gate_up[] = {{PROJ_GATE, f->gate, false}, {PROJ_UP, f->up, false}};
    products_run(f, &in, gated ? gate_up : gate_up + 1, gated ? 2 : 1);
    pool_run(pool_for(f, 8 * rows * c->d_ff), act_rows, f, rows, 1);
    in = inputs_for(f, f->gate, rows, &l->proj[PROJ_DOWN], 1);
    branch_end(f, &in, PROJ_DOWN, l->post_ffn_norm);
}

static void call_check(const struct forward *f, const int32_t *out_rows, int32_t n_out) {
    CHECK(f->n_rows > 0 && f->n_rows <= f->o.max_rows && n_out >= 0 && n_out <= f->o.max_rows);
    for (int32_t i = 0; i < f->n_rows; i++) {
        const struct row *r = &f->rows[i];
        CHECK(r->token >= 0 && r->token < f->m->config.vocab_size);
        CHECK(r->pos >= 0 && r->pos < f->o.slot_len && r->slot >= 0 && r->slot < f->o.n_slots);
        CHECK(i == 0 || r[-1].slot != r->slot || r[-1].pos < r->pos);
    }
    for (int32_t i = 0, end = 0; i < f->n_segs; i++) {
        CHECK(f->segs[i].begin >= end && f->segs[i].end > f->segs[i].begin &&
              f->segs[i].end <= f->n_rows);
        end = f->segs[i].end;
    }
    for (int32_t i = 0; i < n_out; i++) CHECK(out_rows[i] >= 0 && out_rows[i] < f->n_rows);
}

void forward_run(struct forward *f, const struct row *rows, int32_t n_rows,
                 const struct segment *segs, int32_t n_segs, const int32_t *out_rows, int32_t n_out,
                 float *logits) {
    const struct model_config *c = &f->m->config;
    f->rows = rows;
    f->n_rows = n_rows;
    f->segs = segs;
    f->n_segs = n_segs;
    call_check(f, out_rows, n_out);

    pool_run(pool_for(f, 4 * (int64_t)n_rows * c->d_model), embed_rows, f, n_rows, 1);
    for (f->layer = 0; f->layer < c->n_layers; f->layer++) layer_run(f);
    if (n_out > 0) {
        rows_norm(f, f->hidden, f->x, out_rows, n_out, f->m->final_norm, f->m->final_norm_bias);
        struct inputs in = inputs_for(f, f->hidden, n_out, &f->m->head, 1);
        base_job(f, &f->m->head, &in, logits, false);
        jobs_run(f);
    }
    f->stats.steps++;
    f->stats.rows += (uint64_t)n_rows;
}
