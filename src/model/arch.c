/*
 * arch: what tells one architecture from another, as table rows: names, shapes, and the canonical
 * list of weights.
 *
 * No file is read here and no number is multiplied but the rotary angles. Adding an architecture of
 * this family is one row of `archs` and, if it has tensors of its own, rows of `parts`.
 *
 * Invariant: weight_at(0 … weight_count - 1) visits every tensor of a model exactly once, in the
 * same order for every format; model_new numbers its random streams by that order, so it must not
 * change.
 */
#include "model/model_files.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct arch archs[] = {
    {.name = "llama", .hf_class = "LlamaForCausalLM", .qk_norm = false, .gguf_permuted = true},
    {.name = "qwen3", .hf_class = "Qwen3ForCausalLM", .qk_norm = true, .gguf_permuted = false},
};

const struct arch *arch_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(archs); i++)
        if (strcmp(archs[i].name, name) == 0) return &archs[i];
    return NULL;
}

int arch_require(const char *name, const struct arch **out, struct error *err) {
    *out = arch_find(name);
    if (*out) return OK;
    struct buf known = {0};
    for (size_t i = 0; i < ARRAY_LEN(archs); i++)
        buf_printf(&known, "%s%s", i ? ", " : "", archs[i].name);
    error_set(err, ERR_MISMATCH, "architecture '%.64s' is not supported (supported: %s)", name,
              known.data);
    buf_release(&known);
    return err->code;
}

const char *const proj_names[N_PROJ] = {
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
};
const char *const proj_hf_paths[N_PROJ] = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj",
};

int32_t proj_in(const struct model_config *c, enum proj p) {
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

/* Names carry one %d for the layer where there is one. */
struct part {
    const char *hf, *gguf;
    enum { IN_EMBED, IN_LAYER, IN_QK_NORM, IN_END } where;
    int proj; /* -1 where it is no projection */
    bool norm;
};
static const struct part parts[] = {
    {"model.embed_tokens.weight", "token_embd.weight", IN_EMBED, -1, false},
    {"model.layers.%d.input_layernorm.weight", "blk.%d.attn_norm.weight", IN_LAYER, -1, true},
    {"model.layers.%d.self_attn.q_proj.weight", "blk.%d.attn_q.weight", IN_LAYER, PROJ_Q, false},
    {"model.layers.%d.self_attn.k_proj.weight", "blk.%d.attn_k.weight", IN_LAYER, PROJ_K, false},
    {"model.layers.%d.self_attn.v_proj.weight", "blk.%d.attn_v.weight", IN_LAYER, PROJ_V, false},
    {"model.layers.%d.self_attn.o_proj.weight", "blk.%d.attn_output.weight", IN_LAYER, PROJ_O,
     false},
    {"model.layers.%d.self_attn.q_norm.weight", "blk.%d.attn_q_norm.weight", IN_QK_NORM, -1, true},
    {"model.layers.%d.self_attn.k_norm.weight", "blk.%d.attn_k_norm.weight", IN_QK_NORM, -1, true},
    {"model.layers.%d.post_attention_layernorm.weight", "blk.%d.ffn_norm.weight", IN_LAYER, -1,
     true},
    {"model.layers.%d.mlp.gate_proj.weight", "blk.%d.ffn_gate.weight", IN_LAYER, PROJ_GATE, false},
    {"model.layers.%d.mlp.up_proj.weight", "blk.%d.ffn_up.weight", IN_LAYER, PROJ_UP, false},
    {"model.layers.%d.mlp.down_proj.weight", "blk.%d.ffn_down.weight", IN_LAYER, PROJ_DOWN, false},
    {"model.norm.weight", "output_norm.weight", IN_END, -1, true},
    {"lm_head.weight", "output.weight", IN_END, -1, false},
};
enum {
    PART_EMBED = 0,
    PART_ATTN_NORM = 1,
    PART_Q_NORM = 6,
    PART_K_NORM = 7,
    PART_FFN_NORM = 8,
    PART_FINAL_NORM = 12,
    PART_HEAD = 13
};

static int32_t layer_weight_count(const struct model_config *c) {
    return c->arch->qk_norm ? 11 : 9;
}

int32_t weight_count(const struct model_config *c) {
    return 2 + c->n_layers * layer_weight_count(c) + (c->tied ? 0 : 1);
}

/* The j-th part that a layer of this architecture has. */
static int layer_part(const struct model_config *c, int32_t j) {
    int part = PART_ATTN_NORM;
    for (;; part++) {
        if (parts[part].where == IN_QK_NORM && !c->arch->qk_norm) continue;
        if (j-- == 0) return part;
    }
}

static void weight_shape(const struct model_config *c, struct weight *w) {
    const struct part *p = &parts[w->part];
    w->norm = p->norm;
    w->rope_heads = p->proj == PROJ_Q ? c->n_heads : p->proj == PROJ_K ? c->n_kv_heads : 0;
    if (p->norm) {
        w->n = 1;
        w->k = p->where == IN_QK_NORM ? c->head_dim : c->d_model;
    } else if (p->proj >= 0) {
        w->n = proj_out(c, (enum proj)p->proj);
        w->k = proj_in(c, (enum proj)p->proj);
    } else {
        w->n = c->vocab_size;
        w->k = c->d_model;
    }
}

void weight_at(const struct model_config *c, int32_t i, enum naming naming, struct weight *out) {
    CHECK(i >= 0 && i < weight_count(c));
    int32_t per_layer = layer_weight_count(c), in_layers = c->n_layers * per_layer;
    *out = (struct weight){.layer = -1};
    if (i == 0) {
        out->part = PART_EMBED;
    } else if (i <= in_layers) {
        out->layer = (i - 1) / per_layer;
        out->part = layer_part(c, (i - 1) % per_layer);
    } else {
        out->part = i == in_layers + 1 ? PART_FINAL_NORM : PART_HEAD;
    }
    const char *pattern = naming == NAMING_HF ? parts[out->part].hf : parts[out->part].gguf;
    const char *hole = strstr(pattern, "%d");
    if (hole)
        snprintf(out->name, sizeof(out->name), "%.*s%d%s", (int)(hole - pattern), pattern,
                 (int)out->layer, hole + 2);
    else
        snprintf(out->name, sizeof(out->name), "%s", pattern);
    weight_shape(c, out);
}

struct matrix *weight_matrix(struct model *m, const struct weight *w) {
    if (w->norm) return NULL;
    if (w->part == PART_EMBED) return &m->embed;
    if (w->part == PART_HEAD) return &m->head;
    return &m->layers[w->layer].proj[parts[w->part].proj];
}

const float **weight_norm(struct model *m, const struct weight *w) {
    switch (w->part) {
    case PART_ATTN_NORM:
        return &m->layers[w->layer].attn_norm;
    case PART_FFN_NORM:
        return &m->layers[w->layer].ffn_norm;
    case PART_Q_NORM:
        return &m->layers[w->layer].q_norm;
    case PART_K_NORM:
        return &m->layers[w->layer].k_norm;
    case PART_FINAL_NORM:
        return &m->final_norm;
    default:
        return NULL;
    }
}

int64_t model_param_count(const struct model_config *c) {
    int64_t total = 0;
    struct weight w;
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
    return OK;
}

static const struct {
    const char *name, *arch;
    struct model_config c;
} shapes[] = {
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
};

int shape_find(const char *name, struct model_config *out, struct error *err) {
    struct buf known = {0};
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        if (strcmp(shapes[i].name, name) == 0) {
            buf_release(&known);
            *out = shapes[i].c;
            out->arch = arch_find(shapes[i].arch);
            return OK;
        }
        buf_printf(&known, "%s%s", i ? ", " : "", shapes[i].name);
    }
    int rc = error_set(err, ERR_MISSING, "shape '%s' is not known; there are %s", name, known.data);
    buf_release(&known);
    return rc;
}

int32_t *rope_rows_from_interleaved(int32_t heads, int32_t head_dim) {
    int32_t half = head_dim / 2,
            *order = xmalloc(sizeof(*order) * (size_t)heads * (size_t)head_dim);
    for (int32_t h = 0; h < heads; h++)
        for (int32_t j = 0; j < half; j++) {
            order[h * head_dim + j] = h * head_dim + 2 * j;
            order[h * head_dim + half + j] = h * head_dim + 2 * j + 1;
        }
    return order;
}

int32_t *rope_rows_to_interleaved(int32_t heads, int32_t head_dim) {
    int32_t half = head_dim / 2,
            *order = xmalloc(sizeof(*order) * (size_t)heads * (size_t)head_dim);
    for (int32_t h = 0; h < heads; h++)
        for (int32_t j = 0; j < half; j++) {
            order[h * head_dim + 2 * j] = h * head_dim + j;
            order[h * head_dim + 2 * j + 1] = h * head_dim + half + j;
        }
    return order;
}

/* Angle of pair i at position p: p · theta^(-2i/E), in double and rounded once. */
void rope_table(const struct model_config *c, int32_t n_pos, float *cos, float *sin) {
    CHECK(n_pos <= 1000000); /* the range on which math_sin and math_cos are exact enough */
    int32_t half = c->head_dim / 2;
    double *freq = xmalloc(sizeof(*freq) * (size_t)half);
    for (int32_t i = 0; i < half; i++)
        freq[i] = math_pow((double)c->rope_theta, -2.0 * i / c->head_dim);
    for (int32_t p = 0; p < n_pos; p++)
        for (int32_t i = 0; i < half; i++) {
            cos[(int64_t)p * half + i] = (float)math_cos(p * freq[i]);
            sin[(int64_t)p * half + i] = (float)math_sin(p * freq[i]);
        }
    free(freq);
}
