/*
 * watch: a world in the terminal, live or from a trace.
 *
 * Frame and keys are functions of a struct world_viewer alone; world_viewer_run puts them on a
 * terminal, whose state comes back however the program ends. Where stdout is no terminal the world
 * runs to its end and the last picture is printed.
 */
#ifndef SHOAL_WATCH_H
#define SHOAL_WATCH_H

#include "world/world.h"

struct world_viewer {
    const struct trace *t;
    struct world *w; /* at some tick of the trace */
    /* Adds the tick after the trace's last one and steps the world: 1; 0: it is over. NULL: a trace
     * that does not grow. */
    int (*grow)(void *ctx, struct error *err);
    void *ctx; /* of both */
    /* Adds lines about what an agent last did; NULL: nothing is known. */
    void (*tell)(void *ctx, int agent, struct buf *out);
    int agent, speed; /* selected; an index of speeds */
    bool paused, quit;
};

/* One tick on: 1, or 0 where there is none. */
int world_viewer_step(struct world_viewer *v, struct error *err);
int world_viewer_seek(struct world_viewer *v, int64_t tick, struct error *err);
/* What people see; with `ansi` the selected agent stands out. */
void world_viewer_render(const struct world_viewer *v, bool ansi, struct buf *out);
/* space, n, p, '.', '<', '>', '+', '-', q; others do nothing. */
int world_viewer_key(struct world_viewer *v, int key, struct error *err);
int world_viewer_run(struct world_viewer *v, struct error *err);

#endif
