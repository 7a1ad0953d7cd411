/*
 * unigram: SentencePiece's unigram model (llm-jp, T5): finds the segmentation of a fragment into
 * pieces with the highest sum of scores (Viterbi).
 *
 * spm.c does the rest: spaces as ▁, bytes for text that no piece covers, decoding. Rules of the
 * reference: a character that is not a piece may be unknown, with the lowest score of a normal
 * piece minus 10; a user-defined piece of n bytes has n times the highest score minus 0.1, which is
 * better than any other segmentation of these bytes; positions are visited from left to right, and
 * of equal sums the first is kept, so the longest last piece is chosen. Sums are double, as in
 * Hugging Face's and llama.cpp's programs; SentencePiece itself sums in float, and its rounding
 * changes the segmentation of long texts.
 *
 * Pieces are found with a double-array trie: node s has the child for byte c at element base[s] + c
 * exactly if the check of that element is s. Invariant of the search: once no piece found so far
 * extends beyond a position, the segmentation before it is final. Its ids are emitted and the sum
 * starts again at 0, so memory is proportional to the longest range that is not final.
 */
#include "tokenizer/internal.h"

#include <stdlib.h>
#include <string.h>

enum {
    PIECE_LIMIT = 1024,   /* bytes; also the depth of the building recursion */
    NODE_LIMIT = 1 << 28, /* elements of the double array */
    SEARCH_LIMIT = 8192, /* elements visited by a search, beyond which later searches begin later */
    UNKNOWN_PENALTY = 10, /* from the reference */
    NO_PARENT = -1,
};

struct trie_node {
    int32_t base, check, id; /* id of the piece that ends here, or -1 */
    float score;
};
struct trie {
    struct trie_node *nodes; /* [n]; 0 is the root */
    int32_t n, search_from;  /* search_from: first element that base_find_free considers */
    float unknown_score,     /* score of an unknown character */
        max_score;           /* the highest score of a normal piece, at least 0 */
};

/* The best path to one position in the text. */
struct viterbi_node {
    double sum;
    int32_t prev, id; /* id: the path's last piece, UNKNOWN, or -1: not reached; prev: where the
                         piece begins */
};
#define UNKNOWN INT32_MAX

struct trie_build {
    struct trie *trie;
    const struct tokenizer *t;
    const int32_t *sorted; /* ids sorted by their bytes */
};

static int trie_grow(struct trie *t, int64_t n, struct error *err) {
    if (n <= t->n) return OK;
    if (n > NODE_LIMIT) return error_set(err, ERR_FORMAT, "the pieces are too many and too long");
    int64_t size = MIN(MAX(n, 2 * (int64_t)t->n), NODE_LIMIT);
    struct trie_node *nodes = try_realloc(t->nodes, sizeof(*t->nodes) * (size_t)size, err);
    if (!nodes) return err->code;
    t->nodes = nodes;
    for (int64_t i = t->n; i < size; i++) t->nodes[i] = (struct trie_node){0, NO_PARENT, -1, 0};
    t->n = (int32_t)size;
    return OK;
}

static bool base_is_free(const struct trie *t, int64_t base, const uint8_t *bytes, int n) {
    for (int i = 0; i < n; i++) {
        int64_t element = base + bytes[i];
        if (element < t->n && t->nodes[element].check != NO_PARENT) return false;
    }
    return true;
}

/* The first base whose elements for all children are free. If nearly all elements visited were
 * taken, or very many were visited, later searches begin after them, so that no file makes the
 * construction quadratic. */
static int64_t base_find_free(struct trie *t, const uint8_t *bytes, int n) {
    int64_t begin = MAX(t->search_from, bytes[0] + 1), element = begin, n_taken = 0;
    for (;; element++) {
        bool used = element < t->n && t->nodes[element].check != NO_PARENT;
        n_taken += used;
        if (!used && base_is_free(t, element - bytes[0], bytes, n)) break;
    }
    if (n_taken * 20 >= (element - begin + 1) * 19 || element - begin > SEARCH_LIMIT)
        t->search_from = (int32_t)MIN(element, NODE_LIMIT);
    return element - bytes[0];
}

static uint8_t byte_of(const struct trie_build *b, int32_t i, int32_t depth) {
    return (uint8_t)b->t->text[b->sorted[i]][depth];
}

static void node_set_piece(const struct trie_build *b, struct trie_node *node, int32_t id) {
    const struct tokenizer_spec *s = &b->t->spec;
    bool user = s->types[id] == PIECE_USER;
    node->id = id;
    node->score = user ? b->trie->max_score * (float)s->lens[id] - 0.1f : s->scores[id];
}

/* Adds the pieces sorted[lo..hi), whose first `depth` bytes are equal, under `node`. */
static int trie_insert(const struct trie_build *b, int32_t node, int32_t lo, int32_t hi,
                       int32_t depth, struct error *err) {
    struct trie *t = b->trie;
    uint8_t bytes[256];
    int32_t begin[257];
    int n = 0;
    for (; lo < hi && b->t->lens[b->sorted[lo]] == depth; lo++) /* equal pieces: the lowest id */
        if (t->nodes[node].id < 0) node_set_piece(b, &t->nodes[node], b->sorted[lo]);
    for (int32_t i = lo; i < hi; i++) {
        if (n > 0 && byte_of(b, i, depth) == bytes[n - 1]) continue;
        bytes[n] = byte_of(b, i, depth);
        begin[n++] = i;
    }
    begin[n] = hi;
    if (n == 0) return OK;
    int64_t base = base_find_free(t, bytes, n);
    if (trie_grow(t, base + bytes[n - 1] + 1, err) != OK) return err->code;
    t->nodes[node].base = (int32_t)base;
    for (int i = 0; i < n; i++) t->nodes[base + bytes[i]].check = node;
    for (int i = 0; i < n; i++)
        if (trie_insert(b, (int32_t)base + bytes[i], begin[i], begin[i + 1], depth + 1, err) != OK)
            return err->code;
    return OK;
}

struct piece_key {
    const char *p;
    int32_t len, id;
};

static int piece_compare(const void *a, const void *b) {
    const struct piece_key *x = a, *y = b;
    int c = memcmp(x->p, y->p, (size_t)MIN(x->len, y->len));
    if (c != 0) return c;
    if (x->len != y->len) return x->len < y->len ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static bool is_in_trie(const struct tokenizer *t, int32_t id) {
    uint8_t type = t->spec.types[id];
    return type == PIECE_NORMAL || (type == PIECE_USER && t->spec.user_pieces);
}

/* The ids of the trie's pieces, sorted by their bytes; malloc'ed, or NULL. */
static int32_t *pieces_sorted(const struct tokenizer *t, int32_t *n, struct error *err) {
    struct piece_key *keys = try_calloc((size_t)t->spec.n, sizeof(*keys), err);
    int32_t *ids = keys ? try_calloc((size_t)t->spec.n, sizeof(*ids), err) : NULL;
    *n = 0;
    if (!ids) {
        free(keys);
        return NULL;
    }
    for (int32_t id = 0; id < t->spec.n; id++)
        if (is_in_trie(t, id) && t->lens[id] > 0)
            keys[(*n)++] = (struct piece_key){t->text[id], t->lens[id], id};
    qsort(keys, (size_t)*n, sizeof(*keys), piece_compare);
    for (int32_t i = 0; i < *n; i++) ids[i] = keys[i].id;
    free(keys);
    return ids;
}

static int score_bounds_compute(const struct tokenizer *t, struct trie *trie, struct error *err) {
    float lowest = 0;
    trie->max_score = 0;
    for (int32_t id = 0; id < t->spec.n; id++) {
        float score = t->spec.scores[id];
        if (!is_in_trie(t, id)) continue;
        if (t->lens[id] > PIECE_LIMIT)
            return error_set(err, ERR_FORMAT, "token %d is %d bytes long, above the limit of %d",
                             id, t->lens[id], PIECE_LIMIT);
        if (!(score >= -1e30f && score <= 1e30f)) /* sums stay finite */
            return error_set(err, ERR_FORMAT, "token %d has the impossible score %g", id,
                             (double)score);
        if (t->spec.types[id] != PIECE_NORMAL) continue;
        lowest = MIN(lowest, score);
        trie->max_score = MAX(trie->max_score, score);
    }
    trie->unknown_score = lowest - UNKNOWN_PENALTY;
    return OK;
}

int unigram_prepare(struct tokenizer *t, struct error *err) {
    int32_t n;
    t->trie = xcalloc(1, sizeof(*t->trie));
    if (score_bounds_compute(t, t->trie, err) != OK) return err->code;
    int32_t *sorted = pieces_sorted(t, &n, err);
    if (!sorted) return err->code;
    struct trie_build b = {t->trie, t, sorted};
    int rc = trie_grow(t->trie, 512, err);
    if (rc == OK) t->trie->nodes[0].check = 0; /* the root's element is taken */
    if (rc == OK) rc = trie_insert(&b, 0, 0, n, 0, err);
    free(sorted);
    return rc;
}

void trie_free(struct trie *t) {
    if (t) free(t->nodes);
    free(t);
}

static struct viterbi_node *lattice_reserve(struct encoder *e, size_t n) {
    if (n > e->lattice_cap) {
        size_t cap = MAX(2 * e->lattice_cap, MAX(n, (size_t)1024));
        e->lattice = xrealloc(e->lattice, sizeof(*e->lattice) * cap);
        for (size_t i = e->lattice_cap; i < cap; i++) e->lattice[i].id = -1;
        e->lattice_cap = cap;
    }
    return e->lattice;
}

static void viterbi_relax(struct viterbi_node *to, double sum, int32_t prev, int32_t id) {
    if (to->id < 0 || sum > to->sum) *to = (struct viterbi_node){sum, prev, id};
}

/* Emits the ids of the best path from position 0 (the text at p) to `end`, and clears the lattice
 * up to `end`. */
static void lattice_emit(struct encoder *e, const char *p, int32_t end) {
    struct viterbi_node *l = e->lattice;
    int32_t n = 0;
    if (!encoder_reserve(e, end)) return;
    for (int32_t pos = end; pos > 0; pos = l[pos].prev) {
        e->id[n] = l[pos].id;
        e->offset[n++] = l[pos].prev;
    }
    for (int32_t i = n - 1, next; i >= 0; i--) {
        next = i > 0 ? e->offset[i - 1] : end;
        if (e->id[i] != UNKNOWN)
            token_ids_add(e->out, e->id[i]);
        else
            encoder_byte_fallback(e, p + e->offset[i], (size_t)(next - e->offset[i]));
    }
    for (int32_t i = 1; i <= end; i++) l[i].id = -1;
}

/* Relaxes every piece that begins at `pos`, and the unknown token if no piece is exactly the
 * character at `pos`; returns the furthest position reached. */
static int32_t pieces_relax(struct encoder *e, const char *p, size_t left, int32_t pos) {
    const struct trie *t = e->t->trie;
    struct viterbi_node *l = e->lattice + pos;
    double sum = pos > 0 ? l->sum : 0;
    int32_t node = 0, furthest = 0, char_end = (int32_t)char_len(p, left);
    bool has_char_piece = false;
    size_t limit = MIN(left, (size_t)PIECE_LIMIT);
    for (size_t i = 0; i < limit; i++) {
        int32_t child = t->nodes[node].base + (uint8_t)p[i];
        if (child >= t->n || t->nodes[child].check != node) break;
        node = child;
        if (t->nodes[node].id < 0) continue;
        furthest = (int32_t)i + 1;
        has_char_piece |= furthest == char_end;
        viterbi_relax(l + furthest, sum + (double)t->nodes[node].score, pos, t->nodes[node].id);
    }
    if (!has_char_piece) viterbi_relax(l + char_end, sum + (double)t->unknown_score, pos, UNKNOWN);
    return pos + MAX(furthest, char_end);
}

void unigram_viterbi(struct encoder *e, const char *p, size_t len) {
    while (len > 0) {
        int32_t pos = 0, reach = 0;
        do {
            size_t left = len - (size_t)pos;
            lattice_reserve(e, (size_t)pos + 1 + MIN(left, (size_t)PIECE_LIMIT));
            reach = MAX(reach, pieces_relax(e, p + pos, left, pos));
            pos += (int32_t)char_len(p + pos, left);
        } while (pos < reach);
        lattice_emit(e, p, reach);
        p += reach;
        len -= (size_t)reach;
    }
}
