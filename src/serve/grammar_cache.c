/*
 * grammar_cache: the cache of compiled grammars and the limits on compiling large ones. See
 * grammar_cache.h.
 *
 * Before anything is compiled, an entry is looked up by the SHA-256 of its kind and source. While a
 * large source is being compiled its entry has no grammar, so that requests with the same source
 * wait for it instead of compiling it again.
 *
 * Invariants: an entry in use is never freed; the sum of bytes never exceeds the limit.
 */
#define _GNU_SOURCE
#include "serve/grammar_cache.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SOURCE_MAX = 256 << 10, /* bytes of text */
    SMALL_SHARE = 32,       /* fraction of the limits; a first try takes about a millisecond */
    SMALL_SOURCE = 32 << 10,
    LARGE_KNOWN = 256, /* sources whose first try can be skipped */
    LARGE_NICE = 4,    /* nice value of the compile threads: the engine goes first */
    CALLER_LEN = 80,
};

struct cache_entry {
    char hash[HASH_LEN], caller[CALLER_LEN]; /* caller: the one that had it compiled */
    struct grammar *g;                       /* NULL: being compiled */
    size_t bytes;
    int users; /* including requests that wait for it */
    bool failed;
    struct error err;
};
/* A large source that a thread waits for. */
struct compile_task {
    struct compile_task *next;
    const char *kind, *text;
    size_t len;
    struct grammar *g;
    struct error *err;
    bool done;
};
struct grammar_cache {
    struct grammar_cache_options o;
    pthread_t *threads; /* [o.large] */
    pthread_mutex_t lock;
    pthread_cond_t changed, ordered;
    struct compile_task *orders, *last_order;
    struct cache_entry **v; /* [n] most recently used first */
    int n, cap;
    int compiling, waiting; /* compiling: threads that submitted a task; waiting: threads that wait
                               for another thread's task */
    bool quit;
    size_t bytes;
    uint64_t compiled, n_large;
    uint64_t large[LARGE_KNOWN]; /* prefixes of hashes; a ring */
};

static void entry_free(struct cache_entry *e) {
    grammar_free(e->g);
    free(e);
}

/* the list; the lock is held */

static int entry_at(const struct grammar_cache *all, const struct cache_entry *e) {
    int i = 0;
    while (all->v[i] != e) i++;
    return i;
}

static void entry_remove(struct grammar_cache *all, struct cache_entry *e) {
    int i = entry_at(all, e);
    memmove(all->v + i, all->v + i + 1, sizeof *all->v * (size_t)(--all->n - i));
    all->bytes -= e->bytes;
    entry_free(e);
}

static void entry_to_front(struct grammar_cache *all, struct cache_entry *e) {
    int i = entry_at(all, e);
    memmove(all->v + 1, all->v, sizeof *all->v * (size_t)i);
    all->v[0] = e;
}

static struct cache_entry *entry_find(const struct grammar_cache *all, const char *hash) {
    for (int i = 0; i < all->n; i++)
        if (strcmp(all->v[i]->hash, hash) == 0 && !all->v[i]->failed) return all->v[i];
    return NULL;
}

static struct cache_entry *entry_add(struct grammar_cache *all, const char *hash,
                                     const char *caller) {
    if (all->n == all->cap) {
        all->cap = all->cap ? 2 * all->cap : 16;
        all->v = xrealloc(all->v, sizeof *all->v * (size_t)all->cap);
    }
    struct cache_entry *e = xcalloc(1, sizeof *e);
    strcpy(e->hash, hash);
    snprintf(e->caller, sizeof e->caller, "%s", caller);
    e->users = 1;
    memmove(all->v + 1, all->v, sizeof *all->v * (size_t)all->n++);
    all->v[0] = e;
    return e;
}

static bool same_caller(const struct cache_entry *e, const char *caller) {
    return strncmp(e->caller, caller, sizeof e->caller - 1) == 0;
}

static size_t caller_bytes(const struct grammar_cache *all, const char *caller) {
    size_t bytes = 0;
    for (int i = 0; i < all->n; i++)
        if (same_caller(all->v[i], caller)) bytes += all->v[i]->bytes;
    return bytes;
}

static int caller_entries(const struct grammar_cache *all, const char *caller) {
    int n = 0;
    for (int i = 0; i < all->n; i++) n += same_caller(all->v[i], caller);
    return n;
}

/* The unused entry to evict: the oldest of the caller with the most entries, or of `only` if
 * given. */
static struct cache_entry *entry_to_evict(const struct grammar_cache *all, const char *only) {
    struct cache_entry *out = NULL;
    int most = 0;
    for (int i = all->n - 1; i >= 0; i--) {
        struct cache_entry *e = all->v[i];
        if (e->users || (only && !same_caller(e, only))) continue;
        int n = caller_entries(all, e->caller);
        if (n > most) out = e, most = n;
    }
    return out;
}

/* Makes room for `bytes` more of a caller. False: the entries in use leave no room. */
static bool room_make(struct grammar_cache *all, const char *caller, size_t bytes) {
    struct cache_entry *e;
    while (caller_bytes(all, caller) + bytes > all->o.bytes / 2) {
        if (!(e = entry_to_evict(all, caller))) return false;
        entry_remove(all, e);
    }
    while (all->bytes + bytes > all->o.bytes) {
        if (!(e = entry_to_evict(all, NULL))) return false;
        entry_remove(all, e);
    }
    while (all->n > all->o.kept && (e = entry_to_evict(all, NULL))) entry_remove(all, e);
    return true;
}

/* compiling; without the lock */

static struct grammar *compile(const char *kind, const char *text, size_t len, struct error *err) {
    if (strcmp(kind, "json_schema") == 0) return grammar_new_json_schema(text, len, false, err);
    if (strcmp(kind, "json_object") == 0) return grammar_new_json_object(err);
    if (strcmp(kind, "regex") == 0) return grammar_new_regex(text, len, err);
    if (strcmp(kind, "gbnf") == 0) return grammar_new_gbnf(text, len, err);
    CHECK(strcmp(kind, "choices") == 0);
    return grammar_from_source("list of choices", text, len, err);
}

static struct grammar *compile_share(const char *kind, const char *text, size_t len, int share,
                                     bool *large, struct error *err) {
    grammar_set_build_budget(share);
    struct grammar *g = compile(kind, text, len, err);
    *large = !g && share > 1 && grammar_build_budget_exceeded();
    grammar_set_build_budget(1);
    if (!g) err->code = ERR_USAGE; // a source that is too large is an invalid request
    return g;
}

/* Compiles large sources, one after the other, with a low priority. */
static void *compile_thread(void *ctx) {
    struct grammar_cache *all = ctx;
    thread_background(LARGE_NICE);
    pthread_mutex_lock(&all->lock);
    for (;;) {
        struct compile_task *w = all->orders;
        bool large;
        if (!w && all->quit) break;
        if (!w) {
            pthread_cond_wait(&all->ordered, &all->lock);
            continue;
        }
        all->orders = w->next;
        pthread_mutex_unlock(&all->lock);
        w->g = compile_share(w->kind, w->text, w->len, 1, &large, w->err);
        pthread_mutex_lock(&all->lock);
        w->done = true;
        pthread_cond_broadcast(&all->changed);
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

static void source_hash(const char *kind, const char *text, size_t len, char out[HASH_LEN]) {
    struct sha256 h;
    sha256_init(&h);
    sha256_update(&h, kind, strlen(kind) + 1);
    sha256_update(&h, text, len);
    sha256_final(&h, out);
}

/* limits; the lock is held */

static int caller_places(const struct grammar_cache *all, const char *caller) {
    int n = 0;
    for (int i = 0; i < all->n; i++) n += !all->v[i]->g && same_caller(all->v[i], caller);
    return n;
}

static int refuse_busy(struct error *err) {
    return error_set(
        err, ERR_STATE,
        "too many large grammars are being compiled; try again, or send a smaller one");
}

/* Whether the maximum number of threads waits for large grammars. */
static bool threads_wait(const struct grammar_cache *all) {
    return all->compiling + all->waiting >= all->o.large + all->o.waiting;
}

/* Compiles the source in a compile thread. The entry, which has no grammar yet, counts for its
 * caller. */
static struct grammar *compile_task_run(struct grammar_cache *all, struct compile_task *w,
                                        const char *caller) {
    if (threads_wait(all) || caller_places(all, caller) > all->o.share) {
        refuse_busy(w->err);
        return NULL;
    }
    *(all->orders ? &all->last_order->next : &all->orders) = w;
    all->last_order = w;
    all->compiling++;
    pthread_cond_signal(&all->ordered);
    while (!w->done) pthread_cond_wait(&all->changed, &all->lock);
    all->compiling--;
    return w->g;
}

/* Waits until another request has compiled the entry. */
static struct grammar *entry_wait(struct grammar_cache *all, struct cache_entry *e,
                                  struct error *err) {
    if (!e->g && threads_wait(all)) {
        refuse_busy(err);
        return NULL;
    }
    e->users++;
    all->waiting++;
    while (!e->g && !e->failed) pthread_cond_wait(&all->changed, &all->lock);
    all->waiting--;
    if (e->g) {
        entry_to_front(all, e);
        return e->g;
    }
    *err = e->err;
    if (--e->users == 0) entry_remove(all, e);
    return NULL;
}

/* Puts the compiled grammar into its entry; takes g over. */
static struct grammar *entry_fill(struct grammar_cache *all, struct cache_entry *e,
                                  struct grammar *g, struct error *err) {
    size_t bytes = g ? grammar_bytes(g) : 0;
    all->compiled += g != NULL;
    if (g && !room_make(all, e->caller, bytes)) {
        error_set(err, ERR_STATE,
                  "grammars of running requests fill the cache of %zu MiB; try again",
                  all->o.bytes >> 20);
        grammar_free(g);
        g = NULL;
    }
    e->g = g;
    e->bytes = g ? bytes : 0;
    e->failed = !g;
    all->bytes += e->bytes;
    if (!g) e->err = *err;
    if (!g && --e->users == 0) entry_remove(all, e);
    pthread_cond_broadcast(&all->changed);
    return g;
}

static uint64_t large_mark(const char *hash) {
    return strtoull((char[]){hash[0], hash[1], hash[2], hash[3], hash[4], hash[5], hash[6], hash[7],
                             hash[8], hash[9], hash[10], hash[11], 0},
                    NULL, 16);
}

static bool is_known_large(const struct grammar_cache *all, const char *hash) {
    for (int i = 0; i < LARGE_KNOWN; i++)
        if (all->large[i] == large_mark(hash)) return true;
    return false;
}

static struct grammar *large_get(struct grammar_cache *all, const char *hash, const char *caller,
                                 const char *kind, const char *text, size_t len,
                                 struct error *err) {
    struct compile_task w = {.kind = kind, .text = text, .len = len, .err = err};
    if (!is_known_large(all, hash)) all->large[all->n_large++ % LARGE_KNOWN] = large_mark(hash);
    struct cache_entry *e = entry_add(all, hash, caller);
    return entry_fill(all, e, compile_task_run(all, &w, caller), err);
}

/* The first try. *large: the source exceeded the small share. */
static struct grammar *small_get(struct grammar_cache *all, const char *hash, const char *caller,
                                 const char *kind, const char *text, size_t len, bool *large,
                                 struct error *err) {
    struct grammar *g = compile_share(kind, text, len, SMALL_SHARE, large, err);
    if (!g) return NULL;
    pthread_mutex_lock(&all->lock);
    struct cache_entry *e = entry_find(all, hash);
    if (e && e->g) { // another request was faster
        e->users++;
        grammar_free(g);
        g = e->g;
    } else {
        g = entry_fill(all, entry_add(all, hash, caller), g, err);
    }
    pthread_mutex_unlock(&all->lock);
    return g;
}

struct grammar_cache *grammar_cache_new(const struct grammar_cache_options *o) {
    struct grammar_cache *all = xcalloc(1, sizeof *all);
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    if (o) all->o = *o;
    if (!all->o.large) all->o.large = (int)MAX(processors / 4, 1);
    if (!all->o.waiting) all->o.waiting = 4;
    if (!all->o.share) all->o.share = 2;
    if (!all->o.kept) all->o.kept = 64;
    if (!all->o.bytes) all->o.bytes = (size_t)256 << 20;
    pthread_mutex_init(&all->lock, NULL);
    pthread_cond_init(&all->changed, NULL);
    pthread_cond_init(&all->ordered, NULL);
    all->threads = xcalloc((size_t)all->o.large, sizeof *all->threads);
    for (int i = 0; i < all->o.large; i++)
        CHECK(pthread_create(&all->threads[i], NULL, compile_thread, all) == 0);
    return all;
}

void grammar_cache_free(struct grammar_cache *all) {
    if (!all) return;
    pthread_mutex_lock(&all->lock);
    all->quit = true;
    pthread_cond_broadcast(&all->ordered);
    pthread_mutex_unlock(&all->lock);
    for (int i = 0; i < all->o.large; i++) pthread_join(all->threads[i], NULL);
    free(all->threads);
    for (int i = 0; i < all->n; i++) entry_free(all->v[i]);
    free(all->v);
    pthread_mutex_destroy(&all->lock);
    pthread_cond_destroy(&all->changed);
    pthread_cond_destroy(&all->ordered);
    free(all);
}

struct grammar *grammar_cache_get(struct grammar_cache *all, const char *caller, const char *kind,
                                  const char *text, size_t len, struct error *err) {
    char hash[HASH_LEN];
    bool large = len > SMALL_SOURCE;
    if (len > SOURCE_MAX) {
        error_set(err, ERR_USAGE, "it has %zu bytes, and may have %d", len, SOURCE_MAX);
        return NULL;
    }
    source_hash(kind, text, len, hash);
    pthread_mutex_lock(&all->lock);
    struct cache_entry *e = entry_find(all, hash);
    struct grammar *g = e ? entry_wait(all, e, err) : NULL;
    large |= is_known_large(all, hash);
    pthread_mutex_unlock(&all->lock);
    if (e) return g;
    if (!large) g = small_get(all, hash, caller, kind, text, len, &large, err);
    if (!large) return g;
    pthread_mutex_lock(&all->lock);
    e = entry_find(all, hash);
    g = e ? entry_wait(all, e, err) : large_get(all, hash, caller, kind, text, len, err);
    pthread_mutex_unlock(&all->lock);
    return g;
}

void grammar_cache_release(struct grammar_cache *all, struct grammar *g) {
    pthread_mutex_lock(&all->lock);
    for (int i = 0; i < all->n; i++) all->v[i]->users -= all->v[i]->g == g;
    pthread_mutex_unlock(&all->lock);
}

struct grammar_cache_stats grammar_cache_stats(struct grammar_cache *all) {
    pthread_mutex_lock(&all->lock);
    struct grammar_cache_stats s = {.kept = all->n, .bytes = all->bytes, .compiled = all->compiled};
    for (int i = 0; i < all->n; i++) s.in_use += all->v[i]->users > 0;
    pthread_mutex_unlock(&all->lock);
    return s;
}
