/*
 * hub_server: a hub for test_hub, in a separate process: Hugging Face's routes on one port, the
 * host that large files are redirected to on a second, and the hub's port again with TLS.
 *
 * Files, faults and counters are in memory that both processes share: a test writes `files` and
 * faults between requests and reads the counters. Faults named n_* count down, one per request.
 * libmicrohttpd implements HTTP; the server uses no code of the tested client.
 */
#ifndef SHOAL_TEST_HUB_SERVER_H
#define SHOAL_TEST_HUB_SERVER_H

#include <inttypes.h>
#include <microhttpd.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SERVED_FILES = 8, SERVED_MAX = 1 << 20 };

struct served_file {
    char path[64], sha256[65],
        blob[41]; /* sha256 empty: a small file, which the hub itself serves */
    size_t size;
    uint8_t data[SERVED_MAX];
};

struct hub_state {
    uint16_t hub_port, cdn_port, tls_port;
    int n_files;
    struct served_file files[SERVED_FILES];
    char commit[41], listing[2048]; /* listing: sent instead of the correct one unless empty */
    char token[64];                 /* the token that the hub requires, if not empty */
    /* faults */
    int n_hub_fails, n_cdn_fails, fail_status, retry_after;
    char fail_code[32];                       /* X-Error-Code */
    int n_drops, n_stalls;                    /* of large files */
    size_t drop_after;                        /* bytes of a response */
    bool corrupt, no_ranges, longer, endless; /* endless: an error message without end */
    int slow_us, etag; /* a pause after every 4 KB; a number in the etags of the second host */
    /* counters */
    uint64_t endless_bytes;
    int n_listings, n_cdn, n_partial, n_if_range, n_tokens_hub, n_tokens_cdn;
    size_t cdn_bytes;
    char cert[2048], key[4096];
};

struct transfer {
    struct hub_state *h;
    const struct served_file *file;
    size_t offset, sent, drop_after;
    bool stall;
};

static ssize_t send_chunk(void *ctx, uint64_t pos, char *out, size_t max) {
    struct transfer *s = ctx;
    size_t offset = s->offset + pos, n = s->file->size - offset;
    if (s->h->longer && n == 0) n = 16, offset = 0;
    if (n > max) n = max;
    if (n > 4096) n = 4096;
    if (s->drop_after && s->sent >= s->drop_after) return MHD_CONTENT_READER_END_WITH_ERROR;
    if (s->stall && s->sent > 0) sleep(5);
    if (s->h->slow_us) usleep((unsigned)s->h->slow_us);
    memcpy(out, s->file->data + offset, n);
    if (s->h->corrupt) out[0] ^= 1;
    s->sent += n;
    __sync_fetch_and_add(&s->h->cdn_bytes, n);
    return (ssize_t)n;
}

static enum MHD_Result answer(struct MHD_Connection *c, unsigned status, struct MHD_Response *r) {
    enum MHD_Result ok = MHD_queue_response(c, status, r);
    MHD_destroy_response(r);
    return ok;
}

static enum MHD_Result answer_text(struct MHD_Connection *c, unsigned status, const char *text) {
    return answer(c, status,
                  MHD_create_response_from_buffer(strlen(text), (void *)(uintptr_t)text,
                                                  MHD_RESPMEM_MUST_COPY));
}

static ssize_t send_endless(void *ctx, uint64_t pos, char *out, size_t max) {
    struct hub_state *h = ctx;
    (void)pos;
    memset(out, 'x', max);
    __sync_fetch_and_add(&h->endless_bytes, max);
    return (ssize_t)max;
}

static enum MHD_Result answer_failure(struct hub_state *h, struct MHD_Connection *c) {
    struct MHD_Response *r =
        h->endless
            ? MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1 << 16, send_endless, h, NULL)
            : MHD_create_response_from_buffer(4, (void *)"fail", MHD_RESPMEM_MUST_COPY);
    char text[16];
    snprintf(text, sizeof text, "%d", h->retry_after);
    if (h->retry_after) MHD_add_response_header(r, "Retry-After", text);
    if (*h->fail_code) MHD_add_response_header(r, "X-Error-Code", h->fail_code);
    return answer(c, (unsigned)h->fail_status, r);
}

static bool count_down(int *n) {
    return *n > 0 && (*n)--;
}

static const char *header_get(struct MHD_Connection *c, const char *name) {
    return MHD_lookup_connection_value(c, MHD_HEADER_KIND, name);
}

static const struct served_file *file_find(struct hub_state *h, const char *path) {
    for (int i = 0; i < h->n_files; i++)
        if (strcmp(h->files[i].path, path) == 0) return &h->files[i];
    return NULL;
}

/* The second host: ranges, and all faults of a download. */
static enum MHD_Result on_cdn(void *ctx, struct MHD_Connection *c, const char *url, const char *m,
                              const char *v, const char *up, size_t *up_size, void **con) {
    struct hub_state *h = ctx;
    (void)m, (void)v, (void)up, (void)up_size, (void)con;
    h->n_cdn++;
    if (header_get(c, "Authorization")) h->n_tokens_cdn++;
    const struct served_file *f = file_find(h, url + 1);
    if (!f) return answer_text(c, 404, "no such file");
    if (count_down(&h->n_cdn_fails)) return answer_failure(h, c);
    const char *range = header_get(c, "Range"), *if_range = header_get(c, "If-Range");
    char etag[32], text[96];
    snprintf(etag, sizeof etag, "\"tag-%d\"", h->etag);
    if (if_range) h->n_if_range++;
    size_t offset = range && !h->no_ranges && (!if_range || strcmp(if_range, etag) == 0)
                        ? strtoul(range + strlen("bytes="), NULL, 10)
                        : 0;
    struct transfer *s = calloc(1, sizeof *s);
    *s = (struct transfer){.h = h, .file = f, .offset = offset};
    if (count_down(&h->n_drops)) s->drop_after = h->drop_after;
    s->stall = count_down(&h->n_stalls);
    uint64_t size = h->longer ? MHD_SIZE_UNKNOWN : f->size - offset;
    struct MHD_Response *r = MHD_create_response_from_callback(size, 4096, send_chunk, s, free);
    MHD_add_response_header(r, "ETag", etag);
    snprintf(text, sizeof text, "bytes %zu-%zu/%zu", offset, f->size - 1, f->size);
    if (offset) MHD_add_response_header(r, "Content-Range", text), h->n_partial++;
    return answer(c, offset ? 206 : 200, r);
}

static enum MHD_Result answer_listing(struct hub_state *h, struct MHD_Connection *c) {
    static const char head[] =
        "{\"id\":\"school/fry\",\"gated\":false,\"sha\":\"%s\",\"siblings\":[";
    char text[8192];
    int n = snprintf(text, sizeof text, head, h->commit);
    for (int i = 0; i < h->n_files; i++) {
        const struct served_file *f = &h->files[i];
        n += snprintf(text + n, sizeof text - (size_t)n,
                      "%s{\"rfilename\":\"%s\",\"size\":%zu,\"blobId\":\"%s\"", i ? "," : "",
                      f->path, f->size, f->blob);
        if (*f->sha256)
            n += snprintf(text + n, sizeof text - (size_t)n,
                          ",\"lfs\":{\"sha256\":\"%s\",\"size\":%zu,\"pointerSize\":134}",
                          f->sha256, f->size);
        n += snprintf(text + n, sizeof text - (size_t)n, "}");
    }
    snprintf(text + n, sizeof text - (size_t)n, "]}");
    return answer_text(c, 200, *h->listing ? h->listing : text);
}

/* This host serves small files under a second address; the second host serves large ones. */
static enum MHD_Result answer_file(struct hub_state *h, struct MHD_Connection *c, const char *path,
                                   bool cached) {
    const struct served_file *f = file_find(h, path);
    if (!f) return answer_text(c, 404, "no such file");
    struct MHD_Response *r;
    char text[160];
    if (cached) {
        r = MHD_create_response_from_buffer(f->size, (void *)(uintptr_t)f->data,
                                            MHD_RESPMEM_MUST_COPY);
        snprintf(text, sizeof text, "\"%s\"", f->blob);
        MHD_add_response_header(r, "ETag", text);
        return answer(c, 200, r);
    }
    r = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    if (*f->sha256)
        snprintf(text, sizeof text, "http://127.0.0.1:%u/%s?signature=x", h->cdn_port, f->path);
    else
        snprintf(text, sizeof text, "/cached/%d", (int)(f - h->files));
    MHD_add_response_header(r, "Location", text);
    snprintf(text, sizeof text, "\"%s\"", *f->sha256 ? f->sha256 : f->blob);
    MHD_add_response_header(r, "X-Linked-ETag", text);
    MHD_add_response_header(r, "X-Repo-Commit", h->commit);
    return answer(c, 302, r);
}

static enum MHD_Result on_hub(void *ctx, struct MHD_Connection *c, const char *url, const char *m,
                              const char *v, const char *up, size_t *up_size, void **con) {
    struct hub_state *h = ctx;
    (void)m, (void)v, (void)up, (void)up_size, (void)con;
    static const char api[] = "/api/models/school/fry/revision/";
    char resolve[96];
    int n = snprintf(resolve, sizeof resolve, "/school/fry/resolve/%s/", h->commit);
    const char *token = header_get(c, "Authorization");
    bool known = token && strncmp(token, "Bearer ", 7) == 0 && strcmp(token + 7, h->token) == 0;
    if (token) h->n_tokens_hub++;
    if (count_down(&h->n_hub_fails)) return answer_failure(h, c);
    if (*h->token && !known) return answer_text(c, 401, "Invalid credentials");
    if (strncmp(url, api, sizeof api - 1) == 0) {
        const char *blobs = MHD_lookup_connection_value(c, MHD_GET_ARGUMENT_KIND, "blobs");
        h->n_listings++;
        return blobs ? answer_listing(h, c) : answer_text(c, 400, "no blobs");
    }
    if (strncmp(url, "/cached/", 8) == 0 && atoi(url + 8) < h->n_files)
        return answer_file(h, c, h->files[atoi(url + 8)].path, true);
    return strncmp(url, resolve, (size_t)n) == 0 ? answer_file(h, c, url + n, false)
                                                 : answer_text(c, 404, "no such page");
}

static uint16_t daemon_port(struct MHD_Daemon *d) {
    return d ? MHD_get_daemon_info(d, MHD_DAEMON_INFO_BIND_PORT)->port : 0;
}

/* Serves until it is killed or its parent dies. */
static void serve(struct hub_state *h, int ready) {
    unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_IGN);
    h->hub_port = daemon_port(MHD_start_daemon(flags, 0, NULL, NULL, on_hub, h, MHD_OPTION_END));
    h->cdn_port = daemon_port(MHD_start_daemon(flags, 0, NULL, NULL, on_cdn, h, MHD_OPTION_END));
    if (*h->cert)
        h->tls_port = daemon_port(MHD_start_daemon(
            flags | MHD_USE_TLS, 0, NULL, NULL, on_hub, h, MHD_OPTION_HTTPS_MEM_CERT, h->cert,
            MHD_OPTION_HTTPS_MEM_KEY, h->key, MHD_OPTION_END));
    if (write(ready, "", 1) != 1) _exit(1);
    for (;;) pause();
}

/* NULL if the ports are not available. */
static struct hub_state *hub_start(const char *cert, const char *key, pid_t *pid) {
    struct hub_state *h =
        mmap(NULL, sizeof *h, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int ready[2];
    char byte;
    if (h == MAP_FAILED || pipe(ready) < 0) return NULL;
    snprintf(h->cert, sizeof h->cert, "%s", cert);
    snprintf(h->key, sizeof h->key, "%s", key);
    *pid = fork();
    if (*pid == 0) serve(h, ready[1]);
    bool is_up = *pid > 0 && read(ready[0], &byte, 1) == 1 && h->hub_port && h->cdn_port;
    close(ready[0]);
    close(ready[1]);
    return is_up ? h : NULL;
}

#endif
