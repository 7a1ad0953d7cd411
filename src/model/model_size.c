/*
 * model_size: computes a model's memory from its headers; no weight is read.
 *
 * It does not include the engine's own memory (engine/memory_plan.c), nor the system's page cache
 * for weights that are packed: their pages are evicted as soon as the weight is packed
 * (file_map_evict).
 */
#include "hub/hub.h"
#include "model/internal.h"

#include <stdlib.h>
#include <string.h>

/* Bytes in memory; norms and biases become f32. */
static size_t tensor_memory_bytes(const struct tensor_info *t, enum numeric_class cls) {
    if (t->n_dims > 1) return matrix_bytes_of(t->type, t->dims[0], t->dims[1], cls);
    return (size_t)(t->n_dims ? t->dims[0] : 1) * sizeof(float);
}

/* Whether the tensor is used in place in the mapped file. Other tensors are in memory twice while
 * they are packed, converted or reordered. */
static bool is_used_in_place(const struct tensor_info *t, enum numeric_class cls, bool rotary) {
    bool rows = t->type == TENSOR_F32 || t->type == TENSOR_F16 ||
                (t->type == TENSOR_BF16 && cls == NUMERIC_EXACT);
    return rows && !rotary && t->n_dims > 1;
}

void tensors_measure(const struct tensor_info *t, int n, enum numeric_class cls, bool interleaved,
                     struct model_size *out) {
    for (int i = 0; i < n; i++) {
        // only q and k are reordered; their names are not compared, so this is an upper bound
        bool rotary = interleaved && t[i].n_dims > 1 && t[i].dims[0] < out->config.vocab_size;
        // a copy of the embedding, which is not loaded
        if (out->config.tied && strcmp(t[i].name, "lm_head.weight") == 0) continue;
        out->weights += tensor_memory_bytes(&t[i], cls);
        out->file += t[i].size;
        if (!is_used_in_place(&t[i], cls, rotary))
            out->while_loading = MAX(out->while_loading, t[i].size);
    }
}

void quant_measure(const struct quant_scheme *q, const struct model_config *c,
                   enum numeric_class cls, struct model_size *out) {
    *out = (struct model_size){.config = *c, .type = q->type};
    for (int32_t i = 0; i < weight_count(c); i++) {
        struct weight_info w;
        weight_at(c, i, c->arch->gguf ? NAMING_GGUF : NAMING_HF, &w);
        const enum tensor_type type = quant_weight_type(q, c, &w);
        const struct tensor_info t = {.type = type,
                                      .n_dims = w.is_vector ? 1 : 2,
                                      .dims = {w.is_vector ? w.k : w.n, w.k},
                                      .size = (size_t)w.n * tensor_row_bytes(type, w.k)};
        out->weights += tensor_memory_bytes(&t, cls);
        out->file += t.size;
        if (!is_used_in_place(&t, cls, w.rope_heads > 0 && c->arch->gguf_permuted))
            out->while_loading = MAX(out->while_loading, t.size);
    }
}

size_t model_writing_bytes(const struct model_config *c, struct pool *pool) {
    size_t longest = 0;
    for (int32_t i = 0; i < weight_count(c); i++) {
        struct weight_info w;
        weight_at(c, i, NAMING_HF, &w);
        longest = MAX(longest, (size_t)w.k + 1);
    }
    // rows as f32 and encoded, and the pages of the file that they come from
    return longest * sizeof(float) * ((size_t)pool_size(pool) + 2 * ROWS_PER_WRITE);
}

int model_measure(const char *path, enum numeric_class cls, struct model_size *out,
                  struct error *err) {
    *out = (struct model_size){0};
    if (hub_is_name(path)) {
        char *pulled = hub_cached_path(path, err);
        int rc = pulled ? model_measure(pulled, cls, out, err) : err->code;
        free(pulled);
        return rc;
    }
    return path_is_dir(path) ? hf_model_measure(path, cls, out, err)
                             : gguf_model_measure(path, cls, out, err);
}
