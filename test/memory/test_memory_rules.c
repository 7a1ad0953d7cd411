/*
 * test_memory_rules: precision and recall of the rules that find facts about a user, on the
 * labelled conversations of test/cases/memories-*.jsonl.
 *
 * The rules were written with memories-dev.jsonl, memories-messages.jsonl, memories-second.jsonl
 * and memories-paraphrases.jsonl, whose rounds each measured the rules before they were changed.
 * memories-second-check.jsonl is the third of the second set, chosen by a hash of the id, that was
 * measured only. memories-held-out.jsonl, by another author, and memories-fourth.jsonl measure the
 * rules. A case is {id, lang, trap, turns: [{role, content}], facts: [{attribute, value}]}: the
 * facts that hold after all turns. Values are equal after NFKC, case folding and without spaces,
 * punctuation and articles; a value that contains the right one and is little longer counts as
 * well. `test_memory_rules --show FILE` prints every difference.
 */
/* levels: once */
#define _GNU_SOURCE
#include "memory/memory_rules.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unicase.h>
#include <unictype.h>
#include <uninorm.h>
#include <unistr.h>

#include <cmocka.h>

/* The smallest precision and recall. */
static const double DEV_PRECISION = 0.95, DEV_RECALL = 0.85;
static const double UNREAD_PRECISION = 0.85, UNREAD_RECALL = 0.75;
static const double HELD_OUT_PRECISION = 0.70, HELD_OUT_RECALL = 0.60;
static const double FOURTH_PRECISION = 0.75, FOURTH_RECALL = 0.60;

struct tally {
    int right, wrong, missed; /* facts */
};
static const char *const langs[] = {"en", "ja", "zh"};
static const char *const traps[] = {"none",       "other",    "question",  "negation",
                                    "quotation",  "pretence", "injection", "instruction",
                                    "correction", "irony",    "transient", "third-person"};
enum { LANGS = ARRAY_LEN(langs), TRAPS = ARRAY_LEN(traps) };
struct grading {
    struct tally all, lang[LANGS], kind[TRAPS], trap;
    bool show;
};

/* The value in the form that is compared; malloc'ed. */
static char *value_fold(const char *value) {
    static const char *const articles[] = {"the ", "an ", "a "};
    size_t n = 0;
    uint8_t *folded =
        u8_casefold((const uint8_t *)value, strlen(value) + 1, NULL, UNINORM_NFKC, NULL, &n);
    const uint8_t *p = folded;
    struct buf out = {0};
    for (size_t i = 0; i < ARRAY_LEN(articles); i++)
        if (strncmp((const char *)p, articles[i], strlen(articles[i])) == 0)
            p += strlen(articles[i]);
    for (ucs4_t c; (p = u8_next(&c, p));) {
        uint8_t bytes[6];
        int len = u8_uctomb(bytes, c, sizeof bytes);
        if (!uc_is_space(c) && !uc_is_punct(c)) buf_add(&out, bytes, (size_t)len);
    }
    buf_puts(&out, "");
    free(folded);
    return out.data;
}

static size_t chars(const char *text) {
    return u8_mbsnlen((const uint8_t *)text, strlen(text));
}

static bool fact_matches(const json_t *gold, const json_t *found) {
    if (strcmp(json_get_string(gold, "attribute"), json_get_string(found, "attribute")) != 0)
        return false;
    char *g = value_fold(json_get_string(gold, "value")),
         *f = value_fold(json_get_string(found, "value"));
    bool equal = strcmp(g, f) == 0 || (*g && strstr(f, g) && 2 * chars(f) <= 3 * chars(g) + 8);
    free(g);
    free(f);
    return equal;
}

/* Learns the turns of a case, and returns the memories that hold. */
static json_t *case_learn(const json_t *v) {
    struct error err;
    struct store *s = store_open(":memory:", &err);
    struct memories *m = s ? memories_open(s, "user", 0, &err) : NULL;
    const json_t *turn;
    const char *asked = NULL;
    size_t i;
    if (!m) fail_msg("%s", err.text);
    json_array_foreach (json_object_get(v, "turns"), i, turn) {
        const struct memory_turn t = {.role = json_get_string(turn, "role"),
                                      .text = json_get_string(turn, "content"),
                                      .conversation = json_get_string(v, "id"),
                                      .number = (int64_t)i + 1,
                                      .asked = asked};
        json_t *result = memories_learn(m, &t, &err);
        if (!result) fail_msg("%s: %s", json_get_string(v, "id"), err.text);
        json_decref(result);
        asked = strcmp(t.role, "assistant") == 0 ? t.text : NULL;
    }
    json_t *list = memories_list(m, false, &err);
    if (!list) fail_msg("%s", err.text);
    memories_close(m);
    store_close(s);
    return list;
}

static void difference_show(const char *what, const json_t *v, const json_t *fact) {
    printf("%s %s %s=%s", what, json_get_string(v, "id"), json_get_string(fact, "attribute"),
           json_get_string(fact, "value"));
    const json_t *turn;
    size_t i;
    json_array_foreach (json_object_get(v, "turns"), i, turn)
        if (strcmp(json_get_string(turn, "role"), "user") == 0)
            printf(" | %s", json_get_string(turn, "content"));
    printf("\n");
}

static void tally_add(struct tally *sum, const struct tally *t) {
    sum->right += t->right;
    sum->wrong += t->wrong;
    sum->missed += t->missed;
}

static void grading_add(struct grading *g, const json_t *v, const struct tally *t) {
    const char *lang = json_get_string(v, "lang"), *trap = json_get_string(v, "trap");
    tally_add(&g->all, t);
    for (int i = 0; i < LANGS; i++)
        if (strcmp(lang, langs[i]) == 0) tally_add(&g->lang[i], t);
    for (int i = 0; i < TRAPS; i++)
        if (strcmp(trap, traps[i]) == 0) tally_add(&g->kind[i], t);
    if (strcmp(trap, "none") != 0) tally_add(&g->trap, t);
}

static int case_grade(void *ctx, const json_t *v, int line, struct error *err) {
    struct grading *g = ctx;
    json_t *found = case_learn(v), *gold = json_copy(json_object_get(v, "facts")), *f;
    struct tally t = {0};
    size_t i;
    (void)line;
    (void)err;
    json_array_foreach (found, i, f) {
        size_t k = 0;
        while (k < json_array_size(gold) && !fact_matches(json_array_get(gold, k), f)) k++;
        bool right = k < json_array_size(gold);
        if (right) json_array_remove(gold, k);
        t.right += right;
        t.wrong += !right;
        if (!right && g->show) difference_show("wrong ", v, f);
    }
    t.missed = (int)json_array_size(gold);
    json_array_foreach (gold, i, f)
        if (g->show) difference_show("missed", v, f);
    grading_add(g, v, &t);
    json_decref(found);
    json_decref(gold);
    return OK;
}

static double precision(const struct tally *t) {
    return t->right ? (double)t->right / (t->right + t->wrong) : t->wrong == 0;
}

static double recall(const struct tally *t) {
    return t->right ? (double)t->right / (t->right + t->missed) : t->missed == 0;
}

static void tally_print(const char *name, const struct tally *t) {
    printf("  %-12s precision %.3f recall %.3f (%d right, %d wrong, %d missed)\n", name,
           precision(t), recall(t), t->right, t->wrong, t->missed);
}

static struct grading file_grade(const char *path, bool show) {
    struct grading g = {.show = show};
    struct error err;
    if (json_file_each(path, case_grade, &g, &err) != OK) fail_msg("%s", err.text);
    printf("%s\n", path);
    tally_print("all", &g.all);
    for (int i = 0; i < LANGS; i++) tally_print(langs[i], &g.lang[i]);
    tally_print("traps", &g.trap);
    for (int i = 0; show && i < TRAPS; i++) tally_print(traps[i], &g.kind[i]);
    return g;
}

static void file_check(const char *path, double least_precision, double least_recall) {
    if (!path_exists(path)) {
        printf("skip: there is no '%s'\n", path);
        skip();
    }
    struct grading g = file_grade(path, false);
    assert_true(precision(&g.all) >= least_precision);
    assert_true(recall(&g.all) >= least_recall);
}

static void test_development(void **state) {
    (void)state;
    file_check("test/cases/memories-dev.jsonl", DEV_PRECISION, DEV_RECALL);
}

static void test_messages(void **state) {
    (void)state;
    file_check("test/cases/memories-messages.jsonl", DEV_PRECISION, DEV_RECALL);
}

static void test_second(void **state) {
    (void)state;
    file_check("test/cases/memories-second.jsonl", DEV_PRECISION, DEV_RECALL);
}

static void test_paraphrases(void **state) {
    (void)state;
    file_check("test/cases/memories-paraphrases.jsonl", DEV_PRECISION, DEV_RECALL);
}

/* The conversations that the author of the rules has not read. */
static void test_unread(void **state) {
    (void)state;
    file_check("test/cases/memories-second-check.jsonl", UNREAD_PRECISION, UNREAD_RECALL);
}

static void test_held_out(void **state) {
    (void)state;
    file_check("test/cases/memories-held-out.jsonl", HELD_OUT_PRECISION, HELD_OUT_RECALL);
}

static void test_fourth(void **state) {
    (void)state;
    file_check("test/cases/memories-fourth.jsonl", FOURTH_PRECISION, FOURTH_RECALL);
}

/* The facts that hold after a message, as "attribute=value;". */
static char *facts_of(const char *message) {
    json_t *found = memory_rules_extract(message, NULL, false), *fact;
    struct buf out = {0};
    size_t i;
    buf_puts(&out, "");
    json_array_foreach (json_object_get(found, "facts"), i, fact) {
        assert_non_null(strstr(message, json_get_string(fact, "text")));
        if (strcmp(json_get_string(fact, "change"), "holds") == 0)
            buf_printf(&out, "%s=%s;", json_get_string(fact, "attribute"),
                       json_get_string(fact, "value"));
    }
    json_decref(found);
    return out.data;
}

/* Both scripts of Chinese give the same facts; a value has the characters of the user. */
static void test_scripts(void **state) {
    static const char *const cases[][2] = {
        {"我养了一只猫叫汤圆。", "pet=猫 汤圆;"},
        {"我養了一隻貓叫湯圓。", "pet=貓 湯圓;"},
        {"我对头孢过敏，也不喜欢苦瓜。", "allergy=头孢;dislikes=苦瓜;"},
        {"我對頭孢過敏，也不喜歡苦瓜。", "allergy=頭孢;dislikes=苦瓜;"},
        {"我在国家电网上班，有两个儿子。", "employer=国家电网;family=两个儿子;"},
        {"我在國家電網上班，有兩個兒子。", "employer=國家電網;family=兩個兒子;"},
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *facts = facts_of(cases[i][0]);
        assert_string_equal(facts, cases[i][1]);
        free(facts);
    }
}

/* The table of characters is sorted, and no replacement is replaced in turn. */
static void test_fold(void **state) {
    const char *fold = memory_rules_zh.fold;
    const size_t n = strlen(fold) / 6;
    (void)state;
    assert_int_equal(strlen(fold), 6 * n);
    for (size_t i = 0; i < n; i++) {
        char to[4] = {0};
        memcpy(to, fold + 6 * i + 3, 3);
        if (i) assert_true(memcmp(fold + 6 * (i - 1), fold + 6 * i, 3) < 0);
        for (size_t k = 0; k < n; k++) assert_int_not_equal(memcmp(fold + 6 * k, to, 3), 0);
    }
}

/* The cost of a message is bounded, and no message makes the rules fail. */
static void test_hostile(void **state) {
    static const char *const parts[] = {
        "I am a ", "my sister ", "私は",   "我",   "、", ", and ",  "I like a ", "\"I ",
        "(",       "\xff",       "好きが", "喜欢", "a",  "my old ", "毎日",      "我家有"};
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) {
        struct buf text = {0};
        while (text.len < 64 << 10) buf_puts(&text, parts[i]);
        clock_t start = clock();
        json_t *found = memory_rules_extract(text.data, text.data, false);
        assert_non_null(found);
        assert_true(json_array_size(json_object_get(found, "facts")) <= MEMORY_TURN_FACTS);
        assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 20);
        json_decref(found);
        buf_release(&text);
    }
}

int main(int argc, char **argv) {
    log_quiet = true;
    if (argc == 3 && strcmp(argv[1], "--show") == 0) {
        file_grade(argv[2], true);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_development), cmocka_unit_test(test_messages),
        cmocka_unit_test(test_second),      cmocka_unit_test(test_paraphrases),
        cmocka_unit_test(test_unread),      cmocka_unit_test(test_held_out),
        cmocka_unit_test(test_fourth),      cmocka_unit_test(test_scripts),
        cmocka_unit_test(test_fold),        cmocka_unit_test(test_hostile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
