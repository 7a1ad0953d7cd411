/*
 * balance: which node gets a unit of work. Pure functions; a row of a table for each.
 */
#ifndef SHOAL_CLUSTER_BALANCE_H
#define SHOAL_CLUSTER_BALANCE_H

#include "cluster/coordinator.h"

/* Properties of the unit that balancers use. */
struct balance_unit {
    const char *adapter; /* hash, or NULL: the base model */
    const char *prefix;  /* hash of the prompts' common beginning, or NULL */
    int64_t turn;        /* units assigned before */
};
/* Chooses one of the nodes may[0..n), n > 0, which are indices of `nodes`; returns the index of a
 * node. Equal arguments give the same node. */
typedef int balance_fn(const struct cluster_node *nodes, const int *may, int n,
                       const struct balance_unit *unit);
struct balancer {
    const char *name, *about;
    balance_fn *choose;
};
/* round_robin, least_loaded, capability, hybrid, adapter, prefix; ends with a NULL name. */
extern const struct balancer balancers[];
const struct balancer *balancer_find(const char *name); /* NULL: the name is unknown */

#endif
