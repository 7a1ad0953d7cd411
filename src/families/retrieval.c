/*
 * retrieval: a code that a text mentions once, among other codes and everyday sentences, at a
 * random place. The family retrieval has up to 16 sentences, needle a text of nearly 4,000 tokens.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>

enum { MAX_FACTS = 8, MAX_FILLER = 16, BOXES = 26 };

struct fact {
    int owner; /* a person, or FAMILY_WORDS + a box */
    int code;
};
struct fact_list {
    struct fact v[MAX_FACTS]; /* different owners and codes; the first one is asked for */
    int n;
};

static struct fact_list facts_sample(struct rng *r, int n) {
    struct fact_list facts = {.n = n};
    uint32_t owners[FAMILY_WORDS + BOXES];
    for (uint32_t i = 0; i < ARRAY_LEN(owners); i++) owners[i] = i;
    rng_shuffle(r, owners, ARRAY_LEN(owners));
    for (int i = 0; i < n; i++)
        facts.v[i] = (struct fact){(int)owners[i], 1000 + 1000 * i + rng_between(r, 0, 999)};
    for (int i = n - 1; i > 0; i--) {
        int k = rng_between(r, 0, i), swap = facts.v[i].code;
        facts.v[i].code = facts.v[k].code;
        facts.v[k].code = swap;
    }
    return facts;
}

/* "mia", "box k" */
static char *owner_name(int owner, int lang) {
    static const char *const boxes[] = {"box %c", "箱%c", "箱子%c"};
    return owner < FAMILY_WORDS ? xstrdup(family_people[lang][owner])
                                : xasprintf(boxes[lang], 'a' + owner - FAMILY_WORDS);
}

static char *owner_text(const char *format, int owner, int lang) {
    char *name = owner_name(owner, lang), *text = xasprintf(format, name);
    free(name);
    return text;
}

static void fact_add(struct buf *text, const struct fact *f, int lang) {
    static const char *const facts[] = {"the code of %s is ", "%sの番号は", "%s的号码是"};
    static const char *const ends[] = {"%d.", "%dです。", "%d。"};
    char *begin = owner_text(facts[lang], f->owner, lang);
    buf_puts(text, begin);
    buf_printf(text, ends[lang], f->code);
    free(begin);
}

/* The facts at random places among n everyday sentences. */
static char *document_text(struct rng *r, const struct fact_list *facts, int n, int lang) {
    struct buf text = {0};
    uint32_t places[MAX_FACTS]; /* sentences before each fact */
    uint32_t order[FAMILY_PROSE];
    for (int i = 0; i < facts->n; i++) places[i] = rng_below(r, (uint32_t)n + 1);
    for (uint32_t i = 0; i < FAMILY_PROSE; i++) order[i] = i;
    rng_shuffle(r, order, FAMILY_PROSE);
    for (int i = 0; i <= n; i++) {
        for (int k = 0; k < facts->n; k++) {
            if ((int)places[k] != i) continue;
            if (text.len && lang == EN) buf_puts(&text, " ");
            fact_add(&text, &facts->v[k], lang);
        }
        if (i == n) break;
        if (text.len && lang == EN) buf_puts(&text, " ");
        buf_puts(&text, family_prose[lang][order[i % FAMILY_PROSE]]);
    }
    return text.data;
}

static void item_make(struct rng *r, struct task_item *it, const char *name, int lang, int n) {
    static const char *const asks[] = {"what is the code of %s?", "%sの番号は？",
                                       "%s的号码是多少？"};
    struct fact_list facts = facts_sample(r, rng_between(r, 2, MAX_FACTS));
    struct buf key = {0};
    char *text = document_text(r, &facts, n, lang),
         *ask = owner_text(asks[lang], facts.v[0].owner, lang);
    it->lang = family_languages[lang];
    it->question = xasprintf("%s\n%s", text, ask);
    it->work = xstrdup("");
    buf_printf(&key, "%s %d", name, n);
    for (int i = 0; i < facts.n; i++) {
        buf_printf(&key, " %d=%d", facts.v[i].owner, facts.v[i].code);
        if (it->n_choices < 4) item_add_number(it, facts.v[i].code);
    }
    it->key = key.data;
    it->n_follow_ups = facts.n - 1;
    it->follow_ups = xcalloc((size_t)facts.n, sizeof *it->follow_ups);
    for (int i = 1; i < facts.n; i++)
        it->follow_ups[i - 1] = (struct task_follow_up){
            owner_text(asks[lang], facts.v[i].owner, lang), xasprintf("%d", facts.v[i].code)};
    free(text);
    free(ask);
}

static void retrieval_generate(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    item_make(r, it, "retrieval", item_language(r), rng_between(r, 0, MAX_FILLER));
}

static void needle_generate(struct rng *r, bool rare, struct task_item *it) {
    static const int sentences[] = {225, 230, 240}; /* 3,700 tokens of the starter model */
    (void)rare;
    int lang = item_language(r);
    item_make(r, it, "needle", lang, sentences[lang]);
}

const struct task_family retrieval_family = {
    "retrieval",      true, 0, "a code that a short text mentions", retrieval_generate,
    .max_tokens = 512};
const struct task_family needle_family = {
    "needle",          true, 0, "a code in a text of nearly 4,000 tokens", needle_generate,
    .max_tokens = 4096};
