/*
 * test_world_golden: simulations against an independent implementation of the rules in Python.
 *
 * test/golden/world/NAME.jsonl (see its README) is the output of test/oracle/world.py: the actions
 * of every tick and their results. Each file is read line by line and simulated again. Texts and
 * doubles must be equal bit by bit; the first difference ends the test.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "world/world.h"

// last: it needs four of the above
#include <cmocka.h>

struct replay {
    const char *name;
    struct world_rules rules;
    struct world w;
    int ticks;
    bool started, ended;
};

/* "NAME.jsonl, tick 3, agent 1", for messages. */
static const char *place_text(const struct replay *p, int agent) {
    static char text[96];
    int n = snprintf(text, sizeof text, "%s.jsonl, tick %d", p->name, (int)p->w.tick);
    if (agent >= 0) snprintf(text + n, sizeof text - (size_t)n, ", agent %d", agent);
    return text;
}

static const json_t *field(const struct replay *p, const json_t *v, const char *key) {
    const json_t *found = json_object_get(v, key);
    if (!found) fail_msg("%s.jsonl: no '%s' in a line", p->name, key);
    return found;
}

static void assert_integer(const struct replay *p, int agent, const char *what, int64_t got,
                           const json_t *want) {
    if (!json_is_integer(want) || got != json_integer_value(want))
        fail_msg("%s: %s is %lld, not %s", place_text(p, agent), what, (long long)got,
                 json_canonical(want));
}

static void assert_double(const struct replay *p, int agent, const char *what, double got,
                          const json_t *want) {
    double x = json_number_value(want);
    if (memcmp(&got, &x, sizeof x) != 0)
        fail_msg("%s: %s is %.17g, not %.17g", place_text(p, agent), what, got, x);
}

static void assert_text(const struct replay *p, int agent, const char *what, const char *got,
                        const json_t *want) {
    if (strcmp(got, json_string_value(want)) != 0)
        fail_msg("%s: %s is\n  '%s', not\n  '%s'", place_text(p, agent), what, got,
                 json_string_value(want));
}

/* The name of a rule set, or an object with differences from it, as in a world file. */
static void rules_read(struct replay *p, const char *set, const char *yaml) {
    struct error err;
    char *text = xasprintf("rules: %s\n%s", set, yaml);
    int rc = *yaml ? world_rules_parse(&p->rules, p->name, text, strlen(text), &err)
                   : world_rules_load(&p->rules, set, &err);
    free(text);
    if (rc != OK) fail_msg("%s.jsonl: %s", p->name, err.text);
}

static char cell_letter(uint8_t cell) {
    return cell & CELL_WALL       ? '#'
           : cell & CELL_HOME     ? 'H'
           : cell & CELL_FOOD     ? 'F'
           : cell & CELL_MATERIAL ? 'M'
                                  : '.';
}

static void map_check(const struct replay *p, const json_t *rows) {
    int size = p->w.size;
    if (json_array_size(rows) != (size_t)size)
        fail_msg("%s.jsonl: the world has %d rows, not %zu", p->name, size, json_array_size(rows));
    for (int i = 0; i < size; i++) {
        char row[WORLD_SIDE_MAX + 1] = "", what[32];
        for (int x = 0; x < size; x++) row[x] = cell_letter(p->w.cells[(size - 1 - i) * size + x]);
        snprintf(what, sizeof what, "row %d from north", i);
        assert_text(p, -1, what, row, json_array_get(rows, (size_t)i));
    }
}

/* The first line: the rules, and the initial world. */
static void header_read(struct replay *p, const json_t *line) {
    rules_read(p, json_get_string(line, "rules"), json_get_string(line, "yaml"));
    p->ticks = (int)json_integer_value(field(p, line, "ticks"));
    world_reset(&p->w, &p->rules, (int)json_integer_value(field(p, line, "agents")),
                (uint64_t)json_integer_value(field(p, line, "seed")));
    map_check(p, field(p, line, "map"));
    p->started = true;
}

/* The expected value is the first sixteen digits of the SHA-256 of both texts with a newline
 * between them. */
static void texts_hash_check(struct replay *p, int agent, const char *observation,
                             const char *prompt, const json_t *want) {
    char hash[HASH_LEN];
    struct sha256 h;
    sha256_init(&h);
    sha256_update(&h, observation, strlen(observation));
    sha256_update(&h, "\n", 1);
    sha256_update(&h, prompt, strlen(prompt));
    sha256_final(&h, hash);
    if (strncmp(hash, json_string_value(want), 16) != 0)
        fail_msg("%s: the prompt is\n  '%s', not what this shows:\n"
                 "  python3 test/oracle/world.py --show %s %d",
                 place_text(p, agent), prompt, p->name, (int)p->w.tick);
}

/* Checks the remembered cells, which are in the order in which the agent saw them. */
static void remembered_check(const struct replay *p, int i, const json_t *want) {
    const struct world_agent *a = &p->w.agents[i];
    assert_int_equal(json_array_size(want), a->n_remembered); // the observation has the same number
    for (int k = 0; k < a->n_remembered; k++)
        assert_integer(p, i, "a place of food that it remembers", a->remembered[k],
                       json_array_get(want, (size_t)k));
}

static void texts_check(struct replay *p, int i, const json_t *want) {
    struct buf observation = {0}, prompt = {0};
    world_observe(&p->w, &p->rules, i, &observation);
    world_prompt(&p->w, &p->rules, i, &prompt);
    if (json_array_size(want) == 5) {
        texts_hash_check(p, i, observation.data, prompt.data, json_array_get(want, 4));
    } else {
        assert_int_equal(json_array_size(want), 7);
        assert_text(p, i, "the observation", observation.data, json_array_get(want, 4));
        assert_text(p, i, "the prompt", prompt.data, json_array_get(want, 5));
        remembered_check(p, i, json_array_get(want, 6));
    }
    buf_release(&observation);
    buf_release(&prompt);
}

/* Checks [cell, energy, alive, reward], and texts if the agent is alive; [] if it died earlier. */
static void agent_check(struct replay *p, int i, const json_t *want) {
    const struct world_agent *a = &p->w.agents[i];
    if (json_array_size(want) == 0) {
        if (a->alive || a->reward != 0) fail_msg("%s: it should be dead", place_text(p, i));
        return;
    }
    assert_integer(p, i, "the cell", a->cell, json_array_get(want, 0));
    assert_integer(p, i, "the energy", a->energy, json_array_get(want, 1));
    assert_integer(p, i, "whether it lives", a->alive, json_array_get(want, 2));
    assert_double(p, i, "the reward", a->reward, json_array_get(want, 3));
    if (a->alive) texts_check(p, i, want);
}

static void tick_replay(struct replay *p, const json_t *line) {
    const json_t *actions = json_object_get(line, "do"),
                 *predators = json_object_get(line, "predators");
    int16_t chosen[WORLD_AGENTS_MAX] = {0};
    assert_true(p->started);
    for (size_t i = 0; i < json_array_size(actions); i++)
        chosen[i] = (int16_t)json_integer_value(json_array_get(actions, i));
    if (actions) world_step(&p->w, &p->rules, chosen);
    assert_integer(p, -1, "the tick", p->w.tick, field(p, line, "tick"));
    assert_int_equal(json_array_size(predators), p->w.n_predators);
    for (int i = 0; i < p->w.n_predators; i++)
        assert_integer(p, -1, "a predator's cell", p->w.predators[i],
                       json_array_get(predators, (size_t)i));
    const json_t *agents = field(p, line, "agents");
    assert_int_equal(json_array_size(agents), p->w.n_agents);
    for (int i = 0; i < p->w.n_agents; i++) agent_check(p, i, json_array_get(agents, (size_t)i));
}

static void totals_check(const struct replay *p, int i, const json_t *want) {
    const struct world_agent *a = &p->w.agents[i];
    assert_double(p, i, "the sum of rewards", a->episode_reward, field(p, want, "total"));
    assert_double(p, i, "the fitness", world_agent_fitness(a), field(p, want, "fitness"));
    assert_integer(p, i, "steps", a->steps, field(p, want, "steps"));
    assert_integer(p, i, "collected", a->collected, field(p, want, "collected"));
    assert_integer(p, i, "delivered", a->delivered, field(p, want, "delivered"));
    assert_integer(p, i, "built", a->built, field(p, want, "built"));
    assert_integer(p, i, "blocked", a->blocked, field(p, want, "blocked"));
    assert_integer(p, i, "bites", a->bites, field(p, want, "bites"));
}

static void counts_check(const struct replay *p, const json_t *want) {
    const struct world *w = &p->w;
    const struct {
        const char *name;
        int64_t got;
    } counts[] = {
        {"food_grown", w->food_grown},         {"food_eaten", w->food_eaten},
        {"food_lost", w->food_lost},           {"material_grown", w->material_grown},
        {"material_built", w->material_built}, {"material_lost", w->material_lost},
        {"energy_given", w->energy_given},     {"energy_spent", w->energy_spent},
    };
    for (size_t i = 0; i < ARRAY_LEN(counts); i++)
        assert_integer(p, -1, counts[i].name, counts[i].got, field(p, want, counts[i].name));
}

/* The last line: totals of the episode. */
static void end_check(struct replay *p, const json_t *line) {
    const json_t *agents = field(p, line, "agents");
    bool living = false;
    assert_int_equal(p->w.tick, p->ticks);
    map_check(p, field(p, line, "map"));
    counts_check(p, field(p, line, "counts"));
    for (int i = 0; i < p->w.n_agents; i++) {
        totals_check(p, i, json_array_get(agents, (size_t)i));
        living |= p->w.agents[i].alive;
    }
    assert_int_equal(world_terminated(&p->w), !living);
    p->ended = true;
}

static int line_read(void *ctx, const json_t *line, int number, struct error *err) {
    struct replay *p = ctx;
    (void)number, (void)err;
    if (json_object_get(line, "rules")) {
        header_read(p, line);
    } else if (json_object_get(line, "end")) {
        end_check(p, line);
    } else {
        tick_replay(p, line);
    }
    return OK;
}

static void golden_read(const char *name, json_file_each_fn fn, void *ctx) {
    struct error err;
    char path[96];
    snprintf(path, sizeof path, "test/golden/world/%s.jsonl", name);
    if (json_file_each(path, fn, ctx, &err) != OK) fail_msg("%s", err.text);
}

static void golden_simulations(void **state) {
    static struct replay p;
    p = (struct replay){.name = *state};
    golden_read(p.name, line_read, &p);
    if (!p.ended) fail_msg("%s.jsonl: the last line is missing", p.name);
    world_rules_release(&p.rules);
}

/* [text, action by the rules "legacy", by the rules "repaired"] */
static int answer_check(void *ctx, const json_t *line, int number, struct error *err) {
    const char *text = json_string_value(json_array_get(line, 0));
    (void)err;
    for (int repaired = 0; repaired < 2; repaired++) {
        int got = world_action_from_text(text, repaired),
            want = (int)json_integer_value(json_array_get(line, (size_t)repaired + 1));
        if (got != want)
            fail_msg("answers.jsonl, line %d: '%s' means %d, not %d, by the rules %s", number, text,
                     got, want, repaired ? "repaired" : "legacy");
    }
    ++*(int *)ctx;
    return OK;
}

static void golden_answers(void **state) {
    int n = 0;
    (void)state;
    golden_read("answers", answer_check, &n);
    assert_true(n > 50);
}

#define GOLDEN(name)                                                                               \
    { name, golden_simulations, NULL, NULL, (void *)(uintptr_t)name }

/* levels: once */
int main(void) {
    const struct CMUnitTest tests[] = {
        GOLDEN("legacy"),
        GOLDEN("legacy-small"),
        GOLDEN("legacy-crowd"),
        GOLDEN("legacy-here"),
        GOLDEN("legacy-brief"),
        GOLDEN("repaired"),
        GOLDEN("repaired-words"),
        GOLDEN("repaired-hungry"),
        GOLDEN("repaired-plenty"),
        GOLDEN("repaired-walls"),
        GOLDEN("repaired-full"),
        GOLDEN("homes"),
        GOLDEN("predators"),
        GOLDEN("material"),
        GOLDEN("words"),
        GOLDEN("map"),
        GOLDEN("map-oblong"),
        GOLDEN("map-homes"),
        GOLDEN("everything"),
        GOLDEN("everything-words"),
        cmocka_unit_test(golden_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
