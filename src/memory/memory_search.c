/*
 * memory_search: the strength of memories and the search in the memories of a user: words (BM25),
 * embeddings and filters.
 *
 * The index is in memory: terms and vectors of each memory, in the order of the memories. An
 * embedding is computed once and kept in the store as a document {model, v: base64 of
 * little-endian floats}. Every memory is scored, from the vectors' copies in 8 bits to within a
 * bound; those whose upper bound reaches the k-th lower bound are scored exactly. So the result is
 * that of comparing all vectors.
 */
#define _GNU_SOURCE
#include "memory/internal.h"

#include <math.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <unistr.h>

enum {
    EMBED_BATCH = 16,
    DEFAULT_TOP = 10,
    MAX_TOP = 1000,
    QUERY_BYTES = 16 << 10,
    DAY = 24 * 60 * 60,
    HALF_LIFE = 180 /* days */
};
static const double DEFAULT_THRESHOLD = 0.2, DEFAULT_MIX = 0.5;

/* strength */

struct memory_strength memory_strength(const json_t *memory, int64_t now) {
    struct memory_strength s = {.importance = json_get_number(memory, "importance"),
                                .uses = json_integer_value(json_object_get(memory, "uses"))};
    const char *used = json_string_value(json_object_get(memory, "last_used"));
    int64_t last = memory_seconds(json_get_string(memory, "last_stated"));
    last = MAX(last, memory_seconds(used));
    s.days = (double)MAX(now - last, 0) / DAY;
    s.recency = math_pow(2, -s.days / HALF_LIFE);
    s.use = (1 + (double)s.uses) / (2 + (double)s.uses);
    s.strength = s.importance * s.recency * s.use;
    return s;
}

/* the index */

void memories_forget_index(struct memories *m) {
    for (int64_t i = 0; i < m->n_rows; i++) free(m->rows[i].terms);
    free(m->rows);
    m->rows = NULL;
    m->n_rows = 0;
    vector_index_free(m->vectors);
    m->vectors = NULL;
}

/* The text of a memory that is embedded; malloc'ed. */
static char *memory_text(const json_t *memory) {
    return xasprintf("%s: %s. %s", json_get_string(memory, "attribute"),
                     json_get_string(memory, "value"), json_get_string(memory, "text"));
}

static int row_make(struct memory_row *row, const json_t *memory, struct error *err) {
    const struct memory_attribute *a = memory_attribute_find(json_get_string(memory, "attribute"));
    char *text = xasprintf("%s %s %s %s", json_get_string(memory, "attribute"), a ? a->words : "",
                           json_get_string(memory, "value"), json_get_string(memory, "text"));
    struct buf terms = {0};
    buf_puts(&terms, " ");
    *row = (struct memory_row){.id = memory_id(memory)};
    int rc = terms_index(text, strlen(text), &terms, &row->n_terms, err);
    row->terms = terms.data;
    free(text);
    return rc;
}

/* Makes the missing rows. The index is invalid after the deletion or the return of a memory. */
static int rows_update(struct memories *m, struct error *err) {
    bool valid = m->n_rows <= m->n;
    for (int64_t i = 0; valid && i < m->n_rows; i++) valid = m->rows[i].id == memory_id(m->v[i]);
    if (!valid) memories_forget_index(m);
    if (m->n_rows < m->n) m->rows = xrealloc(m->rows, sizeof *m->rows * (size_t)m->n);
    int rc = OK;
    while (m->n_rows < m->n && rc == OK) {
        rc = row_make(&m->rows[m->n_rows], m->v[m->n_rows], err);
        m->n_rows++;
    }
    return rc;
}

/* The vector of a document into v [d]; false: it is missing, damaged, or of another model. */
static bool vector_decode(const json_t *document, const struct embedder *e, float *v) {
    const char *text = json_get_string(document, "v");
    size_t bytes = sizeof *v * (size_t)e->d, n = 0;
    return strcmp(json_get_string(document, "model"), e->model_hash) == 0 &&
           sodium_base642bin((unsigned char *)v, bytes, text, strlen(text), NULL, &n, NULL,
                             sodium_base64_VARIANT_ORIGINAL) == 0 &&
           n == bytes;
}

static int vector_store(struct memories *m, int64_t id, const struct embedder *e, const float *v,
                        struct error *err) {
    char key[MEMORY_KEY];
    size_t bytes = sizeof *v * (size_t)e->d,
           room = sodium_base64_ENCODED_LEN(bytes, sodium_base64_VARIANT_ORIGINAL);
    char *text = xmalloc(room);
    sodium_bin2base64(text, room, (const unsigned char *)v, bytes, sodium_base64_VARIANT_ORIGINAL);
    json_t *document = json_pack("{s:s,s:s}", "model", e->model_hash, "v", text);
    memory_key(key, id);
    int rc = store_document_put(m->store, m->vector_kind, key, document, err);
    json_decref(document);
    free(text);
    return rc;
}

/* Stores n vectors, [n][d], of the memories `ids`, but none of a memory that another process has
 * deleted meanwhile. */
static int vectors_store(struct memories *m, const int64_t *ids, int n, const struct embedder *e,
                         const float *v, struct error *err) {
    int rc = store_begin(m->store, err);
    if (rc != OK) return rc;
    for (int i = 0; i < n && rc == OK; i++) {
        char key[MEMORY_KEY];
        memory_key(key, ids[i]);
        json_t *memory = store_document_get(m->store, m->kind, key, err);
        if (memory)
            rc = vector_store(m, ids[i], e, v + (int64_t)i * e->d, err);
        else if (err->code != ERR_MISSING)
            rc = err->code;
        json_decref(memory);
    }
    if (rc == OK) rc = store_commit(m->store, err);
    if (rc != OK) store_rollback(m->store);
    return rc;
}

/* Computes the vectors of the memories at `rows` [n], n ≤ EMBED_BATCH. out: [n][d] */
static int batch_embed(struct memories *m, const int64_t *rows, int n, const struct embedder *e,
                       float *out, struct error *err) {
    char *texts[EMBED_BATCH];
    int64_t ids[EMBED_BATCH];
    for (int i = 0; i < n; i++) {
        texts[i] = memory_text(m->v[rows[i]]);
        ids[i] = m->rows[rows[i]].id;
    }
    int rc = e->embed(e->ctx, (const char *const *)texts, n, out, err);
    if (rc == OK) rc = vectors_store(m, ids, n, e, out, err);
    for (int i = 0; i < n; i++) free(texts[i]);
    return rc;
}

/* Computes the vectors of those rows, from `first` on, that `have` lacks. v: [n - first][d] */
static int missing_embed(struct memories *m, int64_t first, const bool *have,
                         const struct embedder *e, float *v, struct error *err) {
    int64_t rows[EMBED_BATCH];
    float *batch = xcalloc(EMBED_BATCH * (size_t)e->d, sizeof *batch);
    int n = 0, rc = OK;
    for (int64_t i = first; i < m->n && rc == OK; i++) {
        if (!have[i - first]) rows[n++] = i;
        if (n == 0 || (n < EMBED_BATCH && i + 1 < m->n)) continue;
        rc = batch_embed(m, rows, n, e, batch, err);
        for (int k = 0; k < n && rc == OK; k++)
            memcpy(v + (rows[k] - first) * e->d, batch + (int64_t)k * e->d,
                   sizeof *v * (size_t)e->d);
        n = 0;
    }
    free(batch);
    return rc;
}

/* Reads or computes the vectors of the rows without a vector. */
static int vectors_update(struct memories *m, const struct embedder *e, struct error *err) {
    if (m->vectors && strcmp(m->vector_model, e->model_hash) != 0) {
        vector_index_free(m->vectors);
        m->vectors = NULL;
    }
    snprintf(m->vector_model, sizeof m->vector_model, "%s", e->model_hash);
    if (!m->vectors) m->vectors = vector_index_new(e->d);
    int64_t first = vector_index_size(m->vectors), n = m->n - first;
    if (n == 0) return OK;
    float *v = try_calloc((size_t)n * (size_t)e->d, sizeof *v, err);
    if (!v) return err->code;
    bool *have = xcalloc((size_t)n, sizeof *have);
    json_t *stored = store_document_list(m->store, m->vector_kind, err);
    int rc = stored ? OK : err->code;
    for (int64_t i = 0; i < n && rc == OK; i++) {
        char key[MEMORY_KEY];
        memory_key(key, m->rows[first + i].id);
        have[i] = vector_decode(json_object_get(stored, key), e, v + i * e->d);
    }
    json_decref(stored);
    if (rc == OK) rc = missing_embed(m, first, have, e, v, err);
    for (int64_t i = 0; i < n && rc == OK; i++)
        rc = vector_index_add(m->vectors, v + i * e->d, err);
    free(have);
    free(v);
    return rc;
}

/* scoring */

struct candidate {
    double bm25, words, cosine, bound, strength; /* |cosine - exact| ≤ bound */
    double relevance, score;
    bool matches; /* the filters */
    int64_t row;
};

struct search {
    struct memories *m;
    const struct memory_query *q;
    const char *at;
    int64_t now;
    double mix, threshold;
    int64_t top;
    struct candidate *v; /* [n], of all memories; then [n_hits] */
    int64_t n_hits;
};

/* Times are compared as text: clock_utc's form sorts by time. */
static bool filters_match(const struct search *s, const json_t *memory) {
    const struct memory_query *q = s->q;
    const char *from = json_get_string(memory, "valid_from"),
               *until = json_string_value(json_object_get(memory, "valid_until"));
    if (q->attribute && strcmp(json_get_string(memory, "attribute"), q->attribute) != 0)
        return false;
    if (q->ended) return true;
    return q->at ? strcmp(from, q->at) <= 0 && (!until || strcmp(until, q->at) > 0) : !until;
}

static int64_t term_count(const char *terms, const char *pattern, size_t len) {
    int64_t n = 0;
    for (const char *p = terms; (p = strstr(p, pattern)); p += len - 1) n++;
    return n;
}

/* Adds the BM25 of one term to the memories; *max_score as in knowledge.c. */
static void term_score(struct search *s, const struct query_term *t, double average,
                       double *max_score, double *tf) {
    char *pattern = xasprintf(" %s%s", t->text, t->prefix ? "" : " ");
    const struct memories *m = s->m;
    size_t len = strlen(pattern);
    int64_t df = 0;
    for (int64_t i = 0; i < m->n; i++) {
        tf[i] = (double)term_count(m->rows[i].terms, pattern, len);
        df += tf[i] > 0;
    }
    double weight = t->weight * bm25_idf((double)m->n, (double)df);
    *max_score += weight;
    for (int64_t i = 0; df && i < m->n; i++)
        if (tf[i] > 0)
            s->v[i].bm25 += weight * bm25_term_weight(tf[i], (double)m->rows[i].n_terms, average);
    free(pattern);
}

static int words_score(struct search *s, struct error *err) {
    struct query_term terms[QUERY_TERMS];
    const struct memories *m = s->m;
    int n = terms_query(s->q->text, terms, err);
    if (n < 0) return n;
    int64_t total = 0;
    double max_score = 0, *tf = xcalloc((size_t)m->n + 1, sizeof *tf);
    for (int64_t i = 0; i < m->n; i++) total += m->rows[i].n_terms;
    double average = m->n ? MAX((double)total / (double)m->n, 1) : 1;
    for (int i = 0; i < n; i++) term_score(s, &terms[i], average, &max_score, tf);
    for (int64_t i = 0; i < m->n && max_score > 0; i++)
        s->v[i].words = MIN(s->v[i].bm25 / max_score, 1);
    free(tf);
    return OK;
}

static double relevance_at(const struct search *s, const struct candidate *c, double cosine) {
    return (1 - s->mix) * c->words + s->mix * MAX(MIN(cosine, 1), 0);
}

static double score_at(const struct candidate *c, double relevance) {
    return relevance * (0.8 + 0.2 * c->strength);
}

/* The k-th largest lower bound of the candidates that certainly reach the threshold; -1: there are
 * fewer. */
static double kth_lower(const struct search *s) {
    double *best = xcalloc((size_t)s->top, sizeof *best);
    int64_t n = 0;
    for (int64_t i = 0; i < s->m->n; i++) {
        const struct candidate *c = &s->v[i];
        double relevance = relevance_at(s, c, c->cosine - c->bound), x = score_at(c, relevance);
        if (!c->matches || relevance < s->threshold || (n == s->top && x <= best[n - 1])) continue;
        int64_t k = n < s->top ? n++ : n - 1;
        for (; k > 0 && best[k - 1] < x; k--) best[k] = best[k - 1];
        best[k] = x;
    }
    double lower = n == s->top ? best[n - 1] : -1;
    free(best);
    return lower;
}

static int candidate_compare(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    if (x->strength != y->strength) return x->strength > y->strength ? -1 : 1;
    return (x->row > y->row) - (x->row < y->row);
}

/* Selects the hits, with exact scores, in order. query: [d], or NULL. */
static void hits_select(struct search *s, const float *query) {
    double lower = kth_lower(s);
    for (int64_t i = 0; i < s->m->n; i++) {
        struct candidate c = s->v[i];
        double upper = relevance_at(s, &c, c.cosine + c.bound);
        if (!c.matches || upper < s->threshold || score_at(&c, upper) < lower) continue;
        if (query) c.cosine = vector_index_cosine(s->m->vectors, query, i);
        c.relevance = relevance_at(s, &c, c.cosine);
        c.score = score_at(&c, c.relevance);
        if (c.relevance >= s->threshold) s->v[s->n_hits++] = c;
    }
    if (s->n_hits) qsort(s->v, (size_t)s->n_hits, sizeof *s->v, candidate_compare);
    s->n_hits = MIN(s->n_hits, s->top);
}

static int cosine_score(struct search *s, float *query, struct error *err) {
    const struct embedder *e = s->q->embedder;
    struct memories *m = s->m;
    int rc = vectors_update(m, e, err);
    if (rc == OK) rc = e->embed(e->ctx, &s->q->text, 1, query, err);
    if (rc != OK) return rc;
    float *cosine = xcalloc((size_t)m->n + 1, sizeof *cosine),
          *bound = xcalloc((size_t)m->n + 1, sizeof *bound);
    vector_index_scan(m->vectors, query, cosine, bound);
    for (int64_t i = 0; i < m->n; i++) {
        s->v[i].cosine = cosine[i];
        s->v[i].bound = bound[i];
    }
    free(cosine);
    free(bound);
    return OK;
}

/* Without a text, relevance is 1 and the score is the strength. */
static void strength_order(struct search *s) {
    for (int64_t i = 0; i < s->m->n; i++) {
        struct candidate c = s->v[i];
        c.relevance = 1;
        c.score = c.strength;
        if (c.matches) s->v[s->n_hits++] = c;
    }
    if (s->n_hits) qsort(s->v, (size_t)s->n_hits, sizeof *s->v, candidate_compare);
    s->n_hits = MIN(s->n_hits, s->top);
}

static int text_score(struct search *s, struct error *err) {
    const struct embedder *e = s->mix > 0 ? s->q->embedder : NULL;
    float *query = e ? xcalloc((size_t)e->d, sizeof *query) : NULL;
    int rc = words_score(s, err);
    if (rc == OK && e) rc = cosine_score(s, query, err);
    if (rc == OK) hits_select(s, query);
    free(query);
    return rc;
}

static int query_check(const struct memory_query *q, struct error *err) {
    size_t len = q->text ? strlen(q->text) : 0;
    if (len > QUERY_BYTES)
        return error_set(err, ERR_USAGE, "a query of %zu bytes is too long: at most %d", len,
                         QUERY_BYTES);
    if (len && u8_check((const uint8_t *)q->text, len))
        return error_set(err, ERR_USAGE, "the query is not UTF-8 text");
    if (q->top < 0 || q->top > MAX_TOP)
        return error_set(err, ERR_USAGE, "at most %d results", MAX_TOP);
    if (q->at && memory_seconds(q->at) < 0)
        return error_set(err, ERR_USAGE, "'%.40s' is not a time such as 2026-11-29T09:30:00Z",
                         q->at);
    return OK;
}

/* uses */

/* Counts a use of a memory, unless another process has deleted it. */
static int use_count(struct memories *m, int64_t id, const char *at, struct error *err) {
    char key[MEMORY_KEY];
    memory_key(key, id);
    json_t *v = store_document_get(m->store, m->kind, key, err);
    if (!v) return err->code == ERR_MISSING ? OK : err->code;
    json_object_set_new(v, "uses",
                        json_integer(json_integer_value(json_object_get(v, "uses")) + 1));
    json_object_set_new(v, "last_used", json_string(at));
    int rc = store_document_put(m->store, m->kind, key, v, err);
    int64_t i = memories_find(m, id);
    if (rc == OK && i >= 0) {
        json_t *next = json_copy(m->v[i]);
        json_object_set(next, "uses", json_object_get(v, "uses"));
        json_object_set(next, "last_used", json_object_get(v, "last_used"));
        json_decref(m->v[i]);
        m->v[i] = next;
    }
    json_decref(v);
    return rc;
}

static int uses_count(struct search *s, struct error *err) {
    char now[32];
    clock_utc(now);
    int rc = store_begin(s->m->store, err);
    if (rc != OK) return rc;
    for (int64_t i = 0; i < s->n_hits && rc == OK; i++)
        rc = use_count(s->m, s->m->rows[s->v[i].row].id, now, err);
    if (rc == OK) rc = store_commit(s->m->store, err);
    if (rc != OK) store_rollback(s->m->store);
    return rc;
}

static json_t *hits_json(const struct search *s) {
    json_t *list = json_array();
    for (int64_t i = 0; i < s->n_hits; i++) {
        const struct candidate *c = &s->v[i];
        json_t *hit = json_copy(s->m->v[c->row]);
        json_object_set_new(hit, "score", json_real(c->score));
        json_object_set_new(hit, "relevance", json_real(c->relevance));
        json_object_set_new(hit, "words", json_real(c->words));
        if (s->q->embedder) json_object_set_new(hit, "cosine", json_real(c->cosine));
        json_object_set_new(hit, "strength", json_real(c->strength));
        json_array_append_new(list, hit);
    }
    return list;
}

json_t *memories_search(struct memories *m, const struct memory_query *q, struct error *err) {
    char now[32];
    if (query_check(q, err) != OK || memories_refresh(m, err) != OK || rows_update(m, err) != OK)
        return NULL;
    struct search s = {.m = m,
                       .q = q,
                       .at = q->at ? q->at : clock_utc(now),
                       .mix = !q->embedder || q->mix < 0 ? 0
                              : q->mix > 0               ? MIN(q->mix, 1)
                                                         : DEFAULT_MIX,
                       .threshold = q->threshold == 0 ? DEFAULT_THRESHOLD : MAX(q->threshold, 0),
                       .top = q->top ? q->top : DEFAULT_TOP,
                       .v = xcalloc((size_t)m->n + 1, sizeof *s.v)};
    s.now = memory_seconds(s.at);
    for (int64_t i = 0; i < m->n; i++) {
        s.v[i].row = i;
        s.v[i].matches = filters_match(&s, m->v[i]);
        s.v[i].strength = memory_strength(m->v[i], s.now).strength;
    }
    int rc = OK;
    if (q->text && *q->text)
        rc = text_score(&s, err);
    else
        strength_order(&s);
    if (rc == OK && q->count_uses && s.n_hits) rc = uses_count(&s, err);
    json_t *list = rc == OK ? hits_json(&s) : NULL;
    free(s.v);
    return list;
}
