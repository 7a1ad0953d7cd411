/*
 * store: the store of store.h, on SQLite. Every statement is prepared once, at its first use, and
 * reused. Values are bound parameters, never parts of the SQL text.
 *
 * Invariant: the schema only grows. `user_version` holds its version, and a file with a newer
 * version is refused.
 */
#define _GNU_SOURCE
#include "store/internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char schema[] =
    "CREATE TABLE IF NOT EXISTS runs(id TEXT PRIMARY KEY, kind TEXT NOT NULL, recipe TEXT NOT NULL,"
    "  status TEXT NOT NULL, created TEXT NOT NULL) STRICT;"
    "CREATE TABLE IF NOT EXISTS events(seq INTEGER PRIMARY KEY, run TEXT NOT NULL, at TEXT NOT "
    "NULL,"
    "  kind TEXT NOT NULL, detail TEXT NOT NULL) STRICT;"
    "CREATE TABLE IF NOT EXISTS calls(key BLOB PRIMARY KEY, choice INTEGER NOT NULL, prob BLOB NOT "
    "NULL,"
    "  prefilled INTEGER NOT NULL, generated INTEGER NOT NULL, finish INTEGER NOT NULL, text TEXT) "
    "STRICT, WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS said(key BLOB PRIMARY KEY, ends BLOB NOT NULL, logprobs BLOB NOT "
    "NULL) STRICT, WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS adapters(seq INTEGER PRIMARY KEY, run TEXT NOT NULL, generation "
    "INTEGER NOT NULL,"
    "  name TEXT NOT NULL, hash TEXT NOT NULL, lineage TEXT, scores TEXT, UNIQUE(run, generation, "
    "name)) STRICT;"
    "CREATE TABLE IF NOT EXISTS results(seq INTEGER PRIMARY KEY, run TEXT NOT NULL, name TEXT NOT "
    "NULL,"
    "  row TEXT NOT NULL, UNIQUE(run, name)) STRICT;"
    "CREATE TABLE IF NOT EXISTS recorded(key TEXT PRIMARY KEY, created TEXT NOT NULL,"
    "  model TEXT NOT NULL, model_hash TEXT NOT NULL, class TEXT NOT NULL, level TEXT NOT NULL,"
    "  kv TEXT NOT NULL, lora TEXT NOT NULL, version TEXT NOT NULL, adapters TEXT NOT NULL,"
    "  inputs TEXT NOT NULL, outputs TEXT NOT NULL) STRICT;"
    "CREATE TABLE IF NOT EXISTS metrics(run TEXT NOT NULL, step INTEGER NOT NULL, row TEXT NOT "
    "NULL,"
    "  PRIMARY KEY(run, step)) STRICT, WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS logs(log TEXT NOT NULL, seq INTEGER NOT NULL, event TEXT NOT NULL,"
    "  PRIMARY KEY(log, seq)) STRICT, WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS documents(kind TEXT NOT NULL, id TEXT NOT NULL, value TEXT NOT "
    "NULL,"
    "  PRIMARY KEY(kind, id)) STRICT, WITHOUT ROWID;"
    "PRAGMA user_version = 5";

enum store_statement {
    RUN_ADD,
    RUN_STATUS,
    RUN_GET,
    RUN_LIST,
    EVENT_ADD,
    METRIC_PUT,
    METRIC_TRUNCATE,
    METRIC_LIST,
    CALL_PUT,
    TOKENS_PUT,
    CALL_GET,
    ADAPTER_PUT,
    ADAPTER_LIST,
    RESULT_PUT,
    RECORD_PUT,
    RECORD_GET,
    RECORD_LIST,
    LOG_APPEND,
    LOG_LIST,
    LOG_DELETE,
    DOCUMENT_PUT,
    DOCUMENT_GET,
    DOCUMENT_LIST,
    DOCUMENT_EXTRACT,
    DOCUMENT_COUNT,
    DOCUMENT_DELETE,
    N_STATEMENTS
};
static const char *const sql[N_STATEMENTS] = {
    [RUN_ADD] = "INSERT INTO runs VALUES(?1, ?2, ?3, 'running', ?4)",
    [RUN_STATUS] = "UPDATE runs SET status = ?2 WHERE id = ?1",
    [RUN_GET] = "SELECT kind, recipe, status, created FROM runs WHERE id = ?1",
    [RUN_LIST] = "SELECT id, kind, status, created FROM runs ORDER BY created DESC, rowid DESC",
    [EVENT_ADD] = "INSERT INTO events(run, at, kind, detail) VALUES(?1, ?2, ?3, ?4)",
    [METRIC_PUT] = "INSERT OR REPLACE INTO metrics VALUES(?1, ?2, ?3)",
    [METRIC_TRUNCATE] = "DELETE FROM metrics WHERE run = ?1 AND step > ?2",
    [METRIC_LIST] = "SELECT row FROM metrics WHERE run = ?1 ORDER BY step",
    [CALL_PUT] = "INSERT OR IGNORE INTO calls VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7)",
    [TOKENS_PUT] = "INSERT OR IGNORE INTO said VALUES(?1, ?2, ?3)",
    [CALL_GET] = "SELECT choice, prob, prefilled, generated, finish, text, ends, logprobs"
                 " FROM calls LEFT JOIN said USING(key) WHERE key = ?1",
    [ADAPTER_PUT] = "INSERT INTO adapters(run, generation, name, hash, lineage, scores) VALUES(?1, "
                    "?2, ?3, ?4, ?5, ?6)"
                    " ON CONFLICT DO UPDATE SET hash = ?4, lineage = ?5, scores = ?6",
    [ADAPTER_LIST] =
        "SELECT generation, name, hash, lineage, scores FROM adapters WHERE run = ?1 ORDER BY seq",
    [RESULT_PUT] =
        "INSERT INTO results(run, name, row) VALUES(?1, ?2, ?3) ON CONFLICT DO UPDATE SET row = ?3",
    [RECORD_PUT] = "INSERT OR REPLACE INTO recorded VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10,"
                   " ?11, ?12)",
    [RECORD_GET] = "SELECT * FROM recorded WHERE substr(key, 1, length(?1)) = ?1 LIMIT 2",
    [RECORD_LIST] = "SELECT key, created, model, model_hash, class, level, kv, lora, version,"
                    " adapters FROM recorded ORDER BY created DESC, rowid DESC",
    [LOG_APPEND] = "INSERT INTO logs VALUES(?1, ?2, ?3)",
    [LOG_LIST] = "SELECT event FROM logs WHERE log = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
    [LOG_DELETE] = "DELETE FROM logs WHERE log = ?1",
    [DOCUMENT_PUT] = "INSERT OR REPLACE INTO documents VALUES(?1, ?2, ?3)",
    [DOCUMENT_GET] = "SELECT value FROM documents WHERE kind = ?1 AND id = ?2",
    [DOCUMENT_LIST] = "SELECT id, value FROM documents WHERE kind = ?1 ORDER BY id",
    [DOCUMENT_EXTRACT] = "SELECT id, json_extract(value, ?3, ?4, ?5, ?6) FROM documents WHERE"
                         " kind = ?1 AND substr(id, 1, length(?2)) = ?2 ORDER BY id",
    [DOCUMENT_COUNT] = "SELECT count(*) FROM documents WHERE kind = ?1 AND"
                       " substr(id, 1, length(?2)) = ?2",
    [DOCUMENT_DELETE] = "DELETE FROM documents WHERE kind = ?1 AND id = ?2",
};

struct store {
    sqlite3 *db;
    sqlite3_stmt *stmts[N_STATEMENTS];
    char *path;
};

sqlite3 *store_connection(struct store *s) {
    return s->db;
}

static int sqlite_error(struct store *s, struct error *err, const char *what) {
    if (sqlite3_errcode(s->db) == SQLITE_CORRUPT)
        return store_damaged(s->path, sqlite3_errmsg(s->db), err);
    int system_errno = sqlite3_errcode(s->db) == SQLITE_CANTOPEN ? sqlite3_system_errno(s->db) : 0;
    const char *system_text = system_errno ? strerrordesc_np(system_errno) : NULL;
    return error_set(err, ERR_IO, "cannot %s '%s': %s%s%s", what, s->path, sqlite3_errmsg(s->db),
                     system_text ? ": " : "", system_text ? system_text : "");
}

static int sql_exec(struct store *s, const char *text, struct error *err) {
    return sqlite3_exec(s->db, text, NULL, NULL, NULL) == SQLITE_OK ? OK
                                                                    : sqlite_error(s, err, "write");
}

static int check_version(struct store *s, struct error *err) {
    sqlite3_stmt *q = NULL;
    if (sqlite3_prepare_v2(s->db, "PRAGMA user_version", -1, &q, NULL) != SQLITE_OK ||
        sqlite3_step(q) != SQLITE_ROW) {
        sqlite3_finalize(q);
        return sqlite_error(s, err, "read");
    }
    int version = sqlite3_column_int(q, 0);
    sqlite3_finalize(q);
    if (version > STORE_SCHEMA_VERSION)
        return error_set(err, ERR_MISMATCH,
                         "'%s' was made by a newer shoal (schema %d, this one knows %d)", s->path,
                         version, STORE_SCHEMA_VERSION);
    return OK;
}

enum { BUSY_MS = 10000 }; /* how long a connection waits for another one */

int store_set_wal(struct sqlite3 *db) {
    int rc;
    for (int ms = 0;; ms += 10) {
        rc = sqlite3_exec(db, "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL", NULL, NULL,
                          NULL);
        if (rc != SQLITE_BUSY || ms >= BUSY_MS) return rc;
        usleep(10000);
    }
}

struct store *store_open(const char *path, struct error *err) {
    struct store *s = xcalloc(1, sizeof *s);
    s->path = xstrdup(path);
    /* the database holds conversations and the ids of API keys */
    int rc = strcmp(path, ":memory:") == 0 ? OK : file_make_private(path, err);
    if (rc == OK && sqlite3_open(path, &s->db) != SQLITE_OK) rc = sqlite_error(s, err, "open");
    if (rc == OK) sqlite3_busy_timeout(s->db, BUSY_MS);
    bool check = rc == OK && store_was_left_open(s->db);
    if (rc == OK && store_set_wal(s->db) != SQLITE_OK) rc = sqlite_error(s, err, "write");
    if (rc == OK) rc = check_version(s, err);
    if (rc == OK && check) rc = store_check(s->db, path, err);
    if (rc == OK) rc = sql_exec(s, schema, err);
    if (rc == OK) return s;
    if (s->db) store_keep_wal(s->db);
    store_close(s);
    return NULL;
}

/* Appends a path to a URI. */
static void uri_add_path(struct buf *uri, const char *path) {
    for (; *path; path++)
        if (strchr("%?#", *path))
            buf_printf(uri, "%%%02X", (unsigned)(unsigned char)*path);
        else
            buf_add(uri, path, 1);
}

/* Without a -wal file no process has the database open, and SQLite would have to create one:
 * `immutable` makes it read the database alone. */
struct store *store_open_read_only(const char *path, struct error *err) {
    struct store *s = xcalloc(1, sizeof *s);
    char *wal = xasprintf("%s-wal", path);
    struct buf uri = {0};
    s->path = xstrdup(path);
    buf_puts(&uri, "file:");
    uri_add_path(&uri, path);
    buf_puts(&uri, path_exists(wal) ? "?mode=ro" : "?immutable=1");
    int flags = SQLITE_OPEN_READONLY | SQLITE_OPEN_URI,
        rc = sqlite3_open_v2(uri.data, &s->db, flags, NULL) == SQLITE_OK
                 ? OK
                 : sqlite_error(s, err, "open");
    if (rc == OK) sqlite3_busy_timeout(s->db, BUSY_MS);
    if (rc == OK) rc = check_version(s, err);
    buf_release(&uri);
    free(wal);
    if (rc == OK) return s;
    store_close(s);
    return NULL;
}

void store_close(struct store *s) {
    if (!s) return;
    for (int i = 0; i < N_STATEMENTS; i++) sqlite3_finalize(s->stmts[i]);
    sqlite3_close(s->db);
    free(s->path);
    free(s);
}

int store_set_synchronous(struct store *s, bool full, struct error *err) {
    return sql_exec(s, full ? "PRAGMA synchronous = FULL" : "PRAGMA synchronous = NORMAL", err);
}

int store_begin(struct store *s, struct error *err) {
    return sql_exec(s, "BEGIN IMMEDIATE", err);
}

int store_commit(struct store *s, struct error *err) {
    return sql_exec(s, "COMMIT", err);
}

void store_rollback(struct store *s) {
    sqlite3_exec(s->db, "ROLLBACK", NULL, NULL, NULL);
}

/* A prepared statement, reset and ready to be bound; NULL with `err` set on failure. */
static sqlite3_stmt *statement_get(struct store *s, enum store_statement which, struct error *err) {
    sqlite3_stmt **q = &s->stmts[which];
    if (!*q && sqlite3_prepare_v3(s->db, sql[which], -1, SQLITE_PREPARE_PERSISTENT, q, NULL) !=
                   SQLITE_OK) {
        sqlite_error(s, err, "read");
        return NULL;
    }
    sqlite3_reset(*q);
    sqlite3_clear_bindings(*q);
    return *q;
}

/* Binds a copy made by xstrdup, which SQLite frees: a copy by SQLite could fail for lack of memory
 * and leave NULL in the row. bind_json and bind_blob do the same. */
static void bind_text(sqlite3_stmt *q, int index, const char *text) {
    sqlite3_bind_text(q, index, text ? xstrdup(text) : NULL, -1, free);
}

static void bind_json(sqlite3_stmt *q, int index, const json_t *v) {
    sqlite3_bind_text(q, index, v ? json_canonical(v) : NULL, -1, free);
}

static void bind_blob(sqlite3_stmt *q, int index, const void *p, size_t size) {
    void *copy = xmalloc(MAX(size, 1));
    if (size) memcpy(copy, p, size);
    sqlite3_bind_blob(q, index, copy, (int)size, free);
}

/* Runs a statement that returns no rows. */
static int statement_run(struct store *s, sqlite3_stmt *q, struct error *err) {
    int rc = sqlite3_step(q) == SQLITE_DONE ? OK : sqlite_error(s, err, "write");
    sqlite3_reset(q);
    return rc;
}

int store_run_add(struct store *s, const char *id, const char *kind, const json_t *recipe,
                  struct error *err) {
    char now[32];
    sqlite3_stmt *q = statement_get(s, RUN_ADD, err);
    if (!q) return err->code;
    bind_text(q, 1, id);
    bind_text(q, 2, kind);
    bind_json(q, 3, recipe);
    bind_text(q, 4, clock_utc(now));
    return statement_run(s, q, err);
}

int store_run_status(struct store *s, const char *id, const char *status, struct error *err) {
    sqlite3_stmt *q = statement_get(s, RUN_STATUS, err);
    if (!q) return err->code;
    bind_text(q, 1, id);
    bind_text(q, 2, status);
    int rc = statement_run(s, q, err);
    if (rc == OK && sqlite3_changes(s->db) == 0)
        rc = error_set(err, ERR_MISSING, "no run '%s' in '%s'", id, s->path);
    return rc;
}

int store_run_begin(struct store *s, const char *id, const char *kind, const json_t *recipe,
                    struct error *err) {
    struct error missing;
    json_t *old = store_run_get(s, id, &missing);
    int rc =
        old ? store_run_status(s, id, "running", err) : store_run_add(s, id, kind, recipe, err);
    json_decref(old);
    return rc;
}

static json_t *column_json(sqlite3_stmt *q, int index) {
    const char *text = (const char *)sqlite3_column_text(q, index);
    json_t *v = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
    return v ? v : json_null();
}

static json_t *column_text(sqlite3_stmt *q, int index) {
    const char *text = (const char *)sqlite3_column_text(q, index);
    return text ? json_string(text) : json_null();
}

json_t *store_run_get(struct store *s, const char *id, struct error *err) {
    sqlite3_stmt *q = statement_get(s, RUN_GET, err);
    json_t *v = NULL;
    if (!q) return NULL;
    bind_text(q, 1, id);
    int rc = sqlite3_step(q);
    if (rc == SQLITE_ROW)
        v = json_pack("{s:o,s:o,s:o,s:o}", "kind", column_text(q, 0), "recipe", column_json(q, 1),
                      "status", column_text(q, 2), "created", column_text(q, 3));
    else if (rc == SQLITE_DONE)
        error_set(err, ERR_MISSING, "no run '%s' in '%s'", id, s->path);
    else
        sqlite_error(s, err, "read");
    sqlite3_reset(q);
    return v;
}

/* Returns `list` if `rc`, the result of the last step, says that all rows are read. Otherwise sets
 * `err`, releases `list` and returns NULL. */
static json_t *list_finish(struct store *s, sqlite3_stmt *q, int rc, json_t *list,
                           struct error *err) {
    if (rc != SQLITE_DONE) {
        sqlite_error(s, err, "read");
        json_decref(list);
        list = NULL;
    }
    sqlite3_reset(q);
    return list;
}

/* Changes the status of a run that was killed. A run whose folder is elsewhere keeps its status. */
static void run_mark_interrupted(json_t *run, const char *runs) {
    if (strcmp(json_get_string(run, "status"), "running") != 0) return;
    char *dir = path_join(runs, json_get_string(run, "id"));
    if (path_is_dir(dir) && !dir_is_locked(dir))
        json_object_set_new(run, "status", json_string("interrupted"));
    free(dir);
}

json_t *store_run_list(struct store *s, const char *runs, struct error *err) {
    sqlite3_stmt *q = statement_get(s, RUN_LIST, err);
    if (!q) return NULL;
    json_t *list = json_array();
    int rc;
    while ((rc = sqlite3_step(q)) == SQLITE_ROW) {
        json_t *run =
            json_pack("{s:o,s:o,s:o,s:o}", "id", column_text(q, 0), "kind", column_text(q, 1),
                      "status", column_text(q, 2), "created", column_text(q, 3));
        run_mark_interrupted(run, runs);
        json_array_append_new(list, run);
    }
    return list_finish(s, q, rc, list, err);
}

int store_event_add(struct store *s, const char *run, const char *kind, const json_t *detail,
                    struct error *err) {
    char now[32];
    sqlite3_stmt *q = statement_get(s, EVENT_ADD, err);
    if (!q) return err->code;
    bind_text(q, 1, run);
    bind_text(q, 2, clock_utc(now));
    bind_text(q, 3, kind);
    bind_json(q, 4, detail);
    return statement_run(s, q, err);
}

int store_metric_put(struct store *s, const char *run, int64_t step, const json_t *row,
                     struct error *err) {
    sqlite3_stmt *q = statement_get(s, METRIC_PUT, err);
    if (!q) return err->code;
    bind_text(q, 1, run);
    sqlite3_bind_int64(q, 2, step);
    bind_json(q, 3, row);
    return statement_run(s, q, err);
}

int store_metric_truncate(struct store *s, const char *run, int64_t step, struct error *err) {
    sqlite3_stmt *q = statement_get(s, METRIC_TRUNCATE, err);
    if (!q) return err->code;
    bind_text(q, 1, run);
    sqlite3_bind_int64(q, 2, step);
    return statement_run(s, q, err);
}

json_t *store_metric_list(struct store *s, const char *run, struct error *err) {
    sqlite3_stmt *q = statement_get(s, METRIC_LIST, err);
    if (!q) return NULL;
    bind_text(q, 1, run);
    json_t *list = json_array();
    int rc;
    while ((rc = sqlite3_step(q)) == SQLITE_ROW) json_array_append_new(list, column_json(q, 0));
    return list_finish(s, q, rc, list, err);
}

static int hex_digit(char c) {
    return c <= '9' ? c - '0' : c - 'a' + 10;
}

/* Binds a key of 64 hex digits as 32 bytes to parameter 1. */
static void bind_key(sqlite3_stmt *q, const char *hex) {
    uint8_t raw[32];
    for (int i = 0; i < 32; i++)
        raw[i] = (uint8_t)(hex_digit(hex[2 * i]) << 4 | hex_digit(hex[2 * i + 1]));
    bind_blob(q, 1, raw, sizeof raw);
}

int store_call_put(struct store *s, const struct store_call *c, struct error *err) {
    sqlite3_stmt *q = statement_get(s, CALL_PUT, err);
    if (!q) return err->code;
    bind_key(q, c->key);
    sqlite3_bind_int(q, 2, c->choice);
    bind_blob(q, 3, c->prob, sizeof *c->prob * (size_t)c->n_choices);
    sqlite3_bind_int(q, 4, c->n_prefilled);
    sqlite3_bind_int(q, 5, c->n_generated);
    sqlite3_bind_int(q, 6, c->finish);
    bind_text(q, 7, c->text);
    int rc = statement_run(s, q, err);
    if (rc != OK || c->n_tokens == 0) return rc;
    if (!(q = statement_get(s, TOKENS_PUT, err))) return err->code;
    bind_key(q, c->key);
    bind_blob(q, 2, c->ends, sizeof *c->ends * (size_t)c->n_tokens);
    bind_blob(q, 3, c->logprobs, sizeof *c->logprobs * (size_t)c->n_tokens);
    return statement_run(s, q, err);
}

/* The 4-byte numbers of a column, malloc'ed; NULL if the column is empty. */
static void *column_numbers(sqlite3_stmt *q, int index, int32_t *n) {
    size_t bytes = (size_t)sqlite3_column_bytes(q, index) & ~(size_t)3;
    *n = (int32_t)(bytes / 4);
    return bytes ? memcpy(xmalloc(bytes), sqlite3_column_blob(q, index), bytes) : NULL;
}

bool store_call_get(struct store *s, const char *key, struct store_call *out) {
    struct error err;
    sqlite3_stmt *q = statement_get(s, CALL_GET, &err);
    if (!q) return false;
    bind_key(q, key);
    bool found = sqlite3_step(q) == SQLITE_ROW;
    if (found) {
        const char *text = (const char *)sqlite3_column_text(q, 5);
        int32_t n;
        *out = (struct store_call){.choice = sqlite3_column_int(q, 0),
                                   .n_prefilled = sqlite3_column_int(q, 2),
                                   .n_generated = sqlite3_column_int(q, 3),
                                   .finish = (uint8_t)sqlite3_column_int(q, 4),
                                   .text = text ? xstrdup(text) : NULL};
        memcpy(out->key, key, HASH_LEN);
        out->prob = column_numbers(q, 1, &out->n_choices);
        out->ends = column_numbers(q, 6, &out->n_tokens);
        out->logprobs = column_numbers(q, 7, &n);
        out->n_tokens = MIN(out->n_tokens, n);
    }
    sqlite3_reset(q);
    return found;
}

void store_call_release(struct store_call *c) {
    free(c->prob);
    free(c->text);
    free(c->ends);
    free(c->logprobs);
    *c = (struct store_call){0};
}

int store_adapter_put(struct store *s, const char *run, int generation, const char *name,
                      const char *hash, const json_t *lineage, const json_t *scores,
                      struct error *err) {
    sqlite3_stmt *q = statement_get(s, ADAPTER_PUT, err);
    if (!q) return err->code;
    bind_text(q, 1, run);
    sqlite3_bind_int(q, 2, generation);
    bind_text(q, 3, name);
    bind_text(q, 4, hash);
    bind_json(q, 5, lineage);
    bind_json(q, 6, scores);
    return statement_run(s, q, err);
}

json_t *store_adapter_list(struct store *s, const char *run, struct error *err) {
    sqlite3_stmt *q = statement_get(s, ADAPTER_LIST, err);
    if (!q) return NULL;
    bind_text(q, 1, run);
    json_t *list = json_array();
    int rc;
    while ((rc = sqlite3_step(q)) == SQLITE_ROW)
        json_array_append_new(list, json_pack("{s:i,s:o,s:o,s:o,s:o}", "generation",
                                              sqlite3_column_int(q, 0), "name", column_text(q, 1),
                                              "hash", column_text(q, 2), "lineage",
                                              column_json(q, 3), "scores", column_json(q, 4)));
    return list_finish(s, q, rc, list, err);
}

int store_result_put(struct store *s, const char *run, const char *name, const json_t *row,
                     struct error *err) {
    sqlite3_stmt *q = statement_get(s, RESULT_PUT, err);
    if (!q) return err->code;
    bind_text(q, 1, run);
    bind_text(q, 2, name);
    bind_json(q, 3, row);
    return statement_run(s, q, err);
}

/* Columns of the table `recorded` after `key` and `created`. The first N_TEXT_COLUMNS of them hold
 * text, the others JSON. */
static const char *const record_columns[] = {"model",  "model_hash", "class",   "level",
                                             "kv",     "lora",       "version", "adapters",
                                             "inputs", "outputs"};
enum { N_TEXT_COLUMNS = 7 };

int store_record_put(struct store *s, const char *key, const json_t *call, struct error *err) {
    char now[32];
    sqlite3_stmt *q = statement_get(s, RECORD_PUT, err);
    if (!q) return err->code;
    bind_text(q, 1, key);
    bind_text(q, 2, clock_utc(now));
    for (int i = 0; i < (int)ARRAY_LEN(record_columns); i++) {
        const json_t *v = json_object_get(call, record_columns[i]);
        CHECK(i >= N_TEXT_COLUMNS || json_is_string(v));
        if (i < N_TEXT_COLUMNS)
            bind_text(q, 3 + i, json_string_value(v));
        else
            bind_json(q, 3 + i, v);
    }
    return statement_run(s, q, err);
}

static json_t *record_json(sqlite3_stmt *q) {
    json_t *v = json_pack("{s:o,s:o}", "key", column_text(q, 0), "created", column_text(q, 1));
    for (int i = 0; i < sqlite3_column_count(q) - 2; i++)
        json_object_set_new(v, record_columns[i],
                            i < N_TEXT_COLUMNS ? column_text(q, 2 + i) : column_json(q, 2 + i));
    return v;
}

json_t *store_record_get(struct store *s, const char *prefix, struct error *err) {
    sqlite3_stmt *q = statement_get(s, RECORD_GET, err);
    if (!q) return NULL;
    bind_text(q, 1, prefix);
    int rc = sqlite3_step(q);
    json_t *v = rc == SQLITE_ROW ? record_json(q) : NULL;
    if (rc != SQLITE_ROW && rc != SQLITE_DONE) {
        sqlite_error(s, err, "read");
    } else if (!v) {
        error_set(err, ERR_MISSING, "no recorded call '%s' in '%s'", prefix, s->path);
    } else if (sqlite3_step(q) == SQLITE_ROW) {
        error_set(err, ERR_USAGE, "several recorded calls begin with '%s'; give more of the key",
                  prefix);
        json_decref(v);
        v = NULL;
    }
    sqlite3_reset(q);
    return v;
}

json_t *store_record_list(struct store *s, struct error *err) {
    sqlite3_stmt *q = statement_get(s, RECORD_LIST, err);
    if (!q) return NULL;
    json_t *list = json_array();
    int rc;
    while ((rc = sqlite3_step(q)) == SQLITE_ROW) json_array_append_new(list, record_json(q));
    return list_finish(s, q, rc, list, err);
}

static int log_event_put(struct store *s, const char *log, int64_t seq, const json_t *event,
                         struct error *err) {
    sqlite3_stmt *q = statement_get(s, LOG_APPEND, err);
    if (!q) return err->code;
    bind_text(q, 1, log);
    sqlite3_bind_int64(q, 2, seq);
    bind_json(q, 3, event);
    int rc = statement_run(s, q, err);
    if (rc != OK && sqlite3_extended_errcode(s->db) == SQLITE_CONSTRAINT_PRIMARYKEY)
        rc = error_set(err, ERR_STATE, "log '%s' has an event %lld already", log, (long long)seq);
    return rc;
}

/* Uses a savepoint, because the caller may be inside a transaction. */
int store_log_append(struct store *s, const char *log, int64_t seq, const json_t *events,
                     struct error *err) {
    int rc = sql_exec(s, "SAVEPOINT log", err);
    if (rc != OK) return rc;
    for (size_t i = 0; i < json_array_size(events) && rc == OK; i++)
        rc = log_event_put(s, log, seq + (int64_t)i, json_array_get(events, i), err);
    if (rc == OK) rc = sql_exec(s, "RELEASE log", err);
    if (rc != OK) sqlite3_exec(s->db, "ROLLBACK TO log; RELEASE log", NULL, NULL, NULL);
    return rc;
}

json_t *store_log_list(struct store *s, const char *log, int64_t seq, int64_t limit,
                       struct error *err) {
    sqlite3_stmt *q = statement_get(s, LOG_LIST, err);
    if (!q) return NULL;
    bind_text(q, 1, log);
    sqlite3_bind_int64(q, 2, seq);
    sqlite3_bind_int64(q, 3, limit);
    json_t *list = json_array();
    int rc;
    while ((rc = sqlite3_step(q)) == SQLITE_ROW) json_array_append_new(list, column_json(q, 0));
    return list_finish(s, q, rc, list, err);
}

int store_log_delete(struct store *s, const char *log, struct error *err) {
    sqlite3_stmt *q = statement_get(s, LOG_DELETE, err);
    if (!q) return err->code;
    bind_text(q, 1, log);
    return statement_run(s, q, err);
}

int store_document_put(struct store *s, const char *kind, const char *id, const json_t *value,
                       struct error *err) {
    sqlite3_stmt *q = statement_get(s, DOCUMENT_PUT, err);
    if (!q) return err->code;
    bind_text(q, 1, kind);
    bind_text(q, 2, id);
    bind_json(q, 3, value);
    return statement_run(s, q, err);
}

json_t *store_document_get(struct store *s, const char *kind, const char *id, struct error *err) {
    sqlite3_stmt *q = statement_get(s, DOCUMENT_GET, err);
    if (!q) return NULL;
    bind_text(q, 1, kind);
    bind_text(q, 2, id);
    int rc = sqlite3_step(q);
    json_t *v = rc == SQLITE_ROW ? column_json(q, 0) : NULL;
    if (rc == SQLITE_DONE)
        error_set(err, ERR_MISSING, "no %s '%s' in '%s'", kind, id, s->path);
    else if (rc != SQLITE_ROW)
        sqlite_error(s, err, "read");
    sqlite3_reset(q);
    return v;
}

/* The rows (id, JSON) of a statement whose parameters are bound, keyed by id. */
static json_t *documents_read(struct store *s, sqlite3_stmt *q, struct error *err) {
    json_t *all = json_object();
    int rc;
    while ((rc = sqlite3_step(q)) == SQLITE_ROW)
        json_object_set_new(all, (const char *)sqlite3_column_text(q, 0), column_json(q, 1));
    return list_finish(s, q, rc, all, err);
}

json_t *store_document_list(struct store *s, const char *kind, struct error *err) {
    sqlite3_stmt *q = statement_get(s, DOCUMENT_LIST, err);
    if (!q) return NULL;
    bind_text(q, 1, kind);
    return documents_read(s, q, err);
}

json_t *store_document_extract(struct store *s, const char *kind, const char *prefix,
                               const char *const paths[STORE_PATHS], struct error *err) {
    sqlite3_stmt *q = statement_get(s, DOCUMENT_EXTRACT, err);
    if (!q) return NULL;
    bind_text(q, 1, kind);
    bind_text(q, 2, prefix);
    for (int i = 0; i < STORE_PATHS; i++) bind_text(q, 3 + i, paths[i]);
    return documents_read(s, q, err);
}

int store_document_count(struct store *s, const char *kind, const char *prefix, int64_t *n,
                         struct error *err) {
    sqlite3_stmt *q = statement_get(s, DOCUMENT_COUNT, err);
    if (!q) return err->code;
    bind_text(q, 1, kind);
    bind_text(q, 2, prefix);
    int rc = sqlite3_step(q) == SQLITE_ROW ? OK : sqlite_error(s, err, "read");
    *n = rc == OK ? sqlite3_column_int64(q, 0) : 0;
    sqlite3_reset(q);
    return rc;
}

int store_document_delete(struct store *s, const char *kind, const char *id, struct error *err) {
    sqlite3_stmt *q = statement_get(s, DOCUMENT_DELETE, err);
    if (!q) return err->code;
    bind_text(q, 1, kind);
    bind_text(q, 2, id);
    return statement_run(s, q, err);
}
