/*
 * question_features: a question as a vector, without a model.
 *
 * N-grams of 1 to 4 characters, words and pairs of words are hashed to QUESTION_DIM counts with
 * signs (Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning"), scaled to
 * length 1. Characters are in lower case and a digit is '0', since the length of a number may
 * decide which adapter or agent is right, but its digits do not.
 */
#define _GNU_SOURCE
#include "data/data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unicase.h>
#include <unictype.h>
#include <unistr.h>

enum { CHARS_MAX = 4 };

/* Drops the frame that prompt_of_question (eval.h) adds to a bare question, so that a question has
 * the same features in a task and in a chat. Returns the number of bytes that are left from *text
 * on. */
static size_t bare_question(const char **text) {
    static const char before[] = "Question:", after[] = "\nAnswer:";
    size_t n = strlen(*text), head = sizeof before - 1, tail = sizeof after - 1;
    if (n < head + tail || strncmp(*text, before, head) != 0 ||
        strcmp(*text + n - tail, after) != 0)
        return n;
    *text += head;
    return n - head - tail;
}

/* The characters of a text: in lower case, '0' for digits, one blank for white space, which is also
 * at both ends. malloc'ed. */
static ucs4_t *characters(const char *text, size_t *n) {
    size_t len = bare_question(&text);
    ucs4_t *v = xmalloc((len + 2) * sizeof *v), c;
    *n = 0;
    v[(*n)++] = ' ';
    for (size_t pos = 0; pos < len;) {
        pos += (size_t)u8_mbtouc(&c, (const uint8_t *)text + pos, len - pos);
        if (uc_is_property_white_space(c)) {
            if (v[*n - 1] != ' ') v[(*n)++] = ' ';
        } else {
            v[(*n)++] = uc_digit_value(c) >= 0 ? '0' : uc_tolower(c);
        }
    }
    if (v[*n - 1] != ' ') v[(*n)++] = ' ';
    return v;
}

static bool is_word_character(ucs4_t c) {
    return uc_is_general_category_withtable(c, UC_CATEGORY_MASK_L | UC_CATEGORY_MASK_N |
                                                   UC_CATEGORY_MASK_M);
}

static void count_hash(double counts[QUESTION_DIM], uint64_t hash) {
    counts[hash & (QUESTION_DIM - 1)] += hash >> 32 & 1 ? -1 : 1;
}

static void count_words(double counts[QUESTION_DIM], const ucs4_t *v, size_t n) {
    uint64_t previous = 0;
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i; end < n && is_word_character(v[end]); end++) continue;
        if (end == i) {
            end++;
            continue;
        }
        uint64_t pair[2] = {previous, hash_fnv1a(v + i, (end - i) * sizeof *v)};
        count_hash(counts, hash_fnv1a(pair + 1, sizeof pair[1]));
        count_hash(counts, hash_fnv1a(pair, sizeof pair));
        previous = pair[1];
    }
}

void question_features_init(struct question_features *f, const char *text) {
    double counts[QUESTION_DIM] = {0}, squares = 0;
    size_t n;
    ucs4_t *v = characters(text, &n);
    for (size_t i = 0; i < n; i++)
        for (size_t k = 1; k <= CHARS_MAX && i + k <= n; k++)
            count_hash(counts, hash_fnv1a(v + i, k * sizeof *v));
    count_words(counts, v, n);
    free(v);
    f->n = 0;
    for (int j = 0; j < QUESTION_DIM; j++) {
        squares += counts[j] * counts[j];
        f->n += counts[j] != 0;
    }
    f->v = xmalloc((size_t)MAX(f->n, 1) * sizeof *f->v);
    for (int j = 0, k = 0; j < QUESTION_DIM; j++)
        if (counts[j] != 0)
            f->v[k++] = (struct question_feature){.index = j + 1,
                                                  .value = (float)(counts[j] / sqrt(squares))};
}
