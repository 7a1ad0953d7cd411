/*
 * test_sample_tuning: the temperature of samples, tuned on development items
 * (--sample-temperature), with a scripted client: the selected temperature, its questions, and the
 * refused requests.
 *
 * The script's samples of a question are right if their temperature is in a list of right ones.
 */
/* levels: once */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { N = 12 };
static struct error err;

static int quiet(void **state) {
    (void)state;
    log_quiet = true;
    return 0;
}

struct script {
    const float *right; /* temperatures, ended by a negative one */
    int n_dev, n_test;  /* sampled calls on items of each split */
    float test_temperature;
};

static bool is_right(const struct script *s, float temperature) {
    if (temperature <= 0) return false; // the first answers
    for (const float *t = s->right; *t >= 0; t++)
        if (fabsf(*t - temperature) < 1e-6f) return true;
    return false;
}

static int script_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    struct script *s = ctx;
    (void)e;
    for (int i = 0; i < n; i++) {
        struct llm_call *c = &calls[i];
        bool is_dev = c->item->key ? family_split_of(c->item->key) == SPLIT_DEV
                                   : strstr(c->item->question, "dev ") != NULL;
        if (c->temperature > 0) {
            s->n_dev += is_dev;
            s->n_test += !is_dev;
            if (!is_dev) s->test_temperature = c->temperature;
        }
        bool right = is_right(s, c->temperature);
        if (c->item->n_choices) {
            c->answer.choice = right ? c->item->correct : (c->item->correct + 1) % 2;
            c->answer.prob[c->answer.choice] = 1;
        }
        c->text = right ? xstrdup(c->item->gold ? c->item->gold : "") : xstrdup("nothing");
        c->n_generated = 3;
    }
    return OK;
}

static struct debate_request request_of(const char *const *options) {
    struct debate_request r = {0};
    struct strings flags = {0}, positional = {0};
    options_default(debate_request_rows, &r);
    for (; *options; options++) strings_add(&flags, *options);
    if (options_parse(debate_request_rows, &r, flags.n, flags.v, &positional, &err) != OK)
        fail_msg("%s", err.text);
    strings_release(&flags);
    strings_release(&positional);
    return r;
}

/* The report of the request; NULL: `err` is set. */
static json_t *report_of(const char *const *options, struct script *script) {
    static const char team[] = "protocol: brief\nagents: [{name: a}, {name: b}]";
    const struct llm_client client = {script, script_ask};
    struct debate_request r = request_of(options);
    struct debate_questions q = {0};
    struct team t;
    json_t *report = NULL;
    if (team_parse(&t, team, strlen(team), "t.yaml", &err) != OK) fail_msg("%s", err.text);
    if (debate_request_apply(&r, &t.options, &err) == OK &&
        debate_questions_open(&r, &q, &err) == OK)
        report = debate_request_run_task(&r, &client, &t, &q.tasks[0], &err);
    debate_questions_release(&q);
    team_release(&t);
    options_release(debate_request_rows, &r);
    return report;
}

#define TUNED "--sample-temperature", "auto", "--n", "12", "--credit", "none"

static double tuned_temperature(const float *right, const char *const *options) {
    struct script s = {.right = right};
    json_t *r = report_of(options, &s);
    if (!r) fail_msg("%s", err.text);
    const json_t *v = json_object_get(r, "sample_temperature");
    double temperature = json_get_number(v, "temperature");
    assert_int_equal(json_get_number(v, "n"), N);
    assert_int_equal(s.n_dev, N * json_get_number(v, "samples") *
                                  json_array_size(json_object_get(v, "curve")));
    assert_true(s.n_test > 0); // with the tuned temperature
    assert_true(fabs((double)s.test_temperature - temperature) < 1e-6);
    size_t i;
    json_t *point;
    json_array_foreach (json_object_get(v, "curve"), i, point) {
        float t = (float)json_number_value(json_array_get(point, 0));
        assert_true(json_number_value(json_array_get(point, 1)) == (is_right(&s, t) ? 1 : 0));
    }
    json_decref(r);
    return temperature;
}

/* The best temperature, of equal ones the lowest, on the dev split, with choices and without. */
static void test_best_temperature(void **state) {
    (void)state;
    static const float one[] = {1.0f, -1}, three[] = {1.3f, 0.5f, 1.0f, -1}, none[] = {-1};
    static const char *const chosen[] = {"--tasks", "arithmetic", TUNED, NULL},
                             *const generated[] = {"--tasks", "arithmetic", "--free-answers", TUNED,
                                                   NULL};
    for (int k = 0; k < 2; k++) {
        const char *const *options = k ? generated : chosen;
        assert_true(fabs(tuned_temperature(one, options) - 1) < 1e-6);
        assert_true(fabs(tuned_temperature(three, options) - 0.5) < 1e-6);
        assert_true(fabs(tuned_temperature(none, options) - 0.3) < 1e-6);
    }
}

/* Without tuning the samples have the given temperature, and the report does not change. */
static void test_fixed_temperature(void **state) {
    (void)state;
    static const float none[] = {-1};
    static const char *const plain[] = {"--tasks", "pick", "--n", "12", NULL},
                             *const given[] = {
                                 "--tasks", "pick", "--n", "12", "--sample-temperature",
                                 "1.1",     NULL};
    for (int k = 0; k < 2; k++) {
        struct script s = {.right = none};
        json_t *r = report_of(k ? given : plain, &s);
        assert_non_null(r);
        assert_null(json_object_get(r, "sample_temperature"));
        assert_int_equal(s.n_dev, 0);
        assert_true(fabsf(s.test_temperature - (k ? 1.1f : 0.7f)) < 1e-6f);
        json_decref(r);
    }
}

static void refused(const char *why, const char *const *options) {
    static const float none[] = {-1};
    struct script s = {.right = none};
    json_t *r = report_of(options, &s);
    if (r) fail_msg("accepted, not '%s'", why);
    assert_int_equal(err.code, ERR_USAGE);
    if (!strstr(err.text, why)) fail_msg("'%s', not '%s'", err.text, why);
    assert_int_equal(s.n_dev + s.n_test, 0);
}

#define REFUSED(why, ...) refused(why, (const char *const[]){__VA_ARGS__, NULL})

/* Files have no dev split: other questions are named, and none of them may be measured. */
static void test_files(void **state) {
    (void)state;
    static const float half[] = {0.5f, -1};
    struct buf lines = {0}, dev = {0};
    char *path = xasprintf("/tmp/shoal-tuning-%d-own.jsonl", (int)getpid()),
         *dev_path = xasprintf("/tmp/shoal-tuning-%d-dev.jsonl", (int)getpid());
    for (int i = 0; i < N; i++) {
        buf_printf(&lines,
                   "{\"question\": \"test %d?\", \"choices\": [\"x\", \"y\"], \"answer\": 1}\n", i);
        buf_printf(&dev,
                   "{\"question\": \"dev %d?\", \"choices\": [\"x\", \"y\"], \"answer\": 1}\n", i);
    }
    assert_int_equal(file_write(path, lines.data, lines.len, &err), OK);
    assert_int_equal(file_write(dev_path, dev.data, dev.len, &err), OK);
    const char *const options[] = {"--tasks", path, "--tune-data", dev_path, TUNED, NULL};
    assert_true(fabs(tuned_temperature(half, options) - 0.5) < 1e-6);
    REFUSED("which have no dev split; name other questions with --tune-data", "--tasks", path,
            TUNED);
    REFUSED("12 questions that would tune", "--tasks", path, "--tune-data", path, TUNED);
    REFUSED("--split is for generated questions", "--tasks", path, "--split", "dev");
    buf_release(&lines);
    buf_release(&dev);
    unlink(path);
    unlink(dev_path);
    free(path);
    free(dev_path);
}

static void test_refused(void **state) {
    (void)state;
    REFUSED("also measured", "--tasks", "pick", "--split", "dev", TUNED);
    REFUSED("no split 'deb'", "--tasks", "pick", "--split", "deb");
    REFUSED("--split is for --tasks", "--topic", "x", "--split", "dev");
    REFUSED("no samples", "--tasks", "pick", "--no-chain-of-thought", TUNED);
    REFUSED("no samples", "--tasks", "pick", "--samples", "0", TUNED);
    REFUSED("--tune-data is for", "--tasks", "pick", "--tune-data", "x.jsonl");
    REFUSED("not 'warm'", "--tasks", "pick", "--sample-temperature", "warm");
    REFUSED("not '-1'", "--tasks", "pick", "--sample-temperature", "-1");
    REFUSED("not 'nan'", "--tasks", "pick", "--sample-temperature", "nan");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_best_temperature),
        cmocka_unit_test(test_fixed_temperature),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("sample tuning", tests, quiet, NULL);
}
