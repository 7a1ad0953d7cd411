/*
 * hf_config: reads and writes config.json of Hugging Face model directories.
 *
 * Reading is strict about the known settings that would change the arithmetic: a value that is not
 * implemented is an error that names the setting. All other settings are ignored. The default
 * of a missing key is that of the architecture's own configuration class, as far as published
 * models rely on it.
 *
 * Files describe rotary positions in two ways: the older one is `rope_theta` and `rope_scaling` at
 * the level of the other keys; the newer one is the object `rope_parameters`, which for Gemma has
 * one object for each kind of layer. This file writes the older way, because old and new programs
 * read it.
 */
#include "model/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const json_t *json_field(const json_t *root, const char *key) {
    const json_t *v = json_object_get(root, key);
    return json_is_null(v) ? NULL : v;
}

/* Names of keys that differ between the configurations of Llama and similar models, Gemma and
 * GPT-Neo. */
struct size_keys {
    const char *layers, *heads, *epsilon, *act;
};
static const struct size_keys default_keys = {"num_hidden_layers", "num_attention_heads",
                                              "rms_norm_eps", "hidden_act"};
static const struct size_keys gemma_keys = {"num_hidden_layers", "num_attention_heads",
                                            "rms_norm_eps", "hidden_activation"};
static const struct size_keys neo_keys = {"num_layers", "num_heads", "layer_norm_epsilon",
                                          "activation_function"};

static const struct size_keys *size_keys_of(const struct arch *a) {
    return a->hf_names == HF_NEO     ? &neo_keys
           : a->hf_names == HF_GEMMA ? &gemma_keys
                                     : &default_keys;
}

/* Reads a positive integer. If the key is missing, *out is `fallback`; 0 makes that an error. */
static int int_get(const json_t *root, const char *key, int32_t fallback, int32_t *out,
                   struct error *err) {
    const json_t *v = json_field(root, key);
    *out = fallback;
    if (!v && fallback == 0) return error_set(err, ERR_FORMAT, "'%s' is missing", key);
    if (!v) return OK;
    json_int_t value = json_integer_value(v);
    if (!json_is_integer(v) || value < 1 || value > INT32_MAX)
        return error_set(err, ERR_FORMAT, "'%s' is not a positive whole number", key);
    *out = (int32_t)value;
    return OK;
}

/* Reads a number. If the key is missing, *out is `fallback`; 0 makes that an error. */
static int float_get(const json_t *root, const char *key, double fallback, float *out,
                     struct error *err) {
    const json_t *v = json_field(root, key);
    *out = (float)fallback;
    if (!v && fallback == 0) return error_set(err, ERR_FORMAT, "'%s' is missing", key);
    if (!v) return OK;
    if (!json_is_number(v)) return error_set(err, ERR_FORMAT, "'%s' is not a number", key);
    *out = (float)json_number_value(v);
    return OK;
}

static int bool_get(const json_t *root, const char *key, bool fallback, bool *out,
                    struct error *err) {
    const json_t *v = json_field(root, key);
    *out = v ? json_is_true(v) : fallback;
    if (v && !json_is_boolean(v))
        return error_set(err, ERR_FORMAT, "'%s' is neither true nor false", key);
    return OK;
}

static int unsupported_error(const char *key, const json_t *value, struct error *err) {
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_SORT_KEYS);
    int rc = error_set(err, ERR_MISMATCH, "'%s' is %.200s, which is not supported", key,
                       text ? text : "?");
    free(text);
    return rc;
}

/* Absent, null, false or 0. */
static bool is_off(const json_t *v) {
    return !v || json_is_false(v) || (json_is_number(v) && json_number_value(v) == 0.0);
}

static int act_check(const json_t *root, const struct arch *a, struct error *err) {
    static const char *const silu[] = {"silu", "swish"}, *const gelu[] = {"gelu_pytorch_tanh",
                                                                          "gelu_new"};
    const char *key = size_keys_of(a)->act;
    const json_t *v = json_field(root, key);
    const char *name = json_string_value(v);
    for (int i = 0; name && i < 2; i++)
        if (strcmp(name, a->gelu ? gelu[i] : silu[i]) == 0) return OK;
    return v ? unsupported_error(key, v, err) : OK;
}

/* Refuses settings that would change the arithmetic in an unsupported way; the error names them. */
static int unsupported_keys_check(const json_t *root, const struct arch *a, struct error *err) {
    static const char *const keys[] = {"use_sliding_window",
                                       "use_bidirectional_attention",
                                       "qkv_bias",
                                       "attn_logit_softcapping",
                                       "final_logit_softcapping",
                                       "clip_qkv",
                                       "quantization_config",
                                       "num_experts",
                                       "num_local_experts",
                                       "num_kv_shared_layers",
                                       "attention_multiplier",
                                       "embedding_multiplier",
                                       "hidden_size_per_layer_input"};
    const json_t *v;
    for (size_t i = 0; i < ARRAY_LEN(keys); i++)
        if (!is_off(v = json_field(root, keys[i]))) return unsupported_error(keys[i], v, err);
    if ((v = json_field(root, "partial_rotary_factor")) && json_number_value(v) != 1.0)
        return unsupported_error("partial_rotary_factor", v, err);
    return act_check(root, a, err);
}

/* ERR_MISMATCH if `rope` has a key that is not supported, or not with this value. */
static int rope_scaling_keys_check(const char *key, const json_t *rope, struct error *err) {
    static const struct {
        const char *key;
        double supported; /* the only supported value; NaN: no value is supported */
    } keys[] = {{"beta_fast", 32},         {"beta_slow", 1},    {"partial_rotary_factor", 1},
                {"attention_factor", NAN}, {"mscale", NAN},     {"mscale_all_dim", NAN},
                {"short_factor", NAN},     {"long_factor", NAN}};
    for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
        const json_t *v = json_field(rope, keys[i].key);
        if (v && !(json_is_number(v) && json_number_value(v) == keys[i].supported))
            return unsupported_error(key, rope, err);
    }
    return json_is_false(json_field(rope, "truncate")) ? unsupported_error(key, rope, err) : OK;
}

/* Reads the object `rope` of the key `key`. The kind of scaling may be missing only in
 * rope_parameters. */
static int rope_scaling_read(const char *key, const json_t *rope, struct model_config *c,
                             struct error *err) {
    struct rope_scaling *s = &c->rope_scaling;
    const json_t *type = json_field(rope, "rope_type");
    if (!type) type = json_field(rope, "type");
    const char *name = json_string_value(type);
    if (!json_is_object(rope) || (type ? !name : strcmp(key, "rope_scaling") == 0))
        return unsupported_error(key, rope, err);
    int kind = name ? rope_kind_find(name) : ROPE_DEFAULT;
    if (kind < 0) return unsupported_error(key, rope, err);
    *s = (struct rope_scaling){.kind = (enum rope_kind)kind};
    int rc = rope_scaling_keys_check(key, rope, err);
    if (rc != OK || kind == ROPE_DEFAULT) return rc;
    rc = float_get(rope, "factor", 0, &s->factor, err);
    if (rc == OK && kind == ROPE_LLAMA3)
        rc = float_get(rope, "low_freq_factor", 0, &s->low_freq_factor, err);
    if (rc == OK && kind == ROPE_LLAMA3)
        rc = float_get(rope, "high_freq_factor", 0, &s->high_freq_factor, err);
    if (rc == OK && kind != ROPE_LINEAR)
        rc = int_get(rope, "original_max_position_embeddings",
                     kind == ROPE_YARN ? c->max_seq_len : 0, &s->original_len, err);
    return rc == OK ? OK : error_wrap(err, "'%s'", key);
}

static int rope_read(const json_t *root, struct model_config *c, struct error *err) {
    bool gemma = c->arch->hf_names == HF_GEMMA;
    const json_t *scaling = json_field(root, "rope_scaling"),
                 *parameters = json_field(root, "rope_parameters");
    const json_t *full = json_field(parameters, "full_attention"),
                 *local = json_field(parameters, "sliding_attention");
    const json_t *rope = full ? full : parameters;
    int rc = OK;
    if (full && !gemma) return unsupported_error("rope_parameters", parameters, err);
    if (scaling) rc = rope_scaling_read("rope_scaling", scaling, c, err);
    if (rc == OK && rope) rc = rope_scaling_read("rope_parameters", rope, c, err);
    if (rc == OK)
        rc = float_get(json_field(rope, "rope_theta") ? rope : root, "rope_theta",
                       gemma ? 1e6 : 1e4, &c->rope_theta, err);
    if (rc != OK || !gemma) return rc;
    if (local) {
        const json_t *kind = json_field(local, "rope_type");
        if (kind && strcmp(json_is_string(kind) ? json_string_value(kind) : "", "default") != 0)
            return unsupported_error("rope_parameters", parameters, err);
        return float_get(local, "rope_theta", 1e4, &c->rope_local_theta, err);
    }
    return float_get(root, "rope_local_base_freq", 1e4, &c->rope_local_theta, err);
}

/* Reads a list of one word per layer: `local` stands for a sliding window, `full` for full
 * attention. If `local` is NULL, a sliding window is an error. */
static int layer_types_read(const char *key, const json_t *list, const char *full,
                            const char *local, struct model_config *c, struct error *err) {
    if (json_array_size(list) != (size_t)c->n_layers)
        return error_set(err, ERR_FORMAT, "'%s' is not a list of %d layers", key, (int)c->n_layers);
    for (int32_t l = 0; l < c->n_layers; l++) {
        const char *word = json_string_value(json_array_get(list, (size_t)l));
        if (word && local && strcmp(word, local) == 0)
            layer_set_sliding(c, l);
        else if (!word || strcmp(word, full) != 0)
            return unsupported_error(key, list, err);
    }
    return OK;
}

static int gemma_sliding_window_read(const json_t *root, struct model_config *c,
                                     struct error *err) {
    const json_t *types = json_field(root, "layer_types");
    int32_t period;
    int rc = int_get(root, "sliding_window", 4096, &c->sliding_window, err);
    if (rc == OK) rc = int_get(root, "sliding_window_pattern", 6, &period, err);
    if (rc != OK) return rc;
    if (types)
        return layer_types_read("layer_types", types, "full_attention", "sliding_attention", c,
                                err);
    sliding_window_pattern_set(c, period);
    return OK;
}

/* Appends one word per layer to `out` from patterns and the number of repetitions of each, such as
 * [[["global", "local"], 12]]. */
static int attention_types_expand(const json_t *types, json_t *out) {
    for (size_t i = 0; i < json_array_size(types); i++) {
        const json_t *pair = json_array_get(types, i), *words = json_array_get(pair, 0);
        json_int_t times = json_integer_value(json_array_get(pair, 1));
        if (!json_is_array(words) || times < 0 || times > SLIDING_LAYERS_MAX) return ERR_FORMAT;
        while (times-- > 0 && json_array_size(out) <= SLIDING_LAYERS_MAX)
            json_array_extend(out, (json_t *)(uintptr_t)words);
    }
    return OK;
}

static int neo_sliding_window_read(const json_t *root, struct model_config *c, struct error *err) {
    const json_t *layers = json_field(root, "attention_layers"),
                 *types = json_field(root, "attention_types");
    const char *key = layers ? "attention_layers" : "attention_types";
    json_t *words = json_array();
    int rc = int_get(root, "window_size", 256, &c->sliding_window, err);
    if (rc == OK && !layers && attention_types_expand(types, words) != OK)
        rc = unsupported_error(key, types, err);
    if (rc == OK) rc = layer_types_read(key, layers ? layers : words, "global", "local", c, err);
    json_decref(words);
    return rc;
}

/* Reads which layers have a sliding window, and its size. */
static int sliding_window_read(const json_t *root, struct model_config *c, struct error *err) {
    if (c->arch->hf_names == HF_GEMMA) return gemma_sliding_window_read(root, c, err);
    if (c->arch->hf_names == HF_NEO) return neo_sliding_window_read(root, c, err);
    const json_t *types = json_field(root, "layer_types");
    return types ? layer_types_read("layer_types", types, "full_attention", NULL, c, err) : OK;
}

static int biases_read(const json_t *root, struct model_config *c, struct error *err) {
    bool attention, mlp;
    bool is_llama = strcmp(c->arch->name, "llama") == 0;
    int rc = bool_get(root, "attention_bias", false, &attention, err);
    if (rc == OK) rc = bool_get(root, "mlp_bias", false, &mlp, err);
    if (rc != OK) return rc;
    if (attention && c->arch->biased)
        return unsupported_error("attention_bias", json_field(root, "attention_bias"), err);
    if (mlp && !is_llama) return unsupported_error("mlp_bias", json_field(root, "mlp_bias"), err);
    c->biased = c->arch->biased;
    if (attention) c->biased |= 1u << PROJ_Q | 1u << PROJ_K | 1u << PROJ_V | 1u << PROJ_O;
    if (mlp) c->biased |= 1u << PROJ_GATE | 1u << PROJ_UP | 1u << PROJ_DOWN;
    return OK;
}

static int head_dim_read(const json_t *root, struct model_config *c, struct error *err) {
    bool is_given = json_field(root, "head_dim") != NULL;
    if (!is_given && c->arch->hf_names == HF_GEMMA) {
        c->head_dim = 256;
        return OK;
    }
    if (!is_given && c->d_model % c->n_heads != 0)
        return error_set(err, ERR_FORMAT,
                         "'hidden_size' %d is not a multiple of '%s' %d, and 'head_dim' is missing",
                         (int)c->d_model, size_keys_of(c->arch)->heads, (int)c->n_heads);
    return int_get(root, "head_dim", is_given ? 0 : c->d_model / c->n_heads, &c->head_dim, err);
}

/* Gemma's published files omit some sizes that have defaults in their class. */
static int sizes_read(const json_t *root, struct model_config *c, struct error *err) {
    const struct size_keys *keys = size_keys_of(c->arch);
    bool gemma = c->arch->hf_names == HF_GEMMA, neo = c->arch->hf_names == HF_NEO;
    int rc = int_get(root, keys->layers, 0, &c->n_layers, err);
    if (rc == OK) rc = int_get(root, "hidden_size", 0, &c->d_model, err);
    if (rc == OK)
        rc = int_get(root, "intermediate_size", neo ? MIN(c->d_model, 1 << 20) * 4 : 0, &c->d_ff,
                     err);
    if (rc == OK) rc = int_get(root, "vocab_size", gemma ? 262208 : 0, &c->vocab_size, err);
    if (rc == OK) rc = int_get(root, keys->heads, gemma ? 8 : 0, &c->n_heads, err);
    if (rc == OK)
        rc = int_get(root, "num_key_value_heads", gemma ? 4 : c->n_heads, &c->n_kv_heads, err);
    if (rc == OK)
        rc = int_get(root, "max_position_embeddings", gemma ? 131072 : 2048, &c->max_seq_len, err);
    return rc == OK ? head_dim_read(root, c, err) : rc;
}

/* Scores are divided by the square root of query_pre_attn_scalar. GPT-Neo does not scale scores, so
 * its value is 1. */
static int score_scale_read(const json_t *root, struct model_config *c, struct error *err) {
    if (c->arch->hf_names == HF_NEO) c->query_pre_attn_scalar = 1.0f;
    if (c->arch->hf_names != HF_GEMMA) return OK;
    return float_get(root, "query_pre_attn_scalar", 256, &c->query_pre_attn_scalar, err);
}

static int arch_read(const json_t *root, const struct arch **out, struct error *err) {
    const char *type = json_string_value(json_field(root, "model_type"));
    if (!type) return error_set(err, ERR_FORMAT, "'model_type' is missing");
    return arch_require(type, NAMING_HF, out, err);
}

int hf_config_read(const json_t *root, struct model_config *c, struct error *err) {
    *c = (struct model_config){0};
    int rc = arch_read(root, &c->arch, err);
    /* The text model inside a multimodal model. */
    const json_t *text = json_field(root, "text_config"), *outer = root;
    if (json_is_object(text)) root = text;
    if (rc == OK && json_field(root, "model_type")) rc = arch_read(root, &c->arch, err);
    if (rc == OK) rc = unsupported_keys_check(root, c->arch, err);
    if (rc == OK) rc = sizes_read(root, c, err);
    if (rc == OK) rc = biases_read(root, c, err);
    if (rc == OK)
        rc = float_get(root, size_keys_of(c->arch)->epsilon, c->arch->layer_norm ? 1e-5 : 1e-6,
                       &c->rms_norm_eps, err);
    if (rc == OK) rc = rope_read(root, c, err);
    if (rc == OK) rc = sliding_window_read(root, c, err);
    if (!c->sliding_layers[0] && !c->sliding_layers[1])
        c->sliding_window = 0; /* set but not used */
    if (rc == OK) rc = score_scale_read(root, c, err);
    const char *tie = "tie_word_embeddings";
    if (rc == OK)
        rc = bool_get(json_field(root, tie) ? root : outer, tie, c->arch->tied, &c->tied, err);
    return rc == OK ? model_config_check(c, err) : rc;
}

int hf_config_check(const struct model_config *c, struct error *err) {
    uint32_t extra = c->biased & ~c->arch->biased;
    uint32_t attention = 1u << PROJ_Q | 1u << PROJ_K | 1u << PROJ_V | 1u << PROJ_O;
    uint32_t mlp = 1u << PROJ_GATE | 1u << PROJ_UP | 1u << PROJ_DOWN;
    bool complete = ((extra & attention) == 0 || (extra & attention) == attention) &&
                    ((extra & mlp) == 0 || (extra & mlp) == mlp);
    if (complete && (!(extra & mlp) || strcmp(c->arch->name, "llama") == 0)) return OK;
    return error_set(err, ERR_MISMATCH,
                     "config.json cannot express that only some projections of a '%s' model have "
                     "biases; write a GGUF file instead",
                     c->arch->name);
}

/* The shortest decimal that reads back as the same float: 1e-5, not 9.99999975e-06. */
static json_t *float_json(float value) {
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) break;
    }
    return json_real(strtod(text, NULL));
}

static void int_set(json_t *root, const char *key, int32_t value) {
    json_object_set_new(root, key, json_integer(value));
}

static void float_set(json_t *root, const char *key, float value) {
    json_object_set_new(root, key, float_json(value));
}

static void id_set(json_t *root, const char *key, int32_t id) {
    json_object_set_new(root, key, id >= 0 ? json_integer(id) : json_null());
}

static json_t *rope_scaling_json(const struct rope_scaling *s) {
    if (s->kind == ROPE_DEFAULT) return json_null();
    json_t *out = json_object();
    json_object_set_new(out, "rope_type", json_string(rope_kind_name(s->kind)));
    float_set(out, "factor", s->factor);
    if (s->kind != ROPE_LINEAR) int_set(out, "original_max_position_embeddings", s->original_len);
    if (s->kind == ROPE_LLAMA3) {
        float_set(out, "low_freq_factor", s->low_freq_factor);
        float_set(out, "high_freq_factor", s->high_freq_factor);
    }
    return out;
}

static json_t *layer_types_json(const struct model_config *c, const char *full, const char *local) {
    json_t *out = json_array();
    for (int32_t l = 0; l < c->n_layers; l++)
        json_array_append_new(out, json_string(layer_is_sliding(c, l) ? local : full));
    return out;
}

static void default_fields_set(json_t *root, const struct model_config *c) {
    uint32_t extra = c->biased & ~c->arch->biased;
    int_set(root, "num_key_value_heads", c->n_kv_heads);
    int_set(root, "head_dim", c->head_dim);
    float_set(root, "rope_theta", c->rope_theta);
    json_object_set_new(root, "rope_scaling", rope_scaling_json(&c->rope_scaling));
    json_object_set_new(root, "attention_bias", json_boolean(extra & 1u << PROJ_Q));
    if (extra & 1u << PROJ_UP) json_object_set_new(root, "mlp_bias", json_true());
}

static void gemma_fields_set(json_t *root, const struct model_config *c) {
    int32_t period = sliding_window_pattern(c);
    float_set(root, "rope_local_base_freq", c->rope_local_theta);
    float_set(root, "query_pre_attn_scalar", c->query_pre_attn_scalar);
    if (c->sliding_window) int_set(root, "sliding_window", c->sliding_window);
    if (period) int_set(root, "sliding_window_pattern", period);
    json_object_set_new(root, "layer_types",
                        layer_types_json(c, "full_attention", "sliding_attention"));
}

static void neo_fields_set(json_t *root, const struct model_config *c) {
    if (c->sliding_window) int_set(root, "window_size", c->sliding_window);
    json_object_set_new(root, "attention_layers", layer_types_json(c, "global", "local"));
    json_object_set_new(root, "attention_types",
                        json_pack("[[o,i]]", layer_types_json(c, "global", "local"), 1));
}

json_t *hf_config_json(const struct model *m, enum tensor_type type) {
    const struct model_config *c = &m->config;
    const struct size_keys *keys = size_keys_of(c->arch);
    json_t *root = json_object();
    json_object_set_new(root, "architectures", json_pack("[s]", c->arch->hf_class));
    json_object_set_new(root, "model_type", json_string(c->arch->hf_type));
    int_set(root, "hidden_size", c->d_model);
    int_set(root, "intermediate_size", c->d_ff);
    int_set(root, keys->layers, c->n_layers);
    int_set(root, keys->heads, c->n_heads);
    int_set(root, "vocab_size", c->vocab_size);
    int_set(root, "max_position_embeddings", c->max_seq_len);
    float_set(root, keys->epsilon, c->rms_norm_eps);
    json_object_set_new(root, keys->act,
                        json_string(!c->arch->gelu                ? "silu"
                                    : c->arch->hf_names == HF_NEO ? "gelu_new"
                                                                  : "gelu_pytorch_tanh"));
    if (c->arch->hf_names == HF_NEO)
        neo_fields_set(root, c);
    else
        default_fields_set(root, c);
    if (c->arch->hf_names == HF_GEMMA) gemma_fields_set(root, c);
    json_object_set_new(root, "tie_word_embeddings", json_boolean(c->tied));
    json_object_set_new(root, "torch_dtype",
                        json_string(type == TENSOR_F32   ? "float32"
                                    : type == TENSOR_F16 ? "float16"
                                                         : "bfloat16"));
    id_set(root, "bos_token_id", m->tok ? tokenizer_bos(m->tok) : -1);
    id_set(root, "eos_token_id", m->tok ? tokenizer_eos(m->tok) : -1);
    if (m->source_hash[0]) json_object_set_new(root, HF_SOURCE_KEY, json_string(m->source_hash));
    return root;
}
