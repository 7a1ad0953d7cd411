/*
 * A model's agents live in the grid world for one generation of 50 steps, learn, and are compared
 * with scripted policies on other maps. The program prints a row for each policy and generation. A
 * second run with the same folder of runs continues the first one.
 *
 *   cc examples/simulate.c $(pkg-config --cflags --libs shoal) -o simulate
 *   ./simulate models/fry RUNS
 */
#include "shoal.h"

#include <stdio.h>

enum { OPTION_BYTES = 4096 };

static int on_progress(void *ctx, const struct shoal_progress *p) {
    (void)ctx;
    if (p->done % 10 == 0)
        fprintf(stderr, "%s: step %lld of %lld, %.1f s\n", p->task, p->done, p->total, p->seconds);
    return 0; /* not 0 would cancel the simulation */
}

static void on_message(void *ctx, const char *text) {
    (void)ctx;
    fprintf(stderr, "%s\n", text);
}

int main(int argc, char **argv) {
    static char runs[OPTION_BYTES];
    const char *const options[] = {runs,      "agents=8",      "num-adapters=4", "steps=50",
                                   "size=12", "generations=1", "eval-maps=2",    NULL};
    const struct shoal_callbacks callbacks = {.progress = on_progress, .message = on_message};
    struct shoal_error err = {0};
    char *rows = NULL;
    if (argc != 3) {
        fprintf(stderr, "usage: simulate MODEL RUNS\n");
        return 2;
    }
    snprintf(runs, sizeof runs, "runs=%s", argv[2]);
    struct shoal *s = shoal_open(argv[1], NULL, &err);
    if (s) rows = shoal_simulate(s, options, &callbacks, &err);
    for (const char *p = rows; p && *p; p++) { /* a line for each row */
        putchar(*p);
        if (*p == ',' && p[-1] == '}' && p[1] == '{') putchar('\n');
    }
    if (rows) putchar('\n');
    if (err.code) fprintf(stderr, "simulate: %s\n", err.text);
    shoal_free(rows);
    shoal_close(s);
    return err.code != 0;
}
