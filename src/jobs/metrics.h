/*
 * job_figures: what a job has told of itself in numbers, each as a series of bounded length.
 *
 * The names are those of metrics.inc: a gauge whose one label is "job" is a figure. A long series
 * is kept as means (struct curve), so a job of a million updates takes as much as one of a
 * thousand. One thread at a time.
 */
#ifndef SHOAL_JOB_FIGURES_H
#define SHOAL_JOB_FIGURES_H

#include "base/base.h"
#include "ops/metrics.h"

bool is_job_metric(enum metric_id id);
/* "train_loss" → its metric; N_METRICS: there is no such figure. */
enum metric_id job_metric_find(const char *name);

struct job_metrics;
struct job_metrics *job_metrics_new(void);
void job_metrics_free(struct job_metrics *f); /* NULL is fine */
/* The object {name: number, or null where it is none} of a line, at a time in seconds since 1970.
 * What is no figure is left out. */
void job_metrics_record(struct job_metrics *f, double at, const json_t *line);
/* {name: value}: the last of each; an empty object where there are none. */
json_t *job_metrics_latest(const struct job_metrics *f);
/*
 * {began, series: [{name, metric, help, per, at, value}]}: `at` are seconds after `began`, which is
 * of 1970; `per`: so many values are in a mean.
 */
json_t *job_metrics_json(const struct job_metrics *f);
/* What job_metrics_json gave, to be gone on with; what of it is not so is left out. */
struct job_metrics *job_metrics_from_json(const json_t *v);

#endif
