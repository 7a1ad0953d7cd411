/*
 * test_alerts: when alerts fire and are resolved, and the messages about them.
 *
 * The clock is a variable of the test, except where messages are sent to a server in this process.
 */
/* levels: once */
#define _GNU_SOURCE
#include "http/http.h"
#include "ops/ops.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct metrics *m;
static struct alerts *a;
static struct error err;

static int set_up(void **state) {
    (void)state;
    struct alerts_options o = {.source = "fry"};
    m = metrics_new(0);
    a = alerts_new(m, &o, &err);
    return !a;
}

static int tear_down(void **state) {
    (void)state;
    alerts_free(a);
    metrics_free(m);
    return 0;
}

/* The state of a rule in alerts_json; borrowed from *all. */
static json_t *find_alert(json_t **all, const char *name) {
    json_t *v;
    size_t i;
    *all = alerts_json(a);
    json_array_foreach (json_object_get(*all, "alerts"), i, v)
        if (strcmp(json_get_string(v, "alert"), name) == 0) return v;
    fail_msg("there is no alert %s", name);
    return NULL;
}

static void assert_state(const char *name, const char *want) {
    json_t *all, *v = find_alert(&all, name);
    if (strcmp(json_get_string(v, "state"), want) != 0)
        fail_msg("%s is %s, not %s", name, json_get_string(v, "state"), want);
    json_decref(all);
}

static double alert_value(const char *name) {
    json_t *all, *v = json_object_get(find_alert(&all, name), "value");
    double x = json_is_number(v) ? json_number_value(v) : NAN;
    json_decref(all);
    return x;
}

static void test_duration_and_hysteresis(void **state) {
    (void)state;
    struct metric *waiting = metric_get(m, METRIC_VLLM_WAITING, "fry", "0");
    struct metric *firing = metric_get(m, METRIC_ALERTS, "ShoalQueueWaiting");
    metric_set(waiting, 60);
    alerts_evaluate(a, 1000);
    assert_state("ShoalQueueWaiting", "pending");
    metric_set(waiting, 50); /* the limit itself is allowed */
    alerts_evaluate(a, 1100);
    assert_state("ShoalQueueWaiting", "inactive");
    metric_set(waiting, 51);
    alerts_evaluate(a, 1200);
    alerts_evaluate(a, 1499);
    assert_state("ShoalQueueWaiting", "pending");
    assert_true(metric_value(firing) == 0);
    alerts_evaluate(a, 1500);
    assert_state("ShoalQueueWaiting", "firing");
    assert_true(metric_value(firing) == 1);
    metric_set(waiting, 46);
    alerts_evaluate(a, 1600);
    assert_state("ShoalQueueWaiting", "firing");
    metric_set(waiting, 45);
    alerts_evaluate(a, 1601);
    assert_state("ShoalQueueWaiting", "inactive");
    assert_true(metric_value(firing) == 0);
    metric_set(waiting, 47); /* after the alert ended, the limit applies again */
    alerts_evaluate(a, 1602);
    assert_state("ShoalQueueWaiting", "inactive");
}

static void test_ratio_of_the_last_minutes(void **state) {
    (void)state;
    struct metric *all = metric_get(m, METRIC_RECEIVED), *bad = metric_get(m, METRIC_FAILED);
    metric_add(all, 1000); /* long ago */
    metric_add(bad, 900);
    alerts_evaluate(a, 0);
    assert_true(isnan(alert_value("ShoalErrorRatio")));
    metric_add(all, 100);
    metric_add(bad, 20);
    alerts_evaluate(a, 60);
    assert_true(fabs(alert_value("ShoalErrorRatio") - 0.2) < 1e-12);
    assert_state("ShoalErrorRatio", "pending");
    metric_add(all, 300);
    for (int t = 75; t <= 360; t += 15) alerts_evaluate(a, t);
    assert_true(fabs(alert_value("ShoalErrorRatio") - 0) < 1e-12); /* those 20 are forgotten */
    assert_state("ShoalErrorRatio", "inactive");
}

static void test_slow_first_tokens(void **state) {
    (void)state;
    struct metric *ttft = metric_get(m, METRIC_VLLM_TTFT, "fry", "0");
    for (int i = 0; i < 1000; i++) metric_observe(ttft, 0.01);
    alerts_evaluate(a, 0);
    for (int i = 0; i < 10; i++) metric_observe(ttft, 30);
    alerts_evaluate(a, 15);
    assert_true(alert_value("ShoalFirstTokenSlow") >
                20); /* the quantile of these ten, not of all */
    alerts_evaluate(a, 600);
    assert_true(isnan(alert_value("ShoalFirstTokenSlow")));
}

static void test_jobs_and_losses(void **state) {
    (void)state;
    alerts_evaluate(a, 0);
    assert_state("ShoalJobFailed", "inactive");
    metric_add(metric_get(m, METRIC_JOBS_ENDED, "train", "done"), 5);
    alerts_evaluate(a, 15);
    assert_state("ShoalJobFailed", "inactive");
    metric_add(metric_get(m, METRIC_JOBS_ENDED, "train", "failed"), 1);
    alerts_evaluate(a, 30);
    assert_state("ShoalJobFailed", "firing");
    alerts_evaluate(a, 600);
    alerts_evaluate(a, 615);
    assert_state("ShoalJobFailed", "inactive");
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "job-1"), 2.5);
    alerts_evaluate(a, 630);
    assert_state("ShoalLossNaN", "inactive");
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "job-2"), NAN);
    alerts_evaluate(a, 645);
    assert_state("ShoalLossNaN", "firing");
}

static void test_stalled_world(void **state) {
    (void)state;
    struct metric *speed = metric_get(m, METRIC_WORLD_SPEED, "job-1");
    int t = 0;
    for (; t < 3000; t += 15) {
        metric_set(speed, 100 + t);
        alerts_evaluate(a, t);
    }
    assert_state("ShoalWorldStalled", "inactive");
    for (; t < 3000 + 600; t += 15) alerts_evaluate(a, t);
    assert_state("ShoalWorldStalled", "pending"); /* the tick changed five minutes ago */
    for (; t < 3000 + 1200; t += 15) alerts_evaluate(a, t);
    assert_state("ShoalWorldStalled", "firing");
    metric_set(speed, 90);
    alerts_evaluate(a, t);
    assert_state("ShoalWorldStalled", "inactive");
}

static void test_no_alert_without_values(void **state) {
    (void)state;
    for (int t = 0; t < 4000; t += 15) alerts_evaluate(a, t);
    assert_state("ShoalMemoryBudget", "inactive");
    assert_state("ShoalWorldStalled", "inactive");
    assert_state("ShoalErrorRatio", "inactive");
    assert_true(isnan(alert_value("ShoalMemoryBudget")));
    assert_true(alert_value("ShoalMemoryHigh") > 0 && alert_value("ShoalMemoryHigh") < 1);
}

/* messages */

static struct http *receiver;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static json_t *got[2]; /* arrays of messages to /hook and /slack */
static int refused;

static void record_message(struct exchange *x, int hook) {
    json_t *v = exchange_json(x, &err);
    pthread_mutex_lock(&lock);
    bool refuse = hook == 0 && refused++ == 0; /* the first message is refused */
    if (!refuse) json_array_append(got[hook], v);
    pthread_mutex_unlock(&lock);
    json_decref(v);
    exchange_reply(x, refuse ? 503 : 200, "text/plain", "ok", 2);
}
static void hook_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    record_message(x, 0);
}
static void slack_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    record_message(x, 1);
}

static bool wait_for_messages(int hook, size_t n, double seconds) {
    for (double end = clock_now() + seconds;; usleep(10000)) {
        pthread_mutex_lock(&lock);
        bool here = json_array_size(got[hook]) == n;
        pthread_mutex_unlock(&lock);
        if (here || clock_now() > end) return here;
    }
}

static int admit(void *ctx, struct exchange *x, const struct http_route *r) {
    (void)ctx, (void)x, (void)r;
    return OK;
}
static void refuse(void *ctx, struct exchange *x, int status, const char *code, const char *text) {
    (void)ctx, (void)code;
    exchange_reply(x, status, "text/plain", text, strlen(text));
}
static void ended(void *ctx, const struct exchange *x) {
    (void)ctx, (void)x;
}

static void test_messages(void **state) {
    (void)state;
    static const struct http_route routes[] = {
        {"POST", "/hook", 0, hook_handle}, {"POST", "/slack", 0, slack_handle}, {0}};
    struct http_callbacks calls = {
        .routes = routes, .workers = 2, .admit = admit, .refuse = refuse, .ended = ended};
    struct http_options ho = {.host = "127.0.0.1",
                              .max_body = 1 << 16,
                              .max_connections = 16,
                              .header_seconds = 5,
                              .body_seconds = 5,
                              .idle_seconds = 5,
                              .drain_seconds = 1};
    struct strings hooks = {0}, slacks = {0};
    char url[64];
    for (int i = 0; i < 2; i++) got[i] = json_array();
    receiver = http_new(&ho, &calls, &err);
    if (!receiver) fail_msg("%s", err.text);
    snprintf(url, sizeof url, "http://127.0.0.1:%d/hook", http_port(receiver));
    strings_add(&hooks, url);
    snprintf(url, sizeof url, "http://127.0.0.1:%d/slack", http_port(receiver));
    strings_add(&slacks, url);
    struct alerts_options o = {
        .interval_seconds = 0.05, .webhooks = &hooks, .slack_urls = &slacks, .source = "fry 雑魚"};
    struct metric *loss = metric_get(m, METRIC_TRAIN_LOSS, "job-1");
    struct alerts *busy = alerts_new(m, &o, &err);
    assert_non_null(busy);
    metric_set(loss, INFINITY);
    assert_true(wait_for_messages(1, 1, 5));
    assert_non_null(strstr(json_get_string(json_array_get(got[1], 0), "text"), "ShoalLossNaN"));
    assert_non_null(strstr(json_get_string(json_array_get(got[1], 0), "text"), "雑魚"));
    assert_true(wait_for_messages(0, 1, 10)); /* at the second attempt */
    json_t *v = json_array_get(got[0], 0), *one = json_array_get(json_object_get(v, "alerts"), 0);
    assert_string_equal(json_get_string(v, "version"), "4");
    assert_string_equal(json_get_string(v, "status"), "firing");
    assert_string_equal(json_get_string(json_object_get(one, "labels"), "alertname"),
                        "ShoalLossNaN");
    assert_string_equal(json_get_string(one, "endsAt"), "0001-01-01T00:00:00Z");
    metric_set(loss, 1);
    assert_true(wait_for_messages(0, 2, 5) && wait_for_messages(1, 2, 5));
    v = json_array_get(got[0], 1);
    assert_string_equal(json_get_string(v, "status"), "resolved");
    json_t *all = alerts_json(busy), *counts = json_object_get(all, "messages");
    assert_int_equal(json_integer_value(json_object_get(counts, "failed")), 1);
    json_decref(all);
    alerts_free(busy);
    http_free(receiver);
    strings_release(&hooks);
    strings_release(&slacks);
    for (int i = 0; i < 2; i++) json_decref(got[i]);
}

static void test_addresses(void **state) {
    (void)state;
    struct strings bad = {0};
    strings_add(&bad, "file:///etc/passwd");
    struct alerts_options o = {.webhooks = &bad, .source = "fry"};
    assert_null(alerts_new(m, &o, &err));
    assert_int_equal(err.code, ERR_USAGE);
    assert_null(strstr(err.text, "passwd")); /* the address may contain a secret */
    strings_release(&bad);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_duration_and_hysteresis, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_ratio_of_the_last_minutes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_slow_first_tokens, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_jobs_and_losses, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_stalled_world, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_alert_without_values, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_messages, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_addresses, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
