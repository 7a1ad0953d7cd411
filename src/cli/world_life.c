/*
 * world_life: a run of lives — generation after generation, each measured on maps that nobody lives
 * on, beside policies without a model on the same maps.
 */
#include "cli/world_life.h"

#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

struct run {
    const struct life_job *j;
    const struct life_options *o;
    struct place *places; /* [worlds] */
    struct environment *envs, **list;
    struct life *life;
    struct progress bar;
    struct outcome *measured; /* [held_out] */
};

static void places_make(struct run *r) {
    int n = (int)r->o->worlds;
    r->places = xcalloc((size_t)n, sizeof *r->places);
    r->envs = xcalloc((size_t)n, sizeof *r->envs);
    r->list = xcalloc((size_t)n, sizeof *r->list);
    for (int i = 0; i < n; i++) {
        r->places[i] = (struct place){.rules = r->j->rules,
                                      .teacher = world_policy_find(r->o->teacher),
                                      .n_agents = r->j->agents};
        r->envs[i] = place_environment(&r->places[i]);
        r->list[i] = &r->envs[i];
    }
}

static int tick_seen(void *ctx, int tick, const int16_t *actions, struct error *err) {
    struct run *r = ctx;
    (void)actions, (void)err;
    progress_update(&r->bar, life_generations(r->life) * r->o->steps + tick, NULL);
    return OK;
}

static struct interval delivered(const struct run *r) {
    double *v = xcalloc((size_t)r->o->held_out, sizeof *v);
    for (int i = 0; i < r->o->held_out; i++) v[i] = r->measured[i].delivered;
    struct interval out = stats_mean(v, r->o->held_out);
    free(v);
    return out;
}

static int generation_tell(struct run *r, double seconds, struct error *err) {
    if (life_measure(r->life, r->measured, err) != OK) return err->code;
    struct interval d = delivered(r);
    double mean = 0, fitness = 0, entropy = 0, reward = 0;
    int collapsed = 0, back = 0, n = life_n_minds(r->life);
    for (int i = 0; i < n; i++) {
        const struct mind_record *m = life_mind(r->life, i);
        mean += m->outcome.delivered / n;
        fitness += m->outcome.fitness / n;
        entropy += m->health.entropy / n;
        reward += m->health.reward / n;
        collapsed += m->health.collapsed;
        back += m->health.rollbacks;
    }
    printf("%3d  %8lld  held out %6.2f [%6.2f, %6.2f]  lived %6.2f  fitness %8.2f  entropy %.3f "
           "reward "
           "%.3f collapsed %d back %d  %.1f s\n",
           life_generations(r->life), (long long)life_decisions(r->life), d.value, d.lo, d.hi, mean,
           fitness, entropy, reward, collapsed, back, seconds);
    fflush(stdout);
    return OK;
}

static int generations_run(struct run *r, struct error *err) {
    struct life_watch w = {.tick = tick_seen, .ctx = r};
    int rc = generation_tell(r, 0, err);
    progress_start(&r->bar, "lives", r->o->generations * r->o->steps);
    for (int g = 0; rc == OK && g < r->o->generations; g++) {
        double began = clock_now();
        rc = life_generation(r->life, &w, err);
        if (rc == OK) rc = generation_tell(r, clock_now() - began, err);
    }
    return rc;
}

int life_run(const struct life_job *j, struct error *err) {
    struct run r = {.j = j, .o = &j->o->life};
    places_make(&r);
    r.measured = xcalloc((size_t)r.o->held_out, sizeof *r.measured);
    r.life = life_new(j->m, r.o, r.list, NULL, 0, j->pool, err);
    int rc = r.life ? generations_run(&r, err) : err->code;
    life_free(r.life);
    free(r.measured);
    free(r.places);
    free(r.envs);
    free(r.list);
    return rc;
}

#define ROW(name, type, field, metavar, help)                                                      \
    { name, type, offsetof(struct life_command, field), NULL, 0, 0, metavar, help }
const struct option_row life_command_rows[] = {
    ROW("out", OPT_STRING, out, "DIR", "keep the run there: adapters, curves, a page"),
    ROW("adapter", OPT_LIST, adapters, "DIR", "what minds begin with, in turn"),
    {0},
};
