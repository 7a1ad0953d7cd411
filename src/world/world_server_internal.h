/* What both directions of the pipe write. */
#ifndef SHOAL_WORLD_PIPE_INTERNAL_H
#define SHOAL_WORLD_PIPE_INTERNAL_H

#include "world/world.h"

/* Agents as bits. */
uint64_t world_living_mask(const struct world *w);
/* "NAME":{"agent_0":…,…} of the agents in `who`; the value is what `add` writes. */
typedef void (*agent_json_fn)(const void *ctx, int agent, struct buf *out);
void agent_json_each(const char *name, uint64_t who, agent_json_fn add, const void *ctx,
                     struct buf *out);

struct world_view {
    const struct world *w;
    const struct world_rules *r;
    uint64_t guessed; /* agents whose answer named no action */
    bool begins;      /* nobody has acted yet */
};
void agent_json_observation(const void *view, int agent, struct buf *out);
void agent_json_reward(const void *view, int agent, struct buf *out);
void agent_json_info(const void *view, int agent, struct buf *out);

/* The actions of an object of agents' names: of all in `who` and of nobody else. */
int world_actions_read(const struct world_view *v, uint64_t who, const json_t *object,
                       int16_t *actions, uint64_t *guessed, struct error *err);

/* A line, with its newline, to another program, and its answer, good until the next call. */
int subprocess_exchange(struct subprocess *o, const struct buf *question, const char **line,
                        size_t *len, struct error *err);

#endif
