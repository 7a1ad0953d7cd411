/* compare: the larger of two numbers. */
#define _GNU_SOURCE
#include "families/internal.h"

const char *const compare_asks[3] = {"which is larger: %d or %d?", "%dと%d、大きいのは？",
                                     "%d和%d哪个大？"};

static void generate(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    item_compare_numbers(r, it, compare_asks, pick_larger_asks, "compare", "pick", false);
}

const struct task_family compare_family = {"compare", true, 0, "the larger of two numbers",
                                           generate};
