/*
 * pbft: see pbft.h. This file has the normal case, checkpoints and retransmission; pbft_view.c has
 * view changes.
 *
 * A message is handled only after its signature, and those inside it, have been verified. Messages
 * of another view than the current one count for nothing except as evidence; their senders send
 * them again when a STATUS shows that a replica lacks them.
 */
#include "cluster/pbft_internal.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum { ATTEMPTS_MAX = 6 }; // the timeout grows to 2^6 times the initial one

const char *const pbft_fault_texts[] = {
    [PBFT_EQUIVOCATION] = "it signed two different messages",
    [PBFT_WRONG_VALUE] = "it signed a wrong result",
    [PBFT_WRONG_STATE] = "it signed a wrong checkpoint",
    [PBFT_INVALID] = "it signed an invalid message",
};

/* keys and groups */

static void ed25519_sign(const uint8_t *secret, const void *p, size_t n,
                         uint8_t out[PBFT_SIGNATURE]) {
    CHECK(crypto_sign_detached(out, NULL, p, n, secret) == 0);
}

static bool ed25519_verify(const uint8_t public_key[PBFT_PUBLIC_KEY], const void *p, size_t n,
                           const uint8_t signature[PBFT_SIGNATURE]) {
    return crypto_sign_verify_detached(signature, p, n, public_key) == 0;
}

const struct pbft_signer pbft_ed25519 = {ed25519_sign, ed25519_verify};

void pbft_key_pair_make(struct pbft_key_pair *out) {
    CHECK(sodium_init() >= 0);
    CHECK(crypto_sign_keypair(out->public_key, out->secret) == 0);
}

void pbft_group_set_id(struct pbft_group *g, uint64_t nonce) {
    struct buf text = {0};
    for (int i = 0; i < 8; i++) buf_add(&text, &(uint8_t){(uint8_t)(nonce >> 8 * i)}, 1);
    buf_add(&text, g->client, sizeof g->client);
    for (int i = 0; i < g->n; i++) buf_add(&text, g->keys[i], sizeof g->keys[i]);
    pbft_digest(text.data, text.len, g->id);
    buf_release(&text);
}

int pbft_faulty_max(int n) {
    return (n - 1) / 3;
}

int pbft_quorum(int n) {
    return (n + pbft_faulty_max(n)) / 2 + 1;
}

/* actions */

struct pbft_action *pbft_action_add(struct pbft_actions *a, enum pbft_action_kind kind, int to,
                                    const void *data, size_t len) {
    if (a->n == a->cap) {
        a->cap = 2 * a->cap + 16;
        a->v = xrealloc(a->v, sizeof *a->v * (size_t)a->cap);
    }
    a->v[a->n] = (struct pbft_action){.kind = kind, .to = to, .data = a->bytes.len, .len = len};
    buf_add(&a->bytes, data, len);
    return &a->v[a->n++];
}

void pbft_fault_add(struct pbft_actions *a, int replica, enum pbft_fault fault, const void *data,
                    size_t len, const void *other, size_t other_len) {
    struct pbft_action *v = pbft_action_add(a, PBFT_FAULT, replica, data, len);
    v->fault = fault;
    v->other = a->bytes.len;
    v->other_len = other_len;
    if (other_len) buf_add(&a->bytes, other, other_len);
}

static void evidence_add(struct buf *out, const struct signed_statement *s) {
    pbft_message_write(&s->s, NULL, 0, s->signature, out);
}

void pbft_equivocation_add(struct pbft_actions *a, const struct signed_statement *one,
                           const struct signed_statement *two) {
    struct buf both = {0};
    evidence_add(&both, one);
    size_t len = both.len;
    evidence_add(&both, two);
    pbft_fault_add(a, one->s.sender, PBFT_EQUIVOCATION, both.data, len, both.data + len,
                   both.len - len);
    buf_release(&both);
}

const uint8_t *pbft_action_data(const struct pbft_actions *a, const struct pbft_action *v) {
    return (const uint8_t *)a->bytes.data + v->data;
}

const uint8_t *pbft_action_other(const struct pbft_actions *a, const struct pbft_action *v) {
    return (const uint8_t *)a->bytes.data + v->other;
}

void pbft_actions_release(struct pbft_actions *a) {
    free(a->v);
    buf_release(&a->bytes);
    *a = (struct pbft_actions){0};
}

static void message_send(struct pbft *p, int to, const struct signed_statement *s, const void *body,
                         size_t len) {
    struct buf message = {0};
    pbft_message_write(&s->s, body, len, s->signature, &message);
    pbft_send_bytes(p, to, &message);
    buf_release(&message);
}

void pbft_send_bytes(struct pbft *p, int to, const struct buf *message) {
    pbft_action_add(p->out, PBFT_SEND, to, message->data, message->len);
}

/* The primary of the view is changed when it is named. */
static void named(struct pbft *p, int replica) {
    p->named[replica] = true;
    if (p->in_view && replica == pbft_primary(p, p->view)) pbft_view_change_start(p, p->view + 1);
}

void pbft_name(struct pbft *p, int replica, enum pbft_fault fault, const void *data, size_t len,
               const void *other, size_t other_len) {
    if (p->named[replica]) return;
    pbft_fault_add(p->out, replica, fault, data, len, other, other_len);
    named(p, replica);
}

void pbft_name_equivocation(struct pbft *p, const struct signed_statement *a,
                            const struct signed_statement *b) {
    if (p->named[a->s.sender]) return;
    pbft_equivocation_add(p->out, a, b);
    named(p, a->s.sender);
}

static void name_wrong_value(struct pbft *p, const struct slot *s,
                             const struct signed_statement *said) {
    struct buf one = {0}, two = {0}, body = {0};
    struct pbft_statement request = {.kind = PBFT_REQUEST, .sender = PBFT_CLIENT};
    memcpy(request.group, p->o.group.id, PBFT_DIGEST);
    memcpy(request.digest, s->digest, PBFT_DIGEST);
    pbft_put_entry(&body, &s->entry, false);
    evidence_add(&one, said);
    pbft_message_write(&request, body.data, body.len, s->entry.signature, &two);
    pbft_name(p, said->s.sender, PBFT_WRONG_VALUE, one.data, one.len, two.data, two.len);
    buf_release(&one);
    buf_release(&two);
    buf_release(&body);
}

/* signatures */

bool pbft_is_signed(const struct pbft *p, const struct pbft_statement *s,
                    const uint8_t *signature) {
    uint8_t bytes[PBFT_STATEMENT];
    if (s->sender != PBFT_CLIENT && s->sender >= p->o.group.n) return false;
    const uint8_t *key = s->sender == PBFT_CLIENT ? p->o.group.client : p->o.group.keys[s->sender];
    pbft_statement_write(s, bytes);
    return p->o.signer->verify(key, bytes, sizeof bytes, signature);
}

static struct pbft_statement statement_make(const struct pbft *p, enum pbft_kind kind, int sender,
                                            uint64_t view, uint64_t seq,
                                            const uint8_t digest[PBFT_DIGEST]) {
    struct pbft_statement s = {.kind = kind, .sender = (uint8_t)sender, .view = view, .seq = seq};
    memcpy(s.group, p->o.group.id, PBFT_DIGEST);
    memcpy(s.digest, digest, PBFT_DIGEST);
    return s;
}

struct signed_statement pbft_sign(const struct pbft *p, enum pbft_kind kind, uint64_t view,
                                  uint64_t seq, const uint8_t digest[PBFT_DIGEST]) {
    uint8_t bytes[PBFT_STATEMENT];
    struct signed_statement s = {.s = statement_make(p, kind, p->o.self, view, seq, digest)};
    pbft_statement_write(&s.s, bytes);
    p->o.signer->sign(p->o.secret, bytes, sizeof bytes, s.signature);
    return s;
}

bool pbft_entry_is_signed(const struct pbft *p, const struct pbft_entry *e) {
    uint8_t digest[PBFT_DIGEST];
    if (e->len == 0) return true;
    pbft_entry_digest(e, digest);
    const struct pbft_statement s = statement_make(p, PBFT_REQUEST, PBFT_CLIENT, 0, 0, digest);
    return pbft_is_signed(p, &s, e->signature);
}

bool pbft_certificate_is_valid(const struct pbft *p, enum pbft_kind kind,
                               const struct pbft_certificate *c) {
    int primary = kind == PBFT_PREPARE ? pbft_primary(p, c->view) : -1;
    bool has_primary = primary < 0;
    if (c->n != p->quorum) return false;
    for (int i = 0; i < c->n; i++) {
        bool proposes = c->replica[i] == primary;
        const struct pbft_statement s = statement_make(p, proposes ? PBFT_PRE_PREPARE : kind,
                                                       c->replica[i], c->view, c->seq, c->digest);
        if (!pbft_is_signed(p, &s, c->signature[i])) return false;
        has_primary |= proposes;
    }
    return has_primary;
}

/* the ledger */

static uint64_t *ledger_place(const struct ledger *l, const uint8_t *key) {
    uint64_t i = hash_siphash(key, PBFT_ENTRY_KEY) & (l->index_size - 1);
    while (l->index[i] && memcmp(l->entries[l->index[i] - 1].bytes, key, PBFT_ENTRY_KEY) != 0)
        i = (i + 1) & (l->index_size - 1);
    return &l->index[i];
}

/* The sequence number at which the key was executed; 0: it was not. */
static uint64_t ledger_find(const struct ledger *l, const uint8_t *key) {
    return l->index_size ? *ledger_place(l, key) : 0;
}

static void ledger_index_grow(struct ledger *l) {
    uint64_t *old = l->index, n = l->index_size;
    l->index_size = n ? 2 * n : 64;
    l->index = xcalloc(l->index_size, sizeof *l->index);
    for (uint64_t i = 0; i < n; i++)
        if (old[i]) *ledger_place(l, l->entries[old[i] - 1].bytes) = old[i];
    free(old);
}

static void chain_digest(uint8_t chain[PBFT_DIGEST], const struct pbft_entry *e) {
    uint8_t both[2 * PBFT_DIGEST];
    memcpy(both, chain, PBFT_DIGEST);
    pbft_entry_digest(e, both + PBFT_DIGEST);
    pbft_digest(both, sizeof both, chain);
}

static void reply_send(struct pbft *p, uint64_t seq) {
    uint8_t digest[PBFT_DIGEST];
    pbft_entry_digest(&p->ledger.entries[seq - 1], digest);
    const struct signed_statement s = pbft_sign(p, PBFT_REPLY, p->view, seq, digest);
    message_send(p, PBFT_CLIENT, &s, NULL, 0);
}

static void pending_remove(struct pbft *p, const uint8_t *key) {
    int kept = 0;
    for (int i = 0; i < p->n_pending; i++)
        if (memcmp(p->pending[i].entry.bytes, key, PBFT_ENTRY_KEY) != 0)
            p->pending[kept++] = p->pending[i];
    p->n_pending = kept;
}

/* Executes the next entry. An entry whose key was executed before changes nothing. */
static void ledger_append(struct pbft *p, const struct pbft_entry *e) {
    struct ledger *l = &p->ledger;
    if (l->n == l->cap) {
        l->cap = 2 * l->cap + 64;
        l->entries = xrealloc(l->entries, sizeof *l->entries * l->cap);
    }
    l->entries[l->n++] = *e;
    chain_digest(l->digest, e);
    p->attempts = 0;
    p->deadline = 0;
    if (e->len == 0 || ledger_find(l, e->bytes)) return;
    if (2 * (l->n_keys + 1) > l->index_size) ledger_index_grow(l);
    *ledger_place(l, e->bytes) = l->n;
    l->n_keys++;
    pending_remove(p, e->bytes);
    pbft_action_add(p->out, PBFT_EXECUTE, p->o.self, e->bytes, e->len)->seq = l->n;
    reply_send(p, l->n);
}

/* slots */

struct slot *pbft_slot(struct pbft *p, uint64_t seq) {
    if (seq <= p->stable.seq || seq - p->stable.seq > PBFT_WINDOW) return NULL;
    struct slot *s = &p->slots[seq % PBFT_WINDOW];
    if (s->seq != seq) *s = (struct slot){.seq = seq};
    return s;
}

static bool slot_is_current(const struct pbft *p, const struct slot *s) {
    return p->in_view && s->proposed && s->view == p->view;
}

static bool is_about(const struct signed_statement *v, const struct slot *s) {
    return v->s.kind && v->s.view == s->view && memcmp(v->s.digest, s->digest, PBFT_DIGEST) == 0;
}

bool pbft_said(struct pbft *p, struct slot *s, const struct pbft_statement *st,
               const uint8_t *signature) {
    struct signed_statement now = {.s = *st}, *before = &s->said[st->sender];
    memcpy(now.signature, signature, PBFT_SIGNATURE);
    if (before->s.kind && before->s.view == st->view &&
        memcmp(before->s.digest, st->digest, PBFT_DIGEST) != 0) {
        pbft_name_equivocation(p, before, &now);
        return false;
    }
    if (st->view <= p->view && (!before->s.kind || before->s.view < st->view)) *before = now;
    return true;
}

static void certificate_add(struct pbft_certificate *c, int quorum, int replica,
                            const uint8_t *signature) {
    if (c->n == quorum) return;
    c->replica[c->n] = (uint8_t)replica;
    memcpy(c->signature[c->n++], signature, PBFT_SIGNATURE);
}

/* A certificate of the entry by these statements, and that of the primary if it has proposed it.
 * Its n is less than the quorum if there are not enough. */
static struct pbft_proof slot_proof(const struct pbft *p, const struct slot *s,
                                    const struct signed_statement *v, bool with_proposal) {
    struct pbft_proof proof = {.c = {.view = s->view, .seq = s->seq}, .entry = s->entry};
    int primary = with_proposal ? pbft_primary(p, s->view) : -1, others = 0;
    memcpy(proof.c.digest, s->digest, PBFT_DIGEST);
    for (int i = 0; i < p->o.group.n; i++) {
        if (i == primary)
            certificate_add(&proof.c, p->quorum, i, s->proposal);
        else if (is_about(&v[i], s) && (!with_proposal || ++others < p->quorum))
            certificate_add(&proof.c, p->quorum, i, v[i].signature);
    }
    return proof;
}

static void checkpoint_make(struct pbft *p);

static void execute(struct pbft *p) {
    struct slot *s;
    while ((s = pbft_slot(p, p->ledger.n + 1)) && s->committed.c.n) {
        ledger_append(p, &s->committed.entry);
        if (p->ledger.n % PBFT_INTERVAL == 0) checkpoint_make(p);
    }
}

/* Sends COMMIT when a quorum has prepared the entry, and executes it when a quorum has committed.
 */
static void slot_advance(struct pbft *p, struct slot *s) {
    if (!slot_is_current(p, s)) return;
    if (!s->commit_sent) {
        const struct pbft_proof proof = slot_proof(p, s, s->prepares, true);
        if (proof.c.n == p->quorum) {
            s->prepared = proof;
            s->commit_sent = true;
            s->commits[p->o.self] = pbft_sign(p, PBFT_COMMIT, s->view, s->seq, s->digest);
            message_send(p, PBFT_ALL, &s->commits[p->o.self], NULL, 0);
        }
    }
    if (s->committed.c.n) return;
    const struct pbft_proof proof = slot_proof(p, s, s->commits, false);
    if (proof.c.n < p->quorum) return;
    s->committed = proof;
    execute(p);
}

void pbft_slot_propose(struct pbft *p, struct slot *s, const struct pbft_entry *e,
                       const uint8_t *proposal) {
    s->view = p->view;
    s->proposed = true;
    s->accepted = s->commit_sent = s->wrong = false;
    s->entry = *e;
    pbft_entry_digest(e, s->digest);
    memcpy(s->proposal, proposal, PBFT_SIGNATURE);
}

void pbft_slot_accept(struct pbft *p, struct slot *s) {
    s->accepted = true;
    if (p->o.self != pbft_primary(p, p->view)) {
        s->prepares[p->o.self] = pbft_sign(p, PBFT_PREPARE, s->view, s->seq, s->digest);
        message_send(p, PBFT_ALL, &s->prepares[p->o.self], s->proposal, PBFT_SIGNATURE);
    }
    slot_advance(p, s);
}

/* Names all signers of the wrong entry, the primary last: this ends the view. */
static void slot_refuse(struct pbft *p, struct slot *s) {
    int primary = pbft_primary(p, s->view);
    s->wrong = true;
    for (int i = 0; i < p->o.group.n; i++)
        if (i != primary && is_about(&s->said[i], s)) name_wrong_value(p, s, &s->said[i]);
    if (is_about(&s->said[primary], s)) name_wrong_value(p, s, &s->said[primary]);
}

static enum pbft_verdict entry_verdict(const struct pbft *p, const struct pbft_entry *e) {
    return e->len ? p->o.validate(p->o.ctx, e->bytes, e->len) : PBFT_AGREES;
}

static void slot_validate(struct pbft *p, struct slot *s) {
    if (!slot_is_current(p, s) || s->accepted || s->wrong) return;
    enum pbft_verdict verdict = entry_verdict(p, &s->entry);
    if (verdict == PBFT_AGREES) pbft_slot_accept(p, s);
    if (verdict == PBFT_DIFFERS) slot_refuse(p, s);
}

/* messages of the normal case */

static bool is_of_view(const struct pbft *p, const struct pbft_message *m) {
    return p->in_view && m->s.view == p->view;
}

static void request_received(struct pbft *p, const struct pbft_message *m) {
    struct pending v = {.verdict = PBFT_UNKNOWN};
    if (m->s.sender != PBFT_CLIENT || !pbft_get_entry(m, false, &v.entry)) return;
    memcpy(v.entry.signature, m->signature, PBFT_SIGNATURE);
    memcpy(v.digest, m->s.digest, PBFT_DIGEST);
    uint64_t seq = ledger_find(&p->ledger, v.entry.bytes);
    if (seq) {
        reply_send(p, seq);
        return;
    }
    for (int i = 0; i < p->n_pending; i++)
        if (memcmp(p->pending[i].digest, v.digest, PBFT_DIGEST) == 0) return;
    v.verdict = entry_verdict(p, &v.entry);
    if (v.verdict != PBFT_DIFFERS && p->n_pending < PBFT_PENDING) p->pending[p->n_pending++] = v;
}

static void pre_prepare_received(struct pbft *p, const struct pbft_message *m) {
    struct slot *s = pbft_slot(p, m->s.seq);
    struct pbft_entry e;
    if (!s || m->s.sender != pbft_primary(p, m->s.view) || !pbft_get_entry(m, true, &e) ||
        !pbft_said(p, s, &m->s, m->signature) || !is_of_view(p, m) || slot_is_current(p, s) ||
        !pbft_entry_is_signed(p, &e))
        return;
    pbft_slot_propose(p, s, &e, m->signature);
    slot_validate(p, s);
    slot_advance(p, s);
}

static struct signed_statement signed_of(const struct pbft_message *m) {
    struct signed_statement v = {.s = m->s};
    memcpy(v.signature, m->signature, PBFT_SIGNATURE);
    return v;
}

static void vote_record(struct pbft *p, struct slot *s, struct signed_statement *votes,
                        const struct pbft_message *m) {
    if (!is_of_view(p, m)) return;
    votes[m->s.sender] = signed_of(m);
    if (s->wrong && is_about(&votes[m->s.sender], s)) name_wrong_value(p, s, &votes[m->s.sender]);
    slot_advance(p, s);
}

/* A PREPARE has the primary's signature, so a primary that proposed different entries to different
 * replicas is noticed by all of them. */
static void prepare_received(struct pbft *p, const struct pbft_message *m) {
    struct slot *s = pbft_slot(p, m->s.seq);
    int primary = pbft_primary(p, m->s.view);
    const struct pbft_statement proposal =
        statement_make(p, PBFT_PRE_PREPARE, primary, m->s.view, m->s.seq, m->s.digest);
    if (!s || m->s.sender == primary || !pbft_is_signed(p, &proposal, m->body)) return;
    bool consistent = primary == p->o.self || pbft_said(p, s, &proposal, m->body);
    if (pbft_said(p, s, &m->s, m->signature) && consistent) vote_record(p, s, s->prepares, m);
}

static void commit_received(struct pbft *p, const struct pbft_message *m) {
    struct slot *s = pbft_slot(p, m->s.seq);
    if (s && pbft_said(p, s, &m->s, m->signature)) vote_record(p, s, s->commits, m);
}

static void committed_received(struct pbft *p, const struct pbft_message *m) {
    struct slot *s = pbft_slot(p, m->s.seq);
    struct pbft_proof proof;
    if (!s || s->committed.c.n || !pbft_get_proof(m, &proof) ||
        !pbft_certificate_is_valid(p, PBFT_COMMIT, &proof.c) ||
        !pbft_entry_is_signed(p, &proof.entry))
        return;
    s->committed = proof;
    execute(p);
}

/* Gives the pending entries that agree their numbers. */
static void propose(struct pbft *p) {
    if (!p->in_view || p->o.self != pbft_primary(p, p->view)) return;
    for (int i = 0; i < p->n_pending; i++) {
        const struct pending *v = &p->pending[i];
        bool has_number = false;
        for (int k = 0; k < PBFT_WINDOW; k++)
            has_number |= slot_is_current(p, &p->slots[k]) && p->slots[k].seq > p->ledger.n &&
                          memcmp(p->slots[k].digest, v->digest, PBFT_DIGEST) == 0;
        p->next = MAX(p->next, p->ledger.n + 1);
        struct slot *s = v->verdict == PBFT_AGREES && !has_number ? pbft_slot(p, p->next) : NULL;
        if (!s) continue;
        struct buf body = {0};
        const struct pbft_entry e = v->entry;
        const struct signed_statement st =
            pbft_sign(p, PBFT_PRE_PREPARE, p->view, p->next++, v->digest);
        pbft_slot_propose(p, s, &e, st.signature);
        pbft_put_entry(&body, &e, true);
        message_send(p, PBFT_ALL, &st, body.data, body.len);
        buf_release(&body);
        pbft_slot_accept(p, s);
    }
}

/* checkpoints */

static struct checkpoint *checkpoint_at(struct pbft *p, uint64_t seq) {
    if (seq % PBFT_INTERVAL || seq <= p->stable.seq || seq - p->stable.seq > PBFT_WINDOW)
        return NULL;
    struct checkpoint *c = &p->checkpoints[seq / PBFT_INTERVAL % ARRAY_LEN(p->checkpoints)];
    if (c->seq != seq) *c = (struct checkpoint){.seq = seq};
    return c;
}

void pbft_stable_set(struct pbft *p, const struct pbft_certificate *c) {
    struct ledger *l = &p->ledger;
    uint64_t n = c->seq / PBFT_INTERVAL + 1;
    l->stable = xrealloc(l->stable, sizeof *l->stable * n);
    memset(l->stable + l->n_stable, 0, sizeof *l->stable * (n - l->n_stable));
    l->stable[n - 1] = p->stable = *c;
    l->n_stable = n;
}

/* Names the replicas whose digest is not the stable one. */
static void wrong_states_name(struct pbft *p, const struct checkpoint *c) {
    struct buf body = {0};
    const struct pbft_state state = {.stable = p->stable, .first = p->stable.seq + 1};
    uint8_t digest[PBFT_DIGEST];
    pbft_put_state(&body, &state);
    pbft_digest(body.data, body.len, digest);
    for (int i = 0; i < p->o.group.n; i++) {
        if (!c->votes[i].s.kind || memcmp(c->votes[i].s.digest, p->stable.digest, PBFT_DIGEST) == 0)
            continue;
        const struct signed_statement st = pbft_sign(p, PBFT_STATE, 0, p->stable.seq, digest);
        struct buf one = {0}, two = {0};
        evidence_add(&one, &c->votes[i]);
        pbft_message_write(&st.s, body.data, body.len, st.signature, &two);
        pbft_name(p, i, PBFT_WRONG_STATE, one.data, one.len, two.data, two.len);
        buf_release(&one);
        buf_release(&two);
    }
    buf_release(&body);
}

/* Makes the checkpoint stable if a quorum has the digest of this replica. */
static void checkpoint_advance(struct pbft *p, const struct checkpoint *c) {
    const struct signed_statement *own = &c->votes[p->o.self];
    struct pbft_certificate cert = {.seq = c->seq};
    if (!own->s.kind) return;
    memcpy(cert.digest, own->s.digest, PBFT_DIGEST);
    for (int i = 0; i < p->o.group.n; i++)
        if (c->votes[i].s.kind && memcmp(c->votes[i].s.digest, cert.digest, PBFT_DIGEST) == 0)
            certificate_add(&cert, p->quorum, i, c->votes[i].signature);
    if (cert.n < p->quorum) return;
    pbft_stable_set(p, &cert);
    wrong_states_name(p, c);
}

static void checkpoint_make(struct pbft *p) {
    struct checkpoint *c = checkpoint_at(p, p->ledger.n);
    if (!c) return;
    c->votes[p->o.self] = pbft_sign(p, PBFT_CHECKPOINT, 0, c->seq, p->ledger.digest);
    message_send(p, PBFT_ALL, &c->votes[p->o.self], NULL, 0);
    checkpoint_advance(p, c);
}

static void checkpoint_received(struct pbft *p, const struct pbft_message *m) {
    struct checkpoint *c = checkpoint_at(p, m->s.seq);
    const struct signed_statement now = signed_of(m);
    if (!c) return;
    struct signed_statement *before = &c->votes[m->s.sender];
    if (before->s.kind && memcmp(before->s.digest, now.s.digest, PBFT_DIGEST) != 0) {
        pbft_name_equivocation(p, before, &now);
        return;
    }
    *before = now;
    checkpoint_advance(p, c);
}

/* state transfer */

/* Sends the stable checkpoint at seq, and the entries up to it that the replica lacks. */
static void state_send(struct pbft *p, int to, uint64_t executed, uint64_t seq) {
    struct pbft_state state = {.stable = p->ledger.stable[seq / PBFT_INTERVAL],
                               .first = executed + 1,
                               .n = executed < seq ? (int)(seq - executed) : 0};
    struct buf body = {0};
    uint8_t digest[PBFT_DIGEST];
    for (int i = 0; i < state.n; i++) state.entries[i] = p->ledger.entries[executed + (uint64_t)i];
    pbft_put_state(&body, &state);
    pbft_digest(body.data, body.len, digest);
    const struct signed_statement st = pbft_sign(p, PBFT_STATE, 0, seq, digest);
    message_send(p, to, &st, body.data, body.len);
    buf_release(&body);
}

/* The first stable checkpoint after `executed`, or the newest one if that replica has executed
 * more. Two of them in succession differ by PBFT_WINDOW at most. */
static uint64_t checkpoint_for(const struct pbft *p, uint64_t executed) {
    for (uint64_t k = executed / PBFT_INTERVAL + 1; k < p->ledger.n_stable; k++)
        if (p->ledger.stable[k].n) return k * PBFT_INTERVAL;
    return p->stable.seq;
}

/* Whether the entries, after those that this replica has executed, give the certified digest. */
static bool state_is_right(struct pbft *p, const struct pbft_state *s) {
    uint8_t chain[PBFT_DIGEST];
    uint64_t seq = s->stable.seq;
    if (p->ledger.n >= seq) {
        const struct checkpoint *c = checkpoint_at(p, seq);
        return c && c->votes[p->o.self].s.kind &&
               memcmp(c->votes[p->o.self].s.digest, s->stable.digest, PBFT_DIGEST) == 0;
    }
    if (s->first > p->ledger.n + 1 || s->first + (uint64_t)s->n != seq + 1) return false;
    memcpy(chain, p->ledger.digest, PBFT_DIGEST);
    for (uint64_t i = p->ledger.n + 1; i <= seq; i++)
        chain_digest(chain, &s->entries[i - s->first]);
    return memcmp(chain, s->stable.digest, PBFT_DIGEST) == 0;
}

static void state_received(struct pbft *p, const struct pbft_message *m) {
    struct pbft_state s;
    if (!pbft_get_state(m, &s) || s.stable.seq <= p->stable.seq || s.stable.view ||
        s.stable.seq % PBFT_INTERVAL || !pbft_certificate_is_valid(p, PBFT_CHECKPOINT, &s.stable) ||
        !state_is_right(p, &s))
        return;
    while (p->ledger.n < s.stable.seq) ledger_append(p, &s.entries[p->ledger.n + 1 - s.first]);
    pbft_stable_set(p, &s.stable);
    execute(p);
}

/* status */

static void status_send(struct pbft *p) {
    struct buf body = {0};
    uint8_t digest[PBFT_DIGEST];
    pbft_put_status(&body, p->ledger.n, p->in_view);
    pbft_digest(body.data, body.len, digest);
    const struct signed_statement s = pbft_sign(p, PBFT_STATUS, p->view, p->stable.seq, digest);
    message_send(p, PBFT_ALL, &s, body.data, body.len);
    buf_release(&body);
}

/* Sends the signed messages of this replica about a number in the view. */
static void slot_send(struct pbft *p, int to, const struct slot *s) {
    struct buf body = {0};
    if (!slot_is_current(p, s)) return;
    if (p->o.self == pbft_primary(p, p->view)) {
        struct signed_statement st = {
            .s = statement_make(p, PBFT_PRE_PREPARE, p->o.self, s->view, s->seq, s->digest)};
        memcpy(st.signature, s->proposal, PBFT_SIGNATURE);
        pbft_put_entry(&body, &s->entry, true);
        message_send(p, to, &st, body.data, body.len);
    } else if (s->accepted) {
        message_send(p, to, &s->prepares[p->o.self], s->proposal, PBFT_SIGNATURE);
    }
    if (s->commit_sent) message_send(p, to, &s->commits[p->o.self], NULL, 0);
    buf_release(&body);
}

static void committed_send(struct pbft *p, int to, const struct slot *s) {
    struct buf body = {0};
    const struct signed_statement st =
        pbft_sign(p, PBFT_COMMITTED, s->committed.c.view, s->seq, s->committed.c.digest);
    pbft_put_proof(&body, &s->committed);
    message_send(p, to, &st, body.data, body.len);
    buf_release(&body);
}

/* Sends the message that brings the replica into the view. */
static void view_send(struct pbft *p, int to, uint64_t view, bool in_view) {
    if (p->in_view && p->view > 0 && (view < p->view || (view == p->view && !in_view)))
        pbft_send_bytes(p, to, &p->new_view);
    if (!p->in_view && (view < p->view || (view == p->view && !in_view)))
        pbft_send_bytes(p, to, &p->changes[p->o.self].message);
}

/* Sends the messages that the other replica lacks. */
static void status_received(struct pbft *p, const struct pbft_message *m) {
    uint64_t executed;
    bool in_view;
    int to = m->s.sender;
    if (!pbft_get_status(m, &executed, &in_view)) return;
    view_send(p, to, m->s.view, in_view);
    uint64_t stable = checkpoint_for(p, executed);
    if (m->s.seq < p->stable.seq && stable - MIN(executed, stable) <= PBFT_WINDOW)
        state_send(p, to, executed, stable);
    for (size_t i = 0; i < ARRAY_LEN(p->checkpoints); i++) {
        const struct checkpoint *c = &p->checkpoints[i];
        if (c->seq > p->stable.seq && c->seq > m->s.seq && c->votes[p->o.self].s.kind)
            message_send(p, to, &c->votes[p->o.self], NULL, 0);
    }
    for (uint64_t seq = MAX(p->stable.seq, executed) + 1;
         seq - p->stable.seq <= PBFT_WINDOW && seq > executed; seq++) {
        const struct slot *s = &p->slots[seq % PBFT_WINDOW];
        if (s->seq != seq) continue;
        if (s->committed.c.n)
            committed_send(p, to, s);
        else if (m->s.view == p->view && in_view)
            slot_send(p, to, s);
    }
}

/* time */

/* The view must make progress while an entry that agrees is not executed; and, in a view change,
 * once a quorum takes part in it. */
static bool progress_is_due(const struct pbft *p) {
    if (!p->in_view) return pbft_changes_count(p, p->view) >= p->quorum;
    for (int i = 0; i < p->n_pending; i++)
        if (p->pending[i].verdict == PBFT_AGREES) return true;
    for (int i = 0; i < PBFT_WINDOW; i++)
        if (slot_is_current(p, &p->slots[i]) && p->slots[i].accepted &&
            p->slots[i].seq > p->ledger.n)
            return true;
    return false;
}

static void deadline_update(struct pbft *p) {
    if (!progress_is_due(p))
        p->deadline = 0;
    else if (p->deadline <= 0)
        p->deadline = p->now + p->o.timeout * (double)(1 << MIN(p->attempts, ATTEMPTS_MAX));
}

static void tick(struct pbft *p) {
    if (p->deadline > 0 && p->now >= p->deadline) pbft_view_change_start(p, p->view + 1);
    if (p->now < p->status_at) return;
    p->status_at = p->now + p->o.timeout / 4;
    status_send(p);
}

static void computed(struct pbft *p) {
    int kept = 0;
    for (int i = 0; i < p->n_pending; i++) {
        struct pending v = p->pending[i];
        if (v.verdict == PBFT_UNKNOWN) v.verdict = entry_verdict(p, &v.entry);
        if (v.verdict != PBFT_DIFFERS) p->pending[kept++] = v;
    }
    p->n_pending = kept;
    for (int i = 0; i < PBFT_WINDOW; i++)
        if (p->slots[i].seq > p->stable.seq) slot_validate(p, &p->slots[i]);
}

/* steps */

static void message_received(struct pbft *p, const struct pbft_event *e) {
    static void (*const handlers[PBFT_KINDS])(struct pbft *, const struct pbft_message *) = {
        [PBFT_REQUEST] = request_received,       [PBFT_PRE_PREPARE] = pre_prepare_received,
        [PBFT_PREPARE] = prepare_received,       [PBFT_COMMIT] = commit_received,
        [PBFT_CHECKPOINT] = checkpoint_received, [PBFT_STATUS] = status_received,
        [PBFT_COMMITTED] = committed_received,   [PBFT_STATE] = state_received,
        [PBFT_VIEW_CHANGE] = pbft_view_change,   [PBFT_NEW_VIEW] = pbft_new_view,
    };
    struct pbft_message m;
    struct error err;
    if (pbft_message_parse(e->data, e->len, &m, &err) != OK || !handlers[m.s.kind]) return;
    bool client = m.s.sender == PBFT_CLIENT;
    if (memcmp(m.s.group, p->o.group.id, PBFT_DIGEST) != 0 || m.s.sender == p->o.self ||
        client != (m.s.kind == PBFT_REQUEST) || !pbft_is_signed(p, &m.s, m.signature))
        return;
    handlers[m.s.kind](p, &m);
}

struct pbft *pbft_new(const struct pbft_options *o) {
    struct pbft *p = xcalloc(1, sizeof *p);
    CHECK(o->group.n >= 4 && o->group.n <= PBFT_REPLICAS_MAX && o->self < o->group.n);
    p->o = *o;
    p->faulty = pbft_faulty_max(o->group.n);
    p->quorum = pbft_quorum(o->group.n);
    p->in_view = true;
    p->next = 1;
    return p;
}

void pbft_free(struct pbft *p) {
    if (!p) return;
    for (int i = 0; i < PBFT_REPLICAS_MAX; i++) buf_release(&p->changes[i].message);
    buf_release(&p->new_view);
    free(p->ledger.entries);
    free(p->ledger.index);
    free(p->ledger.stable);
    free(p);
}

void pbft_step(struct pbft *p, const struct pbft_event *e, struct pbft_actions *out) {
    p->out = out;
    p->now = e->now;
    if (e->kind == PBFT_RECEIVED) message_received(p, e);
    if (e->kind == PBFT_COMPUTED) computed(p);
    if (e->kind == PBFT_TICK) tick(p);
    propose(p);
    deadline_update(p);
}

uint64_t pbft_view(const struct pbft *p) {
    return p->view;
}

uint64_t pbft_executed(const struct pbft *p) {
    return p->ledger.n;
}

uint64_t pbft_stable(const struct pbft *p) {
    return p->stable.seq;
}

bool pbft_is_in_view(const struct pbft *p) {
    return p->in_view;
}

const struct pbft_entry *pbft_ledger_entry(const struct pbft *p, uint64_t seq) {
    CHECK(seq >= 1 && seq <= p->ledger.n);
    return &p->ledger.entries[seq - 1];
}
