/*
 * test_grammars: the cache of compiled grammars: compilation once per source, refusals while others
 * compile, eviction by caller, and the bound for large sources. Tests use counts, not time.
 */
/* levels: once */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "serve/grammar_cache.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct grammar *get(struct grammar_cache *all, const char *caller, const char *text) {
    struct error err = {0};
    struct grammar *g = grammar_cache_get(all, caller, "regex", text, strlen(text), &err);
    if (!g) fail_msg("'%s': %s", text, err.text);
    return g;
}

static void test_shared(void **state) {
    (void)state;
    struct grammar_cache *all = grammar_cache_new(NULL);
    struct grammar *a = get(all, "x", "a+"), *b = get(all, "y", "a+");
    assert_ptr_equal(a, b);
    grammar_cache_release(all, a);
    grammar_cache_release(all, b);
    assert_ptr_equal(get(all, "z", "a+"), a);
    grammar_cache_release(all, a);
    assert_int_equal(grammar_cache_stats(all).compiled, 1);
    assert_int_equal(grammar_cache_stats(all).in_use, 0);
    grammar_cache_free(all);
}

/* One caller's thousand grammars evict none of another's. */
static void test_eviction(void **state) {
    (void)state;
    struct grammar_cache *all =
        grammar_cache_new(&(struct grammar_cache_options){.max_entries = 16});
    char text[32];
    for (int i = 0; i < 4; i++) {
        snprintf(text, sizeof text, "mine%d", i);
        grammar_cache_release(all, get(all, "quiet", text));
    }
    for (int i = 0; i < 1000; i++) {
        snprintf(text, sizeof text, "flood%d", i);
        grammar_cache_release(all, get(all, "loud", text));
        assert_true(grammar_cache_stats(all).kept <= 17);
    }
    uint64_t before = grammar_cache_stats(all).compiled;
    for (int i = 0; i < 4; i++) {
        snprintf(text, sizeof text, "mine%d", i);
        grammar_cache_release(all, get(all, "quiet", text));
    }
    assert_int_equal(grammar_cache_stats(all).compiled, before);
    grammar_cache_free(all);
}

/* Grammars in use have a limit too, one caller half of it; beyond it the cache refuses with a
 * retry. */
static void test_bytes(void **state) {
    (void)state;
    struct grammar_cache *all =
        grammar_cache_new(&(struct grammar_cache_options){.bytes = 4 << 20});
    struct grammar *held[100];
    struct error err = {0};
    char text[32];
    int n = 0;
    for (; n < 100; n++) {
        snprintf(text, sizeof text, "[a-z]{1,%d}", 5000 + n);
        if (!(held[n] = grammar_cache_get(all, "loud", "regex", text, strlen(text), &err))) break;
    }
    assert_true(n > 0 && n < 100);
    assert_int_equal(err.code, ERR_STATE);
    assert_true(grammar_cache_stats(all).bytes <= 2 << 20);
    struct grammar *other = get(all, "quiet", "[0-9]{1,5000}");
    grammar_cache_release(all, other);
    while (n > 0) grammar_cache_release(all, held[--n]);
    grammar_cache_release(all, get(all, "loud", text));
    assert_true(grammar_cache_stats(all).bytes <= 4 << 20);
    grammar_cache_free(all);
}

struct requester {
    struct grammar_cache *all;
    char text[64], caller[16];
    struct grammar *g;
    struct error err;
};

static void *request_grammar(void *ctx) {
    struct requester *a = ctx;
    a->g = grammar_cache_get(a->all, a->caller, "regex", a->text, strlen(a->text), &a->err);
    return NULL;
}

/* Many at once: each call returns a grammar or the code for a retry; afterwards all are available.
 */
static void test_places(void **state) {
    (void)state;
    enum { N = 24 };
    struct grammar_cache *all = grammar_cache_new(&(struct grammar_cache_options){
        .compile_threads = 1, .max_waiting = 2, .max_waiting_per_caller = 1});
    static struct requester requesters[N];
    pthread_t threads[N];
    for (int i = 0; i < N; i++) {
        requesters[i] = (struct requester){.all = all};
        snprintf(requesters[i].text, sizeof requesters[i].text, "([a-z]{1,%d}|[0-9]{1,50000})",
                 50000 + i);
        snprintf(requesters[i].caller, sizeof requesters[i].caller, "%d", i % 4);
        assert_int_equal(pthread_create(&threads[i], NULL, request_grammar, &requesters[i]), 0);
    }
    int n_compiled = 0;
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        if (!requesters[i].g) assert_int_equal(requesters[i].err.code, ERR_STATE);
        if (requesters[i].g) grammar_cache_release(all, requesters[i].g), n_compiled++;
    }
    assert_true(n_compiled > 0);
    for (int i = 0; i < N; i++) {
        request_grammar(&requesters[i]);
        if (!requesters[i].g) fail_msg("%s", requesters[i].err.text);
        grammar_cache_release(all, requesters[i].g);
    }
    grammar_cache_free(all);
}

static void test_refused(void **state) {
    (void)state;
    struct grammar_cache *all = grammar_cache_new(NULL);
    struct error err;
    assert_null(grammar_cache_get(all, "x", "regex", "(", 1, &err));
    assert_int_equal(err.code, ERR_USAGE);
    char *huge = xcalloc(300000, 1);
    memset(huge, 'a', 299999);
    assert_null(grammar_cache_get(all, "x", "regex", huge, 299999, &err));
    assert_int_equal(err.code, ERR_USAGE);
    free(huge);
    // a source that exceeds every share is refused permanently, with the reason
    const char *large = "(([a-z]{60000}x){2}|[0-9]{60000}){3}(é{60000})";
    assert_null(grammar_cache_get(all, "x", "regex", large, strlen(large), &err));
    assert_int_equal(err.code, ERR_USAGE);
    assert_non_null(strstr(err.text, "too large"));
    assert_int_equal(grammar_cache_stats(all).kept, 0);
    assert_int_equal(grammar_cache_stats(all).compiled, 0);
    grammar_cache_free(all);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared),  cmocka_unit_test(test_eviction),
        cmocka_unit_test(test_bytes),   cmocka_unit_test(test_places),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
