/*
 * observe: observations as text, parsing of actions, and maps as text.
 *
 * The text under the rules `legacy` must not change in any character, including its mistakes
 * (docs/COMPATIBILITY.md); other rules insert text between its parts. The compact form has fewer
 * details, as letters at fixed positions, and needs at most a third of the tokens. No function here
 * changes a world.
 */
#include "world/world.h"

#include <stdlib.h>
#include <string.h>

const char *const world_action_names[WORLD_N_ACTIONS] = {"move_north", "move_south", "move_east",
                                                         "move_west",  "pick_food",  "drop_food"};
const char *const world_action_words[WORLD_N_ACTIONS] = {"north", "south", "east",
                                                         "west",  "pick",  "drop"};

const char *const world_word_letters[WORLD_WORDS] = {"a", "b", "c", "f", "g", "h", "i", "j",
                                                     "k", "l", "m", "o", "q", "r", "t", "u"};

/* Appends ", unexplored area" or ", familiar area", by the share of the surrounding cells that the
 * agent has visited. */
static void add_area(const struct world *w, const struct world_agent *a, struct buf *out) {
    enum { REACH = 3 };
    int x0 = a->cell % w->size, y0 = a->cell / w->size, visited = 0, all = 0;
    for (int y = MAX(0, y0 - REACH); y <= MIN(w->size - 1, y0 + REACH); y++) {
        for (int x = MAX(0, x0 - REACH); x <= MIN(w->size - 1, x0 + REACH); x++) {
            visited += world_agent_visited(a, y * w->size + x);
            all++;
        }
    }
    if (10 * visited < 3 * all) buf_puts(out, ", unexplored area");
    if (10 * visited > 8 * all) buf_puts(out, ", familiar area");
}

static void add_cell_content(const struct world *w, const struct world_agent *a, struct buf *out) {
    int content = w->cells[a->cell];
    if (content & CELL_FOOD) buf_puts(out, ", here: food");
    if (content & CELL_MATERIAL) buf_puts(out, ", here: material");
    if (content & CELL_HOME) buf_puts(out, ", at home");
}

/* Appends the directions in which `name` is next to the agent. */
static void add_neighbours_of_kind(const char *name, const bool present[4], bool *first,
                                   struct buf *out) {
    static const char *const arrows[4] = {"↑", "↓", "→", "←"};
    for (int move = 0; move < 4; move++) {
        if (!present[move]) continue;
        buf_printf(out, "%s%s%s", *first ? ". See: " : " ", name, arrows[move]);
        *first = false;
    }
}

static void add_neighbours(const struct world *w, const struct world_agent *a, struct buf *out) {
    static const struct {
        const char *name;
        int kind;
    } kinds[] = {
        {"food", CELL_FOOD}, {"home", CELL_HOME}, {"wall", CELL_WALL}, {"material", CELL_MATERIAL}};
    bool present[4], first = true;
    for (size_t k = 0; k < ARRAY_LEN(kinds); k++) {
        for (int move = 0; move < 4; move++)
            present[move] = w->cells[world_neighbour(w, a->cell, move)] & kinds[k].kind;
        add_neighbours_of_kind(kinds[k].name, present, &first, out);
    }
    for (int move = 0; move < 4; move++)
        present[move] = world_has_predator(w, world_neighbour(w, a->cell, move));
    add_neighbours_of_kind("wolf", present, &first, out);
}

bool world_hears(const struct world *w, const struct world_rules *r, int listener, int speaker) {
    const struct world_agent *a = &w->agents[listener], *other = &w->agents[speaker];
    int distance = abs(other->cell % w->size - a->cell % w->size) +
                   abs(other->cell / w->size - a->cell / w->size);
    return listener != speaker && other->alive && other->word && distance <= r->hearing_range;
}

/* Appends the words that an agent hears. */
static void add_heard_words(const struct world *w, const struct world_rules *r, int agent,
                            struct buf *out) {
    bool first = true;
    for (int i = 0; i < w->n_agents; i++) {
        if (!world_hears(w, r, agent, i)) continue;
        buf_printf(out, "%s%d", first && !r->compact_observations ? ". Heard: " : " ",
                   w->agents[i].word);
        first = false;
    }
}

/* the compact form */

static int manhattan_distance(const struct world *w, int a, int b) {
    return abs(a % w->size - b % w->size) + abs(a / w->size - b / w->size);
}

int world_goal(const struct world *w, int agent) {
    const struct world_agent *a = &w->agents[agent];
    const int16_t *places = a->holds ? w->homes : a->remembered;
    int n = a->holds ? w->n_homes : a->n_remembered, goal = -1;
    for (int i = 0; i < n; i++) {
        bool visited = world_agent_visited(a, places[i]);
        if (a->holds ? i > 0 && !visited : visited) continue; // an unknown home, or a visited cell
        if (goal < 0 ||
            manhattan_distance(w, a->cell, places[i]) < manhattan_distance(w, a->cell, goal))
            goal = places[i];
    }
    return goal;
}

static char content_letter(const struct world *w, const struct world_agent *a, int cell) {
    int content = w->cells[cell];
    return content & CELL_FOOD            ? 'f'
           : content & CELL_MATERIAL      ? 'm'
           : content & CELL_HOME          ? 'h'
           : world_agent_visited(a, cell) ? 'o'
                                          : 'u';
}

static char neighbour_letter(const struct world *w, const struct world_agent *a, int move) {
    int cell = world_neighbour(w, a->cell, move);
    if (world_has_predator(w, cell)) return 'z';
    return w->cells[cell] & CELL_WALL ? 'x' : content_letter(w, a, cell);
}

static void observe_compact(const struct world *w, const struct world_rules *r, int agent,
                            struct buf *out) {
    const struct world_agent *a = &w->agents[agent];
    int goal = world_goal(w, agent), target = goal < 0 ? a->cell : goal;
    int dx = target % w->size - a->cell % w->size, dy = target / w->size - a->cell / w->size;
    for (int move = 0; move < 4; move++)
        buf_printf(out, "%s%c", move ? " " : "", neighbour_letter(w, a, move));
    buf_printf(out, " %c %c %c %c %c", r->observe_cell ? content_letter(w, a, a->cell) : 'o',
               "-fm"[a->holds],
               dy > 0   ? 'n'
               : dy < 0 ? 's'
                        : '-',
               dx > 0   ? 'e'
               : dx < 0 ? 'w'
                        : '-',
               2 * a->energy >= r->energy ? '+' : '-');
    if (r->vocabulary) add_heard_words(w, r, agent, out);
}

void world_observe(const struct world *w, const struct world_rules *r, int agent, struct buf *out) {
    const struct world_agent *a = &w->agents[agent];
    if (r->compact_observations) {
        observe_compact(w, r, agent, out);
        return;
    }
    buf_printf(out, "At (%d,%d), E%d", a->cell % w->size, a->cell / w->size, a->energy);
    if (a->holds) buf_puts(out, a->holds == HOLDS_FOOD ? ", has food" : ", has material");
    if (r->observe_cell) add_cell_content(w, a, out);
    add_area(w, a, out);
    if (a->n_remembered && !a->holds) buf_printf(out, ", remember %d food", a->n_remembered);
    add_neighbours(w, a, out);
    if (r->vocabulary) add_heard_words(w, r, agent, out);
}

void world_prompt(const struct world *w, const struct world_rules *r, int agent, struct buf *out) {
    const int16_t *last = w->agents[agent].last_actions;
    if (r->compact_observations) {
        world_observe(w, r, agent, out);
        for (int k = 0; k < 2; k++) buf_printf(out, " %c", last[k] < 0 ? '-' : "nsewpd"[last[k]]);
        buf_puts(out, ":");
        return;
    }
    if (last[1] >= 0) {
        buf_puts(out, "[");
        if (last[0] >= 0) buf_printf(out, "%s,", world_action_names[last[0]]);
        buf_printf(out, "%s] ", world_action_names[last[1]]);
    }
    world_observe(w, r, agent, out);
    buf_puts(out, ". Action:");
}

int world_action_from_text(const char *text, bool repaired) {
    static const struct {
        enum world_action action;
        const char *words[4];
    } table[WORLD_N_ACTIONS] = {
        {MOVE_NORTH, {"north", "up", "↑"}},       {MOVE_SOUTH, {"south", "down", "↓"}},
        {MOVE_EAST, {"east", "right", "→"}},      {MOVE_WEST, {"west", "left", "←"}},
        {PICK_FOOD, {"pick", "collect", "take"}}, {DROP_FOOD, {"drop", "store", "deliver"}},
    };
    int action = -1, verbs = WORLD_N_ACTIONS - PICK_FOOD;
    char *lower = xstrdup(text);
    for (char *p = lower; *p; p++)
        if (*p >= 'A' && *p <= 'Z') *p = (char)(*p + 'a' - 'A');
    for (int i = 0; action < 0 && i < WORLD_N_ACTIONS; i++) {
        int row = repaired ? (i + WORLD_N_ACTIONS - verbs) % WORLD_N_ACTIONS : i;
        for (const char *const *word = table[row].words; action < 0 && *word; word++)
            if (strstr(lower, *word)) action = table[row].action;
    }
    free(lower);
    return action;
}

int world_action_parse(const struct world_rules *r, const char *text) {
    return world_action_from_text(text, !world_rules_are_legacy(r));
}

static char cell_letter(const struct world *w, int cell) {
    for (int i = 0; i < w->n_agents; i++)
        if (w->agents[i].alive && w->agents[i].cell == cell) return world_agent_letter(i);
    if (world_has_predator(w, cell)) return '*';
    int content = w->cells[cell];
    return content & CELL_WALL       ? '#'
           : content & CELL_HOME     ? '+'
           : content & CELL_FOOD     ? 'f'
           : content & CELL_MATERIAL ? 'm'
                                     : '.';
}

void world_render(const struct world *w, struct buf *out) {
    for (int y = w->size - 1; y >= 0; y--) {
        for (int x = 0; x < w->size; x++) {
            char c = cell_letter(w, y * w->size + x);
            buf_add(out, &c, 1);
        }
        buf_puts(out, "\n");
    }
}
