/*
 * autoscale_metrics: see autoscale_metrics.h. Its metrics are rows of ops/metrics.inc.
 */
#include "cli/autoscale_metrics.h"

#include "http/http.h"
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

struct autoscale_metrics {
    struct metrics *registry;
    struct http_options options;
    struct http_callbacks callbacks;
    struct http *http; /* NULL: no port */
};

static void metrics_handle(void *ctx, struct exchange *x) {
    struct autoscale_metrics *m = ctx;
    struct buf out = {0};
    metrics_text(m->registry, &out, false);
    exchange_reply_buf(x, 200, METRICS_CONTENT_TYPE_TEXT, &out);
}

static void health_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    exchange_reply(x, 200, "text/plain", "ok\n", 3);
}

static const struct http_route routes[] = {
    {"GET", "/metrics", 0, metrics_handle}, {"GET", "/health", 0, health_handle}, {0}};

static int admit(void *ctx, struct exchange *x, const struct http_route *r) {
    (void)ctx, (void)x, (void)r;
    return OK;
}

static void refuse(void *ctx, struct exchange *x, int status, const char *code,
                   const char *message) {
    (void)ctx, (void)code;
    char *text = xasprintf("%s\n", message);
    exchange_reply(x, status, "text/plain", text, strlen(text));
    free(text);
}

static void ended(void *ctx, const struct exchange *x) {
    (void)ctx, (void)x;
}

static bool any_host(void *ctx) {
    (void)ctx;
    return true; // the pages change nothing and contain nothing of a user
}

struct autoscale_metrics *autoscale_metrics_open(const char *host, int64_t port,
                                                 struct error *err) {
    struct autoscale_metrics *m = xcalloc(1, sizeof *m);
    m->registry = metrics_new(0);
    options_default(http_option_rows, &m->options);
    free(m->options.host);
    m->options.host = xstrdup(host);
    m->options.port = port;
    m->options.drain_seconds = 1;
    m->callbacks = (struct http_callbacks){.ctx = m,
                                           .routes = routes,
                                           .workers = 1,
                                           .admit = admit,
                                           .refuse = refuse,
                                           .any_host = any_host,
                                           .ended = ended};
    if (!port) return m;
    m->http = http_new(&m->options, &m->callbacks, err);
    if (m->http) return m;
    autoscale_metrics_close(m);
    return NULL;
}

void autoscale_metrics_add(struct autoscale_metrics *m, const struct scaling_decision *d,
                           bool failed) {
    struct metrics *r = m->registry;
    const int nodes = failed ? d->from : d->to;
    metric_set(metric_get(r, METRIC_AUTOSCALE_NODES), nodes);
    metric_set(metric_get(r, METRIC_MURMUR_NODES), nodes);
    metric_set(metric_get(r, METRIC_AUTOSCALE_LOAD, "cpu"), d->load.cpu);
    metric_set(metric_get(r, METRIC_AUTOSCALE_LOAD, "memory"), d->load.memory);
    metric_set(metric_get(r, METRIC_AUTOSCALE_LOAD, "queue"), d->load.queue);
    metric_set(metric_get(r, METRIC_AUTOSCALE_SCORE, "measured"), d->score);
    metric_set(metric_get(r, METRIC_AUTOSCALE_SCORE, "predicted"), d->predicted);
    metric_add(metric_get(r, METRIC_AUTOSCALE_DECISIONS,
                          failed ? "failed" : scaling_action_names[d->action],
                          scaling_reason_names[d->reason]),
               1);
}

void autoscale_metrics_close(struct autoscale_metrics *m) {
    if (!m) return;
    if (m->http) http_drain(m->http);
    if (m->http) http_free(m->http);
    options_release(http_option_rows, &m->options);
    metrics_free(m->registry);
    free(m);
}
