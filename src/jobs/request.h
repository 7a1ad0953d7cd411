/*
 * job_request: a client's request as a command line. Pure: paths are resolved by a callback.
 */
#ifndef SHOAL_JOB_REQUEST_H
#define SHOAL_JOB_REQUEST_H

#include "base/base.h"

/* A command that clients may run as a job. */
struct gemm_task_kind {
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
    const struct gemm_task_kind *kinds;
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

const struct gemm_task_kind *job_kind_find(const struct gemm_task_kind *kinds, const char *name);
/* A name of letters, digits, '.', '_' and '-' that is no path and no flag. */
bool job_name_is_plain(const char *name);

/* ERR_USAGE: what of it is wrong, or not allowed; `field` (may be NULL) is then where: an option's
 * name, "args", "kind" or "". On OK the caller releases `out`. */
int job_request_check(const struct job_request_rules *r, const json_t *request, struct job_request *out,
                  char field[64], struct error *err);
void job_request_release(struct job_request *r);
/* The command line of a checked request, without the program's name. */
int job_request_argv(const json_t *request, struct strings *args, struct error *err);

#endif
