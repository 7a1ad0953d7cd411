/*
 * sql: the check sql. A text is one query that a database answers, run by SQLite in this process.
 *
 * The database is opened read-only. The authorizer allows reading and functions, and nothing else:
 * no writing, no ATTACH, no PRAGMA, no transaction. The limits of a query are SQLite's own limits
 * below, a number of steps, seconds, memory, rows and bytes of rows. Temporary tables are kept in
 * memory, so that a query cannot fill the disk.
 *
 * Rows are compared as texts: a type, then the value. 2 and 2.0 are equal.
 */
#define _GNU_SOURCE
#include "check/internal.h"

#include <math.h>
#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_ROWS = 10000,
    MAX_ROW_BYTES = 16 << 20, /* bytes of all rows of a query */
    STEP_INTERVAL = 20,       /* steps of SQLite's machine between two calls of `progress` */
    MAX_CALLS = 1 << 20,      /* calls of `progress`: 21 million steps */
    MAX_MEMORY = 256 << 20,   /* bytes that SQLite allocates during a query */
    /* Functions such as instr() take quadratic time within one step: half a second at this size. */
    MAX_VALUE_BYTES = 256 << 10,
};
#define MAX_SECONDS 10

struct sql {
    sqlite3 *db;
    /* the query that runs */
    int64_t calls, memory; /* calls of `progress`; memory at the start */
    double deadline;
    const char *limit; /* which limit was reached; NULL: none */
};

static const struct {
    int id, value;
} limits[] = {
    {SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES},
    {SQLITE_LIMIT_SQL_LENGTH, 64 << 10},
    {SQLITE_LIMIT_COLUMN, 200},
    {SQLITE_LIMIT_EXPR_DEPTH, 100},
    {SQLITE_LIMIT_COMPOUND_SELECT, 50},
    {SQLITE_LIMIT_VDBE_OP, 25000},
    {SQLITE_LIMIT_FUNCTION_ARG, 16},
    {SQLITE_LIMIT_ATTACHED, 0},
    {SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 50},
    {SQLITE_LIMIT_VARIABLE_NUMBER, 10},
    {SQLITE_LIMIT_TRIGGER_DEPTH, 1},
    {SQLITE_LIMIT_WORKER_THREADS, 0},
};

static int authorize(void *ctx, int action, const char *a, const char *b, const char *c,
                     const char *d) {
    (void)ctx, (void)a, (void)c, (void)d;
    if (action == SQLITE_FUNCTION)
        return sqlite3_stricmp(b, "load_extension") == 0 ? SQLITE_DENY : SQLITE_OK;
    return action == SQLITE_SELECT || action == SQLITE_READ || action == SQLITE_RECURSIVE
               ? SQLITE_OK
               : SQLITE_DENY;
}

static int progress(void *ctx) {
    struct sql *s = ctx;
    if (++s->calls > MAX_CALLS)
        s->limit = "the query has too many steps";
    else if (sqlite3_memory_used() - s->memory > MAX_MEMORY)
        s->limit = "the query needs too much memory";
    else if (clock_now() > s->deadline)
        s->limit = "the query did not end in time";
    return s->limit != NULL;
}

/* rows */

static void add_number(double x, struct buf *out) {
    buf_printf(out, "n%.15g", x == 0 ? 0.0 : x); // no -0
}

static void add_text(char type, const void *p, size_t n, struct buf *out) {
    buf_printf(out, "%c%zu:", type, n);
    buf_add(out, p, n);
}

/* An integer that a double represents exactly equals the same real number. */
static void add_integer(int64_t x, struct buf *out) {
    if (x > -(1LL << 49) && x < 1LL << 49)
        add_number((double)x, out);
    else
        buf_printf(out, "n%lld", (long long)x);
}

static void add_column(sqlite3_stmt *q, int i, struct buf *out) {
    int type = sqlite3_column_type(q, i);
    if (type == SQLITE_INTEGER)
        add_integer(sqlite3_column_int64(q, i), out);
    else if (type == SQLITE_FLOAT)
        add_number(sqlite3_column_double(q, i), out);
    else if (type == SQLITE_TEXT)
        add_text('t', sqlite3_column_text(q, i), (size_t)sqlite3_column_bytes(q, i), out);
    else if (type == SQLITE_BLOB)
        add_text('b', sqlite3_column_blob(q, i), (size_t)sqlite3_column_bytes(q, i), out);
    else
        buf_puts(out, "0");
    buf_puts(out, ";");
}

static void add_value(const json_t *v, struct buf *out) {
    if (json_is_integer(v))
        add_integer(json_integer_value(v), out);
    else if (json_is_real(v))
        add_number(json_real_value(v), out);
    else if (json_is_boolean(v))
        add_integer(json_is_true(v), out);
    else if (json_is_string(v))
        add_text('t', json_string_value(v), json_string_length(v), out);
    else
        buf_puts(out, "0");
    buf_puts(out, ";");
}

struct sql_rows {
    struct buf *v; /* [n] */
    size_t n, bytes;
};

static struct buf *rows_add(struct sql_rows *r) {
    if (r->n % 64 == 0) r->v = xrealloc(r->v, (r->n + 64) * sizeof *r->v);
    r->v[r->n] = (struct buf){0};
    buf_puts(&r->v[r->n], "");
    return &r->v[r->n++];
}

static void rows_release(struct sql_rows *r) {
    for (size_t i = 0; i < r->n; i++) buf_release(&r->v[i]);
    free(r->v);
}

static int row_compare(const void *a, const void *b) {
    const struct buf *x = a, *y = b;
    int order = memcmp(x->data, y->data, MIN(x->len, y->len));
    return order ? order : (x->len > y->len) - (x->len < y->len);
}

static bool rows_equal(struct sql_rows *a, struct sql_rows *b, bool ordered) {
    if (a->n != b->n) return false;
    if (!ordered && a->n) {
        qsort(a->v, a->n, sizeof *a->v, row_compare);
        qsort(b->v, b->n, sizeof *b->v, row_compare);
    }
    for (size_t i = 0; i < a->n; i++)
        if (row_compare(&a->v[i], &b->v[i]) != 0) return false;
    return true;
}

static void rows_from_json(const json_t *list, struct sql_rows *out) {
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *row = json_array_get(list, i);
        struct buf *b = rows_add(out);
        for (size_t k = 0; k < json_array_size(row); k++) add_value(json_array_get(row, k), b);
    }
}

/* queries */

/* Whether only white space and comments follow the first statement. */
static bool is_end(sqlite3 *db, const char *tail) {
    sqlite3_stmt *more = NULL;
    const char *rest = tail;
    int rc = SQLITE_OK;
    while (rc == SQLITE_OK && !more && *rest) {
        tail = rest;
        rc = sqlite3_prepare_v2(db, tail, -1, &more, &rest);
        if (rest == tail) break;
    }
    sqlite3_finalize(more);
    return rc == SQLITE_OK && !more;
}

/* Prepares the text, which must be one query; NULL: the case has failed. */
static sqlite3_stmt *query_prepare(struct check *c, struct check_case *k) {
    struct sql *s = c->state;
    struct code_block code = code_block_last(k->text);
    char *text = xstrndup(code.ptr, code.len);
    sqlite3_stmt *q = NULL;
    const char *tail = "";
    if (sqlite3_prepare_v2(s->db, text, -1, &q, &tail) != SQLITE_OK)
        case_fail(c, k, "%s", s->limit ? s->limit : sqlite3_errmsg(s->db));
    else if (!q)
        case_fail(c, k, "the text has no query");
    else if (!is_end(s->db, tail))
        case_fail(c, k, "the text has more than one statement");
    else if (!sqlite3_column_count(q) || !sqlite3_stmt_readonly(q) || sqlite3_stmt_isexplain(q))
        case_fail(c, k, "the statement is not a query");
    if (k->reason) {
        sqlite3_finalize(q);
        q = NULL;
    }
    free(text);
    return q;
}

/* Reads all rows; false: the case has failed. */
static bool query_read(struct check *c, struct check_case *k, sqlite3_stmt *q,
                       struct sql_rows *rows) {
    const struct sql *s = c->state;
    int rc;
    while ((rc = sqlite3_step(q)) == SQLITE_ROW) {
        struct buf *row = rows_add(rows);
        for (int i = 0; i < sqlite3_column_count(q); i++) add_column(q, i, row);
        rows->bytes += row->len;
        if (rows->n > MAX_ROWS || rows->bytes > MAX_ROW_BYTES) {
            case_fail(c, k, "the query has more than %d rows or %d MB", MAX_ROWS,
                      MAX_ROW_BYTES >> 20);
            return false;
        }
    }
    if (rc == SQLITE_DONE) return true;
    case_fail(c, k, "%s", s->limit ? s->limit : sqlite3_errmsg(s->db));
    return false;
}

static void rows_judge(struct check *c, struct check_case *k, struct sql_rows *rows) {
    const json_t *want = item_check_get(k->item, "rows");
    struct sql_rows wanted = {0};
    rows_from_json(want, &wanted);
    k->score = want ? rows_equal(rows, &wanted, json_is_true(item_check_get(k->item, "ordered")))
                    : rows->n > 0;
    if (k->score == 0) case_fail(c, k, want ? "the query has other rows" : "the query has no rows");
    rows_release(&wanted);
}

static int sql_run(struct check *c, struct check_case *k, struct error *err) {
    struct sql *s = c->state;
    struct sql_rows rows = {0};
    (void)err;
    s->calls = 0;
    s->limit = NULL;
    s->memory = sqlite3_memory_used();
    s->deadline = clock_now() + MAX_SECONDS;
    sqlite3_stmt *q = query_prepare(c, k);
    if (q && query_read(c, k, q, &rows)) rows_judge(c, k, &rows);
    sqlite3_finalize(q);
    rows_release(&rows);
    return OK;
}

static bool is_row(const json_t *row) {
    for (size_t i = 0; i < json_array_size(row); i++) {
        const json_t *v = json_array_get(row, i);
        if (json_is_array(v) || json_is_object(v)) return false;
    }
    return json_is_array(row);
}

static int sql_item(const struct check *c, const json_t *item, struct error *err) {
    const json_t *rows = item_check_get(item, "rows");
    bool good = !rows || json_is_array(rows);
    for (size_t i = 0; i < json_array_size(rows); i++)
        good = good && is_row(json_array_get(rows, i));
    if (!good || json_array_size(rows) > MAX_ROWS)
        return error_set(err, ERR_FORMAT,
                         "'check.rows' must be a list of at most %d rows, which are lists of "
                         "values, for %s sql",
                         MAX_ROWS, c->label);
    return OK;
}

/* opening */

/* Without a -wal file no process has the database open, and SQLite would have to create one:
 * `immutable` makes it read the database alone. */
static char *database_uri(const char *path) {
    struct buf uri = {0};
    char *wal = xasprintf("%s-wal", path);
    buf_puts(&uri, "file:");
    for (const char *p = path; *p; p++)
        if (strchr("%?#", *p))
            buf_printf(&uri, "%%%02X", (unsigned)(unsigned char)*p);
        else
            buf_add(&uri, p, 1);
    buf_puts(&uri, path_exists(wal) ? "?mode=ro" : "?immutable=1");
    free(wal);
    return uri.data;
}

/* Sets the limits, and reads the schema, which fails for a file that is not a database. */
static bool database_prepare(struct sql *s) {
    for (size_t i = 0; i < ARRAY_LEN(limits); i++)
        sqlite3_limit(s->db, limits[i].id, limits[i].value);
    sqlite3_db_config(s->db, SQLITE_DBCONFIG_DEFENSIVE, 1, NULL);
    sqlite3_db_config(s->db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, NULL);
    sqlite3_db_config(s->db, SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0, NULL);
    bool good = sqlite3_exec(s->db,
                             "PRAGMA temp_store = MEMORY; PRAGMA cell_size_check = ON;"
                             "PRAGMA query_only = ON; SELECT count(*) FROM sqlite_schema",
                             NULL, NULL, NULL) == SQLITE_OK;
    sqlite3_set_authorizer(s->db, authorize, s);
    sqlite3_progress_handler(s->db, STEP_INTERVAL, progress, s);
    return good;
}

static int sql_open(struct check *c, const char *argument, const struct check_options *o,
                    struct error *err) {
    struct sql *s = c->state = xcalloc(1, sizeof *s);
    (void)o;
    if (path_access_hook && path_access_hook(argument, PATH_USE_READ, err) != OK) return err->code;
    if (!path_exists(argument))
        return error_set(err, ERR_MISSING, "database '%s' does not exist", argument);
    char *uri = database_uri(argument);
    int flags = SQLITE_OPEN_READONLY | SQLITE_OPEN_URI;
    bool good = sqlite3_open_v2(uri, &s->db, flags, NULL) == SQLITE_OK && database_prepare(s);
    free(uri);
    return good ? OK
                : error_set(err, ERR_FORMAT, "cannot read database '%s': %s", argument,
                            sqlite3_errmsg(s->db));
}

static void sql_free(void *state) {
    struct sql *s = state;
    if (!s) return;
    sqlite3_close(s->db);
    free(s);
}

const struct check_kind sql_check = {.name = "sql",
                                     .usage = "sql:FILE",
                                     .argument = ARGUMENT_REQUIRED,
                                     .open = sql_open,
                                     .item = sql_item,
                                     .run_one = sql_run,
                                     .free = sql_free};
