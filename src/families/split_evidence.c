/*
 * split_evidence: questions with split evidence. Every agent of a team sees a part of the evidence.
 * Without communication each agent gives a different answer, so no majority exists. With the
 * answers of the other agents, an agent can find the right answer.
 *
 * A question has six items, numbers or letters, in three shares of two. An agent can name the best
 * item of its share; the best of these three items is the answer. Training conversations teach
 * three things in turn: the whole question, a share, and a share followed by the others' answers.
 */
#define _GNU_SOURCE
#include "families/families.h"

#include <stdlib.h>
#include <string.h>

enum { SHARES = 3, ITEMS_PER_SHARE = 2, N_ITEMS = SHARES * ITEMS_PER_SHARE, N_KINDS = 2 };

static const struct {
    const char *name;
    bool letters;             /* true: the earliest letter; false: the largest number */
    const char *questions[3]; /* in English, Japanese, Chinese */
} kinds[N_KINDS] = {
    {"largest", false, {"largest of %s", "いちばん大きいのは：%s", "最大的是：%s"}},
    {"earliest", true, {"earliest letter of %s", "いちばん早い文字は：%s", "最早的字母是：%s"}},
};
static const char *const langs[] = {"en", "ja", "zh"};

int split_evidence_find(const char *name) {
    for (int i = 0; i < N_KINDS; i++)
        if (strcmp(kinds[i].name, name) == 0) return i;
    return -1;
}

/* Choices [from, from + n) with blanks between them, malloc'ed. */
static char *items_text(const struct task_item *it, int from, int n) {
    struct buf b = {0};
    for (int i = from; i < from + n; i++)
        buf_printf(&b, "%s%s", i > from ? " " : "", it->choices[i]);
    return b.data;
}

/* The question about choices [from, from + n), malloc'ed. */
static char *question_text(int kind, int lang, const struct task_item *it, int from, int n) {
    char *items = items_text(it, from, n), *out = xasprintf(kinds[kind].questions[lang], items);
    free(items);
    return out;
}

/* The index of the best choice in [from, from + n). */
static int best_choice(int kind, const int *values, int from, int n) {
    int best = from;
    for (int i = from + 1; i < from + n; i++)
        if (kinds[kind].letters ? values[i] < values[best] : values[i] > values[best]) best = i;
    return best;
}

/* Generates an item of any split, the values of its choices and its language. */
static void item_make(struct rng *r, int kind, struct task_item *it, int values[N_ITEMS],
                      int *lang) {
    int n = kinds[kind].letters ? 26 : 100;
    uint32_t order[100], u = rng_below(r, 10);
    struct buf key = {0};
    *lang = u < 6 ? 0 : u < 8 ? 1 : 2;
    for (int i = 0; i < n; i++) order[i] = (uint32_t)i;
    rng_shuffle(r, order, (size_t)n);
    *it = (struct task_item){.n_choices = N_ITEMS, .lang = langs[*lang], .work = xstrdup("")};
    buf_printf(&key, "%s", kinds[kind].name);
    for (int i = 0; i < N_ITEMS; i++) {
        values[i] = (int)order[i];
        it->choices[i] =
            kinds[kind].letters ? xasprintf("%c", 'a' + values[i]) : xasprintf("%d", values[i]);
        buf_printf(&key, " %s", it->choices[i]);
    }
    it->key = key.data;
    it->correct = best_choice(kind, values, 0, N_ITEMS);
    it->question = question_text(kind, *lang, it, 0, N_ITEMS);
    it->n_views = SHARES;
    it->views = xcalloc(SHARES, sizeof *it->views);
    for (int s = 0; s < SHARES; s++)
        it->views[s] = question_text(kind, *lang, it, s * ITEMS_PER_SHARE, ITEMS_PER_SHARE);
}

/* Generates an item of a split and the values of its choices, in their order. */
static void item_generate(int kind, enum data_split split, uint64_t seed, uint32_t index,
                          struct task_item *out, int values[N_ITEMS]) {
    struct rng r = rng_make(seed, RNG_TASK, (uint32_t)(MAX_FAMILIES + kind), index);
    for (int lang;;) {
        item_make(&r, kind, out, values, &lang);
        if (family_split_of(out->key) == split) return;
        task_item_release(out);
    }
}

void split_evidence_item(int kind, enum data_split split, uint64_t seed, uint32_t index,
                         struct task_item *out) {
    int values[N_ITEMS];
    item_generate(kind, split, seed, index, out, values);
}

/* Conversation `index`. In turn: the whole question, a share, a share followed by the debate. */
static json_t *conversation_json(int kind, uint64_t seed, int index) {
    struct task_item it;
    int values[N_ITEMS], share = index / 3 % SHARES, n = 0;
    uint32_t order[SHARES - 1];
    const char *others[SHARES - 1];
    item_generate(kind, SPLIT_TRAIN, seed, (uint32_t)index, &it, values);
    json_t *turns = json_array();
    messages_add(turns, "user", index % 3 == 0 ? it.question : it.views[share]);
    messages_add_answer(
        turns, it.choices[index % 3 == 0 ? it.correct
                                         : best_choice(kind, values, share * ITEMS_PER_SHARE,
                                                       ITEMS_PER_SHARE)]);
    if (index % 3 == 2) {
        struct rng r = rng_make(seed, RNG_SHUFFLE, (uint32_t)kind, (uint32_t)index);
        for (int s = 0; s < SHARES; s++)
            if (s != share) order[n++] = (uint32_t)s;
        rng_shuffle(&r, order, (size_t)n);
        for (int i = 0; i < n; i++)
            others[i] = it.choices[best_choice(kind, values, (int)order[i] * ITEMS_PER_SHARE,
                                               ITEMS_PER_SHARE)];
        char *others_message = debate_turn_text(others, n);
        messages_add(turns, "user", others_message);
        messages_add_answer(turns, it.choices[it.correct]);
        free(others_message);
    }
    task_item_release(&it);
    return turns;
}

int split_evidence_write(int kind, int n, uint64_t seed, const char *path, struct error *err) {
    struct buf text = {0};
    for (int i = 0; i < n; i++) messages_to_jsonl(&text, conversation_json(kind, seed, i));
    int rc = file_write(path, text.data, text.len, err);
    buf_release(&text);
    return rc;
}
