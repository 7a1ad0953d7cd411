/*
 * serve: serves a model, its adapters, teams and agents over widely used HTTP APIs.
 *
 * serve_start returns a server that accepts requests, on threads that inherit the caller's signal
 * mask. serve_run is the program's server: it starts one, which ends with SIGTERM or SIGINT.
 */
#ifndef SHOAL_SERVE_H
#define SHOAL_SERVE_H

#include "engine/engine.h"
#include "http/http.h"

#include <signal.h>

struct cluster;
struct job_kind;
struct job_run;
struct server;
struct server_module;
/* A server that accepts requests. */
struct serve_ready {
    const char *url, *page;         /* its address, and the address for a browser on this machine;
                                       both without a final slash */
    const char *token, *token_path; /* the start-up token and the path of its file */
    const char *model;              /* the base's id */
    struct strings adapters, teams, agents, fallbacks; /* ids, oldest first */
    struct strings bases; /* ids of the models that are loaded on demand */
    bool needs_key;       /* requests without a key are refused */
};
/* The server, for a training in its process. */
struct train_host {
    struct model *model; /* the default base; the training does not change it */
    size_t memory;       /* bytes of --train-memory; 0: the available memory */
    /* Serves `a`, which is bound to the model, under the name of the job's result: a request that
     * runs keeps the adapter that it has. NULL: the training publishes no versions. */
    int (*publish)(void *ctx, int64_t step, struct adapter *a, struct error *err);
    int64_t publish_steps; /* steps between two versions */
    void *ctx;
};
struct serve_options { /* filled from serve_option_rows, except max_memory and the fields after it
                        */
    struct http_options http;
    struct strings adapters;    /* name=path, or a path; its last part is then the name */
    struct strings teams;       /* name=file.yaml, or a file; its last part is then the name */
    struct strings agents;      /* the same */
    struct strings fallbacks;   /* the same */
    char *router;               /* choice of the model "auto", see auto_model.h; NULL: likelihood */
    struct strings tools;       /* tools of agents that execute code or use the network */
    char *adapter_dir;          /* every adapter in it is served under the name of its folder */
    char *runs;                 /* the folder of the runs to show */
    double slow_seconds;        /* a reply that takes longer is logged */
    char *state_dir;            /* keys, jobs and other data that outlives the server */
    char *backups;              /* the folder of backups; NULL: "backups" next to the state */
    struct strings api_keys;    /* secrets with all scopes, in addition to the keys in the state */
    char *api_key_file;         /* a file with one such secret per line; NULL: none */
    int64_t max_concurrent;     /* running requests per key, and per address; 0: any number */
    bool auth;                  /* true: without keys, requests from other machines are refused */
    char *max_request_memory;   /* size of all requests and replies; NULL: see request_memory */
    bool trust_template;        /* a request may contain a chat template */
    struct strings checks;      /* checks of requests that open files or run programs */
    bool feedback;              /* replies can be rated; experiments need this */
    char *max_feedback;         /* maximum size of the file of ratings and experiments */
    struct strings names;       /* additional ids of the base */
    int64_t max_waiting;        /* requests that may wait for the batch; more are refused */
    double max_step_ms;         /* goal for steps with prompts and replies; 0: none */
    int64_t max_jobs;           /* jobs that run at once */
    bool jobs_idle;             /* jobs run only while no other process needs the processor */
    struct strings jobs_read;   /* folders that jobs may read, in addition to the default ones */
    struct strings jobs_closed; /* files and folders that jobs may never read */
    bool jobs_run_commands;     /* jobs may run reward commands, in the sandbox */
    double job_seconds;         /* seconds that one job may run; 0: no limit */
    double train_share;         /* share of the time of requests for a training in this process */
    char *train_memory;         /* size of its memory; NULL: the available memory, or none */
    int64_t jobs_bytes;         /* bytes of all files that jobs have written and that are kept */
    int64_t max_tokens;         /* tokens of a reply if the request sets no limit */
    int64_t loop_tokens; /* engine_request.loop_tokens, unless the request sets it or ignore_eos */
    bool context_shift;  /* replies continue after the context is full, unless the request says */
    int64_t n_keep;      /* tokens of a prompt that a context shift keeps; -1: all */
    char *reasoning_parser; /* tags of reasoning: "auto", "none" or a name, see reasoning.h */
    double alert_seconds;   /* interval between two checks of the alerts; 0: no checks */
    char *model_dir;        /* the models in this folder are loaded on demand */
    char *keep_alive;       /* how long they remain loaded; a text for keep_alive_parse */
    double load_seconds;    /* how long a request waits until its model is loaded */
    struct strings alert_webhooks, alert_slacks; /* recipients of alerts */
    char *knowledge;                             /* the knowledge base that clients may search */
    char *memory;         /* the store of the memories of clients; NULL: nothing is learnt */
    char *sleep_at;       /* local time "HH:MM" at which memories become weights each night; NULL:
                             not at night */
    char *sleep_rehearse; /* the default of 'rehearse' of these jobs; NULL: none */
    size_t max_memory;    /* bytes of the memory plan; 0: no limit */
    struct strings bases; /* paths of the models that are loaded on demand; the caller adds and
                             releases them */
    struct engine_options base_engine; /* their engine options if memory is sufficient; max_len 0:
                                          memory_plan_context */
    /* set by serve_options_check */
    int64_t request_memory;    /* bytes of requests and their replies at once */
    size_t train_memory_bytes; /* 0: not named */
    int64_t feedback_bytes;    /* maximum bytes of the file of ratings and experiments */
    double keep_alive_seconds; /* negative: for ever */
    int sleep_minute;          /* sleep_at in minutes */

    const struct memory_plan *plan; /* memory plan; with max_memory it bounds the adapter pool */
    const struct server_module *const *modules; /* the APIs (api/api.h), ends with a NULL */
    const struct job_kind *job_kinds;           /* commands that may run as jobs; NULL: none */
    /* Trains as the job `r` of the kind "train" says; NULL: trainings are processes. */
    int (*train)(const struct job_run *r, const struct train_host *host, struct error *err);
    char *(*find)(const char *path); /* resolves a relative path; malloc'ed; NULL: as it is */
    void (*ready)(void *ctx,
                  const struct serve_ready *r); /* called once, at the end of the start */
    void *ready_ctx;
    /* serve_run: serves clients that do not use HTTP until they have ended or one of the signals,
     * which are blocked, arrives. NULL: waits for a signal. */
    void (*attend)(struct server *s, const sigset_t *signals);
    struct cluster *cluster; /* the engine's remote, which streams; NULL: none */
};

enum { SERVE_MIN_REQUEST_MEMORY = 8 << 20 };        /* smallest --max-request-memory */
extern const struct option_row serve_option_rows[]; /* without those of `http` */
/* Checks the options, so that a caller finds errors before it loads a model, and computes the
 * limits. Call it after setting max_memory. */
int serve_options_check(struct serve_options *o, struct error *err);
/* Adds the models in o->model_dir to o->bases: folders with a config.json and GGUF files, up to
 * three levels deep, in the order of their paths. Leaves out the model at `path`, models whose
 * files cannot be read, and, like those with a warning, those whose name another model has. */
int serve_options_add_models(struct serve_options *o, const char *path, enum numeric_class cls,
                             struct error *err);
/* The index in o->bases of the base of an item of o->adapters: "BASE:NAME=DIR", or vLLM's object
 * with the base_model_name. -1: it is the default base's. */
int serve_adapter_base(const struct serve_options *o, const char *adapter);
/* Parses Ollama's keep_alive: seconds, or a duration such as "5m" or "1h30m". A negative one means
 * for ever: *seconds is -1. False: the text has another form. */
bool keep_alive_parse(const char *text, double *seconds);

/*
 * Starts a server. Model, engine and options are borrowed until serve_stop; the server alone uses
 * model and engine, which has no unfinished request. path: the path that the model was opened with;
 * its last part is the model's id. While a server runs, the process keeps a reserve of memory
 * (memory_reserve_set) and reads regular files only (file_set_regular_only).
 */
struct server *serve_start(struct model *m, struct engine *e, const struct engine_options *eo,
                           const char *path, const struct serve_options *o, struct error *err);
/* Accepts no new requests, waits at most drain_seconds for the running ones, cuts the others off,
 * and frees the server. */
void serve_stop(struct server *s);
/* Runs a server until SIGTERM or SIGINT has stopped it and all running requests have ended. If they
 * do not end in time, or on a second signal, it ends the process. It sets the umask, the parameters
 * of malloc and the handling of signals for the whole process. */
int serve_run(struct model *m, struct engine *e, const struct engine_options *eo, const char *path,
              const struct serve_options *o, struct error *err);

#endif
