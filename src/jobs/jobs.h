/*
 * jobs: long work behind the service — train, evolve, debate, ask, world, eval, quantize — each a
 * child process of this one that runs a command of the program.
 *
 * A process, so that what fails or is killed cannot take the service with it, its memory is the
 * system's to account and to take back, and pausing it is the system's too. Children run only when
 * nobody else wants the processor, in a group of their own, and die with this process however it
 * ends.
 *
 * Threads. Everything may be called from any thread. `changed` is called in the jobs' own thread,
 * with nothing locked; it may call back here, but for jobs_close.
 *
 *   queued ── its turn ──> running ── exit 0 ──> done
 *     ^ │                   │ │ └──── else ────> failed ───┐
 *     │ pause             pause cancel                     │
 *     │ v                   v └──────────────> cancelled ──┤
 *   resume <────────────── paused                          │
 *     ^────────────────────────────────────────────────────┘
 *
 * Every change of state is in the store before anyone is told, so that after a kill -9 the next
 * jobs_open goes on: what was queued or running is queued again in the same order, and run again by
 * the same command, which goes on from its own checkpoint where its kind keeps one; what was paused
 * stays so.
 */
#ifndef SHOAL_JOBS_H
#define SHOAL_JOBS_H

#include "base/base.h"
#include "ops/ops.h"

/*
 * job_request: a client's request as a command line. Pure: paths are resolved by a callback.
 */

/* A command that clients may run as a job. */
struct job_kind {
    const char *name; /* NULL ends a table */
    /* The command that continues a run of this kind by its id; NULL: the same one does. */
    const char *resume;
    /* The option that says where it keeps what it did: "runs", a folder, or "store", a file of
     * calls; NULL: it keeps nothing. */
    const char *keeps;
    const struct option_row *rows[4]; /* tables, one after another; NULL ends them */
    const struct job_args *args;      /* ends with one of no arguments */
};

/* What a request is checked with. Strings are borrowed. */
struct job_request_rules {
    const struct job_kind *kinds;
    const char *out;   /* the folder of results; NULL: there are no results */
    bool commands;     /* rewards may be commands */
    int threads;       /* at most; 0: any number */
    const char *owner; /* whose names JOB_OWN's are; NULL: those without an owner */
    void *ctx;
    /* The canonical path of a file or folder that may be read, malloc'ed; NULL with ERR_MISSING
     * where there is none, else with the reason. NULL: every text is its own path. */
    char *(*input)(void *ctx, const char *path, bool database, struct error *err);
};

/* A checked request. */
struct job_request {
    /* {kind, args, options} with all keys, in order, and options by their own names: equal requests
     * are equal values. Outputs are paths already, inputs are as the client wrote them. */
    json_t *asked;
    json_t *resolved;       /* the same with paths for everything */
    struct strings outputs; /* the names of what is written */
    struct strings runs;    /* and of runs that it makes */
};

const struct job_kind *job_kind_find(const struct job_kind *kinds, const char *name);
/* A name of letters, digits, '.', '_' and '-' that is no path and no flag. */
bool job_name_is_plain(const char *name);

/* ERR_USAGE: what of it is wrong, or not allowed; `field` (may be NULL) is then where: an option's
 * name, "args", "kind" or "". On OK the caller releases `out`. */
int job_request_check(const struct job_request_rules *r, const json_t *request,
                      struct job_request *out, char field[64], struct error *err);
void job_request_release(struct job_request *r);
/* The command line of a checked request, without the program's name. */
int job_request_argv(const json_t *request, struct strings *args, struct error *err);

/* the queue */

enum { JOB_ID_LEN = 13 }; /* "job-" and 8 hex digits, and NUL */

struct jobs_options {
    const char *program; /* NULL: this one */
    /* What a request may be: its `out` is the folder of results, which jobs_open makes. */
    struct job_request_rules rules;
    const char *child;  /* the commands' variable SHOAL_JOB: what they may do; NULL: none */
    const char *runs;   /* where commands keep what they did; NULL: where they do by themselves */
    int max_running;    /* 0: 1. A paused process keeps its memory, but not its place */
    int max_jobs;       /* that are kept, in whatever state; 0: 1000 */
    int max_queued;     /* of one owner, that wait for their turn; 0: 100 */
    int64_t max_output; /* bytes of a job's printed results; one that prints more is stopped; 0:
                         * 64 MiB */
    int64_t max_kept;   /* bytes of all that jobs have written and is kept; an owner may have
                         * half of it; 0: any number. It is counted when a job ends. */
    int64_t max_file;   /* bytes of a file that a job writes; 0: any number */
    int64_t max_data;   /* bytes of its memory, files that it maps aside; 0: any number */
    double seconds;     /* that an attempt may run, pauses aside; 0: any time */
    double cancel_seconds; /* from asking a process to end to ending it; 0: 10 */
    bool same_priority;    /* children take the processor like this process */
    void *ctx;
    /* Some job has new events; may be NULL. */
    void (*changed)(void *ctx);
    /* A job came to its end, as "done", "failed" or "cancelled"; may be NULL. In whatever thread,
     * which may hold the lock: it must not call back. */
    void (*ended)(void *ctx, const char *kind, const char *state);
};

struct jobs;
/*
 * `store` is the file of the store with the jobs' documents. Better one that no command writes to:
 * a command that is paused while it writes would hold up everybody's. Each job has a folder
 * FOLDER/ID. Commands run in this process's working folder. This process must leave SIGCHLD and
 * the reaping of children that are not its own alone. ERR_STATE when another process uses the
 * folder. Strings are borrowed.
 */
struct jobs *jobs_open(const char *store, const char *folder, const struct jobs_options *o,
                       struct error *err);
/* Ends running children; the next jobs_open takes them up. */
void jobs_close(struct jobs *j);
/* The first half of that for a process that is about to end while other threads still use this:
 * ends running children, for so many seconds at most. Nothing may be called afterwards. */
void jobs_stop(struct jobs *j, double seconds);

/* Where a request comes from. Strings are borrowed. */
struct job_caller {
    const char *repeat; /* its idempotency key, at most 255 bytes; NULL: none */
    const char *owner;  /* the id of its API key; NULL: it came without one */
    bool any;           /* it may replace what others have made */
    /* After ERR_USAGE: the part of the request that is wrong; "": none. */
    char field[64];
};
/*
 * A request is {"kind", "args": [strings], "options": {name: value}}; a value is a string, a
 * number, true (--name), false (--no-name) or a list of these, which are passed as --name=value: no
 * value can become another option, and no shell sees any of it. ERR_USAGE says what is wrong.
 *
 * What a job writes is a name in the folder of results. It belongs to the owner of the job:
 * ERR_STATE where there is something by that name that no job of the same owner has written.
 * ERR_MEMORY: the owner's limits are reached.
 *
 * `repeat` makes repeating harmless: the same of the same owner with the same request is the job
 * that is there already, and with another one ERR_MISMATCH.
 */
int jobs_submit(struct jobs *j, const json_t *request, struct job_caller *by, char id[JOB_ID_LEN],
                struct error *err);
/* Whether a job may put its result in the place of what others serve: it was asked for so. */
bool jobs_may_replace(struct jobs *j, const char *id);

/*
 * {id, kind, args, options, state, created} and, once they are known, pid, started, ended, exit or
 * signal, note (why it failed), cancel (true: asked to end), attempts (times it was begun),
 * progress {title, done, total, seconds_left}, figures {name: the last value, or null where it is
 * no number}. ERR_MISSING: there is no such job.
 */
json_t *jobs_get(struct jobs *j, const char *id, struct error *err);
json_t *jobs_list(struct jobs *j); /* an array, the newest first */

/* What is so already is OK; what cannot be any more is ERR_STATE. */
int jobs_pause(struct jobs *j, const char *id, struct error *err);
/* Paused: it goes on when it is its turn. Failed and cancelled: it is run again, behind the others.
 */
int jobs_resume(struct jobs *j, const char *id, struct error *err);
/* Asks the process to end, and ends it after cancel_seconds; it is "cancelled" when it is gone. */
int jobs_cancel(struct jobs *j, const char *id, struct error *err);
/* With its folder; not while there is a process. What a command wrote elsewhere stays. */
int jobs_delete(struct jobs *j, const char *id, struct error *err);

/*
 * An array of what happened to a job after event `after` (0: from the beginning), in order:
 * {seq, type "state", state, at, note, exit or signal}, {seq, type "progress", progress} and
 * {seq, type "result", result}, where result is a line of the command's results (or `text`, where
 * it is not JSON; too long a line has `bytes` only). Numbers begin with 1 and grow also from one
 * process to the next, but not by one: of progress there is the last one only, and of all jobs
 * together some thousand events are kept. A job's last state is always there.
 */
json_t *jobs_events(struct jobs *j, const char *id, int64_t after, struct error *err);

/* What it told of itself in numbers, in all attempts: job_metrics_json's, of no series where it
 * told none. It is kept in FOLDER/ID/figures.json when a process ends; what a killed service had
 * not kept is lost. */
json_t *jobs_metrics(struct jobs *j, const char *id, struct error *err);

/* The path of "stdout.jsonl" (the results of its last attempt) or "stderr.txt". malloc'ed; NULL
 * with ERR_MISSING when there is none yet. */
char *jobs_file(struct jobs *j, const char *id, const char *name, struct error *err);

/*
 * job_paths: which files a job may read and write.
 *
 * A rule is a folder (or a file) and what may be done below it; the deepest rule above a path
 * decides, so that a folder can be closed inside of an open one and opened again further down. The
 * rules hold three times: for what a request names, in the job's process for what files name that
 * it reads (recipes, teams), and, as far as they can be said in it, in the kernel.
 *
 * Of what may be read, some is refused wherever it is, as it is never a job's input: names that
 * begin with '.' (.env, .git, .ssh), databases, what is neither file nor folder, and, where the
 * folder is only read, files whose names do not end like data, models, adapters or recipes.
 *
 * Threads: rules are changed by one thread before others read them.
 */

enum path_access { PATH_DENIED, PATH_READ, PATH_WRITE /* and read */ };
struct path_rule {
    char *path; /* canonical */
    enum path_access access;
};
struct job_paths {
    struct path_rule *v;
    int n;
};

/* What does not exist is a rule by the name it would have; NULL is none. */
void job_paths_add(struct job_paths *p, const char *path, enum path_access access);
void job_paths_release(struct job_paths *p);
json_t *job_paths_json(const struct job_paths *p);
int job_paths_parse(struct job_paths *p, const json_t *v, struct error *err);

/* The canonical path of something to read, free of links: malloc'ed. NULL: ERR_MISSING where there
 * is nothing, ERR_USAGE where it may not be read. `database`: it must be one, else it must not. */
char *job_paths_resolve(const struct job_paths *p, const char *path, bool database,
                        struct error *err);
/* Whether a path may be opened for reading, or made, replaced or removed, or shown to a command,
 * which is for what the operator has put below a folder to read, whatever it is called; ERR_USAGE.
 */
int job_paths_check(const struct job_paths *p, const char *path, enum path_use use,
                    struct error *err);

/*
 * job_figures: what a job has told of itself in numbers, each as a series of bounded length.
 *
 * The names are those of metrics.inc: a gauge whose one label is "job" is a figure. A long series
 * is kept as means (struct curve), so a job of a million updates takes as much as one of a
 * thousand. One thread at a time.
 */

bool is_job_metric(enum metric_id id);
/* "train_loss" → its metric; N_METRICS: there is no such figure. */
enum metric_id job_metric_find(const char *name);

struct job_metrics;
struct job_metrics *job_metrics_new(void);
void job_metrics_free(struct job_metrics *f); /* NULL is fine */
/* The object {name: number, or null where it is none} of a line, at a time in seconds since 1970.
 * What is no figure is left out. */
void job_metrics_record(struct job_metrics *f, double at, const json_t *line);
/* {name: value}: the last of each; an empty object where there are none. */
json_t *job_metrics_latest(const struct job_metrics *f);
/*
 * {began, series: [{name, metric, help, per, at, value}]}: `at` are seconds after `began`, which is
 * of 1970; `per`: so many values are in a mean.
 */
json_t *job_metrics_json(const struct job_metrics *f);
/* What job_metrics_json gave, to be gone on with; what of it is not so is left out. */
struct job_metrics *job_metrics_from_json(const json_t *v);

#endif
