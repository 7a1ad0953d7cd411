/* families: the table of the families, splits, and the generation of items. */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>
#include <string.h>

/* An item depends on its family's index: add new families at the end. The first N_FRY are those of
 * the first starter model. */
const struct task_family *const task_families[] = {
    &copy_family,       &sort_family,      &compare_family, &sequence_family, &voice_family,
    &arithmetic_family, &pick_family,      &order_family,   &route_family,    &syllogism_family,
    &lookup_family,     &form_family,      &machine_family, &sums_family,     &judge_family,
    &deduction_family,  &retrieval_family, &needle_family,  &tools_family,    &about_family,
    &dialogue_family};
enum { N_FRY = 10 };

/* Shuffles the choices and sets `correct`. Before the call, choice 0 is the right one. */
static void shuffle_choices(struct rng *r, struct task_item *it) {
    it->correct = 0;
    for (int i = it->n_choices - 1; i > 0; i--) {
        int j = (int)rng_below(r, (uint32_t)i + 1);
        char *swap = it->choices[i];
        it->choices[i] = it->choices[j];
        it->choices[j] = swap;
        if (it->correct == i)
            it->correct = j;
        else if (it->correct == j)
            it->correct = i;
    }
}

int family_count(void) {
    return (int)ARRAY_LEN(task_families);
}

int fry_count(void) {
    return N_FRY;
}

int family_check_questions(int family, struct error *err) {
    const struct task_family *f = task_families[family];
    if (!f->conversations) return OK;
    return error_set(err, ERR_USAGE,
                     "the items of '%s' are conversations: only eval, train and 'model data' take "
                     "them",
                     f->name);
}

int family_max_tokens(int family) {
    return MAX(task_families[family]->max_tokens, FAMILY_MAX_TOKENS);
}

int family_max_work_tokens(int family) {
    return MAX(task_families[family]->max_work_tokens, FAMILY_MAX_WORK_TOKENS);
}

int family_find(const char *name) {
    for (int i = 0; i < family_count(); i++)
        if (strcmp(task_families[i]->name, name) == 0) return i;
    return -1;
}

bool family_set(const char *name, bool pick[MAX_FAMILIES]) {
    bool fry = strcmp(name, "fry") == 0, starter = strcmp(name, "starter") == 0;
    CHECK(family_count() <= MAX_FAMILIES);
    for (int i = 0; i < family_count(); i++) {
        const struct task_family *f = task_families[i];
        bool in_starter = f != &syllogism_family && f != &needle_family;
        pick[i] |= (fry && i < fry_count()) || (starter && in_starter);
    }
    return fry || starter;
}

int families_parse(const char *list, bool pick[MAX_FAMILIES], struct error *err) {
    char *copy = xstrdup(list), *save = NULL;
    int rc = OK;
    for (char *t = strtok_r(copy, ",", &save); t && rc == OK; t = strtok_r(NULL, ",", &save)) {
        int f = family_find(t);
        if (f >= 0)
            pick[f] = true;
        else if (!family_set(t, pick))
            rc = error_set(err, ERR_USAGE, "no task '%s'", t);
    }
    free(copy);
    return rc;
}

int32_t families_max_tokens(const bool pick[MAX_FAMILIES], int32_t most) {
    int32_t longest = 0;
    for (int f = 0; f < family_count(); f++)
        if (pick[f]) longest = MAX(longest, family_max_tokens(f));
    return MIN(longest, most);
}

void task_item_make_free(struct task_item *it) {
    if (it->n_choices == 0) return;
    if (it->correct >= 0) it->gold = xstrdup(it->choices[it->correct]);
    for (int i = 0; i < it->n_choices; i++) free(it->choices[i]);
    it->n_choices = 0;
    it->correct = -1;
    it->free_answer = !it->whole_replies;
}

void task_item_release(struct task_item *it) {
    for (int i = 0; i < it->n_choices; i++) free(it->choices[i]);
    for (int i = 0; i < it->n_views; i++) free(it->views[i]);
    for (int i = 0; i < it->n_follow_ups; i++) {
        free(it->follow_ups[i].question);
        free(it->follow_ups[i].answer);
    }
    free(it->follow_ups);
    json_decref(it->chat);
    free(it->views);
    free(it->question);
    free(it->work);
    free(it->conclusion);
    free(it->key);
    free(it->duplicate_of);
    free(it->gold);
    free(it->check_question);
    free(it->check_answer);
    json_decref(it->check_item);
    strings_release(&it->gold_aliases);
    *it = (struct task_item){0};
}

int data_split_parse(const char *name, enum data_split *out, struct error *err) {
    static const char *const names[] = {"train", "dev", "test"};
    for (int i = 0; i < 3; i++)
        if (strcmp(name, names[i]) == 0) return *out = (enum data_split)i, OK;
    return error_set(err, ERR_USAGE, "no split '%s'; there are train, dev and test", name);
}

/* One key in eight belongs to the test split, one in eight to the dev split. */
enum data_split family_split_of(const char *key) {
    uint64_t h = hash_fnv1a(key, strlen(key)) % 8;
    return h == 0 ? SPLIT_TEST : h == 1 ? SPLIT_DEV : SPLIT_TRAIN;
}

/* In the train split only the item's key counts. An item of the dev or test split must not occur in
 * training under its duplicate's key either. */
static bool item_in_split(const struct task_item *it, enum data_split split) {
    return family_split_of(it->key) == split && (split == SPLIT_TRAIN || !it->duplicate_of ||
                                                 family_split_of(it->duplicate_of) == split);
}

void family_item(int family, enum data_split split, uint64_t seed, uint32_t index, bool pretrain,
                 struct task_item *out) {
    const struct task_family *f = task_families[family];
    struct rng r = rng_make(seed, RNG_TASK, (uint32_t)family, index);
    bool rare = !pretrain && rng_uniform(&r) < f->rare_share;
    for (;;) {
        *out = (struct task_item){.rare = rare};
        f->generate(&r, rare, out);
        if (item_in_split(out, split)) break;
        task_item_release(out);
    }
    shuffle_choices(&r, out);
}
