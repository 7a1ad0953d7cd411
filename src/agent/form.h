/*
 * form: how a model writes the call of a tool (form.c).
 */
#ifndef SHOAL_AGENT_FORM_H
#define SHOAL_AGENT_FORM_H

#include "agent/agent.h"
#include "template/template.h"

struct agent_call_form {
    bool react;
    int n_tools;
    json_t *tools;              /* as in a chat request */
    struct token_ids *openings; /* [n_tools + 1] tokens that begin the call of each tool; the last
                                   begins an answer: "Answer:", and no tokens in the native form */
    struct token_seq *seqs;     /* [n_tools + 1] the same */
    char *explanation;          /* explains the form REACT in the system message; else NULL */
    struct grammar **grammars;  /* [n_tools] of the arguments, with the text that ends a call */
    char *stop; /* ends free text: it begins a call, or the result that only a tool writes. NULL
                   without tools in the native form */
};
/* The caller releases it also after an error. ERR_USAGE: the form is AGENT_NATIVE, and the template
 * does not know tools. */
int agent_call_form_init(struct agent_call_form *f, enum agent_form form, const struct model *m,
                         const struct agent_tools *t, struct error *err);
void agent_call_form_release(struct agent_call_form *f);
/* A copy of a conversation with a system message of `system_text` (may be NULL), the conversation's
 * own system message and the explanation of the form. */
json_t *agent_call_form_conversation(const struct agent_call_form *f, const char *system_text,
                                     const json_t *messages);
/* Appends a call and its result to a conversation. */
void agent_call_form_add(const struct agent_call_form *f, json_t *messages, const char *thought,
                         const struct agent_tool *tool, const json_t *arguments,
                         const char *observation);
void agent_call_form_add_answer(const struct agent_call_form *f, json_t *messages,
                                const char *thought, const char *answer);
/* {messages, tools}, as a chat request or a line of training data; the form REACT has no tools. */
json_t *agent_call_form_request(const struct agent_call_form *f, json_t *messages);

#endif
