/*
 * test_metrics: the table of metrics, their text in both formats, counters updated by several
 * threads, limits on label values from outside, and that rules and dashboard use existing metrics.
 *
 * `test_metrics --exposition` prints a registry in which every family has a series, for promtool
 * (test_metrics_promtool.sh); `--openmetrics` prints it in that format.
 */
/* levels: once */
#define _GNU_SOURCE
#include "ops/ops.h"

#include <ctype.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

static struct metrics *m;
static struct buf text;

static int set_up(void **state) {
    (void)state;
    m = metrics_new(0);
    text = (struct buf){0};
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    metrics_free(m);
    buf_release(&text);
    return 0;
}

static const char *read_text(bool openmetrics) {
    buf_release(&text);
    metrics_text(m, &text, openmetrics);
    return text.data;
}

/* The text of one family, from its HELP to the next one's. malloc'ed. */
static char *family_text(const char *name, bool openmetrics) {
    char *begin, *end, *heading = xasprintf("# HELP %s ", name);
    begin = strstr(read_text(openmetrics), heading);
    free(heading);
    if (!begin) return xstrdup("");
    end = strstr(begin + 1, "# HELP ");
    if (!end) end = strstr(begin, "# EOF");
    return strndup(begin, end ? (size_t)(end - begin) : strlen(begin));
}

static void expect_family(const char *name, bool openmetrics, const char *expected) {
    char *got = family_text(name, openmetrics);
    assert_string_equal(got, expected);
    free(got);
}

static bool ends_with(const char *s, const char *end) {
    return strlen(s) >= strlen(end) && strcmp(s + strlen(s) - strlen(end), end) == 0;
}

static const struct metric_family *find_family(const char *name, size_t n) {
    for (int i = 0; i < N_METRICS; i++)
        if (strlen(metric_families[i].name) == n && memcmp(metric_families[i].name, name, n) == 0)
            return &metric_families[i];
    return NULL;
}

/* The family of a sample's name or a name in an expression, which may be one of a histogram's
 * three. */
static const struct metric_family *family_of_sample(const char *name, size_t n) {
    static const char *const suffixes[] = {"_bucket", "_sum", "_count"};
    for (size_t i = 0; i < ARRAY_LEN(suffixes); i++) {
        size_t k = strlen(suffixes[i]);
        const struct metric_family *f =
            n > k && memcmp(name + n - k, suffixes[i], k) == 0 ? find_family(name, n - k) : NULL;
        if (f && f->type == METRIC_TYPE_HISTOGRAM) return f;
    }
    const struct metric_family *f = find_family(name, n);
    return f && f->type != METRIC_TYPE_HISTOGRAM ? f : NULL;
}

static bool is_of_other_program(const char *name) {
    return strchr(name, ':') || strncmp(name, "murmurnet_", 10) == 0;
}

static void check_family(const struct metric_family *f) {
    bool total = ends_with(f->name, "_total");
    assert_int_equal(strspn(f->name, "abcdefghijklmnopqrstuvwxyz0123456789_:"), strlen(f->name));
    assert_true(is_of_other_program(f->name) || strncmp(f->name, "shoal_", 6) == 0 ||
                strncmp(f->name, "process_", 8) == 0);
    if (f->type == METRIC_TYPE_COUNTER || !is_of_other_program(f->name))
        assert_int_equal(total, f->type == METRIC_TYPE_COUNTER);
    assert_null(strpbrk(f->help, "\\\"\n"));
    assert_true(ends_with(f->help, "."));
    for (int i = 0; i < f->n_labels; i++) {
        assert_non_null(f->labels[i]);
        assert_string_not_equal(f->labels[i], "le");
        for (int k = 0; k < i; k++) assert_string_not_equal(f->labels[i], f->labels[k]);
    }
    if (!f->alias) assert_int_equal(f->n_bounds > 0, f->type == METRIC_TYPE_HISTOGRAM);
    for (int i = 1; i < f->n_bounds; i++) assert_true(f->bounds[i - 1] < f->bounds[i]);
    if (f->n_bounds) assert_true(f->bounds[0] > 0 && f->n_bounds <= METRICS_BOUNDS);
}

static void check_alias(const struct metric_family *f) {
    const struct metric_family *source = &metric_families[f->source];
    assert_int_equal(source->type, f->type);
    assert_false(source->alias);
    assert_int_equal(f->n_labels, f->alias == METRIC_ALIAS_SUM ? 0 : source->n_labels);
    for (int k = 0; k < f->n_labels; k++) assert_string_equal(f->labels[k], source->labels[k]);
    if (f->alias == METRIC_ALIAS_SUM) assert_int_not_equal(f->type, METRIC_TYPE_HISTOGRAM);
}

static void test_table(void **state) {
    (void)state;
    for (int i = 0; i < N_METRICS; i++) {
        const struct metric_family *f = &metric_families[i];
        check_family(f);
        if (f->alias) check_alias(f);
        for (int k = 0; k < i; k++) assert_string_not_equal(f->name, metric_families[k].name);
        /* The OpenMetrics name of a counter's family is unique. */
        if (f->type == METRIC_TYPE_COUNTER)
            assert_null(find_family(f->name, strlen(f->name) - strlen("_total")));
    }
}

/* Names that other programs query. */
static void test_names_that_other_programs_query(void **state) {
    (void)state;
    static const struct {
        const char *type, *names;
    } known[] = {
        {"gauge", "vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc "
                  "vllm:gpu_cache_usage_perc vllm:cache_config_info vllm:lora_requests_info "
                  "murmurnet_active_nodes murmurnet_current_load murmurnet_memory_usage_bytes "
                  "murmurnet_pending_tasks llamacpp:predicted_tokens_seconds "
                  "llamacpp:requests_processing llamacpp:requests_deferred "
                  "process_resident_memory_bytes process_virtual_memory_bytes process_open_fds "
                  "process_max_fds process_start_time_seconds shoal_build_info"},
        {"counter",
         "vllm:prompt_tokens_total vllm:generation_tokens_total vllm:request_success_total "
         "vllm:num_preemptions_total vllm:prefix_cache_queries_total "
         "vllm:prefix_cache_hits_total murmurnet_requests_total murmurnet_tasks_processed_total "
         "murmurnet_errors_total llamacpp:prompt_tokens_total llamacpp:tokens_predicted_total "
         "process_cpu_seconds_total"},
        {"histogram",
         "vllm:time_to_first_token_seconds vllm:time_per_output_token_seconds "
         "vllm:inter_token_latency_seconds vllm:e2e_request_latency_seconds "
         "vllm:request_queue_time_seconds vllm:request_inference_time_seconds "
         "vllm:request_prefill_time_seconds vllm:request_decode_time_seconds "
         "vllm:request_prompt_tokens vllm:request_generation_tokens vllm:iteration_tokens_total "
         "vllm:request_max_num_generation_tokens vllm:request_params_n "
         "vllm:request_params_max_tokens murmurnet_request_duration_seconds "
         "murmurnet_task_execution_duration_seconds murmurnet_response_size_bytes"},
    };
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        for (const char *p = known[i].names; *p; p += strspn(p, " ")) {
            size_t n = strcspn(p, " ");
            const struct metric_family *f = find_family(p, n);
            if (!f) fail_msg("no metric %.*s", (int)n, p);
            assert_string_equal(metric_type_name(f->type), known[i].type);
            p += n;
        }
}

static void test_text(void **state) {
    (void)state;
    metric_set(metric_get(m, METRIC_VLLM_RUNNING, "fry", "0"), 3);
    metric_set(metric_get(m, METRIC_VLLM_RUNNING, "a\\b\"c\nd", "1"), 0.1);
    expect_family("vllm:num_requests_running", false,
                  "# HELP vllm:num_requests_running Requests that are being computed.\n"
                  "# TYPE vllm:num_requests_running gauge\n"
                  "vllm:num_requests_running{model_name=\"fry\",engine=\"0\"} 3\n"
                  "vllm:num_requests_running{model_name=\"a\\\\b\\\"c\\nd\",engine=\"1\"} 0.1\n");
    expect_family("llamacpp:requests_processing", false,
                  "# HELP llamacpp:requests_processing Requests that are being computed.\n"
                  "# TYPE llamacpp:requests_processing gauge\n"
                  "llamacpp:requests_processing 3.1\n");
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "a"), NAN);
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "b"), INFINITY);
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "c"), -INFINITY);
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "d"), -1.0 / 3);
    expect_family("shoal_train_loss", false,
                  "# HELP shoal_train_loss Loss of a training's last step.\n"
                  "# TYPE shoal_train_loss gauge\n"
                  "shoal_train_loss{job=\"a\"} NaN\n"
                  "shoal_train_loss{job=\"b\"} +Inf\n"
                  "shoal_train_loss{job=\"c\"} -Inf\n"
                  "shoal_train_loss{job=\"d\"} -0.3333333333333333\n");
    expect_family("shoal_jobs", false, "");
}

static void test_counter_in_both_formats(void **state) {
    (void)state;
    expect_family("shoal_requests_received_total", false,
                  "# HELP shoal_requests_received_total Requests received, with any outcome.\n"
                  "# TYPE shoal_requests_received_total counter\n"
                  "shoal_requests_received_total 0\n");
    struct metric *c = metric_get(m, METRIC_RECEIVED);
    metric_add(c, 1234567);
    metric_add(c, 0.5);
    expect_family("shoal_requests_received", true,
                  "# HELP shoal_requests_received Requests received, with any outcome.\n"
                  "# TYPE shoal_requests_received counter\n"
                  "shoal_requests_received_total 1234567.5\n");
    assert_true(ends_with(read_text(true), "\n# EOF\n"));
    assert_null(strstr(read_text(false), "# EOF"));
    metric_set_total(c, 5);
    assert_true(metric_value(c) == 1234567.5);
    metric_set_total(c, 2e6);
    assert_true(metric_value(c) == 2e6);
}

static void test_histogram_text(void **state) {
    (void)state;
    struct metric *h = metric_get(m, METRIC_VLLM_PARAMS_N, "fry", "0");
    static const double seen[] = {0, 1, 2, 3, 20, 21, 100};
    for (size_t i = 0; i < ARRAY_LEN(seen); i++) metric_observe(h, seen[i]);
    expect_family("vllm:request_params_n", false,
                  "# HELP vllm:request_params_n Choices that requests asked for.\n"
                  "# TYPE vllm:request_params_n histogram\n"
                  "vllm:request_params_n_bucket{model_name=\"fry\",engine=\"0\",le=\"1.0\"} 2\n"
                  "vllm:request_params_n_bucket{model_name=\"fry\",engine=\"0\",le=\"2.0\"} 3\n"
                  "vllm:request_params_n_bucket{model_name=\"fry\",engine=\"0\",le=\"5.0\"} 4\n"
                  "vllm:request_params_n_bucket{model_name=\"fry\",engine=\"0\",le=\"10.0\"} 4\n"
                  "vllm:request_params_n_bucket{model_name=\"fry\",engine=\"0\",le=\"20.0\"} 5\n"
                  "vllm:request_params_n_bucket{model_name=\"fry\",engine=\"0\",le=\"+Inf\"} 7\n"
                  "vllm:request_params_n_sum{model_name=\"fry\",engine=\"0\"} 147\n"
                  "vllm:request_params_n_count{model_name=\"fry\",engine=\"0\"} 7\n");
    assert_non_null(strstr(read_text(false), "\nshoal_step_seconds_bucket{le=\"0.0001\"} 0\n"));
}

/* An alias of a histogram is the same series under another name. */
static void test_alias(void **state) {
    (void)state;
    metric_observe(metric_get(m, METRIC_VLLM_INTER_TOKEN, "fry", "0"), 0.02);
    char *old = family_text("vllm:time_per_output_token_seconds", false),
         *now = family_text("vllm:inter_token_latency_seconds", false);
    assert_non_null(strstr(old, "_bucket{model_name=\"fry\",engine=\"0\",le=\"0.025\"} 1\n"));
    for (char *a = strstr(old, "_bucket"), *b = strstr(now, "_bucket"); a || b;
         a = strstr(a + 1, "_bucket"), b = strstr(b + 1, "_bucket")) {
        assert_true(a && b);
        assert_memory_equal(a, b, strcspn(b, "\n"));
    }
    free(old);
    free(now);
    metric_observe(metric_get(m, METRIC_VLLM_REQUEST_GENERATION, "fry", "0"), 100);
    metric_observe(metric_get(m, METRIC_VLLM_DECODE_TIME, "fry", "0"), 0.5);
    assert_non_null(strstr(read_text(false), "\nllamacpp:predicted_tokens_seconds 200\n"));
}

/* Every family that is not an alias gets a series; promtool checks the same registry. */
static void fill_all_families(void) {
    const char *labels[] = {"", "one", "two", "three"};
    for (enum metric_id id = 0; id < N_METRICS; id++) {
        const struct metric_family *f = &metric_families[id];
        if (f->alias) continue;
        struct metric *s = metric_find(m, id, labels, f->n_labels);
        if (f->type == METRIC_TYPE_HISTOGRAM)
            metric_observe(s, 0.7);
        else if (f->type == METRIC_TYPE_COUNTER)
            metric_add(s, 1);
        else
            metric_set(s, 2);
    }
}

/* HELP, TYPE, then samples of that family only; each family once. Returns the number of
 * families. */
static int check_exposition(const char *p) {
    bool seen[N_METRICS] = {0};
    const struct metric_family *current = NULL;
    int n = 0, samples = 1;
    for (; *p; p += strcspn(p, "\n") + 1) {
        if (strncmp(p, "# HELP ", 7) == 0) {
            assert_true(samples > 0);
            current = find_family(p + 7, strcspn(p + 7, " "));
            assert_non_null(current);
            assert_false(seen[current - metric_families]);
            seen[current - metric_families] = true;
            n++;
            samples = 0;
            p += strcspn(p, "\n") + 1;
            char *type =
                xasprintf("# TYPE %s %s\n", current->name, metric_type_name(current->type));
            assert_memory_equal(p, type, strlen(type));
            free(type);
        } else {
            assert_ptr_equal(family_of_sample(p, strcspn(p, "{ ")), current);
            samples++;
        }
    }
    return n;
}

static void test_exposition(void **state) {
    (void)state;
    int idle = check_exposition(read_text(false));
    assert_true(idle > 10 && idle < N_METRICS);
    fill_all_families();
    assert_int_equal(check_exposition(read_text(false)), N_METRICS);
}

/* threads */

enum { THREADS = 4, EACH = 50000 };
static struct metric *shared_histogram, *shared_counter;
static atomic_int finished;

static void *observe(void *arg) {
    int t = *(const int *)arg;
    for (int i = 0; i < EACH; i++) {
        metric_observe(shared_histogram, (i + t) % 64);
        metric_add(shared_counter, 3);
        /* Creating series concurrently must not change other series. */
        if (i % 500 == 0) {
            char name[32];
            snprintf(name, sizeof name, "a%d", (i / 500 + t) % 40);
            metric_add(metric_get(m, METRIC_ADAPTER_REQUESTS, name), 1);
        }
    }
    atomic_fetch_add(&finished, 1);
    return NULL;
}

/* One reading: buckets never decrease, +Inf equals the count; returns the count. */
static uint64_t check_buckets(void) {
    char *got = family_text("vllm:request_prompt_tokens", false), *p = got, *last = NULL;
    uint64_t before = 0, n = 0;
    int buckets = 0;
    while ((p = strstr(p, "_bucket{"))) {
        last = strstr(p, "\"} ");
        n = strtoull(last + 3, &p, 10);
        assert_true(n >= before);
        before = n;
        buckets++;
    }
    assert_int_equal(buckets, metric_families[METRIC_VLLM_REQUEST_PROMPT].n_bounds + 1);
    p = strstr(got, "_count{");
    assert_int_equal(strtoull(strstr(p, "} ") + 2, NULL, 10), n);
    free(got);
    return n;
}

static void test_threads(void **state) {
    (void)state;
    pthread_t threads[THREADS];
    int ids[THREADS];
    uint64_t before = 0, reads = 0;
    double expected = 0;
    shared_histogram = metric_get(m, METRIC_VLLM_REQUEST_PROMPT, "fry", "0");
    shared_counter = metric_get(m, METRIC_VLLM_PROMPT_TOKENS, "fry", "0");
    atomic_store(&finished, 0);
    for (int t = 0; t < THREADS; t++) {
        ids[t] = t;
        assert_int_equal(pthread_create(&threads[t], NULL, observe, &ids[t]), 0);
        for (int i = 0; i < EACH; i++) expected += (i + t) % 64;
    }
    do {
        uint64_t now = check_buckets();
        assert_true(now >= before);
        before = now;
        reads++;
    } while (atomic_load(&finished) < THREADS);
    for (int t = 0; t < THREADS; t++) pthread_join(threads[t], NULL);
    assert_true(reads > 0);
    assert_int_equal(check_buckets(), THREADS * EACH);
    assert_true(metric_value(shared_histogram) == expected);
    assert_true(metric_value(shared_counter) == 3.0 * THREADS * EACH);
    expected = 0;
    json_t *all = metrics_json(m), *series, *s;
    series = json_object_get(json_object_get(all, "shoal_requests_total"), "series");
    size_t i;
    json_array_foreach (series, i, s) expected += json_get_number(s, "value");
    assert_int_equal(json_array_size(series), METRICS_ADAPTERS + 1);
    assert_true(expected == THREADS * EACH / 500);
    json_decref(all);
}

/* bounds */

static int count_lines(const char *all, const char *prefix) {
    int n = 0;
    for (const char *p = all; *p; p += strcspn(p, "\n") + 1)
        n += strncmp(p, prefix, strlen(prefix)) == 0;
    return n;
}

static void test_adapters_are_bounded(void **state) {
    (void)state;
    char name[32];
    for (int i = 0; i < 1000; i++) {
        snprintf(name, sizeof name, "adapter-%d", i);
        metric_add(metric_get(m, METRIC_ADAPTER_REQUESTS, name), i);
        metric_observe(metric_get(m, METRIC_ADAPTER_TTFT, name), 1);
    }
    const char *all = read_text(false);
    assert_int_equal(count_lines(all, "shoal_requests_total{"), METRICS_ADAPTERS + 1);
    assert_int_equal(count_lines(all, "shoal_time_to_first_token_seconds_count{"),
                     METRICS_ADAPTERS + 1);
    assert_non_null(strstr(all, "\nshoal_requests_total{adapter=\"adapter-19\"} 19\n"));
    /* 0 + … + 999 less 0 + … + 19 */
    assert_non_null(strstr(all, "\nshoal_requests_total{adapter=\"other\"} 499310\n"));
    assert_non_null(
        strstr(all, "\nshoal_time_to_first_token_seconds_count{adapter=\"other\"} 980\n"));
    assert_ptr_equal(metric_get(m, METRIC_ADAPTER_REQUESTS, "adapter-500"),
                     metric_get(m, METRIC_ADAPTER_REQUESTS, "other"));
    assert_ptr_equal(metric_get(m, METRIC_ADAPTER_REQUESTS, "adapter-7"),
                     metric_get(m, METRIC_ADAPTER_REQUESTS, "adapter-7"));
}

/* A name keeps its slot until its last series is removed. */
static void test_removed_adapter_frees_its_slot(void **state) {
    (void)state;
    metrics_free(m);
    m = metrics_new(1);
    struct metric *requests = metric_get(m, METRIC_ADAPTER_REQUESTS, "old"),
                  *errors = metric_get(m, METRIC_ADAPTER_LOOPS, "old");
    metric_remove(m, requests);
    assert_null(strstr(read_text(false), "shoal_requests_total"));
    metric_get(m, METRIC_ADAPTER_REQUESTS, "new");
    assert_null(strstr(read_text(false), "adapter=\"new\""));
    metric_remove(m, errors);
    metric_get(m, METRIC_ADAPTER_LOOPS, "new");
    assert_non_null(strstr(read_text(false), "shoal_request_loops_total{adapter=\"new\"} 0\n"));
}

static void test_families_are_bounded(void **state) {
    (void)state;
    char reason[32];
    for (int i = 0; i < 3 * METRICS_SERIES; i++) {
        snprintf(reason, sizeof reason, "reason %d", i);
        metric_add(metric_get(m, METRIC_REJECTED, reason), 1);
    }
    const char *all = read_text(false);
    assert_int_equal(count_lines(all, "shoal_requests_rejected_total{"), METRICS_SERIES);
    snprintf(reason, sizeof reason, "{reason=\"other\"} %d\n", 2 * METRICS_SERIES + 1);
    assert_non_null(strstr(all, reason));
}

static void test_hostile_labels(void **state) {
    (void)state;
    char many[100000];
    memset(many, 'x', sizeof many - 1);
    many[sizeof many - 1] = 0;
    metric_add(metric_get(m, METRIC_REJECTED, many), 1);
    metric_add(metric_get(m, METRIC_REJECTED, "\xff\x01\r雪"), 1);
    metric_add(metric_get(m, METRIC_REJECTED, ""), 1);
    char *got = family_text("shoal_requests_rejected_total", false);
    assert_true(strlen(got) < 1000);
    assert_non_null(strstr(got, "{reason=\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd雪\"} 1\n"));
    assert_non_null(strstr(got, "{reason=\"\"} 1\n"));
    free(got);
}

static void test_info_has_one_series(void **state) {
    (void)state;
    metric_set(metric_get(m, METRIC_VLLM_LORA, "4", "a,b", "c"), 100);
    metric_set(metric_get(m, METRIC_VLLM_LORA, "4", "b", ""), 101);
    expect_family("vllm:lora_requests_info", false,
                  "# HELP vllm:lora_requests_info Adapters of running and waiting requests; the "
                  "value is the time of the last change.\n"
                  "# TYPE vllm:lora_requests_info gauge\n"
                  "vllm:lora_requests_info{max_lora=\"4\",running_lora_adapters=\"b\","
                  "waiting_lora_adapters=\"\"} 101\n");
}

/* quantiles */

static void expect_near(double got, double expected) {
    if (fabs(got - expected) > 1e-12 * fmax(1, fabs(expected)))
        fail_msg("%.17g, not %.17g", got, expected);
}

static void test_quantile(void **state) {
    (void)state;
    struct metric *h = metric_get(m, METRIC_VLLM_PARAMS_N, "fry", "0"); /* 1 2 5 10 20 */
    assert_true(isnan(metric_quantile(h, 0.5)));
    for (int i = 0; i < 4; i++) metric_observe(h, 3);
    expect_near(metric_quantile(h, 0.5), 3.5); /* half way from 2 to 5 */
    expect_near(metric_quantile(h, 1), 5);
    metric_observe(h, 0);
    metric_observe(h, 1);
    metric_observe(h, 20);
    metric_observe(h, 1000);
    /* 2 at most 1, 4 up to 5, 1 up to 20, 1 beyond */
    expect_near(metric_quantile(h, 0.125), 0.5);
    expect_near(metric_quantile(h, 0.25), 1);
    expect_near(metric_quantile(h, 0.5), 3.5);
    expect_near(metric_quantile(h, 0.8125), 15);
    expect_near(metric_quantile(h, 0.99), 20);
    assert_true(metric_quantile(h, -0.1) == -INFINITY && metric_quantile(h, 1.1) == INFINITY);
    assert_true(isnan(metric_quantile(h, NAN)));
}

/* All series of a family are removed, and with them an adapter's slot; others stay. */
static void test_clear(void **state) {
    struct buf out = {0};
    (void)state;
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "a"), 1);
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "b"), 2);
    metric_set(metric_get(m, METRIC_TRAIN_STEP, "a"), 3);
    metrics_clear(m, METRIC_TRAIN_LOSS);
    metrics_clear(m, METRIC_WORLD_SPEED);
    metrics_text(m, &out, false);
    assert_null(strstr(out.data, "shoal_train_loss"));
    assert_non_null(strstr(out.data, "shoal_train_step{job=\"a\"} 3"));
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "b"), 4);
    assert_true(metric_value(metric_get(m, METRIC_TRAIN_LOSS, "b")) == 4);
    buf_release(&out);
}

static void test_json(void **state) {
    (void)state;
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "a"), NAN);
    metric_set(metric_get(m, METRIC_TRAIN_LOSS, "b"), 2.5);
    for (int i = 0; i < 4; i++) metric_observe(metric_get(m, METRIC_VLLM_PARAMS_N, "fry", "0"), 3);
    json_t *all = metrics_json(m), *loss = json_object_get(all, "shoal_train_loss"),
           *series = json_object_get(loss, "series"),
           *h = json_array_get(
               json_object_get(json_object_get(all, "vllm:request_params_n"), "series"), 0);
    assert_string_equal(json_get_string(loss, "type"), "gauge");
    assert_int_equal(json_array_size(series), 2);
    assert_true(json_is_null(json_object_get(json_array_get(series, 0), "value")));
    assert_true(json_get_number(json_array_get(series, 1), "value") == 2.5);
    assert_string_equal(
        json_get_string(json_object_get(json_array_get(series, 1), "labels"), "job"), "b");
    assert_true(json_get_number(h, "count") == 4 && json_get_number(h, "sum") == 12);
    expect_near(json_get_number(h, "p50"), 3.5);
    expect_near(json_get_number(h, "p90"), 4.7);
    expect_near(json_get_number(h, "p99"), 4.97);
    assert_null(json_object_get(all, "llamacpp:requests_processing"));
    assert_null(json_object_get(all, "shoal_jobs"));
    json_decref(all);
}

/* process */

static double process_value(const char *name) {
    json_t *all = metrics_json(m), *f = json_object_get(all, name);
    assert_non_null(f);
    double v = json_get_number(json_array_get(json_object_get(f, "series"), 0), "value");
    json_decref(all);
    return v;
}

static void test_process(void **state) {
    (void)state;
    double cpu = process_value("process_cpu_seconds_total"),
           fds = process_value("process_open_fds"), end = clock_now() + 10,
           now = (double)time(NULL);
    int pipes[2], open_fds = 0;
    for (int fd = 0; fd < 1024; fd++) open_fds += fcntl(fd, F_GETFD) != -1;
    assert_true(fds == open_fds);
    assert_int_equal(pipe(pipes), 0);
    assert_true(process_value("process_open_fds") == fds + 2);
    close(pipes[0]);
    close(pipes[1]);
    assert_true(process_value("process_open_fds") == fds);
    while (process_value("process_cpu_seconds_total") <= cpu) assert_true(clock_now() < end);
    double rss = (double)process_memory("VmRSS"),
           got = process_value("process_resident_memory_bytes");
    assert_true(got > rss / 2 && got < rss * 2);
    assert_true(process_value("process_virtual_memory_bytes") > got);
    double start = process_value("process_start_time_seconds");
    assert_true(start > now - 3600 && start < now + 5);
    assert_true(process_value("process_threads") >= 1);
    assert_true(process_value("process_max_fds") >= fds);
    assert_true(process_value("shoal_page_faults_total") > 0); /* the first: minor ones */
    assert_true(process_value("shoal_host_memory_bytes") >
                process_value("shoal_host_memory_available_bytes"));
    double machine = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    assert_true(fabs(process_value("shoal_host_memory_bytes") / machine - 1) < 0.1);
    assert_true(process_value("shoal_cpus") == cpu_count());
}

/* rules and dashboard */

/* Parts of an expression that contain no metric names: label values, ranges, and lists of
 * labels. */
static const char *skip_group(const char *p) {
    static const char *const lists[] = {"without (", "by (", "on ("};
    for (size_t i = 0; i < ARRAY_LEN(lists); i++)
        if (strncmp(p, lists[i], strlen(lists[i])) == 0) return strchr(p, ')') + 1;
    return *p == '{' ? strchr(p, '}') + 1 : *p == '[' ? strchr(p, ']') + 1 : p;
}

static bool is_promql_word(const char *p, size_t n) {
    static const char *const words[] = {"or", "unless", "offset", "Inf", "sum"};
    for (size_t i = 0; i < ARRAY_LEN(words); i++)
        if (strlen(words[i]) == n && memcmp(words[i], p, n) == 0) return true;
    return p[n] == '('; /* a function */
}

/* Every name in an expression is a metric; returns the number of names. */
static int check_names(const char *expr) {
    int n = 0;
    for (const char *p = expr; *p;) {
        const char *next = skip_group(p);
        size_t k = 0;
        while (isalnum((unsigned char)p[k]) || p[k] == '_' || p[k] == ':') k++;
        if (next == p && k && !isdigit((unsigned char)*p) && !is_promql_word(p, k)) {
            if (!family_of_sample(p, k)) fail_msg("no metric '%.*s' in %s", (int)k, p, expr);
            n++;
        }
        p = next != p ? next : p + MAX(k, 1);
    }
    return n;
}

static void test_rules(void **state) {
    (void)state;
    struct error err = {0};
    struct yaml y = {0};
    json_t *rules = metrics_alert_rules(), *list, *rule, *labels;
    size_t i;
    metrics_alert_rules_yaml(&text);
    if (yaml_parse(&y, "rules", text.data, text.len, &err) != OK) fail_msg("%s", err.text);
    assert_true(json_equal(y.root, rules));
    list = json_object_get(json_array_get(json_object_get(rules, "groups"), 0), "rules");
    assert_true(json_array_size(list) >= 12);
    json_array_foreach (list, i, rule) {
        assert_true(check_names(json_get_string(rule, "expr")) > 0);
        assert_null(strchr(json_get_string(rule, "expr"), '$'));
        assert_true(ends_with(json_get_string(rule, "for"), "m"));
        labels = json_object_get(rule, "labels");
        assert_true(strcmp(json_get_string(labels, "severity"), "warning") == 0 ||
                    strcmp(json_get_string(labels, "severity"), "critical") == 0);
        assert_true(*json_get_string(json_object_get(rule, "annotations"), "summary"));
    }
    json_decref(rules);
    yaml_release(&y);
}

static double grid_number(const json_t *panel, const char *key) {
    return json_get_number(json_object_get(panel, "gridPos"), key);
}

static bool panels_overlap(const json_t *a, const json_t *b) {
    return grid_number(a, "x") < grid_number(b, "x") + grid_number(b, "w") &&
           grid_number(b, "x") < grid_number(a, "x") + grid_number(a, "w") &&
           grid_number(a, "y") < grid_number(b, "y") + grid_number(b, "h") &&
           grid_number(b, "y") < grid_number(a, "y") + grid_number(a, "h");
}

static void test_dashboard(void **state) {
    (void)state;
    json_t *d = metrics_dashboard(), *panels = json_object_get(d, "panels"), *p, *target;
    size_t i, k;
    int drawn = 0, wanted = 0;
    for (int f = 0; f < N_METRICS; f++) wanted += metric_families[f].section != NULL;
    json_array_foreach (panels, i, p) {
        assert_true(json_get_number(p, "id") == (double)i + 1);
        json_array_foreach (json_object_get(p, "targets"), k, target)
            assert_int_equal(check_names(json_get_string(target, "expr")), 1);
        drawn += strcmp(json_get_string(p, "type"), "timeseries") == 0;
        for (k = 0; k < i; k++) assert_false(panels_overlap(p, json_array_get(panels, k)));
        assert_true(grid_number(p, "x") + grid_number(p, "w") <= 24);
    }
    assert_true(wanted > 40);
    assert_int_equal(drawn, wanted);
    json_decref(d);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_names_that_other_programs_query),
        cmocka_unit_test_setup_teardown(test_text, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_counter_in_both_formats, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_histogram_text, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_alias, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_exposition, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_threads, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_adapters_are_bounded, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_removed_adapter_frees_its_slot, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_families_are_bounded, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_hostile_labels, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_info_has_one_series, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_quantile, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_clear, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_json, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_process, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rules, set_up, tear_down),
        cmocka_unit_test(test_dashboard),
    };
    bool open = argc == 2 && strcmp(argv[1], "--openmetrics") == 0;
    if (open || (argc == 2 && strcmp(argv[1], "--exposition") == 0)) {
        set_up(NULL);
        fill_all_families();
        fputs(read_text(open), stdout);
        return tear_down(NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
