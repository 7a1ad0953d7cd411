/*
 * pool: maps names to the current versions of adapters and keeps them in memory within a budget.
 *
 *     registered ──get──▶ loading ──▶ resident ──evicted──▶ registered
 *                            ▲            │
 *                            └────────────┘ files changed, or publish: the next version
 *
 * One lock protects the pool. A load sets `loading` and runs without the lock; only the loading
 * thread accesses an entry that is loading. There is no LRU list: eviction visits all entries,
 * which is cheap compared with a load, and sums their current sizes.
 *
 * Invariants: (1) the pool has one reference to every resident and every retired adapter, so a
 * reference count of 1 means not in use, and only a get can increase it; (2) the version changes
 * only when the hash changes; (3) hash, stamps and size of an entry describe the same content, so
 * files with unchanged stamps are not hashed again.
 */
#define _GNU_SOURCE
#include "adapter/internal.h"
#include "hub/hub.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

/* The file system's metadata of one file; zero when it does not exist. */
struct file_stamp {
    uint64_t device, inode, size;
    int64_t mtime, ctime; /* ns since 1970 */
};
/* Stamps of the two files of a PEFT directory; or v[0]: that of a GGUF file. */
struct entry_stamps {
    struct file_stamp v[2];
    bool recent; /* written so recently that a second write could have the same times */
};
/* File systems round times to the kernel's tick, which is at most 10 ms; this is a safe multiple.
 */
#define RECENT_NS 50000000

struct pool_entry {
    char *name;
    char *path; /* NULL: in memory only */
    struct adapter *adapter;
    char hash[HASH_LEN]; /* SHA-256 of the current version, resident or not; "" before the first
                            load */
    struct entry_stamps stamps;
    size_t size; /* adapter_bytes of the current version when it was loaded */
    uint64_t version, lru_stamp, gets, loads; /* lru_stamp: the pool's lru_clock at the last get */
    double last_used;
    bool pinned, loading;
    char *problem; /* the error in the files with problem_stamps, or NULL */
    int problem_code;
    struct entry_stamps problem_stamps;
};

struct adapter_pool {
    struct model *model;
    struct adapter_pool_options o;
    pthread_mutex_t lock;
    pthread_cond_t load_done; /* broadcast when a load ends */
    struct pool_entry **entries;
    int n, cap;               /* sorted by name */
    struct adapter **retired; /* replaced or removed while in use */
    int n_retired;
    int n_loading; /* with a limit at most 1, because memory of loading is not in the limit */
    uint64_t lru_clock, gets, loads, evictions;
};

/* A version that is loaded but not yet published. */
struct staged_adapter {
    struct adapter *a;
    struct entry_stamps stamps;
};

struct adapter_pool *adapter_pool_new(struct model *m, const struct adapter_pool_options *o) {
    struct adapter_pool *p = xcalloc(1, sizeof *p);
    p->model = m;
    p->o = *o;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->load_done, NULL);
    return p;
}

static void entry_free(struct pool_entry *e) {
    CHECK(!e->loading);
    adapter_release(e->adapter);
    free(e->name);
    free(e->path);
    free(e->problem);
    free(e);
}

void adapter_pool_free(struct adapter_pool *p) {
    if (!p) return;
    for (int i = 0; i < p->n; i++) entry_free(p->entries[i]);
    for (int i = 0; i < p->n_retired; i++) adapter_release(p->retired[i]);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->load_done);
    free(p->entries);
    free(p->retired);
    free(p);
}

static int64_t time_ns(struct timespec t) {
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void stamp_read(struct file_stamp *s, const char *path) {
    struct stat st;
    if (stat(path, &st) != 0) return;
    *s = (struct file_stamp){.device = st.st_dev,
                             .inode = st.st_ino,
                             .size = (uint64_t)st.st_size,
                             .mtime = time_ns(st.st_mtim),
                             .ctime = time_ns(st.st_ctim)};
}

static struct entry_stamps stamps_read(const char *path) {
    struct entry_stamps s = {0};
    struct timespec now;
    char *config = path_join(path, PEFT_CONFIG_FILE), *tensors = path_join(path, PEFT_WEIGHTS_FILE);
    clock_gettime(CLOCK_REALTIME, &now);
    stamp_read(&s.v[0], config);
    stamp_read(&s.v[1], tensors);
    if (!s.v[0].inode && !s.v[1].inode) stamp_read(&s.v[0], path);
    for (int i = 0; i < 2; i++)
        s.recent = s.recent || MAX(s.v[i].mtime, s.v[i].ctime) > time_ns(now) - RECENT_NS;
    free(config);
    free(tensors);
    return s;
}

/* True when files are certainly unchanged: they had the stamps `then` when they were read, and have
 * the stamps `now`. */
static bool stamps_match(const struct entry_stamps *then, const struct entry_stamps *now) {
    return !then->recent && memcmp(then->v, now->v, sizeof now->v) == 0;
}

/* The index of the name, or the index at which to insert it. */
static int entry_index(const struct adapter_pool *p, const char *name, bool *found) {
    int lo = 0, hi = p->n;
    *found = false;
    while (lo < hi) {
        int mid = (lo + hi) / 2, c = strcmp(p->entries[mid]->name, name);
        if (c == 0) *found = true;
        if (c >= 0)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

static struct pool_entry *entry_find(const struct adapter_pool *p, const char *name,
                                     struct error *err) {
    bool found;
    int i = entry_index(p, name, &found);
    if (found) return p->entries[i];
    error_set(err, ERR_MISSING, "no adapter is called '%.200s'", name);
    return NULL;
}

/* Whether another load has to end before a new one may begin. */
static bool loading_is_busy(const struct adapter_pool *p) {
    return p->o.max_bytes > 0 && p->n_loading > 0;
}

static void loading_begin(struct adapter_pool *p) {
    p->n_loading++;
    pthread_mutex_unlock(&p->lock);
}

static void loading_end(struct adapter_pool *p) {
    pthread_mutex_lock(&p->lock);
    p->n_loading--;
    pthread_cond_broadcast(&p->load_done);
}

/* Waits until no thread loads the entry and, if it is not resident, until it may be loaded, and
 * returns it; NULL if it does not exist or was removed while waiting. */
static struct pool_entry *entry_wait_loaded(struct adapter_pool *p, const char *name,
                                            struct error *err) {
    struct pool_entry *e;
    while ((e = entry_find(p, name, err)) && (e->loading || (!e->adapter && loading_is_busy(p))))
        pthread_cond_wait(&p->load_done, &p->lock);
    return e;
}

static struct pool_entry *entry_insert(struct adapter_pool *p, const char *name) {
    bool found;
    int i = entry_index(p, name, &found);
    CHECK(!found);
    if (p->n == p->cap) {
        p->cap = MAX(16, 2 * p->cap);
        p->entries = xrealloc(p->entries, (size_t)p->cap * sizeof(struct pool_entry *));
    }
    memmove(p->entries + i + 1, p->entries + i, (size_t)(p->n - i) * sizeof(struct pool_entry *));
    p->n++;
    p->entries[i] = xcalloc(1, sizeof(struct pool_entry));
    p->entries[i]->name = xstrdup(name);
    return p->entries[i];
}

/* Names are printed in JSON and on terminals, so they must be UTF-8 without control characters. */
static int name_check(const char *name, struct error *err) {
    size_t len = strlen(name);
    json_t *text = json_string(name);
    bool ok = text && len >= 1 && len <= 200;
    for (const char *c = name; *c; c++) ok = ok && (unsigned char)*c >= 0x20 && *c != 0x7f;
    json_decref(text);
    return ok ? OK
              : error_set(err, ERR_USAGE,
                          "an adapter's name must be UTF-8 of 1 to 200 bytes without control "
                          "characters");
}

/* The malloc'ed path of the adapter, with hf: names resolved; NULL when there is no adapter. */
static char *path_resolve(const char *path, struct error *err) {
    char *real = hub_is_name(path) ? hub_cached_path(path, err) : xstrdup(path);
    if (!real || adapter_path_is_gguf(real) || peft_check(real, err) == OK) return real;
    free(real);
    return NULL;
}

/* 1: the entry is new; 0: it was registered already; else an error code. */
static int entry_add(struct adapter_pool *p, const char *name, const char *path,
                     struct error *err) {
    bool found;
    int i = entry_index(p, name, &found);
    const struct pool_entry *e = found ? p->entries[i] : NULL;
    if (!e) entry_insert(p, name)->path = xstrdup(path);
    if (!e || (e->path && strcmp(e->path, path) == 0)) return !e;
    return error_set(err, ERR_STATE, "the name '%s' is already used for '%s'", name,
                     e->path ? e->path : "an adapter in memory");
}

int adapter_pool_add(struct adapter_pool *p, const char *name, const char *path,
                     struct error *err) {
    if (name_check(name, err) != OK) return err->code;
    char *real = path_resolve(path, err);
    if (!real) return err->code;
    pthread_mutex_lock(&p->lock);
    int rc = entry_add(p, name, real, err);
    pthread_mutex_unlock(&p->lock);
    free(real);
    return MIN(rc, OK);
}

/* 1 when DIR/NAME is a new adapter. A name that cannot be registered is skipped with a warning. */
static int scan_subdirectory(struct adapter_pool *p, const char *dir, const char *name) {
    char *path = path_join(dir, name);
    struct error err;
    int added = 0;
    if (adapter_exists(path)) {
        added = name_check(name, &err);
        pthread_mutex_lock(&p->lock);
        if (added == OK) added = entry_add(p, name, path, &err);
        pthread_mutex_unlock(&p->lock);
        if (added < 0) log_warn("adapter '%s' is skipped: %s", path, err.text);
    }
    free(path);
    return MAX(added, 0);
}

int adapter_pool_scan(struct adapter_pool *p, const char *dir, struct error *err) {
    DIR *d = opendir(dir);
    int n = 0;
    if (!d) return error_errno(err, "cannot read the directory '%s'", dir);
    for (const struct dirent *f; (f = readdir(d));)
        if (f->d_name[0] != '.') n += scan_subdirectory(p, dir, f->d_name);
    closedir(d);
    return n;
}

static bool in_use(const struct adapter *a) {
    return __atomic_load_n(&a->refs, __ATOMIC_ACQUIRE) > 1;
}

static void retired_release_unused(struct adapter_pool *p) {
    int n = 0;
    for (int i = 0; i < p->n_retired; i++)
        if (in_use(p->retired[i]))
            p->retired[n++] = p->retired[i];
        else
            adapter_release(p->retired[i]);
    p->n_retired = n;
}

/* Releases the pool's reference, now or as soon as the adapter is no longer in use. */
static void adapter_retire(struct adapter_pool *p, struct adapter *a) {
    if (a && in_use(a)) {
        size_t n = (size_t)p->n_retired + 1;
        p->retired = xrealloc(p->retired, n * sizeof(struct adapter *));
        p->retired[p->n_retired++] = a;
    } else {
        adapter_release(a);
    }
}

static bool is_evictable(const struct pool_entry *e) {
    bool reloadable = e->path && !e->problem; // files with an error cannot be loaded again
    return e->adapter && reloadable && !e->pinned && !e->loading && !in_use(e->adapter);
}

static struct pool_entry *lru_victim(const struct adapter_pool *p,
                                     const struct pool_entry *except) {
    struct pool_entry *best = NULL;
    for (int i = 0; i < p->n; i++) {
        struct pool_entry *e = p->entries[i];
        if (e != except && is_evictable(e) && (!best || e->lru_stamp < best->lru_stamp)) best = e;
    }
    return best;
}

/* Bytes of all adapters in memory, except the adapter of `except` if it is not in use. *fixed
 * receives the bytes of those adapters that cannot be evicted now; the adapter of `except` is never
 * evicted, even if its last user releases it meanwhile. */
static size_t bytes_in_memory(struct adapter_pool *p, const struct pool_entry *except,
                              size_t *fixed) {
    size_t all = *fixed = 0;
    for (int i = 0; i < p->n; i++) {
        const struct pool_entry *e = p->entries[i];
        if (!e->adapter || (e == except && !in_use(e->adapter))) continue;
        size_t bytes = adapter_bytes(e->adapter);
        all += bytes;
        if (e == except || !is_evictable(e)) *fixed += bytes;
    }
    for (int i = 0; i < p->n_retired; i++) {
        size_t bytes = adapter_bytes(p->retired[i]);
        all += bytes;
        *fixed += bytes;
    }
    return all;
}

static double mb(size_t bytes) {
    return (double)bytes / (1 << 20);
}

/* Evicts adapters until `size` more bytes fit. The adapter of e (may be NULL) is not counted if it
 * is not in use, because it will be replaced. If the bytes cannot fit, evicts nothing. */
static int evict_to_fit(struct adapter_pool *p, const struct pool_entry *e, size_t size,
                        struct error *err) {
    size_t max = p->o.max_bytes, fixed;
    if (max == 0) return OK;
    retired_release_unused(p);
    size_t in_memory = bytes_in_memory(p, e, &fixed);
    if (size > max)
        return error_set(err, ERR_MEMORY,
                         "an adapter of %.1f MB is larger than the adapter pool of %.1f MB",
                         mb(size), mb(max));
    if (fixed > max - size)
        return error_set(err, ERR_STATE,
                         "no room for an adapter of %.1f MB: of the adapter pool of %.1f MB, %.1f "
                         "MB are in use, pinned or without a file",
                         mb(size), mb(max), mb(fixed));
    while (in_memory > max - size) {
        struct pool_entry *victim = lru_victim(p, e);
        CHECK(victim);
        in_memory -= MIN(in_memory, adapter_bytes(victim->adapter));
        adapter_release(victim->adapter);
        victim->adapter = NULL;
        p->evictions++;
    }
    return OK;
}

static bool is_resident(const struct pool_entry *e, const struct adapter *a) {
    return e && e->adapter && strcmp(e->hash, a->hash) == 0;
}

static int staged_reserve_room(struct adapter_pool *p, const struct pool_entry *e,
                               const struct staged_adapter *s, struct error *err) {
    return is_resident(e, s->a) ? OK : evict_to_fit(p, e, adapter_bytes(s->a), err);
}

static void problem_clear(struct pool_entry *e) {
    free(e->problem);
    e->problem = NULL;
}

static void entry_set_version(struct pool_entry *e, const struct staged_adapter *s) {
    e->version += strcmp(e->hash, s->a->hash) != 0;
    memcpy(e->hash, s->a->hash, sizeof e->hash);
    e->stamps = s->stamps;
    e->size = adapter_bytes(s->a);
    problem_clear(e);
}

/* Takes ownership of s->a. If the content is unchanged, keeps the old adapter, which has packs
 * already. */
static void entry_replace_adapter(struct adapter_pool *p, struct pool_entry *e,
                                  const struct staged_adapter *s) {
    bool same = is_resident(e, s->a);
    entry_set_version(e, s);
    adapter_retire(p, same ? s->a : e->adapter);
    if (!same) e->adapter = s->a;
}

/* Loads one version. Called without the lock. */
static int staged_load(struct adapter_pool *p, const char *path, const char *hash,
                       struct staged_adapter *s, struct error *err) {
    s->a = adapter_open_with_hash(path, p->model, hash, err);
    if (!s->a) return err->code;
    struct entry_stamps now = stamps_read(path);
    if (memcmp(now.v, s->stamps.v, sizeof now.v) != 0) {
        adapter_release(s->a);
        return error_set(err, ERR_IO, "adapter '%s' changed while it was read", path);
    }
    if (!hash) adapter_warn_no_effect(s->a, path);
    if (p->o.serve_only && !s->a->vocab_overrides)
        adapter_pack_only(s->a, p->o.elem);
    else
        adapter_pack(s->a, p->o.elem);
    return OK;
}

/* Records the error `err` of the files with the stamps `now`. Returns OK if an earlier version is
 * resident, which stays current; else the error. */
static int entry_set_problem(struct pool_entry *e, const struct entry_stamps *now,
                             struct error *err) {
    bool is_new = !e->problem || strcmp(e->problem, err->text) != 0;
    problem_clear(e);
    e->problem = xstrdup(err->text);
    e->problem_code = err->code;
    e->problem_stamps = *now;
    // an I/O error may be temporary: try again even if the files do not change
    if (err->code == ERR_IO) e->problem_stamps.recent = true;
    if (!e->adapter) return err->code;
    if (is_new)
        log_warn("adapter '%s' remains at version %llu: %s", e->name,
                 (unsigned long long)e->version, err->text);
    return OK;
}

/* Loads the entry's files, which have the stamps `now`. Releases the lock while it reads; the entry
 * is `loading` then. */
static int entry_load(struct adapter_pool *p, struct pool_entry *e, const struct entry_stamps *now,
                      struct error *err) {
    struct staged_adapter s = {.stamps = *now};
    bool unchanged = e->version > 0 && stamps_match(&e->stamps, now);
    /* If the size is known, make room first, so that a get that finds no room does not load the
     * files. */
    if (unchanged && evict_to_fit(p, e, e->size, err) != OK) return err->code;
    e->loading = true;
    e->loads++;
    p->loads++;
    loading_begin(p);
    int rc = staged_load(p, e->path, unchanged ? e->hash : NULL, &s, err);
    loading_end(p);
    e->loading = false;
    if (rc != OK) return entry_set_problem(e, now, err);
    rc = staged_reserve_room(p, e, &s, err);
    if (rc == OK)
        entry_replace_adapter(p, e, &s);
    else if (!e->adapter)
        entry_set_version(e, &s);
    if (rc != OK) adapter_release(s.a);
    return rc;
}

/* Reloads e->adapter if its files have changed; keeps it if they are not a valid adapter. */
static int entry_refresh(struct adapter_pool *p, struct pool_entry *e, struct error *err) {
    if (!e->path) return OK;
    struct entry_stamps now = stamps_read(e->path);
    if (e->problem && stamps_match(&e->problem_stamps, &now))
        return e->adapter ? OK : error_set(err, e->problem_code, "%s", e->problem);
    if (e->adapter && stamps_match(&e->stamps, &now)) {
        problem_clear(e);
        return OK;
    }
    return entry_load(p, e, &now, err);
}

struct adapter *adapter_pool_get(struct adapter_pool *p, const char *name, struct error *err) {
    struct adapter *a = NULL;
    pthread_mutex_lock(&p->lock);
    retired_release_unused(p);
    struct pool_entry *e = entry_wait_loaded(p, name, err);
    if (e && entry_refresh(p, e, err) == OK) {
        a = adapter_retain(e->adapter);
        e->lru_stamp = ++p->lru_clock;
        e->last_used = clock_now();
        e->gets++;
        p->gets++;
    }
    pthread_mutex_unlock(&p->lock);
    return a;
}

/* Takes ownership of s->a; `path` may be NULL. */
static int staged_publish(struct adapter_pool *p, const char *name, const struct staged_adapter *s,
                          const char *path, struct error *err) {
    struct error ignored;
    pthread_mutex_lock(&p->lock);
    struct pool_entry *e = entry_wait_loaded(p, name, &ignored);
    int rc = staged_reserve_room(p, e, s, err);
    if (rc == OK) {
        if (!e) e = entry_insert(p, name);
        free(e->path);
        e->path = path ? xstrdup(path) : NULL;
        e->lru_stamp = ++p->lru_clock;
        entry_replace_adapter(p, e, s);
    }
    pthread_mutex_unlock(&p->lock);
    if (rc != OK) adapter_release(s->a);
    return rc;
}

int adapter_pool_publish(struct adapter_pool *p, const char *name, struct adapter *a,
                         struct error *err) {
    if (name_check(name, err) != OK) return err->code;
    if (!adapter_is_ready(a) || !adapter_fits(a, &p->model->config))
        return error_set(err, ERR_MISMATCH, "adapter '%.12s' %s '%s'", a->hash,
                         adapter_is_ready(a) ? "does not fit the shape of"
                                             : "is DoRA and not bound to",
                         p->model->name);
    adapter_pack(a, p->o.elem);
    struct staged_adapter s = {.a = adapter_retain(a)};
    return staged_publish(p, name, &s, NULL, err);
}

int adapter_pool_publish_path(struct adapter_pool *p, const char *name, const char *path,
                              struct error *err) {
    if (name_check(name, err) != OK) return err->code;
    char *real = path_resolve(path, err);
    if (!real) return err->code;
    struct staged_adapter s = {.stamps = stamps_read(real)};
    pthread_mutex_lock(&p->lock);
    while (loading_is_busy(p)) pthread_cond_wait(&p->load_done, &p->lock);
    loading_begin(p);
    int rc = staged_load(p, real, NULL, &s, err);
    loading_end(p);
    pthread_mutex_unlock(&p->lock);
    if (rc == OK) rc = staged_publish(p, name, &s, real, err);
    free(real);
    return rc;
}

int adapter_pool_remove(struct adapter_pool *p, const char *name, struct error *err) {
    pthread_mutex_lock(&p->lock);
    struct pool_entry *e = entry_wait_loaded(p, name, err);
    if (e) {
        bool found;
        int i = entry_index(p, name, &found);
        adapter_retire(p, e->adapter);
        e->adapter = NULL;
        entry_free(e);
        p->n--;
        memmove(p->entries + i, p->entries + i + 1,
                (size_t)(p->n - i) * sizeof(struct pool_entry *));
    }
    pthread_mutex_unlock(&p->lock);
    return e ? OK : err->code;
}

size_t adapter_pool_bytes_of(struct adapter_pool *p, const char *name) {
    struct error ignored;
    pthread_mutex_lock(&p->lock);
    const struct pool_entry *e = entry_find(p, name, &ignored);
    size_t bytes = e ? e->size : 0;
    pthread_mutex_unlock(&p->lock);
    return bytes;
}

int adapter_pool_pin(struct adapter_pool *p, const char *name, bool pinned, struct error *err) {
    pthread_mutex_lock(&p->lock);
    struct pool_entry *e = entry_find(p, name, err);
    if (e) e->pinned = pinned;
    pthread_mutex_unlock(&p->lock);
    return e ? OK : err->code;
}

static struct adapter_pool_item entry_item(const struct pool_entry *e, struct arena *out) {
    return (struct adapter_pool_item){.name = arena_strdup(out, e->name),
                                      .path = e->path ? arena_strdup(out, e->path) : NULL,
                                      .problem = e->problem ? arena_strdup(out, e->problem) : NULL,
                                      .hash = arena_strdup(out, e->hash),
                                      .version = e->version,
                                      .bytes = e->adapter ? adapter_bytes(e->adapter) : 0,
                                      .in_use = e->adapter && in_use(e->adapter),
                                      .pinned = e->pinned,
                                      .gets = e->gets,
                                      .loads = e->loads,
                                      .last_used = e->last_used};
}

const struct adapter_pool_item *adapter_pool_list(struct adapter_pool *p, struct arena *out,
                                                  int *n) {
    pthread_mutex_lock(&p->lock);
    struct adapter_pool_item *list = arena_alloc(out, (size_t)p->n * sizeof *list);
    for (int i = 0; i < p->n; i++) list[i] = entry_item(p->entries[i], out);
    *n = p->n;
    pthread_mutex_unlock(&p->lock);
    return list;
}

struct adapter_pool_stats adapter_pool_stats(struct adapter_pool *p) {
    pthread_mutex_lock(&p->lock);
    retired_release_unused(p);
    size_t fixed;
    struct adapter_pool_stats s = {.n = p->n,
                                   .n_retired = p->n_retired,
                                   .bytes = bytes_in_memory(p, NULL, &fixed),
                                   .max_bytes = p->o.max_bytes,
                                   .gets = p->gets,
                                   .loads = p->loads,
                                   .evictions = p->evictions};
    for (int i = 0; i < p->n; i++) s.n_resident += p->entries[i]->adapter != NULL;
    pthread_mutex_unlock(&p->lock);
    return s;
}
