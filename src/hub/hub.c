/*
 * hub: pulls models and adapters from a hub: parses names, chooses the files of a repository, and
 * makes a folder hold exactly one commit of it.
 *
 * It does not send requests (fetch.c does) and does not look into the files: a pulled folder is
 * opened like any other folder. Pickles are never downloaded, even if requested by name.
 *
 *    find missing       download              publish
 *   hash local files -> NAME.partial, each -> record "complete": false -> rename all, remove files
 *                       verified              the commit no longer has -> record "complete": true
 *
 * Invariants, at every moment, also after a kill:
 *   1. NAME is a complete, verified file or absent; only publishing changes it.
 *   2. A record with "complete": true describes the folder; hub_cached_path uses no other record.
 *   3. Only files that a record lists, or that have the expected hash, are replaced or removed.
 *   4. One process works in a folder at a time: it holds .hub.lock, which the system releases
 *      when the process dies.
 */
#define _GNU_SOURCE
#include "hub/internal.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define RECORD_NAME ".hub.json"
#define LOCK_NAME ".hub.lock"

/* names */

bool hub_is_name(const char *path) {
    return strncmp(path, "hf:", 3) == 0;
}

char *path_absolute(const char *path) {
    char *real = hub_is_name(path) ? NULL : realpath(path, NULL);
    return real ? real : xstrdup(path);
}

static bool is_repo_word(const char *s, size_t n) {
    if (n == 0 || n > 96 || s[0] == '.' || s[0] == '-') return false;
    for (size_t i = 0; i < n; i++)
        if (!isascii((unsigned char)s[i]) ||
            (!isalnum((unsigned char)s[i]) && !strchr("._-", s[i])))
            return false;
    return true;
}

bool hub_path_safe(const char *path) {
    size_t len = strlen(path);
    if (len == 0 || len >= sizeof((struct hub_ref){0}.file)) return false;
    for (const char *p = path; *p; p++)
        if ((unsigned char)*p < ' ' || *p == 127 || *p == '\\') return false;
    for (const char *part = path;; part++) {
        size_t n = strcspn(part, "/");
        if (n == 0 || n > 200 || (part[0] == '.' && (n == 1 || (n == 2 && part[1] == '.'))))
            return false;
        part += n;
        if (*part == '\0') return true;
    }
}

int hub_ref_parse(const char *text, struct hub_ref *out, struct error *err) {
    *out = (struct hub_ref){0};
    const char *p = text + (hub_is_name(text) ? 3 : 0), *revision_mark = strchr(p, '@');
    const char *end = revision_mark ? revision_mark : p + strlen(p),
               *rev = revision_mark ? revision_mark + 1 : "main";
    size_t owner = strcspn(p, "/@"), repo = p[owner] == '/' ? strcspn(p + owner + 1, "/@") : 0;
    const char *file = p + MIN(owner + 1 + repo, (size_t)(end - p));
    bool valid = hub_is_name(text) && is_repo_word(p, owner) && is_repo_word(p + owner + 1, repo) &&
                 hub_path_safe(rev) && strlen(rev) < sizeof out->rev && !strchr(rev, ' ') &&
                 (size_t)(end - file) < sizeof out->file;
    if (valid) {
        snprintf(out->repo, sizeof out->repo, "%.*s", (int)(file - p), p);
        snprintf(out->rev, sizeof out->rev, "%s", rev);
        if (file < end)
            snprintf(out->file, sizeof out->file, "%.*s", (int)(end - file - 1), file + 1);
        valid = file == end || hub_path_safe(out->file);
    }
    return valid ? OK
                 : error_set(err, ERR_USAGE,
                             "'%s' names no repository: expected hf:OWNER/REPO[/FILE][@REVISION]",
                             text);
}

static char *cache_root(struct error *err) {
    const char *shoal_cache = getenv("SHOAL_CACHE"), *xdg = getenv("XDG_CACHE_HOME"),
               *home = getenv("HOME");
    if (shoal_cache && *shoal_cache) return path_join(shoal_cache, "hub");
    if (xdg && *xdg) return path_join(xdg, "shoal/hub");
    if (home && *home) return path_join(home, ".cache/shoal/hub");
    error_set(err, ERR_MISSING, "there is no folder for pulled models: set SHOAL_CACHE or HOME");
    return NULL;
}

char *hub_cache_dir(void) {
    struct error err;
    return cache_root(&err);
}

/* CACHE/OWNER/REPO, so that the last part names the model; another revision is CACHE/OWNER/REPO@REV
 * with '/' encoded. */
static char *cache_dir(const struct hub_ref *name, struct error *err) {
    char *root = cache_root(err);
    if (!root) return NULL;
    struct buf b = {0};
    buf_printf(&b, "%s/%s", root, name->repo);
    if (strcmp(name->rev, "main") != 0) {
        buf_puts(&b, "@");
        hub_url_encode(&b, name->rev, false);
    }
    free(root);
    return b.data;
}

/* the listing */

static bool hex_copy(const char *text, size_t len, char *out) {
    if (!text || strlen(text) != len || strspn(text, "0123456789abcdef") != len) return false;
    memcpy(out, text, len + 1);
    return true;
}

/* Adds a file of the listing to `r`. A large file, which git does not store itself (git LFS), has
 * "lfs" with its SHA-256; its blobId is the hash of git's pointer file. */
static int file_parse(const json_t *v, struct hub_repo *r, struct error *err) {
    struct hub_file *f = &r->files[r->n];
    const char *path = json_string_value(json_object_get(v, "rfilename"));
    const json_t *lfs = json_object_get(v, "lfs"), *size = json_object_get(v, "size");
    if (!path) return error_set(err, ERR_FORMAT, "the hub's listing has a file without a name");
    if (!hub_path_safe(path))
        return error_set(err, ERR_FORMAT, "the hub lists '%s', which may not be a file's name",
                         path);
    if (json_is_object(lfs)) size = json_object_get(lfs, "size");
    const char *sha256 = json_string_value(json_object_get(lfs, "sha256")),
               *blob = json_string_value(json_object_get(v, "blobId"));
    bool hashed = json_is_object(lfs) ? hex_copy(sha256, 64, f->hash) : hex_copy(blob, 40, f->hash);
    f->size = json_integer_value(size);
    if (!hashed || !json_is_integer(size) || f->size < 0 || f->size > (int64_t)1 << 50)
        return error_set(err, ERR_FORMAT, "the hub gives no usable size and hash of '%s'", path);
    f->path = arena_strdup(&r->arena, path);
    r->n++;
    return OK;
}

int hub_repo_parse(const json_t *listing, struct hub_repo *r, struct error *err) {
    *r = (struct hub_repo){0};
    const json_t *files = json_object_get(listing, "siblings"), *v;
    size_t i;
    if (!hex_copy(json_string_value(json_object_get(listing, "sha")), 40, r->commit) ||
        !json_is_array(files))
        return error_set(err, ERR_FORMAT, "the hub's answer is not a listing of a repository");
    r->files = xcalloc(json_array_size(files) + 1, sizeof *r->files);
    json_array_foreach (files, i, v) {
        if (file_parse(v, r, err) != OK) return err->code;
    }
    return OK;
}

void hub_repo_release(struct hub_repo *r) {
    free(r->files);
    arena_release(&r->arena);
    *r = (struct hub_repo){0};
}

/* which files */

static const char *const default_files[] = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "training_data.hashes",
    "prompt_profile.json",
};
/* Used if the repository has no model.safetensors; otherwise they are a copy of it. */
static const char *const shard_files[] = {
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
};
static const char *const pickle_files[] = {
    "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.joblib",
};

static bool matches_any(const char *path, const char *const *globs, size_t n, int flags) {
    for (size_t i = 0; i < n; i++)
        if (fnmatch(globs[i], path, flags) == 0) return true;
    return false;
}

static bool is_pickle(const char *path) {
    return matches_any(path, pickle_files, ARRAY_LEN(pickle_files), FNM_CASEFOLD);
}

/* Names of files that a pull itself creates. */
static bool is_reserved(const char *path) {
    static const char *const names[] = {"*.partial", "*.partial.etag", RECORD_NAME, LOCK_NAME};
    return matches_any(path, names, ARRAY_LEN(names), 0);
}

static bool is_gguf(const char *path) {
    return fnmatch("*.gguf", path, FNM_CASEFOLD) == 0;
}

static struct hub_file *repo_file(const struct hub_repo *r, const char *path) {
    for (int i = 0; i < r->n; i++)
        if (strcmp(r->files[i].path, path) == 0) return &r->files[i];
    return NULL;
}

/* "a.gguf (531.1 MB), ..." for the files that `matches` accepts, malloc'ed; NULL: none. */
static char *files_describe(const struct hub_repo *r, bool (*matches)(const char *path)) {
    enum { SHOWN = 12 };
    struct buf b = {0};
    int n = 0;
    for (int i = 0; i < r->n; i++) {
        if (!matches(r->files[i].path) || ++n > SHOWN) continue;
        buf_printf(&b, "%s'%s' (%.1f MB)", n > 1 ? ", " : "", r->files[i].path,
                   1e-6 * (double)r->files[i].size);
    }
    if (n > SHOWN) buf_printf(&b, " and %d more", n - SHOWN);
    return b.data; /* NULL if no file matches */
}

/* The error for a repository without default weights and without a single GGUF file. It names the
 * GGUF files or pickles that exist. */
static int no_default_files_error(const struct hub_repo *r, const struct hub_ref *name,
                                  struct error *err) {
    char *ggufs = files_describe(r, is_gguf), *pickles = files_describe(r, is_pickle);
    if (ggufs)
        error_set(err, ERR_USAGE,
                  "'%s' holds GGUF files, name one: hf:%s/FILE or --include GLOB: %s", name->repo,
                  name->repo, ggufs);
    else if (pickles)
        error_set(err, ERR_FORMAT,
                  "'%s' has its weights only as pickles, which can run code when opened and are "
                  "never loaded: %s; look for a revision or a copy with safetensors",
                  name->repo, pickles);
    else
        error_set(err, ERR_MISSING, "'%s' holds no model and no adapter that Shoal reads",
                  name->repo);
    free(ggufs);
    free(pickles);
    return err->code;
}

static int select_default(struct hub_repo *r, const struct hub_ref *name, struct error *err) {
    bool single = repo_file(r, "model.safetensors") != NULL;
    int n_weights = 0, n_gguf = 0;
    struct hub_file *gguf = NULL;
    for (int i = 0; i < r->n; i++) {
        struct hub_file *f = &r->files[i];
        f->wanted =
            matches_any(f->path, default_files, ARRAY_LEN(default_files), FNM_PATHNAME) ||
            (!single && matches_any(f->path, shard_files, ARRAY_LEN(shard_files), FNM_PATHNAME));
        n_weights += f->wanted && fnmatch("*.safetensors", f->path, 0) == 0;
        if (is_gguf(f->path)) n_gguf++, gguf = f;
    }
    if (n_weights > 0) return OK;
    if (n_gguf != 1) return no_default_files_error(r, name, err);
    for (int i = 0; i < r->n; i++) r->files[i].wanted = &r->files[i] == gguf;
    return OK;
}

static int select_named(struct hub_repo *r, const struct hub_ref *name,
                        const struct strings *include, struct error *err) {
    const char *pickle = NULL;
    int n = 0;
    for (int i = 0; i < r->n; i++) {
        struct hub_file *f = &r->files[i];
        bool is_requested =
            strcmp(f->path, name->file) == 0 ||
            matches_any(f->path, (const char *const *)include->v, (size_t)include->n, 0);
        f->wanted = is_requested && !is_pickle(f->path) && !is_reserved(f->path);
        if (is_requested && is_pickle(f->path)) pickle = f->path;
        n += f->wanted;
    }
    if (pickle && n == 0)
        return error_set(err, ERR_FORMAT,
                         "'%s' is a pickle, which can run code when opened and is never loaded",
                         pickle);
    if (pickle) log_warn("'%s' is a pickle and is not loaded", pickle);
    return n > 0 ? OK
                 : error_set(err, ERR_MISSING, "'%s' has no file '%s' at '%s'", name->repo,
                             *name->file ? name->file : include->v[0], name->rev);
}

int hub_repo_select(struct hub_repo *r, const struct hub_ref *name, const struct strings *include,
                    struct error *err) {
    return *name->file || include->n ? select_named(r, name, include, err)
                                     : select_default(r, name, err);
}

/* Sums of file sizes are clamped to MAX_BYTES; one file has at most 2^50 bytes (file_parse). */
static const int64_t MAX_BYTES = (int64_t)1 << 60;

/* the record */

/* Returns NULL without an error if the folder has no record. */
static json_t *record_load(const char *dir, struct error *err) {
    char *path = path_join(dir, RECORD_NAME);
    json_t *v = path_exists(path) ? json_parse_file(path, err) : NULL;
    if (v && !json_is_object(v)) {
        error_set(err, ERR_FORMAT, "'%s' is not a record of a pull", path);
        json_decref(v);
        v = NULL;
    }
    free(path);
    return v;
}

static const json_t *record_file(const json_t *record, const char *path) {
    const json_t *v;
    size_t i;
    json_array_foreach (json_object_get(record, "files"), i, v) {
        const char *file_path = json_string_value(json_object_get(v, "path"));
        if (file_path && strcmp(file_path, path) == 0) return v;
    }
    return NULL;
}

static bool json_field_equals(const json_t *object, const char *key, const char *value) {
    const char *text = json_string_value(json_object_get(object, key));
    return text && strcmp(text, value) == 0;
}

static bool record_is_complete(const json_t *record) {
    return json_is_true(json_object_get(record, "complete"));
}

static int record_save(const char *dir, const json_t *record, struct error *err) {
    char *path = path_join(dir, RECORD_NAME), *text = json_dumps(record, JSON_INDENT(2));
    CHECK(text != NULL);
    int rc = file_write(path, text, strlen(text), err);
    free(path);
    free(text);
    return rc;
}

/* pulling */

struct hub_pull {
    struct hub_ref name;
    struct hub_client *client;
    struct hub_repo repo;
    char *dir;
    int lock;
    json_t *record;                   /* record of the folder's current content, or NULL */
    struct progress bar;              /* in MB */
    int n_missing;                    /* number of wanted files that are missing locally */
    int64_t to_transfer, transferred; /* bytes to transfer in all; bytes transferred so far */
    struct error *err;
};

static int pull_lock(struct hub_pull *p) {
    char *path = path_join(p->dir, LOCK_NAME);
    p->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    int rc = p->lock < 0 ? error_errno(p->err, "cannot create '%s'", path) : OK;
    if (rc == OK && flock(p->lock, LOCK_EX | LOCK_NB) < 0) {
        log_info("another pull works in '%s'; waiting for it", p->dir);
        while ((rc = flock(p->lock, LOCK_EX)) < 0 && errno == EINTR) continue;
        if (rc < 0) rc = error_errno(p->err, "cannot lock '%s'", path);
    }
    free(path);
    return rc;
}

/* Lists the repository's files and selects the wanted ones. */
static int pull_list(struct hub_pull *p, const char *name, const struct hub_options *o) {
    struct error *err = p->err;
    if (hub_ref_parse(name, &p->name, err) != OK) return err->code;
    p->dir = o->to ? xstrdup(o->to) : cache_dir(&p->name, err);
    if (!p->dir || !(p->client = hub_client_new(&p->name, o, err))) return err->code;
    json_t *listing = hub_client_list(p->client, err);
    if (!listing) return err->code;
    int rc = hub_repo_parse(listing, &p->repo, err);
    json_decref(listing);
    return rc == OK ? hub_repo_select(&p->repo, &p->name, &o->include, err) : rc;
}

static int pull_open(struct hub_pull *p, const char *name, const struct hub_options *o) {
    struct error *err = p->err;
    int rc = pull_list(p, name, o);
    if (rc == OK) rc = dir_make(p->dir, err);
    if (rc == OK) rc = pull_lock(p);
    if (rc != OK) return rc;
    *err = (struct error){0};
    p->record = record_load(p->dir, err);
    if (p->record && !json_field_equals(p->record, "repo", p->name.repo))
        return error_set(err, ERR_STATE, "'%s' holds another repository; choose another folder",
                         p->dir);
    return err->code;
}

static void pull_close(struct hub_pull *p) {
    if (p->lock >= 0) close(p->lock);
    json_decref(p->record);
    hub_client_free(p->client);
    hub_repo_release(&p->repo);
    free(p->dir);
}

static bool file_matches(const char *path, const struct hub_file *f) {
    struct file_map m;
    struct error ignored;
    struct hub_digest d;
    if (file_map_open(&m, path, &ignored) != OK) return false;
    bool matches = m.size == (size_t)f->size;
    if (matches) {
        hub_digest_init(&d, f);
        hub_digest_add(&d, m.data, m.size);
        matches = hub_digest_matches(&d, f);
    }
    file_map_close(&m);
    return matches;
}

/* Finds the files that are present already, and checks the free space for the rest. Refuses to
 * replace a file that no pull has created. */
static int pull_find_missing(struct hub_pull *p) {
    struct statvfs fs;
    for (int i = 0; i < p->repo.n; i++) {
        struct hub_file *f = &p->repo.files[i];
        if (!f->wanted) continue;
        char *path = path_join(p->dir, f->path), *partial = xasprintf("%s.partial", path);
        struct stat st;
        f->present = file_matches(path, f);
        bool foreign = !f->present && path_exists(path) && !record_file(p->record, f->path);
        bool has_partial = stat(partial, &st) == 0;
        if (!f->present) p->to_transfer += f->size - (has_partial ? MIN(st.st_size, f->size) : 0);
        p->to_transfer = MIN(p->to_transfer, MAX_BYTES);
        p->n_missing += !f->present;
        if (foreign)
            error_set(p->err, ERR_STATE,
                      "'%s' exists and comes from elsewhere; choose another folder", path);
        free(path);
        free(partial);
        if (foreign) return p->err->code;
    }
    if (statvfs(p->dir, &fs) < 0) return error_errno(p->err, "cannot examine '%s'", p->dir);
    uint64_t free_bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    if ((uint64_t)p->to_transfer <= free_bytes) return OK;
    return error_set(p->err, ERR_IO,
                     "the download needs %.1f MB, but '%s' has %.1f MB of free space",
                     1e-6 * (double)p->to_transfer, p->dir, 1e-6 * (double)free_bytes);
}

static void pull_report_progress(void *ctx, const struct hub_file *f, int64_t change) {
    struct hub_pull *p = ctx;
    p->transferred += change;
    progress_update(&p->bar, p->transferred / 1000000, f->path);
}

static char *parent_dir(const char *path) {
    return strndup(path, (size_t)(strrchr(path, '/') - path));
}

static int pull_download(struct hub_pull *p) {
    int rc = OK;
    progress_start(&p->bar, "pull, MB", p->to_transfer / 1000000);
    for (int i = 0; i < p->repo.n && rc == OK; i++) {
        const struct hub_file *f = &p->repo.files[i];
        if (!f->wanted || f->present) continue;
        char *partial = xasprintf("%s/%s.partial", p->dir, f->path), *parent = parent_dir(partial);
        rc = dir_make(parent, p->err);
        if (rc == OK)
            rc = hub_client_download(p->client, p->repo.commit, f, partial, pull_report_progress, p,
                                     p->err);
        free(parent);
        free(partial);
    }
    if (rc == OK && p->n_missing > 0) progress_finish(&p->bar, NULL);
    return rc;
}

/* The new record: the files of this pull, and the files of earlier pulls that have the same hash in
 * the new commit. */
static json_t *record_new(const struct hub_pull *p) {
    json_t *files = json_array();
    for (int i = 0; i < p->repo.n; i++) {
        const struct hub_file *f = &p->repo.files[i];
        const json_t *old = record_file(p->record, f->path);
        if (!f->wanted && !(old && json_field_equals(old, "hash", f->hash))) continue;
        json_array_append_new(files, json_pack("{s:s,s:I,s:s}", "path", f->path, "size",
                                               (json_int_t)f->size, "hash", f->hash));
    }
    return json_pack("{s:s,s:s,s:s,s:b,s:o}", "repo", p->name.repo, "revision", p->name.rev,
                     "commit", p->repo.commit, "complete", 1, "files", files);
}

/* The files of the old record that the new one does not have. They are removed, so that no reader
 * takes them for files of the new commit. */
static json_t *stale_files(const struct hub_pull *p, const json_t *record) {
    json_t *stale = json_array(), *v;
    size_t i;
    json_array_foreach (json_object_get(p->record, "files"), i, v) {
        const char *path = json_string_value(json_object_get(v, "path"));
        if (path && hub_path_safe(path) && !record_file(record, path)) json_array_append(stale, v);
    }
    return stale;
}

static int files_publish(struct hub_pull *p, const json_t *stale) {
    const json_t *v;
    size_t i;
    int rc = OK;
    for (int k = 0; k < p->repo.n && rc == OK; k++) {
        const struct hub_file *f = &p->repo.files[k];
        if (!f->wanted || f->present) continue;
        char *path = path_join(p->dir, f->path), *partial = xasprintf("%s.partial", path),
             *etag = xasprintf("%s.etag", partial);
        if (rename(partial, path) < 0) rc = error_errno(p->err, "cannot put '%s' in place", path);
        if (rc == OK) unlink(etag);
        free(path);
        free(partial);
        free(etag);
    }
    json_array_foreach (stale, i, v) {
        char *path = path_join(p->dir, json_string_value(json_object_get(v, "path")));
        if (rc == OK && unlink(path) < 0 && errno != ENOENT)
            rc = error_errno(p->err, "cannot remove '%s'", path);
        free(path);
    }
    return rc;
}

static int pull_publish(struct hub_pull *p, const json_t *record) {
    if (p->n_missing == 0 && json_equal(p->record, record)) return OK;
    json_t *stale = stale_files(p, record), *incomplete = json_deep_copy(record);
    json_object_set_new(incomplete, "complete", json_false());
    json_array_extend(json_object_get(incomplete, "files"), stale);
    int rc = record_save(p->dir, incomplete, p->err);
    if (rc == OK) rc = files_publish(p, stale);
    if (rc == OK)
        rc = record_save(p->dir, record, p->err); /* also flushes the renames in the folder */
    json_decref(stale);
    json_decref(incomplete);
    return rc;
}

json_t *hub_pull(const char *name, const struct hub_options *o, struct error *err) {
    struct hub_pull p = {.lock = -1, .err = err};
    json_t *record = NULL;
    int rc = pull_open(&p, name, o);
    if (rc == OK) rc = pull_find_missing(&p);
    if (rc == OK) rc = pull_download(&p);
    if (rc == OK) {
        record = record_new(&p);
        rc = pull_publish(&p, record);
    }
    if (rc == OK) {
        json_object_set_new(record, "path", json_string(p.dir));
        json_object_set_new(record, "loaded", json_integer(p.transferred));
    } else {
        json_decref(record);
        record = NULL;
    }
    pull_close(&p);
    return record;
}

/* The result of hub_plan. Finds the files that are not present as pull_find_missing does, but
 * without its checks. */
static json_t *plan_json(const struct hub_pull *p) {
    json_t *files = json_array();
    int64_t bytes = 0;
    int n_present = 0;
    for (int i = 0; i < p->repo.n; i++) {
        const struct hub_file *f = &p->repo.files[i];
        if (!f->wanted) continue;
        char *path = path_join(p->dir, f->path);
        bool present = file_matches(path, f);
        n_present += present;
        bytes = MIN(bytes + (present ? 0 : f->size), MAX_BYTES);
        if (!present) json_array_append_new(files, json_from_path(f->path));
        free(path);
    }
    return json_pack("{s:s,s:s,s:o,s:o,s:I,s:i}", "repo", p->name.repo, "commit", p->repo.commit,
                     "folder", json_from_path(p->dir), "files", files, "bytes", (json_int_t)bytes,
                     "here already", n_present);
}

json_t *hub_plan(const char *name, const struct hub_options *o, struct error *err) {
    struct hub_pull p = {.lock = -1, .err = err};
    int rc = pull_list(&p, name, o);
    json_t *plan = rc == OK ? plan_json(&p) : NULL;
    pull_close(&p);
    return plan;
}

/* the cache */

/* The path to open for a pulled folder, malloc'ed: the folder if it has a configuration; otherwise
 * its only GGUF file. NULL with an error if it has several GGUF files. */
static char *record_target(const json_t *record, const char *dir, const char *name,
                           struct error *err) {
    const json_t *v;
    const char *gguf = NULL;
    size_t i;
    if (record_file(record, "config.json") || record_file(record, "adapter_config.json"))
        return xstrdup(dir);
    json_array_foreach (json_object_get(record, "files"), i, v) {
        const char *path = json_string_value(json_object_get(v, "path"));
        if (!path || !is_gguf(path) || !hub_path_safe(path)) continue;
        if (gguf) {
            error_set(err, ERR_USAGE,
                      "several files of '%s' are downloaded: name one, as in '%s/%s'", name, name,
                      gguf);
            return NULL;
        }
        gguf = path;
    }
    return gguf ? path_join(dir, gguf) : xstrdup(dir);
}

char *hub_cached_path(const char *name, struct error *err) {
    struct hub_ref n;
    if (hub_ref_parse(name, &n, err) != OK) return NULL;
    char *dir = cache_dir(&n, err), *found = NULL;
    if (!dir) return NULL;
    *err = (struct error){0};
    json_t *record = record_load(dir, err);
    bool present = record_is_complete(record) && (!*n.file || record_file(record, n.file));
    if (present)
        found = *n.file ? path_join(dir, n.file) : record_target(record, dir, name, err);
    else if (err->code == OK)
        error_set(err, ERR_MISSING, "'%s' is not here%s: run 'shoal pull %s'", name,
                  record && !record_is_complete(record) ? " in whole" : "", name);
    json_decref(record);
    free(dir);
    return found;
}

static int entry_visible(const struct dirent *e) {
    return e->d_name[0] != '.';
}

/* Calls add(out, PATH) for each folder in `dir`, in alphabetical order. */
static void for_each_dir(const char *dir, void (*add)(json_t *out, const char *path), json_t *out) {
    struct dirent **entries = NULL;
    int n = scandir(dir, &entries, entry_visible, alphasort);
    for (int i = 0; i < n; i++) {
        char *path = path_join(dir, entries[i]->d_name);
        if (path_is_dir(path)) add(out, path);
        free(path);
        free(entries[i]);
    }
    free(entries);
}

static void list_repo(json_t *out, const char *dir) {
    struct error err = {0};
    json_t *record = record_load(dir, &err);
    if (err.code != OK) log_warn("%s", err.text);
    if (!record) return;
    json_object_set_new(record, "path", json_string(dir));
    json_array_append_new(out, record);
}

static void list_owner(json_t *out, const char *dir) {
    for_each_dir(dir, list_repo, out);
}

json_t *hub_list(struct error *err) {
    char *root = cache_root(err);
    if (!root) return NULL;
    json_t *out = json_array();
    for_each_dir(root, list_owner, out);
    free(root);
    return out;
}
