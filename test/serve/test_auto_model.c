/*
 * test_auto_model: the choice of the model auto from its scores: ties, missing scores, one
 * candidate, none; the score of a prompt.
 */
/* levels: once */
#include "serve/auto_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

static void test_best(void **state) {
    const double none = (double)NAN, low = -(double)INFINITY;
    (void)state;
    assert_int_equal(score_best((double[]){-3, -1, -2}, 3), 1);
    assert_int_equal(score_best((double[]){-1, -1, -1}, 3), 0); // the base is the first candidate
    assert_int_equal(score_best((double[]){-2, -1, -1}, 3), 1);
    assert_int_equal(score_best((double[]){0.0, -0.0}, 2), 0);
    assert_int_equal(score_best((double[]){none, -5, none}, 3), 1);
    assert_int_equal(score_best((double[]){none, low}, 2), 1);
    assert_int_equal(score_best((double[]){-7}, 1), 0);
    assert_int_equal(score_best((double[]){none, none}, 2), -1);
    assert_int_equal(score_best((double[]){0}, 0), -1);
}

static void test_mean(void **state) {
    (void)state;
    // the first token has no log-probability
    assert_true(prompt_mean_logprob((float[]){9, -1, -2}, 3) == -1.5);
    assert_true(prompt_mean_logprob((float[]){0, -0.25f}, 2) == -0.25);
    assert_true(isnan(prompt_mean_logprob((float[]){0}, 1)));
    // a float cannot hold 2^24 + 1: the sum is a double
    assert_true(prompt_mean_logprob((float[]){0, -16777216, -1}, 3) == -16777217 / 2.0);
    assert_true(prompt_mean_logprob((float[]){0, -INFINITY}, 2) == -(double)INFINITY);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_best),
        cmocka_unit_test(test_mean),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
