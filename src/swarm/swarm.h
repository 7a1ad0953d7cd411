/*
 * swarm: agents that answer, hear one another and vote, and what each of them was worth to the
 * team.
 *
 * Whoever asks knows no engine: whole steps of calls go to an `asker` (the engine with its call
 * store in engine_client.c, a scripted one in tests), which fills in what was said, choices with exact
 * probabilities. Everything else here is a pure function of those.
 */
#ifndef SHOAL_SWARM_H
#define SHOAL_SWARM_H

#include "eval/eval.h"
#include "store/store.h"

enum { TEAM_MAX = 17 };

struct agent {
    const char *name;
    const char *system;         /* persona prompt, or NULL */
    struct adapter *adapter;    /* borrowed; NULL: the bare base, or the mix */
    const struct weighted_adapter *mix; /* [n_mix] instead of one adapter; or NULL */
    int n_mix;
    int view;           /* of items whose evidence is split, the part that it sees */
    const char *role;   /* in a workflow; NULL: by its place in the team */
    float temperature;  /* above 0: instead of the workflow's, as … */
    int32_t max_tokens; /* … this */
};
struct agent_answer {
    int32_t choice;
    float prob[EVAL_MAX_CHOICES]; /* exact, over the item's choices */
    float sure;              /* of a choice that is EVAL_MAX_CHOICES or more: its own probability */
};

enum reply_format {
    REPLY_TEXT,   /* free text */
    REPLY_ANSWER, /* one of the item's choices, with exact probabilities; after a working if asked
                     for. Of an item without choices: free text that ends in its answer. */
    REPLY_JUDGE,  /* {"answer": one of the candidates, "rationale": text} under a grammar */
    REPLY_LEGACY    /* free text; answer and confidence are picked out of it as the seed does */
};
struct llm_call { /* what one agent is asked in one step */
    const struct agent *agent;
    const struct task_item *item;
    const struct chat_message *messages;
    int n_messages;
    enum reply_format reply;
    bool working;                  /* think in free form first */
    const char *const *candidates; /* of a judge */
    int n_candidates;
    float temperature, top_p; /* of free text; 0: greedy */
    int32_t max_tokens;
    uint64_t seed;
    const struct grammar *grammar; /* of free text; may be NULL */

    /* filled by the asker */
    char *text; /* malloc'ed: what was said; of a working, or a rationale */
    /* Of free text, malloc'ed: the byte of `text` before which each token ends, and its exact
     * log-probability given what stands before it, whatever sampling made of that. */
    int32_t *ends, n_tokens; /* 0: not known */
    float *logprobs;
    struct agent_answer answer; /* choice: of the item's choices, or of the candidates; -1: none */
    int32_t n_prefilled, n_generated;
    bool truncated;     /* hit max_tokens, or was cut in a loop */
    const char *failed; /* why nothing came, or NULL */
};
struct llm_client {
    void *ctx;
    int (*ask)(void *ctx, struct llm_call *calls, int n, struct error *err);
};
/* An item's question as member `view` of a team sees it (-1: whole). */
const char *task_item_question(const struct task_item *it, int view);
/* The question put to an agent without ado; `chat` holds the messages. */
struct llm_call llm_call_question(const struct agent *agent, const struct task_item *item, int view,
                          struct chat_message chat[2]);
void llm_call_release(struct llm_call *c); /* what the asker made */

/* The asker that Shoal uses: one engine, every call kept in (and first looked up in) the store. A
 * call that has no room in the engine's context fails alone. */
struct engine_client {
    struct engine *engine;
    struct model *model;
    struct store *store;     /* may be NULL: nothing is kept */
    int64_t asked, computed; /* calls, and those that were not in the store */
    /* Instead of engine_run, where the engine has another driver: of it only limits are read. */
    int (*run)(void *ctx, struct engine_request *reqs, int n, struct error *err);
    void *run_ctx;
};
struct llm_client engine_client_as_llm(struct engine_client *s);

/* votes */

/* A vote is a row of the table: answers of n agents to one item → a choice. Ties go to the higher
 * summed probability, then to the lower index. */
struct vote {
    const char *name; /* majority, confidence, logprob, borda, quorum */
    void (*score)(const struct agent_answer *answers, int n, int n_choices,
                  double *out /* [n_choices] */);
    bool quorum; /* more than half of all must agree, else nothing is decided: -1 */
};
extern const struct vote vote_table[];
const struct vote *vote_find(const char *name);                     /* NULL when unknown */
const struct vote *vote_parse(const char *name, struct error *err); /* … with the names there are */
/* What the seed's rules find in an utterance: {…} up to the first brace that closes, if it is JSON
 * with "answer", "vote" or "conclusion", and "confidence" (0.6 without); else the first word after
 * the colon of the first line with Answer, 結論, Vote or 最終, or of the first line. malloc'ed. */
char *legacy_vote_parse(const char *text, float *confidence);
int vote_decide(const struct vote *v, const struct agent_answer *answers, int n, int n_choices);

/* debate */

struct workflow; /* workflow.h */
struct grader;   /* grade/grade.h */
struct transcript;
struct debate_options {
    const struct workflow *workflow; /* NULL: "brief" */
    int rounds;                      /* 1: independent answers only */
    bool working;
    const struct vote *vote;
    uint64_t seed;
    float temperature;           /* below 0: the workflow's own */
    int32_t max_tokens;          /* 0: the workflow's own */
    double seconds;              /* of every run; 0: the workflow's own */
    const struct grader *grader; /* as in workflow_options, and so is */
    void (*heard)(void *ctx, const struct transcript *talk, int item, int from);
    void *heard_ctx;
};
struct debate {
    int n_agents, n_items, rounds;
    struct transcript *talks;     /* [n_items] all that was said */
    struct agent_answer *answers; /* [rounds][n_agents][n_items] as they stood after each round; choice
                               -1: none. An item that ended earlier stays as it was. */
    uint8_t *solo;          /* [n_agents][n_items] right in the first round */
    uint8_t *voted;         /* [rounds][n_items] the vote after each round was right */
    uint8_t *decided;       /* [n_items] what the workflow decided was right */
    int64_t prefilled, generated, truncated, failed, calls;
    int64_t flips_good,
        flips_bad; /* answers that became right, became wrong, after hearing others */
};
int debate_run(const struct llm_client *a, const struct agent *team, int n_agents,
               const struct task_item *items, int n_items, const struct debate_options *o,
               struct debate *out, struct progress *p, struct error *err);
void debate_release(struct debate *d);
/* Whether an answer to an item, as in `answers`, is right. */
bool debate_answer_is_correct(const struct debate *d, const struct task_item *items, int item, int choice);
/* The plain text of one item's debate, for people. Appends. */
void debate_transcript(const struct debate *d, const struct agent *team, const struct task_item *it,
                       int item, const struct vote *v, struct buf *out);

/* What a debate did to its agents' answers, round by round. */
struct debate_round_stats {
    int64_t flips_good, flips_bad; /* answers that became right, became wrong, in this round */
    int64_t changed, open; /* of `open` answers against a majority of the others, so many … */
    int64_t conformed;     /* … changed, and so many of these to that majority's answer */
    int64_t agreed;        /* items whose agents all agree after it */
    int64_t voted;         /* items whose vote after it is right */
};
void debate_round_stats(const struct debate *d, const struct task_item *items, int round,
                    struct debate_round_stats *out);
/* Items that some agent has right in the first round: what the best choice among them could be. */
void debate_oracle(const struct debate *d, uint8_t *right /* [n_items] */);
/*
 * How well probabilities of first answers say how often they are right (Guo et al. 2017): expected
 * calibration error over ten bins, as they are and after the temperature that makes the right
 * answers most probable, p^(1/T) over its sum. Agent `agent`'s; n: items with an answer.
 */
struct debate_calibration {
    int64_t n;
    double ece, ece_fitted, temperature, nll, nll_fitted;
};
struct debate_calibration debate_calibration(const struct debate *d, const struct task_item *items, int agent);

/* k sampled workings of one agent per item, the j-th of what member j of a team sees: answers
 * [n_items][k] (choice -1: none), and what the j-th samples cost in tokens, [k] each, added to. */
struct self_consistency {
    int n_items, k;
    struct agent_answer *answers; /* [n_items][k]; of free answers, equal ones are the same choice */
    uint8_t *right;         /* [n_items][k] whether choice j of a free answer is right */
    int64_t *prefilled, *generated;
};
int self_consistency_sample(const struct llm_client *a, const struct agent *agent, const struct task_item *items,
                 int n_items, int k, float temperature, int32_t max_tokens, uint64_t seed,
                 const struct grader *grader, struct self_consistency *out, struct progress *p,
                 struct error *err);
/* The majority of the first k of them (self-consistency, Wang et al. 2023). right: [n_items]. */
void self_consistency_vote(const struct self_consistency *s, const struct task_item *items, int k, uint8_t *right);
void self_consistency_release(struct self_consistency *s);

/* credit: what each agent is worth to the team */

/*
 * A game of n agents: right[mask][item] says whether the coalition of agents in `mask` was right.
 * Coalition 0, nobody, never is. Values are means over items, paired, each with its interval.
 */
struct contribution {
    struct stats_interval leave_one_out; /* v(N) - v(N \ i) */
    struct stats_interval shapley; /* Σ_S |S|!(n-|S|-1)!/n! (v(S ∪ i) - v(S)); they add up to v(N) */
    struct stats_interval banzhaf; /* mean of v(S ∪ i) - v(S) over all S without i */
};
enum { GAME_MAX_EXACT_AGENTS = 8 }; /* that are played exactly */
void contribution_exact(const uint8_t *right, int n_agents, int n_items, struct contribution *out);

/* Plays a coalition: right [n_items]. Never asked for coalition 0, nor twice for one. */
struct coalition_game {
    void *ctx;
    int (*play)(void *ctx, uint32_t mask, uint8_t *right, struct error *err);
    int n_agents, n_items;
};
/* Shapley from `samples` permutations in antithetic pairs (each and its reverse), Banzhaf from as
 * many random coalitions for each agent; intervals hold the error of sampling and of items. */
int contribution_sampled(const struct coalition_game *g, int samples, uint64_t seed, struct contribution *out,
                   struct error *err);
/* All coalitions: right [2^n][n_items], at most GAME_MAX_EXACT_AGENTS. */
int coalition_game_play_all(const struct coalition_game *g, uint8_t *right, struct error *err);

/* The game of the vote on answers that are there: needs no call. */
struct vote_game {
    const struct vote *vote;
    const struct agent_answer *answers; /* [n_agents][n_items] */
    const struct task_item *items;
    int n_agents, n_items;
    const struct transcript *talks; /* [n_items] of items without choices: what was answered; or NULL */
};
struct coalition_game vote_game(struct vote_game *v);
/* The game of whole debates: every coalition debates, with what it shares in the store. */
struct debate_game {
    const struct llm_client *asker;
    const struct agent *team;
    int n_agents;
    const struct task_item *items;
    int n_items;
    const struct debate_options *options;
    struct progress *progress; /* may be NULL */
};
struct coalition_game debate_game(struct debate_game *d);

/* True leave-one-out by debates of the team and of the team without each agent, paired, with its
 * interval. `full` is the whole team's debate. */
int contribution_leave_one_out(const struct llm_client *a, const struct agent *team, int n_agents,
                         const struct task_item *items, int n_items, const struct debate_options *o,
                         const struct debate *full, struct stats_interval *value, struct progress *p,
                         struct error *err);
/* The same for the vote on first answers that are already there: answers[n_agents][n_items]. Needs
 * no further call. */
void contribution_leave_one_out_vote(const struct vote *v, const struct agent_answer *answers, int n_agents,
                     const struct task_item *items, int n_items, struct stats_interval *value);
/* How far two agents lie apart on an item, 0..1. */
typedef double (*behaviour_distance_fn)(const void *ctx, int a, int b, int item);
struct behaviour_answers {
    const struct agent_answer *answers; /* [n_agents][n_items] */
    const struct task_item *items;
    int n_items;
};
/* With a struct behaviour_answers as ctx: the Jensen-Shannon divergence (base 2) of their answer
 * distributions; whether they chose otherwise. */
double behaviour_js_divergence(const void *ctx, int a, int b, int item);
double behaviour_disagreement(const void *ctx, int a, int b, int item);
/* Novelty of each agent: its mean distance from the first `team` agents, itself apart. distance:
 * [n_agents][n_agents] mean of each pair, its diagonal untouched; or NULL. */
void behaviour_novelty(behaviour_distance_fn apart, const void *ctx, int n_agents, int team, int n_items,
                    struct stats_interval *value, double *distance);

#endif
