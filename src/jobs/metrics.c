/*
 * metrics: a curve for each metric that a job reports, created on its first value.
 *
 * Invariant: the points of a curve are in the order of time, even if the clock was set back or a
 * file was modified: a point with an earlier time gets the time of the last point.
 */
#include "jobs/jobs.h"

#include "base/base.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char PREFIX[] = "shoal_";

struct job_metrics {
    double started_at; /* 0: no values yet */
    struct series {
        struct curve curve;
        double last_time, last_value; /* last_value may be NaN; the curve omits such values */
    } * v[N_METRICS];                 /* NULL: not reported yet */
};

bool is_job_metric(enum metric_id id) {
    const struct metric_family *f = &metric_families[id];
    return f->type == METRIC_TYPE_GAUGE && f->n_labels == 1 && strcmp(f->labels[0], "job") == 0;
}

static const char *job_metric_name(enum metric_id id) {
    return metric_families[id].name + strlen(PREFIX);
}

enum metric_id job_metric_find(const char *name) {
    enum metric_id id = 0;
    while (id < N_METRICS && !(is_job_metric(id) && strcmp(job_metric_name(id), name) == 0)) id++;
    return id;
}

static struct job_metrics *job_metrics_new(void) {
    return xcalloc(1, sizeof(struct job_metrics));
}

void job_metrics_free(struct job_metrics *f) {
    for (int id = 0; f && id < N_METRICS; id++) free(f->v[id]);
    free(f);
}

static struct series *series_get(struct job_metrics *f, enum metric_id id) {
    if (!f->v[id]) f->v[id] = xcalloc(1, sizeof *f->v[id]);
    return f->v[id];
}

static double number_of(const json_t *v) {
    return json_is_number(v) ? json_number_value(v) : NAN;
}

void job_metrics_record(struct job_metrics *f, double time, const json_t *line) {
    const char *name;
    json_t *v;
    if (f->started_at == 0) f->started_at = floor(time);
    json_object_foreach ((json_t *)(uintptr_t)line, name, v) {
        enum metric_id id = job_metric_find(name);
        if (id == N_METRICS || !(json_is_number(v) || json_is_null(v))) continue;
        struct series *t = series_get(f, id);
        t->last_time = fmax(t->last_time, time - f->started_at);
        t->last_value = number_of(v);
        curve_add(&t->curve, t->last_time, t->last_value);
    }
}

static json_t *number_json(double x) {
    return isfinite(x) ? json_real(x) : json_null();
}

json_t *job_metrics_latest(const struct job_metrics *f) {
    json_t *out = json_object();
    for (enum metric_id id = 0; id < N_METRICS; id++)
        if (f->v[id])
            json_object_set_new(out, job_metric_name(id), number_json(f->v[id]->last_value));
    return out;
}

static void point_add(json_t *times, json_t *values, double x, double y) {
    json_array_append_new(times, json_real(round(x * 1000) / 1000));
    json_array_append_new(values, json_real(y));
}

/* The curve as JSON; an incomplete mean is the last point. */
static json_t *curve_json(enum metric_id id, const struct curve *c) {
    json_t *times = json_array(), *values = json_array();
    for (int i = 0; i < c->n; i++) point_add(times, values, c->x[i], c->y[i]);
    if (c->n_summed)
        point_add(times, values, c->sum_x / (double)c->n_summed, c->sum_y / (double)c->n_summed);
    return json_pack("{s:s,s:s,s:s,s:I,s:o,s:o}", "name", job_metric_name(id), "metric",
                     metric_families[id].name, "help", metric_families[id].help, "per",
                     (json_int_t)MAX(c->points_per_mean, 1), "at", times, "value", values);
}

json_t *job_metrics_json(const struct job_metrics *f) {
    json_t *list = json_array();
    for (enum metric_id id = 0; id < N_METRICS; id++)
        if (f->v[id]) json_array_append_new(list, curve_json(id, &f->v[id]->curve));
    return json_pack("{s:f,s:o}", "began", f->started_at, "series", list);
}

/* Reads the first CURVE_POINTS points, without those that are not finite. Each of them counts as a
 * mean of `per` values, even the last one, which may have been an incomplete mean. */
static void curve_read(struct series *t, const json_t *v) {
    const json_t *times = json_object_get(v, "at"), *values = json_object_get(v, "value");
    double per = number_of(json_object_get(v, "per"));
    size_t n = MIN(MIN(json_array_size(times), json_array_size(values)), CURVE_POINTS);
    t->curve.points_per_mean = per >= 1 && per < 1e15 ? (int64_t)per : 1;
    for (size_t i = 0; i < n; i++) {
        double x = number_of(json_array_get(times, i)), y = number_of(json_array_get(values, i));
        if (!isfinite(x) || !isfinite(y)) continue;
        t->last_time = fmax(t->last_time, x);
        t->last_value = y;
        t->curve.x[t->curve.n] = t->last_time;
        t->curve.y[t->curve.n++] = y;
    }
}

struct job_metrics *job_metrics_from_json(const json_t *v) {
    struct job_metrics *f = job_metrics_new();
    double started_at = number_of(json_object_get(v, "began"));
    json_t *series;
    size_t i;
    if (!(started_at > 0 && started_at < 1e15)) return f;
    f->started_at = started_at;
    json_array_foreach (json_object_get(v, "series"), i, series) {
        enum metric_id id = job_metric_find(json_get_string(series, "name"));
        if (id < N_METRICS && !f->v[id]) curve_read(series_get(f, id), series);
    }
    return f;
}
