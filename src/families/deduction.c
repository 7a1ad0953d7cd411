/*
 * deduction: two premises about kinds, then a question: yes, no, or unknown. "Every A is B" has its
 * ordinary meaning: A and B may be equal, so the converse does not follow. Common: every A is B,
 * every B is C: is every A C? Yes. Is every C A? Unknown. Every A is B, no B is C: is every A C?
 * No. Rare: premises that share a kind without connecting the others: unknown.
 *
 * The check of an item has premises in the form of a common variant: its own in the other order;
 * "no B is C" for "no C is B"; and c > b > a for a > b < c, with another B: for all such A and C
 * there is a B that contains both, so what is unknown there is unknown here. No common variant
 * decides a / b > c, which has no check.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>

enum { A, B, C };
struct premise {
    bool none;
    int subject, predicate;
};
struct form {
    const struct premise *premises; /* [2] */
    int asked[2];                   /* is each asked[0] an asked[1]? */
    const char *answer, *sign;
    const struct premise *check; /* [2] premises of the check, or NULL */
};
static const struct premise chain[] = {{false, A, B}, {false, B, C}},
                            chain_none[] = {{false, A, B}, {true, B, C}},
                            chain_back[] = {{false, B, A}, {false, C, B}},
                            joined[] = {{false, A, B}, {false, C, B}},
                            joined_none[] = {{false, A, B}, {true, C, B}},
                            none_chain[] = {{true, A, B}, {false, B, C}};

static const struct form common_forms[] = {
    {chain, {A, C}, "yes", "a > b > c", chain},
    {chain, {C, A}, "unknown", "a > b > c", chain},
    {chain_none, {A, C}, "no", "a > b / c", chain_none},
};
static const struct form rare_forms[] = {
    {joined, {A, C}, "unknown", "a > b < c", chain_back},
    {none_chain, {A, C}, "unknown", "a / b > c", NULL},
    {joined_none, {A, C}, "no", "a > b / c", chain_none},
};

static char *premise_text(const struct premise *p, char kinds[3][2], int lang) {
    static const char *const all[] = {"every %s is %s.", "どの %s も %s だ。",
                                      "每个 %s 都是 %s 。"};
    static const char *const none[] = {"no %s is %s.", "どの %s も %s でない。",
                                       "没有 %s 是 %s 。"};
    return xasprintf((p->none ? none : all)[lang], kinds[p->subject], kinds[p->predicate]);
}

/* swap: the second premise comes first. malloc'ed. */
static char *question_text(const struct premise *premises, const int asked[2], bool swap,
                           char kinds[3][2], int lang) {
    static const char *const asks[] = {"is every %s %s?", "どの %s も %s か？",
                                       "每个 %s 都是 %s 吗？"};
    char *first = premise_text(&premises[swap], kinds, lang),
         *second = premise_text(&premises[!swap], kinds, lang),
         *ask = xasprintf(asks[lang], kinds[asked[0]], kinds[asked[1]]),
         *text = xasprintf("%s %s %s", first, second, ask);
    free(first);
    free(second);
    free(ask);
    return text;
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    char letters[8], kinds[3][2] = {{0}};
    int lang = item_language(r), kind = rng_between(r, 0, 2), swap = rng_between(r, 0, 1);
    const struct form *f = &(rare ? rare_forms : common_forms)[kind];
    struct buf work = {0};
    sample_letters(r, letters, 3);
    for (int i = 0; i < 3; i++) kinds[i][0] = letters[i];
    for (const char *s = f->sign; *s; s++)
        buf_printf(&work, "%c", *s >= 'a' && *s <= 'c' ? letters[*s - 'a'] : *s);
    it->lang = family_languages[lang];
    it->question = question_text(f->premises, f->asked, swap, kinds, lang);
    if (f->check) {
        it->check_question = question_text(f->check, f->asked, !swap, kinds, lang);
        it->check_answer = xstrdup(CHECKED_ANSWER);
    }
    it->work = work.data;
    it->key = xasprintf("deduction %d %d %s", rare, kind, letters);
    item_add_choice(it, f->answer);
    item_add_choice(it, "yes");
    item_add_choice(it, "no");
    item_add_choice(it, "unknown");
}

const struct task_family deduction_family = {
    "deduction", false, 0.5f, "what two premises imply; rare: premises in other positions",
    generate};
