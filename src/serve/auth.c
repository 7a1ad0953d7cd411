/*
 * auth: admission of requests: API keys and the start-up token, the routes that are open without
 * keys, the limit on concurrent requests, and the back-off after wrong keys.
 *
 *   scope      without keys                        with keys
 *   OPEN       all callers                         all callers
 *   CHAT       this machine; others by --no-auth   a key or the token
 *   METRICS    as CHAT                             this machine; else as CHAT
 *   JOBS,      a key or the token                  a key or the token
 *   ADMIN
 *
 * Wrong keys: a generated secret (shoal key) has 256 random bits, too many to guess; a fixed
 * secret, which a person chose (--api-key), can be guessed. After AUTH_FREE_FAILURES wrong keys an
 * address has to wait, twice as long each time. Meanwhile generated keys are admitted as usual, so
 * that clients that share an address are not locked out, and a fixed key is admitted only if the
 * address has used it before. Any other key gets the same 429, whether it is right or wrong.
 */
#define _GNU_SOURCE
#include "http/http.h"
#include "ops/ops.h"
#include "serve/server.h"

#include <fcntl.h>
#include <math.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The caller of a request, from admission until the request has ended. */
struct auth_caller {
    char key[KEY_ID_LEN]; /* "": the request has no key */
    bool counted;         /* counted in the limits */
};

const char *exchange_key_id(const struct exchange *x) {
    const struct auth_caller *c = exchange_user(x);
    return c && *c->key ? c->key : NULL;
}

static const char *request_secret(const struct exchange *x) {
    const char *bearer = exchange_header(x, "Authorization");
    if (bearer && strncasecmp(bearer, "Bearer ", 7) == 0) return bearer + 7;
    return exchange_header(x, "X-API-Key");
}

/* concurrency limits */

static void key_client_name(const char *id, char out[KEY_ID_LEN + 4]) {
    snprintf(out, KEY_ID_LEN + 4, "key:%s", id);
}

static void retry_after_add(struct exchange *x, double wait) {
    char seconds[32], ms[32];
    snprintf(seconds, sizeof seconds, "%.0f", ceil(wait));
    snprintf(ms, sizeof ms, "%.0f", ceil(wait * 1000));
    exchange_add_header(x, "Retry-After", seconds);
    exchange_add_header(x, "Retry-After-Ms", ms);
}

static void concurrency_release(struct server *s, const struct exchange *x,
                                const struct auth_caller *c) {
    char key[KEY_ID_LEN + 4];
    key_client_name(c->key, key);
    client_limits_release(http_limits(s->http), exchange_limits_name(x), LIMIT_REQUESTS, 1);
    if (*c->key) client_limits_release(http_limits(s->http), key, LIMIT_REQUESTS, 1);
}

/* Requests from this machine are not limited. */
static int concurrency_acquire(struct server *s, struct exchange *x, const char *id) {
    struct client_limits *l = http_limits(s->http);
    int64_t limit = s->options->max_concurrent;
    struct auth_caller *c = xcalloc(1, sizeof *c);
    char key[KEY_ID_LEN + 4];
    snprintf(c->key, sizeof c->key, "%s", id);
    exchange_set_user(x, c);
    if (exchange_is_local(x)) return OK;
    key_client_name(id, key);
    bool by_key = !*id || client_limits_acquire(l, key, LIMIT_REQUESTS, 1, limit);
    c->counted =
        by_key && client_limits_acquire(l, exchange_limits_name(x), LIMIT_REQUESTS, 1, limit);
    if (c->counted) return OK;
    if (by_key && *id) client_limits_release(l, key, LIMIT_REQUESTS, 1);
    retry_after_add(x, 1);
    api_fail(x, 429, NULL, NULL, "too_many_at_once",
             "%s has %lld requests under way, as many as --max-concurrent allows",
             by_key ? "your address" : "this key", (long long)limit);
    return ERR_STATE;
}

/* keys */

/* The bit of a fixed key in client_limits; the key's id is "cli-N". -1: the key was generated, or N
 * is too large. */
static int fixed_key_bit(const char *id) {
    int n = strncmp(id, "cli-", 4) == 0 ? atoi(id + 4) : 0;
    return n >= 1 && n <= 64 ? n - 1 : -1;
}

/* Whether a secret may be checked while its address has to wait. */
static bool is_exempt_from_backoff(struct server *s, const struct exchange *x, const char *secret) {
    char id[KEY_ID_LEN];
    if (!keys_lookup(s->keys, secret, id)) return false;
    if (strncmp(id, "cli-", 4) != 0) return true;
    int bit = fixed_key_bit(id);
    return bit >= 0 &&
           client_limits_was_auth_ok(http_limits(s->http), exchange_limits_name(x), bit);
}

static int backoff_check(struct server *s, struct exchange *x, const char *secret) {
    double wait =
        client_limits_auth_backoff(http_limits(s->http), exchange_limits_name(x), clock_now());
    if (!secret || wait <= 0 || is_exempt_from_backoff(s, x, secret)) return OK;
    retry_after_add(x, wait);
    api_fail(x, 429, NULL, NULL, "too_many_wrong_keys",
             "your address has sent many keys that are not known here; try again in %.0f s",
             ceil(wait));
    return ERR_STATE;
}

/* Replies 429, with the headers Retry-After and Retry-After-Ms if the time to wait is known. */
static void limit_refuse(struct exchange *x, const struct key_decision *a) {
    if (a->retry_after > 0) retry_after_add(x, a->retry_after);
    api_fail(x, 429, NULL, NULL,
             a->verdict == KEY_RATE_LIMITED ? "rate_limit_exceeded" : "insufficient_quota", "%s",
             a->message);
}

/* Replies 401. The path of the token file is sent only to callers on this machine. */
static void unknown_key_refuse(struct server *s, struct exchange *x, const char *why) {
    exchange_add_header(x, "WWW-Authenticate", "Bearer");
    if (exchange_is_local(x))
        api_fail(x, 401, NULL, NULL, "invalid_api_key",
                 "%s; the server's start-up token, which may do everything, is in '%s'", why,
                 s->token_path);
    else
        api_fail(x, 401, NULL, NULL, "invalid_api_key",
                 "%s; the server's start-up token is in the file 'token' of its --state", why);
}

static int key_refuse(struct server *s, struct exchange *x, const struct key_decision *a) {
    switch (a->verdict) {
    case KEY_FORBIDDEN:
        api_fail(x, 403, NULL, NULL, "insufficient_scope", "%s", a->message);
        break;
    case KEY_RATE_LIMITED:
    case KEY_OVER_QUOTA:
        limit_refuse(x, a);
        break;
    default:
        unknown_key_refuse(s, x, a->message);
    }
    return ERR_STATE;
}

static int key_admit(struct server *s, struct exchange *x, int scope, char id[KEY_ID_LEN]) {
    struct key_decision a;
    struct timespec now;
    const char *secret = request_secret(x);
    if (backoff_check(s, x, secret) != OK) return ERR_STATE;
    clock_gettime(CLOCK_REALTIME, &now);
    keys_authorize(s->keys, secret, (unsigned)scope,
                   (double)now.tv_sec + (double)now.tv_nsec * 1e-9, &a);
    memcpy(id, a.id, KEY_ID_LEN);
    if (secret && a.verdict == KEY_UNKNOWN)
        client_limits_auth_failed(http_limits(s->http), exchange_limits_name(x), secret,
                                  clock_now());
    else if (fixed_key_bit(a.id) >= 0)
        client_limits_auth_ok(http_limits(s->http), exchange_limits_name(x), fixed_key_bit(a.id));
    return a.verdict == KEY_ADMITTED ? OK : key_refuse(s, x, &a);
}

/* scopes */

static bool has_token(struct server *s, const struct exchange *x) {
    char id[KEY_ID_LEN];
    const char *secret = request_secret(x);
    return secret && keys_lookup(s->keys, secret, id) && strcmp(id, KEY_TOKEN_ID) == 0;
}

/* Without keys, chat is open to this machine, and by --no-auth to others. */
static bool is_open_without_key(struct server *s, const struct exchange *x, int scope) {
    return scope == SCOPE_CHAT && !keys_exist(s->keys) &&
           (exchange_is_local(x) || !s->options->auth) && !has_token(s, x);
}

/* Refuses new requests while the emergency memory reserve is used up and cannot be allocated again.
 * SCOPE_OPEN routes, which report the state of the server, still work. */
static bool low_memory_refuse(struct exchange *x) {
    if (!memory_is_low()) return false;
    retry_after_add(x, 1);
    api_fail(x, 503, NULL, NULL, "overloaded", "the server is short of memory; try again later");
    return true;
}

bool auth_allows(struct server *s, const struct exchange *x, int scope) {
    const char *id = exchange_key_id(x);
    return id ? (keys_scopes(s->keys, id) & (unsigned)scope) != 0 : scope == SCOPE_CHAT;
}

/* A part of an admitted request: it has the same key, and is not counted again. */
static int part_admit(struct server *s, struct exchange *x, int scope) {
    const struct exchange *parent = exchange_parent(x);
    const char *id = exchange_key_id(parent);
    struct auth_caller *c = xcalloc(1, sizeof *c);
    snprintf(c->key, sizeof c->key, "%s", id ? id : "");
    exchange_set_user(x, c);
    if (auth_allows(s, parent, scope)) return OK;
    api_fail(x, 403, NULL, NULL, "insufficient_scope", "the key of this request may not do this");
    return ERR_STATE;
}

int auth_admit(void *ctx, struct exchange *x, const struct http_route *r) {
    struct server *s = ctx;
    char id[KEY_ID_LEN] = "";
    struct error err;
    int scope = r->scope & (SCOPE_CHAT | SCOPE_JOBS | SCOPE_ADMIN | SCOPE_METRICS), rc = OK;
    if (scope == SCOPE_OPEN) return OK;
    if (exchange_parent(x)) return part_admit(s, x, scope);
    if (scope == SCOPE_METRICS && exchange_is_local(x) && exchange_host_is_own(x)) return OK;
    if (low_memory_refuse(x)) return ERR_STATE;
    if (scope == SCOPE_METRICS) scope = SCOPE_CHAT;
    if (is_open_without_key(s, x, scope)) {
        // no key is needed
    } else if (scope == SCOPE_CHAT && !keys_exist(s->keys) && !request_secret(x)) {
        api_fail(x, 401, NULL, NULL, "no_keys",
                 "this server has no keys, and answers its own machine only; 'shoal key add NAME' "
                 "makes one");
        rc = ERR_STATE;
    } else {
        rc = key_admit(s, x, scope, id);
    }
    if (rc == OK && scope == SCOPE_CHAT && file_map_check_unchanged(&err) != OK) {
        api_fail(x, 503, NULL, NULL, "model_changed", "%s", err.text);
        rc = ERR_STATE;
    }
    return rc == OK ? concurrency_acquire(s, x, id) : rc;
}

void auth_request_done(struct server *s, const struct exchange *x) {
    struct auth_caller *c = exchange_user(x);
    if (c && c->counted) concurrency_release(s, x, c);
    free(c);
}

/* With keys any Host header is accepted: a web page that reaches the server under another host name
 * (DNS rebinding) has no key to send. */
bool auth_any_host(void *ctx) {
    struct server *s = ctx;
    return keys_exist(s->keys);
}

enum http_dispatch route_dispatch(void *ctx, const struct http_route *r) {
    (void)ctx;
    return r->scope & ROUTE_IO_THREAD    ? HTTP_DISPATCH_IO_THREAD
           : r->scope & ROUTE_OWN_THREAD ? HTTP_DISPATCH_OWN_THREAD
           : r->scope & ROUTE_SLOW       ? HTTP_DISPATCH_SLOW_WORKER
                                         : HTTP_DISPATCH_WORKER;
}

/* start and end */

static int fixed_key_add(struct server *s, const char *secret, struct error *err) {
    return keys_add_fixed(s->keys, secret, KEY_SCOPE_CHAT | KEY_SCOPE_JOBS | KEY_SCOPE_ADMIN, err);
}

/* One key per line; blank lines and lines that begin with '#' are skipped. */
static int key_file_read(struct server *s, const char *path, struct error *err) {
    struct buf text = {0};
    struct stat st;
    if (stat(path, &st) == 0 && (st.st_mode & (S_IROTH | S_IWOTH)))
        log_warn("others can read the keys in '%s': chmod 600 it", path);
    int rc = file_read(path, 1 << 20, &text, err), n = 0;
    char *rest = text.data, *line;
    while (rc == OK && (line = strsep(&rest, "\n")) != NULL) {
        line += strspn(line, " \t\r");
        line[strcspn(line, " \t\r")] = 0;
        if (*line && *line != '#') rc = fixed_key_add(s, line, err), n++;
    }
    if (rc == OK && !n) rc = error_set(err, ERR_USAGE, "'%s' holds no key", path);
    if (text.data) sodium_memzero(text.data, text.len);
    buf_release(&text);
    return rc;
}

static int keys_load(struct server *s, struct error *err) {
    const char *env_key = getenv("SHOAL_API_KEY");
    char *path = path_join(s->options->state_dir, "serve.db");
    s->keys = keys_open(path, err);
    free(path);
    if (!s->keys) return err->code;
    for (int i = 0; i < s->options->api_keys.n; i++)
        if (fixed_key_add(s, s->options->api_keys.v[i], err) != OK) return err->code;
    if (s->options->api_key_file && key_file_read(s, s->options->api_key_file, err) != OK)
        return error_wrap(err, "--api-key-file");
    return env_key && *env_key ? fixed_key_add(s, env_key, err) : OK;
}

/* Refuses options that would open a server without keys to other machines or to all web pages. */
static int address_check(struct server *s, struct error *err) {
    const struct http_options *o = &s->options->http;
    if (keys_exist(s->keys)) return OK;
    for (int i = 0; i < o->cors.n; i++)
        if (strcmp(o->cors.v[i], "*") == 0)
            return error_set(err, ERR_USAGE,
                             "--cors '*' without keys would let every web page use this server: "
                             "name the origins, or make a key with 'shoal key add NAME'");
    if (http_is_loopback(o) || !s->options->auth) return OK;
    return error_set(err, ERR_USAGE,
                     "'%s' is open to other machines, and there are no keys: make one with 'shoal "
                     "key add NAME', or use --no-auth to let every client chat",
                     o->host);
}

static int write_and_sync(int fd, const char *text, size_t n) {
    return write(fd, text, n) == (ssize_t)n && fsync(fd) == 0 ? OK : ERR_IO;
}

/* Writes the token file atomically, readable by the owner only. A symbolic link at the path is
 * replaced, not followed. */
static int token_write(const char *path, const char *token, struct error *err) {
    char line[KEY_SECRET_LEN + 1], *tmp = xasprintf("%s.tmp-%d", path, (int)getpid());
    int n = snprintf(line, sizeof line, "%s\n", token), rc = OK;
    unlink(tmp);
    int fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0 || write_and_sync(fd, line, (size_t)n) != OK || rename(tmp, path) != 0) {
        rc = error_errno(err, "cannot write '%s'", path);
        unlink(tmp);
    }
    if (fd >= 0) close(fd);
    sodium_memzero(line, sizeof line);
    free(tmp);
    return rc;
}

int auth_open(struct server *s, struct error *err) {
    int rc = keys_load(s, err);
    return rc == OK ? address_check(s, err) : rc;
}

int auth_token_create(struct server *s, struct error *err) {
    char *folder = realpath(s->options->state_dir, NULL),
         *path = path_join(folder ? folder : s->options->state_dir, "token");
    free(folder);
    keys_add_startup_token(s->keys, s->token);
    int rc = token_write(path, s->token, err);
    s->token_path = path;
    s->has_token = rc == OK;
    return rc;
}

void auth_close(struct server *s) {
    if (s->has_token) unlink(s->token_path);
    s->has_token = false;
    sodium_memzero(s->token, sizeof s->token);
    free(s->token_path);
    s->token_path = NULL;
}
