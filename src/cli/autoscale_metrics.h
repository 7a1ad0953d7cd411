/*
 * autoscale_metrics: the page /metrics of `shoal autoscale`.
 */
#ifndef SHOAL_CLI_AUTOSCALE_METRICS_H
#define SHOAL_CLI_AUTOSCALE_METRICS_H

#include "scaling/scaling.h"

struct autoscale_metrics;
/* Listens on the address; port 0: it only counts. */
struct autoscale_metrics *autoscale_metrics_open(const char *host, int64_t port, struct error *err);
/* failed: the target has not carried the decision out. */
void autoscale_metrics_add(struct autoscale_metrics *m, const struct scaling_decision *d,
                           bool failed);
void autoscale_metrics_close(struct autoscale_metrics *m); /* NULL is allowed */

#endif
