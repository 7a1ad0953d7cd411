/*
 * jobs_api: long work over HTTP. Jobs themselves are jobs.c's; here are their routes, the streams
 * of what happens to them, and what becomes of their results: an adapter that a job wrote is served
 * under its name from then on.
 *
 * What a job writes lies below the server's own folder: a client gives a name for "out", not a
 * path, and options that name other places to write to, or programs to run, are refused.
 */
#define _GNU_SOURCE
#include "serve/job_figures.h"
#include "serve/jobs.h"
#include "serve/metrics.h"
#include "serve/server.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { JOBS_TOLD = 16 }; /* whose figures are metrics, beside those that run */

/* Who watches a job. */
struct watcher {
    struct watcher *next, *prev; /* in the server's list, under its lock */
    struct server *s;
    struct exchange *x;
    char id[JOB_ID_LEN];
    int64_t after;
};

/* streams of events */

static bool is_over(const char *state) {
    return strcmp(state, "done") == 0 || strcmp(state, "failed") == 0 ||
           strcmp(state, "cancelled") == 0;
}

static void event_add(struct buf *out, const json_t *e) {
    char *text = json_dumps(e, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text != NULL);
    buf_printf(out, "id: %lld\nevent: %s\ndata: %s\n\n", (long long)json_number_at(e, "seq"),
               json_text_at(e, "type"), text);
    free(text);
}

static enum pulled watcher_pull(void *ctx, struct buf *out) {
    struct watcher *w = ctx;
    struct error err;
    json_t *events = jobs_events(w->s->jobs, w->id, w->after, &err), *e;
    bool over = !events; // deleted
    size_t i;
    json_array_foreach (events, i, e) {
        event_add(out, e);
        w->after = (int64_t)json_number_at(e, "seq");
        if (strcmp(json_text_at(e, "type"), "state") == 0) over = is_over(json_text_at(e, "state"));
    }
    json_decref(events);
    if (over) buf_puts(out, "event: end\ndata: {}\n\n");
    return over ? PULL_END : out->len ? PULL_MORE : PULL_WAIT;
}

static void watcher_close(void *ctx, bool finished) {
    struct watcher *w = ctx;
    (void)finished;
    pthread_mutex_lock(&w->s->lock);
    if (w->next) w->next->prev = w->prev;
    *(w->prev ? &w->prev->next : &w->s->watchers) = w->next;
    pthread_mutex_unlock(&w->s->lock);
    exchange_release(w->x);
    free(w);
}

static void watch(struct server *s, struct exchange *x, const char *id) {
    const char *after = exchange_query(x, "after");
    if (!after) after = exchange_header(x, "Last-Event-ID");
    struct watcher *w = xcalloc(1, sizeof *w);
    *w = (struct watcher){
        .s = s, .x = exchange_retain(x), .after = after ? strtoll(after, NULL, 10) : 0};
    snprintf(w->id, sizeof w->id, "%s", id);
    pthread_mutex_lock(&s->lock);
    w->next = s->watchers;
    if (w->next) w->next->prev = w;
    s->watchers = w;
    pthread_mutex_unlock(&s->lock);
    struct stream_source source = {watcher_pull, watcher_close, w, ": waiting\n\n"};
    exchange_stream(x, 200, "text/event-stream", &source);
}

/* what becomes of results */

static char *out_folder(const struct server *s) {
    return path_join(s->o->state_dir, "out");
}

/* Adapters that jobs have written since the last look: served, in place of older ones of the name.
 */
static void results_publish(void *ctx) {
    struct server *s = ctx;
    json_t *list = jobs_list(s->jobs), *job;
    size_t i;
    json_array_foreach (list, i, job) {
        const char *id = json_text_at(job, "id");
        char *path = xstrdup(json_text_at(json_object_get(job, "options"), "out"));
        char *config = path_join(path, "adapter_config.json");
        const char *slash = strrchr(path, '/');
        struct error err;
        pthread_mutex_lock(&s->lock);
        bool news = strcmp(json_text_at(job, "state"), "done") == 0 && *path && slash &&
                    path_exists(config) && !json_object_get(s->published, id) &&
                    json_object_set_new(s->published, id, json_true()) == 0;
        pthread_mutex_unlock(&s->lock);
        if (news && server_adapter_load(s, slash + 1, path, true, &err) != OK)
            warn("what job %s has made cannot be served: %s", id, err.text);
        free(config);
        free(path);
    }
    json_decref(list);
    __atomic_store_n(&s->publishing, false, __ATOMIC_RELEASE);
}

/* In the jobs' thread. */
static void jobs_changed(void *ctx) {
    struct server *s = ctx;
    pthread_mutex_lock(&s->lock);
    for (struct watcher *w = s->watchers; w; w = w->next) exchange_wake(w->x);
    if (!s->closing && s->http && !__atomic_exchange_n(&s->publishing, true, __ATOMIC_ACQ_REL))
        http_work(s->http, results_publish, s);
    pthread_mutex_unlock(&s->lock);
}

/* what may be asked for */

/* Where a command writes, but for "out", which is put below the server's folder. */
static bool jobs_allow(void *ctx, const char *kind, const char *option) {
    static const char *const refused[] = {"runs",   "store", "report",  "record",      "save",
                                          "log",    "trace", "session", "env-pipe",    "db",
                                          "output", "to",    "history", "cache-folder"};
    (void)ctx, (void)kind;
    for (size_t i = 0; i < ARRAY_LEN(refused); i++)
        if (strcmp(option, refused[i]) == 0) return false;
    return true;
}

/* "critic" → STATE/out/critic */
static int out_place(struct server *s, json_t *request, struct error *err) {
    json_t *options = json_object_get(request, "options");
    const json_t *out = json_object_get(options, "out");
    const char *name = json_string_value(out);
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    if (!out) return OK;
    if (!name || !*name || *name == '.' || *name == '-' || strlen(name) > 64 ||
        strspn(name, letters) != strlen(name))
        return error_set(err, ERR_USAGE,
                         "'out' is a name of letters, digits, '.', '_' and '-', not a path: the "
                         "result lies below the server's folder");
    char *folder = out_folder(s);
    int rc = dir_make(folder, err);
    char *path = path_join(folder, name);
    if (rc == OK) json_object_set_new(options, "out", json_path(path));
    free(path);
    free(folder);
    return rc;
}

static void fail(struct exchange *x, const struct error *err) {
    if (err->code == ERR_MISSING)
        api_fail(x, 404, NULL, NULL, "job_not_found", "%s", err->text);
    else if (err->code == ERR_MISMATCH || err->code == ERR_STATE)
        api_fail(x, 409, NULL, NULL, "conflict", "%s", err->text);
    else
        api_fail_error(x, err, NULL);
}

/* The job as it stands now, or why there is none. */
static void job_reply(struct server *s, struct exchange *x, int status, const char *id) {
    struct error err;
    json_t *job = jobs_get(s->jobs, id, &err);
    if (job)
        exchange_reply_json(x, status, job);
    else
        fail(x, &err);
}

static void start_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    char id[JOB_ID_LEN];
    struct error err;
    json_t *request = exchange_json(x, &err);
    int rc = request ? out_place(s, request, &err) : err.code;
    if (rc == OK)
        rc = jobs_start(s->jobs, request, exchange_header(x, "Idempotency-Key"), id, &err);
    if (rc == OK)
        job_reply(s, x, 201, id);
    else
        fail(x, &err);
    json_decref(request);
}

static void list_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    exchange_reply_json(x, 200, json_pack("{s:o}", "jobs", jobs_list(s->jobs)));
}

static void file_reply(struct server *s, struct exchange *x, const char *id, const char *name,
                       const char *type) {
    struct error err;
    struct buf text = {0};
    char *path = jobs_file(s->jobs, id, name, &err);
    if (path && file_read(path, 256 << 20, &text, &err) == OK)
        exchange_reply(x, 200, type, text.data ? text.data : "", text.len);
    else
        fail(x, &err);
    buf_release(&text);
    free(path);
}

static void series_reply(struct server *s, struct exchange *x, const char *id) {
    struct error err;
    json_t *v = jobs_series(s->jobs, id, &err);
    if (v)
        exchange_reply_json(x, 200, v);
    else
        fail(x, &err);
}

/* "job-1/events" → its two parts; the second may be missing. */
static bool rest_split(const struct exchange *x, char id[JOB_ID_LEN], const char **what) {
    const char *rest = exchange_rest(x), *slash = strchrnul(rest, '/');
    snprintf(id, JOB_ID_LEN, "%.*s", (int)MIN(slash - rest, JOB_ID_LEN - 1), rest);
    *what = *slash ? slash + 1 : "";
    return slash - rest < JOB_ID_LEN;
}

static void job_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    char id[JOB_ID_LEN];
    const char *what;
    struct error err;
    json_t *job = rest_split(x, id, &what) ? jobs_get(s->jobs, id, &err) : NULL;
    if (!job)
        api_fail(x, 404, NULL, NULL, "job_not_found", "there is no job '%.40s'", exchange_rest(x));
    else if (!*what)
        exchange_reply_json(x, 200, json_incref(job));
    else if (strcmp(what, "events") == 0)
        watch(s, x, id);
    else if (strcmp(what, "results") == 0)
        file_reply(s, x, id, "stdout.jsonl", "application/x-ndjson");
    else if (strcmp(what, "log") == 0)
        file_reply(s, x, id, "stderr.txt", "text/plain; charset=utf-8");
    else if (strcmp(what, "series") == 0)
        series_reply(s, x, id);
    else
        api_fail(x, 404, NULL, NULL, "not_found",
                 "of a job there are events, results, series and log");
    json_decref(job);
}

static void act_handle(void *ctx, struct exchange *x) {
    static const struct {
        const char *name;
        int (*act)(struct jobs *j, const char *id, struct error *err);
    } acts[] = {{"pause", jobs_pause}, {"resume", jobs_resume}, {"cancel", jobs_cancel}};
    struct server *s = ctx;
    char id[JOB_ID_LEN];
    const char *what;
    struct error err;
    rest_split(x, id, &what);
    for (size_t i = 0; i < ARRAY_LEN(acts); i++) {
        if (strcmp(what, acts[i].name) != 0) continue;
        if (acts[i].act(s->jobs, id, &err) == OK)
            job_reply(s, x, 200, id);
        else
            fail(x, &err);
        return;
    }
    api_fail(x, 404, NULL, NULL, "not_found", "a job can be told to pause, resume and cancel");
}

static void delete_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    if (jobs_delete(s->jobs, exchange_rest(x), &err) == OK)
        exchange_reply_json(x, 200, json_pack("{s:s,s:b}", "id", exchange_rest(x), "deleted", 1));
    else
        fail(x, &err);
}

const struct route jobs_routes[] = {
    {"POST", "/v1/jobs", JOBS, start_handle},      {"GET", "/v1/jobs", JOBS, list_handle},
    {"GET", "/v1/jobs/*", JOBS, job_handle},       {"POST", "/v1/jobs/*", JOBS, act_handle},
    {"DELETE", "/v1/jobs/*", JOBS, delete_handle}, {0},
};

/* the server's */

static void job_ended(void *ctx, const char *kind, const char *state) {
    struct server *s = ctx;
    metric_add(metric_get(s->metrics, METRIC_JOBS_ENDED, kind, state), 1);
}

int server_jobs_open(struct server *s, struct error *err) {
    struct jobs_options o = {.max_running = (int)s->o->max_jobs,
                             .runs = s->o->runs,
                             .same_priority = !s->o->jobs_idle,
                             .ctx = s,
                             .allow = jobs_allow,
                             .ended = job_ended,
                             .changed = jobs_changed};
    s->jobs_store = path_join(s->o->state_dir, "jobs.db");
    s->jobs_folder = path_join(s->o->state_dir, "jobs");
    s->published = json_object();
    s->jobs = jobs_open(s->jobs_store, s->jobs_folder, &o, err);
    if (s->jobs) return OK;
    return err->code == ERR_STATE
               ? error_set(err, ERR_STATE,
                           "another server keeps its state in '%s'; give this one --state DIR",
                           s->o->state_dir)
               : err->code;
}

void server_jobs_close(struct server *s) {
    if (s->jobs) jobs_close(s->jobs);
    json_decref(s->published);
    free(s->jobs_store);
    free(s->jobs_folder);
}

/* Jobs by kind and state; those of none are told too, so that a rule need not guess. */
static void states_count(struct server *s, const json_t *list) {
    static const char *const states[] = {"queued", "running",   "paused",
                                         "done",   "cancelled", "failed"};
    static const char *const kinds[] = {"train", "evolve", "debate",  "ask",
                                        "world", "eval",   "quantize"};
    json_t *job;
    int count[ARRAY_LEN(kinds)][ARRAY_LEN(states)] = {{0}};
    size_t i;
    json_array_foreach (list, i, job)
        for (size_t k = 0; k < ARRAY_LEN(kinds); k++)
            for (size_t st = 0; st < ARRAY_LEN(states); st++)
                count[k][st] += strcmp(json_text_at(job, "kind"), kinds[k]) == 0 &&
                                strcmp(json_text_at(job, "state"), states[st]) == 0;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++)
        for (size_t st = 0; st < ARRAY_LEN(states); st++)
            metric_set(metric_get(s->metrics, METRIC_JOBS, kinds[k], states[st]), count[k][st]);
}

/* What a job measures of itself stays when it has ended, but for speeds: it has none any more. */
static void job_figures_count(struct server *s, const json_t *job, bool running) {
    static const char speed[] = "_per_second";
    const char *name;
    json_t *v;
    json_object_foreach (json_object_get(job, "figures"), name, v) {
        enum metric_id id = figure_metric(name);
        size_t n = strlen(name), m = strlen(speed);
        if (id == N_METRICS || (!running && n > m && strcmp(name + n - m, speed) == 0)) continue;
        metric_set(metric_get(s->metrics, id, json_text_at(job, "id")),
                   json_is_number(v) ? json_number_value(v) : NAN);
    }
}

/* Of the newest jobs that have something to tell; older ones make room. The list is the newest
 * first. */
static void figures_count(struct server *s, const json_t *list) {
    json_t *job;
    size_t i;
    int n = 0;
    for (enum metric_id id = 0; id < N_METRICS; id++)
        if (id == METRIC_JOB_PROGRESS || is_figure(id)) metrics_clear(s->metrics, id);
    json_array_foreach (list, i, job) {
        bool running = strcmp(json_text_at(job, "state"), "running") == 0;
        const json_t *progress = json_object_get(job, "progress");
        double total = json_number_at(progress, "total");
        if (!running && (n >= JOBS_TOLD || !json_object_get(job, "figures"))) continue;
        n++;
        job_figures_count(s, job, running);
        if (running && total > 0)
            metric_set(metric_get(s->metrics, METRIC_JOB_PROGRESS, json_text_at(job, "kind"),
                                  json_text_at(job, "id")),
                       fmin(json_number_at(progress, "done") / total, 1));
    }
}

void server_jobs_count(struct server *s) {
    json_t *list = jobs_list(s->jobs);
    states_count(s, list);
    figures_count(s, list);
    json_decref(list);
}
