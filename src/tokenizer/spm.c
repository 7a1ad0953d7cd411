/*
 * spm: SentencePiece's BPE with byte fallback (Llama 2, Phi-3, TinyStories), and the functions that
 * its unigram models (unigram.c) share with it: ▁, bytes, decoding.
 *
 * Spaces become ▁. With add_space_prefix, another ▁ is added at the beginning of a text and after
 * every special token (prefix_prepare has other rules). At first, symbols are characters. The pair
 * whose merged piece has the highest score is merged first, of equal scores the leftmost pair;
 * pairs may cross spaces, and there is no pattern. Characters that no piece covers become byte
 * tokens, or, in a vocabulary without byte tokens, one unknown token for a run of them. A
 * vocabulary read from a tokenizer.json whose merge list differs from the order of the scores keeps
 * that list, and ranks come from the list.
 *
 * Unused pieces are never the result of a merge (SentencePiece forms them and then splits them).
 *
 * Invariant: without a merge list, the pair table has every way to split a normal piece into two
 * symbols, so merging compares only integers.
 */
#include "tokenizer/internal.h"

#include <stdlib.h>
#include <string.h>

/* Bounds the work of splitting pieces in two; SentencePiece's own limit is far lower. */
enum { PIECE_LIMIT = 1024 };

size_t char_len(const char *p, size_t left) {
    int n = utf8_len(p, left);
    return n > 0 ? (size_t)n : 1;
}

static bool is_mergeable(const struct tokenizer *t, int32_t id) {
    return id >= t->spec.n || (id >= 0 && t->spec.types[id] == PIECE_NORMAL);
}

static int32_t symbol_find_mergeable(const struct tokenizer *t, const char *p, size_t n) {
    int32_t id = vocab_find(t, p, n);
    return is_mergeable(t, id) ? id : -1;
}

/* The length of the word at p: its leading ▁, all of them or with `every_mark` only one, and the
 * text up to the next ▁. */
static size_t word_len(const char *p, size_t left, bool every_mark) {
    size_t i = 0;
    while (left - i >= 3 && memcmp(p + i, METASPACE_CHAR, 3) == 0 && (i == 0 || !every_mark))
        i += 3;
    while (i < left) {
        const char *mark = memchr(p + i, METASPACE_CHAR[0], left - i);
        if (!mark) return left;
        i = (size_t)(mark - p);
        if (left - i >= 3 && memcmp(mark, METASPACE_CHAR, 3) == 0) return i;
        i++;
    }
    return left;
}

/* The byte of a byte token's piece: 10 for "<0x0A>", -1 for other text. */
static int piece_byte(const char *p, int32_t len) {
    if (len != 6 || memcmp(p, "<0x", 3) != 0 || p[5] != '>') return -1;
    int value = 0;
    for (int i = 3; i < 5; i++) {
        int c = p[i], digit = c >= '0' && c <= '9'   ? c - '0'
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                     : -1;
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}

static int bytes_prepare(struct tokenizer *t, struct error *err) {
    for (int b = 0; b < 256; b++) t->byte_ids[b] = -1;
    for (int32_t id = 0; id < t->spec.n; id++) {
        if (t->spec.types[id] != PIECE_BYTE) continue;
        int b = piece_byte(t->text[id], t->lens[id]);
        if (b < 0)
            return error_set(err, ERR_FORMAT, "byte token %d is '%.20s' and not like '<0x0A>'", id,
                             t->text[id]);
        t->byte_ids[b] = id;
    }
    return OK;
}

/* The positions in pieces of characters that are not pieces themselves, with repeats. */
struct unlisted_chars {
    struct token_ids piece, offset;
};

static int piece_scan(const struct tokenizer *t, int32_t id, struct unlisted_chars *s,
                      int64_t *n_splits, struct error *err) {
    size_t len = (size_t)t->lens[id];
    if (len > PIECE_LIMIT)
        return error_set(err, ERR_FORMAT, "token %d is %zu bytes long, above the limit of %d", id,
                         len, PIECE_LIMIT);
    for (size_t i = 0, n; i < len; i += n) {
        n = char_len(t->text[id] + i, len - i);
        *n_splits += i > 0;
        if (n == len || vocab_find(t, t->text[id] + i, n) >= 0) continue;
        token_ids_add(&s->piece, id);
        token_ids_add(&s->offset, (int32_t)i);
    }
    return OK;
}

/* Gives each position of an unlisted character a symbol. Only the first symbol of equal characters
 * is ever found; the others cost little, because vocabularies have few such characters or none. */
static int unlisted_chars_add(struct tokenizer *t, const struct unlisted_chars *s,
                              struct error *err) {
    size_t n = (size_t)t->spec.n, n_all = n + (size_t)s->piece.n;
    size_t symbol_bytes =
        sizeof(*t->text) + sizeof(*t->lens) + 4 * sizeof(*t->index); /* its slots */
    if (arena_reserve(&t->arena, n_all * symbol_bytes + 4 * 64, err) != OK) return err->code;
    const char **text = arena_alloc(&t->arena, sizeof(*text) * n_all);
    int32_t *lens = arena_alloc(&t->arena, sizeof(*lens) * n_all);
    memcpy(text, t->text, sizeof(*text) * n);
    memcpy(lens, t->lens, sizeof(*lens) * n);
    for (int i = 0; i < s->piece.n; i++) {
        int32_t id = s->piece.v[i], offset = s->offset.v[i];
        text[t->n_symbols] = text[id] + offset;
        lens[t->n_symbols++] = (int32_t)char_len(text[id] + offset, (size_t)(lens[id] - offset));
    }
    t->text = text;
    t->lens = lens;
    vocab_index_build(t);
    return OK;
}

/* Gives symbols to unlisted characters; sets *n_splits to the number of ways to split pieces in
 * two. */
static int chars_prepare(struct tokenizer *t, int64_t *n_splits, struct error *err) {
    struct unlisted_chars s = {0};
    size_t text = 0; /* bytes of all pieces, an upper bound on the number of unlisted characters */
    *n_splits = 0;
    for (int32_t id = 0; id < t->spec.n; id++) text += (size_t)t->lens[id];
    text = MIN(text, (size_t)INT32_MAX);
    s.piece.v = try_calloc(text, sizeof(int32_t), err);
    s.offset.v = s.piece.v ? try_calloc(text, sizeof(int32_t), err) : NULL;
    s.piece.cap = s.offset.cap = (int)text;
    int rc = s.offset.v ? OK : err->code;
    for (int32_t id = 0; id < t->spec.n && rc == OK; id++)
        if (is_mergeable(t, id)) rc = piece_scan(t, id, &s, n_splits, err);
    if (rc == OK && s.piece.n > 0) rc = unlisted_chars_add(t, &s, err);
    token_ids_release(&s.piece);
    token_ids_release(&s.offset);
    return rc;
}

static int score_order(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Equal scores get equal ranks, so the leftmost of equal merges comes first. malloc'ed, [n]. */
static int32_t *score_ranks(const struct tokenizer_spec *s, struct error *err) {
    size_t n = (size_t)s->n;
    float *sorted = try_calloc(n, sizeof(*sorted), err);
    int32_t *ranks = sorted ? try_calloc(n, sizeof(*ranks), err) : NULL;
    if (!ranks) {
        free(sorted);
        return NULL;
    }
    memcpy(sorted, s->scores, sizeof(*sorted) * n);
    qsort(sorted, n, sizeof(*sorted), score_order);
    for (size_t i = 0; i < n; i++) {
        size_t lo = 0, hi = n; /* the first index whose score is not above ours */
        while (lo < hi) {
            size_t mid = (lo + hi) / 2;
            if (sorted[mid] > s->scores[i])
                lo = mid + 1;
            else
                hi = mid;
        }
        ranks[i] = (int32_t)lo;
    }
    free(sorted);
    return ranks;
}

static int pairs_from_scores(struct tokenizer *t, int64_t n_splits, struct error *err) {
    int32_t *ranks = score_ranks(&t->spec, err);
    if (!ranks) return err->code;
    merge_table_init(&t->pairs, &t->arena, n_splits);
    for (int32_t id = 0; id < t->spec.n; id++) {
        if (!is_mergeable(t, id)) continue;
        const char *p = t->text[id];
        size_t len = (size_t)t->lens[id];
        if (vocab_find(t, p, len) != id) continue; /* merges give the first of equal pieces */
        for (size_t i = len > 0 ? char_len(p, len) : 0; i < len; i += char_len(p + i, len - i)) {
            int32_t left = symbol_find_mergeable(t, p, i),
                    right = symbol_find_mergeable(t, p + i, len - i);
            if (left >= 0 && right >= 0) merge_table_add(&t->pairs, left, right, ranks[id], id);
        }
    }
    free(ranks);
    return OK;
}

/*
 * Whether ▁ occurs in pieces only at the beginning (as one or several ▁), as in models trained on
 * words. Words of a text can then be encoded separately and cached, because no merge crosses them.
 */
static bool pieces_stay_within_words(const struct tokenizer *t) {
    for (int32_t id = 0; id < t->spec.n; id++) {
        size_t len = (size_t)t->lens[id];
        if (is_mergeable(t, id) && len > 0 && word_len(t->text[id], len, false) < len) return false;
    }
    return true;
}

/* Hugging Face's newer files have other rules for the added space than SentencePiece. spec.pre,
 * which has no other use for this kind of tokenizer, has the name of the rule. */
static void prefix_prepare(struct tokenizer *t) {
    t->prefix_text_only = strcmp(t->spec.pre, PREFIX_FIRST) == 0;
    t->prefix_unless_space = t->prefix_text_only || strcmp(t->spec.pre, PREFIX_ALWAYS) == 0;
}

int spm_prepare(struct tokenizer *t, struct error *err) {
    int64_t n_splits;
    if (bytes_prepare(t, err) != OK) return err->code;
    if (t->spec.kind == TOKENIZER_UNIGRAM) {
        if (unigram_prepare(t, err) != OK) return err->code;
    } else if (t->spec.n_merges > 0) {
        if (merge_table_build(t, err) != OK) return err->code;
    } else {
        if (chars_prepare(t, &n_splits, err) != OK) return err->code;
        if (pairs_from_scores(t, n_splits, err) != OK) return err->code;
    }
    t->splits_words = t->spec.split_words || pieces_stay_within_words(t);
    prefix_prepare(t);
    for (int c = 0; c < 128; c++) t->ascii[c] = symbol_find_mergeable(t, &(char){(char)c}, 1);
    return OK;
}

void encoder_byte_fallback(struct encoder *e, const char *p, size_t n) {
    const struct tokenizer *t = e->t;
    bool bytes = true;
    for (size_t i = 0; i < n; i++) bytes &= t->byte_ids[(uint8_t)p[i]] >= 0;
    for (size_t i = 0; i < n && bytes; i++) token_ids_add(e->out, t->byte_ids[(uint8_t)p[i]]);
    if (bytes || t->spec.unk < 0) return;
    e->unknown = true;
    if (e->out->n == e->begin || e->out->v[e->out->n - 1] != t->spec.unk)
        token_ids_add(e->out, t->spec.unk);
}

static bool starts_with_space(const char *p, size_t n) {
    return (n > 0 && *p == ' ') || (n >= 3 && memcmp(p, METASPACE_CHAR, 3) == 0);
}

static void spaces_escape(struct encoder *e, const char *text, size_t len, bool first) {
    struct buf *b = &e->text;
    b->len = 0;
    if (first && e->t->spec.add_space_prefix &&
        !(e->t->prefix_unless_space && starts_with_space(text, len)))
        buf_puts(b, METASPACE_CHAR);
    for (size_t i = 0, n; i < len; i += n) {
        const char *space = memchr(text + i, ' ', len - i);
        n = space ? (size_t)(space - text) - i : len - i;
        buf_add(b, text + i, n);
        if (!space) break;
        buf_puts(b, METASPACE_CHAR);
        n++;
    }
}

/* Encodes a part of the fragment; no merge crosses the ends of the part. */
static void segment_encode(struct encoder *e, const char *p, size_t len) {
    e->n = 0;
    if (!encoder_reserve(e, (int32_t)len)) return;
    for (size_t i = 0, n; i < len; i += n) {
        n = char_len(p + i, len - i);
        e->offset[e->n] = (int32_t)i;
        e->id[e->n++] = (uint8_t)p[i] < 128 ? e->t->ascii[(uint8_t)p[i]]
                                            : symbol_find_mergeable(e->t, p + i, n);
    }
    encoder_merge(e);
    for (int32_t i = 0; i < e->n; i++) {
        size_t begin = (size_t)e->offset[i], next = i + 1 < e->n ? (size_t)e->offset[i + 1] : len;
        if (e->id[i] >= 0 && e->id[i] < e->t->spec.n)
            token_ids_add(e->out, e->id[i]);
        else
            encoder_byte_fallback(e, p + begin, next - begin);
    }
}

void spm_encode(struct encoder *e, const char *text, size_t len, bool first) {
    bool unigram = e->t->spec.kind == TOKENIZER_UNIGRAM;
    spaces_escape(e, text, len, first);
    const char *p = e->text.data, *end = p + e->text.len;
    encoder_init_cache(e, len);
    e->begin = e->out->n;
    while (p < end) {
        size_t left = (size_t)(end - p);
        size_t n = e->t->splits_words ? word_len(p, left, e->t->spec.split_words) : left;
        encoder_word(e, p, n, unigram ? unigram_viterbi : segment_encode);
        p += n;
    }
}

void spm_decode(const struct tokenizer *t, int32_t id, struct buf *out) {
    const char *p = t->text[id];
    size_t len = (size_t)t->lens[id];
    if (t->spec.types[id] == PIECE_BYTE) {
        char byte = (char)piece_byte(p, t->lens[id]);
        buf_add(out, &byte, 1);
        return;
    }
    for (size_t i = 0; i < len;) {
        bool mark = len - i >= 3 && memcmp(p + i, METASPACE_CHAR, 3) == 0;
        buf_add(out, mark ? " " : p + i, 1);
        i += mark ? 3 : 1;
    }
}

static int merge_order(const void *a, const void *b) {
    const struct spm_merge *x = a, *y = b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    if (x->id != y->id) return x->id < y->id ? -1 : 1;
    return (x->left_len < y->left_len) - (x->left_len > y->left_len);
}

struct spm_merge *spm_merges(const struct tokenizer *t, int32_t *n) {
    struct spm_merge *v = xmalloc(sizeof(*v) * (size_t)(t->pairs.n + 1));
    *n = 0;
    for (uint64_t i = 0; i <= t->pairs.mask; i++) {
        const struct merge_slot *s = &t->pairs.slots[i];
        if (s->key == UINT64_MAX) continue;
        int32_t left = (int32_t)(s->key >> 32), right = (int32_t)(uint32_t)s->key;
        v[(*n)++] = (struct spm_merge){left, right, s->rank, s->id, t->lens[left]};
    }
    qsort(v, (size_t)*n, sizeof(*v), merge_order);
    return v;
}
