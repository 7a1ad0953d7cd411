/*
 * quant_mix: the file type of each tensor of a model.
 *
 * A pure scheme gives one type to every matrix; where its blocks do not fit, tensor_type_fallback
 * replaces it. The mixtures follow llama.cpp's rule without an importance matrix. The head gets
 * q6_k. "m" gives q6_k to the value and down projections of the first and the last eighth of the
 * layers and of every third layer between. q4_k_s gives q5_k to the value projections of the first
 * four layers and to the down projections of the first eighth; q5_k_s has no such rule. Norms and
 * biases are always f32.
 *
 * The result depends only on names and shapes, never on the values of weights.
 */
#include "model/internal.h"

#include <string.h>

static const struct quant_scheme mixtures[] = {
    {"q4_k_s", TENSOR_Q4_K, QUANT_SMALL},
    {"q4_k_m", TENSOR_Q4_K, QUANT_MEDIUM},
    {"q5_k_s", TENSOR_Q5_K, QUANT_SMALL},
    {"q5_k_m", TENSOR_Q5_K, QUANT_MEDIUM},
};

int quant_parse(const char *name, struct quant_scheme *out, struct error *err) {
    for (size_t i = 0; i < ARRAY_LEN(mixtures); i++)
        if (strcmp(mixtures[i].name, name) == 0) {
            *out = mixtures[i];
            return OK;
        }
    enum tensor_type type;
    if (tensor_type_parse(name, &type) != OK)
        return error_set(err, ERR_USAGE,
                         "no weight type '%s'; there are %s, and the mixtures q4_k_s, q4_k_m, "
                         "q5_k_s and q5_k_m",
                         name, tensor_type_list());
    *out = quant_pure(type);
    return OK;
}

struct quant_scheme quant_pure(enum tensor_type type) {
    return (struct quant_scheme){.name = tensor_type_name(type), .type = type, .mix = QUANT_PURE};
}

uint32_t quant_file_type(const struct quant_scheme *q) {
    static const struct {
        enum tensor_type type;
        uint32_t small, medium;
    } numbers[] = {
        {TENSOR_F16, 1, 1},    {TENSOR_Q4_0, 2, 2},   {TENSOR_Q4_1, 3, 3},   {TENSOR_Q8_0, 7, 7},
        {TENSOR_Q5_0, 8, 8},   {TENSOR_Q5_1, 9, 9},   {TENSOR_Q4_K, 14, 15}, {TENSOR_Q5_K, 16, 17},
        {TENSOR_Q6_K, 18, 18}, {TENSOR_BF16, 32, 32},
    };
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++)
        if (numbers[i].type == q->type)
            return q->mix == QUANT_MEDIUM ? numbers[i].medium : numbers[i].small;
    return q->type == TENSOR_F32 ? 0 : (uint32_t)q->type;
}

/* True for the first and the last eighth of the layers, and for every third layer between. */
static bool layer_gets_more_bits(int32_t layer, int32_t n) {
    return layer < n / 8 || layer >= 7 * n / 8 || (layer - n / 8) % 3 == 2;
}

static enum tensor_type mix_type(const struct quant_scheme *q, const struct model_config *c,
                                 const struct weight_info *w) {
    bool value = strstr(w->name, "attn_v.") || strstr(w->name, "v_proj."),
         down = strstr(w->name, "ffn_down.") || strstr(w->name, "down_proj.");
    if (w->layer < 0) {
        bool head = c->tied || strstr(w->name, "output.") || strstr(w->name, "lm_head.");
        if (!head) return q->type;
        return w->k % tensor_type_block_size(q->type) ? TENSOR_Q8_0 : TENSOR_Q6_K;
    }
    if (!value && !down) return q->type;
    if (q->mix == QUANT_MEDIUM)
        return layer_gets_more_bits(w->layer, c->n_layers) ? TENSOR_Q6_K : q->type;
    int32_t n_first_layers = value ? 4 : c->n_layers / 8;
    return q->type == TENSOR_Q4_K && w->layer < n_first_layers ? TENSOR_Q5_K : q->type;
}

enum tensor_type quant_weight_type(const struct quant_scheme *q, const struct model_config *c,
                                   const struct weight_info *w) {
    if (w->is_vector) return TENSOR_F32;
    return tensor_type_fallback(q->mix == QUANT_PURE ? q->type : mix_type(q, c, w), w->k);
}

int64_t quant_bytes(const struct quant_scheme *q, const struct model_config *c) {
    int64_t total = 0;
    for (int32_t i = 0; i < weight_count(c); i++) {
        struct weight_info w;
        weight_at(c, i, c->arch->gguf ? NAMING_GGUF : NAMING_HF, &w);
        total += w.n * (int64_t)tensor_row_bytes(quant_weight_type(q, c, &w), w.k);
    }
    return total;
}
