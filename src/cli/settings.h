/*
 * settings: what a command is told, by all who may tell it something, and who told it what.
 *
 * A value is that of the command line, else of a recipe that the command line names, else of a
 * variable SHOAL_COMMAND_OPTION or SHOAL_ALL_OPTION, else of the configuration file's section
 * [COMMAND] or [all], else the default. The file is --config FILE, else $SHOAL_CONFIG (empty: no
 * file), else ./shoal.conf where there is one.
 *
 * Invariant: a file with an error in any section is refused before a command does anything.
 */
#ifndef SHOAL_SETTINGS_H
#define SHOAL_SETTINGS_H

#include "cli/cli.h"

struct settings {
    const struct cli_command *command;
    struct option_row *rows;       /* of the line alone, then common, then the command's */
    struct option_origin *origins; /* [rows] */
    char *block; /* what rows fill: struct cli_options, then the command's options */
    struct strings args;
    struct config_file config; /* path NULL: no file */
};
/* settings_release is called also after an error. */
int settings_read(struct settings *s, const struct cli_command *c, int argc, char **argv,
                  struct error *err);
void settings_release(struct settings *s);
const struct cli_options *settings_common(const struct settings *s);
const void *settings_options(const struct settings *s);
/* Rows that stand in files and variables too; the i-th has origin settings_origin(s, i). */
const struct option_row *settings_rows(const struct settings *s);
struct option_origin settings_origin(const struct settings *s, int i);
/* Says on stderr what nobody asked for and should know: a file that was found and not named, keys
 * that others can read, defaults that are not what they were. */
void settings_warn(const struct settings *s);

/* The file that is read where the command line says `given` (NULL: nothing). NULL: none. */
const char *settings_path(const char *given);
/* Every section of a file against the options of its command. */
int settings_check(const struct config_file *c, struct error *err);
/* All commands' defaults as {"version", "commands": {NAME: {OPTION: TEXT or null}}}. */
json_t *settings_defaults(void);
/* Adds a line for each default of the command that differs from `was`, as settings_defaults gave
 * it, and that nothing sets. Returns how many. */
int settings_diff_defaults(const struct settings *s, const json_t *was, struct buf *b);
/* For --help: the options that every command takes. */
void settings_help(FILE *f);
/* The rows of what every command takes, also on its line only. */
const struct option_row *settings_common_rows(void);

#endif
