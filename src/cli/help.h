/* help: the help texts, from the tables of commands and options. */
#ifndef SHOAL_CLI_HELP_H
#define SHOAL_CLI_HELP_H

#include "cli/cli.h"

#include <stdio.h>

/* All commands in their groups. */
void help_print_commands(FILE *f);
/* The licence of Shoal and THIRD_PARTY_NOTICES, on stdout. */
void help_print_licenses(void);
/* "shoal run MODEL [options]", malloc'ed. */
char *help_usage(const struct cli_command *c);
/* A command's help on stdout: its main options, or with `all` every option and recipe key. config:
 * the value of --config; NULL: the default file. */
void help_print_command(const struct cli_command *c, const char *config, bool all);

#endif
