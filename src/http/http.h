/*
 * http: requests in, replies and streams out, over libmicrohttpd. It knows routes and limits, and
 * nothing of models.
 *
 * Threads. The library's threads read and write sockets and never wait for anything else. When the
 * body of a request is here, its route's handler is called in one of `workers` threads, where it
 * may block (enum http_dispatch has the exceptions); it answers once, then or later, from any thread:
 * exchange_reply, or exchange_stream. A stream is pulled: when the socket has room, `pull` is asked
 * for more in a thread of the library, and says whether there will be any; whoever has more
 * afterwards calls exchange_wake. So who reads slowly is served slowly, and costs a buffer.
 *
 * Lives. An exchange is counted: the connection holds one reference and drops it when the reply is
 * out or the client gone; who answers later or wakes holds another (exchange_retain). A client that
 * vanishes is noticed within half a second also while nothing is written; one that closes its half
 * of the connection counts as gone.
 */
#ifndef SHOAL_HTTP_H
#define SHOAL_HTTP_H

#include "base/base.h"

struct exchange;
struct http;

/* A path is compared by parts; "*" as a last part stands for the rest, which may hold slashes, and
 * is exchange_wildcard. Parts are percent-decoded after they were told apart. */
struct http_route {
    const char *method, *path;
    int scope; /* whoever admits knows what it means */
    void (*handle)(void *ctx, struct exchange *x);
};

struct http_options {         /* filled from option rows */
    char *host;               /* 127.0.0.1 */
    int64_t port;             /* 8000; 0: any, see http_port */
    char *tls_cert, *tls_key; /* PEM files; both or none */
    struct strings cors;      /* origins that browsers may call from; "*": any */
    int64_t max_body;         /* 32 MiB */
    int64_t max_held; /* bytes of all bodies at once; 0: eight times max_body. No option row */
    int64_t max_connections; /* 4096 */
    int64_t max_per_address; /* 512: connections, not of this machine's addresses or proxies */
    struct strings hosts;    /* names of this server beside its own, for Host */
    struct strings proxies;  /* addresses whose X-Forwarded-For is believed */
    double header_seconds;   /* 20: from the first byte of a request to the last of its body … */
    double body_seconds;     /* 120 */
    double idle_seconds;     /* 75: of a connection between requests */
    double drain_seconds;    /* 30: that unfinished replies get at the end */
};
extern const struct option_row http_option_rows[];
/* Checks the options that need no network (addresses of proxies), for a caller that has much to
 * load before http_new. */
int http_options_check(const struct http_options *o, struct error *err);
/* Whether the certificate and its key can be served with, if there are any: for whoever has much
 * to load first. Warns of a key that others can read. */
int http_tls_check(const struct http_options *o, struct error *err);

/* Takes a body a part at a time, in the library's threads, instead of memory: --max-body does not
 * bound it, and body_seconds is the time that a part may take. */
struct body_sink {
    int (*put)(struct body_sink *sink, const void *p, size_t n); /* not OK: it hangs up */
    void (*drop)(struct body_sink *sink); /* the exchange is over, whatever came of it */
};
/* Where a route's handler is called. */
enum http_dispatch {
    HTTP_DISPATCH_WORKER,
    HTTP_DISPATCH_SLOW_WORKER,   /* in a worker; it waits for long, so these use half of the workers at most */
    HTTP_DISPATCH_OWN_THREAD,  /* in a thread of its own, so that it answers when all workers are busy: short */
    HTTP_DISPATCH_IO_THREAD /* in the library's thread, which serves others too: it touches memory only, takes
                    no lock, and answers before it returns */
};
struct http_callbacks {
    void *ctx;
    const struct http_route *routes; /* ends with a NULL method */
    int workers;
    struct http **self; /* set before anything is called, sooner than http_new returns; or NULL */
    /* Whether the request may go on, before its body is read: OK, or it has been answered
     * (exchange_refuse). */
    int (*admit)(void *ctx, struct exchange *x, const struct http_route *r);
    /* After admit: where the body goes; NULL: into memory, or it has been answered. May be NULL. */
    struct body_sink *(*sink)(void *ctx, struct exchange *x, const struct http_route *r);
    /* An error in this API's words. */
    void (*refuse)(void *ctx, struct exchange *x, int status, const char *code,
                   const char *message);
    /* NULL: all are plain. */
    enum http_dispatch (*work)(void *ctx, const struct http_route *r);
    /* Whether requests may have any Host, because admission needs a key. NULL: they may not; see
     * exchange_host_is_own. */
    bool (*any_host)(void *ctx);
    /* The reply is out, or given up. */
    void (*ended)(void *ctx, const struct exchange *x);
};
/* ERR_USAGE for an address that is taken or a certificate that cannot be read. Everything in the
 * options and calls is borrowed. */
struct http *http_new(const struct http_options *o, const struct http_callbacks *c, struct error *err);
int http_port(const struct http *h);
/* Whether only this machine will be listened to. */
bool http_is_loopback(const struct http_options *o);
/* No new connections; what is under way is finished, for drain_seconds at most. Then http_free. */
void http_drain(struct http *h);
void http_free(struct http *h);
/* Runs fn in a worker's thread. */
void http_run_in_worker(struct http *h, void (*fn)(void *ctx), void *ctx);
struct http_stats {
    uint64_t connections, requests, bytes_out;
    int open, streams; /* connections and unfinished streams now */
};
struct http_stats http_stats(struct http *h);
struct client_limits;
struct client_limits *http_limits(struct http *h); /* by exchange_client_key and what the caller adds */

/* a request */

/* The one that this thread's handler was called with; NULL in other threads. */
struct exchange *exchange_current(void);
const char *exchange_method(const struct exchange *x);
const char *exchange_path(const struct exchange *x); /* decoded, without the query */
const char *exchange_wildcard(const struct exchange *x); /* what the route's "*" stands for; or "" */
const char *exchange_header(const struct exchange *x, const char *name); /* NULL: there is none */
const char *exchange_query(const struct exchange *x, const char *name);
/* The client's address in words: the socket's, or of a trusted proxy's request the one that it
 * names; and the name under which its limits are kept. */
const char *exchange_peer(const struct exchange *x);
const char *exchange_client_key(const struct exchange *x);
/* Of this machine: the socket's address is, and no proxy has forwarded the request, but for a
 * trusted one that names an address of this machine. */
bool exchange_is_local(const struct exchange *x);
/* Whether Host names this server: an IP address, localhost, the machine's name, --host or
 * --allowed-host; or there is none. A page whose own name was given this server's address (DNS
 * rebinding) cannot say so. */
bool exchange_host_is_own(const struct exchange *x);
/* The body, until the handler returns; JSON of it is parsed strictly, nested at most 100 deep. */
const struct buf *exchange_body(const struct exchange *x);
json_t *exchange_json(const struct exchange *x, struct error *err);
struct body_sink *exchange_sink(const struct exchange *x);
json_t *json_parse_body(const struct buf *body, struct error *err); /* the same of any bytes */
double exchange_began(const struct exchange *x);              /* clock_now of its first line */
/* One pointer of the caller's, from admit to ended. */
void exchange_set_user(struct exchange *x, void *user);
void *exchange_user(const struct exchange *x);
const struct http_route *exchange_route(const struct exchange *x); /* NULL: none fits */
int exchange_status(const struct exchange *x);                /* 0: not answered */
/* Whether its client has gone: what takes long in a handler looks at it now and then. */
bool exchange_is_disconnected(struct exchange *x);

/* an answer */

/* Before the answer: a header more. */
void exchange_add_header(struct exchange *x, const char *name, const char *value);
void exchange_reply(struct exchange *x, int status, const char *type, const void *data, size_t n);
void exchange_reply_take(struct exchange *x, int status, const char *type,
                         struct buf *b);                             /* takes the bytes over */
void exchange_reply_json(struct exchange *x, int status, json_t *v); /* takes v over */

enum stream_status { STREAM_MORE, STREAM_WAIT, STREAM_END };
struct stream_source {
    /* Appends what there is to say: STREAM_MORE, to be asked again when it is out; STREAM_WAIT: ask
     * after exchange_wake; STREAM_END after these bytes. Does not block, is not called twice at
     * once. */
    enum stream_status (*pull)(void *ctx, struct buf *out);
    /* The stream is over, or its client gone (`finished` false): called once. */
    void (*close)(void *ctx, bool finished);
    void *ctx;
    const char *idle; /* sent when nothing was for 15 seconds, or NULL */
};
void exchange_stream(struct exchange *x, int status, const char *type,
                     const struct stream_source *s);
void exchange_wake(struct exchange *x); /* any thread, any number of times */
/* Until the answer: called once, in a thread of http's own, when the client has gone. It may not
 * touch this exchange. */
void exchange_on_disconnect(struct exchange *x, void (*gone)(void *ctx), void *ctx);
struct exchange *exchange_retain(struct exchange *x);
void exchange_release(struct exchange *x);

#endif
