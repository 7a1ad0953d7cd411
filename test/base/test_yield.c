/*
 * test_yield: when a background task has to wait, by a simulated clock; the ends of its wait; and
 * a pool with a gate: it computes what a pool without one computes, in the smallest chunks.
 */
/* levels: once */
#define _GNU_SOURCE
#include "base/base.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static double now;

static double clock_simulated(void) {
    return now;
}

static void assert_delay(struct yield_task *t, double want) {
    double delay = yield_task_delay(t);
    if (!(fabs(delay - want) < 1e-9)) fail_msg("a delay of %g, not %g", delay, want);
}

static void test_turns(void **state) {
    struct yield *y = yield_new(0.25, clock_simulated);
    struct yield_task t = {.y = y};
    (void)state;
    now = 1000;
    assert_delay(&t, 0);
    yield_foreground(y, true);
    assert_delay(&t, 0.15);
    now += 0.1;
    assert_delay(&t, 0.05);
    now += 0.07; // the turn, the last 0.05 seconds of 0.2
    assert_delay(&t, 0);
    now += 0.02; // 0.19
    yield_foreground(y, true);
    yield_foreground(y, false); // the first of two overlapping works continues
    assert_delay(&t, 0);
    now += 0.02; // 0.21: the next period
    assert_delay(&t, 0.14);
    yield_foreground(y, false);
    assert_delay(&t, 0);
    now += 50; // this time does not count
    yield_foreground(y, true);
    assert_delay(&t, 0.14);
    yield_foreground(y, false);
    yield_free(y);
}

/* Many short works, each shorter than the time before a turn. */
static void test_short_work_does_not_postpone_turns(void **state) {
    struct yield *y = yield_new(0.1, clock_simulated);
    struct yield_task t = {.y = y};
    int turns = 0;
    (void)state;
    for (int i = 0; i < 1000; i++) {
        yield_foreground(y, true);
        now += 0.005;
        turns += yield_task_delay(&t) == 0;
        now += 0.005;
        yield_foreground(y, false);
        now += 0.0001;
    }
    assert_in_range(turns, 90, 110);
    yield_free(y);
}

static void test_shares(void **state) {
    (void)state;
    for (int share = 0; share <= 1; share++) {
        struct yield *y = yield_new(share, clock_simulated);
        struct yield_task t = {.y = y}, normal = {.y = y, .normal = true};
        yield_foreground(y, true);
        for (int i = 0; i < 100; i++, now += 0.0137) {
            assert_int_equal(yield_task_delay(&t) == 0, share);
            assert_delay(&normal, 0);
        }
        yield_task_hold(&normal, true);
        assert_true(isinf(yield_task_delay(&normal)));
        yield_task_end(&normal);
        assert_delay(&normal, 0);
        yield_task_end(&t);
        assert_delay(&t, 0);
        yield_foreground(y, false);
        yield_free(y);
    }
}

static void test_hold(void **state) {
    struct yield *y = yield_new(0, clock_simulated);
    struct yield_task t = {.y = y}, other = {.y = y};
    (void)state;
    yield_task_hold(&t, true);
    assert_true(isinf(yield_task_delay(&t)));
    assert_delay(&other, 0);
    yield_task_hold(&t, false);
    assert_delay(&t, 0);
    yield_task_wait(&t); // returns at once
    yield_free(y);
}

struct waiting {
    struct yield_task *t;
    atomic_bool over;
};

static void *waiting_main(void *ctx) {
    struct waiting *w = ctx;
    yield_task_wait(w->t);
    atomic_store(&w->over, true);
    return NULL;
}

/* Each of the three ends of a wait wakes the thread: otherwise the join would not return. The
 * thread cannot have passed before, because nothing but that end lets it. */
static void test_wait_ends(void **state) {
    (void)state;
    for (int end = 0; end < 3; end++) {
        struct yield *y = yield_new(0, clock_now);
        struct yield_task t = {.y = y};
        struct waiting w = {.t = &t};
        pthread_t thread;
        if (end == 1)
            yield_task_hold(&t, true);
        else
            yield_foreground(y, true);
        assert_int_equal(pthread_create(&thread, NULL, waiting_main, &w), 0);
        for (int i = 0; i < 1000; i++) assert_false(atomic_load(&w.over));
        if (end == 0) yield_foreground(y, false);
        if (end == 1) yield_task_hold(&t, false);
        if (end == 2) yield_task_end(&t);
        pthread_join(thread, NULL);
        assert_true(atomic_load(&w.over));
        if (end == 2) yield_foreground(y, false);
        yield_free(y);
    }
}

struct work {
    atomic_int passed; /* calls of the gate */
    atomic_int calls;
    int largest; /* items of the largest chunk, if there is one thread */
    double out[100];
};

static void gate_count(void *ctx) {
    atomic_fetch_add(&((struct work *)ctx)->passed, 1);
}

static void work_items(void *ctx, int64_t begin, int64_t end, int thread) {
    struct work *w = ctx;
    if (thread == 0) w->largest = MAX(w->largest, (int)(end - begin));
    atomic_fetch_add(&w->calls, 1);
    for (int64_t i = begin; i < end; i++) w->out[i] += (double)i;
}

static void test_gate(void **state) {
    (void)state;
    for (int threads = 1; threads <= 3; threads++) {
        for (int n = 1; n <= 100; n += 9) {
            struct pool *pool = pool_new(threads);
            struct work w = {0};
            pool_set_gate(pool, gate_count, &w);
            pool_run(pool, work_items, &w, n, 8);
            int chunks = (n + 7) / 8;
            assert_int_equal(atomic_load(&w.calls), chunks);
            assert_true(atomic_load(&w.passed) >= chunks);
            assert_true(w.largest <= 8);
            for (int i = 0; i < n; i++) assert_true(w.out[i] == (double)i);
            pool_free(pool);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_turns),     cmocka_unit_test(test_short_work_does_not_postpone_turns),
        cmocka_unit_test(test_shares),    cmocka_unit_test(test_hold),
        cmocka_unit_test(test_wait_ends), cmocka_unit_test(test_gate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
