/*
 * base_models: several models at once, each opened once with a separate engine, under one memory
 * plan.
 *
 * Equal paths are one base, which is opened once. With --max-memory each base gets the bytes of its
 * smallest engine, and a share of the rest in proportion to the bytes that its full engine needs in
 * addition.
 */
#ifndef SHOAL_CLI_BASE_MODELS_H
#define SHOAL_CLI_BASE_MODELS_H

#include "cli/setup.h"

enum { BASE_MODELS_MAX = 4 };
struct base_models {
    struct setup v[BASE_MODELS_MAX];
    int n;
    size_t limit; /* limit of all bases together; 0: none */
    struct pool *pool;
};
/*
 * paths[n]: the model of each caller's purpose; base_of[n] gets the index of its base. The adapters
 * in `w` belong to the base of paths[0]. After --dry-run the bases have no models.
 */
int base_models_open(struct base_models *b, const struct cli_options *c,
                     const struct setup_options *o, const char *const *paths, int n, int *base_of,
                     const struct setup_needs *w, struct error *err);
int base_models_close(struct base_models *b, int rc, struct error *err);

#endif
