/*
 * salvage: copies the readable rows of a damaged store to a new one.
 *
 * Every table is a search tree ordered by its key. A damaged page stops a scan; rows on its other
 * side are reached by a scan from the other end, and rows between two damaged pages by scans from a
 * hint: a key of an intact page, which is read from the file without the tree.
 *
 *     key:  lo ──ascending──> a  [ not read ]  d <──descending── hi
 *                                ↑ the middle hint h in (a, d): again with (a, h) and [h, d)
 *
 * A hint may be old or of another table with keys of the same types: it only says where to look.
 *
 * Invariants. 1. The keys of an ascending scan rise and those of a descending scan fall strictly
 * within its bounds; a row that breaks the order is damage, so that a scan ends even if damaged
 * pages point to each other. 2. No row is copied twice: a scan begins where no other scan has been.
 * 3. `from` is open read-only, and all rows are read in one transaction.
 *
 * SQLite's own program has a command for this, .recover, but Debian builds it without the part that
 * .recover needs (sqlite_dbpage), and .dump ends at the first damaged page.
 *
 * Not detected: changed bytes within a text that is not JSON, or within a blob. SQLite has no
 * checksums.
 */
#define _GNU_SOURCE
#include "store/internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KEY_PARTS = 2, HIGH_BYTES = 64 };

/* All tables of the schema. The columns of the key come first in the result of the scan. */
static const struct table {
    const char *name, *columns, *key[KEY_PARTS];
    bool is_text, is_blob; /* of the first part of the key; else it is an integer */
    const char *json[3];   /* columns that hold JSON */
} tables[] = {
    {"runs", "rowid, *", {"rowid"}, .json = {"recipe"}},
    {"events", "*", {"seq"}, .json = {"detail"}},
    {"calls", "*", {"key"}, .is_blob = true},
    {"said", "*", {"key"}, .is_blob = true},
    {"adapters", "*", {"seq"}, .json = {"lineage", "scores"}},
    {"results", "*", {"seq"}, .json = {"row"}},
    {"recorded", "rowid, *", {"rowid"}, .json = {"adapters", "inputs", "outputs"}},
    {"metrics", "*", {"run", "step"}, .is_text = true, .json = {"row"}},
    {"logs", "*", {"log", "seq"}, .is_text = true, .json = {"event"}},
    {"documents", "*", {"kind", "id"}, .is_text = true, .json = {"value"}},
};

/* A part of a key: an integer, or the bytes of a text or blob. */
struct part {
    int type; /* SQLITE_INTEGER, SQLITE_TEXT or SQLITE_BLOB */
    int64_t i;
    struct buf bytes;
};
/* A bound of a scan. If is_row, a row with this key has been copied already. */
struct key {
    struct part part[KEY_PARTS];
    bool is_row, is_end;
};

enum direction { ASCENDING, DESCENDING };
enum scan { SCAN_DONE, SCAN_DAMAGED, SCAN_FAILED };

struct copy {
    sqlite3 *from, *to;
    const char *to_path;
    const struct file_map *file; /* of `from`, for the hints */
    const struct table *table;
    int n_parts;
    sqlite3_stmt *scan[2], *insert; /* scan: by direction */
    int64_t rows, rejected;
    json_t *gaps;
    struct key *hints, gap_end; /* gap_end: of the last gap */
    size_t n_hints;
    char *error; /* the first one; NULL: none */
};

static void key_release(struct key *k) {
    for (int p = 0; p < KEY_PARTS; p++) buf_release(&k->part[p].bytes);
}

static void part_set(struct part *to, int type, int64_t i, const void *bytes, size_t len) {
    to->type = type;
    to->i = i;
    to->bytes.len = 0;
    if (type != SQLITE_INTEGER) buf_add(&to->bytes, bytes, len);
}

static void part_copy(struct part *to, const struct part *from) {
    part_set(to, from->type, from->i, from->bytes.data, from->bytes.len);
}

static void key_copy(struct key *to, const struct key *from) {
    for (int p = 0; p < KEY_PARTS; p++) part_copy(&to->part[p], &from->part[p]);
    to->is_row = from->is_row;
    to->is_end = from->is_end;
}

/* In SQLite's order: integers by value, texts and blobs by their bytes. */
static int part_compare(const struct part *a, const struct part *b) {
    if (a->type != b->type) return a->type - b->type;
    if (a->type == SQLITE_INTEGER) return (a->i > b->i) - (a->i < b->i);
    size_t n = MIN(a->bytes.len, b->bytes.len);
    int order = n ? memcmp(a->bytes.data, b->bytes.data, n) : 0;
    return order ? order : (a->bytes.len > b->bytes.len) - (a->bytes.len < b->bytes.len);
}

static int key_compare(const struct key *a, const struct key *b, int n_parts) {
    int order = 0;
    for (int p = 0; p < n_parts && order == 0; p++) order = part_compare(&a->part[p], &b->part[p]);
    return order;
}

/* The type that a part has in every valid row. */
static int part_type(const struct table *t, int p) {
    if (p == 0) return t->is_text ? SQLITE_TEXT : t->is_blob ? SQLITE_BLOB : SQLITE_INTEGER;
    return strcmp(t->key[p], "id") == 0 ? SQLITE_TEXT : SQLITE_INTEGER;
}

/* A key below all keys of the table, or above all. */
static void key_set_end(const struct copy *c, struct key *k, bool above) {
    char high[HIGH_BYTES];
    memset(high, 0xff, sizeof high);
    for (int p = 0; p < c->n_parts; p++)
        part_set(&k->part[p], part_type(c->table, p), above ? INT64_MAX : INT64_MIN, high,
                 above ? sizeof high : 0);
    k->is_row = false;
    k->is_end = true;
}

/* Reads the key of the current row. Returns false if its types are impossible. */
static bool key_read(const struct copy *c, sqlite3_stmt *q, struct key *k) {
    for (int p = 0; p < c->n_parts; p++) {
        int type = sqlite3_column_type(q, p);
        if (type != part_type(c->table, p)) return false;
        const void *bytes = type == SQLITE_INTEGER ? NULL : sqlite3_column_blob(q, p);
        part_set(&k->part[p], type, sqlite3_column_int64(q, p), bytes,
                 (size_t)sqlite3_column_bytes(q, p));
    }
    k->is_row = true;
    k->is_end = false;
    return true;
}

static void key_bind(const struct copy *c, sqlite3_stmt *q, int at, const struct key *k) {
    for (int p = 0; p < c->n_parts; p++) {
        const struct part *v = &k->part[p];
        const char *bytes = v->bytes.data ? v->bytes.data : "";
        if (v->type == SQLITE_INTEGER)
            sqlite3_bind_int64(q, at + p, v->i);
        else if (v->type == SQLITE_TEXT)
            sqlite3_bind_text(q, at + p, bytes, (int)v->bytes.len, SQLITE_TRANSIENT);
        else
            sqlite3_bind_blob(q, at + p, bytes, (int)v->bytes.len, SQLITE_TRANSIENT);
    }
}

/* The bound as JSON; a blob, or a text that is not UTF-8, in hexadecimal digits. */
static json_t *key_json(const struct copy *c, const struct key *k) {
    if (k->is_end) return json_null();
    json_t *list = json_array();
    for (int p = 0; p < c->n_parts; p++) {
        const struct part *v = &k->part[p];
        const char *bytes = v->bytes.data ? v->bytes.data : "";
        json_t *text =
            v->type == SQLITE_INTEGER ? json_integer(v->i) : json_stringn(bytes, v->bytes.len);
        if (!text) {
            struct buf hex = {0};
            for (size_t i = 0; i < v->bytes.len; i++) buf_printf(&hex, "%02x", (uint8_t)bytes[i]);
            text = json_string(hex.data);
            buf_release(&hex);
        }
        json_array_append_new(list, text);
    }
    return list;
}

/* Reads a varint of SQLite's file format from [*p, end); false at the end. */
static bool varint_read(const uint8_t **p, const uint8_t *end, uint64_t *v) {
    *v = 0;
    for (int i = 0; i < 9 && *p < end; i++) {
        uint8_t byte = *(*p)++;
        *v = i == 8 ? *v << 8 | byte : *v << 7 | (byte & 0x7f);
        if (i == 8 || byte < 0x80) return true;
    }
    return false;
}

/* Reads a value of a record; `serial` is its type in the file format. *body advances. */
static bool value_read(uint64_t serial, const uint8_t **body, const uint8_t *end, struct part *v) {
    static const uint8_t sizes[] = {0, 1, 2, 3, 4, 6, 8, 0, 0, 0};
    uint64_t size = serial >= 12 ? (serial - 12) / 2 : serial < 10 ? sizes[serial] : UINT64_MAX;
    if (size > (uint64_t)(end - *body) || serial == 0 || serial == 7) return false;
    const uint8_t *p = *body;
    *body += size;
    if (serial >= 12) {
        part_set(v, serial % 2 ? SQLITE_TEXT : SQLITE_BLOB, 0, p, size);
        return true;
    }
    uint64_t i = serial == 9;
    if (size) i = p[0] & 0x80 ? UINT64_MAX : 0;
    for (; size; size--) i = i << 8 | *p++;
    part_set(v, SQLITE_INTEGER, (int64_t)i, NULL, 0);
    return true;
}

/* Reads the key of the first cell of a page, as the file format of SQLite defines it
 * (https://www.sqlite.org/fileformat.html). Returns false if there is none of the table's types. */
static bool page_key(const struct copy *c, const uint8_t *page, size_t size, struct key *k) {
    enum { INDEX_INTERIOR = 2, INDEX_LEAF = 10, TABLE_LEAF = 13 };
    const uint8_t *end = page + size, *head = page + (page[0] == INDEX_INTERIOR ? 12 : 8);
    size_t at = (size_t)(head[0] << 8 | head[1]);
    uint64_t payload, v, serial;
    bool by_rowid = !c->table->is_text && !c->table->is_blob;
    if (page[0] != (by_rowid ? TABLE_LEAF : INDEX_LEAF) && (by_rowid || page[0] != INDEX_INTERIOR))
        return false;
    const uint8_t *p = page + MIN(at + (page[0] == INDEX_INTERIOR ? 4 : 0), size);
    if (!varint_read(&p, end, &payload)) return false;
    if (by_rowid) {
        if (!varint_read(&p, end, &v)) return false;
        part_set(&k->part[0], SQLITE_INTEGER, (int64_t)v, NULL, 0);
        return true;
    }
    const uint8_t *record = p;
    if (!varint_read(&p, end, &v) || v > (uint64_t)(end - record)) return false;
    const uint8_t *body = record + v;
    for (int i = 0; i < c->n_parts; i++)
        if (!varint_read(&p, end, &serial) || !value_read(serial, &body, end, &k->part[i]) ||
            k->part[i].type != part_type(c->table, i))
            return false;
    return true;
}

static int hint_compare(const void *a, const void *b) {
    return key_compare(a, b, KEY_PARTS);
}

/* Fills c->hints: one key of every page that may belong to the table, sorted. After them is one
 * more element, which may own memory. */
static void hints_read(struct copy *c) {
    const uint8_t *file = c->file->data;
    size_t size = c->file->size < 100 ? 0 : (size_t)(file[16] << 8 | file[17]);
    if (size == 1) size = 65536;
    if (size < 512) return;
    c->hints = xcalloc(c->file->size / size + 1, sizeof *c->hints);
    for (size_t at = size; at + size <= c->file->size; at += size) {
        struct key *k = &c->hints[c->n_hints];
        if (page_key(c, file + at, size, k)) c->n_hints++;
    }
    qsort(c->hints, c->n_hints, sizeof *c->hints, hint_compare);
}

/* The number of hints that are below a key, or equal to it if `or_equal`. */
static size_t hints_below(const struct copy *c, const struct key *k, bool or_equal) {
    size_t from = 0, to = c->n_hints;
    while (from < to) {
        size_t i = (from + to) / 2;
        int order = key_compare(&c->hints[i], k, c->n_parts);
        if (order < 0 || (or_equal && order == 0))
            from = i + 1;
        else
            to = i;
    }
    return from;
}

/* The middle one of the hints between two keys; NULL: there is none. */
static const struct key *key_middle(struct copy *c, const struct key *lo, const struct key *hi) {
    if (!c->hints) hints_read(c);
    size_t from = hints_below(c, lo, true), to = hints_below(c, hi, false);
    return from < to ? &c->hints[(from + to) / 2] : NULL;
}

/* Adds the gap (lo, hi), or extends the last gap if no row has been read between the two. */
static void gap_add(struct copy *c, const struct key *lo, const struct key *hi) {
    size_t n = json_array_size(c->gaps);
    if (n && !lo->is_row && key_compare(lo, &c->gap_end, c->n_parts) == 0)
        json_object_set_new(json_array_get(c->gaps, n - 1), "before", key_json(c, hi));
    else
        json_array_append_new(
            c->gaps, json_pack("{s:o,s:o}", "after", key_json(c, lo), "before", key_json(c, hi)));
    key_copy(&c->gap_end, hi);
}

static void error_note(struct copy *c, const char *text) {
    if (!c->error) c->error = xstrdup(text);
}

/* Whether the columns with JSON are valid: a damaged overflow page shows there only. */
static bool row_is_valid(const struct copy *c, sqlite3_stmt *q) {
    for (int i = 0; i < sqlite3_column_count(q); i++) {
        const char *name = sqlite3_column_name(q, i), *text;
        for (size_t k = 0; k < ARRAY_LEN(c->table->json) && c->table->json[k]; k++) {
            if (strcmp(name, c->table->json[k]) != 0 ||
                !(text = (const char *)sqlite3_column_text(q, i)))
                continue;
            json_t *v = json_loadb(text, (size_t)sqlite3_column_bytes(q, i), JSON_DECODE_ANY, NULL);
            if (!v) return false;
            json_decref(v);
        }
    }
    return true;
}

/* Copies the current row, or counts it as rejected. Only a failure to write is an error. */
static int row_copy(struct copy *c, sqlite3_stmt *q, struct error *err) {
    if (!row_is_valid(c, q)) {
        error_note(c, "a value is not valid JSON");
        c->rejected++;
        return OK;
    }
    for (int i = 0; i < sqlite3_column_count(q); i++)
        sqlite3_bind_value(c->insert, i + 1, sqlite3_column_value(q, i));
    int rc = sqlite3_step(c->insert);
    if (rc == SQLITE_DONE)
        c->rows++;
    else if (rc == SQLITE_CONSTRAINT) {
        error_note(c, sqlite3_errmsg(c->to));
        c->rejected++;
    } else
        return error_set(err, ERR_IO, "cannot write '%s': %s", c->to_path, sqlite3_errmsg(c->to));
    sqlite3_reset(c->insert);
    return OK;
}

/* Copies rows from lo upwards or from hi downwards until the other bound or the first damage. The
 * bound where it begins becomes the key of the last row that was read. */
static enum scan scan_copy(struct copy *c, enum direction way, struct key *lo, struct key *hi,
                           struct error *err) {
    sqlite3_stmt *q = c->scan[way];
    struct key key = {0}, *last = way == ASCENDING ? lo : hi;
    enum scan result = SCAN_DONE;
    int rc = SQLITE_DONE;
    key_bind(c, q, 1, lo);
    key_bind(c, q, 1 + c->n_parts, hi);
    while (result == SCAN_DONE && (rc = sqlite3_step(q)) == SQLITE_ROW) {
        if (!key_read(c, q, &key)) {
            error_note(c, "a key has a wrong type");
            result = SCAN_DAMAGED;
            break;
        }
        int above = key_compare(&key, lo, c->n_parts), below = key_compare(hi, &key, c->n_parts);
        if (above == 0 && lo->is_row) continue; /* a lower bound that was read before */
        if (above < 0 || below <= 0) {
            error_note(c, "keys are not in order");
            result = SCAN_DAMAGED;
        } else if (row_copy(c, q, err) != OK)
            result = SCAN_FAILED;
        else
            key_copy(last, &key);
    }
    if (result == SCAN_DONE && rc != SQLITE_DONE) {
        error_note(c, sqlite3_errmsg(c->from));
        result = SCAN_DAMAGED;
    }
    sqlite3_reset(q);
    key_release(&key);
    return result;
}

/* Copies the rows of the keys [from, to), without `from` if that row has been copied. */
static int range_copy(struct copy *c, const struct key *from, const struct key *to,
                      struct error *err) {
    struct key lo = {0}, hi = {0};
    const struct key *mid = NULL;
    int rc = OK;
    key_copy(&lo, from);
    key_copy(&hi, to);
    enum scan result = scan_copy(c, ASCENDING, &lo, &hi, err);
    if (result == SCAN_DAMAGED) result = scan_copy(c, DESCENDING, &lo, &hi, err);
    if (result == SCAN_FAILED)
        rc = err->code;
    else if (result == SCAN_DAMAGED && (mid = key_middle(c, &lo, &hi))) {
        rc = range_copy(c, &lo, mid, err);
        if (rc == OK) rc = range_copy(c, mid, &hi, err);
    } else if (result == SCAN_DAMAGED)
        gap_add(c, &lo, &hi);
    key_release(&lo);
    key_release(&hi);
    return rc;
}

/* Prepares the scan of a table in one direction; returns SQLite's code. */
static int scan_prepare(struct copy *c, enum direction way) {
    const struct table *t = c->table;
    const char *down = way == ASCENDING ? "" : " DESC";
    char *sql = c->n_parts == 1
                    ? xasprintf("SELECT %s FROM %s WHERE %s >= ?1 AND %s < ?2"
                                " ORDER BY %s%s",
                                t->columns, t->name, t->key[0], t->key[0], t->key[0], down)
                    : xasprintf("SELECT %s FROM %s WHERE (%s, %s) >= (?1, ?2)"
                                " AND (%s, %s) < (?3, ?4) ORDER BY %s%s, %s%s",
                                t->columns, t->name, t->key[0], t->key[1], t->key[0], t->key[1],
                                t->key[0], down, t->key[1], down);
    int rc = sqlite3_prepare_v2(c->from, sql, -1, &c->scan[way], NULL);
    free(sql);
    return rc;
}

/* Prepares the insertion of the columns that the scan returns. */
static int insert_prepare(struct copy *c, struct error *err) {
    struct buf sql = {0}, values = {0};
    int n = sqlite3_column_count(c->scan[0]);
    buf_printf(&sql, "INSERT INTO %s(", c->table->name);
    for (int i = 0; i < n; i++) {
        buf_printf(&sql, "%s\"%s\"", i ? ", " : "", sqlite3_column_name(c->scan[0], i));
        buf_puts(&values, i ? ", ?" : "?");
    }
    buf_printf(&sql, ") VALUES(%s)", values.data);
    int rc = OK;
    if (sqlite3_prepare_v2(c->to, sql.data, -1, &c->insert, NULL) != SQLITE_OK)
        rc = error_set(err, ERR_IO, "cannot write '%s': %s", c->to_path, sqlite3_errmsg(c->to));
    buf_release(&sql);
    buf_release(&values);
    return rc;
}

/* Copies a table and adds its entry to `list`. A store of an earlier version may lack the table. */
static int table_copy(struct copy *c, bool may_lack, json_t *list, struct error *err) {
    struct key lo = {0}, hi = {0};
    int rc = OK;
    c->n_parts = c->table->key[1] ? 2 : 1;
    c->gaps = json_array();
    int sql_rc = scan_prepare(c, ASCENDING);
    if (sql_rc == SQLITE_OK) sql_rc = scan_prepare(c, DESCENDING);
    key_set_end(c, &lo, false);
    key_set_end(c, &hi, true);
    if (sql_rc == SQLITE_OK) {
        rc = insert_prepare(c, err);
        if (rc == OK) rc = range_copy(c, &lo, &hi, err);
    } else if (sql_rc != SQLITE_ERROR || !may_lack) {
        error_note(c, sqlite3_errmsg(c->from));
        gap_add(c, &lo, &hi);
    }
    json_array_append_new(list, json_pack("{s:s,s:I,s:I,s:O,s:s?}", "table", c->table->name, "rows",
                                          (json_int_t)c->rows, "rejected", (json_int_t)c->rejected,
                                          "gaps", c->gaps, "error", c->error));
    for (int way = 0; way < 2; way++) sqlite3_finalize(c->scan[way]);
    sqlite3_finalize(c->insert);
    json_decref(c->gaps);
    for (size_t i = 0; c->hints && i <= c->n_hints; i++) key_release(&c->hints[i]);
    free(c->hints);
    key_release(&c->gap_end);
    key_release(&lo);
    key_release(&hi);
    free(c->error);
    return rc;
}

static int version_read(sqlite3 *db) {
    sqlite3_stmt *q = NULL;
    int version = STORE_SCHEMA_VERSION;
    if (sqlite3_prepare_v2(db, "PRAGMA user_version", -1, &q, NULL) == SQLITE_OK &&
        sqlite3_step(q) == SQLITE_ROW)
        version = sqlite3_column_int(q, 0);
    sqlite3_finalize(q);
    return version;
}

/* Copies all tables in one transaction of each file; NULL sets err. */
static json_t *tables_copy(struct store *from, const struct file_map *file, struct store *to,
                           const char *to_path, struct error *err) {
    sqlite3 *source = store_connection(from);
    json_t *list = json_array();
    int64_t rows = 0, damaged = 0;
    /* tolerate a damaged schema, and verify pages more strictly */
    sqlite3_exec(source, "PRAGMA writable_schema = ON; PRAGMA cell_size_check = ON; BEGIN", NULL,
                 NULL, NULL);
    bool may_lack = version_read(source) < STORE_SCHEMA_VERSION;
    int rc = store_begin(to, err);
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(tables); i++) {
        struct copy c = {.from = source, store_connection(to), to_path, file, &tables[i]};
        rc = table_copy(&c, may_lack, list, err);
        rows += c.rows;
        damaged += !json_is_null(json_object_get(json_array_get(list, i), "error"));
    }
    if (rc == OK) rc = store_commit(to, err);
    if (rc == OK)
        return json_pack("{s:I,s:I,s:o}", "rows", (json_int_t)rows, "damaged", (json_int_t)damaged,
                         "tables", list);
    json_decref(list);
    return NULL;
}

static bool report_is_empty(const json_t *v) {
    return json_integer_value(json_object_get(v, "rows")) == 0 &&
           json_integer_value(json_object_get(v, "damaged")) > 0;
}

int store_salvage(const char *from, const char *to, json_t **report, struct error *err) {
    *report = NULL;
    if (!path_exists(from)) return error_set(err, ERR_MISSING, "no store '%s'", from);
    if (path_exists(to))
        return error_set(err, ERR_USAGE, "'%s' exists; the copy needs a new name", to);
    struct store *source = NULL, *dest = NULL;
    struct file_map file;
    json_t *v = NULL;
    if (file_map_open(&file, from, err) == OK && (source = store_open_read_only(from, err)) &&
        (dest = store_open(to, err)))
        v = tables_copy(source, &file, dest, to, err);
    bool created = dest != NULL;
    store_close(source);
    store_close(dest);
    file_map_close(&file);
    if (v && report_is_empty(v)) {
        error_set(err, ERR_FORMAT, "no row of '%s' can be read: only a backup has its contents",
                  from);
        json_decref(v);
        v = NULL;
    }
    if (!v) {
        if (created) unlink(to);
        return err->code;
    }
    json_object_set_new(v, "from", json_string(from));
    json_object_set_new(v, "to", json_string(to));
    *report = v;
    return OK;
}
