/*
 * job_request: what a client asks for as a command line. Pure.
 */
#ifndef SHOAL_JOB_REQUEST_H
#define SHOAL_JOB_REQUEST_H

#include "serve/jobs.h"

bool kind_exists(const char *name);
/* The command that goes on with a run of this kind by its id; NULL: the same one does. */
const char *kind_resume(const char *name);
/* The option that says where it keeps what it did: "runs", a folder, or "store", a file of calls;
 * NULL: it keeps nothing. */
const char *kind_keeps(const char *name);

/* ERR_USAGE: what of it is wrong, or not allowed. */
int request_check(const struct jobs_options *o, const json_t *request, struct error *err);
/* The command line of a checked request, without the program's name. */
int request_args(const json_t *request, struct strings *args, struct error *err);
/* A copy with what was left out and its keys in order, as the store gives them back: equal requests
 * are equal values and equal command lines, also tomorrow. */
json_t *request_whole(const json_t *request);

#endif
