/*
 * pattern: searching and replacing with PCRE2 patterns that are literals of the source. Each is
 * compiled once per process.
 */
#define _GNU_SOURCE
#define PCRE2_CODE_UNIT_WIDTH 8
#include "memory/internal.h"

#include <pcre2.h>
#include <pthread.h>
#include <stdlib.h>

enum { MATCH_LIMIT = 20000000, MAX_PATTERNS = 2048 };

/* The compiled pattern, from a hash table. `text` is a string literal, so its address is the key.
 */
static pcre2_code *pattern_get(const char *text) {
    static struct {
        const char *text;
        pcre2_code *code;
    } cache[MAX_PATTERNS];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    int code;
    size_t i = (size_t)(hash_fnv1a(&text, sizeof text) % MAX_PATTERNS), n = 0;
    PCRE2_SIZE offset;
    pthread_mutex_lock(&lock);
    while (cache[i].text && cache[i].text != text && n++ < MAX_PATTERNS) i = (i + 1) % MAX_PATTERNS;
    CHECK(n <= MAX_PATTERNS);
    if (!cache[i].text)
        cache[i].code = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED,
                                      PCRE2_UTF | PCRE2_UCP, &code, &offset, NULL);
    cache[i].text = text;
    pthread_mutex_unlock(&lock);
    CHECK(cache[i].code != NULL); /* the tables contain valid patterns only */
    return cache[i].code;
}

static pcre2_match_context *match_context_new(void) {
    pcre2_match_context *m = pcre2_match_context_create(NULL);
    pcre2_set_match_limit(m, MATCH_LIMIT);
    return m;
}

/* The functions below use PCRE2_NO_UTF_CHECK, because their texts are valid UTF-8. */

bool pattern_match(const char *pattern, const char *text, size_t len, size_t from,
                   struct pattern_match *m) {
    pcre2_code *p = pattern_get(pattern);
    pcre2_match_data *data = pcre2_match_data_create_from_pattern(p, NULL);
    pcre2_match_context *context = match_context_new();
    int n = pcre2_match(p, (PCRE2_SPTR)text, len, from, PCRE2_NO_UTF_CHECK, data, context);
    if (m) *m = (struct pattern_match){0};
    const PCRE2_SIZE *ovector = pcre2_get_ovector_pointer(data);
    for (int i = 0, k = 0; m && i < n && k < PATTERN_GROUPS; i++)
        if (ovector[2 * i] != PCRE2_UNSET) {
            m->begin[k] = ovector[2 * i];
            m->end[k++] = ovector[2 * i + 1];
        }
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
    return n > 0;
}

bool pattern_find(const char *pattern, const char *text, size_t len, struct buf *group) {
    struct pattern_match m;
    if (!pattern_match(pattern, text, len, 0, &m)) return false;
    if (group) buf_add(group, text + m.begin[1], m.end[1] - m.begin[1]);
    return true;
}

void pattern_replace(const char *pattern, const char *replacement, struct buf *text) {
    pcre2_code *p = pattern_get(pattern);
    pcre2_match_context *context = match_context_new();
    PCRE2_SIZE room = text->len + 1;
    char *out = xmalloc(room);
    int rc;
    for (;;) {
        PCRE2_SIZE size = room;
        rc = pcre2_substitute(
            p, (PCRE2_SPTR)text->data, text->len, 0,
            PCRE2_SUBSTITUTE_GLOBAL | PCRE2_NO_UTF_CHECK | PCRE2_SUBSTITUTE_OVERFLOW_LENGTH, NULL,
            context, (PCRE2_SPTR)replacement, PCRE2_ZERO_TERMINATED, (PCRE2_UCHAR *)out, &size);
        if (rc != PCRE2_ERROR_NOMEMORY || size <= room) {
            room = size;
            break;
        }
        out = xrealloc(out, room = size);
    }
    if (rc > 0) {
        text->len = 0;
        buf_add(text, out, room);
    }
    free(out);
    pcre2_match_context_free(context);
}
