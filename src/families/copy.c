/* copy: repeat 3 to 5 letters. */
#define _GNU_SOURCE
#include "families/internal.h"

static void generate(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    static const char *const asks[] = {"repeat: %s", "くりかえして：%s", "重复：%s"};
    int n = rng_between(r, 3, 5), lang = item_language(r);
    char v[16], text[64];
    sample_letters(r, v, n);
    letters_join(text, v, n);
    it->lang = family_languages[lang];
    it->question = xasprintf(asks[lang], text);
    it->work = xstrdup("");
    it->key = xasprintf("copy %s", v);
    item_add_choice(it, text);
    item_add_swapped_letters(r, it, v, n);
}

const struct task_family copy_family = {"copy", true, 0, "repeat 3 to 5 letters", generate};
