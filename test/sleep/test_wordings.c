/* test_wordings: every attribute has its questions, no two are equal, and none of them is one for
 * measuring. */
/* levels: once */
#include "sleep/internal.h"

#include "grade/grade.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const attributes[] = {
    "name",   "age",  "birthday", "residence", "origin",  "occupation", "employer", "school",
    "family", "pet",  "likes",    "dislikes",  "allergy", "diet",       "health",   "language",
    "skill",  "owns", "hobby",    "goal",      "habit",   "note",
};
enum { ALL = ARRAY_LEN(attributes) * SLEEP_QUESTIONS };

/* In lower case and narrow forms: "？" is "?". */
static char *normalized(char *question) {
    struct buf text = {0};
    text_normalize(question, strlen(question), &text);
    free(question);
    return text.data;
}

/* [ALL], those of an attribute in sequence. */
static void trained_fill(enum language l, char **trained) {
    for (size_t i = 0; i < ALL; i++)
        trained[i] = normalized(
            sleep_trained_question(l, attributes[i / SLEEP_QUESTIONS], (int)(i % SLEEP_QUESTIONS)));
}

static void strings_free(char **v, size_t n) {
    for (size_t i = 0; i < n; i++) free(v[i]);
}

/* Equal questions of two attributes would have two answers. */
static void test_different(void **state) {
    (void)state;
    for (enum language l = 0; l < N_LANGUAGES; l++) {
        char *trained[ALL];
        trained_fill(l, trained);
        for (size_t i = 0; i < ALL; i++)
            for (size_t j = 0; j < i; j++)
                if (strcmp(trained[i], trained[j]) == 0)
                    fail_msg("'%s' is a question of %s and of %s", trained[i],
                             attributes[i / SLEEP_QUESTIONS], attributes[j / SLEEP_QUESTIONS]);
        strings_free(trained, ALL);
    }
}

/* Without the prefix of the second question, which is "" of the first. */
static const char *without_prefix(const char *question, int k, enum language l) {
    static const char *const prefixes[N_LANGUAGES] = {
        [LANG_EN] = "by the way, ", [LANG_JA] = "ところで、", [LANG_ZH] = "对了,"};
    if (k == 0) return question;
    assert_ptr_equal(strstr(question, prefixes[l]), question);
    return question + strlen(prefixes[l]);
}

/* No line for training contains a question for measuring, also not after another prefix. */
static void test_held_out(void **state) {
    (void)state;
    for (enum language l = 0; l < N_LANGUAGES; l++) {
        char *trained[ALL];
        trained_fill(l, trained);
        for (size_t q = 0; q < ARRAY_LEN(attributes) * SLEEP_HELD_OUT; q++) {
            const char *attribute = attributes[q / SLEEP_HELD_OUT];
            const int k = (int)(q % SLEEP_HELD_OUT);
            char *question = normalized(sleep_held_out_question(l, attribute, k));
            for (size_t i = 0; i < ALL; i++)
                if (strstr(trained[i], without_prefix(question, k, l)))
                    fail_msg("'%s' of %s is for measuring", trained[i], attribute);
            free(question);
        }
        strings_free(trained, ALL);
    }
}

/* The names of an attribute occur equally often. */
static void test_frames(void **state) {
    (void)state;
    static const char *const objects[] = {"my name", "what I am called", "who I am",
                                          "the name that people use for me"};
    int n[ARRAY_LEN(objects)] = {0};
    for (int i = 2 * SLEEP_TRAINED; i < SLEEP_QUESTIONS; i++) {
        char *question = sleep_trained_question(LANG_EN, "name", i);
        for (size_t k = 0; k < ARRAY_LEN(objects); k++)
            n[k] += strstr(question, objects[k]) != NULL;
        free(question);
    }
    for (size_t k = 0; k < ARRAY_LEN(objects); k++)
        assert_int_equal(n[k], 2 * SLEEP_FRAMES / SLEEP_OBJECTS);
}

static void test_attributes(void **state) {
    (void)state;
    for (size_t a = 0; a < ARRAY_LEN(attributes); a++)
        assert_true(sleep_has_wordings(attributes[a]));
    assert_false(sleep_has_wordings("no such attribute"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attributes),
        cmocka_unit_test(test_different),
        cmocka_unit_test(test_held_out),
        cmocka_unit_test(test_frames),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
