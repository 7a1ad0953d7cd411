/*
 * roles: tables of roles, and of the keywords that determine a question's type.
 *
 * Names, temperatures and the order of the types are fixed for compatibility
 * (docs/COMPATIBILITY.md). The keywords of a type are one string, separated by '|'.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include <string.h>
#include <unicase.h>
#include <unictype.h>
#include <unistr.h>

const char *const question_type_names[N_QUESTION_TYPES] = {
    "discussion", "planning", "informational", "conversational", "default"};

int question_type_find(const char *name) {
    for (int i = 0; i < N_QUESTION_TYPES; i++)
        if (strcmp(question_type_names[i], name) == 0) return i;
    return -1;
}

/* `legacy`: Japanese and Latin keywords, the only ones with --compat legacy. `chinese`: additional
 * keywords without it. */
static const struct {
    const char *legacy, *chinese;
} keywords[QUESTION_DEFAULT] = {
    [QUESTION_DISCUSSION] =
        {"について議論|議論して|賛成|反対|問題|課題|影響|どう思う|どう考える|"
         "メリット|デメリット|比較|discuss|debate|argue|opinion|think|pros|cons",
         "讨论|辩论|赞成|反对|利弊|优缺点|看法|怎么看|影响|问题|比较"},
    [QUESTION_PLANNING] = {"どうすれば|どのように|方法|手順|計画|戦略|実現|達成|解決|改善|対策|案|"
                           "提案|how to|plan|strategy|solve|achieve|implement",
                           "如何|怎么做|怎样|步骤|计划|战略|策略|方案|实现|达成|解决|改善|改进"},
    [QUESTION_INFORMATIONAL] = {"とは|なに|何|定義|説明|詳細|仕組み|原因|理由|なぜ|歴史|背景|特徴|"
                                "what is|define|explain|why|how|cause|reason",
                                "是什么|什么是|什么|为什么|为何|定义|解释|说明|原因|历史|特点|多少|"
                                "介绍"},
    [QUESTION_CONVERSATIONAL] = {"こんにちは|はじめまして|おはよう|こんばんは|ありがとう|"
                                 "すみません|お疲れ|元気|hello|hi|good morning|thank you|sorry",
                                 "你好|您好|早上好|晚上好|谢谢|对不起|抱歉|再见|辛苦"},
};

static bool is_letter(const uint8_t *p, const uint8_t *end) {
    ucs4_t c;
    u8_mbtouc(&c, p, (size_t)(end - p));
    return c < 0x2E80 && uc_is_property_alphabetic(c);
}

/* Whether no letter is adjacent to text[at .. at + n). Characters from U+2E80 on, such as Japanese
 * particles, do not count as letters here. */
static bool is_whole_word(const char *text, size_t len, size_t at, size_t n) {
    const uint8_t *p = (const uint8_t *)text, *end = p + len, *prev = p + at;
    if (prev > p) {
        do prev--;
        while (prev > p && (*prev & 0xC0) == 0x80);
        if (is_letter(prev, end)) return false;
    }
    return at + n == len || !is_letter(p + at + n, end);
}

static bool contains_keyword(const char *text, size_t len, const char *word, size_t n,
                             bool compat) {
    bool latin = (uint8_t)word[0] < 0x80;
    for (const char *p = text; (p = memmem(p, len - (size_t)(p - text), word, n)); p++)
        if (compat || !latin || is_whole_word(text, len, (size_t)(p - text), n)) return true;
    return false;
}

static bool has_keyword(const char *text, size_t len, const char *words, bool compat) {
    for (size_t n; *words; words += n + (words[n] == '|')) {
        n = strcspn(words, "|");
        if (contains_keyword(text, len, words, n, compat)) return true;
    }
    return false;
}

/* Lower-cases each character separately, which suffices for the keywords. */
static void lowercase_add(const char *text, struct buf *out) {
    const uint8_t *p = (const uint8_t *)text, *end = p + strlen(text);
    while (p < end) {
        uint8_t bytes[6];
        ucs4_t c;
        p += u8_mbtouc(&c, p, (size_t)(end - p));
        int n = u8_uctomb(bytes, uc_tolower(c), sizeof bytes);
        buf_add(out, bytes, (size_t)MAX(n, 0));
    }
    buf_puts(out, "");
}

enum question_type question_classify(const char *question, bool compat) {
    struct buf text = {0};
    int t = 0;
    lowercase_add(question, &text);
    while (t < QUESTION_DEFAULT && !has_keyword(text.data, text.len, keywords[t].legacy, compat) &&
           (compat || !has_keyword(text.data, text.len, keywords[t].chinese, false)))
        t++;
    buf_release(&text);
    return (enum question_type)t;
}

/* A role: its temperature, then name and description in each language. */
struct role_row {
    float temperature;
    const char *text[N_LANGUAGES][2];
};

static const struct role_row discussion[] = {
    {0.7f,
     {{"多角的視点AI", "いろいろな立場から論点を見渡し、議論の全体像を描いてください。"},
      {"Many-sided View",
       "Look at the matter from several sides and show how the whole debate hangs together."},
      {"多角度视角", "请从多个角度梳理论点，说明整个讨论的全貌。"}}},
    {0.8f,
     {{"批判的思考AI", "前提や論理の弱いところを問い直し、見落とされた見方を出してください。"},
      {"Critical Thinking",
       "Question what is taken for granted and where the reasoning is weak. Offer a view that was "
       "missed."},
      {"批判性思维", "请质疑前提和推理中的薄弱之处，提出被忽略的看法。"}}},
    {0.6f,
     {{"実証主義AI", "事実とデータに基づいて述べ、確かめられることと推測を分けてください。"},
      {"Evidence",
       "Argue from facts and data. Keep what can be checked apart from what is guessed."},
      {"实证主义", "请依据事实和数据进行论述，区分可以验证的内容与推测。"}}},
    {0.7f,
     {{"倫理的視点AI", "誰にどんな影響があるか、何が正しいかという面から考えてください。"},
      {"Ethics", "Consider whom it affects and how, and what would be right to do."},
      {"伦理视角", "请从对谁有何影响、怎样才算正确的角度来思考。"}}},
};
static const struct role_row planning[] = {
    {0.7f,
     {{"実用主義AI", "今ある手段で実行できる、具体的なやり方を示してください。"},
      {"Pragmatism", "Propose concrete steps that can be taken with what is at hand."},
      {"实用主义", "请提出利用现有条件就能执行的具体做法。"}}},
    {0.9f,
     {{"創造的思考AI", "型にとらわれない新しい案を出し、その可能性を広げてください。"},
      {"Creative Thinking", "Bring up fresh, unusual ideas and say what they would make possible."},
      {"创造性思维", "请提出不拘一格的新想法，并说明其可能性。"}}},
    {0.7f,
     {{"戦略的視点AI", "目的から逆算し、長い目で見た順序と優先度を組み立ててください。"},
      {"Strategy",
       "Work back from the goal and set the order and the priorities for the long run."},
      {"战略视角", "请从目标倒推，安排长远来看的顺序和优先级。"}}},
    {0.6f,
     {{"リスク分析AI", "うまくいかない場合を挙げ、それぞれの備えを示してください。"},
      {"Risk Analysis", "Name what could go wrong, and for each of these how to be prepared."},
      {"风险分析", "请列举可能出现的问题，并给出相应的对策。"}}},
};
static const struct role_row informational[] = {
    {0.5f,
     {{"事実提供AI", "確かな事実だけを、短く正確に伝えてください。"},
      {"Facts", "State established facts only, briefly and exactly."},
      {"事实提供", "请只提供可靠的事实，简短而准确。"}}},
    {0.6f,
     {{"教育的視点AI", "初めての人にもわかるように、順を追って説明してください。"},
      {"Teaching", "Explain step by step, so that a beginner can follow."},
      {"教育视角", "请循序渐进地讲解，让初学者也能听懂。"}}},
    {0.7f,
     {{"比較分析AI", "似たものや別の選択肢と比べ、違いを公平に示してください。"},
      {"Comparison", "Compare it with its alternatives and show the differences fairly."},
      {"比较分析", "请与类似事物或其他选择进行比较，公正地指出差异。"}}},
};
static const struct role_row conversational[] = {
    {0.8f,
     {{"共感的リスナーAI", "相手の気持ちを受け止め、温かい言葉で応じてください。"},
      {"Empathic Listener", "Take in how the other person feels and answer with warmth."},
      {"共情倾听者", "请体会对方的心情，用温暖的话语回应。"}}},
    {0.7f,
     {{"実用アドバイザーAI", "日々の暮らしに役立つ助言を、気軽な言葉で伝えてください。"},
      {"Practical Adviser", "Give advice that helps in everyday life, in plain words."},
      {"实用顾问", "请用轻松的语言给出对日常生活有帮助的建议。"}}},
};
static const struct role_row general[] = {
    {0.7f,
     {{"バランス型AI", "偏りなく、いくつかの面から考えて答えてください。"},
      {"Balance", "Answer even-handedly, with more than one side in view."},
      {"平衡型", "请不偏不倚，从多个方面思考后作答。"}}},
    {0.6f,
     {{"専門知識AI", "専門家の知識で、正確でわかりやすく答えてください。"},
      {"Expertise", "Answer with an expert's knowledge, correctly and clearly."},
      {"专业知识", "请以专家的知识，准确易懂地回答。"}}},
};
static const struct {
    const struct role_row *rows;
    int n;
} role_sets[N_QUESTION_TYPES] = {
    [QUESTION_DISCUSSION] = {discussion, ARRAY_LEN(discussion)},
    [QUESTION_PLANNING] = {planning, ARRAY_LEN(planning)},
    [QUESTION_INFORMATIONAL] = {informational, ARRAY_LEN(informational)},
    [QUESTION_CONVERSATIONAL] = {conversational, ARRAY_LEN(conversational)},
    [QUESTION_DEFAULT] = {general, ARRAY_LEN(general)},
};

int agent_role_count(enum question_type t) {
    return role_sets[t].n;
}

struct agent_role agent_role_get(enum question_type t, enum language l, int agent) {
    CHECK(agent >= 0);
    const struct role_row *row = &role_sets[t].rows[agent % role_sets[t].n];
    return (struct agent_role){row->text[l][0], row->text[l][1], row->temperature};
}
