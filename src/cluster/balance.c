/*
 * balance: see balance.h.
 *
 * The affinities use rendezvous hashing (Thaler and Ravishankar 1998): every node has a hash of its
 * name and the adapter or prefix, and the largest one wins. When a node is lost, only its own units
 * move.
 */
#include "cluster/balance.h"

#include <string.h>

static int round_robin(const struct cluster_node *nodes, const int *may, int n,
                       const struct balance_unit *unit) {
    (void)nodes;
    return may[unit->turn % n];
}

/* Units at the node, and its load from other work. */
static double node_load(const struct cluster_node *node) {
    return (double)node->n_units / NODE_WINDOW + node->load;
}

static int least_loaded(const struct cluster_node *nodes, const int *may, int n,
                        const struct balance_unit *unit) {
    int best = may[unit->turn % n];
    for (int i = 0; i < n; i++)
        if (node_load(&nodes[may[i]]) < node_load(&nodes[best])) best = may[i];
    return best;
}

/* The units per second of a node: measured, or by its threads until it has computed one. */
static double node_speed(const struct cluster_node *node, double seconds_per_thread) {
    if (node->seconds_per_unit > 0) return 1 / node->seconds_per_unit;
    return MAX(node->threads, 1) / seconds_per_thread;
}

/* The mean time of a thread for a unit over the nodes that have computed some; 1 if none has. */
static double thread_seconds(const struct cluster_node *nodes, const int *may, int n) {
    double sum = 0;
    int known = 0;
    for (int i = 0; i < n; i++) {
        const struct cluster_node *node = &nodes[may[i]];
        if (node->seconds_per_unit <= 0) continue;
        sum += node->seconds_per_unit * MAX(node->threads, 1);
        known++;
    }
    return known ? sum / known : 1;
}

static int capability(const struct cluster_node *nodes, const int *may, int n,
                      const struct balance_unit *unit) {
    double seconds = thread_seconds(nodes, may, n);
    int best = may[unit->turn % n];
    for (int i = 0; i < n; i++)
        if (node_speed(&nodes[may[i]], seconds) > node_speed(&nodes[best], seconds)) best = may[i];
    return best;
}

/* The node that would finish the unit first. */
static int hybrid(const struct cluster_node *nodes, const int *may, int n,
                  const struct balance_unit *unit) {
    double seconds = thread_seconds(nodes, may, n), least = 0;
    int best = -1;
    for (int i = 0; i < n; i++) {
        int k = may[(unit->turn + i) % n];
        double time =
            (1 + nodes[k].n_units + NODE_WINDOW * nodes[k].load) / node_speed(&nodes[k], seconds);
        if (best >= 0 && time >= least) continue;
        best = k;
        least = time;
    }
    return best;
}

static int affinity(const struct cluster_node *nodes, const int *may, int n, const char *key,
                    const struct balance_unit *unit) {
    uint64_t most = 0;
    int best = -1;
    if (!key) return hybrid(nodes, may, n, unit);
    for (int i = 0; i < n; i++) {
        char text[NODE_NAME_MAX + HASH_LEN];
        int len = snprintf(text, sizeof text, "%s %s", nodes[may[i]].name, key);
        uint64_t weight = hash_fnv1a(text, MIN((size_t)len, sizeof text - 1));
        if (best >= 0 && weight <= most) continue;
        best = may[i];
        most = weight;
    }
    return best;
}

static int adapter_affinity(const struct cluster_node *nodes, const int *may, int n,
                            const struct balance_unit *unit) {
    return affinity(nodes, may, n, unit->adapter, unit);
}

static int prefix_affinity(const struct cluster_node *nodes, const int *may, int n,
                           const struct balance_unit *unit) {
    return affinity(nodes, may, n, unit->prefix, unit);
}

const struct balancer balancers[] = {
    {"hybrid", "the node that will finish first, by its speed and its load", hybrid},
    {"round_robin", "one node after another", round_robin},
    {"least_loaded", "the node with the least work", least_loaded},
    {"capability", "the fastest node", capability},
    {"adapter", "always the same node for an adapter", adapter_affinity},
    {"prefix", "always the same node for prompts that begin alike", prefix_affinity},
    {0},
};

const struct balancer *balancer_find(const char *name) {
    for (const struct balancer *b = balancers; b->name; b++)
        if (strcmp(b->name, name) == 0) return b;
    return NULL;
}
