/*
 * test_integrity: a store that was not closed is checked when it is opened, a damaged one is
 * refused and not changed, and the copy of its readable rows is a valid store.
 *
 * Damage is written to the file without SQLite, as a disk would do it.
 */
/* levels: once */
#define _GNU_SOURCE
#include "store/store.h"

#include "folder.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "database.h"

enum { PAGE = 4096, DOCUMENTS = 3000, EVENTS = 5000, CALLS = 3000, RUNS = 50, LARGE = 97 };
enum { N_ROWS = DOCUMENTS + EVENTS + CALLS + RUNS };

static struct error err;
static char dir[64], path[96], copy[96];

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    err = (struct error){0};
    snprintf(dir, sizeof dir, "/tmp/shoal-test-integrity-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/shoal.db", dir);
    snprintf(copy, sizeof copy, "%s/copy.db", dir);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    return folder_remove(dir);
}

/* Every 97th document is larger than a page. */
static json_t *document_make(int i) {
    char text[6001];
    size_t n = i % LARGE ? 100 : sizeof text - 1;
    memset(text, 'a' + i % 26, n);
    text[n] = 0;
    return json_pack("{s:i,s:s}", "n", i, "text", text);
}

static void rows_write(struct store *s) {
    char id[32];
    json_t *empty = json_object();
    assert_int_equal(store_begin(s, &err), OK);
    for (int i = 0; i < DOCUMENTS; i++) {
        json_t *v = document_make(i);
        snprintf(id, sizeof id, "document-%06d", i);
        assert_int_equal(store_document_put(s, i % 2 ? "odd" : "even", id, v, &err), OK);
        json_decref(v);
    }
    for (int i = 0; i < EVENTS; i++) {
        json_t *v = json_pack("[{s:i,s:s}]", "number", i, "text", "an event of the log");
        assert_int_equal(store_log_append(s, i % 2 ? "one" : "two", i / 2 + 1, v, &err), OK);
        json_decref(v);
    }
    for (int i = 0; i < CALLS; i++) {
        float prob[4] = {(float)i};
        struct store_call c = {.choice = i % 4, .n_choices = 4, .prob = prob, .text = "output"};
        sha256_bytes(&i, sizeof i, c.key);
        assert_int_equal(store_call_put(s, &c, &err), OK);
    }
    for (int i = 0; i < RUNS; i++) {
        snprintf(id, sizeof id, "run-%d", i);
        assert_int_equal(store_run_add(s, id, "demo", empty, &err), OK);
    }
    json_decref(empty);
    assert_int_equal(store_commit(s, &err), OK);
}

static void store_write_closed(void) {
    struct store *s = store_open(path, &err);
    if (!s) fail_msg("%s", err.text);
    rows_write(s);
    store_close(s);
}

/* Kills a process that has the store open, within a transaction if `in_transaction`. */
static void store_kill(bool in_transaction) {
    pid_t child = fork();
    if (child == 0) {
        struct store *s = store_open(path, &err);
        if (s && store_run_add(s, "killed", "demo", json_object(), &err) == OK &&
            (!in_transaction || store_begin(s, &err) == OK)) {
            for (int i = 0; in_transaction && i < 2000; i++)
                store_document_put(s, "uncommitted", "document", document_make(i), &err);
            raise(SIGKILL);
        }
        _exit(1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status));
}

static off_t file_size(const char *name) {
    struct stat st;
    return stat(name, &st) == 0 ? st.st_size : -1;
}

/* Overwrites page `number`, counted from 1, with bytes of a fixed sequence. */
static void page_overwrite(int64_t number) {
    uint8_t bytes[PAGE];
    uint32_t x = (uint32_t)number * 2654435761u + 1;
    int fd = open(path, O_WRONLY);
    for (int i = 0; i < PAGE; i++) {
        x = x * 1664525u + 1013904223u;
        bytes[i] = (uint8_t)(x >> 24);
    }
    assert_int_equal(pwrite(fd, bytes, PAGE, (number - 1) * PAGE), PAGE);
    close(fd);
}

/* The leaf of a table after part / of of its leaves. Opening `file` here also closes it. */
static int64_t leaf_of(const char *file, const char *table, int part, int of) {
    char sql[256];
    snprintf(sql, sizeof sql,
             "SELECT pageno FROM dbstat WHERE name = '%s' AND pagetype = 'leaf' ORDER BY path"
             " LIMIT 1 OFFSET (SELECT count(*) * %d / %d FROM dbstat WHERE name = '%s' AND"
             " pagetype = 'leaf')",
             table, part, of, table);
    return database_query_int(file, sql);
}

static char *file_hash(const char *name) {
    static char hash[HASH_LEN];
    assert_int_equal(sha256_file(name, hash, &err), OK);
    return hash;
}

/* Every row of `copy` is a row of the undamaged store `original`, and it has at least `least`
 * rows. */
static void assert_copy(const char *original, const json_t *report, int64_t least) {
    static const char *const tables[] = {"documents", "logs", "calls", "runs"};
    char sql[512];
    int64_t rows = 0;
    assert_int_equal(
        database_query_int(copy, "SELECT integrity_check = 'ok' FROM pragma_integrity_check"), 1);
    for (size_t i = 0; i < ARRAY_LEN(tables); i++) {
        sqlite3 *db = NULL;
        sqlite3_stmt *q = NULL;
        assert_int_equal(sqlite3_open(copy, &db), SQLITE_OK);
        snprintf(sql, sizeof sql, "ATTACH '%s' AS original", original);
        assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
        snprintf(sql, sizeof sql,
                 "SELECT count(*), (SELECT count(*) FROM (SELECT * FROM main.%s EXCEPT SELECT *"
                 " FROM original.%s)) FROM main.%s",
                 tables[i], tables[i], tables[i]);
        assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &q, NULL), SQLITE_OK);
        assert_int_equal(sqlite3_step(q), SQLITE_ROW);
        rows += sqlite3_column_int64(q, 0);
        assert_int_equal(sqlite3_column_int64(q, 1), 0);
        sqlite3_finalize(q);
        sqlite3_close(db);
    }
    assert_int_equal(json_get_number(report, "rows"), rows);
    if (rows < least) fail_msg("%lld of %d rows", (long long)rows, N_ROWS);
}

static const json_t *table_report(const json_t *report, const char *name) {
    const json_t *v;
    size_t i;
    json_array_foreach (json_object_get(report, "tables"), i, v)
        if (strcmp(json_get_string(v, "table"), name) == 0) return v;
    fail_msg("no table '%s'", name);
    return NULL;
}

static size_t gaps(const json_t *report, const char *name) {
    return json_array_size(json_object_get(table_report(report, name), "gaps"));
}

static void assert_refused(void) {
    char before[HASH_LEN];
    strcpy(before, file_hash(path));
    for (int i = 0; i < 2; i++) { /* the first refusal does not repair anything */
        assert_null(store_open(path, &err));
        assert_int_equal(err.code, ERR_FORMAT);
        assert_non_null(strstr(err.text, "is damaged"));
        assert_non_null(strstr(err.text, "shoal salvage"));
    }
    assert_string_equal(file_hash(path), before);
}

static void test_killed_is_opened(void **state) {
    (void)state;
    store_write_closed();
    for (int i = 0; i < 2; i++) {
        store_kill(true);
        struct store *s = store_open(path, &err);
        if (!s) fail_msg("%s", err.text);
        int64_t n = -1;
        assert_int_equal(store_document_count(s, "uncommitted", "", &n, &err), OK);
        assert_int_equal(n, 0);
        store_close(s);
        assert_int_equal(
            database_query_int(path, "DELETE FROM runs WHERE id = 'killed' RETURNING 1"), 1);
    }
}

/* A damaged leaf of `documents`: only a check of the whole file finds it. */
static void test_check_only_if_not_closed(void **state) {
    (void)state;
    store_write_closed();
    page_overwrite(leaf_of(path, "documents", 1, 2));
    struct store *s = store_open(path, &err);
    assert_non_null(s);
    store_close(s);
    store_kill(false);
    assert_refused();
}

static void test_open_elsewhere_is_not_checked(void **state) {
    (void)state;
    char wal[128];
    store_write_closed();
    page_overwrite(leaf_of(path, "documents", 1, 2));
    snprintf(wal, sizeof wal, "%s-wal", path);
    struct store *first = store_open(path, &err), *second;
    json_t *empty = json_object();
    assert_non_null(first);
    assert_true(file_size(wal) > 0);
    pid_t child = fork();
    if (child == 0) { /* another process */
        second = store_open(path, &err);
        bool good = second && store_run_add(second, "child", "demo", empty, &err) == OK;
        store_close(second);
        _exit(!good);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    second = store_open(path, &err); /* this process */
    assert_non_null(second);
    assert_int_equal(store_run_add(first, "first", "demo", empty, &err), OK);
    assert_int_equal(store_run_add(second, "second", "demo", empty, &err), OK);
    store_close(second);
    store_close(first);
    json_decref(empty);
}

/* Writes a store, keeps a copy as "original.db" in *original, and kills a process. */
static void damage_begin(char original[128]) {
    store_write_closed();
    snprintf(original, 128, "%s/original.db", dir);
    struct buf bytes = {0};
    assert_int_equal(file_read(path, SIZE_MAX, &bytes, &err), OK);
    assert_int_equal(file_write(original, bytes.data, bytes.len, &err), OK);
    buf_release(&bytes);
    store_kill(false);
    assert_int_equal(database_query_int(original, "SELECT count(*) FROM documents"), DOCUMENTS);
}

static json_t *salvage(void) {
    json_t *report = NULL;
    char before[HASH_LEN];
    strcpy(before, file_hash(path));
    if (store_salvage(path, copy, &report, &err) != OK) fail_msg("%s", err.text);
    assert_string_equal(file_hash(path), before);
    /* the run of the killed process is in the write-ahead log, and not in the original */
    database_query_int(copy, "DELETE FROM runs WHERE id = 'killed' RETURNING 1");
    json_object_set_new(report, "rows",
                        json_integer((json_int_t)json_get_number(report, "rows") - 1));
    return report;
}

static void test_one_leaf(void **state) {
    (void)state;
    static const char *const tables[] = {"documents", "logs", "calls"};
    for (size_t t = 0; t < ARRAY_LEN(tables); t++)
        for (int part = 0; part < 5; part++) {
            char original[128];
            damage_begin(original);
            page_overwrite(leaf_of(original, tables[t], MIN(part * 25, 99), 100));
            assert_refused();
            json_t *report = salvage();
            assert_int_equal(json_get_number(report, "damaged"), 1);
            assert_int_equal(gaps(report, tables[t]), 1);
            assert_copy(original, report, N_ROWS - 100);
            json_decref(report);
            assert_int_equal(tear_down(NULL), 0);
            assert_int_equal(set_up(NULL), 0);
        }
}

/* Rows between damaged pages are found. */
static void test_several_leaves(void **state) {
    (void)state;
    enum { N = 5 };
    char original[128];
    int64_t pages[2 * N];
    damage_begin(original);
    for (int i = 0; i < N; i++) {
        pages[i] = leaf_of(original, "documents", i + 1, N + 1);
        pages[N + i] = leaf_of(original, "logs", i + 1, N + 1);
    }
    for (int i = 0; i < 2 * N; i++) page_overwrite(pages[i]);
    assert_refused();
    json_t *report = salvage();
    assert_int_equal(json_get_number(report, "damaged"), 2);
    assert_int_equal(gaps(report, "documents"), N);
    assert_int_equal(gaps(report, "logs"), N);
    assert_copy(original, report, N_ROWS - 2 * N * 100);
    json_decref(report);
}

/* Any page but the first: nothing that is copied is wrong. */
static void test_every_kind_of_page(void **state) {
    (void)state;
    char original[128];
    damage_begin(original);
    int64_t n = file_size(path) / PAGE;
    struct buf bytes = {0};
    assert_int_equal(file_read(path, SIZE_MAX, &bytes, &err), OK);
    for (int64_t page = 2; page <= n; page += 1 + n / 60) {
        int fd = open(path, O_WRONLY);
        assert_int_equal(pwrite(fd, bytes.data, bytes.len, 0), (ssize_t)bytes.len);
        close(fd);
        page_overwrite(page);
        json_t *report = salvage();
        assert_copy(original, report, N_ROWS / 2);
        json_decref(report);
        unlink(copy);
    }
    buf_release(&bytes);
}

static void test_truncated(void **state) {
    (void)state;
    char original[128];
    damage_begin(original);
    assert_int_equal(truncate(path, file_size(path) * 3 / 4 / PAGE * PAGE), 0);
    assert_refused();
    json_t *report = salvage();
    assert_true(json_get_number(report, "damaged") > 0);
    assert_copy(original, report, N_ROWS / 4);
    json_decref(report);
}

static void test_zeros_after_header(void **state) {
    (void)state;
    static const uint8_t zeros[PAGE];
    json_t *report = NULL;
    store_write_closed();
    int fd = open(path, O_WRONLY);
    for (off_t at = 100, n = file_size(path); at < n; at += PAGE)
        assert_true(pwrite(fd, zeros, (size_t)MIN(PAGE, n - at), at) > 0);
    close(fd);
    assert_refused();
    char before[HASH_LEN];
    strcpy(before, file_hash(path));
    assert_int_equal(store_salvage(path, copy, &report, &err), ERR_FORMAT);
    assert_null(report);
    assert_false(path_exists(copy));
    assert_string_equal(file_hash(path), before);
}

static void test_intact_and_refusals(void **state) {
    (void)state;
    json_t *report = NULL;
    assert_int_equal(store_salvage(path, copy, &report, &err), ERR_MISSING);
    store_write_closed();
    assert_int_equal(store_salvage(path, path, &report, &err), ERR_USAGE);
    assert_int_equal(store_salvage(path, copy, &report, &err), OK);
    assert_int_equal(json_get_number(report, "damaged"), 0);
    assert_copy(path, report, N_ROWS);
    json_decref(report);
    /* every table of the schema is in the report */
    assert_int_equal(store_salvage(path, dir, &report, &err), ERR_USAGE);
    unlink(copy);
    assert_int_equal(store_salvage(path, copy, &report, &err), OK);
    assert_int_equal(
        database_query_int(path, "SELECT count(*) FROM sqlite_schema WHERE type = 'table'"),
        json_array_size(json_object_get(report, "tables")));
    json_decref(report);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_killed_is_opened, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_check_only_if_not_closed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_open_elsewhere_is_not_checked, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_one_leaf, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_several_leaves, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_every_kind_of_page, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_truncated, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_zeros_after_header, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_intact_and_refusals, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
