/*
 * pbft_wire: the signed messages of PBFT replicas and their client, as bytes.
 *
 * A message is a statement (the group, kind, sender, view, sequence number and a digest, 82 bytes),
 * a body, and the sender's ed25519 signature of the statement. The digest covers the body, or the
 * entry that the message is about, so that a statement with its signature is a proof
 * even without the body. Each message has one encoding: the parser accepts no other, bounds
 * every count, and does not allocate. Parsed messages point into the bytes that were parsed.
 *
 *   kind         view         seq            digest of      body
 *   VOTE         0            0              the entry      entry
 *   REQUEST      0            0              the entry      entry
 *   PRE_PREPARE  view         its number     the entry      entry, the client's signature
 *   PREPARE      view         its number     the entry      the primary's signature
 *   COMMIT       view         its number     the entry      -
 *   REPLY        view         its number     the entry      -
 *   CHECKPOINT   0            last executed  the ledger     -
 *   STATUS       view         stable         the body       last executed, whether in the view
 *   COMMITTED    view         its number     the entry      certificate of COMMIT, entry
 *   STATE        0            checkpoint     the body       certificate of CHECKPOINT, entries
 *   VIEW_CHANGE  the new one  stable         the body       its certificate, prepared entries
 *   NEW_VIEW     the new one  0              the body       VIEW_CHANGE messages, signatures of the
 *                                                           PRE_PREPARE statements that follow
 *
 * All functions are pure; any thread may call them.
 */
#ifndef SHOAL_CLUSTER_PBFT_WIRE_H
#define SHOAL_CLUSTER_PBFT_WIRE_H

#include "base/base.h"

enum {
    PBFT_REPLICAS_MAX = 7, /* n = 3f+1 with f = 2 */
    PBFT_QUORUM_MAX = 5,   /* 2f+1 */
    PBFT_INTERVAL = 8,     /* sequence numbers between two checkpoints */
    PBFT_WINDOW = 16,      /* sequence numbers after the stable checkpoint that are in use */
    PBFT_ENTRY_KEY = 32,   /* bytes of an entry that identify its subject; the rest is its value */
    PBFT_ENTRY_MAX = 256,
    PBFT_DIGEST = 32,
    PBFT_PUBLIC_KEY = 32,
    PBFT_SECRET_KEY = 64,
    PBFT_SIGNATURE = 64,
    PBFT_CLIENT = 255, /* sender of the client's messages */
    PBFT_STATEMENT = PBFT_DIGEST + 1 + 1 + 8 + 8 + PBFT_DIGEST,
    PBFT_MESSAGE_MAX = 64 << 10,
};

enum pbft_kind {
    PBFT_VOTE = 1,
    PBFT_REQUEST,
    PBFT_PRE_PREPARE,
    PBFT_PREPARE,
    PBFT_COMMIT,
    PBFT_REPLY,
    PBFT_CHECKPOINT,
    PBFT_STATUS,
    PBFT_COMMITTED,
    PBFT_STATE,
    PBFT_VIEW_CHANGE,
    PBFT_NEW_VIEW,
    PBFT_KINDS
};

struct pbft_statement {
    uint8_t group[PBFT_DIGEST]; /* hash of the members' keys; zero in a VOTE */
    enum pbft_kind kind;
    uint8_t sender; /* index of a replica, or PBFT_CLIENT; 0 in a VOTE */
    uint64_t view, seq;
    uint8_t digest[PBFT_DIGEST];
};
struct pbft_message {
    struct pbft_statement s;
    const uint8_t *body;
    size_t body_len;
    const uint8_t *signature;
};

/* An entry with the client's signature of its REQUEST. len 0: the null entry of a new view, with
 * digest and signature zero. */
struct pbft_entry {
    uint16_t len;
    uint8_t bytes[PBFT_ENTRY_MAX];
    uint8_t signature[PBFT_SIGNATURE];
};
/* Signatures of one statement by n different replicas, which ascend. In a certificate of
 * PREPARE, the signature of the view's primary is that of its PRE_PREPARE. */
struct pbft_certificate {
    uint64_t view, seq;
    uint8_t digest[PBFT_DIGEST];
    int n; /* 0: none */
    uint8_t replica[PBFT_QUORUM_MAX];
    uint8_t signature[PBFT_QUORUM_MAX][PBFT_SIGNATURE];
};
struct pbft_proof {
    struct pbft_certificate c;
    struct pbft_entry entry;
};
struct pbft_view_change {
    struct pbft_certificate stable; /* CHECKPOINT certificate; n 0: the beginning, seq 0 */
    int n;
    struct pbft_proof prepared[PBFT_WINDOW]; /* their sequence numbers ascend */
};
struct pbft_new_view {
    int n_changes, n_proposals;
    struct {
        const uint8_t *data;
        size_t len;
    } changes[PBFT_QUORUM_MAX];
    uint8_t proposals[PBFT_WINDOW][PBFT_SIGNATURE];
};
struct pbft_state {
    struct pbft_certificate stable;
    uint64_t first; /* sequence number of the first entry */
    int n;
    struct pbft_entry entries[PBFT_WINDOW];
};

/* The digest of an entry, zero for the null entry; and of other bytes. */
void pbft_entry_digest(const struct pbft_entry *e, uint8_t out[PBFT_DIGEST]);
void pbft_digest(const void *p, size_t n, uint8_t out[PBFT_DIGEST]);
/* Sets an entry without a signature. len is PBFT_ENTRY_KEY to PBFT_ENTRY_MAX. */
void pbft_entry_set(struct pbft_entry *e, const void *bytes, size_t len);

void pbft_statement_write(const struct pbft_statement *s, uint8_t out[PBFT_STATEMENT]);
/* Appends a message; its body is one of the pbft_put_* functions, or empty. */
void pbft_message_write(const struct pbft_statement *s, const void *body, size_t len,
                        const uint8_t signature[PBFT_SIGNATURE], struct buf *out);
void pbft_put_entry(struct buf *out, const struct pbft_entry *e, bool with_signature);
void pbft_put_status(struct buf *out, uint64_t executed, bool in_view);
void pbft_put_proof(struct buf *out, const struct pbft_proof *p);
void pbft_put_state(struct buf *out, const struct pbft_state *s);
void pbft_put_view_change(struct buf *out, const struct pbft_view_change *v);
void pbft_put_new_view(struct buf *out, const struct pbft_new_view *v);

/* Parses a message with the structure of its whole body; signatures are not verified. ERR_FORMAT:
 * it is not the encoding of a message. */
int pbft_message_parse(const uint8_t *p, size_t len, struct pbft_message *out, struct error *err);
/* Parse the body of a message of the kind: REQUEST and VOTE, with_signature false, or PRE_PREPARE;
 * STATUS; COMMITTED; STATE; VIEW_CHANGE; NEW_VIEW. False: another body. */
bool pbft_get_entry(const struct pbft_message *m, bool with_signature, struct pbft_entry *out);
bool pbft_get_status(const struct pbft_message *m, uint64_t *executed, bool *in_view);
bool pbft_get_proof(const struct pbft_message *m, struct pbft_proof *out);
bool pbft_get_state(const struct pbft_message *m, struct pbft_state *out);
bool pbft_get_view_change(const struct pbft_message *m, struct pbft_view_change *out);
bool pbft_get_new_view(const struct pbft_message *m, struct pbft_new_view *out);

#endif
