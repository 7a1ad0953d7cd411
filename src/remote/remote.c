/*
 * remote: requests to a language-model server, with retries and a limit of failures in a row.
 *
 * The server is not trusted: its responses have a limit of bytes, of nesting and of time, and its
 * messages are shortened, cleaned, and left out if they contain the key.
 */
#define _GNU_SOURCE
#include "remote/internal.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MAX_URL = 2048,
    MAX_KEY = 8192,
    MAX_MODEL_NAME = 256,
    MAX_LIST = 4 << 20,  /* bytes of the list of models */
    MODELS_SHOWN = 20,   /* names of models in a message */
    MESSAGE_SHOWN = 300, /* bytes of a server's message */
};
#define CONNECT_SECONDS 30.0
#define FIRST_PAUSE 1.0
#define MAX_PAUSE 30.0
#define PAUSE_STEP 0.05 /* seconds between two checks whether the client has stopped */

/* opening */

/* The message does not quote the address, which may contain a secret. */
static int url_set(struct remote *r, const char *url, struct error *err) {
    size_t scheme = strncmp(url, "https://", 8) == 0  ? 8
                    : strncmp(url, "http://", 7) == 0 ? 7
                                                      : 0,
           n = strlen(url);
    bool plain = n <= MAX_URL && scheme && url[scheme] && url[scheme] != '/';
    for (const char *p = url; *p; p++) plain &= *p > ' ' && *p < 127 && !strchr("@?#\\\"", *p);
    if (!plain)
        return error_set(err, ERR_USAGE,
                         "the address of a server is http://HOST[:PORT][/PATH] or https://…, "
                         "without a user name, a password or a query; a key is given by the "
                         "name of an environment variable");
    while (n > scheme && url[n - 1] == '/') n--;
    bool has_path = memchr(url + scheme, '/', n - scheme);
    r->url = xasprintf("%.*s%s", (int)n, url, has_path ? "" : "/v1");
    return OK;
}

static int key_set(struct remote *r, const char *variable, struct error *err) {
    const char *key = getenv(variable);
    if (!key || !*key)
        return error_set(err, ERR_USAGE,
                         "the environment variable '%.100s' is not set; it holds the API key",
                         variable);
    size_t n = strlen(key);
    bool plain = n <= MAX_KEY;
    for (size_t i = 0; i < n; i++) plain &= key[i] > ' ' && key[i] < 127;
    if (!plain)
        return error_set(
            err, ERR_USAGE,
            "the environment variable '%.100s' holds no valid API key: it has blanks, line "
            "breaks or other characters that no header may have",
            variable);
    r->key = xstrdup(key);
    char *line = xasprintf("Authorization: Bearer %s", key);
    strings_add(&r->headers, line);
    sodium_memzero(line, strlen(line));
    free(line);
    if (strncmp(r->url, "http://", 7) == 0 && !http_url_is_local(r->url))
        log_warn("the key is sent to '%s' without encryption; an https address protects it",
                 r->url);
    return OK;
}

struct remote *remote_open(const struct remote_options *o, struct error *err) {
    struct remote *r = xcalloc(1, sizeof *r);
    r->seconds = o->seconds;
    r->retries = o->retries;
    pthread_mutex_init(&r->lock, NULL);
    strings_add(&r->headers, "Content-Type: application/json");
    if (o->model) r->model = xstrdup(o->model);
    int rc = url_set(r, o->url, err);
    if (rc == OK && r->model && (!*r->model || strlen(r->model) > MAX_MODEL_NAME))
        rc = error_set(err, ERR_USAGE, "a model's name has 1 to %d bytes", MAX_MODEL_NAME);
    if (rc == OK && o->key_env) rc = key_set(r, o->key_env, err);
    if (rc == OK) return r;
    remote_close(r);
    return NULL;
}

void remote_close(struct remote *r) {
    if (!r) return;
    if (r->key) sodium_memzero(r->key, strlen(r->key));
    for (int i = 0; i < r->headers.n; i++) sodium_memzero(r->headers.v[i], strlen(r->headers.v[i]));
    strings_release(&r->headers);
    pthread_mutex_destroy(&r->lock);
    free(r->key);
    free(r->model);
    free(r->url);
    free(r);
}

const char *remote_url(const struct remote *r) {
    return r->url;
}

const char *remote_model(const struct remote *r) {
    return r->model ? r->model : "";
}

/* texts and errors of a server */

bool remote_has_key(const struct remote *r, const char *text) {
    return r->key && strstr(text, r->key);
}

/* A text of the server for display, malloc'ed; NULL: none that may be shown. */
static char *text_to_show(const struct remote *r, const char *text, size_t limit) {
    struct buf b = {0};
    size_t n = strlen(text);
    if (n == 0 || remote_has_key(r, text)) return NULL;
    buf_add_sanitized(&b, text, utf8_complete_len(text, MIN(n, limit)));
    for (char *p = b.data; p && *p; p++)
        if (*p == '\n' || *p == '\t') *p = ' ';
    if (n > limit) buf_puts(&b, "…");
    return b.data;
}

json_t *remote_body_parse(const struct buf *body, struct error *err) {
    struct json_limits left = json_request_limits;
    return json_parse_limited(body->data ? body->data : "", body->len, "the response", &left, err);
}

/* The message of {"error": {"message": …}}, {"error": …}, {"message": …} or {"detail": …}. */
static const char *error_message(const json_t *v) {
    const json_t *e = json_object_get(v, "error");
    const char *text = json_string_value(e);
    if (json_is_object(e)) text = json_get_string(e, "message");
    if (!text) text = json_string_value(json_object_get(v, "message"));
    return text ? text : json_get_string(v, "detail");
}

int remote_reported_error(const struct remote *r, const json_t *v, struct error *err) {
    char *message = text_to_show(r, error_message(v), MESSAGE_SHOWN);
    error_set(err, ERR_STATE, "the server reports an error%s%s", message ? ": " : "",
              message ? message : "");
    free(message);
    return err->code;
}

int remote_status_error(const struct remote *r, int status, const struct buf *body,
                        struct error *err) {
    struct error ignored; // a body that is not JSON has no message to show
    json_t *v = remote_body_parse(body, &ignored);
    char *message = v ? text_to_show(r, error_message(v), MESSAGE_SHOWN) : NULL;
    const char *hint = "";
    if (status / 100 == 3) hint = "; a redirect is not followed, give the address that it leads to";
    if (status == 401 || status == 403)
        hint = r->key ? "; the server refuses the key" : "; the server wants a key";
    error_set(err, ERR_STATE, "status %d%s%s%s", status, message ? ": " : "",
              message ? message : "", hint);
    free(message);
    json_decref(v);
    return err->code;
}

/* replies */

/* Waits; returns early if the client stops. */
static void pause_wait(struct remote *r, double seconds) {
    double end = clock_now() + seconds;
    while (!atomic_load(&r->stopped) && clock_now() < end) usleep((useconds_t)(1e6 * PAUSE_STEP));
}

int remote_check(struct remote *r, struct error *err) {
    pthread_mutex_lock(&r->lock);
    int rc = OK;
    if (r->n_failures >= REMOTE_MAX_FAILURES)
        rc = error_set(err, ERR_STATE,
                       "'%s' failed %d times in a row, and no more requests were sent; the last "
                       "failure: %.1000s",
                       r->url, REMOTE_MAX_FAILURES, r->last.text);
    pthread_mutex_unlock(&r->lock);
    return rc;
}

/* Counts failures in a row. A client that has stopped stays stopped. */
static void outcome_count(struct remote *r, int rc, const struct error *err) {
    pthread_mutex_lock(&r->lock);
    if (r->n_failures < REMOTE_MAX_FAILURES) {
        r->n_failures = rc == OK ? 0 : r->n_failures + 1;
        if (rc != OK) r->last = *err;
        if (r->n_failures == REMOTE_MAX_FAILURES) atomic_store(&r->stopped, true);
    }
    pthread_mutex_unlock(&r->lock);
}

/* Whether the same request may succeed later, after an attempt with this result. */
static bool is_temporary(int rc, int status) {
    static const int temporary[] = {408, 429, 500, 502, 503, 504, 529};
    for (size_t i = 0; i < ARRAY_LEN(temporary); i++)
        if (rc == ERR_STATE && status == temporary[i]) return true;
    return rc == ERR_IO;
}

int remote_generate(struct remote *r, const json_t *request, struct remote_reply *out,
                    struct error *err) {
    const struct remote_attempt attempt = {.cancel = &r->stopped};
    double pause = FIRST_PAUSE;
    *out = (struct remote_reply){0};
    if (atomic_load(&r->stopped))
        return error_set(err, ERR_STATE, "not sent, after %d failures in a row",
                         REMOTE_MAX_FAILURES);
    int rc = remote_try(r, request, &attempt, out, err), n = 1;
    for (; is_temporary(rc, out->status) && n <= r->retries; n++) {
        pause_wait(r, MAX(pause, out->retry_after));
        if (atomic_load(&r->stopped)) break;
        rc = remote_try(r, request, &attempt, out, err);
        pause = MIN(2 * pause, MAX_PAUSE);
    }
    out->attempts = n;
    outcome_count(r, rc, err);
    return rc;
}

void remote_reply_release(struct remote_reply *r) {
    free(r->text);
    *r = (struct remote_reply){0};
}

/* models */

/* Takes the only model of {"data": [{"id": NAME}]}, or names all of them. */
static int model_choose(struct remote *r, const json_t *list, struct error *err) {
    const json_t *data = json_object_get(list, "data"), *v;
    const char *only = json_get_string(json_array_get(data, 0), "id");
    struct buf names = {0};
    size_t i;
    if (json_array_size(data) == 1 && *only && strlen(only) <= MAX_MODEL_NAME &&
        !remote_has_key(r, only)) {
        r->model = text_to_show(r, only, MAX_MODEL_NAME);
        if (strcmp(r->model, only) == 0) return OK;
    }
    json_array_foreach (data, i, v) {
        char *name = text_to_show(r, json_get_string(v, "id"), MAX_MODEL_NAME / 4);
        if (name && i < MODELS_SHOWN) buf_printf(&names, "%s%s", i ? ", " : "", name);
        free(name);
    }
    error_set(err, ERR_USAGE, "name one of its models with --remote-model: %s%s",
              names.len ? names.data : "it lists none",
              json_array_size(data) > MODELS_SHOWN ? " …" : "");
    buf_release(&names);
    return err->code;
}

int remote_connect(struct remote *r, struct error *err) {
    struct http_response response;
    char *url = xasprintf("%s/models", r->url);
    json_t *list = NULL;
    int rc = http_request(&(struct http_request){.method = "GET",
                                                 .url = url,
                                                 .headers = &r->headers,
                                                 .max_body = MAX_LIST,
                                                 .seconds = MIN(r->seconds, CONNECT_SECONDS)},
                          &response, err);
    bool is_refused = rc == OK && (response.status == 401 || response.status == 403);
    if (is_refused || (rc == OK && !r->model && response.status != 200))
        rc = remote_status_error(r, response.status, &response.body, err);
    else if (rc == OK && !r->model && (list = remote_body_parse(&response.body, err)))
        rc = model_choose(r, list, err);
    else if (rc == OK && !r->model)
        rc = err->code;
    json_decref(list);
    http_response_release(&response);
    if (rc != OK) rc = error_wrap(err, "'%s'", url);
    free(url);
    return rc;
}
