/*
 * pbft_internal: the state of a replica, for pbft.c (normal case, checkpoints, retransmission) and
 * pbft_view.c (view changes), with the functions that pbft_client.c uses too.
 */
#ifndef SHOAL_CLUSTER_PBFT_INTERNAL_H
#define SHOAL_CLUSTER_PBFT_INTERNAL_H

#include "cluster/pbft.h"

struct signed_statement { /* s.kind 0: none */
    struct pbft_statement s;
    uint8_t signature[PBFT_SIGNATURE];
};
/* A sequence number in the window. `proposed` and the fields up to `wrong` are of `view`; they are
 * current if it is the replica's view. */
struct slot {
    uint64_t seq, view;
    bool proposed;    /* there is an entry of the primary */
    bool accepted;    /* this replica has prepared it */
    bool commit_sent; /* it is prepared by a quorum */
    bool wrong;       /* `validate` differs */
    struct pbft_entry entry;
    uint8_t digest[PBFT_DIGEST], proposal[PBFT_SIGNATURE]; /* proposal: of the primary */
    struct signed_statement said[PBFT_REPLICAS_MAX]; /* the first one of each in its newest view */
    struct signed_statement prepares[PBFT_REPLICAS_MAX], commits[PBFT_REPLICAS_MAX];
    struct pbft_proof prepared; /* certificate of the newest view that prepared it; c.n 0: none */
    struct pbft_proof committed;
};
struct checkpoint {
    uint64_t seq;
    struct signed_statement votes[PBFT_REPLICAS_MAX];
};
struct pending {
    struct pbft_entry entry;
    uint8_t digest[PBFT_DIGEST];
    enum pbft_verdict verdict;
};
struct change { /* the VIEW_CHANGE of a replica for its newest view */
    uint64_t view;
    struct buf message;
};
struct ledger {
    struct pbft_entry *entries; /* [n]; entries[i] was executed at i + 1 */
    uint64_t n, cap;
    uint64_t *index; /* [index_size] sequence numbers by their keys, 0: free; open addressing */
    uint64_t index_size, n_keys;
    uint8_t digest[PBFT_DIGEST];
    struct pbft_certificate
        *stable; /* [n_stable] of the checkpoint at i * PBFT_INTERVAL; n 0: none */
    uint64_t n_stable;
};
struct pbft {
    struct pbft_options o;
    int faulty, quorum;
    double now, deadline, status_at; /* deadline: of the view; 0: none */
    int attempts;                    /* view changes since the last execution */
    uint64_t view, next;             /* next: to be given by this primary */
    bool in_view;
    struct slot slots[PBFT_WINDOW];
    struct checkpoint checkpoints[PBFT_WINDOW / PBFT_INTERVAL];
    struct pbft_certificate stable; /* the newest stable checkpoint; seq 0: the beginning */
    struct ledger ledger;
    struct pending pending[PBFT_PENDING];
    int n_pending;
    struct change changes[PBFT_REPLICAS_MAX];
    struct buf new_view; /* the NEW_VIEW message of the view; empty in view 0 */
    bool named[PBFT_REPLICAS_MAX];
    struct pbft_actions *out;
};

static inline int pbft_primary(const struct pbft *p, uint64_t view) {
    return (int)(view % (uint64_t)p->o.group.n);
}

/* for the client too */
struct pbft_action *pbft_action_add(struct pbft_actions *a, enum pbft_action_kind kind, int to,
                                    const void *data, size_t len);
void pbft_fault_add(struct pbft_actions *a, int replica, enum pbft_fault fault, const void *data,
                    size_t len, const void *other, size_t other_len);
void pbft_equivocation_add(struct pbft_actions *a, const struct signed_statement *one,
                           const struct signed_statement *two);

/* signatures and messages */
bool pbft_is_signed(const struct pbft *p, const struct pbft_statement *s, const uint8_t *signature);
bool pbft_certificate_is_valid(const struct pbft *p, enum pbft_kind kind,
                               const struct pbft_certificate *c);
bool pbft_entry_is_signed(const struct pbft *p, const struct pbft_entry *e);
/* A statement of this replica, with its signature. */
struct signed_statement pbft_sign(const struct pbft *p, enum pbft_kind kind, uint64_t view,
                                  uint64_t seq, const uint8_t digest[PBFT_DIGEST]);
void pbft_send_bytes(struct pbft *p, int to, const struct buf *message);
void pbft_name(struct pbft *p, int replica, enum pbft_fault fault, const void *data, size_t len,
               const void *other, size_t other_len);
void pbft_name_equivocation(struct pbft *p, const struct signed_statement *a,
                            const struct signed_statement *b);

/* slots: NULL: the number is outside the window */
struct slot *pbft_slot(struct pbft *p, uint64_t seq);
/* Records a statement; false: the replica has signed another one before, and is named. */
bool pbft_said(struct pbft *p, struct slot *s, const struct pbft_statement *st,
               const uint8_t *signature);
void pbft_slot_propose(struct pbft *p, struct slot *s, const struct pbft_entry *e,
                       const uint8_t *proposal);
void pbft_slot_accept(struct pbft *p, struct slot *s);
void pbft_stable_set(struct pbft *p, const struct pbft_certificate *c);

/* view changes */
void pbft_view_change_start(struct pbft *p, uint64_t view);
void pbft_view_change(struct pbft *p, const struct pbft_message *m);
void pbft_new_view(struct pbft *p, const struct pbft_message *m);
int pbft_changes_count(const struct pbft *p, uint64_t view); /* VIEW_CHANGE messages for it */

#endif
