/*
 * test_families: properties of the task families. Correct answers are computed again from the
 * question's text by separate code.
 */
#define _GNU_SOURCE
#include "families/internal.h"
#include "template/template.h"

#include <ctype.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;

static int quiet(void **state) {
    (void)state;
    log_quiet = true;
    return 0;
}

static void close_to(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance)) fail_msg("%.9g is not %.9g ± %.1g", got, want, tolerance);
}

/* The split in which a text occurred, by the hash of the text: an open-addressing table, twice as
 * large as the number of entries. */
enum { DRAWS = 100000, SLOTS = 1 << 18 };
struct seen {
    uint64_t hash[SLOTS];
    uint8_t split[SLOTS];
};

static void seen_check(struct seen *s, const char *text, enum data_split split) {
    uint64_t h = hash_fnv1a(text, strlen(text)) | 1;
    size_t at = h % SLOTS;
    while (s->hash[at] && s->hash[at] != h) at = (at + 1) % SLOTS;
    if (s->hash[at] && s->split[at] != split)
        fail_msg("'%s' is in splits %d and %d", text, s->split[at], split);
    s->hash[at] = h;
    s->split[at] = (uint8_t)split;
}

static void text_is_utf8(const char *text) {
    json_t *v = json_string(text); /* refuses anything except valid UTF-8 */
    if (!v) fail_msg("'%s' is not UTF-8", text);
    json_decref(v);
}

/* The last one is the question. */
static void chat_is_well_formed(const struct task_item *it) {
    const json_t *turns = json_object_get(it->chat, "messages");
    size_t n = json_array_size(turns), i;
    json_t *turn;
    assert_true(n % 2 == 1);
    json_array_foreach (turns, i, turn) {
        const char *role = json_string_value(json_object_get(turn, "role"));
        assert_string_equal(role, i % 2 ? "assistant" : "user");
        assert_true(*json_string_value(json_object_get(turn, "content")) != 0);
    }
    turn = json_array_get(turns, n - 1);
    assert_string_equal(json_string_value(json_object_get(turn, "content")), it->question);
}

/* All of the text that the model reads before its reply; malloc'ed. */
static char *item_text(const struct task_item *it) {
    return it->chat ? json_dumps(it->chat, JSON_COMPACT) : xstrdup(it->question);
}

static void item_is_well_formed(const struct task_item *it) {
    assert_in_range(it->n_choices, it->whole_replies ? 4 : 2, 4);
    if (it->chat && !json_object_get(it->chat, "tools")) chat_is_well_formed(it);
    assert_in_range(it->correct, 0, it->n_choices - 1);
    assert_true(*it->question && *it->key);
    text_is_utf8(it->question);
    text_is_utf8(it->work);
    for (int i = 0; i < it->n_choices; i++) {
        assert_true(*it->choices[i] != 0);
        text_is_utf8(it->choices[i]);
        for (int j = 0; j < i; j++) assert_string_not_equal(it->choices[i], it->choices[j]);
    }
}

struct sampled_item {
    int family;
    enum data_split split;
    uint64_t seed;
    uint32_t index;
};

static struct sampled_item sampled_item_at(uint32_t i) {
    uint32_t n = (uint32_t)family_count();
    return (struct sampled_item){(int)(i % n), (enum data_split)(i / n % 3), 1 + i / n / 3 % 4,
                                 i / n / 12};
}

static void sampled_item_make(struct sampled_item d, struct task_item *it) {
    family_item(d.family, d.split, d.seed, d.index, false, it);
}

/* No key and no question of any language, seed and family occurs in two splits. */
static void test_splits_are_disjoint(void **state) {
    (void)state;
    struct seen *keys = xcalloc(1, sizeof *keys), *questions = xcalloc(1, sizeof *questions);
    for (uint32_t i = 0; i < DRAWS; i++) {
        struct sampled_item d = sampled_item_at(i);
        struct task_item it;
        sampled_item_make(d, &it);
        assert_int_equal(family_split_of(it.key), d.split);
        seen_check(keys, it.key, d.split);
        char *text = item_text(&it);
        seen_check(questions, text, d.split);
        free(text);
        item_is_well_formed(&it);
        task_item_release(&it);
    }
    free(keys);
    free(questions);
}

static void test_items_are_functions(void **state) {
    (void)state;
    for (uint32_t i = 3000; i-- > 0;) {
        struct task_item a, b, noise;
        sampled_item_make(sampled_item_at(i), &a);
        sampled_item_make(sampled_item_at(i * 7 + 1), &noise);
        sampled_item_make(sampled_item_at(i), &b);
        assert_string_equal(a.question, b.question);
        assert_string_equal(a.work, b.work);
        assert_string_equal(a.key, b.key);
        assert_ptr_equal(a.lang, b.lang);
        assert_int_equal(a.correct, b.correct);
        assert_int_equal(a.n_choices, b.n_choices);
        for (int k = 0; k < a.n_choices; k++) assert_string_equal(a.choices[k], b.choices[k]);
        task_item_release(&a);
        task_item_release(&b);
        task_item_release(&noise);
    }
}

static int lang_index(const char *lang) {
    return strcmp(lang, "en") == 0   ? 0
           : strcmp(lang, "ja") == 0 ? 1
           : strcmp(lang, "zh") == 0 ? 2
                                     : -1;
}

/* Frequencies of rare variants, languages and positions of the correct answer, for each family. */
static void test_shares(void **state) {
    (void)state;
    enum { N = 3000 };
    for (int f = 0; f < family_count(); f++) {
        int rare = 0, lang[3] = {0}, first = 0;
        double expected_first = 0;
        for (uint32_t i = 0; i < N; i++) {
            struct task_item it;
            family_item(f, i % 2 ? SPLIT_TRAIN : SPLIT_DEV, 5, i, false, &it);
            assert_true(lang_index(it.lang) >= 0);
            lang[lang_index(it.lang)]++;
            rare += it.rare;
            first += it.correct == 0;
            expected_first += 1.0 / it.n_choices;
            task_item_release(&it);
        }
        close_to((double)rare / N, (double)task_families[f]->rare_share, 0.04);
        close_to((double)lang[0] / N, 0.6, 0.04);
        close_to((double)lang[1] / N, 0.2, 0.04);
        close_to((double)lang[2] / N, 0.2, 0.04);
        close_to(first / (double)N, expected_first / N, 0.04);
        if (task_families[f]->easy) assert_int_equal(rare, 0);
    }
}

static void test_find(void **state) {
    (void)state;
    for (int f = 0; f < family_count(); f++)
        assert_int_equal(family_find(task_families[f]->name), f);
    assert_int_equal(family_find("nonsense"), -1);
    assert_int_equal(fry_count(), 10);
}

/* The integers of a text, in order. A '-' next to a digit is never a sign here: no question has
 * negative numbers. */
static int numbers_of(const char *text, int *v, int most) {
    int n = 0;
    while (*text && n < most) {
        if (isdigit((unsigned char)*text))
            v[n++] = (int)strtol(text, (char **)(uintptr_t)&text, 10);
        else
            text++;
    }
    return n;
}

/* Fact of a sentence or a question, as indices of tables; age: the number; -1: none. */
struct parsed {
    int person, attribute, value;
};
enum { TOWN, AGE, FRIEND, FAVOURITE };

static const char *const favourites[3][FAMILY_WORDS] = {
    {"tea", "jazz", "chess", "bread", "rain", "soup", "milk", "snow"},
    {"お茶", "ジャズ", "将棋", "パン", "雨", "スープ", "牛乳", "雪"},
    {"茶", "爵士乐", "象棋", "面包", "下雨天", "汤", "牛奶", "雪"}};

/* The first word that occurs in a text; -1: none. */
static int word_in(const char *text, const char *const words[FAMILY_WORDS]) {
    const char *at, *first = NULL;
    int found = -1;
    for (int i = 0; i < FAMILY_WORDS; i++)
        if ((at = strstr(text, words[i])) && (!first || at < first)) {
            first = at;
            found = i;
        }
    return found;
}

/* By the words that only sentences and questions about that attribute use. */
static struct parsed parse_fact(const char *text, const char *lang) {
    static const char *const marks[4][10] = {
        {"live", "home", "住", "家", "生活"},
        {" old", " age ", "turned", "歳", "年齢", "岁", "年龄", "多大"},
        {"best friend", "親友", "親しい", "朋友", "最要好"},
        {"likes", "like best", "favourite", "loves", "好き", "喜欢", "最爱"}};
    int l = lang_index(lang), number;
    struct parsed p = {word_in(text, family_people[l]), -1, -1};
    for (int a = 0; a < 4; a++)
        for (int i = 0; i < 10 && marks[a][i]; i++)
            if (strstr(text, marks[a][i])) {
                assert_true(p.attribute < 0 || p.attribute == a);
                p.attribute = a;
            }
    const char *name = p.person < 0 ? "" : family_people[l][p.person];
    text = strstr(text, name) + strlen(name); /* a value follows the name: 雪 is a part of 小雪 */
    if (p.attribute == TOWN) p.value = word_in(text, family_towns[l]);
    if (p.attribute == AGE && numbers_of(text, &number, 1)) p.value = number;
    if (p.attribute == FRIEND) p.value = word_in(text, family_people[l]);
    if (p.attribute == FAVOURITE) p.value = word_in(text, favourites[l]);
    return p;
}

static bool starts_with_any(const char *text, const char *const prefixes[], size_t n) {
    for (size_t i = 0; i < n; i++)
        if (strncmp(text, prefixes[i], strlen(prefixes[i])) == 0) return true;
    return false;
}

static bool is_undo(const char *text) {
    static const char *const v[] = {"forget", "the first", "undo",   "訂正を", "やっぱり",
                                    "訂正は", "取消",      "还是第", "忘掉"};
    return starts_with_any(text, v, ARRAY_LEN(v));
}

static const char *turn_text(const struct task_item *it, size_t i) {
    const json_t *turns = json_object_get(it->chat, "messages");
    return json_string_value(json_object_get(json_array_get(turns, i), "content"));
}

static bool same_subject(struct parsed a, struct parsed b) {
    return a.person == b.person && a.attribute == b.attribute;
}

/* How often a message changes a fact that was stated before, or undoes a change. */
static int corrections_of(const struct task_item *it) {
    size_t n = json_array_size(json_object_get(it->chat, "messages"));
    int corrections = 0;
    for (size_t i = 2; i + 1 < n; i += 2) {
        corrections += is_undo(turn_text(it, i));
        for (size_t k = 0; k < i; k += 2)
            if (same_subject(parse_fact(turn_text(it, i), it->lang),
                             parse_fact(turn_text(it, k), it->lang))) {
                corrections++;
                break;
            }
    }
    return corrections;
}

/* The statements about what the last message asks: the last one counts, or after an undoing the one
 * before. The reply is the only choice that says it, and says it in other words. */
static void solve_dialogue(const struct task_item *it, char *out) {
    size_t n = json_array_size(json_object_get(it->chat, "messages"));
    struct parsed last = parse_fact(it->question, it->lang);
    int before = -1, n_right = 0;
    bool rephrase = last.value >= 0;
    for (size_t i = 0; i + 1 < n; i += 2) {
        struct parsed said = parse_fact(turn_text(it, i), it->lang),
                      confirmed = parse_fact(turn_text(it, i + 1), it->lang);
        if (is_undo(turn_text(it, i))) last.value = before;
        if (is_undo(turn_text(it, i))) continue;
        assert_memory_equal(&said, &confirmed, sizeof said);
        assert_null(strstr(turn_text(it, i + 1), turn_text(it, i)));
        if (!same_subject(said, last)) continue;
        before = last.value;
        last.value = said.value;
    }
    assert_true(last.value >= 0);
    for (int i = 0; i < it->n_choices; i++) {
        struct parsed choice = parse_fact(it->choices[i], it->lang);
        assert_true(rephrase || same_subject(choice, last));
        if (memcmp(&choice, &last, sizeof last) != 0) continue;
        assert_null(strstr(it->question, it->choices[i]));
        strcpy(out, it->choices[i]);
        n_right++;
    }
    assert_int_equal(n_right, 1);
    assert_int_equal(corrections_of(it) == 2, it->rare);
}

static void test_pretraining_excludes_rare_items(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 20000; i++) {
        struct task_item it;
        family_item((int)i % family_count(), SPLIT_TRAIN, i % 3, i, true, &it);
        assert_false(it.rare);
        assert_int_equal(family_split_of(it.key), SPLIT_TRAIN);
        /* everyday sentences, which precede further questions, have these words too */
        bool plain = !it.n_follow_ups;
        assert_true(!plain || !strstr(it.question, "smaller"));
        assert_null(strstr(it.question, " - "));
        assert_true(it.chat || !plain || !strstr(it.question, "lives in"));
        assert_null(strstr(it.question, "of the friend"));
        assert_null(strstr(it.question, "of the mayor"));
        assert_null(strstr(it.question, "order down"));
        assert_true(!plain || !strstr(it.question, "came to"));
        assert_true(!plain || strncmp(it.key, "deduction", 9) == 0 ||
                    strncmp(it.key, "judge", 5) == 0 || !strstr(it.question, "no "));
        bool talk = it.chat && !json_object_get(it.chat, "tools");
        if (talk) assert_in_range(corrections_of(&it), 0, 1);
        task_item_release(&it);
    }
}

/* The last run of "x y z" in a text, without its spaces. */
static int letters_of(const char *text, char *v) {
    const char *p = strrchr(text, ':');
    if (!p) p = strstr(text, "：") + 2;
    int n = 0;
    for (p++; *p; p++)
        if (*p != ' ') v[n++] = *p;
    v[n] = 0;
    return n;
}

static void spell(char *out, const char *v, int n) {
    for (int i = 0; i < n; i++) out += sprintf(out, "%s%c", i ? " " : "", v[i]);
}

static int char_up(const void *a, const void *b) {
    return *(const char *)a - *(const char *)b;
}

static void solve_numbers(const char *family, const struct task_item *it, char *out) {
    int v[8], n = numbers_of(it->question, v, 8), best = 0;
    if (strcmp(family, "arithmetic") == 0) {
        assert_int_equal(n, 2);
        sprintf(out, "%d", it->rare ? v[0] - v[1] : v[0] + v[1]);
    } else {
        assert_in_range(n, 2, 3);
        for (int i = 1; i < n; i++)
            if (it->rare ? v[i] < v[best] : v[i] > v[best]) best = i;
        sprintf(out, "%d", v[best]);
    }
}

static void solve_letters(const char *family, const struct task_item *it, char *out) {
    char v[32], back[32];
    int n = letters_of(it->question, v);
    if (strcmp(family, "copy") != 0) qsort(v, (size_t)n, 1, char_up);
    for (int i = 0; i < n; i++) back[i] = v[n - 1 - i];
    spell(out, it->rare ? back : v, n);
}

/* A pattern of different letters is complete when its first one occurs again. */
static void solve_sequence(const struct task_item *it, char *out) {
    char v[32];
    int n = letters_of(it->question, v), period = 1;
    while (v[period] != v[0]) period++;
    for (int i = period; i < n; i++) assert_int_equal(v[i], v[i - period]);
    assert_true(n >= 2 * period);
    sprintf(out, "%c", v[n - period]);
}

/* Capitals are steps in every language. */
static void solve_route(const struct task_item *it, char *out) {
    int at[2];
    assert_int_equal(numbers_of(it->question, at, 2), 2);
    for (const char *p = it->question; *p; p++) {
        int step = it->rare ? -1 : 1;
        if (*p == 'N') at[1] += step;
        if (*p == 'S') at[1] -= step;
        if (*p == 'E') at[0] += step;
        if (*p == 'W') at[0] -= step;
    }
    sprintf(out, "%d,%d", at[0], at[1]);
}

/* English: "all a are b. no b is c. is each a c?" in either order; a forward chain means yes or,
 * through "no", no; the expected answer is no to a backward chain, and unknown without a chain. */
static void solve_syllogism(const struct task_item *it, char *out) {
    char p[2][3][8], q[2][8];
    const char *text = it->question;
    for (int i = 0; i < 2; i++) {
        strcpy(p[i][0], strncmp(text, "all", 3) == 0 ? "all" : "no");
        const char *form = *p[i][0] == 'a' ? "all %7[a-z] are %7[a-z]." : "no %7[a-z] is %7[a-z].";
        assert_int_equal(sscanf(text, form, p[i][1], p[i][2]), 2);
        text = strchr(text, '.') + 2;
    }
    assert_int_equal(sscanf(text, "is each %7[a-z] %7[a-z]?", q[0], q[1]), 2);
    strcpy(out, "unknown");
    for (int i = 0; i < 2; i++) {
        bool joined = strcmp(p[i][2], p[1 - i][1]) == 0 && *p[i][0] == 'a';
        bool forward = strcmp(p[i][1], q[0]) == 0 && strcmp(p[1 - i][2], q[1]) == 0;
        bool backward = strcmp(p[i][1], q[1]) == 0 && strcmp(p[1 - i][2], q[0]) == 0;
        if (joined && forward) strcpy(out, *p[1 - i][0] == 'a' ? "yes" : "no");
        if (joined && backward) strcpy(out, "no");
    }
}

/* By the words that only that persona uses. */
static void solve_voice(const struct task_item *it, char *out) {
    static const char *const marks[][2] = {
        {"i doubt", "critic"},        {"i test", "critic"},
        {"the flaw", "critic"},       {"not shown", "critic"},
        {"I check", "critic"},        {" true", "critic"},
        {" today", "practitioner"},   {"in practice", "practitioner"},
        {"us build", "practitioner"}, {"be cheap", "practitioner"},
        {"by hand", "practitioner"},  {"do we ship", "practitioner"},
        {"what if", "explorer"},      {"i wonder", "explorer"},
        {"look beyond", "explorer"},  {"new way", "explorer"},
        {"i mix", "explorer"},        {"imagine", "explorer"},
    };
    *out = 0;
    for (size_t i = 0; i < ARRAY_LEN(marks); i++) {
        if (!strstr(it->question, marks[i][0])) continue;
        assert_true(!*out || strcmp(out, marks[i][1]) == 0);
        strcpy(out, marks[i][1]);
    }
}

/* The words of a line. */
static int words_of(const char *line, char v[][32], int most) {
    int n = 0;
    while (*line && *line != '\n' && n < most) {
        size_t k = strcspn(line, " \n");
        sprintf(v[n++], "%.*s", (int)MIN(k, 31u), line);
        line += k + (line[k] == ' ');
    }
    return n;
}

/* Follows the question, which is the last line, through the rows "name age town friend". */
static void solve_lookup(const struct task_item *it, char *out) {
    char row[8][4][32], person[32] = "";
    const char *line = strchr(it->question, '\n') + 1, *ask = strrchr(it->question, '\n') + 1;
    bool town = strstr(ask, "town") || strstr(ask, "町") || strstr(ask, "城市");
    int n = 0;
    for (; line < ask; line = strchr(line, '\n') + 1)
        assert_int_equal(words_of(line, row[n++], 4), 4);
    for (int hop = 0; hop <= it->rare; hop++) {
        int found = -1;
        for (int i = 0; i < n; i++)
            if (hop ? strcmp(row[i][0], person) == 0 : strstr(ask, row[i][0]) != NULL) found = i;
        assert_in_range(found, 0, n - 1);
        strcpy(person, row[found][3]);
        strcpy(out, row[found][town ? 2 : 1]);
    }
}

/* Ages have two digits, codes three; a name or a town is recognised by its place or label. */
static void solve_form(const struct task_item *it, char *out) {
    int v[2];
    const char *ask = it->question + strlen(it->question);
    while (ask > it->question && ask[-1] != ' ') ask--;
    assert_int_equal(numbers_of(it->question, v, 2), 2);
    if (strcmp(ask, "age?") == 0) sprintf(out, "%d", MIN(v[0], v[1]));
    if (strcmp(ask, "code?") == 0) sprintf(out, "%d", MAX(v[0], v[1]));
    if (strcmp(ask, "name?") == 0 && it->rare) sscanf(it->question, "%31[a-z]", out);
    if (strcmp(ask, "name?") == 0 && !it->rare)
        sscanf(strstr(it->question, "name: ") + 6, "%31[a-z]", out);
    if (strcmp(ask, "town?") == 0)
        sscanf(it->rare ? strstr(it->question, "lives in ") + 9
                        : strstr(it->question, "town: ") + 6,
               "%31[a-z]", out);
}

/* Runs the program. */
static void solve_machine(const struct task_item *it, char *out) {
    int value[128] = {0};
    const char *p = it->question, *ask = strrchr(it->question, ';') + 2;
    for (; p < ask; p = strchr(p, ';') + 2) {
        char sign = p[3];
        if (isdigit((unsigned char)p[2]))
            value[(int)p[0]] = atoi(p + 2);
        else
            value[(int)p[0]] = value[(int)p[2]] + (sign == '-' ? -1 : 1) * atoi(p + 4);
    }
    if (strncmp(ask, "what is ", 8) == 0) ask += 8;
    sprintf(out, "%d", value[(int)*ask]);
    char conclusion[300];
    sprintf(conclusion, "; %c=%s", *ask, out);
    assert_string_equal(it->conclusion, conclusion);
}

static void solve_sums(const struct task_item *it, char *out) {
    int v[2];
    assert_int_equal(numbers_of(it->question, v, 2), 2);
    sprintf(out, "%d", it->rare ? v[0] - v[1] : v[0] + v[1]);
}

/* The derivation has the digits of the answer, from the last one on; of a sum of two digits only
 * the last digit counts, except in the last place. */
static void check_work_of_sums(const struct task_item *it) {
    int answer = atoi(it->choices[it->correct]), place = 1, total = 0;
    const char *p = it->work;
    for (int i = 0; i < 3; i++, place *= 10) {
        int a, b, c = 0, n;
        char sign = '+';
        assert_true(sscanf(p, "%d%c%d%n", &a, &sign, &b, &n) == 3);
        p += n;
        if (*p != '=') c = abs((int)strtol(p, (char **)(uintptr_t)&p, 10));
        assert_int_equal(*p, '=');
        int value = (int)strtol(p + 1, (char **)(uintptr_t)&p, 10);
        assert_int_equal(value, sign == '+' ? a + abs(b) + c : a - abs(b) - c);
        total += place * (i < 2 ? value % 10 : value);
    }
    assert_int_equal(total, answer);
}

/* The proposed answer in a question of judge. */
static const char *proposed_of(const struct task_item *it, size_t *len) {
    const char *line = strrchr(it->question, '\n') + 1;
    const char *begin = strstr(line, ": ") ? strstr(line, ": ") + 2 : strstr(line, "：") + 3;
    const char *end = strstr(begin, "。") ? strstr(begin, "。") : strstr(begin, ". right?");
    *len = (size_t)(end - begin);
    return begin;
}

/* Appends the symbols of the conclusion of judge: of the answer, and of the proposed answer.
 * Returns the word after them. */
static const char *pairs_of(const char *conclusion, char answer[64], char proposed[64]) {
    const char *p = conclusion + 1, *more = p;
    char a[32], b[32];
    int n;
    answer[0] = proposed[0] = '\0';
    for (; more; p += n) {
        assert_int_equal(sscanf(p, " %31s %31s%n", a, b, &n), 2);
        more = b[strlen(b) - 1] == ',' && b[1] ? p : NULL;
        if (more) b[strlen(b) - 1] = '\0';
        assert_true(!more || strcmp(a, b) == 0);
        strcat(answer, strcmp(a, "-") == 0 ? "" : a);
        strcat(proposed, strcmp(b, "-") == 0 ? "" : b);
    }
    return p + 1;
}

/* The derivation ends with the answer to the judged question. The conclusion compares it with the
 * proposed one: all symbols or those up to the first difference. */
static void solve_judge(const struct task_item *it, char *out) {
    char answer[64], proposed[64], want[64] = "";
    size_t n, n_work = strlen(it->work);
    const char *text = proposed_of(it, &n), *word = pairs_of(it->conclusion, answer, proposed);
    bool same = strcmp(word, "same") == 0,
         ends_same = n_work >= n && strncmp(it->work + n_work - n, text, n) == 0 &&
                     (n_work == n || it->work[n_work - n - 1] == ' ');
    assert_int_equal(same, ends_same);
    assert_true(same || strcmp(word, "differ") == 0);
    assert_int_equal(same, strcmp(answer, proposed) == 0);
    for (size_t i = 0; i < n; i++)
        if (text[i] != ' ') strncat(want, &text[i], 1);
    assert_int_equal(strncmp(want, proposed, same ? strlen(want) + 1 : strlen(proposed)), 0);
    strcpy(out, same ? "yes" : "no");
}

/* Whether premise "all x are y" or "no x is y" holds in a model: bit i of `model` tells whether
 * there is a thing that belongs to the kinds of the bits of i. */
static bool premise_holds(int model, bool all, int x, int y) {
    for (int i = 0; i < 8; i++)
        if (model >> i & 1 && i >> x & 1 && (i >> y & 1) != all) return false;
    return true;
}

static bool has_members(int model, int kind) {
    for (int i = 0; i < 8; i++)
        if (model >> i & 1 && i >> kind & 1) return true;
    return false;
}

/* English: asks each of the 255 sets of things in which no kind is empty. */
static void solve_deduction(const struct task_item *it, char *out) {
    char name[6], first[8], second[8];
    bool all[2];
    int v[6], n_names = 0, yes = 0, no = 0;
    const char *text = it->question;
    for (int i = 0; i < 3; i++) {
        const char *form = i == 2         ? "is every %7[a-z] %7[a-z]?"
                           : *text == 'e' ? "every %7[a-z] is %7[a-z]."
                                          : "no %7[a-z] is %7[a-z].";
        if (i < 2) all[i] = *text == 'e';
        assert_int_equal(sscanf(text, form, first, second), 2);
        for (int k = 0; k < 2; k++) {
            char c = k ? *second : *first;
            int id = 0;
            while (id < n_names && name[id] != c) id++;
            if (id == n_names) name[n_names++] = c;
            v[2 * i + k] = id;
        }
        if (i < 2) text = strchr(text, '.') + 2;
    }
    assert_int_equal(n_names, 3);
    for (int model = 1; model < 256; model++) {
        if (!has_members(model, 0) || !has_members(model, 1) || !has_members(model, 2) ||
            !premise_holds(model, all[0], v[0], v[1]) || !premise_holds(model, all[1], v[2], v[3]))
            continue;
        bool holds = premise_holds(model, true, v[4], v[5]);
        yes += holds;
        no += !holds;
    }
    strcpy(out, !no ? "yes" : !yes ? "no" : "unknown");
}

/* The number after the last line's owner in the text. */
static void solve_retrieval(const struct task_item *it, char *out) {
    static const char *const asks[][2] = {
        {"what is the code of ", "?"}, {"", "の番号は？"}, {"", "的号码是多少？"}};
    static const char *const facts[] = {"the code of %.*s is ", "%.*sの番号は", "%.*s的号码是"};
    const char *ask = strrchr(it->question, '\n') + 1;
    int lang = lang_index(it->lang);
    const char *owner = ask + strlen(asks[lang][0]);
    char *fact = xasprintf(facts[lang], (int)(strlen(owner) - strlen(asks[lang][1])), owner);
    const char *found = strstr(it->question, fact);
    assert_true(found && found < ask);
    sprintf(out, "%d", atoi(found + strlen(fact)));
    free(fact);
}

static json_t *offered_tool(const struct task_item *it, const char *part) {
    size_t i;
    json_t *tool;
    json_array_foreach (json_object_get(it->chat, "tools"), i, tool) {
        json_t *f = json_object_get(tool, "function");
        if (strstr(json_string_value(json_object_get(f, "name")), part)) return f;
    }
    return NULL;
}

/* English: a word of the question tells the part of the tool's name. Before a result: a call of
 * that tool (of the friend or mayor first, in a chain) with the last word; after it: the answer, or
 * in a chain the second call. */
static void solve_tools(const struct task_item *it, char *out) {
    static const char *const words[][2] = {
        {"how old", "age"},
        {"which room", "room"},
        {"the number", "phone"},
        {"warm", "temperature"},
        {"how many people", "population"},
        {"how far", "distance"},
    };
    char argument[32], *call;
    const char *q = it->question, *tool = NULL;
    bool friend = strstr(q, "the friend of"), mayor = strstr(q, "the mayor of");
    for (size_t i = 0; i < ARRAY_LEN(words); i++)
        if (strstr(q, words[i][0])) tool = words[i][1];
    bool chain = tool && (friend || mayor);
    assert_int_equal(chain, it->rare);
    json_t *messages = json_object_get(it->chat, "messages");
    bool has_result = json_array_size(messages) > 1;
    const char *last =
        json_string_value(json_object_get(json_array_get(messages, has_result ? 2 : 0), "content"));
    if (has_result && !chain) { /* {"key": value} */
        snprintf(out, 64, "%.*s", (int)strcspn(strchr(last, ':') + 2, "\"}"),
                 strchr(last, ':') + 2);
        if (*out == 0) sscanf(strchr(last, ':') + 3, "%31[a-z]", out);
        assert_non_null(strstr(it->choices[it->correct], out));
        strcpy(out, it->choices[it->correct]);
        return;
    }
    if (!tool || (chain && !has_result)) tool = friend ? "friend" : "mayor";
    const char *word = has_result ? strchr(last, ':') + 3 : strrchr(q, ' ') + 1;
    if (!has_result && strstr(q, "live in")) word = strstr(q, "live in") + 8;
    sscanf(word, "%31[a-z]", argument);
    json_t *f = offered_tool(it, tool);
    const char *key = strstr("temperature population distance mayor", tool) ? "city" : "name";
    call = f ? xasprintf("<tool_call>\n{\"name\": \"%s\", \"arguments\": {\"%s\": \"%s\"}}\n"
                         "</tool_call>",
                         json_string_value(json_object_get(f, "name")), key, argument)
             : xstrdup("no tool fits.");
    snprintf(out, 256, "%s", call);
    free(call);
}

static void solve(const char *family, const struct task_item *it, char *out) {
    static const char *const by_letters[] = {"copy", "sort", "order"};
    for (size_t i = 0; i < ARRAY_LEN(by_letters); i++)
        if (strcmp(family, by_letters[i]) == 0) {
            solve_letters(family, it, out);
            return;
        }
    if (strcmp(family, "route") == 0)
        solve_route(it, out);
    else if (strcmp(family, "sequence") == 0)
        solve_sequence(it, out);
    else if (strcmp(family, "voice") == 0)
        solve_voice(it, out);
    else if (strcmp(family, "syllogism") == 0)
        solve_syllogism(it, out);
    else if (strcmp(family, "lookup") == 0)
        solve_lookup(it, out);
    else if (strcmp(family, "form") == 0)
        solve_form(it, out);
    else if (strcmp(family, "machine") == 0)
        solve_machine(it, out);
    else if (strcmp(family, "sums") == 0)
        solve_sums(it, out);
    else if (strcmp(family, "judge") == 0)
        solve_judge(it, out);
    else if (strcmp(family, "deduction") == 0)
        solve_deduction(it, out);
    else if (strcmp(family, "retrieval") == 0 || strcmp(family, "needle") == 0)
        solve_retrieval(it, out);
    else if (strcmp(family, "tools") == 0)
        solve_tools(it, out);
    else if (strcmp(family, "dialogue") == 0)
        solve_dialogue(it, out);
    else
        solve_numbers(family, it, out);
}

/* In all three languages, except some that are parsed in English only. The replies of "about" are
 * not computed: test_about. */
static void test_gold_answers_are_correct(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 40000; i++) {
        struct task_item it;
        char want[256];
        struct sampled_item d = sampled_item_at(i);
        const char *family = task_families[d.family]->name;
        sampled_item_make(d, &it);
        bool english = strcmp(family, "syllogism") == 0 || strcmp(family, "form") == 0 ||
                       strcmp(family, "deduction") == 0 || strcmp(family, "tools") == 0;
        if (strcmp(family, "about") != 0 && (!english || strcmp(it.lang, "en") == 0)) {
            solve(family, &it, want);
            if (strcmp(family, "sums") == 0) check_work_of_sums(&it);
            if (strcmp(it.choices[it.correct], want) != 0)
                fail_msg("%s: '%s' has '%s', not '%s'", family, it.question, it.choices[it.correct],
                         want);
        }
        task_item_release(&it);
    }
}

/* A template of a check with an answer; malloc'ed. */
static char *render_check(const char *template, const char *answer) {
    json_t *vars = json_pack("{ss}", "answer", answer);
    struct jinja *j = jinja_parse_strict(template, strlen(template), &err);
    struct jinja_input in = {.vars = vars, .now = -1};
    struct jinja_output out;
    if (!j || jinja_render(j, &in, &out, &err) != OK) fail_msg("'%s': %s", template, err.text);
    char *text = xstrdup(out.text);
    jinja_output_release(&out);
    jinja_free(j);
    json_decref(vars);
    return text;
}

/* A question of deduction in any language as the English one, malloc'ed: the kinds are the single
 * letters. */
static char *deduction_in_english(const char *text, const char *lang) {
    static const char *const nones[] = {"no ", "でない", "没有"};
    char v[6];
    int n = 0;
    const char *none = nones[lang_index(lang)], *end = lang_index(lang) ? "。" : ".",
               *middle = strstr(text, end), *first = strstr(text, none);
    if (lang_index(lang) == 0) return xstrdup(text);
    for (const char *c = text; *c; c++)
        if (*c >= 'a' && *c <= 'z') {
            assert_true(n < 6);
            v[n++] = *c;
        }
    assert_int_equal(n, 6);
    const char *second = strstr(middle, none);
    return xasprintf("%s %c is %c. %s %c is %c. is every %c %c?",
                     first && first < middle ? "no" : "every", v[0], v[1], second ? "no" : "every",
                     v[2], v[3], v[4], v[5]);
}

/* Whether the premises are a chain, every a is b and every or no b is c, in either order: only rare
 * variants have others. */
static bool deduction_is_common(const char *english) {
    char word[2][8], subject[2], predicate[2];
    assert_int_equal(sscanf(english, "%7s %c is %c. %7s %c is %c.", word[0], &subject[0],
                            &predicate[0], word[1], &subject[1], &predicate[1]),
                     6);
    for (int i = 0; i < 2; i++)
        if (strcmp(word[i], "every") == 0 && predicate[i] == subject[1 - i]) return true;
    return false;
}

/* Whether the check of an item passes for an answer if the model's reply is right, which is
 * computed from the text of the check's question as one of the family's common variant. */
static bool check_passes(const char *family, const struct task_item *it, const char *answer) {
    char want[256];
    struct task_item inverse = {.lang = it->lang};
    char *question = render_check(it->check_question, answer),
         *expected = render_check(it->check_answer, answer);
    text_is_utf8(question);
    bool deduction = strcmp(family, "deduction") == 0;
    inverse.question = deduction ? deduction_in_english(question, it->lang) : xstrdup(question);
    assert_true(!deduction || deduction_is_common(inverse.question));
    solve(family, &inverse, want);
    bool passes = strcmp(want, expected) == 0;
    task_item_release(&inverse);
    free(question);
    free(expected);
    return passes;
}

static void item_check_is_right(const char *family, const struct task_item *it) {
    bool answer_in_question = strstr(it->check_question, "{{") != NULL;
    assert_string_not_equal(it->check_question, it->question);
    for (int i = 0; i < it->n_choices; i++)
        if (check_passes(family, it, it->choices[i]) != (i == it->correct))
            fail_msg("%s: '%s' with '%s': '%s', '%s'", family, it->question, it->choices[i],
                     it->check_question, it->check_answer);
    if (!answer_in_question || strcmp(family, "sums") == 0)
        assert_false(check_passes(family, it, "none"));
}

static void hash_text(struct sha256 *h, const char *text) {
    sha256_update(h, text, strlen(text) + 1);
}

/* The check of an item passes for the right choice and for no other one. The items are those from
 * before there were checks: checks use no random numbers. */
static void test_checks(void **state) {
    (void)state;
    static const char *const families[] = {"sort",  "compare", "arithmetic", "pick",
                                           "order", "route",   "sums",       "deduction"};
    struct sha256 h;
    char hex[HASH_LEN];
    sha256_init(&h);
    for (size_t f = 0; f < ARRAY_LEN(families); f++)
        for (uint32_t i = 0; i < 2000; i++) {
            struct task_item it;
            family_item(family_find(families[f]), (enum data_split)(i % 3), 1, i, false, &it);
            bool checked = strncmp(it.key, "deduction 1 1 ", 14) != 0;
            assert_int_equal(it.check_question != NULL, checked);
            assert_int_equal(it.check_answer != NULL, checked);
            if (checked) item_check_is_right(families[f], &it);
            hash_text(&h, it.key);
            hash_text(&h, it.question);
            for (int k = 0; k < it.n_choices; k++) hash_text(&h, it.choices[k]);
            task_item_release(&it);
        }
    sha256_final(&h, hex);
    assert_string_equal(hex, "4f3673ecd6fb0be46e66086bb0edb0659b61bf80c70a747478b67672d39bb172");
}

/* An open-addressing table from the hash of a message to the hash of its key. */
struct key_table {
    uint64_t message[SLOTS], key[SLOTS];
};

static void key_check(struct key_table *t, const struct task_item *it) {
    uint64_t h = hash_fnv1a(it->question, strlen(it->question)) | 1,
             key = hash_fnv1a(it->key, strlen(it->key));
    size_t at = h % SLOTS;
    while (t->message[at] && t->message[at] != h) at = (at + 1) % SLOTS;
    if (t->message[at] && t->key[at] != key) fail_msg("'%s' has two keys", it->question);
    t->message[at] = h;
    t->key[at] = key;
}

enum { INTENTS = 18, WORDINGS = 16 };
struct about_seen {
    char *replies[3][INTENTS];
    bool wording[3][INTENTS][WORDINGS], in_training[3][INTENTS][WORDINGS];
};

/* The key begins with language, intent and wording; language and intent decide the reply. */
static void about_see(struct about_seen *s, const struct task_item *it, enum data_split split) {
    int v[6], n = numbers_of(it->key, v, 6), lang = v[0], intent = v[1], wording = v[2];
    const char *reply = it->choices[it->correct];
    assert_int_equal(n, 6);
    assert_int_equal(lang, lang_index(it->lang));
    assert_in_range(intent, 0, INTENTS - 1);
    assert_in_range(wording, 0, WORDINGS - 1);
    if (!s->replies[lang][intent]) s->replies[lang][intent] = xstrdup(reply);
    assert_string_equal(s->replies[lang][intent], reply);
    s->wording[lang][intent][wording] = true;
    s->in_training[lang][intent][wording] |= split == SPLIT_TRAIN;
}

/* Every reply and every wording occurs, in training too, and a message has one key, so one
 * reply. */
static void test_about(void **state) {
    (void)state;
    struct key_table *messages = xcalloc(1, sizeof *messages);
    struct about_seen *s = xcalloc(1, sizeof *s);
    for (uint32_t i = 0; i < DRAWS; i++) {
        struct task_item it;
        enum data_split split = (enum data_split)(i % 3);
        family_item(family_find("about"), split, 7, i, false, &it);
        about_see(s, &it, split);
        key_check(messages, &it);
        task_item_release(&it);
    }
    for (int i = 0; i < 3 * INTENTS; i++) {
        int lang = i / INTENTS, intent = i % INTENTS, n = WORDINGS;
        while (n > 0 && !s->wording[lang][intent][n - 1]) n--;
        assert_true(n >= 8);
        for (int w = 0; w < n; w++) assert_true(s->in_training[lang][intent][w]);
        for (int k = 0; k < intent; k++)
            assert_string_not_equal(s->replies[lang][k], s->replies[lang][intent]);
    }
    for (int i = 0; i < 3 * INTENTS; i++) free(s->replies[i / INTENTS][i % INTENTS]);
    free(s);
    free(messages);
}

struct lines {
    struct seen *test;
    int n, with_work, with_system;
};

static int line_check(void *ctx, const json_t *v, int line, struct error *e) {
    struct lines *l = ctx;
    const json_t *turns = json_object_get(v, "messages");
    size_t n = json_array_size(turns);
    const json_t *user = json_array_get(turns, n - 2), *reply = json_array_get(turns, n - 1);
    (void)line, (void)e;
    assert_in_range(n, 2, 3);
    assert_string_equal(json_string_value(json_object_get(user, "role")), "user");
    assert_string_equal(json_string_value(json_object_get(reply, "role")), "assistant");
    seen_check(l->test, json_string_value(json_object_get(user, "content")), SPLIT_TRAIN);
    const char *text = json_string_value(json_object_get(reply, "content"));
    assert_true(strncmp(text, ANSWER_PREFIX " ", 8) == 0 || strncmp(text, WORK_PREFIX " ", 6) == 0);
    assert_non_null(strstr(text, ANSWER_PREFIX " "));
    l->with_work += strncmp(text, WORK_PREFIX, 5) == 0;
    l->with_system += n == 3;
    l->n++;
    return 0;
}

/* A persona's conversations contain no question of the test split, and are the same when written
 * again. */
static void test_personas(void **state) {
    (void)state;
    char path[64], first[HASH_LEN], again[HASH_LEN];
    struct lines l = {.test = xcalloc(1, sizeof *l.test)};
    snprintf(path, sizeof path, "/tmp/shoal-test-eval-%d.jsonl", (int)getpid());
    for (uint32_t i = 0; i < 20000; i++) {
        struct task_item it;
        family_item((int)i % family_count(), i & 1 ? SPLIT_TEST : SPLIT_DEV, 1, i / 20, false, &it);
        char *text = item_text(&it);
        seen_check(l.test, text, i & 1 ? SPLIT_TEST : SPLIT_DEV);
        free(text);
        task_item_release(&it);
    }
    for (int p = 0; p < 3; p++) {
        l.n = l.with_work = l.with_system = 0;
        assert_int_equal(persona_write(&built_in_personas[p], 240, 1, path, &err), OK);
        assert_int_equal(sha256_file(path, first, &err), OK);
        assert_int_equal(json_file_each(path, line_check, &l, &err), 0);
        assert_int_equal(l.n, 240);
        assert_true(l.with_work > 60 && l.with_work < 180);
        assert_true(l.with_system > 0);
        assert_int_equal(persona_write(&built_in_personas[p], 240, 1, path, &err), OK);
        assert_int_equal(sha256_file(path, again, &err), OK);
        assert_string_equal(first, again);
    }
    unlink(path);
    free(l.test);
    assert_true(persona_write(&built_in_personas[0], 3, 1, "/nonexistent/x.jsonl", &err) < 0);
    assert_non_null(strstr(err.text, "/nonexistent/x.jsonl"));
}

static void test_debate_turn(void **state) {
    (void)state;
    char *one = debate_turn_text((const char *[]){"12"}, 1),
         *three = debate_turn_text((const char *[]){"1", "2", "x y"}, 3);
    assert_string_equal(one, "others say 12. answer again.");
    assert_string_equal(three, "others say 1 and 2 and x y. answer again.");
    free(one);
    free(three);
}

/* sort and the common order, and compare and the common pick, are one question in two wordings. */
static const char *shared_content(const char *key) {
    static const char *const names[] = {"sort ", "order 0 ", "compare 0 ", "pick 0 "};
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (strncmp(key, names[i], strlen(names[i])) == 0) return key + strlen(names[i]);
    return NULL;
}

enum { TWIN_BITS = 1 << 24 };

static size_t content_slot(const char *content) {
    return hash_fnv1a(content, strlen(content)) % TWIN_BITS;
}

/* No measured question occurred in training in either wording: compared with 240,000 training
 * draws, exactly up to a hash collision, which the split of the twin question decides. */
static void test_equal_questions_in_two_wordings(void **state) {
    (void)state;
    static const char *const families[] = {"sort", "order", "compare", "pick"};
    uint8_t *seen = xcalloc(TWIN_BITS / 8, 1);
    struct task_item it;
    for (uint32_t i = 0; i < 240000; i++) {
        family_item(family_find(families[i % 4]), SPLIT_TRAIN, 1, i / 4, i & 4, &it);
        const char *content = shared_content(it.key);
        if (content) seen[content_slot(content) / 8] |= (uint8_t)(1 << content_slot(content) % 8);
        task_item_release(&it);
    }
    int collisions = 0, n = 0;
    for (uint32_t i = 0; i < 8000; i++) {
        enum data_split split = i & 4 ? SPLIT_TEST : SPLIT_DEV;
        family_item(family_find(families[i % 4]), split, 2, i / 4, false, &it);
        const char *content = shared_content(it.key);
        assert_true(!content == !it.duplicate_of);
        if (content) {
            assert_int_equal(family_split_of(it.duplicate_of), split);
            assert_string_equal(shared_content(it.duplicate_of), content);
            collisions += seen[content_slot(content) / 8] >> content_slot(content) % 8 & 1;
            n++;
        }
        task_item_release(&it);
    }
    free(seen);
    assert_true(n > 5000 && collisions < n / 50); /* 240,000 of 16.8 million bits are set: 1.4 % */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal_questions_in_two_wordings),
        cmocka_unit_test(test_splits_are_disjoint),
        cmocka_unit_test(test_items_are_functions),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_pretraining_excludes_rare_items),
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_gold_answers_are_correct),
        cmocka_unit_test(test_checks),
        cmocka_unit_test(test_about),
        cmocka_unit_test(test_personas),
        cmocka_unit_test(test_debate_turn),
    };
    return cmocka_run_group_tests(tests, quiet, NULL);
}
