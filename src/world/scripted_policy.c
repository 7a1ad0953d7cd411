/*
 * policy: ways to act without a model. They set the scale: what chance reaches, and what somebody
 * reaches who plans with no more than an agent can know.
 */
#include "world/world.h"

#include <string.h>

/* rule */

/* What an agent knows: the first home, and the walls and homes beside every cell it was on. */
struct belief {
    const struct world *w;
    const struct world_agent *a;
    bool hungry;              /* too much so to carry material */
    bool looked[WORLD_CELLS]; /* stood on, or beside such a cell */
};
/* What it may be after: home, what it can pick up, a place where it has not looked. */
enum goal { GOAL_HOME, GOAL_LOAD, GOAL_NEW };

static void belief_make(struct belief *k, const struct world *w, const struct world_rules *rules,
                        int agent) {
    *k = (struct belief){.w = w, .a = &w->agents[agent]};
    k->hungry = rules->meal > 0 && k->a->energy < rules->energy / 2;
    for (int cell = 0; cell < w->size * w->size; cell++) {
        if (!world_agent_visited(k->a, cell)) continue;
        k->looked[cell] = true;
        for (int move = 0; move < 4; move++) k->looked[world_neighbour(w, cell, move)] = true;
    }
}

static bool is_beside(const struct belief *k, int cell) {
    for (int move = 0; move < 4; move++)
        if (world_neighbour(k->w, k->a->cell, move) == cell) return true;
    return false;
}

/* Cells of which it knows nothing are free, it hopes; the border is where the world ends. */
static bool can_enter(const struct belief *k, int cell) {
    int x = cell % k->w->size, y = cell / k->w->size, last = k->w->size - 1;
    if (x == 0 || y == 0 || x == last || y == last) return false;
    if (k->looked[cell] && k->w->cells[cell] & CELL_WALL) return false;
    return !(is_beside(k, cell) && world_has_predator(k->w, cell));
}

static bool is_load(const struct belief *k, int cell) {
    return k->w->cells[cell] & CELL_FOOD || (k->w->cells[cell] & CELL_MATERIAL && !k->hungry);
}

/* A remembered place on which it has stood is spent: somebody else was there first. */
static bool is_remembered(const struct belief *k, int cell) {
    for (int i = 0; i < k->a->n_known; i++)
        if (k->a->known[i] == cell) return !world_agent_visited(k->a, cell);
    return false;
}

static bool is_goal(const struct belief *k, enum goal goal, int cell) {
    bool told = cell == k->w->homes[0];
    if (goal == GOAL_HOME) return (told || k->looked[cell]) && k->w->cells[cell] & CELL_HOME;
    if (goal == GOAL_NEW) return !k->looked[cell];
    return (is_beside(k, cell) && is_load(k, cell)) || is_remembered(k, cell);
}

/* The first move of a shortest way that may exist, or -1. */
static int bfs_first_move(const struct belief *k, enum goal goal, struct rng *r) {
    int16_t queue[WORLD_CELLS];
    int8_t first[WORLD_CELLS];
    int n = 1, turn = (int)rng_below(r, 4); /* so that agents at one place part */
    memset(first, -1, sizeof first);
    queue[0] = k->a->cell;
    first[k->a->cell] = 0;
    for (int at = 0; at < n; at++) {
        for (int i = 0; i < 4; i++) {
            int move = (turn + i) % 4, cell = world_neighbour(k->w, queue[at], move);
            if (first[cell] >= 0 || !can_enter(k, cell)) continue;
            first[cell] = at == 0 ? (int8_t)move : first[queue[at]];
            if (is_goal(k, goal, cell)) return first[cell];
            queue[n++] = (int16_t)cell;
        }
    }
    return -1;
}

/* Straight on, mostly; never back where there is another way. */
static int stroll(const struct belief *k, struct rng *r) {
    int last = k->a->last[1], back = last ^ 1, turn = (int)rng_below(r, 4);
    bool walked = last >= 0 && last < 4;
    if (walked && rng_below(r, 8) && can_enter(k, world_neighbour(k->w, k->a->cell, last)))
        return last;
    for (int i = 0; i < 4; i++) {
        int move = (turn + i) % 4;
        if (!(walked && move == back) && can_enter(k, world_neighbour(k->w, k->a->cell, move)))
            return move;
    }
    return walked ? back : turn;
}

/* Whether something to pick up is here; who is not told remembers it, unless it has just tried. */
static bool load_is_here(const struct belief *k, bool told) {
    const struct world_agent *a = k->a;
    if (told) return is_load(k, a->cell);
    for (int i = 0; i < a->n_known; i++)
        if (a->known[i] == a->cell) return a->last[1] != PICK_FOOD;
    return false;
}

static bool is_hunted(const struct belief *k) {
    for (int move = 0; move < 4; move++)
        if (world_has_predator(k->w, world_neighbour(k->w, k->a->cell, move))) return true;
    return false;
}

/* Loaded: home. Else to the nearest load it sees or remembers, else where it has not looked yet,
 * else about. Who stands beside a wolf keeps walking: what moves is not caught. */
static int rule_act(const struct world *w, const struct world_rules *rules, int agent,
                    struct rng *r) {
    struct belief k;
    belief_make(&k, w, rules, agent);
    if (k.a->holds && w->cells[k.a->cell] & CELL_HOME) return DROP_FOOD;
    if (!k.a->holds && load_is_here(&k, rules->here) && !is_hunted(&k)) return PICK_FOOD;
    int move = bfs_first_move(&k, k.a->holds ? GOAL_HOME : GOAL_LOAD, r);
    if (move < 0 && !k.a->holds) move = bfs_first_move(&k, GOAL_NEW, r);
    return move < 0 ? stroll(&k, r) : move;
}

/* reflex */

static bool is_open(const struct world *w, const struct world_agent *a, int move) {
    int cell = world_neighbour(w, a->cell, move);
    return !(w->cells[cell] & CELL_WALL) && !world_has_predator(w, cell);
}

/* What costs least, beginning with `first`: an open way that is not back, back, past a wolf; who is
 * locked in asks for what is not there rather than meet a wall. */
static int any_way(const struct world *w, const struct world_agent *a, int first) {
    int last = a->last[1], back = last >= 0 && last < 4 ? last ^ 1 : -1, best = PICK_FOOD, most = 0;
    for (int i = 0; i < 4; i++) {
        int move = (first + i) % 4, cell = world_neighbour(w, a->cell, move);
        int worth = w->cells[cell] & CELL_WALL    ? 0
                    : world_has_predator(w, cell) ? 1
                    : move == back                ? 2
                                                  : 3;
        if (worth > most) most = worth, best = move;
    }
    return best;
}

/* Ground that was not stood on; of what lies there it is not told. */
static bool is_new(const struct world *w, const struct world_agent *a, int move) {
    int cell = world_neighbour(w, a->cell, move), things = CELL_FOOD | CELL_MATERIAL | CELL_HOME;
    return is_open(w, a, move) && !(w->cells[cell] & things) && !world_agent_visited(a, cell);
}

/* Along either axis on which the goal is not reached, not back; else around what is in the way. */
static int toward(const struct world *w, const struct world_agent *a, int goal, struct rng *r) {
    int dx = goal % w->size - a->cell % w->size, dy = goal / w->size - a->cell / w->size;
    int want[2], n = 0, last = a->last[1], turn = (int)rng_below(r, 4);
    if (dy) want[n++] = dy > 0 ? MOVE_NORTH : MOVE_SOUTH;
    if (dx) want[n++] = dx > 0 ? MOVE_EAST : MOVE_WEST;
    for (int i = 0; i < n; i++) {
        int move = want[(turn + i) % n];
        if (is_open(w, a, move) && !(last >= 0 && last < 4 && move == (last ^ 1))) return move;
    }
    return any_way(w, a, turn);
}

/* What rule does, without a map: it looks at what a brief observation tells and at nothing else. */
static int reflex_act(const struct world *w, const struct world_rules *rules, int agent,
                      struct rng *r) {
    const struct world_agent *a = &w->agents[agent];
    int here = w->cells[a->cell], goal = world_goal(w, agent), last = a->last[1];
    int turn = (int)rng_below(r, 4), ahead = last >= 0 && last < 4 ? last : turn;
    int wanted = a->holds ? CELL_HOME : CELL_FOOD | CELL_MATERIAL;
    if (a->holds && here & CELL_HOME) return DROP_FOOD;
    if (!a->holds && rules->here && here & (CELL_FOOD | CELL_MATERIAL)) return PICK_FOOD;
    for (int i = 0; i < 4; i++) {
        int move = (turn + i) % 4;
        if (w->cells[world_neighbour(w, a->cell, move)] & wanted && is_open(w, a, move))
            return move;
    }
    if (goal >= 0) return toward(w, a, goal, r);
    for (int i = 0; i < 4; i++) { // new ground, straight on first
        int move = (ahead + i) % 4;
        if (is_new(w, a, move)) return move;
    }
    return any_way(w, a, rng_below(r, 8) ? ahead : turn);
}

/* chance */

static int random_act(const struct world *w, const struct world_rules *rules, int agent,
                      struct rng *r) {
    (void)w, (void)rules, (void)agent;
    return (int)rng_below(r, WORLD_N_ACTIONS);
}

static int mock_act(const struct world *w, const struct world_rules *rules, int agent,
                    struct rng *r) {
    (void)w, (void)rules, (void)agent;
    return (int)rng_below(r, PICK_FOOD);
}

const struct world_policy world_policies[] = {
    {"rule", "fetches what it sees and remembers, and explores", rule_act},
    {"reflex", "the same by what a brief observation tells, without a map", reflex_act},
    {"random", "any of the six actions", random_act},
    {"mock", "any move, as the predecessor's mock model: it never picks anything up", mock_act},
    {0},
};

const struct world_policy *world_policy_find(const char *name) {
    for (const struct world_policy *p = world_policies; p->name; p++)
        if (strcmp(p->name, name) == 0) return p;
    return NULL;
}

void world_policy_act(const struct world_policy *p, const struct world *w,
                      const struct world_rules *rules, uint64_t seed, int16_t *actions) {
    for (int i = 0; i < w->n_agents; i++) {
        if (!w->agents[i].alive) continue;
        struct rng r = world_policy_rng(seed, i, w->tick);
        actions[i] = (int16_t)p->act(w, rules, i, &r);
    }
}
