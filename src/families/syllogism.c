/*
 * syllogism: two premises about three kinds, then a question. Here "all A are B" is strict: kinds
 * are never empty and never equal, so B has more members than A. Common: all A are B, all B are C.
 * Is each A a C? Yes. Is each C an A? No, C has more members. Rare: all A are B, no B is C. Is each
 * A a C? No. Or: all A are B, all D are C. Is each A a C? Unknown, the premises share no kind.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const all[] = {"all %s are %s.", "%s はみな %s だ。", "所有 %s 都是 %s 。"};
    static const char *const none[] = {"no %s is %s.", "%s は %s でない。", "%s 都不是 %s 。"};
    static const char *const asks[] = {"is each %s %s?", "%s はみな %s か？",
                                       "每个 %s 都是 %s 吗？"};
    char v[8], k[4][2];
    int lang = item_language(r), kind = rng_between(r, 0, 1), swap = rng_between(r, 0, 1);
    sample_letters(r, v, 4);
    for (int i = 0; i < 4; i++) k[i][0] = v[i], k[i][1] = 0;
    const char *middle = rare && kind == 1 ? k[3] : k[1]; /* unknown: the premises share no kind */
    char *p1 = xasprintf(all[lang], k[0], k[1]);
    char *p2 = xasprintf(rare && kind == 0 ? none[lang] : all[lang], middle, k[2]);
    bool flipped = !rare && kind == 1;
    char *ask = xasprintf(asks[lang], flipped ? k[2] : k[0], flipped ? k[0] : k[2]);
    it->lang = family_languages[lang];
    it->question = xasprintf("%s %s %s", swap ? p2 : p1, swap ? p1 : p2, ask);
    it->work = xasprintf("%s > %s %s %s", k[0], k[1], rare ? kind == 0 ? "/" : "?" : ">", k[2]);
    it->key = xasprintf("syllogism %d %d %s %s %s %s", rare, kind, k[0], k[1], k[2], middle);
    item_add_choice(it, !rare ? (kind == 0 ? "yes" : "no") : kind == 0 ? "no" : "unknown");
    item_add_choice(it, "yes");
    item_add_choice(it, "no");
    item_add_choice(it, "unknown");
    free(p1);
    free(p2);
    free(ask);
}

const struct task_family syllogism_family = {
    "syllogism", false, 0.5f, "two positive premises; rare: negative or unconnected ones",
    generate};
