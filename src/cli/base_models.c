/*
 * base_models: opens several models: finds equal paths and divides the memory among the models.
 *
 * Invariant: the limits of the bases add up to at most --max-memory, or the available memory, and
 * no model is loaded before every base has its limit.
 */
#define _GNU_SOURCE
#include "cli/base_models.h"

#include <stdlib.h>
#include <string.h>

/* Returns the index of a path among the distinct paths, and adds it if it is new. */
static int path_index(const char **distinct, int *n, const char *path) {
    for (int i = 0; i < *n; i++)
        if (strcmp(distinct[i], path) == 0) return i;
    distinct[*n] = path;
    return (*n)++;
}

static struct setup_needs base_needs(const struct base_models *b, const struct setup_needs *w,
                                     int base) {
    struct setup_needs needs = *w;
    needs.engine.pool = b->pool;
    if (base > 0) needs.adapters = NULL;
    return needs;
}

static int too_small(const struct base_models *b, size_t bound, size_t least, struct error *err) {
    const double mb = 1 << 20;
    if (!b->limit)
        return error_set(err, ERR_MEMORY,
                         "%.1f MB of memory are available, but %d models need %.1f MB; free memory "
                         "or use fewer models",
                         (double)bound / mb, b->n, (double)least / mb);
    return error_set(err, ERR_MEMORY,
                     "a limit of '%.1f MB' is too small: %d models need %.1f MB; raise "
                     "--max-memory to %.0fM or use fewer models",
                     (double)bound / mb, b->n, (double)least / mb, (double)least / mb + 1);
}

/* Sets limits[b->n], which add up to at most `bound`: the minimum of each base and its share of the
 * rest. */
static int limits_compute(const struct base_models *b, const struct cli_options *c,
                          const struct setup_options *o, const char *const *paths,
                          const struct setup_needs *w, size_t bound, size_t *limits,
                          struct error *err) {
    size_t min_bytes[BASE_MODELS_MAX], max_bytes[BASE_MODELS_MAX], min_total = 0, extra_total = 0;
    for (int i = 0; i < b->n; i++) {
        struct setup_needs needs = base_needs(b, w, i);
        if (setup_memory_bounds(c, o, paths[i], &needs, &min_bytes[i], &max_bytes[i], err) != OK)
            return err->code;
        min_total += min_bytes[i];
        extra_total += max_bytes[i] - min_bytes[i];
    }
    if (min_total > bound) return too_small(b, bound, min_total, err);
    double remaining = (double)(bound - min_total),
           share = extra_total ? MIN(remaining / (double)extra_total, 1) : 0;
    for (int i = 0; i < b->n; i++)
        limits[i] = min_bytes[i] + (size_t)(share * (double)(max_bytes[i] - min_bytes[i]));
    return OK;
}

int base_models_open(struct base_models *b, const struct cli_options *c,
                     const struct setup_options *o, const char *const *paths, int n, int *base_of,
                     const struct setup_needs *w, struct error *err) {
    const char *distinct[BASE_MODELS_MAX];
    size_t limits[BASE_MODELS_MAX] = {0};
    int n_bases = 0, rc = OK;
    *b = (struct base_models){.n = 0};
    CHECK(n <= BASE_MODELS_MAX);
    for (int i = 0; i < n; i++) base_of[i] = path_index(distinct, &n_bases, paths[i]);
    if (o->max_memory && size_parse(o->max_memory, &b->limit, err) != OK) return err->code;
    b->pool = pool_new((int)c->threads);
    b->n = n_bases;
    if (b->n > 1)
        rc = limits_compute(b, c, o, distinct, w, b->limit ? b->limit : memory_usable(), limits,
                            err);
    for (b->n = 0; rc == OK && b->n < n_bases; b->n++) {
        struct setup_needs needs = base_needs(b, w, b->n);
        *(b->limit ? &needs.limit : &needs.available) = limits[b->n];
        if (n_bases > 1 && (b->limit || o->dry_run)) log_info("'%s':", distinct[b->n]);
        rc = setup_open(&b->v[b->n], c, o, distinct[b->n], &needs, err);
        if (rc == OK && b->v[b->n].m && !b->v[b->n].m->tok)
            rc = error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", b->v[b->n].path);
    }
    return rc;
}

int base_models_close(struct base_models *b, int rc, struct error *err) {
    for (int i = b->n - 1; i >= 0; i--) {
        b->v[i].limit = i ? 0 : b->limit; /* one peak for all bases: printed once */
        rc = setup_close(&b->v[i], rc, err);
    }
    pool_free(b->pool);
    return rc;
}
