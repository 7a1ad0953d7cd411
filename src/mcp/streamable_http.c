/*
 * streamable_http: a server that is an address. Each message is a POST request; the answer is JSON
 * or a stream of events.
 *
 * A server may end a stream before the answer if its events have ids. The client then asks for the
 * rest with GET and the id of the last event, as the protocol provides.
 */
#define _GNU_SOURCE
#include "hub/hub.h"
#include "mcp/internal.h"

#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_SESSION_ID = 256, MAX_RESUMES = 100, RETRY_MS = 1000, MAX_RETRY_MS = 60000 };
/* Limit of time of the request that ends the session. */
#define END_SECONDS 2.0

struct http {
    struct mcp_transport base;
    char *url, *session, *version; /* session and version may be NULL */
    struct strings headers;        /* those that the user gives */
};

/* A request and its answer, as far as it has arrived. */
struct exchange {
    mcp_receive_fn receive; /* NULL: the request has no answer */
    void *ctx;
    struct event_stream stream;
    struct buf body; /* the answer, if it is not a stream */
    int rc;          /* result of `receive` */
    struct error *err;
};

/* requests */

static bool is_type(const struct http_response *r, const char *type) {
    const char *text = r->headers[0] ? r->headers[0] : "";
    size_t len = strcspn(text, "; \t");
    return len == strlen(type) && strncasecmp(text, type, len) == 0;
}

static bool on_body(void *ctx, const struct http_response *r, const char *data, size_t len) {
    struct exchange *x = ctx;
    if (!x->receive) return false;
    if (!is_type(r, "text/event-stream"))
        buf_add(&x->body, data, len);
    else
        x->rc = event_stream_add(&x->stream, data, len, x->receive, x->ctx, x->err);
    return x->rc == OK;
}

static void header_add(struct strings *headers, const char *name, const char *value) {
    char *line = xasprintf("%s: %s", name, value);
    if (*value) strings_add(headers, line);
    free(line);
}

/* text NULL: no body. The caller releases `out` in every case. */
static int request(struct http *t, const char *method, const char *text, size_t len,
                   double deadline, struct exchange *x, struct http_response *out,
                   struct error *err) {
    struct strings headers = {0};
    header_add(&headers, "Accept",
               text ? "application/json, text/event-stream" : "text/event-stream");
    header_add(&headers, "Content-Type", text ? "application/json" : "");
    header_add(&headers, "Last-Event-ID", x->stream.id);
    header_add(&headers, "Mcp-Session-Id", t->session ? t->session : "");
    header_add(&headers, "MCP-Protocol-Version", t->version ? t->version : "");
    for (int i = 0; i < t->headers.n; i++) strings_add(&headers, t->headers.v[i]);
    x->err = err;
    int rc = http_request(&(struct http_request){.method = method,
                                                 .url = t->url,
                                                 .headers = &headers,
                                                 .body = text,
                                                 .body_len = len,
                                                 .keep_headers = {"Content-Type", "Mcp-Session-Id"},
                                                 .max_body = 2 * MCP_MAX_EXCHANGE,
                                                 .seconds = MAX(deadline - clock_now(), 0.001),
                                                 .on_body = on_body,
                                                 .ctx = x},
                          out, err);
    strings_release(&headers);
    return rc ? rc : x->rc;
}

/* The server gives the id of the session with its first answer. */
static int session_take(struct http *t, const struct http_response *r, struct error *err) {
    const char *id = r->headers[1];
    if (!id || t->session) return OK;
    size_t len = strlen(id);
    for (size_t i = 0; i < len; i++)
        if (id[i] < 0x21 || id[i] > 0x7e) len = 0;
    if (len < 1 || len > MAX_SESSION_ID)
        return error_set(err, ERR_FORMAT, "its session id is not 1 to %d visible ASCII characters",
                         MAX_SESSION_ID);
    t->session = xstrdup(id);
    return OK;
}

/* An answer that is not 2xx. It may have a message as its body. */
static int status_read(struct http *t, const struct http_response *r, struct exchange *x,
                       struct error *err) {
    bool is_json = is_type(r, "application/json");
    if (r->status == 404 && t->session) {
        free(t->session);
        t->session = NULL;
        return error_set(err, ERR_MISSING, "the server has ended the session");
    }
    if (r->status == 401 || r->status == 403)
        return error_set(err, ERR_STATE,
                         "the server refuses the request (status %d); it needs another token",
                         r->status);
    int rc = is_json && x->body.len && x->receive
                 ? x->receive(x->ctx, x->body.data, x->body.len, err)
                 : OK;
    if (rc) return rc;
    if (r->status >= 300 && r->status < 400)
        return error_set(err, ERR_STATE, "the server redirects to another address; use that one");
    return error_set(err, ERR_IO, "the server answered with status %d", r->status);
}

/* the transport */

static int http_post(struct mcp_transport *base, const char *text, size_t len, double deadline,
                     struct error *err) {
    struct http *t = (struct http *)base;
    struct exchange x = {0};
    struct http_response r;
    int rc = request(t, "POST", text, len, deadline, &x, &r, err);
    if (!rc && (r.status < 200 || r.status > 299)) rc = status_read(t, &r, &x, err);
    http_response_release(&r);
    return rc;
}

/* Sends one request of an exchange. OK: its answer has ended without completing the exchange. */
static int exchange_part(struct http *t, const char *text, size_t len, double deadline,
                         struct exchange *x, struct error *err) {
    struct http_response r;
    x->body.len = 0;
    int rc = request(t, text ? "POST" : "GET", text, len, deadline, x, &r, err);
    int session_rc = rc >= 0 && r.status < 300 ? session_take(t, &r, err) : OK;
    if (session_rc)
        rc = session_rc;
    else if (rc == OK && (r.status < 200 || r.status > 299))
        rc = status_read(t, &r, x, err);
    else if (rc == OK && is_type(&r, "application/json") && x->body.len)
        rc = x->receive(x->ctx, x->body.data, x->body.len, err);
    http_response_release(&r);
    return rc;
}

/* Waits as long as the server wants before the rest of a stream is requested. */
static void resume_wait(const struct event_stream *stream, double deadline) {
    int64_t ms = stream->retry_ms > 0 ? MIN(stream->retry_ms, MAX_RETRY_MS) : RETRY_MS;
    double left = (deadline - clock_now()) * 1000;
    poll(NULL, 0, (int)MAX(0, MIN((double)ms, left)));
}

static int http_exchange(struct mcp_transport *base, const char *text, size_t len, double deadline,
                         mcp_receive_fn receive, void *ctx, struct error *err) {
    struct http *t = (struct http *)base;
    struct exchange x = {.receive = receive, .ctx = ctx};
    int rc = exchange_part(t, text, len, deadline, &x, err);
    for (int i = 0; rc == OK && *x.stream.id && i < MAX_RESUMES && clock_now() < deadline; i++) {
        resume_wait(&x.stream, deadline);
        x.stream.line.len = x.stream.data.len = 0; // the event that was cut off
        rc = exchange_part(t, NULL, 0, deadline, &x, err);
    }
    if (rc == OK) rc = error_set(err, ERR_FORMAT, "the response has no answer to the request");
    event_stream_release(&x.stream);
    buf_release(&x.body);
    return rc;
}

static void http_version_set(struct mcp_transport *base, const char *version) {
    struct http *t = (struct http *)base;
    free(t->version);
    t->version = version ? xstrdup(version) : NULL;
    if (version) return;
    free(t->session);
    t->session = NULL;
}

static void http_close(struct mcp_transport *base) {
    struct http *t = (struct http *)base;
    struct exchange x = {0};
    struct http_response r;
    struct error ignored;
    if (t->session) {
        request(t, "DELETE", NULL, 0, clock_now() + END_SECONDS, &x, &r, &ignored);
        http_response_release(&r);
    }
    http_version_set(base, NULL);
    strings_release(&t->headers);
    free(t->url);
    free(t);
}

struct mcp_transport *mcp_http_open(const char *url, const struct strings *headers) {
    struct http *t = xcalloc(1, sizeof *t);
    t->base = (struct mcp_transport){http_exchange, http_post, http_version_set, http_close};
    t->url = xstrdup(url);
    for (int i = 0; headers && i < headers->n; i++) strings_add(&t->headers, headers->v[i]);
    return &t->base;
}
