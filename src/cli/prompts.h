/* prompts: prompts from the command line or a file, and their tokens. */
#ifndef SHOAL_CLI_PROMPTS_H
#define SHOAL_CLI_PROMPTS_H

#include "model/model.h"

struct prompt {
    char *text;   /* text to continue, a user's message, or `conversation` as JSON text */
    char *system; /* system message; may be NULL */
    bool chat;
    bool template_optional; /* with chat: `text` is continued if the model has no chat template */
    json_t *conversation;   /* {messages, tools?, chat_template_kwargs?}, which replaces text and
                               system; or NULL */
    json_t *check;          /* fields for a check (check/check.h), or NULL */
};
struct prompts {
    struct prompt *v;
    int n;
    size_t longest; /* upper bound of tokens per prompt */
};
/* Exactly one of prompt, chat and file is given. `extra` (JSON, or NULL) holds variables for the
 * chat template. */
int prompts_read(struct prompts *p, const char *prompt, const char *chat, const char *system,
                 const char *file, const char *extra, struct error *err);
/* One prompt per line, or JSON lines if the first line begins with '{'. Empty lines are skipped. */
int prompts_file(struct prompts *p, const char *path, struct error *err);
/* Calls fn for each line of stdin that is not blank, without white space at its end, until it
 * fails.
 */
int prompts_each_line(int (*fn)(void *ctx, const char *line, struct error *err), void *ctx,
                      struct error *err);
void prompts_add(struct prompts *p, const char *text, const char *system, bool chat);
void prompts_release(struct prompts *p);
int prompt_encode(const struct model *m, const struct prompt *p, struct token_ids *out,
                  struct error *err);

#endif
