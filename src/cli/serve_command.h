/*
 * serve_command: the part that the commands serve and mcp share: opens a model with the memory plan
 * of a server, and runs the server.
 */
#ifndef SHOAL_CLI_SERVE_COMMAND_H
#define SHOAL_CLI_SERVE_COMMAND_H

#include "cli/cli.h"
#include "cli/setup.h"
#include "serve/serve.h"

/* Options of a command that runs a server. */
struct serve_command {
    struct serve_options serve; /* first: its rows are the first ones of the command */
    struct setup_options setup;
    struct {
        bool enabled;
        int64_t loras, rank, cpu, tensor_parallel;
    } vllm; /* flags of vLLM, for its users */
};
extern const struct option_row serve_command_rows[]; /* without those of `serve` */
/* Serves the models `args` until a signal arrives, or until `attend` of the options returns. */
int serve_command_run(const struct cli_options *c, const struct serve_command *o,
                      const struct strings *args, struct error *err);

/* train_in_server.c: serve_options.train. */
int train_in_server(const struct job_run *r, const struct train_host *h, struct error *err);

#endif
