/*
 * judge: whether a proposed answer to a question of another family is right. Common: to a common
 * variant of the family. Rare: to a rare one. The derivation answers the question; its conclusion
 * compares the answer with the proposed one, symbol by symbol up to the first difference:
 *
 *     8-6=2 8-1=7 2-0=2 272: 2 2, 7 7, 2 1 differ
 *
 * Without the conclusion a model has to compare all symbols for one word, and stays at chance.
 *
 * The key is that of the question, so question and judgement are in the same split, whatever answer
 * is proposed.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <ctype.h>
#include <string.h>

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

/* The length of the symbol at the start of a text: a digit, or a run of other characters. */
static int symbol_length(const char *text) {
    if (isdigit((unsigned char)*text)) return 1;
    return (int)strcspn(text, " 0123456789");
}

/* Appends the pairs of symbols, and "same" or "differ". The shorter text ends with "-". */
static void comparison_add(struct buf *out, const char *answer, const char *proposed) {
    for (bool same = true; same;) {
        answer += strspn(answer, " ");
        proposed += strspn(proposed, " ");
        int n = symbol_length(answer), m = symbol_length(proposed);
        if (n == 0 && m == 0) break;
        same = n == m && strncmp(answer, proposed, (size_t)n) == 0;
        buf_printf(out, " %.*s %.*s", n ? n : 1, n ? answer : "-", m ? m : 1, m ? proposed : "-");
        answer += n;
        proposed += m;
        buf_puts(out, !same ? " differ" : *answer || *proposed ? "," : " same");
    }
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    struct task_item q = {0};
    struct buf conclusion = {0};
    int first = rare ? N_EASY : 0;
    judged[rng_between(r, first, (int)ARRAY_LEN(judged) - 1)]->generate(r, rare, &q);
    bool right = rng_between(r, 0, 1); /* choice 0 of a new item is the right one */
    const char *proposed = q.choices[right ? 0 : rng_between(r, 1, q.n_choices - 1)];
    it->lang = q.lang;
    it->question = family_judge_question(&q, proposed);
    it->work = xasprintf("%s%s%s", q.work, *q.work ? " " : "", q.choices[0]);
    buf_puts(&conclusion, ":");
    comparison_add(&conclusion, q.choices[0], proposed);
    it->conclusion = conclusion.data;
    it->key = xstrdup(q.key);
    it->duplicate_of = q.duplicate_of ? xstrdup(q.duplicate_of) : NULL;
    item_add_choice(it, right ? "yes" : "no");
    item_add_choice(it, right ? "no" : "yes");
    task_item_release(&q);
}

const struct task_family judge_family = {
    "judge",  false,
    0.5f,     "whether an answer is right; rare: to a rare variant",
    generate, .max_work_tokens = 64};
