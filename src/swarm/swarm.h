/*
 * swarm: agents that answer, hear one another and vote, and what each of them was worth to the
 * team.
 *
 * Whoever asks knows no engine: whole steps of calls go to an `asker` (the engine with its call
 * store in speaker.c, a scripted one in tests), which fills in what was said, choices with exact
 * probabilities. Everything else here is a pure function of those.
 */
#ifndef SHOAL_SWARM_H
#define SHOAL_SWARM_H

#include "eval/eval.h"
#include "store/store.h"

enum { TEAM_MAX = 17 };

struct agent {
    const char *name;
    const char *system;      /* persona prompt, or NULL */
    struct adapter *adapter; /* borrowed; NULL: the bare base */
};
struct answer {
    int32_t choice;
    float prob[MAX_CHOICES]; /* exact, over the item's choices */
};

enum reply {
    REPLY_TEXT,   /* free text */
    REPLY_ANSWER, /* one of the item's choices, with exact probabilities; after a working if asked
                     for. Of an item without choices: free text that ends in its answer. */
    REPLY_JUDGE,  /* {"answer": one of the candidates, "rationale": text} under a grammar */
    REPLY_SEED    /* free text; answer and confidence are picked out of it as the seed does */
};
struct call { /* what one agent is asked in one step */
    const struct agent *agent;
    const struct item *item;
    const struct message *messages;
    int n_messages;
    enum reply reply;
    bool working;                  /* think in free form first */
    const char *const *candidates; /* of a judge */
    int n_candidates;
    float temperature, top_p; /* of free text; 0: greedy */
    int32_t max_tokens;
    uint64_t seed;

    /* filled by the asker */
    char *text;           /* malloc'ed: what was said; of a working, or a rationale */
    struct answer answer; /* choice: of the item's choices, or of the candidates; -1: none */
    int32_t n_prefilled, n_generated;
    bool truncated;     /* hit max_tokens, or was cut in a loop */
    const char *failed; /* why nothing came, or NULL */
};
struct asker {
    void *ctx;
    int (*ask)(void *ctx, struct call *calls, int n, struct error *err);
};
/* An item's question put to an agent without ado; `chat` holds the messages. */
struct call call_question(const struct agent *agent, const struct item *item,
                          struct message chat[2]);
void call_release(struct call *c); /* what the asker made */

/* The asker that Shoal uses: one engine, every call kept in (and first looked up in) the store. A
 * call that has no room in the engine's context fails alone. */
struct speaker {
    struct engine *engine;
    struct model *model;
    struct store *store;     /* may be NULL: nothing is kept */
    int64_t asked, computed; /* calls, and those that were not in the store */
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
/* What the seed's rules find in an utterance: {…} up to the first brace that closes, if it is JSON
 * with "answer", "vote" or "conclusion", and "confidence" (0.6 without); else the first word after the colon of the first
 * line with Answer, 結論, Vote or 最終, or of the first line. malloc'ed. */
char *seed_vote_parse(const char *text, float *confidence);
int vote_decide(const struct vote *v, const struct answer *answers, int n, int n_choices);

/* debate */

struct workflow; /* workflow.h */
struct outcome;
struct debate_options {
    const struct workflow *workflow; /* NULL: "brief" */
    int rounds;                      /* 1: independent answers only */
    bool working;
    const struct vote *vote;
    uint64_t seed;
    float temperature;  /* below 0: the workflow's own */
    int32_t max_tokens; /* 0: the workflow's own */
};
struct debate {
    int n_agents, n_items, rounds;
    struct outcome *outcomes; /* [n_items] all that was said */
    struct answer *answers;   /* [rounds][n_agents][n_items] as they stood after each round; choice
                                 -1: none. An item that ended earlier stays as it was. */
    uint8_t *solo;            /* [n_agents][n_items] right in the first round */
    uint8_t *voted;           /* [rounds][n_items] the vote after each round was right */
    uint8_t *decided;         /* [n_items] what the workflow decided was right */
    int64_t prefilled, generated, truncated, failed, calls;
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
                     int n_items, int k, float temperature, int32_t max_tokens, uint64_t seed,
                     uint8_t *right, int64_t *prefilled, int64_t *generated, struct progress *p,
                     struct error *err);

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
