/*
 * limits: what each client holds at a time (connections, requests, bytes), and how often it has
 * sent a wrong key. A client is a name: an address (ip_address_client_key), or a key's id.
 *
 * Any thread may call. The table is bounded: a client that holds something has an entry, and there
 * are no more of those than there are connections and requests; of the others the CLIENT_LIMITS_IDLE_MAX used
 * last are remembered for their wrong keys.
 *
 * Clock: `now` is clock_now(), which is not set back or forth.
 */
#ifndef SHOAL_SERVE_LIMITS_H
#define SHOAL_SERVE_LIMITS_H

#include "base/base.h"

enum client_limit { LIMIT_CONNECTIONS, LIMIT_REQUESTS, LIMIT_BYTES, N_LIMITS };
enum {
    AUTH_FREE_FAILURES = 10,    /* wrong keys without a wait */
    AUTH_BACKOFF_MAX = 60,    /* seconds: the longest wait, which begins at 1 and doubles */
    AUTH_FAILURE_TTL = 600, /* seconds without a wrong key after which all are forgotten */
    CLIENT_LIMITS_IDLE_MAX = 4096,    /* clients that are remembered although they hold nothing */
};

struct client_limits;
struct client_limits *client_limits_new(void);
void client_limits_free(struct client_limits *l); /* may be NULL */
/* Adds n to what a client holds, where it then has at most `most` (0: any number); else false. */
bool client_limits_acquire(struct client_limits *l, const char *client, enum client_limit what, int64_t n, int64_t most);
void client_limits_release(struct client_limits *l, const char *client, enum client_limit what, int64_t n);
/* Whether a client holds less than `most` (0: yes). */
bool client_limits_has_room(struct client_limits *l, const char *client, enum client_limit what, int64_t most);

/* Seconds until keys that can be guessed are compared again for this client; 0: now. */
double client_limits_auth_backoff(struct client_limits *l, const char *client, double now);
/* The client sent a wrong key. The same one again is no guess: a client whose key is out of date
 * does not make its address wait. */
void client_limits_auth_failed(struct client_limits *l, const char *client, const char *key, double now);
/* The client sent a right key, one of the first 64 that can be guessed; whether it did before. */
void client_limits_auth_ok(struct client_limits *l, const char *client, int key);
bool client_limits_was_auth_ok(struct client_limits *l, const char *client, int key);
int client_limits_count(struct client_limits *l); /* that are in the table */

#endif
