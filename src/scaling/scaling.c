/*
 * scaling: the options and the decision (scaling.h).
 */
#include "scaling/internal.h"

#include <string.h>

#define ROW(name, type, member, ...)                                                               \
    { name, type, offsetof(struct scaling_options, member), __VA_ARGS__ }
const struct option_row scaling_option_rows[] = {
    ROW("enable", OPT_BOOL, enable, "true", 0, 0, NULL,
        "carry decisions out; --no-enable only prints them"),
    ROW("strategy", OPT_STRING, strategy, "hybrid", 0, 0, "NAME",
        "the score: cpu, memory, queue, or hybrid (0.4 cpu + 0.3 memory + 0.3 queue)"),
    {"scaling-strategy", OPT_ALIAS, 0, "strategy", 0, 0, NULL, NULL, 0},
    ROW("min-nodes", OPT_INT, min_nodes, "1", 1, 1000, "N", "least number of nodes"),
    {"min-workers", OPT_ALIAS, 0, "min-nodes", 0, 0, NULL, NULL, 0},
    ROW("max-nodes", OPT_INT, max_nodes, "10", 1, 1000, "N", "greatest number of nodes"),
    {"max-workers", OPT_ALIAS, 0, "max-nodes", 0, 0, NULL, NULL, 0},
    ROW("scale-out", OPT_FLOAT, scale_out, "0.6", 0.01, 1, "SCORE", "add a node above this score"),
    ROW("scale-in", OPT_FLOAT, scale_in, "0.3", 0, 1, "SCORE", "remove a node below this score"),
    ROW("out-cooldown", OPT_FLOAT, out_cooldown, "300", 0, 86400, "SECONDS",
        "time between two scale-outs"),
    ROW("in-cooldown", OPT_FLOAT, in_cooldown, "600", 0, 86400, "SECONDS",
        "time between a change and a scale-in"),
    ROW("target-cpu-utilization", OPT_FLOAT, target_cpu, "0.7", 0.01, 1, "SHARE",
        "no scale-in that would raise the CPU above it; upper threshold of the strategy cpu"),
    ROW("interval", OPT_FLOAT, interval, "60", 0.1, 86400, "SECONDS", "time between evaluations"),
    ROW("max-queue", OPT_INT, max_queue, "50", 1, 1000000, "N",
        "waiting requests of a node that count as a queue of 1"),
    ROW("predictor", OPT_STRING, predictor, "auto", 0, 0, "NAME",
        "least_squares, holt_winters, quantile, auto (the best one) or none; it is used while its "
        "back-test is better than reacting"),
    ROW("horizon", OPT_FLOAT, horizon, "300", 1, 86400, "SECONDS",
        "predict the demand at this time from now"),
    ROW("season", OPT_FLOAT, season, "0", 0, 604800, "SECONDS",
        "period of the load for holt_winters, such as 86400; 0: none"),
    ROW("quantile", OPT_FLOAT, quantile, "0.8", 0, 1, "Q", "quantile of the last 30 evaluations"),
    {0},
};
#undef ROW

const char *const scaling_action_names[N_SCALING_ACTIONS] = {"hold", "out", "in"};
const char *const scaling_reason_names[N_SCALING_REASONS] = {
    "steady",  "high",    "predicted",    "low",       "no_load",      "cooldown",
    "maximum", "minimum", "out_of_range", "remaining", "low_expected", "recent_load"};

/* strategies */

static const struct scaling_strategy strategies[] = {
    {"hybrid", 0.4, 0.3, 0.3}, {"cpu", 1, 0, 0}, {"memory", 0, 1, 0}, {"queue", 0, 0, 1}};

const struct scaling_strategy *scaling_strategy_find(const char *name) {
    for (size_t i = 0; i < ARRAY_LEN(strategies); i++)
        if (strcmp(strategies[i].name, name) == 0) return &strategies[i];
    return NULL;
}

static double weighted(double weight, double x) {
    return weight > 0 ? weight * MIN(MAX(x, 0), 1) : 0; // 0 times NaN is NaN
}

double scaling_score(const struct scaling_options *o, const struct scaling_load *l) {
    const struct scaling_strategy *s = scaling_strategy_find(o->strategy);
    CHECK(s);
    if ((s->cpu > 0 && isnan(l->cpu)) || (s->memory > 0 && isnan(l->memory)) ||
        (s->queue > 0 && isnan(l->queue)))
        return NAN;
    return weighted(s->cpu, l->cpu) + weighted(s->memory, l->memory) + weighted(s->queue, l->queue);
}

static bool predictor_is_known(const char *name) {
    for (int i = 0; i < N_PREDICTORS; i++)
        if (strcmp(predictors[i].name, name) == 0) return true;
    return strcmp(name, "auto") == 0 || strcmp(name, "none") == 0;
}

double scaling_threshold(const struct scaling_options *o) {
    return strcmp(o->strategy, "cpu") == 0 ? o->target_cpu : o->scale_out;
}

int scaling_options_check(const struct scaling_options *o, struct error *err) {
    if (!scaling_strategy_find(o->strategy))
        return error_set(err, ERR_USAGE,
                         "there is no strategy '%s'; use cpu, memory, queue or hybrid",
                         o->strategy);
    if (!predictor_is_known(o->predictor))
        return error_set(err, ERR_USAGE,
                         "there is no predictor '%s'; use least_squares, holt_winters, quantile, "
                         "auto or none",
                         o->predictor);
    if (o->min_nodes > o->max_nodes)
        return error_set(err, ERR_USAGE, "--min-nodes %lld is above --max-nodes %lld",
                         (long long)o->min_nodes, (long long)o->max_nodes);
    if (o->scale_in >= scaling_threshold(o))
        return error_set(err, ERR_USAGE,
                         "--scale-in %g must be below the threshold of a scale-out, %g",
                         o->scale_in, scaling_threshold(o));
    if (2 * o->season / o->interval + o->horizon / o->interval >
        SCALING_HISTORY - BACKTEST_MIN_POINTS)
        return error_set(err, ERR_USAGE,
                         "two seasons and the horizon have more than %d evaluations; raise "
                         "--interval",
                         SCALING_HISTORY - BACKTEST_MIN_POINTS);
    return OK;
}

/* the decision */

/* The remaining nodes of a scale-in must stay below this share of the upper threshold; otherwise a
 * load that varies by a few per cent would add the node again. */
static const double REMAINING_SHARE = 0.85;

void scaling_init(struct scaling_state *s) {
    *s = (struct scaling_state){-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
}

static void hold(struct scaling_decision *d, enum scaling_reason why) {
    d->action = SCALING_HOLD;
    d->reason = why;
    d->to = d->from;
}

static void change(struct scaling_state *s, struct scaling_decision *d, int to,
                   enum scaling_reason why) {
    d->action = to > d->from ? SCALING_OUT : SCALING_IN;
    d->reason = why;
    d->to = to;
    s->last_change = d->now;
    if (d->action == SCALING_OUT) s->last_out = d->now;
}

/* The nodes that a demand needs so that they are at the threshold; at most max_nodes. */
static int nodes_needed(const struct scaling_options *o, double demand) {
    double n = ceil(demand / scaling_threshold(o) - 1e-9);
    return n < (double)o->max_nodes ? (int)n : (int)o->max_nodes;
}

static void decide_out(const struct scaling_options *o, struct scaling_state *s,
                       const struct scaling_event *e, struct scaling_decision *d) {
    bool high = d->score > scaling_threshold(o);
    int to = d->from + 1;
    if (d->predictor && d->predicted > scaling_threshold(o))
        to = MAX(to, nodes_needed(o, e->demand));
    if (d->from >= o->max_nodes)
        hold(d, SCALING_MAXIMUM);
    else if (d->now - s->last_out < o->out_cooldown)
        hold(d, SCALING_COOLDOWN);
    else
        change(s, d, to, high ? SCALING_HIGH : SCALING_PREDICTED);
}

/* Whether one node less would have too much load. */
static bool is_needed(const struct scaling_options *o, const struct scaling_decision *d) {
    double factor = (double)d->from / MAX(d->from - 1, 1); // one node's load grows by it
    return d->score * factor > REMAINING_SHARE * scaling_threshold(o) ||
           d->load.cpu * factor > o->target_cpu;
}

static void decide_in(const struct scaling_options *o, struct scaling_state *s,
                      struct scaling_decision *d) {
    if (d->from <= o->min_nodes)
        hold(d, SCALING_MINIMUM);
    else if (d->predictor && d->predicted >= o->scale_in)
        hold(d, SCALING_LOW_EXPECTED);
    else if (is_needed(o, d))
        hold(d, SCALING_REMAINING);
    else if (d->now - s->last_change < o->in_cooldown)
        hold(d, SCALING_COOLDOWN);
    else if (d->now - s->last_needed < o->in_cooldown)
        hold(d, SCALING_RECENT_LOAD);
    else
        change(s, d, d->from - 1, SCALING_LOW);
}

struct scaling_decision scaling_step(const struct scaling_options *o, struct scaling_state *s,
                                     const struct scaling_event *e) {
    struct scaling_decision d = {.now = e->now,
                                 .from = e->nodes,
                                 .to = e->nodes,
                                 .load = e->load,
                                 .predictor = e->predictor,
                                 .predicted = NAN};
    if (e->kind == SCALING_FAILED) {
        s->last_out = s->before_out;
        s->last_change = s->before_change;
        return d;
    }
    s->before_out = s->last_out;
    s->before_change = s->last_change;
    d.score = scaling_score(o, &e->load);
    if (d.predictor) d.predicted = e->demand / MAX(d.from, 1);
    if (d.score >= o->scale_in || is_needed(o, &d)) s->last_needed = d.now;
    if (d.from < o->min_nodes)
        change(s, &d, (int)o->min_nodes, SCALING_OUT_OF_RANGE);
    else if (d.from > o->max_nodes)
        change(s, &d, (int)o->max_nodes, SCALING_OUT_OF_RANGE);
    else if (isnan(d.score))
        hold(&d, SCALING_NO_LOAD);
    else if (d.score > scaling_threshold(o) || d.predicted > scaling_threshold(o))
        decide_out(o, s, e, &d);
    else if (d.score < o->scale_in)
        decide_in(o, s, &d);
    else
        hold(&d, SCALING_STEADY);
    return d;
}

static json_t *number(double x) {
    return isfinite(x) ? json_real(x) : json_null();
}

json_t *scaling_decision_json(const struct scaling_decision *d) {
    return json_pack(
        "{s:i,s:i,s:s,s:s,s:o,s:o,s:o,s:o,s:o,s:s?}", "nodes", d->from, "to", d->to, "action",
        scaling_action_names[d->action], "reason", scaling_reason_names[d->reason], "score",
        number(d->score), "cpu", number(d->load.cpu), "memory", number(d->load.memory), "queue",
        number(d->load.queue), "predicted", number(d->predicted), "predictor", d->predictor);
}
