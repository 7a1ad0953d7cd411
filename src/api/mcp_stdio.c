/*
 * mcp_stdio: the MCP server over stdin and stdout. Each line of stdin is a message; it becomes a
 * call of POST /mcp with the rights of the start-up token, because the user who started the process
 * owns the server. Responses and notifications are lines of stdout.
 *
 * One thread reads and writes. It stops reading while MAX_CALLS requests run, or while the client
 * does not read, so a client can fill only the pipes.
 *
 * Calls run in several threads, so a message can overtake the one before it. Only cancellations
 * depend on the order, and this thread applies them itself.
 *
 * The end of stdin ends the server after the last response. A signal, or a client that reads no
 * more, cancels the running calls.
 */
#define _GNU_SOURCE
#include "api/api.h"
#include "api/internal.h"
#include "serve/request_fields.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

enum { MAX_CALLS = 64, READ_BYTES = 64 << 10 };

struct stdio_call {
    struct exchange *x;
    json_t *id;     /* id of the request, for cancellations and replies without one; or NULL */
    bool dropped;   /* the client has cancelled it: it gets no response */
    struct buf out; /* bytes of the reply that are not written yet */
};
struct stdio {
    int refs; /* atomic: the loop holds one, and each exchange */
    int wake_fd, signal_fd;
    struct server *s;
    struct buf in;
    bool too_long;            /* the current line is too long: it is skipped */
    bool in_ended, out_ended; /* no more bytes are read or written */
    bool cancelled;           /* the running calls are cancelled */
    struct stdio_call calls[MAX_CALLS];
    int n_calls;
};

static void stdio_release(void *ctx) {
    struct stdio *io = ctx;
    if (__atomic_sub_fetch(&io->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    close(io->wake_fd);
    buf_release(&io->in);
    free(io);
}

static void stdio_notify(void *ctx) {
    const struct stdio *io = ctx;
    eventfd_write(io->wake_fd, 1);
}

/* output */

/* Waits until stdout accepts PIPE_BUF bytes. False: a signal has arrived, which the loop handles.
 */
static bool output_wait(const struct stdio *io) {
    struct pollfd fds[] = {{.fd = STDOUT_FILENO, .events = POLLOUT},
                           {.fd = io->signal_fd, .events = POLLIN}};
    poll(fds, ARRAY_LEN(fds), -1);
    return !fds[1].revents;
}

static void line_write(struct stdio *io, const char *text, size_t n) {
    struct buf line = {0};
    buf_add(&line, text, n);
    buf_puts(&line, "\n");
    for (size_t done = 0; done < line.len && !io->out_ended;) {
        io->out_ended = !output_wait(io);
        ssize_t got = io->out_ended ? 0
                                    : write(STDOUT_FILENO, line.data + done,
                                            MIN(line.len - done, (size_t)PIPE_BUF));
        if (got >= 0)
            done += (size_t)got;
        else if (errno != EAGAIN && errno != EINTR)
            io->out_ended = true;
    }
    buf_release(&line);
}

static void error_write(struct stdio *io, json_t *id, int code, const char *message) {
    json_t *v = json_pack("{s:s,s:O,s:{s:i,s:s}}", "jsonrpc", "2.0", "id", id ? id : json_null(),
                          "error", "code", code, "message", message);
    char *text = json_dumps(v, JSON_COMPACT);
    CHECK(text != NULL);
    line_write(io, text, strlen(text));
    free(text);
    json_decref(v);
}

/* Writes the data of the complete lines of an event stream. */
static void events_write(struct stdio *io, struct buf *b) {
    static const char data[] = "data: ";
    const size_t prefix = sizeof data - 1;
    size_t from = 0;
    for (char *end; b->len > from && (end = memchr(b->data + from, '\n', b->len - from));) {
        const char *line = b->data + from;
        size_t n = (size_t)(end - line);
        if (n > prefix && memcmp(line, data, prefix) == 0)
            line_write(io, line + prefix, n - prefix);
        from += n + 1;
    }
    if (!from) return;
    b->len -= from;
    memmove(b->data, b->data + from, b->len);
}

/* A request that was refused before mcp.c received it is answered in the form of the HTTP APIs. */
static void reply_write(struct stdio *io, struct stdio_call *c) {
    static const char begin[] = "{\"jsonrpc\"";
    enum { INTERNAL_ERROR = -32603 };
    struct error ignored;
    if (c->out.len > strlen(begin) && memcmp(c->out.data, begin, strlen(begin)) == 0) {
        line_write(io, c->out.data, c->out.len);
        return;
    }
    json_t *v = json_parse(c->out.data, c->out.len, "reply", &ignored);
    error_write(io, c->id, INTERNAL_ERROR, json_get_string(json_object_get(v, "error"), "message"));
    json_decref(v);
}

/* Writes the available bytes of a reply. Returns whether the call has ended. */
static bool call_advance(struct stdio *io, struct stdio_call *c) {
    enum stream_status status;
    do status = http_call_read(c->x, &c->out);
    while (status == STREAM_MORE);
    const char *type = exchange_status(c->x) ? http_call_type(c->x) : NULL;
    if (c->dropped)
        c->out.len = 0;
    else if (type && strcmp(type, "text/event-stream") == 0)
        events_write(io, &c->out);
    else if (status == STREAM_END && c->out.len)
        reply_write(io, c);
    if (status != STREAM_END) return false;
    http_call_end(c->x, true);
    json_decref(c->id);
    buf_release(&c->out);
    return true;
}

static void calls_advance(struct stdio *io) {
    for (int i = 0; i < io->n_calls;) {
        if (call_advance(io, &io->calls[i]))
            io->calls[i] = io->calls[--io->n_calls];
        else
            i++;
    }
}

static void calls_cancel(struct stdio *io) {
    for (int i = 0; i < io->n_calls && !io->cancelled; i++) http_call_cancel(io->calls[i].x);
    io->cancelled = io->in_ended = io->out_ended = true;
    io->in.len = 0;
}

/* input */

/* The id of the request that a message cancels, or NULL; the caller releases it. */
static json_t *cancelled_id(const char *line, size_t n) {
    static const char name[] = "\"notifications/cancelled\"";
    struct error ignored;
    size_t len;
    const char *method = request_text_member(line, n, "method", &len);
    if (!method || len != strlen(name) || memcmp(method, name, len) != 0) return NULL;
    const char *text = request_text_member(line, n, "params", &len);
    struct json_limits left = json_request_limits;
    json_t *params = text ? json_parse_limited(text, len, "params", &left, &ignored) : NULL,
           *id = json_incref(json_object_get(params, "requestId"));
    json_decref(params);
    return id;
}

static void calls_drop(struct stdio *io, const json_t *id) {
    for (int i = 0; i < io->n_calls; i++) {
        struct stdio_call *c = &io->calls[i];
        if (!c->id || c->dropped || !json_equal(c->id, id)) continue;
        c->dropped = true;
        http_call_cancel(c->x);
        stdio_notify(io);
    }
}

static void line_handle(struct stdio *io, const char *line, size_t n) {
    json_t *cancelled = cancelled_id(line, n);
    if (cancelled) calls_drop(io, cancelled);
    json_decref(cancelled);
    char *bearer = xasprintf("Bearer %s", io->s->token);
    const struct http_field headers[] = {
        {"Authorization", bearer}, {"Accept", "application/json, text/event-stream"}, {0}};
    struct buf body = {0};
    buf_add(&body, line, n);
    __atomic_add_fetch(&io->refs, 1, __ATOMIC_RELAXED);
    struct exchange *x = http_call_new(io->s->http, &(struct http_call){.method = "POST",
                                                                        .path = "/mcp",
                                                                        .headers = headers,
                                                                        .body = body,
                                                                        .notify = stdio_notify,
                                                                        .release = stdio_release,
                                                                        .ctx = io});
    io->calls[io->n_calls++] = (struct stdio_call){.x = x, .id = request_body_member(x, "id")};
    free(bearer);
    http_call_start(x);
}

/* Starts a call for each complete line, while there is room. */
static void lines_handle(struct stdio *io) {
    size_t from = 0;
    for (char *end; io->n_calls < MAX_CALLS && io->in.len > from &&
                    (end = memchr(io->in.data + from, '\n', io->in.len - from));) {
        const char *line = io->in.data + from;
        size_t n = (size_t)(end - line), text = n;
        while (text > 0 && strchr(" \t\r", line[text - 1])) text--;
        if (text > 0 && !io->too_long) line_handle(io, line, text);
        io->too_long = false;
        from += n + 1;
    }
    io->in.len -= from;
    if (from) memmove(io->in.data, io->in.data + from, io->in.len);
}

/* Drops a line that is longer than a request may be. */
static void line_limit(struct stdio *io) {
    enum { INVALID_REQUEST = -32600 };
    bool complete = io->in.len && memchr(io->in.data, '\n', io->in.len);
    if (complete || (int64_t)io->in.len <= io->s->options->http.max_body) return;
    if (!io->too_long) error_write(io, NULL, INVALID_REQUEST, "the message is too long");
    io->too_long = true;
    io->in.len = 0;
}

/* The last line may have no end. */
static void input_end(struct stdio *io) {
    io->in_ended = true;
    if (io->in.len) buf_puts(&io->in, "\n");
}

static void input_read(struct stdio *io) {
    struct error err;
    if (buf_reserve(&io->in, READ_BYTES, &err) != OK) return; // memory may be free soon
    ssize_t n = read(STDIN_FILENO, io->in.data + io->in.len, READ_BYTES);
    if (n > 0)
        io->in.len += (size_t)n;
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        input_end(io);
}

/* the loop */

static bool is_busy(const struct stdio *io) {
    return !io->in_ended || io->in.len > 0 || io->n_calls > 0;
}

void mcp_stdio_attend(struct server *s, const sigset_t *signals) {
    struct stdio *io = xcalloc(1, sizeof *io);
    *io = (struct stdio){.refs = 1,
                         .wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
                         .signal_fd = signalfd(-1, signals, SFD_CLOEXEC | SFD_NONBLOCK),
                         .s = s};
    CHECK(io->wake_fd >= 0 && io->signal_fd >= 0);
    while (is_busy(io)) {
        bool reads = !io->in_ended && io->n_calls < MAX_CALLS;
        struct pollfd fds[] = {{.fd = io->wake_fd, .events = POLLIN},
                               {.fd = io->cancelled ? -1 : io->signal_fd, .events = POLLIN},
                               {.fd = reads ? STDIN_FILENO : -1, .events = POLLIN}};
        struct signalfd_siginfo info;
        eventfd_t count;
        poll(fds, ARRAY_LEN(fds), -1);
        eventfd_read(io->wake_fd, &count);
        if (fds[2].revents) input_read(io);
        line_limit(io);
        calls_advance(io);
        lines_handle(io);
        bool signalled = !io->cancelled && read(io->signal_fd, &info, sizeof info) > 0;
        if (signalled || io->out_ended) calls_cancel(io);
    }
    close(io->signal_fd);
    stdio_release(io);
}
