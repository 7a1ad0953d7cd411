/*
 * test_memory_budget: reservations of requests add up, never exceed the budget with any number of
 * threads, and are released with their owners.
 */
/* levels: once */
#define _GNU_SOURCE
#include "serve/memory_budget.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void test_limits(void **state) {
    struct memory_budget *b = memory_budget_new(1000);
    int owners[3];
    struct error err;
    (void)state;
    assert_int_equal(memory_budget_owner_max(b), 500);
    assert_int_equal(memory_budget_reserve(b, &owners[0], 501, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "--max-request-memory"));
    assert_int_equal(memory_budget_reserve(b, &owners[0], 500, &err), OK);
    assert_int_equal(memory_budget_reserve(b, &owners[0], 1, &err), ERR_USAGE);
    assert_int_equal(memory_budget_reserve(b, &owners[1], 300, &err), OK);
    assert_int_equal(memory_budget_reserve(b, &owners[2], 201, &err), ERR_STATE);
    assert_int_equal(memory_budget_reserve(b, &owners[2], 200, &err), OK);
    assert_int_equal(memory_budget_set(b, &owners[1], 301, &err), ERR_STATE);
    assert_int_equal(memory_budget_reserved(b, &owners[1]), 300); // as it was
    assert_int_equal(memory_budget_set(b, &owners[1], 10, &err), OK);
    assert_int_equal(memory_budget_reserve(b, &owners[2], 290, &err), OK);
    assert_int_equal(memory_budget_reserve(b, &owners[2], SIZE_MAX, &err), ERR_USAGE);
    memory_budget_transfer(b, &owners[1], &owners[2], 4);
    assert_int_equal(memory_budget_reserved(b, &owners[1]), 6);
    assert_int_equal(memory_budget_reserved(b, &owners[2]), 494);
    memory_budget_transfer(b, &owners[2], &owners[1], SIZE_MAX);
    assert_int_equal(memory_budget_reserved(b, &owners[1]), 500);
    memory_budget_transfer(b, b, &owners[2], 7); // which has none
    assert_int_equal(memory_budget_reserved(b, &owners[2]), 0);
    struct memory_budget_stats s = memory_budget_stats(b);
    assert_int_equal(s.used, 1000);
    assert_int_equal(s.peak, 1000);
    assert_int_equal(s.owners, 3);
    assert_int_equal(s.refused, 5);
    for (int i = 0; i < 3; i++) memory_budget_release(b, &owners[i]);
    memory_budget_release(b, &owners[0]); // twice is fine
    assert_int_equal(memory_budget_stats(b).used, 0);
    assert_int_equal(memory_budget_stats(b).owners, 0);
    memory_budget_free(b);
}

enum { THREADS = 8, ROUNDS = 4000, MOST = 10000 };
static struct memory_budget *shared;
static char keys[THREADS][ROUNDS];

static void *thread(void *ctx) {
    struct rng r = rng_make((uint64_t)(uintptr_t)ctx, RNG_TEST, 0, 0);
    char *own = keys[(uintptr_t)ctx];
    struct error err;
    intptr_t bad = 0;
    for (int i = 0; i < ROUNDS; i++) {
        size_t bytes = 1 + rng_below(&r, MOST / 3), more = rng_below(&r, MOST / 3);
        bool got = memory_budget_reserve(shared, &own[i], bytes, &err) == OK;
        if (got && memory_budget_set(shared, &own[i], more, &err) == OK) bytes = more;
        struct memory_budget_stats s = memory_budget_stats(shared);
        bad += s.used > MOST || memory_budget_reserved(shared, &own[i]) != (got ? bytes : 0);
        if (i % 7) memory_budget_release(shared, &own[i]);
        if (i % 7 == 0 && i > 70) memory_budget_release(shared, &own[i - 70]);
    }
    for (int i = 0; i < ROUNDS; i++) memory_budget_release(shared, &own[i]);
    return (void *)bad;
}

static void test_threads(void **state) {
    pthread_t threads[THREADS];
    (void)state;
    shared = memory_budget_new(MOST);
    for (uintptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, thread, (void *)i), 0);
    for (int i = 0; i < THREADS; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        assert_null(bad);
    }
    assert_int_equal(memory_budget_stats(shared).used, 0);
    assert_int_equal(memory_budget_stats(shared).owners, 0);
    assert_true(memory_budget_stats(shared).peak > MOST / 2);
    memory_budget_free(shared);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
