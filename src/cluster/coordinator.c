/*
 * coordinator: see coordinator.h.
 *
 * A unit has a list of attempts, one for each node that computes or has computed it. Attempts whose
 * result counts are ballots: a unit is done when more than half of `replicas` ballots have one
 * hash. A node never gets a unit twice, unless every other node has had it.
 */
#include "cluster/coordinator.h"

#include "cluster/balance.h"

#include <stdlib.h>
#include <string.h>

/* A unit goes to one more node if its attempt takes SLOW_FACTOR times the mean, and SLOW_SECONDS.
 */
static const double SLOW_FACTOR = 8, SLOW_SECONDS = 30;

const char *const node_state_names[] = {"up", "suspect", "dead", "quarantined"};

enum attempt_state { ATTEMPT_RUNS, ATTEMPT_VOTED, ATTEMPT_FAILED, ATTEMPT_LOST };
struct attempt {
    int node;
    enum attempt_state state;
    double since;        /* time of the assignment or, if the unit is streamed, of the last part */
    char hash[HASH_LEN]; /* ATTEMPT_VOTED */
};
struct unit {
    char id[HASH_LEN], adapter[HASH_LEN], prefix[HASH_LEN];
    int priority;
    int64_t order; /* number of the submission */
    struct attempt *attempts;
    int n_attempts, failures, losses;
    double alone_since; /* no node can take it; 0: it has a node, or one will have a place */
};
struct coordinator {
    struct coordinator_options o;
    char identity[HASH_LEN];
    double now;
    struct cluster_node nodes[NODE_MAX];
    int n_nodes;
    struct unit **units; /* unfinished, by priority and order */
    int n_units, cap;
    int64_t submitted, assigned;
    struct coordinator_actions *out;
};

bool node_name_is_valid(const char *name) {
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-");
    return n > 0 && !name[n] && n < NODE_NAME_MAX;
}

/* actions */

static struct coordinator_action *action_add(struct coordinator *c,
                                             enum coordinator_action_kind kind) {
    struct coordinator_actions *a = c->out;
    if (a->n == a->cap) {
        a->cap = 2 * a->cap + 16;
        a->v = xrealloc(a->v, sizeof *a->v * (size_t)a->cap);
    }
    a->v[a->n] = (struct coordinator_action){.kind = kind};
    return &a->v[a->n++];
}

/* nodes */

static int node_find(const struct coordinator *c, const char *name) {
    for (int i = 0; i < c->n_nodes; i++)
        if (strcmp(c->nodes[i].name, name) == 0) return i;
    return -1;
}

static struct coordinator_action *node_set_state(struct coordinator *c, int node,
                                                 enum node_state state) {
    c->nodes[node].state = state;
    struct coordinator_action *a = action_add(c, ACTION_NODE_STATE);
    memcpy(a->node, c->nodes[node].name, sizeof a->node);
    a->state = state;
    return a;
}

/* units */

static int unit_find(const struct coordinator *c, const char *id) {
    for (int i = 0; i < c->n_units; i++)
        if (strcmp(c->units[i]->id, id) == 0) return i;
    return -1;
}

static void unit_free(struct unit *u) {
    free(u->attempts);
    free(u);
}

static struct attempt *unit_attempt(struct unit *u, int node) {
    for (int i = u->n_attempts - 1; i >= 0; i--)
        if (u->attempts[i].node == node) return &u->attempts[i];
    return NULL;
}

static int unit_count(const struct unit *u, enum attempt_state state) {
    int n = 0;
    for (int i = 0; i < u->n_attempts; i++) n += u->attempts[i].state == state;
    return n;
}

static void attempt_end(struct coordinator *c, struct attempt *a, enum attempt_state state) {
    if (a->state == ATTEMPT_RUNS) c->nodes[a->node].n_units--;
    a->state = state;
}

/* An action for a unit at a node. */
static void unit_action(struct coordinator *c, enum coordinator_action_kind kind,
                        const struct unit *u, int node) {
    struct coordinator_action *a = action_add(c, kind);
    memcpy(a->node, c->nodes[node].name, sizeof a->node);
    memcpy(a->unit, u->id, sizeof a->unit);
}

/* Removes a unit that is done or given up; attempts that still run are cancelled. */
static void unit_remove(struct coordinator *c, int index) {
    struct unit *u = c->units[index];
    for (int i = 0; i < u->n_attempts; i++) {
        if (u->attempts[i].state == ATTEMPT_RUNS)
            unit_action(c, ACTION_CANCEL, u, u->attempts[i].node);
        attempt_end(c, &u->attempts[i], ATTEMPT_LOST);
    }
    unit_free(u);
    memmove(c->units + index, c->units + index + 1,
            sizeof *c->units * (size_t)(c->n_units - index - 1));
    c->n_units--;
}

static void unit_give_up(struct coordinator *c, int index, const char *text) {
    struct coordinator_action *a = action_add(c, ACTION_GIVE_UP);
    memcpy(a->unit, c->units[index]->id, sizeof a->unit);
    snprintf(a->text, sizeof a->text, "%s", text);
    unit_remove(c, index);
}

static void submit(struct coordinator *c, const struct coordinator_event *e) {
    if (unit_find(c, e->unit) >= 0) return;
    struct unit *u = xcalloc(1, sizeof *u);
    snprintf(u->id, sizeof u->id, "%s", e->unit);
    snprintf(u->adapter, sizeof u->adapter, "%s", e->adapter ? e->adapter : "");
    snprintf(u->prefix, sizeof u->prefix, "%s", e->prefix ? e->prefix : "");
    u->priority = e->priority;
    u->order = c->submitted++;
    if (c->n_units == c->cap) {
        c->cap = 2 * c->cap + 64;
        c->units = xrealloc(c->units, sizeof *c->units * (size_t)c->cap);
    }
    int at = c->n_units++;
    for (; at > 0 && c->units[at - 1]->priority < u->priority; at--)
        c->units[at] = c->units[at - 1];
    c->units[at] = u;
}

/* votes */

/* The hash that most ballots have, and how many. */
static const char *leading_hash(const struct unit *u, int *votes) {
    const char *best = NULL;
    *votes = 0;
    for (int i = 0; i < u->n_attempts; i++) {
        int n = 0;
        if (u->attempts[i].state != ATTEMPT_VOTED) continue;
        for (int k = 0; k < u->n_attempts; k++)
            n += u->attempts[k].state == ATTEMPT_VOTED &&
                 strcmp(u->attempts[k].hash, u->attempts[i].hash) == 0;
        if (n <= *votes) continue;
        *votes = n;
        best = u->attempts[i].hash;
    }
    return best;
}

static void node_quarantine(struct coordinator *c, const struct unit *u, const struct attempt *a,
                            const char *right) {
    struct coordinator_action *action = node_set_state(c, a->node, NODE_QUARANTINED);
    memcpy(action->unit, u->id, sizeof action->unit);
    memcpy(action->hash, a->hash, sizeof action->hash);
    snprintf(action->text, sizeof action->text, "its result differs from %.16s of the majority",
             right);
}

/* Ends the unit if more than half of the replicas agree. */
static bool unit_decide(struct coordinator *c, int index) {
    struct unit *u = c->units[index];
    int votes;
    const char *hash = leading_hash(u, &votes);
    if (2 * votes <= c->o.replicas) return false;
    struct coordinator_action *done = action_add(c, ACTION_DONE);
    memcpy(done->unit, u->id, sizeof done->unit);
    memcpy(done->hash, hash, sizeof done->hash);
    for (int i = 0; i < u->n_attempts; i++)
        if (u->attempts[i].state == ATTEMPT_VOTED && strcmp(u->attempts[i].hash, hash) != 0)
            node_quarantine(c, u, &u->attempts[i], hash);
    unit_remove(c, index);
    return true;
}

/* events of nodes */

/* The units of a node are assigned again; results of a quarantined node are dropped. */
static void node_lose_units(struct coordinator *c, int node) {
    for (int i = c->n_units - 1; i >= 0; i--) {
        struct unit *u = c->units[i];
        struct attempt *a = unit_attempt(u, node);
        bool quarantined = c->nodes[node].state == NODE_QUARANTINED;
        if (!a || (a->state != ATTEMPT_RUNS && !(quarantined && a->state == ATTEMPT_VOTED)))
            continue;
        attempt_end(c, a, ATTEMPT_LOST);
        if (!quarantined && ++u->losses >= UNIT_LOSSES)
            unit_give_up(c, i, "the nodes that computed it were lost");
    }
}

static void node_heard(struct coordinator *c, const struct coordinator_event *e) {
    int node = node_find(c, e->node);
    if (node < 0) {
        if (c->n_nodes == NODE_MAX) return;
        node = c->n_nodes++;
        c->nodes[node] = (struct cluster_node){.state = NODE_DEAD};
        snprintf(c->nodes[node].name, NODE_NAME_MAX, "%s", e->node);
    }
    struct cluster_node *n = &c->nodes[node];
    if (n->state == NODE_QUARANTINED) return;
    snprintf(n->identity, sizeof n->identity, "%s", e->identity ? e->identity : "");
    n->threads = e->threads;
    n->load = e->load;
    n->heard = c->now;
    if (n->state != NODE_UP) node_set_state(c, node, NODE_UP);
}

static void node_gone(struct coordinator *c, int node, const char *why) {
    if (c->nodes[node].state == NODE_DEAD) return;
    struct coordinator_action *action = node_set_state(c, node, NODE_DEAD);
    snprintf(action->text, sizeof action->text, "%s", why ? why : "");
    node_lose_units(c, node);
}

static void result(struct coordinator *c, const struct coordinator_event *e, int node) {
    struct cluster_node *n = &c->nodes[node];
    int index = unit_find(c, e->unit);
    struct attempt *a = index < 0 ? NULL : unit_attempt(c->units[index], node);
    if (!a || a->state != ATTEMPT_RUNS) return;
    double seconds = c->now - a->since;
    attempt_end(c, a, ATTEMPT_VOTED);
    snprintf(a->hash, sizeof a->hash, "%s", e->hash);
    n->done++;
    n->seconds_per_unit += (seconds - n->seconds_per_unit) / (double)MIN(n->done, 8);
    if (!unit_decide(c, index)) return;
    for (int i = 0; i < c->n_nodes; i++)
        if (c->nodes[i].state == NODE_QUARANTINED) node_lose_units(c, i);
}

static void failure(struct coordinator *c, const struct coordinator_event *e, int node) {
    int index = unit_find(c, e->unit);
    struct attempt *a = index < 0 ? NULL : unit_attempt(c->units[index], node);
    if (!a || a->state != ATTEMPT_RUNS) return;
    attempt_end(c, a, ATTEMPT_FAILED);
    if (++c->units[index]->failures >= UNIT_FAILURES) unit_give_up(c, index, e->text);
}

/* The longest gap is forgotten slowly. */
static void part(struct coordinator *c, const struct coordinator_event *e, int node) {
    int index = unit_find(c, e->unit);
    struct attempt *a = index < 0 ? NULL : unit_attempt(c->units[index], node);
    if (!a || a->state != ATTEMPT_RUNS) return;
    c->nodes[node].part_gap = MAX(c->now - a->since, 0.99 * c->nodes[node].part_gap);
    a->since = c->now;
    c->units[index]->alone_since = 0;
}

static void wrong(struct coordinator *c, const struct coordinator_event *e, int node) {
    struct coordinator_action *a = node_set_state(c, node, NODE_QUARANTINED);
    snprintf(a->unit, sizeof a->unit, "%s", e->unit);
    snprintf(a->hash, sizeof a->hash, "%s", e->hash);
    snprintf(a->text, sizeof a->text, "%s", e->text);
    node_lose_units(c, node);
}

static void node_events(struct coordinator *c, const struct coordinator_event *e) {
    int node = node_find(c, e->node);
    if (node < 0 || c->nodes[node].state == NODE_QUARANTINED) return;
    if (e->kind == EVENT_NODE_GONE) {
        node_gone(c, node, e->text);
        return;
    }
    if (e->kind == EVENT_WRONG) {
        wrong(c, e, node);
        return;
    }
    c->nodes[node].heard = c->now;
    if (e->kind == EVENT_RESULT)
        result(c, e, node);
    else if (e->kind == EVENT_PART)
        part(c, e, node);
    else
        failure(c, e, node);
}

static void silence_check(struct coordinator *c) {
    for (int i = 0; i < c->n_nodes; i++) {
        double silent = c->now - c->nodes[i].heard;
        if (c->nodes[i].state == NODE_UP && silent >= NODE_SUSPECT_SECONDS)
            node_set_state(c, i, NODE_SUSPECT);
        if (c->nodes[i].state == NODE_SUSPECT && silent >= NODE_DEAD_SECONDS) node_gone(c, i, NULL);
    }
}

/* assignment */

static bool attempt_is_slow(const struct coordinator *c, const struct attempt *a) {
    double seconds = c->now - a->since, mean = c->nodes[a->node].seconds_per_unit;
    if (c->o.stall_seconds > 0)
        return seconds >= MAX(c->o.stall_seconds, PART_GAPS * c->nodes[a->node].part_gap);
    return seconds >= SLOW_SECONDS && seconds >= SLOW_FACTOR * mean;
}

/* The attempts that a unit still needs: for a vote those without which no hash can get more than
 * half, and one for each that is slow. */
static int attempts_missing(const struct coordinator *c, const struct unit *u) {
    int votes, slow = 0, running = unit_count(u, ATTEMPT_RUNS);
    leading_hash(u, &votes);
    for (int i = 0; i < u->n_attempts; i++)
        slow += u->attempts[i].state == ATTEMPT_RUNS && attempt_is_slow(c, &u->attempts[i]);
    int voted = unit_count(u, ATTEMPT_VOTED), needed = MAX(c->o.replicas - voted, 0);
    if (voted >= c->o.replicas) needed = c->o.replicas / 2 + 1 - votes; // a tie: one more ballot
    return needed - (running - slow);
}

/* The nodes that may get the unit. Those that had it already may only if no other node is left.
 * *others: nodes that have not had it, also those without a place. */
static int nodes_for(const struct coordinator *c, struct unit *u, int *may, int *others) {
    int n = 0;
    *others = 0;
    for (int i = 0; i < c->n_nodes; i++) {
        const struct cluster_node *node = &c->nodes[i];
        if (node->state != NODE_UP || strcmp(node->identity, c->identity) != 0) continue;
        if (unit_attempt(u, i)) continue;
        ++*others;
        if (node->n_units < c->o.window) may[n++] = i;
    }
    if (*others > 0) return n;
    for (int i = 0; i < c->n_nodes; i++) {
        const struct attempt *a = unit_attempt(u, i);
        if (a && a->state != ATTEMPT_RUNS && a->state != ATTEMPT_VOTED &&
            c->nodes[i].state == NODE_UP && c->nodes[i].n_units < c->o.window)
            may[n++] = i;
    }
    return n;
}

static bool unit_assign(struct coordinator *c, struct unit *u) {
    int may[NODE_MAX], others, n = nodes_for(c, u, may, &others);
    if (n == 0 && others == 0 && u->alone_since <= 0) u->alone_since = c->now;
    if (n == 0) return false;
    u->alone_since = 0;
    const struct balance_unit b = {.adapter = *u->adapter ? u->adapter : NULL,
                                   .prefix = *u->prefix ? u->prefix : NULL,
                                   .turn = c->assigned++};
    int node = c->o.balancer->choose(c->nodes, may, n, &b);
    u->attempts = xrealloc(u->attempts, sizeof *u->attempts * (size_t)(u->n_attempts + 1));
    u->attempts[u->n_attempts++] =
        (struct attempt){.node = node, .state = ATTEMPT_RUNS, .since = c->now};
    c->nodes[node].n_units++;
    unit_action(c, ACTION_ASSIGN, u, node);
    return true;
}

/* Assigns slow attempts to their nodes again: the message or its result may be lost. */
static void slow_assign_again(struct coordinator *c, struct unit *u) {
    for (int i = 0; i < u->n_attempts; i++) {
        struct attempt *a = &u->attempts[i];
        if (a->state != ATTEMPT_RUNS || c->nodes[a->node].state != NODE_UP ||
            !attempt_is_slow(c, a))
            continue;
        a->since = c->now;
        unit_action(c, ACTION_ASSIGN, u, a->node);
    }
}

/* Gives up the streamed units that no node can take for too long. */
static void alone_give_up(struct coordinator *c) {
    for (int i = c->n_units - 1; c->o.stall_seconds > 0 && i >= 0; i--) {
        double since = c->units[i]->alone_since;
        if (since > 0 && c->now - since >= c->o.stall_seconds)
            unit_give_up(c, i, "no node can take it");
    }
}

static void units_assign(struct coordinator *c) {
    int places = coordinator_places(c);
    for (int i = 0; i < c->n_units && (places > 0 || c->o.stall_seconds > 0); i++) {
        struct unit *u = c->units[i];
        for (int missing = attempts_missing(c, u); missing > 0 && unit_assign(c, u); missing--)
            places--;
    }
    alone_give_up(c);
    for (int i = 0; i < c->n_units; i++) slow_assign_again(c, c->units[i]);
}

/* the interface */

struct coordinator *coordinator_new(const struct coordinator_options *o) {
    struct coordinator *c = xcalloc(1, sizeof *c);
    c->o = *o;
    c->o.replicas = MIN(MAX(o->replicas, 1), UNIT_REPLICAS_MAX);
    if (!o->window) c->o.window = NODE_WINDOW;
    if (!o->balancer) c->o.balancer = &balancers[0];
    snprintf(c->identity, sizeof c->identity, "%s", o->identity ? o->identity : "");
    return c;
}

void coordinator_free(struct coordinator *c) {
    if (!c) return;
    for (int i = 0; i < c->n_units; i++) unit_free(c->units[i]);
    free(c->units);
    free(c);
}

void coordinator_step(struct coordinator *c, const struct coordinator_event *e,
                      struct coordinator_actions *out) {
    c->out = out;
    c->now = e->now;
    switch (e->kind) {
    case EVENT_SUBMIT:
        submit(c, e);
        break;
    case EVENT_NODE:
        node_heard(c, e);
        break;
    case EVENT_CANCEL:
        for (int i = c->n_units - 1; i >= 0; i--)
            if (!e->unit || strcmp(c->units[i]->id, e->unit) == 0) unit_remove(c, i);
        break;
    case EVENT_TICK:
        silence_check(c);
        break;
    default:
        node_events(c, e);
    }
    units_assign(c);
}

const struct cluster_node *coordinator_nodes(const struct coordinator *c, int *n) {
    *n = c->n_nodes;
    return c->nodes;
}

int coordinator_unfinished(const struct coordinator *c) {
    return c->n_units;
}

int coordinator_places(const struct coordinator *c) {
    int n = 0;
    for (int i = 0; i < c->n_nodes; i++)
        if (c->nodes[i].state == NODE_UP && strcmp(c->nodes[i].identity, c->identity) == 0)
            n += MAX(c->o.window - c->nodes[i].n_units, 0);
    return n;
}

bool coordinator_runs(const struct coordinator *c, const char *node, const char *unit) {
    int index = unit_find(c, unit), n = node_find(c, node);
    const struct attempt *a = index < 0 || n < 0 ? NULL : unit_attempt(c->units[index], n);
    return a && a->state == ATTEMPT_RUNS;
}
