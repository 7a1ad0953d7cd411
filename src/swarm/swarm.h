/*
 * swarm: agents that answer, hear one another and vote, and what each of them was worth to the
 * team.
 *
 * Whoever asks knows no engine: whole steps of calls go to an `asker` (the engine with its call
 * store in engine_client.c, a scripted one in tests), which fills in what was said, choices with
 * exact probabilities. Everything else here is a pure function of those.
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
    struct adapter *adapter;            /* borrowed; NULL: the bare base, or the mix */
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
    float sure; /* of a choice that is EVAL_MAX_CHOICES or more: its own probability */
};

enum reply_format {
    REPLY_TEXT,   /* free text */
    REPLY_ANSWER, /* one of the item's choices, with exact probabilities; after a working if asked
                     for. Of an item without choices: free text that ends in its answer. */
    REPLY_JUDGE,  /* {"answer": one of the candidates, "rationale": text} under a grammar */
    REPLY_LEGACY  /* free text; answer and confidence are picked out of it as the seed does */
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
    struct agent_answer *answers; /* [rounds][n_agents][n_items] as they stood after each round;
                               choice -1: none. An item that ended earlier stays as it was. */
    uint8_t *solo;                /* [n_agents][n_items] right in the first round */
    uint8_t *voted;               /* [rounds][n_items] the vote after each round was right */
    uint8_t *decided;             /* [n_items] what the workflow decided was right */
    int64_t prefilled, generated, truncated, failed, calls;
    int64_t flips_good,
        flips_bad; /* answers that became right, became wrong, after hearing others */
};
int debate_run(const struct llm_client *a, const struct agent *team, int n_agents,
               const struct task_item *items, int n_items, const struct debate_options *o,
               struct debate *out, struct progress *p, struct error *err);
void debate_release(struct debate *d);
/* Whether an answer to an item, as in `answers`, is right. */
bool debate_answer_is_correct(const struct debate *d, const struct task_item *items, int item,
                              int choice);
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
struct debate_calibration debate_calibration(const struct debate *d, const struct task_item *items,
                                             int agent);

/* k sampled workings of one agent per item, the j-th of what member j of a team sees: answers
 * [n_items][k] (choice -1: none), and what the j-th samples cost in tokens, [k] each, added to. */
struct self_consistency {
    int n_items, k;
    struct agent_answer
        *answers;   /* [n_items][k]; of free answers, equal ones are the same choice */
    uint8_t *right; /* [n_items][k] whether choice j of a free answer is right */
    int64_t *prefilled, *generated;
};
int self_consistency_sample(const struct llm_client *a, const struct agent *agent,
                            const struct task_item *items, int n_items, int k, float temperature,
                            int32_t max_tokens, uint64_t seed, const struct grader *grader,
                            struct self_consistency *out, struct progress *p, struct error *err);
/* The majority of the first k of them (self-consistency, Wang et al. 2023). right: [n_items]. */
void self_consistency_vote(const struct self_consistency *s, const struct task_item *items, int k,
                           uint8_t *right);
void self_consistency_release(struct self_consistency *s);

/* credit: what each agent is worth to the team */

/*
 * A game of n agents: right[mask][item] says whether the coalition of agents in `mask` was right.
 * Coalition 0, nobody, never is. Values are means over items, paired, each with its interval.
 */
struct contribution {
    struct stats_interval leave_one_out; /* v(N) - v(N \ i) */
    struct stats_interval
        shapley; /* Σ_S |S|!(n-|S|-1)!/n! (v(S ∪ i) - v(S)); they add up to v(N) */
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
int contribution_sampled(const struct coalition_game *g, int samples, uint64_t seed,
                         struct contribution *out, struct error *err);
/* All coalitions: right [2^n][n_items], at most GAME_MAX_EXACT_AGENTS. */
int coalition_game_play_all(const struct coalition_game *g, uint8_t *right, struct error *err);

/* The game of the vote on answers that are there: needs no call. */
struct vote_game {
    const struct vote *vote;
    const struct agent_answer *answers; /* [n_agents][n_items] */
    const struct task_item *items;
    int n_agents, n_items;
    const struct transcript
        *talks; /* [n_items] of items without choices: what was answered; or NULL */
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
                               const struct task_item *items, int n_items,
                               const struct debate_options *o, const struct debate *full,
                               struct stats_interval *value, struct progress *p, struct error *err);
/* The same for the vote on first answers that are already there: answers[n_agents][n_items]. Needs
 * no further call. */
void contribution_leave_one_out_vote(const struct vote *v, const struct agent_answer *answers,
                                     int n_agents, const struct task_item *items, int n_items,
                                     struct stats_interval *value);
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
void behaviour_novelty(behaviour_distance_fn apart, const void *ctx, int n_agents, int team,
                       int n_items, struct stats_interval *value, double *distance);

/*
 * workflow: a debate, a panel with a judge, an answer pipeline: a small declared graph, and the one
 * engine that runs it for many items at once.
 *
 * A workflow is a YAML file (built-in ones are the files of protocols/). Its nodes are what agents
 * are asked, in messages that are Jinja templates over what has been said; its edges say where an
 * item goes next, under conditions in the same language. Votes and judgements close it.
 *
 * The engine knows no model: a step takes, of every item that is still under way, all calls that
 * wait for nothing, and hands them to an `asker` in one batch. An agent that fails abstains. It
 * always ends: every item's calls and tokens are bounded by its budget. A bound of seconds is the
 * one thing that makes a result depend on the machine, and only where somebody asks for it.
 *
 *   name: two-rounds
 *   about: What --help says of it.
 *   rounds: 2                      what --rounds stands at
 *   roles: [pro, con, judge]       agent i has role i mod 3; none: every agent is a debater
 *   words: {en: {go: …}, ja: {…}}  `words.go` is the item's language's, else English
 *   budget: {calls: 64, tokens: 65536}   of an item; a step shares what is left, or is not begun;
 *                                  `seconds` of the whole run, after which nobody begins
 *   nodes:
 *     first:
 *       by: all | ROLE …           who speaks (all); one word or a list
 *       order: together | in-turn  whether one hears the others of the same step (together)
 *       messages:                  empty ones are left out
 *         - system: "{{ me.system }}"
 *         - user: "{{ question }}"
 *       reply: text | answer | judge | seed  (text)
 *       same_round: true           the step before is of the same round (false)
 *       tail: 3000                 characters kept of what others and oneself said; 0: all
 *       temperature, top_p, max_tokens
 *   edges:                         the first that holds is taken; none: the item is done
 *     - {from: first, to: first, when: round < rounds and not agreed}
 *   decide: {vote: majority, over: last | all}   or {judge: NODE}, or {text: NODE}: its words
 *
 * Templates see: question, choices, lang, words, round (from 1), rounds, agents (how many), agreed,
 * me {name, role, system, number}, own {text, answer} or none, others [{number, text, answer}] in
 * an order drawn per item and without names, transcript [{name, role, number, round, node, text,
 * answer}], candidates (the answers given so far), given (what the caller has to say).
 */

struct grader; /* grade/grade.h */
struct workflow;
/* A built-in by its name, else a file. */
struct workflow *workflow_open(const char *name, struct error *err);
struct workflow *workflow_parse(const char *text, size_t len, const char *path, struct error *err);
void workflow_free(struct workflow *w);
const char *workflow_name(const struct workflow *w);
const char *workflow_about(const struct workflow *w);
int workflow_rounds(const struct workflow *w);
const struct vote *workflow_vote(const struct workflow *w);
const char *workflow_role(const struct workflow *w, int agent); /* "" without roles */
int workflow_n_roles(const struct workflow *w);
/* Built-in i's name and text; NULL at the end. */
const char *workflow_builtin(int i, const char **text);

/* running */

struct utterance {
    int node, agent, round; /* round from 0 */
    char *text;
    int answer;       /* of the talk's candidates; -1: none */
    float confidence; /* probability of the answer: among choices; of free text that of the tokens
                         that say it, given what stands before them; 1 where the asker gives none */
    float prob[EVAL_MAX_CHOICES]; /* of an item's choices, in candidates' order */
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
struct transcript { /* of an item */
    struct utterance *v;
    int n;
    char **candidates; /* the item's choices, or the answers in the order they were first given */
    int n_candidates;
    int answer; /* of the candidates; -1: nobody gave one */
    int final;  /* the utterance that is the result, of a workflow that ends in words; -1: none */
    double *scores; /* [n_candidates] of the vote */
    uint8_t *right; /* [n_candidates] whether each is right, where the item knows */
    int rounds;     /* that were spoken */
    enum workflow_stop_reason ending;
};
struct workflow_options {
    int rounds; /* at most; 0: the workflow's own */
    bool working;
    float temperature;       /* below 0: the nodes' own */
    int32_t max_tokens;      /* 0: the nodes' own */
    const struct vote *vote; /* NULL: the workflow's own */
    /* Of items without choices: finds the answer in what was said and tells which are one. NULL:
     * what follows "answer:", compared but for case and white space. */
    const struct grader *grader;
    const json_t *given;   /* an object for templates; may be NULL */
    double seconds;        /* 0: the workflow's own */
    double (*clock)(void); /* that counts them; NULL: clock_now */
    uint64_t seed;
    /* After a step of an item: what was said from utterance `from` on is new, and answer, scores
     * and right are as if it ended here. May be NULL. */
    void (*heard)(void *ctx, const struct transcript *talk, int item, int from);
    void *heard_ctx;
};
/* talks [n_items] are zeroed by the caller and released with transcript_release, also after an
 * error. Errors are the asker's, or a template's that names node and line. */
int workflow_run(const struct workflow *w, const struct llm_client *asker, const struct agent *team,
                 int n_agents, const struct task_item *items, int n_items,
                 const struct workflow_options *o, struct transcript *talks, struct progress *p,
                 struct error *err);
struct agent_answer utterance_answer(const struct utterance *u);
void transcript_release(struct transcript *o);

/*
 * blackboard: what a team's agents read and write — values under keys, and slots of texts that are
 * found by likeness.
 *
 * Every change is an event, appended to a log (in the store, when there is one) and never changed;
 * the board is a function of its events. Opening a log again, up to any event, gives the board as
 * it was then. Writers in other processes are seen by blackboard_refresh, and no event of theirs is
 * lost. Time comes from the caller's clock, so that a run with a scripted one is reproducible.
 *
 * One thread uses a board. What it returns as `const json_t *` is borrowed until the board changes;
 * any other json_t is the caller's to release.
 */

/* The keys of the answer pipeline. */
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
    BOARD_MAX_KEYS = 1024,    /* beyond: the lowest priority goes first, then the oldest */
    BOARD_MAX_SLOTS = 256,    /* a slot too many is refused */
    BOARD_SLOT_ENTRIES = 100, /* beyond: the oldest goes */
    BOARD_MAX_EVENTS = 4096,  /* held in memory; older ones are read from the store, if any */
    BOARD_MAX_VALUE = 1 << 20 /* bytes of one event as JSON */
};

struct blackboard;
struct blackboard_options {
    struct store *store;        /* NULL: in memory only */
    const char *name;           /* of the log in the store */
    double (*clock)(void *ctx); /* seconds; NULL: time stands at the last event's. A clock that
                                   goes back is taken to stand */
    void *clock_ctx;
    const char *const *persistent; /* keys and slots that clear_current_turn keeps, ended by NULL;
                                      NULL: conversation_context */
    int64_t until;                 /* replay up to this event and take no more; 0: all of them */
};
struct blackboard *blackboard_open(const struct blackboard_options *o, struct error *err);
void blackboard_close(struct blackboard *b);
int64_t blackboard_last_seq(const struct blackboard *b); /* the number of the last event; 0: none */
/* Takes in what other processes have written since. */
int blackboard_refresh(struct blackboard *b, struct error *err);

/* How long and how firmly a value stands. */
struct blackboard_write_options {
    double ttl;   /* seconds until it is no more; 0: for good */
    int priority; /* order of read_all, and who goes when the board is full */
};
/* {timestamp, key, value}, or NULL: ERR_USAGE for a key that is empty or too long and a value that
 * is too large or nested too deep. `w` may be NULL. */
json_t *blackboard_write(struct blackboard *b, const char *key, const json_t *value,
                         const struct blackboard_write_options *w, struct error *err);
/* Every member of the object, all or none. */
int blackboard_write_multiple(struct blackboard *b, const json_t *values,
                              const struct blackboard_write_options *w, struct error *err);
const json_t *blackboard_read(const struct blackboard *b, const char *key); /* NULL: nothing */
/* Objects of key and value; keys without a value are left out. read_all: highest priority first,
 * then the oldest. */
json_t *blackboard_read_multiple(const struct blackboard *b, const char *const *keys, int n);
json_t *blackboard_read_all(const struct blackboard *b);
/* Forgets keys and slots but the persistent ones. The history stays. */
int blackboard_clear_current_turn(struct blackboard *b, struct error *err);

/*
 * Events as they came: an array of {seq, timestamp, op, …}, op being "write" (key, value, ttl,
 * priority), "slot" (slot, text, embedding, metadata) or "clear" (keep). `key` picks the writes to
 * one key; NULL: all.
 *
 * Watching is the same with a cursor: what came after event n, at most `limit` of them; the next
 * cursor is the last one's seq.
 */
json_t *blackboard_history(const struct blackboard *b, const char *key, struct error *err);
json_t *blackboard_watch(const struct blackboard *b, int64_t after, int limit, struct error *err);
/* For people: {events, time, entries: {key: {value, timestamp, …}}, slots: {name: entries}}, where
 * vectors are "<Vector shape=(n,)>" and long texts are cut. */
json_t *blackboard_debug_view(const struct blackboard *b);

/* slots */

struct blackboard_slot_entry {
    const char *slot, *text;
    const float *embedding; /* [d], or NULL: not found by likeness */
    int32_t d;
    const json_t *metadata; /* may be NULL */
};
/* {entry_id, slot, text, metadata, timestamp}, entry_id being 8 hex digits; NULL sets err. */
json_t *blackboard_slot_add(struct blackboard *b, const struct blackboard_slot_entry *e,
                            struct error *err);
/* An array of a slot's entries, oldest first; of every slot with NULL. */
json_t *blackboard_slot_list(const struct blackboard *b, const char *slot);
#define BOARD_SIMILARITY 0.7
/* Entries (with "similarity") whose cosine with v[d] is at least the threshold, the most alike
 * first, the older of equals first. `slot` NULL: of every slot. */
json_t *blackboard_find_similar(const struct blackboard *b, const char *slot, const float *v,
                                int32_t d, double threshold, int max);
/* Appends the last n entries of a slot (NULL: of each) as lines "[slot] text". */
void blackboard_slot_context(const struct blackboard *b, const char *slot, int n, struct buf *out);

/*
 * roles: who the agents of a team are, by what is asked.
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
 * The first type, in the order above, with a keyword in the question. Latin keywords are whole
 * words, and Chinese questions have keywords of their own. `compat`: the predecessor's keywords
 * only, anywhere in the lower-cased text ("this" says "hi").
 */
enum question_type question_classify(const char *question, bool compat);

struct agent_role {
    const char *name;        /* "批判的思考AI" */
    const char *description; /* for a system prompt: one or two sentences */
    float temperature;
};
int agent_role_count(enum question_type t);
/* Agent i plays role i mod n. */
struct agent_role agent_role_get(enum question_type t, enum language l, int agent);

/*
 * team: who answers together, and how — one struct, filled from a file or from a command's flags.
 *
 *   name: careful                  what tables call it; without one, what the file is called
 *   about: What it is for.
 *   protocol: brief                a built-in workflow, or a file from where this one is (brief)
 *   rounds: 2                      at most; without it the protocol's own, and so for vote,
 *                                  temperature and max_tokens
 *   working: false                 think before one of given choices is named (true)
 *   agents:                        1 to TEAM_MAX of them; roles go by their order
 *     - name: doubter              draws go by it; without one it is the adapter's
 *       adapter: adapters/critic   a PEFT directory or GGUF file from where this one is, hf:…, or
 *                                  base (base). A list is a mix: [adapters/a=0.7, adapters/b=0.3]
 *       system: You doubt.         its persona
 *       role: judge                of the protocol's, instead of its place's
 *       temperature: 0.3           instead of the protocol's
 *
 * Reading a team opens its protocol and sees that its adapters are there; team_load_adapters loads
 * them. Nothing is written after that: any thread.
 */

struct team {
    char *name, *about;
    /* `workflow` is the team's own; rounds and vote are what they stand at; seed and grader are
     * the caller's to set, as is anything that its flags say instead. */
    struct debate_options options;
    struct agent v[TEAM_MAX];
    int n;
    struct strings adapters; /* all that its agents stand on, "base" too: what a plan counts */

    /* the team's */
    struct workflow *workflow;
    struct strings texts;
    struct weighted_adapter *terms; /* [adapters.n] */
    int first[TEAM_MAX + 1];        /* agent i stands on adapters first[i] … first[i + 1] - 1 */
};
/* Released with team_release also after an error. */
int team_read(struct team *t, const char *path, struct error *err);
int team_parse(struct team *t, const char *text, size_t len, const char *path, struct error *err);
/* From flags: an adapter (or "base") an agent, and system prompts for the first of them. */
int team_from_flags(struct team *t, const char *protocol, const struct strings *agents,
                    const struct strings *personas, struct error *err);
void team_release(struct team *t);

/* Loads what agents stand on: `open` returns an adapter that lives as long as the team, or NULL. */
typedef struct adapter *team_adapter_open_fn(void *ctx, const char *path, struct error *err);
int team_load_adapters(struct team *t, team_adapter_open_fn *open, void *ctx, struct error *err);

/* team_solver.c: a team on the questions of a bank. */

/* Options for a bank: of generated answers its grader, and its tokens where none are said. */
int debate_options_for_bank(const struct eval_task *b, const struct debate_options *o,
                            struct debate_options *out, struct error *err);
/* What a call of a debate on these banks may be long: on families a little, else what the model
 * reads, at most 4096. */
int32_t team_max_tokens(const struct eval_task *banks, int n, int32_t max_seq_len);
/* As a contestant: an outcome's `prob` is the share of agents that hold the answer in the end. */
struct team_solver {
    const struct team *team; /* loaded */
    const struct llm_client *asker;
    uint64_t seed;
};
int team_solver_answer(void *player, const struct eval_task *b, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done, struct error *err);

/*
 * report: a debate over a set of questions and everything it is measured against, as one JSON
 * object; the same as a table for a terminal and as part of a page.
 *
 * {name, n, protocol, rounds, detectable, rows: [{name, kind, acc, lo, hi, calls, prefilled,
 * generated}], comparisons: [{a, b, diff, lo, hi, p, p_holm}], by_round: [{round, voted, agreed,
 * flips_good, flips_bad, open, changed, conformed}], credit: {game, method, agents: [{name,
 * shapley, banzhaf, leave_one_out}], sampling_error: [{samples, shapley, banzhaf}]}, calibration:
 * [{name, ece, ece_fitted, temperature}], cost, endings, talks}; an interval is [value, low, high].
 * Kinds: solo, vote (after the first round), debate (what was decided), oracle, whole (where
 * evidence is split: an agent that sees all of it), samples.
 */

struct debate_report_options {
    const char *name;
    int samples; /* of the best agent's self-consistency, at most; 0: none */
    float temperature;
    int32_t max_tokens;              /* of a sample */
    bool credit_debate, credit_none; /* else the game of the first vote */
    int shown;                       /* talks that are kept */
};
/* Runs the debate and what it is compared with; NULL on failure. */
json_t *debate_report_make(const struct llm_client *a, const struct agent *team, int n_agents,
                           const struct task_item *items, int n_items,
                           const struct debate_options *o, const struct debate_report_options *w,
                           struct progress *p, struct error *err);
void debate_report_print(const json_t *r, FILE *f);
void debate_report_html(const json_t *r, struct buf *page);

/* An utterance of a talk: {name, round, text, answer, confidence, truncated, failed}; and how the
 * vote stands: {answer: score}. */
json_t *utterance_json(const struct transcript *o, const struct agent *team, int i);
json_t *transcript_scores_json(const struct transcript *o);
/* What was said about an item: {question, said: [utterances], answer, ending, scores}; and as a
 * conversation on a page. */
json_t *debate_transcript_json(const struct debate *d, const struct agent *team,
                               const struct task_item *it, int item);
void debate_transcript_html(const json_t *talk, struct buf *page);

/*
 * pipeline: how a team answers one question — recall, references, a gist of what is long, agents
 * with roles that think in one batch, summaries, the answer, and what is remembered of it.
 *
 * The graph of who speaks when is a workflow (protocols/panel.yaml, or one with roles of its own);
 * everything around it is here. Each stage may have an asker of its own, which is how several bases
 * work together: what is asked in one step goes to each asker in one batch. Nothing here knows a
 * model. Everything in the options is borrowed; a call uses them and owns nothing between calls.
 */

/* Who sums up, who answers, and all the others. */
enum pipeline_stage { PIPELINE_INTERNAL, PIPELINE_SUMMARY, PIPELINE_OUTPUT, PIPELINE_N_STAGES };
extern const char
    *const pipeline_stage_names[PIPELINE_N_STAGES];           /* "internal", "summary", "output" */
enum pipeline_stage pipeline_stage_of_role(const char *role); /* by the workflow's role */

struct pipeline_stage_options {
    struct llm_client asker;
    float temperature;  /* 0: the role's, else the workflow's own */
    int32_t max_tokens; /* 0: the workflow's own */
};
/* How key facts are found in what the user says: by rules (memory.h), and by the model that sums
 * up, whose reply is held to a grammar and of which only what was said is kept. */
enum fact_source { FACTS_NONE, FACTS_RULES, FACTS_MODEL };

enum { QUESTION_TYPE_BY_MODEL = -2 };
struct pipeline_options {
    const struct workflow *workflow;
    struct pipeline_stage_options stage[PIPELINE_N_STAGES];
    struct blackboard *board;
    struct conversation *memory;     /* NULL: nothing is remembered */
    struct knowledge *knowledge;     /* NULL: none */
    const struct embedder *embedder; /* finds references by meaning too, and puts what is said into
                                        slots with its vector; NULL: by words, without */
    struct adapter *const *adapters; /* [agents], each may be NULL */
    int agents, iterations;
    int type; /* enum question_type; -1: by the question's words; QUESTION_TYPE_BY_MODEL: who sums
                 up says */
    int language; /* enum language; -1: the question's */
    bool summary; /* after each iteration, and of what is long */
    bool compat;  /* the predecessor's keywords, and its ten characters that an answer must have */
    float temperature;  /* of everybody; below 0: each one's own */
    int32_t max_tokens; /* of every turn; 0: each one's own */
    double seconds;     /* after which nobody begins to speak; 0: no limit */
    enum fact_source facts;
    uint64_t seed;
    /* Before `n` agents are asked at once; may be NULL. Iterations count from 1. */
    void (*progress)(void *ctx, const char *role, int iteration, int n);
    void *progress_ctx;
    /* What was just written on the board, {timestamp, key, value}. `c`: the call whose words it
     * is, with what was asked, the agent's so many-th; NULL: it is nobody's. May be NULL. */
    void (*wrote)(void *ctx, const json_t *entry, const struct llm_call *c, int iteration);
    void *wrote_ctx;
};

/* Whose words an answer is: the one who answers; where nothing usable came from there, a member;
 * the memory's own; an apology. */
enum answer_source { ANSWER_FROM_OUTPUT, ANSWER_FROM_AGENT, ANSWER_FROM_MEMORY, ANSWER_FALLBACK };
extern const char *const answer_source_names[]; /* "output", "member", "memory", "nobody" */
struct pipeline_answer {
    char *text; /* cleaned */
    enum answer_source source;
    const char *why;        /* of a member's or an apology: what failed, or NULL */
    struct transcript talk; /* all that was said, as it was said; empty where the memory answered */
    char *names[TEAM_MAX];
};
/*
 * Who fails abstains: an answer always comes. Errors are the outside world's (a question that is
 * not UTF-8, a store that cannot be written, an asker that breaks) and a team that is too large.
 * `out` is released also after an error.
 */
int pipeline_run(const struct pipeline_options *o, const char *question,
                 struct pipeline_answer *out, struct error *err);
void pipeline_answer_release(struct pipeline_answer *a);
/* Keeps an exchange, with the summary and the key facts that come of it, in o->memory. */
int pipeline_update_memory(const struct pipeline_options *o, const char *question,
                           const char *answer, struct error *err);

#endif
