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
    struct sandbox_limits w = *l;
    if (w.seconds == 0) w.seconds = 60;
    w.cpu_seconds = w.cpu_seconds == 0 ? INFINITY : ceil(w.cpu_seconds);
    if (w.memory == 0) w.memory = (size_t)4 << 30;
    if (w.file_size == 0) w.file_size = (size_t)256 << 20;
    if (w.tmp_size == 0) w.tmp_size = (size_t)256 << 20;
    if (w.output == 0) w.output = (size_t)1 << 20;
    if (w.processes == 0) w.processes = 64;
    if (w.files == 0) w.files = 256;
    return w;
}

static void put(struct buf *b, const char *word) {
    buf_add(b, word, strlen(word) + 1);
}

static void put2(struct buf *b, const char *option, const char *value) {
    put(b, option);
    put(b, value);
}

static void put3(struct buf *b, const char *option, const char *first, const char *second) {
    put2(b, option, first);
    put(b, second);
}

/* Mounts the system read-only. Links such as /lib -> usr/lib stay links. */
static void put_system(struct buf *b) {
    static const char *const roots[] = {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"};
    char target[PATH_MAX];
    put3(b, "--ro-bind", "/usr", "/usr");
    for (size_t i = 0; i < ARRAY_LEN(roots); i++) {
        ssize_t n = readlink(roots[i], target, sizeof target - 1);
        if (n > 0) target[n] = 0;
        if (n > 0)
            put3(b, "--symlink", target, roots[i]);
        else
            put3(b, "--ro-bind-try", roots[i], roots[i]);
    }
}

/* Shows the files of /etc that loader, C library, fonts and interpreters read; none of them holds
 * secrets. */
static void put_etc(struct buf *b, bool network) {
    static const char *const names[] = {
        "ld.so.cache", "ld.so.conf",    "ld.so.conf.d",   "alternatives", "fonts",
        "localtime",   "timezone",      "locale.alias",   "passwd",       "group",
        "magic",       "nsswitch.conf", "mime.types",     "papersize",    "perl",
        "python3",     "ssl/certs",     "ssl/openssl.cnf"};
    static const char *const of_network[] = {"hosts",    "host.conf", "resolv.conf",
                                             "gai.conf", "services",  "protocols"};
    char path[64];
    for (size_t i = 0; i < ARRAY_LEN(names) + ARRAY_LEN(of_network); i++) {
        bool other = i >= ARRAY_LEN(names);
        if (other && !network) break;
        snprintf(path, sizeof path, "/etc/%s", other ? of_network[i - ARRAY_LEN(names)] : names[i]);
        put3(b, "--ro-bind-try", path, path);
    }
}

static void put_namespaces(struct buf *b, bool network, bool mapped) {
    static const char *const always[] = {"--die-with-parent", "--new-session",
                                         "--unshare-pid",     "--unshare-ipc",
                                         "--unshare-uts",     "--unshare-cgroup-try"};
    for (size_t i = 0; i < ARRAY_LEN(always); i++) put(b, always[i]);
    if (!network) put(b, "--unshare-net");
    put2(b, "--hostname", "sandbox");
    put2(b, "--cap-drop", "ALL");
    if (mapped) // a separate user, who can access root's files as root can
        put2(b, "--cap-add", "CAP_DAC_OVERRIDE");
    else
        put(b, "--unshare-user");
}

static void put_tmpfs(struct buf *b, size_t size, const char *path) {
    char text[32];
    snprintf(text, sizeof text, "%zu", size);
    put2(b, "--size", text);
    put2(b, "--tmpfs", path);
}

/* named folders */

struct bind {
    char *from, *to;
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

static bool is_in(const char *path, const char *folder) {
    size_t n = strlen(folder);
    return strncmp(path, folder, n) == 0 && (path[n] == '/' || !path[n]);
}

static bool may_be_named(const char *path) {
    return path[1] && strcmp(path, "/tmp") != 0 && !is_in(path, "/proc") && !is_in(path, "/sys") &&
           !is_in(path, "/dev");
}

/* Whether a path is absolute and has no empty, "." or ".." parts, so that it can be a mount
 * point. */
static bool is_plain(const char *path) {
    if (*path != '/') return false;
    for (const char *at = path; at; at = strchr(at + 1, '/')) {
        size_t n = strcspn(at + 1, "/");
        if (n == 0 || (n == 1 && at[1] == '.') || (n == 2 && at[1] == '.' && at[2] == '.'))
            return false;
    }
    return true;
}

/* Binds each path at its real path and, if links lead there, at the given path too. */
static int binds_take(struct binds *b, const struct strings *paths, bool write, struct error *err) {
    for (int i = 0; paths && i < paths->n; i++) {
        const char *named = paths->v[i];
        char *real = realpath(named, NULL);
        if (!real) return error_errno(err, "'%s', which a command needs", named);
        bool good = may_be_named(real);
        if (good) bind_add(b, real, real, write);
        if (good && is_plain(named) && strcmp(named, real) != 0 && may_be_named(named))
            bind_add(b, real, named, write);
        free(real);
        if (!good) return error_set(err, ERR_USAGE, "'%s' cannot be shown to a command", named);
    }
    return OK;
}

static int by_depth(const void *a, const void *b) {
    const struct bind *x = a, *y = b;
    size_t m = strlen(x->to), n = strlen(y->to);
    return m != n ? (m > n) - (m < n) : x->write - y->write;
}

static int put_named(struct buf *b, const struct sandbox_spec *s, struct error *err) {
    struct binds binds = {0};
    int rc = binds_take(&binds, s->read, false, err);
    if (!rc) rc = binds_take(&binds, s->write, true, err);
    if (!rc && binds.n) qsort(binds.v, (size_t)binds.n, sizeof *binds.v, by_depth);
    for (int i = 0; !rc && i < binds.n; i++)
        put3(b, binds.v[i].write ? "--bind" : "--ro-bind", binds.v[i].from, binds.v[i].to);
    binds_release(&binds);
    return rc;
}

/* bwrap's own environment takes nothing from the caller: LD_PRELOAD would take effect outside. */
static int put_env(struct buf *b, const struct strings *env, struct error *err) {
    for (int i = 0; env && i < env->n; i++) {
        size_t n = strcspn(env->v[i], "=");
        if (!n || !env->v[i][n])
            return error_set(err, ERR_USAGE, "'%s' is not NAME=VALUE", env->v[i]);
        put(b, "--setenv");
        buf_add(b, env->v[i], n);
        buf_add(b, "", 1);
        put(b, env->v[i] + n + 1);
    }
    return OK;
}

int bwrap_args_build(const struct sandbox_spec *s, const struct sandbox_limits *l, bool mapped,
                     struct buf *out, struct error *err) {
    char number[16];
    put_namespaces(out, s->network, mapped);
    put_system(out);
    put_etc(out, s->network);
    put2(out, "--proc", "/proc");
    put2(out, "--dev", "/dev");
    put_tmpfs(out, l->tmp_size, "/dev/shm");
    put2(out, "--remount-ro", "/dev");
    put_tmpfs(out, l->tmp_size, "/tmp");
    put3(out, "--symlink", "/tmp", "/var/tmp");
    int rc = put_named(out, s, err);
    if (!rc) rc = put_env(out, s->env, err);
    put2(out, "--remount-ro", "/");
    put2(out, "--chdir", s->dir ? s->dir : "/tmp");
    snprintf(number, sizeof number, "%d", BWRAP_FD_SECCOMP);
    put2(out, "--seccomp", number);
    return rc;
}
