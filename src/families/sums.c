/*
 * sums: the sum of two numbers of three digits, too hard to guess, with a derivation that adds
 * digit by digit with carries. Rare: the difference, by borrowing.
 */
#define _GNU_SOURCE
#include "families/internal.h"

enum { DIGITS = 3 };

/* From the last digit on: "7+6=13 4+8+1=13 3+5+1=9", or with borrowed tens "13-8=5 5-1-1=3 4-2=2".
 */
static char *work_text(int a, int b, int sign) {
    struct buf text = {0};
    bool carry = false; /* or a borrowed ten */
    for (int i = 0; i < DIGITS; i++, a /= 10, b /= 10) {
        int digit = a % 10, other = b % 10 + carry;
        bool borrow = sign < 0 && digit < other;
        if (borrow) digit += 10;
        buf_printf(&text, "%s%d%c%d", i ? " " : "", digit, sign > 0 ? '+' : '-', b % 10);
        if (carry) buf_printf(&text, "%c1", sign > 0 ? '+' : '-');
        buf_printf(&text, "=%d", digit + sign * other);
        carry = borrow || digit + sign * other > 9;
    }
    return text.data;
}

static const char *const sums[] = {"sum: %s + %d", "和：%s + %d", "求和：%s + %d"};

/* Checks a + b by b + a, and a - b by adding b. 100 is added to the difference, so that the
 * question is about numbers of three digits like those of pretraining. */
static void check_add(struct task_item *it, bool rare, int lang, int a, int b) {
    char number[16];
    snprintf(number, sizeof number, "%d", b);
    it->check_question = rare ? xasprintf(sums[lang], "{{ answer | int(-1) + 100 }}", b)
                              : xasprintf(sums[lang], number, a);
    it->check_answer = rare ? xasprintf("%d", a + 100) : xstrdup(CHECKED_ANSWER);
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const differences[] = {"difference: %s - %d", "差：%s - %d",
                                              "求差：%s - %d"};
    int lang = item_language(r), a = rng_between(r, 100, 999), b = rng_between(r, 100, 999);
    if (rare && a < b) {
        int swap = a;
        a = b;
        b = swap;
    }
    int right = rare ? a - b : a + b;
    char number[16];
    snprintf(number, sizeof number, "%d", a);
    it->lang = family_languages[lang];
    it->question = xasprintf((rare ? differences : sums)[lang], number, b);
    it->work = work_text(a, b, rare ? -1 : 1);
    it->key = xasprintf("sums %d %d %d", rare, a, b);
    item_add_number(it, right);
    item_add_near_numbers(r, it, right);
    check_add(it, rare, lang, a, b);
}

const struct task_family sums_family = {"sums",   false,
                                        0.5f,     "a sum of three digits; rare: a difference",
                                        generate, .max_work_tokens = 64};
