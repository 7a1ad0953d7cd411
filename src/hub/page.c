/*
 * page: requests for addresses that a model or a page has chosen.
 *
 * libcurl parses the address, and the same parsed address is checked and requested, so no second
 * parser can read another host from it. Redirects are followed here, because each one is checked
 * like the first address. The IP address is checked when the connection is opened: a name that
 * changes its address between a check and the request has no effect.
 */
#define _GNU_SOURCE
#include "hub/internal.h"
#include "hub/libcurl.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

enum { MAX_REDIRECTS = 3 };

static const struct libcurl *lib;

struct page_request {
    CURL *curl;
    CURLU *url;
    const struct strings *hosts;
    size_t limit;
    double deadline; /* time of clock_now */
    char *host;      /* host of the current address; freed by curl_free */
    bool may_be_private, refused_address;
    struct http_page *out;
};

/* addresses */

static bool ipv4_is_public(const uint8_t b[4]) {
    static const struct {
        uint8_t prefix[4], bits;
    } special[] = {
        // IANA's registry of special-purpose addresses
        {{0}, 8},         {{10}, 8},       {{100, 64}, 10},      {{127}, 8},
        {{169, 254}, 16}, {{172, 16}, 12}, {{192, 0, 0}, 24},    {{192, 0, 2}, 24},
        {{192, 168}, 16}, {{198, 18}, 15}, {{198, 51, 100}, 24}, {{203, 0, 113}, 24},
        {{224}, 3}, // multicast, reserved and broadcast
    };
    uint32_t a = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
    for (size_t i = 0; i < ARRAY_LEN(special); i++) {
        const uint8_t *p = special[i].prefix;
        uint32_t prefix = (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
        if ((a ^ prefix) >> (32 - special[i].bits) == 0) return false;
    }
    return true;
}

static bool ipv6_is_public(const uint8_t b[16]) {
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff}, nat64[12] = {0, 0x64, 0xff, 0x9b},
                         documentation[] = {0x20, 1, 0x0d, 0xb8};
    if (memcmp(b, mapped, 12) == 0 || memcmp(b, nat64, 12) == 0) return ipv4_is_public(b + 12);
    if (b[0] == 0x20 && b[1] == 2) return ipv4_is_public(b + 2); // 6to4
    if (b[0] == 0x20 && b[1] == 1 && b[2] < 2) return false;     // Teredo and protocols
    return b[0] >> 5 == 1 && memcmp(b, documentation, 4) != 0;   // 2000::/3
}

bool address_is_public(const struct sockaddr *a) {
    if (a->sa_family == AF_INET)
        return ipv4_is_public((const uint8_t *)&((const struct sockaddr_in *)a)->sin_addr);
    return a->sa_family == AF_INET6 &&
           ipv6_is_public(((const struct sockaddr_in6 *)a)->sin6_addr.s6_addr);
}

static curl_socket_t open_socket(void *ctx, curlsocktype purpose, struct curl_sockaddr *a) {
    struct page_request *r = ctx;
    if (purpose != CURLSOCKTYPE_IPCXN) return CURL_SOCKET_BAD;
    if (!r->may_be_private && !address_is_public(&a->addr)) {
        r->refused_address = true;
        return CURL_SOCKET_BAD;
    }
    return socket(a->family, a->socktype | SOCK_CLOEXEC, a->protocol);
}

/* hosts */

/* A part of the address, for curl_free; NULL if it is missing. */
static char *url_part(CURLU *u, CURLUPart part, unsigned flags) {
    char *text = NULL;
    return lib->curl_url_get(u, part, &text, flags) == CURLUE_OK ? text : NULL;
}

static bool host_is_listed(const struct strings *hosts, const char *host, const char *port,
                           bool is_default) {
    char *full = xasprintf("%s:%s", host, port);
    bool found = false;
    for (int i = 0; i < hosts->n; i++)
        found = found || strcasecmp(hosts->v[i], full) == 0 ||
                (is_default && strcasecmp(hosts->v[i], host) == 0);
    free(full);
    return found;
}

static bool host_is_literal(const char *host) {
    struct in_addr ignored;
    return host[0] == '[' || inet_pton(AF_INET, host, &ignored) == 1 ||
           strcasecmp(host, "localhost") == 0;
}

static int host_error(const struct page_request *r, const char *port, bool is_default,
                      struct error *err) {
    struct buf list = {0};
    for (int i = 0; i < r->hosts->n; i++) buf_printf(&list, "%s%s", i ? ", " : "", r->hosts->v[i]);
    error_set(err, ERR_STATE, "host '%.300s%s%s' is not allowed; allowed: %.1000s", r->host,
              is_default ? "" : ":", is_default ? "" : port, list.len ? list.data : "none");
    buf_release(&list);
    return err->code;
}

/* Whether the current address may be requested. */
static int address_check(struct page_request *r, struct error *err) {
    char *user = url_part(r->url, CURLUPART_USER, 0),
         *password = url_part(r->url, CURLUPART_PASSWORD, 0),
         *scheme = url_part(r->url, CURLUPART_SCHEME, 0),
         *port = url_part(r->url, CURLUPART_PORT, CURLU_DEFAULT_PORT);
    int rc = OK;
    lib->curl_free(r->host);
    r->host = url_part(r->url, CURLUPART_HOST, 0);
    bool https = scheme && strcmp(scheme, "https") == 0;
    bool is_default = port && strcmp(port, https ? "443" : "80") == 0;
    if (user || password)
        rc = error_set(err, ERR_USAGE, "the address has a user name or password; leave it out");
    else if (!r->host || !port || !scheme || (!https && strcmp(scheme, "http") != 0))
        rc = error_set(err, ERR_USAGE, "expected http://… or https://…");
    else if (!host_is_listed(r->hosts, r->host, port, is_default))
        rc = host_error(r, port, is_default, err);
    else
        r->may_be_private = host_is_literal(r->host);
    char *const parts[] = {user, password, scheme, port};
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) lib->curl_free(parts[i]);
    return rc;
}

static int address_set(struct page_request *r, const char *url, struct error *err) {
    if (lib->curl_url_set(r->url, CURLUPART_URL, url, CURLU_URLENCODE) != CURLUE_OK)
        return error_set(err, ERR_USAGE, "expected http://… or https://…");
    return address_check(r, err);
}

/* requests */

/* Keeps the first `limit` bytes and then ends the transfer. */
static size_t on_body(char *data, size_t size, size_t n, void *ctx) {
    struct page_request *r = ctx;
    size_t room = r->limit - r->out->body.len;
    (void)size; // always 1
    buf_add(&r->out->body, data, MIN(n, room));
    return n <= room ? n : 0;
}

static void options_set(struct page_request *r) {
    lib->curl_easy_setopt(r->curl, CURLOPT_PROTOCOLS_STR, "http,https");
    lib->curl_easy_setopt(r->curl, CURLOPT_FOLLOWLOCATION, 0L);
    lib->curl_easy_setopt(r->curl, CURLOPT_PROXY, "");
    lib->curl_easy_setopt(r->curl, CURLOPT_NOSIGNAL, 1L);
    lib->curl_easy_setopt(r->curl, CURLOPT_OPENSOCKETFUNCTION, open_socket);
    lib->curl_easy_setopt(r->curl, CURLOPT_OPENSOCKETDATA, r);
    // A connection is not used again: a kept one to a private address would skip the check.
    lib->curl_easy_setopt(r->curl, CURLOPT_FORBID_REUSE, 1L);
    lib->curl_easy_setopt(r->curl, CURLOPT_WRITEFUNCTION, on_body);
    lib->curl_easy_setopt(r->curl, CURLOPT_WRITEDATA, r);
    lib->curl_easy_setopt(r->curl, CURLOPT_USERAGENT, "shoal/" SHOAL_VERSION);
}

/* Requests the current address. *next: the address that the server redirects to, or NULL. */
static int page_request_send(struct page_request *r, const char **next, struct error *err) {
    long status = 0, left = (long)((r->deadline - clock_now()) * 1000);
    r->out->body.len = 0;
    r->refused_address = false;
    *next = NULL;
    lib->curl_easy_setopt(r->curl, CURLOPT_CURLU, r->url);
    lib->curl_easy_setopt(r->curl, CURLOPT_TIMEOUT_MS, MAX(left, 1L));
    CURLcode code = lib->curl_easy_perform(r->curl);
    bool is_full = code == CURLE_WRITE_ERROR && r->out->body.len == r->limit;
    if (code != CURLE_OK && r->refused_address)
        return error_set(err, ERR_STATE, "host '%.300s' has a private address", r->host);
    if (code != CURLE_OK && !is_full)
        return error_set(err, ERR_IO, "%s", lib->curl_easy_strerror(code));
    lib->curl_easy_getinfo(r->curl, CURLINFO_RESPONSE_CODE, &status);
    lib->curl_easy_getinfo(r->curl, CURLINFO_REDIRECT_URL, next);
    if (*next || (status >= 200 && status < 300)) return OK;
    return error_set(err, ERR_IO, "the server answered with status %ld", status);
}

/* Requests addresses until one is not a redirect. */
static int page_request_run(struct page_request *r, const char *url, struct error *err) {
    for (int hops = 0; hops <= MAX_REDIRECTS; hops++) {
        const char *next;
        int rc = address_set(r, url, err);
        if (rc) return hops ? error_wrap(err, "the page redirects to another address") : rc;
        rc = page_request_send(r, &next, err);
        if (rc || !next) return rc;
        url = next; // valid until the next request
    }
    return error_set(err, ERR_IO, "more than %d redirects", MAX_REDIRECTS);
}

int http_get_page(const char *url, const struct strings *hosts, size_t limit, double seconds,
                  struct http_page *out, struct error *err) {
    if (!(lib = libcurl_load(err))) return err->code;
    const char *type = NULL;
    *out = (struct http_page){0};
    lib->curl_global_init(CURL_GLOBAL_DEFAULT); // reference-counted
    struct page_request r = {.curl = lib->curl_easy_init(),
                             .url = lib->curl_url(),
                             .hosts = hosts,
                             .limit = limit,
                             .deadline = clock_now() + seconds,
                             .out = out};
    CHECK(r.curl && r.url);
    options_set(&r);
    int rc = page_request_run(&r, url, err);
    lib->curl_easy_getinfo(r.curl, CURLINFO_CONTENT_TYPE, &type);
    out->type = xstrdup(type ? type : "");
    if (rc) http_page_release(out);
    lib->curl_free(r.host);
    lib->curl_easy_cleanup(r.curl);
    lib->curl_url_cleanup(r.url);
    lib->curl_global_cleanup();
    return rc;
}

void http_page_release(struct http_page *p) {
    free(p->type);
    buf_release(&p->body);
    *p = (struct http_page){0};
}
