/*
 * merge: merges an adapter into its base, and concatenates plain adapters into one.
 *
 * Every entry of a merged matrix is computed in double and rounded to f32, then to the type of the
 * merged model; a writer of a file of this type copies its rows, another one converts them.
 * Matrices that the adapter does not change are shared with the base, so a merged model needs
 * memory only for the changed ones. Shared matrices may be memory-mapped from the base's file, so
 * that file must not be overwritten in place; model_write_hf and model_write_gguf write a temporary
 * file and rename it.
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

/* Replaces *w by a merged matrix of the model's type in its arena. `table` has the replaced rows of
 * an embedding or head, or is NULL. The LoRA of an embedding (A [R, V], B [D, R]) changes the
 * transposed table, so A and B are transposed and swapped. */
static int matrix_merge(struct matrix *w, const struct lora *lo, const struct vocab_override *table,
                        bool embedding, struct model *m, struct error *err) {
    int64_t n = w->n, k = w->k;
    size_t row_bytes = tensor_row_bytes(m->type, k);
    uint8_t *data = arena_try_alloc(&m->arena, row_bytes * (size_t)n, err);
    if (!data) return err->code;
    float *base = xmalloc(sizeof *base * (size_t)k),
          *changed = xmalloc(sizeof *changed * (size_t)k);
    double *sum = xmalloc(sizeof *sum * (size_t)k);
    float *a = NULL, *b = NULL;
    struct lora transposed = *lo;
    if (embedding && lo->r > 0) {
        transposed.b = b = xmalloc(sizeof *b * (size_t)(n * lo->r));
        transposed.a = a = xmalloc(sizeof *a * (size_t)(k * lo->r));
        transpose(b, lo->r, lo->a, n, lo->r, n, NULL);
        transpose(a, k, lo->b, lo->r, k, lo->r, NULL);
    }
    for (int64_t i = 0; i < n; i++) {
        const float *row = table ? override_row(table, i, k) : NULL;
        if (!row) matrix_get_row(w, i, base);
        row_merge(row ? row : base, &transposed, i, k, sum, changed);
        tensor_from_f32(m->type, changed, data + (size_t)i * row_bytes, k);
    }
    free(base);
    free(changed);
    free(sum);
    free(a);
    free(b);
    *w = (struct matrix){.type = m->type, .n = n, .k = k, .data = data};
    return OK;
}

static bool table_is_changed(const struct vocab_override *table) {
    return table->full || table->n > 0 || table->lora.r > 0;
}

/* Merges the changes of embedding and head. Embedding and head stay tied only if they have the same
 * replaced rows and no other change. */
static int tables_merge(struct model *m, const struct vocab_overrides *overrides,
                        struct error *err) {
    bool same = !overrides->embed.full && !overrides->head.full && !overrides->embed.lora.r &&
                !overrides->head.lora.r && overrides->embed.rows == overrides->head.rows;
    int rc = OK;
    if (table_is_changed(&overrides->embed))
        rc = matrix_merge(&m->embed, &overrides->embed.lora, &overrides->embed, true, m, err);
    if (m->config.tied && same) {
        m->head = m->embed;
        return rc;
    }
    m->config.tied = false;
    if (rc == OK && table_is_changed(&overrides->head))
        rc = matrix_merge(&m->head, &overrides->head.lora, &overrides->head, false, m, err);
    return rc;
}

int adapter_check_mergeable(const struct adapter *a, struct error *err) {
    if (a->config.n_invocation == 0) return OK;
    return error_set(err, ERR_MISMATCH,
                     "adapter '%.12s' is activated LoRA, which changes only the tokens after its "
                     "invocation: merged weights would change all tokens; use it with --adapter",
                     a->hash);
}

struct model *adapter_merge(const struct model *m, const struct adapter *a, enum tensor_type type,
                            struct error *err) {
    CHECK(type == TENSOR_F32 || type == TENSOR_F16 || type == TENSOR_BF16);
    CHECK(adapter_fits(a, &m->config) && adapter_is_ready(a) && a->data);
    if (adapter_check_mergeable(a, err)) return NULL;
    struct model *out = xmalloc(sizeof *out);
    size_t size = sizeof *out->layers * (size_t)m->config.n_layers;
    int rc = OK;
    *out = *m;
    out->arena = (struct arena){0};
    out->hash[0] = out->source_hash[0] = 0;
    out->type = type;
    out->layers = memcpy(arena_alloc(&out->arena, size), m->layers, size);
    for (int32_t i = 0; rc == OK && i < m->config.n_layers * N_PROJ; i++)
        if (a->loras[i].r > 0)
            rc = matrix_merge(&out->layers[i / N_PROJ].proj[i % N_PROJ], &a->loras[i], NULL, false,
                              out, err);
    if (rc == OK && a->vocab_overrides) rc = tables_merge(out, a->vocab_overrides, err);
    if (rc == OK) return out;
    adapter_merged_close(out);
    return NULL;
}

void adapter_merged_close(struct model *merged) {
    if (!merged) return;
    arena_release(&merged->arena);
    free(merged);
}
