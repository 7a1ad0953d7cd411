/*
 * cluster: the side that has the calls (cluster.h).
 *
 * It translates messages of the bus into events of the coordinator, and the coordinator's actions
 * into messages. Everything happens in the steps of the engine. With --verify pbft, a result that
 * the coordinator has decided is given to the engine when the group of nodes has committed its
 * hash.
 */
#define _GNU_SOURCE
#include "cluster/cluster.h"

#include "cluster/balance.h"
#include "cluster/pbft_members.h"
#include "cluster/unit.h"
#include "cluster/wire.h"

#include <pthread.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum { PREFIX_TOKENS = 32, UNIT_BYTES = 512 << 10 };
static const double TICK_SECONDS = 1, WAIT_SECONDS = 60, // WAIT: between notes about missing nodes
    COMMIT_SECONDS = 60; // until a unit that is not committed is computed again
/* For streams: a unit without parts for STALL_SECONDS goes to another node. */
static const double STREAM_TICK_SECONDS = 0.25, STALL_SECONDS = 1;

struct client_unit {
    char id[HASH_LEN];
    struct engine_request **calls; /* [n]; NULL: cancelled */
    int n;
    struct buf text;            /* the message for the nodes */
    char sender[NODE_NAME_MAX]; /* streamed: the node that added the last tokens */
    bool assigned;
    double decided_at; /* the calls have results, which the nodes commit; 0: not decided */
};
/* A streamed call that the engine computes after a node has sent tokens of it. */
struct doubt {
    const struct engine_request *call;
    char sender[NODE_NAME_MAX], other[NODE_NAME_MAX]; /* other: it has sent other tokens; or "" */
    char unit[HASH_LEN];
};
struct cluster {
    struct bus *bus;
    struct coordinator *coordinator;
    struct coordinator_actions actions;
    struct local_nodes *local;
    struct pbft_members *members; /* NULL: --verify majority */
    int replicas, n_expected;     /* n_expected: nodes that were started */
    char identity[HASH_LEN];
    double ticked, complained;
    uint64_t n_formed, n_assigned; /* units */
    char results[BUS_NAME_MAX];    /* queue for results */
    bool failed;

    bool streams;
    char parts[BUS_NAME_MAX]; /* subject for parts */
    struct doubt *doubts;     /* [n_doubts] */
    int n_doubts, doubts_cap;
    json_t *infos; /* node: {level, adapters}, as it reports them */
    char *address;
    const char *balancer;
    int64_t n_here;       /* calls that were computed here */
    int64_t n_again;      /* assignments of units that had been assigned before */
    pthread_mutex_t lock; /* protects `status` */
    json_t *status;

    struct engine *engine;
    struct engine_request **waiting; /* [n_waiting] calls that are in no unit yet, in their order */
    int n_waiting, waiting_cap;
    struct client_unit **units; /* [n_units] unfinished ones */
    int n_units, units_cap;
};

/* units */

static int unit_index(const struct cluster *c, const char *id) {
    for (int i = 0; i < c->n_units; i++)
        if (strcmp(c->units[i]->id, id) == 0) return i;
    return -1;
}

static void step(struct cluster *c, struct coordinator_event e) {
    e.now = clock_now();
    coordinator_step(c->coordinator, &e, &c->actions);
}

/* The hash of the adapter, if all calls have the same one. */
static const char *calls_adapter(struct engine_request *const *calls, int n) {
    for (int i = 0; i < n; i++)
        if (calls[i]->adapter != calls[0]->adapter || calls[i]->mix) return NULL;
    return calls[0]->adapter ? calls[0]->adapter->hash : NULL;
}

/* The hash of the first tokens of the prompts, if all calls have them in common. */
static bool calls_prefix(struct engine_request *const *calls, int n, char out[HASH_LEN]) {
    const size_t size = PREFIX_TOKENS * sizeof *calls[0]->prompt;
    for (int i = 0; i < n; i++)
        if (calls[i]->n_prompt < PREFIX_TOKENS ||
            memcmp(calls[i]->prompt, calls[0]->prompt, size) != 0)
            return false;
    sha256_bytes(calls[0]->prompt, size, out);
    return true;
}

/* Writes the first calls that are waiting, at most n and UNIT_BYTES, but at least one; returns
 * their number. */
static int calls_write(const struct cluster *c, int n, struct buf *out) {
    for (;; n = (n + 1) / 2) {
        out->len = 0;
        unit_calls_write(c->waiting, n, out);
        if (n == 1 || out->len <= UNIT_BYTES) return n;
    }
}

/* Makes a unit of the first n waiting calls, or of less if they are long. */
static void unit_form(struct cluster *c, int n) {
    struct client_unit *u = xcalloc(1, sizeof *u);
    struct buf body = {0};
    n = calls_write(c, n, &body);
    u->n = n;
    u->calls = xcalloc((size_t)n, sizeof(struct engine_request *));
    memcpy(u->calls, c->waiting, sizeof(struct engine_request *) * (size_t)n);
    c->n_waiting -= n;
    memmove(c->waiting, c->waiting + n, sizeof(struct engine_request *) * (size_t)c->n_waiting);
    unit_id(u->calls, n, c->identity, u->id);
    if (c->streams || unit_index(c, u->id) >= 0) { // the same calls may be computed already
        char text[HASH_LEN + BUS_NAME_MAX + 32];
        int len = snprintf(text, sizeof text, "%s %s %llu", u->id, c->results,
                           (unsigned long long)c->n_formed);
        sha256_bytes(text, (size_t)len, u->id);
    }
    json_t *head = json_pack("{s:s,s:s}", "unit", u->id, "results", c->results);
    if (c->streams) json_object_set_new(head, "parts", json_string(c->parts));
    wire_write(&u->text, head, body.data, body.len);
    buf_release(&body);
    c->n_formed++;
    if (c->n_units == c->units_cap) {
        c->units_cap = 2 * c->units_cap + 16;
        c->units = xrealloc(c->units, sizeof(struct client_unit *) * (size_t)c->units_cap);
    }
    c->units[c->n_units++] = u;
    char prefix[HASH_LEN];
    step(c,
         (struct coordinator_event){.kind = EVENT_SUBMIT,
                                    .unit = u->id,
                                    .adapter = calls_adapter(u->calls, n),
                                    .prefix = calls_prefix(u->calls, n, prefix) ? prefix : NULL});
}

static void unit_results_release(const struct client_unit *u) {
    for (int i = 0; i < u->n; i++)
        if (u->calls[i]) engine_request_release(u->calls[i]);
}

/* Units that have been decided before `time` and are not committed are computed again. */
static void units_retry(struct cluster *c, double time) {
    for (int i = 0; i < c->n_units; i++) {
        struct client_unit *u = c->units[i];
        if (u->decided_at <= 0 || u->decided_at > time) continue;
        unit_results_release(u);
        u->decided_at = 0;
        step(c, (struct coordinator_event){.kind = EVENT_SUBMIT, .unit = u->id});
    }
}

/* Divides the waiting calls among the free places of the nodes; with streams, each is a unit. */
static void units_form(struct cluster *c) {
    while (c->streams && c->n_waiting > 0) unit_form(c, 1);
    int places = coordinator_places(c->coordinator) / c->replicas;
    if (c->members && !pbft_members_complete(c->members)) return;
    for (; places > 0 && c->n_waiting > 0; places--)
        unit_form(c, MIN((c->n_waiting + places - 1) / places, UNIT_CALLS));
}

static void unit_free(struct client_unit *u) {
    buf_release(&u->text);
    free(u->calls);
    free(u);
}

static void unit_remove(struct cluster *c, int index) {
    unit_free(c->units[index]);
    c->units[index] = c->units[--c->n_units];
}

static void doubt_add(struct cluster *c, const struct client_unit *u, const char *other) {
    if (c->n_doubts == c->doubts_cap) {
        c->doubts_cap = 2 * c->doubts_cap + 16;
        c->doubts = xrealloc(c->doubts, sizeof *c->doubts * (size_t)c->doubts_cap);
    }
    struct doubt *d = &c->doubts[c->n_doubts++];
    *d = (struct doubt){.call = u->calls[0]};
    memcpy(d->sender, u->sender, sizeof d->sender);
    snprintf(d->other, sizeof d->other, "%s", other);
    memcpy(d->unit, u->id, sizeof d->unit);
}

/* Removes the doubt about a call; false: no doubt is stored. */
static bool doubt_take(struct cluster *c, const struct engine_request *r, struct doubt *out) {
    for (int i = 0; i < c->n_doubts; i++)
        if (c->doubts[i].call == r) {
            *out = c->doubts[i];
            c->doubts[i] = c->doubts[--c->n_doubts];
            return true;
        }
    return false;
}

/* Computes a call here. */
static void call_return(struct cluster *c, struct engine_request *r) {
    struct error err;
    struct doubt ignored;
    c->n_here++;
    if (engine_remote_return(c->engine, r, &err) == OK) return;
    doubt_take(c, r, &ignored);
    log_warn("a call has no result: %s", err.text);
    r->finish = FINISH_NONE;
    engine_remote_finish(c->engine, r);
}

static void unit_return(struct cluster *c, int index) {
    struct client_unit *u = c->units[index];
    if (*u->sender) doubt_add(c, u, "");
    if (u->decided_at > 0) unit_results_release(u);
    for (int i = 0; i < u->n; i++)
        if (u->calls[i]) call_return(c, u->calls[i]);
    unit_remove(c, index);
}

/* actions */

static int unit_assign(struct cluster *c, const struct coordinator_action *a, struct error *err) {
    int index = unit_index(c, a->unit);
    if (index < 0) return OK;
    char *queue = xasprintf("%s%s", QUEUE_WORK, a->node);
    struct client_unit *u = c->units[index];
    // with the queue, because another command may assign the same unit to the same node
    char *id = xasprintf("%s %s %llu", u->id, c->results, (unsigned long long)c->n_assigned++);
    c->n_again += u->assigned;
    u->assigned = true;
    int rc = bus_enqueue(c->bus, queue, id, u->text.data, u->text.len, err);
    free(id);
    free(queue);
    if (rc != ERR_MEMORY) return rc;
    log_warn("%d calls are computed here: %s", u->n, err->text);
    step(c, (struct coordinator_event){.kind = EVENT_CANCEL, .unit = u->id});
    unit_return(c, index);
    return OK;
}

static int unit_cancel(struct cluster *c, const struct coordinator_action *a, struct error *err) {
    char *subject = xasprintf("%s%s", SUBJECT_NODE, a->node);
    int rc = wire_publish(c->bus, subject,
                          json_pack("{s:s,s:s}", "cancel", a->unit, "results", c->results), NULL, 0,
                          err);
    free(subject);
    return rc;
}

/* The calls have the results of the message that decided. */
static void unit_finish(void *ctx, const char *unit) {
    struct cluster *c = ctx;
    int index = unit_index(c, unit);
    if (index < 0 || (c->members && c->units[index]->decided_at <= 0)) return;
    const struct client_unit *u = c->units[index];
    for (int i = 0; i < u->n; i++)
        if (u->calls[i]) engine_remote_finish(c->engine, u->calls[i]);
    unit_remove(c, index);
}

static void unit_decided(struct cluster *c, const struct coordinator_action *a) {
    int index = unit_index(c, a->unit);
    if (index < 0) return;
    if (!c->members) {
        unit_finish(c, a->unit);
        return;
    }
    const struct client_unit *u = c->units[index];
    for (int i = 0; i < u->n; i++)
        if (u->calls[i]) u->calls[i]->done = false; // its owner must not use it yet
    c->units[index]->decided_at = clock_now();
    pbft_members_propose(c->members, a->unit, a->hash);
}

static void unit_give_up(struct cluster *c, const struct coordinator_action *a) {
    int index = unit_index(c, a->unit);
    if (index < 0) return;
    double now = clock_now();
    if (!c->streams || now - c->complained >= WAIT_SECONDS || c->complained <= 0)
        log_warn("no node could compute %d calls, which are computed here: %s", c->units[index]->n,
                 a->text);
    if (c->streams) c->complained = now;
    unit_return(c, index);
}

static int node_changed(struct cluster *c, const struct coordinator_action *a, struct error *err) {
    if (a->state == NODE_UP) return OK;
    log_warn("node '%s' is %s%s%s", a->node, node_state_names[a->state], *a->text ? ": " : "",
             a->text);
    if (a->state == NODE_SUSPECT) return OK;
    char *queue = xasprintf("%s%s", QUEUE_WORK, a->node);
    int rc = bus_purge(c->bus, queue, err);
    free(queue);
    return rc;
}

static int actions_do(struct cluster *c, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < c->actions.n; i++) {
        const struct coordinator_action action = c->actions.v[i], *a = &action; // v may move
        switch (a->kind) {
        case ACTION_ASSIGN:
            rc = unit_assign(c, a, err);
            break;
        case ACTION_DONE:
            unit_decided(c, a);
            break;
        case ACTION_GIVE_UP:
            unit_give_up(c, a);
            break;
        case ACTION_CANCEL:
            rc = unit_cancel(c, a, err);
            break;
        case ACTION_NODE_STATE:
            rc = node_changed(c, a, err);
            break;
        }
    }
    c->actions.n = 0;
    if (rc == OK && c->members) rc = pbft_members_send(c->members, unit_finish, c, err);
    return rc;
}

/* messages */

/* Keeps the facts that a node reports about itself, for the status. */
static void info_set(struct cluster *c, const char *name, const json_t *v) {
    json_t *adapters = json_object_get(v, "adapters");
    if (!json_object_get(c->infos, name) && json_object_size(c->infos) >= NODE_MAX) return;
    json_object_set_new(c->infos, name,
                        json_pack("{s:s,s:o}", "level", json_get_string(v, "level"), "adapters",
                                  json_is_array(adapters) ? json_incref(adapters) : json_array()));
}

static bool node_is_lost(void *ctx, const char *name) {
    const struct cluster *c = ctx;
    int n;
    const struct cluster_node *nodes = coordinator_nodes(c->coordinator, &n);
    for (int i = 0; i < n; i++)
        if (strcmp(nodes[i].name, name) == 0)
            return nodes[i].state == NODE_DEAD || nodes[i].state == NODE_QUARANTINED;
    return true;
}

/* Whether a node may compute: with --verify pbft only the members of the group. */
static bool node_is_admitted(struct cluster *c, const json_t *v) {
    bool made;
    if (!c->members) return true;
    if (strcmp(json_get_string(v, "identity"), c->identity) != 0) return false;
    bool member = pbft_members_heard(c->members, json_get_string(v, "name"),
                                     json_get_string(v, "key"), node_is_lost, c, &made);
    if (made) units_retry(c, clock_now());
    return member;
}

static void node_heard(struct cluster *c, const json_t *v) {
    const char *name = json_get_string(v, "name");
    if (!node_name_is_valid(name)) return;
    if (json_is_true(json_object_get(v, "leaves"))) {
        step(c, (struct coordinator_event){
                    .kind = EVENT_NODE_GONE, .node = name, .text = "it has left"});
        return;
    }
    if (!node_is_admitted(c, v)) return;
    if (c->streams) info_set(c, name, v);
    step(c, (struct coordinator_event){.kind = EVENT_NODE,
                                       .node = name,
                                       .identity = json_get_string(v, "identity"),
                                       .threads =
                                           (int)MIN(MAX(json_get_number(v, "threads"), 1), 4096),
                                       .load = MIN(MAX(json_get_number(v, "load"), 0), 1)});
}

static bool unit_is_decided(const struct cluster *c, const char *id) {
    for (int i = 0; i < c->actions.n; i++)
        if (c->actions.v[i].kind == ACTION_DONE && strcmp(c->actions.v[i].unit, id) == 0)
            return true;
    return false;
}

/* A node has sent other tokens than were sent before. The engine computes them, too. */
static void unit_doubt(struct cluster *c, int index, const char *node) {
    struct client_unit *u = c->units[index];
    log_warn("nodes '%s' and '%s' have sent different tokens for one call, which is computed here",
             u->sender, node);
    doubt_add(c, u, node);
    step(c, (struct coordinator_event){.kind = EVENT_CANCEL, .unit = u->id});
    *u->sender = 0;
    unit_return(c, index);
}

/* Continues after a part or the result of a streamed unit was merged. Returns whether it could be.
 */
static bool stream_continue(struct cluster *c, int index, const char *node, int rc, int32_t before,
                            const struct error *err) {
    struct client_unit *u = c->units[index];
    struct engine_request *r = u->calls[0];
    if (rc == OK && r->n_out > before) snprintf(u->sender, sizeof u->sender, "%s", node);
    if (rc == ERR_MISMATCH) {
        unit_doubt(c, index, node);
    } else if (rc != OK) {
        step(c, (struct coordinator_event){
                    .kind = EVENT_FAILURE, .node = node, .unit = u->id, .text = err->text});
    }
    return rc == OK;
}

static void part_heard(struct cluster *c, const json_t *v, const uint8_t *body, size_t len) {
    const char *node = json_get_string(v, "node");
    int index = unit_index(c, json_get_string(v, "unit"));
    struct error err;
    if (index < 0 || !coordinator_runs(c->coordinator, node, c->units[index]->id)) return;
    step(c,
         (struct coordinator_event){.kind = EVENT_PART, .node = node, .unit = c->units[index]->id});
    if (len == 0) return;
    struct engine_request *r = c->units[index]->calls[0];
    json_int_t at = json_integer_value(json_object_get(v, "at"));
    int32_t before = r->n_out;
    int rc = at < 0 || at > INT32_MAX ? error_set(&err, ERR_FORMAT, "a part has a wrong position")
                                      : unit_part_merge(c->engine, body, len, (int32_t)at, r, &err);
    if (stream_continue(c, index, node, rc, before, &err)) r->n_generated = r->n_out;
}

/* The result of a streamed unit. */
static void stream_ended(struct cluster *c, int index, const json_t *v, const uint8_t *body,
                         size_t len) {
    const struct client_unit *u = c->units[index];
    const char *node = json_get_string(v, "node");
    struct engine_request *r = u->calls[0];
    struct error err;
    char hash[HASH_LEN];
    if (!coordinator_runs(c->coordinator, node, u->id)) return;
    int32_t before = r->n_out;
    int rc = unit_result_merge(c->engine, body, len, r, &err);
    if (!stream_continue(c, index, node, rc, before, &err)) return;
    r->n_cached = (int32_t)MIN(MAX(json_get_number(v, "cached"), 0), r->n_prompt);
    r->n_dropped = (int32_t)MIN(MAX(json_get_number(v, "dropped"), 0), INT32_MAX);
    sha256_bytes(body, len, hash);
    step(c, (struct coordinator_event){
                .kind = EVENT_RESULT, .node = node, .unit = u->id, .hash = hash});
}

/* A result without a right vote is a failure. */
static bool vote_is_right(struct cluster *c, const json_t *v, const char *hash) {
    return !c->members ||
           pbft_members_vote(c->members, json_get_string(v, "node"), json_get_string(v, "vote"),
                             json_get_string(v, "unit"), hash);
}

/* A unit is decided by the result that gives a hash its majority, so the results of other messages
 * need not be kept. */
static void result_heard(struct cluster *c, const json_t *v, const uint8_t *body, size_t len) {
    struct coordinator_event e = {.kind = EVENT_FAILURE,
                                  .node = json_get_string(v, "node"),
                                  .unit = json_get_string(v, "unit"),
                                  .text = json_get_string(v, "error")};
    int index = unit_index(c, e.unit);
    char hash[HASH_LEN];
    struct error err;
    if (c->streams && !*e.text) {
        if (index >= 0) stream_ended(c, index, v, body, len);
        return;
    }
    bool is_right = false;
    if (!*e.text && hash_is_valid(e.unit)) {
        sha256_bytes(body, len, hash);
        is_right = vote_is_right(c, v, hash); // late ones are votes too
    }
    if (index < 0 || c->units[index]->decided_at > 0) return; // it is done
    const struct client_unit *u = c->units[index];
    if (!*e.text && !is_right) {
        e.text = "its result is not signed";
    } else if (!*e.text) {
        if (unit_results_parse(c->engine, body, len, u->calls, u->n, &err) != OK) {
            e.text = err.text;
        } else {
            e.kind = EVENT_RESULT;
            e.hash = hash;
        }
    }
    step(c, e);
    if (e.kind == EVENT_RESULT && !unit_is_decided(c, u->id)) unit_results_release(u);
}

static const struct adapter *call_adapter(const struct engine_request *r, const char *hash) {
    if (r && r->adapter && strcmp(r->adapter->hash, hash) == 0) return r->adapter;
    for (int k = 0; r && k < r->n_mix; k++)
        if (r->mix[k].adapter && strcmp(r->mix[k].adapter->hash, hash) == 0)
            return r->mix[k].adapter;
    return NULL;
}

static const struct adapter *adapter_find(const struct cluster *c, const char *hash) {
    for (int i = 0; i < c->n_units; i++)
        for (int k = 0; k < c->units[i]->n; k++) {
            const struct adapter *a = call_adapter(c->units[i]->calls[k], hash);
            if (a) return a;
        }
    return NULL;
}

/* Sends an adapter to the node that needs it, or the reason why it cannot. */
static int adapter_send(struct cluster *c, const json_t *v, struct error *err) {
    const char *node = json_get_string(v, "node"), *hash = json_get_string(v, "hash");
    if (!node_name_is_valid(node)) return OK;
    const struct adapter *a = adapter_find(c, hash);
    struct error failure = {0};
    struct buf bytes = {0};
    char *subject = xasprintf("%s%s", SUBJECT_NODE, node);
    if (!a) error_set(&failure, ERR_MISSING, "no call has this adapter");
    int rc = OK;
    if (!a || adapter_to_bytes(a, &bytes, &failure) != OK)
        rc =
            wire_publish(c->bus, subject,
                         json_pack("{s:s,s:s}", "hash", hash, "error", failure.text), NULL, 0, err);
    for (size_t at = 0; rc == OK && at < bytes.len; at += PART_BYTES)
        rc = wire_publish(c->bus, subject,
                          json_pack("{s:s,s:I,s:I}", "hash", hash, "at", (json_int_t)at, "size",
                                    (json_int_t)bytes.len),
                          bytes.data + at, MIN(bytes.len - at, PART_BYTES), err);
    buf_release(&bytes);
    free(subject);
    return rc;
}

static int message_handle(struct cluster *c, const struct bus_message *m, struct error *err) {
    const uint8_t *body;
    size_t len;
    int rc = OK;
    json_t *v = wire_read(m, &body, &len);
    if (c->members) pbft_members_message(c->members, m);
    if (v && strcmp(m->subject, SUBJECT_NODES) == 0) node_heard(c, v);
    if (v && strcmp(m->subject, c->results) == 0) result_heard(c, v, body, len);
    if (v && strcmp(m->subject, SUBJECT_WANTED) == 0) rc = adapter_send(c, v, err);
    if (v && strcmp(m->subject, c->parts) == 0) part_heard(c, v, body, len);
    json_decref(v);
    return rc == OK && m->item ? bus_ack(c->bus, m->item, err) : rc;
}

/* Handles the messages that have arrived, after waiting for one. */
static int messages_handle(struct cluster *c, double seconds, struct error *err) {
    struct bus_message m;
    int rc = bus_receive(c->bus, seconds, &m, err);
    while (rc == 1) {
        rc = message_handle(c, &m, err);
        if (rc == OK) rc = actions_do(c, err);
        if (rc == OK) rc = bus_receive(c->bus, 0, &m, err);
    }
    return rc;
}

/* running */

static void process_gone(void *ctx, const char *name) {
    step(ctx, (struct coordinator_event){.kind = EVENT_NODE_GONE, .node = name});
}

/* Nodes that may compute units. */
static int nodes_up(const struct cluster *c) {
    int n, up = 0;
    const struct cluster_node *nodes = coordinator_nodes(c->coordinator, &n);
    for (int i = 0; i < n; i++)
        up += nodes[i].state == NODE_UP && strcmp(nodes[i].identity, c->identity) == 0;
    return up;
}

static json_t *node_json(const struct cluster *c, const struct cluster_node *n) {
    const json_t *info = json_object_get(c->infos, n->name);
    json_t *adapters = json_object_get(info, "adapters");
    return json_pack("{s:s,s:s,s:b,s:i,s:s,s:f,s:i,s:I,s:f,s:f,s:o}", "name", n->name, "state",
                     node_state_names[n->state], "usable", strcmp(n->identity, c->identity) == 0,
                     "threads", n->threads, "level", json_get_string(info, "level"), "load",
                     n->load, "units", n->n_units, "done", (json_int_t)n->done, "seconds_per_unit",
                     n->seconds_per_unit, "heard", clock_now() - n->heard, "adapters",
                     adapters ? json_deep_copy(adapters) : json_array());
}

static void status_update(struct cluster *c) {
    int n;
    const struct cluster_node *nodes = coordinator_nodes(c->coordinator, &n);
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, node_json(c, &nodes[i]));
    json_t *status =
        json_pack("{s:s,s:s,s:b,s:I,s:I,s:o}", "address", c->address, "balancer", c->balancer,
                  "failed", c->failed, "computed_here", (json_int_t)c->n_here, "assigned_again",
                  (json_int_t)c->n_again, "nodes", list);
    pthread_mutex_lock(&c->lock);
    json_decref(c->status);
    c->status = status;
    pthread_mutex_unlock(&c->lock);
}

json_t *cluster_status_json(struct cluster *c) {
    pthread_mutex_lock(&c->lock);
    json_t *copy = json_deep_copy(c->status);
    pthread_mutex_unlock(&c->lock);
    return copy;
}

static int nodes_check(struct cluster *c, struct error *err) {
    double now = clock_now();
    if (c->local && local_nodes_check(c->local, process_gone, c, err) != OK) return err->code;
    if (now - c->ticked < (c->streams ? STREAM_TICK_SECONDS : TICK_SECONDS)) return OK;
    c->ticked = now;
    step(c, (struct coordinator_event){.kind = EVENT_TICK});
    if (c->streams) status_update(c);
    units_retry(c, now - COMMIT_SECONDS);
    int up = nodes_up(c);
    if (up >= c->replicas) c->complained = now;
    if (now - c->complained < WAIT_SECONDS) return OK;
    c->complained = now;
    log_warn("waiting for nodes: %d with this model and class are connected, and each call needs "
             "%d",
             up, c->replicas);
    return OK;
}

/* Everything that is not done is computed here. */
static void cluster_fail(struct cluster *c, const struct error *err) {
    log_warn("the cluster has failed, so the rest is computed here: %s", err->text);
    c->failed = true;
    while (c->n_units > 0) unit_return(c, c->n_units - 1);
    for (int i = 0; i < c->n_waiting; i++) call_return(c, c->waiting[i]);
    c->n_waiting = 0;
    if (c->streams) status_update(c);
}

/* the remote of the engine */

static void remote_submit(void *ctx, struct engine_request *r) {
    struct cluster *c = ctx;
    if (c->n_waiting == c->waiting_cap) {
        c->waiting_cap = 2 * c->waiting_cap + 64;
        c->waiting = xrealloc(c->waiting, sizeof(struct engine_request *) * (size_t)c->waiting_cap);
    }
    c->waiting[c->n_waiting++] = r;
}

static void remote_step(void *ctx, double seconds) {
    struct cluster *c = ctx;
    struct error err;
    int rc = OK;
    if (c->failed) {
        for (int i = 0; i < c->n_waiting; i++) call_return(c, c->waiting[i]);
        c->n_waiting = 0;
        return;
    }
    if (clock_now() - c->ticked > NODE_SUSPECT_SECONDS / 2) { // heartbeats since the last step
        rc = messages_handle(c, 0, &err);
        c->ticked = c->complained = clock_now();
    }
    units_form(c);
    if (rc == OK) rc = actions_do(c, &err);
    if (rc == OK) rc = messages_handle(c, seconds, &err);
    if (rc == OK) rc = nodes_check(c, &err);
    if (rc == OK) rc = actions_do(c, &err);
    if (rc != OK) cluster_fail(c, &err);
}

static void remote_cancel(void *ctx, struct engine_request *r) {
    struct cluster *c = ctx;
    struct doubt ignored;
    if (doubt_take(c, r, &ignored)) return;
    for (int i = 0; i < c->n_waiting; i++)
        if (c->waiting[i] == r) {
            memmove(c->waiting + i, c->waiting + i + 1,
                    sizeof(struct engine_request *) * (size_t)(c->n_waiting - i - 1));
            c->n_waiting--;
            return;
        }
    for (int i = 0; i < c->n_units; i++)
        for (int k = 0; k < c->units[i]->n; k++)
            if (c->units[i]->calls[k] == r) c->units[i]->calls[k] = NULL;
    for (int i = 0; c->streams && i < c->n_units; i++)
        if (!c->units[i]->calls[0]) {
            step(c, (struct coordinator_event){.kind = EVENT_CANCEL, .unit = c->units[i]->id});
            unit_remove(c, i);
            return;
        }
}

/* The engine has computed a call of which nodes had sent tokens. */
static void remote_compared(void *ctx, const struct engine_request *r, bool equal) {
    struct cluster *c = ctx;
    struct doubt d;
    if (!doubt_take(c, r, &d)) return;
    const char *wrong = equal ? d.other : d.sender;
    if (!*wrong) return;
    step(c, (struct coordinator_event){.kind = EVENT_WRONG,
                                       .node = wrong,
                                       .unit = d.unit,
                                       .hash = "",
                                       .text = "it has sent wrong tokens"});
}

static void remote_wake(void *ctx) {
    const struct cluster *c = ctx;
    bus_wake(c->bus);
}

static const struct engine_remote cluster_remote = {remote_submit, remote_step, remote_cancel, NULL,
                                                    NULL},
                                  stream_remote = {remote_submit, remote_step, remote_cancel,
                                                   remote_compared, remote_wake};

/* open and close */

static const char LOCAL[] = "local:";

static bool is_nats(const char *address) {
    return strncmp(address, "nats://", 7) == 0 || strncmp(address, "tls://", 6) == 0;
}

static int options_read(struct cluster *c, const struct cluster_options *o,
                        struct coordinator_options *out, struct error *err) {
    char *end = NULL;
    bool local = strncmp(o->address, LOCAL, strlen(LOCAL)) == 0;
    if (local) c->n_expected = (int)strtol(o->address + strlen(LOCAL), &end, 10);
    if (!is_nats(o->address) &&
        (!end || *end || c->n_expected < 1 || c->n_expected > CLUSTER_LOCAL_MAX))
        return error_set(err, ERR_USAGE,
                         "unknown cluster '%s'; use local:N with N from 1 to %d, or nats://HOST",
                         o->address, CLUSTER_LOCAL_MAX);
    if (local && o->replicas > c->n_expected)
        return error_set(err, ERR_USAGE, "%d nodes cannot compute a part %d times", c->n_expected,
                         o->replicas);
    c->replicas = MAX(o->replicas, 1);
    c->streams = o->streams;
    c->address = xstrdup(o->address);
    c->balancer = o->balancer ? o->balancer : balancers[0].name;
    bool pbft = o->verify && strcmp(o->verify, "pbft") == 0;
    if (o->verify && !pbft && strcmp(o->verify, "majority") != 0)
        return error_set(err, ERR_USAGE, "cannot verify by '%s'; use majority or pbft", o->verify);
    if (pbft && c->replicas < 4)
        return error_set(err, ERR_USAGE,
                         "--verify pbft needs --replicas 4 to %d: 3f+1 nodes for f faulty ones",
                         PBFT_REPLICAS_MAX);
    *out = (struct coordinator_options){.replicas = c->replicas, .identity = c->identity};
    if (o->streams) out->stall_seconds = STALL_SECONDS;
    if (o->balancer && !(out->balancer = balancer_find(o->balancer)))
        return error_set(err, ERR_USAGE, "there is no balancer '%s'", o->balancer);
    return OK;
}

static int bus_join(struct cluster *c, const char *address, struct error *err) {
    uint64_t random;
    c->bus = bus_open(is_nats(address) ? address : "local", err);
    if (!c->bus) return err->code;
    randombytes_buf(&random, sizeof random);
    snprintf(c->results, sizeof c->results, "%s%016llx", QUEUE_RESULTS, (unsigned long long)random);
    snprintf(c->parts, sizeof c->parts, "%s%016llx", SUBJECT_PARTS, (unsigned long long)random);
    int rc = bus_subscribe(c->bus, SUBJECT_NODES, err);
    if (rc == OK) rc = bus_subscribe(c->bus, SUBJECT_WANTED, err);
    if (rc == OK && c->streams) rc = bus_subscribe(c->bus, c->parts, err);
    if (rc == OK) rc = bus_consume(c->bus, c->results, 64, err);
    return rc;
}

/* The command of a node with the model, the class and the options of the engine. */
static void node_args_make(const struct cluster_options *o, int nodes, const struct engine *e,
                           const struct model *m, struct strings *args) {
    const char *const words[] = {"node",
                                 m->path,
                                 "--quiet",
                                 m->cls == NUMERIC_EXACT ? "--exact" : "--fast",
                                 "--kv-cache-dtype",
                                 dtype_name(engine_kv_elem(e)),
                                 "--lora-dtype",
                                 dtype_name(engine_lora_elem(e))};
    const struct {
        const char *name, *format;
        int64_t value; /* 0: not given */
    } numbers[] = {
        {"--threads", "%lld", MAX((o->threads ? o->threads : cpu_count()) / nodes, 1)},
        {"--max-model-len", "%lld", engine_max_len(e)},
        {"--max-num-seqs", "%lld", engine_max_seqs(e)},
        {"--max-memory", "%lldM", (int64_t)MIN((o->max_memory >> 20) / (size_t)nodes, 999999)}};
    for (size_t i = 0; i < ARRAY_LEN(words); i++) strings_add(args, words[i]);
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++) {
        char *value = xasprintf(numbers[i].format, (long long)numbers[i].value);
        if (numbers[i].value) strings_add(args, numbers[i].name);
        if (numbers[i].value) strings_add(args, value);
        free(value);
    }
}

static int nodes_start(struct cluster *c, const struct cluster_options *o, const struct engine *e,
                       const struct model *m, struct error *err) {
    struct strings args = {0};
    node_args_make(o, c->n_expected, e, m, &args);
    c->local =
        local_nodes_start(c->n_expected,
                          &(struct local_nodes_options){
                              .args = &args, .address = bus_address(c->bus), .prefix = "local"},
                          err);
    strings_release(&args);
    return c->local ? OK : err->code;
}

struct cluster *cluster_open(const struct cluster_options *o, struct engine *e, struct model *m,
                             struct error *err) {
    struct cluster *c = xcalloc(1, sizeof *c);
    struct coordinator_options options;
    pthread_mutex_init(&c->lock, NULL);
    c->infos = json_object();
    int rc = options_read(c, o, &options, err);
    if (rc == OK && !model_hash(m, err)) rc = err->code;
    if (rc == OK) {
        c->engine = e;
        unit_identity(e, m, c->identity);
        if (c->streams) options.window = engine_max_seqs(e);
        c->coordinator = coordinator_new(&options);
        if (c->streams) status_update(c);
    }
    if (rc == OK) rc = bus_join(c, o->address, err);
    if (rc == OK && o->verify && strcmp(o->verify, "pbft") == 0 &&
        !(c->members = pbft_members_new(c->bus, c->replicas, err)))
        rc = err->code;
    if (rc == OK && c->n_expected) rc = nodes_start(c, o, e, m, err);
    if (rc == OK) engine_set_remote(e, c->streams ? &stream_remote : &cluster_remote, c);
    if (rc == OK) return c;
    cluster_close(c);
    return NULL;
}

void cluster_close(struct cluster *c) {
    if (!c) return;
    struct error ignored;
    if (c->bus) actions_do(c, &ignored); // nodes need not compute cancelled units
    if (c->members) pbft_members_report(c->members);
    pbft_members_free(c->members);
    local_nodes_stop(c->local);
    if (c->bus) bus_purge(c->bus, c->results, &ignored);
    bus_close(c->bus);
    coordinator_free(c->coordinator);
    while (c->n_units > 0) unit_remove(c, c->n_units - 1);
    free(c->units);
    free(c->waiting);
    free(c->actions.v);
    free(c->doubts);
    free(c->address);
    json_decref(c->infos);
    json_decref(c->status);
    pthread_mutex_destroy(&c->lock);
    free(c);
}
