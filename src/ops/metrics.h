/*
 * metrics: what the server counts and measures, and its text for Prometheus.
 *
 * All metrics are declared in metrics.inc, one row a family; a series is a family with values for
 * its labels. metric_get finds a series or makes it, under the registry's lock; who counts often
 * keeps the handle, because metric_add, metric_total, metric_set and metric_observe are atomic,
 * take no lock and may be called by any thread at any time. The registry owns its series. A handle
 * is good until the registry is freed or the series is removed: like freed memory, nobody may use
 * a removed one.
 *
 * What is labelled with names from outside is bounded. Of adapters the first so many names have
 * series of their own, the same in all families, and the others share "other"; so a server asks
 * first for those it was started with. No family has more than METRICS_SERIES series: what comes
 * then shares one whose labels are all "other".
 *
 * Families without labels that are counters or histograms are there from the start, at 0. A family
 * without series is not in the text.
 */
#ifndef SHOAL_METRICS_H
#define SHOAL_METRICS_H

#include "base/base.h"

enum { METRICS_LABELS = 3, METRICS_BOUNDS = 24, METRICS_SERIES = 512, METRICS_ADAPTERS = 20 };

#define FAMILY(id, ...) METRIC_##id,
#define ALIAS(id, ...) METRIC_##id,
enum metric_id {
#include "ops/metrics.inc"
    N_METRICS
};
#undef FAMILY
#undef ALIAS

enum metric_type {
    METRIC_TYPE_COUNTER,
    METRIC_TYPE_GAUGE,
    METRIC_TYPE_INFO, /* a gauge with one series, which is given the labels last asked for */
    METRIC_TYPE_HISTOGRAM,
};
enum metric_alias { METRIC_ALIAS_NONE, METRIC_ALIAS_SAME, METRIC_ALIAS_SUM };

struct metric_family {
    const char *name, *help, *section; /* section of the dashboard, or NULL */
    enum metric_type type;
    const char *labels[METRICS_LABELS]; /* [n_labels] */
    int n_labels;
    const double *bounds; /* [n_bounds] upper ones of a histogram, but for +Inf */
    int n_bounds;
    enum metric_alias alias;
    enum metric_id source; /* of an alias: whose series it shows */
};
extern const struct metric_family metric_families[N_METRICS];
const char *metric_type_name(enum metric_type type); /* as Prometheus calls it */

struct metrics *metrics_new(int max_adapters); /* 0: METRICS_ADAPTERS */
void metrics_free(struct metrics *m);

/* metric_get(m, METRIC_VLLM_RUNNING, "fry", "0"): values for all labels of a family, in its order.
 * They may hold anything; what is no text is replaced and what is too long is cut. */
#define metric_get(m, id, ...)                                                                     \
    metric_find(m, id, (const char *const[]){"", ##__VA_ARGS__},                                   \
                (int)ARRAY_LEN(((const char *const[]){"", ##__VA_ARGS__})) - 1)
/* The same as a function; labels [1 + n], the first is not looked at. */
struct metric *metric_find(struct metrics *m, enum metric_id id, const char *const *labels, int n);
/* For what has ended, such as a job. An adapter's last series gives its name's place back. */
void metric_remove(struct metrics *m, struct metric *series);
void metrics_clear(struct metrics *m, enum metric_id id); /* all of a family */

void metric_add(struct metric *s, double x);     /* counter: x >= 0; gauge: any */
void metric_total(struct metric *s, double x);   /* counter: a total kept elsewhere; never falls */
void metric_set(struct metric *s, double x);     /* gauge; NaN and Inf are shown as such */
void metric_observe(struct metric *s, double x); /* histogram: x >= 0 */
double metric_value(const struct metric *s);     /* a histogram's is its sum */
/* The q-quantile of what a histogram observed, linear within a bucket, as Prometheus'
 * histogram_quantile: above the last bound it is that bound; NaN without observations. */
double metric_quantile(const struct metric *s, double q);

/* Answer to GET /metrics; OpenMetrics if the client's Accept asks for it. Reads process and GPU. */
#define METRICS_TYPE_TEXT "text/plain; version=0.0.4; charset=utf-8"
#define METRICS_TYPE_OPEN "application/openmetrics-text; version=1.0.0; charset=utf-8"
void metrics_text(struct metrics *m, struct buf *out, bool openmetrics);
/* {name: {type, help, series: [{labels, value}]}} of families with series, aliases left out; of
 * histograms count, sum, p50, p90 and p99 in place of the value. A number that is none is null. */
json_t *metrics_json(struct metrics *m);

/* Figures of the process and the machine as they are now; metrics_text and _json do it themselves.
 */
void metrics_refresh(struct metrics *m);
/* All series of a family with this value for some label (NULL: all of them), as one. */
struct metric_aggregate {
    int n;                               /* series */
    double value;                        /* their sum */
    uint64_t counts[METRICS_BOUNDS + 1]; /* of histograms, by bucket */
};
struct metric_aggregate metric_aggregate_read(struct metrics *m, enum metric_id id, const char *label);
/* metric_quantile of such counts. */
double metric_histogram_quantile(enum metric_id id, const uint64_t *counts, double q);

/*
 * What is worth waking somebody for: rules over the table's families, for Prometheus as expressions
 * and for alerts.h as they are. An alert is raised when what its form says of its families a and b
 * has been above (or below) the limit for so long.
 */
enum alert_condition {
    ALERT_ABSENT,     /* there is no a */
    ALERT_BELOW,      /* a < limit */
    ALERT_UNCHANGED,      /* a has not changed in the last minutes */
    ALERT_ABOVE,      /* a > limit */
    ALERT_RATIO,      /* a / b > limit */
    ALERT_USAGE,       /* 1 - a / b > limit */
    ALERT_RATE,       /* a in a second, over b > limit */
    ALERT_RATE_RATIO, /* of a and b in the last minutes, by nothing but their adapter > limit */
    ALERT_P95,        /* of what the histogram a observed in the last minutes > limit */
    ALERT_NOT_FINITE,  /* a is NaN or infinite */
    ALERT_FAILED,     /* a grew where its state is "failed" */
    ALERT_RESTARTS,   /* a changed more than limit times in an hour */
};
struct alert_rule {
    const char *name, *severity;
    int lasts; /* seconds */
    enum alert_condition form;
    double limit;
    enum metric_id a, b;
    const char *summary;
};
enum { N_ALERT_RULES = 13, ALERT_WINDOW_SECONDS = 300 /* seconds: "the last minutes" */ };
extern const struct alert_rule alert_rules[N_ALERT_RULES];

/* Alerts for Prometheus: {groups: [{name, rules: [{alert, expr, for, labels, annotations}]}]},
 * and the same as the YAML of a rule file. */
json_t *metrics_alert_rules(void);
void metrics_alert_rules_yaml(struct buf *out);
json_t *metrics_dashboard(void); /* for Grafana: a panel for every family that has a section */

#endif
