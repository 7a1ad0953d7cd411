/*
 * test_circuit: every state of a circuit breaker with every event, the times of its probes, and
 * that a random sequence of events never admits two probes at once.
 */
/* levels: once */
#include "serve/circuit.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

enum { THRESHOLD = 3 };
#define COOLDOWN 10.0

static const struct circuit fresh = {.failure_threshold = THRESHOLD, .cooldown = COOLDOWN};

/* A circuit in a state; half-open ones with a running probe. */
static struct circuit in_state(enum circuit_state state) {
    struct circuit c = fresh;
    if (state == CIRCUIT_CLOSED) return c;
    for (int i = 0; i < THRESHOLD; i++) c = circuit_step(c, CIRCUIT_FAILURE, 100);
    return state == CIRCUIT_OPEN ? c : circuit_step(c, CIRCUIT_PROBE, 110);
}

/* The state after an event in the middle of the cooldown, and whether the event is admitted. */
static void test_table(void **state) {
    (void)state;
    enum { C = CIRCUIT_CLOSED, H = CIRCUIT_HALF_OPEN, O = CIRCUIT_OPEN };
    static const struct {
        int to;
        bool admitted;
    } want[CIRCUIT_N_STATES][CIRCUIT_N_EVENTS] = {
        [C] = {{C, true}, {C, false}, {C, false}, {C, false}, {C, false}, {C, false}, {C, false}},
        [H] = {{H, false}, {H, false}, {H, false}, {H, false}, {C, false}, {O, false}, {H, false}},
        [O] = {{O, false}, {O, false}, {O, false}, {O, false}, {O, false}, {O, false}, {O, false}}};
    for (int from = 0; from < CIRCUIT_N_STATES; from++)
        for (int event = 0; event < CIRCUIT_N_EVENTS; event++) {
            struct circuit c = circuit_step(in_state(from), event, 105);
            assert_int_equal(in_state(from).state, from);
            assert_int_equal(c.state, want[from][event].to);
            assert_int_equal(c.admitted, want[from][event].admitted);
        }
}

static void test_opens_after_failures_in_a_row(void **state) {
    (void)state;
    struct circuit c = fresh;
    for (int round = 0; round < 3; round++) { // a success ends the row
        for (int i = 1; i < THRESHOLD; i++) c = circuit_step(c, CIRCUIT_FAILURE, 1);
        assert_int_equal(c.state, CIRCUIT_CLOSED);
        assert_int_equal(c.failures, THRESHOLD - 1);
        c = circuit_step(c, CIRCUIT_SUCCESS, 1);
        assert_int_equal(c.failures, 0);
    }
    for (int i = 0; i < THRESHOLD; i++) c = circuit_step(c, CIRCUIT_FAILURE, 2);
    assert_int_equal(c.state, CIRCUIT_OPEN);
}

static void test_probe_after_cooldown(void **state) {
    (void)state;
    struct circuit c = in_state(CIRCUIT_OPEN); // open since 100
    assert_false(circuit_step(c, CIRCUIT_PROBE, 109.99).admitted);
    assert_int_equal(circuit_step(c, CIRCUIT_PROBE, 109.99).state, CIRCUIT_OPEN);
    c = circuit_step(c, CIRCUIT_PROBE, 110);
    assert_true(c.admitted);
    assert_int_equal(c.state, CIRCUIT_HALF_OPEN);
}

static void test_one_probe_at_a_time(void **state) {
    (void)state;
    struct circuit c = in_state(CIRCUIT_HALF_OPEN);
    assert_false(circuit_step(c, CIRCUIT_PROBE, 200).admitted);
    assert_false(circuit_step(c, CIRCUIT_REQUEST, 200).admitted);
    c = circuit_step(c, CIRCUIT_PROBE_ABANDONED, 200); // without a result the next one may begin
    assert_false(circuit_step(c, CIRCUIT_REQUEST, 200).admitted);
    c = circuit_step(c, CIRCUIT_PROBE, 200);
    assert_true(c.admitted);
    assert_false(circuit_step(c, CIRCUIT_PROBE, 200).admitted);
}

static void test_failed_probe_begins_the_cooldown_again(void **state) {
    (void)state;
    struct circuit c = circuit_step(in_state(CIRCUIT_HALF_OPEN), CIRCUIT_PROBE_FAILURE, 111);
    assert_int_equal(c.state, CIRCUIT_OPEN);
    assert_false(circuit_step(c, CIRCUIT_PROBE, 120.9).admitted);
    assert_true(circuit_step(c, CIRCUIT_PROBE, 121).admitted);
}

static void test_first_failure_after_a_probe_opens(void **state) {
    (void)state;
    struct circuit closed = circuit_step(in_state(CIRCUIT_HALF_OPEN), CIRCUIT_PROBE_SUCCESS, 111);
    assert_int_equal(closed.state, CIRCUIT_CLOSED);
    assert_true(circuit_step(closed, CIRCUIT_REQUEST, 112).admitted);
    assert_int_equal(circuit_step(closed, CIRCUIT_FAILURE, 112).state, CIRCUIT_OPEN);
    closed = circuit_step(closed, CIRCUIT_SUCCESS, 112);
    assert_int_equal(circuit_step(closed, CIRCUIT_FAILURE, 113).state, CIRCUIT_CLOSED);
}

/* Late results of requests that were admitted earlier. */
static void test_late_results_change_nothing(void **state) {
    (void)state;
    for (int from = CIRCUIT_HALF_OPEN; from <= CIRCUIT_OPEN; from++)
        for (int event = CIRCUIT_SUCCESS; event <= CIRCUIT_FAILURE; event++) {
            struct circuit before = in_state(from), c = circuit_step(before, event, 300);
            assert_int_equal(c.state, from);
            assert_int_equal(c.probing, before.probing);
            assert_true(c.open_to == before.open_to && c.failures == before.failures);
        }
}

static void test_threshold_of_one(void **state) {
    (void)state;
    struct circuit c = {.failure_threshold = 1, .cooldown = 0};
    c = circuit_step(c, CIRCUIT_FAILURE, 5);
    assert_int_equal(c.state, CIRCUIT_OPEN);
    c = circuit_step(c, CIRCUIT_PROBE, 5); // no cooldown
    assert_true(c.admitted);
    assert_int_equal(circuit_step(c, CIRCUIT_PROBE_SUCCESS, 5).failures, 0);
}

/* At most one probe runs, no request is admitted unless closed, and an open circuit waits. */
static void test_random_events(void **state) {
    (void)state;
    struct circuit c = fresh;
    uint32_t x = 1;
    int probes = 0, n_states[CIRCUIT_N_STATES] = {0};
    double now = 0;
    for (int i = 0; i < 100000; i++) {
        x = x * 1664525 + 1013904223;
        enum circuit_event event = (x >> 16) % CIRCUIT_N_EVENTS;
        if (event >= CIRCUIT_PROBE_SUCCESS && !probes) continue; // no probe can end
        struct circuit before = c;
        now += (x >> 8) % 4;
        c = circuit_step(c, event, now);
        if (event >= CIRCUIT_PROBE_SUCCESS) probes--;
        if (event == CIRCUIT_PROBE && c.admitted) probes++;
        assert_in_range(probes, 0, 1);
        assert_true(!c.admitted || (event == CIRCUIT_REQUEST && before.state == CIRCUIT_CLOSED) ||
                    (event == CIRCUIT_PROBE && before.state != CIRCUIT_CLOSED));
        assert_true(before.state != CIRCUIT_OPEN || c.state == CIRCUIT_OPEN ||
                    now >= before.open_to);
        assert_int_equal(c.state == CIRCUIT_HALF_OPEN && c.probing, probes);
        n_states[c.state]++;
    }
    for (int i = 0; i < CIRCUIT_N_STATES; i++) assert_in_range(n_states[i], 1000, 100000);
}

static void test_names(void **state) {
    (void)state;
    assert_string_equal(circuit_state_name(CIRCUIT_CLOSED), "closed");
    assert_string_equal(circuit_state_name(CIRCUIT_HALF_OPEN), "half-open");
    assert_string_equal(circuit_state_name(CIRCUIT_OPEN), "open");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_opens_after_failures_in_a_row),
        cmocka_unit_test(test_probe_after_cooldown),
        cmocka_unit_test(test_one_probe_at_a_time),
        cmocka_unit_test(test_failed_probe_begins_the_cooldown_again),
        cmocka_unit_test(test_first_failure_after_a_probe_opens),
        cmocka_unit_test(test_late_results_change_nothing),
        cmocka_unit_test(test_threshold_of_one),
        cmocka_unit_test(test_random_events),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
