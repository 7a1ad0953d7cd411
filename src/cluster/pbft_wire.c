/*
 * pbft_wire: see pbft_wire.h. Numbers are little-endian and of fixed size, so a value has one
 * encoding; lists are in ascending order.
 */
#include "cluster/pbft_wire.h"

#include <sodium.h>
#include <string.h>

static const char *const kind_names[PBFT_KINDS] = {
    [0] = "none",
    [PBFT_VOTE] = "vote",
    [PBFT_REQUEST] = "request",
    [PBFT_PRE_PREPARE] = "pre-prepare",
    [PBFT_PREPARE] = "prepare",
    [PBFT_COMMIT] = "commit",
    [PBFT_REPLY] = "reply",
    [PBFT_CHECKPOINT] = "checkpoint",
    [PBFT_STATUS] = "status",
    [PBFT_COMMITTED] = "committed",
    [PBFT_STATE] = "state",
    [PBFT_VIEW_CHANGE] = "view-change",
    [PBFT_NEW_VIEW] = "new-view",
};

static const uint8_t zero[PBFT_SIGNATURE];

void pbft_digest(const void *p, size_t n, uint8_t out[PBFT_DIGEST]) {
    crypto_hash_sha256(out, p, n);
}

void pbft_entry_digest(const struct pbft_entry *e, uint8_t out[PBFT_DIGEST]) {
    if (e->len)
        pbft_digest(e->bytes, e->len, out);
    else
        memset(out, 0, PBFT_DIGEST);
}

void pbft_entry_set(struct pbft_entry *e, const void *bytes, size_t len) {
    CHECK(len >= PBFT_ENTRY_KEY && len <= PBFT_ENTRY_MAX);
    *e = (struct pbft_entry){.len = (uint16_t)len};
    memcpy(e->bytes, bytes, len);
}

/* writing */

static void put_number(struct buf *out, uint64_t v, int n) {
    uint8_t bytes[8];
    for (int i = 0; i < n; i++) bytes[i] = (uint8_t)(v >> 8 * i);
    buf_add(out, bytes, (size_t)n);
}

static void number_write(uint8_t *p, uint64_t v) {
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(v >> 8 * i);
}

void pbft_statement_write(const struct pbft_statement *s, uint8_t out[PBFT_STATEMENT]) {
    memcpy(out, s->group, PBFT_DIGEST);
    out[PBFT_DIGEST] = (uint8_t)s->kind;
    out[PBFT_DIGEST + 1] = s->sender;
    number_write(out + PBFT_DIGEST + 2, s->view);
    number_write(out + PBFT_DIGEST + 10, s->seq);
    memcpy(out + PBFT_DIGEST + 18, s->digest, PBFT_DIGEST);
}

void pbft_message_write(const struct pbft_statement *s, const void *body, size_t len,
                        const uint8_t signature[PBFT_SIGNATURE], struct buf *out) {
    uint8_t statement[PBFT_STATEMENT];
    pbft_statement_write(s, statement);
    buf_add(out, statement, sizeof statement);
    if (len) buf_add(out, body, len);
    buf_add(out, signature, PBFT_SIGNATURE);
}

void pbft_put_entry(struct buf *out, const struct pbft_entry *e, bool with_signature) {
    put_number(out, e->len, 2);
    if (e->len) buf_add(out, e->bytes, e->len);
    if (with_signature) buf_add(out, e->len ? e->signature : zero, PBFT_SIGNATURE);
}

void pbft_put_status(struct buf *out, uint64_t executed, bool in_view) {
    put_number(out, executed, 8);
    put_number(out, in_view, 1);
}

static void put_certificate(struct buf *out, const struct pbft_certificate *c) {
    put_number(out, c->view, 8);
    put_number(out, c->seq, 8);
    buf_add(out, c->digest, PBFT_DIGEST);
    put_number(out, (uint64_t)c->n, 1);
    for (int i = 0; i < c->n; i++) {
        put_number(out, c->replica[i], 1);
        buf_add(out, c->signature[i], PBFT_SIGNATURE);
    }
}

void pbft_put_proof(struct buf *out, const struct pbft_proof *p) {
    put_certificate(out, &p->c);
    pbft_put_entry(out, &p->entry, true);
}

void pbft_put_state(struct buf *out, const struct pbft_state *s) {
    put_certificate(out, &s->stable);
    put_number(out, s->first, 8);
    put_number(out, (uint64_t)s->n, 1);
    for (int i = 0; i < s->n; i++) pbft_put_entry(out, &s->entries[i], true);
}

void pbft_put_view_change(struct buf *out, const struct pbft_view_change *v) {
    put_certificate(out, &v->stable);
    put_number(out, (uint64_t)v->n, 1);
    for (int i = 0; i < v->n; i++) pbft_put_proof(out, &v->prepared[i]);
}

void pbft_put_new_view(struct buf *out, const struct pbft_new_view *v) {
    put_number(out, (uint64_t)v->n_changes, 1);
    for (int i = 0; i < v->n_changes; i++) {
        put_number(out, v->changes[i].len, 4);
        buf_add(out, v->changes[i].data, v->changes[i].len);
    }
    put_number(out, (uint64_t)v->n_proposals, 1);
    for (int i = 0; i < v->n_proposals; i++) buf_add(out, v->proposals[i], PBFT_SIGNATURE);
}

/* reading */

/* The bytes that are left; `bad` is set by the first read beyond them. */
struct reader {
    const uint8_t *p;
    size_t len;
    bool bad;
};

static const uint8_t *get_bytes(struct reader *r, size_t n) {
    if (n > r->len) {
        r->bad = true;
        return NULL;
    }
    r->p += n;
    r->len -= n;
    return r->p - n;
}

static uint64_t get_number(struct reader *r, int n) {
    const uint8_t *p = get_bytes(r, (size_t)n);
    uint64_t v = 0;
    for (int i = 0; p && i < n; i++) v |= (uint64_t)p[i] << 8 * i;
    return v;
}

static int get_count(struct reader *r, int max) {
    int n = (int)get_number(r, 1);
    if (n <= max) return n;
    r->bad = true;
    return 0;
}

static void get_copy(struct reader *r, uint8_t *out, size_t n) {
    const uint8_t *p = get_bytes(r, n);
    if (p) memcpy(out, p, n);
}

static void get_entry(struct reader *r, bool with_signature, struct pbft_entry *e) {
    e->len = (uint16_t)get_number(r, 2);
    if (e->len > PBFT_ENTRY_MAX || (e->len > 0 && e->len < PBFT_ENTRY_KEY) ||
        (e->len == 0 && !with_signature)) {
        e->len = 0;
        r->bad = true;
    }
    get_copy(r, e->bytes, e->len);
    if (!with_signature) return;
    get_copy(r, e->signature, PBFT_SIGNATURE);
    if (!r->bad && e->len == 0 && memcmp(e->signature, zero, PBFT_SIGNATURE) != 0) r->bad = true;
}

static void get_certificate(struct reader *r, struct pbft_certificate *c) {
    c->view = get_number(r, 8);
    c->seq = get_number(r, 8);
    get_copy(r, c->digest, PBFT_DIGEST);
    c->n = get_count(r, PBFT_QUORUM_MAX);
    for (int i = 0; i < c->n; i++) {
        c->replica[i] = (uint8_t)get_number(r, 1);
        if (c->replica[i] >= PBFT_REPLICAS_MAX || (i > 0 && c->replica[i] <= c->replica[i - 1]))
            r->bad = true;
        get_copy(r, c->signature[i], PBFT_SIGNATURE);
    }
}

static bool reader_is_done(const struct reader *r) {
    return !r->bad && r->len == 0;
}

static struct reader reader_of(const struct pbft_message *m) {
    return (struct reader){.p = m->body, .len = m->body_len};
}

bool pbft_get_entry(const struct pbft_message *m, bool with_signature, struct pbft_entry *out) {
    struct reader r = reader_of(m);
    uint8_t digest[PBFT_DIGEST];
    get_entry(&r, with_signature, out);
    if (!reader_is_done(&r)) return false;
    pbft_entry_digest(out, digest);
    return memcmp(digest, m->s.digest, PBFT_DIGEST) == 0;
}

bool pbft_get_status(const struct pbft_message *m, uint64_t *executed, bool *in_view) {
    struct reader r = reader_of(m);
    *executed = get_number(&r, 8);
    *in_view = get_count(&r, 1) == 1;
    return reader_is_done(&r);
}

static void get_proof(struct reader *r, struct pbft_proof *out) {
    uint8_t digest[PBFT_DIGEST];
    get_certificate(r, &out->c);
    get_entry(r, true, &out->entry);
    pbft_entry_digest(&out->entry, digest);
    if (memcmp(digest, out->c.digest, PBFT_DIGEST) != 0) r->bad = true;
}

bool pbft_get_proof(const struct pbft_message *m, struct pbft_proof *out) {
    struct reader r = reader_of(m);
    get_proof(&r, out);
    return reader_is_done(&r) && out->c.view == m->s.view && out->c.seq == m->s.seq &&
           memcmp(out->c.digest, m->s.digest, PBFT_DIGEST) == 0;
}

bool pbft_get_state(const struct pbft_message *m, struct pbft_state *out) {
    struct reader r = reader_of(m);
    get_certificate(&r, &out->stable);
    out->first = get_number(&r, 8);
    out->n = get_count(&r, PBFT_WINDOW);
    for (int i = 0; i < out->n; i++) get_entry(&r, true, &out->entries[i]);
    return reader_is_done(&r) && out->stable.seq == m->s.seq;
}

bool pbft_get_view_change(const struct pbft_message *m, struct pbft_view_change *out) {
    struct reader r = reader_of(m);
    get_certificate(&r, &out->stable);
    out->n = get_count(&r, PBFT_WINDOW);
    for (int i = 0; i < out->n; i++) {
        get_proof(&r, &out->prepared[i]);
        if (i > 0 && out->prepared[i].c.seq <= out->prepared[i - 1].c.seq) r.bad = true;
    }
    return reader_is_done(&r) && out->stable.seq == m->s.seq;
}

bool pbft_get_new_view(const struct pbft_message *m, struct pbft_new_view *out) {
    struct reader r = reader_of(m);
    out->n_changes = get_count(&r, PBFT_QUORUM_MAX);
    for (int i = 0; i < out->n_changes; i++) {
        out->changes[i].len = get_number(&r, 4);
        out->changes[i].data = get_bytes(&r, out->changes[i].len);
    }
    out->n_proposals = get_count(&r, PBFT_WINDOW);
    for (int i = 0; i < out->n_proposals; i++) get_copy(&r, out->proposals[i], PBFT_SIGNATURE);
    return reader_is_done(&r);
}

/* Whether the digest of the statement is that of the body, for the kinds where it is. */
static bool body_is_covered(const struct pbft_message *m) {
    uint8_t digest[PBFT_DIGEST];
    pbft_digest(m->body, m->body_len, digest);
    return memcmp(digest, m->s.digest, PBFT_DIGEST) == 0;
}

static bool body_is_valid(const struct pbft_message *m) {
    union {
        struct pbft_entry entry;
        struct pbft_proof proof;
        struct pbft_state state;
        struct pbft_view_change change;
        struct pbft_new_view new_view;
    } u;
    uint64_t executed;
    bool in_view;
    switch (m->s.kind) {
    case PBFT_VOTE:
    case PBFT_REQUEST:
        return m->s.view == 0 && m->s.seq == 0 && pbft_get_entry(m, false, &u.entry);
    case PBFT_PRE_PREPARE:
        return pbft_get_entry(m, true, &u.entry);
    case PBFT_PREPARE:
        return m->body_len == PBFT_SIGNATURE;
    case PBFT_COMMITTED:
        return pbft_get_proof(m, &u.proof);
    case PBFT_STATUS:
        return body_is_covered(m) && pbft_get_status(m, &executed, &in_view);
    case PBFT_STATE:
        return m->s.view == 0 && body_is_covered(m) && pbft_get_state(m, &u.state);
    case PBFT_VIEW_CHANGE:
        return body_is_covered(m) && pbft_get_view_change(m, &u.change);
    case PBFT_NEW_VIEW:
        return m->s.seq == 0 && body_is_covered(m) && pbft_get_new_view(m, &u.new_view);
    case PBFT_CHECKPOINT:
        return m->s.view == 0 && m->body_len == 0;
    default: // COMMIT, REPLY
        return m->body_len == 0;
    }
}

static uint64_t number_read(const uint8_t *p) {
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) v |= (uint64_t)p[i] << 8 * i;
    return v;
}

int pbft_message_parse(const uint8_t *p, size_t len, struct pbft_message *out, struct error *err) {
    if (len < PBFT_STATEMENT + PBFT_SIGNATURE || len > PBFT_MESSAGE_MAX)
        return error_set(err, ERR_FORMAT, "a message of a replica has %d to %d bytes, not %zu",
                         PBFT_STATEMENT + PBFT_SIGNATURE, PBFT_MESSAGE_MAX, len);
    int kind = p[PBFT_DIGEST];
    if (kind == 0 || kind >= PBFT_KINDS)
        return error_set(err, ERR_FORMAT, "a message of a replica has the unknown kind %d", kind);
    *out = (struct pbft_message){.body = p + PBFT_STATEMENT,
                                 .body_len = len - PBFT_STATEMENT - PBFT_SIGNATURE,
                                 .signature = p + len - PBFT_SIGNATURE};
    memcpy(out->s.group, p, PBFT_DIGEST);
    out->s.kind = (enum pbft_kind)kind;
    out->s.sender = p[PBFT_DIGEST + 1];
    out->s.view = number_read(p + PBFT_DIGEST + 2);
    out->s.seq = number_read(p + PBFT_DIGEST + 10);
    memcpy(out->s.digest, p + PBFT_DIGEST + 18, PBFT_DIGEST);
    if (body_is_valid(out)) return OK;
    return error_set(err, ERR_FORMAT, "the body of a %s message is malformed", kind_names[kind]);
}
