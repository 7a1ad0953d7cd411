/*
 * pbft_replicas: see pbft_replicas.h.
 */
#include "cluster/pbft_replicas.h"

#include "cluster/wire.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum { GROUPS = 4, RESULTS = 1024 }; // the newest ones that are kept
static const double TIMEOUT_SECONDS = 10;

struct result {
    uint8_t unit[PBFT_DIGEST], hash[PBFT_DIGEST];
};
struct pbft_replicas {
    struct bus *bus;
    struct pbft_key_pair keys;
    char key[2 * PBFT_PUBLIC_KEY + 1];
    struct replica {
        uint8_t group[PBFT_DIGEST];
        int self;
        struct pbft *p; /* NULL: free */
    } v[GROUPS];
    int n_groups, n_results; /* so far */
    struct result results[RESULTS];
    struct pbft_actions actions;
};

static bool hex_read(const char *text, uint8_t *out, size_t n) {
    size_t len;
    return strlen(text) == 2 * n && sodium_hex2bin(out, n, text, 2 * n, NULL, &len, NULL) == 0 &&
           len == n;
}

void pbft_unit_entry(const char *unit, const char *hash, struct pbft_entry *out) {
    uint8_t bytes[2 * PBFT_DIGEST];
    CHECK(hex_read(unit, bytes, PBFT_DIGEST) && hex_read(hash, bytes + PBFT_DIGEST, PBFT_DIGEST));
    pbft_entry_set(out, bytes, sizeof bytes);
}

/* messages: the receiver (a byte) and the message */

int pbft_publish(struct bus *b, int to, const void *data, size_t len, struct error *err) {
    struct buf text = {0};
    buf_add(&text, &(uint8_t){(uint8_t)to}, 1);
    buf_add(&text, data, len);
    int rc = bus_publish(b, SUBJECT_PBFT, text.data, text.len, err);
    buf_release(&text);
    return rc;
}

bool pbft_bus_message(const struct bus_message *m, int to, const uint8_t **data, size_t *len) {
    if (strcmp(m->subject, SUBJECT_PBFT) != 0 || m->len < 1) return false;
    bool all = m->data[0] == PBFT_ALL && to != PBFT_CLIENT;
    *data = m->data + 1;
    *len = m->len - 1;
    return all || m->data[0] == to;
}

/* replicas */

static const struct result *result_find(const struct pbft_replicas *r, const uint8_t *unit) {
    for (int i = 0; i < MIN(r->n_results, RESULTS); i++)
        if (memcmp(r->results[i].unit, unit, PBFT_DIGEST) == 0) return &r->results[i];
    return NULL;
}

static enum pbft_verdict validate(void *ctx, const uint8_t *entry, size_t len) {
    if (len != sizeof(struct result)) return PBFT_DIFFERS;
    const struct result *known = result_find(ctx, entry);
    if (!known) return PBFT_UNKNOWN;
    return memcmp(known->hash, entry + PBFT_DIGEST, PBFT_DIGEST) == 0 ? PBFT_AGREES : PBFT_DIFFERS;
}

static int replica_step(struct pbft_replicas *r, struct replica *v, struct pbft_event e,
                        struct error *err) {
    int rc = OK;
    e.now = clock_now();
    r->actions.n = 0;
    r->actions.bytes.len = 0;
    pbft_step(v->p, &e, &r->actions);
    for (int i = 0; rc == OK && i < r->actions.n; i++) {
        const struct pbft_action *a = &r->actions.v[i];
        if (a->kind == PBFT_SEND)
            rc = pbft_publish(r->bus, a->to, pbft_action_data(&r->actions, a), a->len, err);
    }
    return rc;
}

static int replicas_step(struct pbft_replicas *r, enum pbft_event_kind kind, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < GROUPS; i++)
        if (r->v[i].p) rc = replica_step(r, &r->v[i], (struct pbft_event){.kind = kind}, err);
    return rc;
}

/* Reads a group; false: it is malformed, or this node is not in it. */
static bool group_read(const struct pbft_replicas *r, const json_t *v, struct pbft_group *g,
                       int *self) {
    const json_t *keys = json_object_get(v, "keys");
    size_t n = json_array_size(keys);
    *g = (struct pbft_group){.n = (int)n};
    *self = -1;
    if (n < 4 || n > PBFT_REPLICAS_MAX ||
        !hex_read(json_get_string(v, "client"), g->client, PBFT_PUBLIC_KEY))
        return false;
    for (size_t i = 0; i < n; i++) {
        const char *key = json_string_value(json_array_get(keys, i));
        if (!key || !hex_read(key, g->keys[i], PBFT_PUBLIC_KEY)) return false;
        if (strcmp(key, r->key) == 0) *self = (int)i;
    }
    pbft_group_set_id(g, (uint64_t)json_integer_value(json_object_get(v, "nonce")));
    return *self >= 0;
}

static void group_join(struct pbft_replicas *r, const json_t *message) {
    struct pbft_options o = {.secret = r->keys.secret,
                             .signer = &pbft_ed25519,
                             .timeout = TIMEOUT_SECONDS,
                             .validate = validate,
                             .ctx = r};
    if (!group_read(r, message, &o.group, &o.self)) return;
    for (int i = 0; i < GROUPS; i++)
        if (r->v[i].p && memcmp(r->v[i].group, o.group.id, PBFT_DIGEST) == 0) return;
    struct replica *v = &r->v[r->n_groups++ % GROUPS];
    pbft_free(v->p);
    *v = (struct replica){.self = o.self, .p = pbft_new(&o)};
    memcpy(v->group, o.group.id, PBFT_DIGEST);
}

int pbft_replicas_message(struct pbft_replicas *r, const struct bus_message *m, struct error *err) {
    const uint8_t *data;
    size_t len;
    if (strcmp(m->subject, SUBJECT_GROUP) == 0) {
        json_t *v = wire_read(m, &data, &len);
        if (v) group_join(r, v);
        json_decref(v);
        return OK;
    }
    for (int i = 0; i < GROUPS; i++) {
        struct replica *v = &r->v[i];
        if (!v->p || !pbft_bus_message(m, v->self, &data, &len) || len < PBFT_DIGEST ||
            memcmp(data, v->group, PBFT_DIGEST) != 0)
            continue;
        return replica_step(
            r, v, (struct pbft_event){.kind = PBFT_RECEIVED, .data = data, .len = len}, err);
    }
    return OK;
}

int pbft_replicas_tick(struct pbft_replicas *r, struct error *err) {
    return replicas_step(r, PBFT_TICK, err);
}

int pbft_replicas_computed(struct pbft_replicas *r, const char *unit, const struct buf *results,
                           json_t *head, struct error *err) {
    char hash[HASH_LEN];
    struct pbft_entry e;
    struct buf vote = {0};
    sha256_bytes(results->data, results->len, hash);
    pbft_unit_entry(unit, hash, &e);
    struct result *kept = &r->results[r->n_results++ % RESULTS];
    memcpy(kept->unit, e.bytes, PBFT_DIGEST);
    memcpy(kept->hash, e.bytes + PBFT_DIGEST, PBFT_DIGEST);
    pbft_vote_write(&pbft_ed25519, r->keys.secret, &e, &vote);
    char *hex = xmalloc(2 * vote.len + 1);
    sodium_bin2hex(hex, 2 * vote.len + 1, (const uint8_t *)vote.data, vote.len);
    json_object_set_new(head, "vote", json_string(hex));
    free(hex);
    buf_release(&vote);
    return replicas_step(r, PBFT_COMPUTED, err);
}

struct pbft_replicas *pbft_replicas_new(struct bus *b, struct error *err) {
    struct pbft_replicas *r = xcalloc(1, sizeof *r);
    r->bus = b;
    pbft_key_pair_make(&r->keys);
    sodium_bin2hex(r->key, sizeof r->key, r->keys.public_key, PBFT_PUBLIC_KEY);
    int rc = bus_subscribe(b, SUBJECT_GROUP, err);
    if (rc == OK) rc = bus_subscribe(b, SUBJECT_PBFT, err);
    if (rc == OK) return r;
    pbft_replicas_free(r);
    return NULL;
}

void pbft_replicas_free(struct pbft_replicas *r) {
    if (!r) return;
    for (int i = 0; i < GROUPS; i++) pbft_free(r->v[i].p);
    pbft_actions_release(&r->actions);
    sodium_memzero(&r->keys, sizeof r->keys);
    free(r);
}

const char *pbft_replicas_key(const struct pbft_replicas *r) {
    return r->key;
}
