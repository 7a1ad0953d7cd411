/*
 * ops: what a server is operated with: metrics, the process's own figures, alerts, and keys.
 */
#ifndef SHOAL_OPS_H
#define SHOAL_OPS_H

#include "base/base.h"

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
struct metric_aggregate metric_aggregate_read(struct metrics *m, enum metric_id id,
                                              const char *label);
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
    ALERT_UNCHANGED,  /* a has not changed in the last minutes */
    ALERT_ABOVE,      /* a > limit */
    ALERT_RATIO,      /* a / b > limit */
    ALERT_USAGE,      /* 1 - a / b > limit */
    ALERT_RATE,       /* a in a second, over b > limit */
    ALERT_RATE_RATIO, /* of a and b in the last minutes, by nothing but their adapter > limit */
    ALERT_P95,        /* of what the histogram a observed in the last minutes > limit */
    ALERT_NOT_FINITE, /* a is NaN or infinite */
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

/*
 * metrics_process: what the system says of this process, of the machine and of its GPUs, for
 * metrics.c, which asks whenever metrics are read. A figure that the system does not give is
 * negative. process_read may be called by any thread, nvml_read by one at a time.
 */

struct process_state {
    double cpu, start;          /* seconds: of user and system together; since 1970 */
    double resident, addresses; /* bytes */
    double threads, minor_faults, major_faults, fds, max_fds;
    double host_memory, host_available; /* bytes */
};
struct process_state process_read(void);

enum { GPUS_MAX = 16 }; /* more are not looked at */
struct gpu_stats {
    double busy, used, total; /* 0 to 1, bytes, bytes */
};
struct nvml *nvml_open(void); /* NVIDIA's; NULL: none, or their library is not there */
void nvml_close(struct nvml *g);
int nvml_read(struct nvml *g, struct gpu_stats out[GPUS_MAX]); /* how many there are */

/*
 * alerts: the server's own watch over its metrics, for who runs no Prometheus.
 *
 * Every few seconds each rule of metrics.h is looked at. One that holds is pending until it has
 * held for as long as it says, then firing until its value is back a tenth within its limit
 * (hysteresis: Prometheus, which has the same rules, takes them back at the limit itself). Who is
 * to be told gets a message when an alert fires, every four hours as long as it does, and when it
 * is over: Alertmanager's webhook, version 4, or Slack's. A message that does not arrive is sent
 * again, later and later; the last 64 are kept for that.
 */

struct alerts_options {
    double seconds; /* between two looks; 0: nobody looks by itself, and nothing is sent */
    const struct strings *webhooks, *slacks; /* addresses; of Slack's the address is the secret */
    const char *source;                      /* where the server is, for the messages */
    void (*refresh)(void *ctx);              /* brings the metrics up to date */
    void *ctx;
};
struct alerts;
/* ERR_USAGE: an address that is none. The options and what they name are borrowed. */
struct alerts *alerts_new(struct metrics *m, const struct alerts_options *o, struct error *err);
void alerts_free(struct alerts *a); /* NULL is fine; what was not sent yet is lost */
/* A look at all rules as of `now`, seconds on any clock that only goes forward. */
void alerts_evaluate(struct alerts *a, double now);
/* [{alert, severity, summary, state: inactive, pending or firing, value or null, limit, since,
 * for}], since in unix seconds of the state, and {sent, failed, waiting} of the messages. */
json_t *alerts_json(struct alerts *a);

/*
 * keys: who may use a server, how much of it, and what each has used.
 *
 * A key is a secret that its owner keeps and a row that the store keeps: the SHA-256 of the secret,
 * its last four characters, scopes and limits. The secret is returned once, when the key is made,
 * and is in no file, log, error or JSON.
 *
 * Threads: everything may be called from any thread at any time, keys_close when no other call is
 * running. keys_authorize and keys_record_usage touch memory only. A thread of the module's own
 * takes over, once a second, what other processes have changed in the store, and writes what was
 * used; so a kill loses a second of accounting at most, and never a key. Keys made and revoked are
 * on the disk when the call returns, so that a power failure does not bring a revoked key back;
 * accounting is not synchronised. Several servers may share a store: what they count adds up in it,
 * each holding the limits to what it knows.
 *
 * Clock: `now` is in seconds since 1970, UTC, as the caller's clock says; days are UTC days. A
 * clock that is set back does not block anybody.
 */

enum key_scope { KEY_SCOPE_CHAT = 1, KEY_SCOPE_JOBS = 2, KEY_SCOPE_ADMIN = 4 };
unsigned key_scope_from_name(const char *name); /* 0: there is none */

/* What a key may do; a limit of 0 is none. */
struct key_spec {
    unsigned scopes; /* enum key_scope, or-ed; none implies another */
    /* Each is a bucket that holds a minute's worth and starts full. */
    int64_t requests_per_minute, tokens_per_minute;
    int64_t quota_day, quota; /* tokens, prompt and completion: in a day, and in all */
    int64_t expires;          /* in seconds since 1970 */
};

enum {
    KEY_SECRET_LEN = 53, /* "sk-shoal-", 32 random bytes as base64url, NUL */
    KEY_ID_LEN = 21,     /* "key-" and 16 digits, "cli-N", or KEY_TOKEN_ID */
    KEY_NAME_LEN = 64,
};

#define KEY_TOKEN_ID "start:token" /* no key's name has a colon */

struct keys;
/* The file, and its folder, are made when they are not there. A store with a row that is not as
 * this module writes it is refused whole. */
struct keys *keys_open(const char *store_path, struct error *err);
void keys_close(struct keys *k); /* writes what was used; may be NULL */
/* What the module's thread does each second, now. */
int keys_sync(struct keys *k, struct error *err);

/* Whether there is any key, usable or not: from the first one on, requests must show one. Revoking
 * the last key closes a server, it does not open it. */
bool keys_exist(struct keys *k);
/* Makes a key and writes its secret. Names are unique among keys that are not revoked. */
int keys_add(struct keys *k, const char *name, const struct key_spec *spec, double now,
             char secret[KEY_SECRET_LEN], struct error *err);
/* A secret that the administrator chose: without limits, kept in memory only. The same again adds
 * scopes. */
int keys_add_fixed(struct keys *k, const char *secret, unsigned scopes, struct error *err);
/* Makes the start-up token: a secret of 32 random bytes after "st-" with every scope, in memory
 * only. keys_exist does not count it and keys_list does not show it. Called at most once. */
void keys_add_startup_token(struct keys *k, char secret[KEY_SECRET_LEN]);
/* The id of a secret's key, whether it is usable or not; false: there is no such key. */
bool keys_lookup(struct keys *k, const char *secret, char id[KEY_ID_LEN]);
int keys_revoke(struct keys *k, const char *id_or_name, double now, struct error *err);
/* For backups (backup/backup.h): a state that is restored must not bring a key back. Of the keys in
 * the file serve.db of the folder `present`, those that are revoked are revoked in that of `staged`
 * too, and those that were made since the backup are added there as revoked: so their secrets stay
 * refused, the record of them is kept, and a server that had keys does not become one without. */
int keys_restore(const char *present, const char *staged, struct error *err);
/* An array of {id, name, tail, scopes, requests_per_minute, tokens_per_minute, quota_day, quota,
 * expires, created, revoked, last_used, today, all}, oldest first: times are seconds, 0 is never;
 * today and all are {requests, prompt_tokens, completion_tokens}. */
json_t *keys_list(struct keys *k, double now);

/* The scopes of a key, by its id; 0: there is none. */
unsigned keys_scopes(struct keys *k, const char *id);

enum key_verdict {
    KEY_ADMITTED,
    KEY_UNKNOWN,      /* 401 invalid_api_key, like the next two */
    KEY_REVOKED,      /* 401 */
    KEY_EXPIRED,      /* 401 */
    KEY_FORBIDDEN,    /* 403: a scope is missing */
    KEY_RATE_LIMITED, /* 429 rate_limit_exceeded */
    KEY_OVER_QUOTA    /* 429 insufficient_quota */
};
struct key_decision {
    enum key_verdict verdict;
    double wait;                             /* seconds until it is worth trying again; 0: never */
    char id[KEY_ID_LEN], name[KEY_NAME_LEN]; /* empty when unknown */
    char why[160];                           /* for the client; empty when admitted */
};
/* Whether a request may run. `secret` is what the client sent, or NULL; `scope` holds all that it
 * needs, 0 any key. An admitted request is counted at once, its tokens by keys_record_usage. */
enum key_verdict keys_authorize(struct keys *k, const char *secret, unsigned scope, double now,
                                struct key_decision *out);
/* What an admitted request used, known when it ends: the bucket of tokens may go below zero, and
 * then the next request waits. `id` is that of the admission. */
void keys_record_usage(struct keys *k, const char *id, int64_t prompt_tokens,
                       int64_t completion_tokens, double now);

#endif
