/*
 * learner: replay buffers, and updates of the policies during a generation.
 *
 * A decision is pending until `horizon` rewards have followed. Then its return is final: the
 * critic's value plus the discounted TD errors (generalised advantage estimation, Schulman et al.
 * 2016)
 *
 *     R = V(s0) + Σ (γ λ)^k δk      δk = rk + γ V(s(k+1)) - V(sk)      k = 0 … horizon - 1
 *
 * and the decision enters the policy's replay buffer. V is the critic: a linear function of the
 * tokens at each distance from a prompt's end, single and in pairs, hashed into a table, and
 * trained by least mean squares. r includes the exploration bonus, which fitness and health do not
 * count. An update samples a batch for every policy and runs all batches
 * through the base model in one pass:
 *
 *     gradient   L = -min(ρ A, clip(ρ, 1 ± ε) A) - β H(π)     ρ = π(a) / π_old(a)
 *                A = (R - V) / running RMS of R - V           PPO, Schulman et al. 2017
 *     clone      L = -log π(action of the teacher)
 *     es         no loss of actions: learner_es.c
 *
 * π is the softmax over the actions alone. If every action is one token, a sample is a prompt and
 * its action, and the trainer computes the logits of the actions only. Otherwise an experience has
 * a sample for each action that could have been chosen, and the softmax of their summed
 * log-probabilities is computed here, like the policy runner's. A policy is rolled back to its last
 * healthy snapshot if one of its numbers is not finite, or if it has collapsed and its reward has
 * decreased; the other policies continue.
 *
 * With --update-group-size the trainer has slots for one group of policies, which are loaded for an
 * update, so gradients and activations exist for one group only. The updates of the groups are
 * spread evenly over the ticks between two updates of one group. With --low-memory policies are
 * stored as f16, with stochastic rounding after an update. With either option healthy snapshots are
 * in an unnamed temporary file.
 *
 * Invariant: every random value is a function of (seed, generation, tick, policy).
 */
#define _GNU_SOURCE
#include "backprop/backprop.h"
#include "world/internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    CRITIC_FEATURES = 1 << 14,
    CRITIC_WINDOW = 16, /* number of last tokens of a prompt that are features of the critic */
    VISIT_COUNTERS = 1 << 14, /* counters of visits, with an exploration bonus */
    HEALTH_INTERVAL = 100,    /* ticks between health checks */
    LOW_MEMORY_ROWS = 40,     /* tokens of samples per pass with low_memory */
    SAMPLE_TOKENS = 16,       /* a compact observation with its action; others have more */
};

/* A ring buffer of transitions, the oldest first; a new one overwrites the oldest if it is full. */
struct replay_buffer {
    struct transition {
        int32_t n;               /* tokens of the prompt */
        int16_t action, teacher; /* action: index of the choice; teacher: the expert's, or -1 */
        /* logp: log-probability of the action when it was chosen; ret: the return; while the
         * decision is pending, the sum of discounted TD errors so far. */
        double logp, ret;
        double value;  /* the critic's value at the time of the decision */
        double reward; /* immediate reward */
    } * v;
    int32_t *tokens; /* [cap][stride] */
    int cap, stride, n, first;
};
struct learner_policy {
    struct adapter *adapter; /* current weights */
    struct replay_buffer replay;
    int n_new;     /* number of transitions since its last update */
    float *critic; /* [CRITIC_FEATURES] */
    float *visits; /* [VISIT_COUNTERS] after the critic's weights; NULL: no exploration bonus */
    double mean_squared_critic_error; /* running mean of the critic's squared errors */
    uint8_t *optimizer_state;         /* the saved optimizer state if policies are swapped (see
                                         swaps_policies), else NULL */
    int64_t updates;
    struct rollout_stats rollout_stats; /* statistics since the last health check */
    bool nonfinite;                     /* some number is not finite */
    /* result of the last health check */
    struct policy_health health;
    double snapshot_reward;
};
struct learner {
    const struct learner_options *o;
    const struct model *m;
    double temperature;
    const struct token_seq *choices; /* [n_actions + n_words]: an action, or a word to say */
    const int32_t *choice_tokens;    /* their last tokens; NULL: some differ in several tokens */
    int32_t n_common[2];             /* tokens with which all actions begin, and all words */
    int n_actions, n_words, n_policies, n_agents;
    bool clone, low_memory;
    int64_t pass_rows;    /* tokens of samples per pass, unless one sample has more */
    enum dtype lora_elem; /* element type of the adapters for decisions */
    struct pool *pool;
    uint64_t seed;
    int64_t steps; /* ticks of a generation */
    int group;     /* number of policies per update */
    int first;     /* first policy of the current group */
    struct trainer *trainer;
    /* The healthy snapshots. If policies are swapped (see swaps_policies), `snapshot` is NULL, and
     * the file holds their weights in f32, one policy after the other. */
    struct trainer_snapshot *snapshot;
    FILE *snapshot_file;
    struct learner_es *es; /* NULL unless the policies learn by es */
    bool *es_updated;      /* [n_policies] policies that es updates */
    struct learner_policy *policies;
    struct replay_buffer *pending; /* [n_agents] pending decisions, at most `horizon` */
    struct replay_buffer *words;   /* [n_agents] the words of these decisions; NULL: no words */
    double *discount_powers;       /* [horizon + 1] powers of γ λ */

    int64_t longest_sample; /* tokens, for which the passes are planned */

    /* an update: experiences and their samples, in the same order */
    const struct transition **batch_experience; /* [group · batch_size] */
    double *advantage;                          /* [group · batch_size] */
    struct train_sample *samples;               /* [group · batch_size · samples_max] */
    int *experience;                            /* same shape: the experience of each sample */
    int samples_max;                            /* maximal number of samples of an experience */
};

/* replay buffer */

static struct transition *replay_buffer_at(const struct replay_buffer *m, int i) {
    return &m->v[(m->first + i) % m->cap];
}

static int32_t *replay_buffer_tokens(const struct replay_buffer *m, const struct transition *e) {
    return m->tokens + (int64_t)(e - m->v) * m->stride;
}

/* A prompt that is longer than all earlier ones widens every entry. All memory is written
 * immediately, so that the process's memory use is visible at the start and not after a thousand
 * ticks. */
static void replay_buffer_widen(struct replay_buffer *m, int n) {
    if (n <= m->stride) return;
    int new_stride = (n + 7) / 8 * 8;
    size_t bytes = (size_t)m->cap * (size_t)new_stride * sizeof(int32_t);
    int32_t *to = memset(xmalloc(bytes), 0, bytes);
    for (int i = 0; m->stride && i < m->cap; i++)
        memcpy(to + (int64_t)i * new_stride, m->tokens + (int64_t)i * m->stride,
               (size_t)m->stride * sizeof *to);
    free(m->tokens);
    m->tokens = to;
    m->stride = new_stride;
}

static void replay_buffer_add(struct replay_buffer *m, const struct transition *e,
                              const int32_t *tokens) {
    replay_buffer_widen(m, e->n);
    if (m->n == m->cap) {
        m->first = (m->first + 1) % m->cap;
        m->n--;
    }
    struct transition *to = replay_buffer_at(m, m->n++);
    *to = *e;
    memcpy(replay_buffer_tokens(m, to), tokens, (size_t)e->n * sizeof *tokens);
}

static void replay_buffer_remove_oldest(struct replay_buffer *m) {
    m->first = (m->first + 1) % m->cap;
    m->n--;
}

static struct replay_buffer replay_buffer_init(int64_t cap) {
    size_t bytes = (size_t)cap * sizeof(struct transition);
    return (struct replay_buffer){.v = memset(xmalloc(bytes), 0, bytes), .cap = (int)cap};
}

static void replay_buffer_release(struct replay_buffer *m) {
    free(m->v);
    free(m->tokens);
}

/* the critic */

/* Computes the indices of a prompt's features in the critic's table; returns their number. */
static int critic_features(const int32_t *tokens, int n, uint32_t *out) {
    uint32_t hashes[CRITIC_WINDOW];
    int count = 0, window = MIN(n, CRITIC_WINDOW);
    for (int i = 0; i < window; i++) {
        hashes[i] = ((uint32_t)tokens[n - 1 - i] * CRITIC_WINDOW + (uint32_t)i) * 2654435761u;
        out[count++] = hashes[i] >> 18;
        for (int j = 0; j < i; j++)
            out[count++] = ((hashes[i] ^ hashes[j] * 5) * 2246822519u) >> 18;
    }
    return count;
}
_Static_assert(1 << 14 == CRITIC_FEATURES, "14 bits remain of a hash");

enum { MAX_FEATURES = CRITIC_WINDOW * (CRITIC_WINDOW + 1) / 2 };

static double critic_value(const struct learner_policy *m, const int32_t *tokens, int n) {
    uint32_t features[MAX_FEATURES];
    double sum = 0;
    int count = critic_features(tokens, n, features);
    for (int i = 0; i < count; i++) sum += (double)m->critic[features[i]];
    return sum;
}

static void critic_update(struct learner *l, struct learner_policy *m, const int32_t *tokens, int n,
                          double ret) {
    uint32_t features[MAX_FEATURES];
    int count = critic_features(tokens, n, features);
    double error = ret - critic_value(m, tokens, n);
    for (int i = 0; i < count; i++)
        m->critic[features[i]] += (float)(l->o->critic_lr * error / count);
    m->mean_squared_critic_error += (m->mean_squared_critic_error > 0 ? 0.01 : 1) *
                                    (error * error - m->mean_squared_critic_error);
}

/* Counts a visit to a prompt, and returns the reward for the n-th one: β / √n, so that agents
 * explore (Strehl and Littman 2008). Prompts are counted by a hash (Tang et al. 2017). */
static double exploration_bonus(const struct learner *l, struct learner_policy *m,
                                const int32_t *tokens, int n) {
    if (!m->visits) return 0;
    float *visits = &m->visits[hash_fnv1a(tokens, (size_t)n * sizeof *tokens) % VISIT_COUNTERS];
    *visits += 1;
    return l->o->exploration_bonus / sqrt((double)*visits);
}

/* observations */

static struct learner_policy *policy_of_agent(const struct learner *l, int agent) {
    return &l->policies[agent % l->n_policies];
}

/* Adds a decision with its final return to a policy's replay buffer. */
static void transition_add(struct learner *l, struct learner_policy *m, const struct transition *e,
                           const int32_t *tokens) {
    critic_update(l, m, tokens, e->n, e->ret);
    replay_buffer_add(&m->replay, e, tokens);
    m->n_new = MIN(m->n_new + 1, m->replay.cap);
}

/* Completes the return of an agent's oldest pending decision and adds it to the replay buffer. */
static void finalize_return(struct learner *l, int agent) {
    struct replay_buffer *pending = &l->pending[agent];
    struct learner_policy *m = policy_of_agent(l, agent);
    struct transition *e = replay_buffer_at(pending, 0);
    const int32_t *tokens = replay_buffer_tokens(pending, e);
    e->ret += e->value;
    transition_add(l, m, e, tokens);
    if (l->words && l->words[agent].n) {
        struct transition *word = replay_buffer_at(&l->words[agent], 0);
        word->ret = e->ret;
        transition_add(l, m, word, replay_buffer_tokens(&l->words[agent], word));
        replay_buffer_remove_oldest(&l->words[agent]);
    }
    replay_buffer_remove_oldest(pending);
}

/* Adds the TD error of the newest decision, whose next state has the value `next`, to all pending
 * returns. */
static void td_error_add(struct learner *l, int agent, double next) {
    struct replay_buffer *pending = &l->pending[agent];
    if (pending->n == 0) return;
    const struct transition *last = replay_buffer_at(pending, pending->n - 1);
    double delta = last->reward + l->o->discount * next - last->value;
    for (int i = 0; i < pending->n; i++)
        replay_buffer_at(pending, i)->ret += l->discount_powers[pending->n - 1 - i] * delta;
}

void learner_perturb(struct learner *l, int generation, int tick, int agent,
                     struct policy_decision *a) {
    if (l->es) learner_es_perturb(l->es, generation, tick, agent, a);
}

void learner_observe_action(struct learner *l, int agent, const struct policy_decision *a,
                            int teacher) {
    struct replay_buffer *pending = &l->pending[agent];
    struct learner_policy *m = policy_of_agent(l, agent);
    m->nonfinite |= !rollout_stats_add_action(&m->rollout_stats, a, l->n_actions);
    if (l->es) return;
    double value = critic_value(m, a->tokens, a->n),
           bonus = exploration_bonus(l, m, a->tokens, a->n);
    if (pending->n) replay_buffer_at(pending, pending->n - 1)->reward += bonus;
    td_error_add(l, agent, value);
    if (pending->n == pending->cap) finalize_return(l, agent);
    replay_buffer_add(pending,
                      &(struct transition){.n = a->n,
                                           .action = (int16_t)a->action,
                                           .teacher = (int16_t)teacher,
                                           .logp = a->logp[a->action],
                                           .value = value},
                      a->tokens);
}

void learner_observe_word(struct learner *l, int agent, const struct policy_decision *word) {
    double logp = word->logp[word->action];
    policy_of_agent(l, agent)->nonfinite |= !isfinite(logp);
    if (l->es) return;
    replay_buffer_add(&l->words[agent],
                      &(struct transition){.n = word->n,
                                           .action = (int16_t)(l->n_actions + word->action),
                                           .teacher = -1,
                                           .logp = logp},
                      word->tokens);
}

void learner_observe_reward(struct learner *l, int agent, double reward, bool terminated) {
    struct replay_buffer *pending = &l->pending[agent];
    struct learner_policy *m = policy_of_agent(l, agent);
    rollout_stats_add_reward(&m->rollout_stats, reward);
    if (l->es) {
        learner_es_observe_reward(l->es, agent, reward);
        return;
    }
    replay_buffer_at(pending, pending->n - 1)->reward = reward;
    if (terminated) learner_finish_episode(l, agent, NULL);
}

void learner_finish_episode(struct learner *l, int agent, const struct policy_decision *next) {
    td_error_add(l, agent,
                 next ? critic_value(policy_of_agent(l, agent), next->tokens, next->n) : 0);
    while (l->pending[agent].n) finalize_return(l, agent);
}

/* updates */

/* The owner of the replay buffer to sample from: the policy, or with probability `share` any
 * policy. */
static struct learner_policy *replay_owner(struct learner *l, int policy, struct rng *r) {
    struct learner_policy *self = &l->policies[policy], *other = self;
    if (l->o->shared_experience_fraction > 0 &&
        (double)rng_uniform(r) < l->o->shared_experience_fraction)
        other = &l->policies[rng_below(r, (uint32_t)l->n_policies)];
    return other->replay.n ? other : self;
}

/* Samples from the experience since the owner's last update, or from the whole buffer. */
static const struct transition *replay_sample(const struct learner *l,
                                              const struct learner_policy *m, struct rng *r) {
    int n = m->replay.n;
    bool replayed = m->n_new == 0 || (double)rng_uniform(r) < l->o->replay_fraction;
    int n_candidates = replayed ? n : MIN(m->n_new, n);
    return replay_buffer_at(&m->replay, n - 1 - (int)rng_below(r, (uint32_t)n_candidates));
}

/* The choices of a decision: the actions, or the words after them. */
struct choice_range {
    int begin, end;
};
static struct choice_range choices_of(const struct learner *l, const struct transition *e) {
    return e->action < l->n_actions
               ? (struct choice_range){0, l->n_actions}
               : (struct choice_range){l->n_actions, l->n_actions + l->n_words};
}

/* Sets a sample to a prompt and a choice. The tokens with which all choices begin are no targets:
 * they are given, as in a decision. */
static void sample_set(const struct learner *l, struct train_sample *s, const int32_t *tokens,
                       int32_t n, int choice, int32_t n_common) {
    struct token_seq c = l->choices[choice];
    s->n = n + c.n;
    s->tokens = xrealloc(s->tokens, (size_t)s->n * sizeof *s->tokens);
    s->mask = xrealloc(s->mask, (size_t)s->n);
    memcpy(s->tokens, tokens, (size_t)n * sizeof *tokens);
    memcpy(s->tokens + n, c.v, (size_t)c.n * sizeof *c.v);
    memset(s->mask, 0, (size_t)s->n);
    memset(s->mask + n + n_common, 1, (size_t)(c.n - n_common));
}

/* Samples experience i of a batch for a policy; its samples begin at index `at`. Returns their
 * number. The policy's own transitions have trained its critic when their returns were completed;
 * transitions of another policy train its critic here. */
static int experience_sample(struct learner *l, int i, int at, int policy, struct rng *r) {
    struct learner_policy *m = &l->policies[policy], *owner = replay_owner(l, policy, r);
    const struct transition *e = replay_sample(l, owner, r);
    const int32_t *tokens = replay_buffer_tokens(&owner->replay, e);
    struct choice_range range = choices_of(l, e);
    int chosen = l->clone ? e->teacher : e->action;
    if (l->choice_tokens) range = (struct choice_range){chosen, chosen + 1};
    if (owner != m) critic_update(l, m, tokens, e->n, e->ret);
    for (int k = range.begin; k < range.end; k++, at++) {
        sample_set(l, &l->samples[at], tokens, e->n, k, l->n_common[k >= l->n_actions]);
        l->samples[at].adapter = policy - l->first;
        l->experience[at] = i;
    }
    double rms_critic_error = sqrt(m->mean_squared_critic_error);
    l->batch_experience[i] = e;
    l->advantage[i] =
        rms_critic_error > 0 ? (e->ret - critic_value(m, tokens, e->n)) / rms_critic_error : 0;
    return range.end - range.begin;
}

/* Whether sample k begins the samples of a policy. */
static bool begins_policy(const struct learner *l, int k) {
    return k == 0 || l->samples[k].adapter != l->samples[k - 1].adapter;
}

/* Samples a batch for every policy of the group that has enough experience; returns the number of
 * training samples. */
static int minibatch_sample(struct learner *l, int generation, int tick) {
    int n = 0, n_experiences = 0, batch = (int)l->o->batch_size;
    for (int i = l->first; i < MIN(l->first + l->group, l->n_policies); i++) {
        struct rng r =
            rng_make(l->seed, RNG_DATA, (uint32_t)(generation * 65536 + i), (uint32_t)tick);
        for (int k = 0; l->policies[i].replay.n >= 2 * batch && k < batch; k++)
            n += experience_sample(l, n_experiences++, n, i, &r);
    }
    for (int k = 0; k < n; k++)
        if (begins_policy(l, k)) l->policies[l->first + l->samples[k].adapter].n_new = 0;
    return n;
}

/* log Σ exp of the log-probabilities in the range, which are normalised over all choices. */
static double log_sum_of(const struct loss_sample *s, struct choice_range r) {
    double max = -INFINITY, sum = 0;
    for (int i = r.begin; i < r.end; i++) max = fmax(max, s->logp[i]);
    for (int i = r.begin; i < r.end; i++) sum += math_exp(s->logp[i] - max);
    return max + math_log(sum);
}

/* Sets the loss and its partial derivatives with respect to the log-probabilities; the trainer
 * applies the derivative of the softmax. With words, π is normalised over the decision's own
 * choices: ∂L/∂logp = w - π Σ w in the range, where w are the derivatives for such a π, and 0
 * elsewhere. */
static void ppo_loss(const struct learner *l, const struct transition *e, double advantage,
                     struct loss_sample *s) {
    struct choice_range r = choices_of(l, e);
    double norm = l->n_words ? log_sum_of(s, r) : 0, sum = 0;
    double ratio = math_exp(s->logp[e->action] - norm - e->logp), entropy = 0;
    double eps = l->o->clip_range, bound = fmin(fmax(ratio, 1 - eps), 1 + eps);
    for (int i = 0; i < l->n_actions + l->n_words; i++) s->weight[i] = 0;
    for (int i = r.begin; i < r.end; i++) {
        double logp = s->logp[i] - norm, p = math_exp(logp);
        entropy -= p * logp;
        s->weight[i] = (float)(l->o->entropy_coef * p * (logp + 1));
    }
    if (ratio * advantage <= bound * advantage) s->weight[e->action] -= (float)(ratio * advantage);
    s->loss = -fmin(ratio * advantage, bound * advantage) - l->o->entropy_coef * entropy;
    if (!l->n_words) return;
    for (int i = r.begin; i < r.end; i++) sum += (double)s->weight[i];
    for (int i = r.begin; i < r.end; i++)
        s->weight[i] -= (float)(math_exp(s->logp[i] - norm) * sum);
}

/* The loss of an experience as a function of the log-probabilities of all choices. */
static void experience_loss(const struct learner *l, int i, struct loss_sample *s) {
    const struct transition *e = l->batch_experience[i];
    s->count = 1;
    if (!l->clone) {
        ppo_loss(l, e, l->advantage[i], s);
        return;
    }
    for (int k = 0; k < l->n_actions; k++) s->weight[k] = k == e->teacher ? -1 : 0;
    s->loss = -s->logp[e->teacher];
}

/* The loss of an experience whose choices are samples of their own, v[0] … v[n - 1]. With S_k, the
 * sum of the log-probabilities of a sample's targets, log π_k = S_k / T - log Σ exp(S_j / T), and
 * ∂L/∂S_k = (w_k - π_k Σ w) / T, where w = ∂L/∂log π. */
static void sequences_loss(const struct learner *l, int i, struct loss_sample *v, int n) {
    double logp[ENV_MAX_ACTIONS], sum = 0;
    float w[ENV_MAX_ACTIONS];
    struct loss_sample all = {.logp = logp, .weight = w};
    struct choice_range r = choices_of(l, l->batch_experience[i]);
    CHECK(n == r.end - r.begin);
    for (int k = 0; k < n; k++) {
        logp[r.begin + k] = 0;
        for (int32_t j = 0; j < v[k].n; j++) logp[r.begin + k] += v[k].logp[j] / l->temperature;
    }
    double norm = log_sum_of(&all, r);
    for (int k = r.begin; k < r.end; k++) logp[k] -= norm;
    experience_loss(l, i, &all);
    for (int k = r.begin; k < r.end; k++) sum += (double)w[k];
    for (int k = 0; k < n; k++) {
        double dl = ((double)w[r.begin + k] - math_exp(logp[r.begin + k]) * sum) / l->temperature;
        for (int32_t j = 0; j < v[k].n; j++) v[k].weight[j] = (float)dl;
        v[k].loss = v[k].count = 0;
    }
    v[0].loss = all.loss;
    v[0].count = all.count;
}

static int minibatch_loss(void *ctx, struct loss_sample *scored, int n, struct error *err) {
    struct learner *l = ctx;
    (void)err;
    for (int i = 0, end; i < n; i = end) {
        int experience = l->experience[scored[i].sample - l->samples];
        for (end = i + 1; end < n && l->experience[scored[end].sample - l->samples] == experience;)
            end++;
        if (l->choice_tokens)
            experience_loss(l, experience, &scored[i]);
        else
            sequences_loss(l, experience, scored + i, end - i);
    }
    return OK;
}

/* Whether the trainer does not keep all policies: they are loaded for an update and copied back. */
static bool swaps_policies(const struct learner *l) {
    return l->snapshot_file != NULL;
}

/* Takes ownership of `floats`, which must be malloc'ed. */
static void policy_set_weights(struct learner *l, int i, float *floats, struct rng *r) {
    struct learner_policy *m = &l->policies[i];
    const struct adapter *old = m->adapter;
    struct adapter *a =
        l->low_memory ? adapter_from_data_f16(&old->shape, &old->config, floats, old->lineage, r)
                      : adapter_from_owned_data(&old->shape, &old->config, floats, old->lineage);
    adapter_add_training_data(a, old->training_data);
    adapter_release(m->adapter);
    m->adapter = a;
}

/* Copies a policy's weights (and the optimizer state, if policies are swapped) from the trainer
 * after an update. */
static void policy_pull_weights(struct learner *l, int i, int generation, int tick) {
    struct learner_policy *m = &l->policies[i];
    struct rng r =
        rng_make(l->seed, RNG_SHUFFLE, (uint32_t)(generation * 65536 + i), (uint32_t)tick);
    size_t bytes = m->adapter->n_data * sizeof(float);
    policy_set_weights(
        l, i, memcpy(xmalloc(bytes), trainer_adapter_params(l->trainer, i - l->first), bytes), &r);
    m->updates++;
    if (!swaps_policies(l) || trainer_optimizer_state_bytes(l->trainer, i - l->first) == 0) return;
    if (!m->optimizer_state)
        m->optimizer_state = xmalloc(trainer_optimizer_state_bytes(l->trainer, i - l->first));
    trainer_optimizer_state(l->trainer, i - l->first, m->optimizer_state);
}

/* Loads the policies of the current group into the trainer, if policies are swapped. */
static void group_load(struct learner *l) {
    for (int i = 0; swaps_policies(l) && i < l->group && l->first + i < l->n_policies; i++) {
        const struct learner_policy *m = &l->policies[l->first + i];
        trainer_import_adapter(l->trainer, i, m->adapter, m->optimizer_state, m->updates);
    }
}

/* The number of samples in one forward and backward pass, all samples of at least one experience;
 * it does not affect the gradients. */
static int pass_samples(const struct learner *l, int from, int n) {
    int taken = 0;
    int64_t rows = 0;
    for (int k = 0; k < n; k++) {
        rows += l->samples[from + k].n;
        if (rows > l->pass_rows && taken > 0) break;
        if (k + 1 == n || l->experience[from + k + 1] != l->experience[from + k]) taken = k + 1;
    }
    return taken;
}

static int gradients_accumulate(struct learner *l, int from, int n, struct error *err) {
    int rc = OK;
    struct loss_fn loss = {.fn = minibatch_loss,
                           .ctx = l,
                           .temperature = l->choice_tokens ? (float)l->temperature : 1,
                           .choices = l->choice_tokens,
                           .n_choices = l->n_actions + l->n_words};
    for (int taken; rc == OK && n > 0; from += taken, n -= taken) {
        taken = pass_samples(l, from, n);
        rc = trainer_accumulate_loss(l->trainer, l->samples + from, taken, &loss, err);
    }
    return rc;
}

static bool gradients_finite(struct learner *l) {
    for (int i = 0; i < trainer_n_tensors(l->trainer); i++) {
        const struct train_tensor *t = trainer_tensor(l->trainer, i);
        for (int64_t k = 0; k < t->n; k++)
            if (!isfinite(t->g[k])) return false;
    }
    return true;
}

static void sample_move(struct learner *l, int to, int from) {
    struct train_sample s = l->samples[to]; // swapped, so that its buffers are reused
    l->samples[to] = l->samples[from];
    l->samples[from] = s;
    l->experience[to] = l->experience[from];
}

/* Called after a pass over all samples met a non-finite number: finds the policies that cause it,
 * one by one, and removes their samples, which are contiguous per policy. Returns the number of
 * remaining samples. */
static int nonfinite_samples_remove(struct learner *l, int n, struct error *err) {
    int n_kept = 0;
    for (int begin = 0, end; begin < n; begin = end) {
        struct error policy_err;
        for (end = begin + 1; end < n && !begins_policy(l, end);) end++;
        trainer_zero_grad(l->trainer);
        int rc = gradients_accumulate(l, begin, end - begin, &policy_err);
        if (rc != OK && rc != ERR_NUMERIC) return error_set(err, rc, "%s", policy_err.text);
        bool broken = rc != OK || !gradients_finite(l);
        if (broken) l->policies[l->first + l->samples[begin].adapter].nonfinite = true;
        for (int k = begin; !broken && k < end; k++) sample_move(l, n_kept++, k);
    }
    trainer_zero_grad(l->trainer);
    return n_kept;
}

/* The learning rate rises during the first updates of a new optimizer, because its moment estimates
 * are still poor, and falls to a tenth at the end of a generation, so that the result does not
 * depend mostly on the last ticks. */
static float learning_rate_at(const struct learner *l, int tick) {
    double n_updates = (double)l->policies[l->first].updates + 1,
           warmup = (double)l->o->warmup_steps;
    double decay = l->steps ? 1 - 0.9 * fmin(1, (double)tick / (double)l->steps) : 1;
    return (float)(l->o->train.lr * decay * (n_updates < warmup ? n_updates / warmup : 1));
}

struct policy_refresh {
    struct learner *l;
    int *policies;
    int generation, tick;
};

static void refresh_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct policy_refresh *r = ctx;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        policy_pull_weights(r->l, r->policies[i], r->generation, r->tick);
        adapter_pack(r->l->policies[r->policies[i]].adapter, r->l->lora_elem);
    }
}

/* Copies the trainer's weights to the policies that the step trained, hashes and packs them; in
 * parallel unless low_memory is set. */
static void policies_pull_weights(struct learner *l, int n, int generation, int tick) {
    struct policy_refresh r = {l, xcalloc((size_t)l->group, sizeof(int)), generation, tick};
    int n_updated = 0;
    for (int i = 0; i < n; i++)
        if (begins_policy(l, i)) r.policies[n_updated++] = l->first + l->samples[i].adapter;
    pool_run(l->low_memory ? NULL : l->pool, refresh_items, &r, n_updated, 1);
    free(r.policies);
}

static int minibatch_step(struct learner *l, int n, int tick, struct error *err) {
    int rc = gradients_accumulate(l, 0, n, err);
    return rc == OK ? trainer_update(l->trainer, learning_rate_at(l, tick), NULL, err) : rc;
}

/* Sets pass_rows: a pass fits into the memory limit. */
static int passes_limit(struct learner *l, struct error *err) {
    const struct model *m = l->m;
    struct trainer_passes p;
    const int64_t rows = learner_pass_rows(l->o, l->low_memory, l->group, l->longest_sample);
    l->pass_rows = rows;
    // with low_memory, available memory is no reason to keep more activations
    if (!memory_limit_get() || (l->low_memory && !memory_limit_named())) return OK;
    size_t room = memory_room(m);
    room = room > WORK_BYTES ? room - WORK_BYTES : 0;
    if (!trainer_limit_passes(l->trainer, room, rows, l->samples_max * l->longest_sample,
                              l->longest_sample, &p)) {
        const struct memory_step need = {.what = "a pass of the learning policies",
                                         .least = p.bytes + WORK_BYTES};
        return memory_check(m, &need, err);
    }
    l->pass_rows = p.rows;
    if (!memory_limit_named() && p.rows >= rows) return OK;
    log_info("memory: %.1f MB of %.1f in use; passes of %lld tokens",
             (double)memory_used(m) / (1 << 20), (double)memory_limit_get() / (1 << 20),
             (long long)p.rows);
    return OK;
}

/* Plans the passes again if a sample is longer than all earlier ones. */
static int passes_fit(struct learner *l, int n, struct error *err) {
    int64_t longest = l->longest_sample;
    for (int i = 0; i < n; i++) longest = MAX(longest, l->samples[i].n);
    if (longest == l->longest_sample) return OK;
    l->longest_sample = longest;
    trainer_free_activations(l->trainer);
    return passes_limit(l, err);
}

static int group_update(struct learner *l, int generation, int tick, struct error *err) {
    int n = minibatch_sample(l, generation, tick);
    if (n == 0) return OK;
    if (passes_fit(l, n, err) != OK) return err->code;
    group_load(l);
    int rc = minibatch_step(l, n, tick, err);
    if (rc == ERR_NUMERIC) { // update without the policies with non-finite numbers, which are
                             // rolled back later
        n = nonfinite_samples_remove(l, n, err);
        rc = n > 0 ? minibatch_step(l, n, tick, err) : n;
    }
    if (l->low_memory) trainer_free_activations(l->trainer);
    if (rc == OK && n > 0) policies_pull_weights(l, n, generation, tick);
    return rc;
}

static int update_es(struct learner *l, int generation, int tick, struct error *err) {
    if (learner_es_tick(l->es, tick, l->es_updated) == 0) return OK;
    int rc = trainer_update(l->trainer, learning_rate_at(l, tick), NULL, err);
    for (int i = 0; rc == OK && i < l->n_policies; i++)
        if (l->es_updated[i]) policy_pull_weights(l, i, generation, tick);
    return rc;
}

/* health */

/* Saves a snapshot of a healthy policy; snapshot_restore restores it. */
static int snapshot_save(struct learner *l, int i, struct error *err) {
    const struct adapter *a = l->policies[i].adapter;
    if (!swaps_policies(l)) {
        trainer_snapshot_save(l->snapshot, l->trainer, i);
        return OK;
    }
    size_t bytes = a->n_data * sizeof(float);
    float *floats = xmalloc(bytes);
    adapter_copy_params(a, floats);
    ssize_t done = pwrite(fileno(l->snapshot_file), floats, bytes, (off_t)((size_t)i * bytes));
    free(floats);
    return done == (ssize_t)bytes ? OK : error_errno(err, "cannot write the snapshot of a policy");
}

static int snapshot_restore(struct learner *l, int i, struct error *err) {
    struct learner_policy *m = &l->policies[i];
    struct rng unused =
        rng_make(l->seed, RNG_SHUFFLE, 0, 0); // unused: the values are rounded already
    size_t bytes = m->adapter->n_data * sizeof(float);
    float *floats = xmalloc(bytes);
    if (!swaps_policies(l)) {
        trainer_snapshot_restore(l->snapshot, l->trainer, i);
        memcpy(floats, trainer_adapter_params(l->trainer, i), bytes);
    } else if (pread(fileno(l->snapshot_file), floats, bytes, (off_t)((size_t)i * bytes)) !=
               (ssize_t)bytes) {
        free(floats);
        return error_errno(err, "cannot read the snapshot of a policy");
    }
    policy_set_weights(l, i, floats, &unused);
    free(m->optimizer_state);
    m->optimizer_state = NULL;
    return OK;
}

static int policy_rollback(struct learner *l, int i, struct error *err) {
    struct learner_policy *m = &l->policies[i];
    if (snapshot_restore(l, i, err) != OK) return err->code;
    m->nonfinite = false;
    m->health.rollbacks++;
    m->replay.n = m->n_new = 0; // its transitions come from other weights
    for (int agent = i; agent < l->n_agents; agent += l->n_policies) {
        l->pending[agent].n = 0;
        if (l->words) l->words[agent].n = 0;
    }
    memset(m->critic, 0, CRITIC_FEATURES * sizeof(float));
    m->mean_squared_critic_error = 0;
    if (l->es) learner_es_reset(l->es, i);
    return OK;
}

static int health_check(struct learner *l, int tick, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < l->n_policies; i++) {
        struct learner_policy *m = &l->policies[i];
        if (m->nonfinite) rc = policy_rollback(l, i, err);
        if (rc != OK || tick % HEALTH_INTERVAL || !m->rollout_stats.decisions) continue;
        rollout_stats_to_health(&m->rollout_stats, l->n_actions, &m->health);
        if (m->health.collapsed && m->health.reward < m->snapshot_reward) {
            rc = policy_rollback(l, i, err);
        } else {
            rc = snapshot_save(l, i, err);
            m->snapshot_reward = m->health.reward;
        }
    }
    return rc;
}

/* Updates the groups whose turn it is. Each group is updated every `every` ticks. */
static int update_groups(struct learner *l, int generation, int tick, struct error *err) {
    int rc = OK, every = (int)l->o->update_interval,
        groups = (l->n_policies + l->group - 1) / l->group;
    for (int g = 0; rc == OK && g < groups; g++) {
        int turn = (int)((int64_t)(g + 1) * every / groups);
        l->first = g * l->group;
        if ((tick - turn) % every == 0) rc = group_update(l, generation, tick, err);
    }
    return rc;
}

int learner_tick(struct learner *l, int generation, int tick, struct error *err) {
    int rc = l->es ? update_es(l, generation, tick, err) : update_groups(l, generation, tick, err);
    return rc == OK ? health_check(l, tick, err) : rc;
}

struct adapter *learner_adapter(const struct learner *l, int policy) {
    return l->policies[policy].adapter;
}

int64_t learner_updates(const struct learner *l) {
    int64_t n = 0;
    for (int i = 0; i < l->n_policies; i++) n += l->policies[i].updates;
    return n;
}

struct policy_health learner_health(const struct learner *l, int policy) {
    struct learner_policy m = l->policies[policy];
    if (m.health.decisions == 0) // no health check yet
        rollout_stats_to_health(&m.rollout_stats, l->n_actions, &m.health);
    return m.health;
}

/* creation */

static struct learner_policy policy_make(const struct learner_options *o,
                                         const struct learner_config *config, int i) {
    struct learner_policy m = {.adapter = adapter_retain(config->adapters[i]),
                               .replay = replay_buffer_init(o->buffer_size),
                               .critic = xcalloc(1, learner_critic_bytes(o)),
                               .snapshot_reward = -INFINITY};
    if (config->critics && config->critics[i])
        memcpy(m.critic, config->critics[i], learner_critic_bytes(o));
    if (o->exploration_bonus > 0) m.visits = m.critic + CRITIC_FEATURES;
    return m;
}

static void buffers_alloc(struct learner *l) {
    const struct learner_options *o = l->o;
    l->samples_max = l->choice_tokens ? 1 : MAX(l->n_actions, l->n_words);
    size_t n = (size_t)l->group * (size_t)o->batch_size, n_samples = n * (size_t)l->samples_max;
    l->es_updated = xcalloc((size_t)l->n_policies, sizeof *l->es_updated);
    l->samples = xcalloc(n_samples, sizeof *l->samples);
    l->experience = xcalloc(n_samples, sizeof *l->experience);
    l->batch_experience = xcalloc(n, sizeof *l->batch_experience);
    l->advantage = xcalloc(n, sizeof *l->advantage);
    l->discount_powers = xcalloc((size_t)o->horizon + 1, sizeof *l->discount_powers);
    l->discount_powers[0] = 1;
    for (int i = 1; i <= o->horizon; i++)
        l->discount_powers[i] = l->discount_powers[i - 1] * o->discount * o->gae_lambda;
    l->pending = xcalloc((size_t)l->n_agents, sizeof *l->pending);
    for (int i = 0; i < l->n_agents; i++) l->pending[i] = replay_buffer_init(o->horizon);
    if (l->n_words) l->words = xcalloc((size_t)l->n_agents, sizeof *l->words);
    for (int i = 0; l->words && i < l->n_agents; i++) l->words[i] = replay_buffer_init(o->horizon);
}

/* All groups use the same adapter slots of the trainer; the adapters of the first group determine
 * the slots' shapes. */
static struct trainer *trainer_make(const struct learner_options *o,
                                    const struct learner_config *config, int group,
                                    struct error *err) {
    struct train_options to = o->train;
    struct adapter **adapters_f32 = xcalloc((size_t)group, sizeof(struct adapter *));
    to.gradient_checkpointing |= config->low_memory;
    to.kv_cache_dtype = (char *)(uintptr_t)dtype_name(config->kv_elem);
    for (int i = 0; i < group; i++) adapters_f32[i] = adapter_to_f32(config->adapters[i]);
    struct trainer *t = trainer_new_lora(config->m, adapters_f32, group, &to, config->pool, err);
    for (int i = 0; i < group; i++) adapter_release(adapters_f32[i]);
    free(adapters_f32);
    return t;
}

static int snapshots_init(struct learner *l, struct error *err) {
    int rc = OK;
    if (l->low_memory || l->group < l->n_policies) {
        if (!(l->snapshot_file = tmpfile()))
            return error_errno(err, "cannot create a temporary file for snapshots of policies");
    } else {
        l->snapshot = trainer_snapshot_new(l->trainer);
    }
    for (int i = 0; rc == OK && i < l->n_policies; i++) rc = snapshot_save(l, i, err);
    return rc;
}

int learner_group(const struct learner_options *o, int n_policies) {
    return o->update_group_size ? (int)MIN(o->update_group_size, n_policies) : n_policies;
}

int64_t learner_pass_rows(const struct learner_options *o, bool low_memory, int group,
                          int64_t longest) {
    if (low_memory) return LOW_MEMORY_ROWS;
    return MIN(MAX(group * o->batch_size * SAMPLE_TOKENS, longest), PACK_MAX_TOKENS);
}

size_t learner_buffer_bytes(const struct learner_options *o, int n_policies, int n_agents,
                            int32_t max_len) {
    const size_t tokens = ((size_t)max_len + 7) / 8 * 8,
                 entry = sizeof(struct transition) + tokens * sizeof(int32_t),
                 sample = sizeof(struct train_sample) + tokens * (sizeof(int32_t) + 1) + 64,
                 entries = (size_t)(n_policies + 1) * (size_t)o->buffer_size + // one is widened
                           2 * (size_t)n_agents * (size_t)o->horizon;
    return entries * entry + (size_t)learner_group(o, n_policies) * (size_t)o->batch_size * sample +
           (size_t)n_policies * learner_critic_bytes(o);
}

struct learner *learner_new(const struct learner_options *o, const struct learner_config *config,
                            struct error *err) {
    bool es = strcmp(o->learn, "es") == 0;
    for (int i = 0; i < config->n_policies; i++)
        if ((es || adapter_config_has_vocab(&config->adapters[i]->config)) &&
            adapter_require_plain(config->adapters[i], es ? "learning by es" : "learning", err))
            return NULL;
    int group = learner_group(o, config->n_policies);
    struct trainer *t = trainer_make(o, config, group, err);
    if (!t) return NULL;
    struct learner *l = xcalloc(1, sizeof *l);
    *l = (struct learner){.o = o,
                          .m = config->m,
                          .temperature = config->temperature,
                          .choices = policy_runner_choices(config->policy_runner),
                          .choice_tokens = policy_runner_choice_tokens(config->policy_runner),
                          .n_actions = config->n_actions,
                          .n_words = strcmp(o->learn, "clone") == 0 ? 0 : config->n_words,
                          .n_policies = config->n_policies,
                          .n_agents = config->n_agents,
                          .clone = strcmp(o->learn, "clone") == 0,
                          .low_memory = config->low_memory,
                          .lora_elem = policy_runner_lora_elem(config->policy_runner),
                          .pool = config->pool,
                          .seed = config->seed,
                          .steps = config->steps,
                          .group = group,
                          .longest_sample = config->max_len ? config->max_len : POLICY_MAX_LEN,
                          .trainer = t};
    for (int words = 0; words < 2; words++)
        l->n_common[words] = policy_runner_common_tokens(config->policy_runner, words);
    if (es) l->es = learner_es_new(o, config, t);
    buffers_alloc(l);
    l->policies = xcalloc((size_t)l->n_policies, sizeof *l->policies);
    for (int i = 0; i < l->n_policies; i++) l->policies[i] = policy_make(o, config, i);
    if (passes_limit(l, err) == OK && snapshots_init(l, err) == OK) return l;
    learner_free(l);
    return NULL;
}

size_t learner_critic_bytes(const struct learner_options *o) {
    return (CRITIC_FEATURES + (o->exploration_bonus > 0 ? VISIT_COUNTERS : 0)) * sizeof(float);
}

float *learner_critic(const struct learner *l, int policy) {
    size_t bytes = learner_critic_bytes(l->o);
    return memcpy(xmalloc(bytes), l->policies[policy].critic, bytes);
}

void learner_free(struct learner *l) {
    if (!l) return;
    for (int i = 0; i < l->n_policies; i++) {
        adapter_release(l->policies[i].adapter);
        replay_buffer_release(&l->policies[i].replay);
        free(l->policies[i].critic);
        free(l->policies[i].optimizer_state);
    }
    for (int i = 0; i < l->n_agents; i++) replay_buffer_release(&l->pending[i]);
    for (int i = 0; l->words && i < l->n_agents; i++) replay_buffer_release(&l->words[i]);
    free(l->words);
    for (int64_t i = 0; i < l->group * l->o->batch_size * l->samples_max; i++)
        train_sample_release(&l->samples[i]);
    learner_es_free(l->es);
    free(l->es_updated);
    trainer_snapshot_free(l->snapshot);
    if (l->snapshot_file) fclose(l->snapshot_file);
    trainer_free(l->trainer);
    free(l->samples);
    free(l->experience);
    free(l->batch_experience);
    free(l->advantage);
    free(l->discount_powers);
    free(l->policies);
    free(l->pending);
    free(l);
}

/* options */

#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    {                                                                                              \
        name, type, offsetof(struct learner_options, field), fallback, min, max, metavar,          \
            __VA_ARGS__                                                                            \
    }

const struct option_row learner_option_rows[] = {
    ROW("learn", OPT_STRING, learn, "gradient", 0, 0, "NAME",
        "online learning from rewards: gradient or es; from a teacher: clone (imitation); none",
        JOB_ARG_TEXT),
    ROW("update-interval", OPT_INT, update_interval, "1", 1, 1e6, "N", "ticks between updates"),
    ROW("batch-size", OPT_INT, batch_size, "32", 1, 4096, "N",
        "experiences of each adapter per update"),
    ROW("buffer-size", OPT_INT, buffer_size, "1000", 8, 1e6, "N",
        "replay buffer of each adapter, in experiences"),
    ROW("horizon", OPT_INT, horizon, "8", 1, 1000, "N", "steps of the n-step return"),
    ROW("discount", OPT_FLOAT, discount, "0.95", 0, 1, "X",
        "discount factor of rewards per tick (gamma)"),
    ROW("gae-lambda", OPT_FLOAT, gae_lambda, "0.5", 0, 1, "X",
        "lambda of generalised advantage estimation (GAE)"),
    ROW("replay-fraction", OPT_FLOAT, replay_fraction, "0.25", 0, 1, "P",
        "fraction of a batch sampled from the whole replay buffer instead of new experiences"),
    ROW("shared-experience-fraction", OPT_FLOAT, shared_experience_fraction, "1", 0, 1, "P",
        "fraction of a batch sampled from the experiences of all adapters (SEAC)"),
    ROW("entropy-coef", OPT_FLOAT, entropy_coef, "0.1", 0, 10, "X",
        "coefficient of the entropy bonus"),
    ROW("clip-range", OPT_FLOAT, clip_range, "0.2", 0, 10, "X",
        "clip range of the ratio of new to old probability (PPO)"),
    ROW("critic-lr", OPT_FLOAT, critic_lr, "0.1", 0, 1, "X",
        "learning rate of the critic (the baseline)"),
    ROW("exploration-bonus", OPT_FLOAT, exploration_bonus, "0", 0, 1e6, "X",
        "reward X / sqrt(n) for the n-th visit of a policy to an observation (0: none)"),
    ROW("lr", OPT_FLOAT, train.lr, "1.5e-3", 0, 1e3, "X", "learning rate of the adapters"),
    ROW("warmup-steps", OPT_INT, warmup_steps, "200", 0, 1e6, "N",
        "updates in each generation until the full learning rate, which then decays to a tenth"),
    ROW("update-group-size", OPT_INT, update_group_size, "0", 0, 4096, "N",
        "adapters per update; the groups' updates are spread over the ticks of --update-interval "
        "(0: all at once)"),
    ROW("perturbation-ticks", OPT_INT, perturbation_ticks, "50", 1, 1e6, "N",
        "es: ticks that an agent acts with one perturbed adapter"),
    ROW("sigma", OPT_FLOAT, sigma, "0.1", 1e-9, 1, "X",
        "es: standard deviation of the perturbation of A and B"),
    ROW("shaping", OPT_STRING, shaping, "zscore", 0, 0, "NAME",
        "es: fitness shaping: zscore, rank or none", JOB_ARG_TEXT),
    ROW("r", OPT_INT, train.r, "8", 1, 1024, "N", "LoRA rank"),
    ROW("lora-alpha", OPT_FLOAT, train.lora_alpha, "0", 0, 1e6, "X",
        "LoRA scale is alpha / r (0: alpha = 2r)"),
    ROW("target", OPT_LIST, train.target, "all-linear", 0, 0, "NAME",
        "projections to adapt: q_proj v_proj, or all-linear", JOB_ARG_TEXT),
    ROW("layers", OPT_LIST, train.layers, "all", 0, 0, "N",
        "layers to adapt: 4 5, or 12-29, or all", JOB_ARG_TEXT),
    ROW("optim", OPT_STRING, train.optim, "adamw", 0, 0, "NAME", "adamw, adamw_8bit or sgd",
        JOB_ARG_TEXT),
    ROW("momentum", OPT_FLOAT, train.momentum, "0.9", 0, 0.999999, "X", "momentum of sgd"),
    ROW("beta1", OPT_FLOAT, train.beta1, "0.9", 0, 0.999999, "X", "beta1 of AdamW"),
    ROW("beta2", OPT_FLOAT, train.beta2, "0.99", 0, 0.9999999, "X", "beta2 of AdamW"),
    ROW("eps", OPT_FLOAT, train.eps, "1e-8", 1e-30, 1, "X", "epsilon of AdamW"),
    ROW("weight-decay", OPT_FLOAT, train.weight_decay, "0", 0, 10, "X",
        "decoupled weight decay of matrices"),
    ROW("max-grad-norm", OPT_FLOAT, train.max_grad_norm, "1", 0, 1e9, "X",
        "clip each adapter's gradient (0: never)"),
    {0},
};

int learner_options_check(const struct learner_options *o, struct error *err) {
    static const char *const known[] = {"gradient", "clone", "es", "none"};
    enum optim optim;
    bool found = false;
    for (size_t i = 0; i < ARRAY_LEN(known); i++) found |= strcmp(o->learn, known[i]) == 0;
    if (!found)
        return error_set(err, ERR_USAGE,
                         "no way to learn '%s'; there are gradient, clone, es and none", o->learn);
    if (es_fitness_shaping_check(o->shaping, err) != OK) return err->code;
    if (strcmp(o->learn, "es") == 0 && o->update_group_size)
        return error_set(err, ERR_USAGE,
                         "--learn es updates all policies at once: omit --update-group-size");
    if (o->buffer_size < 2 * o->batch_size)
        return error_set(err, ERR_USAGE,
                         "--buffer-size %lld must be at least twice --batch-size %lld",
                         (long long)o->buffer_size, (long long)o->batch_size);
    return optim_parse(o->train.optim, &optim, err);
}
