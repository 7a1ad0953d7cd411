/*
 * gguf_lora: adapters as GGUF files in llama.cpp's format.
 *
 *     general.type "adapter" | general.architecture | adapter.type "lora" | adapter.lora.alpha
 *     blk.N.attn_q.weight.lora_a [R, in]      blk.N.attn_q.weight.lora_b [out, R]
 *     token_embd.weight.lora_a   [V, R] (!)   token_embd.weight.lora_b   [D, R]
 *     adapter.alora.invocation_tokens: only of activated LoRA
 *
 * (!) This A is the transpose of PEFT's. The scale is alpha / R, with one alpha for the file. This
 * source file converts names and tensor layouts between GGUF and PEFT; peft.c checks the tensors
 * and makes the adapter. PEFT's config is stored as shoal.config and the lineage as
 * shoal.lineage.*; other programs ignore these keys. If a file lacks them, the config is derived
 * from the tensors.
 */
#include "adapter/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define KEY_CONFIG "shoal.config"
#define KEY_LINEAGE "shoal.lineage."
#define KEY_INVOCATION "adapter.alora.invocation_tokens"

static const char *const proj_gguf_names[N_PROJ] = {"attn_q",   "attn_k", "attn_v",  "attn_output",
                                                    "ffn_gate", "ffn_up", "ffn_down"};

/* The name of the module's base tensor in GGUF. */
static void gguf_name(char out[NAME_MAX_LEN], int32_t module) {
    if (module == MODULE_EMBED)
        snprintf(out, NAME_MAX_LEN, "token_embd.weight");
    else if (module == MODULE_HEAD)
        snprintf(out, NAME_MAX_LEN, "output.weight");
    else
        snprintf(out, NAME_MAX_LEN, "blk.%d.%s.weight", (int)(module / N_PROJ),
                 proj_gguf_names[module % N_PROJ]);
}

/* The number of heads whose rows GGUF stores interleaved (q and k of some architectures), or 0. */
static int32_t permuted_heads(const struct model_config *shape, int32_t module) {
    if (module < 0 || !shape->arch->gguf_permuted) return 0;
    if (module % N_PROJ == PROJ_Q) return shape->n_heads;
    return module % N_PROJ == PROJ_K ? shape->n_kv_heads : 0;
}

/* Row h·E + a·E/2 + j in PEFT's order is row h·E + 2j + a in GGUF. */
static void rows_permute(const float *from, float *to, int32_t heads, int64_t e, int64_t k,
                         bool interleave) {
    for (int64_t i = 0; i < heads * e; i++) {
        int64_t h = i / e * e, pos = i % e, gguf_row = h + 2 * (pos % (e / 2)) + pos / (e / 2);
        memcpy(to + (interleave ? gguf_row : i) * k, from + (interleave ? i : gguf_row) * k,
               (size_t)k * sizeof *to);
    }
}

/* The value of adapter.lora.alpha with which llama.cpp uses this module's scale. */
static float gguf_alpha(struct adapter_module m, bool rslora) {
    return rslora ? (float)((double)m.alpha * sqrt(m.r)) : m.alpha;
}

/* True if the module is not adapted or needs *alpha. If *alpha is NaN, sets it to the module's
 * alpha first. */
static bool alpha_matches(struct adapter_module m, bool rslora, float *alpha) {
    if (m.r == 0) return true;
    if (isnan(*alpha)) *alpha = gguf_alpha(m, rslora);
    return gguf_alpha(m, rslora) == *alpha;
}

/* The one adapter.lora.alpha that gives the scale of every module. NaN if the modules need
 * different values, or the value 0, which llama.cpp reads as "not given". */
static float common_alpha(const struct model_config *shape, const struct adapter_config *c) {
    float alpha = NAN;
    bool same = true;
    for (int32_t i = 0; i < shape->n_layers * N_PROJ; i++)
        same =
            same && alpha_matches(adapter_module_at(c, i / N_PROJ, i % N_PROJ), c->rslora, &alpha);
    same = same && alpha_matches(c->embed.lora, c->rslora, &alpha) &&
           alpha_matches(c->head.lora, c->rslora, &alpha);
    return same && alpha != 0 ? alpha : NAN;
}

static int arch_check(const struct arch *arch, struct error *err) {
    if (arch->gguf) return OK;
    return error_set(err, ERR_MISMATCH,
                     "architecture '%s' has no GGUF form; use a PEFT directory instead",
                     arch->name);
}

static int save_check_supported(const struct adapter *a, struct error *err) {
    const struct adapter_config *c = &a->config;
    if (arch_check(a->shape.arch, err)) return err->code;
    const char *what =
        c->dora                               ? "DoRA's magnitudes (use_dora)"
        : c->embed.full || c->head.full       ? "a whole embedding or head (modules_to_save)"
        : c->embed.n_ids || c->head.n_ids     ? "trained token rows (trainable_token_indices)"
        : a->vocab_overrides && a->shape.tied ? "low-rank parts of a tied embedding or head"
                                              : NULL;
    if (!what) return OK;
    return error_set(
        err, ERR_MISMATCH,
        "adapter '%.12s' has %s, which GGUF adapters do not support. 'shoal adapter "
        "merge MODEL ADAPTER --out merged.gguf' adds it to a copy of the model, exactly%s",
        a->hash, what,
        c->dora ? "; 'shoal adapter extract MODEL merged.gguf --rank 32 --out lora.gguf' then "
                  "approximates it by plain LoRA and prints the error"
                : "");
}

static void lora_b_rescale(const struct adapter *a, const struct lora *lo, int64_t out, float alpha,
                           float *data) {
    if (lo->r == 0) return;
    float *b = data + (lo->b - a->data);
    double w = (double)lo->scale * lo->r / (double)alpha;
    for (int64_t i = 0; i < out * lo->r; i++) b[i] = (float)(w * (double)b[i]);
}

/* An equivalent adapter with one alpha: each B is rescaled to compensate. */
static struct adapter *adapter_fold_scales(const struct adapter *a, struct error *err) {
    const struct model_config *s = &a->shape;
    float *data = try_calloc(a->n_data, sizeof *data, err);
    if (!data) return NULL;
    int32_t n = s->n_layers * N_PROJ;
    struct adapter_config c = a->config;
    struct adapter_module *modules = xcalloc((size_t)n, sizeof *modules);
    float alpha = c.alpha != 0 ? c.alpha : 1;
    memcpy(data, a->data, a->n_data * sizeof *data);
    for (int32_t i = 0; i < n; i++) {
        modules[i] = (struct adapter_module){a->loras[i].r, alpha};
        lora_b_rescale(a, &a->loras[i], proj_out(s, i % N_PROJ), alpha, data);
    }
    if (a->vocab_overrides)
        lora_b_rescale(a, &a->vocab_overrides->embed.lora, s->d_model, alpha, data);
    if (a->vocab_overrides)
        lora_b_rescale(a, &a->vocab_overrides->head.lora, s->vocab_size, alpha, data);
    c.embed.lora.alpha = c.head.lora.alpha = c.alpha = alpha;
    c.rslora = false;
    c.modules = modules;
    struct adapter *folded = adapter_from_owned_data(s, &c, data, a->lineage);
    free(modules);
    return folded;
}

/* Converts one tensor to GGUF's name and layout. Permuted or transposed data are allocated in the
 * arena; other data are borrowed. */
static struct tensor_info tensor_to_gguf(const struct model_config *shape,
                                         const struct adapter_tensor *t, const float *data,
                                         struct arena *arena) {
    char base[NAME_MAX_LEN], *name = arena_alloc(arena, NAME_MAX_LEN);
    size_t size = adapter_tensor_floats(t) * sizeof *data;
    int32_t heads = t->kind == LORA_TENSOR_B ? permuted_heads(shape, t->module) : 0;
    bool transposed = t->module == MODULE_EMBED && t->kind == LORA_TENSOR_A;
    gguf_name(base, t->module);
    snprintf(name, NAME_MAX_LEN, "%.120s.lora_%c", base, t->kind == LORA_TENSOR_A ? 'a' : 'b');
    struct tensor_info out = {
        .name = name,
        .type = TENSOR_F32,
        .n_dims = 2,
        .dims = {transposed ? t->cols : t->rows, transposed ? t->rows : t->cols},
        .data = data,
        .size = size};
    if (!heads && !transposed) return out;
    float *converted = arena_alloc(arena, size);
    if (transposed)
        transpose(converted, t->rows, data, t->cols, t->rows, t->cols, NULL);
    else
        rows_permute(data, converted, heads, shape->head_dim, t->cols, true);
    out.data = converted;
    return out;
}

static json_t *metadata_new(const struct adapter *a, const char *config, float alpha) {
    json_t *o = json_pack("{s:s, s:s, s:s, s:f, s:s}", "general.type", "adapter",
                          "general.architecture", a->shape.arch->gguf, "adapter.type", "lora",
                          "adapter.lora.alpha", (double)alpha, KEY_CONFIG, config);
    const char *key;
    json_t *value;
    CHECK(o);
    json_object_foreach (a->lineage, key, value) {
        char *name = xasprintf(KEY_LINEAGE "%s", key);
        json_object_set(o, name, value);
        free(name);
    }
    if (a->config.n_invocation)
        json_object_set_new(o, KEY_INVOCATION, adapter_invocation_json(&a->config));
    return o;
}

static int gguf_save(const struct adapter *a, const char *path, const char *base, float alpha,
                     struct error *err) {
    char *config = peft_config_text(a, base);
    if (!config) return error_set(err, ERR_USAGE, "the base's name is not UTF-8");
    struct arena arena = {0};
    int n;
    struct adapter_tensor *list = adapter_tensors(&a->shape, &a->config, &n);
    size_t bytes_per_tensor = NAME_MAX_LEN + sizeof(struct tensor_info) + 3 * 64;
    int rc = arena_reserve(&arena, a->n_data * sizeof *a->data + (size_t)n * bytes_per_tensor, err);
    if (rc != OK) goto out;
    struct tensor_info *infos = arena_alloc(&arena, (size_t)n * sizeof *infos);
    json_t *metadata = metadata_new(a, config, alpha);
    const float *src = a->data;
    for (int i = 0; i < n; i++) {
        infos[i] = tensor_to_gguf(&a->shape, &list[i], src, &arena);
        src += adapter_tensor_floats(&list[i]);
    }
    rc = gguf_tensors_write(path, metadata, infos, n, err);
    json_decref(metadata);
out:
    free(list);
    free(config);
    arena_release(&arena);
    return rc;
}

int adapter_save_gguf(const struct adapter *a, const char *path, const char *base, bool fold,
                      struct error *err) {
    CHECK(a->data); // else adapter_pack_only freed it
    float alpha = common_alpha(&a->shape, &a->config);
    if (save_check_supported(a, err)) return err->code;
    if (!isnan(alpha)) return gguf_save(a, path, base, alpha, err);
    if (!fold)
        return error_set(err, ERR_MISMATCH,
                         "adapter '%.12s' has different scales, but a GGUF adapter has one alpha "
                         "(rescale B with --fold)",
                         a->hash);
    struct adapter *folded = adapter_fold_scales(a, err);
    if (!folded) return err->code;
    int rc = gguf_save(folded, path, base, folded->config.alpha, err);
    adapter_release(folded);
    return rc;
}

/* Parses a tensor's name into its module and kind; false if it is no LoRA tensor of this shape. */
static bool tensor_name_parse(const char *name, const struct model_config *shape, int32_t *module,
                              enum lora_tensor_kind *kind) {
    size_t len = strlen(name);
    if (len < 8 || strncmp(name + len - 7, ".lora_", 6) != 0) return false;
    if (name[len - 1] != 'a' && name[len - 1] != 'b') return false;
    *kind = name[len - 1] == 'a' ? LORA_TENSOR_A : LORA_TENSOR_B;
    for (*module = MODULE_HEAD; *module < shape->n_layers * N_PROJ; ++*module) {
        char base[NAME_MAX_LEN];
        gguf_name(base, *module);
        if (strlen(base) == len - 7 && memcmp(base, name, len - 7) == 0) return true;
    }
    return false;
}

struct gguf_lora_reader {
    const char *path;
    const struct model_config *shape;
    struct safetensors in,
        out; /* in: the file's tensors; out: converted to PEFT's names and layout */
    struct peft_config config;
    struct adapter_errors errors;
    struct arena arena;
    float alpha;
};

/* Converts a tensor to an f32 matrix with PEFT's name and layout. peft.c validates shapes; this
 * function checks only what it needs to reorder the rows. */
static int tensor_from_gguf(struct gguf_lora_reader *rd, const struct tensor_info *t,
                            int32_t module, enum lora_tensor_kind kind, struct error *err) {
    static const char *const endings[2][2] = {{"lora_A.weight", "lora_B.weight"},
                                              {"lora_embedding_A", "lora_embedding_B"}};
    struct tensor_info *out = &rd->out.tensors[rd->out.n_tensors];
    int64_t rows = t->n_dims == 2 ? t->dims[0] : 1, k = t->dims[t->n_dims - 1];
    char name[NAME_MAX_LEN];
    bool transposed = module == MODULE_EMBED && kind == LORA_TENSOR_A;
    int32_t heads = kind == LORA_TENSOR_B ? permuted_heads(rd->shape, module) : 0;
    bool reordered = transposed || (heads && rows == (int64_t)heads * rd->shape->head_dim);
    size_t size = sizeof(float) * (size_t)(rows * k);
    float *data = arena_try_alloc(&rd->arena, size, err), *converted = data;
    if (data && reordered) converted = arena_try_alloc(&rd->arena, size, err);
    if (!converted) return err->code;
    for (int64_t i = 0; i < rows; i++)
        tensor_to_f32(t->type, (const uint8_t *)t->data + (size_t)i * tensor_row_bytes(t->type, k),
                      data + i * k, k);
    if (transposed)
        transpose(converted, rows, data, k, rows, k, NULL);
    else if (reordered)
        rows_permute(data, converted, heads, rd->shape->head_dim, k, false);
    peft_module_name(name, rd->shape->arch, module);
    *out = (struct tensor_info){
        .name = xasprintf("base_model.model.%s.%s", name, endings[module == MODULE_EMBED][kind]),
        .type = TENSOR_F32,
        .n_dims = 2,
        .dims = {transposed ? k : rows, transposed ? rows : k},
        .data = converted,
        .size = size};
    rd->out.n_tensors++;
    return OK;
}

/* Stores the rank of an A tensor, for the config of a file without KEY_CONFIG. */
static void rank_record(struct gguf_lora_reader *rd, struct adapter_module *modules, int32_t module,
                        const struct tensor_info *a) {
    struct adapter_config *c = &rd->config.c;
    struct adapter_module *m = module == MODULE_EMBED  ? &c->embed.lora
                               : module == MODULE_HEAD ? &c->head.lora
                                                       : &modules[module];
    if (a->dims[0] < 1 || a->dims[0] > ADAPTER_RANK_MAX)
        adapter_errors_add(&rd->errors, "'%.160s' has rank %lld, not 1 to %d", a->name,
                           (long long)a->dims[0], ADAPTER_RANK_MAX);
    else
        *m = (struct adapter_module){(int32_t)a->dims[0],
                                     rd->alpha != 0 ? rd->alpha : (float)a->dims[0]};
}

/* Converts all tensors and derives a config from their ranks. */
static int tensors_from_gguf(struct gguf_lora_reader *rd, struct error *err) {
    struct adapter_module *modules =
        arena_alloc(&rd->arena, (size_t)rd->shape->n_layers * N_PROJ * sizeof *modules);
    rd->config.c = (struct adapter_config){.r = 8, .alpha = 8, .modules = modules};
    rd->out.tensors = try_calloc((size_t)rd->in.n_tensors + 1, sizeof *rd->out.tensors, err);
    if (!rd->out.tensors) return err->code;
    for (int i = 0; i < rd->in.n_tensors; i++) {
        const struct tensor_info *t = &rd->in.tensors[i];
        int32_t module;
        enum lora_tensor_kind kind;
        if (!tensor_name_parse(t->name, rd->shape, &module, &kind) || t->n_dims > 2) {
            adapter_errors_add(&rd->errors, "'%.160s' belongs to no projection of it", t->name);
            continue;
        }
        if (tensor_from_gguf(rd, t, module, kind, err)) return err->code;
        if (kind == LORA_TENSOR_A)
            rank_record(rd, modules, module, &rd->out.tensors[rd->out.n_tensors - 1]);
    }
    qsort(rd->out.tensors, (size_t)rd->out.n_tensors, sizeof *rd->out.tensors, tensor_info_compare);
    return OK;
}

static int key_require(const struct gguf_lora_reader *rd, const char *key, const char *expected,
                       struct error *err) {
    const char *actual = json_string_value(json_object_get(rd->in.metadata, key));
    if (actual && strcmp(actual, expected) == 0) return OK;
    return error_set(err, ERR_MISMATCH, "adapter '%s': '%s' is '%.40s', expected '%s'", rd->path,
                     key, actual ? actual : "missing", expected);
}

static int header_read(struct gguf_lora_reader *rd, struct error *err) {
    const json_t *alpha = json_object_get(rd->in.metadata, "adapter.lora.alpha");
    if (arch_check(rd->shape->arch, err) || key_require(rd, "general.type", "adapter", err) ||
        key_require(rd, "adapter.type", "lora", err) ||
        key_require(rd, "general.architecture", rd->shape->arch->gguf, err))
        return err->code;
    rd->alpha = (float)json_number_value(alpha);
    if (!json_is_number(alpha) || !isfinite(rd->alpha))
        return error_set(err, ERR_FORMAT,
                         "adapter '%s': metadata 'adapter.lora.alpha' is missing or no number",
                         rd->path);
    return OK;
}

/* Reads PEFT's config if the file has one. Its scales must agree with adapter.lora.alpha. */
static int config_read(struct gguf_lora_reader *rd, struct error *err) {
    const json_t *text = json_object_get(rd->in.metadata, KEY_CONFIG);
    if (!text) return OK;
    if (!json_is_string(text))
        return error_set(err, ERR_FORMAT, "adapter '%s': metadata '" KEY_CONFIG "' is no text",
                         rd->path);
    json_t *root = json_parse(json_string_value(text), json_string_length(text), KEY_CONFIG, err);
    rd->config.c = (struct adapter_config){0};
    int rc = root ? peft_config_read(root, rd->shape, &rd->config, &rd->errors, err) : err->code;
    json_decref(root);
    if (rc == OK && common_alpha(rd->shape, &rd->config.c) != rd->alpha)
        rc = error_set(err, ERR_MISMATCH, "'" KEY_CONFIG "' and 'adapter.lora.alpha' disagree");
    return rc == OK ? OK : error_wrap(err, "adapter '%s'", rd->path);
}

static bool ids_equal(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b) {
    return n_a == n_b && (n_a == 0 || memcmp(a, b, (size_t)n_a * sizeof *a) == 0);
}

/* Reads the invocation; PEFT's config, if the file has one, must have the same. */
static int invocation_read(struct gguf_lora_reader *rd, struct error *err) {
    const json_t *list = json_object_get(rd->in.metadata, KEY_INVOCATION);
    struct adapter_config *c = &rd->config.c, of_config = *c;
    int rc = OK;
    c->invocation = NULL;
    c->n_invocation = 0;
    if (list) rc = peft_invocation_parse(list, KEY_INVOCATION, rd->shape, &rd->config, err);
    if (rc == OK && json_object_get(rd->in.metadata, KEY_CONFIG) &&
        !ids_equal(c->invocation, c->n_invocation, of_config.invocation, of_config.n_invocation))
        rc = error_set(err, ERR_MISMATCH, "'" KEY_CONFIG "' and '" KEY_INVOCATION "' disagree");
    return rc == OK ? OK : error_wrap(err, "adapter '%s'", rd->path);
}

static json_t *lineage_read(const json_t *metadata) {
    json_t *out = json_object(), *value;
    const char *key;
    json_object_foreach ((json_t *)(uintptr_t)metadata, key, value) {
        if (strncmp(key, KEY_LINEAGE, strlen(KEY_LINEAGE)) == 0 && json_is_string(value))
            json_object_set(out, key + strlen(KEY_LINEAGE), value);
    }
    return out;
}

struct adapter *gguf_load(const char *path, const struct model_config *shape,
                          const struct adapter_load_hints *hints, struct error *err) {
    struct gguf_lora_reader rd = {.path = path, .shape = shape};
    struct adapter *a = NULL;
    if (gguf_tensors_open(&rd.in, path, err)) return NULL;
    if (header_read(&rd, err) || tensors_from_gguf(&rd, err)) goto out;
    rd.out.metadata = lineage_read(rd.in.metadata);
    if (config_read(&rd, err) || invocation_read(&rd, err)) goto out;
    a = adapter_from_tensors(path, shape, &rd.config, &rd.out, hints, &rd.errors, err);
out:
    safetensors_close(&rd.in);
    safetensors_close(&rd.out);
    peft_config_release(&rd.config);
    buf_release(&rd.errors.text);
    arena_release(&rd.arena);
    return a;
}

struct adapter *adapter_load_gguf(const char *path, const struct model_config *shape,
                                  struct error *err) {
    return gguf_load(path, shape, &(struct adapter_load_hints){0}, err);
}

int adapter_write(const struct adapter *a, const char *out, const char *base, bool fold,
                  struct error *err) {
    bool gguf = path_has_extension(out, ".gguf");
    return gguf ? adapter_save_gguf(a, out, base, fold, err) : adapter_save(a, out, base, err);
}
