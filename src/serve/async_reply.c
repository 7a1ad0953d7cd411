/*
 * async_reply: a thread, its events, and the stream that reads them.
 *
 * Invariants: the lock guards `out` and `done`; only the thread (or the starting thread, if no
 * thread could be created) appends to `out` and sets `done`, and only the stream removes from
 * `out`. The stream sends the remaining events before it ends.
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
    int refs; /* the thread holds one, the stream holds one */

    pthread_mutex_t lock;
    struct buf out; /* events not sent yet */
    bool done;
};

static void async_reply_release(struct async_reply *l) {
    if (__atomic_sub_fetch(&l->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    exchange_release(l->x);
    pthread_mutex_destroy(&l->lock);
    buf_release(&l->out);
    free(l->key);
    free(l);
}

static void async_reply_cancel(void *ctx) {
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

/* Floats have 17 digits, as in a reply without a stream. */
static void event_append(struct async_reply *l, const char *event, json_t *v, bool done) {
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
        event_append(l, event, v, false);
    else
        json_decref(v);
}

static enum stream_status async_reply_pull(void *ctx, struct buf *out) {
    struct async_reply *l = ctx;
    pthread_mutex_lock(&l->lock);
    buf_add(out, l->out.data, l->out.len);
    l->out.len = 0;
    bool done = l->done;
    pthread_mutex_unlock(&l->lock);
    return done ? STREAM_END : out->len ? STREAM_MORE : STREAM_WAIT;
}

static void async_reply_close(void *ctx, bool finished) {
    struct async_reply *l = ctx;
    if (!finished) async_reply_cancel(l);
    async_reply_release(l);
}

/* the thread */

static void async_reply_finish(struct async_reply *l, json_t *result, const struct error *err) {
    if (l->stream)
        event_append(l, result ? "result" : "error", result ? result : api_error_json(err, false),
                     true);
    else if (result)
        exchange_reply_json(l->x, 200, result);
    else
        api_fail_error(l->x, err, NULL);
}

static void *async_reply_thread(void *ctx) {
    struct async_reply *l = ctx;
    struct server *s = l->s;
    struct error err;
    json_t *result = l->work.run(l, l->work.ctx, &err);
    l->work.release(l->work.ctx);
    if (__atomic_load_n(&l->stop, __ATOMIC_ACQUIRE))
        metric_add(metric_get(s->metrics, METRIC_CANCELLED), 1);
    async_reply_finish(l, result, &err);
    async_reply_release(l);
    async_slot_release(s);
    return NULL;
}

/* Replies with an error because the thread could not be created. */
static void async_reply_thread_failed(struct async_reply *l) {
    struct server *s = l->s;
    struct error err;
    error_set(&err, ERR_MEMORY, "the server is short of memory; try again later");
    l->work.release(l->work.ctx);
    async_reply_finish(l, NULL, &err);
    async_reply_release(l);
    async_slot_release(s);
}

void async_reply_start(struct server *s, struct exchange *x, bool stream,
                       const struct async_reply_work *w) {
    pthread_t thread;
    if (!async_slot_acquire(s, x)) {
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
    struct stream_source source = {async_reply_pull, async_reply_close, l, ": thinking\n\n"};
    if (stream)
        exchange_stream(x, 200, "text/event-stream", &source);
    else
        exchange_on_disconnect(x, async_reply_cancel, l);
    if (pthread_create(&thread, NULL, async_reply_thread, l) == 0)
        pthread_detach(thread);
    else
        async_reply_thread_failed(l);
}
