/*
 * circuit: a circuit breaker. It keeps requests away from a link that fails, and finds out whether
 * the link works again.
 *
 *               failure_threshold failures in a row
 *     closed ──────────────────────────────────────▶ open ◀──────────────┐
 *       ▲                                              │ PROBE, after    │ PROBE_FAILURE
 *       │ PROBE_SUCCESS                                ▼ cooldown        │
 *       └────────────────────────────────────────── half-open ───────────┘
 *
 * Only while it is closed are requests admitted. In the half-open state one probe runs at a time. A
 * probe that ends without a result leaves it half-open, and the next probe may begin at once. After
 * a probe has closed the circuit, the first failure opens it again, until a request has succeeded:
 * a probe may be less than a request is.
 *
 * Results of requests that began before the circuit opened change nothing until it is closed.
 */
#ifndef SHOAL_SERVE_CIRCUIT_H
#define SHOAL_SERVE_CIRCUIT_H

#include <stdbool.h>

enum circuit_state { CIRCUIT_CLOSED, CIRCUIT_HALF_OPEN, CIRCUIT_OPEN, CIRCUIT_N_STATES };
enum circuit_event {
    CIRCUIT_REQUEST, /* a request asks to be admitted */
    CIRCUIT_SUCCESS, /* results of admitted requests */
    CIRCUIT_FAILURE,
    CIRCUIT_PROBE, /* a probe asks to be admitted */
    CIRCUIT_PROBE_SUCCESS,
    CIRCUIT_PROBE_FAILURE,
    CIRCUIT_PROBE_ABANDONED, /* it ended without a result */
    CIRCUIT_N_EVENTS
};
/* A circuit that is zero is closed. The limits are constant. */
struct circuit {
    int failure_threshold; /* at least 1 */
    double cooldown;       /* seconds */
    enum circuit_state state;
    int failures;   /* in a row, while closed */
    double open_to; /* while open: the time of the first probe */
    bool probing;   /* while half-open: a probe runs */
    bool admitted;  /* whether the last event was admitted */
};
/* The circuit after an event at the time `now`, in seconds. Only CIRCUIT_REQUEST and CIRCUIT_PROBE
 * can be admitted. */
struct circuit circuit_step(struct circuit c, enum circuit_event event, double now);
const char *circuit_state_name(enum circuit_state state); /* "closed", "half-open", "open" */

#endif
