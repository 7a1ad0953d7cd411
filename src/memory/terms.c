/*
 * terms: tokenisation of texts and queries for full-text search, and the weights of BM25.
 *
 * Text is first normalised (NFKC and lower case), so that ｶﾞ becomes ガ and Ａ becomes a. Then it
 * is split into runs of one script. Chinese and Japanese have no spaces between words, and most of
 * their words have two characters, so runs of their scripts and of Hangul are split into bigrams.
 * The last character of a run is a term as well. Every character is then the first of some term, so
 * that a query of one character finds it as a prefix.
 */
#define _GNU_SOURCE
#include "memory/internal.h"

#include <string.h>
#include <unicase.h>
#include <unictype.h>
#include <uninorm.h>
#include <unistr.h>

enum unicode_script {
    SCRIPT_NONE,
    SCRIPT_WORD,
    SCRIPT_HAN,
    SCRIPT_HIRAGANA,
    SCRIPT_KATAKANA,
    SCRIPT_HANGUL
};

static enum unicode_script script_of(ucs4_t c) {
    if ((c >= 0x3041 && c <= 0x309F)) return SCRIPT_HIRAGANA;
    if ((c >= 0x30A1 && c <= 0x30FF && c != 0x30FB)) return SCRIPT_KATAKANA;
    if ((c >= 0x3400 && c <= 0x9FFF) || (c >= 0x20000 && c <= 0x3FFFF) || c == 0x3005)
        return SCRIPT_HAN;
    if (c >= 0xAC00 && c <= 0xD7A3) return SCRIPT_HANGUL;
    return uc_is_general_category_withtable(c, UC_CATEGORY_MASK_L | UC_CATEGORY_MASK_N |
                                                   UC_CATEGORY_MASK_M)
               ? SCRIPT_WORD
               : SCRIPT_NONE;
}

/* Appends the text after NFKC and in lower case. NFKC makes a text at most 11 times longer, so
 * `room` suffices. */
static int nfkc_lowercase(const char *text, size_t len, struct buf *out, struct error *err) {
    size_t room = 12 * len + 64;
    uint8_t *dst = try_calloc(room, 1, err), bytes[6];
    uint8_t *normalized =
        dst ? u8_normalize(UNINORM_NFKC, (const uint8_t *)text, len, dst, &room) : NULL;
    if (dst && normalized != dst)
        error_set(err, ERR_MEMORY, "out of memory: a text of %zu bytes", len);
    for (size_t pos = 0; normalized && normalized == dst && pos < room;) {
        ucs4_t c;
        pos += (size_t)u8_mbtouc(&c, normalized + pos, room - pos);
        int n = u8_uctomb(bytes, uc_tolower(c), sizeof bytes);
        buf_add(out, bytes, (size_t)MAX(n, 0));
    }
    buf_puts(out, "");
    free(dst);
    return dst && normalized == dst ? OK : err->code;
}

/* A run of characters of one script. */
struct script_run {
    enum unicode_script script;
    const char *p;
    size_t bytes, first, last; /* bytes of the run, of its first and of its last character */
    int chars;
};

/* Returns the next run from *pos on and advances *pos past it. Its script is SCRIPT_NONE at the
 * end. */
static struct script_run run_next(const struct buf *b, size_t *pos) {
    struct script_run r = {.script = SCRIPT_NONE};
    while (*pos < b->len) {
        ucs4_t c;
        const uint8_t *p = (const uint8_t *)b->data + *pos;
        size_t n = (size_t)u8_mbtouc(&c, p, b->len - *pos);
        enum unicode_script s = script_of(c);
        if (r.script && s != r.script) break;
        *pos += n;
        if (!s) continue;
        if (!r.script) r = (struct script_run){.script = s, .p = (const char *)p, .first = n};
        r.bytes += n;
        r.last = n;
        r.chars++;
    }
    return r;
}

/* Called by run_for_each_term for each bigram of a run, or once for a run that is a word. */
typedef void (*term_fn)(void *ctx, const char *p, size_t n, enum unicode_script s);

static void run_for_each_term(const struct script_run *r, term_fn fn, void *ctx) {
    if (r->script == SCRIPT_WORD) {
        size_t n = r->bytes;
        if (n > TERM_BYTES)
            for (n = TERM_BYTES; ((uint8_t)r->p[n] & 0xC0) == 0x80; n--) continue;
        fn(ctx, r->p, n, SCRIPT_WORD);
        return;
    }
    const char *p = r->p, *end = p + r->bytes;
    for (size_t a = r->first, b; p + a < end; p += a, a = b) {
        b = utf8_prefix_len(p + a, (size_t)(end - p) - a, 1);
        fn(ctx, p, a + b, r->script);
    }
}

struct index_terms {
    struct buf *out;
    int64_t n;
};

static void index_term_add(void *ctx, const char *p, size_t n, enum unicode_script s) {
    struct index_terms *x = ctx;
    (void)s;
    buf_add(x->out, p, n);
    buf_puts(x->out, " ");
    x->n++;
}

int terms_index(const char *text, size_t len, struct buf *out, int64_t *n, struct error *err) {
    struct buf folded = {0};
    struct index_terms x = {out, 0};
    size_t pos = 0;
    int rc = nfkc_lowercase(text, len, &folded, err);
    for (struct script_run r; rc == OK && (r = run_next(&folded, &pos)).script != SCRIPT_NONE;) {
        run_for_each_term(&r, index_term_add, &x);
        if (r.script != SCRIPT_WORD) index_term_add(&x, r.p + r.bytes - r.last, r.last, r.script);
    }
    buf_puts(out, "");
    buf_release(&folded);
    *n = x.n;
    return rc;
}

/* True for words that occur in questions about any subject. */
static bool is_stop_word(const char *p, size_t n, enum unicode_script s) {
    static const char words[] =
        " a an and are as at be by can do does for from how i in is it me my "
        "of on or that the this to was what when where which who why will "
        "with you ";
    static const char *const chinese[] = {"的", "了",   "吗",   "呢",  "是",
                                          "吧", "什么", "怎么", "多少"};
    char word[TERM_BYTES + 3];
    if (s == SCRIPT_HIRAGANA) return true;
    snprintf(word, sizeof word, " %.*s ", (int)n, p);
    if (s == SCRIPT_WORD) return strstr(words, word) != NULL;
    for (size_t i = 0; s == SCRIPT_HAN && i < ARRAY_LEN(chinese); i++)
        if (memmem(p, n, chinese[i], strlen(chinese[i]))) return true;
    return false;
}

struct query_terms {
    struct query_term *v;
    int n;
};

static void query_term_add(struct query_terms *w, const char *p, size_t n, enum unicode_script s,
                           bool prefix) {
    if (w->n == QUERY_TERMS) return;
    for (int i = 0; i < w->n; i++)
        if (strlen(w->v[i].text) == n && memcmp(w->v[i].text, p, n) == 0) return;
    struct query_term *t = &w->v[w->n++];
    *t = (struct query_term){.prefix = prefix, .weight = is_stop_word(p, n, s) ? 0.25 : 1};
    memcpy(t->text, p, n);
}

static void query_term_visit(void *ctx, const char *p, size_t n, enum unicode_script s) {
    query_term_add(ctx, p, n, s, false);
}

int terms_query(const char *text, struct query_term out[QUERY_TERMS], struct error *err) {
    struct buf folded = {0};
    struct query_terms w = {out, 0};
    size_t pos = 0;
    int rc = nfkc_lowercase(text, strlen(text), &folded, err);
    for (struct script_run r; rc == OK && (r = run_next(&folded, &pos)).script != SCRIPT_NONE;) {
        if (r.script != SCRIPT_WORD && r.chars == 1)
            query_term_add(&w, r.p, r.bytes, r.script, true);
        else
            run_for_each_term(&r, query_term_visit, &w);
    }
    buf_release(&folded);
    return rc == OK ? w.n : rc;
}

/* BM25's usual constants (Robertson and Zaragoza 2009). */
static const double BM25_K1 = 1.2, BM25_B = 0.75;

/* A term that no text has gets the IDF of a term in one text. Its own IDF would outweigh the other
 * terms in a small collection. */
double bm25_idf(double n, double n_with) {
    n_with = MAX(n_with, 1);
    return math_log(1 + (MAX(n, n_with) - n_with + 0.5) / (n_with + 0.5));
}

double bm25_term_weight(double tf, double n_terms, double average) {
    return tf * (BM25_K1 + 1) / (tf + BM25_K1 * (1 - BM25_B + BM25_B * n_terms / average));
}
