/*
 * metrics: the registry of metrics, and its output as Prometheus' text, OpenMetrics and JSON.
 *
 * The numbers of a series are the value of a counter or gauge, or the sum and one count per bucket
 * of a histogram. They change only by atomic operations. Adding to a double is a compare-and-swap
 * of its bits. Everything else in the registry is protected by its lock, which is held while the
 * text is written.
 *
 * Invariants. 1. A series never moves while it exists. 2. The count of a histogram in the output is
 * the sum of its buckets as they were read, so that buckets, +Inf and count agree despite
 * concurrent observations; the sum of values may lack or include the latest observations. 3. The
 * families with the label "adapter" have at most max_adapters names in addition to "other".
 */
#define _GNU_SOURCE
#include "ops/ops.h"

#include "kernel/kernel.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Upper bounds of buckets. Families with vLLM's names have vLLM's bounds, so that dashboards and
 * rules for vLLM work. Steps of a small model need finer bounds. */
static const double bounds_FIRST_TOKEN[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
                                            0.25,  0.5,   0.75, 1,    2.5,  5,    7.5,  10,
                                            20,    40,    80,   160,  640,  2560};
static const double bounds_PER_TOKEN[] = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                                          0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
static const double bounds_REQUEST[] = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                        30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
static const double bounds_STEP[] = {0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02,
                                     0.05,   0.1,    0.2,    0.5,   1,     2,     5,    10};
static const double bounds_TOKENS[] = {1,    2,    5,    10,    20,    50,    100,    200,   500,
                                       1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000};
static const double bounds_STEP_TOKENS[] = {1,   8,    16,   32,   64,   128,  256,
                                            512, 1024, 2048, 4096, 8192, 16384};
static const double bounds_CHOICES[] = {1, 2, 5, 10, 20};
static const double bounds_BYTES[] = {100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8};
static const double bounds_NONE[0];

#define BOUNDS(scale) .bounds = bounds_##scale, .n_bounds = (int)ARRAY_LEN(bounds_##scale)
#define LABELS(...)                                                                                \
    .labels = {__VA_ARGS__},                                                                       \
    .n_labels = (int)(sizeof((const char *const[]){__VA_ARGS__}) / sizeof(const char *))
#define FAMILY(id, kind, its_name, scale, its_section, its_help, ...)                              \
    [METRIC_##id] = {.name = its_name,                                                             \
                     .type = METRIC_TYPE_##kind,                                                   \
                     .section = its_section,                                                       \
                     .help = its_help,                                                             \
                     BOUNDS(scale),                                                                \
                     LABELS(__VA_ARGS__)},
#define ALIAS(id, how, kind, its_name, of, its_help, ...)                                          \
    [METRIC_##id] = {.name = its_name,                                                             \
                     .type = METRIC_TYPE_##kind,                                                   \
                     .help = its_help,                                                             \
                     .alias = METRIC_ALIAS_##how,                                                  \
                     .source = METRIC_##of,                                                        \
                     LABELS(__VA_ARGS__)},
const struct metric_family metric_families[N_METRICS] = {
#include "ops/metrics.inc"
};
#undef FAMILY
#undef ALIAS

/* Maximum bytes of a label's value, and of a label's value of an info metric. Longer values are
 * cut. */
enum { LABEL_BYTES = 200, INFO_BYTES = 4000 };

struct metric {
    const struct metric_family *family;
    char *values[METRICS_LABELS];
    char *labels;               /* name="value",…; escaped */
    _Atomic uint64_t value;     /* bits of a double; for a histogram its sum */
    _Atomic uint64_t buckets[]; /* [n_bounds + 1] of a histogram; not cumulative */
};
struct metrics {
    pthread_mutex_t lock;
    struct family_series {
        struct metric **v; /* [n], in order of creation */
        int n;
    } series[N_METRICS];
    struct adapter_name {
        char *name;
        int series; /* number of series with this name */
    } * adapters;   /* [n_adapters of max_adapters] */
    int n_adapters, max_adapters;
    struct nvml *gpus;
};

const char *metric_type_name(enum metric_type type) {
    static const char *const names[] = {
        [METRIC_TYPE_COUNTER] = "counter",
        [METRIC_TYPE_GAUGE] = "gauge",
        [METRIC_TYPE_INFO] = "gauge",
        [METRIC_TYPE_HISTOGRAM] = "histogram",
    };
    return names[type];
}

/* values */

static uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static double double_of(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void value_add(_Atomic uint64_t *value, double x) {
    uint64_t old = atomic_load_explicit(value, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(value, &old, bits_of(double_of(old) + x),
                                                  memory_order_relaxed, memory_order_relaxed))
        continue;
}

void metric_add(struct metric *s, double x) {
    CHECK(s->family->type == METRIC_TYPE_GAUGE ||
          (s->family->type == METRIC_TYPE_COUNTER && x >= 0));
    value_add(&s->value, x);
}

void metric_set_total(struct metric *s, double x) {
    CHECK(s->family->type == METRIC_TYPE_COUNTER);
    uint64_t old = atomic_load_explicit(&s->value, memory_order_relaxed);
    while (x > double_of(old) &&
           !atomic_compare_exchange_weak_explicit(&s->value, &old, bits_of(x), memory_order_relaxed,
                                                  memory_order_relaxed))
        continue;
}

void metric_set(struct metric *s, double x) {
    CHECK(s->family->type == METRIC_TYPE_GAUGE || s->family->type == METRIC_TYPE_INFO);
    atomic_store_explicit(&s->value, bits_of(x), memory_order_relaxed);
}

void metric_observe(struct metric *s, double x) {
    const struct metric_family *f = s->family;
    CHECK(f->type == METRIC_TYPE_HISTOGRAM && x >= 0);
    int i = 0;
    while (i < f->n_bounds && x > f->bounds[i]) i++;
    atomic_fetch_add_explicit(&s->buckets[i], 1, memory_order_relaxed);
    value_add(&s->value, x);
}

double metric_value(const struct metric *s) {
    return double_of(atomic_load_explicit(&s->value, memory_order_relaxed));
}

/* Sets counts [n_bounds + 1] to the cumulative counts of the buckets. Returns the last one, the
 * number of observations. */
static uint64_t histogram_read(const struct metric *s, uint64_t counts[METRICS_BOUNDS + 1]) {
    uint64_t sum = 0;
    for (int i = 0; i <= s->family->n_bounds; i++) {
        sum += atomic_load_explicit(&s->buckets[i], memory_order_relaxed);
        counts[i] = sum;
    }
    return sum;
}

/* The q-quantile from cumulative counts. */
static double histogram_quantile(const struct metric_family *f, const uint64_t *counts, double q) {
    CHECK(f->type == METRIC_TYPE_HISTOGRAM);
    uint64_t total = counts[f->n_bounds];
    if (total == 0 || isnan(q)) return NAN;
    if (q < 0 || q > 1) return q < 0 ? -INFINITY : INFINITY;
    double rank = q * (double)total;
    int i = 0;
    while (i < f->n_bounds && (double)counts[i] < rank) i++;
    if (i == f->n_bounds) return f->bounds[i - 1];
    double lower_count = i > 0 ? (double)counts[i - 1] : 0,
           lower_bound = i > 0 ? f->bounds[i - 1] : 0;
    return lower_bound +
           (f->bounds[i] - lower_bound) * (rank - lower_count) / ((double)counts[i] - lower_count);
}

double metric_quantile(const struct metric *s, double q) {
    uint64_t counts[METRICS_BOUNDS + 1];
    histogram_read(s, counts);
    return histogram_quantile(s->family, counts, q);
}

double metric_histogram_quantile(enum metric_id id, const uint64_t *counts, double q) {
    uint64_t sums[METRICS_BOUNDS + 1], sum = 0;
    for (int i = 0; i <= metric_families[id].n_bounds; i++) sums[i] = sum += counts[i];
    return histogram_quantile(&metric_families[id], sums, q);
}

/* series */

static void labels_write(struct buf *b, const struct metric_family *f, char *const *values) {
    for (int i = 0; i < f->n_labels; i++) {
        buf_printf(b, "%s%s=\"", i ? "," : "", f->labels[i]);
        for (const char *p = values[i]; *p; p++) {
            if (*p == '\\' || *p == '"') buf_puts(b, "\\");
            buf_add(b, *p == '\n' ? "\\n" : p, *p == '\n' ? 2 : 1);
        }
        buf_puts(b, "\"");
    }
}

/* Converts a label's value to valid text of bounded length. */
static char *label_clean(const char *text, size_t max_bytes) {
    struct buf b = {0};
    buf_puts(&b, "");
    buf_add_sanitized(&b, text, strnlen(text, max_bytes));
    return b.data;
}

static void labels_set(struct metric *s, char **values) {
    struct buf b = {0};
    buf_puts(&b, "");
    labels_write(&b, s->family, values);
    free(s->labels);
    s->labels = b.data;
    for (int i = 0; i < s->family->n_labels; i++) {
        free(s->values[i]);
        s->values[i] = values[i];
        values[i] = NULL;
    }
}

static struct metric *series_new(const struct metric_family *f) {
    size_t n = f->type == METRIC_TYPE_HISTOGRAM ? (size_t)f->n_bounds + 1 : 0;
    struct metric *s = xcalloc(1, sizeof *s + n * sizeof s->buckets[0]);
    s->family = f;
    return s;
}

static void series_free(struct metric *s) {
    for (int i = 0; i < s->family->n_labels; i++) free(s->values[i]);
    free(s->labels);
    free(s);
}

static bool labels_equal(const struct metric *s, char *const *values) {
    for (int i = 0; i < s->family->n_labels; i++)
        if (strcmp(s->values[i], values[i]) != 0) return false;
    return true;
}

static struct metric *series_find(const struct family_series *all, char *const *values) {
    for (int i = 0; i < all->n; i++)
        if (labels_equal(all->v[i], values)) return all->v[i];
    return NULL;
}

/* The element of `values` for the label "adapter"; NULL: the family has no such label. */
static char **adapter_label(const struct metric_family *f, char **values) {
    for (int i = 0; i < f->n_labels; i++)
        if (strcmp(f->labels[i], "adapter") == 0) return &values[i];
    return NULL;
}

static struct adapter_name *adapter_find(struct metrics *m, const char *name) {
    for (int i = 0; i < m->n_adapters; i++)
        if (strcmp(m->adapters[i].name, name) == 0) return &m->adapters[i];
    return NULL;
}

static void value_set_other(char **value) {
    free(*value);
    *value = xstrdup("other");
}

/* Replaces an adapter name that is not in the table of names by "other" if the table is full. */
static void adapter_limit_names(struct metrics *m, char **value) {
    if (m->n_adapters == m->max_adapters && !adapter_find(m, *value)) value_set_other(value);
}

/* Adds `step` to the number of series with the adapter name of `s`. Adds a new name to the table,
 * and removes a name without series. */
static void adapter_count_series(struct metrics *m, struct metric *s, int step) {
    char **value = adapter_label(s->family, s->values);
    if (!value || strcmp(*value, "other") == 0) return;
    struct adapter_name *a = adapter_find(m, *value);
    if (!a) {
        a = &m->adapters[m->n_adapters++];
        *a = (struct adapter_name){.name = xstrdup(*value)};
    }
    a->series += step;
    if (a->series > 0) return;
    free(a->name);
    *a = m->adapters[--m->n_adapters];
}

static struct metric *series_add(struct metrics *m, enum metric_id id, char **values) {
    struct family_series *all = &m->series[id];
    struct metric *s = series_new(&metric_families[id]);
    labels_set(s, values);
    all->v = xrealloc(all->v, (size_t)(all->n + 1) * sizeof *all->v);
    all->v[all->n++] = s;
    adapter_count_series(m, s, 1);
    return s;
}

/* Finds or adds the series with these values [n_labels]. The values are malloc'ed: takes ownership
 * of those that it sets to NULL, and may replace others. */
static struct metric *series_get(struct metrics *m, enum metric_id id, char **values) {
    const struct metric_family *f = &metric_families[id];
    struct family_series *all = &m->series[id];
    char **adapter = adapter_label(f, values);
    if (f->type == METRIC_TYPE_INFO && all->n) {
        labels_set(all->v[0], values);
        return all->v[0];
    }
    if (adapter) adapter_limit_names(m, adapter);
    struct metric *s = series_find(all, values);
    if (!s && all->n >= METRICS_SERIES - 1) {
        for (int i = 0; i < f->n_labels; i++) value_set_other(&values[i]);
        s = series_find(all, values);
    }
    return s ? s : series_add(m, id, values);
}

/* metric_find for callers that hold the lock. */
static struct metric *find_locked(struct metrics *m, enum metric_id id, const char *const *labels) {
    const struct metric_family *f = &metric_families[id];
    char *values[METRICS_LABELS] = {0};
    for (int i = 0; i < f->n_labels; i++)
        values[i] =
            label_clean(labels[1 + i], f->type == METRIC_TYPE_INFO ? INFO_BYTES : LABEL_BYTES);
    struct metric *s = series_get(m, id, values);
    for (int i = 0; i < f->n_labels; i++) free(values[i]);
    return s;
}

struct metric *metric_find(struct metrics *m, enum metric_id id, const char *const *labels, int n) {
    CHECK((unsigned)id < N_METRICS && !metric_families[id].alias);
    CHECK(n == metric_families[id].n_labels);
    pthread_mutex_lock(&m->lock);
    struct metric *s = find_locked(m, id, labels);
    pthread_mutex_unlock(&m->lock);
    return s;
}

void metric_remove(struct metrics *m, struct metric *series) {
    struct family_series *all = &m->series[series->family - metric_families];
    int i = 0;
    pthread_mutex_lock(&m->lock);
    while (i < all->n && all->v[i] != series) i++;
    CHECK(i < all->n);
    memmove(&all->v[i], &all->v[i + 1], (size_t)(--all->n - i) * sizeof *all->v);
    adapter_count_series(m, series, -1);
    pthread_mutex_unlock(&m->lock);
    series_free(series);
}

void metrics_clear(struct metrics *m, enum metric_id id) {
    struct family_series *all = &m->series[id];
    pthread_mutex_lock(&m->lock);
    while (all->n) {
        struct metric *last = all->v[--all->n];
        adapter_count_series(m, last, -1);
        series_free(last);
    }
    pthread_mutex_unlock(&m->lock);
}

struct metrics *metrics_new(int max_adapters) {
    CHECK(max_adapters >= 0);
    struct metrics *m = xcalloc(1, sizeof *m);
    pthread_mutex_init(&m->lock, NULL);
    m->max_adapters = max_adapters ? max_adapters : METRICS_ADAPTERS;
    m->adapters = xcalloc((size_t)m->max_adapters, sizeof *m->adapters);
    m->gpus = nvml_open();
    for (enum metric_id id = 0; id < N_METRICS; id++) {
        const struct metric_family *f = &metric_families[id];
        CHECK(f->name && f->n_bounds <= METRICS_BOUNDS);
        if (!f->n_labels && !f->alias &&
            (f->type == METRIC_TYPE_COUNTER || f->type == METRIC_TYPE_HISTOGRAM))
            metric_get(m, id);
    }
    metric_set(metric_get(m, METRIC_BUILD, SHOAL_VERSION, kernels_get()->name), 1);
    metric_set(metric_get(m, METRIC_CPUS), cpu_count());
    return m;
}

void metrics_free(struct metrics *m) {
    if (!m) return;
    for (int id = 0; id < N_METRICS; id++) {
        for (int i = 0; i < m->series[id].n; i++) series_free(m->series[id].v[i]);
        free(m->series[id].v);
    }
    for (int i = 0; i < m->n_adapters; i++) free(m->adapters[i].name);
    free(m->adapters);
    nvml_close(m->gpus);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

/* metrics of the process and the machine, read on demand; callers hold the lock */

/* A negative value is unavailable: then the series is not changed. */
static void set_if_available(struct metrics *m, enum metric_id id, const char *label, double x) {
    if (x < 0) return;
    struct metric *s = find_locked(m, id, (const char *const[]){"", label});
    if (s->family->type == METRIC_TYPE_COUNTER)
        metric_set_total(s, x);
    else
        metric_set(s, x);
}

static double family_sum(const struct metrics *m, enum metric_id id) {
    double sum = 0;
    for (int i = 0; i < m->series[id].n; i++) sum += metric_value(m->series[id].v[i]);
    return sum;
}

static void read_gpus(struct metrics *m) {
    struct gpu_stats gpus[GPUS_MAX];
    int n = nvml_read(m->gpus, gpus);
    for (int i = 0; i < n; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        set_if_available(m, METRIC_GPU_BUSY, name, gpus[i].utilization);
        set_if_available(m, METRIC_GPU_USED, name, gpus[i].used);
        set_if_available(m, METRIC_GPU_MEMORY, name, gpus[i].total);
    }
}

static void read_figures(struct metrics *m) {
    struct process_stats p = process_read();
    double decoding = family_sum(m, METRIC_VLLM_DECODE_TIME);
    set_if_available(m, METRIC_PROCESS_CPU, NULL, p.cpu);
    set_if_available(m, METRIC_PROCESS_START, NULL, p.start);
    set_if_available(m, METRIC_PROCESS_RESIDENT, NULL, p.resident);
    set_if_available(m, METRIC_PROCESS_VIRTUAL, NULL, p.virtual_bytes);
    set_if_available(m, METRIC_PROCESS_THREADS, NULL, p.threads);
    set_if_available(m, METRIC_PROCESS_FDS, NULL, p.fds);
    set_if_available(m, METRIC_PROCESS_MAX_FDS, NULL, p.max_fds);
    set_if_available(m, METRIC_PAGE_FAULTS, "minor", p.minor_faults);
    set_if_available(m, METRIC_PAGE_FAULTS, "major", p.major_faults);
    set_if_available(m, METRIC_HOST_MEMORY, NULL, p.host_memory);
    set_if_available(m, METRIC_HOST_AVAILABLE, NULL, p.host_available);
    if (decoding > 0)
        set_if_available(m, METRIC_LLAMA_SPEED, NULL,
                         family_sum(m, METRIC_VLLM_REQUEST_GENERATION) / decoding);
    read_gpus(m);
}

void metrics_refresh(struct metrics *m) {
    pthread_mutex_lock(&m->lock);
    read_figures(m);
    pthread_mutex_unlock(&m->lock);
}

static bool has_label(const struct metric *s, const char *value) {
    for (int i = 0; i < s->family->n_labels; i++)
        if (strcmp(s->values[i], value) == 0) return true;
    return false;
}

struct metric_aggregate metric_aggregate_read(struct metrics *m, enum metric_id id,
                                              const char *label) {
    struct metric_aggregate r = {0};
    const struct family_series *all = &m->series[id];
    pthread_mutex_lock(&m->lock);
    for (int i = 0; i < all->n; i++) {
        if (label && !has_label(all->v[i], label)) continue;
        r.n++;
        r.value += metric_value(all->v[i]);
        if (metric_families[id].type != METRIC_TYPE_HISTOGRAM) continue;
        for (int k = 0; k <= metric_families[id].n_bounds; k++)
            r.counts[k] += atomic_load_explicit(&all->v[i]->buckets[k], memory_order_relaxed);
    }
    pthread_mutex_unlock(&m->lock);
    return r;
}

/* text */

/* Appends a number with as few digits as convert back to the same double, at least 15 if needed. */
static void add_number(struct buf *b, double x) {
    char text[32];
    if (isnan(x) || isinf(x)) {
        buf_puts(b, isnan(x) ? "NaN" : x > 0 ? "+Inf" : "-Inf");
        return;
    }
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    buf_puts(b, text);
}

/* Appends a line "name{labels} value". */
static void add_sample(struct buf *b, const char *name, const char *suffix, const char *labels,
                       double x) {
    buf_printf(b, "%s%s", name, suffix);
    if (*labels) buf_printf(b, "{%s}", labels);
    buf_puts(b, " ");
    add_number(b, x);
    buf_puts(b, "\n");
}

/* Bounds are written as floats ("1.0") in both formats, as vLLM does and OpenMetrics requires,
 * because the value of a label must not depend on the format. */
static void add_bucket(struct buf *b, const char *name, const struct metric *s, int i, uint64_t n) {
    double bound = i < s->family->n_bounds ? s->family->bounds[i] : INFINITY;
    buf_printf(b, "%s_bucket{%s%sle=\"", name, s->labels, *s->labels ? "," : "");
    add_number(b, bound);
    buf_printf(b, "%s\"} %llu\n", bound == floor(bound) && isfinite(bound) ? ".0" : "",
               (unsigned long long)n);
}

static void add_histogram(struct buf *b, const char *name, const struct metric *s) {
    uint64_t counts[METRICS_BOUNDS + 1], total = histogram_read(s, counts);
    for (int i = 0; i <= s->family->n_bounds; i++) add_bucket(b, name, s, i, counts[i]);
    add_sample(b, name, "_sum", s->labels, metric_value(s));
    add_sample(b, name, "_count", s->labels, (double)total);
}

/* In OpenMetrics the heading names a family of counters without the suffix _total of its samples.
 */
static void add_heading(struct buf *b, const struct metric_family *f, bool openmetrics) {
    int n = (int)strlen(f->name);
    if (openmetrics && f->type == METRIC_TYPE_COUNTER) n -= (int)strlen("_total");
    buf_printf(b, "# HELP %.*s %s\n# TYPE %.*s %s\n", n, f->name, f->help, n, f->name,
               metric_type_name(f->type));
}

static void add_family(struct buf *b, const struct metrics *m, enum metric_id id, bool open) {
    const struct metric_family *f = &metric_families[id];
    enum metric_id source = f->alias ? f->source : id;
    const struct family_series *all = &m->series[source];
    if (!all->n) return;
    add_heading(b, f, open);
    if (f->alias == METRIC_ALIAS_SUM) add_sample(b, f->name, "", "", family_sum(m, source));
    for (int i = 0; f->alias != METRIC_ALIAS_SUM && i < all->n; i++) {
        if (f->type == METRIC_TYPE_HISTOGRAM)
            add_histogram(b, f->name, all->v[i]);
        else
            add_sample(b, f->name, "", all->v[i]->labels, metric_value(all->v[i]));
    }
}

void metrics_text(struct metrics *m, struct buf *out, bool openmetrics) {
    pthread_mutex_lock(&m->lock);
    read_figures(m);
    for (enum metric_id id = 0; id < N_METRICS; id++) add_family(out, m, id, openmetrics);
    pthread_mutex_unlock(&m->lock);
    if (openmetrics) buf_puts(out, "# EOF\n");
}

/* JSON */

static json_t *number_json(double x) {
    return isfinite(x) ? json_real(x) : json_null();
}

static json_t *series_json(const struct metric *s) {
    const struct metric_family *f = s->family;
    json_t *labels = json_object(), *v = json_pack("{s:o}", "labels", labels);
    uint64_t counts[METRICS_BOUNDS + 1];
    for (int i = 0; i < f->n_labels; i++)
        json_object_set_new(labels, f->labels[i], json_string(s->values[i]));
    if (f->type != METRIC_TYPE_HISTOGRAM) {
        json_object_set_new(v, "value", number_json(metric_value(s)));
        return v;
    }
    json_object_set_new(v, "count", json_integer((json_int_t)histogram_read(s, counts)));
    json_object_set_new(v, "sum", number_json(metric_value(s)));
    json_object_set_new(v, "p50", number_json(metric_quantile(s, 0.5)));
    json_object_set_new(v, "p90", number_json(metric_quantile(s, 0.9)));
    json_object_set_new(v, "p99", number_json(metric_quantile(s, 0.99)));
    return v;
}

json_t *metrics_json(struct metrics *m) {
    json_t *all = json_object();
    pthread_mutex_lock(&m->lock);
    read_figures(m);
    for (enum metric_id id = 0; id < N_METRICS; id++) {
        const struct metric_family *f = &metric_families[id];
        json_t *list = json_array();
        for (int i = 0; i < m->series[id].n; i++)
            json_array_append_new(list, series_json(m->series[id].v[i]));
        if (m->series[id].n)
            json_object_set_new(all, f->name,
                                json_pack("{s:s,s:s,s:O}", "type", metric_type_name(f->type),
                                          "help", f->help, "series", list));
        json_decref(list);
    }
    pthread_mutex_unlock(&m->lock);
    return all;
}
