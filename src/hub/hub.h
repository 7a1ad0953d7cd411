/*
 * hub: models and adapters that are pulled from a hub with Hugging Face's HTTP API into a cache,
 * pages of allowed hosts, and requests to servers that the user names. No other module sends HTTP
 * requests.
 *
 * Several threads and processes may use the cache at once.
 */
#ifndef SHOAL_HUB_H
#define SHOAL_HUB_H

#include "base/base.h"

#include <stdatomic.h>

/*
 * A repository on the hub is named hf:OWNER/REPO[/FILE][@REV]; REV is a branch, tag or commit, by
 * default "main". It is pulled into the folder CACHE/hub/OWNER/REPO[@REV], where CACHE is
 * $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal, else ~/.cache/shoal. The folder holds the repository's
 * files unchanged and the record .hub.json: repository, revision, commit, and each file's size and
 * hash (64 digits: SHA-256 of the content; 40: git's blob SHA-1). HF_ENDPOINT names another hub.
 * The token in HF_TOKEN, else in the token file of Hugging Face's own client, is sent to that hub
 * and to no other host.
 */
struct hub_options {
    char *to;               /* the folder; NULL: the one in the cache */
    struct strings include; /* globs of files to pull instead of the default selection */
    double backoff, stall;  /* seconds before the first retry (0: 1), and seconds without data after
                               which a connection counts as lost (0: 60) */
    bool dry_run;           /* for the command, which then calls hub_plan; hub_pull ignores it */
};
bool hub_is_name(const char *path); /* begins with "hf:" */
/* The absolute path with links resolved; a hub name or a missing path is returned unchanged.
 * malloc'ed. */
char *path_absolute(const char *path);
/* The path of the folder or GGUF file that a name refers to, malloc'ed; if it is not pulled, NULL
 * and an error with the command to run. Does not use the network. */
char *hub_cached_path(const char *name, struct error *err);
char *hub_cache_dir(void); /* the folder CACHE/hub, malloc'ed; NULL: no variable names it */
/*
 * Downloads and verifies the missing and damaged files of the revision's current commit, and
 * renames them into the folder once all of them are complete. The next pull continues an
 * interrupted one. Returns the record, with "path" and "loaded" (bytes downloaded) added, or NULL
 * on an error.
 */
json_t *hub_pull(const char *name, const struct hub_options *o, struct error *err);
/* The files that hub_pull would download: {repo, commit, folder, files, bytes, "here already"}.
 * Requests nothing but the hub's listing. */
json_t *hub_plan(const char *name, const struct hub_options *o, struct error *err);
/* An array of the records in the cache, each with "path". */
json_t *hub_list(struct error *err);

/* requests */

enum { HTTP_KEPT_HEADERS = 4 };
struct http_response {
    int status;
    char *headers[HTTP_KEPT_HEADERS]; /* the values of keep_headers; NULL: the server sent none */
    struct buf body;                  /* if the request has no on_body */
    bool stopped;                     /* on_body ended the response */
};
/* A request to a server that the user names. All members are borrowed. */
struct http_request {
    const char *method, *url;
    const struct strings *headers; /* "Name: value"; NULL: none */
    const char *body;              /* NULL: none */
    size_t body_len;
    const char *ca_file; /* PEM file of the certificate authorities; NULL: those of the system */
    const char *keep_headers[HTTP_KEPT_HEADERS]; /* names of headers of the response */
    size_t max_body;                             /* bytes of the response's body */
    double seconds;                              /* for all of it; 0: no limit */
    double idle_seconds;       /* without any byte, in whole seconds; 0: no limit */
    const atomic_bool *cancel; /* NULL, or ends the request within about a second when true */
    /* Called with each part of the body as it arrives; status and headers of `r` are set. false
     * ends the response, and is not an error. NULL: the body is collected in `r`. */
    bool (*on_body)(void *ctx, const struct http_response *r, const char *data, size_t len);
    void *ctx;
};
/*
 * Sends a request and reads the response. Every status is OK, also that of a redirect, which is not
 * followed. A request to this machine ignores the proxy of the environment. `url`, `headers` and
 * the bodies may contain secrets, so no message contains any of them.
 *
 * ERR_USAGE: not an http or https address, or a header that is not one line. ERR_IO: no connection,
 * a broken one, or no end within the limits of time. ERR_MEMORY: more than max_body bytes.
 * ERR_STATE: cancelled. ERR_MISSING: libcurl is not installed. After an error status and headers
 * are set if they have arrived. The caller releases `out` in every case.
 */
int http_request(const struct http_request *q, struct http_response *out, struct error *err);
/* Whether an address names this machine. */
bool http_url_is_local(const char *url);
void http_response_release(struct http_response *r);

/* Sends a POST request with `body`, which is JSON, and discards the response. ERR_IO: no response
 * within `seconds`, or a status other than 2xx; other errors as of http_request. */
int http_post_json(const char *url, const char *body, double seconds, struct error *err);

/* event streams */

/* A stream of text/event-stream (WHATWG HTML, 9.2), which arrives in parts. Zero-initialise it. */
enum { EVENT_MAX_BYTES = 4 << 20 };
struct event_stream {
    struct buf line, data;
    bool after_cr, is_other, has_data; /* is_other: the event's type is not "message" */
    bool any_type;                     /* set by the caller: events of all types are passed on */
    char id[256];     /* the last event's id; "": a header cannot hold it, or it is missing */
    int64_t retry_ms; /* 0: not given */
};
/* Receives the data of an event; every result but OK ends the reading. */
typedef int (*event_receive_fn)(void *ctx, const char *text, size_t len, struct error *err);
/* Passes the data of every event of type "message", or of any type, to `receive`; returns its first
 * result that is not OK, or ERR_MEMORY for an event of more than EVENT_MAX_BYTES. */
int event_stream_add(struct event_stream *s, const char *data, size_t len, event_receive_fn receive,
                     void *ctx, struct error *err);
void event_stream_release(struct event_stream *s);

/* pages */

struct http_page {
    char *type;      /* the header Content-Type; "" if the server sent none */
    struct buf body; /* at most `limit` bytes of it */
};
/*
 * Sends a GET request for an address that an untrusted text may have chosen, and follows up to 3
 * redirects. `hosts` allows "HOST", which is the scheme's own port, and "HOST:PORT", in upper or
 * lower case; the host of every redirect must be allowed too. A host that is neither an IP address
 * nor "localhost" must have a public address: the address of the connection itself is checked, so
 * there is no proxy. No credentials and cookies are sent.
 *
 * ERR_USAGE: not an http or https address, or one with a password. ERR_STATE: a host or address
 * that is not allowed. ERR_IO: no response within `seconds`, or a status other than 2xx.
 * ERR_MISSING: libcurl is not installed. The caller releases `out` after OK.
 */
int http_get_page(const char *url, const struct strings *hosts, size_t limit, double seconds,
                  struct http_page *out, struct error *err);
void http_page_release(struct http_page *p);

#endif
