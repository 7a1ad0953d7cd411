/*
 * http: requests in, replies and streams out, over libmicrohttpd. It knows routes and limits, and
 * nothing of models.
 *
 * Threads. The library's threads read and write sockets and never wait for anything else. When the
 * body of a request is here, its route's handler is called in one of `workers` threads, where it
 * may block (enum http_dispatch has the exceptions); it answers once, then or later, from any
 * thread: exchange_reply, or exchange_stream. A stream is pulled: when the socket has room, `pull`
 * is asked for more in a thread of the library, and says whether there will be any; whoever has
 * more afterwards calls exchange_wake. So who reads slowly is served slowly, and costs a buffer.
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
    HTTP_DISPATCH_SLOW_WORKER, /* in a worker; it waits for long, so these use half of the workers
                                  at most */
    HTTP_DISPATCH_OWN_THREAD,  /* in a thread of its own, so that it answers when all workers are
                                  busy: short */
    HTTP_DISPATCH_IO_THREAD /* in the library's thread, which serves others too: it touches memory
                    only, takes no lock, and answers before it returns */
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
struct http *http_new(const struct http_options *o, const struct http_callbacks *c,
                      struct error *err);
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
struct client_limits *
http_limits(struct http *h); /* by exchange_client_key and what the caller adds */

/* a request */

/* The one that this thread's handler was called with; NULL in other threads. */
struct exchange *exchange_current(void);
const char *exchange_method(const struct exchange *x);
const char *exchange_path(const struct exchange *x); /* decoded, without the query */
const char *
exchange_wildcard(const struct exchange *x); /* what the route's "*" stands for; or "" */
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
double exchange_began(const struct exchange *x); /* clock_now of its first line */
/* One pointer of the caller's, from admit to ended. */
void exchange_set_user(struct exchange *x, void *user);
void *exchange_user(const struct exchange *x);
const struct http_route *exchange_route(const struct exchange *x); /* NULL: none fits */
int exchange_status(const struct exchange *x);                     /* 0: not answered */
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

/*
 * address: of a client, and how it becomes known when a proxy is between. Addresses are 16 bytes,
 * IPv4 mapped into IPv6 (::ffff:a.b.c.d), so that both are compared in one way.
 */

struct sockaddr;
struct ip_address {
    uint8_t b[16];
};
enum { IP_ADDRESS_TEXT_LEN = 56 };
/* "1.2.3.4", "::1", "[::1]", each perhaps with ":PORT" ("::1" without); nothing else around it. */
bool ip_address_parse(const char *text, size_t n, struct ip_address *out);
bool ip_address_from_sockaddr(const struct sockaddr *a, struct ip_address *out);
bool ip_address_is_loopback(const struct ip_address *a);
void ip_address_format(const struct ip_address *a, char out[IP_ADDRESS_TEXT_LEN]);
/* The name under which a client's limits are kept: its address, of IPv6 the network of 64 bits that
 * one subscriber has. */
void ip_address_client_key(const struct ip_address *a, char out[IP_ADDRESS_TEXT_LEN]);

/* Addresses that begin alike: "10.0.0.0/8", or one address. */
struct ip_cidr {
    struct ip_address first;
    int bits; /* of 128 */
};
int ip_cidr_parse(const char *text, struct ip_cidr *out, struct error *err);
bool ip_address_in_cidrs(const struct ip_address *a, const struct ip_cidr *blocks, int n);

/* The client of a list as X-Forwarded-For has it: each proxy has appended the address that it was
 * sent from, so the last one that is no trusted proxy is the client; where all are, the first.
 * False where the list does not say: it is empty, or a trusted proxy has written no address. */
bool ip_address_from_forwarded(const char *list, const struct ip_cidr *trusted, int n,
                               struct ip_address *out);

/* Whether the value of a Host header is an IP address, or `name`, with or without a port. */
bool host_header_is_ip(const char *host);
bool host_header_is(const char *host, const char *name);

/*
 * limits: what each client holds at a time (connections, requests, bytes), and how often it has
 * sent a wrong key. A client is a name: an address (ip_address_client_key), or a key's id.
 *
 * Any thread may call. The table is bounded: a client that holds something has an entry, and there
 * are no more of those than there are connections and requests; of the others the
 * CLIENT_LIMITS_IDLE_MAX used last are remembered for their wrong keys.
 *
 * Clock: `now` is clock_now(), which is not set back or forth.
 */

enum client_limit { LIMIT_CONNECTIONS, LIMIT_REQUESTS, LIMIT_BYTES, N_LIMITS };
enum {
    AUTH_FREE_FAILURES = 10,       /* wrong keys without a wait */
    AUTH_BACKOFF_MAX = 60,         /* seconds: the longest wait, which begins at 1 and doubles */
    AUTH_FAILURE_TTL = 600,        /* seconds without a wrong key after which all are forgotten */
    CLIENT_LIMITS_IDLE_MAX = 4096, /* clients that are remembered although they hold nothing */
};

struct client_limits;
struct client_limits *client_limits_new(void);
void client_limits_free(struct client_limits *l); /* may be NULL */
/* Adds n to what a client holds, where it then has at most `most` (0: any number); else false. */
bool client_limits_acquire(struct client_limits *l, const char *client, enum client_limit what,
                           int64_t n, int64_t most);
void client_limits_release(struct client_limits *l, const char *client, enum client_limit what,
                           int64_t n);
/* Whether a client holds less than `most` (0: yes). */
bool client_limits_has_room(struct client_limits *l, const char *client, enum client_limit what,
                            int64_t most);

/* Seconds until keys that can be guessed are compared again for this client; 0: now. */
double client_limits_auth_backoff(struct client_limits *l, const char *client, double now);
/* The client sent a wrong key. The same one again is no guess: a client whose key is out of date
 * does not make its address wait. */
void client_limits_auth_failed(struct client_limits *l, const char *client, const char *key,
                               double now);
/* The client sent a right key, one of the first 64 that can be guessed; whether it did before. */
void client_limits_auth_ok(struct client_limits *l, const char *client, int key);
bool client_limits_was_auth_ok(struct client_limits *l, const char *client, int key);
int client_limits_count(struct client_limits *l); /* that are in the table */

#endif
