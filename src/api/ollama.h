/*
 * ollama: functions that the two files of Ollama's API share. ollama.c generates text and lists
 * models; ollama_models.c creates derived models.
 *
 * A derived model is a JSON object: the fields of /api/create merged with those of the model that
 * it was derived from, so that it does not depend on that model:
 *   name, parent           parent: the field `from` of the request
 *   adapters               [path, "sha256:…" or {file name: "sha256:…"}], summed; may be absent
 *   template, jinja        as given, and translated; jinja absent: the base's template
 *   system, license        texts
 *   parameters             Ollama's options by name
 *   messages               put before those of a conversation
 */
#ifndef SHOAL_API_OLLAMA_H
#define SHOAL_API_OLLAMA_H

#include "serve/generation.h"

/* Reads the field "model", or its older name "name". ERR_USAGE: both are missing. */
int ollama_name(const json_t *body, const char **name, struct error *err);
/* Like model_ref_resolve, for a required name and with Ollama's error messages. */
int ollama_target(struct server *s, const char *name, struct model_ref *t, struct error *err);
/* Reads Ollama's options into sampling, stops, max_tokens and the context shift, of which the field
 * `shift` of the body (may be NULL) decides. Options that only control how a model is loaded
 * (num_thread, use_mmap …) are ignored. */
int ollama_options_read(const struct server *s, const json_t *body, const json_t *options,
                        struct generation_spec *spec, struct error *err);
/* Adds the derived model's messages, template and system message to a chat body in OpenAI's form,
 * unless the body has its own template or system message. */
void ollama_derived_apply(const json_t *derived, json_t *chat);
/* Translates a template to Jinja for this server's model; NULL on an error, ERR_USAGE. */
char *ollama_template_to_jinja(const struct server *s, const char *template, struct error *err);
/* Parses a Modelfile into the fields of /api/create, in the object `out`. At most 1 MiB. */
int ollama_modelfile(const char *text, json_t *out, struct error *err);
/* Finds an adapter by name in the list [n]; NULL: none. */
const struct adapter_entry *ollama_find_adapter(const struct adapter_entry *v, int n,
                                                const char *name);

void ollama_create_handle(void *ctx, struct exchange *x);
void ollama_copy_handle(void *ctx, struct exchange *x);
void ollama_delete_handle(void *ctx, struct exchange *x);
void ollama_blob_handle(void *ctx, struct exchange *x); /* HEAD */
void ollama_upload_handle(void *ctx, struct exchange *x);

#endif
