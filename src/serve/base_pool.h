/*
 * base_pool: base models that are loaded when a request names them, and unloaded when they are
 * idle.
 *
 * The first model of a server, its default base, is in memory as long as the server runs. Every
 * other base has a separate struct server. While the base is loaded, this struct has the base's
 * model, engine, batcher and adapters, and shares the rest with the default base: HTTP, keys,
 * metrics, grammars, the memory budget of requests. base_pool_handle calls a handler with the
 * struct of the base that the request names, so a handler needs not know how many there are.
 *
 * Handlers and generations hold a reference to their base; a base with references is never
 * unloaded. One thread loads and unloads, while requests of other bases run. A request for a base
 * that is not loaded is postponed until it is, for at most --load-seconds.
 *
 * Any thread may call these functions, except those that open and close the pool.
 */
#ifndef SHOAL_SERVE_BASE_POOL_H
#define SHOAL_SERVE_BASE_POOL_H

#include "http/http.h"
#include "serve/serve.h"

struct base_pool;
struct server;

/* A pool of the bases in the options of the default base's server; reads headers only. NULL: an
 * error. */
struct base_pool *base_pool_new(struct server *front, struct error *err);
/* Starts the thread, after adapters were listed. ERR_MEMORY: a base never fits. */
int base_pool_start(struct base_pool *p, struct error *err);
/* Loads and unloads nothing any more; requests for bases that are not loaded get an error. Call it
 * before HTTP ends. NULL is allowed. */
void base_pool_stop(struct base_pool *p);
/* Unloads all bases. Call it after base_pool_stop and after HTTP has ended. NULL is allowed. */
void base_pool_free(struct base_pool *p);

/* The callback `handle` of http; ctx is the server of the default base. */
void base_pool_handle(void *ctx, struct exchange *x, const struct http_route *r);

/* The server of the base that a model's name refers to: a base's name, BASE:NAME, BASE@NAME, or the
 * name of an adapter, of a sum of adapters the first one. Other names refer to the default base.
 * The base need not be loaded: see base_retain. */
struct server *base_find(struct server *front, const char *model);
/* The i-th server, from 0, which is the default base's. NULL: there are i or fewer. */
struct server *base_at(struct server *front, int i);

/* Whether the base is loaded; then it remains so until base_release. The default base always is. */
bool base_retain(struct server *s);
/* used: the time of its keep_alive begins again. */
void base_release(struct server *s, bool used);
/* How long the base remains loaded after its last request, in seconds, until the next request sets
 * it; negative: until memory is needed for another base. No effect on the default base. */
void base_set_keep_alive(struct server *s, double seconds);

struct base_status {
    bool loaded, loading;
    int in_use;          /* references */
    int64_t loads;       /* loads so far */
    size_t plan_bytes;   /* bytes of its memory plan while it is loaded */
    double expires;      /* seconds until it is unloaded if no request comes; negative: never */
    char hash[HASH_LEN]; /* model_hash; before the first load the hash of path and size */
};
/* s is the server of a base that is loaded on demand. */
struct base_status base_status(struct server *s);
/* Tokens of a prompt and its reply. Of a base that is not loaded: those of its last load, or before
 * the first one those that a load at the start would have had. */
int32_t base_max_len(struct server *s);

#endif
