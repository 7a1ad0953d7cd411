/*
 * serve: the model, its adapters and its teams over the APIs that people already use.
 *
 * One call that returns when the server has been told to stop (SIGTERM, SIGINT) and everything
 * under way is answered. Threads are its own; signals are blocked in them.
 */
#ifndef SHOAL_SERVE_H
#define SHOAL_SERVE_H

#include "engine/engine.h"
#include "http/http.h"

struct job_kind;
struct server_module;
struct serve_options { /* filled from option rows, but for those from max_memory on */
    struct http_options http;
    struct strings adapters;    /* name=path, or a path, whose last part is the name */
    struct strings teams;       /* name=file.yaml, or a file, whose last part is the name */
    char *adapter_dir;          /* every adapter in it, under its folder's name */
    char *runs;                 /* the folder of runs that are shown */
    double slow_seconds;        /* a reply that takes longer is logged */
    char *state_dir;            /* keys, jobs and what else outlives the server */
    char *backups;              /* the folder of backups; NULL: "backups" beside the state */
    struct strings api_keys;    /* secrets that may do anything, beside the keys in the state */
    char *api_key_file;         /* the same, a line each; NULL: none */
    int64_t max_concurrent;     /* requests under way of a key, and of an address; 0: any number */
    bool auth;                  /* true: without keys, other machines may not even chat */
    int64_t request_memory;     /* bytes of requests and their replies at once; 0: 512 MB */
    bool trust_template;        /* a request may bring a chat template */
    bool feedback;              /* replies can be rated, and experiments live on that */
    int64_t max_feedback;       /* bytes of the file of ratings and experiments */
    struct strings names;       /* other ids of the base */
    int64_t max_waiting;        /* requests */
    int64_t max_jobs;           /* that run at once */
    bool jobs_idle;             /* and only when nobody else wants the processor */
    struct strings jobs_read;   /* folders that jobs may read, beside those that they may anyway */
    struct strings jobs_closed; /* files and folders that they may never read */
    bool jobs_run_commands;     /* they may run reward commands, in the sandbox */
    double job_seconds;         /* that one may run; 0: any time */
    int64_t jobs_bytes;         /* of all that they have written and is kept */
    int64_t max_tokens;         /* of a reply where the request does not say */
    double alert_seconds;       /* between two looks at the alerts; 0: none */
    struct strings alert_webhooks, alert_slacks; /* who is told */
    size_t max_memory;                           /* that was planned for; 0: no limit */
    size_t adapter_memory;                       /* of it, for adapters that are loaded later */
    const struct memory_plan *plan;              /* where the memory goes, adapters aside */
    const struct server_module *const *modules;  /* the APIs (api/api.h), ends with a NULL */
    const struct job_kind *job_kinds;      /* commands that may be jobs; NULL: none */
    char *(*find)(const char *path);             /* of a relative path, where it is; malloc'ed */
    /* Called when requests are taken, with the address, that of the page for a browser of this
     * machine (both end without a slash), and the start-up token with its file. */
    void (*ready)(void *ctx, const char *url, const char *page, const char *token,
                  const char *token_path);
    void *ready_ctx;
};

/* Model and engine are the caller's, and the server's alone meanwhile. path: what the model was
 * opened as; its last part is its id. */
int serve_run(struct model *m, struct engine *e, const struct engine_options *eo, const char *path,
              const struct serve_options *o, struct error *err);

#endif
