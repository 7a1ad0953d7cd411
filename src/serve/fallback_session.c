/*
 * fallback_session: one request to a chain, which goes from link to link until one answers.
 *
 *   request x ── session ──▶ attempt: a call `part` with the model of link 1 ── failed
 *                       └──▶ attempt: a call `part` with the model of link 2 ──▶ its reply is x's
 *
 * A thread per session waits for the replies. A link has answered when a whole reply or the first
 * part of a stream has arrived (a stream of a call sends nothing before its first token, see
 * stream_pull). From then on no other link can take over, because x's client has bytes already; a
 * failure ends the stream with an error event.
 *
 * A link has failed if its status is not 2xx, or its stream begins with an error, or its time is
 * over. A request that the link refuses as wrong is not passed on: x gets that refusal. Only a
 * prompt that is too long for the link goes to the next one.
 *
 * Invariants. 1. Only the session's thread starts, reads and cancels attempts, and answers x. 2. A
 * call is ended exactly once (`ended`): by the thread, or if it was cancelled before its answer, by
 * the thread that answers it. 3. No lock is held while a function of an exchange is called.
 */
#define _GNU_SOURCE
#include "serve/fallback.h"
#include "serve/request_fields.h"

#include <stdlib.h>
#include <string.h>

enum {
    OUT_MOST = 64 << 10,       /* bytes of a stream that its client has not taken */
    WHY_LEN = 1024,            /* bytes of a failure's message */
    SESSION_BYTES = 256 << 10, /* reserved for a session, with OUT_MOST and one part more */
};

struct session {
    struct server *s;
    struct exchange *x; /* retained */
    struct fallback_chain *c;
    json_t *body;    /* the request's body */
    json_t *failed;  /* [{link, error}] */
    double deadline; /* clock_now */
    int refs;        /* the thread, the stream of x and each attempt hold one */

    pthread_mutex_t lock; /* protects the following fields */
    pthread_cond_t news;
    bool woken, stop; /* woken: the part has news. stop: x's client disconnected */
    struct buf out;   /* bytes for the stream of x */
    bool done;        /* nothing will be added to `out` */
};
struct fallback_attempt {
    struct session *d; /* retained */
    struct fallback_link *link;
    enum link_permit permit;
    struct exchange *part;
    atomic_bool cancelled, ended, blamed;
};

static void session_release(struct session *d) {
    if (__atomic_sub_fetch(&d->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    struct fallbacks *all = d->s->fallbacks;
    exchange_release(d->x);
    pthread_cond_destroy(&d->news);
    pthread_mutex_destroy(&d->lock);
    buf_release(&d->out);
    json_decref(d->body);
    json_decref(d->failed);
    free(d);
    __atomic_sub_fetch(&all->n_sessions, 1, __ATOMIC_RELEASE); // the server waits for it: last
}

static void session_wake(struct session *d) {
    pthread_mutex_lock(&d->lock);
    d->woken = true;
    pthread_cond_signal(&d->news);
    pthread_mutex_unlock(&d->lock);
}

/* The client of x has disconnected. */
static void session_stop(void *ctx) {
    struct session *d = ctx;
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    pthread_cond_signal(&d->news);
    pthread_mutex_unlock(&d->lock);
}

static bool is_stopped(struct session *d) {
    pthread_mutex_lock(&d->lock);
    bool stop = d->stop;
    pthread_mutex_unlock(&d->lock);
    return stop;
}

/* Waits until the part has news. False: at the time `end`, or when the client has
 * disconnected. */
static bool session_wait(struct session *d, double end) {
    pthread_mutex_lock(&d->lock);
    while (!d->woken && !d->stop && condition_wait_until(&d->news, &d->lock, end)) continue;
    bool woken = d->woken && !d->stop;
    d->woken = false;
    pthread_mutex_unlock(&d->lock);
    return woken;
}

/* attempts */

static void attempt_try_end(struct fallback_attempt *a) {
    if (exchange_status(a->part) && !atomic_exchange(&a->ended, true))
        http_call_end(a->part, false);
}

static void attempt_notify(void *ctx) {
    struct fallback_attempt *a = ctx;
    if (atomic_load(&a->cancelled))
        attempt_try_end(a);
    else
        session_wake(a->d);
}

static void attempt_release(void *ctx) {
    struct fallback_attempt *a = ctx;
    session_release(a->d);
    free(a);
}

struct fallback_attempt *fallback_attempt_of(const struct exchange *x) {
    return http_call_ctx(x, attempt_notify);
}

bool fallback_is_part(const struct exchange *x) {
    return fallback_attempt_of(x) != NULL;
}

const struct fallback_link *fallback_attempt_link(const struct fallback_attempt *a) {
    return a->link;
}

const atomic_bool *fallback_attempt_cancelled(const struct fallback_attempt *a) {
    return &a->cancelled;
}

void fallback_attempt_blame(struct fallback_attempt *a) {
    atomic_store(&a->blamed, true);
}

/* Starts a call for the link. The caller has a reference to its part, and so to the attempt. A link
 * that is not of this server is read with the settings of the default base. */
static struct fallback_attempt *attempt_start(struct session *d, struct fallback_link *l,
                                              enum link_permit permit) {
    struct fallback_attempt *a = xcalloc(1, sizeof *a);
    bool is_local = !l->remote && !l->settings->reply;
    json_object_set_new(d->body, "model", json_string(is_local ? l->settings->model : d->s->name));
    char *text = json_dumps(d->body, JSON_COMPACT | JSON_REAL_PRECISION(17));
    CHECK(text);
    size_t n = strlen(text);
    *a = (struct fallback_attempt){.d = d, .link = l, .permit = permit};
    __atomic_add_fetch(&d->refs, 1, __ATOMIC_RELAXED);
    a->part = http_call_new(d->s->http, &(struct http_call){.method = "POST",
                                                            .path = exchange_path(d->x),
                                                            .parent = d->x,
                                                            .body = {text, n, n + 1},
                                                            .notify = attempt_notify,
                                                            .release = attempt_release,
                                                            .ctx = a});
    exchange_retain(a->part);
    http_call_start(a->part);
    return a;
}

/* As if the client of the part had disconnected. A part that is not answered yet is ended by the
 * thread that answers it. */
static void attempt_cancel(struct fallback_attempt *a) {
    struct exchange *part = a->part;
    bool ends = exchange_status(part) && !atomic_exchange(&a->ended, true);
    atomic_store(&a->cancelled, true);
    http_call_cancel(part);
    if (ends)
        http_call_end(part, false);
    else
        attempt_try_end(a);
    exchange_release(part); // may free a
}

/* Ends an attempt whose part was answered. finished: the reply was read to its end. */
static void attempt_end(struct fallback_attempt *a, bool finished) {
    struct exchange *part = a->part;
    if (!finished) {
        attempt_cancel(a);
        return;
    }
    atomic_store(&a->ended, true);
    http_call_end(part, true);
    exchange_release(part); // may free a
}

/* replies of links */

/* The reply of a link so far. */
struct link_reply {
    int status;       /* 0: nothing */
    const char *type; /* borrowed from the part */
    struct buf bytes; /* a whole reply, or the first events of a stream */
    bool ended;       /* nothing follows */
};

static bool is_type(const struct link_reply *r, const char *type) {
    return r->type && strncmp(r->type, type, strlen(type)) == 0;
}

static bool is_stream(const struct link_reply *r) {
    return is_type(r, "text/event-stream") || is_type(r, "application/x-ndjson");
}

/* The first JSON object of a reply: [*from, *to) of its bytes. */
static bool object_find(const struct link_reply *r, size_t *from, size_t *to) {
    const char *text = r->bytes.data ? r->bytes.data : "",
               *at = is_type(r, "text/event-stream") ? strstr(text, "data: {") : text;
    if (!at) return false;
    *from = (size_t)(strchrnul(at, '{') - text);
    const char *end = is_stream(r) ? strchr(text + *from, '\n') : NULL;
    *to = end ? (size_t)(end - text) : r->bytes.len;
    return text[*from] == '{';
}

static json_t *object_parse(const struct link_reply *r, size_t *from, size_t *to) {
    if (!object_find(r, from, to)) return NULL;
    // a model can generate U+0000, which requests must not contain
    return json_loadb(r->bytes.data + *from, *to - *from, JSON_ALLOW_NUL, NULL);
}

/* The error of a reply, {"error": {message, code}} or {"error": message}; "": none. */
static void error_read(const struct link_reply *r, char text[WHY_LEN], bool *is_too_long) {
    size_t from, to;
    json_t *v = object_parse(r, &from, &to);
    const json_t *error = json_object_get(v, "error");
    const char *message =
        json_is_object(error) ? json_get_string(error, "message") : json_string_value(error);
    snprintf(text, WHY_LEN, "%s", message ? message : "");
    *is_too_long = strcmp(json_get_string(error, "code"), "context_length_exceeded") == 0;
    json_decref(v);
}

static bool begins_with_error(const struct link_reply *r) {
    size_t from, to;
    static const char error[] = "{\"error\":";
    return is_stream(r) && object_find(r, &from, &to) &&
           strncmp(r->bytes.data + from, error, strlen(error)) == 0;
}

/* Waits until a link has sent a reply or the beginning of a stream. False: the time `end`
 * has passed, or the client has disconnected. */
static bool reply_wait(struct fallback_attempt *a, double end, struct link_reply *r) {
    for (;;) {
        enum stream_status status = http_call_read(a->part, &r->bytes);
        r->ended = status == STREAM_END;
        if (r->ended || r->bytes.len) break;
        if (!session_wait(a->d, end)) return false;
    }
    r->status = exchange_status(a->part);
    r->type = http_call_type(a->part);
    return true;
}

/* Adds {"shoal": {"fallback": …}} to the first object of the reply. Without memory for it, the
 * reply is not changed. */
static void reply_annotate(struct session *d, const struct fallback_link *l, struct link_reply *r) {
    size_t from, to, bytes = json_parse_memory(r->bytes.data, r->bytes.len) + 4 * r->bytes.len;
    struct error err;
    json_t *v;
    if (request_memory_reserve(d->s, d->x, bytes, &err) != OK || !(v = object_parse(r, &from, &to)))
        return;
    json_object_set_new(reply_extension(v), "fallback",
                        json_pack("{s:s,s:s,s:O}", "model", d->c->name, "link", l->settings->name,
                                  "failed", d->failed));
    // the precisions of the writers, so that numbers keep their digits
    char *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(is_stream(r) ? 9 : 17));
    CHECK(text);
    struct buf out = {0};
    buf_add(&out, r->bytes.data, from);
    buf_puts(&out, text);
    buf_add(&out, r->bytes.data + to, r->bytes.len - to);
    buf_release(&r->bytes);
    r->bytes = out;
    free(text);
    json_decref(v);
}

/* the reply of x */

static void failure_add(struct session *d, struct fallback_link *l, const char *why) {
    json_array_append_new(d->failed, json_pack("{s:s,s:o}", "link", l->settings->name, "error",
                                               json_string_lossy(why, strlen(why))));
    metric_add(l->failures, 1);
}

static void headers_set(struct session *d, const struct fallback_attempt *a) {
    static const char *const passed[] = {"X-Shoal-Reply", "X-Shoal-AB"};
    for (size_t i = 0; i < ARRAY_LEN(passed); i++) {
        const char *value = http_call_header(a->part, passed[i]);
        if (value) exchange_add_header(d->x, passed[i], value);
    }
    exchange_add_header(d->x, "X-Shoal-Link", a->link->settings->name);
}

static enum stream_status out_pull(void *ctx, struct buf *out) {
    struct session *d = ctx;
    pthread_mutex_lock(&d->lock);
    buf_add(out, d->out.data, d->out.len);
    d->out.len = 0;
    bool done = d->done;
    pthread_cond_signal(&d->news);
    pthread_mutex_unlock(&d->lock);
    return done ? STREAM_END : out->len ? STREAM_MORE : STREAM_WAIT;
}

static void out_close(void *ctx, bool finished) {
    if (!finished) session_stop(ctx);
    session_release(ctx);
}

/* Adds bytes to the stream of x, and waits while its client has to take the earlier ones. */
static void out_add(struct session *d, struct buf *bytes, bool done) {
    pthread_mutex_lock(&d->lock);
    while (d->out.len > OUT_MOST && !d->stop &&
           condition_wait_until(&d->news, &d->lock, d->deadline))
        continue;
    buf_add(&d->out, bytes->data, bytes->len);
    d->done = done;
    pthread_mutex_unlock(&d->lock);
    bytes->len = 0;
    exchange_wake(d->x);
}

/* Ends the stream of x with an error in the form of its API. */
static void out_fail(struct session *d, const struct link_reply *r, const struct error *err) {
    bool events = is_type(r, "text/event-stream");
    struct buf event = {0};
    (events ? sse_add : ndjson_add)(NULL, api_error_json(err, !events), &event);
    out_add(d, &event, true);
    buf_release(&event);
}

/* Passes a stream on until it ends. ERR_STATE: its time is over. */
static int stream_pass(struct fallback_attempt *a, struct link_reply *r, struct error *err) {
    struct session *d = a->d;
    double last;
    out_add(d, &r->bytes, r->ended);
    for (last = clock_now(); !r->ended && clock_now() < d->deadline;) {
        r->ended = http_call_read(a->part, &r->bytes) == STREAM_END;
        if (r->ended || r->bytes.len) {
            out_add(d, &r->bytes, r->ended);
            last = clock_now(); // the time in which the client takes its bytes is not the link's
        } else if (!session_wait(d, MIN(last + a->link->settings->timeout, d->deadline))) {
            break;
        }
    }
    if (r->ended || is_stopped(d)) return OK;
    return error_set(err, ERR_STATE, "the reply has taken too long; the text so far is incomplete");
}

/* attempts of a session */

/* Answers x with the stream of a link. */
static void stream_answer(struct fallback_attempt *a, struct link_reply *r) {
    struct session *d = a->d;
    struct fallback_link *l = a->link;
    struct error err;
    bool events = is_type(r, "text/event-stream");
    const struct stream_source source = {out_pull, out_close, d, events ? ": waiting\n\n" : NULL};
    __atomic_add_fetch(&d->refs, 1, __ATOMIC_RELAXED);
    exchange_stream(d->x, 200, r->type, &source);
    if (stream_pass(a, r, &err) != OK) {
        // the time of the chain also ends a stream whose client reads slowly
        if (clock_now() < d->deadline) fallback_attempt_blame(a);
        out_fail(d, r, &err);
    }
    if (atomic_load(&a->blamed)) {
        fallback_link_report(l, LINK_ADMITTED, LINK_FAILED, "a stream broke off");
        metric_add(l->failures, 1);
    }
    attempt_end(a, r->ended);
}

/* Answers x with a whole reply, or with the refusal of a wrong request. */
static void whole_answer(struct fallback_attempt *a, struct link_reply *r) {
    struct session *d = a->d;
    memory_budget_transfer(d->s->memory, a->part, d->x, SIZE_MAX);
    exchange_reply_buf(d->x, r->status, r->type, &r->bytes);
    attempt_end(a, true);
}

/* Whether a request that was refused with 4xx is wrong for every link. */
static bool is_wrong_request(const struct link_reply *r, bool is_too_long) {
    static const int of_link[] = {404, 408, 429};
    for (size_t i = 0; i < ARRAY_LEN(of_link); i++)
        if (r->status == of_link[i]) return false;
    return r->status / 100 == 4 && !is_too_long;
}

/* Whether the failure is one of the link. A remote link's server is blamed by its worker. */
static bool is_fault(const struct fallback_attempt *a, const struct link_reply *r) {
    return a->link->remote ? atomic_load(&a->blamed) : r->status / 100 != 4 || r->status == 404;
}

/* Answers x, if the link has; takes over the attempt. */
static bool reply_use(struct fallback_attempt *a, struct link_reply *r) {
    struct session *d = a->d;
    struct fallback_link *l = a->link;
    char why[WHY_LEN];
    bool is_too_long = false, ok = r->status / 100 == 2 && !begins_with_error(r);
    if (!ok) error_read(r, why, &is_too_long);
    if (!ok && !is_wrong_request(r, is_too_long)) {
        failure_add(d, l, *why ? why : "no message");
        fallback_link_report(l, a->permit, is_fault(a, r) ? LINK_FAILED : LINK_NO_RESULT, why);
        attempt_end(a, r->ended);
        return false;
    }
    if (ok) reply_annotate(d, l, r);
    if (ok) metric_add(l->answers, 1);
    headers_set(d, a);
    fallback_link_report(l, a->permit, ok ? LINK_ANSWERED : LINK_NO_RESULT, "");
    if (ok && is_stream(r))
        stream_answer(a, r);
    else
        whole_answer(a, r);
    return true;
}

/* Tries a link; returns whether x was answered. */
static bool link_try(struct session *d, struct fallback_link *l, enum link_permit permit) {
    struct link_reply r = {0};
    double end = clock_now() + l->settings->timeout;
    if (l->settings->reply) d->deadline = MAX(d->deadline, end); // its text needs no time
    struct fallback_attempt *a = attempt_start(d, l, permit);
    bool answered = false;
    if (reply_wait(a, MIN(end, d->deadline), &r)) {
        answered = reply_use(a, &r);
    } else {
        bool stopped = is_stopped(d);
        if (!stopped) failure_add(d, l, "no reply in time");
        fallback_link_report(l, permit, stopped ? LINK_NO_RESULT : LINK_FAILED, "no reply in time");
        attempt_cancel(a);
    }
    buf_release(&r.bytes);
    return answered;
}

/* Goes down the chain; returns whether x was answered. */
static bool chain_run(struct session *d) {
    bool answered = false;
    for (int i = 0; i < d->c->settings.n && !answered && !is_stopped(d); i++) {
        struct fallback_link *l = &d->c->links[i];
        enum link_permit permit = LINK_REFUSED;
        if (!l->settings->reply && clock_now() >= d->deadline)
            failure_add(d, l, "not tried: the time of the chain is over");
        else if ((permit = fallback_link_ask(l)) == LINK_REFUSED)
            failure_add(d, l, "not tried: its circuit is open");
        if (permit != LINK_REFUSED) answered = link_try(d, l, permit);
    }
    return answered;
}

/* sessions */

/* Answers x after every link has failed. */
static void failure_answer(struct session *d) {
    struct buf text = {0};
    const json_t *v;
    size_t i;
    buf_printf(&text, "no link of '%s' has answered", d->c->name);
    json_array_foreach (d->failed, i, v)
        buf_printf(&text, "%s '%s': %s", i ? ";" : ":", json_get_string(v, "link"),
                   json_get_string(v, "error"));
    exchange_add_header(d->x, "Retry-After", "1");
    api_fail(d->x, 503, NULL, NULL, "no_link", "%s", text.data);
    buf_release(&text);
}

static void *session_thread(void *ctx) {
    struct session *d = ctx;
    if (!chain_run(d)) failure_answer(d);
    session_release(d);
    return NULL;
}

/* Replies that the server has no room for another session; takes over `body`. */
static void session_refuse(struct fallbacks *all, struct exchange *x, json_t *body) {
    __atomic_sub_fetch(&all->n_sessions, 1, __ATOMIC_RELEASE);
    json_decref(body);
    exchange_add_header(x, "Retry-After", "1");
    api_fail(x, 503, NULL, NULL, "overloaded",
             "%d requests to fallback chains are running already; try again later",
             FALLBACK_SESSIONS_MAX);
}

static struct session *session_new(struct server *s, struct exchange *x, struct fallback_chain *c,
                                   json_t *body) {
    struct session *d = xcalloc(1, sizeof *d);
    *d = (struct session){.s = s,
                          .x = exchange_retain(x),
                          .c = c,
                          .body = body,
                          .failed = json_array(),
                          .deadline = clock_now() + c->settings.timeout,
                          .refs = 1};
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->news, NULL);
    return d;
}

void fallback_session_start(struct server *s, struct exchange *x, struct fallback_chain *c,
                            json_t *body) {
    struct fallbacks *all = s->fallbacks;
    struct error err;
    pthread_t thread;
    if (request_memory_reserve(s, x, SESSION_BYTES, &err) != OK) {
        json_decref(body);
        api_fail_error(x, &err, NULL);
        return;
    }
    if (__atomic_add_fetch(&all->n_sessions, 1, __ATOMIC_ACQUIRE) > FALLBACK_SESSIONS_MAX) {
        session_refuse(all, x, body);
        return;
    }
    struct session *d = session_new(s, x, c, body);
    exchange_on_disconnect(x, session_stop, d);
    if (pthread_create(&thread, NULL, session_thread, d) == 0)
        pthread_detach(thread);
    else
        session_thread(d); // without memory for a thread this one waits
}
