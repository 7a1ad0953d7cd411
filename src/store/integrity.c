/*
 * integrity: finds out whether a store was closed by the process that wrote to it last, and checks
 * one that was not.
 *
 * The last connection that closes a file in WAL mode moves the write-ahead log into the file and
 * removes the log. A log that exists when a file is opened therefore belongs to another open
 * connection, or to a process that was killed. Only in the second case can a connection lock the
 * whole file. The lock is released before the check: another process that opens the file meanwhile
 * does not wait, and does not check.
 *
 * Invariant: a damaged file keeps its log, so that every later store_open checks it again.
 */
#define _GNU_SOURCE
#include "store/internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { REPORTED_BYTES = 64 << 20 }; /* the check of a larger file is announced */

void store_keep_wal(sqlite3 *db) {
    sqlite3_db_config(db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, NULL);
}

/* Locks through SQLite, which knows the connections of this process too. Closing a descriptor of
 * ours would release the POSIX locks of those connections. */
static bool has_other_connection(const char *file) {
    sqlite3 *db = NULL;
    int rc = sqlite3_open_v2(file, &db, SQLITE_OPEN_READWRITE, NULL);
    if (rc == SQLITE_OK) {
        store_keep_wal(db);
        /* the first read of an exclusive connection locks the file */
        rc = sqlite3_exec(db, "PRAGMA locking_mode = EXCLUSIVE; PRAGMA user_version", NULL, NULL,
                          NULL);
    }
    sqlite3_close(db);
    return rc == SQLITE_BUSY;
}

bool store_was_left_open(sqlite3 *db) {
    const char *file = sqlite3_db_filename(db, "main");
    struct stat st;
    if (!file || !*file || stat(sqlite3_filename_wal(file), &st) != 0 || st.st_size == 0)
        return false;
    return !has_other_connection(file);
}

int store_damaged(const char *path, const char *problem, struct error *err) {
    return error_set(err, ERR_FORMAT,
                     "'%s' is damaged: %s; 'shoal salvage FILE NEW' copies the readable rows", path,
                     problem);
}

/* quick_check reports a page that could not be read as a problem of the file, "unable to get the
 * page. error code=N". Returns N, SQLite's code, or SQLITE_OK for other problems. */
static int unread_page(const char *problem) {
    static const char mark[] = "error code=";
    const char *code = problem ? strstr(problem, mark) : NULL;
    return code ? atoi(code + strlen(mark)) : SQLITE_OK;
}

/* quick_check reads every page and verifies that each table is a search tree in order. The full
 * integrity_check also looks up every row in the indexes; only small tables of the schema have an
 * index apart from the table. */
int store_check(sqlite3 *db, const char *path, struct error *err) {
    sqlite3_stmt *q = NULL;
    struct stat st;
    if (stat(path, &st) == 0 && st.st_size > REPORTED_BYTES)
        log_info("checking '%s' (%.0f MB), which was not closed", path, (double)st.st_size / 1e6);
    int rc = sqlite3_prepare_v2(db, "PRAGMA quick_check(1)", -1, &q, NULL);
    if (rc == SQLITE_OK) rc = sqlite3_step(q);
    const char *text = rc == SQLITE_ROW ? (const char *)sqlite3_column_text(q, 0) : NULL,
               *line = text ? strrchr(text, '\n') : NULL;
    int result = OK, unread = unread_page(text);
    if ((unread & 0xFF) == SQLITE_IOERR || (unread & 0xFF) == SQLITE_NOMEM)
        result = error_set(err, ERR_IO, "cannot check '%s': %s", path, sqlite3_errstr(unread));
    else if (rc != SQLITE_ROW && rc != SQLITE_CORRUPT && rc != SQLITE_NOTADB)
        result = error_set(err, ERR_IO, "cannot check '%s': %s", path, sqlite3_errmsg(db));
    else if (rc != SQLITE_ROW)
        result = store_damaged(path, sqlite3_errmsg(db), err);
    else if (!text || strcmp(text, "ok") != 0)
        result = store_damaged(path, line ? line + 1 : text ? text : "", err);
    sqlite3_finalize(q);
    return result;
}
