/* circuit: the transitions of a circuit breaker, as a pure function. */
#include "serve/circuit.h"

static struct circuit circuit_open(struct circuit c, double now) {
    c.state = CIRCUIT_OPEN;
    c.failures = 0;
    c.probing = false;
    c.open_to = now + c.cooldown;
    return c;
}

static struct circuit closed_step(struct circuit c, enum circuit_event event, double now) {
    c.admitted = event == CIRCUIT_REQUEST;
    if (event == CIRCUIT_SUCCESS) c.failures = 0;
    if (event == CIRCUIT_FAILURE && ++c.failures >= c.failure_threshold)
        return circuit_open(c, now);
    return c;
}

static struct circuit open_step(struct circuit c, enum circuit_event event, double now) {
    if (event != CIRCUIT_PROBE || now < c.open_to) return c;
    c.state = CIRCUIT_HALF_OPEN;
    c.probing = c.admitted = true;
    return c;
}

static struct circuit half_open_step(struct circuit c, enum circuit_event event, double now) {
    switch (event) {
    case CIRCUIT_PROBE:
        c.admitted = !c.probing;
        c.probing = true;
        return c;
    case CIRCUIT_PROBE_SUCCESS:
        c.state = CIRCUIT_CLOSED;
        c.failures = c.failure_threshold - 1;
        c.probing = false;
        return c;
    case CIRCUIT_PROBE_FAILURE:
        return circuit_open(c, now);
    case CIRCUIT_PROBE_ABANDONED:
        c.probing = false;
        return c;
    default:
        return c;
    }
}

struct circuit circuit_step(struct circuit c, enum circuit_event event, double now) {
    c.admitted = false;
    switch (c.state) {
    case CIRCUIT_CLOSED:
        return closed_step(c, event, now);
    case CIRCUIT_OPEN:
        return open_step(c, event, now);
    default:
        return half_open_step(c, event, now);
    }
}

const char *circuit_state_name(enum circuit_state state) {
    static const char *const names[CIRCUIT_N_STATES] = {"closed", "half-open", "open"};
    return names[state];
}
