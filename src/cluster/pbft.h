/*
 * pbft: a ledger that n >= 3f+1 replicas agree on although f of them are faulty in any way.
 *
 * The algorithm is practical Byzantine fault tolerance (Castro and Liskov, OSDI 1999) with
 * signatures. A client signs an entry; the primary of the view gives it a sequence number; the
 * replicas prepare and commit it, each with 2f+1 signatures, and execute the entries in order. When
 * the primary makes no progress, 2f+1 replicas change to the next view, whose primary proposes
 * the prepared entries again. Every PBFT_INTERVAL entries the replicas sign a checkpoint of the
 * ledger; 2f+1 signatures make it stable, and the messages before it are dropped.
 *
 * An entry is a key and a value, for Shoal a unit and the hash of its result. A correct replica
 * prepares an entry only if `validate` agrees with the value, that is, after it has computed the
 * result itself. So a committed value has been computed by f+1 correct replicas at least.
 * Exceptions are entries with a certificate of 2f+1 signatures, of which f+1 are of correct
 * replicas.
 *
 * Invariants, with at most f faulty replicas:
 *   1. Two correct replicas execute the same entry at a sequence number.
 *   2. A correct replica signs one digest for a sequence number in a view, so two are evidence.
 *   3. A stable checkpoint <= executed; executed <= stable + PBFT_WINDOW.
 *   4. An entry in `executed` has a certificate in the window of f+1 correct replicas, until a
 *      checkpoint with it is stable.
 *   5. A key is executed once.
 *
 * A replica does no input or output and reads no clock: pbft_step changes the state by one event
 * and appends the actions that follow. Equal events give equal actions. Messages may be lost, come
 * twice, late and in any order: replicas exchange their status regularly, and send again the
 * messages that another lacks. A replica keeps its state in memory; one that loses it and continues
 * with the same key is faulty.
 */
#ifndef SHOAL_CLUSTER_PBFT_H
#define SHOAL_CLUSTER_PBFT_H

#include "cluster/pbft_wire.h"

enum { PBFT_PENDING = 256, /* requests that are not executed */ PBFT_ALL = 254 };

/* How messages are signed: ed25519, or the stand-in of a simulator. */
struct pbft_signer {
    void (*sign)(const uint8_t *secret, const void *p, size_t n, uint8_t out[PBFT_SIGNATURE]);
    bool (*verify)(const uint8_t public_key[PBFT_PUBLIC_KEY], const void *p, size_t n,
                   const uint8_t signature[PBFT_SIGNATURE]);
};
extern const struct pbft_signer pbft_ed25519;
struct pbft_key_pair {
    uint8_t public_key[PBFT_PUBLIC_KEY], secret[PBFT_SECRET_KEY];
};
void pbft_key_pair_make(struct pbft_key_pair *out); /* ed25519, from the system's random numbers */

/* The members of a group and its client. */
struct pbft_group {
    int n; /* 3f+1, at least 4; with more replicas than 3f+1, f is the same and quorums grow */
    uint8_t keys[PBFT_REPLICAS_MAX][PBFT_PUBLIC_KEY];
    uint8_t client[PBFT_PUBLIC_KEY];
    uint8_t id[PBFT_DIGEST]; /* pbft_group_set_id: hash of the keys and a nonce */
};
void pbft_group_set_id(struct pbft_group *g, uint64_t nonce);
int pbft_faulty_max(int n); /* f = (n - 1) / 3 */
/* Signatures of which any two sets have f+1 replicas in common: 2f+1 of 3f+1. */
int pbft_quorum(int n);

/* PBFT_AGREES: this replica has computed the value of the entry; PBFT_DIFFERS: it has computed
 * another one; PBFT_UNKNOWN: it has computed none yet. */
enum pbft_verdict { PBFT_UNKNOWN, PBFT_AGREES, PBFT_DIFFERS };
struct pbft_options {
    struct pbft_group group;
    int self;
    const uint8_t *secret; /* key of this replica; outlives it */
    const struct pbft_signer *signer;
    double timeout; /* seconds until the replicas change a primary that makes no progress */
    enum pbft_verdict (*validate)(void *ctx, const uint8_t *entry, size_t len);
    void *ctx;
};

enum pbft_event_kind {
    PBFT_RECEIVED, /* data, len: a message */
    PBFT_COMPUTED, /* the verdict of `validate` may have changed */
    PBFT_TICK
};
struct pbft_event {
    enum pbft_event_kind kind;
    double now; /* seconds; never less than before */
    const uint8_t *data;
    size_t len;
};

/* The proof that a replica is faulty, if at most f are: a statement with its signature (a message
 * without body), and a second piece of evidence. */
enum pbft_fault {
    PBFT_EQUIVOCATION, /* a second statement of it, with another digest for the same number and
                          view, or for the same view of a VIEW_CHANGE */
    PBFT_WRONG_VALUE,  /* the REQUEST of the entry, whose value differs from the computed one */
    PBFT_WRONG_STATE,  /* a STATE with the certificate of another digest */
    PBFT_INVALID, /* nothing: the first one is a whole message, which no correct replica signs */
};
extern const char *const pbft_fault_texts[];

enum pbft_action_kind {
    PBFT_SEND,    /* to, data: a message */
    PBFT_EXECUTE, /* seq, data: an entry, the first with its key */
    PBFT_FAULT,   /* to: the faulty replica; fault; data and other: the evidence. Once a replica */
};
struct pbft_action {
    enum pbft_action_kind kind;
    int to; /* a replica, PBFT_CLIENT, or PBFT_ALL: all other replicas */
    uint64_t seq;
    enum pbft_fault fault;
    size_t data, len, other, other_len; /* positions in pbft_actions.bytes */
};
/* Zero-initialise it; set n and bytes.len to 0 to use it again. */
struct pbft_actions {
    struct pbft_action *v;
    int n, cap;
    struct buf bytes;
};
const uint8_t *pbft_action_data(const struct pbft_actions *a, const struct pbft_action *v);
const uint8_t *pbft_action_other(const struct pbft_actions *a, const struct pbft_action *v);
void pbft_actions_release(struct pbft_actions *a);

struct pbft;
struct pbft *pbft_new(const struct pbft_options *o);
void pbft_free(struct pbft *p);
void pbft_step(struct pbft *p, const struct pbft_event *e, struct pbft_actions *out);

uint64_t pbft_view(const struct pbft *p);
uint64_t pbft_executed(const struct pbft *p);
uint64_t pbft_stable(const struct pbft *p);
bool pbft_is_in_view(const struct pbft *p); /* false: it changes to pbft_view */
/* The entry that was executed at seq; 1 <= seq <= pbft_executed. */
const struct pbft_entry *pbft_ledger_entry(const struct pbft *p, uint64_t seq);

#endif
