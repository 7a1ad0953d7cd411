/* arithmetic: add a digit to a number of four digits; rare: subtract one. */
#define _GNU_SOURCE
#include "families/internal.h"

static const char *const sums[] = {"%s + %d = ?", "%sたす%dは？", "%s加%d等于？"};

/* Checks a - b by adding b, and a + b by adding 10 - b, which gives a + 10. */
static void check_add(struct task_item *it, bool rare, int lang, int a, int b) {
    it->check_question = xasprintf(sums[lang], CHECKED_ANSWER, rare ? b : 10 - b);
    it->check_answer = xasprintf("%d", rare ? a : a + 10);
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const differences[] = {"%s - %d = ?", "%sひく%dは？", "%s减%d等于？"};
    int a = rng_between(r, 1000, 9989), b = rng_between(r, 1, 9), lang = item_language(r);
    int right = rare ? a - b : a + b;
    char number[16];
    it->lang = family_languages[lang];
    snprintf(number, sizeof number, "%d", a);
    it->question = xasprintf((rare ? differences : sums)[lang], number, b);
    it->work = xasprintf("%d %c %d", a % 10, rare ? '-' : '+', b);
    it->key = xasprintf("arithmetic %d %d %d", rare, a, b);
    item_add_number(it, right);
    if (rare) item_add_number(it, a + b);
    item_add_near_numbers(r, it, right);
    check_add(it, rare, lang, a, b);
}

const struct task_family arithmetic_family = {"arithmetic", false, 0.5f,
                                              "adding a digit; rare: taking one away", generate};
