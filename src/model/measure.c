/*
 * What a model will take in memory, from its header alone: no weight is read.
 *
 * Not here: the engine's own memory (engine/plan.c), and what the system keeps of files that were
 * only read through: those pages are given back as soon as a weight is packed (map_drop).
 */
#include "model/model_files.h"
#include "store/store.h"

#include <stdlib.h>
#include <string.h>

/* The tensor as matrix_init will hold it; a norm becomes f32. */
static struct matrix tensor_held(const struct tensor_info *t, enum numeric_class cls) {
    bool matrix = t->n_dims > 1,
         dense = t->type == TENSOR_F32 || t->type == TENSOR_F16 || t->type == TENSOR_BF16;
    return (struct matrix){.type = t->type == TENSOR_F16 || !matrix ? TENSOR_F32 : t->type,
                           .packed =
                               matrix && (!dense || (t->type == TENSOR_BF16 && cls == CLASS_FAST)),
                           .n = matrix ? t->dims[0] : 1,
                           .k = t->n_dims ? t->dims[t->n_dims - 1] : 1};
}

void tensors_measure(const struct tensor_info *t, int n, enum numeric_class cls, bool interleaved,
                     struct model_size *out) {
    for (int i = 0; i < n; i++) {
        struct matrix m = tensor_held(&t[i], cls);
        bool rotary = interleaved && m.n < out->config.vocab_size; // its rows may be reordered
        if (out->config.tied && strcmp(t[i].name, "lm_head.weight") == 0) continue; // a copy
        out->weights += matrix_bytes(&m);
        out->file += t[i].size;
        // while it is packed, widened or reordered, its bytes in the file are in memory as well
        if (m.packed || m.type != t[i].type || rotary) out->passing = MAX(out->passing, t[i].size);
    }
}

int model_measure(const char *path, enum numeric_class cls, struct model_size *out,
                  struct error *err) {
    *out = (struct model_size){0};
    if (hub_is_name(path)) {
        char *pulled = hub_find(path, err);
        int rc = pulled ? model_measure(pulled, cls, out, err) : err->code;
        free(pulled);
        return rc;
    }
    return path_is_dir(path) ? hf_model_measure(path, cls, out, err)
                             : gguf_model_measure(path, cls, out, err);
}
