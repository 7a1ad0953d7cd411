/*
 * agent_measure: `shoal agent --tasks`: measures an agent on questions with known answers, and
 * writes training data.
 */
#ifndef SHOAL_CLI_AGENT_MEASURE_H
#define SHOAL_CLI_AGENT_MEASURE_H

#include "agent/agent.h"
#include "cli/cli.h"

struct agent_measure_options {
    char *tasks, *grader;
    char *out, *traces, *demonstrations; /* files to write, or NULL */
    int64_t n, samples;
};
int agent_measure(const struct cli_options *c, const struct agent_measure_options *m,
                  const struct agent_options *o, uint64_t seed, struct error *err);

#endif
