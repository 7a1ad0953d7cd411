/*
 * swarm: teams of agents that answer, read one another's answers and vote, and the contribution of
 * each agent to its team.
 *
 * The code here does not call an engine. It passes whole steps of calls to a `struct llm_client`
 * (engine_client.c: the engine with its call store; tests: a scripted client), which fills in texts
 * and choices with exact probabilities. Everything else is a pure function of these replies.
 */
#ifndef SHOAL_SWARM_H
#define SHOAL_SWARM_H

#include "eval/eval.h"
#include "memory/memory.h"
#include "store/store.h"

enum { TEAM_MAX = 17 };

struct agent {
    const char *name;
    const char *system;                 /* persona prompt, or NULL */
    struct adapter *adapter;            /* borrowed; NULL: the base model, or the mix */
    const struct weighted_adapter *mix; /* [n_mix] used instead of one adapter; or NULL */
    int n_mix;
    int view;           /* index of its part of the evidence, for items with split evidence */
    const char *role;   /* role in the workflow; NULL: by its position in the team */
    float temperature;  /* above 0: replaces the workflow's temperature */
    int32_t max_tokens; /* above 0: replaces the workflow's limit */
};
struct agent_answer {
    int32_t choice;
    float prob[EVAL_MAX_CHOICES]; /* exact, over the item's choices */
    float confidence; /* probability of `choice` if it is >= EVAL_MAX_CHOICES, where `prob` has no
                         entry */
};

enum reply_format {
    REPLY_TEXT,   /* free text */
    REPLY_ANSWER, /* one of the item's choices, with exact probabilities, after a chain of thought
                     if requested. For an item without choices: free text that ends in its answer.
                   */
    REPLY_JUDGE,  /* {"answer": one of the candidates, "rationale": text} under a grammar */
    REPLY_LEGACY  /* free text; answer and confidence are parsed by the legacy rules */
};
struct llm_call { /* one LLM call: the prompt of one agent in one step */
    const struct agent *agent;
    const struct task_item *item;
    const struct chat_message *messages;
    int n_messages;
    enum reply_format reply;
    bool chain_of_thought;         /* think in free form first */
    const char *const *candidates; /* candidates of a judge */
    int n_candidates;
    float temperature, top_p; /* for free text; temperature 0: greedy */
    int32_t max_tokens;
    uint64_t seed;
    const struct grammar *grammar; /* for free text; may be NULL */

    /* filled by the client */
    char *text; /* malloc'ed: the reply, the chain of thought or the rationale */
    /* For free text, malloc'ed: the byte offset in `text` at which each token ends, and the token's
     * exact log-probability given its prefix, before sampling changes the distribution. */
    int32_t *ends, n_tokens; /* 0: unknown */
    float *logprobs;
    struct agent_answer answer; /* index of the item's choice or of the candidate; -1: none */
    int32_t n_prefilled, n_generated;
    bool truncated;     /* reached max_tokens, or was stopped in a loop */
    const char *failed; /* reason of the failure, or NULL */
};
struct llm_client {
    void *ctx;
    int (*ask)(void *ctx, struct llm_call *calls, int n, struct error *err);
};
/* The question of an item as agent `view` of a team sees it (-1: whole). */
const char *task_item_question(const struct task_item *it, int view);
/* A call with the plain question and the agent's system prompt; `chat` holds the messages. */
struct llm_call llm_call_question(const struct agent *agent, const struct task_item *item, int view,
                                  struct chat_message chat[2]);
void llm_call_release(struct llm_call *c); /* frees the memory that the client allocated */

/* The llm_client on one engine. It looks each call up in the store and stores each new result. A
 * call that does not fit in the engine's context fails alone. */
struct engine_client {
    struct engine *engine;
    struct model *model;
    struct store *store;         /* may be NULL: no result is stored */
    int64_t n_calls, n_computed; /* number of calls, and of calls that were not in the store */
    /* Replaces engine_run if another component drives the engine; only limits are read from
     * `engine`. */
    int (*run)(void *ctx, struct engine_request *reqs, int n, struct error *err);
    void *run_ctx;
};
struct llm_client engine_client_as_llm(struct engine_client *s);

/* votes */

/* A vote is a row of the table: answers of n agents to one item → a choice. The higher summed
 * probability breaks a tie, then the lower index. */
struct vote {
    const char *name; /* majority, confidence, logprob, borda, quorum */
    void (*score)(const struct agent_answer *answers, int n, int n_choices,
                  double *out /* [n_choices] */);
    bool quorum; /* more than half of all agents must agree, else the vote is -1 */
};
extern const struct vote vote_table[];
const struct vote *vote_find(const char *name);                     /* NULL when unknown */
const struct vote *vote_parse(const char *name, struct error *err); /* the error lists all names */
/* Parses a text by the legacy rules: {…} up to the first closing brace, if it is JSON with
 * "answer", "vote" or "conclusion", and "confidence" (0.6 without); else the first word after the
 * colon of the first line with Answer, 結論, Vote or 最終, or of the first line. malloc'ed. */
char *legacy_vote_parse(const char *text, float *confidence);
int vote_decide(const struct vote *v, const struct agent_answer *answers, int n, int n_choices);

/* debate */

struct workflow; /* below */
struct grader;   /* grade/grade.h */
struct transcript;
struct debate_options {
    const struct workflow *workflow; /* NULL: "brief" */
    int rounds;                      /* 1: independent answers only */
    bool chain_of_thought;
    const struct vote *vote;
    uint64_t seed;
    float temperature;           /* below 0: the workflow's temperature */
    int32_t max_tokens;          /* 0: the workflow's limit */
    double seconds;              /* time limit of each run; 0: the workflow's limit */
    const struct grader *grader; /* grader and on_step: as in workflow_options */
    void (*on_step)(void *ctx, const struct transcript *transcript, int item, int from);
    void *on_step_ctx;
};
struct debate {
    int n_agents, n_items, rounds;
    struct transcript *transcripts; /* [n_items] transcripts */
    struct agent_answer *answers;   /* [rounds][n_agents][n_items] the latest answers after each
                                       round; choice -1: none. An item that ended earlier keeps its
                                       answers. */
    uint8_t *first_correct;         /* [n_agents][n_items] 1: correct in the first round */
    uint8_t *vote_correct;          /* [rounds][n_items] 1: the vote after the round was correct */
    uint8_t *decision_correct;      /* [n_items] 1: the workflow's decision was correct */
    int64_t prefilled, generated, truncated, failed, calls;
    int64_t flips_good, flips_bad; /* answers that became correct, became wrong, in later rounds */
};
int debate_run(const struct llm_client *client, const struct agent *team, int n_agents,
               const struct task_item *items, int n_items, const struct debate_options *o,
               struct debate *out, struct progress *p, struct error *err);
void debate_release(struct debate *d);
/* Whether an answer to an item, as in `answers`, is correct. */
bool debate_answer_is_correct(const struct debate *d, const struct task_item *items, int item,
                              int choice);
/* Appends one item's debate as plain text. */
void debate_transcript(const struct debate *d, const struct agent *team, const struct task_item *it,
                       int item, const struct vote *v, struct buf *out);

/* Changes of the agents' answers in one round of a debate. */
struct debate_round_stats {
    int64_t flips_good, flips_bad; /* answers that became correct, became wrong, in this round */
    int64_t minority_changed,
        in_minority; /* in_minority: answers that differed from the majority of the other agents;
                        minority_changed: those of them that changed */
    int64_t switched_to_majority; /* those of them that changed to the majority's answer */
    int64_t consensus;            /* items on which all agents agree after the round */
    int64_t correct_votes;        /* items with a correct vote after the round */
};
void debate_round_stats(const struct debate *d, const struct task_item *items, int round,
                        struct debate_round_stats *out);
/* Items that at least one agent answers correctly in the first round: the upper bound of a choice
 * among first answers. */
void debate_oracle(const struct debate *d, uint8_t *any_correct /* [n_items] */);
/*
 * Calibration of agent `agent`'s first answers (Guo et al. 2017): expected calibration error over
 * ten bins, as reported and after temperature scaling, p^(1/T) over its sum, with the T that
 * maximises the likelihood of the correct answers. n: items with an answer.
 */
struct debate_calibration {
    int64_t n;
    double ece, ece_fitted, temperature, nll, nll_fitted;
};
struct debate_calibration debate_calibration(const struct debate *d, const struct task_item *items,
                                             int agent);

/* k sampled answers, each with its chain of thought, of one agent per item; sample j sees view j of
 * split evidence. answers [n_items][k] (choice -1: none); prefilled and generated: tokens of the
 * j-th samples over all items, [k] each. */
struct self_consistency {
    int n_items, k;
    struct agent_answer *answers; /* [n_items][k]; equal free answers have the same choice */
    uint8_t *right;               /* [n_items][k] whether choice j of a free answer is correct */
    int64_t *prefilled, *generated;
};
int self_consistency_sample(const struct llm_client *client, const struct agent *agent,
                            const struct task_item *items, int n_items, int k, float temperature,
                            int32_t max_tokens, uint64_t seed, const struct grader *grader,
                            struct self_consistency *out, struct progress *p, struct error *err);
/* The majority of the first k samples (self-consistency, Wang et al. 2023). right: [n_items]. */
void self_consistency_vote(const struct self_consistency *s, const struct task_item *items, int k,
                           uint8_t *right);
void self_consistency_release(struct self_consistency *s);

/* contribution of each agent to the team */

/*
 * A cooperative game of n agents: right[mask][item] is 1 if the coalition of the agents in `mask`
 * is correct. The empty coalition 0 is never correct. Values are means over items, paired, with
 * intervals.
 */
struct contribution {
    struct stats_interval leave_one_out; /* v(N) - v(N \ i) */
    struct stats_interval
        shapley; /* Σ_S |S|!(n-|S|-1)!/n! (v(S ∪ i) - v(S)); they add up to v(N) */
    struct stats_interval banzhaf; /* mean of v(S ∪ i) - v(S) over all S without i */
};
enum { GAME_MAX_EXACT_AGENTS = 8 }; /* most agents whose game is enumerated exactly */
void contribution_exact(const uint8_t *right, int n_agents, int n_items, struct contribution *out);

/* Plays a coalition: right [n_items]. Called at most once per coalition, never for coalition 0. */
struct coalition_game {
    void *ctx;
    int (*play)(void *ctx, uint32_t mask, uint8_t *right, struct error *err);
    int n_agents, n_items;
};
/* Shapley values from `samples` permutations in antithetic pairs (each permutation and its
 * reverse), Banzhaf values from `samples` random coalitions per agent. The intervals include the
 * errors of sampling and of items. */
int contribution_sampled(const struct coalition_game *g, int samples, uint64_t seed,
                         struct contribution *out, struct error *err);
/* Plays all coalitions: right [2^n][n_items], n at most GAME_MAX_EXACT_AGENTS. */
int coalition_game_play_all(const struct coalition_game *g, uint8_t *right, struct error *err);

/* The game in which a coalition votes with its existing answers. It makes no LLM call. */
struct vote_game {
    const struct vote *vote;
    const struct agent_answer *answers; /* [n_agents][n_items] */
    const struct task_item *items;
    int n_agents, n_items;
    const struct transcript *transcripts; /* [n_items] for items without choices: the candidates and
                                             their grades; or NULL */
};
struct coalition_game vote_game(struct vote_game *v);
/* The game in which every coalition holds a debate. Equal calls are computed once, through the
 * store. */
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

/* Leave-one-out by debates: the whole team's debate (`full`) minus the debate of the team without
 * each agent, paired, with intervals. */
int contribution_leave_one_out(const struct llm_client *client, const struct agent *team,
                               int n_agents, const struct task_item *items, int n_items,
                               const struct debate_options *o, const struct debate *full,
                               struct stats_interval *value, struct progress *p, struct error *err);
/* Leave-one-out of the vote on existing first answers: answers[n_agents][n_items]. It makes no
 * call. */
void contribution_leave_one_out_vote(const struct vote *v, const struct agent_answer *answers,
                                     int n_agents, const struct task_item *items, int n_items,
                                     struct stats_interval *value);
/* Distance of two agents on an item, 0..1. */
typedef double (*behaviour_distance_fn)(const void *ctx, int a, int b, int item);
struct behaviour_answers {
    const struct agent_answer *answers; /* [n_agents][n_items] */
    const struct task_item *items;
    int n_items;
};
/* Both take a struct behaviour_answers as ctx. Jensen-Shannon divergence (base 2) of the answer
 * distributions; 1 if the choices differ, else 0. */
double behaviour_js_divergence(const void *ctx, int a, int b, int item);
double behaviour_disagreement(const void *ctx, int a, int b, int item);
/* Novelty of each agent: the mean distance from the first `team` agents, excluding the agent.
 * distance: [n_agents][n_agents] mean distance of each pair, diagonal untouched; or NULL. */
void behaviour_novelty(behaviour_distance_fn distance_fn, const void *ctx, int n_agents, int team,
                       int n_items, struct stats_interval *value, double *distance);

/*
 * workflow: debates, panels with a judge and answer pipelines as small declared graphs, and the
 * executor that runs a graph for many items at once.
 *
 * A workflow is a YAML file (the built-in ones are the files of protocols/). A node defines the
 * prompt of its agents, in messages that are Jinja templates over the transcript so far. An edge
 * defines the next node of an item, under a condition in the same language. A vote or a judge ends
 * the workflow.
 *
 * The executor does not know the model. Each step collects, over all open items, all calls whose
 * inputs are ready, and passes them to an llm_client in one batch. An agent whose call fails
 * abstains. A run always ends, because the budget bounds each item's calls and tokens. Only a limit
 * in seconds makes a result depend on the machine, and only if the caller sets one.
 *
 *   name: two-rounds
 *   about: Text for --help.
 *   rounds: 2                      default of --rounds
 *   roles: [pro, con, judge]       agent i has role i mod 3; none: every agent is a debater
 *   words: {en: {go: …}, ja: {…}}  `words.go` in the item's language, else in English
 *   budget: {calls: 64, tokens: 65536}   per item; the calls of a step share the remaining tokens,
 *                                  and a step that the budget does not cover does not start;
 *                                  `seconds` limits the run: no step starts after this time
 *   nodes:
 *     first:
 *       by: all | ROLE …           speakers (all); one word or a list
 *       order: together | in-turn  whether an agent sees the others of the same step (together)
 *       messages:                  empty ones are left out
 *         - system: "{{ me.system }}"
 *         - user: "{{ question }}"
 *       reply: text | answer | judge | legacy  (text)
 *       same_round: true           the step belongs to the round of the step before (false)
 *       tail: 3000                 characters kept of each earlier utterance; 0: all
 *       temperature, top_p, max_tokens
 *   edges:                         the first whose condition holds is taken; none: the item ends
 *     - {from: first, to: first, when: round < rounds and not agreed}
 *   decide: {vote: majority, over: last | all}   or {judge: NODE}, or {text: NODE}: its text
 *
 * Variables of templates: question, choices, lang, words, round (from 1), rounds, agents (number),
 * agreed, me {name, role, system, number}, own {text, answer} or none, others [{number, text,
 * answer}] in a random order per item and round, without names, transcript [{name, role, number,
 * round, node, text, answer}], candidates (the answers given so far), given (the caller's object).
 */

struct grader; /* grade/grade.h */
struct workflow;
/* Opens a built-in workflow by name, else a file. */
struct workflow *workflow_open(const char *name, struct error *err);
struct workflow *workflow_parse(const char *text, size_t len, const char *path, struct error *err);
void workflow_free(struct workflow *w);
const char *workflow_name(const struct workflow *w);
const char *workflow_description(const struct workflow *w);
int workflow_rounds(const struct workflow *w);
const struct vote *workflow_vote(const struct workflow *w);
const char *workflow_role(const struct workflow *w, int agent); /* "" without roles */
int workflow_n_roles(const struct workflow *w);
/* Name and text of built-in i; NULL at the end. */
const char *workflow_builtin(int i, const char **text);

/* running */

struct utterance {
    int node, agent, round; /* rounds count from 0 */
    char *text;
    int answer;       /* index of the transcript's candidate; -1: none */
    float confidence; /* probability of the answer: among choices, or of the answer's tokens in free
                         text, given their prefix; 1 if the client reports none */
    float prob[EVAL_MAX_CHOICES]; /* over the item's choices, in the order of candidates */
    int32_t n_prefilled, n_generated;
    bool truncated;
    const char *failed;
};
enum workflow_stop_reason {
    WORKFLOW_STOP_ROUNDS,
    WORKFLOW_STOP_CONSENSUS,
    WORKFLOW_STOP_BUDGET,
    WORKFLOW_STOP_NO_ANSWER
};
struct transcript { /* the utterances about one item */
    struct utterance *v;
    int n;
    char **candidates; /* the item's choices, or the answers in the order of first appearance */
    int n_candidates;
    int answer;          /* index of the candidate; -1: no agent gave an answer */
    int final_utterance; /* the utterance that is the result, if the workflow ends in text; -1: none
                          */
    double *scores;      /* [n_candidates] scores of the vote */
    uint8_t *right;      /* [n_candidates] whether each is correct, if the item has a gold answer */
    int rounds;          /* rounds with an utterance */
    enum workflow_stop_reason stop_reason;
};
struct workflow_options {
    int rounds; /* at most; 0: the workflow's number */
    bool chain_of_thought;
    float temperature;       /* below 0: the nodes' temperatures */
    int32_t max_tokens;      /* 0: the nodes' limits */
    const struct vote *vote; /* NULL: the workflow's vote */
    /* For items without choices: extracts the answer from a text and decides which answers are
     * equal. NULL: the text after "answer:", compared ignoring case and white space. */
    const struct grader *grader;
    const json_t *given;   /* an object for templates; may be NULL */
    double seconds;        /* 0: the workflow's limit */
    double (*clock)(void); /* clock of `seconds`; NULL: clock_now */
    uint64_t seed;
    /* Called after each step of an item: utterances from `from` on are new, and answer, scores and
     * right are set as if the item ended here. May be NULL. */
    void (*on_step)(void *ctx, const struct transcript *transcript, int item, int from);
    void *on_step_ctx;
};
/* The caller zeroes transcripts [n_items] and releases them with transcript_release, also after an
 * error. Errors come from the client, or from a template, with node and line. */
int workflow_run(const struct workflow *w, const struct llm_client *client,
                 const struct agent *team, int n_agents, const struct task_item *items, int n_items,
                 const struct workflow_options *o, struct transcript *transcripts,
                 struct progress *p, struct error *err);
struct agent_answer utterance_answer(const struct utterance *u);
void transcript_release(struct transcript *o);

/*
 * blackboard: shared state of a team's agents — values under keys, and slots of texts with
 * similarity search.
 *
 * Every change is an event, appended to a log (in the store, if set) and never modified; the board
 * is a function of its events. Opening a log again, up to any event, restores the board of that
 * time. blackboard_refresh applies events of other processes; no event is lost. Time comes from the
 * caller's clock, so that a run with a scripted clock is reproducible.
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
    BOARD_MAX_KEYS = 1024,    /* when full: the lowest priority is evicted first, then the oldest */
    BOARD_MAX_SLOTS = 256,    /* when full: a new slot is refused */
    BOARD_SLOT_ENTRIES = 100, /* when full: the oldest is evicted */
    BOARD_MAX_EVENTS = 4096,  /* held in memory; older ones are read from the store, if set */
    BOARD_MAX_VALUE = 1 << 20 /* bytes of one event as JSON */
};

struct blackboard;
struct blackboard_options {
    struct store *store;        /* NULL: in memory only */
    const char *name;           /* name of the log in the store */
    double (*clock)(void *ctx); /* seconds; NULL: the time of the last event. Time stays constant
                                   when the clock goes backwards */
    void *clock_ctx;
    const char *const *persistent; /* keys and slots that clear_current_turn keeps, ended by NULL;
                                      NULL: conversation_context */
    int64_t until;                 /* replay up to this event, then stop; 0: all events */
};
struct blackboard *blackboard_open(const struct blackboard_options *o, struct error *err);
void blackboard_close(struct blackboard *b);
int64_t blackboard_last_seq(const struct blackboard *b); /* seq of the last event; 0: none */
/* Applies the events that other processes have written since. */
int blackboard_refresh(struct blackboard *b, struct error *err);

/* Lifetime and priority of a value. */
struct blackboard_write_options {
    double ttl;   /* seconds until the value expires; 0: never */
    int priority; /* order of read_all, and order of eviction when the board is full */
};
/* {timestamp, key, value}, or NULL: ERR_USAGE for a key that is empty or too long and a value that
 * is too large or nested too deep. `w` may be NULL. */
json_t *blackboard_write(struct blackboard *b, const char *key, const json_t *value,
                         const struct blackboard_write_options *w, struct error *err);
/* Writes every member of the object, all or none. */
int blackboard_write_multiple(struct blackboard *b, const json_t *values,
                              const struct blackboard_write_options *w, struct error *err);
const json_t *blackboard_read(const struct blackboard *b, const char *key); /* NULL: no value */
/* Objects of key and value; keys without a value are left out. read_all: highest priority first,
 * then the oldest. */
json_t *blackboard_read_multiple(const struct blackboard *b, const char *const *keys, int n);
json_t *blackboard_read_all(const struct blackboard *b);
/* Removes all keys and slots except the persistent ones. The history is kept. */
int blackboard_clear_current_turn(struct blackboard *b, struct error *err);

/*
 * Events in order: an array of {seq, timestamp, op, …}, op being "write" (key, value, ttl,
 * priority), "slot" (slot, text, embedding, metadata) or "clear" (keep). `key` selects the writes
 * to one key; NULL: all events.
 *
 * blackboard_watch returns at most `limit` events after event `after`; the next cursor is the seq
 * of the last one.
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
/* {entry_id, slot, text, metadata, timestamp}, entry_id being 8 hex digits; NULL sets err. */
json_t *blackboard_slot_add(struct blackboard *b, const struct blackboard_slot_entry *e,
                            struct error *err);
/* An array of a slot's entries, oldest first; NULL: of every slot. */
json_t *blackboard_slot_list(const struct blackboard *b, const char *slot);
#define BOARD_SIMILARITY 0.7
/* Entries (with "similarity") whose cosine with v[d] is at least the threshold, the most similar
 * first, the older first if equal. `slot` NULL: all slots. */
json_t *blackboard_find_similar(const struct blackboard *b, const char *slot, const float *v,
                                int32_t d, double threshold, int max);
/* Appends the last n entries of a slot (NULL: of each) as lines "[slot] text". */
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
 * The first type, in the order above, with a keyword in the question. Latin keywords match whole
 * words; Chinese questions have separate keywords. `compat`: only the legacy keywords,
 * anywhere in the lower-cased text ("this" contains "hi"); see docs/COMPATIBILITY.md.
 */
enum question_type question_classify(const char *question, bool compat);

struct agent_role {
    const char *name;        /* "批判的思考AI" */
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
 *   name: careful                  name in tables; default: the file name
 *   about: Purpose of the team.
 *   protocol: brief                a built-in workflow, or a file relative to this one (brief)
 *   rounds: 2                      at most; default: the protocol's, also for vote, temperature
 *                                  and max_tokens
 *   chain-of-thought: false        think before choosing one of the given answers (true)
 *   agents:                        1 to TEAM_MAX agents; roles follow their order
 *     - name: doubter              seeds depend on it; default: the adapter's name
 *       adapter: adapters/critic   a PEFT directory or GGUF file relative to this file, hf:…, or
 *                                  base (base). A list is a mix: [adapters/a=0.7, adapters/b=0.3]
 *       system: You doubt.         persona
 *       role: judge                a role of the protocol; default: by position
 *       temperature: 0.3           instead of the protocol's
 *
 * Reading a team opens its protocol and checks that its adapters exist; team_load_adapters loads
 * them. The team is read-only after that: any thread.
 */

struct team {
    char *name, *description;
    /* The team owns `workflow`. rounds and vote hold its defaults. The caller sets seed, grader and
     * any option that its flags override. */
    struct debate_options options;
    struct agent v[TEAM_MAX];
    int n;
    struct strings adapters; /* adapters of all agents, including "base": the list for a plan */

    /* owned by the team */
    struct workflow *workflow;
    struct strings texts;
    struct weighted_adapter *terms; /* [adapters.n] */
    int first[TEAM_MAX + 1];        /* agent i uses adapters first[i] … first[i + 1] - 1 */
};
/* Call team_release also after an error. */
int team_read(struct team *t, const char *path, struct error *err);
int team_parse(struct team *t, const char *text, size_t len, const char *path, struct error *err);
/* From flags: one adapter (or "base") per agent, and system prompts for the first agents. */
int team_from_flags(struct team *t, const char *protocol, const struct strings *agents,
                    const struct strings *personas, struct error *err);
void team_release(struct team *t);

/* Loads the agents' adapters. `open` returns an adapter that lives as long as the team, or NULL. */
typedef struct adapter *team_adapter_open_fn(void *ctx, const char *path, struct error *err);
int team_load_adapters(struct team *t, team_adapter_open_fn *open, void *ctx, struct error *err);

/* team_solver.c: a team that answers the questions of a task */

/* Copies the options for a task. A task with generated answers sets its grader, and its token limit
 * if none is set. */
int debate_options_for_task(const struct eval_task *b, const struct debate_options *o,
                            struct debate_options *out, struct error *err);
/* Token limit of a call in a debate on these tasks: 512 if all are task families, else 4096, at
 * most max_seq_len. */
int32_t team_max_tokens(const struct eval_task *tasks, int n, int32_t max_seq_len);
/* A team as a candidate of an evaluation. `prob` of a result is the share of agents whose last
 * answer is the decision. */
struct team_solver {
    const struct team *team; /* with loaded adapters */
    const struct llm_client *llm_client;
    uint64_t seed;
};
int team_solver_answer(void *ctx, const struct eval_task *b, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);

/*
 * report: a debate over a set of questions and its baselines, as one JSON object, with functions
 * that print it as a table and append it to a page.
 *
 * {name, n, protocol, rounds, detectable, rows: [{name, kind, acc, lo, hi, calls, prefilled,
 * generated}], comparisons: [{a, b, diff, lo, hi, p, p_holm}], by_round: [{round, voted, agreed,
 * flips_good, flips_bad, open, changed, conformed}], credit: {game, method, agents: [{name,
 * shapley, banzhaf, leave_one_out}], sampling_error: [{samples, shapley, banzhaf}]}, calibration:
 * [{name, ece, ece_fitted, temperature}], cost, endings, talks}; an interval is [value, low, high].
 * Kinds: solo, vote (after the first round), debate (the decision), oracle, whole (split evidence:
 * an agent that sees all of it), samples.
 */

struct debate_report_options {
    const char *name;
    int samples; /* maximum samples of the best agent's self-consistency; 0: none */
    float temperature;
    int32_t max_tokens;              /* token limit of a sample */
    bool credit_debate, credit_none; /* neither: the game of the first-round vote */
    int n_transcripts;               /* number of transcripts in the report */
};
/* Runs the debate and its baselines; NULL on failure. */
json_t *debate_report_run(const struct llm_client *client, const struct agent *team, int n_agents,
                          const struct task_item *items, int n_items,
                          const struct debate_options *o, const struct debate_report_options *w,
                          struct progress *p, struct error *err);
void debate_report_print(const json_t *r, FILE *f);
void debate_report_html(const json_t *r, struct buf *page);

/* An utterance of a transcript: {name, round, text, answer, confidence, truncated, failed}; and the
 * scores of the vote: {answer: score}. */
json_t *utterance_json(const struct transcript *o, const struct agent *team, int i);
json_t *transcript_scores_json(const struct transcript *o);
/* The transcript of an item: {question, said: [utterances], answer, ending, scores}; and the same
 * as a conversation on a page. */
json_t *debate_transcript_json(const struct debate *d, const struct agent *team,
                               const struct task_item *it, int item);
void debate_transcript_html(const json_t *transcript, struct buf *page);

/*
 * pipeline: a team answers one question. Steps: answer from memory if possible, retrieve
 * references, summarize long texts, run the agents with their roles in one batch, summarize, write
 * the answer, update the conversation memory.
 *
 * A workflow (protocols/panel.yaml, or another one with roles) defines the order of the agents; the
 * other steps are here. Each stage may have a separate llm_client, so that several base models work
 * together: the calls of a step go to each client in one batch. The code does not know the model.
 * Everything in the options is borrowed; nothing is kept between calls.
 */

/* The role "summary", the role "output", and all other roles. */
enum pipeline_stage { PIPELINE_INTERNAL, PIPELINE_SUMMARY, PIPELINE_OUTPUT, PIPELINE_N_STAGES };
enum pipeline_stage pipeline_stage_of_role(const char *role); /* by the workflow's role */

struct pipeline_stage_options {
    struct llm_client llm_client;
    float temperature;  /* 0: the role's temperature, else the workflow's */
    int32_t max_tokens; /* 0: the workflow's limit */
};
/* Source of key facts in the user's text: rules (memory.h), or the summary model, whose reply
 * follows a grammar and is filtered to facts that the user stated. */
enum fact_source { FACTS_NONE, FACTS_RULES, FACTS_MODEL };

enum { QUESTION_TYPE_BY_MODEL = -2 };
struct pipeline_options {
    const struct workflow *workflow;
    struct pipeline_stage_options stage[PIPELINE_N_STAGES];
    struct blackboard *board;
    struct conversation *memory;     /* NULL: nothing is stored */
    struct knowledge *knowledge;     /* NULL: no references */
    const struct embedder *embedder; /* adds semantic search of references, and an embedding to each
                                        text in a slot; NULL: lexical search only, no embeddings */
    struct adapter *const *adapters; /* [agents], each may be NULL */
    int agents, iterations;
    int type;     /* enum question_type; -1: by the question's keywords; QUESTION_TYPE_BY_MODEL: the
                     summary model classifies */
    int language; /* enum language; -1: detected */
    bool summary; /* after each iteration, and of long texts */
    bool compat;  /* --compat legacy: its keywords, and a minimum answer length of ten characters */
    float temperature;  /* temperature of all agents; below 0: the separate values */
    int32_t max_tokens; /* token limit of every turn; 0: the separate values */
    double seconds;     /* no turn starts after this time; 0: no limit */
    enum fact_source facts;
    uint64_t seed;
    /* Called before a batch of `n` agents; may be NULL. Iterations count from 1. */
    void (*progress)(void *ctx, const char *role, int iteration, int n);
    void *progress_ctx;
    /* Called after each write to the board with {timestamp, key, value}. `c`: the call whose text
     * was written, with its prompt, and `iteration`: the turn of its agent; NULL: no agent wrote
     * it. May be NULL. */
    void (*on_write)(void *ctx, const json_t *entry, const struct llm_call *c, int iteration);
    void *on_write_ctx;
};

/* Source of an answer: the agent in the role "output"; another agent, if that one gave no usable
 * text; the conversation memory; a fallback text. */
enum answer_source { ANSWER_FROM_OUTPUT, ANSWER_FROM_AGENT, ANSWER_FROM_MEMORY, ANSWER_FALLBACK };
extern const char *const answer_source_names[]; /* "output", "member", "memory", "nobody" */
struct pipeline_answer {
    char *text; /* cleaned */
    enum answer_source source;
    const char *failure_reason;   /* with ANSWER_FROM_AGENT or ANSWER_FALLBACK: the reason of the
                          failure,   or NULL */
    struct transcript transcript; /* the unmodified utterances; empty if the memory answered */
    char *names[TEAM_MAX];
};
/*
 * An agent that fails abstains, so that there is always an answer. Errors come from outside (a
 * question that is not UTF-8, a store that cannot be written, a client that fails) or from a team
 * that is too large. Release `out` also after an error.
 */
int pipeline_run(const struct pipeline_options *o, const char *question,
                 struct pipeline_answer *out, struct error *err);
void pipeline_answer_release(struct pipeline_answer *a);
/* Stores an exchange in o->memory, with an updated summary and key facts. */
int pipeline_update_memory(const struct pipeline_options *o, const char *question,
                           const char *answer, struct error *err);

#endif
