/* compatibility: command lines and settings of earlier programs (docs/COMPATIBILITY.md). */
#ifndef SHOAL_CLI_COMPATIBILITY_H
#define SHOAL_CLI_COMPATIBILITY_H

#include "base/base.h"

/* Fills `line` with Shoal's command and arguments for a command line of another program, and prints
 * them as a note. ERR_MISSING: the command is not known, and `err` is not set. ERR_USAGE: it has no
 * equivalent; the message names what replaces it. The caller releases `line`. */
int compatibility_translate(int argc, char **argv, struct strings *line, struct error *err);
/* Prints for each option of a YAML file of another program what replaces it. Never returns OK,
 * because no YAML file is a settings file. */
int compatibility_explain_yaml(const char *path, struct error *err);
/* Warns for each key of the file's sections what replaces it. */
void compatibility_note_keys(const struct yaml *y);
/* Prints the tables as rows of a Markdown table. */
void compatibility_print(void);

#endif
