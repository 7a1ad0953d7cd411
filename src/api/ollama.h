/*
 * ollama: what the two files of Ollama's API share. ollama.c answers for the models that there are,
 * ollama_models.c makes new ones of them.
 *
 * A made model is a JSON object: what /api/create was told, with everything of the model that it
 * was made from already in it, so that it stands alone:
 *   name, parent           the latter as `from` said it
 *   adapters               [path, "sha256:…" or {file name: "sha256:…"}], summed; may be absent
 *   template, jinja        as it was given, and as it is run; the latter absent: the base's own
 *   system, license        texts
 *   parameters             Ollama's options by name
 *   messages               before those of a conversation
 */
#ifndef SHOAL_OLLAMA_H
#define SHOAL_OLLAMA_H

#include "serve/generation.h"

/* The text under "model", or under "name" as it was called before; ERR_USAGE: neither. */
int ollama_name(const json_t *body, const char **name, struct error *err);
/* As model_ref_resolve, of a name that must be there, in Ollama's words. */
int ollama_target(struct server *s, const char *name, struct model_ref *t, struct error *err);
/* Ollama's options into sampling, stops and max_tokens. What only says how to load a model
 * (num_thread, use_mmap …) is another's business and ignored. */
int ollama_options_read(const struct server *s, const json_t *options, struct generation_spec *spec,
                        struct error *err);
/* Puts the model's messages, its system message where there is none, and its template into a chat
 * body of OpenAI's form. */
void ollama_derived_apply(const json_t *made, json_t *chat);
/* The translation for this server's model; NULL and ERR_USAGE. */
char *ollama_template_to_jinja(const struct server *s, const char *template, struct error *err);
/* A Modelfile as the fields of /api/create, put into `out`, an object. At most 1 MiB. */
int ollama_modelfile(const char *text, json_t *out, struct error *err);
/* The adapter of that name in a copy of the list, or NULL. */
const struct adapter_entry *ollama_find_adapter(const struct adapter_entry *v, int n,
                                                const char *name);

void ollama_create_handle(void *ctx, struct exchange *x);
void ollama_copy_handle(void *ctx, struct exchange *x);
void ollama_delete_handle(void *ctx, struct exchange *x);
void ollama_blob_handle(void *ctx, struct exchange *x); /* HEAD */
void ollama_upload_handle(void *ctx, struct exchange *x);

#endif
