/* settings: collects option values from their sources; see settings.h. */
#define _GNU_SOURCE
#include "cli/settings.h"

#include "cli/job_confine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char DEFAULT_FILE[] = "./shoal.conf";

/* Options for the command line only. */
static const struct option_row line_rows[] = {
    {"config", OPT_STRING, offsetof(struct cli_options, config), NULL, 0, 0, "FILE",
     "settings file ('shoal config --help'); default: $SHOAL_CONFIG, else ./shoal.conf; '': "
     "none",
     JOB_ARG_FORBIDDEN},
    {"help", OPT_BOOL, offsetof(struct cli_options, help), NULL, 0, 0, NULL,
     "print the main options of this command", JOB_ARG_FORBIDDEN},
    {"help-all", OPT_BOOL, offsetof(struct cli_options, help_all), NULL, 0, 0, NULL,
     "print all options of this command", JOB_ARG_FORBIDDEN},
    {"h", OPT_ALIAS, 0, "help"},
    {0},
};
enum { N_LINE_ROWS = ARRAY_LEN(line_rows) - 1 };

static const struct option_row common_rows[] = {
    {"json", OPT_BOOL, offsetof(struct cli_options, json), NULL, 0, 0, NULL,
     "print results as JSON Lines on stdout", JOB_ARG_SERVER_ONLY},
    {"quiet", OPT_BOOL, offsetof(struct cli_options, quiet), NULL, 0, 0, NULL,
     "print no notes and no progress on stderr", JOB_ARG_SERVER_ONLY},
    {"exact", OPT_BOOL, offsetof(struct cli_options, exact), NULL, 0, 0, NULL,
     "exact numeric class: the same bits on every processor"},
    {"fast", OPT_BOOL, offsetof(struct cli_options, fast), NULL, 0, 0, NULL,
     "fast numeric class: faster, other bits (default on processors with AVX512_BF16 or AMX)"},
    {"threads", OPT_INT, offsetof(struct cli_options, threads), "0", 0, 1024, "N",
     "threads; 0: all processors", JOB_ARG_THREADS},
    {0},
};

struct option_row *settings_common_rows(void) {
    return options_join(common_rows, (const struct option_table[]){{line_rows}, {0}});
}

struct option_row *settings_command_rows(const struct cli_command *c) {
    return options_join(c->rows, c->more);
}

struct option_row *settings_job_rows(const struct cli_command *c) {
    struct option_row *command_rows = settings_command_rows(c),
                      *all = options_join(line_rows, (const struct option_table[]){
                                                         {common_rows}, {command_rows}, {0}});
    free(command_rows);
    return all;
}

/* Joins all rows into one table and allocates the values. */
static void settings_init(struct settings *s, const struct cli_command *c) {
    struct option_row *command_rows = settings_command_rows(c);
    *s = (struct settings){.command = c};
    s->rows = options_join(line_rows,
                           (const struct option_table[]){
                               {common_rows}, {command_rows, sizeof(struct cli_options)}, {0}});
    free(command_rows);
    s->origins = xcalloc(options_count(s->rows) + 1, sizeof *s->origins);
    s->values = xcalloc(1, sizeof(struct cli_options) + c->size);
    options_default(s->rows, s->values);
}

void settings_release(struct settings *s) {
    if (s->rows) options_release(s->rows, s->values);
    strings_release(&s->args);
    config_release(&s->config);
    free(s->values);
    free(s->origins);
    free(s->rows);
    *s = (struct settings){0};
}

const struct cli_options *settings_common(const struct settings *s) {
    return (const void *)s->values;
}

const void *settings_options(const struct settings *s) {
    return s->values + sizeof(struct cli_options);
}

const struct option_row *settings_rows(const struct settings *s) {
    return s->rows + N_LINE_ROWS;
}

struct option_origin settings_origin(const struct settings *s, int i) {
    return s->origins[N_LINE_ROWS + i];
}

/* the configuration file */

const char *settings_path(const char *given) {
    const char *path = given ? given : getenv("SHOAL_CONFIG");
    if (path) return *path ? path : NULL;
    return path_exists(DEFAULT_FILE) ? DEFAULT_FILE : NULL;
}

/* Checks the owner of ./shoal.conf. Settings may contain commands to run, so a file that the user
 * has not named must belong to this user or root, and other users must not be able to write it. */
static int owner_check(const char *path, struct error *err) {
    struct stat st;
    if (path != DEFAULT_FILE || stat(path, &st) != 0) return OK;
    bool trusted = (st.st_uid == geteuid() || st.st_uid == 0) && !(st.st_mode & S_IWOTH);
    return trusted ? OK
                   : error_set(err, ERR_USAGE,
                               "'%s' belongs to another user, or others may write it: name it with "
                               "--config, or say --config ''",
                               path);
}

static int section_unknown(const struct config_file *c, const struct config_section *section,
                           struct error *err) {
    const char *near = cli_suggest_command(section->name, "all");
    return error_set(err, ERR_USAGE, "%s:%d: no command '%s'%s%s%s", c->path, section->line,
                     section->name, near ? "; did you mean '" : "", near ? near : "",
                     near ? "'?" : "");
}

static int section_check(const struct config_file *c, const struct config_section *section,
                         struct error *err) {
    const struct cli_command *k = cli_command(section->name);
    if (strcmp(section->name, "all") == 0) {
        struct cli_options common;
        options_default(common_rows, &common);
        int rc = options_from_config(common_rows, &common, c, "all", "[all]", NULL, err);
        options_release(common_rows, &common);
        return rc;
    }
    if (!k) return section_unknown(c, section, err);
    struct settings s;
    settings_init(&s, k);
    int rc = options_from_config(settings_rows(&s), s.values, c, k->name, k->name, NULL, err);
    settings_release(&s);
    return rc;
}

/* Checks the lines before the first section, where only 'defaults = FILE' may be set. */
static int header_check(const struct config_file *c, struct error *err) {
    for (int i = 0; i < c->sections[0].n; i++) {
        const struct config_entry *e = &c->v[i];
        if (strcmp(e->key, "defaults") != 0)
            return error_set(err, ERR_USAGE,
                             "%s:%d: '%s' precedes every section: put [COMMAND] or [all] above it",
                             c->path, e->line, e->key);
        if (i > 0)
            return error_set(err, ERR_USAGE, "%s:%d: '%s' is set in line %d already", c->path,
                             e->line, e->key, c->v[0].line);
    }
    return OK;
}

int settings_check(const struct config_file *c, struct error *err) {
    int rc = header_check(c, err);
    for (int i = 1; rc == OK && i < c->n_sections; i++) rc = section_check(c, &c->sections[i], err);
    return rc;
}

static int config_file_load(struct settings *s, struct error *err) {
    const char *path = settings_path(settings_common(s)->config);
    if (!path) return OK;
    if (cli_is_recipe(path))
        return error_set(err, ERR_USAGE,
                         "'%s' is YAML, and settings are not: 'shoal config check %s' says what "
                         "replaces its keys",
                         path, path);
    int rc = owner_check(path, err);
    if (rc == OK) rc = config_load(&s->config, path, err);
    return rc == OK ? settings_check(&s->config, err) : rc;
}

/* sources, in order of precedence */

/* Applies the file, then variables; in both, first the values for all commands. */
static int sources_apply(struct settings *s, struct error *err) {
    struct option_origin *origins = s->origins + N_LINE_ROWS;
    const struct option_row *rows = settings_rows(s);
    const char *name = s->command->name;
    struct buf prefix = {0};
    option_env_name("SHOAL", name, &prefix);
    int rc = OK;
    if (s->config.path) {
        rc = options_from_config(common_rows, s->values, &s->config, "all", "[all]", origins, err);
        if (rc == OK)
            rc = options_from_config(rows, s->values, &s->config, name, name, origins, err);
    }
    if (rc == OK) rc = options_from_env(common_rows, s->values, "SHOAL_ALL", environ, origins, err);
    if (rc == OK) rc = options_from_env(rows, s->values, prefix.data, environ, origins, err);
    buf_release(&prefix);
    return rc;
}

static int command_line_apply(struct settings *s, int argc, char **argv, struct error *err) {
    strings_release(&s->args);
    return options_parse_with_origin(s->rows, s->values, argc, argv, &s->args, s->origins, err);
}

/* All values as text, to find those that a recipe changes. */
static char **values_text(const struct settings *s) {
    size_t n = options_count(s->rows);
    char **v = xcalloc(n + 1, sizeof *v);
    for (size_t i = 0; i < n; i++) {
        struct buf b = {0};
        if (s->rows[i].type != OPT_ALIAS) option_print_value(&s->rows[i], s->values, &b);
        v[i] = b.data;
    }
    return v;
}

/* In a job a recipe may not set output paths, which the request sets, nor commands. */
static int recipe_row_check(const struct option_row *row, struct error *err) {
    bool wide = row->job_policy == JOB_ARG_OUTPUT_PATH || row->job_policy == JOB_ARG_SERVER_ONLY ||
                row->job_policy == JOB_ARG_FORBIDDEN;
    if (!job_is_confined() || !wide) return OK;
    return error_set(err, ERR_USAGE, "the recipe of a job may not set '%s'", row->name);
}

static int recipe_apply(struct settings *s, const char *path, struct error *err) {
    char **before = values_text(s);
    int rc = s->command->recipe_load(s->values + sizeof(struct cli_options), path, err);
    char **after = values_text(s);
    for (size_t i = 0; i < options_count(s->rows); i++) {
        bool changed = before[i] && strcmp(before[i], after[i]) != 0;
        if (changed) s->origins[i] = (struct option_origin){OPTION_FROM_RECIPE, 0};
        if (changed && rc == OK) rc = recipe_row_check(&s->rows[i], err);
        free(before[i]);
        free(after[i]);
    }
    free(before);
    free(after);
    return rc;
}

/* Loads the file that an option names; all other sources override its values. */
static int base_file_apply(struct settings *s, int argc, char **argv, struct error *err) {
    int rc = command_line_apply(s, argc, argv, err);
    if (rc == OK) rc = s->command->base_load(s->values + sizeof(struct cli_options), err);
    return rc == OK ? sources_apply(s, err) : rc;
}

static int sources_read(struct settings *s, int argc, char **argv, struct error *err) {
    const struct cli_command *c = s->command;
    bool recipe = c->recipe_load && s->args.n && cli_is_recipe(s->args.v[0]);
    char *path = recipe ? xstrdup(s->args.v[0]) : NULL;
    options_release(s->rows, s->values);
    options_default(s->rows, s->values);
    int rc = sources_apply(s, err);
    if (rc == OK && c->base_load) rc = base_file_apply(s, argc, argv, err);
    if (rc == OK && recipe) rc = recipe_apply(s, path, err);
    if (rc == OK) rc = command_line_apply(s, argc, argv, err);
    free(path);
    return rc;
}

/* Parses the command line twice: first for --config, a recipe and --help, then over the other
 * sources. */
int settings_read(struct settings *s, const struct cli_command *c, int argc, char **argv,
                  struct error *err) {
    bool quiet = log_quiet;
    settings_init(s, c);
    log_quiet = true; /* --quiet is not known yet; sources_read parses the line again */
    int rc = command_line_apply(s, argc, argv, err);
    log_quiet = quiet || settings_common(s)->quiet;
    if (rc != OK || settings_common(s)->help) return rc;
    /* 'shoal config' loads files itself, because it has to report errors in them. */
    rc = c == &cmd_config ? OK : config_file_load(s, err);
    return rc == OK ? sources_read(s, argc, argv, err) : rc;
}

/* defaults */

static json_t *default_json(const struct option_row *row, const struct settings *s) {
    struct buf b = {0};
    json_t *v = option_print_value(row, s->values, &b) ? json_string(b.data) : json_null();
    buf_release(&b);
    return v;
}

/* The defaults of one command. */
static json_t *defaults_of(const struct cli_command *c) {
    struct settings s;
    json_t *all = json_object();
    settings_init(&s, c);
    for (const struct option_row *row = settings_rows(&s); row->name; row++)
        if (row->type != OPT_ALIAS) json_object_set_new(all, row->name, default_json(row, &s));
    settings_release(&s);
    return all;
}

json_t *settings_defaults(void) {
    json_t *all = json_object();
    const struct cli_command *c;
    for (int i = 0; (c = cli_command_at(i)); i++) json_object_set_new(all, c->name, defaults_of(c));
    return json_pack("{s:s,s:o}", "version", SHOAL_VERSION, "commands", all);
}

/* The default of a row in `then`, the defaults of an earlier version, where the row may have the
 * name of one of its aliases; NULL: not there. */
static const json_t *former_default(const json_t *then, const struct option_row *rows,
                                    const struct option_row *row) {
    const json_t *v = json_object_get(then, row->name);
    if (!v) v = json_object_get(then, option_stored_name(row));
    for (; !v && rows->name; rows++)
        if (rows->type == OPT_ALIAS && strcmp(rows->default_value, row->name) == 0)
            v = json_object_get(then, rows->name);
    return v;
}

/* Adds a line for each default of the command that differs from `was`, a result of
 * settings_defaults, unless another source sets the option. Returns the number of lines. */
static int settings_diff_defaults(const struct settings *s, const json_t *was, struct buf *b) {
    const json_t *commands = json_object_get(was, "commands"),
                 *then = json_object_get(commands, s->command->name), *old;
    json_t *now = defaults_of(s->command);
    const struct option_row *rows = settings_rows(s);
    int n = 0;
    for (int i = 0; rows[i].name; i++) {
        const json_t *is = json_object_get(now, rows[i].name);
        old = former_default(then, rows, &rows[i]);
        if (!is || !old || json_equal(is, old)) continue;
        if (settings_origin(s, i).source != OPTION_FROM_DEFAULT) continue;
        const char *x = json_string_value(old), *y = json_string_value(is);
        if (x && y && strcmp(current_value(rows[i].name, x), y) == 0) continue; // only renamed
        buf_printf(b, "%s%s's default of '%s' was %s in %s and is %s now", n++ ? "\n" : "",
                   s->command->name, rows[i].name, x ? x : "nothing",
                   json_get_string(was, "version"), y ? y : "nothing");
    }
    json_decref(now);
    return n;
}

/* warnings */

static bool has_secrets(const struct config_file *c) {
    for (int i = 1; i < c->n_sections; i++) {
        const struct config_section *section = &c->sections[i];
        const struct cli_command *k = cli_command(section->name);
        struct option_row *rows = k ? settings_command_rows(k) : NULL;
        bool found = false;
        for (int j = 0; k && j < section->n && !found; j++) {
            const struct option_row *row = option_find(rows, c->v[section->first + j].key);
            found = row && row->type == OPT_SECRETS;
        }
        free(rows);
        if (found) return true;
    }
    return false;
}

static void defaults_warn(const struct settings *s) {
    if (s->config.sections[0].n == 0) return;
    char *path = path_relative_to(s->config.path, s->config.v[0].value);
    struct error err = {0};
    struct buf b = {0};
    json_t *was = json_parse_file(path, &err);
    if (!was)
        log_warn("%s:%d: defaults: %s", s->config.path, s->config.v[0].line, err.text);
    else if (settings_diff_defaults(s, was, &b))
        log_warn("%s", b.data);
    json_decref(was);
    buf_release(&b);
    free(path);
}

void settings_warn(const struct settings *s) {
    bool used = false;
    if (!s->config.path) return;
    for (size_t i = 0; i < options_count(s->rows); i++)
        used |= s->origins[i].source == OPTION_FROM_FILE;
    if (used && strcmp(s->config.path, DEFAULT_FILE) == 0)
        log_info("settings of '%s' are used ('shoal config explain %s' shows them)", DEFAULT_FILE,
                 s->command->name);
    if (s->config.shared && has_secrets(&s->config))
        log_warn("'%s' contains secrets, and others can read it: chmod 600 it", s->config.path);
    defaults_warn(s);
}
