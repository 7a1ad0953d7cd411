/* api/internal: what the files of the APIs share. */
#ifndef SHOAL_API_INTERNAL_H
#define SHOAL_API_INTERNAL_H

#include "serve/request_fields.h"
#include "serve/server.h"

extern const struct server_module openai_module, vllm_module, llamacpp_module, ollama_module,
    ask_module, jobs_module, system_module, worlds_module, page_module, backups_module;

void web_ui_handle(void *ctx, struct exchange *x); /* web_ui.c: what browsers get at / too */

/* ollama_models.c */

/* Those that were made before, from state_dir; who cannot be made again is left out, aloud. */
void ollama_models_load(struct server *s);
/* Where an uploaded blob goes, for http's sink: NULL for other routes. */
struct body_sink *ollama_sink(struct server *s, struct exchange *x, const struct http_route *r);
/* What the target was made with, into a chat body of OpenAI's form as far as that does not say
 * otherwise. */
void derived_settings_apply(struct server *s, const struct model_ref *t, json_t *body);

/* llamacpp.c: {content} as its tokens */
void llamacpp_tokenize(struct server *s, struct exchange *x, const json_t *body);

/* openai.c: for other APIs too */

struct generation_spec;
/* Bodies as requests: whom they ask and for what, the caller's also after an error. */
int openai_chat_read(struct server *s, json_t *body, struct model_ref *t,
                     struct generation_spec *spec, struct error *err);
int openai_completion_read(struct server *s, const json_t *body, struct model_ref *t,
                           struct generation_spec *spec, struct error *err);
int vllm_tokenize_read(const struct server *s, struct exchange *x, json_t *body,
                       struct token_ids *out, struct error *err);

/* A string, strings, ids, or lists of ids, 1 to `most`: [*n], the caller's also after an error. */
int prompts_tokenize(const struct server *s, const json_t *v, int most, struct token_ids **out,
                     int *n, struct error *err);
/* [n][D], malloc'ed into *out; then the first `dims` of a vector, at length 1. A few texts at a
 * time, between which others are served; ERR_STATE: the client has gone. */
int embed_texts(struct server *s, struct exchange *x, const struct model_ref *t,
                const struct token_ids *texts, int n, float **out, struct error *err);
void embedding_truncate(float *v, int dims);

#endif
