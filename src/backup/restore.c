/*
 * restore: verifies and restores backups.
 *
 *     verify ─> write PATH.restoring for each root ─> write restore.json ─> rename ─>
 *     delete restore.json
 *
 * Invariants.
 *   1. Until restore.json has a `stamp`, the roots are unchanged. A failure before that leaves
 *      only PATH.restoring, which the next call rewrites.
 *   2. From then on the names of the files next to a root record how far its renames are, so they
 *      can be continued after a kill. PATH.swapping holds the entries that still have to be moved
 *      in. Once PATH.before-STAMP exists, the old content of PATH has been moved out.
 *   3. A folder inside a root that is backed up separately (the backups, another root) stays in
 *      place: the entries of the root are moved, not the root.
 *
 * The paths in a manifest are untrusted input. backup.c validates them, and they are only opened
 * below a folder that was created here.
 */
#define _GNU_SOURCE
#include "backup/internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* verifying */

struct wanted_blob {
    const char *hash, *root, *path;
    int64_t size;
};

static int compare_hashes(const void *a, const void *b) {
    return strcmp(((const struct wanted_blob *)a)->hash, ((const struct wanted_blob *)b)->hash);
}

/* The blobs that a manifest names, without duplicates: returns [*n] and adds their sizes to
 * *bytes. */
static struct wanted_blob *wanted_blobs(const json_t *manifest, size_t *n, int64_t *bytes) {
    const json_t *files = json_object_get(manifest, "files"), *f;
    struct wanted_blob *v = xcalloc(json_array_size(files) + 1, sizeof *v);
    size_t i, all = 0;
    json_array_foreach (files, i, f)
        if (!json_object_get(f, "dir"))
            v[all++] =
                (struct wanted_blob){json_get_string(f, "sha256"), json_get_string(f, "root"),
                                     json_get_string(f, "path"),
                                     (int64_t)json_integer_value(json_object_get(f, "size"))};
    qsort(v, all, sizeof *v, compare_hashes);
    *n = 0;
    for (i = 0; i < all; i++) {
        if (*n && strcmp(v[*n - 1].hash, v[i].hash) == 0) continue;
        v[(*n)++] = v[i];
        *bytes += v[i].size;
    }
    return v;
}

/* Reads a blob and writes its problem to `problem`; "" if the blob is intact. */
static int blob_verify(struct backup_progress *w, const struct wanted_blob *want, char problem[256],
                       struct error *err) {
    char hash[HASH_LEN], *path = backup_blob_path(w->p->to, want->hash);
    struct stat st;
    int rc = OK, fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    *problem = 0;
    if (fd < 0) {
        snprintf(problem, 256, "is missing");
    } else if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size != want->size) {
        snprintf(problem, 256, "has a wrong length");
    } else {
        rc = backup_copy_file(w, fd, want->size, NULL, path, hash, err);
        if (w->stopped) {
            rc = err->code;
        } else if (rc != OK || strcmp(hash, want->hash) != 0) {
            rc = OK;
            snprintf(problem, 256,
                     "does not match its hash: remove its blob, and the next backup that "
                     "has the file writes it again");
        }
    }
    if (fd >= 0) close(fd);
    free(path);
    return rc;
}

/* The results of the blobs that were read so far. Each blob is read once, even if several backups
 * name it. */
struct blob_verify_cache {
    struct backup_progress *work;
    json_t *seen; /* {hash: description of the problem, or ""} */
    json_t *problems;
};

static int blob_verify_cached(struct blob_verify_cache *c, const char *id,
                              const struct wanted_blob *want, struct error *err) {
    char problem[256];
    const json_t *seen = json_object_get(c->seen, want->hash);
    int rc = OK;
    if (!seen) {
        rc = blob_verify(c->work, want, problem, err);
        if (rc != OK) return rc;
        json_object_set_new(c->seen, want->hash, json_string(problem));
        seen = json_object_get(c->seen, want->hash);
    }
    if (*json_string_value(seen))
        json_array_append_new(c->problems,
                              json_sprintf("backup '%s': %s: '%s' (blob %s) %s", id, want->root,
                                           want->path, want->hash, json_string_value(seen)));
    return rc;
}

/* Verifies the blobs that a manifest names and appends their problems to c->problems. */
static int manifest_verify(struct blob_verify_cache *c, const json_t *manifest, struct error *err) {
    int64_t bytes = 0;
    size_t n;
    int rc = OK;
    struct wanted_blob *v = wanted_blobs(manifest, &n, &bytes);
    c->work->total += bytes;
    for (size_t i = 0; rc == OK && i < n; i++)
        rc = blob_verify_cached(c, json_get_string(manifest, "id"), &v[i], err);
    free(v);
    return rc;
}

static int backup_verify_one(struct blob_verify_cache *c, const char *id, struct error *err) {
    json_t *manifest = backup_manifest_read(c->work->p->to, id, err);
    if (!manifest) {
        json_array_append_new(c->problems, json_string(err->text));
        return err->code == ERR_MISSING ? err->code : OK;
    }
    int rc = manifest_verify(c, manifest, err);
    json_decref(manifest);
    return rc;
}

json_t *backup_verify(const struct backup_options *p, const char *id, struct error *err) {
    struct backup_progress w = {.p = p};
    struct blob_verify_cache c = {&w, json_object(), json_array()};
    struct strings ids = {0};
    json_t *out = NULL;
    int lock = path_is_dir(p->to) ? backup_dir_lock(p->to, err) : OK;
    // Other errors of the lock are ignored, so that a folder without write access can be verified.
    int rc = lock == ERR_STATE ? lock : OK;
    if (id)
        strings_add(&ids, id);
    else if (rc == OK)
        rc = backup_ids_list(p->to, &ids, err);
    if (rc == OK && !ids.n) rc = error_set(err, ERR_MISSING, "there are no backups in '%s'", p->to);
    for (int i = 0; rc == OK && i < ids.n; i++) rc = backup_verify_one(&c, ids.v[i], err);
    if (rc == OK)
        out = json_pack("{s:i,s:I,s:I,s:O}", "backups", ids.n, "blobs",
                        (json_int_t)json_object_size(c.seen), "bytes", (json_int_t)w.done,
                        "problems", c.problems);
    if (lock > 0) close(lock);
    json_decref(c.seen);
    json_decref(c.problems);
    strings_release(&ids);
    return out;
}

/* targets */

/* A root to be restored. */
struct target {
    const char *name;
    char *path;   /* with links resolved, even if it does not exist */
    char *prefix; /* prefix of its companion paths, see companion_prefix */
    bool file;
};
struct restore_state {
    struct backup_progress work;
    json_t *manifest;
    struct target v[BACKUP_ROOTS_MAX];
    int n;
    char *separate_roots[BACKUP_ROOTS_MAX + 1]; /* [n_separate_roots] TO and every root */
    int n_separate_roots;
    char stamp[BACKUP_ID_LEN];
};

static char *parent_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return !slash          ? xstrdup(".")
           : slash == path ? xstrdup("/")
                           : strndup(path, (size_t)(slash - path));
}

/* The path with links resolved, also if it or its parents do not exist. malloc'ed, NULL with the
 * error. */
static char *path_resolve(const char *path, struct error *err) {
    char *real = realpath(path, NULL);
    if (real) return real;
    bool absent = errno == ENOENT;
    char *plain = xstrdup(path);
    for (size_t n = strlen(plain); n > 1 && plain[n - 1] == '/';) plain[--n] = 0;
    const char *name = path_name(plain);
    char *parent = parent_of(plain), *parent_real = NULL;
    if (absent && strcmp(name, ".") != 0 && strcmp(name, "..") != 0)
        parent_real = path_resolve(parent, err);
    else
        error_set(err, ERR_IO, "cannot follow '%s'", path);
    if (parent_real) real = path_join(parent_real, name);
    free(parent_real);
    free(parent);
    free(plain);
    return real;
}

/* The prefix of a target's companion paths (".restoring", ".swapping", ".before-ID"). They are next
 * to the target, or inside it if its parent is on another file system. */
static char *companion_prefix(const char *path) {
    char *parent = parent_of(path);
    struct stat a, b;
    bool other_file_system = stat(path, &a) == 0 && stat(parent, &b) == 0 && a.st_dev != b.st_dev;
    free(parent);
    return other_file_system ? path_join(path, ".shoal") : xstrdup(path);
}

static char *companion_path(const struct target *t, const char *what) {
    return xasprintf("%s.%s", t->prefix, what);
}

bool backup_is_unfinished(const char *path, struct error *err) {
    char *real = realpath(path, NULL), *prefix = companion_prefix(real ? real : path),
         *swapping = xasprintf("%s.swapping", prefix);
    bool found = path_exists(swapping);
    if (found)
        error_set(err, ERR_STATE,
                  "a restore of '%s' was interrupted; run the same 'shoal restore' again to finish "
                  "it",
                  path);
    free(real);
    free(prefix);
    free(swapping);
    return found;
}

/* Whether a restore leaves this entry of a target in place: a separate root, or a file of a
 * restore. */
static bool is_left_in_place(const struct restore_state *r, const struct target *t,
                             const char *name) {
    char *path = path_join(t->path, name);
    bool found = backup_is_restore_temp(name);
    for (int i = 0; i < r->n_separate_roots; i++) found |= strcmp(r->separate_roots[i], path) == 0;
    free(path);
    return found;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)st, (void)type, (void)at;
    return remove(path);
}

static int tree_remove(const char *path, struct error *err) {
    if (nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT) return OK;
    return error_errno(err, "cannot remove '%s'", path);
}

static int target_add(struct restore_state *r, const struct backup_root *root, struct error *err) {
    char *path = path_resolve(root->path, err);
    if (!path) return err->code;
    CHECK(r->n_separate_roots < BACKUP_ROOTS_MAX);
    r->separate_roots[r->n_separate_roots++] = path;
    if (!json_object_get(json_object_get(r->manifest, "roots"), root->name)) return OK;
    r->v[r->n++] = (struct target){
        .name = root->name, .path = xstrdup(path), .prefix = companion_prefix(path)};
    return OK;
}

/* A folder that is backed up separately must be a direct child of a root, or outside of it. */
static int nesting_check(const struct restore_state *r, struct error *err) {
    for (int i = 0; i < r->n; i++) {
        size_t n = strlen(r->v[i].path);
        for (int k = 0; k < r->n_separate_roots; k++) {
            const char *p = r->separate_roots[k];
            if (strncmp(p, r->v[i].path, n) == 0 && p[n] == '/' && strchr(p + n + 1, '/'))
                return error_set(
                    err, ERR_USAGE,
                    "'%s' is nested deeply in '%s', which is to be replaced: it must be "
                    "directly in it, or elsewhere",
                    p, r->v[i].path);
            if (r->v[i].path != p && strcmp(p, r->v[i].path) == 0 && r->separate_roots[0] == p)
                return error_set(err, ERR_USAGE, "'%s' holds the backups themselves", p);
        }
    }
    return OK;
}

static int targets_find(struct restore_state *r, struct error *err) {
    const struct backup_options *p = r->work.p;
    int rc = OK;
    r->separate_roots[r->n_separate_roots] = path_resolve(p->to, err);
    if (!r->separate_roots[r->n_separate_roots++]) return err->code;
    for (int i = 0; rc == OK && i < p->n_roots; i++) rc = target_add(r, &p->roots[i], err);
    if (rc == OK && !r->n)
        rc = error_set(err, ERR_MISMATCH, "the backup holds none of the roots to restore");
    return rc == OK ? nesting_check(r, err) : rc;
}

/* A restored entry must not have the name of an entry that is left in place, and a file can only
 * replace a file. */
static int entry_check_collision(struct restore_state *r, const json_t *f, struct error *err) {
    const char *path = json_get_string(f, "path");
    for (int i = 0; i < r->n; i++) {
        struct target *t = &r->v[i];
        if (strcmp(t->name, json_get_string(f, "root")) != 0) continue;
        char *first = strndup(path, strcspn(path, "/"));
        bool collides = *first && is_left_in_place(r, t, first);
        free(first);
        if (!*path) t->file = true;
        if (collides || t->file == path_is_dir(t->path))
            if (collides || path_exists(t->path))
                return error_set(err, ERR_MISMATCH, "'%s' of the backup collides with '%s'",
                                 *path ? path : t->name, t->path);
    }
    return OK;
}

static int check_collisions(struct restore_state *r, struct error *err) {
    const json_t *files = json_object_get(r->manifest, "files"), *f;
    size_t i;
    json_array_foreach (files, i, f)
        if (entry_check_collision(r, f, err) != OK) return err->code;
    return OK;
}

/* OK if the target holds nothing that a restore would move out; else ERR_STATE. */
static int target_check_empty(const struct restore_state *r, const struct target *t,
                              struct error *err) {
    struct strings names = {0};
    int rc = OK, n = !path_is_dir(t->path) && path_exists(t->path);
    if (path_is_dir(t->path)) rc = dir_list_names(t->path, &names, err);
    for (int i = 0; i < names.n; i++) n += !is_left_in_place(r, t, names.v[i]);
    strings_release(&names);
    if (rc == OK && n)
        rc = error_set(err, ERR_STATE,
                       "'%s' holds something: --replace puts the backup in its place and keeps "
                       "that as '%s.before-…'",
                       t->path, t->prefix);
    return rc;
}

/* Takes the lock that a running server of this root would hold: that of its jobs. ERR_STATE: a
 * server runs. *fd: the descriptor that holds the lock, or -1 if the root has no such file; the
 * caller closes it. */
static int target_lock(const struct target *t, int *fd, struct error *err) {
    char *path = path_join(t->path, "jobs/lock");
    int rc = OK;
    *fd = open(path, O_RDWR | O_CLOEXEC);
    if (*fd >= 0 && flock(*fd, LOCK_EX | LOCK_NB) != 0)
        rc = error_set(err, ERR_STATE, "a server uses '%s'; stop it first", t->path);
    free(path);
    return rc;
}

/* writing next to the roots */

static int content_stage(struct restore_state *r, const json_t *f, const char *to,
                         struct error *err) {
    struct atomic_file w;
    const char *want = json_get_string(f, "sha256");
    char hash[HASH_LEN], *path = backup_blob_path(r->work.p->to, want);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    int rc = fd < 0 ? error_errno(err, "cannot open '%s'", path)
                    : backup_file_open(&w, to, (uint32_t)json_get_number(f, "mode"), err);
    if (rc == OK) {
        rc = backup_copy_file(&r->work, fd, (int64_t)json_get_number(f, "size"), &w, path, hash,
                              err);
        if (rc == OK && strcmp(hash, want) != 0)
            rc = error_set(err, ERR_FORMAT, "'%s' does not match its hash", path);
        if (rc == OK) rc = atomic_file_commit(&w, err);
        atomic_file_abort(&w);
    }
    if (fd >= 0) close(fd);
    free(path);
    return rc;
}

static int entry_stage(struct restore_state *r, const json_t *f, const char *staging,
                       struct error *err) {
    const char *path = json_get_string(f, "path");
    char *to = *path ? path_join(staging, path) : xstrdup(staging);
    int rc = OK;
    if (!json_object_get(f, "dir"))
        rc = content_stage(r, f, to, err);
    else if (mkdir(to, 0700) != 0 || chmod(to, 0700 | (mode_t)json_get_number(f, "mode")) != 0)
        rc = error_errno(err, "cannot make '%s'", to);
    free(to);
    return rc;
}

static int target_stage(struct restore_state *r, const struct target *t, struct error *err) {
    const json_t *files = json_object_get(r->manifest, "files"), *f;
    char *staging = companion_path(t, "restoring"), *parent = parent_of(staging);
    size_t i;
    int rc = dir_make(parent, err);
    if (rc == OK) rc = tree_remove(staging, err);
    if (rc == OK && !t->file) rc = backup_dir_make(staging, err);
    json_array_foreach (files, i, f)
        if (rc == OK && strcmp(json_get_string(f, "root"), t->name) == 0)
            rc = entry_stage(r, f, staging, err);
    if (rc == OK && !t->file && r->work.p->edit_staged)
        rc = r->work.p->edit_staged(t->path, staging, err);
    free(parent);
    free(staging);
    return rc;
}

static int targets_stage(struct restore_state *r, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < r->n; i++) rc = target_stage(r, &r->v[i], err);
    return rc;
}

static void staging_remove(const struct restore_state *r) {
    for (int i = 0; i < r->n; i++) {
        struct error none;
        char *staging = companion_path(&r->v[i], "restoring");
        tree_remove(staging, &none);
        free(staging);
    }
}

/* renaming into place */

static char *old_content_path(const struct restore_state *r, const struct target *t) {
    return xasprintf("%s.before-%s", t->prefix, r->stamp);
}

/* Moves the entries of a folder into another one. If `skip_kept_of` is set, the entries that are
 * left in place in this target are not moved. */
static int entries_move(const struct restore_state *r, const struct target *skip_kept_of,
                        const char *from, const char *to, struct error *err) {
    struct strings names = {0};
    int rc = dir_list_names(from, &names, err);
    for (int i = 0; rc == OK && i < names.n; i++) {
        if (skip_kept_of && is_left_in_place(r, skip_kept_of, names.v[i])) continue;
        char *a = path_join(from, names.v[i]), *b = path_join(to, names.v[i]);
        rc = path_rename(a, b, err);
        free(a);
        free(b);
    }
    strings_release(&names);
    return rc;
}

/* Moves the old content of a target to the path `before`; continues if a killed call has begun
 * this. */
static int old_content_move(const struct restore_state *r, const struct target *t,
                            const char *before, struct error *err) {
    if (path_exists(before)) return OK;
    if (!path_is_dir(t->path)) return path_exists(t->path) ? path_rename(t->path, before, err) : OK;
    char *part = xasprintf("%s.part", before);
    int rc = backup_dir_make(part, err);
    if (rc == OK) rc = entries_move(r, t, t->path, part, err);
    if (rc == OK) rc = path_rename(part, before, err);
    free(part);
    return rc;
}

static int new_content_move(const struct restore_state *r, const struct target *t,
                            const char *swapping, struct error *err) {
    if (!path_exists(t->path)) return path_rename(swapping, t->path, err);
    int rc = entries_move(r, NULL, swapping, t->path, err);
    if (rc == OK && rmdir(swapping) != 0) rc = error_errno(err, "cannot remove '%s'", swapping);
    return rc;
}

static int target_swap(const struct restore_state *r, const struct target *t, struct error *err) {
    char *restoring = companion_path(t, "restoring"), *swapping = companion_path(t, "swapping"),
         *before = old_content_path(r, t);
    int rc = OK;
    if (path_exists(restoring)) rc = path_rename(restoring, swapping, err);
    if (rc == OK && path_exists(swapping)) {
        rc = old_content_move(r, t, before, err);
        if (rc == OK) rc = new_content_move(r, t, swapping, err);
    }
    if (rc == OK) rmdir(before); // removes the folder only if it is empty
    free(restoring);
    free(swapping);
    free(before);
    return rc;
}

/* The journal, restore.json, describes a scheduled restore or one whose renames have begun. */
static char *journal_path(const char *to) {
    return path_join(to, "restore.json");
}

/* {name: path} of the roots that this call restores. */
static json_t *roots_json(const struct restore_state *r) {
    json_t *v = json_object();
    for (int i = 0; i < r->n; i++)
        json_object_set_new(v, r->v[i].name, json_from_path(r->v[i].path));
    return v;
}

static int journal_write(const struct restore_state *r, const char *id, struct error *err) {
    char now[32], *path = journal_path(r->work.p->to);
    json_t *v =
        json_pack("{s:s,s:s,s:o}", "id", id, "asked", clock_utc(now), "roots", roots_json(r));
    if (*r->stamp) json_object_set_new(v, "stamp", json_string(r->stamp));
    int rc = json_write_file(path, v, err);
    json_decref(v);
    free(path);
    return rc;
}

static json_t *journal_read(const char *to) {
    char *path = journal_path(to);
    struct buf text = {0};
    struct error none;
    json_t *v = path_exists(path) && file_read(path, 1 << 20, &text, &none) == OK
                    ? json_parse(text.data, text.len, path, &none)
                    : NULL;
    buf_release(&text);
    free(path);
    if (json_is_object(v) && backup_id_is_valid(json_get_string(v, "id"))) return v;
    json_decref(v);
    return NULL;
}

/* Whether a restore has started its renames and not finished them. */
static bool renames_have_begun(const char *to) {
    json_t *v = journal_read(to);
    bool found = json_object_get(v, "stamp");
    json_decref(v);
    return found;
}

static int journal_remove(const char *to, struct error *err) {
    char *path = journal_path(to);
    int rc =
        unlink(path) == 0 || errno == ENOENT ? OK : error_errno(err, "cannot remove '%s'", path);
    free(path);
    return rc;
}

static int targets_swap(const struct restore_state *r, struct error *err) {
    int rc = OK, lock[BACKUP_ROOTS_MAX];
    for (int i = 0; i < r->n; i++) lock[i] = -1;
    for (int i = 0; rc == OK && i < r->n; i++) rc = target_lock(&r->v[i], &lock[i], err);
    for (int i = 0; rc == OK && i < r->n; i++) rc = target_swap(r, &r->v[i], err);
    for (int i = 0; i < r->n; i++)
        if (lock[i] >= 0) close(lock[i]);
    return rc == OK ? journal_remove(r->work.p->to, err) : rc;
}

/* restoring */

static void restore_state_release(struct restore_state *r) {
    for (int i = 0; i < r->n; i++) {
        free(r->v[i].path);
        free(r->v[i].prefix);
    }
    for (int i = 0; i < r->n_separate_roots; i++) free(r->separate_roots[i]);
    json_decref(r->manifest);
}

static int restore_state_init(struct restore_state *r, const struct backup_options *p,
                              const char *id, struct error *err) {
    char newest[BACKUP_ID_LEN];
    *r = (struct restore_state){.work.p = p};
    if (!id) {
        int rc = backup_find_newest(p->to, newest, err);
        if (rc != OK) return rc;
        id = newest;
    }
    if (!(r->manifest = backup_manifest_read(p->to, id, err))) return err->code;
    int rc = targets_find(r, err);
    return rc == OK ? check_collisions(r, err) : rc;
}

static int restore_state_verify(struct restore_state *r, struct error *err) {
    struct blob_verify_cache c = {&r->work, json_object(), json_array()};
    int rc = manifest_verify(&c, r->manifest, err);
    size_t n = json_array_size(c.problems);
    if (rc == OK && n)
        rc = error_set(err, ERR_FORMAT, "%s%s", json_string_value(json_array_get(c.problems, 0)),
                       n > 1 ? ", and more; 'shoal backup TO --check' names them" : "");
    json_decref(c.seen);
    json_decref(c.problems);
    return rc;
}

static json_t *result_json(const struct restore_state *r) {
    json_t *roots = json_object(), *left_out = json_array(), *path;
    const char *name;
    for (int i = 0; i < r->n; i++) {
        char *before = old_content_path(r, &r->v[i]);
        json_object_set_new(roots, r->v[i].name,
                            json_pack("{s:o,s:o}", "path", json_from_path(r->v[i].path), "before",
                                      path_exists(before) ? json_from_path(before) : json_null()));
        free(before);
    }
    json_object_foreach (json_object_get(r->manifest, "roots"), name, path)
        if (!json_object_get(roots, name)) json_array_append_new(left_out, json_string(name));
    return json_pack("{s:O,s:I,s:O,s:o,s:o}", "id", json_object_get(r->manifest, "id"), "files",
                     (json_int_t)json_array_size(json_object_get(r->manifest, "files")), "bytes",
                     json_object_get(r->manifest, "bytes"), "roots", roots, "left_out", left_out);
}

/* Checks all that can be checked without a change. The caller calls restore_state_release even
 * after an error. */
static int restore_prepare(struct restore_state *r, const struct backup_options *p, const char *id,
                           bool replace, struct error *err) {
    int lock, rc = restore_state_init(r, p, id, err);
    for (int i = 0; rc == OK && i < r->n; i++) {
        rc = target_lock(&r->v[i], &lock, err);
        if (lock >= 0) close(lock);
        if (rc == OK && !replace) rc = target_check_empty(r, &r->v[i], err);
    }
    return rc == OK ? restore_state_verify(r, err) : rc;
}

json_t *backup_restore_plan(const struct backup_options *p, const char *id, bool replace,
                            struct error *err) {
    struct restore_state r;
    json_t *out = NULL, *writes = json_array();
    if (renames_have_begun(p->to)) {
        json_decref(writes);
        error_set(err, ERR_STATE,
                  "a restore was interrupted: the same command without --dry-run finishes it");
        return NULL;
    }
    int rc = restore_prepare(&r, p, id, replace, err);
    for (int i = 0; rc == OK && i < r.n; i++)
        json_array_append_new(writes, json_from_path(r.v[i].path));
    if (rc == OK)
        out = json_pack("{s:O,s:O,s:I,s:O,s:b}", "writes", writes, "backup",
                        json_object_get(r.manifest, "id"), "files",
                        (json_int_t)json_array_size(json_object_get(r.manifest, "files")), "bytes",
                        json_object_get(r.manifest, "bytes"), "replaces", (int)replace);
    json_decref(writes);
    restore_state_release(&r);
    return out;
}

/* A whole restore, from the first byte to the last rename; the caller has locked TO. */
static json_t *restore_run(const struct backup_options *p, const char *id, bool replace,
                           struct error *err) {
    struct restore_state r;
    json_t *out = NULL;
    int rc = restore_prepare(&r, p, id, replace, err);
    if (rc == OK) rc = targets_stage(&r, err);
    backup_id_now(r.stamp);
    if (rc == OK) rc = journal_write(&r, json_get_string(r.manifest, "id"), err);
    if (rc != OK && !renames_have_begun(p->to)) staging_remove(&r);
    if (rc == OK) rc = targets_swap(&r, err);
    if (rc == OK) out = result_json(&r);
    restore_state_release(&r);
    return out;
}

/* Finishes the renames of an earlier call that was killed before they were complete. */
static json_t *restore_finish(const struct backup_options *p, const json_t *journal,
                              struct error *err) {
    struct restore_state r;
    const char *id = json_get_string(journal, "id");
    json_t *out = NULL;
    int rc = restore_state_init(&r, p, id, err);
    json_t *roots = rc == OK ? roots_json(&r) : NULL;
    if (rc == OK && !json_equal(roots, json_object_get(journal, "roots"))) {
        char *text = json_canonical(json_object_get(journal, "roots"));
        rc = error_set(err, ERR_STATE,
                       "the restore of '%s' to %s was interrupted; finish that first, by the same "
                       "command",
                       id, text);
        free(text);
    }
    snprintf(r.stamp, sizeof r.stamp, "%s", json_get_string(journal, "stamp"));
    if (rc == OK && !backup_id_is_valid(r.stamp))
        rc = error_set(err, ERR_FORMAT, "restore.json of the backups is damaged");
    if (rc == OK) rc = targets_swap(&r, err);
    if (rc == OK) out = result_json(&r);
    json_decref(roots);
    restore_state_release(&r);
    return out;
}

json_t *backup_restore(const struct backup_options *p, const char *id, bool replace,
                       struct error *err) {
    if (!path_is_dir(p->to)) {
        error_set(err, ERR_MISSING, "there are no backups in '%s'", p->to);
        return NULL;
    }
    int lock = backup_dir_lock(p->to, err);
    if (lock < 0) return NULL;
    json_t *journal = journal_read(p->to), *out = NULL;
    bool begun = json_object_get(journal, "stamp");
    if (begun) out = restore_finish(p, journal, err);
    if (out)
        log_info("the restore of '%s' that was interrupted is finished",
                 json_get_string(journal, "id"));
    if (!begun || (out && id && strcmp(id, json_get_string(journal, "id")) != 0)) {
        json_decref(out);
        out = restore_run(p, id, replace, err);
    }
    json_decref(journal);
    close(lock);
    return out;
}

/* scheduling */

int backup_restore_schedule(const struct backup_options *p, const char *id, struct error *err) {
    struct restore_state r = {0};
    int lock = path_is_dir(p->to) ? backup_dir_lock(p->to, err)
                                  : error_set(err, ERR_MISSING, "no backups in '%s'", p->to);
    if (lock < 0) return lock;
    json_t *journal = journal_read(p->to);
    int rc = OK;
    if (json_object_get(journal, "stamp"))
        rc = error_set(err, ERR_STATE,
                       "the restore of '%s' was interrupted; finish it first with 'shoal restore'",
                       json_get_string(journal, "id"));
    json_decref(journal);
    if (rc == OK) rc = restore_state_init(&r, p, id, err);
    if (rc == OK) rc = restore_state_verify(&r, err);
    if (rc == OK) rc = journal_write(&r, id, err);
    restore_state_release(&r);
    close(lock);
    return rc;
}

json_t *backup_restore_scheduled(const char *to) {
    json_t *v = journal_read(to);
    json_object_del(v, "roots");
    json_object_del(v, "stamp");
    return v;
}

int backup_restore_cancel(const char *to, const char *id, struct error *err) {
    if (!path_is_dir(to)) return error_set(err, ERR_MISSING, "no backups in '%s'", to);
    int lock = backup_dir_lock(to, err), rc = OK;
    if (lock < 0) return lock;
    json_t *v = journal_read(to);
    if (!v || strcmp(json_get_string(v, "id"), id) != 0)
        rc = error_set(err, ERR_MISSING, "no restore of backup '%.60s' is scheduled", id);
    else if (json_object_get(v, "stamp"))
        rc = error_set(err, ERR_STATE, "the restore of '%s' has begun", id);
    else
        rc = journal_remove(to, err);
    json_decref(v);
    close(lock);
    return rc;
}

static void failure_record(const struct backup_options *p, json_t *journal, const char *why) {
    struct error none;
    char *path = journal_path(p->to);
    json_object_set_new(journal, "failed", json_string(why));
    if (json_write_file(path, journal, &none) != OK) log_warn("%s", none.text);
    free(path);
}

/* Whether the journal (restore.json) is for exactly these roots. It is not if TO was copied from
 * another machine. */
static bool journal_is_for_roots(const struct backup_options *p, const json_t *journal) {
    const json_t *roots = json_object_get(journal, "roots");
    size_t found = 0;
    for (int i = 0; i < p->n_roots; i++) {
        struct error none;
        char *path = path_resolve(p->roots[i].path, &none);
        found += path && strcmp(json_get_string(roots, p->roots[i].name), path) == 0;
        free(path);
    }
    return found && found == json_object_size(roots);
}

json_t *backup_restore_run_scheduled(const struct backup_options *p, struct error *err) {
    json_t *journal = journal_read(p->to), *out = NULL;
    *err = (struct error){0};
    if (!journal) return NULL;
    const char *id = json_get_string(journal, "id");
    if (!journal_is_for_roots(p, journal)) {
        log_warn("'%s' asks for backup '%s' in other places than these: nothing is restored", p->to,
                 id);
    } else if (!json_object_get(journal, "failed")) {
        out = backup_restore(p, id, true, err);
        if (!out && !renames_have_begun(p->to)) { // the roots are unchanged
            log_warn("backup '%s' is not restored: %s", id, err->text);
            failure_record(p, journal, err->text);
            *err = (struct error){0};
        }
    }
    json_decref(journal);
    return out;
}
