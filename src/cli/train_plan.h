/* train_plan: `shoal train --dry-run`, for every method. */
#ifndef SHOAL_CLI_TRAIN_PLAN_H
#define SHOAL_CLI_TRAIN_PLAN_H

#include "cli/cli.h"
#include "train/train.h"

/* Reads the data, computes one pass to measure the cost of the run, and prints the plan. */
int train_plan_print(const struct cli_options *c, const struct train_request *q, struct error *err);

#endif
