/* compare: the larger of two numbers. */
#define _GNU_SOURCE
#include "families/internal.h"

static void generate(struct rng *r, bool rare, struct task_item *it) {
    (void)rare;
    static const char *const asks[] = {"which is larger: %d or %d?", "%dと%d、大きいのは？",
                                       "%d和%d哪个大？"};
    item_compare_numbers(r, it, asks, "compare", "pick", false);
}

const struct task_family compare_family = {"compare", true, 0, "the larger of two numbers",
                                           generate};
