/*
 * backup: creates, lists, deletes and prunes backups.
 *
 *     lock TO ─> databases ─> the other files ─> manifest
 *
 * Invariants.
 *   1. A blob appears by one rename, complete and flushed to the disk; a manifest is written after
 *      all of its blobs. So a kill leaves only temporary files and unreferenced blobs. The next
 *      call removes the temporary files, and uses or removes these blobs.
 *   2. Databases are copied before the folders are read, so any file that a database refers to
 *      was written before the folders are read.
 *   3. Blobs are deleted only after every remaining manifest has been read.
 */
#define _GNU_SOURCE
#include "backup/internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    FORMAT_VERSION = 1,
    READ_ATTEMPTS = 3, /* attempts to read a file that changes while it is read */
    DEPTH_MAX = 64,
    FILES_MAX = 1000000,
    PATH_BYTES = 4095,
    CHUNK = 256 << 10,
};
static const size_t MANIFEST_BYTES = (size_t)256 << 20;
static const int64_t SIZE_MAX_BYTES = (int64_t)1 << 50;

/* the folder */

static int backup_progress_step(struct backup_progress *w, int64_t bytes, struct error *err) {
    w->done += bytes;
    if (w->p->on_progress && !w->p->on_progress(w->p->ctx, w->done, MAX(w->done, w->total)))
        w->stopped = true;
    return w->stopped ? error_set(err, ERR_STATE, "the work was stopped by the caller") : OK;
}

int backup_copy_file(struct backup_progress *w, int fd, int64_t size, struct atomic_file *to,
                     const char *path, char hash[HASH_LEN], struct error *err) {
    struct sha256 h;
    uint8_t *chunk = xmalloc(CHUNK);
    int rc = OK;
    sha256_init(&h);
    for (int64_t at = 0; rc == OK && at < size;) {
        ssize_t n = pread(fd, chunk, (size_t)MIN(size - at, CHUNK), at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) rc = error_errno(err, "cannot read '%s'", path);
        if (n == 0) rc = error_set(err, ERR_STATE, "'%s' became shorter while it was read", path);
        if (n <= 0) break;
        sha256_update(&h, chunk, (size_t)n);
        at += n;
        if (to) rc = atomic_file_write(to, chunk, (size_t)n, err);
        if (rc == OK) rc = backup_progress_step(w, n, err);
    }
    free(chunk);
    sha256_final(&h, hash);
    return rc;
}

int backup_dir_make(const char *path, struct error *err) {
    if (path_is_dir(path)) return OK;
    int rc = dir_make(path, err);
    if (rc == OK && chmod(path, 0700) != 0) rc = error_errno(err, "cannot protect '%s'", path);
    return rc;
}

int backup_file_open(struct atomic_file *w, const char *path, uint32_t mode, struct error *err) {
    int rc = atomic_file_open(w, path, err);
    if (rc == OK && fchmod(fileno(w->f), mode) != 0) {
        rc = error_errno(err, "cannot protect '%s'", path);
        atomic_file_abort(w);
    }
    return rc;
}

int json_write_file(const char *path, const json_t *v, struct error *err) {
    struct atomic_file w;
    char *text = json_canonical(v);
    int rc = backup_file_open(&w, path, 0600, err);
    if (rc == OK) {
        rc = atomic_file_write(&w, text, strlen(text), err);
        if (rc == OK) rc = atomic_file_commit(&w, err);
        atomic_file_abort(&w);
    }
    free(text);
    return rc;
}

int backup_dir_lock(const char *to, struct error *err) {
    char *path = path_join(to, "lock");
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
        error_errno(err, "cannot open '%s'", path);
    } else if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK)
            error_set(err, ERR_STATE,
                      "another process is at work on the backups in '%s'; try again later", to);
        else
            error_errno(err, "cannot lock '%s'", path);
        close(fd);
        fd = -1;
    }
    free(path);
    return fd < 0 ? err->code : fd;
}

/* As backup_dir_lock, for a folder that must exist. */
static int existing_dir_lock(const char *to, struct error *err) {
    if (!path_is_dir(to)) return error_set(err, ERR_MISSING, "there are no backups in '%s'", to);
    return backup_dir_lock(to, err);
}

void backup_id_now(char id[BACKUP_ID_LEN]) {
    struct timespec now;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    size_t n = strftime(id, BACKUP_ID_LEN, "%Y%m%d-%H%M%S", &tm);
    CHECK(n == 15);
    snprintf(id + n, BACKUP_ID_LEN - n, "-%03u", (unsigned)now.tv_nsec / 1000000 % 1000);
}

bool backup_id_is_valid(const char *id) {
    static const char form[] = "dddddddd-dddddd-ddd";
    for (int i = 0; i < BACKUP_ID_LEN - 1; i++)
        if (form[i] == 'd' ? id[i] < '0' || id[i] > '9' : id[i] != form[i]) return false;
    return !id[BACKUP_ID_LEN - 1];
}

bool backup_is_restore_temp(const char *name) {
    const char *before = strstr(name, ".before-");
    char id[BACKUP_ID_LEN];
    if (text_ends_with(name, ".restoring") || text_ends_with(name, ".swapping")) return true;
    if (!before) return false;
    snprintf(id, sizeof id, "%.*s", BACKUP_ID_LEN - 1, before + strlen(".before-"));
    return backup_id_is_valid(id);
}

char *backup_blob_path(const char *to, const char *hash) {
    return xasprintf("%s/blobs/%.2s/%s", to, hash, hash);
}

/* manifests */

static char *manifest_path(const char *to, const char *id) {
    return xasprintf("%s/%s.json", to, id);
}

static bool name_is_valid(const char *name) {
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    return *name && *name != '.' && strlen(name) <= 64 && strspn(name, letters) == strlen(name);
}

/* Whether a path stays below its root: no part is empty, "." or "..", or the name of a restore's
 * temporary. */
static bool path_is_valid(const char *path) {
    if (!*path) return true; // the root itself is a file
    if (strlen(path) > PATH_BYTES) return false;
    for (const char *p = path;; p++) {
        size_t n = strcspn(p, "/");
        char *part = strndup(p, n);
        CHECK(part != NULL);
        bool good = n > 0 && strcmp(part, ".") != 0 && strcmp(part, "..") != 0 &&
                    !backup_is_restore_temp(part);
        free(part);
        if (!good) return false;
        p += n;
        if (!*p) return true;
    }
}

/* The order of a manifest's entries: by root, then by path. No two entries are equal. */
static int entry_names_compare(const char *root_a, const char *a, const char *root_b,
                               const char *b) {
    int roots = strcmp(root_a, root_b);
    return roots ? roots : strcmp(a, b);
}

static bool is_integer_up_to(const json_t *v, const char *key, int64_t max) {
    const json_t *n = json_object_get(v, key);
    return json_is_integer(n) && json_integer_value(n) >= 0 && json_integer_value(n) <= max;
}

static int file_entry_check(const json_t *f, const json_t *previous, const json_t *roots,
                            struct error *err) {
    const char *root = json_get_string(f, "root"), *path = json_get_string(f, "path");
    if (!json_is_string(json_object_get(f, "path")) || !path_is_valid(path))
        return error_set(err, ERR_FORMAT, "'%.200s' is not a path below its root", path);
    if (!json_object_get(roots, root))
        return error_set(err, ERR_FORMAT, "'%.200s' is in '%.64s', which is not a root", path,
                         root);
    if (previous && entry_names_compare(json_get_string(previous, "root"),
                                        json_get_string(previous, "path"), root, path) >= 0)
        return error_set(err, ERR_FORMAT, "'%.200s' is listed twice or out of order", path);
    bool dir = json_is_true(json_object_get(f, "dir"));
    if (!is_integer_up_to(f, "mode", 0777) ||
        (dir ? !*path
             : !is_integer_up_to(f, "size", SIZE_MAX_BYTES) ||
                   !hash_is_valid(json_get_string(f, "sha256"))))
        return error_set(err, ERR_FORMAT, "'%.200s' lacks its mode, size or hash", path);
    return OK;
}

static int manifest_check(const json_t *v, const char *id, struct error *err) {
    const json_t *roots = json_object_get(v, "roots"), *files = json_object_get(v, "files"), *f,
                 *previous = NULL, *path;
    const char *name;
    size_t i;
    if (json_get_number(v, "format") != FORMAT_VERSION)
        return error_set(err, ERR_MISMATCH, "it is not of format %d, which this shoal knows",
                         FORMAT_VERSION);
    if (strcmp(json_get_string(v, "id"), id) != 0)
        return error_set(err, ERR_FORMAT, "it has the id '%.40s'", json_get_string(v, "id"));
    if (!json_is_object(roots) || json_object_size(roots) > BACKUP_ROOTS_MAX ||
        !json_is_array(files) || json_array_size(files) > FILES_MAX)
        return error_set(err, ERR_FORMAT, "it lacks its roots or files, or has too many");
    json_object_foreach ((json_t *)(uintptr_t)roots, name, path)
        if (!name_is_valid(name) || !json_is_string(path))
            return error_set(err, ERR_FORMAT, "'%.64s' is not the name of a root", name);
    json_array_foreach (files, i, f) {
        int rc = file_entry_check(f, previous, roots, err);
        if (rc != OK) return rc;
        previous = f;
    }
    return OK;
}

/* The hash of a manifest without its member "hash". */
static void manifest_hash(const json_t *v, char hash[HASH_LEN]) {
    json_t *unhashed = json_copy((json_t *)(uintptr_t)v);
    json_object_del(unhashed, "hash");
    char *text = json_canonical(unhashed);
    sha256_bytes(text, strlen(text), hash);
    free(text);
    json_decref(unhashed);
}

json_t *backup_manifest_read(const char *to, const char *id, struct error *err) {
    struct buf text = {0};
    char hash[HASH_LEN];
    if (!backup_id_is_valid(id)) {
        error_set(err, ERR_MISSING, "'%.60s' is not a backup's id, such as 20261122-202530-123",
                  id);
        return NULL;
    }
    char *path = manifest_path(to, id);
    int rc = path_exists(path) ? file_read(path, MANIFEST_BYTES, &text, err)
                               : error_set(err, ERR_MISSING, "no backup '%s' in '%s'", id, to);
    json_t *v = rc == OK ? json_parse(text.data, text.len, path, err) : NULL;
    buf_release(&text);
    free(path);
    if (!v) {
        if (rc == OK) error_wrap(err, "backup '%s' is damaged", id);
        return NULL;
    }
    manifest_hash(v, hash);
    rc = strcmp(hash, json_get_string(v, "hash")) == 0
             ? manifest_check(v, id, err)
             : error_set(err, ERR_FORMAT, "its hash is not that of its content");
    if (rc == OK) return v;
    error_wrap(err, "backup '%s' is damaged", id);
    json_decref(v);
    return NULL;
}

static int compare_newest_first(const void *a, const void *b) {
    return strcmp(*(char *const *)b, *(char *const *)a);
}

int backup_ids_list(const char *to, struct strings *out, struct error *err) {
    DIR *d = opendir(to);
    if (!d) return errno == ENOENT ? OK : error_errno(err, "cannot read '%s'", to);
    for (const struct dirent *f; (f = readdir(d));) {
        char id[BACKUP_ID_LEN];
        snprintf(id, sizeof id, "%.*s", BACKUP_ID_LEN - 1, f->d_name);
        if (backup_id_is_valid(id) && strcmp(f->d_name + BACKUP_ID_LEN - 1, ".json") == 0)
            strings_add(out, id);
    }
    closedir(d);
    if (out->n) qsort(out->v, (size_t)out->n, sizeof *out->v, compare_newest_first);
    return OK;
}

int backup_find_newest(const char *to, char id[BACKUP_ID_LEN], struct error *err) {
    struct strings ids = {0};
    int rc = backup_ids_list(to, &ids, err);
    if (rc == OK && !ids.n) rc = error_set(err, ERR_MISSING, "there are no backups in '%s'", to);
    if (rc == OK) snprintf(id, BACKUP_ID_LEN, "%s", ids.v[0]);
    strings_release(&ids);
    return rc;
}

/* A manifest without hash, format and roots, and with the number of files instead of their list. */
static json_t *manifest_summary(const json_t *v) {
    json_t *summary = json_copy((json_t *)(uintptr_t)v);
    json_object_set_new(summary, "files",
                        json_integer((json_int_t)json_array_size(json_object_get(v, "files"))));
    json_object_del(summary, "hash");
    json_object_del(summary, "format");
    json_object_del(summary, "roots");
    return summary;
}

json_t *backup_list(const char *to, struct error *err) {
    struct strings ids = {0};
    json_t *list = backup_ids_list(to, &ids, err) == OK ? json_array() : NULL;
    for (int i = 0; list && i < ids.n; i++) {
        struct error read_err;
        json_t *v = backup_manifest_read(to, ids.v[i], &read_err);
        json_array_append_new(list,
                              v ? manifest_summary(v)
                                : json_pack("{s:s,s:s}", "id", ids.v[i], "problem", read_err.text));
        json_decref(v);
    }
    strings_release(&ids);
    return list;
}

/* collecting entries */

struct backup_entry {
    const char *root;
    char *path;
    uint32_t mode;
    int64_t size;
    bool dir;
    char hash[HASH_LEN];
};

struct backup_run {
    struct backup_progress work;
    const char *to;
    struct backup_entry *v;
    int n, cap;
    struct stat *separate_roots; /* [n_separate_roots] TO and the roots; a walk of another root
                                  * skips them */
    int n_separate_roots;
    bool databases; /* true in the first round, which copies databases; false in the second, which
                       copies all other files */
    json_t *skipped, *roots;
    int64_t new_bytes, new_blobs;
};

static void skipped_add(struct backup_run *run, const char *root, const char *path,
                        const char *why) {
    struct buf text = {0};
    buf_printf(&text, "%s: ", root);
    buf_add_sanitized(&text, path, strlen(path));
    buf_printf(&text, "%s%s", *path ? " " : "", why);
    json_array_append_new(run->skipped, json_string(text.data));
    buf_release(&text);
}

/* Whether a backup skips a file of this name: a lock, an unfinished file or a companion file of
 * SQLite. */
static bool is_transient(const char *name) {
    static const char *const ends[] = {".lock",   ".partial", ".partial.etag",
                                       ".db-wal", ".db-shm",  ".db-journal"};
    if (strcmp(name, "lock") == 0 || strstr(name, ".tmp-")) return true;
    for (size_t i = 0; i < ARRAY_LEN(ends); i++)
        if (text_ends_with(name, ends[i])) return true;
    return false;
}

/* Whether a file is a SQLite database: its name ends in ".db", and it begins with SQLite's magic.
 */
static bool is_database(const char *path) {
    static const char magic[16] = "SQLite format 3";
    char head[sizeof magic];
    if (!text_ends_with(path, ".db")) return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool found = fd >= 0 && pread(fd, head, sizeof head, 0) == (ssize_t)sizeof head &&
                 memcmp(head, magic, sizeof head) == 0;
    if (fd >= 0) close(fd);
    return found;
}

static int entry_add(struct backup_run *run, const char *root, const char *path,
                     const struct stat *st, struct backup_entry **entry, struct error *err) {
    if (run->n == FILES_MAX)
        return error_set(err, ERR_MEMORY, "there are more than %d files to back up", FILES_MAX);
    if (run->n == run->cap) {
        run->cap = MAX(2 * run->cap, 256);
        run->v = xrealloc(run->v, (size_t)run->cap * sizeof *run->v);
    }
    *entry = &run->v[run->n++];
    **entry = (struct backup_entry){.root = root,
                                    .path = xstrdup(path),
                                    .mode = st->st_mode & 0777,
                                    .dir = S_ISDIR(st->st_mode)};
    return OK;
}

/* blobs */

static bool blob_exists(const struct backup_run *run, const struct backup_entry *e) {
    struct stat st;
    char *path = backup_blob_path(run->to, e->hash);
    bool exists = stat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_size == e->size;
    free(path);
    return exists;
}

static char *blob_path_prepare(const struct backup_run *run, const char *hash, struct error *err) {
    char *dir = xasprintf("%s/blobs/%.2s", run->to, hash);
    int rc = backup_dir_make(dir, err);
    free(dir);
    return rc == OK ? backup_blob_path(run->to, hash) : NULL;
}

static void new_blob_count(struct backup_run *run, const struct backup_entry *e) {
    run->new_bytes += e->size;
    run->new_blobs++;
}

/* Reads the file, whose hash is known, a second time and writes its blob. */
static int blob_write(struct backup_run *run, int fd, const struct backup_entry *e,
                      const char *path, struct error *err) {
    struct atomic_file w;
    char hash[HASH_LEN], *blob = blob_path_prepare(run, e->hash, err);
    int rc = blob ? backup_file_open(&w, blob, 0600, err) : err->code;
    free(blob);
    if (rc != OK) return rc;
    struct backup_progress quiet = {
        .p = run->work.p, .done = run->work.done, .total = run->work.total};
    rc = backup_copy_file(&quiet, fd, e->size, &w, path, hash, err);
    run->work.stopped = quiet.stopped;
    if (rc == OK && strcmp(hash, e->hash) != 0)
        rc = error_set(err, ERR_STATE, "'%s' changed while it was read", path);
    if (rc == OK) rc = atomic_file_commit(&w, err);
    atomic_file_abort(&w);
    if (rc == OK) new_blob_count(run, e);
    return rc;
}

/* Backs up a file at its current size, without bytes that are appended meanwhile. ERR_STATE: the
 * file has changed while it was read. */
static int file_try_back_up(struct backup_run *run, int fd, struct backup_entry *e,
                            const char *path, struct error *err) {
    struct stat st;
    int64_t done = run->work.done;
    if (fstat(fd, &st) != 0) return error_errno(err, "cannot examine '%s'", path);
    e->size = st.st_size;
    int rc = backup_copy_file(&run->work, fd, e->size, NULL, path, e->hash, err);
    if (rc == OK && !blob_exists(run, e)) rc = blob_write(run, fd, e, path, err);
    if (rc != OK) run->work.done = done;
    return rc;
}

static int file_back_up(struct backup_run *run, const char *path, struct backup_entry *e,
                        struct error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW), rc = ERR_STATE;
    if (fd < 0) return error_errno(err, "cannot open '%s'", path);
    for (int i = 0; i < READ_ATTEMPTS && rc == ERR_STATE && !run->work.stopped; i++)
        rc = file_try_back_up(run, fd, e, path, err);
    close(fd);
    return rc;
}

/* Copies a database as of one moment into a separate file. */
static int database_copy(const char *from, const char *to, struct error *err) {
    sqlite3 *source = NULL, *dest = NULL;
    sqlite3_backup *backup = NULL;
    int rc = sqlite3_open_v2(from, &source, SQLITE_OPEN_READWRITE, NULL);
    if (rc == SQLITE_OK)
        rc = sqlite3_open_v2(to, &dest, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, NULL);
    if (rc == SQLITE_OK) {
        sqlite3_busy_timeout(source, 10000);
        // No process reads the copy before it is complete.
        sqlite3_exec(dest, "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF", NULL, NULL, NULL);
        backup = sqlite3_backup_init(dest, "main", source, "main");
        rc = backup ? sqlite3_backup_step(backup, -1) : sqlite3_errcode(dest);
        int finish_rc = sqlite3_backup_finish(backup);
        if (rc == SQLITE_DONE) rc = finish_rc;
    }
    if (rc != SQLITE_OK)
        error_set(err, ERR_IO, "cannot copy the database '%s': %s", from, sqlite3_errstr(rc));
    sqlite3_close(source);
    sqlite3_close(dest);
    return rc == SQLITE_OK ? OK : err->code;
}

/* Hashes the copy of a database and moves it to its place as a blob, unless the blob exists. */
static int database_store_blob(struct backup_run *run, const char *copy, struct backup_entry *e,
                               struct error *err) {
    struct stat st;
    int fd = open(copy, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return error_errno(err, "cannot open '%s'", copy);
    e->size = fstat(fd, &st) == 0 ? st.st_size : 0;
    int rc = backup_copy_file(&run->work, fd, e->size, NULL, copy, e->hash, err);
    if (rc == OK && !blob_exists(run, e)) {
        char *blob = blob_path_prepare(run, e->hash, err);
        rc = !blob                                     ? err->code
             : fchmod(fd, 0600) != 0 || fsync(fd) != 0 ? error_errno(err, "cannot write '%s'", copy)
                                                       : path_rename(copy, blob, err);
        free(blob);
        if (rc == OK) new_blob_count(run, e);
    }
    close(fd);
    return rc;
}

static int database_back_up(struct backup_run *run, const char *path, struct backup_entry *e,
                            struct error *err) {
    char *copy = xasprintf("%s/blobs/database.tmp-%ld", run->to, (long)getpid());
    unlink(copy);
    int rc = database_copy(path, copy, err);
    if (rc == OK) rc = database_store_blob(run, copy, e, err);
    unlink(copy);
    free(copy);
    return rc;
}

/* reading the folders */

static int path_back_up(struct backup_run *run, const struct backup_root *r, const char *path,
                        int depth, struct error *err);

static bool is_separate_root(const struct backup_run *run, const struct stat *st) {
    for (int i = 0; i < run->n_separate_roots; i++)
        if (run->separate_roots[i].st_dev == st->st_dev &&
            run->separate_roots[i].st_ino == st->st_ino)
            return true;
    return false;
}

int dir_list_names(const char *dir, struct strings *out, struct error *err) {
    DIR *d = opendir(dir);
    if (!d) return error_errno(err, "cannot read '%s'", dir);
    for (const struct dirent *f; (f = readdir(d));)
        if (strcmp(f->d_name, ".") != 0 && strcmp(f->d_name, "..") != 0)
            strings_add(out, f->d_name);
    closedir(d);
    return OK;
}

static int dir_back_up(struct backup_run *run, const struct backup_root *r, const char *path,
                       const char *full, int depth, struct error *err) {
    struct strings names = {0};
    int rc = depth < DEPTH_MAX ? dir_list_names(full, &names, err)
                               : error_set(err, ERR_MEMORY, "'%s' is nested too deeply", full);
    if (rc == ERR_MISSING) rc = OK; // the folder was removed meanwhile, with its content
    for (int i = 0; rc == OK && i < names.n; i++) {
        char *child = path_join(path, names.v[i]);
        rc = path_back_up(run, r, child, depth + 1, err);
        free(child);
    }
    strings_release(&names);
    return rc;
}

static int regular_file_back_up(struct backup_run *run, const struct backup_root *r,
                                const char *path, const char *full, const struct stat *st,
                                struct error *err) {
    struct backup_entry *e;
    if (is_database(full) != run->databases) return OK;
    int rc = entry_add(run, r->name, path, st, &e, err);
    if (rc != OK) return rc;
    rc = run->databases ? database_back_up(run, full, e, err) : file_back_up(run, full, e, err);
    bool vanished = !path_exists(full);
    if (rc == OK || run->work.stopped || (rc != ERR_STATE && !vanished)) return rc;
    free(run->v[--run->n].path);
    skipped_add(run, r->name, path,
                vanished ? "was removed while it was read" : "kept changing while it was read");
    return OK;
}

/* Whether it is the start-up token of a running server, which grants access: a file of mode 0600
 * at the top of a state folder. */
static bool is_token(const char *path, const struct stat *st) {
    return strcmp(path, "token") == 0 && (st->st_mode & 0777) == 0600;
}

/* Backs up a file, or a folder with its content; path "" is the root. */
static int path_back_up(struct backup_run *run, const struct backup_root *r, const char *path,
                        int depth, struct error *err) {
    char *full = *path ? path_join(r->path, path) : xstrdup(r->path);
    const char *name = path_name(path);
    struct stat st;
    struct backup_entry *e;
    int rc = OK;
    json_t *path_json = json_from_path(path);
    bool is_text = json_is_string(path_json),
         first_round = run->databases; // the second round reports skipped files
    json_decref(path_json);
    if ((*path ? lstat(full, &st) : stat(full, &st)) != 0) {
        if (errno != ENOENT) rc = error_errno(err, "cannot examine '%s'", full);
    } else if (S_ISDIR(st.st_mode)
                   ? *path && (is_separate_root(run, &st) || backup_is_restore_temp(name))
                   : is_transient(name) || is_token(path, &st) || backup_is_restore_temp(name)) {
        rc = OK;
    } else if (!is_text || strlen(path) > PATH_BYTES) {
        if (!first_round) skipped_add(run, r->name, path, "has a name that cannot be stored");
    } else if (S_ISLNK(st.st_mode)) {
        if (!first_round) skipped_add(run, r->name, path, "is a link");
    } else if (S_ISDIR(st.st_mode)) {
        if (*path && !run->databases) rc = entry_add(run, r->name, path, &st, &e, err);
        if (rc == OK) rc = dir_back_up(run, r, path, full, depth, err);
    } else if (S_ISREG(st.st_mode)) {
        rc = regular_file_back_up(run, r, path, full, &st, err);
    }
    free(full);
    return rc;
}

/* creating */

/* Estimates the bytes to back up in a file or folder, for the progress report. `root`: it is a
 * root, which may be a link. */
static int64_t estimate_bytes(const struct backup_run *run, const char *full, bool root,
                              int depth) {
    struct strings names = {0};
    struct error none;
    struct stat st;
    int64_t bytes = 0;
    if ((root ? stat(full, &st) : lstat(full, &st)) != 0) return 0;
    if (!S_ISDIR(st.st_mode)) return S_ISREG(st.st_mode) ? st.st_size : 0;
    if ((!root && is_separate_root(run, &st)) || depth == DEPTH_MAX) return 0;
    dir_list_names(full, &names, &none);
    for (int i = 0; i < names.n; i++) {
        char *child = path_join(full, names.v[i]);
        bytes += estimate_bytes(run, child, false, depth + 1);
        free(child);
    }
    strings_release(&names);
    return bytes;
}

static int roots_check(struct backup_run *run, struct error *err) {
    const struct backup_options *p = run->work.p;
    run->separate_roots = xcalloc((size_t)p->n_roots + 1, sizeof *run->separate_roots);
    if (stat(run->to, &run->separate_roots[run->n_separate_roots++]) != 0)
        return error_errno(err, "cannot examine '%s'", run->to);
    for (int i = 0; i < p->n_roots; i++) {
        const struct backup_root *r = &p->roots[i];
        if (!name_is_valid(r->name) || json_object_get(run->roots, r->name))
            return error_set(err, ERR_USAGE,
                             "'%s' is not a valid name of a root, or is given twice", r->name);
        if (stat(r->path, &run->separate_roots[run->n_separate_roots]) == 0) {
            run->n_separate_roots++;
            json_object_set_new(run->roots, r->name, json_from_path(r->path));
        } else if (errno == ENOENT) {
            skipped_add(run, r->name, r->path, "does not exist");
        } else {
            return error_errno(err, "cannot examine '%s'", r->path);
        }
    }
    if (!json_object_size(run->roots))
        return error_set(err, ERR_MISSING, "nothing to back up: '%s' does not exist",
                         p->n_roots ? p->roots[0].path : "");
    for (int i = 0; i < p->n_roots; i++)
        run->work.total += estimate_bytes(run, p->roots[i].path, true, 0);
    return OK;
}

static int roots_back_up(struct backup_run *run, bool databases, struct error *err) {
    int rc = OK;
    run->databases = databases;
    for (int i = 0; rc == OK && i < run->work.p->n_roots; i++)
        if (json_object_get(run->roots, run->work.p->roots[i].name))
            rc = path_back_up(run, &run->work.p->roots[i], "", 0, err);
    return rc;
}

static int compare_entries(const void *a, const void *b) {
    const struct backup_entry *x = a, *y = b;
    return entry_names_compare(x->root, x->path, y->root, y->path);
}

static json_t *entries_json(const struct backup_run *run, int64_t *bytes) {
    json_t *files = json_array();
    for (int i = 0; i < run->n; i++) {
        const struct backup_entry *e = &run->v[i];
        json_t *v = json_pack("{s:s,s:s,s:i}", "root", e->root, "path", e->path, "mode", e->mode);
        if (e->dir) {
            json_object_set_new(v, "dir", json_true());
        } else {
            json_object_set_new(v, "size", json_integer(e->size));
            json_object_set_new(v, "sha256", json_string(e->hash));
            *bytes += e->size;
        }
        json_array_append_new(files, v);
    }
    return files;
}

static json_t *manifest_build(struct backup_run *run) {
    char id[BACKUP_ID_LEN], now[32], hash[HASH_LEN];
    char *path = NULL;
    int64_t bytes = 0;
    do { // repeats until the next millisecond if the id is in use
        backup_id_now(id);
        free(path);
        path = manifest_path(run->to, id);
    } while (path_exists(path));
    free(path);
    if (run->n) qsort(run->v, (size_t)run->n, sizeof *run->v, compare_entries);
    json_t *files = entries_json(run, &bytes);
    json_t *v = json_pack("{s:i,s:s,s:s,s:s,s:O,s:O,s:I,s:I,s:I,s:o}", "format", FORMAT_VERSION,
                          "id", id, "created", clock_utc(now), "shoal", SHOAL_VERSION, "roots",
                          run->roots, "left_out", run->skipped, "bytes", (json_int_t)bytes,
                          "new_bytes", (json_int_t)run->new_bytes, "new_blobs",
                          (json_int_t)run->new_blobs, "files", files);
    manifest_hash(v, hash);
    json_object_set_new(v, "hash", json_string(hash));
    return v;
}

static json_t *manifest_write(struct backup_run *run, struct error *err) {
    json_t *v = manifest_build(run), *summary = NULL;
    char *path = manifest_path(run->to, json_get_string(v, "id"));
    if (json_write_file(path, v, err) == OK) summary = manifest_summary(v);
    free(path);
    json_decref(v);
    return summary;
}

/* Calls fn for each file in TO/blobs and its subfolders, including temporary files. */
static int blobs_each(const char *to, int (*fn)(void *ctx, const char *path, const char *name),
                      void *ctx, struct error *err) {
    char *top = path_join(to, "blobs");
    struct strings dirs = {0};
    int rc = path_is_dir(top) ? dir_list_names(top, &dirs, err) : OK;
    for (int i = 0; rc == OK && i < dirs.n; i++) {
        struct strings names = {0};
        char *dir = path_join(top, dirs.v[i]);
        if (path_is_dir(dir))
            rc = dir_list_names(dir, &names, err);
        else
            fn(ctx, dir, dirs.v[i]);
        for (int k = 0; rc == OK && k < names.n; k++) {
            char *path = path_join(dir, names.v[k]);
            fn(ctx, path, names.v[k]);
            free(path);
        }
        strings_release(&names);
        free(dir);
    }
    strings_release(&dirs);
    free(top);
    return rc;
}

/* Removes a temporary file of a killed call; the lock excludes live ones. */
static int leftover_remove(void *ctx, const char *path, const char *name) {
    (void)ctx;
    return strstr(name, ".tmp-") ? unlink(path) : 0;
}

static void backup_run_release(struct backup_run *run) {
    for (int i = 0; i < run->n; i++) free(run->v[i].path);
    free(run->v);
    free(run->separate_roots);
    json_decref(run->skipped);
    json_decref(run->roots);
}

json_t *backup_create(const struct backup_options *p, struct error *err) {
    struct backup_run run = {
        .work.p = p, .to = p->to, .skipped = json_array(), .roots = json_object()};
    char *blobs = path_join(p->to, "blobs");
    json_t *summary = NULL;
    int lock = -1, rc = backup_dir_make(p->to, err);
    if (rc == OK) rc = backup_dir_make(blobs, err);
    if (rc == OK && (lock = backup_dir_lock(p->to, err)) < 0) rc = lock;
    if (rc == OK) rc = blobs_each(p->to, leftover_remove, NULL, err);
    if (rc == OK) rc = roots_check(&run, err);
    if (rc == OK) rc = roots_back_up(&run, true, err);
    if (rc == OK) rc = roots_back_up(&run, false, err);
    if (rc == OK) summary = manifest_write(&run, err);
    if (lock >= 0) close(lock);
    backup_run_release(&run);
    free(blobs);
    return summary;
}

/* pruning */

struct prune_state {
    char (*referenced)[HASH_LEN]; /* [n] hashes that the remaining manifests name, sorted */
    size_t n, cap;
    int64_t blobs, bytes;
};

static int compare_hashes(const void *a, const void *b) {
    return strcmp(a, b);
}

static int referenced_add(struct prune_state *k, const char *to, const char *id,
                          struct error *err) {
    json_t *v = backup_manifest_read(to, id, err);
    if (!v) return err->code;
    const json_t *f, *files = json_object_get(v, "files");
    size_t i;
    json_array_foreach (files, i, f) {
        if (json_object_get(f, "dir")) continue;
        if (k->n == k->cap) {
            k->cap = MAX(2 * k->cap, 1024);
            k->referenced = xrealloc(k->referenced, k->cap * sizeof *k->referenced);
        }
        memcpy(k->referenced[k->n++], json_get_string(f, "sha256"), HASH_LEN);
    }
    json_decref(v);
    return OK;
}

static int blob_remove_unreferenced(void *ctx, const char *path, const char *name) {
    struct prune_state *k = ctx;
    struct stat st;
    if (!hash_is_valid(name)) return leftover_remove(NULL, path, name);
    if (k->n && bsearch(name, k->referenced, k->n, sizeof *k->referenced, compare_hashes)) return 0;
    if (stat(path, &st) == 0 && unlink(path) == 0) {
        k->blobs++;
        k->bytes += st.st_size;
    }
    return 0;
}

static int manifests_remove(const char *to, const struct strings *ids, const char *keep,
                            struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < ids->n; i++) {
        if (keep[i]) continue;
        char *path = manifest_path(to, ids->v[i]);
        if (unlink(path) != 0) rc = error_errno(err, "cannot remove '%s'", path);
        free(path);
    }
    return rc;
}

/* Deletes the backups whose keep[i] is 0, and the blobs that no other backup names. Reads every
 * remaining manifest before it deletes anything. */
static json_t *backups_remove(const char *to, const struct strings *ids, const char *keep,
                              struct error *err) {
    struct prune_state k = {0};
    int rc = OK, n_removed = 0;
    for (int i = 0; rc == OK && i < ids->n; i++) {
        n_removed += !keep[i];
        if (keep[i]) rc = referenced_add(&k, to, ids->v[i], err);
    }
    if (rc != OK) error_wrap(err, "nothing is removed: a remaining backup cannot be read");
    if (k.n) qsort(k.referenced, k.n, sizeof *k.referenced, compare_hashes);
    if (rc == OK) rc = manifests_remove(to, ids, keep, err);
    if (rc == OK) rc = blobs_each(to, blob_remove_unreferenced, &k, err);
    free(k.referenced);
    return rc == OK ? json_pack("{s:i,s:I,s:I}", "backups", n_removed, "blobs", (json_int_t)k.blobs,
                                "bytes", (json_int_t)k.bytes)
                    : NULL;
}

/* Refuses to delete a backup that a scheduled restore needs. */
static int check_not_scheduled(const char *to, const struct strings *ids, const char *keep,
                               struct error *err) {
    json_t *scheduled = backup_restore_scheduled(to);
    int rc = OK;
    for (int i = 0; scheduled && i < ids->n; i++)
        if (!keep[i] && strcmp(ids->v[i], json_get_string(scheduled, "id")) == 0)
            rc = error_set(err, ERR_STATE,
                           "backup '%s' is scheduled to be restored; cancel that first", ids->v[i]);
    json_decref(scheduled);
    return rc;
}

/* Deletes the backup `id` or, if id is NULL, all backups except the newest `n`. */
static json_t *prune(const char *to, const char *id, int64_t n, struct error *err) {
    struct strings ids = {0};
    json_t *out = NULL;
    bool found = !id;
    int lock = existing_dir_lock(to, err);
    if (lock < 0) return NULL;
    int rc = backup_ids_list(to, &ids, err);
    char *keep = xcalloc((size_t)ids.n + 1, 1);
    for (int i = 0; i < ids.n; i++) {
        keep[i] = id ? strcmp(id, ids.v[i]) != 0 : i < n;
        found |= !keep[i];
    }
    if (rc == OK && !found) rc = error_set(err, ERR_MISSING, "no backup '%.60s' in '%s'", id, to);
    if (rc == OK) rc = check_not_scheduled(to, &ids, keep, err);
    if (rc == OK) out = backups_remove(to, &ids, keep, err);
    free(keep);
    strings_release(&ids);
    close(lock);
    return out;
}

json_t *backup_delete(const char *to, const char *id, struct error *err) {
    return prune(to, id, 0, err);
}

json_t *backup_prune(const char *to, int64_t keep, struct error *err) {
    return prune(to, NULL, keep, err);
}
