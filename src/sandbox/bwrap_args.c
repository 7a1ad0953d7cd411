/*
 * bwrap_args: translates a sandbox_spec into bwrap's options.
 *
 * bwrap mounts in the order of its options. The mounts of every sandbox come first, then the named
 * folders, shorter paths first, so that an outer folder does not cover one inside it. At the end
 * the root, a tmpfs without a size limit, becomes read-only, as /dev does.
 */
#define _GNU_SOURCE
#include "sandbox/internal.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct sandbox_limits sandbox_limits_with_defaults(const struct sandbox_limits *l) {
    struct sandbox_limits limits = *l;
    if (limits.seconds == 0) limits.seconds = 60;
    limits.cpu_seconds = limits.cpu_seconds == 0 ? INFINITY : ceil(limits.cpu_seconds);
    if (limits.memory == 0) limits.memory = (size_t)4 << 30;
    if (limits.file_size == 0) limits.file_size = (size_t)256 << 20;
    if (limits.tmp_size == 0) limits.tmp_size = (size_t)256 << 20;
    if (limits.output == 0) limits.output = (size_t)1 << 20;
    if (limits.processes == 0) limits.processes = 64;
    if (limits.open_files == 0) limits.open_files = 256;
    return limits;
}

static void add_arg(struct buf *b, const char *word) {
    buf_add(b, word, strlen(word) + 1);
}

static void add_option(struct buf *b, const char *option, const char *value) {
    add_arg(b, option);
    add_arg(b, value);
}

static void add_option_pair(struct buf *b, const char *option, const char *first,
                            const char *second) {
    add_option(b, option, first);
    add_arg(b, second);
}

/* Mounts the system read-only. Links such as /lib -> usr/lib stay links. */
static void add_system_mounts(struct buf *b) {
    static const char *const roots[] = {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"};
    char target[PATH_MAX];
    add_option_pair(b, "--ro-bind", "/usr", "/usr");
    for (size_t i = 0; i < ARRAY_LEN(roots); i++) {
        ssize_t n = readlink(roots[i], target, sizeof target - 1);
        if (n > 0) target[n] = 0;
        if (n > 0)
            add_option_pair(b, "--symlink", target, roots[i]);
        else
            add_option_pair(b, "--ro-bind-try", roots[i], roots[i]);
    }
}

/* Shows the files of /etc that loader, C library, fonts and interpreters read; none of them holds
 * secrets. */
static void add_etc_mounts(struct buf *b, bool network) {
    static const char *const names[] = {
        "ld.so.cache", "ld.so.conf",    "ld.so.conf.d",   "alternatives", "fonts",
        "localtime",   "timezone",      "locale.alias",   "passwd",       "group",
        "magic",       "nsswitch.conf", "mime.types",     "papersize",    "perl",
        "python3",     "ssl/certs",     "ssl/openssl.cnf"};
    static const char *const network_names[] = {"hosts",    "host.conf", "resolv.conf",
                                                "gai.conf", "services",  "protocols"};
    char path[64];
    for (size_t i = 0; i < ARRAY_LEN(names) + ARRAY_LEN(network_names); i++) {
        bool for_network = i >= ARRAY_LEN(names);
        if (for_network && !network) break;
        snprintf(path, sizeof path, "/etc/%s",
                 for_network ? network_names[i - ARRAY_LEN(names)] : names[i]);
        add_option_pair(b, "--ro-bind-try", path, path);
    }
}

static void add_namespaces(struct buf *b, bool network, bool mapped) {
    static const char *const always[] = {"--die-with-parent", "--new-session",
                                         "--unshare-pid",     "--unshare-ipc",
                                         "--unshare-uts",     "--unshare-cgroup-try"};
    for (size_t i = 0; i < ARRAY_LEN(always); i++) add_arg(b, always[i]);
    if (!network) add_arg(b, "--unshare-net");
    add_option(b, "--hostname", "sandbox");
    add_option(b, "--cap-drop", "ALL");
    if (mapped) // the command's user id is not root's, but may access the shown files as root can
        add_option(b, "--cap-add", "CAP_DAC_OVERRIDE");
    else
        add_arg(b, "--unshare-user");
}

static void add_tmpfs(struct buf *b, size_t size, const char *path) {
    char text[32];
    snprintf(text, sizeof text, "%zu", size);
    add_option(b, "--size", text);
    add_option(b, "--tmpfs", path);
}

/* named folders */

struct bind {
    char *from, *to; /* the real path; the mount point */
    bool write;
};

struct binds {
    struct bind *v;
    int n;
};

static void bind_add(struct binds *b, const char *from, const char *to, bool write) {
    b->v = xrealloc(b->v, (size_t)(b->n + 1) * sizeof *b->v);
    b->v[b->n++] = (struct bind){xstrdup(from), xstrdup(to), write};
}

static void binds_release(struct binds *b) {
    for (int i = 0; i < b->n; i++) {
        free(b->v[i].from);
        free(b->v[i].to);
    }
    free(b->v);
}

static bool is_inside(const char *path, const char *folder) {
    size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && (path[n] == '/' || !path[n]);
}

static bool may_be_mounted(const char *path) {
    return path[1] && strcmp(path, "/tmp") != 0 && !is_inside(path, "/proc") &&
           !is_inside(path, "/sys") && !is_inside(path, "/dev");
}

/* Whether a path is absolute and has no empty, "." or ".." parts, so that it can be a mount
 * point. */
static bool is_normalized(const char *path) {
    if (*path != '/') return false;
    for (const char *at = path; at; at = strchr(at + 1, '/')) {
        size_t n = strcspn(at + 1, "/");
        if (n == 0 || (n == 1 && at[1] == '.') || (n == 2 && at[1] == '.' && at[2] == '.'))
            return false;
    }
    return true;
}

/* Adds a mount of each path at its real path and, if the given path leads through links, at the
 * given path too. */
static int binds_add(struct binds *b, const struct strings *paths, bool write, struct error *err) {
    for (int i = 0; paths && i < paths->n; i++) {
        const char *named = paths->v[i];
        char *real = realpath(named, NULL);
        if (!real) return error_errno(err, "'%s', which a command needs", named);
        bool allowed = may_be_mounted(real);
        if (allowed) bind_add(b, real, real, write);
        if (allowed && is_normalized(named) && strcmp(named, real) != 0 && may_be_mounted(named))
            bind_add(b, real, named, write);
        free(real);
        if (!allowed) return error_set(err, ERR_USAGE, "'%s' cannot be shown to a command", named);
    }
    return OK;
}

/* Sorts mount points by length. Of equal ones the writable one comes last and so decides. */
static int compare_depth(const void *a, const void *b) {
    const struct bind *x = a, *y = b;
    size_t m = strlen(x->to), n = strlen(y->to);
    return m != n ? (m > n) - (m < n) : x->write - y->write;
}

static int add_named_mounts(struct buf *b, const struct sandbox_spec *s, struct error *err) {
    struct binds binds = {0};
    int rc = binds_add(&binds, s->read, false, err);
    if (!rc) rc = binds_add(&binds, s->write, true, err);
    if (!rc && binds.n) qsort(binds.v, (size_t)binds.n, sizeof *binds.v, compare_depth);
    for (int i = 0; !rc && i < binds.n; i++)
        add_option_pair(b, binds.v[i].write ? "--bind" : "--ro-bind", binds.v[i].from,
                        binds.v[i].to);
    binds_release(&binds);
    return rc;
}

/* Passes the variables by options and not in bwrap's own environment, where LD_PRELOAD would take
 * effect outside of the sandbox. */
static int add_environment(struct buf *b, const struct strings *env, struct error *err) {
    for (int i = 0; env && i < env->n; i++) {
        size_t n = strcspn(env->v[i], "=");
        if (!n || !env->v[i][n])
            return error_set(err, ERR_USAGE, "'%s' is not NAME=VALUE", env->v[i]);
        add_arg(b, "--setenv");
        buf_add(b, env->v[i], n);
        buf_add(b, "", 1);
        add_arg(b, env->v[i] + n + 1);
    }
    return OK;
}

int bwrap_args_build(const struct sandbox_spec *s, const struct sandbox_limits *l, bool mapped,
                     struct buf *out, struct error *err) {
    char number[16];
    add_namespaces(out, s->network, mapped);
    add_system_mounts(out);
    add_etc_mounts(out, s->network);
    add_option(out, "--proc", "/proc");
    add_option(out, "--dev", "/dev");
    add_tmpfs(out, l->tmp_size, "/dev/shm");
    add_option(out, "--remount-ro", "/dev");
    add_tmpfs(out, l->tmp_size, "/tmp");
    add_option_pair(out, "--symlink", "/tmp", "/var/tmp");
    int rc = add_named_mounts(out, s, err);
    if (!rc) rc = add_environment(out, s->env, err);
    add_option(out, "--remount-ro", "/");
    add_option(out, "--chdir", s->dir ? s->dir : "/tmp");
    snprintf(number, sizeof number, "%d", BWRAP_FD_SECCOMP);
    add_option(out, "--seccomp", number);
    return rc;
}
