/*
 * pbft_client: the side that has entries for a group of replicas (pbft.h).
 *
 * The client signs an entry and sends it to all replicas, again and again, until f+1 of them have
 * signed the same reply: then a correct one has executed it. It also collects the votes of the
 * replicas, their own signed results, and names a replica whose vote differs from the committed
 * entry with the same key. As pbft.h, it is a function of state and event.
 */
#ifndef SHOAL_CLUSTER_PBFT_CLIENT_H
#define SHOAL_CLUSTER_PBFT_CLIENT_H

#include "cluster/pbft.h"

struct pbft_client_options {
    struct pbft_group group;
    const uint8_t *secret; /* key of the client; outlives it */
    const struct pbft_signer *signer;
    double retry; /* seconds until an entry without enough replies is sent again */
};
enum pbft_client_event_kind {
    PBFT_CLIENT_PROPOSE,  /* data: an entry */
    PBFT_CLIENT_VOTE,     /* from, data: a VOTE message of a replica */
    PBFT_CLIENT_RECEIVED, /* data: a message, of which only a REPLY counts */
    PBFT_CLIENT_TICK
};
struct pbft_client_event {
    enum pbft_client_event_kind kind;
    double now;
    int from;
    const uint8_t *data;
    size_t len;
};

struct pbft_client;
struct pbft_client *pbft_client_new(const struct pbft_client_options *o);
void pbft_client_free(struct pbft_client *c);
/* Actions: PBFT_SEND to PBFT_ALL; PBFT_EXECUTE: the entry is committed at seq, again if it is
 * proposed again; PBFT_FAULT. */
void pbft_client_step(struct pbft_client *c, const struct pbft_client_event *e,
                      struct pbft_actions *out);
int pbft_client_unfinished(const struct pbft_client *c); /* entries that are not committed */

/* Appends the VOTE message of a replica: its own result, signed. Votes belong to no group. */
void pbft_vote_write(const struct pbft_signer *signer, const uint8_t *secret,
                     const struct pbft_entry *e, struct buf *out);
/* Whether a message is a vote that the key has signed; *out receives its entry. */
bool pbft_vote_read(const struct pbft_signer *signer, const uint8_t *public_key, const void *data,
                    size_t len, struct pbft_entry *out);

#endif
