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
#ifndef SHOAL_JOB_PATHS_H
#define SHOAL_JOB_PATHS_H

#include "base/base.h"

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

#endif
