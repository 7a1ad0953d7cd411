/*
 * world_life: `shoal world MODEL` — agents that are models live, learn and breed, measured beside
 * what needs no model.
 */
#ifndef SHOAL_CLI_WORLD_LIFE_H
#define SHOAL_CLI_WORLD_LIFE_H

#include "cli/cli.h"
#include "world/life.h"

struct life_command {
    struct life_options life;
    char *out;               /* folder of the run; NULL: none is kept */
    struct strings adapters; /* that minds begin with */
};
extern const struct option_row life_command_rows[];

struct life_job {
    const struct common *c;
    const struct life_command *o;
    const struct world_rules *rules;
    const char *world; /* name */
    int agents;
    struct model *m;
    struct pool *pool;
};
int life_run(const struct life_job *j, struct error *err);

#endif
