/*
 * bus: how the members of a cluster exchange messages.
 *
 * A bus has subjects, queues and values. A message on a subject reaches the members that subscribe
 * to it at that moment, at most once. An item of a queue is stored until a consumer acknowledges
 * it: if the consumer disconnects, refuses it or is silent for BUS_ACK_SECONDS, the item is
 * delivered again, so it is delivered at least once. A value is stored under a key, and has a
 * revision, by which a member writes only if no other member has written since.
 *
 * "local" starts a hub in this process, on a Unix socket; other
 * processes of this user join by its address (bus_address), "unix:NAME". Nothing of it outlives
 * the process that started it.
 *
 * Threads. One thread at a time uses a handle. Every byte from another member is checked.
 */
#ifndef SHOAL_CLUSTER_BUS_H
#define SHOAL_CLUSTER_BUS_H

#include "base/base.h"

enum {
    BUS_NAME_MAX = 128,        /* bytes of a subject, queue or key, with the NUL */
    BUS_DATA_MAX = 8 << 20,    /* bytes of a message, item or value */
    BUS_ACK_SECONDS = 30,      /* until an item without acknowledgement is delivered again */
    BUS_QUEUE_BYTES = 1 << 30, /* limit of all items and values together */
};

struct bus;
/* Opens the bus of an address: "local" or "unix:NAME". `name`: of this member, for messages about
 * it. ERR_USAGE: an unknown kind of address; ERR_IO: the connection is refused. */
struct bus *bus_open(const char *address, const char *name, struct error *err);
/* The address by which others join. */
const char *bus_address(const struct bus *b);
void bus_close(struct bus *b); /* NULL is allowed */

/* A subject or a queue; "results.*" matches every subject that begins with "results.". */
int bus_subscribe(struct bus *b, const char *subject, struct error *err);
/* At most `limit` items of the queue are delivered before one of them is acknowledged. */
int bus_consume(struct bus *b, const char *queue, int limit, struct error *err);

int bus_publish(struct bus *b, const char *subject, const void *data, size_t len,
                struct error *err);
/* An item with the id of one that the queue holds is dropped. */
int bus_enqueue(struct bus *b, const char *queue, const char *id, const void *data, size_t len,
                struct error *err);
/* Removes the items of a queue that are not delivered. */
int bus_purge(struct bus *b, const char *queue, struct error *err);

struct bus_message {
    const char *subject; /* or the queue */
    const uint8_t *data; /* valid until the next call with the handle */
    size_t len;
    uint64_t item; /* 0: not an item of a queue */
};
/* Waits for a message or an item. 1: *out has one; 0: none came in time; negative: an error, such
 * as ERR_IO after the hub has closed the connection. */
int bus_receive(struct bus *b, double seconds, struct bus_message *out, struct error *err);
int bus_ack(struct bus *b, uint64_t item, struct error *err);
/* Refuses an item, which is delivered again, to another consumer if there is one. */
int bus_nak(struct bus *b, uint64_t item, struct error *err);
/* Tells that an item is still being worked on. */
int bus_working(struct bus *b, uint64_t item, struct error *err);

/* Stores a value. revision: that of the value that it replaces, 0: none may exist, BUS_ANY: any.
 * ERR_STATE: another revision is stored. */
#define BUS_ANY UINT64_MAX
int bus_put(struct bus *b, const char *key, const void *data, size_t len, uint64_t revision,
            struct error *err);
/* Appends the value to `out`. ERR_MISSING: the key has no value. *revision may be NULL. */
int bus_get(struct bus *b, const char *key, struct buf *out, uint64_t *revision, struct error *err);

#endif
