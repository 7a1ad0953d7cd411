/*
 * http: a server on libmicrohttpd. The library calls on_access repeatedly while bytes of a request
 * arrive; this file turns these calls into one call of a handler in a thread that may block, and
 * one answer from any thread.
 *
 *   reading ── body complete ──> handed over ── answer ──> sending ── all sent, or closed ──> ended
 *      │ refused by admit         (suspended)       (a stream: suspended while it waits)
 *      └─────────────────────────────────────────────^
 *
 * Invariants. 1. Only the library's threads use the library's objects of a connection, except that
 * any thread may look up headers and call MHD_resume_connection. The latter is called exactly once
 * per suspension, under the exchange's lock, and never before the answer: the library would call
 * on_access again and then wait for ever. 2. A suspended connection cannot end, so an exchange that
 * was handed over lives until it is answered. 3. `close` (of a stream) and `ended` are called once,
 * in this order. 4. Lock order: the exchange's lock, locks of the code that answers, http's lock.
 *
 * The body of a refused request is read to its end before the answer is sent: many clients do not
 * read before they have sent everything, and closing the connection earlier looks to them like a
 * server crash.
 *
 * The library does not check suspended connections, and a client that sends one byte per minute
 * keeps resetting the library's timers. So a thread here, the watchdog, closes connections
 * that take too long in total, and notifies the code that computes an answer for a client that has
 * disconnected.
 */
#define _GNU_SOURCE
#include "http/http.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <microhttpd.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* libmicrohttpd is loaded when a server starts, so other commands load neither this library nor
 * TLS. */
#define MHD_FUNCTIONS(F)                                                                           \
    F(MHD_add_response_header)                                                                     \
    F(MHD_create_response_from_buffer)                                                             \
    F(MHD_create_response_from_callback)                                                           \
    F(MHD_destroy_response)                                                                        \
    F(MHD_get_connection_info)                                                                     \
    F(MHD_get_connection_values)                                                                   \
    F(MHD_get_daemon_info)                                                                         \
    F(MHD_lookup_connection_value)                                                                 \
    F(MHD_queue_response)                                                                          \
    F(MHD_quiesce_daemon)                                                                          \
    F(MHD_resume_connection)                                                                       \
    F(MHD_start_daemon)                                                                            \
    F(MHD_stop_daemon)                                                                             \
    F(MHD_suspend_connection)
static struct {
#define DECLARE(name) __typeof__(&name) name;
    MHD_FUNCTIONS(DECLARE)
} mhd;

static int mhd_load(struct error *err) {
    void *so = dlopen("libmicrohttpd.so.12", RTLD_NOW), *at; // never unloaded
    if (!so)
        return error_set(err, ERR_MISSING,
                         "libmicrohttpd is not installed (%s); install libmicrohttpd12", dlerror());
#define LOAD(name)                                                                                 \
    if (!(at = dlsym(so, #name)))                                                                  \
        return error_set(err, ERR_MISSING, "this libmicrohttpd has no '%s'; install a newer one",  \
                         #name);                                                                   \
    memcpy(&mhd.name, &at, sizeof at);
    MHD_FUNCTIONS(LOAD)
    return OK;
}

enum {
    /* The limit of a request's headers, and the library's memory per connection. The library
     * answers a longer request, or one that is not HTTP, before this file sees it (400, 413, 414,
     * 431), with an HTML page that cannot be changed. */
    HEADER_BYTES = 32 << 10,
    STREAM_BLOCK = 8 << 10,
    LARGE_BODY = 256 << 10,
    LARGE_THREADS = 2,
    LARGE_NICE = 10,
    DISCARD_FACTOR = 4, /* a refused body is read up to this multiple of max_body */
    BODIES_FACTOR = 8,  /* all bodies in memory: at most this multiple of max_body */
    /* bodies of one client that is not on this machine: at most this multiple of max_body */
    BODIES_FACTOR_PER_CLIENT = 2,
    MAX_PROXIES = 64,
    PING_SECONDS = 15,
    /* A client has body_seconds to read a reply, and as much again for each REPLY_BYTES_PER_PERIOD
     * of the reply. Of a stream it must read STREAM_BLOCKS_PER_PERIOD blocks in body_seconds, but
     * it has at least MIN_BLOCK_SECONDS for each block. */
    REPLY_BYTES_PER_PERIOD = 4 << 20,
    STREAM_BLOCKS_PER_PERIOD = 8,
    MIN_BLOCK_SECONDS = 5,
};

enum { EXCHANGE_ID_MAX = 128 }; /* length of an id that a client chooses */

enum exchange_phase { PHASE_READING, PHASE_HANDED_OVER, PHASE_SENDING };

struct header {
    char *name, *value;
};
struct exchange {
    int refs;
    struct http *h;
    struct exchange *next, *prev; /* neighbours in http's list, under its lock */
    struct MHD_Connection *connection;
    struct http_connection *conn;
    /* rest: the text that "*" matched, or NULL; client: the name under which limits are kept */
    char *method, *path, *rest, peer[IP_ADDRESS_TEXT_LEN], client[IP_ADDRESS_TEXT_LEN];
    char id[EXCHANGE_ID_MAX + 1];
    bool local, handed_over;
    bool postponed;                  /* the handler postponed the request; used by its thread */
    struct exchange *next_postponed; /* under the lock of http, like the next three */
    const void *resource;            /* the postponed request waits for it */
    bool again;     /* the handler ran again, and postponed the request for the same resource */
    uint64_t round; /* the round of resumptions in which it did; 0: it has not */
    const struct http_route *route;
    struct header *query; /* the decoded arguments of the query; not changed after the headers */
    int n_query;
    struct buf body;
    int64_t charged_bytes;  /* bytes of the body that are counted for the client (LIMIT_BYTES) */
    int64_t discarded;      /* bytes discarded from the body of a refused request */
    struct body_sink *sink; /* receives the body in place of `body`; NULL: none */
    double started_at, last_read_at; /* last_read_at: when the sink received its last part */
    double deadline;    /* deadline for the client to read the current output; atomic; 0: no
                         * deadline */
    size_t reply_bytes; /* size of the reply; 0 for a stream */
    void *user;

    enum exchange_phase phase; /* atomic, like status, because the watchdog reads it */
    int status;                /* 0: not answered yet; set under the lock */

    pthread_mutex_t lock; /* protects the fields below */
    bool suspended, woken, ping_requested, disconnected;
    struct header *headers;
    int n_headers;
    struct MHD_Response *response; /* NULL: a call, whose reply is in `out` */
    struct stream_source source;   /* pull is NULL unless the reply is a stream */
    struct buf out;                /* bytes of the stream that are not sent yet */
    size_t sent_bytes;
    bool stream_ended; /* the stream ends after `out` */
    double last_out;   /* time of the last output */
    void (*on_disconnect)(void *ctx);
    void *on_disconnect_ctx;
    struct call *call; /* NULL: the request came from a connection; constant */
};

/* The other side of an exchange without a connection. */
struct call {
    struct exchange *parent; /* retained, or NULL */
    struct header *headers;  /* headers of the request */
    int n_headers;
    char *type; /* media type of the answer */
    void (*notify)(void *ctx);
    void (*release)(void *ctx);
    void *ctx;
};

/* A client connection, from its acceptance to its end. */
struct http_connection {
    struct http_connection *next, *prev;
    int fd;
    double since; /* time when it was accepted, or when its last request ended */
    bool first;   /* no request has arrived yet */
    char client[IP_ADDRESS_TEXT_LEN]; /* name under which it is counted; "": it is not counted */
    struct exchange *x;               /* the current request, or NULL */
};

struct http_work {
    struct http_work *next;
    void (*fn)(void *ctx);
    void *ctx;
};
struct work_queue {
    struct http_work *head, *tail;
};

/* A queue with its own threads. own_thread_pool runs requests that must be answered even while all
 * workers are busy (HTTP_DISPATCH_OWN_THREAD). large_pool runs requests with a large body at a low
 * priority, so that engine steps and small requests do not wait for them. */
struct worker_pool {
    struct http *h;
    struct work_queue queue;
    pthread_cond_t work_ready;
    pthread_t threads[LARGE_THREADS];
    int n, nice;
};

struct http {
    const struct http_options *o;
    struct http_callbacks c;
    struct MHD_Daemon *daemon;
    int port;
    char *cert, *key;
    char machine[256]; /* name of the machine */
    struct ip_cidr proxies[MAX_PROXIES];
    int n_proxies;
    struct client_limits *limits;

    pthread_mutex_t lock; /* protects the fields below */
    pthread_cond_t work_ready, ended;
    struct work_queue queue, slow_queue;
    struct worker_pool own_thread_pool, large_pool;
    int n_slow;                 /* workers that run slow requests */
    struct exchange *postponed; /* list of the postponed requests, each with a reference */
    struct exchange *resumed;   /* the postponed request whose handler runs again, or NULL */
    bool resume_again;          /* http_resume_postponed was called while `resumed` ran */
    uint64_t round;             /* rounds of resumptions so far */
    struct exchange *exchanges;
    int n_exchanges;
    struct http_connection *connections;
    struct http_stats stats; /* streams and bytes_out are atomic */
    int64_t body_bytes;      /* bytes of bodies in memory; atomic, like stopping */
    bool stopping;           /* no new requests */
    bool quit;               /* requests in progress are aborted */
    bool finished;           /* no request is in progress: workers exit */
    pthread_t *workers, watchdog;
    int n_workers;
    bool has_watchdog;
};

/* workers */

/* `work_ready` is the condition variable on which the consumers of the queue `to` wait. The caller
 * holds the lock of http. */
static void work_add(struct work_queue *to, pthread_cond_t *work_ready, void (*fn)(void *ctx),
                     void *ctx) {
    struct http_work *w = xcalloc(1, sizeof *w);
    *w = (struct http_work){.fn = fn, .ctx = ctx};
    *(to->tail ? &to->tail->next : &to->head) = w;
    to->tail = w;
    pthread_cond_signal(work_ready);
}

void http_run_in_worker(struct http *h, void (*fn)(void *ctx), void *ctx) {
    pthread_mutex_lock(&h->lock);
    work_add(&h->queue, &h->work_ready, fn, ctx);
    pthread_mutex_unlock(&h->lock);
}

static struct http_work *work_dequeue(struct work_queue *from) {
    struct http_work *w = from->head;
    if (!w) return NULL;
    from->head = w->next;
    if (!from->head) from->tail = NULL;
    return w;
}

/* Slow requests use at most half of the workers, so that the other workers can always answer health
 * checks. At shutdown slow requests may use all workers, because no worker may exit before the
 * queue is empty. */
static struct http_work *work_next(struct http *h, bool *slow) {
    bool room = h->finished || h->n_slow < MAX(h->c.workers / 2, 1);
    struct http_work *w = room ? work_dequeue(&h->slow_queue) : NULL;
    *slow = w != NULL;
    return w ? w : work_dequeue(&h->queue);
}

static void *worker_main(void *ctx) {
    struct http *h = ctx;
    pthread_mutex_lock(&h->lock);
    for (;;) {
        bool slow;
        struct http_work *w = work_next(h, &slow);
        if (!w && h->finished) break;
        if (!w) {
            pthread_cond_wait(&h->work_ready, &h->lock);
            continue;
        }
        h->n_slow += slow;
        pthread_mutex_unlock(&h->lock);
        w->fn(w->ctx);
        free(w);
        pthread_mutex_lock(&h->lock);
        h->n_slow -= slow;
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

/* A thread of a worker_pool; it runs one request at a time. */
static void *pool_thread_main(void *ctx) {
    struct worker_pool *pool = ctx;
    struct http *h = pool->h;
    if (pool->nice) thread_lower_priority(pool->nice);
    pthread_mutex_lock(&h->lock);
    for (;;) {
        struct http_work *w = work_dequeue(&pool->queue);
        if (!w && h->finished) break;
        if (!w) {
            pthread_cond_wait(&pool->work_ready, &h->lock);
            continue;
        }
        pthread_mutex_unlock(&h->lock);
        w->fn(w->ctx);
        free(w);
        pthread_mutex_lock(&h->lock);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

static void worker_pool_start(struct http *h, struct worker_pool *pool, int n, int nice) {
    pool->h = h;
    pool->nice = nice;
    for (; pool->n < n; pool->n++)
        CHECK(pthread_create(&pool->threads[pool->n], NULL, pool_thread_main, pool) == 0);
}

static void worker_pool_join(struct worker_pool *pool) {
    for (int i = 0; i < pool->n; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work_ready);
}

/* an exchange */

struct exchange *exchange_retain(struct exchange *x) {
    __atomic_add_fetch(&x->refs, 1, __ATOMIC_RELAXED);
    return x;
}

static void body_release(struct exchange *x) {
    __atomic_sub_fetch(&x->h->body_bytes, (int64_t)x->body.len, __ATOMIC_RELAXED);
    if (x->charged_bytes)
        client_limits_release(x->h->limits, x->client, LIMIT_BYTES, x->charged_bytes);
    x->charged_bytes = 0;
    buf_release(&x->body);
}

static void headers_free(struct header *v, int n) {
    for (int i = 0; i < n; i++) {
        free(v[i].name);
        free(v[i].value);
    }
}

static void headers_clear(struct exchange *x) {
    headers_free(x->headers, x->n_headers);
    x->n_headers = 0;
}

static void call_free(struct call *c) {
    if (!c) return;
    c->release(c->ctx);
    headers_free(c->headers, c->n_headers);
    free(c->headers);
    free(c->type);
    exchange_release(c->parent);
    free(c);
}

void exchange_release(struct exchange *x) {
    if (!x || __atomic_sub_fetch(&x->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    call_free(x->call);
    headers_clear(x);
    free(x->headers);
    headers_free(x->query, x->n_query);
    free(x->query);
    free(x->method);
    free(x->path);
    free(x->rest);
    buf_release(&x->out);
    pthread_mutex_destroy(&x->lock);
    free(x);
}

const char *exchange_method(const struct exchange *x) {
    return x->method;
}
const char *exchange_path(const struct exchange *x) {
    return x->path;
}
const char *exchange_id(const struct exchange *x) {
    return x->id;
}
const char *exchange_wildcard(const struct exchange *x) {
    return x->rest ? x->rest : "";
}
const char *exchange_header(const struct exchange *x, const char *name) {
    for (int i = 0; x->call && i < x->call->n_headers; i++)
        if (strcasecmp(x->call->headers[i].name, name) == 0) return x->call->headers[i].value;
    if (x->call) return NULL;
    return mhd.MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, name);
}
const char *exchange_query(const struct exchange *x, const char *name) {
    for (int i = 0; i < x->n_query; i++)
        if (strcmp(x->query[i].name, name) == 0) return x->query[i].value;
    return NULL;
}
const char *exchange_peer(const struct exchange *x) {
    return x->peer;
}
const char *exchange_limits_name(const struct exchange *x) {
    return x->client;
}
bool exchange_is_local(const struct exchange *x) {
    return x->local;
}
const struct buf *exchange_body(const struct exchange *x) {
    return &x->body;
}
struct body_sink *exchange_sink(const struct exchange *x) {
    return x->sink;
}
double exchange_start_time(const struct exchange *x) {
    return x->started_at;
}
void exchange_set_user(struct exchange *x, void *user) {
    x->user = user;
}
void *exchange_user(const struct exchange *x) {
    return x->user;
}
int exchange_status(const struct exchange *x) {
    return __atomic_load_n(&x->status, __ATOMIC_ACQUIRE);
}

static enum exchange_phase phase_of(const struct exchange *x) {
    return __atomic_load_n(&x->phase, __ATOMIC_ACQUIRE);
}

static bool is_stopping(const struct http *h) {
    return __atomic_load_n(&h->stopping, __ATOMIC_ACQUIRE);
}

json_t *json_parse_body(const struct buf *body, struct error *err) {
    if (body->len == 0) {
        error_set(err, ERR_FORMAT, "the request has no body; it must be JSON");
        return NULL;
    }
    struct json_limits left = json_request_limits;
    return json_parse_limited(body->data, body->len, "request", &left, err);
}

json_t *exchange_json(const struct exchange *x, struct error *err) {
    return json_parse_body(&x->body, err);
}

bool exchange_is_disconnected(struct exchange *x) {
    pthread_mutex_lock(&x->lock);
    bool gone = x->disconnected;
    pthread_mutex_unlock(&x->lock);
    return gone;
}

void exchange_on_disconnect(struct exchange *x, void (*gone)(void *ctx), void *ctx) {
    pthread_mutex_lock(&x->lock);
    bool now = x->disconnected;
    if (!now) {
        x->on_disconnect = gone;
        x->on_disconnect_ctx = ctx;
    }
    pthread_mutex_unlock(&x->lock);
    if (now) gone(ctx);
}

/* answers */

void exchange_add_header(struct exchange *x, const char *name, const char *value) {
    x->headers = xrealloc(x->headers, sizeof *x->headers * (size_t)(x->n_headers + 1));
    x->headers[x->n_headers++] = (struct header){xstrdup(name), xstrdup(value)};
}

static void header_add(struct MHD_Response *r, const char *name, const char *value) {
    if (mhd.MHD_add_response_header(r, name, value) != MHD_YES)
        log_warn("a header '%s' cannot be sent", name);
}

static bool cors_allows(const struct http *h, const char *origin) {
    for (int i = 0; i < h->o->cors.n; i++)
        if (strcmp(h->o->cors.v[i], "*") == 0 || strcmp(h->o->cors.v[i], origin) == 0) return true;
    return false;
}

/* Lists the handler's headers for the browser: a page of another origin may read only listed
 * headers. */
static void headers_expose(struct exchange *x) {
    struct buf names = {0};
    for (int i = 0; i < x->n_headers; i++)
        buf_printf(&names, "%s%s", i ? ", " : "", x->headers[i].name);
    if (names.len) header_add(x->response, "Access-Control-Expose-Headers", names.data);
    buf_release(&names);
}

static void headers_add(struct exchange *x, const char *type) {
    const char *origin = exchange_header(x, "Origin");
    exchange_add_header(x, "X-Request-Id", x->id);
    if (type) header_add(x->response, "Content-Type", type);
    header_add(x->response, "X-Content-Type-Options", "nosniff");
    for (int i = 0; i < x->n_headers; i++)
        header_add(x->response, x->headers[i].name, x->headers[i].value);
    if (origin && cors_allows(x->h, origin)) {
        header_add(x->response, "Access-Control-Allow-Origin", origin);
        header_add(x->response, "Vary", "Origin");
        headers_expose(x);
    }
    if (is_stopping(x->h)) header_add(x->response, "Connection", "close");
}

static void deadline_set(struct exchange *x, double deadline) {
    __atomic_store(&x->deadline, &deadline, __ATOMIC_RELEASE);
}

static double block_deadline(const struct exchange *x) {
    return clock_now() + MAX(x->h->o->body_seconds / STREAM_BLOCKS_PER_PERIOD, MIN_BLOCK_SECONDS);
}

/* The caller holds the lock. */
static void wake_locked(struct exchange *x) {
    x->woken = true;
    if (!x->suspended || !x->status) return;
    x->suspended = false;
    if (x->source.pull) deadline_set(x, block_deadline(x));
    mhd.MHD_resume_connection(x->connection);
}

/* Called without the lock, because `notify` may answer another exchange. */
static void call_notify(const struct exchange *x) {
    if (x->call) x->call->notify(x->call->ctx);
}

void exchange_wake(struct exchange *x) {
    pthread_mutex_lock(&x->lock);
    wake_locked(x);
    pthread_mutex_unlock(&x->lock);
    call_notify(x);
}

/* Sets the n bytes of the reply, which it takes over. */
static void reply_set(struct exchange *x, char *data, size_t n) {
    x->reply_bytes = n;
    if (x->call)
        x->out = (struct buf){.data = data, .len = n, .cap = n};
    else
        x->response = mhd.MHD_create_response_from_buffer(n, data, MHD_RESPMEM_MUST_FREE);
}

static void reply_discard(struct exchange *x) {
    if (x->response) mhd.MHD_destroy_response(x->response);
    x->response = NULL;
    buf_release(&x->out);
}

/* Sets the status and wakes the connection. `source` describes a stream, or is NULL. */
static void answer_publish(struct exchange *x, int status, const char *type,
                           const struct stream_source *source) {
    CHECK((x->response || x->call) && exchange_status(x) == 0);
    if (x->postponed) {
        CHECK(!source);
        reply_discard(x);
        return;
    }
    pthread_mutex_lock(&x->lock);
    if (x->call)
        x->call->type = type ? xstrdup(type) : NULL;
    else
        headers_add(x, type);
    if (source) x->source = *source;
    x->last_out = clock_now();
    x->on_disconnect = NULL;
    deadline_set(x, source
                        ? block_deadline(x)
                        : x->last_out + x->h->o->body_seconds *
                                            (1 + (double)x->reply_bytes / REPLY_BYTES_PER_PERIOD));
    __atomic_store_n(&x->status, status, __ATOMIC_RELEASE);
    wake_locked(x);
    pthread_mutex_unlock(&x->lock);
    call_notify(x);
}

void exchange_reply(struct exchange *x, int status, const char *type, const void *data, size_t n) {
    char *copy = xmalloc(MAX(n, (size_t)1));
    if (n) memcpy(copy, data, n);
    reply_set(x, copy, n);
    answer_publish(x, status, type, NULL);
}

void exchange_reply_buf(struct exchange *x, int status, const char *type, struct buf *b) {
    char *shrunk = realloc(b->data, MAX(b->len, (size_t)1)), *data = shrunk ? shrunk : b->data;
    reply_set(x, data, b->len);
    *b = (struct buf){0};
    answer_publish(x, status, type, NULL);
}

void exchange_reply_json(struct exchange *x, int status, json_t *v) {
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(17));
    CHECK(text != NULL);
    reply_set(x, text, strlen(text));
    json_decref(v);
    answer_publish(x, status, "application/json", NULL);
}

/* streams */

/* Fills `out`. Returns true when there are bytes to send or the stream has ended. The caller holds
 * the lock, which is released while `pull` runs. */
static bool stream_fill(struct exchange *x) {
    if (x->sent_bytes < x->out.len || x->stream_ended) return true;
    x->out.len = x->sent_bytes = 0;
    x->woken = false;
    pthread_mutex_unlock(&x->lock);
    enum stream_status p = x->source.pull(x->source.ctx, &x->out);
    pthread_mutex_lock(&x->lock);
    x->stream_ended = p == STREAM_END;
    return x->stream_ended || x->out.len > 0;
}

static bool ping_append(struct exchange *x) {
    bool requested = x->ping_requested && x->source.idle;
    x->ping_requested = false;
    if (requested) buf_puts(&x->out, x->source.idle);
    return requested;
}

static ssize_t stream_read(void *ctx, uint64_t pos, char *to, size_t max) {
    struct exchange *x = ctx;
    ssize_t n = 0;
    (void)pos;
    pthread_mutex_lock(&x->lock);
    while (n == 0 && !x->disconnected) {
        if (stream_fill(x) || ping_append(x)) {
            size_t left = x->out.len - x->sent_bytes;
            if (left == 0) {
                n = MHD_CONTENT_READER_END_OF_STREAM;
                break;
            }
            n = (ssize_t)MIN(left, max);
            memcpy(to, x->out.data + x->sent_bytes, (size_t)n);
            x->sent_bytes += (size_t)n;
            x->last_out = clock_now();
            deadline_set(x, block_deadline(x));
        } else if (!x->woken) {
            x->suspended = true;
            deadline_set(x, 0);
            mhd.MHD_suspend_connection(x->connection);
            break;
        }
    }
    /* The watchdog has shut the socket down, so the client cannot mistake this for a complete
     * reply. (An error would be more accurate, but the library would keep the connection until its
     * timeout.) */
    if (x->disconnected) n = MHD_CONTENT_READER_END_OF_STREAM;
    pthread_mutex_unlock(&x->lock);
    if (n > 0) __atomic_add_fetch(&x->h->stats.bytes_out, (uint64_t)n, __ATOMIC_RELAXED);
    return n;
}

void exchange_stream(struct exchange *x, int status, const char *type,
                     const struct stream_source *s) {
    __atomic_add_fetch(&x->h->stats.streams, 1, __ATOMIC_RELAXED);
    exchange_add_header(x, "Cache-Control", "no-store");
    // otherwise proxies buffer incomplete replies
    exchange_add_header(x, "X-Accel-Buffering", "no");
    if (!x->call)
        x->response = mhd.MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK,
                                                            stream_read, x, NULL);
    answer_publish(x, status, type, s);
}

/* routes */

/* "%41/%2F" → "A//". Returns false on an invalid digit or an encoded zero byte. */
static bool percent_decode(char *s) {
    char *to = s;
    for (; *s; s++, to++) {
        *to = *s;
        if (*s != '%') continue;
        if (!isxdigit((uint8_t)s[1]) || !isxdigit((uint8_t)s[2])) return false;
        *to = (char)strtol((char[]){s[1], s[2], 0}, NULL, 16);
        if (!*to) return false;
        s += 2;
    }
    *to = 0;
    return true;
}

struct query_reader {
    struct exchange *x;
    bool encoded; /* all arguments are encoded correctly */
};

/* Copies an argument of the query. "+" is a space, as forms send it; without "=" the value is "".
 */
static enum MHD_Result query_add(void *ctx, enum MHD_ValueKind kind, const char *name,
                                 const char *value) {
    struct query_reader *r = ctx;
    struct exchange *x = r->x;
    (void)kind;
    x->query = xrealloc(x->query, sizeof *x->query * (size_t)(x->n_query + 1));
    struct header *q = &x->query[x->n_query++];
    *q = (struct header){xstrdup(name), xstrdup(value ? value : "")};
    for (char *s = q->name; (s = strchr(s, '+'));) *s = ' ';
    for (char *s = q->value; (s = strchr(s, '+'));) *s = ' ';
    r->encoded = percent_decode(q->name) && percent_decode(q->value);
    return r->encoded ? MHD_YES : MHD_NO;
}

static bool query_read(struct exchange *x) {
    struct query_reader r = {x, true};
    mhd.MHD_get_connection_values(x->connection, MHD_GET_ARGUMENT_KIND, query_add, &r);
    return r.encoded;
}

/* Whether an encoded path matches the route's pattern. *rest: the part that "*" matches. */
static bool path_matches(const char *pattern, const char *path, const char **rest) {
    while (*pattern && *pattern == *path) pattern++, path++;
    *rest = path;
    return (*pattern == '*' && *path) || (!*pattern && !*path);
}

/* The route for a method and path; HEAD is handled as GET. *known: the path exists with another
 * method. */
static const struct http_route *route_find(const struct http *h, const char *method,
                                           const char *path, const char **rest, bool *known) {
    if (strcmp(method, "HEAD") == 0) method = "GET";
    *known = false;
    for (const struct http_route *r = h->c.routes; r->method; r++) {
        if (!path_matches(r->path, path, rest)) continue;
        if (strcmp(r->method, method) == 0) return r;
        *known = true;
    }
    return NULL;
}

static void refuse(struct exchange *x, int status, const char *code, const char *message) {
    x->h->c.refuse(x->h->c.ctx, x, status, code, message);
}

/* protection against other origins */

bool exchange_host_is_own(const struct exchange *x) {
    const char *host = exchange_header(x, "Host"), *machine = x->h->machine;
    const struct http_options *o = x->h->o;
    char short_name[sizeof x->h->machine], mdns_name[sizeof x->h->machine + 8];
    if (!host) return true; // browsers always send one
    snprintf(short_name, sizeof short_name, "%.*s", (int)strcspn(machine, "."), machine);
    snprintf(mdns_name, sizeof mdns_name, "%s.local", short_name);
    bool own = host_header_is_ip(host) || host_header_is(host, "localhost") ||
               host_header_is(host, o->host);
    if (*machine)
        own |= host_header_is(host, machine) || host_header_is(host, short_name) ||
               host_header_is(host, mdns_name);
    for (int i = 0; i < o->hosts.n; i++) own |= host_header_is(host, o->hosts.v[i]);
    return own;
}

/* A web page of another origin can make a browser send requests to this server: directly, which the
 * Origin header shows (origin_is_ok), or with a domain name that resolves to this server's address,
 * which the Host header shows (host_is_ok). */
static bool host_is_ok(struct exchange *x) {
    return (x->h->c.any_host && x->h->c.any_host(x->h->c.ctx)) || exchange_host_is_own(x);
}

static bool origin_is_ok(struct exchange *x) {
    const char *origin = exchange_header(x, "Origin"), *host = exchange_header(x, "Host");
    if (!origin || cors_allows(x->h, origin)) return true;
    const char *name = strstr(origin, "://");
    return name && host && strcasecmp(name + 3, host) == 0;
}

static enum MHD_Result host_count(void *ctx, enum MHD_ValueKind kind, const char *name,
                                  const char *value) {
    (void)kind, (void)value;
    *(int *)ctx += strcasecmp(name, "Host") == 0;
    return MHD_YES;
}

/* RFC 9112, 3.2: exactly one Host header. HTTP/1.0 has no such rule. */
static bool has_host(struct exchange *x, const char *version) {
    int n = 0;
    mhd.MHD_get_connection_values(x->connection, MHD_HEADER_KIND, host_count, &n);
    return n == 1 || (n == 0 && strcmp(version, "HTTP/1.0") == 0);
}

static void preflight(struct exchange *x) {
    exchange_add_header(x, "Access-Control-Allow-Methods", "GET, POST, PUT, DELETE, OPTIONS");
    exchange_add_header(x, "Access-Control-Allow-Headers", "*, Authorization");
    exchange_add_header(x, "Access-Control-Max-Age", "600");
    exchange_reply(x, 204, NULL, "", 0);
}

/* callbacks of the library */

struct forwarded {
    bool any;
    struct buf list; /* values of all X-Forwarded-For headers */
};
static enum MHD_Result forwarded_collect(void *ctx, enum MHD_ValueKind kind, const char *name,
                                         const char *value) {
    static const char *const names[] = {"X-Forwarded-For",   "X-Forwarded-Host", "Forwarded",
                                        "X-Forwarded-Proto", "X-Real-IP",        "Via"};
    struct forwarded *f = ctx;
    (void)kind;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        if (strcasecmp(name, names[i]) != 0) continue;
        f->any = true;
        if (i == 0) buf_printf(&f->list, "%s%s", f->list.len ? "," : "", value ? value : "");
    }
    return MHD_YES;
}

/* Finds the client's address. A proxy on this machine must not make all its clients local, so a
 * forwarded request is not local unless a trusted proxy reports that it came from this machine. */
static void peer_find(struct exchange *x) {
    const union MHD_ConnectionInfo *info =
        mhd.MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    struct http *h = x->h;
    struct ip_address a = {{0}}, client;
    struct forwarded f = {0};
    bool known = info && ip_address_from_sockaddr(info->client_addr, &a);
    mhd.MHD_get_connection_values(x->connection, MHD_HEADER_KIND, forwarded_collect, &f);
    x->local = known && ip_address_is_loopback(&a) && !f.any;
    if (f.any && f.list.len && ip_address_in_cidrs(&a, h->proxies, h->n_proxies) &&
        ip_address_from_forwarded(f.list.data, h->proxies, h->n_proxies, &client)) {
        x->local = known && ip_address_is_loopback(&a) && ip_address_is_loopback(&client);
        a = client;
    }
    ip_address_format(&a, x->peer);
    ip_address_client_key(&a, x->client);
    buf_release(&f.list);
}

static bool request_id_is_valid(const char *id) {
    size_t n = id ? strlen(id) : 0;
    for (size_t i = 0; i < n; i++)
        if (!isalnum((uint8_t)id[i]) && !strchr("-_.:", id[i])) return false;
    return n > 0 && n <= EXCHANGE_ID_MAX;
}

static void request_id_set(struct exchange *x) {
    const char *sent = exchange_header(x, "X-Request-Id");
    uint64_t random[2];
    if (request_id_is_valid(sent)) {
        memcpy(x->id, sent, strlen(sent) + 1);
        return;
    }
    CHECK(getrandom(random, sizeof random, 0) == sizeof random);
    snprintf(x->id, sizeof x->id, "req_%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
}

static void exchange_list_add(struct exchange *x) {
    struct http *h = x->h;
    pthread_mutex_lock(&h->lock);
    x->next = h->exchanges;
    if (x->next) x->next->prev = x;
    h->exchanges = x;
    h->n_exchanges++;
    h->stats.requests++;
    if (x->conn) {
        x->conn->x = x;
        x->conn->first = false;
    }
    pthread_mutex_unlock(&h->lock);
}

static void exchange_list_remove(struct exchange *x) {
    struct http *h = x->h;
    pthread_mutex_lock(&h->lock);
    if (x->prev) x->prev->next = x->next;
    if (x->next) x->next->prev = x->prev;
    if (h->exchanges == x) h->exchanges = x->next;
    h->n_exchanges--;
    if (x->conn) {
        x->conn->x = NULL;
        x->conn->since = clock_now();
    }
    pthread_cond_broadcast(&h->ended);
    pthread_mutex_unlock(&h->lock);
}

static struct exchange *exchange_new(struct http *h, struct MHD_Connection *c, const char *url,
                                     const char *method) {
    struct exchange *x = xcalloc(1, sizeof *x);
    const union MHD_ConnectionInfo *info =
        mhd.MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    *x = (struct exchange){.refs = 1,
                           .h = h,
                           .connection = c,
                           .conn = info ? info->socket_context : NULL,
                           .method = xstrdup(method),
                           .path = xstrdup(url),
                           .started_at = clock_now()};
    pthread_mutex_init(&x->lock, NULL);
    request_id_set(x);
    peer_find(x);
    exchange_list_add(x);
    return x;
}

/* Called when a request matches a route: asks whether it is admitted, and chooses where its body
 * goes. */
static void body_destination_choose(struct exchange *x) {
    struct http *h = x->h;
    const char *length = exchange_header(x, "Content-Length");
    if (h->c.admit(h->c.ctx, x, x->route) != OK || x->status) return;
    if (h->c.sink) x->sink = h->c.sink(h->c.ctx, x, x->route);
    if (!x->sink && !exchange_status(x) && length && strtod(length, NULL) > (double)h->o->max_body)
        refuse(x, 413, "too_large", "the body is larger than --max-body");
}

/* Makes every check that does not need the body. If it answers, the request was refused or is a
 * preflight, and no handler runs. */
static void on_headers_complete(struct exchange *x, const char *version) {
    struct http *h = x->h;
    const char *rest;
    bool known;
    x->route = route_find(h, x->method, x->path, &rest, &known);
    if (x->route && *rest) x->rest = xstrdup(rest);
    bool decoded =
        percent_decode(x->path) && (!x->rest || percent_decode(x->rest)) && query_read(x);
    if (is_stopping(h))
        refuse(x, 503, "shutting_down", "the server is shutting down; try again soon");
    else if (!has_host(x, version))
        refuse(x, 400, "invalid_host", "a request of HTTP/1.1 has exactly one Host header");
    else if (!host_is_ok(x))
        refuse(x, 403, "host_not_allowed",
               "the Host of this request is not a name of this server; start it with "
               "--allowed-host and the name");
    else if (!origin_is_ok(x))
        refuse(x, 403, "origin_not_allowed",
               "requests from this page's origin are not allowed; start the server with --cors and "
               "the origin");
    else if (!decoded)
        refuse(x, 400, "invalid_path",
               "the path or the query is not percent-encoded as it should be");
    else if (strcmp(x->method, "OPTIONS") == 0 && exchange_header(x, "Origin"))
        preflight(x);
    else if (!x->route && known)
        refuse(x, 405, "method_not_allowed", "this path has no such method");
    else if (!x->route)
        refuse(x, 404, "not_found", "there is no such path; docs/API.md lists all");
    else
        body_destination_choose(x);
}

/* Returns freed memory to the system now; the C library would keep it. */
static void memory_trim(void) {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

static _Thread_local struct exchange *current;

struct exchange *exchange_current(void) {
    return current;
}

/* postponed requests */

static void handler_enqueue(struct exchange *x);

/* A round runs the handlers of postponed requests one after the other. If a request is postponed
 * again for the same resource, its `round` is the current one: the resource is not available, so
 * later requests for it are left out in this round. */

/* The first request that waits for the resource, or NULL. The caller holds the lock. */
static const struct exchange *postponed_first(const struct http *h, const void *resource) {
    const struct exchange *x = h->postponed;
    while (x && x->resource != resource) x = x->next_postponed;
    return x;
}

/* Runs the handler of the next postponed request of this round, unless one runs. The caller holds
 * the lock. */
static void postponed_run_next(struct http *h) {
    struct exchange **link = &h->postponed, *x;
    if (h->resumed) return;
    while ((x = *link) && postponed_first(h, x->resource)->round == h->round)
        link = &x->next_postponed;
    if (!x) return;
    *link = x->next_postponed;
    h->resumed = x;
    handler_enqueue(x);
}

/* Begins a round, or lets the one that runs be followed by another. The caller holds the lock. */
static void postponed_run(struct http *h) {
    h->resume_again = h->resumed != NULL;
    if (h->resumed) return;
    h->round++;
    postponed_run_next(h);
}

void http_resume_postponed(struct http *h) {
    pthread_mutex_lock(&h->lock);
    postponed_run(h);
    pthread_mutex_unlock(&h->lock);
}

bool exchange_postpone(struct exchange *x, const void *resource) {
    struct http *h = x->h;
    CHECK(x == current && !exchange_status(x));
    if (exchange_is_disconnected(x)) return false;
    pthread_mutex_lock(&h->lock);
    x->again = h->resumed == x && x->resource == resource;
    x->resource = resource;
    x->postponed = true;
    pthread_mutex_unlock(&h->lock);
    return true;
}

bool exchange_is_behind_postponed(struct exchange *x, const void *resource) {
    struct http *h = x->h;
    pthread_mutex_lock(&h->lock);
    const struct exchange *resumed = h->resumed;
    bool first = resumed == x && x->resource == resource,
         behind = (resumed && resumed != x && resumed->resource == resource) ||
                  postponed_first(h, resource);
    pthread_mutex_unlock(&h->lock);
    return behind && !first;
}

/* Adds a postponed request at the end of the list, or at its begin if the request was the first one
 * that waits for its resource. The caller holds the lock. */
static void postponed_add(struct http *h, struct exchange *x) {
    struct exchange **place = &h->postponed;
    while (!x->again && *place) place = &(*place)->next_postponed;
    x->next_postponed = *place;
    *place = x;
    x->round = x->again ? h->round : 0;
    x->postponed = false;
    headers_clear(x);
}

/* Called after each run of a handler. Returns whether the request is postponed. */
static bool postponed_update(struct exchange *x) {
    struct http *h = x->h;
    bool postponed = x->postponed;
    pthread_mutex_lock(&h->lock);
    bool was_resumed = h->resumed == x;
    if (was_resumed) h->resumed = NULL;
    if (postponed) postponed_add(h, x);
    if (was_resumed) (h->resume_again ? postponed_run : postponed_run_next)(h);
    pthread_mutex_unlock(&h->lock);
    return postponed;
}

/* handlers */

static void route_handle(struct exchange *x) {
    const struct http_callbacks *c = &x->h->c;
    if (c->handle)
        c->handle(c->ctx, x, x->route);
    else
        x->route->handle(c->ctx, x);
}

static void handler_run(void *ctx) {
    struct exchange *x = ctx;
    current = x;
    route_handle(x);
    current = NULL;
    if (postponed_update(x)) return;
    bool large = x->body.len > LARGE_BODY;
    body_release(x); // a reply may take minutes, and the request body can be large
    if (large) memory_trim();
    exchange_release(x);
}

static enum MHD_Result response_queue(struct exchange *x);

/* Runs the handler in the library's thread and sends its answer at once, without suspending the
 * connection. */
static enum MHD_Result handler_run_inline(struct exchange *x) {
    route_handle(x);
    CHECK(exchange_status(x));
    body_release(x);
    return response_queue(x);
}

static enum http_dispatch dispatch_of(const struct exchange *x) {
    const struct http *h = x->h;
    return h->c.dispatch ? h->c.dispatch(h->c.ctx, x->route) : HTTP_DISPATCH_WORKER;
}

/* Adds the request to the queue of its route; the caller holds the lock of http. */
static void handler_enqueue(struct exchange *x) {
    struct http *h = x->h;
    enum http_dispatch work = dispatch_of(x);
    struct worker_pool *pool = work == HTTP_DISPATCH_OWN_THREAD ? &h->own_thread_pool
                               : work == HTTP_DISPATCH_WORKER && x->body.len > LARGE_BODY
                                   ? &h->large_pool
                                   : NULL;
    struct work_queue *to = pool                                ? &pool->queue
                            : work == HTTP_DISPATCH_SLOW_WORKER ? &h->slow_queue
                                                                : &h->queue;
    work_add(to, pool ? &pool->work_ready : &h->work_ready, handler_run, x);
}

static enum MHD_Result on_body_complete(struct exchange *x) {
    struct http *h = x->h;
    if (dispatch_of(x) == HTTP_DISPATCH_IO_THREAD) return handler_run_inline(x);
    pthread_mutex_lock(&x->lock);
    x->handed_over = true;
    __atomic_store_n(&x->phase, PHASE_HANDED_OVER, __ATOMIC_RELEASE);
    x->suspended = true;
    mhd.MHD_suspend_connection(x->connection);
    pthread_mutex_unlock(&x->lock);
    pthread_mutex_lock(&h->lock);
    handler_enqueue(exchange_retain(x));
    pthread_mutex_unlock(&h->lock);
    return MHD_YES;
}

/* Gives the answer to the library. A request whose client disconnects while it is suspended is
 * answered too: the client does not get the answer, but the library ends the request only after an
 * answer. */
static enum MHD_Result response_queue(struct exchange *x) {
    __atomic_store_n(&x->phase, PHASE_SENDING, __ATOMIC_RELEASE);
    enum MHD_Result queued =
        mhd.MHD_queue_response(x->connection, (unsigned)exchange_status(x), x->response);
    mhd.MHD_destroy_response(x->response);
    return queued;
}

static void refuse_with_retry(struct exchange *x, const char *message) {
    exchange_add_header(x, "Retry-After", "1");
    refuse(x, 429, "too_many_at_once", message);
}

static void body_add(struct exchange *x, const char *data, size_t n) {
    struct http *h = x->h;
    int64_t max = h->o->max_held ? h->o->max_held : BODIES_FACTOR * h->o->max_body;
    struct error err;
    if (buf_reserve(&x->body, n, &err) != OK) {
        refuse(x, 503, "overloaded", "the server is short of memory; try again later");
        body_release(x);
        return;
    }
    int64_t total = __atomic_add_fetch(&h->body_bytes, (int64_t)n, __ATOMIC_RELAXED);
    bool fits = x->local || client_limits_acquire(h->limits, x->client, LIMIT_BYTES, (int64_t)n,
                                                  BODIES_FACTOR_PER_CLIENT * h->o->max_body);
    if (fits && !x->local) x->charged_bytes += (int64_t)n;
    buf_add(&x->body, data, n);
    if ((int64_t)x->body.len > h->o->max_body)
        refuse(x, 413, "too_large", "the body is larger than --max-body");
    else if (total > max)
        refuse(x, 503, "overloaded", "too many large requests at once; try again later");
    else if (!fits)
        refuse_with_retry(x, "the bodies of your address's requests are too large at once");
    if (exchange_status(x)) body_release(x);
}

/* Returns false when enough of a refused body has been read. */
static bool body_discard(struct exchange *x, size_t n) {
    x->discarded += (int64_t)n;
    return x->discarded <= DISCARD_FACTOR * x->h->o->max_body;
}

/* Whether to read the body of a refused request. It is not read if the client waits for "100
 * Continue" or announces more than the discard limit. */
static bool should_read_body(const struct exchange *x) {
    const char *length = exchange_header(x, "Content-Length");
    return !exchange_header(x, "Expect") &&
           (!length || strtod(length, NULL) <= (double)(DISCARD_FACTOR * x->h->o->max_body));
}

/* Returns false when the sink accepts no more data. */
static bool sink_write(struct exchange *x, const char *data, size_t n) {
    double now = clock_now();
    __atomic_store(&x->last_read_at, &now, __ATOMIC_RELAXED);
    return x->sink->write(x->sink, data, n) == OK;
}

static enum MHD_Result on_access(void *ctx, struct MHD_Connection *c, const char *url,
                                 const char *method, const char *version, const char *data,
                                 size_t *n, void **con_cls) {
    struct exchange *x = *con_cls;
    if (!x) {
        x = *con_cls = exchange_new(ctx, c, url, method);
        on_headers_complete(x, version);
        return exchange_status(x) && !should_read_body(x) ? response_queue(x) : MHD_YES;
    }
    enum exchange_phase phase = phase_of(x);
    size_t got = *n;
    *n = 0;
    if (phase == PHASE_READING && got > 0 && exchange_status(x))
        return body_discard(x, got) ? MHD_YES : MHD_NO;
    if (phase == PHASE_READING && got > 0 && x->sink)
        return sink_write(x, data, got) ? MHD_YES : MHD_NO;
    if (phase == PHASE_READING && got > 0)
        body_add(x, data, got);
    else if (phase != PHASE_SENDING && exchange_status(x))
        return response_queue(x);
    else if (phase == PHASE_READING)
        return on_body_complete(x);
    return MHD_YES;
}

static void on_completed(void *ctx, struct MHD_Connection *c, void **con_cls,
                         enum MHD_RequestTerminationCode why) {
    struct http *h = ctx;
    struct exchange *x = *con_cls;
    (void)c;
    if (!x) return;
    *con_cls = NULL;
    /* The thread that answered, and the watchdog, may still hold the lock for a moment. */
    pthread_mutex_lock(&x->lock);
    bool unsent = exchange_status(x) && phase_of(x) != PHASE_SENDING, gone = x->disconnected;
    struct MHD_Response *response = x->response;
    struct stream_source source = x->source;
    pthread_mutex_unlock(&x->lock);
    if (!x->handed_over) body_release(x);
    if (unsent) mhd.MHD_destroy_response(response);
    if (source.pull) {
        source.close(source.ctx, why == MHD_REQUEST_TERMINATED_COMPLETED_OK && !gone);
        __atomic_sub_fetch(&h->stats.streams, 1, __ATOMIC_RELAXED);
    }
    h->c.ended(h->c.ctx, x);
    if (x->sink) x->sink->release(x->sink);
    exchange_list_remove(x);
    exchange_release(x);
}

/* The limit per address does not apply to this machine and to trusted proxies, because one proxy
 * connects for many clients. */
static bool is_limited(const struct http *h, const struct ip_address *a) {
    return !ip_address_is_loopback(a) && !ip_address_in_cidrs(a, h->proxies, h->n_proxies);
}

static enum MHD_Result on_accept(void *ctx, const struct sockaddr *from, socklen_t size) {
    const struct http *h = ctx;
    struct ip_address a;
    char client[IP_ADDRESS_TEXT_LEN];
    (void)size;
    if (!ip_address_from_sockaddr(from, &a) || !is_limited(h, &a)) return MHD_YES;
    ip_address_client_key(&a, client);
    return client_limits_has_room(h->limits, client, LIMIT_CONNECTIONS, h->o->max_per_address)
               ? MHD_YES
               : MHD_NO;
}

static void connection_count(struct http *h, struct MHD_Connection *c, struct http_connection *p) {
    const union MHD_ConnectionInfo *info =
        mhd.MHD_get_connection_info(c, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    struct ip_address a;
    if (!info || !ip_address_from_sockaddr(info->client_addr, &a) || !is_limited(h, &a)) return;
    ip_address_client_key(&a, p->client);
    client_limits_acquire(h->limits, p->client, LIMIT_CONNECTIONS, 1, 0);
}

static void on_connection(void *ctx, struct MHD_Connection *c, void **place,
                          enum MHD_ConnectionNotificationCode what) {
    struct http *h = ctx;
    struct http_connection *p = *place;
    pthread_mutex_lock(&h->lock);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            mhd.MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
        p = *place = xcalloc(1, sizeof *p);
        *p = (struct http_connection){
            .next = h->connections, .fd = info->connect_fd, .since = clock_now(), .first = true};
        connection_count(h, c, p);
        if (p->next) p->next->prev = p;
        h->connections = p;
        h->stats.connections++;
        h->stats.open++;
    } else if (p) {
        if (p->prev) p->prev->next = p->next;
        if (p->next) p->next->prev = p->prev;
        if (h->connections == p) h->connections = p->next;
        h->stats.open--;
        if (*p->client) client_limits_release(h->limits, p->client, LIMIT_CONNECTIONS, 1);
        free(p);
        *place = NULL;
    }
    pthread_mutex_unlock(&h->lock);
}

/* The library's unescape callback; it leaves path and query encoded, because paths are compared
 * with the routes first and decoded afterwards. */
static size_t unescape_none(void *ctx, struct MHD_Connection *c, char *s) {
    (void)ctx, (void)c;
    return strlen(s);
}

/* the watchdog */

static double connection_timeout(const struct http *h, const struct http_connection *p) {
    if (!p->x) return h->o->header_seconds + (p->first ? 0 : h->o->idle_seconds);
    return phase_of(p->x) == PHASE_READING ? h->o->body_seconds : 1e30;
}

/* Whether the client reads its reply too slowly, which keeps the reply in memory. */
static bool is_past_deadline(const struct exchange *x, double now) {
    double deadline;
    __atomic_load(&x->deadline, &deadline, __ATOMIC_ACQUIRE);
    return deadline > 0 && now > deadline;
}

static bool client_is_gone(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

/* Called when the client has disconnected, or at shutdown: calls on_disconnect, and wakes a stream
 * so that it ends. */
static void exchange_abandon(struct exchange *x) {
    pthread_mutex_lock(&x->lock);
    bool is_first = !x->disconnected;
    void (*fn)(void *) = is_first && !x->status ? x->on_disconnect : NULL;
    void *ctx = x->on_disconnect_ctx;
    x->disconnected = true;
    x->on_disconnect = NULL;
    if (is_first) wake_locked(x);
    if (fn) fn(ctx); // under the lock, so that no other thread can answer and end meanwhile
    pthread_mutex_unlock(&x->lock);
}

static void stream_ping(struct exchange *x, double now) {
    pthread_mutex_lock(&x->lock);
    if (x->source.idle && x->suspended && now - x->last_out > PING_SECONDS) {
        x->ping_requested = true;
        wake_locked(x);
    }
    pthread_mutex_unlock(&x->lock);
}

/* The state of an exchange that is past its reading phase. */
struct watched_exchange {
    struct exchange *x; /* retained */
    bool disconnected;
};

/* Checks every connection. Writes to `out`, which has room for all exchanges, those that the caller
 * must handle after it releases the lock. Shutting a socket down does not end its connection here;
 * the library ends the connection when it notices. */
static int watchdog_scan(struct http *h, double now, struct watched_exchange *out) {
    int n = 0;
    for (struct http_connection *p = h->connections; p; p = p->next) {
        struct exchange *x = p->x;
        enum exchange_phase phase = x ? phase_of(x) : PHASE_READING;
        double since = p->since;
        if (x) {
            __atomic_load(&x->last_read_at, &since, __ATOMIC_RELAXED);
            since = MAX(since, x->started_at);
        }
        bool late = now - since > connection_timeout(h, p) ||
                    (phase == PHASE_SENDING && is_past_deadline(x, now));
        bool gone = h->quit || (phase != PHASE_READING && client_is_gone(p->fd));
        if (late || (gone && x && phase != PHASE_HANDED_OVER)) shutdown(p->fd, SHUT_RDWR);
        if (phase != PHASE_READING) out[n++] = (struct watched_exchange){exchange_retain(x), gone};
    }
    return n;
}

static void *watchdog_main(void *ctx) {
    struct http *h = ctx;
    struct watched_exchange *seen = NULL;
    pthread_mutex_lock(&h->lock);
    while (!h->quit || h->n_exchanges) {
        double now = clock_now();
        seen = xrealloc(seen, sizeof *seen * (size_t)(h->n_exchanges + 1));
        int n = watchdog_scan(h, now, seen);
        pthread_mutex_unlock(&h->lock);
        for (int i = 0; i < n; i++) {
            if (seen[i].disconnected)
                exchange_abandon(seen[i].x);
            else
                stream_ping(seen[i].x, now);
            exchange_release(seen[i].x);
        }
        http_resume_postponed(h);
        usleep(250000);
        pthread_mutex_lock(&h->lock);
    }
    pthread_mutex_unlock(&h->lock);
    free(seen);
    return NULL;
}

/* calls */

static void headers_copy(const struct http_field *from, struct header **to, int *n) {
    int most = 0;
    while (from && from[most].name) most++;
    *to = xcalloc((size_t)most + 1, sizeof **to);
    for (*n = 0; *n < most; ++*n)
        (*to)[*n] = (struct header){xstrdup(from[*n].name), xstrdup(from[*n].value)};
}

/* The client and the id of a call are those of its parent; without one the client is this process.
 */
static void call_client_set(struct exchange *x, const struct exchange *parent) {
    x->local = !parent || parent->local;
    snprintf(x->peer, sizeof x->peer, "%s", parent ? parent->peer : "::1");
    snprintf(x->client, sizeof x->client, "%s", parent ? parent->client : "");
    if (parent)
        memcpy(x->id, parent->id, sizeof x->id);
    else
        request_id_set(x);
}

struct exchange *http_call_new(struct http *h, const struct http_call *c) {
    struct exchange *x = xcalloc(1, sizeof *x);
    *x = (struct exchange){.refs = 1,
                           .h = h,
                           .method = xstrdup(c->method),
                           .path = xstrdup(c->path),
                           .body = c->body,
                           .call = xcalloc(1, sizeof *x->call),
                           .started_at = clock_now()};
    *x->call = (struct call){.parent = c->parent ? exchange_retain(c->parent) : NULL,
                             .notify = c->notify,
                             .release = c->release,
                             .ctx = c->ctx};
    headers_copy(c->headers, &x->call->headers, &x->call->n_headers);
    headers_copy(c->query, &x->query, &x->n_query);
    pthread_mutex_init(&x->lock, NULL);
    call_client_set(x, c->parent);
    __atomic_add_fetch(&h->body_bytes, (int64_t)x->body.len, __ATOMIC_RELAXED);
    exchange_list_add(x);
    return x;
}

void http_call_start(struct exchange *x) {
    struct http *h = x->h;
    const char *rest;
    bool known;
    exchange_retain(x); // for the handler
    x->route = route_find(h, x->method, x->path, &rest, &known);
    if (x->route && *rest) x->rest = xstrdup(rest);
    if (is_stopping(h))
        refuse(x, 503, "shutting_down", "the server is shutting down; try again soon");
    else if (!x->route)
        refuse(x, 404, "not_found", "there is no such path; docs/API.md lists all");
    else
        h->c.admit(h->c.ctx, x, x->route);
    if (exchange_status(x)) {
        body_release(x);
        exchange_release(x);
        return;
    }
    pthread_mutex_lock(&h->lock);
    handler_enqueue(x);
    pthread_mutex_unlock(&h->lock);
}

enum stream_status http_call_read(struct exchange *x, struct buf *out) {
    if (!exchange_status(x)) return STREAM_WAIT;
    if (x->source.pull)
        return exchange_is_disconnected(x) ? STREAM_END : x->source.pull(x->source.ctx, out);
    buf_add(out, x->out.data, x->out.len);
    buf_release(&x->out);
    return STREAM_END;
}

const char *http_call_type(const struct exchange *x) {
    return x->call->type;
}

const char *http_call_header(const struct exchange *x, const char *name) {
    for (int i = 0; i < x->n_headers; i++)
        if (strcasecmp(x->headers[i].name, name) == 0) return x->headers[i].value;
    return NULL;
}

void *http_call_ctx(const struct exchange *x, void (*notify)(void *ctx)) {
    return x->call && x->call->notify == notify ? x->call->ctx : NULL;
}

void http_call_cancel(struct exchange *x) {
    exchange_abandon(x);
}

void http_call_end(struct exchange *x, bool finished) {
    struct http *h = x->h;
    CHECK(exchange_status(x));
    if (x->source.pull) {
        x->source.close(x->source.ctx, finished && !exchange_is_disconnected(x));
        __atomic_sub_fetch(&h->stats.streams, 1, __ATOMIC_RELAXED);
    }
    h->c.ended(h->c.ctx, x);
    exchange_list_remove(x);
    exchange_release(x);
}

const struct exchange *exchange_parent(const struct exchange *x) {
    return x->call ? x->call->parent : NULL;
}

/* start and stop */

static int address_resolve(const struct http_options *o, struct sockaddr_storage *out,
                           struct error *err) {
    struct addrinfo want = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found;
    char port[16];
    snprintf(port, sizeof port, "%d", (int)o->port);
    int rc = getaddrinfo(o->host, port, &want, &found);
    if (rc != 0)
        return error_set(err, ERR_USAGE, "'%s' is not an address: %s", o->host, gai_strerror(rc));
    memcpy(out, found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    return OK;
}

bool http_is_loopback(const struct http_options *o) {
    struct sockaddr_storage socket = {0};
    struct ip_address a;
    struct error ignored;
    return address_resolve(o, &socket, &ignored) == OK &&
           ip_address_from_sockaddr((struct sockaddr *)&socket, &a) && ip_address_is_loopback(&a);
}

static int proxies_read(const struct http_options *o, struct ip_cidr v[MAX_PROXIES],
                        struct error *err) {
    if (o->proxies.n > MAX_PROXIES)
        return error_set(err, ERR_USAGE, "--trusted-proxy takes at most %d addresses", MAX_PROXIES);
    for (int i = 0; i < o->proxies.n; i++)
        if (ip_cidr_parse(o->proxies.v[i], &v[i], err) != OK)
            return error_wrap(err, "--trusted-proxy");
    return o->proxies.n;
}

int http_options_check(const struct http_options *o, struct error *err) {
    struct ip_cidr v[MAX_PROXIES];
    return MIN(proxies_read(o, v, err), OK);
}

static char *pem_read(const char *path, struct error *err) {
    struct buf b = {0};
    if (file_read(path, 1 << 20, &b, err) == OK) return b.data ? b.data : xstrdup("");
    buf_release(&b);
    return NULL;
}

static int tls_read(struct http *h, struct error *err) {
    if (!h->o->tls_cert != !h->o->tls_key)
        return error_set(err, ERR_USAGE, "TLS requires both --tls-cert and --tls-key");
    if (!h->o->tls_cert) return OK;
    h->cert = pem_read(h->o->tls_cert, err);
    h->key = h->cert ? pem_read(h->o->tls_key, err) : NULL;
    return h->key ? OK : err->code;
}

static void mhd_log_discard(void *ctx, const char *fmt, va_list ap) {
    // The messages are mostly about clients that vanish; the metrics count important events.
    (void)ctx, (void)fmt, (void)ap;
}

static const char TLS_VERSIONS[] = "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2";

/* The library reports whether key and certificate match only when a daemon starts. So this function
 * starts a daemon that does not listen. */
static int tls_pair_check(const struct http *h, struct error *err) {
    struct MHD_Daemon *d = mhd.MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_ERROR_LOG | MHD_USE_TLS | MHD_USE_NO_LISTEN_SOCKET,
        0, NULL, NULL, on_access, NULL, MHD_OPTION_EXTERNAL_LOGGER, mhd_log_discard, NULL,
        MHD_OPTION_HTTPS_MEM_CERT, h->cert, MHD_OPTION_HTTPS_MEM_KEY, h->key,
        MHD_OPTION_HTTPS_PRIORITIES, TLS_VERSIONS, MHD_OPTION_END);
    if (!d)
        return error_set(err, ERR_USAGE, "'%s' and '%s' are not a certificate and its key, in PEM",
                         h->o->tls_cert, h->o->tls_key);
    mhd.MHD_stop_daemon(d);
    return OK;
}

int http_tls_check(const struct http_options *o, struct error *err) {
    struct http h = {.o = o};
    struct stat st;
    int rc = tls_read(&h, err);
    if (rc == OK && h.cert) rc = mhd_load(err);
    if (rc == OK && h.cert) rc = tls_pair_check(&h, err);
    if (rc == OK && h.key && stat(o->tls_key, &st) == 0 && (st.st_mode & S_IROTH))
        log_warn("others can read the key '%s': chmod 600 it", o->tls_key);
    free(h.cert);
    free(h.key);
    return rc;
}

static int daemon_start(struct http *h, struct error *err) {
    struct sockaddr_storage address = {0};
    if (mhd_load(err) != OK || address_resolve(h->o, &address, err) != OK || tls_read(h, err) != OK)
        return err->code;
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    struct MHD_OptionItem tls[] = {
        {MHD_OPTION_HTTPS_MEM_CERT, 0, h->cert},
        {MHD_OPTION_HTTPS_MEM_KEY, 0, h->key},
        {MHD_OPTION_HTTPS_PRIORITIES, 0, (void *)(uintptr_t)TLS_VERSIONS},
        {MHD_OPTION_END, 0, NULL}};
    if (address.ss_family == AF_INET6) flags |= MHD_USE_IPv6;
    if (h->cert) flags |= MHD_USE_TLS;
    errno = 0;
    h->daemon = mhd.MHD_start_daemon(
        flags, 0, on_accept, h, on_access, h, MHD_OPTION_EXTERNAL_LOGGER, mhd_log_discard, NULL,
        MHD_OPTION_SOCK_ADDR, &address, MHD_OPTION_THREAD_POOL_SIZE, 2u,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)h->o->max_connections,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)HEADER_BYTES, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)h->o->idle_seconds, MHD_OPTION_NOTIFY_COMPLETED, on_completed, h,
        MHD_OPTION_NOTIFY_CONNECTION, on_connection, h, MHD_OPTION_UNESCAPE_CALLBACK, unescape_none,
        NULL, MHD_OPTION_ARRAY, h->cert ? tls : tls + 3, MHD_OPTION_END);
    if (h->daemon) return OK;
    return error_set(err, ERR_USAGE, "cannot listen on %s port %d%s: %s; another --port may do",
                     h->o->host, (int)h->o->port, h->cert ? " with this certificate and key" : "",
                     errno ? strerror(errno) : "refused");
}

static void http_init(struct http *h) {
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->work_ready, NULL);
    pthread_cond_init(&h->own_thread_pool.work_ready, NULL);
    pthread_cond_init(&h->large_pool.work_ready, NULL);
    pthread_cond_init(&h->ended, NULL);
    h->limits = client_limits_new();
    if (gethostname(h->machine, sizeof h->machine - 1) != 0) h->machine[0] = 0;
}

struct http *http_new(const struct http_options *o, const struct http_callbacks *c,
                      struct error *err) {
    struct http *h = xcalloc(1, sizeof *h);
    translations_close(); // errors in replies are English
    *h = (struct http){.o = o, .c = *c};
    http_init(h);
    h->n_proxies = proxies_read(o, h->proxies, err);
    if (c->self) *c->self = h;
    if (h->n_proxies < 0 || (!o->calls_only && daemon_start(h, err) != OK)) {
        if (c->self) *c->self = NULL;
        http_free(h);
        return NULL;
    }
    if (h->daemon) h->port = mhd.MHD_get_daemon_info(h->daemon, MHD_DAEMON_INFO_BIND_PORT)->port;
    h->workers = xcalloc((size_t)c->workers, sizeof *h->workers);
    for (; h->n_workers < c->workers; h->n_workers++)
        CHECK(pthread_create(&h->workers[h->n_workers], NULL, worker_main, h) == 0);
    worker_pool_start(h, &h->own_thread_pool, 1, 0);
    worker_pool_start(h, &h->large_pool, LARGE_THREADS, LARGE_NICE);
    h->has_watchdog = pthread_create(&h->watchdog, NULL, watchdog_main, h) == 0;
    CHECK(h->has_watchdog);
    return h;
}

int http_port(const struct http *h) {
    return h->port;
}

struct http_stats http_stats(struct http *h) {
    pthread_mutex_lock(&h->lock);
    struct http_stats s = {.connections = h->stats.connections,
                           .requests = h->stats.requests,
                           .open = h->stats.open,
                           .streams = __atomic_load_n(&h->stats.streams, __ATOMIC_RELAXED),
                           .bytes_out = __atomic_load_n(&h->stats.bytes_out, __ATOMIC_RELAXED)};
    pthread_mutex_unlock(&h->lock);
    return s;
}

struct client_limits *http_limits(struct http *h) {
    return h->limits;
}

static void exchanges_wait(struct http *h, double seconds) {
    double end = clock_now() + seconds;
    while (h->n_exchanges && condition_wait_until(&h->ended, &h->lock, end)) continue;
}

void http_drain(struct http *h) {
    MHD_socket listening = h->daemon ? mhd.MHD_quiesce_daemon(h->daemon) : MHD_INVALID_SOCKET;
    if (listening != MHD_INVALID_SOCKET) close(listening);
    pthread_mutex_lock(&h->lock);
    __atomic_store_n(&h->stopping, true, __ATOMIC_RELEASE);
    exchanges_wait(h, h->o->drain_seconds);
    pthread_mutex_unlock(&h->lock);
}

/* Workers are joined last, because they answer all requests in progress, also those whose clients
 * are disconnected here. */
void http_free(struct http *h) {
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    __atomic_store_n(&h->stopping, true, __ATOMIC_RELEASE);
    h->quit = true;
    pthread_mutex_unlock(&h->lock);
    if (h->has_watchdog)
        pthread_join(h->watchdog, NULL); // after the last exchange that was handed over
    if (h->daemon) mhd.MHD_stop_daemon(h->daemon);
    pthread_mutex_lock(&h->lock);
    h->finished = true;
    pthread_cond_broadcast(&h->work_ready);
    pthread_cond_broadcast(&h->own_thread_pool.work_ready);
    pthread_cond_broadcast(&h->large_pool.work_ready);
    pthread_mutex_unlock(&h->lock);
    for (int i = 0; i < h->n_workers; i++) pthread_join(h->workers[i], NULL);
    worker_pool_join(&h->own_thread_pool);
    worker_pool_join(&h->large_pool);
    client_limits_free(h->limits);
    free(h->workers);
    free(h->cert);
    free(h->key);
    free(h);
}

/* options */

#define ROW(name, type, field, fallback, min, max, metavar, help)                                  \
    { name, type, offsetof(struct http_options, field), fallback, min, max, metavar, help }

const struct option_row http_option_rows[] = {
    ROW("host", OPT_STRING, host, "127.0.0.1", 0, 0, "ADDRESS",
        "address to listen on; other machines need keys, or --no-auth"),
    ROW("port", OPT_INT, port, "8000", 0, 65535, "N", "port; 0: any that is free"),
    ROW("tls-cert", OPT_STRING, tls_cert, NULL, 0, 0, "FILE", "certificate (PEM): serve HTTPS"),
    ROW("tls-key", OPT_STRING, tls_key, NULL, 0, 0, "FILE", "key of the certificate (PEM)"),
    ROW("cors", OPT_LIST, cors, NULL, 0, 0, "ORIGIN",
        "origins whose pages may call from a browser, as https://example.org; '*': all, where the "
        "server has keys"),
    ROW("allowed-host", OPT_LIST, hosts, NULL, 0, 0, "NAME",
        "names of this server that requests may have in Host while there are no keys, in addition "
        "to IP addresses, localhost, the machine's name and --host"),
    ROW("trusted-proxy", OPT_LIST, proxies, NULL, 0, 0, "ADDRESS",
        "addresses, or ADDRESS/BITS, of proxies whose X-Forwarded-For names the client"),
    ROW("max-body", OPT_INT, max_body, "33554432", 1024, 1e12, "BYTES", "largest request body"),
    ROW("max-connections", OPT_INT, max_connections, "4096", 1, 1e6, "N", "clients at once"),
    ROW("max-connections-per-address", OPT_INT, max_per_address, "512", 0, 1e6, "N",
        "connections of one address, except this machine's and trusted proxies' (0: no limit)"),
    ROW("header-seconds", OPT_FLOAT, header_seconds, "20", 0.1, 1e6, "S",
        "time for a request's line and headers"),
    ROW("body-seconds", OPT_FLOAT, body_seconds, "120", 0.1, 1e6, "S",
        "time for a whole request body"),
    ROW("idle-seconds", OPT_FLOAT, idle_seconds, "75", 1, 1e6, "S",
        "time that a connection may be silent between requests"),
    ROW("drain-seconds", OPT_FLOAT, drain_seconds, "30", 0, 1e6, "S",
        "time for unfinished replies at shutdown"),
    {0},
};
