/*
 * world: a grid where agents look for food and carry it home, many of them at once.
 *
 * Everything here is pure. A `struct world` is plain data without pointers, so a copy is a
 * snapshot; it changes through world_reset and world_step only and is a function of its rules, seed
 * and the actions taken. What is random is drawn from (seed, RNG_WORLD, purpose, tick): nothing
 * depends on who was asked first. Text is made only when somebody reads it. One thread at a time
 * for each world.
 *
 * A cell is y * size + x; north is y + 1. The border is wall. Agents do not block each other; they
 * act in the order of their index, predators after them. A cell is free when it is no wall.
 *
 * The rules `seed` are those of the predecessor (helloworld_llm), to the string and to the number;
 * `repaired` mends what made them impossible to live by. Other worlds are YAML files of the same
 * keys (docs/WORLD.md).
 */
#ifndef SHOAL_WORLD_H
#define SHOAL_WORLD_H

#include "base/base.h"
#include "engine/engine.h"
#include "evolve/evolve.h"
#include "train/train.h"
#include "world/environment.h"

enum {
    WORLD_SIDE = 64,
    WORLD_CELLS = WORLD_SIDE * WORLD_SIDE,
    WORLD_AGENTS = 64,
    WORLD_HOMES = 8,
    WORLD_PREDATORS = 16,
    WORLD_WORDS = 16, /* silence is word 0 */
    WORLD_KNOWN = 10, /* places of food that an agent remembers */
};

/* rules */

struct world_rules {    /* filled from option rows: recipe keys and, in the CLI, flags */
    char *rules;        /* seed or repaired: what the other keys' defaults are */
    int64_t size;       /* of a side, border included */
    int64_t walls;      /* attempts at an inner wall; -1: as many as size */
    int64_t food;       /* attempts a time */
    int64_t food_every; /* ticks between them; at tick 0 it comes twice, as there */
    int64_t energy;     /* at birth, and at most */
    int64_t meal;       /* energy that food gives who brings it home; 0: none, as there */
    bool here;          /* observations say what is on the own cell */
    bool brief;         /* and say it in letters */
    bool reachable;     /* a home can be reached from every free cell; a map stays as it is drawn */
    int64_t homes;      /* the first in the middle, further ones anywhere */
    int64_t predators, sight, bite; /* how many; how far they see (|dx| + |dy|); energy they take */
    int64_t material, material_every; /* attempts a time at building material; built at home */
    int64_t words, hearing; /* a channel to talk: words beside silence; how far they are heard */
    struct strings map;     /* drawn: rows from north to south; '#' wall, 'H' home, 'F' food, 'M'
                               material, 'A' where agents begin, '.' free; replaces size, walls, homes.
                               An oblong one has more walls in the north or east: worlds are square */
    struct world_rewards {
        double move, fresh, food, home;  /* a step; new ground; food there; home, while carrying */
        double blocked;                  /* in the place of those */
        double pick, drop, built, wrong; /* wrong: nothing to pick up, or not at home */
        double bitten;
    } rewards;
};
extern const struct option_row world_rule_rows[];
/* A row a rule set: its name and the YAML of what differs from the rows' own defaults. */
struct world_rule_set {
    const char *name, *about, *yaml;
};
extern const struct world_rule_set world_rule_sets[]; /* a row without name ends it */
/* By a rule set's name or a YAML file's path. ERR_USAGE and ERR_FORMAT name key and line. Release
 * the rules whatever is returned. */
int world_rules_load(struct world_rules *r, const char *name, struct error *err);
/* The same of a file's text; `path` names it in errors. */
int world_rules_parse(struct world_rules *r, const char *path, const char *text, size_t len,
                      struct error *err);
extern const char *const world_map_keys[]; /* rules that a map says itself; NULL ends them */
/* What no single row can refuse. Loading does it; do it again when flags have changed a rule. */
int world_rules_check(const struct world_rules *r, struct error *err);
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
extern const char *const world_action_words[WORLD_N_ACTIONS]; /* "north" …: what a model says */
/* With a channel to talk, an action is action + WORLD_N_ACTIONS · word. */

enum { CELL_WALL = 1, CELL_HOME = 2, CELL_FOOD = 4, CELL_MATERIAL = 8 };
enum { HOLDS_NOTHING, HOLDS_FOOD, HOLDS_MATERIAL };

struct world_agent {
    int16_t cell, energy;
    uint8_t alive, holds, word;
    uint8_t n_known;            /* oldest first; the oldest goes when there are too many */
    int16_t known[WORLD_KNOWN]; /* cells with food it was beside and has not picked up; then 0s */
    int16_t last[2];            /* the last two actions, the later one second; -1: none */
    int32_t steps, collected, delivered, built, blocked, bites;
    double reward, total;            /* of the last step, of its life */
    uint64_t seen[WORLD_CELLS / 64]; /* bits of the cells it has stood on */
};
struct world {
    uint64_t seed;
    int32_t size, tick, n_agents, n_living, n_homes, n_predators;
    uint8_t cells[WORLD_CELLS];
    int16_t homes[WORLD_HOMES], predators[WORLD_PREDATORS];
    int64_t food_grown, food_eaten, food_lost; /* grown = on cells + held by the living + eaten +
                                                  lost with the dead */
    int64_t material_grown, material_built, material_lost;
    int64_t energy_given, energy_spent; /* energy now = given - spent, over all agents */
    struct world_agent agents[WORLD_AGENTS];
};

/* Tick 0 with n agents, all statistics at zero. The rules are read, not kept. */
void world_reset(struct world *w, const struct world_rules *r, int n_agents, uint64_t seed);
/* actions: [n_agents]; those of the dead are not looked at. Fills every agent's reward (0 of the
 * dead). */
void world_step(struct world *w, const struct world_rules *r, const int16_t *actions);
bool world_terminated(const struct world *w); /* nobody lives */
/* reward + 5 collected + 10 delivered + 0.1 steps + 50 delivered / (steps + 1), at least 0. */
double world_agent_fitness(const struct world_agent *a);
/* SHA-256 of all state. */
void world_hash(const struct world *w, char out[HASH_LEN]);

/* The neighbour of an inner cell in the direction of a move. */
static inline int world_neighbour(const struct world *w, int cell, int move) {
    const int step[4] = {w->size, -w->size, 1, -1};
    return cell + step[move];
}
/* Whether an agent has stood on a cell. */
static inline bool world_agent_visited(const struct world_agent *a, int cell) {
    return a->seen[cell / 64] >> (cell % 64) & 1;
}
static inline bool world_has_predator(const struct world *w, int cell) {
    for (int p = 0; p < w->n_predators; p++)
        if (w->predators[p] == cell) return true;
    return false;
}

/* words: observe.c */

/*
 * "At (5,3), E80, has food. See: home↑ wall←", added to `out`. Brief: "u x f o h - s e +": the
 * cells north, south, east and west (z wolf, x wall, f food, m material, h home, o stood on, u not
 * yet); what is here; what it holds; which way its goal is, along y and along x (- neither);
 * energy, + for half of it or more.
 */
void world_observe(const struct world *w, const struct world_rules *r, int agent, struct buf *out);
/* "[move_north,pick_food] At (5,3), … . Action:" Brief: "u x f o h - s e + n p:". */
void world_prompt(const struct world *w, const struct world_rules *r, int agent, struct buf *out);
/* The goal that brief observations point to: who carries something wants the nearest home that it
 * knows (the first, or stood on), else the nearest food that it remembers and has not stood on. A
 * cell, or -1. */
int world_goal(const struct world *w, int agent);
/* What a written answer means. The words are looked for in an order, anywhere in the text: north or
 * up first, as there, so that "pick up" goes north; `repaired` looks for verbs before directions.
 * -1: nothing. */
int world_action_from_text(const char *text, bool repaired);
/* The same as the rules want it. */
int world_action_parse(const struct world_rules *r, const char *text);
/* How people are shown an agent: a letter, or '@' beyond Z. */
static inline char world_agent_letter(int agent) {
    return agent < 26 ? (char)('A' + agent) : '@';
}
/* The state as text of a map, north first, for people. A cell shows the first of: a living agent
 * (letters, then '@'), a predator '*', '#', home '+', food 'f', material 'm', '.'. */
void world_render(const struct world *w, struct buf *out);

/* policies without a model: scripted_policy.c */

struct world_policy {
    const char *name, *about;
    /* An action (in silence); what is random comes from r, which is made for (agent, tick). */
    int (*act)(const struct world *w, const struct world_rules *rules, int agent, struct rng *r);
};
/* What a policy draws from in a tick; grid.c draws under smaller ids. */
static inline struct rng world_policy_rng(uint64_t seed, int agent, int tick) {
    return rng_make(seed, RNG_WORLD, 64 + (uint32_t)agent, (uint32_t)tick);
}
extern const struct world_policy world_policies[]; /* rule, reflex, random, mock */
const struct world_policy *world_policy_find(const char *name);
/* Actions of all the living: [n_agents]. */
void world_policy_act(const struct world_policy *p, const struct world *w,
                      const struct world_rules *rules, uint64_t seed, int16_t *actions);

/*
 * trace: the life of one world as what was done in it, in memory and as a file.
 *
 * A world is a function of its rules, its seed and the actions, so a trace is those three and every
 * tick of it can be entered. The file is JSON lines:
 *
 *   {"shoal_world":1,"rules":{…},"agents":20,"seed":7,"steps":500,"policy":"rule"}
 *   {"tick":1,"actions":[0,5,-1,…]}                 an action an agent, -1: it is dead
 *   {"tick":100,"actions":[…],"hash":"…"}           world_hash after every hundredth tick
 *   {"end":500,"hash":"…"}                          closed by who wrote it
 *
 * A trace that was forked off another one holds that one's ticks too and says "fork": TICK. Each
 * line is handed to the system when its tick is over, so a crash loses the line it was writing.
 * Reading plays the world along: what could not have been done, or does not give the hash, is an
 * error that names the line or the tick. A file without its end is given as far as it goes.
 */

enum { TRACE_TICKS = 1000000, TRACE_HASH_INTERVAL = 100 /* ticks from one hash to the next */ };

struct trace {
    struct world_rules rules; /* its own copy */
    int n_agents;
    uint64_t seed;
    int64_t steps;    /* planned */
    char *policy;     /* who acted */
    int64_t fork;     /* where it left the trace that it came from; -1: it is nobody's fork */
    int16_t *actions; /* [n_ticks][n_agents], -1 of the dead */
    int64_t n_ticks, cap;
    bool closed; /* its end was read */
};

/* The rules as one mapping of their keys, which world_rules_parse reads as it reads YAML. */
json_t *world_rules_json(const struct world_rules *r);
/* Rules from such a mapping; `what` names it in errors. */
int world_rules_from_json(struct world_rules *r, const char *what, const json_t *v,
                          struct error *err);

/* Release a trace whatever the functions return that fill one. */
int trace_init(struct trace *t, const struct world_rules *r, int n_agents, uint64_t seed,
               int64_t steps, const char *policy, struct error *err);
void trace_release(struct trace *t);
/* Actions of the next tick. Those of the dead, which nobody looks at, become -1. */
int trace_append(struct trace *t, const struct world *w, const int16_t *actions, struct error *err);
/* Makes `w` the world at that tick, from 0 to n_ticks; a later one than w's own costs the ticks
 * between. `w` is of this trace, or zero-initialised. */
void trace_seek(const struct trace *t, struct world *w, int64_t tick);
/* Forgets what came after that tick. */
void trace_truncate(struct trace *t, int64_t tick);

int trace_load(struct trace *t, const char *path, struct error *err);
/* The same of a text; `what` names it. */
int trace_parse(struct trace *t, const char *what, const char *text, size_t len, struct error *err);

/* Header and the ticks that there are; later ones follow by trace_write_tick, then trace_close. */
FILE *trace_create(const struct trace *t, const char *path, struct error *err);
/* The trace's last tick, after which the world is `w`. */
int trace_write_tick(const struct trace *t, const struct world *w, FILE *f, struct error *err);
/* Writes the end and closes in every case. */
int trace_close(const struct world *w, FILE *f, struct error *err);

/* The whole as one JSON object, for handing it over: the header, "actions": a list a tick, "hash"
 * of the last one. */
json_t *trace_json(const struct trace *t, const struct world *w);
/* Strictly the same back. */
int trace_from_json(struct trace *t, const json_t *v, struct error *err);

/*
 * pipe: worlds for other programs, one JSON object a line, in the shape of PettingZoo's Parallel
 * API (docs/WORLD.md has every word of it).
 *
 * There are two directions. A world_server is the environment: a line is asked, a line is
 * answered, and it does no input or output itself. A struct subprocess is another program that
 * plays: it is started, told what the agents see, and answers with actions. One thread at a time
 * for each.
 */

enum {
    WORLD_SERVER_MAX_LINE = 64 << 20, /* bytes of a line from outside */
    WORLD_SERVER_MAX_WORLDS = 1024,   /* that a server holds at once */
};

/* What the values of a line may need; its numbers always fit. */
#define WORLD_SERVER_JSON_BOUNDS ((struct json_limits){.depth = 100, .cost = (size_t)1 << 30})

/* Lines from a file descriptor, of any bytes. Zero-initialise but for fd. */
struct line_reader {
    int fd;
    size_t limit; /* bytes of a line */
    struct buf b;
    size_t begin; /* of what was not yet given out */
    bool skip;    /* the rest of a line that was too long */
};
/* 1 and the line without its newline, good until the next call; 0 at the end; ERR_MEMORY for a line
 * above the limit, which is passed over; ERR_STATE when nothing came for `timeout` seconds (0: wait
 * for ever). What stands before the end without a newline is a line too. */
int line_reader_next(struct line_reader *r, double timeout, const char **line, size_t *len,
                     struct error *err);
void line_reader_release(struct line_reader *r);

/* The environment. `r` is copied; steps are those of a world that no reset says otherwise of. */
struct world_server;
struct world_server *world_server_new(const struct world_rules *r, int n_agents, int64_t steps,
                                      struct error *err);
void world_server_free(struct world_server *s);
/* Answers a line; adds one line with its newline to `out`, whatever the line was. False once it was
 * asked to close. */
bool world_server_handle(struct world_server *s, const char *line, size_t len, struct buf *out);

/* An action from outside: a number, one's name or free text as a model writes it, or {"action":
 * one of those, "word": N}. *parsed is false where text named no action: it is then the random move
 * of (seed, agent, tick). */
int world_action_read(const struct world *w, const struct world_rules *r, int agent,
                      const json_t *v, int16_t *action, bool *parsed, struct error *err);

/* Another program that plays. */
struct subprocess;
/* Runs `command` by the shell. It is waited for at most `timeout` seconds each time. */
struct subprocess *subprocess_open(const char *command, double timeout, struct error *err);
/* Tells it what the living see and takes what they do: [n_agents]. After an error it is of no use
 * any more. */
int subprocess_act(struct subprocess *o, const struct world *w, const struct world_rules *r,
                   int16_t *actions, struct error *err);
/* Closes its input and waits for it to end; kills it after the timeout. */
void subprocess_close(struct subprocess *o);

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
        max_len;        /* of the engine; 0: enough for twenty agents; of prompts */
    int32_t n_pages;    /* of its cache; 0: enough for all of them to be long */
    enum dtype kv_elem; /* that it is held as */
    struct pool *pool;
};
struct policy_decision {            /* one decision */
    struct adapter *adapter;        /* NULL: the bare base */
    struct rng rng;                 /* of the draw */
    size_t at, len;                 /* of its prompt in the text that is given */
    struct weighted_adapter mix[2]; /* [n_mix] instead of the adapter, where there are any */
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
int policy_runner_act(struct policy_runner *a, struct policy_decision *asks, int n,
                      const struct buf *text, struct error *err);
/* Tokens only, and no decision: what an observation is for who judges it. */
void policy_runner_tokenize(struct policy_runner *a, struct policy_decision *asks, int n,
                            const struct buf *text);
enum dtype policy_runner_lora_elem(const struct policy_runner *a); /* that adapters are packed as */
/* Lets go of the engine's memory, until the next decision. */
void policy_runner_sleep(struct policy_runner *a);
const int32_t *policy_runner_action_tokens(
    const struct policy_runner *a); /* [n_actions] the tokens that say them */

/* learning */

struct learner_options {        /* filled from option rows */
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

struct simulation_options { /* filled from option rows */
    int64_t minds;          /* 0: as many as an environment has agents */
    int64_t worlds;         /* 1: environments at once */
    int64_t generations;    /* 10 */
    int64_t steps, seed;    /* ticks of a life; these two are set by whoever makes it */
    double temperature;     /* 1 */
    char *decode;           /* score or text */
    char *teacher;          /* reflex: a policy, of clone */
    bool breed;             /* true */
    int64_t elites;         /* 4: minds that go on unchanged */
    double parents;         /* 0.5: share of the fittest whose children there are */
    char *crossover;        /* delta: operator of two */
    char *mutation;         /* noise: operator of one, on children */
    double mutate;          /* 0.1: share of the children that mutate */
    double spread;          /* 0.02: deviation of founders' B, so that they differ */
    bool carry;             /* elites keep the statistics of earlier lives, as there */
    int64_t held_out;       /* 4: maps that nobody lives on, for measuring */
    bool lean;              /* in as little memory as it takes */
    char *lora;             /* f32: what minds are asked as */
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
                                  struct environment *const *envs, struct adapter *const *first,
                                  int n_first, struct pool *pool, struct error *err);
void simulation_free(struct simulation *l);
/*
 * A generation: simulation_begin_generation breeds it from the last one, where there was one and
 * breeding is on, and begins the environments anew, with these seeds [worlds] or its own (NULL);
 * simulation_step until it returns 0; simulation_end_generation records who lived and what they
 * have learned. simulation_step returns how many decided.
 */
int simulation_begin_generation(struct simulation *l, const uint64_t *seeds, struct error *err);
int simulation_step(struct simulation *l, struct error *err);
void simulation_end_generation(struct simulation *l);
/* The environments are at that tick already: draws go on from there. After
 * simulation_begin_generation. */
void simulation_set_tick(struct simulation *l, int tick);
const int16_t *
simulation_actions(const struct simulation *l); /* [bodies] of the last tick; -1: it was gone */
/* What a body was asked in the last tick, and did; NULL: it was gone. */
const struct policy_decision *simulation_decision(const struct simulation *l, int body);
/* Everybody as they are now, on maps that nobody lives on. outcome: [held_out], a map's mean over
 * its agents. */
int simulation_evaluate(struct simulation *l, struct episode_stats *out, struct error *err);
int simulation_generations(const struct simulation *l);   /* lived so far */
int64_t simulation_decisions(const struct simulation *l); /* taken so far, without those measured */
int64_t
simulation_updates(const struct simulation *l); /* of all minds together, in this generation */
int simulation_n_policies(const struct simulation *l);
struct policy_record {
    char name[32], parents[2][32];
    struct adapter *adapter;
    float *critic;                /* what its baseline has learned, or NULL */
    struct episode_stats outcome; /* of its life: the mean over its bodies */
    struct policy_health health;
    bool elite;
};
/* Between two generations, to a folder and back; `extra` (an object) is the caller's. Loading wants
 * a life of the same options that has not lived yet, and what simulation_read_state gave: the
 * folder's {…, generation, minds: [policy_record_json], extra}, or NULL with ERR_MISSING where
 * there is none. */
int simulation_save(const struct simulation *l, const char *dir, const json_t *extra,
                    struct error *err);
json_t *simulation_read_state(const char *dir, struct error *err);
/* The PEFT directory of a mind there, malloc'ed; NULL where what names it is no hash. */
char *simulation_policy_path(const char *dir, const char *hash, struct error *err);
int simulation_load(struct simulation *l, const char *dir, const json_t *state, struct error *err);
json_t *episode_stats_json(const struct episode_stats *o);
json_t *policy_record_json(const struct policy_record *m);
/* As it was at the end of the last generation, by fitness, best first; before the first one, as it
 * begins. Of a lean life, while it lives, the adapter is the one of now. */
const struct policy_record *simulation_policy(const struct simulation *l, int rank);

/*
 * outside_env: environments that another program provides, as simulation.h wants them.
 *
 * The other side of a world_server (world_server.h): Shoal asks, the program answers, one line of
 * JSON each, in the shape of PettingZoo's Parallel API (docs/WORLD.md, "Training in your own
 * environment"). One program holds all worlds; what they are asked at once goes in one line. One
 * thread at a time.
 */

enum {
    ENV_AGENTS = 1024, /* of one world */
    ENV_NAME = 64,     /* bytes of an agent's or an action's name */
    ENV_PROMPT = 4096, /* bytes of a prompt */
};

/* Hands over a line, with its newline, and gives the answer, good until the next call. */
typedef int (*external_envs_exchange_fn)(void *ctx, const struct buf *line, const char **answer,
                                         size_t *len, struct error *err);

struct external_envs;
/* Asks for the spaces at once. With `taught` every agent that is asked must have a teacher. */
struct external_envs *external_envs_new(external_envs_exchange_fn exchange, void *ctx, int worlds,
                                        bool taught, struct error *err);
/* The same of a program that the shell runs; it may take `timeout` seconds for an answer. */
struct external_envs *external_envs_open(const char *command, double timeout, int worlds,
                                         bool taught, struct error *err);
void external_envs_free(struct external_envs *c);                             /* ends the program */
struct environment *const *external_envs_list(const struct external_envs *c); /* [worlds] */
int64_t external_envs_max_steps(const struct external_envs *c); /* 0: it does not say */
/* {command, agents, actions, said}: what a run is a run in. */
json_t *external_envs_json(const struct external_envs *c);

#endif
