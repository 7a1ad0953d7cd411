/*
 * file: reads whole files and replaces files atomically. Also here: paths, hashes and descriptors.
 *
 * Nothing is cached. Two writers of one path do not wait for each other: each writes a complete
 * file, and the later rename decides.
 *
 * Invariant of a writer: until atomic_file_commit has renamed the temporary, PATH is untouched;
 * after any failure the temporary is removed. Only regular files are ever replaced, so "-o
 * /dev/stdout" cannot destroy a device node. A symbolic link is kept, and its target is replaced.
 */
#define _GNU_SOURCE
#include "base/base.h"
#include "base/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sodium.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

int (*path_access_hook)(const char *path, enum path_use use, struct error *err);

int path_access_check(const char *path, enum path_use use, struct error *err) {
    return path_access_hook ? path_access_hook(path, use, err) : OK;
}

static atomic_bool only_regular; /* set by file_set_regular_only */

void file_set_regular_only(bool only) {
    atomic_store(&only_regular, only);
}

static int not_regular_error(const char *path, mode_t mode, struct error *err) {
    const char *kind = S_ISDIR(mode)    ? "directory"
                       : S_ISFIFO(mode) ? "pipe"
                       : S_ISSOCK(mode) ? "socket"
                                        : "device";
    return error_set(err, ERR_IO, "cannot read '%s': it is a %s, not a regular file", path, kind);
}

/* Whether `fd` is a file that is not regular but may be read: a pipe, a terminal or /dev/null.
 * Other devices may have no end. */
static bool is_stream(int fd, const struct stat *st) {
    struct stat dev_null;
    return S_ISFIFO(st->st_mode) || (S_ISCHR(st->st_mode) && isatty(fd)) ||
           (S_ISCHR(st->st_mode) && stat("/dev/null", &dev_null) == 0 &&
            st->st_rdev == dev_null.st_rdev);
}

/* Checks the type before it opens, since opening a device may have effects, and again after, since
 * the path may name another file by then. Opening waits for a pipe's writer only if
 * `allow_streams`. */
static int open_checked(const char *path, bool allow_streams, struct stat *st, struct error *err) {
    if (path_access_check(path, PATH_USE_READ, err) != OK) return err->code;
    if (stat(path, st) == 0 && !S_ISREG(st->st_mode) && (!allow_streams || S_ISDIR(st->st_mode)))
        return not_regular_error(path, st->st_mode, err);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | (allow_streams ? 0 : O_NONBLOCK));
    if (fd < 0) return error_errno(err, "cannot open '%s'", path);
    if (fstat(fd, st) < 0)
        error_errno(err, "cannot examine '%s'", path);
    else if (S_ISREG(st->st_mode) || (allow_streams && is_stream(fd, st)))
        return fd;
    else
        not_regular_error(path, st->st_mode, err);
    close(fd);
    return err->code;
}

int file_open_regular(const char *path, struct stat *st, struct error *err) {
    return open_checked(path, false, st, err);
}

size_t file_read_head(const char *path, void *out, size_t size) {
    struct stat st;
    struct error ignored;
    int fd = file_open_regular(path, &st, &ignored);
    if (fd < 0) return 0;
    size_t n_read = 0;
    while (n_read < size) {
        ssize_t n = read(fd, (uint8_t *)out + n_read, size - n_read);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        n_read += (size_t)n;
    }
    close(fd);
    return n_read;
}

/* Calls fn(ctx, bytes, n) for each part of the file, which may be a pipe. Stops at the first result
 * of fn other than OK and returns it. */
static int file_read_chunks(const char *path, int (*fn)(void *ctx, const void *p, size_t n),
                            void *ctx, struct error *err) {
    struct stat st;
    int fd = open_checked(path, !atomic_load(&only_regular), &st, err);
    if (fd < 0) return fd;
    enum { CHUNK = 256 * 1024 };
    uint8_t *chunk = xmalloc(CHUNK);
    int rc = OK;
    while (rc == OK) {
        ssize_t n = read(fd, chunk, CHUNK);
        if (n == 0) break;
        if (n < 0 && errno == EINTR) continue;
        rc = n < 0 ? error_errno(err, "cannot read '%s'", path) : fn(ctx, chunk, (size_t)n);
    }
    free(chunk);
    close(fd);
    return rc;
}

struct read_ctx {
    const char *path;
    struct buf *out;
    size_t limit, start;
    struct error *err;
};

static int read_append(void *ctx, const void *p, size_t n) {
    struct read_ctx *s = ctx;
    if (n > s->limit - (s->out->len - s->start))
        return error_set(s->err, ERR_MEMORY, "'%s' is larger than the limit of %zu bytes", s->path,
                         s->limit);
    int rc = buf_reserve(s->out, n, s->err);
    if (rc == OK) buf_add(s->out, p, n);
    return rc;
}

int file_read(const char *path, size_t limit, struct buf *out, struct error *err) {
    struct read_ctx s = {path, out, limit, out->len, err};
    buf_add(out, "", 0); /* an empty file still gives a terminated string */
    int rc = file_read_chunks(path, read_append, &s, err);
    if (rc != OK) {
        out->len = s.start;
        out->data[out->len] = '\0';
    }
    return rc;
}

/* The path to replace, malloc'ed: `path` itself, or the target if it is a link. NULL if it must not
 * be replaced. *mode: the mode of the old file; 0 if `path` does not exist. */
static char *atomic_file_target(const char *path, mode_t *mode, struct error *err) {
    struct stat st;
    *mode = 0;
    if (lstat(path, &st) < 0) return xstrdup(path);
    char *target = S_ISLNK(st.st_mode) ? realpath(path, NULL) : xstrdup(path);
    if (!target || stat(target, &st) < 0) {
        error_errno(err, "cannot follow the link '%s'", path);
        free(target);
        return NULL;
    }
    if (!S_ISREG(st.st_mode)) {
        error_set(err, ERR_IO, "cannot replace '%s': it is not a regular file", path);
        free(target);
        return NULL;
    }
    *mode = st.st_mode & 07777;
    return target;
}

/* Creates a temporary that did not exist before. The counter gives each thread, and each try after
 * a leftover, another name. Returns the descriptor, or -1 with errno. The temporary is locked until
 * it is renamed or removed: dir.c removes unlocked ones. */
static int atomic_file_create(struct atomic_file *w, mode_t mode) {
    static atomic_uint counter;
    for (int tries = 0; tries < 1000; tries++) {
        unsigned n = atomic_fetch_add(&counter, 1);
        w->tmp = n ? xasprintf("%s.tmp-%ld-%u", w->path, (long)getpid(), n)
                   : xasprintf("%s.tmp-%ld", w->path, (long)getpid());
        int fd = open(w->tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (fd >= 0 && tempfile_claim(fd, w->tmp)) return fd;
        int saved_errno = fd >= 0 ? EEXIST : errno;
        if (fd >= 0) close(fd);
        free(w->tmp);
        w->tmp = NULL;
        errno = saved_errno;
        if (saved_errno != EEXIST) return -1;
    }
    return -1;
}

/* `mode` 0: the mode of the replaced file, or the default of a new file. */
static int atomic_file_begin(struct atomic_file *w, const char *path, mode_t mode,
                             struct error *err) {
    *w = (struct atomic_file){0};
    mode_t old;
    w->path = atomic_file_target(path, &old, err);
    if (!w->path) return err->code;
    if (path_access_check(w->path, PATH_USE_WRITE, err) != OK) {
        atomic_file_abort(w);
        return err->code;
    }
    if (!mode) mode = old;
    tempfile_remove_stale(w->path);
    /* Before fchmod the mode grants nothing that the final mode does not grant. */
    int fd = atomic_file_create(w, mode ? mode & 0600 : 0666);
    if (fd < 0) {
        error_errno(err, "cannot create '%s'", path);
        atomic_file_abort(w);
        return err->code;
    }
    if (mode && fchmod(fd, mode) < 0) mode = 0; /* this file system cannot set it: not an error */
    w->f = fdopen(fd, "wb");
    if (!w->f) {
        error_errno(err, "cannot open '%s'", w->tmp);
        close(fd);
        atomic_file_abort(w);
        return err->code;
    }
    return OK;
}

int atomic_file_open(struct atomic_file *w, const char *path, struct error *err) {
    return atomic_file_begin(w, path, 0, err);
}

int atomic_file_write(struct atomic_file *w, const void *p, size_t n, struct error *err) {
    CHECK(w->f != NULL);
    errno = 0;
    if (n && fwrite(p, 1, n, w->f) != n) return error_errno(err, "cannot write '%s'", w->path);
    w->pos += n;
    return OK;
}

/* Flushes the directory of `file`: only then does a rename in it survive a power failure. File
 * systems that cannot flush a directory return EINVAL. */
static int dir_sync(const char *file, struct error *err) {
    const char *slash = strrchr(file, '/');
    char *dir = !slash          ? xstrdup(".")
                : slash == file ? xstrdup("/")
                                : strndup(file, (size_t)(slash - file));
    CHECK(dir != NULL);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc = OK;
    if (fd < 0 || (fsync(fd) < 0 && errno != EINVAL && errno != EROFS))
        rc = error_errno(err, "'%s' is written, but its directory cannot be flushed", file);
    if (fd >= 0) close(fd);
    free(dir);
    return rc;
}

int atomic_file_commit(struct atomic_file *w, struct error *err) {
    CHECK(w->f != NULL);
    errno = 0;
    int rc = OK;
    if (fflush(w->f) != 0 || ferror(w->f) || fsync(fileno(w->f)) != 0)
        rc = error_errno(err, "cannot write '%s'", w->path);
    FILE *f = w->f;
    int lock_fd = fcntl(fileno(f), F_DUPFD_CLOEXEC, 0); /* keeps the lock until after the rename */
    w->f = NULL;
    if (fclose(f) != 0 && rc == OK) rc = error_errno(err, "cannot write '%s'", w->path);
    if (rc == OK && rename(w->tmp, w->path) != 0)
        rc = error_errno(err, "cannot replace '%s'", w->path);
    if (rc == OK) {
        free(w->tmp);
        w->tmp = NULL; /* it is PATH now: abort must not remove anything */
        rc = dir_sync(w->path, err);
    }
    if (lock_fd >= 0) close(lock_fd);
    atomic_file_abort(w);
    return rc;
}

void atomic_file_abort(struct atomic_file *w) {
    if (w->f) fclose(w->f);
    if (w->tmp) unlink(w->tmp);
    free(w->tmp);
    free(w->path);
    *w = (struct atomic_file){0};
}

int file_open_unnamed(const char *path, struct error *err) {
    char *name = xasprintf("%s.tmp-XXXXXX", path);
    int fd = path_access_check(name, PATH_USE_WRITE, err) == OK ? mkostemp(name, O_CLOEXEC) : -1;
    int rc = fd >= 0 ? fd : err->code ? err->code : error_errno(err, "cannot create '%s'", name);
    if (fd >= 0) unlink(name);
    free(name);
    return rc;
}

int file_write_at(int fd, const void *p, size_t size, int64_t offset, struct error *err) {
    for (size_t done = 0; done < size;) {
        ssize_t n = pwrite(fd, (const uint8_t *)p + done, size - done, offset + (off_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return error_errno(err, "cannot write a temporary file");
        done += (size_t)n;
    }
    return OK;
}

int file_read_at(int fd, void *p, size_t size, int64_t offset, struct error *err) {
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(fd, (uint8_t *)p + done, size - done, offset + (off_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return error_errno(err, "cannot read a temporary file");
        if (n == 0) return error_set(err, ERR_IO, "a temporary file is shorter than it was");
        done += (size_t)n;
    }
    return OK;
}

static int file_write_with_mode(const char *path, mode_t mode, const void *data, size_t size,
                                struct error *err) {
    struct atomic_file w;
    int rc = atomic_file_begin(&w, path, mode, err);
    if (rc != OK) return rc;
    rc = atomic_file_write(&w, data, size, err);
    if (rc == OK) rc = atomic_file_commit(&w, err);
    atomic_file_abort(&w);
    return rc;
}

int file_write(const char *path, const void *data, size_t size, struct error *err) {
    return file_write_with_mode(path, 0, data, size, err);
}

int file_write_private(const char *path, const void *data, size_t size, struct error *err) {
    return file_write_with_mode(path, 0600, data, size, err);
}

int path_rename(const char *from, const char *to, struct error *err) {
    if (path_access_check(from, PATH_USE_WRITE, err) != OK ||
        path_access_check(to, PATH_USE_WRITE, err) != OK)
        return err->code;
    if (rename(from, to) != 0) return error_errno(err, "cannot move '%s' to '%s'", from, to);
    int rc = dir_sync(to, err);
    return rc == OK ? dir_sync(from, err) : rc;
}

/* stat() that preserves errno: it is often called between a failure and its message. */
static bool stat_keep_errno(const char *path, struct stat *st) {
    int saved_errno = errno;
    bool exists = stat(path, st) == 0;
    errno = saved_errno;
    return exists;
}

bool path_exists(const char *path) {
    struct stat st;
    return stat_keep_errno(path, &st);
}

bool path_is_dir(const char *path) {
    struct stat st;
    return stat_keep_errno(path, &st) && S_ISDIR(st.st_mode);
}

const char *path_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

bool path_has_extension(const char *path, const char *extension) {
    const char *name = path_name(path);
    size_t n = strlen(name), m = strlen(extension);
    return n > m && strcasecmp(name + n - m, extension) == 0;
}

char *path_join(const char *dir, const char *name) {
    size_t n = dir ? strlen(dir) : 0;
    if (n == 0) return xstrdup(name);
    return xasprintf("%s%s%s", dir, dir[n - 1] == '/' ? "" : "/", name);
}

char *path_relative_to(const char *file, const char *path) {
    const char *slash = strrchr(file, '/');
    if (*path == '/' || !slash) return xstrdup(path);
    return xasprintf("%.*s/%s", (int)(slash - file), file, path);
}

int file_copy(const char *from_dir, const char *to_dir, const char *name, struct error *err) {
    char *from = path_join(from_dir, name), *to = path_join(to_dir, name);
    struct file_map m;
    int rc = file_map_open(&m, from, err);
    if (rc == OK) {
        rc = file_write(to, m.data, m.size, err);
        file_map_close(&m);
    }
    free(from);
    free(to);
    return rc;
}

void sha256_bytes(const void *p, size_t n, char out[HASH_LEN]) {
    struct sha256 h;
    sha256_init(&h);
    sha256_update(&h, p, n);
    sha256_final(&h, out);
}

static int hash_update(void *ctx, const void *p, size_t n) {
    sha256_update(ctx, p, n);
    return OK;
}

int sha256_file(const char *path, char out[HASH_LEN], struct error *err) {
    struct sha256 h;
    sha256_init(&h);
    int rc = file_read_chunks(path, hash_update, &h, err);
    if (rc == OK) sha256_final(&h, out);
    return rc;
}

bool hash_is_valid(const char *text) {
    return strlen(text) == HASH_LEN - 1 && strspn(text, "0123456789abcdef") == HASH_LEN - 1;
}

static uint8_t siphash_key[crypto_shorthash_KEYBYTES];

static void siphash_key_init(void) {
    CHECK(getrandom(siphash_key, sizeof siphash_key, 0) == sizeof siphash_key);
}

uint64_t hash_siphash(const void *p, size_t n) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    uint64_t h;
    pthread_once(&once, siphash_key_init);
    _Static_assert(sizeof h == crypto_shorthash_BYTES, "a hash of 64 bits");
    crypto_shorthash((uint8_t *)&h, p, n, siphash_key);
    return h;
}

uint64_t hash_fnv1a(const void *p, size_t n) {
    const uint8_t *bytes = p;
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) h = (h ^ bytes[i]) * 0x100000001b3u;
    /* FNV alone leaves the high bits of short keys almost unmixed. */
    h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdu;
    h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53u;
    return h ^ (h >> 33);
}

/* descriptors */

void fd_close(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

bool fd_write(int fd, const void *data, size_t n) {
    const char *p = data;
    while (n > 0) {
        ssize_t done = write(fd, p, n);
        if (done < 0 && errno == EAGAIN) poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, -1);
        if (done < 0 && errno != EINTR && errno != EAGAIN) return false;
        p += MAX(done, 0);
        n -= (size_t)MAX(done, 0);
    }
    return true;
}

/* Duplicates all descriptors to numbers from n on first, because one of them may have a number
 * below n that another one is to get. */
bool fds_remap(const int *from, int n) {
    int high[8];
    for (int i = 0; i < n; i++)
        if ((high[i] = fcntl(from[i], F_DUPFD_CLOEXEC, n)) < 0) return false;
    for (int i = 0; i < n; i++)
        if (dup2(high[i], i) < 0) return false;
    return true;
}
