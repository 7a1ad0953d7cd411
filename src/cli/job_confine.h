/*
 * job_confine: confines a process that a server has started as a job (environment variable
 * SHOAL_JOB): it can read and write only the paths of jobs, and run no commands unless they are
 * allowed.
 */
#ifndef SHOAL_CLI_JOB_CONFINE_H
#define SHOAL_CLI_JOB_CONFINE_H

#include "base/base.h"

/* Does nothing outside of a job. Call it while the process has one thread. */
int job_confine(struct error *err);
/* Whether this process is a job. In a job a recipe may set only options that a request may set. */
bool job_is_confined(void);

#endif
