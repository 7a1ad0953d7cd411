/*
 * test_autoscale: decisions of the autoscaler in single events and over simulated loads, predictors
 * and back-tests against values computed by hand, recorded loads, pages of metrics, YAML.
 *
 * A simulated load is a seed: a constant, a step, a ramp, a wave or bursts, with noise. The targets
 * and the command are in test_autoscale.sh.
 */
/* levels: once */
#define _GNU_SOURCE
#include "base/base.h"

#include "ops/ops.h"
#include "scaling/scaling.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;

static struct scaling_options options_new(void) {
    struct scaling_options o;
    options_default(scaling_option_rows, &o);
    return o;
}

static void options_free(struct scaling_options *o) {
    options_release(scaling_option_rows, o);
}

static void text_set(char **at, const char *text) {
    free(*at);
    *at = xstrdup(text);
}

/* single decisions */

static void test_defaults(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    assert_int_equal(scaling_options_check(&o, &err), OK);
    assert_string_equal(o.strategy, "hybrid");
    assert_true(o.scale_out == 0.6 && o.out_cooldown == 300 && o.in_cooldown == 600);
    assert_true(o.min_nodes == 1 && o.max_nodes == 10);
    const struct scaling_load l = {0.5, 0.6, 0.9};
    assert_true(fabs(scaling_score(&o, &l) - (0.4 * 0.5 + 0.3 * 0.6 + 0.3 * 0.9)) < 1e-12);
    text_set(&o.strategy, "queue");
    assert_true(scaling_score(&o, &(struct scaling_load){NAN, NAN, 0.9}) == 0.9);
    options_free(&o);
}

/* score: all three inputs. demand: the predicted one; 0: none. since_out, since_change: seconds
 * since the last scale-out and the last change; 0: never. */
static const struct decision_case {
    const char *name;
    double score;
    int nodes;
    double demand, since_out, since_change;
    enum scaling_action action;
    enum scaling_reason reason;
    int to;
} decision_cases[] = {
    {"between the thresholds", 0.5, 3, 0, 0, 0, SCALING_HOLD, SCALING_STEADY, 3},
    {"at the upper threshold", 0.6, 3, 0, 0, 0, SCALING_HOLD, SCALING_STEADY, 3},
    {"above it", 0.61, 3, 0, 0, 0, SCALING_OUT, SCALING_HIGH, 4},
    {"above it, within the cooldown", 0.9, 3, 0, 299, 299, SCALING_HOLD, SCALING_COOLDOWN, 3},
    {"above it, after the cooldown", 0.9, 3, 0, 300, 300, SCALING_OUT, SCALING_HIGH, 4},
    {"above it, soon after a scale-in", 0.9, 3, 0, 0, 10, SCALING_OUT, SCALING_HIGH, 4},
    {"above it, at the maximum", 0.9, 10, 0, 0, 0, SCALING_HOLD, SCALING_MAXIMUM, 10},
    {"above the maximum", 0.9, 12, 0, 1, 1, SCALING_IN, SCALING_OUT_OF_RANGE, 10},
    {"below the minimum", 0.1, 0, 0, 1, 1, SCALING_OUT, SCALING_OUT_OF_RANGE, 1},
    {"low", 0.2, 3, 0, 0, 0, SCALING_IN, SCALING_LOW, 2},
    {"at the lower threshold", 0.3, 3, 0, 0, 0, SCALING_HOLD, SCALING_STEADY, 3},
    {"low, within the cooldown", 0.2, 3, 0, 599, 599, SCALING_HOLD, SCALING_COOLDOWN, 3},
    {"low, after the cooldown", 0.2, 3, 0, 600, 600, SCALING_IN, SCALING_LOW, 2},
    {"low, soon after a scale-in", 0.2, 3, 0, 0, 10, SCALING_HOLD, SCALING_COOLDOWN, 3},
    {"low, at the minimum", 0.1, 1, 0, 0, 0, SCALING_HOLD, SCALING_MINIMUM, 1},
    {"too much for the other one", 0.28, 2, 0, 0, 0, SCALING_HOLD, SCALING_REMAINING, 2},
    {"no load", NAN, 3, 0, 0, 0, SCALING_HOLD, SCALING_NO_LOAD, 3},
    {"a predicted rise", 0.5, 2, 1.5, 0, 0, SCALING_OUT, SCALING_PREDICTED, 3},
    {"a steep predicted rise", 0.5, 2, 3.1, 0, 0, SCALING_OUT, SCALING_PREDICTED, 6},
    {"a predicted rise beyond the maximum", 0.7, 8, 99, 0, 0, SCALING_OUT, SCALING_HIGH, 10},
    {"a predicted rise within the cooldown", 0.5, 2, 3, 5, 5, SCALING_HOLD, SCALING_COOLDOWN, 2},
    {"high, and a predicted fall", 0.7, 2, 0.2, 0, 0, SCALING_OUT, SCALING_HIGH, 3},
    {"low, and a predicted return", 0.1, 3, 1.2, 0, 0, SCALING_HOLD, SCALING_LOW_EXPECTED, 3},
    {"low, and predicted low", 0.1, 3, 0.3, 0, 0, SCALING_IN, SCALING_LOW, 2},
};

static void test_decisions(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    for (size_t i = 0; i < ARRAY_LEN(decision_cases); i++) {
        const struct decision_case *c = &decision_cases[i];
        struct scaling_state s;
        scaling_init(&s);
        if (c->since_out > 0) s.last_out = 1e6 - c->since_out;
        if (c->since_change > 0) s.last_change = 1e6 - c->since_change;
        const struct scaling_event e = {.kind = SCALING_LOAD,
                                        .now = 1e6,
                                        .nodes = c->nodes,
                                        .load = {c->score, c->score, c->score},
                                        .predictor = c->demand > 0 ? "test" : NULL,
                                        .demand = c->demand > 0 ? c->demand : NAN};
        struct scaling_decision d = scaling_step(&o, &s, &e);
        if (d.action != c->action || d.reason != c->reason || d.to != c->to)
            fail_msg("%s: %s, %s, %d -> %d", c->name, scaling_action_names[d.action],
                     scaling_reason_names[d.reason], d.from, d.to);
        if (d.action != SCALING_HOLD) assert_true(s.last_change == 1e6);
        assert_true((s.last_out == 1e6) == (d.action == SCALING_OUT));
    }
    options_free(&o);
}

/* With the strategy cpu the CPU's target is the threshold; with hybrid it prevents a scale-in. */
static void test_target_cpu(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    struct scaling_state s;
    struct scaling_event e = {.kind = SCALING_LOAD, .nodes = 2, .load = {0.4, 0, 0}};
    scaling_init(&s);
    assert_int_equal(scaling_step(&o, &s, &e).reason, SCALING_REMAINING); // 0.8 on one node
    text_set(&o.strategy, "cpu");
    e.load.cpu = 0.69;
    assert_int_equal(scaling_step(&o, &s, &e).reason, SCALING_STEADY);
    e.load.cpu = 0.71;
    assert_int_equal(scaling_step(&o, &s, &e).action, SCALING_OUT);
    options_free(&o);
}

/* A load that was too high for a scale-in within the cooldown prevents it. */
static void test_recent_load(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    struct scaling_state s;
    struct scaling_event e = {
        .kind = SCALING_LOAD, .now = 1000, .nodes = 3, .load = {0.4, 0.4, 0.4}};
    scaling_init(&s);
    assert_int_equal(scaling_step(&o, &s, &e).reason, SCALING_STEADY);
    e.load = (struct scaling_load){0.1, 0.1, 0.1};
    e.now = 1599;
    assert_int_equal(scaling_step(&o, &s, &e).reason, SCALING_RECENT_LOAD);
    e.now = 1600;
    assert_int_equal(scaling_step(&o, &s, &e).action, SCALING_IN);
    options_free(&o);
}

static void test_failed_decision(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    struct scaling_state s;
    struct scaling_event e = {.kind = SCALING_LOAD, .now = 1000, .nodes = 2, .load = {1, 1, 1}};
    scaling_init(&s);
    assert_int_equal(scaling_step(&o, &s, &e).action, SCALING_OUT);
    scaling_step(&o, &s, &(struct scaling_event){.kind = SCALING_FAILED});
    e.now = 1060;
    assert_int_equal(scaling_step(&o, &s, &e).action, SCALING_OUT);
    e.now = 1120;
    assert_int_equal(scaling_step(&o, &s, &e).reason, SCALING_COOLDOWN);
    scaling_step(&o, &s, &(struct scaling_event){.kind = SCALING_FAILED}); // no effect after a hold
    e.now = 1180;
    assert_int_equal(scaling_step(&o, &s, &e).reason, SCALING_COOLDOWN);
    options_free(&o);
}

static void test_wrong_options(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    o.min_nodes = 11;
    assert_int_equal(scaling_options_check(&o, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "--min-nodes 11 is above --max-nodes 10"));
    o.min_nodes = 1;
    o.scale_in = 0.6;
    assert_int_equal(scaling_options_check(&o, &err), ERR_USAGE);
    o.scale_in = 0.3;
    o.season = 604800; // 10,080 evaluations
    assert_int_equal(scaling_options_check(&o, &err), ERR_USAGE);
    o.season = 0;
    text_set(&o.strategy, "best");
    assert_int_equal(scaling_options_check(&o, &err), ERR_USAGE);
    text_set(&o.strategy, "memory");
    text_set(&o.predictor, "oracle");
    assert_int_equal(scaling_options_check(&o, &err), ERR_USAGE);
    options_free(&o);
}

/* simulated loads */

enum shape { CONSTANT, STEP, RAMP, WAVE, BURSTS, N_SHAPES };

/* The demand at point t of a load of n points, before noise. */
static double shape_value(enum shape shape, double level, int t, int n, struct rng *r) {
    switch (shape) {
    case CONSTANT:
        return level;
    case STEP:
        return t < n / 3 ? level : level / 4;
    case RAMP:
        return level * t / n;
    case WAVE:
        return level * (1 + math_sin(t * 6.283 / 97)) / 2;
    default:
        return rng_below(r, 10) ? level / 5 : level;
    }
}

/* Simulates an autoscaler and checks every rule against the changes so far. Returns how often a
 * change was in the other direction than the one before. */
static int reversals_of(const struct scaling_options *o, uint32_t seed, bool predicts) {
    enum { POINTS = 240 };
    struct rng r = rng_make(seed, RNG_TEST, seed, 0);
    enum shape shape = seed % N_SHAPES;
    struct scaling_history *h = xcalloc(1, sizeof *h);
    struct scaling_state s;
    double level = 0.2 + 7 * rng_uniform(&r), last_out = -1e9, last_change = -1e9;
    int nodes = 1 + (int)rng_below(&r, 10), reversals = 0;
    enum scaling_action before = SCALING_HOLD;
    scaling_init(&s);
    for (int t = 0; t < POINTS; t++) {
        double noise = 1 + 0.08 * (2 * rng_uniform(&r) - 1);
        double demand = shape_value(shape, level, t, POINTS, &r) * noise;
        double seen = MIN(demand / nodes, 1);
        struct scaling_event e = {.kind = SCALING_LOAD,
                                  .now = 60.0 * t,
                                  .nodes = nodes,
                                  .load = {seen, seen, seen},
                                  .demand = NAN};
        scaling_history_add(h, seen * nodes);
        const struct predictor *p = predicts ? scaling_predict(o, h, &e.demand) : NULL;
        e.predictor = p ? p->name : NULL;
        struct scaling_decision d = scaling_step(o, &s, &e);
        assert_in_range(d.to, 1, 10);
        assert_int_equal(d.from, nodes);
        if (d.action == SCALING_OUT) assert_true(d.to > nodes && e.now - last_out >= 300);
        if (d.action == SCALING_IN) assert_true(d.to == nodes - 1 && e.now - last_change >= 600);
        if (d.action == SCALING_OUT && !p) assert_true(d.to == nodes + 1 && seen > 0.6);
        if (d.action == SCALING_IN) assert_true(seen < 0.3);
        if (d.action == SCALING_OUT) last_out = e.now;
        if (d.action != SCALING_HOLD) {
            reversals += before != SCALING_HOLD && d.action != before;
            before = d.action;
            last_change = e.now;
        }
        nodes = d.to;
    }
    free(h);
    return reversals;
}

/* A constant load and a single step with 8 % noise: the number of nodes never goes back and forth.
 * Other loads: a change of direction needs the cooldown of a scale-in, which the simulation
 * checks. */
static void test_no_flapping(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    for (uint32_t seed = 0; seed < 1000; seed++) {
        int n = reversals_of(&o, seed, false);
        enum shape shape = seed % N_SHAPES;
        int allowed = shape == CONSTANT || shape == RAMP ? 1 : shape == STEP ? 2 : 24;
        if (n > allowed) fail_msg("seed %u: %d changes of direction", seed, n);
    }
    for (uint32_t seed = 0; seed < 20; seed++) reversals_of(&o, seed, true);
    options_free(&o);
}

/* predictors */

static double predict(const char *name, const struct scaling_options *o, const double *v, int n,
                      int steps) {
    for (int i = 0; i < N_PREDICTORS; i++)
        if (strcmp(predictors[i].name, name) == 0) return predictors[i].predict(o, v, n, steps);
    fail_msg("no predictor %s", name);
    return NAN;
}

#define ASSERT_NEAR(a, b) assert_true(fabs((a) - (b)) < 1e-9)

static void test_predictors(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    double v[40], jump[10] = {[9] = 9}, fall[10] = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
    for (int i = 0; i < 40; i++) v[i] = i + 1;
    ASSERT_NEAR(predict("least_squares", &o, v, 40, 5), 45);
    ASSERT_NEAR(predict("least_squares", &o, jump, 10, 1), 3.6); // 0.9 + 40.5 / 82.5 × 5.5
    ASSERT_NEAR(predict("least_squares", &o, fall, 10, 3), 0);   // never negative
    ASSERT_NEAR(predict("quantile", &o, v, 40, 5), 34.2);        // sorted 11 … 40, at 0.8 × 29
    ASSERT_NEAR(predict("quantile", &o, v, 10, 5), 8.2);
    o.quantile = 1;
    ASSERT_NEAR(predict("quantile", &o, v, 40, 5), 40);
    ASSERT_NEAR(predict("holt_winters", &o, v, 40, 5), 45);
    // Levels 1, 2 and 3.4; trends 1, 1 and 0.05 × 1.4 + 0.95 = 1.02.
    ASSERT_NEAR(predict("holt_winters", &o, (double[]){1, 2, 4}, 3, 2), 3.4 + 2 * 1.02);
    o.season = 240; // four evaluations
    const double season[4] = {0, 3, 1, -2};
    for (int i = 0; i < 40; i++) v[i] = 5 + 0.25 * i + season[i % 4];
    for (int steps = 1; steps < 6; steps++)
        ASSERT_NEAR(predict("holt_winters", &o, v, 40, steps),
                    5 + 0.25 * (39 + steps) + season[(39 + steps) % 4]);
    options_free(&o);
}

static void test_history(void **state) {
    (void)state;
    struct scaling_history *h = xcalloc(1, sizeof *h);
    scaling_history_add(h, NAN);
    assert_int_equal(h->n, 0);
    for (int i = 0; i < SCALING_HISTORY + 3; i++) scaling_history_add(h, i);
    assert_int_equal(h->n, SCALING_HISTORY);
    assert_true(h->v[0] == 3 && h->v[h->n - 1] == SCALING_HISTORY + 2);
    scaling_history_add(h, NAN);
    assert_true(h->v[h->n - 1] == SCALING_HISTORY + 2);
    free(h);
}

/* back-tests */

static const struct backtest_result *result_of(const struct backtest_result *v, const char *name) {
    for (int i = 0; i < N_PREDICTORS; i++)
        if (strcmp(v[i].predictor->name, name) == 0) return &v[i];
    return NULL;
}

/* The mean error, with a copy of only the points that are known at each time, so that the sanitizer
 * finds a predictor that reads a later one. */
static double naive_mae(const struct scaling_options *o, const struct predictor *p, const double *v,
                        int n) {
    int steps = scaling_horizon_steps(o), points = 0;
    double sum = 0;
    for (int known = p->min_points(o); known + steps <= n; known++, points++) {
        double *past = xcalloc((size_t)known, sizeof *past);
        memcpy(past, v, sizeof *past * (size_t)known);
        sum += fabs(p->predict(o, past, known, steps) - v[known - 1 + steps]);
        free(past);
    }
    return sum / points;
}

static void test_backtest(void **state) {
    (void)state;
    enum { N = 400 };
    struct scaling_options o = options_new();
    struct backtest_result v[N_PREDICTORS];
    double ramp[N], wave[N], noise[N], constant[N];
    struct rng r = rng_make(1, RNG_TEST, 0, 0);
    for (int i = 0; i < N; i++) {
        ramp[i] = 0.02 * i;
        wave[i] = 3 + 2.5 * math_sin(i * 6.283185307179586 / 48);
        noise[i] = 2 + 0.5 * rng_uniform(&r);
        constant[i] = 2;
    }
    scaling_backtest(&o, ramp, N, v);
    const struct backtest_result *line = result_of(v, "least_squares");
    assert_int_equal(line->points, N - 5 - 9);
    ASSERT_NEAR(line->figures.mae, 0);
    ASSERT_NEAR(line->reacting.mae, 0.1); // five steps of 0.02
    assert_true(line->better && line->figures.under < line->reacting.under);
    assert_false(result_of(v, "quantile")->better);

    o.season = 48 * 60;
    scaling_backtest(&o, wave, N, v);
    const struct backtest_result *winters = result_of(v, "holt_winters");
    assert_true(winters->better && winters->figures.mae < winters->reacting.mae / 10);
    assert_true(winters->figures.under < winters->reacting.under);
    scaling_backtest(&o, noise, N, v);
    assert_false(result_of(v, "least_squares")->better);
    assert_true(result_of(v, "quantile")->better);
    scaling_backtest(&o, constant, N, v);
    for (int i = 0; i < N_PREDICTORS; i++) assert_false(v[i].better);
    for (int i = 0; i < N_PREDICTORS; i++) {
        scaling_backtest(&o, noise, N, v);
        ASSERT_NEAR(v[i].figures.mae, naive_mae(&o, v[i].predictor, noise, N));
    }
    scaling_backtest(&o, ramp, 10, v); // too few points for any
    for (int i = 0; i < N_PREDICTORS; i++) assert_false(v[i].better);
    options_free(&o);
}

static void test_choice(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    struct scaling_history *h = xcalloc(1, sizeof *h);
    double demand;
    for (int i = 0; i < 29; i++) scaling_history_add(h, 0.02 * i);
    assert_null(scaling_predict(&o, h, &demand)); // too short
    for (int i = 29; i < 120; i++) scaling_history_add(h, 0.02 * i);
    const struct predictor *p = scaling_predict(&o, h, &demand);
    assert_non_null(p);
    ASSERT_NEAR(demand, 0.02 * 124);
    text_set(&o.predictor, "quantile"); // worse than reacting, so it is not used
    assert_null(scaling_predict(&o, h, &demand));
    assert_true(isnan(demand));
    text_set(&o.predictor, "least_squares");
    assert_string_equal(scaling_predict(&o, h, &demand)->name, "least_squares");
    text_set(&o.predictor, "none");
    assert_null(scaling_predict(&o, h, &demand));
    free(h);
    options_free(&o);
}

/* recorded loads */

static int recorded_read(const char *text, double **demand, int *n) {
    char path[] = "/tmp/shoal-test-autoscale-XXXXXX";
    int fd = mkstemp(path);
    struct scaling_options o = options_new();
    assert_true(fd >= 0 && fd_write(fd, text, strlen(text)));
    close(fd);
    int rc = scaling_load_file(&o, path, demand, n, &err);
    unlink(path);
    options_free(&o);
    return rc;
}

static void test_recorded(void **state) {
    (void)state;
    double *v;
    int n;
    struct scaling_options o = options_new();
    const struct scaling_decision d = {
        .from = 3, .to = 4, .load = {0.5, 0.5, 0.5}, .score = 0.5, .predicted = NAN};
    struct buf lines = {0};
    buf_puts(&lines, "{\"cpu\": null, \"memory\": 1, \"queue\": 1}\n"); // before the first load
    buf_add_json_line(&lines, scaling_decision_json(&d));
    buf_puts(&lines, "{\"cpu\": null, \"memory\": 1, \"queue\": 1}\n"
                     "{\"cpu\": 1, \"memory\": 0, \"queue\": 0}\n");
    assert_int_equal(recorded_read(lines.data, &v, &n), OK);
    assert_int_equal(n, 3);
    assert_true(v[0] == 1.5 && v[1] == 1.5 && v[2] == 0.4);
    free(v);
    buf_release(&lines);
    static const char *const wrong[] = {"",
                                        "[1]",
                                        "{\"cpu\": 2, \"memory\": 1, \"queue\": 1}",
                                        "{\"cpu\": \"1\", \"memory\": 1, \"queue\": 1}",
                                        "{\"cpu\": 1, \"memory\": 1, \"queue\": 1, \"nodes\": -1}",
                                        "{\"load\": 1}",
                                        "{"};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++)
        if (recorded_read(wrong[i], &v, &n) != ERR_FORMAT) fail_msg("accepted: %s", wrong[i]);
    options_free(&o);
}

/* pages of metrics */

/* The text of a real registry, so the names are those that servers have. */
static void test_metrics_page(void **state) {
    (void)state;
    struct metrics *m = metrics_new(0);
    struct metrics_sample s;
    struct buf text = {0};
    metric_set(metric_get(m, METRIC_VLLM_WAITING, "a \"b\" } 7\\", "0"), 3);
    metric_set(metric_get(m, METRIC_VLLM_WAITING, "other", "0"), 4);
    metric_set(metric_get(m, METRIC_MEMORY_BUDGET), 1e15);
    metrics_text(m, &text, false);
    assert_int_equal(metrics_sample_parse(text.data, text.len, &s, &err), OK);
    assert_true(s.waiting == 7 && s.cpus >= 1 && s.cpu_seconds >= 0);
    assert_true(s.memory > 0 && s.memory < 0.01); // share of the budget
    for (size_t n = 0; n < text.len; n += 7) {    // a page that ends early
        char *part = xcalloc(n + 1, 1);
        memcpy(part, text.data, n);
        metrics_sample_parse(part, n, &s, &err);
        free(part);
    }
    char *name = strstr(text.data, "\nshoal_cpus ");
    assert_non_null(name);
    name[1] = 'x';
    assert_int_equal(metrics_sample_parse(text.data, text.len, &s, &err), ERR_FORMAT);
    assert_non_null(strstr(err.text, "'shoal_cpus'"));
    buf_release(&text);
    metrics_free(m);
}

/* YAML */

static void test_manifest_names(void **state) {
    (void)state;
    struct scaling_options o = options_new();
    struct buf out = {0};
    struct manifest_options m = {.image = "shoal\"\n- x",
                                 .model = "models/fry",
                                 .namespace = "default",
                                 .deployment = "shoal",
                                 .prometheus = "http://p:9090",
                                 .scaling = &o,
                                 .port = 8000};
    assert_int_equal(scaling_manifests(&m, &out, &err), OK);
    assert_non_null(strstr(out.data, "image: \"shoal\\\"\\n- x\"\n"));
    assert_null(strstr(out.data, "$name"));
    static const char *const wrong[] = {"", "Shoal", "a b", "a\nb", "-a", "a.b", "a/b"};
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        m.deployment = wrong[i];
        assert_int_equal(scaling_manifests(&m, &out, &err), ERR_USAGE);
    }
    buf_release(&out);
    options_free(&o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),        cmocka_unit_test(test_decisions),
        cmocka_unit_test(test_target_cpu),      cmocka_unit_test(test_recent_load),
        cmocka_unit_test(test_failed_decision), cmocka_unit_test(test_wrong_options),
        cmocka_unit_test(test_no_flapping),     cmocka_unit_test(test_predictors),
        cmocka_unit_test(test_history),         cmocka_unit_test(test_backtest),
        cmocka_unit_test(test_choice),          cmocka_unit_test(test_recorded),
        cmocka_unit_test(test_metrics_page),    cmocka_unit_test(test_manifest_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
