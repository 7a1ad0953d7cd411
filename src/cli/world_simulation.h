/*
 * world_life: `shoal world MODEL` — agents that are models live, learn and breed, measured beside
 * what needs no model; and a model as a player of one world.
 */
#ifndef SHOAL_CLI_WORLD_LIFE_H
#define SHOAL_CLI_WORLD_LIFE_H

#include "cli/cli.h"
#include "world/world.h"

struct simulation_cmd_options {
    struct simulation_options life;
    char *runs, *out;        /* folder of runs; of this one */
    struct strings adapters; /* that minds begin with */
    bool dry_run;
};
extern const struct option_row simulation_cmd_rows[];

struct simulation_job {
    const struct cli_options *c;
    const struct simulation_cmd_options *o;
    const struct world_rules *rules;     /* borrowed, as all of it */
    const struct external_envs *outside; /* where minds live instead; NULL: in the world */
    int agents;
    struct model *m;
    struct pool *pool;
};
/* Generations, in a folder that the same command continues in. */
int simulation_run(const struct simulation_job *j, struct error *err);
/* A mind of a run as a PEFT directory; name NULL: the best one. */
int simulation_export_policy(const struct simulation_cmd_options *o, const char *run,
                             const char *name, struct error *err);

/* Groups of runs, names[1] and on, over their seeds; o->out: a chart as SVG. */
int simulation_compare(const struct cli_options *common, const struct simulation_cmd_options *o,
                       const struct strings *names, struct error *err);
/* A model as a player of one world at a time. */
struct model_policy;
struct model_policy *model_policy_new(const struct simulation_job *j, bool learns,
                                      struct error *err);
void model_policy_free(struct model_policy *p);
/* Actions of the living in `w`, which is where the last ones led, or another one, or any tick that
 * is entered. The rules stay where they are until the next world. */
int model_policy_act(struct model_policy *p, const struct world *w, const struct world_rules *r,
                     uint64_t seed, int16_t *actions, struct error *err);
/* What an agent was asked last and how probable its actions were, for people. */
void model_policy_describe(const struct model_policy *p, int agent, struct buf *out);

#endif
