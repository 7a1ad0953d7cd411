/*
 * store: one SQLite file that remembers everything a run did — runs, events, calls, adapters,
 * scores — and the logs and documents of those who keep their own.
 *
 * WAL mode: a kill at any moment leaves the last committed state. Events are append-only. Calls are
 * keyed by the identity of a generation (engine_request_key), so a call is never computed twice,
 * and a resumed run replays what it already has. One thread uses one handle; several processes may
 * share a file.
 */
#ifndef SHOAL_STORE_H
#define SHOAL_STORE_H

#include "base/base.h"

struct store;
struct store *store_open(const char *path, struct error *err);
void store_close(struct store *s);
/* Whether a commit returns only when it is on the disk (so that a power failure does not take it
 * back), from the next transaction on; a new handle's are only ordered. Not within a transaction.
 */
int store_set_synchronous(struct store *s, bool full, struct error *err);
/* Groups writes: all or none are kept. Not nested. */
int store_begin(struct store *s, struct error *err);
int store_commit(struct store *s, struct error *err);
void store_rollback(struct store *s);

/* A run: its id, what it is ("demo", "evolve"), its recipe as JSON, and "running", "done" or
 * "failed". */
int store_run_add(struct store *s, const char *id, const char *kind, const json_t *recipe,
                  struct error *err);
int store_run_status(struct store *s, const char *id, const char *status, struct error *err);
/* {kind, recipe, status, created}, or NULL with ERR_MISSING. */
json_t *store_run_get(struct store *s, const char *id, struct error *err);
/* An array of {id, kind, status, created}, newest first. */
json_t *store_run_list(struct store *s, struct error *err);

/* The ledger. */
int store_event_add(struct store *s, const char *run, const char *kind, const json_t *detail,
                    struct error *err);

/* What a run measured at a step, such as a line of a training log. Replaced when put again. */
int store_metric_put(struct store *s, const char *run, int64_t step, const json_t *row,
                     struct error *err);
/* Forgets what stands at steps after this one: the run continues from there. */
int store_metric_truncate(struct store *s, const char *run, int64_t step, struct error *err);
/* An array of the rows, by step. */
json_t *store_metric_list(struct store *s, const char *run, struct error *err);

/* One generation and what came of it. */
struct store_call {
    char key[HASH_LEN];
    int32_t choice, n_choices;
    float *prob; /* [n_choices] */
    int32_t n_prefilled, n_generated;
    uint8_t finish;
    char *text; /* the free-form part; may be NULL */
    /* Its tokens, where they are kept: the byte of the text that each ends before, and its
     * log-probability. */
    int32_t *ends, n_tokens;
    float *logprobs;
};
/* The same key again is ignored; tokens are added where there are none yet. */
int store_call_put(struct store *s, const struct store_call *c, struct error *err);
/* What it points to is malloc'ed; store_call_release frees it. */
bool store_call_get(struct store *s, const char *key, struct store_call *out);
void store_call_release(struct store_call *c);

/*
 * Recorded calls: one that was kept whole, to be run again. `call` is an object of
 * {model, model_hash, class, level, kv, lora, version} as text and {adapters, inputs, outputs} as
 * JSON (engine/record.h). The same key again is replaced.
 */
int store_record_put(struct store *s, const char *key, const json_t *call, struct error *err);
/* The call whose key begins with `prefix`, with "key" and "created" added; NULL with ERR_MISSING
 * when there is none and ERR_USAGE when there are several. */
json_t *store_record_get(struct store *s, const char *prefix, struct error *err);
/* An array of the same without inputs and outputs, newest first. */
json_t *store_record_list(struct store *s, struct error *err);

/* An adapter of a run: where it came from and how it did. Replaced when put again. */
int store_adapter_put(struct store *s, const char *run, int generation, const char *name,
                      const char *hash, const json_t *lineage, const json_t *scores,
                      struct error *err);
/* An array of {generation, name, hash, lineage, scores}, in order of insertion. */
json_t *store_adapter_list(struct store *s, const char *run, struct error *err);
/* A line of a run's table: {name, n, acc, lo, hi, …}. Replaced when put again. */
int store_result_put(struct store *s, const char *run, const char *name, const json_t *row,
                     struct error *err);

/*
 * Logs and documents, whose content is their owners' (swarm/blackboard.h, memory/memory.h).
 *
 * A log is events numbered from 1 without a gap, never changed. The array's events become seq,
 * seq + 1, …, all or none, also inside a transaction; ERR_STATE when there is one already, which
 * another process has put.
 */
int store_log_append(struct store *s, const char *log, int64_t seq, const json_t *events,
                     struct error *err);
/* An array of the events after `seq`, in order, at most `limit`. */
json_t *store_log_list(struct store *s, const char *log, int64_t seq, int64_t limit,
                       struct error *err);
/* Replaced when put again. NULL with ERR_MISSING when there is none. */
int store_document_put(struct store *s, const char *kind, const char *id, const json_t *value,
                       struct error *err);
json_t *store_document_get(struct store *s, const char *kind, const char *id, struct error *err);
/* An object of all of a kind, by id. */
json_t *store_document_list(struct store *s, const char *kind, struct error *err);
/* Deleting what is not there is no error. */
int store_document_delete(struct store *s, const char *kind, const char *id, struct error *err);

#endif
