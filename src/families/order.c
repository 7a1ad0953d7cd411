/* order: letters in ascending order; rare: in descending order. */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>

const char *const order_up_asks[3] = {"order up: %s", "昇順：%s", "升序：%s"};

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const down[] = {"order down: %s", "降順：%s", "降序：%s"};
    int n = rng_between(r, 3, 4), lang = item_language(r);
    char v[16], reversed[16], text[64];
    sample_letters(r, v, n);
    letters_join(text, v, n);
    it->lang = family_languages[lang];
    it->question = xasprintf((rare ? down : order_up_asks)[lang], text);
    it->check_question = xasprintf(sort_asks[lang], text);
    it->check_answer =
        xstrdup(rare ? "{{ answer.split(' ') | reverse | join(' ') }}" : CHECKED_ANSWER);
    it->key = xasprintf("order %d %s", rare, v);
    it->duplicate_of = rare ? NULL : xasprintf("sort %s", v);
    qsort(v, (size_t)n, 1, compare_letters);
    for (int i = 0; i < n; i++) reversed[i] = v[n - 1 - i];
    reversed[n] = 0;
    it->work = xstrdup(rare ? "from z to a" : "from a to z");
    item_add_letters(it, rare ? reversed : v, n);
    item_add_letters(it, rare ? v : reversed, n);
    item_add_swapped_letters(r, it, rare ? reversed : v, n);
}

const struct task_family order_family = {"order", false, 0.5f,
                                         "letters ascending; rare: descending", generate};
