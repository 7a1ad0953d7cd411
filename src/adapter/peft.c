/*
 * peft: adapters as PEFT directories (adapter_config.json and adapter_model.safetensors).
 *
 * Reading is strict, because an adapter that half fits is worse than none: the config decides which
 * projections there must be, every one must be in the file with the right dimensions, and every
 * tensor of the file must be one of them. All offenders go into one message. Config keys that would
 * change the arithmetic in a way that Shoal does not compute are refused by name; other unknown
 * keys are tolerated, since PEFT itself adds some in every release. Pickles (adapter_model.bin) are
 * never opened.
 *
 * Writing is canonical: keys sorted, tensors sorted by name, mixed ranks and chosen layers
 * expressed in one way only. So what was loaded and saved once is saved to the same bytes for ever
 * after. Both files are replaced atomically, tensors first: a new adapter without its config is
 * refused, a config without its tensors as well.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "adapter/adapter.h"

#include <float.h>
#include <math.h>
#include <pcre2.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_NAME "adapter_config.json"
#define TENSORS_NAME "adapter_model.safetensors"
#define PICKLE_NAME "adapter_model.bin"
#define NAME_MAX_LEN 160

/* What PEFT calls the projection, and with `ab` its tensor in the file. Empty where the architecture
 * has no such projection. */
static void module_name(char out[NAME_MAX_LEN], const struct arch *a, int32_t layer, int p) {
    const char *path = proj_hf_path(a, (enum proj)p);
    out[0] = 0;
    if (path) snprintf(out, NAME_MAX_LEN, "%s.%d.%s", a->hf_layers, (int)layer, path);
}

static void tensor_name(char out[NAME_MAX_LEN], const struct arch *a, int32_t layer, int p, char ab,
                        const char *adapter) {
    char module[NAME_MAX_LEN];
    module_name(module, a, layer, p);
    snprintf(out, NAME_MAX_LEN, "base_model.model.%.110s.lora_%c.%sweight", module, ab, adapter);
}

/* The projection's own name, the end of its path. */
static const char *short_name(const struct arch *a, int p) {
    const char *path = proj_hf_path(a, (enum proj)p);
    return strrchr(path, '.') + 1;
}

/* A list for one message: as many as fit are shown, all are counted. */
#define OFFENDERS_TEXT 1500
struct offenders {
    struct buf text;
    int n, hidden;
};

__attribute__((format(printf, 2, 3))) static void offenders_add(struct offenders *o,
                                                                const char *fmt, ...) {
    char line[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    /* Names come from outside: no escape sequences for the terminal. */
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    o->n++;
    if (o->text.len + strlen(line) > OFFENDERS_TEXT)
        o->hidden++;
    else
        buf_printf(&o->text, "\n  %s", line);
}

static int offenders_report(struct offenders *o, const char *dir, struct error *err) {
    if (o->n == 0) return OK;
    if (o->hidden > 0) buf_printf(&o->text, "\n  and %d more", o->hidden);
    return error_set(err, ERR_MISMATCH, "adapter '%s' does not fit this model (%d problem%s):%s",
                     dir, o->n, o->n == 1 ? "" : "s", o->text.data);
}

/* Compiles a config's pattern; errors name the key. NULL on failure. */
static pcre2_code *pattern_compile(const char *pattern, uint32_t options, const char *key,
                                   struct error *err) {
    int code;
    PCRE2_SIZE at;
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, options, &code, &at, NULL);
    if (re) return re;
    PCRE2_UCHAR why[120];
    pcre2_get_error_message(code, why, sizeof why);
    error_set(err, ERR_FORMAT, "'%s' is not a valid pattern: '%.200s' (%s at offset %zu)", key,
              pattern, (char *)why, (size_t)at);
    return NULL;
}

/* 1 or 0; negative when the pattern runs away on a name. */
static int pattern_match(const pcre2_code *re, const char *name, const char *key,
                         struct error *err) {
    pcre2_match_data *md = pcre2_match_data_create_from_pattern(re, NULL);
    pcre2_match_context *mc = pcre2_match_context_create(NULL);
    CHECK(md && mc);
    pcre2_set_match_limit(mc, 100000);
    int rc = pcre2_match(re, (PCRE2_SPTR)name, PCRE2_ZERO_TERMINATED, 0, 0, md, mc);
    pcre2_match_context_free(mc);
    pcre2_match_data_free(md);
    if (rc >= 0) return 1;
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    return error_set(err, ERR_FORMAT, "the pattern in '%s' needs too many steps to match '%s'", key,
                     name);
}

/* target_modules or exclude_modules: a list of suffixes, a pattern for the whole name, or all. */
struct selector {
    const char *key;
    const json_t *list;
    pcre2_code *re;
    bool all;
};

static int selector_init(struct selector *s, const json_t *root, const char *key,
                         struct error *err) {
    const json_t *v = json_object_get(root, key);
    size_t i;
    json_t *item;
    *s = (struct selector){.key = key};
    if (!v || json_is_null(v)) return OK;
    if (json_is_string(v)) {
        s->all = strcmp(json_string_value(v), "all-linear") == 0;
        if (!s->all)
            s->re =
                pattern_compile(json_string_value(v), PCRE2_ANCHORED | PCRE2_ENDANCHORED, key, err);
        return s->all || s->re ? OK : err->code;
    }
    if (!json_is_array(v))
        return error_set(err, ERR_FORMAT, "'%s' is neither a list nor a string", key);
    json_array_foreach(v, i, item) {
        if (!json_is_string(item))
            return error_set(err, ERR_FORMAT, "'%s' holds something that is no string", key);
    }
    s->list = v;
    return OK;
}

static void selector_release(struct selector *s) {
    pcre2_code_free(s->re);
}

static bool selector_is_set(const struct selector *s) {
    return s->all || s->re || json_array_size(s->list) > 0;
}

/* The whole name, or its end after a dot. */
static bool suffix_match(const char *name, const char *suffix) {
    size_t n = strlen(name), k = strlen(suffix);
    if (k > n || strcmp(name + n - k, suffix) != 0) return false;
    return k == n || name[n - k - 1] == '.';
}

static int selector_match(const struct selector *s, const char *name, struct error *err) {
    size_t i;
    json_t *item;
    if (s->all) return 1;
    if (s->re) return pattern_match(s->re, name, s->key, err);
    json_array_foreach(s->list, i, item) {
        if (suffix_match(name, json_string_value(item))) return 1;
    }
    return 0;
}

/* rank_pattern or alpha_pattern: the first key that matches a module's name, whole or from a dot to
 * its end, gives its value. */
struct rule {
    pcre2_code *re;
    double value;
};
struct rules {
    const char *key;
    struct rule *v;
    int n;
};

static int rules_init(struct rules *r, const json_t *root, const char *key, struct error *err) {
    json_t *table = json_object_get(root, key), *value;
    const char *pattern;
    *r = (struct rules){.key = key};
    if (!table || json_is_null(table)) return OK;
    if (!json_is_object(table)) return error_set(err, ERR_FORMAT, "'%s' is not an object", key);
    r->v = xcalloc(json_object_size(table) + 1, sizeof *r->v);
    json_object_foreach(table, pattern, value) {
        if (!json_is_number(value))
            return error_set(err, ERR_FORMAT, "'%.80s' in '%s' is not a number", pattern, key);
        char *whole = xasprintf("(.*\\.)?(%s)$", pattern); /* PEFT's own form */
        r->v[r->n].value = json_number_value(value);
        r->v[r->n].re = pattern_compile(whole, PCRE2_ANCHORED, key, err);
        free(whole);
        if (!r->v[r->n].re) return err->code;
        r->n++;
    }
    return OK;
}

static void rules_release(struct rules *r) {
    for (int i = 0; i < r->n; i++) pcre2_code_free(r->v[i].re);
    free(r->v);
}

static int rules_apply(const struct rules *r, const char *name, double *value, struct error *err) {
    for (int i = 0; i < r->n; i++) {
        int hit = pattern_match(r->v[i].re, name, r->key, err);
        if (hit < 0) return hit;
        if (hit == 0) continue;
        *value = r->v[i].value;
        break;
    }
    return OK;
}

/* Keys that change what the adapter computes, unless they hold false, null, "none" or nothing. */
static const struct refusal {
    const char *key, *why;
} refusals[] = {
    {"use_dora", "DoRA is not supported; merge it or train plain LoRA"},
    {"use_qalora", "QA-LoRA is not supported"},
    {"use_bdlora", "block-diagonal LoRA is not supported"},
    {"lora_bias", "biases on lora_B are not supported"},
    {"bias", "only \"none\" is supported"},
    {"fan_in_fan_out", "it stands for transposed (GPT-2 style) weights"},
    {"modules_to_save", "fully trained modules are not supported"},
    {"trainable_token_indices", "trained token embeddings are not supported"},
    {"target_parameters", "only whole linear modules can be targets"},
    {"layer_replication", "the base's layers are used as they are"},
    {"alora_invocation_tokens", "activated LoRA is not supported"},
    {"arrow_config", "Arrow routing is not supported"},
};

static bool value_is_off(const json_t *v) {
    if (json_is_string(v))
        return json_string_length(v) == 0 || strcmp(json_string_value(v), "none") == 0;
    if (json_is_array(v)) return json_array_size(v) == 0;
    if (json_is_object(v)) return json_object_size(v) == 0;
    if (json_is_number(v)) return json_number_value(v) == 0;
    return !v || json_is_null(v) || json_is_false(v);
}

/* These initialisations also rewrite the base's weights, so the file alone does not say what the
 * model computes. */
static bool init_changes_base(const json_t *v) {
    static const char *const names[] = {"pissa", "olora", "corda", "loftq", "lora_ga"};
    const char *text = json_string_value(v);
    for (size_t i = 0; text && i < ARRAY_LEN(names); i++)
        if (strncmp(text, names[i], strlen(names[i])) == 0) return true;
    return false;
}

static int config_refuse(const json_t *root, struct error *err) {
    const json_t *type = json_object_get(root, "peft_type");
    if (!json_is_string(type)) return error_set(err, ERR_FORMAT, "'peft_type' is missing");
    if (strcmp(json_string_value(type), "LORA") != 0)
        return error_set(err, ERR_MISMATCH, "'peft_type' is '%.40s'; only 'LORA' is supported",
                         json_string_value(type));
    for (size_t i = 0; i < ARRAY_LEN(refusals); i++)
        if (!value_is_off(json_object_get(root, refusals[i].key)))
            return error_set(err, ERR_MISMATCH, "'%s' is set: %s", refusals[i].key,
                             refusals[i].why);
    const json_t *init = json_object_get(root, "init_lora_weights");
    if (init_changes_base(init))
        return error_set(err, ERR_MISMATCH,
                         "'init_lora_weights' is '%.40s', which changes the base as well (convert "
                         "with PEFT's save_pretrained, path_initial_model_for_weight_conversion)",
                         json_string_value(init));
    return OK;
}

static int number_read(const json_t *root, const char *key, double fallback, double *out,
                       struct error *err) {
    const json_t *v = json_object_get(root, key);
    *out = fallback;
    if (!v || json_is_null(v)) return OK;
    if (!json_is_number(v)) return error_set(err, ERR_FORMAT, "'%s' is not a number", key);
    *out = json_number_value(v);
    return OK;
}

static int rank_check(const char *key, double r, struct error *err) {
    if (r >= 1 && r <= ADAPTER_RANK_MAX && r == floor(r)) return OK;
    return error_set(err, ERR_FORMAT, "'%s' holds the rank %g, not a whole number from 1 to %d",
                     key, r, ADAPTER_RANK_MAX);
}

static int alpha_check(const char *key, double alpha, struct error *err) {
    if (fabs(alpha) <= FLT_MAX) return OK;
    return error_set(err, ERR_FORMAT, "'%s' holds %g, which is out of range", key, alpha);
}

/* r, lora_alpha, lora_dropout, use_rslora. */
static int scalars_read(const json_t *root, struct adapter_config *c, struct error *err) {
    const json_t *rs = json_object_get(root, "use_rslora");
    double r, alpha, dropout;
    if (number_read(root, "r", 8, &r, err) || rank_check("r", r, err)) return err->code;
    if (number_read(root, "lora_alpha", 8, &alpha, err) || alpha_check("lora_alpha", alpha, err))
        return err->code;
    if (number_read(root, "lora_dropout", 0, &dropout, err)) return err->code;
    if (!(dropout >= 0 && dropout <= 1))
        return error_set(err, ERR_FORMAT, "'lora_dropout' is %g, outside 0 to 1", dropout);
    if (rs && !json_is_boolean(rs) && !json_is_null(rs))
        return error_set(err, ERR_FORMAT, "'use_rslora' is neither true nor false");
    c->r = (int32_t)r;
    c->alpha = (float)alpha;
    c->dropout = (float)dropout;
    c->rslora = json_is_true(rs);
    return OK;
}

static int layer_mark(const json_t *v, int32_t n_layers, bool *on, struct error *err) {
    if (!json_is_integer(v))
        return error_set(err, ERR_FORMAT, "'layers_to_transform' holds something but integers");
    json_int_t i = json_integer_value(v);
    if (i < 0 || i >= n_layers)
        return error_set(err, ERR_MISMATCH,
                         "'layers_to_transform' names layer %lld of a model with %d layers",
                         (long long)i, (int)n_layers);
    on[i] = true;
    return OK;
}

/* on[L]: where list targets apply. Only the usual place of layer numbers ("layers.N", GPT-Neo's
 * "h.N") is known. */
static int layers_read(const json_t *root, const struct model_config *shape, bool *on,
                       struct error *err) {
    int32_t n_layers = shape->n_layers;
    const char *usual = strrchr(shape->arch->hf_layers, '.') + 1;
    const json_t *v = json_object_get(root, "layers_to_transform"),
                 *pattern = json_object_get(root, "layers_pattern");
    size_t i;
    json_t *item;
    bool every = !v || json_is_null(v) || (json_is_array(v) && json_array_size(v) == 0);
    for (int32_t l = 0; l < n_layers; l++) on[l] = every;
    if (every) return OK;
    if (json_is_string(json_object_get(root, "target_modules")))
        return error_set(err, ERR_FORMAT,
                         "'layers_to_transform' needs 'target_modules' to be a list");
    if (json_is_array(pattern) && json_array_size(pattern) == 1)
        pattern = json_array_get(pattern, 0);
    if (!value_is_off(pattern) &&
        !(json_is_string(pattern) && strcmp(json_string_value(pattern), usual) == 0))
        return error_set(err, ERR_MISMATCH, "'layers_pattern' is set: only \"%s\" is supported",
                         usual);
    if (!json_is_array(v)) return layer_mark(v, n_layers, on, err);
    json_array_foreach(v, i, item) {
        if (layer_mark(item, n_layers, on, err)) return err->code;
    }
    return OK;
}

/* Everything that decides whether a module is adapted, and how. */
struct plan {
    struct selector target, exclude;
    struct rules ranks, alphas;
    bool *layers; /* [L] */
};

static int plan_init(struct plan *pl, const json_t *root, const struct model_config *shape,
                     struct error *err) {
    pl->layers = xcalloc((size_t)shape->n_layers, sizeof *pl->layers);
    if (selector_init(&pl->target, root, "target_modules", err)) return err->code;
    if (!selector_is_set(&pl->target))
        return error_set(err, ERR_FORMAT, "'target_modules' is missing or empty");
    if (selector_init(&pl->exclude, root, "exclude_modules", err)) return err->code;
    if (rules_init(&pl->ranks, root, "rank_pattern", err)) return err->code;
    if (rules_init(&pl->alphas, root, "alpha_pattern", err)) return err->code;
    return layers_read(root, shape, pl->layers, err);
}

static void plan_release(struct plan *pl) {
    selector_release(&pl->target);
    selector_release(&pl->exclude);
    rules_release(&pl->ranks);
    rules_release(&pl->alphas);
    free(pl->layers);
}

/* Fills one module of the config; r stays 0 where it is not adapted. */
static int plan_module(const struct plan *pl, const struct adapter_config *c, const struct arch *a,
                       int32_t layer, int p, struct adapter_module *out, struct error *err) {
    char name[NAME_MAX_LEN];
    double r = c->r, alpha = c->alpha;
    module_name(name, a, layer, p);
    if (!name[0]) return OK;
    int in = selector_match(&pl->target, name, err);
    int ex = in > 0 ? selector_match(&pl->exclude, name, err) : 0;
    if (in < 0 || ex < 0) return err->code;
    if (!in || ex || !pl->layers[layer]) return OK;
    if (rules_apply(&pl->ranks, name, &r, err) || rank_check("rank_pattern", r, err))
        return err->code;
    if (rules_apply(&pl->alphas, name, &alpha, err) || alpha_check("alpha_pattern", alpha, err))
        return err->code;
    *out = (struct adapter_module){(int32_t)r, (float)alpha};
    return OK;
}

/* Listed targets that name nothing in this shape, as an adapter for another architecture has. */
static void targets_check(const struct selector *s, const struct model_config *shape,
                          struct offenders *bad) {
    size_t i;
    json_t *item;
    json_array_foreach(s->list, i, item) {
        bool hit = false;
        for (int32_t m = 0; m < shape->n_layers * N_PROJ && !hit; m++) {
            char name[NAME_MAX_LEN];
            module_name(name, shape->arch, m / N_PROJ, m % N_PROJ);
            hit = name[0] && suffix_match(name, json_string_value(item));
        }
        if (!hit)
            offenders_add(bad, "target module '%.80s' is no projection of it",
                          json_string_value(item));
    }
}

/* Fills c and modules [L][N_PROJ] from the parsed file. */
static int config_read(const json_t *root, const struct model_config *shape,
                       struct adapter_config *c, struct adapter_module *modules,
                       struct offenders *bad, struct error *err) {
    struct plan plan = {0};
    if (!json_is_object(root)) return error_set(err, ERR_FORMAT, "not a JSON object");
    if (config_refuse(root, err) || scalars_read(root, c, err)) return err->code;
    int rc = plan_init(&plan, root, shape, err), n = 0;
    for (int32_t i = 0; i < shape->n_layers * N_PROJ && rc == OK; i++) {
        rc = plan_module(&plan, c, shape->arch, i / N_PROJ, i % N_PROJ, &modules[i], err);
        n += modules[i].r > 0;
    }
    if (rc == OK) targets_check(&plan.target, shape, bad);
    if (rc == OK && n == 0 && bad->n == 0)
        offenders_add(bad, "'target_modules' selects no projection of it");
    plan_release(&plan);
    c->modules = modules;
    return rc;
}

struct loading {
    const char *dir;
    const struct model_config *shape;
    const struct adapter_config *config;
    struct safetensors st;
    bool *used;                       /* [n_tensors] */
    const struct tensor_info **found; /* [L][N_PROJ][2]: A, B */
    struct offenders bad;
};

/* The tensor under its own name, or with the adapter's name "default" left in it. */
static const struct tensor_info *tensor_find(struct loading *ld, int32_t layer, int p, char ab) {
    char plain[NAME_MAX_LEN], named[NAME_MAX_LEN];
    tensor_name(plain, ld->shape->arch, layer, p, ab, "");
    tensor_name(named, ld->shape->arch, layer, p, ab, "default.");
    const struct tensor_info *a = safetensors_find(&ld->st, plain);
    const struct tensor_info *b = safetensors_find(&ld->st, named);
    if (a) ld->used[a - ld->st.tensors] = true;
    if (b) ld->used[b - ld->st.tensors] = true;
    if (a && b) offenders_add(&ld->bad, "'%s' is there twice, with and without 'default'", plain);
    return a ? a : b;
}

static size_t element_size(enum tensor_type t) {
    return t == TENSOR_F32 ? 4 : t == TENSOR_F16 || t == TENSOR_BF16 ? 2 : 0;
}

static void tensor_check(struct loading *ld, const struct tensor_info *t, int64_t rows,
                         int64_t cols) {
    size_t size = element_size(t->type);
    if (t->n_dims != 2) {
        offenders_add(&ld->bad, "'%s' has %d dimensions, not 2", t->name, t->n_dims);
    } else if (t->dims[0] != rows || t->dims[1] != cols) {
        offenders_add(&ld->bad, "'%s' is [%lld, %lld], expected [%lld, %lld]", t->name,
                      (long long)t->dims[0], (long long)t->dims[1], (long long)rows,
                      (long long)cols);
    } else if (size == 0 || t->mask || t->size != size * (size_t)rows * (size_t)cols) {
        offenders_add(&ld->bad, "'%s' is of type %s, not F32, F16 or BF16", t->name,
                      t->mask ? "BOOL or U8" : tensor_type_name(t->type));
    }
}

static void tensor_match(struct loading *ld, int32_t layer, int p, char ab) {
    struct adapter_module m = adapter_module_at(ld->config, layer, p);
    const struct tensor_info *t = tensor_find(ld, layer, p, ab);
    int64_t in = proj_in(ld->shape, p), out = proj_out(ld->shape, p);
    char name[NAME_MAX_LEN];
    tensor_name(name, ld->shape->arch, layer, p, ab, "");
    if (m.r == 0 && t)
        offenders_add(&ld->bad, "'%s' is not among the targets of " CONFIG_NAME, t->name);
    if (m.r == 0) return;
    if (!t)
        offenders_add(&ld->bad, "'%s' is missing", name);
    else if (ab == 'A')
        tensor_check(ld, t, m.r, in);
    else
        tensor_check(ld, t, out, m.r);
    ld->found[(layer * N_PROJ + p) * 2 + (ab == 'B')] = t;
}

/* Every module against the file, then what in the file no module asked for. */
static int tensors_match(struct loading *ld, struct error *err) {
    int32_t n = ld->shape->n_layers * N_PROJ;
    ld->used = xcalloc((size_t)ld->st.n_tensors + 1, sizeof *ld->used);
    ld->found = xcalloc((size_t)n * 2, sizeof *ld->found);
    for (int32_t i = 0; i < n; i++) {
        tensor_match(ld, i / N_PROJ, i % N_PROJ, 'A');
        tensor_match(ld, i / N_PROJ, i % N_PROJ, 'B');
    }
    for (int i = 0; i < ld->st.n_tensors; i++)
        if (!ld->used[i])
            offenders_add(&ld->bad, "'%.160s' belongs to no projection of it",
                          ld->st.tensors[i].name);
    return offenders_report(&ld->bad, ld->dir, err);
}

/* Widens one tensor to f32 at `dst`; returns its number of values, 0 when one of them is no number.
 * The file's bytes may lie at any address, so narrow types pass through an aligned copy. */
static size_t tensor_widen(const struct tensor_info *t, float *dst) {
    size_t n = (size_t)t->dims[0] * (size_t)t->dims[1];
    if (t->type == TENSOR_F32) {
        memcpy(dst, t->data, t->size);
    } else {
        void *copy = xmalloc(t->size);
        memcpy(copy, t->data, t->size);
        tensor_to_f32(t->type, copy, dst, (int64_t)n);
        free(copy);
    }
    for (size_t i = 0; i < n; i++)
        if (!isfinite(dst[i])) return 0;
    return n;
}

static int tensors_read(const struct loading *ld, float *data, struct error *err) {
    for (int32_t i = 0; i < ld->shape->n_layers * N_PROJ * 2; i++) {
        if (!ld->found[i]) continue;
        size_t n = tensor_widen(ld->found[i], data);
        if (n == 0)
            return error_set(err, ERR_NUMERIC, "tensor '%s' of adapter '%s' holds NaN or Inf",
                             ld->found[i]->name, ld->dir);
        data += n;
    }
    return OK;
}

/* The safetensors metadata without what is PEFT's own; NULL when nothing is left. */
static json_t *lineage_read(const json_t *metadata) {
    json_t *lineage = metadata ? json_copy((json_t *)metadata) : NULL;
    if (lineage) json_object_del(lineage, "format");
    if (json_object_size(lineage) > 0) return lineage;
    json_decref(lineage);
    return NULL;
}

static struct adapter *adapter_from_tensors(struct loading *ld, struct error *err) {
    struct adapter *a = NULL;
    float *data = NULL;
    json_t *lineage = lineage_read(ld->st.metadata);
    if (tensors_match(ld, err)) goto out;
    data = xmalloc(adapter_floats(ld->shape, ld->config) * sizeof *data);
    if (tensors_read(ld, data, err)) goto out;
    a = adapter_from_data(ld->shape, ld->config, data, lineage);
out:
    json_decref(lineage);
    free(data);
    return a;
}

#define CONVERSION                                                                                 \
    "python -c \"import torch; from safetensors.torch import save_file; "                          \
    "save_file(torch.load('" PICKLE_NAME                                                           \
    "', map_location='cpu', weights_only=True), '" TENSORS_NAME "', metadata={'format': 'pt'})\""

/* OK, or the reason why this is no PEFT directory. */
static int paths_check(const char *dir, const char *config, const char *tensors, const char *pickle,
                       struct error *err) {
    if (!path_exists(dir)) return error_set(err, ERR_MISSING, "adapter '%s' does not exist", dir);
    if (!path_is_dir(dir))
        return error_set(err, ERR_FORMAT, "adapter '%s' is not a directory", dir);
    if (!path_exists(config))
        return error_set(err, ERR_MISSING, "adapter '%s' has no " CONFIG_NAME, dir);
    if (path_exists(tensors)) return OK;
    if (!path_exists(pickle))
        return error_set(err, ERR_MISSING, "adapter '%s' has no " TENSORS_NAME, dir);
    return error_set(err, ERR_FORMAT,
                     "adapter '%s' has only " PICKLE_NAME ", a pickle, which can run code when "
                     "opened and is never read (convert it where you trust it: " CONVERSION ")",
                     dir);
}

struct adapter *adapter_load(const char *dir, const struct model_config *shape, struct error *err) {
    struct adapter *a = NULL;
    struct adapter_config config = {0};
    struct loading ld = {.dir = dir, .shape = shape, .config = &config};
    struct adapter_module *modules = xcalloc((size_t)shape->n_layers * N_PROJ, sizeof *modules);
    char *config_path = path_join(dir, CONFIG_NAME), *tensors_path = path_join(dir, TENSORS_NAME);
    char *pickle_path = path_join(dir, PICKLE_NAME);
    json_t *root = NULL;
    if (paths_check(dir, config_path, tensors_path, pickle_path, err)) goto out;
    if (!(root = json_file(config_path, err))) goto out;
    if (config_read(root, shape, &config, modules, &ld.bad, err)) {
        error_wrap(err, "'%s'", config_path);
        goto out;
    }
    if (safetensors_open(&ld.st, tensors_path, err)) goto out;
    a = adapter_from_tensors(&ld, err);
    safetensors_close(&ld.st);
out:
    json_decref(root);
    free(ld.used);
    free(ld.found);
    buf_release(&ld.bad.text);
    free(modules);
    free(config_path);
    free(tensors_path);
    free(pickle_path);
    return a;
}

/* The shortest decimal that reads back as the same float32. */
static json_t *real_json(float f) {
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)f);
        if (strtof(text, NULL) == f) break;
    }
    return json_real(strtod(text, NULL));
}

static json_t *number_json(float f) {
    bool whole = f == truncf(f) && fabsf(f) < 1e9f && !(f == 0 && signbit(f));
    return whole ? json_integer((json_int_t)f) : real_json(f);
}

/* True when projection p has one (r, alpha) wherever it is adapted. */
static bool column_is_even(const struct adapter *a, int p) {
    struct adapter_module first = {0, 0};
    for (int32_t l = 0; l < a->shape.n_layers; l++) {
        struct adapter_module m = adapter_module_at(&a->config, l, p);
        if (m.r == 0) continue;
        if (first.r == 0) first = m;
        if (m.r != first.r || m.alpha != first.alpha) return false;
    }
    return true;
}

/* rank_pattern or alpha_pattern: what differs from the config's top; "q_proj" alone where that says
 * it for all layers. */
static json_t *pattern_json(const struct adapter *a, bool alpha) {
    json_t *out = json_object();
    for (int32_t i = 0; i < a->shape.n_layers * N_PROJ; i++) {
        struct adapter_module m = adapter_module_at(&a->config, i / N_PROJ, i % N_PROJ);
        bool same = alpha ? m.alpha == a->config.alpha : m.r == a->config.r;
        char name[NAME_MAX_LEN];
        if (m.r == 0 || same) continue;
        module_name(name, a->shape.arch, i / N_PROJ, i % N_PROJ);
        json_object_set_new(out,
                            column_is_even(a, i % N_PROJ) ? short_name(a->shape.arch, i % N_PROJ)
                                                          : name,
                            alpha ? number_json(m.alpha) : json_integer(m.r));
    }
    return out;
}

static bool layer_adapted(const struct adapter *a, int32_t l) {
    for (int p = 0; p < N_PROJ; p++)
        if (adapter_module_at(&a->config, l, p).r > 0) return true;
    return false;
}

/* True when the adapted modules are exactly (some layers) × (the targets). */
static bool layers_even(const struct adapter *a) {
    for (int32_t l = 0; l < a->shape.n_layers; l++)
        for (int p = 0; p < N_PROJ; p++)
            if ((adapter_module_at(&a->config, l, p).r > 0) !=
                (a->config.target[p] && layer_adapted(a, l)))
                return false;
    return true;
}

static json_t *layers_json(const struct adapter *a) {
    json_t *out = json_array();
    for (int32_t l = 0; l < a->shape.n_layers; l++)
        if (layer_adapted(a, l)) json_array_append_new(out, json_integer(l));
    bool some = layers_even(a) && json_array_size(out) < (size_t)a->shape.n_layers;
    if (some) return out;
    json_decref(out);
    return json_null();
}

static int text_compare(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Short names, or every module by its full name where the layers differ in their targets. Sorted,
 * because PEFT holds a set. */
static json_t *targets_json(const struct adapter *a) {
    struct strings names = {0};
    char full[NAME_MAX_LEN];
    bool even = layers_even(a);
    for (int p = 0; p < N_PROJ && even; p++)
        if (a->config.target[p]) strings_add(&names, short_name(a->shape.arch, p));
    for (int32_t i = 0; i < a->shape.n_layers * N_PROJ && !even; i++) {
        if (adapter_module_at(&a->config, i / N_PROJ, i % N_PROJ).r == 0) continue;
        module_name(full, a->shape.arch, i / N_PROJ, i % N_PROJ);
        strings_add(&names, full);
    }
    qsort(names.v, (size_t)names.n, sizeof *names.v, text_compare);
    json_t *out = json_array();
    for (int i = 0; i < names.n; i++) json_array_append_new(out, json_string(names.v[i]));
    strings_release(&names);
    return out;
}

/* The bytes of adapter_config.json, malloc'ed; NULL when `base` is not UTF-8. */
static char *config_text(const struct adapter *a, const char *base) {
    const struct adapter_config *c = &a->config;
    json_t *name = base ? json_string(base) : json_null();
    if (!name) return NULL;
    json_t *o =
        json_pack("{s:o, s:n, s:o, s:s, s:n, s:b, s:b, s:b, s:n, s:o, s:o, s:o, s:n, s:s, s:i, "
                  "s:o, s:n, s:o, s:s, s:b, s:b}",
                  "alpha_pattern", pattern_json(a, true), "auto_mapping", "base_model_name_or_path",
                  name, "bias", "none", "exclude_modules", "fan_in_fan_out", 0, "inference_mode", 1,
                  "init_lora_weights", 1, "layers_pattern", "layers_to_transform", layers_json(a),
                  "lora_alpha", number_json(c->alpha), "lora_dropout", real_json(c->dropout),
                  "modules_to_save", "peft_type", "LORA", "r", (int)c->r, "rank_pattern",
                  pattern_json(a, false), "revision", "target_modules", targets_json(a),
                  "task_type", "CAUSAL_LM", "use_dora", 0, "use_rslora", (int)c->rslora);
    CHECK(o);
    char *text =
        json_dumps(o, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(9));
    CHECK(text);
    json_decref(o);
    return text;
}

static int info_compare(const void *a, const void *b) {
    return strcmp(((const struct tensor_info *)a)->name, ((const struct tensor_info *)b)->name);
}

static struct tensor_info info_make(const struct arch *a, int32_t i, char ab, const float *data,
                                    int64_t rows, int64_t cols) {
    char name[NAME_MAX_LEN];
    tensor_name(name, a, i / N_PROJ, i % N_PROJ, ab, "");
    return (struct tensor_info){.name = xstrdup(name),
                                .type = TENSOR_F32,
                                .n_dims = 2,
                                .dims = {rows, cols},
                                .data = data,
                                .size = (size_t)(rows * cols) * sizeof *data};
}

static int tensors_write(const struct adapter *a, const char *path, struct error *err) {
    int32_t n_modules = a->shape.n_layers * N_PROJ;
    struct tensor_info *infos = xcalloc((size_t)n_modules * 2, sizeof *infos);
    json_t *metadata = json_object();
    int n = 0;
    for (int32_t i = 0; i < n_modules; i++) {
        const struct lora *lo = &a->loras[i];
        if (lo->r == 0) continue;
        infos[n++] = info_make(a->shape.arch, i, 'A', lo->a, lo->r, proj_in(&a->shape, i % N_PROJ));
        infos[n++] = info_make(a->shape.arch, i, 'B', lo->b, proj_out(&a->shape, i % N_PROJ), lo->r);
    }
    qsort(infos, (size_t)n, sizeof *infos, info_compare);
    if (a->lineage) json_object_update(metadata, a->lineage);
    json_object_set_new(metadata, "format", json_string("pt"));
    int rc = safetensors_write(path, infos, n, metadata, err);
    for (int i = 0; i < n; i++) free(infos[i].name);
    free(infos);
    json_decref(metadata);
    return rc;
}

int adapter_save(const struct adapter *a, const char *dir, const char *base, struct error *err) {
    char *text = config_text(a, base);
    if (!text) return error_set(err, ERR_USAGE, "the base's name is not UTF-8");
    char *tensors = path_join(dir, TENSORS_NAME), *config = path_join(dir, CONFIG_NAME);
    int rc = dir_make(dir, err);
    if (rc == OK) rc = tensors_write(a, tensors, err);
    if (rc == OK) rc = file_write(config, text, strlen(text), err);
    if (rc != OK) error_wrap(err, "saving adapter '%s'", dir);
    free(text);
    free(tensors);
    free(config);
    return rc;
}
