/*
 * lookup: a value in a table of people. Common: the age or the town of a person. Rare: of the
 * friend of a person, a chain of two rows.
 */
#define _GNU_SOURCE
#include "families/internal.h"

enum { MAX_ROWS = 5 };
struct table {
    int n, asked;                                        /* rows; the row that the question names */
    int person[MAX_ROWS];                                /* indices of family_people */
    int age[MAX_ROWS], town[MAX_ROWS], friend[MAX_ROWS]; /* friend: a row */
};

static struct table table_sample(struct rng *r) {
    struct table t = {.n = rng_between(r, 3, MAX_ROWS)};
    uint32_t people[FAMILY_WORDS], towns[FAMILY_WORDS];
    for (uint32_t i = 0; i < FAMILY_WORDS; i++) people[i] = towns[i] = i;
    rng_shuffle(r, people, FAMILY_WORDS);
    rng_shuffle(r, towns, FAMILY_WORDS);
    for (int i = 0; i < t.n; i++) {
        t.person[i] = (int)people[i];
        t.town[i] = (int)towns[i];
        t.age[i] = 20 + 14 * i + rng_between(r, 0, 13); /* different in each row */
        t.friend[i] = (i + rng_between(r, 1, t.n - 1)) % t.n;
    }
    for (int i = t.n - 1; i > 0; i--) {
        int k = rng_between(r, 0, i), swap = t.age[i];
        t.age[i] = t.age[k];
        t.age[k] = swap;
    }
    t.asked = rng_between(r, 0, t.n - 1);
    return t;
}

/* Row i as indices and numbers, which identify it in every language. */
static void key_add(struct buf *key, const struct table *t, int i) {
    buf_printf(key, " %d,%d,%d,%d", t->person[i], t->age[i], t->town[i], t->person[t->friend[i]]);
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const heads[] = {"name age town friend", "名前 年 町 友",
                                        "名字 年龄 城市 朋友"};
    static const char *const direct[3][2] = {
        {"age of %s?", "town of %s?"}, {"%sの年は？", "%sの町は？"}, {"%s的年龄？", "%s的城市？"}};
    static const char *const chained[3][2] = {
        {"age of the friend of %s?", "town of the friend of %s?"},
        {"%sの友の年は？", "%sの友の町は？"},
        {"%s的朋友的年龄？", "%s的朋友的城市？"}};
    int lang = item_language(r), town = rng_between(r, 0, 1);
    struct table t = table_sample(r);
    int row = rare ? t.friend[t.asked] : t.asked;
    struct buf text = {0}, key = {0};
    buf_puts(&text, heads[lang]);
    buf_printf(&key, "lookup %d %d %d:", rare, town, t.person[t.asked]);
    for (int i = 0; i < t.n; i++) {
        buf_printf(&text, "\n%s %d %s %s", family_people[lang][t.person[i]], t.age[i],
                   family_towns[lang][t.town[i]], family_people[lang][t.person[t.friend[i]]]);
        key_add(&key, &t, i);
    }
    buf_puts(&text, "\n");
    buf_printf(&text, (rare ? chained : direct)[lang][town],
               family_people[lang][t.person[t.asked]]);
    it->lang = family_languages[lang];
    it->question = text.data;
    it->work = xstrdup(rare ? family_people[lang][t.person[row]] : "");
    it->key = key.data;
    for (int k = 0, i = row; k < t.n && it->n_choices < 4; k++, i = (row + k) % t.n) {
        if (town)
            item_add_choice(it, family_towns[lang][t.town[i]]);
        else
            item_add_number(it, t.age[i]);
    }
}

const struct task_family lookup_family = {
    "lookup", false, 0.5f, "a value in a table; rare: of a person's friend", generate};
