/* route: one to three steps on a grid. Common: to which cell do the steps lead from here? Rare:
 * from which cell do the steps lead here? */
#define _GNU_SOURCE
#include "families/internal.h"

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const ahead[] = {"from %d,%d go %s. where?", "%d,%dから%sへ進む。どこ？",
                                        "从%d,%d走%s。在哪？"};
    static const char *const back[] = {"came to %d,%d by %s. from where?",
                                       "%sで%d,%dに着いた。どこから？", "走%s到了%d,%d。从哪来？"};
    static const int dx[] = {0, 1, 0, -1}, dy[] = {1, 0, -1, 0};
    int n = rng_between(r, 1, 3), lang = item_language(r), x = rng_between(r, 14, 85),
        y = rng_between(r, 14, 85);
    int ex = x, ey = y, sign = rare ? -1 : 1;
    char moves[16], text[32], cell[24];
    struct buf work = {0};
    for (int i = 0; i < n; i++) {
        int d = rng_between(r, 0, 3);
        moves[i] = "NESW"[d];
        ex += sign * dx[d];
        ey += sign * dy[d];
        buf_printf(&work, "%s%d,%d", i ? " " : "", ex, ey);
    }
    moves[n] = 0;
    letters_join(text, moves, n);
    it->lang = family_languages[lang];
    it->question = !rare || lang == EN ? xasprintf((rare ? back : ahead)[lang], x, y, text)
                                       : xasprintf(back[lang], text, x, y);
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
