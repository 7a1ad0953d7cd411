/*
 * test_world: each rule of the grid, every text of an observation, rule files and the reasons for
 * which they are refused, policies, and invariants after every tick of every kind of world.
 */
/* levels: once */
#define _GNU_SOURCE
#include "world/world.h"

#include <glob.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct error err;

/* Loads rules from the text of a file; the next call releases them. */
static const struct world_rules *rules_from_text(const char *text) {
    static struct world_rules r;
    world_rules_release(&r);
    if (world_rules_parse(&r, "w.yaml", text, strlen(text), &err) != OK) fail_msg("%s", err.text);
    return &r;
}

/* A tick in which all agents take the same action. */
static void step_all(struct world *w, const struct world_rules *r, int action) {
    int16_t actions[WORLD_AGENTS_MAX];
    for (int i = 0; i < WORLD_AGENTS_MAX; i++) actions[i] = (int16_t)action;
    world_step(w, r, actions);
}

static void step_two(struct world *w, const struct world_rules *r, int first, int second) {
    world_step(w, r, (int16_t[]){(int16_t)first, (int16_t)second});
}

static int cell_at(const struct world *w, int x, int y) {
    return y * w->size + x;
}

static int count(const struct world *w, int kind) {
    int n = 0;
    for (int i = 0; i < w->size * w->size; i++) n += (w->cells[i] & kind) != 0;
    return n;
}

/* rules */

static void test_rule_sets(void **state) {
    (void)state;
    struct world_rules r;
    assert_int_equal(world_rules_load(&r, "legacy", &err), OK);
    assert_string_equal(r.rules, "legacy");
    assert_true(r.size == 20 && r.walls == -1 && r.food == 5 && r.food_every == 50);
    assert_true(r.energy == 200 && r.food_energy == 0 && !r.observe_cell && !r.reachable &&
                r.homes == 1);
    assert_false(r.compact_observations);
    assert_true(r.predators == 0 && r.material == 0 && r.vocabulary == 0 && r.map.n == 0);
    const struct world_rewards want = {.move = -0.2,
                                       .new_cell = 0.5,
                                       .food = 3,
                                       .home = 5,
                                       .blocked = -3,
                                       .pick = 10,
                                       .drop = 20,
                                       .built = 10,
                                       .no_effect = -1,
                                       .bitten = -5};
    assert_memory_equal(&r.rewards, &want, sizeof want);
    world_rules_release(&r);
    assert_int_equal(world_rules_load(&r, "repaired", &err), OK);
    assert_string_equal(r.rules, "repaired");
    assert_true(r.observe_cell && r.compact_observations && r.reachable && r.food_energy == 100 &&
                r.food == 8 && r.food_every == 10);
    assert_true(r.size == 20 && r.walls == -1 && r.energy == 200);
    world_rules_release(&r);
}

static void test_rule_files(void **state) {
    (void)state;
    const struct world_rules *r =
        rules_from_text("food: 2\nrules: repaired\nrewards: {move: 0, wrong: -7}\nfood-every: 3\n");
    assert_true(r->food_energy == 100 && r->food == 2 && r->food_every == 3 && r->observe_cell);
    assert_true(r->rewards.move == 0 && r->rewards.no_effect == -7 && r->rewards.pick == 10);
    r = rules_from_text("");
    assert_true(r->food_energy == 0 && r->food == 5 && strcmp(r->rules, "legacy") == 0);
    r = rules_from_text("map: |\n  ####\n  #HA#\n  ####\n");
    assert_true(r->map.n == 3 && strcmp(r->map.v[1], "#HA#") == 0);
    r = rules_from_text("map: ['####', '#HA#', '####']\nrules: repaired\n");
    assert_true(r->map.n == 3 && r->food_energy == 100);
}

static void test_refusals(void **state) {
    (void)state;
    static const struct {
        const char *text, *message;
        int code;
    } cases[] = {
        {"\nrules: fair\n", "'w.yaml', line 2: no rules 'fair'; there are legacy and repaired",
         ERR_USAGE},
        {"rules: 3\n", "'w.yaml', line 1: 'rules' must be text", ERR_USAGE},
        {"size: 3\n", "'w.yaml', line 1: 'size' cannot be 3: it must be 4 to 64", ERR_USAGE},
        {"foods: 3\n", "line 1: unknown key 'foods', did you mean 'food'?", ERR_USAGE},
        {"rewards: {pik: 3}\n", "unknown key 'rewards_pik', did you mean 'rewards_pick'?",
         ERR_USAGE},
        {"food_every: 0\n", "'food_every' cannot be 0", ERR_USAGE},
        {"words: 16\n", "'words' cannot be 16: it must be 0 to 15", ERR_USAGE},
        {"- food\n", "must be a mapping", ERR_USAGE},
        {"food: [", "'w.yaml', line", ERR_FORMAT},
        {"walls: 4\nmap: ['###', '#H#', '###']\n", "line 1: the map says 'walls' itself",
         ERR_USAGE},
        {"rules: legacy\nmap: ['###', '#.#', '###']\n",
         "'w.yaml', line 2: the map has 0 homes ('H'); it needs 1 to 8", ERR_FORMAT},
        {"map: ['###########', '#HHHHHHHHH#', '###########']\n", "the map has 9 homes", ERR_FORMAT},
        {"map: ['###', '#H', '###']\n", "row 2 of the map has 2 cells, the first one has 3",
         ERR_FORMAT},
        {"map: ['####', '#Hx#', '####']\n",
         "row 2 of the map, cell 3: 'x' is not one of # H F M A .", ERR_FORMAT},
        {"map: ['####', '#H..', '####']\n", "row 2 of the map, cell 4: the border is open",
         ERR_FORMAT},
        {"map: ['#H#']\n", "row 1 of the map, cell 2: the border is open", ERR_FORMAT},
        {"map: ['']\n", "0 homes", ERR_FORMAT},
        {"map: ['#################################################################']\n",
         "the map is larger than 64 by 64 cells", ERR_FORMAT},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct world_rules r;
        err.text[0] = 0;
        int rc = world_rules_parse(&r, "w.yaml", cases[i].text, strlen(cases[i].text), &err);
        if (rc != cases[i].code || !strstr(err.text, cases[i].message))
            fail_msg("%s gives %d: %s", cases[i].text, rc, err.text);
        world_rules_release(&r);
    }
    struct world_rules r;
    assert_int_equal(world_rules_load(&r, "nowhere", &err), ERR_USAGE);
    assert_string_equal(err.text,
                        "no world 'nowhere'; there are legacy and repaired, and YAML files");
    world_rules_release(&r);
}

/* initial worlds */

/* Number of cells that can be reached from homes, by repeated passes over all cells. */
static int reachable_cells(const struct world *w) {
    static bool reached[WORLD_CELLS_MAX];
    int n = 0, before = -1;
    for (int i = 0; i < w->size * w->size; i++) reached[i] = w->cells[i] & CELL_HOME;
    while (n != before) {
        before = n;
        n = 0;
        for (int i = 0; i < w->size * w->size; i++) {
            if (w->cells[i] & CELL_WALL) continue;
            for (int move = 0; move < 4; move++) reached[i] |= reached[world_neighbour(w, i, move)];
            n += reached[i];
        }
    }
    return n;
}

static void check_border(const struct world *w) {
    for (int i = 0; i < w->size; i++) {
        assert_int_equal(w->cells[i], CELL_WALL);
        assert_int_equal(w->cells[cell_at(w, i, w->size - 1)], CELL_WALL);
        assert_int_equal(w->cells[cell_at(w, 0, i)], CELL_WALL);
        assert_int_equal(w->cells[cell_at(w, w->size - 1, i)], CELL_WALL);
    }
}

static void test_random_maps(void **state) {
    (void)state;
    struct world w;
    bool closed = false;
    for (uint64_t seed = 0; seed < 50; seed++) {
        world_reset(&w, rules_from_text("size: 9\nwalls: 30\n"), 3, seed);
        check_border(&w);
        assert_int_equal(w.cells[4 * 9 + 4], CELL_HOME);
        int walls = count(&w, CELL_WALL) - 32;
        assert_true(walls > 8 && walls <= 30);
        closed |= reachable_cells(&w) < 81 - count(&w, CELL_WALL);
        world_reset(&w, rules_from_text("size: 9\nwalls: 30\nreachable: true\nhomes: 3\n"), 3,
                    seed);
        check_border(&w);
        assert_int_equal(count(&w, CELL_HOME), 3);
        assert_int_equal(w.n_homes, 3);
        int reached = reachable_cells(&w);
        assert_int_equal(reached, 81 - count(&w, CELL_WALL));
        assert_true(reached >= 25);
    }
    assert_true(closed); // otherwise these walls test nothing
    world_reset(&w, rules_from_text("size: 8\nwalls: 4000\nreachable: true"), 1, 1);
    assert_int_equal(count(&w, CELL_WALL), 28); // no map has only half of the cells
    world_reset(&w, rules_from_text("size: 4\nwalls: 4000\nhomes: 8"), 1, 1);
    assert_int_equal(w.n_homes, 4);
}

static void test_agent_starts(void **state) {
    (void)state;
    struct world w;
    for (uint64_t seed = 0; seed < 20; seed++) {
        world_reset(&w, rules_from_text("rules: repaired\npredators: 16"), WORLD_AGENTS_MAX, seed);
        assert_true(w.tick == 0 && w.n_living == WORLD_AGENTS_MAX &&
                    w.n_agents == WORLD_AGENTS_MAX);
        for (int i = 0; i < WORLD_AGENTS_MAX; i++) {
            const struct world_agent *a = &w.agents[i];
            assert_true(a->alive && a->energy == 200 && !a->holds && a->last_actions[1] == -1);
            assert_true(!(w.cells[a->cell] & CELL_WALL) && world_agent_visited(a, a->cell));
        }
        for (int p = 0; p < 16; p++)
            assert_false(w.cells[w.predators[p]] & (CELL_WALL | CELL_HOME));
        assert_true(w.food_grown > 8 && w.food_grown <= 16 && count(&w, CELL_FOOD) == w.food_grown);
    }
    world_reset(&w, rules_from_text("size: 64\nwalls: 4096\nreachable: false"), 4, 3);
    for (int i = 0; i < 4; i++) assert_false(w.cells[w.agents[i].cell] & CELL_WALL);
}

static const char *const drawn = "food: 0\nmap: |\n"
                                 "  ######\n"
                                 "  #AF.H#\n"
                                 "  #.M#.#\n"
                                 "  #A..H#\n"
                                 "  ######\n";

static void test_map(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r = rules_from_text(drawn);
    struct buf b = {0};
    world_reset(&w, r, 3, 1);
    world_render(&w, &b);
    /* square, with another row of walls in the north; the first and third agent share a cell */
    assert_string_equal(b.data, "######\n######\n#Af.+#\n#.m#.#\n#B..+#\n######\n");
    assert_true(w.size == 6 && w.n_homes == 2 && w.food_grown == 1 && w.material_grown == 1);
    assert_int_equal(w.homes[0], cell_at(&w, 4, 3));
    assert_int_equal(w.homes[1], cell_at(&w, 4, 1));
    assert_int_equal(w.agents[2].cell, cell_at(&w, 1, 3));
    step_all(&w, r, MOVE_SOUTH);
    w.predators[w.n_predators++] = (int16_t)cell_at(&w, 2, 1);
    b.len = 0;
    world_render(&w, &b);
    assert_string_equal(b.data, "######\n######\n#.f.+#\n#Am#.#\n#B*.+#\n######\n");
    world_reset(&w, rules_from_text("map: |\n  ####\n  #.H#\n  #..#\n  ####\n"), 64, 1);
    for (int i = 0; i < 64; i++) assert_false(w.cells[w.agents[i].cell] & CELL_WALL);
    buf_release(&b);
}

/* acting */

static void test_moves(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r =
        rules_from_text("food: 0\nmap: ['#####', '#.HF#', '#A..#', '#####']");
    const struct world_agent *a = w.agents;
    world_reset(&w, r, 1, 1);
    static const struct {
        int action, x, y;
        double reward;
    } steps[] = {
        {MOVE_NORTH, 1, 2, -0.2 + 0.5},
        {MOVE_NORTH, 1, 2, -3},
        {MOVE_WEST, 1, 2, -3},
        {MOVE_EAST, 2, 2, -0.2 + 0.5},
        {MOVE_WEST, 1, 2, -0.2},
        {MOVE_EAST, 2, 2, -0.2},
        {MOVE_EAST, 3, 2, -0.2 + 0.5 + 3},
        {MOVE_SOUTH, 3, 1, -0.2 + 0.5},
        {MOVE_NORTH, 3, 2, -0.2 + 3},
        {DROP_FOOD, 3, 2, -1},
        {PICK_FOOD, 3, 2, 10},
        {PICK_FOOD, 3, 2, -1},
        {DROP_FOOD, 3, 2, -1},
        {MOVE_WEST, 2, 2, -0.2 + 5},
        {MOVE_SOUTH, 2, 1, -0.2 + 0.5},
        {MOVE_NORTH, 2, 2, -0.2 + 5},
        {DROP_FOOD, 2, 2, 20},
        {DROP_FOOD, 2, 2, -1},
        {PICK_FOOD, 2, 2, -1},
    };
    double total = 0;
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        step_all(&w, r, steps[i].action);
        total += steps[i].reward;
        assert_int_equal(a->cell, cell_at(&w, steps[i].x, steps[i].y));
        assert_true(a->reward == steps[i].reward && a->episode_reward == total);
        assert_true(a->last_actions[1] == steps[i].action && a->steps == (int)i + 1);
        assert_int_equal(a->last_actions[0], i ? steps[i - 1].action : -1);
        assert_int_equal(a->energy, 199 - (int)i);
    }
    assert_true(a->blocked == 2 && a->collected == 1 && a->delivered == 1 && a->built == 0);
    assert_true(w.food_eaten == 1 && w.energy_given == 200 && w.energy_spent == 19);
    assert_true(world_agent_fitness(a) == total + 5 + 10 + 0.1 * 19 + 50.0 / 20);
    struct world_agent poor = {.episode_reward = -100, .steps = 10};
    assert_true(world_agent_fitness(&poor) == 0);
}

static void test_material(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r = rules_from_text("food: 0\nmap: ['#####', '#AMH#', '#####']");
    const struct world_agent *a = w.agents;
    world_reset(&w, r, 1, 1);
    step_all(&w, r, MOVE_EAST);
    assert_true(a->reward == -0.2 + 0.5);
    step_all(&w, r, PICK_FOOD);
    assert_true(a->reward == 10 && a->holds == HOLDS_MATERIAL && a->collected == 0);
    step_all(&w, r, MOVE_EAST);
    assert_true(a->reward == -0.2 + 0.5 + 5);
    step_all(&w, r, DROP_FOOD);
    assert_true(a->reward == 10 && a->built == 1 && a->delivered == 0 && !a->holds);
    assert_true(w.material_grown == 1 && w.material_built == 1 && a->energy == 196);
}

static void test_energy(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r =
        rules_from_text("energy: 5\nmeal: 3\nfood: 0\nmap: ['####', '#AH#', '####']");
    struct world_agent *a = w.agents;
    world_reset(&w, r, 2, 1);
    w.cells[a->cell] = CELL_FOOD, w.food_grown++;
    step_two(&w, r, PICK_FOOD, MOVE_EAST);
    step_two(&w, r, MOVE_EAST, MOVE_EAST);
    step_two(&w, r, DROP_FOOD, MOVE_EAST); // 3 left, 2 of the 3 that fit added, 1 spent
    assert_true(a->energy == 4 && a->delivered == 1 && w.energy_given == 12);
    w.agents[1].holds = HOLDS_FOOD, w.food_grown++;
    step_all(&w, r, PICK_FOOD);
    step_all(&w, r, PICK_FOOD);
    assert_true(w.n_living == 1 && !w.agents[1].alive && !w.agents[1].holds && w.food_lost == 1);
    assert_true(w.agents[1].energy == 0 && w.agents[1].reward == -1 && w.agents[1].steps == 5);
    struct world_agent dead = w.agents[1];
    dead.reward = 0;
    step_all(&w, r, MOVE_WEST);
    assert_memory_equal(&w.agents[1], &dead, sizeof dead);
    assert_false(world_terminated(&w));
    step_all(&w, r, MOVE_WEST);
    assert_true(world_terminated(&w) && w.energy_spent == w.energy_given);
}

static void test_memory(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r = rules_from_text("food: 0\nmap: |\n"
                                                  "  ###############\n"
                                                  "  #.FFFFFFFFFFFF#\n"
                                                  "  #A............#\n"
                                                  "  #.F..........H#\n"
                                                  "  ###############\n");
    struct world_agent *a = w.agents;
    world_reset(&w, r, 1, 1);
    assert_int_equal(a->n_remembered, 0);
    step_all(&w, r, MOVE_EAST); // north before south
    assert_true(a->n_remembered == 2 && a->remembered[0] == cell_at(&w, 2, 3));
    assert_int_equal(a->remembered[1], cell_at(&w, 2, 1));
    for (int i = 0; i < 8; i++) step_all(&w, r, MOVE_EAST);
    assert_true(a->n_remembered == 10 && a->remembered[9] == cell_at(&w, 10, 3));
    step_all(&w, r, MOVE_EAST); // the oldest goes
    assert_true(a->n_remembered == 10 && a->remembered[0] == cell_at(&w, 2, 1));
    assert_int_equal(a->remembered[9], cell_at(&w, 11, 3));
    step_all(&w, r, MOVE_NORTH); // next to (10,3), which is known, and (12,3)
    assert_true(a->n_remembered == 10 && a->remembered[0] == cell_at(&w, 3, 3));
    step_all(&w, r, PICK_FOOD);
    assert_true(a->n_remembered == 9 && a->remembered[7] == cell_at(&w, 10, 3));
    assert_int_equal(a->remembered[8], cell_at(&w, 12, 3));
    w.cells[a->remembered[8]] = 0; // taken by another agent
    step_all(&w, r, DROP_FOOD);
    assert_int_equal(a->n_remembered, 9);
}

static void test_growth(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r = rules_from_text(
        "size: 64\nwalls: 0\nfood: 3\nfood_every: 4\nmaterial: 2\nmaterial_every: 3");
    world_reset(&w, r, 1, 5);
    assert_true(w.food_grown == 6 && w.material_grown == 4);
    for (int t = 1; t < 40; t++) {
        int64_t food = w.food_grown, material = w.material_grown;
        step_all(&w, r, DROP_FOOD);
        food = w.food_grown - food, material = w.material_grown - material;
        assert_int_equal(w.tick, t);
        assert_true(t % 4 == 0 ? food >= 2 && food <= 3 : food == 0); // two may be placed on one
                                                                      // cell
        assert_true(t % 3 == 0 ? material >= 1 && material <= 2 : material == 0);
    }
    assert_true(w.food_grown > 30 && w.material_grown > 26);
    r = rules_from_text("size: 6\nwalls: 0\nfood: 500\nmaterial: 500");
    world_reset(&w, r, 1, 5);
    assert_true(count(&w, CELL_FOOD) == 15 && count(&w, CELL_MATERIAL) == 0); // all but home
    step_all(&w, r, DROP_FOOD);
    assert_int_equal(w.food_grown, 15);
}

static void test_predators(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r =
        rules_from_text("food: 0\npredators: 1\nsight: 4\nbite: 7\nmap: |\n"
                        "  #########\n"
                        "  #A......#\n"
                        "  #.#.....#\n"
                        "  #..H...A#\n"
                        "  #########\n");
    int16_t *wolf = w.predators;
    struct world_agent *a = &w.agents[0], *b = &w.agents[1];
    world_reset(&w, r, 2, 1);
    b->cell = (int16_t)cell_at(&w, 7, 3);
    *wolf = (int16_t)cell_at(&w, 4, 3); // both agents are three steps away: the first one; the x
                                        // distance is longer
    step_all(&w, r, DROP_FOOD);
    assert_int_equal(*wolf, cell_at(&w, 3, 3));
    a->cell = (int16_t)cell_at(&w, 1, 1);
    *wolf = (int16_t)cell_at(&w, 3, 3); // equal distances in x and y: x first
    step_all(&w, r, DROP_FOOD);
    assert_int_equal(*wolf, cell_at(&w, 2, 3));
    step_all(&w, r, DROP_FOOD); // the y distance is longer but blocked by a wall: x
    assert_int_equal(*wolf, cell_at(&w, 1, 3));
    a->cell = (int16_t)cell_at(&w, 3, 1);
    *wolf = (int16_t)cell_at(&w, 3, 2); // at home: cannot be entered, and no other move is closer
    step_all(&w, r, DROP_FOOD);
    assert_int_equal(*wolf, cell_at(&w, 3, 2));
    assert_true(a->bites == 0 && b->bites == 0);
    a->cell = b->cell = (int16_t)cell_at(&w, 4, 2);
    b->energy = 6;
    step_all(&w, r, DROP_FOOD);
    assert_int_equal(*wolf, cell_at(&w, 4, 2));
    assert_true(a->bites == 1 && a->reward == -6 && a->episode_reward == -10 &&
                a->energy == 200 - 5 - 7);
    assert_true(b->bites == 1 && b->energy == 0 && !b->alive && w.n_living == 1);
    step_all(&w, r,
             DROP_FOOD); // it stays on the prey's cell and bites again; dead agents are ignored
    assert_true(*wolf == cell_at(&w, 4, 2) && a->bites == 2 && b->bites == 1);
    assert_int_equal(w.energy_spent, (6 + 14) + (5 + 5));
}

static void test_predators_roam(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r =
        rules_from_text("size: 8\nwalls: 9\npredators: 4\nsight: 0\nbite: 0");
    int moved = 0;
    world_reset(&w, r, 1, 9);
    for (int t = 0; t < 150; t++) {
        int16_t before[4];
        memcpy(before, w.predators, sizeof before);
        for (int p = 0; p < 4; p++) {
            struct rng rng = rng_make(9, RNG_WORLD, (uint32_t)(16 + p), (uint32_t)w.tick);
            int to = world_neighbour(&w, before[p], (int)rng_below(&rng, 4));
            bool prey = before[p] == w.agents[0].cell;
            if (!prey && !(w.cells[to] & (CELL_WALL | CELL_HOME))) before[p] = (int16_t)to, moved++;
        }
        step_all(&w, r, PICK_FOOD);
        assert_memory_equal(w.predators, before, sizeof before);
    }
    assert_true(moved > 100);
}

/* observations */

static void assert_observation(const struct world *w, const struct world_rules *r, int agent,
                               const char *want) {
    struct buf b = {0};
    world_observe(w, r, agent, &b);
    assert_string_equal(b.data, want);
    buf_release(&b);
}

static void assert_prompt(const struct world *w, const struct world_rules *r, const char *want) {
    struct buf b = {0};
    world_prompt(w, r, 0, &b);
    assert_string_equal(b.data, want);
    buf_release(&b);
}

static void test_strings(void **state) {
    (void)state;
    struct world w;
    const char *map = "food: 0\nmap: |\n  ######\n  #AF.H#\n  #.M#.#\n  #A..H#\n  ######\n";
    const struct world_rules *r = rules_from_text(map);
    world_reset(&w, r, 1, 1);
    assert_prompt(
        &w, r, "At (1,3), E200, unexplored area, remember 1 food. See: food→ wall↑ wall←. Action:");
    step_all(&w, r, MOVE_EAST); // legacy observations exclude the agent's cell
    assert_prompt(&w, r,
                  "[move_east] At (2,3), E199, unexplored area, remember 1 food. See: wall↑ "
                  "material↓. Action:");
    step_all(&w, r, PICK_FOOD);
    assert_prompt(&w, r,
                  "[move_east,pick_food] At (2,3), E198, has food, unexplored area. See: wall↑ "
                  "material↓. Action:");
    step_all(&w, r, MOVE_EAST);
    assert_observation(&w, r, 0,
                       "At (3,3), E197, has food, unexplored area. See: home→ wall↑ wall↓");
    step_all(&w, r, MOVE_EAST);
    assert_prompt(&w, r,
                  "[move_east,move_east] At (4,3), E196, has food, unexplored area. See: wall↑ "
                  "wall→. Action:");
    step_all(&w, r, MOVE_SOUTH);
    assert_observation(&w, r, 0,
                       "At (4,2), E195, has food, unexplored area. See: home↑ home↓ wall→ wall←");
    struct buf text = {0};
    buf_printf(&text, "rules: repaired\nbrief: false\n%s", map);
    r = rules_from_text(text.data);
    world_reset(&w, r, 1, 1);
    step_all(&w, r, MOVE_EAST);
    assert_observation(&w, r, 0,
                       "At (2,3), E199, here: food, unexplored area, remember 1 food. See: wall↑ "
                       "material↓");
    step_all(&w, r, MOVE_SOUTH);
    assert_observation(&w, r, 0,
                       "At (2,2), E198, here: material, unexplored area, remember 1 food. See: "
                       "food↑ wall→");
    step_all(&w, r, PICK_FOOD);
    assert_observation(&w, r, 0, "At (2,2), E197, has material, unexplored area. See: food↑ wall→");
    w.agents[0].cell = w.homes[0];
    w.predators[0] = w.predators[1] = (int16_t)cell_at(&w, 4, 2), w.n_predators = 2;
    assert_observation(&w, r, 0,
                       "At (4,3), E197, has material, at home, unexplored area. See: wall↑ wall→ "
                       "wolf↓");
    r = rules_from_text("food: 0\nmap: ['#####', '#...#', '#H..#', '#A..#', '#####']");
    world_reset(&w, r, 1, 1);
    w.agents[0].cell = (int16_t)cell_at(&w, 2, 2); // an empty area: nothing to observe
    assert_observation(&w, r, 0, "At (2,2), E200, unexplored area. See: home←");
    w.agents[0].cell = (int16_t)cell_at(&w, 3, 3);
    w.cells[cell_at(&w, 4, 3)] = w.cells[cell_at(&w, 3, 4)] = 0;
    assert_observation(&w, r, 0, "At (3,3), E200, unexplored area");
    buf_release(&text);
}

static const char *const compact_map = "rules: repaired\nfood: 0\nmap: |\n"
                                       "  ######\n"
                                       "  #.F..#\n"
                                       "  #M.AH#\n"
                                       "  #....#\n"
                                       "  ######\n";

/* Every letter of the compact observation, along a path past every kind of cell. */
static void test_compact_observation(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r = rules_from_text(compact_map);
    static const struct {
        int action;
        const char *expected;
    } steps[] = {
        {MOVE_SOUTH, "o x u u o - - - + - s:"}, {MOVE_NORTH, "u o h u o - - - + s n:"},
        {MOVE_WEST, "f u o m o - n - + n w:"},  {MOVE_WEST, "u u o x m - n e + w w:"},
        {PICK_FOOD, "u u o x o m - e + w p:"},  {PICK_FOOD, "u u o x o m - e + p p:"},
        {MOVE_EAST, "f u o o o m - e + p e:"},  {MOVE_NORTH, "x o u u f m s e + e n:"},
        {MOVE_EAST, "x o u f o m s e + n e:"},  {MOVE_EAST, "x h x o o m s - + e e:"},
        {MOVE_SOUTH, "o u x o h m - - + e s:"}, {DROP_FOOD, "o u x o h - - - + s d:"},
        {MOVE_WEST, "o o h o o - - - + d w:"},  {MOVE_NORTH, "x o o f o - - - + w n:"},
        {MOVE_WEST, "x o o u f - - - + n w:"},  {PICK_FOOD, "x o o u o f s e + w p:"},
    };
    world_reset(&w, r, 1, 1);
    assert_prompt(&w, r, "u u h u o - - - + - -:");
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        step_all(&w, r, steps[i].action);
        assert_prompt(&w, r, steps[i].expected);
    }
}

/* An adjacent wolf hides its cell's content; a wolf on the agent's cell is not shown. */
static void test_compact_hidden_content(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r = rules_from_text(compact_map);
    world_reset(&w, r, 1, 1);
    step_all(&w, r, MOVE_NORTH);
    assert_observation(&w, r, 0, "x o u f o - - w +");
    w.n_predators = 2;
    w.predators[0] = (int16_t)cell_at(&w, 2, 3);
    w.predators[1] = (int16_t)cell_at(&w, 3, 2);
    assert_observation(&w, r, 0, "x z u z o - - w +");
    w.agents[0].cell = w.predators[1];
    assert_observation(&w, r, 0, "o u h u o - n w +");
}

/* Without the rule observe_cell the agent's cell is shown as visited. */
static void test_compact_without_observe_cell(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r =
        rules_from_text("rules: repaired\nhere: false\nfood: 0\nmap: ['#####', '#AFH#', '#####']");
    world_reset(&w, r, 1, 1);
    for (int i = 0; i < 2; i++) {
        step_all(&w, r, MOVE_EAST);
        assert_prompt(&w, r, i ? "x x x f o - - - + e e:" : "x x h o o - - - + - e:");
    }
}

/* Known homes are the first one and those visited. Of equal distances the first home is chosen. */
static void test_compact_goal(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r = rules_from_text("rules: repaired\nfood: 0\nmap: |\n"
                                                  "  #########\n"
                                                  "  #......H#\n"
                                                  "  #.......#\n"
                                                  "  #H..A..H#\n"
                                                  "  #.......#\n"
                                                  "  #H......#\n"
                                                  "  #########\n");
    struct world_agent *a = w.agents;
    world_reset(&w, r, 1, 1);
    assert_true(w.n_homes == 4 && w.homes[0] == cell_at(&w, 7, 5));
    assert_int_equal(world_goal(&w, 0), -1);
    a->holds = HOLDS_FOOD;
    assert_int_equal(world_goal(&w, 0), w.homes[0]); // the nearer homes are unknown
    assert_observation(&w, r, 0, "u u u u o f n e +");
    static const struct {
        int home, goal;
        const char *expected;
    } cases[] = {{3, 0, "u u u u o f n e +"},  // as near as the first
                 {2, 2, "u u u u o f - e +"},  // nearer
                 {1, 1, "u u u u o f - w +"}}; // as near as the one before
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        int home = w.homes[cases[i].home];
        a->visited[home / 64] |= (uint64_t)1 << (home % 64);
        assert_int_equal(world_goal(&w, 0), w.homes[cases[i].goal]);
        assert_observation(&w, r, 0, cases[i].expected);
    }
    a->holds = HOLDS_NOTHING;
    a->n_remembered = 3;
    a->remembered[0] = w.homes[1]; // visited
    a->remembered[1] = (int16_t)cell_at(&w, 4, 1);
    a->remembered[2] = (int16_t)cell_at(&w, 4, 5);
    assert_observation(&w, r, 0, "u u u u o - s - +");
    a->remembered[1] = (int16_t)cell_at(&w, 3, 1);
    assert_observation(&w, r, 0, "u u u u o - n - +");
    a->n_remembered = 1;
    assert_observation(&w, r, 0, "u u u u o - - - +");
}

/* + for at least half of the energy; half of an odd number is rounded up. */
static void test_compact_energy(void **state) {
    (void)state;
    struct world w;
    static const struct {
        const char *rules;
        int energy;
        char want;
    } cases[] = {{"energy: 8", 8, '+'}, {"energy: 8", 4, '+'}, {"energy: 8", 3, '-'},
                 {"energy: 9", 5, '+'}, {"energy: 9", 4, '-'}, {"energy: 1", 1, '+'}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char *text = xasprintf("rules: repaired\n%s\n", cases[i].rules);
        const struct world_rules *r = rules_from_text(text);
        struct buf b = {0};
        world_reset(&w, r, 1, 1);
        w.agents[0].energy = (int16_t)cases[i].energy;
        world_observe(&w, r, 0, &b);
        assert_true(b.len == 17 && b.data[16] == cases[i].want);
        buf_release(&b);
        free(text);
    }
}

/* Less than 0.3 and more than 0.8 of the cells of the square that are inside the world. */
static void test_areas(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r =
        rules_from_text("food: 0\nmap: ['######', '#A...#', '#...H#', '######']");
    struct world_agent *a = w.agents;
    static const struct {
        int visited;
        const char *expected;
    } cases[] = {{8, "At (1,2), E200, unexplored area. See: wall↑ wall←"},
                 {9, "At (1,2), E200. See: wall↑ wall←"},
                 {24, "At (1,2), E200. See: wall↑ wall←"},
                 {25, "At (1,2), E200, familiar area. See: wall↑ wall←"}};
    world_reset(&w, r, 1, 1); // 6 by 6: 5 by 6 cells around (1,2)
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        memset(a->visited, 0, sizeof a->visited);
        a->visited[0] = (uint64_t)1 << 5; // outside the square
        for (int n = 0; n < cases[i].visited; n++)
            a->visited[0] |= (uint64_t)1 << (n / 5 * 6 + n % 5);
        assert_observation(&w, r, 0, cases[i].expected);
    }
}

static void test_words(void **state) {
    (void)state;
    struct world w;
    const struct world_rules *r = rules_from_text(
        "food: 0\nwords: 9\nhearing: 3\nmap: ['#######', '#A..AH#', '#.A...#', '#######']");
    world_reset(&w, r, 3, 1);
    assert_observation(&w, r, 0, "At (1,2), E200, unexplored area. See: wall↑ wall←");
    world_step(&w, r, (int16_t[]){PICK_FOOD + 6 * 4, PICK_FOOD + 6 * 9, DROP_FOOD});
    assert_true(w.agents[0].last_actions[1] == PICK_FOOD && w.agents[1].word == 9 &&
                !w.agents[2].word);
    assert_observation(&w, r, 0, "At (1,2), E199, unexplored area. See: wall↑ wall←. Heard: 9");
    assert_observation(&w, r, 2, "At (2,1), E199, unexplored area. See: wall↓. Heard: 4 9");
    world_step(&w, r, (int16_t[]){DROP_FOOD, MOVE_EAST + 6, PICK_FOOD + 6 * 2});
    assert_observation(&w, r, 0,
                       "At (1,2), E198, unexplored area. See: wall↑ wall←. Heard: 2"); // too far
    struct world_rules letters = *r;
    letters.compact_observations = true;
    assert_observation(&w, &letters, 0, "x u u x o - - - + 2");
    assert_prompt(&w, &letters, "x u u x o - - - + 2 p d:");
    w.agents[1].cell = w.agents[0].cell; // in the order of their index
    assert_observation(&w, &letters, 0, "x u u x o - - - + 1 2");
    letters.vocabulary = 0;
    assert_observation(&w, &letters, 0, "x u u x o - - - +");
    w.agents[1].alive = w.agents[2].alive = 0;
    assert_observation(&w, r, 0, "At (1,2), E198, unexplored area. See: wall↑ wall←");
}

static void test_parser(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int legacy, repaired;
    } cases[] = {
        {" move_north", MOVE_NORTH, MOVE_NORTH},
        {"Go SOUTH now", MOVE_SOUTH, MOVE_SOUTH},
        {"east", MOVE_EAST, MOVE_EAST},
        {"the West", MOVE_WEST, MOVE_WEST},
        {"↑", MOVE_NORTH, MOVE_NORTH},
        {"↓ or →", MOVE_SOUTH, MOVE_SOUTH},
        {"→", MOVE_EAST, MOVE_EAST},
        {"← ←", MOVE_WEST, MOVE_WEST},
        {"down", MOVE_SOUTH, MOVE_SOUTH},
        {"turn right", MOVE_EAST, MOVE_EAST},
        {"left", MOVE_WEST, MOVE_WEST},
        {"pick_food", PICK_FOOD, PICK_FOOD},
        {"Collect", PICK_FOOD, PICK_FOOD},
        {"take it", PICK_FOOD, PICK_FOOD},
        {"drop", DROP_FOOD, DROP_FOOD},
        {"STORE", DROP_FOOD, DROP_FOOD},
        {"deliver", DROP_FOOD, DROP_FOOD},
        {"pick up food", MOVE_NORTH, PICK_FOOD},
        {"drop it down", MOVE_SOUTH, DROP_FOOD},
        {"deliver or take", PICK_FOOD, PICK_FOOD},
        {"south, then north", MOVE_NORTH, MOVE_NORTH},
        {"supper", MOVE_NORTH, MOVE_NORTH},
        {"wait", -1, -1},
        {"", -1, -1},
        {"\xff\xfe", -1, -1},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        int legacy = world_action_from_text(cases[i].text, false),
            repaired = world_action_from_text(cases[i].text, true);
        if (legacy != cases[i].legacy || repaired != cases[i].repaired)
            fail_msg("'%s' gives %d and %d", cases[i].text, legacy, repaired);
    }
    for (int i = 0; i < WORLD_N_ACTIONS; i++)
        assert_int_equal(world_action_from_text(world_action_names[i], true), i);
}

/* determinism */

static void run_policy(struct world *w, const struct world_rules *r, const char *policy,
                       int ticks) {
    int16_t actions[WORLD_AGENTS_MAX];
    for (int t = 0; t < ticks; t++) {
        world_policy_act(world_policy_find(policy), w, r, 3, actions);
        world_step(w, r, actions);
    }
}

static void test_determinism(void **state) {
    (void)state;
    struct world_rules r;
    static struct world a, b;
    char first[HASH_LEN], second[HASH_LEN];
    assert_int_equal(world_rules_load(&r, "worlds/predators.yaml", &err), OK);
    world_reset(&a, &r, 9, 77);
    run_policy(&a, &r, "random", 40);
    struct world snapshot = a;
    run_policy(&a, &r, "random", 40);
    world_hash(&a, first);
    memset(&b, 1, sizeof b);
    world_reset(&b, &r, 9, 77);
    run_policy(&b, &r, "random", 80);
    world_hash(&b, second);
    assert_string_equal(first, second);
    assert_memory_equal(&a, &b, sizeof a);
    world_hash(&snapshot, second);
    assert_string_not_equal(first, second);
    run_policy(&snapshot, &r, "random", 40);
    assert_memory_equal(&a, &snapshot, sizeof a);
    snapshot.agents[8].visited[3] ^= 4;
    world_hash(&snapshot, second);
    assert_string_not_equal(first, second);
    world_reset(&b, &r, 9, 78);
    assert_memory_not_equal(a.cells, b.cells, sizeof a.cells);
    world_rules_release(&r);
}

/* invariants */

/* Cells that may be in an agent's memory although their item was taken by another agent since. */
static bool taken[WORLD_AGENTS_MAX][WORLD_CELLS_MAX];

static void check_memory(const struct world *before, const struct world *w, int i) {
    const struct world_agent *a = &w->agents[i];
    for (int j = 0; j < w->n_agents; j++)
        if (w->agents[j].collected > before->agents[j].collected)
            taken[i][w->agents[j].cell] = j != i;
    if (a->collected > before->agents[i].collected)
        for (int k = 0; k < a->n_remembered; k++) assert_true(a->remembered[k] != a->cell);
    for (int k = 0; k < a->n_remembered; k++) {
        assert_true(w->cells[a->remembered[k]] & CELL_FOOD || taken[i][a->remembered[k]]);
        for (int m = 0; m < k; m++) assert_true(a->remembered[m] != a->remembered[k]);
    }
    for (int k = a->n_remembered; k < WORLD_REMEMBERED_MAX; k++)
        assert_int_equal(a->remembered[k], 0);
    for (int move = 0; a->alive && move < 4; move++) {
        int cell = world_neighbour(w, a->cell, move);
        bool known = !(w->cells[cell] & CELL_FOOD) || a->n_remembered == WORLD_REMEMBERED_MAX;
        for (int k = 0; k < a->n_remembered; k++) known |= a->remembered[k] == cell;
        assert_true(known);
    }
}

static void check_dead(const struct world_agent *before, const struct world_agent *a) {
    struct world_agent same = *before;
    same.reward = 0;
    assert_memory_equal(a, &same, sizeof same);
    assert_int_equal(a->energy, 0);
}

/* Checks positions, counts and sums over all agents. */
static void check_sums(const struct world *w) {
    int64_t energy = 0, collected = 0, delivered = 0, built = 0, food = 0, material = 0, living = 0;
    for (int i = 0; i < w->n_agents; i++) {
        const struct world_agent *a = &w->agents[i];
        assert_false(w->cells[a->cell] & CELL_WALL);
        assert_true(world_agent_visited(a, a->cell));
        assert_true(a->alive == (a->energy > 0) && (a->alive || !a->holds));
        energy += a->energy;
        collected += a->collected;
        delivered += a->delivered;
        built += a->built;
        food += a->holds == HOLDS_FOOD;
        material += a->holds == HOLDS_MATERIAL;
        living += a->alive;
    }
    for (int p = 0; p < w->n_predators; p++)
        assert_false(w->cells[w->predators[p]] & (CELL_WALL | CELL_HOME));
    assert_int_equal(living, w->n_living);
    assert_int_equal(energy, w->energy_given - w->energy_spent);
    assert_int_equal(w->food_grown, count(w, CELL_FOOD) + food + w->food_eaten + w->food_lost);
    assert_int_equal(w->material_grown,
                     count(w, CELL_MATERIAL) + material + w->material_built + w->material_lost);
    assert_int_equal(collected, food + w->food_eaten + w->food_lost);
    assert_int_equal(delivered, w->food_eaten);
    assert_int_equal(built, w->material_built);
}

static void check_tick(const struct world *before, const struct world *w) {
    check_sums(w);
    assert_int_equal(w->tick, before->tick + 1);
    for (int i = 0; i < w->n_agents; i++) {
        const struct world_agent *a = &w->agents[i], *old = &before->agents[i];
        check_memory(before, w, i);
        if (!old->alive) {
            check_dead(old, a);
            continue;
        }
        assert_true(a->episode_reward == old->episode_reward + a->reward || a->bites > old->bites);
        assert_int_equal(a->steps, old->steps + 1);
    }
    for (int i = 0; i < w->size * w->size; i++)
        assert_int_equal(w->cells[i] & (CELL_WALL | CELL_HOME),
                         before->cells[i] & (CELL_WALL | CELL_HOME));
}

/* Two agents follow the policy `rule`, which makes the world last longer than with random actions
 * only. */
static void sample_actions(const struct world *w, const struct world_rules *r, struct rng *rng,
                           int16_t *actions) {
    const struct world_policy *rule = world_policy_find("rule");
    for (int i = 0; i < w->n_agents; i++) {
        int step_all = i < 2 ? rule->act(w, r, i, rng) : (int)rng_below(rng, WORLD_N_ACTIONS);
        int word = (int)rng_below(rng, (uint32_t)r->vocabulary + 1);
        actions[i] = (int16_t)(step_all + WORLD_N_ACTIONS * word);
    }
}

/* Runs worlds of these rules for `agent_ticks`; returns the items delivered and built. */
static int64_t check_rules(const char *name, int64_t agent_ticks) {
    static struct world w, before;
    struct world_rules r;
    struct rng rng = rng_make(1, RNG_TEST, 0, 0);
    int16_t actions[WORLD_AGENTS_MAX];
    int64_t done = 0;
    if (world_rules_load(&r, name, &err) != OK) fail_msg("%s", err.text);
    for (uint64_t seed = 0; agent_ticks > 0; seed++) {
        world_reset(&w, &r, 1 + (int)rng_below(&rng, 40), seed);
        memset(taken, 0, sizeof taken);
        check_sums(&w);
        while (!world_terminated(&w) && w.tick < 600) {
            agent_ticks -= w.n_living;
            before = w;
            sample_actions(&w, &r, &rng, actions);
            world_step(&w, &r, actions);
            check_tick(&before, &w);
        }
        done += w.food_eaten + w.material_built;
    }
    world_rules_release(&r);
    return done;
}

/* A million agent ticks in total, over every rule set and file. */
static void test_invariants(void **state) {
    (void)state;
    glob_t files;
    assert_int_equal(glob("worlds/*.yaml", 0, NULL, &files), 0);
    assert_true(files.gl_pathc >= 5);
    int64_t share = 1000000 / (int64_t)(files.gl_pathc + 2) + 1;
    for (size_t i = 0; i < files.gl_pathc; i++)
        assert_true(check_rules(files.gl_pathv[i], share) > 0);
    for (const struct world_rule_set *s = world_rule_sets; s->name; s++)
        assert_true(check_rules(s->name, share) > 0);
    globfree(&files);
}

/* policies */

static double delivered(const char *rules, const char *policy, int maps) {
    static struct world w;
    struct world_rules r;
    double n = 0;
    if (world_rules_load(&r, rules, &err) != OK) fail_msg("%s", err.text);
    for (int m = 0; m < maps; m++) {
        world_reset(&w, &r, 20, (uint64_t)m);
        run_policy(&w, &r, policy, 500);
        n += (double)w.food_eaten / 20;
    }
    world_rules_release(&r);
    return n / maps;
}

static void test_policies(void **state) {
    (void)state;
    double rule = delivered("repaired", "rule", 3), chance = delivered("repaired", "random", 3),
           reflex = delivered("repaired", "reflex", 3);
    print_message("delivered per agent in 500 ticks: rule %.2f, reflex %.2f, random %.2f\n", rule,
                  reflex, chance);
    assert_true(reflex > 14 && delivered("worlds/homes.yaml", "reflex", 1) > 14);
    assert_true(rule > 14 && chance < 0.5 && delivered("repaired", "mock", 1) == 0);
    assert_true(delivered("legacy", "rule", 2) > 0.5); // five food sources, then starvation
    assert_true(delivered("worlds/maze.yaml", "rule", 1) > 1);
    assert_null(world_policy_find("best"));
    const struct world_rules *r = rules_from_text("");
    static struct world w;
    int counts[2][WORLD_N_ACTIONS] = {{0}};
    world_reset(&w, r, 1, 1);
    for (uint32_t t = 0; t < 6000; t++) {
        struct rng a = rng_make(1, RNG_TEST, 0, t), b = a;
        counts[0][world_policy_find("random")->act(&w, r, 0, &a)]++;
        counts[1][world_policy_find("mock")->act(&w, r, 0, &b)]++;
    }
    for (int i = 0; i < WORLD_N_ACTIONS; i++) {
        assert_true(counts[0][i] > 850 && counts[0][i] < 1150);
        assert_true(i < 4 ? counts[1][i] > 1300 && counts[1][i] < 1700 : counts[1][i] == 0);
    }
}

/* The policy "rule" acts the same when everything changes that its agent was never next to. */
static void test_rule_uses_only_observed_cells(void **state) {
    (void)state;
    static struct world w, other;
    const struct world_policy *rule = world_policy_find("rule");
    const struct world_rules *r =
        rules_from_text("rules: repaired\nmaterial: 9\npredators: 2\nhomes: 4");
    struct rng rng = rng_make(2, RNG_TEST, 0, 0);
    world_reset(&w, r, 8, 4);
    for (int t = 0; t < 150; t++) {
        run_policy(&w, r, "rule", 1);
        int i = t % 8;
        bool observed[WORLD_CELLS_MAX] = {false};
        for (int cell = w.size; cell < w.size * (w.size - 1); cell++)
            for (int move = 0; move < 4; move++)
                observed[cell] |=
                    world_agent_visited(&w.agents[i], cell) ||
                    world_agent_visited(&w.agents[i], world_neighbour(&w, cell, move));
        other = w;
        for (int cell = w.size; cell < w.size * (w.size - 1); cell++)
            if (!observed[cell] && cell != w.homes[0])
                other.cells[cell] = (uint8_t)(1 << rng_below(&rng, 4));
        for (int j = 0; j < 8; j++)
            if (j != i) other.agents[j].cell = other.homes[0];
        struct rng a = rng_make(3, RNG_TEST, 0, (uint32_t)t), b = a;
        assert_int_equal(rule->act(&w, r, i, &a), rule->act(&other, r, i, &b));
    }
}

/* An observation, and the actions of the policy "reflex" for several random numbers. */
struct reflex_case {
    char prompt[48];
    int8_t acts[6];
};
enum { TABLE_SIZE = 1 << 16 };

static struct reflex_case *reflex_case_find(struct reflex_case *all, const char *prompt) {
    uint32_t at = 0;
    for (const char *c = prompt; *c; c++) at = at * 31 + (unsigned char)*c;
    for (at %= TABLE_SIZE; *all[at].prompt && strcmp(all[at].prompt, prompt) != 0;)
        at = (at + 1) % TABLE_SIZE;
    return &all[at];
}

/* Whether the observation occurred before; then the action must be the same, and never into a
 * wall. */
static bool reflex_check(const struct world *w, const struct world_rules *r, int i,
                         struct reflex_case *all) {
    struct buf b = {0};
    struct reflex_case now = {0};
    world_prompt(w, r, i, &b);
    assert_true(b.len < sizeof now.prompt);
    memcpy(now.prompt, b.data, b.len);
    buf_release(&b);
    for (uint32_t k = 0; k < ARRAY_LEN(now.acts); k++) {
        struct rng rng = rng_make(5, RNG_TEST, 0, k);
        int step_all = world_policy_find("reflex")->act(w, r, i, &rng);
        if (step_all < 4 && w->cells[world_neighbour(w, w->agents[i].cell, step_all)] & CELL_WALL)
            fail_msg("with observation '%s' it walks into a wall", now.prompt);
        now.acts[k] = (int8_t)step_all;
    }
    struct reflex_case *before = reflex_case_find(all, now.prompt);
    bool known = *before->prompt;
    if (known && memcmp(before, &now, sizeof now) != 0)
        fail_msg("with observation '%s' it chooses different actions", now.prompt);
    *before = now;
    return known;
}

/* Runs worlds of half reflex and half random actions, for observations that reflex alone would not
 * reach. */
static int64_t reflex_run(const struct world_rules *r, uint64_t seed, struct reflex_case *all) {
    static struct world w;
    int64_t known = 0;
    world_reset(&w, r, 12, seed);
    while (!world_terminated(&w) && w.tick < 200) {
        int16_t actions[WORLD_AGENTS_MAX];
        for (int i = 0; i < w.n_agents; i++) {
            struct rng rng = rng_make(seed, RNG_TEST, (uint32_t)i, (uint32_t)w.tick);
            const char *policy = rng_below(&rng, 8) < (uint32_t)i % 8 ? "reflex" : "random";
            if (!w.agents[i].alive) continue;
            known += reflex_check(&w, r, i, all);
            actions[i] = (int16_t)world_policy_find(policy)->act(&w, r, i, &rng);
        }
        world_step(&w, r, actions);
    }
    return known;
}

/* The policy "reflex" acts the same for the same compact observation and the same last two
 * actions. */
static void test_reflex_uses_only_observations(void **state) {
    (void)state;
    static const char *const rules[] = {
        "rules: repaired",
        "rules: repaired\nhomes: 6\nmaterial: 9\nmaterial_every: 9\npredators: 2\nsight: 2",
        "rules: repaired\nsize: 9\nwalls: 40\nreachable: false\nhomes: 4\npredators: 3",
        "size: 12\nbrief: true\nmaterial: 4\nhomes: 3",
    };
    struct reflex_case *all = xmalloc(TABLE_SIZE * sizeof *all);
    for (size_t k = 0; k < ARRAY_LEN(rules); k++) {
        const struct world_rules *r = rules_from_text(rules[k]);
        int64_t known = 0;
        memset(all, 0, TABLE_SIZE * sizeof *all);
        for (uint64_t seed = 0; seed < 12; seed++) known += reflex_run(r, seed, all);
        assert_true(known > 2000); // otherwise hardly any observation occurred twice
    }
    free(all);
}

/* Two agents with the same observation in worlds that are otherwise different. */
static void test_reflex_in_two_worlds(void **state) {
    (void)state;
    static struct world w, other;
    struct buf a = {0}, b = {0};
    struct world_rules r;
    assert_int_equal(world_rules_load(&r, "repaired", &err), OK);
    world_reset(&w, rules_from_text("food: 0\nmap: ['######', '#.AF.#', '#..H.#', '######']"), 1,
                1);
    world_reset(&other,
                rules_from_text("food: 9\nmap: |\n  #########\n  #......F#\n  #.F.....#\n"
                                "  ###...H.#\n  #.AF....#\n  #.......#\n  #########\n"),
                3, 2);
    for (int move = 0; move < 4; move++) {
        int cell = world_neighbour(&other, other.agents[0].cell, move);
        other.cells[cell] = w.cells[world_neighbour(&w, w.agents[0].cell, move)];
    }
    other.agents[0].energy = 120, other.agents[0].episode_reward = 31;
    world_prompt(&w, &r, 0, &a);
    world_prompt(&other, &r, 0, &b);
    assert_string_equal(a.data, "x u f u o - - e + - -:");
    assert_string_equal(a.data, b.data);
    for (uint32_t k = 0; k < 50; k++) {
        struct rng x = rng_make(6, RNG_TEST, 0, k), y = x;
        int step_all = world_policy_find("reflex")->act(&w, &r, 0, &x);
        assert_int_equal(step_all, MOVE_EAST); // food next to it, for any draw
        assert_int_equal(world_policy_find("reflex")->act(&other, &r, 0, &y), step_all);
    }
    buf_release(&a);
    buf_release(&b);
    world_rules_release(&r);
}

/* One action is correct in each of these cases; moves are not random. */
static void test_reflex_acts(void **state) {
    (void)state;
    static const struct {
        const char *row;
        int holds, last, predator, want;
    } cases[] = {
        {"#FA.H#", HOLDS_NOTHING, -1, 0, MOVE_WEST},         // food next to it
        {"#MA.H#", HOLDS_NOTHING, MOVE_EAST, 0, MOVE_WEST},  // material too, and back for it
        {"#FA.H#", HOLDS_FOOD, MOVE_EAST, 0, MOVE_EAST},     // home
        {"#F.AH#", HOLDS_MATERIAL, MOVE_WEST, 0, MOVE_EAST}, // home next to it, and back to it
        {"#.A.H#", HOLDS_NOTHING, MOVE_WEST, 0, MOVE_WEST},  // new ground, straight on
        {"#H.A.#", HOLDS_FOOD, MOVE_EAST, 0, MOVE_EAST},     // not back if another move is free
        {"#H.A##", HOLDS_FOOD, MOVE_EAST, 0, MOVE_WEST},     // back if no other move is free
        {"#FA.H#", HOLDS_NOTHING, -1, 1, MOVE_EAST},         // a wolf on the food
        {"##A.H#", HOLDS_NOTHING, -1, 3, MOVE_EAST},         // past the wolf sooner than a wall
        {"##A#H#", HOLDS_NOTHING, MOVE_EAST, 0, PICK_FOOD},  // locked in
        {"##A#H#", HOLDS_FOOD, -1, 0, PICK_FOOD},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        static struct world w;
        char *text =
            xasprintf("rules: repaired\nfood: 0\nmap: ['######', '%s', '######']", cases[i].row);
        const struct world_rules *r = rules_from_text(text);
        world_reset(&w, r, 1, 1);
        w.agents[0].holds = (uint8_t)cases[i].holds;
        w.agents[0].last_actions[1] = (int16_t)cases[i].last;
        w.n_predators = cases[i].predator > 0;
        w.predators[0] = (int16_t)cell_at(&w, cases[i].predator, w.agents[0].cell / w.size);
        for (uint32_t k = 0; k < 20; k++) {
            struct rng rng = rng_make(7, RNG_TEST, 0, k);
            int got = world_policy_find("reflex")->act(&w, r, 0, &rng);
            if (got != cases[i].want) fail_msg("case %zu: %s", i, world_action_names[got]);
        }
        free(text);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rule_sets),
        cmocka_unit_test(test_rule_files),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_random_maps),
        cmocka_unit_test(test_agent_starts),
        cmocka_unit_test(test_map),
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_material),
        cmocka_unit_test(test_energy),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_growth),
        cmocka_unit_test(test_predators),
        cmocka_unit_test(test_predators_roam),
        cmocka_unit_test(test_strings),
        cmocka_unit_test(test_compact_observation),
        cmocka_unit_test(test_compact_hidden_content),
        cmocka_unit_test(test_compact_without_observe_cell),
        cmocka_unit_test(test_compact_goal),
        cmocka_unit_test(test_compact_energy),
        cmocka_unit_test(test_areas),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_parser),
        cmocka_unit_test(test_determinism),
        cmocka_unit_test(test_invariants),
        cmocka_unit_test(test_policies),
        cmocka_unit_test(test_rule_uses_only_observed_cells),
        cmocka_unit_test(test_reflex_uses_only_observations),
        cmocka_unit_test(test_reflex_in_two_worlds),
        cmocka_unit_test(test_reflex_acts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
