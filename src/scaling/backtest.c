/*
 * backtest: predictors and the autoscaler on a recorded load (scaling.h).
 *
 * Invariant: a decision at a point depends on this point and earlier ones only.
 */
#include "scaling/scaling.h"

#include <stdlib.h>

/* Simulates the autoscaler from point `first` on. predicted[i]: the demand that is predicted at
 * point i; NULL: it only reacts. */
static void simulate(const struct scaling_options *o, const double *demand, int first, int n,
                     const double *predicted, struct backtest_figures *out) {
    struct scaling_state s;
    double threshold = scaling_threshold(o);
    int nodes =
        (int)MIN(MAX(ceil(demand[first] / threshold), (double)o->min_nodes), (double)o->max_nodes);
    double under = 0, sum = 0;
    scaling_init(&s);
    for (int i = first; i < n; i++) {
        double score = demand[i] / nodes, seen = MIN(score, 1);
        struct scaling_event e = {.kind = SCALING_LOAD,
                                  .now = (i - first) * o->interval,
                                  .nodes = nodes,
                                  .load = {seen, seen, seen},
                                  .predictor = predicted ? "simulated" : NULL,
                                  .demand = predicted ? predicted[i] : NAN};
        under += score > threshold + 1e-9;
        sum += nodes;
        nodes = scaling_step(o, &s, &e).to;
    }
    out->under = under / (n - first);
    out->nodes = sum / (n - first);
}

/* The mean absolute error of predictions from point `first` on. */
static double error_mean(const double *demand, int first, int n, int steps,
                         const double *predicted) {
    double sum = 0;
    for (int i = first; i + steps < n; i++) sum += fabs(predicted[i] - demand[i + steps]);
    return sum / (n - steps - first);
}

static void backtest_one(const struct scaling_options *o, const double *demand, int n,
                         double *predicted, struct backtest_result *out) {
    int first = out->predictor->min_points(o) - 1, steps = scaling_horizon_steps(o);
    out->points = MAX(n - steps - first, 0);
    if (out->points < BACKTEST_MIN_POINTS) return;
    for (int i = first; i < n; i++) predicted[i] = out->predictor->predict(o, demand, i + 1, steps);
    out->figures.mae = error_mean(demand, first, n, steps, predicted);
    out->reacting.mae = error_mean(demand, first, n, steps, demand);
    simulate(o, demand, first, n, predicted, &out->figures);
    simulate(o, demand, first, n, NULL, &out->reacting);
    const struct backtest_figures *f = &out->figures, *r = &out->reacting;
    out->better =
        f->mae <= r->mae && f->under <= r->under && (f->mae < r->mae || f->under < r->under);
}

void scaling_backtest(const struct scaling_options *o, const double *demand, int n,
                      struct backtest_result out[N_PREDICTORS]) {
    double *predicted = xcalloc((size_t)MAX(n, 1), sizeof *predicted);
    for (int i = 0; i < N_PREDICTORS; i++) {
        out[i] = (struct backtest_result){.predictor = &predictors[i]};
        backtest_one(o, demand, n, predicted, &out[i]);
    }
    free(predicted);
}

/* recorded loads */

struct recording {
    const struct scaling_options *o;
    const char *path;
    double *v;
    int n, cap;
};

static double input_read(const json_t *line, const char *key) {
    const json_t *v = json_object_get(line, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

/* Whether an input is missing, null, or a number from 0 to 1. */
static bool input_is_valid(const json_t *line, const char *key) {
    const json_t *v = json_object_get(line, key);
    double x = json_number_value(v);
    return !v || json_is_null(v) || (json_is_number(v) && x >= 0 && x <= 1);
}

static int line_read(void *ctx, const json_t *v, int line, struct error *err) {
    struct recording *r = ctx;
    struct scaling_load l = {input_read(v, "cpu"), input_read(v, "memory"), input_read(v, "queue")};
    double nodes = json_object_get(v, "nodes") ? input_read(v, "nodes") : 1;
    if (!json_is_object(v) || !input_is_valid(v, "cpu") || !input_is_valid(v, "memory") ||
        !input_is_valid(v, "queue") || !(nodes >= 0 && nodes <= 1e6))
        return error_set(err, ERR_FORMAT,
                         "'%s', line %d: expected {\"cpu\": C, \"memory\": M, \"queue\": Q, "
                         "\"nodes\": N} with C, M and Q from 0 to 1",
                         r->path, line);
    if (r->n == RECORDED_MAX)
        return error_set(err, ERR_MEMORY, "'%s' has more than %d lines; use the last ones", r->path,
                         RECORDED_MAX);
    double demand = scaling_score(r->o, &l) * MAX(nodes, 1);
    if (isnan(demand) && !r->n) return OK;
    if (r->n == r->cap) {
        r->cap = 2 * r->cap + 64;
        r->v = xrealloc(r->v, sizeof *r->v * (size_t)r->cap);
    }
    r->v[r->n] = isnan(demand) ? r->v[r->n - 1] : demand;
    r->n++;
    return OK;
}

int scaling_load_file(const struct scaling_options *o, const char *path, double **demand, int *n,
                      struct error *err) {
    struct recording r = {.o = o, .path = path};
    int rc = json_file_each(path, line_read, &r, err);
    if (rc == OK && !r.n)
        rc = error_set(err, ERR_FORMAT, "'%s' has no line with the inputs of the strategy '%s'",
                       path, o->strategy);
    if (rc == OK) {
        *demand = r.v;
        *n = r.n;
        return OK;
    }
    free(r.v);
    return rc;
}
