/* sort: put 3 or 4 letters in order. */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>

const char *const sort_asks[3] = {"sort: %s", "ならべて：%s", "排序：%s"};

static void generate(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    int n = rng_between(r, 3, 4), lang = item_language(r);
    char v[16], text[64];
    sample_letters(r, v, n);
    letters_join(text, v, n);
    it->lang = family_languages[lang];
    it->question = xasprintf(sort_asks[lang], text);
    it->check_question = xasprintf(order_up_asks[lang], text);
    it->check_answer = xstrdup(CHECKED_ANSWER);
    it->key = xasprintf("sort %s", v);
    it->duplicate_of = xasprintf("order 0 %s", v);
    qsort(v, (size_t)n, 1, compare_letters);
    it->work = xstrdup("from a to z");
    item_add_letters(it, v, n);
    item_add_swapped_letters(r, it, v, n);
}

const struct task_family sort_family = {"sort", true, 0, "put 3 or 4 letters in order", generate};
