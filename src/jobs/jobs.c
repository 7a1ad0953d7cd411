/*
 * jobs: the queue, the state of each job, and the one thread of the jobs. child.c handles
 * processes, request.c command lines.
 *
 * Invariants. 1. A state is stored before it appears in an event or a reply; if the store fails,
 * the job keeps its state, and the caller gets the error or the thread tries again. 2. Only the
 * thread starts and reaps processes, both under the lock, so any thread that holds the lock may
 * signal a job's child. 3. An event number is not used twice unless the store fails: numbers are
 * reserved in the store in blocks, and after a kill of this process the rest of a block is skipped.
 *
 * Memory is bounded: jobs by max_jobs, requests and lines by their limits, events by a limit for
 * all jobs. When events are requested, the progress event is generated from the job, and so is the
 * event of the last state if that event was removed.
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
    IDEMPOTENCY_KEY_BYTES = 255,
    TITLE_BYTES = 200,
    EVENT_SEQ_BLOCK = 1024,
    MAX_EVENTS = 4096,
    MAX_EVENT_BYTES = 2 << 20,  /* bytes of the events as text */
    MAX_SERIES_BYTES = 4 << 20, /* maximum bytes of figures.json */
};

/* READ_SECONDS: the shortest interval between two reads of the output of children. */
static const double READ_SECONDS = 0.05, RETRY_SECONDS = 1;

enum job_state { QUEUED, RUNNING, PAUSED, DONE, FAILED, CANCELLED, N_STATES };
static const char *const state_names[N_STATES] = {"queued", "running", "paused",
                                                  "done",   "failed",  "cancelled"};

struct job {
    char id[JOB_ID_LEN];
    json_t *request;       /* {kind, args, options}, see job_request */
    char *idempotency_key; /* may be NULL */
    char *owner;           /* the id of the API key; may be NULL */
    bool may_replace_any;  /* may replace adapters and outputs of other owners */
    int64_t disk_bytes;    /* disk usage of the job's folder at the end of its last process */
    enum job_state state;
    bool cancel_requested; /* cancellation was requested */
    int64_t created_seq;   /* order of creation */
    int64_t queue_seq;     /* order in the queue */
    int64_t attempts;
    int64_t retried; /* automatic retries since the client started or resumed the job */
    char *run;       /* the id of its run, if its kind can resume runs; else NULL */
    char created[32], started[32], ended[32];
    int exit, signal; /* exit status, or -1; number of the signal that ended the process, or -1 */
    char *note;
    json_t *progress; /* may be NULL */
    json_t *metrics;  /* the last value of each metric; may be NULL */

    int64_t seq, reserved_seq;       /* the last used and the last reserved event number */
    int64_t state_seq, progress_seq; /* event numbers of the last state and the last progress */

    struct job_child *child; /* also set while the job is paused */
    double kill_at;          /* time of the SIGKILL after a SIGTERM; INFINITY: none is planned */
    double not_before;       /* while queued for a retry: the time of its start; else 0 */
    double deadline_at;      /* INFINITY: no deadline, or it has passed and the job is stopped */
    int64_t deadline_time;   /* the same as seconds since 1970; 0: none */
    bool deadline_missed;    /* it was stopped at its deadline */
    int64_t start_seq;       /* order of the last start in this process; 0: none */
    double time_limit_at;    /* while running: the time at which the time limit ends the attempt */
    double seconds_left;     /* while paused: the rest of the time limit */
    bool timed_out;          /* the time limit was exceeded */
    char *last_stderr_line;  /* the last line of stderr */
    struct job_metrics *series; /* set while a child runs that has reported metrics */
    bool metrics_stale;         /* `metrics` are older than `series` */
    bool progress_changed;      /* `progress` has no event number yet */
    bool outcome_pending;       /* the process ended with `outcome`, which is not stored yet */
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
    json_t *outputs; /* {output: {owner, job that wrote it last, bytes}}, see output_path */
    struct job **v;  /* [n] in creation order */
    int n;
    int64_t last_seq, last_start; /* the last created_seq or queue_seq; the last start_seq */
    struct event *events;
    int n_events;
    size_t events_bytes;
    bool events_pending, stop;
    double read_at, retry_at; /* retry_at: 0: no retry is planned */
};

static void jobs_wake(struct jobs *j) {
    const uint64_t one = 1;
    if (write(j->wake_fd, &one, sizeof one) < 0) return; /* full: the thread will wake anyway */
}

/* jobs as JSON */

static void add_text(json_t *v, const char *key, const char *text) {
    if (text && *text) json_object_set_new(v, key, json_string(text));
}

static bool state_is_final(enum job_state s) {
    return s == DONE || s == FAILED || s == CANCELLED;
}

static void add_outcome(json_t *v, const struct job *job) {
    add_text(v, "note", job->note);
    if (!state_is_final(job->state)) return;
    add_text(v, "ended", job->ended);
    if (job->exit >= 0) json_object_set_new(v, "exit", json_integer(job->exit));
    if (job->signal >= 0) json_object_set_new(v, "signal", json_integer(job->signal));
}

/* The public fields of a job. */
static json_t *job_json(const struct job *job) {
    json_t *v = json_pack("{s:s,s:s,s:s,s:I}", "id", job->id, "state", state_names[job->state],
                          "created", job->created, "attempts", (json_int_t)job->attempts);
    json_object_update(v, job->request);
    add_text(v, "started", job->started);
    add_outcome(v, job);
    if (job->retried) json_object_set_new(v, "retried", json_integer(job->retried));
    if (job->cancel_requested) json_object_set_new(v, "cancel", json_true());
    if (job->child && !job->child->thread)
        json_object_set_new(v, "pid", json_integer(job->child->pid));
    if (job->progress) json_object_set(v, "progress", job->progress);
    if (job->metrics) json_object_set(v, "figures", job->metrics);
    return v;
}

static int job_save(struct jobs *j, const struct job *job, struct error *err) {
    json_t *v =
        json_pack("{s:o,s:O,s:I,s:I,s:I}", "job", job_json(job), "request", job->request, "made",
                  (json_int_t)job->created_seq, "turn", (json_int_t)job->queue_seq, "numbers",
                  (json_int_t)(state_is_final(job->state) ? job->seq : job->reserved_seq));
    add_text(v, "key", job->idempotency_key);
    add_text(v, "owner", job->owner);
    add_text(v, "run", job->run);
    json_object_set_new(v, "any", json_boolean(job->may_replace_any));
    json_object_set_new(v, "bytes", json_integer(job->disk_bytes));
    if (job->deadline_time) json_object_set_new(v, "deadline", json_integer(job->deadline_time));
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
    job->kill_at = job->time_limit_at = job->deadline_at = INFINITY;
    return job;
}

/* `at`: seconds since 1970; 0: no deadline. */
static void job_deadline_set(struct job *job, int64_t at) {
    job->deadline_time = at;
    job->deadline_at = at ? clock_now() + (double)(at - time(NULL)) : INFINITY;
    job->deadline_missed = false;
}

/* The deadline of a job that is submitted or resumed now. */
static void job_deadline_begin(struct job *job) {
    int64_t seconds = integer_at(job->request, "deadline", 0);
    job_deadline_set(job, seconds ? time(NULL) + seconds : 0);
}

/* Creates a job from a stored document; NULL: the document is not a valid job. */
static struct job *job_from_json(const struct jobs *j, const char *id, const json_t *v) {
    const json_t *saved = json_object_get(v, "job"), *request = json_object_get(v, "request");
    int state = 0;
    while (state < N_STATES && strcmp(state_names[state], json_get_string(saved, "state")) != 0)
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
    job->disk_bytes = integer_at(v, "bytes", 0);
    job->run = text_at(v, "run");
    job->note = text_at(saved, "note");
    job->cancel_requested = json_is_true(json_object_get(saved, "cancel"));
    job->created_seq = integer_at(v, "made", 0);
    job->queue_seq = integer_at(v, "turn", 0);
    job->attempts = integer_at(saved, "attempts", 0);
    job->retried = integer_at(saved, "retried", 0);
    job_deadline_set(job, integer_at(v, "deadline", 0));
    job->exit = (int)integer_at(saved, "exit", -1);
    job->signal = (int)integer_at(saved, "signal", -1);
    job->seq = job->reserved_seq = job->state_seq = integer_at(v, "numbers", 0);
    job->progress = json_deep_copy(json_object_get(saved, "progress"));
    job->metrics = json_deep_copy(json_object_get(saved, "figures"));
    text_copy(job->created, saved, "created");
    text_copy(job->started, saved, "started");
    text_copy(job->ended, saved, "ended");
    return job;
}

/* events */

/* Returns the next event number, reserving a block in the store if necessary. If that fails, the
 * number may be used again after a kill, and the next call tries again. */
static int64_t job_next_seq(struct jobs *j, struct job *job) {
    struct error err;
    if (++job->seq > job->reserved_seq) {
        int64_t old_reserved = job->reserved_seq;
        job->reserved_seq = job->seq + EVENT_SEQ_BLOCK - 1;
        if (job_save(j, job, &err) != OK) job->reserved_seq = old_reserved;
    }
    return job->seq;
}

static void event_remove(struct jobs *j, int index) {
    j->events_bytes -= j->events[index].bytes;
    json_decref(j->events[index].v);
    memmove(&j->events[index], &j->events[index + 1],
            sizeof *j->events * (size_t)(--j->n_events - index));
}

static void event_add(struct jobs *j, const struct job *job, int64_t seq, json_t *v, size_t bytes) {
    json_object_set_new(v, "seq", json_integer(seq));
    while (j->n_events == MAX_EVENTS || (j->n_events && j->events_bytes + bytes > MAX_EVENT_BYTES))
        event_remove(j, 0);
    j->events[j->n_events++] = (struct event){seq, job, bytes, v};
    j->events_bytes += bytes;
    j->events_pending = true;
}

static json_t *state_event(const struct job *job) {
    char now[32];
    json_t *v = json_pack("{s:s,s:s,s:s}", "type", "state", "state", state_names[job->state], "at",
                          clock_utc(now));
    add_outcome(v, job);
    return v;
}

/* Sets and stores the state, and adds its event. On an error the job is unchanged. */
static int job_set_state(struct jobs *j, struct job *job, enum job_state state, struct error *err) {
    const struct job before = *job;
    job->state = state;
    job->seq++;
    job->reserved_seq = MAX(job->reserved_seq, job->seq + EVENT_SEQ_BLOCK);
    if (state_is_final(state)) clock_utc(job->ended);
    int rc = job_save(j, job, err);
    if (rc != OK) {
        *job = before;
        return rc;
    }
    job->state_seq = job->seq;
    if (state_is_final(state) && j->o.ended)
        j->o.ended(j->o.ctx, json_get_string(job->request, "kind"), state_names[state]);
    event_add(j, job, job->seq, state_event(job), 100);
    jobs_wake(j);
    return OK;
}

/* output of children */

struct output_reader {
    struct jobs *j;
    struct job *job;
};

static void text_set(char **field, const char *text, size_t n) {
    struct buf b = {0};
    buf_add_sanitized(&b, text, n);
    free(*field);
    *field = b.data;
}

/* Adds an event for a line of stdout: the parsed line, its text if it is not JSON, or only its
 * length if it was truncated. */
static void result_line_handle(struct jobs *j, struct job *job, const char *line, size_t n,
                               size_t len) {
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
    event_add(j, job, job_next_seq(j, job), v, 100 + n);
}

static char *series_path(const struct jobs *j, const struct job *job) {
    char *dir = path_join(j->folder, job->id), *path = path_join(dir, "figures.json");
    free(dir);
    return path;
}

/* The stored series of the job; empty if there is no file. */
static struct job_metrics *series_load(const struct jobs *j, const struct job *job) {
    struct error ignored;
    struct buf text = {0};
    char *path = series_path(j, job);
    json_t *v = file_read(path, MAX_SERIES_BYTES, &text, &ignored) == OK
                    ? json_parse(text.data ? text.data : "", text.len, path, &ignored)
                    : NULL;
    struct job_metrics *f = job_metrics_from_json(v);
    json_decref(v);
    buf_release(&text);
    free(path);
    return f;
}

/* Stores the series of a job whose process has ended. An error does not make the job fail. */
static void series_save(const struct jobs *j, struct job *job) {
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

/* Keeps the last line of stderr, which is the reason for a failure, except usage lines. */
static void stderr_line_handle(struct job *job, const char *line, size_t n) {
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

static void metrics_handle(struct jobs *j, struct job *job, const json_t *figures) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (!job->series) job->series = series_load(j, job);
    job_metrics_record(job->series, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec, figures);
    job->metrics_stale = true;
}

/* Handles a line of the progress pipe. Lines in a form that base.h does not define are ignored,
 * because any code of the child may write to the pipe. */
static void progress_line_handle(struct jobs *j, struct job *job, const char *line, size_t n) {
    json_t *v = json_loadb(line, n, JSON_REJECT_DUPLICATES, NULL);
    if (json_is_object(json_object_get(v, "figures")))
        metrics_handle(j, job, json_object_get(v, "figures"));
    const json_t *left = json_object_get(v, "left");
    int64_t done = integer_at(v, "done", -1), total = integer_at(v, "total", -1);
    if (json_is_string(json_object_get(v, "title")) && done >= 0 && total >= 0) {
        json_decref(job->progress);
        job->progress = json_pack("{s:o,s:I,s:I}", "title", title_json(json_get_string(v, "title")),
                                  "done", (json_int_t)done, "total", (json_int_t)total);
        if (json_is_number(left) && json_number_value(left) >= 0)
            json_object_set_new(job->progress, "seconds_left", json_real(json_number_value(left)));
        job->progress_changed = true;
    }
    json_decref(v);
}

static void output_line_handle(void *ctx, enum child_pipe_kind which, const char *line, size_t n,
                               size_t len) {
    const struct output_reader *l = ctx;
    if (which == CHILD_STDOUT)
        result_line_handle(l->j, l->job, line, n, len);
    else if (which == CHILD_STDERR)
        stderr_line_handle(l->job, line, n);
    else if (n == len)
        progress_line_handle(l->j, l->job, line, n);
}

/* Publishes the last progress and metrics. All lines that were read together get one event
 * number. */
static void progress_publish(struct jobs *j, struct job *job) {
    if (job->metrics_stale) {
        json_decref(job->metrics);
        job->metrics = job_metrics_latest(job->series);
        job->metrics_stale = false;
    }
    if (!job->progress_changed) return;
    job->progress_changed = false;
    job->progress_seq = job_next_seq(j, job);
    j->events_pending = true;
}

/* outputs of jobs */

/* The path of an output, malloc'ed: "NAME" is in the folder of results, "run:NAME" in that of
 * runs. */
static char *output_path(const struct jobs *j, const char *name) {
    bool run = strncmp(name, "run:", 4) == 0;
    return run ? path_join(j->o.runs ? j->o.runs : "runs", name + 4)
               : path_join(j->o.rules.results_dir ? j->o.rules.results_dir : "", name);
}

static void output_record_save(struct jobs *j, const char *name) {
    struct error err;
    if (store_document_put(j->store, "output", name, json_object_get(j->outputs, name), &err) != OK)
        log_warn("jobs: %s", err.text);
}

static bool path_or_link_exists(const char *path) {
    struct stat st;
    return lstat(path, &st) == 0;
}

/* Whether the job of an output's record may still write it. */
static bool output_is_in_use(const struct jobs *j, const json_t *record) {
    for (int i = 0; i < j->n; i++)
        if (strcmp(j->v[i]->id, json_get_string(record, "job")) == 0)
            return !state_is_final(j->v[i]->state);
    return false;
}

static int output_check_owner(const struct jobs *j, const char *name,
                              const struct job_caller *caller, struct error *err) {
    const json_t *record = json_object_get(j->outputs, name);
    char *path = output_path(j, name);
    bool exists = path_or_link_exists(path),
         is_owner = record && strcmp(json_get_string(record, "owner"),
                                     caller->owner ? caller->owner : "") == 0;
    free(path);
    if (caller->may_replace_any || is_owner || !(exists || output_is_in_use(j, record))) return OK;
    return error_set(
        err, ERR_STATE,
        "'%s' exists, and no job of this key has written it: choose another name, or use "
        "a key with the scope admin",
        name);
}

/* Calls `fn` for each output and run of a request, until an error. */
static int outputs_each(struct jobs *j, const struct job_request *r,
                        const struct job_caller *caller,
                        int (*fn)(const struct jobs *, const char *, const struct job_caller *,
                                  struct error *),
                        struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < r->outputs.n; i++) rc = fn(j, r->outputs.v[i], caller, err);
    for (int i = 0; rc == OK && i < r->runs.n; i++) {
        char *name = xasprintf("run:%s", r->runs.v[i]);
        rc = fn(j, name, caller, err);
        free(name);
    }
    return rc;
}

static int64_t stored_bytes(const struct jobs *j, const char *owner) {
    const char *name;
    json_t *record;
    int64_t bytes = 0;
    for (int i = 0; i < j->n; i++) {
        const char *job_owner = j->v[i]->owner ? j->v[i]->owner : "";
        if (!owner || strcmp(job_owner, owner) == 0) bytes += j->v[i]->disk_bytes;
    }
    json_object_foreach (j->outputs, name, record)
        if (!owner || strcmp(json_get_string(record, "owner"), owner) == 0)
            bytes += integer_at(record, "bytes", 0);
    return bytes;
}

static int limits_check(const struct jobs *j, const char *owner, struct error *err) {
    int queued = 0;
    for (int i = 0; i < j->n; i++)
        queued +=
            j->v[i]->state == QUEUED && strcmp(j->v[i]->owner ? j->v[i]->owner : "", owner) == 0;
    if (j->n >= j->o.max_jobs)
        return error_set(err, ERR_STATE, "%d jobs are stored already; delete some", j->n);
    if (queued >= j->o.max_queued)
        return error_set(err, ERR_MEMORY, "%d jobs of this key are queued already", queued);
    if (!j->o.max_kept) return OK;
    if (stored_bytes(j, NULL) >= j->o.max_kept || stored_bytes(j, owner) >= j->o.max_kept / 2)
        return error_set(
            err, ERR_MEMORY,
            "the files of jobs use all of the disk space that is reserved for them (--jobs-bytes "
            "%lld); delete jobs and results",
            (long long)j->o.max_kept);
    return OK;
}

/* Removes the records of outputs that do not exist, unless a job may still write them. */
static void outputs_prune(struct jobs *j) {
    struct error err;
    const char *name;
    json_t *record;
    void *next;
    json_object_foreach_safe(j->outputs, next, name, record) {
        char *path = output_path(j, name);
        if (!path_or_link_exists(path) && !output_is_in_use(j, record) &&
            store_document_delete(j->store, "output", name, &err) == OK)
            json_object_del(j->outputs, name);
        free(path);
    }
}

static bool owner_equal(const char *a, const char *b) {
    return strcmp(a ? a : "", b ? b : "") == 0;
}

/* running */

/* Whether the job's run has written its manifest, so that the command `resume` of its kind finds
 * it. */
static bool run_has_started(const struct jobs *j, const struct job *job) {
    if (!job->run) return false;
    char *dir = path_join(j->o.runs ? j->o.runs : "runs", job->run),
         *manifest = path_join(dir, "manifest.json");
    bool started = path_exists(manifest);
    free(dir);
    free(manifest);
    return started;
}

/* Sets the id of the job's run: the one that the client chose, or else a new one for each attempt,
 * because a run that was killed before it wrote its manifest cannot be resumed. */
static void job_set_run_name(struct job *job) {
    const char *id = json_get_string(json_object_get(job->request, "options"), "id");
    free(job->run);
    job->run = *id ? xstrdup(id) : xasprintf("%s-%lld", job->id, (long long)job->attempts);
}

/* Sets the option that makes the command record its runs or calls in the folder that this server
 * shows. */
static void store_option_set(const struct jobs *j, const struct job_kind *kind, json_t *options) {
    const char *store_option = kind->store_option;
    if (!store_option || !j->o.runs || json_object_get(options, store_option)) return;
    char *path =
        strcmp(store_option, "store") == 0 ? path_join(j->o.runs, "calls.db") : xstrdup(j->o.runs);
    json_object_set_new(options, store_option, json_from_path(path));
    free(path);
}

/* Returns the request for this attempt, with resolved paths: the original one, or one that resumes
 * its run. Takes ownership of v. */
static json_t *attempt_request(const struct jobs *j, struct job *job, json_t *v) {
    const struct job_kind *kind = job_kind_find(j->o.rules.kinds, json_get_string(v, "kind"));
    json_t *options = json_object_get(v, "options"), *resume_options;
    store_option_set(j, kind, options);
    if (!kind->resume) return v;
    if (!run_has_started(j, job)) {
        job_set_run_name(job);
        json_object_set_new(options, "id", json_string(job->run));
        return v;
    }
    resume_options = json_object();
    static const char *const copied[] = {"runs", "threads"};
    for (size_t i = 0; i < ARRAY_LEN(copied); i++)
        if (json_object_get(options, copied[i]))
            json_object_set(resume_options, copied[i], json_object_get(options, copied[i]));
    json_object_set_new(v, "kind", json_string(kind->resume));
    json_object_set_new(v, "args", json_pack("[s]", job->run));
    json_object_set_new(v, "options", resume_options);
    return v;
}

static bool is_in_process(const struct job *job) {
    return json_is_true(json_object_get(job->request, "in_process"));
}

/* Adds what only the server sets: see jobs_options.prepare. */
static int attempt_prepare(struct jobs *j, const struct job *job, json_t *request,
                           char **permissions, struct error *err) {
    const struct job_attempt a = {
        .id = job->id, .kind = json_get_string(job->request, "kind"), .owner = job->owner};
    *permissions = NULL;
    if (!j->o.prepare) return OK;
    return j->o.prepare(j->o.ctx, &a, json_object_get(request, "options"), permissions, err);
}

static int job_start_child(struct jobs *j, struct job *job, struct error *err) {
    struct strings args = {0};
    char *permissions;
    struct job_request checked;
    /* check again, because the rules may have changed since the submission */
    struct job_request_rules rules = j->o.rules;
    rules.owner = job->owner;
    int rc = job_request_check(&rules, job->request, &checked, NULL, err);
    if (rc != OK) return rc;
    job->attempts++;
    json_t *request = attempt_request(j, job, json_incref(checked.resolved));
    char *folder = path_join(j->folder, job->id);
    rc = attempt_prepare(j, job, request, &permissions, err);
    if (rc == OK) rc = job_request_argv(request, &args, err);
    const struct job_child_options child_options = {.program = j->o.program,
                                                    .folder = folder,
                                                    .args = &args,
                                                    .permissions = permissions ? permissions
                                                                               : j->o.permissions,
                                                    .max_output = j->o.max_output,
                                                    .max_file = j->o.max_file,
                                                    .max_data = j->o.max_data,
                                                    .same_priority = j->o.same_priority,
                                                    .run = is_in_process(job) ? j->o.run : NULL,
                                                    .run_ctx = j->o.ctx,
                                                    .yield = j->o.yield,
                                                    .id = job->id,
                                                    .request = request};
    if (rc == OK && !(job->child = job_child_start(&child_options, err))) rc = err->code;
    strings_release(&args);
    json_decref(request);
    job_request_release(&checked);
    free(permissions);
    free(folder);
    return rc;
}

static void job_reset_attempt(struct job *job) {
    free(job->note);
    free(job->last_stderr_line);
    json_decref(job->progress);
    job->note = job->last_stderr_line = NULL;
    job->progress = NULL;
    job->exit = job->signal = -1;
    *job->ended = 0;
    job->kill_at = job->time_limit_at = INFINITY;
    job->seconds_left = INFINITY;
    job->timed_out = false;
}

static void schedule_retry(struct jobs *j, const struct error *err) {
    if (j->retry_at == 0) log_warn("jobs: %s; trying again", err->text);
    j->retry_at = clock_now() + RETRY_SECONDS;
}

/* Records how a job has ended; job_store_outcome stores it. */
static void job_set_outcome(struct job *job, enum job_state outcome, char *note) {
    job->outcome_pending = true;
    job->outcome = outcome;
    free(job->note);
    job->note = note;
}

static void job_store_outcome(struct jobs *j, struct job *job) {
    struct error err;
    if (!job->outcome_pending) return;
    if (job_set_state(j, job, job->outcome, &err) == OK)
        job->outcome_pending = false;
    else
        schedule_retry(j, &err);
}

/* Starts the job's process, or continues it after a pause. */
static void job_start(struct jobs *j, struct job *job) {
    struct error err;
    bool fresh = !job->child;
    job->not_before = 0;
    job->start_seq = ++j->last_start;
    if (fresh) {
        job_reset_attempt(job);
        if (j->o.max_seconds > 0) job->seconds_left = j->o.max_seconds;
        clock_utc(job->started);
        if (job_start_child(j, job, &err) != OK) {
            job_set_outcome(job, FAILED, xstrdup(err.text));
            job_store_outcome(j, job);
            return;
        }
    }
    if (job_set_state(j, job, RUNNING, &err) == OK) {
        job->time_limit_at = clock_now() + job->seconds_left;
        if (!fresh) job_child_signal(job->child, SIGCONT);
        return;
    }
    struct output_reader l = {j, job};
    if (fresh) {
        job_child_signal(job->child, SIGKILL);
        job_child_reap(job->child, output_line_handle, &l);
        job->child = NULL;
    }
    schedule_retry(j, &err);
}

static bool a_thread_exists(const struct jobs *j) {
    for (int i = 0; i < j->n; i++)
        if (j->v[i]->child && j->v[i]->child->thread) return true;
    return false;
}

/* Whether a job may run now: of the jobs in this process only one has a thread. */
static bool job_may_start(const struct job *job, bool thread_exists) {
    return job->state == QUEUED && !job->cancel_requested && !job->outcome_pending &&
           clock_now() >= job->not_before && (job->child || !thread_exists || !is_in_process(job));
}

/* What decides which of the jobs that may start is the next; the smaller ones go first. */
struct turn {
    int64_t priority, running, last_start, queue_seq; /* priority: negated */
};

static struct turn job_turn(const struct jobs *j, const struct job *job) {
    struct turn t = {.priority = -integer_at(job->request, "priority", 0),
                     .queue_seq = job->queue_seq};
    for (int i = 0; i < j->n; i++) {
        const struct job *other = j->v[i];
        if (!owner_equal(other->owner, job->owner)) continue;
        t.running += other->state == RUNNING;
        t.last_start = MAX(t.last_start, other->start_seq);
    }
    return t;
}

static bool turn_is_before(const struct turn *a, const struct turn *b) {
    if (a->priority != b->priority) return a->priority < b->priority;
    if (a->running != b->running) return a->running < b->running;
    if (a->last_start != b->last_start) return a->last_start < b->last_start;
    return a->queue_seq < b->queue_seq;
}

static int count_running(const struct jobs *j) {
    int running = 0;
    for (int i = 0; i < j->n; i++) running += j->v[i]->state == RUNNING;
    return running;
}

/* Starts jobs while fewer than max_running run. */
static void jobs_dispatch(struct jobs *j) {
    while (j->retry_at == 0 && count_running(j) < j->o.max_running) {
        struct job *next = NULL;
        struct turn best = {0}, t;
        bool thread_exists = a_thread_exists(j);
        for (int i = 0; i < j->n; i++) {
            if (!job_may_start(j->v[i], thread_exists)) continue;
            t = job_turn(j, j->v[i]);
            if (next && !turn_is_before(&t, &best)) continue;
            next = j->v[i];
            best = t;
        }
        if (!next) return;
        job_start(j, next);
    }
}

static char *failure_note(const struct job *job, const struct error *fault) {
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
    return xasprintf("ended with exit status %d without an error message; see stderr.txt",
                     job->exit);
}

/* Measures the disk usage of a job whose process has ended, and that of its outputs. */
static void job_measure_disk_usage(struct jobs *j, struct job *job) {
    const char *name;
    json_t *record;
    char *folder = path_join(j->folder, job->id), *tmp = path_join(folder, "tmp");
    tree_delete(tmp);
    job->disk_bytes = tree_disk_usage(folder);
    json_object_foreach (j->outputs, name, record) {
        if (strcmp(json_get_string(record, "job"), job->id) != 0) continue;
        char *path = output_path(j, name);
        json_object_set_new(record, "bytes", json_integer(tree_disk_usage(path)));
        output_record_save(j, name);
        free(path);
    }
    free(tmp);
    free(folder);
}

/* Exit status 2: the command line is wrong, and is so in the next attempt. */
static bool retry_is_due(const struct job *job) {
    return !job->deadline_missed && job->exit != 2 &&
           job->retried < integer_at(job->request, "retries", 0);
}

/* The job is queued again; takes ownership of the reason. */
static void job_set_retry(const struct jobs *j, struct job *job, char *reason) {
    double pause = j->o.retry_seconds * (double)(1 << 2 * job->retried);
    char *note = xasprintf("attempt %lld failed: %s; tried again %.0f seconds later",
                           (long long)job->attempts, reason, pause);
    job->retried++;
    job->not_before = clock_now() + pause;
    job_set_outcome(job, QUEUED, note);
    free(reason);
}

static void job_reap(struct jobs *j, struct job *job) {
    struct output_reader l = {j, job};
    struct error fault = {0};
    /* reading the last output may set the child's fault */
    job_child_read(job->child, output_line_handle, &l);
    fault = job->child->fault;
    int status = job_child_reap(job->child, output_line_handle, &l);
    job->child = NULL;
    job->time_limit_at = INFINITY;
    progress_publish(j, job);
    series_save(j, job);
    job_measure_disk_usage(j, job);
    job->exit = status != -1 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    job->signal = status != -1 && WIFSIGNALED(status) ? WTERMSIG(status) : -1;
    bool succeeded = job->exit == 0 && !fault.code;
    if (job->timed_out && !succeeded && !fault.code)
        error_set(&fault, ERR_STATE,
                  "stopped after %.0f seconds (the server's --job-seconds); resuming it continues "
                  "what it keeps",
                  j->o.max_seconds);
    if (job->deadline_missed && !succeeded)
        error_set(&fault, ERR_STATE, "stopped at its deadline of %lld seconds",
                  (long long)integer_at(job->request, "deadline", 0));
    if (succeeded || job->cancel_requested)
        job_set_outcome(job, succeeded ? DONE : CANCELLED, NULL);
    else if (retry_is_due(job))
        job_set_retry(j, job, failure_note(job, &fault));
    else
        job_set_outcome(job, FAILED, failure_note(job, &fault));
    job_store_outcome(j, job);
}

static void job_read_output(struct jobs *j, struct job *job) {
    struct output_reader l = {j, job};
    job_child_read(job->child, output_line_handle, &l);
    progress_publish(j, job);
}

/* the thread */

struct poll_set {
    struct pollfd *fds; /* wake_fd, then JOB_CHILD_FDS entries for each job with a child */
    struct job **jobs;
    int n;
};

/* Returns the seconds until the next deadline, which may be negative. */
static double poll_set_fill(struct jobs *j, struct poll_set *w) {
    double now = clock_now(), deadline = j->retry_at ? j->retry_at : INFINITY;
    bool read = now >= j->read_at;
    w->n = 0;
    w->jobs = xrealloc(w->jobs, sizeof *w->jobs * (size_t)(j->n + 1));
    w->fds = xrealloc(w->fds, sizeof *w->fds * (size_t)(1 + JOB_CHILD_FDS * (j->n + 1)));
    w->fds[0] = (struct pollfd){.fd = j->wake_fd, .events = POLLIN};
    for (int i = 0; i < j->n; i++) {
        if (!state_is_final(j->v[i]->state)) deadline = MIN(deadline, j->v[i]->deadline_at);
        if (j->v[i]->not_before > now) deadline = MIN(deadline, j->v[i]->not_before);
        if (!j->v[i]->child) continue;
        deadline = MIN(deadline, MIN(j->v[i]->kill_at, j->v[i]->time_limit_at));
        job_child_pollfds(j->v[i]->child, &w->fds[1 + JOB_CHILD_FDS * w->n], read);
        w->jobs[w->n++] = j->v[i];
    }
    if (!read && w->n) deadline = MIN(deadline, j->read_at);
    return deadline - now;
}

/* Sends SIGTERM, and plans a SIGKILL. */
static void job_stop(const struct jobs *j, struct job *job) {
    job_child_signal(job->child, SIGTERM);
    job_child_signal(job->child, SIGCONT); /* a stopped process does not handle signals */
    job->kill_at = clock_now() + j->o.cancel_seconds;
    job->time_limit_at = INFINITY;
}

/* Ends the jobs whose deadline has passed. */
static void deadlines_enforce(struct jobs *j) {
    for (int i = 0; i < j->n; i++) {
        struct job *job = j->v[i];
        if (state_is_final(job->state) || job->outcome_pending || clock_now() < job->deadline_at)
            continue;
        job->deadline_at = INFINITY;
        job->deadline_missed = true;
        if (job->child) {
            job_stop(j, job);
            continue;
        }
        job_set_outcome(job, FAILED,
                        xasprintf("not started within its deadline of %lld seconds",
                                  (long long)integer_at(job->request, "deadline", 0)));
        job_store_outcome(j, job);
    }
}

static void job_handle_events(struct jobs *j, struct job *job,
                              const struct pollfd fds[JOB_CHILD_FDS]) {
    bool has_output = false;
    for (int i = 1; i < JOB_CHILD_FDS; i++) has_output |= fds[i].revents != 0;
    if (has_output) {
        job_read_output(j, job);
        j->read_at = clock_now() + READ_SECONDS;
    }
    if (fds[0].revents) {
        job_reap(j, job);
    } else if (clock_now() >= job->kill_at) {
        job_child_signal(job->child, SIGKILL);
        job->kill_at = INFINITY;
    } else if (clock_now() >= job->time_limit_at) {
        job->timed_out = true;
        job_stop(j, job);
    }
}

static void jobs_wait(struct jobs *j, struct poll_set *w) {
    double wait = poll_set_fill(j, w);
    int ms = wait > 3600 ? -1 : wait > 0 ? (int)(wait * 1000) + 1 : 0;
    uint64_t woken;
    pthread_mutex_unlock(&j->lock);
    if (poll(w->fds, (nfds_t)(1 + JOB_CHILD_FDS * w->n), ms) < 0 && errno != EINTR)
        log_warn("jobs: cannot wait for processes: %s", strerrordesc_np(errno));
    if (w->fds[0].revents && read(w->fds[0].fd, &woken, sizeof woken) < 0) woken = 0;
    pthread_mutex_lock(&j->lock);
}

static void changed_notify(struct jobs *j) {
    if (!j->events_pending) return;
    j->events_pending = false;
    pthread_mutex_unlock(&j->lock);
    if (j->o.changed) j->o.changed(j->o.ctx);
    pthread_mutex_lock(&j->lock);
}

static void outcomes_retry(struct jobs *j) {
    if (j->retry_at == 0 || clock_now() < j->retry_at) return;
    j->retry_at = 0;
    for (int i = 0; i < j->n; i++) job_store_outcome(j, j->v[i]);
}

/* Kills all children. The states in the store are unchanged, so the next jobs_open continues from
 * them. */
static void children_kill(struct jobs *j) {
    for (int i = 0; i < j->n; i++) {
        struct output_reader l = {j, j->v[i]};
        if (!j->v[i]->child) continue;
        job_child_signal(j->v[i]->child, SIGKILL);
        job_child_reap(j->v[i]->child, output_line_handle, &l);
        j->v[i]->child = NULL;
        series_save(j, j->v[i]);
    }
}

static void *jobs_main(void *arg) {
    struct jobs *j = arg;
    struct poll_set w = {0};
    pthread_mutex_lock(&j->lock);
    while (!j->stop) {
        outcomes_retry(j);
        deadlines_enforce(j);
        jobs_dispatch(j);
        changed_notify(j);
        if (j->stop) break;
        jobs_wait(j, &w);
        for (int i = 0; i < w.n; i++)
            job_handle_events(j, w.jobs[i], &w.fds[1 + JOB_CHILD_FDS * i]);
    }
    children_kill(j);
    pthread_mutex_unlock(&j->lock);
    free(w.fds);
    free(w.jobs);
    return NULL;
}

/* opening */

static int job_compare_created(const void *a, const void *b) {
    const struct job *x = *(struct job *const *)a, *y = *(struct job *const *)b;
    return x->created_seq < y->created_seq ? -1 : x->created_seq > y->created_seq;
}

/* Recovers a job of an earlier process: an interrupted job is queued again, and a pending
 * cancellation is completed. */
static int job_recover(struct jobs *j, struct job *job, struct error *err) {
    if (state_is_final(job->state)) return OK;
    if (job->cancel_requested) return job_set_state(j, job, CANCELLED, err);
    return job->state == RUNNING ? job_set_state(j, job, QUEUED, err) : OK;
}

static int jobs_load(struct jobs *j, struct error *err) {
    json_t *all = store_document_list(j->store, "job", err), *v;
    const char *id;
    int rc = all ? OK : err->code;
    j->v = xcalloc(json_object_size(all) + 1, sizeof *j->v);
    json_object_foreach (all, id, v) {
        struct job *job = job_from_json(j, id, v);
        if (!job) {
            log_warn("job '%s' cannot be read from the store and is ignored", id);
            continue;
        }
        j->last_seq = MAX(j->last_seq, MAX(job->created_seq, job->queue_seq));
        j->v[j->n++] = job;
    }
    qsort(j->v, (size_t)j->n, sizeof *j->v, job_compare_created);
    if (rc == OK && !(j->outputs = store_document_list(j->store, "output", err))) rc = err->code;
    if (rc == OK) outputs_prune(j);
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
    while (j->n_events) event_remove(j, j->n_events - 1);
    for (int i = 0; i < j->n; i++) job_free(j->v[i]);
    json_decref(j->outputs);
    store_close(j->store);
    if (j->lock_fd >= 0) close(j->lock_fd);
    if (j->wake_fd >= 0) close(j->wake_fd);
    pthread_mutex_destroy(&j->lock);
    free(j->events);
    free(j->folder);
    free(j->v);
    free(j);
}

/* The thread blocks all signals; other threads handle them. */
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
    if (o->retry_seconds == 0) j->o.retry_seconds = 5;
    j->folder = xstrdup(folder);
    j->lock_fd = -1;
    j->events = xcalloc(MAX_EVENTS, sizeof *j->events);
    pthread_mutex_init(&j->lock, NULL);
    j->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = j->wake_fd < 0 ? error_errno(err, "cannot make an event") : folder_lock(j, err);
    if (rc == OK && o->rules.results_dir) rc = dir_make(o->rules.results_dir, err);
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

/* functions for callers */

static struct job *job_find(struct jobs *j, const char *id, struct error *err) {
    for (int i = 0; i < j->n; i++)
        if (strcmp(j->v[i]->id, id) == 0) return j->v[i];
    error_set(err, ERR_MISSING, "there is no job %s", id_is_valid(id) ? id : "of that name");
    return NULL;
}

static struct job *job_find_idempotent(struct jobs *j, const struct job_caller *caller) {
    for (int i = 0; caller->idempotency_key && i < j->n; i++)
        if (j->v[i]->idempotency_key &&
            strcmp(j->v[i]->idempotency_key, caller->idempotency_key) == 0 &&
            owner_equal(j->v[i]->owner, caller->owner))
            return j->v[i];
    return NULL;
}

static void id_make(struct jobs *j, char id[JOB_ID_LEN]) {
    struct error missing;
    do snprintf(id, JOB_ID_LEN, "job-%08x", randombytes_random());
    while (job_find(j, id, &missing));
}

static int output_set_owner(const struct jobs *j, const char *name, const struct job_caller *caller,
                            struct error *err) {
    const json_t *old = json_object_get(j->outputs, name);
    json_t *record =
        json_pack("{s:s,s:s,s:I}", "owner", caller->owner ? caller->owner : "", "job",
                  j->v[j->n - 1]->id, "bytes", (json_int_t)integer_at(old, "bytes", 0));
    int rc = store_document_put(j->store, "output", name, record, err);
    if (rc == OK) json_object_set(j->outputs, name, record);
    json_decref(record);
    return rc;
}

static struct job *job_new_from_request(struct jobs *j, const struct job_request *r,
                                        const struct job_caller *caller) {
    struct job *job = job_new();
    id_make(j, job->id);
    job->request = json_incref(r->normalized);
    job->idempotency_key = caller->idempotency_key ? xstrdup(caller->idempotency_key) : NULL;
    job->owner = caller->owner ? xstrdup(caller->owner) : NULL;
    job->may_replace_any = caller->may_replace_any;
    job->created_seq = job->queue_seq = ++j->last_seq;
    job_deadline_begin(job);
    clock_utc(job->created);
    return job;
}

/* Adds a job to the list, then records its outputs, then stores the job. If the job cannot be
 * stored, outputs_prune later removes the records of outputs that do not exist. */
static int job_add(struct jobs *j, const struct job_request *r, const struct job_caller *caller,
                   char id[JOB_ID_LEN], struct error *err) {
    int rc = outputs_each(j, r, caller, output_check_owner, err);
    if (rc == OK) rc = limits_check(j, caller->owner ? caller->owner : "", err);
    if (rc != OK) return rc;
    struct job *job = job_new_from_request(j, r, caller);
    j->v = xrealloc(j->v, sizeof *j->v * (size_t)(j->n + 1));
    j->v[j->n++] = job;
    rc = outputs_each(j, r, caller, output_set_owner, err);
    if (rc == OK) rc = job_set_state(j, job, QUEUED, err);
    if (rc != OK) {
        j->n--;
        job_free(job);
        return rc;
    }
    memcpy(id, job->id, JOB_ID_LEN);
    return OK;
}

int jobs_submit(struct jobs *j, const json_t *request, struct job_caller *caller,
                char id[JOB_ID_LEN], struct error *err) {
    struct job_request checked;
    *caller->field = 0;
    if (caller->idempotency_key &&
        (!*caller->idempotency_key || strlen(caller->idempotency_key) > IDEMPOTENCY_KEY_BYTES))
        return error_set(err, ERR_USAGE, "an idempotency key has 1 to %d bytes",
                         IDEMPOTENCY_KEY_BYTES);
    struct job_request_rules rules = j->o.rules;
    rules.owner = caller->owner;
    int rc = job_request_check(&rules, request, &checked, caller->field, err);
    if (rc != OK) return rc;
    pthread_mutex_lock(&j->lock);
    const struct job *same = job_find_idempotent(j, caller);
    if (!same)
        rc = job_add(j, &checked, caller, id, err);
    else if (json_equal(same->request, checked.normalized))
        memcpy(id, same->id, JOB_ID_LEN);
    else
        rc = error_set(err, ERR_MISMATCH,
                       "this idempotency key belongs to job '%s', whose request is different",
                       same->id);
    pthread_mutex_unlock(&j->lock);
    job_request_release(&checked);
    return rc;
}

char *jobs_owner(struct jobs *j, const char *id) {
    struct error missing;
    pthread_mutex_lock(&j->lock);
    const struct job *job = job_find(j, id, &missing);
    char *owner = job ? xstrdup(job->owner ? job->owner : "") : NULL;
    pthread_mutex_unlock(&j->lock);
    return owner;
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

bool job_state_exists(const char *state) {
    for (int i = 0; i < N_STATES; i++)
        if (strcmp(state_names[i], state) == 0) return true;
    return false;
}

json_t *jobs_list(struct jobs *j, const char *state) {
    json_t *list = json_array(), *copy;
    pthread_mutex_lock(&j->lock);
    for (int i = j->n; i-- > 0;)
        if (!state || strcmp(state_names[j->v[i]->state], state) == 0)
            json_array_append_new(list, job_json(j->v[i]));
    copy = json_deep_copy(list);
    json_decref(list);
    pthread_mutex_unlock(&j->lock);
    return copy;
}

static int wrong_state(const struct job *job, const char *verb, struct error *err) {
    return error_set(err, ERR_STATE, "job '%s' is %s and cannot be %s", job->id,
                     job->cancel_requested && !state_is_final(job->state) ? "being cancelled"
                                                                          : state_names[job->state],
                     verb);
}

static int job_pause(struct jobs *j, struct job *job, struct error *err) {
    if (job->state == PAUSED) return OK;
    if (state_is_final(job->state) || job->cancel_requested || job->outcome_pending)
        return wrong_state(job, "paused", err);
    int rc = job_set_state(j, job, PAUSED, err);
    if (rc != OK || !job->child) return rc;
    job_child_signal(job->child, SIGSTOP);
    if (job->time_limit_at < INFINITY)
        job->seconds_left = fmax(job->time_limit_at - clock_now(), 0);
    job->time_limit_at = INFINITY;
    return OK;
}

static int job_resume(struct jobs *j, struct job *job, struct error *err) {
    if (job->state == DONE || (job->cancel_requested && !state_is_final(job->state)))
        return wrong_state(job, "resumed", err);
    if (job->state == QUEUED || job->state == RUNNING) return OK;
    const struct job before = *job;
    job->cancel_requested = false;
    if (job->state != PAUSED) {
        job->queue_seq = ++j->last_seq;
        job->retried = 0;
        job_deadline_begin(job);
    }
    int rc = job_set_state(j, job, QUEUED, err);
    if (rc != OK) *job = before;
    return rc;
}

static int job_cancel(struct jobs *j, struct job *job, struct error *err) {
    if (job->state == CANCELLED || job->cancel_requested) return OK;
    if (state_is_final(job->state)) return wrong_state(job, "cancelled", err);
    if (!job->child) return job->outcome_pending ? OK : job_set_state(j, job, CANCELLED, err);
    job->cancel_requested = true;
    int rc = job_save(j, job, err);
    if (rc != OK) {
        job->cancel_requested = false;
        return rc;
    }
    job_stop(j, job);
    jobs_wake(j);
    return OK;
}

static int job_delete(struct jobs *j, struct job *job, struct error *err) {
    if (job->child || job->state == RUNNING)
        return error_set(err, ERR_STATE, "job '%s' has a process; cancel it first", job->id);
    int rc = store_document_delete(j->store, "job", job->id, err), index = 0;
    if (rc != OK) return rc;
    char *folder = path_join(j->folder, job->id);
    tree_delete(folder);
    free(folder);
    for (int i = j->n_events; i-- > 0;)
        if (j->events[i].job == job) event_remove(j, i);
    while (j->v[index] != job) index++;
    memmove(&j->v[index], &j->v[index + 1], sizeof *j->v * (size_t)(--j->n - index));
    job_free(job);
    outputs_prune(j);
    return OK;
}

static int job_apply(struct jobs *j, const char *id,
                     int (*operation)(struct jobs *, struct job *, struct error *),
                     struct error *err) {
    pthread_mutex_lock(&j->lock);
    struct job *job = job_find(j, id, err);
    int rc = job ? operation(j, job, err) : err->code;
    pthread_mutex_unlock(&j->lock);
    return rc;
}

int jobs_pause(struct jobs *j, const char *id, struct error *err) {
    return job_apply(j, id, job_pause, err);
}

int jobs_resume(struct jobs *j, const char *id, struct error *err) {
    return job_apply(j, id, job_resume, err);
}

int jobs_cancel(struct jobs *j, const char *id, struct error *err) {
    return job_apply(j, id, job_cancel, err);
}

int jobs_delete(struct jobs *j, const char *id, struct error *err) {
    return job_apply(j, id, job_delete, err);
}

/* Inserts v into the list by its event number; takes ownership of v. */
static void event_insert(json_t *list, json_t *v, int64_t seq) {
    size_t index = json_array_size(list);
    while (index > 0 && integer_at(json_array_get(list, index - 1), "seq", 0) > seq) index--;
    json_object_set_new(v, "seq", json_integer(seq));
    json_array_insert_new(list, index, v);
}

static json_t *job_events(const struct jobs *j, const struct job *job, int64_t after) {
    json_t *list = json_array();
    bool has_state = false; /* whether the list contains the last state */
    for (int i = 0; i < j->n_events; i++) {
        const struct event *e = &j->events[i];
        if (e->job != job || e->seq <= after) continue;
        json_array_append(list, e->v);
        has_state |= e->seq == job->state_seq;
    }
    if (!has_state && job->state_seq > after) event_insert(list, state_event(job), job->state_seq);
    if (job->progress && job->progress_seq > after)
        event_insert(list, json_pack("{s:s,s:O}", "type", "progress", "progress", job->progress),
                     job->progress_seq);
    return list;
}

/* Returns a deep copy, because the caller uses the events without the lock. */
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
    struct job_metrics *stored = job && !job->series ? series_load(j, job) : NULL;
    json_t *v = job ? job_metrics_json(stored ? stored : job->series) : NULL;
    job_metrics_free(stored);
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
        error_set(err, ERR_MISSING, "job '%s' has no output yet", id);
        free(path);
        path = NULL;
    }
    free(folder);
    return path;
}
