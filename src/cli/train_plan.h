/* train_plan: shoal train --dry-run, for every method. */
#ifndef SHOAL_TRAIN_PLAN_H
#define SHOAL_TRAIN_PLAN_H

#include "cli/cli.h"
#include "train/train.h"

struct train_plan_request {
    const struct model *m;
    struct train_job *jobs;
    int n;
    enum train_method method;
    const struct train_options *train;
    const struct rl_options *policy;
    const struct es_options *es;
    struct pool *pool;
};
/* Reads the data, computes as little as shows what the run takes, and prints that. */
int train_plan_print(const struct cli_options *c, const struct train_plan_request *q,
                     struct error *err);

#endif
