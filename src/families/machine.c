/*
 * machine: a program of a machine with variables: "x=3; y=x+4; z=y+2". What is the value of a
 * variable? Common: additions. Rare: subtractions too. The derivation computes all variables; its
 * conclusion repeats the one that is asked for.
 */
#define _GNU_SOURCE
#include "families/internal.h"

enum { MAX_STATEMENTS = 4 };

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const asks[] = {"%s; what is %c?", "%s; %cは？", "%s; %c是多少？"};
    int lang = item_language(r), n = rng_between(r, 3, MAX_STATEMENTS), value[MAX_STATEMENTS];
    char v[MAX_STATEMENTS + 1];
    struct buf text = {0}, work = {0};
    sample_letters(r, v, n);
    value[0] = rng_between(r, 1, 9);
    int minus = rng_between(r, 1, n - 1); /* the statement that subtracts, in a rare program */
    buf_printf(&text, "%c=%d", v[0], value[0]);
    buf_printf(&work, "%c=%d", v[0], value[0]);
    for (int i = 1; i < n; i++) {
        int digit = rng_between(r, 1, 9), sign = rare && i == minus ? -1 : 1;
        if (sign < 0) digit = rng_between(r, 1, MIN(value[i - 1], 9));
        value[i] = value[i - 1] + sign * digit;
        buf_printf(&text, "; %c=%c%c%d", v[i], v[i - 1], sign < 0 ? '-' : '+', digit);
        buf_printf(&work, " %c=%d", v[i], value[i]);
    }
    int asked = rng_between(r, rare ? minus : 1, n - 1);
    it->lang = family_languages[lang];
    it->question = xasprintf(asks[lang], text.data, v[asked]);
    it->work = work.data;
    it->conclusion = xasprintf("; %c=%d", v[asked], value[asked]);
    it->key = xasprintf("machine %c %s", v[asked], text.data);
    item_add_number(it, value[asked]);
    for (int i = 0; i < n && it->n_choices < 3; i++) item_add_number(it, value[i]);
    item_add_near_numbers(r, it, value[asked]);
    buf_release(&text);
}

const struct task_family machine_family = {
    "machine", false, 0.5f, "a variable of a program; rare: with subtraction", generate};
