/*
 * world: the functions for worlds of include/shoal.h. A struct shoal_world is a trace (all
 * actions so far) and the world at its end. This file checks arguments and translates; src/world
 * contains every rule.
 */
#include "lib/internal.h"

#include "world/world.h"

#include <stdlib.h>
#include <string.h>

struct shoal_world {
    struct trace t;
    struct world w; /* at the trace's last tick */
    struct buf observation, prompt,
        map; /* texts that the caller borrows until the next call of the same function */
};

static int seed_check(unsigned long long seed, struct error *err) {
    return seed <= INT64_MAX ? OK : error_set(err, ERR_USAGE, "a seed is less than 2^63");
}

struct shoal_world *shoal_world_new(const char *rules, int agents, unsigned long long seed,
                                    struct shoal_error *err) {
    struct error inner = {0};
    struct world_rules r = {0};
    struct shoal_world *w = xcalloc(1, sizeof *w);
    int rc = agents >= 1 && agents <= WORLD_AGENTS_MAX
                 ? seed_check(seed, &inner)
                 : error_set(&inner, ERR_USAGE, "%d agents; 1 to %d are possible", agents,
                             WORLD_AGENTS_MAX);
    if (rc == OK) rc = world_rules_load(&r, rules ? rules : "repaired", &inner);
    if (rc == OK) rc = trace_init(&w->t, &r, agents, seed, TRACE_TICKS, "library", &inner);
    world_rules_release(&r);
    if (rc == OK) {
        trace_seek(&w->t, &w->w, 0);
        return w;
    }
    error_copy(err, &inner);
    shoal_world_free(w);
    return NULL;
}

void shoal_world_free(struct shoal_world *w) {
    if (!w) return;
    trace_release(&w->t);
    buf_release(&w->observation);
    buf_release(&w->prompt);
    buf_release(&w->map);
    free(w);
}

int shoal_world_reset(struct shoal_world *w, unsigned long long seed, struct shoal_error *err) {
    struct error inner = {0};
    if (seed_check(seed, &inner) != OK) return error_copy(err, &inner);
    w->t.seed = seed;
    trace_truncate(&w->t, 0);
    w->w.n_agents = 0; /* forces trace_seek to rebuild the world with the new seed */
    trace_seek(&w->t, &w->w, 0);
    return 0;
}

int shoal_world_step(struct shoal_world *w, const int *actions, struct shoal_error *err) {
    struct error inner = {0};
    int16_t action_codes[WORLD_AGENTS_MAX] = {0};
    int64_t n = WORLD_N_ACTIONS * (w->t.rules.vocabulary + 1);
    int rc = OK;
    for (int i = 0; rc == OK && i < w->t.n_agents; i++) {
        if (!w->w.agents[i].alive) continue;
        action_codes[i] = (int16_t)actions[i];
        if (actions[i] < 0 || actions[i] >= n)
            rc = error_set(&inner, ERR_USAGE, "action %d of agent %d; 0 to %d are possible",
                           actions[i], i, (int)n - 1);
    }
    if (rc == OK) rc = trace_append(&w->t, &w->w, action_codes, &inner);
    if (rc != OK) return error_copy(err, &inner);
    world_step(&w->w, &w->t.rules, action_codes);
    return 0;
}

int shoal_world_policy(struct shoal_world *w, const char *policy, int *actions,
                       struct shoal_error *err) {
    struct error inner = {0};
    int16_t action_codes[WORLD_AGENTS_MAX] = {0};
    const struct world_policy *p = world_policy_find(policy);
    if (!p) {
        error_set(&inner, ERR_USAGE, "no policy '%s'; use rule, reflex, random or mock", policy);
        return error_copy(err, &inner);
    }
    world_policy_act(p, &w->w, &w->t.rules, w->w.seed, action_codes);
    for (int i = 0; i < w->w.n_agents; i++) actions[i] = action_codes[i];
    return 0;
}

int shoal_world_agents(const struct shoal_world *w) {
    return w->w.n_agents;
}

int shoal_world_tick(const struct shoal_world *w) {
    return w->w.tick;
}

int shoal_world_living(const struct shoal_world *w) {
    return w->w.n_living;
}

static bool has_agent(const struct shoal_world *w, int agent) {
    return agent >= 0 && agent < w->w.n_agents;
}

int shoal_world_agent(const struct shoal_world *w, int agent, struct shoal_agent *out,
                      struct shoal_error *err) {
    struct error inner = {0};
    if (!has_agent(w, agent)) {
        error_set(&inner, ERR_MISSING, "no agent %d", agent);
        return error_copy(err, &inner);
    }
    const struct world_agent *a = &w->w.agents[agent];
    *out = (struct shoal_agent){.alive = a->alive,
                                .x = a->cell % w->w.size,
                                .y = a->cell / w->w.size,
                                .energy = a->energy,
                                .holds = a->holds,
                                .steps = a->steps,
                                .collected = a->collected,
                                .delivered = a->delivered,
                                .built = a->built,
                                .blocked = a->blocked,
                                .bites = a->bites,
                                .reward = a->reward,
                                .total = a->episode_reward,
                                .fitness = world_agent_fitness(a)};
    return 0;
}

const char *shoal_world_observe(struct shoal_world *w, int agent) {
    if (!has_agent(w, agent)) return NULL;
    w->observation.len = 0;
    world_observe(&w->w, &w->t.rules, agent, &w->observation);
    return w->observation.data;
}

const char *shoal_world_prompt(struct shoal_world *w, int agent) {
    if (!has_agent(w, agent)) return NULL;
    w->prompt.len = 0;
    world_prompt(&w->w, &w->t.rules, agent, &w->prompt);
    return w->prompt.data;
}

const char *shoal_world_draw(struct shoal_world *w) {
    w->map.len = 0;
    world_render(&w->w, &w->map);
    return w->map.data;
}

int shoal_world_parse(const struct shoal_world *w, const char *text) {
    return world_action_parse(&w->t.rules, text);
}

char *shoal_world_state(const struct shoal_world *w) {
    json_t *v = trace_json(&w->t, &w->w);
    char *text = json_dumps(v, JSON_COMPACT);
    CHECK(text != NULL);
    json_decref(v);
    return text;
}

int shoal_world_restore(struct shoal_world *w, const char *state, struct shoal_error *err) {
    struct error inner = {0};
    struct trace t = {0};
    json_t *v = json_parse(state, strlen(state), "state", &inner);
    int rc = v ? trace_from_json(&t, v, &inner) : inner.code;
    json_decref(v);
    if (rc != OK) {
        trace_release(&t);
        return error_copy(err, &inner);
    }
    trace_release(&w->t);
    w->t = t;
    w->w.n_agents = 0;
    trace_seek(&w->t, &w->w, w->t.n_ticks);
    return 0;
}
