/*
 * yaml: a recipe file as jansson values, with the line of every key.
 *
 * libyaml splits the file into events; this file builds the values. It reads one document of the
 * YAML 1.2 core schema: plain null, true, false, integers and floats are typed; everything else and
 * everything quoted is a string (so 'yes' and 'on' are strings). Anchors, aliases (and so merges of
 * a mapping by '<<: *name') and tags are refused: a recipe should show each value at the place
 * where it is used, and expanding aliases can turn a small file into a large one. The exception is
 * the tag '!function' of yaml_load_functions.
 *
 * Invariant: yaml_reader.path is the dotted key path of the node that is being read; between two
 * children it is the path of their parent.
 */
#include "base/base.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

static const size_t YAML_FILE_LIMIT = (size_t)16 << 20;

/* A value with its line takes some 250 bytes. The whole path of each value is stored with its line,
 * so without YAML_PATHS_LIMIT a long key above many short values would take many times the
 * document's size. */
enum { YAML_DEPTH_LIMIT = 64, YAML_VALUES_LIMIT = 1 << 20, YAML_PATHS_LIMIT = 64 << 20 };

struct yaml_reader {
    yaml_parser_t parser;
    const char *file;
    bool functions; /* '!function TEXT' is accepted */
    json_t *lines;
    struct buf path;
    int depth;
    size_t values, path_bytes; /* totals over all lines so far */
    struct error *err;
};

static int mark_line(yaml_mark_t mark) {
    return (int)MIN(mark.line + 1, (size_t)INT32_MAX);
}

static bool is_one_of(const char *s, const char *const *words) {
    for (; *words; words++)
        if (strcmp(s, *words) == 0) return true;
    return false;
}

/* Whether `s` is [-+]? [0-9]+ | 0o [0-7]+ | 0x [0-9a-fA-F]+; sets *base to 10, 8 or 16. */
static bool is_integer(const char *s, int *base) {
    *base = 10;
    const char *digits = "0123456789";
    if (s[0] == '0' && (s[1] == 'o' || s[1] == 'x')) {
        *base = s[1] == 'o' ? 8 : 16;
        digits = s[1] == 'o' ? "01234567" : "0123456789abcdefABCDEF";
        s += 2;
    } else if (*s == '-' || *s == '+') {
        s++;
    }
    size_t n = strspn(s, digits);
    return n > 0 && s[n] == '\0';
}

/* Whether `s` is [-+]? ( \.[0-9]+ | [0-9]+ (\.[0-9]*)? ) ([eE] [-+]? [0-9]+)? */
static bool is_float(const char *s) {
    if (*s == '-' || *s == '+') s++;
    size_t n_integer = strspn(s, "0123456789"), n_fraction = 0;
    s += n_integer;
    if (*s == '.') n_fraction = strspn(++s, "0123456789"), s += n_fraction;
    if (n_integer + n_fraction == 0) return false;
    if (*s == 'e' || *s == 'E') {
        s++;
        if (*s == '-' || *s == '+') s++;
        size_t n = strspn(s, "0123456789");
        if (n == 0) return false;
        s += n;
    }
    return *s == '\0';
}

static json_t *scalar_error(struct yaml_reader *r, int line, const char *text, const char *why) {
    error_set(r->err, ERR_FORMAT, "'%s', line %d: '%s' %s", r->file, line, text, why);
    return NULL;
}

static json_t *plain_value(struct yaml_reader *r, const char *s, int line) {
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL", NULL};
    static const char *const trues[] = {"true", "True", "TRUE", NULL};
    static const char *const falses[] = {"false", "False", "FALSE", NULL};
    static const char *const not_finite[] = {".inf",  ".Inf",  ".INF",  "+.inf", "+.Inf",
                                             "+.INF", "-.inf", "-.Inf", "-.INF", ".nan",
                                             ".NaN",  ".NAN",  NULL};
    int base;
    if (is_one_of(s, nulls)) return json_null();
    if (is_one_of(s, trues)) return json_true();
    if (is_one_of(s, falses)) return json_false();
    if (is_one_of(s, not_finite)) return scalar_error(r, line, s, "is not a finite number");
    if (is_integer(s, &base)) {
        errno = 0;
        long long v = strtoll(base == 10 ? s : s + 2, NULL, base);
        return errno ? scalar_error(r, line, s, "does not fit a 64-bit integer") : json_integer(v);
    }
    if (is_float(s)) {
        double v = strtod(s, NULL);
        return isfinite(v) ? json_real(v) : scalar_error(r, line, s, "is too large for a number");
    }
    return json_string(s);
}

static json_t *scalar_value(struct yaml_reader *r, const yaml_event_t *e) {
    const char *text = (const char *)e->data.scalar.value;
    if (strlen(text) != e->data.scalar.length)
        return scalar_error(r, mark_line(e->start_mark), text, "holds a NUL character");
    if (e->data.scalar.tag) return json_pack("{s:s}", YAML_FUNCTION, text);
    if (e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE)
        return plain_value(r, text, mark_line(e->start_mark));
    return json_string(text);
}

/* libyaml's message, with its position. */
static int parser_error(struct yaml_reader *r) {
    const yaml_parser_t *p = &r->parser;
    if (p->error == YAML_READER_ERROR)
        return error_set(r->err, ERR_FORMAT, "'%s', byte %zu: %s", r->file, p->problem_offset,
                         p->problem);
    return error_set(r->err, ERR_FORMAT, "'%s', line %d, column %zu: %s%s%s", r->file,
                     mark_line(p->problem_mark), p->problem_mark.column + 1,
                     p->problem ? p->problem : "not YAML", p->context ? " " : "",
                     p->context ? p->context : "");
}

static int yaml_error(struct yaml_reader *r, const yaml_event_t *e, const char *what) {
    return error_set(r->err, ERR_FORMAT, "'%s', line %d: %s", r->file, mark_line(e->start_mark),
                     what);
}

/* Gets the next event, which the caller deletes on OK; refuses events that recipes may not
 * contain. */
static int event_next(struct yaml_reader *r, yaml_event_t *e) {
    if (!yaml_parser_parse(&r->parser, e)) return parser_error(r);
    const yaml_char_t *anchor = NULL, *tag = NULL;
    if (e->type == YAML_SCALAR_EVENT) {
        anchor = e->data.scalar.anchor, tag = e->data.scalar.tag;
    } else if (e->type == YAML_MAPPING_START_EVENT) {
        anchor = e->data.mapping_start.anchor, tag = e->data.mapping_start.tag;
    } else if (e->type == YAML_SEQUENCE_START_EVENT) {
        anchor = e->data.sequence_start.anchor, tag = e->data.sequence_start.tag;
    }
    int rc = OK;
    if (anchor || e->type == YAML_ALIAS_EVENT) {
        rc = yaml_error(r, e, "anchors and aliases ('&name', '*name') are not accepted");
    } else if (tag && !(r->functions && e->type == YAML_SCALAR_EVENT &&
                        strcmp((const char *)tag, YAML_FUNCTION) == 0)) {
        rc = yaml_error(r, e, "tags ('!name') are not accepted");
    }
    if (rc != OK) yaml_event_delete(e);
    return rc;
}

static json_t *node_read(struct yaml_reader *r, const yaml_event_t *e);

/* Appends ".name" to the path, records its line, and returns the length for path_pop. */
static size_t path_push(struct yaml_reader *r, const char *name, int line) {
    size_t parent_len = r->path.len;
    buf_printf(&r->path, "%s%s", parent_len ? "." : "", name);
    r->values++;
    r->path_bytes += r->path.len;
    if (r->path_bytes <= YAML_PATHS_LIMIT)
        CHECK(json_object_set_new(r->lines, r->path.data, json_integer(line)) == 0);
    return parent_len;
}

static void path_pop(struct yaml_reader *r, size_t parent_len) {
    r->path.len = parent_len;
    r->path.data[parent_len] = '\0';
}

/* Checks and copies the key that `e` holds: a non-empty scalar not in `map` yet. The caller frees
 * the name. */
static char *key_read(struct yaml_reader *r, const yaml_event_t *e, const json_t *map) {
    if (e->type != YAML_SCALAR_EVENT || e->data.scalar.length == 0) {
        yaml_error(r, e, "a key must be a word");
        return NULL;
    }
    const char *key = (const char *)e->data.scalar.value;
    if (strlen(key) != e->data.scalar.length) {
        yaml_error(r, e, "a key holds a NUL character");
        return NULL;
    }
    if (json_object_get(map, key)) {
        error_set(r->err, ERR_FORMAT, "'%s', line %d: the key '%s' is given twice", r->file,
                  mark_line(e->start_mark), key);
        return NULL;
    }
    return xstrdup(key);
}

static int mapping_add_pair(struct yaml_reader *r, const yaml_event_t *key_event, json_t *map) {
    char *key = key_read(r, key_event, map);
    if (!key) return r->err->code;
    yaml_event_t e;
    int rc = event_next(r, &e);
    if (rc == OK) {
        size_t parent_len = path_push(r, key, mark_line(key_event->start_mark));
        json_t *v = node_read(r, &e);
        rc = v ? OK : r->err->code;
        if (v) CHECK(json_object_set_new(map, key, v) == 0);
        path_pop(r, parent_len);
        yaml_event_delete(&e);
    }
    free(key);
    return rc;
}

static int sequence_add_item(struct yaml_reader *r, const yaml_event_t *e, json_t *list) {
    char name[24];
    snprintf(name, sizeof(name), "%zu", json_array_size(list));
    size_t parent_len = path_push(r, name, mark_line(e->start_mark));
    json_t *v = node_read(r, e);
    if (v) CHECK(json_array_append_new(list, v) == 0);
    path_pop(r, parent_len);
    return v ? OK : r->err->code;
}

/* Reads children into `collection` (an object or an array) up to the event `end` and returns it. On
 * an error it releases `collection` and returns NULL. */
static json_t *collection_read(struct yaml_reader *r, json_t *collection, yaml_event_type_t end) {
    for (;;) {
        yaml_event_t e;
        int rc = event_next(r, &e);
        if (rc == OK && e.type == end) {
            yaml_event_delete(&e);
            return collection;
        }
        if (rc == OK) {
            rc = json_is_object(collection) ? mapping_add_pair(r, &e, collection)
                                            : sequence_add_item(r, &e, collection);
            yaml_event_delete(&e);
        }
        if (rc != OK) {
            json_decref(collection);
            return NULL;
        }
    }
}

static json_t *node_read(struct yaml_reader *r, const yaml_event_t *e) {
    if (r->values > YAML_VALUES_LIMIT || r->path_bytes > YAML_PATHS_LIMIT) {
        yaml_error(r, e,
                   r->values > YAML_VALUES_LIMIT
                       ? "more than 1048576 values in one document"
                       : "the keys are too long for this number of values");
        return NULL;
    }
    if (e->type == YAML_SCALAR_EVENT) return scalar_value(r, e);
    if (r->depth >= YAML_DEPTH_LIMIT) {
        yaml_error(r, e, "collections are nested too deeply");
        return NULL;
    }
    r->depth++;
    json_t *v = e->type == YAML_MAPPING_START_EVENT
                    ? collection_read(r, json_object(), YAML_MAPPING_END_EVENT)
                    : collection_read(r, json_array(), YAML_SEQUENCE_END_EVENT);
    r->depth--;
    return v;
}

/* Reads the whole document, whose events are: stream start, document start, node, document end,
 * stream end. An empty file is null. Returns NULL on an error. */
static json_t *document_read(struct yaml_reader *r) {
    json_t *root = NULL;
    for (;;) {
        yaml_event_t e;
        if (event_next(r, &e) != OK) break;
        yaml_event_type_t type = e.type;
        int rc = OK;
        if (type == YAML_DOCUMENT_START_EVENT && root) {
            rc = yaml_error(r, &e, "a second document begins; one is expected");
        } else if (type == YAML_SCALAR_EVENT || type == YAML_MAPPING_START_EVENT ||
                   type == YAML_SEQUENCE_START_EVENT) {
            root = node_read(r, &e);
            if (!root) rc = r->err->code;
        }
        yaml_event_delete(&e);
        if (rc != OK) break;
        if (type == YAML_STREAM_END_EVENT) return root ? root : json_null();
    }
    json_decref(root);
    return NULL;
}

static int parse(struct yaml *y, const char *path, const struct buf *text, bool functions,
                 struct error *err) {
    int rc = OK;
    *y = (struct yaml){0};
    struct yaml_reader r = {
        .file = path, .functions = functions, .lines = json_object(), .err = err};
    CHECK(yaml_parser_initialize(&r.parser));
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text->data, text->len);
    json_t *root = document_read(&r);
    if (root) {
        *y = (struct yaml){.path = xstrdup(path), .root = root, .lines = json_incref(r.lines)};
    } else {
        rc = err->code;
    }
    json_decref(r.lines);
    yaml_parser_delete(&r.parser);
    buf_release(&r.path);
    return rc;
}

int yaml_parse(struct yaml *y, const char *path, const char *text, size_t len, struct error *err) {
    const struct buf borrowed = {.data = (char *)(uintptr_t)text, .len = len};
    return parse(y, path, &borrowed, false, err);
}

static int load(struct yaml *y, const char *path, bool functions, struct error *err) {
    struct buf text = {0};
    int rc = file_read(path, YAML_FILE_LIMIT, &text, err);
    *y = (struct yaml){0};
    if (rc == OK) rc = parse(y, path, &text, functions, err);
    buf_release(&text);
    return rc;
}

int yaml_load(struct yaml *y, const char *path, struct error *err) {
    return load(y, path, false, err);
}

int yaml_load_functions(struct yaml *y, const char *path, struct error *err) {
    return load(y, path, true, err);
}

int yaml_line(const struct yaml *y, const char *key_path) {
    return (int)json_integer_value(json_object_get(y->lines, key_path));
}

int yaml_error_wrap(const struct yaml *y, const char *key_path, struct error *err) {
    return error_wrap(err, "'%s', line %d", y->path, MAX(yaml_line(y, key_path), 1));
}

struct yaml yaml_subtree(const struct yaml *y, json_t *root, const char *key_path) {
    struct yaml part = {y->path, root, json_object()};
    size_t n = strlen(key_path);
    const char *key;
    json_t *line;
    json_object_foreach (y->lines, key, line)
        if (strncmp(key, key_path, n) == 0 && key[n] == '.')
            json_object_set(part.lines, key + n + 1, line);
    return part;
}

void yaml_release(struct yaml *y) {
    free(y->path);
    json_decref(y->root);
    json_decref(y->lines);
    *y = (struct yaml){0};
}
