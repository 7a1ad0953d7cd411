/*
 * sandbox: checks whether commands may run in this process and whether they can, and says why not.
 */
#define _GNU_SOURCE
#include "sandbox/internal.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* forbidding commands */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *forbidden_reason, *isolation_reason; /* NULL: not forbidden; never freed */

static void reason_set(char **reason, const char *why) {
    pthread_mutex_lock(&lock);
    if (!*reason) *reason = xstrdup(why);
    pthread_mutex_unlock(&lock);
}

static int reason_check(char *const *reason, struct error *err) {
    pthread_mutex_lock(&lock);
    int rc = *reason ? error_set(err, ERR_STATE, "%s", *reason) : OK;
    pthread_mutex_unlock(&lock);
    return rc;
}

void sandbox_forbid_commands(const char *why) {
    reason_set(&forbidden_reason, why);
}

void sandbox_require_isolation(const char *why) {
    reason_set(&isolation_reason, why);
}

int sandbox_command_check(struct error *err) {
    return reason_check(&forbidden_reason, err);
}

int sandbox_bypass_check(struct error *err) {
    return sandbox_command_check(err) == OK ? reason_check(&isolation_reason, err) : err->code;
}

/* bwrap */

char *sandbox_program_find(const char *folders, const char *name) {
    for (const char *next = folders; next && *next;) {
        size_t n = strcspn(next, ":");
        char *path = xasprintf("%.*s/%s", (int)n, next, name);
        if (*path == '/' && !path_is_dir(path) && access(path, X_OK) == 0) return path;
        free(path);
        next += n + (next[n] == ':');
    }
    return NULL;
}

char *bwrap_find(struct error *err) {
    const char *folders = getenv("PATH");
    char *path = sandbox_program_find(folders ? folders : "/usr/local/bin:/usr/bin:/bin", "bwrap");
    if (!path)
        error_set(err, ERR_MISSING,
                  "bubblewrap, which runs commands in a sandbox, is not installed (apt install "
                  "bubblewrap)");
    return path;
}

/* The value of a sysctl; -1: the kernel does not have it. */
static long sysctl_number(const char *path) {
    char text[32] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0) close(fd);
    return n > 0 ? strtol(text, NULL, 10) : -1;
}

const char *bwrap_hint(void) {
    if (sysctl_number("/proc/sys/user/max_user_namespaces") == 0)
        return "; user namespaces are switched off (sysctl user.max_user_namespaces=15000)";
    if (geteuid() != 0 && sysctl_number("/proc/sys/kernel/unprivileged_userns_clone") == 0)
        return "; user namespaces are for root only (sysctl kernel.unprivileged_userns_clone=1)";
    if (sysctl_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1)
        return "; AppArmor restricts user namespaces (sysctl "
               "kernel.apparmor_restrict_unprivileged_userns=0, or a profile with 'userns' for "
               "this program and for bwrap)";
    return "; inside a container the runtime must permit user namespaces and mounts";
}

static const char *const default_path = "/usr/local/bin:/usr/bin:/bin";

/* The value of NAME=VALUE in a list, the last one if it occurs several times; NULL if it does
 * not. */
static const char *env_value(const struct strings *env, const char *name) {
    size_t n = strlen(name);
    for (int i = env ? env->n - 1 : -1; i >= 0; i--)
        if (strncmp(env->v[i], name, n) == 0 && env->v[i][n] == '=') return env->v[i] + n + 1;
    return NULL;
}

int sandbox_program_check(const struct sandbox_spec *s, struct error *err) {
    const char *name = s->argv->n ? s->argv->v[0] : "", *folders = env_value(s->env, "PATH");
    if (!*name) return error_set(err, ERR_USAGE, "a command is empty");
    char *path = *name == '/'        ? xstrdup(name)
                 : strchr(name, '/') ? path_join(s->dir ? s->dir : "/tmp", name)
                                     : sandbox_program_find(folders ? folders : default_path, name);
    bool good = path && !path_is_dir(path) && access(path, X_OK) == 0;
    int rc = good ? OK
                  : error_set(err, ERR_MISSING, "program '%s' %s", name,
                              path && path_exists(path) ? "is not executable" : "does not exist");
    free(path);
    return rc;
}

int memfd_from_bytes(const void *p, size_t size, struct error *err) {
    int fd = memfd_create("shoal", MFD_CLOEXEC);
    if (fd < 0) return error_errno(err, "cannot make a file in memory"), -1;
    if (!fd_write(fd, p, size)) {
        error_errno(err, "cannot write a file in memory");
        close(fd);
        return -1;
    }
    lseek(fd, 0, SEEK_SET);
    return fd;
}

/* queries */

/* bwrap --version runs in a sandbox too, so that there is only one way to start programs. */
char *sandbox_version(struct error *err) {
    char *path = bwrap_find(err), *option = "--version", *text = NULL;
    if (!path) return NULL;
    const struct strings argv = {(char *[]){path, option}, 2}, read = {&path, 1};
    const struct sandbox_spec spec = {.argv = &argv, .read = &read};
    struct sandbox_result r;
    if (sandbox_run(&spec, &r, err) == OK) {
        const char *why = sandbox_failure(&r, &spec.limits);
        if (why || !r.out.len)
            error_set(err, ERR_STATE, "bwrap: %s", why ? why : "it printed no version");
        else
            text = xasprintf("%.*s", (int)strcspn(r.out.data, "\n"), r.out.data);
        sandbox_result_release(&r);
    }
    free(path);
    return text;
}

int sandbox_available(struct error *err) {
    char *words[] = {"/bin/true"};
    const struct strings argv = {words, 1};
    const struct sandbox_spec spec = {.argv = &argv};
    struct sandbox_result r;
    int rc = sandbox_run(&spec, &r, err);
    const char *why = rc ? NULL : sandbox_failure(&r, &spec.limits);
    if (why) rc = error_set(err, ERR_STATE, "a command in a sandbox: %s", why);
    if (!rc) sandbox_result_release(&r);
    return rc;
}
