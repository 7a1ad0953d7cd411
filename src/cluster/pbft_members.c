/*
 * pbft_members: see pbft_members.h.
 */
#include "cluster/pbft_members.h"

#include "cluster/wire.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>

static const double ANNOUNCE_SECONDS = 2, RETRY_SECONDS = 5;

enum { KEY_HEX = 2 * PBFT_PUBLIC_KEY + 1, VOTE_BYTES_MAX = 1024 };
struct member {
    char node[NODE_NAME_MAX], key[KEY_HEX];
    bool caught;
};
struct pbft_members {
    struct bus *bus;
    int n, n_members;
    struct member v[PBFT_REPLICAS_MAX];
    struct pbft_key_pair keys;
    uint64_t nonce;
    struct pbft_client *client; /* NULL: the group is not complete */
    double announced;
    int committed;         /* units, in all groups */
    struct strings caught; /* "NODE: why" */
    struct pbft_actions actions;
};

static void client_step(struct pbft_members *g, struct pbft_client_event e) {
    e.now = clock_now();
    if (g->client) pbft_client_step(g->client, &e, &g->actions);
}

/* the group */

static void group_make(struct pbft_members *g) {
    struct pbft_client_options o = {
        .secret = g->keys.secret, .signer = &pbft_ed25519, .retry = RETRY_SECONDS};
    o.group.n = g->n;
    memcpy(o.group.client, g->keys.public_key, PBFT_PUBLIC_KEY);
    for (int i = 0; i < g->n; i++)
        CHECK(sodium_hex2bin(o.group.keys[i], PBFT_PUBLIC_KEY, g->v[i].key, KEY_HEX - 1, NULL, NULL,
                             NULL) == 0);
    g->nonce = (g->nonce + 1) & INT64_MAX;
    pbft_group_set_id(&o.group, g->nonce);
    pbft_client_free(g->client);
    g->client = pbft_client_new(&o);
    g->announced = -ANNOUNCE_SECONDS;
    g->actions.n = 0;
    g->actions.bytes.len = 0;
}

/* Nodes that have missed the group get it again. */
static int group_announce(struct pbft_members *g, struct error *err) {
    char client[KEY_HEX];
    json_t *keys = json_array();
    g->announced = clock_now();
    sodium_bin2hex(client, sizeof client, g->keys.public_key, PBFT_PUBLIC_KEY);
    for (int i = 0; i < g->n; i++) json_array_append_new(keys, json_string(g->v[i].key));
    return wire_publish(
        g->bus, SUBJECT_GROUP,
        json_pack("{s:I,s:s,s:o}", "nonce", (json_int_t)g->nonce, "client", client, "keys", keys),
        NULL, 0, err);
}

static int member_find(const struct pbft_members *g, const char *node) {
    for (int i = 0; i < g->n_members; i++)
        if (strcmp(g->v[i].node, node) == 0) return i;
    return -1;
}

bool pbft_members_heard(struct pbft_members *g, const char *node, const char *key,
                        bool (*lost)(void *ctx, const char *node), void *ctx, bool *made) {
    int i = member_find(g, node);
    *made = false;
    if (!hash_is_valid(key)) return false; // 32 bytes in hex, like a hash
    // with another key, a faulty node is no other one
    if (i >= 0 && (g->v[i].caught || strcmp(g->v[i].key, key) == 0)) return true;
    if (i < 0 && g->n_members < g->n) i = g->n_members++;
    for (int k = 0; i < 0 && k < g->n; k++)
        if (lost(ctx, g->v[k].node)) i = k;
    if (i < 0) return false;
    g->v[i].caught = false;
    snprintf(g->v[i].node, NODE_NAME_MAX, "%s", node);
    snprintf(g->v[i].key, KEY_HEX, "%s", key);
    *made = g->n_members == g->n;
    if (*made) group_make(g);
    return true;
}

bool pbft_members_complete(const struct pbft_members *g) {
    return g->client != NULL;
}

/* entries */

bool pbft_members_vote(struct pbft_members *g, const char *node, const char *vote, const char *unit,
                       const char *hash) {
    uint8_t bytes[VOTE_BYTES_MAX], key[PBFT_PUBLIC_KEY];
    size_t len = 0;
    struct pbft_entry expected, e;
    int i = member_find(g, node);
    if (i < 0 || sodium_hex2bin(bytes, sizeof bytes, vote, strlen(vote), NULL, &len, NULL) != 0 ||
        sodium_hex2bin(key, sizeof key, g->v[i].key, KEY_HEX - 1, NULL, NULL, NULL) != 0 ||
        !pbft_vote_read(&pbft_ed25519, key, bytes, len, &e))
        return false;
    pbft_unit_entry(unit, hash, &expected);
    if (e.len != expected.len || memcmp(e.bytes, expected.bytes, e.len) != 0) return false;
    client_step(g, (struct pbft_client_event){
                       .kind = PBFT_CLIENT_VOTE, .from = i, .data = bytes, .len = len});
    return true;
}

void pbft_members_propose(struct pbft_members *g, const char *unit, const char *hash) {
    struct pbft_entry e;
    pbft_unit_entry(unit, hash, &e);
    client_step(
        g, (struct pbft_client_event){.kind = PBFT_CLIENT_PROPOSE, .data = e.bytes, .len = e.len});
}

void pbft_members_message(struct pbft_members *g, const struct bus_message *m) {
    const uint8_t *data;
    size_t len;
    if (pbft_bus_message(m, PBFT_CLIENT, &data, &len))
        client_step(
            g, (struct pbft_client_event){.kind = PBFT_CLIENT_RECEIVED, .data = data, .len = len});
}

static int action_do(struct pbft_members *g, const struct pbft_action *a,
                     void (*committed)(void *ctx, const char *unit), void *ctx, struct error *err) {
    const uint8_t *data = pbft_action_data(&g->actions, a);
    char unit[HASH_LEN];
    if (a->kind == PBFT_SEND) return pbft_publish(g->bus, a->to, data, a->len, err);
    if (a->kind == PBFT_EXECUTE) {
        sodium_bin2hex(unit, sizeof unit, data, PBFT_ENTRY_KEY);
        g->committed++;
        committed(ctx, unit);
        return OK;
    }
    char *text = xasprintf("node '%s' is faulty: %s", g->v[a->to].node, pbft_fault_texts[a->fault]);
    g->v[a->to].caught = true;
    strings_add(&g->caught, text);
    log_warn("%s", text);
    free(text);
    return OK;
}

int pbft_members_send(struct pbft_members *g, void (*committed)(void *ctx, const char *unit),
                      void *ctx, struct error *err) {
    int rc = OK;
    if (!g->client) return OK;
    client_step(g, (struct pbft_client_event){.kind = PBFT_CLIENT_TICK});
    if (clock_now() - g->announced >= ANNOUNCE_SECONDS) rc = group_announce(g, err);
    for (int i = 0; rc == OK && i < g->actions.n; i++) {
        const struct pbft_action a = g->actions.v[i];
        rc = action_do(g, &a, committed, ctx, err);
    }
    g->actions.n = 0;
    g->actions.bytes.len = 0;
    return rc;
}

/* open and close */

struct pbft_members *pbft_members_new(struct bus *b, int n, struct error *err) {
    struct pbft_members *g = xcalloc(1, sizeof *g);
    g->bus = b;
    g->n = n;
    pbft_key_pair_make(&g->keys);
    randombytes_buf(&g->nonce, sizeof g->nonce);
    if (bus_subscribe(b, SUBJECT_PBFT, err) == OK) return g;
    pbft_members_free(g);
    return NULL;
}

void pbft_members_free(struct pbft_members *g) {
    if (!g) return;
    pbft_client_free(g->client);
    pbft_actions_release(&g->actions);
    strings_release(&g->caught);
    sodium_memzero(&g->keys, sizeof g->keys);
    free(g);
}

void pbft_members_report(const struct pbft_members *g) {
    log_info("%d parts committed by %d replicas, %d of them caught", g->committed, g->n_members,
             g->caught.n);
    for (int i = 0; i < g->n_members; i++) log_info("  %s, key %s", g->v[i].node, g->v[i].key);
    for (int i = 0; i < g->caught.n; i++) log_info("  %s", g->caught.v[i]);
}
