/*
 * environment: what somewhere is where agents act — the world of world.h (simulation.h), or another
 * program (external_env.h). Who makes one owns it; one thread drives it.
 */
#ifndef SHOAL_WORLD_ENVIRONMENT_H
#define SHOAL_WORLD_ENVIRONMENT_H

#include "base/base.h"

enum { ENV_MAX_ACTIONS = 32 }; /* most that an environment may have */

struct episode_stats;
struct environment {
    void *ctx;
    int n_agents, n_actions;
    const char *const *actions; /* [n_actions] words, of which a model says the first token */
    int (*reset)(void *ctx, uint64_t seed, struct error *err);
    /* What agent i is asked, added to `out`; false: it is gone, until the next reset. */
    bool (*prompt)(void *ctx, int agent, struct buf *out);
    /* Its time is over: it acts no more, but its prompt says where it stands. NULL: nobody's is. */
    bool (*over)(void *ctx, int agent);
    /* actions: [n_agents], -1 of who is not asked; rewards: [n_agents], to be filled in. */
    int (*step)(void *ctx, const int16_t *actions, double *rewards, struct error *err);
    /* What will be reset and stepped next, said of all environments before the first one is; for
     * those to which the way is long. NULL: they need not know. */
    void (*will_reset)(void *ctx, uint64_t seed);
    void (*will_step)(void *ctx, const int16_t *actions);
    /* What a model wrote, as an action; -1: none of them. */
    int (*parse)(void *ctx, const char *text);
    /* What the teacher would do; NULL: there is none. */
    int (*teach)(void *ctx, int agent);
    /* What became of an agent so far; NULL: rewards are all that is known. */
    void (*measure)(void *ctx, int agent, struct episode_stats *out);
};

#endif
