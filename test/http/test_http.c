/*
 * test_http: the HTTP server with routes of the test and misbehaving clients.
 *
 * Clients are raw sockets, so that they can stop at any byte. Every client gets a valid answer or
 * is disconnected in time, other clients are served meanwhile, every stream is closed and every
 * exchange ended once, and the server can be stopped at any moment.
 */
/* levels: once */
/* alone: the seconds of its limits are tested */
#define _GNU_SOURCE
#include "http/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_BODY = 64 << 10, LONG = 300 << 10, EVENTS = 20, CLIENTS = 64, ROUNDS = 25 };

static struct http *h;
static struct http_options options;
static struct error err;
/* Atomic counters. */
static int admitted, ended, opened, closed, unfinished, gone;
/* Handlers of /block wait until it is set. */
static bool released;

static int count(const int *n) {
    return __atomic_load_n(n, __ATOMIC_SEQ_CST);
}
static void count_one(int *n) {
    __atomic_add_fetch(n, 1, __ATOMIC_SEQ_CST);
}

static void sleep_seconds(double seconds) {
    usleep((useconds_t)(seconds * 1e6));
}

/* Waits until a count is `want`; false if it takes longer than `seconds`. */
static bool wait_count(const int *n, int want, double seconds) {
    for (double end = clock_now() + seconds; clock_now() < end; sleep_seconds(0.01))
        if (count(n) == want) return true;
    return count(n) == want;
}

/* routes */

static void short_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    exchange_reply(x, 200, "text/plain", "short", 5);
}

static void long_handle(void *ctx, struct exchange *x) {
    char *text = xmalloc(LONG);
    (void)ctx;
    memset(text, 'x', LONG);
    exchange_reply(x, 200, "text/plain", text, LONG);
    free(text);
}

static void echo_handle(void *ctx, struct exchange *x) {
    const struct buf *b = exchange_body(x);
    (void)ctx;
    exchange_reply(x, 200, "text/plain", b->data ? b->data : "", b->len);
}

static void rest_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    exchange_reply(x, 200, "text/plain", exchange_wildcard(x), strlen(exchange_wildcard(x)));
}

static void query_handle(void *ctx, struct exchange *x) {
    const char *q = exchange_query(x, "q é");
    (void)ctx;
    exchange_reply(x, 200, "text/plain", q ? q : "none", strlen(q ? q : "none"));
}

static void json_handle(void *ctx, struct exchange *x) {
    struct error why;
    json_t *v = exchange_json(x, &why);
    (void)ctx;
    exchange_reply(x, v ? 200 : 400, "text/plain", v ? "" : why.text, v ? 0 : strlen(why.text));
    json_decref(v);
}

static void block_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    while (!__atomic_load_n(&released, __ATOMIC_ACQUIRE)) sleep_seconds(0.01);
    exchange_reply(x, 200, "text/plain", "late", 4);
}

static void named_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    exchange_add_header(x, "X-One", "1");
    exchange_add_header(x, "X-Two", "2");
    exchange_reply(x, 200, "text/plain", "", 0);
}

/* Postpones requests until `room`, or `hall` for the other route, which each of them decrements:
 * the first one of a client that waits is the first one to be answered. */
static int room, hall, turn, n_postponed; /* atomic */
static void room_on_disconnect(void *ctx) {
    count_one(ctx);
}
static void room_handle(void *ctx, struct exchange *x) {
    int *places = strcmp(exchange_path(x), "/hall") == 0 ? &hall : &room;
    char text[32];
    (void)ctx;
    exchange_add_header(x, "X-One", "1");
    if (exchange_is_disconnected(x) || exchange_is_behind_postponed(x, places) ||
        count(places) == 0) {
        if (!exchange_user(x)) { // not again
            exchange_on_disconnect(x, room_on_disconnect, &gone);
            count_one(&n_postponed);
            exchange_set_user(x, &n_postponed);
        }
        assert_int_equal(exchange_postpone(x, places), !exchange_is_disconnected(x));
        exchange_reply(x, 503, "text/plain", "full", 4); // discarded if it is postponed
        return;
    }
    __atomic_sub_fetch(places, 1, __ATOMIC_SEQ_CST);
    int n = snprintf(text, sizeof text, "turn %d", __atomic_add_fetch(&turn, 1, __ATOMIC_SEQ_CST));
    exchange_reply(x, 200, "text/plain", text, (size_t)n);
}

/* A reply that is being computed: when the client disconnects it is cancelled, through a worker. */
static void later_reply(void *ctx) {
    struct exchange *x = ctx;
    exchange_reply(x, 200, "text/plain", "given up", 8);
    exchange_release(x);
}
static void later_on_disconnect(void *ctx) {
    count_one(&gone);
    http_run_in_worker(h, later_reply, ctx);
}
static void later_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    exchange_on_disconnect(x, later_on_disconnect, exchange_retain(x));
}

/* Streams. If `left` > 0, a thread of the stream produces that number of events. An endless stream
 * produces its events in stream_pull. A silent one (left < 0) never produces any. */
struct stream {
    struct exchange *x;
    int ready, n_sent, left; /* ready: atomic */
    bool endless, is_closed; /* is_closed: atomic; http no longer uses the stream */
};

static enum stream_status stream_pull(void *ctx, struct buf *out) {
    struct stream *s = ctx;
    for (int i = 0; s->endless && i < 512; i++) buf_puts(out, "data: 0123\n\n");
    if (s->endless) return STREAM_MORE;
    for (int ready = count(&s->ready); s->n_sent < ready; s->n_sent++)
        buf_printf(out, "data: %d\n\n", s->n_sent);
    return s->n_sent == s->left ? STREAM_END : STREAM_WAIT;
}

static void stream_close(void *ctx, bool finished) {
    struct stream *s = ctx;
    count_one(&closed);
    if (!finished) count_one(&unfinished);
    if (s->left > 0)
        __atomic_store_n(&s->is_closed, true, __ATOMIC_RELEASE); // its thread frees it
    else
        free(s);
}

static void *stream_write(void *ctx) {
    struct stream *s = ctx;
    for (int i = 0; i < s->left; i++) {
        sleep_seconds(0.01);
        count_one(&s->ready);
        exchange_wake(s->x);
    }
    while (!__atomic_load_n(&s->is_closed, __ATOMIC_ACQUIRE)) sleep_seconds(0.01);
    exchange_release(s->x);
    free(s);
    return NULL;
}

static void stream_start(struct exchange *x, int events, bool endless) {
    struct stream *s = xcalloc(1, sizeof *s);
    struct stream_source source = {stream_pull, stream_close, s, ": ping\n\n"};
    pthread_t thread;
    *s = (struct stream){.left = events, .endless = endless};
    count_one(&opened);
    if (events > 0) {
        s->x = exchange_retain(x);
        assert_int_equal(pthread_create(&thread, NULL, stream_write, s), 0);
        pthread_detach(thread);
    }
    exchange_stream(x, 200, "text/event-stream", &source);
}
static void events_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    stream_start(x, EVENTS, false);
}
static void endless_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    stream_start(x, 0, true);
}
static void silent_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    stream_start(x, -1, false);
}
/* The stream is woken before the reply begins, as by a model that is faster than its handler. */
static void eager_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    exchange_wake(x);
    sleep_seconds(0.05);
    stream_start(x, EVENTS, false);
}

static void peer_handle(void *ctx, struct exchange *x) {
    char text[256];
    (void)ctx;
    int n = snprintf(text, sizeof text, "<%s %s %s>", exchange_is_local(x) ? "local" : "remote",
                     exchange_peer(x), exchange_limits_name(x));
    exchange_reply(x, 200, "text/plain", text, (size_t)n);
}

/* The body is in memory until it is released. */
static void held_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    while (!__atomic_load_n(&released, __ATOMIC_ACQUIRE)) sleep_seconds(0.001);
    exchange_reply(x, 200, "text/plain", "held", 4);
}

static const struct http_route routes[] = {
    {"GET", "/short", 0, short_handle},
    {"GET", "/long", 0, long_handle},
    {"POST", "/echo", 0, echo_handle},
    {"GET", "/rest/*", 0, rest_handle},
    {"GET", "/query", 0, query_handle},
    {"POST", "/json", 0, json_handle},
    {"GET", "/block", 0, block_handle},
    {"GET", "/later", 0, later_handle},
    {"GET", "/events", 0, events_handle},
    {"GET", "/silent", 0, silent_handle},
    {"GET", "/endless", 0, endless_handle},
    {"GET", "/eager", 0, eager_handle},
    {"GET", "/named", 0, named_handle},
    {"GET", "/wait", HTTP_DISPATCH_SLOW_WORKER, block_handle},
    {"GET", "/instant", HTTP_DISPATCH_IO_THREAD, short_handle},
    {"GET", "/aside", HTTP_DISPATCH_OWN_THREAD, short_handle},
    {"GET", "/peer", 0, peer_handle},
    {"POST", "/held", 0, held_handle},
    {"GET", "/room", 0, room_handle},
    {"GET", "/hall", 0, room_handle},
    {0},
};

static int admit(void *ctx, struct exchange *x, const struct http_route *r) {
    (void)ctx, (void)x, (void)r;
    count_one(&admitted);
    return OK;
}
static void refuse(void *ctx, struct exchange *x, int status, const char *code,
                   const char *message) {
    (void)ctx;
    exchange_reply_json(x, status, json_pack("{s:s,s:s}", "code", code, "message", message));
}
static void on_ended(void *ctx, const struct exchange *x) {
    (void)ctx, (void)x;
    count_one(&ended);
}

static enum http_dispatch dispatch_of(void *ctx, const struct http_route *r) {
    (void)ctx;
    return (enum http_dispatch)r->scope;
}

static bool keys_required; /* as in a server with keys, which allows any Host */
static bool any_host(void *ctx) {
    (void)ctx;
    return keys_required;
}

static void server_start(void) {
    const struct http_callbacks calls = {.routes = routes,
                                         .workers = 4,
                                         .self = &h,
                                         .admit = admit,
                                         .refuse = refuse,
                                         .dispatch = dispatch_of,
                                         .any_host = any_host,
                                         .ended = on_ended};
    if (!http_new(&options, &calls, &err)) fail_msg("%s", err.text);
}

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    options = (struct http_options){.host = (char *)(uintptr_t) "127.0.0.1",
                                    .max_body = MAX_BODY,
                                    .max_connections = 512,
                                    .header_seconds = 1,
                                    .body_seconds = 1,
                                    .idle_seconds = 30,
                                    .drain_seconds = 5};
    admitted = ended = opened = closed = unfinished = gone = 0;
    released = keys_required = false;
    room = hall = turn = n_postponed = 0;
    server_start();
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    __atomic_store_n(&released, true, __ATOMIC_RELEASE);
    http_free(h);
    h = NULL;
    sleep_seconds(0.05); // streams' threads
    strings_release(&options.cors);
    strings_release(&options.hosts);
    strings_release(&options.proxies);
    return count(&opened) == count(&closed) ? 0 : -1;
}

/* clients */

static int client_connect(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)http_port(h))};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0) return fd;
    close(fd);
    return -1;
}

/* False if the server has closed the connection. */
static bool send_text(int fd, const char *text, size_t n) {
    while (n > 0) {
        ssize_t got = send(fd, text, n, MSG_NOSIGNAL);
        if (got <= 0) return false;
        text += got;
        n -= (size_t)got;
    }
    return true;
}

static int client_send(const char *text) {
    int fd = client_connect();
    assert_true(fd >= 0);
    send_text(fd, text, strlen(text));
    return fd;
}

/* Reads until the connection ends, the text `until` (may be NULL) arrives or the time is over.
 * Returns whether the connection has ended. */
static bool read_until(int fd, struct buf *out, const char *until, double seconds) {
    char block[16 << 10];
    for (double end = clock_now() + seconds; clock_now() < end;) {
        struct timeval t = {0, 50000};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
        ssize_t n = recv(fd, block, sizeof block, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN)) return true;
        if (n > 0) buf_add(out, block, (size_t)n);
        if (until && out->data && strstr(out->data, until)) return false;
    }
    return false;
}

static int status_of(const struct buf *b) {
    int status = 0;
    if (b->data) sscanf(b->data, "HTTP/1.%*d %d", &status);
    return status;
}

/* Sends one request on a new connection and reads to its end. Returns the status, or 0. */
static int http_request_bytes(const char *request, size_t n, struct buf *reply) {
    int fd = client_connect();
    reply->len = 0;
    buf_puts(reply, "");
    if (fd < 0) return 0;
    send_text(fd, request, n);
    read_until(fd, reply, NULL, 5);
    close(fd);
    return status_of(reply);
}
static int http_request(const char *request, struct buf *reply) {
    return http_request_bytes(request, strlen(request), reply);
}

#define REST " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
#define HEADS(more) " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" more "\r\n\r\n"

static void assert_served(void) {
    struct buf b = {0};
    double began = clock_now();
    assert_int_equal(http_request("GET /short" REST, &b), 200);
    assert_true(clock_now() - began < 1);
    buf_release(&b);
}

/* many clients at once */

static int count_events(const struct buf *b) {
    int n = 0;
    for (const char *p = b->data; p && (p = strstr(p, "data: ")); p++) n++;
    return n;
}

/* One client; a reply that it reads to the end must be complete. */
static bool client_round(struct rng *rng, struct buf *b) {
    static const char *const requests[] = {"GET /short" REST,
                                           "GET /long" REST,
                                           "GET /events" REST,
                                           "GET /endless" REST,
                                           "GET /later" REST,
                                           "GET /silent" REST,
                                           "GET /short HTTP/1.1\r\nHost: loc",
                                           "POST /echo" HEADS("Content-Length: 5") "hello",
                                           "POST /echo" HEADS("Content-Length: 9") "he"};
    size_t kind = rng_below(rng, ARRAY_LEN(requests));
    bool ends = kind <= 2 || kind == 7, reads_all = ends && rng_below(rng, 3) > 0;
    int fd = client_connect();
    if (fd < 0) return false;
    b->len = 0;
    buf_puts(b, "");
    send_text(fd, requests[kind], strlen(requests[kind]));
    bool is_closed = read_until(fd, b, NULL, reads_all ? 20 : 0.01 * (double)rng_below(rng, 6));
    close(fd);
    if (!reads_all) return true;
    if (!is_closed || status_of(b) != 200) return false;
    if (kind == 1) return b->len > LONG;
    if (kind == 2) return count_events(b) == EVENTS;
    return strstr(b->data, kind == 0 ? "short" : "hello") != NULL;
}

static void *client(void *ctx) {
    struct rng rng = rng_make(*(int *)ctx, RNG_TEST, 0, 0);
    struct buf b = {0};
    intptr_t wrong = 0;
    for (int i = 0; i < ROUNDS; i++) wrong += !client_round(&rng, &b);
    buf_release(&b);
    return (void *)wrong;
}

static void test_storm(void **state) {
    pthread_t threads[CLIENTS];
    int seeds[CLIENTS];
    (void)state;
    for (int i = 0; i < CLIENTS; i++) {
        seeds[i] = i;
        assert_int_equal(pthread_create(&threads[i], NULL, client, &seeds[i]), 0);
    }
    for (int i = 0; i < CLIENTS; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        if (wrong) fail_msg("client %d: %d replies were not whole", i, (int)(intptr_t)wrong);
    }
    for (int i = 0; i < 500 && http_stats(h).open; i++) sleep_seconds(0.01);
    struct http_stats s = http_stats(h);
    assert_int_equal(s.open, 0);
    assert_int_equal(s.streams, 0);
    assert_int_equal(count(&ended), (int)s.requests);
    assert_int_equal(count(&admitted), (int)s.requests);
    assert_int_equal(count(&opened), count(&closed));
    assert_true(count(&opened) > 100 && count(&unfinished) > 10 && count(&gone) > 10);
    assert_served();
}

/* requests that are slow, cut off, too large or malformed */

/* Sends a byte of `text` every 100 ms; returns the seconds until the server closes the connection.
 */
static double send_slowly(const char *before, const char *text) {
    struct buf b = {0};
    int fd = client_send(before);
    double began = clock_now();
    while (clock_now() - began < 5 && !read_until(fd, &b, NULL, 0.1)) {
        if (!*text || !send_text(fd, text++, 1)) break;
    }
    close(fd);
    buf_release(&b);
    return clock_now() - began;
}

static void test_slow(void **state) {
    (void)state;
    char slow[200];
    memset(slow, 'a', sizeof slow - 1);
    slow[sizeof slow - 1] = 0;
    double headers = send_slowly("GET /short HTTP/1.1\r\nX-Slow: ", slow);
    assert_true(headers > 0.8 && headers < 3);
    double body = send_slowly("POST /echo" HEADS("Content-Length: 1000"), slow);
    assert_true(body > 0.8 && body < 3);
    double nothing = send_slowly("", "");
    assert_true(nothing < 3);
    assert_served();
}

static void test_partial_requests(void **state) {
    static const char *const partial_requests[] = {
        "G",
        "GET /short",
        "GET /short HTTP/1.1\r\n",
        "GET /short HTTP/1.1\r\nHost: x",
        "POST /echo" HEADS("Content-Length: 100"),
        "POST /echo" HEADS("Content-Length: 100") "half",
        "POST /echo" HEADS("Transfer-Encoding: chunked") "5\r\nab",
        "POST /echo" HEADS("Transfer-Encoding: chunked") "zz\r\n"};
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(partial_requests); i++)
        close(client_send(partial_requests[i]));
    for (int i = 0; i < 200 && http_stats(h).open; i++) sleep_seconds(0.01);
    assert_int_equal(http_stats(h).open, 0);
    assert_int_equal(count(&ended), (int)http_stats(h).requests);
}

/* A POST of n bytes, with a length or chunked; the reply is read after the body is sent. */
static int post(const char *path, size_t n, bool chunked, struct buf *reply) {
    struct buf b = {0};
    buf_printf(&b, "POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n", path);
    if (chunked)
        buf_printf(&b, "Transfer-Encoding: chunked\r\n\r\n");
    else
        buf_printf(&b, "Content-Length: %zu\r\n\r\n", n);
    for (size_t at = 0; at < n;) {
        size_t k = chunked ? MIN(n - at, 1000) : n;
        if (chunked) buf_printf(&b, "%zx\r\n", k);
        for (size_t i = 0; i < k; i++) buf_puts(&b, "b");
        if (chunked) buf_puts(&b, "\r\n");
        at += k;
    }
    if (chunked) buf_puts(&b, "0\r\n\r\n");
    int status = http_request_bytes(b.data, b.len, reply);
    buf_release(&b);
    return status;
}

static void test_bodies(void **state) {
    struct buf b = {0};
    (void)state;
    for (int chunked = 0; chunked < 2; chunked++) {
        assert_int_equal(post("/echo", MAX_BODY, chunked, &b), 200);
        assert_true(b.len > MAX_BODY);
        assert_int_equal(post("/echo", MAX_BODY + 1, chunked, &b), 413);
        assert_non_null(strstr(b.data, "too_large"));
        assert_int_equal(post("/nowhere", 2 * MAX_BODY, chunked, &b), 404);
        assert_non_null(strstr(b.data, "not_found"));
        int status = post("/echo", 20 * MAX_BODY, chunked, &b); // disconnected, with or without a
                                                                // reply
        if (status != 0 && status != 413) fail_msg("%d %s", status, b.data);
    }
    assert_int_equal(
        http_request("POST /echo" HEADS("Content-Length: 999999999999999999999"), &b) / 100, 4);
    assert_int_equal(http_request("POST /echo" HEADS("Content-Length: -1"), &b) / 100, 4);
    assert_int_equal(
        http_request("POST /echo" HEADS("Content-Length: 99999999\r\nExpect: 100-continue"), &b),
        413);
    buf_release(&b);
    assert_served();
}

static void test_large_headers(void **state) {
    struct buf request = {0}, b = {0};
    (void)state;
    buf_puts(&request, "GET /short HTTP/1.1\r\nHost: localhost\r\nX-Large: ");
    for (int i = 0; i < 40 << 10; i++) buf_puts(&request, "h");
    buf_puts(&request, "\r\n\r\n");
    int status = http_request(request.data, &b);
    assert_true(status == 431 || status == 413 || status == 0);
    request.len = 0;
    buf_puts(&request, "GET /");
    for (int i = 0; i < 40 << 10; i++) buf_puts(&request, "p");
    buf_puts(&request, REST);
    status = http_request(request.data, &b);
    assert_true(status == 414 || status == 0);
    buf_release(&request);
    buf_release(&b);
    assert_served();
}

static void test_paths(void **state) {
    static const struct {
        const char *path;
        int status;
        const char *rest;
    } cases[] = {{"/rest/a%2Fb/c", 200, "\r\n\r\na/b/c"},
                 {"/rest/%2e%2e%2F..%2f%2E%2e/etc", 200, "\r\n\r\n../../../etc"},
                 {"/rest/%FF%C0%80", 200, "\xFF\xC0\x80"},
                 {"/rest/\xFF\xC0", 200, "\xFF\xC0"},
                 {"/rest/%00", 400, "invalid_path"},
                 {"/rest/a%", 400, "invalid_path"},
                 {"/rest/a%4", 400, "invalid_path"},
                 {"/rest/%+1", 400, "invalid_path"},
                 {"/rest/%-1", 400, "invalid_path"},
                 {"/rest/% 1", 400, NULL},
                 {"/rest/%zz", 400, "invalid_path"},
                 {"/rest/", 404, "not_found"},
                 {"/rest", 404, "not_found"},
                 {"/rest/../short", 200, "\r\n\r\n../short"},
                 {"//short", 404, NULL},
                 {"/short/", 404, NULL},
                 {"/short%3f", 404, NULL},
                 {"/%73hort", 404, NULL},
                 {"/short?x=%zz", 400, "invalid_path"},
                 {"/short?x=1&y=%00", 400, "invalid_path"},
                 {"/query?q+%C3%A9=a+b%2Bc%3D%26&q+%c3%a9=second", 200, "\r\n\r\na b+c=&"},
                 {"/query?a=1&q%20%C3%A9", 200, "Content-Length: 0"},
                 {"/query?q=1", 200, "none"},
                 {"*", 404, NULL},
                 {"http://localhost/short", 404, NULL}};
    struct buf b = {0}, request = {0};
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        request.len = 0;
        buf_printf(&request, "GET %s" REST, cases[i].path);
        int status = http_request(request.data, &b);
        if (status != cases[i].status)
            fail_msg("'%s': %d, not %d: %s", cases[i].path, status, cases[i].status, b.data);
        if (cases[i].rest && !strstr(b.data, cases[i].rest))
            fail_msg("'%s': no '%s' in %s", cases[i].path, cases[i].rest, b.data);
    }
    static const char nul[] = "GET /sho\0rt" REST;
    assert_int_not_equal(http_request_bytes(nul, sizeof nul - 1, &b), 200);
    buf_release(&b);
    buf_release(&request);
}

static void test_methods(void **state) {
    struct buf b = {0};
    (void)state;
    assert_int_equal(http_request("HEAD /short" REST, &b), 200);
    assert_non_null(strstr(b.data, "Content-Length: 5"));
    assert_null(strstr(b.data, "short"));
    assert_int_equal(http_request("HEAD /events" REST, &b), 200);
    assert_int_equal(count_events(&b), 0);
    assert_int_equal(http_request("POST /short" HEADS("Content-Length: 0"), &b), 405);
    assert_int_equal(http_request("BREW /short" REST, &b), 405);
    assert_int_equal(http_request("BREW /nowhere" REST, &b), 404);
    assert_int_equal(http_request("OPTIONS /short" REST, &b), 405);
    buf_release(&b);
}

static void test_pipelined(void **state) {
    struct buf b = {0};
    (void)state;
    int fd = client_send("GET /short HTTP/1.1\r\nHost: localhost\r\n\r\n"
                         "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\none"
                         "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
                         "POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\ntwo"
                         "GET /short" REST);
    assert_true(read_until(fd, &b, NULL, 5));
    close(fd);
    const char *p = b.data;
    static const char *const order[] = {"\r\n\r\nshort", "\r\n\r\none", "data: 19", "not_found",
                                        "\r\n\r\nshort"};
    for (size_t i = 0; i < ARRAY_LEN(order); i++) {
        p = strstr(p, order[i]);
        if (!p) fail_msg("no '%s' in its place: %s", order[i], b.data);
        p++;
    }
    assert_int_equal(count_events(&b), EVENTS);
    buf_release(&b);
}

static void test_json(void **state) {
    struct buf body = {0}, b = {0}, request = {0};
    static const struct {
        const char *open, *between, *close;
        int n, status;
    } cases[] = {{"[", "", "]", 100, 200},
                 {"[", "", "]", 101, 400},
                 {"[", "", "]", 5000, 400},
                 {"[", "", "", 30000, 400},
                 {"{\"a\":", "1", "}", 100, 200},
                 {"{\"a\":", "1", "}", 101, 400},
                 {"", "[\"[[[[\\\"]]\"]", "", 1, 200}};
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        body.len = request.len = 0;
        for (int k = 0; k < cases[i].n; k++) buf_puts(&body, cases[i].open);
        buf_puts(&body, cases[i].between);
        for (int k = 0; k < cases[i].n; k++) buf_puts(&body, cases[i].close);
        buf_printf(&request,
                   "POST /json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                   "Content-Length: %zu\r\n\r\n%s",
                   body.len, body.data);
        int status = http_request(request.data, &b);
        if (status != cases[i].status) fail_msg("case %zu: %d %s", i, status, b.data);
    }
    buf_release(&body);
    buf_release(&request);
    buf_release(&b);
}

/* Nested lists of three bytes each, which would take a gigabyte of memory when parsed. */
static void test_json_bomb(void **state) {
    struct buf b = {0}, reply = {0};
    (void)state;
    tear_down(NULL);
    options.max_body = 8 << 20;
    options.body_seconds = 20;
    server_start();
    buf_printf(&b,
               "POST /json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
               "Content-Length: %d\r\n\r\n[",
               3 * 1000000 + 4);
    for (int i = 0; i < 1000000; i++) buf_puts(&b, "{},");
    buf_puts(&b, "{}]");
    assert_int_equal(http_request_bytes(b.data, b.len, &reply), 400);
    if (!strstr(reply.data, "too many values")) fail_msg("%s", reply.data);
    buf_release(&b);
    buf_release(&reply);
}

/* browsers */

static void test_origins(void **state) {
    static const struct {
        const char *headers;
        int status;
    } cases[] = {{"Host: localhost", 200},
                 {"Host: LOCALHOST:8000", 200},
                 {"Host: 127.0.0.1:8000", 200},
                 {"Host: [::1]:8000", 200},
                 {"Host: evil.example", 403}, /* a name that resolves to this machine's address */
                 {"Host: localhost.evil.example", 403},
                 {"Host: 127.0.0.1.evil.example", 403},
                 {"Host: localhost\r\nOrigin: http://localhost", 200},
                 {"Host: localhost\r\nOrigin: https://evil.example", 403},
                 {"Host: localhost\r\nOrigin: null", 403},
                 {"Host: localhost\r\nOrigin: http://localhost.evil.example", 403},
                 {"Host: localhost\r\nOrigin: https://good.example", 200},
                 {"Host: evil.example\r\nOrigin: https://good.example", 403},
                 {"Host: localhost\r\nOrigin: https://good.example.evil.example", 403}};
    struct buf b = {0}, request = {0};
    (void)state;
    tear_down(NULL);
    strings_add(&options.cors, "https://good.example");
    server_start();
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        request.len = 0;
        buf_printf(&request,
                   "POST /echo HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n"
                   "%s\r\n\r\nhi",
                   cases[i].headers);
        int status = http_request(request.data, &b);
        if (status != cases[i].status) fail_msg("%s: %d", cases[i].headers, status);
        bool named = strstr(b.data, "Access-Control-Allow-Origin: https://good.example") != NULL;
        assert_int_equal(named, strstr(cases[i].headers, "good") &&
                                    !strstr(cases[i].headers, "good.example."));
    }
    assert_int_equal(http_request("GET /named" HEADS("Origin: https://good.example"), &b), 200);
    assert_non_null(strstr(b.data, "Access-Control-Expose-Headers: X-One, X-Two, "
                                   "X-Request-Id\r\n"));
    assert_int_equal(http_request("GET /named" HEADS("Origin: http://localhost"), &b), 200);
    assert_null(strstr(b.data, "Access-Control"));
    assert_int_equal(http_request("OPTIONS /echo" HEADS("Origin: https://good.example"), &b), 204);
    assert_non_null(strstr(b.data, "Access-Control-Allow-Methods: "));
    assert_int_equal(http_request("OPTIONS /echo" HEADS("Origin: https://evil.example"), &b), 403);
    assert_null(strstr(b.data, "Access-Control-Allow"));
    buf_release(&b);
    buf_release(&request);
}

/* Restarts the server with the options that a test has set. */
static void server_restart(void) {
    http_free(h);
    server_start();
}

static int http_request_with_headers(const char *line, const char *headers, struct buf *reply) {
    struct buf request = {0};
    buf_printf(&request, "%s\r\nConnection: close\r\n%s\r\n\r\n", line, headers);
    int status = http_request(request.data, reply);
    buf_release(&request);
    return status;
}

/* A Host that any page could have is refused on every listening address; with keys, which such a
 * page does not have, it is allowed. */
static void test_hosts(void **state) {
    static const char *const binds[] = {"127.0.0.1", "0.0.0.0"};
    static const struct {
        const char *headers;
        int without, with; /* keys */
    } cases[] = {{"Host: 192.0.2.7:8000", 200, 200},
                 {"Host: [2001:db8::7]:8000", 200, 200},
                 {"Host: localhost.:8000", 200, 200},
                 {"Host: 2001:db8::7", 403, 200},
                 {"Host: 127.0.0.1:80x", 403, 200},
                 {"Host: 127.1", 403, 200},
                 {"Host: 0x7f000001", 403, 200},
                 {"Host: 2130706433", 403, 200},
                 {"Host: 127.0.0.1.evil.example", 403, 200},
                 {"Host: evil.example", 403, 200},
                 {"Host: evil.example:8000", 403, 200},
                 {"Host: named.example", 200, 200},
                 {"Host: NAMED.example:8000", 200, 200},
                 {"Host: x.named.example", 403, 200},
                 {"Host: ", 403, 200},
                 {"Host: evil.example\r\nOrigin: http://evil.example", 403, 200},
                 {"Host: evil.example\r\nOrigin: http://other.example", 403, 403},
                 {"Host: localhost\r\nOrigin: http://evil.example", 403, 403},
                 {"X-No: host", 400, 400},
                 {"Host: localhost\r\nHost: localhost", 400, 400},
                 {"Host: localhost\r\nHost: evil.example", 400, 400}};
    struct buf b = {0};
    char machine[256] = "", own[300];
    (void)state;
    strings_add(&options.hosts, "named.example");
    for (size_t bind = 0; bind < ARRAY_LEN(binds); bind++) {
        options.host = (char *)(uintptr_t)binds[bind];
        server_restart();
        for (size_t i = 0; i < ARRAY_LEN(cases); i++)
            for (int k = 0; k < 2; k++) {
                keys_required = k;
                int want = k ? cases[i].with : cases[i].without,
                    status = http_request_with_headers("GET /short HTTP/1.1", cases[i].headers, &b);
                if (status != want)
                    fail_msg("%s on %s, keys %d: %d", cases[i].headers, binds[bind], k, status);
            }
        keys_required = false;
        gethostname(machine, sizeof machine - 1);
        snprintf(own, sizeof own, "Host: %s:1", machine);
        assert_int_equal(http_request_with_headers("GET /short HTTP/1.1", own, &b), 200);
        assert_int_equal(http_request_with_headers("GET /short HTTP/1.0", "X-No: host", &b), 200);
        assert_int_equal(http_request_with_headers("GET http://evil.example/short HTTP/1.1",
                                                   "Host: localhost", &b),
                         404);
    }
    buf_release(&b);
}

/* The client's address behind proxies. The test's own address is 127.0.0.1. */
static void test_forwarded(void **state) {
    static const struct {
        const char *proxies, *headers, *want;
    } cases[] = {
        {"", "X-No: thing", "<local 127.0.0.1 127.0.0.1>"},
        {"", "X-Forwarded-For: 192.0.2.1", "<remote 127.0.0.1 127.0.0.1>"},
        {"", "X-Forwarded-For: 127.0.0.1", "<remote 127.0.0.1 127.0.0.1>"},
        {"", "x-forwarded-host: localhost", "<remote 127.0.0.1 127.0.0.1>"},
        {"", "X-Forwarded-Proto: https", "<remote 127.0.0.1 127.0.0.1>"},
        {"", "Forwarded: for=127.0.0.1", "<remote 127.0.0.1 127.0.0.1>"},
        {"", "X-Real-IP: 127.0.0.1", "<remote 127.0.0.1 127.0.0.1>"},
        {"", "Via: 1.1 proxy", "<remote 127.0.0.1 127.0.0.1>"},
        {"", "X-Forwarded-For:", "<remote 127.0.0.1 127.0.0.1>"},
        {"192.0.2.0/24", "X-Forwarded-For: 127.0.0.1", "<remote 127.0.0.1 127.0.0.1>"},
        {"127.0.0.1", "X-No: thing", "<local 127.0.0.1 127.0.0.1>"},
        {"127.0.0.1", "Via: 1.1 proxy", "<remote 127.0.0.1 127.0.0.1>"},
        {"127.0.0.1", "X-Forwarded-For: 192.0.2.1", "<remote 192.0.2.1 192.0.2.1>"},
        {"127.0.0.1", "X-Forwarded-For: 127.0.0.1", "<local 127.0.0.1 127.0.0.1>"},
        {"127.0.0.1", "X-Forwarded-For: 127.0.0.1, 192.0.2.1", "<remote 192.0.2.1 192.0.2.1>"},
        {"127.0.0.1", "X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-For: 192.0.2.1",
         "<remote 192.0.2.1 192.0.2.1>"},
        {"127.0.0.1", "X-Forwarded-For: 192.0.2.1, 198.51.100.2:77",
         "<remote 198.51.100.2 198.51.100.2>"},
        {"127.0.0.1 198.51.100.0/25", "X-Forwarded-For: 192.0.2.1, 198.51.100.2",
         "<remote 192.0.2.1 192.0.2.1>"},
        {"127.0.0.1 198.51.100.0/25", "X-Forwarded-For: 192.0.2.1, 198.51.100.200",
         "<remote 198.51.100.200 198.51.100.200>"},
        {"127.0.0.1", "X-Forwarded-For: [2001:db8:1:2:3::4]:9",
         "<remote 2001:db8:1:2:3::4 "
         "2001:db8:1:2::/64>"},
        {"127.0.0.1", "X-Forwarded-For: ::ffff:192.0.2.9", "<remote 192.0.2.9 192.0.2.9>"},
        {"127.0.0.1", "X-Forwarded-For: unknown", "<remote 127.0.0.1 127.0.0.1>"},
        {"127.0.0.1", "X-Forwarded-For: 127.0.0.1, evil", "<remote 127.0.0.1 127.0.0.1>"},
        {"127.0.0.1", "X-Forwarded-For: 127.0.0.1,", "<remote 127.0.0.1 127.0.0.1>"},
    };
    struct buf b = {0}, headers = {0};
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        if (i == 0 || strcmp(cases[i].proxies, cases[i - 1].proxies) != 0) {
            char all[128], *rest = all, *one;
            snprintf(all, sizeof all, "%s", cases[i].proxies);
            strings_release(&options.proxies);
            while ((one = strsep(&rest, " ")) != NULL)
                if (*one) strings_add(&options.proxies, one);
            server_restart();
        }
        headers.len = 0;
        buf_printf(&headers, "Host: localhost\r\n%s", cases[i].headers);
        assert_int_equal(http_request_with_headers("GET /peer HTTP/1.1", headers.data, &b), 200);
        if (!strstr(b.data, cases[i].want))
            fail_msg("%s, %s: %s", cases[i].proxies, cases[i].headers, strrchr(b.data, '<'));
    }
    buf_release(&b);
    buf_release(&headers);
}

/* Some routes answer while all workers are busy. */
static void test_all_workers_busy(void **state) {
    int fds[8];
    struct buf b = {0};
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(fds); i++) fds[i] = client_send("GET /block" HEADS(""));
    assert_true(wait_count(&admitted, ARRAY_LEN(fds), 5));
    for (int i = 0; i < 20; i++) {
        assert_int_equal(http_request("GET /instant" HEADS(""), &b), 200);
        assert_non_null(strstr(b.data, "\r\n\r\nshort"));
        assert_int_equal(http_request("HEAD /instant" HEADS(""), &b), 200);
        assert_int_equal(http_request("GET /aside" HEADS(""), &b), 200);
    }
    assert_int_equal(count(&ended), 60);
    int fd = client_send("GET /instant HTTP/1.1\r\nHost: localhost\r\n\r\n"
                         "GET /aside HTTP/1.1\r\nHost: localhost\r\n\r\n"
                         "GET /instant" HEADS(""));
    b.len = 0;
    assert_true(read_until(fd, &b, NULL, 5));
    int n = 0;
    for (const char *at = b.data; (at = strstr(at, "short")); at++) n++;
    assert_int_equal(n, 3);
    close(fd);
    __atomic_store_n(&released, true, __ATOMIC_RELEASE);
    assert_true(wait_count(&ended, ARRAY_LEN(fds) + 63, 5));
    for (size_t i = 0; i < ARRAY_LEN(fds); i++) close(fds[i]);
    buf_release(&b);
}

/* A forwarded client may hold the bodies of two requests; another client has its own limit. */
static void test_bytes_of_one_client(void **state) {
    static const char *const clients[] = {"192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.1"};
    struct buf request = {0}, b = {0};
    int fds[ARRAY_LEN(clients)];
    (void)state;
    strings_add(&options.proxies, "127.0.0.1");
    server_restart();
    for (size_t i = 0; i < ARRAY_LEN(clients); i++) {
        request.len = b.len = 0;
        buf_printf(&request, "POST /held" HEADS("X-Forwarded-For: %s\r\nContent-Length: %d"),
                   clients[i], MAX_BODY);
        for (int k = 0; k < MAX_BODY; k++) buf_puts(&request, "x");
        fds[i] = client_connect();
        send_text(fds[i], request.data, request.len);
        if (i == 2)
            assert_true(wait_count(&admitted, 3, 5)), sleep_seconds(0.2); // they are read, too
    }
    read_until(fds[3], &b, NULL, 5);
    assert_int_equal(status_of(&b), 429);
    assert_non_null(strstr(b.data, "Retry-After: 1\r\n"));
    __atomic_store_n(&released, true, __ATOMIC_RELEASE);
    for (int i = 0; i < 3; i++) {
        b.len = 0;
        read_until(fds[i], &b, NULL, 5);
        assert_int_equal(status_of(&b), 200);
    }
    assert_true(wait_count(&ended, 4, 5));
    for (int i = 0; i < 500 && client_limits_count(http_limits(h)); i++) sleep_seconds(0.01);
    assert_int_equal(client_limits_count(http_limits(h)), 0);
    for (size_t i = 0; i < ARRAY_LEN(fds); i++) close(fds[i]);
    buf_release(&b);
    buf_release(&request);
}

/* limits */

static void test_limits(void **state) {
    struct client_limits *l = client_limits_new();
    (void)state;
    for (int i = 0; i < 3; i++) assert_true(client_limits_acquire(l, "a", LIMIT_REQUESTS, 1, 3));
    assert_false(client_limits_acquire(l, "a", LIMIT_REQUESTS, 1, 3));
    assert_true(client_limits_acquire(l, "a", LIMIT_CONNECTIONS, 1, 3));
    assert_true(client_limits_acquire(l, "b", LIMIT_REQUESTS, 1, 3));
    assert_false(client_limits_has_room(l, "a", LIMIT_REQUESTS, 3));
    assert_true(client_limits_has_room(l, "a", LIMIT_REQUESTS, 0));
    assert_true(client_limits_acquire(l, "a", LIMIT_REQUESTS, 1, 0));
    client_limits_release(l, "a", LIMIT_REQUESTS, 4);
    assert_int_equal(client_limits_count(l), 2);
    client_limits_release(l, "a", LIMIT_CONNECTIONS, 1);
    client_limits_release(l, "b", LIMIT_REQUESTS, 1);
    assert_int_equal(client_limits_count(l), 0);
    client_limits_free(l);
}

/* A different key each time. */
static void send_wrong_key(struct client_limits *l, const char *client, double now) {
    static int n;
    char key[32];
    snprintf(key, sizeof key, "guess-%d", n++);
    client_limits_auth_failed(l, client, key, now);
}

/* An address that guesses without pause gets AUTH_FREE_FAILURES attempts and then one per waiting
 * time. */
static void test_wrong_keys(void **state) {
    struct client_limits *l = client_limits_new();
    char name[32];
    int guesses = 0;
    double now = 1000;
    (void)state;
    for (; now < 1600; now += 0.001) {
        client_limits_auth_failed(l, "stale", "the same", now);
        if (client_limits_auth_backoff(l, "a", now) > 0) continue;
        send_wrong_key(l, "a", now);
        guesses++;
    }
    assert_true(client_limits_auth_backoff(l, "stale", now) == 0);
    assert_in_range(guesses, AUTH_FREE_FAILURES + 10,
                    AUTH_FREE_FAILURES + 17); // 1 + 2 + … + 32, then 60 each
    assert_true(client_limits_auth_backoff(l, "a", now) > 0 &&
                client_limits_auth_backoff(l, "a", now) <= AUTH_BACKOFF_MAX);
    assert_true(client_limits_auth_backoff(l, "b", now) == 0);
    client_limits_auth_ok(l, "b", 5);
    assert_true(client_limits_was_auth_ok(l, "b", 5));
    assert_false(client_limits_was_auth_ok(l, "b", 4) || client_limits_was_auth_ok(l, "a", 5));

    now += AUTH_BACKOFF_MAX + AUTH_FAILURE_TTL;
    for (int i = 1; i < AUTH_FREE_FAILURES; i++) send_wrong_key(l, "a", now);
    assert_true(client_limits_auth_backoff(l, "a", now) == 0); // the earlier failures have expired
    send_wrong_key(l, "a", now);
    assert_true(client_limits_auth_backoff(l, "a", now) == 1);

    for (int i = 0; i < 3 * CLIENT_LIMITS_IDLE_MAX; i++) {
        snprintf(name, sizeof name, "client-%d", i);
        send_wrong_key(l, name, now);
        if (i % 100 == 0) send_wrong_key(l, "a", now); // still stored: its last failure is recent
    }
    assert_int_equal(client_limits_count(l), CLIENT_LIMITS_IDLE_MAX);
    assert_true(client_limits_auth_backoff(l, "a", now) == AUTH_BACKOFF_MAX);
    client_limits_free(l);
}

/* clients that do not read, or disconnect */

static int64_t resident_bytes(void) {
    long pages = 0, all;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%ld %ld", &all, &pages), 2);
    fclose(f);
    return (int64_t)pages * sysconf(_SC_PAGESIZE);
}

static void test_client_that_does_not_read(void **state) {
    int fds[32];
    (void)state;
    assert_served();
    int64_t before = resident_bytes();
    for (size_t i = 0; i < ARRAY_LEN(fds); i++) fds[i] = client_send("GET /endless" REST);
    for (int i = 0; i < 10; i++) {
        sleep_seconds(0.1);
        assert_served();
    }
    assert_int_equal(http_stats(h).streams, ARRAY_LEN(fds));
    int64_t grown = resident_bytes() - before;
    if (grown > 16 << 20) fail_msg("%d streams hold %lld bytes", 32, (long long)grown);
    for (size_t i = 0; i < ARRAY_LEN(fds); i++) close(fds[i]);
    assert_true(wait_count(&closed, ARRAY_LEN(fds), 2));
    assert_int_equal(count(&unfinished), ARRAY_LEN(fds));
}

static void test_client_that_disconnects(void **state) {
    (void)state;
    int fd = client_send("GET /later" REST), other = client_send("GET /silent" REST);
    assert_true(wait_count(&admitted, 2, 2));
    sleep_seconds(0.1);
    assert_int_equal(count(&gone), 0);
    close(fd);
    assert_true(wait_count(&gone, 1, 1));
    assert_true(wait_count(&ended, 1, 1));
    close(other);
    assert_true(wait_count(&closed, 1, 1));
}

static void test_wake_before_the_reply(void **state) {
    struct buf b = {0};
    (void)state;
    for (int i = 0; i < 10; i++) {
        assert_int_equal(http_request("GET /eager" REST, &b), 200);
        assert_int_equal(count_events(&b), EVENTS);
    }
    buf_release(&b);
}

static void test_ping(void **state) {
    struct buf b = {0};
    (void)state;
    int fd = client_send("GET /silent HTTP/1.1\r\nHost: localhost\r\n\r\n");
    double began = clock_now();
    read_until(fd, &b, ": ping\n\n", 18);
    assert_non_null(strstr(b.data, ": ping\n\n"));
    assert_true(clock_now() - began > 14);
    close(fd);
    buf_release(&b);
}

/* the end */

static void *drain(void *ctx) {
    double *took = ctx, began = clock_now();
    http_drain(h);
    *took = clock_now() - began;
    return NULL;
}

static void test_drain(void **state) {
    struct buf b = {0};
    pthread_t thread;
    double took;
    (void)state;
    int idle = client_send("GET /short HTTP/1.1\r\nHost: localhost\r\n\r\n");
    read_until(idle, &b, "short", 2);
    b.len = 0;
    int fd = client_send("GET /events" REST);
    read_until(fd, &b, "data: 0", 2);
    assert_int_equal(pthread_create(&thread, NULL, drain, &took), 0);
    int late = client_connect();
    for (int i = 0; i < 100 && late >= 0; i++, late = client_connect()) {
        close(late);
        sleep_seconds(0.001); // the thread has not begun
    }
    assert_int_equal(late, -1);
    struct buf other = {0};
    send_text(idle, "GET /short" REST, strlen("GET /short" REST));
    read_until(idle, &other, NULL, 2);
    assert_int_equal(status_of(&other), 503);
    assert_true(read_until(fd, &b, NULL, 5));
    assert_int_equal(count_events(&b), EVENTS);
    pthread_join(thread, NULL);
    assert_true(took < 2);
    close(fd);
    close(idle);
    buf_release(&b);
    buf_release(&other);
}

static void test_drain_timeout(void **state) {
    double took;
    (void)state;
    options.drain_seconds = 0.5;
    int fd = client_send("GET /silent" REST);
    assert_true(wait_count(&opened, 1, 2));
    drain(&took);
    assert_true(took > 0.4 && took < 1);
    assert_int_equal(count(&closed), 0);
    close(fd);
}

static void *handlers_release_later(void *ctx) {
    sleep_seconds(0.5);
    __atomic_store_n(&released, true, __ATOMIC_RELEASE);
    return ctx;
}

/* More slow requests than workers, and other requests are still served. */
static void test_slow_work(void **state) {
    int fds[8];
    struct buf b = {0};
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(fds); i++) fds[i] = client_send("GET /wait" HEADS(""));
    assert_true(wait_count(&admitted, ARRAY_LEN(fds), 5));
    sleep_seconds(0.1);
    for (int i = 0; i < 3; i++) assert_int_equal(http_request("GET /short" HEADS(""), &b), 200);
    __atomic_store_n(&released, true, __ATOMIC_RELEASE);
    assert_true(wait_count(&ended, ARRAY_LEN(fds) + 3, 5));
    for (size_t i = 0; i < ARRAY_LEN(fds); i++) close(fds[i]);
    buf_release(&b);
}

/* Every kind of exchange in progress at once. */
static void test_free_with_every_kind_of_exchange(void **state) {
    static const char *const requests[] = {
        "GET /block" REST, "GET /later" REST,   "GET /silent" REST,
        "GET /long" REST,  "GET /endless" REST, "POST /echo" HEADS("Content-Length: 9") "half",
        "GET /short HTT",  "GET /events" REST,  "POST /nowhere" HEADS("Content-Length: 9") "ha"};
    int fds[3 * ARRAY_LEN(requests)];
    pthread_t thread;
    (void)state;
    tear_down(NULL);
    options.body_seconds = options.header_seconds = options.idle_seconds = 100;
    released = false;
    server_start();
    for (size_t i = 0; i < ARRAY_LEN(fds); i++)
        fds[i] = client_send(requests[i % ARRAY_LEN(requests)]);
    sleep_seconds(0.3);
    assert_int_equal(pthread_create(&thread, NULL, handlers_release_later, NULL), 0);
    double began = clock_now();
    http_free(h);
    h = NULL;
    double took = clock_now() - began;
    pthread_join(thread, NULL);
    if (took > 3) fail_msg("it took %.1f seconds", took);
    assert_int_equal(count(&opened), count(&closed));
    for (size_t i = 0; i < ARRAY_LEN(fds); i++) close(fds[i]);
}

/* Clients that connect while the server is stopped. */
static void *connect_repeatedly(void *ctx) {
    struct buf b = {0};
    const bool *stop = ctx;
    while (!__atomic_load_n(stop, __ATOMIC_ACQUIRE)) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)options.port)};
        a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0) {
            static const char post_it[] = "POST /echo" HEADS("Content-Length: 5") "hello";
            send_text(fd, post_it, sizeof post_it - 1);
            read_until(fd, &b, NULL, 1);
        }
        close(fd);
        b.len = 0;
    }
    buf_release(&b);
    return NULL;
}

static void test_free_while_clients_come(void **state) {
    pthread_t threads[8];
    bool stop = false;
    (void)state;
    options.port = http_port(h);
    for (size_t i = 0; i < ARRAY_LEN(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, connect_repeatedly, &stop), 0);
    for (int i = 0; i < 10; i++) {
        sleep_seconds(0.05);
        http_free(h);
        server_start();
    }
    __atomic_store_n(&stop, true, __ATOMIC_RELEASE);
    for (size_t i = 0; i < ARRAY_LEN(threads); i++) pthread_join(threads[i], NULL);
    assert_served();
}

static void test_addresses(void **state) {
    const struct http_callbacks calls = {.routes = routes, .workers = 1};
    struct http_options taken = options;
    (void)state;
    taken.port = http_port(h);
    assert_null(http_new(&taken, &calls, &err));
    assert_int_equal(err.code, ERR_USAGE);
    taken.port = 0;
    taken.host = (char *)(uintptr_t) "no.such.host.invalid";
    assert_null(http_new(&taken, &calls, &err));
    assert_int_equal(err.code, ERR_USAGE);
    taken.host = options.host;
    static const char *const wrong[] = {"proxy.example", "10.0.0.0/33", "10.0.0.0/", "::1/129",
                                        "10.0.0.0/8x",   "[::1]",       "",          "10.0.0.0/-1"};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        strings_add(&taken.proxies, wrong[i]);
        assert_null(http_new(&taken, &calls, &err));
        assert_int_equal(err.code, ERR_USAGE);
        assert_int_equal(http_options_check(&taken, &err), ERR_USAGE);
        strings_release(&taken.proxies);
    }
    taken.tls_cert = (char *)(uintptr_t) "/nonexistent";
    assert_null(http_new(&taken, &calls, &err));
    assert_int_equal(err.code, ERR_USAGE);
}

/* Postponed requests are answered in the order of their arrival, also before later ones; a client
 * that has gone does not stop the others. */
static void test_postponed(void **state) {
    enum { N = 6, GONE = 2 };
    int fd[N];
    (void)state;
    for (int i = 0; i < N; i++) {
        fd[i] = client_send("GET /room" REST);
        assert_true(wait_count(&n_postponed, i + 1, 5));
    }
    close(fd[GONE]);
    assert_true(wait_count(&gone, 1, 5));
    for (int i = 0; i < N; i++) {
        struct buf b = {0};
        char want[32];
        if (i == GONE) continue;
        count_one(&room);
        http_resume_postponed(h);
        read_until(fd[i], &b, "turn", 5);
        snprintf(want, sizeof want, "turn %d", i + 1 - (i > GONE));
        if (!b.data || !strstr(b.data, want)) fail_msg("no '%s' in '%s'", want, b.data);
        assert_non_null(strstr(b.data, "X-One: 1\r\n"));
        assert_null(strstr(strstr(b.data, "X-One") + 1, "X-One"));
        close(fd[i]);
        buf_release(&b);
    }
    assert_true(wait_count(&ended, N, 5));
}

/* Requests that wait for one resource do not delay those that wait for another. */
static void test_postponed_for_another(void **state) {
    enum { N = 3 };
    static const char *const requests[N] = {"GET /room" REST, "GET /hall" REST, "GET /room" REST};
    static const int order[N] = {1, 0, 2};
    int fd[N];
    (void)state;
    for (int i = 0; i < N; i++) {
        fd[i] = client_send(requests[i]);
        assert_true(wait_count(&n_postponed, i + 1, 5));
    }
    for (int i = 0; i < N; i++) {
        struct buf b = {0};
        char want[32];
        count_one(order[i] == 1 ? &hall : &room);
        http_resume_postponed(h);
        read_until(fd[order[i]], &b, "turn", 5);
        snprintf(want, sizeof want, "turn %d", i + 1);
        if (!b.data || !strstr(b.data, want)) fail_msg("no '%s' in '%s'", want, b.data);
        close(fd[order[i]]);
        buf_release(&b);
    }
}

static void test_request_ids(void **state) {
    static const struct {
        const char *sent;
        bool kept;
    } cases[] = {{"abc-1.2:3_Z", true}, {"a b", false}, {"", false}, {"a\"b", false}, {"é", false}};
    struct buf b = {0}, request = {0}, line = {0};
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        request.len = line.len = 0;
        buf_printf(&request,
                   "GET /short HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                   "X-Request-Id: %s\r\n\r\n",
                   cases[i].sent);
        assert_int_equal(http_request(request.data, &b), 200);
        buf_printf(&line, "X-Request-Id: %s\r\n", cases[i].sent);
        assert_int_equal(strstr(b.data, line.data) != NULL, cases[i].kept);
        assert_int_equal(strstr(b.data, "X-Request-Id: req_") != NULL, !cases[i].kept);
    }
    assert_int_equal(http_request("GET /nowhere" REST, &b), 404);
    assert_non_null(strstr(b.data, "X-Request-Id: req_"));
    buf_release(&b);
    buf_release(&request);
    buf_release(&line);
}

/* calls: requests of the process */

static int notified, call_released;
static void call_notify(void *ctx) {
    count_one(ctx);
}
static void call_release(void *ctx) {
    (void)ctx;
    count_one(&call_released);
}

static struct exchange *call_start(const char *method, const char *path, const char *body) {
    static const struct http_field headers[] = {{"Accept", "text/plain"}, {0}},
                                   query[] = {{"q é", "a b"}, {0}};
    struct http_call c = {.method = method,
                          .path = path,
                          .headers = headers,
                          .query = query,
                          .notify = call_notify,
                          .release = call_release,
                          .ctx = &notified};
    buf_puts(&c.body, body);
    struct exchange *x = http_call_new(h, &c);
    http_call_start(x);
    return x;
}

/* Reads the reply to its end, and ends the call. Returns the status. */
static int call_finish(struct exchange *x, struct buf *out) {
    out->len = 0;
    enum stream_status status;
    for (int i = 0; (status = http_call_read(x, out)) != STREAM_END; i++) {
        if (i > 2000) fail_msg("the call is not answered");
        if (status == STREAM_WAIT) sleep_seconds(0.005);
    }
    int code = exchange_status(x);
    http_call_end(x, true);
    buf_add(out, "", 1);
    return code;
}

static void calls_check(void) {
    static const struct {
        const char *method, *path, *body, *want;
        int status;
    } cases[] = {{"POST", "/echo", "hello", "hello", 200},
                 {"POST", "/echo", "", "", 200},
                 {"GET", "/rest/a b/%41", "", "a b/%41", 200},
                 {"GET", "/query", "", "a b", 200},
                 {"GET", "/instant", "", "short", 200},
                 {"GET", "/aside", "", "short", 200},
                 {"GET", "/peer", "", "<local ::1 >", 200},
                 {"POST", "/json", "{}", "", 200},
                 {"GET", "/eager", "", NULL, 200},
                 {"GET", "/events", "", NULL, 200},
                 {"GET", "/nowhere", "", NULL, 404},
                 {"DELETE", "/echo", "", NULL, 404}};
    struct buf b = {0};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct exchange *x = call_start(cases[i].method, cases[i].path, cases[i].body);
        assert_null(exchange_parent(x));
        assert_string_equal(exchange_header(x, "accept"), "text/plain");
        assert_null(exchange_header(x, "Host"));
        assert_int_equal(call_finish(x, &b), cases[i].status);
        if (cases[i].want) assert_string_equal(b.data, cases[i].want);
        if (!cases[i].want && cases[i].status == 200) assert_int_equal(count_events(&b), EVENTS);
        assert_true(wait_count(&ended, (int)i + 1, 5));
        assert_true(wait_count(&call_released, (int)i + 1, 5));
    }
    assert_true(count(&notified) >= (int)ARRAY_LEN(cases) + EVENTS);
    assert_int_equal(http_stats(h).streams, 0);
    buf_release(&b);
}

static void test_calls(void **state) {
    (void)state;
    notified = call_released = 0;
    calls_check();
}

/* The same without a socket. */
static void test_calls_only(void **state) {
    (void)state;
    http_free(h);
    options.calls_only = true;
    notified = call_released = 0;
    server_start();
    assert_int_equal(http_port(h), 0);
    calls_check();
    http_drain(h);
    struct buf b = {0};
    assert_int_equal(call_finish(call_start("GET", "/short", ""), &b), 503);
    buf_release(&b);
}

/* A cancelled call is answered nevertheless; a stream ends. */
static void test_cancelled_calls(void **state) {
    struct buf b = {0};
    (void)state;
    call_released = 0;
    struct exchange *x = call_start("GET", "/later", "");
    assert_int_equal(http_call_read(x, &b), STREAM_WAIT);
    assert_null(http_call_type(x));
    http_call_cancel(x);
    http_call_cancel(x);
    assert_int_equal(call_finish(x, &b), 200);
    assert_string_equal(b.data, "given up");
    assert_int_equal(count(&gone), 1);

    static const char *const streams[] = {"/silent", "/endless"};
    for (size_t i = 0; i < ARRAY_LEN(streams); i++) {
        x = call_start("GET", streams[i], "");
        while (!exchange_status(x)) sleep_seconds(0.005);
        assert_string_equal(http_call_type(x), "text/event-stream");
        b.len = 0;
        assert_int_equal(http_call_read(x, &b), i ? STREAM_MORE : STREAM_WAIT);
        http_call_cancel(x);
        assert_int_equal(call_finish(x, &b), 200);
        assert_int_equal(count(&unfinished), (int)i + 1);
    }
    assert_true(wait_count(&call_released, 3, 5));
    buf_release(&b);
}

static void test_postponed_calls(void **state) {
    struct buf b = {0};
    (void)state;
    call_released = 0;
    struct exchange *first = call_start("GET", "/room", "");
    assert_true(wait_count(&n_postponed, 1, 5));
    struct exchange *second = call_start("GET", "/room", "");
    assert_true(wait_count(&n_postponed, 2, 5));
    assert_int_equal(http_call_read(first, &b), STREAM_WAIT);
    count_one(&room);
    http_resume_postponed(h);
    assert_int_equal(call_finish(first, &b), 200);
    assert_string_equal(b.data, "turn 1");
    http_call_cancel(second);
    assert_int_equal(call_finish(second, &b), 503);
    assert_true(wait_count(&call_released, 2, 5));
    buf_release(&b);
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(test_wake_before_the_reply),
        TEST(test_storm),
        TEST(test_slow),
        TEST(test_slow_work),
        TEST(test_partial_requests),
        TEST(test_bodies),
        TEST(test_large_headers),
        TEST(test_paths),
        TEST(test_methods),
        TEST(test_pipelined),
        TEST(test_json),
        TEST(test_json_bomb),
        TEST(test_origins),
        TEST(test_hosts),
        TEST(test_forwarded),
        TEST(test_all_workers_busy),
        TEST(test_bytes_of_one_client),
        TEST(test_limits),
        TEST(test_wrong_keys),
        TEST(test_client_that_does_not_read),
        TEST(test_client_that_disconnects),
        TEST(test_ping),
        TEST(test_drain),
        TEST(test_drain_timeout),
        TEST(test_free_with_every_kind_of_exchange),
        TEST(test_free_while_clients_come),
        TEST(test_addresses),
        TEST(test_postponed),
        TEST(test_postponed_for_another),
        TEST(test_request_ids),
        TEST(test_calls),
        TEST(test_calls_only),
        TEST(test_cancelled_calls),
        TEST(test_postponed_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
