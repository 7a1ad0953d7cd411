/*
 * config_parse: which parts of a model an adapter changes, from the lists of the command line:
 * projections, layers, tables and token ids.
 */
#include "adapter/adapter.h"

#include <stdlib.h>
#include <string.h>

/* Names that some architectures use instead of those in proj_names. */
static const struct {
    const char *name;
    enum proj p;
} aliases[] = {{"out_proj", PROJ_O}, {"c_fc", PROJ_UP}, {"c_proj", PROJ_DOWN}};

static int target_find(const char *name, size_t len) {
    for (size_t i = 0; i < ARRAY_LEN(aliases); i++)
        if (strlen(aliases[i].name) == len && memcmp(aliases[i].name, name, len) == 0)
            return aliases[i].p;
    for (int p = 0; p < N_PROJ; p++)
        if (strlen(proj_names[p]) == len && memcmp(proj_names[p], name, len) == 0) return p;
    return -1;
}

static int unknown_target_error(const char *name, size_t len, struct error *err) {
    struct buf known = {0};
    for (int p = 0; p < N_PROJ; p++) buf_printf(&known, "%s, ", proj_names[p]);
    error_set(err, ERR_USAGE, "unknown target '%.*s' (known: %sor all-linear)", (int)MIN(len, 80),
              name, known.data);
    buf_release(&known);
    return err->code;
}

int adapter_targets_parse(const char *list, bool target[N_PROJ], struct error *err) {
    int n_named = 0;
    memset(target, 0, N_PROJ * sizeof *target);
    for (const char *p = list; *p;) {
        size_t len = strcspn(p, ", ");
        if (len == strlen("all-linear") && memcmp(p, "all-linear", len) == 0) {
            for (int i = 0; i < N_PROJ; i++) target[i] = true;
            n_named++;
        } else if (len > 0) {
            int i = target_find(p, len);
            if (i < 0) return unknown_target_error(p, len, err);
            target[i] = true;
            n_named++;
        }
        p += len + (p[len] != 0);
    }
    return n_named > 0
               ? OK
               : error_set(err, ERR_USAGE, "no target named (try 'q_proj,v_proj' or 'all-linear')");
}

/* Sets the entries of `selected` [L] that the first n characters of `text` name: "all", "4" or
 * "4-7". */
static int layers_select(const char *text, size_t n, int32_t n_layers, bool *selected,
                         struct error *err) {
    char item[32], *end;
    long first = 0, last = n_layers - 1;
    snprintf(item, sizeof item, "%.*s", (int)MIN(n, sizeof item), text);
    if (strcmp(item, "all") != 0) {
        first = last = strtol(item, &end, 10);
        if (*end == '-' && end > item) last = strtol(end + 1, &end, 10);
        if (*end || !strchr("0123456789", *item))
            return error_set(err, ERR_USAGE, "layers '%s' is neither 'all', a number nor a range",
                             item);
    }
    if (first > last || last >= n_layers)
        return error_set(err, ERR_USAGE, "layers '%s' do not exist: the model has layers 0-%d",
                         item, (int)n_layers - 1);
    for (long l = first; l <= last; l++) selected[l] = true;
    return OK;
}

/* The embedding or head with this name, or NULL. */
static struct adapter_vocab_config *
vocab_config_find(struct adapter_config *c, const struct arch *arch, const char *name, size_t len) {
    const char *dot = strrchr(arch->hf_embed, '.'), *own = dot ? dot + 1 : arch->hf_embed;
    const char *const embed_names[] = {"embed_tokens", own};
    for (size_t i = 0; i < ARRAY_LEN(embed_names); i++)
        if (strlen(embed_names[i]) == len && memcmp(embed_names[i], name, len) == 0)
            return &c->embed;
    return len == strlen("lm_head") && memcmp(name, "lm_head", len) == 0 ? &c->head : NULL;
}

int adapter_config_targets_parse(const char *list, const struct model_config *shape,
                                 struct adapter_config *c, struct error *err) {
    struct buf rest = {0};
    bool any = false;
    int rc = OK;
    buf_puts(&rest, "");
    for (const char *p = list; *p;) {
        size_t len = strcspn(p, ", ");
        struct adapter_vocab_config *t = vocab_config_find(c, shape->arch, p, len);
        if (t)
            t->lora = (struct adapter_module){c->r, c->alpha};
        else
            buf_printf(&rest, "%.*s,", (int)len, p);
        any |= t != NULL;
        p += len + (p[len] != 0);
    }
    if (!any || rest.len > 0) rc = adapter_targets_parse(rest.data, c->target, err);
    buf_release(&rest);
    return rc;
}

int adapter_modules_to_save_parse(const char *list, const struct model_config *shape,
                                  struct adapter_config *c, struct error *err) {
    for (const char *p = list; *p;) {
        size_t len = strcspn(p, ", ");
        struct adapter_vocab_config *t = vocab_config_find(c, shape->arch, p, len);
        if (len > 0 && !t)
            return error_set(err, ERR_USAGE,
                             "'%.*s' cannot be trained as a whole; embed_tokens and lm_head can",
                             (int)MIN(len, 80), p);
        if (t) t->full = true;
        p += len + (p[len] != 0);
    }
    return OK;
}

/* Adds the ids of "7" or "5-9" to a table's list, which stays ascending. */
static int token_range_add(const char *text, size_t n, int32_t vocab,
                           struct adapter_vocab_config *t, struct error *err) {
    char item[32], *end = item;
    long first, last;
    snprintf(item, sizeof item, "%.*s", (int)MIN(n, sizeof item), text);
    first = last = strtol(item, &end, 10);
    if (*end == '-' && end > item) last = strtol(end + 1, &end, 10);
    if (!*item || *end || !strchr("0123456789", *item) || first > last || last >= vocab)
        return error_set(err, ERR_USAGE,
                         "'%.*s' is neither a token id nor a range of ids from 0 to %d",
                         (int)MIN(n, 80), text, (int)vocab - 1);
    int32_t added = (int32_t)(last - first) + 1, at = 0;
    int32_t *ids = xrealloc((void *)(uintptr_t)t->ids, (size_t)(t->n_ids + added) * sizeof *ids);
    t->ids = ids;
    while (at < t->n_ids && ids[at] < first) at++;
    if (at < t->n_ids && ids[at] <= last)
        return error_set(err, ERR_USAGE, "token %d is named twice", (int)ids[at]);
    memmove(ids + at + added, ids + at, (size_t)(t->n_ids - at) * sizeof *ids);
    for (int32_t i = 0; i < added; i++) ids[at + i] = (int32_t)first + i;
    t->n_ids += added;
    return OK;
}

int adapter_token_indices_parse(const char *list, const struct model_config *shape,
                                struct adapter_config *c, struct error *err) {
    int rc = OK;
    struct adapter_vocab_config *t = &c->embed;
    for (const char *p = list; !rc && *p;) {
        size_t len = strcspn(p, ", "), name = strcspn(p, "=, ");
        const bool named = name < len;
        if (named && !(t = vocab_config_find(c, shape->arch, p, name)))
            return error_set(err, ERR_USAGE,
                             "'%.*s': rows of embed_tokens and lm_head can be trained",
                             (int)MIN(len, 80), p);
        const size_t skip = named ? name + 1 : 0;
        if (len > 0) rc = token_range_add(p + skip, len - skip, shape->vocab_size, t, err);
        p += len + (p[len] != 0);
    }
    return rc;
}

void adapter_config_release(struct adapter_config *c) {
    free((void *)(uintptr_t)c->modules);
    free((void *)(uintptr_t)c->embed.ids);
    free((void *)(uintptr_t)c->head.ids);
    *c = (struct adapter_config){0};
}

static struct adapter_module *modules_from_layers(const struct adapter_config *c,
                                                  const bool *selected, int32_t n_layers) {
    struct adapter_module *m = xcalloc((size_t)n_layers * N_PROJ, sizeof *m);
    for (int32_t i = 0; i < n_layers * N_PROJ; i++)
        if (selected[i / N_PROJ] && c->target[i % N_PROJ])
            m[i] = (struct adapter_module){c->r, c->alpha};
    return m;
}

int adapter_layers_parse(const char *list, const struct model_config *shape,
                         struct adapter_config *c, struct error *err) {
    int32_t n = shape->n_layers, n_selected = 0;
    bool *selected = xcalloc((size_t)n, sizeof *selected);
    int rc = OK;
    for (const char *p = list; !rc && *p;) {
        size_t len = strcspn(p, ", ");
        if (len > 0) rc = layers_select(p, len, n, selected, err);
        p += len + (p[len] != 0);
    }
    for (int32_t l = 0; l < n; l++) n_selected += selected[l];
    if (!rc && !n_selected) rc = error_set(err, ERR_USAGE, "no layers named (try '4-5' or 'all')");
    if (!rc && n_selected < n) c->modules = modules_from_layers(c, selected, n);
    free(selected);
    return rc;
}
