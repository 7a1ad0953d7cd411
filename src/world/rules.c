/*
 * rules: the parameters of a world, from a rule set's name or a YAML file.
 *
 * The default values of the rows are the rules `legacy`. A rule set is YAML text that is applied
 * before the file that names it. Checks that involve several rows are made here, so every loaded
 * set of rules can create a world.
 */
#include "world/world.h"

#include <stdlib.h>
#include <string.h>

#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    { name, type, offsetof(struct world_rules, field), fallback, min, max, metavar, __VA_ARGS__ }
#define REWARD(name, field, fallback, help)                                                        \
    ROW("rewards-" name, OPT_FLOAT, rewards.field, fallback, -1e6, 1e6, "X", help)

const struct option_row world_rule_rows[] = {
    ROW("rules", OPT_STRING, rules, "legacy", 0, 0, "NAME",
        "rule set that provides the values not given: legacy or repaired", JOB_ARG_TEXT),
    ROW("size", OPT_INT, size, "20", WORLD_SIDE_MIN, WORLD_SIDE_MAX, "N",
        "cells per side, including the border"),
    ROW("walls", OPT_INT, walls, "-1", -1, WORLD_CELLS_MAX, "N",
        "attempts to place an inner wall; -1: as many as size"),
    ROW("food", OPT_INT, food, "5", 0, WORLD_CELLS_MAX, "N",
        "attempts to place food each time it grows"),
    ROW("food-every", OPT_INT, food_every, "50", 1, 1e6, "N", "ticks between two growths of food"),
    ROW("energy", OPT_INT, energy, "200", 1, 30000, "N",
        "initial and maximum energy; a step costs 1"),
    ROW("food-energy", OPT_INT, food_energy, "0", 0, 30000, "N",
        "energy gained by food brought home"),
    ROW("observe-cell", OPT_BOOL, observe_cell, NULL, 0, 0, NULL,
        "observations contain the content of the agent's cell"),
    ROW("compact-observations", OPT_BOOL, compact_observations, NULL, 0, 0, NULL,
        "observations are a dozen letters instead of words"),
    ROW("reachable", OPT_BOOL, reachable, NULL, 0, 0, NULL, "every free cell has a path to a home"),
    ROW("homes", OPT_INT, homes, "1", 1, WORLD_HOMES_MAX, "N",
        "number of homes; the first is in the middle"),
    ROW("predators", OPT_INT, predators, "0", 0, WORLD_PREDATORS_MAX, "N", "number of predators"),
    ROW("predator-vision", OPT_INT, predator_vision, "5", 0, 2 * WORLD_SIDE_MAX, "N",
        "distance in steps at which predators see agents"),
    ROW("predator-damage", OPT_INT, predator_damage, "20", 0, 30000, "N",
        "energy that an attack takes"),
    ROW("material", OPT_INT, material, "0", 0, WORLD_CELLS_MAX, "N",
        "attempts to place building material each time it grows"),
    ROW("material-every", OPT_INT, material_every, "50", 1, 1e6, "N",
        "ticks between two growths of material"),
    ROW("vocabulary", OPT_INT, vocabulary, "0", 0, WORLD_WORDS - 1, "N",
        "number of words that agents can say, besides silence"),
    ROW("hearing-range", OPT_INT, hearing_range, "5", 0, 2 * WORLD_SIDE_MAX, "N",
        "distance in steps at which words are heard"),
    ROW("map", OPT_LIST, map, NULL, 0, 0, "ROW",
        "a drawn world, rows from north to south: # wall, H home, F food, M material, A start of "
        "agents, . free",
        JOB_ARG_TEXT),
    REWARD("move", move, "-0.2", "each step"),
    REWARD("new-cell", new_cell, "0.5", "added on a cell that the agent has not visited"),
    REWARD("food", food, "3", "added on food"),
    REWARD("home", home, "5", "added at home while carrying something"),
    REWARD("blocked", blocked, "-3", "a step into a wall, instead of the four rewards above"),
    REWARD("pick", pick, "10", "picking something up"),
    REWARD("drop", drop, "20", "bringing food home"),
    REWARD("built", built, "10", "bringing material home"),
    REWARD("no-effect", no_effect, "-1", "picking up or dropping without effect"),
    REWARD("bitten", bitten, "-5", "added for each attack of a predator"),
    {0},
};
#undef REWARD
#undef ROW

const char *const world_map_keys[] = {"size", "walls", "homes", NULL};

const struct world_rule_set world_rule_sets[] = {
    {"legacy", "the rules, strings and numbers of an earlier program (docs/COMPATIBILITY.md)",
     "rules: legacy"},
    /* `repaired` has no rewards for positions (food, home), because an agent maximises them by
     * walking to and fro. Its penalty for failed pick-ups is small, because a large one teaches an
     * agent never to pick anything up. */
    {"repaired",
     "agents know what is on their cell, can reach home, food feeds them, and work pays",
     "{rules: repaired, observe_cell: true, compact_observations: true, reachable: true, "
     "food_energy: 100, food: 8, food_every: 10, rewards: {food: 0, home: 0, no_effect: -0.3}}"},
    {0},
};

/* A file may use the current or an earlier name of a rule set. */
static const struct world_rule_set *rule_set_find(const char *name) {
    name = current_value("rules", name);
    for (const struct world_rule_set *s = world_rule_sets; s->name; s++)
        if (strcmp(s->name, name) == 0) return s;
    return NULL;
}

/* Sets an error that lists the known names; returns ERR_USAGE. */
static int unknown_rule_set_error(const char *kind, const char *name, const char *others,
                                  struct error *err) {
    struct buf names = {0};
    for (const struct world_rule_set *s = world_rule_sets; s->name; s++)
        buf_printf(&names, "%s%s", s == world_rule_sets ? "" : " and ", s->name);
    int rc =
        error_set(err, ERR_USAGE, "no %s '%s'; there are %s%s", kind, name, names.data, others);
    buf_release(&names);
    return rc;
}

static int rule_set_apply(struct world_rules *r, const struct world_rule_set *set,
                          struct error *err) {
    struct yaml y;
    int rc = yaml_parse(&y, set->name, set->yaml, strlen(set->yaml), err);
    if (rc == OK) rc = options_from_yaml(world_rule_rows, r, &y, NULL, err);
    yaml_release(&y);
    return rc;
}

/* maps */

/* A map may be given as one text of several lines: splits it into rows. */
static void map_split(struct strings *map) {
    if (map->n != 1 || !strchr(map->v[0], '\n')) return;
    struct strings rows = {0};
    for (char *rest = map->v[0], *row; (row = strsep(&rest, "\n")) != NULL;)
        if (rest || *row) strings_add(&rows, row);
    strings_release(map);
    *map = rows;
}

static int map_row_check(const struct strings *map, int row, int width, int *homes,
                         struct error *err) {
    const char *v = map->v[row];
    if ((int)strlen(v) != width)
        return error_set(err, ERR_FORMAT, "row %d of the map has %zu cells, the first one has %d",
                         row + 1, strlen(v), width);
    for (int x = 0; x < width; x++) {
        bool border = row == 0 || row == map->n - 1 || x == 0 || x == width - 1;
        if (!strchr("#HFMA.", v[x]))
            return error_set(err, ERR_FORMAT,
                             "row %d of the map, cell %d: '%.*s' is not one of # H F M A .",
                             row + 1, x + 1, v[x] & 0x80 ? 0 : 1, v + x);
        if (border && v[x] != '#')
            return error_set(err, ERR_FORMAT, "row %d of the map, cell %d: the border is open",
                             row + 1, x + 1);
        *homes += v[x] == 'H';
    }
    return OK;
}

static int map_check(const struct strings *map, struct error *err) {
    int width = (int)MIN(strlen(map->v[0]), WORLD_SIDE_MAX + 1), homes = 0, rc = OK;
    if (width > WORLD_SIDE_MAX || map->n > WORLD_SIDE_MAX)
        return error_set(err, ERR_FORMAT, "the map is larger than %d by %d cells", WORLD_SIDE_MAX,
                         WORLD_SIDE_MAX);
    for (int row = 0; rc == OK && row < map->n; row++)
        rc = map_row_check(map, row, width, &homes, err);
    if (rc == OK && (homes < 1 || homes > WORLD_HOMES_MAX))
        rc = error_set(err, ERR_FORMAT, "the map has %d homes ('H'); it needs 1 to %d", homes,
                       WORLD_HOMES_MAX);
    return rc;
}

/* A map determines size, walls and homes, so none of them may be set. It is not known here which
 * values were set, so values other than the defaults count as set. */
static int map_conflicts_check(const struct world_rules *r, struct error *err) {
    struct world_rules defaults = {0};
    options_default(world_rule_rows, &defaults);
    bool unset =
        r->size == defaults.size && r->walls == defaults.walls && r->homes == defaults.homes;
    world_rules_release(&defaults);
    return unset ? OK : error_set(err, ERR_USAGE, "the map says size, walls and homes itself");
}

int world_rules_check(const struct world_rules *r, struct error *err) {
    if (!rule_set_find(r->rules)) return unknown_rule_set_error("rules", r->rules, "", err);
    if (!r->map.n) return OK;
    return map_conflicts_check(r, err) == OK ? map_check(&r->map, err) : err->code;
}

int world_rules_check_set(const struct world_rules *r, const char *set, struct error *err) {
    const char *flag = current_value("rules", r->rules);
    if (strcmp(current_value("rules", set), flag) == 0) return OK;
    return error_set(err, ERR_USAGE, "--rules is a key of world files; here it is --world %s",
                     flag);
}

/* files */

static int map_conflicts_check_yaml(const struct yaml *y, struct error *err) {
    for (const char *const *key = world_map_keys; *key; key++)
        if (yaml_line(y, *key))
            return error_set(err, ERR_USAGE, "'%s', line %d: the map says '%s' itself", y->path,
                             yaml_line(y, *key), *key);
    return OK;
}

static int rules_read_yaml(struct world_rules *r, const struct yaml *y, struct error *err) {
    const json_t *set_name = json_object_get(y->root, "rules");
    const struct world_rule_set *set =
        json_is_string(set_name) ? rule_set_find(json_string_value(set_name)) : NULL;
    int rc = set ? rule_set_apply(r, set, err) : OK;
    if (rc == OK) rc = options_from_yaml(world_rule_rows, r, y, NULL, err);
    if (rc != OK) return rc;
    map_split(&r->map);
    if (r->map.n && map_conflicts_check_yaml(y, err) != OK) return err->code;
    if (world_rules_check(r, err) == OK) return OK;
    return error_wrap(err, "'%s', line %d", y->path,
                      yaml_line(y, rule_set_find(r->rules) ? "map" : "rules"));
}

static int rules_parse(struct world_rules *r, const char *path, const char *text, size_t len,
                       bool stored, struct error *err) {
    struct yaml y;
    *r = (struct world_rules){0};
    options_default(world_rule_rows, r);
    int rc = yaml_parse(&y, path, text, len, err);
    y.stored = stored;
    if (rc == OK) rc = rules_read_yaml(r, &y, err);
    yaml_release(&y);
    return rc;
}

int world_rules_parse(struct world_rules *r, const char *path, const char *text, size_t len,
                      struct error *err) {
    return rules_parse(r, path, text, len, false, err);
}

int world_rules_from_json(struct world_rules *r, const char *name, const json_t *v,
                          struct error *err) {
    *r = (struct world_rules){0};
    if (!json_is_object(v))
        return error_set(err, ERR_FORMAT, "'%s' must be an object of rules", name);
    char *text = json_canonical(v);
    int rc = rules_parse(r, name, text, strlen(text), true, err);
    free(text);
    return rc;
}

int world_rules_load(struct world_rules *r, const char *name, struct error *err) {
    const struct world_rule_set *set = rule_set_find(renamed_value("rules", name));
    struct buf text = {0};
    *r = (struct world_rules){0};
    if (set) return world_rules_parse(r, name, set->yaml, strlen(set->yaml), err);
    if (!path_exists(name)) return unknown_rule_set_error("world", name, ", and YAML files", err);
    int rc = file_read(name, 1 << 20, &text, err);
    if (rc == OK) rc = world_rules_parse(r, name, text.data, text.len, err);
    if (rc == OK) renamed_value("rules", r->rules); /* logs a note if the name has changed */
    buf_release(&text);
    return rc;
}

bool world_rules_are_legacy(const struct world_rules *r) {
    return strcmp(current_value("rules", r->rules), "legacy") == 0;
}

void world_rules_release(struct world_rules *r) {
    options_release(world_rule_rows, r);
}
