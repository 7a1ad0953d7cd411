/* train_plan: shoal train --dry-run, for every method. */
#ifndef SHOAL_CLI_TRAIN_PLAN_H
#define SHOAL_CLI_TRAIN_PLAN_H

#include "cli/cli.h"
#include "train/train.h"

/* Reads the data, computes the minimum that shows the cost of the run, and prints it. */
int train_plan_print(const struct cli_options *c, const struct train_request *q, struct error *err);

#endif
