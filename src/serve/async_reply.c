/*
 * async_reply: a thread, its events, and the stream that reads them.
 *
 * Invariants: `out` and `done` are under the lock; only the thread writes them, only a stream takes
 * from them. The stream reads the remaining events after the work is done, before it ends.
 */
#define _GNU_SOURCE
#include "serve/async_reply.h"

#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

struct async_reply {
    struct server *s;
    struct exchange *x;
    struct async_reply_work work;
    char *key; /* the id of the request's key; NULL: no key */
    bool stream, stop;
    int refs; /* one of the thread, one of the stream */

    pthread_mutex_t lock;
    struct buf out; /* events not sent yet */
    bool done;
};

static void live_release(struct async_reply *l) {
    if (__atomic_sub_fetch(&l->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    exchange_release(l->x);
    pthread_mutex_destroy(&l->lock);
    buf_release(&l->out);
    free(l->key);
    free(l);
}

static void live_cancel(void *ctx) {
    struct async_reply *l = ctx;
    __atomic_store_n(&l->stop, true, __ATOMIC_RELEASE);
}

const bool *async_reply_stop_flag(const struct async_reply *l) {
    return &l->stop;
}

void async_reply_add_usage(struct async_reply *l, const struct token_usage *u) {
    request_metrics_add_tokens(l->s, l->key, u);
}

/* events */

/* Reals have all digits, as in a reply. */
static void event_put(struct async_reply *l, const char *event, json_t *v, bool done) {
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(17));
    CHECK(text != NULL);
    json_decref(v);
    pthread_mutex_lock(&l->lock);
    buf_printf(&l->out, "event: %s\ndata: %s\n\n", event, text);
    free(text);
    if (done) buf_puts(&l->out, "data: [DONE]\n\n");
    l->done = done;
    pthread_mutex_unlock(&l->lock);
    exchange_wake(l->x);
}

void async_reply_event(struct async_reply *l, const char *event, json_t *v) {
    if (l->stream)
        event_put(l, event, v, false);
    else
        json_decref(v);
}

static enum stream_status live_pull(void *ctx, struct buf *out) {
    struct async_reply *l = ctx;
    pthread_mutex_lock(&l->lock);
    buf_add(out, l->out.data, l->out.len);
    l->out.len = 0;
    bool done = l->done;
    pthread_mutex_unlock(&l->lock);
    return done ? STREAM_END : out->len ? STREAM_MORE : STREAM_WAIT;
}

static void live_close(void *ctx, bool finished) {
    struct async_reply *l = ctx;
    if (!finished) live_cancel(l);
    live_release(l);
}

/* the thread */

static void live_end(struct async_reply *l, json_t *result, const struct error *err) {
    if (l->stream)
        event_put(l, result ? "result" : "error", result ? result : api_error_json(err, false),
                  true);
    else if (result)
        exchange_reply_json(l->x, 200, result);
    else
        api_fail_error(l->x, err, NULL);
}

static void *live_thread(void *ctx) {
    struct async_reply *l = ctx;
    struct server *s = l->s;
    struct error err;
    json_t *result = l->work.run(l, l->work.ctx, &err);
    l->work.release(l->work.ctx);
    if (__atomic_load_n(&l->stop, __ATOMIC_ACQUIRE))
        metric_add(metric_get(s->metrics, METRIC_CANCELLED), 1);
    live_end(l, result, &err);
    live_release(l);
    __atomic_sub_fetch(&s->n_async_threads, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* No thread could be created. */
static void live_thread_refused(struct async_reply *l) {
    struct server *s = l->s;
    struct error err;
    error_set(&err, ERR_MEMORY, "the server is short of memory; try again later");
    l->work.release(l->work.ctx);
    live_end(l, NULL, &err);
    live_release(l);
    __atomic_sub_fetch(&s->n_async_threads, 1, __ATOMIC_RELEASE);
}

void async_reply_start(struct server *s, struct exchange *x, bool stream,
                       const struct async_reply_work *w) {
    pthread_t thread;
    if (__atomic_add_fetch(&s->n_async_threads, 1, __ATOMIC_ACQUIRE) > ASYNC_WORKERS_MAX) {
        __atomic_sub_fetch(&s->n_async_threads, 1, __ATOMIC_RELEASE);
        exchange_add_header(x, "Retry-After", "2");
        api_fail(x, 503, NULL, NULL, "overloaded", "%d teams talk already; try again later",
                 ASYNC_WORKERS_MAX);
        w->release(w->ctx);
        return;
    }
    struct async_reply *l = xcalloc(1, sizeof *l);
    const char *key = exchange_key_id(x);
    *l = (struct async_reply){.s = s,
                              .x = exchange_retain(x),
                              .work = *w,
                              .key = key ? xstrdup(key) : NULL,
                              .stream = stream,
                              .refs = stream ? 2 : 1};
    pthread_mutex_init(&l->lock, NULL);
    struct stream_source source = {live_pull, live_close, l, ": thinking\n\n"};
    if (stream)
        exchange_stream(x, 200, "text/event-stream", &source);
    else
        exchange_on_disconnect(x, live_cancel, l);
    if (pthread_create(&thread, NULL, live_thread, l) == 0)
        pthread_detach(thread);
    else
        live_thread_refused(l);
}
