/*
 * llama2c: the legacy (version 0) checkpoint of llama2.c: seven int32, then f32 tensors. Each kind
 * of tensor is stored for all layers before the next kind.
 *
 *     dim hidden layers heads kv_heads vocab seq_len
 *     token_embedding | rms_att | wq | wk | wv | wo | rms_ffn | w1 | w2 | w3 | rms_final
 *     cos table | sin table | wcls, only when vocab is negative
 *
 * This file only reads. The rotary tables are skipped: the format fixes theta 10000 and epsilon
 * 1e-5. The file has no magic; the only proof of the format is that the file's size matches its
 * header to the byte.
 */
#include "model/internal.h"

#include <stdlib.h>
#include <string.h>

enum { HEADER_BYTES = 28 };

static int header_read(const struct file_map *map, struct model_config *c, struct error *err) {
    int32_t h[7];
    if (map->size < HEADER_BYTES)
        return error_set(err, ERR_FORMAT, "too short: %zu bytes", map->size);
    memcpy(h, map->data, HEADER_BYTES);
    if (h[5] == INT32_MIN || h[0] < 1 || h[3] < 1 || h[0] % h[3] != 0)
        return error_set(err, ERR_FORMAT, "the header is not one of llama2.c, version 0");
    *c = (struct model_config){
        .arch = arch_find("llama"),
        .d_model = h[0],
        .d_ff = h[1],
        .n_layers = h[2],
        .n_heads = h[3],
        .n_kv_heads = h[4],
        .head_dim = h[0] / h[3],
        .vocab_size = h[5] < 0 ? -h[5] : h[5],
        .max_seq_len = h[6],
        .rope_theta = 1e4f,
        .rms_norm_eps = 1e-5f,
        .tied = h[5] > 0,
    };
    if (model_config_check(c, err) != OK)
        return error_wrap(err, "the header is not one of llama2.c, version 0");
    return OK;
}

/* The tensors of the file in order, as names of the canonical list with %d for the layer. NULL: the
 * rotary tables. */
static const char *const file_order[] = {
    "model.embed_tokens.weight",
    "model.layers.%d.input_layernorm.weight",
    "model.layers.%d.self_attn.q_proj.weight",
    "model.layers.%d.self_attn.k_proj.weight",
    "model.layers.%d.self_attn.v_proj.weight",
    "model.layers.%d.self_attn.o_proj.weight",
    "model.layers.%d.post_attention_layernorm.weight",
    "model.layers.%d.mlp.gate_proj.weight",
    "model.layers.%d.mlp.down_proj.weight",
    "model.layers.%d.mlp.up_proj.weight",
    "model.norm.weight",
    NULL,
    "lm_head.weight",
};

/* Whether `w` is the weight that `pattern` names, in any layer. */
static bool weight_matches(const struct weight_info *w, const char *pattern) {
    const char *placeholder = strstr(pattern, "%d");
    if (!placeholder || w->layer < 0) return !placeholder && strcmp(w->name, pattern) == 0;
    char name[96];
    snprintf(name, sizeof(name), "%.*s%d%s", (int)(placeholder - pattern), pattern, (int)w->layer,
             placeholder + 2);
    return strcmp(w->name, name) == 0;
}

static struct tensor_info tensor_at(const struct weight_info *w, const uint8_t *data) {
    struct tensor_info t = {
        .name = xstrdup(w->name), .type = TENSOR_F32, .n_dims = w->is_vector ? 1 : 2, .data = data};
    t.dims[0] = w->is_vector ? w->k : w->n;
    t.dims[1] = w->is_vector ? 0 : w->k;
    t.size = (size_t)(w->n * w->k) * sizeof(float);
    return t;
}

/* Fills `list` with each weight and its place in the file, and sets *size to the size that the file
 * must have. Returns the number of tensors. The data pointers are valid only if the file has that
 * size. */
static int tensors_layout(const struct model_config *c, const uint8_t *file,
                          struct tensor_info *list, uint64_t *size) {
    int n = 0;
    *size = HEADER_BYTES;
    for (size_t i = 0; i < ARRAY_LEN(file_order); i++) {
        if (!file_order[i]) {
            *size += (uint64_t)c->max_seq_len * (uint64_t)c->head_dim * sizeof(float);
            continue;
        }
        for (int32_t j = 0; j < weight_count(c); j++) {
            struct weight_info w;
            weight_at(c, j, NAMING_HF, &w);
            if (!weight_matches(&w, file_order[i])) continue;
            list[n] = tensor_at(&w, (const uint8_t *)((uintptr_t)file + *size));
            *size += list[n++].size;
        }
    }
    return n;
}

static int weights_read(struct model *m, const struct file_map *map, struct error *err) {
    uint64_t params = (uint64_t)model_param_count(&m->config), size = 0;
    /* This check also prevents overflow in tensors_layout. */
    if (params > map->size / sizeof(float))
        return error_set(err, ERR_FORMAT, "its header needs %llu numbers, the file has %zu bytes",
                         (unsigned long long)params, map->size);
    struct tensor_info *list = xcalloc((size_t)weight_count(&m->config), sizeof(*list));
    int n = tensors_layout(&m->config, map->data, list, &size);
    int rc = OK;
    if (size != map->size)
        rc = error_set(err, ERR_FORMAT, "its header needs a file of %llu bytes, this one has %zu",
                       (unsigned long long)size, map->size);
    tensors_sort(list, n);
    if (rc == OK) rc = model_bind(m, list, n, NAMING_HF, true, err);
    for (int i = 0; i < n; i++) free(list[i].name);
    free(list);
    return rc;
}

struct model *llama2c_open(const char *bin, const char *tokenizer, enum numeric_class cls,
                           struct error *err) {
    struct file_map map;
    if (file_map_open(&map, bin, err) != OK) return NULL;
    struct model *m = model_alloc(bin, cls);
    int rc = header_read(&map, &m->config, err);
    if (rc == OK) rc = weights_read(m, &map, err);
    if (rc != OK) error_wrap(err, "'%s'", bin);
    model_add_map(m, &map);
    if (rc == OK) m->tok = tokenizer_from_llama2c(tokenizer, m->config.vocab_size, err);
    if (rc == OK && m->tok) return m;
    model_close(m);
    return NULL;
}
