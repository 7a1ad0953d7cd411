/*
 * lineage: the base model in an adapter's lineage.
 *
 * A lineage has the SHA-256 of the base that the adapter was trained on and, if that base is a
 * quantised or converted copy, of the model that the copy was made from. A model and its copies
 * count as one base: an adapter of any of them fits the others without a warning.
 */
#include "adapter/internal.h"

#include <string.h>

static const char *lineage_text(const struct adapter *a, const char *key) {
    return a ? json_string_value(json_object_get(a->lineage, key)) : NULL;
}

/* The model at the start of the copies: the base's source, else the base; NULL: unknown. */
static const char *lineage_source(const struct adapter *a) {
    const char *source = lineage_text(a, ADAPTER_BASE_SOURCE);
    return source ? source : lineage_text(a, ADAPTER_BASE_HASH);
}

void adapter_lineage_set_model(json_t *lineage, const struct model *m) {
    if (!m->hash[0]) return;
    json_object_set_new(lineage, ADAPTER_BASE_HASH, json_string(m->hash));
    if (m->source_hash[0])
        json_object_set_new(lineage, ADAPTER_BASE_SOURCE, json_string(m->source_hash));
    else
        json_object_del(lineage, ADAPTER_BASE_SOURCE);
}

/* Copies of one model that differ have their source as the common base. */
void adapter_lineage_set_base(json_t *lineage, const struct adapter *const *parents, int n) {
    const struct adapter *first = NULL;
    bool same = true;
    for (int p = 0; p < n; p++) {
        const char *base = lineage_text(parents[p], ADAPTER_BASE_HASH);
        if (!base) continue;
        if (!first) first = parents[p];
        if (strcmp(lineage_source(first), lineage_source(parents[p])) != 0) return;
        same &= strcmp(lineage_text(first, ADAPTER_BASE_HASH), base) == 0;
    }
    if (!first) return;
    json_object_set_new(
        lineage, ADAPTER_BASE_HASH,
        json_string(same ? lineage_text(first, ADAPTER_BASE_HASH) : lineage_source(first)));
    if (same && lineage_text(first, ADAPTER_BASE_SOURCE))
        json_object_set(lineage, ADAPTER_BASE_SOURCE,
                        json_object_get(first->lineage, ADAPTER_BASE_SOURCE));
}

bool adapter_is_of_model(const struct adapter *a, struct model *m) {
    const char *trained_on = lineage_text(a, ADAPTER_BASE_HASH), *source = lineage_source(a);
    struct error err;
    const char *actual = trained_on ? model_hash(m, &err) : NULL;
    return actual && (strcmp(trained_on, actual) == 0 || strcmp(source, actual) == 0 ||
                      strcmp(source, m->source_hash) == 0);
}

void adapter_warn_other_base(const struct adapter *a, const char *path, struct model *m) {
    const char *trained_on = lineage_text(a, ADAPTER_BASE_HASH);
    struct error err;
    const char *actual = trained_on ? model_hash(m, &err) : NULL;
    if (!actual || adapter_is_of_model(a, m)) return;
    log_warn("adapter '%s' was trained on a base with sha-256 %.12s…, but '%s' is %.12s…", path,
             trained_on, m->name, actual);
}
