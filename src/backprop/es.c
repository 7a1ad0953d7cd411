/*
 * es: evolution strategies on a LoRA adapter (Salimans et al. 2017; rank-1 noise in one batch over
 * a shared base after EGGROLL, Sarkar et al. 2025).
 *
 * A pair's direction is one rank-1 matrix for each factor, E_B = u pᵀ and E_A = q vᵀ, all entries
 * ±1: uncorrelated and of unit variance, which is sufficient for the estimate. The members ± move
 * in the tangent space of the adapter,
 *
 *     ΔW± = s B A ± σ s (E_B A + B E_A) = s B A ± σ s (u (Aᵀp)ᵀ + (B q) vᵀ),
 *
 * so both members are the adapter's map (with its scale s) plus or minus one map of rank 2, for any
 * rank of the adapter. At σ → 0 the derivative along E is that of (B + σ E_B)(A + σ E_A); the
 * omitted term is σ² E_B E_A. The perturbation is in A and B, not in W, so there are r (in + out)
 * directions instead of in · out; the estimate's error grows with their number. The trained adapter
 * remains one plain adapter of the same rank.
 *
 * The signs come from lora_perturbation_signs for the seed of the update and the number of the
 * pair: u and v with the layer number l of the projection; p and q, R values each, with the layer
 * number L + l. They are generated when a pair is evaluated, and again when its fitness is known;
 * they are not stored in between.
 *
 * The fitness `exact` needs no generation: greedy decoding produces the target answer if and only
 * if every target token is the most probable token after the tokens before it. One forward pass
 * over the sample computes that.
 *
 * If the adapter changes only upper layers, the layers below are computed once for all members.
 *
 * Invariant: rows of the forward pass do not depend on other rows of the batch. Scores are summed
 * in the order of targets and samples, and gradients in the order of pairs. So neither the number
 * of threads nor the division into passes changes a bit.
 */
#include "backprop/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_SEQS = 64, /* sequences per pass; each may leave a page of the KV cache partly unused */
    LOGIT_BYTES = 8 << 20, /* bytes of logits that exist at once */
};

/* The score of a member on one sample (in es.out: on one target). */
struct member_score {
    double nll;
    int32_t hits, targets; /* targets that are the most probable token; number of targets */
};
struct fitness {
    const char *name;
    double (*compute)(const struct member_score *s, int n);
};
struct shaping {
    const char *name;
    void (*shape)(double *f, int n); /* in place */
};

struct member_seq {             /* one member's forward pass over one sample */
    int32_t sample, out, n_out; /* index in es.samples; range [out, out + n_out) of es.out */
    struct member_score *score; /* the result */
};

struct es {
    const struct model *m;
    const struct es_options *o;
    struct pool *pool;
    const struct fitness *fitness;
    const struct shaping *shaping;
    double fitness_mean, fitness_std; /* over the members of the last call */

    /* allocated again for a longer sample */
    struct forward *forward;
    enum dtype kv_elem;
    int32_t slot_len, max_rows;
    size_t forward_size;      /* bytes, including the arrays below */
    struct batch_row *rows;   /* [max_rows] */
    int32_t *out_rows;        /* [max_rows] rows that predict a target */
    int32_t *target;          /* [max_rows] the target token of each out row */
    struct member_score *out; /* [max_rows] score of one target each */
    const float **row_input;  /* [max_rows] each row's input in `stream` */

    /* state of a pass */
    struct member_seq seqs[MAX_SEQS];
    struct lora_segment segs[MAX_SEQS];
    struct lora_part parts[MAX_SEQS][2];
    int32_t n_rows, n_seqs, n_segs, n_out;
    int64_t head_chunk;
    float *logits; /* [head_chunk][V] */
    void *in_scratch;

    /* state of a call */
    struct trainer *t;
    int index;
    uint64_t seed;
    const struct train_sample *samples;
    int n;
    int32_t first_layer;    /* lowest layer that the adapter changes */
    float *stream;          /* inputs of first_layer, [rows of all samples][D]; NULL if it is 0 */
    int64_t *stream_offset; /* [n + 1] first row of each sample */
    struct lora_pack *center, **pairs; /* the adapter; [N/2] pairs in the current pass, else NULL */
    float *factors;                    /* factors of one pair, all projections: [2][in], [out][2] */
    size_t *factor_at;                 /* [L][N_PROJ] offsets in `factors` */
    double *coef;                      /* [N/2] coefficient of each pair's direction */

    /* bytes of es_new's arrays; of the packs now, and at most; of `stream` at most */
    size_t fixed_size, packs_size, packs_peak;
    size_t stream_peak;
};

static double fitness_loss(const struct member_score *s, int n) {
    double nll = 0, targets = 0;
    for (int i = 0; i < n; i++) nll += s[i].nll, targets += s[i].targets;
    return -nll / targets;
}

static double fitness_exact(const struct member_score *s, int n) {
    double correct = 0, scored = 0;
    for (int i = 0; i < n; i++) {
        correct += s[i].targets > 0 && s[i].hits == s[i].targets;
        scored += s[i].targets > 0;
    }
    return correct / scored;
}

static const struct fitness fitness_functions[] = {{"loss", fitness_loss},
                                                   {"exact", fitness_exact}};

static void shape_none(double *f, int n) {
    (void)f, (void)n;
}

/* (f - mean) / standard deviation; zeros if the standard deviation is 0. */
static void shape_zscore(double *f, int n) {
    double mean = 0, squares = 0;
    for (int i = 0; i < n; i++) mean += f[i] / n;
    for (int i = 0; i < n; i++) squares += (f[i] - mean) * (f[i] - mean) / n;
    double by = squares > 0 ? 1 / sqrt(squares) : 0;
    for (int i = 0; i < n; i++) f[i] = (f[i] - mean) * by;
}

/* Ranks from -1/2 to 1/2; equal values share their mean rank. */
static void shape_rank(double *f, int n) {
    double *rank = xcalloc((size_t)n, sizeof *rank);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) rank[i] += f[j] < f[i] ? 1 : j != i && f[j] == f[i] ? 0.5 : 0;
    for (int i = 0; i < n; i++) f[i] = rank[i] / (n - 1) - 0.5;
    free(rank);
}

static const struct shaping fitness_shapings[] = {
    {"zscore", shape_zscore}, {"rank", shape_rank}, {"none", shape_none}};

#define AT(field) offsetof(struct es_options, field)
const struct option_row es_option_rows[] = {
    {"population", OPT_INT, AT(population), "32", 2, 4096, "N",
     "es: population per update, an even number (mirrored sampling)"},
    {"sigma", OPT_FLOAT, AT(sigma), "0.01", 1e-9, 1, "X",
     "es: standard deviation of the perturbation of A and B"},
    {"fitness", OPT_STRING, AT(fitness), "loss", 0, 0, "NAME",
     "es: fitness: loss (negated), or exact (fraction of samples answered word for word)",
     JOB_ARG_TEXT},
    {"shaping", OPT_STRING, AT(shaping), "zscore", 0, 0, "NAME",
     "es: fitness shaping: zscore, rank or none", JOB_ARG_TEXT},
    {"pass-rows", OPT_INT, AT(pass_rows), "1024", 16, 65536, "N",
     "es: tokens per forward pass; trades memory for speed, results are equal"},
    {0},
};

static const struct fitness *fitness_find(const char *name) {
    for (size_t i = 0; name && i < ARRAY_LEN(fitness_functions); i++)
        if (!strcmp(name, fitness_functions[i].name)) return &fitness_functions[i];
    return NULL;
}

static const struct shaping *shaping_find(const char *name) {
    for (size_t i = 0; name && i < ARRAY_LEN(fitness_shapings); i++)
        if (!strcmp(name, fitness_shapings[i].name)) return &fitness_shapings[i];
    return NULL;
}

int es_fitness_shaping_check(const char *name, struct error *err) {
    if (shaping_find(name)) return OK;
    return error_set(err, ERR_USAGE, "shaping '%s' is not known; there are zscore, rank, none",
                     name ? name : "");
}

void es_shape_fitness(const char *shaping, double *f, int n) {
    const struct shaping *s = shaping_find(shaping);
    CHECK(s && n > 1);
    s->shape(f, n);
}

int es_options_check(const struct es_options *o, const struct train_options *train,
                     struct error *err) {
    if (o->population < 2 || o->population % 2)
        return error_set(err, ERR_USAGE, "population %lld is odd; members come in pairs",
                         (long long)o->population);
    if (!fitness_find(o->fitness))
        return error_set(err, ERR_USAGE, "fitness '%s' is not known; there are loss, exact",
                         o->fitness ? o->fitness : "");
    if (es_fitness_shaping_check(o->shaping, err) != OK) return err->code;
    if (train_options_require_plain(train, "method es", err) != OK) return err->code;
    if (train->gradient_checkpointing || train->f32_backward)
        return error_set(err, ERR_USAGE,
                         "method es has no backward pass; leave --gradient-checkpointing and "
                         "--f32-backward out");
    return OK;
}

/* Returns the number of floats of one pair's factors; sets at[l * N_PROJ + p] to their offset. */
static size_t factors_layout(const struct model_config *c, size_t *at) {
    size_t floats = 0;
    for (int32_t i = 0; i < c->n_layers * N_PROJ; i++) {
        enum proj p = (enum proj)(i % N_PROJ);
        at[i] = floats;
        floats += 2 * (size_t)(proj_in(c, p) + proj_out(c, p));
    }
    return floats;
}

/* Rows whose logits exist at once. */
static int64_t head_chunk_rows(const struct model_config *c, const struct es_options *o) {
    int64_t rows = LOGIT_BYTES / (int64_t)sizeof(float) / c->vocab_size;
    return MAX(MIN(rows, o->pass_rows), 16);
}

struct es *es_new(const struct model *m, const struct es_options *o, struct pool *pool) {
    const struct model_config *c = &m->config;
    struct es *e = xcalloc(1, sizeof *e);
    CHECK(o->population > 1 && o->population % 2 == 0 && o->sigma > 0);
    e->m = m;
    e->o = o;
    e->pool = pool;
    e->fitness = fitness_find(o->fitness);
    e->shaping = shaping_find(o->shaping);
    CHECK(e->fitness && e->shaping);
    e->pairs = xcalloc((size_t)o->population / 2, sizeof(struct lora_pack *));
    e->coef = xcalloc((size_t)o->population / 2, sizeof *e->coef);
    e->factor_at = xcalloc((size_t)c->n_layers * N_PROJ, sizeof *e->factor_at);
    e->head_chunk = head_chunk_rows(c, o);
    size_t factors = factors_layout(c, e->factor_at),
           scratch = gemm_input_scratch(e->head_chunk, c->d_model);
    e->factors = xcalloc(factors, sizeof *e->factors);
    e->logits = xcalloc((size_t)(e->head_chunk * c->vocab_size), sizeof *e->logits);
    e->in_scratch = xcalloc(scratch, 1);
    e->fixed_size = sizeof *e + scratch + (size_t)o->population * sizeof(double) +
                    (factors + (size_t)(e->head_chunk * c->vocab_size)) * sizeof(float);
    return e;
}

static void forward_release(struct es *e) {
    forward_free(e->forward);
    free(e->rows);
    free(e->out_rows);
    free(e->target);
    free(e->out);
    free(e->row_input);
    e->forward = NULL;
}

void es_free(struct es *e) {
    if (!e) return;
    forward_release(e);
    free(e->pairs);
    free(e->coef);
    free(e->factor_at);
    free(e->factors);
    free(e->logits);
    free(e->in_scratch);
    free(e);
}

double es_fitness_mean(const struct es *e) {
    return e->fitness_mean;
}

double es_fitness_std(const struct es *e) {
    return e->fitness_std;
}

size_t es_bytes(const struct es *e) {
    return e->fixed_size + e->forward_size + e->packs_peak + e->stream_peak;
}

static int32_t slot_length(int64_t longest) {
    return (int32_t)((longest + KV_PAGE_SIZE - 1) / KV_PAGE_SIZE * KV_PAGE_SIZE);
}

static struct forward_options forward_options_for(int32_t max_rows, int32_t slot_len,
                                                  enum dtype kv_elem, struct pool *pool) {
    return (struct forward_options){.max_rows = max_rows,
                                    .n_slots = MAX_SEQS,
                                    .slot_len = slot_len,
                                    .n_pages = max_rows / KV_PAGE_SIZE + MAX_SEQS + 1,
                                    .kv_elem = kv_elem,
                                    .max_parts = 2 * MAX_SEQS,
                                    .pool = pool};
}

/* Bytes of the arrays es.rows, out_rows, target, out and row_input for a row. */
enum {
    ROW_BYTES = sizeof(struct batch_row) + 2 * sizeof(int32_t) + sizeof(struct member_score) +
                sizeof(float *)
};

size_t es_bytes_bound(const struct model_config *c, const struct es_options *o,
                      const struct adapter_config *a, int64_t longest, int64_t tokens) {
    const int64_t head = head_chunk_rows(c, o);
    const int32_t slot = slot_length(longest), rows = MAX((int32_t)o->pass_rows, slot);
    struct forward_options fo = forward_options_for(rows, slot, DTYPE_F32, NULL);
    size_t *at = xcalloc((size_t)c->n_layers * N_PROJ, sizeof *at),
           pair = factors_layout(c, at) * sizeof(float),
           alignment = (size_t)c->n_layers * N_PROJ * 4 * 64,
           center = adapter_param_count(c, a) * sizeof(float) + alignment,
           pairs = (size_t)MIN(o->population / 2, MAX_SEQS) * (pair + alignment),
           logits = (size_t)(head * c->vocab_size) * sizeof(float) +
                    gemm_input_scratch(head, c->d_model),
           stream = (size_t)tokens * ((size_t)c->d_model * sizeof(float) + sizeof(int64_t));
    free(at);
    return sizeof(struct es) + (size_t)o->population * sizeof(double) + pair + logits + center +
           pairs + stream + forward_bytes(c, &fo) + (size_t)rows * ROW_BYTES;
}

/* Rows of a sample: the tokens before the last target. Later tokens have no effect. */
static int32_t sample_rows(const struct train_sample *s) {
    int32_t last = s->n - 1;
    while (last > 0 && !s->mask[last]) last--;
    return MAX(last, 0);
}

/* Allocates the forward pass again if its slots are too short for the longest sample, or if it has
 * another type of keys and values than the trainer. */
static int forward_reserve(struct es *e, struct error *err) {
    int32_t longest = 1;
    for (int i = 0; i < e->n; i++) longest = MAX(longest, sample_rows(&e->samples[i]));
    if (e->forward && longest <= e->slot_len && e->kv_elem == e->t->kv_elem) return OK;
    forward_release(e);
    e->slot_len = slot_length(longest);
    e->kv_elem = e->t->kv_elem;
    e->max_rows = MAX((int32_t)e->o->pass_rows, e->slot_len);
    struct forward_options fo = forward_options_for(e->max_rows, e->slot_len, e->kv_elem, e->pool);
    size_t rows = (size_t)e->max_rows;
    e->forward_size = forward_bytes(&e->m->config, &fo) + rows * ROW_BYTES;
    e->forward = forward_new(e->m, &fo);
    e->rows = try_calloc(rows, sizeof *e->rows, err);
    e->out_rows = try_calloc(rows, sizeof *e->out_rows, err);
    e->target = try_calloc(rows, sizeof *e->target, err);
    e->out = try_calloc(rows, sizeof *e->out, err);
    e->row_input = try_calloc(rows, sizeof *e->row_input, err);
    if (e->forward && e->rows && e->out_rows && e->target && e->out && e->row_input) return OK;
    forward_release(e);
    return error_set(err, ERR_MEMORY, "no memory for passes of %d tokens (%zu MB)", e->max_rows,
                     e->forward_size >> 20);
}

/* directions */

struct sign_noise {
    float *u, *v, *p, *q; /* [out], [in], [R], [R] */
};

/* One allocation, large enough for any projection; the caller frees `u`. */
static struct sign_noise sign_noise_new(const struct model_config *c, int32_t r) {
    size_t widest = (size_t)MAX(MAX(c->d_ff, c->d_model), c->n_heads * c->head_dim);
    float *all = xcalloc(2 * (widest + (size_t)r), sizeof *all);
    return (struct sign_noise){all, all + widest, all + 2 * widest, all + 2 * widest + r};
}

static void sign_noise_generate(const struct model_config *c, const struct lora_perturbation *z,
                                int32_t l, enum proj proj, int32_t r, struct sign_noise *s) {
    lora_perturbation_signs(z, l, proj, true, 0, proj_out(c, proj), DTYPE_F32, s->u);
    lora_perturbation_signs(z, l, proj, false, 0, proj_in(c, proj), DTYPE_F32, s->v);
    lora_perturbation_signs(z, c->n_layers + l, proj, true, 0, r, DTYPE_F32, s->p);
    lora_perturbation_signs(z, c->n_layers + l, proj, false, 0, r, DTYPE_F32, s->q);
}

struct pair_job {
    const struct trainer *t;
    int index;
    struct lora_perturbation noise;
    float *factors;   /* for each projection [2][in], [out][2] */
    const size_t *at; /* [L][N_PROJ] offset of each projection in `factors` */
};

/* Computes one pair's map of rank 2 in projections [begin, end): a = (Aᵀp, v), [2][in], and b = (u,
 * B q), [out][2]. */
static void perturbation_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct pair_job *j = ctx;
    const struct kernels *k = j->t->k;
    for (int64_t i = begin; i < end; i++) {
        int32_t l = (int32_t)i / N_PROJ;
        enum proj proj = (enum proj)(i % N_PROJ);
        const struct lora_params *lo = trainer_lora(j->t, j->index, l, (int)proj);
        if (!lo->r) continue;
        int64_t in = proj_in(&j->t->c, proj), out = proj_out(&j->t->c, proj);
        float *a = j->factors + j->at[i], *b = a + 2 * in;
        struct sign_noise s = sign_noise_new(&j->t->c, lo->r);
        sign_noise_generate(&j->t->c, &j->noise, l, proj, lo->r, &s);
        memset(a, 0, (size_t)in * sizeof *a);
        for (int32_t r = 0; r < lo->r; r++) k->axpy(a, s.p[r], lo->a + r * in, in);
        memcpy(a + in, s.v, (size_t)in * sizeof *a);
        for (int64_t o = 0; o < out; o++) {
            b[2 * o] = s.u[o];
            b[2 * o + 1] = k->dot(lo->b + o * lo->r, s.q, lo->r);
        }
        free(s.u);
    }
}

struct adapter *es_perturbation(const struct trainer *t, int index,
                                const struct lora_perturbation *z, double sigma) {
    CHECK(!t->full && index >= 0 && index < t->n_adapters);
    CHECK(!t->adapters[index]->config.dora && !t->adapters[index]->config.n_invocation);
    const struct model_config *c = &t->c;
    int32_t n = c->n_layers * N_PROJ;
    struct adapter_module *modules = xcalloc((size_t)n, sizeof *modules);
    size_t *at = xcalloc((size_t)n, sizeof *at), floats = 0;
    for (int32_t i = 0; i < n; i++) {
        const struct lora_params *lo = trainer_lora(t, index, i / N_PROJ, i % N_PROJ);
        at[i] = floats;
        if (!lo->r) continue;
        modules[i] = (struct adapter_module){.r = 2, .alpha = 2 * lo->scale * (float)sigma};
        floats += 2 * (size_t)(proj_in(c, i % N_PROJ) + proj_out(c, i % N_PROJ));
    }
    struct pair_job j = {t, index, *z, xcalloc(floats, sizeof(float)), at};
    pool_run(t->pool, perturbation_items, &j, n, 1);
    struct adapter_config ac = {.r = 2, .modules = modules};
    struct adapter *a = adapter_from_owned_data(c, &ac, j.factors, NULL);
    free(modules);
    free(at);
    return a;
}

/* Packs `loras` [L][N_PROJ], counts the bytes, and frees `loras`. */
static struct lora_pack *lora_pack_create(struct es *e, struct lora *loras) {
    struct lora_pack *p = lora_pack_new(&e->m->config, loras, DTYPE_F32);
    e->packs_size += p->bytes;
    e->packs_peak = MAX(e->packs_peak, e->packs_size);
    free(loras);
    return p;
}

static void lora_pack_release(struct es *e, struct lora_pack **p) {
    e->packs_size -= *p ? (*p)->bytes : 0;
    lora_pack_free(*p);
    *p = NULL;
}

static struct lora_pack *perturbation_pack(struct es *e, int pair) {
    int32_t n = e->m->config.n_layers * N_PROJ;
    struct lora *loras = xcalloc((size_t)n, sizeof *loras);
    struct pair_job j = {e->t, e->index, {e->seed, (uint32_t)pair}, e->factors, e->factor_at};
    pool_run(e->pool, perturbation_items, &j, n, 1);
    for (int32_t i = 0; i < n; i++) {
        const struct lora_params *lo = trainer_lora(e->t, e->index, i / N_PROJ, i % N_PROJ);
        const float *a = e->factors + e->factor_at[i];
        if (lo->r)
            loras[i] = (struct lora){.a = a,
                                     .b = a + 2 * proj_in(&e->m->config, i % N_PROJ),
                                     .r = 2,
                                     .scale = lo->scale * (float)e->o->sigma};
    }
    return lora_pack_create(e, loras);
}

static struct lora_pack *center_pack(struct es *e) {
    int32_t n = e->m->config.n_layers * N_PROJ;
    struct lora *loras = xcalloc((size_t)n, sizeof *loras);
    for (int32_t i = 0; i < n; i++) {
        const struct lora_params *lo = trainer_lora(e->t, e->index, i / N_PROJ, i % N_PROJ);
        loras[i] = (struct lora){.a = lo->a, .b = lo->b, .r = lo->r, .scale = lo->scale};
    }
    return lora_pack_create(e, loras);
}

struct gradient_job {
    const struct trainer *t;
    int index;
    uint64_t seed;
    const double *coef; /* [n] */
    int n;
};

/* g -= Σ coef E over the pairs, in their order, in projections [begin, end). */
static void es_gradient_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct gradient_job *j = ctx;
    const struct kernels *k = j->t->k;
    for (int64_t i = begin; i < end; i++) {
        int32_t l = (int32_t)i / N_PROJ;
        enum proj proj = (enum proj)(i % N_PROJ);
        const struct lora_params *lo = trainer_lora(j->t, j->index, l, (int)proj);
        if (!lo->r) continue;
        int64_t in = proj_in(&j->t->c, proj), out = proj_out(&j->t->c, proj);
        struct sign_noise s = sign_noise_new(&j->t->c, lo->r);
        for (int pair = 0; pair < j->n; pair++) {
            float by = (float)-j->coef[pair];
            if (by == 0) continue;
            const struct lora_perturbation z = {j->seed, (uint32_t)pair};
            sign_noise_generate(&j->t->c, &z, l, proj, lo->r, &s);
            for (int32_t r = 0; r < lo->r; r++) k->axpy(lo->ga + r * in, by * s.q[r], s.v, in);
            for (int64_t o = 0; o < out; o++) k->axpy(lo->gb + o * lo->r, by * s.u[o], s.p, lo->r);
        }
        free(s.u);
    }
}

void es_add_gradient(struct trainer *t, int index, uint64_t seed, const double *coef, int n) {
    CHECK(!t->full && index >= 0 && index < t->n_adapters);
    struct gradient_job j = {t, index, seed, coef, n};
    pool_run(t->pool, es_gradient_items, &j, (int64_t)t->c.n_layers * N_PROJ, 1);
    t->groups[index].count += 1;
}

/* passes */

static bool pass_has_room(const struct es *e, int32_t rows) {
    return e->n_seqs < MAX_SEQS && e->n_rows + rows <= e->max_rows;
}

/* Appends a member's forward pass over a sample; returns false if it does not fit into the pass.
 * Member 2 i is pair i with the sign +, member 2 i + 1 with the sign -. */
static bool pass_add(struct es *e, int member, int sample, struct member_score *score) {
    const struct train_sample *s = &e->samples[sample];
    int32_t rows = sample_rows(s), pair = member / 2;
    if (!pass_has_room(e, rows)) return false;
    if (!rows) return true;
    if (!e->pairs[pair]) e->pairs[pair] = perturbation_pack(e, pair);
    bool mirrored = member % 2;
    struct lora_segment *g = e->n_segs ? &e->segs[e->n_segs - 1] : NULL;
    if (!g || g->parts[1].pack != e->pairs[pair] || (g->parts[1].weight < 0) != mirrored) {
        struct lora_part *parts = e->parts[e->n_segs];
        parts[0] = (struct lora_part){.pack = e->center, .weight = 1};
        parts[1] = (struct lora_part){.pack = e->pairs[pair], .weight = mirrored ? -1 : 1};
        g = &e->segs[e->n_segs++];
        *g = (struct lora_segment){.begin = e->n_rows, .parts = parts, .n_parts = 2};
    }
    struct member_seq *q = &e->seqs[e->n_seqs];
    *q = (struct member_seq){.sample = sample, .out = e->n_out, .score = score};
    for (int32_t i = 0; i < rows; i++) {
        if (s->mask[i + 1]) {
            e->target[e->n_out] = s->tokens[i + 1];
            e->out_rows[e->n_out++] = e->n_rows;
        }
        if (e->stream)
            e->row_input[e->n_rows] =
                e->stream + (e->stream_offset[sample] + i) * e->m->config.d_model;
        e->rows[e->n_rows++] = (struct batch_row){s->tokens[i], i, e->n_seqs};
    }
    g->end = e->n_rows;
    q->n_out = e->n_out - q->out;
    e->n_seqs++;
    return true;
}

struct head_rows {
    struct es *e;
    int64_t first;
};

static void lm_head_score_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct head_rows *h = ctx;
    struct es *e = h->e;
    const struct kernels *k = e->t->k;
    int64_t v = e->m->config.vocab_size;
    for (int64_t i = begin; i < end; i++) {
        float *row = e->logits + i * v, max = k->max(row, v);
        int32_t token = e->target[h->first + i], best = 0;
        double at_target = (double)row[token];
        while (best < v - 1 && row[best] != max) best++;
        float sum = k->softmax(row, v);
        e->out[h->first + i] = (struct member_score){
            .nll = math_log((double)sum) + (double)max - at_target, .hits = best == token};
    }
}

/* Computes the logits of the rows that predict a target, a chunk at a time, and their scores. The
 * loss has the trainer's bits. */
static void lm_head_score(struct es *e) {
    const struct matrix *w = &e->m->head;
    int64_t d = e->m->config.d_model;
    const float *hidden = forward_hidden(e->forward);
    enum row_path path = e->m->cls == NUMERIC_FAST ? ROWS_KNOWN : ROWS_EXACT;
    for (int64_t first = 0; first < e->n_out; first += e->head_chunk) {
        struct head_rows h = {e, first};
        int64_t n = MIN(e->head_chunk, e->n_out - first);
        struct gemm_input in =
            gemm_input_for(w, 1, hidden + first * d, n, path, e->in_scratch, e->pool);
        matrix_mul(e->logits, w->n, &in, w, false, e->pool);
        pool_run(e->pool, lm_head_score_items, &h, n, 1);
    }
}

/* Runs the pass, sets the scores of its samples, and empties it. */
static int pass_run(struct es *e, struct error *err) {
    int rc = OK;
    if (e->n_rows && e->stream)
        forward_upper_layers(e->forward, e->first_layer, e->row_input, e->rows, e->n_rows, e->segs,
                             e->n_segs, e->out_rows, e->n_out, NULL);
    else if (e->n_rows)
        forward_run(e->forward, e->rows, e->n_rows, e->segs, e->n_segs, e->out_rows, e->n_out,
                    NULL);
    lm_head_score(e);
    for (int32_t i = 0; i < e->n_seqs; i++) {
        const struct member_seq *q = &e->seqs[i];
        *q->score = (struct member_score){.targets = q->n_out};
        for (int32_t k = q->out; k < q->out + q->n_out; k++) {
            q->score->nll += e->out[k].nll;
            q->score->hits += e->out[k].hits;
        }
        if (!rc && !isfinite(q->score->nll))
            rc = error_set(err, ERR_NUMERIC,
                           "a member's loss is not a number; lower sigma or the learning rate");
        kv_cache_truncate(forward_kv_cache(e->forward), i, 0);
    }
    e->n_rows = e->n_seqs = e->n_segs = e->n_out = 0;
    return rc;
}

static int32_t lowest_adapted_layer(const struct es *e) {
    int32_t i = 0, n = e->m->config.n_layers * N_PROJ;
    while (i < n && !trainer_lora(e->t, e->index, i / N_PROJ, i % N_PROJ)->r) i++;
    return MIN(i / N_PROJ, e->m->config.n_layers - 1);
}

/* Runs the samples' rows through the layers below the adapter, in passes. */
static void lower_layers_forward(struct es *e) {
    int64_t from = 0;
    for (int i = 0; i <= e->n; i++) {
        const struct train_sample *s = &e->samples[i];
        int32_t rows = i < e->n ? sample_rows(s) : 0;
        if (e->n_rows && (i == e->n || !pass_has_room(e, rows))) {
            forward_lower_layers(e->forward, e->first_layer, e->rows, e->n_rows,
                                 e->stream + from * e->m->config.d_model);
            while (e->n_seqs > 0) kv_cache_truncate(forward_kv_cache(e->forward), --e->n_seqs, 0);
            e->n_rows = 0;
            from = e->stream_offset[i];
        }
        for (int32_t k = 0; k < rows; k++)
            e->rows[e->n_rows++] = (struct batch_row){s->tokens[k], k, e->n_seqs};
        e->n_seqs += rows > 0;
    }
}

/* Caches the output of the layers below the adapter, which is the same for all members. */
static int lower_layers_cache(struct es *e, struct error *err) {
    e->first_layer = lowest_adapted_layer(e);
    if (!e->first_layer) return OK;
    e->stream_offset = xcalloc((size_t)e->n + 1, sizeof *e->stream_offset);
    for (int i = 0; i < e->n; i++)
        e->stream_offset[i + 1] = e->stream_offset[i] + sample_rows(&e->samples[i]);
    size_t row = (size_t)e->m->config.d_model * sizeof *e->stream,
           rows = (size_t)e->stream_offset[e->n];
    e->stream = try_calloc(rows, row, err);
    if (!e->stream) return err->code;
    e->stream_peak = MAX(e->stream_peak, rows * row);
    lower_layers_forward(e);
    return OK;
}

static void lower_layers_release(struct es *e) {
    free(e->stream);
    free(e->stream_offset);
    e->stream = NULL;
    e->stream_offset = NULL;
}

/* Frees the maps of pairs [0, end). */
static void pairs_release(struct es *e, int64_t end) {
    for (int64_t i = 0; i < end; i++) lora_pack_release(e, &e->pairs[i]);
}

/* Sets scores [N][n]: each member on each sample. */
static int evaluate_population(struct es *e, struct member_score *scores, struct error *err) {
    int64_t all = e->o->population * e->n;
    int rc = OK;
    for (int64_t i = 0; !rc && i < all;) {
        bool added = pass_add(e, (int)(i / e->n), (int)(i % e->n), &scores[i]);
        i += added;
        if (added && i < all) continue;
        rc = pass_run(e, err);
        pairs_release(e, i / e->n / 2);
    }
    pairs_release(e, e->o->population / 2);
    return rc;
}

/* Computes the fitness of the members from their scores, and the pairs' coefficients (f₊ - f₋) /
 * (N σ) from the shaped fitness. */
static void pair_coefficients(struct es *e, const struct member_score *scores) {
    int n = (int)e->o->population;
    double *f = xmalloc((size_t)n * sizeof *f), squares = 0;
    e->fitness_mean = 0;
    for (int i = 0; i < n; i++) {
        f[i] = e->fitness->compute(scores + (int64_t)i * e->n, e->n);
        e->fitness_mean += f[i] / n;
    }
    for (int i = 0; i < n; i++) squares += (f[i] - e->fitness_mean) * (f[i] - e->fitness_mean) / n;
    e->fitness_std = sqrt(squares);
    e->shaping->shape(f, n);
    for (int i = 0; i < n / 2; i++) e->coef[i] = (f[2 * i] - f[2 * i + 1]) / (n * e->o->sigma);
    free(f);
}

static void param_group_add_counts(struct es *e, const struct member_score *scores) {
    struct param_group *g = &e->t->groups[e->index];
    double nll = 0;
    int64_t targets = 0;
    for (int64_t i = 0; i < e->o->population * e->n; i++) {
        nll += scores[i].nll;
        targets += scores[i].targets;
    }
    g->nll += nll / (double)targets;
    g->samples += e->n;
    e->t->targets_since_update += targets;
    for (int i = 0; i < e->n; i++) e->t->tokens_since_update += e->o->population * e->samples[i].n;
}

static bool has_targets(const struct train_sample *s, int n) {
    for (int i = 0; i < n; i++)
        if (sample_rows(&s[i])) return true;
    return false;
}

int es_accumulate(struct es *e, struct trainer *t, int index, const struct train_sample *samples,
                  int n, struct error *err) {
    CHECK(n > 0 && !t->full && index >= 0 && index < t->n_adapters && t->model == e->m);
    if (adapter_require_plain(t->adapters[index], "training by es", err) != OK) return err->code;
    if (!has_targets(samples, n)) return OK;
    struct rng seed = rng_make(t->seed, RNG_NOISE, 0, (uint32_t)t->groups[index].updates);
    e->t = t;
    e->index = index;
    e->seed = rng_u64(&seed);
    e->samples = samples;
    e->n = n;
    int rc = forward_reserve(e, err);
    if (rc) return rc;
    struct member_score *scores = xcalloc((size_t)(e->o->population * n), sizeof *scores);
    e->center = center_pack(e);
    rc = lower_layers_cache(e, err);
    if (!rc) rc = evaluate_population(e, scores, err);
    if (!rc) {
        pair_coefficients(e, scores);
        param_group_add_counts(e, scores);
        es_add_gradient(t, index, e->seed, e->coef, (int)e->o->population / 2);
    }
    lora_pack_release(e, &e->center);
    lower_layers_release(e);
    free(scores);
    return rc;
}
