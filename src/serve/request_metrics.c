/*
 * request_metrics: updates the server's metrics. Requests and generations are counted when they
 * end; gauges are updated when the metrics are read.
 */
#define _GNU_SOURCE
#include "ops/ops.h"
#include "serve/generation.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LORA_INFO_MAX = 32 };

static struct metric *model_metric(struct server *s, enum metric_id id) {
    const char *const labels[] = {"", s->name, "0"};
    return metric_find(s->metrics, id, labels, 2);
}

static void model_observe(struct server *s, enum metric_id id, double seconds) {
    metric_observe(model_metric(s, id), fmax(seconds, 0));
}

/* generations */

static void request_observe(struct server *s, const struct batcher_request *t) {
    bool begun = t->started > 0, first = t->first > 0;
    int32_t n = t->request.n_generated;
    const char *why = t->request.finish == FINISH_NONE ? "abort"
                      : t->request.finish == FINISH_LENGTH || t->request.finish == FINISH_LOOP
                          ? "length"
                          : "stop";
    metric_add(metric_get(s->metrics, METRIC_VLLM_SUCCESS, s->name, "0", why), 1);
    model_observe(s, METRIC_VLLM_E2E, t->ended - t->submitted);
    double waited = (begun ? t->started : t->ended) - t->submitted;
    model_observe(s, METRIC_VLLM_QUEUE_TIME, waited);
    metric_observe(metric_get(s->metrics, METRIC_QUEUE_TIME), fmax(waited, 0));
    if (begun) model_observe(s, METRIC_VLLM_INFERENCE_TIME, t->ended - t->started);
    if (!first) return;
    model_observe(s, METRIC_VLLM_PREFILL_TIME, t->first - t->started);
    model_observe(s, METRIC_VLLM_DECODE_TIME, t->ended - t->first);
    model_observe(s, METRIC_VLLM_TTFT, t->first - t->submitted);
    if (n > 1) model_observe(s, METRIC_VLLM_INTER_TOKEN, (t->ended - t->first) / (n - 1));
}

/* Whether the tokens end in a cycle that is repeated for at least LEAST tokens and at least four
 * periods. */
static bool ends_in_cycle(const int32_t *v, int32_t n) {
    enum { LEAST = 48, WINDOW = 5 * TOKEN_CYCLE_MAX }; // four periods, and one to compare with
    struct token_cycle c = {0};
    bool found = false;
    int32_t from = MAX(n - WINDOW, 0);
    for (int32_t i = 1; i <= n - from; i++) found = token_cycle_extend(&c, v + from, i, LEAST);
    return found;
}

/* Stores the time that a finished generation spent in each stage. */
static void request_trace_add(struct server *s, const struct generation *g) {
    const struct batcher_request *t = &g->completions->batch_request;
    struct token_usage u = generation_usage(g);
    double now = clock_now();
    json_t *v = json_pack(
        "{s:s,s:s,s:s,s:s,s:I,s:f,s:f,s:f,s:f,s:f,s:I,s:I,s:I,s:b}", "id", g->id, "request_id",
        exchange_id(g->x), "model", g->target.name, "adapter", g->target.label, "at",
        (json_int_t)g->created, "read", t->submitted > 0 ? t->submitted - g->started_at : 0.0,
        "queue", t->started > 0 ? t->started - t->submitted : 0.0, "prefill",
        t->first > 0 ? t->first - t->started : 0.0, "decode",
        t->first > 0 ? t->ended - t->first : 0.0, "total", now - g->started_at, "prompt_tokens",
        (json_int_t)u.prompt, "cached_tokens", (json_int_t)u.cached, "completion_tokens",
        (json_int_t)u.completion, "gone", g->cancelled);
    struct server *front = server_front(s);
    pthread_mutex_lock(&front->lock);
    json_decref(front->traces[front->n_traces % REQUEST_TRACES_MAX]);
    front->traces[front->n_traces++ % REQUEST_TRACES_MAX] = v;
    pthread_mutex_unlock(&front->lock);
    if (now - g->started_at >= s->options->slow_seconds && !g->cancelled)
        log_info("slow: %s %s (request %s) took %.1f s (queue %.2f, prefill %.2f, decode %.2f)",
                 g->target.name, g->id, exchange_id(g->x), now - g->started_at,
                 json_get_number(v, "queue"), json_get_number(v, "prefill"),
                 json_get_number(v, "decode"));
}

void request_metrics_add_generation(const struct generation *g) {
    struct server *s = g->s;
    struct metrics *m = s->metrics;
    const char *label = g->target.label;
    struct token_usage u = generation_usage(g);
    int64_t most = 0;
    double first = 0;
    for (int i = 0; i < g->n_completions; i++) {
        const struct batcher_request *t = &g->completions[i].batch_request;
        if (g->completions[i].async) continue;
        request_observe(s, t);
        most = MAX(most, t->request.n_generated);
        if (ends_in_cycle(t->request.out, t->request.n_out))
            metric_add(metric_get(m, METRIC_ADAPTER_LOOPS, label), 1);
        if (t->first > 0 && (first == 0 || t->first < first)) first = t->first;
    }
    if (!g->completions->async) request_trace_add(s, g);
    if (g->key) keys_record_usage(s->keys, g->key, u.prompt, u.completion, (double)time(NULL));
    metric_add(model_metric(s, METRIC_VLLM_PROMPT_TOKENS), (double)u.prompt);
    metric_add(model_metric(s, METRIC_VLLM_GENERATION_TOKENS), (double)u.completion);
    metric_add(model_metric(s, METRIC_VLLM_PREFIX_QUERIES), (double)u.prompt);
    metric_add(model_metric(s, METRIC_VLLM_PREFIX_HITS), (double)u.cached);
    model_observe(s, METRIC_VLLM_REQUEST_PROMPT, (double)u.prompt);
    model_observe(s, METRIC_VLLM_REQUEST_GENERATION, (double)u.completion);
    model_observe(s, METRIC_VLLM_MAX_GENERATION, (double)most);
    model_observe(s, METRIC_VLLM_PARAMS_N, g->spec.n);
    model_observe(s, METRIC_VLLM_PARAMS_MAX_TOKENS, g->spec.max_tokens);
    metric_add(metric_get(m, METRIC_ADAPTER_REQUESTS, label), 1);
    metric_add(metric_get(m, METRIC_ADAPTER_PROMPT_TOKENS, label), (double)u.prompt);
    metric_add(metric_get(m, METRIC_ADAPTER_GENERATION_TOKENS, label), (double)u.completion);
    if (first > 0)
        metric_observe(metric_get(m, METRIC_ADAPTER_TTFT, label), fmax(first - g->started_at, 0));
    if (g->cancelled) metric_add(metric_get(m, METRIC_CANCELLED), 1);
    if (g->spec.grammar)
        metric_add(metric_get(m, METRIC_CONSTRAINED, grammar_kind(g->spec.grammar)), 1);
    const char *kind = g->completions->async ? label : "chat"; // "team" or "agent"
    metric_add(metric_get(m, METRIC_MURMUR_TASKS, "0", kind), 1);
    metric_observe(metric_get(m, METRIC_MURMUR_TASK_TIME, kind),
                   fmax(clock_now() - g->started_at, 0));
}

void request_metrics_add_tokens(struct server *s, const char *key, const struct token_usage *u) {
    if (key) keys_record_usage(s->keys, key, u->prompt, u->completion, (double)time(NULL));
    metric_add(model_metric(s, METRIC_VLLM_PROMPT_TOKENS), (double)u->prompt);
    metric_add(model_metric(s, METRIC_VLLM_GENERATION_TOKENS), (double)u->completion);
}

void request_metrics_add_prompts(struct server *s, const struct exchange *x,
                                 const struct model_ref *t, const struct token_ids *prompts,
                                 int n) {
    int64_t tokens = 0;
    for (int i = 0; i < n; i++) tokens += prompts[i].n;
    if (exchange_key_id(x))
        keys_record_usage(s->keys, exchange_key_id(x), tokens, 0, (double)time(NULL));
    metric_add(model_metric(s, METRIC_VLLM_PROMPT_TOKENS), (double)tokens);
    metric_add(metric_get(s->metrics, METRIC_ADAPTER_REQUESTS, t->label), 1);
    metric_add(metric_get(s->metrics, METRIC_ADAPTER_PROMPT_TOKENS, t->label), (double)tokens);
}

/* HTTP requests */

/* The label of the method. Unknown methods share one label, because each label is a time series and
 * a client may send any name. */
static const char *method_label(const struct exchange *x) {
    static const char *const known[] = {"GET", "POST", "HEAD", "DELETE", "OPTIONS", "PUT", "PATCH"};
    for (size_t i = 0; i < ARRAY_LEN(known); i++)
        if (strcmp(exchange_method(x), known[i]) == 0) return known[i];
    return "other";
}

void request_metrics_add_exchange(struct server *s, const struct exchange *x) {
    struct metrics *m = s->metrics;
    char status[16];
    int code = exchange_status(x);
    snprintf(status, sizeof status, "%d", code);
    metric_add(metric_get(m, METRIC_RECEIVED), 1);
    metric_add(metric_get(m, METRIC_MURMUR_REQUESTS, method_label(x), code ? status : "gone"), 1);
    metric_observe(metric_get(m, METRIC_MURMUR_REQUEST_TIME, method_label(x)),
                   fmax(clock_now() - exchange_start_time(x), 0));
    if (code >= 400) metric_add(metric_get(m, METRIC_MURMUR_ERRORS, "api", status), 1);
    if (code >= 400 && code < 500)
        metric_add(metric_get(m, METRIC_REJECTED,
                              code == 401   ? "key"
                              : code == 403 ? "scope"
                              : code == 404 ? "missing"
                              : code == 413 ? "size"
                              : code == 429 ? "limit"
                                            : "invalid"),
                   1);
    if (code >= 500) metric_add(metric_get(m, METRIC_FAILED), 1);
    if (code == 503) metric_add(metric_get(m, METRIC_REJECTED, "overload"), 1);
}

/* gauges */

static bool list_contains(const char *list, const char *name) {
    size_t n = strlen(name);
    for (const char *at = list; (at = strstr(at, name)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == 0 || at[n] == ',')) return true;
    return false;
}

/* Sets vLLM's lora_requests_info: the adapters of running and of waiting requests. */
static void lora_info_set(struct server *s) {
    struct buf lists[2] = {{0}, {0}};
    char most[16];
    pthread_mutex_lock(&s->lock);
    for (const struct generation *g = s->generations; g; g = g->next) {
        const struct completion *c = g->completions;
        if (g->target.n == 0 || c->async) continue;
        struct buf *list =
            &lists[__atomic_load_n(&c->batch_request.n_visible, __ATOMIC_ACQUIRE) == 0];
        if (list->data && list_contains(list->data, g->target.label)) continue;
        buf_printf(list, "%s%s", list->len ? "," : "", g->target.label);
    }
    pthread_mutex_unlock(&s->lock);
    snprintf(most, sizeof most, "%d", batcher_stats(s->batcher).max_running);
    struct metric *info =
        metric_get(s->metrics, METRIC_VLLM_LORA, most, lists[0].data ? lists[0].data : "",
                   lists[1].data ? lists[1].data : "");
    metric_set(info, (double)time(NULL));
    buf_release(&lists[0]);
    buf_release(&lists[1]);
}

/* Sets the gauges that are labelled with the model; those of a base without a batch are 0. */
static void model_metrics_set(struct server *s, const struct batcher_stats *b) {
    double used = b->pages ? 1 - (double)b->pages_free / b->pages : 0;
    metric_set(model_metric(s, METRIC_VLLM_RUNNING), b->running);
    metric_set(model_metric(s, METRIC_VLLM_WAITING), b->waiting);
    metric_set(model_metric(s, METRIC_VLLM_KV_USAGE), used);
    metric_set_total(model_metric(s, METRIC_VLLM_PREEMPTIONS), 0);
}

/* The bases besides the default one; one that was never loaded has no metrics. */
static void base_metrics_set(struct server *front) {
    struct server *s;
    for (int i = 1; (s = base_at(front, i)); i++) {
        struct batcher_stats b = {0};
        bool loaded = base_retain(s);
        if (loaded) b = batcher_stats(s->batcher);
        if (loaded || base_status(s).loads > 0) model_metrics_set(s, &b);
        if (loaded) base_release(s, false);
    }
}

void request_metrics_refresh(struct server *s) {
    struct metrics *m = s->metrics;
    struct batcher_stats b = batcher_stats(s->batcher);
    struct adapter_pool_stats p = adapter_pool_stats(s->pool);
    model_metrics_set(s, &b);
    base_metrics_set(s);
    metric_set(metric_get(m, METRIC_ADAPTERS), p.n_resident);
    metric_set(metric_get(m, METRIC_ADAPTERS_BYTES), (double)p.bytes);
    metric_set_total(metric_get(m, METRIC_ADAPTER_LOADS), (double)p.loads);
    metric_set_total(metric_get(m, METRIC_ADAPTER_DROPS), (double)p.evictions);
    metric_set(metric_get(m, METRIC_MURMUR_LOAD, "0"), (double)b.running / b.max_running);
    metric_set(metric_get(m, METRIC_MURMUR_PENDING), b.waiting);
    metric_set(metric_get(m, METRIC_MURMUR_MEMORY, "adapters"), (double)p.bytes);
    metric_set(metric_get(m, METRIC_MURMUR_MEMORY, "process"), (double)process_memory("VmRSS"));
    lora_info_set(s);
    const struct server_module *module;
    for (int i = 0; (module = server_module_at(s, i)); i++)
        if (module->update_metrics) module->update_metrics(s);
}

static void step_observe(void *ctx, double seconds, int32_t tokens) {
    struct server *s = ctx;
    metric_observe(s->step_seconds, seconds);
    metric_observe(s->step_tokens, tokens);
}

void request_metrics_watch(struct server *s) {
    s->step_seconds = metric_get(s->metrics, METRIC_STEP);
    s->step_tokens = model_metric(s, METRIC_VLLM_ITERATION_TOKENS);
    batcher_on_step(s->batcher, step_observe, s);
}

void request_metrics_open(struct server *s) {
    char size[16], pages[16];
    s->metrics = metrics_new(0);
    pthread_mutex_init(&s->metrics_lock, NULL);
    snprintf(size, sizeof size, "%d", KV_PAGE_SIZE);
    snprintf(pages, sizeof pages, "%d", (int)engine_stats(s->engine).pages);
    metric_set(metric_get(s->metrics, METRIC_VLLM_CACHE_CONFIG, size, pages), 1);
    if (s->options->max_memory)
        metric_set(metric_get(s->metrics, METRIC_MEMORY_BUDGET), (double)s->options->max_memory);
    request_metrics_watch(s);
}

/* endpoints */

static void metrics_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const char *accept = exchange_header(x, "Accept");
    bool open = accept && strstr(accept, "application/openmetrics-text");
    struct buf out = {0};
    pthread_mutex_lock(&s->metrics_lock);
    request_metrics_refresh(s);
    metrics_text(s->metrics, &out, open);
    pthread_mutex_unlock(&s->metrics_lock);
    exchange_reply(x, 200, open ? METRICS_CONTENT_TYPE_OPENMETRICS : METRICS_CONTENT_TYPE_TEXT,
                   out.data, out.len);
    buf_release(&out);
}

static void metrics_json_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    pthread_mutex_lock(&s->metrics_lock);
    request_metrics_refresh(s);
    json_t *v = metrics_json(s->metrics);
    pthread_mutex_unlock(&s->metrics_lock);
    exchange_reply_json(x, 200, v);
}

static void rules_handle(void *ctx, struct exchange *x) {
    struct buf out = {0};
    (void)ctx;
    metrics_alert_rules_yaml(&out);
    exchange_reply(x, 200, "application/yaml", out.data, out.len);
    buf_release(&out);
}

static void dashboard_handle(void *ctx, struct exchange *x) {
    (void)ctx;
    exchange_reply_json(x, 200, metrics_dashboard());
}

static void alerts_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    exchange_reply_json(x, 200, alerts_json(s->alerts));
}

const struct http_route metrics_routes[] = {
    {"GET", "/metrics", SCOPE_METRICS | ROUTE_OWN_THREAD, metrics_handle},
    {"GET", "/v1/metrics", SCOPE_CHAT, metrics_json_handle},
    {"GET", "/v1/metrics/rules", SCOPE_METRICS, rules_handle},
    {"GET", "/v1/metrics/dashboard", SCOPE_METRICS, dashboard_handle},
    {"GET", "/v1/alerts", SCOPE_CHAT, alerts_handle},
    {0},
};
