/* What the files of a life share. */
#ifndef SHOAL_LIFE_INTERNAL_H
#define SHOAL_LIFE_INTERNAL_H

#include "world/world.h"

/* What a mind did and was paid over some time. */
struct rollout_stats {
    int64_t decisions, actions[ENV_MAX_ACTIONS];
    double entropy, sum, squares;
};
bool rollout_stats_add_action(struct rollout_stats *t, const struct policy_decision *a,
                              int n_actions); /* false: no numbers */
void rollout_stats_add_reward(struct rollout_stats *t, double reward);
/* What of a mind's health follows; the tally begins anew. */
void rollout_stats_to_health(struct rollout_stats *t, int n_actions, struct policy_health *h);

struct simulation {
    const struct model *m;
    const struct simulation_options *o;
    struct environment *const *envs; /* [worlds] */
    struct pool *pool;
    struct policy_runner *asker;
    struct learner *learner; /* while a generation lives and learns; else NULL */
    int n_minds, n_agents, n_bodies, generation, tick;
    int64_t decisions;
    struct policy_record *minds; /* [n_minds] who lives, or would */
    struct policy_record *next;  /* [n_minds] while they are bred */

    /* a tick */
    struct buf text;
    struct policy_decision *asks; /* [n_bodies] of the living, one after another */
    int n_asked;
    int *body;                     /* [n_bodies] whose */
    int16_t *actions;              /* [n_bodies] */
    double *rewards, *totals;      /* [n_bodies] of the tick, of the life */
    struct rollout_stats *tallies; /* [n_minds] of a life in which nobody learns */
    uint64_t *seeds;               /* [worlds] of maps */
};

struct adapter *policy_to_f16(struct adapter *a, uint64_t seed); /* takes `a` over */
/* learner_es.c: what a learner by evolution strategies adds; it borrows everything. */
struct learner_es;
struct learner_es *learner_es_new(const struct learner_options *o, const struct learner_config *b,
                                  struct trainer *t);
void learner_es_free(struct learner_es *e);
/* Before tick `tick` + 1: whose adapter the body's mind is that of `a`, moved. */
void learner_es_perturb(struct learner_es *e, int generation, int tick, int body,
                        struct policy_decision *a);
void learner_es_observe_reward(struct learner_es *e, int body, double reward);
/* After tick `tick`: adds estimates to the trainer; told: [minds] whose. Returns how many. */
int learner_es_tick(struct learner_es *e, int tick, bool *told);
/* What that mind's bodies have lived since its last update is not its own. */
void learner_es_reset(struct learner_es *e, int mind);

void policy_records_release(struct policy_record *m, int n); /* and zeroes them */

#endif
