/*
 * files: the kinds of training files, by the ends of their names: tables (.csv, .tsv), texts
 * (.txt), and JSON (everything else). Parquet is refused with the conversion.
 */
#define _GNU_SOURCE
#include "data/internal.h"

#include <stdlib.h>
#include <string.h>

/* tables */

/* An empty cell is a missing value. */
static json_t *cell_value(json_t *text) {
    if (json_string_length(text) > 0) return text;
    json_decref(text);
    return NULL;
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
    if (path_has_extension(path, ".csv"))
        return csv_objects_each(path, ',', cell_value, fn, ctx, err);
    if (path_has_extension(path, ".tsv"))
        return csv_objects_each(path, '\t', cell_value, fn, ctx, err);
    if (path_has_extension(path, ".txt")) return text_each(path, fn, ctx, err);
    int rc = json_file_each(path, fn, ctx, err);
    if (rc == OK || !is_parquet(path)) return rc;
    return error_set(err, ERR_FORMAT,
                     "'%s' is a Parquet file: convert it to JSON Lines first (docs/DATA.md)", path);
}
