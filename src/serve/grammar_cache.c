/*
 * grammar_cache: the cache of compiled grammars and the limits on compiling large ones. See
 * grammar_cache.h.
 *
 * The key of an entry is the SHA-256 of its kind and source. While a large source is being
 * compiled, its entry has no grammar, and requests with the same source wait for it instead of
 * compiling it again.
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
    SOURCE_MAX = 256 << 10,      /* maximum bytes of a source */
    SMALL_BUDGET_SHARE = 32,     /* the small budget is 1/32 of the build budget: about 1 ms */
    SMALL_SOURCE_MAX = 32 << 10, /* longer sources are compiled in a compile thread at once */
    KNOWN_LARGE_MAX = 256,       /* sources that need the whole build budget */
    LARGE_NICE = 4,              /* nice value of the compile threads: the engine goes first */
    CALLER_LEN = 80,
};

struct cache_entry {
    char hash[HASH_LEN], caller[CALLER_LEN]; /* caller: the first one that requested it */
    struct grammar *g;                       /* NULL: being compiled */
    size_t bytes;
    int users; /* including requests that wait for it */
    bool failed;
    struct error err;
};
/* A large source to compile; the thread that requested it waits. */
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
    pthread_t *threads; /* [o.compile_threads] */
    pthread_mutex_t lock;
    pthread_cond_t entry_changed, task_added;
    struct compile_task *tasks, *last_task;
    struct cache_entry **v; /* [n] most recently used first */
    int n, cap;
    int compiling, waiting; /* compiling: threads that submitted a task; waiting: threads that wait
                               for another thread's task */
    bool quit;
    size_t bytes;
    uint64_t compiled, n_known_large;
    uint64_t known_large[KNOWN_LARGE_MAX]; /* prefixes of hashes of large sources; a ring */
};

static void entry_free(struct cache_entry *e) {
    grammar_free(e->g);
    free(e);
}

/* the list; the lock is held */

static int entry_index(const struct grammar_cache *cache, const struct cache_entry *e) {
    int i = 0;
    while (cache->v[i] != e) i++;
    return i;
}

static void entry_remove(struct grammar_cache *cache, struct cache_entry *e) {
    int i = entry_index(cache, e);
    memmove(cache->v + i, cache->v + i + 1, sizeof *cache->v * (size_t)(--cache->n - i));
    cache->bytes -= e->bytes;
    entry_free(e);
}

static void entry_to_front(struct grammar_cache *cache, struct cache_entry *e) {
    int i = entry_index(cache, e);
    memmove(cache->v + 1, cache->v, sizeof *cache->v * (size_t)i);
    cache->v[0] = e;
}

static struct cache_entry *entry_find(const struct grammar_cache *cache, const char *hash) {
    for (int i = 0; i < cache->n; i++)
        if (strcmp(cache->v[i]->hash, hash) == 0 && !cache->v[i]->failed) return cache->v[i];
    return NULL;
}

static struct cache_entry *entry_add(struct grammar_cache *cache, const char *hash,
                                     const char *caller) {
    if (cache->n == cache->cap) {
        cache->cap = cache->cap ? 2 * cache->cap : 16;
        cache->v = xrealloc(cache->v, sizeof *cache->v * (size_t)cache->cap);
    }
    struct cache_entry *e = xcalloc(1, sizeof *e);
    strcpy(e->hash, hash);
    snprintf(e->caller, sizeof e->caller, "%s", caller);
    e->users = 1;
    memmove(cache->v + 1, cache->v, sizeof *cache->v * (size_t)cache->n++);
    cache->v[0] = e;
    return e;
}

static bool same_caller(const struct cache_entry *e, const char *caller) {
    return strncmp(e->caller, caller, sizeof e->caller - 1) == 0;
}

static size_t caller_bytes(const struct grammar_cache *cache, const char *caller) {
    size_t bytes = 0;
    for (int i = 0; i < cache->n; i++)
        if (same_caller(cache->v[i], caller)) bytes += cache->v[i]->bytes;
    return bytes;
}

static int caller_entries(const struct grammar_cache *cache, const char *caller) {
    int n = 0;
    for (int i = 0; i < cache->n; i++) n += same_caller(cache->v[i], caller);
    return n;
}

/* The unused entry to evict: the oldest of the caller with the most entries, or of `only` if
 * given. */
static struct cache_entry *entry_to_evict(const struct grammar_cache *cache, const char *only) {
    struct cache_entry *out = NULL;
    int most = 0;
    for (int i = cache->n - 1; i >= 0; i--) {
        struct cache_entry *e = cache->v[i];
        if (e->users || (only && !same_caller(e, only))) continue;
        int n = caller_entries(cache, e->caller);
        if (n > most) out = e, most = n;
    }
    return out;
}

/* Evicts entries until `bytes` more of a caller fit. False: the entries in use leave no room. */
static bool entries_evict_for(struct grammar_cache *cache, const char *caller, size_t bytes) {
    struct cache_entry *e;
    while (caller_bytes(cache, caller) + bytes > cache->o.bytes / 2) {
        if (!(e = entry_to_evict(cache, caller))) return false;
        entry_remove(cache, e);
    }
    while (cache->bytes + bytes > cache->o.bytes) {
        if (!(e = entry_to_evict(cache, NULL))) return false;
        entry_remove(cache, e);
    }
    while (cache->n > cache->o.max_entries && (e = entry_to_evict(cache, NULL)))
        entry_remove(cache, e);
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

static struct grammar *compile_with_budget(const char *kind, const char *text, size_t len,
                                           int share, bool *large, struct error *err) {
    grammar_set_build_budget(share);
    struct grammar *g = compile(kind, text, len, err);
    *large = !g && share > 1 && grammar_build_budget_exceeded();
    grammar_set_build_budget(1);
    if (!g) err->code = ERR_USAGE; // a source that is too large is an invalid request
    return g;
}

/* Compiles large sources, one after the other, with a low priority. */
static void *compile_thread(void *ctx) {
    struct grammar_cache *cache = ctx;
    thread_lower_priority(LARGE_NICE);
    pthread_mutex_lock(&cache->lock);
    for (;;) {
        struct compile_task *w = cache->tasks;
        bool large;
        if (!w && cache->quit) break;
        if (!w) {
            pthread_cond_wait(&cache->task_added, &cache->lock);
            continue;
        }
        cache->tasks = w->next;
        pthread_mutex_unlock(&cache->lock);
        w->g = compile_with_budget(w->kind, w->text, w->len, 1, &large, w->err);
        pthread_mutex_lock(&cache->lock);
        w->done = true;
        pthread_cond_broadcast(&cache->entry_changed);
    }
    pthread_mutex_unlock(&cache->lock);
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

static int caller_n_compiling(const struct grammar_cache *cache, const char *caller) {
    int n = 0;
    for (int i = 0; i < cache->n; i++) n += !cache->v[i]->g && same_caller(cache->v[i], caller);
    return n;
}

static int error_busy(struct error *err) {
    return error_set(
        err, ERR_STATE,
        "too many large grammars are being compiled; try again, or send a smaller one");
}

/* Whether the maximum number of threads already waits for large grammars. */
static bool is_compile_queue_full(const struct grammar_cache *cache) {
    return cache->compiling + cache->waiting >= cache->o.compile_threads + cache->o.max_waiting;
}

/* Compiles the source in a compile thread. The caller's limit includes the new entry, which has no
 * grammar yet. */
static struct grammar *compile_task_run(struct grammar_cache *cache, struct compile_task *w,
                                        const char *caller) {
    if (is_compile_queue_full(cache) ||
        caller_n_compiling(cache, caller) > cache->o.max_waiting_per_caller) {
        error_busy(w->err);
        return NULL;
    }
    *(cache->tasks ? &cache->last_task->next : &cache->tasks) = w;
    cache->last_task = w;
    cache->compiling++;
    pthread_cond_signal(&cache->task_added);
    while (!w->done) pthread_cond_wait(&cache->entry_changed, &cache->lock);
    cache->compiling--;
    return w->g;
}

/* The grammar of an entry; waits if another request still compiles it. */
static struct grammar *entry_wait(struct grammar_cache *cache, struct cache_entry *e,
                                  struct error *err) {
    if (!e->g && is_compile_queue_full(cache)) {
        error_busy(err);
        return NULL;
    }
    e->users++;
    cache->waiting++;
    while (!e->g && !e->failed) pthread_cond_wait(&cache->entry_changed, &cache->lock);
    cache->waiting--;
    if (e->g) {
        entry_to_front(cache, e);
        return e->g;
    }
    *err = e->err;
    if (--e->users == 0) entry_remove(cache, e);
    return NULL;
}

/* Stores the compiled grammar in its entry; takes g over. NULL g: an error, which is in err. */
static struct grammar *entry_fill(struct grammar_cache *cache, struct cache_entry *e,
                                  struct grammar *g, struct error *err) {
    size_t bytes = g ? grammar_bytes(g) : 0;
    cache->compiled += g != NULL;
    if (g && !entries_evict_for(cache, e->caller, bytes)) {
        error_set(err, ERR_STATE,
                  "grammars of running requests fill the cache of %zu MiB; try again",
                  cache->o.bytes >> 20);
        grammar_free(g);
        g = NULL;
    }
    e->g = g;
    e->bytes = g ? bytes : 0;
    e->failed = !g;
    cache->bytes += e->bytes;
    if (!g) e->err = *err;
    if (!g && --e->users == 0) entry_remove(cache, e);
    pthread_cond_broadcast(&cache->entry_changed);
    return g;
}

static uint64_t hash_prefix(const char *hash) {
    return strtoull((char[]){hash[0], hash[1], hash[2], hash[3], hash[4], hash[5], hash[6], hash[7],
                             hash[8], hash[9], hash[10], hash[11], 0},
                    NULL, 16);
}

static bool is_known_large(const struct grammar_cache *cache, const char *hash) {
    for (int i = 0; i < KNOWN_LARGE_MAX; i++)
        if (cache->known_large[i] == hash_prefix(hash)) return true;
    return false;
}

static struct grammar *compile_large(struct grammar_cache *cache, const char *hash,
                                     const char *caller, const char *kind, const char *text,
                                     size_t len, struct error *err) {
    struct compile_task w = {.kind = kind, .text = text, .len = len, .err = err};
    if (!is_known_large(cache, hash))
        cache->known_large[cache->n_known_large++ % KNOWN_LARGE_MAX] = hash_prefix(hash);
    struct cache_entry *e = entry_add(cache, hash, caller);
    return entry_fill(cache, e, compile_task_run(cache, &w, caller), err);
}

/* Compiles with the small budget. *large: the small budget was not enough. */
static struct grammar *compile_small(struct grammar_cache *cache, const char *hash,
                                     const char *caller, const char *kind, const char *text,
                                     size_t len, bool *large, struct error *err) {
    struct grammar *g = compile_with_budget(kind, text, len, SMALL_BUDGET_SHARE, large, err);
    if (!g) return NULL;
    pthread_mutex_lock(&cache->lock);
    struct cache_entry *e = entry_find(cache, hash);
    if (e && e->g) { // another request has compiled it meanwhile
        e->users++;
        grammar_free(g);
        g = e->g;
    } else {
        g = entry_fill(cache, entry_add(cache, hash, caller), g, err);
    }
    pthread_mutex_unlock(&cache->lock);
    return g;
}

struct grammar_cache *grammar_cache_new(const struct grammar_cache_options *o) {
    struct grammar_cache *cache = xcalloc(1, sizeof *cache);
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    if (o) cache->o = *o;
    if (!cache->o.compile_threads) cache->o.compile_threads = (int)MAX(processors / 4, 1);
    if (!cache->o.max_waiting) cache->o.max_waiting = 4;
    if (!cache->o.max_waiting_per_caller) cache->o.max_waiting_per_caller = 2;
    if (!cache->o.max_entries) cache->o.max_entries = 64;
    if (!cache->o.bytes) cache->o.bytes = (size_t)256 << 20;
    pthread_mutex_init(&cache->lock, NULL);
    pthread_cond_init(&cache->entry_changed, NULL);
    pthread_cond_init(&cache->task_added, NULL);
    cache->threads = xcalloc((size_t)cache->o.compile_threads, sizeof *cache->threads);
    for (int i = 0; i < cache->o.compile_threads; i++)
        CHECK(pthread_create(&cache->threads[i], NULL, compile_thread, cache) == 0);
    return cache;
}

void grammar_cache_free(struct grammar_cache *cache) {
    if (!cache) return;
    pthread_mutex_lock(&cache->lock);
    cache->quit = true;
    pthread_cond_broadcast(&cache->task_added);
    pthread_mutex_unlock(&cache->lock);
    for (int i = 0; i < cache->o.compile_threads; i++) pthread_join(cache->threads[i], NULL);
    free(cache->threads);
    for (int i = 0; i < cache->n; i++) entry_free(cache->v[i]);
    free(cache->v);
    pthread_mutex_destroy(&cache->lock);
    pthread_cond_destroy(&cache->entry_changed);
    pthread_cond_destroy(&cache->task_added);
    free(cache);
}

struct grammar *grammar_cache_get(struct grammar_cache *cache, const char *caller, const char *kind,
                                  const char *text, size_t len, struct error *err) {
    char hash[HASH_LEN];
    bool large = len > SMALL_SOURCE_MAX;
    if (len > SOURCE_MAX) {
        error_set(err, ERR_USAGE, "it has %zu bytes, more than %d", len, SOURCE_MAX);
        return NULL;
    }
    source_hash(kind, text, len, hash);
    pthread_mutex_lock(&cache->lock);
    struct cache_entry *e = entry_find(cache, hash);
    struct grammar *g = e ? entry_wait(cache, e, err) : NULL;
    large |= is_known_large(cache, hash);
    pthread_mutex_unlock(&cache->lock);
    if (e) return g;
    if (!large) g = compile_small(cache, hash, caller, kind, text, len, &large, err);
    if (!large) return g;
    pthread_mutex_lock(&cache->lock);
    e = entry_find(cache, hash);
    g = e ? entry_wait(cache, e, err) : compile_large(cache, hash, caller, kind, text, len, err);
    pthread_mutex_unlock(&cache->lock);
    return g;
}

void grammar_cache_release(struct grammar_cache *cache, struct grammar *g) {
    pthread_mutex_lock(&cache->lock);
    for (int i = 0; i < cache->n; i++) cache->v[i]->users -= cache->v[i]->g == g;
    pthread_mutex_unlock(&cache->lock);
}

struct grammar_cache_stats grammar_cache_stats(struct grammar_cache *cache) {
    pthread_mutex_lock(&cache->lock);
    struct grammar_cache_stats s = {
        .kept = cache->n, .bytes = cache->bytes, .compiled = cache->compiled};
    for (int i = 0; i < cache->n; i++) s.in_use += cache->v[i]->users > 0;
    pthread_mutex_unlock(&cache->lock);
    return s;
}
