/*
 * tool_calls: the tool calls in the text of a reply, in the forms of several families of models.
 *
 * The form is that of the chat template, which has its tags. Arguments are a part of the text, so
 * that a stream can send them while they grow.
 */
#ifndef SHOAL_SERVE_TOOL_CALLS_H
#define SHOAL_SERVE_TOOL_CALLS_H

#include "tokenizer/tokenizer.h"

struct tool_call {
    char id[32], *name;
    size_t args, args_end; /* byte offsets into the text; args_end 0: the call continues */
    size_t sent;           /* bytes of the arguments sent so far */
    bool start_sent;       /* the start of the call was sent */
};

struct tool_form {
    const char *open;      /* tag before a call, or before a list of calls */
    const char *close;     /* tag after a call; NULL: it ends with its JSON value */
    const char *separator; /* between a name and its arguments; NULL: a call is {name, arguments} */
    const char *begin;     /* tag before the first call, or NULL */
};
/* Length of the longest suffix of a text that is a beginning of `tag`, but not all of it. */
size_t tag_partial_match(const char *text, size_t n, const char *tag);
const char *skip_whitespace(const char *p, const char *end);

/* NULL: the template of a model without one. Without tags: the form of Hermes and Qwen. */
const struct tool_form *tool_form_find(const char *chat_template);
/* Whether a token is one of the form's tags, whose text is needed although it is special. */
bool tool_form_has_token(const struct tool_form *f, const struct tokenizer *tok, int32_t id);
/* Length of the suffix of a text that may begin a tag before a call. */
size_t tool_form_holdback(const struct tool_form *f, const char *text, size_t n);
/* The begin of the tags before the first call in [p, end); NULL: there are none. */
const char *tool_form_first(const struct tool_form *f, const char *p, const char *end);
/* The begin of the next call in [p, end). `follows`: p is the end of another call, after which the
 * next one of a list needs no tag. NULL: there is none yet. */
const char *tool_form_next(const struct tool_form *f, const char *p, const char *end, bool follows);
/* Parses the call at `p`, which may be incomplete: sets the name and the place of the arguments in
 * `text`. Returns its end with the closing tag, or NULL if it is incomplete. */
const char *tool_call_parse(const struct tool_form *f, const char *text, const char *p,
                            const char *end, struct tool_call *c);
/* As tool_call_parse for a call {"name": …, "arguments": …} without tags. */
const char *tool_call_parse_json(const char *text, const char *p, const char *end,
                                 struct tool_call *c);

#endif
