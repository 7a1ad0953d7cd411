/*
 * scaling: declarations for its files: strategies, kinds of targets, names of Kubernetes.
 */
#ifndef SHOAL_SCALING_INTERNAL_H
#define SHOAL_SCALING_INTERNAL_H

#include "scaling/scaling.h"

struct scaling_strategy {
    const char *name;
    double cpu, memory, queue; /* weights of the score */
};
const struct scaling_strategy *scaling_strategy_find(const char *name); /* NULL: unknown */

/* A kind of target. `check` and `sources` may be NULL. */
struct target_kind {
    const char *name;
    void *(*open)(const struct target_options *o, int min_nodes, struct error *err);
    int (*nodes)(void *state, int *n, struct error *err);
    int (*set)(void *state, int n, struct error *err);
    int (*sources)(void *state, struct strings *urls, struct error *err);
    int (*check)(void *state, struct error *err);
    void (*close)(void *state);
};
extern const struct target_kind target_local, target_kubernetes, target_command;

/* Whether a name can be part of a path or label of Kubernetes: letters, digits and '-'. */
bool kubernetes_name_is_valid(const char *name);

#endif
