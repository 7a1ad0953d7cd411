/*
 * life: agents that are models, in many worlds at once.
 *
 * A *mind* is an adapter over the one shared base, with what it remembers. A *body* is an agent of
 * an environment; body b belongs to mind b % minds, so several bodies may share one. Each tick all
 * living bodies are asked in one batch, the actions are drawn, the environments move, and what
 * happened is remembered; every few ticks all minds learn from it in one pass; after a generation
 * the fitter ones breed.
 *
 * Three parts, each usable without the next: `asker` (what a mind would do), `learner` (what it
 * remembers, and its updates), `life` (generations). One thread drives each. Results are a function
 * of model, options and seed: not of threads, nor of when a life was interrupted.
 */
#ifndef SHOAL_LIFE_H
#define SHOAL_LIFE_H

#include "engine/engine.h"
#include "evolve/operators.h"
#include "train/train.h"
#include "world/environment.h"
#include "world/world.h"

/* environments */

struct episode_stats {
    double fitness, reward, delivered, collected, blocked, steps, alive;
};
/* One world of world.h as such. */
struct grid_env {
    struct world w;
    const struct world_rules *rules; /* borrowed, as the teacher */
    const struct world_policy *teacher;
    int n_agents;
};
struct environment grid_env_as_environment(struct grid_env *p);
struct episode_stats world_episode_stats(const struct world *w); /* the mean over its agents */

/* asking */

struct policy_runner_options {
    double temperature; /* of the policy: softmax over the actions' logits divided by it */
    bool text;          /* write up to ten tokens and read them, as the predecessor did */
    enum dtype lora_elem;
    int32_t max_rows, max_seqs,
        max_len;       /* of the engine; 0: enough for twenty agents; of prompts */
    int32_t n_pages;   /* of its cache; 0: enough for all of them to be long */
    enum dtype kv_elem; /* that it is held as */
    struct pool *pool;
};
struct policy_decision {                 /* one decision */
    struct adapter *adapter; /* NULL: the bare base */
    struct rng rng;          /* of the draw */
    size_t at, len;          /* of its prompt in the text that is given */
    struct weighted_adapter mix[2];  /* [n_mix] instead of the adapter, where there are any */
    int n_mix;
    /* filled in */
    const int32_t *tokens; /* [n] of the prompt; until the next call */
    int32_t n;
    double logp[ENV_MAX_ACTIONS]; /* [n_actions] normalised over the actions; 0 of text */
    int action;
};
struct policy_runner;
/* ERR_MISMATCH where the words' first tokens do not differ, so that none can be told by it. */
struct policy_runner *policy_runner_new(const struct model *m, const struct environment *e,
                        const struct policy_runner_options *o, struct error *err);
void policy_runner_free(struct policy_runner *a);
/* All decisions, in as few passes over the base as the engine can. */
int policy_runner_act(struct policy_runner *a, struct policy_decision *asks, int n, const struct buf *text,
                 struct error *err);
/* Tokens only, and no decision: what an observation is for who judges it. */
void policy_runner_tokenize(struct policy_runner *a, struct policy_decision *asks, int n, const struct buf *text);
enum dtype policy_runner_lora_elem(const struct policy_runner *a); /* that adapters are packed as */
/* Lets go of the engine's memory, until the next decision. */
void policy_runner_sleep(struct policy_runner *a);
const int32_t *policy_runner_action_tokens(const struct policy_runner *a); /* [n_actions] the tokens that say them */

/* learning */

struct learner_options {          /* filled from option rows */
    char *learn;                /* gradient, clone, es or none */
    int64_t every;              /* 10: ticks from one update to the next */
    int64_t batch;              /* 4: experiences of each mind in an update */
    int64_t buffer;             /* 1000: experiences a mind remembers */
    int64_t horizon;            /* 16: ticks after which a return is settled */
    double discount;            /* 0.9 */
    double lambda;              /* 0.5: of generalised advantage estimation */
    double replay;              /* 0.25: share of a batch drawn from all that is remembered */
    double share;               /* 0: share of a batch drawn from anybody's memory */
    double entropy;             /* 0.05: weight of the entropy bonus */
    double clip;                /* 0.2: of the ratio of new to old probability, as in PPO */
    double critic_rate;         /* 0.1: of the baseline */
    int64_t warmup;             /* 20: updates */
    int64_t group;              /* 0: minds that learn together, groups in turn; 0: all */
    int64_t stretch;            /* 50: ticks that a member of es lives */
    double sigma;               /* 0.1: its step */
    char *shaping;              /* zscore: see es.h */
    struct train_options train; /* rank, targets, optimizer, rate: rows with their names */
};
extern const struct option_row learner_option_rows[];
int learner_options_check(const struct learner_options *o, struct error *err);

/* What is watched for over a stretch of ticks. */
struct policy_health {
    int64_t decisions;
    double entropy;        /* nats, mean */
    double most_repeated;  /* share of the most frequent action */
    double reward, spread; /* mean of a step, and standard deviation */
    bool collapsed; /* repeats one action, or hardly draws at all, or is paid the same always */
    int rollbacks;  /* in its life */
};
struct learner;
/* What minds begin with. Everything is borrowed but the adapters, which are retained; critics: [n]
 * or NULL, each of learner_critic or NULL. */
struct learner_config {
    const struct model *m;
    const struct policy_runner *asker;
    double temperature;
    int n_actions, n_minds, n_bodies;
    struct adapter *const *adapters;
    const float *const *critics;
    uint64_t seed;
    int64_t steps; /* ticks of a life, in which the learning rate falls; 0: it does not */
    bool lean;     /* adapters are narrow, and so are those that come of them */
    struct pool *pool;
};
struct learner *learner_new(const struct learner_options *o, const struct learner_config *b,
                            struct error *err);
void learner_free(struct learner *l);
/* What body `b` decides with at `tick` (from 0), where that is not just its mind's adapter. */
void learner_perturb(struct learner *l, int generation, int tick, int b, struct policy_decision *a);
/* Body `b` decided; teacher: what was right, or -1. Then what came of it. */
void learner_observe_action(struct learner *l, int b, const struct policy_decision *a, int teacher);
void learner_observe_reward(struct learner *l, int b, double reward, bool gone);
/* The rewards so far are all there are of this life; `next` what body b would now be asked (NULL:
 * it is gone). */
void learner_finish_episode(struct learner *l, int b, const struct policy_decision *next);
/* After tick `tick` (from 1) of `generation`: learns if it is time. */
int learner_tick(struct learner *l, int generation, int tick, struct error *err);
struct adapter *learner_adapter(const struct learner *l, int mind); /* borrowed: as it is now */
float *learner_critic(const struct learner *l, int mind); /* its baseline, malloc'ed, of … */
size_t learner_critic_bytes(void);
int64_t learner_updates(const struct learner *l); /* of all minds together */
struct policy_health learner_health(const struct learner *l, int mind);

/* generations */

struct simulation_options {    /* filled from option rows */
    int64_t minds;       /* 0: as many as an environment has agents */
    int64_t worlds;      /* 1: environments at once */
    int64_t generations; /* 10 */
    int64_t steps, seed; /* ticks of a life; these two are set by whoever makes it */
    double temperature;  /* 1 */
    char *decode;        /* score or text */
    char *teacher;       /* reflex: a policy, of clone */
    bool breed;          /* true */
    int64_t elites;      /* 4: minds that go on unchanged */
    double parents;      /* 0.5: share of the fittest whose children there are */
    char *crossover;     /* delta: operator of two */
    char *mutation;      /* noise: operator of one, on children */
    double mutate;       /* 0.1: share of the children that mutate */
    double spread;       /* 0.02: deviation of founders' B, so that they differ */
    bool carry;          /* elites keep the statistics of earlier lives, as there */
    int64_t held_out;    /* 4: maps that nobody lives on, for measuring */
    bool lean;           /* in as little memory as it takes */
    char *lora;          /* f32: what minds are asked as */
    struct learner_options learn;
};
extern const struct option_row simulation_option_rows[];
int simulation_options_check(const struct simulation_options *o, struct error *err);

/* Seeds of maps: of training by (seed, generation, world), held out ones the same for everybody. */
uint64_t simulation_seed(uint64_t seed, int generation, int world);
uint64_t simulation_held_out_seed(int map);

struct simulation;
/* Options, model, environments and pool are borrowed. `first`: [n_first] adapters that minds begin
 * with in turn, or NULL: fresh ones. */
struct simulation *simulation_new(const struct model *m, const struct simulation_options *o,
                      struct environment *const *envs, struct adapter *const *first, int n_first,
                      struct pool *pool, struct error *err);
void simulation_free(struct simulation *l);
/*
 * A generation: simulation_begin_generation breeds it from the last one, where there was one and breeding is on, and
 * begins the environments anew, with these seeds [worlds] or its own (NULL); simulation_step until it
 * returns 0; simulation_end_generation records who lived and what they have learned. simulation_step returns how many
 * decided.
 */
int simulation_begin_generation(struct simulation *l, const uint64_t *seeds, struct error *err);
int simulation_step(struct simulation *l, struct error *err);
void simulation_end_generation(struct simulation *l);
/* The environments are at that tick already: draws go on from there. After simulation_begin_generation. */
void simulation_set_tick(struct simulation *l, int tick);
const int16_t *simulation_actions(const struct simulation *l); /* [bodies] of the last tick; -1: it was gone */
/* What a body was asked in the last tick, and did; NULL: it was gone. */
const struct policy_decision *simulation_decision(const struct simulation *l, int body);
/* Everybody as they are now, on maps that nobody lives on. outcome: [held_out], a map's mean over
 * its agents. */
int simulation_evaluate(struct simulation *l, struct episode_stats *out, struct error *err);
int simulation_generations(const struct simulation *l);   /* lived so far */
int64_t simulation_decisions(const struct simulation *l); /* taken so far, without those measured */
int64_t simulation_updates(const struct simulation *l);   /* of all minds together, in this generation */
int simulation_n_policies(const struct simulation *l);
struct policy_record {
    char name[32], parents[2][32];
    struct adapter *adapter;
    float *critic;          /* what its baseline has learned, or NULL */
    struct episode_stats outcome; /* of its life: the mean over its bodies */
    struct policy_health health;
    bool elite;
};
/* Between two generations, to a folder and back; `extra` (an object) is the caller's. Loading wants
 * a life of the same options that has not lived yet, and what simulation_read_state gave: the folder's {…,
 * generation, minds: [policy_record_json], extra}, or NULL with ERR_MISSING where there is none. */
int simulation_save(const struct simulation *l, const char *dir, const json_t *extra, struct error *err);
json_t *simulation_read_state(const char *dir, struct error *err);
/* The PEFT directory of a mind there, malloc'ed; NULL where what names it is no hash. */
char *simulation_policy_path(const char *dir, const char *hash, struct error *err);
int simulation_load(struct simulation *l, const char *dir, const json_t *state, struct error *err);
json_t *episode_stats_json(const struct episode_stats *o);
json_t *policy_record_json(const struct policy_record *m);
/* As it was at the end of the last generation, by fitness, best first; before the first one, as it
 * begins. Of a lean life, while it lives, the adapter is the one of now. */
const struct policy_record *simulation_policy(const struct simulation *l, int rank);

#endif
