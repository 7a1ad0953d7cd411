/*
 * settings: the option values of a command, from all sources, and the source of each.
 *
 * A value comes from the command line, else from a recipe that the command line names, else from a
 * variable SHOAL_COMMAND_OPTION or SHOAL_ALL_OPTION, else from the section [COMMAND] or [all] of
 * the configuration file, else it is the default. The file is --config FILE, else $SHOAL_CONFIG
 * (empty: no file), else ./shoal.conf if it exists.
 *
 * Invariant: an error in any section of the file is reported before the command does anything.
 */
#ifndef SHOAL_CLI_SETTINGS_H
#define SHOAL_CLI_SETTINGS_H

#include "cli/cli.h"

struct settings {
    const struct cli_command *command;
    struct option_row *rows;       /* rows for the command line only, common rows, the command's */
    struct option_origin *origins; /* [rows] */
    char *values; /* struct cli_options, then the command's options; rows have the offsets */
    struct strings args;
    struct config_file config; /* path NULL: no file */
};
/* The caller calls settings_release even after an error. */
int settings_read(struct settings *s, const struct cli_command *c, int argc, char **argv,
                  struct error *err);
void settings_release(struct settings *s);
const struct cli_options *settings_common(const struct settings *s);
const void *settings_options(const struct settings *s);
/* The rows that files and variables may set; settings_origin(s, i) is the source of row i. */
const struct option_row *settings_rows(const struct settings *s);
struct option_origin settings_origin(const struct settings *s, int i);
/* Prints warnings on stderr: ./shoal.conf is used, other users can read secrets, defaults have
 * changed. */
void settings_warn(const struct settings *s);

/* The path of the configuration file; NULL: none. given: the value of --config, or NULL. */
const char *settings_path(const char *given);
/* Checks every section of a file against the options of its command. */
int settings_check(const struct config_file *c, struct error *err);
/* All commands' defaults as {"version", "commands": {NAME: {OPTION: TEXT or null}}}. */
json_t *settings_defaults(void);
/* The options that every command takes; malloc'ed. */
struct option_row *settings_common_rows(void);
/* The options of a command, without those; malloc'ed. */
struct option_row *settings_command_rows(const struct cli_command *c);
/* All options that a command takes, with their job policies, for job requests. Only for look-up:
 * the offsets are not those of struct settings. malloc'ed. */
struct option_row *settings_job_rows(const struct cli_command *c);

#endif
