/*
 * tokenizer: the code that all kinds of tokenizer share — the vocabulary and its index, the pair
 * table, added tokens (control, unknown and user-defined tokens, which are matched in the text
 * before anything else), and the outer loops of encoding and decoding.
 *
 * It does not handle patterns, bytes and scores (bpe.c, spm.c, unigram.c), normalisation
 * (normalizer.c) or files (files.c). Two deliberate limits: added tokens do not remove spaces
 * around them, and all of them are matched in the original text, before it is normalised.
 *
 * Invariants: a tokenizer is immutable after tokenizer_new, and every call has its own scratch
 * memory, so any number of threads may use one tokenizer. Text is encoded as control tokens only if
 * the caller passes TOKENIZER_PARSE_SPECIAL.
 */
#include "tokenizer/internal.h"

#include <stdlib.h>
#include <string.h>

void *token_ids_realloc(struct token_ids *s, void *p, size_t size) {
    struct error err;
    void *q = try_realloc(p, size, s->may_fail ? &err : NULL);
    if (!q) s->failed = true;
    return q;
}

void token_ids_add(struct token_ids *s, int32_t id) {
    if (s->n == s->cap) {
        int cap = s->cap ? s->cap * 2 : 64;
        int32_t *v = token_ids_realloc(s, s->v, sizeof(*s->v) * (size_t)cap);
        if (!v) return;
        s->v = v;
        s->cap = cap;
    }
    s->v[s->n++] = id;
}

void token_ids_release(struct token_ids *s) {
    free(s->v);
    *s = (struct token_ids){0};
}

int utf8_len(const char *p, size_t left) {
    const uint8_t *u = (const uint8_t *)p;
    if (left == 0) return 0;
    if (u[0] < 0x80) return 1;
    int n = u[0] >= 0xF0 ? 4 : u[0] >= 0xE0 ? 3 : 2;
    if (u[0] < 0xC2 || u[0] > 0xF4 || left < (size_t)n) return 0;
    for (int i = 1; i < n; i++)
        if ((u[i] & 0xC0) != 0x80) return 0;
    if (u[0] == 0xE0 && u[1] < 0xA0) return 0; /* overlong */
    if (u[0] == 0xED && u[1] > 0x9F) return 0; /* surrogate */
    if (u[0] == 0xF0 && u[1] < 0x90) return 0; /* overlong */
    if (u[0] == 0xF4 && u[1] > 0x8F) return 0; /* above U+10FFFF */
    return n;
}

static uint64_t slots_needed(int64_t n) {
    uint64_t size = 16;
    while (size < (uint64_t)n * 2) size *= 2;
    return size;
}

/* The slot that has this text, or the empty slot in which to store it. */
static int32_t *index_slot(const struct tokenizer *t, const char *p, size_t n) {
    uint64_t i = hash_fnv1a(p, n) & t->index_mask;
    for (; t->index[i]; i = (i + 1) & t->index_mask) {
        int32_t id = t->index[i] - 1;
        if ((size_t)t->lens[id] == n && memcmp(t->text[id], p, n) == 0) break;
    }
    return &t->index[i];
}

/* The index has the lowest id of equal pieces. SPM builds it again after adding symbols. */
void vocab_index_build(struct tokenizer *t) {
    uint64_t size = slots_needed(t->n_symbols);
    t->index = arena_alloc(&t->arena, sizeof(*t->index) * size);
    t->index_mask = size - 1;
    for (int32_t id = 0; id < t->n_symbols; id++) {
        int32_t *slot = index_slot(t, t->text[id], (size_t)t->lens[id]);
        if (!*slot) *slot = id + 1;
    }
}

int32_t vocab_find(const struct tokenizer *t, const char *p, size_t n) {
    return *index_slot(t, p, n) - 1;
}

void merge_table_init(struct merge_table *p, struct arena *a, int64_t max_pairs) {
    uint64_t size = slots_needed(max_pairs);
    p->slots = arena_alloc(a, sizeof(*p->slots) * size);
    p->filter = arena_alloc(a, size / 2);
    p->mask = size - 1;
    p->n = 0;
    for (uint64_t i = 0; i < size; i++) p->slots[i].key = UINT64_MAX;
}

static uint64_t pair_hash(uint64_t key) {
    key *= 0x9E3779B97F4A7C15u;
    return key ^ (key >> 29);
}

static struct merge_slot *pair_slot(const struct merge_table *p, uint64_t key) {
    uint64_t i = pair_hash(key) >> 2 & p->mask;
    while (p->slots[i].key != key && p->slots[i].key != UINT64_MAX) i = (i + 1) & p->mask;
    return &p->slots[i];
}

void merge_table_add(struct merge_table *p, int32_t left, int32_t right, int32_t rank, int32_t id) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    struct merge_slot *s = pair_slot(p, key);
    if (s->key == key) return;
    *s = (struct merge_slot){key, rank, id};
    uint64_t bit = pair_hash(key) & (p->mask * 4 + 3);
    p->filter[bit / 64] |= (uint64_t)1 << bit % 64;
    p->n++;
}

const struct merge_slot *merge_table_find(const struct merge_table *p, int32_t left,
                                          int32_t right) {
    if (left < 0 || right < 0) return NULL;
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint64_t bit = pair_hash(key) & (p->mask * 4 + 3);
    if (!(p->filter[bit / 64] >> bit % 64 & 1)) return NULL;
    struct merge_slot *s = pair_slot(p, key);
    return s->key == UINT64_MAX ? NULL : s;
}

static int merge_add(struct tokenizer *t, int32_t rank, struct buf *joined, struct error *err) {
    const char *m = t->spec.merges[rank];
    const char *space = *m ? strchr(m + 1, ' ') : NULL; /* a piece may be a space itself */
    if (!space || !space[1])
        return error_set(err, ERR_FORMAT, "merge %d is not a pair: '%.80s'", rank, m);
    size_t left_len = (size_t)(space - m), right_len = strlen(space + 1);
    joined->len = 0;
    buf_add(joined, m, left_len);
    buf_add(joined, space + 1, right_len);
    int32_t left = vocab_find(t, m, left_len), right = vocab_find(t, space + 1, right_len);
    int32_t id = vocab_find(t, joined->data, joined->len);
    if (left < 0 || right < 0 || id < 0)
        return error_set(err, ERR_FORMAT, "merge %d ('%.80s') has no token for '%.80s'", rank, m,
                         left < 0    ? m
                         : right < 0 ? space + 1
                                     : joined->data);
    merge_table_add(&t->pairs, left, right, rank, id);
    return OK;
}

int merge_table_build(struct tokenizer *t, struct error *err) {
    struct buf joined = {0};
    int rc = OK;
    merge_table_init(&t->pairs, &t->arena, t->spec.n_merges);
    for (int32_t i = 0; i < t->spec.n_merges && rc == OK; i++) rc = merge_add(t, i, &joined, err);
    buf_release(&joined);
    return rc;
}

static int spec_check_id(const struct tokenizer_spec *s, const char *what, int32_t id,
                         struct error *err) {
    if (id >= -1 && id < s->n) return OK;
    return error_set(err, ERR_FORMAT, "the %s token is %d, but the vocabulary has %d tokens", what,
                     id, s->n);
}

static int spec_check(const struct tokenizer_spec *s, struct error *err) {
    if (s->n <= 0) return error_set(err, ERR_FORMAT, "the vocabulary is empty");
    if (s->kind != TOKENIZER_BPE && !s->scores)
        return error_set(err, ERR_FORMAT, "a sentencepiece vocabulary needs scores");
    if (spec_check_id(s, "bos", s->bos, err) || spec_check_id(s, "eos", s->eos, err) ||
        spec_check_id(s, "unk", s->unk, err))
        return err->code;
    for (int32_t i = 0; i < s->n; i++) {
        if (s->lens[i] < 0) return error_set(err, ERR_FORMAT, "token %d has a negative length", i);
        if (s->types && (s->types[i] < PIECE_NORMAL || s->types[i] > PIECE_BYTE))
            return error_set(err, ERR_FORMAT, "token %d has the unknown type %d", i, s->types[i]);
        if (s->scores && s->scores[i] != s->scores[i])
            return error_set(err, ERR_FORMAT, "token %d's score is not a number", i);
    }
    return OK;
}

/* One allocation for all pieces, each followed by a NUL: separate ones would take 64 bytes each. */
static void spec_copy_pieces(struct tokenizer *t, const struct tokenizer_spec *s) {
    size_t total = 0, n = (size_t)s->n;
    for (size_t i = 0; i < n; i++) total += (size_t)s->lens[i] + 1;
    char *text = arena_alloc(&t->arena, total);
    t->text = arena_alloc(&t->arena, sizeof(*t->text) * n);
    t->lens = arena_alloc(&t->arena, sizeof(*t->lens) * n);
    for (size_t i = 0; i < n; i++) {
        memcpy(text, s->pieces[i], (size_t)s->lens[i]);
        t->text[i] = text;
        t->lens[i] = s->lens[i];
        text += (size_t)s->lens[i] + 1;
    }
    t->n_symbols = s->n;
}

static void spec_copy_merges(struct tokenizer *t, const struct tokenizer_spec *s) {
    size_t total = 0, n = (size_t)s->n_merges;
    for (size_t i = 0; i < n; i++) total += strlen(s->merges[i]) + 1;
    char *text = arena_alloc(&t->arena, total + 1);
    const char **merges = arena_alloc(&t->arena, sizeof(*merges) * (n + 1));
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(s->merges[i]) + 1;
        memcpy(text, s->merges[i], len);
        merges[i] = text;
        text += len;
    }
    t->spec.merges = merges;
}

/* ChatML's markers are control tokens even if a file has them as user-defined tokens, so that the
 * text of a message cannot start or end a turn. */
static uint8_t piece_type_of(const struct tokenizer *t, const struct tokenizer_spec *s,
                             int32_t id) {
    uint8_t type = s->types ? s->types[id] : PIECE_NORMAL;
    bool is_chatml = type == PIECE_USER && (strcmp(t->text[id], "<|im_start|>") == 0 ||
                                            strcmp(t->text[id], "<|im_end|>") == 0);
    return is_chatml ? PIECE_CONTROL : type;
}

static void spec_copy(struct tokenizer *t, const struct tokenizer_spec *s) {
    t->spec = *s;
    spec_copy_pieces(t, s);
    spec_copy_merges(t, s);
    uint8_t *types = arena_alloc(&t->arena, (size_t)s->n);
    for (int32_t i = 0; i < s->n; i++) types[i] = piece_type_of(t, s, i);
    t->spec.types = types;
    if (s->scores) {
        float *scores = arena_alloc(&t->arena, sizeof(*scores) * (size_t)s->n);
        memcpy(scores, s->scores, sizeof(*scores) * (size_t)s->n);
        t->spec.scores = scores;
    }
    t->spec.pre = arena_strdup(&t->arena, s->pre ? s->pre : "");
    if (s->normalizer) t->spec.normalizer = arena_strdup(&t->arena, s->normalizer);
}

static bool is_added_token(const struct tokenizer *t, int32_t id) {
    uint8_t type = t->spec.types[id];
    return t->lens[id] > 0 && (type == PIECE_UNKNOWN || type == PIECE_CONTROL ||
                               (type == PIECE_USER && !t->spec.user_pieces));
}

struct token_key {
    const char *text;
    int32_t len, id;
};

static int token_key_compare(const void *a, const void *b) {
    const struct token_key *x = a, *y = b;
    int order = memcmp(x->text, y->text, (size_t)MIN(x->len, y->len));
    if (order == 0) order = (x->len > y->len) - (x->len < y->len);
    return order ? order : (x->id > y->id) - (x->id < y->id);
}

static int added_tokens_build(struct tokenizer *t, struct error *err) {
    struct token_key *keys = try_calloc((size_t)t->spec.n, sizeof(*keys), err);
    if (!keys) return err->code;
    int32_t n = 0;
    for (int32_t id = 0; id < t->spec.n; id++)
        if (is_added_token(t, id)) keys[n++] = (struct token_key){t->text[id], t->lens[id], id};
    qsort(keys, (size_t)n, sizeof(*keys), token_key_compare);
    t->added_tokens = arena_alloc(&t->arena, sizeof(*t->added_tokens) * (size_t)(n + 1));
    for (int32_t i = 0; i < n; i++) {
        t->added_tokens[i] = keys[i].id;
        t->added_begin[(uint8_t)*keys[i].text + 1] = i + 1;
    }
    for (int c = 1; c <= 256; c++)
        t->added_begin[c] = MAX(t->added_begin[c], t->added_begin[c - 1]);
    free(keys);
    return OK;
}

/*
 * The bytes that a tokenizer's tables take from its arena: pieces and merges with their texts,
 * index, and pairs. A SentencePiece vocabulary has one pair for each position at which a piece can
 * be split. Reserving this bound first makes lack of memory an error instead of the end of the
 * process.
 */
static size_t spec_bytes(const struct tokenizer_spec *s) {
    size_t n = (size_t)s->n, text = n, merges = (size_t)s->n_merges, slack = 32 * 64;
    for (size_t i = 0; i < n; i++) text += (size_t)s->lens[i];
    int64_t pairs =
        s->n_merges > 0 || s->kind == TOKENIZER_BPE ? s->n_merges : (int64_t)text - s->n;
    size_t tables = slots_needed(s->n) * sizeof(int32_t) +
                    slots_needed(pairs) * (sizeof(struct merge_slot) + 1) +
                    n * (sizeof(char *) + 3 * sizeof(int32_t) + 1);
    for (size_t i = 0; i < merges; i++) text += strlen(s->merges[i]) + 1 + sizeof(char *);
    return tables + text + slack;
}

struct tokenizer *tokenizer_new(const struct tokenizer_spec *spec, struct error *err) {
    if (spec_check(spec, err) != OK) return NULL;
    struct tokenizer *t = xcalloc(1, sizeof(*t));
    int rc = arena_reserve(&t->arena, spec_bytes(spec), err);
    if (rc == OK) {
        spec_copy(t, spec);
        vocab_index_build(t);
        rc = added_tokens_build(t, err);
    }
    if (rc == OK) rc = spec->kind == TOKENIZER_BPE ? bpe_prepare(t, err) : spm_prepare(t, err);
    if (rc == OK && spec->normalizer && !(t->norm = normalizer_new(spec->normalizer, err)))
        rc = err->code;
    t->spec.pieces = t->text;
    t->spec.lens = t->lens;
    if (rc == OK) return t;
    tokenizer_free(t);
    return NULL;
}

void tokenizer_free(struct tokenizer *t) {
    if (!t) return;
    if (t->chat_free) t->chat_free(t->chat);
    pcre2_code_free(t->code);
    normalizer_free(t->norm);
    trie_free(t->trie);
    arena_release(&t->arena);
    free(t);
}

int32_t tokenizer_vocab_size(const struct tokenizer *t) {
    return t->spec.n;
}

int32_t tokenizer_bos(const struct tokenizer *t) {
    return t->spec.bos;
}

int32_t tokenizer_eos(const struct tokenizer *t) {
    return t->spec.eos;
}

int32_t tokenizer_first_token(const struct tokenizer *t) {
    return tokenizer_bos(t) >= 0 ? tokenizer_bos(t) : tokenizer_eos(t);
}

void tokenizer_encode_prompt(const struct tokenizer *t, const char *text, struct token_ids *out) {
    int32_t first = tokenizer_first_token(t);
    tokenizer_encode(t, text, strlen(text), TOKENIZER_ADD_BOS | TOKENIZER_PARSE_SPECIAL, out);
    if (out->n == 0 && first >= 0) token_ids_add(out, first);
}

bool tokenizer_add_bos(const struct tokenizer *t) {
    return t->spec.add_bos && t->spec.bos >= 0;
}

bool tokenizer_is_special(const struct tokenizer *t, int32_t id) {
    if (id < 0 || id >= t->spec.n) return false;
    return t->spec.types[id] == PIECE_CONTROL || t->spec.types[id] == PIECE_UNKNOWN;
}

const char *tokenizer_id_to_piece(const struct tokenizer *t, int32_t id, int *len) {
    CHECK(id >= 0 && id < t->spec.n);
    if (len) *len = t->lens[id];
    return t->text[id];
}

int32_t tokenizer_piece_to_id(const struct tokenizer *t, const char *piece) {
    int32_t id = vocab_find(t, piece, strlen(piece));
    return id < t->spec.n ? id : -1;
}

const struct tokenizer_spec *tokenizer_get_spec(const struct tokenizer *t) {
    return &t->spec;
}

/* The tokens added_tokens[lo, hi) begin with the same `n_common` bytes. Returns the index of the
 * first token whose next byte is `c`, or with `after` the index after the last such token. Tokens
 * without a next byte come first. */
static int32_t added_token_bound(const struct tokenizer *t, int32_t lo, int32_t hi,
                                 int32_t n_common, uint8_t c, bool after) {
    while (lo < hi) {
        int32_t mid = lo + (hi - lo) / 2, id = t->added_tokens[mid];
        int byte = t->lens[id] > n_common ? (uint8_t)t->text[id][n_common] : -1;
        if (byte < c || (after && byte == c))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The longest added token with which the text begins, or -1; of equal tokens the lowest id.
 * `control`: control and unknown tokens count too. Each byte of text narrows the range of tokens
 * with the same beginning by binary search, so that many such tokens take hardly more time than a
 * few. */
static int32_t added_token_at(const struct tokenizer *t, const char *p, size_t left, bool control) {
    int32_t best = -1, lo = t->added_begin[(uint8_t)*p], hi = t->added_begin[(uint8_t)*p + 1];
    for (int32_t n_common = 1; lo < hi; n_common++) {
        bool found = false;
        for (; lo < hi && t->lens[t->added_tokens[lo]] == n_common; lo++) {
            int32_t id = t->added_tokens[lo];
            if (found || (!control && t->spec.types[id] != PIECE_USER)) continue;
            best = id;
            found = true;
        }
        if ((size_t)n_common >= left) break;
        lo = added_token_bound(t, lo, hi, n_common, (uint8_t)p[n_common], false);
        hi = added_token_bound(t, lo, hi, n_common, (uint8_t)p[n_common], true);
    }
    return best;
}

void split_special_tokens(const struct tokenizer *t, const char *text, size_t len, bool control,
                          fragment_fn fn, void *ctx) {
    size_t begin = 0, i = 0;
    while (i < len) {
        int32_t id = added_token_at(t, text + i, len - i, control);
        if (id < 0) {
            i++;
            continue;
        }
        if (i > begin) fn(ctx, -1, text + begin, i - begin);
        fn(ctx, id, text + i, (size_t)t->lens[id]);
        begin = i += (size_t)t->lens[id];
    }
    if (len > begin) fn(ctx, -1, text + begin, len - begin);
}

/* `first`: the fragment begins a text or follows a special token, where some tokenizers add a
 * space. */
struct fragment_state {
    struct encoder *e;
    bool first;
};

enum { TEXT_LIMIT = INT32_MAX / 4 }; /* positions are int32, and ▁ takes three bytes */

static void text_encode(struct encoder *e, const char *p, size_t n, bool first) {
    if (e->t->norm) {
        normalizer_apply(e->t->norm, p, n, &e->normal, &e->scratch);
        p = e->normal.data;
        n = e->normal.len;
    }
    for (size_t n_part; n > 0; p += n_part, n -= n_part, first = false) {
        n_part = n;
        if (n_part > TEXT_LIMIT) /* only after normalisation: split between two characters */
            for (n_part = TEXT_LIMIT;
                 n_part > TEXT_LIMIT - 4 && ((uint8_t)p[n_part] & 0xC0) == 0x80;)
                n_part--;
        if (e->t->spec.kind == TOKENIZER_BPE)
            bpe_encode(e, p, n_part, first);
        else
            spm_encode(e, p, n_part, first);
    }
}

static void fragment_encode(void *ctx, int32_t id, const char *p, size_t n) {
    struct fragment_state *s = ctx;
    if (id >= 0)
        token_ids_add(s->e->out, id);
    else
        text_encode(s->e, p, n, s->first);
    s->first = id >= 0 && !s->e->t->prefix_text_only;
}

static void encoder_release(struct encoder *e) {
    free(e->id);
    free(e->offset);
    free(e->prev);
    free(e->next);
    free(e->heap);
    free(e->cache);
    free(e->lattice);
    buf_release(&e->text);
    buf_release(&e->normal);
    buf_release(&e->scratch);
    pcre2_match_data_free(e->match);
}

void tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, int flags,
                      struct token_ids *out) {
    CHECK(len <= TEXT_LIMIT);
    struct encoder e = {.t = t, .out = out};
    struct fragment_state s = {&e, !(flags & TOKENIZER_NO_PREFIX_SPACE)};
    if ((flags & TOKENIZER_ADD_BOS) && tokenizer_add_bos(t)) token_ids_add(out, t->spec.bos);
    split_special_tokens(t, text, len, flags & TOKENIZER_PARSE_SPECIAL, fragment_encode, &s);
    if ((flags & TOKENIZER_ADD_EOS) && t->spec.add_eos && t->spec.eos >= 0)
        token_ids_add(out, t->spec.eos);
    encoder_release(&e);
}

/* A model's head may be wider than the vocabulary: ids beyond the vocabulary have no text. */
void tokenizer_decode_token(const struct tokenizer *t, int32_t id, bool specials, struct buf *out) {
    if (id < 0 || id >= t->spec.n) return;
    if (tokenizer_is_special(t, id)) {
        if (specials) buf_add(out, t->text[id], (size_t)t->lens[id]);
    } else if (t->spec.types[id] == PIECE_USER && !t->spec.user_pieces) {
        buf_add(out, t->text[id], (size_t)t->lens[id]);
    } else if (t->spec.kind == TOKENIZER_BPE) {
        bpe_decode(t, id, out);
    } else {
        spm_decode(t, id, out);
    }
}

/* Removes the space that encoding added at the beginning and after added tokens. */
void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, int n, bool specials,
                      struct buf *out) {
    tokenizer_decode_offsets(t, ids, n, specials, out, NULL);
}

void tokenizer_decode_offsets(const struct tokenizer *t, const int32_t *ids, int n, bool specials,
                              struct buf *out, int32_t *ends) {
    bool prefixed = t->spec.kind != TOKENIZER_BPE && t->spec.add_space_prefix, first = prefixed;
    for (int i = 0; i < n; i++) {
        size_t begin = out->len;
        if (ends) ends[i] = (int32_t)begin;
        if (ids[i] < 0 || ids[i] >= t->spec.n) continue;
        tokenizer_decode_token(t, ids[i], specials, out);
        if (is_added_token(t, ids[i]) && ids[i] != t->spec.unk) { /* the unknown token is text */
            first = prefixed && (!t->prefix_text_only || (first && ids[i] == t->spec.bos));
        } else if (out->len > begin) {
            if (first && out->data[begin] == ' ') {
                memmove(out->data + begin, out->data + begin + 1,
                        out->len - begin); /* with the NUL */
                out->len--;
            }
            first = false;
        }
        if (ends) ends[i] = (int32_t)out->len;
    }
}

bool tokenizer_adds_space_once(const struct tokenizer *t) {
    return t->prefix_text_only;
}

void tokenizer_attach_template(struct tokenizer *t, struct chat_template *c,
                               void (*release)(struct chat_template *)) {
    if (t->chat_free) t->chat_free(t->chat);
    t->chat = c;
    t->chat_free = release;
}

struct chat_template *tokenizer_get_template(const struct tokenizer *t) {
    return t->chat;
}
