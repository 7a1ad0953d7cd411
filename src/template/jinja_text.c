/*
 * jinja_text: strings of templates: UTF-8 with Python's semantics in characters. Every operation
 * keeps the origin of every byte.
 *
 * Changes of case support ASCII, Latin-1, Greek, Cyrillic and full-width letters, and scripts
 * without case, such as Japanese and Chinese. Any other character is an error instead of being left
 * unchanged.
 *
 * Invariant: a `struct str` is valid UTF-8. A slice shares the memory of its string.
 */
#include "template/internal.h"

#include <string.h>

void text_add(struct jinja_ctx *w, struct text *t, struct str s) {
    if (t->n + s.n + 1 > t->cap) {
        size_t cap = MAX(t->cap * 2, t->n + s.n + 32);
        char *p = jinja_alloc(w, cap);
        if (t->n) memcpy(p, t->p, t->n);
        t->p = p;
        if (t->origins) {
            uint8_t *o = jinja_alloc(w, cap);
            memcpy(o, t->origins, t->n);
            t->origins = o;
        }
        t->cap = cap;
    }
    jinja_charge_bytes(w, s.n);
    if (s.origins && !t->origins) t->origins = jinja_alloc(w, t->cap);
    if (s.n) memcpy(t->p + t->n, s.p, s.n);
    if (t->origins && s.origins) memcpy(t->origins + t->n, s.origins, s.n);
    t->n += s.n;
}

void text_puts(struct jinja_ctx *w, struct text *t, const char *s) {
    text_add(w, t, (struct str){s, strlen(s), NULL});
}

struct str text_str(const struct text *t) {
    return (struct str){t->p ? t->p : "", t->n, t->origins};
}

struct str str_from(struct jinja_ctx *w, const char *p, size_t n, uint8_t origin) {
    char *copy = jinja_alloc(w, n + 1);
    uint8_t *origins = NULL;
    if (n) memcpy(copy, p, n);
    if (origin && n) {
        origins = jinja_alloc(w, n);
        memset(origins, origin, n);
    }
    return (struct str){copy, n, origins};
}

struct str str_slice(struct str s, size_t begin, size_t end) {
    return (struct str){s.p + begin, end - begin, s.origins ? s.origins + begin : NULL};
}

bool str_is(struct str s, const char *name) {
    return strlen(name) == s.n && memcmp(s.p, name, s.n) == 0;
}

bool str_equal(struct str a, struct str b) {
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

uint32_t char_at(const char *p, int *len) {
    const uint8_t *b = (const uint8_t *)p;
    if (b[0] < 0x80) return *len = 1, b[0];
    if (b[0] < 0xE0) return *len = 2, (uint32_t)(b[0] & 31) << 6 | (b[1] & 63);
    if (b[0] < 0xF0)
        return *len = 3, (uint32_t)(b[0] & 15) << 12 | (uint32_t)(b[1] & 63) << 6 | (b[2] & 63);
    return *len = 4, (uint32_t)(b[0] & 7) << 18 | (uint32_t)(b[1] & 63) << 12 |
                         (uint32_t)(b[2] & 63) << 6 | (b[3] & 63);
}

bool char_is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 ||
           c == 0x202F || c == 0x205F || c == 0x3000;
}

size_t str_length(struct jinja_ctx *w, struct str s) {
    size_t n = 0;
    jinja_charge_scan(w, s.n);
    for (size_t i = 0; i < s.n; i++) n += ((uint8_t)s.p[i] & 0xC0) != 0x80;
    return n;
}

size_t str_find(struct jinja_ctx *w, struct str s, struct str needle, size_t from) {
    size_t found = SIZE_MAX, i = from;
    while (found == SIZE_MAX && i + needle.n <= s.n) {
        const char *hit = needle.n ? memchr(s.p + i, needle.p[0], s.n - needle.n - i + 1) : s.p + i;
        if (!hit) break;
        i = (size_t)(hit - s.p);
        if (needle.n == 0 || memcmp(hit, needle.p, needle.n) == 0) found = i;
        jinja_charge_bytes(w, needle.n);
        i++;
    }
    jinja_charge_bytes(w, (found == SIZE_MAX ? s.n : found) - from);
    return found;
}

size_t str_rfind(struct jinja_ctx *w, struct str s, struct str needle) {
    if (needle.n > s.n) return SIZE_MAX;
    for (size_t i = s.n - needle.n + 1; i-- > 0;) {
        jinja_charge_bytes(w, needle.n);
        if (needle.n == 0 || memcmp(s.p + i, needle.p, needle.n) == 0) return i;
    }
    return SIZE_MAX;
}

/* case */

enum { LOWER = 1, UPPER = 2 };
struct case_range {
    uint32_t first, last;
    int kind;      /* LOWER, UPPER, or 0: has no case */
    int32_t delta; /* distance to the other case */
};
/* Ascending. A character in no range is an error. */
static const struct case_range case_ranges[] = {
    {0, '@', 0, 0},
    {'A', 'Z', UPPER, 32},
    {'[', '`', 0, 0},
    {'a', 'z', LOWER, -32},
    {'{', 0xA9, 0, 0},
    {0xAB, 0xB4, 0, 0},
    {0xB6, 0xB9, 0, 0},
    {0xBB, 0xBF, 0, 0},
    {0xC0, 0xD6, UPPER, 32},
    {0xD7, 0xD7, 0, 0},
    {0xD8, 0xDE, UPPER, 32},
    {0xE0, 0xF6, LOWER, -32},
    {0xF7, 0xF7, 0, 0},
    {0xF8, 0xFE, LOWER, -32},
    {0x391, 0x3A1, UPPER, 32},
    {0x3A4, 0x3A9, UPPER, 32},
    {0x3B1, 0x3C1, LOWER, -32},
    {0x3C4, 0x3C9, LOWER, -32},
    {0x410, 0x42F, UPPER, 32},
    {0x430, 0x44F, LOWER, -32},
    {0x5D0, 0x6FF, 0, 0},
    {0x900, 0x10A0 - 1, 0, 0},
    {0x1100, 0x11FF, 0, 0},
    {0x2000, 0x2070, 0, 0},
    {0x20A0, 0x20C0, 0, 0},
    {0x2190, 0x24B5, 0, 0},
    {0x2500, 0x2BFF, 0, 0},
    {0x2E80, 0xA4FF, 0, 0},
    {0xAC00, 0xD7A3, 0, 0},
    {0xF900, 0xFAFF, 0, 0},
    {0xFE30, 0xFF20, 0, 0},
    {0xFF21, 0xFF3A, UPPER, 32},
    {0xFF3B, 0xFF40, 0, 0},
    {0xFF41, 0xFF5A, LOWER, -32},
    {0xFF5B, 0xFFEF, 0, 0},
    {0x1F200, 0x1FAFF, 0, 0},
    {0x20000, 0x3FFFF, 0, 0},
};

static const struct case_range *char_case(struct jinja_ctx *w, uint32_t c) {
    size_t low = 0, high = ARRAY_LEN(case_ranges);
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (c > case_ranges[mid].last)
            low = mid + 1;
        else
            high = mid;
    }
    if (low < ARRAY_LEN(case_ranges) && c >= case_ranges[low].first) return &case_ranges[low];
    jinja_fail(w, "the case of U+%04X is not supported", (unsigned)c);
}

/* Copies one character in the requested case; both cases of a letter have the same length. */
static void char_convert(struct jinja_ctx *w, char *p, enum char_case to, int *len, bool *cased) {
    uint32_t c = char_at(p, len);
    const struct case_range *r = char_case(w, c);
    *cased = r->kind != 0;
    if (r->kind != (to == TO_LOWER ? UPPER : LOWER)) return;
    c += (uint32_t)r->delta;
    if (*len == 1) p[0] = (char)c;
    if (*len == 2) p[0] = (char)(0xC0 | c >> 6);
    if (*len == 3) p[1] = (char)(0x80 | (c >> 6 & 63));
    if (*len > 1) p[*len - 1] = (char)(0x80 | (c & 63));
}

/* A copy for a change of case; charges the steps of that change. */
static char *str_copy(struct jinja_ctx *w, struct str s) {
    jinja_add_steps(w, s.n / 2);
    char *p = jinja_alloc(w, s.n + 1);
    if (s.n) memcpy(p, s.p, s.n);
    return p;
}

struct str str_case(struct jinja_ctx *w, struct str s, enum char_case to) {
    char *p = str_copy(w, s);
    int len;
    bool cased;
    for (size_t i = 0; i < s.n; i += (size_t)len) char_convert(w, p + i, to, &len, &cased);
    return (struct str){p, s.n, s.origins};
}

struct str str_title(struct jinja_ctx *w, struct str s) {
    char *p = str_copy(w, s);
    int len;
    bool in_word = false;
    for (size_t i = 0; i < s.n; i += (size_t)len)
        char_convert(w, p + i, in_word ? TO_LOWER : TO_UPPER, &len, &in_word);
    return (struct str){p, s.n, s.origins};
}

bool str_is_case(struct jinja_ctx *w, struct str s, enum char_case wanted) {
    int len;
    bool any = false;
    jinja_add_steps(w, 1 + s.n / 2);
    for (size_t i = 0; i < s.n; i += (size_t)len) {
        int kind = char_case(w, char_at(s.p + i, &len))->kind;
        if (kind == (wanted == TO_LOWER ? UPPER : LOWER)) return false;
        any |= kind != 0;
    }
    return any;
}

/* stripping and replacing */

static bool char_stripped(struct jinja_ctx *w, const char *p, int len, uint32_t c,
                          const struct str *chars) {
    if (!chars) return char_is_space(c);
    jinja_charge_scan(w, chars->n);
    for (size_t i = 0; i + (size_t)len <= chars->n; i++)
        if (memcmp(chars->p + i, p, (size_t)len) == 0) return true;
    return false;
}

struct str str_strip(struct jinja_ctx *w, struct str s, const struct str *chars, int sides) {
    size_t begin = 0, end = s.n;
    int len;
    while ((sides & STRIP_LEFT) && begin < end) {
        uint32_t c = char_at(s.p + begin, &len);
        if (!char_stripped(w, s.p + begin, len, c, chars)) break;
        begin += (size_t)len;
    }
    while ((sides & STRIP_RIGHT) && end > begin) {
        size_t pos = end - 1;
        while (((uint8_t)s.p[pos] & 0xC0) == 0x80) pos--;
        uint32_t c = char_at(s.p + pos, &len);
        if (!char_stripped(w, s.p + pos, len, c, chars)) break;
        end = pos;
    }
    jinja_add_steps(w, 1 + (begin + s.n - end) / 2);
    return str_slice(s, begin, end);
}

/* An empty `old` matches before every character and at the end. */
struct str str_replace(struct jinja_ctx *w, struct str s, struct str old, struct str new,
                       int64_t max) {
    struct text t = {0};
    size_t pos = 0;
    for (int64_t n = 0; max < 0 || n < max; n++) {
        size_t hit = str_find(w, s, old, pos);
        if (hit == SIZE_MAX) break;
        text_add(w, &t, str_slice(s, pos, hit));
        text_add(w, &t, new);
        pos = hit + old.n;
        if (old.n) continue;
        if (pos == s.n) break;
        int len;
        char_at(s.p + pos, &len);
        text_add(w, &t, str_slice(s, pos, pos + (size_t)len));
        pos += (size_t)len;
    }
    text_add(w, &t, str_slice(s, pos, s.n));
    return text_str(&t);
}
