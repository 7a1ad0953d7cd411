/*
 * jobs: jobs over HTTP. src/jobs runs the jobs. This file has their routes, streams their events,
 * and publishes results: an adapter that a job wrote is served under its name.
 *
 * The option tables of the commands define the options of jobs (cmd_serve passes them). This file
 * derives from the server's options which files a job may read and write. Results are stored in the
 * server's output folder, under names that clients choose.
 */
#define _GNU_SOURCE
#include "jobs/jobs.h"
#include "api/internal.h"
#include "hub/hub.h"
#include "ops/ops.h"
#include "sandbox/sandbox.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Maximal number of jobs in the server's metrics; running jobs are always included. */
enum { MAX_JOBS_IN_METRICS = 16 };

/* A client that streams a job's events. */
struct job_event_stream {
    struct job_event_stream *next, *prev; /* in the server's list, under its lock */
    struct server *s;
    struct exchange *x;
    char id[JOB_ID_LEN];
    int64_t after;
};

/* streams of events */

bool job_state_is_final(const char *state) {
    return strcmp(state, "done") == 0 || strcmp(state, "failed") == 0 ||
           strcmp(state, "cancelled") == 0;
}

static void event_write(struct buf *out, const json_t *e) {
    char *text = json_dumps(e, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text != NULL);
    buf_printf(out, "id: %lld\nevent: %s\ndata: %s\n\n", (long long)json_get_number(e, "seq"),
               json_get_string(e, "type"), text);
    free(text);
}

static enum stream_status event_stream_pull(void *ctx, struct buf *out) {
    struct job_event_stream *w = ctx;
    struct error err;
    json_t *events = jobs_events(w->s->jobs, w->id, w->after, &err), *e;
    bool has_ended = !events; // the job was deleted
    size_t i;
    json_array_foreach (events, i, e) {
        event_write(out, e);
        w->after = (int64_t)json_get_number(e, "seq");
        if (strcmp(json_get_string(e, "type"), "state") == 0)
            has_ended = job_state_is_final(json_get_string(e, "state"));
    }
    json_decref(events);
    if (has_ended) buf_puts(out, "event: end\ndata: {}\n\n");
    return has_ended ? STREAM_END : out->len ? STREAM_MORE : STREAM_WAIT;
}

static void event_stream_close(void *ctx, bool finished) {
    struct job_event_stream *w = ctx;
    (void)finished;
    pthread_mutex_lock(&w->s->lock);
    if (w->next) w->next->prev = w->prev;
    *(w->prev ? &w->prev->next : &w->s->event_streams) = w->next;
    pthread_mutex_unlock(&w->s->lock);
    exchange_release(w->x);
    free(w);
}

static void event_stream_start(struct server *s, struct exchange *x, const char *id) {
    const char *after = exchange_query(x, "after");
    if (!after) after = exchange_header(x, "Last-Event-ID");
    struct job_event_stream *w = xcalloc(1, sizeof *w);
    *w = (struct job_event_stream){
        .s = s, .x = exchange_retain(x), .after = after ? strtoll(after, NULL, 10) : 0};
    snprintf(w->id, sizeof w->id, "%s", id);
    pthread_mutex_lock(&s->lock);
    w->next = s->event_streams;
    if (w->next) w->next->prev = w;
    s->event_streams = w;
    pthread_mutex_unlock(&s->lock);
    struct stream_source source = {event_stream_pull, event_stream_close, w, ": waiting\n\n"};
    exchange_stream(x, 200, "text/event-stream", &source);
}

/* publication of results */

static char *results_folder(const struct server *s) {
    return path_join(s->options->state_dir, "out");
}

int job_adapter_name_check(struct server *s, const char *name, const char *path,
                           bool may_replace_any, struct error *err) {
    int n, rc = OK;
    struct adapter_entry *v = server_adapters(s, &n);
    for (int i = 0; i < n && !may_replace_any && rc == OK; i++)
        if (strcmp(v[i].name, name) == 0 && (!v[i].path || strcmp(v[i].path, path) != 0))
            rc = error_set(
                err, ERR_STATE,
                "'%s' is a served adapter that no job has written: choose another name, or "
                "use a key with the scope admin",
                name);
    server_adapters_free(v, n);
    return rc;
}

/* Whether a job that has ended was not handled yet. */
static bool is_new_result(struct server *s, const char *id) {
    pthread_mutex_lock(&s->lock);
    bool is_new = !json_object_get(s->published, id) &&
                  json_object_set_new(s->published, id, json_true()) == 0;
    pthread_mutex_unlock(&s->lock);
    return is_new;
}

/* Serves the adapter that a job has written to its option `out`. */
static void result_publish(struct server *s, const json_t *job) {
    const char *id = json_get_string(job, "id");
    const char *path = json_get_string(json_object_get(job, "options"), "out"),
               *slash = strrchr(path, '/');
    struct error err;
    if (slash && adapter_exists(path) && is_new_result(s, id) &&
        (job_adapter_name_check(s, slash + 1, path, jobs_may_replace(s->jobs, id), &err) != OK ||
         server_adapter_load(s, slash + 1, path, true, &err) != OK))
        log_warn("the result of job %s cannot be served: %s", id, err.text);
}

/* Serves the adapters that jobs have written since the last call; each replaces an older one of the
 * same name. */
static void results_publish(void *ctx) {
    struct server *s = ctx;
    json_t *list = jobs_list(s->jobs, NULL), *job;
    size_t i;
    json_array_foreach (list, i, job) {
        const char *id = json_get_string(job, "id"), *state = json_get_string(job, "state");
        if (strcmp(json_get_string(job, "kind"), "sleep") == 0) {
            if (job_state_is_final(state) && is_new_result(s, id)) sleep_job_ended(s, id);
        } else if (strcmp(state, "done") == 0) {
            result_publish(s, job);
        }
    }
    json_decref(list);
    __atomic_store_n(&s->publishing, false, __ATOMIC_RELEASE);
}

/* Called in the jobs' thread when a job has new events. */
static void jobs_changed(void *ctx) {
    struct server *s = ctx;
    pthread_mutex_lock(&s->lock);
    for (struct job_event_stream *w = s->event_streams; w; w = w->next) exchange_wake(w->x);
    if (!s->closing && s->http && !__atomic_exchange_n(&s->publishing, true, __ATOMIC_ACQ_REL))
        http_run_in_worker(s->http, results_publish, s);
    pthread_mutex_unlock(&s->lock);
}

/* checks of requests */

/* Checks that the results of a request may be served under their names. */
static int result_names_check(struct server *s, const json_t *request, bool may_replace_any,
                              struct error *err) {
    const json_t *options = json_object_get(request, "options");
    static const char *const names[] = {"out", "output-dir", "output_dir"};
    int rc = OK;
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(names); i++) {
        const char *name = json_get_string(options, names[i]);
        char *folder = results_folder(s), *path = path_join(folder, name);
        if (*name) rc = job_adapter_name_check(s, name, path, may_replace_any, err);
        free(path);
        free(folder);
    }
    return rc;
}

/* Whether a caller may replace any adapter: a key with the scope admin may, and a caller without a
 * key. */
static bool may_replace(struct server *s, const char *key) {
    return !key || keys_scopes(s->keys, key) & KEY_SCOPE_ADMIN;
}

static void fail(struct exchange *x, const struct error *err, const char *param) {
    if (err->code == ERR_MISSING)
        api_fail(x, 404, NULL, NULL, "job_not_found", "%s", err->text);
    else if (err->code == ERR_MISMATCH || err->code == ERR_STATE)
        api_fail(x, 409, NULL, NULL, "conflict", "%s", err->text);
    else if (err->code == ERR_MEMORY)
        api_fail(x, 429, NULL, NULL, "too_many_jobs", "%s", err->text);
    else
        api_fail_error(x, err, param);
}

/* Replies with the job's current state, or with an error. */
static void job_reply(struct server *s, struct exchange *x, int status, const char *id) {
    struct error err;
    json_t *job = jobs_get(s->jobs, id, &err);
    if (job)
        exchange_reply_json(x, status, job);
    else
        fail(x, &err, NULL);
}

static void start_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    char id[JOB_ID_LEN];
    struct error err;
    struct job_caller caller = {.idempotency_key = exchange_header(x, "Idempotency-Key"),
                                .owner = exchange_key_id(x),
                                .may_replace_any = may_replace(s, exchange_key_id(x))};
    json_t *request = request_memory_json(s, x, &err);
    int rc = request ? result_names_check(s, request, caller.may_replace_any, &err) : err.code;
    if (rc == OK) rc = jobs_submit(s->jobs, request, &caller, id, &err);
    if (rc == OK)
        job_reply(s, x, 201, id);
    else
        fail(x, &err, *caller.field ? caller.field : NULL);
    json_decref(request);
}

static void list_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    const char *state = exchange_query(x, "state");
    if (state && !job_state_exists(state))
        api_fail(x, 400, NULL, "state", NULL,
                 "'state' is queued, running, paused, done, failed or cancelled");
    else
        exchange_reply_json(x, 200, json_pack("{s:o}", "jobs", jobs_list(s->jobs, state)));
}

static void file_reply(struct server *s, struct exchange *x, const char *id, const char *name,
                       const char *type) {
    struct error err;
    struct buf text = {0};
    char *path = jobs_file(s->jobs, id, name, &err);
    if (path && file_read(path, 256 << 20, &text, &err) == OK)
        exchange_reply(x, 200, type, text.data ? text.data : "", text.len);
    else
        fail(x, &err, NULL);
    buf_release(&text);
    free(path);
}

static void series_reply(struct server *s, struct exchange *x, const char *id) {
    struct error err;
    json_t *v = jobs_metrics(s->jobs, id, &err);
    if (v)
        exchange_reply_json(x, 200, v);
    else
        fail(x, &err, NULL);
}

/* Splits the wildcard of the route, such as "job-1/events"; *operation is "" if the second part is
 * missing. Returns false if the first part is too long for an id. */
static bool wildcard_split(const struct exchange *x, char id[JOB_ID_LEN], const char **operation) {
    const char *rest = exchange_wildcard(x), *slash = strchrnul(rest, '/');
    snprintf(id, JOB_ID_LEN, "%.*s", (int)MIN(slash - rest, JOB_ID_LEN - 1), rest);
    *operation = *slash ? slash + 1 : "";
    return slash - rest < JOB_ID_LEN;
}

static void job_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    char id[JOB_ID_LEN];
    const char *operation;
    struct error err;
    json_t *job = wildcard_split(x, id, &operation) ? jobs_get(s->jobs, id, &err) : NULL;
    if (!job)
        api_fail(x, 404, NULL, NULL, "job_not_found", "there is no job '%.40s'",
                 exchange_wildcard(x));
    else if (!*operation)
        exchange_reply_json(x, 200, json_incref(job));
    else if (strcmp(operation, "events") == 0)
        event_stream_start(s, x, id);
    else if (strcmp(operation, "results") == 0)
        file_reply(s, x, id, "stdout.jsonl", "application/x-ndjson");
    else if (strcmp(operation, "log") == 0)
        file_reply(s, x, id, "stderr.txt", "text/plain; charset=utf-8");
    else if (strcmp(operation, "series") == 0)
        series_reply(s, x, id);
    else
        api_fail(x, 404, NULL, NULL, "not_found", "a job has events, results, series and log");
    json_decref(job);
}

static void operation_handle(void *ctx, struct exchange *x) {
    static const struct {
        const char *name;
        int (*run)(struct jobs *j, const char *id, struct error *err);
    } operations[] = {{"pause", jobs_pause}, {"resume", jobs_resume}, {"cancel", jobs_cancel}};
    struct server *s = ctx;
    char id[JOB_ID_LEN];
    const char *operation;
    struct error err;
    wildcard_split(x, id, &operation);
    for (size_t i = 0; i < ARRAY_LEN(operations); i++) {
        if (strcmp(operation, operations[i].name) != 0) continue;
        if (operations[i].run(s->jobs, id, &err) == OK)
            job_reply(s, x, 200, id);
        else
            fail(x, &err, NULL);
        return;
    }
    api_fail(x, 404, NULL, NULL, "not_found", "a job has the operations pause, resume and cancel");
}

static void delete_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct error err;
    if (jobs_delete(s->jobs, exchange_wildcard(x), &err) == OK)
        exchange_reply_json(x, 200,
                            json_pack("{s:s,s:b}", "id", exchange_wildcard(x), "deleted", 1));
    else
        fail(x, &err, NULL);
}

static const struct http_route routes[] = {
    {"POST", "/v1/jobs", SCOPE_JOBS, start_handle},
    {"GET", "/v1/jobs", SCOPE_JOBS, list_handle},
    {"GET", "/v1/jobs/*", SCOPE_JOBS, job_handle},
    {"POST", "/v1/jobs/*", SCOPE_JOBS, operation_handle},
    {"DELETE", "/v1/jobs/*", SCOPE_JOBS, delete_handle},
    {0},
};

/* hooks of the server */

static void job_ended(void *ctx, const char *kind, const char *state) {
    struct server *s = ctx;
    metric_add(metric_get(s->metrics, METRIC_JOBS_ENDED, kind, state), 1);
}

/* paths of jobs */

static char *input_resolve(void *ctx, const char *path, bool database, struct error *err) {
    const struct server *s = ctx;
    if (!*path) {
        error_set(err, ERR_USAGE, "a path is empty");
        return NULL;
    }
    char *found = s->options->find && *path != '/' ? s->options->find(path) : xstrdup(path);
    char *real = job_paths_resolve(s->job_paths, found, database, err);
    free(found);
    return real;
}

/* Whether a folder is a working folder, and not the user's home folder or a parent of it. */
static bool is_working_folder(const char *dir) {
    char *home = getenv("HOME") ? realpath(getenv("HOME"), NULL) : NULL;
    size_t n = strlen(dir);
    bool contains_home =
        n == 1 || (home && strncmp(home, dir, n) == 0 && (!home[n] || home[n] == '/'));
    free(home);
    return !contains_home;
}

/* Allows reading the adapters that are served, except those in the server's state, which has
 * separate rules. */
static void adapters_allow(struct server *s) {
    int n;
    struct adapter_entry *v = server_adapters(s, &n);
    char *state = realpath(s->options->state_dir, NULL);
    size_t len = state ? strlen(state) : 0;
    for (int i = 0; i < n; i++) {
        char *real = v[i].path && !hub_is_name(v[i].path) ? realpath(v[i].path, NULL) : NULL;
        if (real && !(len && strncmp(real, state, len) == 0))
            job_paths_add(s->job_paths, real, PATH_READ);
        free(real);
    }
    free(state);
    server_adapters_free(v, n);
}

/* The program's checkout with models, recipes and teams, malloc'ed; NULL: the program does not run
 * from a checkout. */
static char *checkout_find(const struct server *s) {
    static const char known[] = "examples/demo.yaml";
    char *path = s->options->find ? s->options->find(known) : NULL;
    size_t n = path ? strlen(path) : 0, m = strlen(known);
    bool found = n > m && path_exists(path);
    if (found) path[n - m - 1] = 0;
    if (found && *path) return path;
    free(path);
    return NULL;
}

/* Jobs may read the folder of a GGUF file. */
static void model_allow(struct job_paths *p, const char *path) {
    char *folder = path_is_dir(path) ? NULL : path_relative_to(path, ".");
    if (!hub_is_name(path)) job_paths_add(p, folder ? folder : path, PATH_READ);
    free(folder);
}

static void inputs_allow(struct server *s) {
    const struct server *base;
    struct job_paths *p = s->job_paths;
    char *working_dir = realpath(".", NULL), *checkout = checkout_find(s), *cache = hub_cache_dir();
    if (working_dir && is_working_folder(working_dir)) job_paths_add(p, working_dir, PATH_READ);
    job_paths_add(p, checkout, PATH_READ);
    for (int i = 0; (base = base_at(s, i)); i++) model_allow(p, base->path);
    job_paths_add(p, s->options->adapter_dir, PATH_READ);
    job_paths_add(p, cache, PATH_READ);
    adapters_allow(s);
    for (int i = 0; i < s->options->jobs_read.n; i++)
        job_paths_add(p, s->options->jobs_read.v[i], PATH_READ);
    free(cache);
    free(checkout);
    free(working_dir);
}

/* Denies the server's state, its backups and its TLS key, wherever they are, and allows the folder
 * of runs and, inside the state, the output folder of jobs. */
static void state_deny(struct server *s) {
    struct job_paths *p = s->job_paths;
    char *out = results_folder(s);
    job_paths_add(p, s->options->runs, PATH_WRITE);
    job_paths_add(p, s->options->state_dir, PATH_DENIED);
    job_paths_add(p, s->backups, PATH_DENIED);
    job_paths_add(p, s->options->http.tls_key, PATH_DENIED);
    for (int i = 0; i < s->options->jobs_closed.n; i++)
        job_paths_add(p, s->options->jobs_closed.v[i], PATH_DENIED);
    job_paths_add(p, out, PATH_WRITE);
    free(out);
}

/* Sets the value of SHOAL_JOB, the permissions of jobs, which cli/job_confine.c reads. */
static void permissions_set(struct server *s) {
    json_t *v = json_pack("{s:o,s:b}", "paths", job_paths_json(s->job_paths), "commands",
                          (int)s->options->jobs_run_commands);
    s->job_env = json_dumps(v, JSON_COMPACT);
    CHECK(s->job_env != NULL);
    json_decref(v);
}

static void confinement_log(const struct server *s) {
    if (s->options->jobs_run_commands)
        log_info("jobs may run commands (--jobs-run-commands): the kernel does not confine jobs "
                 "themselves");
    else if (!sandbox_landlock_abi())
        log_info(
            "this kernel has no landlock: only the program checks which files jobs read and write");
}

static int paths_open(struct server *s, struct error *err) {
    s->job_paths = xcalloc(1, sizeof *s->job_paths);
    s->jobs_folder = path_join(s->options->state_dir, "jobs");
    s->jobs_out = results_folder(s);
    int rc = dir_make(s->jobs_folder, err);
    if (rc == OK) rc = dir_make(s->jobs_out, err);
    if (rc == OK) rc = dir_make(s->options->runs, err);
    if (rc != OK) return rc;
    for (int i = 0; i < s->options->jobs_read.n; i++)
        if (!path_exists(s->options->jobs_read.v[i]))
            return error_set(err, ERR_MISSING, "--jobs-read: there is no '%s'",
                             s->options->jobs_read.v[i]);
    inputs_allow(s);
    state_deny(s);
    permissions_set(s);
    confinement_log(s);
    return OK;
}

/* The maximal bytes of memory of a job: the machine's memory without the server's share, but at
 * least a quarter of the machine's memory. 0: unlimited, because a sanitizer reserves more memory
 * than the machine has. */
static int64_t memory_for_jobs(const struct server *s) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)s;
    return 0;
#else
    int64_t machine = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE),
            server = (int64_t)(s->options->max_memory ? s->options->max_memory
                                                      : process_memory("VmRSS"));
    return MAX(machine - server, machine / 4);
#endif
}

static int module_open(struct server *s, struct error *err) {
    int rc = paths_open(s, err);
    struct jobs_options o = {.rules = {.kinds = s->options->job_kinds,
                                       .results_dir = s->jobs_out,
                                       .allow_commands = s->options->jobs_run_commands,
                                       .max_threads = (int)sysconf(_SC_NPROCESSORS_CONF),
                                       .in_process_kind = s->options->train ? "train" : NULL,
                                       .check_in_process = train_job_check,
                                       .ctx = s,
                                       .resolve_input = input_resolve},
                             .permissions = s->job_env,
                             .max_running = (int)s->options->max_jobs,
                             .runs = s->options->runs,
                             .max_kept = s->options->jobs_bytes,
                             .max_file = s->options->jobs_bytes,
                             .max_data = memory_for_jobs(s),
                             .max_seconds = s->options->job_seconds,
                             .same_priority = !s->options->jobs_idle,
                             .run = train_job_run,
                             .yield = s->yield,
                             .ctx = s,
                             .ended = job_ended,
                             .prepare = sleep_job_prepare,
                             .changed = jobs_changed};
    s->jobs_store = path_join(s->options->state_dir, "jobs.db");
    s->published = json_object();
    if (rc == OK) s->jobs = jobs_open(s->jobs_store, s->jobs_folder, &o, err);
    if (s->jobs || rc != OK) return rc;
    return err->code == ERR_STATE
               ? error_set(
                     err, ERR_STATE,
                     "another server uses the state folder '%s'; start this one with --state DIR",
                     s->options->state_dir)
               : err->code;
}

static void module_close(struct server *s) {
    if (s->jobs) jobs_close(s->jobs);
    if (s->job_paths) job_paths_release(s->job_paths);
    json_decref(s->published);
    free(s->job_paths);
    free(s->job_env);
    free(s->jobs_out);
    free(s->jobs_store);
    free(s->jobs_folder);
}

/* Sets the numbers of jobs by kind and state, including zeros, so that alert rules need not handle
 * missing series. */
static void state_metrics_set(struct server *s, const json_t *list) {
    static const char *const states[] = {"queued", "running",   "paused",
                                         "done",   "cancelled", "failed"};
    for (const struct job_kind *k = s->options->job_kinds; k && k->name; k++) {
        int count[ARRAY_LEN(states)] = {0};
        const json_t *job;
        size_t i;
        json_array_foreach (list, i, job)
            for (size_t st = 0; st < ARRAY_LEN(states); st++)
                count[st] += strcmp(json_get_string(job, "kind"), k->name) == 0 &&
                             strcmp(json_get_string(job, "state"), states[st]) == 0;
        for (size_t st = 0; st < ARRAY_LEN(states); st++)
            metric_set(metric_get(s->metrics, METRIC_JOBS, k->name, states[st]), count[st]);
    }
}

/* Sets the metrics that a job reports. For a job that is not running, the last values are kept,
 * except speeds. */
static void job_metrics_set(struct server *s, const json_t *job, bool running) {
    static const char speed[] = "_per_second";
    const char *name;
    json_t *v;
    json_object_foreach (json_object_get(job, "figures"), name, v) {
        enum metric_id id = job_metric_find(name);
        size_t n = strlen(name), m = strlen(speed);
        if (id == N_METRICS || (!running && n > m && strcmp(name + n - m, speed) == 0)) continue;
        metric_set(metric_get(s->metrics, id, json_get_string(job, "id")),
                   json_is_number(v) ? json_number_value(v) : NAN);
    }
}

/* Sets the metrics of all running jobs, and of the newest other jobs that have metrics, up to
 * MAX_JOBS_IN_METRICS jobs. The list begins with the newest job. */
static void all_job_metrics_set(struct server *s, const json_t *list) {
    json_t *job;
    size_t i;
    int n = 0;
    for (enum metric_id id = 0; id < N_METRICS; id++)
        if (id == METRIC_JOB_PROGRESS || is_job_metric(id)) metrics_clear(s->metrics, id);
    json_array_foreach (list, i, job) {
        bool running = strcmp(json_get_string(job, "state"), "running") == 0;
        const json_t *progress = json_object_get(job, "progress");
        double total = json_get_number(progress, "total");
        if (!running && (n >= MAX_JOBS_IN_METRICS || !json_object_get(job, "figures"))) continue;
        n++;
        job_metrics_set(s, job, running);
        if (running && total > 0)
            metric_set(metric_get(s->metrics, METRIC_JOB_PROGRESS, json_get_string(job, "kind"),
                                  json_get_string(job, "id")),
                       fmin(json_get_number(progress, "done") / total, 1));
    }
}

static void module_metrics_set(struct server *s) {
    json_t *list = jobs_list(s->jobs, NULL);
    state_metrics_set(s, list);
    all_job_metrics_set(s, list);
    json_decref(list);
}

const struct server_module jobs_module = {.routes = routes,
                                          .open = module_open,
                                          .close = module_close,
                                          .update_metrics = module_metrics_set};
