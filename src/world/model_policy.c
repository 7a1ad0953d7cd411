/*
 * model_policy: a model that acts in one world at a time, for callers that step the world
 * themselves. It is a simulation of one environment, in which each episode is a generation.
 */
#include "world/internal.h"

#include <stdlib.h>
#include <string.h>

struct model_policy {
    const struct simulation_request *q;
    /* The request's options, but with one world, and without breeding and a step limit. */
    struct simulation_options o;
    struct initial_adapters initial;
    struct grid_env grid;
    struct environment env, *list;
    struct simulation *simulation; /* NULL until the first world is known */
    uint64_t seed;
    int tick; /* next tick of the world of the last call */
};

struct model_policy *model_policy_new(const struct simulation_request *q, bool learns,
                                      struct error *err) {
    static char none[] = "none";
    struct model_policy *p = xcalloc(1, sizeof *p);
    p->q = q;
    p->o = q->o->simulation;
    p->o.n_envs = 1;
    p->o.steps = INT32_MAX;
    p->o.breed = false;
    p->o.curriculum = 0;
    if (!learns) p->o.learn.learn = none;
    if (q->o->adapters.n == 0) p->o.init_noise = 0;
    if (initial_adapters_open(&p->initial, &q->o->adapters, q->m, err) == OK) return p;
    model_policy_free(p);
    return NULL;
}

json_t *model_policy_manifest(const struct model_policy *p, const struct world_rules *r,
                              int64_t seed) {
    return world_manifest(p ? p->q->m : NULL, p ? &p->initial : NULL, "rules", world_rules_json(r),
                          seed);
}

void model_policy_free(struct model_policy *p) {
    if (!p) return;
    simulation_free(p->simulation);
    initial_adapters_release(&p->initial);
    free(p);
}

/* Starts a generation. Called for the first world, and if the world or the tick does not continue
 * the last call. */
static int world_start(struct model_policy *p, const struct world *w, const struct world_rules *r,
                       uint64_t seed, struct error *err) {
    if (p->simulation) simulation_end_generation(p->simulation);
    p->grid = (struct grid_env){
        .rules = r, .teacher = world_policy_find(p->o.teacher), .n_agents = w->n_agents};
    p->env = grid_env_as_environment(&p->grid);
    p->list = &p->env;
    if (!p->simulation)
        p->simulation =
            simulation_new(p->q->m, &p->o, &p->list, p->initial.v, p->initial.n, p->q->pool, err);
    int rc = p->simulation ? simulation_begin_generation(p->simulation, &seed, err) : err->code;
    if (rc == OK) simulation_set_tick(p->simulation, w->tick);
    return rc;
}

int model_policy_act(struct model_policy *p, const struct world *w, const struct world_rules *r,
                     uint64_t seed, int16_t *actions, struct error *err) {
    int rc = OK;
    if (!p->simulation || w->tick != p->tick || seed != p->seed)
        rc = world_start(p, w, r, seed, err);
    p->grid.w = *w;
    if (rc == OK) rc = simulation_step(p->simulation, err);
    if (rc < 0) return rc;
    memcpy(actions, simulation_actions(p->simulation), (size_t)w->n_agents * sizeof *actions);
    p->seed = seed;
    p->tick = w->tick + 1;
    return OK;
}

void model_policy_describe(const struct model_policy *p, int agent, struct buf *out) {
    const struct policy_decision *a =
        p->simulation ? simulation_decision(p->simulation, agent) : NULL;
    if (!a || a->logp[0] == a->logp[1]) return; // dead, or generated text without probabilities
    buf_puts(out, "chose: ");
    for (int i = 0; i < WORLD_N_ACTIONS; i++)
        buf_printf(out, " %s %.2f", p->env.actions[i], math_exp(a->logp[i]));
    buf_puts(out, "\n");
}
