/*
 * environment: an interface to environments in which agents act: the world of world.h, or another
 * program (external_env.c). The creator owns it; one thread drives it.
 */
#ifndef SHOAL_WORLD_ENVIRONMENT_H
#define SHOAL_WORLD_ENVIRONMENT_H

#include "base/base.h"

enum { ENV_MAX_ACTIONS = 32 }; /* maximal number of actions of an environment */

struct episode_stats;
struct environment {
    void *ctx;
    int n_agents, n_actions;
    const char *const *actions; /* [n_actions] words; a model generates the first token of one */
    int (*reset)(void *ctx, uint64_t seed, struct error *err);
    /* Appends the prompt of agent i to `out`; false: it has left, until the next reset. */
    bool (*prompt)(void *ctx, int agent, struct buf *out);
    /* Whether the agent's episode was truncated: it does not act any more, but still has a prompt.
     * NULL: never. */
    bool (*over)(void *ctx, int agent);
    /* actions: [n_agents], -1 for inactive agents; rewards: [n_agents], output. */
    int (*step)(void *ctx, const int16_t *actions, double *rewards, struct error *err);
    /* Announce the next reset or step. They are called for all environments before the first reset
     * or step, so that environments with a high latency can combine requests. NULL: not needed. */
    void (*will_reset)(void *ctx, uint64_t seed);
    void (*will_step)(void *ctx, const int16_t *actions);
    /* The action that a generated text names; -1: none of them. */
    int (*parse)(void *ctx, const char *text);
    /* The action of the teacher; NULL: no teacher. */
    int (*teach)(void *ctx, int agent);
    /* Statistics of an agent's episode so far; NULL: only rewards are known. */
    void (*episode_stats)(void *ctx, int agent, struct episode_stats *out);
};

#endif
