/*
 * trainer: parameters, batches and the order of one forward and backward pass.
 *
 * Full training works on the model's own f32 arrays; LoRA training on copies of the adapters'
 * floats over a frozen base, of which f32 copies and their transposes are made once. A batch is
 * packed end to end and sorted by adapter; memory for its activations grows to the largest batch
 * seen and is then reused. What this file does not do: choose samples, learning rates or when to
 * update.
 *
 * Invariant: gradients are sums over targets until trainer_update divides by each group's own
 * count.
 */
#include "train/internal.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* Adds a trained tensor and returns its gradient array. */
static float *tensor_add(struct trainer *t, float *w, int64_t n, bool decay, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

static float *tensor_add(struct trainer *t, float *w, int64_t n, bool decay, const char *fmt, ...) {
    char name[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(name, sizeof name, fmt, args);
    va_end(args);
    int i = t->n_tensors++;
    t->tensors = xrealloc(t->tensors, (size_t)t->n_tensors * sizeof *t->tensors);
    t->m = xrealloc(t->m, (size_t)t->n_tensors * sizeof *t->m);
    t->v = xrealloc(t->v, (size_t)t->n_tensors * sizeof *t->v);
    t->tensors[i] = (struct train_tensor){.name = arena_strdup(&t->arena, name),
                                          .w = w,
                                          .n = n,
                                          .decay = decay,
                                          .g = arena_alloc(&t->arena, (size_t)n * sizeof(float))};
    t->m[i] = arena_alloc(&t->arena, (size_t)n * sizeof(float));
    t->v[i] = arena_alloc(&t->arena, (size_t)n * sizeof(float));
    return t->tensors[i].g;
}

/* Trained in place: the model was made by model_new, so its arrays are writable although the struct
 * says const. */
static float *norm_add(struct trainer *t, const float *w, int64_t n, int l, const char *name) {
    return tensor_add(t, (float *)w, n, false, "model.layers.%d.%s.weight", l, name);
}

static void layer_add(struct trainer *t, int l) {
    const struct layer *from = &t->model->layers[l];
    struct layer_params *to = &t->layers[l];
    to->g_attn_norm = norm_add(t, from->attn_norm, t->c.d_model, l, "input_layernorm");
    for (int p = 0; p < N_PROJ; p++) {
        const struct matrix *m = &from->proj[p];
        to->proj[p] = (struct weight){.w = m->data, .n = m->n, .k = m->k};
        to->proj[p].g =
            tensor_add(t, (float *)m->data, m->n * m->k, true, "model.layers.%d.%s.weight", l,
                       proj_hf_path(t->c.arch, (enum proj)p));
    }
    if (from->q_norm) {
        to->g_q_norm = norm_add(t, from->q_norm, t->c.head_dim, l, "self_attn.q_norm");
        to->g_k_norm = norm_add(t, from->k_norm, t->c.head_dim, l, "self_attn.k_norm");
    }
    to->g_ffn_norm = norm_add(t, from->ffn_norm, t->c.d_model, l, "post_attention_layernorm");
}

static void full_params(struct trainer *t) {
    const struct model *m = t->model;
    int64_t n = m->embed.n * m->embed.k;
    t->g_embed = tensor_add(t, (float *)m->embed.data, n, false, "model.embed_tokens.weight");
    for (int l = 0; l < t->c.n_layers; l++) layer_add(t, l);
    t->g_final_norm =
        tensor_add(t, (float *)m->final_norm, t->c.d_model, false, "model.norm.weight");
    t->head = (struct weight){.w = m->head.data, .n = m->head.n, .k = m->head.k, .g = t->g_embed};
    if (!t->c.tied) t->head.g = tensor_add(t, (float *)m->head.data, n, true, "lm_head.weight");
    t->groups[0].n_tensors = t->n_tensors;
}

struct freeze_job {
    const struct matrix *m;
    float *w;
};

static void freeze_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct freeze_job *j = ctx;
    for (int64_t i = begin; i < end; i++) matrix_row(j->m, i, j->w + i * j->m->k);
}

/* A base matrix in f32 (in place when it is that already) and its transpose. */
static struct weight weight_freeze(struct trainer *t, const struct matrix *m) {
    struct weight w = {.w = m->data, .n = m->n, .k = m->k};
    size_t bytes = (size_t)(m->n * m->k) * sizeof(float);
    if (m->type != TENSOR_F32 || m->packed) {
        struct freeze_job job = {.m = m, .w = arena_alloc(&t->arena, bytes)};
        pool_run(t->pool, freeze_items, &job, m->n, 1);
        w.w = job.w;
    }
    float *wt = arena_alloc(&t->arena, bytes);
    transpose(wt, m->n, w.w, m->k, m->n, m->k, t->pool);
    w.wt = wt;
    return w;
}

static void adapter_add(struct trainer *t, int i) {
    const struct adapter *ad = t->adapters[i];
    struct group *g = &t->groups[i];
    t->data[i] = arena_alloc(&t->arena, ad->n_data * sizeof(float));
    memcpy(t->data[i], ad->data, ad->n_data * sizeof(float));
    g->first = t->n_tensors;
    for (int64_t j = 0; j < (int64_t)t->c.n_layers * N_PROJ; j++) {
        const struct lora *from = &ad->loras[j];
        struct lora_params *to = &t->loras[(int64_t)i * t->c.n_layers * N_PROJ + j];
        int l = (int)(j / N_PROJ), p = (int)(j % N_PROJ);
        if (!from->r) continue;
        int64_t in = proj_in(&t->c, (enum proj)p), out = proj_out(&t->c, (enum proj)p);
        to->r = from->r;
        to->scale = from->scale;
        to->a = t->data[i] + (from->a - ad->data);
        to->b = t->data[i] + (from->b - ad->data);
        to->ga = tensor_add(t, to->a, in * to->r, true, "%d.layers.%d.%s.lora_A.weight", i, l,
                            proj_hf_path(t->c.arch, (enum proj)p));
        to->gb = tensor_add(t, to->b, out * to->r, true, "%d.layers.%d.%s.lora_B.weight", i, l,
                            proj_hf_path(t->c.arch, (enum proj)p));
        t->max_r = MAX(t->max_r, to->r);
    }
    g->n_tensors = t->n_tensors - g->first;
}

/* At most what the arena must hold: the base in f32 twice (as it is and transposed), and for every
 * adapter its floats, their gradients and two moments, in tensors with names. */
static size_t lora_bytes(const struct trainer *t) {
    int64_t base = model_param_count(&t->c) + (int64_t)t->c.vocab_size * t->c.d_model;
    size_t bytes = (size_t)base * 2 * sizeof(float);
    size_t tensors = (size_t)t->c.n_layers * N_PROJ * 2;
    for (int i = 0; i < t->n_adapters; i++)
        bytes += t->adapters[i]->n_data * 4 * sizeof(float) + tensors * (256 + 4 * 64);
    return bytes + tensors * 64;
}

static void lora_params(struct trainer *t) {
    for (int l = 0; l < t->c.n_layers; l++)
        for (int p = 0; p < N_PROJ; p++)
            t->layers[l].proj[p] = weight_freeze(t, &t->model->layers[l].proj[p]);
    t->head = weight_freeze(t, &t->model->head);
    for (int i = 0; i < t->n_adapters; i++) adapter_add(t, i);
}

/* The frozen base by a sample of its weights: enough to tell two models of one shape apart without
 * reading them whole. */
static void base_fingerprint(const struct trainer *t, struct hasher *h) {
    int64_t d = t->c.d_model;
    for (int l = 0; l < t->c.n_layers; l++) {
        hasher_add(h, t->layers[l].attn_norm, (size_t)d * sizeof(float));
        for (int p = 0; p < N_PROJ; p++) {
            const struct weight *w = &t->layers[l].proj[p];
            hasher_add(h, w->w, (size_t)w->k * sizeof(float));
        }
    }
    for (int64_t i = 0; i < t->head.n; i += 16)
        hasher_add(h, t->head.w + i * d, (size_t)d * sizeof(float));
}

static void fingerprint_make(struct trainer *t) {
    const struct model_config *c = &t->c;
    struct hasher h;
    struct buf b = {0};
    buf_printf(&b, "%s %d %d %d %d %d %d %d %a %a %d\n", c->arch->name, c->n_layers, c->d_model,
               c->n_heads, c->n_kv_heads, c->head_dim, c->d_ff, c->vocab_size,
               (double)c->rope_theta, (double)c->rms_norm_eps, c->tied);
    if (c->rope_scaling.kind != ROPE_DEFAULT)
        buf_printf(&b, "rope %d %a %a %a %d\n", (int)c->rope_scaling.kind,
                   (double)c->rope_scaling.factor, (double)c->rope_scaling.low_freq_factor,
                   (double)c->rope_scaling.high_freq_factor, c->rope_scaling.original_len);
    buf_printf(&b, "%a %a %a %a %a %a %llu\n", (double)t->beta1, (double)t->beta2, (double)t->eps,
               (double)t->decay, (double)t->max_grad_norm, (double)t->dropout,
               (unsigned long long)t->seed);
    for (int i = 0; i < t->n_adapters; i++) {
        const struct adapter_config *a = &t->adapters[i]->config;
        buf_printf(&b, "r %d alpha %a\n", a->r, (double)a->alpha);
    }
    hasher_init(&h);
    hasher_add(&h, b.data, b.len);
    if (!t->full) base_fingerprint(t, &h);
    hasher_final(&h, t->fingerprint);
    buf_release(&b);
}

static struct trainer *trainer_alloc(const struct model *m, int n_groups,
                                     const struct train_options *o, struct pool *pool) {
    struct trainer *t = xcalloc(1, sizeof *t);
    t->model = m;
    t->c = m->config;
    t->k = kernels_get();
    t->pool = pool;
    t->seed = (uint64_t)o->seed;
    t->beta1 = (float)o->beta1;
    t->beta2 = (float)o->beta2;
    t->eps = (float)o->eps;
    t->decay = (float)o->weight_decay;
    t->max_grad_norm = (float)o->max_grad_norm;
    t->final_norm = m->final_norm;
    t->n_groups = n_groups;
    t->groups = xcalloc((size_t)n_groups, sizeof *t->groups);
    t->layers = xcalloc((size_t)t->c.n_layers, sizeof *t->layers);
    t->acts = xcalloc((size_t)t->c.n_layers + 1, sizeof *t->acts);
    t->att_scratch = xcalloc((size_t)pool_size(pool), sizeof *t->att_scratch);
    /* about 32 MB of logits at a time */
    t->head_chunk = MAX(16, MIN(1024, ((int64_t)1 << 23) / t->c.vocab_size / 16 * 16));
    return t;
}

/* After the projections: layer_add and weight_freeze fill those only. */
static void norms_view(struct trainer *t) {
    for (int l = 0; l < t->c.n_layers; l++) {
        const struct layer *from = &t->model->layers[l];
        t->layers[l].attn_norm = from->attn_norm;
        t->layers[l].ffn_norm = from->ffn_norm;
        t->layers[l].q_norm = from->q_norm;
        t->layers[l].k_norm = from->k_norm;
    }
}

static bool matrix_writable(const struct matrix *m) {
    return m->type == TENSOR_F32 && !m->packed;
}

/* What the backward pass can follow: gated MLPs with silu, RMS norms, no biases, full attention. */
static int model_check(const struct model *m, struct error *err) {
    const struct model_config *c = &m->config;
    static const char *const names[] = {"llama", "qwen3"};
    bool known = false;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) known |= strcmp(c->arch->name, names[i]) == 0;
    if (!known)
        return error_set(err, ERR_MISMATCH,
                         "model '%s' cannot be trained: its architecture is '%s'; llama and qwen3 "
                         "can be trained, the others run, with adapters as well",
                         m->name, c->arch->name);
    if (c->biased || c->window)
        return error_set(err, ERR_MISMATCH,
                         "model '%s' cannot be trained: it has %s, which training does not support",
                         m->name, c->biased ? "biases" : "sliding windows");
    return OK;
}

struct trainer *trainer_new_full(struct model *m, const struct train_options *o, struct pool *pool,
                                 struct error *err) {
    if (model_check(m, err) != OK) return NULL;
    bool f32 = matrix_writable(&m->embed) && matrix_writable(&m->head) && m->n_maps == 0;
    for (int l = 0; l < m->config.n_layers; l++)
        for (int p = 0; p < N_PROJ; p++) f32 = f32 && matrix_writable(&m->layers[l].proj[p]);
    if (!f32) {
        error_set(err, ERR_STATE,
                  "model '%s' cannot be trained whole: its weights are not f32 in memory", m->name);
        return NULL;
    }
    struct trainer *t = trainer_alloc(m, 1, o, pool);
    t->full = true;
    size_t tensors = (size_t)t->c.n_layers * 11 + 3; /* their gradients, two moments and names */
    size_t bytes = (size_t)model_param_count(&t->c) * 3 * sizeof(float) + tensors * (256 + 3 * 64);
    if (arena_reserve(&t->arena, bytes, err) != OK) {
        trainer_free(t);
        return NULL;
    }
    full_params(t);
    norms_view(t);
    fingerprint_make(t);
    return t;
}

static bool shape_equal(const struct model_config *a, const struct model_config *b) {
    return a->n_layers == b->n_layers && a->d_model == b->d_model && a->n_heads == b->n_heads &&
           a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim && a->d_ff == b->d_ff;
}

struct trainer *trainer_new_lora(const struct model *m, struct adapter *const *adapters, int n,
                                 const struct train_options *o, struct pool *pool,
                                 struct error *err) {
    CHECK(n > 0);
    if (model_check(m, err) != OK) return NULL;
    for (int i = 0; i < n; i++)
        if (adapter_require_plain(adapters[i], "training", err)) return NULL;
    for (int i = 0; i < n; i++)
        if (!shape_equal(&adapters[i]->shape, &m->config)) {
            error_set(err, ERR_MISMATCH, "adapter %d was made for another shape than model '%s'", i,
                      m->name);
            return NULL;
        }
    if (!(o->lora_dropout >= 0 && o->lora_dropout < 1)) {
        error_set(err, ERR_USAGE, "'lora_dropout' is %g; it must be at least 0 and below 1",
                  o->lora_dropout);
        return NULL;
    }
    struct trainer *t = trainer_alloc(m, n, o, pool);
    t->dropout = (float)o->lora_dropout;
    t->n_adapters = n;
    t->adapters = xcalloc((size_t)n, sizeof *t->adapters);
    t->data = xcalloc((size_t)n, sizeof *t->data);
    t->loras = xcalloc((size_t)n * (size_t)t->c.n_layers * N_PROJ, sizeof *t->loras);
    for (int i = 0; i < n; i++) t->adapters[i] = adapter_retain(adapters[i]);
    if (arena_reserve(&t->arena, lora_bytes(t), err) != OK) {
        trainer_free(t);
        return NULL;
    }
    lora_params(t);
    norms_view(t);
    fingerprint_make(t);
    return t;
}

void trainer_free(struct trainer *t) {
    if (!t) return;
    for (int i = 0; i < t->n_adapters; i++) adapter_release(t->adapters[i]);
    arena_release(&t->arena);
    arena_release(&t->act);
    free(t->adapters);
    free(t->data);
    free(t->loras);
    free(t->layers);
    free(t->acts);
    free(t->att_scratch);
    free(t->groups);
    free(t->tensors);
    free(t->m);
    free(t->v);
    free(t);
}

int64_t trainer_updates(const struct trainer *t) {
    return t->updates;
}

int trainer_n_tensors(const struct trainer *t) {
    return t->n_tensors;
}

struct train_tensor *trainer_tensor(struct trainer *t, int i) {
    CHECK(i >= 0 && i < t->n_tensors);
    return &t->tensors[i];
}

double trainer_adapter_loss(const struct trainer *t, int i) {
    CHECK(i >= 0 && i < t->n_groups);
    return t->groups[i].loss;
}

struct adapter *trainer_adapter(const struct trainer *t, int i, json_t *lineage) {
    CHECK(i >= 0 && i < t->n_adapters);
    return adapter_from_data(&t->c, &t->adapters[i]->config, t->data[i], lineage);
}

static void *act_take(struct trainer *t, size_t bytes) {
    if (!t->measuring) return arena_alloc(&t->act, bytes);
    t->act_bytes += (MAX(bytes, 1) + 63) / 64 * 64;
    return NULL;
}

static float *floats(struct trainer *t, int64_t n) {
    return act_take(t, (size_t)n * sizeof(float));
}

static bool projection_adapted(const struct trainer *t, int l, int p) {
    for (int i = 0; i < t->n_adapters; i++)
        if (t->loras[((int64_t)i * t->c.n_layers + l) * N_PROJ + p].r) return true;
    return false;
}

static void activations_alloc(struct trainer *t, int l) {
    const struct model_config *c = &t->c;
    int64_t m = t->cap_rows, q = (int64_t)c->n_heads * c->head_dim,
            g = (int64_t)c->n_kv_heads * c->head_dim;
    struct activations *a = &t->acts[l];
    *a = (struct activations){.x = floats(t, m * c->d_model)};
    if (l == c->n_layers) return;
    a->q = floats(t, m * q);
    a->k = floats(t, m * g);
    a->v = floats(t, m * g);
    if (t->layers[l].q_norm) {
        a->q_raw = floats(t, m * q);
        a->k_raw = floats(t, m * g);
    }
    a->att = floats(t, m * q);
    a->mid = floats(t, m * c->d_model);
    a->gate = floats(t, m * c->d_ff);
    a->up = floats(t, m * c->d_ff);
    for (int p = 0; p < N_PROJ; p++) {
        if (!projection_adapted(t, l, p)) continue;
        a->h[p] = floats(t, m * t->max_r);
        if (t->dropout > 0)
            a->keep[p] = act_take(t, (size_t)(m * ((t->layers[l].proj[p].k + 7) / 8)));
    }
}

static void gradients_alloc(struct trainer *t, int64_t wide, int64_t weight) {
    const struct model_config *c = &t->c;
    int64_t m = t->cap_rows, q = (int64_t)c->n_heads * c->head_dim,
            g = (int64_t)c->n_kv_heads * c->head_dim;
    int64_t d = c->d_model, ld = m + 48; /* see batch_measure */
    t->dx = floats(t, m * d);
    t->dxn = floats(t, m * d);
    t->dq = floats(t, m * q);
    t->dk = floats(t, m * g);
    t->dv = floats(t, m * g);
    t->datt = floats(t, m * q);
    t->dgate = floats(t, m * c->d_ff);
    t->dup = floats(t, m * c->d_ff);
    t->dact = floats(t, m * c->d_ff);
    t->rstd = floats(t, m * c->n_heads);
    t->tx = floats(t, wide * ld);
    t->ty = floats(t, wide * ld);
    t->wt = floats(t, MAX(t->full ? weight : 0, wide * t->max_r));
    if (t->full) return;
    t->dh = floats(t, m * t->max_r);
    t->th = floats(t, t->max_r * ld);
    t->tdh = floats(t, t->max_r * ld);
    if (t->dropout > 0) t->drop = floats(t, m * wide);
}

static void head_alloc(struct trainer *t) {
    int64_t n = t->head_chunk, d = t->c.d_model, v = t->c.vocab_size;
    t->hx = floats(t, n * d);
    t->hn = floats(t, n * d);
    t->dhn = floats(t, n * d);
    t->logits = floats(t, n * v);
    if (!t->full) return;
    t->hx_t = floats(t, n * d);
    t->logits_t = floats(t, n * v);
    t->head_wt = floats(t, v * d);
}

static void rope_alloc(struct trainer *t) {
    int64_t n = t->cap_len * (t->c.head_dim / 2);
    t->rope_cos = floats(t, n);
    t->rope_sin = floats(t, n);
    t->rope_neg = floats(t, n);
}

static void rope_fill(struct trainer *t) {
    int64_t n = t->cap_len * (t->c.head_dim / 2);
    rope_table(&t->c, (int32_t)t->cap_len, t->rope_cos, t->rope_sin);
    for (int64_t i = 0; i < n; i++) t->rope_neg[i] = -t->rope_sin[i];
}

static void batch_lay(struct trainer *t) {
    int64_t wide = 0, weight = 0;
    for (int p = 0; p < N_PROJ; p++) {
        const struct weight *w = &t->layers[0].proj[p];
        wide = MAX(wide, MAX(w->n, w->k));
        weight = MAX(weight, w->n * w->k);
    }
    for (int l = 0; l <= t->c.n_layers; l++) activations_alloc(t, l);
    t->xn = floats(t, t->cap_rows * t->c.d_model);
    t->act_buf = floats(t, t->cap_rows * t->c.d_ff);
    gradients_alloc(t, wide, weight);
    head_alloc(t);
    rope_alloc(t);
    t->spans = act_take(t, (size_t)t->cap_rows * sizeof *t->spans);
    t->tokens_in = act_take(t, (size_t)t->cap_rows * sizeof *t->tokens_in);
    t->pos = act_take(t, (size_t)t->cap_rows * sizeof *t->pos);
    t->target_row = act_take(t, (size_t)t->cap_rows * sizeof *t->target_row);
    t->target_token = act_take(t, (size_t)t->cap_rows * sizeof *t->target_token);
    t->target_group = act_take(t, (size_t)t->cap_rows * sizeof *t->target_group);
    t->target_nll = act_take(t, (size_t)t->cap_rows * sizeof *t->target_nll);
    for (int i = 0; i < pool_size(t->pool); i++)
        t->att_scratch[i] = act_take(t, attention_scratch(&t->c, t->cap_len));
}

/* Everything is laid out again when a batch is larger than all before it: counted, asked for at
 * once, so that a batch too large for the machine is an error, and then placed. */
static int batch_reserve(struct trainer *t, struct error *err) {
    if (t->rows <= t->cap_rows && t->longest <= t->cap_len && t->cap_rows > 0) return OK;
    t->cap_rows = MAX(t->cap_rows, (t->rows / 128 + 1) * 128);
    t->cap_len = MAX(t->cap_len, (t->longest / 64 + 1) * 64);
    arena_release(&t->act);
    t->act_bytes = 0;
    t->measuring = true;
    batch_lay(t);
    t->measuring = false;
    if (arena_reserve(&t->act, t->act_bytes, err) != OK) {
        t->cap_rows = t->cap_len = 0;
        return error_wrap(err, "a batch of %lld tokens", (long long)t->rows);
    }
    batch_lay(t);
    rope_fill(t);
    return OK;
}

/* Rows that matter: the last target at token i needs rows 0..i-1. */
static int32_t sample_rows(const struct sample *s) {
    for (int32_t i = s->n - 1; i > 0; i--)
        if (s->mask[i]) return i;
    return 0;
}

static int sample_check(const struct trainer *t, const struct sample *s, int i, struct error *err) {
    if (!t->full && (s->adapter < 0 || s->adapter >= t->n_adapters))
        return error_set(err, ERR_USAGE, "sample %d names adapter %d of %d", i, s->adapter,
                         t->n_adapters);
    if (s->n - 1 > t->c.max_seq_len)
        return error_set(err, ERR_MEMORY, "sample %d has %d tokens; the model reads %d", i, s->n,
                         t->c.max_seq_len);
    for (int32_t j = 0; j < s->n; j++)
        if (s->tokens[j] < 0 || s->tokens[j] >= t->c.vocab_size)
            return error_set(err, ERR_USAGE,
                             "token %d of sample %d is outside the vocabulary of %d", s->tokens[j],
                             i, t->c.vocab_size);
    return OK;
}

static int batch_measure(struct trainer *t, const struct sample *samples, int n,
                         struct error *err) {
    t->rows = t->longest = 0;
    for (int i = 0; i < n; i++) {
        int rc = sample_check(t, &samples[i], i, err);
        if (rc) return rc;
        int64_t rows = sample_rows(&samples[i]);
        t->rows += rows;
        t->longest = MAX(t->longest, rows);
    }
    /* multiples of 16 for the lanes, but not of 256: transposes would fall on one cache set */
    t->ldt = (t->rows + 15) / 16 * 16;
    if (t->ldt % 256 == 0) t->ldt += 16;
    return OK;
}

static void sample_pack(struct trainer *t, const struct sample *s, int32_t adapter,
                        int64_t ordinal) {
    int64_t at = t->n_spans ? t->spans[t->n_spans - 1].end : 0;
    int32_t rows = sample_rows(s);
    if (!rows) return;
    t->spans[t->n_spans++] = (struct span){
        .begin = at, .end = at + rows, .adapter = adapter, .ordinal = ordinal, .sample = s};
    for (int32_t i = 0; i < rows; i++) {
        t->tokens_in[at + i] = s->tokens[i];
        t->pos[at + i] = i;
        if (!s->mask[i + 1]) continue;
        t->target_row[t->targets] = at + i;
        t->target_token[t->targets] = s->tokens[i + 1];
        t->target_group[t->targets++] = adapter;
    }
}

/* Samples of one adapter lie together, in the order given. */
static int batch_pack(struct trainer *t, const struct sample *samples, int n, struct error *err) {
    int rc = batch_measure(t, samples, n, err);
    if (!rc) rc = batch_reserve(t, err);
    if (rc) return rc;
    t->n_spans = 0;
    t->targets = 0;
    for (int g = 0; g < t->n_groups; g++) {
        int64_t ordinal = t->groups[g].samples;
        for (int i = 0; i < n; i++)
            if (t->full || samples[i].adapter == g) sample_pack(t, &samples[i], g, ordinal++);
    }
    return OK;
}

bool all_finite(const float *x, int64_t n) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bad |= ((bits & 0x7f800000u) + 0x00800000u) & 0x80000000u;
    }
    return !bad;
}

static void embed_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    struct trainer *t = ctx;
    int64_t d = t->c.d_model;
    for (int64_t i = begin; i < end; i++)
        matrix_row(&t->model->embed, t->tokens_in[i], t->acts[0].x + i * d);
}

/* Items are columns; each adds all rows in order. */
static void embed_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    struct trainer *t = ctx;
    int64_t d = t->c.d_model;
    for (int64_t i = 0; i < t->rows; i++)
        t->k->axpy(t->g_embed + t->tokens_in[i] * d + begin, 1.0f, t->dx + i * d + begin,
                   end - begin);
}

static int layers_forward(struct trainer *t, struct error *err) {
    pool_run(t->pool, embed_items, t, t->rows, 8);
    for (int l = 0; l < t->c.n_layers; l++) {
        layer_forward(t, l);
        if (!all_finite(t->acts[l + 1].x, t->rows * t->c.d_model))
            return error_set(err, ERR_NUMERIC,
                             "'model.layers.%d' gives a NaN or Inf; lower the learning rate", l);
    }
    return OK;
}

static int layers_backward(struct trainer *t, struct error *err) {
    for (int l = t->c.n_layers - 1; l >= 0; l--) {
        layer_backward(t, l);
        if (!all_finite(t->dx, t->rows * t->c.d_model))
            return error_set(
                err, ERR_NUMERIC,
                "the gradient of 'model.layers.%d' has a NaN or Inf; lower the learning "
                "rate",
                l);
    }
    if (t->full) pool_run(t->pool, embed_backward_items, t, t->c.d_model, 16);
    return OK;
}

int trainer_accumulate(struct trainer *t, const struct sample *samples, int n, struct error *err) {
    int rc = batch_pack(t, samples, n, err);
    if (rc) return rc;
    t->dropping = t->dropout > 0;
    if (t->targets && ((rc = layers_forward(t, err)) || (rc = head_loss(t, true, err)) ||
                       (rc = layers_backward(t, err))))
        return rc;
    for (int64_t i = 0; i < t->targets; i++) {
        t->groups[t->target_group[i]].nll += t->target_nll[i];
        t->groups[t->target_group[i]].targets++;
    }
    for (int i = 0; i < n; i++) {
        t->groups[t->full ? 0 : samples[i].adapter].samples++;
        t->tokens += samples[i].n;
    }
    return OK;
}

int trainer_loss(struct trainer *t, const struct sample *samples, int n, double *nll,
                 int64_t *targets, struct error *err) {
    int rc = batch_pack(t, samples, n, err);
    *nll = 0;
    *targets = 0;
    if (rc) return rc;
    t->dropping = false;
    if (t->targets && ((rc = layers_forward(t, err)) || (rc = head_loss(t, false, err)))) return rc;
    for (int64_t i = 0; i < t->targets; i++) *nll += t->target_nll[i];
    *targets = t->targets;
    return OK;
}

void sample_release(struct sample *s) {
    free(s->tokens);
    free(s->mask);
    *s = (struct sample){0};
}
