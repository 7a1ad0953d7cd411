/*
 * test_store: stored values are read back, repeated puts are harmless, and a file survives kill -9
 * and damaged or foreign files are refused.
 *
 * The program does not read events, so the test reads them through SQLite. Kills happen in forked
 * children that only write; afterwards committed groups must be complete and uncommitted ones
 * absent.
 */
/* levels: once */
#define _GNU_SOURCE
#include "store/store.h"

#include "folder.h"

#include <errno.h>
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

static struct error err;
static char dir[64], path[96];

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    err = (struct error){0};
    snprintf(dir, sizeof dir, "/tmp/shoal-test-store-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/shoal.db", dir);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    return folder_remove(dir);
}

static struct store *store_open_checked(void) {
    struct store *s = store_open(path, &err);
    if (!s) fail_msg("%s", err.text);
    return s;
}

static void assert_integrity(void) {
    assert_int_equal(
        database_query_int(path, "SELECT integrity_check = 'ok' FROM pragma_integrity_check"), 1);
}

/* Call number i, its numbers borrowed; every field differs from its neighbours'. */
static struct store_call call_make(int i) {
    static float probs[1024][40];
    static int32_t ends[1024][4];
    int slot = i % 1024, n = i % 4 == 3 ? 40 : 4;
    struct store_call c = {.choice = i % 4,
                           .n_choices = n,
                           .prob = probs[slot],
                           .n_prefilled = i,
                           .n_generated = 2 * i,
                           .finish = i & 1,
                           .ends = ends[slot],
                           .logprobs = probs[slot],
                           .n_tokens = i % 5};
    for (int k = 0; k < 40; k++) probs[slot][k] = 1.0f / (float)(i + k + 1);
    for (int k = 0; k < 4; k++) ends[slot][k] = i + 3 * k;
    sha256_bytes(&i, sizeof i, c.key);
    return c;
}

static void test_calls(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    struct store_call got;
    for (int i = 0; i < 20; i++) {
        struct store_call c = call_make(i);
        c.text = i % 3 ? "work: 1 < 2\n雪" : NULL;
        assert_false(store_call_get(s, c.key, &got));
        assert_int_equal(store_call_put(s, &c, &err), OK);
    }
    store_close(s);
    s = store_open_checked();
    for (int i = 0; i < 20; i++) {
        struct store_call c = call_make(i);
        assert_true(store_call_get(s, c.key, &got));
        assert_string_equal(got.key, c.key);
        assert_int_equal(got.choice, c.choice);
        assert_int_equal(got.n_choices, c.n_choices);
        assert_memory_equal(got.prob, c.prob, (size_t)c.n_choices * sizeof *c.prob);
        assert_int_equal(got.n_tokens, c.n_tokens);
        for (int k = 0; k < c.n_tokens; k++)
            assert_true(got.ends[k] == c.ends[k] && got.logprobs[k] == c.logprobs[k]);
        assert_int_equal(got.n_prefilled, c.n_prefilled);
        assert_int_equal(got.n_generated, c.n_generated);
        assert_int_equal(got.finish, c.finish);
        if (i % 3)
            assert_string_equal(got.text, "work: 1 < 2\n雪");
        else
            assert_null(got.text);
        store_call_release(&got);
    }
    store_close(s);
}

static void test_call_without_choices(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    struct store_call c = call_make(1), got;
    c.n_choices = 0;
    assert_int_equal(store_call_put(s, &c, &err), OK);
    assert_true(store_call_get(s, c.key, &got));
    assert_int_equal(got.n_choices, 0);
    assert_null(got.prob);
    store_call_release(&got);
    store_close(s);
}

/* The first put of a key is kept: a call is a function of its key, so a different second value
 * could only be wrong. Tokens that an older version did not store are added. */
static void test_call_again_is_ignored(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    struct store_call c = call_make(3), other = call_make(4), got;
    memcpy(other.key, c.key, HASH_LEN);
    c.n_tokens = 0;
    assert_int_equal(store_call_put(s, &c, &err), OK);
    assert_true(store_call_get(s, c.key, &got));
    assert_true(got.n_tokens == 0 && !got.ends && !got.logprobs);
    store_call_release(&got);
    c.n_tokens = 3;
    assert_int_equal(store_call_put(s, &c, &err), OK);
    assert_int_equal(store_call_put(s, &other, &err), OK);
    assert_true(store_call_get(s, c.key, &got));
    assert_int_equal(got.n_prefilled, 3);
    assert_int_equal(got.n_tokens, 3);
    assert_memory_equal(got.ends, c.ends, 3 * sizeof *c.ends);
    store_call_release(&got);
    store_close(s);
    assert_int_equal(database_query_int(path, "SELECT count(*) FROM calls"), 1);
}

static void test_runs(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    json_t *recipe = json_pack("{s:i,s:s}", "seed", 7, "model", "it's \"quoted\"; DROP TABLE runs");
    assert_int_equal(store_run_add(s, "one", "evolve", recipe, &err), OK);
    assert_int_equal(store_run_add(s, "two'); --", "demo", recipe, &err), OK);
    json_t *run = store_run_get(s, "one", &err), *list;
    assert_string_equal(json_string_value(json_object_get(run, "kind")), "evolve");
    assert_string_equal(json_string_value(json_object_get(run, "status")), "running");
    assert_true(json_equal(json_object_get(run, "recipe"), recipe));
    assert_int_equal(strlen(json_string_value(json_object_get(run, "created"))), 20);
    json_decref(run);
    assert_int_equal(store_run_status(s, "one", "done", &err), OK);
    list = store_run_list(s, dir, &err);
    assert_int_equal(json_array_size(list), 2);
    const json_t *newest = json_array_get(list, 0), *oldest = json_array_get(list, 1);
    assert_string_equal(json_string_value(json_object_get(newest, "id")), "two'); --");
    assert_string_equal(json_string_value(json_object_get(newest, "status")), "running");
    assert_string_equal(json_string_value(json_object_get(oldest, "status")), "done");
    json_decref(list);
    json_decref(recipe);
    store_close(s);
}

/* A run that no process has locked any more was killed. */
static void test_interrupted_run(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    char *folder = path_join(dir, "killed");
    json_t *recipe = json_object();
    assert_int_equal(store_run_add(s, "killed", "train", recipe, &err), OK);
    const char *const want[] = {"running", "running", "interrupted", "done"};
    int lock = -1;
    for (int i = 0; i < 4; i++) { /* no folder; locked; not locked; ended */
        if (i == 1) assert_int_equal(dir_make(folder, &err), OK);
        if (i == 1) lock = dir_lock(folder, "run", &err);
        if (i == 2) dir_unlock(lock, folder);
        if (i == 3) assert_int_equal(store_run_status(s, "killed", "done", &err), OK);
        json_t *list = store_run_list(s, dir, &err);
        assert_string_equal(json_get_string(json_array_get(list, 0), "status"), want[i]);
        json_decref(list);
    }
    tree_delete(folder);
    json_decref(recipe);
    store_close(s);
    free(folder);
}

static void test_unknown_and_double_runs(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    json_t *recipe = json_object();
    assert_null(store_run_get(s, "none", &err));
    assert_int_equal(err.code, ERR_MISSING);
    assert_non_null(strstr(err.text, "no run 'none' in '"));
    assert_int_equal(store_run_status(s, "none", "done", &err), ERR_MISSING);
    assert_int_equal(store_run_add(s, "one", "demo", recipe, &err), OK);
    assert_int_equal(store_run_add(s, "one", "demo", recipe, &err), ERR_IO);
    assert_non_null(strstr(err.text, path));
    /* The handle is usable after the error. */
    assert_int_equal(store_run_status(s, "one", "done", &err), OK);
    json_decref(recipe);
    store_close(s);
}

/* A put with the same name replaces the value and keeps its position; other runs are not
 * returned. */
static void test_adapters(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    json_t *lineage = json_pack("{s:s}", "operator", "sft"),
           *scores = json_pack("{s:f}", "fitness", 0.25);
    assert_int_equal(store_adapter_put(s, "r", 0, "a", "hash-1", lineage, NULL, &err), OK);
    assert_int_equal(store_adapter_put(s, "r", 1, "a", "hash-2", NULL, NULL, &err), OK);
    assert_int_equal(store_adapter_put(s, "other", 0, "a", "hash-3", NULL, NULL, &err), OK);
    for (int again = 0; again < 2; again++)
        assert_int_equal(store_adapter_put(s, "r", 0, "a", "hash-4", lineage, scores, &err), OK);
    json_t *list = store_adapter_list(s, "r", &err);
    assert_int_equal(json_array_size(list), 2);
    const json_t *first = json_array_get(list, 0), *second = json_array_get(list, 1);
    assert_int_equal(json_integer_value(json_object_get(first, "generation")), 0);
    assert_string_equal(json_string_value(json_object_get(first, "hash")), "hash-4");
    assert_true(json_equal(json_object_get(first, "lineage"), lineage));
    assert_true(json_equal(json_object_get(first, "scores"), scores));
    assert_string_equal(json_string_value(json_object_get(second, "hash")), "hash-2");
    assert_true(json_is_null(json_object_get(second, "lineage")));
    json_decref(list);
    json_decref(lineage);
    json_decref(scores);
    store_close(s);
}

static void test_results_and_events(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    json_t *row = json_pack("{s:s,s:i}", "name", "base", "n", 3),
           *better = json_pack("{s:s,s:i}", "name", "base", "n", 4);
    assert_int_equal(store_result_put(s, "r", "base", row, &err), OK);
    assert_int_equal(store_result_put(s, "r", "base", better, &err), OK);
    assert_int_equal(store_event_add(s, "r", "generation", row, &err), OK);
    assert_int_equal(store_event_add(s, "r", "generation", row, &err), OK);
    json_decref(row);
    json_decref(better);
    store_close(s);
    assert_int_equal(database_query_int(path, "SELECT count(*) FROM results"), 1);
    assert_int_equal(database_query_int(path, "SELECT row ->> 'n' FROM results"), 4);
    assert_int_equal(
        database_query_int(
            path, "SELECT count(*) FROM events WHERE kind = 'generation' AND detail ->> 'n' = 3"),
        2);
}

static void test_metrics(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    for (int step = 1; step <= 4; step++) {
        json_t *row = json_pack("{s:i}", "step", step);
        assert_int_equal(store_metric_put(s, "r", step, row, &err), OK);
        assert_int_equal(store_metric_put(s, "other", step, row, &err), OK);
        json_decref(row);
    }
    json_t *again = json_pack("{s:i,s:f}", "step", 2, "loss", 0.5), *list;
    assert_int_equal(store_metric_put(s, "r", 2, again, &err), OK);
    assert_int_equal(store_metric_truncate(s, "r", 3, &err), OK);
    list = store_metric_list(s, "r", &err);
    assert_int_equal(json_array_size(list), 3);
    assert_true(json_equal(json_array_get(list, 1), again));
    json_decref(list);
    json_decref(again);
    list = store_metric_list(s, "other", &err);
    assert_int_equal(json_array_size(list), 4);
    json_decref(list);
    store_close(s);
}

static void test_rollback(void **state) {
    (void)state;
    struct store *s = store_open_checked();
    struct store_call kept = call_make(1), lost = call_make(2), got;
    assert_int_equal(store_begin(s, &err), OK);
    assert_int_equal(store_call_put(s, &kept, &err), OK);
    assert_int_equal(store_commit(s, &err), OK);
    assert_int_equal(store_begin(s, &err), OK);
    assert_int_equal(store_call_put(s, &lost, &err), OK);
    assert_true(store_call_get(s, lost.key, &got));
    store_call_release(&got);
    store_rollback(s);
    assert_false(store_call_get(s, lost.key, &got));
    assert_true(store_call_get(s, kept.key, &got));
    store_call_release(&got);
    store_close(s);
}

static void test_newer_schema_is_refused(void **state) {
    (void)state;
    store_close(store_open_checked());
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "PRAGMA user_version = 1000", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    assert_null(store_open(path, &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    assert_non_null(strstr(err.text, "newer shoal (schema 1000"));
    assert_non_null(strstr(err.text, path));
    assert_int_equal(database_query_int(path, "PRAGMA user_version"), 1000);
}

static void test_other_files_are_refused(void **state) {
    (void)state;
    char text[4096];
    memset(text, 'x', sizeof text);
    assert_int_equal(file_write(path, text, sizeof text, &err), OK);
    assert_null(store_open(path, &err));
    assert_int_equal(err.code, ERR_IO);
    assert_non_null(strstr(err.text, "not a database"));
    assert_non_null(strstr(err.text, path));
    assert_null(store_open(dir, &err));
    assert_non_null(strstr(err.text, "cannot open '"));
}

/* A directory without write permission. Root may write everywhere, so a child drops its privileges
 * first. */
static void test_read_only_directory(void **state) {
    (void)state;
    int to[2];
    char text[sizeof err.text] = {0};
    assert_int_equal(pipe(to), 0);
    assert_int_equal(chmod(dir, 0555), 0);
    pid_t child = fork();
    if (child == 0) {
        if (geteuid() == 0 && setuid(65534) != 0) _exit(2);
        struct store *s = store_open(path, &err);
        if (!s && write(to[1], err.text, strlen(err.text)) < 0) _exit(3);
        _exit(s != NULL);
    }
    int status = 0;
    waitpid(child, &status, 0);
    close(to[1]);
    assert_true(read(to[0], text, sizeof text - 1) >= 0);
    close(to[0]);
    assert_int_equal(chmod(dir, 0755), 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 2) {
        fprintf(stderr, "SKIP: cannot give up root's rights\n");
        skip();
    }
    assert_int_equal(status, 0);
    assert_non_null(strstr(text, "cannot open '"));
    assert_non_null(strstr(text, path));
    assert_non_null(strstr(text, "Permission denied"));
}

enum { GROUP = 10 };

/* Commits groups 0 .. whole-1 of calls, then leaves a transaction open with `open` more, reports
 * it, and waits. */
static void child_write(int n_committed, int n_uncommitted, int ready_fd) {
    struct store *s = store_open(path, &err);
    bool ok = s != NULL;
    for (int g = 0; ok && g <= n_committed; g++) {
        int n = g < n_committed ? GROUP : n_uncommitted;
        ok = store_begin(s, &err) == OK;
        for (int i = 0; ok && i < n; i++) {
            struct store_call c = call_make(g * GROUP + i);
            char text[2000];
            memset(text, 'w', sizeof text - 1);
            text[sizeof text - 1] = 0;
            c.text = text;
            ok = store_call_put(s, &c, &err) == OK;
        }
        if (g < n_committed) ok = ok && store_commit(s, &err) == OK;
    }
    if (!ok || write(ready_fd, "x", 1) != 1) _exit(1);
    for (;;) pause();
}

static void kill_in_transaction(int n_committed, int n_uncommitted) {
    int ready[2];
    char x;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) child_write(n_committed, n_uncommitted, ready[1]);
    close(ready[1]);
    assert_int_equal(read(ready[0], &x, 1), 1);
    close(ready[0]);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    struct store *s = store_open_checked();
    struct store_call got;
    for (int i = 0; i < n_committed * GROUP; i++) {
        assert_true(store_call_get(s, call_make(i).key, &got));
        assert_int_equal(got.n_prefilled, i);
        store_call_release(&got);
    }
    struct store_call next_call = call_make(n_committed * GROUP);
    assert_false(store_call_get(s, next_call.key, &got));
    assert_int_equal(store_call_put(s, &next_call, &err), OK);
    store_close(s);
    assert_integrity();
}

/* The last transaction is larger than SQLite's page cache, so that uncommitted pages have reached
 * the file. */
static void test_kill_in_transaction(void **state) {
    static const int open[] = {0, 1, 200, 3000};
    for (size_t i = 0; i < ARRAY_LEN(open); i++) {
        kill_in_transaction(3, open[i]);
        assert_int_equal(tear_down(state), 0);
        assert_int_equal(set_up(state), 0);
    }
}

static void child_write_groups(void) {
    struct store *s = store_open(path, &err);
    for (int g = 0; s && g < 1 << 20; g++) {
        if (store_begin(s, &err) != OK) _exit(1);
        for (int i = 0; i < GROUP; i++) {
            struct store_call c = call_make(g * GROUP + i);
            if (store_call_put(s, &c, &err) != OK) _exit(1);
        }
        if (store_commit(s, &err) != OK) _exit(1);
    }
    _exit(1);
}

/* After a kill at any moment the file has a prefix of the complete groups. */
static void test_kill_while_writing(void **state) {
    (void)state;
    for (int round = 0; round < 8; round++) {
        pid_t child = fork();
        if (child == 0) child_write_groups();
        usleep(3000 + 2711 * (unsigned)round);
        kill(child, SIGKILL);
        int status;
        waitpid(child, &status, 0);
        assert_true(WIFSIGNALED(status));
        store_close(store_open_checked());
        assert_integrity();
        int64_t n = database_query_int(path, "SELECT count(*) FROM calls");
        assert_int_equal(n % GROUP, 0);
        assert_int_equal(
            database_query_int(path, "SELECT coalesce(max(prefilled) + 1, 0) FROM calls"), n);
    }
}

static void test_two_processes(void **state) {
    (void)state;
    enum { EACH = 60 };
    pid_t child[2];
    store_close(store_open_checked());
    for (int k = 0; k < 2; k++) {
        child[k] = fork();
        if (child[k] != 0) continue;
        struct store *s = store_open(path, &err);
        bool ok = s != NULL;
        for (int i = 0; ok && i < EACH; i++) {
            struct store_call c =
                call_make(i + k * EACH / 2); /* half of them are the other process's too */
            ok = store_begin(s, &err) == OK && store_call_put(s, &c, &err) == OK &&
                 store_commit(s, &err) == OK;
        }
        _exit(!ok);
    }
    for (int k = 0; k < 2; k++) {
        int status;
        waitpid(child[k], &status, 0);
        assert_int_equal(status, 0);
    }
    assert_int_equal(database_query_int(path, "SELECT count(*) FROM calls"), EACH + EACH / 2);
    assert_integrity();
}

/* Several processes create the same file at the same time; half of them end without closing it. */
static void test_created_at_once(void **state) {
    (void)state;
    enum { ROUNDS = 60, PROCESSES = 4 };
    pid_t child[PROCESSES];
    char file[128];
    for (int round = 0; round < ROUNDS; round++) {
        snprintf(file, sizeof file, "%s/%d.db", dir, round);
        for (int k = 0; k < PROCESSES; k++) {
            child[k] = fork();
            if (child[k]) continue;
            struct store *s = store_open(file, &err);
            if (!s) print_error("round %d: %s\n", round, err.text);
            if (s && k % 2) store_close(s);
            _exit(s == NULL);
        }
        for (int k = 0, status; k < PROCESSES; k++) {
            assert_int_equal(waitpid(child[k], &status, 0), child[k]);
            assert_int_equal(status, 0);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_calls, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_call_without_choices, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_call_again_is_ignored, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_runs, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_interrupted_run, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_unknown_and_double_runs, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_adapters, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_results_and_events, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_metrics, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rollback, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_newer_schema_is_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_other_files_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_read_only_directory, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_kill_in_transaction, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_kill_while_writing, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_two_processes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_created_at_once, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
