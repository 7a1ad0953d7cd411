/* world_report: runs simulations, exports policies and compares runs for `shoal world`; prints the
 * results. */
#ifndef SHOAL_CLI_WORLD_REPORT_H
#define SHOAL_CLI_WORLD_REPORT_H

#include "cli/cli.h"
#include "world/world.h"

/* Runs a simulation, or prints its plan with --dry-run. */
int world_simulate(const struct cli_options *c, const struct simulation_request *q,
                   struct error *err);
/* Exports a policy of the run; name NULL: the best one. */
int world_export(const struct simulation_run_options *o, const char *run, const char *name,
                 struct error *err);
/* Compares the groups names[1], names[2] … after at_decisions, or at the ends of their runs if that
 * is 0; writes a chart (SVG) to o->out if it is set. */
int world_compare(const struct cli_options *c, const struct simulation_run_options *o,
                  const struct strings *names, int64_t at_decisions, struct error *err);

#endif
