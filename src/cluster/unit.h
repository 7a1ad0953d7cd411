/*
 * unit: the calls of a unit of work, their results, and adapters, as bytes for the bus.
 *
 * A call is the JSON of a record (engine/engine.h) with its adapters by hash. A result has every
 * output of the call, so the bytes of equal results are equal, and their hash is that of the
 * result.
 */
#ifndef SHOAL_CLUSTER_UNIT_H
#define SHOAL_CLUSTER_UNIT_H

#include "engine/engine.h"

enum {
    UNIT_CALLS = 64, /* usual maximum of the calls of a unit */
    UNIT_CALLS_MAX = 1024,
    UNIT_ADAPTERS_MAX = 256, /* distinct ones in a unit */
};

/* Hash of the conditions that the bits of a call depend on: SHA-256 over the model's hash, the
 * numeric class, and the element types of the KV cache and of adapters. */
void unit_identity(const struct engine *e, const struct model *m, char out[HASH_LEN]);
/* SHA-256 over the keys of n calls. */
void unit_id(struct engine_request *const *calls, int n, const char *identity, char out[HASH_LEN]);

void unit_calls_write(struct engine_request *const *calls, int n, struct buf *out);
struct unit_calls {
    struct engine_request *v;
    struct weighted_adapter (*mixes)[ENGINE_MIX_MAX]; /* [n] */
    struct grammar **grammars;                        /* [n] */
    int n;
    struct arena arena;
    json_t *json;
};
/* Parses calls; the adapters are not set. ERR_FORMAT: the bytes are not a list of calls. The caller
 * releases `out` also after an error. */
int unit_calls_parse(const uint8_t *data, size_t len, struct unit_calls *out, struct error *err);
/* Adds the hashes of all adapters, each once. */
void unit_calls_adapters(const struct unit_calls *u, struct strings *hashes);
/* Sets the adapters; `find` returns the one of a hash, which outlives the calls. False: it has
 * returned NULL. */
bool unit_calls_set_adapters(struct unit_calls *u, struct adapter *(*find)(void *ctx, const char *),
                             void *ctx);
void unit_calls_release(struct unit_calls *u);

void unit_results_write(const struct engine_request *reqs, int n, struct buf *out);
/* Fills in the results of n calls without results; a NULL is skipped. ERR_FORMAT: they are not
 * those of these calls; then no call has results. */
int unit_results_parse(const struct engine *e, const uint8_t *data, size_t len,
                       struct engine_request *const *calls, int n, struct error *err);

/* Streamed units have one call, which has arrays for its results (struct engine_remote). A part is
 * the tokens of a call from position `from` on. The merges are those of engine/engine.h. */
void unit_part_write(const struct engine_request *r, int32_t from, struct buf *out);
int unit_part_merge(const struct engine *e, const uint8_t *data, size_t len, int32_t at,
                    struct engine_request *r, struct error *err);
int unit_result_merge(const struct engine *e, const uint8_t *data, size_t len,
                      struct engine_request *r, struct error *err);

/* An adapter as its two files, one after the other, each after its length (64 bits, little-endian).
 */
int adapter_to_bytes(const struct adapter *a, struct buf *out, struct error *err);
/* Opens an adapter for a model. ERR_MISMATCH: its hash is not `hash`. */
struct adapter *adapter_from_bytes(const uint8_t *data, size_t len, const char *hash,
                                   struct model *m, struct error *err);

#endif
