/*
 * dir: creates, protects, locks and deletes folders, and removes leftovers of killed writers.
 *
 * A leftover is NAME.tmp-PID or NAME.tmp-PID-N, which only file.c makes: a regular file that we
 * own, whose process does not run here and which no process has locked. A live writer holds a lock
 * on its temporary from its creation until it is renamed (tempfile_claim). This protects the
 * writers of other containers and machines, whose process ids mean nothing here. If the file system
 * has no locks, nothing is removed.
 *
 * No function here follows a symbolic link inside a folder that it changes.
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

static int dir_make_with_mode(const char *path, mode_t last_mode, struct error *err) {
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
        mode_t mode = saved && path[(end - p) + strspn(path + (end - p), "/")] ? 0777 : last_mode;
        if (mkdir(p, mode) < 0) {
            bool tolerable = errno == EEXIST || errno == EROFS || errno == EACCES;
            if (!tolerable || !path_is_dir(p))
                rc = error_errno(err, "cannot make the directory '%s'", p);
        }
        *end = saved;
    }
    free(p);
    return rc;
}

int dir_make(const char *path, struct error *err) {
    return dir_make_with_mode(path, 0777, err);
}

/* Removes the permissions of group and others from a path. Also returns OK, without a change, if
 * another user owns the path or the file system is read-only. */
static int restrict_to_owner(const char *path, const struct stat *st, struct error *err) {
    if (!(st->st_mode & 077) || st->st_uid != geteuid()) return OK;
    if (chmod(path, st->st_mode & 07700) == 0) return OK;
    return errno == EROFS ? OK : error_errno(err, "cannot protect '%s'", path);
}

int dir_make_private(const char *path, struct error *err) {
    struct stat st;
    bool existed = path_is_dir(path);
    int rc = dir_make_with_mode(path, 0700, err);
    if (rc != OK || !existed || stat(path, &st) != 0) return rc;
    if (st.st_mode & S_ISVTX)
        return error_set(err, ERR_STATE,
                         "'%s' is shared with other users; name a folder of your own in it", path);
    rc = restrict_to_owner(path, &st, err);
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
    return restrict_to_owner(path, &st, err);
}

/* The process id in a leftover's name; 0 if the name is not a leftover's. If `base` is set, only
 * leftovers of the file `base` count. */
static pid_t leftover_pid(const char *name, const char *base) {
    const char *suffix = NULL, *next = name;
    while ((next = strstr(next, ".tmp-"))) suffix = next++;
    if (!suffix || suffix == name) return 0;
    if (base && (strlen(base) != (size_t)(suffix - name) || strncmp(name, base, strlen(base)) != 0))
        return 0;
    const char *digits = suffix + 5;
    size_t n_pid = strspn(digits, "0123456789"), n_counter = 0;
    if (n_pid == 0 || n_pid > 9 || *digits == '0') return 0;
    if (digits[n_pid] == '-') n_counter = strspn(digits + n_pid + 1, "0123456789");
    if (digits[n_pid] == '-' ? n_counter == 0 || n_counter > 10 || digits[n_pid + 1 + n_counter]
                             : digits[n_pid] != '\0')
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
static bool leftovers_remove(const char *dir, const char *base) {
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

/* Removes the leftovers of the file `path`. Remembers folders without leftovers and does not read
 * them again. So what another process leaves there later is removed by the next process that writes
 * there. */
void tempfile_remove_stale(const char *path) {
    static _Atomic uint64_t clean_dirs[256];
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    size_t n = slash ? (size_t)(slash - path) : 0;
    uint64_t hash = hash_fnv1a(path, n) | 1;
    _Atomic uint64_t *slot = &clean_dirs[(hash >> 8) % ARRAY_LEN(clean_dirs)];
    if (atomic_load(slot) == hash) return;
    char *dir = xasprintf("%.*s", !slash ? 1 : slash == path ? 1 : (int)n, slash ? path : ".");
    if (!leftovers_remove(dir, base)) atomic_store(slot, hash);
    free(dir);
}

static bool name_has_prefix(const char *name, const char *const *prefixes) {
    bool found = !prefixes;
    for (; !found && *prefixes; prefixes++)
        found = strncmp(name, *prefixes, strlen(*prefixes)) == 0;
    return found;
}

/* Removes the permissions of group and others from the entries of a folder, down to `depth` further
 * levels, and removes leftovers. Skips entries that cannot be changed. Closes `dir`. */
static int entries_restrict_permissions(int dir, dev_t dev, int depth, const char *const *names) {
    int changed = 0;
    DIR *d = fdopendir(dir);
    if (!d) close(dir);
    for (const struct dirent *f; d && (f = readdir(d));) {
        struct stat st;
        if (strcmp(f->d_name, ".") == 0 || strcmp(f->d_name, "..") == 0) continue;
        if (!name_has_prefix(f->d_name, names)) continue;
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
            changed += entries_restrict_permissions(fd, dev, depth - 1, NULL); /* closes fd */
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
    bool changed_self = (st.st_mode & 077) && fchmod(fd, st.st_mode & 07700) == 0;
    return changed_self + entries_restrict_permissions(fd, st.st_dev, 32, names);
}

/* The process id in a lock file; 0 if there is none. */
static long lockfile_read_pid(int fd) {
    char text[32] = "";
    ssize_t n = pread(fd, text, sizeof text - 1, 0);
    return n > 0 ? strtol(text, NULL, 10) : 0;
}

static int lock_held_error(int fd, const char *subject, struct error *err) {
    long pid = lockfile_read_pid(fd);
    return pid > 0
               ? error_set(err, ERR_STATE, "%s is in use by another process (%ld)", subject, pid)
               : error_set(err, ERR_STATE, "%s is in use by another process", subject);
}

/* Whether the path still names the locked file; the previous holder may have removed the file. */
static bool path_names_fd(int fd, const char *path) {
    struct stat named, locked;
    return fstat(fd, &locked) == 0 && stat(path, &named) == 0 && named.st_ino == locked.st_ino &&
           named.st_dev == locked.st_dev;
}

/* Returns the locked descriptor, or a negative error: ERR_MISSING if the previous holder has
 * removed the file meanwhile, ERR_STATE if another process holds the lock. */
static int lockfile_try_acquire(const char *path, const char *subject, struct error *err) {
    char text[32];
    int n = snprintf(text, sizeof text, "%ld\n", (long)getpid()), rc = OK;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return error_errno(err, "cannot open '%s'", path), ERR_IO;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0)
        rc = errno == EWOULDBLOCK ? lock_held_error(fd, subject, err)
                                  : (error_errno(err, "cannot lock '%s'", path), ERR_IO);
    else if (!path_names_fd(fd, path))
        rc = ERR_MISSING;
    else if (ftruncate(fd, 0) != 0 || pwrite(fd, text, (size_t)n, 0) != n)
        rc = (error_errno(err, "cannot write '%s'", path), ERR_IO);
    if (rc != OK) close(fd);
    return rc == OK ? fd : rc;
}

int dir_lock(const char *dir, const char *what, struct error *err) {
    char *path = path_join(dir, "lock"), *subject = xasprintf("%s '%s'", what, dir);
    int fd;
    while ((fd = lockfile_try_acquire(path, subject, err)) == ERR_MISSING) continue;
    free(subject);
    free(path);
    return fd;
}

void dir_unlock(int fd, const char *dir) {
    if (fd < 0) return;
    char *path = path_join(dir, "lock");
    unlink(path); /* while the lock is held */
    close(fd);
    free(path);
}

bool dir_is_locked(const char *dir) {
    char *path = path_join(dir, "lock");
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    bool locked = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    fd_close(&fd);
    free(path);
    return locked;
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

static int tree_delete_entry(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)st, (void)type, (void)ftw;
    remove(path); /* if this fails, the folders above it stay too */
    return 0;
}

void tree_delete(const char *path) {
    nftw(path, tree_delete_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static _Thread_local int64_t disk_usage_sum;

static int disk_usage_add(const char *path, const struct stat *st, int type, struct FTW *ftw) {
    (void)path, (void)ftw;
    if (type == FTW_F) disk_usage_sum += (int64_t)st->st_blocks * 512;
    return 0;
}

int64_t tree_disk_usage(const char *path) {
    disk_usage_sum = 0;
    nftw(path, disk_usage_add, 16, FTW_PHYS);
    return disk_usage_sum;
}
