/* sequence: a pattern of 2 to 4 letters is shown twice, and then up to all but one of its letters
 * again: which letter comes next? */
#define _GNU_SOURCE
#include "families/internal.h"

static void generate(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    static const char *const asks[] = {"next: %s", "つぎは：%s", "下一个：%s"};
    int period = rng_between(r, 2, 4), n = 2 * period + rng_between(r, 0, period - 1),
        lang = item_language(r);
    char v[16], shown[16], text[64];
    sample_letters(r, v, 5);
    for (int i = 0; i < n; i++) shown[i] = v[i % period];
    letters_join(text, shown, n);
    it->lang = family_languages[lang];
    it->question = xasprintf(asks[lang], text);
    it->work = xstrdup("");
    it->key = xasprintf("sequence %d %.*s", n, period, v);
    item_add_letters(it, &v[n % period], 1);
    for (int i = 0; it->n_choices < 4 && i < 5; i++) item_add_letters(it, &v[i], 1);
}

const struct task_family sequence_family = {"sequence", true, 0,
                                            "the next letter of a repeating pattern", generate};
