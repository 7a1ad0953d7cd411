/*
 * wordings: how a user may ask for a memory, for each attribute and language.
 *
 * A question is a prefix and a wording. Wordings and prefixes of training are combined with each
 * other; a question for measuring never occurs in training. It shares words with those of its
 * attribute, as a paraphrase does.
 */
#include "sleep/internal.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

struct wordings {
    const char *attribute;
    const char *train[SLEEP_TRAINED], *held_out[SLEEP_HELD_OUT];
};

static const struct wordings english[] = {
    {"name",
     {"what is my name?", "what am I called?", "tell me my name.", "which name do I have?"},
     {"do you know my name?", "what name am I called by?"}},
    {"age",
     {"how old am I?", "what is my age?", "how many years old am I?", "tell me my age."},
     {"do you know my age?", "how old am I this year?"}},
    {"birthday",
     {"when is my birthday?", "what is my date of birth?", "which day is my birthday?",
      "when was I born?"},
     {"do you know my birthday?", "what date was I born on?"}},
    {"residence",
     {"where do I live?", "which place do I live in?", "where is my home?",
      "what is my place of residence?"},
     {"do you know where I live?", "which place is my home in?"}},
    {"origin",
     {"where do I come from?", "what is my hometown?", "where did I grow up?",
      "which place do I come from?"},
     {"do you know my hometown?", "from where do I come?"}},
    {"occupation",
     {"what is my job?", "what do I work as?", "what is my profession?",
      "what do I do for a living?"},
     {"do you know my job?", "which profession do I work in?"}},
    {"employer",
     {"who is my employer?", "which company do I work for?", "what is the name of my company?",
      "who employs me?"},
     {"do you know my employer?", "for which company do I work?"}},
    {"school",
     {"which school do I go to?", "where do I study?", "what is my school?",
      "what school do I study at?"},
     {"do you know my school?", "what school do I go to?"}},
    {"family",
     {"which people are in my family?", "what do you know about my family?",
      "who are my relatives?", "tell me about my family."},
     {"do you know my family?", "which relatives are in my family?"}},
    {"pet",
     {"which pet do I have?", "what pets do I have?", "tell me about my pet.",
      "which animal lives with me?"},
     {"do you know my pet?", "what animal is my pet?"}},
    {"likes",
     {"what do I like?", "which things do I like?", "what do I love?", "tell me what I like."},
     {"do you know what I like?", "which things do I love?"}},
    {"dislikes",
     {"what do I dislike?", "what do I hate?", "which things do I dislike?",
      "tell me what I hate."},
     {"do you know what I dislike?", "which things do I hate?"}},
    {"allergy",
     {"what am I allergic to?", "which allergy do I have?", "what are my allergies?",
      "tell me my allergy."},
     {"do you know my allergies?", "to what am I allergic?"}},
    {"diet",
     {"what is my diet?", "which diet do I follow?", "how do I eat?",
      "what is special about my diet?"},
     {"do you know my diet?", "what diet do I eat by?"}},
    {"health",
     {"which illness do I have?", "what is my health condition?", "how is my health?",
      "which medical condition do I have?"},
     {"do you know my health condition?", "what illness do I have?"}},
    {"language",
     {"which language do I speak?", "what languages do I speak?", "which languages can I speak?",
      "tell me my languages."},
     {"do you know which languages I speak?", "what language can I speak?"}},
    {"skill",
     {"what am I good at?", "which skill do I have?", "what are my skills?",
      "tell me what I am able to do."},
     {"do you know my skills?", "at what am I good?"}},
    {"hobby",
     {"what is my hobby?", "which hobbies do I have?", "what do I do in my free time?",
      "tell me my hobby."},
     {"do you know my hobbies?", "which hobby is for my free time?"}},
    {"owns",
     {"what do I own?", "which things do I own?", "what belongs to me?", "tell me what I possess."},
     {"do you know what I own?", "which things belong to me?"}},
    {"goal",
     {"what is my goal?", "which goal do I have?", "what is my plan for the future?",
      "what do I want to reach?"},
     {"do you know my goal?", "which goal do I want to reach?"}},
    {"habit",
     {"what is my habit?", "which habits do I have?", "what do I usually do?",
      "tell me my routine."},
     {"do you know my habits?", "what routine do I usually have?"}},
    {"note",
     {"what did I ask you to remember?", "what should you remember?", "what is my reminder?",
      "which note did I leave?"},
     {"do you know what you should remember?", "what note did I ask you to remember?"}},
    {NULL, {NULL}, {NULL}},
};

static const struct wordings japanese[] = {
    {"name",
     {"私の名前は何ですか?", "私は何という名前ですか?", "私の名前を教えて。", "名前は?"},
     {"私の名前を知っていますか?", "私の名前は何でしたか?"}},
    {"age",
     {"私は何歳ですか?", "私の年齢は?", "私の年齢を教えて。", "私はいくつですか?"},
     {"私の年齢を知っていますか?", "私は今何歳でしたか?"}},
    {"birthday",
     {"私の誕生日はいつですか?", "私はいつ生まれましたか?", "私の誕生日を教えて。", "誕生日は?"},
     {"私の誕生日を知っていますか?", "私の誕生日はいつでしたか?"}},
    {"residence",
     {"私はどこに住んでいますか?", "私の住まいはどこですか?", "私が住んでいる所は?",
      "住んでいる場所を教えて。"},
     {"私がどこに住んでいるか知っていますか?", "私の住んでいる所はどこでしたか?"}},
    {"origin",
     {"私の出身はどこですか?", "私はどこの出身ですか?", "私の出身地は?", "地元はどこですか?"},
     {"私の出身を知っていますか?", "私の出身地はどこでしたか?"}},
    {"occupation",
     {"私の仕事は何ですか?", "私の職業は?", "私は何の仕事をしていますか?", "職業を教えて。"},
     {"私の仕事を知っていますか?", "私の職業は何でしたか?"}},
    {"employer",
     {"私の勤め先はどこですか?", "私はどこの会社に勤めていますか?", "私の会社は?",
      "勤務先を教えて。"},
     {"私の勤め先を知っていますか?", "私の会社はどこでしたか?"}},
    {"school",
     {"私の学校はどこですか?", "私はどの学校に通っていますか?", "私が通う学校は?",
      "学校を教えて。"},
     {"私の学校を知っていますか?", "私の通う学校はどこでしたか?"}},
    {"family",
     {"私の家族は?", "家族には誰がいますか?", "私の家族を教えて。", "私の家族は誰ですか?"},
     {"私の家族を知っていますか?", "家族には誰がいましたか?"}},
    {"pet",
     {"私のペットは何ですか?", "私は何を飼っていますか?", "私のペットを教えて。", "ペットは?"},
     {"私のペットを知っていますか?", "私のペットは何でしたか?"}},
    {"likes",
     {"私は何が好きですか?", "私の好きなものは何ですか?", "私が好きなものを教えて。",
      "好きなものは?"},
     {"私の好きなものを知っていますか?", "私は何が好きでしたか?"}},
    {"dislikes",
     {"私は何が嫌いですか?", "私の嫌いなものは何ですか?", "私が苦手なものを教えて。",
      "嫌いなものは?"},
     {"私の嫌いなものを知っていますか?", "私は何が嫌いでしたか?"}},
    {"allergy",
     {"私のアレルギーは何ですか?", "私は何のアレルギーがありますか?", "私のアレルギーを教えて。",
      "アレルギーは?"},
     {"私のアレルギーを知っていますか?", "私のアレルギーは何でしたか?"}},
    {"diet",
     {"私の食事は何ですか?", "私の食事の決まりは?", "私の食事を教えて。",
      "私はどんな食事をしますか?"},
     {"私の食事の決まりを知っていますか?", "私の食事は何でしたか?"}},
    {"health",
     {"私の病気は何ですか?", "私の持病は?", "私の健康の状態を教えて。",
      "私はどんな病気がありますか?"},
     {"私の病気を知っていますか?", "私の持病は何でしたか?"}},
    {"language",
     {"私は何語を話しますか?", "私が話せる言語は?", "私の話せる言葉を教えて。",
      "私はどの言語を話せますか?"},
     {"私の話せる言語を知っていますか?", "私は何語を話せますか?"}},
    {"skill",
     {"私の特技は何ですか?", "私は何が得意ですか?", "私の特技を教えて。", "特技は?"},
     {"私の特技を知っていますか?", "私の特技は何でしたか?"}},
    {"hobby",
     {"私の趣味は何ですか?", "私はどんな趣味がありますか?", "私の趣味を教えて。", "趣味は?"},
     {"私の趣味を知っていますか?", "私の趣味は何でしたか?"}},
    {"owns",
     {"私は何を持っていますか?", "私の持ち物は何ですか?", "私の持ち物を教えて。", "持ち物は?"},
     {"私の持ち物を知っていますか?", "私は何を持っていましたか?"}},
    {"goal",
     {"私の目標は何ですか?", "私の夢は?", "私の目標を教えて。", "私はどんな目標がありますか?"},
     {"私の目標を知っていますか?", "私の目標は何でしたか?"}},
    {"habit",
     {"私の習慣は何ですか?", "私の日課は?", "私の習慣を教えて。", "私はどんな習慣がありますか?"},
     {"私の習慣を知っていますか?", "私の日課は何でしたか?"}},
    {"note",
     {"私は何を覚えてと言いましたか?", "覚えておくことは何ですか?", "私のメモを教えて。",
      "何を覚えておきますか?"},
     {"覚えておくことを知っていますか?", "私のメモは何でしたか?"}},
    {NULL, {NULL}, {NULL}},
};

static const struct wordings chinese[] = {
    {"name",
     {"我叫什么名字?", "我的名字是什么?", "告诉我我的名字。", "我的姓名是什么?"},
     {"你知道我的名字吗?", "我的名字叫什么?"}},
    {"age",
     {"我多大了?", "我今年几岁?", "我的年龄是多少?", "告诉我我的年龄。"},
     {"你知道我的年龄吗?", "我现在几岁了?"}},
    {"birthday",
     {"我的生日是什么时候?", "我的生日是哪天?", "我是什么时候出生的?", "告诉我我的生日。"},
     {"你知道我的生日吗?", "我是哪天出生的?"}},
    {"residence",
     {"我住在哪里?", "我的住址在哪里?", "我住在什么地方?", "告诉我我住的地方。"},
     {"你知道我住在哪里吗?", "我住的地方在哪里?"}},
    {"origin",
     {"我的老家在哪里?", "我是哪里人?", "我来自哪里?", "我的家乡是哪里?"},
     {"你知道我的老家吗?", "我的家乡在哪里?"}},
    {"occupation",
     {"我的职业是什么?", "我做什么工作?", "我的工作是什么?", "告诉我我的职业。"},
     {"你知道我的职业吗?", "我做的工作是什么?"}},
    {"employer",
     {"我在哪家公司上班?", "我的公司是哪家?", "我的单位是哪里?", "告诉我我的公司。"},
     {"你知道我的公司吗?", "我上班的公司是哪家?"}},
    {"school",
     {"我在哪所学校上学?", "我的学校是哪所?", "我在哪里读书?", "告诉我我的学校。"},
     {"你知道我的学校吗?", "我上学的学校是哪所?"}},
    {"family",
     {"我家里有谁?", "我的家人是谁?", "我有哪些家人?", "告诉我我的家人。"},
     {"你知道我的家人吗?", "我的家人有哪些?"}},
    {"pet",
     {"我的宠物是什么?", "我养了什么宠物?", "我养了什么动物?", "告诉我我的宠物。"},
     {"你知道我的宠物吗?", "我养的宠物是什么?"}},
    {"likes",
     {"我喜欢什么?", "我喜欢的东西是什么?", "我喜欢哪些东西?", "告诉我我喜欢什么。"},
     {"你知道我喜欢什么吗?", "我喜欢的是什么?"}},
    {"dislikes",
     {"我讨厌什么?", "我不喜欢什么?", "我讨厌的东西是什么?", "告诉我我讨厌什么。"},
     {"你知道我讨厌什么吗?", "我讨厌的是什么?"}},
    {"allergy",
     {"我对什么过敏?", "我过敏的东西是什么?", "我有什么过敏?", "告诉我我对什么过敏。"},
     {"你知道我对什么过敏吗?", "我过敏的是什么?"}},
    {"diet",
     {"我的饮食是什么?", "我的饮食习惯是什么?", "我吃东西有什么要求?", "告诉我我的饮食。"},
     {"你知道我的饮食吗?", "我的饮食要求是什么?"}},
    {"health",
     {"我有什么病?", "我的健康状况怎么样?", "我得了什么疾病?", "告诉我我的病。"},
     {"你知道我的病吗?", "我有什么疾病?"}},
    {"language",
     {"我会说什么语言?", "我会哪些语言?", "我说哪种语言?", "告诉我我的语言。"},
     {"你知道我会说什么语言吗?", "我会说的语言是什么?"}},
    {"skill",
     {"我擅长什么?", "我的特长是什么?", "我有什么特长?", "告诉我我的特长。"},
     {"你知道我的特长吗?", "我擅长的是什么?"}},
    {"hobby",
     {"我的爱好是什么?", "我有什么爱好?", "我的兴趣是什么?", "告诉我我的爱好。"},
     {"你知道我的爱好吗?", "我的兴趣爱好是什么?"}},
    {"owns",
     {"我拥有什么?", "我有什么东西?", "我的东西有哪些?", "告诉我我拥有什么。"},
     {"你知道我拥有什么吗?", "我拥有的东西是什么?"}},
    {"goal",
     {"我的目标是什么?", "我有什么目标?", "我的梦想是什么?", "告诉我我的目标。"},
     {"你知道我的目标吗?", "我的梦想目标是什么?"}},
    {"habit",
     {"我的习惯是什么?", "我有什么习惯?", "我平时的习惯是什么?", "告诉我我的习惯。"},
     {"你知道我的习惯吗?", "我平时有什么习惯?"}},
    {"note",
     {"我让你记住什么?", "你要记住什么?", "我的备忘是什么?", "告诉我我让你记住的事。"},
     {"你知道要记住什么吗?", "我让你记住的是什么?"}},
    {NULL, {NULL}, {NULL}},
};

static const struct language_wordings {
    const struct wordings *table;
    const char *separator;                /* between the values of an answer */
    const char *prefixes[SLEEP_PREFIXES]; /* for training */
    const char *held_out[SLEEP_HELD_OUT]; /* for measuring */
} languages[N_LANGUAGES] = {
    [LANG_EN] = {english,
                 ", ",
                 {"", "please tell me: ", "hey, ", "one question: "},
                 {"", "by the way, "}},
    [LANG_JA] = {japanese,
                 "、",
                 {"", "教えてください。", "ねえ、", "質問です。"},
                 {"", "ところで、"}},
    [LANG_ZH] = {chinese, "、", {"", "请告诉我：", "嘿，", "请问，"}, {"", "对了，"}},
};

static const struct wordings *wordings_find(enum language l, const char *attribute) {
    const struct wordings *w = languages[l].table;
    while (w->attribute && strcmp(w->attribute, attribute) != 0) w++;
    return w->attribute ? w : NULL;
}

bool sleep_has_wordings(const char *attribute) {
    return wordings_find(LANG_EN, attribute) != NULL;
}

/* A prefix and a wording, which begins with a capital letter if nothing precedes it. */
static char *question_make(const char *prefix, const char *wording) {
    char *text = xasprintf("%s%s", prefix, wording);
    if (text[0] > 0) text[0] = (char)toupper((unsigned char)text[0]);
    return text;
}

char *sleep_trained_question(enum language l, const char *attribute, int i) {
    return question_make(languages[l].prefixes[i / SLEEP_TRAINED],
                         wordings_find(l, attribute)->train[i % SLEEP_TRAINED]);
}

char *sleep_held_out_question(enum language l, const char *attribute, int i) {
    return question_make(languages[l].held_out[i], wordings_find(l, attribute)->held_out[i]);
}

const char *sleep_separator(enum language l) {
    return languages[l].separator;
}
