/* reward_command: rewards from a program that runs in the sandbox. */
#ifndef SHOAL_TRAIN_REWARD_COMMAND_H
#define SHOAL_TRAIN_REWARD_COMMAND_H

#include "train/train.h"

/* A program that computes rewards. `command` is split at blanks or, with `shell`, is a line for
 * /bin/sh. reward_command_run implements score_batch of struct reward_fn: it runs the program once
 * on all n completions. */
struct reward_command;
struct reward_command *reward_command_open(const char *command, bool shell,
                                           const struct rl_options *o, struct error *err);
int reward_command_run(const struct reward_command *c, const struct reward_input *v, int n,
                       double *out, struct error *err);
void reward_command_close(struct reward_command *c); /* may be NULL */

#endif
