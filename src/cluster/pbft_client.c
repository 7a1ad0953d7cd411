/*
 * pbft_client: see pbft_client.h.
 */
#include "cluster/pbft_client.h"

#include "cluster/pbft_internal.h"

#include <stdlib.h>
#include <string.h>

/* A key: the entry that was proposed for it, replies to this entry, and votes of the replicas. */
struct subject {
    struct pbft_entry entry; /* len 0: only votes so far; then its bytes begin with the key */
    uint8_t digest[PBFT_DIGEST];
    uint64_t seq; /* number of its commit; 0: not committed */
    double sent;
    struct signed_statement replies[PBFT_REPLICAS_MAX];
    struct buf votes[PBFT_REPLICAS_MAX]; /* messages; the first one of each */
};
struct pbft_client {
    struct pbft_client_options o;
    double now;
    struct subject *v;
    int n, cap;
    bool named[PBFT_REPLICAS_MAX];
    struct pbft_actions *out;
};

static void name(struct pbft_client *c, int replica, enum pbft_fault fault, const struct buf *one,
                 const struct buf *two) {
    if (c->named[replica]) return;
    c->named[replica] = true;
    pbft_fault_add(c->out, replica, fault, one->data, one->len, two->data, two->len);
}

/* requests */

static struct pbft_statement statement_make(const struct pbft_client *c, enum pbft_kind kind,
                                            const uint8_t digest[PBFT_DIGEST]) {
    struct pbft_statement s = {.kind = kind, .sender = PBFT_CLIENT};
    memcpy(s.group, c->o.group.id, PBFT_DIGEST);
    memcpy(s.digest, digest, PBFT_DIGEST);
    return s;
}

static void request_write(const struct pbft_client *c, const struct subject *s, struct buf *out) {
    const struct pbft_statement st = statement_make(c, PBFT_REQUEST, s->digest);
    struct buf body = {0};
    pbft_put_entry(&body, &s->entry, false);
    pbft_message_write(&st, body.data, body.len, s->entry.signature, out);
    buf_release(&body);
}

static void request_send(struct pbft_client *c, struct subject *s) {
    struct buf message = {0};
    s->sent = c->now;
    request_write(c, s, &message);
    pbft_action_add(c->out, PBFT_SEND, PBFT_ALL, message.data, message.len);
    buf_release(&message);
}

/* Finds or makes the subject of a key. */
static struct subject *subject_of(struct pbft_client *c, const uint8_t *key) {
    for (int i = c->n - 1; i >= 0; i--)
        if (memcmp(c->v[i].entry.bytes, key, PBFT_ENTRY_KEY) == 0) return &c->v[i];
    if (c->n == c->cap) {
        c->cap = 2 * c->cap + 16;
        c->v = xrealloc(c->v, sizeof *c->v * (size_t)c->cap);
    }
    struct subject *s = &c->v[c->n++];
    *s = (struct subject){.seq = 0};
    memcpy(s->entry.bytes, key, PBFT_ENTRY_KEY);
    return s;
}

static void propose(struct pbft_client *c, const struct pbft_client_event *e) {
    struct subject *s = subject_of(c, e->data);
    uint8_t bytes[PBFT_STATEMENT];
    if (s->seq)
        pbft_action_add(c->out, PBFT_EXECUTE, PBFT_CLIENT, s->entry.bytes, s->entry.len)->seq =
            s->seq;
    if (s->entry.len) return;
    pbft_entry_set(&s->entry, e->data, e->len);
    pbft_entry_digest(&s->entry, s->digest);
    const struct pbft_statement st = statement_make(c, PBFT_REQUEST, s->digest);
    pbft_statement_write(&st, bytes);
    c->o.signer->sign(c->o.secret, bytes, sizeof bytes, s->entry.signature);
    request_send(c, s);
}

/* votes */

static struct pbft_statement vote_statement(const struct pbft_entry *e) {
    struct pbft_statement s = {.kind = PBFT_VOTE};
    pbft_entry_digest(e, s.digest);
    return s;
}

void pbft_vote_write(const struct pbft_signer *signer, const uint8_t *secret,
                     const struct pbft_entry *e, struct buf *out) {
    const struct pbft_statement s = vote_statement(e);
    uint8_t bytes[PBFT_STATEMENT], signature[PBFT_SIGNATURE];
    struct buf body = {0};
    pbft_statement_write(&s, bytes);
    signer->sign(secret, bytes, sizeof bytes, signature);
    pbft_put_entry(&body, e, false);
    pbft_message_write(&s, body.data, body.len, signature, out);
    buf_release(&body);
}

bool pbft_vote_read(const struct pbft_signer *signer, const uint8_t *public_key, const void *data,
                    size_t len, struct pbft_entry *out) {
    struct pbft_message m;
    struct error err;
    uint8_t bytes[PBFT_STATEMENT], expected[PBFT_STATEMENT];
    if (pbft_message_parse(data, len, &m, &err) != OK || m.s.kind != PBFT_VOTE ||
        !pbft_get_entry(&m, false, out))
        return false;
    const struct pbft_statement s = vote_statement(out);
    pbft_statement_write(&s, expected);
    pbft_statement_write(&m.s, bytes);
    return memcmp(bytes, expected, sizeof bytes) == 0 &&
           signer->verify(public_key, bytes, sizeof bytes, m.signature);
}

/* Names the replicas whose votes differ from the committed entry. */
static void votes_check(struct pbft_client *c, const struct subject *s) {
    for (int i = 0; s->seq && i < c->o.group.n; i++) {
        struct pbft_message m;
        struct error err;
        struct buf request = {0};
        const struct buf *vote = &s->votes[i];
        if (!vote->len ||
            pbft_message_parse((const uint8_t *)vote->data, vote->len, &m, &err) != OK ||
            memcmp(m.s.digest, s->digest, PBFT_DIGEST) == 0)
            continue;
        request_write(c, s, &request);
        name(c, i, PBFT_WRONG_VALUE, vote, &request);
        buf_release(&request);
    }
}

static void vote_received(struct pbft_client *c, const struct pbft_client_event *e) {
    struct pbft_entry entry;
    if (e->from < 0 || e->from >= c->o.group.n ||
        !pbft_vote_read(c->o.signer, c->o.group.keys[e->from], e->data, e->len, &entry))
        return;
    struct subject *s = subject_of(c, entry.bytes);
    struct buf *before = &s->votes[e->from];
    const struct buf now = {.data = (char *)(uintptr_t)e->data, .len = e->len};
    if (!before->len)
        buf_add(before, e->data, e->len);
    else if (before->len != now.len || memcmp(before->data, now.data, now.len) != 0)
        name(c, e->from, PBFT_EQUIVOCATION, before, &now);
    votes_check(c, s);
}

/* replies */

static int replies_equal(const struct pbft_client *c, const struct subject *s, uint64_t seq) {
    int n = 0;
    for (int i = 0; i < c->o.group.n; i++) n += s->replies[i].s.kind && s->replies[i].s.seq == seq;
    return n;
}

/* Names the replica if it has signed another entry for the same number. */
static void reply_check(struct pbft_client *c, const struct signed_statement *r) {
    for (int i = 0; i < c->n; i++) {
        const struct signed_statement *other = &c->v[i].replies[r->s.sender];
        if (!other->s.kind || other->s.seq != r->s.seq ||
            memcmp(other->s.digest, r->s.digest, PBFT_DIGEST) == 0)
            continue;
        if (!c->named[r->s.sender]) pbft_equivocation_add(c->out, other, r);
        c->named[r->s.sender] = true;
    }
}

static bool reply_read(const struct pbft_client *c, const struct pbft_client_event *e,
                       struct signed_statement *out) {
    struct pbft_message m;
    struct error err;
    uint8_t bytes[PBFT_STATEMENT];
    if (pbft_message_parse(e->data, e->len, &m, &err) != OK || m.s.kind != PBFT_REPLY ||
        m.s.sender >= c->o.group.n || memcmp(m.s.group, c->o.group.id, PBFT_DIGEST) != 0)
        return false;
    pbft_statement_write(&m.s, bytes);
    out->s = m.s;
    memcpy(out->signature, m.signature, PBFT_SIGNATURE);
    return c->o.signer->verify(c->o.group.keys[m.s.sender], bytes, sizeof bytes, m.signature);
}

static void reply_received(struct pbft_client *c, const struct pbft_client_event *e) {
    struct signed_statement r;
    int i = 0;
    if (!reply_read(c, e, &r)) return;
    while (i < c->n && (!c->v[i].entry.len || memcmp(c->v[i].digest, r.s.digest, PBFT_DIGEST))) i++;
    if (i == c->n) return;
    struct subject *s = &c->v[i];
    reply_check(c, &r);
    if (s->replies[r.s.sender].s.kind) return;
    s->replies[r.s.sender] = r;
    if (s->seq || replies_equal(c, s, r.s.seq) <= pbft_faulty_max(c->o.group.n)) return;
    s->seq = r.s.seq;
    pbft_action_add(c->out, PBFT_EXECUTE, PBFT_CLIENT, s->entry.bytes, s->entry.len)->seq = s->seq;
    votes_check(c, s);
}

/* steps */

struct pbft_client *pbft_client_new(const struct pbft_client_options *o) {
    struct pbft_client *c = xcalloc(1, sizeof *c);
    c->o = *o;
    return c;
}

void pbft_client_free(struct pbft_client *c) {
    if (!c) return;
    for (int i = 0; i < c->n; i++)
        for (int k = 0; k < PBFT_REPLICAS_MAX; k++) buf_release(&c->v[i].votes[k]);
    free(c->v);
    free(c);
}

void pbft_client_step(struct pbft_client *c, const struct pbft_client_event *e,
                      struct pbft_actions *out) {
    c->out = out;
    c->now = e->now;
    switch (e->kind) {
    case PBFT_CLIENT_PROPOSE:
        propose(c, e);
        break;
    case PBFT_CLIENT_VOTE:
        vote_received(c, e);
        break;
    case PBFT_CLIENT_RECEIVED:
        reply_received(c, e);
        break;
    case PBFT_CLIENT_TICK:
        for (int i = 0; i < c->n; i++)
            if (c->v[i].entry.len && !c->v[i].seq && c->now - c->v[i].sent >= c->o.retry)
                request_send(c, &c->v[i]);
    }
}

int pbft_client_unfinished(const struct pbft_client *c) {
    int n = 0;
    for (int i = 0; i < c->n; i++) n += c->v[i].entry.len && !c->v[i].seq;
    return n;
}
