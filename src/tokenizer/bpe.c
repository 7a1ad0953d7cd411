/*
 * bpe: byte-level BPE (the GPT-2 family) and the merge loop that SPM uses too.
 *
 * A PCRE2 pattern splits a fragment into words. Each byte of a word becomes one symbol, and the
 * merge of lowest rank is applied, the leftmost first, until no merge is left. In a short word that
 * merge is found by a scan; a long word uses a heap over a linked list, so that a megabyte without
 * a space still takes O(n log n). The vocabulary writes bytes as GPT-2's printable characters. A
 * byte that the vocabulary lacks gives no token, as in the reference (SmolLM and StarCoder lack
 * some bytes that UTF-8 uses rarely or never).
 *
 * Whole words are looked up in the vocabulary only if the model sets ignore_merges, because the
 * result could otherwise differ from that of the merges.
 *
 * Invariant: words cover the fragment without gap or overlap for any pattern. Text that the pattern
 * skips, cannot match or on which it exceeds PCRE2's limits is a word too, and so is a run of bytes
 * that is not UTF-8.
 */
#include "tokenizer/internal.h"

#include <stdlib.h>
#include <string.h>

static bool byte_is_printable(int b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
}

/* The unprintable bytes, 0 to 32, 127 to 160 and 173, take U+0100, U+0101, … in order. */
static int byte_to_char(int b) {
    if (byte_is_printable(b)) return b;
    return b <= 32 ? 256 + b : b <= 160 ? 256 + 33 + b - 127 : 256 + 67;
}

static int char_to_byte(int c) {
    if (c < 256) return byte_is_printable(c) ? c : -1;
    c -= 256;
    return c < 33 ? c : c < 67 ? c - 33 + 127 : c == 67 ? 173 : -1;
}

int bytes_to_unicode_byte(int i) {
    for (int b = 0; b < 256; b++)
        if (byte_is_printable(b) && i-- == 0) return b;
    for (int b = 0; b < 256; b++)
        if (!byte_is_printable(b) && i-- == 0) return b;
    return -1;
}

int bytes_to_unicode_piece(int byte, char out[4]) {
    int c = byte_to_char(byte), n = 0;
    if (c >= 128) out[n++] = (char)(0xC0 | c >> 6);
    out[n++] = (char)(c >= 128 ? 0x80 | (c & 0x3F) : c);
    out[n] = 0;
    return n;
}

/* A piece with a character outside GPT-2's alphabet does not represent bytes: its text is written
 * unchanged, as in the reference. */
void bpe_decode(const struct tokenizer *t, int32_t id, struct buf *out) {
    const uint8_t *p = (const uint8_t *)t->text[id];
    size_t start = out->len;
    for (int32_t i = 0; i < t->lens[id];) {
        int n = utf8_len((const char *)p + i, (size_t)(t->lens[id] - i));
        int byte = n == 1   ? char_to_byte(p[i])
                   : n == 2 ? char_to_byte((p[i] & 0x1F) << 6 | (p[i + 1] & 0x3F))
                            : -1;
        if (byte < 0) {
            out->len = start;
            buf_add(out, t->text[id], (size_t)t->lens[id]);
            return;
        }
        char c = (char)byte;
        buf_add(out, &c, 1);
        i += n;
    }
}

#define CONTRACTIONS "'s|'t|'re|'ve|'m|'ll|'d"
#define PATTERN_GPT2 CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
/* The reference splits at digits first and applies GPT-2's pattern to the text between them. This
 * pattern does the same in one step: white space before a digit is treated as at the end of text.
 */
#define PATTERN_DIGITS                                                                             \
    CONTRACTIONS "|\\p{N}| ?\\p{L}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?![^\\s\\p{N}])|\\s+"
#define PATTERN_LLAMA3(digits)                                                                     \
    "(?i:" CONTRACTIONS ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits                                  \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define PATTERN_CASED(end, digits)                                                                 \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" end "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER     \
    "*" end "|" digits "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

struct pretokenizer {
    const char *name; /* GGUF's tokenizer.ggml.pre; of rows with the same pattern and
                         ignore_merges, pretokenizer_name returns the first */
    const char *pattern;
    bool ignore_merges;
};
static const struct pretokenizer pretokenizer_table[] = {
    {"gpt-2", PATTERN_GPT2, false},
    {"phi-2", PATTERN_GPT2, false},
    {"mpt", PATTERN_GPT2, false},
    {"olmo", PATTERN_GPT2, false},
    {"jais", PATTERN_GPT2, false},
    {"smollm", PATTERN_DIGITS, false},
    {"starcoder", PATTERN_DIGITS, false},
    {"refact", PATTERN_DIGITS, false},
    {"command-r", PATTERN_DIGITS, false},
    {"codeshell", PATTERN_DIGITS, false},
    {"exaone", PATTERN_DIGITS, false},
    {"llama-bpe", PATTERN_LLAMA3("\\p{N}{1,3}"), true},
    {"llama3", PATTERN_LLAMA3("\\p{N}{1,3}"), true},
    {"llama-v3", PATTERN_LLAMA3("\\p{N}{1,3}"), true},
    {"dbrx", PATTERN_LLAMA3("\\p{N}{1,3}"), false},
    {"smaug-bpe", PATTERN_LLAMA3("\\p{N}{1,3}"), false},
    {"qwen2", PATTERN_LLAMA3("\\p{N}"), false},
    {"stablelm2", PATTERN_LLAMA3("\\p{N}"), false},
    {"deepseek-r1-qwen", PATTERN_LLAMA3("\\p{N}"), false},
    {"gpt-4o", PATTERN_CASED("(?i:" CONTRACTIONS ")?", "\\p{N}{1,3}"), false},
    {"llama4", PATTERN_CASED("(?i:" CONTRACTIONS ")?", "\\p{N}{1,3}"), false},
    {"tekken", PATTERN_CASED("", "\\p{N}"), true},
};

static const struct pretokenizer *pretokenizer_find(const char *pre) {
    for (size_t i = 0; i < ARRAY_LEN(pretokenizer_table); i++)
        if (strcmp(pretokenizer_table[i].name, pre) == 0) return &pretokenizer_table[i];
    return NULL;
}

const char *pretokenizer_pattern(const char *pre) {
    const struct pretokenizer *row = pretokenizer_find(pre);
    if (row) return row->pattern;
    return strpbrk(pre, "\\[") ? pre : NULL;
}

const char *pretokenizer_name(const char *pattern, bool ignore_merges) {
    for (size_t i = 0; i < ARRAY_LEN(pretokenizer_table); i++)
        if (strcmp(pretokenizer_table[i].pattern, pattern) == 0 &&
            pretokenizer_table[i].ignore_merges == ignore_merges)
            return pretokenizer_table[i].name;
    return pattern;
}

/* Unicode's White_Space. PCRE2's own \s also contains U+180E, which is not white space in current
 * Unicode nor in the references. */
#define UNICODE_SPACES                                                                             \
    "\\t-\\r "                                                                                     \
    "\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"

/* Replaces \s and \S by explicit classes, so that a pattern is the same in every version of PCRE2.
 */
static void pattern_expand(const char *p, struct buf *out) {
    bool in_class = false;
    for (; *p; p++) {
        if (*p == '\\' && p[1]) {
            p++;
            if (*p == 's')
                buf_puts(out, in_class ? UNICODE_SPACES : "[" UNICODE_SPACES "]");
            else if (*p == 'S' && !in_class)
                buf_puts(out, "[^" UNICODE_SPACES "]");
            else
                buf_add(out, p - 1, 2);
            continue;
        }
        buf_add(out, p, 1);
        if (*p == '[' && !in_class) {
            in_class = true;
            if (p[1] == '^') buf_add(out, ++p, 1);
            if (p[1] == ']') buf_add(out, ++p, 1); /* first in a class it is itself */
        } else if (*p == ']') {
            in_class = false;
        }
    }
}

pcre2_code *tokenizer_regex_compile(const char *pattern, uint32_t options, struct error *err) {
    struct buf b = {0};
    buf_puts(&b, "");
    pattern_expand(pattern, &b);
    int code;
    PCRE2_SIZE offset;
    pcre2_code *compiled = pcre2_compile((PCRE2_SPTR)b.data, b.len,
                                         PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | options,
                                         &code, &offset, NULL);
    buf_release(&b);
    if (compiled) { /* where JIT is not allowed, matching is interpreted */
        pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
        return compiled;
    }
    PCRE2_UCHAR text[160];
    pcre2_get_error_message(code, text, sizeof(text));
    error_set(err, ERR_FORMAT, "the pattern '%.200s' does not compile: %s", pattern, (char *)text);
    return NULL;
}

/*
 * GGUF files that are older than tokenizer.ggml.pre, or whose converter did not know the model,
 * have no name or "default". Such files were used with GPT-2's pattern when they were written,
 * although another one may be right.
 */
static int pretokenizer_prepare(struct tokenizer *t, struct error *err) {
    const char *pre = t->spec.pre;
    if (!*pre || strcmp(pre, "default") == 0) {
        log_warn(
            "the tokenizer does not name its pre-tokenizer: using 'gpt-2', and token boundaries "
            "may be wrong");
        t->spec.pre = pre = "gpt-2";
    }
    const char *pattern = pretokenizer_pattern(pre);
    if (!pattern)
        return error_set(
            err, ERR_FORMAT,
            "unknown pre-tokenizer '%.80s' (known are gpt-2, llama-bpe, qwen2, smollm, "
            "starcoder and others like them)",
            pre);
    const struct pretokenizer *row = pretokenizer_find(pre);
    if (row && row->ignore_merges) t->spec.ignore_merges = true;
    t->code = tokenizer_regex_compile(pattern, 0, err);
    return t->code ? OK : error_wrap(err, "pre-tokenizer");
}

static int byte_pairs_build(struct tokenizer *t, struct error *err) {
    t->byte_pairs = arena_try_alloc(&t->arena, sizeof(*t->byte_pairs) << 16, err);
    if (!t->byte_pairs) return err->code;
    for (int i = 0; i < 1 << 16; i++) {
        const struct merge_slot *s =
            merge_table_find(&t->pairs, t->byte_ids[i >> 8], t->byte_ids[i & 255]);
        t->byte_pairs[i] =
            s ? (struct byte_pair){s->rank, s->id} : (struct byte_pair){INT32_MAX, -1};
    }
    return OK;
}

int bpe_prepare(struct tokenizer *t, struct error *err) {
    if (pretokenizer_prepare(t, err) != OK) return err->code;
    int n_known = 0;
    for (int b = 0; b < 256; b++) {
        char piece[4];
        int n = bytes_to_unicode_piece(b, piece);
        t->byte_ids[b] = vocab_find(t, piece, (size_t)n);
        n_known += t->byte_ids[b] >= 0;
    }
    if (n_known == 0)
        return error_set(err, ERR_FORMAT,
                         "the vocabulary holds no byte: it is not a byte-level one");
    if (merge_table_build(t, err) != OK) return err->code;
    return byte_pairs_build(t, err);
}

/* The next match at or after `pos`; false when nothing matches or the pattern exhausts PCRE2's
 * limits. Calling JIT's code directly saves half the time of a call; without such code the call
 * returns PCRE2_ERROR_JIT_BADOPTION. */
static bool word_match(const struct tokenizer *t, pcre2_match_data *md, const char *p, size_t n,
                       size_t pos) {
    int rc = pcre2_jit_match(t->code, (PCRE2_SPTR)p, n, pos, PCRE2_NO_UTF_CHECK, md, NULL);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT || rc == PCRE2_ERROR_JIT_BADOPTION)
        rc = pcre2_match(t->code, (PCRE2_SPTR)p, n, pos, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, md,
                         NULL);
    return rc >= 0;
}

static void split_utf8(const struct tokenizer *t, pcre2_match_data *md, const char *p, size_t n,
                       word_fn fn, void *ctx) {
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(md);
    size_t pos = 0;
    while (pos < n && word_match(t, md, p, n, pos)) {
        size_t begin = range[0], end = range[1];
        if (begin < pos || end < begin) break; /* \K may do that */
        if (begin > pos) fn(ctx, p + pos, begin - pos);
        if (end == begin && begin < n)
            end += (size_t)utf8_len(p + begin, n - begin); /* an empty match must advance */
        if (end > begin) fn(ctx, p + begin, end - begin);
        pos = end;
    }
    if (pos < n) fn(ctx, p + pos, n - pos);
}

/* The length of the valid UTF-8 at p; eight bytes of ASCII at a time. */
static size_t utf8_prefix_len(const char *p, size_t len) {
    size_t i = 0;
    while (i < len) {
        uint64_t eight;
        if (len - i >= 8 && (memcpy(&eight, p + i, 8), !(eight & 0x8080808080808080u))) {
            i += 8;
            continue;
        }
        int n = utf8_len(p + i, len - i);
        if (n == 0) break;
        i += (size_t)n;
    }
    return i;
}

void bpe_split(const struct tokenizer *t, pcre2_match_data *match, const char *text, size_t len,
               word_fn fn, void *ctx) {
    for (size_t i = 0; i < len;) {
        size_t begin = i;
        i += utf8_prefix_len(text + i, len - i);
        if (i > begin) split_utf8(t, match, text + begin, i - begin, fn, ctx);
        begin = i;
        while (i < len && utf8_len(text + i, len - i) == 0) i++;
        if (i > begin) fn(ctx, text + begin, i - begin);
    }
}

enum { SHORT_WORD = 48 };

/* Ordered by rank, then by position. An entry is stale when the two symbols at its position are no
 * longer left_id and right_id. */
struct merge_entry {
    uint64_t key; /* rank << 32 | position of the left symbol */
    int32_t left_id, right_id;
};

/* Allocates n elements; the old contents are lost. */
static bool scratch_reserve(struct encoder *e, int32_t **p, size_t n) {
    free(*p);
    *p = token_ids_realloc(e->out, NULL, sizeof **p * n);
    return *p != NULL;
}

bool encoder_reserve(struct encoder *e, int32_t n) {
    if (n <= e->cap) return true;
    e->cap = 0;
    size_t cap = (size_t)MAX(n, 256);
    if (!scratch_reserve(e, &e->id, cap) || !scratch_reserve(e, &e->offset, cap)) return false;
    e->cap = (int32_t)cap;
    return true;
}

static bool encoder_reserve_long(struct encoder *e) {
    if (e->n <= e->long_cap) return true;
    size_t n = (size_t)e->n;
    e->long_cap = 0;
    free(e->heap);
    e->heap = token_ids_realloc(e->out, NULL,
                                sizeof(*e->heap) * n * 3); /* n - 1 at first, two for every merge */
    if (!e->heap || !scratch_reserve(e, &e->prev, n) || !scratch_reserve(e, &e->next, n))
        return false;
    e->long_cap = e->n;
    return true;
}

/* A symbol, and its merge with the right neighbour: the token merged_id at `rank`, or INT32_MAX. */
struct symbol_link {
    int32_t id, offset, rank, merged_id; /* offset: in the text; in word_encode_short: the byte */
};

static void link_find_merge(const struct merge_table *pairs, struct symbol_link *l, int32_t i,
                            int32_t n) {
    const struct merge_slot *s = i + 1 < n ? merge_table_find(pairs, l[i].id, l[i + 1].id) : NULL;
    l[i].rank = s ? s->rank : INT32_MAX;
    l[i].merged_id = s ? s->id : -1;
}

/* Merges the n symbols in place; returns how many are left. */
static int32_t symbols_merge(const struct merge_table *pairs, struct symbol_link *l, int32_t n) {
    for (;;) {
        int32_t best = 0;
        for (int32_t i = 1; i < n; i++) best = l[i].rank < l[best].rank ? i : best;
        if (n < 2 || l[best].rank == INT32_MAX) return n;
        l[best].id = l[best].merged_id;
        n--;
        memmove(l + best + 1, l + best + 2, sizeof(*l) * (size_t)(n - best - 1));
        if (best > 0) link_find_merge(pairs, l, best - 1, n);
        link_find_merge(pairs, l, best, n);
    }
}

static void merge_short(struct encoder *e) {
    struct symbol_link l[SHORT_WORD];
    for (int32_t i = 0; i < e->n; i++)
        l[i] = (struct symbol_link){.id = e->id[i], .offset = e->offset[i]};
    for (int32_t i = 0; i < e->n; i++) link_find_merge(&e->t->pairs, l, i, e->n);
    e->n = symbols_merge(&e->t->pairs, l, e->n);
    for (int32_t i = 0; i < e->n; i++) {
        e->id[i] = l[i].id;
        e->offset[i] = l[i].offset;
    }
}

static void heap_push(struct merge_entry *h, size_t *n, struct merge_entry x) {
    size_t i = (*n)++;
    for (; i > 0 && h[(i - 1) / 2].key > x.key; i = (i - 1) / 2) h[i] = h[(i - 1) / 2];
    h[i] = x;
}

static struct merge_entry heap_pop(struct merge_entry *h, size_t *n) {
    struct merge_entry top = h[0], last = h[--*n];
    size_t i = 0;
    for (size_t child = 1; child < *n; child = 2 * i + 1) {
        if (child + 1 < *n && h[child + 1].key < h[child].key) child++;
        if (h[child].key >= last.key) break;
        h[i] = h[child];
        i = child;
    }
    h[i] = last;
    return top;
}

static void merge_push(struct encoder *e, size_t *heap_n, int32_t left) {
    if (left < 0 || e->next[left] < 0) return;
    int32_t a = e->id[left], b = e->id[e->next[left]];
    const struct merge_slot *s = merge_table_find(&e->t->pairs, a, b);
    if (s)
        heap_push(e->heap, heap_n,
                  (struct merge_entry){(uint64_t)s->rank << 32 | (uint32_t)left, a, b});
}

/* Merges the symbol at `left` with its right neighbour, which is removed from the list; its id then
 * equals no symbol. */
static void merge_apply(struct encoder *e, int32_t left, int32_t id) {
    int32_t right = e->next[left];
    e->id[left] = id;
    e->id[right] = INT32_MIN;
    e->next[left] = e->next[right];
    if (e->next[left] >= 0) e->prev[e->next[left]] = left;
}

static void merge_long(struct encoder *e) {
    size_t heap_n = 0;
    if (!encoder_reserve_long(e)) {
        e->n = 0;
        return;
    }
    for (int32_t i = 0; i < e->n; i++) {
        e->prev[i] = i - 1;
        e->next[i] = i + 1 < e->n ? i + 1 : -1;
    }
    for (int32_t i = 0; i < e->n; i++) merge_push(e, &heap_n, i);
    while (heap_n > 0) {
        struct merge_entry m = heap_pop(e->heap, &heap_n);
        int32_t left = (int32_t)(uint32_t)m.key;
        if (e->id[left] != m.left_id || e->next[left] < 0 || e->id[e->next[left]] != m.right_id)
            continue;
        merge_apply(e, left, merge_table_find(&e->t->pairs, m.left_id, m.right_id)->id);
        merge_push(e, &heap_n, e->prev[left]);
        merge_push(e, &heap_n, left);
    }
    int32_t n = 0;
    for (int32_t i = 0; i >= 0; i = e->next[i]) {
        e->id[n] = e->id[i];
        e->offset[n++] = e->offset[i];
    }
    e->n = n;
}

void encoder_merge(struct encoder *e) {
    if (e->n > SHORT_WORD)
        merge_long(e);
    else
        merge_short(e);
}

/* Direct-mapped; a word and its ids are one cache line of the processor. */
enum { CACHE_SLOTS = 8192, CACHED_LEN = 32, CACHED_IDS = 7, CACHE_MIN_TEXT = 4096 };
struct cached_word {
    uint8_t len, n; /* len 0: empty */
    uint8_t unused[2];
    int32_t ids[CACHED_IDS];
    uint64_t text[CACHED_LEN / 8]; /* padded with zeros */
};

/* The cache is used for a whole call; short texts have too few repeated words to benefit from it.
 */
void encoder_init_cache(struct encoder *e, size_t len) {
    if (!e->cache && len >= CACHE_MIN_TEXT) e->cache = xcalloc(CACHE_SLOTS, sizeof(*e->cache));
}

/* Copies the word to `text`, padded with zeros, and returns its slot; NULL without a cache or for a
 * long word. */
static struct cached_word *cache_slot(const struct encoder *e, const char *p, size_t n,
                                      uint64_t text[CACHED_LEN / 8]) {
    if (!e->cache || n > CACHED_LEN) return NULL;
    uint64_t h = n;
    memset(text, 0, CACHED_LEN);
    memcpy(text, p, n);
    for (size_t i = 0; i * 8 < n; i++) h = (h ^ text[i]) * 0x9E3779B97F4A7C15u, h ^= h >> 32;
    return &e->cache[h % CACHE_SLOTS];
}

static bool word_find_piece(struct encoder *e, const char *p, size_t n) {
    if (n > 1024) return false; /* longer than any piece worth looking up */
    char mapped[2048 + 4];
    int len = 0;
    for (size_t i = 0; i < n; i++) len += bytes_to_unicode_piece((uint8_t)p[i], mapped + len);
    int32_t id = vocab_find(e->t, mapped, (size_t)len);
    if (id < 0 || e->t->spec.types[id] != PIECE_NORMAL) return false;
    token_ids_add(e->out, id);
    return true;
}

/* Encodes a short word; the first lookup of each pair uses the table byte_pairs. */
static void word_encode_short(struct encoder *e, const uint8_t *p, int32_t n) {
    const struct tokenizer *t = e->t;
    struct symbol_link l[SHORT_WORD];
    int32_t n_known = 0;
    for (int32_t i = 0; i < n; i++)
        if (t->byte_ids[p[i]] >= 0)
            l[n_known++] = (struct symbol_link){t->byte_ids[p[i]], p[i], INT32_MAX, -1};
    for (int32_t i = 0; i + 1 < n_known; i++) {
        const struct byte_pair *s = &t->byte_pairs[l[i].offset << 8 | l[i + 1].offset];
        l[i].rank = s->rank;
        l[i].merged_id = s->id;
    }
    n = symbols_merge(&t->pairs, l, n_known);
    for (int32_t i = 0; i < n; i++) token_ids_add(e->out, l[i].id);
}

static void word_encode(struct encoder *e, const char *p, size_t n) {
    if (e->t->spec.ignore_merges && word_find_piece(e, p, n)) return;
    if (n <= SHORT_WORD) {
        word_encode_short(e, (const uint8_t *)p, (int32_t)n);
        return;
    }
    e->n = 0;
    if (!encoder_reserve(e, (int32_t)n)) return;
    for (size_t i = 0; i < n; i++) {
        int32_t id = e->t->byte_ids[(uint8_t)p[i]];
        if (id >= 0) e->id[e->n++] = id;
    }
    encoder_merge(e);
    for (int32_t i = 0; i < e->n; i++) token_ids_add(e->out, e->id[i]);
}

void encoder_word(struct encoder *e, const char *p, size_t n, encode_fn encode) {
    uint64_t text[CACHED_LEN / 8];
    struct cached_word *c = cache_slot(e, p, n, text);
    if (c && c->len == n && memcmp(c->text, text, sizeof(text)) == 0) {
        for (int i = 0; i < c->n; i++) token_ids_add(e->out, c->ids[i]);
        return;
    }
    int first = e->out->n;
    e->unknown = false;
    encode(e, p, n);
    int n_ids = e->out->n - first;
    if (!c || e->unknown || n_ids > CACHED_IDS) return;
    c->len = (uint8_t)n;
    c->n = (uint8_t)n_ids;
    memcpy(c->ids, e->out->v + first, sizeof(*c->ids) * (size_t)n_ids);
    memcpy(c->text, text, sizeof(text));
}

static void word_add(void *ctx, const char *p, size_t n) {
    encoder_word(ctx, p, n, word_encode);
}

void bpe_encode(struct encoder *e, const char *text, size_t len, bool first) {
    if (e->t->spec.add_space_prefix && first && text[0] != ' ') {
        e->text.len = 0;
        buf_add(&e->text, " ", 1);
        buf_add(&e->text, text, len);
        text = e->text.data;
        len = e->text.len;
    }
    if (!e->match) e->match = pcre2_match_data_create(1, NULL);
    CHECK(e->match);
    encoder_init_cache(e, len);
    bpe_split(e->t, e->match, text, len, word_add, e);
}
