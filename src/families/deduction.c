/*
 * deduction: two premises about kinds, then a question: yes, no, or unknown. "Every A is B" has its
 * ordinary meaning: A and B may be equal, so the converse does not follow. Common: every A is B,
 * every B is C: is every A C? Yes. Is every C A? Unknown. Every A is B, no B is C: is every A C?
 * No. Rare: premises that share a kind without connecting the others: unknown.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>

enum { A, B, C };
struct form {
    struct premise {
        bool none;
        int subject, predicate;
    } premises[2];
    int asked[2]; /* is each asked[0] an asked[1]? */
    const char *answer, *sign;
};

static const struct form common_forms[] = {
    {{{false, A, B}, {false, B, C}}, {A, C}, "yes", "a > b > c"},
    {{{false, A, B}, {false, B, C}}, {C, A}, "unknown", "a > b > c"},
    {{{false, A, B}, {true, B, C}}, {A, C}, "no", "a > b / c"},
};
static const struct form rare_forms[] = {
    {{{false, A, B}, {false, C, B}}, {A, C}, "unknown", "a > b < c"},
    {{{true, A, B}, {false, B, C}}, {A, C}, "unknown", "a / b > c"},
    {{{false, A, B}, {true, C, B}}, {A, C}, "no", "a > b / c"},
};

static char *premise_text(const struct premise *p, char kinds[3][2], int lang) {
    static const char *const all[] = {"every %s is %s.", "どの %s も %s だ。",
                                      "每个 %s 都是 %s 。"};
    static const char *const none[] = {"no %s is %s.", "どの %s も %s でない。",
                                       "没有 %s 是 %s 。"};
    return xasprintf((p->none ? none : all)[lang], kinds[p->subject], kinds[p->predicate]);
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const asks[] = {"is every %s %s?", "どの %s も %s か？",
                                       "每个 %s 都是 %s 吗？"};
    char letters[8], kinds[3][2] = {{0}};
    int lang = item_language(r), kind = rng_between(r, 0, 2), swap = rng_between(r, 0, 1);
    const struct form *f = &(rare ? rare_forms : common_forms)[kind];
    struct buf work = {0};
    sample_letters(r, letters, 3);
    for (int i = 0; i < 3; i++) kinds[i][0] = letters[i];
    char *premises[2], *ask;
    for (int i = 0; i < 2; i++) premises[i] = premise_text(&f->premises[i ^ swap], kinds, lang);
    ask = xasprintf(asks[lang], kinds[f->asked[0]], kinds[f->asked[1]]);
    for (const char *s = f->sign; *s; s++)
        buf_printf(&work, "%c", *s >= 'a' && *s <= 'c' ? letters[*s - 'a'] : *s);
    it->lang = family_languages[lang];
    it->question = xasprintf("%s %s %s", premises[0], premises[1], ask);
    it->work = work.data;
    it->key = xasprintf("deduction %d %d %s", rare, kind, letters);
    item_add_choice(it, f->answer);
    item_add_choice(it, "yes");
    item_add_choice(it, "no");
    item_add_choice(it, "unknown");
    free(premises[0]);
    free(premises[1]);
    free(ask);
}

const struct task_family deduction_family = {
    "deduction", false, 0.5f, "what two premises imply; rare: premises in other positions",
    generate};
