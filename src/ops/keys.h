/*
 * keys: who may use a server, how much of it, and what each has used.
 *
 * A key is a secret that its owner keeps and a row that the store keeps: the SHA-256 of the secret,
 * its last four characters, scopes and limits. The secret is returned once, when the key is made,
 * and is in no file, log, error or JSON.
 *
 * Threads: everything may be called from any thread at any time, keys_close when no other call is
 * running. keys_authorize and keys_record_usage touch memory only. A thread of the module's own takes over,
 * once a second, what other processes have changed in the store, and writes what was used; so a
 * kill loses a second of accounting at most, and never a key. Keys made and revoked are on the disk
 * when the call returns, so that a power failure does not bring a revoked key back; accounting is
 * not synchronised. Several servers may share a store:
 * what they count adds up in it, each holding the limits to what it knows.
 *
 * Clock: `now` is in seconds since 1970, UTC, as the caller's clock says; days are UTC days. A
 * clock that is set back does not block anybody.
 */
#ifndef SHOAL_SERVE_KEYS_H
#define SHOAL_SERVE_KEYS_H

#include "base/base.h"

enum key_scope { KEY_SCOPE_CHAT = 1, KEY_SCOPE_JOBS = 2, KEY_SCOPE_ADMIN = 4 };
unsigned key_scope_from_name(const char *name); /* 0: there is none */

/* What a key may do; a limit of 0 is none. */
struct key_spec {
    unsigned scopes; /* enum key_scope, or-ed; none implies another */
    /* Each is a bucket that holds a minute's worth and starts full. */
    int64_t requests_per_minute, tokens_per_minute;
    int64_t quota_day, quota; /* tokens, prompt and completion: in a day, and in all */
    int64_t expires;          /* in seconds since 1970 */
};

enum {
    KEY_SECRET_LEN = 53, /* "sk-shoal-", 32 random bytes as base64url, NUL */
    KEY_ID_LEN = 21,     /* "key-" and 16 digits, "cli-N", or KEY_TOKEN_ID */
    KEY_NAME_LEN = 64,
};

#define KEY_TOKEN_ID "start:token" /* no key's name has a colon */

struct keys;
/* The file, and its folder, are made when they are not there. A store with a row that is not as
 * this module writes it is refused whole. */
struct keys *keys_open(const char *store_path, struct error *err);
void keys_close(struct keys *k); /* writes what was used; may be NULL */
/* What the module's thread does each second, now. */
int keys_sync(struct keys *k, struct error *err);

/* Whether there is any key, usable or not: from the first one on, requests must show one. Revoking
 * the last key closes a server, it does not open it. */
bool keys_exist(struct keys *k);
/* Makes a key and writes its secret. Names are unique among keys that are not revoked. */
int keys_add(struct keys *k, const char *name, const struct key_spec *spec, double now,
             char secret[KEY_SECRET_LEN], struct error *err);
/* A secret that the administrator chose: without limits, kept in memory only. The same again adds
 * scopes. */
int keys_add_fixed(struct keys *k, const char *secret, unsigned scopes, struct error *err);
/* Makes the start-up token: a secret of 32 random bytes after "st-" with every scope, in memory
 * only. keys_exist does not count it and keys_list does not show it. Called at most once. */
void keys_add_startup_token(struct keys *k, char secret[KEY_SECRET_LEN]);
/* The id of a secret's key, whether it is usable or not; false: there is no such key. */
bool keys_lookup(struct keys *k, const char *secret, char id[KEY_ID_LEN]);
int keys_revoke(struct keys *k, const char *id_or_name, double now, struct error *err);
/* For backups (backup/backup.h): a state that is restored must not bring a key back. Of the keys in
 * the file serve.db of the folder `present`, those that are revoked are revoked in that of `staged`
 * too, and those that were made since the backup are added there as revoked: so their secrets stay
 * refused, the record of them is kept, and a server that had keys does not become one without. */
int keys_restore(const char *present, const char *staged, struct error *err);
/* An array of {id, name, tail, scopes, requests_per_minute, tokens_per_minute, quota_day, quota,
 * expires, created, revoked, last_used, today, all}, oldest first: times are seconds, 0 is never;
 * today and all are {requests, prompt_tokens, completion_tokens}. */
json_t *keys_list(struct keys *k, double now);

/* The scopes of a key, by its id; 0: there is none. */
unsigned keys_scopes(struct keys *k, const char *id);

enum key_verdict {
    KEY_ADMITTED,
    KEY_UNKNOWN,   /* 401 invalid_api_key, like the next two */
    KEY_REVOKED,   /* 401 */
    KEY_EXPIRED,   /* 401 */
    KEY_FORBIDDEN, /* 403: a scope is missing */
    KEY_RATE_LIMITED,   /* 429 rate_limit_exceeded */
    KEY_OVER_QUOTA /* 429 insufficient_quota */
};
struct key_decision {
    enum key_verdict verdict;
    double wait;                             /* seconds until it is worth trying again; 0: never */
    char id[KEY_ID_LEN], name[KEY_NAME_LEN]; /* empty when unknown */
    char why[160];                           /* for the client; empty when admitted */
};
/* Whether a request may run. `secret` is what the client sent, or NULL; `scope` holds all that it
 * needs, 0 any key. An admitted request is counted at once, its tokens by keys_record_usage. */
enum key_verdict keys_authorize(struct keys *k, const char *secret, unsigned scope, double now,
                            struct key_decision *out);
/* What an admitted request used, known when it ends: the bucket of tokens may go below zero, and
 * then the next request waits. `id` is that of the admission. */
void keys_record_usage(struct keys *k, const char *id, int64_t prompt_tokens, int64_t completion_tokens,
                double now);

#endif
