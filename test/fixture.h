/*
 * fixture: small models and adapters for tests, with weights large enough that attention and
 * adapters have an effect.
 *
 * All values come from seeds. The models are model_new_random's, with norms spread around 1,
 * matrices amplified and, if requested, converted to another weight type; the caller closes and
 * releases them.
 */
#ifndef SHOAL_TEST_FIXTURE_H
#define SHOAL_TEST_FIXTURE_H

#include "adapter/adapter.h"

#include <stdlib.h>
#include <string.h>

/* A small Llama shape, for tests without weights. */
static inline struct model_config fixture_shape(int layers, int d, int heads, int kv, int head_dim,
                                                int ff) {
    return (struct model_config){.arch = arch_find("llama"),
                                 .n_layers = layers,
                                 .d_model = d,
                                 .n_heads = heads,
                                 .n_kv_heads = kv,
                                 .head_dim = head_dim,
                                 .d_ff = ff,
                                 .vocab_size = 64,
                                 .max_seq_len = 32,
                                 .rope_theta = 10000,
                                 .rms_norm_eps = 1e-5f};
}

static inline void fixture_norm(const float *norm, int64_t n, struct rng *rng) {
    float *g = (float *)(uintptr_t)norm; // model_new_random's weights are writable
    for (int64_t i = 0; g && i < n; i++) g[i] = 0.5f + rng_uniform(rng);
}

/* Amplifies and, for other types than f32, converts and re-packs. */
static inline void fixture_matrix(struct model *m, struct matrix *w, enum tensor_type type,
                                  enum numeric_class cls) {
    struct error err;
    float *v = (float *)(uintptr_t)w->data;
    if (!v) return; // a matrix that the architecture lacks
    for (int64_t i = 0; i < w->n * w->k; i++) v[i] *= 8.0f;
    if (type == TENSOR_F32) return;
    size_t row = tensor_row_bytes(type, w->k);
    uint8_t *rows = arena_alloc(&m->arena, row * (size_t)w->n);
    for (int64_t i = 0; i < w->n; i++)
        tensor_from_f32(type, v + i * w->k, rows + (size_t)i * row, w->k);
    if (matrix_init(w, type, w->n, w->k, rows, NULL, cls, NULL, &m->arena, &err) != OK)
        check_failed(__FILE__, __LINE__, err.text);
}

static inline struct model *fixture_model_of(struct model_config c, bool tied,
                                             enum tensor_type type, enum numeric_class cls) {
    c.tied = tied;
    struct model *m = model_new_random(&c, 11, cls);
    struct rng rng = rng_make(5, RNG_TEST, 0, 0);
    for (int32_t l = 0; l < c.n_layers; l++) {
        for (int p = 0; p < N_PROJ; p++) fixture_matrix(m, &m->layers[l].proj[p], type, cls);
        fixture_norm(m->layers[l].attn_norm, c.d_model, &rng);
        fixture_norm(m->layers[l].ffn_norm, c.d_model, &rng);
        fixture_norm(m->layers[l].q_norm, c.head_dim, &rng);
        fixture_norm(m->layers[l].k_norm, c.head_dim, &rng);
        fixture_norm(m->layers[l].post_attn_norm, c.d_model, &rng);
        fixture_norm(m->layers[l].post_ffn_norm, c.d_model, &rng);
        fixture_norm(m->layers[l].attn_norm_bias, c.d_model, &rng);
        fixture_norm(m->layers[l].ffn_norm_bias, c.d_model, &rng);
        for (int p = 0; p < N_PROJ; p++)
            fixture_norm(m->layers[l].bias[p], proj_out(&c, (enum proj)p), &rng);
    }
    fixture_norm(m->final_norm, c.d_model, &rng);
    fixture_norm(m->final_norm_bias, c.d_model, &rng);
    fixture_matrix(m, &m->embed, type, cls);
    fixture_matrix(m, &m->pos_embed, type, cls);
    if (tied)
        m->head = m->embed;
    else
        fixture_matrix(m, &m->head, type, cls);
    m->type = type;
    return m;
}

static inline struct model *fixture_model(const char *shape, bool tied, enum tensor_type type,
                                          enum numeric_class cls) {
    struct model_config c;
    struct error err;
    if (model_preset_find(shape, &c, &err) != OK) check_failed(__FILE__, __LINE__, err.text);
    return fixture_model_of(c, tied, type, cls);
}

/* A model of this shape with fry's tokenizer, in which the six actions of the grid environment
 * begin with six different tokens; a context of 128 tokens. NULL: the tokenizer cannot be opened.
 */
static inline struct model *fixture_model_with_fry_tokenizer(struct model_config c) {
    struct error err;
    c.vocab_size = 768;
    c.max_seq_len = 128;
    struct model *m = fixture_model_of(c, false, TENSOR_F32, NUMERIC_EXACT);
    tokenizer_free(m->tok);
    m->tok = tokenizer_from_json("test/models/fry-1/tokenizer.json", &err);
    if (m->tok) return m;
    model_close(m);
    return NULL;
}

/* Both factors random; alpha = 1.5 r, so the scale is 1.5. `targets` as on the command line, from
 * layer `first` on. */
static inline struct adapter *fixture_adapter_from(const struct model_config *c, int32_t first,
                                                   int32_t r, const char *targets, float std,
                                                   uint64_t seed) {
    struct error err;
    struct adapter_config ac = {.r = r, .alpha = 1.5f * (float)r};
    if (adapter_targets_parse(targets, ac.target, &err) != OK)
        check_failed(__FILE__, __LINE__, err.text);
    struct adapter_module *modules = xcalloc((size_t)c->n_layers * N_PROJ, sizeof *modules);
    for (int32_t i = first * N_PROJ; i < c->n_layers * N_PROJ; i++)
        if (ac.target[i % N_PROJ]) modules[i] = (struct adapter_module){ac.r, ac.alpha};
    if (first > 0) ac.modules = modules;
    size_t n = adapter_param_count(c, &ac);
    float *data = xcalloc(n, sizeof *data);
    struct rng rng = rng_make(seed, RNG_TEST, 1, 0);
    for (size_t i = 0; i < n; i++) data[i] = std * rng_normal(&rng);
    struct adapter *a = adapter_from_data(c, &ac, data, NULL);
    free(data);
    free(modules);
    return a;
}

static inline struct adapter *fixture_adapter(const struct model_config *c, int32_t r,
                                              const char *targets, float std, uint64_t seed) {
    return fixture_adapter_from(c, 0, r, targets, std, seed);
}

/* A copy of a plain adapter that these tokens activate. */
static inline struct adapter *fixture_activated(const struct adapter *a, const int32_t *ids,
                                                int32_t n) {
    struct adapter_config c = a->config;
    c.invocation = ids;
    c.n_invocation = n;
    return adapter_from_data(&a->shape, &c, a->data, NULL);
}

/* The n weights of a tensor by its name, base + scale · [-1, 1): the formula of
 * test/oracle/arch_oracle.py, bit for bit. */
static inline void fixture_formula(float *w, int64_t n, const char *name, float base, float scale) {
    uint32_t hash = 2166136261u;
    for (; *name; name++) hash = (hash ^ (uint8_t)*name) * 16777619u;
    for (int64_t i = 0; i < n; i++) {
        uint32_t x = hash + (uint32_t)i * 0x9E3779B9u;
        x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
        x = (x ^ (x >> 13)) * 0xC2B2AE35u;
        x ^= x >> 16;
        w[i] = base + scale * ((float)((int32_t)(x >> 16) - 32768) / 32768.0f);
    }
}

/* The optional data set PATH under $SHOAL_SHARED or ../shared, or NULL with a message. The caller
 * frees it. */
static inline char *fixture_shared(const char *path) {
    const char *root = getenv("SHOAL_SHARED");
    char *full = path_join(root && *root ? root : "../shared", path);
    if (path_exists(full)) return full;
    fprintf(stderr, "SKIP: no '%s'; set SHOAL_SHARED\n", full);
    free(full);
    return NULL;
}

#endif
