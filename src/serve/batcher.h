/*
 * batcher: the one thread that drives the engine, and everybody else's way to it.
 *
 * A call is a request of the engine with somebody who waits for it. Between two steps the thread
 * takes in what was submitted and cancelled, and after each it tells who has new tokens. Live calls
 * go first: a background call (a team's, an evaluation's) is given to the engine only while there
 * is room beside them.
 *
 * What is written in a call by the thread may be read by others as far as `seen` says: out,
 * out_logprob, top_ids, top_logprob before that many tokens; everything once `done`.
 */
#ifndef SHOAL_BATCHER_H
#define SHOAL_BATCHER_H

#include "engine/engine.h"

struct batcher;
struct batcher_request {
    struct engine_request request; /* filled as engine.h says; what it borrows lives until done */
    bool background;
    /* In the batcher's thread, after a step that added tokens and when done: must be quick. After
     * the call with done = true the batcher touches it no more: it may be freed there. */
    void (*changed)(struct batcher_request *c, bool done);
    void *user;

    /* the batcher's */
    struct batcher_request *next;
    int32_t seen; /* tokens that may be read: __atomic_load_n(…, __ATOMIC_ACQUIRE) */
    bool done;    /* the same: no more will come, all may be read */
    bool cancelled;
    bool starved; /* done because there was no memory for its results: it has none */
    double submitted, started, first, ended; /* clock_now; 0: not yet */
};

struct batcher_stats {
    int running, waiting, max_running; /* calls; who embeds waits, too */
    uint64_t steps, prefilled, generated, cached, cancelled;
    int32_t pages, pages_free; /* of the KV cache */
    double busy;               /* seconds in steps */
};

/* The engine is borrowed and belongs to the batcher's thread until batcher_free. max_waiting: calls
 * beyond which more are refused. */
struct batcher *batcher_new(struct engine *e, int max_waiting);
/* Cancels what is left: who waits in batcher_run or batcher_embed returns. Nobody may call it from
 * then on. */
void batcher_free(struct batcher *b);
/* ERR_USAGE: as engine_submit; ERR_STATE: too many wait. Nothing was submitted then. */
int batcher_submit(struct batcher *b, struct batcher_request *c, struct error *err);
/* All of them or none. */
int batcher_submit_all(struct batcher *b, struct batcher_request *const *c, int n,
                       struct error *err);
/* `changed` is called with done soon, with finish FINISH_NONE unless it was done already. The
 * caller knows that it lives. */
void batcher_cancel(struct batcher *b, struct batcher_request *c);
/* Submits all as background calls and waits: what an asker does. `stop` (may be NULL) ends it early
 * once true: ERR_STATE. ERR_MEMORY: one found no memory for its results. */
int batcher_run(struct batcher *b, struct engine_request *r, int n, const bool *stop,
                struct error *err);
/* engine_embed between two steps, which wait for it: few texts at once. ERR_STATE: it is being
 * freed. */
int batcher_embed(struct batcher *b, const struct token_seq *texts, int32_t n,
                  struct adapter *adapter, float *out, struct error *err);
struct batcher_stats batcher_stats(struct batcher *b);
/* Called in its thread after every step. Before anything is submitted. */
void batcher_on_step(struct batcher *b, void (*fn)(void *ctx, double seconds, int32_t rows),
                     void *ctx);

#endif
