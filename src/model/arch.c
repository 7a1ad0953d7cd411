/*
 * arch: the differences between architectures as table rows: names, shapes, and the canonical list
 * of weights.
 *
 * This file reads no model file and computes no values. A new architecture that is similar to the
 * present ones is one row of `archs` and, if it has tensors that no other architecture has, rows of
 * `weight_table`. forward.c and norm_act.c implement the flags of a row; hf_config.c and gguf.c
 * have the names of its settings in config.json and GGUF.
 *
 * Invariant: weight_at(0 … weight_count - 1) visits every tensor of a model exactly once, in the
 * same order for every format. model_new_random numbers its random streams by that order, so the
 * order must not change.
 */
#include "model/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BIT(p) (1u << (p))

static const struct arch archs[] = {
    {.name = "llama",
     .gguf = "llama",
     .hf_type = "llama",
     .hf_class = "LlamaForCausalLM",
     .hf_layers = "model.layers",
     .hf_embed = "model.embed_tokens",
     .gguf_permuted = true},
    {.name = "qwen2",
     .gguf = "qwen2",
     .hf_type = "qwen2",
     .hf_class = "Qwen2ForCausalLM",
     .hf_layers = "model.layers",
     .hf_embed = "model.embed_tokens",
     .biased = BIT(PROJ_Q) | BIT(PROJ_K) | BIT(PROJ_V)},
    {.name = "qwen3",
     .gguf = "qwen3",
     .hf_type = "qwen3",
     .hf_class = "Qwen3ForCausalLM",
     .hf_layers = "model.layers",
     .hf_embed = "model.embed_tokens",
     .qk_norm = true},
    {.name = "gemma3",
     .gguf = "gemma3",
     .hf_type = "gemma3_text",
     .hf_class = "Gemma3ForCausalLM",
     .hf_layers = "model.layers",
     .hf_embed = "model.embed_tokens",
     .hf_names = HF_GEMMA,
     .tied = true,
     .qk_norm = true,
     .post_norms = true,
     .norm_offset = true,
     .scaled_embedding = true,
     .gelu = true},
    {.name = "gpt_neo",
     .hf_type = "gpt_neo",
     .hf_class = "GPTNeoForCausalLM",
     .hf_layers = "transformer.h",
     .hf_embed = "transformer.wte",
     .hf_names = HF_NEO,
     .biased = BIT(PROJ_O) | BIT(PROJ_UP) | BIT(PROJ_DOWN),
     .tied = true,
     .layer_norm = true,
     .learned_pos = true,
     .ungated = true,
     .gelu = true},
};

const struct arch *arch_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(archs); i++)
        if (strcmp(archs[i].name, name) == 0) return &archs[i];
    return NULL;
}

/* The model_type in config.json is "gemma3" for a multimodal model and "gemma3_text" for a text
 * model. */
static bool arch_has_name(const struct arch *a, const char *name, enum tensor_naming naming) {
    if (naming == NAMING_GGUF) return a->gguf && strcmp(a->gguf, name) == 0;
    return strcmp(a->hf_type, name) == 0 || strcmp(a->name, name) == 0;
}

int arch_require(const char *name, enum tensor_naming naming, const struct arch **out,
                 struct error *err) {
    struct buf known_names = {0};
    for (size_t i = 0; i < ARRAY_LEN(archs); i++) {
        if (arch_has_name(&archs[i], name, naming)) {
            *out = &archs[i];
            buf_release(&known_names);
            return OK;
        }
        if (naming == NAMING_HF || archs[i].gguf)
            buf_printf(&known_names, "%s%s", i ? ", " : "", archs[i].name);
    }
    error_set(err, ERR_MISMATCH, "architecture '%.64s' is not supported (supported: %s)", name,
              known_names.data);
    buf_release(&known_names);
    return err->code;
}

bool layer_is_sliding(const struct model_config *c, int32_t layer) {
    return layer < SLIDING_LAYERS_MAX && (c->sliding_layers[layer / 64] >> (layer % 64) & 1);
}

void layer_set_sliding(struct model_config *c, int32_t layer) {
    if (layer < SLIDING_LAYERS_MAX) c->sliding_layers[layer / 64] |= (uint64_t)1 << (layer % 64);
}

void sliding_window_pattern_set(struct model_config *c, int32_t p) {
    for (int32_t l = 0; l < MIN(c->n_layers, SLIDING_LAYERS_MAX); l++)
        if ((l + 1) % p != 0) layer_set_sliding(c, l);
}

int32_t sliding_window_pattern(const struct model_config *c) {
    for (int32_t p = 1; p <= c->n_layers + 1; p++) {
        struct model_config candidate = {.n_layers = c->n_layers};
        sliding_window_pattern_set(&candidate, p);
        if (memcmp(candidate.sliding_layers, c->sliding_layers, sizeof(candidate.sliding_layers)) ==
            0)
            return p;
    }
    return 0;
}

const char *const proj_names[N_PROJ] = {
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
};

const char *proj_hf_path(const struct arch *a, enum proj p) {
    static const char *const llama[N_PROJ] = {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj",
    };
    static const char *const neo[N_PROJ] = {
        "attn.attention.q_proj",
        "attn.attention.k_proj",
        "attn.attention.v_proj",
        "attn.attention.out_proj",
        NULL,
        "mlp.c_fc",
        "mlp.c_proj",
    };
    return a->hf_names == HF_NEO ? neo[p] : llama[p];
}

static bool proj_is_absent(const struct model_config *c, enum proj p) {
    return p == PROJ_GATE && c->arch->ungated;
}

int32_t proj_in(const struct model_config *c, enum proj p) {
    if (proj_is_absent(c, p)) return 0;
    switch (p) {
    case PROJ_O:
        return c->n_heads * c->head_dim;
    case PROJ_DOWN:
        return c->d_ff;
    default:
        return c->d_model;
    }
}

int32_t proj_out(const struct model_config *c, enum proj p) {
    if (proj_is_absent(c, p)) return 0;
    switch (p) {
    case PROJ_Q:
        return c->n_heads * c->head_dim;
    case PROJ_K:
    case PROJ_V:
        return c->n_kv_heads * c->head_dim;
    case PROJ_GATE:
    case PROJ_UP:
        return c->d_ff;
    default:
        return c->d_model;
    }
}

enum weight_id {
    WEIGHT_EMBED,
    WEIGHT_POS_EMBED,
    WEIGHT_ATTN_NORM, /* the first of a layer */
    WEIGHT_ATTN_NORM_BIAS,
    WEIGHT_Q,
    WEIGHT_Q_BIAS,
    WEIGHT_K,
    WEIGHT_K_BIAS,
    WEIGHT_V,
    WEIGHT_V_BIAS,
    WEIGHT_O,
    WEIGHT_O_BIAS,
    WEIGHT_Q_NORM,
    WEIGHT_K_NORM,
    WEIGHT_POST_ATTN_NORM,
    WEIGHT_FFN_NORM,
    WEIGHT_FFN_NORM_BIAS,
    WEIGHT_GATE,
    WEIGHT_GATE_BIAS,
    WEIGHT_UP,
    WEIGHT_UP_BIAS,
    WEIGHT_DOWN,
    WEIGHT_DOWN_BIAS,
    WEIGHT_POST_FFN_NORM, /* the last of a layer */
    WEIGHT_FINAL_NORM,
    WEIGHT_FINAL_NORM_BIAS,
    WEIGHT_HEAD,
    N_WEIGHT_IDS
};

/* The kind of a weight determines its shape and the models that have it. */
enum weight_kind {
    KIND_EMBED,     /* [V, D] */
    KIND_POS_EMBED, /* [max_seq_len, D] */
    KIND_HEAD,      /* [V, D], unless tied */
    KIND_PROJ,      /* [out, in] */
    KIND_PROJ_BIAS, /* [out]; this and the kinds after it are vectors */
    KIND_NORM,      /* [D] */
    KIND_NORM_BIAS, /* [D] */
    KIND_HEAD_NORM, /* [E] */
    KIND_POST_NORM  /* [D] */
};

/* The names of a weight in GGUF and in the Hugging Face checkpoints of three families. The names of
 * a layer's tensors are without the layer's prefix ("blk.N.", "model.layers.N."). proj_hf_path
 * gives the Hugging Face names of projections. */
static const struct weight_table_row {
    enum weight_kind kind;
    int proj;                               /* enum proj, or -1 */
    const char *gguf, *llama, *gemma, *neo; /* gemma NULL: the llama name */
} weight_table[N_WEIGHT_IDS] = {
    [WEIGHT_EMBED] = {KIND_EMBED, -1, "token_embd.weight", "model.embed_tokens.weight", NULL,
                      "transformer.wte.weight"},
    [WEIGHT_POS_EMBED] = {KIND_POS_EMBED, -1, NULL, NULL, NULL, "transformer.wpe.weight"},
    [WEIGHT_ATTN_NORM] = {KIND_NORM, -1, "attn_norm.weight", "input_layernorm.weight", NULL,
                          "ln_1.weight"},
    [WEIGHT_ATTN_NORM_BIAS] = {KIND_NORM_BIAS, -1, NULL, NULL, NULL, "ln_1.bias"},
    [WEIGHT_Q] = {.kind = KIND_PROJ, .proj = PROJ_Q, .gguf = "attn_q.weight"},
    [WEIGHT_Q_BIAS] = {.kind = KIND_PROJ_BIAS, .proj = PROJ_Q, .gguf = "attn_q.bias"},
    [WEIGHT_K] = {.kind = KIND_PROJ, .proj = PROJ_K, .gguf = "attn_k.weight"},
    [WEIGHT_K_BIAS] = {.kind = KIND_PROJ_BIAS, .proj = PROJ_K, .gguf = "attn_k.bias"},
    [WEIGHT_V] = {.kind = KIND_PROJ, .proj = PROJ_V, .gguf = "attn_v.weight"},
    [WEIGHT_V_BIAS] = {.kind = KIND_PROJ_BIAS, .proj = PROJ_V, .gguf = "attn_v.bias"},
    [WEIGHT_O] = {.kind = KIND_PROJ, .proj = PROJ_O, .gguf = "attn_output.weight"},
    [WEIGHT_O_BIAS] = {.kind = KIND_PROJ_BIAS, .proj = PROJ_O, .gguf = "attn_output.bias"},
    [WEIGHT_Q_NORM] = {KIND_HEAD_NORM, -1, "attn_q_norm.weight", "self_attn.q_norm.weight", NULL,
                       NULL},
    [WEIGHT_K_NORM] = {KIND_HEAD_NORM, -1, "attn_k_norm.weight", "self_attn.k_norm.weight", NULL,
                       NULL},
    [WEIGHT_POST_ATTN_NORM] = {KIND_POST_NORM, -1, "post_attention_norm.weight", NULL,
                               "post_attention_layernorm.weight", NULL},
    [WEIGHT_FFN_NORM] = {KIND_NORM, -1, "ffn_norm.weight", "post_attention_layernorm.weight",
                         "pre_feedforward_layernorm.weight", "ln_2.weight"},
    [WEIGHT_FFN_NORM_BIAS] = {KIND_NORM_BIAS, -1, NULL, NULL, NULL, "ln_2.bias"},
    [WEIGHT_GATE] = {.kind = KIND_PROJ, .proj = PROJ_GATE, .gguf = "ffn_gate.weight"},
    [WEIGHT_GATE_BIAS] = {.kind = KIND_PROJ_BIAS, .proj = PROJ_GATE, .gguf = "ffn_gate.bias"},
    [WEIGHT_UP] = {.kind = KIND_PROJ, .proj = PROJ_UP, .gguf = "ffn_up.weight"},
    [WEIGHT_UP_BIAS] = {.kind = KIND_PROJ_BIAS, .proj = PROJ_UP, .gguf = "ffn_up.bias"},
    [WEIGHT_DOWN] = {.kind = KIND_PROJ, .proj = PROJ_DOWN, .gguf = "ffn_down.weight"},
    [WEIGHT_DOWN_BIAS] = {.kind = KIND_PROJ_BIAS, .proj = PROJ_DOWN, .gguf = "ffn_down.bias"},
    [WEIGHT_POST_FFN_NORM] = {KIND_POST_NORM, -1, "post_ffw_norm.weight", NULL,
                              "post_feedforward_layernorm.weight", NULL},
    [WEIGHT_FINAL_NORM] = {KIND_NORM, -1, "output_norm.weight", "model.norm.weight", NULL,
                           "transformer.ln_f.weight"},
    [WEIGHT_FINAL_NORM_BIAS] = {KIND_NORM_BIAS, -1, NULL, NULL, NULL, "transformer.ln_f.bias"},
    [WEIGHT_HEAD] = {KIND_HEAD, -1, "output.weight", "lm_head.weight", NULL, "lm_head.weight"},
};

static bool has_weight(const struct model_config *c, int id) {
    const struct weight_table_row *row = &weight_table[id];
    switch (row->kind) {
    case KIND_POS_EMBED:
        return c->arch->learned_pos;
    case KIND_HEAD:
        return !c->tied;
    case KIND_PROJ:
        return !proj_is_absent(c, (enum proj)row->proj);
    case KIND_PROJ_BIAS:
        return c->biased & BIT(row->proj);
    case KIND_NORM_BIAS:
        return c->arch->layer_norm;
    case KIND_HEAD_NORM:
        return c->arch->qk_norm;
    case KIND_POST_NORM:
        return c->arch->post_norms;
    default:
        return true;
    }
}

/* The number of weights with ids in [from, to] that this model has. */
static int32_t weight_ids_count(const struct model_config *c, int from, int to) {
    int32_t n = 0;
    for (int id = from; id <= to; id++) n += has_weight(c, id);
    return n;
}

/* The id of the j-th (from 0) of the weights that this model has, counted from id `from` on. */
static int weight_id_at(const struct model_config *c, int from, int32_t j) {
    for (int id = from;; id++)
        if (has_weight(c, id) && j-- == 0) return id;
}

static int32_t layer_weight_count(const struct model_config *c) {
    return weight_ids_count(c, WEIGHT_ATTN_NORM, WEIGHT_POST_FFN_NORM);
}

int32_t weight_count(const struct model_config *c) {
    return weight_ids_count(c, WEIGHT_EMBED, WEIGHT_POS_EMBED) +
           c->n_layers * layer_weight_count(c) +
           weight_ids_count(c, WEIGHT_FINAL_NORM, WEIGHT_HEAD);
}

static void weight_shape(const struct model_config *c, struct weight_info *w) {
    const struct weight_table_row *row = &weight_table[w->id];
    enum proj proj = (enum proj)row->proj;
    w->is_vector = row->kind >= KIND_PROJ_BIAS;
    w->is_bias = row->kind == KIND_PROJ_BIAS || row->kind == KIND_NORM_BIAS;
    w->has_offset = w->is_vector && !w->is_bias && c->arch->norm_offset;
    w->n = w->is_vector ? 1 : c->vocab_size;
    w->k = c->d_model;
    if (row->kind == KIND_HEAD_NORM) w->k = c->head_dim;
    if (row->kind == KIND_POS_EMBED) w->n = c->max_seq_len;
    if (row->kind == KIND_PROJ) {
        w->n = proj_out(c, proj);
        w->k = proj_in(c, proj);
    }
    if (row->kind == KIND_PROJ_BIAS) w->k = proj_out(c, proj);
    if (row->kind == KIND_PROJ || row->kind == KIND_PROJ_BIAS)
        w->rope_heads = proj == PROJ_Q ? c->n_heads : proj == PROJ_K ? c->n_kv_heads : 0;
}

static void weight_hf_name(const struct arch *a, struct weight_info *w) {
    const struct weight_table_row *row = &weight_table[w->id];
    const char *name = a->hf_names == HF_NEO                   ? row->neo
                       : a->hf_names == HF_GEMMA && row->gemma ? row->gemma
                                                               : row->llama;
    size_t size = sizeof(w->name);
    if (row->kind == KIND_PROJ || row->kind == KIND_PROJ_BIAS)
        snprintf(w->name, size, "%s.%d.%s.%s", a->hf_layers, (int)w->layer,
                 proj_hf_path(a, (enum proj)row->proj), w->is_bias ? "bias" : "weight");
    else if (w->layer >= 0)
        snprintf(w->name, size, "%s.%d.%s", a->hf_layers, (int)w->layer, name);
    else
        snprintf(w->name, size, "%s", name);
}

void weight_at(const struct model_config *c, int32_t i, enum tensor_naming naming,
               struct weight_info *out) {
    CHECK(i >= 0 && i < weight_count(c));
    int32_t n_before = weight_ids_count(c, WEIGHT_EMBED, WEIGHT_POS_EMBED),
            per_layer = layer_weight_count(c), n_in_layers = c->n_layers * per_layer;
    *out = (struct weight_info){.index = i, .layer = -1};
    if (i < n_before) {
        out->id = weight_id_at(c, WEIGHT_EMBED, i);
    } else if (i < n_before + n_in_layers) {
        out->layer = (i - n_before) / per_layer;
        out->id = weight_id_at(c, WEIGHT_ATTN_NORM, (i - n_before) % per_layer);
    } else {
        out->id = weight_id_at(c, WEIGHT_FINAL_NORM, i - n_before - n_in_layers);
    }
    weight_shape(c, out);
    out->is_residual = out->id == WEIGHT_O || out->id == WEIGHT_DOWN;
    if (naming == NAMING_HF)
        weight_hf_name(c->arch, out);
    else if (out->layer >= 0)
        snprintf(out->name, sizeof(out->name), "blk.%d.%s", (int)out->layer,
                 weight_table[out->id].gguf);
    else
        snprintf(out->name, sizeof(out->name), "%s", weight_table[out->id].gguf);
}

struct matrix *weight_matrix(struct model *m, const struct weight_info *w) {
    if (w->is_vector) return NULL;
    if (w->id == WEIGHT_EMBED) return &m->embed;
    if (w->id == WEIGHT_POS_EMBED) return &m->pos_embed;
    if (w->id == WEIGHT_HEAD) return &m->head;
    return &m->layers[w->layer].proj[weight_table[w->id].proj];
}

const float **weight_vector(struct model *m, const struct weight_info *w) {
    if (w->id == WEIGHT_FINAL_NORM) return &m->final_norm;
    if (w->id == WEIGHT_FINAL_NORM_BIAS) return &m->final_norm_bias;
    if (!w->is_vector) return NULL;
    struct model_layer *l = &m->layers[w->layer];
    switch (w->id) {
    case WEIGHT_ATTN_NORM:
        return &l->attn_norm;
    case WEIGHT_ATTN_NORM_BIAS:
        return &l->attn_norm_bias;
    case WEIGHT_POST_ATTN_NORM:
        return &l->post_attn_norm;
    case WEIGHT_FFN_NORM:
        return &l->ffn_norm;
    case WEIGHT_FFN_NORM_BIAS:
        return &l->ffn_norm_bias;
    case WEIGHT_POST_FFN_NORM:
        return &l->post_ffn_norm;
    case WEIGHT_Q_NORM:
        return &l->q_norm;
    case WEIGHT_K_NORM:
        return &l->k_norm;
    default:
        return &l->bias[weight_table[w->id].proj];
    }
}

int64_t model_param_count(const struct model_config *c) {
    int64_t total = 0;
    struct weight_info w;
    for (int32_t i = 0; i < weight_count(c); i++) {
        weight_at(c, i, NAMING_HF, &w);
        total += w.n * w.k;
    }
    return total;
}

static int size_check(const char *what, int32_t value, int32_t max, struct error *err) {
    if (value >= 1 && value <= max) return OK;
    return error_set(err, ERR_FORMAT, "'%s' is %d, outside 1..%d", what, (int)value, (int)max);
}

static bool is_positive(float x) {
    return x > 0.0f && isfinite(x);
}

static int sliding_window_check(const struct model_config *c, struct error *err) {
    bool has_window = c->sliding_layers[0] || c->sliding_layers[1];
    if (has_window && c->n_layers > SLIDING_LAYERS_MAX)
        return error_set(err, ERR_FORMAT, "%d layers are too many for sliding windows (at most %d)",
                         (int)c->n_layers, SLIDING_LAYERS_MAX);
    if (has_window && (c->sliding_window < 1 || c->sliding_window > 1 << 24))
        return error_set(err, ERR_FORMAT, "a sliding window of %d keys is outside 1..%d",
                         (int)c->sliding_window, 1 << 24);
    /* Only Gemma requires the values below; in other architectures 0 means "not used". */
    if (c->arch->hf_names != HF_GEMMA) return OK;
    if (!is_positive(c->rope_local_theta))
        return error_set(err, ERR_FORMAT, "local rope theta %g is not a positive number",
                         (double)c->rope_local_theta);
    if (!is_positive(c->query_pre_attn_scalar))
        return error_set(err, ERR_FORMAT, "query pre-attention scalar %g is not a positive number",
                         (double)c->query_pre_attn_scalar);
    return OK;
}

static int rope_scaling_check(const struct rope_scaling *s, struct error *err) {
    if (s->kind == ROPE_DEFAULT) return OK;
    if (!is_positive(s->factor) || s->factor < 1.0f)
        return error_set(err, ERR_FORMAT, "rope scaling factor %g is not a number of at least 1",
                         (double)s->factor);
    if (s->kind == ROPE_LINEAR) return OK;
    if (s->original_len < 1)
        return error_set(err, ERR_FORMAT,
                         "rope scaling's original length of %d positions is below 1",
                         (int)s->original_len);
    if (s->kind == ROPE_LLAMA3 &&
        !(is_positive(s->low_freq_factor) && is_positive(s->high_freq_factor) &&
          s->low_freq_factor < s->high_freq_factor))
        return error_set(
            err, ERR_FORMAT,
            "rope scaling's frequency factors %g and %g are not positive and ascending",
            (double)s->low_freq_factor, (double)s->high_freq_factor);
    return OK;
}

int model_config_check(const struct model_config *c, struct error *err) {
    const struct {
        const char *what;
        int32_t value, max;
    } sizes[] = {
        {"number of layers", c->n_layers, 1 << 12},  {"model width", c->d_model, 1 << 18},
        {"number of heads", c->n_heads, 1 << 12},    {"number of kv heads", c->n_kv_heads, 1 << 12},
        {"head width", c->head_dim, 1 << 12},        {"ffn width", c->d_ff, 1 << 20},
        {"vocabulary size", c->vocab_size, 1 << 24}, {"context length", c->max_seq_len, 1 << 24},
    };
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        int rc = size_check(sizes[i].what, sizes[i].value, sizes[i].max, err);
        if (rc != OK) return rc;
    }
    if (c->n_heads % c->n_kv_heads != 0)
        return error_set(err, ERR_FORMAT, "%d heads cannot share %d kv heads evenly",
                         (int)c->n_heads, (int)c->n_kv_heads);
    if (c->head_dim % 2 != 0)
        return error_set(err, ERR_FORMAT, "head width %d is odd: rotary positions need pairs",
                         (int)c->head_dim);
    if (!(c->rope_theta > 0.0f) || !isfinite(c->rope_theta))
        return error_set(err, ERR_FORMAT, "rope theta %g is not a positive number",
                         (double)c->rope_theta);
    if (!(c->rms_norm_eps > 0.0f) || !(c->rms_norm_eps < 1.0f))
        return error_set(err, ERR_FORMAT, "rms norm epsilon %g is not in (0, 1)",
                         (double)c->rms_norm_eps);
    int rc = sliding_window_check(c, err);
    return rc == OK ? rope_scaling_check(&c->rope_scaling, err) : rc;
}

static const struct {
    const char *name, *arch;
    struct model_config c;
} presets[] = {
    {"smollm-135m",
     "llama",
     {.n_layers = 30,
      .d_model = 576,
      .n_heads = 9,
      .n_kv_heads = 3,
      .head_dim = 64,
      .d_ff = 1536,
      .vocab_size = 49152,
      .max_seq_len = 2048,
      .rope_theta = 1e4f,
      .rms_norm_eps = 1e-5f,
      .tied = true}},
    {"smollm2-360m",
     "llama",
     {.n_layers = 32,
      .d_model = 960,
      .n_heads = 15,
      .n_kv_heads = 5,
      .head_dim = 64,
      .d_ff = 2560,
      .vocab_size = 49152,
      .max_seq_len = 8192,
      .rope_theta = 1e5f,
      .rms_norm_eps = 1e-5f,
      .tied = true}},
    {"smollm2-1.7b",
     "llama",
     {.n_layers = 24,
      .d_model = 2048,
      .n_heads = 32,
      .n_kv_heads = 32,
      .head_dim = 64,
      .d_ff = 8192,
      .vocab_size = 49152,
      .max_seq_len = 8192,
      .rope_theta = 1.3e5f,
      .rms_norm_eps = 1e-5f,
      .tied = true}},
    {"qwen3-0.6b",
     "qwen3",
     {.n_layers = 28,
      .d_model = 1024,
      .n_heads = 16,
      .n_kv_heads = 8,
      .head_dim = 128,
      .d_ff = 3072,
      .vocab_size = 151936,
      .max_seq_len = 40960,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true}},
    {"qwen3-1.7b",
     "qwen3",
     {.n_layers = 28,
      .d_model = 2048,
      .n_heads = 16,
      .n_kv_heads = 8,
      .head_dim = 128,
      .d_ff = 6144,
      .vocab_size = 151936,
      .max_seq_len = 40960,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true}},
    {"qwen3-4b",
     "qwen3",
     {.n_layers = 36,
      .d_model = 2560,
      .n_heads = 32,
      .n_kv_heads = 8,
      .head_dim = 128,
      .d_ff = 9728,
      .vocab_size = 151936,
      .max_seq_len = 40960,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true}},
    {"stories15m",
     "llama",
     {.n_layers = 6,
      .d_model = 288,
      .n_heads = 6,
      .n_kv_heads = 6,
      .head_dim = 48,
      .d_ff = 768,
      .vocab_size = 32000,
      .max_seq_len = 256,
      .rope_theta = 1e4f,
      .rms_norm_eps = 1e-5f,
      .tied = true}},
    {"fry",
     "llama",
     {.n_layers = 6,
      .d_model = 256,
      .n_heads = 8,
      .n_kv_heads = 2,
      .head_dim = 32,
      .d_ff = 640,
      .vocab_size = 3072,
      .max_seq_len = 4096,
      .rope_theta = 1e5f,
      .rms_norm_eps = 1e-5f,
      .tied = true}},
    {"fry-1", // the starter model of 0.1: test/models/fry-1
     "llama",
     {.n_layers = 6,
      .d_model = 192,
      .n_heads = 6,
      .n_kv_heads = 2,
      .head_dim = 32,
      .d_ff = 512,
      .vocab_size = 768,
      .max_seq_len = 512,
      .rope_theta = 1e4f,
      .rms_norm_eps = 1e-5f,
      .tied = true}},
    {"llama3.2-1b",
     "llama",
     {.n_layers = 16,
      .d_model = 2048,
      .n_heads = 32,
      .n_kv_heads = 8,
      .head_dim = 64,
      .d_ff = 8192,
      .vocab_size = 128256,
      .max_seq_len = 131072,
      .rope_theta = 5e5f,
      .rms_norm_eps = 1e-5f,
      .tied = true,
      .rope_scaling = {ROPE_LLAMA3, 32.0f, 1.0f, 4.0f, 8192}}},
    {"llama3.2-3b",
     "llama",
     {.n_layers = 28,
      .d_model = 3072,
      .n_heads = 24,
      .n_kv_heads = 8,
      .head_dim = 128,
      .d_ff = 8192,
      .vocab_size = 128256,
      .max_seq_len = 131072,
      .rope_theta = 5e5f,
      .rms_norm_eps = 1e-5f,
      .tied = true,
      .rope_scaling = {ROPE_LLAMA3, 32.0f, 1.0f, 4.0f, 8192}}},
    {"llama3.1-8b",
     "llama",
     {.n_layers = 32,
      .d_model = 4096,
      .n_heads = 32,
      .n_kv_heads = 8,
      .head_dim = 128,
      .d_ff = 14336,
      .vocab_size = 128256,
      .max_seq_len = 131072,
      .rope_theta = 5e5f,
      .rms_norm_eps = 1e-5f,
      .rope_scaling = {ROPE_LLAMA3, 8.0f, 1.0f, 4.0f, 8192}}},
    {"tinyllama-1.1b",
     "llama",
     {.n_layers = 22,
      .d_model = 2048,
      .n_heads = 32,
      .n_kv_heads = 4,
      .head_dim = 64,
      .d_ff = 5632,
      .vocab_size = 32000,
      .max_seq_len = 2048,
      .rope_theta = 1e4f,
      .rms_norm_eps = 1e-5f}},
    {"qwen2.5-0.5b",
     "qwen2",
     {.n_layers = 24,
      .d_model = 896,
      .n_heads = 14,
      .n_kv_heads = 2,
      .head_dim = 64,
      .d_ff = 4864,
      .vocab_size = 151936,
      .max_seq_len = 32768,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true}},
    {"gemma3-270m",
     "gemma3",
     {.n_layers = 18,
      .d_model = 640,
      .n_heads = 4,
      .n_kv_heads = 1,
      .head_dim = 256,
      .d_ff = 2048,
      .vocab_size = 262144,
      .max_seq_len = 32768,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true,
      .rope_local_theta = 1e4f,
      .query_pre_attn_scalar = 256.0f,
      .sliding_window = 512,
      .sliding_layers = {0x1F7DF}}},
    {"gemma3-1b",
     "gemma3",
     {.n_layers = 26,
      .d_model = 1152,
      .n_heads = 4,
      .n_kv_heads = 1,
      .head_dim = 256,
      .d_ff = 6912,
      .vocab_size = 262144,
      .max_seq_len = 32768,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true,
      .rope_local_theta = 1e4f,
      .query_pre_attn_scalar = 256.0f,
      .sliding_window = 512,
      .sliding_layers = {0x37DF7DF}}},
    {"gemma3-4b",
     "gemma3",
     {.n_layers = 34,
      .d_model = 2560,
      .n_heads = 8,
      .n_kv_heads = 4,
      .head_dim = 256,
      .d_ff = 10240,
      .vocab_size = 262208,
      .max_seq_len = 131072,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true,
      .rope_scaling = {.kind = ROPE_LINEAR, .factor = 8.0f},
      .rope_local_theta = 1e4f,
      .query_pre_attn_scalar = 256.0f,
      .sliding_window = 1024,
      .sliding_layers = {0x3DF7DF7DF}}},
    {"tinystories-33m",
     "gpt_neo",
     {.n_layers = 4,
      .d_model = 768,
      .n_heads = 16,
      .n_kv_heads = 16,
      .head_dim = 48,
      .d_ff = 3072,
      .vocab_size = 50257,
      .max_seq_len = 2048,
      .rope_theta = 1e4f,
      .rms_norm_eps = 1e-5f,
      .tied = true,
      .query_pre_attn_scalar = 1.0f,
      .sliding_window = 256,
      .sliding_layers = {0xA}}},
    {"tiny-llama",
     "llama",
     {.n_layers = 2,
      .d_model = 32,
      .n_heads = 4,
      .n_kv_heads = 2,
      .head_dim = 8,
      .d_ff = 64,
      .vocab_size = 300,
      .max_seq_len = 64,
      .rope_theta = 1e4f,
      .rms_norm_eps = 1e-5f,
      .tied = false}},
    {"tiny-qwen3",
     "qwen3",
     {.n_layers = 2,
      .d_model = 32,
      .n_heads = 4,
      .n_kv_heads = 2,
      .head_dim = 16,
      .d_ff = 64,
      .vocab_size = 300,
      .max_seq_len = 64,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true}},
    {"tiny-qwen2",
     "qwen2",
     {.n_layers = 2,
      .d_model = 32,
      .n_heads = 4,
      .n_kv_heads = 2,
      .head_dim = 8,
      .d_ff = 64,
      .vocab_size = 300,
      .max_seq_len = 64,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true,
      .rope_scaling = {.kind = ROPE_YARN, .factor = 4.0f, .original_len = 16}}},
    {"tiny-gemma3",
     "gemma3",
     {.n_layers = 3,
      .d_model = 32,
      .n_heads = 4,
      .n_kv_heads = 2,
      .head_dim = 16,
      .d_ff = 64,
      .vocab_size = 300,
      .max_seq_len = 64,
      .rope_theta = 1e6f,
      .rms_norm_eps = 1e-6f,
      .tied = true,
      .rope_scaling = {.kind = ROPE_LINEAR, .factor = 8.0f},
      .rope_local_theta = 1e4f,
      .query_pre_attn_scalar = 24.0f,
      .sliding_window = 5,
      .sliding_layers = {0x5}}},
    {"tiny-gpt-neo",
     "gpt_neo",
     {.n_layers = 2,
      .d_model = 32,
      .n_heads = 4,
      .n_kv_heads = 4,
      .head_dim = 8,
      .d_ff = 64,
      .vocab_size = 300,
      .max_seq_len = 64,
      .rope_theta = 1e4f,
      .rms_norm_eps = 1e-5f,
      .tied = true,
      .query_pre_attn_scalar = 1.0f,
      .sliding_window = 5,
      .sliding_layers = {0x2}}},
};

int model_preset_find(const char *name, struct model_config *out, struct error *err) {
    struct buf known_names = {0};
    for (size_t i = 0; i < ARRAY_LEN(presets); i++) {
        if (strcmp(presets[i].name, name) == 0) {
            buf_release(&known_names);
            *out = presets[i].c;
            out->arch = arch_find(presets[i].arch);
            out->biased = out->arch->biased;
            return OK;
        }
        buf_printf(&known_names, "%s%s", i ? ", " : "", presets[i].name);
    }
    int rc = error_set(err, ERR_MISSING, "shape '%s' is not known; there are %s", name,
                       known_names.data);
    buf_release(&known_names);
    return rc;
}
