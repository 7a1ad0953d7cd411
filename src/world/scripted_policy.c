/*
 * scripted_policy: policies without a model. They are the baselines for models: random actions, and
 * planning with only the knowledge that an agent can have.
 */
#include "world/world.h"

#include <string.h>

/* rule */

/* The knowledge that an agent can have: the first home, and the walls and homes on and next to
 * every visited cell. */
struct agent_knowledge {
    const struct world *w;
    const struct world_agent *a;
    bool hungry; /* has less than half of its energy, so that it looks for food only */
    bool observed[WORLD_CELLS_MAX]; /* visited, or next to a visited cell */
};
/* Kinds of goals: a home, something to pick up, an unobserved cell. */
enum policy_goal { GOAL_HOME, GOAL_LOAD, GOAL_UNSEEN };

static void agent_knowledge_init(struct agent_knowledge *k, const struct world *w,
                                 const struct world_rules *rules, int agent) {
    *k = (struct agent_knowledge){.w = w, .a = &w->agents[agent]};
    k->hungry = rules->food_energy > 0 && k->a->energy < rules->energy / 2;
    for (int cell = 0; cell < w->size * w->size; cell++) {
        if (!world_agent_visited(k->a, cell)) continue;
        k->observed[cell] = true;
        for (int move = 0; move < 4; move++) k->observed[world_neighbour(w, cell, move)] = true;
    }
}

static bool is_adjacent(const struct agent_knowledge *k, int cell) {
    for (int move = 0; move < 4; move++)
        if (world_neighbour(k->w, k->a->cell, move) == cell) return true;
    return false;
}

/* Unknown cells are assumed to be free; the border is known. */
static bool can_enter(const struct agent_knowledge *k, int cell) {
    int x = cell % k->w->size, y = cell / k->w->size, last = k->w->size - 1;
    if (x == 0 || y == 0 || x == last || y == last) return false;
    if (k->observed[cell] && k->w->cells[cell] & CELL_WALL) return false;
    return !(is_adjacent(k, cell) && world_has_predator(k->w, cell));
}

static bool is_load(const struct agent_knowledge *k, int cell) {
    return k->w->cells[cell] & CELL_FOOD || (k->w->cells[cell] & CELL_MATERIAL && !k->hungry);
}

/* Whether the agent remembers food on this cell. A remembered cell that the agent has visited
 * counts as empty, because another agent may have taken the food. */
static bool is_remembered(const struct agent_knowledge *k, int cell) {
    for (int i = 0; i < k->a->n_remembered; i++)
        if (k->a->remembered[i] == cell) return !world_agent_visited(k->a, cell);
    return false;
}

static bool is_goal(const struct agent_knowledge *k, enum policy_goal goal, int cell) {
    bool first_home = cell == k->w->homes[0];
    if (goal == GOAL_HOME)
        return (first_home || k->observed[cell]) && k->w->cells[cell] & CELL_HOME;
    if (goal == GOAL_UNSEEN) return !k->observed[cell];
    return (is_adjacent(k, cell) && is_load(k, cell)) || is_remembered(k, cell);
}

/* The first move of a shortest path to a goal, through cells that may be free; -1: there is no
 * path. Breadth-first search. */
static int bfs_first_move(const struct agent_knowledge *k, enum policy_goal goal, struct rng *r) {
    int16_t queue[WORLD_CELLS_MAX];
    int8_t first[WORLD_CELLS_MAX];
    /* The order of moves is random, so that agents on the same cell separate. */
    int n = 1, rotation = (int)rng_below(r, 4);
    memset(first, -1, sizeof first);
    queue[0] = k->a->cell;
    first[k->a->cell] = 0;
    for (int i_next = 0; i_next < n; i_next++) {
        for (int i = 0; i < 4; i++) {
            int move = (rotation + i) % 4, cell = world_neighbour(k->w, queue[i_next], move);
            if (first[cell] >= 0 || !can_enter(k, cell)) continue;
            first[cell] = i_next == 0 ? (int8_t)move : first[queue[i_next]];
            if (is_goal(k, goal, cell)) return first[cell];
            queue[n++] = (int16_t)cell;
        }
    }
    return -1;
}

/* A random walk: mostly straight on, and back only if no other move is possible. */
static int random_walk_move(const struct agent_knowledge *k, struct rng *r) {
    int last = k->a->last_actions[1], back = last ^ 1, rotation = (int)rng_below(r, 4);
    bool has_moved = last >= 0 && last < 4;
    if (has_moved && rng_below(r, 8) && can_enter(k, world_neighbour(k->w, k->a->cell, last)))
        return last;
    for (int i = 0; i < 4; i++) {
        int move = (rotation + i) % 4;
        if (!(has_moved && move == back) && can_enter(k, world_neighbour(k->w, k->a->cell, move)))
            return move;
    }
    return has_moved ? back : rotation;
}

/* Whether something to pick up is on the agent's cell. Without the rule observe_cell the agent
 * relies on its memory, unless it has just tried to pick it up. */
static bool load_is_here(const struct agent_knowledge *k, bool observes_cell) {
    const struct world_agent *a = k->a;
    if (observes_cell) return is_load(k, a->cell);
    for (int i = 0; i < a->n_remembered; i++)
        if (a->remembered[i] == a->cell) return a->last_actions[1] != PICK_FOOD;
    return false;
}

static bool is_next_to_predator(const struct agent_knowledge *k) {
    for (int move = 0; move < 4; move++)
        if (world_has_predator(k->w, world_neighbour(k->w, k->a->cell, move))) return true;
    return false;
}

/* An agent with a load goes home. Otherwise it goes to the nearest item that it sees or remembers,
 * else to the nearest unobserved cell, else at random. Next to a predator it keeps moving, because
 * predators do not catch a moving agent. */
static int rule_act(const struct world *w, const struct world_rules *rules, int agent,
                    struct rng *r) {
    struct agent_knowledge k;
    agent_knowledge_init(&k, w, rules, agent);
    if (k.a->holds && w->cells[k.a->cell] & CELL_HOME) return DROP_FOOD;
    if (!k.a->holds && load_is_here(&k, rules->observe_cell) && !is_next_to_predator(&k))
        return PICK_FOOD;
    int move = bfs_first_move(&k, k.a->holds ? GOAL_HOME : GOAL_LOAD, r);
    if (move < 0 && !k.a->holds) move = bfs_first_move(&k, GOAL_UNSEEN, r);
    return move < 0 ? random_walk_move(&k, r) : move;
}

/* reflex */

static bool is_open(const struct world *w, const struct world_agent *a, int move) {
    int cell = world_neighbour(w, a->cell, move);
    return !(w->cells[cell] & CELL_WALL) && !world_has_predator(w, cell);
}

/* The best available move: to a free cell, but not back to the previous one; else back; else to a
 * cell with a predator. `first` is the preferred direction. An agent between four walls tries to
 * pick something up instead. */
static int least_bad_move(const struct world *w, const struct world_agent *a, int first) {
    int last = a->last_actions[1], back = last >= 0 && last < 4 ? last ^ 1 : -1, best = PICK_FOOD,
        best_rank = 0;
    for (int i = 0; i < 4; i++) {
        int move = (first + i) % 4, cell = world_neighbour(w, a->cell, move);
        int rank = w->cells[cell] & CELL_WALL    ? 0
                   : world_has_predator(w, cell) ? 1
                   : move == back                ? 2
                                                 : 3;
        if (rank > best_rank) best_rank = rank, best = move;
    }
    return best;
}

/* Whether the cell is open, unvisited and without an item or a home, so that the observation shows
 * it as unvisited. */
static bool is_unvisited(const struct world *w, const struct world_agent *a, int move) {
    int cell = world_neighbour(w, a->cell, move), things = CELL_FOOD | CELL_MATERIAL | CELL_HOME;
    return is_open(w, a, move) && !(w->cells[cell] & things) && !world_agent_visited(a, cell);
}

/* Moves along an axis on which the goal is not reached, but not back; if that is impossible, takes
 * the best available move. */
static int move_toward(const struct world *w, const struct world_agent *a, int goal,
                       struct rng *r) {
    int dx = goal % w->size - a->cell % w->size, dy = goal / w->size - a->cell / w->size;
    int moves[2], n = 0, last = a->last_actions[1], rotation = (int)rng_below(r, 4);
    if (dy) moves[n++] = dy > 0 ? MOVE_NORTH : MOVE_SOUTH;
    if (dx) moves[n++] = dx > 0 ? MOVE_EAST : MOVE_WEST;
    for (int i = 0; i < n; i++) {
        int move = moves[(rotation + i) % n];
        if (is_open(w, a, move) && !(last >= 0 && last < 4 && move == (last ^ 1))) return move;
    }
    return least_bad_move(w, a, rotation);
}

/* Like `rule`, but without a map: it uses only the information of a compact observation. */
static int reflex_act(const struct world *w, const struct world_rules *rules, int agent,
                      struct rng *r) {
    const struct world_agent *a = &w->agents[agent];
    int content = w->cells[a->cell], goal = world_goal(w, agent), last = a->last_actions[1];
    int rotation = (int)rng_below(r, 4), first_move = last >= 0 && last < 4 ? last : rotation;
    int goal_content = a->holds ? CELL_HOME : CELL_FOOD | CELL_MATERIAL;
    if (a->holds && content & CELL_HOME) return DROP_FOOD;
    if (!a->holds && rules->observe_cell && content & (CELL_FOOD | CELL_MATERIAL)) return PICK_FOOD;
    for (int i = 0; i < 4; i++) {
        int move = (rotation + i) % 4;
        if (w->cells[world_neighbour(w, a->cell, move)] & goal_content && is_open(w, a, move))
            return move;
    }
    if (goal >= 0) return move_toward(w, a, goal, r);
    for (int i = 0; i < 4; i++) { // unvisited cells, straight on first
        int move = (first_move + i) % 4;
        if (is_unvisited(w, a, move)) return move;
    }
    return least_bad_move(w, a, rng_below(r, 8) ? first_move : rotation);
}

/* random policies */

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
    {"reflex", "like rule, but from a brief observation and without a map", reflex_act},
    {"random", "any of the six actions", random_act},
    {"mock", "a random move: it never picks anything up", mock_act},
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
