/*
 * base_pool: a table of bases, and the thread that loads and unloads them.
 *
 *     unloaded ──wanted, and memory is left──▶ loading ──▶ loaded ──idle──▶ unloading ──▶ unloaded
 *                                                 └──────failed──────────────────────────▶──┘
 *
 * A base is idle when it has no references. It is unloaded when it was idle for its keep_alive, or
 * when another base needs the memory; then the base that was used least recently is the first.
 *
 * Memory. Every load has a memory plan. The budget for the plans of all loaded bases is
 * --max-memory minus the plan of the default base, or else the machine's available memory. A base
 * needs at least its smallest plan. Its context and its KV cache grow to the base's share of the
 * budget, so that bases do not take each other's memory when all of them fit, and to the whole free
 * budget if the share is less than the smallest plan. The rule of the context is that of every
 * command, memory_plan_context, so two loads may have different ones.
 *
 * Invariants: (1) only the thread changes `state`; (2) only the thread writes the fields of a
 * base's server that are set while it is loaded, and only while the base is neither loaded nor
 * referenced, except at shutdown, when the batcher ends the last references; (3) references begin
 * only while the base is loaded.
 */
#define _GNU_SOURCE
#include "serve/base_pool.h"
#include "serve/request_fields.h"
#include "serve/server.h"

#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define WANTED_SECONDS 2.0 /* a request waits for a base this long after its last attempt */
#define RETRY_SECONDS 0.25 /* interval between two attempts to find memory for a base */

enum base_state { BASE_UNLOADED, BASE_LOADING, BASE_LOADED, BASE_UNLOADING };

struct base_entry {
    struct base_pool *pool;
    struct server server;
    struct serve_options
        options;             /* the default base's, without its adapters, teams, agents and names */
    struct memory_plan plan; /* the plan of the last load */
    size_t least_bytes;      /* bytes of the smallest plan */
    int32_t max_len;         /* context of the last plan; under the pool's lock */
    struct pool *threads;    /* the engine's; a pool of threads has one user */

    enum base_state state; /* like the following fields under the pool's lock */
    int refs;
    int64_t loads;
    double wanted_at, used_at; /* clock_now of the last request for it, and of its last use */
    double keep_alive;         /* see base_set_keep_alive */
    double failed_at;          /* clock_now of a load that failed with `problem`; 0: none */
    struct error problem;
    char hash[HASH_LEN];
};

struct base_pool {
    struct server *front;
    struct base_entry *v; /* [n] */
    int n;
    size_t budget; /* bytes of the plans of all loaded bases; 0: the machine's available memory */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t news;
    bool has_thread, quit;
    bool has_news; /* `news` was signalled: requests wait for a base, a base is idle, or `quit` */
};

static double mb(size_t bytes) {
    return (double)bytes / (1 << 20);
}

/* memory */

/* The sum of the plans of all loaded bases. The lock is held. */
static size_t used_bytes(const struct base_pool *p) {
    size_t used = 0;
    for (int i = 0; i < p->n; i++)
        if (p->v[i].state == BASE_LOADED) used += p->v[i].plan.total;
    return used;
}

/* Bytes for the plan of another base. The lock is held. */
static size_t free_bytes(const struct base_pool *p) {
    size_t used = used_bytes(p);
    return p->budget ? p->budget - MIN(used, p->budget) : memory_usable();
}

/* Adds the sizes of a base's adapters: as in the plan of the default base, the largest one and its
 * memory while it is loaded must fit. Adapters that cannot be read do not count. */
static void plan_add_adapters(struct base_entry *b, struct memory_plan_input *in) {
    struct adapter_sizes all = {0};
    struct error ignored;
    int n;
    struct adapter_entry *v = server_adapters(&b->server, &n);
    for (int i = 0; i < n; i++) {
        struct adapter_size one = {0};
        if (adapter_measure(v[i].path, in->max_options.lora_elem, &one, &ignored) == OK)
            adapter_sizes_add(&all, &one);
    }
    server_adapters_free(v, n);
    memory_plan_add_pool(in, &all);
}

/* The plan of a base in at most `limit` bytes, with the context that base_engine names or that
 * fits. The model's files are measured again, because they may have changed. */
static int plan_make(struct base_entry *b, size_t limit, struct memory_plan *out,
                     struct error *err) {
    struct memory_plan_input in = {.max_options = b->options.base_engine, .limit = limit};
    struct server *s = &b->server;
    if (model_measure(s->path, s->front->model->cls, &in.model, err) != OK) return err->code;
    plan_add_adapters(b, &in);
    int32_t *len = &in.max_options.max_len;
    *len = *len ? MIN(*len, in.model.config.max_seq_len) : memory_plan_context(&in);
    return memory_plan_make(&in, out, err);
}

/* Computes least_bytes: memory_plan_make fails with the smallest plan. */
static int least_bytes_update(struct base_entry *b, struct error *err) {
    struct memory_plan smallest = {0};
    if (plan_make(b, 1, &smallest, err) != OK && !smallest.total) return err->code;
    b->least_bytes = smallest.total;
    return OK;
}

/* The limit of a base's plan, if `room` bytes are left. The lock is held. */
static size_t plan_limit(const struct base_entry *b, size_t room) {
    const struct base_pool *p = b->pool;
    size_t share = (p->budget ? p->budget : room + used_bytes(p)) / (size_t)p->n;
    return b->least_bytes <= share ? MIN(share, room) : room;
}

/* loading and unloading; these functions run in the pool's thread without its lock */

static void base_close(struct base_entry *b) {
    struct server *s = &b->server;
    server_base_close(s);
    engine_free(s->engine);
    model_close(s->model);
    pool_free(b->threads);
    s->engine = NULL;
    s->model = NULL;
    b->threads = NULL;
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

/* Sets what the base shares with the default base. */
static void base_share(struct server *s) {
    const struct server *front = s->front;
    s->http = front->http;
    s->memory = front->memory;
    s->grammars = front->grammars;
    s->grammar_cache_bytes = front->grammar_cache_bytes;
    s->keys = front->keys;
    s->metrics = front->metrics;
    s->started = front->started;
    s->bases = front->bases;
    s->threads = front->threads;
}

/* Adds the listed adapters to the new adapter pool. One that has become invalid is an error of the
 * requests that name it. */
static void adapters_add(struct server *s) {
    struct error err;
    int n;
    struct adapter_entry *v = server_adapters(s, &n);
    for (int i = 0; i < n; i++)
        if (adapter_pool_add(s->pool, v[i].name, v[i].path, &err) != OK)
            log_warn("the adapter '%s' of '%s' is not available: %s", v[i].name, s->name, err.text);
    server_adapters_free(v, n);
}

static int base_open(struct base_entry *b, struct error *err) {
    struct server *s = &b->server;
    struct engine_options eo = b->plan.engine;
    base_share(s);
    s->model = model_open(s->path, s->front->model->cls, err);
    if (!s->model) return err->code;
    if (!s->model->tok) return error_set(err, ERR_MISMATCH, "it has no tokenizer");
    eo.pool = b->threads = pool_new(s->threads);
    s->engine = engine_new(s->model, &eo, err);
    if (!s->engine || server_base_open(s, &eo, err) != OK) return err->code;
    adapters_add(s);
    request_metrics_watch(s);
    return OK;
}

/* the thread; its functions are called with the lock held */

static void base_unload(struct base_entry *b) {
    struct base_pool *p = b->pool;
    struct error ignored;
    b->state = BASE_UNLOADING;
    pthread_mutex_unlock(&p->lock);
    base_close(b);
    least_bytes_update(b, &ignored); // it may have other adapters now
    log_info("unloaded '%s'", b->server.name);
    pthread_mutex_lock(&p->lock);
    b->state = BASE_UNLOADED;
}

/* Lets the requests that wait for the base run again. */
static void waiting_resume(struct base_pool *p) {
    pthread_mutex_unlock(&p->lock);
    http_resume_postponed(p->front->http);
    pthread_mutex_lock(&p->lock);
}

/* Records why a load has failed, for the requests that wait. An error in the files gets status 500,
 * because the client did not cause it. */
static void load_failed(struct base_entry *b, const struct error *err) {
    bool busy = err->code == ERR_MEMORY || err->code == ERR_STATE;
    error_set(&b->problem, busy ? ERR_MEMORY : ERR_IO, "cannot load the model '%s': %s",
              b->server.name, err->text);
    b->failed_at = clock_now();
    b->wanted_at = 0;
    if (!busy) log_warn("%s", b->problem.text);
}

static void base_load(struct base_entry *b, size_t room) {
    struct base_pool *p = b->pool;
    struct error err;
    double begin = clock_now();
    size_t limit = plan_limit(b, room);
    b->state = BASE_LOADING;
    pthread_mutex_unlock(&p->lock);
    int rc = plan_make(b, limit, &b->plan, &err);
    if (rc == OK && (rc = base_open(b, &err)) != OK) base_close(b);
    pthread_mutex_lock(&p->lock);
    b->state = rc == OK ? BASE_LOADED : BASE_UNLOADED;
    if (rc == OK) {
        b->max_len = b->plan.engine.max_len;
        b->loads++;
        b->used_at = clock_now();
        b->keep_alive = b->options.keep_alive_seconds;
        memcpy(b->hash, b->server.model->hash, sizeof b->hash);
        log_info("loaded '%s' in %.1f s (%.1f MB at most, a context of %d of its %d tokens)",
                 b->server.name, b->used_at - begin, mb(b->plan.total), b->max_len,
                 b->server.model->config.max_seq_len);
    } else {
        load_failed(b, &err);
    }
    waiting_resume(p);
}

/* Whether requests wait for the base. */
static bool is_wanted(const struct base_entry *b) {
    return clock_now() < b->wanted_at + WANTED_SECONDS;
}

/* The idle base that was used least recently, or NULL. */
static struct base_entry *idle_find(const struct base_pool *p) {
    struct base_entry *oldest = NULL;
    for (int i = 0; i < p->n; i++) {
        struct base_entry *b = &p->v[i];
        bool idle = b->state == BASE_LOADED && !b->refs && !is_wanted(b);
        if (idle && (!oldest || b->used_at < oldest->used_at)) oldest = b;
    }
    return oldest;
}

/* Loads a base if there is memory for it after idle bases were unloaded. False: it must wait. */
static bool base_try_load(struct base_entry *b) {
    struct base_pool *p = b->pool;
    struct base_entry *idle;
    struct error err;
    size_t room;
    while ((room = free_bytes(p)) < b->least_bytes && (idle = idle_find(p)) && !p->quit)
        base_unload(idle);
    if (p->quit || (room < b->least_bytes && used_bytes(p))) return false;
    if (room >= b->least_bytes) {
        base_load(b, room);
        return true;
    }
    error_set(&err, ERR_MEMORY, "it needs %.1f MB of memory, and %.1f MB are available",
              mb(b->least_bytes), mb(room));
    load_failed(b, &err);
    waiting_resume(p);
    return true;
}

/* clock_now of the end of a loaded base's keep_alive; negative: never, or it is in use. */
static double expiry(const struct base_entry *b) {
    bool expires = b->state == BASE_LOADED && !b->refs && b->keep_alive >= 0;
    return expires ? MAX(b->used_at + b->keep_alive, b->wanted_at + WANTED_SECONDS) : -1;
}

/* Unloads and loads bases. Returns clock_now of the next call that is needed. */
static double pool_update(struct base_pool *p) {
    double now = clock_now(), next = now + 3600;
    for (int i = 0; i < p->n && !p->quit; i++) {
        struct base_entry *b = &p->v[i];
        double end = expiry(b);
        if (end >= 0 && end <= now) base_unload(b);
        if (end > now) next = MIN(next, end);
        if (b->state != BASE_UNLOADED || !is_wanted(b)) continue;
        if (!base_try_load(b)) next = MIN(next, now + RETRY_SECONDS);
    }
    return next;
}

static void *pool_thread(void *ctx) {
    struct base_pool *p = ctx;
    double next = clock_now();
    pthread_mutex_lock(&p->lock);
    while (!p->quit) {
        while (!p->has_news && condition_wait_until(&p->news, &p->lock, next)) continue;
        p->has_news = false;
        next = pool_update(p);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* The lock is held. */
static void thread_notify(struct base_pool *p) {
    p->has_news = true;
    pthread_cond_signal(&p->news);
}

/* requests */

/* Retains a base that is loaded, or sets err and asks for its load; *wait: it may still be loaded
 * for this request. */
static int base_acquire(struct base_entry *b, const struct exchange *x, bool *wait,
                        struct error *err) {
    struct base_pool *p = b->pool;
    double now = clock_now();
    *wait = false;
    pthread_mutex_lock(&p->lock);
    if (b->state == BASE_LOADED) {
        b->refs++;
        b->wanted_at = 0;
        b->used_at = now;
        b->keep_alive = b->options.keep_alive_seconds;
        err->code = OK;
    } else if (b->failed_at > exchange_start_time(x)) {
        *err = b->problem;
    } else {
        *wait = !p->quit && now < exchange_start_time(x) + b->options.load_seconds;
        error_set(err, ERR_STATE,
                  b->state == BASE_LOADING
                      ? "the model '%s' is still being loaded; try again later"
                      : "no memory is left to load the model '%s', because other models are in "
                        "use; try again later",
                  b->server.name);
        if (*wait) b->wanted_at = now;
        if (*wait && b->state == BASE_UNLOADED) thread_notify(p);
    }
    pthread_mutex_unlock(&p->lock);
    return err->code;
}

/* The text of a member of the request's body; NULL: missing or not a text. malloc'ed. */
static char *body_text(const struct exchange *x, const char *key) {
    json_t *v = request_body_member(x, key);
    char *copy = json_string_length(v) ? xstrdup(json_string_value(v)) : NULL;
    json_decref(v);
    return copy;
}

/* The server of the base that a request names: in its query, or in the first member of its body
 * that has one of these names. */
static struct server *base_of_request(struct server *front, const struct exchange *x) {
    static const char *const keys[] = {"model", "name", "base_model_name", "lora_name"};
    const char *query = exchange_query(x, "model");
    char *name = query ? xstrdup(query) : NULL;
    for (size_t i = 0; i < ARRAY_LEN(keys) && !name; i++) name = body_text(x, keys[i]);
    struct server *s = base_find(front, name);
    free(name);
    return s;
}

/* Whether a module has answered the request, for which the base need not be loaded. */
static bool answered_unloaded(struct server *s, struct exchange *x) {
    const struct server_module *m;
    if (base_status(s).loaded) return false;
    for (int i = 0; (m = server_module_at(s, i)); i++)
        if (m->answer_unloaded && m->answer_unloaded(s, x)) return true;
    return false;
}

void base_pool_handle(void *ctx, struct exchange *x, const struct http_route *r) {
    struct server *front = ctx, *s = r->scope & ROUTE_BASE ? base_of_request(front, x) : front;
    struct error err;
    bool wait;
    if (s == front) {
        r->handle(front, x);
    } else if (answered_unloaded(s, x)) {
        // nothing remains to be done
    } else if (base_acquire(s->base_entry, x, &wait, &err) == OK) {
        r->handle(s, x);
        base_release(s, true);
    } else {
        if (wait) exchange_postpone(x, s);
        api_fail_error(x, &err, NULL);
    }
}

bool base_retain(struct server *s) {
    struct base_entry *b = s->base_entry;
    if (!b) return true;
    pthread_mutex_lock(&b->pool->lock);
    bool loaded = b->state == BASE_LOADED;
    b->refs += loaded;
    pthread_mutex_unlock(&b->pool->lock);
    return loaded;
}

void base_release(struct server *s, bool used) {
    struct base_entry *b = s->base_entry;
    if (!b) return;
    pthread_mutex_lock(&b->pool->lock);
    CHECK(b->refs > 0);
    if (used) b->used_at = clock_now();
    if (--b->refs == 0) thread_notify(b->pool);
    pthread_mutex_unlock(&b->pool->lock);
}

void base_set_keep_alive(struct server *s, double seconds) {
    struct base_entry *b = s->base_entry;
    if (!b) return;
    pthread_mutex_lock(&b->pool->lock);
    b->keep_alive = seconds;
    pthread_mutex_unlock(&b->pool->lock);
}

struct base_status base_status(struct server *s) {
    struct base_entry *b = s->base_entry;
    pthread_mutex_lock(&b->pool->lock);
    double end = b->refs ? clock_now() + b->keep_alive : expiry(b);
    struct base_status status = {.loaded = b->state == BASE_LOADED,
                                 .loading = b->state == BASE_LOADING,
                                 .in_use = b->refs,
                                 .loads = b->loads,
                                 .plan_bytes = b->state == BASE_LOADED ? b->plan.total : 0,
                                 .expires = b->keep_alive < 0 ? -1 : MAX(end - clock_now(), 0)};
    memcpy(status.hash, b->hash, sizeof status.hash);
    pthread_mutex_unlock(&b->pool->lock);
    return status;
}

int32_t base_max_len(struct server *s) {
    struct base_entry *b = s->base_entry;
    if (!b) return engine_max_len(s->engine);
    pthread_mutex_lock(&b->pool->lock);
    int32_t len = b->max_len;
    pthread_mutex_unlock(&b->pool->lock);
    return len;
}

/* names */

struct server *base_at(struct server *front, int i) {
    const struct base_pool *p = front->bases;
    if (i == 0) return front;
    return p && i <= p->n ? &p->v[i - 1].server : NULL;
}

/* Whether a model's name is BASE:… or BASE@…. */
static bool has_prefix(const struct server *s, const char *model) {
    size_t n = strlen(s->name);
    return strncmp(model, s->name, n) == 0 && (model[n] == ':' || model[n] == '@');
}

static bool has_adapter(struct server *s, const char *name) {
    size_t n = strcspn(name, "*+");
    char *first = xstrndup(name, n), *tag = strrchr(first, ':');
    bool has = server_adapter_listed(s, first);
    if (!has && tag && strcmp(tag, ":latest") == 0) {
        *tag = 0;
        has = server_adapter_listed(s, first);
    }
    free(first);
    return has;
}

struct server *base_find(struct server *front, const char *model) {
    struct server *s;
    if (!model || !*model || !front->bases) return front;
    for (int i = 0; (s = base_at(front, i)); i++)
        if (server_name_is_base(s, model)) return s;
    for (int i = 0; (s = base_at(front, i)); i++)
        if (has_prefix(s, model)) return s;
    for (int i = 0; (s = base_at(front, i)); i++)
        if (has_adapter(s, model)) return s;
    return front;
}

/* opening and closing */

/* Before the first load the path and the size stand for the content. */
static void hash_init(struct base_entry *b) {
    char *text = xasprintf("%s %zu", b->server.path, b->server.size.file);
    sha256_bytes(text, strlen(text), b->hash);
    free(text);
}

static int entry_init(struct base_entry *b, const char *path, struct error *err) {
    struct server *s = &b->server, *front = b->pool->front;
    b->options = *front->options;
    b->options.names = b->options.adapters = (struct strings){0};
    b->options.teams = b->options.agents = (struct strings){0};
    b->options.adapter_dir = NULL;
    b->options.plan = &b->plan;
    *s = (struct server){.options = &b->options,
                         .front = front,
                         .base_entry = b,
                         .name = model_name_from_path(path),
                         .path = xstrdup(path),
                         .started = front->started};
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->derived_lock, NULL);
    if (model_measure(path, front->model->cls, &s->size, err) != OK) return err->code;
    hash_init(b);
    return OK;
}

/* ERR_MEMORY: the smallest plan of the base never fits. Sets the context until the first load: that
 * of a load now. */
static int budget_check(struct base_entry *b, struct error *err) {
    size_t budget = b->pool->budget;
    struct memory_plan now = {0};
    if (least_bytes_update(b, err) != OK) return err->code;
    if (plan_make(b, plan_limit(b, free_bytes(b->pool)), &now, err) != OK && !now.total)
        return err->code;
    b->max_len = now.engine.max_len;
    if (!budget || b->least_bytes <= budget) return OK;
    return error_set(err, ERR_MEMORY,
                     "its smallest memory plan needs %.1f MB, and --max-memory leaves %.1f MB",
                     mb(b->least_bytes), mb(budget));
}

static int name_check_free(const struct base_pool *p, const struct server *s, struct error *err) {
    for (int i = 0; i <= p->n; i++) {
        const struct server *other = i ? &p->v[i - 1].server : p->front;
        if (other != s && strcmp(other->name, s->name) == 0)
            return error_set(err, ERR_USAGE, "'%s' is called '%s', too: give one another name",
                             other->path, s->name);
    }
    return OK;
}

static void locks_init(struct base_pool *p) {
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->news, NULL);
}

struct base_pool *base_pool_new(struct server *front, struct error *err) {
    const struct serve_options *o = front->options;
    struct base_pool *p = xcalloc(1, sizeof *p);
    locks_init(p);
    p->front = front;
    p->v = xcalloc((size_t)o->bases.n, sizeof *p->v);
    if (o->max_memory && o->plan)
        p->budget = MAX(o->max_memory - MIN(o->plan->total, o->max_memory), 1);
    int rc = OK;
    for (int i = 0; i < o->bases.n && rc == OK; i++) {
        p->v[i].pool = p;
        p->n++;
        rc = entry_init(&p->v[i], o->bases.v[i], err);
        if (rc == OK) rc = name_check_free(p, &p->v[i].server, err);
        if (rc != OK) error_wrap(err, "model '%s'", o->bases.v[i]);
    }
    if (rc == OK) return p;
    base_pool_free(p);
    return NULL;
}

int base_pool_start(struct base_pool *p, struct error *err) {
    for (int i = 0; i < p->n; i++)
        if (budget_check(&p->v[i], err) != OK)
            return error_wrap(err, "model '%s'", p->v[i].server.path);
    CHECK(pthread_create(&p->thread, NULL, pool_thread, p) == 0);
    p->has_thread = true;
    return OK;
}

void base_pool_stop(struct base_pool *p) {
    if (!p || !p->has_thread) return;
    pthread_mutex_lock(&p->lock);
    p->quit = true;
    thread_notify(p);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    p->has_thread = false;
}

void base_pool_free(struct base_pool *p) {
    if (!p) return;
    for (int i = 0; i < p->n; i++) {
        struct server *s = &p->v[i].server;
        if (s->model) base_close(&p->v[i]);
        server_adapters_free(s->adapters, s->n_adapters);
        free(s->name);
        free(s->path);
    }
    free(p->v);
    free(p);
}
