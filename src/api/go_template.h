/*
 * go_template: converts Go chat templates, as in Modelfiles, to Jinja.
 *
 * Supported: text, trim marks, comments; .System .Prompt .Response, or {{ range .Messages }} with
 * .Role, .Content and .Thinking; if, else if, else, end; and, or, not, eq, ne. .Tools, .Suffix and
 * .ToolCalls count as empty texts. Anything else (variables, pipes) is ERR_USAGE with the
 * unsupported action in the message.
 *
 * The Jinja template uses the variables `turns`, a list of {system, prompt, response}, or
 * `messages` and `system`.
 */
#ifndef SHOAL_API_GO_TEMPLATE_H
#define SHOAL_API_GO_TEMPLATE_H

#include "base/base.h"

/* Appends the Jinja template to `out`. bos: the template begins with the BOS token. */
int go_template_jinja(const char *text, bool bos, struct buf *out, struct error *err);
/* The variables {turns, system} of a conversation for such a template. */
json_t *go_template_variables(const json_t *messages);

#endif
