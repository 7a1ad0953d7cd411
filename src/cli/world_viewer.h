/*
 * world_viewer: shows a world in the terminal, live or from a trace.
 *
 * world_viewer_render and world_viewer_key use only struct world_viewer. world_viewer_run connects
 * them to the terminal, and restores the terminal however the program ends. If stdout is not a
 * terminal, the world runs to its end and the last frame is printed.
 */
#ifndef SHOAL_CLI_WORLD_VIEWER_H
#define SHOAL_CLI_WORLD_VIEWER_H

#include "world/world.h"

struct world_viewer {
    const struct trace *t;
    struct world *w; /* the world at some tick of the trace */
    /* Steps the world and appends the tick to the trace. Returns 1, or 0 at the end. NULL: replay
     * of a trace. */
    int (*step)(void *ctx, struct error *err);
    void *ctx; /* passed to step and describe */
    /* Appends lines about the last decision of an agent. May be NULL. */
    void (*describe)(void *ctx, int agent, struct buf *out);
    int agent, speed; /* the selected agent; an index of `speeds` */
    bool paused, quit;
};

/* Advances one tick: 1, or 0 at the end. */
int world_viewer_step(struct world_viewer *v, struct error *err);
int world_viewer_seek(struct world_viewer *v, int64_t tick, struct error *err);
/* Appends a frame as text; `ansi` highlights the selected agent. */
void world_viewer_render(const struct world_viewer *v, bool ansi, struct buf *out);
/* Handles a key: space, n, p, '.', '<', '>', '+', '-', q; other keys do nothing. */
int world_viewer_key(struct world_viewer *v, int key, struct error *err);
int world_viewer_run(struct world_viewer *v, struct error *err);

#endif
