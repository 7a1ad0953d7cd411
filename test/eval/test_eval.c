/*
 * test_eval: prompts of questions, and statistics compared with textbook values.
 *
 * Statistics are compared with published tables, hand-computed values, and simulations with Shoal's
 * rng; simulations use fixed seeds, so their numbers never change and the tolerances only bound the
 * error.
 */
#define _GNU_SOURCE
#include "eval/eval.h"

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

static void check_ids_text(const struct tokenizer *tok, const struct token_ids *ids,
                           const char *want) {
    struct buf b = {0};
    tokenizer_decode(tok, ids->v, ids->n, true, &b);
    assert_non_null(b.data);
    assert_string_equal(b.data, want);
    buf_release(&b);
}

static void test_asked(void **state) {
    (void)state;
    struct tokenizer *tok = tokenizer_new_bytes(300);
    struct task_item it = {.choices = {(char *)(uintptr_t) "7", (char *)(uintptr_t) "a b"},
                           .n_choices = 2};
    struct chat_message chat[] = {{"user", "hm?"}};
    for (int working = 0; working < 2; working++) {
        struct choice_prompt a;
        struct engine_request r;
        struct buf prompt = {0};
        assert_int_equal(choice_prompt_init(&a, tok, chat, 1, &it, working, &err), OK);
        tokenizer_decode(tok, a.prompt.v, a.prompt.n, true, &prompt);
        const char *tail = working ? "assistant\nwork:" : "assistant\nanswer:";
        assert_string_equal(prompt.data + prompt.len - strlen(tail), tail);
        assert_non_null(strstr(prompt.data, "hm?"));
        if (working)
            check_ids_text(tok, &a.suffix, "\nanswer:");
        else
            assert_int_equal(a.suffix.n, 0);
        choice_prompt_request(&a, NULL, 9, &r);
        assert_int_equal(r.max_tokens, working ? 9 : 0);
        assert_int_equal(r.n_choices, 2);
        assert_true(r.n_stop >= 1);
        int32_t end = tokenizer_piece_to_id(tok, "<|im_end|>");
        if (end < 0) end = tokenizer_eos(tok);
        assert_true(end >= 0);
        for (int i = 0; i < 2; i++) assert_int_equal(r.choices[i].v[r.choices[i].n - 1], end);
        buf_release(&prompt);
        choice_prompt_release(&a);
    }
    tokenizer_free(tok);
}

/* Newcombe 1998, table I, method 3; and the ends. */
static void test_wilson(void **state) {
    (void)state;
    static const struct {
        int64_t k, n;
        double lo, hi;
    } known[] = {{81, 263, 0.2553, 0.3662}, {15, 148, 0.0624, 0.1605}, {0, 20, 0, 0.1611},
                 {1, 29, 0.0061, 0.1718},   {5, 10, 0.2366, 0.7634},   {10, 10, 0.7225, 1}};
    for (size_t i = 0; i < ARRAY_LEN(known); i++) {
        struct stats_interval v = stats_wilson(known[i].k, known[i].n);
        close_to(v.value, (double)known[i].k / (double)known[i].n, 1e-15);
        close_to(v.lo, known[i].lo, 5e-5);
        close_to(v.hi, known[i].hi, 5e-5);
    }
    struct stats_interval none = stats_wilson(0, 0);
    assert_true(none.lo == 0 && none.hi == 1);
}

/* Pairs of which `a` are correct only in the first, `b` only in the second, the rest in both. */
static struct stats_mcnemar paired_make(int a, int b, int n) {
    uint8_t *x = xcalloc((size_t)n + 1, 1), *y = xcalloc((size_t)n + 1, 1);
    for (int i = 0; i < n; i++) {
        x[i] = i < a || i >= a + b;
        y[i] = i >= a;
    }
    struct stats_mcnemar d = stats_mcnemar(x, y, n);
    free(x);
    free(y);
    return d;
}

/* Two-sided binomial tails at 1/2, by hand: 2·(1 + 6)/2⁶, 2/2⁶, 2·(1 + 12 + 66)/2¹². */
static void test_mcnemar(void **state) {
    (void)state;
    close_to(paired_make(1, 5, 10).p, 14.0 / 64, 1e-12);
    close_to(paired_make(5, 1, 10).p, 14.0 / 64, 1e-12);
    close_to(paired_make(0, 6, 6).p, 2.0 / 64, 1e-12);
    close_to(paired_make(2, 10, 100).p, 158.0 / 4096, 1e-12);
    close_to(paired_make(1, 0, 5).p, 1, 1e-12);
    close_to(paired_make(3, 3, 9).p, 1, 1e-12);
    close_to(paired_make(0, 0, 9).p, 1, 0);
    close_to(paired_make(0, 0, 0).p, 1, 0);
    double far = paired_make(0, 3000, 3000).p;
    assert_true(far >= 0 && far < 1e-300);
    /* 60 against 40: 0.0568879 (exact binomial). */
    close_to(paired_make(60, 40, 400).p, 0.05688793, 1e-7);
}

/* The interval of counts: both, only the first, only the second, none. */
static void paired_close(int both, int a, int b, int none, int comparisons, double lo, double hi,
                         double within) {
    struct stats_mcnemar d = {.n = both + a + b + none, .both = both, .only_a = a, .only_b = b};
    struct stats_interval v = stats_paired_interval(&d, comparisons);
    close_to(v.value, (double)(a - b) / (double)d.n, 1e-12);
    close_to(v.lo, lo, within);
    close_to(v.hi, hi, within);
}

/* 36, 12, 2, 0 is an example of Newcombe 1998; the others were computed from his formulas in
 * another program. */
static void test_paired_interval(void **state) {
    (void)state;
    paired_close(36, 12, 2, 0, 1, 0.0569295840, 0.3404276030, 1e-9);
    paired_close(19, 5, 3, 20, 1, -0.0785799973, 0.1608878379, 1e-9);
    paired_close(19, 5, 3, 20, 3, -0.1030731474, 0.1841538292, 1e-4); /* 1 - 0.05 / 3 */
    paired_close(5, 54, 0, 0, 1, 0.7990959597, 0.9632579670, 1e-9);
    struct stats_mcnemar d = paired_make(6, 0, 10);
    assert_int_equal(d.both, 4);
    assert_int_equal(d.only_a, 6);
    assert_int_equal(d.only_b, 0);
    assert_int_equal(d.n, 10);
    close_to(d.diff.lo, 0.2005243216, 1e-9);
    close_to(d.diff.hi, 0.8318196703, 1e-9);
    struct stats_mcnemar back = paired_make(0, 6, 10);
    close_to(back.diff.lo, -d.diff.hi, 1e-15);
    /* n = 10 with six pairs only in the first: variance of the differences (6 - 10·0.6²)/9 */
    const uint8_t x[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, y[10] = {0, 0, 0, 0, 0, 0, 1, 1, 1, 1};
    struct stats_interval normal = stats_contribution(x, y, 10);
    close_to(normal.lo, 0.6 - 1.959963984540054 * sqrt(2.4 / 90), 1e-12);
    close_to(normal.hi, 0.6 + 1.959963984540054 * sqrt(2.4 / 90), 1e-12);
    struct stats_interval same = paired_make(0, 0, 7).diff;
    assert_true(same.value == 0);
    close_to(same.lo, -0.3543304351, 1e-9);
    close_to(same.hi, 0.3543304351, 1e-9);
    for (int n = 1; n <= 12; n++)
        for (int a = 0; a <= n; a++)
            for (int b = 0; a + b <= n; b++) {
                struct stats_interval v = paired_make(a, b, n).diff;
                assert_true(v.lo >= -1 && v.hi <= 1 && v.lo <= v.value && v.value <= v.hi);
            }
}

/* Printed quantiles of the normal distribution. */
static void test_upper_quantile(void **state) {
    (void)state;
    close_to(stats_upper_quantile(0.025), 1.959964, 4.5e-4);
    close_to(stats_upper_quantile(0.005), 2.575829, 4.5e-4);
    close_to(stats_upper_quantile(0.0005), 3.290527, 4.5e-4);
    close_to(stats_upper_quantile(0.5), 0, 4.5e-4);
}

/* A mean of one value has no interval. */
static void test_mean_json(void **state) {
    (void)state;
    const double v[] = {0.25, 0.75};
    json_t *one = stats_mean_json(stats_mean_interval(v, 1), 1),
           *two = stats_mean_json(stats_mean_interval(v, 2), 2);
    assert_true(json_is_null(json_object_get(one, "lo")) &&
                json_is_null(json_object_get(one, "hi")));
    assert_true(json_number_value(json_object_get(one, "value")) == 0.25);
    assert_true(json_number_value(json_object_get(two, "lo")) < 0.5);
    json_decref(one);
    json_decref(two);
}

static void test_holm(void **state) {
    (void)state;
    const double p[] = {0.01, 0.04, 0.03, 0.005}, want[] = {0.03, 0.06, 0.06, 0.02};
    double got[4], one[] = {0.7, 0.7}, ones[2];
    stats_holm(p, 4, got);
    for (int i = 0; i < 4; i++) close_to(got[i], want[i], 1e-15);
    stats_holm(one, 2, ones);
    assert_true(ones[0] == 1 && ones[1] == 1);
    stats_holm(p, 1, got);
    close_to(got[0], 0.01, 0);
    stats_holm(p, 0, got);
}

/* The t quantiles of printed tables, recovered from the interval's half width over its standard
 * error. */
static void test_mean(void **state) {
    (void)state;
    static const struct {
        int dof;
        double t;
    } known[] = {{1, 12.7062}, {2, 4.3027},  {3, 3.1824},  {4, 2.7764},
                 {5, 2.5706},  {10, 2.2281}, {30, 2.0423}, {1000, 1.9623}};
    double v[1001];
    for (size_t i = 0; i < ARRAY_LEN(known); i++) {
        int n = known[i].dof + 1;
        double mean = 0, dev = 0;
        for (int k = 0; k < n; k++) mean += v[k] = 3 + k * k % 17;
        mean /= n;
        for (int k = 0; k < n; k++) dev += (v[k] - mean) * (v[k] - mean);
        struct stats_interval m = stats_mean_interval(v, n);
        close_to(m.value, mean, 1e-12);
        close_to((m.hi - m.lo) / 2 / sqrt(dev / (n - 1) / n), known[i].t, known[i].t * 0.0015);
        close_to(m.hi - m.value, m.value - m.lo, 1e-12);
    }
    struct stats_interval one = stats_mean_interval(v, 1);
    assert_true(one.value == v[0] && one.lo == v[0] && one.hi == v[0]);
}

enum { SIMS = 3000 };

static void test_wilson_covers(void **state) {
    (void)state;
    static const double ps[] = {0.1, 0.5, 0.9};
    for (uint32_t k = 0; k < ARRAY_LEN(ps); k++) {
        int covered = 0;
        for (uint32_t s = 0; s < SIMS; s++) {
            struct rng r = rng_make(1, RNG_TEST, k, s);
            int64_t right = 0;
            for (int i = 0; i < 60; i++) right += (double)rng_uniform(&r) < ps[k];
            struct stats_interval v = stats_wilson(right, 60);
            covered += v.lo <= ps[k] && ps[k] <= v.hi;
        }
        close_to((double)covered / SIMS, 0.95, 0.025);
    }
}

static void test_mean_covers(void **state) {
    (void)state;
    int covered = 0;
    for (uint32_t s = 0; s < SIMS; s++) {
        struct rng r = rng_make(2, RNG_TEST, 0, s);
        double v[6];
        for (int i = 0; i < 6; i++) v[i] = 4 + 2 * (double)rng_normal(&r);
        struct stats_interval m = stats_mean_interval(v, 6);
        covered += m.lo <= 4 && 4 <= m.hi;
    }
    close_to((double)covered / SIMS, 0.95, 0.012);
}

/* n pairs of which the fraction `discordant` differs, with a true difference of `diff`. */
static struct stats_mcnemar paired_draw(uint32_t sim, int n, double discordant, double diff) {
    struct rng r = rng_make(3, RNG_TEST, (uint32_t)(1000 * diff), sim);
    uint8_t a[512], b[512];
    CHECK(n <= 512);
    for (int i = 0; i < n; i++) {
        double u = (double)rng_uniform(&r);
        a[i] = u < (discordant + diff) / 2 || u >= discordant;
        b[i] = u >= (discordant + diff) / 2;
    }
    return stats_mcnemar(a, b, n);
}

/* At the detectable difference the test's power is 80 %; without a difference its error is at most
 * 5 %. */
static void test_detectable(void **state) {
    (void)state;
    double diff = stats_min_detectable_effect(400, 0.3);
    int found = 0, false_alarms = 0, covered = 0;
    for (uint32_t s = 0; s < SIMS; s++) {
        struct stats_mcnemar there = paired_draw(s, 400, 0.3, diff);
        found += there.p < 0.05 && there.diff.value > 0;
        covered += there.diff.lo <= diff && diff <= there.diff.hi;
        false_alarms += paired_draw(s, 400, 0.3, 0).p < 0.05;
    }
    close_to((double)found / SIMS, 0.8, 0.05);
    close_to((double)covered / SIMS, 0.95, 0.012);
    assert_true(false_alarms <= SIMS * 0.055);
    close_to(stats_min_detectable_effect(1600, 0.3), diff / 2, 1e-12);
    close_to(stats_min_detectable_effect(0, 0.3), 1, 0);
    assert_true(stats_min_detectable_effect(1, 1) <= 1);
}

/* Clusters of five equal values: the interval must be as wide as that of a fifth as many values. */
static void test_cluster_bootstrap(void **state) {
    (void)state;
    enum { CLUSTERS = 60, EACH = 5, SIMULATED = 400 };
    int covered = 0, covered_alone = 0;
    double v[CLUSTERS * EACH];
    int32_t cluster[CLUSTERS * EACH], alone[CLUSTERS * EACH];
    for (uint32_t s = 0; s < SIMULATED; s++) {
        struct rng r = rng_make(4, RNG_TEST, 0, s);
        for (int32_t i = 0; i < CLUSTERS * EACH; i++) {
            alone[i] = i;
            cluster[i] = i / EACH;
            v[i] = i % EACH ? v[i - 1] : (double)((double)rng_uniform(&r) < 0.6);
        }
        struct stats_interval c = stats_cluster_bootstrap(v, cluster, CLUSTERS * EACH, CLUSTERS, s),
                              a = stats_cluster_bootstrap(v, alone, CLUSTERS * EACH,
                                                          CLUSTERS * EACH, s);
        close_to(c.value, a.value, 1e-12);
        covered += c.lo <= 0.6 && 0.6 <= c.hi;
        covered_alone += a.lo <= 0.6 && 0.6 <= a.hi;
    }
    close_to((double)covered / SIMULATED, 0.95, 0.03);
    assert_true(covered_alone < SIMULATED * 0.8); // the coverage if clusters are ignored
}

/* As many clusters as values: the bootstrap draws values, and agrees with the t interval. */
static void test_bootstrap_of_values(void **state) {
    (void)state;
    double v[500];
    int32_t own[500];
    struct rng r = rng_make(5, RNG_TEST, 0, 0);
    for (int32_t i = 0; i < 500; i++) {
        v[i] = (double)rng_normal(&r);
        own[i] = i;
    }
    struct stats_interval b = stats_cluster_bootstrap(v, own, 500, 500, 1),
                          t = stats_mean_interval(v, 500),
                          again = stats_cluster_bootstrap(v, own, 500, 500, 1),
                          other = stats_cluster_bootstrap(v, own, 500, 500, 2);
    close_to(b.lo, t.lo, 0.012);
    close_to(b.hi, t.hi, 0.012);
    assert_memory_equal(&b, &again, sizeof b);
    assert_true(other.lo != b.lo);
    struct stats_interval none = stats_cluster_bootstrap(v, own, 0, 0, 1);
    assert_true(none.lo == 0 && none.hi == 0);
}

/* n values of which k are 1 and the rest 0: the 90 % interval is k/n ± 1.6449·sd/√n. */
static void test_equivalent(void **state) {
    (void)state;
    double v[4000] = {0};
    assert_true(stats_tost(v, 4000, 0.02)); // no difference at all
    assert_false(stats_tost(v, 1, 0.02));
    for (int i = 0; i < 65; i++) v[i] = 1; // 0.01625 + 1.6449·0.12643/√4000 = 0.01954
    assert_true(stats_tost(v, 4000, 0.02));
    for (int i = 65; i < 70; i++) v[i] = 1; // 0.0175 + 0.00341
    assert_false(stats_tost(v, 4000, 0.02));
    for (int i = 0; i < 70; i++) v[i] = -v[i];
    assert_false(stats_tost(v, 4000, 0.02));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cluster_bootstrap),
        cmocka_unit_test(test_bootstrap_of_values),
        cmocka_unit_test(test_equivalent),
        cmocka_unit_test(test_asked),
        cmocka_unit_test(test_wilson),
        cmocka_unit_test(test_mcnemar),
        cmocka_unit_test(test_paired_interval),
        cmocka_unit_test(test_upper_quantile),
        cmocka_unit_test(test_mean_json),
        cmocka_unit_test(test_holm),
        cmocka_unit_test(test_mean),
        cmocka_unit_test(test_wilson_covers),
        cmocka_unit_test(test_mean_covers),
        cmocka_unit_test(test_detectable),
    };
    return cmocka_run_group_tests(tests, quiet, NULL);
}
