/*
 * dir: creates, protects, locks and deletes folders, and removes leftovers of killed writers.
 *
 * A leftover is NAME.tmp-PID or NAME.tmp-PID-N, which only file.c makes: a regular file that we
 * own, whose process does not run here and which no process has locked. A live writer holds a lock
 * on its temporary from its creation until it is renamed (tempfile_claim). This protects the
 * writers of other containers and machines, whose process ids mean nothing here. If the file system
 * has no locks, nothing is removed.
 *
 * It never follows a symbolic link below a folder that it changes.
 */
#define _GNU_SOURCE
#include "base/internal.h"

#include "base/base.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static int dir_make_with(const char *path, mode_t last, struct error *err) {
    if (path_access_hook && !path_is_dir(path) &&
        path_access_check(path, PATH_USE_WRITE, err) != OK)
        return err->code;
    char *p = xstrdup(path);
    int rc = OK;
    for (char *end = p; rc == OK && *end;) {
        end += strspn(end, "/");
        end += strcspn(end, "/");
        char saved = *end;
        *end = '\0';
        mode_t mode = saved && path[(end - p) + strspn(path + (end - p), "/")] ? 0777 : last;
        if (mkdir(p, mode) < 0) {
            bool may_be = errno == EEXIST || errno == EROFS || errno == EACCES;
            if (!may_be || !path_is_dir(p))
                rc = error_errno(err, "cannot make the directory '%s'", p);
        }
        *end = saved;
    }
    free(p);
    return rc;
}

int dir_make(const char *path, struct error *err) {
    return dir_make_with(path, 0777, err);
}

/* Removes the permissions of group and others from a path that we own; OK if another user owns it
 * or the file system is read-only. */
static int narrow(const char *path, const struct stat *st, struct error *err) {
    if (!(st->st_mode & 077) || st->st_uid != geteuid()) return OK;
    if (chmod(path, st->st_mode & 07700) == 0) return OK;
    return errno == EROFS ? OK : error_errno(err, "cannot protect '%s'", path);
}

int dir_make_private(const char *path, struct error *err) {
    struct stat st;
    bool there = path_is_dir(path);
    int rc = dir_make_with(path, 0700, err);
    if (rc != OK || !there || stat(path, &st) != 0) return rc;
    if (st.st_mode & S_ISVTX)
        return error_set(err, ERR_STATE,
                         "'%s' is shared with other users; name a folder of your own in it", path);
    rc = narrow(path, &st, err);
    if (rc != OK || !(st.st_mode & 077)) return rc;
    if (st.st_uid == geteuid())
        log_info("'%s' was open to other users; it is private now", path);
    else
        log_warn("'%s' belongs to another user, who controls access to it", path);
    return OK;
}

int file_make_private(const char *path, struct error *err) {
    struct stat st;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd >= 0) {
        close(fd);
        return OK;
    }
    if (errno != EEXIST && !path_exists(path)) return error_errno(err, "cannot open '%s'", path);
    if (stat(path, &st) != 0 || !S_ISREG(st.st_mode)) return OK; /* the caller's open reports it */
    return narrow(path, &st, err);
}

/* The process id in a leftover's name; 0 if the name is not a leftover's. `base` (may be NULL) is
 * the name of the file that it must be a temporary of. */
static pid_t leftover_pid(const char *name, const char *base) {
    const char *mark = NULL, *at = name;
    while ((at = strstr(at, ".tmp-"))) mark = at++;
    if (!mark || mark == name) return 0;
    if (base && (strlen(base) != (size_t)(mark - name) || strncmp(name, base, strlen(base)) != 0))
        return 0;
    const char *digits = mark + 5;
    size_t n = strspn(digits, "0123456789"), more = 0;
    if (n == 0 || n > 9 || *digits == '0') return 0;
    if (digits[n] == '-') more = strspn(digits + n + 1, "0123456789");
    if (digits[n] == '-' ? more == 0 || more > 10 || digits[n + 1 + more] : digits[n] != '\0')
        return 0;
    return (pid_t)atol(digits);
}

bool tempfile_claim(int fd, const char *tmp) {
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
    return path_exists(tmp); /* false: it was removed before we had the lock */
}

/* Also removes leftovers with our own process id: an earlier process may have had it, as in a
 * container, where each start gets the same ids. */
static void leftover_remove(int dir, const char *name, const char *base) {
    struct stat st;
    pid_t pid = leftover_pid(name, base);
    if (!pid || (pid != getpid() && (kill(pid, 0) == 0 || errno == EPERM))) return;
    int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) return;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
        flock(fd, LOCK_EX | LOCK_NB) == 0)
        unlinkat(dir, name, 0);
    close(fd);
}

/* Removes the leftovers of `base`; returns whether the folder holds any leftover, of any file. */
static bool leftovers_visit(const char *dir, const char *base) {
    bool any = false;
    DIR *d = opendir(dir);
    for (const struct dirent *f; d && (f = readdir(d));) {
        if (!leftover_pid(f->d_name, NULL)) continue;
        any = true;
        leftover_remove(dirfd(d), f->d_name, base);
    }
    if (d) closedir(d);
    return any;
}

/* Reads a folder once for all files that this process writes in it, unless it holds leftovers.
 * Leftovers of a process that dies later are left to the next process. */
void tempfile_remove_stale(const char *path) {
    static _Atomic uint64_t clean[256];
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    size_t n = slash ? (size_t)(slash - path) : 0;
    uint64_t hash = hash_fnv1a(path, n) | 1;
    _Atomic uint64_t *known = &clean[(hash >> 8) % ARRAY_LEN(clean)];
    if (atomic_load(known) == hash) return;
    char *dir = xasprintf("%.*s", !slash ? 1 : slash == path ? 1 : (int)n, slash ? path : ".");
    if (!leftovers_visit(dir, base)) atomic_store(known, hash);
    free(dir);
}

static bool name_begins(const char *name, const char *const *names) {
    bool begins = !names;
    for (; !begins && *names; names++) begins = strncmp(name, *names, strlen(*names)) == 0;
    return begins;
}

/* Makes the entries of a folder private and removes leftovers; skips entries that cannot be
 * changed. */
static int below_protect(int dir, dev_t dev, int depth, const char *const *names) {
    int changed = 0;
    DIR *d = fdopendir(dir);
    if (!d) close(dir);
    for (const struct dirent *f; d && (f = readdir(d));) {
        struct stat st;
        if (strcmp(f->d_name, ".") == 0 || strcmp(f->d_name, "..") == 0) continue;
        if (!name_begins(f->d_name, names)) continue;
        leftover_remove(dirfd(d), f->d_name, NULL);
        int fd =
            openat(dirfd(d), f->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (fd < 0 || fstat(fd, &st) != 0 || st.st_dev != dev || st.st_uid != geteuid() ||
            (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))) {
            if (fd >= 0) close(fd);
            continue;
        }
        if ((st.st_mode & 077) && fchmod(fd, st.st_mode & 07700) == 0) changed++;
        if (S_ISDIR(st.st_mode) && depth > 0)
            changed += below_protect(fd, dev, depth - 1, NULL); /* closes fd */
        else
            close(fd);
    }
    if (d) closedir(d);
    return changed;
}

int dir_restrict_permissions(const char *path, const char *const *names) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return 0;
    if (fstat(fd, &st) != 0 || st.st_uid != geteuid()) {
        close(fd);
        return 0;
    }
    bool changes = (st.st_mode & 077) && fchmod(fd, st.st_mode & 07700) == 0;
    return changes + below_protect(fd, st.st_dev, 32, names);
}

/* The process id in a lock file; 0 if it is missing. */
static long holder_of(int fd) {
    char text[32] = "";
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    return n > 0 ? strtol(text, NULL, 10) : 0;
}

static int holder_refuse(int fd, const char *subject, struct error *err) {
    long pid = holder_of(fd);
    return pid > 0
               ? error_set(err, ERR_STATE, "%s is in use by another process (%ld)", subject, pid)
               : error_set(err, ERR_STATE, "%s is in use by another process", subject);
}

/* Whether the path still names the locked file; its last holder may have removed it. */
static bool still_named(int fd, const char *path) {
    struct stat at, have;
    return fstat(fd, &have) == 0 && stat(path, &at) == 0 && at.st_ino == have.st_ino &&
           at.st_dev == have.st_dev;
}

/* The locked descriptor; ERR_MISSING: the file was removed meanwhile. */
static int hold_once(const char *path, const char *subject, struct error *err) {
    char text[32];
    int n = snprintf(text, sizeof text, "%ld\n", (long)getpid()), rc = OK;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return error_errno(err, "cannot open '%s'", path), ERR_IO;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0)
        rc = errno == EWOULDBLOCK ? holder_refuse(fd, subject, err)
                                  : (error_errno(err, "cannot lock '%s'", path), ERR_IO);
    else if (!still_named(fd, path))
        rc = ERR_MISSING;
    else if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)n, 0) != n)
        rc = (error_errno(err, "cannot write '%s'", path), ERR_IO);
    if (rc != OK) close(fd);
    return rc == OK ? fd : rc;
}

int lockfile_acquire(const char *path, const char *subject, struct error *err) {
    int fd;
    while ((fd = hold_once(path, subject, err)) == ERR_MISSING) continue;
    return fd;
}

int dir_lock(const char *dir, const char *what, struct error *err) {
    char *path = path_join(dir, "lock"), *subject = xasprintf("%s '%s'", what, dir);
    int fd = lockfile_acquire(path, subject, err);
    free(subject);
    free(path);
    return fd;
}

void lockfile_release(int fd, const char *path) {
    if (fd < 0) return;
    unlink(path); /* while the lock is held */
    close(fd);
}

void dir_unlock(int fd, const char *dir) {
    char *path = path_join(dir, "lock");
    lockfile_release(fd, path);
    free(path);
}

void dir_delete(const char *path) {
    DIR *d = opendir(path);
    for (const struct dirent *f; d && (f = readdir(d));) {
        char *file = path_join(path, f->d_name);
        if (f->d_name[0] != '.') unlink(file);
        free(file);
    }
    if (d) closedir(d);
    rmdir(path);
}

static int tree_remove(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)st, (void)type, (void)at;
    remove(path); /* if this fails, the folders above it stay too */
    return 0;
}

void tree_delete(const char *path) {
    nftw(path, tree_remove, 16, FTW_DEPTH | FTW_PHYS);
}

static _Thread_local int64_t tree_sum;

static int tree_add(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)path, (void)at;
    if (type == FTW_F) tree_sum += (int64_t)st->st_blocks * 512;
    return 0;
}

int64_t tree_disk_usage(const char *path) {
    tree_sum = 0;
    nftw(path, tree_add, 16, FTW_PHYS);
    return tree_sum;
}
