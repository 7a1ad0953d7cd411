/*
 * files: the kinds of training files, by the ends of their names: tables (.csv, .tsv), texts
 * (.txt), and JSON (everything else). Parquet is refused with the conversion.
 */
#define _GNU_SOURCE
#include "data/internal.h"

#include <stdlib.h>
#include <string.h>

/* tables */

struct table_walk {
    const char *path;
    json_file_each_fn fn;
    void *ctx;
    struct strings keys; /* the cells of the first row */
};

/* The keys of the first row; each names one column. */
static int keys_read(struct table_walk *t, const struct buf *cells, int n, struct error *err) {
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < i; k++)
            if (*cells[i].data && strcmp(cells[i].data, t->keys.v[k]) == 0)
                return error_set(err, ERR_FORMAT, "'%s': two columns are named '%s'", t->path,
                                 cells[i].data);
        strings_add(&t->keys, cells[i].data);
    }
    return OK;
}

/* An empty cell is a missing value. */
static int row_visit(void *ctx, const struct buf *cells, int n, int line, struct error *err) {
    struct table_walk *t = ctx;
    if (t->keys.n == 0) return keys_read(t, cells, n, err);
    if (n != t->keys.n)
        return error_set(err, ERR_FORMAT, "'%s' line %d: %d cells, but the first row names %d",
                         t->path, line, n, t->keys.n);
    json_t *v = json_object();
    int rc = OK;
    for (int i = 0; rc == OK && i < n; i++) {
        if (cells[i].len == 0) continue;
        json_t *text = json_stringn(cells[i].data, cells[i].len);
        if (!text || json_object_set_new(v, t->keys.v[i], text) != 0)
            rc = error_set(err, ERR_FORMAT, "'%s' line %d: not UTF-8", t->path, line);
    }
    if (rc == OK) rc = t->fn(t->ctx, v, line, err);
    json_decref(v);
    return rc;
}

static int table_each(const char *path, char separator, json_file_each_fn fn, void *ctx,
                      struct error *err) {
    struct table_walk t = {.path = path, .fn = fn, .ctx = ctx};
    int rc = csv_rows_each(path, separator, row_visit, &t, err);
    strings_release(&t.keys);
    return rc;
}

/* texts */

static int paragraph_visit(const char *path, const char *p, size_t n, int line,
                           json_file_each_fn fn, void *ctx, struct error *err) {
    json_t *text = json_stringn(p, n), *v = text ? json_pack("{s:o}", "text", text) : NULL;
    int rc = v ? fn(ctx, v, line, err)
               : error_set(err, ERR_FORMAT, "'%s' line %d: not UTF-8", path, line);
    json_decref(v);
    return rc;
}

static bool is_blank(const char *p, const char *end) {
    while (p < end && strchr(" \t\r\n", *p)) p++;
    return p == end;
}

/* Paragraphs are separated by empty lines. */
static int text_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err) {
    struct buf text = {0};
    int rc = file_read(path, (size_t)1 << 30, &text, err), line = 1, begin_line = 1;
    const char *p = text.data, *end = p ? p + text.len : p, *begin = p;
    for (; rc == OK && p < end; line++) {
        const char *newline = memchr(p, '\n', (size_t)(end - p)),
                   *next = newline ? newline + 1 : end;
        bool separates = is_blank(p, next);
        if (separates && p > begin)
            rc = paragraph_visit(path, begin, (size_t)(p - begin), begin_line, fn, ctx, err);
        if (separates) begin = next;
        if (separates) begin_line = line + 1;
        p = next;
    }
    if (rc == OK && begin < end)
        rc = paragraph_visit(path, begin, (size_t)(end - begin), begin_line, fn, ctx, err);
    buf_release(&text);
    return rc;
}

static bool is_parquet(const char *path) {
    char magic[4];
    return file_read_head(path, magic, sizeof magic) == sizeof magic &&
           memcmp(magic, "PAR1", sizeof magic) == 0;
}

int sample_file_each(const char *path, json_file_each_fn fn, void *ctx, struct error *err) {
    if (path_has_extension(path, ".csv")) return table_each(path, ',', fn, ctx, err);
    if (path_has_extension(path, ".tsv")) return table_each(path, '\t', fn, ctx, err);
    if (path_has_extension(path, ".txt")) return text_each(path, fn, ctx, err);
    int rc = json_file_each(path, fn, ctx, err);
    if (rc == OK || !is_parquet(path)) return rc;
    return error_set(err, ERR_FORMAT,
                     "'%s' is a Parquet file: convert it to JSON Lines first (docs/DATA.md)", path);
}
