/*
 * config: a configuration file as sections of KEY = VALUE, each with its line.
 *
 *     # a comment has its own line
 *     [serve]
 *     port = 8000
 *     adapter = critic=adapters/critic
 *     adapter = solver=adapters/solver
 *
 * It knows no command and no option: options_from_config interprets the keys. A value is the rest
 * of its line without the blanks around it, or the text between double quotes; there are no
 * escapes. Ambiguous input (a section twice, a comment after a value) is refused, so that it is
 * never unclear which part is used.
 *
 * Invariant: accepted text is UTF-8 and has no control characters except the tab.
 */
#define _GNU_SOURCE
#include "base/base.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistr.h>

enum { FILE_LIMIT = 1 << 20, LINE_LIMIT = 8192, NAME_LIMIT = 63, SECTIONS_LIMIT = 256 };

struct config_reader {
    struct config_file *c;
    int line, cap_sections, cap_entries; /* capacities of the arrays of `c` */
    struct error *err;
};

static int syntax_error(const struct config_reader *r, const char *why) {
    return error_set(r->err, ERR_USAGE, "%s:%d: %s", r->c->path, r->line, why);
}

static bool is_blank(char c) {
    return c == ' ' || c == '\t';
}

/* Moves both ends inwards over blanks. */
static void trim(const char **begin, const char **end) {
    while (*begin < *end && is_blank(**begin)) ++*begin;
    while (*end > *begin && is_blank((*end)[-1])) --*end;
}

static char *text_copy(struct config_file *c, const char *begin, const char *end) {
    char *text = arena_alloc(&c->arena, (size_t)(end - begin) + 1);
    memcpy(text, begin, (size_t)(end - begin));
    return text;
}

/* Whether it can be the name of a section or a key: 1 to NAME_LIMIT of the letters below. */
static bool is_name(const char *begin, const char *end) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789-_";
    if (begin == end || end - begin > NAME_LIMIT) return false;
    for (; begin < end; begin++)
        if (!memchr(letters, *begin, sizeof letters - 1)) return false;
    return true;
}

static int section_begin(struct config_reader *r, const char *begin, const char *end) {
    struct config_file *c = r->c;
    if (end[-1] != ']') return syntax_error(r, "a section is [NAME] and nothing else");
    begin++, end--;
    trim(&begin, &end);
    if (!is_name(begin, end)) return syntax_error(r, "a section's name must be a command or 'all'");
    char *name = text_copy(c, begin, end);
    for (int i = 0; i < c->n_sections; i++)
        if (strcmp(c->sections[i].name, name) == 0)
            return error_set(r->err, ERR_USAGE, "%s:%d: section [%s] began in line %d already",
                             c->path, r->line, name, c->sections[i].line);
    if (c->n_sections == SECTIONS_LIMIT)
        return error_set(r->err, ERR_USAGE, "%s:%d: there are more than %d sections", c->path,
                         r->line, SECTIONS_LIMIT);
    if (c->n_sections == r->cap_sections) {
        r->cap_sections = 2 * r->cap_sections + 8;
        c->sections = xrealloc(c->sections, (size_t)r->cap_sections * sizeof *c->sections);
    }
    c->sections[c->n_sections++] = (struct config_section){name, r->line, c->n, 0};
    return OK;
}

/* Trims a value and removes its quotes. Outside of quotes a '#' after a blank is refused, because
 * many people expect that it begins a comment. */
static int value_trim(const struct config_reader *r, const char **begin, const char **end) {
    trim(begin, end);
    if (*begin < *end && **begin == '"') {
        if (*end - *begin < 2 || (*end)[-1] != '"' ||
            memchr(*begin + 1, '"', (size_t)(*end - *begin) - 2) != NULL)
            return syntax_error(r,
                                "a value in quotes ends with the line and holds no other quotes");
        ++*begin, --*end;
        return OK;
    }
    for (const char *p = *begin; p + 1 < *end; p++)
        if (is_blank(p[0]) && p[1] == '#')
            return syntax_error(
                r, "a comment must be on a separate line; put a value that holds ' #' in quotes");
    return OK;
}

static int entry_add(struct config_reader *r, const char *begin, const char *end) {
    struct config_file *c = r->c;
    const char *equals_sign = memchr(begin, '=', (size_t)(end - begin));
    if (!equals_sign) return syntax_error(r, "expected KEY = VALUE, [SECTION] or a comment");
    const char *key_end = equals_sign, *value = equals_sign + 1;
    trim(&begin, &key_end);
    if (!is_name(begin, key_end)) return syntax_error(r, "a key is made of a-z, 0-9, '-' and '_'");
    if (value_trim(r, &value, &end) != OK) return r->err->code;
    if (c->n == r->cap_entries) {
        r->cap_entries = 2 * r->cap_entries + 32;
        c->v = xrealloc(c->v, (size_t)r->cap_entries * sizeof *c->v);
    }
    c->v[c->n++] =
        (struct config_entry){text_copy(c, begin, key_end), text_copy(c, value, end), r->line};
    c->sections[c->n_sections - 1].n++;
    return OK;
}

static bool is_printable_utf8(const char *begin, const char *end) {
    for (const char *p = begin; p < end; p++)
        if (((unsigned char)*p < ' ' && *p != '\t') || *p == 0x7f) return false;
    return u8_check((const uint8_t *)begin, (size_t)(end - begin)) == NULL;
}

static int line_parse(struct config_reader *r, const char *begin, const char *end) {
    if (end - begin > LINE_LIMIT)
        return error_set(r->err, ERR_USAGE, "%s:%d: the line is longer than %d bytes", r->c->path,
                         r->line, LINE_LIMIT);
    if (begin < end && end[-1] == '\r') end--;
    if (!is_printable_utf8(begin, end))
        return syntax_error(r, "the line holds bytes that are not UTF-8 text");
    trim(&begin, &end);
    if (begin == end || *begin == '#' || *begin == ';') return OK;
    return *begin == '[' ? section_begin(r, begin, end) : entry_add(r, begin, end);
}

int config_parse(struct config_file *c, const char *path, const char *text, size_t len,
                 struct error *err) {
    *c = (struct config_file){0};
    c->path = arena_strdup(&c->arena, path);
    c->sections = xcalloc(1, sizeof *c->sections);
    c->sections[c->n_sections++] =
        (struct config_section){"", 0, 0, 0}; /* for the entries before the first header */
    struct config_reader r = {.c = c, .cap_sections = 1, .err = err};
    int rc = OK;
    if (len > FILE_LIMIT)
        rc = error_set(err, ERR_USAGE, "'%s' is larger than the limit of %d bytes", path,
                       FILE_LIMIT);
    if (rc == OK && len >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3, len -= 3;
    for (const char *end = text + len; rc == OK && text < end;) {
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        r.line++;
        rc = line_parse(&r, text, stop ? stop : end);
        text = stop ? stop + 1 : end;
    }
    if (rc != OK) config_release(c);
    return rc;
}

int config_load(struct config_file *c, const char *path, struct error *err) {
    struct buf text = {0};
    struct stat st;
    *c = (struct config_file){0};
    int rc = file_read(path, FILE_LIMIT, &text, err);
    if (rc == OK) rc = config_parse(c, path, text.data, text.len, err);
    if (rc == OK) c->shared = stat(path, &st) == 0 && (st.st_mode & S_IROTH);
    buf_release(&text);
    return rc;
}

const struct config_section *config_find_section(const struct config_file *c, const char *name) {
    for (int i = 0; i < c->n_sections; i++)
        if (strcmp(c->sections[i].name, name) == 0) return &c->sections[i];
    return NULL;
}

void config_release(struct config_file *c) {
    free(c->sections);
    free(c->v);
    arena_release(&c->arena);
    *c = (struct config_file){0};
}
