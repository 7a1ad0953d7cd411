/*
 * store: one SQLite file that records runs (their events, metrics, calls, adapters, scores) and
 * holds the logs and documents of other modules.
 *
 * WAL mode: after a kill at any moment the file holds the last committed state. Events are
 * append-only. A call is one generation, and its key is the generation's identity
 * (engine_request_key). A resumed run takes the calls that are stored already from here instead of
 * computing them again.
 *
 * Threads. One thread at a time uses a handle; several handles and processes may use one file.
 */
#ifndef SHOAL_STORE_H
#define SHOAL_STORE_H

#include "base/base.h"

struct store;
/* Opens the file, or creates it with mode 0600; ":memory:" is a database without a file. If the
 * last process that wrote to the file ended without store_close, and no process has the file open,
 * the whole file is checked. ERR_MISMATCH: a newer version has made the file. ERR_FORMAT: the file
 * is damaged; it is not changed, and store_salvage copies the readable rows. */
struct store *store_open(const char *path, struct error *err);
/* Opens an existing file for functions that only read. It creates no file and does not change the
 * database. */
struct store *store_open_read_only(const char *path, struct error *err);
void store_close(struct store *s);
/* Copies all rows of a store that can be read to a new file `to`, which must not exist. `from` is
 * not changed. *report receives {from, to, rows, damaged, tables: [{table, rows, rejected, gaps:
 * [{after, before}], error}]} A gap is a range of keys, between those two and without them, in
 * which no row could be read; a bound is an array with the values of the key, null at the ends of
 * the table. `rejected` counts rows that were read, but have impossible values. `error` is the
 * first error or null, and `damaged` the number of tables that have one. ERR_FORMAT: nothing can be
 * read; then there is no new file. */
int store_salvage(const char *from, const char *to, json_t **report, struct error *err);
/* Sets the WAL mode of a database that the caller has opened. Waits for processes that open the
 * same new file: SQLite itself does not wait before it changes the mode. Returns SQLite's code. */
struct sqlite3;
int store_set_wal(struct sqlite3 *db);
/* With `full`, a commit returns only when it is on the disk, so that it survives a power failure.
 * Without it (the default of a new handle), a power failure may lose the last commits, but the file
 * stays consistent. Must not be called within a transaction. */
int store_set_synchronous(struct store *s, bool full, struct error *err);
/* A transaction: all of its writes are stored, or none. Transactions are not nested. */
int store_begin(struct store *s, struct error *err);
int store_commit(struct store *s, struct error *err);
void store_rollback(struct store *s);

/* Adds a run: its id, its kind ("demo", "evolve") and its recipe as JSON. Its status is "running"
 * until store_run_status sets "done" or "failed" (ERR_MISSING: no such run). */
int store_run_add(struct store *s, const char *id, const char *kind, const json_t *recipe,
                  struct error *err);
/* Adds the run, or sets the status of the one that it continues. */
int store_run_begin(struct store *s, const char *id, const char *kind, const json_t *recipe,
                    struct error *err);
int store_run_status(struct store *s, const char *id, const char *status, struct error *err);
/* {kind, recipe, status, created}, or NULL with ERR_MISSING. */
json_t *store_run_get(struct store *s, const char *id, struct error *err);
/* An array of {id, kind, status, created}, newest first. runs: the folder of the runs; a run that
 * is "running" in the database, but whose folder no process has locked, is "interrupted". */
json_t *store_run_list(struct store *s, const char *runs, struct error *err);

/* Appends an event, with the current time, to the events of a run. */
int store_event_add(struct store *s, const char *run, const char *kind, const json_t *detail,
                    struct error *err);

/* Stores the metrics of a run at a step, such as a line of a training log, and replaces those
 * stored before. */
int store_metric_put(struct store *s, const char *run, int64_t step, const json_t *row,
                     struct error *err);
/* Deletes the metrics of all steps after `step`, when a run continues from that step. */
int store_metric_truncate(struct store *s, const char *run, int64_t step, struct error *err);
/* An array of the rows, ordered by step. */
json_t *store_metric_list(struct store *s, const char *run, struct error *err);

/* One generation and its result. */
struct store_call {
    char key[HASH_LEN];
    int32_t choice, n_choices;        /* index of the most probable choice; number of choices */
    float *prob;                      /* [n_choices] probabilities of the choices */
    int32_t n_prefilled, n_generated; /* tokens */
    uint8_t finish;                   /* enum finish_reason */
    char *text;                       /* the free-form part of the output; may be NULL */
    /* The tokens of `text`, if they are kept: each token ends before byte ends[i] of `text` and has
     * the log-probability logprobs[i]. Both arrays have n_tokens elements. */
    int32_t *ends, n_tokens;
    float *logprobs;
};
/* Stores a call. If its key exists already, the stored call is kept; tokens are added to a stored
 * call without tokens. */
int store_call_put(struct store *s, const struct store_call *c, struct error *err);
/* Returns false if there is no such call, or after an error. store_call_release frees the pointers
 * in `out`. */
bool store_call_get(struct store *s, const char *key, struct store_call *out);
void store_call_release(struct store_call *c);

/*
 * Recorded calls: calls that are stored in full and can be run again. `call` is an object of
 * {model, model_hash, class, level, kv, lora, version} as text and {adapters, inputs, outputs} as
 * JSON (engine/engine.h). A call with the same key is replaced.
 */
int store_record_put(struct store *s, const char *key, const json_t *call, struct error *err);
/* The call whose key begins with `prefix`, with "key" and "created" added. NULL with ERR_MISSING if
 * no key begins so, and with ERR_USAGE if several keys do. */
json_t *store_record_get(struct store *s, const char *prefix, struct error *err);
/* An array of all recorded calls without inputs and outputs, newest first. */
json_t *store_record_list(struct store *s, struct error *err);

/* Stores an adapter of a run with its lineage and scores, or replaces the adapter of this
 * generation and name. */
int store_adapter_put(struct store *s, const char *run, int generation, const char *name,
                      const char *hash, const json_t *lineage, const json_t *scores,
                      struct error *err);
/* An array of {generation, name, hash, lineage, scores}, in order of insertion. */
json_t *store_adapter_list(struct store *s, const char *run, struct error *err);
/* Stores a row of a run's results table, {name, n, acc, lo, hi, …}, and replaces the row of this
 * name. */
int store_result_put(struct store *s, const char *run, const char *name, const json_t *row,
                     struct error *err);

/*
 * Logs and documents. Their content is defined by other modules (swarm/swarm.h, memory/memory.h).
 *
 * A log is a sequence of events numbered from 1 without a gap; events never change.
 * store_log_append stores the events of the array as seq, seq + 1, …, all or none, also inside a
 * transaction. If one of these numbers exists already, because another process has appended, it
 * fails with ERR_STATE.
 */
int store_log_append(struct store *s, const char *log, int64_t seq, const json_t *events,
                     struct error *err);
int store_log_delete(struct store *s, const char *log, struct error *err);
/* An array of at most `limit` events, in order, whose numbers are above `seq`. */
json_t *store_log_list(struct store *s, const char *log, int64_t seq, int64_t limit,
                       struct error *err);
/* store_document_put replaces a document with the same kind and id. store_document_get returns NULL
 * with ERR_MISSING if the document does not exist. */
int store_document_put(struct store *s, const char *kind, const char *id, const json_t *value,
                       struct error *err);
json_t *store_document_get(struct store *s, const char *kind, const char *id, struct error *err);
/* An object of all documents of a kind, keyed by id. */
json_t *store_document_list(struct store *s, const char *kind, struct error *err);
/* An object of the documents of a kind whose id begins with `prefix`, keyed by id: an array of the
 * values at STORE_PATHS JSON paths ("$.title"); null where a document has no value or the path is
 * NULL. */
enum { STORE_PATHS = 4 };
json_t *store_document_extract(struct store *s, const char *kind, const char *prefix,
                               const char *const paths[STORE_PATHS], struct error *err);
/* *n receives the number of these documents. */
int store_document_count(struct store *s, const char *kind, const char *prefix, int64_t *n,
                         struct error *err);
/* Deleting a missing document is not an error. */
int store_document_delete(struct store *s, const char *kind, const char *id, struct error *err);

#endif
