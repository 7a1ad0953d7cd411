/*
 * bind: the steps that need the base model: DoRA's multipliers, replacement tables reduced to the
 * rows that differ, and opening an adapter for a model.
 *
 * DoRA replaces W by m ⊙ (W + scale · B A) / ‖W + scale · B A‖, with norms of rows. The factor m /
 * ‖·‖ is constant for a given base and adapter, so it is computed here once, in double. The forward
 * pass runs plain LoRA and multiplies the outputs by the factor.
 */
#include "adapter/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Σ of the squares of the entries [j, j + n) of the vector row + Σ_r w[r] · A[r]. The caller's hot
 * loop passes a constant n, so that the compiler keeps the entries in registers. */
static inline __attribute__((always_inline)) double
columns_sum_squares(const float *row, const double *w, const struct lora *lo, int64_t k, int64_t j,
                    int n) {
    double sum[8], sum_squares = 0;
    const float *a = lo->a + j;
    for (int t = 0; t < n; t++) sum[t] = (double)row[j + t];
    for (int32_t r = 0; r < lo->r; r++, a += k)
        for (int t = 0; t < n; t++) sum[t] += w[r] * (double)a[t];
    for (int t = 0; t < n; t++) sum_squares += sum[t] * sum[t];
    return sum_squares;
}

/* ‖row + scale · b A‖ of one output; `b` [R] is its row of B. `w` [R] is scratch. */
static double row_norm(const float *row, const struct lora *lo, const float *b, int64_t k,
                       double *w) {
    double sum_squares = 0;
    int64_t j = 0;
    for (int32_t r = 0; r < lo->r; r++) w[r] = (double)lo->scale * (double)b[r];
    for (; j + 8 <= k; j += 8) sum_squares += columns_sum_squares(row, w, lo, k, j, 8);
    if (j < k) sum_squares += columns_sum_squares(row, w, lo, k, j, (int)(k - j));
    return sqrt(sum_squares);
}

double lora_row_norm(const struct lora *lo, int64_t o, const float *row, int64_t k) {
    double *scratch = xmalloc((size_t)lo->r * sizeof *scratch);
    double norm = row_norm(row, lo, lo->b + o * lo->r, k, scratch);
    free(scratch);
    return norm;
}

/* mult[n] = magnitude[n] / ‖row n of W + scale · B A‖. If `full` is not NULL, its rows are used
 * instead of those of w. */
static int module_compute_multipliers(const struct matrix *w, const float *full,
                                      const struct lora *lo, const float *magnitude, float *mult,
                                      const char *name, struct error *err) {
    float *row = xmalloc((size_t)w->k * sizeof *row);
    double *scratch = xmalloc((size_t)lo->r * sizeof *scratch);
    int rc = OK;
    for (int64_t n = 0; n < w->n && rc == OK; n++) {
        if (full)
            memcpy(row, full + n * w->k, (size_t)w->k * sizeof *row);
        else
            matrix_get_row(w, n, row);
        double norm = row_norm(row, lo, lo->b + n * lo->r, w->k, scratch);
        mult[n] = (float)((double)magnitude[n] / norm);
        if (!isfinite(mult[n]))
            rc = error_set(err, ERR_NUMERIC, "DoRA on '%s': output %lld has the norm %g", name,
                           (long long)n, norm);
    }
    free(row);
    free(scratch);
    return rc;
}

/* Writes DoRA's magnitudes of all modules, the norms of the base's rows, to dst; returns its end.
 */
static float *magnitudes_init(const struct model *m, const struct adapter *plain, float *dst) {
    for (int32_t i = 0; i < m->config.n_layers * N_PROJ; i++) {
        const struct matrix *w = &m->layers[i / N_PROJ].proj[i % N_PROJ];
        if (plain->loras[i].r == 0) continue;
        float *row = xmalloc((size_t)w->k * sizeof *row);
        for (int64_t o = 0; o < w->n; o++) {
            matrix_get_row(w, o, row);
            *dst++ = (float)lora_row_norm(&plain->loras[i], o, row, w->k);
        }
        free(row);
    }
    return dst;
}

/* Writes the initial values of the embedding's or head's changes to dst; returns its end. */
static float *table_init(const struct model *m, const struct adapter_vocab_config *t, bool head,
                         uint64_t seed, float *dst) {
    const struct matrix *w = head ? &m->head : &m->embed;
    int64_t v = m->config.vocab_size, d = m->config.d_model, r = t->lora.r;
    struct rng rng =
        rng_make(seed, RNG_INIT, (uint32_t)(m->config.n_layers * N_PROJ) + (uint32_t)head, 0);
    const float bound = (float)(1 / sqrt((double)d));
    for (int64_t i = 0; i < r * (head ? d : v); i++)
        *dst++ = head ? bound * (2 * rng_uniform(&rng) - 1) : 0;
    for (int64_t i = 0; i < r * (head ? v : d); i++) *dst++ = head ? 0 : rng_normal(&rng);
    for (int64_t i = 0; t->full && i < v; i++, dst += d) matrix_get_row(w, i, dst);
    for (int32_t i = 0; i < t->n_ids; i++, dst += d) matrix_get_row(w, t->ids[i], dst);
    return dst;
}

/* The low-rank parts of the layers alone. NULL without targets in the layers. */
static struct adapter *layers_new(const struct model_config *shape, const struct adapter_config *c,
                                  uint64_t seed) {
    struct adapter_config layers = *c;
    layers.dora = false;
    layers.embed = layers.head = (struct adapter_vocab_config){0};
    return adapter_param_count(shape, &layers) ? adapter_new(shape, &layers, seed) : NULL;
}

struct adapter *adapter_new_for_model(const struct model *m, const struct adapter_config *c,
                                      uint64_t seed, struct error *err) {
    const struct model_config *shape = &m->config;
    struct adapter *plain = layers_new(shape, c, seed), *a = NULL;
    if (!c->dora && !adapter_config_has_vocab(c)) return plain;
    CHECK(!c->dora || (c->embed.lora.r == 0 && c->head.lora.r == 0));
    size_t n = adapter_param_count(shape, c);
    float *data = try_calloc(n, sizeof *data, err), *dst = data;
    if (data && plain) memcpy(data, plain->data, plain->n_data * sizeof *data);
    if (data && plain) dst += plain->n_data;
    if (data && plain && c->dora) dst = magnitudes_init(m, plain, dst);
    if (data) dst = table_init(m, &c->embed, false, seed, dst);
    if (data) dst = table_init(m, &c->head, true, seed, dst);
    CHECK(!data || dst == data + n);
    if (data) a = adapter_from_owned_data(shape, c, data, NULL);
    adapter_release(plain);
    if (!a || adapter_bind(a, m, err) == OK) return a;
    adapter_release(a);
    return NULL;
}

bool adapter_is_ready(const struct adapter *a) {
    return !a->config.dora || a->bind_arena.head;
}

/* Computes the multipliers of all modules and of the head. After an error all of them are NULL. */
static int dora_compute_multipliers(struct adapter *a, const struct model *m, struct error *err) {
    int32_t n = a->shape.n_layers * N_PROJ;
    char name[NAME_MAX_LEN];
    int rc = OK;
    for (int32_t i = 0; i < n && rc == OK; i++) {
        const struct matrix *w = &m->layers[i / N_PROJ].proj[i % N_PROJ];
        if (a->loras[i].r == 0) continue;
        float *mult = arena_try_alloc(&a->bind_arena, sizeof *mult * (size_t)w->n, err);
        peft_module_name(name, a->shape.arch, i);
        rc = !mult ? err->code
                   : module_compute_multipliers(w, NULL, &a->loras[i], a->magnitude[i], mult, name,
                                                err);
        a->loras[i].dora_scale = mult;
    }
    struct vocab_override *head = a->vocab_overrides ? &a->vocab_overrides->head : NULL;
    if (rc == OK && head && head->lora.r > 0) {
        float *mult = arena_try_alloc(&a->bind_arena, sizeof *mult * (size_t)m->head.n, err);
        rc = !mult ? err->code
                   : module_compute_multipliers(&m->head, head->full, &head->lora, a->magnitude[n],
                                                mult, "lm_head", err);
        head->lora.dora_scale = mult;
    }
    if (rc == OK) return OK;
    for (int32_t i = 0; i < n; i++) a->loras[i].dora_scale = NULL;
    if (head) head->lora.dora_scale = NULL;
    arena_release(&a->bind_arena);
    return rc;
}

/* If at least three quarters of a replacement table's rows are bitwise equal to the base's, keeps
 * only the rows that differ. With a few replaced rows, a request shares the batch's product with
 * the base's table; a full table needs a separate product. */
static int table_reduce_to_rows(struct vocab_override *t, const struct matrix *base,
                                struct arena *arena, struct error *err) {
    const float *full = t->full;
    if (!full) return OK;
    size_t size = (size_t)base->k * sizeof *full;
    int32_t *ids = try_calloc((size_t)base->n, sizeof *ids, err), *ids_copy, n = 0;
    if (!ids) return err->code;
    float *row = xmalloc(size), *rows;
    int rc = OK;
    for (int32_t i = 0; i < base->n; i++) {
        matrix_get_row(base, i, row);
        if (memcmp(row, full + i * base->k, size) != 0) ids[n++] = i;
    }
    if (n > 0 && n <= base->n / 4) {
        ids_copy = arena_try_alloc(arena, (size_t)n * sizeof *ids, err);
        rows = ids_copy ? arena_try_alloc(arena, size * (size_t)n, err) : NULL;
        if (!rows) rc = err->code;
        for (int32_t i = 0; rows && i < n; i++)
            memcpy(rows + i * base->k, full + ids[i] * base->k, size);
        if (rows) t->ids = memcpy(ids_copy, ids, (size_t)n * sizeof *ids), t->rows = rows, t->n = n;
    }
    if (rc == OK && n <= base->n / 4) t->full = NULL;
    free(row);
    free(ids);
    return rc;
}

int adapter_bind(struct adapter *a, const struct model *m, struct error *err) {
    CHECK(adapter_fits(a, &m->config) && !a->bind_arena.head);
    if (a->config.dora && dora_compute_multipliers(a, m, err) != OK) return err->code;
    if (!a->vocab_overrides) return OK;
    int rc = table_reduce_to_rows(&a->vocab_overrides->embed, &m->embed, &a->bind_arena, err);
    return rc == OK ? table_reduce_to_rows(&a->vocab_overrides->head, &m->head, &a->bind_arena, err)
                    : rc;
}

/* Whether one of the n values v[0], v[stride], … is not 0. */
static bool any_nonzero(const float *v, int64_t n, int64_t stride) {
    for (int64_t i = 0; i < n; i++)
        if (v[i * stride] != 0) return true;
    return false;
}

/* DoRA divides by norms that are rounded, so a multiplier of a new adapter is 1 up to this. */
#define MULTIPLIER_EPSILON 1e-5f

/* Whether scale · B A is not 0 or a multiplier is not 1. */
static bool lora_has_effect(const struct lora *lo, int64_t out, int64_t in) {
    for (int64_t o = 0; lo->dora_scale && o < out; o++)
        if (fabsf(lo->dora_scale[o] - 1) > MULTIPLIER_EPSILON) return true;
    for (int32_t c = 0; lo->scale != 0 && c < lo->r; c++)
        if (any_nonzero(lo->b + c, out, lo->r) && any_nonzero(lo->a + c * in, in, 1)) return true;
    return false;
}

static bool table_has_effect(const struct vocab_override *t, int64_t out, int64_t in) {
    return t->full || t->n > 0 || lora_has_effect(&t->lora, out, in);
}

bool adapter_has_effect(const struct adapter *a) {
    const struct vocab_overrides *v = a->vocab_overrides;
    int64_t vocab = a->shape.vocab_size, d = a->shape.d_model;
    CHECK(a->data && adapter_is_ready(a));
    for (int32_t i = 0; i < a->shape.n_layers * N_PROJ; i++)
        if (lora_has_effect(&a->loras[i], proj_out(&a->shape, i % N_PROJ),
                            proj_in(&a->shape, i % N_PROJ)))
            return true;
    return v && (table_has_effect(&v->embed, d, vocab) || table_has_effect(&v->head, vocab, d));
}

void adapter_warn_no_effect(const struct adapter *a, const char *path) {
    if (adapter_has_effect(a)) return;
    log_warn("adapter '%s' has no effect, because its B or its scale is 0: it was not trained, or "
             "the training changed nothing",
             path);
}

bool adapter_path_is_gguf(const char *path) {
    char magic[4] = "";
    return file_read_head(path, magic, sizeof magic) == sizeof magic && !memcmp(magic, "GGUF", 4);
}

struct adapter *adapter_open_with_hash(const char *path, struct model *m, const char *hash,
                                       struct error *err) {
    struct adapter_load_hints hints = {.model = m, .hash = hash};
    struct adapter *a = adapter_path_is_gguf(path) ? gguf_load(path, &m->config, &hints, err)
                                                   : peft_load(path, &m->config, &hints, err);
    if (!a) return NULL;
    if (adapter_bind(a, m, err) != OK) {
        error_wrap(err, "adapter '%s'", path);
        adapter_release(a);
        return NULL;
    }
    if (!hash) adapter_warn_other_base(a, path, m);
    return a;
}

struct adapter *adapter_open(const char *path, struct model *m, struct error *err) {
    struct adapter *a = adapter_open_with_hash(path, m, NULL, err);
    if (a) a->training_data = training_data_read(path);
    return a;
}
