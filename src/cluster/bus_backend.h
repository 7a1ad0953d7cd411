/*
 * bus_backend: an implementation of a bus. The functions are those of bus.h without "bus_";
 * bus.c has checked names and lengths.
 */
#ifndef SHOAL_CLUSTER_BUS_BACKEND_H
#define SHOAL_CLUSTER_BUS_BACKEND_H

#include "cluster/bus.h"

struct bus_backend {
    /* *joined receives the address for others, malloc'ed. NULL: an error. */
    void *(*open)(const char *address, char **joined, struct error *err);
    void (*close)(void *b);
    int (*subscribe)(void *b, const char *subject, struct error *err);
    int (*consume)(void *b, const char *queue, int limit, struct error *err);
    int (*publish)(void *b, const char *subject, const void *data, size_t len, struct error *err);
    int (*enqueue)(void *b, const char *queue, const char *id, const void *data, size_t len,
                   struct error *err);
    int (*purge)(void *b, const char *queue, struct error *err);
    int (*receive)(void *b, double seconds, struct bus_message *out, struct error *err);
    int (*ack)(void *b, uint64_t item, struct error *err);
    int (*nak)(void *b, uint64_t item, struct error *err);
    int (*working)(void *b, uint64_t item, struct error *err);
    void (*wake)(void *b);
};
extern const struct bus_backend bus_local, bus_nats;

#endif
