/*
 * load: measures the latencies of many concurrent clients of a server, each of which sends one
 * streaming request after another.
 *
 *   build/load PORT STREAMS SECONDS MEAN_TOKENS MODEL [MODEL …]
 *   build/load PORT STREAMS SECONDS idle PATH       streams of PATH with almost no events; the key
 *                                                   is in $SHOAL_KEY
 *
 * It uses one thread and epoll, so that it takes little processor time from the server. Client i
 * requests model i mod n. Prints one JSON object: replies, errors, tokens per second over the
 * middle of the time, quantiles of the time to the first token and between tokens.
 */
#define _GNU_SOURCE
#include "tally.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { TAIL = 32 };

struct client {
    int fd, number, max_tokens; /* max_tokens: of the current request */
    bool done;
    double sent_at, first, last; /* last: 0 before the first token */
    char tail[TAIL];             /* last bytes, for matches across two reads */
    size_t n_tail;
    int status;
    int64_t bytes_read; /* of the current reply */
};
static struct sockaddr_in server;
static char **models;
static int n_models, mean_tokens;
static const char *idle_path;
static struct tally tally;
static uint64_t n_requests;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void request_send(struct client *c) {
    char body[1024], head[1400];
    int n = 0;
    if (idle_path) {
        const char *key = getenv("SHOAL_KEY");
        n = snprintf(head, sizeof head,
                     "GET %s HTTP/1.1\r\nHost: localhost\r\nX-API-Key: %.500s\r\n\r\n", idle_path,
                     key ? key : "");
    } else {
        c->max_tokens = tally_reply_length(++n_requests, mean_tokens);
        int len =
            snprintf(body, sizeof body,
                     "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"%llu + "
                     "%d = ?\"}],\"stream\":true,\"ignore_eos\":true,\"max_tokens\":%d,"
                     "\"seed\":1}",
                     models[c->number % n_models], (unsigned long long)n_requests % 900,
                     c->number % 90, c->max_tokens);
        n = snprintf(head, sizeof head,
                     "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                     "application/json\r\nContent-Length: %d\r\n\r\n%s",
                     len, body);
    }
    c->sent_at = now();
    c->last = 0;
    c->status = 0;
    c->bytes_read = 0;
    c->n_tail = 0;
    if (write(c->fd, head, (size_t)n) != n) tally.errors++;
}

static int connect_to_server(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&server, sizeof server) != 0) {
        perror("load: connect");
        exit(1);
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* Counts the events with a token: those with content. The first event has only the role. */
static void reply_parse(struct client *c, const char *data, size_t n) {
    char *text = malloc(c->n_tail + n + 1), *at = text;
    double t = now();
    bool complete = false;
    memcpy(text, c->tail, c->n_tail);
    memcpy(text + c->n_tail, data, n);
    text[c->n_tail + n] = 0;
    size_t len = c->n_tail + n;
    if (c->bytes_read == 0 && sscanf(text, "HTTP/1.1 %d", &c->status) == 1 && c->status != 200)
        tally.errors++;
    c->bytes_read += (int64_t)n;
    for (char *hit; (hit = strstr(at, "\"delta\":{\"content\""));) {
        tally_add_token(&tally, t, c->sent_at, c->last);
        if (c->last == 0) c->first = t;
        c->last = t;
        at = hit + 18;
    }
    complete = strstr(at, "\r\n0\r\n\r\n") != NULL || (c->status != 200 && strstr(at, "}"));
    size_t n_keep = len - (size_t)(at - text);
    if (n_keep > TAIL - 1) n_keep = TAIL - 1;
    memcpy(c->tail, text + len - n_keep, n_keep);
    c->n_tail = n_keep;
    free(text);
    if (!complete) return;
    if (c->status == 200) tally_add_reply(&tally, c->last > 0 ? c->first : t, t, c->max_tokens);
    if (t < tally.began + tally.seconds)
        request_send(c);
    else
        c->done = true;
}

static int run_clients(struct client *v, int n) {
    char *buf = malloc(1 << 18);
    int ep = epoll_create1(0), open = n;
    struct epoll_event e[256];
    for (int i = 0; i < n; i++) {
        v[i] = (struct client){.fd = connect_to_server(), .number = i};
        struct epoll_event in = {.events = EPOLLIN, .data.ptr = &v[i]};
        epoll_ctl(ep, EPOLL_CTL_ADD, v[i].fd, &in);
        request_send(&v[i]);
    }
    while (open > 0 && now() < tally.began + tally.seconds + (idle_path ? 0 : 60)) {
        int got = epoll_wait(ep, e, 256, 200);
        for (int i = 0; i < got; i++) {
            struct client *c = e[i].data.ptr;
            ssize_t r = read(c->fd, buf, 1 << 18);
            if (r > 0) reply_parse(c, buf, (size_t)r);
            if (r < 0 && errno == EAGAIN) continue;
            if (r <= 0) tally.errors += !c->done;
            if (r <= 0 || c->done) {
                epoll_ctl(ep, EPOLL_CTL_DEL, c->fd, NULL);
                close(c->fd);
                open--;
            }
        }
    }
    free(buf);
    return open;
}

int main(int argc, char **argv) {
    struct rlimit limit = {65536, 65536};
    if (argc < 6) {
        fprintf(stderr, "usage: load PORT STREAMS SECONDS MEAN_TOKENS MODEL … | load PORT STREAMS "
                        "SECONDS idle PATH\n");
        return 2;
    }
    setrlimit(RLIMIT_NOFILE, &limit);
    int n = atoi(argv[2]);
    server = (struct sockaddr_in){.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)atoi(argv[1])),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (strcmp(argv[4], "idle") == 0) idle_path = argv[5];
    mean_tokens = atoi(argv[4]);
    models = argv + 5;
    n_models = argc - 5;
    struct client *v = calloc((size_t)n, sizeof *v);
    tally = tally_new(now(), atof(argv[3]));
    int open = run_clients(v, n);
    tally_print(&tally, n, open);
    return tally.errors > 0;
}
