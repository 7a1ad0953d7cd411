/*
 * pbft_view: view changes (pbft.h).
 *
 * A replica leaves its view with a VIEW_CHANGE message, which has its stable checkpoint and a
 * certificate for each entry that it has prepared since. The next primary collects a quorum of them
 * in a NEW_VIEW. These messages alone determine the entries that it must propose: for each
 * number up to the highest prepared one the entry that was prepared in the newest view, or else the
 * null entry. Every replica computes this plan itself and refuses a NEW_VIEW with another one.
 *
 *            timeout, or f+1 others, or the primary is named
 *   in view -------------------------------------------------> changes to the next view
 *      ^                                                          |          | timeout, once a
 *      |             NEW_VIEW of a quorum                         |          | quorum takes part
 *      +----------------------------------------------------------+<---------+
 */
#include "cluster/pbft_internal.h"

#include <string.h>

/* The result of a quorum of VIEW_CHANGE messages: entries for min + 1 to min + n. */
struct plan {
    struct pbft_certificate stable; /* the newest checkpoint, at min */
    uint64_t min;
    int n;
    struct pbft_proof entries[PBFT_WINDOW]; /* c.n 0: the null entry */
};

int pbft_changes_count(const struct pbft *p, uint64_t view) {
    int n = 0;
    for (int i = 0; i < p->o.group.n; i++) n += p->changes[i].view >= view;
    return n;
}

/* VIEW_CHANGE messages */

static bool prepared_is_valid(const struct pbft *p, const struct pbft_message *m,
                              const struct pbft_proof *proof) {
    return proof->c.seq > m->s.seq && proof->c.seq - m->s.seq <= PBFT_WINDOW &&
           proof->c.view < m->s.view && pbft_certificate_is_valid(p, PBFT_PREPARE, &proof->c) &&
           pbft_entry_is_signed(p, &proof->entry);
}

static bool stable_is_valid(const struct pbft *p, const struct pbft_certificate *c) {
    static const uint8_t none[PBFT_DIGEST];
    if (c->seq == 0) return c->n == 0 && !c->view && memcmp(c->digest, none, sizeof none) == 0;
    return c->seq % PBFT_INTERVAL == 0 && c->view == 0 &&
           pbft_certificate_is_valid(p, PBFT_CHECKPOINT, c);
}

static bool change_is_valid(const struct pbft *p, const struct pbft_message *m,
                            struct pbft_view_change *out) {
    if (!pbft_get_view_change(m, out) || !stable_is_valid(p, &out->stable)) return false;
    for (int i = 0; i < out->n; i++)
        if (!prepared_is_valid(p, m, &out->prepared[i])) return false;
    return true;
}

static void change_store(struct pbft *p, int replica, uint64_t view, const void *message,
                         size_t len) {
    struct change *c = &p->changes[replica];
    c->view = view;
    c->message.len = 0;
    buf_add(&c->message, message, len);
}

/* The bytes of a message that this replica has received. */
static const uint8_t *message_bytes(const struct pbft_message *m, size_t *len) {
    *len = PBFT_STATEMENT + m->body_len + PBFT_SIGNATURE;
    return m->body - PBFT_STATEMENT;
}

static void name_invalid(struct pbft *p, const struct pbft_message *m) {
    size_t len;
    const uint8_t *bytes = message_bytes(m, &len);
    pbft_name(p, m->s.sender, PBFT_INVALID, bytes, len, NULL, 0);
}

static struct signed_statement change_statement(const struct change *c) {
    struct pbft_message m;
    struct error err;
    CHECK(pbft_message_parse((const uint8_t *)c->message.data, c->message.len, &m, &err) == OK);
    struct signed_statement s = {.s = m.s};
    memcpy(s.signature, m.signature, PBFT_SIGNATURE);
    return s;
}

/* the plan of a new view */

static void plan_add(struct plan *plan, const struct pbft_view_change *v) {
    for (int i = 0; i < v->n; i++) {
        const struct pbft_proof *proof = &v->prepared[i];
        if (proof->c.seq <= plan->min) continue;
        int at = (int)(proof->c.seq - plan->min) - 1;
        plan->n = MAX(plan->n, at + 1);
        if (!plan->entries[at].c.n || plan->entries[at].c.view < proof->c.view)
            plan->entries[at] = *proof;
    }
}

/* All have a window after their own checkpoint, so none has a number beyond that of the newest. */
static void plan_make(struct plan *plan, const struct pbft_view_change *v, int n) {
    *plan = (struct plan){0};
    for (int i = 0; i < n; i++)
        if (v[i].stable.seq > plan->min) {
            plan->stable = v[i].stable;
            plan->min = v[i].stable.seq;
        }
    for (int i = 0; i < n; i++) plan_add(plan, &v[i]);
}

static struct pbft_statement plan_statement(const struct pbft *p, const struct plan *plan,
                                            uint64_t view, int i) {
    struct pbft_statement s = {.kind = PBFT_PRE_PREPARE,
                               .sender = (uint8_t)pbft_primary(p, view),
                               .view = view,
                               .seq = plan->min + 1 + (uint64_t)i};
    memcpy(s.group, p->o.group.id, PBFT_DIGEST);
    pbft_entry_digest(&plan->entries[i].entry, s.digest);
    return s;
}

/* The replica is in the view: it proposes or prepares the plan. */
static void view_enter(struct pbft *p, uint64_t view, const struct plan *plan,
                       uint8_t (*proposals)[PBFT_SIGNATURE]) {
    p->view = view;
    p->in_view = true;
    p->deadline = 0;
    p->next = plan->min + (uint64_t)plan->n + 1;
    if (plan->min > p->stable.seq && p->ledger.n >= plan->min) pbft_stable_set(p, &plan->stable);
    for (int i = 0; i < plan->n && p->in_view; i++) {
        const struct pbft_statement st = plan_statement(p, plan, view, i);
        struct slot *s = pbft_slot(p, st.seq);
        if (!s) continue;
        pbft_said(p, s, &st, proposals[i]);
        pbft_slot_propose(p, s, &plan->entries[i].entry, proposals[i]);
        pbft_slot_accept(p, s);
    }
}

/* NEW_VIEW messages */

/* The messages of a NEW_VIEW; false: they are not valid VIEW_CHANGE messages of a quorum. */
static bool new_view_changes(const struct pbft *p, const struct pbft_new_view *v, uint64_t view,
                             struct pbft_view_change *out) {
    bool seen[PBFT_REPLICAS_MAX] = {false};
    if (v->n_changes != p->quorum) return false;
    for (int i = 0; i < v->n_changes; i++) {
        struct pbft_message m;
        struct error err;
        if (pbft_message_parse(v->changes[i].data, v->changes[i].len, &m, &err) != OK ||
            m.s.kind != PBFT_VIEW_CHANGE || m.s.view != view || m.s.sender >= p->o.group.n ||
            seen[m.s.sender] || memcmp(m.s.group, p->o.group.id, PBFT_DIGEST) != 0 ||
            !pbft_is_signed(p, &m.s, m.signature) || !change_is_valid(p, &m, &out[i]))
            return false;
        seen[m.s.sender] = true;
    }
    return true;
}

static bool proposals_are_right(const struct pbft *p, const struct pbft_new_view *v,
                                const struct plan *plan, uint64_t view) {
    if (v->n_proposals != plan->n) return false;
    for (int i = 0; i < plan->n; i++) {
        const struct pbft_statement s = plan_statement(p, plan, view, i);
        if (!pbft_is_signed(p, &s, v->proposals[i])) return false;
    }
    return true;
}

void pbft_new_view(struct pbft *p, const struct pbft_message *m) {
    struct pbft_view_change changes[PBFT_QUORUM_MAX];
    struct pbft_new_view v;
    struct plan plan;
    size_t len;
    if (m->s.view < p->view || (m->s.view == p->view && p->in_view) || m->s.view == 0 ||
        m->s.sender != pbft_primary(p, m->s.view) || !pbft_get_new_view(m, &v))
        return;
    bool valid = new_view_changes(p, &v, m->s.view, changes);
    if (valid) {
        plan_make(&plan, changes, v.n_changes);
        valid = proposals_are_right(p, &v, &plan, m->s.view);
    }
    if (!valid) {
        name_invalid(p, m);
        return;
    }
    const uint8_t *bytes = message_bytes(m, &len);
    p->new_view.len = 0;
    buf_add(&p->new_view, bytes, len);
    view_enter(p, m->s.view, &plan, v.proposals);
}

/* The primary of the new view begins it. */
static void new_view_make(struct pbft *p) {
    struct pbft_view_change changes[PBFT_QUORUM_MAX];
    struct pbft_new_view v = {0};
    struct plan plan;
    struct buf body = {0};
    uint8_t digest[PBFT_DIGEST];
    for (int i = 0; i < p->o.group.n && v.n_changes < p->quorum; i++) {
        const struct change *c = &p->changes[i];
        struct pbft_message m;
        struct error err;
        if (c->view != p->view) continue;
        CHECK(pbft_message_parse((const uint8_t *)c->message.data, c->message.len, &m, &err) == OK);
        CHECK(pbft_get_view_change(&m, &changes[v.n_changes]));
        v.changes[v.n_changes].data = (const uint8_t *)c->message.data;
        v.changes[v.n_changes++].len = c->message.len;
    }
    if (v.n_changes < p->quorum) return;
    plan_make(&plan, changes, v.n_changes);
    v.n_proposals = plan.n;
    for (int i = 0; i < plan.n; i++) {
        const struct pbft_statement st = plan_statement(p, &plan, p->view, i);
        const struct signed_statement s = pbft_sign(p, st.kind, st.view, st.seq, st.digest);
        memcpy(v.proposals[i], s.signature, PBFT_SIGNATURE);
    }
    pbft_put_new_view(&body, &v);
    pbft_digest(body.data, body.len, digest);
    const struct signed_statement s = pbft_sign(p, PBFT_NEW_VIEW, p->view, 0, digest);
    p->new_view.len = 0;
    pbft_message_write(&s.s, body.data, body.len, s.signature, &p->new_view);
    pbft_send_bytes(p, PBFT_ALL, &p->new_view);
    buf_release(&body);
    view_enter(p, p->view, &plan, v.proposals);
}

/* leaving a view */

/* f+1 replicas that have left for later views include a correct one: this replica follows to the
 * earliest of these views. */
static void change_join(struct pbft *p) {
    uint64_t first = UINT64_MAX;
    if (pbft_changes_count(p, p->view + 1) <= p->faulty) return;
    for (int i = 0; i < p->o.group.n; i++)
        if (p->changes[i].view > p->view) first = MIN(first, p->changes[i].view);
    pbft_view_change_start(p, first);
}

static void change_advance(struct pbft *p) {
    change_join(p);
    if (!p->in_view && p->o.self == pbft_primary(p, p->view)) new_view_make(p);
}

void pbft_view_change_start(struct pbft *p, uint64_t view) {
    struct pbft_view_change v = {.stable = p->stable};
    struct buf body = {0}, message = {0};
    uint8_t digest[PBFT_DIGEST];
    p->view = view;
    p->in_view = false;
    p->attempts++;
    p->deadline = 0;
    for (uint64_t seq = p->stable.seq + 1; seq <= p->stable.seq + PBFT_WINDOW; seq++) {
        const struct slot *s = pbft_slot(p, seq);
        if (s->prepared.c.n) v.prepared[v.n++] = s->prepared;
    }
    pbft_put_view_change(&body, &v);
    pbft_digest(body.data, body.len, digest);
    const struct signed_statement s = pbft_sign(p, PBFT_VIEW_CHANGE, view, p->stable.seq, digest);
    pbft_message_write(&s.s, body.data, body.len, s.signature, &message);
    change_store(p, p->o.self, view, message.data, message.len);
    pbft_send_bytes(p, PBFT_ALL, &message);
    buf_release(&body);
    buf_release(&message);
    change_advance(p);
}

void pbft_view_change(struct pbft *p, const struct pbft_message *m) {
    struct change *c = &p->changes[m->s.sender];
    struct pbft_view_change v;
    size_t len;
    if (m->s.view < p->view || m->s.view < c->view || m->s.view == 0) return;
    if (m->s.view == c->view) {
        const struct signed_statement before = change_statement(c);
        struct signed_statement now = {.s = m->s};
        memcpy(now.signature, m->signature, PBFT_SIGNATURE);
        if (memcmp(before.s.digest, now.s.digest, PBFT_DIGEST) != 0)
            pbft_name_equivocation(p, &before, &now);
        return;
    }
    if (!change_is_valid(p, m, &v)) {
        name_invalid(p, m);
        return;
    }
    const uint8_t *bytes = message_bytes(m, &len);
    change_store(p, m->s.sender, m->s.view, bytes, len);
    change_advance(p);
}
