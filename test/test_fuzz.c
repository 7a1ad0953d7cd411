/*
 * Runs every input in test/fuzz/corpus through its target, without a fuzzer: inputs that once found
 * an error, or that reach otherwise unreached code, stay tested at every processor level and under
 * the sanitizers. Each input also runs truncated, because a file that ends early is the most common
 * damage.
 */
#define _GNU_SOURCE
#include "fuzz/targets.c"

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#define CORPUS "test/fuzz/corpus"

static int entry_visible(const struct dirent *e) {
    return e->d_name[0] != '.';
}

static int entries(const char *dir, struct dirent ***out) {
    int n = scandir(dir, out, entry_visible, alphasort);
    if (n < 0) fail_msg("no folder '%s': run the tests from the checkout", dir);
    return n;
}

static void input_run(const struct fuzz_target *t, const char *path) {
    struct error err;
    struct buf b = {0};
    if (file_read(path, 1 << 20, &b, &err) != OK) fail_msg("%s", err.text);
    const uint8_t *data = (const uint8_t *)b.data;
    t->run(data, b.len);
    for (int k = 1; k < 4; k++) {
        size_t n = b.len * (size_t)k / 4;
        uint8_t *cut =
            memcpy(xmalloc(n), data, n); /* so that a read beyond the end is out of bounds */
        t->run(cut, n);
        free(cut);
    }
    buf_release(&b);
}

static void test_corpus(void **state) {
    const struct fuzz_target *t = *state;
    struct dirent **files;
    char *dir = path_join(CORPUS, t->name);
    int n = entries(dir, &files);
    if (n == 0) fail_msg("'%s' holds no input", dir);
    for (int i = 0; i < n; i++) {
        char *path = path_join(dir, files[i]->d_name);
        input_run(t, path);
        free(path);
        free(files[i]);
    }
    free(files);
    free(dir);
}

/* The corpus of a missing target would never run. */
static void test_every_folder_has_a_target(void **state) {
    (void)state;
    struct dirent **dirs;
    int n = entries(CORPUS, &dirs);
    for (int i = 0; i < n; i++) {
        if (!fuzz_target_find(dirs[i]->d_name))
            fail_msg("'%s/%s' belongs to no target", CORPUS, dirs[i]->d_name);
        free(dirs[i]);
    }
    free(dirs);
}

int main(void) {
    struct CMUnitTest tests[ARRAY_LEN(fuzz_targets) + 1] = {
        cmocka_unit_test(test_every_folder_has_a_target)};
    log_quiet = true;
    for (size_t i = 0; i < ARRAY_LEN(fuzz_targets); i++)
        tests[i + 1] = (struct CMUnitTest){.name = fuzz_targets[i].name,
                                           .test_func = test_corpus,
                                           .initial_state = (void *)(uintptr_t)&fuzz_targets[i]};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
