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

bool is_figure(enum metric_id id);
/* "train_loss" → its metric; N_METRICS: there is no such figure. */
enum metric_id figure_metric(const char *name);

struct job_figures;
struct job_figures *job_figures_new(void);
void job_figures_free(struct job_figures *f); /* NULL is fine */
/* The object {name: number, or null where it is none} of a line, at a time in seconds since 1970.
 * What is no figure is left out. */
void job_figures_take(struct job_figures *f, double at, const json_t *line);
/* {name: value}: the last of each; an empty object where there are none. */
json_t *job_figures_last(const struct job_figures *f);
/*
 * {began, series: [{name, metric, help, per, at, value}]}: `at` are seconds after `began`, which is
 * of 1970; `per`: so many values are in a mean.
 */
json_t *job_figures_json(const struct job_figures *f);
/* What job_figures_json gave, to be gone on with; what of it is not so is left out. */
struct job_figures *job_figures_from_json(const json_t *v);

#endif
