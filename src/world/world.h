/*
 * world: a grid environment in which many agents look for food and carry it home, and everything
 * that uses it: rules, observations, traces, a server for other programs, and simulations in which
 * models act, learn and evolve.
 *
 * The environment itself does no input or output. A `struct world` is plain data without pointers,
 * so a copy is a snapshot. It changes only through world_reset and world_step, and is a function of
 * its rules, its seed and the actions. Each stream of random values is determined by the seed, a
 * purpose, and a tick or an index (grid.c), so its values do not depend on other streams. Each
 * world is used by one thread at a time.
 *
 * A cell's index is y * size + x; north is y + 1. The border is wall, and every cell that is not a
 * wall is free. Agents do not block each other. In a tick they act in the order of their index, and
 * predators act after them.
 *
 * There are two built-in rule sets. `legacy` reproduces an earlier program in every string and
 * number (docs/COMPATIBILITY.md); `repaired` changes the rules that made survival impossible. Other
 * rules are YAML files with the same keys (docs/WORLD.md).
 */
#ifndef SHOAL_WORLD_H
#define SHOAL_WORLD_H

#include "backprop/backprop.h"
#include "base/base.h"
#include "engine/engine.h"
#include "eval/eval.h"
#include "evolve/evolve.h"
#include "world/environment.h"

enum {
    WORLD_SIDE_MIN = 4,
    WORLD_SIDE_MAX = 64,
    WORLD_CELLS_MAX = WORLD_SIDE_MAX * WORLD_SIDE_MAX,
    WORLD_AGENTS_MAX = 64,
    WORLD_HOMES_MAX = 8,
    WORLD_PREDATORS_MAX = 16,
    WORLD_WORDS = 16,          /* words that an agent can say, including silence, which is word 0 */
    WORLD_REMEMBERED_MAX = 10, /* number of cells with food that an agent remembers */
    WORLD_DEFAULT_AGENTS = 20,
    WORLD_DEFAULT_STEPS = 500, /* ticks of an episode */
};

/* rules */

/* Filled from world_rule_rows: keys of a YAML file and flags of the command line. */
struct world_rules {
    char *rules;         /* legacy or repaired: the rule set with the defaults of the other keys */
    int64_t size;        /* cells per side, border included */
    int64_t walls;       /* attempts to place an inner wall; -1: as many as size */
    int64_t food;        /* attempts to place food each time that it grows */
    int64_t food_every;  /* ticks between two growths; at tick 0 food grows twice */
    int64_t energy;      /* energy at birth, and the maximum */
    int64_t food_energy; /* energy that an agent gains when it delivers food; legacy: 0 */
    bool observe_cell;   /* observations include the agent's own cell */
    bool compact_observations; /* observations are letters instead of words */
    bool reachable; /* every free cell has a path to a home; a given map is not changed */
    int64_t homes;  /* the first home is in the middle, the others are at random cells */
    /* The number of predators; the distance (|dx| + |dy|) at which a predator sees agents; the
     * energy that a bite takes. */
    int64_t predators, predator_vision, predator_damage;
    int64_t material, material_every; /* the same as food and food_every, for building material */
    /* Number of words that agents can say, besides silence; the distance in steps at which words
     * are heard. */
    int64_t vocabulary, hearing_range;
    /* A drawn map, rows from north to south: '#' wall, 'H' home, 'F' food, 'M' material, 'A' start
     * of an agent, '.' free. It replaces size, walls and homes. Worlds are square: a map that is
     * not square is completed with walls in the north or in the east. */
    struct strings map;
    struct world_rewards {
        /* move: of each move to another cell. The others are added to it: new_cell on a cell that
         * the agent has not visited, food on a cell with food, home at home while the agent carries
         * something. */
        double move, new_cell, food, home;
        double blocked; /* reward of a move into a wall, instead of the four above */
        /* Picking something up; bringing food home; bringing material home; picking up or dropping
         * without an effect. */
        double pick, drop, built, no_effect;
        double bitten; /* added for each bite of a predator */
    } rewards;
};
extern const struct option_row world_rule_rows[];
/* A rule set: its name and the YAML of its differences from the default values of the rows. */
struct world_rule_set {
    const char *name, *about, *yaml;
};
extern const struct world_rule_set world_rule_sets[]; /* ends with a row without name */
/* Loads a rule set by name, or a YAML file by path. An error in a file names the line, and the key
 * if it concerns one. Release the rules also after an error. */
int world_rules_load(struct world_rules *r, const char *name, struct error *err);
/* Loads rules from the text of a YAML file; `path` names the file in errors. */
int world_rules_parse(struct world_rules *r, const char *path, const char *text, size_t len,
                      struct error *err);
extern const char *const world_map_keys[]; /* rules that a map determines; NULL-terminated */
/* Checks rules that involve several rows of world_rule_rows. The functions that load rules call it;
 * call it again after flags have changed a rule. */
int world_rules_check(const struct world_rules *r, struct error *err);
/* ERR_USAGE if flags have changed the rule set `set`: only files and names of worlds choose it. */
int world_rules_check_set(const struct world_rules *r, const char *set, struct error *err);
/* Whether the rule set is `legacy`. */
bool world_rules_are_legacy(const struct world_rules *r);
void world_rules_release(struct world_rules *r);

/* state */

enum world_action {
    MOVE_NORTH,
    MOVE_SOUTH,
    MOVE_EAST,
    MOVE_WEST,
    PICK_FOOD,
    DROP_FOOD,
    WORLD_N_ACTIONS
};
extern const char *const world_action_names[WORLD_N_ACTIONS]; /* "move_north" … */
/* "north" …: the words that models generate. */
extern const char *const world_action_words[WORLD_N_ACTIONS];
/* If agents can say words, the number of an action is enum world_action + WORLD_N_ACTIONS · word.
 * The letters that models generate for the words: none of them begins a word of an action. */
extern const char *const world_word_letters[WORLD_WORDS];

enum { CELL_WALL = 1, CELL_HOME = 2, CELL_FOOD = 4, CELL_MATERIAL = 8 };
enum { HOLDS_NOTHING, HOLDS_FOOD, HOLDS_MATERIAL };

struct world_agent {
    int16_t cell, energy;
    uint8_t alive, holds, word;
    uint8_t n_remembered;
    /* Cells on which the agent has seen food from an adjacent cell, until it picks the food up. The
     * oldest is first and is replaced when the list is full; unused entries are 0. */
    int16_t remembered[WORLD_REMEMBERED_MAX];
    int16_t last_actions[2]; /* the last two actions, the latest one second; -1: no action yet */
    int32_t steps, collected, delivered, built, blocked, bites;
    double reward, episode_reward;          /* reward of the last step; sum over the episode */
    uint64_t visited[WORLD_CELLS_MAX / 64]; /* bit set of the cells that the agent has visited */
};
struct world {
    uint64_t seed;
    int32_t size, tick, n_agents, n_living, n_homes, n_predators;
    uint8_t cells[WORLD_CELLS_MAX];
    int16_t homes[WORLD_HOMES_MAX], predators[WORLD_PREDATORS_MAX];
    /* Numbers of items: grown = on cells + carried by living agents + eaten or built + lost with
     * dead agents. */
    int64_t food_grown, food_eaten, food_lost;
    int64_t material_grown, material_built, material_lost;
    int64_t energy_given, energy_spent; /* the sum of all agents' energy is given - spent */
    struct world_agent agents[WORLD_AGENTS_MAX];
};

/* Sets the world to tick 0 with n agents and all statistics at zero. The world does not keep
 * `r`. */
void world_reset(struct world *w, const struct world_rules *r, int n_agents, uint64_t seed);
/* Simulates one tick. actions: [n_agents]; those of dead agents are ignored. Sets every agent's
 * reward; it is 0 for agents that were dead before the tick. */
void world_step(struct world *w, const struct world_rules *r, const int16_t *actions);
bool world_terminated(const struct world *w); /* no agent is alive */
/* episode_reward + 5 collected + 10 delivered + 0.1 steps + 50 delivered / (steps + 1), at least 0.
 */
double world_agent_fitness(const struct world_agent *a);
/* SHA-256 of the whole state. */
void world_hash(const struct world *w, char out[HASH_LEN]);

/* The neighbour of an inner cell in the direction of a move. */
static inline int world_neighbour(const struct world *w, int cell, int move) {
    const int step[4] = {w->size, -w->size, 1, -1};
    return cell + step[move];
}
/* Whether an agent has visited a cell. */
static inline bool world_agent_visited(const struct world_agent *a, int cell) {
    return a->visited[cell / 64] >> (cell % 64) & 1;
}
static inline bool world_has_predator(const struct world *w, int cell) {
    for (int p = 0; p < w->n_predators; p++)
        if (w->predators[p] == cell) return true;
    return false;
}

/* observations and actions as text: observe.c */

/*
 * Appends the observation of an agent to `out`, for example "At (5,3), E80, has food. See: home↑
 * wall←". With the rule compact_observations it is like "u x f o h - s e +": the cells north,
 * south, east and west (z predator, x wall, f food, m material, h home, o visited, u unvisited);
 * the agent's own cell (always o without the rule observe_cell); its load (- for none); the
 * direction of its goal along y and along x (- for neither); energy, + if at least half is left.
 * With the rule vocabulary, the numbers of the words that the agent heard follow.
 */
void world_observe(const struct world *w, const struct world_rules *r, int agent, struct buf *out);
/* Appends a prompt: the last two actions and the observation, "[move_north,pick_food] At (5,3), … .
 * Action:", or the compact form "u x f o h - s e + n p:". */
void world_prompt(const struct world *w, const struct world_rules *r, int agent, struct buf *out);
/* Whether an agent hears the word that another agent said in the last tick. */
bool world_hears(const struct world *w, const struct world_rules *r, int listener, int speaker);
/* The cell of the goal to which compact observations point, or -1. The goal of an agent with a load
 * is the nearest home that it knows (the first home, or a visited one); the goal of an agent
 * without a load is the nearest food that it remembers on an unvisited cell. */
int world_goal(const struct world *w, int agent);
/* The action that a generated text names, or -1. The words are searched for in a fixed order
 * anywhere in the text: under the legacy rules north or up first, so that "pick up" moves north;
 * `repaired` searches for verbs before directions. */
int world_action_from_text(const char *text, bool repaired);
/* Calls world_action_from_text with the order that the rules select. */
int world_action_parse(const struct world_rules *r, const char *text);
/* An agent's letter on maps, or '@' after Z. */
static inline char world_agent_letter(int agent) {
    return agent < 26 ? (char)('A' + agent) : '@';
}
/* The state as a text map, north first. A cell shows the first of: a living agent (letters, then
 * '@'), a predator '*', '#', home '+', food 'f', material 'm', '.'. */
void world_render(const struct world *w, struct buf *out);

/* policies without a model: scripted_policy.c */

struct world_policy {
    const char *name, *about;
    /* Returns an action without a word; r is the random source of (agent, tick). */
    int (*act)(const struct world *w, const struct world_rules *rules, int agent, struct rng *r);
};
/* The random source of a policy for one agent in one tick. Its ids begin with 64; grid.c uses
 * smaller ids. */
static inline struct rng world_policy_rng(uint64_t seed, int agent, int tick) {
    return rng_make(seed, RNG_WORLD, 64 + (uint32_t)agent, (uint32_t)tick);
}
/* rule, reflex, random, mock; ends with a row without name. */
extern const struct world_policy world_policies[];
const struct world_policy *world_policy_find(const char *name);
/* Sets the actions of all living agents: [n_agents]. */
void world_policy_act(const struct world_policy *p, const struct world *w,
                      const struct world_rules *rules, uint64_t seed, int16_t *actions);

/*
 * trace: the actions of one episode of a world, in memory and as a file.
 *
 * A world is a function of its rules, its seed and the actions, so a trace stores these three, and
 * every tick can be recomputed from them. The file is JSON lines:
 *
 *   {"shoal_world":1,"rules":{…},"agents":20,"seed":7,"steps":500,"policy":"rule"}
 *   {"tick":1,"actions":[0,5,-1,…]}                 one action per agent, -1: it is dead
 *   {"tick":100,"actions":[…],"hash":"…"}           world_hash after every hundredth tick
 *   {"end":500,"hash":"…"}                          written by trace_close
 *
 * A trace that was forked from another trace at a tick begins with the ticks of that trace up to
 * there, and its header has "fork": TICK. Each line is flushed at the end of its tick, so a crash
 * loses at most the line in progress. Reading a trace simulates the world: an impossible action or
 * a wrong hash is an error that names the line or the tick. A file without the last line ("end") is
 * read up to its last complete line.
 */

enum { TRACE_TICKS = 1000000, TRACE_HASH_INTERVAL = 100 /* ticks between hashes */ };

struct trace {
    struct world_rules rules; /* a copy, owned by the trace */
    int n_agents;
    uint64_t seed;
    int64_t steps;    /* planned ticks */
    char *policy;     /* name of the acting policy */
    int64_t fork;     /* tick at which it was forked from another trace; -1: not a fork */
    int16_t *actions; /* [n_ticks][n_agents], -1 for dead agents */
    int64_t n_ticks, cap;
    bool closed; /* the line "end" was read */
};

/* The rules as a JSON object {key: value}; world_rules_parse accepts its text as YAML. */
json_t *world_rules_json(const struct world_rules *r);
/* Reads rules from the result of world_rules_json; `name` names it in errors. */
int world_rules_from_json(struct world_rules *r, const char *name, const json_t *v,
                          struct error *err);

/* trace_init, trace_load, trace_parse and trace_from_json fill a trace; the caller releases it even
 * after an error. */
int trace_init(struct trace *t, const struct world_rules *r, int n_agents, uint64_t seed,
               int64_t steps, const char *policy, struct error *err);
void trace_release(struct trace *t);
/* Appends the actions of the next tick; `w` is the world before that tick. Actions of dead agents
 * are ignored and stored as -1. ERR_MEMORY: the trace has TRACE_TICKS ticks already. */
int trace_append(struct trace *t, const struct world *w, const int16_t *actions, struct error *err);
/* Sets `w` to the world after `tick` ticks, 0 to n_ticks. If `w` is at an earlier tick, only the
 * ticks in between are simulated. `w` must belong to this trace or be zero-initialised. */
void trace_seek(const struct trace *t, struct world *w, int64_t tick);
/* Removes the ticks after `tick`. */
void trace_truncate(struct trace *t, int64_t tick);

int trace_load(struct trace *t, const char *path, struct error *err);
/* Reads a trace from the text of a file; `name` names the file in errors. */
int trace_parse(struct trace *t, const char *name, const char *text, size_t len, struct error *err);

/* Creates a file and writes the header and the existing ticks. The caller then writes later ticks
 * with trace_write_tick, and calls trace_close. NULL on an error. */
FILE *trace_create(const struct trace *t, const char *path, struct error *err);
/* Writes the trace's last tick; `w` is the world after it. */
int trace_write_tick(const struct trace *t, const struct world *w, FILE *f, struct error *err);
/* Writes the last line and closes the file, even after an error. */
int trace_close(const struct world *w, FILE *f, struct error *err);

/* The trace as one JSON object: the members of the header, "actions" (a list per tick), and "hash"
 * of the last tick. */
json_t *trace_json(const struct trace *t, const struct world *w);
/* The inverse of trace_json; checks everything. */
int trace_from_json(struct trace *t, const json_t *v, struct error *err);

/*
 * world_server: worlds for other programs, one JSON object per line, in the style of PettingZoo's
 * Parallel API (docs/WORLD.md documents the protocol).
 *
 * There are two directions. A struct world_server is the environment for another program: it
 * answers each request line with one line, and does no input or output itself. A struct subprocess
 * runs another program as the policy: the program receives observations and answers with actions.
 * Each is used by one thread at a time.
 */

enum {
    WORLD_SERVER_MAX_LINE = 64 << 20, /* maximal bytes of a received line */
    WORLD_SERVER_MAX_WORLDS = 1024,   /* worlds per server */
};

/* Bounds of the JSON in one line; a valid request never exceeds them. */
#define WORLD_SERVER_JSON_BOUNDS ((struct json_limits){.depth = 100, .cost = (size_t)1 << 30})

/* Reads lines of arbitrary bytes from a file descriptor. The caller sets fd and limit, and all
 * other fields to zero. */
struct line_reader {
    int fd;
    size_t limit; /* maximal bytes of a line */
    struct buf b;
    size_t begin; /* offset in `b` of the bytes that were not returned yet */
    bool skip;    /* discard the rest of a line that was too long */
};
/* Returns 1 and the line without its newline, valid until the next call; 0 at the end; ERR_MEMORY
 * for a line above the limit, which is skipped; ERR_STATE when the line is incomplete
 * after `timeout` seconds (0: wait for ever). A last line may lack its newline. */
int line_reader_next(struct line_reader *r, double timeout, const char **line, size_t *len,
                     struct error *err);
void line_reader_release(struct line_reader *r);

/* The environment for another program. `r` is copied; n_agents and steps are the defaults of worlds
 * whose reset request omits them. */
struct world_server;
struct world_server *world_server_new(const struct world_rules *r, int n_agents, int64_t steps,
                                      struct error *err);
void world_server_free(struct world_server *s);
/* Answers one request line: always appends exactly one line with its newline to `out`. Returns
 * false after a close request. */
bool world_server_handle(struct world_server *s, const char *line, size_t len, struct buf *out);

/* Another program that acts as the policy. */
struct subprocess;
/* Runs `command` in the shell. `timeout` is the maximal wait for each answer, in seconds. */
struct subprocess *subprocess_open(const char *command, double timeout, struct error *err);
/* Sends the observations of the living agents to the program and reads their actions: [n_agents].
 * After an error the subprocess is unusable. */
int subprocess_act(struct subprocess *o, const struct world *w, const struct world_rules *r,
                   int16_t *actions, struct error *err);
/* Closes the program's input and waits for the program's exit, at most for the timeout (0.1 seconds
 * after a failed exchange); then kills its process group. */
void subprocess_close(struct subprocess *o);

/*
 * simulation: agents that are models, in many environments at once.
 *
 * A policy is an adapter over the shared base model, with its replay buffer and critic. Agents are
 * numbered over all environments: agent a uses policy a % n_policies, so several agents may share a
 * policy. In each tick all active agents decide in one batch: their actions are sampled, the
 * environments step, and the experience is stored. Every few ticks all policies are updated in one
 * pass of the model. A generation is one episode in every environment; after it the fittest
 * policies are crossed, and their children and the elites form the next generation.
 *
 * Three parts, each usable without the next: policy_runner (decisions), learner (replay buffers and
 * updates), simulation (generations). Each is used by one thread at a time. Results are a function
 * of model, options and seed. They do not depend on the number of threads or on interruptions.
 */

/* environments */

struct episode_stats {
    double fitness, reward, delivered, collected, blocked, steps, alive;
};
/* A `struct world` with the interface of environment.h. */
struct grid_env {
    struct world w;
    const struct world_rules *rules; /* borrowed, like `teacher` */
    const struct world_policy *teacher;
    int n_agents;
    bool is_silent; /* agents say no words even if the rules have a vocabulary */
    int map_size;   /* cells per side of the next map; 0: as in the rules */
};
struct environment grid_env_as_environment(struct grid_env *p);
struct episode_stats world_episode_stats(const struct world *w); /* the mean over its agents */

/* decisions */

struct policy_runner_options {
    double temperature; /* divides the actions' log-probabilities before the softmax */
    bool text; /* generate up to ten tokens and parse them, instead of scoring the actions */
    enum dtype lora_elem; /* element type of packed adapters */
    /* Engine sizes; 0: defaults for twenty agents. max_len grows with the prompts, up to the
     * model's length. */
    int32_t max_rows, max_seqs, max_len;
    bool fixed_len;           /* longer prompts are refused instead */
    int32_t n_pages;          /* pages of the KV cache; 0: enough for max_seqs long prompts */
    enum dtype kv_elem;       /* element type of the KV cache */
    int32_t cached_decisions; /* capacity of the decision cache, which changes no result; 0: none */
    struct pool *pool;
};
struct policy_decision {
    struct adapter *adapter;        /* NULL: the base model */
    struct rng rng;                 /* random source for sampling */
    size_t text_offset, text_len;   /* position of its prompt in the argument `text` */
    struct weighted_adapter mix[2]; /* [n_mix] used instead of `adapter` if n_mix > 0 */
    int n_mix;
    bool says_word; /* the choice is a word of the environment, not an action */
    /* results */
    /* [n] token ids of the prompt, valid until the next call. The tokens with which all choices
     * begin follow them. */
    const int32_t *tokens;
    int32_t n;
    /* [n_actions], or [n_words] if says_word; normalised over these choices; 0 with `text` */
    double logp[ENV_MAX_ACTIONS];
    int action; /* or word */
};
struct policy_runner;
/* ERR_MISMATCH: the model has no tokenizer, or it gives two actions or words the same tokens
 * (allowed with the option `text`). Model, environment and pool are borrowed. */
struct policy_runner *policy_runner_new(const struct model *m, const struct environment *e,
                                        const struct policy_runner_options *o, struct error *err);
void policy_runner_free(struct policy_runner *a);
/* Makes n decisions in as few forward passes of the base model as the engine can. `text` holds all
 * prompts. ERR_USAGE: one is longer than the engine's context. */
int policy_runner_act(struct policy_runner *a, struct policy_decision *decisions, int n,
                      const struct buf *text, struct error *err);
/* Only tokenizes the prompts, for example for the critic. */
void policy_runner_tokenize(struct policy_runner *a, struct policy_decision *decisions, int n,
                            const struct buf *text);
/* The element type of packed adapters. */
enum dtype policy_runner_lora_elem(const struct policy_runner *a);
/* Frees the engines; the next decision creates them again. */
void policy_runner_sleep(struct policy_runner *a);
/* [n_actions + n_words] the tokens that follow a prompt for each action, then for each word to say:
 * those of a space, its name and a line break, up to the first one that distinguishes it from the
 * other actions, or words. */
const struct token_seq *policy_runner_choices(const struct policy_runner *a);
/* The number of tokens with which all actions, or all words, begin. */
int32_t policy_runner_common_tokens(const struct policy_runner *a, bool words);
/* [n_actions + n_words] the last token of each choice, if only this one is not common; NULL: some
 * choices differ in several tokens. */
const int32_t *policy_runner_choice_tokens(const struct policy_runner *a);

/* learning */

struct learner_options {     /* filled from option rows; a value before ':' is the default */
    char *learn;             /* gradient, clone, es or none */
    int64_t update_interval; /* 1: ticks between updates */
    int64_t batch_size;      /* 32: experiences per policy in an update */
    int64_t buffer_size;     /* 1000: capacity of a policy's replay buffer */
    int64_t horizon;         /* 8: ticks after which a return is final */
    double discount;         /* 0.95 */
    double gae_lambda;       /* 0.5: lambda of generalised advantage estimation */
    double replay_fraction;  /* 0.25: share of a batch sampled from the whole replay buffer */
    double shared_experience_fraction; /* 1: share of a batch sampled from all policies' buffers */
    double entropy_coef;               /* 0.1: weight of the entropy bonus */
    double clip_range;        /* 0.2: clips the ratio of new to old probability, as in PPO */
    double critic_lr;         /* 0.1: learning rate of the critic */
    double exploration_bonus; /* 0: β of the reward β / √n for meeting a prompt the n-th time */
    int64_t warmup_steps;     /* 20: updates until the full learning rate */
    int64_t update_group_size;  /* policies per update, groups take turns; 0: all */
    int64_t perturbation_ticks; /* 50: ticks for which es keeps one perturbation */
    double sigma;               /* 0.1: scale of a perturbation of es */
    char *shaping;              /* zscore: fitness shaping of es, see backprop.h */
    struct train_options train; /* LoRA and optimizer, from rows of the same names */
};
extern const struct option_row learner_option_rows[];
int learner_options_check(const struct learner_options *o, struct error *err);

/* Statistics of a policy over an interval of ticks. */
struct policy_health {
    int64_t decisions;
    double entropy;        /* nats, mean */
    double most_repeated;  /* share of the most frequent action */
    double reward, spread; /* mean and standard deviation of the reward per step */
    bool collapsed; /* it repeats one action, its entropy is near 0, or its reward is constant */
    int rollbacks;  /* rollbacks in this generation */
};
struct learner;
/* Everything is borrowed except the adapters, which are retained. critics: [n_policies] or NULL;
 * each is a result of learner_critic, or NULL. */
struct learner_config {
    const struct model *m;
    const struct policy_runner *policy_runner;
    double temperature;
    int n_actions, n_words, n_policies, n_agents; /* n_words 0: agents cannot speak */
    struct adapter *const *adapters;
    const float *const *critics;
    uint64_t seed;
    int64_t steps;      /* ticks of a generation, over which the learning rate falls; 0: constant */
    int32_t max_len;    /* tokens of a prompt and its reply; 0: POLICY_MAX_LEN */
    bool low_memory;    /* adapters are f16, before and after updates */
    enum dtype kv_elem; /* keys and values in training are rounded to it */
    struct pool *pool;
};
struct learner *learner_new(const struct learner_options *o, const struct learner_config *config,
                            struct error *err);
void learner_free(struct learner *l);
/* If the policies learn by es, perturbs the adapter with which agent `agent` decides at `tick`
 * (from 0); otherwise does nothing. */
void learner_perturb(struct learner *l, int generation, int tick, int agent,
                     struct policy_decision *a);
/* Record an agent's decision, and then its reward. teacher: the expert's action, or -1; terminated:
 * the agent has left the environment. */
void learner_observe_action(struct learner *l, int agent, const struct policy_decision *a,
                            int teacher);
/* Between the two: the word that the agent says in this tick. The decision gets the same return as
 * the action. */
void learner_observe_word(struct learner *l, int agent, const struct policy_decision *word);
void learner_observe_reward(struct learner *l, int agent, double reward, bool terminated);
/* Ends the episode of an agent, which gets no further rewards. `next` is the decision that it would
 * make now, whose value bootstraps the returns (NULL: the agent has left). */
void learner_finish_episode(struct learner *l, int agent, const struct policy_decision *next);
/* Call this after tick `tick` (from 1) of `generation`. It updates the policies whose turn
 * it is. */
int learner_tick(struct learner *l, int generation, int tick, struct error *err);
struct adapter *learner_adapter(const struct learner *l, int policy); /* current; borrowed */
/* A malloc'ed copy of a policy's critic, of learner_critic_bytes. With an exploration bonus the
 * numbers of visits follow its weights. */
float *learner_critic(const struct learner *l, int policy);
size_t learner_critic_bytes(const struct learner_options *o);
int64_t learner_updates(const struct learner *l); /* sum over all policies */
struct policy_health learner_health(const struct learner *l, int policy);

/* generations */

struct simulation_options {      /* filled from option rows; a value before ':' is the default */
    int64_t n_adapters;          /* 1: number of policies; 0: one per agent of an environment */
    int64_t n_envs;              /* 1: number of environments */
    int64_t generations;         /* 10 */
    int64_t steps, seed;         /* ticks per generation, random seed; set by the caller */
    struct engine_limits limits; /* set by the caller; no result depends on them */
    double temperature;          /* 4: temperature of the policies */
    char *decode;                /* score or text */
    char *teacher;               /* reflex: the scripted policy that clone imitates */
    bool breed;                  /* true */
    int64_t elites;              /* 1: policies that are copied unchanged */
    double parent_fraction;      /* 0.5: share of the fittest policies that have children */
    char *crossover;             /* delta: operator on two parents */
    char *mutation;              /* noise: operator on one child */
    double mutation_rate;        /* 0.1: share of the children that mutate */
    double init_noise;           /* 0.02: standard deviation of the noise in B of new adapters */
    bool carry_elite_stats;      /* elites sum their statistics over generations */
    int64_t curriculum;          /* 8: cells per side of the first maps of training; 0: full size */
    int64_t eval_maps;           /* 2: number of held-out maps */
    bool low_memory;             /* use little memory */
    char *lora_dtype;            /* f32: element type of the adapters for decisions */
    /* auto: element type of keys and values, for decisions and in training. NULL, only for the runs
     * of version 0.1: training has f32; decisions have f32, in the fast class bf16, with low_memory
     * f16. */
    char *kv_cache_dtype;
    struct learner_options learn;
};
extern const struct option_row simulation_option_rows[];
int simulation_options_check(const struct simulation_options *o, struct error *err);

/* Seeds of maps. Those for training depend on (seed, generation, world), those of held-out maps
 * only on their index. */
uint64_t simulation_seed(uint64_t seed, int generation, int world);
uint64_t simulation_held_out_seed(int map);

struct simulation;
/* Options, model, environments and pool are borrowed. `first`: [n_first] initial adapters, assigned
 * to the policies in turn; n_first 0: new adapters. */
struct simulation *simulation_new(const struct model *m, const struct simulation_options *o,
                                  struct environment *const *envs, struct adapter *const *first,
                                  int n_first, struct pool *pool, struct error *err);
void simulation_free(struct simulation *s);
/* An upper bound of the least memory of a simulation besides the model, before the model exists. */
int simulation_least_bytes(const struct model_config *c, enum numeric_class cls,
                           const struct simulation_options *o, int agents, struct pool *pool,
                           size_t *out, struct error *err);
/*
 * A generation: simulation_begin_generation breeds it from the previous one, if there is one and if
 * breeding is on, and resets the environments with `seeds` [n_envs], or with generated ones (NULL).
 * The caller then calls simulation_step, which simulates one tick, until it returns 0; otherwise it
 * returns the number of decisions of the tick, or an error (negative). simulation_end_generation
 * records the outcomes and the learned adapters.
 */
int simulation_begin_generation(struct simulation *s, const uint64_t *seeds, struct error *err);
int simulation_step(struct simulation *s, struct error *err);
void simulation_end_generation(struct simulation *s);
/* Declares that the environments are already at `tick`, so that sampling continues from there. Call
 * this after simulation_begin_generation. */
void simulation_set_tick(struct simulation *s, int tick);
/* [agents of all environments] the actions of the last tick; -1: the agent was inactive. */
const int16_t *simulation_actions(const struct simulation *s);
/* The decision of an agent in the last tick; NULL: it was inactive. */
const struct policy_decision *simulation_decision(const struct simulation *s, int agent);
/* Evaluates all current policies on the held-out maps. out: [eval_maps], the mean of each map over
 * its agents. */
int simulation_evaluate(struct simulation *s, struct episode_stats *out, struct error *err);
int simulation_generations(const struct simulation *s); /* number of completed generations */
/* The number of decisions, without those of evaluations. */
int64_t simulation_decisions(const struct simulation *s);
/* The number of updates of all policies in this generation. */
int64_t simulation_updates(const struct simulation *s);
/* Cells per side of the maps of this generation, or between two generations of the next one; 0:
 * full size. With `curriculum` the first maps are small, and they grow after each generation in
 * which the agents have delivered enough. */
int simulation_map_size(const struct simulation *s);
int simulation_n_policies(const struct simulation *s);
struct policy_record {
    char name[32], parents[2][32];
    struct adapter *adapter;
    float *critic;                /* its critic's weights, or NULL */
    struct episode_stats outcome; /* its last generation: the mean over its agents */
    struct policy_health health;
    bool elite;
};
/* Save and restore the state between two generations. `extra` is an object of the caller that is
 * saved with it. simulation_read_state returns the contents of state.json, {…, generation, minds:
 * [policy_record_json], extra}, or NULL with ERR_MISSING if the folder has no state.
 * simulation_load restores them into a new simulation with the same options. */
int simulation_save(const struct simulation *s, const char *dir, const json_t *extra,
                    struct error *err);
json_t *simulation_read_state(const char *dir, struct error *err);
/* The path of a policy's PEFT directory in the folder `dir`, malloc'ed; NULL if `hash`, the
 * policy's content hash, is not a valid hash. */
char *simulation_policy_path(const char *dir, const char *hash, struct error *err);
int simulation_load(struct simulation *s, const char *dir, const json_t *state, struct error *err);
json_t *policy_record_json(const struct policy_record *m);
/* The record of a policy after the last generation, by fitness, the best at rank 0; before the
 * first generation, the initial one. While a simulation with low_memory runs, the record has the
 * current adapter. */
const struct policy_record *simulation_policy(const struct simulation *s, int rank);

/*
 * external_env: environments that another program provides, with the interface of environment.h.
 *
 * This is the client side of the world_server protocol: Shoal sends requests and the program
 * answers, with one line of JSON each, in the style of PettingZoo's Parallel API (docs/WORLD.md,
 * "Training in your own environment"). One program runs all worlds; requests to several worlds
 * share one line. Used by one thread at a time.
 */

enum {
    ENV_MAX_AGENTS = 1024,       /* maximal agents per world */
    ENV_NAME_MAX_BYTES = 64,     /* bytes of an agent's or an action's name */
    ENV_PROMPT_MAX_BYTES = 4096, /* bytes of a prompt */
};

/* Sends a line, with its newline, and returns the answer, valid until the next call. */
typedef int (*external_envs_exchange_fn)(void *ctx, const struct buf *line, const char **answer,
                                         size_t *len, struct error *err);

struct external_envs;
/* Creates n_worlds environments over an exchange function; `ctx` is borrowed. Requests the spaces
 * (names of agents and actions) immediately. If `has_expert`, the program must report a teacher's
 * action for every active agent. */
struct external_envs *external_envs_new(external_envs_exchange_fn exchange, void *ctx, int n_worlds,
                                        bool has_expert, struct error *err);
/* Creates n_worlds environments over a program, which the shell runs; `timeout` is the maximal wait
 * for each answer, in seconds. */
struct external_envs *external_envs_open(const char *command, double timeout, int n_worlds,
                                         bool has_expert, struct error *err);
void external_envs_free(struct external_envs *c);                             /* ends the program */
struct environment *const *external_envs_list(const struct external_envs *c); /* [n_worlds] */
int64_t external_envs_max_steps(const struct external_envs *c);               /* 0: unspecified */
/* {command, agents, actions, said}: identifies the environment of a run. */
json_t *external_envs_json(const struct external_envs *c);

/*
 * run: a simulation whose state and results are kept in a folder. Each generation is evaluated on
 * held-out maps, on which no agent trains, and compared with scripted policies on the same maps.
 *
 *     RUN/state.json, minds/, critics-G.bin    see simulation_state.c; `extra` holds the curve
 *     RUN/trace-G.jsonl                        the first world of generation G; the actions only,
 *                                              if the environment is another program
 *     RUN/curve.jsonl, report.html             the curve: as JSON lines, and as a page with charts
 *     RUN/lineage.jsonl                        the policies of all generations, for `shoal lineage`
 *
 * The id of a run is "world-" and a hash of everything that determines the run except the number of
 * generations. So the same request resumes an interrupted run, and a request with more generations
 * continues a finished one.
 */

struct simulation_run_options { /* filled from option rows */
    struct simulation_options simulation;
    char *runs, *out;        /* folder of all runs; folder of this run (NULL: RUNS/NAME) */
    struct strings adapters; /* initial adapters of the policies */
    bool dry_run; /* ignored here; a caller that sets it calls simulation_run_plan instead */
};
extern const struct option_row
    simulation_run_option_rows[]; /* without the options of `simulation` */

struct simulation_request { /* all fields are borrowed */
    const struct simulation_run_options *o;
    const struct world_rules *rules;
    const struct external_envs *external; /* NULL: the grid environment */
    int agents;
    struct model *m;
    struct pool *pool;
    size_t used; /* memory of program and model at most, for simulation_run_plan; 0: not known */
};
struct simulation_run_callbacks {
    /* May be NULL. `o`: the options of the run, see simulation_run; `manifest`: see manifest_json.
     * Both are borrowed during the call. */
    void (*begin)(void *ctx, const char *id, const struct simulation_options *o,
                  const json_t *manifest);
    /* Called with {policy, held_out} for each baseline policy, then with {generation, decisions,
     * held_out, lived} for each generation. In a resumed run the earlier generations come first. */
    void (*row)(void *ctx, const json_t *row);
    void *ctx;
};
/* ERR_STATE: cancelled (log_check_cancelled). The same call continues an interrupted run. If the
 * folder has a run, options that the request leaves at their defaults take the values of that run,
 * because earlier versions had other defaults. */
int simulation_run(const struct simulation_request *q, const struct simulation_run_callbacks *cb,
                   struct error *err);
/* Describes a run without starting it: {run, writes, continues, …}. `memory` receives a bound of
 * its peak: smaller engines and passes keep it under a limit. */
json_t *simulation_run_plan(const struct simulation_request *q, struct train_memory *memory,
                            struct error *err);
/* The name of the main metric in a row's `held_out`: "delivered", or "reward" for an external
 * environment. */
const char *simulation_main_metric(const struct simulation_request *q);
/* Writes a policy of a run as a PEFT directory and returns its record (see policy_record_json).
 * run: a folder or an id; name NULL: the best policy. */
json_t *simulation_export_policy(const char *runs, const char *run, const char *name,
                                 const char *out, struct error *err);

/* model_policy: a model that acts in one world at a time, for callers that step the world
 * themselves. */
struct model_policy;
struct model_policy *model_policy_new(const struct simulation_request *q, bool learns,
                                      struct error *err);
void model_policy_free(struct model_policy *p);
/* The manifest of the results of a policy in a grid world; see manifest_json. p NULL: a policy
 * without a model. */
json_t *model_policy_manifest(const struct model_policy *p, const struct world_rules *r,
                              int64_t seed);
/* Computes the actions of the living agents in `w`, which may be the state after the last actions,
 * another tick, or another world. The rules must stay valid until a call with another world. */
int model_policy_act(struct model_policy *p, const struct world *w, const struct world_rules *r,
                     uint64_t seed, int16_t *actions, struct error *err);
/* Appends the probabilities of the actions in the last decision of an agent. */
void model_policy_describe(const struct model_policy *p, int agent, struct buf *out);

/*
 * compare: statistics of groups of runs over seeds. A group NAME consists of the runs in folders
 * NAME-KEY (both-s1, both-s2, …). Groups are compared with the first one, at the end of their runs
 * or after an equal number of decisions, on the keys that both have.
 */

struct simulation_group {
    const char *name;
    int n_runs;
    double decisions;                /* number of decisions of the first run by key */
    struct stats_interval delivered; /* at the end of the runs or after `at_decisions` */
    /* The median over runs of the decisions until a run delivers 80 % of what the policy `rule`
     * delivers; INFINITY: never. */
    double decisions_to_80_percent;
    int pairs; /* number of keys that the first group has too; 0: this is the first group */
    struct stats_interval difference; /* first group minus this one, over pairs; if pairs > 1 */
    double p;
};
struct simulation_comparison {
    double at_decisions; /* where the runs are compared; 0: at their ends */
    double rule, random; /* deliveries of these policies on the same maps; NAN: unknown */
    bool trained;        /* any run has trained, not only evaluated */
    const struct simulation_group *groups; /* [n] */
    int n;
};
/* Reads the curves of the n groups in the folder `runs`. The names are borrowed. A run that ends
 * before at_decisions > 0 is an error. A run's deliveries there are interpolated linearly between
 * the generations before and after. */
struct simulation_comparison *simulation_compare(const char *runs, char *const *names, int n,
                                                 double at_decisions, struct error *err);
/* Writes the curves of all groups as SVG. */
int simulation_comparison_plot(const struct simulation_comparison *c, const char *path,
                               struct error *err);
void simulation_comparison_free(struct simulation_comparison *c); /* may be NULL */

#endif
