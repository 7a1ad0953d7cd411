/* man: the manual pages, in mdoc(7), from the tables of commands and options. */
#ifndef SHOAL_CLI_MAN_H
#define SHOAL_CLI_MAN_H

#include "cli/cli.h"

/* Prints the page of a command, shoal-NAME(1), or of the program, shoal(1), if c is NULL. */
void man_print(const struct cli_command *c);

#endif
