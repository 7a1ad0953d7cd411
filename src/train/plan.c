/*
 * plan: functions shared by the plans of all methods. They count passes, packed as in runs, copy
 * the first samples, and measure times. A plan measures a small part of a run and extrapolates. It
 * counts the passes of one epoch, so the counts of a longer run are estimates: another epoch may be
 * packed differently.
 */
#include "train/train_loop.h"

#include <stdlib.h>
#include <string.h>

void pack_counter_add(struct pack_counter *c, const struct train_sample *v, int n) {
    struct training_plan *p = c->plan;
    int64_t rows = 0;
    for (int i = 0; i < n; i++) {
        rows += v[i].n;
        p->longest = MAX(p->longest, v[i].n);
    }
    if (c->rows == 0 || pack_is_full(c->rows, rows, c->most)) {
        p->passes++;
        c->rows = c->samples = 0;
    }
    c->rows += rows;
    c->samples += n;
    p->tokens += rows;
    p->max_rows = MAX(p->max_rows, c->rows);
    p->max_samples = MAX(p->max_samples, c->samples);
}

void training_plan_scale(struct training_plan *plan, int64_t counted) {
    double scale = (double)plan->updates / (double)counted;
    plan->passes = (int64_t)((double)plan->passes * scale + 0.5);
    plan->tokens = (int64_t)((double)plan->tokens * scale + 0.5);
}

void training_plan_add_example(struct training_plan *plan, const struct train_sample *s,
                               int adapter) {
    struct train_sample copy = train_sample_copy(s);
    copy.adapter = adapter;
    plan->first[plan->n_first++] = copy;
}

int training_plan_time(int (*fn)(void *ctx, struct error *err), void *ctx, double *seconds,
                       struct error *err) {
    *seconds = 0;
    for (int attempt = 0; attempt == 0 || (attempt == 1 && *seconds < 2); attempt++) {
        double start = clock_now();
        int rc = fn(ctx, err);
        if (rc) return rc;
        *seconds = clock_now() - start;
    }
    return OK;
}

int training_plan_time_update(struct trainer *t, struct training_plan *plan, struct error *err) {
    struct update_stats st;
    double start = clock_now();
    int rc = trainer_update(t, 0, &st, err);
    plan->update_seconds = clock_now() - start;
    return rc;
}

void training_plan_release(struct training_plan *p) {
    for (int i = 0; i < p->n_first; i++) train_sample_release(&p->first[i]);
    free(p->first);
    *p = (struct training_plan){0};
}

void rl_plan_release(struct rl_plan *p) {
    training_plan_release(&p->run);
    free(p->pairs);
    json_decref(p->completions);
    *p = (struct rl_plan){0};
}
