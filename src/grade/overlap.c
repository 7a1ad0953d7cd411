/*
 * overlap: scores of overlap with a reference: F1 of words, ROUGE-L, BLEU.
 *
 * All three scores split a text into words; a script that is written without blanks is split into
 * characters. Each score treats signs and articles as its definition requires. Words are compared
 * by 64-bit hashes; at most WORDS words of a text count.
 */
#include "grade/internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unicase.h>
#include <unictype.h>
#include <unistr.h>

enum { WORDS = 4096, DENSE_FROM = 0x2E80 };

enum word_tokenization {
    WORDS_SQUAD, /* lower case, signs removed, no articles */
    WORDS_ROUGE, /* lower case, signs are separators */
    WORDS_BLEU,  /* case as written; a sign is a separate word unless is_inside_word() */
};

struct word_list {
    uint64_t *v; /* [n] hashes of the words */
    int n;
    struct buf *text; /* output: the words with a blank between words; may be NULL */
};

static bool is_article(const char *s, size_t n) {
    return (n == 1 && *s == 'a') || (n == 2 && memcmp(s, "an", 2) == 0) ||
           (n == 3 && memcmp(s, "the", 3) == 0);
}

/* Adds the word to the list, unless it is empty or a dropped article, and empties it. */
static void word_end(struct word_list *w, struct buf *word, enum word_tokenization tokenization) {
    bool is_kept = word->len && w->n < WORDS &&
                   !(tokenization == WORDS_SQUAD && is_article(word->data, word->len));
    if (is_kept) {
        if (w->text && w->n) buf_puts(w->text, " ");
        if (w->text) buf_add(w->text, word->data, word->len);
        w->v[w->n++] = hash_fnv1a(word->data, word->len);
    }
    word->len = 0;
}

/* Whether the sign c, between prev and next, is a part of a word and does not end it. */
static bool is_inside_word(ucs4_t c, ucs4_t prev, ucs4_t next) {
    if (c == '.' || c == ',')
        return prev < 0x80 && isdigit((int)prev) && next < 0x80 && isdigit((int)next);
    return c == '\'' || (c == '-' && !(prev < 0x80 && isdigit((int)prev)));
}

static void char_add(struct word_list *w, struct buf *word, enum word_tokenization tokenization,
                     ucs4_t c, ucs4_t prev, ucs4_t next) {
    uint8_t bytes[6];
    bool blank = uc_is_property_white_space(c), is_separate = c >= DENSE_FROM;
    bool sign = !blank && !uc_is_alnum(c) && !uc_is_general_category(c, UC_MARK);
    if (sign && tokenization == WORDS_SQUAD) return;
    if (sign && tokenization == WORDS_BLEU) is_separate = !is_inside_word(c, prev, next);
    bool skipped = blank || (sign && tokenization == WORDS_ROUGE);
    if (skipped || is_separate) word_end(w, word, tokenization);
    if (skipped) return;
    if (tokenization != WORDS_BLEU) c = uc_tolower(c);
    buf_add(word, bytes, (size_t)u8_uctomb(bytes, c, sizeof bytes));
    if (is_separate) word_end(w, word, tokenization);
}

static ucs4_t half_width(ucs4_t c) {
    return c >= 0xFF01 && c <= 0xFF5E ? c - 0xFEE0 : c;
}

static void word_tokenize(const char *text, enum word_tokenization tokenization,
                          struct word_list *w) {
    const uint8_t *p = (const uint8_t *)text, *end = p + strlen(text);
    struct buf word = {0};
    ucs4_t prev = ' ', c = ' ', next;
    w->v = xcalloc(WORDS, sizeof *w->v);
    while (p < end && w->n < WORDS) {
        p += u8_mbtouc(&c, p, (size_t)(end - p));
        c = half_width(c);
        next = ' ';
        if (p < end) u8_mbtouc(&next, p, (size_t)(end - p));
        char_add(w, &word, tokenization, c, prev, half_width(next));
        prev = c;
    }
    word_end(w, &word, tokenization);
    buf_release(&word);
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Size of the multiset intersection of a[n] and b[m]. Sorts both arrays. */
static int multiset_overlap(uint64_t *a, int n, uint64_t *b, int m) {
    int n_common = 0;
    qsort(a, (size_t)n, sizeof *a, by_value);
    qsort(b, (size_t)m, sizeof *b, by_value);
    for (int i = 0, k = 0; i < n && k < m;) {
        n_common += a[i] == b[k];
        int64_t order = a[i] < b[k] ? -1 : a[i] > b[k];
        i += order <= 0;
        k += order >= 0;
    }
    return n_common;
}

/* F1 of n_common common items of n and m items; 1 if both are 0. */
static double f1_of_counts(int n_common, int n, int m) {
    if (n == 0 || m == 0) return n == m;
    return n_common ? 2.0 * n_common / (n + m) : 0;
}

/* SQuAD's F1 (Rajpurkar et al. 2016). */
double f1_score(const char *answer, const char *gold) {
    struct word_list a = {0}, b = {0};
    word_tokenize(answer, WORDS_SQUAD, &a);
    word_tokenize(gold, WORDS_SQUAD, &b);
    double score = f1_of_counts(multiset_overlap(a.v, a.n, b.v, b.n), a.n, b.n);
    free(a.v);
    free(b.v);
    return score;
}

void f1_words(const char *text, struct buf *out) {
    struct word_list w = {.text = out};
    word_tokenize(text, WORDS_SQUAD, &w);
    free(w.v);
}

/* Length of the longest common subsequence, by dynamic programming with one row. */
static int lcs_length(const struct word_list *a, const struct word_list *b) {
    int *row = xcalloc((size_t)b->n + 1, sizeof *row);
    for (int i = 0; i < a->n; i++)
        for (int k = 0, corner = 0; k < b->n; k++) {
            int above = row[k + 1];
            row[k + 1] = a->v[i] == b->v[k] ? corner + 1 : MAX(above, row[k]);
            corner = above;
        }
    int n = row[b->n];
    free(row);
    return n;
}

/* ROUGE-L (Lin 2004): F1 over a whole text, without stemming. */
double rouge_l_score(const char *answer, const char *gold) {
    struct word_list a = {0}, b = {0};
    word_tokenize(answer, WORDS_ROUGE, &a);
    word_tokenize(gold, WORDS_ROUGE, &b);
    double score = f1_of_counts(lcs_length(&a, &b), a.n, b.n);
    free(a.v);
    free(b.v);
    return score;
}

/* Hashes of all *n runs of `order` words, malloc'ed. */
static uint64_t *ngram_hashes(const struct word_list *w, int order, int *n) {
    uint64_t *v = xcalloc(WORDS, sizeof *v);
    *n = MAX(w->n - order + 1, 0);
    for (int i = 0; i < *n; i++) v[i] = hash_fnv1a(w->v + i, (size_t)order * sizeof *w->v);
    return v;
}

uint64_t *text_ngrams(const char *text, int order, int *n) {
    struct word_list w = {0};
    word_tokenize(text, WORDS_ROUGE, &w);
    uint64_t *v = ngram_hashes(&w, order, n);
    free(w.v);
    return v;
}

/* *total: number of a's n-grams; *n_common: how many of them also occur in b. */
static void ngrams_overlap(const struct word_list *a, const struct word_list *b, int order,
                           int *n_common, int *total) {
    int n_gold;
    uint64_t *x = ngram_hashes(a, order, total), *y = ngram_hashes(b, order, &n_gold);
    *n_common = multiset_overlap(x, *total, y, n_gold);
    free(x);
    free(y);
}

/*
 * BLEU-4 (Papineni et al. 2002) of one sentence against one reference, over the orders that the
 * sentence is long enough for. Exponential smoothing as in SacreBLEU's default: the precision of
 * the k-th order without a match is 1 / (2^k total). Without any match the score is 0.
 */
double bleu_score(const char *answer, const char *gold) {
    struct word_list a = {0}, b = {0};
    double sum = 0, smooth = 1;
    int orders = 0, any = 0;
    word_tokenize(answer, WORDS_BLEU, &a);
    word_tokenize(gold, WORDS_BLEU, &b);
    for (int order = 1, n_common, total; order <= 4 && order <= a.n; order++, orders++) {
        ngrams_overlap(&a, &b, order, &n_common, &total);
        any += n_common;
        if (n_common == 0) smooth *= 2;
        sum += math_log(n_common ? (double)n_common / total : 1 / (smooth * total));
    }
    double brevity = a.n < b.n && a.n ? 1 - (double)b.n / a.n : 0;
    free(a.v);
    free(b.v);
    return any ? MIN(1, math_exp(brevity + sum / orders)) : 0;
}
