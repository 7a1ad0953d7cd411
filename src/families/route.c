/* route: one to three steps on a grid. Common: to which cell do the steps lead from here? Rare:
 * from which cell do the steps lead here? */
#define _GNU_SOURCE
#include "families/internal.h"

#include <string.h>

static const char *const ahead[] = {"from %s go %s. where?", "%sから%sへ進む。どこ？",
                                    "从%s走%s。在哪？"};

/* The question of the item, and its check: the walk from the answer leads to the cell that the
 * question names. It consists of the moves, or if they lead to the answer, of the opposite moves
 * from the last one on. */
static void questions_add(struct task_item *it, bool rare, int lang, const char *cell,
                          const char *moves, int n) {
    static const char *const back[] = {"came to %s by %s. from where?",
                                       "%sで%sに着いた。どこから？", "走%s到了%s。从哪来？"};
    static const char directions[] = "NESW", opposites[] = "SWNE";
    char text[32], returning[32], opposite[16];
    for (int i = 0; i < n; i++)
        opposite[i] = opposites[strchr(directions, moves[n - 1 - i]) - directions];
    letters_join(text, moves, n);
    letters_join(returning, opposite, n);
    if (!rare)
        it->question = xasprintf(ahead[lang], cell, text);
    else
        it->question = xasprintf(back[lang], lang == EN ? cell : text, lang == EN ? text : cell);
    it->check_question = xasprintf(ahead[lang], CHECKED_ANSWER, rare ? text : returning);
    it->check_answer = xstrdup(cell);
}

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const int dx[] = {0, 1, 0, -1}, dy[] = {1, 0, -1, 0};
    int n = rng_between(r, 1, 3), lang = item_language(r), x = rng_between(r, 14, 85),
        y = rng_between(r, 14, 85);
    int ex = x, ey = y, sign = rare ? -1 : 1;
    char moves[16], cell[24];
    struct buf work = {0};
    for (int i = 0; i < n; i++) {
        int d = rng_between(r, 0, 3);
        moves[i] = "NESW"[d];
        ex += sign * dx[d];
        ey += sign * dy[d];
        buf_printf(&work, "%s%d,%d", i ? " " : "", ex, ey);
    }
    moves[n] = 0;
    it->lang = family_languages[lang];
    snprintf(cell, sizeof cell, "%d,%d", x, y);
    questions_add(it, rare, lang, cell, moves, n);
    it->work = work.data;
    it->key = xasprintf("route %d %d %d %s", rare, x, y, moves);
    snprintf(cell, sizeof cell, "%d,%d", ex, ey);
    item_add_choice(it, cell);
    snprintf(cell, sizeof cell, "%d,%d", 2 * x - ex, 2 * y - ey);
    item_add_choice(it, cell);
    for (int tries = 0; it->n_choices < 4 && tries < 64; tries++) {
        snprintf(cell, sizeof cell, "%d,%d", ex + rng_between(r, -1, 1),
                 ey + rng_between(r, -1, 1));
        item_add_choice(it, cell);
    }
}

const struct task_family route_family = {
    "route", false, 0.5f, "where a walk on a grid ends; rare: where it began", generate};
