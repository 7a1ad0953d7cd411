/* prompts: the texts that a command line or a file gives, and their tokens. */
#ifndef SHOAL_PROMPTS_H
#define SHOAL_PROMPTS_H

#include "model/model.h"

struct prompt {
    char *text;   /* to be continued, a user's message, or `talk` as text */
    char *system; /* before a message; may be NULL */
    bool chat;
    json_t
        *talk; /* {messages, tools?, chat_template_kwargs?} instead of text and system, or NULL */
};
struct prompts {
    struct prompt *v;
    int n;
    size_t longest; /* tokens that one can have at most */
};
/* Exactly one of prompt, chat and file is given. `extra` (JSON, or NULL) is what a chat template
 * gets beside the messages. */
int prompts_read(struct prompts *p, const char *prompt, const char *chat, const char *system,
                 const char *file, const char *extra, struct error *err);
/* A prompt a line, or JSON lines when the first line begins with '{'. Empty lines are none. */
int prompts_file(struct prompts *p, const char *path, struct error *err);
void prompts_add(struct prompts *p, const char *text, const char *system, bool chat);
void prompts_release(struct prompts *p);
int prompt_encode(const struct model *m, const struct prompt *p, struct token_ids *out,
                  struct error *err);

#endif
