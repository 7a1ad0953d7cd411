/*
 * keys: API keys: an event log in the store, a table of the keys in memory, and a thread that
 * synchronises the log and the table. The log "keys" holds {op: "add", …} and {op: "revoke", …}.
 * The log is append-only, so events after the last known one are the changes of other processes.
 * Document "key"/ID holds the usage of a key. This file knows no HTTP. It reads a clock only for
 * the timer of its thread and in keys_restore; other times are passed in.
 *
 * Invariants:
 * 1. A change is in the store before it is in the table.
 * 2. Keys are only appended to the table, never removed: an index stays valid without the lock.
 * 3. `used` of a key is the store's value at the last write, plus `unsaved`.
 * 4. store_lock is locked before table_lock, and no thread waits for the disk while it holds
 *    table_lock.
 */
#define _GNU_SOURCE
#include "ops/ops.h"

#include "store/store.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LOG "keys"
#define PREFIX "sk-shoal-"
#define TOKEN_PREFIX "st-"
#define BASE64URL "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
/* The largest integer that every JSON parser represents exactly. */
#define COUNT_MAX ((int64_t)1 << 53)

/* TAIL: characters of a secret that are shown; PAGE: events that are read at once; DAY: seconds. */
enum { RANDOM_BYTES = 32, TAIL = 4, SECRET_MAX = 512, PAGE = 256, DAY = 86400 };

struct usage_count {
    int64_t requests, prompt, completion;
};
struct key_usage {
    int64_t day; /* day of `today`, counted from 1970 */
    struct usage_count today, all;
    int64_t last; /* time of the last use, in seconds */
};
struct token_bucket {
    double level, at; /* tokens at time `at`, in seconds */
};
struct api_key {
    char id[KEY_ID_LEN], name[KEY_NAME_LEN], tail[TAIL + 1], hash[HASH_LEN];
    /* fixed keys are in memory only; the start-up token is a fixed key */
    bool is_fixed, is_startup_token;
    int64_t created, revoked;
    struct key_spec spec;
    struct token_bucket requests, tokens;
    struct key_usage used, unsaved; /* unsaved: not yet in the store */
};
struct keys {
    /* protects the store and `seq`, the number of events applied to the table */
    pthread_mutex_t store_lock;
    struct store *store;
    char *path;
    int64_t seq;
    pthread_mutex_t table_lock; /* protects the fields below */
    struct api_key *v;          /* [n] */
    int n, cap, n_fixed, n_startup_tokens;
    pthread_cond_t stop;
    bool stopping;
    pthread_t sync_thread;
};

static const struct {
    const char *name;
    unsigned bit;
} scope_table[] = {{"chat", KEY_SCOPE_CHAT}, {"jobs", KEY_SCOPE_JOBS}, {"admin", KEY_SCOPE_ADMIN}};

unsigned key_scope_from_name(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(scope_table); i++)
        if (strcmp(scope_table[i].name, name) == 0) return scope_table[i].bit;
    return 0;
}

static json_t *scopes_json(unsigned bits) {
    json_t *list = json_array();
    for (size_t i = 0; i < ARRAY_LEN(scope_table); i++)
        if (bits & scope_table[i].bit)
            json_array_append_new(list, json_string(scope_table[i].name));
    return list;
}

/* The scopes in a list of names; 0 if a name is not known. */
static unsigned scopes_parse(const json_t *list) {
    unsigned bits = 0;
    size_t i;
    const json_t *name;
    if (!json_is_string_array(list)) return 0;
    json_array_foreach (list, i, name) {
        unsigned bit = key_scope_from_name(json_string_value(name));
        if (!bit) return 0;
        bits |= bit;
    }
    return bits;
}

/* usage */

static int64_t day_of(double now) {
    return (int64_t)floor(now / DAY);
}

static int64_t saturating_add(int64_t a, int64_t b) {
    return MIN(a + b, COUNT_MAX);
}

static void count_add(struct usage_count *to, const struct usage_count *c) {
    to->requests = saturating_add(to->requests, c->requests);
    to->prompt = saturating_add(to->prompt, c->prompt);
    to->completion = saturating_add(to->completion, c->completion);
}

static int64_t count_tokens(const struct usage_count *c) {
    return saturating_add(c->prompt, c->completion);
}

/* Sets today's usage to 0 if `day` is not u->day. Threads may be late at midnight, so
 * the day before u->day changes nothing. If `day` is earlier still, u->day came from a wrong clock,
 * and is replaced. */
static void usage_start_day(struct key_usage *u, int64_t day) {
    if (day <= u->day && day >= u->day - 1) return;
    u->day = day;
    u->today = (struct usage_count){0};
}

static bool usage_is_nonzero(const struct key_usage *u) {
    return u->all.requests || u->all.prompt || u->all.completion;
}

/* Adds usage. Does nothing if `added` is zero, because then its day is not valid. */
static void usage_add(struct key_usage *to, const struct key_usage *added) {
    if (!usage_is_nonzero(added)) return;
    usage_start_day(to, added->day);
    if (to->day == added->day) count_add(&to->today, &added->today);
    count_add(&to->all, &added->all);
    to->last = MAX(to->last, added->last);
}

static json_t *count_json(const struct usage_count *c) {
    return json_pack("{s:I,s:I,s:I}", "requests", (json_int_t)c->requests, "prompt_tokens",
                     (json_int_t)c->prompt, "completion_tokens", (json_int_t)c->completion);
}

static bool count_parse(json_t *v, struct usage_count *out) {
    json_int_t n[3];
    if (json_unpack_ex(v, NULL, JSON_STRICT, "{s:I,s:I,s:I}", "requests", &n[0], "prompt_tokens",
                       &n[1], "completion_tokens", &n[2]) != 0)
        return false;
    for (int i = 0; i < 3; i++)
        if (n[i] < 0 || n[i] > COUNT_MAX) return false;
    *out = (struct usage_count){n[0], n[1], n[2]};
    return true;
}

static bool usage_parse(json_t *v, struct key_usage *out) {
    json_int_t day, last;
    json_t *today, *all;
    if (json_unpack_ex(v, NULL, JSON_STRICT, "{s:I,s:I,s:o,s:o}", "day", &day, "last_used", &last,
                       "today", &today, "all", &all) != 0 ||
        last < 0 || last > COUNT_MAX || day < 0 || day > COUNT_MAX / DAY)
        return false;
    *out = (struct key_usage){.day = day, .last = last};
    return count_parse(today, &out->today) && count_parse(all, &out->all);
}

/* Loads the stored usage of a key; zero if it has no document. */
static int usage_load(struct keys *k, const char *id, struct key_usage *out, struct error *err) {
    *out = (struct key_usage){0};
    json_t *v = store_document_get(k->store, "key", id, err);
    if (!v) return err->code == ERR_MISSING ? OK : err->code;
    bool valid = usage_parse(v, out);
    json_decref(v);
    if (valid) return OK;
    return error_set(err, ERR_FORMAT,
                     "'%s': the usage of API key '%s' is damaged; put the file back from a copy, "
                     "or begin with another",
                     k->path, id);
}

/* Adds `added` to the usage in the store, which another server may have changed. *total: the sum.
 */
static int usage_store(struct keys *k, const char *id, const struct key_usage *added,
                       struct key_usage *total, struct error *err) {
    int rc = usage_load(k, id, total, err);
    if (rc != OK) return rc;
    usage_add(total, added);
    json_t *v = json_pack("{s:I,s:I,s:o,s:o}", "day", (json_int_t)total->day, "last_used",
                          (json_int_t)total->last, "today", count_json(&total->today), "all",
                          count_json(&total->all));
    rc = store_document_put(k->store, "key", id, v, err);
    json_decref(v);
    return rc;
}

/* keys */

static int key_find(const struct keys *k, const char *id) {
    for (int i = 0; i < k->n; i++)
        if (strcmp(k->v[i].id, id) == 0) return i;
    return -1;
}

/* The index of the key that has this name and is not revoked; -1: none. */
static int key_find_by_name(const struct keys *k, const char *name) {
    for (int i = 0; i < k->n; i++)
        if (!k->v[i].revoked && strcmp(k->v[i].name, name) == 0) return i;
    return -1;
}

/* The index of the key with this hash; -1: none. The comparison of the first 16 digits does not
 * take constant time, which reveals nothing useful about a hash of 256 random bits. The comparison
 * of the whole hash takes constant time. */
static int key_find_by_hash(const struct keys *k, const char *hash) {
    for (int i = 0; i < k->n; i++)
        if (memcmp(k->v[i].hash, hash, 16) == 0 &&
            sodium_memcmp(k->v[i].hash, hash, HASH_LEN - 1) == 0)
            return i;
    return -1;
}

static void key_append(struct keys *k, const struct api_key *x) {
    pthread_mutex_lock(&k->table_lock);
    if (k->n == k->cap) {
        k->cap = MAX(2 * k->cap, 16);
        k->v = xrealloc(k->v, (size_t)k->cap * sizeof *k->v);
    }
    struct api_key *to = &k->v[k->n++];
    *to = *x;
    to->requests.level = (double)x->spec.requests_per_minute;
    to->tokens.level = (double)x->spec.tokens_per_minute;
    pthread_mutex_unlock(&k->table_lock);
}

static int name_check(const char *name, struct error *err) {
    size_t n = strlen(name);
    if (n == 0 || n >= KEY_NAME_LEN || name[strspn(name, BASE64URL ".@")])
        return error_set(err, ERR_USAGE,
                         "the name of an API key is 1 to %d letters, digits and '._@-'",
                         KEY_NAME_LEN - 1);
    if (strncmp(name, "key-", 4) == 0 || strncmp(name, "cli-", 4) == 0)
        return error_set(err, ERR_USAGE,
                         "the name of an API key cannot begin with 'key-' or 'cli-', as ids do");
    return OK;
}

static int spec_check(const struct key_spec *s, struct error *err) {
    const int64_t limits[] = {s->requests_per_minute, s->tokens_per_minute, s->quota_day, s->quota,
                              s->expires};
    if (!s->scopes || s->scopes & ~(unsigned)(KEY_SCOPE_CHAT | KEY_SCOPE_JOBS | KEY_SCOPE_ADMIN))
        return error_set(err, ERR_USAGE, "an API key needs scopes, of chat, jobs and admin");
    for (size_t i = 0; i < ARRAY_LEN(limits); i++)
        if (limits[i] < 0 || limits[i] > COUNT_MAX)
            return error_set(err, ERR_USAGE, "a limit of an API key is below 0 or above 2^53");
    return OK;
}

static void key_id_from_hash(const char *hash, char id[KEY_ID_LEN]) {
    snprintf(id, KEY_ID_LEN, "key-%.16s", hash);
}

/* events */

static json_t *add_event(const struct api_key *x, int64_t seq) {
    const struct key_spec *s = &x->spec;
    return json_pack(
        "{s:s,s:I,s:s,s:s,s:s,s:o,s:I,s:I,s:I,s:I,s:I,s:I}", "op", "add", "seq", (json_int_t)seq,
        "name", x->name, "hash", x->hash, "tail", x->tail, "scopes", scopes_json(s->scopes),
        "requests_per_minute", (json_int_t)s->requests_per_minute, "tokens_per_minute",
        (json_int_t)s->tokens_per_minute, "quota_day", (json_int_t)s->quota_day, "quota",
        (json_int_t)s->quota, "expires", (json_int_t)s->expires, "created", (json_int_t)x->created);
}

/* Parses an "add" event. Unknown fields are an error too, because one could be a limit that this
 * version does not know. */
static int add_event_parse(json_t *event, struct api_key *x, struct error *err) {
    json_error_t je;
    json_int_t seq, limit[6];
    const char *op, *name, *hash, *tail;
    json_t *list;
    if (json_unpack_ex(event, &je, JSON_STRICT, "{s:s,s:I,s:s,s:s,s:s,s:o,s:I,s:I,s:I,s:I,s:I,s:I}",
                       "op", &op, "seq", &seq, "name", &name, "hash", &hash, "tail", &tail,
                       "scopes", &list, "requests_per_minute", &limit[0], "tokens_per_minute",
                       &limit[1], "quota_day", &limit[2], "quota", &limit[3], "expires", &limit[4],
                       "created", &limit[5]) != 0)
        return error_set(err, ERR_FORMAT, "%s", je.text);
    if (!hash_is_valid(hash) || strlen(tail) != TAIL || tail[strspn(tail, BASE64URL)] ||
        limit[5] < 0 || limit[5] > COUNT_MAX)
        return error_set(err, ERR_FORMAT, "invalid hash, tail or creation time");
    *x = (struct api_key){
        .created = limit[5],
        .spec = {scopes_parse(list), limit[0], limit[1], limit[2], limit[3], limit[4]}};
    if (spec_check(&x->spec, err) != OK || name_check(name, err) != OK)
        return err->code = ERR_FORMAT;
    memcpy(x->name, name, strlen(name) + 1);
    memcpy(x->tail, tail, TAIL + 1);
    memcpy(x->hash, hash, HASH_LEN);
    key_id_from_hash(hash, x->id);
    return OK;
}

static json_t *revoke_event(const char *id, int64_t seq, int64_t at) {
    return json_pack("{s:s,s:I,s:s,s:I}", "op", "revoke", "seq", (json_int_t)seq, "id", id, "at",
                     (json_int_t)at);
}

static int add_apply(struct keys *k, json_t *event, struct error *err) {
    struct api_key x;
    int rc = add_event_parse(event, &x, err);
    if (rc != OK) return rc;
    if (key_find(k, x.id) >= 0 || key_find_by_name(k, x.name) >= 0)
        return error_set(err, ERR_FORMAT, "a key or a name occurs twice");
    rc = usage_load(k, x.id, &x.used, err);
    if (rc == OK) key_append(k, &x);
    return rc;
}

static int revoke_apply(struct keys *k, json_t *event, struct error *err) {
    json_error_t je;
    json_int_t seq, at;
    const char *op, *id;
    if (json_unpack_ex(event, &je, JSON_STRICT, "{s:s,s:I,s:s,s:I}", "op", &op, "seq", &seq, "id",
                       &id, "at", &at) != 0)
        return error_set(err, ERR_FORMAT, "%s", je.text);
    int i = key_find(k, id);
    if (i < 0 || k->v[i].is_fixed || at <= 0 || at > COUNT_MAX)
        return error_set(err, ERR_FORMAT, "unknown key or invalid time");
    pthread_mutex_lock(&k->table_lock);
    k->v[i].revoked = at;
    pthread_mutex_unlock(&k->table_lock);
    return OK;
}

/* Applies an event to the table. Events are numbered, so that a deleted event is detected. The
 * fields of keys that events set change only with store_lock held, so a thread that holds
 * store_lock may read these fields without table_lock. */
static int event_apply(struct keys *k, json_t *event, struct error *err) {
    const char *op = json_get_string(event, "op");
    int rc;
    if (json_integer_value(json_object_get(event, "seq")) != k->seq + 1)
        rc = error_set(err, ERR_FORMAT, "it is not an event, or earlier events are missing");
    else if (strcmp(op, "add") == 0)
        rc = add_apply(k, event, err);
    else if (strcmp(op, "revoke") == 0)
        rc = revoke_apply(k, event, err);
    else
        rc = error_set(err, ERR_FORMAT, "it neither adds nor revokes");
    if (rc == OK) k->seq++;
    return rc;
}

/* Applies the new events of the log. */
static int events_read(struct keys *k, struct error *err) {
    for (;;) {
        json_t *page = store_log_list(k->store, LOG, k->seq, PAGE, err), *event;
        if (!page) return err->code;
        size_t n = json_array_size(page), i;
        int rc = OK;
        json_array_foreach (page, i, event)
            if ((rc = event_apply(k, event, err)) != OK) break;
        json_decref(page);
        if (rc == ERR_FORMAT)
            error_wrap(err,
                       "'%s': event %lld of the API keys is damaged (put the file back from a "
                       "copy, or begin with another)",
                       k->path, (long long)k->seq + 1);
        if (rc != OK || n < PAGE) return rc;
    }
}

/* Begins the transaction of a change of keys: its commit waits for the disk. The commits of usage,
 * every second, do not. */
static int change_begin(struct keys *k, struct error *err) {
    int rc = store_set_synchronous(k->store, true, err);
    return rc == OK ? store_begin(k->store, err) : rc;
}

/* Appends the event, commits, and applies the event to the table. If rc is an error, rolls back
 * instead; then the event may be NULL. Takes ownership of the event. */
static int change_commit(struct keys *k, json_t *event, int rc, struct error *err) {
    json_t *events = json_array();
    if (rc == OK) {
        json_array_append(events, event);
        rc = store_log_append(k->store, LOG, k->seq + 1, events, err);
    }
    if (rc == OK) rc = store_commit(k->store, err);
    if (rc == OK)
        rc = event_apply(k, event, err);
    else
        store_rollback(k->store);
    json_decref(events);
    json_decref(event);
    struct error ignored;
    store_set_synchronous(k->store, false, &ignored);
    return rc;
}

static void secret_make(const char *prefix, char secret[KEY_SECRET_LEN], struct api_key *x) {
    unsigned char raw[RANDOM_BYTES];
    char *text = secret + strlen(prefix);
    randombytes_buf(raw, sizeof raw);
    memcpy(secret, prefix, strlen(prefix) + 1);
    sodium_bin2base64(text, (size_t)(secret + KEY_SECRET_LEN - text), raw, sizeof raw,
                      sodium_base64_VARIANT_URLSAFE_NO_PADDING);
    sodium_memzero(raw, sizeof raw);
    /* Slow hashes are for passwords that can be guessed; 256 random bits cannot be guessed. */
    size_t n = strlen(secret);
    sha256_bytes(secret, n, x->hash);
    memcpy(x->tail, secret + n - TAIL, TAIL + 1);
}

int keys_add(struct keys *k, const char *name, const struct key_spec *spec, double now,
             char secret[KEY_SECRET_LEN], struct error *err) {
    struct api_key x = {.spec = *spec, .created = (int64_t)now};
    int rc = name_check(name, err);
    if (rc == OK) rc = spec_check(spec, err);
    if (rc == OK && spec->expires && (double)spec->expires <= now)
        rc = error_set(err, ERR_USAGE, "an API key cannot have expired when it is made");
    if (rc != OK) return rc;
    memcpy(x.name, name, strlen(name) + 1);
    secret_make(PREFIX, secret, &x);
    pthread_mutex_lock(&k->store_lock);
    rc = change_begin(k, err);
    if (rc == OK) {
        rc = events_read(k, err);
        if (rc == OK && key_find_by_name(k, name) >= 0)
            rc = error_set(err, ERR_STATE, "there is a key '%s' already; revoke it first", name);
        rc = change_commit(k, add_event(&x, k->seq + 1), rc, err);
    }
    pthread_mutex_unlock(&k->store_lock);
    if (rc != OK) sodium_memzero(secret, KEY_SECRET_LEN);
    return rc;
}

/* The index of the key to revoke; < 0: an error code. */
static int find_revocable_key(const struct keys *k, const char *id_or_name, struct error *err) {
    int i = key_find(k, id_or_name);
    if (i < 0) i = key_find_by_name(k, id_or_name);
    if (i < 0)
        return error_set(err, ERR_MISSING, "no key '%s' in '%s' that is not revoked", id_or_name,
                         k->path);
    if (k->v[i].revoked)
        return error_set(err, ERR_STATE, "key '%s' is revoked already", id_or_name);
    if (k->v[i].is_fixed)
        return error_set(err, ERR_STATE,
                         "key '%s' is from the command line; start the server without it",
                         id_or_name);
    return i;
}

int keys_revoke(struct keys *k, const char *id_or_name, double now, struct error *err) {
    pthread_mutex_lock(&k->store_lock);
    int rc = change_begin(k, err), i;
    if (rc == OK) {
        json_t *event = NULL;
        rc = events_read(k, err);
        i = rc == OK ? find_revocable_key(k, id_or_name, err) : rc;
        if (i >= 0) event = revoke_event(k->v[i].id, k->seq + 1, (int64_t)MAX(now, 1));
        rc = change_commit(k, event, MIN(i, OK), err);
    }
    pthread_mutex_unlock(&k->store_lock);
    return rc;
}

/* Adds a key from the command line to the table. Its id, name and tail contain no part of the
 * secret or its hash, because an administrator's secret may be short enough to be guessed. */
static void fixed_key_append(struct keys *k, const char *hash, unsigned bits) {
    struct api_key x = {.is_fixed = true, .spec.scopes = bits};
    memcpy(x.hash, hash, HASH_LEN);
    snprintf(x.id, sizeof x.id, "cli-%d", ++k->n_fixed);
    memcpy(x.name, x.id, sizeof x.id);
    key_append(k, &x);
}

int keys_add_fixed(struct keys *k, const char *secret, unsigned bits, struct error *err) {
    struct key_spec spec = {.scopes = bits};
    size_t n = strlen(secret);
    char hash[HASH_LEN];
    for (const char *c = secret; *c; c++)
        if (*c <= ' ' || *c > '~') n = 0;
    if (n == 0 || n > SECRET_MAX)
        return error_set(err, ERR_USAGE, "an API key is 1 to %d printable characters, no blanks",
                         SECRET_MAX);
    int rc = spec_check(&spec, err);
    if (rc != OK) return rc;
    sha256_bytes(secret, n, hash);
    pthread_mutex_lock(&k->store_lock);
    int i = key_find_by_hash(k, hash);
    if (i < 0) {
        fixed_key_append(k, hash, bits);
    } else if (!k->v[i].is_fixed) {
        rc = error_set(err, ERR_USAGE,
                       "an API key of the command line is key '%s' of '%s'; leave it out",
                       k->v[i].name, k->path);
    } else {
        pthread_mutex_lock(&k->table_lock);
        k->v[i].spec.scopes |= bits;
        pthread_mutex_unlock(&k->table_lock);
    }
    pthread_mutex_unlock(&k->store_lock);
    return rc;
}

void keys_add_startup_token(struct keys *k, char secret[KEY_SECRET_LEN]) {
    struct api_key x = {.id = KEY_TOKEN_ID,
                        .name = "start-up token",
                        .is_fixed = true,
                        .is_startup_token = true,
                        .spec.scopes = KEY_SCOPE_CHAT | KEY_SCOPE_JOBS | KEY_SCOPE_ADMIN};
    secret_make(TOKEN_PREFIX, secret, &x);
    pthread_mutex_lock(&k->store_lock);
    CHECK(k->n_startup_tokens == 0);
    key_append(k, &x);
    pthread_mutex_lock(&k->table_lock);
    k->n_startup_tokens++;
    pthread_mutex_unlock(&k->table_lock);
    pthread_mutex_unlock(&k->store_lock);
}

/* admission */

/* Adds the tokens of the time since the last call. `now` may be up to a second earlier than at the
 * last call, because threads may be late: then nothing is added. If `now` is earlier by more, the
 * clock was set back, and the time counts from `now` on. */
static void token_bucket_refill(struct token_bucket *b, int64_t per_minute, double now) {
    double full = (double)per_minute;
    if (now < b->at - 1) b->at = now;
    if (now <= b->at) return;
    b->level = MIN(full, b->level + (now - b->at) * full / 60);
    b->at = now;
}

/* Seconds until the bucket holds one token; 0: it holds one, or there is no limit. Rounded up to
 * milliseconds, so that a client that waits this long is admitted despite rounding of clocks. */
static double token_bucket_wait(struct token_bucket *b, int64_t per_minute, double now) {
    if (!per_minute) return 0;
    token_bucket_refill(b, per_minute, now);
    if (b->level >= 1) return 0;
    return (floor(((1 - b->level) * 60 / (double)per_minute + 1e-6) * 1000) + 1) / 1000;
}

__attribute__((format(printf, 4, 5))) static bool
refuse(struct key_decision *out, enum key_verdict verdict, double wait, const char *fmt, ...) {
    va_list ap;
    out->verdict = verdict;
    out->retry_after = wait;
    va_start(ap, fmt);
    vsnprintf(out->message, sizeof out->message, fmt, ap);
    va_end(ap);
    return false;
}

static bool key_is_usable(const struct api_key *x, unsigned scope, double now,
                          struct key_decision *out) {
    if (x->revoked) return refuse(out, KEY_REVOKED, 0, "API key '%s' is revoked", x->name);
    if (x->spec.expires && now >= (double)x->spec.expires)
        return refuse(out, KEY_EXPIRED, 0, "API key '%s' has expired", x->name);
    for (size_t i = 0; i < ARRAY_LEN(scope_table); i++)
        if (scope_table[i].bit & scope & ~x->spec.scopes)
            return refuse(out, KEY_FORBIDDEN, 0, "API key '%s' lacks the scope '%s'", x->name,
                          scope_table[i].name);
    return true;
}

static bool key_is_within_quota(struct api_key *x, double now, struct key_decision *out) {
    const struct key_spec *s = &x->spec;
    if (s->quota && count_tokens(&x->used.all) >= s->quota)
        return refuse(out, KEY_OVER_QUOTA, 0, "the quota of %lld tokens is used up",
                      (long long)s->quota);
    usage_start_day(&x->used, day_of(now));
    if (s->quota_day && count_tokens(&x->used.today) >= s->quota_day)
        return refuse(out, KEY_OVER_QUOTA, (double)(x->used.day + 1) * DAY - now,
                      "the quota of %lld tokens a day (UTC) is used up", (long long)s->quota_day);
    return true;
}

/* Takes a token from the bucket of requests only if the buckets of requests and of tokens each hold
 * one, so that a refused request uses nothing. */
static bool key_is_within_rate(struct api_key *x, double now, struct key_decision *out) {
    const struct key_spec *s = &x->spec;
    double requests = token_bucket_wait(&x->requests, s->requests_per_minute, now),
           tokens = token_bucket_wait(&x->tokens, s->tokens_per_minute, now);
    if (requests > 0 && requests >= tokens)
        return refuse(out, KEY_RATE_LIMITED, requests,
                      "the limit of %lld requests a minute is reached; try again in %.3f s",
                      (long long)s->requests_per_minute, requests);
    if (tokens > 0)
        return refuse(out, KEY_RATE_LIMITED, tokens,
                      "the limit of %lld tokens a minute is reached; try again in %.3f s",
                      (long long)s->tokens_per_minute, tokens);
    x->requests.level -= 1;
    return true;
}

static void key_add_usage(struct api_key *x, struct usage_count c, double now) {
    struct key_usage u = {.day = day_of(now), .today = c, .all = c, .last = (int64_t)now};
    usage_add(&x->used, &u);
    if (!x->is_fixed) usage_add(&x->unsaved, &u);
}

/* Hashes the secret that a client sent (NULL: an empty one) and returns its length. A secret that
 * is too long is hashed as an empty one. */
static size_t hash_client_secret(const char *secret, char hash[HASH_LEN]) {
    size_t len = secret ? strnlen(secret, SECRET_MAX + 1) : 0;
    sha256_bytes(secret, len <= SECRET_MAX ? len : 0, hash);
    return len;
}

bool keys_lookup(struct keys *k, const char *secret, char id[KEY_ID_LEN]) {
    char hash[HASH_LEN];
    hash_client_secret(secret, hash);
    pthread_mutex_lock(&k->table_lock);
    int i = key_find_by_hash(k, hash);
    if (i >= 0) memcpy(id, k->v[i].id, KEY_ID_LEN);
    pthread_mutex_unlock(&k->table_lock);
    return i >= 0;
}

enum key_verdict keys_authorize(struct keys *k, const char *secret, unsigned scopes, double now,
                                struct key_decision *out) {
    char hash[HASH_LEN];
    CHECK(now >= 0 && now < (double)COUNT_MAX);
    *out = (struct key_decision){.verdict = KEY_ADMITTED};
    size_t n = hash_client_secret(secret, hash);
    pthread_mutex_lock(&k->table_lock);
    int i = key_find_by_hash(k, hash);
    struct api_key *x = i >= 0 ? &k->v[i] : NULL;
    if (!x) {
        refuse(out, KEY_UNKNOWN, 0, "%s",
               n ? "the API key is not known here"
                 : "an API key is needed, as 'Authorization: Bearer KEY'");
    } else {
        memcpy(out->id, x->id, sizeof x->id);
        memcpy(out->name, x->name, sizeof x->name);
        if (key_is_usable(x, scopes, now, out) && key_is_within_quota(x, now, out) &&
            key_is_within_rate(x, now, out))
            key_add_usage(x, (struct usage_count){.requests = 1}, now);
    }
    pthread_mutex_unlock(&k->table_lock);
    return out->verdict;
}

void keys_record_usage(struct keys *k, const char *id, int64_t prompt_tokens,
                       int64_t completion_tokens, double now) {
    struct usage_count c = {.prompt = prompt_tokens, .completion = completion_tokens};
    CHECK(now >= 0 && now < (double)COUNT_MAX);
    CHECK(c.prompt >= 0 && c.prompt <= COUNT_MAX && c.completion >= 0 && c.completion <= COUNT_MAX);
    pthread_mutex_lock(&k->table_lock);
    int i = key_find(k, id);
    CHECK(i >= 0);
    struct api_key *x = &k->v[i];
    token_bucket_refill(&x->tokens, x->spec.tokens_per_minute, now);
    x->tokens.level -= (double)count_tokens(&c);
    key_add_usage(x, c, now);
    pthread_mutex_unlock(&k->table_lock);
}

unsigned keys_scopes(struct keys *k, const char *id) {
    pthread_mutex_lock(&k->table_lock);
    int i = key_find(k, id);
    unsigned bits = i >= 0 && !k->v[i].revoked ? k->v[i].spec.scopes : 0;
    pthread_mutex_unlock(&k->table_lock);
    return bits;
}

bool keys_exist(struct keys *k) {
    pthread_mutex_lock(&k->table_lock);
    bool any = k->n > k->n_startup_tokens;
    pthread_mutex_unlock(&k->table_lock);
    return any;
}

static json_t *key_json(const struct api_key *x, double now) {
    const struct key_spec *s = &x->spec;
    struct key_usage u = x->used;
    usage_start_day(&u, day_of(now));
    return json_pack("{s:s,s:s,s:s,s:o,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:o,s:o}", "id", x->id,
                     "name", x->name, "tail", x->tail, "scopes", scopes_json(s->scopes),
                     "requests_per_minute", (json_int_t)s->requests_per_minute, "tokens_per_minute",
                     (json_int_t)s->tokens_per_minute, "quota_day", (json_int_t)s->quota_day,
                     "quota", (json_int_t)s->quota, "expires", (json_int_t)s->expires, "created",
                     (json_int_t)x->created, "revoked", (json_int_t)x->revoked, "last_used",
                     (json_int_t)u.last, "today", count_json(&u.today), "all", count_json(&u.all));
}

json_t *keys_list(struct keys *k, double now) {
    json_t *list = json_array();
    pthread_mutex_lock(&k->table_lock);
    for (int i = 0; i < k->n; i++)
        if (!k->v[i].is_startup_token) json_array_append_new(list, key_json(&k->v[i], now));
    pthread_mutex_unlock(&k->table_lock);
    return list;
}

/* synchronisation of the store and the table */

/* The usage of one key while it is written to the store. */
struct usage_flush {
    int index; /* of the key in the table */
    char id[KEY_ID_LEN];
    struct key_usage added, total; /* usage to add; usage in the store after that */
};

/* Moves the unsaved usage of all keys to a list, *out (malloc'ed). Returns the number of its
 * entries. */
static int usage_flush_begin(struct keys *k, struct usage_flush **out) {
    int n = 0;
    *out = NULL;
    pthread_mutex_lock(&k->table_lock);
    for (int i = 0; i < k->n; i++) {
        struct api_key *x = &k->v[i];
        if (!usage_is_nonzero(&x->unsaved)) continue;
        *out = xrealloc(*out, (size_t)(n + 1) * sizeof **out);
        struct usage_flush *s = &(*out)[n++];
        s->index = i;
        s->added = x->unsaved;
        memcpy(s->id, x->id, sizeof x->id);
        x->unsaved = (struct key_usage){0};
    }
    pthread_mutex_unlock(&k->table_lock);
    return n;
}

/* Ends a write. If it succeeded, `used` becomes the stored total plus the usage that was recorded
 * meanwhile. If it failed, the usage is unsaved again. */
static void usage_flush_end(struct keys *k, const struct usage_flush *s, int n, bool saved) {
    pthread_mutex_lock(&k->table_lock);
    for (int i = 0; i < n; i++) {
        struct api_key *x = &k->v[s[i].index];
        if (saved) {
            x->used = s[i].total;
            usage_add(&x->used, &x->unsaved);
        } else {
            usage_add(&x->unsaved, &s[i].added);
        }
    }
    pthread_mutex_unlock(&k->table_lock);
}

static int usage_flush(struct keys *k, struct error *err) {
    struct usage_flush *s;
    int n = usage_flush_begin(k, &s), rc = OK;
    if (n > 0) {
        rc = store_begin(k->store, err);
        for (int i = 0; rc == OK && i < n; i++)
            rc = usage_store(k, s[i].id, &s[i].added, &s[i].total, err);
        if (rc == OK) rc = store_commit(k->store, err);
        if (rc != OK) store_rollback(k->store);
        usage_flush_end(k, s, n, rc == OK);
    }
    free(s);
    return rc;
}

/* Writes the usage even if the events cannot be read; the first error is returned. */
int keys_sync(struct keys *k, struct error *err) {
    struct error ignored = {0};
    pthread_mutex_lock(&k->store_lock);
    int rc = events_read(k, err), saved = usage_flush(k, rc == OK ? err : &ignored);
    pthread_mutex_unlock(&k->store_lock);
    return rc != OK ? rc : saved;
}

/* Calls keys_sync every second. Of equal consecutive errors only the first is logged. */
static void *sync_thread_main(void *arg) {
    struct keys *k = arg;
    struct error err, last_logged = {0};
    pthread_mutex_lock(&k->table_lock);
    while (!k->stopping) {
        double wake_time = clock_now() + 1;
        while (!k->stopping && condition_wait_until(&k->stop, &k->table_lock, wake_time)) continue;
        if (k->stopping) break;
        pthread_mutex_unlock(&k->table_lock);
        err = (struct error){0};
        if (keys_sync(k, &err) != OK && strcmp(err.text, last_logged.text) != 0)
            log_warn("%s", err.text);
        last_logged = err;
        pthread_mutex_lock(&k->table_lock);
    }
    pthread_mutex_unlock(&k->table_lock);
    return NULL;
}

static void keys_init(struct keys *k) {
    CHECK(sodium_init() >= 0);
    pthread_mutex_init(&k->store_lock, NULL);
    pthread_mutex_init(&k->table_lock, NULL);
    pthread_cond_init(&k->stop, NULL);
}

static void keys_free(struct keys *k) {
    store_close(k->store);
    pthread_cond_destroy(&k->stop);
    pthread_mutex_destroy(&k->table_lock);
    pthread_mutex_destroy(&k->store_lock);
    free(k->path);
    free(k->v);
    free(k);
}

/* Opens a store and reads its keys, without the thread. */
static struct keys *keys_load(const char *store_path, struct error *err) {
    struct keys *k = xcalloc(1, sizeof *k);
    k->path = xstrdup(store_path);
    keys_init(k);
    int rc = OK;
    if (!(k->store = store_open(store_path, err))) rc = err->code;
    if (rc == OK) rc = events_read(k, err);
    if (rc == OK) return k;
    keys_free(k);
    return NULL;
}

static int event_put(struct keys *k, json_t *event, struct error *err) {
    return change_commit(k, event, change_begin(k, err), err);
}

static int revoke_put(struct keys *k, const char *id, int64_t at, struct error *err) {
    return event_put(k, revoke_event(id, k->seq + 1, at), err);
}

/* Copies the revocation of key x to `to`. If `to` does not have x, adds x as a revoked key, unless
 * another key in `to` has its name; then x is unknown there, so its secret is refused too. *n
 * counts changed keys. */
static int key_restore(struct keys *to, const struct api_key *x, int64_t now, int *n,
                       struct error *err) {
    int i = key_find(to, x->id), rc = OK;
    if (i >= 0 ? !x->revoked || to->v[i].revoked : key_find_by_name(to, x->name) >= 0) return OK;
    if (i < 0) rc = event_put(to, add_event(x, to->seq + 1), err);
    if (rc == OK) rc = revoke_put(to, x->id, x->revoked ? x->revoked : now, err);
    *n += rc == OK;
    return rc;
}

/* Copies first the revocations, because they free names, then the keys that `to` does not have. */
static int keys_copy(const struct keys *from, struct keys *to, int *n, struct error *err) {
    int rc = OK;
    for (int round = 0; round < 2; round++)
        for (int i = 0; rc == OK && i < from->n; i++)
            if ((key_find(to, from->v[i].id) < 0) == (round == 1))
                rc = key_restore(to, &from->v[i], (int64_t)time(NULL), n, err);
    return rc;
}

int keys_restore(const char *present, const char *staged, struct error *err) {
    char *from_path = path_join(present, "serve.db"), *to_path = path_join(staged, "serve.db");
    struct error unread;
    struct keys *from = path_exists(from_path) ? keys_load(from_path, &unread) : NULL, *to = NULL;
    int rc = OK, n = 0;
    if (!from && path_exists(from_path)) // a damaged file may be the reason for the restore
        log_warn(
            "keys that were revoked since the backup are not known, and may be valid again ('shoal "
            "key list'): %s",
            unread.text);
    if (from && from->n) {
        to = keys_load(to_path, err);
        rc = to ? keys_copy(from, to, &n, err) : err->code;
    }
    if (rc == OK && n)
        log_info("%d API keys that were revoked, or made, since the backup are revoked", n);
    if (from) keys_free(from);
    if (to) keys_free(to);
    free(from_path);
    free(to_path);
    return rc;
}

static int parent_dir_make(const char *path, struct error *err) {
    const char *slash = strrchr(path, '/');
    if (!slash || slash == path) return OK;
    char *dir = xasprintf("%.*s", (int)(slash - path), path);
    int rc = dir_make(dir, err);
    free(dir);
    return rc;
}

/* Starts the thread with all signals blocked, so that other threads handle signals. */
static int sync_thread_start(struct keys *k, struct error *err) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(&k->sync_thread, NULL, sync_thread_main, k);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return failed ? error_set(err, ERR_STATE, "cannot start a thread for API keys") : OK;
}

struct keys *keys_open(const char *store_path, struct error *err) {
    struct keys *k = xcalloc(1, sizeof *k);
    k->path = xstrdup(store_path);
    keys_init(k);
    int rc = parent_dir_make(store_path, err);
    if (rc == OK && !(k->store = store_open(store_path, err))) rc = err->code;
    if (rc == OK) rc = events_read(k, err);
    if (rc == OK) rc = sync_thread_start(k, err);
    if (rc == OK) return k;
    keys_free(k);
    return NULL;
}

void keys_close(struct keys *k) {
    struct error err = {0};
    if (!k) return;
    pthread_mutex_lock(&k->table_lock);
    k->stopping = true;
    pthread_cond_signal(&k->stop);
    pthread_mutex_unlock(&k->table_lock);
    pthread_join(k->sync_thread, NULL);
    pthread_mutex_lock(&k->store_lock);
    if (usage_flush(k, &err) != OK) log_warn("%s", err.text);
    pthread_mutex_unlock(&k->store_lock);
    keys_free(k);
}
