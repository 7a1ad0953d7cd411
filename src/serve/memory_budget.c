/*
 * memory_budget: a table of owners with their bytes, and the sum of them.
 *
 * Invariant: `used` is the sum of the owners' bytes and never more than `limit_bytes`; no owner can
 * reserve more than half of `limit_bytes`. The budget counts reservations; it does not measure the
 * memory of the process.
 */
#define _GNU_SOURCE
#include "serve/memory_budget.h"

#include <pthread.h>
#include <stdlib.h>

enum { BUCKETS = 1024 };

struct budget_owner {
    struct budget_owner *next;
    const void *key;
    size_t bytes;
};
struct memory_budget {
    pthread_mutex_t lock;
    struct budget_owner *buckets[BUCKETS];
    struct memory_budget_stats stats;
};

struct memory_budget *memory_budget_new(size_t limit) {
    struct memory_budget *b = xcalloc(1, sizeof *b);
    pthread_mutex_init(&b->lock, NULL);
    b->stats.limit_bytes = limit;
    return b;
}

void memory_budget_free(struct memory_budget *b) {
    if (!b) return;
    for (int i = 0; i < BUCKETS; i++)
        for (struct budget_owner *o = b->buckets[i], *next; o; o = next) {
            next = o->next;
            free(o);
        }
    pthread_mutex_destroy(&b->lock);
    free(b);
}

size_t memory_budget_owner_max(const struct memory_budget *b) {
    return b->stats.limit_bytes / 2;
}

/* The link that points to the owner, or the NULL link where the owner would be added. The lock is
 * held. */
static struct budget_owner **owner_find(struct memory_budget *b, const void *key) {
    uint64_t hash = (uint64_t)(uintptr_t)key * 0x9E3779B97F4A7C15ull;
    struct budget_owner **link = &b->buckets[hash >> 54];
    while (*link && (*link)->key != key) link = &(*link)->next;
    return link;
}

static double mb(size_t bytes) {
    return (double)bytes / (1 << 20);
}

static int owner_set(struct memory_budget *b, struct budget_owner **link, const void *key,
                     size_t bytes, struct error *err) {
    size_t previous = *link ? (*link)->bytes : 0, others = b->stats.used - previous;
    if (bytes > previous && bytes > memory_budget_owner_max(b)) {
        b->stats.refused++;
        return error_set(err, ERR_USAGE,
                         "it needs about %.1f MB of memory, and a request may have %.1f MB here "
                         "(half of --max-request-memory)",
                         mb(bytes), mb(memory_budget_owner_max(b)));
    }
    if (bytes > previous && bytes > b->stats.limit_bytes - others) {
        b->stats.refused++;
        return error_set(err, ERR_STATE,
                         "the memory for requests is in use (%.1f of %.1f MB, and this one needs "
                         "about %.1f); try again later",
                         mb(others), mb(b->stats.limit_bytes), mb(bytes));
    }
    if (!*link) {
        *link = xcalloc(1, sizeof **link);
        (*link)->key = key;
        b->stats.owners++;
    }
    (*link)->bytes = bytes;
    b->stats.used = others + bytes;
    b->stats.peak = MAX(b->stats.peak, b->stats.used);
    return OK;
}

int memory_budget_set(struct memory_budget *b, const void *owner, size_t bytes, struct error *err) {
    pthread_mutex_lock(&b->lock);
    int rc = owner_set(b, owner_find(b, owner), owner, bytes, err);
    pthread_mutex_unlock(&b->lock);
    return rc;
}

int memory_budget_reserve(struct memory_budget *b, const void *owner, size_t bytes,
                          struct error *err) {
    pthread_mutex_lock(&b->lock);
    struct budget_owner **link = owner_find(b, owner);
    size_t previous = *link ? (*link)->bytes : 0;
    int rc =
        owner_set(b, link, owner, bytes > SIZE_MAX - previous ? SIZE_MAX : previous + bytes, err);
    pthread_mutex_unlock(&b->lock);
    return rc;
}

void memory_budget_transfer(struct memory_budget *b, const void *from, const void *to,
                            size_t bytes) {
    pthread_mutex_lock(&b->lock);
    struct budget_owner *source = *owner_find(b, from), **link = owner_find(b, to);
    if (source && !*link) {
        *link = xcalloc(1, sizeof **link);
        (*link)->key = to;
        b->stats.owners++;
    }
    size_t moved = source ? MIN(bytes, source->bytes) : 0;
    if (moved) {
        source->bytes -= moved;
        (*link)->bytes += moved;
    }
    pthread_mutex_unlock(&b->lock);
}

size_t memory_budget_reserved(struct memory_budget *b, const void *owner) {
    pthread_mutex_lock(&b->lock);
    struct budget_owner **link = owner_find(b, owner);
    size_t bytes = *link ? (*link)->bytes : 0;
    pthread_mutex_unlock(&b->lock);
    return bytes;
}

void memory_budget_release(struct memory_budget *b, const void *owner) {
    pthread_mutex_lock(&b->lock);
    struct budget_owner **link = owner_find(b, owner), *o = *link;
    if (o) {
        b->stats.used -= o->bytes;
        b->stats.owners--;
        *link = o->next;
        free(o);
    }
    pthread_mutex_unlock(&b->lock);
}

struct memory_budget_stats memory_budget_stats(struct memory_budget *b) {
    pthread_mutex_lock(&b->lock);
    struct memory_budget_stats s = b->stats;
    pthread_mutex_unlock(&b->lock);
    return s;
}
