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

enum world_action { MOVE_NORTH, MOVE_SOUTH, MOVE_EAST, MOVE_WEST, PICK_FOOD, DROP_FOOD, WORLD_N_ACTIONS };
extern const char *const world_action_names[WORLD_N_ACTIONS]; /* "move_north" … */
extern const char *const world_action_words[WORLD_N_ACTIONS];  /* "north" …: what a model says */
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

#endif
