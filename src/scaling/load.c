/*
 * load: the load of servers, from their pages /metrics in Prometheus' text format (scaling.h).
 */
#include "hub/hub.h"
#include "ops/ops.h"
#include "scaling/scaling.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE_MAX = 8 << 20, SERVERS_MAX = 1024 };
static const double REQUEST_SECONDS = 10;

/* one page */

struct wanted {
    enum metric_id id;
    bool optional;
    double sum; /* over the series; NaN: none */
};

/* The value of a line of this metric, after its labels. A label's text may have any character. */
static bool line_value(const char *line, size_t n, const char *name, double *out) {
    size_t len = strlen(name);
    if (n <= len || strncmp(line, name, len) != 0) return false;
    const char *p = line + len, *end = line + n;
    bool quoted = false;
    if (*p == '{') {
        for (p++; p < end && (quoted || *p != '}'); p++) {
            if (quoted && *p == '\\')
                p++;
            else if (*p == '"')
                quoted = !quoted;
        }
        p++;
    }
    if (p >= end || *p != ' ') return false;
    char number[64], *rest;
    size_t size = MIN((size_t)(end - p), sizeof number - 1);
    memcpy(number, p, size);
    number[size] = 0;
    *out = strtod(number, &rest);
    return rest != number && isfinite(*out);
}

static void lines_read(const char *text, size_t len, struct wanted *v, int n_wanted) {
    for (size_t at = 0; at < len;) {
        const char *line = text + at, *newline = memchr(line, '\n', len - at);
        size_t n = newline ? (size_t)(newline - line) : len - at;
        double x;
        for (int i = 0; i < n_wanted; i++)
            if (line_value(line, n, metric_families[v[i].id].name, &x))
                v[i].sum = isnan(v[i].sum) ? x : v[i].sum + x;
        at += n + 1;
    }
}

static double share(double x) {
    return MIN(MAX(x, 0), 1);
}

int metrics_sample_parse(const char *text, size_t len, struct metrics_sample *out,
                         struct error *err) {
    enum { CPU, CPUS, RESIDENT, BUDGET, HOST, AVAILABLE, WAITING, N };
    struct wanted v[N] = {
        {METRIC_PROCESS_CPU, false, NAN},      {METRIC_CPUS, false, NAN},
        {METRIC_PROCESS_RESIDENT, false, NAN}, {METRIC_MEMORY_BUDGET, true, NAN},
        {METRIC_HOST_MEMORY, false, NAN},      {METRIC_HOST_AVAILABLE, false, NAN},
        {METRIC_VLLM_WAITING, true, 0}};
    lines_read(text, len, v, N);
    for (int i = 0; i < N; i++)
        if (!v[i].optional && !(v[i].sum >= 0))
            return error_set(err, ERR_FORMAT,
                             "there is no metric '%s'; is it the /metrics of "
                             "'shoal serve'?",
                             metric_families[v[i].id].name);
    *out = (struct metrics_sample){
        .cpu_seconds = v[CPU].sum, .cpus = MAX(v[CPUS].sum, 1), .waiting = MAX(v[WAITING].sum, 0)};
    out->memory = v[BUDGET].sum > 0 ? share(v[RESIDENT].sum / v[BUDGET].sum)
                                    : share(1 - v[AVAILABLE].sum / MAX(v[HOST].sum, 1));
    return OK;
}

/* the reader */

struct server {
    char *url;
    double at, cpu_seconds; /* values of the last reading */
    bool failed;            /* it could not be read, and a warning said so */
    bool current;           /* read in this round */
};
struct load_reader {
    struct server *v; /* [n] */
    int n;
    int64_t max_queue;
    struct strings headers;
};

struct load_reader *load_reader_new(int64_t max_queue, const char *key_env, struct error *err) {
    const char *key = key_env ? getenv(key_env) : NULL;
    if (key_env && !(key && *key)) {
        error_set(err, ERR_USAGE, "the variable '%s' with the key is not set", key_env);
        return NULL;
    }
    struct load_reader *r = xcalloc(1, sizeof *r);
    r->max_queue = max_queue;
    if (key) {
        char *line = xasprintf("Authorization: Bearer %s", key);
        strings_add(&r->headers, line);
        free(line);
    }
    return r;
}

void load_reader_free(struct load_reader *r) {
    if (!r) return;
    for (int i = 0; i < r->n; i++) free(r->v[i].url);
    free(r->v);
    strings_release(&r->headers);
    free(r);
}

static struct server *server_find(struct load_reader *r, const char *url) {
    for (int i = 0; i < r->n; i++)
        if (strcmp(r->v[i].url, url) == 0) return &r->v[i];
    r->v = xrealloc(r->v, sizeof *r->v * (size_t)(r->n + 1));
    r->v[r->n] = (struct server){.url = xstrdup(url), .at = NAN};
    return &r->v[r->n++];
}

static int page_read(const struct load_reader *r, const char *url, struct metrics_sample *out,
                     struct error *err) {
    struct http_response p;
    int rc = http_request(&(struct http_request){.method = "GET",
                                                 .url = url,
                                                 .headers = &r->headers,
                                                 .max_body = PAGE_MAX,
                                                 .seconds = REQUEST_SECONDS},
                          &p, err);
    if (rc == OK && p.status != 200) rc = error_set(err, ERR_IO, "status %d", p.status);
    if (rc == OK) rc = metrics_sample_parse(p.body.data, p.body.len, out, err);
    http_response_release(&p);
    return rc;
}

/* Adds the load of a server to the sum. False: it is not known yet. */
static bool server_add(struct server *s, const struct metrics_sample *m, int64_t max_queue,
                       struct scaling_load *sum) {
    double now = clock_now(), cpu = (m->cpu_seconds - s->cpu_seconds) / (now - s->at) / m->cpus;
    bool known = cpu >= 0; // neither the first reading nor that of a restarted process
    s->at = now;
    s->cpu_seconds = m->cpu_seconds;
    if (!known) return false;
    sum->cpu += share(cpu);
    sum->memory += m->memory;
    sum->queue += share(m->waiting / (double)max_queue);
    return true;
}

/* Forgets the servers that are no longer named, such as removed pods. */
static void servers_forget(struct load_reader *r) {
    int n = 0;
    for (int i = 0; i < r->n; i++) {
        if (r->v[i].current)
            r->v[n++] = r->v[i];
        else
            free(r->v[i].url);
    }
    r->n = n;
    for (int i = 0; i < n; i++) r->v[i].current = false;
}

int load_read(struct load_reader *r, const struct strings *urls, struct scaling_load *out,
              struct error *err) {
    struct scaling_load sum = {0, 0, 0};
    int known = 0;
    for (int i = 0; i < MIN(urls->n, SERVERS_MAX); i++) {
        struct server *s = server_find(r, urls->v[i]);
        struct metrics_sample m;
        struct error failure;
        s->current = true;
        bool failed = page_read(r, s->url, &m, &failure) != OK;
        if (!failed) known += server_add(s, &m, r->max_queue, &sum);
        if (failed && !s->failed)
            log_warn("the load of '%s' is not known: %s", s->url, failure.text);
        s->failed = failed;
    }
    servers_forget(r);
    *out = (struct scaling_load){sum.cpu / known, sum.memory / known, sum.queue / known};
    return known ? OK : error_set(err, ERR_STATE, "the load of no server is known yet");
}
