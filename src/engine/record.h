/*
 * record: a call as JSON, for keeping, for running again, and for saying what differs.
 *
 * A call's identity (call_key) covers everything its result depends on, so that a record can be
 * proved by running it anew. Pure but for the recorder, which writes finished requests to a store
 * as the engine hands them over; one thread.
 */
#ifndef SHOAL_RECORD_H
#define SHOAL_RECORD_H

#include "engine/engine.h"
#include "store/store.h"

/* request_key, and where the KV cache or adapters are held in other elements than f32, a hash that
 * covers these too. */
void call_key(const struct request *r, const char *model_hash, enum numeric_class cls, enum elem kv,
              enum elem lora, char out[HASH_LEN]);
const char *finish_name(enum finish f); /* "stop" */
const char *class_name(enum numeric_class cls);
const char *elem_name(enum elem e);
/* A number, or "inf", "-inf" or "nan", which JSON's numbers leave out. */
json_t *real_json(float v);

/* Everything a caller sets but adapters; everything the engine answers. */
json_t *request_inputs(const struct request *r);
json_t *request_outputs(const struct request *r);
/* The inverse of request_inputs: arrays come from `arena`, the grammar (or NULL) is the caller's to
 * free. The error says what is wrong. */
int request_parse(const json_t *inputs, struct arena *arena, struct request *out,
                  struct grammar **grammar, struct error *err);
/* What differs between two request_outputs, a line each: fields, and the first token and
 * log-probability of a list. False: nothing. */
bool outputs_differ(const json_t *was, const json_t *now, struct buf *what);

/* Adapters by their content, so that a record can say where they were. */
struct named_adapter {
    const char *path;
    struct adapter *adapter;
};
struct recorder {
    struct store *store;
    const struct model *model;
    const char *model_path, *model_hash;
    enum elem kv, lora;
    const struct named_adapter *adapters;
    int n_adapters;
    int64_t n;        /* calls written */
    struct error err; /* the first that failed; nothing is written after it */
};
/* For engine_options.finished. */
void recorder_finished(void *recorder, const struct request *r);
/* [{path, hash, weight} or {noise: {seed, member}, weight}]. */
json_t *request_adapters(const struct request *r, const struct named_adapter *named, int n);

#endif
