/*
 * limits: what each client holds at a time (connections, requests, bytes), and how often it has
 * sent a wrong key. A client is a name: an address (address_client), or a key's id.
 *
 * Any thread may call. The table is bounded: a client that holds something has an entry, and there
 * are no more of those than there are connections and requests; of the others the IDLE_MAX used
 * last are remembered for their wrong keys.
 *
 * Clock: `now` is clock_now(), which is not set back or forth.
 */
#ifndef SHOAL_SERVE_LIMITS_H
#define SHOAL_SERVE_LIMITS_H

#include "base/base.h"

enum limited { LIMIT_CONNECTIONS, LIMIT_REQUESTS, LIMIT_BYTES, N_LIMITS };
enum {
    WRONG_FREE = 10,    /* wrong keys without a wait */
    WRONG_WAIT = 60,    /* seconds: the longest wait, which begins at 1 and doubles */
    WRONG_FORGET = 600, /* seconds without a wrong key after which all are forgotten */
    IDLE_MAX = 4096,    /* clients that are remembered although they hold nothing */
};

struct limits;
struct limits *limits_new(void);
void limits_free(struct limits *l); /* may be NULL */
/* Adds n to what a client holds, where it then has at most `most` (0: any number); else false. */
bool limits_take(struct limits *l, const char *client, enum limited what, int64_t n, int64_t most);
void limits_give(struct limits *l, const char *client, enum limited what, int64_t n);
/* Whether a client holds less than `most` (0: yes). */
bool limits_room(struct limits *l, const char *client, enum limited what, int64_t most);

/* Seconds until keys that can be guessed are compared again for this client; 0: now. */
double limits_wait(struct limits *l, const char *client, double now);
/* The client sent a wrong key. The same one again is no guess: a client whose key is out of date
 * does not make its address wait. */
void limits_wrong(struct limits *l, const char *client, const char *key, double now);
/* The client sent a right key, one of the first 64 that can be guessed; whether it did before. */
void limits_right(struct limits *l, const char *client, int key);
bool limits_was_right(struct limits *l, const char *client, int key);
int limits_clients(struct limits *l); /* that are in the table */

#endif
