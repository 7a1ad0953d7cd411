/*
 * forward: the forward pass of a batch of rows (tokens), each with its own sequence and adapters,
 * through one frozen base model.
 *
 * Each layer's base weights are read once for all rows of one numeric path (ROWS_EXACT,
 * ROWS_KNOWN); adapters add their low-rank updates segment by segment. Products that read the same
 * input (q, k, v; gate, up) run in one parallel region, which computes the base products and LoRA's
 * down projections, t = gain · A x. All work of the region is one list of tasks whose total cost is
 * divided into equal shares, so twenty short segments use the threads as well as one long segment.
 * The next region processes blocks of rows: it adds LoRA's up projections, Σ_r t_r b_r, and runs
 * the epilogue of these rows while they are in the caches. Known rows that are multiplied in tiles
 * differ: their t is computed first, and t Bᵀ is fused into the base product (segment_is_fused).
 * Without post-norms, the o and down projections accumulate into the residual stream. Attention
 * processes one block of rows after another (the heads of one row that share keys, or several rows
 * of a sequence), and within a block one page of the cache after another. The other components of
 * an adapter are applied in place: DoRA's multipliers after a product, replaced embedding rows at
 * token look-up, a replaced head at the outputs.
 *
 * Invariant: a row's bits depend only on the tokens of its sequence, on which of them were sampled,
 * and on its adapters. The arithmetic of every kernel call is independent of the number of rows,
 * outputs or pages in the call, so work can be divided at any point.
 *
 * This file does not manage the cache's pages (kv_cache.c), does not schedule or sample, and does
 * not compute gradients (backprop has its own forward pass, which keeps activations).
 */
#include "model/model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    RANK_CHUNK = VOCAB_RANK_CHUNK, /* higher ranks are added in rounds of this size */
    LORA_UP_ROWS = 32, /* rows per block of lora_up_run, whose epilogue runs after each block */
    LORA_UP_TILE_ROWS = 128, /* rows per block in tiles, where B is packed once per block */
    OUTPUT_ALIGN = 32, /* shares begin at multiples of it: two panels of weights, whole cache lines
                          of outputs */
    MIN_PARALLEL = 1 << 15, /* multiply-adds below which waking threads costs more than it saves */
    MAX_FUSED = 3,          /* most products of one input: q, k, v */
    LORA_COST = 4,      /* measured cost of a multiply-add of LoRA; one of packed weights costs 1 */
    N_WORK_SHARES = 64, /* number of equal shares that the cost of a task list is divided into */
    MAX_QUERIES = 8,   /* queries on the same keys at once: rows of a sequence, or heads of a row */
    TILE_QUERIES = 64, /* rows of a sequence in a block that attends in tiles */
};

enum gemm_task_kind { TASK_BASE, TASK_GATED, TASK_LORA_DOWN };

/* One product y[rows][n]. Any range of its outputs can be computed separately. */
struct gemm_task {
    enum gemm_task_kind kind;
    const struct matrix *w;               /* TASK_BASE */
    struct gemm_gated gated;              /* TASK_GATED: outputs are the down projection's tiles */
    const struct gemm_input *in;          /* inputs of all rows */
    const struct gemm_low_rank *low_rank; /* LoRA updates fused into the product, or NULL */
    const struct lora_segment *seg;       /* TASK_LORA_DOWN */
    const struct lora_part *part;         /* TASK_LORA_DOWN */
    const struct lora_module *module;     /* the part's factors; NULL for a perturbation */
    enum proj proj;
    float *y, *t; /* t [rows][RANK_CHUNK]: outputs of A, inputs of B */
    int64_t ldy, rows, k, n;
    int64_t start_cost;           /* cost of the tasks before this one in the list */
    int64_t first_rank, t_column; /* TASK_LORA_DOWN: first rank, and its column in t */
    bool add;                     /* TASK_BASE: adds to y */
};

/* The inputs of a product: rows [0, n_exact), then the rest. Either may be empty. */
struct row_inputs {
    struct gemm_input exact, known;
};

/* Rows that attend together: consecutive rows of a sequence. */
struct query_block {
    int32_t begin, end;
};

struct forward {
    const struct model *m;
    const struct kernels *kern;
    struct forward_options o;
    struct forward_stats stats;
    void *slab;

    float *x;                 /* [B, D] residual stream */
    float *h;                 /* [B, D] after a norm */
    float *q, *attn;          /* [B, H·E] */
    float *k, *v;             /* [B, K·E] before they are written to the cache */
    float *gate, *up;         /* [B, F] */
    float *hidden;            /* [B, D] rows out_rows after the final norm */
    float *normed;            /* [threads][D] a normed row before it is packed in tiles */
    float *lora_hidden;       /* [MAX_FUSED][B, RANK_CHUNK] */
    uint16_t *low_rank_tiles; /* [MAX_FUSED][B, LOW_RANK_MAX] lora_hidden in tiles */
    struct low_rank_rows *low_rank_rows;      /* [MAX_FUSED][B] */
    struct low_rank_part *low_rank_parts;     /* [MAX_FUSED][max_parts] */
    struct gemm_low_rank low_rank[MAX_FUSED]; /* fused updates of the products that run together */
    float *scores;                            /* [threads][MAX_QUERIES][slot_len] */
    uint8_t *attn_scratch;                    /* [threads][attention_scratch of the kernel] */
    int32_t *key_first, *key_end;     /* [B] positions that a known row attends to in this layer */
    float *cos, *sin;                 /* [slot_len, E/2] */
    float *cos_local, *sin_local;     /* [slot_len, E/2] for layers with a sliding window */
    float *signs;                     /* [threads][widest in or out]: a perturbation's factor */
    struct query_block *blocks;       /* [B] */
    struct batch_row *requested_rows; /* [B] in the last layer: the rows with requested results */
    struct lora_segment *requested_segs;    /* [B] segments of the requested rows */
    int32_t *requested_outs;                /* [B] out_rows for the requested rows: 0, 1, … */
    int64_t *attention_cost;                /* [B + 1] cost of the blocks before block i */
    struct gemm_task *tasks;                /* [MAX_FUSED · (2 + max_parts)] */
    struct prefetch_range *prefetch_ranges; /* [MAX_FUSED · max_parts]: LoRA factors of the tasks */
    void *input_scratch;
    uint16_t *act_tiles; /* [B] rows of F values in tiles: activations of known rows */
    char *lora_scratch;  /* [threads][lora_scratch_bytes] inputs of B in tiles */
    struct kv_cache *kv;

    /* the call in progress */
    const struct batch_row *rows;
    const struct lora_segment *segs;
    int32_t n_rows, n_segs, n_blocks, layer;
    struct gemm_input attn_tiles; /* attention's outputs of known rows in tiles, instead of in attn;
                                     or tiles NULL */
    int32_t n_unfused_act; /* the activation of rows [0, n_unfused_act) is an epilogue, not fused */
    int32_t n_exact; /* rows [0, n_exact) take ROWS_EXACT, rows [n_exact, n_rows) ROWS_KNOWN */
    int n_tasks;
    int n_prefetch_ranges;
    int64_t tasks_cost, base_tasks_cost; /* cost of all tasks; of the base tasks, which are first */
    int64_t lora_up_cost;                /* cost of the up projections of this round of ranks */
    int n_work_shares;                   /* number of shares of the parallel region */
};

static struct forward_options options_resolve(const struct forward_options *o) {
    struct forward_options resolved = *o;
    if (resolved.max_parts == 0) resolved.max_parts = resolved.max_rows + 15;
    return resolved;
}

static struct kv_cache_options kv_cache_options_of(const struct forward_options *o) {
    return (struct kv_cache_options){
        .n_slots = o->n_slots, .slot_len = o->slot_len, .n_pages = o->n_pages, .elem = o->kv_elem};
}

/* Bytes for the inputs of exact and known rows: each kind has its own alignment and last tile. */
static size_t inputs_scratch_bytes(int64_t rows, int64_t k) {
    return gemm_input_scratch(rows, k) + gemm_input_scratch(16, k);
}

static size_t lora_scratch_bytes(void) {
    return kernels_get()->gemm_tiles ? gemm_input_scratch(LORA_UP_TILE_ROWS, RANK_CHUNK) : 0;
}

/* Elements of the low-rank tiles of one product. */
static size_t low_rank_tiles_size(const struct forward_options *o) {
    return ((size_t)o->max_rows + 15) / 16 * 16 * LOW_RANK_MAX;
}

static size_t attention_scratch_bytes(const struct model_config *c) {
    const struct kernels *k = kernels_get();
    if (!k->attention || c->head_dim > ATTENTION_MAX_DIM) return 0;
    return (k->attention_scratch(c->head_dim) + 63) / 64 * 64;
}

/* Assigns every array its place in `base` (NULL: only counts) and returns the number of bytes. Only
 * this function knows the sizes. */
static size_t buffers_layout(struct forward *f, const struct model_config *c,
                             const struct forward_options *o, uint8_t *base) {
    size_t used = 0, fl = sizeof(float), rows = (size_t)o->max_rows;
    size_t q = (size_t)c->n_heads * (size_t)c->head_dim,
           kv = (size_t)c->n_kv_heads * (size_t)c->head_dim;
    size_t d = (size_t)c->d_model, ff = (size_t)c->d_ff, len = (size_t)o->slot_len;
    size_t rope = len * (size_t)c->head_dim / 2, widest = MAX(MAX(d, q), ff),
           threads = (size_t)pool_size(o->pool);
    f->x = bump_alloc(base, &used, rows * d * fl);
    f->h = bump_alloc(base, &used, rows * d * fl);
    size_t attention = used; // gate and up reuse the space of attention, which is finished by then
    f->q = bump_alloc(base, &used, rows * q * fl);
    f->attn = bump_alloc(base, &used, rows * q * fl);
    f->k = bump_alloc(base, &used, rows * kv * fl);
    f->v = bump_alloc(base, &used, rows * kv * fl);
    size_t end = used;
    used = attention;
    f->gate = bump_alloc(base, &used, rows * ff * fl);
    f->up = bump_alloc(base, &used, rows * ff * fl);
    used = MAX(used, end);
    f->hidden = bump_alloc(base, &used, rows * d * fl);
    f->normed = bump_alloc(base, &used, threads * d * fl);
    f->lora_hidden = bump_alloc(base, &used, MAX_FUSED * rows * RANK_CHUNK * fl);
    f->scores = bump_alloc(base, &used, threads * MAX_QUERIES * len * fl);
    f->attn_scratch = bump_alloc(base, &used, threads * attention_scratch_bytes(c));
    f->key_first = bump_alloc(base, &used, rows * sizeof *f->key_first);
    f->key_end = bump_alloc(base, &used, rows * sizeof *f->key_end);
    f->cos = bump_alloc(base, &used, rope * fl);
    f->sin = bump_alloc(base, &used, rope * fl);
    if (c->rope_local_theta > 0.0f) {
        f->cos_local = bump_alloc(base, &used, rope * fl);
        f->sin_local = bump_alloc(base, &used, rope * fl);
    }
    f->signs = bump_alloc(base, &used, threads * widest * fl);
    f->blocks = bump_alloc(base, &used, rows * sizeof *f->blocks);
    f->requested_rows = bump_alloc(base, &used, rows * sizeof *f->requested_rows);
    f->requested_segs = bump_alloc(base, &used, rows * sizeof *f->requested_segs);
    f->requested_outs = bump_alloc(base, &used, rows * sizeof *f->requested_outs);
    f->attention_cost = bump_alloc(base, &used, (rows + 1) * sizeof(int64_t));
    f->tasks =
        bump_alloc(base, &used, MAX_FUSED * (2 + (size_t)o->max_parts) * sizeof(struct gemm_task));
    f->prefetch_ranges =
        bump_alloc(base, &used, MAX_FUSED * (size_t)o->max_parts * sizeof(struct prefetch_range));
    f->input_scratch = bump_alloc(base, &used, inputs_scratch_bytes(o->max_rows, (int64_t)widest));
    f->lora_scratch = bump_alloc(base, &used, threads * lora_scratch_bytes());
    if (!kernels_get()->gemm_tiles) return used;
    f->act_tiles = bump_alloc(base, &used, (rows + 15) / 16 * 16 * ((ff + 31) / 32 * 32) * 2);
    f->low_rank_tiles =
        bump_alloc(base, &used, MAX_FUSED * low_rank_tiles_size(o) * sizeof *f->low_rank_tiles);
    f->low_rank_rows = bump_alloc(base, &used, MAX_FUSED * rows * sizeof *f->low_rank_rows);
    f->low_rank_parts =
        bump_alloc(base, &used, MAX_FUSED * (size_t)o->max_parts * sizeof *f->low_rank_parts);
    return used;
}

size_t forward_bytes(const struct model_config *c, const struct forward_options *o) {
    struct forward f;
    struct forward_options r = options_resolve(o);
    struct kv_cache_options ko = kv_cache_options_of(&r);
    return sizeof f + 64 + buffers_layout(&f, c, &r, NULL) + kv_cache_bytes(c, &ko);
}

struct forward *forward_new(const struct model *m, const struct forward_options *o) {
    CHECK(o->max_rows > 0 && o->n_slots > 0 && o->slot_len > 0);
    CHECK(m->config.n_heads % m->config.n_kv_heads == 0 && m->config.head_dim % 2 == 0);
    CHECK(!m->config.arch->learned_pos || o->slot_len <= m->config.max_seq_len);
    struct forward *f = xcalloc(1, sizeof *f);
    f->m = m;
    f->o = options_resolve(o);
    f->kern = kernels_get();
    struct kv_cache_options ko = kv_cache_options_of(&f->o);
    f->kv = kv_cache_new(&m->config, &ko);
    f->slab = calloc(1, buffers_layout(f, &m->config, &f->o, NULL) + 64);
    if (!f->kv || !f->slab) {
        forward_free(f);
        return NULL;
    }
    buffers_layout(f, &m->config, &f->o, (uint8_t *)(((uintptr_t)f->slab + 63) & ~(uintptr_t)63));
    rope_table(&m->config, o->slot_len, f->cos, f->sin);
    if (m->config.rope_local_theta > 0.0f)
        rope_table_local(&m->config, o->slot_len, f->cos_local, f->sin_local);
    return f;
}

void forward_free(struct forward *f) {
    if (!f) return;
    kv_cache_free(f->kv);
    free(f->slab);
    free(f);
}

struct kv_cache *forward_kv_cache(const struct forward *f) {
    return f->kv;
}

const struct forward_stats *forward_stats(const struct forward *f) {
    return &f->stats;
}

const float *forward_hidden(const struct forward *f) {
    return f->hidden;
}

static struct pool *pool_for(const struct forward *f, int64_t cost) {
    return cost >= MIN_PARALLEL ? f->o.pool : NULL;
}

static const struct lora_module *part_module(const struct lora_part *p, int32_t layer,
                                             enum proj proj) {
    return p->pack ? lora_module_at(p->pack, layer, proj) : NULL;
}

static int64_t module_rank(const struct lora_module *m) {
    return m ? m->r : 1;
}

/* Columns of t that a part takes: even, so that rounds never split the pairs of int8 factors. */
static int64_t part_width(int64_t r) {
    return (r + 1) / 2 * 2;
}

static float *signs_buffer(const struct forward *f, int thread) {
    const struct model_config *c = &f->m->config;
    return f->signs + (int64_t)thread * MAX(MAX(c->d_model, c->n_heads * c->head_dim), c->d_ff);
}

/* Multiplies the first n columns of each row of t by gain · weight, eight columns at a time so that
 * the compiler uses vector instructions. */
static void gains_apply(float *t, int64_t rows, const float *gain, float weight, int64_t n) {
    float factor[RANK_CHUNK];
    for (int64_t r = 0; r < n; r++) factor[r] = gain[r] * weight;
    for (int64_t i = 0; i < rows; i++, t += RANK_CHUNK) {
        int64_t r = 0;
        for (; r + 8 <= n; r += 8)
            for (int l = 0; l < 8; l++) t[r + l] *= factor[r + l];
        for (; r < n; r++) t[r] *= factor[r];
    }
}

/* t = weight · gain · A x for ranks [n0, n1) of the task. */
static void lora_down_range(const struct forward *f, const struct gemm_task *j, int64_t n0,
                            int64_t n1, int thread) {
    const struct lora_part *p = j->part;
    float *t = j->t + j->t_column;
    const int32_t first = j->in->path == ROWS_EXACT ? 0 : f->n_exact;
    struct gemm_input in = gemm_input_rows(j->in, j->seg->begin - first, j->seg->end - first);
    if (!p->pack) {
        float *v = signs_buffer(f, thread);
        lora_perturbation_signs(&p->noise, f->layer, j->proj, false, 0, j->k,
                                in.q ? DTYPE_I8 : DTYPE_F32, v);
        if (in.q)
            f->kern->gemm_i8_i8(t, RANK_CHUNK, &in, (const int8_t *)v, j->k, 0, 1);
        else
            gemm_nt(DTYPE_F32, t, RANK_CHUNK, in.x, in.ldx, j->rows, v, j->k, j->k, 0, 1, false);
        for (int64_t i = 0; i < j->rows; i++) t[i * RANK_CHUNK] *= p->weight;
        return;
    }
    const struct lora_module *m = j->module;
    const char *a = (const char *)m->a + j->first_rank * j->k * (int64_t)dtype_size(p->pack->elem);
    if (j->in->tiles) {
        const struct matrix rows = matrix_view(p->pack->elem, false, a, j->n, j->k);
        in = gemm_input_tile_rows(j->in, j->seg->begin - first, j->seg->end - first);
        f->kern->gemm_tiles(t - in.skip * RANK_CHUNK, RANK_CHUNK, &in, &rows, n0, n1, false);
    } else if (p->pack->elem == DTYPE_I8 && in.q) {
        f->kern->gemm_i8_i8(t, RANK_CHUNK, &in, (const int8_t *)a, j->k, n0, n1);
    } else {
        gemm_nt(p->pack->elem, t, RANK_CHUNK, in.x, in.ldx, j->rows, a, j->k, j->k, n0, n1, false);
    }
    gains_apply(t + n0, j->rows, m->gain + j->first_rank + n0, p->weight, n1 - n0);
}

/* The first segment that ends after row i, or n_segs. */
static int32_t segment_lower_bound(const struct forward *f, int64_t i) {
    int32_t lo = 0, hi = f->n_segs;
    while (lo < hi) {
        int32_t mid = (lo + hi) / 2;
        if (f->segs[mid].end <= i)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Cost of one output of a task, in multiply-adds of packed weights. */
static int64_t task_output_cost(const struct gemm_task *j) {
    return j->rows * j->k * (j->kind == TASK_BASE ? 1 : j->kind == TASK_GATED ? 2 : LORA_COST);
}

/* Computes outputs [n0, n1) of a base product. It also prefetches the LoRA factors for the tasks
 * that follow, each range of outputs its share. */
static void base_task_run_range(const struct forward *f, const struct gemm_task *j, int64_t n0,
                                int64_t n1) {
    int64_t unit = task_output_cost(j),
            lo = f->n_prefetch_ranges * (j->start_cost + n0 * unit) / f->base_tasks_cost,
            hi = f->n_prefetch_ranges * (j->start_cost + n1 * unit) / f->base_tasks_cost;
    struct prefetch_list a = {f->prefetch_ranges + lo, hi - lo, 0, 0};
    struct gemm_input in = *j->in;
    if (a.n > 0) in.prefetch = &a;
    in.low_rank = j->low_rank;
    matrix_mul_range(j->y, j->ldy, &in, j->w, n0, n1, j->add);
}

/* Computes outputs [n0, n1) of the task. */
static void task_run_range(const struct forward *f, const struct gemm_task *j, int64_t n0,
                           int64_t n1, int thread) {
    struct gemm_input in = *j->in;
    switch (j->kind) {
    case TASK_BASE:
        base_task_run_range(f, j, n0, n1);
        return;
    case TASK_GATED:
        in.low_rank = j->low_rank;
        f->kern->gemm_tiles_silu(&j->gated, &in, n0, n1);
        return;
    case TASK_LORA_DOWN:
        lora_down_range(f, j, n0, n1, thread);
        return;
    }
}

/* The task's output at which the list reaches `cost`, rounded down to OUTPUT_ALIGN. The share that
 * ends at `cost` and the share that begins at `cost` get the same value. */
static int64_t task_output_at(const struct gemm_task *j, int64_t cost) {
    int64_t unit = task_output_cost(j);
    if (cost <= j->start_cost) return 0;
    if (cost >= j->start_cost + j->n * unit) return j->n;
    return (cost - j->start_cost) / unit / OUTPUT_ALIGN * OUTPUT_ALIGN;
}

/* The last task that begins at or before `cost`. */
static int task_find(const struct forward *f, int64_t cost) {
    int lo = 0, hi = f->n_tasks - 1;
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        if (f->tasks[mid].start_cost <= cost)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

static void tasks_run_shares(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    int64_t lo = f->tasks_cost * begin / f->n_work_shares,
            hi = f->tasks_cost * end / f->n_work_shares;
    for (int i = task_find(f, lo); i < f->n_tasks && f->tasks[i].start_cost < hi; i++) {
        const struct gemm_task *j = &f->tasks[i];
        int64_t n0 = task_output_at(j, lo), n1 = task_output_at(j, hi);
        if (n0 < n1) task_run_range(f, j, n0, n1, thread);
    }
}

static void task_add(struct forward *f, struct gemm_task j) {
    CHECK(f->n_tasks < MAX_FUSED * (2 + f->o.max_parts));
    j.start_cost = f->tasks_cost;
    f->tasks[f->n_tasks++] = j;
    f->tasks_cost += j.n * task_output_cost(&j);
    if (j.kind == TASK_BASE) f->base_tasks_cost = f->tasks_cost;
}

static void base_task_add_rows(struct forward *f, const struct matrix *w,
                               const struct gemm_input *in, const struct gemm_low_rank *low,
                               float *y, bool add) {
    if (in->rows == 0) return;
    task_add(f, (struct gemm_task){.kind = TASK_BASE,
                                   .w = w,
                                   .in = in,
                                   .low_rank = low && low->n > 0 ? low : NULL,
                                   .y = y,
                                   .ldy = w->n,
                                   .rows = in->rows,
                                   .k = w->k,
                                   .n = w->n,
                                   .add = add});
    f->stats.weight_passes++;
}

static void base_task_add(struct forward *f, const struct matrix *w, const struct row_inputs *in,
                          const struct gemm_low_rank *low, float *y, bool add) {
    base_task_add_rows(f, w, &in->exact, NULL, y, add);
    base_task_add_rows(f, w, &in->known, low, y + in->exact.rows * w->n, add);
}

/* Scratch for inputs of known rows: it follows that of the exact rows. */
static void *known_input_scratch(const struct forward *f, int64_t n_exact, int64_t k) {
    return (char *)f->input_scratch + (n_exact > 0 ? gemm_input_scratch(n_exact, k) : 0);
}

/* Converts rows x [n_exact + n_known][K] to the forms that n matrices need. */
static struct row_inputs inputs_prepare(const struct forward *f, const struct matrix *w, int n,
                                        const float *x, int64_t n_exact, int64_t n_known) {
    void *second = known_input_scratch(f, n_exact, w->k);
    return (struct row_inputs){
        .exact = gemm_input_for(w, n, x, n_exact, ROWS_EXACT, f->input_scratch, f->o.pool),
        .known = gemm_input_for(w, n, x + n_exact * w->k, n_known, ROWS_KNOWN, second, f->o.pool)};
}

/* inputs_prepare for all rows of the call. */
static struct row_inputs inputs_prepare_all(const struct forward *f, const struct matrix *w, int n,
                                            const float *x) {
    return inputs_prepare(f, w, n, x, f->n_exact, f->n_rows - f->n_exact);
}

/* Whether the products of known rows with n matrices read only tiles. Perturbations read f32. */
static bool known_rows_use_tiles(const struct forward *f, const struct matrix *w, int n) {
    for (int i = 0; i < n; i++)
        if (!matrix_uses_tiles(&w[i], ROWS_KNOWN)) return false;
    for (int32_t s = segment_lower_bound(f, f->n_exact); s < f->n_segs; s++)
        for (int32_t i = 0; i < f->segs[s].n_parts; i++)
            if (!f->segs[s].parts[i].pack) return false;
    return f->n_exact < f->n_rows;
}

/* Empty tiles for the known rows, to be packed row by row, if their products with n matrices read
 * only tiles; else an input with tiles NULL. */
static struct gemm_input known_input_tiles(const struct forward *f, const struct matrix *w, int n) {
    if (!known_rows_use_tiles(f, w, n)) return (struct gemm_input){0};
    return gemm_input_tiles(f->n_rows - f->n_exact, w->k, ROWS_KNOWN,
                            known_input_scratch(f, f->n_exact, w->k));
}

/* inputs_prepare_all, except that the known rows may be packed in `tiles` already. */
static struct row_inputs inputs_with_tiles(const struct forward *f, const struct matrix *w, int n,
                                           const float *x, const struct gemm_input *tiles) {
    if (!tiles->tiles) return inputs_prepare_all(f, w, n, x);
    struct row_inputs in = inputs_prepare(f, w, n, x, f->n_exact, 0);
    in.known = *tiles;
    return in;
}

/* Runs all tasks and empties the list. */
static void tasks_run(struct forward *f) {
    if (f->n_tasks == 0) return;
    double t0 = clock_now();
    struct pool *pool = pool_for(f, f->tasks_cost);
    f->n_work_shares = pool ? N_WORK_SHARES : 1;
    pool_run(pool, tasks_run_shares, f, f->n_work_shares, 1);
    f->n_tasks = f->n_prefetch_ranges = 0;
    f->tasks_cost = f->base_tasks_cost = 0;
    f->stats.kernel_seconds += clock_now() - t0;
}

/* DoRA's multipliers of a segment's one adapter, or NULL. */
static const float *dora_mult(const struct forward *f, const struct lora_segment *g, enum proj p) {
    if (!g || g->n_parts != 1 || !g->parts[0].pack) return NULL;
    return lora_module_at(g->parts[0].pack, f->layer, p)->dora_scale;
}

/* Whether a segment's LoRA update is fused into the base product, which then accumulates it in the
 * same chain of sums (gemm_input.low_rank), instead of being a separate product. The result depends
 * only on the rows and their adapters, so that bits do not depend on the rest of the batch. */
static bool segment_is_fused(const struct forward *f, const struct lora_segment *g, enum proj p) {
    const struct model_layer *l = &f->m->layers[f->layer];
    int64_t ranks = 0;
    if (g->begin < f->n_exact || !matrix_uses_tiles(&l->proj[p], ROWS_KNOWN)) return false;
    for (int32_t i = 0; i < g->n_parts; i++) {
        if (!g->parts[i].pack) return false;
        ranks += part_width(module_rank(part_module(&g->parts[i], f->layer, p)));
    }
    return ranks <= LOW_RANK_MAX && !dora_mult(f, g, p);
}

/* Adds both factors of a module, which are contiguous in memory, to the prefetch list. */
static void lora_prefetch_add(struct forward *f, const struct lora_module *m) {
    f->prefetch_ranges[f->n_prefetch_ranges++] =
        (struct prefetch_range){m->a, (const char *)(m->gain + m->r) - (const char *)m->a};
}

/* Adds the tasks of A for ranks [r0, r0 + RANK_CHUNK) of all parts of every segment that is not
 * fused; the ranks of a segment's parts are numbered consecutively. Their outputs go to `low` [B,
 * RANK_CHUNK]. Returns the largest number of ranks from r0 on in any segment; a value below 1 means
 * that no ranks are left. */
static int64_t lora_down_tasks(struct forward *f, enum proj p, const struct row_inputs *in,
                               float *low, int64_t r0) {
    int64_t out = proj_out(&f->m->config, p), max_ranks = 0;
    for (int32_t s = 0; s < f->n_segs; s++) {
        const struct lora_segment *g = &f->segs[s];
        if (segment_is_fused(f, g, p)) continue;
        struct gemm_task j = {.kind = TASK_LORA_DOWN,
                              .seg = g,
                              .proj = p,
                              .in = g->begin < f->n_exact ? &in->exact : &in->known,
                              .t = low + (int64_t)g->begin * RANK_CHUNK,
                              .rows = g->end - g->begin,
                              .k = proj_in(&f->m->config, p)};
        int64_t column = -r0;
        for (int32_t i = 0; i < g->n_parts; i++) {
            const struct lora_module *m = part_module(&g->parts[i], f->layer, p);
            int64_t r = module_rank(m), lo = MAX(-column, 0), hi = MIN(r, RANK_CHUNK - column);
            if (lo < hi) {
                j.part = &g->parts[i];
                j.module = m;
                j.n = hi - lo;
                j.first_rank = lo;
                j.t_column = column + lo;
                task_add(f, j);
                if (r0 == 0 && m) lora_prefetch_add(f, m);
            }
            column += part_width(r);
        }
        f->lora_up_cost += LORA_COST * j.rows * out * MAX(MIN(column, RANK_CHUNK), 0);
        max_ranks = MAX(max_ranks, column);
    }
    return max_ranks;
}

struct projection {
    enum proj p;
    float *y; /* [B, out] */
    bool add; /* accumulate into y, which holds the residual stream */
};

/* Lists in f->low_rank[i] the parts whose updates are fused into product i. */
static void fused_lora_list(struct forward *f, enum proj p, int i) {
    struct low_rank_rows *rows = f->low_rank_rows + (int64_t)i * f->o.max_rows;
    struct low_rank_part *part = f->low_rank_parts + (int64_t)i * f->o.max_parts;
    const int64_t out = proj_out(&f->m->config, p);
    f->low_rank[i] = (struct gemm_low_rank){
        .t = {f->low_rank_tiles + i * low_rank_tiles_size(&f->o)}, .rows = rows};
    for (int32_t s = segment_lower_bound(f, f->n_exact); s < f->n_segs; s++) {
        const struct lora_segment *g = &f->segs[s];
        struct low_rank_rows r = {
            .begin = g->begin - f->n_exact, .end = g->end - f->n_exact, .parts = {part}};
        if (!segment_is_fused(f, g, p)) continue;
        for (int64_t k = 0, column = 0; k < g->n_parts; k++) {
            const struct lora_module *m = part_module(&g->parts[k], f->layer, p);
            const enum dtype e = g->parts[k].pack->elem;
            if (m->r > 0)
                *part++ =
                    (struct low_rank_part){matrix_view(e, e == DTYPE_I8, m->bt, m->r, out), column};
            column += part_width(m->r);
        }
        r.n_parts[0] = (int)(part - r.parts[0]);
        if (r.n_parts[0] > 0) rows[f->low_rank[i].n++] = r;
    }
}

struct fused_lora_job {
    struct forward *f;
    const struct gemm_input *in; /* known rows */
    const struct projection *projections;
    int64_t blocks; /* number of blocks of LORA_UP_TILE_ROWS rows */
};

/* t = weight · gain · A x of all parts for rows [begin, end) of the inputs, in tiles. */
static void fused_lora_down(const struct fused_lora_job *j, const struct lora_segment *g, int i,
                            int64_t begin, int64_t end) {
    struct forward *f = j->f;
    float *t = f->lora_hidden + ((int64_t)i * f->o.max_rows + f->n_exact + begin) * RANK_CHUNK;
    const struct gemm_input in = gemm_input_tile_rows(j->in, begin, end);
    memset(t, 0, (size_t)(end - begin) * RANK_CHUNK * sizeof *t);
    for (int64_t k = 0, column = 0; k < g->n_parts; k++) {
        const struct lora_part *p = &g->parts[k];
        const struct lora_module *m = part_module(p, f->layer, j->projections[i].p);
        const struct matrix a = matrix_view(p->pack->elem, false, m->a, m->r, j->in->k);
        if (m->r > 0) {
            f->kern->gemm_tiles(t + column - in.skip * RANK_CHUNK, RANK_CHUNK, &in, &a, 0, m->r,
                                false);
            gains_apply(t + column, end - begin, m->gain, p->weight, m->r);
        }
        column += part_width(m->r);
    }
    gemm_low_rank_pack(f->low_rank_tiles + (size_t)i * low_rank_tiles_size(&f->o), begin, t,
                       RANK_CHUNK, end - begin, RANK_CHUNK);
}

/* Items are blocks of rows, of one product after the other. */
static void fused_lora_down_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct fused_lora_job *j = ctx;
    const struct forward *f = j->f;
    (void)thread;
    for (int64_t item = begin; item < end; item++) {
        const int i = (int)(item / j->blocks);
        const int64_t r0 = item % j->blocks * LORA_UP_TILE_ROWS + f->n_exact,
                      r1 = MIN(r0 + LORA_UP_TILE_ROWS, f->n_rows);
        for (int32_t s = segment_lower_bound(f, r0); s < f->n_segs && f->segs[s].begin < r1; s++)
            if (segment_is_fused(f, &f->segs[s], j->projections[i].p))
                fused_lora_down(j, &f->segs[s], i, MAX(r0, f->segs[s].begin) - f->n_exact,
                                MIN(r1, f->segs[s].end) - f->n_exact);
    }
}

/* Sets f->low_rank for n products of the same inputs, and computes their t. */
static void fused_lora_prepare(struct forward *f, const struct gemm_input *in,
                               const struct projection *v, int n) {
    struct fused_lora_job j = {f, in, v, (in->rows + LORA_UP_TILE_ROWS - 1) / LORA_UP_TILE_ROWS};
    int lists = 0;
    for (int i = 0; i < n; i++) {
        f->low_rank[i].n = 0;
        if (in->tiles) fused_lora_list(f, v[i].p, i);
        lists += f->low_rank[i].n;
    }
    if (lists == 0) return;
    double t0 = clock_now();
    pool_run(pool_for(f, in->rows * in->k * 16), fused_lora_down_items, &j, n * j.blocks, 1);
    f->stats.kernel_seconds += clock_now() - t0;
}

/* The segment that contains row i, or NULL. */
static const struct lora_segment *segment_of(const struct forward *f, int64_t i) {
    int32_t s = segment_lower_bound(f, i);
    return s < f->n_segs && f->segs[s].begin <= i ? &f->segs[s] : NULL;
}

/*
 * DoRA scales a complete product, including the base part. A product that is added to the residual
 * stream must therefore first be computed in another buffer: f->h, which is unused at that point.
 * For rows without DoRA, the base product is then added from f->h in one addition, as in a batch
 * without DoRA rows, so their bits are independent of the other rows of the batch.
 */
struct dora_forward_job {
    const struct forward *f;
    const struct projection *projections;
    const float *dora_out; /* [B, out] or NULL */
    int64_t out;
};

static bool any_segment_has_dora(const struct forward *f, enum proj p) {
    for (int32_t s = 0; s < f->n_segs; s++)
        if (dora_mult(f, &f->segs[s], p)) return true;
    return false;
}

static float *dora_output_buffer(const struct forward *f, const struct projection *v, int n) {
    if (!v->add || !any_segment_has_dora(f, v->p)) return NULL;
    CHECK(n == 1 && proj_out(&f->m->config, v->p) == f->m->config.d_model);
    return f->h;
}

static void add_rows_without_dora(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct dora_forward_job *j = ctx;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        if (dora_mult(j->f, segment_of(j->f, i), j->projections->p)) continue;
        float *y = j->projections->y + i * j->out;
        for (int64_t n = 0; n < j->out; n++) y[n] += j->dora_out[i * j->out + n];
    }
}

static void scale_rows_with_dora(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct dora_forward_job *j = ctx;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const float *mult = dora_mult(j->f, segment_of(j->f, i), j->projections->p);
        float *y = j->projections->y + i * j->out;
        for (int64_t n = 0; mult && n < j->out; n++)
            y[n] = j->dora_out ? y[n] + mult[n] * j->dora_out[i * j->out + n] : mult[n] * y[n];
    }
}

static void dora_run_rows(const struct forward *f, const struct projection *v,
                          const float *dora_out, pool_fn fn) {
    struct dora_forward_job j = {
        .f = f, .projections = v, .dora_out = dora_out, .out = proj_out(&f->m->config, v->p)};
    pool_run(pool_for(f, 4 * f->n_rows * j.out), fn, &j, f->n_rows, 1);
}

/* The operations on each row after a product; run NULL: none. */
struct epilogue {
    pool_fn run;
    void *ctx;
    int64_t cost; /* cost of all rows */
};

/* LoRA's up projections of one round of ranks, followed by the epilogue. */
struct lora_up {
    const struct forward *f;
    const struct projection *projections;
    int n;
    bool tiles; /* known rows are in tiles */
    float *dora_out;
    int64_t r0; /* the round's first rank */
    struct epilogue epilogue;
};

/* y += t Bᵀ in tiles for `n` ranks of a part. */
static void lora_up_tiles(const struct forward *f, float *y, int64_t width, const float *t,
                          int64_t rows, enum dtype e, const void *bt, int64_t n, int thread) {
    const struct matrix b = matrix_view(e, e == DTYPE_I8, bt, n, width);
    struct gemm_input in;
    CHECK(rows <= LORA_UP_TILE_ROWS);
    gemm_input_prepare(&in, t, RANK_CHUNK, rows, n, false, true,
                       f->lora_scratch + (size_t)thread * lora_scratch_bytes(), NULL);
    f->kern->gemm_tiles_backward(y, width, &in, &b, 0, 0, width, true);
}

/* y += Σ_r t_r b_r for product i and rows [begin, end) of a segment, over the ranks of this round,
 * in the order of the parts. */
static void lora_up_rows(const struct lora_up *b, const struct lora_segment *g, int i,
                         int64_t begin, int64_t end, int thread) {
    const struct forward *f = b->f;
    const enum proj proj = b->projections[i].p;
    const int64_t n = proj_out(&f->m->config, proj), rows = end - begin;
    const float *t = f->lora_hidden + (i * (int64_t)f->o.max_rows + begin) * RANK_CHUNK;
    float *y =
        (b->dora_out && dora_mult(f, g, proj) ? b->dora_out : b->projections[i].y) + begin * n;
    int64_t column = -b->r0; // index in t of the part's first rank
    for (int32_t k = 0; k < g->n_parts && column < RANK_CHUNK; k++) {
        const struct lora_part *p = &g->parts[k];
        const struct lora_module *m = part_module(p, f->layer, proj);
        int64_t r = module_rank(m), lo = MAX(-column, 0), hi = MIN(r, RANK_CHUNK - column);
        if (lo < hi && !m) {
            float *u = signs_buffer(f, thread);
            lora_perturbation_signs(&p->noise, f->layer, proj, true, 0, n, DTYPE_F32, u);
            gemm_nn(DTYPE_F32, y, n, t + column, RANK_CHUNK, 1, rows, u, n, 1, n);
        } else if (lo < hi) {
            enum dtype e = p->pack->elem;
            const char *bt = (const char *)m->bt + lo * n * (int64_t)dtype_size(e);
            if (b->tiles && g->begin >= f->n_exact)
                lora_up_tiles(f, y, n, t + column + lo, rows, e, bt, hi - lo, thread);
            else if (e == DTYPE_I8)
                gemm_nn_i8_pairs(y, n, t + column + lo, RANK_CHUNK, rows, (const int8_t *)bt, n,
                                 hi - lo, n);
            else
                gemm_nn(e, y, n, t + column + lo, RANK_CHUNK, 1, rows, bt, n, hi - lo, n);
        }
        column += part_width(r);
    }
}

/* Processes blocks of rows that stay in the caches until their epilogue is done. */
static void lora_up_run_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct lora_up *b = ctx;
    const struct forward *f = b->f;
    for (int64_t stop; begin < end; begin = stop) {
        stop =
            MIN(begin + (b->tiles && begin >= f->n_exact ? LORA_UP_TILE_ROWS : LORA_UP_ROWS), end);
        for (int32_t s = segment_lower_bound(f, begin); s < f->n_segs && f->segs[s].begin < stop;
             s++)
            for (int i = 0; i < b->n; i++)
                if (!segment_is_fused(f, &f->segs[s], b->projections[i].p))
                    lora_up_rows(b, &f->segs[s], i, MAX(begin, f->segs[s].begin),
                                 MIN(stop, f->segs[s].end), thread);
        if (b->epilogue.run) b->epilogue.run(b->epilogue.ctx, begin, stop, thread);
    }
}

static void epilogue_run(const struct forward *f, const struct epilogue *a) {
    if (a->run) pool_run(pool_for(f, a->cost), a->run, a->ctx, f->n_rows, 1);
}

static void lora_up_run(struct forward *f, struct lora_up *b) {
    double t0 = clock_now();
    pool_run(pool_for(f, f->lora_up_cost + b->epilogue.cost), lora_up_run_rows, b, f->n_rows,
             f->n_rows < 8 * LORA_UP_ROWS  ? 1
             : b->tiles && f->n_exact == 0 ? LORA_UP_ROWS
                                           : 8);
    f->stats.kernel_seconds += clock_now() - t0;
}

/* y = x Wᵀ + Σ_parts t Bᵀ, or with `add` y += …, for n products that share one input; then the
 * epilogue. */
static void products_run(struct forward *f, const struct row_inputs *in, const struct projection *v,
                         int n, struct epilogue epilogue) {
    const struct model_layer *layer = &f->m->layers[f->layer];
    int64_t low = (int64_t)f->o.max_rows * RANK_CHUNK;
    float *dora_buffer = dora_output_buffer(f, v, n);
    bool dora = false;
    fused_lora_prepare(f, &in->known, v, n);
    for (int i = 0; i < n; i++) {
        dora |= any_segment_has_dora(f, v[i].p);
        base_task_add(f, &layer->proj[v[i].p], in, &f->low_rank[i],
                      dora_buffer ? dora_buffer : v[i].y, v[i].add && !dora_buffer);
    }
    for (int64_t r0 = 0, max_ranks;; r0 += RANK_CHUNK) {
        max_ranks = f->lora_up_cost = 0;
        for (int i = 0; i < n; i++) {
            int64_t ranks = lora_down_tasks(f, v[i].p, in, f->lora_hidden + i * low, r0);
            max_ranks = MAX(max_ranks, ranks);
        }
        tasks_run(f);
        if (dora_buffer && r0 == 0) dora_run_rows(f, &v[0], dora_buffer, add_rows_without_dora);
        if (max_ranks <= 0) break;
        struct lora_up b = {.f = f,
                            .projections = v,
                            .n = n,
                            .tiles = in->known.tiles,
                            .dora_out = dora_buffer,
                            .r0 = r0};
        const bool last = max_ranks <= RANK_CHUNK && !dora;
        if (last) b.epilogue = epilogue;
        lora_up_run(f, &b);
        if (last) return;
    }
    for (int i = 0; i < n; i++)
        if (any_segment_has_dora(f, v[i].p))
            dora_run_rows(f, &v[i], dora_buffer, scale_rows_with_dora);
    epilogue_run(f, &epilogue);
}

struct norm_job {
    const struct forward *f;
    const float *x, *g, *b;   /* b: LayerNorm's bias, or NULL for an RMS norm */
    const int32_t *row_index; /* rows of x, or NULL: all in order */
    float *y;
    const struct gemm_input *tiles; /* or NULL; if it has tiles, known rows are packed into them and
                                       not written to y */
};

static void norm_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct norm_job *j = ctx;
    const struct forward *f = j->f;
    const struct model_config *c = &f->m->config;
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = j->row_index ? j->row_index[i] : i;
        const bool tiles = j->tiles && j->tiles->tiles && i >= f->n_exact;
        float *y = tiles ? f->normed + thread * c->d_model : j->y + i * c->d_model;
        norm_row(f->kern, y, j->x + row * c->d_model, j->g, j->b, c->rms_norm_eps, c->d_model);
        if (tiles) gemm_input_pack_row(j->tiles, i - f->n_exact, y);
    }
}

static void norm_run(struct norm_job *j, int64_t rows) {
    pool_run(pool_for(j->f, 4 * rows * j->f->m->config.d_model), norm_rows, j, rows, 1);
}

/* The residual stream after a norm, as the inputs of n matrices. The rows are in f->h, except for
 * known rows whose products read only tiles. */
static struct row_inputs norm_inputs(const struct forward *f, const struct matrix *w, int n,
                                     const float *g, const float *b) {
    const struct gemm_input tiles = known_input_tiles(f, w, n);
    struct norm_job j = {.f = f, .x = f->x, .g = g, .b = b, .y = f->h, .tiles = &tiles};
    norm_run(&j, f->n_rows);
    return inputs_with_tiles(f, w, n, f->h, &tiles);
}

static void embed_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    const struct arch *arch = f->m->config.arch;
    int64_t d = f->m->config.d_model;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int32_t token = f->rows[i].token;
        float *x = f->x + i * d, *pos = f->h + i * d;
        const struct lora_segment *g = segment_of(f, i);
        const struct vocab_override *override = g && g->vocab ? &g->vocab->embed : NULL;
        const float *row = override ? vocab_override_row(override, token, d) : NULL;
        if (row)
            memcpy(x, row, (size_t)d * sizeof *row);
        else
            matrix_get_row(&f->m->embed, token, x);
        if (override) embed_lora_add(&f->m->config, &override->lora, token, x);
        if (arch->scaled_embedding) f->kern->scale(x, sqrtf((float)d), d);
        if (!arch->learned_pos) continue;
        matrix_get_row(&f->m->pos_embed, f->rows[i].pos, pos);
        f->kern->axpy(x, 1.0f, pos, d);
    }
}

/* False when every output's adapter replaces the whole head. */
static bool is_base_head_needed(const struct forward *f, const int32_t *out_rows, int32_t n_out) {
    for (int32_t i = 0; i < n_out; i++) {
        const struct lora_segment *g = segment_of(f, out_rows[i]);
        if (!g || !g->vocab || !g->vocab->head.full) return true;
    }
    return false;
}

/* Consecutive outputs of one segment are one product. */
static void head_overrides_run(struct forward *f, const int32_t *out_rows, int32_t n_out,
                               float *logits) {
    const struct model_config *c = &f->m->config;
    for (int32_t begin = 0, end; begin < n_out; begin = end) {
        const struct lora_segment *g = segment_of(f, out_rows[begin]);
        for (end = begin + 1; end < n_out && segment_of(f, out_rows[end]) == g;) end++;
        if (g && g->vocab)
            head_override_apply(c, &g->vocab->head, f->hidden + (int64_t)begin * c->d_model,
                                end - begin, f->lora_hidden,
                                logits + (int64_t)begin * c->vocab_size, f->o.pool);
    }
}

/* Computes the input of the down projection in place, in f->gate. */
static void activation_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    const struct model_layer *l = &f->m->layers[f->layer];
    int64_t n = f->m->config.d_ff;
    (void)thread;
    for (int64_t i = begin; i < MIN(end, f->n_unfused_act); i++) {
        float *gate = f->gate + i * n, *up = f->up + i * n;
        if (l->bias[PROJ_GATE]) f->kern->axpy(gate, 1.0f, l->bias[PROJ_GATE], n);
        if (l->bias[PROJ_UP]) f->kern->axpy(up, 1.0f, l->bias[PROJ_UP], n);
        activation_row(f->kern, f->m->config.arch, gate, gate, up, n);
    }
}

/* The epilogue of a residual branch (attention or MLP): adds the bias to its output, then, if there
 * is a norm, adds the normed output to the residual stream. */
struct residual_branch {
    struct forward *f;
    const float *bias, *norm; /* either may be NULL */
};

/* With a norm, the branch's output is in f->h; without a norm, it has been added to f->x. */
static void residual_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct residual_branch *b = ctx;
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
static void residual_project(struct forward *f, const struct row_inputs *in, enum proj p,
                             const float *norm) {
    struct residual_branch b = {.f = f, .bias = f->m->layers[f->layer].bias[p], .norm = norm};
    struct epilogue epilogue = {b.bias || b.norm ? residual_rows : NULL, &b,
                                4 * (int64_t)f->n_rows * f->m->config.d_model};
    products_run(f, in, &(struct projection){p, norm ? f->h : f->x, !norm}, 1, epilogue);
}

static void rope_row(const struct forward *f, float *x, int64_t pos) {
    const struct model_config *c = &f->m->config;
    int64_t half = c->head_dim / 2;
    bool local = c->rope_local_theta > 0.0f && layer_is_sliding(c, f->layer);
    if (c->arch->learned_pos) return;
    f->kern->rope(x, (local ? f->cos_local : f->cos) + pos * half,
                  (local ? f->sin_local : f->sin) + pos * half, half);
}

/* Bias, norms and rotary embedding of one row's `n` heads, in place. */
static void heads_add_bias_norm_rope(const struct forward *f, float *x, int64_t row, int32_t n,
                                     const float *bias, const float *norm) {
    int64_t e = f->m->config.head_dim;
    x += row * n * e;
    if (bias) f->kern->axpy(x, 1.0f, bias, n * e);
    for (int32_t h = 0; h < n; h++, x += e) {
        if (norm) f->kern->rmsnorm(x, x, norm, f->m->config.rms_norm_eps, e);
        rope_row(f, x, f->rows[row].pos);
    }
}

static void query_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    const struct model_layer *l = &f->m->layers[f->layer];
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        heads_add_bias_norm_rope(f, f->q, i, f->m->config.n_heads, l->bias[PROJ_Q], l->q_norm);
}

/* Writes finished keys and values into the cache. */
static void kv_store_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    const struct model_config *c = &f->m->config;
    const struct model_layer *l = &f->m->layers[f->layer];
    int64_t e = c->head_dim, kv = c->n_kv_heads * e;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const struct batch_row *r = &f->rows[i];
        heads_add_bias_norm_rope(f, f->k, i, c->n_kv_heads, l->bias[PROJ_K], l->k_norm);
        if (l->bias[PROJ_V]) f->kern->axpy(f->v + i * kv, 1.0f, l->bias[PROJ_V], kv);
        for (int32_t g = 0; g < c->n_kv_heads; g++) {
            kv_cache_write(f->kv, r->slot, r->pos, f->layer, g, false, f->k + i * kv + g * e);
            kv_cache_write(f->kv, r->slot, r->pos, f->layer, g, true, f->v + i * kv + g * e);
        }
    }
}

static void qkv_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    query_rows(ctx, begin, end, thread);
    kv_store_rows(ctx, begin, end, thread);
}

/* Number of positions that a row attends to in this layer; the row's position is the last. */
static int32_t attention_len(const struct forward *f, const struct batch_row *r) {
    const struct model_config *c = &f->m->config;
    return layer_is_sliding(c, f->layer) ? MIN(r->pos + 1, c->sliding_window) : r->pos + 1;
}

/* True for known rows if the processor has attention in tiles for this width of heads. The result
 * depends on the row and not on the rest of the batch. */
static bool row_attends_in_tiles(const struct forward *f, int32_t row) {
    return f->kern->attention && row >= f->n_exact && f->m->config.head_dim <= ATTENTION_MAX_DIM;
}

/* n queries that read the same keys, `ld` floats apart in q and in attn. Query i belongs to
 * rows[i · step]. */
struct attention_block {
    const float *q;
    float *attn;
    int64_t n, ld;
    const struct batch_row *rows;
    int32_t step; /* 0: all queries belong to one row */
    int32_t slot, head;
};

/* A query attends to positions [query_first, query_end). */
static int32_t query_end(const struct attention_block *v, int64_t i) {
    return v->rows[i * v->step].pos + 1;
}

static int32_t query_first(const struct forward *f, const struct attention_block *v, int64_t i) {
    return query_end(v, i) - attention_len(f, &v->rows[i * v->step]);
}

/* scores[i][j] = q_i · k_j, for all positions that any query attends to and the other positions of
 * their pages. */
static void attention_scores(const struct forward *f, const struct attention_block *v,
                             float *scores) {
    int32_t end = query_end(v, v->n - 1);
    int64_t e = f->m->config.head_dim, ld = f->o.slot_len;
    for (int32_t page = query_first(f, v, 0) / KV_PAGE_SIZE; page * KV_PAGE_SIZE < end; page++) {
        struct kv_cache_rows k = kv_cache_at(f->kv, v->slot, page, f->layer, v->head, false);
        gemm_nt(f->o.kv_elem, scores + page * KV_PAGE_SIZE, ld, v->q, v->ld, v->n, k.v, e, e, 0,
                MIN(end - page * KV_PAGE_SIZE, KV_PAGE_SIZE), false);
    }
}

/* x[i] *= by[i]; blocks of constant length are vectorised. */
static void multiply(float *restrict x, const float *restrict by, int n) {
    enum { BLOCK = 8 };
    int i = 0;
    for (; i + BLOCK <= n; i += BLOCK)
        for (int l = 0; l < BLOCK; l++) x[i + l] *= by[i + l];
    for (; i < n; i++) x[i] *= by[i];
}

/* Multiplies the scores of all queries by the scales of int8 keys or values. The scales of a page
 * are converted once for all queries, as the product 1 · scales, which is exact. Scores of
 * positions to which a query does not attend are multiplied as well; they are not used. */
static void attention_scores_dequantize(const struct forward *f, const struct attention_block *v,
                                        float *scores, bool values) {
    const int32_t end = query_end(v, v->n - 1);
    if (f->o.kv_elem != DTYPE_I8) return;
    for (int32_t page = query_first(f, v, 0) / KV_PAGE_SIZE; page * KV_PAGE_SIZE < end; page++) {
        const uint16_t *d = kv_cache_at(f->kv, v->slot, page, f->layer, v->head, values).d;
        const int n = MIN(end - page * KV_PAGE_SIZE, KV_PAGE_SIZE);
        float one = 1.0f, scale[KV_PAGE_SIZE] = {0};
        gemm_nn(DTYPE_F16, scale, KV_PAGE_SIZE, &one, 1, 1, 1, d, KV_PAGE_SIZE, 1, KV_PAGE_SIZE);
        for (int64_t i = 0; i < v->n; i++)
            multiply(scores + i * f->o.slot_len + page * KV_PAGE_SIZE, scale, n);
    }
}

/* attn_i += Σ_j p_ij v_j over positions [lo, hi) of one page, for n queries from i on. */
static void page_add_values(const struct forward *f, const struct attention_block *v,
                            const float *p, int64_t i, int64_t n, int32_t page, int32_t lo,
                            int32_t hi) {
    if (lo >= hi) return;
    int64_t e = f->m->config.head_dim, es = (int64_t)dtype_size(f->o.kv_elem), ld = f->o.slot_len;
    const char *rows = kv_cache_at(f->kv, v->slot, page, f->layer, v->head, true).v;
    gemm_nn(f->o.kv_elem, v->attn + i * v->ld, v->ld, p + i * ld + page * KV_PAGE_SIZE + lo, ld, 1,
            n, rows + lo * e * es, e, hi - lo, e);
}

/* Adds a page's values in the order of positions. Positions that all queries attend to are one
 * product; those before and after this range are added query by query. */
static void attention_values(const struct forward *f, const struct attention_block *v,
                             const float *p, int32_t page) {
    int32_t lo[MAX_QUERIES], hi[MAX_QUERIES], all_lo = 0, all_hi = KV_PAGE_SIZE;
    for (int64_t i = 0; i < v->n; i++) {
        lo[i] = MIN(MAX(query_first(f, v, i) - page * KV_PAGE_SIZE, 0), KV_PAGE_SIZE);
        hi[i] = MIN(MAX(query_end(v, i) - page * KV_PAGE_SIZE, 0), KV_PAGE_SIZE);
        all_lo = MAX(all_lo, lo[i]);
        all_hi = MIN(all_hi, hi[i]);
    }
    if (all_lo >= all_hi) all_lo = all_hi = KV_PAGE_SIZE;
    for (int64_t i = 0; i < v->n; i++)
        page_add_values(f, v, p, i, 1, page, lo[i], MIN(all_lo, hi[i]));
    page_add_values(f, v, p, 0, v->n, page, all_lo, all_hi);
    for (int64_t i = 0; i < v->n; i++)
        page_add_values(f, v, p, i, 1, page, MAX(all_hi, lo[i]), hi[i]);
}

static float score_scale(const struct model_config *c) {
    return 1.0f /
           sqrtf(c->query_pre_attn_scalar > 0.0f ? c->query_pre_attn_scalar : (float)c->head_dim);
}

/* Attention of all queries of a block; `scores` [n][slot_len] is scratch. */
static void attention_queries(const struct forward *f, const struct attention_block *v,
                              float *scores) {
    const struct model_config *c = &f->m->config;
    int64_t e = c->head_dim;
    float inverse_sum[MAX_QUERIES], scale = score_scale(c);
    attention_scores(f, v, scores);
    attention_scores_dequantize(f, v, scores, false);
    for (int64_t i = 0; i < v->n; i++) {
        int32_t first = query_first(f, v, i), end = query_end(v, i);
        float *s = scores + i * f->o.slot_len;
        f->kern->scale(s + first, scale, end - first);
        inverse_sum[i] = 1.0f / f->kern->softmax(s + first, end - first);
        memset(v->attn + i * v->ld, 0, (size_t)e * sizeof *v->attn);
    }
    attention_scores_dequantize(f, v, scores, true);
    int32_t last = (query_end(v, v->n - 1) - 1) / KV_PAGE_SIZE;
    for (int32_t page = query_first(f, v, 0) / KV_PAGE_SIZE; page <= last; page++)
        attention_values(f, v, scores, page);
    for (int64_t i = 0; i < v->n; i++) f->kern->scale(v->attn + i * v->ld, inverse_sum[i], e);
}

/* The pages of one kv head of a sequence. */
struct page_source {
    const struct forward *f;
    int32_t slot, head;
};

static struct attention_page attention_page_get(const void *ctx, int64_t page) {
    const struct page_source *s = ctx;
    const struct forward *f = s->f;
    const struct kv_cache_rows k =
        kv_cache_at(f->kv, s->slot, (int32_t)page, f->layer, s->head, false);
    const struct kv_cache_rows v =
        kv_cache_at(f->kv, s->slot, (int32_t)page, f->layer, s->head, true);
    return (struct attention_page){k.v, v.v, k.d, v.d};
}

/* One kv head of a block of known rows, in tiles. */
static void attention_run_tiles(const struct forward *f, int32_t head, const struct query_block *b,
                                int thread) {
    const struct model_config *c = &f->m->config;
    const struct page_source source = {f, f->rows[b->begin].slot, head};
    int64_t e = c->head_dim, group = c->n_heads / c->n_kv_heads, ld = c->n_heads * e,
            column = b->begin * ld + head * group * e;
    const struct attention_job job = {
        .head_dim = e,
        .n_heads = group,
        .rows = b->end - b->begin,
        .q = f->q + column,
        .out = f->attn + column,
        .ldq = ld,
        .ldo = ld,
        .tiles = f->attn_tiles.tiles ? &f->attn_tiles : NULL,
        .tiles_row = b->begin - f->n_exact,
        .tiles_column = head * group * e,
        .first = f->key_first + b->begin,
        .end = f->key_end + b->begin,
        .scale = score_scale(c),
        .keys = {f->o.kv_elem, KV_PAGE_SIZE, e, attention_page_get, &source},
        .scratch = f->attn_scratch + (size_t)thread * attention_scratch_bytes(c),
    };
    f->kern->attention(&job);
}

/* One kv head of one block of rows. The query heads of a single row are processed together; of
 * several rows, one query head after the other. */
static void attention_run_item(const struct forward *f, int32_t head, const struct query_block *b,
                               int thread) {
    const struct model_config *c = &f->m->config;
    float *scores = f->scores + thread * MAX_QUERIES * f->o.slot_len;
    int64_t e = c->head_dim, group = c->n_heads / c->n_kv_heads,
            begin = ((int64_t)b->begin * c->n_heads + head * group) * e;
    struct attention_block v = {.q = f->q + begin,
                                .attn = f->attn + begin,
                                .n = group,
                                .ld = e,
                                .rows = &f->rows[b->begin],
                                .slot = f->rows[b->begin].slot,
                                .head = head};
    if (b->end - b->begin == 1) {
        for (int64_t n_left = group; n_left > 0; n_left -= v.n, v.q += v.n * e, v.attn += v.n * e) {
            v.n = MIN(n_left, MAX_QUERIES);
            attention_queries(f, &v, scores);
        }
        return;
    }
    v.n = b->end - b->begin;
    v.ld = c->n_heads * e;
    v.step = 1;
    for (int64_t h = 0; h < group; h++, v.q += e, v.attn += e) attention_queries(f, &v, scores);
}

/* Items are blocks of rows, for one kv head after the other. Returns the first item for which the
 * total cost of the items before it is at least `cost`. */
static int64_t attention_item_at(const struct forward *f, int64_t cost) {
    int64_t per_head = f->attention_cost[f->n_blocks], head = cost / per_head,
            rest = cost % per_head;
    int64_t lo = 0, hi = f->n_blocks;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        if (f->attention_cost[mid] < rest)
            lo = mid + 1;
        else
            hi = mid;
    }
    return head * f->n_blocks + lo;
}

static void attention_run_shares(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct forward *f = ctx;
    const struct model_config *c = &f->m->config;
    int64_t total = f->attention_cost[f->n_blocks] * c->n_kv_heads;
    int64_t to = attention_item_at(f, total * end / f->n_work_shares);
    for (int64_t i = attention_item_at(f, total * begin / f->n_work_shares); i < to; i++) {
        struct query_block b = f->blocks[i % f->n_blocks];
        const int32_t head = (int32_t)(i / f->n_blocks), slot = f->rows[b.begin].slot;
        if (!row_attends_in_tiles(f, b.begin)) {
            attention_run_item(f, head, &b, thread);
            continue;
        }
        // blocks of one sequence and head share the packing of its keys
        while (i + 1 < to && b.end < f->n_rows && f->rows[b.end].slot == slot)
            b.end = f->blocks[++i % f->n_blocks].end;
        attention_run_tiles(f, head, &b, thread);
    }
}

/* Runs attention for all rows; returns the inputs of the output projection. */
static struct row_inputs attention_run(struct forward *f) {
    const struct model_config *c = &f->m->config;
    const struct matrix *o = &f->m->layers[f->layer].proj[PROJ_O];
    const bool tiles = c->head_dim % 32 == 0 && row_attends_in_tiles(f, f->n_rows - 1);
    f->attn_tiles = tiles ? known_input_tiles(f, o, 1) : (struct gemm_input){0};
    double t0 = clock_now();
    for (int32_t i = f->n_exact; i < f->n_rows; i++) {
        f->key_end[i] = f->rows[i].pos + 1;
        f->key_first[i] = f->key_end[i] - attention_len(f, &f->rows[i]);
    }
    f->attention_cost[0] = 0;
    for (int32_t b = 0; b < f->n_blocks; b++) {
        int64_t n_keys = 0;
        for (int32_t i = f->blocks[b].begin; i < f->blocks[b].end; i++)
            n_keys += attention_len(f, &f->rows[i]);
        f->attention_cost[b + 1] = f->attention_cost[b] + n_keys;
    }
    struct pool *pool = pool_for(f, 2 * f->attention_cost[f->n_blocks] * c->n_heads * c->head_dim);
    f->n_work_shares = pool ? N_WORK_SHARES : 1;
    pool_run(pool, attention_run_shares, f, f->n_work_shares, 1);
    f->stats.kernel_seconds += clock_now() - t0;
    return inputs_with_tiles(f, o, 1, f->attn, &f->attn_tiles);
}

/* Divides the rows into blocks that attend together. */
static void query_blocks_make(struct forward *f) {
    f->n_blocks = 0;
    for (int32_t i = 0; i < f->n_rows;) {
        struct query_block *b = &f->blocks[f->n_blocks++];
        const int32_t max_rows = row_attends_in_tiles(f, i) ? TILE_QUERIES : MAX_QUERIES;
        *b = (struct query_block){i, i};
        do b->end++;
        while (b->end < f->n_rows && b->end != f->n_exact && b->end - i < max_rows &&
               f->rows[b->end].slot == f->rows[i].slot);
        i = b->end;
    }
}

/*
 * Removes the rows without requested results. Once the last layer's keys and values are stored, the
 * call continues with the requested rows and their residual stream only. Their bits are the same,
 * because no row depends on other rows of the batch.
 */
static void rows_keep_requested(struct forward *f, const int32_t *requested, int32_t n) {
    size_t d = (size_t)f->m->config.d_model;
    int32_t n_segs = 0, next = 0, n_exact = 0;
    while (n_exact < n && requested[n_exact] < f->n_exact) n_exact++;
    for (int32_t s = 0; s < f->n_segs; s++) {
        struct lora_segment g = f->segs[s];
        while (next < n && requested[next] < g.begin) next++;
        int32_t begin = next;
        while (next < n && requested[next] < g.end) next++;
        g.begin = begin;
        g.end = next;
        if (next > begin) f->requested_segs[n_segs++] = g;
    }
    for (int32_t i = 0; i < n; i++) { // requested[i] >= i, so row i is no longer needed
        size_t from = (size_t)requested[i], to = (size_t)i;
        memmove(f->x + to * d, f->x + from * d, d * sizeof *f->x);
        f->requested_rows[i] = f->rows[from];
        f->requested_outs[i] = i;
    }
    f->rows = f->requested_rows;
    f->segs = f->requested_segs;
    f->n_rows = n;
    f->n_exact = n_exact;
    f->n_segs = n_segs;
    query_blocks_make(f);
}

/* Computes the queries of all rows, and writes their keys and values to the cache. */
static void qkv_run(struct forward *f) {
    const struct model_config *c = &f->m->config;
    const struct model_layer *l = &f->m->layers[f->layer];
    const struct projection qkv[] = {
        {PROJ_Q, f->q, false}, {PROJ_K, f->k, false}, {PROJ_V, f->v, false}};
    struct row_inputs in = norm_inputs(f, &l->proj[PROJ_Q], 3, l->attn_norm, l->attn_norm_bias);
    products_run(
        f, &in, qkv, 3,
        (struct epilogue){qkv_rows, f,
                          4 * (int64_t)f->n_rows * (c->n_heads + c->n_kv_heads) * c->head_dim});
}

/* qkv_run for a call that continues only with the rows in `requested`: the queries of other rows
 * are not computed. */
static void qkv_run_requested(struct forward *f, const int32_t *requested, int32_t n) {
    const struct model_config *c = &f->m->config;
    const struct model_layer *l = &f->m->layers[f->layer];
    const struct projection kv[] = {{PROJ_K, f->k, false}, {PROJ_V, f->v, false}},
                            q = {PROJ_Q, f->q, false};
    struct row_inputs in = norm_inputs(f, &l->proj[PROJ_K], 2, l->attn_norm, l->attn_norm_bias);
    products_run(
        f, &in, kv, 2,
        (struct epilogue){kv_store_rows, f, 4 * (int64_t)f->n_rows * c->n_kv_heads * c->head_dim});
    rows_keep_requested(f, requested, n);
    if (n == 0) return;
    in = norm_inputs(f, &l->proj[PROJ_Q], 1, l->attn_norm, l->attn_norm_bias);
    products_run(f, &in, &q, 1,
                 (struct epilogue){query_rows, f, 4 * (int64_t)n * c->n_heads * c->head_dim});
}

/* Prefetches the layer's lora_modules, which one thread will look up: with many adapters they have
 * left the caches since the previous layer. */
static void lora_prefetch(const struct forward *f) {
    for (int32_t s = 0; s < f->n_segs; s++)
        for (int32_t i = 0; i < f->segs[s].n_parts; i++)
            for (int p = 0; f->segs[s].parts[i].pack && p < N_PROJ; p++)
                __builtin_prefetch(
                    lora_module_at(f->segs[s].parts[i].pack, f->layer, (enum proj)p));
}

/* Whether gate, up and activation of known rows can be one product with the bits of separate
 * products: every segment's LoRA update of gate and up must be fused. */
static bool mlp_is_fused(const struct forward *f) {
    const struct model_layer *l = &f->m->layers[f->layer];
    if (f->n_exact == f->n_rows || !layer_can_fuse_gated_mlp(l, f->m->config.arch, ROWS_KNOWN))
        return false;
    for (int32_t s = segment_lower_bound(f, f->n_exact); s < f->n_segs; s++)
        for (int p = PROJ_GATE; p <= PROJ_UP; p++)
            if (!segment_is_fused(f, &f->segs[s], (enum proj)p)) return false;
    return true;
}

/* The fused LoRA updates of gate and up, combined for one product, or NULL if there are none. */
static const struct gemm_low_rank *fused_lora_gate_up(struct forward *f,
                                                      const struct gemm_input *in,
                                                      const struct projection gate_up[2]) {
    struct gemm_low_rank *low = &f->low_rank[2];
    struct low_rank_rows *rows = f->low_rank_rows + 2 * (int64_t)f->o.max_rows;
    fused_lora_prepare(f, in, gate_up, 2);
    *low = (struct gemm_low_rank){.t = {f->low_rank[0].t[0], f->low_rank[1].t[0]}, .rows = rows};
    for (int i = 0, k = 0; i < f->low_rank[0].n || k < f->low_rank[1].n; low->n++) {
        const struct low_rank_rows *gate = i < f->low_rank[0].n ? &f->low_rank[0].rows[i] : NULL,
                                   *up = k < f->low_rank[1].n ? &f->low_rank[1].rows[k] : NULL;
        if (gate && up && gate->begin != up->begin) // only the one that begins first has these rows
            *(gate->begin < up->begin ? &up : &gate) = NULL;
        rows[low->n] = gate ? *gate : *up;
        rows[low->n].n_parts[0] = gate ? gate->n_parts[0] : 0;
        rows[low->n].n_parts[1] = up ? up->n_parts[0] : 0;
        rows[low->n].parts[1] = up ? up->parts[0] : NULL;
        i += gate != NULL;
        k += up != NULL;
    }
    return low->n > 0 ? low : NULL;
}

/* Runs the MLP up to its activation; returns the inputs of the down projection. */
static struct row_inputs mlp_up_run(struct forward *f) {
    const struct model_config *c = &f->m->config;
    const struct model_layer *l = &f->m->layers[f->layer];
    const struct matrix *w = &l->proj[c->arch->ungated ? PROJ_UP : PROJ_GATE];
    const struct projection gate_up[] = {{PROJ_GATE, f->gate, false}, {PROJ_UP, f->up, false}};
    const int n = c->arch->ungated ? 1 : 2;
    struct row_inputs in = norm_inputs(f, w, n, l->ffn_norm, l->ffn_norm_bias), rest = in;
    const bool fused = mlp_is_fused(f);
    f->n_unfused_act = fused ? f->n_exact : f->n_rows;
    if (fused) {
        rest.known = (struct gemm_input){.path = ROWS_KNOWN};
        task_add(f, (struct gemm_task){.kind = TASK_GATED,
                                       .gated = {.gate = &l->proj[PROJ_GATE],
                                                 .up = &l->proj[PROJ_UP],
                                                 .act = f->act_tiles},
                                       .in = &in.known,
                                       .low_rank = fused_lora_gate_up(f, &in.known, gate_up),
                                       .rows = in.known.rows,
                                       .k = c->d_model,
                                       .n = c->d_ff});
        f->stats.weight_passes += 2;
    }
    products_run(f, &rest, gate_up + 2 - n, n,
                 (struct epilogue){activation_rows, f, 8 * (int64_t)f->n_unfused_act * c->d_ff});
    struct row_inputs down = inputs_prepare(f, &l->proj[PROJ_DOWN], 1, f->gate, f->n_exact,
                                            f->n_unfused_act - f->n_exact);
    if (fused)
        down.known = (struct gemm_input){.path = ROWS_KNOWN,
                                         .rows = in.known.rows,
                                         .k = c->d_ff,
                                         .ldx = c->d_ff,
                                         .tiles = f->act_tiles};
    return down;
}

/* `requested` [n_requested]: the only rows with which the call continues after their keys and
 * values are stored; NULL: all rows. */
static void layer_run(struct forward *f, const int32_t *requested, int32_t n_requested) {
    const struct model_layer *l = &f->m->layers[f->layer];
    lora_prefetch(f);
    if (requested)
        qkv_run_requested(f, requested, n_requested);
    else
        qkv_run(f);
    if (f->n_rows == 0) return;
    struct row_inputs in = attention_run(f);
    residual_project(f, &in, PROJ_O, l->post_attn_norm);

    in = mlp_up_run(f);
    residual_project(f, &in, PROJ_DOWN, l->post_ffn_norm);
}

static void call_check(const struct forward *f, const int32_t *out_rows, int32_t n_out) {
    CHECK(f->n_rows > 0 && f->n_rows <= f->o.max_rows && n_out >= 0 && n_out <= f->o.max_rows);
    for (int32_t i = 0; i < f->n_rows; i++) {
        const struct batch_row *r = &f->rows[i];
        CHECK(r->token >= 0 && r->token < f->m->config.vocab_size);
        CHECK(r->pos >= 0 && r->pos < f->o.slot_len && r->slot >= 0 && r->slot < f->o.n_slots);
        CHECK(i == 0 || r[-1].slot != r->slot || r[-1].pos < r->pos);
        CHECK(i == 0 || r[-1].sampled >= r->sampled);
    }
    for (int32_t i = 0, end = 0, parts = 0; i < f->n_segs; i++) {
        CHECK((parts += f->segs[i].n_parts) <= f->o.max_parts);
        CHECK(f->segs[i].begin >= end && f->segs[i].end > f->segs[i].begin &&
              f->segs[i].end <= f->n_rows);
        end = f->segs[i].end;
        CHECK(f->rows[f->segs[i].begin].sampled == f->rows[end - 1].sampled);
    }
    for (int32_t i = 0; i < n_out; i++) {
        CHECK(out_rows[i] >= 0 && out_rows[i] < f->n_rows);
        CHECK(i == 0 || f->rows[out_rows[i - 1]].sampled >= f->rows[out_rows[i]].sampled);
    }
}

static bool is_ascending(const int32_t *v, int32_t n) {
    for (int32_t i = 1; i < n; i++)
        if (v[i - 1] >= v[i]) return false;
    return v != NULL;
}

static void call_begin(struct forward *f, const struct batch_row *rows, int32_t n_rows,
                       const struct lora_segment *segs, int32_t n_segs, const int32_t *out_rows,
                       int32_t n_out) {
    f->rows = rows;
    f->n_rows = n_rows;
    f->segs = segs;
    f->n_segs = n_segs;
    call_check(f, out_rows, n_out);
    f->n_exact = n_rows;
    if (f->m->cls == NUMERIC_FAST)
        for (f->n_exact = 0; f->n_exact < n_rows && rows[f->n_exact].sampled;) f->n_exact++;
    for (int32_t i = 0; i < n_rows; i++)
        CHECK(kv_cache_reserve(f->kv, rows[i].slot, rows[i].pos, rows[i].pos + 1));
    query_blocks_make(f);
    f->stats.steps++;
    f->stats.rows += (uint64_t)n_rows;
}

static void embed_run(struct forward *f) {
    int64_t cost = 4 * (int64_t)f->n_rows * f->m->config.d_model;
    pool_run(pool_for(f, cost), embed_rows, f, f->n_rows, 1);
}

/* Runs layers from `first` on, then the outputs. */
static void layers_run_from(struct forward *f, int32_t first, const int32_t *out_rows,
                            int32_t n_out, float *logits) {
    const struct model_config *c = &f->m->config;
    bool only_requested = n_out < f->n_rows && is_ascending(out_rows, n_out);
    for (f->layer = first; f->layer < c->n_layers; f->layer++)
        layer_run(f, only_requested && f->layer == c->n_layers - 1 ? out_rows : NULL, n_out);
    if (only_requested) out_rows = f->requested_outs;
    if (n_out > 0) {
        struct norm_job j = {.f = f,
                             .x = f->x,
                             .g = f->m->final_norm,
                             .b = f->m->final_norm_bias,
                             .row_index = out_rows,
                             .y = f->hidden};
        norm_run(&j, n_out);
    }
    if (n_out > 0 && logits) {
        int32_t n_exact = 0;
        while (n_exact < n_out && out_rows[n_exact] < f->n_exact) n_exact++;
        struct row_inputs in =
            inputs_prepare(f, &f->m->head, 1, f->hidden, n_exact, n_out - n_exact);
        if (is_base_head_needed(f, out_rows, n_out))
            base_task_add(f, &f->m->head, &in, NULL, logits, false);
        tasks_run(f);
        head_overrides_run(f, out_rows, n_out, logits);
    }
}

void forward_run(struct forward *f, const struct batch_row *rows, int32_t n_rows,
                 const struct lora_segment *segs, int32_t n_segs, const int32_t *out_rows,
                 int32_t n_out, float *logits) {
    call_begin(f, rows, n_rows, segs, n_segs, out_rows, n_out);
    embed_run(f);
    layers_run_from(f, 0, out_rows, n_out, logits);
}

void forward_lower_layers(struct forward *f, int32_t end, const struct batch_row *rows,
                          int32_t n_rows, float *stream) {
    CHECK(end > 0 && end < f->m->config.n_layers);
    call_begin(f, rows, n_rows, NULL, 0, NULL, 0);
    embed_run(f);
    for (f->layer = 0; f->layer < end; f->layer++) layer_run(f, NULL, 0);
    memcpy(stream, f->x, (size_t)n_rows * (size_t)f->m->config.d_model * sizeof *stream);
}

void forward_upper_layers(struct forward *f, int32_t first, const float *const *streams,
                          const struct batch_row *rows, int32_t n_rows,
                          const struct lora_segment *segs, int32_t n_segs, const int32_t *out_rows,
                          int32_t n_out, float *logits) {
    size_t d = (size_t)f->m->config.d_model;
    CHECK(first > 0 && first < f->m->config.n_layers);
    call_begin(f, rows, n_rows, segs, n_segs, out_rows, n_out);
    for (int32_t i = 0; i < n_rows; i++) memcpy(f->x + (size_t)i * d, streams[i], d * sizeof *f->x);
    layers_run_from(f, first, out_rows, n_out, logits);
}
