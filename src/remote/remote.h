/*
 * remote: a client of a language-model server with OpenAI's HTTP API: hosted services, Ollama's
 * /v1, vLLM, llama.cpp, `shoal serve`.
 *
 * After remote_open and remote_connect any thread may call the other functions, several at once.
 * The API key is in no message, and a text of the server that contains it is not passed on.
 */
#ifndef SHOAL_REMOTE_H
#define SHOAL_REMOTE_H

#include "base/base.h"

#include <stdatomic.h>

struct remote_options {
    const char *url;     /* http or https; without a path, /v1 is added */
    const char *model;   /* NULL: the only model that the server lists */
    const char *key_env; /* the environment variable with the API key; NULL: no key */
    double seconds;      /* limit of an attempt, with its response */
    int retries;         /* attempts after the first one, see remote_generate */
};
struct remote;
/* Checks the options, which it copies, and reads the key. Sends nothing. NULL: `err` is set. */
struct remote *remote_open(const struct remote_options *o, struct error *err);
/* Asks the server for its models, so that a wrong address, key or model is found before the work
 * begins. ERR_USAGE: no model is named and the server does not list exactly one. ERR_STATE: the
 * server refuses the key. A named model need not be in the list. */
int remote_connect(struct remote *r, struct error *err);
void remote_close(struct remote *r); /* may be NULL */
const char *remote_url(const struct remote *r);
const char *remote_model(const struct remote *r); /* "" before remote_connect has found it */

struct remote_reply {
    char *text;                   /* malloc'ed */
    bool truncated;               /* it reached its limit of tokens */
    int64_t prefilled, generated; /* tokens by the server's count; 0: it reports none */
    int attempts;                 /* requests that were sent */
    int status;                   /* HTTP status of the last response; 0: none arrived */
    double retry_after;           /* seconds that it asks to wait, at most 60; 0: none */
};
/*
 * Generates a reply. `request` has the fields of a chat completion ("messages" …) or of a
 * completion ("prompt" …); the model is added.
 *
 * A lost connection, a time limit and the statuses 408, 429, 500, 502, 503, 504 and 529 are
 * repeated after a pause, which doubles from one second to 30; a longer Retry-After of up to a
 * minute is kept. Every other failure is final. After REMOTE_MAX_FAILURES final failures in a row
 * the client stops for good: it ends the requests that run and sends no more.
 *
 * ERR_IO: no reply. ERR_FORMAT: not the reply of such a server. ERR_MEMORY: a reply that is too
 * long. ERR_STATE: refused by the server, or the client has stopped. The caller releases `out` in
 * every case.
 */
enum { REMOTE_MAX_FAILURES = 5 };
int remote_generate(struct remote *r, const json_t *request, struct remote_reply *out,
                    struct error *err);
void remote_reply_release(struct remote_reply *r);
/*
 * For callers that have another server to ask: one request, which no failure before it prevents.
 * Errors are those of remote_generate, and ERR_STATE if it was cancelled; the text of a stream that
 * fails may have been passed on in part.
 */
struct remote_attempt {
    double seconds;            /* limit of the whole response; 0: that of the client */
    size_t max_text;           /* bytes of the text; 0: the limit of responses */
    const atomic_bool *cancel; /* NULL, or ends the request within about a second when true */
    /* Not NULL: the server streams the reply, and each part of its text, whole characters, is
     * passed on as it arrives; `text` of the reply is NULL. */
    void (*on_text)(void *ctx, const char *text, size_t len);
    void *ctx;
};
int remote_try(struct remote *r, const json_t *request, const struct remote_attempt *a,
               struct remote_reply *out, struct error *err);
/* Whether the server answers a request for its list of models: without it, with a status of 5xx,
 * 401, 403 or 429 there is an error. */
int remote_probe(struct remote *r, double seconds, const atomic_bool *cancel, struct error *err);
/* ERR_STATE with the last failure's message if the client has stopped. */
int remote_check(struct remote *r, struct error *err);

#endif
