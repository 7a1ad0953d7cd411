/* csv: rows of tables as text (RFC 4180), with commas or tabs between the cells. */
#include "base/base.h"

#include <string.h>

struct csv {
    const char *path, *p, *end; /* p: the next byte */
    char separator;
    int line; /* line of p, from 1 */
    struct buf cells[CSV_MAX_CELLS];
    int n; /* cells of the current row */
};

static bool ends_cell(const struct csv *c) {
    return *c->p == c->separator || *c->p == '\n' || *c->p == '\r';
}

/* Reads one cell. A cell in quotes may contain separators, line ends and doubled quotes. */
static int cell_read(struct csv *c, struct error *err) {
    if (c->n == CSV_MAX_CELLS)
        return error_set(err, ERR_FORMAT, "'%s', line %d: more than %d cells", c->path, c->line,
                         CSV_MAX_CELLS);
    struct buf *b = &c->cells[c->n++];
    bool quoted = c->p < c->end && *c->p == '"';
    int begin = c->line;
    b->len = 0;
    buf_puts(b, "");
    for (c->p += quoted; c->p < c->end; c->p++) {
        if (quoted && *c->p == '"') {
            if (c->p + 1 >= c->end || c->p[1] != '"') break;
            c->p++;
        } else if (!quoted && ends_cell(c)) {
            return OK;
        }
        c->line += *c->p == '\n';
        buf_add(b, c->p, 1);
    }
    if (!quoted) return OK;
    if (c->p == c->end)
        return error_set(err, ERR_FORMAT, "'%s', line %d: a quote is not closed", c->path, begin);
    c->p++;
    if (c->p < c->end && !ends_cell(c))
        return error_set(err, ERR_FORMAT, "'%s', line %d: text after a closing quote", c->path,
                         c->line);
    return OK;
}

static int row_read(struct csv *c, struct error *err) {
    c->n = 0;
    for (;;) {
        if (cell_read(c, err) != OK) return err->code;
        if (c->p < c->end && *c->p == '\r') c->p++;
        if (c->p == c->end || *c->p == '\n') break;
        if (*c->p++ != c->separator)
            return error_set(err, ERR_FORMAT, "'%s', line %d: a stray carriage return", c->path,
                             c->line);
    }
    c->p += c->p < c->end;
    return OK;
}

int csv_rows_each(const char *path, char separator, csv_row_fn fn, void *ctx, struct error *err) {
    struct buf text = {0};
    struct csv c = {.path = path, .separator = separator, .line = 1};
    int rc = file_read(path, (size_t)1 << 30, &text, err);
    c.p = text.data;
    c.end = text.data ? text.data + text.len : NULL;
    if (rc == OK && text.len >= 3 && memcmp(text.data, "\xEF\xBB\xBF", 3) == 0) c.p += 3;
    while (rc == OK && c.p < c.end) {
        int line = c.line;
        rc = row_read(&c, err);
        c.line++;
        if (rc == OK && (c.n > 1 || c.cells[0].len > 0)) rc = fn(ctx, c.cells, c.n, line, err);
    }
    for (int i = 0; i < CSV_MAX_CELLS; i++) buf_release(&c.cells[i]);
    buf_release(&text);
    return rc;
}

/* objects */

struct table_walk {
    const char *path;
    csv_value_fn value;
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

static int object_visit(void *ctx, const struct buf *cells, int n, int line, struct error *err) {
    struct table_walk *t = ctx;
    if (t->keys.n == 0) return keys_read(t, cells, n, err);
    if (n != t->keys.n)
        return error_set(err, ERR_FORMAT, "'%s' line %d: %d cells, but the first row names %d",
                         t->path, line, n, t->keys.n);
    json_t *v = json_object();
    int rc = OK;
    for (int i = 0; rc == OK && i < n; i++) {
        json_t *text = json_stringn(cells[i].data, cells[i].len),
               *value = text ? t->value(text) : NULL;
        if (!text || (value && json_object_set_new(v, t->keys.v[i], value) != 0))
            rc = error_set(err, ERR_FORMAT, "'%s' line %d: not UTF-8", t->path, line);
    }
    if (rc == OK) rc = t->fn(t->ctx, v, line, err);
    json_decref(v);
    return rc;
}

int csv_objects_each(const char *path, char separator, csv_value_fn value, json_file_each_fn fn,
                     void *ctx, struct error *err) {
    struct table_walk t = {.path = path, .value = value, .fn = fn, .ctx = ctx};
    int rc = csv_rows_each(path, separator, object_visit, &t, err);
    strings_release(&t.keys);
    return rc;
}
