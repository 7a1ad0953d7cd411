/*
 * batcher: the thread that drives the engine, and the interface through which other threads submit
 * requests to it.
 *
 * Between two steps the batcher passes waiting requests to the engine and removes cancelled ones.
 * After each step it notifies the requests that have new tokens. Interactive requests go first: a
 * background request (of a team or an evaluation) enters the engine only while interactive requests
 * leave room. Clients share the engine: of the interactive requests that wait, the next one to run
 * is the oldest one of the client with the fewest running requests.
 *
 * Other threads may read the first n_visible entries of out, out_logprob, top_ids and top_logprob,
 * and all results once `done` is set.
 */
#ifndef SHOAL_SERVE_BATCHER_H
#define SHOAL_SERVE_BATCHER_H

#include "engine/engine.h"

struct batcher;
struct batcher_request {
    struct engine_request request; /* set by the caller; its buffers must stay valid until done */
    bool background;
    uint64_t client; /* whose request it is, if it is interactive */
    /* Called in the batcher's thread after a step that added tokens, and when the request is done;
     * but in the thread that calls batcher_cancel if the request still waits. It must not block.
     * With done = true it may free the request, which the batcher does not touch afterwards. */
    void (*on_change)(struct batcher_request *c, bool done);
    void *user;

    /* private to the batcher */
    struct batcher_request *next;
    int32_t n_visible; /* tokens that other threads may read: load with __ATOMIC_ACQUIRE */
    bool done;         /* atomic as well: all results may be read */
    bool cancelled;
    bool no_memory; /* done, with empty results, because memory for results was missing */
    bool no_result; /* done, not cancelled, but nodes of a cluster did not agree on the tokens */
    double submitted, started, first, ended; /* clock_now; first: first token; 0: not yet */
};

struct batcher_stats {
    int running, waiting, max_running; /* requests; waiting includes embedding tasks */
    uint64_t steps, prefilled, generated, cached, cancelled;
    int32_t pages, pages_free; /* pages of the KV cache */
    double busy;               /* seconds in steps */
};

/* The engine is borrowed; only the batcher's thread uses it until batcher_free. Interactive
 * requests are refused if more than max_waiting of them would wait. */
struct batcher *batcher_new(struct engine *e, int max_waiting);
/* Cancels the remaining requests, and lets threads that wait in batcher_run and batcher_embed
 * return. No thread may call any function of the batcher afterwards. */
void batcher_free(struct batcher *b);
/* ERR_USAGE: engine_check refuses the request; ERR_STATE: too many requests wait, or the batcher is
 * being freed. On an error nothing is submitted. */
int batcher_submit(struct batcher *b, struct batcher_request *c, struct error *err);
/* Submits all requests or none. */
int batcher_submit_all(struct batcher *b, struct batcher_request *const *c, int n,
                       struct error *err);
/* on_change is called with done = true and finish FINISH_NONE, soon or before this function
 * returns, unless the request was done already. The caller ensures that the request has not been
 * freed. */
void batcher_cancel(struct batcher *b, struct batcher_request *c);
/* Submits n background requests and waits for them. When `*stop` becomes true (stop may be NULL),
 * they are cancelled: ERR_STATE. ERR_MEMORY: no memory was left for the results of a request. */
int batcher_run(struct batcher *b, struct engine_request *r, int n, const bool *stop,
                struct error *err);
/* The same for interactive requests of a client; ERR_STATE also if too many requests wait. */
int batcher_run_interactive(struct batcher *b, uint64_t client, struct engine_request *r, int n,
                            const bool *stop, struct error *err);
/* Runs engine_embed between two steps and waits for the result. The next step waits as well, so
 * pass few texts at once. ERR_STATE: the batcher is being freed. */
int batcher_embed(struct batcher *b, const struct token_seq *texts, int32_t n,
                  struct adapter *adapter, float *out, struct error *err);
struct batcher_stats batcher_stats(struct batcher *b);
/* The goal for the duration of steps in which a request decodes while prompts are computed; longer
 * prompts then take more steps. 0 (the default): no goal. Call this before any submission. */
void batcher_set_step_seconds(struct batcher *b, double seconds);
/* From the submission of a request until none is left, the batcher is foreground work of y, which
 * is borrowed. Call this before any submission. */
void batcher_set_yield(struct batcher *b, struct yield *y);
/* The limit on prompt rows for the next step, after a step with `rows` prompt rows under `limit`
 * that took `seconds`: fewer rows after a step that was too long; after one in which the limit,
 * rounded down to a multiple of PROMPT_ROWS_MIN, was reached, slowly more, or twice as many if it
 * took less than half of the goal. At least PROMPT_ROWS_MIN; PROMPT_ROWS_START before the first
 * step. */
enum { PROMPT_ROWS_MIN = 16, PROMPT_ROWS_START = 64 };
int32_t prompt_rows_adapt(int32_t limit, int32_t rows, double seconds, double goal);
/* Sets the function that the batcher's thread calls after every step. Call this before any
 * submission. */
void batcher_on_step(struct batcher *b, void (*fn)(void *ctx, double seconds, int32_t rows),
                     void *ctx);

#endif
