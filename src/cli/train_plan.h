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
/* Reads the data, computes the minimum that shows the cost of the run, and prints it. */
int train_plan_print(const struct cli_options *c, const struct train_plan_request *q,
                     struct error *err);

#endif
