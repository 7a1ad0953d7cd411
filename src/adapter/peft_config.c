/*
 * peft_config: reads and writes adapter_config.json.
 *
 * The file is untrusted, so every pattern in it is matched by PCRE2 under a step limit and every
 * number is checked. Keys that would change the result in a way that Shoal does not support are
 * refused by name. Other unknown keys are ignored, because PEFT adds new ones in each release.
 * Modules are selected as in PEFT: a list has suffixes of module names, a string is a pattern for
 * the whole name, and "all-linear" selects every projection of the layers.
 *
 * Writing is canonical: keys are sorted, and equal ranks and layers are always written in the same
 * form.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "adapter/internal.h"

#include <float.h>
#include <math.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

void peft_module_name(char out[NAME_MAX_LEN], const struct arch *arch, int32_t module) {
    const char *path = module >= 0 ? proj_hf_path(arch, (enum proj)(module % N_PROJ)) : NULL;
    if (module == MODULE_EMBED)
        snprintf(out, NAME_MAX_LEN, "%s", arch->hf_embed);
    else if (module == MODULE_HEAD)
        snprintf(out, NAME_MAX_LEN, "lm_head");
    else if (path)
        snprintf(out, NAME_MAX_LEN, "%s.%d.%s", arch->hf_layers, (int)(module / N_PROJ), path);
    else
        out[0] = 0;
}

/* The last component of a dotted name: "q_proj", "embed_tokens". */
static const char *last_component(const char *name) {
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* Compiles a pattern from the config's `key`. NULL after an error. */
static pcre2_code *pattern_compile(const char *pattern, uint32_t options, const char *key,
                                   struct error *err) {
    int code;
    PCRE2_SIZE offset;
    pcre2_code *re =
        pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, options, &code, &offset, NULL);
    if (re) return re;
    PCRE2_UCHAR why[120];
    pcre2_get_error_message(code, why, sizeof why);
    error_set(err, ERR_FORMAT, "'%s' is not a valid pattern: '%.200s' (%s at offset %zu)", key,
              pattern, (char *)why, (size_t)offset);
    return NULL;
}

/* 1: the pattern matches; 0: it does not; an error code: it exceeds the step limit. */
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

/* target_modules or exclude_modules: a list of suffixes, a pattern for the whole name, or
 * "all-linear". */
struct module_selector {
    const char *key;
    const json_t *list;
    pcre2_code *re;
    bool all;
};

static int selector_init(struct module_selector *s, const json_t *root, const char *key,
                         struct error *err) {
    const json_t *v = json_object_get(root, key);
    size_t i;
    json_t *item;
    *s = (struct module_selector){.key = key};
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
    json_array_foreach (v, i, item) {
        if (!json_is_string(item))
            return error_set(err, ERR_FORMAT, "'%s' holds an item that is not a string", key);
    }
    s->list = v;
    return OK;
}

static void selector_release(struct module_selector *s) {
    pcre2_code_free(s->re);
}

static bool selector_is_set(const struct module_selector *s) {
    return s->all || s->re || json_array_size(s->list) > 0;
}

/* True if `suffix` is the whole name or follows a dot in it. */
static bool suffix_match(const char *name, const char *suffix) {
    size_t n = strlen(name), k = strlen(suffix);
    if (k > n || strcmp(name + n - k, suffix) != 0) return false;
    return k == n || name[n - k - 1] == '.';
}

static int selector_match(const struct module_selector *s, const char *name, struct error *err) {
    size_t i;
    json_t *item;
    if (s->all) return 1;
    if (s->re) return pattern_match(s->re, name, s->key, err);
    json_array_foreach (s->list, i, item) {
        if (suffix_match(name, json_string_value(item))) return 1;
    }
    return 0;
}

/* rank_pattern or alpha_pattern: patterns with values. A pattern must match a module's whole name
 * or all of it after a dot. The first pattern that matches gives the value. */
struct pattern_rule {
    pcre2_code *re;
    double value;
};
struct pattern_rules {
    const char *key;
    struct pattern_rule *v;
    int n;
};

static int rules_init(struct pattern_rules *r, const json_t *root, const char *key,
                      struct error *err) {
    json_t *table = json_object_get(root, key), *value;
    const char *pattern;
    *r = (struct pattern_rules){.key = key};
    if (!table || json_is_null(table)) return OK;
    if (!json_is_object(table)) return error_set(err, ERR_FORMAT, "'%s' is not an object", key);
    r->v = xcalloc(json_object_size(table) + 1, sizeof *r->v);
    json_object_foreach (table, pattern, value) {
        if (!json_is_number(value))
            return error_set(err, ERR_FORMAT, "'%.80s' in '%s' is not a number", pattern, key);
        char *whole = xasprintf("(.*\\.)?(%s)$", pattern); /* as in PEFT */
        r->v[r->n].value = json_number_value(value);
        r->v[r->n].re = pattern_compile(whole, PCRE2_ANCHORED, key, err);
        free(whole);
        if (!r->v[r->n].re) return err->code;
        r->n++;
    }
    return OK;
}

static void rules_release(struct pattern_rules *r) {
    for (int i = 0; i < r->n; i++) pcre2_code_free(r->v[i].re);
    free(r->v);
}

static int rules_apply(const struct pattern_rules *r, const char *name, double *value,
                       struct error *err) {
    for (int i = 0; i < r->n; i++) {
        int hit = pattern_match(r->v[i].re, name, r->key, err);
        if (hit < 0) return hit;
        if (hit == 0) continue;
        *value = r->v[i].value;
        break;
    }
    return OK;
}

/* Keys that change the adapter's output unless they are false, null, "none", 0 or empty. */
static const struct unsupported_key {
    const char *key, *why;
} unsupported_keys[] = {
    {"use_qalora", "QA-LoRA is not supported"},
    {"use_bdlora", "block-diagonal LoRA is not supported"},
    {"lora_bias", "biases on lora_B are not supported"},
    {"bias", "only \"none\" is supported"},
    {"fan_in_fan_out", "transposed (GPT-2 style) weights are not supported"},
    {"target_parameters", "only whole linear modules can be targets"},
    {"layer_replication", "the base's layers are used as they are"},
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

/* These initialisations also rewrite the base's weights, so the file alone does not determine the
 * model's output. */
static bool init_changes_base(const json_t *v) {
    static const char *const names[] = {"pissa", "olora", "corda", "loftq", "lora_ga"};
    const char *text = json_string_value(v);
    for (size_t i = 0; text && i < ARRAY_LEN(names); i++)
        if (strncmp(text, names[i], strlen(names[i])) == 0) return true;
    return false;
}

/* Refuses a config with a setting that changes the result and is not supported. */
static int config_check_supported(const json_t *root, struct error *err) {
    const json_t *type = json_object_get(root, "peft_type");
    if (!json_is_string(type)) return error_set(err, ERR_FORMAT, "'peft_type' is missing");
    if (strcmp(json_string_value(type), "LORA") != 0)
        return error_set(err, ERR_MISMATCH, "'peft_type' is '%.40s'; only 'LORA' is supported",
                         json_string_value(type));
    for (size_t i = 0; i < ARRAY_LEN(unsupported_keys); i++)
        if (!value_is_off(json_object_get(root, unsupported_keys[i].key)))
            return error_set(err, ERR_MISMATCH, "'%s' is set: %s", unsupported_keys[i].key,
                             unsupported_keys[i].why);
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

static int flag_read(const json_t *root, const char *key, bool *out, struct error *err) {
    const json_t *v = json_object_get(root, key);
    if (v && !json_is_boolean(v) && !json_is_null(v))
        return error_set(err, ERR_FORMAT, "'%s' is neither true nor false", key);
    *out = json_is_true(v);
    return OK;
}

/* r, lora_alpha, lora_dropout, use_rslora, use_dora. */
static int scalars_read(const json_t *root, struct adapter_config *c, struct error *err) {
    double r, alpha, dropout;
    if (number_read(root, "r", 8, &r, err) || rank_check("r", r, err)) return err->code;
    if (number_read(root, "lora_alpha", 8, &alpha, err) || alpha_check("lora_alpha", alpha, err))
        return err->code;
    if (number_read(root, "lora_dropout", 0, &dropout, err)) return err->code;
    if (!(dropout >= 0 && dropout <= 1))
        return error_set(err, ERR_FORMAT, "'lora_dropout' is %g, outside 0 to 1", dropout);
    c->r = (int32_t)r;
    c->alpha = (float)alpha;
    c->dropout = (float)dropout;
    if (flag_read(root, "use_rslora", &c->rslora, err)) return err->code;
    return flag_read(root, "use_dora", &c->dora, err);
}

static int layer_select(const json_t *v, int32_t n_layers, bool *selected, struct error *err) {
    if (!json_is_integer(v))
        return error_set(err, ERR_FORMAT, "'layers_to_transform' holds something but integers");
    json_int_t i = json_integer_value(v);
    if (i < 0 || i >= n_layers)
        return error_set(err, ERR_MISMATCH,
                         "'layers_to_transform' names layer %lld of a model with %d layers",
                         (long long)i, (int)n_layers);
    selected[i] = true;
    return OK;
}

static bool layers_are_all(const json_t *v) {
    return !v || json_is_null(v) || (json_is_array(v) && json_array_size(v) == 0);
}

/* True when layers_pattern is not set, is `standard`, or is a list with `standard`. `standard` is
 * the name before the layer numbers in this architecture. */
static bool layers_pattern_is_standard(const json_t *pattern, const char *standard) {
    size_t i;
    json_t *item;
    json_array_foreach (pattern, i, item) {
        if (json_is_string(item) && strcmp(json_string_value(item), standard) == 0) return true;
    }
    return value_is_off(pattern) ||
           (json_is_string(pattern) && strcmp(json_string_value(pattern), standard) == 0);
}

/* Fills selected[L] from layers_to_transform. As layers_pattern, only the architecture's own name
 * of the layers is supported ("layers", GPT-Neo's "h"). */
static int layers_read(const json_t *root, const struct model_config *shape, bool *selected,
                       struct error *err) {
    const char *standard = last_component(shape->arch->hf_layers);
    int32_t n_layers = shape->n_layers;
    const json_t *v = json_object_get(root, "layers_to_transform"),
                 *pattern = json_object_get(root, "layers_pattern");
    size_t i;
    json_t *item;
    bool all = layers_are_all(v);
    for (int32_t l = 0; l < n_layers; l++) selected[l] = all;
    if (all) return OK;
    if (json_is_string(json_object_get(root, "target_modules")))
        return error_set(err, ERR_FORMAT,
                         "'layers_to_transform' needs 'target_modules' to be a list");
    if (!layers_pattern_is_standard(pattern, standard))
        return error_set(err, ERR_MISMATCH, "'layers_pattern' is set: only \"%s\" is supported",
                         standard);
    if (!json_is_array(v)) return layer_select(v, n_layers, selected, err);
    json_array_foreach (v, i, item) {
        if (layer_select(item, n_layers, selected, err)) return err->code;
    }
    return OK;
}

/* The settings that decide which modules are adapted, with which rank and alpha. */
struct peft_target_rules {
    const struct arch *arch;
    const char *model_prefix; /* as in struct peft_config */
    struct module_selector target, exclude;
    struct pattern_rules ranks, alphas;
    bool *layers;          /* [L] */
    bool all_layers;       /* layers_to_transform is not set; if false, embedding and head cannot be
                              targets */
    bool targets_required; /* target_modules must not be empty, because the adapter has no
                              replacement table or rows */
};

static int target_rules_init(struct peft_target_rules *rules, const json_t *root,
                             const struct model_config *shape, struct error *err) {
    rules->layers = xcalloc((size_t)shape->n_layers, sizeof *rules->layers);
    if (selector_init(&rules->target, root, "target_modules", err)) return err->code;
    rules->all_layers = layers_are_all(json_object_get(root, "layers_to_transform"));
    if (!selector_is_set(&rules->target) && rules->targets_required)
        return error_set(err, ERR_FORMAT, "'target_modules' is missing or empty");
    if (selector_init(&rules->exclude, root, "exclude_modules", err)) return err->code;
    if (rules_init(&rules->ranks, root, "rank_pattern", err)) return err->code;
    if (rules_init(&rules->alphas, root, "alpha_pattern", err)) return err->code;
    return layers_read(root, shape, rules->layers, err);
}

static void target_rules_release(struct peft_target_rules *rules) {
    selector_release(&rules->target);
    selector_release(&rules->exclude);
    rules_release(&rules->ranks);
    rules_release(&rules->alphas);
    free(rules->layers);
}

/* Embedding and head are not in a layer: "all-linear" does not select them, nor does a config with
 * layers_to_transform. */
static bool module_is_selectable(const struct peft_target_rules *rules, int32_t module) {
    return module >= 0 ? rules->layers[module / N_PROJ] : rules->all_layers && !rules->target.all;
}

/* The module's name as it appears in the config. */
static void config_module_name(char out[NAME_MAX_LEN], const struct peft_target_rules *rules,
                               int32_t module) {
    static const char text_prefix[] = "model.";
    char name[NAME_MAX_LEN];
    peft_module_name(name, rules->arch, module);
    bool replaced = rules->model_prefix && strncmp(name, text_prefix, strlen(text_prefix)) == 0;
    snprintf(out, NAME_MAX_LEN, "%s%.110s", replaced ? rules->model_prefix : "",
             name + (replaced ? strlen(text_prefix) : 0));
}

/* Sets rank and alpha of one module; leaves r = 0 if it is not adapted. */
static int target_rules_apply(const struct peft_target_rules *rules, const struct adapter_config *c,
                              int32_t module, struct adapter_module *out, struct error *err) {
    char name[NAME_MAX_LEN];
    double r = c->r, alpha = c->alpha;
    config_module_name(name, rules, module);
    if (!name[0]) return OK;
    int included = selector_match(&rules->target, name, err);
    int excluded = included > 0 ? selector_match(&rules->exclude, name, err) : 0;
    if (included < 0 || excluded < 0) return err->code;
    if (!included || excluded || !module_is_selectable(rules, module)) return OK;
    if (rules_apply(&rules->ranks, name, &r, err) || rank_check("rank_pattern", r, err))
        return err->code;
    if (rules_apply(&rules->alphas, name, &alpha, err) || alpha_check("alpha_pattern", alpha, err))
        return err->code;
    *out = (struct adapter_module){(int32_t)r, (float)alpha};
    return OK;
}

/* Reports listed targets that match no module of this shape; usually the adapter is for another
 * architecture. */
static void targets_check(const struct peft_target_rules *rules, int32_t n_layers,
                          struct adapter_errors *errors) {
    size_t i;
    json_t *item;
    json_array_foreach (rules->target.list, i, item) {
        bool hit = false;
        for (int32_t m = MODULE_HEAD; m < n_layers * N_PROJ && !hit; m++) {
            char name[NAME_MAX_LEN];
            config_module_name(name, rules, m);
            hit = name[0] && suffix_match(name, json_string_value(item));
        }
        if (!hit)
            adapter_errors_add(errors, "target module '%.80s' is not a projection of it",
                               json_string_value(item));
    }
}

/* The embedding or head with this module name, or NULL. */
static struct adapter_vocab_config *table_by_name(struct adapter_config *c, const struct arch *arch,
                                                  const char *name) {
    if (suffix_match(arch->hf_embed, name)) return &c->embed;
    return suffix_match("lm_head", name) ? &c->head : NULL;
}

static int modules_to_save_read(const json_t *root, const struct arch *arch,
                                struct adapter_config *c, struct error *err) {
    const json_t *v = json_object_get(root, "modules_to_save");
    size_t i;
    json_t *item;
    if (value_is_off(v)) return OK;
    if (!json_is_array(v)) return error_set(err, ERR_FORMAT, "'modules_to_save' is not a list");
    json_array_foreach (v, i, item) {
        const char *name = json_string_value(item);
        struct adapter_vocab_config *t = name ? table_by_name(c, arch, name) : NULL;
        if (!t)
            return error_set(err, ERR_MISMATCH,
                             "'modules_to_save' is set: '%.80s' in it is neither %s nor lm_head, "
                             "and only they can be replaced",
                             name ? name : "?", last_component(arch->hf_embed));
        t->full = true;
    }
    return OK;
}

struct peft_token {
    int32_t id, row; /* row: in the file's tensor */
};

static int token_compare(const void *a, const void *b) {
    const struct peft_token *x = a, *y = b;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Parses a list of token ids. The file has the rows in the order of this list. t->ids is sorted,
 * and (*order)[i] is the row in the file of t->ids[i]. */
static int trainable_tokens_parse(const json_t *list, int32_t vocab, struct adapter_vocab_config *t,
                                  const int32_t **order, struct arena *arena, struct error *err) {
    size_t i, n = json_array_size(list);
    json_t *item;
    struct peft_token *v = arena_alloc(arena, (n + 1) * sizeof *v);
    int32_t *ids = arena_alloc(arena, (n + 1) * sizeof *ids),
            *rows = arena_alloc(arena, (n + 1) * sizeof *rows);
    if (!json_is_array(list))
        return error_set(err, ERR_FORMAT, "'trainable_token_indices' is not a list of numbers");
    json_array_foreach (list, i, item) {
        json_int_t id = json_integer_value(item);
        if (!json_is_integer(item) || id < 0 || id >= vocab)
            return error_set(err, ERR_MISMATCH,
                             "'trainable_token_indices' holds something but ids from 0 to %d",
                             (int)vocab - 1);
        v[i] = (struct peft_token){(int32_t)id, (int32_t)i};
    }
    if (n > 1) qsort(v, n, sizeof *v, token_compare);
    for (i = 0; i < n; i++) {
        if (i > 0 && v[i].id == v[i - 1].id)
            return error_set(err, ERR_FORMAT, "'trainable_token_indices' names token %d twice",
                             (int)v[i].id);
        ids[i] = v[i].id;
        rows[i] = v[i].row;
    }
    t->n_ids = (int32_t)n;
    t->ids = ids;
    *order = rows;
    return OK;
}

static int trainable_tokens_read(const json_t *root, const struct model_config *shape,
                                 struct peft_config *p, struct error *err) {
    json_t *v = json_object_get(root, "trainable_token_indices"), *list;
    const char *name;
    if (value_is_off(v)) return OK;
    if (!json_is_object(v))
        return trainable_tokens_parse(v, shape->vocab_size, &p->c.embed, &p->row_order[0],
                                      &p->arena, err);
    json_object_foreach (v, name, list) {
        struct adapter_vocab_config *t = table_by_name(&p->c, shape->arch, name);
        if (!t || t->n_ids)
            return error_set(err, ERR_MISMATCH,
                             "'trainable_token_indices' names '%.80s'; %s and lm_head, each once, "
                             "can have such rows",
                             name, last_component(shape->arch->hf_embed));
        int rc = trainable_tokens_parse(list, shape->vocab_size, t, &p->row_order[t == &p->c.head],
                                        &p->arena, err);
        if (rc) return rc;
    }
    return OK;
}

int peft_invocation_parse(const json_t *list, const char *key, const struct model_config *shape,
                          struct peft_config *p, struct error *err) {
    size_t i, n = json_array_size(list);
    const json_t *item;
    if (n < 1 || n > ADAPTER_INVOCATION_MAX)
        return error_set(err, ERR_FORMAT, "'%s' is not a list of 1 to %d token ids", key,
                         ADAPTER_INVOCATION_MAX);
    int32_t *ids = arena_alloc(&p->arena, n * sizeof *ids);
    json_array_foreach (list, i, item) {
        json_int_t id = json_integer_value(item);
        if (!json_is_integer(item) || id < 0 || id >= shape->vocab_size)
            return error_set(err, ERR_MISMATCH, "'%s' holds something but ids from 0 to %d", key,
                             (int)shape->vocab_size - 1);
        ids[i] = (int32_t)id;
    }
    p->c.invocation = ids;
    p->c.n_invocation = (int32_t)n;
    return OK;
}

/* Adapters of the package alora, from which PEFT's activated LoRA comes, have a text instead of
 * token ids. Without the ids, such an adapter would apply to all tokens. */
static int invocation_read(const json_t *root, const struct model_config *shape,
                           struct peft_config *p, struct error *err) {
    const json_t *list = json_object_get(root, "alora_invocation_tokens");
    if (list && !json_is_null(list))
        return peft_invocation_parse(list, "alora_invocation_tokens", shape, p, err);
    if (value_is_off(json_object_get(root, "invocation_string"))) return OK;
    return error_set(err, ERR_MISMATCH,
                     "'invocation_string' is set, but not 'alora_invocation_tokens' (add the list "
                     "of the token ids of this text)");
}

/* Refuses combinations that PEFT does not define or that Shoal does not support. */
static int tables_check(const struct peft_config *p, const struct model_config *shape,
                        struct error *err) {
    const struct adapter_vocab_config *tables[] = {&p->c.embed, &p->c.head};
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "lm_head" : last_component(shape->arch->hf_embed);
        const struct adapter_vocab_config *t = tables[i];
        if ((t->lora.r > 0) + t->full + (t->n_ids > 0) > 1)
            return error_set(err, ERR_MISMATCH,
                             "'%s' is in more than one of target_modules, modules_to_save and "
                             "trainable_token_indices",
                             name);
    }
    if (p->c.dora && p->c.embed.lora.r > 0)
        return error_set(err, ERR_MISMATCH,
                         "'use_dora' is set: on 'embed_tokens', an embedding, it is not supported");
    if (p->tie_weights && shape->tied && (p->c.embed.lora.r > 0 || p->c.head.lora.r > 0))
        return error_set(err, ERR_MISMATCH,
                         "'ensure_weight_tying' is set: low-rank parts shared by embedding and "
                         "head are not supported");
    return OK;
}

/* Applies the rules to every module: sets c->modules and the low-rank parts of embedding and head.
 */
static int target_rules_run(const struct peft_target_rules *rules, struct peft_config *p,
                            int32_t n_layers, struct adapter_errors *errors, struct error *err) {
    struct adapter_config *c = &p->c;
    struct adapter_module *modules =
        arena_alloc(&p->arena, (size_t)n_layers * N_PROJ * sizeof *modules);
    int n = 0;
    for (int32_t i = 0; i < n_layers * N_PROJ; i++) {
        if (target_rules_apply(rules, c, i, &modules[i], err)) return err->code;
        n += modules[i].r > 0;
    }
    c->modules = modules;
    if (target_rules_apply(rules, c, MODULE_EMBED, &c->embed.lora, err)) return err->code;
    if (target_rules_apply(rules, c, MODULE_HEAD, &c->head.lora, err)) return err->code;
    targets_check(rules, n_layers, errors);
    if (n + c->embed.lora.r + c->head.lora.r == 0 && rules->targets_required && errors->n == 0)
        adapter_errors_add(errors, "'target_modules' selects no projection of it");
    return OK;
}

int peft_config_read(const json_t *root, const struct model_config *shape, struct peft_config *out,
                     struct adapter_errors *errors, struct error *err) {
    struct adapter_config *c = &out->c;
    struct peft_target_rules rules = {.arch = shape->arch, .model_prefix = out->model_prefix};
    if (!json_is_object(root)) return error_set(err, ERR_FORMAT, "not a JSON object");
    if (config_check_supported(root, err) || scalars_read(root, c, err)) return err->code;
    if (modules_to_save_read(root, shape->arch, c, err) ||
        trainable_tokens_read(root, shape, out, err) || invocation_read(root, shape, out, err))
        return err->code;
    if (flag_read(root, "ensure_weight_tying", &out->tie_weights, err)) return err->code;
    const char *base = json_string_value(json_object_get(root, "base_model_name_or_path"));
    out->base = base ? arena_strdup(&out->arena, base) : NULL;
    rules.targets_required = !c->embed.full && !c->head.full && !c->embed.n_ids && !c->head.n_ids;
    int rc = target_rules_init(&rules, root, shape, err);
    if (rc == OK) rc = target_rules_run(&rules, out, shape->n_layers, errors, err);
    if (rc == OK) rc = tables_check(out, shape, err);
    target_rules_release(&rules);
    return rc;
}

void peft_config_release(struct peft_config *p) {
    arena_release(&p->arena);
}

/* The shortest decimal number that parses as the same float32. */
static json_t *shortest_real_json(float f) {
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)f);
        if (strtof(text, NULL) == f) break;
    }
    return json_real(strtod(text, NULL));
}

static json_t *number_json(float f) {
    bool whole = f == truncf(f) && fabsf(f) < 1e9f && !(f == 0 && signbit(f));
    return whole ? json_integer((json_int_t)f) : shortest_real_json(f);
}

/* True when projection p has the same (r, alpha) in all layers that adapt it. */
static bool proj_is_uniform(const struct adapter *a, int p) {
    struct adapter_module first = {0, 0};
    for (int32_t l = 0; l < a->shape.n_layers; l++) {
        struct adapter_module m = adapter_module_at(&a->config, l, p);
        if (m.r == 0) continue;
        if (first.r == 0) first = m;
        if (m.r != first.r || m.alpha != first.alpha) return false;
    }
    return true;
}

static void pattern_add_table(const struct adapter *a, bool alpha, const char *name,
                              struct adapter_module m, json_t *out) {
    bool same = alpha ? m.alpha == a->config.alpha : m.r == a->config.r;
    if (m.r > 0 && !same)
        json_object_set_new(out, name, alpha ? number_json(m.alpha) : json_integer(m.r));
}

/* rank_pattern or alpha_pattern: the modules that differ from the config's r or lora_alpha. The key
 * is the projection's name ("q_proj") if rank and alpha are equal in all layers that adapt it, else
 * the module's full name. */
static json_t *pattern_json(const struct adapter *a, bool alpha) {
    json_t *out = json_object();
    for (int32_t i = 0; i < a->shape.n_layers * N_PROJ; i++) {
        struct adapter_module m = adapter_module_at(&a->config, i / N_PROJ, i % N_PROJ);
        bool same = alpha ? m.alpha == a->config.alpha : m.r == a->config.r;
        char name[NAME_MAX_LEN];
        if (m.r == 0 || same) continue;
        peft_module_name(name, a->shape.arch, i);
        json_object_set_new(out, proj_is_uniform(a, i % N_PROJ) ? last_component(name) : name,
                            alpha ? number_json(m.alpha) : json_integer(m.r));
    }
    pattern_add_table(a, alpha, last_component(a->shape.arch->hf_embed), a->config.embed.lora, out);
    pattern_add_table(a, alpha, "lm_head", a->config.head.lora, out);
    return out;
}

static bool layer_is_adapted(const struct adapter *a, int32_t l) {
    for (int p = 0; p < N_PROJ; p++)
        if (adapter_module_at(&a->config, l, p).r > 0) return true;
    return false;
}

/* True when a list of short names and a list of layers describe the adapter. The adapted modules
 * must be exactly (some layers) × (the targets). If these are not all layers, embedding and head
 * must not have low-rank parts, because layers_to_transform would exclude them. */
static bool short_names_suffice(const struct adapter *a) {
    int32_t n = 0;
    for (int32_t l = 0; l < a->shape.n_layers; l++) {
        n += layer_is_adapted(a, l);
        for (int p = 0; p < N_PROJ; p++)
            if ((adapter_module_at(&a->config, l, p).r > 0) !=
                (a->config.target[p] && layer_is_adapted(a, l)))
                return false;
    }
    return n == a->shape.n_layers || a->config.embed.lora.r + a->config.head.lora.r == 0;
}

static json_t *layers_json(const struct adapter *a) {
    json_t *out = json_array();
    for (int32_t l = 0; l < a->shape.n_layers; l++)
        if (layer_is_adapted(a, l)) json_array_append_new(out, json_integer(l));
    size_t n = json_array_size(out);
    if (short_names_suffice(a) && n > 0 && n < (size_t)a->shape.n_layers) return out;
    json_decref(out);
    return json_null();
}

/* target_modules: short names if they suffice, else the full name of every module. Sorted, because
 * PEFT stores a set, which has no order. */
static json_t *targets_json(const struct adapter *a) {
    struct strings names = {0};
    char full[NAME_MAX_LEN];
    bool short_names = short_names_suffice(a);
    for (int p = 0; p < N_PROJ && short_names; p++)
        if (a->config.target[p])
            strings_add(&names, last_component(proj_hf_path(a->shape.arch, (enum proj)p)));
    for (int32_t i = 0; i < a->shape.n_layers * N_PROJ && !short_names; i++) {
        if (adapter_module_at(&a->config, i / N_PROJ, i % N_PROJ).r == 0) continue;
        peft_module_name(full, a->shape.arch, i);
        strings_add(&names, full);
    }
    if (a->config.embed.lora.r) strings_add(&names, last_component(a->shape.arch->hf_embed));
    if (a->config.head.lora.r) strings_add(&names, "lm_head");
    strings_sort(&names);
    json_t *out = json_array();
    for (int i = 0; i < names.n; i++) json_array_append_new(out, json_string(names.v[i]));
    strings_release(&names);
    return out;
}

/* modules_to_save lists the replacement tables without low-rank parts. A replacement table with
 * low-rank parts is in the file of tensors, but not listed. */
static json_t *modules_to_save_json(const struct adapter *a) {
    const struct adapter_config *c = &a->config;
    bool embed = c->embed.full && !c->embed.lora.r, head = c->head.full && !c->head.lora.r;
    if (!embed && !head) return json_null();
    json_t *out = json_array();
    if (embed) json_array_append_new(out, json_string(last_component(a->shape.arch->hf_embed)));
    if (head) json_array_append_new(out, json_string("lm_head"));
    return out;
}

static void token_ids_json(const char *name, const struct adapter_vocab_config *t, json_t *out) {
    if (t->n_ids == 0) return;
    json_t *list = json_array();
    for (int32_t i = 0; i < t->n_ids; i++) json_array_append_new(list, json_integer(t->ids[i]));
    json_object_set_new(out, name, list);
}

/* PEFT 0.15 introduced the key, so it is written only if the adapter has such rows. */
static void trainable_tokens_add(const struct adapter *a, json_t *root) {
    json_t *out = json_object();
    token_ids_json(last_component(a->shape.arch->hf_embed), &a->config.embed, out);
    token_ids_json("lm_head", &a->config.head, out);
    if (json_object_size(out) > 0) json_object_set(root, "trainable_token_indices", out);
    json_decref(out);
}

char *peft_config_text(const struct adapter *a, const char *base) {
    const struct adapter_config *c = &a->config;
    json_t *name = base ? json_string(base) : json_null();
    if (!name) return NULL;
    json_t *o = json_pack(
        "{s:o, s:n, s:o, s:s, s:n, s:b, s:b, s:b, s:n, s:o, s:o, s:o, s:o, s:s, s:i, "
        "s:o, s:n, s:o, s:s, s:b, s:b}",
        "alpha_pattern", pattern_json(a, true), "auto_mapping", "base_model_name_or_path", name,
        "bias", "none", "exclude_modules", "fan_in_fan_out", 0, "inference_mode", 1,
        "init_lora_weights", 1, "layers_pattern", "layers_to_transform", layers_json(a),
        "lora_alpha", number_json(c->alpha), "lora_dropout", shortest_real_json(c->dropout),
        "modules_to_save", modules_to_save_json(a), "peft_type", "LORA", "r", (int)c->r,
        "rank_pattern", pattern_json(a, false), "revision", "target_modules", targets_json(a),
        "task_type", "CAUSAL_LM", "use_dora", (int)c->dora, "use_rslora", (int)c->rslora);
    CHECK(o);
    trainable_tokens_add(a, o);
    // PEFT 0.18 introduced the key, so other adapters do not have it
    if (c->n_invocation)
        json_object_set_new(o, "alora_invocation_tokens", adapter_invocation_json(c));
    char *text =
        json_dumps(o, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(9));
    CHECK(text);
    json_decref(o);
    return text;
}
