/*
 * http: requests, replies and streams over libmicrohttpd. It has routes and limits; it knows
 * nothing about models.
 *
 * Threads. The library's threads read and write sockets and never wait for anything else. When the
 * body of a request is complete, its route's handler is called in one of `workers` threads, where
 * it may block (enum http_dispatch lists the exceptions). The handler answers once, immediately or
 * later, from any thread: exchange_reply or exchange_stream. A stream is pulled: when the socket
 * has room, a thread of the library calls `pull`, which appends bytes and returns whether more will
 * follow. A producer that has more bytes later calls exchange_wake. So a slow client slows down
 * only its own stream and costs one buffer.
 *
 * Lifetime. An exchange has a reference count. The connection holds one reference and drops it when
 * the reply is sent or the client disconnects. Code that answers later, or wakes a stream, holds
 * another (exchange_retain). A client that vanishes is noticed within half a second, even while
 * nothing is written; a client that closes its half of the connection counts as disconnected.
 *
 * A call is a request of this process, without a connection: it passes admission and the route's
 * handler like every other request, and its reply is read by http_call_read.
 */
#ifndef SHOAL_HTTP_H
#define SHOAL_HTTP_H

#include "base/base.h"

struct exchange;
struct http;

/* A path is compared before it is percent-decoded. A "*" at the end of `path` matches the rest,
 * slashes included, if it is not empty; exchange_wildcard returns this rest, decoded. */
struct http_route {
    const char *method, *path;
    int scope; /* required scope; only the `admit` callback interprets it */
    void (*handle)(void *ctx, struct exchange *x);
};

struct http_options {         /* from http_option_rows; comments begin with the default, if any */
    char *host;               /* 127.0.0.1 */
    int64_t port;             /* 8000; 0: any, see http_port */
    char *tls_cert, *tls_key; /* PEM files; both or neither */
    struct strings cors;      /* origins that browsers may call from; "*": any */
    int64_t max_body;         /* 32 MiB */
    int64_t max_held; /* bytes of all bodies in memory; 0: eight times max_body. No option row */
    bool calls_only;  /* listen on no address: the only requests are calls. No option row */
    int64_t max_connections; /* 4096 */
    int64_t max_per_address; /* 512, except for loopback and trusted proxies */
    struct strings hosts;    /* accepted values of Host in addition to the server's default names */
    struct strings proxies;  /* addresses of proxies whose X-Forwarded-For header is trusted */
    double header_seconds;   /* 20: time for a request's line and headers */
    double body_seconds;  /* 120: time for a whole body; with a body_sink, for each part. Also the
                             base of the time for reading a reply */
    double idle_seconds;  /* 75: idle time of a connection between requests */
    double drain_seconds; /* 30: time for unfinished replies at shutdown */
};
extern const struct option_row http_option_rows[];
/* Checks the addresses of proxies, so that a caller finds errors before it loads a model and calls
 * http_new. */
int http_options_check(const struct http_options *o, struct error *err);
/* OK if the server can use the certificate and its key, or if neither is set, so that a caller
 * finds errors before it loads a model. Warns if other users can read the key. */
int http_tls_check(const struct http_options *o, struct error *err);

/* Receives a body part by part in the library's threads, instead of buffering it in memory.
 * --max-body does not limit such a body, and body_seconds limits each part. */
struct body_sink {
    int (*write)(struct body_sink *sink, const void *p,
                 size_t n);                  /* an error closes the connection */
    void (*release)(struct body_sink *sink); /* called when the exchange has ended in any way */
};
/* Where a route's handler runs. */
enum http_dispatch {
    HTTP_DISPATCH_WORKER,
    HTTP_DISPATCH_SLOW_WORKER, /* a worker; the handler may block for long, so at most half of the
                                * workers run such handlers */
    HTTP_DISPATCH_OWN_THREAD,  /* a separate thread, so that it answers even if all workers are
                                * busy; the handler must be short */
    HTTP_DISPATCH_IO_THREAD    /* the library's thread, which also serves other connections: the
                                * handler only reads and writes memory, takes no lock, and answers
                                * before it returns */
};
struct http_callbacks {
    void *ctx;
    const struct http_route *routes; /* ends with a NULL method */
    int workers;
    struct http **self; /* set before any callback runs, and before http_new returns; or NULL */
    /* Called before the body is read. Returns OK if the request is admitted; otherwise the callback
     * has answered it. */
    int (*admit)(void *ctx, struct exchange *x, const struct http_route *r);
    /* Called after `admit` for an admitted request. Returns the sink for the body; NULL: the body
     * goes into memory, or the callback has answered the request. `sink` itself may be NULL. */
    struct body_sink *(*sink)(void *ctx, struct exchange *x, const struct http_route *r);
    /* Answers with an error in the format of this API. */
    void (*refuse)(void *ctx, struct exchange *x, int status, const char *code,
                   const char *message);
    /* Where the route's handler runs. NULL: all routes use HTTP_DISPATCH_WORKER. */
    enum http_dispatch (*dispatch)(void *ctx, const struct http_route *r);
    /* Whether requests may have any Host header, because admission requires a key. NULL or false:
     * see exchange_host_is_own. */
    bool (*any_host)(void *ctx);
    /* Called once, when the reply was sent or the exchange was aborted. */
    void (*ended)(void *ctx, const struct exchange *x);
    /* Runs the route's handler. NULL: r->handle(ctx, x). */
    void (*handle)(void *ctx, struct exchange *x, const struct http_route *r);
};
/* ERR_USAGE: it cannot listen on the address, or certificate and key do not fit. ERR_MISSING or
 * ERR_IO: libmicrohttpd, the certificate or the key cannot be loaded. The options, and all pointers
 * in options and callbacks, are borrowed until http_free. */
struct http *http_new(const struct http_options *o, const struct http_callbacks *c,
                      struct error *err);
int http_port(const struct http *h);
/* Whether the server will listen on a loopback address only. */
bool http_is_loopback(const struct http_options *o);
/* Accepts no new connections and waits at most drain_seconds until requests in progress are
 * finished. Call http_free afterwards. */
void http_drain(struct http *h);
void http_free(struct http *h);
/* Runs fn in a worker thread. */
void http_run_in_worker(struct http *h, void (*fn)(void *ctx), void *ctx);
/* Runs the handlers of postponed requests again, one after the other in the order of their arrival.
 * When one of them postpones its request once more, those that wait for the same resource are left
 * out. http calls it four times per second, too. */
void http_resume_postponed(struct http *h);
struct http_stats {
    uint64_t connections, requests, bytes_out;
    int open, streams; /* current connections; unfinished streams */
};
struct http_stats http_stats(struct http *h);
struct client_limits;
struct client_limits *http_limits(struct http *h); /* the limits of clients; owned by the server */

/* a request */

/* The exchange of the handler that this thread runs; NULL in other threads. */
struct exchange *exchange_current(void);
/* Postpones the request of the handler that this thread runs until a resource, which the address
 * `resource` identifies, is available: headers and the answer that the handler still gives are
 * discarded, and the handler runs again after http_resume_postponed. False: the client has
 * disconnected. */
bool exchange_postpone(struct exchange *x, const void *resource);
/* Whether earlier requests are postponed until the resource is available. A handler that needs it
 * should postpone its request too, so that it does not overtake them. */
bool exchange_is_behind_postponed(struct exchange *x, const void *resource);
/* The X-Request-Id header of the reply: the client's, if it sent one of 1 to 128 letters, digits
 * and "-_.:", or else a random one. */
const char *exchange_id(const struct exchange *x);
const char *exchange_method(const struct exchange *x);
const char *exchange_path(const struct exchange *x); /* decoded, without the query */
const char *
exchange_wildcard(const struct exchange *x); /* the part of the path that "*" matched, else "" */
const char *exchange_header(const struct exchange *x, const char *name); /* NULL: no such header */
/* An argument of the query, decoded; "" for a name without "=". NULL: no such argument. */
const char *exchange_query(const struct exchange *x, const char *name);
/* exchange_peer is the client's address as text: the address of the socket, or the address that a
 * trusted proxy reports. exchange_limits_name is the name under which the client's limits are kept
 * (ip_address_client_key). */
const char *exchange_peer(const struct exchange *x);
const char *exchange_limits_name(const struct exchange *x);
/* Whether the request comes from this machine: the socket's address is a loopback address, and no
 * proxy has forwarded the request, except a trusted proxy that reports a loopback address. */
bool exchange_is_local(const struct exchange *x);
/* Whether the Host header names this server: an IP address, localhost, the machine's name, --host
 * or --allowed-host. True without a Host header. A web page whose domain resolves to this server's
 * address (DNS rebinding) sends its domain as Host, so the result is false. */
bool exchange_host_is_own(const struct exchange *x);
/* The body, valid until the handler returns. exchange_json parses it strictly, within
 * json_request_limits. */
const struct buf *exchange_body(const struct exchange *x);
json_t *exchange_json(const struct exchange *x, struct error *err);
struct body_sink *exchange_sink(const struct exchange *x);
json_t *json_parse_body(const struct buf *body,
                        struct error *err); /* as exchange_json, for a body from elsewhere */
double exchange_start_time(const struct exchange *x); /* clock_now() when the headers had arrived */
/* A pointer of the caller, kept from `admit` to `ended`. */
void exchange_set_user(struct exchange *x, void *user);
void *exchange_user(const struct exchange *x);
int exchange_status(const struct exchange *x); /* 0: not answered yet */
/* Whether the client has disconnected. A long handler should check this regularly. */
bool exchange_is_disconnected(struct exchange *x);

/* the answer */

/* Adds a response header; call it before the answer. */
void exchange_add_header(struct exchange *x, const char *name, const char *value);
void exchange_reply(struct exchange *x, int status, const char *type, const void *data, size_t n);
void exchange_reply_buf(struct exchange *x, int status, const char *type,
                        struct buf *b); /* takes ownership of b->data */
void exchange_reply_json(struct exchange *x, int status, json_t *v); /* takes ownership of v */

enum stream_status { STREAM_MORE, STREAM_WAIT, STREAM_END };
struct stream_source {
    /* Appends the available bytes. The result says when it is called again: STREAM_MORE: when these
     * bytes are sent. STREAM_WAIT: after exchange_wake. STREAM_END: never; these bytes are the
     * last. It must not block. Its calls do not overlap. */
    enum stream_status (*pull)(void *ctx, struct buf *out);
    /* Called once when the stream has ended, or when its client has disconnected (`finished`
     * false). */
    void (*close)(void *ctx, bool finished);
    void *ctx;
    const char *idle; /* text that is sent after 15 seconds without output, or NULL */
};
void exchange_stream(struct exchange *x, int status, const char *type,
                     const struct stream_source *s);
void exchange_wake(struct exchange *x); /* any thread, any number of times */
/* Calls `gone` once if the client disconnects before the answer: in the watchdog thread, or at once
 * in the calling thread if the client has disconnected already. `gone` must not use `x`. */
void exchange_on_disconnect(struct exchange *x, void (*gone)(void *ctx), void *ctx);
struct exchange *exchange_retain(struct exchange *x);
void exchange_release(struct exchange *x);

/* calls */

struct http_field {
    const char *name, *value;
};
struct http_call {
    const char *method, *path; /* the path is decoded, and has no query */
    struct exchange *parent;   /* the request that the call is a part of: the client is the same;
                                  NULL: this process itself, which counts as a local client */
    const struct http_field *headers, *query; /* end with a NULL name; may be NULL; copied */
    struct buf body;                          /* taken over */
    /* The call was answered, or its stream has more bytes. Called in the thread that answers, any
     * number of times, and never with a lock of the exchange held. */
    void (*notify)(void *ctx);
    void (*release)(void *ctx); /* called once, when no code holds a reference to the call */
    void *ctx;
};
/* Creates a call, with one reference, which http_call_end releases. Routes whose body goes to a
 * body_sink cannot be called. */
struct exchange *http_call_new(struct http *h, const struct http_call *c);
/* Starts the call. `notify` may be called before this function returns. */
void http_call_start(struct exchange *x);
/* Appends the available bytes of the reply. The result is that of `pull` of a stream; STREAM_WAIT
 * before the answer. STREAM_END also follows http_call_cancel. */
enum stream_status http_call_read(struct exchange *x, struct buf *out);
const char *http_call_type(const struct exchange *x); /* media type of the answer, or NULL */
/* A header of the answer of a call; NULL: it has no such header. */
const char *http_call_header(const struct exchange *x, const char *name);
/* `ctx` of a call that has this `notify`; NULL: x is another request. */
void *http_call_ctx(const struct exchange *x, void (*notify)(void *ctx));
/* As if the client of the call had disconnected; does not call `notify`. An unanswered call is
 * answered nevertheless. Any thread. */
void http_call_cancel(struct exchange *x);
/* Ends an answered call. finished: the reply was read to its end. */
void http_call_end(struct exchange *x, bool finished);
/* The parent of a call; NULL for other requests, and for calls without a parent. */
const struct exchange *exchange_parent(const struct exchange *x);

/*
 * address: the address of a client, also if a proxy forwards the client's requests. An address has
 * 16 bytes; IPv4 is mapped into IPv6 (::ffff:a.b.c.d), so one comparison serves both.
 */

struct sockaddr;
struct ip_address {
    uint8_t b[16];
};
enum { IP_ADDRESS_TEXT_LEN = 56 };
/* Parses "1.2.3.4", "::1" or "[::1]", with or without ":PORT" ("::1" only without), and nothing
 * else. */
bool ip_address_parse(const char *text, size_t n, struct ip_address *out);
bool ip_address_from_sockaddr(const struct sockaddr *a, struct ip_address *out);
bool ip_address_is_loopback(const struct ip_address *a);
void ip_address_format(const struct ip_address *a, char out[IP_ADDRESS_TEXT_LEN]);
/* The name under which a client's limits are kept: its IPv4 address, or the /64 network of its IPv6
 * address, which is the network of one subscriber. */
void ip_address_client_key(const struct ip_address *a, char out[IP_ADDRESS_TEXT_LEN]);

/* A block of addresses with a common prefix: "10.0.0.0/8", or one address. */
struct ip_cidr {
    struct ip_address first;
    int bits; /* length of the prefix, 0 to 128; for IPv4 it includes the 96 bits of ::ffff: */
};
int ip_cidr_parse(const char *text, struct ip_cidr *out, struct error *err);
bool ip_address_in_cidrs(const struct ip_address *a, const struct ip_cidr *blocks, int n);

/* The client's address in an X-Forwarded-For list. Each proxy appends the address that it received
 * the request from, so the client is the last address outside `trusted`, or the first address if
 * all are trusted. Returns false if the list is empty or a trusted proxy has written something else
 * than an address. */
bool ip_address_from_forwarded(const char *list, const struct ip_cidr *trusted, int n,
                               struct ip_address *out);

/* Whether the value of a Host header, with or without a port, is an IP address (host_header_is_ip)
 * or `name` (host_header_is). */
bool host_header_is_ip(const char *host);
bool host_header_is(const char *host, const char *name);

/*
 * limits: the number of connections, requests and bytes that each client holds, and the wrong keys
 * that it has sent. A client is identified by a name: an address (ip_address_client_key) or a key's
 * id.
 *
 * Any thread may call. The table is bounded: a client that holds something has an entry, so there
 * are at most as many of these entries as connections and requests. Of the clients that hold
 * nothing, the table remembers which keys they sent for the CLIENT_LIMITS_IDLE_MAX most recent
 * ones.
 *
 * `now` is clock_now(), which is monotonic.
 */

enum client_limit { LIMIT_CONNECTIONS, LIMIT_REQUESTS, LIMIT_BYTES, N_LIMITS };
enum {
    AUTH_FREE_FAILURES = 10, /* after this number of wrong keys the client must wait */
    AUTH_BACKOFF_MAX = 60,   /* the longest wait in seconds; the first is 1 second, and each further
                                wrong key doubles it */
    AUTH_FAILURE_TTL = 600,  /* seconds without a wrong key after which they are forgotten */
    CLIENT_LIMITS_IDLE_MAX = 4096, /* remembered clients that hold nothing */
};

struct client_limits;
struct client_limits *client_limits_new(void);
void client_limits_free(struct client_limits *l); /* may be NULL */
/* Adds n and returns true if the client then holds at most `most` (0: any number); otherwise
 * returns false. */
bool client_limits_acquire(struct client_limits *l, const char *client, enum client_limit what,
                           int64_t n, int64_t most);
void client_limits_release(struct client_limits *l, const char *client, enum client_limit what,
                           int64_t n);
/* Whether a client holds less than `most` (0: any number). */
bool client_limits_has_room(struct client_limits *l, const char *client, enum client_limit what,
                            int64_t most);

/* Seconds for which the server still refuses to compare guessable keys of this client; 0: it does
 * not refuse. */
double client_limits_auth_backoff(struct client_limits *l, const char *client, double now);
/* Records a wrong key. A wrong key that is among the last few of this client does not count again,
 * so that a client with an outdated key does not make its address wait. */
void client_limits_auth_failed(struct client_limits *l, const char *client, const char *key,
                               double now);
/* client_limits_auth_ok records that the client sent the right key with this index (of the first 64
 * guessable keys); client_limits_was_auth_ok returns whether it has. */
void client_limits_auth_ok(struct client_limits *l, const char *client, int key);
bool client_limits_was_auth_ok(struct client_limits *l, const char *client, int key);
int client_limits_count(struct client_limits *l); /* entries in the table */

#endif
