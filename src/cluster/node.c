/*
 * node: a process that computes units for a cluster (cluster.h).
 *
 * One thread. It computes all units that it has in one batch, and between two steps of the engine
 * it reads messages, sends new tokens of streamed units, and sends a heartbeat; so a node that is
 * silent does not compute either. A unit whose adapters are missing waits until they have arrived,
 * one after another. A unit that comes again while its result is known is answered without
 * computing it. A node that leaves takes no new units, and says so at the end, so that
 * these go to other nodes at once.
 */
#include "cluster/cluster.h"
#include "cluster/pbft_replicas.h"
#include "cluster/unit.h"
#include "cluster/wire.h"

#include <stdlib.h>
#include <string.h>

enum {
    RECENT_RESULTS = 16,
    RECENT_CANCELS = 64,
    ADAPTERS_CACHED = UNIT_ADAPTERS_MAX + 64,
    ADAPTERS_REPORTED = 32
};
static const double HEARTBEAT_SECONDS = 5, WANT_SECONDS = 30;
/* PART: the least time between two parts of a unit; SIGN: after which a part without tokens is
 * sent; READ: between two looks at the bus while the engine computes. */
static const double PART_SECONDS = 0.01, SIGN_SECONDS = 0.25, READ_SECONDS = 0.002;

struct result {
    char unit[HASH_LEN];
    char *text; /* message with the result */
    size_t len;
};
struct cancelled {
    char unit[HASH_LEN], queue[BUS_NAME_MAX];
};
struct held_adapter {
    char hash[HASH_LEN];
    struct adapter *adapter;
    uint64_t used; /* order of the last use */
};
/* A unit that is being computed, or waits for adapters. */
struct node_unit {
    char id[HASH_LEN], *queue, *parts; /* parts: subject; NULL: it is not streamed */
    uint64_t item;
    struct unit_calls calls;
    struct strings hashes; /* hashes of its adapters */
    struct adapter **held; /* [n_held] the adapters that the calls use */
    int n_held, n_submitted;
    int32_t n_sent; /* tokens of a streamed unit */
    double sent_at;
};
struct node {
    const struct node_options *o;
    struct bus *bus;
    char identity[HASH_LEN];
    char *queue, *inbox; /* names */
    double heartbeat_at, read_at;
    struct node_unit **units; /* [n_units] oldest first */
    int n_units, units_cap;
    struct result recent[RECENT_RESULTS];
    int n_recent;
    struct cancelled cancelled[RECENT_CANCELS]; /* their messages may arrive before the units */
    int n_cancelled;
    struct held_adapter adapters[ADAPTERS_CACHED];
    int n_adapters;
    uint64_t uses;
    char wanted[HASH_LEN]; /* the adapter that it has asked for; "": none */
    double wanted_until;
    struct buf part; /* its bytes received so far */
    struct pbft_replicas *replicas;
};

/* heartbeats */

static json_t *adapters_json(const struct node *n) {
    json_t *list = json_array();
    for (int i = 0; i < MIN(n->n_adapters, ADAPTERS_REPORTED); i++)
        json_array_append_new(list, json_string(n->adapters[i].hash));
    return list;
}

static int node_heartbeat(struct node *n, struct error *err) {
    double load = 0;
    if (clock_now() - n->heartbeat_at < HEARTBEAT_SECONDS) return OK;
    n->heartbeat_at = clock_now();
    if (getloadavg(&load, 1) != 1) load = 0;
    load = MIN(MAX(load - n->o->threads, 0) / cpu_count(), 1); // without the node's own threads
    for (int i = 0; i < n->n_units; i++)
        if (bus_working(n->bus, n->units[i]->item, err) != OK) return err->code;
    return wire_publish(
        n->bus, SUBJECT_NODES,
        json_pack("{s:s,s:s,s:i,s:f,s:s,s:s,s:o}", "name", n->o->name, "identity", n->identity,
                  "threads", n->o->threads, "load", load, "key", pbft_replicas_key(n->replicas),
                  "level", cpu_level_name(kernels_get()->level), "adapters", adapters_json(n)),
        NULL, 0, err);
}

/* adapters */

static struct adapter *adapter_find(void *ctx, const char *hash) {
    struct node *n = ctx;
    for (int i = 0; i < n->n_adapters; i++)
        if (strcmp(n->adapters[i].hash, hash) == 0) {
            n->adapters[i].used = ++n->uses;
            return n->adapters[i].adapter;
        }
    return NULL;
}

static void adapter_keep(struct node *n, const char *hash, struct adapter *a) {
    int at = 0;
    if (n->n_adapters < ADAPTERS_CACHED) {
        at = n->n_adapters++;
    } else {
        for (int i = 1; i < n->n_adapters; i++)
            if (n->adapters[i].used < n->adapters[at].used) at = i;
        adapter_release(n->adapters[at].adapter);
    }
    n->adapters[at] = (struct held_adapter){.adapter = a, .used = ++n->uses};
    memcpy(n->adapters[at].hash, hash, HASH_LEN);
}

static int adapter_open_bytes(struct node *n, const char *hash, struct error *err) {
    struct adapter *a =
        adapter_from_bytes((const uint8_t *)n->part.data, n->part.len, hash, n->o->model, err);
    if (a) adapter_keep(n, hash, a);
    return a ? OK : err->code;
}

/* Handles a part of the adapter. 1: the adapter is complete; 0: it is not, or the part is one of
 * another adapter. */
static int adapter_part(struct node *n, const json_t *v, const uint8_t *body, size_t len,
                        struct error *err) {
    if (!*n->wanted || strcmp(json_get_string(v, "hash"), n->wanted) != 0) return 0;
    size_t at = (size_t)json_integer_value(json_object_get(v, "at")),
           size = (size_t)json_integer_value(json_object_get(v, "size"));
    if (*json_get_string(v, "error"))
        return error_set(err, ERR_MISSING, "%.150s", json_get_string(v, "error"));
    if (at == n->part.len && at + len <= size) buf_add(&n->part, body, len);
    return n->part.len == size && size > 0;
}

/* The first adapter of a waiting unit that the node does not have; NULL: it has all. */
static const char *unit_lacks(struct node *n, const struct node_unit *u) {
    for (int i = 0; i < u->hashes.n; i++)
        if (!adapter_find(n, u->hashes.v[i])) return u->hashes.v[i];
    return NULL;
}

/* Requests the adapter that the oldest waiting unit needs, if none is on its way. */
static int adapter_want(struct node *n, struct error *err) {
    const char *hash = NULL;
    for (int i = 0; i < n->n_units && !hash && !*n->wanted; i++)
        if (n->units[i]->n_submitted == 0) hash = unit_lacks(n, n->units[i]);
    if (!hash) return OK;
    snprintf(n->wanted, sizeof n->wanted, "%s", hash);
    n->wanted_until = clock_now() + WANT_SECONDS;
    n->part.len = 0;
    return wire_publish(n->bus, SUBJECT_WANTED,
                        json_pack("{s:s,s:s}", "node", n->o->name, "hash", hash), NULL, 0, err);
}

/* units */

static struct adapter *adapter_hold(void *ctx, const char *hash) {
    struct node_unit *u = ((void **)ctx)[1];
    struct adapter *a = adapter_find(((void **)ctx)[0], hash);
    if (!a) return NULL;
    u->held = xrealloc(u->held, sizeof(struct adapter *) * (size_t)(u->n_held + 1));
    u->held[u->n_held++] = adapter_retain(a);
    return a;
}

static void unit_free(struct node *n, struct node_unit *u) {
    for (int i = 0; i < u->n_submitted; i++)
        if (!u->calls.v[i].done) engine_cancel(n->o->engine, &u->calls.v[i]);
    unit_calls_release(&u->calls);
    for (int i = 0; i < u->n_held; i++) adapter_release(u->held[i]);
    free(u->held);
    strings_release(&u->hashes);
    free(u->queue);
    free(u->parts);
    free(u);
}

/* Removes a unit, and acknowledges its item. */
static int unit_end(struct node *n, struct node_unit *u, struct error *err) {
    int at = 0;
    while (n->units[at] != u) at++;
    memmove(n->units + at, n->units + at + 1,
            sizeof(struct node_unit *) * (size_t)(--n->n_units - at));
    uint64_t item = u->item;
    unit_free(n, u);
    return bus_ack(n->bus, item, err);
}

static const struct result *result_find(const struct node *n, const char *unit) {
    for (int i = 0; i < RECENT_RESULTS; i++)
        if (n->recent[i].text && strcmp(n->recent[i].unit, unit) == 0) return &n->recent[i];
    return NULL;
}

static void result_keep(struct node *n, const char *unit, struct buf *text) {
    struct result *r = &n->recent[n->n_recent++ % RECENT_RESULTS];
    free(r->text);
    *r = (struct result){.text = text->data, .len = text->len};
    memcpy(r->unit, unit, HASH_LEN);
    *text = (struct buf){0};
}

static int result_send(struct node *n, const char *queue, const char *unit, const char *text,
                       size_t len, struct error *err) {
    char *id = xasprintf("%s %.50s", unit, n->o->name);
    int rc = bus_enqueue(n->bus, queue, id, text, len, err);
    free(id);
    return rc;
}

static json_t *result_head(const struct node *n, const struct node_unit *u) {
    return json_pack("{s:s,s:s}", "node", n->o->name, "unit", u->id);
}

/* Ends a unit that cannot be computed. */
static int unit_fail(struct node *n, struct node_unit *u, const char *why, struct error *err) {
    struct buf text = {0};
    json_t *head = result_head(n, u);
    json_object_set_new(head, "error", json_string_lossy(why, strlen(why)));
    wire_write(&text, head, NULL, 0);
    int rc = result_send(n, u->queue, u->id, text.data, text.len, err);
    buf_release(&text);
    return rc == OK ? unit_end(n, u, err) : rc;
}

/* Ends a unit whose calls are done. */
static int unit_answer(struct node *n, struct node_unit *u, struct error *err) {
    struct buf results = {0}, text = {0};
    json_t *head = result_head(n, u);
    if (u->parts) {
        json_object_set_new(head, "cached", json_integer(u->calls.v[0].n_cached));
        json_object_set_new(head, "dropped", json_integer(u->calls.v[0].n_dropped));
    }
    unit_results_write(u->calls.v, u->calls.n, &results);
    int rc = pbft_replicas_computed(n->replicas, u->id, &results, head, err);
    wire_write(&text, head, results.data, results.len);
    buf_release(&results);
    if (rc == OK) rc = result_send(n, u->queue, u->id, text.data, text.len, err);
    if (rc == OK) result_keep(n, u->id, &text);
    buf_release(&text);
    if (rc == ERR_MEMORY) return unit_fail(n, u, "the results are too long for a message", err);
    return rc == OK ? unit_end(n, u, err) : rc;
}

/* Submits the calls of a unit, if its adapters have arrived. */
static int unit_submit(struct node *n, struct node_unit *u, struct error *err) {
    struct error why;
    if (unit_lacks(n, u)) return OK;
    int rc = unit_calls_set_adapters(&u->calls, adapter_hold, (void *[]){n, u})
                 ? OK
                 : error_set(&why, ERR_STATE, "an adapter is missing");
    while (rc == OK && u->n_submitted < u->calls.n) {
        rc = engine_submit(n->o->engine, &u->calls.v[u->n_submitted], &why);
        u->n_submitted += rc == OK;
    }
    return rc == OK ? OK : unit_fail(n, u, why.text, err);
}

/* Submits the units whose adapters have arrived. */
static int units_submit(struct node *n, struct error *err) {
    int rc = OK;
    for (int i = n->n_units - 1; rc == OK && i >= 0; i--)
        if (n->units[i]->n_submitted == 0) rc = unit_submit(n, n->units[i], err);
    return rc;
}

/* Ends the units that wait for the adapter that did not come. */
static int adapter_failed(struct node *n, const char *why, struct error *err) {
    int rc = OK;
    for (int i = n->n_units - 1; rc == OK && i >= 0; i--) {
        const char *hash = n->units[i]->n_submitted == 0 ? unit_lacks(n, n->units[i]) : NULL;
        if (hash && strcmp(hash, n->wanted) == 0) rc = unit_fail(n, n->units[i], why, err);
    }
    *n->wanted = 0;
    return rc;
}

static int adapter_arrived(struct node *n, const json_t *v, const uint8_t *body, size_t len,
                           struct error *err) {
    struct error why;
    int rc = adapter_part(n, v, body, len, &why);
    if (rc == 1) rc = adapter_open_bytes(n, n->wanted, &why) == OK ? 1 : why.code;
    if (rc < 0) return adapter_failed(n, why.text, err);
    if (rc == 0) return OK;
    *n->wanted = 0;
    return units_submit(n, err);
}

/* messages */

/* Other commands, with other queues, may have units of the same id. */
static struct node_unit *unit_find(const struct node *n, const char *id, const char *queue) {
    for (int i = 0; i < n->n_units; i++)
        if (strcmp(n->units[i]->id, id) == 0 && strcmp(n->units[i]->queue, queue) == 0)
            return n->units[i];
    return NULL;
}

static bool is_cancelled(const struct node *n, const char *id, const char *queue) {
    for (int i = 0; i < RECENT_CANCELS; i++)
        if (strcmp(n->cancelled[i].unit, id) == 0 && strcmp(n->cancelled[i].queue, queue) == 0)
            return true;
    return false;
}

static int unit_cancel(struct node *n, const char *id, const char *queue, struct error *err) {
    struct node_unit *u = unit_find(n, id, queue);
    struct cancelled *c = &n->cancelled[n->n_cancelled++ % RECENT_CANCELS];
    snprintf(c->unit, sizeof c->unit, "%s", id);
    snprintf(c->queue, sizeof c->queue, "%s", queue);
    return u ? unit_end(n, u, err) : OK;
}

static void unit_add(struct node *n, struct node_unit *u) {
    if (n->n_units == n->units_cap) {
        n->units_cap = 2 * n->units_cap + 16;
        n->units = xrealloc(n->units, sizeof(struct node_unit *) * (size_t)n->units_cap);
    }
    n->units[n->n_units++] = u;
}

/* Parses a unit, and begins to compute it. */
static int unit_begin(struct node *n, const json_t *v, uint64_t item, const uint8_t *body,
                      size_t len, struct error *err) {
    struct node_unit *u = xcalloc(1, sizeof *u);
    struct error why;
    const char *parts = json_get_string(v, "parts");
    snprintf(u->id, sizeof u->id, "%s", json_get_string(v, "unit"));
    u->queue = xstrdup(json_get_string(v, "results"));
    u->item = item;
    if (strncmp(parts, SUBJECT_PARTS, strlen(SUBJECT_PARTS)) == 0) u->parts = xstrdup(parts);
    unit_add(n, u);
    int rc = unit_calls_parse(body, len, &u->calls, &why);
    if (rc == OK && u->parts && u->calls.n != 1)
        rc = error_set(&why, ERR_FORMAT, "a streamed unit has one call");
    if (rc == OK) unit_calls_adapters(&u->calls, &u->hashes);
    if (rc == OK && u->hashes.n > UNIT_ADAPTERS_MAX)
        rc = error_set(&why, ERR_FORMAT, "a unit has more than %d adapters", UNIT_ADAPTERS_MAX);
    return rc == OK ? unit_submit(n, u, err) : unit_fail(n, u, why.text, err);
}

static bool is_leaving(const struct node *n) {
    return n->o->leave && atomic_load(n->o->leave);
}

/* An item that is not a unit, or one that is known, is only acknowledged. A node that leaves does
 * not begin a unit. */
static int item_handle(struct node *n, uint64_t item, const json_t *v, const uint8_t *body,
                       size_t len, struct error *err) {
    const char *id = json_get_string(v, "unit"), *queue = json_get_string(v, "results");
    bool valid = hash_is_valid(id) && strncmp(queue, QUEUE_RESULTS, strlen(QUEUE_RESULTS)) == 0;
    const struct result *known = valid ? result_find(n, id) : NULL;
    const struct node_unit *running = valid ? unit_find(n, id, queue) : NULL;
    int rc = OK;
    if (running) return running->item == item ? OK : bus_ack(n->bus, item, err);
    if (valid && !known && !is_cancelled(n, id, queue))
        return is_leaving(n) ? OK : unit_begin(n, v, item, body, len, err);
    if (known) rc = result_send(n, queue, id, known->text, known->len, err);
    return rc == OK ? bus_ack(n->bus, item, err) : rc;
}

static int message_handle(struct node *n, const struct bus_message *m, struct error *err) {
    struct buf copy = {0}; // the message is valid until the next call of the bus
    const uint8_t *body;
    size_t len;
    uint64_t item = m->item;
    bool replica = strcmp(m->subject, SUBJECT_PBFT) == 0 || strcmp(m->subject, SUBJECT_GROUP) == 0;
    if (replica) return pbft_replicas_message(n->replicas, m, err);
    json_t *v = wire_read(m, &body, &len);
    int rc = OK;
    if (v) buf_add(&copy, body, len);
    body = (const uint8_t *)copy.data;
    if (item)
        rc = item_handle(n, item, v, body, len, err);
    else if (*json_get_string(v, "cancel"))
        rc = unit_cancel(n, json_get_string(v, "cancel"), json_get_string(v, "results"), err);
    else if (v)
        rc = adapter_arrived(n, v, body, len, err);
    buf_release(&copy);
    json_decref(v);
    return rc;
}

/* streams */

/* The tokens of a call whose prompt has log-probabilities are sent at its end, with them. */
static int part_send(struct node *n, struct node_unit *u, struct error *err) {
    const struct engine_request *r = &u->calls.v[0];
    double now = clock_now();
    bool tokens = u->n_submitted > 0 && !r->prompt_logprobs && r->n_out > u->n_sent;
    double least = !tokens ? SIGN_SECONDS : u->n_sent == 0 ? 0 : PART_SECONDS;
    if (now - u->sent_at < least) return OK;
    struct buf part = {0};
    if (tokens) unit_part_write(r, u->n_sent, &part);
    json_t *head = result_head(n, u);
    json_object_set_new(head, "at", json_integer(u->n_sent));
    int rc = wire_publish(n->bus, u->parts, head, part.data, part.len, err);
    buf_release(&part);
    u->sent_at = now;
    if (tokens) u->n_sent = r->n_out;
    return rc;
}

/* Sends the results of finished units and new tokens of the others. */
static int units_report(struct node *n, struct error *err) {
    int rc = OK;
    for (int i = n->n_units - 1; rc == OK && i >= 0; i--) {
        struct node_unit *u = n->units[i];
        int done = 0;
        while (done < u->calls.n && u->n_submitted == u->calls.n && u->calls.v[done].done) done++;
        if (done > 0 && done == u->calls.n)
            rc = unit_answer(n, u, err);
        else if (u->parts)
            rc = part_send(n, u, err);
    }
    return rc;
}

/* the node */

/* Tells the commands that the node leaves, and removes the units that still come to it. */
static int node_leave(struct node *n, struct error *err) {
    int rc = wire_publish(n->bus, SUBJECT_NODES,
                          json_pack("{s:s,s:b}", "name", n->o->name, "leaves", 1), NULL, 0, err);
    return rc == OK ? bus_purge(n->bus, n->queue, err) : rc;
}

static int node_open(struct node *n, struct error *err) {
    n->bus = bus_open(n->o->address, err);
    if (!n->bus) return err->code;
    unit_identity(n->o->engine, n->o->model, n->identity);
    n->queue = xasprintf("%s%s", QUEUE_WORK, n->o->name);
    n->inbox = xasprintf("%s%s", SUBJECT_NODE, n->o->name);
    n->heartbeat_at = -HEARTBEAT_SECONDS;
    int limit = MAX(engine_max_seqs(n->o->engine), NODE_WINDOW);
    n->replicas = pbft_replicas_new(n->bus, err);
    int rc = n->replicas ? bus_subscribe(n->bus, n->inbox, err) : err->code;
    if (rc == OK) rc = bus_purge(n->bus, n->queue, err); // work of an earlier node with the name
    if (rc == OK) rc = bus_consume(n->bus, n->queue, limit, err);
    return rc;
}

static void node_close(struct node *n) {
    for (int i = 0; i < n->n_units; i++) unit_free(n, n->units[i]);
    free(n->units);
    pbft_replicas_free(n->replicas);
    bus_close(n->bus);
    for (int i = 0; i < RECENT_RESULTS; i++) free(n->recent[i].text);
    for (int i = 0; i < n->n_adapters; i++) adapter_release(n->adapters[i].adapter);
    buf_release(&n->part);
    free(n->queue);
    free(n->inbox);
}

/* Handles the messages that have arrived; waits for one if there is nothing to compute. */
static int messages_handle(struct node *n, struct error *err) {
    bool computes = engine_unfinished(n->o->engine) > 0;
    double wait = computes ? 0 : n->n_units > 0 ? SIGN_SECONDS : 1;
    if (computes && clock_now() - n->read_at < READ_SECONDS) return OK;
    n->read_at = clock_now();
    struct bus_message m;
    int rc = bus_receive(n->bus, wait, &m, err);
    while (rc == 1) {
        rc = message_handle(n, &m, err);
        if (rc == OK) rc = bus_receive(n->bus, 0, &m, err);
    }
    return rc;
}

static int node_step(struct node *n, struct error *err) {
    struct error late;
    int rc = node_heartbeat(n, err);
    if (rc == OK) rc = log_check_cancelled(err);
    if (rc == OK) rc = messages_handle(n, err);
    if (rc == OK) rc = pbft_replicas_tick(n->replicas, err);
    if (rc == OK) rc = adapter_want(n, err);
    if (rc == OK && *n->wanted && clock_now() > n->wanted_until) {
        error_set(&late, ERR_MISSING, "no node sent the adapter %.16s…", n->wanted);
        rc = adapter_failed(n, late.text, err);
    }
    if (rc == OK && engine_unfinished(n->o->engine) > 0) engine_step(n->o->engine);
    return rc == OK ? units_report(n, err) : rc;
}

int node_run(const struct node_options *o, struct error *err) {
    struct node n = {.o = o};
    int rc = node_open(&n, err);
    while (rc == OK && !(is_leaving(&n) && n.n_units == 0)) rc = node_step(&n, err);
    if (rc == OK) rc = node_leave(&n, err);
    node_close(&n);
    return rc;
}
