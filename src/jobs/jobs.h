/*
 * jobs: long-running commands in the background of the server: train, grow, evolve, debate, ask,
 * world, eval, quantize. Each job is a child process that runs a command of this program.
 *
 * Jobs are separate processes, so that a failed or killed job cannot end the server, and the
 * operating system limits and frees a job's memory and can pause a job. Children have idle priority
 * and a separate process group. They are killed when this process ends, however it ends.
 *
 * A job of one kind (a training) may instead be a thread of this process, if its request has
 * "in_process": then it uses what the server has in memory, the weights of its base, and yields
 * to the server's requests (struct yield). The rest of this interface is the same: pausing it holds
 * its thread between two pieces of work, and SIGTERM and SIGKILL make it end there. Nothing else
 * confines it. One such job has a thread at a time; the others wait in the queue.
 *
 * Threads. Any thread may call any function, but jobs_close and jobs_stop must be the last call.
 * The callback `changed` is called in the jobs' thread, without the lock held; it may call all
 * functions except jobs_close.
 *
 *   queued ── its turn ──> running ── exit 0 ──> done
 *     ^ │                   │ │ └──── else ────> failed ───┐
 *     │ pause             pause cancel                     │
 *     │ v                   v └──────────────> cancelled ──┤
 *   resume <────────────── paused                          │
 *     ^────────────────────────────────────────────────────┘
 *
 * Every change of state is stored before it is reported, so jobs_open continues even after a kill
 * -9: queued and running jobs are queued in the same order and run again with the same command,
 * which resumes from its checkpoint if its kind has one; paused jobs remain paused.
 *
 * The next job is one of the highest priority; of these, one of the owner with the fewest running
 * jobs, then of the owner whose last start is longest ago; of its jobs, the first in the queue. A
 * job with `retries` that fails is queued again after a pause, which grows fourfold each time, and
 * is "failed" when no retry is left. Failed jobs with their reasons are the dead letters: they are
 * kept until they are resumed or deleted.
 */
#ifndef SHOAL_JOBS_H
#define SHOAL_JOBS_H

#include "base/base.h"
#include "ops/ops.h"

/*
 * job_request: converts a client's request to a command line. It does no input or output; a
 * callback resolves paths.
 */

/* A kind of job: a command that clients may run. */
struct job_kind {
    const char *name; /* NULL ends a table */
    /* The command that resumes a run of this kind by its id; NULL: the command of the kind itself
     * runs again. */
    const char *resume;
    /* The option that names where the command records its work: "runs" (a folder) or "store" (a
     * file of calls); NULL: it records nothing. */
    const char *store_option;
    const struct option_row *rows;
    const struct job_args *args; /* ends with an entry without arguments */
};

/* The rules that a request is checked against. Strings are borrowed. */
struct job_request_rules {
    const struct job_kind *kinds;
    const char *results_dir;     /* the folder of results; NULL: results cannot be stored */
    bool allow_commands;         /* rewards may be commands, which are executed */
    int max_threads;             /* maximum number of threads; 0: unlimited */
    const char *in_process_kind; /* the kind whose jobs may be threads; NULL: none */
    /* Checks a request for such a job, in the form of job_request.resolved; sets `field` to the
     * name of a wrong option. NULL with in_process_kind NULL. */
    int (*check_in_process)(void *ctx, const json_t *request, char field[64], struct error *err);
    const char
        *owner; /* prefix of JOB_ARG_CLIENT_NAME names, the id of the API key; NULL: no prefix */
    void *ctx;
    /* Returns the canonical path of a readable file or folder, malloc'ed; NULL with ERR_MISSING if
     * it does not exist, else with another error. If the callback is NULL, paths are used
     * unchanged. */
    char *(*resolve_input)(void *ctx, const char *path, bool database, struct error *err);
};

/* A checked request. */
struct job_request {
    /* {kind, args, options} with all keys, sorted, and canonical option names, so equal requests
     * are equal values; "in_process" is true or missing, numbers are as in the request or missing.
     * Outputs are paths already; inputs are as the client wrote them. */
    json_t *normalized;
    json_t *resolved;       /* the same with canonical paths of inputs too */
    struct strings outputs; /* names of the outputs */
    struct strings runs;    /* ids of the runs that the client chose (option "id") */
};

const struct job_kind *job_kind_find(const struct job_kind *kinds, const char *name);

/* Checks a request. ERR_USAGE: it is invalid or not allowed; `field` (may be NULL) then names the
 * wrong part: the name of an option or of another key, or "" if it is unknown. On OK the caller
 * releases `out`. */
int job_request_check(const struct job_request_rules *r, const json_t *request,
                      struct job_request *out, char field[64], struct error *err);
void job_request_release(struct job_request *r);
/* The command line of a checked request, without the program's name. */
int job_request_argv(const json_t *request, struct strings *args, struct error *err);

/* jobs in this process */

/* A job that is a thread, for the function that it runs. */
struct job_run {
    const char *id;
    const json_t *request;      /* {kind, args, options, publish_steps}, with resolved paths */
    const struct strings *args; /* the command line, without the program's name */
    struct yield_task *task;    /* yield_task_wait is the gate of the pools that compute for it */
    int results_fd;             /* private */
};
/* Writes a line of results and releases v. */
void job_run_print(const struct job_run *r, json_t *v);

/* the queue */

enum { JOB_ID_LEN = 13 }; /* "job-" and 8 hex digits, and NUL */

/* A process of a job that is about to start. owner: the id of the API key; NULL: none. */
struct job_attempt {
    const char *id, *kind, *owner;
};

struct jobs_options {
    const char *program; /* NULL: the running program */
    /* The rules for requests. jobs_open creates their folder of results. */
    struct job_request_rules rules;
    const char *permissions; /* value of the variable SHOAL_JOB of the children; NULL: not set */
    const char *runs;        /* folder in which commands record their work; NULL: their default */
    int max_running;         /* maximal number of running jobs, paused ones not counted; 0: 1 */
    int max_jobs;            /* maximal number of jobs that are stored, in any state; 0: 1000 */
    int max_queued;          /* maximal number of queued jobs per owner; 0: 100 */
    int64_t max_output; /* maximal bytes of a job's stdout; a job that prints more is killed; 0: 64
                           MiB */
    int64_t max_kept; /* maximal bytes on disk of all jobs and their outputs, of which one owner may
                         use half; 0: unlimited. Measured when a job ends */
    int64_t max_file; /* maximal bytes of a file that a job writes; 0: unlimited */
    int64_t max_data; /* maximal bytes of a job's memory, without mapped files; 0: unlimited */
    double max_seconds; /* time limit of an attempt, without pauses; 0: unlimited */
    /* Called before a process of a job starts: adds the options that only the server sets to
     * `options`, and may set *permissions, malloc'ed, for this process. An error makes the job
     * fail. It may be called with the lock held; NULL: not called. */
    int (*prepare)(void *ctx, const struct job_attempt *a, json_t *options, char **permissions,
                   struct error *err);
    double cancel_seconds; /* time from SIGTERM to SIGKILL; 0: 10 */
    double retry_seconds;  /* pause before the first retry of a job; 0: 5 */
    bool same_priority;    /* jobs have the priority of this process, and do not yield */
    void *ctx;
    /* Runs a job in this process, in its thread, whose log sink, progress and results are those of
     * the job. It ends soon after log_check_cancelled returns an error. NULL: jobs are processes
     * only. */
    int (*run)(void *ctx, const struct job_run *r, struct error *err);
    struct yield *yield; /* these jobs are its background; set with `run`, and borrowed */
    /* Called when a job has new events; may be NULL. */
    void (*changed)(void *ctx);
    /* Called when a job ends as "done", "failed" or "cancelled"; may be NULL. It is called in any
     * thread, possibly with the lock held, so it must not call functions of jobs. */
    void (*ended)(void *ctx, const char *kind, const char *state);
};

struct jobs;
/*
 * `store` is the database file with the jobs' records. No command may write to it: a command that
 * is paused during a write would block all other writers. Each job has a folder FOLDER/ID. Commands
 * run in this process's working folder. The rest of this process must not change SIGCHLD and must
 * not reap children that it did not start. ERR_STATE: another process uses the folder. Strings are
 * borrowed.
 */
struct jobs *jobs_open(const char *store, const char *folder, const struct jobs_options *o,
                       struct error *err);
/* Kills running children; the next jobs_open resumes them. */
void jobs_close(struct jobs *j);
/* For a process that is about to exit while other threads may still use j: kills running children
 * and waits about `seconds` until this is done, but frees nothing. No function may be called
 * afterwards. */
void jobs_stop(struct jobs *j, double seconds);

/* The caller of jobs_submit. Strings are borrowed. */
struct job_caller {
    const char *idempotency_key; /* at most 255 bytes; NULL: not given */
    const char *owner;           /* the id of the API key; NULL: none */
    bool may_replace_any;        /* may replace adapters and outputs of other owners */
    /* Result after ERR_USAGE: the part of the request that is wrong; "": unknown. */
    char field[64];
};
/*
 * Submits a job. A request is {"kind", "args": [strings], "options": {name: value}}, perhaps with
 * "priority" (-100 to 100, 0), "retries" (at most 3, 0) and "deadline" (seconds from now, after
 * which the job fails if it has not ended), and for a job in this process "in_process": true and
 * perhaps "publish_steps": N. An option's value is a string,
 * a number, true (--name), false (--no-name) or a list of these. Values are passed as
 * --name=value, so no value can become another option, and no shell is involved. ERR_USAGE: the
 * request is invalid.
 *
 * An output of a job is a name in the folder of results and belongs to the owner of the job.
 * ERR_STATE: the name exists, and no job of this owner has written it; or max_jobs jobs are stored.
 * ERR_MEMORY: the owner has max_queued queued jobs, or max_kept is reached.
 *
 * With an idempotency key, submitting the same request again returns the existing job of this
 * owner; a different request with the same key is ERR_MISMATCH.
 */
int jobs_submit(struct jobs *j, const json_t *request, struct job_caller *caller,
                char id[JOB_ID_LEN], struct error *err);
/* The owner of a job, "" if it has none, malloc'ed; NULL: there is no such job. */
char *jobs_owner(struct jobs *j, const char *id);
/* Whether the result of a job may replace an adapter of another owner. */
bool jobs_may_replace(struct jobs *j, const char *id);

/*
 * A job as JSON: {id, kind, args, options, state, created, attempts (number of starts)}, what its
 * request has of priority, retries, deadline, in_process and publish_steps, and, once they are
 * known, retried (retries since the client started or resumed it), pid (of a process), started,
 * ended, exit or signal, note (why it failed), cancel (true: cancellation was requested), progress
 * {title, done, total, seconds_left}, figures (the metrics that it reports) {name: the last value,
 * or null if it is not a number}. ERR_MISSING: no such job.
 */
json_t *jobs_get(struct jobs *j, const char *id, struct error *err);
/* An array of jobs, the newest first; those of one state (such as "failed") unless it is NULL. */
json_t *jobs_list(struct jobs *j, const char *state);
bool job_state_exists(const char *state);

/* The following functions return OK if the job is in the requested state already, and ERR_STATE if
 * it cannot reach that state any more. */
int jobs_pause(struct jobs *j, const char *id, struct error *err);
/* A paused job returns to its place in the queue and continues at its turn. A failed or cancelled
 * job is put at the end of the queue and runs again at its turn, with all its retries; the seconds
 * of its deadline are counted from now. */
int jobs_resume(struct jobs *j, const char *id, struct error *err);
/* Sends SIGTERM, and SIGKILL after cancel_seconds; the job is "cancelled" once the process has
 * ended. */
int jobs_cancel(struct jobs *j, const char *id, struct error *err);
/* Deletes a job, which must not have a process, and its folder. Its outputs in the folder of
 * results are not deleted. */
int jobs_delete(struct jobs *j, const char *id, struct error *err);

/*
 * An array of a job's events after the event with the number `after` (0: all), in order: {seq, type
 * "state", state, at, note, exit or signal}, {seq, type "progress", progress} and {seq, type
 * "result", result}, where result is a line of the command's stdout (or `text`, if it is not JSON;
 * a line that is too long has only `bytes`). Event numbers begin with 1 and increase across
 * restarts, but with gaps: only the last progress event is kept, and some thousand events of all
 * jobs together. The last state of a job is always included.
 */
json_t *jobs_events(struct jobs *j, const char *id, int64_t after, struct error *err);

/* The metrics of all attempts of a job, as job_metrics_json returns them; the list of series may be
 * empty. They are stored in FOLDER/ID/figures.json when the job's process ends; if the server is
 * killed, those of running processes are lost. */
json_t *jobs_metrics(struct jobs *j, const char *id, struct error *err);

/* The path of a job's "stdout.jsonl" (the results of the last attempt) or "stderr.txt", malloc'ed;
 * NULL with ERR_MISSING if the file does not exist yet. */
char *jobs_file(struct jobs *j, const char *id, const char *name, struct error *err);

/*
 * job_paths: the files that a job may read and write.
 *
 * A rule is a folder (or a file) and the access that is allowed below it. The rule with the longest
 * path that contains a file decides, so access can be denied inside an allowed folder and allowed
 * again further down. The rules are enforced in three places: for paths in a request; in the job's
 * process for paths in files that it reads (recipes, teams); and, as far as landlock can express
 * them, by the kernel.
 *
 * Some files are always refused, because they are never inputs of a job: names that begin with '.'
 * (.env, .git, .ssh), databases, special files, and files whose extension is not one of data,
 * models, adapters or recipes. Two exceptions: an option may require a database, and a job's own
 * program may read any extension in a folder that it may write.
 *
 * Threads: one thread sets the rules before other threads read them.
 */

enum path_access { PATH_DENIED, PATH_READ, PATH_WRITE /* also grants reading */ };
struct path_rule {
    char *path; /* canonical */
    enum path_access access;
};
struct job_paths {
    struct path_rule *v;
    int n;
};

/* Adds a rule. The path need not exist; NULL is ignored. */
void job_paths_add(struct job_paths *p, const char *path, enum path_access access);
void job_paths_release(struct job_paths *p);
json_t *job_paths_json(const struct job_paths *p);
int job_paths_parse(struct job_paths *p, const json_t *v, struct error *err);

/* The canonical path of an input, without symbolic links, malloc'ed. NULL: ERR_MISSING if it does
 * not exist, ERR_USAGE if it may not be read. `database`: whether the path must be a database;
 * otherwise it must not be one. */
char *job_paths_resolve(const struct job_paths *p, const char *path, bool database,
                        struct error *err);
/* Checks whether a path may be used: opened for reading; created, replaced or removed; or executed
 * (programs of the system, and files in folders that are only readable). ERR_USAGE: it may not. */
int job_paths_check(const struct job_paths *p, const char *path, enum path_use use,
                    struct error *err);

/*
 * job_metrics: the metrics that a job reports ("figures" in JSON), each as a series of bounded
 * length.
 *
 * The names are those of metrics.inc: a job may report every gauge whose only label is "job". A
 * long series is stored as means (struct curve), so a job of a million updates needs as much memory
 * as one of a thousand. Used by one thread at a time.
 */

bool is_job_metric(enum metric_id id);
/* The metric of a name such as "train_loss"; N_METRICS: there is none. */
enum metric_id job_metric_find(const char *name);

struct job_metrics;
void job_metrics_free(struct job_metrics *f); /* may be NULL */
/* Records the values {name: number, or null if it is not a number} at a time in seconds since 1970.
 * Unknown names are ignored. */
void job_metrics_record(struct job_metrics *f, double time, const json_t *line);
/* Returns {name: value}, the last value of each metric; an empty object if no metric was reported.
 */
json_t *job_metrics_latest(const struct job_metrics *f);
/*
 * {began, series: [{name, metric, help, per, at, value}]}: `began` is in seconds since 1970; `at`
 * is a list of times in seconds after it, `value` the list of values; `per` is the number of
 * reported values that each of them is the mean of.
 */
json_t *job_metrics_json(const struct job_metrics *f);
/* Creates metrics from the result of job_metrics_json, to continue them; invalid parts are
 * ignored. */
struct job_metrics *job_metrics_from_json(const json_t *v);

#endif
