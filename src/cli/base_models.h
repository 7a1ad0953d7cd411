/*
 * bases: several models at once, each opened once with an engine of its own, under one memory plan.
 *
 * The same path for several purposes is one base. With --max-memory each base gets what its
 * smallest engine needs, and of the rest a part in proportion to what it could use.
 */
#ifndef SHOAL_BASES_H
#define SHOAL_BASES_H

#include "cli/setup.h"

enum { BASE_MODELS_MAX = 4 };
struct base_models {
    struct setup v[BASE_MODELS_MAX];
    int n;
    size_t limit; /* of all; 0: none */
    struct pool *pool;
};
/*
 * paths[n]: what to open, for each purpose; of[n] gets the base of each. Adapters in `w` are
 * counted for the base of purpose 0. After --dry-run the bases have no models.
 */
int base_models_open(struct base_models *b, const struct cli_options *c,
                     const struct setup_options *o, const char *const *paths, int n, int *of,
                     const struct setup_needs *w, struct error *err);
int base_models_close(struct base_models *b, int rc, struct error *err);

#endif
