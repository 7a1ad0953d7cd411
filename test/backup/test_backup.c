/*
 * test_backup: files are restored bit for bit, also if they are written during the backup; a second
 * backup writes only new content; broken, missing and forged backups are refused by name; and after
 * a kill or a full disk at any file system call the previous data is complete.
 *
 * The linker puts this file's functions between Shoal and the C library (--wrap in the Makefile):
 * the n-th call of any of them fails, or ends the process. SQLite's own calls are not wrapped, so a
 * full disk under SQLite is simulated by a limit on the size of files.
 */
/* levels: once */
#define _GNU_SOURCE
#include "backup/backup.h"
#include "store/store.h"

#include "folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "database.h"

/* faults */

static struct {
    long n, n_calls; /* the n-th call fails; 0: none does */
    bool kill;
} fault;

static bool fault_now(void) {
    if (++fault.n_calls != fault.n) return false;
    if (fault.kill) raise(SIGKILL);
    errno = ENOSPC;
    return true;
}

int __real_fflush(FILE *f);
int __wrap_fflush(FILE *f);
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_rename(const char *a, const char *b);
int __wrap_rename(const char *a, const char *b);
int __real_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode);
int __real_unlink(const char *path);
int __wrap_unlink(const char *path);
int __real_rmdir(const char *path);
int __wrap_rmdir(const char *path);

int __wrap_fflush(FILE *f) {
    return fault_now() ? EOF : __real_fflush(f);
}
int __wrap_fsync(int fd) {
    return fault_now() ? -1 : __real_fsync(fd);
}
int __wrap_rename(const char *a, const char *b) {
    return fault_now() ? -1 : __real_rename(a, b);
}
int __wrap_mkdir(const char *path, mode_t mode) {
    return fault_now() ? -1 : __real_mkdir(path, mode);
}
/* Removing needs no disk space: it can be killed, but does not fail. */
int __wrap_unlink(const char *path) {
    if (fault.kill) fault_now();
    return __real_unlink(path);
}
int __wrap_rmdir(const char *path) {
    if (fault.kill) fault_now();
    return __real_rmdir(path);
}

/* a server's folders */

static struct error err;
static char dir[64], backup_dir[96], runs[96], state[96];
static struct backup_root roots[2] = {{"state", state}, {"runs", runs}};
static struct backup_options options = {.to = backup_dir, .roots = roots, .n_roots = 2};

static char *path_in(const char *folder, const char *name) {
    static char paths[16][512];
    static int at;
    char *path = paths[at++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void file_create(const char *path, const void *data, size_t n, mode_t mode) {
    char *parent = strndup(path, (size_t)(strrchr(path, '/') - path));
    if (dir_make(parent, &err) != OK || file_write(path, data, n, &err) != OK)
        fail_msg("%s", err.text);
    free(parent);
    assert_int_equal(chmod(path, mode), 0);
}

static void file_create_text(const char *path, const char *text) {
    file_create(path, text, strlen(text), 0644);
}

/* n bytes that depend on the seed. */
static void file_create_random(const char *path, size_t n, uint32_t seed) {
    uint32_t *v = xcalloc(n / 4 + 1, 4);
    struct rng r = rng_make(seed, RNG_TEST, 0, 0);
    rng_fill(&r, v, n / 4 + 1);
    file_create(path, v, n, 0640);
    free(v);
}

static void run_row_add(const char *db, const char *id) {
    json_t *none = json_object();
    struct store *s = store_open(db, &err);
    if (!s || store_run_add(s, id, "test", none, &err) != OK) fail_msg("%s", err.text);
    store_close(s);
    json_decref(none);
}

static int64_t count_rows(const char *db) {
    assert_int_equal(
        database_query_int(db, "SELECT integrity_check = 'ok' FROM pragma_integrity_check"), 1);
    return database_query_int(db, "SELECT count(*) FROM runs");
}

static void folders_create(void) {
    file_create_random(path_in(runs, "r1/adapters/critic/adapter_model.safetensors"), 700001, 1);
    file_create_random(path_in(runs, "r1/adapters/critic/.versions/x/adapter_model.safetensors"),
                       700001, 1);
    file_create_text(path_in(runs, "r1/recipe.yaml"), "model: fry\n");
    file_create_text(path_in(runs, "r1/雪.txt"), "");
    file_create_text(path_in(state, "jobs/job-1/stdout.jsonl"), "{\"a\": 1}\n");
    assert_int_equal(mkdir(path_in(runs, "r1/empty"), 0750), 0);
    assert_int_equal(chmod(path_in(runs, "r1/recipe.yaml"), 0444), 0);
    run_row_add(path_in(runs, "shoal.db"), "one");
    run_row_add(path_in(state, "serve.db"), "two");
}

static int set_up(void **test_state) {
    (void)test_state;
    log_quiet = true;
    err = (struct error){0};
    fault.n = 0;
    fault.kill = false;
    bool memory = access("/dev/shm", W_OK | X_OK) == 0; // fsync is free there
    snprintf(dir, sizeof dir, "%s/shoal-test-backup-XXXXXX", memory ? "/dev/shm" : "/tmp");
    if (!mkdtemp(dir)) return -1;
    snprintf(runs, sizeof runs, "%s/runs", dir);
    snprintf(state, sizeof state, "%s/runs/serve", dir);
    snprintf(backup_dir, sizeof backup_dir, "%s/runs/backups", dir);
    folders_create();
    return 0;
}

static int tear_down(void **test_state) {
    (void)test_state;
    return folder_remove(dir);
}

/* observing */

static struct buf listing;
static const char *listing_root;

/* Appends "path mode hash" of a file that is restored; for a database, whose bytes SQLite may
 * change, the number of rows instead of the hash. */
static int listing_add(const char *path, const struct stat *st, int type, struct FTW *at) {
    const char *name = path + at->base, *dot = strrchr(name, '.');
    char hash[HASH_LEN] = "";
    if (strncmp(path, backup_dir, strlen(backup_dir)) == 0 || strstr(path, ".before-") ||
        strstr(path, ".restoring") || at->level == 0)
        return 0;
    if (strcmp(name, "serve") == 0) return 0;
    if (dot && (strcmp(dot, ".db-wal") == 0 || strcmp(dot, ".db-shm") == 0)) return 0;
    if (dot && strcmp(dot, ".db") == 0)
        snprintf(hash, sizeof hash, "%d rows", (int)count_rows(path));
    else if (type == FTW_F)
        assert_int_equal(sha256_file(path, hash, &err), OK);
    char *line = xasprintf("%s %o %s", path + strlen(listing_root),
                           dot && strcmp(dot, ".db") == 0 ? 0 : st->st_mode & 0777, hash);
    buf_printf(&listing, "%s\n", line);
    free(line);
    return 0;
}

static int compare_lines(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* A folder's files as sorted lines of listing_add. malloc'ed. */
static char *folder_listing(const char *path) {
    struct strings lines = {0};
    char *rest = NULL;
    listing = (struct buf){0};
    listing_root = path;
    assert_int_equal(nftw(path, listing_add, 16, FTW_PHYS), 0);
    for (char *l = strtok_r(listing.data, "\n", &rest); l; l = strtok_r(NULL, "\n", &rest))
        strings_add(&lines, l);
    qsort(lines.v, (size_t)lines.n, sizeof *lines.v, compare_lines);
    struct buf sorted = {0};
    for (int i = 0; i < lines.n; i++) buf_printf(&sorted, "%s\n", lines.v[i]);
    strings_release(&lines);
    buf_release(&listing);
    return sorted.data;
}

static void assert_runs_equal(const char *before) {
    char *now = folder_listing(runs);
    assert_string_equal(now, before);
    free(now);
}

static char id[BACKUP_ID_LEN];

static json_t *backup_make_json(void) {
    json_t *v = backup_create(&options, &err);
    if (!v) fail_msg("%s", err.text);
    snprintf(id, sizeof id, "%s", json_get_string(v, "id"));
    return v;
}

static void backup_make(void) {
    json_decref(backup_make_json());
}

static void restore_checked(const char *which, bool replace) {
    json_t *v = backup_restore(&options, which, replace, &err);
    if (!v) fail_msg("%s", err.text);
    json_decref(v);
}

static void assert_restore_fails(const char *which, int code, const char *words) {
    json_t *v = backup_restore(&options, which, true, &err);
    assert_null(v);
    assert_int_equal(err.code, code);
    if (!strstr(err.text, words)) fail_msg("no '%s' in: %s", words, err.text);
}

/* Verifies a backup; returns the number of problems and writes the first to err. */
static int count_problems(const char *which) {
    json_t *v = backup_verify(&options, which, &err);
    if (!v) fail_msg("%s", err.text);
    const json_t *list = json_object_get(v, "problems");
    int n = (int)json_array_size(list);
    if (n) error_set(&err, ERR_FORMAT, "%s", json_string_value(json_array_get(list, 0)));
    json_decref(v);
    return n;
}

static int n_blobs, n_temporaries;
static int count_entry(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)st;
    n_blobs += type == FTW_F && hash_is_valid(path + at->base);
    n_temporaries += strstr(path + at->base, ".tmp-") != NULL;
    return 0;
}
static int count_blobs(void) {
    n_blobs = n_temporaries = 0;
    nftw(path_in(backup_dir, "blobs"), count_entry, 16, FTW_PHYS);
    return n_blobs;
}

/* The blob of a file. */
static char *blob_path(const char *path) {
    char hash[HASH_LEN], name[128];
    assert_int_equal(sha256_file(path, hash, &err), OK);
    snprintf(name, sizeof name, "blobs/%.2s/%s", hash, hash);
    return path_in(backup_dir, name);
}

/* Removes the folders except the backups, which are moved aside meanwhile. */
static void runs_reset(void) {
    assert_int_equal(__real_rename(backup_dir, path_in(dir, "aside")), 0);
    assert_int_equal(folder_remove(runs), 0);
    assert_int_equal(__real_mkdir(runs, 0755), 0);
    assert_int_equal(__real_rename(path_in(dir, "aside"), backup_dir), 0);
}

/* A name in a folder with this prefix, or NULL. */
static char *find_by_prefix(const char *folder, const char *beginning) {
    DIR *d = opendir(folder);
    char *path = NULL;
    for (const struct dirent *f; d && !path && (f = readdir(d));)
        if (strncmp(f->d_name, beginning, strlen(beginning)) == 0)
            path = path_in(folder, f->d_name);
    if (d) closedir(d);
    return path;
}

/* tests */

static void test_round_trip(void **test_state) {
    (void)test_state;
    char *before = folder_listing(runs);
    backup_make();
    runs_reset();
    restore_checked(NULL, false);
    assert_runs_equal(before);
    assert_int_equal(count_rows(path_in(state, "serve.db")), 1);
    assert_null(find_by_prefix(runs, "serve.before"));
    free(before);
}

static int check_private(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)type, (void)at;
    if (st->st_mode & 077) fail_msg("'%s' is open to others", path);
    return 0;
}

static void test_private(void **test_state) {
    (void)test_state;
    backup_make();
    assert_int_equal(nftw(backup_dir, check_private, 16, FTW_PHYS), 0);
}

static void test_incremental(void **test_state) {
    (void)test_state;
    json_t *v = backup_make_json();
    int n = count_blobs();
    /* equal content is one blob; the rows of both empty databases are not equal */
    assert_int_equal(json_get_number(v, "new_blobs"), n);
    assert_int_equal(n, 6);
    json_decref(v);
    v = backup_make_json();
    assert_int_equal(json_get_number(v, "new_blobs"), 0);
    assert_int_equal(json_get_number(v, "new_bytes"), 0);
    assert_int_equal(count_blobs(), n);
    json_decref(v);
    file_create_random(path_in(runs, "r1/more"), 5000, 9);
    v = backup_make_json();
    assert_int_equal(json_get_number(v, "new_blobs"), 1);
    assert_int_equal(json_get_number(v, "new_bytes"), 5000);
    assert_int_equal(count_blobs(), n + 1);
    json_decref(v);
    assert_int_equal(count_problems(NULL), 0);
}

/* Rows are written in pairs. */
static bool writing;
static void *write_pairs(void *path) {
    sqlite3 *h = NULL;
    CHECK(sqlite3_open(path, &h) == SQLITE_OK);
    sqlite3_busy_timeout(h, 10000);
    while (__atomic_load_n(&writing, __ATOMIC_ACQUIRE)) {
        CHECK(sqlite3_exec(h,
                           "BEGIN IMMEDIATE; INSERT INTO pairs VALUES(randomblob(3000));"
                           "INSERT INTO pairs VALUES(randomblob(3000)); COMMIT",
                           NULL, NULL, NULL) == SQLITE_OK);
        usleep(200); // other connections need the lock too
    }
    sqlite3_close(h);
    return NULL;
}

static void test_under_a_writer(void **test_state) {
    (void)test_state;
    pthread_t thread;
    const char *db = path_in(state, "serve.db");
    sqlite3 *h = NULL;
    assert_int_equal(sqlite3_open(db, &h), SQLITE_OK);
    assert_int_equal(sqlite3_exec(h, "CREATE TABLE pairs(v)", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(h);
    char *path = xstrdup(db);
    int64_t max_rows = 0;
    writing = true;
    pthread_create(&thread, NULL, write_pairs, path);
    for (int i = 0; i < 8; i++) {
        usleep(20000);
        backup_make();
    }
    __atomic_store_n(&writing, false, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    struct strings ids = {0};
    json_t *list = backup_list(backup_dir, &err), *v;
    size_t i;
    json_array_foreach (list, i, v) strings_add(&ids, json_get_string(v, "id"));
    for (int k = 0; k < ids.n; k++) {
        restore_checked(ids.v[k], true);
        int64_t n = database_query_int(path, "SELECT count(*) FROM pairs");
        assert_int_equal(n % 2, 0);
        assert_int_equal(count_rows(path), 1);
        max_rows = MAX(max_rows, n);
    }
    assert_true(max_rows > 0);
    strings_release(&ids);
    json_decref(list);
    free(path);
}

static bool appending;
static void *append(void *path) {
    FILE *f = fopen(path, "a");
    for (int i = 0; __atomic_load_n(&appending, __ATOMIC_ACQUIRE); i++) {
        fprintf(f, "line %d of what is said\n", i);
        __real_fflush(f);
    }
    fclose(f);
    return NULL;
}

/* A file that grows during the backup is stored with the size that it had first. */
static void test_growing(void **test_state) {
    (void)test_state;
    pthread_t thread;
    char *path = xstrdup(path_in(state, "jobs/job-1/stdout.jsonl"));
    appending = true;
    pthread_create(&thread, NULL, append, path);
    json_t *v = backup_make_json();
    __atomic_store_n(&appending, false, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    assert_int_equal(json_array_size(json_object_get(v, "left_out")), 0);
    struct buf all = {0}, kept = {0};
    assert_int_equal(file_read(path, 1 << 30, &all, &err), OK);
    restore_checked(NULL, true);
    assert_int_equal(file_read(path, 1 << 30, &kept, &err), OK);
    assert_in_range(kept.len, 9, all.len);
    assert_memory_equal(kept.data, all.data, kept.len);
    json_decref(v);
    buf_release(&all);
    buf_release(&kept);
    free(path);
}

/* A progress callback that truncates a file each time after its reading has begun. */
static bool truncate_while_read(void *ctx, int64_t done, int64_t total) {
    (void)done, (void)total;
    struct stat st;
    if (stat(ctx, &st) == 0 && st.st_size > 4) CHECK(truncate(ctx, st.st_size / 2) == 0);
    return true;
}

static void test_changing(void **test_state) {
    (void)test_state;
    char *path = xstrdup(path_in(runs, "r1/adapters/critic/adapter_model.safetensors"));
    file_create_random(path, 4 << 20, 3);
    options.on_progress = truncate_while_read;
    options.ctx = path;
    json_t *v = backup_make_json();
    options.on_progress = NULL;
    assert_int_equal(json_array_size(json_object_get(v, "left_out")), 1);
    const char *words = json_string_value(json_array_get(json_object_get(v, "left_out"), 0));
    assert_non_null(strstr(words, "adapter_model.safetensors kept changing"));
    json_decref(v);
    assert_int_equal(count_problems(NULL), 0);
    free(path);
}

static void test_left_out(void **test_state) {
    (void)test_state;
    assert_int_equal(symlink("/etc/passwd", path_in(runs, "r1/link")), 0);
    assert_int_equal(mkfifo(path_in(runs, "r1/pipe"), 0600), 0);
    file_create_text(path_in(runs, "r1/\xff\xfe"), "x");
    file_create_text(path_in(runs, "r1/half.tmp-12"), "x");
    file_create_text(path_in(state, "jobs/lock"), "");
    file_create_text(path_in(runs, "serve.before-20260101-000000-000/x"), "old");
    json_t *v = backup_make_json();
    const json_t *list = json_object_get(v, "left_out");
    char *text = json_canonical(list);
    assert_int_equal(json_array_size(list), 2);
    assert_non_null(strstr(text, "runs: r1/link is a link"));
    assert_non_null(strstr(text, "has a name that cannot be stored"));
    free(text);
    json_decref(v);
    runs_reset();
    restore_checked(NULL, false);
    assert_false(path_exists(path_in(runs, "r1/pipe")) ||
                 path_exists(path_in(runs, "r1/half.tmp-12")) ||
                 path_exists(path_in(state, "jobs/lock")) || find_by_prefix(runs, "serve.before"));
    assert_true(path_exists(path_in(runs, "r1/recipe.yaml")));
}

static void test_nothing_there(void **test_state) {
    (void)test_state;
    json_t *list = backup_list(backup_dir, &err);
    assert_int_equal(json_array_size(list), 0);
    json_decref(list);
    assert_restore_fails(NULL, ERR_MISSING, "there are no backups");
    assert_int_equal(folder_remove(runs), 0);
    snprintf(backup_dir, sizeof backup_dir, "%s/elsewhere", dir);
    assert_null(backup_create(&options, &err));
    assert_int_equal(err.code, ERR_MISSING);
}

/* damaged backups */

static void flip_byte(const char *path, long at) {
    int fd = open(path, O_RDWR);
    uint8_t byte = 0;
    assert_true(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void test_broken_blobs(void **test_state) {
    (void)test_state;
    char *before = folder_listing(runs);
    char *model = xstrdup(blob_path(path_in(runs, "r1/adapters/critic/adapter_model.safetensors")));
    char *recipe = xstrdup(blob_path(path_in(runs, "r1/recipe.yaml")));
    backup_make();
    flip_byte(model, 654321);
    assert_int_equal(count_problems(id), 1);
    assert_non_null(strstr(err.text, "adapter_model.safetensors"));
    assert_restore_fails(NULL, ERR_FORMAT, "does not match its hash");
    flip_byte(model, 654321);
    assert_int_equal(count_problems(NULL), 0);
    assert_int_equal(truncate(model, 700000), 0);
    assert_int_equal(count_problems(NULL), 1);
    assert_non_null(strstr(err.text, "has a wrong length"));
    assert_int_equal(__real_unlink(recipe), 0);
    assert_int_equal(count_problems(NULL), 2);
    assert_restore_fails(NULL, ERR_FORMAT, "r1/");
    assert_runs_equal(before);
    assert_null(find_by_prefix(dir, "runs."));
    backup_make(); // which writes them again
    assert_int_equal(count_problems(NULL), 0);
    /* a link is not a blob */
    assert_int_equal(__real_unlink(recipe), 0);
    assert_int_equal(symlink(path_in(runs, "r1/recipe.yaml"), recipe), 0);
    assert_int_equal(count_problems(id), 1);
    free(model);
    free(recipe);
    free(before);
}

static char *manifest_path(void) {
    char name[64];
    snprintf(name, sizeof name, "%s.json", id);
    return path_in(backup_dir, name);
}

static void test_broken_manifests(void **test_state) {
    (void)test_state;
    backup_make();
    struct buf whole = {0};
    assert_int_equal(file_read(manifest_path(), 1 << 20, &whole, &err), OK);
    for (size_t n = 0; n < whole.len; n += 1 + whole.len / 50) {
        assert_int_equal(file_write(manifest_path(), whole.data, n, &err), OK);
        assert_restore_fails(id, ERR_FORMAT, "is damaged");
        assert_int_equal(count_problems(NULL), 1);
    }
    json_t *list = backup_list(backup_dir, &err);
    assert_non_null(strstr(json_get_string(json_array_get(list, 0), "problem"), "is damaged"));
    json_decref(list);
    for (size_t at = 0; at < whole.len; at += 1 + whole.len / 50) {
        assert_int_equal(file_write(manifest_path(), whole.data, whole.len, &err), OK);
        flip_byte(manifest_path(), (long)at);
        assert_restore_fails(id, ERR_FORMAT, "is damaged");
    }
    buf_release(&whole);
}

/* The manifest with replaced fields of the first file, and a matching hash. */
static void manifest_forge(const char *fields) {
    json_t *v = json_parse_file(manifest_path(), &err), *set = json_loads(fields, 0, NULL);
    char hash[HASH_LEN];
    assert_non_null(v);
    assert_non_null(set);
    json_t *file = json_array_get(json_object_get(v, "files"), 0);
    if (json_object_get(set, "top"))
        json_object_update(v, json_object_get(set, "top"));
    else
        json_object_update(file, set);
    json_object_del(v, "hash");
    char *text = json_canonical(v);
    sha256_bytes(text, strlen(text), hash);
    free(text);
    json_object_set_new(v, "hash", json_string(hash));
    text = json_canonical(v);
    file_create_text(manifest_path(), text);
    free(text);
    json_decref(set);
    json_decref(v);
}

static void test_forged_manifests(void **test_state) {
    (void)test_state;
    static const struct {
        const char *fields, *words;
    } cases[] = {
        {"{\"path\": \"../x\"}", "not a path below its root"},
        {"{\"path\": \"/etc/x\"}", "not a path below its root"},
        {"{\"path\": \"a/../../x\"}", "not a path below its root"},
        {"{\"path\": \"a/..\"}", "not a path below its root"},
        {"{\"path\": \"./x\"}", "not a path below its root"},
        {"{\"path\": \"a//x\"}", "not a path below its root"},
        {"{\"path\": \"a/\"}", "not a path below its root"},
        {"{\"path\": \"x.swapping\"}", "not a path below its root"},
        {"{\"path\": \"x.before-20260101-000000-000/y\"}", "not a path below its root"},
        {"{\"path\": 7}", "not a path below its root"},
        {"{\"root\": \"elsewhere\"}", "which is not a root"},
        {"{\"path\": \"zzz\"}", "out of order"},
        {"{\"mode\": 2541}", "lacks its mode"},
        {"{\"mode\": -1}", "lacks its mode"},
        {"{\"dir\": false, \"size\": -1}", "lacks its mode"},
        {"{\"dir\": false, \"size\": 1e99}", "lacks its mode"},
        {"{\"dir\": false, \"size\": 1, \"sha256\": \"../../x\"}", "lacks its mode"},
        {"{\"top\": {\"format\": 2}}", "not of format"},
        {"{\"top\": {\"id\": \"20260101-000000-000\"}}", "it has the id"},
        {"{\"top\": {\"files\": {}}}", "lacks its roots"},
        {"{\"top\": {\"roots\": {\"../x\": \"y\"}}}", "not the name of a root"},
    };
    backup_make();
    struct buf whole = {0};
    assert_int_equal(file_read(manifest_path(), 1 << 20, &whole, &err), OK);
    char *before = folder_listing(runs);
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        file_create(manifest_path(), whole.data, whole.len, 0600);
        manifest_forge(cases[i].fields);
        json_t *v = backup_restore(&options, id, true, &err);
        if (v || !strstr(err.text, cases[i].words))
            fail_msg("%s: %s", cases[i].fields, v ? "restored" : err.text);
    }
    file_create(manifest_path(), whole.data, whole.len, 0600);
    assert_runs_equal(before);
    assert_restore_fails("../../x", ERR_MISSING, "is not a backup's id");
    assert_restore_fails("20260101-000000-000", ERR_MISSING, "no backup");
    restore_checked(id, true); // forging has changed nothing else
    free(before);
    buf_release(&whole);
}

/* restoring */

static void test_replace(void **test_state) {
    (void)test_state;
    char *before = folder_listing(runs);
    backup_make();
    file_create_text(path_in(runs, "r1/recipe2.yaml"), "changed\n");
    file_create_text(path_in(state, "new"), "changed\n");
    assert_null(backup_restore(&options, id, false, &err));
    assert_int_equal(err.code, ERR_STATE);
    assert_non_null(strstr(err.text, "--replace"));
    json_t *v = backup_restore(&options, id, true, &err);
    assert_non_null(v);
    assert_runs_equal(before);
    const json_t *r = json_object_get(v, "roots");
    const char *old = json_get_string(json_object_get(r, "runs"), "before");
    assert_true(path_exists(path_in(old, "r1/recipe2.yaml")));
    assert_true(
        path_exists(path_in(json_get_string(json_object_get(r, "state"), "before"), "new")));
    assert_false(path_exists(path_in(runs, "r1/recipe2.yaml")));
    assert_false(path_exists(path_in(backup_dir, "restore.json")));
    json_decref(v);
    free(before);
}

static void test_in_use(void **test_state) {
    (void)test_state;
    backup_make();
    file_create_text(path_in(state, "jobs/lock"), "");
    int fd = open(path_in(state, "jobs/lock"), O_RDWR);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    assert_restore_fails(id, ERR_STATE, "a server uses");
    close(fd);
    restore_checked(id, true);
}

static void test_one_at_a_time(void **test_state) {
    (void)test_state;
    backup_make();
    int fd = open(path_in(backup_dir, "lock"), O_RDWR);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    assert_null(backup_create(&options, &err));
    assert_int_equal(err.code, ERR_STATE);
    assert_restore_fails(id, ERR_STATE, "is at work");
    assert_null(backup_prune(backup_dir, 1, &err));
    assert_null(backup_verify(&options, NULL, &err));
    close(fd);
    backup_make();
}

/* Other kinds of roots: a file, a separate folder, a missing one. */
static void test_root_kinds(void **test_state) {
    (void)test_state;
    char file[128], folder[128], other[128];
    snprintf(file, sizeof file, "%s/team.yaml", dir);
    snprintf(folder, sizeof folder, "%s/adapters", dir);
    snprintf(other, sizeof other, "%s/absent", dir);
    struct backup_root more[] = {
        {"state", state}, {"runs", runs}, {"team.yaml", file}, {"adapters", folder}, {"no", other}};
    struct backup_options p = {.to = backup_dir, .roots = more, .n_roots = 5};
    file_create_text(file, "agents: 3\n");
    file_create_text(path_in(folder, "a/x"), "1");
    json_t *v = backup_create(&p, &err);
    assert_non_null(v);
    assert_int_equal(json_array_size(json_object_get(v, "left_out")), 1);
    json_decref(v);
    file_create_text(file, "agents: 4\n");
    assert_int_equal(folder_remove(folder), 0);
    p.n_roots = 3;
    v = backup_restore(&p, NULL, true, &err);
    assert_non_null(v);
    assert_int_equal(json_array_size(json_object_get(v, "left_out")), 1); // adapters
    json_decref(v);
    assert_false(path_exists(folder));
    p.n_roots = 4;
    json_decref(backup_restore(&p, NULL, true, &err));
    assert_true(path_exists(path_in(folder, "a/x")));
    struct buf text = {0};
    assert_int_equal(file_read(file, 100, &text, &err), OK);
    assert_string_equal(text.data, "agents: 3\n");
    assert_non_null(find_by_prefix(dir, "team.yaml.before-"));
    buf_release(&text);
    /* a folder inside a replaced folder is refused */
    snprintf(state, sizeof state, "%s/runs/deep/serve", dir);
    assert_null(backup_restore(&options, NULL, true, &err));
    assert_int_equal(err.code, ERR_USAGE);
}

static void test_prune(void **test_state) {
    (void)test_state;
    char first[BACKUP_ID_LEN];
    backup_make();
    snprintf(first, sizeof first, "%s", id);
    int n = count_blobs();
    file_create_random(path_in(runs, "r1/second"), 3000, 5);
    backup_make();
    assert_int_equal(__real_unlink(path_in(runs, "r1/second")), 0);
    file_create_random(path_in(runs, "r1/third"), 2000, 6);
    backup_make();
    assert_int_equal(count_blobs(), n + 2);
    json_t *v = backup_prune(backup_dir, 1, &err);
    assert_int_equal(json_get_number(v, "backups"), 2);
    assert_int_equal(json_get_number(v, "blobs"), 1);
    assert_int_equal(json_get_number(v, "bytes"), 3000);
    json_decref(v);
    assert_int_equal(count_blobs(), n + 1);
    assert_int_equal(count_problems(NULL), 0);
    restore_checked(NULL, true);
    assert_null(backup_delete(backup_dir, first, &err));
    assert_int_equal(err.code, ERR_MISSING);
    /* if another manifest cannot be read, the needed blobs are unknown */
    char broken[BACKUP_ID_LEN];
    snprintf(broken, sizeof broken, "%s", id);
    char *path = xstrdup(manifest_path());
    backup_make();
    file_create_text(path, "{");
    assert_null(backup_delete(backup_dir, id, &err));
    assert_int_equal(err.code, ERR_FORMAT);
    assert_true(path_exists(manifest_path()));
    json_decref(backup_delete(backup_dir, broken, &err));
    assert_int_equal(count_problems(NULL), 0);
    free(path);
}

static void test_scheduled_restore(void **test_state) {
    (void)test_state;
    char *before = folder_listing(runs);
    backup_make();
    file_create_text(path_in(state, "new"), "changed\n");
    assert_null(backup_restore_run_scheduled(&options, &err));
    assert_int_equal(err.code, OK);
    assert_int_equal(backup_restore_cancel(backup_dir, id, &err), ERR_MISSING);
    assert_int_equal(backup_restore_schedule(&options, id, &err), OK);
    json_t *v = backup_restore_scheduled(backup_dir);
    assert_string_equal(json_get_string(v, "id"), id);
    json_decref(v);
    assert_null(backup_delete(backup_dir, id, &err));
    assert_int_equal(err.code, ERR_STATE);
    assert_int_equal(backup_restore_cancel(backup_dir, id, &err), OK);
    assert_null(backup_restore_run_scheduled(&options, &err));
    assert_true(path_exists(path_in(state, "new")));

    /* other targets than at the request */
    assert_int_equal(backup_restore_schedule(&options, id, &err), OK);
    struct backup_root elsewhere[] = {{"state", dir}, {"runs", runs}};
    struct backup_options p = {.to = backup_dir, .roots = elsewhere, .n_roots = 2};
    assert_null(backup_restore_run_scheduled(&p, &err));
    assert_int_equal(err.code, OK);
    assert_true(path_exists(path_in(state, "new")));
    v = backup_restore_run_scheduled(&options, &err);
    if (!v) fail_msg("%s", err.text);
    json_decref(v);
    assert_runs_equal(before);
    assert_null(backup_restore_scheduled(backup_dir));

    /* damaged between request and restore */
    assert_int_equal(backup_restore_schedule(&options, id, &err), OK);
    assert_int_equal(__real_unlink(blob_path(path_in(runs, "r1/recipe.yaml"))), 0);
    assert_null(backup_restore_run_scheduled(&options, &err));
    assert_int_equal(err.code, OK);
    assert_runs_equal(before);
    v = backup_restore_scheduled(backup_dir);
    assert_non_null(strstr(json_get_string(v, "failed"), "is missing"));
    json_decref(v);
    assert_int_equal(backup_restore_schedule(&options, id, &err), ERR_FORMAT);

    /* a restore that began and was interrupted keeps its journal */
    char *journal = path_in(backup_dir, "restore.json"),
         *text = xasprintf("{\"id\":\"%s\",\"stamp\":\"%s\"}", id, id);
    file_create_text(journal, text);
    assert_int_equal(backup_restore_schedule(&options, id, &err), ERR_STATE);
    assert_non_null(strstr(err.text, "finish it first"));
    free(text);
    free(before);
}

static bool stop_early(void *ctx, int64_t done, int64_t total) {
    (void)ctx, (void)total;
    return done < 300000;
}

static void test_stopped(void **test_state) {
    (void)test_state;
    options.on_progress = stop_early;
    assert_null(backup_create(&options, &err));
    assert_int_equal(err.code, ERR_STATE);
    assert_null(find_by_prefix(backup_dir, "2"));
    count_blobs();
    assert_int_equal(n_temporaries, 0);
    options.on_progress = NULL;
    backup_make();
    options.on_progress = stop_early;
    assert_null(backup_verify(&options, id, &err));
    assert_int_equal(err.code, ERR_STATE);
    assert_restore_fails(id, ERR_STATE, "stopped by the caller");
    options.on_progress = NULL;
    assert_int_equal(count_problems(id), 0);
}

/* kills and full disks */

static int run_in_child(int (*run)(void), long at, bool kill_it) {
    int status;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        fault.n = at;
        fault.n_calls = 0;
        fault.kill = kill_it;
        _exit(run());
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

enum { DONE = 7, REFUSED, TOLERATED };

static int child_result(const json_t *v) {
    return !v ? REFUSED : fault.n && fault.n_calls >= fault.n ? TOLERATED : DONE;
}

static int child_backup(void) {
    return child_result(backup_create(&options, &err));
}

static int child_restore(void) {
    return child_result(backup_restore(&options, NULL, true, &err));
}

/* Deletes all other backups, including that of a call that was killed after it wrote its manifest.
 */
static void other_backups_delete(const char *kept) {
    json_t *list = backup_list(backup_dir, &err), *v;
    size_t i;
    json_array_foreach (list, i, v) {
        json_t *gone = strcmp(json_get_string(v, "id"), kept) != 0
                           ? backup_delete(backup_dir, json_get_string(v, "id"), &err)
                           : json_object();
        if (!gone) fail_msg("%s", err.text);
        json_decref(gone);
    }
    json_decref(list);
}

/* Makes the n-th file system call of a backup fail, or kills it there, for every n. */
static void backup_with_faults(bool kill_it) {
    char first[BACKUP_ID_LEN];
    backup_make();
    snprintf(first, sizeof first, "%s", id);
    int n = count_blobs(), whole = 0;
    // Blob folders are made as their names occur, so the number of calls varies.
    for (long at = 1; whole < 8; at++) {
        file_create_random(path_in(runs, "r1/second"), 3000, (uint32_t)(100 + 2 * at));
        file_create_random(path_in(runs, "r2/third"), 3000, (uint32_t)(101 + 2 * at));
        run_row_add(path_in(runs, "shoal.db"), path_in("", "run"));
        int how = run_in_child(child_backup, at, kill_it);
        whole += how == DONE;
        if (how != DONE) assert_int_equal(how, kill_it ? -SIGKILL : REFUSED);
        assert_true(at > 15 || how != DONE);
        assert_int_equal(count_problems(first), 0);
        count_blobs();
        if (!kill_it) assert_int_equal(n_temporaries, 0);
        backup_make();
        assert_int_equal(count_problems(NULL), 0);
        count_blobs();
        assert_int_equal(n_temporaries, 0);
        other_backups_delete(first);
        assert_int_equal(__real_unlink(path_in(runs, "shoal.db")), 0);
        run_row_add(path_in(runs, "shoal.db"), "one");
        assert_int_equal(count_blobs(), n);
    }
}

static void test_killed_backup(void **test_state) {
    (void)test_state;
    backup_with_faults(true);
}

static void test_full_backup(void **test_state) {
    (void)test_state;
    backup_with_faults(false);
}

/* Whether the data from before a restore is still stored somewhere. */
static bool old_data_exists(void) {
    char *old = find_by_prefix(dir, "runs.before-");
    return path_exists(path_in(runs, "old")) || (old && path_exists(path_in(old, "old")));
}

static void restore_with_faults(bool kill_it) {
    char *before = folder_listing(runs);
    backup_make();
    int how;
    long at = 1;
    for (;; at++) {
        file_create_text(path_in(runs, "old"), "1");
        file_create_text(path_in(state, "old"), "1");
        char *changed = folder_listing(runs);
        how = run_in_child(child_restore, at, kill_it);
        if (how == DONE) {
            free(changed);
            break;
        }
        assert_int_equal(how, kill_it ? -SIGKILL : REFUSED);
        if (!old_data_exists()) fail_msg("call %ld: what was there is lost", at);
        struct error why;
        bool begun = backup_is_unfinished(state, &why) || backup_is_unfinished(runs, &why);
        if (!begun && !path_exists(path_in(backup_dir, "restore.json"))) assert_runs_equal(changed);
        assert_int_equal(count_problems(NULL), 0);
        restore_checked(NULL, true);
        assert_runs_equal(before);
        if (!old_data_exists()) fail_msg("call %ld: what was there is lost at last", at);
        assert_false(backup_is_unfinished(state, &why) || backup_is_unfinished(runs, &why));
        assert_false(path_exists(path_in(backup_dir, "restore.json")));
        assert_int_equal(folder_remove(find_by_prefix(dir, "runs.before-")), 0);
        for (char *old; (old = find_by_prefix(runs, "serve.before-"));)
            assert_int_equal(folder_remove(old), 0);
        free(changed);
    }
    assert_true(at > 40);
    free(before);
}

static void test_killed_restore(void **test_state) {
    (void)test_state;
    restore_with_faults(true);
}

static void test_full_restore(void **test_state) {
    (void)test_state;
    restore_with_faults(false);
}

/* Runs a backup with a limit on the size of each file: SQLite's copy, a blob, the manifest. */
static int child_backup_limited(void) {
    struct rlimit r = {(rlim_t)fault.n, (rlim_t)fault.n};
    signal(SIGXFSZ, SIG_IGN);
    fault.n = 0;
    CHECK(setrlimit(RLIMIT_FSIZE, &r) == 0);
    return child_backup();
}

static void test_file_size_limit(void **test_state) {
    (void)test_state;
    char first[BACKUP_ID_LEN];
    backup_make();
    snprintf(first, sizeof first, "%s", id);
    run_row_add(path_in(runs, "shoal.db"), "another");
    file_create_random(path_in(runs, "r1/large"), 400000, 8);
    for (long limit = 0; limit < 400000; limit = 2 * limit + 500) {
        assert_int_equal(run_in_child(child_backup_limited, limit, false), REFUSED);
        assert_int_equal(count_problems(first), 0);
        count_blobs();
        assert_int_equal(n_temporaries, 0);
    }
    backup_make();
    assert_int_equal(count_problems(NULL), 0);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)
int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_round_trip),
        TEST(test_private),
        TEST(test_incremental),
        TEST(test_under_a_writer),
        TEST(test_growing),
        TEST(test_changing),
        TEST(test_left_out),
        TEST(test_nothing_there),
        TEST(test_broken_blobs),
        TEST(test_broken_manifests),
        TEST(test_forged_manifests),
        TEST(test_replace),
        TEST(test_in_use),
        TEST(test_one_at_a_time),
        TEST(test_root_kinds),
        TEST(test_prune),
        TEST(test_scheduled_restore),
        TEST(test_stopped),
        TEST(test_killed_backup),
        TEST(test_full_backup),
        TEST(test_killed_restore),
        TEST(test_full_restore),
        TEST(test_file_size_limit),
    };
    return cmocka_run_group_tests_name("backup", tests, NULL, NULL);
}
