/*
 * line_editor: reads lines from a terminal, with editing, history and completion by libedit.
 *
 * One thread uses an editor. Between two calls of line_editor_read the terminal is in its normal
 * mode, so that Ctrl-C is a signal there. While a line is edited, SIGINT has its default action,
 * and a signal that ends or stops the program first restores the terminal.
 */
#ifndef SHOAL_CLI_LINE_EDITOR_H
#define SHOAL_CLI_LINE_EDITOR_H

#include "base/base.h"

enum line_argument { LINE_ARG_NONE, LINE_ARG_TEXT, LINE_ARG_PATH };
struct line_editor_options {
    const char *prompt;
    /* The i-th command that Tab completes at the start of a line, or NULL after the last one;
     * *arg: what follows it. */
    const char *(*command)(int i, enum line_argument *arg);
    bool history; /* read and extend the history file */
};

/* NULL if the terminal cannot move its cursor (TERM is unset or "dumb"). */
struct line_editor *line_editor_open(const struct line_editor_options *o);
void line_editor_close(struct line_editor *ed); /* may be NULL */

enum line_result { LINE_READ, LINE_CLEARED /* by Ctrl-C */, LINE_END };
/* `line` gets the text without its newline, also after LINE_CLEARED; it is valid until the next
 * call. Lines that are read are added to the history. */
enum line_result line_editor_read(struct line_editor *ed, char **line);

#endif
