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
    char *out, *traces, *demonstrations, *calibrate; /* files to write, or NULL */
    int64_t n, samples;
};
/* Reads the file of --calibrate. */
int agent_calibration_read(const char *path, struct agent_calibration *out, struct error *err);
int agent_measure(const struct cli_options *c, const struct agent_measure_options *m,
                  const struct agent_options *o, uint64_t seed, struct error *err);

#endif
