/*
 * store: one SQLite file that remembers everything a run did — runs, events, calls, adapters,
 * scores.
 *
 * WAL mode: a kill at any moment leaves the last committed state. Events are append-only. Calls are
 * keyed by the identity of a generation (request_key), so a call is never computed twice, and a
 * resumed run replays what it already has. One thread uses one handle; several processes may share
 * a file.
 */
#ifndef SHOAL_STORE_H
#define SHOAL_STORE_H

#include "base/base.h"

struct store;
struct store *store_open(const char *path, struct error *err);
void store_close(struct store *s);
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
int store_event(struct store *s, const char *run, const char *kind, const json_t *detail,
                struct error *err);

/* One generation and what came of it. */
struct stored_call {
    char key[HASH_LEN];
    int32_t choice, n_choices;
    float prob[8];
    int32_t n_prefilled, n_generated;
    uint8_t finish;
    char *text; /* the free-form part; malloc'ed by store_call_get; may be NULL */
};
int store_call_put(struct store *s, const struct stored_call *c,
                   struct error *err); /* the same key again is ignored */
bool store_call_get(struct store *s, const char *key, struct stored_call *out);

/* An adapter of a run: where it came from and how it did. Replaced when put again. */
int store_adapter_put(struct store *s, const char *run, int generation, const char *name,
                      const char *hash, const json_t *lineage, const json_t *scores,
                      struct error *err);
/* An array of {generation, name, hash, lineage, scores}, in order of insertion. */
json_t *store_adapter_list(struct store *s, const char *run, struct error *err);
/* A line of a run's table: {name, n, acc, lo, hi, …}. Replaced when put again. */
int store_result_put(struct store *s, const char *run, const char *name, const json_t *row,
                     struct error *err);

#endif
