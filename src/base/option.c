/*
 * option: one table row per option; the command line, variables, configuration files, recipes,
 * defaults, ranges and help all come from it.
 *
 * It knows no command and no option by name. value_set sets values from the text of flags,
 * variables and configuration files; value_from_json sets those of recipes. Both functions check
 * ranges, so a range holds for every source. The table's own defaults are set in the same way, and
 * an invalid default is a broken contract.
 *
 * Invariant: a string or list field always owns its memory, so options_release is safe at any
 * moment after options_default. A list in a later source replaces the list of an earlier source;
 * within one source its items add up.
 */
#define _GNU_SOURCE
#include "base/internal.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unilbrk.h>

void strings_add(struct strings *s, const char *text) {
    s->v = xrealloc(s->v, (size_t)(s->n + 1) * sizeof(*s->v));
    s->v[s->n++] = xstrdup(text);
}

void strings_release(struct strings *s) {
    for (int i = 0; i < s->n; i++) free(s->v[i]);
    free(s->v);
    *s = (struct strings){0};
}

static int text_compare(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

void strings_sort(struct strings *s) {
    if (s->n > 1) qsort(s->v, (size_t)s->n, sizeof *s->v, text_compare);
}

bool strings_add_words(struct strings *s, const char *text) {
    struct buf word = {0};
    char quote = 0;
    bool in_word = false;
    for (const char *p = text; *p || in_word; p++) {
        if (!*p || (!quote && isspace((unsigned char)*p))) {
            if (in_word) strings_add(s, word.data ? word.data : "");
            buf_release(&word);
            in_word = false;
            if (!*p) break;
        } else if (quote ? *p == quote : *p == '\'' || *p == '"') {
            quote = quote ? 0 : *p;
            in_word = true;
        } else {
            buf_add(&word, p, 1);
            in_word = true;
        }
    }
    return !quote;
}

static void *row_field(const struct option_row *row, void *out) {
    return (char *)out + row->offset;
}

bool option_is_list(const struct option_row *row) {
    return row->type == OPT_LIST || row->type == OPT_SECRETS;
}

static bool row_has_range(const struct option_row *row) {
    return row->min != 0 || row->max != 0;
}

/* Appends a range: "1 to 256", "at least 1", "at most 0". A bound of 1e15 or more, or of -1e15 or
 * less, means no bound. */
static void add_range(struct buf *b, const struct option_row *row) {
    if (row->max >= 1e15) {
        buf_printf(b, "at least %.15g", row->min);
    } else if (row->min <= -1e15) {
        buf_printf(b, "at most %.15g", row->max);
    } else {
        buf_printf(b, "%.15g to %.15g", row->min, row->max);
    }
}

static int check_range(const struct option_row *row, double v, const char *shown, const char *label,
                       struct error *err) {
    if (!row_has_range(row) || (v >= row->min && v <= row->max)) return OK;
    struct buf b = {0};
    add_range(&b, row);
    int rc = error_set(err, ERR_USAGE, "'%s' cannot be %s: it must be %s", label, shown, b.data);
    buf_release(&b);
    return rc;
}

static int integer_set(const struct option_row *row, void *out, int64_t v, const char *label,
                       struct error *err) {
    char shown[32];
    snprintf(shown, sizeof(shown), "%lld", (long long)v);
    int rc = check_range(row, (double)v, shown, label, err);
    if (rc == OK) *(int64_t *)row_field(row, out) = v;
    return rc;
}

static int float_set(const struct option_row *row, void *out, double v, const char *label,
                     struct error *err) {
    char shown[32];
    snprintf(shown, sizeof(shown), "%.15g", v);
    int rc = check_range(row, v, shown, label, err);
    if (rc == OK) *(double *)row_field(row, out) = v;
    return rc;
}

static int integer_text_set(const struct option_row *row, void *out, const char *text,
                            const char *label, struct error *err) {
    const char *digits = text + (*text == '-' || *text == '+');
    if (!*digits || digits[strspn(digits, "0123456789")])
        return error_set(err, ERR_USAGE, "'%s' must be a whole number, not '%s'", label, text);
    errno = 0;
    long long v = strtoll(text, NULL, 10);
    if (errno && row_has_range(row) && row->min > -1e15 && row->max < 1e15)
        return check_range(row, *text == '-' ? -INFINITY : INFINITY, text, label, err);
    if (errno)
        return error_set(err, ERR_USAGE, "'%s' cannot be %s: it does not fit 64 bits", label, text);
    return integer_set(row, out, v, label, err);
}

static int float_text_set(const struct option_row *row, void *out, const char *text,
                          const char *label, struct error *err) {
    char *end = NULL;
    /* strtod alone would take nan, inf, hex and leading blanks. */
    bool plain = *text && text[strspn(text, "0123456789+-.eE")] == '\0';
    double v = plain ? strtod(text, &end) : 0;
    if (!plain || *end)
        return error_set(err, ERR_USAGE, "'%s' must be a number, not '%s'", label, text);
    if (!isfinite(v))
        return error_set(err, ERR_USAGE, "'%s' cannot be %s: it is too large", label, text);
    return float_set(row, out, v, label, err);
}

static int bool_text_set(const struct option_row *row, void *out, const char *text,
                         const char *label, struct error *err) {
    static const char *const words[2][4] = {{"false", "no", "off", "0"},
                                            {"true", "yes", "on", "1"}};
    for (int value = 0; value < 2; value++) {
        for (int i = 0; i < 4; i++) {
            if (strcmp(text, words[value][i]) != 0) continue;
            *(bool *)row_field(row, out) = value;
            return OK;
        }
    }
    return error_set(err, ERR_USAGE, "'%s' must be true or false, not '%s'", label, text);
}

static void string_set(const struct option_row *row, void *out, const char *text) {
    char **field = row_field(row, out);
    char *copy = text ? xstrdup(text) : NULL;
    free(*field);
    *field = copy;
}

/* Sets an option from text; appends an item to a list. `label` is the option's name in messages. */
static int value_set(const struct option_row *row, void *out, const char *text, const char *label,
                     struct error *err) {
    switch (row->type) {
    case OPT_BOOL:
        return bool_text_set(row, out, text, label, err);
    case OPT_INT:
        return integer_text_set(row, out, text, label, err);
    case OPT_FLOAT:
        return float_text_set(row, out, text, label, err);
    case OPT_STRING:
        string_set(row, out, text);
        return OK;
    case OPT_LIST:
    case OPT_SECRETS:
        strings_add(row_field(row, out), text);
        return OK;
    case OPT_ALIAS: /* row_find never returns an alias, but the row that it stands for */
        break;
    }
    CHECK(!"option type");
    return ERR_USAGE;
}

static void list_set_default(const struct option_row *row, void *out) {
    char *copy = xstrdup(row->default_value), *rest = copy;
    for (char *item; (item = strsep(&rest, ",")) != NULL;) strings_add(row_field(row, out), item);
    free(copy);
}

static const size_t field_sizes[] = {
    [OPT_BOOL] = sizeof(bool),           [OPT_INT] = sizeof(int64_t),
    [OPT_FLOAT] = sizeof(double),        [OPT_STRING] = sizeof(char *),
    [OPT_LIST] = sizeof(struct strings), [OPT_SECRETS] = sizeof(struct strings)};

/* Sets one row to its default and frees the old value. The field must be zero or own its memory. */
static void row_default(const struct option_row *row, void *out) {
    struct error err = {0};
    if (option_is_list(row)) {
        strings_release(row_field(row, out));
        if (row->default_value) list_set_default(row, out);
    } else if (row->type == OPT_STRING) {
        string_set(row, out, row->default_value);
    } else {
        memset(row_field(row, out), 0, field_sizes[row->type]);
        if (row->default_value)
            CHECK(value_set(row, out, row->default_value, row->name, &err) == OK);
    }
}

void options_default(const struct option_row *rows, void *out) {
    for (const struct option_row *row = rows; row->name; row++) {
        if (row->type == OPT_ALIAS) continue;
        memset(row_field(row, out), 0, field_sizes[row->type]);
        row_default(row, out);
    }
}

void options_release(const struct option_row *rows, void *out) {
    for (const struct option_row *row = rows; row->name; row++) {
        if (row->type == OPT_STRING) string_set(row, out, NULL);
        if (option_is_list(row)) strings_release(row_field(row, out));
    }
}

/* '-' and '_' are equal. */
bool option_name_equal(const char *a, const char *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char x = a[i] == '_' ? '-' : a[i], y = b[i] == '_' ? '-' : b[i];
        if (x != y || x == '\0') return false;
    }
    return b[n] == '\0';
}

/* The row with this name, the row that an alias of this name refers to, or the row that had this
 * name in an earlier version. In the last case it prints a note if `print_note`. */
static const struct option_row *row_find(const struct option_row *rows, const char *name,
                                         size_t len, bool print_note) {
    for (const struct option_row *row = rows; row->name; row++) {
        if (!option_name_equal(name, row->name, len)) continue;
        return row->type == OPT_ALIAS
                   ? row_find(rows, row->default_value, strlen(row->default_value), print_note)
                   : row;
    }
    return option_find_renamed(rows, name, len, print_note);
}

enum { NAME_MAX_LEN = 63 };

/* Edit distance in which swapping two neighbouring letters is one edit (optimal string alignment).
 * Both names have at most NAME_MAX_LEN letters. */
static int edit_distance(const char *a, size_t na, const char *b, size_t nb) {
    int d[3][NAME_MAX_LEN + 1];
    for (size_t j = 0; j <= nb; j++) d[0][j] = (int)j;
    for (size_t i = 1; i <= na; i++) {
        int *row = d[i % 3], *previous_row = d[(i + 2) % 3], *row_before_previous = d[(i + 1) % 3];
        row[0] = (int)i;
        for (size_t j = 1; j <= nb; j++) {
            int best = previous_row[j - 1] + (a[i - 1] != b[j - 1]);
            best = MIN(best, MIN(previous_row[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                best = MIN(best, row_before_previous[j - 2] + 1);
            row[j] = best;
        }
    }
    return d[na % 3][nb];
}

/* The row whose name has the smallest edit distance to `name`; NULL if every distance is above a
 * third of the letters of `name` (or above 2, for a short name). */
static const struct option_row *row_nearest(const struct option_row *rows, const char *name,
                                            size_t len) {
    const struct option_row *nearest = NULL;
    if (len == 0 || len > NAME_MAX_LEN) return NULL;
    char wanted[NAME_MAX_LEN + 1];
    for (size_t i = 0; i < len; i++) wanted[i] = name[i] == '_' ? '-' : name[i];
    int best = MAX(2, (int)len / 3) + 1;
    for (const struct option_row *row = rows; row->name; row++) {
        size_t n = strlen(row->name);
        if (n > NAME_MAX_LEN) continue;
        int d = edit_distance(wanted, len, row->name, n);
        if (len >= 3 && n > len && strncmp(wanted, row->name, len) == 0)
            d = 1; /* an abbreviation */
        if (d < best && d < (int)MAX(n, len)) best = d, nearest = row;
    }
    return nearest;
}

struct command_line {
    const struct option_row *rows;
    void *out;
    int argc, next_arg;
    char **argv;
    bool *seen; /* [rows] given on this command line */
    struct error *err;
};

/* "-" and negative numbers are positional arguments. */
static bool is_flag(const char *arg) {
    return arg[0] == '-' && arg[1] != '\0' && !strchr("0123456789.", arg[1]);
}

static bool is_negated(const char *name, size_t len) {
    return len > 3 && strncmp(name, "no", 2) == 0 && (name[2] == '-' || name[2] == '_');
}

static int unknown_flag_error(const struct command_line *c, const char *name, size_t len,
                              const char *arg) {
    int shown = (int)strcspn(arg, "=");
    bool negated = is_negated(name, len);
    const struct option_row *near = row_nearest(c->rows, name, len);
    const char *prefix = "";
    if (!near && negated) {
        near = row_nearest(c->rows, name + 3, len - 3);
        if (near && near->type == OPT_BOOL) prefix = "no-";
    }
    if (near)
        return error_set(c->err, ERR_USAGE, "unknown flag '%.*s', did you mean '--%s%s'?", shown,
                         arg, prefix, near->name);
    return error_set(c->err, ERR_USAGE, "unknown flag '%.*s'", shown, arg);
}

/* The first item of a list on this command line replaces the list of earlier sources. */
static void list_add(struct command_line *c, const struct option_row *row, const char *text) {
    struct strings *list = row_field(row, c->out);
    if (!c->seen[row - c->rows]) strings_release(list);
    c->seen[row - c->rows] = true;
    strings_add(list, text);
}

/* Sets the value of a flag that needs one: `value`, which is the text after '=', or, if it is NULL,
 * the next argument. In the second case a list takes all arguments up to the next flag. */
static int flag_value(struct command_line *c, const struct option_row *row, const char *label,
                      const char *value) {
    bool attached = value != NULL;
    if (!attached && (c->next_arg >= c->argc || is_flag(c->argv[c->next_arg])))
        return error_set(c->err, ERR_USAGE, "'%s' needs a value%s%s", label,
                         row->metavar ? ": " : "", row->metavar ? row->metavar : "");
    if (!attached) value = c->argv[c->next_arg++];
    if (!option_is_list(row)) return value_set(row, c->out, value, label, c->err);
    list_add(c, row, value);
    while (!attached && c->next_arg < c->argc && !is_flag(c->argv[c->next_arg]))
        list_add(c, row, c->argv[c->next_arg++]);
    return OK;
}

static const struct option_row *row_find_flag(const struct option_row *rows, const char *name,
                                              size_t len, const char *value, bool print_note) {
    const char *option = option_of_flag(name, len, value);
    const struct option_row *row =
        option ? row_find(rows, option, strlen(option), print_note) : NULL;
    return row ? row : row_find(rows, name, len, print_note);
}

/* The row of a flag. `value`: the text after '='; without it, the next argument is the value. */
static const struct option_row *flag_row(const struct command_line *c, const char *name, size_t len,
                                         const char *value) {
    bool separate = !value && c->next_arg < c->argc && !is_flag(c->argv[c->next_arg]);
    return row_find_flag(c->rows, name, len, separate ? c->argv[c->next_arg] : value, true);
}

/* arg is "--name", "--name=value", "--no-name", or "-x" for a row named by one letter. */
static int flag_parse(struct command_line *c, const char *arg) {
    size_t dashes = arg[1] == '-' ? 2 : 1;
    const char *name = arg + dashes, *value = strchr(name, '=');
    size_t len = strcspn(name, "=");
    if (dashes == 1 && len != 1) return unknown_flag_error(c, name, len, arg);
    const struct option_row *row = flag_row(c, name, len, value ? value + 1 : NULL);
    bool negated = false;
    if (!row && is_negated(name, len)) {
        row = row_find(c->rows, name + 3, len - 3, true);
        negated = row && row->type == OPT_BOOL;
        if (!negated) row = NULL;
    }
    if (!row) return unknown_flag_error(c, name, len, arg);
    char *label = xasprintf("--%.*s", (int)len, name);
    int rc = OK;
    if (negated && value) {
        rc = error_set(c->err, ERR_USAGE, "'%s' takes no value", label);
    } else if (row->type == OPT_BOOL && !value) {
        *(bool *)row_field(row, c->out) = !negated;
    } else {
        rc = flag_value(c, row, label, value ? value + 1 : NULL);
    }
    free(label);
    c->seen[row - c->rows] = true;
    return rc;
}

size_t options_count(const struct option_row *rows) {
    size_t n = 0;
    while (rows[n].name) n++;
    return n;
}

static size_t rows_copy(struct option_row *dest, size_t n, const struct option_row *source,
                        size_t offset) {
    for (; source && source->name; source++, n++) {
        dest[n] = *source;
        dest[n].offset += offset;
    }
    return n;
}

struct option_row *options_join(const struct option_row *rows, const struct option_table *more) {
    size_t n = rows ? options_count(rows) : 0;
    for (const struct option_table *t = more; t && t->rows; t++) n += options_count(t->rows);
    struct option_row *all = xcalloc(n + 1, sizeof *all);
    size_t n_copied = rows_copy(all, 0, rows, 0);
    for (const struct option_table *t = more; t && t->rows; t++)
        n_copied = rows_copy(all, n_copied, t->rows, t->offset);
    return all;
}

int options_parse_with_origin(const struct option_row *rows, void *out, int argc, char **argv,
                              struct strings *positional, struct option_origin *origin,
                              struct error *err) {
    size_t n_rows = options_count(rows);
    struct command_line c = {.rows = rows, .out = out, .argc = argc, .argv = argv, .err = err};
    c.seen = xcalloc(n_rows, sizeof(*c.seen));
    int rc = OK;
    bool flags = true;
    while (rc == OK && c.next_arg < argc) {
        const char *arg = argv[c.next_arg++];
        if (flags && strcmp(arg, "--") == 0) {
            flags = false;
        } else if (flags && is_flag(arg)) {
            rc = flag_parse(&c, arg);
        } else {
            strings_add(positional, arg);
        }
    }
    for (size_t i = 0; origin && i < n_rows; i++)
        if (c.seen[i]) origin[i] = (struct option_origin){OPTION_FROM_FLAG, 0};
    free(c.seen);
    return rc;
}

int options_parse(const struct option_row *rows, void *out, int argc, char **argv,
                  struct strings *positional, struct error *err) {
    return options_parse_with_origin(rows, out, argc, argv, positional, NULL, err);
}

/* the environment and configuration files */

const struct option_row *option_find(const struct option_row *rows, const char *name) {
    return row_find(rows, name, strlen(name), false);
}

static bool string_changed(const char *text, const char *before) {
    return text && before ? strcmp(text, before) != 0 : text != before;
}

bool option_changed(const struct option_row *row, const void *options, const void *defaults) {
    const void *at = (const char *)options + row->offset,
               *was = (const char *)defaults + row->offset;
    switch (row->type) {
    case OPT_BOOL:
        return *(const bool *)at != *(const bool *)was;
    case OPT_INT:
    case OPT_FLOAT:
        return memcmp(at, was, sizeof(int64_t)) != 0;
    case OPT_STRING:
        return string_changed(*(char *const *)at, *(char *const *)was);
    case OPT_LIST:
    case OPT_SECRETS:
        return ((const struct strings *)at)->n > 0;
    case OPT_ALIAS:
        break;
    }
    return false;
}

const struct option_row *option_find_flag(const struct option_row *rows, const char *name,
                                          const char *value) {
    return row_find_flag(rows, name, strlen(name), value, false);
}

const char *name_suggest(const char *const *names, int n, const char *name) {
    struct option_row *rows = xcalloc((size_t)n + 1, sizeof *rows);
    for (int i = 0; i < n; i++) rows[i].name = names[i];
    const struct option_row *near = row_nearest(rows, name, strlen(name));
    const char *found = near ? near->name : NULL;
    free(rows);
    return found;
}

const char *option_suggest(const struct option_row *rows, const char *name) {
    const struct option_row *near = row_nearest(rows, name, strlen(name));
    return near ? near->name : NULL;
}

static char upper(char c) {
    return c == '-' ? '_' : c >= 'a' && c <= 'z' ? (char)(c - 'a' + 'A') : c;
}

void option_env_name(const char *prefix, const char *name, struct buf *b) {
    buf_printf(b, "%s_", prefix);
    for (; *name; name++) buf_add(b, (const char[]){upper(*name)}, 1);
}

/* Sets a row from a variable. A list replaces the earlier list; blanks separate its items. */
static int variable_set(const struct option_row *row, void *out, const char *text,
                        const char *label, struct error *err) {
    if (!option_is_list(row)) return value_set(row, out, text, label, err);
    char *copy = xstrdup(text), *save = NULL;
    strings_release(row_field(row, out));
    for (char *item = strtok_r(copy, " \t\n", &save); item; item = strtok_r(NULL, " \t\n", &save))
        strings_add(row_field(row, out), item);
    free(copy);
    return OK;
}

static char lower(char c) {
    return c == '_' ? '-' : c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : '?';
}

/* The option that PREFIX_NAME=VALUE sets, in lower case with '-'; malloc'ed. */
static char *variable_to_option(const char *prefix, const char *variable) {
    const char *from = variable + strlen(prefix) + 1;
    char *name = xstrndup(from, strcspn(from, "="));
    for (char *p = name; *p; p++) *p = *p >= '0' && *p <= '9' ? *p : lower(*p);
    return name;
}

static void warn_unknown_variable(const struct option_row *rows, const char *prefix,
                                  const char *variable, const char *name) {
    const char *near = option_suggest(rows, name);
    struct buf b = {0};
    if (near) option_env_name(prefix, near, &b);
    log_warn("the variable %.*s sets nothing%s%s%s", (int)strcspn(variable, "="), variable,
             near ? "; did you mean " : "", near ? b.data : "", near ? "?" : "");
    buf_release(&b);
}

int options_from_env(const struct option_row *rows, void *out, const char *prefix,
                     char *const *environment, struct option_origin *origin, struct error *err) {
    size_t prefix_len = strlen(prefix);
    int rc = OK;
    for (; rc == OK && *environment; environment++) {
        const char *variable = *environment, *value = strchr(variable, '=');
        if (strncmp(variable, prefix, prefix_len) != 0 || variable[prefix_len] != '_' || !value)
            continue;
        char *name = variable_to_option(prefix, variable);
        const struct option_row *row = row_find(rows, name, strlen(name), true);
        if (!row) {
            warn_unknown_variable(rows, prefix, variable, name);
        } else if (value[1]) {
            char *label = xstrndup(variable, (size_t)(value - variable));
            rc = variable_set(row, out, value + 1, label, err);
            if (origin) origin[row - rows] = (struct option_origin){OPTION_FROM_ENV, 0};
            free(label);
        }
        free(name);
    }
    return rc;
}

bool option_env_source(const struct option_row *rows, const struct option_row *row,
                       const char *prefix, char *const *environment, struct buf *b) {
    size_t prefix_len = strlen(prefix);
    bool found = false;
    for (; !found && *environment; environment++) {
        const char *variable = *environment, *value = strchr(variable, '=');
        if (strncmp(variable, prefix, prefix_len) != 0 || variable[prefix_len] != '_' || !value ||
            !value[1])
            continue;
        char *name = variable_to_option(prefix, variable);
        found = option_find(rows, name) == row;
        if (found) buf_add(b, variable, (size_t)(value - variable));
        free(name);
    }
    return found;
}

static int unknown_entry_error(const struct option_row *rows, const char *path,
                               const struct config_entry *e, const char *owner, struct error *err) {
    const struct option_row *near = row_nearest(rows, e->key, strlen(e->key));
    return error_set(err, ERR_USAGE, "%s:%d: %s has no option '%s'%s%s%s", path, e->line, owner,
                     e->key, near ? "; did you mean '" : "", near ? near->name : "",
                     near ? "'?" : "");
}

static int entry_set(const struct option_row *rows, void *out, const char *path,
                     const struct config_entry *e, const char *owner, int *lines,
                     struct error *err) {
    const struct option_row *row = row_find(rows, e->key, strlen(e->key), true);
    if (!row) return unknown_entry_error(rows, path, e, owner, err);
    int *line = &lines[row - rows];
    if (*line && !option_is_list(row))
        return error_set(err, ERR_USAGE, "%s:%d: '%s' is set in line %d already", path, e->line,
                         e->key, *line);
    if (!*line && option_is_list(row)) strings_release(row_field(row, out));
    *line = e->line;
    int rc = value_set(row, out, e->value, e->key, err);
    return rc == OK ? OK : error_wrap(err, "%s:%d", path, e->line);
}

int options_from_config(const struct option_row *rows, void *out, const struct config_file *c,
                        const char *section, const char *owner, struct option_origin *origin,
                        struct error *err) {
    const struct config_section *s = config_find_section(c, section);
    size_t n_rows = options_count(rows);
    int *lines = xcalloc(n_rows + 1, sizeof *lines), rc = OK; /* line of each row; 0: not set */
    for (int i = 0; rc == OK && s && i < s->n; i++)
        rc = entry_set(rows, out, c->path, &c->v[s->first + i], owner, lines, err);
    for (size_t i = 0; origin && i < n_rows; i++)
        if (lines[i]) origin[i] = (struct option_origin){OPTION_FROM_FILE, lines[i]};
    free(lines);
    return rc;
}

static bool list_text(const struct strings *list, bool secret, struct buf *b) {
    if (secret && list->n) buf_printf(b, "(%d, not shown)", list->n);
    for (int i = 0; !secret && i < list->n; i++) buf_printf(b, "%s%s", i ? " " : "", list->v[i]);
    return list->n > 0;
}

bool option_print_value(const struct option_row *row, const void *out, struct buf *b) {
    const void *field = (const char *)out + row->offset;
    buf_add(b, "", 0);
    switch (row->type) {
    case OPT_BOOL:
        buf_puts(b, *(const bool *)field ? "true" : "false");
        return true;
    case OPT_INT:
        buf_printf(b, "%lld", (long long)*(const int64_t *)field);
        return true;
    case OPT_FLOAT:
        buf_printf(b, "%.15g", *(const double *)field);
        return true;
    case OPT_STRING:
        if (*(char *const *)field) buf_puts(b, *(char *const *)field);
        return *(char *const *)field != NULL;
    case OPT_LIST:
    case OPT_SECRETS:
        return list_text(field, row->type == OPT_SECRETS, b);
    case OPT_ALIAS:
        break;
    }
    CHECK(!"option type");
    return false;
}

static const char *json_type_name(const json_t *v) {
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "a mapping";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        return "text";
    case JSON_INTEGER:
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "true or false";
    default:
        return "nothing";
    }
}

static int type_error(const char *label, const char *wanted, const json_t *v, struct error *err) {
    const char *hint = json_is_number(v) || json_is_boolean(v) ? " (put it in quotes)" : "";
    if (strcmp(wanted, "text") != 0) hint = "";
    if (json_is_string(v))
        return error_set(err, ERR_USAGE, "'%s' must be %s, not '%s'", label, wanted,
                         json_string_value(v));
    return error_set(err, ERR_USAGE, "'%s' must be %s, not %s%s", label, wanted, json_type_name(v),
                     hint);
}

static int list_from_json(struct strings *list, const json_t *v, const char *label,
                          struct error *err) {
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_string(item)) return type_error(label, "text", item, err);
    }
    strings_release(list);
    for (size_t i = 0; i < n; i++)
        strings_add(list, json_string_value(json_is_array(v) ? json_array_get(v, i) : v));
    return OK;
}

/* Sets a row from a recipe's value; null sets the default. An integer may be written as a float
 * without a fraction (1e6). */
static int value_from_json(const struct option_row *row, void *out, const json_t *v,
                           const char *label, struct error *err) {
    if (json_is_null(v)) {
        row_default(row, out);
        return OK;
    }
    switch (row->type) {
    case OPT_BOOL:
        if (!json_is_boolean(v)) return type_error(label, "true or false", v, err);
        *(bool *)row_field(row, out) = json_is_true(v);
        return OK;
    case OPT_INT: {
        double real = json_real_value(v);
        bool whole = json_is_real(v) && floor(real) == real && fabs(real) <= 0x1p53;
        if (!json_is_integer(v) && !whole) return type_error(label, "a whole number", v, err);
        return integer_set(row, out, whole ? (int64_t)real : json_integer_value(v), label, err);
    }
    case OPT_FLOAT:
        if (!json_is_number(v)) return type_error(label, "a number", v, err);
        return float_set(row, out, json_number_value(v), label, err);
    case OPT_STRING:
        if (!json_is_string(v)) return type_error(label, "text", v, err);
        string_set(row, out, json_string_value(v));
        return OK;
    case OPT_LIST:
    case OPT_SECRETS:
        return list_from_json(row_field(row, out), v, label, err);
    case OPT_ALIAS:
        break;
    }
    CHECK(!"option type");
    return ERR_USAGE;
}

/* The arguments of options_from_yaml. In the functions below, `path` is a position in the document
 * ("train.lora.rank") and `name` is the option's name that the keys form ("lora_rank"). */
struct option_recipe {
    const struct option_row *rows;
    void *out;
    const struct yaml *doc;
    bool *seen; /* [rows] */
    struct error *err;
};

static int recipe_apply(const struct option_recipe *r, const json_t *map, const char *path,
                        const char *name);

static int unknown_key_error(const struct option_recipe *r, const char *name, int line) {
    const struct option_row *near = row_nearest(r->rows, name, strlen(name));
    char *shown = near ? xstrdup(near->name) : NULL;
    for (char *p = shown; p && *p; p++)
        if (*p == '-') *p = '_';
    error_set(r->err, ERR_USAGE, "'%s', line %d: unknown key '%s'%s%s%s", r->doc->path, line, name,
              shown ? ", did you mean '" : "", shown ? shown : "", shown ? "'?" : "");
    free(shown);
    return r->err->code;
}

/* Applies one key. It names a row, or it has a mapping whose keys continue the name, so that "lora:
 * {rank: 8}" is lora_rank. */
static int key_apply(const struct option_recipe *r, const char *path, const char *name,
                     const json_t *v) {
    const struct option_row *row = row_find(r->rows, name, strlen(name), !r->doc->stored);
    int line = yaml_line(r->doc, path);
    if (!row)
        return json_is_object(v) && json_object_size(v) ? recipe_apply(r, v, path, name)
                                                        : unknown_key_error(r, name, line);
    if (r->seen[row - r->rows])
        return error_set(r->err, ERR_USAGE, "'%s', line %d: '%s' is given twice", r->doc->path,
                         line, name);
    r->seen[row - r->rows] = true;
    int rc = value_from_json(row, r->out, v, name, r->err);
    return rc == OK ? OK : error_wrap(r->err, "'%s', line %d", r->doc->path, line);
}

static int recipe_apply(const struct option_recipe *r, const json_t *map, const char *path,
                        const char *name) {
    const char *key;
    json_t *v;
    int rc = OK;
    json_object_foreach ((json_t *)(uintptr_t)map, key, v) {
        char *child = *path ? xasprintf("%s.%s", path, key) : xstrdup(key);
        char *full = *name ? xasprintf("%s_%s", name, key) : xstrdup(key);
        rc = key_apply(r, child, full, v);
        free(child);
        free(full);
        if (rc != OK) break;
    }
    return rc;
}

/* The mapping at a dotted path; NULL with OK when it is absent or empty. */
static int section_find(const struct yaml *doc, const char *section, const json_t **map,
                        struct error *err) {
    const json_t *node = doc->root;
    char *copy = xstrdup(section), *rest = *copy ? copy : NULL;
    for (char *key; json_is_object(node) && (key = strsep(&rest, ".")) != NULL;)
        node = json_object_get(node, key);
    free(copy);
    *map = json_is_object(node) ? node : NULL;
    if (!node || json_is_null(node) || json_is_object(node)) return OK;
    return error_set(err, ERR_USAGE, "'%s', line %d: %s%s%s must be a mapping of options, not %s",
                     doc->path, MAX(yaml_line(doc, section), 1), *section ? "'" : "",
                     *section ? section : "the document", *section ? "'" : "",
                     json_type_name(node));
}

int options_from_yaml(const struct option_row *rows, void *out, const struct yaml *doc,
                      const char *section, struct error *err) {
    const json_t *map;
    int rc = section_find(doc, section ? section : "", &map, err);
    if (rc != OK || !map) return rc;
    size_t n_rows = options_count(rows);
    struct option_recipe r = {.rows = rows, .out = out, .doc = doc, .err = err};
    r.seen = xcalloc(n_rows, sizeof(*r.seen));
    rc = recipe_apply(&r, map, section ? section : "", "");
    free(r.seen);
    return rc;
}

enum { HELP_INDENT = 28, HELP_WIDTH = 79 };

const char *option_metavar(const struct option_row *row) {
    if (row->type == OPT_BOOL) return NULL;
    if (row->metavar) return row->metavar;
    return row->type == OPT_INT || row->type == OPT_FLOAT ? "N" : "TEXT";
}

bool option_is_on(const struct option_row *row) {
    return row->type == OPT_BOOL && row->default_value && strcmp(row->default_value, "true") == 0;
}

static void add_flag(struct buf *b, const struct option_row *row) {
    const char *metavar = option_metavar(row);
    buf_printf(b, "  --%s%s", option_is_on(row) ? "[no-]" : "", row->name);
    if (metavar) buf_printf(b, " %s%s", metavar, option_is_list(row) ? "..." : "");
}

void option_add_help(struct buf *b, const struct option_row *row) {
    bool has_range = row_has_range(row);
    bool has_default = row->type != OPT_BOOL && row->default_value && *row->default_value;
    buf_puts(b, row->help ? translate(row->help) : "");
    if (!has_range && !has_default) return;
    buf_puts(b, " (");
    if (has_range) add_range(b, row);
    if (has_default) buf_printf(b, "%sdefault %s", has_range ? "; " : "", row->default_value);
    buf_puts(b, ")");
}

json_t *option_json(const struct option_row *row, const void *options) {
    const char *field = (const char *)options + row->offset;
    const struct strings *list = (const void *)field;
    json_t *v = NULL;
    if (row->type == OPT_BOOL) v = json_boolean(*(const bool *)field);
    if (row->type == OPT_INT) v = json_integer(*(const int64_t *)(const void *)field);
    if (row->type == OPT_FLOAT) v = json_real(*(const double *)(const void *)field);
    if (row->type == OPT_STRING) {
        const char *text = *(char *const *)(const void *)field;
        v = text ? json_string(text) : json_null();
    }
    if (row->type == OPT_LIST) {
        v = json_array();
        for (int i = 0; i < list->n; i++) json_array_append_new(v, json_string(list->v[i]));
    }
    return v;
}

json_t *options_json(const struct option_row *rows, const void *options) {
    json_t *all = json_object();
    for (const struct option_row *row = rows; row->name; row++) {
        json_t *v = option_json(row, options);
        if (v) json_object_set_new(all, option_stored_name(row), v);
    }
    return all;
}

/* Whether a text has characters of U+3000 or above, as Japanese and Chinese ones have. */
static bool has_wide_characters(const char *text) {
    while (*text && (unsigned char)*text < 0xe3) text++;
    return *text;
}

/* Prints a text that begins in column HELP_INDENT; lines break where Unicode allows it. */
static void help_wrap_wide(FILE *f, const char *text) {
    size_t n = strlen(text), from = 0;
    char *breaks = xmalloc(n + 1);
    u8_width_linebreaks((const uint8_t *)text, n, HELP_WIDTH - HELP_INDENT, 0, 0, NULL, "UTF-8",
                        breaks);
    for (size_t i = 1; i < n; i++) {
        if (breaks[i] != UC_BREAK_POSSIBLE) continue;
        fprintf(f, "%.*s\n%*s", (int)(i - from), text + from, HELP_INDENT, "");
        from = i;
    }
    fprintf(f, "%s\n", text + from);
    free(breaks);
}

/* Prints `text` word by word from column `column`, and further lines from column HELP_INDENT. */
static void help_wrap(FILE *f, const char *text, size_t column) {
    if (has_wide_characters(text)) {
        help_wrap_wide(f, text);
        return;
    }
    for (bool first = true;; first = false) {
        text += strspn(text, " ");
        size_t n = strcspn(text, " ");
        if (n == 0) break;
        if (!first && column + 1 + n > HELP_WIDTH) {
            fprintf(f, "\n%*s", HELP_INDENT, "");
            column = HELP_INDENT;
        } else if (!first) {
            fputc(' ', f);
            column++;
        }
        fprintf(f, "%.*s", (int)n, text);
        column += n;
        text += n;
    }
    fputc('\n', f);
}

void options_help(const struct option_row *rows, FILE *f) {
    for (const struct option_row *row = rows; row->name; row++) {
        if (row->type == OPT_ALIAS) continue;
        struct buf flag = {0}, text = {0};
        add_flag(&flag, row);
        option_add_help(&text, row);
        if (flag.len + 2 > HELP_INDENT) {
            fprintf(f, "%s\n%*s", flag.data, HELP_INDENT, "");
        } else {
            fprintf(f, "%-*s", HELP_INDENT, flag.data);
        }
        help_wrap(f, text.data, HELP_INDENT);
        buf_release(&flag);
        buf_release(&text);
    }
}

int size_parse(const char *text, size_t *out, struct error *err) {
    char *end;
    double v = strtod(text, &end);
    const char *units = "KMG", *unit = *end ? strchr(units, *end & ~0x20) : NULL;
    int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    if (unit) end += 1 + (end[1] == 'B' || end[1] == 'b');
    if (end == text || *end || !(v > 0 && v < 1e6) || !unit)
        return error_set(err, ERR_USAGE, "'%s' is not a size; write it as 512K, 100M or 2G", text);
    *out = (size_t)(v * (double)((size_t)1 << shift));
    return OK;
}
