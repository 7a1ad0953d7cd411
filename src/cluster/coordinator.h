/*
 * coordinator: which node computes which unit of work, as a function of the events so far.
 *
 * A unit is a list of calls that a node computes together; its id is a hash of the calls, so that
 * computing it again, anywhere, gives the same result. The coordinator assigns units to nodes,
 * assigns them again when a node is lost or too slow, counts votes about results, and gives up a
 * unit that fails. It does no input or output and reads no clock:
 * coordinator_step changes the state by one event and appends the actions that follow. Equal events
 * give equal actions, so a simulator can run any history.
 *
 * The units of a server are streamed: their results arrive in parts. Such a unit goes to one more
 * node if its parts stop, and is given up if no node can take it.
 */
#ifndef SHOAL_CLUSTER_COORDINATOR_H
#define SHOAL_CLUSTER_COORDINATOR_H

#include "base/base.h"

enum {
    NODE_NAME_MAX = 64,
    NODE_MAX = 1024,
    PART_GAPS = 4,
    NODE_WINDOW = 2,       /* usual units that a node has at once: one runs, one waits */
    UNIT_FAILURES = 3,     /* after which a unit is given up */
    UNIT_LOSSES = 8,       /* nodes lost while they had the unit, after which it is given up */
    UNIT_REPLICAS_MAX = 7, /* nodes that compute a unit for a vote */
};
#define NODE_SUSPECT_SECONDS 15.0
#define NODE_DEAD_SECONDS 30.0

/* NODE_SUSPECT: silent; it gets no new unit. NODE_DEAD: silent for longer, or its connection broke;
 * its units are assigned again. NODE_QUARANTINED: outvoted; nothing of it counts any more. */
enum node_state { NODE_UP, NODE_SUSPECT, NODE_DEAD, NODE_QUARANTINED };
extern const char *const node_state_names[];
struct cluster_node {
    char name[NODE_NAME_MAX];
    char identity[HASH_LEN]; /* hash of the model, the class and the element types */
    enum node_state state;
    int threads;
    double load;             /* by other work, 0 to 1, as it reports */
    double heard;            /* time of its last heartbeat */
    int n_units;             /* units that it has */
    int64_t done;            /* units */
    double seconds_per_unit; /* mean of the recent ones; 0: it has computed none */
    double part_gap;         /* the longest recent time between two parts of a unit */
};

enum coordinator_event_kind {
    EVENT_SUBMIT,    /* unit, priority, adapter, prefix */
    EVENT_NODE,      /* node, identity, threads, load: it joins, or sends a heartbeat */
    EVENT_NODE_GONE, /* node, text (may be NULL): its connection broke, or it has left */
    EVENT_RESULT,    /* node, unit, hash: of the result */
    EVENT_FAILURE,   /* node, unit, text */
    EVENT_PART,      /* node, unit: a part of the result, or a sign that it is being computed */
    EVENT_WRONG,     /* node, unit, hash, text: its result is known to be wrong */
    EVENT_CANCEL,    /* unit; NULL: all */
    EVENT_TICK
};
struct coordinator_event {
    enum coordinator_event_kind kind;
    double now; /* seconds; never less than before */
    const char *node, *unit, *hash, *text;
    const char *identity, *adapter, *prefix;
    int priority; /* higher ones first */
    int threads;
    double load;
};
enum coordinator_action_kind {
    ACTION_ASSIGN,     /* node, unit */
    ACTION_DONE,       /* unit, hash: of the result, that of the event that decides */
    ACTION_GIVE_UP,    /* unit, text */
    ACTION_CANCEL,     /* node, unit: the node need not compute it any more */
    ACTION_NODE_STATE, /* node, state; of a quarantine also unit, hash (the node's) and text */
};
struct coordinator_action {
    enum coordinator_action_kind kind;
    char node[NODE_NAME_MAX], unit[HASH_LEN], hash[HASH_LEN];
    enum node_state state;
    char text[200];
};
struct coordinator_actions {
    struct coordinator_action *v;
    int n, cap;
};

/* Whether a node may have this name: letters, digits, '_' and '-'. */
bool node_name_is_valid(const char *name);

struct balancer;
struct coordinator_options {
    int replicas; /* nodes that compute each unit, of which more than half must agree; 0: 1 */
    int window;   /* units that a node has at once; 0: NODE_WINDOW */
    /* Units are streamed: a unit without a part for so long, and for PART_GAPS times the node's
     * part_gap, is stalled; one that no node can take for so long is given up. 0: they are not. */
    double stall_seconds;
    const struct balancer *balancer; /* NULL: hybrid */
    const char *identity;            /* only nodes with this identity get units */
};
struct coordinator;
struct coordinator *coordinator_new(const struct coordinator_options *o);
void coordinator_free(struct coordinator *c);
/* A result of a unit that the node does not compute, or that is done, is ignored, as are events of
 * unknown and quarantined nodes. */
void coordinator_step(struct coordinator *c, const struct coordinator_event *e,
                      struct coordinator_actions *out);
const struct cluster_node *coordinator_nodes(const struct coordinator *c, int *n);
/* Whether the node computes the unit, as far as is known. */
bool coordinator_runs(const struct coordinator *c, const char *node, const char *unit);
int coordinator_places(const struct coordinator *c); /* units that could be assigned at once */
int coordinator_unfinished(const struct coordinator *c);

#endif
