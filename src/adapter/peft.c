/*
 * peft: adapters as PEFT directories (adapter_config.json and adapter_model.safetensors).
 *
 * Reading is strict, because a partly loaded adapter is worse than an error. The config determines
 * the expected tensors. The file must have each of them with the right dimensions, and no others.
 * One message lists all errors. Pickles (adapter_model.bin) are never opened.
 *
 * A file may also have an embedding or head that its config does not mention: PEFT saves these
 * tables when they are targets, and loads them in place of the base's. Such a table belongs to the
 * adapter unless it is bitwise equal to the model's. On a tied base it replaces both embedding and
 * head.
 *
 * Writing is canonical: tensors are sorted by name, so saving a loaded adapter always gives the
 * same bytes. The tensors are written before the config, and each file is replaced atomically. If
 * only one of the two files exists, reading fails.
 */
#include "adapter/internal.h"
#include "hub/hub.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define PICKLE_NAME "adapter_model.bin"
#define ERRORS_MAX_TEXT 1500

void adapter_errors_add(struct adapter_errors *o, const char *fmt, ...) {
    char line[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    /* Names are untrusted: control characters could be escape sequences for the terminal. */
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    o->n++;
    if (o->text.len + strlen(line) > ERRORS_MAX_TEXT)
        o->hidden++;
    else
        buf_printf(&o->text, "\n  %s", line);
}

/* OK if the list is empty; else sets `err` to a message with the list. */
static int adapter_errors_report(struct adapter_errors *o, const char *path, struct error *err) {
    if (o->n == 0) return OK;
    if (o->hidden > 0) buf_printf(&o->text, "\n  and %d more", o->hidden);
    return error_set(err, ERR_MISMATCH, "adapter '%s' does not fit this model (%d problem%s):%s",
                     path, o->n, o->n == 1 ? "" : "s", o->text.data);
}

size_t adapter_tensor_floats(const struct adapter_tensor *t) {
    return (size_t)t->rows * (size_t)(t->cols ? t->cols : 1);
}

struct tensor_list {
    const struct arch *arch;
    struct adapter_tensor *v;
    int n;
};

static void tensor_add(struct tensor_list *l, int32_t module, enum lora_tensor_kind kind,
                       const char *ending, int64_t rows, int64_t cols) {
    struct adapter_tensor *t = &l->v[l->n++];
    char name[NAME_MAX_LEN];
    peft_module_name(name, l->arch, module);
    *t = (struct adapter_tensor){.module = module, .kind = kind, .rows = rows, .cols = cols};
    snprintf(t->name, sizeof t->name, "base_model.model.%.100s.%s", name, ending);
}

/* Adds the tensors of the embedding or the head, in the order of adapter.data. */
static void table_add(struct tensor_list *l, const struct model_config *shape,
                      const struct adapter_config *c, int32_t module) {
    bool head = module == MODULE_HEAD;
    const struct adapter_vocab_config *t = head ? &c->head : &c->embed;
    int64_t d = shape->d_model, v = shape->vocab_size, in = head ? d : v, out = head ? v : d;
    int32_t r = t->lora.r;
    if (r) tensor_add(l, module, LORA_TENSOR_A, head ? "lora_A.weight" : "lora_embedding_A", r, in);
    if (r)
        tensor_add(l, module, LORA_TENSOR_B, head ? "lora_B.weight" : "lora_embedding_B", out, r);
    if (r && c->dora) tensor_add(l, module, LORA_TENSOR_MAGNITUDE, "lora_magnitude_vector", out, 0);
    if (t->full)
        tensor_add(l, module, LORA_TENSOR_SAVED_MODULE, r ? "base_layer.weight" : "weight", v, d);
    if (t->n_ids)
        tensor_add(l, module, LORA_TENSOR_TRAINABLE_TOKENS, "token_adapter.trainable_tokens_delta",
                   t->n_ids, d);
}

struct adapter_tensor *adapter_tensors(const struct model_config *shape,
                                       const struct adapter_config *c, int *n) {
    int32_t modules = shape->n_layers * N_PROJ;
    struct tensor_list l = {shape->arch, xcalloc((size_t)modules * 3 + 10, sizeof *l.v), 0};
    for (int32_t i = 0; i < modules; i++) {
        int32_t r = adapter_module_at(c, i / N_PROJ, i % N_PROJ).r;
        if (r == 0) continue;
        tensor_add(&l, i, LORA_TENSOR_A, "lora_A.weight", r, proj_in(shape, i % N_PROJ));
        tensor_add(&l, i, LORA_TENSOR_B, "lora_B.weight", proj_out(shape, i % N_PROJ), r);
    }
    for (int32_t i = 0; i < modules && c->dora; i++)
        if (adapter_module_at(c, i / N_PROJ, i % N_PROJ).r > 0)
            tensor_add(&l, i, LORA_TENSOR_MAGNITUDE, "lora_magnitude_vector",
                       proj_out(shape, i % N_PROJ), 0);
    table_add(&l, shape, c, MODULE_EMBED);
    table_add(&l, shape, c, MODULE_HEAD);
    *n = l.n;
    return l.v;
}

struct peft_load {
    const char *path;
    const struct model_config *shape;
    struct peft_config *config;
    const struct safetensors *st;
    const struct adapter_load_hints *hints;
    struct adapter_errors *errors;
    bool *used; /* [n_tensors of the file] */
    struct adapter_tensor *wanted;
    const struct tensor_info **found; /* [n], the file's tensor for each of `wanted` */
    int n;
    /* For embedding and head: the tensor that is the replacement table, if it is not the tensor
     * with the expected name; else NULL. */
    const struct tensor_info *full_source[2];
};

static const struct tensor_info *name_find(struct peft_load *ld, const char *name) {
    const struct tensor_info *t = safetensors_find(ld->st, name);
    if (t) ld->used[t - ld->st->tensors] = true;
    return t;
}

/* Finds a tensor by its name, or by the variant with PEFT's adapter name: "NAME.default.weight".
 * For a magnitude the variants are "NAME.default" and "NAME.default.weight". */
static const struct tensor_info *tensor_find(struct peft_load *ld,
                                             const struct adapter_tensor *wanted) {
    size_t len = strlen(wanted->name), stem = len;
    bool weight = len > 7 && strcmp(wanted->name + len - 7, ".weight") == 0;
    if (weight) stem -= 7;
    char other[2][NAME_MAX_LEN + 24];
    snprintf(other[0], sizeof other[0], "%.*s.default%s", (int)stem, wanted->name,
             weight ? ".weight" : "");
    snprintf(other[1], sizeof other[1], "%s.default.weight", wanted->name);
    const struct tensor_info *t = name_find(ld, wanted->name);
    for (int i = 0; i < 1 + (wanted->kind == LORA_TENSOR_MAGNITUDE); i++) {
        const struct tensor_info *variant = name_find(ld, other[i]);
        if (t && variant)
            adapter_errors_add(ld->errors, "'%s' is there twice, with and without 'default'",
                               wanted->name);
        if (!t) t = variant;
    }
    return t;
}

static size_t element_size(enum tensor_type t) {
    return t == TENSOR_F32 ? 4 : t == TENSOR_F16 || t == TENSOR_BF16 ? 2 : 0;
}

/* Reports wrong dimensions or a wrong element type. */
static void tensor_check(struct peft_load *ld, const struct adapter_tensor *wanted,
                         const struct tensor_info *t) {
    size_t size = element_size(t->type);
    int dims = wanted->cols ? 2 : 1;
    if (t->n_dims != dims) {
        adapter_errors_add(ld->errors, "'%s' has %d dimensions, not %d", t->name, t->n_dims, dims);
    } else if (t->dims[0] != wanted->rows || (dims == 2 && t->dims[1] != wanted->cols)) {
        if (dims == 2)
            adapter_errors_add(ld->errors, "'%s' is [%lld, %lld], expected [%lld, %lld]", t->name,
                               (long long)t->dims[0], (long long)t->dims[1],
                               (long long)wanted->rows, (long long)wanted->cols);
        else
            adapter_errors_add(ld->errors, "'%s' is [%lld], expected [%lld]", t->name,
                               (long long)t->dims[0], (long long)wanted->rows);
    } else if (size == 0 || t->mask || t->size != size * adapter_tensor_floats(wanted)) {
        adapter_errors_add(ld->errors, "'%s' is of type %s, not F32, F16 or BF16", t->name,
                           t->mask ? "BOOL or U8" : tensor_type_name(t->type));
    }
}

/* Converts elements [begin, begin + n) to f32. The data in the file may be unaligned, so they are
 * copied to `raw` first. */
static void elements_widen(const struct tensor_info *t, int64_t begin, int64_t n, float *dst) {
    enum { STEP = 1024 };
    float raw[STEP];
    size_t size = element_size(t->type);
    const uint8_t *from = (const uint8_t *)t->data + (size_t)begin * size;
    for (int64_t i = 0, m; i < n; i += m) {
        m = MIN(n - i, STEP);
        memcpy(raw, from + (size_t)i * size, (size_t)m * size);
        tensor_to_f32(t->type, raw, dst + i, m);
    }
}

/* True when the tensor is bitwise equal to the model's table. */
static bool table_is_base(const struct peft_load *ld, const struct tensor_info *t, bool head) {
    int64_t v = ld->shape->vocab_size, d = ld->shape->d_model;
    size_t size = element_size(t->type);
    const struct model *m = ld->hints->model;
    if (!m || t->mask || t->n_dims != 2 || t->dims[0] != v || t->dims[1] != d ||
        t->size != size * (size_t)(v * d) || size == 0)
        return false;
    float *a = xmalloc((size_t)d * 2 * sizeof *a), *b = a + d;
    bool same = true;
    for (int64_t i = 0; i < v && same; i++) {
        elements_widen(t, i * d, d, a);
        matrix_get_row(head ? &m->head : &m->embed, i, b);
        same = memcmp(a, b, (size_t)d * sizeof *a) == 0;
    }
    free(a);
    return same;
}

/* Looks for an embedding (head = 0) or head (head = 1) that the config does not mention. Ignores it
 * if it is equal to the model's. */
static void unlisted_table_find(struct peft_load *ld, int head) {
    struct adapter_config *c = &ld->config->c;
    struct adapter_vocab_config *t = head ? &c->head : &c->embed;
    if (t->full || t->n_ids) return;
    const char *module = head ? "lm_head" : ld->shape->arch->hf_embed;
    static const char *const endings[] = {"base_layer.weight", "weight"};
    for (int i = 0; i < 2 && !ld->full_source[head]; i++) {
        char name[NAME_MAX_LEN];
        snprintf(name, sizeof name, "base_model.model.%s.%s", module, endings[i]);
        ld->full_source[head] = name_find(ld, name);
    }
    if (!ld->full_source[head]) return;
    if (table_is_base(ld, ld->full_source[head], head))
        ld->full_source[head] = NULL;
    else
        t->full = true;
}

/* On a tied base, a table that the config does not mention replaces both tables. */
static void unlisted_table_tie(struct peft_load *ld) {
    struct adapter_vocab_config *t[2] = {&ld->config->c.embed, &ld->config->c.head};
    if (!ld->shape->tied) return;
    for (int i = 0; i < 2; i++)
        if (ld->full_source[i] && !t[!i]->full && !t[!i]->n_ids) {
            ld->full_source[!i] = ld->full_source[i];
            t[!i]->full = true;
            return;
        }
}

/* With ensure_weight_tying on a tied base, the one saved table replaces both embedding and head. */
static void saved_table_tie(struct peft_load *ld) {
    struct adapter_config *c = &ld->config->c;
    if (!ld->config->tie_weights || !ld->shape->tied || c->embed.full == c->head.full) return;
    char name[NAME_MAX_LEN];
    snprintf(name, sizeof name, "base_model.model.%s.weight",
             c->head.full ? "lm_head" : ld->shape->arch->hf_embed);
    ld->full_source[c->embed.full] = name_find(ld, name);
    if (c->embed.full)
        c->head.full = true;
    else
        c->embed.full = true;
}

static void tensor_match(struct peft_load *ld, int i) {
    const struct adapter_tensor *wanted = &ld->wanted[i];
    const struct tensor_info *t = wanted->kind == LORA_TENSOR_SAVED_MODULE
                                      ? ld->full_source[wanted->module == MODULE_HEAD]
                                      : NULL;
    if (!t) t = tensor_find(ld, wanted);
    if (t)
        tensor_check(ld, wanted, t);
    else
        adapter_errors_add(ld->errors, "'%s' is missing", wanted->name);
    ld->found[i] = t;
}

/* True for a LoRA tensor of a module that the config does not target. */
static bool name_is_untargeted(const struct peft_load *ld, const char *name) {
    for (int32_t m = MODULE_HEAD; m < ld->shape->n_layers * N_PROJ; m++) {
        char module[NAME_MAX_LEN], prefix[2 * NAME_MAX_LEN];
        const struct adapter_config *c = &ld->config->c;
        int32_t r = m == MODULE_EMBED  ? c->embed.lora.r
                    : m == MODULE_HEAD ? c->head.lora.r
                                       : adapter_module_at(c, m / N_PROJ, m % N_PROJ).r;
        peft_module_name(module, ld->shape->arch, m);
        int len = snprintf(prefix, sizeof prefix, "base_model.model.%s.lora_", module);
        if (r == 0 && module[0] && strncmp(name, prefix, (size_t)len) == 0) return true;
    }
    return false;
}

/* Finds every expected tensor in the file, then reports the file's unused tensors. */
static int tensors_match(struct peft_load *ld, struct error *err) {
    ld->used = xcalloc((size_t)ld->st->n_tensors + 1, sizeof *ld->used);
    saved_table_tie(ld);
    unlisted_table_find(ld, 0);
    unlisted_table_find(ld, 1);
    unlisted_table_tie(ld);
    ld->wanted = adapter_tensors(ld->shape, &ld->config->c, &ld->n);
    ld->found = xcalloc((size_t)ld->n + 1, sizeof *ld->found);
    for (int i = 0; i < ld->n; i++) tensor_match(ld, i);
    for (int i = 0; i < ld->st->n_tensors; i++) {
        const char *name = ld->st->tensors[i].name;
        if (ld->used[i]) continue;
        if (name_is_untargeted(ld, name))
            adapter_errors_add(ld->errors, "'%.160s' is not among the targets of " PEFT_CONFIG_FILE,
                               name);
        else
            adapter_errors_add(ld->errors, "'%.160s' belongs to no projection of it", name);
    }
    return adapter_errors_report(ld->errors, ld->path, err);
}

/* Compares the exponent bits, so that the loop, which visits every float of a file, has no branch.
 */
static bool all_finite(const float *v, int64_t n) {
    const uint32_t exponent = 0x7F800000;
    uint32_t max_exponent = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &v[i], sizeof bits);
        max_exponent = MAX(max_exponent, bits & exponent);
    }
    return max_exponent < exponent;
}

/* Writes one tensor as f32 to `dst`, with its rows in the order of the config; false when a value
 * is not finite. */
static bool tensor_widen(const struct peft_load *ld, int i, float *dst) {
    const struct adapter_tensor *wanted = &ld->wanted[i];
    int64_t k = wanted->cols ? wanted->cols : 1, n = wanted->rows * k;
    const int32_t *order = wanted->kind == LORA_TENSOR_TRAINABLE_TOKENS
                               ? ld->config->row_order[wanted->module == MODULE_HEAD]
                               : NULL;
    for (int64_t row = 0; order && row < wanted->rows; row++)
        elements_widen(ld->found[i], order[row] * k, k, dst + row * k);
    if (!order) elements_widen(ld->found[i], 0, n, dst);
    return all_finite(dst, n);
}

static int tensors_read(const struct peft_load *ld, float *data, struct error *err) {
    for (int i = 0; i < ld->n; i++) {
        if (!tensor_widen(ld, i, data))
            return error_set(err, ERR_NUMERIC, "tensor '%s' of adapter '%s' holds NaN or Inf",
                             ld->found[i]->name, ld->path);
        data += adapter_tensor_floats(&ld->wanted[i]);
    }
    return OK;
}

/* The lineage from the file's metadata, without PEFT's entries; NULL when empty. */
static json_t *lineage_read(const json_t *metadata) {
    json_t *lineage = metadata ? json_copy((json_t *)metadata) : NULL;
    if (lineage) json_object_del(lineage, "format");
    if (json_object_size(lineage) > 0) return lineage;
    json_decref(lineage);
    return NULL;
}

struct adapter *adapter_from_tensors(const char *path, const struct model_config *shape,
                                     struct peft_config *config, const struct safetensors *st,
                                     const struct adapter_load_hints *hints,
                                     struct adapter_errors *errors, struct error *err) {
    struct peft_load ld = {
        .path = path, .shape = shape, .config = config, .st = st, .hints = hints, .errors = errors};
    struct adapter *a = NULL;
    float *data;
    if (tensors_match(&ld, err)) goto out;
    if (adapter_invocation_check(&config->c, err)) {
        error_wrap(err, "adapter '%s'", path);
        goto out;
    }
    if (ld.n == 0) {
        error_set(err, ERR_MISMATCH, "adapter '%s' changes nothing", path);
        goto out;
    }
    data = try_calloc(adapter_param_count(shape, &config->c) + 1, sizeof *data, err);
    if (!data) goto out;
    a = adapter_alloc(shape, &config->c, data);
    if (tensors_read(&ld, a->data, err)) {
        adapter_release(a);
        a = NULL;
        goto out;
    }
    a->lineage = lineage_read(st->metadata);
    if (config->base) a->base = xstrdup(config->base);
    if (hints->hash)
        snprintf(a->hash, sizeof a->hash, "%s", hints->hash);
    else
        adapter_hash_compute(a);
out:
    free(ld.used);
    free(ld.wanted);
    free(ld.found);
    return a;
}

#define CONVERSION_COMMAND                                                                         \
    "python -c \"import torch; from safetensors.torch import save_file; "                          \
    "save_file(torch.load('" PICKLE_NAME                                                           \
    "', map_location='cpu', weights_only=True), '" PEFT_WEIGHTS_FILE                               \
    "', metadata={'format': 'pt'})\""

static int paths_check(const char *dir, const char *config, const char *tensors, const char *pickle,
                       struct error *err) {
    if (!path_exists(dir)) return error_set(err, ERR_MISSING, "adapter '%s' does not exist", dir);
    if (!path_is_dir(dir))
        return error_set(err, ERR_FORMAT, "adapter '%s' is not a directory", dir);
    if (!path_exists(config))
        return error_set(err, ERR_MISSING, "adapter '%s' has no " PEFT_CONFIG_FILE, dir);
    if (path_exists(tensors)) return OK;
    if (!path_exists(pickle))
        return error_set(err, ERR_MISSING, "adapter '%s' has no " PEFT_WEIGHTS_FILE, dir);
    return error_set(err, ERR_FORMAT,
                     "adapter '%s' has only " PICKLE_NAME ", a pickle, which can run code when "
                     "opened and is never read (convert it where you trust it: " CONVERSION_COMMAND
                     ")",
                     dir);
}

int peft_check(const char *dir, struct error *err) {
    char *config = path_join(dir, PEFT_CONFIG_FILE), *tensors = path_join(dir, PEFT_WEIGHTS_FILE);
    char *pickle = path_join(dir, PICKLE_NAME);
    int rc = paths_check(dir, config, tensors, pickle, err);
    free(config);
    free(tensors);
    free(pickle);
    return rc;
}

/*
 * An adapter of a multimodal model has "language_model." in the names of the language model's
 * tensors. Removes this from the names, and removes the vision tensors, because Shoal's model has
 * no vision part. Returns the prefix that the adapter's config has instead of "model." in module
 * names; NULL for an adapter of a text model.
 */
static const char *language_model_prefix_strip(struct safetensors *st) {
    static const char infix[] = "language_model.";
    const char *prefix = NULL;
    int kept = 0;
    for (int i = 0; i < st->n_tensors; i++) {
        struct tensor_info *t = &st->tensors[i];
        char *match = strstr(t->name, infix);
        const char *tail = match ? match + strlen(infix) : "";
        if (match && strncmp(tail, "lm_head", 7) != 0)
            prefix =
                strncmp(tail, "model.", 6) == 0 ? "language_model.model." : "model.language_model.";
        if (match) memmove(match, tail, strlen(tail) + 1);
        if (match ||
            !(strstr(t->name, "vision_tower.") || strstr(t->name, "multi_modal_projector.")))
            st->tensors[kept++] = *t;
        else
            free(t->name);
    }
    if (kept < st->n_tensors)
        log_info("%d tensors outside of the language model are skipped", st->n_tensors - kept);
    st->n_tensors = kept;
    if (kept > 1) qsort(st->tensors, (size_t)kept, sizeof *st->tensors, tensor_info_compare);
    return prefix;
}

struct adapter *peft_load(const char *dir, const struct model_config *shape,
                          const struct adapter_load_hints *hints, struct error *err) {
    struct adapter *a = NULL;
    if (hub_is_name(dir)) {
        char *pulled = hub_cached_path(dir, err);
        a = pulled ? peft_load(pulled, shape, hints, err) : NULL;
        free(pulled);
        return a;
    }
    struct peft_config config = {0};
    struct adapter_errors errors = {0};
    struct safetensors st = {0};
    char *config_path = path_join(dir, PEFT_CONFIG_FILE),
         *tensors_path = path_join(dir, PEFT_WEIGHTS_FILE);
    json_t *root = NULL;
    if (peft_check(dir, err)) goto out;
    if (!(root = json_parse_file(config_path, err))) goto out;
    if (safetensors_read(&st, tensors_path, err)) goto out;
    if (shape->arch->hf_names == HF_GEMMA) config.model_prefix = language_model_prefix_strip(&st);
    if (peft_config_read(root, shape, &config, &errors, err))
        error_wrap(err, "'%s'", config_path);
    else
        a = adapter_from_tensors(dir, shape, &config, &st, hints, &errors, err);
out:
    safetensors_close(&st);
    json_decref(root);
    buf_release(&errors.text);
    peft_config_release(&config);
    free(config_path);
    free(tensors_path);
    return a;
}

struct adapter *adapter_load(const char *dir, const struct model_config *shape, struct error *err) {
    struct adapter *a = peft_load(dir, shape, &(struct adapter_load_hints){0}, err);
    if (a) a->training_data = training_data_read(dir);
    return a;
}

int tensor_info_compare(const void *a, const void *b) {
    return strcmp(((const struct tensor_info *)a)->name, ((const struct tensor_info *)b)->name);
}

static int tensors_write(const struct adapter *a, const char *path, struct error *err) {
    int n;
    struct adapter_tensor *list = adapter_tensors(&a->shape, &a->config, &n);
    struct tensor_info *infos = xcalloc((size_t)n + 1, sizeof *infos);
    json_t *metadata = json_object();
    const float *src = a->data;
    for (int i = 0; i < n; i++) {
        size_t floats = adapter_tensor_floats(&list[i]);
        infos[i] = (struct tensor_info){.name = list[i].name,
                                        .type = TENSOR_F32,
                                        .n_dims = list[i].cols ? 2 : 1,
                                        .dims = {list[i].rows, list[i].cols},
                                        .data = src,
                                        .size = floats * sizeof *src};
        src += floats;
    }
    CHECK(src == a->data + a->n_data);
    qsort(infos, (size_t)n, sizeof *infos, tensor_info_compare);
    if (a->lineage) json_object_update(metadata, a->lineage);
    json_object_set_new(metadata, "format", json_string("pt"));
    int rc = safetensors_write(path, infos, n, metadata, err);
    free(infos);
    free(list);
    json_decref(metadata);
    return rc;
}

int adapter_save(const struct adapter *a, const char *dir, const char *base, struct error *err) {
    CHECK(a->data); // NULL after adapter_pack_only
    char *text = peft_config_text(a, base);
    if (!text) return error_set(err, ERR_USAGE, "the base's name is not UTF-8");
    char *tensors = path_join(dir, PEFT_WEIGHTS_FILE), *config = path_join(dir, PEFT_CONFIG_FILE);
    int rc = dir_make(dir, err);
    if (rc == OK) rc = training_data_write(a->training_data, dir, err);
    if (rc == OK) rc = tensors_write(a, tensors, err);
    if (rc == OK) rc = file_write(config, text, strlen(text), err);
    if (rc != OK) error_wrap(err, "saving adapter '%s'", dir);
    free(text);
    free(tensors);
    free(config);
    return rc;
}
