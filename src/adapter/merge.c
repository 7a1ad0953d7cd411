/*
 * merge: merges an adapter into its base, and concatenates plain adapters into one.
 *
 * Every entry of a merged matrix is computed in double and rounded to f32, row by row: into a
 * matrix, or when a file of the merged model is written. Matrices that the adapter does not change
 * are shared with the base. Shared matrices may be memory-mapped from the base's file, so that file
 * must not be overwritten in place; model_write_hf and model_write_gguf write a temporary file and
 * rename it.
 */
#include "adapter/internal.h"

#include <stdlib.h>
#include <string.h>

static struct adapter_module concat_module(struct adapter *const *list, int n, int32_t module) {
    struct adapter_module m = {0, 0};
    for (int k = 0; k < n; k++) m.r += list[k]->loras[module].r;
    m.alpha = (float)m.r; /* scale 1: concat_write multiplies B by weight · scale */
    return m;
}

/* Writes one module of the sum to dst: A = the rows of all A [r, in], then B [out, r] = the columns
 * of all B times weight · scale. r is the sum of the ranks. Returns the end of the written data. */
static float *concat_write(float *dst, struct adapter *const *list, const float *weights, int n,
                           int32_t module, int32_t r) {
    int64_t in = proj_in(&list[0]->shape, module % N_PROJ),
            out = proj_out(&list[0]->shape, module % N_PROJ);
    float *b = dst + r * in;
    int32_t rank_offset = 0;
    for (int k = 0; k < n; k++) {
        const struct lora *lo = &list[k]->loras[module];
        double w = (double)weights[k] * (double)lo->scale;
        if (lo->r > 0) memcpy(dst + rank_offset * in, lo->a, (size_t)(lo->r * in) * sizeof *dst);
        for (int64_t o = 0; o < out; o++)
            for (int32_t j = 0; j < lo->r; j++)
                b[o * r + rank_offset + j] = (float)(w * (double)lo->b[o * lo->r + j]);
        rank_offset += lo->r;
    }
    return b + r * out;
}

static int concat_check(struct adapter *const *list, int n, struct error *err) {
    for (int k = 0; k < n; k++) {
        CHECK(list[k]->data); // NULL after adapter_pack_only
        if (adapter_require_plain(list[k], "a weighted sum", err)) return err->code;
        if (!adapter_fits(list[k], &list[0]->shape))
            return error_set(err, ERR_MISMATCH, "adapters '%.12s' and '%.12s' differ in shape",
                             list[0]->hash, list[k]->hash);
    }
    return OK;
}

struct adapter *adapter_concat(struct adapter *const *list, const float *weights, int n,
                               struct error *err) {
    CHECK(n > 0);
    if (concat_check(list, n, err)) return NULL;
    const struct model_config *shape = &list[0]->shape;
    int32_t n_modules = shape->n_layers * N_PROJ;
    struct adapter_module *modules = xcalloc((size_t)n_modules, sizeof *modules);
    struct adapter_config c = {.r = 1, .alpha = 1, .modules = modules};
    struct adapter *a = NULL;
    for (int32_t i = 0; i < n_modules; i++) {
        modules[i] = concat_module(list, n, i);
        if (modules[i].r > ADAPTER_RANK_MAX) {
            error_set(err, ERR_MEMORY, "the ranks add up to %d, more than %d", (int)modules[i].r,
                      ADAPTER_RANK_MAX);
            goto out;
        }
    }
    float *data = xmalloc(adapter_param_count(shape, &c) * sizeof *data), *dst = data;
    for (int32_t i = 0; i < n_modules; i++)
        if (modules[i].r > 0) dst = concat_write(dst, list, weights, n, i, modules[i].r);
    a = adapter_from_data(shape, &c, data, NULL);
    for (int k = 0; k < n; k++) adapter_add_training_data(a, list[k]->training_data);
    free(data);
out:
    free(modules);
    return a;
}

/* Row n of the merged matrix: out := dora_factor · (row + scale · B_n A), where `row` is row n of W
 * or of its replacement. dora_factor is 1 without DoRA. `sum` [k] is scratch. */
static void row_merge(const float *row, const struct lora *lo, int64_t n, int64_t k, double *sum,
                      float *out) {
    double dora_factor = lo->dora_scale ? (double)lo->dora_scale[n] : 1;
    for (int64_t j = 0; j < k; j++) sum[j] = (double)row[j];
    for (int32_t r = 0; r < lo->r; r++) {
        double w = (double)lo->scale * (double)lo->b[n * lo->r + r];
        for (int64_t j = 0; j < k; j++) sum[j] += w * (double)lo->a[r * k + j];
    }
    for (int64_t j = 0; j < k; j++) out[j] = (float)(dora_factor * sum[j]);
}

/* The row that replaces row `id` of an embedding or head; NULL: none does. */
static const float *override_row(const struct vocab_override *table, int64_t id, int64_t d) {
    for (int32_t i = 0; i < table->n; i++)
        if (table->ids[i] == id) return table->rows + i * d;
    return table->full ? table->full + id * d : NULL;
}

/* The changes of a merged model. */
struct merge {
    const struct adapter *a;
    struct lora embed; /* the embedding's LoRA (A [R, V], B [D, R]) for rows of the table: A and B
                          are transposed and swapped. They are allocated. */
};

static void embed_lora_init(struct lora *to, const struct lora *lo, int64_t n, int64_t k) {
    *to = *lo;
    if (lo->r == 0) return;
    float *a = xmalloc(sizeof *a * (size_t)(k * lo->r)),
          *b = xmalloc(sizeof *b * (size_t)(n * lo->r));
    transpose(b, lo->r, lo->a, n, lo->r, n, NULL);
    transpose(a, k, lo->b, lo->r, k, lo->r, NULL);
    to->a = a;
    to->b = b;
}

static bool table_is_changed(const struct vocab_override *table) {
    return table->full || table->n > 0 || table->lora.r > 0;
}

/* The LoRA of matrix w of the merged model (its r may be 0), and the replaced rows of an embedding
 * or head, or NULL; returns false if the adapter does not change w. */
static bool changes_of(const struct model *m, const struct matrix *w, struct lora *lo,
                       const struct vocab_override **table) {
    const struct merge *g = m->changes;
    const struct vocab_overrides *o = g->a->vocab_overrides;
    *table = NULL;
    if (w == &m->embed || w == &m->head) {
        if (!o || !table_is_changed(w == &m->embed ? &o->embed : &o->head)) return false;
        *table = w == &m->embed ? &o->embed : &o->head;
        *lo = w == &m->embed ? g->embed : o->head.lora;
        return true;
    }
    for (int32_t l = 0; l < m->config.n_layers; l++)
        if (w >= m->layers[l].proj && w < m->layers[l].proj + N_PROJ) {
            *lo = g->a->loras[l * N_PROJ + (w - m->layers[l].proj)];
            return lo->r > 0;
        }
    return false;
}

/* model.changed_row */
static bool merged_row(const struct model *m, const struct matrix *w, int64_t i, float *out) {
    struct lora lo;
    const struct vocab_override *table;
    if (!changes_of(m, w, &lo, &table)) return false;
    const float *row = table ? override_row(table, i, w->k) : NULL;
    double *sum = xmalloc(sizeof *sum * (size_t)w->k);
    if (!row) matrix_get_row(w, i, out);
    row_merge(row ? row : out, &lo, i, w->k, sum, out);
    free(sum);
    return true;
}

/* Replaces *w by its merged matrix in m's arena, if the adapter changes it. */
static int matrix_merge(struct model *m, struct matrix *w, struct error *err) {
    struct lora lo;
    const struct vocab_override *table;
    if (!changes_of(m, w, &lo, &table)) return OK;
    float *data = arena_try_alloc(&m->arena, sizeof *data * (size_t)(w->n * w->k), err);
    if (!data) return err->code;
    for (int64_t i = 0; i < w->n; i++) merged_row(m, w, i, data + i * w->k);
    *w = (struct matrix){.type = TENSOR_F32, .n = w->n, .k = w->k, .data = data};
    return OK;
}

/* Embedding and head stay tied only if they have the same replaced rows and no other change. */
static bool tables_stay_tied(const struct model *m, const struct vocab_overrides *o) {
    return m->config.tied && !o->embed.full && !o->head.full && !o->embed.lora.r &&
           !o->head.lora.r && o->embed.rows == o->head.rows;
}

int adapter_check_mergeable(const struct adapter *a, struct error *err) {
    if (a->config.n_invocation == 0) return OK;
    return error_set(err, ERR_MISMATCH,
                     "adapter '%.12s' is activated LoRA, which changes only the tokens after its "
                     "invocation: merged weights would change all tokens; use it with --adapter",
                     a->hash);
}

struct model *adapter_merge_for_writing(const struct model *m, const struct adapter *a,
                                        struct error *err) {
    CHECK(adapter_fits(a, &m->config) && adapter_is_ready(a) && a->data);
    if (adapter_check_mergeable(a, err)) return NULL;
    const struct vocab_overrides *o = a->vocab_overrides;
    struct model *out = xmalloc(sizeof *out);
    size_t size = sizeof *out->layers * (size_t)m->config.n_layers;
    *out = *m;
    out->arena = (struct arena){0};
    out->hash[0] = out->source_hash[0] = 0;
    out->layers = memcpy(arena_alloc(&out->arena, size), m->layers, size);
    struct merge *g = arena_alloc(&out->arena, sizeof *g);
    g->a = a;
    if (o) embed_lora_init(&g->embed, &o->embed.lora, m->embed.n, m->embed.k);
    if (o) out->config.tied = tables_stay_tied(m, o);
    out->changes = g;
    out->changed_row = merged_row;
    return out;
}

struct model *adapter_merge(const struct model *m, const struct adapter *a, struct error *err) {
    struct model *out = adapter_merge_for_writing(m, a, err);
    if (!out) return NULL;
    int rc = matrix_merge(out, &out->embed, err);
    for (int32_t i = 0; rc == OK && i < m->config.n_layers * N_PROJ; i++)
        rc = matrix_merge(out, &out->layers[i / N_PROJ].proj[i % N_PROJ], err);
    if (rc == OK && out->config.tied)
        out->head = out->embed;
    else if (rc == OK)
        rc = matrix_merge(out, &out->head, err);
    out->type = TENSOR_F32;
    out->changed_row = NULL;
    if (rc == OK) return out;
    adapter_merged_close(out);
    return NULL;
}

void adapter_merged_close(struct model *merged) {
    if (!merged) return;
    const struct merge *g = merged->changes;
    if (g->embed.r > 0) {
        free((float *)(uintptr_t)g->embed.a);
        free((float *)(uintptr_t)g->embed.b);
    }
    arena_release(&merged->arena);
    free(merged);
}
