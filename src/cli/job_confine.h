/*
 * job_is_confined: what a process does first that a server has started as a job, as its variable
 * SHOAL_JOB says: from then on it reads and writes where jobs may, and runs no commands unless they
 * are allowed.
 */
#ifndef SHOAL_IN_JOB_H
#define SHOAL_IN_JOB_H

#include "base/base.h"

/* OK also where this is no job. To be called while the process has one thread. */
int job_confine(struct error *err);
/* Whether it is one; what a file (a recipe) may say in it is then as little as a request may. */
bool job_is_confined(void);

#endif
