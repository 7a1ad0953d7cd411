/*
 * dialogue: facts in a conversation of several turns. The user states facts about people, one a
 * turn, and the assistant confirms each in other words. Common: the user asks for a fact; or
 * corrects a fact before asking for it or for another; or wants a sentence in other words. Rare: a
 * correction is undone, so the first value counts, or followed by a second one, which counts.
 *
 * All choices are one sentence with different values, so no choice can be excluded by its form. The
 * people who are friends of others have no facts of their own. The key holds facts, corrections and
 * the question; wordings and the order of the words are not in it.
 */
#define _GNU_SOURCE
#include "families/internal.h"

#include <stdlib.h>

enum { TOWN, AGE, FRIEND, FAVOURITE, ATTRIBUTES };
enum { WORDINGS = 3, MAX_FACTS = 4, SUBJECTS = 3, FRIENDS = FAMILY_WORDS - SUBJECTS };
enum talk_kind { ASK, CORRECT, REPHRASE, CORRECT_TWICE, UNDO };

struct fact {
    int person, attribute, value; /* indices; value: of `values` */
};

struct talk {
    enum talk_kind kind;
    int lang, n;
    struct fact facts[MAX_FACTS];
    int asked;           /* the fact that the last message is about */
    int corrected, when; /* fact `corrected` is corrected after fact `when` */
    int corrections[2], n_corrections;
    int people[FAMILY_WORDS]; /* the first SUBJECTS have facts, the others are friends */
    int values[ATTRIBUTES][FAMILY_WORDS]; /* the first n_used ones occur in the talk */
    int n_used[ATTRIBUTES];
    json_t *messages;
};

static const char *const things[3][FAMILY_WORDS] = {
    {"tea", "jazz", "chess", "bread", "rain", "soup", "milk", "snow"},
    {"お茶", "ジャズ", "将棋", "パン", "雨", "スープ", "牛乳", "雪"},
    {"茶", "爵士乐", "象棋", "面包", "下雨天", "汤", "牛奶", "雪"}};

static const char *const sentences[3][ATTRIBUTES][WORDINGS] = {
    {{"%s lives in %s.", "the home of %s is in %s.", "%s is at home in %s."},
     {"%s is %s years old.", "the age of %s is %s.", "%s turned %s this year."},
     {"the best friend of %s is %s.", "%s has a best friend called %s.", "%s's best friend is %s."},
     {"%s likes %s best.", "the favourite thing of %s is %s.", "%s loves %s most of all."}},
    {{"%sは%sに住んでいます。", "%sの家は%sにあります。", "%sの住む町は%sです。"},
     {"%sは%s歳です。", "%sの年齢は%s歳です。", "%sは今年で%s歳です。"},
     {"%sの親友は%sです。", "%sには親友の%sがいます。", "%sと一番親しいのは%sです。"},
     {"%sは%sが一番好きです。", "%sの一番好きなものは%sです。", "%sが何より好きなのは%sです。"}},
    {{"%s住在%s。", "%s的家在%s。", "%s在%s生活。"},
     {"%s今年%s岁。", "%s的年龄是%s岁。", "%s已经%s岁了。"},
     {"%s最好的朋友是%s。", "%s有个最好的朋友叫%s。", "和%s最要好的是%s。"},
     {"%s最喜欢%s。", "%s的最爱是%s。", "%s最喜欢的是%s。"}}};

static const char *const asks[3][ATTRIBUTES][2] = {
    {{"where does %s live?", "where is the home of %s?"},
     {"how old is %s?", "what is the age of %s?"},
     {"who is the best friend of %s?", "who is %s's best friend?"},
     {"what does %s like best?", "what is the favourite thing of %s?"}},
    {{"%sはどこに住んでいますか？", "%sの家はどこですか？"},
     {"%sは何歳ですか？", "%sの年齢は？"},
     {"%sの親友は誰ですか？", "%sと一番親しいのは誰ですか？"},
     {"%sは何が一番好きですか？", "%sの一番好きなものは何ですか？"}},
    {{"%s住在哪里？", "%s的家在哪里？"},
     {"%s今年多大？", "%s的年龄是多少？"},
     {"%s最好的朋友是谁？", "谁是%s最好的朋友？"},
     {"%s最喜欢什么？", "%s的最爱是什么？"}}};

/* what precedes a sentence, or stands alone: [language][wording] */
enum head { CONFIRM, CORRECTION, OTHER_WORDS, UNDO_REQUEST, UNDO_REPLY, HEADS };
static const char *const heads[HEADS][3][3] = {
    [CONFIRM] = {{"ok, ", "i see: ", "noted: "},
                 {"はい、", "なるほど、", "了解です。"},
                 {"好的，", "明白了，", "知道了，"}},
    [CORRECTION] = {{"no, ", "actually, ", "sorry, i was wrong: "},
                    {"いいえ、", "間違えました。", "訂正します。"},
                    {"不对，", "我说错了，", "更正一下，"}},
    [OTHER_WORDS] = {{"say that differently: ", "say it in other words: ",
                      "find other words for this: "},
                     {"別の言い方で：", "言い換えてください：", "同じ意味の文は？ "},
                     {"换个说法：", "用别的话说：", "哪句话意思相同？"}},
    [UNDO_REQUEST] = {{"forget the correction.", "the first one was right.",
                       "undo the correction."},
                      {"訂正を取り消します。", "やっぱり最初のが正しいです。",
                       "訂正は忘れてください。"},
                      {"取消更正。", "还是第一次说的对。", "忘掉刚才的更正吧。"}},
    [UNDO_REPLY] = {{"ok, the first one counts.", "i see: the correction is undone.",
                     "noted: back to the first one."},
                    {"分かりました、最初のに戻します。", "はい、訂正を取り消しました。",
                     "了解です。訂正はなしですね。"},
                    {"好的，以第一次为准。", "明白了，更正已取消。", "知道了，恢复原来的。"}},
};

static char *sentence_make(const struct talk *t, struct fact f, int wording) {
    static const char *const(*const words[])[FAMILY_WORDS] = {
        [TOWN] = family_towns, [FRIEND] = family_people, [FAVOURITE] = things};
    char age[12];
    snprintf(age, sizeof age, "%d", f.value);
    return xasprintf(sentences[t->lang][f.attribute][wording], family_people[t->lang][f.person],
                     f.attribute == AGE ? age : words[f.attribute][t->lang][f.value]);
}

/* sampling */

static void shuffled(struct rng *r, int *v) {
    uint32_t order[FAMILY_WORDS];
    for (uint32_t i = 0; i < FAMILY_WORDS; i++) order[i] = i;
    rng_shuffle(r, order, FAMILY_WORDS);
    for (int i = 0; i < FAMILY_WORDS; i++) v[i] = (int)order[i];
}

/* The values of an attribute are different, so each occurs once in a talk. */
static void values_sample(struct rng *r, struct talk *t) {
    shuffled(r, t->people);
    for (int a = 0; a < ATTRIBUTES; a++) shuffled(r, t->values[a]);
    for (int i = 0; i < FAMILY_WORDS; i++)
        t->values[AGE][i] = 20 + 8 * t->values[AGE][i] + rng_between(r, 0, 7);
    for (int i = 0; i < FRIENDS; i++) t->values[FRIEND][i] = t->people[SUBJECTS + i];
}

static int value_next(struct talk *t, int attribute) {
    return t->values[attribute][t->n_used[attribute]++];
}

static bool has_fact(const struct talk *t, int person, int attribute) {
    for (int i = 0; i < t->n; i++)
        if (t->facts[i].person == person && t->facts[i].attribute == attribute) return true;
    return false;
}

/* Adds `n` facts. The first two are about the same attribute of different people. */
static void facts_sample(struct rng *r, struct talk *t, int n) {
    int first = rng_between(r, 0, ATTRIBUTES - 1);
    while (t->n < n) {
        int i = t->n, a = i < 2 ? first : rng_between(r, 0, ATTRIBUTES - 1);
        int person = t->people[i < 2 ? i : rng_between(r, 0, SUBJECTS - 1)];
        if (!has_fact(t, person, a)) t->facts[t->n++] = (struct fact){person, a, value_next(t, a)};
    }
}

/* Half of the corrections in pretraining are of the fact that is asked for. */
static void corrections_sample(struct rng *r, struct talk *t) {
    static const int counts[] = {[CORRECT] = 1, [CORRECT_TWICE] = 2, [UNDO] = 1, [REPHRASE] = 0};
    t->n_corrections = counts[t->kind];
    t->corrected = t->asked;
    if (t->kind == CORRECT && rng_below(r, 2))
        t->corrected = (t->asked + rng_between(r, 1, t->n - 1)) % t->n;
    t->when = t->n_corrections ? rng_between(r, t->corrected, t->n - 1) : t->n - 1;
    for (int i = 0; i < t->n_corrections; i++)
        t->corrections[i] = value_next(t, t->facts[t->corrected].attribute);
}

/* The asked fact, which is one of the first two, gets a random place; a fact to rephrase, which is
 * not stated before, the last one. */
static void facts_shuffle(struct rng *r, struct talk *t) {
    int last = t->n - 1;
    uint32_t order[MAX_FACTS] = {0, 1, 2, 3};
    struct fact facts[MAX_FACTS];
    for (int i = 0; i < t->n; i++) facts[i] = t->facts[i];
    rng_shuffle(r, order, (size_t)t->n);
    for (int i = 0; i < t->n; i++) {
        t->facts[i] = facts[order[i]];
        if (order[i] == 0) t->asked = i;
    }
    if (t->kind != REPHRASE) return;
    t->facts[t->asked] = t->facts[last];
    t->facts[last] = facts[0];
    t->asked = last;
}

static void talk_sample(struct rng *r, bool rare, struct talk *t) {
    static const enum talk_kind common[] = {ASK, ASK, CORRECT, CORRECT, REPHRASE};
    /* a correction takes the place of a fact, which bounds the length */
    static const int
        least[] = {[ASK] = 2, [CORRECT] = 2, [REPHRASE] = 1, [CORRECT_TWICE] = 2, [UNDO] = 2},
        most[] = {[ASK] = 4, [CORRECT] = 3, [REPHRASE] = 3, [CORRECT_TWICE] = 2, [UNDO] = 3};
    *t = (struct talk){.lang = item_language(r)};
    t->kind = rare ? CORRECT_TWICE + rng_below(r, 2) : common[rng_below(r, ARRAY_LEN(common))];
    values_sample(r, t);
    facts_sample(r, t, rng_between(r, least[t->kind], most[t->kind]));
    facts_shuffle(r, t);
    corrections_sample(r, t);
}

/* The value of fact i at the end of the talk. */
static struct fact fact_at_end(const struct talk *t, int i) {
    struct fact f = t->facts[i];
    if (i == t->corrected && t->n_corrections && t->kind != UNDO)
        f.value = t->corrections[t->n_corrections - 1];
    return f;
}

static char *key_make(const struct talk *t) {
    struct buf key = {0};
    buf_printf(&key, "dialogue %d %d %d %d:", t->kind, t->asked, t->corrected, t->when);
    for (int i = 0; i < t->n; i++)
        buf_printf(&key, " %d,%d,%d", t->facts[i].person, t->facts[i].attribute, t->facts[i].value);
    for (int i = 0; i < t->n_corrections; i++) buf_printf(&key, " %d", t->corrections[i]);
    return key.data;
}

/* the text */

static const char *head_sample(struct rng *r, const struct talk *t, enum head head) {
    return heads[head][t->lang][rng_below(r, 3)];
}

static void message_add(struct talk *t, const char *role, const char *head, const char *sentence) {
    char *text = xasprintf("%s%s", head, sentence);
    messages_add(t->messages, role, text);
    free(text);
}

/* The user's statement after `head`, and the assistant's in other words. */
static void fact_add(struct rng *r, struct talk *t, struct fact f, const char *head) {
    int wording = rng_between(r, 0, WORDINGS - 1);
    char *said = sentence_make(t, f, wording);
    char *confirmed = sentence_make(t, f, (wording + rng_between(r, 1, WORDINGS - 1)) % WORDINGS);
    message_add(t, "user", head, said);
    message_add(t, "assistant", head_sample(r, t, CONFIRM), confirmed);
    free(said);
    free(confirmed);
}

static void corrections_add(struct rng *r, struct talk *t) {
    struct fact f = t->facts[t->corrected];
    for (int i = 0; i < t->n_corrections; i++) {
        f.value = t->corrections[i];
        fact_add(r, t, f, head_sample(r, t, CORRECTION));
    }
    if (t->kind == UNDO) {
        message_add(t, "user", head_sample(r, t, UNDO_REQUEST), "");
        message_add(t, "assistant", head_sample(r, t, UNDO_REPLY), "");
    }
}

/* The last message. Returns the wording of the reply, which never repeats the message. */
static int question_add(struct rng *r, struct talk *t, struct task_item *it) {
    struct fact f = t->facts[t->asked];
    int wording = rng_between(r, 0, WORDINGS - 1);
    if (t->kind == REPHRASE) {
        char *sentence = sentence_make(t, f, wording);
        it->question = xasprintf("%s%s", head_sample(r, t, OTHER_WORDS), sentence);
        free(sentence);
    } else {
        it->question = xasprintf(asks[t->lang][f.attribute][rng_below(r, 2)],
                                 family_people[t->lang][f.person]);
    }
    messages_add(t->messages, "user", it->question);
    return (wording + rng_between(r, 1, WORDINGS - 1)) % WORDINGS;
}

/* The right sentence, then the same with values of the talk, from the last one on, then with
 * others. In one choice of a rephrased sentence the person is wrong, not the value. */
static void choices_add(const struct talk *t, int wording, struct task_item *it) {
    const struct fact right = fact_at_end(t, t->asked);
    int n = t->n_used[right.attribute];
    for (int i = -1; it->n_choices < 4; i++) {
        struct fact f = right;
        if (t->kind == REPHRASE && it->n_choices == 3)
            f.person = t->people[t->people[0] == f.person];
        else if (i >= 0)
            f.value = t->values[f.attribute][i < n ? n - 1 - i : i];
        char *text = sentence_make(t, f, wording);
        item_add_choice(it, text);
        free(text);
    }
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    struct talk t;
    talk_sample(r, rare, &t);
    t.messages = json_array();
    for (int i = 0; i < t.n; i++) {
        if (t.kind != REPHRASE || i != t.asked) fact_add(r, &t, t.facts[i], "");
        if (i == t.when) corrections_add(r, &t);
    }
    int wording = question_add(r, &t, it);
    it->chat = json_pack("{s:o}", "messages", t.messages);
    it->whole_replies = true;
    it->lang = family_languages[t.lang];
    it->work = xstrdup("");
    it->key = key_make(&t);
    choices_add(&t, wording, it);
}

/* An item has at most 172 tokens of a vocabulary of 3,072 that is trained on all families;
 * max_tokens leaves room for smaller vocabularies. */
const struct task_family dialogue_family = {
    .name = "dialogue",
    .rare_share = 0.5f,
    .description =
        "facts of a conversation, corrected or not; rare: undone or repeated corrections",
    .generate = generate,
    .conversations = true,
    .max_tokens = 512,
};
