/*
 * bus: how the members of a cluster exchange messages.
 *
 * A bus has subjects and queues. A message on a subject reaches the members that subscribe to it at
 * that moment, at most once. An item of a queue is stored until a consumer acknowledges it: if the
 * consumer disconnects, refuses it or is silent for BUS_ACK_SECONDS, the item is delivered again,
 * so it is delivered at least once.
 *
 * "local" starts a hub in this process, on a Unix socket; other processes of this user join by its
 * address (bus_address), "unix:NAME". Nothing of it outlives the process that started it.
 * "nats://HOST" and "tls://HOST" join a NATS server.
 *
 * Threads. One thread at a time uses a handle. Every byte from another member is checked.
 */
#ifndef SHOAL_CLUSTER_BUS_H
#define SHOAL_CLUSTER_BUS_H

#include "base/base.h"

enum {
    BUS_NAME_MAX = 128,        /* bytes of a subject or queue, with the NUL */
    BUS_DATA_MAX = 8 << 20,    /* bytes of a message or item */
    BUS_ACK_SECONDS = 30,      /* until an item without acknowledgement is delivered again */
    BUS_QUEUE_BYTES = 1 << 30, /* limit of all items together */
};

struct bus;
/* Opens the bus of an address. ERR_USAGE: an unknown kind of address; ERR_IO: the connection is
 * refused; ERR_MISSING: the library of NATS. */
struct bus *bus_open(const char *address, struct error *err);
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
/* Ends the wait of bus_receive, or of the next one, which returns 0. Any thread. */
void bus_wake(struct bus *b);

#endif
