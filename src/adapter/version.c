/*
 * version: stores the versions of an adapter that are published at a directory, and restores them.
 *
 *     DIR/adapter_config.json, adapter_model.safetensors    the current version
 *     DIR/training_data.hashes                              the same, if the version has it
 *     DIR/.versions/HASH/…, version.json                    every version, including the current
 *     DIR/.versions/installing                              the HASH that is being installed
 *     DIR/.versions/replaced                                DIR's old config meanwhile
 *     DIR/.versions/tmp                                     a version being written or deleted
 *     DIR/.versions/lock                                    the file lock
 *
 * Invariants: (1) a folder HASH is created by one rename and is complete; (2) before DIR's files
 * change, both the old and the new version are stored in such folders, and `installing` contains
 * the new hash; (3) DIR's config is moved away while the tensors are replaced, so that no reader
 * sees parts of two versions. A function that finds `installing` completes that installation before
 * it does anything else.
 *
 * The current version is determined by DIR's files, because another program may have replaced them.
 */
#define _GNU_SOURCE
#include "adapter/internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define VERSION_NAME "version.json"

static const char *const version_files[2] = {PEFT_WEIGHTS_FILE, PEFT_CONFIG_FILE};

struct versions {
    const char *dir;
    char *root, *tmp, *installing; /* DIR/.versions and two paths in it */
    int lock;
};

static void versions_close(struct versions *v) {
    if (v->lock >= 0) close(v->lock);
    free(v->root);
    free(v->tmp);
    free(v->installing);
}

static int versions_lock(struct versions *v, struct error *err) {
    char *path = path_join(v->root, "lock");
    int rc = OK;
    v->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (v->lock < 0) rc = error_errno(err, "cannot create '%s'", path);
    while (rc == OK && flock(v->lock, LOCK_EX) < 0)
        if (errno != EINTR) rc = error_errno(err, "cannot lock '%s'", path);
    free(path);
    return rc;
}

static char *version_path(const struct versions *v, const char *hash) {
    return path_join(v->root, hash);
}

static bool files_equal(const char *a_dir, const char *b_dir, const char *name) {
    char *a = path_join(a_dir, name), *b = path_join(b_dir, name);
    char hashes[2][HASH_LEN];
    struct error ignored;
    bool equal = path_exists(a) && path_exists(b) && sha256_file(a, hashes[0], &ignored) == OK &&
                 sha256_file(b, hashes[1], &ignored) == OK && strcmp(hashes[0], hashes[1]) == 0;
    free(a);
    free(b);
    return equal;
}

/* Copies the version's files to DIR. If it is interrupted at any point, it can be repeated. */
static int version_install(const struct versions *v, const char *hash, struct error *err) {
    char *from = version_path(v, hash), *config = path_join(v->dir, PEFT_CONFIG_FILE),
         *replaced = path_join(v->root, "replaced");
    int rc = file_write(v->installing, hash, strlen(hash), err);
    if (rc == OK && path_exists(config) && !files_equal(from, v->dir, PEFT_CONFIG_FILE))
        rc = path_rename(config, replaced, err);
    if (rc == OK) rc = training_data_copy(from, v->dir, err);
    for (int i = 0; rc == OK && i < 2; i++)
        if (!files_equal(from, v->dir, version_files[i]))
            rc = file_copy(from, v->dir, version_files[i], err);
    if (rc == OK) unlink(v->installing);
    if (rc == OK) unlink(replaced);
    free(from);
    free(config);
    free(replaced);
    return rc;
}

/* Completes an installation that was interrupted. */
static int versions_recover(const struct versions *v, struct error *err) {
    struct buf hash = {0};
    dir_delete(v->tmp);
    if (!path_exists(v->installing)) return OK;
    int rc = file_read(v->installing, HASH_LEN, &hash, err);
    if (rc == OK && !hash_is_valid(hash.data ? hash.data : ""))
        rc = error_set(err, ERR_FORMAT, "'%s' names no version; remove it", v->installing);
    if (rc == OK) rc = version_install(v, hash.data, err);
    buf_release(&hash);
    return rc;
}

static int versions_open(struct versions *v, const char *dir, struct error *err) {
    *v = (struct versions){.dir = dir, .lock = -1};
    v->root = path_join(dir, ".versions");
    v->tmp = path_join(v->root, "tmp");
    v->installing = path_join(v->root, "installing");
    int rc = dir_make(v->root, err);
    if (rc == OK) rc = versions_lock(v, err);
    if (rc == OK) rc = versions_recover(v, err);
    return rc ? error_wrap(err, "versions of '%s'", dir) : OK;
}

/* *metadata stays NULL, with a warning, if version.json cannot be parsed. */
static int version_read(const struct versions *v, const char *hash, json_t **metadata,
                        struct error *err) {
    char *dir = version_path(v, hash), *path = path_join(dir, VERSION_NAME);
    json_t *parsed = json_parse_file(path, err);
    int rc = !parsed && (err->code == ERR_IO || err->code == ERR_MEMORY) ? err->code : OK;
    if (json_is_object(parsed))
        *metadata = json_incref(parsed);
    else if (rc == OK)
        log_warn("version '%.12s' of '%s' is ignored: %s", hash, v->dir,
                 parsed ? "its version.json is not an object" : err->text);
    json_decref(parsed);
    free(dir);
    free(path);
    return rc;
}

static json_int_t version_number(const json_t *metadata) {
    return json_integer_value(json_object_get(metadata, "number"));
}

static const char *version_hash(const json_t *metadata) {
    const char *hash = json_string_value(json_object_get(metadata, "hash"));
    return hash ? hash : "";
}

static int version_compare(const void *a, const void *b) {
    json_int_t x = version_number(*(json_t *const *)a), y = version_number(*(json_t *const *)b);
    return x < y   ? 1
           : x > y ? -1
                   : strcmp(version_hash(*(json_t *const *)a), version_hash(*(json_t *const *)b));
}

static bool version_is_current(const struct versions *v, const char *hash) {
    char *path = version_path(v, hash);
    bool same =
        files_equal(path, v->dir, PEFT_CONFIG_FILE) && files_equal(path, v->dir, PEFT_WEIGHTS_FILE);
    free(path);
    return same;
}

/* The metadata of all versions, newest first, each with "current". */
static int versions_list(const struct versions *v, json_t **out, struct error *err) {
    json_t **all = NULL, *list = json_array();
    size_t n = 0;
    int rc = OK;
    DIR *d = opendir(v->root);
    for (const struct dirent *f; rc == OK && d && (f = readdir(d));) {
        json_t *metadata = NULL;
        if (hash_is_valid(f->d_name)) rc = version_read(v, f->d_name, &metadata, err);
        if (!metadata) continue;
        json_object_set_new(metadata, "hash", json_string(f->d_name));
        json_object_set_new(metadata, "current", json_boolean(version_is_current(v, f->d_name)));
        all = xrealloc(all, (n + 1) * sizeof *all);
        all[n++] = metadata;
    }
    if (d) closedir(d);
    if (n > 1) qsort(all, n, sizeof *all, version_compare);
    for (size_t i = 0; i < n; i++) json_array_append_new(list, all[i]);
    free(all);
    *out = rc == OK ? list : NULL;
    if (rc != OK) json_decref(list);
    return rc;
}

/* The content of version.json for an adapter; `previous` may be "". */
static json_t *version_metadata(const struct adapter *a, json_int_t number, const char *previous,
                                const json_t *notes) {
    char now[32];
    json_t *metadata =
        json_pack("{s:s,s:I,s:s,s:o,s:o}", "hash", a->hash, "number", number, "created",
                  clock_utc(now), "previous", *previous ? json_string(previous) : json_null(),
                  "lineage", a->lineage ? json_deep_copy(a->lineage) : json_object());
    if (notes) json_object_update_missing(metadata, (json_t *)(uintptr_t)notes);
    return metadata;
}

static int version_metadata_write(const char *dir, const json_t *metadata, struct error *err) {
    char *path = path_join(dir, VERSION_NAME);
    char *text = json_dumps(metadata, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    CHECK(text);
    int rc = file_write(path, text, strlen(text), err);
    free(path);
    free(text);
    return rc;
}

/* Checks that the version's content matches its hash. */
static int version_check(const struct versions *v, const char *hash,
                         const struct model_config *shape, struct error *err) {
    char *path = version_path(v, hash);
    struct adapter *a = adapter_load(path, shape, err);
    int rc = a ? OK : err->code;
    if (a && strcmp(a->hash, hash) != 0)
        rc = error_set(err, ERR_FORMAT, "'%s' is damaged: its content hashes to '%.12s'", path,
                       a->hash);
    adapter_release(a);
    free(path);
    return rc;
}

/* Adds a version atomically: copies the files of directory `source`, or saves `a` if `source` is
 * NULL. If the version exists and is undamaged, only replaces its metadata. Takes ownership of
 * `metadata`. */
static int version_add(const struct versions *v, const struct adapter *a, const char *source,
                       const char *base, json_t *metadata, struct error *err) {
    char *path = version_path(v, a->hash);
    int rc = path_is_dir(path) ? version_check(v, a->hash, &a->shape, err) : ERR_MISSING;
    if (rc == OK) {
        if (a->training_data) rc = training_data_write(a->training_data, path, err);
        if (rc == OK) rc = version_metadata_write(path, metadata, err);
    } else if (rc != ERR_IO && rc != ERR_MEMORY) { // the version is absent or damaged
        dir_delete(path);
        rc = dir_make(v->tmp, err);
        if (rc == OK && !source) rc = adapter_save(a, v->tmp, base, err);
        for (int i = 0; rc == OK && source && i < 2; i++)
            rc = file_copy(source, v->tmp, version_files[i], err);
        if (rc == OK && source) rc = training_data_copy(source, v->tmp, err);
        if (rc == OK) rc = version_metadata_write(v->tmp, metadata, err);
        if (rc == OK) rc = path_rename(v->tmp, path, err);
        if (rc != OK) dir_delete(v->tmp);
    }
    json_decref(metadata);
    free(path);
    return rc;
}

static bool has_adapter(const char *dir) {
    struct error ignored;
    return peft_check(dir, &ignored) == OK;
}

/* Adds the adapter in DIR, which is not in `list`, as a version. */
static int unpublished_version_add(const struct versions *v, const json_t *list,
                                   const struct model_config *shape, char hash[HASH_LEN],
                                   struct error *err) {
    struct adapter *a = adapter_load(v->dir, shape, err);
    if (!a) return error_wrap(err, "the adapter in '%s' cannot be kept", v->dir);
    json_int_t number = version_number(json_array_get(list, 0)) + 1;
    const char *last = version_hash(json_array_get(list, 0));
    char *path = version_path(v, a->hash);
    bool is_stored = path_is_dir(path); /* the same adapter under a different config text */
    int rc = is_stored
                 ? OK
                 : version_add(v, a, v->dir, NULL, version_metadata(a, number, last, NULL), err);
    memcpy(hash, a->hash, HASH_LEN);
    adapter_release(a);
    free(path);
    return rc;
}

/* Returns the list of versions; NULL after an error. `hash` receives the hash of the version in
 * DIR, which is added to the versions if it is not in the list; "" when DIR has no adapter. */
static json_t *current_version_save(const struct versions *v, const struct model_config *shape,
                                    char hash[HASH_LEN], struct error *err) {
    json_t *list = NULL, *metadata;
    size_t i;
    hash[0] = '\0';
    if (versions_list(v, &list, err) != OK) return NULL;
    json_array_foreach (list, i, metadata)
        if (json_is_true(json_object_get(metadata, "current")))
            memcpy(hash, version_hash(metadata), HASH_LEN);
    if (hash[0] || !has_adapter(v->dir)) return list;
    int rc = unpublished_version_add(v, list, shape, hash, err);
    json_decref(list);
    list = NULL;
    if (rc == OK) versions_list(v, &list, err); // now with the added version
    return list;
}

static const json_t *version_find(const json_t *list, const char *hash) {
    size_t i;
    json_t *metadata;
    json_array_foreach (list, i, metadata)
        if (strcmp(version_hash(metadata), hash) == 0) return metadata;
    return NULL;
}

static int publish(const struct versions *v, const struct adapter *a, const char *base,
                   const json_t *notes, struct error *err) {
    char current[HASH_LEN];
    json_t *list = current_version_save(v, &a->shape, current, err);
    if (!list) return err->code;
    bool republished = strcmp(current, a->hash) == 0;
    const json_t *old = version_find(list, a->hash);
    const char *earlier = json_string_value(json_object_get(old, "previous"));
    const char *previous = republished ? (earlier ? earlier : "") : current;
    json_int_t number =
        republished ? version_number(old) : version_number(json_array_get(list, 0)) + 1;
    int rc = version_add(v, a, NULL, base, version_metadata(a, number, previous, notes), err);
    if (rc == OK) rc = version_install(v, a->hash, err);
    json_decref(list);
    return rc;
}

int adapter_publish(const struct adapter *a, const char *dir, const char *base, const json_t *notes,
                    struct error *err) {
    struct versions v;
    int rc = versions_open(&v, dir, err);
    if (rc == OK) rc = publish(&v, a, base, notes, err);
    versions_close(&v);
    return rc;
}

/* The version whose hash begins with `prefix`; NULL if there is none or more than one. */
static const json_t *version_find_by_prefix(const struct versions *v, const json_t *list,
                                            const char *prefix, struct error *err) {
    const json_t *found = NULL;
    json_t *metadata;
    size_t i;
    json_array_foreach (list, i, metadata) {
        if (strncmp(version_hash(metadata), prefix, strlen(prefix)) != 0) continue;
        if (found) {
            error_set(err, ERR_USAGE, "several versions of '%s' begin with '%s'", v->dir, prefix);
            return NULL;
        }
        found = metadata;
    }
    if (!found) error_set(err, ERR_MISSING, "no version '%s' of '%s'", prefix, v->dir);
    return found;
}

static const json_t *version_find_previous(const struct versions *v, const json_t *list,
                                           const char *current, struct error *err) {
    const char *previous =
        json_string_value(json_object_get(version_find(list, current), "previous"));
    const json_t *found = previous ? version_find(list, previous) : NULL;
    if (!found) error_set(err, ERR_MISSING, "'%s' has no previous version", v->dir);
    return found;
}

static int rollback(const struct versions *v, const struct model_config *shape,
                    const char *hash_prefix, char hash[HASH_LEN], struct error *err) {
    char current[HASH_LEN];
    json_t *list = current_version_save(v, shape, current, err);
    if (!list) return err->code;
    const json_t *target = hash_prefix ? version_find_by_prefix(v, list, hash_prefix, err)
                                       : version_find_previous(v, list, current, err);
    int rc = target ? OK : err->code;
    if (rc == OK) memcpy(hash, version_hash(target), HASH_LEN);
    if (rc == OK) rc = version_check(v, hash, shape, err);
    if (rc == OK) rc = version_install(v, hash, err);
    json_decref(list);
    return rc;
}

int adapter_rollback(const char *dir, const struct model_config *shape, const char *hash_prefix,
                     char hash[HASH_LEN], struct error *err) {
    struct versions v;
    if (!path_is_dir(dir)) return error_set(err, ERR_MISSING, "no adapter directory '%s'", dir);
    int rc = versions_open(&v, dir, err);
    if (rc == OK) rc = rollback(&v, shape, hash_prefix, hash, err);
    versions_close(&v);
    return rc;
}

bool adapter_exists(const char *dir) {
    char *config = path_join(dir, PEFT_CONFIG_FILE);
    bool exists = path_exists(config);
    free(config);
    return exists;
}

json_t *adapter_versions(const char *dir, struct error *err) {
    struct versions v;
    char *root = path_join(dir, ".versions");
    json_t *list = NULL;
    if (path_is_dir(root)) {
        if (versions_open(&v, dir, err) == OK) versions_list(&v, &list, err);
        versions_close(&v);
    } else {
        list = json_array(); // a query must not create anything
    }
    free(root);
    return list;
}

/* pruning */

bool prune_rule_matches(const struct prune_rule *rule, int64_t rank, int64_t created,
                        double score) {
    return (rule->keep < 0 || rank >= rule->keep) &&
           (rule->min_age < 0 || (created >= 0 && rule->now - created > rule->min_age)) &&
           (isnan(rule->min_score) || score < rule->min_score);
}

/* Unix seconds; -1: unknown. */
static int64_t version_created(const json_t *metadata) {
    struct tm tm = {0};
    const char *end = strptime(json_get_string(metadata, "created"), "%Y-%m-%dT%H:%M:%SZ", &tm);
    return end && !*end ? (int64_t)timegm(&tm) : -1;
}

/* The version that a rollback would restore: the newest one if DIR's files were not published. */
static const char *rollback_target(const json_t *list) {
    json_t *metadata;
    size_t i;
    json_array_foreach (list, i, metadata)
        if (json_is_true(json_object_get(metadata, "current")))
            return json_get_string(metadata, "previous");
    return version_hash(json_array_get(list, 0));
}

/* Deletes the version, unless its folder is a link. If it is interrupted, versions_recover deletes
 * the rest. */
static int version_delete(const struct versions *v, const struct prune_rule *rule, json_t *metadata,
                          json_t *out, struct error *err) {
    char *path = version_path(v, version_hash(metadata));
    struct stat st;
    int rc = OK;
    if (lstat(path, &st) != 0 || !S_ISDIR(st.st_mode)) {
        log_warn("'%s' is not a folder; it is kept", path);
        free(path);
        return OK;
    }
    json_object_set_new(metadata, "bytes", json_integer(tree_disk_usage(path)));
    if (rule->delete_matches) rc = path_rename(path, v->tmp, err);
    if (rule->delete_matches && rc == OK) tree_delete(v->tmp);
    if (rc == OK) json_array_append(out, metadata);
    free(path);
    return rc;
}

static int versions_prune(const struct versions *v, const struct prune_rule *rule, json_t *out,
                          struct error *err) {
    json_t *list = NULL, *metadata;
    size_t i;
    int rc = versions_list(v, &list, err);
    const char *target = rollback_target(list);
    json_array_foreach (list, i, metadata) {
        const json_t *score = json_object_get(metadata, "score");
        bool needed = json_is_true(json_object_get(metadata, "current")) ||
                      strcmp(version_hash(metadata), target) == 0;
        if (rc == OK && !needed &&
            prune_rule_matches(rule, (int64_t)i, version_created(metadata),
                               json_is_number(score) ? json_number_value(score) : NAN))
            rc = version_delete(v, rule, metadata, out, err);
    }
    json_decref(list);
    return rc;
}

int adapter_versions_prune(const char *dir, const struct prune_rule *rule, json_t **out,
                           struct error *err) {
    struct versions v;
    struct stat st;
    char *root = path_join(dir, ".versions");
    bool exists = lstat(root, &st) == 0;
    int rc = OK;
    *out = json_array();
    if (exists && !S_ISDIR(st.st_mode)) {
        rc = error_set(err, ERR_STATE, "'%s' is a link; nothing is deleted through a link", root);
    } else if (exists) {
        rc = versions_open(&v, dir, err);
        if (rc == OK) rc = versions_prune(&v, rule, *out, err);
        versions_close(&v);
    }
    free(root);
    return rc;
}

int adapter_save_rejected(const struct adapter *a, const char *dir, const char *base,
                          const json_t *notes, char **saved_path, struct error *err) {
    char *name = xasprintf("rejected-%.8s", a->hash), *path = path_join(dir, name);
    json_t *metadata = version_metadata(a, 0, "", notes);
    int rc = adapter_save(a, path, base, err);
    if (rc == OK) rc = version_metadata_write(path, metadata, err);
    json_decref(metadata);
    free(name);
    *saved_path = path;
    return rc;
}
