/*
 * jobs: the queue, the state of each job, and the jobs' one thread. child.c handles processes,
 * request.c command lines.
 *
 * Invariants. 1. A state is stored before it appears in an event or a reply; if the store fails,
 * the thread tries again and the job keeps its state. 2. Only the thread starts and reaps
 * processes, both under the lock, so a thread that holds the lock may signal a job's child. 3. An
 * event number is never used twice: numbers are reserved in the store in blocks, and the reserved
 * numbers of a killed process are skipped.
 *
 * Memory is bounded: jobs by max_jobs, requests and lines by their limits, events by a limit for
 * all jobs; progress and the last state are not kept as events but generated from the job on
 * request.
 */
#define _GNU_SOURCE
#include "jobs/jobs.h"

#include "jobs/child.h"
#include "store/store.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    KEY_BYTES = 255,
    TITLE_BYTES = 200,
    NUMBER_BLOCK = 1024,
    EVENTS_MAX = 4096,
    EVENTS_BYTES = 2 << 20, /* bytes as text */
    SERIES_BYTES = 4 << 20, /* maximum bytes of figures.json */
};

/* READ_SECONDS: the shortest interval at which the thread reads the output of children. */
static const double READ_SECONDS = 0.05, RETRY_SECONDS = 1;

enum job_state { QUEUED, RUNNING, PAUSED, DONE, FAILED, CANCELLED, N_STATES };
static const char *const state_names[N_STATES] = {"queued", "running", "paused",
                                                  "done",   "failed",  "cancelled"};

struct job {
    char id[JOB_ID_LEN];
    json_t *request;       /* {kind, args, options}, as requested */
    char *idempotency_key; /* the request's idempotency key; may be NULL */
    char *owner;           /* the id of the API key of the request; may be NULL */
    bool may_replace_any;  /* may replace adapters and outputs of other owners */
    int64_t bytes;         /* bytes of the job's folder when its process ended */
    enum job_state state;
    bool cancel;         /* cancellation was requested */
    int64_t created_seq; /* creation order */
    int64_t queue_seq;   /* queue order */
    int64_t attempts;
    char *run; /* the id of its run, if its kind has runs */
    char created[32], started[32], ended[32];
    int exit, signal; /* -1: unknown, or ended in the other way */
    char *note;
    json_t *progress; /* may be NULL */
    json_t *metrics;  /* the last value of each; may be NULL */

    int64_t seq, reserved; /* the last event number used, and the last one reserved */
    int64_t state_seq, progress_seq;

    struct job_child *child;    /* also set while paused */
    double kill_at;             /* kill deadline after SIGTERM; INFINITY: none, or killed */
    double stop_at;             /* while running: the end of its time limit */
    double seconds;             /* while paused: the rest of its time limit */
    bool timed_out;             /* the time limit was exceeded */
    char *last_stderr_line;     /* the last line of stderr */
    struct job_metrics *series; /* set while a child runs that reported figures */
    bool metrics_stale;         /* `figures` are older than `series` */
    bool progressed;            /* `progress` has no event number yet */
    bool outcome_pending;       /* ended with `outcome`, which is not stored yet */
    enum job_state outcome;
};

struct event {
    int64_t seq;
    const struct job *job;
    size_t bytes;
    json_t *v;
};

struct jobs {
    struct jobs_options o;
    char *folder;
    int lock_fd, wake_fd;
    pthread_t thread;

    pthread_mutex_t lock; /* guards the fields below */
    struct store *store;
    json_t *claims; /* {output: {owner, job, bytes}}, see claim_path */
    struct job **v; /* [n] in creation order */
    int n;
    int64_t count; /* the last `made` or `turn` */
    struct event *events;
    int n_events;
    size_t events_bytes;
    bool events_pending, stop;
    double read_at, retry_at; /* 0: no retry is pending */
};

static void jobs_wake(struct jobs *j) {
    const uint64_t one = 1;
    if (write(j->wake_fd, &one, sizeof one) < 0) return; /* full: the thread will wake anyway */
}

/* jobs as JSON */

static void add_text(json_t *v, const char *key, const char *text) {
    if (text && *text) json_object_set_new(v, key, json_string(text));
}

static bool state_is_last(enum job_state s) {
    return s == DONE || s == FAILED || s == CANCELLED;
}

static void add_end(json_t *v, const struct job *job) {
    if (!state_is_last(job->state)) return;
    add_text(v, "ended", job->ended);
    add_text(v, "note", job->note);
    if (job->exit >= 0) json_object_set_new(v, "exit", json_integer(job->exit));
    if (job->signal >= 0) json_object_set_new(v, "signal", json_integer(job->signal));
}

/* The public fields of a job. */
static json_t *job_json(const struct job *job) {
    json_t *v = json_pack("{s:s,s:s,s:s,s:I}", "id", job->id, "state", state_names[job->state],
                          "created", job->created, "attempts", (json_int_t)job->attempts);
    json_object_update(v, job->request);
    add_text(v, "started", job->started);
    add_end(v, job);
    if (job->cancel) json_object_set_new(v, "cancel", json_true());
    if (job->child) json_object_set_new(v, "pid", json_integer(job->child->pid));
    if (job->progress) json_object_set(v, "progress", job->progress);
    if (job->metrics) json_object_set(v, "figures", job->metrics);
    return v;
}

static int job_save(struct jobs *j, const struct job *job, struct error *err) {
    json_t *v =
        json_pack("{s:o,s:O,s:I,s:I,s:I}", "job", job_json(job), "request", job->request, "made",
                  (json_int_t)job->created_seq, "turn", (json_int_t)job->queue_seq, "numbers",
                  (json_int_t)(state_is_last(job->state) ? job->seq : job->reserved));
    add_text(v, "key", job->idempotency_key);
    add_text(v, "owner", job->owner);
    add_text(v, "run", job->run);
    json_object_set_new(v, "any", json_boolean(job->may_replace_any));
    json_object_set_new(v, "bytes", json_integer(job->bytes));
    int rc = store_document_put(j->store, "job", job->id, v, err);
    json_decref(v);
    return rc;
}

static void text_copy(char out[32], const json_t *v, const char *key) {
    snprintf(out, 32, "%s", json_get_string(v, key));
}

static int64_t integer_at(const json_t *v, const char *key, int64_t missing) {
    const json_t *i = json_object_get(v, key);
    return json_is_integer(i) ? json_integer_value(i) : missing;
}

static char *text_at(const json_t *v, const char *key) {
    const char *text = json_get_string(v, key);
    return *text ? xstrdup(text) : NULL;
}

static bool id_is_valid(const char *id) {
    return strlen(id) == JOB_ID_LEN - 1 && strncmp(id, "job-", 4) == 0 &&
           strspn(id + 4, "0123456789abcdef") == JOB_ID_LEN - 5;
}

static void job_free(struct job *job) {
    json_decref(job->request);
    json_decref(job->progress);
    json_decref(job->metrics);
    job_metrics_free(job->series);
    free(job->idempotency_key);
    free(job->owner);
    free(job->run);
    free(job->note);
    free(job->last_stderr_line);
    free(job);
}

static struct job *job_new(void) {
    struct job *job = xcalloc(1, sizeof *job);
    job->exit = job->signal = -1;
    job->kill_at = job->stop_at = INFINITY;
    return job;
}

/* NULL: the document is not a valid job. */
static struct job *job_from_json(const struct jobs *j, const char *id, const json_t *v) {
    const json_t *known = json_object_get(v, "job"), *request = json_object_get(v, "request");
    int state = 0;
    while (state < N_STATES && strcmp(state_names[state], json_get_string(known, "state")) != 0)
        state++;
    if (state == N_STATES || !id_is_valid(id) ||
        !job_kind_find(j->o.rules.kinds, json_get_string(request, "kind")))
        return NULL;
    struct job *job = job_new();
    memcpy(job->id, id, JOB_ID_LEN);
    job->request = json_deep_copy(request);
    job->state = (enum job_state)state;
    job->idempotency_key = text_at(v, "key");
    job->owner = text_at(v, "owner");
    job->may_replace_any = json_is_true(json_object_get(v, "any"));
    job->bytes = integer_at(v, "bytes", 0);
    job->run = text_at(v, "run");
    job->note = text_at(known, "note");
    job->cancel = json_is_true(json_object_get(known, "cancel"));
    job->created_seq = integer_at(v, "made", 0);
    job->queue_seq = integer_at(v, "turn", 0);
    job->attempts = integer_at(known, "attempts", 0);
    job->exit = (int)integer_at(known, "exit", -1);
    job->signal = (int)integer_at(known, "signal", -1);
    job->seq = job->reserved = job->state_seq = integer_at(v, "numbers", 0);
    job->progress = json_deep_copy(json_object_get(known, "progress"));
    job->metrics = json_deep_copy(json_object_get(known, "figures"));
    text_copy(job->created, known, "created");
    text_copy(job->started, known, "started");
    text_copy(job->ended, known, "ended");
    return job;
}

/* events */

/* The next event number. If it cannot be reserved it may be used again after a kill; the next
 * number tries again. */
static int64_t job_number(struct jobs *j, struct job *job) {
    struct error err;
    if (++job->seq > job->reserved) {
        int64_t before = job->reserved;
        job->reserved = job->seq + NUMBER_BLOCK - 1;
        if (job_save(j, job, &err) != OK) job->reserved = before;
    }
    return job->seq;
}

static void events_drop(struct jobs *j, int at) {
    j->events_bytes -= j->events[at].bytes;
    json_decref(j->events[at].v);
    memmove(&j->events[at], &j->events[at + 1], sizeof *j->events * (size_t)(--j->n_events - at));
}

static void event_add(struct jobs *j, const struct job *job, int64_t seq, json_t *v, size_t bytes) {
    json_object_set_new(v, "seq", json_integer(seq));
    while (j->n_events == EVENTS_MAX || (j->n_events && j->events_bytes + bytes > EVENTS_BYTES))
        events_drop(j, 0);
    j->events[j->n_events++] = (struct event){seq, job, bytes, v};
    j->events_bytes += bytes;
    j->events_pending = true;
}

static json_t *state_event(const struct job *job) {
    char now[32];
    json_t *v = json_pack("{s:s,s:s,s:s}", "type", "state", "state", state_names[job->state], "at",
                          clock_utc(now));
    add_end(v, job);
    return v;
}

/* Stores the state and adds its event; on an error the job is unchanged. */
static int job_set(struct jobs *j, struct job *job, enum job_state state, struct error *err) {
    const struct job before = *job;
    job->state = state;
    job->seq++;
    job->reserved = MAX(job->reserved, job->seq + NUMBER_BLOCK);
    if (state_is_last(state)) clock_utc(job->ended);
    int rc = job_save(j, job, err);
    if (rc != OK) {
        *job = before;
        return rc;
    }
    job->state_seq = job->seq;
    if (state_is_last(state) && j->o.ended)
        j->o.ended(j->o.ctx, json_get_string(job->request, "kind"), state_names[state]);
    event_add(j, job, job->seq, state_event(job), 100);
    jobs_wake(j);
    return OK;
}

/* output of children */

struct listener {
    struct jobs *j;
    struct job *job;
};

static void text_set(char **field, const char *text, size_t n) {
    struct buf b = {0};
    buf_add_sanitized(&b, text, n);
    free(*field);
    *field = b.data;
}

static void result_take(struct jobs *j, struct job *job, const char *line, size_t n, size_t len) {
    struct error err;
    json_t *v = json_pack("{s:s}", "type", "result"), *result;
    if (len > n) {
        json_object_set_new(v, "bytes", json_integer((json_int_t)len));
    } else if ((result = json_parse(line, n, "a result", &err))) {
        json_object_set_new(v, "result", result);
    } else {
        char *text = NULL;
        text_set(&text, line, n);
        add_text(v, "text", text);
        free(text);
    }
    event_add(j, job, job_number(j, job), v, 100 + n);
}

static char *series_path(const struct jobs *j, const struct job *job) {
    char *dir = path_join(j->folder, job->id), *path = path_join(dir, "figures.json");
    free(dir);
    return path;
}

/* The stored series of the job; empty if there is no file. */
static struct job_metrics *series_read(const struct jobs *j, const struct job *job) {
    struct error none;
    struct buf text = {0};
    char *path = series_path(j, job);
    json_t *v = file_read(path, SERIES_BYTES, &text, &none) == OK
                    ? json_parse(text.data ? text.data : "", text.len, path, &none)
                    : NULL;
    struct job_metrics *f = job_metrics_from_json(v);
    json_decref(v);
    buf_release(&text);
    free(path);
    return f;
}

/* Stores the series after the process has ended. An error does not make the job fail. */
static void series_keep(const struct jobs *j, struct job *job) {
    struct error err;
    if (!job->series) return;
    json_t *v = job_metrics_json(job->series);
    char *path = series_path(j, job), *text = json_dumps(v, JSON_COMPACT | JSON_REAL_PRECISION(9));
    CHECK(text != NULL);
    if (file_write(path, text, strlen(text), &err) != OK) log_warn("jobs: %s", err.text);
    job_metrics_free(job->series);
    job->series = NULL;
    json_decref(v);
    free(text);
    free(path);
}

/* The last line of stderr is the reason for a failure, except usage lines. */
static void words_take(struct job *job, const char *line, size_t n) {
    static const char usage[] = "usage: ";
    if (n && (n < strlen(usage) || memcmp(line, usage, strlen(usage)) != 0))
        text_set(&job->last_stderr_line, line, n);
}

static json_t *title_json(const char *text) {
    size_t n = strlen(text);
    if (n > TITLE_BYTES)
        for (n = TITLE_BYTES; ((unsigned char)text[n] & 0xC0) == 0x80;) n--;
    return json_stringn(text, n);
}

static void figures_take(struct jobs *j, struct job *job, const json_t *figures) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (!job->series) job->series = series_read(j, job);
    job_metrics_record(job->series, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec, figures);
    job->metrics_stale = true;
}

/* Lines that base.h does not define are ignored: any code may write to the pipe. */
static void progress_take(struct jobs *j, struct job *job, const char *line, size_t n) {
    json_t *v = json_loadb(line, n, JSON_REJECT_DUPLICATES, NULL);
    if (json_is_object(json_object_get(v, "figures")))
        figures_take(j, job, json_object_get(v, "figures"));
    const json_t *left = json_object_get(v, "left");
    int64_t done = integer_at(v, "done", -1), total = integer_at(v, "total", -1);
    if (json_is_string(json_object_get(v, "title")) && done >= 0 && total >= 0) {
        json_decref(job->progress);
        job->progress = json_pack("{s:o,s:I,s:I}", "title", title_json(json_get_string(v, "title")),
                                  "done", (json_int_t)done, "total", (json_int_t)total);
        if (json_is_number(left) && json_number_value(left) >= 0)
            json_object_set_new(job->progress, "seconds_left", json_real(json_number_value(left)));
        job->progressed = true;
    }
    json_decref(v);
}

static void line_take(void *ctx, enum child_pipe_kind which, const char *line, size_t n,
                      size_t len) {
    const struct listener *l = ctx;
    if (which == CHILD_STDOUT)
        result_take(l->j, l->job, line, n, len);
    else if (which == CHILD_STDERR)
        words_take(l->job, line, n);
    else if (n == len)
        progress_take(l->j, l->job, line, n);
}

/* All lines that were read at once get one event number. */
static void progress_tell(struct jobs *j, struct job *job) {
    if (job->metrics_stale) {
        json_decref(job->metrics);
        job->metrics = job_metrics_latest(job->series);
        job->metrics_stale = false;
    }
    if (!job->progressed) return;
    job->progressed = false;
    job->progress_seq = job_number(j, job);
    j->events_pending = true;
}

/* outputs of jobs */

/* The path of a claim: "NAME" is in the folder of results, "run:NAME" in that of runs.
 * malloc'ed. */
static char *claim_path(const struct jobs *j, const char *name) {
    bool run = strncmp(name, "run:", 4) == 0;
    return run ? path_join(j->o.runs ? j->o.runs : "runs", name + 4)
               : path_join(j->o.rules.out ? j->o.rules.out : "", name);
}

static void claim_save(struct jobs *j, const char *name) {
    struct error err;
    if (store_document_put(j->store, "output", name, json_object_get(j->claims, name), &err) != OK)
        log_warn("jobs: %s", err.text);
}

static bool is_there(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0;
}

/* Whether the job of a claim may still write. */
static bool claim_lives(const struct jobs *j, const json_t *claim) {
    for (int i = 0; i < j->n; i++)
        if (strcmp(j->v[i]->id, json_get_string(claim, "job")) == 0)
            return !state_is_last(j->v[i]->state);
    return false;
}

static int claim_check(const struct jobs *j, const char *name, const struct job_caller *by,
                       struct error *err) {
    const json_t *claim = json_object_get(j->claims, name);
    char *path = claim_path(j, name);
    bool there = is_there(path),
         own = claim && strcmp(json_get_string(claim, "owner"), by->owner ? by->owner : "") == 0;
    free(path);
    if (by->may_replace_any || own || !(there || claim_lives(j, claim))) return OK;
    return error_set(err, ERR_STATE,
                     "'%s' exists, and no job of this key has made it: choose another name, or ask "
                     "with a key that has the scope admin",
                     name);
}

/* Calls `one` for each output of a request. */
static int claims_each(struct jobs *j, const struct job_request *r, const struct job_caller *by,
                       int (*one)(const struct jobs *, const char *, const struct job_caller *,
                                  struct error *),
                       struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < r->outputs.n; i++) rc = one(j, r->outputs.v[i], by, err);
    for (int i = 0; rc == OK && i < r->runs.n; i++) {
        char *name = xasprintf("run:%s", r->runs.v[i]);
        rc = one(j, name, by, err);
        free(name);
    }
    return rc;
}

static int64_t kept_bytes(const struct jobs *j, const char *owner) {
    const char *name;
    json_t *claim;
    int64_t bytes = 0;
    for (int i = 0; i < j->n; i++) {
        const char *of = j->v[i]->owner ? j->v[i]->owner : "";
        if (!owner || strcmp(of, owner) == 0) bytes += j->v[i]->bytes;
    }
    json_object_foreach (j->claims, name, claim)
        if (!owner || strcmp(json_get_string(claim, "owner"), owner) == 0)
            bytes += integer_at(claim, "bytes", 0);
    return bytes;
}

static int limits_check(const struct jobs *j, const char *owner, struct error *err) {
    int queued = 0;
    for (int i = 0; i < j->n; i++)
        queued +=
            j->v[i]->state == QUEUED && strcmp(j->v[i]->owner ? j->v[i]->owner : "", owner) == 0;
    if (j->n >= j->o.max_jobs)
        return error_set(err, ERR_STATE, "%d jobs are kept already; delete some", j->n);
    if (queued >= j->o.max_queued)
        return error_set(err, ERR_MEMORY, "%d jobs of this key wait for their turn already",
                         queued);
    if (!j->o.max_kept) return OK;
    if (kept_bytes(j, NULL) >= j->o.max_kept || kept_bytes(j, owner) >= j->o.max_kept / 2)
        return error_set(err, ERR_MEMORY,
                         "the files of jobs fill the room that is reserved for them (--jobs-bytes "
                         "%lld); delete jobs and results",
                         (long long)j->o.max_kept);
    return OK;
}

/* Removes the claims of outputs that do not exist, unless a job will write them. */
static void claims_prune(struct jobs *j) {
    struct error err;
    const char *name;
    json_t *claim;
    void *next;
    json_object_foreach_safe(j->claims, next, name, claim) {
        char *path = claim_path(j, name);
        if (!is_there(path) && !claim_lives(j, claim) &&
            store_document_delete(j->store, "output", name, &err) == OK)
            json_object_del(j->claims, name);
        free(path);
    }
}

/* running */

/* Whether the job's run has begun, so that its kind's `resume` finds it. */
static bool run_has_begun(const struct jobs *j, const struct job *job) {
    if (!job->run) return false;
    char *dir = path_join(j->o.runs ? j->o.runs : "runs", job->run),
         *manifest = path_join(dir, "manifest.json");
    bool begun = path_exists(manifest);
    free(dir);
    free(manifest);
    return begun;
}

/* Without an id from the client each attempt gets a new name: a run that was killed before it wrote
 * its manifest cannot be resumed. */
static void run_name(struct job *job) {
    const char *id = json_get_string(json_object_get(job->request, "options"), "id");
    free(job->run);
    job->run = *id ? xstrdup(id) : xasprintf("%s-%lld", job->id, (long long)job->attempts);
}

/* Makes the command keep its runs or calls where this process shows them. */
static void keep_place(const struct jobs *j, const struct job_kind *kind, json_t *options) {
    const char *keeps = kind->store_option;
    if (!keeps || !j->o.runs || json_object_get(options, keeps)) return;
    char *path =
        strcmp(keeps, "store") == 0 ? path_join(j->o.runs, "calls.db") : xstrdup(j->o.runs);
    json_object_set_new(options, keeps, json_from_path(path));
    free(path);
}

/* The request for this attempt, with resolved paths; takes v over. */
static json_t *attempt_request(const struct jobs *j, struct job *job, json_t *v) {
    const struct job_kind *kind = job_kind_find(j->o.rules.kinds, json_get_string(v, "kind"));
    json_t *options = json_object_get(v, "options"), *kept;
    keep_place(j, kind, options);
    if (!kind->resume) return v;
    if (!run_has_begun(j, job)) {
        run_name(job);
        json_object_set_new(options, "id", json_string(job->run));
        return v;
    }
    kept = json_object();
    static const char *const same[] = {"runs", "threads"};
    for (size_t i = 0; i < ARRAY_LEN(same); i++)
        if (json_object_get(options, same[i]))
            json_object_set(kept, same[i], json_object_get(options, same[i]));
    json_object_set_new(v, "kind", json_string(kind->resume));
    json_object_set_new(v, "args", json_pack("[s]", job->run));
    json_object_set_new(v, "options", kept);
    return v;
}

static int job_launch(struct jobs *j, struct job *job, struct error *err) {
    struct strings args = {0};
    struct job_request checked;
    /* Check again: the rules may have changed since the submission. */
    struct job_request_rules rules = j->o.rules;
    rules.owner = job->owner;
    int rc = job_request_check(&rules, job->request, &checked, NULL, err);
    if (rc != OK) return rc;
    job->attempts++;
    json_t *request = attempt_request(j, job, json_incref(checked.resolved));
    char *folder = path_join(j->folder, job->id);
    rc = job_request_argv(request, &args, err);
    const struct job_child_options s = {.program = j->o.program,
                                        .folder = folder,
                                        .args = &args,
                                        .job = j->o.child,
                                        .max_output = j->o.max_output,
                                        .max_file = j->o.max_file,
                                        .max_data = j->o.max_data,
                                        .same_priority = j->o.same_priority};
    if (rc == OK && !(job->child = job_child_start(&s, err))) rc = err->code;
    strings_release(&args);
    json_decref(request);
    job_request_release(&checked);
    free(folder);
    return rc;
}

static void job_forget_attempt(struct job *job) {
    free(job->note);
    free(job->last_stderr_line);
    json_decref(job->progress);
    job->note = job->last_stderr_line = NULL;
    job->progress = NULL;
    job->exit = job->signal = -1;
    *job->ended = 0;
    job->kill_at = job->stop_at = INFINITY;
    job->seconds = INFINITY;
    job->timed_out = false;
}

static void retry(struct jobs *j, const struct error *err) {
    if (j->retry_at == 0) log_warn("jobs: %s; trying again", err->text);
    j->retry_at = clock_now() + RETRY_SECONDS;
}

/* The job has ended; job_store_outcome stores this. */
static void job_set_outcome(struct job *job, enum job_state outcome, char *note) {
    job->outcome_pending = true;
    job->outcome = outcome;
    free(job->note);
    job->note = note;
}

static void job_store_outcome(struct jobs *j, struct job *job) {
    struct error err;
    if (!job->outcome_pending) return;
    if (job_set(j, job, job->outcome, &err) == OK)
        job->outcome_pending = false;
    else
        retry(j, &err);
}

/* Starts the job, or continues it after a pause. */
static void job_begin(struct jobs *j, struct job *job) {
    struct error err;
    bool fresh = !job->child;
    if (fresh) {
        job_forget_attempt(job);
        if (j->o.seconds > 0) job->seconds = j->o.seconds;
        clock_utc(job->started);
        if (job_launch(j, job, &err) != OK) {
            job_set_outcome(job, FAILED, xstrdup(err.text));
            job_store_outcome(j, job);
            return;
        }
    }
    if (job_set(j, job, RUNNING, &err) == OK) {
        job->stop_at = clock_now() + job->seconds;
        if (!fresh) job_child_signal(job->child, SIGCONT);
        return;
    }
    struct listener l = {j, job};
    if (fresh) {
        job_child_signal(job->child, SIGKILL);
        job_child_reap(job->child, line_take, &l);
        job->child = NULL;
    }
    retry(j, &err);
}

/* Starts jobs from the head of the queue while there are free places. */
static void jobs_dispatch(struct jobs *j) {
    while (j->retry_at == 0) {
        struct job *next = NULL;
        int running = 0;
        for (int i = 0; i < j->n; i++) {
            struct job *job = j->v[i];
            running += job->state == RUNNING;
            if (job->state == QUEUED && !job->cancel && !job->outcome_pending &&
                (!next || job->queue_seq < next->queue_seq))
                next = job;
        }
        if (!next || running >= j->o.max_running) return;
        job_begin(j, next);
    }
}

static char *end_note(const struct job *job, const struct error *fault) {
    if (fault->code) return xstrdup(fault->text);
    if (job->signal == SIGKILL)
        return xstrdup("killed (signal 9), as the system does when memory runs out");
    if (job->signal >= 0)
        return xasprintf("ended by signal %d (%s)%s%s", job->signal,
                         sigdescr_np(job->signal) ? sigdescr_np(job->signal) : "unknown",
                         job->last_stderr_line ? ": " : "",
                         job->last_stderr_line ? job->last_stderr_line : "");
    if (job->last_stderr_line) return xstrdup(job->last_stderr_line);
    if (job->exit < 0) return xstrdup("another process has taken its exit status");
    return xasprintf("ended with exit status %d and no word why; see stderr.txt", job->exit);
}

/* Measures the disk usage of a job whose process has ended. */
static void job_measure(struct jobs *j, struct job *job) {
    const char *name;
    json_t *claim;
    char *folder = path_join(j->folder, job->id), *tmp = path_join(folder, "tmp");
    tree_delete(tmp);
    job->bytes = tree_disk_usage(folder);
    json_object_foreach (j->claims, name, claim) {
        if (strcmp(json_get_string(claim, "job"), job->id) != 0) continue;
        char *path = claim_path(j, name);
        json_object_set_new(claim, "bytes", json_integer(tree_disk_usage(path)));
        claim_save(j, name);
        free(path);
    }
    free(tmp);
    free(folder);
}

static void job_reap(struct jobs *j, struct job *job) {
    struct listener l = {j, job};
    struct error fault = {0};
    /* The last output may contain an error that ends the job. */
    job_child_read(job->child, line_take, &l);
    fault = job->child->fault;
    int status = job_child_reap(job->child, line_take, &l);
    job->child = NULL;
    job->stop_at = INFINITY;
    progress_tell(j, job);
    series_keep(j, job);
    job_measure(j, job);
    job->exit = status != -1 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    job->signal = status != -1 && WIFSIGNALED(status) ? WTERMSIG(status) : -1;
    bool well = job->exit == 0 && !fault.code;
    if (job->timed_out && !well && !fault.code)
        error_set(&fault, ERR_STATE,
                  "stopped after %.0f seconds (the server's --job-seconds); resuming it continues "
                  "what it keeps",
                  j->o.seconds);
    if (well || job->cancel)
        job_set_outcome(job, well ? DONE : CANCELLED, NULL);
    else
        job_set_outcome(job, FAILED, end_note(job, &fault));
    job_store_outcome(j, job);
}

static void job_listen(struct jobs *j, struct job *job) {
    struct listener l = {j, job};
    job_child_read(job->child, line_take, &l);
    progress_tell(j, job);
}

/* the thread */

struct watched {
    struct pollfd *fds; /* wake_fd, then JOB_CHILD_FDS for each job with a child */
    struct job **jobs;
    int n;
};

static double jobs_watch(struct jobs *j, struct watched *w) {
    double now = clock_now(), until = j->retry_at ? j->retry_at : INFINITY;
    bool read = now >= j->read_at;
    w->n = 0;
    w->jobs = xrealloc(w->jobs, sizeof *w->jobs * (size_t)(j->n + 1));
    w->fds = xrealloc(w->fds, sizeof *w->fds * (size_t)(1 + JOB_CHILD_FDS * (j->n + 1)));
    w->fds[0] = (struct pollfd){.fd = j->wake_fd, .events = POLLIN};
    for (int i = 0; i < j->n; i++) {
        if (!j->v[i]->child) continue;
        until = MIN(until, MIN(j->v[i]->kill_at, j->v[i]->stop_at));
        job_child_pollfds(j->v[i]->child, &w->fds[1 + JOB_CHILD_FDS * w->n], read);
        w->jobs[w->n++] = j->v[i];
    }
    if (!read && w->n) until = MIN(until, j->read_at);
    return until - now;
}

/* Sends SIGTERM, and schedules SIGKILL. */
static void job_stop(const struct jobs *j, struct job *job) {
    job_child_signal(job->child, SIGTERM);
    job_child_signal(job->child, SIGCONT); /* a stopped process handles no signal */
    job->kill_at = clock_now() + j->o.cancel_seconds;
    job->stop_at = INFINITY;
}

static void job_serve(struct jobs *j, struct job *job, const struct pollfd fds[JOB_CHILD_FDS]) {
    bool said = false;
    for (int i = 1; i < JOB_CHILD_FDS; i++) said |= fds[i].revents != 0;
    if (said) {
        job_listen(j, job);
        j->read_at = clock_now() + READ_SECONDS;
    }
    if (fds[0].revents) {
        job_reap(j, job);
    } else if (clock_now() >= job->kill_at) {
        job_child_signal(job->child, SIGKILL);
        job->kill_at = INFINITY;
    } else if (clock_now() >= job->stop_at) {
        job->timed_out = true;
        job_stop(j, job);
    }
}

static void jobs_sleep(struct jobs *j, struct watched *w) {
    double wait = jobs_watch(j, w);
    int ms = wait > 3600 ? -1 : wait > 0 ? (int)(wait * 1000) + 1 : 0;
    uint64_t woken;
    pthread_mutex_unlock(&j->lock);
    if (poll(w->fds, (nfds_t)(1 + JOB_CHILD_FDS * w->n), ms) < 0 && errno != EINTR)
        log_warn("jobs: cannot wait for processes: %s", strerrordesc_np(errno));
    if (w->fds[0].revents && read(w->fds[0].fd, &woken, sizeof woken) < 0) woken = 0;
    pthread_mutex_lock(&j->lock);
}

static void listeners_notify(struct jobs *j) {
    if (!j->events_pending) return;
    j->events_pending = false;
    pthread_mutex_unlock(&j->lock);
    if (j->o.changed) j->o.changed(j->o.ctx);
    pthread_mutex_lock(&j->lock);
}

static void retries(struct jobs *j) {
    if (j->retry_at == 0 || clock_now() < j->retry_at) return;
    j->retry_at = 0;
    for (int i = 0; i < j->n; i++) job_store_outcome(j, j->v[i]);
}

/* The states in the store are unchanged: the next jobs_open continues from them. */
static void children_end(struct jobs *j) {
    for (int i = 0; i < j->n; i++) {
        struct listener l = {j, j->v[i]};
        if (!j->v[i]->child) continue;
        job_child_signal(j->v[i]->child, SIGKILL);
        job_child_reap(j->v[i]->child, line_take, &l);
        j->v[i]->child = NULL;
        series_keep(j, j->v[i]);
    }
}

static void *jobs_main(void *arg) {
    struct jobs *j = arg;
    struct watched w = {0};
    pthread_mutex_lock(&j->lock);
    while (!j->stop) {
        retries(j);
        jobs_dispatch(j);
        listeners_notify(j);
        if (j->stop) break;
        jobs_sleep(j, &w);
        for (int i = 0; i < w.n; i++) job_serve(j, w.jobs[i], &w.fds[1 + JOB_CHILD_FDS * i]);
    }
    children_end(j);
    pthread_mutex_unlock(&j->lock);
    free(w.fds);
    free(w.jobs);
    return NULL;
}

/* opening */

static int by_making(const void *a, const void *b) {
    const struct job *x = *(struct job *const *)a, *y = *(struct job *const *)b;
    return x->created_seq < y->created_seq ? -1 : x->created_seq > y->created_seq;
}

/* Interrupted jobs are queued again; jobs with a pending cancellation are cancelled. */
static int job_recover(struct jobs *j, struct job *job, struct error *err) {
    if (state_is_last(job->state)) return OK;
    if (job->cancel) return job_set(j, job, CANCELLED, err);
    return job->state == RUNNING ? job_set(j, job, QUEUED, err) : OK;
}

static int jobs_load(struct jobs *j, struct error *err) {
    json_t *all = store_document_list(j->store, "job", err), *v;
    const char *id;
    int rc = all ? OK : err->code;
    j->v = xcalloc(json_object_size(all) + 1, sizeof *j->v);
    json_object_foreach (all, id, v) {
        struct job *job = job_from_json(j, id, v);
        if (!job) {
            log_warn("job '%s' cannot be read from the store and is left out", id);
            continue;
        }
        j->count = MAX(j->count, MAX(job->created_seq, job->queue_seq));
        j->v[j->n++] = job;
    }
    qsort(j->v, (size_t)j->n, sizeof *j->v, by_making);
    if (rc == OK && !(j->claims = store_document_list(j->store, "output", err))) rc = err->code;
    if (rc == OK) claims_prune(j);
    for (int i = 0; rc == OK && i < j->n; i++) rc = job_recover(j, j->v[i], err);
    json_decref(all);
    return rc;
}

static int folder_lock(struct jobs *j, struct error *err) {
    char *path = path_join(j->folder, "lock");
    int rc = dir_make(j->folder, err);
    if (rc == OK && (j->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)) < 0)
        rc = error_errno(err, "cannot open '%s'", path);
    if (rc == OK && flock(j->lock_fd, LOCK_EX | LOCK_NB) != 0)
        rc = errno == EWOULDBLOCK
                 ? error_set(err, ERR_STATE, "another process runs the jobs of '%s'", j->folder)
                 : error_errno(err, "cannot lock '%s'", path);
    free(path);
    return rc;
}

static void jobs_free(struct jobs *j) {
    while (j->n_events) events_drop(j, j->n_events - 1);
    for (int i = 0; i < j->n; i++) job_free(j->v[i]);
    json_decref(j->claims);
    store_close(j->store);
    if (j->lock_fd >= 0) close(j->lock_fd);
    if (j->wake_fd >= 0) close(j->wake_fd);
    pthread_mutex_destroy(&j->lock);
    free(j->events);
    free(j->folder);
    free(j->v);
    free(j);
}

/* Signals are handled by other threads. */
static int thread_start(struct jobs *j, struct error *err) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    errno = pthread_create(&j->thread, NULL, jobs_main, j);
    int rc = errno ? error_errno(err, "cannot start the jobs' thread") : OK;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

struct jobs *jobs_open(const char *store, const char *folder, const struct jobs_options *o,
                       struct error *err) {
    struct jobs *j = xcalloc(1, sizeof *j);
    j->o = *o;
    if (!o->program) j->o.program = "/proc/self/exe";
    if (!o->max_running) j->o.max_running = 1;
    if (!o->max_jobs) j->o.max_jobs = 1000;
    if (!o->max_queued) j->o.max_queued = 100;
    if (!o->max_output) j->o.max_output = (int64_t)64 << 20;
    if (o->cancel_seconds == 0) j->o.cancel_seconds = 10;
    j->folder = xstrdup(folder);
    j->lock_fd = -1;
    j->events = xcalloc(EVENTS_MAX, sizeof *j->events);
    pthread_mutex_init(&j->lock, NULL);
    j->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = j->wake_fd < 0 ? error_errno(err, "cannot make an event") : folder_lock(j, err);
    if (rc == OK && o->rules.out) rc = dir_make(o->rules.out, err);
    if (rc == OK && !(j->store = store_open(store, err))) rc = err->code;
    if (rc == OK) rc = jobs_load(j, err);
    if (rc == OK) rc = thread_start(j, err);
    if (rc == OK) return j;
    jobs_free(j);
    return NULL;
}

void jobs_close(struct jobs *j) {
    if (!j) return;
    pthread_mutex_lock(&j->lock);
    j->stop = true;
    pthread_mutex_unlock(&j->lock);
    jobs_wake(j);
    pthread_join(j->thread, NULL);
    jobs_free(j);
}

void jobs_stop(struct jobs *j, double seconds) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)seconds + 1;
    if (pthread_mutex_timedlock(&j->lock, &until) != 0) return;
    j->stop = true;
    pthread_mutex_unlock(&j->lock);
    jobs_wake(j);
    pthread_timedjoin_np(j->thread, NULL, &until);
}

/* requests of callers */

static struct job *job_find(struct jobs *j, const char *id, struct error *err) {
    for (int i = 0; i < j->n; i++)
        if (strcmp(j->v[i]->id, id) == 0) return j->v[i];
    error_set(err, ERR_MISSING, "there is no job %s", id_is_valid(id) ? id : "of that name");
    return NULL;
}

static bool text_same(const char *a, const char *b) {
    return strcmp(a ? a : "", b ? b : "") == 0;
}

static struct job *job_repeated(struct jobs *j, const struct job_caller *by) {
    for (int i = 0; by->idempotency_key && i < j->n; i++)
        if (j->v[i]->idempotency_key &&
            strcmp(j->v[i]->idempotency_key, by->idempotency_key) == 0 &&
            text_same(j->v[i]->owner, by->owner))
            return j->v[i];
    return NULL;
}

static void id_make(struct jobs *j, char id[JOB_ID_LEN]) {
    struct error missing;
    do snprintf(id, JOB_ID_LEN, "job-%08x", randombytes_random());
    while (job_find(j, id, &missing));
}

static int claim_put(const struct jobs *j, const char *name, const struct job_caller *by,
                     struct error *err) {
    const json_t *old = json_object_get(j->claims, name);
    json_t *claim = json_pack("{s:s,s:s,s:I}", "owner", by->owner ? by->owner : "", "job",
                              j->v[j->n - 1]->id, "bytes", (json_int_t)integer_at(old, "bytes", 0));
    int rc = store_document_put(j->store, "output", name, claim, err);
    if (rc == OK) json_object_set(j->claims, name, claim);
    json_decref(claim);
    return rc;
}

static struct job *job_make(struct jobs *j, const struct job_request *r,
                            const struct job_caller *by) {
    struct job *job = job_new();
    id_make(j, job->id);
    job->request = json_incref(r->asked);
    job->idempotency_key = by->idempotency_key ? xstrdup(by->idempotency_key) : NULL;
    job->owner = by->owner ? xstrdup(by->owner) : NULL;
    job->may_replace_any = by->may_replace_any;
    job->created_seq = job->queue_seq = ++j->count;
    clock_utc(job->created);
    return job;
}

/* Adds the job to the list, then claims its outputs, then stores it. If it cannot be stored, its
 * claims refer to missing outputs, and claims_prune removes them. */
static int job_add(struct jobs *j, const struct job_request *r, const struct job_caller *by,
                   char id[JOB_ID_LEN], struct error *err) {
    int rc = claims_each(j, r, by, claim_check, err);
    if (rc == OK) rc = limits_check(j, by->owner ? by->owner : "", err);
    if (rc != OK) return rc;
    struct job *job = job_make(j, r, by);
    j->v = xrealloc(j->v, sizeof *j->v * (size_t)(j->n + 1));
    j->v[j->n++] = job;
    rc = claims_each(j, r, by, claim_put, err);
    if (rc == OK) rc = job_set(j, job, QUEUED, err);
    if (rc != OK) {
        j->n--;
        job_free(job);
        return rc;
    }
    memcpy(id, job->id, JOB_ID_LEN);
    return OK;
}

int jobs_submit(struct jobs *j, const json_t *request, struct job_caller *by, char id[JOB_ID_LEN],
                struct error *err) {
    struct job_request checked;
    *by->field = 0;
    if (by->idempotency_key && (!*by->idempotency_key || strlen(by->idempotency_key) > KEY_BYTES))
        return error_set(err, ERR_USAGE, "an idempotency key has 1 to %d bytes", KEY_BYTES);
    struct job_request_rules rules = j->o.rules;
    rules.owner = by->owner;
    int rc = job_request_check(&rules, request, &checked, by->field, err);
    if (rc != OK) return rc;
    pthread_mutex_lock(&j->lock);
    const struct job *same = job_repeated(j, by);
    if (!same)
        rc = job_add(j, &checked, by, id, err);
    else if (json_equal(same->request, checked.asked))
        memcpy(id, same->id, JOB_ID_LEN);
    else
        rc = error_set(err, ERR_MISMATCH, "this idempotency key is of job '%s', another request",
                       same->id);
    pthread_mutex_unlock(&j->lock);
    job_request_release(&checked);
    return rc;
}

bool jobs_may_replace(struct jobs *j, const char *id) {
    struct error missing;
    pthread_mutex_lock(&j->lock);
    const struct job *job = job_find(j, id, &missing);
    bool may = job && job->may_replace_any;
    pthread_mutex_unlock(&j->lock);
    return may;
}

json_t *jobs_get(struct jobs *j, const char *id, struct error *err) {
    pthread_mutex_lock(&j->lock);
    const struct job *job = job_find(j, id, err);
    json_t *v = job ? job_json(job) : NULL, *copy = json_deep_copy(v);
    json_decref(v);
    pthread_mutex_unlock(&j->lock);
    return copy;
}

json_t *jobs_list(struct jobs *j) {
    json_t *list = json_array(), *copy;
    pthread_mutex_lock(&j->lock);
    for (int i = j->n; i-- > 0;) json_array_append_new(list, job_json(j->v[i]));
    copy = json_deep_copy(list);
    json_decref(list);
    pthread_mutex_unlock(&j->lock);
    return copy;
}

static int wrong_state(const struct job *job, const char *verb, struct error *err) {
    return error_set(err, ERR_STATE, "job '%s' is %s and cannot be %s", job->id,
                     job->cancel && !state_is_last(job->state) ? "being cancelled"
                                                               : state_names[job->state],
                     verb);
}

static int job_pause(struct jobs *j, struct job *job, struct error *err) {
    if (job->state == PAUSED) return OK;
    if (state_is_last(job->state) || job->cancel || job->outcome_pending)
        return wrong_state(job, "paused", err);
    int rc = job_set(j, job, PAUSED, err);
    if (rc != OK || !job->child) return rc;
    job_child_signal(job->child, SIGSTOP);
    if (job->stop_at < INFINITY) job->seconds = fmax(job->stop_at - clock_now(), 0);
    job->stop_at = INFINITY;
    return OK;
}

static int job_resume(struct jobs *j, struct job *job, struct error *err) {
    if (job->state == DONE || (job->cancel && !state_is_last(job->state)))
        return wrong_state(job, "resumed", err);
    if (job->state == QUEUED || job->state == RUNNING) return OK;
    const struct job before = *job;
    job->cancel = false;
    if (job->state != PAUSED) job->queue_seq = ++j->count;
    int rc = job_set(j, job, QUEUED, err);
    if (rc != OK) *job = before;
    return rc;
}

static int job_cancel(struct jobs *j, struct job *job, struct error *err) {
    if (job->state == CANCELLED || job->cancel) return OK;
    if (state_is_last(job->state)) return wrong_state(job, "cancelled", err);
    if (!job->child) return job->outcome_pending ? OK : job_set(j, job, CANCELLED, err);
    job->cancel = true;
    int rc = job_save(j, job, err);
    if (rc != OK) {
        job->cancel = false;
        return rc;
    }
    job_stop(j, job);
    jobs_wake(j);
    return OK;
}

static int job_delete(struct jobs *j, struct job *job, struct error *err) {
    if (job->child || job->state == RUNNING)
        return error_set(err, ERR_STATE, "job '%s' has a process; cancel it first", job->id);
    int rc = store_document_delete(j->store, "job", job->id, err), at = 0;
    if (rc != OK) return rc;
    char *folder = path_join(j->folder, job->id);
    tree_delete(folder);
    free(folder);
    for (int i = j->n_events; i-- > 0;)
        if (j->events[i].job == job) events_drop(j, i);
    while (j->v[at] != job) at++;
    memmove(&j->v[at], &j->v[at + 1], sizeof *j->v * (size_t)(--j->n - at));
    job_free(job);
    claims_prune(j);
    return OK;
}

static int job_do(struct jobs *j, const char *id,
                  int (*what)(struct jobs *, struct job *, struct error *), struct error *err) {
    pthread_mutex_lock(&j->lock);
    struct job *job = job_find(j, id, err);
    int rc = job ? what(j, job, err) : err->code;
    pthread_mutex_unlock(&j->lock);
    return rc;
}

int jobs_pause(struct jobs *j, const char *id, struct error *err) {
    return job_do(j, id, job_pause, err);
}

int jobs_resume(struct jobs *j, const char *id, struct error *err) {
    return job_do(j, id, job_resume, err);
}

int jobs_cancel(struct jobs *j, const char *id, struct error *err) {
    return job_do(j, id, job_cancel, err);
}

int jobs_delete(struct jobs *j, const char *id, struct error *err) {
    return job_do(j, id, job_delete, err);
}

/* Inserts v into the list by its event number; takes v over. */
static void event_insert(json_t *list, json_t *v, int64_t seq) {
    size_t at = json_array_size(list);
    while (at > 0 && integer_at(json_array_get(list, at - 1), "seq", 0) > seq) at--;
    json_object_set_new(v, "seq", json_integer(seq));
    json_array_insert_new(list, at, v);
}

static json_t *job_events(const struct jobs *j, const struct job *job, int64_t after) {
    json_t *list = json_array();
    bool told = false; /* the list contains the last state */
    for (int i = 0; i < j->n_events; i++) {
        const struct event *e = &j->events[i];
        if (e->job != job || e->seq <= after) continue;
        json_array_append(list, e->v);
        told |= e->seq == job->state_seq;
    }
    if (!told && job->state_seq > after) event_insert(list, state_event(job), job->state_seq);
    if (job->progress && job->progress_seq > after)
        event_insert(list, json_pack("{s:s,s:O}", "type", "progress", "progress", job->progress),
                     job->progress_seq);
    return list;
}

/* Returns a deep copy: other calls share the events. */
json_t *jobs_events(struct jobs *j, const char *id, int64_t after, struct error *err) {
    pthread_mutex_lock(&j->lock);
    const struct job *job = job_find(j, id, err);
    json_t *list = job ? job_events(j, job, after) : NULL, *copy = json_deep_copy(list);
    json_decref(list);
    pthread_mutex_unlock(&j->lock);
    return copy;
}

json_t *jobs_metrics(struct jobs *j, const char *id, struct error *err) {
    pthread_mutex_lock(&j->lock);
    const struct job *job = job_find(j, id, err);
    struct job_metrics *kept = job && !job->series ? series_read(j, job) : NULL;
    json_t *v = job ? job_metrics_json(kept ? kept : job->series) : NULL;
    job_metrics_free(kept);
    pthread_mutex_unlock(&j->lock);
    return v;
}

char *jobs_file(struct jobs *j, const char *id, const char *name, struct error *err) {
    CHECK(strcmp(name, "stdout.jsonl") == 0 || strcmp(name, "stderr.txt") == 0);
    pthread_mutex_lock(&j->lock);
    const struct job *job = job_find(j, id, err);
    pthread_mutex_unlock(&j->lock);
    if (!job) return NULL;
    char *folder = path_join(j->folder, id), *path = path_join(folder, name);
    if (!path_exists(path)) {
        error_set(err, ERR_MISSING, "job '%s' has said nothing yet", id);
        free(path);
        path = NULL;
    }
    free(folder);
    return path;
}
