/* world_server_internal: functions that world_server.c (another program acts), subprocess.c
 * (another program is the policy) and external_env.c (another program is the environment) share. */
#ifndef SHOAL_WORLD_WORLD_SERVER_INTERNAL_H
#define SHOAL_WORLD_WORLD_SERVER_INTERNAL_H

#include "world/world.h"

/* The bit set of the living agents. */
uint64_t world_living_mask(const struct world *w);
/* Writes "NAME":{"agent_0":…,…} for the agents in `agents`; `add` writes each value. */
typedef void (*agent_json_fn)(const void *ctx, int agent, struct buf *out);
void agent_json_each(const char *name, uint64_t agents, agent_json_fn add, const void *ctx,
                     struct buf *out);

struct world_view {
    const struct world *w;
    const struct world_rules *r;
    uint64_t invalid_actions; /* bit set of the agents whose answer named no action */
    bool at_start;            /* no action has been taken yet */
};
void agent_json_observation(const void *view, int agent, struct buf *out);
void agent_json_reward(const void *view, int agent, struct buf *out);
void agent_json_info(const void *view, int agent, struct buf *out);

/* Reads the actions from an object keyed by agent names, which must be exactly the agents in the
 * bit set `agents`. `invalid`: the agents whose text named no action; they make a random move. */
int world_actions_read(const struct world_view *v, uint64_t agents, const json_t *object,
                       int16_t *actions, uint64_t *invalid, struct error *err);

/* Sends a line, with its newline, to the program. *line: the program's answer, valid until the next
 * call. */
int subprocess_exchange(struct subprocess *o, const struct buf *request, const char **line,
                        size_t *len, struct error *err);

#endif
