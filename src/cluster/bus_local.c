/*
 * bus_local: a member's connection to the hub of a local bus.
 */
#define _GNU_SOURCE
#include "cluster/bus_backend.h"
#include "cluster/bus_hub.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

static const double REPLY_SECONDS = 30;

/* A frame that arrived before the awaited reply. */
struct waiting {
    struct waiting *next;
    struct bus_frame frame;
    uint8_t data[];
};
struct local_bus {
    struct bus_hub *hub; /* the hub that this process runs, or NULL */
    char *address;
    int fd, wake; /* wake: an eventfd */
    bool woken;   /* since the last local_receive */
    struct buf in, out;
    size_t parsed; /* bytes of `in` before this were handled */
    struct waiting *first, **last, *given;
    char subject[BUS_NAME_MAX]; /* subject of the last message */
};

/* sending */

static int bus_lost(const struct local_bus *b, struct error *err) {
    return error_set(err, ERR_IO, "the bus '%s' is gone", b->address);
}

static int out_flush(struct local_bus *b, struct error *err) {
    while (b->out.len) {
        struct pollfd p = {.fd = b->fd, .events = POLLOUT};
        if (!bus_socket_write(b->fd, &b->out)) return bus_lost(b, err);
        if (b->out.len && poll(&p, 1, (int)(REPLY_SECONDS * 1000)) == 0)
            return error_set(err, ERR_IO, "the bus '%s' does not read", b->address);
    }
    return OK;
}

static int frame_send(struct local_bus *b, enum bus_op op, uint64_t number, const char *name,
                      const void *data, size_t len, struct error *err) {
    bus_frame_add(&b->out, op, number, name, data, len);
    return out_flush(b, err);
}

/* receiving */

static void local_wake(void *ctx) {
    const struct local_bus *b = ctx;
    uint64_t one = 1;
    ssize_t n = write(b->wake, &one, sizeof one);
    (void)n;
}

static bool wake_clear(const struct local_bus *b) {
    uint64_t count;
    return read(b->wake, &count, sizeof count) == sizeof count;
}

/* 1: *f is the next frame that has arrived, whose data is valid until the next call. */
static int frame_next(struct local_bus *b, double seconds, struct bus_frame *f, struct error *err) {
    double until = clock_now() + seconds;
    for (;;) {
        int64_t n = bus_frame_parse((uint8_t *)b->in.data + b->parsed, b->in.len - b->parsed, f);
        if (n < 0) return error_set(err, ERR_FORMAT, "the bus '%s' sent a wrong frame", b->address);
        b->parsed += (size_t)n;
        if (n > 0) return 1;
        if (b->parsed) memmove(b->in.data, b->in.data + b->parsed, b->in.len - b->parsed);
        b->in.len -= b->parsed;
        b->parsed = 0;
        struct pollfd p[] = {{.fd = b->fd, .events = POLLIN}, {.fd = b->wake, .events = POLLIN}};
        double left = MAX(until - clock_now(), 0);
        int ready = poll(p, 2, (int)ceil(left * 1000));
        if (ready == 0 || (ready < 0 && errno == EINTR)) return 0;
        if (p[1].revents) b->woken |= wake_clear(b);
        if (!p[0].revents) return 0;
        if (!bus_socket_read(b->fd, &b->in)) return bus_lost(b, err);
    }
}

static void waiting_add(struct local_bus *b, const struct bus_frame *f) {
    struct waiting *w = xmalloc(sizeof *w + f->len + 1);
    w->next = NULL;
    w->frame = *f;
    memcpy(w->data, f->data, f->len);
    w->frame.data = w->data;
    *b->last = w;
    b->last = &w->next;
}

static int reply_receive(struct local_bus *b, struct bus_frame *f, struct error *err) {
    double until = clock_now() + REPLY_SECONDS;
    while (clock_now() < until) {
        int rc = frame_next(b, until - clock_now(), f, err);
        if (rc < 0) return rc;
        if (rc > 0 && f->op != BUS_REPLY) waiting_add(b, f);
        if (rc == 0 || f->op != BUS_REPLY) continue;
        if (f->number == 0) return OK;
        return error_set(err, f->number <= 8 ? -(int)f->number : ERR_FORMAT, "%.*s",
                         (int)MIN(f->len, 200), (const char *)f->data);
    }
    return error_set(err, ERR_IO, "the bus '%s' does not reply", b->address);
}

static int local_receive(void *ctx, double seconds, struct bus_message *out, struct error *err) {
    struct local_bus *b = ctx;
    struct bus_frame f;
    free(b->given);
    b->given = b->first;
    if (b->given) {
        b->first = b->given->next;
        if (!b->first) b->last = &b->first;
        f = b->given->frame;
    } else {
        int rc = frame_next(b, b->woken ? 0 : seconds, &f, err);
        if (rc == 0) b->woken = false;
        if (rc <= 0) return rc;
    }
    if (f.op != BUS_MESSAGE && f.op != BUS_ITEM)
        return error_set(err, ERR_FORMAT, "the bus '%s' sent a wrong frame", b->address);
    snprintf(b->subject, sizeof b->subject, "%s", f.name);
    *out = (struct bus_message){b->subject, f.data, f.len, f.op == BUS_ITEM ? f.number : 0};
    return 1;
}

/* operations */

static int local_subscribe(void *ctx, const char *subject, struct error *err) {
    struct local_bus *b = ctx;
    return frame_send(b, BUS_SUBSCRIBE, 0, subject, NULL, 0, err);
}

static int local_consume(void *ctx, const char *queue, int limit, struct error *err) {
    struct local_bus *b = ctx;
    return frame_send(b, BUS_CONSUME, (uint64_t)limit, queue, NULL, 0, err);
}

static int local_publish(void *ctx, const char *subject, const void *data, size_t len,
                         struct error *err) {
    struct local_bus *b = ctx;
    return frame_send(b, BUS_PUBLISH, 0, subject, data, len, err);
}

static int request(struct local_bus *b, enum bus_op op, uint64_t number, const char *name,
                   const void *data, size_t len, struct bus_frame *reply, struct error *err) {
    int rc = frame_send(b, op, number, name, data, len, err);
    return rc == OK ? reply_receive(b, reply, err) : rc;
}

static int local_enqueue(void *ctx, const char *queue, const char *id, const void *data, size_t len,
                         struct error *err) {
    struct local_bus *b = ctx;
    struct bus_frame reply;
    struct buf item = {0};
    uint8_t n = (uint8_t)strlen(id);
    CHECK(strlen(id) < BUS_NAME_MAX);
    buf_add(&item, &n, 1);
    buf_add(&item, id, n);
    buf_add(&item, data, len);
    int rc = request(b, BUS_ENQUEUE, 0, queue, item.data, item.len, &reply, err);
    buf_release(&item);
    return rc;
}

static int local_purge(void *ctx, const char *queue, struct error *err) {
    struct local_bus *b = ctx;
    return frame_send(b, BUS_PURGE, 0, queue, NULL, 0, err);
}

static int local_ack(void *ctx, uint64_t item, struct error *err) {
    struct local_bus *b = ctx;
    return frame_send(b, BUS_ACK, item, "", NULL, 0, err);
}

static int local_nak(void *ctx, uint64_t item, struct error *err) {
    struct local_bus *b = ctx;
    return frame_send(b, BUS_NAK, item, "", NULL, 0, err);
}

static int local_working(void *ctx, uint64_t item, struct error *err) {
    struct local_bus *b = ctx;
    return frame_send(b, BUS_WORKING, item, "", NULL, 0, err);
}

/* open and close */

static void local_close(void *ctx) {
    struct local_bus *b = ctx;
    fd_close(&b->fd);
    fd_close(&b->wake);
    bus_hub_stop(b->hub);
    while (b->first) {
        struct waiting *w = b->first;
        b->first = w->next;
        free(w);
    }
    free(b->given);
    buf_release(&b->in);
    buf_release(&b->out);
    free(b->address);
    free(b);
}

static void *local_open(const char *address, char **joined, struct error *err) {
    static const char UNIX[] = "unix:";
    struct local_bus *b = xcalloc(1, sizeof *b);
    int rc = OK;
    b->fd = -1;
    b->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (b->wake < 0) rc = error_errno(err, "cannot make an eventfd");
    b->last = &b->first;
    if (strcmp(address, "local") == 0) {
        b->hub = rc == OK ? bus_hub_start(err) : NULL;
        if (!b->hub) rc = err->code;
        b->address = b->hub ? xasprintf("%s%s", UNIX, bus_hub_name(b->hub)) : NULL;
    } else {
        b->address = xstrdup(address);
    }
    if (rc == OK) rc = b->fd = bus_socket_open(b->address + strlen(UNIX), false, err);
    if (rc >= 0) {
        *joined = xstrdup(b->address);
        return b;
    }
    local_close(b);
    return NULL;
}

const struct bus_backend bus_local = {local_open,    local_close,   local_subscribe, local_consume,
                                      local_publish, local_enqueue, local_purge,     local_receive,
                                      local_ack,     local_nak,     local_working,   local_wake};
