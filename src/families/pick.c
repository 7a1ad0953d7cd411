/* pick: the larger of two numbers; rare: the smaller one. */
#define _GNU_SOURCE
#include "families/internal.h"

const char *const pick_larger_asks[3] = {"pick the larger of %d and %d", "%dと%dから大を選んで",
                                         "从%d和%d中选大"};

static void generate(struct rng *r, bool rare, struct task_item *it) {
    static const char *const smaller[] = {"pick the smaller of %d and %d", "%dと%dから小を選んで",
                                          "从%d和%d中选小"};
    item_compare_numbers(r, it, rare ? smaller : pick_larger_asks, compare_asks, "pick", "compare",
                         rare);
}

const struct task_family pick_family = {"pick", false, 0.5f, "the larger of two; rare: the smaller",
                                        generate};
