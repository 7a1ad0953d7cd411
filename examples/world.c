/*
 * An episode of agents that move at random, pick up food and deliver it. The program saves the
 * state in the middle, runs the second half twice and compares the final states. It needs no model.
 * RULES must have compact observations, as the default "repaired" has:
 *
 *   cc examples/world.c $(pkg-config --cflags --libs shoal) -o world
 *   ./world [RULES]
 */
#include "shoal.h"

#include <stdio.h>
#include <string.h>

enum { AGENTS = 20, STEPS = 300 };
enum { HERE = 8, HELD = 10 }; /* positions in a compact observation: docs/WORLD.md */

static int choose(struct shoal_world *w, int agent) {
    const char *seen = shoal_world_observe(w, agent);
    unsigned n = (unsigned)(shoal_world_tick(w) * 31 + agent * 17);
    if (seen[HERE] == 'f' && seen[HELD] == '-') return SHOAL_PICK_FOOD;
    if (seen[HERE] == 'h' && seen[HELD] == 'f') return SHOAL_DROP_FOOD;
    return (int)(n * 2654435761u >> 30); /* one of the four moves */
}

static int run_until(struct shoal_world *w, int end_tick, struct shoal_error *err) {
    int actions[AGENTS];
    while (shoal_world_living(w) && shoal_world_tick(w) < end_tick) {
        for (int i = 0; i < AGENTS; i++) actions[i] = choose(w, i);
        if (shoal_world_step(w, actions, err) != 0) return -1;
    }
    return 0;
}

int main(int argc, char **argv) {
    struct shoal_error err = {0};
    struct shoal_agent a;
    char *half = NULL, *end = NULL, *repeated = NULL;
    int delivered = 0, code = 1;
    struct shoal_world *w = shoal_world_new(argc > 1 ? argv[1] : NULL, AGENTS, 7, &err);
    if (!w || run_until(w, STEPS / 2, &err) != 0) goto out;
    half = shoal_world_state(w);
    if (run_until(w, STEPS, &err) != 0) goto out;
    end = shoal_world_state(w);
    printf("%s%s\n", shoal_world_draw(w), shoal_world_prompt(w, 0));
    for (int i = 0; i < AGENTS; i++)
        if (shoal_world_agent(w, i, &a, &err) == 0) delivered += a.delivered;
    printf("tick %d, %d of %d live, %d delivered\n", shoal_world_tick(w), shoal_world_living(w),
           AGENTS, delivered);
    if (shoal_world_restore(w, half, &err) != 0 || run_until(w, STEPS, &err) != 0) goto out;
    repeated = shoal_world_state(w);
    printf("the second half, run again: %s\n",
           strcmp(end, repeated) == 0 ? "same state" : "DIFFERENT state");
    code = strcmp(end, repeated) != 0;
out:
    if (err.code) fprintf(stderr, "world: %s\n", err.text);
    shoal_free(half);
    shoal_free(end);
    shoal_free(repeated);
    shoal_world_free(w);
    return code;
}
