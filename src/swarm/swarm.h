/*
 * swarm: agents that answer, hear one another and vote, and what each of them was worth to the
 * team.
 *
 * A debate knows no engine: it hands whole rounds of turns to an `asker` (the engine with its call
 * store in speaker.c, a scripted one in tests) and gets choices with exact probabilities back.
 * Everything else here is a pure function of those. An agent keeps its own last answer as its own
 * turn; the others' answers come anonymous and in an order drawn per item.
 */
#ifndef SHOAL_SWARM_H
#define SHOAL_SWARM_H

#include "eval/eval.h"
#include "store/store.h"

struct agent {
    const char *name;
    const char *system;      /* persona prompt, or NULL */
    struct adapter *adapter; /* borrowed; NULL: the bare base */
};
struct answer {
    int32_t choice;
    float prob[MAX_CHOICES]; /* exact, over the item's choices */
};
struct turn {
    const struct agent *agent;
    const struct item *item;
    const char *own; /* the agent's last answer, or NULL in the first round */
    const char *others[16];
    int n_others;
    bool working;      /* think in free form first */
    float temperature; /* of that thinking; 0: greedy */
    uint64_t seed;
    struct answer answer; /* out */
    int32_t n_prefilled, n_generated;
    bool truncated; /* the thinking hit its limit */
};
struct asker {
    void *ctx;
    int (*ask)(void *ctx, struct turn *turns, int n, struct error *err);
};

/* The asker that Shoal uses: one engine, every call kept in (and first looked up in) the store. */
struct speaker {
    struct engine *engine;
    struct model *model;
    struct store *store;     /* may be NULL: nothing is kept */
    int32_t max_tokens;      /* of thinking */
    int64_t asked, computed; /* turns, and those that were not in the store */
};
struct asker speaker_asker(struct speaker *s);

/* votes */

/* A vote is a row of the table: answers of n agents to one item → a choice. Ties go to the higher
 * summed probability, then to the lower index. */
struct vote {
    const char *name; /* majority, confidence, logprob, borda */
    void (*score)(const struct answer *answers, int n, int n_choices,
                  double *out /* [n_choices] */);
};
extern const struct vote vote_table[];
const struct vote *vote_find(const char *name); /* NULL when unknown */
int vote_decide(const struct vote *v, const struct answer *answers, int n, int n_choices);

/* debate */

struct debate_options {
    int rounds; /* 1: independent answers only */
    bool working;
    const struct vote *vote;
    uint64_t seed;
};
struct debate {
    int n_agents, n_items, rounds;
    struct answer *answers; /* [rounds][n_agents][n_items] */
    uint8_t *solo;          /* [n_agents][n_items] right in the first round */
    uint8_t *voted;         /* [rounds][n_items] the vote after each round was right */
    int64_t prefilled, generated, truncated;
    int64_t flips_good,
        flips_bad; /* answers that became right, became wrong, after hearing others */
};
int debate_run(const struct asker *a, const struct agent *team, int n_agents,
               const struct item *items, int n_items, const struct debate_options *o,
               struct debate *out, struct progress *p, struct error *err);
void debate_release(struct debate *d);
/* The plain text of one item's debate, for people. Appends. */
void debate_transcript(const struct debate *d, const struct agent *team, const struct item *it,
                       int item, const struct vote *v, struct buf *out);

/* k sampled workings of one agent per item, majority vote (Wang et al. 2023). right: [n_items]. */
int self_consistency(const struct asker *a, const struct agent *agent, const struct item *items,
                     int n_items, int k, float temperature, uint64_t seed, uint8_t *right,
                     int64_t *prefilled, int64_t *generated, struct progress *p, struct error *err);

/* True leave-one-out by debates of the team and of the team without each agent: value[i] = mean
 * over items of (team right) - (team without i right), paired, with its interval. `full` is the
 * whole team's debate. */
int credit_leave_one_out(const struct asker *a, const struct agent *team, int n_agents,
                         const struct item *items, int n_items, const struct debate_options *o,
                         const struct debate *full, struct interval *value, struct progress *p,
                         struct error *err);
/* The same for the vote on first answers that are already there: answers[n_agents][n_items]. Needs
 * no further call. */
void credit_vote_loo(const struct vote *v, const struct answer *answers, int n_agents,
                     const struct item *items, int n_items, struct interval *value);
/* Novelty of each agent: mean Jensen-Shannon divergence (base 2, in 0..1) of its answer
 * distributions from the others'. */
void credit_novelty(const struct answer *answers, int n_agents, const struct item *items,
                    int n_items, double *value);

#endif
