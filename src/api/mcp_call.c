/*
 * mcp_call: runs a tool for a client's request.
 *
 *   client's request x ── mcp_call_start ──> call `part` of a route, which answers
 *      with JSON:    x is answered with JSON
 *      with events:  x is answered with events; reading them reads those of `part`
 *
 * No thread waits for the route. The thread that answers `part`, or
 * adds to its stream, calls call_notify.
 *
 * Invariants. 1. x is answered exactly once, by the first call_notify after the answer of `part`;
 * call_end follows once. 2. The struct lives as long as any reference to `part`, so every thread
 * that may call call_notify or cancel the call holds such a reference. 3. The list's lock is held
 * for the list only, never while an exchange is used.
 */
#define _GNU_SOURCE
#include "api/mcp.h"

#include <stdlib.h>
#include <string.h>

struct mcp_call {
    struct mcp_calls *all;
    struct mcp_call *next, *prev; /* under the lock of `all` */
    struct server *s;
    struct exchange *x, *part; /* x is retained */
    const struct mcp_tool *tool;
    json_t *id, *token; /* token NULL: no progress */
    char *session, *key;
    bool answered, cancelled; /* atomic */
    struct buf events;        /* bytes of the stream: an incomplete event */
    struct mcp_stream stream;
    int64_t n_reports;
};

const char *mcp_caller_key(const struct exchange *x) {
    const char *key = exchange_key_id(x);
    return key ? key : "";
}

/* the list */

static void list_add(struct mcp_call *c) {
    pthread_mutex_lock(&c->all->lock);
    c->next = c->all->list;
    if (c->next) c->next->prev = c;
    c->all->list = c;
    pthread_mutex_unlock(&c->all->lock);
}

static void list_remove(struct mcp_call *c) {
    pthread_mutex_lock(&c->all->lock);
    if (c->prev) c->prev->next = c->next;
    if (c->next) c->next->prev = c->prev;
    if (c->all->list == c) c->all->list = c->next;
    pthread_mutex_unlock(&c->all->lock);
}

/* responses */

json_t *mcp_response(const json_t *id, json_t *result) {
    return json_pack("{s:s,s:O,s:o}", "jsonrpc", "2.0", "id", (json_t *)(uintptr_t)id, "result",
                     result);
}

static json_t *error_result(const char *message) {
    return json_pack("{s:s,s:[{s:s,s:o}],s:b}", "resultType", "complete", "content", "type", "text",
                     "text", json_string_lossy(message, strlen(message)), "isError", 1);
}

/* The text is for clients that do not know structured results. */
static json_t *structured_result(json_t *structured) {
    char *text = json_dumps(structured, JSON_COMPACT | JSON_REAL_PRECISION(17));
    CHECK(text != NULL);
    json_t *v = json_pack("{s:s,s:[{s:s,s:s}],s:o}", "resultType", "complete", "content", "type",
                          "text", "text", text, "structuredContent", structured);
    free(text);
    return v;
}

/* The result for a reply, which may be an error. */
static json_t *reply_result(const struct mcp_call *c, const json_t *reply) {
    const json_t *error = json_object_get(reply, "error");
    if (error) return error_result(json_get_string(error, "message"));
    return structured_result(mcp_tool_result(c->tool, reply));
}

/* Parses JSON of a route. A model can generate U+0000, which requests must not contain. */
static json_t *reply_parse(const char *text, size_t n) {
    json_t *v = json_loadb(text, n, JSON_ALLOW_NUL, NULL);
    CHECK(v != NULL);
    return v;
}

/* Parses the reply of the route, for which the client's request reserves memory. */
static json_t *body_result(const struct mcp_call *c, const struct buf *body) {
    struct error err;
    size_t bytes = json_parse_memory(body->data, body->len) + 8 * body->len;
    if (request_memory_reserve(c->s, c->x, bytes, &err) != OK) return error_result(err.text);
    json_t *reply = reply_parse(body->data, body->len), *result = reply_result(c, reply);
    json_decref(reply);
    return result;
}

static bool is_cancelled(const struct mcp_call *c) {
    return __atomic_load_n(&c->cancelled, __ATOMIC_ACQUIRE);
}

static void call_end(struct mcp_call *c, bool finished) {
    list_remove(c);
    http_call_end(c->part, finished); // may free c
}

static void answer_json(struct mcp_call *c) {
    struct buf body = {0};
    http_call_read(c->part, &body);
    if (is_cancelled(c))
        exchange_reply(c->x, 202, NULL, "", 0);
    else
        exchange_reply_json(c->x, 200, mcp_response(c->id, body_result(c, &body)));
    buf_release(&body);
    call_end(c, true);
}

/* streams */

static void message_add(struct buf *out, json_t *message) {
    char *text = json_dumps(message, JSON_COMPACT | JSON_REAL_PRECISION(17));
    CHECK(text != NULL);
    buf_printf(out, "event: message\ndata: %s\n\n", text);
    free(text);
    json_decref(message);
}

/* Takes over the text. */
static void progress_add(struct mcp_call *c, json_t *text, struct buf *out) {
    message_add(out, json_pack("{s:s,s:s,s:{s:O,s:I,s:o}}", "jsonrpc", "2.0", "method",
                               "notifications/progress", "params", "progressToken", c->token,
                               "progress", (json_int_t)++c->n_reports, "message", text));
}

/* The value of a field of an event, "NAME: value"; NULL: the line is another field. */
static const char *event_field(const char *line, const char *name) {
    size_t n = strlen(name);
    return strncmp(line, name, n) == 0 && strncmp(line + n, ": ", 2) == 0 ? line + n + 2 : NULL;
}

/* Handles an event of the route, which has one line of data. Comments and [DONE] are ignored. */
static void event_take(struct mcp_call *c, char *event, struct buf *out) {
    const char *name = "", *text = NULL, *value;
    for (char *line; (line = strsep(&event, "\n"));) {
        if ((value = event_field(line, "event"))) name = value;
        if ((value = event_field(line, "data"))) text = value;
    }
    json_t *data = text && *text == '{' ? reply_parse(text, strlen(text)) : NULL,
           *progress = data ? mcp_stream_event(&c->stream, name, data) : NULL;
    if (progress) progress_add(c, progress, out);
    json_decref(data);
}

static void events_take(struct mcp_call *c, struct buf *out) {
    size_t from = 0;
    buf_add(&c->events, "", 1); // for strstr
    c->events.len--;
    for (char *end; (end = strstr(c->events.data + from, "\n\n"));) {
        *end = 0;
        event_take(c, c->events.data + from, out);
        from = (size_t)(end - c->events.data) + 2;
    }
    c->events.len -= from;
    memmove(c->events.data, c->events.data + from, c->events.len);
}

static enum stream_status call_pull(void *ctx, struct buf *out) {
    struct mcp_call *c = ctx;
    enum stream_status status;
    do {
        if (is_cancelled(c)) return STREAM_END;
        status = http_call_read(c->part, &c->events);
        events_take(c, out);
    } while (status == STREAM_MORE && !out->len);
    if (status == STREAM_END)
        message_add(out, mcp_response(c->id, reply_result(c, mcp_stream_reply(&c->stream))));
    return status;
}

static void call_close(void *ctx, bool finished) {
    struct mcp_call *c = ctx;
    call_end(c, finished && !is_cancelled(c));
}

/* notifications of the call */

static void call_notify(void *ctx) {
    static const char EVENTS[] = "text/event-stream";
    struct mcp_call *c = ctx;
    if (!exchange_status(c->part)) return;
    if (__atomic_exchange_n(&c->answered, true, __ATOMIC_ACQ_REL)) {
        exchange_wake(c->x);
        return;
    }
    const char *type = http_call_type(c->part);
    struct stream_source source = {call_pull, call_close, c, ": waiting\n\n"};
    if (type && strcmp(type, EVENTS) == 0)
        exchange_stream(c->x, 200, EVENTS, &source);
    else
        answer_json(c);
}

static void call_release(void *ctx) {
    struct mcp_call *c = ctx;
    exchange_release(c->x);
    mcp_stream_release(&c->stream);
    buf_release(&c->events);
    json_decref(c->id);
    json_decref(c->token);
    free(c->session);
    free(c->key);
    free(c);
}

static void part_cancel(void *part) {
    http_call_cancel(part);
}

void mcp_call_start(struct mcp_calls *all, struct server *s, struct exchange *x,
                    const struct mcp_tool *t, const json_t *arguments, const json_t *id,
                    const json_t *token, const char *session) {
    struct mcp_tool_request r;
    struct error err;
    if (mcp_tool_request_make(t, arguments, token != NULL, &r, &err) != OK) {
        mcp_tool_request_release(&r);
        exchange_reply_json(x, 200, mcp_response(id, error_result(err.text)));
        return;
    }
    struct mcp_call *c = xcalloc(1, sizeof *c);
    *c = (struct mcp_call){.all = all,
                           .s = s,
                           .x = exchange_retain(x),
                           .tool = t,
                           .id = json_deep_copy(id),
                           .token = json_deep_copy(token),
                           .session = xstrdup(session),
                           .key = xstrdup(mcp_caller_key(x))};
    c->part = http_call_new(s->http, &(struct http_call){.method = r.method,
                                                         .path = r.path,
                                                         .parent = x,
                                                         .query = r.query,
                                                         .body = r.body,
                                                         .notify = call_notify,
                                                         .release = call_release,
                                                         .ctx = c});
    r.body = (struct buf){0};
    mcp_tool_request_release(&r);
    list_add(c);
    exchange_on_disconnect(x, part_cancel, c->part);
    http_call_start(c->part);
}

/* cancellation */

static bool call_is(const struct mcp_call *c, const char *key, const char *session,
                    const json_t *id) {
    return strcmp(c->key, key) == 0 && strcmp(c->session, session) == 0 &&
           (!id || json_equal(c->id, id)) && !is_cancelled(c);
}

/* Marks the next call to cancel, and retains its `part`. NULL: no further call. */
static struct mcp_call *cancel_next(struct mcp_calls *all, const char *key, const char *session,
                                    const json_t *id) {
    pthread_mutex_lock(&all->lock);
    struct mcp_call *c = all->list;
    while (c && !call_is(c, key, session, id)) c = c->next;
    if (c) {
        __atomic_store_n(&c->cancelled, true, __ATOMIC_RELEASE);
        exchange_retain(c->part);
    }
    pthread_mutex_unlock(&all->lock);
    return c;
}

void mcp_calls_cancel(struct mcp_calls *all, const struct exchange *x, const char *session,
                      const json_t *id) {
    for (struct mcp_call *c; (c = cancel_next(all, mcp_caller_key(x), session, id));) {
        struct exchange *part = c->part;
        http_call_cancel(part);
        exchange_wake(c->x); // a stream of x waits for `part`
        exchange_release(part);
    }
}
