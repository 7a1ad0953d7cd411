/*
 * test_prompt_profile: profiles of training questions (data/prompt_profile.c) and the questions of
 * training files (data/questions.c): similarity, files, refused files, every form of a sample.
 */
/* levels: once */
#define _GNU_SOURCE
#include "data/data.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static char root[64];

static int folder_make(void **state) {
    (void)state;
    log_quiet = true;
    strcpy(root, "/tmp/shoal-profile-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int folder_delete(void **state) {
    (void)state;
    tree_delete(root);
    return 0;
}

static struct prompt_profile profile_of(const char *const *questions, int n) {
    struct prompt_profile p = {0};
    for (int i = 0; i < n; i++) prompt_profile_add(&p, questions[i]);
    return p;
}

static double similarity(const struct prompt_profile *p, const char *prompt) {
    const struct prompt_profile one = profile_of(&prompt, 1);
    return prompt_profile_similarity(p, &one);
}

static void test_similarity(void **state) {
    static const char *const sums[] = {"12 + 30 = ?", "7 + 5 = ?", "120 + 4 = ?"},
                             *const sorting[] = {"sort: k b x", "並べ替え：p n q b", "sort: d a c"};
    const struct prompt_profile a = profile_of(sums, 3), b = profile_of(sorting, 3), none = {0};
    (void)state;
    assert_true(similarity(&a, "99 + 3 = ?") > similarity(&b, "99 + 3 = ?"));
    assert_true(similarity(&b, "並べ替え：z y") > similarity(&a, "並べ替え：z y"));
    const struct prompt_profile one = profile_of(sorting, 1);
    assert_float_equal(similarity(&one, sorting[0]), 1, 1e-6);
    assert_true(similarity(&none, sums[0]) == 0 && prompt_profile_similarity(&a, &none) == 0);
    assert_true(fabs(similarity(&a, "")) <= 1);
    // the frame of a task's prompt changes nothing
    assert_true(similarity(&b, "sort: z y") == similarity(&b, "Question: sort: z y\nAnswer:"));
}

static void test_paths(void **state) {
    (void)state;
    char *in_folder = prompt_profile_path(root), *file = path_join(root, "a.gguf"),
         *beside = prompt_profile_path(file), *expected = path_join(root, "prompt_profile.json");
    assert_string_equal(in_folder, expected);
    assert_string_equal(beside + strlen(file), ".prompt_profile.json");
    free(in_folder);
    free(file);
    free(beside);
    free(expected);
}

/* The text of a written profile, which equals itself after it is read. */
static char *written_text(void) {
    static const char *const questions[] = {"sort: k b x", "7 + 5 = ?", "りんご"};
    const struct prompt_profile p = profile_of(questions, 3);
    struct prompt_profile got;
    struct buf text = {0};
    char *path = path_join(root, "p.json");
    assert_int_equal(prompt_profile_write(&p, path, &err), OK);
    if (prompt_profile_read(&got, path, &err) != OK) fail_msg("%s", err.text);
    assert_int_equal(got.n, 3);
    assert_memory_equal(got.sum, p.sum, sizeof p.sum);
    assert_int_equal(file_read(path, 1 << 20, &text, &err), OK);
    free(path);
    return text.data;
}

static void refuse(const char *text, const char *from, const char *to, const char *why) {
    struct prompt_profile p;
    const char *at = strstr(text, from);
    assert_non_null(at);
    char *changed = xasprintf("%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    assert_int_not_equal(prompt_profile_parse(&p, changed, strlen(changed), "p.json", &err), OK);
    if (!strstr(err.text, why) || !strstr(err.text, "p.json")) fail_msg("%s", err.text);
    free(changed);
}

static void test_files(void **state) {
    struct prompt_profile p;
    (void)state;
    char *text = written_text();
    refuse(text, "shoal-prompt-profile-1", "shoal-prompt-profile-2", "'format'");
    refuse(text, "\"questions\":3", "\"questions\":0", "'questions'");
    refuse(text, "\"questions\":3", "\"questions\":\"3\"", "'questions'");
    refuse(text, "\"sum\":[", "\"sum\":[1,", "1024 numbers are expected in 'sum'");
    refuse(text, "\"sum\":", "\"sums\":", "1024 numbers are expected in 'sum'");
    refuse(text, "\"sum\":[0.0", "\"sum\":[null", "'sum.0'");
    refuse(text, "\"sum\":[0.0", "\"sum\":[-1e13", "'sum.0'");
    for (size_t n = 0; n < strlen(text); n += 499)
        assert_int_not_equal(prompt_profile_parse(&p, text, n, "p.json", &err), OK);
    assert_int_not_equal(prompt_profile_read(&p, "/nonexistent/p.json", &err), OK);
    free(text);
}

/* questions of training files */

static void question_collect(void *ctx, const char *question) {
    strings_add(ctx, question);
}

static void test_questions(void **state) {
    static const char lines[] =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":"
        "\"first\"},{\"role\":\"assistant\",\"content\":\"x\"},{\"role\":\"user\",\"content\":"
        "\"last\"},{\"role\":\"assistant\",\"content\":\"y\"}]}\n"
        "{\"prompt\":\"a prompt\",\"completion\":\"z\"}\n"
        "{\"instruction\":\"do it\",\"input\":\"\",\"output\":\"done\"}\n"
        "{\"text\":\"all of a text\"}\n"
        "{\"prompt\":\"a pair\",\"chosen\":\"good\",\"rejected\":\"bad\"}\n"
        "{\"chosen\":[{\"role\":\"user\",\"content\":\"two answers\"},{\"role\":"
        "\"assistant\",\"content\":\"good\"}],\"rejected\":[{\"role\":\"user\",\"content\":"
        "\"two answers\"},{\"role\":\"assistant\",\"content\":\"bad\"}]}\n"
        "{\"messages\":[{\"role\":\"assistant\",\"content\":\"no question\"}]}\n";
    static const char *const expected[] = {"last",          "a prompt", "do it",
                                           "all of a text", "a pair",   "two answers"};
    struct strings got = {0};
    char *path = path_join(root, "d.jsonl");
    (void)state;
    assert_int_equal(file_write(path, lines, strlen(lines), &err), OK);
    if (training_questions_each(path, question_collect, &got, &err) != OK) fail_msg("%s", err.text);
    assert_int_equal(got.n, (int)ARRAY_LEN(expected));
    for (int i = 0; i < got.n; i++) assert_string_equal(got.v[i], expected[i]);
    strings_release(&got);
    assert_int_not_equal(training_questions_each("/nonexistent", question_collect, &got, &err), OK);
    free(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_similarity),
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_questions),
    };
    return cmocka_run_group_tests(tests, folder_make, folder_delete);
}
