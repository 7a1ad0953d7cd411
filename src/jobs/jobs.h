/*
 * jobs: long work in the background of the service: train, evolve, debate, ask, world, eval,
 * quantize. Each job is a child process that runs a command of the program.
 *
 * Separate processes, so that a failed or killed job cannot take the service with it, and the
 * system accounts for its memory, frees it, and pauses the job. Children have idle priority and a
 * separate process group, and they die with this process however it ends.
 *
 * Threads. Any thread may call any function. `changed` is called in the jobs' thread, without
 * locks; it may call all functions except jobs_close.
 *
 *   queued ── its turn ──> running ── exit 0 ──> done
 *     ^ │                   │ │ └──── else ────> failed ───┐
 *     │ pause             pause cancel                     │
 *     │ v                   v └──────────────> cancelled ──┤
 *   resume <────────────── paused                          │
 *     ^────────────────────────────────────────────────────┘
 *
 * Every change of state is stored before it is reported, so the next jobs_open after a kill -9
 * continues: queued and running jobs are queued again in the same order, and run again with the
 * same command, which resumes from its checkpoint if its kind keeps one; paused jobs remain paused.
 */
#ifndef SHOAL_JOBS_H
#define SHOAL_JOBS_H

#include "base/base.h"
#include "ops/ops.h"

/*
 * job_request: converts a client's request to a command line. Pure: a callback resolves paths.
 */

/* A command that clients may run as a job. */
struct job_kind {
    const char *name; /* NULL ends a table */
    /* The command that resumes a run of this kind by its id; NULL: the same command. */
    const char *resume;
    /* The option for the place where the command records its work: "runs", a folder, or "store", a
     * file of calls; NULL: it records nothing. */
    const char *store_option;
    const struct option_row *rows;
    const struct job_args *args; /* ends with an entry without arguments */
};

/* The rules that a request is checked against. Strings are borrowed. */
struct job_request_rules {
    const struct job_kind *kinds;
    const char *out;     /* the folder of results; NULL: results cannot be stored */
    bool allow_commands; /* rewards may be commands */
    int threads;         /* maximum number of threads; 0: any number */
    const char *owner; /* JOB_OWN names belong to this owner; NULL: to requests without an owner */
    void *ctx;
    /* Returns the canonical path of a readable file or folder, malloc'ed; NULL with ERR_MISSING if
     * it does not exist, else with the reason. If the callback is NULL, texts are used as paths
     * unchanged. */
    char *(*input)(void *ctx, const char *path, bool database, struct error *err);
};

/* A checked request. */
struct job_request {
    /* {kind, args, options} with all keys, sorted, and canonical option names: equal requests are
     * equal values. Outputs are already paths, inputs are as the client wrote them. */
    json_t *asked;
    json_t *resolved;       /* the same with resolved paths */
    struct strings outputs; /* names of the outputs */
    struct strings runs;    /* names of the runs that it creates */
};

const struct job_kind *job_kind_find(const struct job_kind *kinds, const char *name);

/* ERR_USAGE: the request is invalid or not allowed; `field` (may be NULL) is then the position: an
 * option's name, "args", "kind" or "". On OK the caller releases `out`. */
int job_request_check(const struct job_request_rules *r, const json_t *request,
                      struct job_request *out, char field[64], struct error *err);
void job_request_release(struct job_request *r);
/* The command line of a checked request, without the program's name. */
int job_request_argv(const json_t *request, struct strings *args, struct error *err);

/* the queue */

enum { JOB_ID_LEN = 13 }; /* "job-" and 8 hex digits, and NUL */

struct jobs_options {
    const char *program; /* NULL: the running program */
    /* The rules for requests: their `out` is the folder of results, which jobs_open creates. */
    struct job_request_rules rules;
    const char
        *permissions;   /* value of SHOAL_JOB for the commands, their permissions; NULL: not set */
    const char *runs;   /* where commands record their work; NULL: their default */
    int max_running;    /* 0: 1. A paused process keeps its memory, but not its place */
    int max_jobs;       /* number of jobs that are kept, in any state; 0: 1000 */
    int max_queued;     /* number of queued jobs per owner; 0: 100 */
    int64_t max_output; /* bytes of a job's printed results; a job that prints more is stopped; 0:
                           64 MiB */
    int64_t max_kept; /* bytes of all job outputs that are kept; one owner may have half of them; 0:
                         unlimited. Counted when a job ends. */
    int64_t max_file; /* bytes of a file that a job writes; 0: unlimited */
    int64_t max_data; /* bytes of a job's memory, without mapped files; 0: unlimited */
    double max_seconds;    /* time limit of an attempt, without pauses; 0: unlimited */
    double cancel_seconds; /* time from SIGTERM to SIGKILL; 0: 10 */
    bool same_priority;    /* children have the priority of this process */
    void *ctx;
    /* A job has new events; may be NULL. */
    void (*changed)(void *ctx);
    /* A job ended as "done", "failed" or "cancelled"; may be NULL. Called in any thread, perhaps
     * with the lock held: it must not call functions of jobs. */
    void (*ended)(void *ctx, const char *kind, const char *state);
};

struct jobs;
/*
 * `store` is the file of the store with the jobs' documents. Use one that no command writes to: a
 * command that is paused during a write would block all other writers. Each job has a folder
 * FOLDER/ID. Commands run in this process's working folder. The rest of this process must not
 * change SIGCHLD, nor reap children that it did not start itself. ERR_STATE: another process uses
 * the folder. Strings are borrowed.
 */
struct jobs *jobs_open(const char *store, const char *folder, const struct jobs_options *o,
                       struct error *err);
/* Kills running children; the next jobs_open resumes them. */
void jobs_close(struct jobs *j);
/* The first half of jobs_close, for a process that is about to end while other threads still use j:
 * kills running children, for at most `seconds`. No function may be called afterwards. */
void jobs_stop(struct jobs *j, double seconds);

/* The origin of a request. Strings are borrowed. */
struct job_caller {
    const char *idempotency_key; /* the idempotency key, at most 255 bytes; NULL: not given */
    const char *owner;           /* the id of the API key; NULL: the request has no key */
    bool may_replace_any;        /* may replace adapters and outputs of other owners */
    /* After ERR_USAGE: the part of the request that is wrong; "": unknown. */
    char field[64];
};
/*
 * A request is {"kind", "args": [strings], "options": {name: value}}; a value is a string, a
 * number, true (--name), false (--no-name) or a list of these, which are passed as --name=value: no
 * value can become another option, and no shell is involved. ERR_USAGE: the request is invalid.
 *
 * An output of a job is a name in the folder of results. It belongs to the owner of the job.
 * ERR_STATE: the name exists and no job of this owner has written it. ERR_MEMORY: the owner's
 * limits are reached.
 *
 * `repeat` makes submitting idempotent: the same key of the same owner with the same request
 * returns the existing job; with a different request it is ERR_MISMATCH.
 */
int jobs_submit(struct jobs *j, const json_t *request, struct job_caller *caller,
                char id[JOB_ID_LEN], struct error *err);
/* Whether a job's request allows its result to replace an adapter of another owner. */
bool jobs_may_replace(struct jobs *j, const char *id);

/*
 * {id, kind, args, options, state, created} and, once they are known, pid, started, ended, exit or
 * signal, note (why it failed), cancel (true: cancellation requested), attempts (number of starts),
 * progress {title, done, total, seconds_left}, figures {name: the last value, or null if it is not
 * a number}. ERR_MISSING: no such job.
 */
json_t *jobs_get(struct jobs *j, const char *id, struct error *err);
json_t *jobs_list(struct jobs *j); /* an array, the newest first */

/* OK if the job is in the requested state already; ERR_STATE if it cannot reach that state any
 * more. */
int jobs_pause(struct jobs *j, const char *id, struct error *err);
/* A paused job continues when it is its turn. A failed or cancelled job is put at the end of the
 * queue and runs again. */
int jobs_resume(struct jobs *j, const char *id, struct error *err);
/* Sends SIGTERM, and SIGKILL after cancel_seconds; the job is "cancelled" once the process has
 * ended. */
int jobs_cancel(struct jobs *j, const char *id, struct error *err);
/* Deletes a job without a process, and its folder. Other outputs of the command are kept. */
int jobs_delete(struct jobs *j, const char *id, struct error *err);

/*
 * An array of a job's events after event `after` (0: from the beginning), in order: {seq, type
 * "state", state, at, note, exit or signal}, {seq, type "progress", progress} and {seq, type
 * "result", result}, where result is a line of the command's results (or `text`, if it is not JSON;
 * a line that is too long has only `bytes`). Numbers begin with 1 and increase across restarts, but
 * with gaps: only the last progress event is kept, and some thousand events of all jobs together.
 * The last state of a job is always included.
 */
json_t *jobs_events(struct jobs *j, const char *id, int64_t after, struct error *err);

/* The figures of all attempts of a job, as job_metrics_json returns them; without figures the list
 * of series is empty. They are stored in FOLDER/ID/figures.json when a process ends; a killed
 * service loses those of running processes. */
json_t *jobs_metrics(struct jobs *j, const char *id, struct error *err);

/* The path of "stdout.jsonl" (the results of the last attempt) or "stderr.txt". malloc'ed; NULL
 * with ERR_MISSING if the file does not exist yet. */
char *jobs_file(struct jobs *j, const char *id, const char *name, struct error *err);

/*
 * job_paths: the files that a job may read and write.
 *
 * A rule is a folder (or a file) and the access allowed below it; the deepest rule above a path
 * decides, so a folder can be closed inside an open one and opened again further down. The rules
 * are enforced in three places: for paths in a request; in the job's process for paths in files
 * that it reads (recipes, teams); and, as far as the kernel's rules can express them, in the
 * kernel.
 *
 * Some readable files are refused everywhere, as they are never inputs of a job: names that begin
 * with '.' (.env, .git, .ssh), databases, special files, and, in folders that are only readable,
 * files whose extension is not one of data, models, adapters or recipes.
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

/* A missing path is a rule for the name it would have; NULL is ignored. */
void job_paths_add(struct job_paths *p, const char *path, enum path_access access);
void job_paths_release(struct job_paths *p);
json_t *job_paths_json(const struct job_paths *p);
int job_paths_parse(struct job_paths *p, const json_t *v, struct error *err);

/* The canonical path of an input, without links: malloc'ed. NULL: ERR_MISSING if it does not
 * exist, ERR_USAGE if it may not be read. `database`: the path must be a database; otherwise it
 * must not. */
char *job_paths_resolve(const struct job_paths *p, const char *path, bool database,
                        struct error *err);
/* Whether a path may be opened for reading; or created, replaced or removed; or passed to a
 * command, which the operator's files in readable folders may be, with any extension. ERR_USAGE: it
 * may not. */
int job_paths_check(const struct job_paths *p, const char *path, enum path_use use,
                    struct error *err);

/*
 * job_metrics: the figures that a job reports, each as a series of bounded length.
 *
 * The names are those of metrics.inc: every gauge whose only label is "job" is a figure. A long
 * series is stored as means (struct curve), so a job of a million updates needs as much memory as
 * one of a thousand. One thread at a time.
 */

bool is_job_metric(enum metric_id id);
/* "train_loss" → its metric; N_METRICS: no such figure. */
enum metric_id job_metric_find(const char *name);

struct job_metrics;
void job_metrics_free(struct job_metrics *f); /* NULL is fine */
/* Records a line {name: number, or null if it is not a number}, at a time in seconds since 1970.
 * Unknown names are ignored. */
void job_metrics_record(struct job_metrics *f, double at, const json_t *line);
/* {name: value}: the last value of each figure; an empty object if there are no figures. */
json_t *job_metrics_latest(const struct job_metrics *f);
/*
 * {began, series: [{name, metric, help, per, at, value}]}: `began` is in seconds since 1970, `at`
 * in seconds after it; `per` is the number of values in one mean.
 */
json_t *job_metrics_json(const struct job_metrics *f);
/* Restores the result of job_metrics_json, to continue it; invalid parts are ignored. */
struct job_metrics *job_metrics_from_json(const json_t *v);

#endif
