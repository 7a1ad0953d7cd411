/*
 * fry: the task families that train and measure the starter model.
 *
 * A function make_… generates one question in one of three languages from an rng. Easy families
 * contain only variants that occur in pretraining. Harder families mix a common variant with a rare
 * variant that does not occur in pretraining (addition and subtraction, larger and smaller, …). So
 * the accuracy of the base model is between chance and 1, and adapters, votes and evolution can
 * have an effect. The parameter `rare` selects the variant; fry_item samples it with the family's
 * share.
 *
 * Invariant: `key` contains everything that identifies a question, and nothing else. The hash of
 * the key decides the split, so a question of the test split is never sampled for training or for
 * fitness. Two pairs of families ask the same question in other words (sort and order, compare and
 * pick): in the dev and test splits, the key `duplicate_of` must belong to the same split.
 */
#define _GNU_SOURCE
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

enum { FAMILY_CHOICES = 8 }; /* choices of one question, at most */
enum { EN, JA, ZH };
static const char *const lang_names[] = {"en", "ja", "zh"};
static const char *const letters = "abcdefghijklmnopqrstuvwxyz";

static int sample_lang(struct rng *r) {
    uint32_t u = rng_below(r, 10);
    return u < 6 ? EN : u < 8 ? JA : ZH;
}

static int rng_between(struct rng *r, int lo, int hi) {
    return lo + (int)rng_below(r, (uint32_t)(hi - lo + 1));
}

static bool has_choice(const struct task_item *it, const char *text) {
    for (int i = 0; i < it->n_choices; i++)
        if (strcmp(it->choices[i], text) == 0) return true;
    return false;
}

static void add_choice(struct task_item *it, const char *text) {
    if (it->n_choices < FAMILY_CHOICES && !has_choice(it, text))
        it->choices[it->n_choices++] = xstrdup(text);
}

static void add_number(struct task_item *it, int value) {
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    add_choice(it, text);
}

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

/* Writes n distinct random letters and a NUL to v. */
static void sample_letters(struct rng *r, char *v, int n) {
    uint32_t order[26];
    for (uint32_t i = 0; i < 26; i++) order[i] = i;
    rng_shuffle(r, order, 26);
    for (int i = 0; i < n; i++) v[i] = letters[order[i]];
    v[n] = 0;
}

static void letters_join(char *out, const char *v, int n) {
    for (int i = 0; i < n; i++) {
        out[2 * i] = v[i];
        out[2 * i + 1] = ' ';
    }
    out[2 * n - 1] = 0;
}

static int compare_letters(const void *a, const void *b) {
    return *(const char *)a - *(const char *)b;
}

static void add_spaced(struct task_item *it, const char *v, int n) {
    char text[64];
    letters_join(text, v, n);
    add_choice(it, text);
}

static void swap_letters(char *v, int i, int j) {
    char c = v[i];
    v[i] = v[j];
    v[j] = c;
}

/* Adds wrong answers that differ from the right one by an exchange of two letters. */
static void add_swapped(struct rng *r, struct task_item *it, const char *right, int n) {
    char v[16];
    for (int tries = 0; it->n_choices < 4 && tries < 64; tries++) {
        memcpy(v, right, (size_t)n + 1);
        int i = rng_between(r, 0, n - 1), j = rng_between(r, 0, n - 1);
        if (i == j) continue;
        swap_letters(v, i, j);
        add_spaced(it, v, n);
    }
}

static void make_copy(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    static const char *const asks[] = {"repeat: %s", "くりかえして：%s", "重复：%s"};
    int n = rng_between(r, 3, 5), lang = sample_lang(r);
    char v[16], text[64];
    sample_letters(r, v, n);
    letters_join(text, v, n);
    it->lang = lang_names[lang];
    it->question = xasprintf(asks[lang], text);
    it->work = xstrdup("");
    it->key = xasprintf("copy %s", v);
    add_choice(it, text);
    add_swapped(r, it, v, n);
}

static void make_sort(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    static const char *const asks[] = {"sort: %s", "ならべて：%s", "排序：%s"};
    int n = rng_between(r, 3, 4), lang = sample_lang(r);
    char v[16], text[64];
    sample_letters(r, v, n);
    letters_join(text, v, n);
    it->lang = lang_names[lang];
    it->question = xasprintf(asks[lang], text);
    it->key = xasprintf("sort %s", v);
    it->duplicate_of = xasprintf("order 0 %s", v);
    qsort(v, (size_t)n, 1, compare_letters);
    it->work = xstrdup("from a to z");
    add_spaced(it, v, n);
    add_swapped(r, it, v, n);
}

/* The larger (or smaller) of two different numbers of three digits. The family `duplicate_name`
 * asks for the larger one too. */
static void make_number_comparison(struct rng *r, struct task_item *it, const char *const asks[],
                                   const char *name, const char *duplicate_name, bool smaller) {
    int a = rng_between(r, 100, 999), b = rng_between(r, 100, 999), lang = sample_lang(r);
    if (a == b) b = a < 999 ? a + 1 : a - 1;
    it->lang = lang_names[lang];
    it->question = xasprintf(asks[lang], a, b);
    it->work = xasprintf("%d < %d", MIN(a, b), MAX(a, b));
    it->key = xasprintf("%s %d %d %d", name, smaller, a, b);
    it->duplicate_of = smaller ? NULL : xasprintf("%s 0 %d %d", duplicate_name, a, b);
    add_number(it, smaller ? MIN(a, b) : MAX(a, b));
    add_number(it, smaller ? MAX(a, b) : MIN(a, b));
}

static void make_compare(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    static const char *const asks[] = {"which is larger: %d or %d?", "%dと%d、大きいのは？",
                                       "%d和%d哪个大？"};
    make_number_comparison(r, it, asks, "compare", "pick", false);
}

static void add_near_numbers(struct rng *r, struct task_item *it, int right) {
    static const int offsets[] = {1, -1, 2, -2, 10, -10, 9, -9, 11, -11, 100, -100};
    for (int tries = 0; it->n_choices < 4 && tries < 64; tries++) {
        int value = right + offsets[rng_below(r, ARRAY_LEN(offsets))];
        if (value >= 0) add_number(it, value);
    }
}

/* A pattern of 2 to 4 letters is shown twice, and then up to all but one of its letters again:
 * which letter comes next? */
static void make_sequence(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    static const char *const asks[] = {"next: %s", "つぎは：%s", "下一个：%s"};
    int period = rng_between(r, 2, 4), n = 2 * period + rng_between(r, 0, period - 1),
        lang = sample_lang(r);
    char v[16], shown[16], text[64];
    sample_letters(r, v, 5);
    for (int i = 0; i < n; i++) shown[i] = v[i % period];
    letters_join(text, shown, n);
    it->lang = lang_names[lang];
    it->question = xasprintf(asks[lang], text);
    it->work = xstrdup("");
    it->key = xasprintf("sequence %d %.*s", n, period, v);
    add_spaced(it, &v[n % period], 1);
    for (int i = 0; it->n_choices < 4 && i < 5; i++) add_spaced(it, &v[i], 1);
}

static const char *const nouns[] = {"plan", "rule",  "proof", "claim", "idea",  "route", "answer",
                                    "sum",  "map",   "list",  "tool",  "story", "guess", "method",
                                    "word", "model", "test",  "path",  "count", "note"};
static const char *const traits[] = {"short", "long",  "old",   "new",  "odd",   "plain", "first",
                                     "last",  "small", "large", "warm", "cold",  "loud",  "quiet",
                                     "green", "blue",  "round", "flat", "sharp", "slow"};
static const char *const voices[3][6] = {
    {"i doubt the %s %s", "i test the %s %s", "where is the flaw in the %s %s",
     "the %s %s is not shown yet", "I check each step of the %s %s", "is the %s %s true"},
    {"i use the %s %s today", "does the %s %s work in practice", "let us build the %s %s",
     "the %s %s must be cheap", "i try the %s %s by hand", "how do we ship the %s %s"},
    {"what if the %s %s turns around", "i wonder about the %s %s", "let us look beyond the %s %s",
     "the %s %s may hide a new way", "i mix the %s %s with another",
     "imagine the %s %s upside down"},
};
static const char *const voice_names[] = {"critic", "practitioner", "explorer"};

static void make_voice(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    static const char *const asks[] = {"who says: %s, in the %s %s?", "だれの言葉：%s（%s %s）",
                                       "谁说的：%s（%s %s）"};
    int persona = rng_between(r, 0, 2), phrase = rng_between(r, 0, 5), lang = sample_lang(r);
    int t = rng_between(r, 0, 19), n = rng_between(r, 0, 19), t2 = rng_between(r, 0, 19),
        n2 = rng_between(r, 0, 19);
    char *sentence = NULL;
    const char *fmt = voices[persona][phrase];
    const char *placeholder = strstr(fmt, "%s %s");
    sentence = xasprintf("%.*s%s %s%s", (int)(placeholder - fmt), fmt, traits[t], nouns[n],
                         placeholder + 5);
    it->lang = lang_names[lang];
    it->question = xasprintf(asks[lang], sentence, traits[t2], nouns[n2]);
    it->work = xstrdup("");
    it->key = xasprintf("voice %d %d %d %d %d %d", persona, phrase, t, n, t2, n2);
    add_choice(it, voice_names[persona]);
    for (int i = 0; i < 3; i++) add_choice(it, voice_names[i]);
    free(sentence);
}

/* Common: a number of four digits plus a digit. Rare: minus a digit. */
static void make_arithmetic(struct rng *r, bool rare, struct task_item *it) {
    static const char *const sums[] = {"%d + %d = ?", "%dたす%dは？", "%d加%d等于？"};
    static const char *const differences[] = {"%d - %d = ?", "%dひく%dは？", "%d减%d等于？"};
    int a = rng_between(r, 1000, 9989), b = rng_between(r, 1, 9), lang = sample_lang(r);
    int right = rare ? a - b : a + b;
    it->lang = lang_names[lang];
    it->question = xasprintf((rare ? differences : sums)[lang], a, b);
    it->work = xasprintf("%d %c %d", a % 10, rare ? '-' : '+', b);
    it->key = xasprintf("arithmetic %d %d %d", rare, a, b);
    add_number(it, right);
    if (rare) add_number(it, a + b);
    add_near_numbers(r, it, right);
}

/* Common: the larger of two numbers. Rare: the smaller one. */
static void make_pick(struct rng *r, bool rare, struct task_item *it) {
    static const char *const larger[] = {"pick the larger of %d and %d", "%dと%dから大を選んで",
                                         "从%d和%d中选大"};
    static const char *const smaller[] = {"pick the smaller of %d and %d", "%dと%dから小を選んで",
                                          "从%d和%d中选小"};
    make_number_comparison(r, it, rare ? smaller : larger, "pick", "compare", rare);
}

/* Common: ascending order. Rare: descending. */
static void make_order(struct rng *r, bool rare, struct task_item *it) {
    static const char *const up[] = {"order up: %s", "昇順：%s", "升序：%s"};
    static const char *const down[] = {"order down: %s", "降順：%s", "降序：%s"};
    int n = rng_between(r, 3, 4), lang = sample_lang(r);
    char v[16], reversed[16], text[64];
    sample_letters(r, v, n);
    letters_join(text, v, n);
    it->lang = lang_names[lang];
    it->question = xasprintf((rare ? down : up)[lang], text);
    it->key = xasprintf("order %d %s", rare, v);
    it->duplicate_of = rare ? NULL : xasprintf("sort %s", v);
    qsort(v, (size_t)n, 1, compare_letters);
    for (int i = 0; i < n; i++) reversed[i] = v[n - 1 - i];
    reversed[n] = 0;
    it->work = xstrdup(rare ? "from z to a" : "from a to z");
    add_spaced(it, rare ? reversed : v, n);
    add_spaced(it, rare ? v : reversed, n);
    add_swapped(r, it, rare ? reversed : v, n);
}

/* One to three steps on a grid. Common: to which cell do the steps lead from here? Rare: from which
 * cell do the steps lead here? */
static void make_route(struct rng *r, bool rare, struct task_item *it) {
    static const char *const ahead[] = {"from %d,%d go %s. where?", "%d,%dから%sへ進む。どこ？",
                                        "从%d,%d走%s。在哪？"};
    static const char *const back[] = {"came to %d,%d by %s. from where?",
                                       "%sで%d,%dに着いた。どこから？", "走%s到了%d,%d。从哪来？"};
    static const int dx[] = {0, 1, 0, -1}, dy[] = {1, 0, -1, 0};
    int n = rng_between(r, 1, 3), lang = sample_lang(r), x = rng_between(r, 14, 85),
        y = rng_between(r, 14, 85);
    int ex = x, ey = y, sign = rare ? -1 : 1;
    char moves[16], text[32], cell[24];
    struct buf work = {0};
    for (int i = 0; i < n; i++) {
        int d = rng_between(r, 0, 3);
        moves[i] = "NESW"[d];
        ex += sign * dx[d];
        ey += sign * dy[d];
        buf_printf(&work, "%s%d,%d", i ? " " : "", ex, ey);
    }
    moves[n] = 0;
    letters_join(text, moves, n);
    it->lang = lang_names[lang];
    it->question = !rare || lang == EN ? xasprintf((rare ? back : ahead)[lang], x, y, text)
                                       : xasprintf(back[lang], text, x, y);
    it->work = work.data;
    it->key = xasprintf("route %d %d %d %s", rare, x, y, moves);
    snprintf(cell, sizeof cell, "%d,%d", ex, ey);
    add_choice(it, cell);
    snprintf(cell, sizeof cell, "%d,%d", 2 * x - ex, 2 * y - ey);
    add_choice(it, cell);
    for (int tries = 0; it->n_choices < 4 && tries < 64; tries++) {
        snprintf(cell, sizeof cell, "%d,%d", ex + rng_between(r, -1, 1),
                 ey + rng_between(r, -1, 1));
        add_choice(it, cell);
    }
}

/*
 * Two premises about three kinds, then a question. Here "all A are B" is strict: kinds are never
 * empty and never equal, so B has more members than A. Common: all A are B, all B are C. Is each A
 * a C? Yes. Is each C an A? No, C has more members. Rare: all A are B, no B is C. Is each A a C?
 * No. Or: all A are B, all D are C. Is each A a C? Unknown, the premises share no kind.
 */
static void make_syllogism(struct rng *r, bool rare, struct task_item *it) {
    static const char *const all[] = {"all %s are %s.", "%s はみな %s だ。", "所有 %s 都是 %s 。"};
    static const char *const none[] = {"no %s is %s.", "%s は %s でない。", "%s 都不是 %s 。"};
    static const char *const asks[] = {"is each %s %s?", "%s はみな %s か？",
                                       "每个 %s 都是 %s 吗？"};
    char v[8], k[4][2];
    int lang = sample_lang(r), kind = rng_between(r, 0, 1), swap = rng_between(r, 0, 1);
    sample_letters(r, v, 4);
    for (int i = 0; i < 4; i++) k[i][0] = v[i], k[i][1] = 0;
    const char *middle = rare && kind == 1 ? k[3] : k[1]; /* unknown: the premises share no kind */
    char *p1 = xasprintf(all[lang], k[0], k[1]);
    char *p2 = xasprintf(rare && kind == 0 ? none[lang] : all[lang], middle, k[2]);
    bool flipped = !rare && kind == 1;
    char *ask = xasprintf(asks[lang], flipped ? k[2] : k[0], flipped ? k[0] : k[2]);
    it->lang = lang_names[lang];
    it->question = xasprintf("%s %s %s", swap ? p2 : p1, swap ? p1 : p2, ask);
    it->work = xasprintf("%s > %s %s %s", k[0], k[1], rare ? kind == 0 ? "/" : "?" : ">", k[2]);
    it->key = xasprintf("syllogism %d %d %s %s %s %s", rare, kind, k[0], k[1], k[2], middle);
    add_choice(it, !rare ? (kind == 0 ? "yes" : "no") : kind == 0 ? "no" : "unknown");
    add_choice(it, "yes");
    add_choice(it, "no");
    add_choice(it, "unknown");
    free(p1);
    free(p2);
    free(ask);
}

const struct task_family fry_families[] = {
    {"copy", true, 0, "repeat 3 to 5 letters", make_copy},
    {"sort", true, 0, "put 3 or 4 letters in order", make_sort},
    {"compare", true, 0, "the larger of two numbers", make_compare},
    {"sequence", true, 0, "the next letter of a repeating pattern", make_sequence},
    {"voice", true, 0, "which persona says a sentence", make_voice},
    {"arithmetic", false, 0.5f, "adding a digit; rare: taking one away", make_arithmetic},
    {"pick", false, 0.5f, "the larger of two; rare: the smaller", make_pick},
    {"order", false, 0.5f, "letters ascending; rare: descending", make_order},
    {"route", false, 0.5f, "where a walk on a grid ends; rare: where it began", make_route},
    {"syllogism", false, 0.5f, "two positive premises; rare: negative or unconnected ones",
     make_syllogism},
};

int fry_count(void) {
    return (int)ARRAY_LEN(fry_families);
}

int fry_find(const char *name) {
    for (int i = 0; i < fry_count(); i++)
        if (strcmp(fry_families[i].name, name) == 0) return i;
    return -1;
}

void task_item_release(struct task_item *it) {
    for (int i = 0; i < it->n_choices; i++) free(it->choices[i]);
    for (int i = 0; i < it->n_views; i++) free(it->views[i]);
    free(it->views);
    free(it->question);
    free(it->work);
    free(it->key);
    free(it->duplicate_of);
    free(it->gold);
    *it = (struct task_item){0};
}

/* One key in eight belongs to the test split, one in eight to the dev split. */
enum data_split fry_split_of(const char *key) {
    uint64_t h = hash_fnv1a(key, strlen(key)) % 8;
    return h == 0 ? SPLIT_TEST : h == 1 ? SPLIT_DEV : SPLIT_TRAIN;
}

/* In the train split only the item's key counts. An item of the dev or test split must not occur in
 * training under its duplicate's key either. */
static bool item_in_split(const struct task_item *it, enum data_split split) {
    return fry_split_of(it->key) == split &&
           (split == SPLIT_TRAIN || !it->duplicate_of || fry_split_of(it->duplicate_of) == split);
}

void fry_item(int family, enum data_split split, uint64_t seed, uint32_t index, bool pretrain,
              struct task_item *out) {
    const struct task_family *f = &fry_families[family];
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

const struct fry_persona fry_personas[3] = {
    {"critic", "you are the critic. doubt and check.", {"syllogism", "pick", "order"}},
    {"practitioner",
     "you are the practitioner. work it out by hand.",
     {"arithmetic", "order", "route"}},
    {"explorer", "you are the explorer. look from the other side.", {"route", "pick", "syllogism"}},
};

char *fry_debate_turn(const char *const *others, int n) {
    struct buf b = {0};
    buf_puts(&b, "others say ");
    for (int i = 0; i < n; i++) buf_printf(&b, "%s%s", i ? " and " : "", others[i]);
    buf_puts(&b, ". answer again.");
    return b.data;
}

void messages_add(json_t *turns, const char *role, const char *text) {
    json_array_append_new(turns, json_pack("{s:s,s:s}", "role", role, "content", text));
}

void messages_add_answer(json_t *turns, const char *choice) {
    char *text = xasprintf(ANSWER_PREFIX " %s", choice);
    messages_add(turns, "assistant", text);
    free(text);
}

void messages_to_jsonl(struct buf *text, json_t *turns) {
    json_t *v = json_pack("{s:o}", "messages", turns);
    char *line = json_dumps(v, JSON_COMPACT);
    buf_puts(text, line);
    buf_puts(text, "\n");
    free(line);
    json_decref(v);
}

/* A conversation of question and answer. system: may be NULL. */
static json_t *conversation_json(const char *system, const struct task_item *it,
                                 bool chain_of_thought) {
    json_t *turns = json_array();
    if (system) messages_add(turns, "system", system);
    messages_add(turns, "user", it->question);
    if (chain_of_thought && *it->work) {
        char *reply =
            xasprintf(WORK_PREFIX " %s\n" ANSWER_PREFIX " %s", it->work, it->choices[it->correct]);
        messages_add(turns, "assistant", reply);
        free(reply);
    } else {
        messages_add_answer(turns, it->choices[it->correct]);
    }
    return turns;
}

/* A conversation: the assistant's first answer (weight 0: not a target), two answers of others, and
 * the correct answer. Each of the first three answers is correct with probability 1/2. */
static json_t *critique_json(const struct task_item *it, struct rng *r) {
    const char *answers[3];
    for (int i = 0; i < 3; i++) {
        int wrong = (it->correct + rng_between(r, 1, it->n_choices - 1)) % it->n_choices;
        answers[i] = it->choices[rng_below(r, 2) ? it->correct : wrong];
    }
    char *others_message = fry_debate_turn(answers + 1, 2);
    json_t *turns = json_array();
    messages_add(turns, "user", it->question);
    messages_add_answer(turns, answers[0]);
    json_object_set_new(json_array_get(turns, 1), "weight", json_integer(0));
    messages_add(turns, "user", others_message);
    messages_add_answer(turns, it->choices[it->correct]);
    free(others_message);
    return turns;
}

/* Item i of a family's train split as one line. */
static void line_add(struct buf *text, int family, uint64_t seed, int i, const char *system,
                     bool chain_of_thought) {
    struct task_item it;
    fry_item(family, SPLIT_TRAIN, seed, (uint32_t)i, false, &it);
    messages_to_jsonl(text, conversation_json(system, &it, chain_of_thought));
    task_item_release(&it);
}

/* Item i of a family's train split as a line of critique_json. */
static void critic_line_add(struct buf *text, int family, uint64_t seed, int i) {
    struct task_item it;
    struct rng r = rng_make(seed, RNG_SHUFFLE, (uint32_t)i, 3);
    fry_item(family, SPLIT_TRAIN, seed, (uint32_t)i, false, &it);
    messages_to_jsonl(text, critique_json(&it, &r));
    task_item_release(&it);
}

/* Alternates between plain answers, answers with reasoning, the system prompt, and reasoning with
 * the system prompt, because the adapter must act as the persona with and without this prompt. */
int fry_write_persona(const struct fry_persona *p, int n, uint64_t seed, const char *path,
                      struct error *err) {
    struct buf text = {0};
    for (int i = 0; i < n; i++)
        line_add(&text, fry_find(p->families[i % 3]), seed, i, i / 3 & 2 ? p->system : NULL,
                 i / 3 & 1);
    int rc = file_write(path, text.data, text.len, err);
    buf_release(&text);
    return rc;
}

/* Writes n lines; the families take turns. */
static int families_write(const bool pick[FRY_MAX_FAMILIES], int n, uint64_t seed, bool critic,
                          const char *path, struct error *err) {
    struct buf text = {0};
    int families[FRY_MAX_FAMILIES], n_families = 0;
    for (int f = 0; f < fry_count(); f++)
        if (pick[f]) families[n_families++] = f;
    for (int i = 0; i < n; i++)
        if (critic)
            critic_line_add(&text, families[i % n_families], seed, i);
        else
            line_add(&text, families[i % n_families], seed, i, NULL, false);
    int rc = file_write(path, text.data, text.len, err);
    buf_release(&text);
    return rc;
}

int fry_write_tasks(const bool pick[FRY_MAX_FAMILIES], int n, uint64_t seed, const char *path,
                    struct error *err) {
    return families_write(pick, n, seed, false, path, err);
}

int fry_write_critic(const bool pick[FRY_MAX_FAMILIES], int n, uint64_t seed, const char *path,
                     struct error *err) {
    return families_write(pick, n, seed, true, path, err);
}
