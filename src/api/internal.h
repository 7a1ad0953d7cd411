/* api: declarations that the files of the APIs share. */
#ifndef SHOAL_API_INTERNAL_H
#define SHOAL_API_INTERNAL_H

#include "serve/request_fields.h"
#include "serve/server.h"

extern const struct server_module ab_module, openai_module, vllm_module, llamacpp_module,
    ollama_module, ask_module, conversations_module, jobs_module, system_module, worlds_module,
    page_module, backups_module, knowledge_module, memories_module, sleep_module, mcp_module,
    cluster_module;

void web_ui_handle(void *ctx,
                   struct exchange *x); /* web_ui.c: serves the web page, also at / for browsers */

/* ollama_models.c */

/* Loads the derived models from state_dir. Those that cannot be loaded are skipped with a
 * warning. */
void ollama_models_load(struct server *s);
/* The sink for the body of a blob upload; NULL: the route is not an upload, or the digest is
 * invalid. */
struct body_sink *ollama_sink(struct server *s, struct exchange *x, const struct http_route *r);
/* If t is a derived model, adds its settings to a body in OpenAI's form; fields that the body sets
 * take precedence. */
void derived_settings_apply(struct server *s, const struct model_ref *t, json_t *body);

/* conversations.c: the conversations of /v1/ask */

enum { MAX_QUESTION_BYTES = 1 << 16 };

/* The store of all conversations. */
struct store *conversations_open(const struct server *s, struct error *err);
/* The id in the store of the conversation `id` of a request's key: "KEY/ID", malloc'ed. */
char *conversation_store_id(const struct exchange *x, const char *id);
/* Whether an exchange may be added to the conversation with this id in the store; otherwise replies
 * 507: all conversations together, those of the key, or their number have reached the limit. */
bool conversation_admit(struct server *s, struct exchange *x, const char *store_id);

/* memories.c: long-term memories, if the server has --memory */

struct store;
/* Learns from the user's text of an exchange of a conversation in `store`. An error is logged and
 * changes nothing. store_id: see conversation_store_id. */
void memories_learn_exchange(struct server *s, struct store *store, const char *store_id,
                             int64_t number);
/* Deletes a conversation from `store`, and the memories whose source it is. ERR_MISSING: it does
 * not exist, and has no memories. */
int memories_delete_with_conversation(struct server *s, struct store *store, const char *store_id,
                                      struct error *err);

/* The user whose memories a key (NULL or "": none) has; malloc'ed. */
char *memories_user(const char *key);
/* The user of a request; malloc'ed. NULL: this server has no memories, and the reply is sent. */
char *memories_request_user(const struct server *s, struct exchange *x);
/* All memories of a user; `ended`: also those that no longer hold. Reserves memory for a request
 * (NULL: there is none). NULL sets err. */
json_t *memories_of(struct server *s, struct exchange *x, const char *user, bool ended,
                    struct error *err);

/* sleep.c: memories become weights */

struct job_attempt;
/* See jobs_options.prepare. ctx: the server. */
int sleep_job_prepare(void *ctx, const struct job_attempt *a, json_t *options, char **permissions,
                      struct error *err);
/* Deletes the export of a job of this kind that has ended. */
void sleep_job_ended(struct server *s, const char *id);
/* Whether the model `sleep` exists for the caller of a request. */
bool sleep_model_exists(const struct server *s, const struct exchange *x);

/* llamacpp.c */

/* Tokenizes the body's field `content` and replies with the tokens. */
void llamacpp_tokenize(struct server *s, struct exchange *x, const json_t *body);
/* The defaults and lower bounds of sampling fields that differ between llama.cpp and Ollama. A
 * negative seed means a random seed; a negative temperature is read as 0. */
struct llamacpp_sampling {
    double min_temperature, top_p, min_p;
    int64_t min_seed;
};
int llamacpp_sampling_read(const json_t *o, const struct llamacpp_sampling *defaults,
                           struct sampling_params *out, struct error *err);
/* ERR_USAGE: the object has a sampler that is not supported and would change the reply. */
int llamacpp_samplers_reject(const json_t *o, struct error *err);

/* openai.c: used by other APIs too */

struct generation_spec;
/* Parse a body into a model_ref and a generation_spec, which the caller releases, even after an
 * error. */
int openai_chat_read(struct server *s, json_t *body, struct model_ref *t,
                     struct generation_spec *spec, struct error *err);
int openai_completion_read(struct server *s, const json_t *body, struct model_ref *t,
                           struct generation_spec *spec, struct error *err);
int vllm_tokenize_read(const struct server *s, struct exchange *x, json_t *body,
                       struct token_ids *out, struct error *err);

/* Tokenizes a prompt field (a string, strings, ids, or lists of ids) into 1 to
 * `max_prompts` prompts, [*n], which the caller releases, even after an error. */
int prompts_tokenize(const struct server *s, const json_t *v, int max_prompts,
                     struct token_ids **out, int *n, struct error *err);
/* Computes the embeddings [n][D] of n texts, malloc'ed into *out. Computes a few texts at a time,
 * so that other requests run in between. ERR_STATE: the client disconnected. */
int embed_texts(struct server *s, struct exchange *x, const struct model_ref *t,
                const struct token_ids *texts, int n, float **out, struct error *err);
/* The variables by which chat templates turn reasoning on or off, as a new object. */
json_t *thinking_variables(bool on);
/* Scales the first `dims` values of a vector to length 1. */
void embedding_truncate(float *v, int dims);

/* jobs.c */

/* Whether a job of this state has ended. */
bool job_state_is_final(const char *state);
/* Checks that an adapter from this path may be served under the name: the name is free, or
 * belongs to this path already, or the job's key may replace any adapter. */
int job_adapter_name_check(struct server *s, const char *name, const char *path,
                           bool may_replace_any, struct error *err);

/* train_job.c: callbacks of jobs for trainings in the server's process; ctx is the server. */
struct job_run;
int train_job_check(void *ctx, const json_t *request, char field[64], struct error *err);
int train_job_run(void *ctx, const struct job_run *r, struct error *err);

#endif
