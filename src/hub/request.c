/*
 * request: requests of any method to servers that the user names, with responses that are read as
 * they arrive.
 *
 * Every request has its own connection. libcurl's messages that could quote the address, a header
 * or a body are not used: curl_easy_strerror quotes none of them.
 */
#define _GNU_SOURCE
#include "hub/hub.h"
#include "hub/libcurl.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static _Thread_local const struct libcurl *lib;

struct transfer {
    CURL *curl;
    const struct http_request *q;
    struct http_response *out;
    size_t received;    /* bytes of the body */
    bool has_head;      /* status and headers of `out` are set */
    bool is_over_limit; /* the body has more than max_body bytes */
};

/* The status and the headers of the response, once the final ones have arrived. */
static void head_read(struct transfer *t) {
    long status = 0;
    if (t->has_head) return;
    lib->curl_easy_getinfo(t->curl, CURLINFO_RESPONSE_CODE, &status);
    t->out->status = (int)status;
    for (int i = 0; i < HTTP_KEPT_HEADERS && t->q->keep_headers[i]; i++) {
        struct curl_header *h;
        if (lib->curl_easy_header(t->curl, t->q->keep_headers[i], 0, CURLH_HEADER, -1, &h) ==
            CURLHE_OK)
            t->out->headers[i] = xstrdup(h->value);
    }
    t->has_head = true;
}

static size_t on_data(char *data, size_t size, size_t n, void *ctx) {
    struct transfer *t = ctx;
    (void)size; // always 1
    head_read(t);
    t->is_over_limit = n > t->q->max_body - t->received;
    if (t->is_over_limit) return CURL_WRITEFUNC_ERROR;
    t->received += n;
    if (!t->q->on_body)
        buf_add(&t->out->body, data, n);
    else if (!t->q->on_body(t->q->ctx, t->out, data, n))
        t->out->stopped = true;
    return t->out->stopped ? CURL_WRITEFUNC_ERROR : n;
}

/* Called at least once a second. Non-zero ends the transfer. */
static int on_progress(void *ctx, curl_off_t total, curl_off_t done, curl_off_t up_total,
                       curl_off_t up_done) {
    const struct transfer *t = ctx;
    (void)total, (void)done, (void)up_total, (void)up_done;
    return atomic_load(t->q->cancel);
}

bool http_url_is_local(const char *url) {
    struct error ignored; // without the library nothing is sent
    if (!(lib = libcurl_load(&ignored))) return false;
    CURLU *u = lib->curl_url();
    char *host = NULL;
    CHECK(u);
    bool is_local = lib->curl_url_set(u, CURLUPART_URL, url, 0) == CURLUE_OK &&
                    lib->curl_url_get(u, CURLUPART_HOST, &host, 0) == CURLUE_OK &&
                    (strcasecmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
                     strcmp(host, "[::1]") == 0);
    lib->curl_free(host);
    lib->curl_url_cleanup(u);
    return is_local;
}

/* *list is NULL after an error. */
static int headers_make(const struct http_request *q, struct curl_slist **list, struct error *err) {
    *list = NULL;
    for (int i = 0; q->headers && i < q->headers->n; i++) {
        const char *line = q->headers->v[i], *colon = strchr(line, ':');
        if (!colon || colon == line || strcspn(line, "\r\n") != strlen(line)) {
            lib->curl_slist_free_all(*list);
            *list = NULL;
            return error_set(err, ERR_USAGE, "header %d of the request is not a line 'Name: value'",
                             i + 1);
        }
        struct curl_slist *more = lib->curl_slist_append(*list, line);
        CHECK(more);
        *list = more;
    }
    return OK;
}

static void options_set(struct transfer *t, struct curl_slist *headers) {
    const struct http_request *q = t->q;
    CURL *c = t->curl;
    lib->curl_easy_setopt(c, CURLOPT_URL, q->url);
    lib->curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http,https");
    if (q->body) {
        lib->curl_easy_setopt(c, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)q->body_len);
        lib->curl_easy_setopt(c, CURLOPT_POSTFIELDS, q->body);
    }
    if (strcmp(q->method, "HEAD") == 0)
        lib->curl_easy_setopt(c, CURLOPT_NOBODY, 1L);
    else if (strcmp(q->method, q->body ? "POST" : "GET") != 0)
        lib->curl_easy_setopt(c, CURLOPT_CUSTOMREQUEST, q->method);
    lib->curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers);
    if (q->ca_file) lib->curl_easy_setopt(c, CURLOPT_CAINFO, q->ca_file);
    lib->curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    lib->curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, (long)(q->seconds * 1000));
    lib->curl_easy_setopt(c, CURLOPT_LOW_SPEED_LIMIT, 1L);
    lib->curl_easy_setopt(c, CURLOPT_LOW_SPEED_TIME, (long)(q->idle_seconds + 0.999));
    lib->curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_data);
    lib->curl_easy_setopt(c, CURLOPT_WRITEDATA, t);
    if (q->cancel) {
        lib->curl_easy_setopt(c, CURLOPT_XFERINFOFUNCTION, on_progress);
        lib->curl_easy_setopt(c, CURLOPT_XFERINFODATA, t);
        lib->curl_easy_setopt(c, CURLOPT_NOPROGRESS, 0L);
    }
    if (http_url_is_local(q->url)) lib->curl_easy_setopt(c, CURLOPT_PROXY, "");
    lib->curl_easy_setopt(c, CURLOPT_USERAGENT, "shoal/" SHOAL_VERSION);
}

static int transfer_run(struct transfer *t, struct error *err) {
    CURLcode code = lib->curl_easy_perform(t->curl);
    if (code == CURLE_OK) head_read(t); // a response without a body
    if (code == CURLE_OK || t->out->stopped) return OK;
    if (t->is_over_limit)
        return error_set(err, ERR_MEMORY, "the response has more than %zu bytes", t->q->max_body);
    if (code == CURLE_ABORTED_BY_CALLBACK) return error_set(err, ERR_STATE, "cancelled");
    if (code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_URL_MALFORMAT)
        return error_set(err, ERR_USAGE, "expected http://… or https://…");
    return error_set(err, ERR_IO, "%s", lib->curl_easy_strerror(code));
}

int http_request(const struct http_request *q, struct http_response *out, struct error *err) {
    struct curl_slist *headers;
    *out = (struct http_response){0};
    if (!(lib = libcurl_load(err))) return err->code;
    lib->curl_global_init(CURL_GLOBAL_DEFAULT); // reference-counted
    struct transfer t = {.curl = lib->curl_easy_init(), .q = q, .out = out};
    CHECK(t.curl);
    int rc = headers_make(q, &headers, err);
    if (rc == OK) {
        options_set(&t, headers);
        rc = transfer_run(&t, err);
    }
    lib->curl_slist_free_all(headers);
    lib->curl_easy_cleanup(t.curl);
    lib->curl_global_cleanup();
    return rc;
}

void http_response_release(struct http_response *r) {
    for (int i = 0; i < HTTP_KEPT_HEADERS; i++) free(r->headers[i]);
    buf_release(&r->body);
    *r = (struct http_response){0};
}

static bool discard(void *ctx, const struct http_response *r, const char *data, size_t len) {
    (void)ctx, (void)r, (void)data, (void)len;
    return true;
}

int http_post_json(const char *url, const char *body, double seconds, struct error *err) {
    char type[] = "Content-Type: application/json", *lines[] = {type};
    const struct strings headers = {lines, 1};
    struct http_response r;
    int rc = http_request(&(struct http_request){.method = "POST",
                                                 .url = url,
                                                 .headers = &headers,
                                                 .body = body,
                                                 .body_len = strlen(body),
                                                 .max_body = SIZE_MAX,
                                                 .seconds = seconds,
                                                 .on_body = discard},
                          &r, err);
    if (rc == OK && (r.status < 200 || r.status > 299))
        rc = error_set(err, ERR_IO, "status %d", r.status);
    http_response_release(&r);
    return rc;
}
