/*
 * outside_env: environments that another program provides, as simulation.h wants them.
 *
 * The other side of a world_server (world_server.h): Shoal asks, the program answers, one line of JSON
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
typedef int (*external_envs_exchange_fn)(void *ctx, const struct buf *line, const char **answer, size_t *len,
                           struct error *err);

struct external_envs;
/* Asks for the spaces at once. With `taught` every agent that is asked must have a teacher. */
struct external_envs *external_envs_new(external_envs_exchange_fn exchange, void *ctx, int worlds, bool taught,
                                      struct error *err);
/* The same of a program that the shell runs; it may take `timeout` seconds for an answer. */
struct external_envs *external_envs_open(const char *command, double timeout, int worlds, bool taught,
                                       struct error *err);
void external_envs_free(struct external_envs *c);                             /* ends the program */
struct environment *const *external_envs_list(const struct external_envs *c); /* [worlds] */
int64_t external_envs_max_steps(const struct external_envs *c);               /* 0: it does not say */
/* {command, agents, actions, said}: what a run is a run in. */
json_t *external_envs_json(const struct external_envs *c);

#endif
