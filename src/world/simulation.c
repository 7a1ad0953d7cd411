/*
 * simulation: policies that act and learn in environments over generations.
 *
 * In a generation the environments are reset; in each tick all agents decide in one batch, act,
 * receive rewards and learn; at the end the policies are sorted by fitness, and the next generation
 * is bred from the fittest: with the default crossover, ΔW of a child is ratio · ΔW1 + (1 - ratio)
 * · ΔW2 of its parents, rescaled to the weighted mean of their norms, with ratio = f1 / (f1 + f2)
 * of their fitness. Children inherit what their parents learned (Lamarckian evolution).
 *
 * Invariant: every random value is a function of (seed, generation, tick, agent or child). Files
 * are written and read in simulation_state.c and run.c.
 */
#include "world/internal.h"

#include <malloc.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

enum {
    MAX_POLICIES = 4096,
    DEFAULT_CACHED_DECISIONS = 1 << 15, /* 6 MB */
    CURRICULUM_DELIVERED = 3,           /* per agent and generation, so that the maps grow */
    CURRICULUM_STEP = 4,                /* cells per side that the maps grow at a time */
    POLICY_BATCH_ROWS = 64,             /* rows of the engine with low_memory */
    POLICY_BATCH_SEQS = 4               /* sequences of the engine with low_memory */
};

/* worlds as environments */

static int grid_env_reset(void *ctx, uint64_t seed, struct error *err) {
    struct grid_env *p = ctx;
    struct world_rules rules = *p->rules; // borrows the texts and lists
    (void)err;
    if (p->map_size) rules.size = p->map_size;
    world_reset(&p->w, &rules, p->n_agents, seed);
    return OK;
}

static void grid_env_set_map_size(void *ctx, int size) {
    struct grid_env *p = ctx;
    p->map_size = size;
}

static bool grid_env_prompt(void *ctx, int agent, struct buf *out) {
    struct grid_env *p = ctx;
    if (!p->w.agents[agent].alive) return false;
    world_prompt(&p->w, p->rules, agent, out);
    return true;
}

static int grid_env_step(void *ctx, const int16_t *actions, double *rewards, struct error *err) {
    struct grid_env *p = ctx;
    (void)err;
    world_step(&p->w, p->rules, actions);
    for (int i = 0; i < p->n_agents; i++) rewards[i] = p->w.agents[i].reward;
    return OK;
}

static int grid_env_parse(void *ctx, const char *text) {
    const struct grid_env *p = ctx;
    return world_action_parse(p->rules, text);
}

static int grid_env_expert(void *ctx, int agent) {
    const struct grid_env *p = ctx;
    struct rng r = world_policy_rng(p->w.seed, agent, p->w.tick);
    return p->teacher->act(&p->w, p->rules, agent, &r);
}

static struct episode_stats agent_episode_stats(const struct world_agent *a) {
    return (struct episode_stats){.fitness = world_agent_fitness(a),
                                  .reward = a->episode_reward,
                                  .delivered = a->delivered,
                                  .collected = a->collected,
                                  .blocked = a->blocked,
                                  .steps = a->steps,
                                  .alive = a->alive};
}

static void episode_stats_add(struct episode_stats *to, const struct episode_stats *v,
                              double weight) {
    to->fitness += weight * v->fitness;
    to->reward += weight * v->reward;
    to->delivered += weight * v->delivered;
    to->collected += weight * v->collected;
    to->blocked += weight * v->blocked;
    to->steps += weight * v->steps;
    to->alive += weight * v->alive;
}

struct episode_stats world_episode_stats(const struct world *w) {
    struct episode_stats sum = {0};
    for (int i = 0; i < w->n_agents; i++) {
        struct episode_stats v = agent_episode_stats(&w->agents[i]);
        episode_stats_add(&sum, &v, 1.0 / w->n_agents);
    }
    return sum;
}

static void grid_env_stats(void *ctx, int agent, struct episode_stats *out) {
    const struct grid_env *p = ctx;
    *out = agent_episode_stats(&p->w.agents[agent]);
}

struct environment grid_env_as_environment(struct grid_env *p) {
    bool speaks = p->rules->vocabulary > 0 && !p->is_silent;
    return (struct environment){.ctx = p,
                                .n_agents = p->n_agents,
                                .n_actions = WORLD_N_ACTIONS,
                                .actions = world_action_words,
                                .n_words = speaks ? (int)p->rules->vocabulary + 1 : 0,
                                .words = world_word_letters,
                                .map_size = p->rules->map.n ? 0 : (int)p->rules->size,
                                .set_map_size = grid_env_set_map_size,
                                .reset = grid_env_reset,
                                .prompt = grid_env_prompt,
                                .step = grid_env_step,
                                .parse = grid_env_parse,
                                .expert_action = p->teacher ? grid_env_expert : NULL,
                                .episode_stats = grid_env_stats};
}

/* health */

#define MAX_REPEATED_SHARE 0.98
#define MIN_ENTROPY 0.02 /* nats */

bool rollout_stats_add_action(struct rollout_stats *t, const struct policy_decision *a,
                              int n_actions) {
    bool is_finite = true;
    for (int i = 0; i < n_actions; i++) {
        if (isfinite(a->logp[i]))
            t->entropy -= math_exp(a->logp[i]) * a->logp[i];
        else
            is_finite = false;
    }
    t->actions[a->action]++;
    t->decisions++;
    return is_finite;
}

void rollout_stats_add_reward(struct rollout_stats *t, double reward) {
    t->sum += reward;
    t->squares += reward * reward;
}

void rollout_stats_to_health(struct rollout_stats *t, int n_actions, struct policy_health *h) {
    double n = (double)MAX(t->decisions, 1);
    int64_t max_count = 0;
    for (int i = 0; i < n_actions; i++) max_count = MAX(max_count, t->actions[i]);
    h->decisions = t->decisions;
    h->entropy = t->entropy / n;
    h->most_repeated = (double)max_count / n;
    h->reward = t->sum / n;
    h->spread = sqrt(fmax(0, t->squares / n - h->reward * h->reward));
    h->collapsed = t->decisions > 0 && (h->most_repeated >= MAX_REPEATED_SHARE ||
                                        h->entropy < MIN_ENTROPY || h->spread == 0);
    *t = (struct rollout_stats){0};
}

/* a generation */

uint64_t simulation_seed(uint64_t seed, int generation, int world) {
    struct rng r = rng_make(seed, RNG_WORLD, (uint32_t)world, (uint32_t)generation);
    return rng_u64(&r) >> 12; // at most 52 bits: exact as a JSON number
}

uint64_t simulation_held_out_seed(int map) {
    return ((uint64_t)1 << 52) + (uint64_t)map; // above all values of simulation_seed
}

static struct adapter *current_adapter(const struct simulation *s, int policy) {
    return s->learner ? learner_adapter(s->learner, policy) : s->policies[policy].adapter;
}

static bool is_truncated(const struct environment *e, int agent) {
    return e->is_truncated && e->is_truncated(e->ctx, agent);
}

/* Collects the prompts of all active agents in the first n_envs environments, and with
 * `include_truncated` also those of truncated agents. Returns the number of prompts. */
static int agents_collect_prompts(struct simulation *s, int n_envs, int tick,
                                  bool include_truncated) {
    int n = 0;
    s->text.len = 0;
    for (int agent = 0; agent < n_envs * s->agents_per_env; agent++) {
        int env = agent / s->agents_per_env, env_agent = agent % s->agents_per_env;
        size_t text_offset = s->text.len;
        if (!include_truncated && is_truncated(s->envs[env], env_agent)) continue;
        if (!s->envs[env]->prompt(s->envs[env]->ctx, env_agent, &s->text)) continue;
        s->pending[n] = (struct policy_decision){
            .adapter = current_adapter(s, agent % s->n_policies),
            .rng = rng_make(s->seeds[env], RNG_SAMPLE, (uint32_t)env_agent, (uint32_t)tick),
            .text_offset = text_offset,
            .text_len = s->text.len - text_offset};
        if (s->learner) learner_perturb(s->learner, s->generation, tick, agent, &s->pending[n]);
        s->decision_agent[n++] = agent;
    }
    return n;
}

static void agents_record_actions(struct simulation *s, int n) {
    bool imitates_expert = strcmp(s->o->learn.learn, "clone") == 0;
    for (int k = 0; k < n; k++) {
        int agent = s->decision_agent[k], env = agent / s->agents_per_env;
        const struct environment *e = s->envs[env];
        if (s->learner)
            learner_observe_action(
                s->learner, agent, &s->pending[k],
                imitates_expert ? e->expert_action(e->ctx, agent % s->agents_per_env) : -1);
        else
            rollout_stats_add_action(&s->rollout_stats[agent % s->n_policies], &s->pending[k],
                                     e->n_actions);
        s->actions[agent] = (int16_t)s->pending[k].action;
    }
}

/* The words that the agents say in this tick are second decisions, whose prompts also have the
 * actions: "…: north:". They continue the random streams of the first ones. */
static int choose_words(struct simulation *s, int n, struct error *err) {
    bool imitates_expert = strcmp(s->o->learn.learn, "clone") == 0; // no teacher says words
    s->word_text.len = 0;
    for (int k = 0; k < n; k++) {
        const struct policy_decision *action = &s->pending[k];
        struct policy_decision *word = &s->words[k];
        *word = *action;
        word->says_word = true;
        word->text_offset = s->word_text.len;
        buf_add(&s->word_text, s->text.data + action->text_offset, action->text_len);
        buf_printf(&s->word_text, " %s:", s->envs[0]->actions[action->action]);
        word->text_len = s->word_text.len - word->text_offset;
    }
    int rc = policy_runner_act(s->policy_runner, s->words, n, &s->word_text, err);
    for (int k = 0; rc == OK && k < n; k++) {
        int agent = s->decision_agent[k];
        s->actions[agent] += (int16_t)(s->envs[0]->n_actions * s->words[k].action);
        if (s->learner && !imitates_expert) learner_observe_word(s->learner, agent, &s->words[k]);
    }
    return rc;
}

static void agents_record_rewards(struct simulation *s, int n) {
    struct buf scratch = {0};
    for (int k = 0; k < n; k++) {
        int agent = s->decision_agent[k], env = agent / s->agents_per_env;
        const struct environment *e = s->envs[env];
        s->totals[agent] += s->rewards[agent];
        if (!s->learner) {
            rollout_stats_add_reward(&s->rollout_stats[agent % s->n_policies], s->rewards[agent]);
            continue;
        }
        scratch.len = 0;
        bool terminated = !e->prompt(e->ctx, agent % s->agents_per_env, &scratch);
        learner_observe_reward(s->learner, agent, s->rewards[agent], terminated);
    }
    buf_release(&scratch);
}

/* Simulates a tick of all agents in the first n_envs environments. Returns the number of decisions,
 * or an error. */
static int agents_step(struct simulation *s, int n_envs, int tick, struct error *err) {
    int n = s->n_pending = agents_collect_prompts(s, n_envs, tick, false);
    if (n == 0) return 0;
    for (int agent = 0; agent < n_envs * s->agents_per_env; agent++) s->actions[agent] = -1;
    if (policy_runner_act(s->policy_runner, s->pending, n, &s->text, err) != OK) return err->code;
    agents_record_actions(s, n);
    if (s->words && choose_words(s, n, err) != OK) return err->code;
    for (int e = 0; e < n_envs; e++)
        if (s->envs[e]->will_step)
            s->envs[e]->will_step(s->envs[e]->ctx, s->actions + e * s->agents_per_env);
    for (int e = 0; e < n_envs; e++)
        if (s->envs[e]->step(s->envs[e]->ctx, s->actions + e * s->agents_per_env,
                             s->rewards + e * s->agents_per_env, err) != OK)
            return err->code;
    agents_record_rewards(s, n);
    return n;
}

/* map_size: cells per side of the maps; 0: full size. */
static int envs_reset(struct simulation *s, int n_envs, int map_size, struct error *err) {
    memset(s->totals, 0, (size_t)s->n_agents * sizeof *s->totals);
    for (int e = 0; e < n_envs; e++)
        if (s->envs[e]->map_size)
            s->envs[e]->set_map_size(s->envs[e]->ctx, map_size ? map_size : s->envs[e]->map_size);
    for (int e = 0; e < n_envs; e++)
        if (s->envs[e]->will_reset) s->envs[e]->will_reset(s->envs[e]->ctx, s->seeds[e]);
    for (int e = 0; e < n_envs; e++)
        if (s->envs[e]->reset(s->envs[e]->ctx, s->seeds[e], err) != OK) return err->code;
    return OK;
}

/* Ends all episodes; the critic estimates the rewards that pending decisions would still
 * receive. */
static void agents_finish_episodes(struct simulation *s, int tick) {
    int n = agents_collect_prompts(s, (int)s->o->n_envs, tick, true);
    policy_runner_tokenize(s->policy_runner, s->pending, n, &s->text);
    for (int i = 0; i < n; i++)
        learner_finish_episode(s->learner, s->decision_agent[i], &s->pending[i]);
}

static struct episode_stats episode_stats_of(const struct simulation *s, int agent) {
    const struct environment *e = s->envs[agent / s->agents_per_env];
    struct episode_stats v = {.fitness = s->totals[agent], .reward = s->totals[agent]};
    if (e->episode_stats) e->episode_stats(e->ctx, agent % s->agents_per_env, &v);
    return v;
}

/* Records the outcomes, health, adapters and critics of a generation. */
static void policies_record(struct simulation *s) {
    for (int i = 0; i < s->n_policies; i++) {
        struct policy_record *m = &s->policies[i];
        struct episode_stats before = m->outcome;
        double n = (s->n_agents - i + s->n_policies - 1) / s->n_policies;
        m->outcome = (struct episode_stats){0};
        for (int agent = i; agent < s->n_agents; agent += s->n_policies) {
            struct episode_stats v = episode_stats_of(s, agent);
            episode_stats_add(&m->outcome, &v, 1 / n);
        }
        if (s->o->carry_elite_stats && m->elite) episode_stats_add(&m->outcome, &before, 1);
        if (!s->learner) {
            m->health = (struct policy_health){0};
            if (strcmp(s->o->decode, "text") != 0) // no probabilities are known for generated text
                rollout_stats_to_health(&s->rollout_stats[i], s->envs[0]->n_actions, &m->health);
            continue;
        }
        m->health = learner_health(s->learner, i);
        adapter_release(m->adapter);
        m->adapter = adapter_retain(learner_adapter(s->learner, i));
        free(m->critic);
        m->critic = learner_critic(s->learner, i);
    }
}

/* Sorts by fitness, best first; stable at equal fitness. */
static void policies_sort(struct simulation *s) {
    for (int i = 1; i < s->n_policies; i++) {
        struct policy_record m = s->policies[i];
        int pos = i;
        for (; pos > 0 && m.outcome.fitness > s->policies[pos - 1].outcome.fitness; pos--)
            s->policies[pos] = s->policies[pos - 1];
        s->policies[pos] = m;
    }
}

int simulation_evaluate(struct simulation *s, struct episode_stats *out, struct error *err) {
    int rc = OK, maps = (int)s->o->eval_maps, batch = (int)s->o->n_envs;
    for (int map = 0; rc == OK && map < maps; map += batch) {
        int n_envs = MIN(batch, maps - map), n = 1;
        for (int e = 0; e < n_envs; e++) s->seeds[e] = simulation_held_out_seed(map + e);
        rc = envs_reset(s, n_envs, 0, err);
        for (int tick = 0; rc == OK && n > 0 && tick < s->o->steps; tick++)
            n = agents_step(s, n_envs, tick, err);
        if (n < 0) rc = n;
        for (int agent = 0; rc == OK && agent < n_envs * s->agents_per_env; agent++) {
            struct episode_stats v = episode_stats_of(s, agent);
            if (agent % s->agents_per_env == 0)
                out[map + agent / s->agents_per_env] = (struct episode_stats){0};
            episode_stats_add(&out[map + agent / s->agents_per_env], &v, 1.0 / s->agents_per_env);
        }
    }
    return rc;
}

/* breeding */

/* The weighted mean of the parents' norms. Averaging parents that differ reduces ‖ΔW‖, so the child
 * is rescaled to this norm. */
static double mean_norm(struct adapter *const *parents, const float *weights) {
    double sum = 0;
    for (int i = 0; i < 2; i++)
        sum += (double)weights[i] * sqrt(adapter_dot(parents[i], parents[i]));
    return sum;
}

/* The weight of the first parent. The epsilon is that of the legacy formula. */
static double fitness_ratio(const struct policy_record *a, const struct policy_record *b) {
    double f = fmax(a->outcome.fitness, 0), g = fmax(b->outcome.fitness, 0);
    return f + g > 0 ? f / (f + g + 1e-6) : 0.5;
}

struct adapter *policy_to_f16(struct adapter *a, uint64_t seed) {
    struct rng r = rng_make(seed, RNG_SHUFFLE, 0, 1);
    size_t bytes = a->n_data * sizeof(float);
    float *data = xmalloc(bytes);
    adapter_copy_params(a, data);
    struct adapter *f16 = adapter_from_data_f16(&a->shape, &a->config, data, a->lineage, &r);
    adapter_add_training_data(f16, a->training_data);
    adapter_release(a);
    return f16;
}

static struct adapter *crossover(const struct simulation *s, const struct policy_record *a,
                                 const struct policy_record *b, uint64_t seed, struct error *err) {
    const struct adapter_operator *op = operator_find(s->o->crossover, err);
    if (!op) return NULL;
    double ratio = fitness_ratio(a, b);
    bool shares = op->weighting != WEIGHTING_FITNESS;
    float w[2] = {(float)(shares ? ratio : a->outcome.fitness),
                  (float)(shares ? 1 - ratio : b->outcome.fitness)};
    struct adapter *parents[2] = {adapter_to_f32(a->adapter), adapter_to_f32(b->adapter)};
    struct operands x = {.parents = parents,
                         .weights = op->weighting == WEIGHTING_NONE ? NULL : w,
                         .n_parents = 2,
                         .rank =
                             op->weighting == WEIGHTING_FACTORS ? 0 : (int32_t)s->o->learn.train.r,
                         .step = NAN,
                         .seed = seed,
                         .names = (const char *const[]){a->name, b->name}};
    struct adapter *child = operator_apply(op, &x, err);
    if (!child && err->code == ERR_STATE) // an empty child: the fitter parent is used instead
        child = adapter_retain(parents[ratio < 0.5]);
    else if (child && op->weighting == WEIGHTING_DELTA)
        child = operator_rescale(child, mean_norm(parents, w));
    for (int i = 0; i < 2; i++) adapter_release(parents[i]);
    return child;
}

/* Mutates a child, which is not saved without the mutation, or (if the crossover was empty) one of
 * its parents. Takes ownership of `a`. */
static struct adapter *mutate(const struct simulation *s, struct adapter *a, bool is_parent,
                              uint64_t seed, struct error *err) {
    const struct adapter_operator *op = operator_find(s->o->mutation, err);
    struct operands x = {.parents = &a, .n_parents = 1, .step = NAN, .seed = seed};
    struct adapter *child = op ? operator_apply(op, &x, err) : NULL;
    if (child && !is_parent) {
        json_t *lineage = operator_mutated_lineage(a->lineage, child->lineage);
        child = operator_set_lineage(child, lineage);
        json_decref(lineage);
    }
    adapter_release(a);
    return child;
}

static float *critic_copy(const struct simulation *s, const struct policy_record *m) {
    if (!m->critic) return NULL;
    float *copy = xmalloc(learner_critic_bytes(&s->o->learn));
    return memcpy(copy, m->critic, learner_critic_bytes(&s->o->learn));
}

/* Breeds child k from two of the fittest policies; it inherits the critic of the fitter parent,
 * which is first in the sorted list. */
static int child_make(struct simulation *s, int k, struct error *err) {
    struct rng r = rng_make((uint64_t)s->o->seed, RNG_SELECT, (uint32_t)k, (uint32_t)s->generation);
    int n = MIN(s->n_policies, MAX(2, (int)(s->o->parent_fraction * (double)s->n_policies)));
    int i = (int)rng_below(&r, (uint32_t)n), j = n > 1 ? (int)rng_below(&r, (uint32_t)n - 1) : 0;
    const struct policy_record *a = &s->policies[i], *b = &s->policies[n > 1 && j >= i ? j + 1 : j];
    struct policy_record *out = &s->next[k];
    bool mutant = (double)rng_uniform(&r) < s->o->mutation_rate;
    snprintf(out->name, sizeof out->name, "g%dm%d", s->generation, k);
    strcpy(out->parents[0], a->name);
    strcpy(out->parents[1], b->name);
    out->adapter = crossover(s, a, b, rng_u64(&r), err);
    bool is_parent = out->adapter && (strcmp(out->adapter->hash, a->adapter->hash) == 0 ||
                                      strcmp(out->adapter->hash, b->adapter->hash) == 0);
    if (out->adapter && mutant) out->adapter = mutate(s, out->adapter, is_parent, rng_u64(&r), err);
    if (out->adapter && s->o->low_memory) out->adapter = policy_to_f16(out->adapter, rng_u64(&r));
    out->critic = critic_copy(s, MIN(a, b));
    return out->adapter ? OK : err->code;
}

void policy_records_release(struct policy_record *m, int n) {
    for (int i = 0; i < n; i++) {
        adapter_release(m[i].adapter);
        free(m[i].critic);
    }
    memset(m, 0, (size_t)n * sizeof *m);
}

/* Makes the next generation: first the elites, unchanged, then children. */
static int breed(struct simulation *s, struct error *err) {
    int elites = MIN((int)s->o->elites, s->n_policies), rc = OK;
    for (int i = 0; i < elites; i++) {
        s->next[i] = s->policies[i];
        s->next[i].adapter = adapter_retain(s->policies[i].adapter);
        s->next[i].critic = critic_copy(s, &s->policies[i]);
        s->next[i].elite = true;
    }
    for (int k = elites; rc == OK && k < s->n_policies; k++) rc = child_make(s, k, err);
    struct policy_record *old = rc == OK ? s->policies : s->next;
    if (rc == OK) s->policies = s->next;
    s->next = old;
    policy_records_release(old, s->n_policies);
    return rc;
}

/* generations */

static int learner_start(struct simulation *s, struct error *err) {
    struct adapter **adapters = xcalloc((size_t)s->n_policies, sizeof *adapters);
    const float **critics = xcalloc((size_t)s->n_policies, sizeof *critics);
    for (int i = 0; i < s->n_policies; i++) {
        adapters[i] = s->policies[i].adapter;
        critics[i] = s->policies[i].critic;
    }
    struct learner_config config = {.m = s->m,
                                    .policy_runner = s->policy_runner,
                                    .temperature = s->o->temperature,
                                    .n_actions = s->envs[0]->n_actions,
                                    .n_words = s->words ? s->envs[0]->n_words : 0,
                                    .n_policies = s->n_policies,
                                    .n_agents = s->n_agents,
                                    .adapters = adapters,
                                    .critics = critics,
                                    .seed = (uint64_t)s->o->seed,
                                    .steps = s->o->steps,
                                    .max_len = policy_max_len(s->o),
                                    .low_memory = s->o->low_memory,
                                    .kv_elem = s->train_kv_elem,
                                    .pool = s->pool};
    s->learner = learner_new(&s->o->learn, &config, err);
    free(adapters);
    free(critics);
    return s->learner ? OK : err->code;
}

int simulation_begin_generation(struct simulation *s, const uint64_t *seeds, struct error *err) {
    int n = (int)s->o->n_envs;
    int rc = s->generation > 0 && s->o->breed ? breed(s, err) : OK;
    for (int e = 0; e < n; e++)
        s->seeds[e] = seeds ? seeds[e] : simulation_seed((uint64_t)s->o->seed, s->generation, e);
    if (rc == OK && strcmp(s->o->learn.learn, "none") != 0) rc = learner_start(s, err);
    s->tick = 0;
    memset(s->rollout_stats, 0, (size_t)s->n_policies * sizeof *s->rollout_stats);
    return rc == OK ? envs_reset(s, n, s->map_size, err) : rc;
}

/* With low_memory there is no room for a second copy of the adapters, so the records refer to the
 * learner's current ones. */
static void records_update_adapters(struct simulation *s) {
    for (int i = 0; i < s->n_policies; i++) {
        struct adapter *current = learner_adapter(s->learner, i);
        if (s->policies[i].adapter == current) continue;
        adapter_release(s->policies[i].adapter);
        s->policies[i].adapter = adapter_retain(current);
    }
}

int simulation_step(struct simulation *s, struct error *err) {
    if (s->tick >= s->o->steps) return 0;
    int n = agents_step(s, (int)s->o->n_envs, s->tick, err);
    if (n <= 0) return n;
    s->decisions += n;
    s->tick++;
    if (s->learner && s->o->low_memory)
        policy_runner_sleep(s->policy_runner); // so that the trainer can use its memory
    int rc = s->learner ? learner_tick(s->learner, s->generation, s->tick, err) : OK;
    if (s->learner && s->o->low_memory) records_update_adapters(s);
    return rc == OK ? n : rc;
}

/* curriculum */

/* The size of the first maps; 0: full size. */
static int curriculum_start(const struct simulation *s) {
    int size = (int)s->o->curriculum;
    bool learns = strcmp(s->o->learn.learn, "none") != 0;
    return learns && size < s->envs[0]->map_size ? size : 0;
}

/* Makes the maps larger if the agents delivered enough in this generation. On a small map an agent
 * finds food and home by chance. Its skills work on larger maps too, because an observation has
 * directions and no positions. */
static void curriculum_advance(struct simulation *s) {
    double delivered = 0;
    if (!s->map_size) return;
    for (int i = 0; i < s->n_policies; i++)
        delivered += s->policies[i].outcome.delivered / s->n_policies;
    if (delivered < CURRICULUM_DELIVERED) return;
    s->map_size += CURRICULUM_STEP;
    if (s->map_size >= s->envs[0]->map_size) s->map_size = 0;
}

int simulation_map_size(const struct simulation *s) {
    return s->map_size;
}

void simulation_end_generation(struct simulation *s) {
    if (s->learner) agents_finish_episodes(s, s->tick);
    policies_record(s);
    curriculum_advance(s);
    policies_sort(s);
    s->generation++;
    learner_free(s->learner);
    s->learner = NULL;
}

void simulation_set_tick(struct simulation *s, int tick) {
    s->tick = tick;
}

const int16_t *simulation_actions(const struct simulation *s) {
    return s->actions;
}

const struct policy_decision *simulation_decision(const struct simulation *s, int agent) {
    for (int i = 0; i < s->n_pending; i++)
        if (s->decision_agent[i] == agent) return &s->pending[i];
    return NULL;
}

int simulation_generations(const struct simulation *s) {
    return s->generation;
}

int64_t simulation_decisions(const struct simulation *s) {
    return s->decisions;
}

int64_t simulation_updates(const struct simulation *s) {
    return s->learner ? learner_updates(s->learner) : 0;
}

int simulation_n_policies(const struct simulation *s) {
    return s->n_policies;
}

const struct policy_record *simulation_policy(const struct simulation *s, int rank) {
    CHECK(rank >= 0 && rank < s->n_policies);
    return &s->policies[rank];
}

/* creation */

/* An initial adapter with noise in B, so that the policies differ. With init_noise 0 the adapter
 * does not change the model. */
static struct adapter *founder_new(const struct simulation *s, int i, struct error *err) {
    struct adapter_config c;
    if (train_adapter_config(&s->o->learn.train, &s->m->config, &c, err) != OK) {
        adapter_config_release(&c);
        return NULL;
    }
    struct rng r = rng_make((uint64_t)s->o->seed, RNG_INIT, (uint32_t)i, 1);
    uint64_t seed = rng_u64(&r);
    struct adapter *a = adapter_new_for_model(s->m, &c, seed, err), *b = NULL;
    adapter_config_release(&c);
    if (!a || s->o->init_noise <= 0) return a;
    b = adapter_mutate(a, 1, (float)s->o->init_noise, true, rng_u64(&r));
    json_object_del(b->lineage, "parents"); // `a`, which is not saved
    adapter_release(a);
    return b;
}

static int policies_init(struct simulation *s, struct adapter *const *first, int n_first,
                         struct error *err) {
    for (int i = 0; i < s->n_policies; i++) {
        struct policy_record *m = &s->policies[i];
        snprintf(m->name, sizeof m->name, "g0m%d", i);
        m->adapter = n_first ? adapter_retain(first[i % n_first]) : founder_new(s, i, err);
        if (!m->adapter) return err->code;
        if (s->o->low_memory) m->adapter = policy_to_f16(m->adapter, (uint64_t)(s->o->seed + i));
    }
    return OK;
}

static void buffers_alloc(struct simulation *s) {
    size_t n = (size_t)s->n_agents;
    s->policies = xcalloc((size_t)s->n_policies, sizeof *s->policies);
    s->next = xcalloc((size_t)s->n_policies, sizeof *s->next);
    s->pending = xcalloc(n, sizeof *s->pending);
    if (s->envs[0]->n_words && strcmp(s->o->decode, "text") != 0)
        s->words = xcalloc(n, sizeof *s->words);
    s->decision_agent = xcalloc(n, sizeof *s->decision_agent);
    s->actions = xcalloc(n, sizeof *s->actions);
    s->rewards = xcalloc(n, sizeof *s->rewards);
    s->totals = xcalloc(n, sizeof *s->totals);
    s->rollout_stats = xcalloc((size_t)s->n_policies, sizeof *s->rollout_stats);
    s->seeds = xcalloc((size_t)s->o->n_envs, sizeof *s->seeds);
}

/* For the whole process: memory becomes resident in pages of 4 KiB from now on, and large blocks
 * return to the system when they are freed. The weights, which were loaded before, stay in huge
 * pages. A trainer's activations are a few megabytes, of which a pass uses half: huge pages would
 * make all of them resident. */
static void memory_use_small_pages(void) {
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0); // if it fails, the simulation needs more memory
    mallopt(M_MMAP_THRESHOLD, 1 << 16);
}

int32_t policy_max_len(const struct simulation_options *o) {
    return o->limits.max_len ? (int32_t)o->limits.max_len : POLICY_MAX_LEN;
}

/* Sets the types of keys and values in decisions and in training. With low_memory, decisions have
 * f16 instead of f32. */
static int kv_dtypes_parse(const struct simulation_options *o, enum numeric_class cls,
                           enum dtype *decisions, enum dtype *training, struct error *err) {
    *training = DTYPE_F32;
    *decisions = cls == NUMERIC_FAST && !o->low_memory ? DTYPE_BF16 : DTYPE_F32;
    if (o->kv_cache_dtype) {
        if (kv_cache_dtype_parse(o->kv_cache_dtype, cls, training, err) != OK) return err->code;
        *decisions = *training;
    }
    if (o->low_memory && *decisions == DTYPE_F32) *decisions = DTYPE_F16;
    return OK;
}

int simulation_policy_count(const struct simulation_options *o, int agents) {
    return MIN(agents * (int)o->n_envs, o->n_adapters ? (int)o->n_adapters : agents);
}

int simulation_runner_options(const struct simulation_options *o, enum numeric_class cls,
                              int n_agents, struct pool *pool, struct policy_runner_options *out,
                              enum dtype *training, struct error *err) {
    int seqs = (int)o->limits.max_seqs;
    *out = (struct policy_runner_options){.temperature = o->temperature,
                                          .text = strcmp(o->decode, "text") == 0,
                                          .max_rows = MIN(512, MAX(64, n_agents * 16)),
                                          .max_seqs = seqs ? seqs : MIN(n_agents, 256),
                                          .max_len = policy_max_len(o),
                                          .fixed_len = o->limits.max_len > 0,
                                          .cached_decisions =
                                              o->low_memory ? 0 : DEFAULT_CACHED_DECISIONS,
                                          .pool = pool};
    if (dtype_parse(o->lora_dtype, &out->lora_elem, err) != OK ||
        kv_dtypes_parse(o, cls, &out->kv_elem, training, err) != OK)
        return err->code;
    if (!o->low_memory) return OK;
    // decide for a few agents at a time; most prompts fit into one KV page
    out->max_rows = POLICY_BATCH_ROWS;
    out->max_seqs = seqs ? seqs : POLICY_BATCH_SEQS;
    out->n_pages = MAX(out->max_seqs, kv_cache_pages_for(out->max_len));
    out->lora_elem = DTYPE_F16;
    return OK;
}

struct simulation *simulation_new(const struct model *m, const struct simulation_options *o,
                                  struct environment *const *envs, struct adapter *const *first,
                                  int n_first, struct pool *pool, struct error *err) {
    struct simulation *s = xcalloc(1, sizeof *s);
    int agents_per_env = envs[0]->n_agents, n_agents = agents_per_env * (int)o->n_envs;
    *s = (struct simulation){
        .m = m, .o = o, .envs = envs, .pool = pool, .agents_per_env = agents_per_env};
    s->n_agents = n_agents;
    s->n_policies = simulation_policy_count(o, agents_per_env);
    s->map_size = curriculum_start(s);
    struct policy_runner_options runner_options;
    if (simulation_runner_options(o, m->cls, n_agents, pool, &runner_options, &s->train_kv_elem,
                                  err) != OK) {
        free(s);
        return NULL;
    }
    if (o->low_memory) memory_use_small_pages();
    buffers_alloc(s);
    s->policy_runner = policy_runner_new(m, envs[0], &runner_options, err);
    if (s->policy_runner && policies_init(s, first, n_first, err) == OK) return s;
    simulation_free(s);
    return NULL;
}

int simulation_least_bytes(const struct model_config *c, enum numeric_class cls,
                           const struct simulation_options *o, int agents, struct pool *pool,
                           size_t *out, struct error *err) {
    int n = o->n_adapters ? (int)MIN(o->n_adapters, agents) : agents;
    struct engine_options engine = {.max_len = MIN(policy_max_len(o), c->max_seq_len),
                                    .pool = pool};
    struct train_options to = o->learn.train;
    struct adapter_config a;
    enum dtype training;
    bool learns = strcmp(o->learn.learn, "none") != 0;
    if (kv_dtypes_parse(o, cls, &engine.kv_elem, &training, err) != OK) return err->code;
    to.kv_cache_dtype = o->kv_cache_dtype;
    int rc = train_adapter_config(&to, c, &a, err);
    if (rc == OK)
        *out = (size_t)pool_size(pool) * engine_least_bytes(c, &engine) + 2 * WORK_BYTES +
               2 * (size_t)n * adapter_param_count(c, &a) * 2 * sizeof(float); // with their packs
    if (rc == OK && learns)
        *out += trainer_least_bytes(c, cls, &a, n, &to, pool, policy_max_len(o));
    adapter_config_release(&a);
    return rc;
}

void simulation_free(struct simulation *s) {
    if (!s) return;
    learner_free(s->learner);
    policy_runner_free(s->policy_runner);
    policy_records_release(s->policies, s->n_policies);
    policy_records_release(s->next, s->n_policies);
    buf_release(&s->text);
    buf_release(&s->word_text);
    free(s->words);
    free(s->policies);
    free(s->next);
    free(s->pending);
    free(s->decision_agent);
    free(s->actions);
    free(s->rewards);
    free(s->totals);
    free(s->rollout_stats);
    free(s->seeds);
    free(s);
}

/* options */

#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    {                                                                                              \
        name, type, offsetof(struct simulation_options, field), fallback, min, max, metavar,       \
            __VA_ARGS__                                                                            \
    }

const struct option_row simulation_option_rows[] = {
    ROW("num-adapters", OPT_INT, n_adapters, "1", 0, MAX_POLICIES, "N",
        "number of adapters (policies); further agents share them (0: one per agent of a world)"),
    ROW("num-envs", OPT_INT, n_envs, "1", 1, 1024, "N", "worlds that are simulated at once"),
    ROW("generations", OPT_INT, generations, "10", 0, 1e6, "N",
        "generations, an episode each; 0: only evaluate"),
    ROW("temperature", OPT_FLOAT, temperature, "4", 1e-3, 100, "X",
        "temperature of action sampling"),
    ROW("decode", OPT_STRING, decode, "score", 0, 0, "NAME",
        "score: sample from the exact probabilities of the actions; text: generate text and parse "
        "it (legacy)",
        JOB_ARG_TEXT),
    ROW("teacher", OPT_STRING, teacher, "reflex", 0, 0, "NAME", "the policy that clone imitates",
        JOB_ARG_TEXT),
    ROW("breed", OPT_BOOL, breed, "true", 0, 0, NULL,
        "evolution: the next generation consists of elites and children of the fittest"),
    ROW("elites", OPT_INT, elites, "1", 0, MAX_POLICIES, "N",
        "adapters that enter the next generation unchanged"),
    ROW("parent-fraction", OPT_FLOAT, parent_fraction, "0.5", 0, 1, "P",
        "fraction of the fittest adapters that become parents"),
    ROW("crossover", OPT_STRING, crossover, "delta", 0, 0, "NAME",
        "crossover operator (see 'shoal adapter operators')", JOB_ARG_TEXT),
    ROW("mutation", OPT_STRING, mutation, "noise", 0, 0, "NAME", "mutation operator", JOB_ARG_TEXT),
    ROW("mutation-rate", OPT_FLOAT, mutation_rate, "0.1", 0, 1, "P",
        "fraction of the children that mutate"),
    ROW("init-noise", OPT_FLOAT, init_noise, "0.02", 0, 10, "X",
        "standard deviation of the initial noise in each adapter; 0: all start as the base model"),
    ROW("carry-elite-stats", OPT_BOOL, carry_elite_stats, NULL, 0, 0, NULL,
        "elites keep the statistics of earlier generations (legacy)"),
    ROW("curriculum", OPT_INT, curriculum, "8", 0, WORLD_SIDE_MAX, "N",
        "cells per side of the first maps of policies that learn; the maps grow to their full size "
        "as the agents deliver (0: full size; drawn maps have one size)"),
    ROW("eval-maps", OPT_INT, eval_maps, "2", 1, 10000, "N",
        "held-out maps of the evaluation after each generation"),
    ROW("lora-dtype", OPT_STRING, lora_dtype, "f32", 0, 0, "ELEM",
        "number format of adapters in the forward pass: f32, bf16, f16 or i8 (with --low-memory: "
        "f16); training uses f32",
        JOB_ARG_TEXT),
    ROW("kv-cache-dtype", OPT_STRING, kv_cache_dtype, "auto", 0, 0, "ELEM",
        "number format of keys and values, for decisions and in training: f32, bf16, f16, i8 or "
        "auto "
        "(f16; bf16 where attention runs in bf16); with --low-memory decisions have f16 instead of "
        "f32",
        JOB_ARG_TEXT),
    ROW("low-memory", OPT_BOOL, low_memory, NULL, 0, 0, NULL,
        "store adapters as f16, and evaluate and train a few at a time"),
    {0},
};

int simulation_options_check(const struct simulation_options *o, struct error *err) {
    if (o->curriculum && o->curriculum < WORLD_SIDE_MIN)
        return error_set(err, ERR_USAGE,
                         "--curriculum %lld: the smallest map has %d cells per side",
                         (long long)o->curriculum, WORLD_SIDE_MIN);
    bool text = strcmp(o->decode, "text") == 0;
    if (!text && strcmp(o->decode, "score") != 0)
        return error_set(err, ERR_USAGE, "no decoding '%s'; there are score and text", o->decode);
    if (text && strcmp(o->learn.learn, "none") != 0)
        return error_set(err, ERR_USAGE,
                         "--decode text requires --learn none: generated text has no action "
                         "probability to train on");
    if (o->low_memory && strcmp(o->learn.learn, "es") == 0)
        return error_set(err, ERR_USAGE, "--learn es and --low-memory exclude each other");
    enum dtype decisions, training;
    if (kv_dtypes_parse(o, NUMERIC_EXACT, &decisions, &training, err) != OK) return err->code;
    if (!world_policy_find(o->teacher))
        return error_set(err, ERR_USAGE, "no policy '%s' for --teacher", o->teacher);
    if (!operator_find(o->crossover, err) || !operator_find(o->mutation, err)) return err->code;
    return learner_options_check(&o->learn, err);
}
