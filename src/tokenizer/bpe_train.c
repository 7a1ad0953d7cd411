/*
 * bpe_train: byte-level BPE vocabularies from text.
 *
 * The text is split into words by the tokenizer's own pattern, equal words are stored once with
 * their count, and the most frequent pair of neighbours becomes a token until the vocabulary is
 * full. Of equally frequent pairs the one with the greatest (left, right) bytes is chosen, so the
 * result depends only on the arguments. Special tokens in the text are not part of any word.
 * Training does not shuffle, sample or prune.
 *
 * Counts are updated, not recomputed: a merge visits the words that contain its pair and changes
 * the counts of the neighbouring pairs. The queue is updated lazily:
 *   1. every pair with a count above 0 has a queue entry whose count is at least as large;
 *   2. an entry whose count differs from that of its pair is never used: it is queued again with
 *      the right count, or removed.
 */
#include "tokenizer/internal.h"

#include <stdlib.h>
#include <string.h>

struct word {
    uint32_t first_symbol; /* index in trainer_state.symbols */
    int32_t n;             /* number of symbols left */
    int64_t count;
    const char *text; /* its bytes, borrowed; text_len 0: empty slot of the word table */
    uint32_t text_len;
};
struct pair {
    int32_t left, right;
    int64_t count;
    struct token_ids words; /* indices of words that hold or held the pair, with repeats */
};
struct queue_entry {
    int64_t count;
    int32_t pair;
};
struct token_bytes {
    const char *p;
    int32_t len;
};

struct trainer_state {
    struct arena arena;
    struct tokenizer *splitter; /* specials and bytes only */
    pcre2_match_data *match;
    struct word *words; /* [words_cap] hash table while counting; then an array [n_words] */
    size_t n_words, words_cap;
    struct token_ids symbols;
    struct pair *pairs;
    int32_t n_pairs, pairs_cap;
    int32_t *pair_index; /* open addressing: pair + 1 */
    uint64_t pair_mask;
    struct queue_entry *queue;
    size_t n_queue, queue_cap;
    struct token_bytes *tokens; /* [n_tokens] raw bytes; specials are empty */
    int32_t *token_index;       /* open addressing by bytes: token + 1 */
    uint64_t token_mask;
    int32_t n_tokens, vocab;
    struct buf merges; /* int32 left, right, merged */
};

static struct word *word_slot(struct word *table, size_t cap, const char *p, size_t n) {
    size_t i = hash_fnv1a(p, n) & (cap - 1);
    while (table[i].text_len && (table[i].text_len != n || memcmp(table[i].text, p, n) != 0))
        i = (i + 1) & (cap - 1);
    return &table[i];
}

static void words_grow(struct trainer_state *s) {
    size_t cap = s->words_cap * 2;
    struct word *table = xcalloc(cap, sizeof(*table));
    for (size_t i = 0; i < s->words_cap; i++)
        if (s->words[i].text_len)
            *word_slot(table, cap, s->words[i].text, s->words[i].text_len) = s->words[i];
    free(s->words);
    s->words = table;
    s->words_cap = cap;
}

static void word_count(void *ctx, const char *p, size_t n) {
    struct trainer_state *s = ctx;
    if (s->n_words * 2 >= s->words_cap) words_grow(s);
    struct word *w = word_slot(s->words, s->words_cap, p, n);
    if (w->text_len == 0) {
        w->text = p;
        w->text_len = (uint32_t)n;
        s->n_words++;
    }
    w->count++;
}

static void fragment_count(void *ctx, int32_t id, const char *p, size_t n) {
    struct trainer_state *s = ctx;
    if (id < 0) bpe_split(s->splitter, s->match, p, n, word_count, s);
}

static int word_compare(const void *a, const void *b) {
    const struct word *x = a, *y = b;
    return (x->text > y->text) - (x->text < y->text);
}

/* Sorts the words by first appearance, so that the result does not depend on the hash, and creates
 * their symbols. */
static void words_to_symbols(struct trainer_state *s) {
    size_t n = 0;
    for (size_t i = 0; i < s->words_cap; i++)
        if (s->words[i].text_len) s->words[n++] = s->words[i];
    qsort(s->words, n, sizeof(*s->words), word_compare);
    for (size_t i = 0; i < n; i++) {
        struct word *w = &s->words[i];
        w->first_symbol = (uint32_t)s->symbols.n;
        w->n = (int32_t)w->text_len;
        for (uint32_t k = 0; k < w->text_len; k++)
            token_ids_add(&s->symbols, s->splitter->byte_ids[(uint8_t)w->text[k]]);
    }
}

static int32_t *pair_slot(const struct trainer_state *s, int32_t left, int32_t right) {
    uint64_t key = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
    uint64_t i = (key ^ key >> 29) & s->pair_mask;
    for (; s->pair_index[i]; i = (i + 1) & s->pair_mask) {
        const struct pair *p = &s->pairs[s->pair_index[i] - 1];
        if (p->left == left && p->right == right) break;
    }
    return &s->pair_index[i];
}

static void pairs_grow(struct trainer_state *s) {
    s->pairs_cap = s->pairs_cap ? s->pairs_cap * 2 : 1024;
    s->pairs = xrealloc(s->pairs, sizeof(*s->pairs) * (size_t)s->pairs_cap);
    free(s->pair_index);
    s->pair_index = xcalloc((size_t)s->pairs_cap * 2, sizeof(*s->pair_index));
    s->pair_mask = (uint64_t)s->pairs_cap * 2 - 1;
    for (int32_t i = 0; i < s->n_pairs; i++)
        *pair_slot(s, s->pairs[i].left, s->pairs[i].right) = i + 1;
}

static int32_t pair_find_or_add(struct trainer_state *s, int32_t left, int32_t right) {
    if (s->n_pairs == s->pairs_cap) pairs_grow(s);
    int32_t *slot = pair_slot(s, left, right);
    if (!*slot) {
        s->pairs[s->n_pairs] = (struct pair){.left = left, .right = right};
        *slot = ++s->n_pairs;
    }
    return *slot - 1;
}

static int bytes_compare(struct token_bytes a, struct token_bytes b) {
    int c = memcmp(a.p, b.p, (size_t)MIN(a.len, b.len));
    return c ? c : (a.len > b.len) - (a.len < b.len);
}

static bool queue_entry_precedes(const struct trainer_state *s, struct queue_entry a,
                                 struct queue_entry b) {
    if (a.count != b.count) return a.count > b.count;
    const struct pair *x = &s->pairs[a.pair], *y = &s->pairs[b.pair];
    int c = bytes_compare(s->tokens[x->left], s->tokens[y->left]);
    return (c ? c : bytes_compare(s->tokens[x->right], s->tokens[y->right])) > 0;
}

static void queue_push(struct trainer_state *s, struct queue_entry x) {
    if (s->n_queue == s->queue_cap) {
        s->queue_cap = s->queue_cap ? s->queue_cap * 2 : 1024;
        s->queue = xrealloc(s->queue, sizeof(*s->queue) * s->queue_cap);
    }
    size_t i = s->n_queue++;
    for (; i > 0 && queue_entry_precedes(s, x, s->queue[(i - 1) / 2]); i = (i - 1) / 2)
        s->queue[i] = s->queue[(i - 1) / 2];
    s->queue[i] = x;
}

static struct queue_entry queue_pop(struct trainer_state *s) {
    struct queue_entry top = s->queue[0], last = s->queue[--s->n_queue];
    size_t i = 0;
    for (size_t child = 1; child < s->n_queue; child = 2 * i + 1) {
        if (child + 1 < s->n_queue && queue_entry_precedes(s, s->queue[child + 1], s->queue[child]))
            child++;
        if (!queue_entry_precedes(s, s->queue[child], last)) break;
        s->queue[i] = s->queue[child];
        i = child;
    }
    s->queue[i] = last;
    return top;
}

/* The most frequent pair, or -1 when no pair is left. */
static int32_t queue_pop_best(struct trainer_state *s) {
    while (s->n_queue > 0) {
        struct queue_entry q = queue_pop(s);
        int64_t count = s->pairs[q.pair].count;
        if (q.count == count && count > 0) return q.pair;
        if (q.count > count && count > 0) queue_push(s, (struct queue_entry){count, q.pair});
    }
    return -1;
}

static void pairs_count(struct trainer_state *s) {
    for (size_t i = 0; i < s->n_words; i++) {
        const struct word *w = &s->words[i];
        const int32_t *v = s->symbols.v + w->first_symbol;
        for (int32_t k = 0; k + 1 < w->n; k++) {
            int32_t index = pair_find_or_add(s, v[k], v[k + 1]); /* may move s->pairs */
            struct pair *p = &s->pairs[index];
            p->count += w->count;
            if (p->words.n == 0 || p->words.v[p->words.n - 1] != (int32_t)i)
                token_ids_add(&p->words, (int32_t)i);
        }
    }
    for (int32_t i = 0; i < s->n_pairs; i++)
        queue_push(s, (struct queue_entry){s->pairs[i].count, i});
}

/* Adds `delta` to a pair's count. Pairs whose count increases are collected in `increased` and
 * queued after the merge. */
static void pair_count_add(struct trainer_state *s, int32_t left, int32_t right, int64_t delta,
                           int32_t word, struct token_ids *increased) {
    int32_t i = pair_find_or_add(s, left, right);
    struct pair *p = &s->pairs[i];
    p->count += delta;
    if (delta < 0) return;
    if (p->words.n == 0 || p->words.v[p->words.n - 1] != word) token_ids_add(&p->words, word);
    token_ids_add(increased, i);
}

static void word_apply_merge(struct trainer_state *s, int32_t word, int32_t left, int32_t right,
                             int32_t merged, struct token_ids *increased) {
    struct word *w = &s->words[word];
    int32_t *v = s->symbols.v + w->first_symbol, n = 0;
    for (int32_t i = 0; i < w->n; i++) {
        if (i + 1 >= w->n || v[i] != left || v[i + 1] != right) {
            v[n++] = v[i];
            continue;
        }
        if (n > 0) {
            pair_count_add(s, v[n - 1], left, -w->count, word, increased);
            pair_count_add(s, v[n - 1], merged, w->count, word, increased);
        }
        if (i + 2 < w->n) {
            pair_count_add(s, right, v[i + 2], -w->count, word, increased);
            pair_count_add(s, merged, v[i + 2], w->count, word, increased);
        }
        v[n++] = merged;
        i++;
    }
    w->n = n;
}

/* Two merges with the same result share one token, because the vocabulary has every string once.
 * (No merge gives a single byte.) */
static int32_t token_find_or_add(struct trainer_state *s, struct token_bytes a,
                                 struct token_bytes b) {
    struct token_bytes t = {.len = a.len + b.len};
    char *p = arena_alloc(&s->arena, (size_t)t.len);
    memcpy(p, a.p, (size_t)a.len);
    memcpy(p + a.len, b.p, (size_t)b.len);
    t.p = p;
    uint64_t i = hash_fnv1a(t.p, (size_t)t.len) & s->token_mask;
    for (; s->token_index[i]; i = (i + 1) & s->token_mask)
        if (bytes_compare(s->tokens[s->token_index[i] - 1], t) == 0) return s->token_index[i] - 1;
    s->tokens[s->n_tokens] = t;
    s->token_index[i] = ++s->n_tokens;
    return s->n_tokens - 1;
}

static void pair_apply_merge(struct trainer_state *s, int32_t pair) {
    int32_t left = s->pairs[pair].left, right = s->pairs[pair].right;
    int32_t merged = token_find_or_add(s, s->tokens[left], s->tokens[right]);
    int32_t merge[3] = {left, right, merged};
    struct token_ids words = s->pairs[pair].words, increased = {0};
    buf_add(&s->merges, merge, sizeof(merge));
    s->pairs[pair].words = (struct token_ids){0}; /* the array of pairs may move in the meantime */
    for (int i = 0; i < words.n; i++)
        word_apply_merge(s, words.v[i], left, right, merged, &increased);
    s->pairs[pair].count = 0;
    for (int i = 0; i < increased.n; i++)
        if (s->pairs[increased.v[i]].count > 0)
            queue_push(s, (struct queue_entry){s->pairs[increased.v[i]].count, increased.v[i]});
    token_ids_release(&words);
    token_ids_release(&increased);
}

static void piece_append(struct buf *out, struct token_bytes t) {
    for (int32_t i = 0; i < t.len; i++) {
        char c[4];
        int n = bytes_to_unicode_piece((uint8_t)t.p[i], c);
        buf_add(out, c, (size_t)n);
    }
}

static const char *piece_text(struct trainer_state *s, struct token_bytes a,
                              const struct token_bytes *b) {
    struct buf out = {0};
    piece_append(&out, a);
    if (b) {
        buf_puts(&out, " ");
        piece_append(&out, *b);
    }
    char *text = arena_strdup(&s->arena, out.data);
    buf_release(&out);
    return text;
}

/* Special tokens, then the bytes in GPT-2's order. EOS is <|im_end|> if it is among the special
 * tokens, else the first one. */
static void spec_begin(struct trainer_state *s, struct tokenizer_spec *spec, const char *pre,
                       const char **specials, int n, int n_control) {
    const char **pieces = arena_alloc(&s->arena, sizeof(*pieces) * (size_t)s->vocab);
    int32_t *lens = arena_alloc(&s->arena, sizeof(*lens) * (size_t)s->vocab);
    uint8_t *types = arena_alloc(&s->arena, (size_t)s->vocab);
    *spec = (struct tokenizer_spec){.kind = TOKENIZER_BPE,
                                    .pieces = pieces,
                                    .lens = lens,
                                    .types = types,
                                    .pre = pre ? pre : "gpt-2",
                                    .bos = n > 0 ? 0 : -1,
                                    .eos = n > 0 ? 0 : -1,
                                    .unk = -1};
    s->tokens = arena_alloc(&s->arena, sizeof(*s->tokens) * (size_t)s->vocab);
    for (int i = 0; i < n; i++) {
        if (strcmp(specials[i], "<|im_end|>") == 0) spec->eos = i;
        pieces[i] = specials[i];
        s->tokens[i].p = "";
    }
    for (int i = 0; i < 256; i++) {
        char *byte = arena_alloc(&s->arena, 1);
        *byte = (char)bytes_to_unicode_byte(i);
        s->tokens[n + i] = (struct token_bytes){byte, 1};
        pieces[n + i] = piece_text(s, s->tokens[n + i], NULL);
    }
    s->n_tokens = n + 256;
    spec->n = s->n_tokens;
    for (int i = 0; i < spec->n; i++) {
        lens[i] = (int32_t)strlen(pieces[i]);
        types[i] = i < n_control ? PIECE_CONTROL : i < n ? PIECE_USER : PIECE_NORMAL;
    }
}

static struct tokenizer *spec_finish(struct trainer_state *s, struct tokenizer_spec *spec,
                                     struct error *err) {
    const char **pieces = (const char **)(uintptr_t)spec->pieces;
    int32_t *lens = (int32_t *)(uintptr_t)spec->lens;
    uint8_t *types = (uint8_t *)(uintptr_t)spec->types;
    for (; spec->n < s->n_tokens; spec->n++) {
        pieces[spec->n] = piece_text(s, s->tokens[spec->n], NULL);
        lens[spec->n] = (int32_t)strlen(pieces[spec->n]);
        types[spec->n] = PIECE_NORMAL;
    }
    spec->n_merges = (int32_t)(s->merges.len / (3 * sizeof(int32_t)));
    spec->merges = arena_alloc(&s->arena, sizeof(*spec->merges) * (size_t)(spec->n_merges + 1));
    for (int32_t i = 0; i < spec->n_merges; i++) {
        int32_t m[3];
        memcpy(m, s->merges.data + (size_t)i * sizeof(m), sizeof(m));
        spec->merges[i] = piece_text(s, s->tokens[m[0]], &s->tokens[m[1]]);
    }
    return tokenizer_new(spec, err);
}

static void trainer_release(struct trainer_state *s) {
    for (int32_t i = 0; i < s->n_pairs; i++) token_ids_release(&s->pairs[i].words);
    tokenizer_free(s->splitter);
    pcre2_match_data_free(s->match);
    free(s->words);
    free(s->pairs);
    free(s->pair_index);
    free(s->queue);
    token_ids_release(&s->symbols);
    buf_release(&s->merges);
    arena_release(&s->arena);
}

static int train_arguments_check(size_t len, int32_t vocab, const char **specials, int n,
                                 struct error *err) {
    if (vocab < 256 + n || vocab > 1 << 20)
        return error_set(
            err, ERR_USAGE,
            "a vocabulary of %d is not possible: at least %d (256 bytes and %d specials), "
            "at most %d",
            vocab, 256 + n, n, 1 << 20);
    if (len > INT32_MAX / 4) return error_set(err, ERR_USAGE, "the training text is above 512 MB");
    for (int i = 0; i < n; i++) {
        if (!*specials[i]) return error_set(err, ERR_USAGE, "special token %d is empty", i);
        for (int k = 0; k < i; k++)
            if (strcmp(specials[i], specials[k]) == 0)
                return error_set(err, ERR_USAGE, "special token '%s' is given twice", specials[i]);
    }
    return OK;
}

static int train_run(struct trainer_state *s, const char *text, size_t len, struct error *err) {
    s->match = pcre2_match_data_create(1, NULL);
    CHECK(s->match);
    s->words_cap = 1024;
    s->words = xcalloc(s->words_cap, sizeof(*s->words));
    for (s->token_mask = 1023; s->token_mask < (uint64_t)s->vocab * 2;)
        s->token_mask = s->token_mask * 2 + 1;
    s->token_index = arena_alloc(&s->arena, sizeof(*s->token_index) * (s->token_mask + 1));
    split_special_tokens(s->splitter, text, len, true, fragment_count, s);
    words_to_symbols(s);
    pairs_count(s);
    while (s->n_tokens < s->vocab) {
        int32_t best = queue_pop_best(s);
        if (best < 0)
            return error_set(err, ERR_USAGE,
                             "the text yields %d tokens and not %d: give more text or a smaller "
                             "vocabulary",
                             s->n_tokens, s->vocab);
        pair_apply_merge(s, best);
    }
    return OK;
}

/* One thread is enough: a few MB per second, once per model. */
struct tokenizer *tokenizer_train_bpe(const char *text, size_t len, int32_t vocab, const char *pre,
                                      const char **specials, int n_specials, int n_control,
                                      struct error *err) {
    if (train_arguments_check(len, vocab, specials, n_specials, err) != OK) return NULL;
    struct trainer_state s = {.vocab = vocab};
    struct tokenizer_spec spec;
    struct tokenizer *t = NULL;
    spec_begin(&s, &spec, pre, specials, n_specials, n_control);
    s.splitter = tokenizer_new(&spec, err);
    if (s.splitter && train_run(&s, text, len, err) == OK) t = spec_finish(&s, &spec, err);
    trainer_release(&s);
    return t;
}
