/*
 * live: long work for one request, of which its client may hear while it goes on.
 *
 * The work runs in a thread of its own. Who does not ask for a stream gets what came of it as the
 * reply. A stream is server-sent events: `event: NAME` and `data: {…}` for whatever is told, in
 * order, at the end `result` with what would have been the reply, or `error` with that body, and
 * `data: [DONE]`. A client that has gone sets the flag that the work looks at.
 */
#ifndef SHOAL_LIVE_H
#define SHOAL_LIVE_H

#include "serve/generation.h"

struct async_reply;
struct async_reply_work {
    json_t *(*run)(struct async_reply *l, void *ctx, struct error *err); /* NULL: err says why */
    void (*release)(void *ctx); /* always called, and last */
    void *ctx;
};
/* Answers the exchange, perhaps that there is too much of such work already: ASYNC_WORKERS_MAX with
 * the teams that chat. */
void async_reply_start(struct server *s, struct exchange *x, bool stream,
                       const struct async_reply_work *w);

/* for the work, in its thread */

/* Once true nobody waits for it any more. */
const bool *async_reply_stop_flag(const struct async_reply *l);
/* Takes v over. */
void async_reply_event(struct async_reply *l, const char *event, json_t *v);
/* What it has cost, for who pays. */
void async_reply_add_usage(struct async_reply *l, const struct token_usage *u);

#endif
