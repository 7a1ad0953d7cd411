/*
 * ops: the operation of a server: metrics, statistics of the process, alerts, API keys, A/B tests
 * and ratings of replies.
 */
#ifndef SHOAL_OPS_H
#define SHOAL_OPS_H

#include "base/base.h"

/*
 * metrics: the server's counters, gauges and histograms, and their text for Prometheus.
 *
 * metrics.inc declares all metrics, one row per family. A series is a family with values for its
 * labels. metric_get finds or creates a series under the registry's lock, and returns its handle.
 * Frequent callers store the handle, because metric_add, metric_set_total, metric_set and
 * metric_observe are atomic and take no lock. Any thread may call them at any time. The registry
 * owns its series. A handle is valid until the series is removed or the registry is freed.
 *
 * The number of label values is bounded, because clients choose some of them. The first
 * max_adapters adapter names get series, the same names in all families; all other names share the
 * value "other". So a server registers the adapters of its command line first. No family has more
 * than METRICS_SERIES series: in a full family, further label values share one series in which
 * every label is "other".
 *
 * Counters and histograms without labels exist from the start, at 0. A family without series does
 * not appear in the text.
 */

/* Limits of a family: labels, bounds, series. METRICS_ADAPTERS: default of max_adapters. */
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
    METRIC_TYPE_INFO, /* a gauge with one series, whose labels are those of the last metric_get */
    METRIC_TYPE_HISTOGRAM,
};
/* SAME: an alias shows each series of its source; SUM: it shows the sum of the series. */
enum metric_alias { METRIC_ALIAS_NONE, METRIC_ALIAS_SAME, METRIC_ALIAS_SUM };

struct metric_family {
    const char *name, *help, *section; /* section: in the dashboard; NULL: not shown there */
    enum metric_type type;
    const char *labels[METRICS_LABELS]; /* [n_labels] */
    int n_labels;
    const double *bounds; /* [n_bounds] upper bounds of a histogram's buckets, without +Inf */
    int n_bounds;
    enum metric_alias alias;
    enum metric_id source; /* for an alias: the family that it shows */
};
extern const struct metric_family metric_families[N_METRICS];
const char *metric_type_name(enum metric_type type); /* Prometheus' name of the type */

struct metrics *metrics_new(int max_adapters); /* 0: METRICS_ADAPTERS */
void metrics_free(struct metrics *m);

/* metric_get(m, METRIC_VLLM_RUNNING, "fry", "0"): values for all labels of the family, in the
 * family's order. Any bytes are allowed: invalid text is replaced and long values are cut. */
#define metric_get(m, id, ...)                                                                     \
    metric_find(m, id, (const char *const[]){"", ##__VA_ARGS__},                                   \
                (int)ARRAY_LEN(((const char *const[]){"", ##__VA_ARGS__})) - 1)
/* metric_get as a function: labels [1 + n], of which the first is ignored. */
struct metric *metric_find(struct metrics *m, enum metric_id id, const char *const *labels, int n);
/* Removes a series that is no longer needed, such as that of an ended job. When the last series of
 * an adapter name is removed, another name can get series. */
void metric_remove(struct metrics *m, struct metric *series);
void metrics_clear(struct metrics *m, enum metric_id id); /* removes all series of a family */

void metric_add(struct metric *s, double x); /* counter: x >= 0; gauge: any */
/* Sets a counter to a total that is counted elsewhere; a value below the counter is ignored. */
void metric_set_total(struct metric *s, double x);
void metric_set(struct metric *s, double x);     /* gauge; NaN and Inf are allowed */
void metric_observe(struct metric *s, double x); /* histogram: x >= 0 */
double metric_value(const struct metric *s);     /* for a histogram: its sum */
/* The q-quantile of a histogram's observations, interpolated linearly within a bucket, as
 * Prometheus' histogram_quantile does: above the last bound the result is that bound; NaN without
 * observations. */
double metric_quantile(const struct metric *s, double q);

/* metrics_text appends the answer to GET /metrics, in Prometheus' text format or in OpenMetrics. It
 * refreshes the process and GPU metrics first. */
#define METRICS_CONTENT_TYPE_TEXT "text/plain; version=0.0.4; charset=utf-8"
#define METRICS_CONTENT_TYPE_OPENMETRICS                                                           \
    "application/openmetrics-text; version=1.0.0; charset=utf-8"
void metrics_text(struct metrics *m, struct buf *out, bool openmetrics);
/* {name: {type, help, series: [{labels, value}]}} of all families with series, without aliases;
 * a series of a histogram has count, sum, p50, p90 and p99 instead of the value. NaN and infinity
 * become null.
 */
json_t *metrics_json(struct metrics *m);

/* Refreshes the metrics of the process and the machine. metrics_text and metrics_json call it.
 */
void metrics_refresh(struct metrics *m);
/* The sum over the series of a family that have a label with the value `label` (NULL: all series).
 */
struct metric_aggregate {
    int n;                               /* number of series */
    double value;                        /* sum of their values */
    uint64_t counts[METRICS_BOUNDS + 1]; /* counts per bucket of histograms, not cumulative */
};
struct metric_aggregate metric_aggregate_read(struct metrics *m, enum metric_id id,
                                              const char *label);
/* metric_quantile of aggregated counts. */
double metric_histogram_quantile(enum metric_id id, const uint64_t *counts, double q);

/*
 * Alert rules over the metric families. They are exported to Prometheus as expressions, and the
 * built-in alerts below evaluate them directly (all but ALERT_ABSENT and ALERT_RESTARTS). An alert
 * fires when its condition on the families a and b has held for `for_seconds`. The window of a
 * condition is ALERT_WINDOW_SECONDS; in Prometheus, that of ALERT_FAILED is 15 minutes.
 */
enum alert_condition {
    ALERT_ABSENT,     /* a has no series */
    ALERT_BELOW,      /* a < limit */
    ALERT_UNCHANGED,  /* a did not change in the window */
    ALERT_ABOVE,      /* a > limit */
    ALERT_RATIO,      /* a / b > limit */
    ALERT_USAGE,      /* 1 - a / b > limit */
    ALERT_RATE,       /* (rate of a per second) / b > limit */
    ALERT_RATE_RATIO, /* (rate of a) / (rate of b) > limit, rates summed over adapters */
    ALERT_P95,        /* 95th percentile in the window, of the histogram a, > limit */
    ALERT_NOT_FINITE, /* a is NaN or infinite */
    ALERT_FAILED,     /* the series of a with state "failed" increased */
    ALERT_RESTARTS,   /* a changed more than limit times in an hour */
};
struct alert_rule {
    const char *name, *severity;
    int for_seconds; /* how long the condition must hold before the alert fires */
    enum alert_condition condition;
    double limit;
    enum metric_id a, b;
    const char *summary;
};
enum { N_ALERT_RULES = 13, ALERT_WINDOW_SECONDS = 300 };
extern const struct alert_rule alert_rules[N_ALERT_RULES];

/* Alert rules for Prometheus: {groups: [{name, rules: [{alert, expr, for, labels, annotations}]}]},
 * and the same as the YAML of a rule file. */
json_t *metrics_alert_rules(void);
void metrics_alert_rules_yaml(struct buf *out);
json_t *metrics_dashboard(void); /* for Grafana: a panel for every family that has a section */

/*
 * metrics_process: statistics of this process, the machine and its GPUs. metrics.c reads these
 * statistics whenever metrics are read. An unavailable value is negative. Any thread may call
 * process_read; calls of nvml_read must not overlap.
 */

struct process_stats {
    double cpu, start; /* cpu: seconds of user and system time; start: seconds since 1970 */
    double resident, virtual_bytes; /* bytes */
    double threads, minor_faults, major_faults, fds, max_fds;
    double host_memory, host_available; /* bytes */
};
struct process_stats process_read(void);

enum { GPUS_MAX = 16 }; /* further GPUs are ignored */
struct gpu_stats {
    double utilization, used, total; /* utilization: 0 to 1; used, total: bytes of memory */
};
/* Loads NVIDIA's NVML. NULL: it is not installed or cannot be initialised. */
struct nvml *nvml_open(void);
void nvml_close(struct nvml *g);
int nvml_read(struct nvml *g, struct gpu_stats out[GPUS_MAX]); /* returns the number of GPUs */

/*
 * alerts: evaluation of the alert rules by the server itself, for users without Prometheus.
 *
 * A thread of the module evaluates each alert rule every few seconds. An alert is pending while its
 * rule's condition holds, and firing when the condition has held for `for_seconds`. It stops firing
 * when the value is better than the limit by a tenth of the limit (hysteresis; Prometheus, which
 * has the same rules, resolves an alert at the limit itself). Each receiver gets a message when an
 * alert fires, every four hours while it fires, and when it is resolved. The format is that of
 * Alertmanager's webhook, version 4, or of Slack. A message that fails is sent again after growing
 * delays. At most 64 messages wait; if there are more, the oldest are dropped.
 */

struct alerts_options {
    double interval_seconds; /* interval between evaluations; 0: no thread evaluates or sends */
    const struct strings *webhooks, *slack_urls; /* URLs (may be NULL); a Slack URL is a secret */
    const char *source;                          /* URL of the server, for the messages */
    void (*refresh)(void *ctx); /* updates the caller's metrics before an evaluation; may be NULL */
    void *ctx;
};
struct alerts;
/* ERR_USAGE: a URL is invalid. `o` is copied; `m` and everything that the options point to are
 * borrowed until alerts_free. */
struct alerts *alerts_new(struct metrics *m, const struct alerts_options *o, struct error *err);
void alerts_free(struct alerts *a); /* may be NULL; messages that were not sent are lost */
/* Evaluates all rules at `now`, in seconds on any monotonic clock. */
void alerts_evaluate(struct alerts *a, double now);
/* {alerts: [{alert, severity, summary, state, value, limit, since, for}], messages: {sent, failed,
 * waiting}}: `state` is inactive, pending or firing, `value` may be null, and `since` is the start
 * of the state in unix seconds. Rules that only Prometheus can evaluate are left out. */
json_t *alerts_json(struct alerts *a);

/*
 * keys: API keys, their scopes and limits, and their usage.
 *
 * A key consists of a secret, which only its owner has, and an entry in the store: the SHA-256 of
 * the secret, the secret's last four characters, scopes and limits. The secret is returned once,
 * when the key is made, and never appears in a file, log, error or JSON.
 *
 * Threads: any thread may call any function at any time; keys_close only when no other call is
 * running. keys_authorize and keys_record_usage use only memory. Once a second, a thread of the
 * module reads the changes that other processes made in the store, and writes the usage. So a kill
 * loses at most a second of usage, and never a key. New and revoked keys are on the disk when the
 * call returns, so that a power failure does not restore a revoked key; usage is written without
 * waiting for the disk. Several servers may share a store: the store has the sum of their usage,
 * and each server enforces the limits with the usage that it knows.
 *
 * Clock: the caller passes `now`, in seconds since 1970; days are UTC days. Setting the clock back
 * does not block any key.
 */

enum key_scope { KEY_SCOPE_CHAT = 1, KEY_SCOPE_JOBS = 2, KEY_SCOPE_ADMIN = 4 };
unsigned key_scope_from_name(const char *name); /* 0: unknown name */

/* Permissions and limits of a key; a limit of 0 means no limit. */
struct key_spec {
    unsigned scopes; /* enum key_scope, or-ed; no scope implies another */
    /* Token buckets with the capacity of one minute, full at the start. */
    int64_t requests_per_minute, tokens_per_minute;
    int64_t quota_day, quota; /* prompt and completion tokens: per day, and in total */
    int64_t expires;          /* seconds since 1970 */
};

enum {
    KEY_SECRET_LEN = 53, /* "sk-shoal-", 32 random bytes as base64url, NUL */
    KEY_ID_LEN = 21,     /* "key-" and 16 digits, "cli-N", or KEY_TOKEN_ID */
    KEY_NAME_LEN = 64,
};

#define KEY_TOKEN_ID "start:token" /* key names have no colon */

struct keys;
/* Opens the store; creates the file and its folder if they do not exist. An invalid entry is an
 * error, so that no key of a damaged store is accepted. */
struct keys *keys_open(const char *store_path, struct error *err);
void keys_close(struct keys *k); /* writes the usage; may be NULL */
/* Reads changes from the store and writes the usage now, as the module's thread does every second.
 */
int keys_sync(struct keys *k, struct error *err);

/* Whether any key exists, including revoked and expired keys. If so, requests need a key. So after
 * the last key is revoked, the server refuses all requests, instead of accepting all. */
bool keys_exist(struct keys *k);
/* Creates a key and writes its secret to `secret`. ERR_STATE: a key that is not revoked has this
 * name. */
int keys_add(struct keys *k, const char *name, const struct key_spec *spec, double now,
             char secret[KEY_SECRET_LEN], struct error *err);
/* Adds a key from the command line, whose secret the administrator chose. It has no limits and is
 * in memory only. Adding the same secret again adds scopes to its key. ERR_USAGE: the secret is
 * invalid, or is that of a key in the store. */
int keys_add_fixed(struct keys *k, const char *secret, unsigned scopes, struct error *err);
/* Creates the start-up token: a secret of 32 random bytes after "st-" with every scope, in memory
 * only. keys_exist does not count it and keys_list does not show it. Called at most once. */
void keys_add_startup_token(struct keys *k, char secret[KEY_SECRET_LEN]);
/* The id of the key with this secret, which may be revoked or expired; false: no such key. */
bool keys_lookup(struct keys *k, const char *secret, char id[KEY_ID_LEN]);
/* Revokes a key for good. ERR_MISSING: no such key. ERR_STATE: the key is revoked already, or is
 * from the command line. */
int keys_revoke(struct keys *k, const char *id_or_name, double now, struct error *err);
/* For backups (backup/backup.h): restoring a state must not reactivate a key. Compares the keys in
 * serve.db of the folders `present` and `staged`. Keys that are revoked in `present` are revoked in
 * `staged` too. Keys made since the backup are added to `staged` as revoked keys, unless a key in
 * `staged` has the name. So their secrets are still refused, and a server that requires keys does
 * not become open. */
int keys_restore(const char *present, const char *staged, struct error *err);
/* An array of {id, name, tail, scopes, requests_per_minute, tokens_per_minute, quota_day, quota,
 * expires, created, revoked, last_used, today, all}, oldest first: times are in seconds, 0 means
 * never; today and all are {requests, prompt_tokens, completion_tokens}. */
json_t *keys_list(struct keys *k, double now);

/* The scopes of a key, by its id; 0: unknown or revoked. */
unsigned keys_scopes(struct keys *k, const char *id);

enum key_verdict {
    KEY_ADMITTED,
    KEY_UNKNOWN,      /* 401 invalid_api_key, as for revoked and expired keys */
    KEY_REVOKED,      /* 401 */
    KEY_EXPIRED,      /* 401 */
    KEY_FORBIDDEN,    /* 403: a scope is missing */
    KEY_RATE_LIMITED, /* 429 rate_limit_exceeded */
    KEY_OVER_QUOTA    /* 429 insufficient_quota */
};
struct key_decision {
    enum key_verdict verdict;
    double retry_after;                      /* seconds until a retry can succeed; 0: never */
    char id[KEY_ID_LEN], name[KEY_NAME_LEN]; /* empty if the key is unknown */
    char message[160];                       /* message for the client; empty if admitted */
};
/* Whether a request may run. `secret` is the secret that the client sent, or NULL. `scopes` holds
 * all scopes that the request needs; 0: any valid key is enough. An admitted request is counted
 * here; keys_record_usage counts its tokens. */
enum key_verdict keys_authorize(struct keys *k, const char *secret, unsigned scopes, double now,
                                struct key_decision *out);
/* Records the tokens of an admitted request when it ends. This may make the token bucket's level
 * negative; then requests are refused until the bucket holds a token again. `id` is the id that
 * keys_authorize returned. */
void keys_record_usage(struct keys *k, const char *id, int64_t prompt_tokens,
                       int64_t completion_tokens, double now);

/*
 * ab: A/B tests of two adapters on live traffic.
 *
 * An experiment belongs to the name of one model. While it runs, adapter a or b answers the
 * requests for that name. Ratings of the replies are the outcomes; the i-th outcome of a and the
 * i-th of b are a pair of the sequential test (eval/eval.h). If the test finds b better, the name
 * refers to b's content from then on; if the test finds b worse, the name refers to a's content.
 * Such a change is a publication in the adapter pool, so a running request keeps its adapter.
 *
 * The test assumes random assignment: if a and b are equal, the expected difference is 0. All
 * requests of a user go to one side, so by default only the user's first rating counts; otherwise
 * one generous user would favour one side all day. If the shares are unequal, ratings count for a
 * part of the larger side's replies only: on average as many as the smaller side receives.
 * Otherwise the i-th outcome of the larger side would come earlier than that of the smaller side,
 * and a drift of all ratings over time would look like a difference.
 *
 * STATE/ab.db holds: log "ab", the names of the experiments; log "ab/NAME", the events of each; log
 * "feedback", the ids of rated replies in order, and document "feedback"/ID for each; document
 * "promoted"/MODEL, the content that a name refers to after a decision. Each change is stored
 * before it is acknowledged, so a kill loses nothing. Unrated replies are in memory only, so they
 * cannot be rated after a restart. Only one server may use the file.
 *
 * Threads: after ab_resume, any thread may call any function at any time; ab_close only when no
 * other call is running.
 */

enum { AB_NAME_LEN = 65 };

struct adapter;
struct adapter_pool;
struct model;
struct ab_options {   /* its pointers are borrowed until ab_close, except the path */
    const char *path; /* the file of experiments and ratings; copied */
    struct model *model;
    struct adapter_pool *pool;
    struct metrics *metrics;
    int64_t started;    /* unix seconds; part of the seed for requests that name no user */
    bool feedback;      /* replies can be rated */
    size_t reply_bytes; /* memory for replies that can be rated */
    int64_t max_bytes;  /* size of the file above which ratings are refused */
    /* Publishes the adapter under the model's name. `path`: directory of the adapter. */
    int (*publish)(void *ctx, const char *model, struct adapter *a, const char *path,
                   struct error *err);
    void *ctx;
};

struct ab;
/* Reads the experiments and counts the ratings. NULL: `err` is set. */
struct ab *ab_open(const struct ab_options *o, struct error *err);
/* Restores the promotions of these models and resumes the experiments. The caller has loaded the
 * adapters and answers no request yet. */
void ab_resume(struct ab *ab, const struct strings *models);
void ab_close(struct ab *ab); /* may be NULL */

/* The arm that answered a request. run: identifies the start of the experiment, 0: no experiment.
 * side: a (0) or b (1). user: a 53-bit hash of the request's user, 0: none. */
struct ab_arm {
    char name[AB_NAME_LEN];
    int64_t run, user;
    int side;
    bool ignored; /* ratings of this reply do not count, because the sides have unequal shares */
};
/* If an experiment runs on the model: the adapter (retained) that answers a request, and its
 * malloc'ed name in *name; otherwise NULL. All requests of `user` (may be NULL) get the same side.
 */
struct adapter *ab_assign(struct ab *ab, const char *model, const char *user, struct ab_arm *arm,
                          char **name);
/* Removes the stored promotion of a model's name, because a client has loaded an adapter under
 * this name. */
void ab_end_promotion(struct ab *ab, const char *name);

/* A new experiment; borrowed for the call. */
struct ab_spec {
    const char *name;
    char *model, *names[2]; /* the model whose requests are assigned, and the adapters a and b */
    char *paths[2];         /* absolute, so that the next start may use another working folder */
    struct adapter *arms[2];
    double share, alpha; /* b's share of the requests; the test's error probability */
    int64_t min_pairs, max_pairs;
    bool once_per_user; /* one outcome per user counts */
};
int ab_name_check(const char *name, struct error *err); /* ERR_USAGE: the name is not valid */
/* Starts an experiment and returns its JSON, as ab_get does. ERR_STATE: an experiment with this
 * name exists, or one runs on the model. */
json_t *ab_start(struct ab *ab, const struct ab_spec *spec, struct error *err);
json_t *ab_list(struct ab *ab); /* a list of all experiments */
/* The experiment with its statistics as JSON (docs/API.md). ab_stop returns it as it is after the
 * stop, ab_delete as it was before the deletion. NULL: ERR_MISSING if the experiment does not
 * exist; in ab_stop, ERR_STATE if it has ended. */
json_t *ab_get(struct ab *ab, const char *name, struct error *err);
json_t *ab_stop(struct ab *ab, const char *name, struct error *err);
json_t *ab_delete(struct ab *ab, const char *name, struct error *err);

/*
 * feedback: ratings of replies by users. Ratings are the outcomes of experiments, and training
 * data. They are stored in the file of the experiments, under the same locks.
 */

enum { FEEDBACK_ID_LEN = 40, FEEDBACK_LIST_MAX = 1000 };

struct feedback_reply {
    const char *id, *model, *key; /* key NULL: a request without a key */
    const json_t *prompt;         /* {messages} or {prompt}; NULL: not known */
    const char *text;             /* [text_len] */
    size_t text_len;
    const struct ab_arm *arm;
    int64_t created; /* unix seconds */
};
/* Remembers a complete reply (copied), before it is sent, so that it can be rated by its id. */
void feedback_log_reply(struct ab *ab, const struct feedback_reply *reply);

struct feedback_rating {
    const char *id, *correction, *comment; /* correction, comment: may be NULL */
    double score;                          /* from 0 to 1; -1: not given */
};
enum feedback_refusal { FEEDBACK_NOT_REFUSED, FEEDBACK_OVER_QUOTA, FEEDBACK_FILE_FULL };
/* Stores a rating by the key (may be NULL) that received the reply. *counted: whether the rating is
 * an outcome of an experiment. ERR_MISSING: the reply is unknown, or another key received it.
 * ERR_STATE: an experiment has used the earlier rating, or *refusal is set: this reply or the key
 * has used its quota of ratings, or the file is full. */
int feedback_rate(struct ab *ab, const struct feedback_rating *rating, const char *key,
                  bool *counted, enum feedback_refusal *refusal, struct error *err);
/* The ratings after the first `after` ratings as JSON: at most `limit`, fewer if they are long.
 * *more: whether there are further ratings. */
json_t *feedback_list(struct ab *ab, int64_t after, int64_t limit, bool *more, struct error *err);

/* Corrected replies as training data: samples for SFT, or preference pairs. */
enum feedback_format { FEEDBACK_SFT, FEEDBACK_PREFERENCE };
struct feedback_export;
struct feedback_export *feedback_export_open(struct ab *ab, enum feedback_format format,
                                             struct error *err);
/* The next samples as a list, which may be empty. NULL: the export is complete, or ended by an
 * error, which is logged. */
json_t *feedback_export_next(struct feedback_export *e);
void feedback_export_close(struct feedback_export *e);

#endif
