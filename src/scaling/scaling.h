/*
 * scaling: how many nodes a load needs, and the targets whose number of nodes is changed.
 *
 * The decision (scaling_step), the predictors and the back-test are functions of their arguments,
 * without clock, input and output. Readers of the load and targets communicate; they belong to one
 * thread. Options are borrowed unless a comment says otherwise.
 *
 * The score is the load of a node, 0 to 1; the demand is the score times the number of nodes, so
 * it is measured in fully loaded nodes.
 */
#ifndef SHOAL_SCALING_H
#define SHOAL_SCALING_H

#include "base/base.h"

#include <math.h>

struct scaling_options {
    bool enable; /* false: decide, but change nothing */
    char *strategy;
    int64_t min_nodes, max_nodes;
    double scale_out, scale_in;       /* thresholds of the score */
    double out_cooldown, in_cooldown; /* seconds */
    double target_cpu;                /* see scaling_step */
    double interval;                  /* seconds between two evaluations */
    int64_t max_queue;                /* waiting requests of a node that count as queue 1 */
    char *predictor;
    double horizon, season; /* seconds; season 0: none */
    double quantile;
};
extern const struct option_row scaling_option_rows[];
/* ERR_USAGE: options that contradict each other, an unknown strategy or predictor. */
int scaling_options_check(const struct scaling_options *o, struct error *err);

/* the decision */

struct scaling_load {
    double cpu, memory, queue; /* 0 to 1; NaN: not known */
};
/* The score of a load by the strategy; NaN if one of its inputs is not known. */
double scaling_score(const struct scaling_options *o, const struct scaling_load *l);
/* The upper threshold of the score: scale_out; of the strategy cpu, target_cpu. */
double scaling_threshold(const struct scaling_options *o);

enum scaling_event_kind {
    SCALING_LOAD,  /* an evaluation; all other members are set */
    SCALING_FAILED /* the target did not carry out the last decision: it starts no cooldown */
};
struct scaling_event {
    enum scaling_event_kind kind;
    double now; /* seconds, monotonic */
    int nodes;  /* number of nodes of the target */
    struct scaling_load load;
    const char *predictor; /* NULL: the demand is not predicted */
    double demand;         /* the predicted one */
};
enum scaling_action { SCALING_HOLD, SCALING_OUT, SCALING_IN, N_SCALING_ACTIONS };
enum scaling_reason {
    SCALING_STEADY,       /* the score is between the thresholds */
    SCALING_HIGH,         /* it is above the upper threshold */
    SCALING_PREDICTED,    /* the predicted score is */
    SCALING_LOW,          /* it is below the lower threshold */
    SCALING_NO_LOAD,      /* an input is not known */
    SCALING_COOLDOWN,     /* the last change was too recent */
    SCALING_MAXIMUM,      /* there are as many nodes as allowed */
    SCALING_MINIMUM,      /* as few */
    SCALING_OUT_OF_RANGE, /* the number of nodes was outside of minimum and maximum */
    SCALING_REMAINING,    /* the load of the removed node would be too much for the others */
    SCALING_LOW_EXPECTED, /* the score is low, but the predicted one is not */
    SCALING_RECENT_LOAD,  /* the load was higher within the cooldown */
    N_SCALING_REASONS
};
extern const char *const scaling_action_names[N_SCALING_ACTIONS];
extern const char *const scaling_reason_names[N_SCALING_REASONS];

struct scaling_decision {
    double now;
    enum scaling_action action;
    enum scaling_reason reason;
    int from, to; /* nodes */
    struct scaling_load load;
    double score, predicted; /* predicted: the score with `from` nodes; NaN: not predicted */
    const char *predictor;   /* NULL: none */
};
struct scaling_state {
    double last_out, last_change;     /* times of the last scale-out and of the last change */
    double before_out, before_change; /* the same before the last decision */
    double last_needed; /* the last time at which the load was too high for a scale-in */
};
void scaling_init(struct scaling_state *s);
/*
 * Decides on an event.
 *
 * A number of nodes outside of min and max is corrected at once. A scale-out follows if the score
 * or the predicted score is above the upper threshold, and the last scale-out is out_cooldown ago:
 * by one node, or by as many as the predicted demand needs to be at the threshold. A scale-in by
 * one node follows if both scores are below scale_in, if the last change and the last load that was
 * too high for a scale-in are in_cooldown ago, and if the score of the remaining nodes would not be
 * above 0.85 of the upper threshold, nor their CPU above target_cpu.
 */
struct scaling_decision scaling_step(const struct scaling_options *o, struct scaling_state *s,
                                     const struct scaling_event *e);
json_t *scaling_decision_json(const struct scaling_decision *d);

/* prediction */

/* The demands of the last evaluations, at equal distances in time. Zero-initialise it. */
enum { SCALING_HISTORY = 4096 };
struct scaling_history {
    double v[SCALING_HISTORY];
    int n;
};
/* Adds a demand; NaN repeats the last one, and is ignored at the beginning. */
void scaling_history_add(struct scaling_history *h, double demand);

struct predictor {
    const char *name;
    /* Predicts v[n - 1 + steps] from v[0..n); never negative. n is at least `min_points`. */
    double (*predict)(const struct scaling_options *o, const double *v, int n, int steps);
    int (*min_points)(const struct scaling_options *o);
};
enum { N_PREDICTORS = 3 };
extern const struct predictor predictors[N_PREDICTORS];
/* The evaluations from now to the horizon, at least 1. */
int scaling_horizon_steps(const struct scaling_options *o);

/*
 * A back-test walks forward through a series of demands: at every point it predicts the demand at
 * the horizon from the points before, and an autoscaler with this predictor and one that only
 * reacts are simulated. A new node works from the next evaluation on.
 */
enum { BACKTEST_MIN_POINTS = 30 };
struct backtest_figures {
    double mae;   /* mean absolute error of the prediction; reacting predicts the last value */
    double under; /* share of the points with a score above the upper threshold */
    double nodes; /* mean number */
};
struct backtest_result {
    const struct predictor *predictor;
    int points; /* predicted points; less than BACKTEST_MIN_POINTS: too few, no figures */
    struct backtest_figures figures, reacting;
    bool better; /* neither error is greater than that of reacting, and one is smaller */
};
void scaling_backtest(const struct scaling_options *o, const double *demand, int n,
                      struct backtest_result out[N_PREDICTORS]);
/* Predicts the demand by the predictor of the options, or, with "auto", by the one with the
 * smallest under-provisioned share, if it is better than reacting on this history. NULL: none is,
 * and *demand is NaN. */
const struct predictor *scaling_predict(const struct scaling_options *o,
                                        const struct scaling_history *h, double *demand);
/* Reads a recorded load: JSON lines with cpu, memory, queue and nodes (default 1), such as the
 * decisions of scaling_decision_json. Lines whose load is not known repeat the last demand.
 * *demand: malloc'ed. */
enum { RECORDED_MAX = 100000 };
int scaling_load_file(const struct scaling_options *o, const char *path, double **demand, int *n,
                      struct error *err);

/* the load of servers */

/* The values in one page of /metrics. */
struct metrics_sample {
    double cpu_seconds, cpus; /* CPU time of the process; processors that it may use */
    double memory;            /* 0 to 1, of the memory budget, else of the machine */
    double waiting;           /* requests */
};
/* ERR_FORMAT: a metric is missing, which names it. */
int metrics_sample_parse(const char *text, size_t len, struct metrics_sample *out,
                         struct error *err);
/* The CPU is the difference of two readings, so the first reading of a server does not count. */
struct load_reader;
struct load_reader *load_reader_new(int64_t max_queue, const char *key_env, struct error *err);
/* The mean load of the servers. One that cannot be read is left out, with a warning the first time.
 * ERR_STATE: none could be read, or all for the first time. */
int load_read(struct load_reader *r, const struct strings *urls, struct scaling_load *out,
              struct error *err);
void load_reader_free(struct load_reader *r);

/* targets */

struct target_options {
    char *target;                                 /* a row of the targets */
    char *model, *join, *node_options;            /* local */
    char *api, *namespace, *deployment, *account; /* kubernetes; NULL: those of the pod */
    char *command;                                /* command */
    double drain_seconds;
    int64_t metrics_port; /* port of a Deployment's pods */
};
struct scaling_target;
/* ERR_USAGE: an option is missing or not one of this target. `min_nodes`: the nodes to start. */
struct scaling_target *scaling_target_open(const struct target_options *o, int min_nodes,
                                           struct error *err);
int scaling_target_nodes(struct scaling_target *t, int *n, struct error *err);
int scaling_target_set(struct scaling_target *t, int n, struct error *err);
/* Adds the addresses of /metrics that the target knows; a local target and a command know none. */
int scaling_target_sources(struct scaling_target *t, struct strings *urls, struct error *err);
/* To be called about once a second. An error ends the target. */
int scaling_target_check(struct scaling_target *t, struct error *err);
void scaling_target_close(struct scaling_target *t); /* drains local nodes; NULL is allowed */

/* Appends YAML for Kubernetes: a Deployment of servers with its Service, the autoscaler with its
 * ServiceAccount, Role and RoleBinding, a ServiceMonitor of the Prometheus operator, and a paused
 * ScaledObject of KEDA. */
struct manifest_options {
    const char *image, *model, *namespace, *deployment, *prometheus;
    const struct scaling_options *scaling;
    int64_t port; /* port of the servers */
};
int scaling_manifests(const struct manifest_options *o, struct buf *out, struct error *err);

#endif
