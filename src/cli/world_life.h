/*
 * world_life: `shoal world MODEL` — agents that are models live, learn and breed, measured beside
 * what needs no model; and a model as a player of one world.
 */
#ifndef SHOAL_CLI_WORLD_LIFE_H
#define SHOAL_CLI_WORLD_LIFE_H

#include "cli/cli.h"
#include "world/life.h"
#include "world/outside_env.h"

struct life_command {
    struct life_options life;
    char *runs, *out;        /* folder of runs; of this one */
    struct strings adapters; /* that minds begin with */
    bool dry_run;
};
extern const struct option_row life_command_rows[];

struct life_job {
    const struct common *c;
    const struct life_command *o;
    const struct world_rules *rules;    /* borrowed, as all of it */
    const struct outside_envs *outside; /* where minds live instead; NULL: in the world */
    int agents;
    struct model *m;
    struct pool *pool;
};
/* Generations, in a folder that the same command continues in. */
int life_run(const struct life_job *j, struct error *err);
/* A mind of a run as a PEFT directory; name NULL: the best one. */
int life_export(const struct life_command *o, const char *run, const char *name, struct error *err);

/* Groups of runs, names[1] and on, over their seeds; o->out: a chart as SVG. */
int life_compare(const struct common *common, const struct life_command *o,
                 const struct strings *names, struct error *err);
/* A model as a player of one world at a time. */
struct life_player;
struct life_player *life_player_new(const struct life_job *j, bool learns, struct error *err);
void life_player_free(struct life_player *p);
/* Actions of the living in `w`, which is where the last ones led, or another one, or any tick that
 * is entered. The rules stay where they are until the next world. */
int life_player_act(struct life_player *p, const struct world *w, const struct world_rules *r,
                    uint64_t seed, int16_t *actions, struct error *err);
/* What an agent was asked last and how probable its actions were, for people. */
void life_player_tell(const struct life_player *p, int agent, struct buf *out);

#endif
