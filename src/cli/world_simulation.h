/*
 * world_simulation: `shoal world MODEL` — agents with models live, learn and breed, compared with
 * policies without a model; and a model as a player of one world.
 */
#ifndef SHOAL_CLI_WORLD_LIFE_H
#define SHOAL_CLI_WORLD_LIFE_H

#include "cli/cli.h"
#include "world/world.h"

struct simulation_cmd_options {
    struct simulation_options life;
    char *runs, *out;        /* folder of all runs; folder of this run */
    struct strings adapters; /* initial adapters of the policies */
    bool dry_run;
};
extern const struct option_row simulation_cmd_rows[];

struct simulation_job {
    const struct cli_options *c;
    const struct simulation_cmd_options *o;
    const struct world_rules *rules;     /* borrowed, as are all fields */
    const struct external_envs *outside; /* environments in another program; NULL: the grid world */
    int agents;
    struct model *m;
    struct pool *pool;
};
/* Runs generations in a folder; the same command continues in it. */
int simulation_run(const struct simulation_job *j, struct error *err);
/* Writes a policy of a run as a PEFT directory; name NULL: the best one. */
int simulation_export_policy(const struct simulation_cmd_options *o, const char *run,
                             const char *name, struct error *err);

/* Compares groups of runs, names[1] and on, over their seeds; o->out: a chart as SVG. */
int simulation_compare(const struct cli_options *common, const struct simulation_cmd_options *o,
                       const struct strings *names, struct error *err);
/* A model as a player of one world at a time. */
struct model_policy;
struct model_policy *model_policy_new(const struct simulation_job *j, bool learns,
                                      struct error *err);
void model_policy_free(struct model_policy *p);
/* Computes the actions of the living agents in `w`: the world that the last actions led to, another
 * one, or any tick that is entered. The rules must stay valid until the next world. */
int model_policy_act(struct model_policy *p, const struct world *w, const struct world_rules *r,
                     uint64_t seed, int16_t *actions, struct error *err);
/* Describes the last decision of an agent: how probable each action was. */
void model_policy_describe(const struct model_policy *p, int agent, struct buf *out);

#endif
