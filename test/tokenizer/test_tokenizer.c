/*
 * test_tokenizer: encoding, decoding, training, files and chat.
 *
 * Reference ids come from other programs' test vectors (llama.cpp's vocabulary tests, CS336's BPE
 * trainer) under $SHOAL_SHARED/data/tokenizers, which may be absent: those tests are skipped with a
 * message. The other tests need no file: the merge loop is compared with a naive implementation,
 * patterns with a two-stage implementation, and files are truncated at every length.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "model/internal.h"
#include "tokenizer/internal.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <uninorm.h>
#include <unistd.h>

static char *shared_path(const char *name) {
    const char *root = getenv("SHOAL_SHARED");
    char *path = xasprintf("%s/data/tokenizers/%s", root ? root : "../shared", name);
    if (path_exists(path)) return path;
    fprintf(stderr, "SKIP: '%s' does not exist\n", path);
    free(path);
    skip();
    return NULL;
}

static struct buf file_text(char *path) {
    struct buf b = {0};
    struct error err;
    if (file_read(path, 1 << 28, &b, &err) != OK) fail_msg("%s", err.text);
    free(path);
    return b;
}

/* In memory if possible: file_write syncs files to the disk. */
static char *temp_path(const char *name) {
    const char *dir = getenv("TMPDIR");
    if (!dir) dir = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    return xasprintf("%s/shoal-tok-%d-%s", dir, (int)getpid(), name);
}

static void put_file(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb"); /* not file_write: thousands of broken files need no fsync */
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static struct tokenizer *assert_tokenizer(struct tokenizer *t, const struct error *err) {
    if (!t) fail_msg("%s", err->text);
    return t;
}

static struct token_ids encoded(const struct tokenizer *t, const char *text, size_t len,
                                int flags) {
    struct token_ids ids = {0};
    tokenizer_encode(t, text, len, flags, &ids);
    return ids;
}

static void assert_ids(const struct token_ids *got, const int32_t *want, int n, const char *what) {
    bool same = got->n == n && (n == 0 || memcmp(got->v, want, sizeof(*want) * (size_t)n) == 0);
    if (same) return;
    struct buf b = {0};
    buf_printf(&b, "'%.60s': got", what);
    for (int i = 0; i < got->n && i < 40; i++) buf_printf(&b, " %d", got->v[i]);
    buf_puts(&b, ", want");
    for (int i = 0; i < n && i < 40; i++) buf_printf(&b, " %d", want[i]);
    fail_msg("%s", b.data);
}

#define ASSERT_ENCODES(t, text, flags, ...)                                                        \
    do {                                                                                           \
        const int32_t want_[] = {__VA_ARGS__};                                                     \
        struct token_ids got_ = encoded(t, text, strlen(text), flags);                             \
        assert_ids(&got_, want_, (int)ARRAY_LEN(want_), text);                                     \
        token_ids_release(&got_);                                                                  \
    } while (0)

static void assert_round_trip(const struct tokenizer *t, const char *text, size_t len) {
    struct token_ids ids = encoded(t, text, len, 0);
    struct buf b = {0};
    tokenizer_decode(t, ids.v, ids.n, false, &b);
    if (b.len != len || (len && memcmp(b.data, text, len) != 0))
        fail_msg("'%.60s' is not restored", text);
    token_ids_release(&ids);
    buf_release(&b);
}

static void assert_same_ids(const struct tokenizer *a, const struct tokenizer *b, const char *text,
                            size_t len, int flags) {
    struct token_ids x = encoded(a, text, len, flags), y = encoded(b, text, len, flags);
    assert_ids(&y, x.v, x.n, text);
    token_ids_release(&x);
    token_ids_release(&y);
}

static void put_utf8(struct buf *b, uint32_t c) {
    char out[4];
    size_t n = 0;
    if (c < 0x80) {
        out[n++] = (char)c;
    } else {
        int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
        static const int lead[] = {0, 0xC0, 0xE0, 0xF0};
        out[n++] = (char)(lead[more] | (int)(c >> (6 * more)));
        while (more-- > 0) out[n++] = (char)(0x80 | ((c >> (6 * more)) & 0x3F));
    }
    buf_add(b, out, n);
}

/* Text with the irregularities of real text: words, digits, spaces of all kinds, scripts, emoji,
 * and invalid bytes. */
static struct buf irregular_text(uint32_t seed, size_t n, bool valid) {
    static const char *const bits[] = {"the",
                                       " and",
                                       "I'll",
                                       "'RE",
                                       " we've",
                                       "\n",
                                       "\n\n",
                                       "\r\n",
                                       " ",
                                       "  ",
                                       "\t",
                                       "12",
                                       "3456",
                                       " 7",
                                       "…",
                                       "日本語",
                                       "は",
                                       "猫です。",
                                       "中文",
                                       "나라",
                                       "été",
                                       "e\xCC\x81",
                                       "🚀",
                                       "👩‍🚀",
                                       "\xC2\xA0",
                                       "\xE3\x80\x80",
                                       "\xE1\xA0\x8E",
                                       "!!",
                                       "--",
                                       "<|im_end|>",
                                       "▁",
                                       "ſ",
                                       "Ⅷ",
                                       "x_y",
                                       "/*"};
    struct rng r = rng_make(seed, RNG_TEST, 0, 0);
    struct buf b = {0};
    buf_puts(&b, "");
    while (b.len < n) {
        uint32_t what = rng_below(&r, 40);
        if (what < ARRAY_LEN(bits)) buf_puts(&b, bits[what]);
        char c = (char)rng_u32(&r);
        if (what >= ARRAY_LEN(bits) && !valid) buf_add(&b, &c, 1);
    }
    return b;
}

static const char *const chatml[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

static struct tokenizer *trained_small(const char *pre) {
    struct buf text = {0};
    for (int i = 0; i < 50; i++)
        buf_puts(&text,
                 "the cat sat on the mat, and then the other cats sat there too. 1 2 12 123 2024! "
                 "猫がマットの上に座った。日本語の文です。我想在家里工作。<|im_start|>user\nI'll "
                 "go, they've gone\n");
    struct error err;
    struct tokenizer *t = tokenizer_train_bpe(text.data, text.len, 340, pre,
                                              (const char **)(uintptr_t)chatml, 3, 3, &err);
    buf_release(&text);
    return assert_tokenizer(t, &err);
}

struct spm_entry {
    const char *piece;
    float score;
    uint8_t type;
};
/* "ab" and "bc" tie, so that the leftmost wins; the "é" of "éa" is not a piece. */
static const struct spm_entry spm_entries[] = {
    {"<unk>", 0, PIECE_UNKNOWN},
    {"<s>", 0, PIECE_CONTROL},
    {"</s>", 0, PIECE_CONTROL},
    {"▁", -9, 1},
    {"a", -9, 1},
    {"b", -9, 1},
    {"c", -9, 1},
    {"ab", -1, 1},
    {"bc", -1, 1},
    {"▁ab", -2, 1},
    {"▁▁", -3, 1},
    {"▁▁▁▁", -4, 1},
    {"<tool>", 0, PIECE_USER},
    {"éa", -5, 1},
    {"unused", -1, PIECE_UNUSED},
    {"<0xC3>", 0, PIECE_BYTE},
    {"<0xA9>", 0, PIECE_BYTE},
    {"s", -9, 1},
    {"<", -9, 1},
    {"s>", -1, 1},
    {">", -9, 1},
};

static struct tokenizer *spm_small(bool prefix) {
    enum { N = ARRAY_LEN(spm_entries) };
    const char *pieces[N];
    int32_t lens[N];
    float scores[N];
    uint8_t types[N];
    for (int i = 0; i < N; i++) {
        pieces[i] = spm_entries[i].piece;
        lens[i] = (int32_t)strlen(pieces[i]);
        scores[i] = spm_entries[i].score;
        types[i] = spm_entries[i].type;
    }
    struct tokenizer_spec spec = {.kind = TOKENIZER_SPM,
                                  .n = N,
                                  .pieces = pieces,
                                  .lens = lens,
                                  .scores = scores,
                                  .types = types,
                                  .unk = 0,
                                  .bos = 1,
                                  .eos = 2,
                                  .add_bos = true,
                                  .add_space_prefix = prefix};
    struct error err;
    return assert_tokenizer(tokenizer_new(&spec, &err), &err);
}

static void test_every_byte_and_plane(void **state) {
    (void)state;
    struct tokenizer *toks[] = {tokenizer_new_bytes(300), trained_small("gpt-2"),
                                trained_small("qwen2")};
    struct buf all = {0};
    for (uint32_t c = 1; c < 0x110000; c += c < 0x3000 ? 1 : 37)
        if (c < 0xD800 || c > 0xDFFF) put_utf8(&all, c);
    for (int b = 0; b < 256; b++) buf_add(&all, &(char){(char)b}, 1);
    for (size_t i = 0; i < ARRAY_LEN(toks); i++) {
        assert_round_trip(toks[i], all.data, all.len);
        for (uint32_t seed = 0; seed < 200; seed++) {
            struct buf b = irregular_text(seed, 100, false);
            assert_round_trip(toks[i], b.data, b.len);
            buf_release(&b);
        }
        tokenizer_free(toks[i]);
    }
    buf_release(&all);
}

static void test_utf8_len(void **state) {
    (void)state;
    static const char *const bad[] = {"\x80",
                                      "\xC0\x80",
                                      "\xC1\xBF",
                                      "\xC3",
                                      "\xE0\x80\x80",
                                      "\xE0\x9F\xBF",
                                      "\xED\xA0\x80",
                                      "\xF0\x8F\xBF\xBF",
                                      "\xF4\x90\x80\x80",
                                      "\xF5\x80\x80\x80",
                                      "\xFF",
                                      "\xE3\x81"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        assert_int_equal(utf8_len(bad[i], strlen(bad[i])), 0);
    assert_int_equal(utf8_len("\xF4\x8F\xBF\xBF", 4), 4);
    assert_int_equal(utf8_len("\xED\x9F\xBF", 3), 3);
    assert_int_equal(utf8_len("", 0), 0);
    assert_int_equal(utf8_len("\0", 1), 1);
}

/* A naive merge loop, which looks up all pairs after every merge. */
static void naive_merge(const struct tokenizer *t, struct token_ids *v) {
    for (;;) {
        const struct merge_slot *best = NULL;
        int best_pos = 0;
        for (int i = 0; i + 1 < v->n; i++) {
            const struct merge_slot *s = merge_table_find(&t->pairs, v->v[i], v->v[i + 1]);
            if (s && (!best || s->rank < best->rank)) best = s, best_pos = i;
        }
        if (!best) return;
        v->v[best_pos] = best->id;
        memmove(v->v + best_pos + 1, v->v + best_pos + 2,
                sizeof(*v->v) * (size_t)(v->n - best_pos - 2));
        v->n--;
    }
}

static void test_merge_equals_naive(void **state) {
    (void)state;
    struct tokenizer *t = trained_small("gpt-2");
    /* the filter before the table rejects no existing pair */
    for (uint64_t i = 0; i <= t->pairs.mask; i++) {
        const struct merge_slot *s = &t->pairs.slots[i];
        if (s->key != UINT64_MAX)
            assert_ptr_equal(merge_table_find(&t->pairs, (int32_t)(s->key >> 32), (int32_t)s->key),
                             s);
    }
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    for (int round = 0; round < 300; round++) {
        struct buf b = {0};
        int n = 1 + (int)rng_below(&r, round < 250 ? 60 : 800);
        for (int i = 0; i < n; i++) buf_add(&b, &"thecatsonm"[rng_below(&r, round % 10 + 1)], 1);
        struct token_ids want = {0}, got = encoded(t, b.data, b.len, 0);
        for (size_t i = 0; i < b.len; i++) token_ids_add(&want, t->byte_ids[(uint8_t)b.data[i]]);
        naive_merge(t, &want); /* letters only: one word */
        assert_ids(&got, want.v, want.n, b.data);
        token_ids_release(&want);
        token_ids_release(&got);
        buf_release(&b);
    }
    tokenizer_free(t);
}

/* The word cache and preceding text do not change the ids. */
static void test_cache_and_pieces_agree(void **state) {
    (void)state;
    struct tokenizer *t = trained_small("gpt-2");
    struct buf b = irregular_text(7, 30000, true);
    struct token_ids want = encoded(t, b.data, b.len, 0), got = {0};
    size_t begin = 0;
    for (size_t i = 1; i <= b.len; i++) { /* every word ends between a newline and a letter */
        bool is_end = i == b.len || (b.data[i - 1] == '\n' && b.data[i] == 't' && i >= 2 &&
                                     b.data[i - 2] != '\n');
        if (!is_end) continue;
        tokenizer_encode(t, b.data + begin, i - begin, 0, &got);
        begin = i;
    }
    assert_ids(&got, want.v, want.n, "long text");
    token_ids_release(&want);
    token_ids_release(&got);
    buf_release(&b);
    tokenizer_free(t);
}

/* SPM encodes words separately if no piece spans words; it must not if the vocabulary has such a
 * piece. */
static void test_spm_words_agree(void **state) {
    (void)state;
    struct tokenizer *t = spm_small(true);
    assert_true(t->splits_words);
    struct tokenizer unsplit = *t; /* a copy that does not split */
    unsplit.splits_words = false;
    struct buf b = {0};
    struct rng r = rng_make(9, RNG_TEST, 0, 0);
    for (int i = 0; i < 20000; i++) buf_add(&b, &"aabbcc   x\n"[rng_below(&r, 11)], 1);
    for (size_t n = 0; n < b.len; n += n < 100 ? 1 : 4999)
        assert_same_ids(&unsplit, t, b.data, n, 0);
    buf_release(&b);
    tokenizer_free(t);
    const char *pieces[] = {"▁", "a", "a▁"};
    struct tokenizer_spec spec = {.kind = TOKENIZER_SPM,
                                  .n = 3,
                                  .pieces = pieces,
                                  .lens = (const int32_t[]){3, 1, 4},
                                  .scores = (const float[]){0, 0, 0},
                                  .bos = -1,
                                  .eos = -1,
                                  .unk = -1};
    struct error err;
    t = assert_tokenizer(tokenizer_new(&spec, &err), &err);
    assert_false(t->splits_words);
    ASSERT_ENCODES(t, "a a", 0, 2, 1);
    tokenizer_free(t);
}

struct job {
    const struct tokenizer *t;
    const struct buf *text;
    const struct token_ids *want;
    bool same[8];
};

static void encode_repeatedly(void *ctx, int64_t begin, int64_t end, int thread) {
    struct job *j = ctx;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        struct token_ids got = encoded(j->t, j->text->data, j->text->len, 0);
        j->same[i] =
            got.n == j->want->n && memcmp(got.v, j->want->v, sizeof(*got.v) * (size_t)got.n) == 0;
        token_ids_release(&got);
    }
}

static void test_threads_share_one(void **state) {
    (void)state;
    struct tokenizer *t = trained_small("qwen2");
    struct buf b = irregular_text(3, 20000, false);
    struct token_ids want = encoded(t, b.data, b.len, 0);
    struct job j = {.t = t, .text = &b, .want = &want};
    struct pool *pool = pool_new(4);
    pool_run(pool, encode_repeatedly, &j, ARRAY_LEN(j.same), 1);
    for (size_t i = 0; i < ARRAY_LEN(j.same); i++) assert_true(j.same[i]);
    pool_free(pool);
    token_ids_release(&want);
    buf_release(&b);
    tokenizer_free(t);
}

struct words {
    struct buf text; /* words with | after each */
};

static void word_append(void *ctx, const char *p, size_t n) {
    struct words *w = ctx;
    buf_add(&w->text, p, n);
    buf_puts(&w->text, "|");
}

static void words_append(const struct tokenizer *t, const char *p, size_t n, struct words *w) {
    pcre2_match_data *md = pcre2_match_data_create(1, NULL);
    bpe_split(t, md, p, n, word_append, w);
    pcre2_match_data_free(md);
}

static void assert_words(const char *pre, const char *text, const char *want) {
    struct tokenizer *t = trained_small(pre);
    struct words w = {0};
    words_append(t, text, strlen(text), &w);
    assert_string_equal(w.text.data, want);
    buf_release(&w.text);
    tokenizer_free(t);
}

static void test_patterns(void **state) {
    (void)state;
    assert_words("gpt-2", "I'll  go 123, été\n\n x", "I|'ll| | go| 123|,| été|\n\n| x|");
    assert_words("smollm", "a  12 b 3", "a|  |1|2| b| |3|");
    assert_words("llama-bpe", "We'Ve 12345\n\n  x", "We|'Ve| |123|45|\n\n| | x|");
    assert_words("qwen2", "(abc) 12\n", "(abc|)| |1|2|\n|");
    assert_words("gpt-4o", "helloWorld's A1b", "hello|World's| A|1|b|");
    assert_words("tekken", "helloWorld 12", "hello|World| |1|2|");
    /* U+180E is not white space in this version of Unicode: it joins the punctuation, and the space
     * is before the word. */
    assert_words("gpt-2", "a\xE1\xA0\x8E b", "a|\xE1\xA0\x8E| b|");
    assert_words("[^a]+|\\s", "xxaaxx",
                 "xx|aa|xx|");             /* text between matches of a pattern is a word */
    assert_words("(?=[a])", "ab", "a|b|"); /* and an empty match gets a character */
}

/* Digits first, then GPT-2's pattern on the text between them, as in the reference. */
static void test_digits_pattern_is_two_stages(void **state) {
    (void)state;
    struct tokenizer *one = trained_small("smollm"), *gpt2 = trained_small("gpt-2"),
                     *digit = trained_small("[\\p{N}]");
    for (uint32_t seed = 0; seed < 400; seed++) {
        struct buf b = irregular_text(seed, 60, true);
        struct words got = {0}, digits = {0}, want = {0};
        words_append(one, b.data, b.len, &got);
        words_append(digit, b.data, b.len, &digits); /* irregular_text has no other | */
        for (char *p = digits.text.data, *bar; (bar = strchr(p, '|')); p = bar + 1)
            words_append(gpt2, p, (size_t)(bar - p), &want);
        /* irregular_text's "<|im_end|>" contains bars: both sides treat them equally only if no
         * word ends there */
        if (!strchr(b.data, '|')) assert_string_equal(got.text.data, want.text.data);
        buf_release(&b);
        buf_release(&got.text);
        buf_release(&digits.text);
        buf_release(&want.text);
    }
    tokenizer_free(one);
    tokenizer_free(gpt2);
    tokenizer_free(digit);
}

static void test_long_runs(void **state) {
    (void)state;
    struct tokenizer *t = trained_small("qwen2");
    size_t n = 1 << 20;
    char *run = xmalloc(n + 1);
    for (int kind = 0; kind < 3; kind++) {
        memset(run, " a\xFF"[kind], n);
        run[n - 1] = 'b';
        assert_round_trip(t, run, n);
    }
    free(run);
    tokenizer_free(t);
}

static void assert_refused(const char *pre, const char *message) {
    const char *pieces[] = {"a"};
    int32_t lens[] = {1};
    struct tokenizer_spec spec = {.kind = TOKENIZER_BPE,
                                  .n = 1,
                                  .pieces = pieces,
                                  .lens = lens,
                                  .pre = pre,
                                  .bos = -1,
                                  .eos = -1,
                                  .unk = -1};
    struct error err;
    assert_null(tokenizer_new(&spec, &err));
    assert_int_equal(err.code, ERR_FORMAT);
    if (!strstr(err.text, message)) fail_msg("'%s' does not contain '%s'", err.text, message);
}

static void test_refused_specs(void **state) {
    (void)state;
    assert_refused("no-such-model", "unknown pre-tokenizer 'no-such-model'");
    assert_refused("[a", "does not compile");
    const char *pieces[] = {"a", "b"}, *merges[] = {"a b"}, *odd[] = {"ab"};
    int32_t lens[] = {1, 1};
    struct tokenizer_spec spec = {.kind = TOKENIZER_BPE,
                                  .n = 2,
                                  .pieces = pieces,
                                  .lens = lens,
                                  .pre = "gpt-2",
                                  .merges = merges,
                                  .n_merges = 1,
                                  .bos = -1,
                                  .eos = -1,
                                  .unk = -1};
    struct error err;
    assert_null(tokenizer_new(&spec, &err)); /* 'ab' is not a token */
    assert_non_null(strstr(err.text, "merge 0"));
    spec.merges = odd;
    assert_null(tokenizer_new(&spec, &err));
    spec.n_merges = 0;
    spec.eos = 2;
    assert_null(tokenizer_new(&spec, &err));
    spec.eos = -1;
    spec.types = (const uint8_t[]){1, 9};
    assert_null(tokenizer_new(&spec, &err));
    spec.types = NULL;
    spec.kind = TOKENIZER_SPM;
    assert_null(tokenizer_new(&spec, &err)); /* no scores */
    spec.kind = TOKENIZER_BPE;
    struct tokenizer *t = assert_tokenizer(tokenizer_new(&spec, &err), &err);
    ASSERT_ENCODES(t, "abcab", 0, 0, 1, 0,
                   1); /* a byte that is not in the vocabulary gives no token */
    tokenizer_free(t);
}

static void test_specials_only_where_allowed(void **state) {
    (void)state;
    struct tokenizer *t = tokenizer_new_bytes(260);
    struct token_ids plain = encoded(t, "<|im_end|>", 10, 0);
    assert_int_equal(plain.n, 10);
    for (int i = 0; i < plain.n; i++) assert_false(tokenizer_is_special(t, plain.v[i]));
    token_ids_release(&plain);
    ASSERT_ENCODES(t, "<|im_end|><|im_start|>", TOKENIZER_PARSE_SPECIAL, 2, 1);
    ASSERT_ENCODES(t, "!<|im_end|>", TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_BOS, 3, 2);
    struct buf b = {0};
    tokenizer_decode(t, (const int32_t[]){2, 3, 1, 259, 260, -1}, 6, false, &b);
    assert_string_equal(b.data, "![PAD259]");
    b.len = 0;
    tokenizer_decode(t, (const int32_t[]){2, 3, 1}, 3, true, &b);
    assert_string_equal(b.data, "<|im_end|>!<|im_start|>");
    buf_release(&b);
    assert_int_equal(tokenizer_piece_to_id(t, "<|im_end|>"), 2);
    assert_int_equal(tokenizer_piece_to_id(t, "nothing"), -1);
    assert_int_equal(tokenizer_eos(t), 2);
    assert_int_equal(tokenizer_vocab_size(t), 260);
    assert_null(tokenizer_new_bytes(258));
    tokenizer_free(t);
}

static void test_spm_rules(void **state) {
    (void)state;
    struct tokenizer *t = spm_small(true), *no_prefix = spm_small(false);
    ASSERT_ENCODES(t, "abc", 0, 9,
                   6); /* "ab" ties with "bc" and is further left; then it merges with the ▁ */
    ASSERT_ENCODES(no_prefix, "abc", 0, 7, 6);
    ASSERT_ENCODES(no_prefix, "cbc", TOKENIZER_ADD_BOS, 1, 6, 8);
    ASSERT_ENCODES(no_prefix, "    b", 0, 11, 5);
    ASSERT_ENCODES(no_prefix, "é", 0, 15, 16);      /* bytes */
    ASSERT_ENCODES(no_prefix, "éab", 0, 15, 16, 7); /* "ab" scores above "éa" */
    ASSERT_ENCODES(no_prefix, "éac", 0, 13, 6);     /* a piece of characters that are not pieces */
    ASSERT_ENCODES(no_prefix, "xyz\xFFg", 0,
                   0); /* a run without byte pieces is one unknown token */
    ASSERT_ENCODES(no_prefix, "xax", 0, 0, 4, 0);
    ASSERT_ENCODES(no_prefix, "unused", 0, 0, 17, 0);
    ASSERT_ENCODES(no_prefix, "<s>", 0, 18,
                   19); /* never the control token, not by merging either */
    ASSERT_ENCODES(t, "<s>a", TOKENIZER_PARSE_SPECIAL, 1, 3, 4);
    ASSERT_ENCODES(t, "a<tool>a", 0, 3, 4, 12, 3, 4);
    tokenizer_free(t);
    tokenizer_free(no_prefix);
}

static void test_spm_decode(void **state) {
    (void)state;
    struct tokenizer *t = spm_small(true), *no_prefix = spm_small(false);
    static const char *const texts[] = {"ab",        " ab",  "  ab  ", "a<tool>b",
                                        "a<tool> b", "éa é", "    "};
    for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
        assert_round_trip(t, texts[i], strlen(texts[i]));
        assert_round_trip(no_prefix, texts[i], strlen(texts[i]));
    }
    struct buf b = {0};
    tokenizer_decode(t, (const int32_t[]){1, 9, 6, 2}, 4, false, &b);
    assert_string_equal(b.data, "abc");
    b.len = 0;
    tokenizer_decode_token(t, 9, false, &b);
    assert_string_equal(b.data, " ab");
    buf_release(&b);
    tokenizer_free(t);
    tokenizer_free(no_prefix);
}

typedef void (*vector_fn)(const struct tokenizer *t, const char *text, size_t len,
                          const char *line);

static void vector_check(const struct tokenizer *t, const char *text, size_t len,
                         const char *line) {
    struct token_ids want = {0}, got = encoded(t, text, len, 0);
    for (char *end;; line = end) {
        long id = strtol(line, &end, 10);
        if (end == line) break;
        token_ids_add(&want, (int32_t)id);
    }
    assert_ids(&got, want.v, want.n, text);
    token_ids_release(&want);
    token_ids_release(&got);
    assert_round_trip(t, text, len);
}

/* A separate line separates the items; the .out file has one line for each. */
static int vectors_check_all(const char *name, const struct tokenizer *t) {
    char file[64];
    snprintf(file, sizeof(file), "ggml-vocab/ggml-vocab-%s.gguf.inp", name);
    struct buf inp = file_text(shared_path(file));
    snprintf(file, sizeof(file), "ggml-vocab/ggml-vocab-%s.gguf.out", name);
    struct buf out = file_text(shared_path(file));
    static const char sep[] = "\n__ggml_vocab_test__\n";
    int n = 0;
    char *line = out.data;
    for (char *p = inp.data, *end; (end = strstr(p, sep)); p = end + strlen(sep), n++) {
        char *newline = strchr(line, '\n');
        assert_non_null(newline);
        *newline = 0;
        vector_check(t, p, (size_t)(end - p), line);
        line = newline + 1;
    }
    buf_release(&inp);
    buf_release(&out);
    return n;
}

static struct tokenizer *gguf_tokenizer(const char *name) {
    char file[64];
    snprintf(file, sizeof(file), "ggml-vocab/ggml-vocab-%s.gguf", name);
    char *path = shared_path(file);
    struct error err;
    struct tokenizer *t = assert_tokenizer(gguf_tokenizer_open(path, &err), &err);
    free(path);
    return t;
}

static void test_vectors(void **state) {
    const char *name = *state;
    struct tokenizer *t = gguf_tokenizer(name);
    assert_true(vectors_check_all(name, t) > 40);
    tokenizer_free(t);
}

static void test_vectors_llama_bpe(void **state) {
    (void)state;
    fprintf(stderr, "SKIP: no vocabulary for the llama-bpe vectors\n");
    skip();
}

/* Splits `text` into lines in place; the last newline ends the last line. */
static const char **lines_of(struct buf *text, int32_t *n) {
    const char **lines = xmalloc(sizeof(*lines) * (text->len + 1));
    *n = 0;
    for (char *p = text->data, *end; *p; p = end + 1) {
        lines[(*n)++] = p;
        end = strchr(p, '\n');
        if (!end) break;
        *end = 0;
    }
    return lines;
}

static struct tokenizer *qwen_tokenizer(void) {
    struct buf vocab = file_text(shared_path("qwen3/vocab.txt")),
               list = file_text(shared_path("qwen3/merges.txt"));
    struct tokenizer_spec spec = {
        .kind = TOKENIZER_BPE, .pre = "qwen2", .bos = -1, .eos = 151645, .unk = -1};
    spec.pieces = lines_of(&vocab, &spec.n);
    spec.merges = lines_of(&list, &spec.n_merges);
    int32_t *lens = xmalloc(sizeof(*lens) * (size_t)spec.n);
    uint8_t *types = xmalloc((size_t)spec.n);
    for (int32_t i = 0; i < spec.n; i++) {
        lens[i] = (int32_t)strlen(spec.pieces[i]);
        types[i] = i < 151643                 ? PIECE_NORMAL
                   : spec.pieces[i][0] == '<' ? PIECE_CONTROL
                                              : PIECE_UNUSED;
    }
    spec.lens = lens;
    spec.types = types;
    struct error err;
    struct tokenizer *t = assert_tokenizer(tokenizer_new(&spec, &err), &err);
    free(spec.pieces);
    free(spec.merges);
    free(lens);
    free(types);
    buf_release(&vocab);
    buf_release(&list);
    return t;
}

static void test_vectors_qwen2(void **state) {
    (void)state;
    struct tokenizer *t = qwen_tokenizer();
    assert_true(vectors_check_all("qwen2", t) > 40);
    ASSERT_ENCODES(t, "<|im_start|>", TOKENIZER_PARSE_SPECIAL, 151644);
    tokenizer_free(t);
}

static void test_train_equals_reference(void **state) {
    (void)state;
    struct buf corpus = file_text(shared_path("bpe-training/corpus.en"));
    struct buf list = file_text(shared_path("bpe-training/train-bpe-reference-merges.txt"));
    char *vocab_path = shared_path("bpe-training/train-bpe-reference-vocab.json");
    struct error err;
    struct tokenizer *t =
        assert_tokenizer(tokenizer_train_bpe(corpus.data, corpus.len, 500, "gpt-2",
                                             (const char **)(uintptr_t)chatml, 1, 1, &err),
                         &err);
    const struct tokenizer_spec *s = tokenizer_get_spec(t);
    int32_t n;
    const char **want = lines_of(&list, &n);
    assert_int_equal(n, 243);
    assert_int_equal(s->n_merges, n);
    for (int32_t i = 0; i < n; i++) assert_string_equal(s->merges[i], want[i]);
    json_t *vocab = json_parse_file(vocab_path, &err);
    assert_non_null(vocab);
    assert_int_equal(json_object_size(vocab), s->n);
    for (int32_t i = 0; i < s->n; i++)
        assert_int_equal(json_integer_value(json_object_get(vocab, s->pieces[i])), i);
    json_decref(vocab);
    free(want);
    free(vocab_path);
    assert_round_trip(t, corpus.data, corpus.len);
    tokenizer_free(t);
    buf_release(&corpus);
    buf_release(&list);
}

/* A naive training, which counts all pairs for each merge. */
static void naive_train(const char *const *words, int n_words, int n_merges, struct buf *out) {
    char piece[512][2][24]; /* pairs of neighbours: left, right */
    char v[16][32][24];
    int len[16];
    for (int w = 0; w < n_words; w++)
        for (len[w] = 0; words[w][len[w]]; len[w]++)
            snprintf(v[w][len[w]], 24, "%c", words[w][len[w]]);
    for (int m = 0; m < n_merges; m++) {
        int n = 0, best = -1, best_count = 0;
        for (int w = 0; w < n_words; w++)
            for (int i = 0; i + 1 < len[w]; i++, n++) {
                memcpy(piece[n][0], v[w][i], 24);
                memcpy(piece[n][1], v[w][i + 1], 24);
            }
        for (int i = 0; i < n; i++) {
            int count = 0;
            for (int k = 0; k < n; k++)
                count += !strcmp(piece[i][0], piece[k][0]) && !strcmp(piece[i][1], piece[k][1]);
            int c = best < 0 ? 1 : strcmp(piece[i][0], piece[best][0]);
            if (c == 0) c = strcmp(piece[i][1], piece[best][1]);
            if (count > best_count || (count == best_count && c > 0)) best = i, best_count = count;
        }
        buf_printf(out, "%s %s\n", piece[best][0], piece[best][1]);
        for (int w = 0; w < n_words; w++) {
            int k = 0;
            for (int i = 0; i < len[w]; i++, k++) {
                bool is_pair = i + 1 < len[w] && !strcmp(v[w][i], piece[best][0]) &&
                               !strcmp(v[w][i + 1], piece[best][1]);
                if (k != i) memcpy(v[w][k], v[w][i], 24);
                if (!is_pair) continue;
                i++;
                snprintf(v[w][k], 24, "%.11s%.11s", piece[best][0], piece[best][1]);
            }
            len[w] = k;
        }
    }
}

static void test_train_equals_naive(void **state) {
    (void)state;
    for (uint32_t seed = 0; seed < 60; seed++) {
        struct rng r = rng_make(seed, RNG_TEST, 0, 0);
        char text[16][20];
        const char *words[16];
        struct buf joined = {0}, want = {0}, got = {0};
        for (int w = 0; w < 16; w++) {
            int n = 1 + (int)rng_below(&r, 19);
            for (int i = 0; i < n; i++) text[w][i] = "abc"[rng_below(&r, 1 + seed % 3)];
            text[w][n] = 0;
            words[w] = text[w];
            buf_printf(&joined, "%s<|endoftext|>", text[w]);
        }
        naive_train(words, 16, 3, &want);
        struct error err;
        struct tokenizer *t =
            assert_tokenizer(tokenizer_train_bpe(joined.data, joined.len, 260, "gpt-2",
                                                 (const char **)(uintptr_t)chatml, 1, 1, &err),
                             &err);
        for (int32_t i = 0; i < tokenizer_get_spec(t)->n_merges; i++)
            buf_printf(&got, "%s\n", tokenizer_get_spec(t)->merges[i]);
        assert_string_equal(got.data, want.data);
        tokenizer_free(t);
        buf_release(&joined);
        buf_release(&want);
        buf_release(&got);
    }
}

static void test_train_limits(void **state) {
    (void)state;
    struct error err;
    const char **specials = (const char **)(uintptr_t)chatml;
    assert_null(tokenizer_train_bpe("ab ab", 5, 1000, "gpt-2", specials, 3, 3, &err));
    assert_non_null(strstr(err.text, "more text"));
    assert_null(tokenizer_train_bpe("ab", 2, 258, "gpt-2", specials, 3, 3, &err));
    assert_null(tokenizer_train_bpe("ab", 2, 300, "what", specials, 3, 3, &err));
    const char *twice[] = {"<a>", "<a>"};
    assert_null(tokenizer_train_bpe("ab", 2, 300, "gpt-2", twice, 2, 2, &err));
    assert_non_null(strstr(err.text, "twice"));
    struct tokenizer *t =
        assert_tokenizer(tokenizer_train_bpe("", 0, 259, NULL, specials, 3, 3, &err), &err);
    assert_int_equal(tokenizer_eos(t), 2);
    ASSERT_ENCODES(t, "!", 0, 3);
    tokenizer_free(t);
    t = trained_small(
        "gpt-2"); /* special tokens in the text are not words: no merge uses their characters */
    for (int32_t id = 3; id < tokenizer_vocab_size(t); id++)
        assert_null(strstr(tokenizer_id_to_piece(t, id, NULL), "<|"));
    tokenizer_free(t);
}

/* Written, read and written again: the same bytes, and the same ids for any text. */
static void assert_json_round_trip(const struct tokenizer *t) {
    char *a = temp_path("a.json"), *b = temp_path("b.json");
    struct error err;
    if (tokenizer_write_json(t, a, &err) != OK) fail_msg("%s", err.text);
    struct tokenizer *u = assert_tokenizer(tokenizer_from_json(a, &err), &err);
    if (tokenizer_write_json(u, b, &err) != OK) fail_msg("%s", err.text);
    struct buf x = file_text(a), y = file_text(b); /* frees the paths */
    assert_int_equal(x.len, y.len);
    assert_memory_equal(x.data, y.data, x.len);
    a = temp_path("a.json");
    b = temp_path("b.json");
    remove(a);
    remove(b);
    free(a);
    free(b);
    assert_int_equal(tokenizer_vocab_size(u), tokenizer_vocab_size(t));
    for (int32_t id = 0; id < tokenizer_vocab_size(t); id++) {
        assert_string_equal(tokenizer_id_to_piece(u, id, NULL), tokenizer_id_to_piece(t, id, NULL));
        assert_int_equal(tokenizer_is_special(u, id), tokenizer_is_special(t, id));
    }
    assert_int_equal(tokenizer_bos(u), tokenizer_bos(t));
    assert_int_equal(tokenizer_eos(u), tokenizer_eos(t));
    assert_int_equal(tokenizer_get_spec(u)->unk, tokenizer_get_spec(t)->unk);
    assert_int_equal(tokenizer_add_bos(u), tokenizer_add_bos(t));
    for (uint32_t seed = 0; seed < 200; seed++) {
        struct buf text = irregular_text(seed, 300, false);
        assert_same_ids(t, u, text.data, text.len,
                        seed % 2 ? TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_BOS : 0);
        buf_release(&text);
    }
    char spaces[100];
    memset(spaces, ' ', sizeof(spaces)); /* all of Llama 2's pieces of spaces have one score */
    for (size_t n = 0; n <= sizeof(spaces); n++) assert_same_ids(t, u, spaces, n, 0);
    tokenizer_free(u);
    buf_release(&x);
    buf_release(&y);
}

static void test_json_round_trip(void **state) {
    (void)state;
    static const char *const pres[] = {"gpt-2", "smollm", "qwen2",  "llama-bpe",
                                       "dbrx",  "gpt-4o", "tekken", "[^ ]+|\\s+"};
    for (size_t i = 0; i < ARRAY_LEN(pres); i++) {
        struct tokenizer *t = trained_small(pres[i]);
        assert_json_round_trip(t);
        tokenizer_free(t);
    }
    struct tokenizer *t = tokenizer_new_bytes(300);
    assert_json_round_trip(t);
    tokenizer_free(t);
}

static void test_json_round_trip_vocabularies(void **state) {
    struct tokenizer *t = gguf_tokenizer(*state);
    assert_json_round_trip(t);
    tokenizer_free(t);
}

static struct tokenizer *json_tokenizer(const char *text, struct error *err) {
    char *path = temp_path("t.json");
    put_file(path, text, strlen(text));
    struct tokenizer *t = tokenizer_from_json(path, err);
    remove(path);
    free(path);
    return t;
}

/* {"model": MODEL, REST} with single quotes for double ones. */
static struct tokenizer *json_quoted(struct error *err, const char *rest, const char *model) {
    char *text = xasprintf("{'model':{%s}%s}", model, rest);
    for (char *p = text; *p; p++)
        if (*p == '\'') *p = '"';
    struct tokenizer *t = json_tokenizer(text, err);
    free(text);
    return t;
}

#define BPE_MODEL "'type':'BPE','vocab':{'a':0,'b':1,'ab':2,'Ġ':3,'1':4},'merges':['a b']"
#define SPM_MODEL                                                                                  \
    "'type':'BPE','byte_fallback':true,'unk_token':'<unk>','vocab':{'<unk>':0,'a':1,'b':2,'ab':3," \
    "'▁':4,"                                                                                     \
    "'<0x41>':5,'bb':6},'merges':[['a','b'],['b','b']]"
#define UNIGRAM_MODEL                                                                              \
    "'type':'Unigram','unk_id':0,'byte_fallback':false,'vocab':[['<unk>',0],['▁',-2],['a',-3],"  \
    "['▁a',-4],['b',-3],['a▁b',-1]]"
#define METASPACE(scheme, split)                                                                   \
    "{'type':'Metaspace','replacement':'▁','prepend_scheme':'" scheme "','split':" split "}"
#define A16 "aaaaaaaaaaaaaaaa"
#define A64 A16 A16 A16 A16
#define BYTE_LEVEL "{'type':'ByteLevel','add_prefix_space':false,'use_regex':false}"
#define BYTE_LEVEL_WORDS "{'type':'ByteLevel','add_prefix_space':false,'use_regex':true}"

static void test_json_shapes(void **state) {
    (void)state;
    struct error err;
    struct tokenizer *t =
        assert_tokenizer(json_quoted(&err, ",'pre_tokenizer':" BYTE_LEVEL_WORDS, BPE_MODEL), &err);
    assert_string_equal(tokenizer_get_spec(t)->pre, "gpt-2");
    ASSERT_ENCODES(t, "ab a", 0, 2, 3, 0);
    assert_int_equal(tokenizer_eos(t), -1);
    tokenizer_free(t);
    t = assert_tokenizer(
        json_quoted(&err, ",'pre_tokenizer':{'type':'ByteLevel'},'normalizer':{'type':'NFC'}",
                    BPE_MODEL),
        &err);
    ASSERT_ENCODES(t, "ab", 0, 3, 2); /* add_prefix_space is true by default */
    ASSERT_ENCODES(t, " ab", 0, 3, 2);
    assert_json_round_trip(t);
    tokenizer_free(t);
    t = assert_tokenizer(
        json_quoted(&err,
                    ",'pre_tokenizer':{'type':'Sequence','pretokenizers':[{'type':'Digits',"
                    "'individual_digits':true}," BYTE_LEVEL_WORDS "]}",
                    BPE_MODEL),
        &err);
    assert_string_equal(tokenizer_get_spec(t)->pre, "smollm");
    tokenizer_free(t);
    t = assert_tokenizer(
        json_quoted(&err,
                    ",'pre_tokenizer':{'type':'Sequence','pretokenizers':[{'type':'Split','"
                    "behavior':'Isolated',"
                    "'invert':false,'pattern':{'Regex':'[a-z]|[^a-z]+'}}," BYTE_LEVEL
                    "]},'added_tokens':[{'id':9,"
                    "'content':'<x>','special':true},{'id':7,'content':'b1','special':false}]",
                    BPE_MODEL),
        &err);
    ASSERT_ENCODES(t, "ab<x>b1", 0, 0, 1, 7);
    tokenizer_free(t);
    t = assert_tokenizer(
        json_quoted(&err,
                    ",'normalizer':{'type':'Sequence','normalizers':[{'type':'Prepend','"
                    "prepend':'▁'},{'type':"
                    "'Replace','pattern':{'String':' '},'content':'▁'}]},'pre_tokenizer':null",
                    SPM_MODEL),
        &err);
    ASSERT_ENCODES(t, "abAx", 0, 4, 3, 5, 0);
    assert_int_equal(tokenizer_get_spec(t)->n_merges, 0); /* the merges follow from the scores */
    assert_json_round_trip(t);
    tokenizer_free(t);
    t = assert_tokenizer(
        json_quoted(
            &err,
            ",'pre_tokenizer':{'type':'Metaspace','replacement':'▁','prepend_scheme':'never',"
            "'split':false}",
            SPM_MODEL),
        &err);
    ASSERT_ENCODES(t, "ab", 0, 3);
    tokenizer_free(t);
    t = assert_tokenizer(
        json_quoted(
            &err,
            ",'pre_tokenizer':{'type':'Metaspace','replacement':'▁','prepend_scheme':'first',"
            "'split':false},'added_tokens':[{'id':7,'content':'<x>','special':true}]",
            SPM_MODEL),
        &err);
    ASSERT_ENCODES(t, "ab<x>ab", TOKENIZER_PARSE_SPECIAL, 4, 3, 7,
                   3);                 /* a space before the text only */
    ASSERT_ENCODES(t, " ab", 0, 4, 3); /* and none before a space */
    assert_json_round_trip(t);
    tokenizer_free(t);
}

/* 'ab' + 'a' is in the vocabulary but not in the list, so it is never merged: the list decides, not
 * the scores. */
static void test_json_merges_override_scores(void **state) {
    (void)state;
    struct error err;
    struct tokenizer *t = assert_tokenizer(
        json_quoted(&err, ",'pre_tokenizer':null",
                    "'type':'BPE','byte_fallback':true,'vocab':{'a':0,'b':1,'ab':2,'ba':3,'aba':4},"
                    "'merges':['a b','b a','a ba']"),
        &err);
    assert_int_equal(tokenizer_get_spec(t)->n_merges, 3);
    ASSERT_ENCODES(t, "aba", 0, 2, 0);
    ASSERT_ENCODES(t, "baba", 0, 1, 2, 0);
    assert_json_round_trip(t);
    tokenizer_free(t);
}

static void assert_json_refused(const char *rest, const char *model, const char *message) {
    struct error err;
    struct tokenizer *t = json_quoted(&err, rest, model);
    if (t) fail_msg("{%s}%s was not refused", model, rest);
    assert_true(err.code < 0);
    if (!strstr(err.text, message)) fail_msg("'%s' does not contain '%s'", err.text, message);
}

static void test_json_refusals(void **state) {
    (void)state;
    const char *words = ",'pre_tokenizer':" BYTE_LEVEL_WORDS;
    assert_json_refused("", "'type':'Unigram','vocab':[['a',-1]]", "spaces do not become");
    assert_json_refused("", "'type':'Unigram','vocab':{'a':-1}", "not an array");
    assert_json_refused("", "'type':'Unigram','vocab':[['a']]", "token 0 is not");
    assert_json_refused("", "'type':'Unigram','vocab':[['a',1e39]]", "spaces do not become");
    const char *space = ",'pre_tokenizer':" METASPACE("always", "true");
    assert_json_refused(space, "'type':'Unigram','vocab':[['a',1e39]]", "impossible score");
    assert_json_refused(space, "'type':'Unigram','unk_id':3,'vocab':[['a',0]]", "unknown token 3");
    assert_json_refused(space, "'type':'Unigram','unk_id':-3,'vocab':[['a',0]]", "no valid id");
    assert_json_refused(space, "'type':'Unigram','vocab':[]", "highest token id");
    assert_json_refused(",'normalizer':{'type':'Nmt'},'pre_tokenizer':" METASPACE("always", "true"),
                        UNIGRAM_MODEL, "normalizer 'Nmt'");
    assert_json_refused(",'normalizer':{'type':'Precompiled','precompiled_charsmap':'AAAA'},"
                        "'pre_tokenizer':" METASPACE("always", "true"),
                        UNIGRAM_MODEL, "character map is damaged");
    assert_json_refused(",'normalizer':{'type':'Sequence','normalizers':["
                        "{'type':'Replace','pattern':{'String':'a'},'content':'" A64 "'},"
                        "{'type':'Replace','pattern':{'String':'a'},'content':'" A64
                        "'}]},'pre_tokenizer':" METASPACE("always", "true"),
                        UNIGRAM_MODEL, "times longer");
    assert_json_refused(",'normalizer':{'type':'Replace','pattern':{'Regex':'('},'content':''},"
                        "'pre_tokenizer':" METASPACE("always", "true"),
                        UNIGRAM_MODEL, "does not compile");
    assert_json_refused(
        ",'decoder':{'type':'WordPiece'},'pre_tokenizer':" METASPACE("always", "true"),
        UNIGRAM_MODEL, "decoder 'WordPiece'");
    assert_json_refused(",'decoder':{'type':'CTC'},'pre_tokenizer':" BYTE_LEVEL_WORDS, BPE_MODEL,
                        "decoder 'CTC'");
    assert_json_refused(",'pre_tokenizer':{'type':'WhitespaceSplit'}", SPM_MODEL, "spaces do not");
    assert_json_refused("", "'type':'WordPiece','vocab':{'a':0}", "WordPiece");
    assert_json_refused(words, "'type':'BPE','vocab':{'a':0},'merges':['a b']", "merge 0");
    assert_json_refused(words, "'type':'BPE','vocab':{'a':0},'merges':[['a']]", "merge 0");
    assert_json_refused(words, "'type':'BPE','vocab':{'a':0},'merges':7", "merges");
    assert_json_refused(words, "'type':'BPE','vocab':{'a':-1},'merges':[]", "no valid id");
    assert_json_refused(words, "'type':'BPE','vocab':{'a':1.5},'merges':[]", "no valid id");
    assert_json_refused(words, "'type':'BPE','vocab':{'a':9999999},'merges':[]",
                        "highest token id");
    assert_json_refused(words, "'type':'BPE','vocab':{'a':0,'b':0},'merges':[]", "same id");
    assert_json_refused(words, "'type':'BPE','vocab':{},'merges':[]", "token");
    assert_json_refused(words, "'type':'BPE','vocab':{'ａ':0},'merges':[]", "no byte");
    assert_json_refused(words, BPE_MODEL ",'dropout':0.1", "dropout");
    assert_json_refused(words, BPE_MODEL ",'end_of_word_suffix':'</w>'", "end_of_word_suffix");
    assert_json_refused(words, BPE_MODEL ",'unk_token':'?'", "'?'");
    assert_json_refused(",'pre_tokenizer':{'type':'Whitespace'}", BPE_MODEL, "Whitespace");
    assert_json_refused(",'pre_tokenizer':" BYTE_LEVEL, BPE_MODEL, "not supported");
    assert_json_refused(",'normalizer':{'type':'Lowercase'}", SPM_MODEL, "Lowercase");
    assert_json_refused(",'normalizer':{'type':'BertNormalizer'},'pre_tokenizer':" BYTE_LEVEL_WORDS,
                        BPE_MODEL, "BertNormalizer");
    assert_json_refused(
        ",'post_processor':{'type':'RobertaProcessing'},'pre_tokenizer':" BYTE_LEVEL_WORDS,
        BPE_MODEL, "RobertaProcessing");
    assert_json_refused(
        ",'added_tokens':[{'id':0,'content':'x'}],'pre_tokenizer':" BYTE_LEVEL_WORDS, BPE_MODEL,
        "same id");
    assert_json_refused(",'added_tokens':[{'id':0}],'pre_tokenizer':" BYTE_LEVEL_WORDS, BPE_MODEL,
                        "content");
}

/* Scores are small multiples of 1/2, so that sums often tie and are exact in every order. */
static const struct spm_entry unigram_entries[] = {
    {"<unk>", 0, PIECE_UNKNOWN},
    {"<s>", 0, PIECE_CONTROL},
    {"</s>", 0, PIECE_CONTROL},
    {"▁", -2, 1},
    {"a", -3, 1},
    {"b", -3, 1},
    {"ab", -4, 1},
    {"ba", -4, 1},
    {"aba", -7, 1},
    {"▁a", -4, 1},
    {"▁▁", -3.5f, 1},
    {"b▁a", -6, 1},
    {"あ", -3, 1},
    {"ああ", -5.5f, 1},
    {"あい", -4, 1}, /* い is not a piece */
    {"<tool>", 0, PIECE_USER},
    {"[PAD16]", -1, PIECE_UNUSED},
    {"<", -5, 1},
    {"s>", -5, 1},
};

static struct tokenizer *unigram_small(bool bytes, const char *normalizer, bool prefix) {
    enum { N = ARRAY_LEN(unigram_entries) };
    const char *pieces[N + 256];
    char names[256][8];
    int32_t lens[N + 256], n = 0;
    float scores[N + 256];
    uint8_t types[N + 256];
    for (; n < N; n++) {
        pieces[n] = unigram_entries[n].piece;
        scores[n] = unigram_entries[n].score;
        types[n] = unigram_entries[n].type;
    }
    for (int b = 0; bytes && b < 256; b++, n++) {
        snprintf(names[b], sizeof(names[b]), "<0x%02X>", b);
        pieces[n] = names[b];
        scores[n] = 0;
        types[n] = PIECE_BYTE;
    }
    for (int i = 0; i < n; i++) lens[i] = (int32_t)strlen(pieces[i]);
    struct tokenizer_spec spec = {.kind = TOKENIZER_UNIGRAM,
                                  .n = n,
                                  .pieces = pieces,
                                  .lens = lens,
                                  .scores = scores,
                                  .types = types,
                                  .normalizer = normalizer,
                                  .unk = 0,
                                  .bos = 1,
                                  .eos = 2,
                                  .add_eos = true,
                                  .user_pieces = true,
                                  .add_space_prefix = prefix};
    struct error err;
    return assert_tokenizer(tokenizer_new(&spec, &err), &err);
}

static void test_unigram_rules(void **state) {
    (void)state;
    struct tokenizer *t = unigram_small(false, NULL, true),
                     *no_prefix = unigram_small(false, NULL, false),
                     *bytes = unigram_small(true, NULL, false);
    ASSERT_ENCODES(no_prefix, "ab", 0, 6);
    ASSERT_ENCODES(no_prefix, "aba", 0, 8); /* all three segmentations have the sum -7; the one with
                                               the longest last piece is chosen */
    ASSERT_ENCODES(t, "a", 0, 9);
    ASSERT_ENCODES(no_prefix, "b a", 0, 11); /* across a space */
    ASSERT_ENCODES(no_prefix, "あい", 0, 14);
    ASSERT_ENCODES(no_prefix, "い", 0, 0); /* unknown, once for a run */
    ASSERT_ENCODES(no_prefix, "いxyz\xFFい", 0, 0);
    ASSERT_ENCODES(bytes, "い", 0, 19 + 0xE3, 19 + 0x81, 19 + 0x84);
    ASSERT_ENCODES(no_prefix, "[PAD16]", 0, 0);         /* unused pieces are never chosen */
    ASSERT_ENCODES(no_prefix, "a<tool>b", 0, 4, 15, 5); /* wins against every other segmentation */
    ASSERT_ENCODES(no_prefix, "<s>", 0, 17, 18);        /* never the control token */
    ASSERT_ENCODES(no_prefix, "<s>a",
                   TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_BOS | TOKENIZER_ADD_EOS, 1, 4, 2);
    tokenizer_free(t);
    tokenizer_free(no_prefix);
    tokenizer_free(bytes);
}

/* The best segmentation by trying every piece that ends at every position, without a trie, ranges
 * and early decisions; positions are characters. */
static void naive_unigram(const struct tokenizer *t, const char *p, size_t n,
                          struct token_ids *out) {
    double *sum = xcalloc(n + 1, sizeof(*sum));
    size_t *from = xcalloc(n + 1, sizeof(*from));
    int32_t *id = xcalloc(n + 1, sizeof(*id));
    for (size_t end = 1; end <= n; end++) {
        sum[end] = -1e300;
        for (size_t pos = 0, char_size; pos < end; pos += char_size) {
            char_size = char_len(p + pos, n - pos);
            int32_t found = vocab_find(t, p + pos, end - pos);
            bool normal = found >= 0 && t->spec.types[found] == PIECE_NORMAL;
            bool user = found >= 0 && t->spec.types[found] == PIECE_USER;
            if (!normal && !user && pos + char_size != end) continue;
            double score = normal ? (double)t->spec.scores[found] : user ? -0.1 : -7.0 - 10.0;
            if (sum[pos] + score <= sum[end]) continue;
            sum[end] = sum[pos] + score;
            from[end] = pos;
            id[end] = normal || user ? found : t->spec.unk;
        }
    }
    struct token_ids reversed = {0};
    for (size_t pos = n; pos > 0; pos = from[pos]) token_ids_add(&reversed, id[pos]);
    for (int i = reversed.n - 1; i >= 0; i--)
        if (reversed.v[i] != t->spec.unk || out->n == 0 || out->v[out->n - 1] != t->spec.unk)
            token_ids_add(out, reversed.v[i]);
    token_ids_release(&reversed);
    free(sum);
    free(from);
    free(id);
}

static void test_unigram_equals_naive(void **state) {
    (void)state;
    struct tokenizer *t = unigram_small(false, NULL, false);
    static const char *const bits[] = {"a", "b", "▁", "あ", "い", "ab", "<tool>", "<", "s>", "x"};
    struct rng r = rng_make(11, RNG_TEST, 0, 0);
    for (int round = 0; round < 2000; round++) {
        struct buf b = {0};
        int n = 1 + (int)rng_below(&r, round < 1900 ? 20 : 150);
        for (int i = 0; i < n; i++)
            buf_puts(&b, bits[rng_below(&r, 2 + (uint32_t)round % (ARRAY_LEN(bits) - 1))]);
        struct token_ids want = {0}, got = encoded(t, b.data, b.len, 0);
        naive_unigram(t, b.data, b.len, &want);
        assert_ids(&got, want.v, want.n, b.data);
        token_ids_release(&want);
        token_ids_release(&got);
        buf_release(&b);
    }
    tokenizer_free(t);
}

/* If no piece continues across a ▁, words are split and cached, with the same ids. */
static void test_unigram_words_agree(void **state) {
    (void)state;
    char *path = shared_path("llm-jp/tokenizer.json");
    struct error err;
    struct tokenizer *t = assert_tokenizer(tokenizer_from_json(path, &err), &err);
    struct tokenizer other = *t;
    other.splits_words = !t->splits_words;
    for (uint32_t seed = 0; seed < 20 && t->splits_words; seed++) {
        struct buf b = irregular_text(seed, 9000, false);
        assert_same_ids(t, &other, b.data, b.len, 0);
        buf_release(&b);
    }
    tokenizer_free(t);
    free(path);
}

static void test_unigram_round_trip(void **state) {
    (void)state;
    struct tokenizer *toks[] = {unigram_small(true, NULL, false), unigram_small(true, NULL, true)};
    struct buf all = {0};
    for (uint32_t c = 1; c < 0x110000; c += c < 0x3000 ? 1 : 37)
        if ((c < 0xD800 || c > 0xDFFF) && c != 0x2581) put_utf8(&all, c);
    for (int b = 0; b < 256; b++) buf_add(&all, &(char){(char)b}, 1);
    for (size_t i = 0; i < ARRAY_LEN(toks); i++) {
        assert_round_trip(toks[i], all.data, all.len);
        for (uint32_t seed = 0; seed < 200; seed++) {
            struct buf b = irregular_text(seed, 100, false);
            if (strlen(b.data) == b.len && !strstr(b.data, "▁"))
                assert_round_trip(toks[i], b.data, b.len);
            buf_release(&b);
        }
        assert_json_round_trip(toks[i]);
        tokenizer_free(toks[i]);
    }
    buf_release(&all);
}

/* test/vectors/tokenizer.txt, whose vocabularies are in ../shared. */
static void test_vector_table(void **state) {
    const char *name = *state;
    struct error err;
    struct tokenizer *t = NULL;
    if (strcmp(name, "qwen3-nfc") == 0) {
        struct tokenizer *plain = qwen_tokenizer();
        struct tokenizer_spec spec = *tokenizer_get_spec(plain);
        spec.normalizer = "{\"type\":\"NFC\"}";
        t = assert_tokenizer(tokenizer_new(&spec, &err), &err);
        tokenizer_free(plain);
    } else {
        bool json = strcmp(name, "llm-jp-2.2") == 0;
        char *path = shared_path(json ? "llm-jp/tokenizer.json"
                                      : "llm-jp/llm-jp-tokenizer-100k.ver3.1.model");
        t = assert_tokenizer(json ? tokenizer_from_json(path, &err)
                                  : tokenizer_from_sentencepiece(path, &err),
                             &err);
        free(path);
    }
    struct buf table = file_text(xstrdup("test/vectors/tokenizer.txt"));
    int32_t n, n_checked = 0;
    const char **lines = lines_of(&table, &n);
    for (int32_t i = 0; i < n; i++) {
        size_t len = strlen(name);
        if (strncmp(lines[i], name, len) != 0 || lines[i][len] != '\t') continue;
        const char *quoted = lines[i] + len + 1, *ids = strchr(quoted, '\t');
        assert_non_null(ids);
        json_t *text = json_loadb(quoted, (size_t)(ids - quoted), JSON_DECODE_ANY, NULL);
        assert_non_null(text);
        struct token_ids want = {0},
                         got = encoded(t, json_string_value(text), json_string_length(text), 0);
        for (char *end; *ids; ids = end) {
            long id = strtol(ids, &end, 10);
            if (end == ids) break;
            token_ids_add(&want, (int32_t)id);
        }
        assert_ids(&got, want.v, want.n, json_string_value(text));
        token_ids_release(&want);
        token_ids_release(&got);
        json_decref(text);
        n_checked++;
    }
    assert_true(n_checked > 25);
    free(lines);
    buf_release(&table);
    tokenizer_free(t);
}

/* Normalisation */

static void normalize_text(const char *json, const char *text, size_t len, struct buf *out) {
    struct error err;
    struct buf scratch = {0};
    struct normalizer *n = normalizer_new(json, &err);
    if (!n) fail_msg("%s", err.text);
    normalizer_apply(n, text, len, out, &scratch);
    normalizer_free(n);
    buf_release(&scratch);
}

static void test_normalizers(void **state) {
    (void)state;
    static const struct {
        const char *json, *text, *want;
    } cases[] = {
        {"{'type':'NFC'}", "e\xCC\x81 か\xE3\x82\x99 ﾊﾟ Å", "é が ﾊﾟ Å"},
        {"{'type':'NFD'}", "é が", "e\xCC\x81 か\xE3\x82\x99"},
        {"{'type':'NFKC'}", "ﾊﾟ①㍿ﬁ　x", "パ1株式会社fi x"},
        {"{'type':'NFKD'}", "é①",
         "e\xCC\x81"
         "1"},
        {"{'type':'NFC'}", "e\xFF\xCC\x81\xCC",
         "e\xFF\xCC\x81\xCC"}, /* an invalid byte separates them */
        {"{'type':'NFC'}", "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "각"},
        {"{'type':'NFC'}", "", ""},
        {"{'type':'Prepend','prepend':'▁'}", "a", "▁a"},
        {"{'type':'Prepend','prepend':'▁'}", "", ""},
        {"{'type':'Strip','strip_left':true,'strip_right':false}", " 　a b\n", "a b\n"},
        {"{'type':'Strip','strip_left':true,'strip_right':true}", " 　 ", ""},
        {"{'type':'Replace','pattern':{'String':'aa'},'content':'b'}", "aaaaa", "bba"},
        {"{'type':'Replace','pattern':{'Regex':' {2,}'},'content':'▁'}", "a   b c  ", "a▁b c▁"},
        {"{'type':'Replace','pattern':{'Regex':'^'},'content':'>'}", "a\nb\n", ">a\n>b\n"},
        {"{'type':'Replace','pattern':{'Regex':'(?<!\\\\n)^'},'content':'>'}", "a\nb", ">a\nb"},
        {"{'type':'Replace','pattern':{'Regex':'\\\\s+'},'content':' '}", "a　\nb\xFF  ",
         "a b\xFF "},
        {"{'type':'Sequence','normalizers':[{'type':'NFKC'},{'type':'Replace','pattern':{'String':"
         "' '},'content':'_'},{'type':'Prepend','prepend':'x'}]}",
         "　a", "x_a"},
        {"{'type':'Sequence','normalizers':[]}", "a", "a"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *json = xstrdup(cases[i].json);
        for (char *p = json; *p; p++)
            if (*p == '\'') *p = '"';
        struct buf out = {0};
        struct error err;
        struct normalizer *n = normalizer_new(json, &err);
        if (!n) fail_msg("'%s': %s", json, err.text);
        struct buf scratch = {0};
        normalizer_apply(n, cases[i].text, strlen(cases[i].text), &out, &scratch);
        assert_string_equal(out.data, cases[i].want);
        normalizer_free(n);
        free(json);
        buf_release(&out);
        buf_release(&scratch);
    }
}

/* Normalizing range by range equals one call of the library on the whole text. */
static void test_ranges_equal_whole_text(void **state) {
    (void)state;
    const struct {
        const char *json;
        uninorm_t form;
    } forms[] = {{"{\"type\":\"NFC\"}", UNINORM_NFC},
                 {"{\"type\":\"NFD\"}", UNINORM_NFD},
                 {"{\"type\":\"NFKC\"}", UNINORM_NFKC},
                 {"{\"type\":\"NFKD\"}", UNINORM_NFKD}};
    struct rng r = rng_make(21, RNG_TEST, 0, 0);
    for (size_t f = 0; f < ARRAY_LEN(forms); f++) {
        struct buf text = {0}, got = {0};
        for (uint32_t c = 1; c < 0x110000; c++) /* every character once, in order */
            if (c < 0xD800 || c > 0xDFFF) put_utf8(&text, c);
        /* and in random order, so that marks follow all kinds of bases */
        for (int i = 0; i < 100000; i++) {
            static const uint32_t from[] = {0x20,   0x300,  0xC0,  0x1100,
                                            0xAC00, 0x3040, 0x900, 0x1D150};
            uint32_t c = from[rng_below(&r, ARRAY_LEN(from))] + rng_below(&r, 0x80);
            put_utf8(&text, c);
        }
        normalize_text(forms[f].json, text.data, text.len, &got);
        size_t n = 0;
        uint8_t *want = u8_normalize(forms[f].form, (uint8_t *)text.data, text.len, NULL, &n);
        assert_non_null(want);
        assert_int_equal(got.len, n);
        assert_memory_equal(got.data, want, n);
        free(want);
        buf_release(&text);
        buf_release(&got);
    }
}

/* SentencePiece's table in its simplest form: every node has 256 separate slots. */
struct charsmap_builder {
    uint32_t units[64 * 256];
    uint32_t blocks;
    struct buf targets;
};

static void charsmap_add(struct charsmap_builder *m, const char *key, const char *target) {
    uint32_t unit = 0, base = 256; /* the root's children */
    for (const char *p = key; *p; p++) {
        unit = base ^ (uint8_t)*p;
        if (m->units[unit] == 0) m->units[unit] = (unit ^ (++m->blocks * 256)) << 10 | (uint8_t)*p;
        base = unit ^ (m->units[unit] >> 10);
    }
    m->units[unit] |= 1u << 8;
    m->units[base] = 1u << 31 | (uint32_t)m->targets.len;
    buf_add(&m->targets, target, strlen(target) + 1);
}

static struct buf charsmap_blob(void) {
    struct charsmap_builder *m = xcalloc(1, sizeof(*m));
    m->blocks = 1;
    m->units[0] = 256u << 10;
    charsmap_add(m, "Ａ", "a");
    charsmap_add(m, "ｶ", "カ");
    charsmap_add(m, "ｶﾞ", "ガ");
    charsmap_add(m, "\t", " ");
    charsmap_add(m, "　", " ");
    charsmap_add(m, "㍿", "株式会社");
    charsmap_add(m, "\x01", "");
    struct buf b = {0};
    uint32_t size = (m->blocks + 1) * 256 * 4;
    buf_add(&b, &size, 4);
    buf_add(&b, m->units, size);
    buf_add(&b, m->targets.data, m->targets.len);
    buf_release(&m->targets);
    free(m);
    return b;
}

static void test_charsmap(void **state) {
    (void)state;
    struct buf blob = charsmap_blob(), out = {0};
    char *json = normalizer_from_sentencepiece(blob.data, blob.len, false);
    const char *text = "ＡAｶﾞｶx\t　㍿\x01\xFF\xEF\xBD";
    normalize_text(json, text, strlen(text), &out);
    assert_string_equal(out.data, "aAガカx  株式会社\xFF\xEF\xBD");
    size_t len;
    uint8_t *bytes = normalizer_charsmap(json, &len);
    assert_int_equal(len, blob.len);
    assert_memory_equal(bytes, blob.data, len);
    free(bytes);
    free(json);
    json = normalizer_from_sentencepiece(blob.data, blob.len, true);
    text = "  a\t b \t";
    out.len = 0;
    normalize_text(json, text, strlen(text), &out);
    assert_string_equal(out.data, "a b");
    free(json);
    struct rng r = rng_make(31, RNG_TEST, 0, 0);
    struct error err;
    for (int i = 0; i < 2000; i++) { /* with a changed byte or truncated, it is refused or reads
                                        only within its bounds */
        struct buf bad = {0}, scratch = {0};
        size_t cut = i % 4 ? blob.len : rng_below(&r, (uint32_t)blob.len);
        buf_add(&bad, blob.data, cut);
        for (int k = 0; k < 50 && cut > 0; k++)
            bad.data[rng_below(&r, (uint32_t)cut)] = (char)rng_u32(&r);
        char *broken = normalizer_from_sentencepiece(bad.data ? bad.data : "", bad.len, false);
        struct normalizer *n = broken ? normalizer_new(broken, &err) : NULL;
        if (n) normalizer_apply(n, text, strlen(text), &out, &scratch);
        if (n) normalizer_apply(n, "ＡｶﾞｶﾞｶAｶ", strlen("ＡｶﾞｶﾞｶAｶ"), &out, &scratch);
        normalizer_free(n);
        free(broken);
        buf_release(&bad);
        buf_release(&scratch);
    }
    buf_release(&blob);
    buf_release(&out);
}

/* A megabyte of repeated text does not take quadratic time, which would be minutes. */
static void test_runs_are_not_quadratic(void **state) {
    (void)state;
    struct tokenizer *toks[] = {
        trained_small("gpt-2"), trained_small("qwen2"), spm_small(true),
        unigram_small(true, "{\"type\":\"NFC\"}", true),
        unigram_small(false,
                      "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" {2,}\"},\"content\":\" \"}",
                      true)};
    static const char *const runs[] = {"a",        " ",   "あ",   "ab",
                                       "\xCC\x81", "x  ", "\xFF", "か\xE3\x82\x99"};
    double worst = 0;
    for (size_t i = 0; i < ARRAY_LEN(toks); i++) {
        for (size_t k = 0; k < ARRAY_LEN(runs); k++) {
            struct buf b = {0};
            while (b.len < 1 << 20) buf_puts(&b, runs[k]);
            clock_t start = clock();
            struct token_ids ids = encoded(toks[i], b.data, b.len, 0);
            worst = MAX(worst, (double)(clock() - start) / CLOCKS_PER_SEC);
            assert_true(ids.n > 0);
            token_ids_release(&ids);
            buf_release(&b);
        }
        tokenizer_free(toks[i]);
    }
    if (worst > 20) fail_msg("a megabyte took %.1f s of processor time", worst);
}

/* Written as GGUF with a model and read back. */
static void assert_gguf_round_trip(struct tokenizer *t) {
    struct model_config c;
    struct error err;
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    c.vocab_size = tokenizer_vocab_size(t);
    struct model *m = model_new_random(&c, 1, NUMERIC_EXACT);
    char *path = temp_path("t.gguf");
    tokenizer_free(m->tok);
    m->tok = t;
    if (model_write_gguf(m, path, TENSOR_F32, &err) != OK) fail_msg("%s", err.text);
    struct tokenizer *u = assert_tokenizer(gguf_tokenizer_open(path, &err), &err);
    const struct tokenizer_spec *x = tokenizer_get_spec(t), *y = tokenizer_get_spec(u);
    assert_int_equal(x->kind, y->kind);
    assert_string_equal(x->normalizer ? x->normalizer : "", y->normalizer ? y->normalizer : "");
    assert_int_equal(x->add_eos, y->add_eos);
    assert_int_equal(x->split_words, y->split_words);
    assert_int_equal(x->user_pieces, y->user_pieces);
    for (uint32_t seed = 0; seed < 200; seed++) {
        struct buf b = irregular_text(seed, 200, false);
        assert_same_ids(t, u, b.data, b.len,
                        seed % 2 ? TOKENIZER_PARSE_SPECIAL | TOKENIZER_ADD_BOS | TOKENIZER_ADD_EOS
                                 : 0);
        buf_release(&b);
    }
    tokenizer_free(u);
    model_close(m); /* and t */
    remove(path);
    free(path);
}

static void test_gguf_round_trip(void **state) {
    (void)state;
    struct buf blob = charsmap_blob();
    log_quiet = true;
    for (int i = 0; i < 4; i++) {
        char *json =
            normalizer_from_sentencepiece(i & 1 ? blob.data : "", i & 1 ? blob.len : 0, i & 2);
        struct tokenizer *t = unigram_small(i & 1, json, i & 2);
        assert_json_round_trip(t);
        assert_gguf_round_trip(t);
        free(json);
    }
    assert_gguf_round_trip(unigram_small(true, "{\"type\":\"NFKC\"}", true));
    struct tokenizer *plain = trained_small("qwen2");
    struct tokenizer_spec spec = *tokenizer_get_spec(plain);
    struct error err;
    spec.normalizer = "{\"type\":\"NFC\"}";
    struct tokenizer *nfc = assert_tokenizer(tokenizer_new(&spec, &err), &err);
    tokenizer_free(plain);
    assert_json_round_trip(nfc);
    assert_gguf_round_trip(nfc);
    log_quiet = false;
    buf_release(&blob);
}

static void test_llm_jp_round_trips(void **state) {
    (void)state;
    char *json = shared_path("llm-jp/tokenizer.json"),
         *model = shared_path("llm-jp/llm-jp-tokenizer-100k.ver3.1.model");
    struct error err;
    struct tokenizer *t = assert_tokenizer(tokenizer_from_json(json, &err), &err);
    ASSERT_ENCODES(t, "<EOD|LLM-jp>", TOKENIZER_PARSE_SPECIAL, 7);
    ASSERT_ENCODES(t, "a", TOKENIZER_ADD_EOS, 367, 7);
    struct token_ids text_ids = encoded(t, "<EOD|LLM-jp></s|LLM-jp>", 23, 0);
    for (int i = 0; i < text_ids.n; i++) assert_false(tokenizer_is_special(t, text_ids.v[i]));
    token_ids_release(&text_ids);
    assert_json_round_trip(t);
    assert_gguf_round_trip(t);
    t = assert_tokenizer(tokenizer_from_sentencepiece(model, &err), &err);
    assert_json_round_trip(t);
    assert_gguf_round_trip(t);
    free(json);
    free(model);
}

static void test_unigram_json(void **state) {
    (void)state;
    struct error err;
    struct tokenizer *t = assert_tokenizer(
        json_quoted(&err, ",'pre_tokenizer':" METASPACE("always", "false"), UNIGRAM_MODEL), &err);
    ASSERT_ENCODES(t, "a b", 0, 1, 5);
    assert_json_round_trip(t);
    assert_gguf_round_trip(t);
    t = assert_tokenizer(
        json_quoted(&err, ",'pre_tokenizer':" METASPACE("first", "true"), UNIGRAM_MODEL), &err);
    ASSERT_ENCODES(t, "a b", 0, 3, 1, 4); /* words are split before pieces are matched */
    ASSERT_ENCODES(t, "  a", 0, 1, 3);
    assert_json_round_trip(t);
    assert_gguf_round_trip(t);
    t = assert_tokenizer(json_quoted(&err,
                                     ",'pre_tokenizer':{'type':'Sequence','pretokenizers':[{'type':"
                                     "'WhitespaceSplit'},{'type':'Metaspace','replacement':'▁',"
                                     "'add_prefix_space':true}]}",
                                     UNIGRAM_MODEL),
                         &err);
    ASSERT_ENCODES(t, " a\n　b ", 0, 3, 1, 4);
    struct token_ids none = encoded(t, " \n ", 3, 0);
    assert_int_equal(none.n, 0);
    assert_json_round_trip(t);
    tokenizer_free(t);
}

static void put_varint(struct buf *b, uint64_t v) {
    for (; v >= 0x80; v >>= 7) buf_add(b, &(char){(char)(v | 0x80)}, 1);
    buf_add(b, &(char){(char)v}, 1);
}

static void put_number(struct buf *b, int field, uint64_t v) {
    put_varint(b, (uint64_t)field << 3);
    put_varint(b, v);
}

static void put_bytes(struct buf *b, int field, const void *p, size_t n) {
    put_varint(b, (uint64_t)field << 3 | 2);
    put_varint(b, n);
    buf_add(b, p, n);
}

/* spm_entries in SentencePiece's file format. */
static struct buf spm_model_file(int model_type) {
    struct buf file = {0}, part = {0};
    for (size_t i = 0; i < ARRAY_LEN(spm_entries); i++) {
        part.len = 0;
        put_bytes(&part, 1, spm_entries[i].piece, strlen(spm_entries[i].piece));
        put_varint(&part, 2 << 3 | 5);
        buf_add(&part, &spm_entries[i].score, 4);
        if (spm_entries[i].type != PIECE_NORMAL) put_number(&part, 3, spm_entries[i].type);
        put_bytes(&file, 1, part.data, part.len);
    }
    part.len = 0;
    put_number(&part, 3, (uint64_t)model_type);
    put_number(&part, 43, UINT64_MAX); /* pad_id -1 */
    put_bytes(&file, 2, part.data, part.len);
    part.len = 0;
    put_bytes(&part, 1, "identity", 8);
    put_number(&part, 3, 1);
    put_number(&part, 4, 0);
    put_bytes(&file, 3, part.data, part.len);
    buf_release(&part);
    return file;
}

/* Refused at every truncation except before the last field, which is optional; a changed byte never
 * crashes the reader or the tokenizer. */
static void assert_damage_is_handled(const char *path, struct buf *file) {
    struct error err;
    for (size_t n = 0; n < file->len; n++) {
        put_file(path, file->data, n);
        struct tokenizer *t = tokenizer_from_sentencepiece(path, &err);
        if (t && n < file->len - 16) fail_msg("%zu bytes of %zu were read", n, file->len);
        tokenizer_free(t);
    }
    struct rng r = rng_make(5, RNG_TEST, 0, 0);
    for (int i = 0; i < 500; i++) {
        char *byte = file->data + rng_below(&r, (uint32_t)file->len), old = *byte;
        *byte = (char)rng_u32(&r);
        put_file(path, file->data, file->len);
        struct tokenizer *t = tokenizer_from_sentencepiece(path, &err);
        if (t) {
            struct token_ids ids = encoded(t, "ab é<tool>", 11, TOKENIZER_PARSE_SPECIAL);
            token_ids_release(&ids);
        }
        tokenizer_free(t);
        *byte = old;
    }
}

static void test_sentencepiece(void **state) {
    (void)state;
    char *path = temp_path("t.model");
    struct error err;
    struct buf file = spm_model_file(1);
    put_file(path, file.data, file.len);
    struct tokenizer *t = assert_tokenizer(tokenizer_from_sentencepiece(path, &err), &err),
                     *want = spm_small(true);
    ASSERT_ENCODES(t, "ab<tool>", TOKENIZER_ADD_BOS, 1, 9, 12);
    tokenizer_free(t);
    assert_damage_is_handled(path, &file);
    buf_release(&file);
    file = spm_model_file(2);
    put_file(path, file.data, file.len);
    t = assert_tokenizer(tokenizer_from_sentencepiece(path, &err), &err);
    for (uint32_t seed = 0; seed < 100; seed++) {
        struct buf text = irregular_text(seed, 40, false);
        assert_same_ids(want, t, text.data, text.len, TOKENIZER_ADD_BOS);
        buf_release(&text);
    }
    ASSERT_ENCODES(t, "abc", TOKENIZER_ADD_BOS, 1, 9, 6);
    tokenizer_free(t);
    tokenizer_free(want);
    assert_damage_is_handled(path, &file);
    buf_release(&file);
    file = spm_model_file(3);
    put_file(path, file.data, file.len);
    assert_null(tokenizer_from_sentencepiece(path, &err));
    assert_non_null(strstr(err.text, "model type 3"));
    buf_release(&file);
    remove(path);
    free(path);
}

static struct buf llama2c_file(int32_t *vocab) {
    static const char *const pieces[] = {"<unk>", "\n<s>\n", "\n</s>\n", "<0x41>",
                                         " ",     "a",       " a",       "b"};
    struct buf file = {0};
    int32_t longest = 6;
    buf_add(&file, &longest, 4);
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++) {
        float score = -(float)i;
        int32_t len = (int32_t)strlen(pieces[i]);
        buf_add(&file, &score, 4);
        buf_add(&file, &len, 4);
        buf_add(&file, pieces[i], (size_t)len);
    }
    *vocab = ARRAY_LEN(pieces);
    return file;
}

static void test_llama2c(void **state) {
    (void)state;
    char *path = temp_path("tok.bin");
    struct error err;
    int32_t vocab;
    struct buf file = llama2c_file(&vocab);
    put_file(path, file.data, file.len);
    struct tokenizer *t = assert_tokenizer(tokenizer_from_llama2c(path, vocab, &err), &err);
    ASSERT_ENCODES(t, "a bA", TOKENIZER_ADD_BOS, 1, 6, 4, 7, 3);
    assert_string_equal(tokenizer_id_to_piece(t, 1, NULL), "<s>");
    assert_string_equal(tokenizer_id_to_piece(t, 6, NULL), "▁a");
    assert_round_trip(t, " a b", 4);
    tokenizer_free(t);
    assert_null(tokenizer_from_llama2c(path, vocab + 1, &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    assert_null(tokenizer_from_llama2c(path, vocab - 1, &err));
    assert_null(tokenizer_from_llama2c("/nonexistent/tok.bin", vocab, &err));
    for (size_t n = 0; n < file.len; n++) {
        put_file(path, file.data, n);
        assert_null(tokenizer_from_llama2c(path, vocab, &err));
    }
    for (size_t i = 0; i < file.len; i++) {
        char old = file.data[i];
        file.data[i] = (char)0xFF;
        put_file(path, file.data, file.len);
        tokenizer_free(tokenizer_from_llama2c(path, vocab, &err));
        file.data[i] = old;
    }
    buf_release(&file);
    remove(path);
    free(path);
}

static void test_stories(void **state) {
    (void)state;
    char *path = shared_path("../stories260K/tok512.bin");
    struct error err;
    struct tokenizer *t = assert_tokenizer(tokenizer_from_llama2c(path, 512, &err), &err);
    ASSERT_ENCODES(t, "Once upon a time", TOKENIZER_ADD_BOS, 1, 403, 407, 261,
                   378); /* the reference model's output */
    struct buf b = {0};
    tokenizer_decode(t, (const int32_t[]){1, 403, 407, 261, 378, 432, 383, 286}, 8, false, &b);
    assert_string_equal(b.data, "Once upon a time, there was");
    buf_release(&b);
    for (uint32_t seed = 0; seed < 20; seed++) {
        b = irregular_text(seed, 200, false);
        if (!strstr(b.data, "▁") && strlen(b.data) == b.len) assert_round_trip(t, b.data, b.len);
        buf_release(&b);
    }
    tokenizer_free(t);
    free(path);
}

static void test_broken_json(void **state) {
    (void)state;
    char *path = temp_path("cut.json");
    struct error err;
    struct tokenizer *t = spm_small(true),
                     *bytes = assert_tokenizer(
                         json_quoted(&err, ",'pre_tokenizer':" BYTE_LEVEL_WORDS, BPE_MODEL), &err);
    assert_int_equal(tokenizer_write_json(t, path, &err),
                     ERR_MISMATCH); /* é of "éa" is not a token */
    assert_non_null(strstr(err.text, "not a token"));
    if (tokenizer_write_json(bytes, path, &err) != OK) fail_msg("%s", err.text);
    struct buf file = {0};
    assert_int_equal(file_read(path, 1 << 20, &file, &err), OK);
    for (size_t n = 0; n + 1 < file.len; n++) {
        put_file(path, file.data, n);
        assert_null(tokenizer_from_json(path, &err));
    }
    struct rng r = rng_make(6, RNG_TEST, 0, 0);
    for (int i = 0; i < 500; i++) {
        char *byte = file.data + rng_below(&r, (uint32_t)file.len), old = *byte;
        *byte = "\"{}[]:,09x\\"[rng_below(&r, 11)];
        put_file(path, file.data, file.len);
        tokenizer_free(tokenizer_from_json(path, &err));
        *byte = old;
    }
    remove(path);
    free(path);
    buf_release(&file);
    tokenizer_free(t);
    tokenizer_free(bytes);
}

/* Truncated unigram files are refused; those with a changed byte are refused or can be used. */
static void test_broken_unigram_json(void **state) {
    (void)state;
    struct buf blob = charsmap_blob(), file = {0};
    char *json = normalizer_from_sentencepiece(blob.data + blob.len - 4, 4, true);
    char *path = temp_path("cut.json");
    struct error err;
    struct normalizer *invalid = normalizer_new(json, &err); /* four bytes are not a table */
    assert_null(invalid);
    free(json);
    json = normalizer_from_sentencepiece("", 0, true);
    struct tokenizer *t = unigram_small(false, json, true);
    if (tokenizer_write_json(t, path, &err) != OK) fail_msg("%s", err.text);
    assert_int_equal(file_read(path, 1 << 20, &file, &err), OK);
    for (size_t n = 0; n + 1 < file.len; n++) {
        put_file(path, file.data, n);
        assert_null(tokenizer_from_json(path, &err));
    }
    struct rng r = rng_make(7, RNG_TEST, 0, 0);
    log_quiet = true;
    for (int i = 0; i < 1500; i++) {
        char *byte = file.data + rng_below(&r, (uint32_t)file.len), old = *byte;
        *byte = "\"{}[]:,09x\\-"[rng_below(&r, 12)];
        put_file(path, file.data, file.len);
        struct tokenizer *u = tokenizer_from_json(path, &err);
        struct token_ids ids = {0};
        if (u) tokenizer_encode(u, " ab  い<s>a<tool>", 19, TOKENIZER_PARSE_SPECIAL, &ids);
        token_ids_release(&ids);
        tokenizer_free(u);
        *byte = old;
    }
    log_quiet = false;
    remove(path);
    free(path);
    free(json);
    tokenizer_free(t);
    buf_release(&file);
    buf_release(&blob);
}

static void test_chat_marks(void **state) {
    (void)state;
    struct tokenizer *t = tokenizer_new_bytes(259);
    const struct chat_message msgs[] = {{"system", "be brief"},
                                        {"user", "hi <|im_end|>"},
                                        {"assistant", "ho"},
                                        {"user", ""},
                                        {"assistant", "日本"}};
    struct token_ids ids = {0};
    struct buf mask = {0}, text = {0};
    struct error err;
    assert_int_equal(chat_encode(t, msgs, 5, true, &ids, &mask, &err), OK);
    assert_int_equal(mask.len, ids.n);
    tokenizer_decode(t, ids.v, ids.n, true, &text);
    assert_string_equal(
        text.data,
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi <|im_end|><|im_end|>\n"
        "<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\n<|im_end|>\n"
        "<|im_start|>assistant\n日本<|im_end|>\n<|im_start|>assistant\n");
    struct token_ids assistant = {0};
    int ends = 0;
    for (int i = 0; i < ids.n; i++) {
        if (mask.data[i]) token_ids_add(&assistant, ids.v[i]);
        ends += ids.v[i] == 2;
    }
    assert_int_equal(ends, 5); /* the one that the user typed is text */
    text.len = 0;
    tokenizer_decode(t, assistant.v, assistant.n, true, &text);
    assert_string_equal(text.data, "ho<|im_end|>日本<|im_end|>");
    token_ids_release(&assistant);
    token_ids_release(&ids);
    buf_release(&mask);
    buf_release(&text);
    tokenizer_free(t);
}

/* A prompt is a prefix of the conversation that continues it. */
static void test_chat_prefix(void **state) {
    (void)state;
    struct tokenizer *toks[] = {trained_small("smollm"), spm_small(true)};
    const struct chat_message msgs[] = {
        {"user", "the cat"}, {"assistant", "sat on the mat"}, {"user", "ab"}};
    for (int i = 0; i < 2; i++) {
        struct token_ids prompt = {0}, all = {0};
        struct error err;
        assert_int_equal(chat_encode(toks[i], msgs, 1, true, &prompt, NULL, &err), OK);
        assert_int_equal(chat_encode(toks[i], msgs, 3, false, &all, NULL, &err), OK);
        assert_true(all.n > prompt.n);
        assert_memory_equal(all.v, prompt.v, sizeof(*all.v) * (size_t)prompt.n);
        token_ids_release(&prompt);
        token_ids_release(&all);
        tokenizer_free(toks[i]);
    }
}

/* Without the two special tokens ChatML's markers are encoded as text, after BOS, and a space is
 * added only at the beginning. */
static void test_chat_plain(void **state) {
    (void)state;
    struct tokenizer *t = spm_small(true);
    const struct chat_message msgs[] = {{"user", "ab"}, {"assistant", "a"}};
    struct token_ids ids = {0};
    struct buf mask = {0};
    struct error err;
    assert_int_equal(chat_encode(t, msgs, 2, false, &ids, &mask, &err), OK);
    assert_int_equal(mask.len, ids.n);
    assert_int_equal(ids.v[0], 1);
    assert_int_equal(mask.data[0], 0);
    int spaces = 0;
    for (int i = 1; i < ids.n; i++) spaces += tokenizer_id_to_piece(t, ids.v[i], NULL)[0] == '\xE2';
    assert_int_equal(spaces, 1);
    token_ids_release(&ids);
    buf_release(&mask);
    tokenizer_free(t);
}

/* Text of about 4 MB: Shakespeare, or questions and short answers in Japanese. */
static struct buf bench_text(bool japanese) {
    struct buf b = {0};
    struct buf raw = file_text(
        shared_path(japanese ? "../eval/jcommonsenseqa/jcommonsenseqa-v1.3_valid-v1.3.json"
                             : "../text/corpus-tinyshakespeare/tiny_shakespeare.txt"));
    struct buf plain = {0};
    for (char *p = raw.data; japanese && (p = strstr(p, "\": \"")); p++) {
        size_t n = strcspn(p + 4, "\"");
        buf_add(&plain, p + 4, n);
        buf_puts(&plain, strchr("?", p[4 + n - 1]) ? "\n" : "。");
    }
    while (b.len < 4 << 20)
        buf_add(&b, japanese ? plain.data : raw.data, japanese ? plain.len : raw.len);
    buf_release(&plain);
    buf_release(&raw);
    return b;
}

static void bench_tokenizer(const char *name, struct tokenizer *t, const struct buf texts[2]) {
    printf("%-14s", name);
    for (int i = 0; i < 2; i++) {
        double best = 1e9;
        int n = 0;
        for (int round = 0; round < 5; round++) {
            clock_t start = clock();
            struct token_ids ids = encoded(t, texts[i].data, texts[i].len, 0);
            best = MIN(best, (double)(clock() - start) / CLOCKS_PER_SEC);
            n = ids.n;
            token_ids_release(&ids);
        }
        printf("  %s %6.1f MB/s, %4.2f bytes a token", i ? "Japanese" : "English",
               (double)texts[i].len / best / 1e6, (double)texts[i].len / n);
    }
    printf("\n");
    tokenizer_free(t);
}

/* Best of five, one thread, processor time; needs the files in ../shared. */
static void bench_run(void) {
    struct error err;
    const struct buf texts[2] = {bench_text(false), bench_text(true)};
    static const char *const names[] = {"gpt-2", "starcoder", "llama-spm"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        bench_tokenizer(names[i], gguf_tokenizer(names[i]), texts);
    bench_tokenizer("qwen3", qwen_tokenizer(), texts);
    char *json = shared_path("llm-jp/tokenizer.json"),
         *model = shared_path("llm-jp/llm-jp-tokenizer-100k.ver3.1.model");
    bench_tokenizer("llm-jp 2.2", assert_tokenizer(tokenizer_from_json(json, &err), &err), texts);
    bench_tokenizer("llm-jp 3.1", assert_tokenizer(tokenizer_from_sentencepiece(model, &err), &err),
                    texts);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
        bench_run();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8_len),
        cmocka_unit_test(test_every_byte_and_plane),
        cmocka_unit_test(test_merge_equals_naive),
        cmocka_unit_test(test_cache_and_pieces_agree),
        cmocka_unit_test(test_threads_share_one),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_digits_pattern_is_two_stages),
        cmocka_unit_test(test_long_runs),
        cmocka_unit_test(test_refused_specs),
        cmocka_unit_test(test_specials_only_where_allowed),
        cmocka_unit_test(test_spm_rules),
        cmocka_unit_test(test_spm_words_agree),
        cmocka_unit_test(test_spm_decode),
        cmocka_unit_test_prestate(test_vectors, "llama-spm"),
        cmocka_unit_test_prestate(test_vectors, "phi-3"),
        cmocka_unit_test_prestate(test_vectors, "gpt-2"),
        cmocka_unit_test_prestate(test_vectors, "starcoder"),
        cmocka_unit_test(test_vectors_qwen2),
        cmocka_unit_test(test_vectors_llama_bpe),
        cmocka_unit_test(test_train_equals_reference),
        cmocka_unit_test(test_train_equals_naive),
        cmocka_unit_test(test_train_limits),
        cmocka_unit_test(test_json_round_trip),
        cmocka_unit_test_prestate(test_json_round_trip_vocabularies, "gpt-2"),
        cmocka_unit_test_prestate(test_json_round_trip_vocabularies, "llama-spm"),
        cmocka_unit_test_prestate(test_json_round_trip_vocabularies, "phi-3"),
        cmocka_unit_test_prestate(test_json_round_trip_vocabularies, "starcoder"),
        cmocka_unit_test(test_json_shapes),
        cmocka_unit_test(test_json_merges_override_scores),
        cmocka_unit_test(test_json_refusals),
        cmocka_unit_test(test_unigram_rules),
        cmocka_unit_test(test_unigram_equals_naive),
        cmocka_unit_test(test_unigram_words_agree),
        cmocka_unit_test(test_unigram_round_trip),
        cmocka_unit_test(test_unigram_json),
        cmocka_unit_test_prestate(test_vector_table, "llm-jp-2.2"),
        cmocka_unit_test_prestate(test_vector_table, "llm-jp-3.1"),
        cmocka_unit_test_prestate(test_vector_table, "qwen3-nfc"),
        cmocka_unit_test(test_normalizers),
        cmocka_unit_test(test_ranges_equal_whole_text),
        cmocka_unit_test(test_charsmap),
        cmocka_unit_test(test_runs_are_not_quadratic),
        cmocka_unit_test(test_gguf_round_trip),
        cmocka_unit_test(test_llm_jp_round_trips),
        cmocka_unit_test(test_broken_json),
        cmocka_unit_test(test_broken_unigram_json),
        cmocka_unit_test(test_sentencepiece),
        cmocka_unit_test(test_llama2c),
        cmocka_unit_test(test_stories),
        cmocka_unit_test(test_chat_marks),
        cmocka_unit_test(test_chat_prefix),
        cmocka_unit_test(test_chat_plain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
