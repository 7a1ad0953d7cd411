/*
 * go_template: chat templates in Go's form, as Modelfiles have them, as Jinja.
 *
 * Taken: text, trim marks, comments; .System .Prompt .Response, or {{ range .Messages }} with .Role
 * and .Content; if, else if, else, end; and, or, not, eq, ne. Anything else (variables, tools,
 * pipes) is ERR_USAGE and named.
 *
 * The Jinja text reads `turns`, a list of {system, prompt, response}, or `messages` and `system`.
 */
#ifndef SHOAL_GO_TEMPLATE_H
#define SHOAL_GO_TEMPLATE_H

#include "base/base.h"

/* bos: the token's text is put before all, for models that begin with it. */
int go_template_jinja(const char *text, bool bos, struct buf *out, struct error *err);
/* {turns, system} of a conversation. */
json_t *go_template_variables(const json_t *messages);

#endif
