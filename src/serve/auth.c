/*
 * auth: admission of requests. Keys and the start-up token, the routes that are open without keys,
 * the number of requests that a client may have under way, and how often it may guess a key.
 *
 *   scope      without keys                        with keys
 *   OPEN       all callers                         all callers
 *   CHAT       this machine; others by --no-auth   a key or the token
 *   METRICS    as CHAT                             this machine; else as CHAT
 *   JOBS,      a key or the token                  a key or the token
 *   ADMIN
 *
 * Wrong keys. A secret that this program made has 256 random bits, which no rate of guessing finds;
 * a secret that a person chose (--api-key) can be guessed. After AUTH_FREE_FAILURES wrong keys an
 * address has to wait, twice as long each time. Meanwhile keys that this program made are admitted
 * as usual, so that clients that share an address are not locked out, and chosen keys are admitted
 * only if the address has used them before. All other keys get the same 429, right or wrong.
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

/* Belongs to a request from admission to its end. */
struct auth_caller {
    char key[KEY_ID_LEN]; /* "": the request has no key */
    bool counted;         /* counted in the limits */
};

const char *exchange_key_id(const struct exchange *x) {
    const struct auth_caller *c = exchange_user(x);
    return c && *c->key ? c->key : NULL;
}

static const char *secret_of(const struct exchange *x) {
    const char *bearer = exchange_header(x, "Authorization");
    if (bearer && strncasecmp(bearer, "Bearer ", 7) == 0) return bearer + 7;
    return exchange_header(x, "X-API-Key");
}

/* concurrency limits */

static void key_client(const char *id, char out[KEY_ID_LEN + 4]) {
    snprintf(out, KEY_ID_LEN + 4, "key:%s", id);
}

static void retry_after(struct exchange *x, double wait) {
    char seconds[32], ms[32];
    snprintf(seconds, sizeof seconds, "%.0f", ceil(wait));
    snprintf(ms, sizeof ms, "%.0f", ceil(wait * 1000));
    exchange_add_header(x, "Retry-After", seconds);
    exchange_add_header(x, "Retry-After-Ms", ms);
}

static void concurrency_release(struct server *s, const struct exchange *x,
                                const struct auth_caller *c) {
    char key[KEY_ID_LEN + 4];
    key_client(c->key, key);
    client_limits_release(http_limits(s->http), exchange_client_key(x), LIMIT_REQUESTS, 1);
    if (*c->key) client_limits_release(http_limits(s->http), key, LIMIT_REQUESTS, 1);
}

/* Requests from this machine are not limited. */
static int concurrency_acquire(struct server *s, struct exchange *x, const char *id) {
    struct client_limits *l = http_limits(s->http);
    int64_t most = s->o->max_concurrent;
    struct auth_caller *c = xcalloc(1, sizeof *c);
    char key[KEY_ID_LEN + 4];
    snprintf(c->key, sizeof c->key, "%s", id);
    exchange_set_user(x, c);
    if (exchange_is_local(x)) return OK;
    key_client(id, key);
    bool by_key = !*id || client_limits_acquire(l, key, LIMIT_REQUESTS, 1, most);
    c->counted =
        by_key && client_limits_acquire(l, exchange_client_key(x), LIMIT_REQUESTS, 1, most);
    if (c->counted) return OK;
    if (by_key && *id) client_limits_release(l, key, LIMIT_REQUESTS, 1);
    retry_after(x, 1);
    api_fail(x, 429, NULL, NULL, "too_many_at_once",
             "%s has %lld requests under way, as many as --max-concurrent allows",
             by_key ? "your address" : "this key", (long long)most);
    return ERR_STATE;
}

/* keys */

/* The bit of a chosen key in the limits: its id is "cli-N". -1: the program made the key, or N is
 * too large. */
static int chosen_bit(const char *id) {
    int n = strncmp(id, "cli-", 4) == 0 ? atoi(id + 4) : 0;
    return n >= 1 && n <= 64 ? n - 1 : -1;
}

/* Whether a secret may be checked while its sender has to wait. */
static bool is_beyond_guessing(struct server *s, const struct exchange *x, const char *secret) {
    char id[KEY_ID_LEN];
    if (!keys_lookup(s->keys, secret, id)) return false;
    if (strncmp(id, "cli-", 4) != 0) return true;
    int bit = chosen_bit(id);
    return bit >= 0 && client_limits_was_auth_ok(http_limits(s->http), exchange_client_key(x), bit);
}

static int backoff_check(struct server *s, struct exchange *x, const char *secret) {
    double wait =
        client_limits_auth_backoff(http_limits(s->http), exchange_client_key(x), clock_now());
    if (!secret || wait <= 0 || is_beyond_guessing(s, x, secret)) return OK;
    retry_after(x, wait);
    api_fail(x, 429, NULL, NULL, "too_many_wrong_keys",
             "your address has sent many keys that are not known here; try again in %.0f s",
             ceil(wait));
    return ERR_STATE;
}

/* A 429 says when to try again, in both forms that clients read. */
static void limit_refuse(struct exchange *x, const struct key_decision *a) {
    if (a->wait > 0) retry_after(x, a->wait);
    api_fail(x, 429, NULL, NULL,
             a->verdict == KEY_RATE_LIMITED ? "rate_limit_exceeded" : "insufficient_quota", "%s",
             a->why);
}

/* Only callers on this machine learn the path of the file. */
static void unknown_refuse(struct server *s, struct exchange *x, const char *why) {
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
        api_fail(x, 403, NULL, NULL, "insufficient_scope", "%s", a->why);
        break;
    case KEY_RATE_LIMITED:
    case KEY_OVER_QUOTA:
        limit_refuse(x, a);
        break;
    default:
        unknown_refuse(s, x, a->why);
    }
    return ERR_STATE;
}

static int key_admit(struct server *s, struct exchange *x, int scope, char id[KEY_ID_LEN]) {
    struct key_decision a;
    struct timespec now;
    const char *secret = secret_of(x);
    if (backoff_check(s, x, secret) != OK) return ERR_STATE;
    clock_gettime(CLOCK_REALTIME, &now);
    keys_authorize(s->keys, secret, (unsigned)scope,
                   (double)now.tv_sec + (double)now.tv_nsec * 1e-9, &a);
    memcpy(id, a.id, KEY_ID_LEN);
    if (secret && a.verdict == KEY_UNKNOWN)
        client_limits_auth_failed(http_limits(s->http), exchange_client_key(x), secret,
                                  clock_now());
    else if (chosen_bit(a.id) >= 0)
        client_limits_auth_ok(http_limits(s->http), exchange_client_key(x), chosen_bit(a.id));
    return a.verdict == KEY_ADMITTED ? OK : key_refuse(s, x, &a);
}

/* scopes */

static bool has_token(struct server *s, const struct exchange *x) {
    char id[KEY_ID_LEN];
    const char *secret = secret_of(x);
    return secret && keys_lookup(s->keys, secret, id) && strcmp(id, KEY_TOKEN_ID) == 0;
}

/* Without keys, chat is open to this machine, and by --no-auth to others. */
static bool is_open(struct server *s, const struct exchange *x, int scope) {
    return scope == SCOPE_CHAT && !keys_exist(s->keys) && (exchange_is_local(x) || !s->o->auth) &&
           !has_token(s, x);
}

/* The emergency reserve was used and cannot be allocated again: new requests are refused. The
 * routes that are open to all report the state of the server, and still work. */
static bool is_short(struct exchange *x) {
    if (!memory_is_low()) return false;
    retry_after(x, 1);
    api_fail(x, 503, NULL, NULL, "overloaded", "the server is short of memory; try again later");
    return true;
}

int auth_admit(void *ctx, struct exchange *x, const struct http_route *r) {
    struct server *s = ctx;
    char id[KEY_ID_LEN] = "";
    struct error err;
    int scope = r->scope & (SCOPE_CHAT | SCOPE_JOBS | SCOPE_ADMIN | SCOPE_METRICS), rc = OK;
    if (scope == SCOPE_OPEN) return OK;
    if (scope == SCOPE_METRICS && exchange_is_local(x) && exchange_host_is_own(x)) return OK;
    if (is_short(x)) return ERR_STATE;
    if (scope == SCOPE_METRICS) scope = SCOPE_CHAT;
    if (is_open(s, x, scope)) {
        // without a key
    } else if (scope == SCOPE_CHAT && !keys_exist(s->keys) && !secret_of(x)) {
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

/* With keys, a page that reaches the server under another host name has no key to send. */
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

static int fixed_add(struct server *s, const char *secret, struct error *err) {
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
        if (*line && *line != '#') rc = fixed_add(s, line, err), n++;
    }
    if (rc == OK && !n) rc = error_set(err, ERR_USAGE, "'%s' holds no key", path);
    if (text.data) sodium_memzero(text.data, text.len);
    buf_release(&text);
    return rc;
}

static int keys_make(struct server *s, struct error *err) {
    const char *from_environment = getenv("SHOAL_API_KEY");
    char *path = path_join(s->o->state_dir, "serve.db");
    s->keys = keys_open(path, err);
    free(path);
    if (!s->keys) return err->code;
    for (int i = 0; i < s->o->api_keys.n; i++)
        if (fixed_add(s, s->o->api_keys.v[i], err) != OK) return err->code;
    if (s->o->api_key_file && key_file_read(s, s->o->api_key_file, err) != OK)
        return error_wrap(err, "--api-key-file");
    return from_environment && *from_environment ? fixed_add(s, from_environment, err) : OK;
}

/* A server without keys is not opened to other machines, nor to all web pages, by accident. */
static int address_admit(struct server *s, struct error *err) {
    const struct http_options *o = &s->o->http;
    if (keys_exist(s->keys)) return OK;
    for (int i = 0; i < o->cors.n; i++)
        if (strcmp(o->cors.v[i], "*") == 0)
            return error_set(err, ERR_USAGE,
                             "--cors '*' without keys would let every web page use this server: "
                             "name the origins, or make a key with 'shoal key add NAME'");
    if (http_is_loopback(o) || !s->o->auth) return OK;
    return error_set(err, ERR_USAGE,
                     "'%s' is open to other machines, and there are no keys: make one with 'shoal "
                     "key add NAME', or use --no-auth to let every client chat",
                     o->host);
}

static int whole_write(int fd, const char *text, size_t n) {
    return write(fd, text, n) == (ssize_t)n && fsync(fd) == 0 ? OK : ERR_IO;
}

/* Only the owner can read the file from its first byte on; the file is written as a whole. A link
 * in its place is replaced, not followed. */
static int token_write(const char *path, const char *token, struct error *err) {
    char line[KEY_SECRET_LEN + 1], *tmp = xasprintf("%s.tmp-%d", path, (int)getpid());
    int n = snprintf(line, sizeof line, "%s\n", token), rc = OK;
    unlink(tmp);
    int fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0 || whole_write(fd, line, (size_t)n) != OK || rename(tmp, path) != 0) {
        rc = error_errno(err, "cannot write '%s'", path);
        unlink(tmp);
    }
    if (fd >= 0) close(fd);
    sodium_memzero(line, sizeof line);
    free(tmp);
    return rc;
}

int auth_open(struct server *s, struct error *err) {
    int rc = keys_make(s, err);
    return rc == OK ? address_admit(s, err) : rc;
}

int auth_token_create(struct server *s, struct error *err) {
    char *folder = realpath(s->o->state_dir, NULL),
         *path = path_join(folder ? folder : s->o->state_dir, "token");
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
