/*
 * test_request: requests to servers that the user names: methods, headers, bodies, responses that
 * are read as they arrive, limits, and messages that contain no secret.
 *
 * The server is a process of this test. It answers with the text of the request, except on the
 * paths of `serve_one`.
 */
/* levels: once */
#define _GNU_SOURCE
#include "hub/hub.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#define SECRET "s3cr3t"

static struct error err;
static uint16_t port;
static pid_t server;

/* the server */

/* Reads a request with its body; returns its length. */
static size_t request_read(int fd, char *text, size_t size) {
    size_t len = 0, want = SIZE_MAX;
    for (ssize_t n; len < want && (n = read(fd, text + len, size - 1 - len)) > 0;) {
        len += (size_t)n;
        text[len] = '\0';
        const char *head_end = strstr(text, "\r\n\r\n"),
                   *length = strcasestr(text, "\r\nContent-Length:");
        if (head_end)
            want = (size_t)(head_end + 4 - text) + (length ? strtoul(length + 17, NULL, 10) : 0);
    }
    return len;
}

static void serve_one(int fd) {
    char text[8192] = "", path[64] = "";
    size_t len = request_read(fd, text, sizeof text);
    sscanf(text, "%*s /%63[^ ]", path);
    if (strcmp(path, "silent") == 0) sleep(30);
    if (strcmp(path, "missing") == 0)
        dprintf(fd, "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone");
    else if (strcmp(path, "redirect") == 0)
        dprintf(fd, "HTTP/1.1 307 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n");
    else if (strcmp(path, "broken") == 0)
        dprintf(fd, "HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\nhalf");
    else
        dprintf(fd, "HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nx-id: 7\r\nConnection: close\r\n\r\n");
    if (strcmp(path, "endless") == 0)
        while (write(fd, "0123456789abcdef", 16) > 0) continue;
    for (int i = 0; i < 3 && strcmp(path, "slow") == 0; i++) {
        dprintf(fd, "part %d\n", i);
        usleep(100000);
    }
    if (strcmp(path, "stall") == 0) {
        dprintf(fd, "begin");
        sleep(30);
    }
    if (strcmp(path, "echo") == 0 && write(fd, text, len) < 0) _exit(1);
}

static int set_up(void **state) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    (void)state;
    setenv("http_proxy", "http://127.0.0.1:1", 1); // must not be used for this machine
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 16) ||
        getsockname(fd, (struct sockaddr *)&a, &len))
        return -1;
    port = ntohs(a.sin_port);
    server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGPIPE, SIG_IGN);
        signal(SIGCHLD, SIG_IGN);
        for (int c; (c = accept(fd, NULL, NULL)) >= 0; close(c))
            if (fork() == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                serve_one(c);
                _exit(0);
            }
        _exit(1);
    }
    close(fd);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    return kill(server, SIGKILL);
}

/* tests */

static struct http_request request_to(const char *path) {
    static char url[128];
    snprintf(url, sizeof url, "http://127.0.0.1:%d/%s", port, path);
    return (struct http_request){.method = "GET",
                                 .url = url,
                                 .max_body = 1 << 16,
                                 .seconds = 10,
                                 .keep_headers = {"Content-Type", "X-Id", "X-None"}};
}

/* The text of the echoed request, malloc'ed. */
static char *echo(const char *method, const char *body, const struct strings *headers) {
    struct http_request q = request_to("echo");
    struct http_response r;
    q.method = method;
    q.body = body;
    q.body_len = body ? strlen(body) : 0;
    q.headers = headers;
    if (http_request(&q, &r, &err) != OK) fail_msg("%s: %s", method, err.text);
    assert_int_equal(r.status, 200);
    assert_string_equal(r.headers[0], "a/b");
    assert_string_equal(r.headers[1], "7");
    assert_null(r.headers[2]);
    char *text = xstrdup(r.body.data ? r.body.data : "");
    http_response_release(&r);
    return text;
}

static void assert_begins(const char *text, const char *begin) {
    if (strncmp(text, begin, strlen(begin)) != 0) fail_msg("'%s', not '%s'", text, begin);
}

static void test_methods(void **state) {
    (void)state;
    static const struct {
        const char *method, *body, *begin;
    } cases[] = {{"GET", NULL, "GET /echo HTTP/1.1\r\n"},
                 {"POST", "{}", "POST /echo HTTP/1.1\r\n"},
                 {"POST", "", "POST /echo HTTP/1.1\r\n"},
                 {"PUT", "x", "PUT /echo HTTP/1.1\r\n"},
                 {"DELETE", NULL, "DELETE /echo HTTP/1.1\r\n"}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct strings headers = {0};
        strings_add(&headers, "Content-Type: application/json");
        strings_add(&headers, "Authorization: Bearer " SECRET);
        char *text = echo(cases[i].method, cases[i].body, &headers);
        assert_begins(text, cases[i].begin);
        assert_non_null(strstr(text, "\r\nAuthorization: Bearer " SECRET "\r\n"));
        assert_string_equal(strstr(text, "\r\n\r\n") + 4, cases[i].body ? cases[i].body : "");
        free(text);
        strings_release(&headers);
    }
    struct http_request q = request_to("echo");
    struct http_response r;
    q.method = "HEAD";
    assert_int_equal(http_request(&q, &r, &err), OK);
    assert_string_equal(r.headers[1], "7");
    assert_int_equal(r.body.len, 0);
    http_response_release(&r);
}

static void test_statuses(void **state) {
    (void)state;
    struct http_request q = request_to("missing");
    struct http_response r;
    assert_int_equal(http_request(&q, &r, &err), OK);
    assert_int_equal(r.status, 404);
    assert_string_equal(r.body.data, "gone");
    http_response_release(&r);
    q = request_to("redirect");
    assert_int_equal(http_request(&q, &r, &err), OK);
    assert_int_equal(r.status, 307);
    http_response_release(&r);
    assert_int_equal(http_post_json(request_to("missing").url, "{}", 5, &err), ERR_IO);
    assert_string_equal(err.text, "status 404");
    assert_int_equal(http_post_json(request_to("echo").url, "{}", 5, &err), OK);
}

struct parts {
    int n, stop_after;
    double first, last; /* times of clock_now */
    struct buf text;
};

static bool on_part(void *ctx, const struct http_response *r, const char *data, size_t len) {
    struct parts *p = ctx;
    assert_int_equal(r->status, 200);
    assert_string_equal(r->headers[0], "a/b");
    p->last = clock_now();
    if (p->n++ == 0) p->first = p->last;
    buf_add(&p->text, data, len);
    return p->n != p->stop_after;
}

static void test_streams(void **state) {
    (void)state;
    for (int stop_after = 0; stop_after < 2; stop_after++) {
        struct http_request q = request_to("slow");
        struct http_response r;
        struct parts p = {.stop_after = stop_after};
        q.on_body = on_part;
        q.ctx = &p;
        assert_int_equal(http_request(&q, &r, &err), OK);
        assert_int_equal(r.stopped, stop_after);
        assert_string_equal(p.text.data, stop_after ? "part 0\n" : "part 0\npart 1\npart 2\n");
        assert_true(stop_after || p.last - p.first > 0.1);
        assert_int_equal(r.body.len, 0);
        http_response_release(&r);
        buf_release(&p.text);
    }
}

static void *cancel_soon(void *ctx) {
    usleep(200000);
    atomic_store((atomic_bool *)ctx, true);
    return NULL;
}

static void test_limits(void **state) {
    (void)state;
    struct http_response r;
    struct http_request q = request_to("endless");
    assert_int_equal(http_request(&q, &r, &err), ERR_MEMORY);
    assert_string_equal(err.text, "the response has more than 65536 bytes");
    assert_true(r.body.len <= 1 << 16);
    http_response_release(&r);

    q = request_to("silent");
    q.seconds = 0.3;
    assert_int_equal(http_request(&q, &r, &err), ERR_IO);
    http_response_release(&r);

    q = request_to("stall");
    q.seconds = 0;
    q.idle_seconds = 1;
    double begin = clock_now();
    assert_int_equal(http_request(&q, &r, &err), ERR_IO);
    assert_true(clock_now() - begin < 10);
    assert_int_equal(r.status, 200);
    http_response_release(&r);

    q = request_to("broken");
    assert_int_equal(http_request(&q, &r, &err), ERR_IO);
    http_response_release(&r);
}

static void test_cancel(void **state) {
    (void)state;
    atomic_bool cancel = false;
    pthread_t thread;
    struct http_request q = request_to("silent");
    struct http_response r;
    q.cancel = &cancel;
    pthread_create(&thread, NULL, cancel_soon, &cancel);
    double begin = clock_now();
    assert_int_equal(http_request(&q, &r, &err), ERR_STATE);
    assert_string_equal(err.text, "cancelled");
    assert_true(clock_now() - begin < 5);
    pthread_join(thread, NULL);
    http_response_release(&r);
}

/* Addresses and headers that are refused; no message contains the secret. */
static void test_refusals(void **state) {
    (void)state;
    static const struct {
        const char *url;
        int code;
    } urls[] = {{"", ERR_USAGE},
                {"file:///etc/" SECRET, ERR_USAGE},
                {"ftp://127.0.0.1/" SECRET, ERR_USAGE},
                {"http://", ERR_USAGE},
                {"http://127.0.0.1:1/" SECRET, ERR_IO},
                {"http://" SECRET ".invalid/", ERR_IO}};
    static const char *const headers[] = {SECRET, ": " SECRET, "A: " SECRET "\r\nB: c", "A: b\n"};
    struct http_response r;
    for (size_t i = 0; i < ARRAY_LEN(urls); i++) {
        struct http_request q = request_to("");
        q.url = urls[i].url;
        if (http_request(&q, &r, &err) != urls[i].code) fail_msg("%s: %s", q.url, err.text);
        assert_null(strstr(err.text, SECRET));
        http_response_release(&r);
    }
    for (size_t i = 0; i < ARRAY_LEN(headers); i++) {
        struct strings list = {0};
        struct http_request q = request_to("echo");
        strings_add(&list, headers[i]);
        q.headers = &list;
        assert_int_equal(http_request(&q, &r, &err), ERR_USAGE);
        assert_null(strstr(err.text, SECRET));
        http_response_release(&r);
        strings_release(&list);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_methods), cmocka_unit_test(test_statuses),
        cmocka_unit_test(test_streams), cmocka_unit_test(test_limits),
        cmocka_unit_test(test_cancel),  cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
