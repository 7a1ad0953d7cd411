/* cmd_config: `shoal config explain|check|defaults`: shows the values that a command would use and
 * the source of each; checks a file; or prints the defaults, so that a later version can warn about
 * changed ones. */
#define _GNU_SOURCE
#include "cli/compatibility.h"
#include "cli/settings.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const from_names[] = {[OPTION_FROM_DEFAULT] = "default",
                                         [OPTION_FROM_FILE] = "file",
                                         [OPTION_FROM_ENV] = "env",
                                         [OPTION_FROM_RECIPE] = "recipe",
                                         [OPTION_FROM_FLAG] = "flag"};

/* The variable that set a value: SHOAL_COMMAND_OPTION overrides SHOAL_ALL_OPTION. */
static void variable_text(const struct settings *s, const struct option_row *row, struct buf *b) {
    struct buf prefix = {0};
    option_env_name("SHOAL", s->command->name, &prefix);
    if (!option_env_source(settings_rows(s), row, prefix.data, environ, b))
        option_env_source(settings_rows(s), row, "SHOAL_ALL", environ, b);
    buf_release(&prefix);
}

/* "shoal.conf:12", the variable, the recipe; empty for flags and defaults. */
static void source_text(const struct settings *s, const struct option_row *row,
                        struct option_origin origin, struct buf *b) {
    buf_add(b, "", 0);
    if (origin.source == OPTION_FROM_FILE) buf_printf(b, "%s:%d", s->config.path, origin.line);
    if (origin.source == OPTION_FROM_ENV) variable_text(s, row, b);
    if (origin.source == OPTION_FROM_RECIPE) buf_puts(b, s->args.v[0]);
}

static void value_print(const struct cli_options *c, const struct settings *s,
                        const struct option_row *row, struct option_origin origin) {
    struct buf value = {0}, source = {0}, clean = {0};
    bool any = option_print_value(row, s->values, &value), secret = row->type == OPT_SECRETS;
    source_text(s, row, origin, &source);
    buf_add(&clean, "", 0); // an empty value is "", not NULL
    buf_add_sanitized(&clean, any ? value.data : "-", any ? value.len : 1);
    if (c->json)
        cli_print_json(json_pack("{s:s,s:s,s:o,s:b,s:s,s:s}", "command", s->command->name, "option",
                                 row->name, "value",
                                 any && !secret ? json_string(clean.data) : json_null(), "secret",
                                 secret, "from", from_names[origin.source], "source", source.data));
    else
        printf("%-24s %-24s %s%s%s\n", row->name, clean.data, from_names[origin.source],
               source.len ? " " : "", source.data);
    buf_release(&value);
    buf_release(&source);
    buf_release(&clean);
}

/* args: explain COMMAND [command line of COMMAND] */
static int explain(const struct cli_options *c, const struct strings *args, struct error *err) {
    const struct cli_command *k = args->n > 1 ? cli_command(args->v[1]) : NULL;
    if (args->n < 2) return error_set(err, ERR_USAGE, "name the command to explain");
    if (!k)
        return error_set(err, ERR_USAGE, "no command '%s'; 'shoal --help' lists them", args->v[1]);
    struct strings line = {0};
    for (int i = 2; i < args->n; i++) strings_add(&line, args->v[i]);
    if (c->config) {
        strings_add(&line, "--config");
        strings_add(&line, c->config);
    }
    struct settings s;
    int rc = settings_read(&s, k, line.n, line.v, err);
    if (rc == OK && !c->json)
        printf("shoal %s, settings file: %s\n", k->name, s.config.path ? s.config.path : "none");
    const struct option_row *rows = settings_rows(&s);
    for (int i = 0; rc == OK && rows[i].name; i++)
        if (rows[i].type != OPT_ALIAS) value_print(c, &s, &rows[i], settings_origin(&s, i));
    if (rc == OK) settings_warn(&s);
    settings_release(&s);
    strings_release(&line);
    return rc;
}

static int check(const struct cli_options *c, const struct strings *args, struct error *err) {
    struct config_file file = {0};
    if (args->n != 2) return error_set(err, ERR_USAGE, "check requires one FILE");
    if (cli_is_recipe(args->v[1])) return compatibility_explain_yaml(args->v[1], err);
    int rc = config_load(&file, args->v[1], err);
    if (rc == OK) rc = settings_check(&file, err);
    if (rc == OK && c->json)
        cli_print_json(json_pack("{s:o,s:b,s:i}", "file", json_from_path(args->v[1]), "valid", 1,
                                 "options", file.n));
    else if (rc == OK)
        printf("%s: %d values, no errors\n", args->v[1], file.n);
    config_release(&file);
    return rc;
}

static int defaults(void) {
    json_t *v = settings_defaults();
    char *text = json_dumps(v, JSON_INDENT(1) | JSON_SORT_KEYS);
    CHECK(text != NULL);
    puts(text);
    free(text);
    json_decref(v);
    return OK;
}

static int run(const struct cli_options *c, const void *options, const struct strings *args,
               struct error *err) {
    const char *verb = args->v[0];
    (void)options;
    if (strcmp(verb, "explain") == 0) return explain(c, args, err);
    if (strcmp(verb, "check") == 0) return check(c, args, err);
    if (strcmp(verb, "defaults") == 0 && args->n == 1) return defaults();
    return error_set(err, ERR_USAGE, "no '%s'; there are explain, check and defaults", verb);
}

const struct cli_command cmd_config = {
    .name = "config",
    .args = "explain COMMAND [-- ITS FLAGS] | check FILE | defaults",
    .summary = "show the values of a command's options and their sources",
    .about =
        "The value of an option comes from its flag, else from the recipe on the command line,\n"
        "else from the variable SHOAL_COMMAND_OPTION (such as SHOAL_SERVE_PORT) or\n"
        "SHOAL_ALL_OPTION, else from the settings file, else it is the default. The file is\n"
        "--config FILE, else $SHOAL_CONFIG, else ./shoal.conf:\n"
        "\n"
        "  # a comment takes a whole line\n"
        "  [all]\n"
        "  threads = 2\n"
        "  [serve]\n"
        "  port = 9000\n"
        "  adapter = critic=adapters/critic\n"
        "  adapter = solver=adapters/solver\n"
        "\n"
        "explain prints every value and its source; check verifies a file; defaults prints all\n"
        "defaults as JSON. If a settings file begins with 'defaults = FILE', a warning names\n"
        "each default that has changed since and that no setting overrides. More:\n"
        "docs/CONFIG.md.\n"
        "\n"
        "  shoal config explain serve\n"
        "  shoal config explain serve --json -- --port 9000\n"
        "  shoal config check shoal.conf",
    .min_args = 1,
    .max_args = -1,
    .run = run,
};
