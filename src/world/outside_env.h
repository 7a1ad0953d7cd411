/*
 * outside_env: environments that another program provides, as life.h wants them.
 *
 * The other side of a world_server (pipe.h): Shoal asks, the program answers, one line of JSON
 * each, in the shape of PettingZoo's Parallel API (docs/WORLD.md, "Training in your own
 * environment"). One program holds all worlds; what they are asked at once goes in one line. One
 * thread at a time.
 */
#ifndef SHOAL_WORLD_OUTSIDE_ENV_H
#define SHOAL_WORLD_OUTSIDE_ENV_H

#include "world/environment.h"

enum {
    ENV_AGENTS = 1024, /* of one world */
    ENV_NAME = 64,     /* bytes of an agent's or an action's name */
    ENV_PROMPT = 4096, /* bytes of a prompt */
};

/* Hands over a line, with its newline, and gives the answer, good until the next call. */
typedef int (*exchange_fn)(void *ctx, const struct buf *line, const char **answer, size_t *len,
                           struct error *err);

struct outside_envs;
/* Asks for the spaces at once. With `taught` every agent that is asked must have a teacher. */
struct outside_envs *outside_envs_new(exchange_fn exchange, void *ctx, int worlds, bool taught,
                                      struct error *err);
/* The same of a program that the shell runs; it may take `timeout` seconds for an answer. */
struct outside_envs *outside_envs_open(const char *command, double timeout, int worlds, bool taught,
                                       struct error *err);
void outside_envs_free(struct outside_envs *c);                             /* ends the program */
struct environment *const *outside_envs_list(const struct outside_envs *c); /* [worlds] */
int64_t outside_envs_max_steps(const struct outside_envs *c);               /* 0: it does not say */
/* {command, agents, actions, said}: what a run is a run in. */
json_t *outside_envs_json(const struct outside_envs *c);

#endif
