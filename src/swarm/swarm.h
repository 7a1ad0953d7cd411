/*
 * swarm: teams of agents that answer, read one another's answers and vote, and the contribution of
 * each agent to its team.
 *
 * Only engine_client.c calls an engine. All other code passes the calls of a step as one batch to a
 * `struct llm_client`, which fills in the replies: texts, and choices with exact probabilities. In
 * tests the client is scripted. Votes, debates and contributions are pure functions of the replies.
 */
#ifndef SHOAL_SWARM_H
#define SHOAL_SWARM_H

#include "check/check.h"
#include "data/data.h"
#include "eval/eval.h"
#include "memory/memory.h"
#include "store/store.h"

enum { TEAM_MAX = 17 };

struct agent {
    const char *name;
    const char *system;                 /* persona prompt, or NULL */
    struct adapter *adapter;            /* borrowed; NULL: the mix, or without one the base model */
    const struct weighted_adapter *mix; /* [n_mix] used instead of one adapter; or NULL */
    int n_mix;
    int view;           /* index of the agent's part of the evidence, for split evidence */
    const char *role;   /* role in the workflow; NULL: by the agent's position in the team */
    float temperature;  /* above 0: replaces the node's, unless the run sets a temperature */
    int32_t max_tokens; /* above 0: replaces the node's limit, unless the run sets a limit */
    float weight;       /* ballots count this much in the vote `weighted` */
};
/* Whether it is more than the base model with a prompt. */
static inline bool agent_has_adapter(const struct agent *a) {
    return a->adapter || a->n_mix > 0;
}
struct agent_answer {
    int32_t choice;               /* index of an item's choice or of a candidate; -1: none */
    float prob[EVAL_MAX_CHOICES]; /* probability of each choice; a free answer sets only its own */
    float confidence; /* probability of `choice`; votes use it if choice >= EVAL_MAX_CHOICES, for
                         which `prob` has no entry */
    float weight;     /* how much it counts in the vote `weighted`; at least 0 */
};

enum reply_format {
    REPLY_TEXT,   /* free text */
    REPLY_ANSWER, /* one of the item's choices, with exact probabilities, after a chain of thought
                     if requested. For an item without choices: free text that ends in an answer. */
    REPLY_JUDGE,  /* {"answer": one of the candidates, "rationale": text} */
    REPLY_LEGACY  /* free text; legacy_vote_parse finds the answer and the confidence */
};
struct llm_call { /* one LLM call: the prompt of one agent in one step */
    const struct agent *agent;
    /* Not NULL: the adapters [n_mix] that answer, instead of the agent's; n_mix 0: the base model
     */
    const struct weighted_adapter *mix;
    int n_mix;
    const struct task_item *item;
    const struct chat_message *messages;
    int n_messages;
    enum reply_format reply;
    bool chain_of_thought;         /* generate reasoning before a choice */
    const char *const *candidates; /* [n_candidates] the answers from which a judge selects one */
    int n_candidates;
    float temperature, top_p; /* for free text; temperature 0: greedy */
    int32_t max_tokens;
    uint64_t seed;
    const struct grammar *grammar; /* for free text; may be NULL */

    /* filled by the client */
    char *text; /* malloc'ed: the free text, the chain of thought or a judge's rationale */
    /* ends and logprobs: [n_tokens], malloc'ed, for free text. ends[i]: the byte offset in `text`
     * at which token i ends. logprobs[i]: its log-probability given its prefix, before temperature
     * and the other sampling parameters change the distribution. */
    int32_t *ends, n_tokens; /* n_tokens 0: the client does not report tokens */
    float *logprobs;
    struct agent_answer answer; /* its `choice` is an item's choice or a candidate; -1: none */
    int32_t n_prefilled, n_generated;
    bool truncated;     /* the reply reached max_tokens, or generation ended at a loop */
    const char *failed; /* reason of the failure, or NULL */
};
struct llm_client {
    void *ctx;
    /* Fills the results of the n calls; the caller releases them with llm_call_release. */
    int (*ask)(void *ctx, struct llm_call *calls, int n, struct error *err);
    /* Sets *out to the embeddings of n texts by the base model, [n][*d], malloc'ed, and *n_tokens
     * to the number of their tokens. NULL: the client has no embeddings. */
    int (*embed)(void *ctx, const char *const *texts, int n, float **out, int32_t *d,
                 int64_t *n_tokens, struct error *err);
};
/* The question of an item as agent `view` of a team sees it; -1: the whole question. */
const char *task_item_question(const struct task_item *it, int view);
/* A call with the plain question and the agent's system prompt; `chat` holds the messages. */
struct llm_call llm_call_question(const struct agent *agent, const struct task_item *item, int view,
                                  struct chat_message chat[2]);
void llm_call_release(struct llm_call *c); /* frees the memory that the client allocated */

/* The llm_client on one engine. It looks each call up in the store and stores each new result. If a
 * call does not fit in the engine's context, only this call fails (`failed` is set). */
struct engine_client {
    struct engine *engine;
    struct model *model;
    struct store *store;         /* may be NULL: no result is stored */
    int64_t n_calls, n_computed; /* calls; requests that the engine ran (a judge's call has two) */
    /* Replaces engine_run if another component drives the engine, or runs the requests in parts.
     * Then this client only reads the limits of `engine`. NULL: engine_run. */
    int (*run)(void *ctx, struct engine_request *reqs, int n, struct error *err);
    void *run_ctx;
};
/* The llm_client has embeddings if `run` is not set: they run on `engine` directly. */
struct llm_client engine_client_as_llm(struct engine_client *s);

/* votes */

/* A vote, a row of vote_table, maps n answers to one item to a choice: the choice with the highest
 * score. Of choices with equal scores, the one with the higher summed probability wins, then the
 * one with the lower index. */
struct vote {
    const char *name; /* majority, confidence, logprob, borda, quorum, weighted */
    void (*score)(const struct agent_answer *answers, int n, int n_choices,
                  double *out /* [n_choices] */);
    bool quorum; /* the choice needs more than half of the n answers, else vote_decide returns -1 */
};
extern const struct vote vote_table[];          /* ended by a row whose name is NULL */
const struct vote *vote_find(const char *name); /* NULL when unknown */
const struct vote *vote_parse(const char *name, struct error *err); /* the error lists all names */
/* Finds the answer of a text by the legacy rules; malloc'ed. If the text from the first '{' to the
 * next '}' is JSON with "answer", "vote" or "conclusion", the answer is that value, and *confidence
 * is "confidence". Otherwise the answer is the first word after the first colon (without a colon:
 * the first word) of the first line that contains Answer, 結論, Vote or 最終, or of the first line.
 * *confidence without a value in the text: 0.6. */
char *legacy_vote_parse(const char *text, float *confidence);
/* n >= 1; every answer has a choice in 0..n_choices-1. Returns the choice, or -1: no quorum. */
int vote_decide(const struct vote *v, const struct agent_answer *answers, int n, int n_choices);

/* debate */

struct workflow; /* declared below, as are struct transcript and struct router */
struct grader;   /* grade/grade.h */
struct transcript;
struct router;
struct debate_options {
    const struct workflow *workflow; /* NULL: "brief" */
    int rounds;                      /* at least 1; 1: independent answers only */
    bool chain_of_thought;
    const struct vote *vote; /* not NULL */
    uint64_t seed;
    float temperature;           /* below 0: the workflow's temperature */
    int32_t max_tokens;          /* 0: the workflow's limit */
    double seconds;              /* time limit of each run; 0: the workflow's limit */
    const struct grader *grader; /* grader, flock and on_step: see struct workflow_options */
    const struct flock_rules *flock;
    /* Not NULL: only the agent that the router chooses answers an item, and `rounds` is 1. The
     * router has as many agents as the team. */
    const struct router *router;
    void (*on_step)(void *ctx, const struct transcript *transcript, int item, int from);
    void *on_step_ctx;
};
struct debate {
    int n_agents, n_items, rounds;
    struct transcript *transcripts; /* [n_items] */
    struct agent_answer *answers;   /* [rounds][n_agents][n_items] each agent's latest answer after
                                       the round; choice -1: none. After the last round of an item
                                       its answers stay the same. */
    uint8_t *first_correct;         /* [n_agents][n_items] 1: correct in the first round */
    uint8_t *vote_correct;          /* [rounds][n_items] 1: the vote after the round was correct */
    uint8_t *decision_correct;      /* [n_items] 1: the workflow's decision was correct */
    int64_t prefilled, generated, truncated, failed, calls;
    int64_t flips_good, flips_bad; /* answers that became correct, or wrong, after round 0 */
};
/* The caller releases `out` with debate_release, also after an error. */
int debate_run(const struct llm_client *client, const struct agent *team, int n_agents,
               const struct task_item *items, int n_items, const struct debate_options *o,
               struct debate *out, struct progress *p, struct error *err);
void debate_release(struct debate *d);
/* The reply of a debate: the final text of a workflow that has one, else the decision, else the
 * last text, or "". */
const char *transcript_reply(const struct transcript *t);
/* The calls of a debate that no agreement ends. The total of debate_run's progress has them; when a
 * debate ends early, debate_run takes the rest off the total. */
int64_t debate_max_calls(const struct agent *team, int n_agents, const struct task_item *items,
                         int n_items, const struct debate_options *o);
/* Whether `choice`, from an answer in d->answers, is correct for the item; -1 is not. */
bool debate_answer_is_correct(const struct debate *d, const struct task_item *items, int item,
                              int choice);
/* Appends one item's debate as plain text. */
void debate_transcript(const struct debate *d, const struct agent *team, const struct task_item *it,
                       int item, const struct vote *v, struct buf *out);

/* Changes of the agents' answers in one round of a debate. In round 0 nothing has changed. */
struct debate_round_stats {
    int64_t flips_good, flips_bad; /* answers that became correct, or wrong, in this round */
    int64_t minority_changed,
        in_minority; /* in_minority: answers that, before the round, differed from the majority of
                        the other agents; minority_changed: how many of these changed */
    int64_t switched_to_majority; /* how many of these changed to the majority's answer */
    int64_t consensus;            /* items on which all agents agree after the round */
    int64_t correct_votes;        /* items with a correct vote after the round */
};
void debate_round_stats(const struct debate *d, const struct task_item *items, int round,
                        struct debate_round_stats *out);
/* any_correct[i] is 1 if at least one agent answers item i correctly in the first round. No rule
 * that selects one of the first answers can be correct on more items. */
void debate_oracle(const struct debate *d, uint8_t *any_correct /* [n_items] */);
/*
 * Calibration of agent `agent`'s first answers (Guo et al. 2017): expected calibration error (ece)
 * over ten bins and negative log-likelihood (nll), of the reported probabilities p and (_fitted)
 * after temperature scaling, p^(1/T) over its sum. T maximises the likelihood of the correct
 * answers.
 */
struct debate_calibration {
    int64_t n; /* items with an answer and a known correct answer; all values are over these */
    double ece, ece_fitted, temperature, nll, nll_fitted;
};
struct debate_calibration debate_calibration(const struct debate *d, const struct task_item *items,
                                             int agent);

/* k sampled answers of one agent to each item. Choices are made after a sampled chain of thought;
 * answers of items without choices are sampled, after one if requested. Of split evidence, sample j
 * sees view j modulo the number of views. */
struct self_consistency {
    int n_items, k;
    struct agent_answer *answers;   /* [n_items][k] choice -1: none. Equal free answers of an item
                                       have the same choice, numbered by first appearance. */
    uint8_t *right;                 /* [n_items][k] items without choices: 1: choice j is correct */
    int64_t *prefilled, *generated; /* [k] tokens of the j-th samples, over all items */
};
/* The caller releases `out`, also after an error. */
int self_consistency_sample(const struct llm_client *client, const struct agent *agent,
                            const struct task_item *items, int n_items, int k,
                            bool chain_of_thought, float temperature, int32_t max_tokens,
                            uint64_t seed, const struct grader *grader,
                            struct self_consistency *out, struct progress *p, struct error *err);
/* right[i]: whether the majority of the first k samples of item i is correct (self-consistency,
 * Wang et al. 2023). */
void self_consistency_vote(const struct self_consistency *s, const struct task_item *items, int k,
                           uint8_t *right);
void self_consistency_release(struct self_consistency *s);

/* Rows of reports: {name, kind, acc, lo, hi, calls, prefilled, generated}, with Wilson's interval,
 * and perhaps "retained", the accuracy on questions of other tasks; and comparisons of rows
 * (stats_pairs_json), a line each. */
struct report_cost {
    int64_t calls, prefilled, generated;
};
void report_row_add(json_t *rows, const char *name, const char *kind,
                    const uint8_t *right /* [n_items] */, int n_items, struct report_cost c);
void report_row_print(const json_t *row, FILE *f);
void report_comparison_print(const json_t *comparison, FILE *f);

/* Whether a text has the right answer of an item without choices; false if that is not known. g:
 * NULL: exact. */
bool answer_is_right(const struct task_item *it, const struct grader *g, const char *text);

/* checked_samples.c: samples of a team's answers to items without choices, filtered by a check */

struct checked_options {
    struct check *check; /* check/check.h, without the need of the right answer; NULL: no sample
                            passes */
    int max_samples;     /* of an item; sample j is of agent j mod n_agents */
    int passes; /* number of passing samples after which an item ends; 0: only max_samples */
    bool chain_of_thought;
    float temperature; /* an agent's first sample is greedy, the others have this temperature */
    int32_t max_tokens;
    uint64_t seed;
    const struct grader *grader; /* that extracts answers; NULL: exact */
};
struct checked_sample {
    char *text, *answer;  /* answer: in the grader's normal form; NULL: none */
    bool checked, passed; /* checked: there is an answer, and the item can be checked */
    int32_t prefilled, generated;
};
struct checked_samples {
    int n_items, max_samples;
    struct checked_sample *v; /* [n_items][max_samples] */
    int *n;                   /* [n_items] samples drawn */
};
/* The caller releases `out`, also after an error. */
int checked_samples_run(const struct llm_client *client, const struct agent *team, int n_agents,
                        const struct task_item *items, int n_items, const struct checked_options *o,
                        struct checked_samples *out, struct progress *p, struct error *err);
void checked_samples_release(struct checked_samples *s);
struct report_cost checked_samples_cost(const struct checked_samples *s);
/* The first of an item's samples that passed; -1: none. */
int checked_samples_first_pass(const struct checked_samples *s, int item);
/* The number of an item's samples, at most n, that would have been drawn with this `passes`. */
int checked_samples_used(const struct checked_samples *s, int item, int n, int passes);
/* The first of an item's first n samples that has the most frequent answer: of those that passed,
 * or if none did or without `checked`, of all. -1: no sample has an answer. */
int checked_samples_decide(const struct checked_samples *s, int item, int n, bool checked);
/* Checks texts that exist already: text i is sample i % n_samples of item i / n_samples. items[]:
 * the object that the check sees of each item, which check_item has accepted. The samples have no
 * text and no tokens. The caller releases `out`, also after an error. */
int checked_samples_of_texts(struct check *check, json_t *const *items, int n_items, int n_samples,
                             char *const *texts, struct checked_samples *out, struct error *err);

/*
 * second_turns.c: training conversations from a team's own first answers, one for each agent and
 * question at which the protocol has a second turn: the prompt of this turn, then the right answer,
 * which is the only target. `direct` is the control of the same length: line i of both has the same
 * question and target, in `direct` without the debate.
 */
struct team;          /* declared below */
struct second_turns { /* zeroed by the caller */
    int64_t n_questions;
    struct {
        struct buf second, direct;  /* lines of JSON */
        int64_t n, n_first_correct; /* lines of each; questions with a right first answer */
    } v[TEAM_MAX];
};
/* Adds the questions of a task. ERR_USAGE if they are not of the train split, and for tasks from
 * files or with split evidence. The reply has a chain of thought if the team's turns have one. */
int second_turns_add(struct second_turns *s, const struct llm_client *client, const struct team *t,
                     const struct eval_task *task, bool free_answers, struct error *err);
/* Writes DIR/second/AGENT.jsonl and DIR/direct/AGENT.jsonl. ERR_STATE if no agent has a line. */
int second_turns_write(const struct second_turns *s, const struct team *t, const char *dir,
                       struct error *err);
/* {questions, protocol, agents: [{name, lines, first_correct}]}; first_correct is a share. */
json_t *second_turns_json(const struct second_turns *s, const struct team *t);
void second_turns_release(struct second_turns *s);

/* The agent that answers the questions of a check of kind `question`, and their tokens. */
struct check_questioner {
    struct llm_client client;
    struct agent agent; /* without an adapter: the base model */
    int64_t prefilled, generated;
};
struct check_model check_questioner_as_model(struct check_questioner *q);

/* contribution of each agent to the team */

/*
 * A cooperative game of n agents: right[mask][item] is 1 if the coalition `mask` (bit a: agent a)
 * is correct on the item. The empty coalition 0 is never correct. v(S) is the mean of coalition S
 * over the items. Differences are paired by item and have 95 % intervals.
 */
struct contribution {
    struct stats_interval leave_one_out; /* v(N) - v(N \ i) */
    struct stats_interval
        shapley; /* Σ_S |S|!(n-|S|-1)!/n! (v(S ∪ i) - v(S)); they add up to v(N) */
    struct stats_interval banzhaf; /* mean of v(S ∪ i) - v(S) over all S without i */
};
enum { GAME_MAX_EXACT_AGENTS = 8 }; /* most agents whose game is enumerated exactly */
void contribution_exact(const uint8_t *right, int n_agents, int n_items, struct contribution *out);

struct coalition_game {
    void *ctx;
    /* Sets right[n_items] for the coalition `mask`. The functions below call it at most once for
     * each coalition and never for coalition 0. */
    int (*play)(void *ctx, uint32_t mask, uint8_t *right, struct error *err);
    int n_agents, n_items;
};
/* Estimates Shapley values from `samples` permutations (half of them random, each followed by its
 * reverse) and Banzhaf values from `samples` random coalitions per agent. Their intervals include
 * the error of this sampling and that of the items. Leave-one-out values are exact. */
int contribution_sampled(const struct coalition_game *g, int samples, uint64_t seed,
                         struct contribution *out, struct error *err);
/* Plays all coalitions of n agents: right [2^n][n_items]; n is at most GAME_MAX_EXACT_AGENTS. */
int coalition_game_play_all(const struct coalition_game *g, uint8_t *right, struct error *err);

/* The game in which a coalition votes with answers that exist already. It makes no LLM call. */
struct vote_game {
    const struct vote *vote;
    const struct agent_answer *answers; /* [n_agents][n_items] */
    const struct task_item *items;
    int n_agents, n_items;
    const struct transcript *transcripts; /* [n_items] candidates and their grades, for items
                                             without choices; NULL: all items have choices */
};
struct coalition_game vote_game(struct vote_game *v);
/* The game in which every coalition holds a debate. Coalitions share equal calls through the
 * client's store. */
struct debate_game {
    const struct llm_client *llm_client;
    const struct agent *team;
    int n_agents;
    const struct task_item *items;
    int n_items;
    const struct debate_options *options;
    struct progress *progress; /* may be NULL */
};
struct coalition_game debate_game(struct debate_game *d);

/* Leave-one-out by debates. value[i]: share of correct votes after the last round of the whole
 * team's debate (`full`) minus that of a debate of the team without agent i, paired by item. */
int contribution_leave_one_out(const struct llm_client *client, const struct agent *team,
                               int n_agents, const struct task_item *items, int n_items,
                               const struct debate_options *o, const struct debate *full,
                               struct stats_interval *value, struct progress *p, struct error *err);
/* Leave-one-out of the vote on existing answers [n_agents][n_items]. It makes no LLM call. n_agents
 * is at most 64, and every answer has a choice >= 0. */
void contribution_leave_one_out_vote(const struct vote *v, const struct agent_answer *answers,
                                     int n_agents, const struct task_item *items, int n_items,
                                     struct stats_interval *value);
/* Distance of the answers of agents a and b to an item, 0..1. */
typedef double (*behaviour_distance_fn)(const void *ctx, int a, int b, int item);
struct behaviour_answers {
    const struct agent_answer *answers; /* [n_agents][n_items] */
    const struct task_item *items;
    int n_items;
};
/* Two distances whose ctx is a struct behaviour_answers. */
/* Jensen-Shannon divergence (base 2) of the two distributions over the choices. */
double behaviour_js_divergence(const void *ctx, int a, int b, int item);
/* 1 if the choices differ, else 0. */
double behaviour_disagreement(const void *ctx, int a, int b, int item);
/* Novelty of each agent: its mean distance from the first `team` agents, itself excluded.
 * `distance`: output [n_agents][n_agents], the mean distance of each pair over the items; its
 * diagonal is not written; may be NULL. */
void behaviour_novelty(behaviour_distance_fn distance_fn, const void *ctx, int n_agents, int team,
                       int n_items, struct stats_interval *value, double *distance);

/*
 * flock: the adapter mixes of the agents that answer one item, steered by the three rules of
 * Reynolds (1987, "Flocks, herds, and schools: a distributed behavioral model").
 *
 * A boid's position is a point that it can move. An agent cannot move its answer directly, but only
 * the mix of adapters that gives the answer. So the rules move mixes, and the embeddings of the
 * answers decide how strongly. In a flock of n agents, agent i has
 *
 *   w_i   weights [n], at least 0, with sum 1: w_ik is the weight of agent k's adapter in the mix
 *         that answers for agent i. Before the first step w_i is the i-th unit vector: agent i has
 *         its own adapter only.
 *   v_i   velocity, the change of w_i in the last step. Before the first step it is w_i - 1/n, the
 *         direction from the uniform mix to its own adapter.
 *   x_i   the embedding [d] of its last answer
 *
 * and two agents have the distance d_ij = |x_i - x_j| / max_kl |x_k - x_l|, or 0 if all answers are
 * equal. The share of the largest distance makes the rules independent of the embedder's scale. A
 * step moves all agents at once. The means are over the other agents j:
 *
 *   separation_i = mean_j (1 - d_ij) (w_i - w_j)    away from agents with near answers
 *   alignment_i  = mean_j (v_j - v_i)               to the mean velocity
 *   cohesion_i   = mean_j d_ij (w_j - w_i)          toward agents with distant answers
 *   w_i <- max(0, w_i + s separation_i + a alignment_i + c cohesion_i), divided by its sum
 *
 * Consequences: agents with equal answers do not move by cohesion alone. Unit vectors do not move
 * by separation alone, because their weights of the other adapters are 0 already. In the first step
 * v_j - v_i = w_j - w_i, so that separation + alignment = cohesion.
 */
enum { FLOCK_MAX_COEFFICIENT = 100 };
struct flock_rules { /* coefficients, 0 to FLOCK_MAX_COEFFICIENT */
    double separation, alignment, cohesion;
};
struct boid_flock {
    int n; /* agents */
    double weights[TEAM_MAX][TEAM_MAX], velocity[TEAM_MAX][TEAM_MAX];
};
void flock_init(struct boid_flock *f, int n_agents);
/* One step. answers[i]: x_i [d]; NULL: the agent has no answer, so it keeps its weights and the
 * others do not see it. */
void flock_step(struct boid_flock *f, const struct flock_rules *rules, const float *const *answers,
                int32_t d);

/*
 * workflow: debates, panels with a judge and answer pipelines as small declared graphs, and the
 * executor that runs a graph for many items at once.
 *
 * A workflow is a YAML file (the built-in ones are the files of protocols/). A node defines the
 * prompt of its agents, in messages that are Jinja templates over the transcript so far. An edge
 * defines the next node of an item, under a condition in the same language. The result of an item
 * is decided by a vote, by a judge, or is the text of a node.
 *
 * Each step collects, over all open items, all calls whose inputs are ready, and passes them to an
 * llm_client in one batch. An agent whose call fails abstains. A run always ends, because the
 * budget bounds each item's calls and tokens. A result depends on the speed of the machine only if
 * the workflow or the caller sets a limit in seconds.
 *
 * Keys of the file; the text in parentheses is the default:
 *
 *   name: two-rounds
 *   about: Text for --help.
 *   rounds: 2                      value of `rounds` without --rounds (2)
 *   roles: [pro, con, judge]       of three roles, agent i has role i mod 3 (agents have no role)
 *   words: {en: {go: …}, ja: {…}}  `words.go` is the text in the item's language, else in English
 *   budget: {calls: 64, tokens: 65536}   per item (256, 1048576); the calls of a step share the
 *                                  remaining tokens equally, and a step that the budget does not
 *                                  cover does not start; `seconds` limits the run: no step starts
 *                                  after this time
 *   nodes:
 *     first:
 *       by: all | ROLE …           speakers (all); one word or a list
 *       order: together | in-turn  in-turn: agents see the earlier replies of their step (together)
 *       messages:                  a message that renders to an empty text is left out
 *         - system: "{{ me.system }}"
 *         - user: "{{ question }}"
 *       reply: text | answer | judge | legacy  (text)
 *       same_round: true           the step belongs to the round of the step before (false)
 *       tail: 3000                 an earlier utterance is cut to its last 3000 characters; 0: not
 *                                  cut (0)
 *       temperature, top_p, max_tokens   (0.7, 1, 256)
 *       flock: {separation: 0.25, alignment: 0.25, cohesion: 0.25}   the step begins with a step of
 *                                  the item's flock, whose weights mix the adapters of the calls
 *                                  (the agents' own adapters); a rule that is left out is 0
 *   edges:                         the first edge whose condition holds leads to the next node; if
 *                                  no edge does, the item ends
 *     - {from: first, to: first, when: round < rounds and not agreed}
 *   decide: {vote: majority, over: last | all}   or {judge: NODE}, or {text: NODE}
 *
 * Variables of templates and conditions: question, choices, lang, words, round (from 1), rounds,
 * agents (their number), agreed (all answers are equal), candidates (the item's choices, or the
 * answers given so far), given (the caller's object). Variables of templates only: me {name, role,
 * system, number}, own {text, answer, confidence} (the agent's latest utterance) or none, others
 * [{number, name, role, text, answer, confidence}] (in a random order per item and round; `number`
 * is the place in it), transcript [{name, role, number, round, node, text, answer}]. `confidence`
 * is the probability of the answer, or none if there is no answer or its probability is not known.
 */

struct grader; /* grade/grade.h */
struct workflow;
/* Opens the built-in workflow of this name, or else the file. NULL and an error on failure. The
 * caller frees the result with workflow_free. */
struct workflow *workflow_open(const char *name, struct error *err);
/* `path` is used in messages only. */
struct workflow *workflow_parse(const char *text, size_t len, const char *path, struct error *err);
void workflow_free(struct workflow *w);
const char *workflow_name(const struct workflow *w);
const char *workflow_description(const struct workflow *w);
const char *workflow_hash(const struct workflow *w); /* SHA-256 of its text */
int workflow_rounds(const struct workflow *w);
const struct vote *workflow_vote(const struct workflow *w);
/* The role of agent `agent` by position; "" if the workflow has no roles. */
const char *workflow_role(const struct workflow *w, int agent);
int workflow_n_roles(const struct workflow *w);
/* Name and text of built-in workflow i; NULL past the last. `text` may be NULL. */
const char *workflow_builtin(int i, const char **text);

/* running */

struct utterance {
    int node, agent, round; /* rounds count from 0 */
    char *text;
    int answer;       /* index of the transcript's candidate; -1: none */
    float confidence; /* probability of the answer among the choices; for free text, the probability
                         of the answer's tokens given their prefix, or 1 if the client reports no
                         tokens; for REPLY_LEGACY, the value in the text */
    bool has_probability;         /* there is an answer, and `confidence` is its probability */
    float prob[EVAL_MAX_CHOICES]; /* probability of each candidate; a free answer sets only
                                     its own entry */
    float weight;                 /* the agent's */
    int32_t n_prefilled, n_generated;
    bool truncated; /* truncated and failed: as in llm_call */
    const char *failed;
};
enum workflow_stop_reason {
    WORKFLOW_STOP_ROUNDS,    /* no edge's condition holds; no consensus */
    WORKFLOW_STOP_CONSENSUS, /* no edge's condition holds; the answers are equal */
    WORKFLOW_STOP_BUDGET,    /* limit of calls, tokens or seconds */
    WORKFLOW_STOP_NO_ANSWER  /* neither an answer nor a text is the result */
};
struct transcript { /* the utterances about one item */
    struct utterance *v;
    int n;
    char **candidates; /* the item's choices, or the answers in the order of first appearance */
    int n_candidates;
    int answer;          /* index of the decided candidate; -1: no answer was given, or no quorum */
    int final_utterance; /* the utterance whose text is the result; -1: the result is an answer */
    double *scores;      /* [n_candidates] scores of the vote */
    uint8_t *right;      /* [n_candidates] 1: correct; all 0 if no correct answer is known */
    int rounds;          /* rounds with an utterance */
    enum workflow_stop_reason stop_reason;
};
struct workflow_options {
    int rounds; /* maximum number of rounds; 0: the workflow's */
    bool chain_of_thought;
    float temperature;       /* below 0: the nodes' temperatures */
    int32_t max_tokens;      /* 0: the nodes' limits */
    const struct vote *vote; /* NULL: the workflow's vote */
    /* For items without choices: extracts the answer from a text and decides which answers are
     * equal. NULL: the text after "answer:", compared by the grader "exact". */
    const struct grader *grader;
    /* Replaces the rules of nodes with `flock`; below 0: the node's. NULL: the nodes' rules. */
    const struct flock_rules *flock;
    const int *only; /* [n_items] the one agent that speaks about the item, as in a team without the
                        others; NULL: all agents speak */
    const json_t *given;   /* the variable `given` of templates, an object; may be NULL */
    double seconds;        /* no step starts after this time; 0: the workflow's limit */
    double (*clock)(void); /* clock of `seconds`; NULL: clock_now */
    uint64_t seed;
    /* Called after each step of an item. The utterances from index `from` on are new. The
     * transcript's answer, scores and right are set as if the item ended here. May be NULL. */
    void (*on_step)(void *ctx, const struct transcript *transcript, int item, int from);
    void *on_step_ctx;
};
/* The caller zeroes transcripts [n_items] and releases them with transcript_release, also after an
 * error. Errors: the size of the team, a text that is not UTF-8, an error of the client, an error
 * in a template (the message names node and line), a node with `flock` and a client without
 * embeddings. */
int workflow_run(const struct workflow *w, const struct llm_client *client,
                 const struct agent *team, int n_agents, const struct task_item *items, int n_items,
                 const struct workflow_options *o, struct transcript *transcripts,
                 struct progress *p, struct error *err);
/* The answer of an utterance as a ballot. */
struct agent_answer utterance_answer(const struct utterance *u);
void transcript_release(struct transcript *o);

/*
 * blackboard: shared state of a team's agents — values under keys, and slots of texts with
 * similarity search.
 *
 * Every change is an event, appended to a log (in the store, if set) and never modified; the board
 * is a function of its events. Opening a log up to any of its events restores the board as it was
 * after that event. Several processes may write one log: blackboard_refresh applies the events of
 * the others. Time comes from the caller's clock, so a run with a scripted clock is reproducible.
 *
 * One thread uses a board. A returned `const json_t *` is borrowed until the board changes; the
 * caller releases any other json_t.
 */

/* Keys of the answer pipeline. */
#define BOARD_INPUT "input"
#define BOARD_RAG "rag"
#define BOARD_CONVERSATION "conversation_context"
#define BOARD_INITIAL_SUMMARY "initial_summary"
#define BOARD_FINAL_RESPONSE "final_response"
#define BOARD_QUESTION_TYPE "question_type"
#define BOARD_KEY_FACTS "key_facts"
#define BOARD_KEY_LEN 32
char *blackboard_agent_key(int agent, char out[BOARD_KEY_LEN]);       /* "agent_{i}_output" */
char *blackboard_summary_key(int iteration, char out[BOARD_KEY_LEN]); /* "summary_{i}" */

enum {
    BOARD_MAX_KEYS = 1024, /* on a full board a new key evicts one value: an expired one, else the
                              one with the lowest priority, among equals the oldest */
    BOARD_MAX_SLOTS = 256, /* a further slot is refused */
    BOARD_SLOT_ENTRIES = 100, /* a further entry evicts the oldest one of its slot */
    BOARD_MAX_EVENTS = 4096,  /* events in memory; older ones are only in the store, if set */
    BOARD_MAX_VALUE = 1 << 20 /* maximum bytes of one event as JSON */
};

struct blackboard;
struct blackboard_options {
    struct store *store;        /* NULL: in memory only */
    const char *name;           /* name of the log in the store */
    double (*clock)(void *ctx); /* seconds; NULL: the time of the last event. The board's time stays
                                   constant while the clock shows an earlier time. */
    void *clock_ctx;
    const char *const *persistent; /* keys and slots that clear_current_turn keeps, ended by NULL;
                                      NULL: conversation_context */
    int64_t until;                 /* above 0: replay up to this event; the board is then read-only.
                                      0: all events */
};
struct blackboard *blackboard_open(const struct blackboard_options *o, struct error *err);
void blackboard_close(struct blackboard *b);
/* The sequence number (seq) of the last event; events count from 1; 0: no event. */
int64_t blackboard_last_seq(const struct blackboard *b);
/* Applies the events that other processes have written since. */
int blackboard_refresh(struct blackboard *b, struct error *err);

/* Lifetime and priority of a value. */
struct blackboard_write_options {
    double ttl;   /* seconds until the value expires; 0: never */
    int priority; /* order of read_all, and order of eviction when the board is full */
};
/* Returns {timestamp, key, value}, or NULL and an error: ERR_USAGE for a key that is empty, too
 * long or not UTF-8 and for a value that is too large or nested too deep; ERR_STATE for a read-only
 * board. `w` may be NULL. */
json_t *blackboard_write(struct blackboard *b, const char *key, const json_t *value,
                         const struct blackboard_write_options *w, struct error *err);
/* Writes all members of the object `values`, or none after an error. */
int blackboard_write_multiple(struct blackboard *b, const json_t *values,
                              const struct blackboard_write_options *w, struct error *err);
const json_t *blackboard_read(const struct blackboard *b, const char *key); /* NULL: no value */
/* Return an object of keys and values; keys without a value are left out. blackboard_read_all has
 * the highest priority first, and the older value first among equal priorities. */
json_t *blackboard_read_multiple(const struct blackboard *b, const char *const *keys, int n);
json_t *blackboard_read_all(const struct blackboard *b);
/* Removes all keys and slots except the persistent ones. The history is kept. */
int blackboard_clear_current_turn(struct blackboard *b, struct error *err);

/*
 * Return events in order: an array of {seq, timestamp, op, …}. `op` is "write" (with key, value,
 * ttl, priority), "slot" (slot, text, embedding, metadata) or "clear" (keep). In
 * blackboard_history, `key` selects the writes to one key; NULL: all events.
 *
 * blackboard_watch returns at most `limit` events after event `after`. To continue, pass the seq of
 * the last returned event as `after`.
 */
json_t *blackboard_history(const struct blackboard *b, const char *key, struct error *err);
json_t *blackboard_watch(const struct blackboard *b, int64_t after, int limit, struct error *err);
/* For display: {events, time, entries: {key: {value, timestamp, …}}, slots: {name: entries}};
 * vectors are shown as "<Vector shape=(n,)>" and long texts are cut. */
json_t *blackboard_debug_view(const struct blackboard *b);

/* slots */

struct blackboard_slot_entry {
    const char *slot, *text;
    const float *embedding; /* [d], or NULL: not found by similarity */
    int32_t d;
    const json_t *metadata; /* may be NULL */
};
/* Returns {entry_id, slot, text, metadata, timestamp}, or NULL and an error. entry_id: 8 hex
 * digits. */
json_t *blackboard_slot_add(struct blackboard *b, const struct blackboard_slot_entry *e,
                            struct error *err);
/* An array of the entries of a slot, oldest first. slot NULL: all slots, one after another. */
json_t *blackboard_slot_list(const struct blackboard *b, const char *slot);
#define BOARD_SIMILARITY 0.7 /* default threshold */
/* At most `max` entries (with "similarity") whose embedding has a cosine with v[d] of at least the
 * threshold; the most similar first, the older first among equals. slot NULL: all slots. */
json_t *blackboard_find_similar(const struct blackboard *b, const char *slot, const float *v,
                                int32_t d, double threshold, int max);
/* Appends the last n entries of a slot (NULL: of each slot) as lines "[slot] text". */
void blackboard_slot_context(const struct blackboard *b, const char *slot, int n, struct buf *out);

/*
 * roles: the agents' roles for each type of question.
 *
 * Constant tables and pure functions; any thread.
 */

enum question_type {
    QUESTION_DISCUSSION,
    QUESTION_PLANNING,
    QUESTION_INFORMATIONAL,
    QUESTION_CONVERSATIONAL,
    QUESTION_DEFAULT,
    N_QUESTION_TYPES
};
extern const char *const question_type_names[N_QUESTION_TYPES]; /* "discussion" … "default" */
int question_type_find(const char *name);                       /* -1 when unknown */
/*
 * The first type, in the order above, with a keyword in the question; without one, the default.
 * Latin keywords match whole words. `compat`: the Chinese keywords are not used, and the others
 * match anywhere in the lower-cased text ("this" contains "hi"); see docs/COMPATIBILITY.md.
 */
enum question_type question_classify(const char *question, bool compat);

struct agent_role {
    const char *name;        /* in the language, as "批判的思考AI" */
    const char *description; /* for a system prompt: one or two sentences */
    float temperature;
};
int agent_role_count(enum question_type t);
/* Role i mod n of a type with n roles. */
struct agent_role agent_role_get(enum question_type t, enum language l, int agent);

/*
 * team: the agents that answer together and their debate options — one struct, filled from a file
 * or from a command's flags.
 *
 *   name: careful                  name in tables; default: the file name up to its first dot
 *   about: Purpose of the team.
 *   protocol: brief                a built-in workflow, or a file relative to this one (brief)
 *   rounds: 2                      maximum number of rounds; default: the protocol's
 *   vote, temperature, max_tokens  default: the protocol's
 *   router: careful.router.json    a file of `shoal team fit`, relative to this one: the agent that
 *                                  it chooses answers alone, in one round (none)
 *   chain-of-thought: false        generate reasoning before selecting a given choice (true)
 *   agents:                        1 to TEAM_MAX agents; roles follow their order
 *     - name: doubter              seeds depend on the name; default: the adapter's name
 *       adapter: adapters/critic   a PEFT directory or GGUF file relative to this file, hf:… (from
 *                                  the Hugging Face Hub), or base, the base model (base). A list is
 *                                  a mix: [adapters/a=0.7, adapters/b=0.3]
 *       system: You doubt.         persona
 *       role: judge                a role of the protocol; default: by position
 *       temperature: 0.3           replaces the protocol's temperature
 *       weight: 1.2                of its ballot in the vote `weighted` (1)
 *
 * Reading a team opens its protocol and checks that its local adapters exist. team_load_adapters
 * loads the adapters. After that the team is read-only, and any thread may use it.
 */

struct team {
    char *name, *description;
    /* Filled from the file and, where it sets nothing, from the protocol. The caller sets seed,
     * grader and the options that its flags override. */
    struct debate_options options;
    struct agent v[TEAM_MAX];
    int n;
    struct strings adapters; /* paths of the adapters of all agents, including "base" */

    /* owned by the team */
    struct workflow *workflow;
    struct router *router; /* or NULL; options.router */
    struct strings texts;
    struct weighted_adapter *terms; /* [adapters.n] each adapter with its weight */
    int first[TEAM_MAX + 1];        /* agent i uses adapters first[i] … first[i + 1] - 1 */
};
/* Call team_release also after an error. */
int team_read(struct team *t, const char *path, struct error *err);
int team_parse(struct team *t, const char *text, size_t len, const char *path, struct error *err);
/* Builds a team from flags. `agents`: one adapter (or "base") for each agent. `personas`: system
 * prompts of the first agents. Call team_release also after an error. */
int team_from_flags(struct team *t, const char *protocol, const struct strings *agents,
                    const struct strings *personas, struct error *err);
void team_release(struct team *t);

/* Loads the agents' adapters with `open`, which returns an adapter that outlives the team, or NULL
 * and an error. */
int team_load_adapters(struct team *t, adapter_open_fn *open, void *ctx, struct error *err);
/* The questions of a task that are in the training data of a team's adapters: the array of
 * contamination_report for each adapter that has any, with the agent's name; NULL: none has. */
json_t *team_contamination(const struct team *t, const struct eval_task *task);
/* For a manifest: {path: SHA-256} of the loaded adapters; adds the hashes of protocol and router.
 */
json_t *team_adapters_json(const struct team *t);
void team_add_protocol_hash(const struct team *t, json_t *hashes);

/*
 * router: one agent of a team for each question.
 *
 * For each agent, a logistic regression on the text of a question predicts the probability that the
 * agent's first answer is right; the agent with the highest probability answers, of equal ones the
 * first. The features are hashed n-grams of characters, for texts without spaces, and of words. No
 * model is called. A router is read-only: any thread may use it.
 */

enum {
    ROUTER_DIM = QUESTION_DIM, /* features */
    ROUTER_FOLDS = 5,
    ROUTER_MAX_BYTES = 1 << 20 /* a file's limit */
};
struct router {
    char *names[TEAM_MAX]; /* [n_agents] the agents that it was fitted for */
    int n_agents;
    double *weights;     /* [n_agents][1 + ROUTER_DIM] the intercept, then the features */
    double l2;           /* strength of the regularisation */
    char hash[HASH_LEN]; /* SHA-256 of its file; empty before it is read */
};
/* The index of the agent for a question. prob[n_agents]: the predicted probabilities; may be NULL.
 */
int router_route(const struct router *r, const char *question, double *prob);
/* NULL and an error if the text is not a router: other sizes, numbers that are not finite. `path`
 * names it in messages. */
struct router *router_parse(const char *text, size_t len, const char *path, struct error *err);
struct router *router_read(const char *path, struct error *err);
/* The content of its file. `fit` (may be NULL) describes how it was fitted. */
json_t *router_json(const struct router *r, const json_t *fit);
void router_free(struct router *r);

/* Questions with the correctness of each agent's first answer. */
struct router_data {
    const char *const *questions; /* [n] */
    const uint8_t *right;         /* [n_agents][n] */
    int n, n_agents;
};
/*
 * Cross-validation with folds by the hash of the question, so that equal questions are in one fold.
 * The regularisation of fold f is chosen by the right routes on the other folds, each by a router
 * fitted without that fold and f: a route in `route` depends on no answer to a question of its
 * fold. The final router is fitted on all questions, with the regularisation that is best over all
 * folds.
 */
struct router_fit {
    struct router *router; /* fitted on all questions; its names are NULL */
    int *route;            /* [n] by the router fitted without the question's fold */
    double fold_l2[ROUTER_FOLDS];
};
int router_fold(const char *question); /* 0 … ROUTER_FOLDS - 1 */
/* Gives the same bits with any pool (may be NULL). */
void router_fit(const struct router_data *d, struct pool *pool, struct router_fit *out);
void router_fit_release(struct router_fit *f);

/*
 * team_fit: a router, the weights of a vote and the sub-team that votes best, fitted to the first
 * answers of a team's agents to the questions of tasks, with a cross-validated report.
 *
 * The weight of an agent is the log-odds of its accuracy less that of a guess (Nitzan & Paroush
 * 1982, for errors that are spread evenly over the other choices), at least 0.
 */

/* The decision of a written team. */
enum team_decision { TEAM_DECIDE_ROUTER, TEAM_DECIDE_WEIGHTED, TEAM_DECIDE_SUBTEAM };
struct team_answers { /* the agents' first answers to the questions of tasks */
    const struct team *team;
    const struct eval_task *tasks; /* [n_tasks], borrowed */
    int n_tasks;
    struct task_item **items; /* [n_tasks][questions of the task] */
    struct debate *debates;   /* [n_tasks] of one round, without a router */
};
struct team_fit {
    struct router *router;
    double weight[TEAM_MAX];
    uint32_t subteam; /* bit k: agent k */
    bool better[3]; /* by enum team_decision: more right answers than the best agent; weighted vote
                       and sub-team also more than the unweighted vote of all */
    json_t *report; /* {n, folds, l2, fold_l2, vote, best, rows: [{name, kind, acc, lo, hi, calls}],
                       all_wrong, agents: [{name, weight, routed, subteam}], tasks: [{name, n, acc:
                       [of each row], contaminated}], comparisons: [{a, b, diff, lo, hi, p,
                       p_holm}], better: {router, weighted, subteam}} */
};
/* The caller calls team_answers_release also after an error. ERR_USAGE if the protocol has roles or
 * no answers in its first step. */
int team_answers_run(const struct llm_client *client, const struct team *t,
                     const struct eval_task *tasks, int n_tasks, uint64_t seed,
                     struct team_answers *out, struct progress *p, struct error *err);
void team_answers_release(struct team_answers *a);
/* ERR_USAGE with too few questions. The caller calls team_fit_release also after an error. */
int team_fit_run(const struct team_answers *a, struct pool *pool, struct team_fit *out,
                 struct error *err);
void team_fit_release(struct team_fit *f);
void team_fit_print(const json_t *report, FILE *f);
/*
 * Writes the team `t` of the file `path` with the fitted values to the file `out`, and its router
 * to OUT.router.json (without the extension of OUT). `fit` is for router_json. The new team has the
 * name of its file, so that tables can show both. Comments are lost. If `out` is in another folder,
 * relative paths become absolute.
 */
int team_fit_write(const struct team_fit *f, enum team_decision decide, const struct team *t,
                   const char *path, const char *out, const json_t *fit, struct error *err);

/*
 * debate_request: a debate as `shoal debate` and shoal_debate describe it: a topic or tasks, and
 * settings that override the team's.
 */

struct debate_request { /* filled from debate_request_rows */
    struct strings personas, choices;
    char *topic, *tasks, *data, *split, *grader, *protocol, *vote, *credit, *check;
    char *sample_temperature, *tune_data;
    int64_t rounds, n, shots, max_tokens, samples, check_samples, passes, seed;
    double temperature, seconds;
    struct flock_rules flock; /* below 0: the protocol's */
    bool chain_of_thought, free_answers, check_sandbox, base;
};
extern const struct option_row debate_request_rows[];
/* Overrides options of a team with those that the request sets, and checks `credit`. `o` borrows
 * the rules of `r`. */
int debate_request_apply(const struct debate_request *r, struct debate_options *o,
                         struct error *err);
struct debate_questions {
    struct task_item *topic; /* a single question, or NULL */
    struct eval_task *tasks;
    int n_tasks;
    int64_t n; /* number of questions */
};
/* Call debate_questions_release also after an error. */
int debate_questions_open(const struct debate_request *r, struct debate_questions *out,
                          struct error *err);
void debate_questions_release(struct debate_questions *q);
/* The result of debate_report_run for the debate of a team, to which the request was applied, on a
 * task. */
json_t *debate_request_run_task(const struct debate_request *r, const struct llm_client *client,
                                const struct team *t, const struct eval_task *task,
                                struct error *err);

/* team_solver.c: a team that answers the questions of a task */

/* Copies the options `o` to `out` for a task. For a task with generated answers, sets the task's
 * grader and, if o sets no token limit, the task's token limit. */
int debate_options_for_task(const struct eval_task *b, const struct debate_options *o,
                            struct debate_options *out, struct error *err);
/* Token limit of a call in a debate on these tasks: 512 if the questions of all tasks are
 * generated, 4096 if a task is read from files; at most max_seq_len. */
int32_t team_max_tokens(const struct eval_task *tasks, int n, int32_t max_seq_len);
/* A team as a candidate of an evaluation (struct eval_candidate). `prob` of a result is the share
 * of agents whose last answer is the decision. */
struct team_solver {
    const struct team *team; /* with loaded adapters */
    const struct llm_client *llm_client;
    uint64_t seed;
};
/* ctx: a struct team_solver. Adds to *cost. */
int team_solver_answer(void *ctx, const struct eval_task *b, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);

/*
 * report: a debate over a set of questions and its baselines, as one JSON object, with functions
 * that print it as a table and append it to a page.
 *
 * {name, n, protocol, rounds, vote, detectable, all_wrong, rows: [{name, kind, acc, lo, hi, calls,
 * prefilled, generated}], comparisons: [{a, b, diff, lo, hi, p, p_holm}], by_round: [{round, voted,
 * agreed, flips_good, flips_bad, open, changed, conformed}], self_consistency: [[samples,
 * accuracy]], credit: {game, method, agents: [{name, shapley, banzhaf, leave_one_out}],
 * sampling_error:
 * [{samples, shapley, banzhaf}]}, calibration: [{name, ece, ece_fitted, temperature}], cost,
 * endings, talks (transcripts)}. With a tuned temperature of the samples also {sample_temperature:
 * {temperature, agent, n, samples, curve: [[temperature, accuracy]]}}. shapley, banzhaf and
 * leave_one_out of an agent are [value, low, high]. With a check also {check: {kind, samples,
 * passes, confusion, comparisons}}. Kinds of rows: solo (one agent's first answers), vote (after
 * the first round), debate (the decision) or, of a team with a router, router, oracle, whole (split
 * evidence: one agent sees all of it), samples (self-consistency, or the most frequent answer of
 * samples), checked (the most frequent answer that passes).
 */

struct debate_report_options {
    const char *name;
    int samples;        /* maximum samples of the best agent's self-consistency; 0: none */
    float temperature;  /* sampling temperature, unless it is tuned */
    int32_t max_tokens; /* token limit of a sample */
    /* Development items [n_tuning]. The samples have the temperature at which the best agent's
     * self-consistency is right on most of them (sample_tuning.c). n_tuning 0: not tuned. */
    const struct task_item *tuning_items;
    int n_tuning;
    const struct grader *tuning_grader; /* as debate_options.grader */
    bool base; /* also rows without adapters: of the base model and of prompted agents */
    /* The game of the contributions: credit_debate: debates of all coalitions; credit_none: no
     * contributions; neither: the first-round vote. */
    bool credit_debate, credit_none;
    int n_transcripts; /* maximum number of transcripts in the report */
    /* A check with its number of samples and of passes (struct checked_options), for items without
     * choices; NULL: none. `questioner` is the model of the check. */
    struct check *check;
    int check_samples, check_passes;
    struct check_questioner *questioner;
};
/* Runs the debate and its baselines; NULL on failure. Starts the progress `p` (may be NULL) with
 * the calls of all parts; the caller finishes it. */
json_t *debate_report_run(const struct llm_client *client, const struct agent *team, int n_agents,
                          const struct task_item *items, int n_items,
                          const struct debate_options *o, const struct debate_report_options *w,
                          struct progress *p, struct error *err);
void debate_report_print(const json_t *r, FILE *f);
void debate_report_html(const json_t *r, struct buf *page);

/* Utterance i of a transcript: {name, round, text, answer, confidence, truncated, failed}. */
json_t *utterance_json(const struct transcript *o, const struct agent *team, int i);
/* The scores of the vote: {answer: score}. */
json_t *transcript_scores_json(const struct transcript *o);
/* The transcript of item `it`, which has index `item`: {question, said: [utterances], scores,
 * ending, rounds, answer, right}. */
json_t *debate_transcript_json(const struct debate *d, const struct agent *team,
                               const struct task_item *it, int item);
/* Appends a result of debate_transcript_json to a page. */
void debate_transcript_html(const json_t *transcript, struct buf *page);

/*
 * pipeline: a team answers one question. Steps: answer from memory if possible, retrieve
 * references, summarize long texts, run the agents with their roles in one batch, summarize, write
 * the answer, update the conversation memory.
 *
 * A workflow (protocols/panel.yaml, or another one with roles) defines the order of the agents; the
 * other steps are in pipeline.c. Each stage may have a separate llm_client, so that several base
 * models work together. The calls of a step to one client are one batch. Everything in the options
 * is borrowed; nothing is kept between calls.
 */

/* SUMMARY: the role "summary". OUTPUT: the role "output". INTERNAL: all other roles. */
enum pipeline_stage { PIPELINE_INTERNAL, PIPELINE_SUMMARY, PIPELINE_OUTPUT, PIPELINE_N_STAGES };
enum pipeline_stage pipeline_stage_of_role(const char *role); /* role: of the workflow */

struct pipeline_stage_options {
    struct llm_client llm_client;
    float temperature;  /* 0: the temperature of the agent's role, else of the workflow */
    int32_t max_tokens; /* 0: the workflow's limit */
};
/* Method that extracts key facts from the user's text. RULES: facts_extract (memory.h). MODEL:
 * these rules, and the summary model, whose reply follows a grammar and is filtered to facts that
 * the user stated. */
enum fact_source { FACTS_NONE, FACTS_RULES, FACTS_MODEL };

/* Selects the final answer among samples. */
struct answer_selector {
    int n_samples; /* 0: the final answer is not selected */
    /* texts: [n_samples] after answer_clean; "": not usable. *selected: the index of the answer. */
    int (*select)(void *ctx, const char *question, char *const *texts, int n, int *selected,
                  struct error *err);
    void *ctx;
};

enum { QUESTION_TYPE_BY_MODEL = -2 };
struct pipeline_options {
    const struct workflow *workflow;
    struct pipeline_stage_options stage[PIPELINE_N_STAGES];
    struct blackboard *board;
    struct conversation *memory;     /* NULL: nothing is stored */
    struct knowledge *knowledge;     /* NULL: no references */
    const struct embedder *embedder; /* adds semantic search of references, and an embedding to each
                                        text in a slot; NULL: lexical search only, no embeddings */
    struct adapter *const *adapters; /* [agents], each may be NULL; or NULL */
    int agents, iterations; /* agents with the role "agent"; maximum rounds of the workflow */
    int type;     /* enum question_type; -1: by the question's keywords; QUESTION_TYPE_BY_MODEL: the
                     summary model classifies the question */
    int language; /* enum language; -1: detected */
    bool summary; /* summarize the agents' texts after each iteration, and long questions */
    bool compat;  /* --compat legacy: legacy keywords; an answer has at least ten characters */
    float temperature;  /* temperature of all agents; below 0: that of stage, role or workflow */
    int32_t max_tokens; /* token limit of every turn; 0: that of stage or workflow */
    double seconds;     /* no turn starts after this time; 0: no limit */
    enum fact_source facts;
    uint64_t seed;
    /* The replies of the agent in the role "output" are sampled in one batch, sample i with the
     * reply's seed + i, and one of them is selected; the others are not written to the board. */
    struct answer_selector selector;
    /* Called before a batch of `n` agents; may be NULL. Iterations count from 1. */
    void (*progress)(void *ctx, const char *role, int iteration, int n);
    void *progress_ctx;
    /* Called after each write to the board with {timestamp, key, value}. `c`: the call whose text
     * was written, with its prompt; NULL if no agent wrote the value. `iteration`: the number of
     * the agent's turn, from 1; 0 without a call. The function may be NULL. */
    void (*on_write)(void *ctx, const json_t *entry, const struct llm_call *c, int iteration);
    void *on_write_ctx;
};

/* Source of an answer: the agent in the role "output"; another agent, if the output agent gave no
 * usable text; the conversation memory; a fallback text. */
enum answer_source { ANSWER_FROM_OUTPUT, ANSWER_FROM_AGENT, ANSWER_FROM_MEMORY, ANSWER_FALLBACK };
extern const char *const answer_source_names[]; /* "output", "member", "memory", "nobody" */
struct pipeline_answer {
    char *text; /* after answer_clean */
    enum answer_source source;
    const char *failure_reason; /* with ANSWER_FROM_AGENT or ANSWER_FALLBACK: the reason of the last
                                   failed call, or NULL */
    struct transcript transcript; /* the unmodified utterances; empty if the memory answered */
    char *names[TEAM_MAX];        /* names of the agents, owned */
    struct report_cost sampled;   /* with a selector: of all samples of the answer */
    int64_t exchange;             /* number of the exchange in o->memory; 0: not stored */
};
/*
 * An agent that fails abstains, so there is always an answer. Errors: a question that is not UTF-8,
 * a store that cannot be written, a client that fails, a selector that fails or a workflow without
 * its role "output", a workflow without roles, a team that is too large. Release `out` also after
 * an error.
 */
int pipeline_run(const struct pipeline_options *o, const char *question,
                 struct pipeline_answer *out, struct error *err);
void pipeline_answer_release(struct pipeline_answer *a);
/* Stores an exchange in o->memory, updates the memory's summary and key facts, and writes the facts
 * to the board. *number (may be NULL) receives the number of the exchange. */
int pipeline_update_memory(const struct pipeline_options *o, const char *question,
                           const char *answer, int64_t *number, struct error *err);

#endif
