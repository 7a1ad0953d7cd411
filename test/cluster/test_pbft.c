/*
 * test_pbft: replicas and their client in simulated histories with faulty replicas.
 *
 * A history is a seed. From it come a group of 4 or 7 replicas, of which f may be faulty, units
 * whose results the replicas compute at different times, and a network that delays, reorders,
 * duplicates and loses messages and is partitioned, with correct replicas that stop and resume. A
 * faulty replica runs the same code; the messages that it sends are changed on their way out: it
 * lies about results, sends different statements to different replicas, forges, invents view
 * changes, loses its state or sends nothing. In every history
 *   - two correct replicas execute the same entry at a number, each key once, with the right value;
 *   - after the last fault all units are committed, and known to all correct replicas;
 *   - no correct replica is named, and the evidence against a faulty one can be verified;
 *   - a faulty replica is named if a correct one received the proof.
 * Histories sign with a stand-in for ed25519 that is fast and whose keys are public; faulty
 * replicas use their own key only. SHOAL_HISTORIES is the number of histories, SHOAL_SEED the first
 * seed; a failure prints its seed.
 */
/* levels: once */
#include "fixture.h"

#include "cluster/pbft_client.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

enum { UNITS_MAX = 24, EVENTS_MAX = 1 << 14, LEDGER_MAX = 512 };
enum lie {
    LIE_SILENCE = 1,     /* it sends few or no messages */
    LIE_VALUE = 2,       /* its results are wrong, and it prepares wrong ones */
    LIE_EQUIVOCATE = 4,  /* it sends other statements to odd replicas */
    LIE_VIEW_CHANGE = 8, /* its view changes are wrong */
    LIE_FORGE = 16,      /* it sends in the name of others */
    LIE_STATE = 32,      /* its checkpoints and states are wrong */
    LIE_AMNESIA = 64,    /* it starts again without its state */
    LIES = 7
};

struct sim_event {
    double at;
    uint64_t order;
    enum { SIM_MESSAGE, SIM_COMPUTED, SIM_TICK, SIM_STOP, SIM_GO } kind;
    int from, to, unit; /* to: a replica, or PBFT_CLIENT */
    bool changed;       /* a faulty replica has changed it */
    uint8_t *data;
    size_t len;
};
/* A statement of a faulty replica that a correct receiver got. */
struct heard {
    uint64_t view, seq;
    uint8_t digest[PBFT_DIGEST];
};
enum { HEARD_MAX = 256 };
struct sim_replica {
    struct sim *sim;
    int index;
    struct pbft *p;
    struct pbft_key_pair keys;
    int lies; /* bits of enum lie; 0: correct */
    bool up, computed[UNITS_MAX], done[UNITS_MAX];
    uint64_t executed,
        changes[PBFT_REPLICAS_MAX]; /* changes: view of the last VIEW_CHANGE of each */
    struct heard heard[PBFT_REPLICAS_MAX][HEARD_MAX];
    int n_heard[PBFT_REPLICAS_MAX];
};
struct sim {
    uint64_t seed;
    struct rng r;
    double now, faults_end, loss, partition_begin, partition_end;
    int n, f, n_units, side; /* side: bit mask of the replicas on one side of the partition */
    struct sim_replica replicas[PBFT_REPLICAS_MAX],
        client_side; /* client_side: statements that it got */
    struct pbft_group group;
    struct pbft_key_pair client_keys;
    struct pbft_client *client;
    const struct pbft_signer *signer;
    struct pbft_entry units[UNITS_MAX], wrong[UNITS_MAX]; /* signed by the client */
    int votes[UNITS_MAX], replied[UNITS_MAX];             /* bit masks of replicas */
    bool proposed[UNITS_MAX], committed[UNITS_MAX], named[PBFT_REPLICAS_MAX],
        provable[PBFT_REPLICAS_MAX];
    struct {
        bool known;
        uint8_t digest[PBFT_DIGEST];
    } ledger[LEDGER_MAX];
    struct sim_event heap[EVENTS_MAX];
    int n_events;
    uint64_t order;
    struct pbft_actions actions;
};
static int times_provable, times_named, times_lying, view_changes;

static void sim_fail(const struct sim *s, const char *what) {
    fail_msg("history %llu at %.1f s: %s; run with SHOAL_SEED=%llu SHOAL_HISTORIES=1",
             (unsigned long long)s->seed, s->now, what, (unsigned long long)s->seed);
}

static bool chance(struct sim *s, double p) {
    return (double)rng_uniform(&s->r) < p;
}

/* The stand-in for ed25519: a hash under a key that both sides have. */
static void toy_sign(const uint8_t *secret, const void *p, size_t n, uint8_t out[PBFT_SIGNATURE]) {
    uint64_t h = hash_fnv1a(p, n);
    memset(out, 0x5a, PBFT_SIGNATURE);
    for (int i = 0; i < 8; i++) out[i] = (uint8_t)(h >> 8 * i) ^ secret[i];
}

static bool toy_verify(const uint8_t public_key[PBFT_PUBLIC_KEY], const void *p, size_t n,
                       const uint8_t signature[PBFT_SIGNATURE]) {
    uint8_t expected[PBFT_SIGNATURE];
    toy_sign(public_key, p, n, expected);
    return memcmp(expected, signature, PBFT_SIGNATURE) == 0;
}

static const struct pbft_signer toy = {toy_sign, toy_verify};

static void key_pair_make(struct sim *s, struct pbft_key_pair *k, int index) {
    if (s->signer == &pbft_ed25519) {
        pbft_key_pair_make(k);
        return;
    }
    memset(k, index + 1, sizeof *k);
}

/* events */

static void sim_add(struct sim *s, struct sim_event e) {
    assert_true(s->n_events < EVENTS_MAX);
    e.order = s->order++;
    s->heap[s->n_events++] = e;
}

/* Takes the earliest event. */
static struct sim_event sim_next(struct sim *s) {
    int first = 0;
    for (int i = 1; i < s->n_events; i++) {
        const struct sim_event *a = &s->heap[i], *b = &s->heap[first];
        if (a->at < b->at || (a->at <= b->at && a->order < b->order)) first = i;
    }
    struct sim_event e = s->heap[first];
    s->heap[first] = s->heap[--s->n_events];
    return e;
}

static bool is_cut(const struct sim *s, int from, int to) {
    return s->now >= s->partition_begin && s->now < s->partition_end && from != PBFT_CLIENT &&
           to != PBFT_CLIENT && (s->side >> from & 1) != (s->side >> to & 1);
}

/* A message takes 1 to 50 ms; during the faults it may be late, come twice or be lost. */
static void sim_transmit(struct sim *s, int from, int to, const void *data, size_t len,
                         bool changed) {
    bool faults = s->now < s->faults_end;
    int copies = 1;
    if (faults && (chance(s, s->loss) || is_cut(s, from, to))) copies = 0;
    if (faults && copies && chance(s, s->loss)) copies = 2;
    for (int i = 0; i < copies; i++) {
        struct sim_event e = {.kind = SIM_MESSAGE, .from = from, .to = to, .changed = changed};
        e.at = s->now + 0.001 + 0.05 * (double)rng_uniform(&s->r);
        if (faults && chance(s, 0.05)) e.at += 5 * (double)rng_uniform(&s->r);
        e.data = xmalloc(len);
        e.len = len;
        memcpy(e.data, data, len);
        sim_add(s, e);
    }
}

/* faulty messages */

/* The message with another statement or body, signed by the replica. */
static void message_sign(const struct sim_replica *r, struct pbft_statement *st, const void *body,
                         size_t len, bool covers_body, struct buf *out) {
    uint8_t bytes[PBFT_STATEMENT], signature[PBFT_SIGNATURE];
    if (covers_body) pbft_digest(body, len, st->digest);
    pbft_statement_write(st, bytes);
    r->sim->signer->sign(r->keys.secret, bytes, sizeof bytes, signature);
    pbft_message_write(st, body, len, signature, out);
}

/* Sends another statement to odd replicas: another unit, or a digest that nothing has. */
static bool lie_equivocate(struct sim *s, const struct sim_replica *r, int to,
                           const struct pbft_message *m, struct buf *out) {
    struct pbft_statement st = m->s;
    struct buf body = {0};
    bool one = m->s.kind == PBFT_PRE_PREPARE || m->s.kind == PBFT_REPLY, other = false;
    const struct pbft_entry *e = &s->units[rng_below(&s->r, (uint32_t)s->n_units)];
    if (one && (to % 2 || to == PBFT_CLIENT) && e->signature[0] + e->signature[63] &&
        chance(s, 0.5)) {
        pbft_entry_digest(e, st.digest);
        if (m->s.kind == PBFT_PRE_PREPARE) pbft_put_entry(&body, e, true);
        other = true;
    } else if ((m->s.kind == PBFT_COMMIT || m->s.kind == PBFT_CHECKPOINT) && to % 2 &&
               chance(s, 0.3)) {
        st.digest[0] ^= 1;
        other = true;
    }
    if (other) message_sign(r, &st, body.data, body.len, false, out);
    buf_release(&body);
    return other;
}

/* An invalid certificate in a VIEW_CHANGE, one without the prepared entries, or a NEW_VIEW with
 * another plan. */
static bool lie_view_change(struct sim *s, const struct sim_replica *r,
                            const struct pbft_message *m, struct buf *out, bool *provable) {
    static struct pbft_view_change v;
    static struct pbft_new_view n;
    struct pbft_statement st = m->s;
    struct buf body = {0};
    *provable = true;
    if (m->s.kind == PBFT_VIEW_CHANGE && pbft_get_view_change(m, &v) && chance(s, 0.7)) {
        if (v.n > 0 && chance(s, 0.5)) {
            v.n = 0;
            *provable = false;
        } else if (v.n < PBFT_WINDOW) {
            struct pbft_proof *p = &v.prepared[v.n];
            uint64_t seq = v.n > 0 ? v.prepared[v.n - 1].c.seq + 1 : v.stable.seq + 1;
            *p = (struct pbft_proof){.c = {.view = m->s.view - 1, .seq = seq},
                                     .entry = s->wrong[rng_below(&s->r, (uint32_t)s->n_units)]};
            pbft_entry_digest(&p->entry, p->c.digest);
            p->c.n = pbft_quorum(s->n);
            for (int i = 0; i < p->c.n; i++) p->c.replica[i] = (uint8_t)i;
            v.n++;
        } else {
            return false;
        }
        pbft_put_view_change(&body, &v);
    } else if (m->s.kind == PBFT_NEW_VIEW && pbft_get_new_view(m, &n) && m->s.sender == r->index) {
        if (n.n_proposals > 0 && chance(s, 0.5))
            n.n_proposals--;
        else
            n.changes[0] = n.changes[1];
        pbft_put_new_view(&body, &n);
    } else {
        return false;
    }
    message_sign(r, &st, body.data, body.len, true, out);
    buf_release(&body);
    return true;
}

/* A checkpoint with a wrong digest, and states and commits with wrong entries. */
static bool lie_state(struct sim *s, const struct sim_replica *r, const struct pbft_message *m,
                      struct buf *out) {
    static struct pbft_state state;
    struct pbft_statement st = m->s;
    struct pbft_proof proof;
    struct buf body = {0};
    const struct pbft_entry *wrong = &s->wrong[rng_below(&s->r, (uint32_t)s->n_units)];
    bool covers = false;
    if (m->s.kind == PBFT_CHECKPOINT) {
        st.digest[3] ^= 1;
    } else if (m->s.kind == PBFT_STATE && pbft_get_state(m, &state) && state.n > 0) {
        state.entries[rng_below(&s->r, (uint32_t)state.n)] = *wrong;
        pbft_put_state(&body, &state);
        covers = true;
    } else if (m->s.kind == PBFT_COMMITTED && pbft_get_proof(m, &proof)) {
        proof.entry = *wrong;
        pbft_entry_digest(wrong, proof.c.digest);
        memcpy(st.digest, proof.c.digest, PBFT_DIGEST);
        pbft_put_proof(&body, &proof);
    } else {
        return false;
    }
    message_sign(r, &st, body.data, body.len, covers, out);
    buf_release(&body);
    return true;
}

/* The same kind of message in the name of another replica, with another digest. */
static void lie_forge(struct sim *s, const struct sim_replica *r, int to,
                      const struct pbft_message *m) {
    struct pbft_statement st = m->s;
    struct buf out = {0};
    st.sender = (uint8_t)((r->index + 1) % s->n);
    if (m->s.kind != PBFT_COMMIT && m->s.kind != PBFT_CHECKPOINT && m->s.kind != PBFT_REPLY) return;
    st.digest[7] ^= 1;
    if (m->s.kind == PBFT_REPLY) pbft_entry_digest(&s->wrong[0], st.digest);
    message_sign(r, &st, NULL, 0, false, &out);
    sim_transmit(s, r->index, to, out.data, out.len, true);
    buf_release(&out);
}

static void liar_send(struct sim *s, struct sim_replica *r, int to, const uint8_t *data,
                      size_t len) {
    struct pbft_message m;
    struct error err;
    struct buf out = {0};
    bool changed = false, provable = false;
    assert_int_equal(pbft_message_parse(data, len, &m, &err), OK);
    if (r->lies & LIE_SILENCE && chance(s, s->seed % 2 ? 0.8 : 1)) return;
    if (r->lies & LIE_FORGE && chance(s, 0.5)) lie_forge(s, r, to, &m);
    if (r->lies & LIE_EQUIVOCATE) changed = lie_equivocate(s, r, to, &m, &out);
    if (!changed && r->lies & LIE_VIEW_CHANGE) changed = lie_view_change(s, r, &m, &out, &provable);
    if (!changed && r->lies & LIE_STATE && chance(s, 0.5)) changed = lie_state(s, r, &m, &out);
    if (changed)
        sim_transmit(s, r->index, to, out.data, out.len, provable);
    else
        sim_transmit(s, r->index, to, data, len, false);
    buf_release(&out);
}

/* evidence */

/* By the key of a replica: a vote does not have its index. */
static bool statement_is_signed_by(const struct sim *s, const struct pbft_message *m, int replica) {
    uint8_t bytes[PBFT_STATEMENT];
    pbft_statement_write(&m->s, bytes);
    return s->signer->verify(s->group.keys[replica], bytes, sizeof bytes, m->signature);
}

static bool statement_is_signed(const struct sim *s, const struct pbft_message *m) {
    return statement_is_signed_by(s, m, m->s.sender);
}

/* A statement with its signature; a body is not needed. */
static void statement_read(struct sim *s, int replica, const uint8_t *data, size_t len,
                           struct pbft_message *m) {
    static const uint8_t commit = PBFT_COMMIT;
    struct error err;
    uint8_t copy[PBFT_STATEMENT + PBFT_SIGNATURE];
    if (len < sizeof copy) sim_fail(s, "evidence is too short");
    memcpy(copy, data, PBFT_STATEMENT);
    memcpy(copy + PBFT_STATEMENT, data + len - PBFT_SIGNATURE, PBFT_SIGNATURE);
    int kind = copy[PBFT_DIGEST];
    copy[PBFT_DIGEST] = commit; // the parser checks the body of other kinds
    if (pbft_message_parse(copy, sizeof copy, m, &err) != OK) sim_fail(s, "evidence is malformed");
    m->s.kind = (enum pbft_kind)kind;
    m->signature = data + len - PBFT_SIGNATURE;
    if (!statement_is_signed_by(s, m, replica)) sim_fail(s, "evidence is not signed");
}

static void evidence_check(struct sim *s, const struct pbft_action *a) {
    struct pbft_message one, two;
    statement_read(s, a->to, pbft_action_data(&s->actions, a), a->len, &one);
    if (one.s.kind != PBFT_VOTE && one.s.sender != a->to) sim_fail(s, "evidence is of another");
    if (a->fault != PBFT_EQUIVOCATION) return;
    statement_read(s, a->to, pbft_action_other(&s->actions, a), a->other_len, &two);
    if (one.s.sender != two.s.sender ||
        (one.s.kind != PBFT_VIEW_CHANGE && one.s.seq != two.s.seq) ||
        (one.s.kind != PBFT_REPLY && one.s.view != two.s.view) ||
        memcmp(one.s.digest, two.s.digest, PBFT_DIGEST) == 0)
        sim_fail(s, "evidence of equivocation does not conflict");
}

static void fault_check(struct sim *s, const struct pbft_action *a) {
    if (!s->replicas[a->to].lies) sim_fail(s, "a correct replica was named");
    evidence_check(s, a);
    s->named[a->to] = true;
}

/* Records a statement of a faulty replica: two digests for a number are provable. */
static void hear(struct sim *s, struct sim_replica *r, int liar, uint64_t view, uint64_t seq,
                 const uint8_t *digest) {
    for (int i = 0; i < r->n_heard[liar]; i++) {
        const struct heard *h = &r->heard[liar][i];
        if (h->view != view || h->seq != seq) continue;
        if (memcmp(h->digest, digest, PBFT_DIGEST) != 0) s->provable[liar] = true;
        return;
    }
    if (r->n_heard[liar] == HEARD_MAX) return;
    struct heard *h = &r->heard[liar][r->n_heard[liar]++];
    *h = (struct heard){.view = view, .seq = seq};
    memcpy(h->digest, digest, PBFT_DIGEST);
}

static int unit_of(const struct sim *s, const struct pbft_entry *v, const uint8_t *digest) {
    for (int i = 0; i < s->n_units; i++) {
        uint8_t d[PBFT_DIGEST];
        pbft_entry_digest(&v[i], d);
        if (memcmp(d, digest, PBFT_DIGEST) == 0) return i;
    }
    return -1;
}

/* Notes whether the message that a correct replica receives next proves a fault. */
static void provable_note(struct sim *s, struct sim_replica *r, const struct sim_event *e) {
    enum { CHECKPOINT_VIEW = 1 << 30 }; // views of histories are smaller
    struct pbft_message m;
    struct error err;
    assert_int_equal(pbft_message_parse(e->data, e->len, &m, &err), OK);
    if (!statement_is_signed(s, &m)) return;
    int primary = (int)(m.s.view % (uint64_t)s->n), sender = m.s.sender;
    bool current = pbft_is_in_view(r->p) && m.s.view == pbft_view(r->p),
         in_window = m.s.seq > pbft_stable(r->p) && m.s.seq <= pbft_stable(r->p) + PBFT_WINDOW;
    if (m.s.kind == PBFT_PREPARE && current && in_window && s->replicas[primary].lies &&
        !s->replicas[sender].lies && primary != r->index)
        hear(s, r, primary, m.s.view, m.s.seq, m.s.digest);
    if (!s->replicas[sender].lies) return;
    if (((m.s.kind == PBFT_PRE_PREPARE && sender == primary) || m.s.kind == PBFT_COMMIT) &&
        current && in_window)
        hear(s, r, sender, m.s.view, m.s.seq, m.s.digest);
    if (m.s.kind == PBFT_CHECKPOINT && in_window)
        hear(s, r, sender, CHECKPOINT_VIEW, m.s.seq, m.s.digest);
    if (m.s.kind == PBFT_VIEW_CHANGE && m.s.view >= pbft_view(r->p) &&
        m.s.view >= r->changes[sender]) {
        if (e->changed) s->provable[sender] = true;
        r->changes[sender] = m.s.view;
    }
    if (m.s.kind == PBFT_NEW_VIEW && e->changed && sender == primary &&
        (m.s.view > pbft_view(r->p) || (m.s.view == pbft_view(r->p) && !pbft_is_in_view(r->p))))
        s->provable[sender] = true;
}

/* actions */

static enum pbft_verdict validate(void *ctx, const uint8_t *entry, size_t len) {
    const struct sim_replica *r = ctx;
    const struct sim *s = r->sim;
    for (int i = 0; i < s->n_units; i++) {
        if (memcmp(entry, s->units[i].bytes, PBFT_ENTRY_KEY) != 0) continue;
        if (!r->computed[i]) return r->lies & LIE_VALUE ? PBFT_AGREES : PBFT_UNKNOWN;
        bool right = len == s->units[i].len && memcmp(entry, s->units[i].bytes, len) == 0;
        return right != ((r->lies & LIE_VALUE) != 0) ? PBFT_AGREES : PBFT_DIFFERS;
    }
    return PBFT_DIFFERS;
}

static void executed_check(struct sim *s, struct sim_replica *r) {
    for (; r->executed < pbft_executed(r->p); r->executed++) {
        uint64_t seq = r->executed + 1;
        uint8_t digest[PBFT_DIGEST];
        pbft_entry_digest(pbft_ledger_entry(r->p, seq), digest);
        assert_true(seq < LEDGER_MAX);
        if (s->ledger[seq].known && memcmp(s->ledger[seq].digest, digest, PBFT_DIGEST) != 0)
            sim_fail(s, "two correct replicas executed different entries");
        s->ledger[seq].known = true;
        memcpy(s->ledger[seq].digest, digest, PBFT_DIGEST);
    }
    if (pbft_stable(r->p) > pbft_executed(r->p) ||
        pbft_executed(r->p) - pbft_stable(r->p) > PBFT_WINDOW)
        sim_fail(s, "a replica is outside its window");
}

/* Checks an execution by a correct replica or the client; `done` has the earlier ones. */
static void execute_check(struct sim *s, const struct pbft_action *a, bool *done) {
    uint8_t digest[PBFT_DIGEST];
    pbft_digest(pbft_action_data(&s->actions, a), a->len, digest);
    int unit = unit_of(s, s->units, digest);
    if (unit < 0) sim_fail(s, "a wrong value was committed");
    if (done[unit]) sim_fail(s, "a unit was executed twice");
    done[unit] = true;
    if (done == s->committed &&
        (!s->ledger[a->seq].known || memcmp(s->ledger[a->seq].digest, digest, PBFT_DIGEST) != 0))
        sim_fail(s, "the client believes what no correct replica has executed");
}

/* Sends the messages of a replica, or of the client. */
static void sim_send(struct sim *s, int from, const struct pbft_action *a) {
    for (int to = 0; to < s->n; to++) {
        if (to == from || (a->to != PBFT_ALL && a->to != to)) continue;
        if (from != PBFT_CLIENT && s->replicas[from].lies)
            liar_send(s, &s->replicas[from], to, pbft_action_data(&s->actions, a), a->len);
        else
            sim_transmit(s, from, to, pbft_action_data(&s->actions, a), a->len, false);
    }
    if (a->to != PBFT_CLIENT) return;
    if (s->replicas[from].lies)
        liar_send(s, &s->replicas[from], PBFT_CLIENT, pbft_action_data(&s->actions, a), a->len);
    else
        sim_transmit(s, from, PBFT_CLIENT, pbft_action_data(&s->actions, a), a->len, false);
}

static void actions_clear(struct sim *s) {
    s->actions.n = 0;
    s->actions.bytes.len = 0;
}

static void replica_step(struct sim *s, struct sim_replica *r, struct pbft_event e) {
    uint64_t view = pbft_view(r->p);
    e.now = s->now;
    pbft_step(r->p, &e, &s->actions);
    for (int i = 0; i < s->actions.n; i++) {
        const struct pbft_action *a = &s->actions.v[i];
        if (a->kind == PBFT_SEND) sim_send(s, r->index, a);
        if (r->lies) continue;
        if (a->kind == PBFT_EXECUTE) execute_check(s, a, r->done);
        if (a->kind == PBFT_FAULT) fault_check(s, a);
    }
    actions_clear(s);
    view_changes += pbft_view(r->p) != view;
    if (!r->lies) executed_check(s, r);
}

static void client_step(struct sim *s, struct pbft_client_event e) {
    e.now = s->now;
    pbft_client_step(s->client, &e, &s->actions);
    for (int i = 0; i < s->actions.n; i++) {
        const struct pbft_action *a = &s->actions.v[i];
        if (a->kind == PBFT_SEND) sim_send(s, PBFT_CLIENT, a);
        if (a->kind == PBFT_EXECUTE) execute_check(s, a, s->committed);
        if (a->kind == PBFT_FAULT) fault_check(s, a);
    }
    actions_clear(s);
}

/* running */

/* The client proposes an entry when f+1 votes are equal. */
static void vote_received(struct sim *s, const struct sim_event *e) {
    struct pbft_entry entry;
    if (!pbft_vote_read(s->signer, s->group.keys[e->from], e->data, e->len, &entry)) return;
    uint8_t digest[PBFT_DIGEST];
    pbft_entry_digest(&entry, digest);
    int unit = unit_of(s, s->units, digest), votes = 0;
    client_step(s, (struct pbft_client_event){
                       .kind = PBFT_CLIENT_VOTE, .from = e->from, .data = e->data, .len = e->len});
    if (unit < 0) {
        s->provable[e->from] = true; // all units are committed at the end
        return;
    }
    s->votes[unit] |= 1 << e->from;
    for (int i = 0; i < s->n; i++) votes += s->votes[unit] >> i & 1;
    if (votes <= s->f || s->proposed[unit]) return;
    s->proposed[unit] = true;
    client_step(s, (struct pbft_client_event){.kind = PBFT_CLIENT_PROPOSE,
                                              .data = s->units[unit].bytes,
                                              .len = s->units[unit].len});
}

static void client_received(struct sim *s, const struct sim_event *e) {
    struct pbft_message m;
    struct error err;
    assert_int_equal(pbft_message_parse(e->data, e->len, &m, &err), OK);
    if (m.s.kind == PBFT_VOTE) {
        vote_received(s, e);
        return;
    }
    int unit = unit_of(s, s->units, m.s.digest);
    if (statement_is_signed(s, &m) && s->replicas[m.s.sender].lies && unit >= 0 &&
        s->proposed[unit] && !(s->replied[unit] >> m.s.sender & 1)) {
        s->replied[unit] |= 1 << m.s.sender;
        hear(s, &s->client_side, m.s.sender, 0, m.s.seq, m.s.digest);
    }
    client_step(s, (struct pbft_client_event){
                       .kind = PBFT_CLIENT_RECEIVED, .data = e->data, .len = e->len});
}

static void vote_send(struct sim *s, const struct sim_replica *r, int unit) {
    const struct pbft_entry *e = r->lies & LIE_VALUE ? &s->wrong[unit] : &s->units[unit];
    struct buf out = {0};
    pbft_vote_write(s->signer, r->keys.secret, e, &out);
    sim_transmit(s, r->index, PBFT_CLIENT, out.data, out.len, false);
    buf_release(&out);
}

/* A result is computed; its vote is sent until the unit is proposed. A faulty client would sign the
 * wrong result too. */
static void computed(struct sim *s, const struct sim_event *e) {
    struct sim_replica *r = &s->replicas[e->to];
    struct sim_event again = *e;
    again.at = s->now + 2;
    if (!s->committed[e->unit]) sim_add(s, again);
    if (!r->up) return;
    bool first = !r->computed[e->unit];
    r->computed[e->unit] = true;
    if (!s->committed[e->unit]) vote_send(s, r, e->unit);
    if (first) replica_step(s, r, (struct pbft_event){.kind = PBFT_COMPUTED});
    if (!first || !(r->lies & LIE_VALUE)) return;
    struct pbft_statement st = {.kind = PBFT_REQUEST, .sender = PBFT_CLIENT};
    struct buf body = {0}, out = {0};
    memcpy(st.group, s->group.id, PBFT_DIGEST);
    pbft_entry_digest(&s->wrong[e->unit], st.digest);
    pbft_put_entry(&body, &s->wrong[e->unit], false);
    pbft_message_write(&st, body.data, body.len, s->wrong[e->unit].signature, &out);
    for (int to = 0; to < s->n; to++) sim_transmit(s, PBFT_CLIENT, to, out.data, out.len, false);
    buf_release(&body);
    buf_release(&out);
}

static void replica_begin(struct sim *s, int index) {
    struct sim_replica *r = &s->replicas[index];
    pbft_free(r->p);
    r->p = pbft_new(&(struct pbft_options){.group = s->group,
                                           .self = index,
                                           .secret = r->keys.secret,
                                           .signer = s->signer,
                                           .timeout = 2,
                                           .validate = validate,
                                           .ctx = r});
}

static void tick(struct sim *s, const struct sim_event *e) {
    struct sim_event next = *e;
    next.at = s->now + 0.5;
    sim_add(s, next);
    if (e->to == PBFT_CLIENT) {
        client_step(s, (struct pbft_client_event){.kind = PBFT_CLIENT_TICK});
        return;
    }
    struct sim_replica *r = &s->replicas[e->to];
    if (r->lies & LIE_AMNESIA && chance(s, 0.02)) replica_begin(s, e->to);
    if (r->up) replica_step(s, r, (struct pbft_event){.kind = PBFT_TICK});
}

static void sim_event_run(struct sim *s, struct sim_event *e) {
    struct sim_replica *r = e->to == PBFT_CLIENT ? NULL : &s->replicas[e->to];
    switch (e->kind) {
    case SIM_MESSAGE:
        if (!r) client_received(s, e);
        if (r && r->up) {
            if (!r->lies && e->from != PBFT_CLIENT) provable_note(s, r, e);
            replica_step(
                s, r, (struct pbft_event){.kind = PBFT_RECEIVED, .data = e->data, .len = e->len});
        }
        free(e->data);
        break;
    case SIM_COMPUTED:
        computed(s, e);
        break;
    case SIM_TICK:
        tick(s, e);
        break;
    case SIM_STOP:
        r->up = false;
        break;
    case SIM_GO:
        r->up = true;
    }
}

static void units_make(struct sim *s) {
    for (int i = 0; i < s->n_units; i++) {
        char text[32];
        uint8_t bytes[2 * PBFT_DIGEST];
        snprintf(text, sizeof text, "unit %d", i);
        pbft_digest(text, strlen(text), bytes);
        for (int wrong = 0; wrong < 2; wrong++) {
            struct pbft_entry *e = wrong ? &s->wrong[i] : &s->units[i];
            uint8_t statement[PBFT_STATEMENT];
            struct pbft_statement st = {.kind = PBFT_REQUEST, .sender = PBFT_CLIENT};
            snprintf(text, sizeof text, "%s %d", wrong ? "wrong" : "right", i);
            pbft_digest(text, strlen(text), bytes + PBFT_DIGEST);
            pbft_entry_set(e, bytes, sizeof bytes);
            memcpy(st.group, s->group.id, PBFT_DIGEST);
            pbft_entry_digest(e, st.digest);
            pbft_statement_write(&st, statement);
            s->signer->sign(s->client_keys.secret, statement, sizeof statement, e->signature);
        }
    }
}

static void replicas_make(struct sim *s) {
    key_pair_make(s, &s->client_keys, 200);
    memcpy(s->group.client, s->client_keys.public_key, PBFT_PUBLIC_KEY);
    s->group.n = s->n;
    for (int i = 0; i < s->n; i++) {
        s->replicas[i].sim = s;
        s->replicas[i].index = i;
        s->replicas[i].up = true;
        key_pair_make(s, &s->replicas[i].keys, i);
        memcpy(s->group.keys[i], s->replicas[i].keys.public_key, PBFT_PUBLIC_KEY);
    }
    pbft_group_set_id(&s->group, s->seed);
    for (int i = 0, liars = 0; i < s->n && liars < s->f; i++) {
        int first = (int)(s->seed % (uint64_t)s->n), at = (first + i) % s->n;
        if (!chance(s, 0.9)) continue;
        s->replicas[at].lies = 1 << rng_below(&s->r, LIES);
        if (chance(s, 0.3)) s->replicas[at].lies |= 1 << rng_below(&s->r, LIES);
        liars++;
    }
    for (int i = 0; i < s->n; i++) replica_begin(s, i);
    s->client = pbft_client_new(&(struct pbft_client_options){
        .group = s->group, .secret = s->client_keys.secret, .signer = s->signer, .retry = 2});
}

static void sim_begin(struct sim *s, uint64_t seed, int n, const struct pbft_signer *signer) {
    *s = (struct sim){.seed = seed, .r = rng_make(seed, RNG_TEST, 28, 0), .signer = signer, .n = n};
    s->f = pbft_faulty_max(n);
    s->n_units = 1 + (int)rng_below(&s->r, UNITS_MAX);
    s->faults_end = chance(s, 0.2) ? 0 : 25 * (double)rng_uniform(&s->r);
    s->loss = 0.3 * (double)rng_uniform(&s->r) * (double)rng_uniform(&s->r);
    s->partition_begin = s->faults_end * (double)rng_uniform(&s->r);
    s->partition_end = s->partition_begin + 10 * (double)rng_uniform(&s->r);
    s->side = (int)rng_below(&s->r, 1u << n);
    replicas_make(s);
    units_make(s);
    for (int i = 0; i < s->n; i++) {
        sim_add(s, (struct sim_event){
                       .at = 0.5 * (double)rng_uniform(&s->r), .kind = SIM_TICK, .to = i});
        for (int u = 0; u < s->n_units; u++)
            sim_add(s, (struct sim_event){.at = 0.5 * u + 3 * (double)rng_uniform(&s->r),
                                          .kind = SIM_COMPUTED,
                                          .to = i,
                                          .unit = u});
        if (!chance(s, 0.5)) continue;
        double stop = s->faults_end * (double)rng_uniform(&s->r);
        sim_add(s, (struct sim_event){.at = stop, .kind = SIM_STOP, .to = i});
        sim_add(s,
                (struct sim_event){.at = stop + (s->faults_end - stop) * (double)rng_uniform(&s->r),
                                   .kind = SIM_GO,
                                   .to = i});
    }
    sim_add(s, (struct sim_event){.kind = SIM_TICK, .to = PBFT_CLIENT});
}

/* All units are committed, and all correct replicas have executed the same number. */
static bool sim_is_done(const struct sim *s) {
    uint64_t first = 0;
    if (pbft_client_unfinished(s->client)) return false;
    for (int i = 0; i < s->n_units; i++)
        if (!s->committed[i]) return false;
    for (int i = 0; i < s->n; i++) {
        if (s->replicas[i].lies) continue;
        if (first && pbft_executed(s->replicas[i].p) != first) return false;
        first = pbft_executed(s->replicas[i].p);
    }
    return s->now >= s->faults_end;
}

static void sim_end(struct sim *s) {
    for (int i = 0; i < s->n; i++) {
        times_lying += s->replicas[i].lies != 0;
        times_provable += s->provable[i];
        times_named += s->named[i];
        if (s->provable[i] && !s->named[i]) sim_fail(s, "a faulty replica was not named");
        pbft_free(s->replicas[i].p);
    }
    for (int i = 0; i < s->n_events; i++)
        if (s->heap[i].kind == SIM_MESSAGE) free(s->heap[i].data);
    pbft_client_free(s->client);
    pbft_actions_release(&s->actions);
}

static void sim_run(uint64_t seed, int n, const struct pbft_signer *signer) {
    static struct sim s;
    sim_begin(&s, seed, n, signer);
    while (!sim_is_done(&s)) {
        struct sim_event e = sim_next(&s);
        s.now = MAX(s.now, e.at);
        sim_event_run(&s, &e);
        if (s.now > s.faults_end + 2000) sim_fail(&s, "a unit is not committed");
    }
    sim_end(&s);
}

static void histories_end_well(void **state) {
    const char *count = getenv("SHOAL_HISTORIES"), *first = getenv("SHOAL_SEED");
    uint64_t n = count ? strtoull(count, NULL, 10) : 1000,
             seed = first ? strtoull(first, NULL, 10) : 1;
    (void)state;
    for (uint64_t i = 0; i < n; i++) sim_run(seed + i, (seed + i) % 8 == 0 ? 7 : 4, &toy);
    if (getenv("SHOAL_PBFT_COUNTS"))
        print_message("%d faulty replicas, %d provably so, %d named, %d view changes\n",
                      times_lying, times_provable, times_named, view_changes);
}

static void histories_with_ed25519_end_well(void **state) {
    (void)state;
    for (uint64_t i = 1; i <= 4; i++) sim_run(i, 4, &pbft_ed25519);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(histories_end_well),
        cmocka_unit_test(histories_with_ed25519_end_well),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
