/*
 * client_limits: a hash table with one entry per client: how much of each limit (connections,
 * requests, bytes) the client holds, and which right and wrong API keys it has sent.
 *
 * Invariants. 1. An entry that holds nothing is idle: it is freed if it has no keys to remember,
 * else it is in the idle list, least recently used first, from which the oldest entry is freed when
 * the list is full. 2. The hash has a random key, because clients choose their addresses and could
 * otherwise all choose one bucket.
 */
#define _GNU_SOURCE
#include "http/http.h"

#include <math.h>
#include <pthread.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 4096, NAME_SIZE = 64, WRONG_KEYS_MAX = 8 };

struct client {
    struct client *next;          /* next client in its bucket */
    struct client *older, *newer; /* neighbours in the idle list */
    char name[NAME_SIZE];
    bool idle;
    int64_t held[N_LIMITS];
    /* n_failures: wrong keys, except repetitions of the last WRONG_KEYS_MAX; 0 again after
     * AUTH_FAILURE_TTL seconds without one. last_failure: time of the last one. Before
     * `backoff_until` no guessable key of the client is compared. */
    int n_failures;
    double backoff_until, last_failure;
    uint64_t known_keys; /* bit i: the client has sent the right guessable key with index i */
    uint64_t failed_hashes[WRONG_KEYS_MAX]; /* ring buffer: hashes of its last wrong keys; the next
                                            index is n_failures % WRONG_KEYS_MAX */
};
struct client_limits {
    pthread_mutex_t lock;
    unsigned char seed[crypto_shorthash_KEYBYTES];
    struct client *buckets[BUCKETS];
    struct client *oldest, *newest; /* the list of idle clients */
    int n, n_idle;
};

struct client_limits *client_limits_new(void) {
    struct client_limits *l = xcalloc(1, sizeof *l);
    CHECK(sodium_init() >= 0);
    pthread_mutex_init(&l->lock, NULL);
    crypto_shorthash_keygen(l->seed);
    return l;
}

void client_limits_free(struct client_limits *l) {
    if (!l) return;
    for (int i = 0; i < BUCKETS; i++)
        for (struct client *c = l->buckets[i], *next; c; c = next) {
            next = c->next;
            free(c);
        }
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static uint64_t text_hash(const struct client_limits *l, const char *text) {
    uint64_t hash;
    unsigned char bytes[crypto_shorthash_BYTES];
    crypto_shorthash(bytes, (const unsigned char *)text, strlen(text), l->seed);
    memcpy(&hash, bytes, sizeof hash);
    return hash;
}

static struct client **client_find_slot(struct client_limits *l, const char *name) {
    struct client **at = &l->buckets[text_hash(l, name) % BUCKETS];
    while (*at && strcmp((*at)->name, name) != 0) at = &(*at)->next;
    return at;
}

static void idle_list_remove(struct client_limits *l, struct client *c) {
    if (!c->idle) return;
    *(c->older ? &c->older->newer : &l->oldest) = c->newer;
    *(c->newer ? &c->newer->older : &l->newest) = c->older;
    c->older = c->newer = NULL;
    c->idle = false;
    l->n_idle--;
}

static void client_remove(struct client_limits *l, struct client *c) {
    struct client **at = client_find_slot(l, c->name);
    idle_list_remove(l, c);
    *at = c->next;
    free(c);
    l->n--;
}

/* Called after a change: moves the client into or out of the idle list, or frees it. If the list
 * is then too long, frees its oldest client. */
static void client_update_idle(struct client_limits *l, struct client *c) {
    idle_list_remove(l, c);
    for (int i = 0; i < N_LIMITS; i++)
        if (c->held[i]) return;
    if (!c->n_failures && !c->known_keys) {
        client_remove(l, c);
        return;
    }
    c->idle = true;
    c->older = l->newest;
    *(l->newest ? &l->newest->newer : &l->oldest) = c;
    l->newest = c;
    if (++l->n_idle > CLIENT_LIMITS_IDLE_MAX) client_remove(l, l->oldest);
}

/* Finds or adds a client and takes the lock, which client_put_unlock releases. */
static struct client *client_get_locked(struct client_limits *l, const char *name) {
    pthread_mutex_lock(&l->lock);
    struct client **at = client_find_slot(l, name);
    if (*at) return *at;
    *at = xcalloc(1, sizeof **at);
    snprintf((*at)->name, NAME_SIZE, "%s", name);
    l->n++;
    return *at;
}

static void client_put_unlock(struct client_limits *l, struct client *c) {
    client_update_idle(l, c);
    pthread_mutex_unlock(&l->lock);
}

bool client_limits_acquire(struct client_limits *l, const char *client, enum client_limit what,
                           int64_t n, int64_t max) {
    struct client *c = client_get_locked(l, client);
    bool fits = !max || c->held[what] + n <= max;
    if (fits) c->held[what] += n;
    client_put_unlock(l, c);
    return fits;
}

void client_limits_release(struct client_limits *l, const char *client, enum client_limit what,
                           int64_t n) {
    struct client *c = client_get_locked(l, client);
    c->held[what] -= n;
    CHECK(c->held[what] >= 0);
    client_put_unlock(l, c);
}

bool client_limits_has_room(struct client_limits *l, const char *client, enum client_limit what,
                            int64_t max) {
    pthread_mutex_lock(&l->lock);
    const struct client *c = *client_find_slot(l, client);
    bool room = !max || !c || c->held[what] < max;
    pthread_mutex_unlock(&l->lock);
    return room;
}

double client_limits_auth_backoff(struct client_limits *l, const char *client, double now) {
    pthread_mutex_lock(&l->lock);
    const struct client *c = *client_find_slot(l, client);
    double wait = c ? MAX(c->backoff_until - now, 0) : 0;
    pthread_mutex_unlock(&l->lock);
    return wait;
}

static bool has_failed_before(const struct client *c, uint64_t hash) {
    for (int i = 0; i < MIN(c->n_failures, WRONG_KEYS_MAX); i++)
        if (c->failed_hashes[i] == hash) return true;
    return false;
}

static void failure_count(struct client *c, uint64_t hash, double now) {
    c->failed_hashes[c->n_failures % WRONG_KEYS_MAX] = hash;
    c->last_failure = now;
    int over = ++c->n_failures - AUTH_FREE_FAILURES;
    if (over >= 0) c->backoff_until = now + MIN(ldexp(1, MIN(over, 30)), AUTH_BACKOFF_MAX);
}

void client_limits_auth_failed(struct client_limits *l, const char *client, const char *key,
                               double now) {
    uint64_t hash = text_hash(l, key);
    struct client *c = client_get_locked(l, client);
    if (now - c->last_failure > AUTH_FAILURE_TTL) c->n_failures = 0;
    if (!has_failed_before(c, hash)) failure_count(c, hash, now);
    client_put_unlock(l, c);
}

void client_limits_auth_ok(struct client_limits *l, const char *client, int key) {
    struct client *c = client_get_locked(l, client);
    c->known_keys |= (uint64_t)1 << (key & 63);
    client_put_unlock(l, c);
}

bool client_limits_was_auth_ok(struct client_limits *l, const char *client, int key) {
    pthread_mutex_lock(&l->lock);
    const struct client *c = *client_find_slot(l, client);
    bool known = c && (c->known_keys >> (key & 63) & 1);
    pthread_mutex_unlock(&l->lock);
    return known;
}

int client_limits_count(struct client_limits *l) {
    pthread_mutex_lock(&l->lock);
    int n = l->n;
    pthread_mutex_unlock(&l->lock);
    return n;
}
