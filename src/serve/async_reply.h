/*
 * async_reply: long work for one request, with progress events for its client.
 *
 * The work runs in a separate thread. Without streaming the client gets the result as the reply. A
 * stream is server-sent events: `event: NAME` and `data: {…}` for each progress event, in order; at
 * the end `result` with the body that the reply would have had, or `error` with the error body;
 * then `data: [DONE]`. When a client disconnects, the flag that the work polls is set.
 */
#ifndef SHOAL_SERVE_ASYNC_REPLY_H
#define SHOAL_SERVE_ASYNC_REPLY_H

#include "serve/generation.h"

struct async_reply;
struct async_reply_work {
    json_t *(*run)(struct async_reply *l, void *ctx, struct error *err); /* NULL: error in err */
    void (*release)(void *ctx); /* always called, as the last */
    void *ctx;
};
/* Starts the work, or replies 503 if ASYNC_WORKERS_MAX works and team chats are running already. */
void async_reply_start(struct server *s, struct exchange *x, bool stream,
                       const struct async_reply_work *w);

/* for the work, in its thread */

/* True once no client waits for the result. */
const bool *async_reply_stop_flag(const struct async_reply *l);
/* Takes v over. */
void async_reply_event(struct async_reply *l, const char *event, json_t *v);
/* Adds the tokens that the work used, for the accounting of the key. */
void async_reply_add_usage(struct async_reply *l, const struct token_usage *u);

#endif
