/*
 * reasoning: the tags around the reasoning at the beginning of a reply, in the forms of several
 * families of models.
 *
 * A server has one form, which it finds in the chat template when it starts, or --reasoning-parser
 * names. generation.c separates the reasoning from the content.
 */
#ifndef SHOAL_SERVE_REASONING_H
#define SHOAL_SERVE_REASONING_H

#include "tokenizer/tokenizer.h"

struct reasoning_form {
    const char *names[6];     /* values of --reasoning-parser; those after the first are vLLM's */
    const char *open, *close; /* tags around the reasoning */
    const char *answer_open, *answer_close; /* tags around the content, or NULL */
};

/* ERR_USAGE: there is no parser of that name. */
int reasoning_parser_check(const char *parser, struct error *err);
/* The form of a model under --reasoning-parser, whose value is valid. "auto": the form whose
 * closing tag the template has (one that only removes the reasoning of earlier turns has no other);
 * without such a tag the form whose tags are tokens of the vocabulary that are not special. NULL:
 * the model does not reason, or the parser is "none". */
const struct reasoning_form *reasoning_form_find(const char *parser, const char *chat_template,
                                                 const struct tokenizer *tok);
/* Whether a token is one of the form's tags, whose text is needed although it may be special. */
bool reasoning_form_has_token(const struct reasoning_form *f, const struct tokenizer *tok,
                              int32_t id);
/* Whether the prompt ends with the opening tag, perhaps followed by white space: some templates
 * begin the reasoning themselves. */
bool reasoning_form_opened_by(const struct reasoning_form *f, const struct tokenizer *tok,
                              const struct token_ids *prompt);
/* Whether an assistant's text ends within its reasoning. */
bool reasoning_form_is_open(const struct reasoning_form *f, const char *text);
/* Length of the content [p, p + n) of a reply without the tag after it, if only white space follows
 * that tag. Unless `done`, it also excludes a beginning of the tag. */
size_t reasoning_form_content_len(const struct reasoning_form *f, const char *p, size_t n,
                                  bool done);

#endif
