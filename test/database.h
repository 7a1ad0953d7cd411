/* database: queries of a test to a database file, through SQLite. Include it after cmocka.h. */
#ifndef SHOAL_TEST_DATABASE_H
#define SHOAL_TEST_DATABASE_H

#include <sqlite3.h>
#include <stdint.h>

/* The first column of the first row of a query, which may also write. */
static inline int64_t database_query_int(const char *path, const char *sql) {
    sqlite3 *db = NULL;
    sqlite3_stmt *q = NULL;
    assert_int_equal(sqlite3_open_v2(path, &db, SQLITE_OPEN_READWRITE, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &q, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(q), SQLITE_ROW);
    int64_t v = sqlite3_column_int64(q, 0);
    sqlite3_finalize(q);
    sqlite3_close(db);
    return v;
}

#endif
