/*
 * world_viewer: a world in the terminal, live or from a trace.
 *
 * Frame and keys are functions of a struct world_viewer alone; world_viewer_run puts them on a
 * terminal, and restores the terminal however the program ends. If stdout is not a terminal, the
 * world runs to its end and the last picture is printed.
 */
#ifndef SHOAL_CLI_WORLD_VIEWER_H
#define SHOAL_CLI_WORLD_VIEWER_H

#include "world/world.h"

struct world_viewer {
    const struct trace *t;
    struct world *w; /* the world at some tick of the trace */
    /* Appends one tick to the trace and steps the world: 1; 0: the world has ended. NULL: the trace
     * does not grow. */
    int (*step)(void *ctx, struct error *err);
    void *ctx; /* passed to grow and tell */
    /* Adds lines about the last decision of an agent; NULL: no information. */
    void (*describe)(void *ctx, int agent, struct buf *out);
    int agent, speed; /* the selected agent; an index of speeds */
    bool paused, quit;
};

/* Advances one tick: 1, or 0 at the end. */
int world_viewer_step(struct world_viewer *v, struct error *err);
int world_viewer_seek(struct world_viewer *v, int64_t tick, struct error *err);
/* The frame for people; `ansi` highlights the selected agent. */
void world_viewer_render(const struct world_viewer *v, bool ansi, struct buf *out);
/* space, n, p, '.', '<', '>', '+', '-', q; others do nothing. */
int world_viewer_key(struct world_viewer *v, int key, struct error *err);
int world_viewer_run(struct world_viewer *v, struct error *err);

#endif
