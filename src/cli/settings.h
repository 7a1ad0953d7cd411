/*
 * settings: the option values of a command, collected from all sources, and the source of each.
 *
 * A value is that of the command line, else of a recipe that the command line names, else of a
 * variable SHOAL_COMMAND_OPTION or SHOAL_ALL_OPTION, else of the configuration file's section
 * [COMMAND] or [all], else the default. The file is --config FILE, else $SHOAL_CONFIG (empty: no
 * file), else ./shoal.conf if it exists.
 *
 * Invariant: a file with an error in any section is refused before a command does anything.
 */
#ifndef SHOAL_CLI_SETTINGS_H
#define SHOAL_CLI_SETTINGS_H

#include "cli/cli.h"

struct settings {
    const struct cli_command *command;
    struct option_row *rows;       /* rows for the command line only, common rows, the command's */
    struct option_origin *origins; /* [rows] */
    char *values; /* filled by rows: struct cli_options, then the command's options */
    struct strings args;
    struct config_file config; /* path NULL: no file */
};
/* The caller calls settings_release even after an error. */
int settings_read(struct settings *s, const struct cli_command *c, int argc, char **argv,
                  struct error *err);
void settings_release(struct settings *s);
const struct cli_options *settings_common(const struct settings *s);
const void *settings_options(const struct settings *s);
/* Rows that files and variables may set; the source of row i is settings_origin(s, i). */
const struct option_row *settings_rows(const struct settings *s);
struct option_origin settings_origin(const struct settings *s, int i);
/* Prints warnings on stderr: settings of a file that was found without being named, secrets that
 * others can read, changed defaults. */
void settings_warn(const struct settings *s);

/* The file to read if the command line has `given` (NULL: no --config). NULL: no file. */
const char *settings_path(const char *given);
/* Checks every section of a file against the options of its command. */
int settings_check(const struct config_file *c, struct error *err);
/* All commands' defaults as {"version", "commands": {NAME: {OPTION: TEXT or null}}}. */
json_t *settings_defaults(void);
/* Prints the options that every command takes, for --help. */
void settings_help(FILE *f);
/* The options of a command, without those that every command takes; malloc'ed. */
struct option_row *settings_command_rows(const struct cli_command *c);
/* The names and policies of all options that a command takes, for requests of jobs (for
 * look-up only: the offsets are not those of a settings block); malloc'ed. */
struct option_row *settings_job_rows(const struct cli_command *c);

#endif
