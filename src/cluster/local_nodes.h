/*
 * local_nodes: the processes of a cluster "local:N". A process that ends is started again, unless
 * it ends again and again.
 */
#ifndef SHOAL_CLUSTER_LOCAL_NODES_H
#define SHOAL_CLUSTER_LOCAL_NODES_H

#include "cluster/bus.h"

struct local_nodes;
/* Starts n processes of this program with these arguments, and --join ADDRESS --name local-I. They
 * are killed when the calling thread ends. */
struct local_nodes *local_nodes_start(int n, const struct strings *args, const char *address,
                                      struct error *err);
/* Calls `gone` with the name of each process that has ended since the last call, and starts it
 * again. ERR_STATE: one ends again and again. */
int local_nodes_check(struct local_nodes *l, void (*gone)(void *ctx, const char *name), void *ctx,
                      struct error *err);
void local_nodes_stop(struct local_nodes *l); /* NULL is allowed */

#endif
