/*
 * text: language detection, prefixes by number of characters, splitting into chunks, and cosine
 * similarity.
 *
 * Text is UTF-8; an invalid byte counts as a character.
 */
#include "memory/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unictype.h>
#include <unistr.h>

const char *const language_names[N_LANGUAGES] = {"ja", "en", "zh"};

/* Characters that are frequent in Chinese and do not occur in Japanese without kana. */
static const char chinese[] = "的了吗呢吧你我他她们这那么什怎谁哪说没很还让给为对过个请您";

static bool set_has_char(const char *set, const uint8_t *p, int n) {
    for (const char *match = set; (match = memchr(match, p[0], strlen(match))) != NULL; match++)
        if (strncmp(match, (const char *)p, (size_t)n) == 0) return true;
    return false;
}

enum language language_detect(const char *text) {
    const uint8_t *p = (const uint8_t *)text, *end = p + strlen(text);
    bool han = false, zh = false;
    while (p < end) {
        ucs4_t c;
        int n = u8_mbtouc(&c, p, (size_t)(end - p));
        if ((c >= 0x3041 && c <= 0x30FF && c != 0x30FB) || (c >= 0xFF66 && c <= 0xFF9D))
            return LANG_JA;
        if ((c >= 0x3400 && c <= 0x9FFF) || (c >= 0x20000 && c <= 0x3FFFF)) {
            han = true;
            zh = zh || set_has_char(chinese, p, n);
        }
        p += n;
    }
    return zh ? LANG_ZH : han ? LANG_JA : LANG_EN;
}

size_t utf8_prefix_len(const char *text, size_t len, size_t chars) {
    size_t pos = 0;
    ucs4_t c;
    for (; pos < len && chars > 0; chars--)
        pos += (size_t)u8_mbtouc(&c, (const uint8_t *)text + pos, len - pos);
    return pos;
}

double cosine_similarity(const float *a, const float *b, int32_t d) {
    double dot = 0, aa = 0, bb = 0;
    for (int32_t i = 0; i < d; i++) {
        dot += (double)a[i] * (double)b[i];
        aa += (double)a[i] * (double)a[i];
        bb += (double)b[i] * (double)b[i];
    }
    return aa > 0 && bb > 0 ? dot / (sqrt(aa) * sqrt(bb)) : 0;
}

/* chunks */

/* The text that is split, and the chunks so far. */
struct text_splitter {
    const char *text;
    size_t limit; /* characters */
    struct text_chunk *v;
    int n, cap;
};

static size_t splitter_chars(const struct text_splitter *c, size_t begin, size_t end) {
    return u8_mbsnlen((const uint8_t *)c->text + begin, end - begin);
}

static bool is_space(const char *p, size_t left, int *n) {
    ucs4_t c;
    *n = u8_mbtouc(&c, (const uint8_t *)p, left);
    return uc_is_property_white_space(c);
}

static struct text_chunk chunk_trim(const struct text_splitter *c, size_t begin, size_t end) {
    int n;
    while (begin < end && is_space(c->text + begin, end - begin, &n)) begin += (size_t)n;
    size_t last = begin;
    for (size_t pos = begin; pos < end; pos += (size_t)n)
        if (!is_space(c->text + pos, end - pos, &n)) last = pos + (size_t)n;
    return (struct text_chunk){begin, last};
}

static void splitter_add(struct text_splitter *c, size_t begin, size_t end) {
    struct text_chunk k = chunk_trim(c, begin, end);
    if (k.begin == k.end) return;
    if (c->n == c->cap) {
        c->cap = MAX(2 * c->cap, 16);
        c->v = xrealloc(c->v, sizeof *c->v * (size_t)c->cap);
    }
    c->v[c->n++] = k;
}

/* The end of the paragraph that begins at `pos`: the position after the empty line that follows it.
 */
static size_t paragraph_end(const char *text, size_t pos, size_t end) {
    for (bool empty = false; pos < end; pos++) {
        if (text[pos] == '\n' && empty) return pos + 1;
        empty = text[pos] == '\n' || (empty && strchr(" \t\r", text[pos]));
    }
    return end;
}

/* The end of the sentence that begins at `pos`. CJK full stops and line breaks always end a
 * sentence, other full stops only before white space. */
static size_t sentence_end(const char *text, size_t pos, size_t end) {
    static const char cjk_stops[] = "。！？．｡";
    while (pos < end) {
        ucs4_t u;
        int n = u8_mbtouc(&u, (const uint8_t *)text + pos, end - pos);
        bool cjk_stop = n == 3 && set_has_char(cjk_stops, (const uint8_t *)text + pos, n);
        bool ascii_stop = n == 1 && (text[pos] == '.' || text[pos] == '!' || text[pos] == '?');
        pos += (size_t)n;
        if (cjk_stop || text[pos - 1] == '\n') return pos;
        if (ascii_stop && pos < end && strchr(" \t\r\n", text[pos])) return pos;
    }
    return end;
}

static void units_pack(struct text_splitter *c, size_t begin, size_t end, bool sentences);

/* Splits a unit that is too long for a chunk: a paragraph into sentences, a sentence (`sentences`
 * is true) into parts of `limit` characters. */
static void unit_split(struct text_splitter *c, struct text_chunk unit, bool sentences) {
    if (!sentences) {
        units_pack(c, unit.begin, unit.end, true);
        return;
    }
    for (size_t pos = unit.begin, n; pos < unit.end; pos += n) {
        n = utf8_prefix_len(c->text + pos, unit.end - pos, c->limit);
        splitter_add(c, pos, pos + n);
    }
}

/* Splits text[begin, end) into paragraphs or sentences, and packs as many as fit into each chunk.
 * `chars` is the number of characters from `start` to `pos`. Each character is counted a bounded
 * number of times, so the time is linear. */
static void units_pack(struct text_splitter *c, size_t begin, size_t end, bool sentences) {
    size_t start = begin, chars = 0;
    for (size_t pos = begin, next; pos < end; pos = next) {
        next = (sentences ? sentence_end : paragraph_end)(c->text, pos, end);
        struct text_chunk unit = chunk_trim(c, pos, next);
        size_t n = splitter_chars(c, chars ? pos : unit.begin, unit.end);
        if (chars + n > c->limit) {
            splitter_add(c, start, pos);
            start = pos;
            chars = 0;
            n = splitter_chars(c, unit.begin, unit.end);
        }
        if (n > c->limit) unit_split(c, unit, sentences);
        if (n > c->limit || chars + n == 0)
            start = next;
        else
            chars += n + splitter_chars(c, unit.end, next);
    }
    splitter_add(c, start, end);
}

int text_split_chunks(const char *text, size_t len, int chars, struct text_chunk **out) {
    struct text_splitter c = {.text = text, .limit = (size_t)chars};
    CHECK(chars >= 16);
    units_pack(&c, 0, len, false);
    *out = c.v;
    return c.n;
}
