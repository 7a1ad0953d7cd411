/*
 * bus: selects the backend by the address, and checks names and lengths (bus.h).
 */
#include "cluster/bus.h"

#include "cluster/bus_backend.h"

#include <stdlib.h>
#include <string.h>

struct bus {
    const struct bus_backend *backend;
    void *state;
    char *address;
};

static const struct {
    const char *prefix;
    const struct bus_backend *backend;
} backends[] = {
    {"local", &bus_local}, {"unix:", &bus_local}, {"nats://", &bus_nats}, {"tls://", &bus_nats}};

struct bus *bus_open(const char *address, struct error *err) {
    size_t i = 0;
    while (i < ARRAY_LEN(backends) &&
           strncmp(address, backends[i].prefix, strlen(backends[i].prefix)) != 0)
        i++;
    if (i == ARRAY_LEN(backends)) {
        error_set(err, ERR_USAGE,
                  "unknown address '%s' of a bus; use local, unix:NAME or nats://HOST", address);
        return NULL;
    }
    struct bus *b = xcalloc(1, sizeof *b);
    b->backend = backends[i].backend;
    b->state = b->backend->open(address, &b->address, err);
    if (b->state) return b;
    free(b);
    return NULL;
}

const char *bus_address(const struct bus *b) {
    return b->address;
}

void bus_close(struct bus *b) {
    if (!b) return;
    b->backend->close(b->state);
    free(b->address);
    free(b);
}

/* Names have letters, digits, '_', '-' and '.'; that of a subscription may end with ".*". */
static int name_check(const char *name, bool pattern, struct error *err) {
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.");
    if (n > 0 && n < BUS_NAME_MAX &&
        (!name[n] || (pattern && name[n - 1] == '.' && strcmp(name + n, "*") == 0)))
        return OK;
    return error_set(err, ERR_USAGE, "'%.40s' is not a name of the bus", name);
}

static int check(const char *name, size_t len, struct error *err) {
    if (len > BUS_DATA_MAX)
        return error_set(err, ERR_MEMORY, "a message of %zu bytes is too long for the bus", len);
    return name_check(name, false, err);
}

int bus_subscribe(struct bus *b, const char *subject, struct error *err) {
    int rc = name_check(subject, true, err);
    return rc == OK ? b->backend->subscribe(b->state, subject, err) : rc;
}

int bus_consume(struct bus *b, const char *queue, int limit, struct error *err) {
    int rc = name_check(queue, false, err);
    return rc == OK ? b->backend->consume(b->state, queue, limit, err) : rc;
}

int bus_publish(struct bus *b, const char *subject, const void *data, size_t len,
                struct error *err) {
    int rc = check(subject, len, err);
    return rc == OK ? b->backend->publish(b->state, subject, data, len, err) : rc;
}

int bus_enqueue(struct bus *b, const char *queue, const char *id, const void *data, size_t len,
                struct error *err) {
    int rc = check(queue, len, err);
    if (rc == OK && strlen(id) >= BUS_NAME_MAX)
        rc = error_set(err, ERR_USAGE, "the id of an item is too long");
    return rc == OK ? b->backend->enqueue(b->state, queue, id, data, len, err) : rc;
}

int bus_purge(struct bus *b, const char *queue, struct error *err) {
    int rc = name_check(queue, false, err);
    return rc == OK ? b->backend->purge(b->state, queue, err) : rc;
}

int bus_receive(struct bus *b, double seconds, struct bus_message *out, struct error *err) {
    return b->backend->receive(b->state, seconds, out, err);
}

int bus_ack(struct bus *b, uint64_t item, struct error *err) {
    return b->backend->ack(b->state, item, err);
}

int bus_nak(struct bus *b, uint64_t item, struct error *err) {
    return b->backend->nak(b->state, item, err);
}

int bus_working(struct bus *b, uint64_t item, struct error *err) {
    return b->backend->working(b->state, item, err);
}

void bus_wake(struct bus *b) {
    b->backend->wake(b->state);
}
