/*
 * language: statistics of the words that agents say and hear.
 *
 * The mutual information, in bits, of the word that an agent says with its situation (food next to
 * it, its load, the direction of its goal), and of the word that an agent hears with its action.
 * The estimate from counts is never negative, so it is compared with a control: each agent's words
 * are rotated in time by a random offset, a hundred times. A rotation keeps how often each agent
 * says a word and for how long it repeats it, but not when; so habits of an agent do not count as
 * meaning, as they would if words were permuted over all agents.
 *
 * Invariant: the control's offsets are a function of the rotation and of the agent.
 */
#include "world/internal.h"

#include <math.h>
#include <stdlib.h>

enum { ROTATIONS = 100, MAX_VALUES = WORLD_WORDS };

/* Values of one agent in one tick. */
enum column { WORD, HEARD, FOOD, LOAD, GOAL, ACTION, N_COLUMNS };
struct language_stats {
    struct buf ticks[WORLD_AGENTS_MAX]; /* [ticks of the agent][N_COLUMNS] bytes */
};

static const struct {
    const char *name;
    enum column word, other;
} pairs[] = {{"word said, food in sight", WORD, FOOD},
             {"word said, load", WORD, LOAD},
             {"word said, direction of the goal", WORD, GOAL},
             {"word heard, action", HEARD, ACTION}};

struct language_stats *language_stats_new(void) {
    return xcalloc(1, sizeof(struct language_stats));
}

void language_stats_free(struct language_stats *s) {
    for (int i = 0; s && i < WORLD_AGENTS_MAX; i++) buf_release(&s->ticks[i]);
    free(s);
}

/* The first word that an agent hears, as in its observation; 0: none. */
static int heard_word(const struct world *w, const struct world_rules *r, int agent) {
    for (int i = 0; i < w->n_agents; i++)
        if (world_hears(w, r, agent, i)) return w->agents[i].word;
    return 0;
}

static bool sees_food(const struct world *w, int cell) {
    bool found = w->cells[cell] & CELL_FOOD;
    for (int move = 0; move < 4; move++)
        found |= (w->cells[world_neighbour(w, cell, move)] & CELL_FOOD) != 0;
    return found;
}

/* 0 to 8: the signs of the goal's distances along x and y. */
static int goal_direction(const struct world *w, int agent) {
    int goal = world_goal(w, agent), cell = w->agents[agent].cell;
    if (goal < 0) return 4;
    int dx = goal % w->size - cell % w->size, dy = goal / w->size - cell / w->size;
    return 3 * ((dx > 0) - (dx < 0) + 1) + (dy > 0) - (dy < 0) + 1;
}

void language_stats_add(struct language_stats *s, const struct world *w,
                        const struct world_rules *r, const int16_t *actions) {
    for (int i = 0; i < w->n_agents; i++) {
        if (!w->agents[i].alive) continue;
        char v[N_COLUMNS] = {[WORD] = (char)(actions[i] / WORLD_N_ACTIONS),
                             [HEARD] = (char)heard_word(w, r, i),
                             [FOOD] = sees_food(w, w->agents[i].cell),
                             [LOAD] = (char)w->agents[i].holds,
                             [GOAL] = (char)goal_direction(w, i),
                             [ACTION] = (char)(actions[i] % WORLD_N_ACTIONS)};
        buf_add(&s->ticks[i], v, sizeof v);
    }
}

/* Σ n log2 n over k counts. */
static double count_log_sum(const int64_t *n, int k) {
    double sum = 0;
    for (int i = 0; i < k; i++)
        if (n[i]) sum += (double)n[i] * math_log((double)n[i]);
    return sum / math_log(2);
}

/* Mutual information of two columns in bits; rotation > 0: a control. */
static double mutual_information(const struct language_stats *s, enum column a, enum column b,
                                 int rotation) {
    int64_t both[MAX_VALUES * MAX_VALUES] = {0}, first[MAX_VALUES] = {0}, second[MAX_VALUES] = {0},
                              n = 0;
    for (int i = 0; i < WORLD_AGENTS_MAX; i++) {
        const char *v = s->ticks[i].data;
        uint32_t ticks = (uint32_t)(s->ticks[i].len / N_COLUMNS);
        struct rng r = rng_make(0, RNG_SHUFFLE, (uint32_t)i, (uint32_t)rotation);
        uint32_t offset = rotation && ticks > 1 ? 1 + rng_below(&r, ticks - 1) : 0;
        for (uint32_t t = 0; t < ticks; t++) {
            int x = v[(t + offset) % ticks * N_COLUMNS + a], y = v[t * N_COLUMNS + b];
            both[x * MAX_VALUES + y]++;
            first[x]++;
            second[y]++;
        }
        n += ticks;
    }
    if (n == 0) return 0;
    return fmax(0, (count_log_sum(both, MAX_VALUES * MAX_VALUES) + count_log_sum(&n, 1) -
                    count_log_sum(first, MAX_VALUES) - count_log_sum(second, MAX_VALUES)) /
                       (double)n);
}

static json_t *pair_json(const struct language_stats *s, size_t pair) {
    double bits = mutual_information(s, pairs[pair].word, pairs[pair].other, 0), sum = 0,
           control[ROTATIONS];
    int as_large = 0;
    for (int k = 0; k < ROTATIONS; k++) {
        control[k] = mutual_information(s, pairs[pair].word, pairs[pair].other, k + 1);
        sum += control[k];
        as_large += control[k] >= bits;
    }
    qsort(control, ROTATIONS, sizeof *control, double_compare);
    return json_pack("{s:s,s:f,s:f,s:f,s:f}", "pair", pairs[pair].name, "bits", bits, "shuffled",
                     sum / ROTATIONS, "shuffled_95", control[ROTATIONS * 95 / 100 - 1], "p",
                     (as_large + 1.0) / (ROTATIONS + 1));
}

json_t *language_stats_json(const struct language_stats *s) {
    json_t *list = json_array();
    int64_t samples = 0;
    for (int i = 0; i < WORLD_AGENTS_MAX; i++) samples += (int64_t)s->ticks[i].len / N_COLUMNS;
    for (size_t i = 0; i < ARRAY_LEN(pairs); i++) json_array_append_new(list, pair_json(s, i));
    return json_pack("{s:I,s:f,s:o}", "samples", (json_int_t)samples, "entropy",
                     mutual_information(s, WORD, WORD, 0), "pairs", list);
}
