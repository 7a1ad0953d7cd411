/*
 * predict: predictors of the demand, and the choice among them (scaling.h).
 */
#include "scaling/scaling.h"

#include <stdlib.h>
#include <string.h>

enum { LINE_POINTS = 10, QUANTILE_POINTS = 30, TREND_POINTS = 60, SEASONS = 4 };

int scaling_horizon_steps(const struct scaling_options *o) {
    return MAX((int)(o->horizon / o->interval + 0.5), 1);
}

/* least squares */

static int line_points(const struct scaling_options *o) {
    (void)o;
    return LINE_POINTS;
}

/* The straight line with the least squared error through the last ten points. */
static double line_predict(const struct scaling_options *o, const double *v, int n, int steps) {
    (void)o;
    const double mean_x = (LINE_POINTS - 1) / 2.0;
    double mean_y = 0, xy = 0, xx = 0;
    v += n - LINE_POINTS;
    for (int i = 0; i < LINE_POINTS; i++) mean_y += v[i] / LINE_POINTS;
    for (int i = 0; i < LINE_POINTS; i++) {
        xy += (i - mean_x) * (v[i] - mean_y);
        xx += (i - mean_x) * (i - mean_x);
    }
    return MAX(mean_y + xy / xx * (LINE_POINTS - 1 + steps - mean_x), 0);
}

/* Holt-Winters */

/* Weights of a new point for level, trend and season. */
static const double ALPHA = 0.4, BETA = 0.05, GAMMA = 0.2;

static int season_points(const struct scaling_options *o) {
    return o->season > 0 ? (int)(o->season / o->interval + 0.5) : 0;
}

static int winters_points(const struct scaling_options *o) {
    return MAX(2 * season_points(o), LINE_POINTS);
}

static double mean(const double *v, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += v[i];
    return sum / n;
}

/* Level, trend and an additive season of m points, which begin with the first two seasons (Winters
 * 1960). The oldest points have no weight left, so only the last ones are read. */
static double winters_season(const double *v, int n, int m, int steps) {
    double level = mean(v, m), trend = (mean(v + m, m) - level) / m;
    double *season = xcalloc((size_t)m, sizeof *season);
    for (int i = 0; i < m; i++) season[i] = v[i] - (level + trend * (i - (m - 1) / 2.0));
    level += trend * (m - 1) / 2.0; // from the middle of the first season to its end
    for (int i = m; i < n; i++) {
        double before = level;
        level = ALPHA * (v[i] - season[i % m]) + (1 - ALPHA) * (level + trend);
        trend = BETA * (level - before) + (1 - BETA) * trend;
        season[i % m] = GAMMA * (v[i] - level) + (1 - GAMMA) * season[i % m];
    }
    double predicted = level + steps * trend + season[(n - 1 + steps) % m];
    free(season);
    return predicted;
}

/* Without a season: Holt's linear method. */
static double winters_trend(const double *v, int n, int steps) {
    double level = v[0], trend = v[1] - v[0];
    for (int i = 1; i < n; i++) {
        double before = level;
        level = ALPHA * v[i] + (1 - ALPHA) * (level + trend);
        trend = BETA * (level - before) + (1 - BETA) * trend;
    }
    return level + steps * trend;
}

static double winters_predict(const struct scaling_options *o, const double *v, int n, int steps) {
    int m = season_points(o), read = MIN(n, m > 1 ? SEASONS * m : TREND_POINTS);
    v += n - read;
    return MAX(m > 1 ? winters_season(v, read, m, steps) : winters_trend(v, read, steps), 0);
}

/* quantile */

/* The quantile of the last points, interpolated linearly between two of them. */
static double quantile_predict(const struct scaling_options *o, const double *v, int n, int steps) {
    (void)steps;
    double sorted[QUANTILE_POINTS];
    int k = MIN(n, QUANTILE_POINTS);
    memcpy(sorted, v + n - k, sizeof *v * (size_t)k);
    qsort(sorted, (size_t)k, sizeof *sorted, double_compare);
    double at = o->quantile * (k - 1);
    int i = MIN((int)at, k - 2);
    return sorted[i] + (at - i) * (sorted[i + 1] - sorted[i]);
}

const struct predictor predictors[N_PREDICTORS] = {
    {"least_squares", line_predict, line_points},
    {"holt_winters", winters_predict, winters_points},
    {"quantile", quantile_predict, line_points},
};

/* the history, and the choice */

void scaling_history_add(struct scaling_history *h, double demand) {
    if (isnan(demand) && !h->n) return;
    if (isnan(demand)) demand = h->v[h->n - 1];
    if (h->n == SCALING_HISTORY) {
        memmove(h->v, h->v + 1, sizeof h->v - sizeof *h->v);
        h->n--;
    }
    h->v[h->n++] = demand;
}

static bool is_preferred(const struct backtest_result *a, const struct backtest_result *b) {
    if (a->figures.under != b->figures.under) return a->figures.under < b->figures.under;
    return a->figures.mae < b->figures.mae;
}

const struct predictor *scaling_predict(const struct scaling_options *o,
                                        const struct scaling_history *h, double *demand) {
    struct backtest_result v[N_PREDICTORS];
    const struct backtest_result *best = NULL;
    bool any = strcmp(o->predictor, "auto") == 0;
    *demand = NAN;
    if (strcmp(o->predictor, "none") == 0 || h->n < BACKTEST_MIN_POINTS) return NULL;
    scaling_backtest(o, h->v, h->n, v);
    for (int i = 0; i < N_PREDICTORS; i++)
        if (v[i].better && (any || strcmp(v[i].predictor->name, o->predictor) == 0) &&
            (!best || is_preferred(&v[i], best)))
            best = &v[i];
    if (!best) return NULL;
    *demand = best->predictor->predict(o, h->v, h->n, scaling_horizon_steps(o));
    return best->predictor;
}
