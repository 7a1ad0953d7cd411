/*
 * cluster: calls of the engine on several nodes, with the results of one.
 *
 * A generation is a function: its result depends on the call, the model and the numeric class, not
 * on where and when it runs. So a cluster is the remote of an engine: it divides the calls into
 * units of work, sends them to nodes, and sends them again to others when a node is lost; the first
 * result of a unit counts. With replicas, several nodes compute each unit, and the result of the
 * majority is used; a node with another result is quarantined. With "pbft", these nodes also sign
 * and commit the hash of each result (pbft.h) before it is used. The engine computes a call itself
 * if no node can.
 *
 * A cluster that streams is for a server: every call is one unit, a node computes many of
 * them at once, and their tokens arrive as they are generated. If the node is lost or its stream
 * stalls, another one computes the unit from the start; the tokens that are known already are
 * compared and skipped. If one differs, the engine computes the call, and the node whose tokens are
 * wrong is quarantined. A call that no node can take is computed by the engine.
 *
 * "local:N" starts N processes of this machine. They end with the process that started them.
 * "nats://HOST" uses the nodes that have joined the NATS server.
 */
#ifndef SHOAL_CLUSTER_H
#define SHOAL_CLUSTER_H

#include "cluster/coordinator.h"
#include "engine/engine.h"

#include <stdatomic.h>

struct cluster_options {
    const char *address;  /* "local:N" or "nats://HOST" */
    int replicas;         /* nodes that compute each unit; 0: 1 */
    const char *verify;   /* "majority" (NULL), or "pbft": the replicas commit each result */
    const char *balancer; /* NULL: hybrid */
    int threads;          /* threads of all local nodes together; 0: those of the machine */
    size_t max_memory;    /* limit of all local nodes together in bytes; 0: no limit */
    bool streams;         /* without replicas */
};
enum { CLUSTER_LOCAL_MAX = 64 };
struct cluster;
/* Starts the cluster as the engine's remote. After cluster_close, the engine may only be freed. The
 * nodes have the model, the class and the options of the engine. ERR_USAGE: the
 * address or the balancer is unknown. */
struct cluster *cluster_open(const struct cluster_options *o, struct engine *e, struct model *m,
                             struct error *err);
void cluster_close(struct cluster *c); /* ends its processes; NULL is allowed */
/* {address, balancer, failed, computed_here, assigned_again, nodes: [{name, state, usable, threads,
 * level, load, units, done, seconds_per_unit, heard, adapters}]}, as of the last second. usable: it
 * has the engine's model, class and element types; heard: seconds since its last message;
 * computed_here: calls that nodes did not compute; assigned_again: times that a call went to one
 * more node. Any thread. */
json_t *cluster_status_json(struct cluster *c);

struct node_options {
    const char *address, *name; /* address of the bus; name of the node */
    struct engine *engine;
    struct model *model;
    int threads;
    /* NULL, or true ends the node when it has sent the results of the units that it computes. Those
     * that come later go to other nodes. */
    const atomic_bool *leave;
};
/* Computes units until the bus closes, the process is asked to end (log_check_cancelled), or it
 * leaves, which is OK. */
int node_run(const struct node_options *o, struct error *err);

/*
 * local_nodes: `shoal node` processes of this machine. One that ends is started again, unless it
 * ends again and again. All are killed when the thread that started them ends.
 */
struct local_nodes_options {
    const struct strings *args; /* the program's arguments, without those below */
    const char *address;        /* --join */
    const char *prefix;         /* the names (--name) are PREFIX-1, PREFIX-2 … */
    double drain_seconds;       /* from SIGTERM to SIGKILL for a node that is no longer needed */
};
struct local_nodes;
/* Starts n processes of this program, at most CLUSTER_LOCAL_MAX. The options are copied. */
struct local_nodes *local_nodes_start(int n, const struct local_nodes_options *o,
                                      struct error *err);
/* Starts further processes, or sends SIGTERM to the youngest ones, which leave; n nodes are needed
 * then. Returns at once. */
int local_nodes_resize(struct local_nodes *l, int n, struct error *err);
int local_nodes_needed(const struct local_nodes *l);
/* Calls `gone` (may be NULL) with the name of each process that has ended since the last call, and
 * starts it again if it is needed. ERR_STATE: one ends again and again. */
int local_nodes_check(struct local_nodes *l, void (*gone)(void *ctx, const char *name), void *ctx,
                      struct error *err);
/* Ends all processes: with SIGTERM, waiting for drain_seconds, or at once. NULL is allowed. */
void local_nodes_drain(struct local_nodes *l);
void local_nodes_stop(struct local_nodes *l);

#endif
