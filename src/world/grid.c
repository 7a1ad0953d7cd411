/*
 * grid: the initial state of a world, and the effects of a tick.
 *
 * Each purpose has its own stream of random numbers (enum map_random_stream), so in worlds with the
 * same seed, food grows on the same cells whatever the agents do, except where a cell is not empty.
 * Observations are in observe.c, policies in scripted_policy.c.
 *
 * Invariants, which the tests check after every tick: agents and predators are on free cells (every
 * cell that is not a wall is free), and a predator is on a home only if no other cell was found for
 * its start; food and material are on free cells other than homes, never both on one; every item
 * that has grown is on a cell, carried, used, or lost with a dead agent; the energy that agents
 * have is the energy given to them minus the energy that they spent; dead agents carry nothing and
 * do not change, except that their reward is 0 from the next tick on. `struct world` has no
 * padding, so its bytes are its state.
 */
#include "world/world.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct world_agent) == 56 + 16 + WORLD_CELLS_MAX / 8,
               "padding in world_agent");
_Static_assert(offsetof(struct world, agents) ==
                   32 + WORLD_CELLS_MAX + 2 * WORLD_HOMES_MAX + 2 * WORLD_PREDATORS_MAX + 64,
               "padding in world");

/* Values of rng_make's argument `id`; the comments give those of its argument `step`. */
enum map_random_stream {
    STREAM_WALLS,              /* number of maps that were generated before and rejected */
    STREAM_HOMES,              /* 0 */
    STREAM_FOOD,               /* 2 · tick; 1: the extra food at reset */
    STREAM_MATERIAL,           /* as for food */
    STREAM_AGENT_START,        /* index of the agent */
    STREAM_PREDATOR_START,     /* index of the predator */
    STREAM_PREDATOR_MOVE = 16, /* tick; the id is this value + the index of the predator */
};
enum { MAX_TRIES = 64 }; /* attempts to find a cell, or to generate a map with enough free cells */

static int random_inner_cell(const struct world *w, struct rng *r) {
    int x = 1 + (int)rng_below(r, (uint32_t)w->size - 2);
    int y = 1 + (int)rng_below(r, (uint32_t)w->size - 2);
    return y * w->size + x;
}

/* A random inner cell without the bits in `excluded`; the first home if none is found. */
static int16_t random_free_cell(const struct world *w, enum map_random_stream stream, int step,
                                int excluded) {
    struct rng r = rng_make(w->seed, RNG_WORLD, (uint32_t)stream, (uint32_t)step);
    for (int i = 0; i < MAX_TRIES; i++) {
        int cell = random_inner_cell(w, &r);
        if (!(w->cells[cell] & excluded)) return (int16_t)cell;
    }
    return w->homes[0];
}

/* maps */

static void home_add(struct world *w, int cell) {
    w->cells[cell] = CELL_HOME;
    w->homes[w->n_homes++] = (int16_t)cell;
}

static void homes_place(struct world *w, const struct world_rules *r) {
    struct rng rng = rng_make(w->seed, RNG_WORLD, STREAM_HOMES, 0);
    home_add(w, w->size / 2 * w->size + w->size / 2);
    for (int64_t i = 1; i < r->homes; i++) {
        for (int t = 0; t < MAX_TRIES; t++) {
            int cell = random_inner_cell(w, &rng);
            if (w->cells[cell] & CELL_HOME) continue;
            home_add(w, cell);
            break;
        }
    }
}

/* Replaces everything except the homes by the border and random inner walls: tries `attempts`
 * random cells, and puts a wall on each that is not a home. `map_attempt` selects the random
 * numbers. */
static void random_walls_place(struct world *w, int64_t attempts, int map_attempt) {
    struct rng r = rng_make(w->seed, RNG_WORLD, STREAM_WALLS, (uint32_t)map_attempt);
    int n = w->size;
    for (int i = 0; i < n * n; i++) w->cells[i] &= CELL_HOME;
    for (int i = 0; i < n; i++)
        w->cells[i] = w->cells[(n - 1) * n + i] = w->cells[i * n] = w->cells[i * n + n - 1] =
            CELL_WALL;
    for (int64_t i = 0; i < attempts; i++) {
        int cell = random_inner_cell(w, &r);
        if (!(w->cells[cell] & CELL_HOME)) w->cells[cell] = CELL_WALL;
    }
}

/* Turns all cells that cannot be reached from a home into walls; returns the number of free
 * cells. */
static int unreachable_cells_fill(struct world *w) {
    int16_t queue[WORLD_CELLS_MAX];
    bool reached[WORLD_CELLS_MAX] = {false};
    int n_reached = 0;
    for (int i = 0; i < w->n_homes; i++) reached[queue[n_reached++] = w->homes[i]] = true;
    for (int i_queue = 0; i_queue < n_reached; i_queue++) {
        for (int move = 0; move < 4; move++) {
            int cell = world_neighbour(w, queue[i_queue], move);
            if (reached[cell] || w->cells[cell] & CELL_WALL) continue;
            reached[queue[n_reached++] = (int16_t)cell] = true;
        }
    }
    for (int i = 0; i < w->size * w->size; i++)
        if (!reached[i]) w->cells[i] = CELL_WALL;
    return n_reached;
}

/* With the rule `reachable`, tries other walls until at least half of the inner cells are
 * reachable. After MAX_TRIES maps it places no inner walls. */
static void random_map_generate(struct world *w, const struct world_rules *r) {
    int64_t walls = r->walls < 0 ? r->size : r->walls;
    int min_free_cells = ((w->size - 2) * (w->size - 2) + 1) / 2; /* half of the inner cells */
    homes_place(w, r);
    random_walls_place(w, walls, 0);
    if (!r->reachable) return;
    for (int map_attempt = 1; unreachable_cells_fill(w) < min_free_cells; map_attempt++)
        random_walls_place(w, map_attempt < MAX_TRIES ? walls : 0, map_attempt);
}

/* Sets the cells from a drawn map, and writes the cells on which agents start ('A') to `starts`.
 * Returns their number. */
static int drawn_map_load(struct world *w, const struct strings *map, int16_t *starts) {
    int n = 0;
    memset(w->cells, CELL_WALL, (size_t)w->size * (size_t)w->size);
    for (int row = 0; row < map->n; row++) {
        for (int x = 0; map->v[row][x]; x++) {
            int cell = (map->n - 1 - row) * w->size + x;
            char c = map->v[row][x];
            if (c == '#') continue;
            w->cells[cell] = c == 'F' ? CELL_FOOD : c == 'M' ? CELL_MATERIAL : 0;
            w->food_grown += c == 'F';
            w->material_grown += c == 'M';
            if (c == 'H') home_add(w, cell);
            if (c == 'A') starts[n++] = (int16_t)cell;
        }
    }
    return n;
}

/* Tries `attempts` random cells, and puts an item of a kind (a CELL_ bit) on each that is empty. */
static void items_grow(struct world *w, enum map_random_stream stream, int kind, int64_t attempts,
                       int64_t *grown, uint32_t step) {
    struct rng r = rng_make(w->seed, RNG_WORLD, stream, step);
    for (int64_t i = 0; i < attempts; i++) {
        int cell = random_inner_cell(w, &r);
        if (w->cells[cell]) continue;
        w->cells[cell] = (uint8_t)kind;
        ++*grown;
    }
}

static void food_grow(struct world *w, const struct world_rules *r, uint32_t step) {
    items_grow(w, STREAM_FOOD, CELL_FOOD, r->food, &w->food_grown, step);
}

static void material_grow(struct world *w, const struct world_rules *r, uint32_t step) {
    items_grow(w, STREAM_MATERIAL, CELL_MATERIAL, r->material, &w->material_grown, step);
}

/* Grows food and material at the start of the tick w->tick. */
static void tick_grow(struct world *w, const struct world_rules *r) {
    uint32_t step = 2 * (uint32_t)w->tick;
    if (w->tick % r->food_every == 0) food_grow(w, r, step);
    if (w->tick % r->material_every == 0) material_grow(w, r, step);
}

/* memory of the agents */

/* Sets the entry that becomes unused to 0, so that agent_remember may compare all entries: cell 0
 * is a wall and never has food. */
static void remembered_cell_remove(struct world_agent *a, int index) {
    a->n_remembered--;
    for (int i = index; i < WORLD_REMEMBERED_MAX - 1; i++) a->remembered[i] = a->remembered[i + 1];
    a->remembered[WORLD_REMEMBERED_MAX - 1] = 0;
}

static int remembered_cell_find(const struct world_agent *a, int cell) {
    for (int i = 0; i < a->n_remembered; i++)
        if (a->remembered[i] == cell) return i;
    return -1;
}

/* A third of a tick's time is spent in this function. A loop over all entries is faster than a loop
 * that ends at the first match. */
static void agent_remember(struct world_agent *a, int cell) {
    bool found = false;
    for (int i = 0; i < WORLD_REMEMBERED_MAX; i++) found |= a->remembered[i] == cell;
    if (found) return;
    if (a->n_remembered == WORLD_REMEMBERED_MAX) remembered_cell_remove(a, 0);
    a->remembered[a->n_remembered++] = (int16_t)cell;
}

static void agents_remember_adjacent_food(struct world *w) {
    for (int i = 0; i < w->n_agents; i++) {
        struct world_agent *a = &w->agents[i];
        for (int move = 0; a->alive && move < 4; move++) {
            int cell = world_neighbour(w, a->cell, move);
            if (w->cells[cell] & CELL_FOOD) agent_remember(a, cell);
        }
    }
}

/* Marks the cell as visited; returns true if it is new to the agent. */
static bool agent_visit(struct world_agent *a, int cell) {
    bool is_new = !world_agent_visited(a, cell);
    a->visited[cell / 64] |= (uint64_t)1 << (cell % 64);
    return is_new;
}

/* reset */

static void agent_start(struct world *w, const struct world_rules *r, int cell) {
    struct world_agent *a = &w->agents[w->n_living++];
    *a = (struct world_agent){
        .cell = (int16_t)cell, .energy = (int16_t)r->energy, .alive = 1, .last_actions = {-1, -1}};
    agent_visit(a, cell);
    w->energy_given += r->energy;
}

static int drawn_map_size(const struct strings *map) {
    return MAX(map->n, (int)strlen(map->v[0]));
}

void world_reset(struct world *w, const struct world_rules *r, int n_agents, uint64_t seed) {
    int16_t starts[WORLD_CELLS_MAX];
    int n_starts = 0;
    CHECK(n_agents > 0 && n_agents <= WORLD_AGENTS_MAX);
    memset(w, 0, sizeof *w);
    w->seed = seed;
    w->size = r->map.n ? drawn_map_size(&r->map) : (int32_t)r->size;
    w->n_agents = n_agents;
    w->n_predators = (int32_t)r->predators;
    if (r->map.n)
        n_starts = drawn_map_load(w, &r->map, starts);
    else
        random_map_generate(w, r);
    for (int i = 0; i < n_agents; i++)
        agent_start(w, r,
                    n_starts ? starts[i % n_starts]
                             : random_free_cell(w, STREAM_AGENT_START, i, CELL_WALL));
    for (int p = 0; p < w->n_predators; p++)
        w->predators[p] = random_free_cell(w, STREAM_PREDATOR_START, p, CELL_WALL | CELL_HOME);
    food_grow(w, r, 1);
    material_grow(w, r, 1);
    tick_grow(w, r);
    agents_remember_adjacent_food(w);
}

/* actions: agent_move, agent_pick and agent_drop return the reward */

static double agent_move(struct world *w, const struct world_rewards *r, struct world_agent *a,
                         int move) {
    int cell = world_neighbour(w, a->cell, move), content = w->cells[cell];
    if (content & CELL_WALL) {
        a->blocked++;
        return r->blocked;
    }
    double reward = r->move;
    a->cell = (int16_t)cell;
    if (agent_visit(a, cell)) reward += r->new_cell;
    if (content & CELL_FOOD)
        reward += r->food;
    else if (content & CELL_HOME && a->holds)
        reward += r->home;
    return reward;
}

static double agent_pick(struct world *w, const struct world_rewards *r, struct world_agent *a) {
    uint8_t *content = &w->cells[a->cell];
    if (a->holds || !(*content & (CELL_FOOD | CELL_MATERIAL))) return r->no_effect;
    if (*content & CELL_FOOD) {
        int index = remembered_cell_find(a, a->cell);
        if (index >= 0) remembered_cell_remove(a, index);
        a->holds = HOLDS_FOOD;
        a->collected++;
    } else {
        a->holds = HOLDS_MATERIAL;
    }
    *content = 0;
    return r->pick;
}

static double agent_drop(struct world *w, const struct world_rules *r, struct world_agent *a) {
    if (!(w->cells[a->cell] & CELL_HOME) || !a->holds) return r->rewards.no_effect;
    bool food = a->holds == HOLDS_FOOD;
    a->holds = HOLDS_NOTHING;
    if (!food) {
        a->built++;
        w->material_built++;
        return r->rewards.built;
    }
    int64_t gained = MIN(r->food_energy, r->energy - a->energy);
    a->energy += (int16_t)gained;
    a->delivered++;
    w->energy_given += gained;
    w->food_eaten++;
    return r->rewards.drop;
}

static void agent_spend_energy(struct world *w, struct world_agent *a, int64_t energy) {
    energy = MIN(energy, a->energy);
    a->energy -= (int16_t)energy;
    w->energy_spent += energy;
    if (a->energy > 0) return;
    w->food_lost += a->holds == HOLDS_FOOD;
    w->material_lost += a->holds == HOLDS_MATERIAL;
    a->alive = a->holds = HOLDS_NOTHING;
    w->n_living--;
}

static void agent_act(struct world *w, const struct world_rules *r, struct world_agent *a,
                      int action) {
    CHECK(action >= 0 && action < WORLD_N_ACTIONS * (r->vocabulary + 1));
    int base_action = action % WORLD_N_ACTIONS;
    a->word = (uint8_t)(action / WORLD_N_ACTIONS);
    a->last_actions[0] = a->last_actions[1];
    a->last_actions[1] = (int16_t)base_action;
    a->reward = base_action == PICK_FOOD   ? agent_pick(w, &r->rewards, a)
                : base_action == DROP_FOOD ? agent_drop(w, r, a)
                                           : agent_move(w, &r->rewards, a, base_action);
    a->episode_reward += a->reward;
    a->steps++;
    agent_spend_energy(w, a, 1);
}

/* predators */

/* The nearest living agent within `vision` steps of the cell `from`, and its offset from there;
 * NULL: none. */
static const struct world_agent *prey_find(const struct world *w, int from, int64_t vision, int *dx,
                                           int *dy) {
    const struct world_agent *prey = NULL;
    int64_t nearest = vision + 1;
    for (int i = 0; i < w->n_agents; i++) {
        const struct world_agent *a = &w->agents[i];
        int x = a->cell % w->size - from % w->size, y = a->cell / w->size - from / w->size;
        if (!a->alive || abs(x) + abs(y) >= nearest) continue;
        nearest = abs(x) + abs(y);
        prey = a, *dx = x, *dy = y;
    }
    return prey;
}

/* The neighbour in the direction of `move`, or the same cell if predators cannot enter the
 * neighbour. */
static int predator_step(const struct world *w, int cell, int move) {
    int next = world_neighbour(w, cell, move);
    return w->cells[next] & (CELL_WALL | CELL_HOME) ? cell : next;
}

/* The cell after a move towards an agent at the offset (dx, dy): along the axis with the larger
 * distance, or along the other axis if that move is blocked. */
static int predator_chase(const struct world *w, int cell, int dx, int dy) {
    int move_x = dx > 0 ? MOVE_EAST : MOVE_WEST, move_y = dy > 0 ? MOVE_NORTH : MOVE_SOUTH;
    bool x_first = abs(dx) >= abs(dy);
    int next = cell;
    if (dx || dy) next = predator_step(w, cell, x_first ? move_x : move_y);
    if (next == cell && dx && dy) next = predator_step(w, cell, x_first ? move_y : move_x);
    return next;
}

static void predator_bite(struct world *w, const struct world_rules *r, int cell) {
    if (w->cells[cell] & CELL_HOME) return;
    for (int i = 0; i < w->n_agents; i++) {
        struct world_agent *a = &w->agents[i];
        if (!a->alive || a->cell != cell) continue;
        a->bites++;
        a->reward += r->rewards.bitten;
        a->episode_reward += r->rewards.bitten;
        agent_spend_energy(w, a, r->predator_damage);
    }
}

static void predator_act(struct world *w, const struct world_rules *r, int p) {
    int cell = w->predators[p], dx, dy;
    if (prey_find(w, cell, r->predator_vision, &dx, &dy)) {
        cell = predator_chase(w, cell, dx, dy);
    } else {
        struct rng rng =
            rng_make(w->seed, RNG_WORLD, (uint32_t)(STREAM_PREDATOR_MOVE + p), (uint32_t)w->tick);
        cell = predator_step(w, cell, (int)rng_below(&rng, 4));
    }
    w->predators[p] = (int16_t)cell;
    predator_bite(w, r, cell);
}

/* a tick */

void world_step(struct world *w, const struct world_rules *r, const int16_t *actions) {
    for (int i = 0; i < w->n_agents; i++) {
        struct world_agent *a = &w->agents[i];
        a->reward = 0;
        if (a->alive) agent_act(w, r, a, actions[i]);
    }
    for (int p = 0; p < w->n_predators; p++) predator_act(w, r, p);
    w->tick++;
    tick_grow(w, r);
    agents_remember_adjacent_food(w);
}

bool world_terminated(const struct world *w) {
    return w->n_living == 0;
}

double world_agent_fitness(const struct world_agent *a) {
    double delivered = a->delivered;
    double f = a->episode_reward + 5.0 * a->collected + 10.0 * delivered + 0.1 * a->steps +
               50.0 * delivered / (a->steps + 1);
    return MAX(f, 0.0);
}

void world_hash(const struct world *w, char out[HASH_LEN]) {
    sha256_bytes(w, offsetof(struct world, agents) + (size_t)w->n_agents * sizeof *w->agents, out);
}
