/*
 * job_confine: the first step of a process that a server started as a job, which its variable
 * SHOAL_JOB describes: afterwards the process reads and writes only the paths of jobs, and runs no
 * commands unless they are allowed.
 */
#ifndef SHOAL_CLI_JOB_CONFINE_H
#define SHOAL_CLI_JOB_CONFINE_H

#include "base/base.h"

/* Returns OK also outside of a job. Call it while the process has one thread. */
int job_confine(struct error *err);
/* Whether this process is a job; if so, a file (a recipe) may set as little as a request may. */
bool job_is_confined(void);

#endif
