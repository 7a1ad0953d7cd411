/*
 * alerts: the server's own watch over its metrics, for who runs no Prometheus.
 *
 * Every few seconds each rule of metrics.h is looked at. One that holds is pending until it has
 * held for as long as it says, then firing until its value is back a tenth within its limit
 * (hysteresis: Prometheus, which has the same rules, takes them back at the limit itself). Who is
 * to be told gets a message when an alert fires, every four hours as long as it does, and when it
 * is over: Alertmanager's webhook, version 4, or Slack's. A message that does not arrive is sent
 * again, later and later; the last 64 are kept for that.
 */
#ifndef SHOAL_ALERTS_H
#define SHOAL_ALERTS_H

#include "ops/metrics.h"

struct alerts_options {
    double seconds; /* between two looks; 0: nobody looks by itself, and nothing is sent */
    const struct strings *webhooks, *slacks; /* addresses; of Slack's the address is the secret */
    const char *source;                      /* where the server is, for the messages */
    void (*refresh)(void *ctx);              /* brings the metrics up to date */
    void *ctx;
};
struct alerts;
/* ERR_USAGE: an address that is none. The options and what they name are borrowed. */
struct alerts *alerts_new(struct metrics *m, const struct alerts_options *o, struct error *err);
void alerts_free(struct alerts *a); /* NULL is fine; what was not sent yet is lost */
/* A look at all rules as of `now`, seconds on any clock that only goes forward. */
void alerts_evaluate(struct alerts *a, double now);
/* [{alert, severity, summary, state: inactive, pending or firing, value or null, limit, since,
 * for}], since in unix seconds of the state, and {sent, failed, waiting} of the messages. */
json_t *alerts_json(struct alerts *a);

#endif
