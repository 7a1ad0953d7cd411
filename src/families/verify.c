/*
 * verify: the questions of judge. The derivation answers the question, then compares the answer
 * with the proposed one, symbol by symbol up to the first difference:
 *
 *     2+5=7 ... 188: 1 1, 8 8, 8 6 differ
 *
 * A model that judges in one step has to compare all symbols for one word, and learns it late or
 * never; here every pair is a step.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <ctype.h>
#include <string.h>

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
    struct task_item q;
    struct buf work = {0};
    const char *proposed = item_judgement(r, rare, it, &q);
    buf_printf(&work, "%s%s%s:", q.work, *q.work ? " " : "", q.choices[0]);
    comparison_add(&work, q.choices[0], proposed);
    it->work = work.data;
    task_item_release(&q);
}

const struct task_family verify_family = {
    "verify", false,
    0.5f,     "whether an answer is right, symbol by symbol; rare: to a rare variant",
    generate, .max_work_tokens = 64};
