/* world: declarations shared by the files of the simulation. */
#ifndef SHOAL_WORLD_INTERNAL_H
#define SHOAL_WORLD_INTERNAL_H

#include "world/world.h"

#include <stdio.h>

/* Statistics of a policy's actions and rewards over an interval of ticks; policy_health is computed
 * from them. */
struct rollout_stats {
    int64_t decisions, actions[ENV_MAX_ACTIONS];
    double entropy, sum, squares; /* sums of: entropy in nats; rewards; squared rewards */
};
bool rollout_stats_add_action(struct rollout_stats *t, const struct policy_decision *a,
                              int n_actions); /* returns false if a probability is not finite */
void rollout_stats_add_reward(struct rollout_stats *t, double reward);
/* Computes a policy's health and resets the statistics. */
void rollout_stats_to_health(struct rollout_stats *t, int n_actions, struct policy_health *h);

enum { POLICY_MAX_LEN = 128 };    /* tokens of a prompt and its reply, without --max-model-len */
enum { POLICY_TEXT_TOKENS = 10 }; /* tokens of a reply that is parsed */
/* Tokens of a prompt and its reply. */
int32_t policy_max_len(const struct simulation_options *o);
/* The number of policies, with this number of agents in each environment. */
int simulation_policy_count(const struct simulation_options *o, int agents);
/* Options of the policy runner of a simulation, and the type of keys and values in training. */
int simulation_runner_options(const struct simulation_options *o, enum numeric_class cls,
                              int n_agents, struct pool *pool, struct policy_runner_options *out,
                              enum dtype *training, struct error *err);
/* The number of a policy runner's engines without a memory limit, and the options of each. */
int policy_runner_engines(const struct model_config *c, const struct policy_runner_options *r,
                          struct engine_options *o);
/* A learner's policies per update; most tokens of a pass, so that a minibatch of compact
 * observations is one pass; most bytes of replay buffers, pending decisions and minibatches. */
int learner_group(const struct learner_options *o, int n_policies);
int64_t learner_pass_rows(const struct learner_options *o, bool low_memory, int group,
                          int64_t longest);
size_t learner_buffer_bytes(const struct learner_options *o, int n_policies, int n_agents,
                            int32_t max_len);
/* memory.c: a bound of the peak of a simulation in bytes. `used`: program and model; n_initial:
 * initial adapters; `passes` has the whole trainer. */
int simulation_memory_plan(const struct model_config *c, enum numeric_class cls,
                           const struct simulation_options *o, int agents, int n_initial,
                           size_t used, struct pool *pool, struct train_memory *out,
                           struct error *err);
/* Memory of a simulation besides model, engines and passes: decisions, replay buffers, traces. */
#define WORK_BYTES ((size_t)16 << 20)

struct simulation {
    const struct model *m;
    const struct simulation_options *o;
    struct environment *const *envs; /* [n_envs] */
    struct pool *pool;
    struct policy_runner *policy_runner;
    enum dtype train_kv_elem; /* of keys and values in training */
    struct learner *learner;  /* NULL between generations, and without learning */
    int n_policies, n_agents, agents_per_env, generation, tick;
    int map_size; /* cells per side of the maps of training, see curriculum_advance; 0: full size */
    int64_t decisions;
    struct policy_record *policies; /* [n_policies] current policies */
    struct policy_record *next;     /* [n_policies] the next generation, during breeding */

    /* state of a tick */
    struct buf text;
    struct policy_decision *pending; /* [n_agents] decisions of the active agents in this tick */
    struct policy_decision *words;   /* [n_agents] the words that they say; see choose_words */
    struct buf word_text;
    int n_pending;
    int *decision_agent;                 /* [n_agents] the agent of each decision */
    int16_t *actions;                    /* [n_agents] */
    double *rewards, *totals;            /* [n_agents] of the tick, of the episode */
    struct rollout_stats *rollout_stats; /* [n_policies] in a generation without a learner */
    uint64_t *seeds;                     /* [n_envs] seeds of the maps */
};

/* decision_cache.c: log-probabilities of the choices by adapter content and prompt. */
struct decision_cache;
struct decision_cache *decision_cache_new(int n, int max_choices); /* n: capacity */
void decision_cache_free(struct decision_cache *c);                /* may be NULL */
size_t decision_cache_bytes(int n, int max_choices);
/* [n_choices], valid until the next decision_cache_put; NULL: not found. */
const float *decision_cache_find(const struct decision_cache *c, const struct adapter *a,
                                 struct token_seq prompt);
void decision_cache_put(struct decision_cache *c, const struct adapter *a, struct token_seq prompt,
                        const float *logprob, int n_choices);

/* Converts an adapter to f16 with stochastic rounding; takes ownership of `a`. */
struct adapter *policy_to_f16(struct adapter *a, uint64_t seed);
/* learner_es.c: evolution strategies for the learner; it borrows all its arguments. */
struct learner_es;
struct learner_es *learner_es_new(const struct learner_options *o,
                                  const struct learner_config *config, struct trainer *t);
void learner_es_free(struct learner_es *e);
/* Before tick `tick` + 1: perturbs the adapter in `a` for agent `agent`. */
void learner_es_perturb(struct learner_es *e, int generation, int tick, int agent,
                        struct policy_decision *a);
void learner_es_observe_reward(struct learner_es *e, int agent, double reward);
/* After tick `tick`: adds gradient estimates to the trainer and marks their policies in `updated`
 * [n_policies]. Returns the number of these policies. */
int learner_es_tick(struct learner_es *e, int tick, bool *updated);
/* Discards a policy's rewards and directions of the current round, because they do not belong to
 * its restored weights. */
void learner_es_reset(struct learner_es *e, int policy);

void policy_records_release(struct policy_record *m, int n); /* also zeroes them */

/* language.c: statistics of the words that agents say, over one episode of a world. */
struct language_stats;
struct language_stats *language_stats_new(void);
void language_stats_free(struct language_stats *s); /* may be NULL */
/* Records a tick; `w` is the world before it. */
void language_stats_add(struct language_stats *s, const struct world *w,
                        const struct world_rules *r, const int16_t *actions);
/* {samples, entropy: of the words in bits, pairs: [{pair, bits: mutual information, shuffled,
 * shuffled_95: mean and 95 % quantile of the control, p}]} */
json_t *language_stats_json(const struct language_stats *s);

/* run_lineage.c. Opens RUN/lineage.jsonl in the folder of a run, whose state was loaded before.
 * is_grid: agents can die. The caller closes *out, also after an error; it is NULL if an earlier
 * version began the run, without a record of its generations. */
int run_lineage_open(const struct simulation *s, const char *dir, bool is_grid, FILE **out,
                     struct error *err);
/* Appends the last generation. */
int run_lineage_append(const struct simulation *s, bool is_grid, FILE *f, struct error *err);

/* policy_files.c */
struct initial_adapters {
    struct adapter **v; /* [n] */
    int n;
    struct strings paths; /* [n] */
};
/* Opens the adapters at these paths. A path that is a run's folder stands for all its policies, the
 * best one first. The caller releases `f` even after an error. */
int initial_adapters_open(struct initial_adapters *f, const struct strings *paths, struct model *m,
                          struct error *err);
void initial_adapters_release(struct initial_adapters *f);
/* The manifest of a result; see manifest_json. f NULL: no adapters. The data are the description of
 * the environment, `name`, of which it takes ownership. */
json_t *world_manifest(struct model *m, const struct initial_adapters *f, const char *name,
                       json_t *environment, int64_t seed);

#endif
