/*
 * node: a process that computes units for a cluster (cluster.h).
 *
 * One thread. Between two steps of the engine it sends a heartbeat, so a node that is silent
 * does not compute either. A unit whose adapters are missing waits in the node until they have
 * arrived. A unit that comes again while its result is known is answered without computing it.
 */
#include "cluster/cluster.h"
#include "cluster/unit.h"
#include "cluster/wire.h"

#include <stdlib.h>
#include <string.h>

enum { RECENT_RESULTS = 16, ADAPTERS_CACHED = UNIT_ADAPTERS_MAX + 64 };
static const double HEARTBEAT_SECONDS = 5, WANT_SECONDS = 30;

struct result {
    char unit[HASH_LEN];
    char *text; /* message with the result */
    size_t len;
};
struct held_adapter {
    char hash[HASH_LEN];
    struct adapter *adapter;
    uint64_t used; /* order of the last use */
};
struct node {
    const struct node_options *o;
    struct bus *bus;
    char identity[HASH_LEN];
    char *queue, *inbox; /* names */
    double heartbeat_at;
    uint64_t item; /* number of the item being computed; 0: none */
    struct result recent[RECENT_RESULTS];
    int n_recent;
    struct held_adapter adapters[ADAPTERS_CACHED];
    int n_adapters;
    uint64_t uses;
    struct buf part; /* bytes of an adapter received so far */
};

/* heartbeats */

static int node_heartbeat(struct node *n, struct error *err) {
    double load = 0;
    if (clock_now() - n->heartbeat_at < HEARTBEAT_SECONDS) return OK;
    n->heartbeat_at = clock_now();
    if (getloadavg(&load, 1) != 1) load = 0;
    load = MIN(MAX(load - n->o->threads, 0) / cpu_count(), 1); // without the node's own threads
    if (n->item && bus_working(n->bus, n->item, err) != OK) return err->code;
    return wire_publish(n->bus, SUBJECT_NODES,
                        json_pack("{s:s,s:s,s:i,s:f}", "name", n->o->name, "identity", n->identity,
                                  "threads", n->o->threads, "load", load),
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
static int adapter_part(struct node *n, const struct bus_message *m, const char *hash,
                        struct error *err) {
    const uint8_t *body;
    size_t len;
    json_t *v = wire_read(m, &body, &len);
    int rc = 0;
    if (v && strcmp(json_get_string(v, "hash"), hash) == 0) {
        size_t at = (size_t)json_integer_value(json_object_get(v, "at")),
               size = (size_t)json_integer_value(json_object_get(v, "size"));
        if (*json_get_string(v, "error"))
            rc = error_set(err, ERR_MISSING, "%.150s", json_get_string(v, "error"));
        else if (at == n->part.len && at + len <= size)
            buf_add(&n->part, body, len);
        if (rc == 0 && n->part.len == size && size > 0) rc = 1;
    }
    json_decref(v);
    return rc;
}

/* Requests an adapter, and waits until it is complete. Items that come meanwhile are refused, and
 * come again. */
static int adapter_fetch(struct node *n, const char *hash, struct error *err) {
    double until = clock_now() + WANT_SECONDS;
    n->part.len = 0;
    int rc = wire_publish(n->bus, SUBJECT_WANTED,
                          json_pack("{s:s,s:s}", "node", n->o->name, "hash", hash), NULL, 0, err);
    while (rc == OK && clock_now() < until) {
        struct bus_message m;
        rc = node_heartbeat(n, err);
        if (rc == OK) rc = bus_receive(n->bus, 1, &m, err);
        if (rc == 1 && m.item)
            rc = bus_nak(n->bus, m.item, err);
        else if (rc == 1)
            rc = adapter_part(n, &m, hash, err);
        if (rc == 1) return adapter_open_bytes(n, hash, err);
    }
    return rc == OK ? error_set(err, ERR_MISSING, "no node sent the adapter %.16s…", hash) : rc;
}

static int adapters_fetch(struct node *n, const struct unit_calls *u, struct error *err) {
    struct strings hashes = {0};
    int rc = OK;
    unit_calls_adapters(u, &hashes);
    if (hashes.n > UNIT_ADAPTERS_MAX)
        rc = error_set(err, ERR_FORMAT, "a unit has more than %d adapters", UNIT_ADAPTERS_MAX);
    for (int i = 0; rc == OK && i < hashes.n; i++)
        if (!adapter_find(n, hashes.v[i])) rc = adapter_fetch(n, hashes.v[i], err);
    strings_release(&hashes);
    return rc;
}

/* units */

static int calls_compute(struct node *n, struct unit_calls *u, struct error *err) {
    struct engine *e = n->o->engine;
    int submitted = 0, rc = OK;
    for (; rc == OK && submitted < u->n; submitted += rc == OK)
        rc = engine_submit(e, &u->v[submitted], err);
    while (rc == OK && engine_step(e) > 0) rc = node_heartbeat(n, err);
    for (int i = 0; rc != OK && i < submitted; i++)
        if (!u->v[i].done) engine_cancel(e, &u->v[i]);
    return rc;
}

/* Appends the message with the results of a unit, or with the error, and returns whether it has
 * results. */
static bool unit_compute(struct node *n, const char *unit, const uint8_t *body, size_t len,
                         struct buf *out) {
    struct unit_calls u;
    struct error err;
    struct buf results = {0};
    json_t *head = json_pack("{s:s,s:s}", "node", n->o->name, "unit", unit);
    int rc = unit_calls_parse(body, len, &u, &err);
    if (rc == OK) rc = adapters_fetch(n, &u, &err);
    if (rc == OK && !unit_calls_set_adapters(&u, adapter_find, n))
        rc = error_set(&err, ERR_STATE, "an adapter is missing");
    if (rc == OK) rc = calls_compute(n, &u, &err);
    if (rc == OK)
        unit_results_write(u.v, u.n, &results);
    else
        json_object_set_new(head, "error", json_string_lossy(err.text, strlen(err.text)));
    wire_write(out, head, results.data, results.len);
    unit_calls_release(&u);
    buf_release(&results);
    return rc == OK;
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

static int unit_answer(struct node *n, const char *queue, const char *unit, const uint8_t *body,
                       size_t len, struct error *err) {
    const struct result *known = result_find(n, unit);
    if (known) return result_send(n, queue, unit, known->text, known->len, err);
    struct buf calls = {0}, text = {0}; // the message is valid until the next call of the bus
    buf_add(&calls, body, len);
    bool computed = unit_compute(n, unit, (const uint8_t *)calls.data, calls.len, &text);
    int rc = result_send(n, queue, unit, text.data, text.len, err);
    if (computed) result_keep(n, unit, &text);
    buf_release(&calls);
    buf_release(&text);
    return rc;
}

static int unit_handle(struct node *n, const struct bus_message *m, struct error *err) {
    const uint8_t *body;
    size_t len;
    uint64_t item = n->item = m->item;
    json_t *v = wire_read(m, &body, &len);
    const char *unit = json_get_string(v, "unit"), *queue = json_get_string(v, "results");
    bool valid = hash_is_valid(unit) && strncmp(queue, QUEUE_RESULTS, strlen(QUEUE_RESULTS)) == 0;
    int rc = valid ? unit_answer(n, queue, unit, body, len, err) : OK;
    json_decref(v);
    n->item = 0;
    return rc == OK ? bus_ack(n->bus, item, err) : rc;
}

/* the node */

static int node_open(struct node *n, struct error *err) {
    n->bus = bus_open(n->o->address, err);
    if (!n->bus) return err->code;
    unit_identity(n->o->engine, n->o->model, n->identity);
    n->queue = xasprintf("%s%s", QUEUE_WORK, n->o->name);
    n->inbox = xasprintf("%s%s", SUBJECT_NODE, n->o->name);
    n->heartbeat_at = -HEARTBEAT_SECONDS;
    int rc = bus_subscribe(n->bus, n->inbox, err);
    if (rc == OK) rc = bus_purge(n->bus, n->queue, err); // work of an earlier node with the name
    if (rc == OK) rc = bus_consume(n->bus, n->queue, 1, err);
    return rc;
}

static void node_close(struct node *n) {
    bus_close(n->bus);
    for (int i = 0; i < RECENT_RESULTS; i++) free(n->recent[i].text);
    for (int i = 0; i < n->n_adapters; i++) adapter_release(n->adapters[i].adapter);
    buf_release(&n->part);
    free(n->queue);
    free(n->inbox);
}

int node_run(const struct node_options *o, struct error *err) {
    struct node n = {.o = o};
    int rc = node_open(&n, err);
    while (rc == OK) {
        struct bus_message m;
        rc = node_heartbeat(&n, err);
        if (rc == OK) rc = log_check_cancelled(err);
        if (rc == OK) rc = bus_receive(n.bus, 1, &m, err);
        if (rc == 1) rc = m.item ? unit_handle(&n, &m, err) : OK;
    }
    node_close(&n);
    return rc;
}
