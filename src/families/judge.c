/*
 * judge: whether a proposed answer to a question of another family is right. Common: to a common
 * variant of the family. Rare: to a rare one. The derivation answers the question.
 *
 * The key is that of the question, so question and judgement are in the same split, whatever answer
 * is proposed.
 */
#define _GNU_SOURCE
#include "families/internal.h"

static const struct task_family *const judged[] = {
    &sort_family,  &compare_family, &sequence_family,  &arithmetic_family, &pick_family,
    &order_family, &route_family,   &deduction_family, &machine_family,    &sums_family};
enum { N_EASY = 3 }; /* the first ones have no rare variants */

char *family_judge_question(const struct task_item *it, const char *proposed) {
    static const char *const asks[] = {"%s\nproposed: %s. right?", "%s\n案：%s。正しい？",
                                       "%s\n提案：%s。对吗？"};
    int lang = EN;
    while (family_languages[lang] != it->lang) lang++;
    return xasprintf(asks[lang], it->question, proposed);
}

const char *item_judgement(struct rng *r, bool rare, struct task_item *it, struct task_item *q) {
    *q = (struct task_item){0};
    int first = rare ? N_EASY : 0;
    judged[rng_between(r, first, (int)ARRAY_LEN(judged) - 1)]->generate(r, rare, q);
    bool right = rng_between(r, 0, 1); /* choice 0 of a new item is the right one */
    const char *proposed = q->choices[right ? 0 : rng_between(r, 1, q->n_choices - 1)];
    it->lang = q->lang;
    it->question = family_judge_question(q, proposed);
    it->key = xstrdup(q->key);
    it->duplicate_of = q->duplicate_of ? xstrdup(q->duplicate_of) : NULL;
    item_add_choice(it, right ? "yes" : "no");
    item_add_choice(it, right ? "no" : "yes");
    return proposed;
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    struct task_item q;
    item_judgement(r, rare, it, &q);
    it->work = xasprintf("%s%s%s", q.work, *q.work ? " " : "", q.choices[0]);
    task_item_release(&q);
}

const struct task_family judge_family = {
    "judge",  false,
    0.5f,     "whether an answer is right; rare: to a rare variant",
    generate, .max_work_tokens = 64};
