/*
 * batcher: the one thread that drives the engine, and the interface through which other threads use
 * it.
 *
 * A call is an engine request with a thread that waits for it. Between two steps the batcher admits
 * submitted calls and drops cancelled ones; after each step it notifies the calls that have new
 * tokens. Live calls go first: a background call (of a team or an evaluation) is passed to the
 * engine only while live calls leave room.
 *
 * Other threads may read the results of a call as far as `seen` says: out, out_logprob, top_ids and
 * top_logprob before that many tokens; everything once `done` is set.
 */
#ifndef SHOAL_SERVE_BATCHER_H
#define SHOAL_SERVE_BATCHER_H

#include "engine/engine.h"

struct batcher;
struct batcher_request {
    struct engine_request request; /* filled as engine.h says; borrowed buffers live until done */
    bool background;
    /* Called in the batcher's thread, after a step that added tokens and when done: must be quick.
     * After the call with done = true the batcher does not touch the request: the callback may free
     * it. */
    void (*on_change)(struct batcher_request *c, bool done);
    void *user;

    /* private to the batcher */
    struct batcher_request *next;
    int32_t n_visible; /* tokens that may be read: __atomic_load_n(…, __ATOMIC_ACQUIRE) */
    bool done;         /* also atomic: no more tokens will come, everything may be read */
    bool cancelled;
    bool no_memory; /* done because there was no memory for its results, which are empty */
    double submitted, started, first, ended; /* clock_now; 0: not yet */
};

struct batcher_stats {
    int running, waiting, max_running; /* calls; waiting includes embedding tasks */
    uint64_t steps, prefilled, generated, cached, cancelled;
    int32_t pages, pages_free; /* pages of the KV cache */
    double busy;               /* seconds in steps */
};

/* The engine is borrowed and belongs to the batcher's thread until batcher_free. Beyond max_waiting
 * waiting calls, new ones are refused. */
struct batcher *batcher_new(struct engine *e, int max_waiting);
/* Cancels the remaining calls: batcher_run and batcher_embed return in the threads that wait in
 * them. No thread may call any function of the batcher from then on. */
void batcher_free(struct batcher *b);
/* ERR_USAGE: as engine_submit; ERR_STATE: too many calls wait. On an error nothing is submitted. */
int batcher_submit(struct batcher *b, struct batcher_request *c, struct error *err);
/* Submits all calls or none. */
int batcher_submit_all(struct batcher *b, struct batcher_request *const *c, int n,
                       struct error *err);
/* `changed` is soon called with done = true and finish FINISH_NONE, unless the call was done
 * already. The caller ensures that the request is still alive. */
void batcher_cancel(struct batcher *b, struct batcher_request *c);
/* Submits all requests as background calls and waits for them. `stop` (may be NULL) ends this early
 * once true: ERR_STATE. ERR_MEMORY: no memory was left for the results of one request. */
int batcher_run(struct batcher *b, struct engine_request *r, int n, const bool *stop,
                struct error *err);
/* Runs engine_embed between two steps, which wait for it, so pass few texts at once. ERR_STATE: the
 * batcher is being freed. */
int batcher_embed(struct batcher *b, const struct token_seq *texts, int32_t n,
                  struct adapter *adapter, float *out, struct error *err);
struct batcher_stats batcher_stats(struct batcher *b);
/* fn is called in the batcher's thread after every step. Call this before any submission. */
void batcher_on_step(struct batcher *b, void (*fn)(void *ctx, double seconds, int32_t rows),
                     void *ctx);

#endif
