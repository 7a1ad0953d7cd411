/* arithmetic: add a digit to a number of four digits; rare: subtract one. */
#define _GNU_SOURCE
#include "families/internal.h"

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const sums[] = {"%d + %d = ?", "%dたす%dは？", "%d加%d等于？"};
    static const char *const differences[] = {"%d - %d = ?", "%dひく%dは？", "%d减%d等于？"};
    int a = rng_between(r, 1000, 9989), b = rng_between(r, 1, 9), lang = item_language(r);
    int right = rare ? a - b : a + b;
    it->lang = family_languages[lang];
    it->question = xasprintf((rare ? differences : sums)[lang], a, b);
    it->work = xasprintf("%d %c %d", a % 10, rare ? '-' : '+', b);
    it->key = xasprintf("arithmetic %d %d %d", rare, a, b);
    item_add_number(it, right);
    if (rare) item_add_number(it, a + b);
    item_add_near_numbers(r, it, right);
}

const struct task_family arithmetic_family = {"arithmetic", false, 0.5f,
                                              "adding a digit; rare: taking one away", generate};
