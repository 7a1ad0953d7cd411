/*
 * lib: structs and helpers that the files of libshoal share. Each file implements one part of
 * include/shoal.h: it checks arguments, translates them, and calls the layer that does the work.
 */
#ifndef SHOAL_LIB_INTERNAL_H
#define SHOAL_LIB_INTERNAL_H

#include "shoal.h"

#include "engine/engine.h"

struct shoal {
    char *path; /* absolute */
    struct pool *pool;
    struct model *model;
    struct engine_options engine_options;
    int32_t named_len; /* max-model-len; 0: the context was chosen */
    struct engine *engine;
    struct shoal_server *server; /* uses model and engine; NULL: none runs */
};

/* A struct shoal_adapter is never defined: a pointer to it is a pointer to a struct adapter. */
static inline struct adapter *adapter_unwrap(const struct shoal_adapter *a) {
    return (struct adapter *)(uintptr_t)a;
}
static inline struct shoal_adapter *adapter_wrap(struct adapter *a) {
    return (struct shoal_adapter *)a;
}

/* Copies the error to the caller's struct (may be NULL); returns its code. */
int error_copy(struct shoal_error *out, const struct error *err);
/* ERR_STATE while a server uses the model. */
int model_check_idle(const struct shoal *s, struct error *err);
/* Encodes a conversation in the model's chat template; `mask` as for chat_encode. */
int messages_encode(const struct shoal *s, const struct shoal_message *messages, int n,
                    bool generation_prompt, struct token_ids *out, struct buf *mask,
                    struct error *err);
/* Fills the fields of `rows` in a struct with their defaults and then with the caller's options.
 * Release it with options_release, after an error too. */
int call_options_parse(const struct option_row *rows, void *out, const char *const *options,
                       struct error *err);
/* The same without the defaults: sets the given options only. */
int call_options_apply(const struct option_row *rows, void *out, const char *const *options,
                       struct error *err);
/* The rows with these names, and the aliases of these rows, as a table for call_options_parse;
 * malloc'ed. */
struct option_row *options_select(const struct option_row *rows, const char *const *names);
int numeric_class_choose(bool exact, bool fast, enum numeric_class *out, struct error *err);
/* The result of a call as JSON text for the caller; releases `v`. NULL if v is NULL. */
char *json_result(json_t *v);

/* Sends the thread's messages and progress to the caller, from call_begin to call_end. */
struct call {
    const struct shoal_callbacks *callbacks;
    struct log_sink sink, *outer; /* sink.cancelled: the progress function has cancelled */
};
void call_begin(struct call *c, const struct shoal_callbacks *callbacks);
/* Copies the error and returns rc. */
int call_end(struct call *c, int rc, const struct error *err, struct shoal_error *out);

#endif
