/*
 * learner_es: policies that learn from rewards alone, by evolution strategies (Salimans et al.
 * 2017).
 *
 * An episode is divided into windows of `perturbation_ticks` ticks. In each window an agent decides
 * with a member of the policy's ES population instead of the policy's adapter: the adapter plus or
 * minus a direction (es_perturbation in backprop.h). The sum of the agent's rewards in that window
 * is the member's fitness; the single actions do not matter. A policy with an even number of agents
 * evaluates both signs of its pairs at once and learns after every window. With an odd number each
 * agent is + in one window and - in the next, and the policy learns after both:
 *
 *     agents of a policy  window 0     1     2     3     pairs
 *     2 (even)              + -       + -   + -   + -    n / 2 per window
 *     1 (odd)                +         -     +     -     n in two windows
 *
 * A member that was not evaluated, because its agent had died before, is excluded from fitness
 * shaping and counts as the mean. Excluding the whole pair would lose the directions that kill
 * agents. Windows that are incomplete when the episode ends are not used.
 * A round is the window, or the two windows, after which a policy learns.
 *
 * Invariant: a direction is a function of (seed, generation, policy, round, pair) and of the
 * adapter. While in use it is stored as an adapter of rank 2, as factors and in the engine's packed
 * form: 16 (in + out) bytes per projection and pair.
 */
#include "backprop/backprop.h"
#include "world/internal.h"

#include <stdlib.h>
#include <string.h>

struct es_member {
    double reward_sum;
    int64_t ticks; /* ticks with a reward */
};
struct es_policy {               /* state of one policy */
    int n_pairs, round;          /* round: index of the current round; -1: none yet */
    bool alternates_signs;       /* + and - are evaluated in different windows */
    uint64_t seed;               /* seed of the round's directions */
    struct adapter **directions; /* [n_pairs] NULL until first used */
    struct es_member *members;   /* [2 n_pairs] + and - of a pair are adjacent */
};
struct learner_es {
    const struct learner_options *o;
    struct trainer *t;
    int n_policies, n_agents;
    uint64_t seed;
    struct es_policy *policies;       /* [n_policies] */
    struct es_member **active_member; /* [n_agents] the member with which each agent decided last */
};

struct learner_es *learner_es_new(const struct learner_options *o,
                                  const struct learner_config *config, struct trainer *t) {
    struct learner_es *e = xcalloc(1, sizeof *e);
    *e = (struct learner_es){.o = o,
                             .t = t,
                             .n_policies = config->n_policies,
                             .n_agents = config->n_agents,
                             .seed = config->seed};
    e->policies = xcalloc((size_t)e->n_policies, sizeof *e->policies);
    e->active_member = xcalloc((size_t)e->n_agents, sizeof(struct es_member *));
    for (int i = 0; i < e->n_policies; i++) {
        struct es_policy *s = &e->policies[i];
        int n_policy_agents = (e->n_agents - i + e->n_policies - 1) / e->n_policies;
        s->round = -1;
        s->alternates_signs = n_policy_agents % 2;
        s->n_pairs = s->alternates_signs ? n_policy_agents : n_policy_agents / 2;
        s->directions = xcalloc((size_t)s->n_pairs, sizeof(struct adapter *));
        s->members = xcalloc(2 * (size_t)s->n_pairs, sizeof *s->members);
    }
    return e;
}

void learner_es_reset(struct learner_es *e, int policy) {
    struct es_policy *s = &e->policies[policy];
    memset(s->members, 0, 2 * (size_t)s->n_pairs * sizeof *s->members);
    for (int i = 0; i < s->n_pairs; i++) {
        adapter_release(s->directions[i]);
        s->directions[i] = NULL;
    }
}

void learner_es_free(struct learner_es *e) {
    if (!e) return;
    for (int i = 0; i < e->n_policies; i++) {
        learner_es_reset(e, i);
        free(e->policies[i].directions);
        free(e->policies[i].members);
    }
    free(e->policies);
    free(e->active_member);
    free(e);
}

static void round_begin(struct learner_es *e, int policy, int generation, int round) {
    struct es_policy *s = &e->policies[policy];
    struct rng generation_rng =
        rng_make(e->seed, RNG_NOISE, (uint32_t)policy, (uint32_t)generation);
    struct rng r = rng_make(rng_u64(&generation_rng), RNG_NOISE, 0, (uint32_t)round);
    learner_es_reset(e, policy);
    s->round = round;
    s->seed = rng_u64(&r);
}

void learner_es_perturb(struct learner_es *e, int generation, int tick, int agent,
                        struct policy_decision *a) {
    int policy = agent % e->n_policies, agent_rank = agent / e->n_policies,
        window = tick / (int)e->o->perturbation_ticks;
    struct es_policy *s = &e->policies[policy];
    int round = s->alternates_signs ? window / 2 : window;
    int pair = s->alternates_signs ? agent_rank : agent_rank / 2,
        minus = s->alternates_signs ? window % 2 : agent_rank % 2;
    if (round != s->round) round_begin(e, policy, generation, round);
    struct adapter **d = &s->directions[pair];
    struct lora_perturbation z = {s->seed, (uint32_t)pair};
    if (!*d) *d = es_perturbation(e->t, policy, &z, e->o->sigma);
    e->active_member[agent] = &s->members[2 * pair + minus];
    a->mix[0] = (struct weighted_adapter){.adapter = a->adapter, .weight = 1};
    a->mix[1] = (struct weighted_adapter){.adapter = *d, .weight = minus ? -1 : 1};
    a->n_mix = 2;
}

void learner_es_observe_reward(struct learner_es *e, int agent, double reward) {
    e->active_member[agent]->reward_sum += reward;
    e->active_member[agent]->ticks++;
}

/* Adds the gradient estimate; returns false if it is zero. */
static bool es_policy_update(struct learner_es *e, int policy) {
    struct es_policy *s = &e->policies[policy];
    int n_members = 2 * s->n_pairs, n = 0;
    double *f = xcalloc((size_t)n_members, sizeof *f),
           *coef = xcalloc((size_t)s->n_pairs, sizeof *coef);
    bool is_nonzero = false;
    for (int i = 0; i < n_members; i++)
        if (s->members[i].ticks) f[n++] = s->members[i].reward_sum;
    if (n > 1) es_shape_fitness(e->o->shaping, f, n);
    for (int i = 0, k = 0; n > 1 && i < n_members; i++) {
        if (!s->members[i].ticks) continue;
        coef[i / 2] += (i % 2 ? -f[k] : f[k]) / (n * e->o->sigma);
        k++;
    }
    for (int i = 0; i < s->n_pairs; i++) is_nonzero |= coef[i] != 0;
    if (is_nonzero) es_add_gradient(e->t, policy, s->seed, coef, s->n_pairs);
    free(f);
    free(coef);
    return is_nonzero;
}

int learner_es_tick(struct learner_es *e, int tick, bool *updated) {
    int n = 0, n_windows = tick / (int)e->o->perturbation_ticks; // finished windows
    if (tick % e->o->perturbation_ticks) return 0;
    for (int i = 0; i < e->n_policies; i++) {
        updated[i] =
            (!e->policies[i].alternates_signs || n_windows % 2 == 0) && es_policy_update(e, i);
        n += updated[i];
    }
    return n;
}
