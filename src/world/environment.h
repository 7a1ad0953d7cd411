/*
 * environment: the interface to an environment in which agents act: the world of world.h, or
 * another program (external_env.c). The creator owns it; one thread uses it.
 */
#ifndef SHOAL_WORLD_ENVIRONMENT_H
#define SHOAL_WORLD_ENVIRONMENT_H

#include "base/base.h"

enum { ENV_MAX_ACTIONS = 32 }; /* maximal number of actions of an environment */

struct episode_stats;
struct environment {
    void *ctx;
    int n_agents, n_actions;
    const char *const *actions; /* [n_actions] words; a model chooses among their tokens */
    /* The names of the words that an agent can say in addition to its action; word 0 is silence. A
     * step's action is then action + n_actions · word. 0: agents cannot speak. */
    int n_words;
    const char *const *words; /* [n_words] */
    int map_size;               /* cells per side of its maps; 0: it has one size only */
    /* Sets the cells per side of the maps from the next reset on, at most map_size. Called only if
     * map_size is not 0. */
    void (*set_map_size)(void *ctx, int size);
    int (*reset)(void *ctx, uint64_t seed, struct error *err);
    /* Appends the prompt of an agent to `out`; false: the agent has left the environment until the
     * next reset. */
    bool (*prompt)(void *ctx, int agent, struct buf *out);
    /* Whether the agent's episode was truncated: the agent does not act any more, but still has a
     * prompt, from which its value is estimated. NULL: never. */
    bool (*is_truncated)(void *ctx, int agent);
    /* Simulates one tick. actions: [n_agents], -1 for inactive agents; rewards: [n_agents], output.
     */
    int (*step)(void *ctx, const int16_t *actions, double *rewards, struct error *err);
    /* Announce the next reset or step. The caller announces it to all environments before the first
     * one resets or steps, so that environments with a high latency can combine their requests.
     * NULL: not needed. */
    void (*will_reset)(void *ctx, uint64_t seed);
    void (*will_step)(void *ctx, const int16_t *actions);
    /* The action that a generated text names; -1: none of them. */
    int (*parse)(void *ctx, const char *text);
    /* The action that the teacher would take; NULL: there is no teacher. */
    int (*expert_action)(void *ctx, int agent);
    /* Writes the statistics of an agent's episode so far; NULL: only rewards are known. */
    void (*episode_stats)(void *ctx, int agent, struct episode_stats *out);
};

#endif
