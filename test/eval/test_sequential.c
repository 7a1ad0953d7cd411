/*
 * test_sequential: the error rate of the sequential test holds for any number of looks, the test
 * has power, and its values equal those of a naive computation.
 *
 * Streams are simulated from fixed seeds, so the counts never change; the tolerances only bound the
 * error.
 */
/* levels: once */
#include "eval/eval.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct sequential_options default_options = {
    .alpha = 0.05, .min_pairs = 20, .max_pairs = 300};

/* a pair of scores of stream kind `kind`, where b is better by `gain` */
enum kind {
    BINARY,
    BINARY_RARE,
    BINARY_FREQUENT,
    CONTINUOUS,
    CORRELATED,
    LOPSIDED,
    DRIFTING,
    N_KINDS
};

static double bernoulli(struct rng *r, double p) {
    return (double)rng_uniform(r) < p;
}

static void pair_sample(enum kind kind, struct rng *r, int i, double gain, double *a, double *b) {
    static const double chance[N_KINDS] = {0.5, 0.05, 0.9, 0, 0.5, 0, 0};
    double p = kind == DRIFTING ? 0.1 + 0.7 * (double)i / 300 : chance[kind];
    *a = bernoulli(r, p);
    *b = bernoulli(r, p + gain);
    if (kind == CONTINUOUS) *a = (double)rng_uniform(r), *b = (double)rng_uniform(r);
    if (kind == CORRELATED && bernoulli(r, 0.8)) *b = *a; // users agree about most replies
    if (kind == LOPSIDED) { // rarely much worse, mostly a little better
        bool worse = rng_below(r, 11) == 0;
        *a = worse ? 1 : 0.4;
        *b = worse ? 0 : 0.5;
    }
}

static enum sequential_decision stream_run(const struct sequential_options *o, enum kind kind,
                                           uint32_t seed, double gain, int64_t *pairs) {
    struct sequential_test s;
    struct rng r = rng_make(seed, RNG_TEST, kind, 0);
    double a, b;
    sequential_init(&s, o);
    while (s.decision == SEQUENTIAL_CONTINUE) {
        pair_sample(kind, &r, (int)s.n, gain, &a, &b);
        sequential_add(&s, a, b);
    }
    enum sequential_decision d = s.decision;
    *pairs = s.n;
    sequential_release(&s);
    return d;
}

/* Decisions of n streams. */
static void streams_run(const struct sequential_options *o, enum kind kind, double gain, int n,
                        int count[4], double *mean_pairs) {
    memset(count, 0, 4 * sizeof *count);
    *mean_pairs = 0;
    for (int i = 0; i < n; i++) {
        int64_t pairs;
        count[stream_run(o, kind, (uint32_t)i, gain, &pairs)]++;
        *mean_pairs += (double)pairs / n;
    }
}

/* 2000 streams of each kind, tested after each of 300 pairs. At level α the expected count is at
 * most 100; 130 is three deviations more. */
static void test_false_positive_rate(void **state) {
    (void)state;
    for (enum kind kind = 0; kind < N_KINDS; kind++) {
        int count[4];
        double pairs;
        streams_run(&default_options, kind, 0, 2000, count, &pairs);
        int wrong = count[SEQUENTIAL_B_BETTER] + count[SEQUENTIAL_B_WORSE];
        print_message("kind %d: %d better, %d worse of 2000\n", kind, count[SEQUENTIAL_B_BETTER],
                      count[SEQUENTIAL_B_WORSE]);
        assert_true(wrong <= 100);
        assert_int_equal(wrong + count[SEQUENTIAL_NO_DIFFERENCE], 2000);
    }
}

/* The repetition matters: the z test, repeated, errs many times as often on the same streams.
 * Otherwise the streams would be no test. */
static void test_repeated_z_test_fails(void **state) {
    (void)state;
    int found = 0;
    for (uint32_t seed = 0; seed < 1000; seed++) {
        struct rng r = rng_make(seed, RNG_TEST, BINARY, 0);
        double a, b, sum = 0, squares = 0;
        bool any = false;
        for (int i = 0; i < 300; i++) {
            pair_sample(BINARY, &r, i, 0, &a, &b);
            sum += b - a;
            squares += (b - a) * (b - a);
            any |= i >= 19 && fabs(sum) > 1.96 * sqrt(squares);
        }
        found += any;
    }
    print_message("z test after each pair: %d of 1000\n", found);
    assert_true(found > 200);
}

static void test_power(void **state) {
    (void)state;
    struct sequential_options o = {.alpha = 0.05, .min_pairs = 20, .max_pairs = 1000};
    int count[4];
    double pairs;
    streams_run(&o, BINARY, 0.2, 1000, count, &pairs);
    print_message("0.5 against 0.7: %d of 1000, %.0f pairs\n", count[SEQUENTIAL_B_BETTER], pairs);
    assert_true(count[SEQUENTIAL_B_BETTER] >= 990 && count[SEQUENTIAL_B_WORSE] == 0);
    assert_true(pairs < 200);
    streams_run(&o, BINARY, -0.4, 1000, count, &pairs);
    print_message("0.5 against 0.1: %d of 1000, %.0f pairs\n", count[SEQUENTIAL_B_WORSE], pairs);
    assert_true(count[SEQUENTIAL_B_WORSE] == 1000 && pairs < 60);
    streams_run(&o, BINARY, 0.1, 1000, count, &pairs);
    print_message("0.5 against 0.6: %d of 1000, %.0f pairs\n", count[SEQUENTIAL_B_BETTER], pairs);
    assert_true(count[SEQUENTIAL_B_BETTER] >= 800 && count[SEQUENTIAL_B_WORSE] == 0);
}

/* naive twins */

static long double e_naive(const double *d, int n, int sign, long double mu) {
    long double sum = 0;
    for (int k = 1; k <= 8; k++) {
        long double wealth = 1;
        for (int i = 0; i < n; i++) wealth *= 1 + powl(0.5L, k) * (sign * d[i] - mu);
        sum += wealth / 8;
    }
    return sum;
}

static void near(double got, long double want, double tolerance) {
    if (!(fabsl(got - want) <= tolerance * fmaxl(1, fabsl(want))))
        fail_msg("%.12g is not %.12Lg", got, want);
}

/* The end of the interval on a grid of 1/1000. */
static double lower_naive(const double *d, int n, int sign, double bar) {
    int at = -1000;
    while (at < 1000 && e_naive(d, n, sign, at / 1000.0L) >= (long double)bar) at++;
    return at / 1000.0;
}

static void test_equals_naive(void **state) {
    (void)state;
    struct sequential_options o = {.alpha = 0.1, .min_pairs = 100, .max_pairs = 100};
    for (enum kind kind = 0; kind < N_KINDS; kind++) {
        struct sequential_test s;
        struct rng r = rng_make(77, RNG_TEST, kind, 1);
        double a, b, d[100], sum = 0;
        sequential_init(&s, &o);
        assert_true(sequential_difference(&s).lo == -1 && sequential_difference(&s).hi == 1);
        for (int n = 1; n <= 100; n++) {
            pair_sample(kind, &r, n, 0.08, &a, &b);
            sum += d[n - 1] = b - a;
            sequential_add(&s, a, b);
            near(sequential_e_value(&s, 0), e_naive(d, n, 1, 0), 1e-10);
            near(sequential_e_value(&s, 1), e_naive(d, n, -1, 0), 1e-10);
            if (n % 10) continue;
            struct stats_interval v = sequential_difference(&s);
            near(v.value, (long double)sum / n, 1e-12);
            near(v.lo, (long double)lower_naive(d, n, 1, 20), 0.00101);
            near(-v.hi, (long double)lower_naive(d, n, -1, 20), 0.00101);
        }
        sequential_release(&s);
    }
}

/* It contains the true mean at all times simultaneously: checked after every tenth pair. */
static void test_interval_covers(void **state) {
    (void)state;
    int missed = 0;
    struct sequential_options o = {.alpha = 0.05, .min_pairs = 200, .max_pairs = 200};
    for (uint32_t seed = 0; seed < 400; seed++) {
        struct sequential_test s;
        struct rng r = rng_make(seed, RNG_TEST, 3, 3);
        bool out = false;
        double a, b;
        sequential_init(&s, &o);
        for (int i = 1; i <= 200; i++) {
            pair_sample(BINARY, &r, i, 0.3, &a, &b);
            sequential_add(&s, a, b);
            struct stats_interval v = {0};
            if (i % 10 == 0) v = sequential_difference(&s);
            if (i % 10 == 0) out |= v.lo > 0.3 || v.hi < 0.3;
        }
        missed += out;
        sequential_release(&s);
    }
    print_message("true mean left out: %d of 400\n", missed);
    assert_true(missed <= 20);
}

/* The interval excludes 0 when the test decides, and not before. */
static void test_interval_and_decision_agree(void **state) {
    (void)state;
    struct sequential_options o = {.alpha = 0.05, .min_pairs = 1, .max_pairs = 500};
    for (uint32_t seed = 0; seed < 30; seed++) {
        struct sequential_test s;
        struct rng r = rng_make(seed, RNG_TEST, 9, 9);
        double a, b;
        sequential_init(&s, &o);
        do {
            pair_sample(BINARY, &r, 0, seed % 2 ? 0.35 : -0.35, &a, &b);
            sequential_add(&s, a, b);
            struct stats_interval v = sequential_difference(&s);
            assert_int_equal(v.lo > 0, s.decision == SEQUENTIAL_B_BETTER);
            assert_int_equal(v.hi < 0, s.decision == SEQUENTIAL_B_WORSE);
        } while (s.decision == SEQUENTIAL_CONTINUE);
        sequential_release(&s);
    }
}

static void test_limits(void **state) {
    (void)state;
    struct sequential_options o = {.alpha = 0.05, .min_pairs = 30, .max_pairs = 40};
    struct sequential_test s;
    sequential_init(&s, &o);
    for (int i = 0; i < 29; i++) assert_int_equal(sequential_add(&s, 0, 1), SEQUENTIAL_CONTINUE);
    assert_true(sequential_e_value(&s, 0) > sequential_threshold(&s));
    assert_int_equal(sequential_add(&s, 0, 1), SEQUENTIAL_B_BETTER);
    assert_int_equal(sequential_add(&s, 1, 0), SEQUENTIAL_B_BETTER); // changes nothing
    assert_int_equal(s.n, 30);
    sequential_release(&s);
    sequential_init(&s, &o);
    for (int i = 0; i < 39; i++) assert_int_equal(sequential_add(&s, 1, 1), SEQUENTIAL_CONTINUE);
    assert_int_equal(sequential_add(&s, 1, 1), SEQUENTIAL_NO_DIFFERENCE);
    assert_string_equal(sequential_decision_name(s.decision), "no_difference");
    sequential_release(&s);
}

/* A hundred thousand pairs with the same sign: beyond the range of a double, and still finite in
 * the result. */
static void test_long_runs_stay_finite(void **state) {
    (void)state;
    struct sequential_options o = {
        .alpha = 1e-6, .min_pairs = SEQUENTIAL_PAIRS_MAX, .max_pairs = SEQUENTIAL_PAIRS_MAX};
    struct sequential_test s;
    sequential_init(&s, &o);
    for (int i = 0; i < SEQUENTIAL_PAIRS_MAX; i++) sequential_add(&s, 1, 0);
    assert_int_equal(s.decision, SEQUENTIAL_B_WORSE);
    assert_true(isfinite(sequential_e_value(&s, 1)) && sequential_e_value(&s, 1) > 1e300);
    assert_true(sequential_e_value(&s, 0) >= 0 && sequential_e_value(&s, 0) < 1e-100);
    struct stats_interval v = sequential_difference(&s);
    assert_true(v.value == -1 && v.lo == -1 && v.hi > -1 && v.hi < -0.99);
    sequential_release(&s);
}

/* Pairs written as JSON at any moment, read and added to another test: the same bits, and the same
 * decisions afterwards. */
static void test_saved_pairs_restore_the_state(void **state) {
    (void)state;
    for (int cut = 0; cut <= 60; cut += 12) {
        struct sequential_test s, t;
        struct rng r = rng_make(5, RNG_TEST, 5, 5);
        json_t *kept = json_array(), *pair;
        size_t i;
        double a, b;
        sequential_init(&s, &default_options);
        sequential_init(&t, &default_options);
        for (int k = 0; k < cut; k++) {
            pair_sample(CONTINUOUS, &r, k, 0, &a, &b);
            sequential_add(&s, a, b);
            json_array_append_new(kept, json_pack("[f,f]", a, b));
        }
        char *text = json_canonical(kept);
        json_t *back = json_loads(text, 0, NULL);
        json_array_foreach (back, i, pair)
            sequential_add(&t, json_real_value(json_array_get(pair, 0)),
                           json_real_value(json_array_get(pair, 1)));
        do {
            pair_sample(BINARY, &r, 0, 0.3, &a, &b);
            assert_int_equal(sequential_add(&s, a, b), sequential_add(&t, a, b));
            assert_memory_equal(s.log_wealth, t.log_wealth, sizeof s.log_wealth);
        } while (s.decision == SEQUENTIAL_CONTINUE);
        free(text);
        json_decref(kept);
        json_decref(back);
        sequential_release(&s);
        sequential_release(&t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_false_positive_rate),
        cmocka_unit_test(test_repeated_z_test_fails),
        cmocka_unit_test(test_power),
        cmocka_unit_test(test_equals_naive),
        cmocka_unit_test(test_interval_covers),
        cmocka_unit_test(test_interval_and_decision_agree),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_long_runs_stay_finite),
        cmocka_unit_test(test_saved_pairs_restore_the_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
