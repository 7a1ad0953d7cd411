/*
 * async_reply: a reply that a separate thread computes, with progress events for the client.
 *
 * Without streaming the client gets the result as the reply. A stream has server-sent events:
 * `event: NAME` and `data: {…}` for each progress event, in order; then `result` with the body of
 * the reply, or `error` with the error body; then `data: [DONE]`. When the client disconnects, the
 * stop flag is set; the work has to poll the flag.
 */
#ifndef SHOAL_SERVE_ASYNC_REPLY_H
#define SHOAL_SERVE_ASYNC_REPLY_H

#include "serve/generation.h"

struct async_reply;
struct async_reply_work {
    json_t *(*run)(struct async_reply *l, void *ctx, struct error *err); /* NULL: error in err */
    void (*release)(
        void *ctx); /* called once: after run, or instead of run if the work does not start */
    void *ctx;
};
/* Starts the work, or replies 503 if ASYNC_WORKERS_MAX async replies and team chats run already. */
void async_reply_start(struct server *s, struct exchange *x, bool stream,
                       const struct async_reply_work *w);

/* functions for the work, in its thread */

/* True once no client waits for the result. */
const bool *async_reply_stop_flag(const struct async_reply *l);
/* Sends a progress event if the client streams. Takes v over. */
void async_reply_event(struct async_reply *l, const char *event, json_t *v);
/* Adds the tokens that the work used to the usage of the key. */
void async_reply_add_usage(struct async_reply *l, const struct token_usage *u);

#endif
