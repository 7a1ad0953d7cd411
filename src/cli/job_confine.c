/*
 * job_confine: the confinement of a job's process.
 *
 * It has three parts. Before a file is opened, path_access_hook checks its path against the
 * server's rules, which can deny a path inside of an allowed folder. The kernel confines the
 * process (landlock), even if this program has errors. Commands are refused. With
 * --jobs-run-commands they run in the sandbox; a process that landlock confines cannot set up a
 * sandbox, so landlock is not used then.
 */
#define _GNU_SOURCE
#include "cli/job_confine.h"

#include "jobs/jobs.h"
#include "sandbox/sandbox.h"

#include <stdlib.h>
#include <string.h>

static struct job_paths rules;
static bool confined;

bool job_is_confined(void) {
    return confined;
}

static int path_guard(const char *path, enum path_use use, struct error *err) {
    return job_paths_check(&rules, path, use, err);
}

static int landlock_confine(struct error *err) {
    struct strings read = {0}, write = {0};
    for (int i = 0; i < rules.n; i++) {
        if (rules.v[i].access == PATH_DENIED || !path_exists(rules.v[i].path)) continue;
        strings_add(rules.v[i].access == PATH_WRITE ? &write : &read, rules.v[i].path);
    }
    int rc = sandbox_confine(&read, &write, err);
    strings_release(&read);
    strings_release(&write);
    return rc;
}

int job_confine(struct error *err) {
    const char *text = getenv("SHOAL_JOB");
    if (!text) return OK;
    json_t *v = json_parse(text, strlen(text), "SHOAL_JOB", err);
    int rc = v ? job_paths_parse(&rules, json_object_get(v, "paths"), err) : err->code;
    bool commands = json_is_true(json_object_get(v, "commands"));
    unsetenv("SHOAL_JOB");
    confined = true;
    if (rc == OK) {
        job_paths_add(&rules, getenv("TMPDIR"), PATH_WRITE);
        path_access_hook = path_guard;
    }
    sandbox_require_isolation("in a job commands run in the sandbox only, without the network");
    if (rc == OK && !commands)
        sandbox_forbid_commands("jobs run no commands on this server: it was not started with "
                                "--jobs-run-commands");
    if (rc == OK && !commands && sandbox_landlock_abi()) rc = landlock_confine(err);
    json_decref(v);
    return rc;
}
