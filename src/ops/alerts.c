/*
 * alerts: rules, their states, and messages about them.
 *
 * At each evaluation a rule has one value, a number, which is compared with its limit. The value of
 * a rule about changes is computed from the current sample and the oldest sample of the last
 * ALERT_WINDOW_SECONDS. One thread evaluates the rules and sends the messages; it does not hold the
 * lock while it sends.
 */
#define _GNU_SOURCE
#include "ops/ops.h"

#include "hub/hub.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    MAX_SAMPLES = 64, /* per rule */
    MAX_MESSAGES = 64,
    REPEAT_SECONDS = 4 * 3600,
    SEND_TIMEOUT_SECONDS = 5,
    MAX_RETRY_SECONDS = 600
};

enum alert_status { INACTIVE, PENDING, FIRING };
static const char *const status_names[] = {"inactive", "pending", "firing"};

struct sample {
    double time;
    struct metric_aggregate a, b; /* aggregates of the rule's families a and b */
};
struct alert_state {
    enum alert_status status;
    /* value: of the last evaluation; NaN: not available. since: when the status began. Both times
     * are on the clock of the caller of alerts_evaluate. */
    double value, since, last_message_at;
    int64_t since_unix;                 /* when the status began, in unix seconds */
    struct sample samples[MAX_SAMPLES]; /* ring buffer of n samples */
    int n, next;                        /* next: the index that the next sample is written to */
    struct metric *firing;              /* gauge: 1 while the alert fires, else 0 */
};
struct message {
    const char *url;
    char *body;
    int n_failures;
    double next_attempt; /* time of the next attempt, on the clock of clock_now */
};
struct alerts {
    struct metrics *m;
    struct alerts_options o;
    pthread_t thread;
    bool running, quit;
    pthread_mutex_t lock;
    pthread_cond_t stop;
    struct alert_state states[N_ALERT_RULES];
    struct message
        messages[MAX_MESSAGES]; /* [n_messages] a queue; a message that failed is appended again */
    int n_messages;
    uint64_t sent, failed;
};

/* values */

static struct sample *oldest_sample_in_window(struct alert_state *state, double now) {
    for (int i = state->n; i > 0; i--) {
        struct sample *s = &state->samples[(state->next - i + MAX_SAMPLES) % MAX_SAMPLES];
        if (now - s->time <= ALERT_WINDOW_SECONDS) return s;
    }
    return NULL;
}

/* Computes the increases since the oldest sample in the window, which is *seconds old: *a and *b of
 * the values of families a and b, counts[] of the buckets of a's histogram. False: the window has
 * no earlier sample. */
static bool increase_in_window(struct alert_state *state, const struct sample *s, double *a,
                               double *b, uint64_t *counts, double *seconds) {
    const struct sample *old = oldest_sample_in_window(state, s->time);
    if (!old) return false;
    *seconds = s->time - old->time;
    *a = s->a.value - old->a.value;
    *b = s->b.value - old->b.value;
    for (int i = 0; i <= METRICS_BOUNDS; i++) counts[i] = s->a.counts[i] - old->a.counts[i];
    return *seconds > 0;
}

/* The value that a rule compares with its limit; NaN: not available. */
static double rule_value(struct alert_state *state, const struct alert_rule *r,
                         const struct sample *s) {
    double a, b, seconds;
    uint64_t counts[METRICS_BOUNDS + 1];
    bool both = s->a.n > 0 && s->b.n > 0 && s->b.value > 0;
    switch (r->condition) {
    case ALERT_BELOW:
    case ALERT_ABOVE:
        return s->a.n ? s->a.value : NAN;
    case ALERT_RATIO:
        return both ? s->a.value / s->b.value : NAN;
    case ALERT_USAGE:
        return both ? 1 - s->a.value / s->b.value : NAN;
    case ALERT_RATE:
        return both && increase_in_window(state, s, &a, &b, counts, &seconds)
                   ? a / seconds / s->b.value
                   : NAN;
    case ALERT_RATE_RATIO:
        return increase_in_window(state, s, &a, &b, counts, &seconds) && b > 0 ? a / b : NAN;
    case ALERT_P95:
        return increase_in_window(state, s, &a, &b, counts, &seconds)
                   ? metric_histogram_quantile(r->a, counts, 0.95)
                   : NAN;
    case ALERT_NOT_FINITE:
        return s->a.n ? !isfinite(s->a.value) : NAN;
    case ALERT_UNCHANGED:
        return s->a.n && increase_in_window(state, s, &a, &b, counts, &seconds) &&
                       seconds > ALERT_WINDOW_SECONDS / 2
                   ? a == 0
                   : NAN;
    case ALERT_FAILED:
        return increase_in_window(state, s, &a, &b, counts, &seconds) ? a : NAN;
    case ALERT_ABSENT: /* only Prometheus can detect that a server is absent or has restarted */
    case ALERT_RESTARTS:
        break;
    }
    return NAN;
}

/* Whether the condition holds for a value. For a firing alert there is hysteresis: the condition
 * holds until the value is better than the limit by a tenth of the limit. */
static bool condition_holds(const struct alert_rule *r, double value, bool firing) {
    double hysteresis = firing ? 0.1 * r->limit : 0;
    if (isnan(value)) return false;
    return r->condition == ALERT_BELOW ? value < r->limit + hysteresis
                                       : value > r->limit - hysteresis;
}

/* messages; the callers hold the lock */

static void format_time(char out[32], int64_t t) {
    struct tm tm;
    time_t when = (time_t)t;
    strftime(out, 32, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&when, &tm));
}

static char *webhook_body(const struct alerts *a, const struct alert_rule *r,
                          const struct alert_state *state, bool resolved) {
    char started[32], ended[32] = "0001-01-01T00:00:00Z"; /* not ended, in Alertmanager's format */
    const char *status = resolved ? "resolved" : "firing";
    format_time(started, state->since_unix);
    if (resolved) format_time(ended, (int64_t)time(NULL));
    json_t *labels = json_pack("{s:s,s:s,s:s}", "alertname", r->name, "severity", r->severity,
                               "instance", a->o.source),
           *notes = json_pack("{s:s}", "summary", r->summary), *v;
    if (isfinite(state->value))
        json_object_set_new(notes, "value", json_sprintf("%.6g", state->value));
    v = json_pack("{s:s,s:s,s:i,s:s,s:s,s:{s:s},s:O,s:O,s:s,s:[{s:s,s:O,s:O,s:s,s:s,s:s,s:s}]}",
                  "version", "4", "groupKey", r->name, "truncatedAlerts", 0, "status", status,
                  "receiver", "shoal", "groupLabels", "alertname", r->name, "commonLabels", labels,
                  "commonAnnotations", notes, "externalURL", a->o.source, "alerts", "status",
                  status, "labels", labels, "annotations", notes, "startsAt", started, "endsAt",
                  ended, "generatorURL", a->o.source, "fingerprint", r->name);
    char *text = json_dumps(v, JSON_COMPACT);
    json_decref(v);
    json_decref(labels);
    json_decref(notes);
    CHECK(text != NULL);
    return text;
}

static char *slack_body(const struct alerts *a, const struct alert_rule *r,
                        const struct alert_state *state, bool resolved) {
    json_t *text = resolved
                       ? json_sprintf(":white_check_mark: *%s* is over (%s)", r->name, a->o.source)
                       : json_sprintf(":warning: *%s* (%s, %s): %s Now %.4g.", r->name, r->severity,
                                      a->o.source, r->summary, state->value);
    json_t *v = json_pack("{s:o}", "text", text);
    char *body = json_dumps(v, JSON_COMPACT);
    json_decref(v);
    CHECK(body != NULL);
    return body;
}

static struct message message_remove(struct alerts *a, int i) {
    struct message m = a->messages[i];
    memmove(&a->messages[i], &a->messages[i + 1],
            (size_t)(--a->n_messages - i) * sizeof a->messages[0]);
    return m;
}

/* Appends a message to the queue. If the queue is full, drops the first message. */
static void message_add(struct alerts *a, struct message m) {
    if (a->n_messages == MAX_MESSAGES) free(message_remove(a, 0).body);
    a->messages[a->n_messages++] = m;
}

static void alert_notify(struct alerts *a, int i, double now, bool resolved) {
    const struct alert_rule *r = &alert_rules[i];
    struct alert_state *state = &a->states[i];
    state->last_message_at = now;
    if (resolved)
        log_info("alert %s is over", r->name);
    else
        log_warn("alert %s: %s (%.4g)", r->name, r->summary, state->value);
    for (int k = 0; a->o.webhooks && k < a->o.webhooks->n; k++)
        message_add(
            a, (struct message){a->o.webhooks->v[k], webhook_body(a, r, state, resolved), 0, 0});
    for (int k = 0; a->o.slack_urls && k < a->o.slack_urls->n; k++)
        message_add(
            a, (struct message){a->o.slack_urls->v[k], slack_body(a, r, state, resolved), 0, 0});
}

/* states */

static void status_set(struct alert_state *state, enum alert_status status, double now) {
    state->status = status;
    state->since = now;
    state->since_unix = (int64_t)time(NULL);
}

static void alert_update(struct alerts *a, int i, double now, double value) {
    const struct alert_rule *r = &alert_rules[i];
    struct alert_state *state = &a->states[i];
    bool active = condition_holds(r, value, state->status == FIRING);
    state->value = value;
    if (!active) {
        if (state->status == FIRING) alert_notify(a, i, now, true);
        if (state->status != INACTIVE) status_set(state, INACTIVE, now);
    } else if (state->status == INACTIVE) {
        status_set(state, PENDING, now);
    }
    if (state->status == PENDING && now - state->since >= r->for_seconds) {
        status_set(state, FIRING, now);
        alert_notify(a, i, now, false);
    } else if (state->status == FIRING && now - state->last_message_at >= REPEAT_SECONDS) {
        alert_notify(a, i, now, false);
    }
    metric_set(state->firing, state->status == FIRING);
}

void alerts_evaluate(struct alerts *a, double now) {
    if (a->o.refresh) a->o.refresh(a->o.ctx);
    metrics_refresh(a->m);
    pthread_mutex_lock(&a->lock);
    for (int i = 0; i < N_ALERT_RULES; i++) {
        const struct alert_rule *r = &alert_rules[i];
        struct alert_state *state = &a->states[i];
        bool uses_b = r->condition == ALERT_RATIO || r->condition == ALERT_USAGE ||
                      r->condition == ALERT_RATE || r->condition == ALERT_RATE_RATIO;
        struct sample s = {.time = now};
        s.a = metric_aggregate_read(a->m, r->a, r->condition == ALERT_FAILED ? "failed" : NULL);
        if (uses_b) s.b = metric_aggregate_read(a->m, r->b, NULL);
        alert_update(a, i, now, rule_value(state, r, &s));
        if (state->n && now - state->samples[(state->next + MAX_SAMPLES - 1) % MAX_SAMPLES].time <
                            (double)ALERT_WINDOW_SECONDS / (MAX_SAMPLES - 2))
            continue; /* too soon: samples are so far apart that the ring buffer spans the whole
                         window */
        state->samples[state->next] = s;
        state->next = (state->next + 1) % MAX_SAMPLES;
        state->n = MIN(state->n + 1, MAX_SAMPLES);
    }
    pthread_mutex_unlock(&a->lock);
}

/* the thread */

/* Sends the first message that is due; if that fails, queues the message again. The caller holds
 * the lock, which is released while the message is sent. Returns false if no message is due. */
static bool send_message(struct alerts *a) {
    struct error err;
    int i = 0;
    while (i < a->n_messages && a->messages[i].next_attempt > clock_now()) i++;
    if (i == a->n_messages) return false;
    struct message m = message_remove(a, i);
    pthread_mutex_unlock(&a->lock);
    int rc = http_post_json(m.url, m.body, SEND_TIMEOUT_SECONDS, &err);
    if (rc != OK)
        log_warn("the message of an alert could not be sent, and is sent again later: %s",
                 err.text);
    metric_add(metric_get(a->m, METRIC_ALERTS_SENT, rc == OK ? "sent" : "failed"), 1);
    pthread_mutex_lock(&a->lock);
    a->sent += rc == OK;
    a->failed += rc != OK;
    if (rc == OK) {
        free(m.body);
        return true;
    }
    m.next_attempt = clock_now() + fmin(MAX_RETRY_SECONDS, 5 << MIN(m.n_failures, 7));
    m.n_failures++;
    message_add(a, m);
    return true;
}

static void *alerts_thread(void *ctx) {
    struct alerts *a = ctx;
    double due = clock_now();
    pthread_mutex_lock(&a->lock);
    while (!a->quit) {
        if (clock_now() >= due) {
            due = clock_now() + a->o.interval_seconds;
            pthread_mutex_unlock(&a->lock);
            alerts_evaluate(a, clock_now());
            pthread_mutex_lock(&a->lock);
        }
        if (a->quit || send_message(a)) continue;
        double now = clock_now(), wait = fmax(0.01, fmin(1, due - now));
        condition_wait_until(&a->stop, &a->lock, now + wait);
    }
    pthread_mutex_unlock(&a->lock);
    return NULL;
}

static int check_urls(const struct strings *v, struct error *err) {
    for (int i = 0; v && i < v->n; i++)
        if (strncmp(v->v[i], "http://", 7) != 0 && strncmp(v->v[i], "https://", 8) != 0)
            return error_set(err, ERR_USAGE,
                             "the URL of an alert receiver must begin with http:// or https://");
    return OK;
}

struct alerts *alerts_new(struct metrics *m, const struct alerts_options *o, struct error *err) {
    if (check_urls(o->webhooks, err) != OK || check_urls(o->slack_urls, err) != OK) return NULL;
    struct alerts *a = xcalloc(1, sizeof *a);
    *a = (struct alerts){.m = m, .o = *o};
    pthread_mutex_init(&a->lock, NULL);
    pthread_cond_init(&a->stop, NULL);
    for (int i = 0; i < N_ALERT_RULES; i++) {
        a->states[i].firing = metric_get(m, METRIC_ALERTS, alert_rules[i].name);
        a->states[i].value = NAN;
    }
    a->running = o->interval_seconds > 0;
    if (a->running) CHECK(pthread_create(&a->thread, NULL, alerts_thread, a) == 0);
    return a;
}

void alerts_free(struct alerts *a) {
    if (!a) return;
    pthread_mutex_lock(&a->lock);
    a->quit = true;
    pthread_cond_signal(&a->stop);
    pthread_mutex_unlock(&a->lock);
    if (a->running) pthread_join(a->thread, NULL);
    while (a->n_messages) free(message_remove(a, 0).body);
    free(a);
}

json_t *alerts_json(struct alerts *a) {
    json_t *list = json_array();
    pthread_mutex_lock(&a->lock);
    for (int i = 0; i < N_ALERT_RULES; i++) {
        const struct alert_rule *r = &alert_rules[i];
        const struct alert_state *state = &a->states[i];
        if (r->condition == ALERT_ABSENT || r->condition == ALERT_RESTARTS) continue;
        json_array_append_new(
            list,
            json_pack("{s:s,s:s,s:s,s:s,s:o,s:f,s:I,s:i}", "alert", r->name, "severity",
                      r->severity, "summary", r->summary, "state", status_names[state->status],
                      "value", isfinite(state->value) ? json_real(state->value) : json_null(),
                      "limit", r->limit, "since", (json_int_t)state->since_unix, "for",
                      r->for_seconds));
    }
    json_t *v =
        json_pack("{s:o,s:{s:I,s:I,s:i}}", "alerts", list, "messages", "sent", (json_int_t)a->sent,
                  "failed", (json_int_t)a->failed, "waiting", a->n_messages);
    pthread_mutex_unlock(&a->lock);
    return v;
}
