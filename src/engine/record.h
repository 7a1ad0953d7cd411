/*
 * record: a call as JSON, for keeping, for running again, and for saying what differs.
 *
 * A call's identity (record_key) covers everything its result depends on, so that a record can be
 * proved by running it anew. Pure but for the recorder, which writes finished requests to a store
 * as the engine hands them over; one thread.
 */
#ifndef SHOAL_RECORD_H
#define SHOAL_RECORD_H

#include "engine/engine.h"
#include "store/store.h"

/* engine_request_key, and where the KV cache or adapters are held in other elements than f32, a hash that
 * covers these too. */
void record_key(const struct engine_request *r, const char *model_hash, enum numeric_class cls, enum dtype kv,
              enum dtype lora, char out[HASH_LEN]);
const char *finish_reason_name(enum finish_reason f); /* "stop" */
const char *numeric_class_name(enum numeric_class cls);
const char *dtype_name(enum dtype e);
/* A number, or "inf", "-inf" or "nan", which JSON's numbers leave out. */
json_t *json_from_float(float v);

/* Everything a caller sets but adapters; everything the engine answers. */
json_t *record_inputs_json(const struct engine_request *r);
json_t *record_outputs_json(const struct engine_request *r);
/* The inverse of record_inputs_json: arrays come from `arena`, the grammar (or NULL) is the caller's to
 * free. The error says what is wrong. */
int record_inputs_parse(const json_t *inputs, struct arena *arena, struct engine_request *out,
                  struct grammar **grammar, struct error *err);
/* What differs between two record_outputs_json, a line each: fields, and the first token and
 * log-probability of a list. False: nothing. */
bool record_outputs_diff(const json_t *was, const json_t *now, struct buf *what);

/* Adapters by their content, so that a record can say where they were. */
struct recorded_adapter {
    const char *path;
    struct adapter *adapter;
};
struct recorder {
    struct store *store;
    const struct model *model;
    const char *model_path, *model_hash;
    enum dtype kv, lora;
    const struct recorded_adapter *adapters;
    int n_adapters;
    int64_t n;        /* calls written */
    struct error err; /* the first that failed; nothing is written after it */
};
/* For engine_options.finished. */
void recorder_finished(void *recorder, const struct engine_request *r);
/* [{path, hash, weight} or {noise: {seed, member}, weight}]. */
json_t *record_adapters_json(const struct engine_request *r, const struct recorded_adapter *named, int n);

#endif
