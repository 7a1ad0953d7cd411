/*
 * fetch: sends one request at a time to the hub, and repeats a request that failed for a temporary
 * reason.
 *
 * It knows the hub's routes and responses, not the meaning of the files. It does not download in
 * parallel: one connection, kept between files, saturates the links of small machines. libcurl
 * follows redirects, verifies TLS and honours the proxy variables.
 *
 * Invariants:
 *   1. The token leaves this file in one header only, which libcurl drops when a redirect leads
 *      to another host, port or scheme. A redirect never leads from https to http.
 *   2. The bytes of a partial file are a prefix of the expected content, unless the server sent
 *      wrong data. PARTIAL.etag holds the expected hash and the server's ETag for those bytes, and
 *      is written before the first of them. The hash of the whole file decides.
 *   3. An attempt that does not extend the partial file beyond its longest length so far is
 *      counted; MAX_TRIES of them in a row end the request.
 */
#define _GNU_SOURCE
#include "hub/internal.h"
#include "hub/libcurl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const struct libcurl *lib;

enum {
    MAX_TRIES = 6,
    LISTING_LIMIT = 64 << 20,
    DISCARD_LIMIT = 1 << 20, /* bytes of an error response */
    LISTING_SPEED = 128,     /* bytes per second; a slower listing is aborted */
    MAX_RETRY_AFTER = 600,   /* seconds; a longer Retry-After fails the request */
    RETRY = 1,               /* a result of an attempt: it failed, but the next one may succeed */
};

struct hub_client {
    const struct hub_ref *name;
    CURL *curl;
    char *endpoint, *token; /* endpoint without a trailing slash; token NULL if unset */
    double backoff;
    bool reached; /* a connection has succeeded before, so a failed one may be temporary */
    char message[CURL_ERROR_SIZE];
};

/* A file being downloaded. */
struct partial_file {
    const struct hub_file *file;
    const char *path;
    int fd;
    int64_t pos, arrived; /* length of the partial file; bytes of it from this download */
    char etag[256];       /* ETag of the partial file's bytes; "" if the server gave none */
    struct hub_digest digest;
    hub_progress_fn on_progress;
    void *ctx;
};

struct hub_request {
    struct hub_client *client;
    char *url;
    const char *file; /* for messages; NULL: the listing */
    struct buf text;  /* receives the body, unless `part` is set */
    struct partial_file *part;
    /* the current response */
    bool started;
    size_t discarded;
    int rc;                   /* result of processing the body */
    int64_t range_start;      /* where the body begins in the file (Content-Range); -1: unknown */
    char etag[256], code[64]; /* the headers ETag and X-Error-Code; may be empty */
    struct error *err;
};

/* the server and the token */

void hub_url_encode(struct buf *out, const char *text, bool keep_slashes) {
    static const char plain[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~";
    for (const char *p = text; *p; p++) {
        if (strchr(plain, *p) || (*p == '/' && keep_slashes))
            buf_add(out, p, 1);
        else
            buf_printf(out, "%%%02X", (unsigned char)*p);
    }
}

/* Rejects an address with a user name and password, which messages would show. */
static int endpoint_init(struct hub_client *c, struct error *err) {
    const char *text = getenv("HF_ENDPOINT");
    c->endpoint = xstrdup(text && *text ? text : "https://huggingface.co");
    size_t n = strlen(c->endpoint);
    while (n > 0 && c->endpoint[n - 1] == '/') c->endpoint[--n] = '\0';
    if (strpbrk(c->endpoint, "@?# \t\r\n") ||
        (strncmp(c->endpoint, "https://", 8) != 0 && strncmp(c->endpoint, "http://", 7) != 0))
        return error_set(err, ERR_USAGE,
                         "HF_ENDPOINT is not the address of a hub: expected https://HOST, without "
                         "a password or query");
    return OK;
}

/* Path of the token file of the hub's own client; malloc'ed, or NULL without a home. */
static char *token_path(void) {
    const char *path = getenv("HF_TOKEN_PATH"), *hf = getenv("HF_HOME"),
               *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (path && *path) return xstrdup(path);
    if (hf && *hf) return path_join(hf, "token");
    if (xdg && *xdg) return path_join(xdg, "huggingface/token");
    return home && *home ? path_join(home, ".cache/huggingface/token") : NULL;
}

/* Rejects bytes that cannot be in a token: a line break would end the header that carries it. */
static int token_set(struct hub_client *c, const char *text, const char *source,
                     struct error *err) {
    static const char space[] = " \t\r\n";
    text += strspn(text, space);
    size_t n = strcspn(text, space);
    if (n == 0) return OK;
    bool plain = text[n + strspn(text + n, space)] == '\0';
    for (size_t i = 0; i < n; i++) plain = plain && text[i] > ' ' && text[i] < 127;
    if (!plain) return error_set(err, ERR_FORMAT, "the token in %s is not valid", source);
    c->token = strndup(text, n);
    CHECK(c->token != NULL);
    return OK;
}

static int token_init(struct hub_client *c, struct error *err) {
    const char *text = getenv("HF_TOKEN");
    if (text && *text) return token_set(c, text, "HF_TOKEN", err);
    char *path = token_path();
    struct buf b = {0};
    int rc = OK;
    if (path && path_exists(path) && (rc = file_read(path, 4096, &b, err)) == OK)
        rc = token_set(c, b.data, path, err);
    buf_release(&b);
    free(path);
    return rc;
}

static void curl_set_options(struct hub_client *c, const struct hub_options *o) {
    bool https = strncmp(c->endpoint, "https:", 6) == 0;
    lib->curl_easy_setopt(c->curl, CURLOPT_PROTOCOLS_STR, "http,https");
    lib->curl_easy_setopt(c->curl, CURLOPT_REDIR_PROTOCOLS_STR, https ? "https" : "http,https");
    lib->curl_easy_setopt(c->curl, CURLOPT_FOLLOWLOCATION, 1L);
    lib->curl_easy_setopt(c->curl, CURLOPT_MAXREDIRS, 8L);
    lib->curl_easy_setopt(c->curl, CURLOPT_NOSIGNAL, 1L);
    lib->curl_easy_setopt(c->curl, CURLOPT_ERRORBUFFER, c->message);
    lib->curl_easy_setopt(c->curl, CURLOPT_USERAGENT, "shoal/" SHOAL_VERSION);
    lib->curl_easy_setopt(c->curl, CURLOPT_CONNECTTIMEOUT, 30L);
    lib->curl_easy_setopt(c->curl, CURLOPT_LOW_SPEED_TIME, o->stall > 0 ? (long)o->stall : 60L);
}

struct hub_client *hub_client_new(const struct hub_ref *name, const struct hub_options *o,
                                  struct error *err) {
    if (!(lib = libcurl_load(err))) return NULL;
    struct hub_client *c = xcalloc(1, sizeof *c);
    lib->curl_global_init(CURL_GLOBAL_DEFAULT); /* reference-counted: one call per client */
    *c = (struct hub_client){.name = name, .backoff = o->backoff > 0 ? o->backoff : 1};
    c->curl = lib->curl_easy_init();
    CHECK(c->curl != NULL);
    if (endpoint_init(c, err) == OK && token_init(c, err) == OK) {
        curl_set_options(c, o);
        return c;
    }
    hub_client_free(c);
    return NULL;
}

void hub_client_free(struct hub_client *c) {
    if (!c) return;
    lib->curl_easy_cleanup(c->curl);
    lib->curl_global_cleanup();
    free(c->endpoint);
    free(c->token);
    free(c);
}

/* the partial file */

/* Whether PARTIAL.etag shows that the partial file belongs to the expected content. */
static bool etag_load(struct partial_file *p) {
    struct error ignored;
    struct buf b = {0};
    char *path = xasprintf("%s.etag", p->path);
    size_t hash_len = strlen(p->file->hash);
    bool matches = file_read(path, sizeof p->etag + HASH_LEN, &b, &ignored) == OK &&
                   b.len > hash_len && memcmp(b.data, p->file->hash, hash_len) == 0 &&
                   b.data[hash_len] == '\n';
    if (matches) snprintf(p->etag, sizeof p->etag, "%s", b.data + hash_len + 1);
    buf_release(&b);
    free(path);
    return matches;
}

static int etag_save(struct partial_file *p, const char *etag, struct error *err) {
    char *path = xasprintf("%s.etag", p->path), *text = xasprintf("%s\n%s", p->file->hash, etag);
    snprintf(p->etag, sizeof p->etag, "%s", etag);
    int rc = file_write(path, text, strlen(text), err);
    free(path);
    free(text);
    return rc;
}

static int partial_restart(struct partial_file *p, struct error *err) {
    hub_digest_init(&p->digest, p->file);
    p->on_progress(p->ctx, p->file, -p->arrived);
    p->pos = p->arrived = 0;
    p->etag[0] = '\0';
    if (ftruncate(p->fd, 0) < 0 || lseek(p->fd, 0, SEEK_SET) < 0)
        return error_errno(err, "cannot empty '%s'", p->path);
    return OK;
}

/* Hashes the bytes that the partial file has already, so that the rest can be hashed when it
 * arrives. */
static int partial_resume(struct partial_file *p, struct error *err) {
    enum { CHUNK = 256 * 1024 };
    uint8_t *chunk = xmalloc(CHUNK);
    ssize_t n;
    while ((n = read(p->fd, chunk, CHUNK)) > 0) {
        hub_digest_add(&p->digest, chunk, (size_t)n);
        p->pos += n;
    }
    free(chunk);
    return n < 0 ? error_errno(err, "cannot read '%s'", p->path) : OK;
}

static int partial_open(struct partial_file *p, struct error *err) {
    struct stat st;
    p->fd = open(p->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (p->fd < 0 || fstat(p->fd, &st) < 0) return error_errno(err, "cannot create '%s'", p->path);
    if (!S_ISREG(st.st_mode))
        return error_set(err, ERR_STATE, "'%s' is not a regular file: remove it", p->path);
    hub_digest_init(&p->digest, p->file);
    if (!etag_load(p) || st.st_size > p->file->size) return partial_restart(p, err);
    return partial_resume(p, err);
}

/* Called at the beginning of a response's body. The status and Content-Range give the body's
 * position in the file. If this is not the end of the partial file, the partial file is emptied.
 * RETRY: the body cannot be used. */
static int partial_begin(struct partial_file *p, struct hub_request *r, long status) {
    if (status == 206 && r->range_start != p->pos) {
        int rc = partial_restart(p, r->err);
        return rc == OK ? RETRY : rc;
    }
    if (status == 200 &&
        p->pos > 0) { /* the whole file again: the content changed, or the server has no ranges */
        int rc = partial_restart(p, r->err);
        if (rc != OK) return rc;
    }
    return p->pos == 0 ? etag_save(p, r->etag, r->err) : OK;
}

static int partial_write(struct partial_file *p, const uint8_t *data, size_t n, struct error *err) {
    if ((int64_t)n > p->file->size - p->pos)
        return error_set(err, ERR_FORMAT, "'%s' is longer than the %lld bytes that the hub lists",
                         p->file->path, (long long)p->file->size);
    for (size_t done = 0; done < n;) {
        ssize_t n_written = write(p->fd, data + done, n - done);
        if (n_written < 0 && errno == EINTR) continue;
        if (n_written < 0) {
            error_errno(err, "cannot write '%s'", p->path);
            return error_set(err, err->code,
                             "%s; the part that arrived is kept: make room and run it again",
                             err->text);
        }
        hub_digest_add(&p->digest, data + done, (size_t)n_written);
        p->on_progress(p->ctx, p->file, n_written);
        p->pos += n_written, p->arrived += n_written;
        done += (size_t)n_written;
    }
    return OK;
}

/* one attempt */

/* Copies a header's value without the blanks around it; an empty text if it does not fit. */
static void header_copy(const char *value, size_t n, char *out, size_t size) {
    while (n > 0 && (*value == ' ' || *value == '\t')) value++, n--;
    while (n > 0 && (unsigned char)value[n - 1] <= ' ') n--;
    if (n >= size) n = 0; /* a truncated value would be a different one */
    memcpy(out, value, n);
    out[n] = '\0';
}

/* Called for each header line. A status line begins a new response, also after a redirect. */
static size_t on_header(char *line, size_t size, size_t n, void *ctx) {
    struct hub_request *r = ctx;
    (void)size; /* always 1 */
    char *colon = memchr(line, ':', n);
    size_t name_len = colon ? (size_t)(colon - line) : n, value_len = colon ? n - name_len - 1 : 0;
    char range[64];
    if (n > 5 && memcmp(line, "HTTP/", 5) == 0) {
        r->etag[0] = r->code[0] = '\0';
        r->range_start = -1;
    } else if (name_len == 4 && strncasecmp(line, "ETag", 4) == 0) {
        header_copy(colon + 1, value_len, r->etag, sizeof r->etag);
    } else if (name_len == 12 && strncasecmp(line, "X-Error-Code", 12) == 0) {
        header_copy(colon + 1, value_len, r->code, sizeof r->code);
    } else if (name_len == 13 && strncasecmp(line, "Content-Range", 13) == 0) {
        header_copy(colon + 1, value_len, range, sizeof range);
        if (strncasecmp(range, "bytes ", 6) == 0) r->range_start = strtoll(range + 6, NULL, 10);
    }
    return n;
}

static size_t on_body(char *data, size_t size, size_t n, void *ctx) {
    struct hub_request *r = ctx;
    long status = 0;
    (void)size;
    lib->curl_easy_getinfo(r->client->curl, CURLINFO_RESPONSE_CODE, &status);
    if (status != 200 && status != 206) { /* body of an error response; the status is enough */
        r->discarded += n;
        return r->discarded <= DISCARD_LIMIT ? n : 0;
    }
    if (r->part) {
        if (!r->started) r->rc = partial_begin(r->part, r, status);
        r->started = true;
        if (r->rc == OK) r->rc = partial_write(r->part, (uint8_t *)data, n, r->err);
    } else if (n > LISTING_LIMIT - r->text.len) {
        r->rc = error_set(r->err, ERR_FORMAT, "the listing of '%s' is larger than %d bytes",
                          r->client->name->repo, LISTING_LIMIT);
    } else {
        buf_add(&r->text, data, n);
    }
    return r->rc == OK ? n : 0;
}

static struct curl_slist *header_add(struct curl_slist *list, const char *name, const char *value) {
    char *line = xasprintf("%s: %s", name, value);
    struct curl_slist *extended = lib->curl_slist_append(list, line);
    CHECK(extended != NULL);
    free(line);
    return extended;
}

/* The headers of the next attempt. A weak ETag ("W/...") does not identify exact bytes and may not
 * be in If-Range. */
static struct curl_slist *request_headers(const struct hub_request *r) {
    struct curl_slist *list = NULL;
    if (r->client->token) {
        char *bearer = xasprintf("Bearer %s", r->client->token);
        list = header_add(list, "Authorization", bearer);
        free(bearer);
    }
    if (r->part && r->part->pos > 0) {
        char range[40];
        snprintf(range, sizeof range, "bytes=%lld-", (long long)r->part->pos);
        list = header_add(list, "Range", range);
        if (r->part->etag[0] == '"') list = header_add(list, "If-Range", r->part->etag);
    }
    return list;
}

/* Sets r->err to a connection failure. Returns RETRY if the failure may be temporary and an earlier
 * connection has succeeded; otherwise an error. */
static int curl_error(struct hub_request *r, CURLcode code) {
    struct hub_client *c = r->client;
    static const CURLcode temporary[] = {
        CURLE_COULDNT_RESOLVE_HOST, CURLE_COULDNT_RESOLVE_PROXY,
        CURLE_COULDNT_CONNECT,      CURLE_PARTIAL_FILE,
        CURLE_OPERATION_TIMEDOUT,   CURLE_SSL_CONNECT_ERROR,
        CURLE_SEND_ERROR,           CURLE_RECV_ERROR,
        CURLE_GOT_NOTHING,          CURLE_HTTP2,
        CURLE_HTTP2_STREAM,
    };
    bool is_temporary = false;
    for (size_t i = 0; i < ARRAY_LEN(temporary); i++)
        is_temporary = is_temporary || temporary[i] == code;
    const char *why = *c->message ? c->message : lib->curl_easy_strerror(code);
    error_set(r->err, ERR_IO, "cannot load %s%s%s from '%s': %s%s", r->file ? "'" : "the listing",
              r->file ? r->file : "", r->file ? "'" : "", c->endpoint, why,
              is_temporary && !c->reached
                  ? "; is this machine online, and HF_ENDPOINT or the proxy right?"
                  : "");
    return is_temporary && c->reached ? RETRY : r->err->code;
}

/* The hub also answers 401 for a missing repository, so that the answer does not reveal which
 * private names exist. */
static int access_denied_error(struct hub_request *r, long status) {
    const struct hub_client *c = r->client;
    const char *repo = c->name->repo;
    if (strcmp(r->code, "GatedRepo") == 0)
        return error_set(r->err, ERR_STATE,
                         "'%s' is gated: accept its terms at %s/%s and set HF_TOKEN to a token of "
                         "that account",
                         repo, c->endpoint, repo);
    if (status == 401 && !c->token)
        return error_set(r->err, ERR_MISSING,
                         "'%s' does not exist or is private: check its name, or set HF_TOKEN",
                         repo);
    if (status == 401)
        return error_set(
            r->err, ERR_STATE,
            "'%s' does not exist, or the hub does not accept the token: check the name "
            "and HF_TOKEN",
            repo);
    return error_set(r->err, ERR_STATE, "'%s' may not be read with %s", repo,
                     c->token ? "this token (403): give it read access to the repository"
                              : "no token (403): set HF_TOKEN");
}

static int not_found_error(struct hub_request *r) {
    const struct hub_ref *name = r->client->name;
    if (strcmp(r->code, "RevisionNotFound") == 0)
        return error_set(r->err, ERR_MISSING, "'%s' has no revision '%s'", name->repo, name->rev);
    if (r->file)
        return error_set(r->err, ERR_MISSING, "'%s' has no file '%s' any more: run it again",
                         name->repo, r->file);
    return error_set(r->err, ERR_MISSING, "no model '%s' on '%s', or no revision '%s' of it",
                     name->repo, r->client->endpoint, name->rev);
}

static int status_error(struct hub_request *r, long status) {
    const struct hub_client *c = r->client;
    const char *url = NULL;
    lib->curl_easy_getinfo(c->curl, CURLINFO_EFFECTIVE_URL, &url);
    bool hub = url && strncmp(url, c->endpoint, strlen(c->endpoint)) == 0;
    if (hub && (status == 401 || status == 403)) return access_denied_error(r, status);
    if (hub && status == 404) return not_found_error(r);
    bool is_temporary = status == 408 || status == 429 || status >= 500;
    error_set(r->err, ERR_IO, "%s answered %ld for %s%s", hub ? c->endpoint : "the file server",
              status, r->file ? r->file : "the listing",
              status == 429 && !c->token ? "; with HF_TOKEN set the hub allows more" : "");
    if (status != 416 || !r->part) return is_temporary ? RETRY : r->err->code;
    int rc =
        partial_restart(r->part, r->err); /* the file on the hub is shorter than the partial file */
    return rc == OK ? RETRY : rc;
}

/* Sends one request and follows redirects; *status is that of the last response, 0 without one. */
static CURLcode request_send(struct hub_request *r, long *status) {
    struct hub_client *c = r->client;
    struct curl_slist *headers = request_headers(r);
    curl_off_t connected = 0;
    c->message[0] = '\0';
    lib->curl_easy_setopt(c->curl, CURLOPT_LOW_SPEED_LIMIT, r->part ? 1L : (long)LISTING_SPEED);
    lib->curl_easy_setopt(c->curl, CURLOPT_URL, r->url);
    lib->curl_easy_setopt(c->curl, CURLOPT_HTTPHEADER, headers);
    lib->curl_easy_setopt(c->curl, CURLOPT_HEADERFUNCTION, on_header);
    lib->curl_easy_setopt(c->curl, CURLOPT_HEADERDATA, r);
    lib->curl_easy_setopt(c->curl, CURLOPT_WRITEFUNCTION, on_body);
    lib->curl_easy_setopt(c->curl, CURLOPT_WRITEDATA, r);
    CURLcode code = lib->curl_easy_perform(c->curl);
    lib->curl_easy_getinfo(c->curl, CURLINFO_RESPONSE_CODE, status);
    lib->curl_easy_getinfo(c->curl, CURLINFO_CONNECT_TIME_T, &connected);
    c->reached = c->reached || connected > 0 || *status > 0;
    lib->curl_easy_setopt(c->curl, CURLOPT_HTTPHEADER, NULL);
    lib->curl_slist_free_all(headers);
    return code;
}

/* Makes one attempt. Returns OK, RETRY or an error, with the reason in r->err unless OK. */
static int request_try(struct hub_request *r) {
    long status = 0;
    r->started = false;
    r->rc = OK;
    r->discarded = r->text.len = 0;
    CURLcode code = request_send(r, &status);
    if (r->rc == RETRY)
        error_set(r->err, ERR_FORMAT, "the server sent a wrong range of '%s'", r->file);
    if (r->rc != OK) return r->rc;
    if (code != CURLE_OK && r->discarded <= DISCARD_LIMIT) return curl_error(r, code);
    if (status != 200 && status != 206) return status_error(r, status);
    if (!r->part || r->part->pos == r->part->file->size) return OK;
    error_set(r->err, ERR_IO, "'%s' ended after %lld of %lld bytes", r->file,
              (long long)r->part->pos, (long long)r->part->file->size);
    return RETRY;
}

/* retries */

static void sleep_for(double seconds) {
    struct timespec t = {.tv_sec = (time_t)seconds,
                         .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&t, &t) < 0 && errno == EINTR) continue;
}

/* Waits before the next attempt: exponential backoff, or the server's Retry-After if that is
 * longer. An error if Retry-After is above MAX_RETRY_AFTER. */
static int request_wait(struct hub_request *r, int tries) {
    curl_off_t retry_after = 0;
    lib->curl_easy_getinfo(r->client->curl, CURLINFO_RETRY_AFTER, &retry_after);
    double wait = MAX(r->client->backoff * (double)(1 << tries), (double)retry_after);
    if (retry_after > MAX_RETRY_AFTER)
        return error_set(r->err, r->err->code, "%s, and asks to wait %lld s", r->err->text,
                         (long long)retry_after);
    log_info("%s; trying again in %.1f s", r->err->text, wait);
    sleep_for(wait);
    return OK;
}

static int request_run(struct hub_request *r) {
    int64_t longest = r->part ? r->part->pos : 0;
    for (int tries = 0;; tries++) {
        int rc = request_try(r);
        if (rc != RETRY) return rc;
        if (r->part && r->part->pos > longest) longest = r->part->pos, tries = 0;
        if (tries + 1 == MAX_TRIES)
            return error_wrap(r->err, "gave up after %d tries (run it again to continue)",
                              MAX_TRIES);
        if (request_wait(r, tries) != OK) return r->err->code;
    }
}

json_t *hub_client_list(struct hub_client *c, struct error *err) {
    struct buf url = {0};
    json_t *v = NULL;
    buf_printf(&url, "%s/api/models/%s/revision/", c->endpoint, c->name->repo);
    hub_url_encode(&url, c->name->rev, false);
    buf_puts(&url, "?blobs=true");
    struct hub_request r = {.client = c, .url = url.data, .err = err};
    struct json_limits left = {.depth = 100, .cost = (size_t)1 << 30};
    if (request_run(&r) == OK)
        v = json_parse_limited(r.text.data ? r.text.data : "", r.text.len, "the hub's listing",
                               &left, err);
    buf_release(&r.text);
    buf_release(&url);
    return v;
}

/* Downloads the rest of the partial file and verifies it; starts over if its bytes are wrong. */
static int partial_complete(struct partial_file *p, struct hub_request *r) {
    struct error *err = r->err;
    for (;;) {
        bool from_start = p->pos == 0;
        int rc = p->pos < p->file->size ? request_run(r) : OK;
        if (rc != OK) return rc;
        if (hub_digest_matches(&p->digest, p->file))
            return fsync(p->fd) < 0 ? error_errno(err, "cannot write '%s'", p->path) : OK;
        if ((rc = partial_restart(p, err)) != OK) return rc;
        if (from_start)
            return error_set(err, ERR_FORMAT,
                             "'%s' arrived damaged: its hash is not the %.12s... that the hub "
                             "lists; if it happens again, a proxy or the network alters it",
                             p->file->path, p->file->hash);
        log_info("the partial file of '%s' is damaged; loading it from the start", p->file->path);
    }
}

int hub_client_download(struct hub_client *c, const char *commit, const struct hub_file *f,
                        const char *partial, hub_progress_fn on_progress, void *ctx,
                        struct error *err) {
    struct partial_file p = {.file = f, .path = partial, .on_progress = on_progress, .ctx = ctx};
    struct buf url = {0};
    buf_printf(&url, "%s/%s/resolve/%s/", c->endpoint, c->name->repo, commit);
    hub_url_encode(&url, f->path, true);
    struct hub_request r = {.client = c, .url = url.data, .file = f->path, .part = &p, .err = err};
    int rc = partial_open(&p, err);
    if (rc == OK) rc = partial_complete(&p, &r);
    if (p.fd >= 0) close(p.fd);
    buf_release(&url);
    return rc;
}
