/*
 * memory_rules: the facts that users state about themselves, by tables of regular expressions for
 * English, Japanese and Chinese, and the gate that refuses everything else.
 *
 * A message passes these steps:
 *
 *     message --(code, quotations removed; role play?)--> sentences --(irony, hypotheses)-->
 *     clauses --(question, instruction, negation, third person, transient)--> patterns --> values
 *
 * A pattern is anchored at the beginning of a clause, so that a statement inside of another one
 * ("she thinks that I live in Rome") matches none. The gate runs first: a clause that it refuses is
 * never searched, and a question or an instruction refuses the rest of its sentence as well.
 *
 * In Japanese and Chinese, whose sentences may lack a subject, the subject is the user unless the
 * sentence names another person. Everything is deterministic, and bounded by the bytes of a message
 * and by the match limit of pattern.c. test/memory/test_memory_rules.c measures precision and
 * recall.
 */
#define _GNU_SOURCE
#include "memory/memory_rules.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct memory_attribute memory_attributes[] = {
    {"name", 1.0, true, "called who 名前 名 叫 名字 姓名"},
    {"age", 0.7, true, "old years 歳 年齢 岁 年龄 几岁 多大"},
    {"birthday", 0.8, true, "born date birth 誕生日 生まれ 生日 出生"},
    {"residence", 0.9, true,
     "live lives living home address city town where 住む 住んで 住まい 住 住在 住址"},
    {"origin", 0.7, true, "from born hometown where 出身 地元 老家 家乡 来自"},
    {"occupation", 0.9, true, "job work profession 仕事 職業 工作 职业"},
    {"employer", 0.8, true, "work company job 会社 勤め先 勤務先 公司 单位 工作"},
    {"school", 0.8, true, "university college study 学校 大学 学校 上学"},
    {"family", 0.9, false, "relatives children 家族 兄弟 子供 家人 孩子"},
    {"pet", 0.7, false, "animal pets ペット 動物 宠物"},
    {"likes", 0.5, false, "favourite favorite love enjoy 好き 好物 喜欢"},
    {"dislikes", 0.5, false, "hate 嫌い 苦手 讨厌 不喜欢"},
    {"allergy", 1.0, false, "allergic allergies アレルギー 过敏"},
    {"diet", 0.9, true, "eat food 食事 食べる 饮食 吃"},
    {"health", 1.0, false, "condition illness disease 病気 健康 持病 疾病 病"},
    {"language", 0.6, false, "speak languages 言語 話せる 语言 会说"},
    {"skill", 0.5, false, "can able good 特技 できる 特长 擅长"},
    {"hobby", 0.6, false, "hobbies free time 趣味 爱好 兴趣"},
    {"owns", 0.4, false, "have car own 持っている 持ち物 拥有"},
    {"goal", 0.7, false, "goals plan dream aim 目標 夢 目标 梦想"},
    {"habit", 0.5, false, "routine usually 習慣 日課 习惯"},
    {"note", 0.9, false, "remember 覚えて 记住"},
    {NULL},
};

const struct memory_attribute *memory_attribute_find(const char *name) {
    const struct memory_attribute *a = memory_attributes;
    while (a->name && strcmp(a->name, name) != 0) a++;
    return a->name ? a : NULL;
}

/* Bytes of a character in the table `fold`, and of a pair of them. */
enum { FOLD_CHAR = 3, FOLD_PAIR = 2 * FOLD_CHAR };
enum { SENTENCE_BYTES = 2048, REFUSED_MAX = 32, ANSWER_BYTES = 100, BEARER_BYTES = 40 };

static const struct memory_rules *const rules[N_LANGUAGES] = {
    [LANG_EN] = &memory_rules_en, [LANG_JA] = &memory_rules_ja, [LANG_ZH] = &memory_rules_zh};

/* A relative or an animal that the last two clauses have mentioned; "": none. */
struct bearer {
    const char *attribute;
    char word[BEARER_BYTES];
    int clauses; /* since then */
};

/* The extraction from one message. */
struct extraction {
    const struct memory_rules *r;
    bool other;  /* the last subject was another person */
    bool user;   /* the last subject of the sentence was the user */
    bool amends; /* the message corrects something */
    struct bearer bearer;
    json_t *facts, *refused;
    const char *sentence; /* the current one, as the user wrote it */
    size_t sentence_len;
};

static void refuse(struct extraction *x, const char *text, size_t len, const char *reason) {
    while (len && strchr(" \t\n,", *text)) text++, len--;
    if (len && json_array_size(x->refused) < REFUSED_MAX)
        json_array_append_new(
            x->refused,
            json_pack("{s:o,s:s}", "text", json_string_lossy(text, len), "reason", reason));
}

static bool finds(const char *pattern, const struct buf *text) {
    return text->len && pattern_match(pattern, text->data, text->len, 0, NULL);
}

/* The first row that matches, or NULL; *m receives its match. */
static const struct refusal *refusal_find(const struct refusal *rows, const struct buf *text,
                                          struct pattern_match *m) {
    for (; rows->pattern && text->len; rows++)
        if (pattern_match(rows->pattern, text->data, text->len, 0, m)) return rows;
    return NULL;
}

/* values */

/* Removes punctuation at the ends and, except in whole phrases, words such as articles. */
static void value_trim(const struct extraction *x, bool phrase, struct buf *value) {
    size_t before;
    do {
        before = value->len;
        pattern_replace("^[\\s\\p{P}\\p{S}]+|[\\s\\p{P}\\p{S}]+$", "", value);
        if (!phrase) pattern_replace(x->r->trim, "", value);
    } while (value->len && value->len < before);
}

/* Restores the contractions that text_expand() has replaced, if that gives the user's own words. */
static void value_contract(const struct extraction *x, struct buf *value) {
    struct buf short_form = {0};
    buf_add(&short_form, value->data, value->len);
    for (const struct refusal *c = x->r->contract; c && c->pattern; c++)
        pattern_replace(c->pattern, c->reason, &short_form);
    if (short_form.len && short_form.len < value->len &&
        memmem(x->sentence, x->sentence_len, short_form.data, short_form.len)) {
        value->len = 0;
        buf_puts(value, short_form.data);
    }
    buf_release(&short_form);
}

static bool fact_is_known(const struct extraction *x, const json_t *fact) {
    const json_t *v;
    size_t i;
    json_array_foreach (x->facts, i, v)
        if (json_equal(json_object_get(v, "attribute"), json_object_get(fact, "attribute")) &&
            json_equal(json_object_get(v, "value"), json_object_get(fact, "value")))
            return true;
    return false;
}

/* Adds a fact, unless `no_value` excludes it. `old` is NULL except for corrections. */
static void fact_add(struct extraction *x, const struct rule *rule, const char *value, size_t len,
                     const char *old) {
    struct buf v = {0};
    buf_add(&v, value, len);
    bool note = strcmp(rule->attribute, "note") == 0;
    value_trim(x, note || strcmp(rule->attribute, "habit") == 0, &v);
    if (v.len) value_contract(x, &v);
    v.len = utf8_prefix_len(v.data, v.len, MEMORY_VALUE_CHARS);
    bool ends = rule->flags & RULE_ENDS;
    if ((v.len || ends) && json_array_size(x->facts) < MEMORY_TURN_FACTS &&
        (note || !finds(x->r->no_value, &v))) {
        json_t *fact = json_pack("{s:s,s:o,s:o,s:s}", "attribute", rule->attribute, "value",
                                 json_stringn(v.data, v.len), "text",
                                 json_stringn(x->sentence, x->sentence_len), "change",
                                 ends && rule->flags & RULE_CORRECTS ? "ends last"
                                 : ends                              ? "ends"
                                 : rule->flags & RULE_CORRECTS       ? "corrects"
                                                                     : "holds");
        if (old) json_object_set_new(fact, "old", json_string(old));
        if (ends || !fact_is_known(x, fact)) json_array_append(x->facts, fact);
        json_decref(fact);
    }
    buf_release(&v);
}

/* Adds each item of an enumeration; `before` is put before each, with a space. */
static void list_add(struct extraction *x, const struct rule *rule, const char *before,
                     const char *text, size_t len) {
    struct buf items = {0};
    buf_add(&items, text, len);
    pattern_replace(x->r->list, "\n", &items);
    /* "two dogs, Rex and Ada": dog Rex, dog Ada */
    size_t singular = strlen(before);
    if (items.len && strchr(items.data, '\n') && singular > 2 && before[singular - 1] == 's')
        singular--;
    for (size_t n, pos = 0; pos < items.len; pos += n + 1) {
        n = strcspn(items.data + pos, "\n");
        if (n == 0) continue;
        if (pos && pattern_match(x->r->no_item, items.data + pos, n, 0, NULL)) break;
        char *value = xasprintf("%.*s%s%.*s", (int)singular, before, *before ? " " : "", (int)n,
                                items.data + pos);
        fact_add(x, rule, value, strlen(value), NULL);
        free(value);
    }
    buf_release(&items);
}

static void bearer_set(struct extraction *x, const char *attribute, const char *word, size_t len) {
    x->bearer.attribute = attribute;
    x->bearer.clauses = 0;
    snprintf(x->bearer.word, BEARER_BYTES, "%.*s", len < BEARER_BYTES ? (int)len : 0, word);
}

/* Puts the names after the value of the last fact. */
static void fact_name(struct extraction *x, const struct rule *rule, const char *names,
                      size_t len) {
    const size_t last = json_array_size(x->facts) - 1;
    json_t *fact = json_incref(json_array_get(x->facts, last));
    struct buf bearer = {0};
    json_array_remove(x->facts, last);
    buf_puts(&bearer, json_get_string(fact, "value"));
    pattern_replace(x->r->count, "", &bearer);
    list_add(x, rule, bearer.data, names, len);
    bearer_set(x, rule->attribute, bearer.data, bearer.len);
    buf_release(&bearer);
    if (json_array_size(x->facts) == last) json_array_append(x->facts, fact);
    json_decref(fact);
}

/* Whether the last fact can have the name that the rule finds. */
static bool fact_is_unnamed(const struct extraction *x, const struct rule *rule) {
    const json_t *fact = json_array_get(x->facts, json_array_size(x->facts) - 1);
    if (!fact || strcmp(json_get_string(fact, "attribute"), rule->attribute) != 0 ||
        strcmp(json_get_string(fact, "change"), "holds") != 0)
        return false;
    const char *value = json_get_string(fact, "value");
    return !pattern_match(" \\p{Lu}|[^\\x00-\\x7f] .", value, strlen(value), 0, NULL);
}

static bool bearer_is_known(const struct extraction *x, const struct rule *rule) {
    return *x->bearer.word && strcmp(x->bearer.attribute, rule->attribute) == 0;
}

static void names_add(struct extraction *x, const struct rule *rule, const char *names,
                      size_t len) {
    if (fact_is_unnamed(x, rule))
        fact_name(x, rule, names, len);
    else
        list_add(x, rule, x->bearer.word, names, len);
}

/* Remembers the relative or animal of a clause that has not given a fact about it. */
static void bearer_note(struct extraction *x, const struct buf *clause) {
    const struct {
        const char *attribute, *pattern;
    } kinds[] = {{"family", x->r->bearer_family}, {"pet", x->r->bearer_pet}};
    struct pattern_match m;
    if (++x->bearer.clauses > 2) *x->bearer.word = 0;
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (pattern_match(kinds[i].pattern, clause->data, clause->len, 0, &m) &&
            m.end[1] - m.begin[1] < BEARER_BYTES) {
            bearer_set(x, kinds[i].attribute, clause->data + m.begin[1], m.end[1] - m.begin[1]);
            return;
        }
}

/* Adds the value of a match in `text`. */
static void match_add(struct extraction *x, const struct rule *rule, const char *text,
                      const struct pattern_match *m) {
    const char *first = text + m->begin[1], *second = text + m->begin[2];
    size_t n1 = m->end[1] - m->begin[1], n2 = m->end[2] - m->begin[2];
    char *one = xstrndup(first, n1), *two = xstrndup(second, n2);
    if (rule->flags & RULE_NAMED)
        names_add(x, rule, first, n1);
    else if (rule->flags & RULE_NAMES && n2)
        list_add(x, rule, one, second, n2);
    else if (rule->flags & RULE_CORRECTS && !(rule->flags & RULE_ENDS))
        fact_add(x, rule, first, n1, two);
    else if (rule->flags & RULE_LIST)
        list_add(x, rule, "", first, n1);
    else if (rule->flags & (RULE_PAIR | RULE_SWAP) && n2) {
        bool swap = rule->flags & RULE_SWAP;
        char *value = xasprintf("%s %s", swap ? two : one, swap ? one : two);
        fact_add(x, rule, value, strlen(value), NULL);
        free(value);
    } else
        fact_add(x, rule, n1 ? first : second, n1 ? n1 : n2, NULL);
    free(one);
    free(two);
}

/* Applies the patterns to a clause; of a clause about another person, those with RULE_KIN only. The
 * first pattern of an attribute that matches is used, but every one with RULE_ENDS or RULE_EACH. A
 * note is a clause without another fact. Returns whether a fact was found or named. */
static bool clause_search(struct extraction *x, const struct buf *clause, bool other) {
    const char *done = NULL;
    const size_t before = json_array_size(x->facts);
    for (const struct rule *rule = x->r->facts; rule->pattern; rule++) {
        struct pattern_match m;
        bool each = rule->flags & RULE_EACH;
        bool note = strcmp(rule->attribute, "note") == 0;
        if ((rule->flags & RULE_NAMED && !fact_is_unnamed(x, rule) && !bearer_is_known(x, rule)) ||
            (rule->flags & RULE_AMENDS && !x->amends) ||
            (rule->flags & RULE_ALSO && json_array_size(x->facts) == 0) ||
            (other && !(rule->flags & RULE_KIN)) || (note && json_array_size(x->facts) > before) ||
            (!each && !(rule->flags & RULE_ENDS) && done && strcmp(rule->attribute, done) == 0))
            continue;
        for (size_t pos = 0;
             pos < clause->len && pattern_match(rule->pattern, clause->data, clause->len, pos, &m);
             pos = MAX(m.end[0], pos + 1)) {
            size_t n = json_array_size(x->facts);
            match_add(x, rule, clause->data, &m);
            if (rule->flags & RULE_NAMED) return true;
            if (json_array_size(x->facts) > n && !(rule->flags & RULE_ENDS)) done = rule->attribute;
            if (!each) break;
        }
    }
    return json_array_size(x->facts) > before;
}

/* sentences */

/* Removes spaces and words such as "well" at the beginning. */
static void filler_remove(const struct extraction *x, struct buf *clause) {
    size_t before;
    do {
        before = clause->len;
        pattern_replace("^[\\s,.;:!?、，。！？…~～・·*-]+|\\s+$", "", clause);
        pattern_replace(x->r->filler, "", clause);
    } while (clause->len && clause->len < before);
}

/* Replaces full-width digits and Latin letters by the common ones. */
static void widths_fold(struct buf *text) {
    size_t n = 0;
    for (size_t i = 0; i < text->len; i++) {
        const unsigned char *p = (const unsigned char *)text->data + i;
        unsigned c = i + 2 < text->len && p[0] == 0xEF && (p[1] | 1) == 0xBD
                         ? (p[1] & 1u) * 64 + (p[2] & 63u) + 32
                         : 0;
        bool folds = c < 128 && isalnum((int)c);
        text->data[n++] = folds ? (char)c : text->data[i];
        if (folds) i += 2;
    }
    text->len = n;
    text->data[n] = 0;
}

static int fold_compare(const void *character, const void *pair) {
    return memcmp(character, pair, FOLD_CHAR);
}

/* Replaces characters by those that the patterns have; the length remains the same. */
static void script_fold(const struct memory_rules *r, struct buf *text) {
    size_t n = r->fold ? strlen(r->fold) / FOLD_PAIR : 0;
    for (size_t i = 0; n && i + FOLD_CHAR <= text->len; i++) {
        const char *pair = bsearch(text->data + i, r->fold, n, FOLD_PAIR, fold_compare);
        if (pair) memcpy(text->data + i, pair + FOLD_CHAR, FOLD_CHAR);
    }
}

/* Restores what script_fold() has replaced: as a whole if the message contains the text, else the
 * parts between spaces. */
static void script_restore(const struct buf *said, const struct buf *folded, struct buf *text) {
    for (size_t n, pos = 0; pos < text->len; pos += n + 1) {
        const char *part = text->data + pos;
        n = text->len - pos;
        const char *at = memmem(folded->data, folded->len, part, n);
        if (!at) {
            n = strcspn(part, " ");
            at = memmem(folded->data, folded->len, part, n);
        }
        if (at) memcpy(text->data + pos, said->data + (at - folded->data), n);
    }
}

/* The same for every string of the objects. */
static void scripts_restore(const struct buf *said, const struct buf *folded, json_t *objects) {
    json_t *object, *v;
    const char *key;
    size_t i;
    json_array_foreach (objects, i, object)
        json_object_foreach (object, key, v) {
            struct buf text = {0};
            buf_puts(&text, json_string_value(v));
            script_restore(said, folded, &text);
            json_string_set(v, text.len ? text.data : "");
            buf_release(&text);
        }
}

static void text_expand(const struct extraction *x, struct buf *text) {
    for (const struct refusal *e = x->r->expand; e->pattern; e++)
        pattern_replace(e->pattern, e->reason, text);
}

/* A sentence in work: `question`: it is one. */
struct clauses {
    bool question, stopped;
};

/* The reason to refuse a clause, or NULL. A question or an instruction stops the search of its
 * sentence. */
static const char *clause_refuse(struct extraction *x, struct clauses *c, const struct buf *clause,
                                 bool last) {
    struct pattern_match m;
    const struct refusal *why = refusal_find(x->r->clause, clause, &m);
    bool asks = c->question && (last || finds(x->r->question_clause, clause));
    c->stopped =
        asks ||
        (why && (strcmp(why->reason, "instruction") == 0 || strcmp(why->reason, "pretence") == 0));
    return asks ? "question" : why ? why->reason : NULL;
}

/* Puts the subject before a clause such as "and work in Rome". */
static void subject_add(struct extraction *x, struct buf *clause) {
    if (x->r->continues && x->user && finds(x->r->continues, clause))
        pattern_replace("^", "I ", clause);
}

static void clause_read(struct extraction *x, struct clauses *c, struct buf *clause, bool first,
                        bool last) {
    filler_remove(x, clause);
    if (!first) subject_add(x, clause);
    if (!x->other) text_expand(x, clause);
    bool third = finds(x->r->third, clause), self = !third && finds(x->r->self, clause);
    if (third || self) {
        x->other = third;
        x->user = self;
    }
    const char *why = clause_refuse(x, c, clause, last);
    bool found = !why && clause_search(x, clause, x->other);
    if (!why && x->other && !found) why = "third person";
    if (why) refuse(x, clause->data, clause->len, why);
    if (!found) bearer_note(x, clause);
    if (x->r->shift && finds(x->r->shift, clause)) x->other = true;
}

/* Splits a sentence into clauses, applies the gate to each, and searches those that pass. */
static void clauses_search(struct extraction *x, struct buf *sentence, bool question) {
    struct clauses c = {.question = question};
    x->user = false;
    pattern_replace(x->r->split, "\x01", sentence);
    for (size_t n, pos = 0; pos < sentence->len && !c.stopped; pos += n + 1) {
        struct buf clause = {0};
        n = strcspn(sentence->data + pos, "\x01");
        buf_add(&clause, sentence->data + pos, n);
        clause_read(x, &c, &clause, pos == 0, pos + n >= sentence->len);
        buf_release(&clause);
    }
}

/* Refuses a sentence or searches its clauses. */
static void sentence_read(struct extraction *x, struct buf *sentence) {
    struct pattern_match m;
    x->sentence = sentence->data;
    x->sentence_len = sentence->len;
    const struct refusal *why = refusal_find(x->r->sentence, sentence, &m);
    if (why) {
        refuse(x, sentence->data, sentence->len, why->reason);
        return;
    }
    struct buf work = {0};
    buf_add(&work, sentence->data,
            utf8_complete_len(sentence->data, MIN(sentence->len, (size_t)SENTENCE_BYTES)));
    widths_fold(&work);
    text_expand(x, &work);
    if (!x->r->keeps_subject) x->other = false;
    clauses_search(x, &work, finds(x->r->question, sentence));
    buf_release(&work);
}

/* messages */

/* Removes code, quoted lines and quotations, but only the marks of a quoted name. */
static void quotations_remove(struct extraction *x, struct buf *text) {
    static const char *const quotations[] = {
        "```(?s:.*?)(?:```|\\z)",
        "(?m)^\\h*>[^\n]*$",
        "(?i)[\"“”][^\"“”\n]*(?:\\b(?:I|I'm|I’m|my|me)\\b|[^\"“”\n]{25})[^\"“”\n]*[\"“”]",
        ("[\"“”「『][^\"“”「」『』\n]*(?:[我私俺僕はが。，、]|[^\"“”「」『』\n]{12}\\p{Han})"
         "[^\"“”「」『』\n]*[\"“”」』]"),
        "[「『][^「」『』\n]{13,}[」』]",
        "(?<![\\w])['‘](?:I|I'm|my)\\b[^'’\n]*['’](?!\\w)",
    };
    for (size_t i = 0; i < ARRAY_LEN(quotations); i++) {
        struct pattern_match m;
        if (pattern_match(quotations[i], text->data, text->len, 0, &m))
            refuse(x, text->data + m.begin[0], m.end[0] - m.begin[0], "quotation");
        pattern_replace(quotations[i], " \xEF\xBF\xBC ", text);
    }
    pattern_replace("[\"“”「」『』]", "", text);
}

/* Cuts the message where a pattern says that the rest is not the user's statement. */
static void message_cut(struct extraction *x, struct buf *text) {
    struct pattern_match m;
    const struct refusal *why = refusal_find(x->r->message, text, &m);
    if (!why) return;
    refuse(x, text->data + m.begin[0], text->len - m.begin[0], why->reason);
    text->len = m.begin[0];
    text->data[text->len] = 0;
}

/* Reads the sentences; in a role play only those that say that they are not a part of it. */
static void sentences_read(struct extraction *x, const struct buf *text, bool pretence) {
    struct pattern_match m;
    for (size_t pos = 0; pos < text->len; pos += m.end[0]) {
        struct buf sentence = {0};
        if (!pattern_match("(?s)\\A.+?(?:[。！？!?\n…\\p{So}]+[」』”\")）]*|"
                           "(?<!\\bDr|\\bMr|\\bMrs|\\bMs|\\bProf|\\bSt)\\.(?=\\s|\\z)[.\\s]*|\\z)",
                           text->data + pos, text->len - pos, 0, &m) ||
            m.end[0] == 0)
            break;
        buf_add(&sentence, text->data + pos, m.end[0]);
        pattern_replace("^\\s+|(?<!\\s)\\s++$", "", &sentence);
        if (pretence && !finds(x->r->real, &sentence))
            refuse(x, sentence.data, sentence.len, "pretence");
        else
            sentence_read(x, &sentence);
        buf_release(&sentence);
    }
}

static bool has_kana(const struct buf *text) {
    return finds("[\\p{Hiragana}\\p{Katakana}]", text);
}

/* Japanese without kana is read as Chinese. */
static const struct memory_rules *rules_for(const struct buf *text) {
    enum language l = language_detect(text->data);
    return rules[l == LANG_JA && !has_kana(text) ? LANG_ZH : l];
}

/* Reads a short message again as an answer to the assistant's question: "9 May" as "my birthday is
 * 9 May". Removes fillers from the text. */
static void answer_read(struct extraction *x, struct buf *text, const char *asked) {
    struct buf question = {0}, answer = {0};
    buf_add_sanitized(&question, asked,
                      utf8_complete_len(asked, strnlen(asked, MEMORY_TURN_BYTES)));
    buf_puts(&question, "");
    if (!has_kana(text)) x->r = rules_for(&question);
    script_fold(x->r, &question);
    filler_remove(x, text);
    const struct refusal *row = refusal_find(x->r->asked, &question, NULL);
    if (row && !finds(x->r->self, text)) {
        buf_puts(&answer, row->reason);
        buf_add(&answer, text->data, text->len);
        sentences_read(x, &answer, false);
    }
    buf_release(&question);
    buf_release(&answer);
}

json_t *memory_rules_extract(const char *message, const char *asked, bool pretence) {
    struct extraction x = {.facts = json_array(), .refused = json_array()};
    struct buf said = {0}, folded = {0}, text = {0};
    buf_add_sanitized(&said, message,
                      utf8_complete_len(message, strnlen(message, MEMORY_TURN_BYTES)));
    buf_puts(&said, "");
    x.r = rules_for(&said);
    buf_puts(&folded, said.data);
    script_fold(x.r, &folded);
    buf_puts(&text, folded.data);
    quotations_remove(&x, &text);
    if (finds(x.r->role_play, &text)) pretence = true;
    if (finds(x.r->role_play_end, &text)) pretence = false;
    message_cut(&x, &text);
    pattern_replace(x.r->join, ", ", &text);
    x.amends = finds(x.r->amends, &text);
    sentences_read(&x, &text, pretence);
    if (asked && !pretence && text.len <= ANSWER_BYTES && json_array_size(x.facts) == 0)
        answer_read(&x, &text, asked);
    scripts_restore(&said, &folded, x.facts);
    scripts_restore(&said, &folded, x.refused);
    buf_release(&said);
    buf_release(&folded);
    buf_release(&text);
    return json_pack("{s:o,s:o,s:b}", "facts", x.facts, "refused", x.refused, "pretence", pretence);
}
