/*
 * test_keys: API keys: admission, waiting times, usage and stored data; several handles and
 * processes; damaged stores; and the command.
 *
 * Tests pass the time to the functions, except those of the module's own thread.
 */
/* levels: once */
#define _GNU_SOURCE
#include "cli/cli.h"
#include "folder.h"
#include "ops/ops.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define NOON (20000 * 86400.0 + 43200)

static struct error err;
static char dir[64], path[96];
static struct key_decision answer;

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    err = (struct error){0};
    snprintf(dir, sizeof dir, "/tmp/shoal-test-keys-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/deep/er/serve.db", dir);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    return folder_remove(dir);
}

static struct keys *open_keys(void) {
    struct keys *k = keys_open(path, &err);
    if (!k) fail_msg("%s", err.text);
    return k;
}

static void assert_contains(const char *text, const char *part) {
    if (!strstr(text, part)) fail_msg("'%s' is not in '%s'", part, text);
}

static void sync_keys(struct keys *k) {
    if (keys_sync(k, &err) != OK) fail_msg("%s", err.text);
}

/* Counts SQLite's calls of fsync and fdatasync. */
static int n_synced;
__attribute__((visibility("default"))) int fdatasync(int fd);
__attribute__((visibility("default"))) int fdatasync(int fd) {
    __atomic_add_fetch(&n_synced, 1, __ATOMIC_SEQ_CST);
    return (int)syscall(SYS_fdatasync, fd);
}
static int disk_syncs(void) {
    return __atomic_load_n(&n_synced, __ATOMIC_SEQ_CST);
}

/* Adds a key for chat with these limits; returns its secret, in one of many static buffers. */
static const char *add_key(struct keys *k, const char *name, struct key_spec spec) {
    static char secrets[1024][KEY_SECRET_LEN];
    static int at;
    char *secret = secrets[at++ % 1024];
    if (!spec.scopes) spec.scopes = KEY_SCOPE_CHAT;
    if (keys_add(k, name, &spec, NOON, secret, &err) != OK) fail_msg("%s", err.text);
    return secret;
}

static enum key_verdict authorize_chat(struct keys *k, const char *secret, double now) {
    enum key_verdict verdict = keys_authorize(k, secret, KEY_SCOPE_CHAT, now, &answer);
    assert_int_equal(verdict, answer.verdict);
    assert_true((verdict == KEY_ADMITTED) == !*answer.message);
    return verdict;
}

/* A number of the i-th key in the list, "name" or "when.name". */
static int64_t listed_number(struct keys *k, size_t i, const char *when, const char *name) {
    json_t *list = keys_list(k, NOON), *v = json_array_get(list, i);
    const json_t *n = json_object_get(when ? json_object_get(v, when) : v, name);
    assert_true(json_is_integer(n));
    int64_t value = json_integer_value(n);
    json_decref(list);
    return value;
}

/* Number of rows that an SQL statement from outside the module changes in the store. */
static int sql_change_count(const char *sql) {
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    sqlite3_busy_timeout(db, 10000);
    assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    int n = sqlite3_changes(db);
    sqlite3_close(db);
    return n;
}

static void tamper(const char *sql) {
    assert_true(sql_change_count(sql) > 0);
}

/* secrets */

static void test_secrets(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *one = add_key(k, "one", (struct key_spec){0}),
               *two = add_key(k, "two", (struct key_spec){0});
    assert_int_equal(strlen(one), KEY_SECRET_LEN - 1);
    assert_int_equal(strncmp(one, "sk-shoal-", 9), 0);
    assert_int_equal(strspn(one + 9, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                     "0123456789-_"),
                     43);
    assert_string_not_equal(one, two);
    assert_int_equal(authorize_chat(k, one, NOON), KEY_ADMITTED);
    assert_string_equal(answer.name, "one");
    assert_int_equal(authorize_chat(k, two, NOON), KEY_ADMITTED);
    assert_string_equal(answer.name, "two");
    keys_close(k);
}

static void test_wrong_secrets(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *right = add_key(k, "one", (struct key_spec){0});
    char wrong[KEY_SECRET_LEN + 1], huge[2000];
    for (size_t i = 0; i < KEY_SECRET_LEN - 1; i++) {
        memcpy(wrong, right, KEY_SECRET_LEN);
        wrong[i] ^= 1;
        assert_int_equal(authorize_chat(k, wrong, NOON), KEY_UNKNOWN);
        wrong[i] = 0;
        assert_int_equal(authorize_chat(k, wrong, NOON), KEY_UNKNOWN);
    }
    snprintf(wrong, sizeof wrong, "%sA", right);
    assert_int_equal(authorize_chat(k, wrong, NOON), KEY_UNKNOWN);
    assert_true(!*answer.id && !*answer.name && !strstr(answer.message, right));
    memset(huge, 'x', sizeof huge - 1);
    huge[sizeof huge - 1] = 0;
    assert_int_equal(authorize_chat(k, huge, NOON), KEY_UNKNOWN);
    assert_contains(answer.message, "not known");
    assert_int_equal(authorize_chat(k, "", NOON), KEY_UNKNOWN);
    assert_contains(answer.message, "is needed");
    assert_int_equal(authorize_chat(k, NULL, NOON), KEY_UNKNOWN);
    assert_contains(answer.message, "is needed");
    keys_close(k);
}

/* The whole hash of a key is compared, not only the digits of the index. */
static void test_whole_hash_is_compared(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){0});
    keys_close(k);
    tamper("UPDATE logs SET event = json_set(event, '$.hash', substr(event ->> '$.hash', 1, 63) ||"
           " CASE substr(event ->> '$.hash', 64) WHEN '0' THEN '1' ELSE '0' END)");
    k = open_keys();
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_UNKNOWN);
    keys_close(k);
}

/* Whether a file of the folder contains the bytes. */
static bool folder_contains(const char *text) {
    static const char *const ends[] = {"", "-wal", "-shm"};
    bool found = false;
    for (size_t i = 0; i < ARRAY_LEN(ends); i++) {
        struct buf b = {0};
        char *file = xasprintf("%s%s", path, ends[i]);
        if (file_read(file, 1 << 24, &b, &err) == OK)
            found |= memmem(b.data, b.len, text, strlen(text)) != NULL;
        buf_release(&b);
        free(file);
    }
    return found;
}

static void test_secrets_are_not_stored(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){0}), *fixed = "hunter2-hunter2";
    char hash[HASH_LEN];
    sha256_bytes(secret, strlen(secret), hash);
    assert_int_equal(keys_add_fixed(k, fixed, KEY_SCOPE_ADMIN, &err), OK);
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    sync_keys(k);
    assert_true(folder_contains(hash)); /* the search works */
    assert_false(folder_contains(secret + 9));
    assert_false(folder_contains(fixed));
    json_t *list = keys_list(k, NOON);
    char *text = json_canonical(list);
    assert_null(strstr(text, secret + 9));
    assert_null(strstr(text, hash));
    assert_null(strstr(text, fixed));
    assert_string_equal(json_get_string(json_array_get(list, 0), "tail"),
                        secret + strlen(secret) - 4);
    assert_string_equal(json_get_string(json_array_get(list, 1), "tail"), "");
    free(text);
    json_decref(list);
    keys_close(k);
}

/* verdicts */

static void test_scopes(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret =
        add_key(k, "one", (struct key_spec){.scopes = KEY_SCOPE_CHAT | KEY_SCOPE_JOBS});
    assert_int_equal(keys_authorize(k, secret, 0, NOON, &answer), KEY_ADMITTED);
    assert_int_equal(keys_authorize(k, secret, KEY_SCOPE_JOBS, NOON, &answer), KEY_ADMITTED);
    assert_int_equal(keys_authorize(k, secret, KEY_SCOPE_JOBS | KEY_SCOPE_CHAT, NOON, &answer),
                     KEY_ADMITTED);
    assert_int_equal(keys_authorize(k, secret, KEY_SCOPE_ADMIN, NOON, &answer), KEY_FORBIDDEN);
    assert_int_equal(keys_authorize(k, secret, KEY_SCOPE_CHAT | KEY_SCOPE_ADMIN, NOON, &answer),
                     KEY_FORBIDDEN);
    assert_string_equal(answer.message, "API key 'one' lacks the scope 'admin'");
    secret = add_key(k, "two", (struct key_spec){.scopes = KEY_SCOPE_ADMIN});
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_FORBIDDEN);
    assert_int_equal(listed_number(k, 1, "all", "requests"), 0);
    keys_close(k);
}

static void test_expiry_and_revocation(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){.expires = (int64_t)NOON + 10}),
               *other = add_key(k, "two", (struct key_spec){0});
    assert_int_equal(authorize_chat(k, secret, NOON + 9.9), KEY_ADMITTED);
    assert_int_equal(authorize_chat(k, secret, NOON + 10), KEY_EXPIRED);
    assert_string_equal(answer.name, "one");
    assert_int_equal(keys_revoke(k, "one", NOON, &err), OK);
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_REVOKED);
    assert_int_equal(listed_number(k, 0, NULL, "revoked"), (int64_t)NOON);
    assert_int_equal(keys_revoke(k, "one", NOON, &err), ERR_MISSING);
    /* The name is free again and refers to the new key. */
    const char *again = add_key(k, "one", (struct key_spec){0});
    assert_int_equal(authorize_chat(k, again, NOON), KEY_ADMITTED);
    assert_int_equal(authorize_chat(k, other, NOON), KEY_ADMITTED);
    char id[KEY_ID_LEN];
    memcpy(id, answer.id, sizeof id);
    assert_int_equal(keys_revoke(k, id, NOON, &err), OK);
    assert_int_equal(authorize_chat(k, other, NOON), KEY_REVOKED);
    assert_int_equal(authorize_chat(k, again, NOON), KEY_ADMITTED);
    assert_int_equal(keys_revoke(k, id, NOON, &err), ERR_STATE);
    keys_close(k);
}

static void test_refused_keys(void **state) {
    (void)state;
    static const char *const names[] = {"", "a b", "a\n", "é", "key-1", "cli-1", "a/b"};
    static const struct key_spec specs[] = {
        {.scopes = 0},
        {.scopes = 8},
        {.scopes = 1, .requests_per_minute = -1},
        {.scopes = 1, .quota = ((int64_t)1 << 53) + 1},
        {.scopes = 1, .expires = (int64_t)NOON},
    };
    struct keys *k = open_keys();
    char secret[KEY_SECRET_LEN], long_name[KEY_NAME_LEN + 1];
    struct key_spec sound = {.scopes = KEY_SCOPE_CHAT};
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        assert_int_equal(keys_add(k, names[i], &sound, NOON, secret, &err), ERR_USAGE);
    for (size_t i = 0; i < ARRAY_LEN(specs); i++)
        assert_int_equal(keys_add(k, "one", &specs[i], NOON, secret, &err), ERR_USAGE);
    memset(long_name, 'n', KEY_NAME_LEN);
    long_name[KEY_NAME_LEN] = 0;
    assert_int_equal(keys_add(k, long_name, &sound, NOON, secret, &err), ERR_USAGE);
    assert_false(keys_exist(k));
    assert_int_equal(keys_add(k, long_name + 1, &sound, NOON, secret, &err), OK);
    assert_int_equal(keys_add(k, long_name + 1, &sound, NOON, secret, &err), ERR_STATE);
    assert_true(!*secret);
    assert_contains(err.text, "revoke it first");
    keys_close(k);
}

static void test_any(void **state) {
    (void)state;
    struct keys *k = open_keys();
    assert_false(keys_exist(k));
    add_key(k, "one", (struct key_spec){0});
    assert_true(keys_exist(k));
    assert_int_equal(keys_revoke(k, "one", NOON, &err), OK);
    assert_true(keys_exist(k)); /* otherwise the revocation would disable authentication */
    keys_close(k);
    k = open_keys();
    assert_true(keys_exist(k));
    keys_close(k);
}

static void test_fixed(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *stored = add_key(k, "one", (struct key_spec){0});
    assert_int_equal(keys_add_fixed(k, "token-abc123", KEY_SCOPE_CHAT, &err), OK);
    assert_int_equal(keys_authorize(k, "token-abc123", KEY_SCOPE_ADMIN, NOON, &answer),
                     KEY_FORBIDDEN);
    assert_int_equal(keys_add_fixed(k, "token-abc123", KEY_SCOPE_ADMIN, &err), OK);
    assert_int_equal(
        keys_authorize(k, "token-abc123", KEY_SCOPE_ADMIN | KEY_SCOPE_CHAT, NOON, &answer),
        KEY_ADMITTED);
    assert_string_equal(answer.id, "cli-1");
    keys_record_usage(k, "cli-1", 5, 6, NOON);
    assert_int_equal(listed_number(k, 1, "all", "completion_tokens"), 6);
    assert_int_equal(keys_revoke(k, "cli-1", NOON, &err), ERR_STATE);
    assert_int_equal(keys_add_fixed(k, stored, KEY_SCOPE_ADMIN, &err), ERR_USAGE);
    assert_null(strstr(err.text, stored));
    assert_int_equal(keys_add_fixed(k, "", KEY_SCOPE_ADMIN, &err), ERR_USAGE);
    assert_int_equal(keys_add_fixed(k, "se cret", KEY_SCOPE_ADMIN, &err), ERR_USAGE);
    assert_null(strstr(err.text, "se cret"));
    keys_close(k);
    assert_int_equal(sql_change_count("UPDATE documents SET value = value"), 0);
    assert_int_equal(sql_change_count("UPDATE logs SET event = event"), 1);
    k = open_keys();
    assert_int_equal(authorize_chat(k, "token-abc123", NOON), KEY_UNKNOWN);
    assert_int_equal(authorize_chat(k, stored, NOON), KEY_ADMITTED);
    keys_close(k);
}

/* The start-up token has every scope, is not stored, and does not count as a key of the server. */
static void test_token(void **state) {
    (void)state;
    char token[KEY_SECRET_LEN], other[KEY_SECRET_LEN], id[KEY_ID_LEN];
    struct keys *k = open_keys();
    keys_add_startup_token(k, token);
    assert_int_equal(strncmp(token, "st-", 3), 0);
    assert_int_equal(strlen(token), 3 + 43);
    assert_false(keys_exist(k));
    json_t *list = keys_list(k, NOON);
    assert_int_equal(json_array_size(list), 0);
    json_decref(list);
    assert_int_equal(
        keys_authorize(k, token, KEY_SCOPE_CHAT | KEY_SCOPE_JOBS | KEY_SCOPE_ADMIN, NOON, &answer),
        KEY_ADMITTED);
    assert_string_equal(answer.id, KEY_TOKEN_ID);
    keys_record_usage(k, answer.id, 5, 6, NOON);
    assert_int_equal(keys_revoke(k, KEY_TOKEN_ID, NOON, &err), ERR_STATE);
    token[20] ^= 1;
    assert_int_equal(authorize_chat(k, token, NOON), KEY_UNKNOWN);
    assert_false(keys_lookup(k, token, id));
    token[20] ^= 1;
    assert_true(keys_lookup(k, token, id));
    assert_string_equal(id, KEY_TOKEN_ID);
    const char *stored = add_key(k, "one", (struct key_spec){0});
    assert_true(keys_exist(k));
    keys_close(k);
    k = open_keys();
    keys_add_startup_token(k, other);
    assert_string_not_equal(token, other);
    assert_int_equal(authorize_chat(k, token, NOON), KEY_UNKNOWN);
    assert_int_equal(authorize_chat(k, stored, NOON), KEY_ADMITTED);
    keys_close(k);
}

/* New and revoked keys are synchronised to the disk; usage is not. */
static void test_decisions_are_synced(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){0});
    add_key(k, "two", (struct key_spec){0});
    int before = disk_syncs();
    add_key(k, "three", (struct key_spec){0});
    assert_true(disk_syncs() > before);
    before = disk_syncs();
    assert_int_equal(keys_revoke(k, "two", NOON, &err), OK);
    assert_true(disk_syncs() > before);
    before = disk_syncs();
    for (int i = 0; i < 10; i++) {
        assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
        assert_int_equal(keys_sync(k, &err), OK);
    }
    assert_int_equal(disk_syncs(), before);
    keys_close(k);
}

/* restoring */

/* The verdict on a secret in the store of a folder. */
static enum key_verdict verdict_in(const char *folder, const char *secret) {
    char *file = path_join(folder, "serve.db");
    struct keys *k = keys_open(file, &err);
    if (!k) fail_msg("%s", err.text);
    enum key_verdict v = keys_authorize(k, secret, KEY_SCOPE_CHAT, NOON, &answer);
    keys_close(k);
    free(file);
    return v;
}

/* A backup of the state is restored: no secret that is refused now is accepted afterwards, and a
 * second call changes nothing, as after a restore that was killed. */
static void test_restore_accepts_no_refused_key(void **state) {
    (void)state;
    char staged[96], present[96], file[128];
    snprintf(staged, sizeof staged, "%s/staged", dir);
    snprintf(present, sizeof present, "%s/deep/er", dir);
    snprintf(file, sizeof file, "%s/serve.db", staged);
    struct keys *k = open_keys();
    const char *stays = add_key(k, "stays", (struct key_spec){0}),
               *leaked = add_key(k, "leaked", (struct key_spec){0}),
               *old = add_key(k, "old", (struct key_spec){0});
    assert_int_equal(keys_revoke(k, "old", NOON, &err), OK);
    keys_close(k);
    assert_int_equal(dir_make(staged, &err), OK);
    assert_int_equal(file_copy(present, staged, "serve.db", &err), OK); // the backup
    k = open_keys();
    assert_int_equal(keys_revoke(k, "leaked", NOON, &err), OK);
    const char *again = add_key(k, "leaked", (struct key_spec){0}),
               *later = add_key(k, "later", (struct key_spec){0});
    keys_close(k);
    assert_int_equal(verdict_in(staged, leaked), KEY_ADMITTED); // otherwise it would be accepted
    for (int i = 0; i < 2; i++) {
        if (keys_restore(present, staged, &err) != OK) fail_msg("%s", err.text);
        assert_int_equal(verdict_in(staged, stays), KEY_ADMITTED);
        assert_int_equal(verdict_in(staged, leaked), KEY_REVOKED);
        assert_int_equal(verdict_in(staged, old), KEY_REVOKED);
        assert_int_equal(verdict_in(staged, again), KEY_REVOKED);
        assert_int_equal(verdict_in(staged, later), KEY_REVOKED);
    }
    k = keys_open(file, &err);
    assert_non_null(k);
    json_t *list = keys_list(k, NOON);
    assert_int_equal(json_array_size(list), 5);
    json_decref(list);
    keys_close(k);
}

/* A backup from before the first key, and stores that are missing or damaged. */
static void test_restore_without_keys(void **state) {
    (void)state;
    char staged[96], present[96], empty[96], file[128];
    snprintf(staged, sizeof staged, "%s/staged", dir);
    snprintf(present, sizeof present, "%s/deep/er", dir);
    snprintf(empty, sizeof empty, "%s/empty", dir);
    snprintf(file, sizeof file, "%s/serve.db", staged);
    assert_int_equal(dir_make(staged, &err), OK);
    assert_int_equal(dir_make(empty, &err), OK);
    assert_int_equal(keys_restore(empty, staged, &err), OK);
    assert_int_equal(keys_restore(dir, staged, &err), OK);
    assert_false(path_exists(file));
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){0});
    keys_close(k);
    assert_int_equal(keys_restore(present, staged, &err), OK);
    assert_int_equal(verdict_in(staged, secret), KEY_REVOKED);
    k = keys_open(file, &err);
    assert_non_null(k);
    assert_true(keys_exist(k)); // otherwise the restore would have disabled authentication
    keys_close(k);
    tamper("UPDATE logs SET event = '{}'");
    assert_int_equal(keys_restore(present, staged, &err), OK); // it may be restored to an empty
                                                               // state
    assert_int_equal(verdict_in(staged, secret), KEY_REVOKED);
}

/* rates */

static void test_requests_a_minute(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){.requests_per_minute = 6}),
               *other = add_key(k, "two", (struct key_spec){.requests_per_minute = 6});
    for (int i = 0; i < 6; i++) assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    for (int i = 0; i < 3; i++)
        assert_int_equal(authorize_chat(k, secret, NOON + 4), KEY_RATE_LIMITED);
    assert_true(fabs(answer.retry_after - 6) < 0.0011 && answer.retry_after > 6);
    assert_contains(answer.message, "6 requests a minute");
    assert_int_equal(authorize_chat(k, other, NOON + 4), KEY_ADMITTED);
    assert_int_equal(authorize_chat(k, secret, NOON + 9.99), KEY_RATE_LIMITED);
    assert_int_equal(authorize_chat(k, secret, NOON + 10.01), KEY_ADMITTED);
    assert_int_equal(authorize_chat(k, secret, NOON + 10.01), KEY_RATE_LIMITED);
    /* The capacity of a bucket is one minute's rate, even after a long idle time. */
    for (int i = 0; i < 6; i++)
        assert_int_equal(authorize_chat(k, secret, NOON + 1e6), KEY_ADMITTED);
    assert_int_equal(authorize_chat(k, secret, NOON + 1e6), KEY_RATE_LIMITED);
    keys_close(k);
}

static void test_tokens_a_minute(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){.tokens_per_minute = 60});
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 100, 20, NOON);
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_RATE_LIMITED);
    assert_true(fabs(answer.retry_after - 61) < 0.0011 && answer.retry_after > 61);
    assert_contains(answer.message, "60 tokens a minute");
    assert_int_equal(authorize_chat(k, secret, NOON + 60.9), KEY_RATE_LIMITED);
    assert_int_equal(authorize_chat(k, secret, NOON + 61.1), KEY_ADMITTED);
    keys_close(k);
}

/* Two limits at once: the longer wait is returned, and a refused request consumes nothing of
 * either. */
static void test_both_limits(void **state) {
    (void)state;
    struct keys *k = open_keys();
    struct key_spec spec = {.requests_per_minute = 2, .tokens_per_minute = 60};
    const char *secret = add_key(k, "one", spec);
    for (int i = 0; i < 2; i++) assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 0, 69, NOON);
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_RATE_LIMITED);
    assert_contains(answer.message, "2 requests a minute");
    assert_true(fabs(answer.retry_after - 30) < 0.0011);
    keys_record_usage(k, answer.id, 0, 30, NOON);
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_RATE_LIMITED);
    assert_contains(answer.message, "60 tokens a minute");
    assert_true(fabs(answer.retry_after - 40) < 0.0011);
    for (int i = 0; i < 2; i++)
        assert_int_equal(authorize_chat(k, secret, NOON + 100), KEY_ADMITTED);
    keys_close(k);
}

/* For any rate: a request after the returned wait is admitted, one two milliseconds earlier is not,
 * and over any time no more are admitted than a bucket and the rate allow. */
static void test_waiting_times(void **state) {
    (void)state;
    struct keys *k = open_keys();
    struct rng r = rng_make(7, RNG_TEST, 0, 0);
    for (int trial = 0; trial < 40; trial++) {
        int64_t rate = 1 + (int64_t)rng_below(&r, trial % 2 ? 20 : 5000);
        char name[16];
        snprintf(name, sizeof name, "k%d", trial);
        const char *secret = add_key(k, name, (struct key_spec){.requests_per_minute = rate});
        double now = NOON + rng_uniform(&r), begin = now;
        int64_t passed = 0;
        for (int i = 0; i < 3 * rate + 50; i++) {
            if (authorize_chat(k, secret, now) == KEY_ADMITTED) {
                passed++;
                now += rng_below(&r, 4) ? 0 : 20 * rng_uniform(&r) / (double)rate;
                continue;
            }
            double wait = answer.retry_after;
            if (wait > 0.002)
                assert_int_equal(authorize_chat(k, secret, now + wait - 0.002), KEY_RATE_LIMITED);
            now += wait;
            assert_int_equal(authorize_chat(k, secret, now), KEY_ADMITTED);
            passed++;
        }
        assert_true((double)passed <= (double)rate * (1 + (now - begin) / 60) + 1e-6);
    }
    keys_close(k);
}

/* A clock that is set back an hour blocks no key for an hour; a late thread gains nothing. */
static void test_clock_goes_back(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){.requests_per_minute = 60});
    for (int i = 0; i < 60; i++) assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(authorize_chat(k, secret, NOON - 0.5), KEY_RATE_LIMITED);
        assert_int_equal(authorize_chat(k, secret, NOON), KEY_RATE_LIMITED);
    }
    assert_int_equal(authorize_chat(k, secret, NOON - 3600), KEY_RATE_LIMITED);
    assert_int_equal(authorize_chat(k, secret, NOON - 3600 + 1.1), KEY_ADMITTED);
    assert_int_equal(authorize_chat(k, secret, NOON - 3600 + 1.1), KEY_RATE_LIMITED);
    keys_close(k);
}

/* A clock that jumps back and forth admits at most one bucket per jump and blocks no key; the
 * expiry follows the clock. */
static void test_clock_jumps(void **state) {
    (void)state;
    static const double jumps[] = {0,    86400 * 400.0, -3600, 1e9,   -1e9,
                                   7200, -86400,        0.25,  -0.25, 0};
    struct keys *k = open_keys();
    const char *limited = add_key(k, "one",
                                  (struct key_spec){.requests_per_minute = 10, .quota_day = 100}),
               *expires = add_key(k, "two", (struct key_spec){.expires = (int64_t)NOON + 60});
    for (int round = 0; round < 3; round++)
        for (size_t i = 0; i < ARRAY_LEN(jumps); i++) {
            double now = NOON + jumps[i];
            int got = 0;
            for (int n = 0; n < 50; n++) got += authorize_chat(k, limited, now) == KEY_ADMITTED;
            assert_true(got <= 10);
            for (int n = 0; n < 50; n++)
                assert_true(authorize_chat(k, limited, now + 1.2 * (n % 2)) != KEY_OVER_QUOTA);
            got = 0; /* with a steady clock a minute later it is as after any minute */
            for (int n = 0; n < 20; n++)
                got += authorize_chat(k, limited, now + 62) == KEY_ADMITTED;
            assert_int_equal(got, 10);
            assert_int_equal(authorize_chat(k, expires, now) == KEY_EXPIRED, now >= NOON + 60);
        }
    keys_close(k);
}

/* quotas */

static void test_daily_quota(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){.quota_day = 100});
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 60, 39, NOON);
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 0, 1, NOON);
    assert_int_equal(authorize_chat(k, secret, NOON + 200), KEY_OVER_QUOTA);
    assert_true(answer.retry_after == 43000);
    assert_contains(answer.message, "100 tokens a day");
    assert_int_equal(authorize_chat(k, secret, NOON + 43199), KEY_OVER_QUOTA);
    assert_int_equal(authorize_chat(k, secret, NOON + 43200), KEY_ADMITTED);
    /* A thread that is late at midnight neither counts for the new day nor brings the old day
     * back. */
    keys_record_usage(k, answer.id, 99, 0, NOON + 43200);
    keys_record_usage(k, answer.id, 1000, 0, NOON + 43199);
    assert_int_equal(authorize_chat(k, secret, NOON + 43201), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 1, 0, NOON + 43201);
    assert_int_equal(authorize_chat(k, secret, NOON + 43202), KEY_OVER_QUOTA);
    keys_close(k);
    k = open_keys(); /* today's count is stored */
    assert_int_equal(authorize_chat(k, secret, NOON + 43202), KEY_OVER_QUOTA);
    assert_int_equal(authorize_chat(k, secret, NOON + 2 * 86400), KEY_ADMITTED);
    keys_close(k);
}

static void test_total_quota(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){.quota = 100, .quota_day = 1000});
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 50, 10, NOON);
    assert_int_equal(authorize_chat(k, secret, NOON + 86400), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 39, 1, NOON + 86400);
    assert_int_equal(authorize_chat(k, secret, NOON + 1e7), KEY_OVER_QUOTA);
    assert_true(answer.retry_after == 0);
    assert_string_equal(answer.message, "the quota of 100 tokens is used up");
    keys_close(k);
    k = open_keys();
    assert_int_equal(authorize_chat(k, secret, NOON + 2e7), KEY_OVER_QUOTA);
    keys_close(k);
}

static void test_counts_do_not_overflow(void **state) {
    (void)state;
    struct keys *k = open_keys();
    int64_t most = (int64_t)1 << 53;
    const char *secret = add_key(k, "one", (struct key_spec){.tokens_per_minute = 1});
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    for (int i = 0; i < 3; i++) keys_record_usage(k, answer.id, most, most, NOON);
    assert_int_equal(listed_number(k, 0, "all", "prompt_tokens"), most);
    assert_int_equal(authorize_chat(k, secret, NOON + 1e6), KEY_RATE_LIMITED);
    keys_close(k);
    k = open_keys();
    assert_int_equal(listed_number(k, 0, "all", "completion_tokens"), most);
    keys_close(k);
}

/* the store */

static void test_fresh_open(void **state) {
    (void)state;
    struct keys *k = open_keys();
    struct key_spec spec = {
        KEY_SCOPE_JOBS | KEY_SCOPE_ADMIN, 60, 1000, 20000, 300000, (int64_t)NOON + 99999};
    const char *secret = add_key(k, "one", spec);
    for (int i = 0; i < 300; i++) { /* more than a page of the log */
        char name[16];
        snprintf(name, sizeof name, "k%d", i);
        add_key(k, name, (struct key_spec){0});
    }
    assert_int_equal(keys_revoke(k, "k7", NOON, &err), OK);
    assert_int_equal(keys_authorize(k, secret, KEY_SCOPE_JOBS, NOON + 3, &answer), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 10, 20, NOON + 5);
    json_t *before = keys_list(k, NOON + 6), *one = json_array_get(before, 0), *after,
           *want =
               json_pack("{s:s,s:s,s:[s,s],s:i,s:i,s:i,s:i,s:I,s:I,s:i,s:I,s:{s:i,s:i,s:i},"
                         "s:{s:i,s:i,s:i}}",
                         "name", "one", "tail", secret + strlen(secret) - 4, "scopes", "jobs",
                         "admin", "requests_per_minute", 60, "tokens_per_minute", 1000, "quota_day",
                         20000, "quota", 300000, "expires", (json_int_t)NOON + 99999, "created",
                         (json_int_t)NOON, "revoked", 0, "last_used", (json_int_t)NOON + 5, "today",
                         "requests", 1, "prompt_tokens", 10, "completion_tokens", 20, "all",
                         "requests", 1, "prompt_tokens", 10, "completion_tokens", 20);
    keys_close(k);
    k = open_keys();
    after = keys_list(k, NOON + 6);
    assert_true(json_equal(before, after));
    assert_int_equal(json_array_size(after), 301);
    json_object_del(one, "id");
    assert_true(json_equal(one, want));
    assert_int_equal(listed_number(k, 8, NULL, "revoked"), (int64_t)NOON);
    assert_int_equal(keys_authorize(k, secret, KEY_SCOPE_ADMIN, NOON, &answer), KEY_ADMITTED);
    json_decref(want);
    json_decref(before);
    json_decref(after);
    keys_close(k);
}

static void test_second_handle(void **state) {
    (void)state;
    struct keys *server = open_keys(), *command = open_keys();
    const char *secret = add_key(command, "one", (struct key_spec){0});
    sync_keys(server);
    assert_true(keys_exist(server));
    assert_int_equal(authorize_chat(server, secret, NOON), KEY_ADMITTED);
    assert_int_equal(keys_revoke(command, "one", NOON, &err), OK);
    sync_keys(server);
    assert_int_equal(authorize_chat(server, secret, NOON), KEY_REVOKED);
    /* A handle reads the changes of other handles before it decides. */
    add_key(command, "two", (struct key_spec){0});
    char none[KEY_SECRET_LEN];
    struct key_spec spec = {.scopes = KEY_SCOPE_CHAT};
    assert_int_equal(keys_add(server, "two", &spec, NOON, none, &err), ERR_STATE);
    add_key(server, "three", (struct key_spec){0});
    assert_int_equal(keys_revoke(command, "three", NOON, &err), OK);
    keys_close(command);
    keys_close(server);
}

static void test_thread_notices(void **state) {
    (void)state;
    struct keys *server = open_keys(), *command = open_keys();
    const char *secret = add_key(command, "one", (struct key_spec){0});
    for (int i = 0; i < 2000 && authorize_chat(server, secret, NOON) != KEY_ADMITTED; i++)
        usleep(10000);
    assert_int_equal(answer.verdict, KEY_ADMITTED);
    assert_int_equal(keys_revoke(command, "one", NOON, &err), OK);
    for (int i = 0; i < 2000 && authorize_chat(server, secret, NOON) != KEY_REVOKED; i++)
        usleep(10000);
    assert_int_equal(answer.verdict, KEY_REVOKED);
    keys_close(command);
    keys_close(server);
}

static void test_two_servers_add_up(void **state) {
    (void)state;
    struct keys *a = open_keys(), *b;
    const char *secret = add_key(a, "one", (struct key_spec){.quota = 100});
    b = open_keys();
    for (int i = 0; i < 3; i++) {
        assert_int_equal(authorize_chat(a, secret, NOON), KEY_ADMITTED);
        keys_record_usage(a, answer.id, 10, 0, NOON);
        sync_keys(a);
        assert_int_equal(authorize_chat(b, secret, NOON), KEY_ADMITTED);
        keys_record_usage(b, answer.id, 20, 1, NOON);
        sync_keys(b);
    }
    assert_int_equal(listed_number(b, 0, "all", "prompt_tokens"), 90);
    assert_int_equal(listed_number(b, 0, "today", "completion_tokens"), 3);
    assert_int_equal(listed_number(b, 0, "all", "requests"), 6);
    keys_record_usage(a, answer.id, 10, 0, NOON);
    sync_keys(a);
    assert_int_equal(authorize_chat(a, secret, NOON), KEY_OVER_QUOTA);
    keys_close(a);
    keys_close(b);
}

static void *sync_main(void *k) {
    struct error own;
    return keys_sync(k, &own) == OK ? k : NULL;
}

/* Another process locks the store: requests do not wait for it, and usage recorded while a write
 * waits is counted once. */
static void test_slow_store(void **state) {
    (void)state;
    struct keys *k = open_keys();
    sqlite3 *db = NULL;
    pthread_t syncs;
    void *done;
    const char *secret = add_key(k, "one", (struct key_spec){0});
    sync_keys(k);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    assert_int_equal(pthread_create(&syncs, NULL, sync_main, k), 0);
    usleep(300000); /* the write has begun, and waits */
    double begin = clock_now();
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 7, 8, NOON);
    assert_true(clock_now() - begin < 2);
    assert_int_equal(listed_number(k, 0, "all", "requests"), 2);
    assert_int_equal(sqlite3_exec(db, "COMMIT", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    pthread_join(syncs, &done);
    assert_non_null(done);
    assert_int_equal(listed_number(k, 0, "all", "requests"), 2);
    assert_int_equal(listed_number(k, 0, "all", "completion_tokens"), 8);
    keys_close(k);
    k = open_keys();
    assert_int_equal(listed_number(k, 0, "today", "requests"), 2);
    assert_int_equal(listed_number(k, 0, "all", "prompt_tokens"), 7);
    keys_close(k);
}

enum { THREADS = 8, EACH = 400 };
struct worker {
    struct keys *k;
    const char *shared, *own;
    int64_t admitted, limited;
};

static void *worker_main(void *arg) {
    struct worker *w = arg;
    struct key_decision a;
    for (int i = 0; i < EACH; i++) {
        if (keys_authorize(w->k, w->shared, KEY_SCOPE_CHAT, NOON, &a) == KEY_ADMITTED) {
            w->admitted++;
            keys_record_usage(w->k, a.id, 3, i, NOON);
        } else {
            w->limited += a.verdict == KEY_RATE_LIMITED;
        }
        if (keys_authorize(w->k, w->own, KEY_SCOPE_CHAT, NOON, &a) == KEY_ADMITTED)
            keys_record_usage(w->k, a.id, 1, 2, NOON);
        if (i % 100 == 0) json_decref(keys_list(w->k, NOON));
    }
    return NULL;
}

/* While threads admit and record usage, keys are added and revoked and everything is written. */
static void test_threads_add_up(void **state) {
    (void)state;
    enum { LIMIT = THREADS * EACH - 500 };
    struct keys *k = open_keys();
    struct worker w[THREADS] = {0};
    pthread_t id[THREADS];
    const char *shared = add_key(k, "shared", (struct key_spec){.requests_per_minute = LIMIT});
    for (int i = 0; i < THREADS; i++) {
        char name[16];
        snprintf(name, sizeof name, "own%d", i);
        w[i] = (struct worker){k, shared, add_key(k, name, (struct key_spec){0}), 0, 0};
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&id[i], NULL, worker_main, &w[i]), 0);
    for (int i = 0; i < 40; i++) {
        char name[16];
        snprintf(name, sizeof name, "more%d", i);
        add_key(k, name, (struct key_spec){0});
        assert_int_equal(keys_revoke(k, name, NOON, &err), OK);
        sync_keys(k);
    }
    int64_t admitted = 0, limited = 0;
    for (int i = 0; i < THREADS; i++) {
        pthread_join(id[i], NULL);
        admitted += w[i].admitted;
        limited += w[i].limited;
    }
    assert_int_equal(admitted, LIMIT);
    assert_int_equal(limited, 500);
    keys_close(k);
    k = open_keys();
    assert_int_equal(listed_number(k, 0, "all", "requests"), LIMIT);
    assert_int_equal(listed_number(k, 0, "all", "prompt_tokens"), 3 * LIMIT);
    for (size_t i = 1; i <= THREADS; i++) {
        assert_int_equal(listed_number(k, i, "all", "requests"), EACH);
        assert_int_equal(listed_number(k, i, "today", "completion_tokens"), 2 * EACH);
    }
    keys_close(k);
}

/* The child records usage, reports it, and does nothing more; keys_sync is never called. */
static void test_kill(void **state) {
    (void)state;
    int says[2];
    char secret[KEY_SECRET_LEN];
    assert_int_equal(pipe(says), 0);
    pid_t child = fork();
    if (child == 0) {
        struct key_spec spec = {.scopes = KEY_SCOPE_CHAT};
        struct keys *k = keys_open(path, &err);
        if (!k || keys_add(k, "one", &spec, NOON, secret, &err) != OK ||
            authorize_chat(k, secret, NOON) != KEY_ADMITTED)
            _exit(1);
        keys_record_usage(k, answer.id, 11, 22, NOON);
        if (write(says[1], secret, sizeof secret) != sizeof secret) _exit(1);
        for (;;) pause();
    }
    close(says[1]);
    assert_int_equal(read(says[0], secret, sizeof secret), sizeof secret);
    close(says[0]);
    int64_t seen = 0;
    for (int i = 0; i < 200 && !seen; i++) {
        usleep(100000);
        struct keys *k = open_keys();
        seen = listed_number(k, 0, "all", "completion_tokens");
        keys_close(k);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    struct keys *k = open_keys();
    assert_int_equal(listed_number(k, 0, "all", "prompt_tokens"), 11);
    assert_int_equal(listed_number(k, 0, "all", "completion_tokens"), 22);
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    keys_close(k);
}

/* A key exists after a kill directly after its creation. */
static void test_kill_loses_no_key(void **state) {
    (void)state;
    for (int round = 0; round < 4; round++) {
        int says[2];
        char secret[KEY_SECRET_LEN], name[16];
        snprintf(name, sizeof name, "k%d", round);
        assert_int_equal(pipe(says), 0);
        pid_t child = fork();
        if (child == 0) {
            struct key_spec spec = {.scopes = KEY_SCOPE_CHAT};
            struct keys *k = keys_open(path, &err);
            if (!k || keys_add(k, name, &spec, NOON, secret, &err) != OK) _exit(1);
            if (write(says[1], secret, sizeof secret) != sizeof secret) _exit(1);
            kill(getpid(), SIGKILL);
        }
        close(says[1]);
        assert_int_equal(read(says[0], secret, sizeof secret), sizeof secret);
        close(says[0]);
        waitpid(child, NULL, 0);
        struct keys *k = open_keys();
        assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
        keys_close(k);
    }
}

/* damage */

static const struct damage {
    const char *sql, *says;
} damages[] = {
    {"UPDATE logs SET event = substr(event, 1, length(event) / 2) WHERE seq = 2", "event 2 of"},
    {"UPDATE logs SET event = '' WHERE seq = 1", "event 1 of"},
    {"UPDATE logs SET event = '[]' WHERE seq = 1", "event 1 of"},
    {"DELETE FROM logs WHERE seq = 2", "earlier events are missing"},
    {"UPDATE logs SET event = json_set(event, '$.seq', 7) WHERE seq = 2", "event 2 of"},
    {"UPDATE logs SET event = json_set(event, '$.op', 'grant') WHERE seq = 2", "neither"},
    {"UPDATE logs SET event = json_remove(event, '$.quota') WHERE seq = 1", "quota"},
    {"UPDATE logs SET event = json_set(event, '$.models', 'fry') WHERE seq = 1", "models"},
    {"UPDATE logs SET event = json_set(event, '$.quota', -1) WHERE seq = 1", "below 0"},
    {"UPDATE logs SET event = json_set(event, '$.quota', 1.5) WHERE seq = 1", "integer"},
    {"UPDATE logs SET event = json_set(event, '$.quota', '9') WHERE seq = 1", "integer"},
    {"UPDATE logs SET event = json_set(event, '$.scopes', json('[\"root\"]')) WHERE seq = 1",
     "needs scopes"},
    {"UPDATE logs SET event = json_set(event, '$.scopes', json('[]')) WHERE seq = 1",
     "needs scopes"},
    {"UPDATE logs SET event = json_set(event, '$.name', 'a b') WHERE seq = 1", "the name of"},
    {"UPDATE logs SET event = json_set(event, '$.hash', 'abc') WHERE seq = 1", "invalid hash"},
    {"UPDATE logs SET event = json_set(event, '$.tail', 'a' || char(27) || '[m') WHERE seq = 1",
     "tail or creation"},
    {"UPDATE logs SET event = json_set(event, '$.created', -1) WHERE seq = 1", "creation time"},
    {"UPDATE logs SET event = json_set(event, '$.name', 'one') WHERE seq = 2", "twice"},
    {"UPDATE logs SET event = json_set((SELECT event FROM logs WHERE seq = 1), '$.seq', 2, "
     "'$.name', 'new') WHERE seq = 2",
     "twice"},
    {"UPDATE logs SET event = json_set(event, '$.id', 'key-0') WHERE seq = 3", "event 3 of"},
    {"UPDATE logs SET event = json_set(event, '$.at', 0) WHERE seq = 3", "event 3 of"},
    {"UPDATE documents SET value = substr(value, 1, 20)", "the usage of API key"},
    {"UPDATE documents SET value = json_set(value, '$.all.requests', -5)", "the usage of API key"},
    {"UPDATE documents SET value = json_set(value, '$.all.requests', 1e300)",
     "the usage of API key"},
    {"UPDATE documents SET value = json_set(value, '$.day', 9007199254740993)",
     "the usage of API key"},
    {"UPDATE documents SET value = json_remove(value, '$.today.requests')", "the usage of API key"},
    {"UPDATE documents SET value = json_set(value, '$.free', 1)", "the usage of API key"},
};

static void test_damage_is_refused(void **state) {
    for (size_t i = 0; i < ARRAY_LEN(damages); i++) {
        struct keys *k = open_keys();
        const char *secret = add_key(k, "one", (struct key_spec){0});
        add_key(k, "two", (struct key_spec){0});
        assert_int_equal(keys_revoke(k, "two", NOON, &err), OK);
        assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
        keys_close(k);
        keys_close(open_keys());
        tamper(damages[i].sql);
        if ((k = keys_open(path, &err)) != NULL) fail_msg("taken: %s", damages[i].sql);
        assert_int_equal(err.code, ERR_FORMAT);
        assert_contains(err.text, damages[i].says);
        assert_contains(err.text, path);
        assert_contains(err.text, "put the file back from a copy");
        assert_int_equal(tear_down(state), 0);
        assert_int_equal(set_up(state), 0);
    }
}

/* A running server logs the damage, keeps its keys, and continues to count. */
static void test_damage_while_running(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){0});
    tamper(
        "INSERT INTO logs SELECT log, 2, json_set(event, '$.seq', 2, '$.op', 'grant') FROM logs");
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    assert_int_equal(keys_sync(k, &err), ERR_FORMAT);
    assert_contains(err.text, "event 2 of");
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    assert_int_equal(keys_sync(k, &err), ERR_FORMAT);
    tamper("UPDATE documents SET value = value WHERE value ->> '$.all.requests' = 2"); /* the row
                                                                                          exists */
    assert_int_equal(keys_revoke(k, "one", NOON, &err), ERR_FORMAT);
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    tamper("DELETE FROM logs WHERE seq = 2");
    sync_keys(k);
    assert_int_equal(keys_revoke(k, "one", NOON, &err), OK);
    keys_close(k);
}

/* Usage that could not be written is written later, once. */
static void test_failed_writes_are_retried(void **state) {
    (void)state;
    struct keys *k = open_keys();
    const char *secret = add_key(k, "one", (struct key_spec){0});
    assert_int_equal(authorize_chat(k, secret, NOON), KEY_ADMITTED);
    keys_record_usage(k, answer.id, 10, 1, NOON);
    sync_keys(k);
    tamper("UPDATE documents SET value = json_set(value, '$.free', 1)");
    for (int i = 0; i < 3; i++) {
        keys_record_usage(k, answer.id, 10, 1, NOON);
        assert_int_equal(keys_sync(k, &err), ERR_FORMAT);
        assert_contains(err.text, "the usage of API key");
    }
    assert_int_equal(listed_number(k, 0, "all", "prompt_tokens"), 40);
    tamper("UPDATE documents SET value = json_remove(value, '$.free')");
    sync_keys(k);
    sync_keys(k);
    keys_close(k);
    k = open_keys();
    assert_int_equal(listed_number(k, 0, "all", "prompt_tokens"), 40);
    assert_int_equal(listed_number(k, 0, "all", "requests"), 1);
    keys_close(k);
}

static void test_other_files_are_refused(void **state) {
    (void)state;
    char text[4096];
    memset(text, 'x', sizeof text);
    snprintf(path, sizeof path, "%s/serve.db", dir);
    assert_int_equal(file_write(path, text, sizeof text, &err), OK);
    assert_null(keys_open(path, &err));
    assert_contains(err.text, "not a database");
    snprintf(path, sizeof path, "%s/serve.db/serve.db", dir);
    assert_null(keys_open(path, &err));
    assert_contains(err.text, "cannot make the directory");
}

/* the command */

static json_t *printed[4];
static int n_printed;

/* main.c defines it, which is not in the library. */
void cli_print_json(json_t *v) {
    assert_true(n_printed < 4);
    printed[n_printed++] = v;
}

static void clear_output(void) {
    while (n_printed > 0) json_decref(printed[--n_printed]);
}

/* Runs the command with --json. */
static int run_command(const char *words) {
    char *block = xcalloc(1, cmd_key.size), *line = xasprintf("%s --store %s", words, path),
         *argv[16], *save = NULL;
    struct cli_options c = {.json = true, .quiet = true};
    struct strings args = {0};
    int argc = 0;
    clear_output();
    for (char *w = strtok_r(line, " ", &save); w; w = strtok_r(NULL, " ", &save)) argv[argc++] = w;
    options_default(cmd_key.rows, block);
    int rc = options_parse(cmd_key.rows, block, argc, argv, &args, &err);
    if (rc == OK) rc = cmd_key.run(&c, block, &args, &err);
    options_release(cmd_key.rows, block);
    strings_release(&args);
    free(block);
    free(line);
    return rc;
}

static void test_command(void **state) {
    (void)state;
    assert_int_equal(run_command("list"), ERR_MISSING);
    assert_contains(err.text, "shoal key add NAME");
    assert_false(path_exists(path));
    assert_int_equal(
        run_command("add one --rpm 2 --tpm 3 --quota-day 4 --quota 5 --scope chat jobs"), OK);
    char *secret = xstrdup(json_get_string(printed[0], "secret"));
    struct keys *k = open_keys();
    assert_int_equal(
        keys_authorize(k, secret, KEY_SCOPE_CHAT | KEY_SCOPE_JOBS, (double)time(NULL), &answer),
        KEY_ADMITTED);
    keys_close(k);
    free(secret);
    assert_int_equal(run_command("add two --days 2"), OK);
    assert_int_equal(run_command("list"), OK);
    assert_int_equal(n_printed, 2);
    static const char *const limits[] = {"requests_per_minute", "tokens_per_minute", "quota_day",
                                         "quota"};
    for (size_t i = 0; i < ARRAY_LEN(limits); i++)
        assert_true(json_get_number(printed[0], limits[i]) == 2.0 + (double)i);
    assert_true(json_get_number(printed[0], "expires") == 0);
    assert_true(fabs(json_get_number(printed[1], "expires") - (double)time(NULL) - 172800) < 600);
    assert_int_equal(json_array_size(json_object_get(printed[1], "scopes")), 1);
    assert_int_equal(run_command("revoke one"), OK);
    assert_int_equal(run_command("list"), OK);
    assert_true(json_get_number(printed[0], "revoked") > 0);
    clear_output();
}

static void test_command_line_errors(void **state) {
    (void)state;
    static const char *const wrong[] = {"grant one",       "add",     "revoke",
                                        "list one",        "add a/b", "add one --scope root",
                                        "add one --rpm -1"};
    assert_int_equal(run_command("add one"), OK);
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++)
        if (run_command(wrong[i]) != ERR_USAGE) fail_msg("taken: %s", wrong[i]);
    assert_int_equal(run_command("revoke two"), ERR_MISSING);
    assert_int_equal(run_command("add one"), ERR_STATE);
    clear_output();
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_secrets),
        TEST(test_wrong_secrets),
        TEST(test_whole_hash_is_compared),
        TEST(test_secrets_are_not_stored),
        TEST(test_scopes),
        TEST(test_expiry_and_revocation),
        TEST(test_refused_keys),
        TEST(test_any),
        TEST(test_fixed),
        TEST(test_token),
        TEST(test_decisions_are_synced),
        TEST(test_restore_accepts_no_refused_key),
        TEST(test_restore_without_keys),
        TEST(test_requests_a_minute),
        TEST(test_tokens_a_minute),
        TEST(test_both_limits),
        TEST(test_waiting_times),
        TEST(test_clock_goes_back),
        TEST(test_clock_jumps),
        TEST(test_daily_quota),
        TEST(test_total_quota),
        TEST(test_counts_do_not_overflow),
        TEST(test_fresh_open),
        TEST(test_second_handle),
        TEST(test_thread_notices),
        TEST(test_two_servers_add_up),
        TEST(test_slow_store),
        TEST(test_threads_add_up),
        TEST(test_kill),
        TEST(test_kill_loses_no_key),
        TEST(test_damage_is_refused),
        TEST(test_damage_while_running),
        TEST(test_failed_writes_are_retried),
        TEST(test_other_files_are_refused),
        TEST(test_command),
        TEST(test_command_line_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
