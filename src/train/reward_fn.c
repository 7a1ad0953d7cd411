/*
 * reward_fn: rewards by name, which are checks (check/check.h).
 */
#define _GNU_SOURCE
#include "check/check.h"
#include "train/train.h"

#include <stdlib.h>

static int check_scores(void *ctx, const struct reward_input *v, int n, double *out,
                        struct error *err) {
    struct check_case *cases = xcalloc((size_t)MAX(n, 1), sizeof *cases);
    for (int i = 0; i < n; i++)
        cases[i] = (struct check_case){.item = v[i].item, .text = v[i].text, .ended = v[i].ended};
    int rc = check_run(ctx, cases, n, err);
    for (int i = 0; !rc && i < n; i++) out[i] = cases[i].score;
    free(cases);
    return rc;
}

static int item_check(void *ctx, const json_t *item, struct error *err) {
    return check_item(ctx, item, err);
}

int reward_fn_open(struct reward_fn *r, const struct rl_options *o, struct error *err) {
    const struct check_options options = {.label = "reward",
                                          .timeout = o->reward_timeout,
                                          .sandbox = o->reward_sandbox,
                                          .network = o->reward_network,
                                          .read = o->reward_read,
                                          .write = o->reward_write};
    struct check *c = check_open(o->reward, &options, err);
    *r = (struct reward_fn){0};
    if (!c) return err->code;
    *r = (struct reward_fn){.score_batch = check_scores, .check = item_check, .ctx = c};
    return OK;
}

void reward_fn_close(struct reward_fn *r) {
    check_free(r->ctx);
    *r = (struct reward_fn){0};
}
