/*
 * live: a thread, what it tells, and who reads that.
 *
 * Invariants: `out` and `done` are under the lock; the thread alone writes them, a stream alone
 * takes from them. What is left when the work is over is read before the stream ends.
 */
#define _GNU_SOURCE
#include "serve/live.h"

#include "ops/metrics.h"

#include <stdlib.h>
#include <string.h>

struct live {
    struct server *s;
    struct exchange *x;
    struct live_work work;
    char *key; /* who asked; NULL: nobody in particular */
    bool stream, stop;
    int refs; /* the thread's, and the stream's */

    pthread_mutex_t lock;
    struct buf out; /* events that are not sent yet */
    bool done;
};

static void live_release(struct live *l) {
    if (__atomic_sub_fetch(&l->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    exchange_release(l->x);
    pthread_mutex_destroy(&l->lock);
    buf_release(&l->out);
    free(l->key);
    free(l);
}

static void live_cancel(void *ctx) {
    struct live *l = ctx;
    __atomic_store_n(&l->stop, true, __ATOMIC_RELEASE);
}

const bool *live_stop(const struct live *l) {
    return &l->stop;
}

void live_spent(struct live *l, const struct usage *u) {
    counted_tokens(l->s, l->key, u);
}

/* what is told */

/* With all digits, as in a reply. */
static void event_put(struct live *l, const char *event, json_t *v, bool done) {
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

void live_tell(struct live *l, const char *event, json_t *v) {
    if (l->stream)
        event_put(l, event, v, false);
    else
        json_decref(v);
}

static enum pulled live_pull(void *ctx, struct buf *out) {
    struct live *l = ctx;
    pthread_mutex_lock(&l->lock);
    buf_add(out, l->out.data, l->out.len);
    l->out.len = 0;
    bool done = l->done;
    pthread_mutex_unlock(&l->lock);
    return done ? PULL_END : out->len ? PULL_MORE : PULL_WAIT;
}

static void live_close(void *ctx, bool finished) {
    struct live *l = ctx;
    if (!finished) live_cancel(l);
    live_release(l);
}

/* the thread */

static void live_end(struct live *l, json_t *result, const struct error *err) {
    if (l->stream)
        event_put(l, result ? "result" : "error", result ? result : api_error_json(err, false),
                  true);
    else if (result)
        exchange_reply_json(l->x, 200, result);
    else
        api_fail_error(l->x, err, NULL);
}

static void *live_thread(void *ctx) {
    struct live *l = ctx;
    struct server *s = l->s;
    struct error err;
    json_t *result = l->work.run(l, l->work.ctx, &err);
    l->work.release(l->work.ctx);
    if (__atomic_load_n(&l->stop, __ATOMIC_ACQUIRE))
        metric_add(metric_get(s->metrics, METRIC_CANCELLED), 1);
    live_end(l, result, &err);
    live_release(l);
    __atomic_sub_fetch(&s->n_outside, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* There is no memory for a thread. */
static void live_thread_refused(struct live *l) {
    struct server *s = l->s;
    struct error err;
    error_set(&err, ERR_MEMORY, "the server is short of memory; try again later");
    l->work.release(l->work.ctx);
    live_end(l, NULL, &err);
    live_release(l);
    __atomic_sub_fetch(&s->n_outside, 1, __ATOMIC_RELEASE);
}

void live_start(struct server *s, struct exchange *x, bool stream, const struct live_work *w) {
    pthread_t thread;
    if (__atomic_add_fetch(&s->n_outside, 1, __ATOMIC_ACQUIRE) > OUTSIDE_MAX) {
        __atomic_sub_fetch(&s->n_outside, 1, __ATOMIC_RELEASE);
        exchange_add_header(x, "Retry-After", "2");
        api_fail(x, 503, NULL, NULL, "overloaded", "%d teams talk already; try again later",
                 OUTSIDE_MAX);
        w->release(w->ctx);
        return;
    }
    struct live *l = xcalloc(1, sizeof *l);
    const char *key = exchange_key(x);
    *l = (struct live){.s = s,
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
        exchange_on_gone(x, live_cancel, l);
    if (pthread_create(&thread, NULL, live_thread, l) == 0)
        pthread_detach(thread);
    else
        live_thread_refused(l);
}
