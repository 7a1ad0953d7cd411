/*
 * bus_hub: see bus_hub.h.
 *
 * One thread owns all state; only the pipe that ends it is shared. A connection that sends a wrong
 * frame, or does not read its messages, is closed. When a consumer disconnects, its items return
 * to the head of their queue in their order.
 */
#define _GNU_SOURCE
#include "cluster/bus_hub.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_MEMBERS = 1024, MAX_SUBSCRIPTIONS = 64, OUT_BYTES_MAX = 64 << 20 };

struct item {
    struct item *next;
    uint64_t number;
    char queue[BUS_NAME_MAX], id[BUS_NAME_MAX];
    uint8_t *data;
    size_t len;
    struct member *holder; /* NULL: it is not delivered */
    int via;               /* index of the holder's subscription */
    double until;          /* time at which it is delivered again, if it has a holder */
};
struct subscription {
    char name[BUS_NAME_MAX];
    int limit; /* limit of a consumer; 0: a subscription to a subject */
    int held;  /* items of the queue that the member holds */
};
struct member {
    int fd;
    bool broken;
    struct buf in, out;
    struct subscription v[MAX_SUBSCRIPTIONS];
    int n;
};
struct bus_hub {
    char *name;
    int fd, stop[2];
    pthread_t thread;
    struct member *members[MAX_MEMBERS];
    int n;
    struct item *items; /* oldest first */
    uint64_t last_number;
    size_t bytes; /* sum over items */
};

/* members */

static void member_send(struct member *m, enum bus_op op, uint64_t number, const char *name,
                        const void *data, size_t len) {
    bus_frame_add(&m->out, op, number, name, data, len);
    if (m->out.len > OUT_BYTES_MAX) m->broken = true;
}

static void member_reply(struct member *m, int code, const char *text) {
    member_send(m, BUS_REPLY, (uint64_t)-code, "", text, strlen(text));
}

static bool name_matches(const char *pattern, const char *name) {
    size_t n = strlen(pattern);
    if (n > 0 && pattern[n - 1] == '*') return strncmp(pattern, name, n - 1) == 0;
    return strcmp(pattern, name) == 0;
}

static bool member_hears(const struct member *m, const char *subject) {
    for (int i = 0; i < m->n; i++)
        if (!m->v[i].limit && name_matches(m->v[i].name, subject)) return true;
    return false;
}

static void member_subscribe(struct member *m, const struct bus_frame *f, int limit) {
    if (m->n == MAX_SUBSCRIPTIONS) {
        m->broken = true;
        return;
    }
    struct subscription *s = &m->v[m->n++];
    memcpy(s->name, f->name, sizeof s->name);
    s->limit = limit;
}

/* Takes the item from its holder. */
static void item_release(struct item *i) {
    if (i->holder) i->holder->v[i->via].held--;
    i->holder = NULL;
}

static void member_close(struct bus_hub *h, int index) {
    struct member *m = h->members[index];
    for (struct item *i = h->items; i; i = i->next)
        if (i->holder == m) item_release(i);
    h->members[index] = h->members[--h->n];
    close(m->fd);
    buf_release(&m->in);
    buf_release(&m->out);
    free(m);
}

/* queues */

static void item_remove(struct bus_hub *h, struct item **at) {
    struct item *i = *at;
    *at = i->next;
    item_release(i);
    h->bytes -= i->len;
    free(i->data);
    free(i);
}

static struct item **item_find(struct bus_hub *h, uint64_t number, const struct member *holder) {
    struct item **at = &h->items;
    while (*at && ((*at)->number != number || (*at)->holder != holder)) at = &(*at)->next;
    return *at ? at : NULL;
}

/* Gives the item to the consumer that holds the fewest of its queue, if one may have another. */
static void item_assign(struct bus_hub *h, struct item *i) {
    int fewest = 0;
    for (int k = 0; k < h->n; k++)
        for (int via = 0; via < h->members[k]->n; via++) {
            const struct subscription *s = &h->members[k]->v[via];
            if (h->members[k]->broken || s->held >= s->limit || !name_matches(s->name, i->queue) ||
                (i->holder && s->held >= fewest))
                continue;
            i->holder = h->members[k];
            i->via = via;
            fewest = s->held;
        }
}

static void items_deliver(struct bus_hub *h) {
    double now = clock_now();
    for (struct item *i = h->items; i; i = i->next) {
        if (i->holder && now < i->until) continue;
        item_release(i);
        item_assign(h, i);
        if (!i->holder) continue;
        i->holder->v[i->via].held++;
        i->until = now + BUS_ACK_SECONDS;
        member_send(i->holder, BUS_ITEM, i->number, i->queue, i->data, i->len);
    }
}

static uint8_t *bytes_copy(const uint8_t *p, size_t len) {
    uint8_t *copy = xmalloc(len + 1);
    memcpy(copy, p, len);
    return copy;
}

static void enqueue(struct bus_hub *h, struct member *m, const struct bus_frame *f) {
    size_t n = f->len ? f->data[0] : 0;
    if (f->len < 1 + n || n >= BUS_NAME_MAX) {
        m->broken = true;
        return;
    }
    char id[BUS_NAME_MAX];
    memcpy(id, f->data + 1, n);
    id[n] = 0;
    struct item **at = &h->items;
    for (; *at; at = &(*at)->next)
        if (strcmp((*at)->queue, f->name) == 0 && strcmp((*at)->id, id) == 0) {
            member_reply(m, OK, "");
            return;
        }
    size_t len = f->len - 1 - n;
    if (h->bytes + len > BUS_QUEUE_BYTES) {
        member_reply(m, ERR_MEMORY, "the queues of the bus are full");
        return;
    }
    struct item *i = *at = xcalloc(1, sizeof *i);
    i->number = ++h->last_number;
    memcpy(i->queue, f->name, sizeof i->queue);
    memcpy(i->id, id, sizeof i->id);
    i->data = bytes_copy(f->data + 1 + n, len);
    i->len = len;
    h->bytes += len;
    member_reply(m, OK, "");
}

static void purge(struct bus_hub *h, const char *queue) {
    for (struct item **at = &h->items; *at;)
        if (!(*at)->holder && strcmp((*at)->queue, queue) == 0)
            item_remove(h, at);
        else
            at = &(*at)->next;
}

/* frames */

static void publish(struct bus_hub *h, const struct bus_frame *f) {
    for (int i = 0; i < h->n; i++)
        if (member_hears(h->members[i], f->name))
            member_send(h->members[i], BUS_MESSAGE, 0, f->name, f->data, f->len);
}

static void item_settle(struct bus_hub *h, const struct member *m, const struct bus_frame *f) {
    struct item **at = item_find(h, f->number, m);
    if (!at) return; // it was delivered to another consumer meanwhile
    if (f->op == BUS_ACK)
        item_remove(h, at);
    else if (f->op == BUS_NAK)
        item_release(*at);
    else
        (*at)->until = clock_now() + BUS_ACK_SECONDS;
}

static void frame_handle(struct bus_hub *h, struct member *m, const struct bus_frame *f) {
    switch (f->op) {
    case BUS_SUBSCRIBE:
        member_subscribe(m, f, 0);
        return;
    case BUS_CONSUME:
        member_subscribe(m, f, (int)MIN(MAX(f->number, 1), 1 << 16));
        return;
    case BUS_PUBLISH:
        publish(h, f);
        return;
    case BUS_ENQUEUE:
        enqueue(h, m, f);
        return;
    case BUS_PURGE:
        purge(h, f->name);
        return;
    case BUS_ACK:
    case BUS_NAK:
    case BUS_WORKING:
        item_settle(h, m, f);
        return;
    default:
        m->broken = true;
    }
}

static void member_read(struct bus_hub *h, struct member *m) {
    struct bus_frame f;
    size_t at = 0;
    int64_t n = 0;
    if (!bus_socket_read(m->fd, &m->in)) m->broken = true;
    while (!m->broken &&
           (n = bus_frame_parse((uint8_t *)m->in.data + at, m->in.len - at, &f)) > 0) {
        frame_handle(h, m, &f);
        at += (size_t)n;
    }
    if (n < 0) m->broken = true;
    memmove(m->in.data, m->in.data + at, m->in.len - at);
    m->in.len -= at;
}

/* the thread */

static void accept_member(struct bus_hub *h) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    int fd = accept4(h->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    if (h->n == MAX_MEMBERS || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
        peer.uid != geteuid()) {
        close(fd);
        return;
    }
    struct member *m = h->members[h->n++] = xcalloc(1, sizeof *m);
    m->fd = fd;
}

static void *hub_run(void *ctx) {
    struct bus_hub *h = ctx;
    struct pollfd *fds = xcalloc(MAX_MEMBERS + 2, sizeof *fds);
    for (;;) {
        int n = h->n;
        fds[0] = (struct pollfd){.fd = h->stop[0], .events = POLLIN};
        fds[1] = (struct pollfd){.fd = h->fd, .events = POLLIN};
        for (int i = 0; i < n; i++)
            fds[i + 2] =
                (struct pollfd){.fd = h->members[i]->fd,
                                .events = (short)(POLLIN | (h->members[i]->out.len ? POLLOUT : 0))};
        poll(fds, (nfds_t)n + 2, 1000);
        if (fds[0].revents) break;
        for (int i = 0; i < n; i++)
            if (fds[i + 2].revents & (POLLIN | POLLHUP | POLLERR)) member_read(h, h->members[i]);
        if (fds[1].revents) accept_member(h);
        items_deliver(h);
        for (int i = h->n - 1; i >= 0; i--) {
            struct member *m = h->members[i];
            if (!m->broken && m->out.len && !bus_socket_write(m->fd, &m->out)) m->broken = true;
            if (m->broken) member_close(h, i);
        }
    }
    free(fds);
    return NULL;
}

/* start and stop */

/* An abstract address: no file remains if the process is killed. */
static int hub_listen(struct bus_hub *h, struct error *err) {
    uint64_t random[2];
    randombytes_buf(random, sizeof random);
    h->name = xasprintf("@shoal-%016llx%016llx", (unsigned long long)random[0],
                        (unsigned long long)random[1]);
    h->fd = bus_socket_open(h->name, true, err);
    if (h->fd < 0) return err->code;
    if (pipe2(h->stop, O_CLOEXEC) != 0) return error_errno(err, "cannot make a pipe");
    return OK;
}

static void hub_free(struct bus_hub *h) {
    while (h->n) member_close(h, h->n - 1);
    while (h->items) item_remove(h, &h->items);
    fd_close(&h->fd);
    fd_close(&h->stop[0]);
    fd_close(&h->stop[1]);
    free(h->name);
    free(h);
}

struct bus_hub *bus_hub_start(struct error *err) {
    struct bus_hub *h = xcalloc(1, sizeof *h);
    h->fd = h->stop[0] = h->stop[1] = -1;
    if (hub_listen(h, err) == OK) {
        if (pthread_create(&h->thread, NULL, hub_run, h) == 0) return h;
        error_set(err, ERR_MEMORY, "no thread can be started");
    }
    hub_free(h);
    return NULL;
}

const char *bus_hub_name(const struct bus_hub *h) {
    return h->name;
}

void bus_hub_stop(struct bus_hub *h) {
    if (!h) return;
    ssize_t n = write(h->stop[1], "", 1);
    (void)n;
    pthread_join(h->thread, NULL);
    hub_free(h);
}
