/*
 * trainer: the parameters, and the order of a forward and backward pass.
 *
 * Full training changes the model's f32 arrays. LoRA training changes copies of the adapters'
 * parameters; the base model is frozen, is not copied and may be quantised. This file does not pack
 * batches, choose samples or learning rates, or decide when to update.
 *
 * Invariant: gradients are sums until trainer_update divides them by each group's count.
 */
#include "backprop/internal.h"

#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
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
    t->moments = xrealloc(t->moments, (size_t)t->n_tensors * sizeof *t->moments);
    size_t bytes = optimizer_state_bytes(t->optim, n);
    t->tensors[i] = (struct train_tensor){.name = arena_strdup(&t->arena, name),
                                          .w = w,
                                          .n = n,
                                          .decay = decay,
                                          .g = arena_alloc(&t->arena, (size_t)n * sizeof(float))};
    t->moments[i] = (struct optimizer_state){arena_alloc(&t->arena, bytes), bytes};
    return t->tensors[i].g;
}

/* The gradient array of the tensor whose parameters are at w, or NULL. */
static float *grad_of(const struct trainer *t, const void *w) {
    for (int i = 0; w && i < t->n_tensors; i++)
        if (t->tensors[i].w == w) return t->tensors[i].g;
    return NULL;
}

static void layer_grads_set(struct trainer *t, int l) {
    const struct model_layer *w = &t->model->layers[l];
    struct layer_grads *g = &t->layers[l];
    for (int p = 0; p < N_PROJ; p++) {
        g->proj[p] = grad_of(t, w->proj[p].data);
        g->bias[p] = grad_of(t, w->bias[p]);
    }
    g->attn_norm = grad_of(t, w->attn_norm);
    g->attn_norm_bias = grad_of(t, w->attn_norm_bias);
    g->ffn_norm = grad_of(t, w->ffn_norm);
    g->ffn_norm_bias = grad_of(t, w->ffn_norm_bias);
    g->post_attn_norm = grad_of(t, w->post_attn_norm);
    g->post_ffn_norm = grad_of(t, w->post_ffn_norm);
    g->q_norm = grad_of(t, w->q_norm);
    g->k_norm = grad_of(t, w->k_norm);
}

/* Adds all weights of the model; they are trained in place. Weight decay applies to matrices,
 * except token and position tables. */
static void full_params_add(struct trainer *t, struct model *m) {
    for (int32_t i = 0; i < model_weight_count(&t->c); i++) {
        struct model_weight w = model_weight_at(m, i);
        bool table = w.data == m->embed.data || w.data == m->pos_embed.data;
        tensor_add(t, w.data, w.n * w.k, w.n > 1 && !table, "%s", w.name);
    }
    for (int l = 0; l < t->c.n_layers; l++) layer_grads_set(t, l);
    t->g_embed = grad_of(t, m->embed.data);
    t->g_head = grad_of(t, m->head.data);
    t->g_pos = grad_of(t, m->pos_embed.data);
    t->g_final_norm = grad_of(t, m->final_norm);
    t->g_final_norm_bias = grad_of(t, m->final_norm_bias);
    t->groups[0].n_tensors = t->n_tensors;
}

/* The magnitudes of projection j (layer * N_PROJ + projection) of adapter i, in the trainer's copy
 * of its parameters; NULL without DoRA. */
static float *magnitude_of(const struct trainer *t, int i, int64_t j) {
    const struct adapter *ad = t->adapters[i];
    return ad->config.dora ? t->adapter_data[i] + (ad->magnitude[j] - ad->data) : NULL;
}

/* Adds a tensor of adapter i's embedding or head; returns its gradient. NULL if w is NULL. */
static float *vocab_tensor(struct trainer *t, int i, bool head, const float *w, int64_t n,
                           bool decay, const char *what) {
    if (!w) return NULL;
    return tensor_add(t, (float *)(uintptr_t)w, n, decay, "%d.%s.%s", i,
                      head ? "lm_head" : "embed_tokens", what);
}

/* Moves the pointers of one table from the adapter's data to the trainer's copy, and adds its
 * tensors. */
static struct vocab_params vocab_table_add(struct trainer *t, int i, bool head,
                                           const struct vocab_override *from) {
    const float *old = t->adapters[i]->data, *new = t->adapter_data[i];
    const int64_t v = t->c.vocab_size, d = t->c.d_model, r = from->lora.r;
    struct vocab_params to = {.w = *from};
    if (from->full) to.w.full = new + (from->full - old);
    if (from->rows) to.w.rows = new + (from->rows - old);
    if (r > 0) to.w.lora.a = new + (from->lora.a - old);
    if (r > 0) to.w.lora.b = new + (from->lora.b - old);
    to.g_a = vocab_tensor(t, i, head, to.w.lora.a, r * (head ? d : v), true, "lora_A");
    to.g_b = vocab_tensor(t, i, head, to.w.lora.b, r * (head ? v : d), true, "lora_B");
    to.g_full = vocab_tensor(t, i, head, to.w.full, v * d, false, "weight");
    t->vocab_max_r = MAX(t->vocab_max_r, from->lora.r);
    t->vocab_floats += (size_t)(to.w.full ? v * d : 0) + (size_t)(from->n * d);
    if (head) t->vocab_max_ids = MAX(t->vocab_max_ids, from->n);
    return to;
}

/* Adds the tensors of adapter i's embedding and head. The rows of a tied embedding are one tensor,
 * whose gradient from the head has its own array until vocab_grads_join. */
static void vocab_add(struct trainer *t, int i) {
    const struct vocab_overrides from = adapter_vocab_params(t->adapters[i]);
    const int64_t n[] = {from.embed.n * (int64_t)t->c.d_model, from.head.n * (int64_t)t->c.d_model};
    struct vocab_tables *to = &t->vocab[i];
    to->embed = vocab_table_add(t, i, false, &from.embed);
    to->embed.g_rows =
        vocab_tensor(t, i, false, to->embed.w.rows, n[0], false, "trainable_tokens_delta");
    to->head = vocab_table_add(t, i, true, &from.head);
    if (from.head.rows && from.head.rows == from.embed.rows)
        to->head.g_rows = arena_alloc(&t->arena, (size_t)n[1] * sizeof(float));
    else
        to->head.g_rows =
            vocab_tensor(t, i, true, to->head.w.rows, n[1], false, "trainable_tokens_delta");
    t->embed_trained |= from.embed.full || from.embed.n > 0 || from.embed.lora.r > 0;
}

static float *lora_tensor(struct trainer *t, int i, int64_t j, float *w, int64_t n,
                          const char *what) {
    return tensor_add(t, w, n, true, "%d.layers.%d.%s.%s", i, (int)(j / N_PROJ),
                      proj_hf_path(t->c.arch, (enum proj)(j % N_PROJ)), what);
}

/* Copies adapter i's parameters and adds its tensors as group i. */
static void adapter_add(struct trainer *t, int i) {
    const struct adapter *ad = t->adapters[i];
    struct param_group *g = &t->groups[i];
    t->adapter_data[i] = arena_alloc(&t->arena, ad->n_data * sizeof(float));
    memcpy(t->adapter_data[i], ad->data, ad->n_data * sizeof(float));
    g->first_tensor = t->n_tensors;
    for (int64_t j = 0; j < (int64_t)t->c.n_layers * N_PROJ; j++) {
        const struct lora *from = &ad->loras[j];
        struct lora_params *to = &t->loras[(int64_t)i * t->c.n_layers * N_PROJ + j];
        if (!from->r) continue;
        int64_t in = proj_in(&t->c, (enum proj)(j % N_PROJ)),
                out = proj_out(&t->c, (enum proj)(j % N_PROJ));
        to->r = from->r;
        to->scale = from->scale;
        to->a = t->adapter_data[i] + (from->a - ad->data);
        to->b = t->adapter_data[i] + (from->b - ad->data);
        to->ga = lora_tensor(t, i, j, to->a, in * to->r, "lora_A.weight");
        to->gb = lora_tensor(t, i, j, to->b, out * to->r, "lora_B.weight");
        to->bt = arena_alloc(&t->arena, (size_t)(out * to->r) * sizeof(float));
        t->max_r = MAX(t->max_r, to->r);
        if (!(to->m = magnitude_of(t, i, j))) continue;
        to->gm = lora_tensor(t, i, j, to->m, out, "lora_magnitude_vector");
        to->mult = arena_alloc(&t->arena, (size_t)out * sizeof(float));
        to->norm = arena_alloc(&t->arena, (size_t)out * sizeof(float));
    }
    if (t->vocab) vocab_add(t, i);
    g->n_tensors = t->n_tensors - g->first_tensor;
}

/* Upper bound of the bytes of one adapter in the arena: parameters, gradients, transposes of
 * factors or the second gradients of tied rows, optimizer state, and the names and alignment of
 * tensors. */
static size_t lora_bytes(const struct model_config *c, const struct adapter_config *a,
                         enum optim optim) {
    struct adapter_config without_tables = *a;
    without_tables.embed.full = without_tables.head.full = false;
    size_t n = adapter_param_count(c, a), small = adapter_param_count(c, &without_tables),
           tensors = (size_t)c->n_layers * N_PROJ * 3 + 8;
    return (2 * n + small) * sizeof(float) + optimizer_state_bytes(optim, (int64_t)n) +
           tensors * (256 + 8 * 64 + MOMENT_BLOCK);
}

/* Hashes every step-th row of a matrix, or with step 0 only the first row. Such a sample of the
 * base model distinguishes two models of one shape without reading all weights. */
static void rows_hash(const struct matrix *m, int64_t step, struct sha256 *h) {
    float *row = xmalloc((size_t)m->k * sizeof *row);
    for (int64_t i = 0; i < m->n; i += step) {
        matrix_get_row(m, i, row);
        sha256_update(h, row, (size_t)m->k * sizeof *row);
        if (!step) break;
    }
    free(row);
}

/* Hashes a norm and the first row of each projection of every layer, and every 16th row of the
 * head. */
static void base_fingerprint(const struct trainer *t, struct sha256 *h) {
    const struct model *m = t->model;
    int64_t d = t->c.d_model;
    for (int l = 0; l < t->c.n_layers; l++) {
        sha256_update(h, m->layers[l].attn_norm, (size_t)d * sizeof(float));
        for (int p = 0; p < N_PROJ; p++) rows_hash(&m->layers[l].proj[p], 0, h);
    }
    rows_hash(&m->head, 16, h);
}

/* The tokens whose rows adapter i trains; sizes of tables are in the list of tensors. */
static void token_ids_print(const struct adapter_config *a, struct buf *b) {
    const struct adapter_vocab_config *tables[] = {&a->embed, &a->head};
    for (int k = 0; k < 2; k++) {
        if (tables[k]->n_ids == 0) continue;
        buf_puts(b, k ? "lm_head" : "embed_tokens");
        for (int32_t i = 0; i < tables[k]->n_ids; i++) buf_printf(b, " %d", tables[k]->ids[i]);
        buf_puts(b, "\n");
    }
}

static void fingerprint_compute(struct trainer *t) {
    const struct model_config *c = &t->c;
    struct sha256 h;
    struct buf b = {0};
    buf_printf(&b, "%s %d %d %d %d %d %d %d %a %a %d\n", c->arch->name, c->n_layers, c->d_model,
               c->n_heads, c->n_kv_heads, c->head_dim, c->d_ff, c->vocab_size,
               (double)c->rope_theta, (double)c->rms_norm_eps, c->tied);
    if (c->rope_scaling.kind != ROPE_DEFAULT)
        buf_printf(&b, "rope %d %a %a %a %d\n", (int)c->rope_scaling.kind,
                   (double)c->rope_scaling.factor, (double)c->rope_scaling.low_freq_factor,
                   (double)c->rope_scaling.high_freq_factor, c->rope_scaling.original_len);
    buf_printf(&b, "%d %a %a %a %a %a %a %a %d %llu\n", (int)t->optim, (double)t->beta1,
               (double)t->beta2, (double)t->eps, (double)t->weight_decay, (double)t->momentum,
               (double)t->max_grad_norm, (double)t->dropout, (int)t->grad_path,
               (unsigned long long)t->seed);
    for (int i = 0; i < t->n_adapters; i++) {
        const struct adapter_config *a = &t->adapters[i]->config;
        buf_printf(&b, "r %d alpha %a rslora %d dora %d\n", a->r, (double)a->alpha, a->rslora,
                   a->dora);
        token_ids_print(a, &b);
    }
    if (t->kv_elem != DTYPE_F32) buf_printf(&b, "kv %s\n", dtype_name(t->kv_elem));
    sha256_init(&h);
    sha256_update(&h, b.data, b.len);
    if (!t->full) base_fingerprint(t, &h);
    sha256_final(&h, t->fingerprint);
    buf_release(&b);
}

static bool mlp_uses_tiles(const struct trainer *t) {
    if (t->grad_path != GRAD_TILES) return false;
    for (int l = 0; l < t->c.n_layers; l++)
        if (!layer_can_fuse_gated_mlp(&t->model->layers[l], t->c.arch, t->row_path)) return false;
    return true;
}

static struct trainer *trainer_alloc(const struct model *m, int n_groups,
                                     const struct train_options *o, struct pool *pool,
                                     struct error *err) {
    enum optim optim = OPTIM_ADAMW;
    enum dtype kv_elem;
    if (optim_parse(o->optim ? o->optim : "adamw", &optim, err) != OK ||
        train_kv_dtype_parse(o, m->cls, NULL, &kv_elem, err) != OK)
        return NULL;
    struct trainer *t = xcalloc(1, sizeof *t);
    t->model = m;
    t->c = m->config;
    t->k = kernels_get();
    t->pool = pool;
    t->seed = (uint64_t)o->seed;
    t->optim = optim == OPTIM_SGD && o->momentum == 0 ? OPTIM_SGD_NO_MOMENTUM : optim;
    t->beta1 = (float)o->beta1;
    t->beta2 = (float)o->beta2;
    t->eps = (float)o->eps;
    t->weight_decay = (float)o->weight_decay;
    t->momentum = (float)o->momentum;
    t->max_grad_norm = (float)o->max_grad_norm;
    t->checkpointing = o->gradient_checkpointing;
    t->row_path = m->cls == NUMERIC_FAST ? ROWS_KNOWN : ROWS_EXACT;
    t->grad_path = o->f32_backward                              ? GRAD_F32
                   : m->cls == NUMERIC_FAST && t->k->gemm_tiles ? GRAD_TILES
                                                                : GRAD_INT8;
    t->kv_elem = kv_elem;
    t->lora_tiles = t->row_path != ROWS_EXACT && t->k->gemm_tiles;
    t->mlp_tiles = mlp_uses_tiles(t);
    t->derived_stale = true;
    t->n_groups = n_groups;
    t->groups = xcalloc((size_t)n_groups, sizeof *t->groups);
    t->layers = xcalloc((size_t)t->c.n_layers, sizeof *t->layers);
    t->acts = xcalloc((size_t)t->c.n_layers + 1, sizeof *t->acts);
    t->att_scratch = xcalloc((size_t)pool_size(pool), sizeof *t->att_scratch);
    return t;
}

/* The same of full training: gradients, optimizer state and names. */
static size_t full_bytes(const struct model_config *c, enum optim optim) {
    size_t tensors = (size_t)model_weight_count(c);
    int64_t n = model_param_count(c);
    return (size_t)n * sizeof(float) + optimizer_state_bytes(optim, n) +
           tensors * (256 + 3 * 64 + MOMENT_BLOCK);
}

static bool matrix_is_writable(const struct matrix *m) {
    return m->n == 0 || (m->type == TENSOR_F32 && !m->packed);
}

struct trainer *trainer_new_full(struct model *m, const struct train_options *o, struct pool *pool,
                                 struct error *err) {
    bool f32 = matrix_is_writable(&m->embed) && matrix_is_writable(&m->head) &&
               matrix_is_writable(&m->pos_embed) && m->n_maps == 0;
    for (int l = 0; l < m->config.n_layers; l++)
        for (int p = 0; p < N_PROJ; p++) f32 = f32 && matrix_is_writable(&m->layers[l].proj[p]);
    if (!f32) {
        error_set(err, ERR_STATE,
                  "model '%s' cannot be trained whole: its weights are not f32 in memory", m->name);
        return NULL;
    }
    struct trainer *t = trainer_alloc(m, 1, o, pool, err);
    if (!t) return NULL;
    t->full = true;
    if (m->cls == NUMERIC_FAST) t->row_path = ROWS_TRAINING;
    t->lora_tiles = false;
    t->mlp_tiles = mlp_uses_tiles(t);
    if (arena_reserve(&t->arena, full_bytes(&t->c, t->optim), err) != OK) {
        trainer_free(t);
        return NULL;
    }
    full_params_add(t, m);
    fingerprint_compute(t);
    return t;
}

static bool shape_equal(const struct model_config *a, const struct model_config *b) {
    return a->n_layers == b->n_layers && a->d_model == b->d_model && a->n_heads == b->n_heads &&
           a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim && a->d_ff == b->d_ff;
}

static int adapter_check(const struct adapter *a, int i, const struct model *m, struct error *err) {
    const struct adapter_config *c = &a->config;
    if (!shape_equal(&a->shape, &m->config) ||
        (adapter_config_has_vocab(c) && !adapter_fits(a, &m->config)))
        return error_set(err, ERR_MISMATCH, "adapter %d does not fit the shape of model '%s'", i,
                         m->name);
    const bool both = (c->embed.full && c->embed.lora.r) || (c->head.full && c->head.lora.r);
    if ((c->dora && c->head.lora.r) || both)
        return error_set(err, ERR_MISMATCH,
                         "adapter '%.12s' has %s: that cannot be trained, only used", a->hash,
                         both ? "a replacement table below the low-rank part of embedding or head"
                              : "DoRA's magnitudes of the head");
    return OK;
}

struct trainer *trainer_new_lora(const struct model *m, struct adapter *const *adapters, int n,
                                 const struct train_options *o, struct pool *pool,
                                 struct error *err) {
    CHECK(n > 0);
    bool vocab = false;
    for (int i = 0; i < n; i++) {
        if (adapter_check(adapters[i], i, m, err)) return NULL;
        vocab |= adapter_config_has_vocab(&adapters[i]->config);
    }
    if (!(o->lora_dropout >= 0 && o->lora_dropout < 1)) {
        error_set(err, ERR_USAGE, "'lora_dropout' is %g; it must be at least 0 and below 1",
                  o->lora_dropout);
        return NULL;
    }
    struct trainer *t = trainer_alloc(m, n, o, pool, err);
    if (!t) return NULL;
    t->dropout = (float)o->lora_dropout;
    t->n_adapters = n;
    t->adapters = xcalloc((size_t)n, sizeof *t->adapters);
    t->adapter_data = xcalloc((size_t)n, sizeof *t->adapter_data);
    t->loras = xcalloc((size_t)n * (size_t)t->c.n_layers * N_PROJ, sizeof *t->loras);
    if (vocab) t->vocab = xcalloc((size_t)n, sizeof *t->vocab);
    for (int i = 0; i < n; i++) t->adapters[i] = adapter_retain(adapters[i]);
    size_t bytes = 0;
    for (int i = 0; i < n; i++) bytes += lora_bytes(&t->c, &adapters[i]->config, t->optim);
    if (arena_reserve(&t->arena, bytes, err) != OK) {
        trainer_free(t);
        return NULL;
    }
    for (int i = 0; i < n; i++) adapter_add(t, i);
    fingerprint_compute(t);
    return t;
}

/* A trainer without model and adapters, which can only compute the memory of passes. With a = NULL
 * it is one of full training. */
static struct trainer *trainer_new_shape(const struct model *m, struct adapter *shape, int n,
                                         const struct train_options *o, struct pool *pool) {
    struct error ignored; // the options are checked
    struct trainer *t = trainer_alloc(m, n, o, pool, &ignored);
    CHECK(t);
    t->full = !shape;
    if (!shape) return t;
    const struct adapter_config *a = &shape->config;
    t->adapters = xcalloc((size_t)n, sizeof *t->adapters);
    for (int i = 0; i < n; i++) t->adapters[i] = shape;
    for (int i = 0; i < t->c.n_layers * N_PROJ; i++)
        t->max_r = MAX(t->max_r, adapter_module_at(a, i / N_PROJ, (enum proj)(i % N_PROJ)).r);
    t->dropout = (float)o->lora_dropout;
    t->n_adapters = n;
    return t;
}

static void trainer_free_shape(struct trainer *t) {
    t->n_adapters = 0; // trainer_free releases only real adapters
    trainer_free(t);
}

/* Memory of a trainer with the largest passes that `bytes` allow; a = NULL: of full training, whose
 * passes have all `rows`. weights: bytes of the model's, from which activation_memory follows; 0:
 * not more than the passes need. */
static void bytes_bound(const struct model_config *c, enum numeric_class cls,
                        const struct adapter_config *a, int n, const struct train_options *o,
                        struct pool *pool, size_t bytes, int64_t rows, int64_t longest,
                        size_t weights, struct trainer_passes *out) {
    /* Layers without packed weights store no activations in tiles, which are smaller than f32. */
    struct model_layer *layers = xcalloc((size_t)c->n_layers, sizeof *layers);
    const struct model m = {.config = *c, .cls = cls, .layers = layers};
    struct adapter shape = {.config = a ? *a : (struct adapter_config){0}};
    struct trainer *t = trainer_new_shape(&m, a ? &shape : NULL, n, o, pool);
    size_t fixed = a ? (size_t)n * lora_bytes(c, a, t->optim) : full_bytes(c, t->optim);
    trainer_limit_passes(t, bytes - MIN(fixed, bytes), rows, longest, longest, out);
    if (weights) out->bytes = MAX(out->bytes, activation_memory(t, o, longest, weights));
    out->bytes += fixed;
    trainer_free_shape(t);
    free(layers);
}

void trainer_passes_bound(const struct model_config *c, enum numeric_class cls,
                          const struct adapter_config *a, int n, const struct train_options *o,
                          struct pool *pool, size_t bytes, int64_t rows, int64_t longest,
                          struct trainer_passes *out) {
    bytes_bound(c, cls, a, n, o, pool, bytes, rows, longest, 0, out);
}

size_t trainer_least_bytes(const struct model_config *c, enum numeric_class cls,
                           const struct adapter_config *a, int n, const struct train_options *o,
                           struct pool *pool, int64_t longest) {
    struct trainer_passes passes;
    bytes_bound(c, cls, a, n, o, pool, 0, a ? longest : n, longest, 0, &passes);
    return passes.bytes;
}

size_t trainer_most_bytes(const struct model_config *c, enum numeric_class cls,
                          const struct adapter_config *a, int n, const struct train_options *o,
                          struct pool *pool, int64_t longest, size_t weights) {
    struct trainer_passes passes;
    bytes_bound(c, cls, a, n, o, pool, 0, a ? longest : n, longest, MAX(weights, 1), &passes);
    return passes.bytes;
}

void trainer_free(struct trainer *t) {
    if (!t) return;
    for (int i = 0; i < t->n_adapters; i++) adapter_release(t->adapters[i]);
    arena_release(&t->arena);
    arena_release(&t->batch_arena);
    free(t->adapters);
    free(t->adapter_data);
    free(t->loras);
    free(t->vocab);
    free(t->layers);
    free(t->acts);
    free(t->att_scratch);
    free(t->groups);
    free(t->tensors);
    free(t->moments);
    free(t);
}

void trainer_zero_grad(struct trainer *t) {
    vocab_grads_join(t);
    for (int i = 0; i < t->n_tensors; i++)
        memset(t->tensors[i].g, 0, (size_t)t->tensors[i].n * sizeof(float));
    for (int i = 0; i < t->n_groups; i++) {
        t->groups[i].samples = 0;
        t->groups[i].nll = t->groups[i].count = 0;
    }
    t->tokens_since_update = t->targets_since_update = 0;
}

int64_t trainer_update_count(const struct trainer *t) {
    return t->updates;
}

int trainer_n_tensors(const struct trainer *t) {
    return t->n_tensors;
}

struct train_tensor *trainer_tensor(struct trainer *t, int i) {
    CHECK(i >= 0 && i < t->n_tensors);
    vocab_grads_join(t);
    t->derived_stale = true; // the caller may write to it
    return &t->tensors[i];
}

double trainer_adapter_loss(const struct trainer *t, int i) {
    CHECK(i >= 0 && i < t->n_groups);
    return t->groups[i].loss;
}

const float *trainer_adapter_params(const struct trainer *t, int i) {
    CHECK(i >= 0 && i < t->n_adapters);
    return t->adapter_data[i];
}

size_t trainer_optimizer_state_bytes(const struct trainer *t, int i) {
    const struct param_group *g = &t->groups[i];
    size_t bytes = 0;
    for (int k = g->first_tensor; k < g->first_tensor + g->n_tensors; k++)
        bytes += t->moments[k].bytes;
    return bytes;
}

void trainer_optimizer_state(const struct trainer *t, int i, uint8_t *out) {
    const struct param_group *g = &t->groups[i];
    for (int k = g->first_tensor; k < g->first_tensor + g->n_tensors; out += t->moments[k++].bytes)
        memcpy(out, t->moments[k].data, t->moments[k].bytes);
}

void trainer_import_adapter(struct trainer *t, int i, struct adapter *a, const uint8_t *moments,
                            int64_t updates) {
    CHECK(i >= 0 && i < t->n_adapters && a->n_data == t->adapters[i]->n_data && !a->config.dora);
    struct param_group *g = &t->groups[i];
    adapter_copy_params(a, t->adapter_data[i]);
    adapter_release(t->adapters[i]);
    t->adapters[i] = adapter_retain(a);
    for (int k = g->first_tensor; k < g->first_tensor + g->n_tensors; k++) {
        size_t n = t->moments[k].bytes;
        if (moments) memcpy(t->moments[k].data, moments, n);
        if (!moments) memset(t->moments[k].data, 0, n);
        moments += moments ? n : 0;
    }
    g->updates = moments ? updates : 0;
    t->derived_stale = true;
}

void trainer_free_activations(struct trainer *t) {
    batch_free_activations(t);
}

struct adapter *trainer_export_adapter(const struct trainer *t, int i, json_t *lineage) {
    CHECK(i >= 0 && i < t->n_adapters);
    return adapter_from_data(&t->c, &t->adapters[i]->config, t->adapter_data[i], lineage);
}

struct finite_job {
    const float *x;
    atomic_bool bad;
};

static void finite_items(void *ctx, int64_t begin, int64_t end, int thread) {
    struct finite_job *j = ctx;
    uint32_t bits[64] = {0}, bad = 0;
    (void)thread;
    for (int64_t i = begin; i < end; i += 64) { // 64 values: gcc vectorizes a constant length
        memcpy(bits, j->x + i, (size_t)MIN(end - i, 64) * sizeof *bits);
        for (int k = 0; k < 64; k++) bad |= (bits[k] & 0x7f800000u) + 0x00800000u;
    }
    if (bad & 0x80000000u) atomic_store(&j->bad, true);
}

/* Whether all values are finite, that is neither NaN nor Inf. */
static bool all_finite(struct trainer *t, const float *x, int64_t n) {
    struct finite_job j = {.x = x};
    pool_run(t->pool, finite_items, &j, n, 4096);
    return !atomic_load(&j.bad);
}

/* Sets acts[0].x to the embeddings. Items are rows. */
static void embed_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    struct trainer *t = ctx;
    const struct arch *arch = t->c.arch;
    int64_t d = t->c.d_model;
    float *pos = xmalloc((size_t)d * sizeof *pos);
    for (int64_t i = begin; i < end; i++) {
        float *x = t->acts[0].x + i * d;
        if (t->vocab)
            vocab_embed_row(t, i, x);
        else
            matrix_get_row(&t->model->embed, t->tokens_in[i], x);
        if (arch->scaled_embedding) t->k->scale(x, sqrtf((float)d), d);
        if (!arch->learned_pos) continue;
        matrix_get_row(&t->model->pos_embed, t->pos[i], pos);
        t->k->axpy(x, 1.0f, pos, d);
    }
    free(pos);
}

/* Adds to the gradients of the token and position tables. Items are columns; each is summed over
 * all rows in order. */
static void embed_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    struct trainer *t = ctx;
    int64_t d = t->c.d_model, n = end - begin;
    float by = t->c.arch->scaled_embedding ? sqrtf((float)d) : 1.0f;
    for (int64_t i = 0; i < t->rows; i++) {
        const float *dx = t->dx + i * d + begin;
        t->k->axpy(t->g_embed + t->tokens_in[i] * d + begin, by, dx, n);
        if (t->g_pos) t->k->axpy(t->g_pos + t->pos[i] * d + begin, 1.0f, dx, n);
    }
}

void trainer_on_progress(struct trainer *t, void (*fn)(void *ctx, int64_t tokens), void *ctx) {
    t->on_progress = fn;
    t->progress_ctx = ctx;
}

/* A layer of a pass is computed. `parts` are layers of a forward pass; a layer of a backward pass
 * counts as two. */
static void progress_report(const struct trainer *t, int64_t parts) {
    if (t->on_progress)
        t->on_progress(t->progress_ctx,
                       t->tokens_since_update + t->rows * parts / (3 * t->c.n_layers));
}

static int layers_forward(struct trainer *t, struct error *err) {
    lora_prepare(t);
    pool_run(t->pool, embed_items, t, t->rows, 64);
    for (int l = 0; l < t->c.n_layers; l++) {
        layer_forward(t, l);
        if (!all_finite(t, t->acts[l + 1].x, t->rows * t->c.d_model))
            return error_set(err, ERR_NUMERIC,
                             "'model.layers.%d' gives a NaN or Inf; lower the learning rate", l);
        progress_report(t, l + 1);
        if (log_check_cancelled(err) != OK) return err->code;
    }
    return OK;
}

static int layers_backward(struct trainer *t, struct error *err) {
    for (int l = t->c.n_layers - 1; l >= 0; l--) {
        layer_backward(t, l);
        if (!all_finite(t, t->dx, t->rows * t->c.d_model))
            return error_set(
                err, ERR_NUMERIC,
                "the gradient of 'model.layers.%d' has a NaN or Inf; lower the learning "
                "rate",
                l);
        progress_report(t, 3 * t->c.n_layers - 2 * l);
        if (log_check_cancelled(err) != OK) return err->code;
    }
    if (t->full) pool_run(t->pool, embed_backward_items, t, t->c.d_model, 16);
    if (t->embed_trained) vocab_embed_backward(t);
    return OK;
}

/* Calls the loss function with the samples of a pass, sets the weights of the targets, and adds the
 * losses and counts to the groups. */
static int loss_fn_apply(struct trainer *t, const struct loss_fn *loss, struct error *err) {
    struct loss_sample *v = xcalloc((size_t)t->n_seqs, sizeof *v);
    double *logp = xmalloc((size_t)t->targets * sizeof *logp);
    for (int64_t i = 0; i < t->targets; i++) logp[i] = -t->target_nll[i];
    for (int s = 0; s < t->n_seqs; s++) {
        int64_t at = t->seqs[s].first_target,
                end = s + 1 < t->n_seqs ? t->seqs[s + 1].first_target : t->targets;
        v[s] = (struct loss_sample){.sample = t->seqs[s].sample,
                                    .logp = logp + at,
                                    .weight = t->target_weight + at,
                                    .n = (int32_t)(end - at)};
        if (!t->choices) continue;
        v[s].logp = t->choice_logp + at * t->n_choices;
        v[s].weight = t->choice_weight + at * t->n_choices;
    }
    int rc = loss->fn(loss->ctx, v, t->n_seqs, err);
    for (int s = 0; !rc && s < t->n_seqs; s++) {
        struct param_group *g = &t->groups[t->seqs[s].adapter];
        for (int32_t i = 0; i < v[s].n && !t->choices; i++) v[s].weight[i] = -v[s].weight[i];
        g->nll += v[s].loss;
        g->count += v[s].count;
    }
    free(logp);
    free(v);
    return rc;
}

static void nll_add(struct trainer *t) {
    for (int64_t i = 0; i < t->targets; i++) {
        t->groups[t->target_group[i]].nll += t->target_nll[i];
        t->groups[t->target_group[i]].count += 1;
    }
}

/* For a loss over choices: checks that every target is one of the choices (CHECK), and allocates
 * the arrays. */
static int choices_alloc(struct trainer *t, const struct loss_fn *loss, struct error *err) {
    t->choices = loss ? loss->choices : NULL;
    if (!t->choices) return OK;
    if (t->vocab)
        return error_set(err, ERR_MISMATCH,
                         "a loss over choices is for adapters without changes of embedding or "
                         "head");
    t->n_choices = loss->n_choices;
    for (int32_t i = 0; i < t->n_choices; i++)
        CHECK(t->choices[i] >= 0 && t->choices[i] < t->c.vocab_size);
    for (int64_t i = 0; i < t->targets; i++) {
        int32_t k = 0;
        while (k < t->n_choices && t->choices[k] != t->target_token[i]) k++;
        CHECK(k < t->n_choices);
    }
    size_t n = (size_t)(t->targets * t->n_choices);
    t->choice_logp = try_calloc(n, sizeof *t->choice_logp, err);
    t->choice_weight = try_calloc(n, sizeof *t->choice_weight, err);
    return t->choice_logp && t->choice_weight ? OK : err->code;
}

static void choices_free(struct trainer *t) {
    free(t->choice_logp);
    free(t->choice_weight);
    t->choice_logp = NULL;
    t->choice_weight = NULL;
    t->choices = NULL;
}

static int forward_backward(struct trainer *t, const struct loss_fn *loss, struct error *err) {
    int rc = layers_forward(t, err);
    if (!rc && loss && !(rc = fused_cross_entropy(t, false, err))) rc = loss_fn_apply(t, loss, err);
    if (!rc) rc = fused_cross_entropy(t, true, err);
    if (!rc) rc = layers_backward(t, err);
    return rc;
}

static int pass_accumulate(struct trainer *t, const struct train_sample *samples, int n,
                           const struct loss_fn *loss, struct error *err) {
    t->columns = head_columns(t, loss);
    int rc = batch_pack(t, samples, n, err);
    if (rc) return rc;
    t->dropout_active = t->dropout > 0;
    t->logit_scale = loss && loss->temperature > 0 ? 1 / loss->temperature : 1;
    for (int64_t i = 0; i < t->targets; i++) t->target_weight[i] = 1;
    if (t->targets) {
        if ((rc = choices_alloc(t, loss, err)) == OK) rc = forward_backward(t, loss, err);
        choices_free(t);
        if (rc) return rc;
        if (!loss) nll_add(t);
        t->targets_since_update += t->targets;
    }
    for (int i = 0; i < n; i++) {
        t->groups[t->full ? 0 : samples[i].adapter].samples++;
        t->tokens_since_update += samples[i].n;
    }
    return OK;
}

int trainer_accumulate_loss(struct trainer *t, const struct train_sample *samples, int n,
                            const struct loss_fn *loss, struct error *err) {
    batch_set_call_rows(t, samples, n);
    return pass_accumulate(t, samples, n, loss, err);
}

int trainer_accumulate(struct trainer *t, const struct train_sample *samples, int n,
                       struct error *err) {
    int rc = OK;
    batch_set_call_rows(t, samples, n);
    for (int i = 0, taken; !rc && i < n; i += taken) {
        taken = batch_fit(t, samples + i, n - i);
        rc = pass_accumulate(t, samples + i, taken, NULL, err);
    }
    return rc;
}

static int32_t sample_target_count(const struct train_sample *s) {
    int32_t n = 0;
    for (int32_t i = 1; i < s->n; i++) n += s->mask[i] != 0;
    return n;
}

static int pass_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                    struct error *err) {
    t->columns = head_columns(t, NULL);
    int rc = batch_pack(t, samples, n, err);
    if (rc) return rc;
    t->dropout_active = false;
    t->logit_scale = 1;
    if (t->targets && ((rc = layers_forward(t, err)) || (rc = fused_cross_entropy(t, false, err))))
        return rc;
    int64_t *at = xcalloc((size_t)n + 1, sizeof *at); // first target of each sample
    for (int i = 0; i < n; i++) at[i + 1] = at[i] + sample_target_count(&samples[i]);
    for (int s = 0; s < t->n_seqs; s++) {
        int64_t i = t->seqs[s].sample - samples;
        memcpy(nll + at[i], t->target_nll + t->seqs[s].first_target,
               (size_t)(at[i + 1] - at[i]) * sizeof *nll);
    }
    free(at);
    return OK;
}

int trainer_token_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      struct error *err) {
    int rc = OK;
    batch_set_call_rows(t, samples, n);
    for (int i = 0, taken; !rc && i < n; i += taken) {
        taken = batch_fit(t, samples + i, n - i);
        rc = pass_nll(t, samples + i, taken, nll, err);
        for (int k = i; k < i + taken; k++) nll += sample_target_count(&samples[k]);
    }
    return rc;
}

int trainer_sample_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                       int32_t *targets, struct error *err) {
    int64_t all = 0;
    for (int i = 0; i < n; i++) all += targets[i] = sample_target_count(&samples[i]);
    double *each = xcalloc((size_t)all + 1, sizeof *each), *from = each;
    int rc = trainer_token_nll(t, samples, n, each, err);
    for (int i = 0; i < n; i++) {
        nll[i] = 0;
        for (int32_t k = 0; k < targets[i]; k++) nll[i] += *from++;
    }
    free(each);
    return rc;
}

int trainer_eval_loss(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      int64_t *targets, struct error *err) {
    double *each = xcalloc((size_t)n, sizeof *each);
    int32_t *counts = xcalloc((size_t)n, sizeof *counts);
    int rc = trainer_sample_nll(t, samples, n, each, counts, err);
    *nll = 0;
    *targets = 0;
    for (int i = 0; !rc && i < n; i++) {
        *nll += each[i];
        *targets += counts[i];
    }
    free(each);
    free(counts);
    return rc;
}
