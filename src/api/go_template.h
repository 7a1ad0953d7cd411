/*
 * go_template: converts Go chat templates, as in Modelfiles, to Jinja.
 *
 * Supported: text, trim marks, comments; .System .Prompt .Response, or {{ range .Messages }} with
 * .Role and .Content; if, else if, else, end; and, or, not, eq, ne. Anything else (variables,
 * tools, pipes) is ERR_USAGE with the action in the message.
 *
 * The Jinja text reads `turns`, a list of {system, prompt, response}, or `messages` and `system`.
 */
#ifndef SHOAL_API_GO_TEMPLATE_H
#define SHOAL_API_GO_TEMPLATE_H

#include "base/base.h"

/* bos: the text of the BOS token is written first, for models that begin with it. */
int go_template_jinja(const char *text, bool bos, struct buf *out, struct error *err);
/* The variables {turns, system} of a conversation. */
json_t *go_template_variables(const json_t *messages);

#endif
