/* item: helpers of the families: languages, choices, letters, numbers. */
#define _GNU_SOURCE
#include "families/internal.h"

#include <ctype.h>
#include <string.h>

enum { FAMILY_CHOICES = 8 }; /* choices of one question, at most */
const char *const family_languages[] = {"en", "ja", "zh"};
const char *const family_people[3][FAMILY_WORDS] = {
    {"mia", "tom", "ann", "leo", "eva", "max", "zoe", "sam"},
    {"みか", "けん", "あい", "れお", "ゆき", "りく", "なお", "そら"},
    {"小美", "小明", "小安", "小乐", "小雪", "小强", "小兰", "小天"}};
const char *const family_towns[3][FAMILY_WORDS] = {
    {"oslo", "rome", "lima", "cairo", "delhi", "paris", "quito", "seoul"},
    {"大阪", "京都", "奈良", "神戸", "東京", "札幌", "福岡", "那覇"},
    {"北京", "上海", "广州", "杭州", "成都", "西安", "南京", "武汉"}};
static const char letters[] = "abcdefghijklmnopqrstuvwxyz";

int item_language(struct rng *r) {
    uint32_t u = rng_below(r, 10);
    return u < 6 ? EN : u < 8 ? JA : ZH;
}

int rng_between(struct rng *r, int lo, int hi) {
    return lo + (int)rng_below(r, (uint32_t)(hi - lo + 1));
}

void family_prose_add(struct buf *text, int language, bool capitals) {
    for (int i = 0; i < FAMILY_PROSE; i++) {
        const char *sentence = family_prose[language][i];
        char first = capitals ? (char)toupper((unsigned char)*sentence) : *sentence;
        buf_printf(text, "%c%s\n", first, sentence + 1);
    }
}

static bool has_choice(const struct task_item *it, const char *text) {
    for (int i = 0; i < it->n_choices; i++)
        if (strcmp(it->choices[i], text) == 0) return true;
    return false;
}

void item_add_choice(struct task_item *it, const char *text) {
    if (it->n_choices < FAMILY_CHOICES && !has_choice(it, text))
        it->choices[it->n_choices++] = xstrdup(text);
}

void item_add_number(struct task_item *it, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    item_add_choice(it, text);
}

void item_add_near_numbers(struct rng *r, struct task_item *it, int right) {
    static const int offsets[] = {1, -1, 2, -2, 10, -10, 9, -9, 11, -11, 100, -100};
    for (int tries = 0; it->n_choices < 4 && tries < 64; tries++) {
        int value = right + offsets[rng_below(r, ARRAY_LEN(offsets))];
        if (value >= 0) item_add_number(it, value);
    }
}

/* Writes n distinct random letters and a NUL to v. */
void sample_letters(struct rng *r, char *v, int n) {
    uint32_t order[26];
    for (uint32_t i = 0; i < 26; i++) order[i] = i;
    rng_shuffle(r, order, 26);
    for (int i = 0; i < n; i++) v[i] = letters[order[i]];
    v[n] = 0;
}

void letters_join(char *out, const char *v, int n) {
    for (int i = 0; i < n; i++) {
        out[2 * i] = v[i];
        out[2 * i + 1] = ' ';
    }
    out[2 * n - 1] = 0;
}

int compare_letters(const void *a, const void *b) {
    return *(const char *)a - *(const char *)b;
}

static void swap_letters(char *v, int i, int j) {
    char c = v[i];
    v[i] = v[j];
    v[j] = c;
}

void item_add_letters(struct task_item *it, const char *v, int n) {
    char text[64];
    letters_join(text, v, n);
    item_add_choice(it, text);
}

/* Adds wrong answers that differ from the right one by an exchange of two letters. */
void item_add_swapped_letters(struct rng *r, struct task_item *it, const char *right, int n) {
    char v[16];
    for (int tries = 0; it->n_choices < 4 && tries < 64; tries++) {
        memcpy(v, right, (size_t)n + 1);
        int i = rng_between(r, 0, n - 1), j = rng_between(r, 0, n - 1);
        if (i == j) continue;
        swap_letters(v, i, j);
        item_add_letters(it, v, n);
    }
}

/* The check asks for the larger number. If the smaller one is right, the answer is replaced by the
 * other number; a text that is none of the two becomes "". */
static void compare_check_add(struct task_item *it, const char *const asks[], int lang, int a,
                              int b, bool smaller) {
    it->check_question = xasprintf(asks[lang], b, a);
    it->check_answer = smaller
                           ? xasprintf("{{ {'%d': '%d', '%d': '%d'}.get(answer, '') }}", a, b, b, a)
                           : xstrdup(CHECKED_ANSWER);
}

/* The larger (or smaller) of two different numbers of three digits. The family `duplicate_name`
 * asks for the larger one too, with the words `check_asks`. */
void item_compare_numbers(struct rng *r, struct task_item *it, const char *const asks[],
                          const char *const check_asks[], const char *name,
                          const char *duplicate_name, bool smaller) {
    int a = rng_between(r, 100, 999), b = rng_between(r, 100, 999), lang = item_language(r);
    if (a == b) b = a < 999 ? a + 1 : a - 1;
    it->lang = family_languages[lang];
    it->question = xasprintf(asks[lang], a, b);
    it->work = xasprintf("%d < %d", MIN(a, b), MAX(a, b));
    it->key = xasprintf("%s %d %d %d", name, smaller, a, b);
    it->duplicate_of = smaller ? NULL : xasprintf("%s 0 %d %d", duplicate_name, a, b);
    item_add_number(it, smaller ? MIN(a, b) : MAX(a, b));
    item_add_number(it, smaller ? MAX(a, b) : MIN(a, b));
    compare_check_add(it, check_asks, lang, a, b, smaller);
}
