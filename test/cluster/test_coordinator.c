/*
 * test_coordinator: the coordinator's decisions in single events, and in simulated histories.
 *
 * A history is a seed. From it come nodes of different speed, a network that delays, duplicates and
 * loses messages, nodes that are killed, start again, or send no heartbeats, and, with
 * replicas, a minority of faulty nodes; one has another model, and one unit fails on every node.
 * After the last fault all nodes work, and every unit must be done once, with the right result of
 * enough nodes, or given up for a reason; only faulty are quarantined, for ever; only nodes that
 * are up get units, and not more than their window; and a node that is silent does not stay up.
 * SHOAL_HISTORIES is the number of histories, SHOAL_SEED the first seed; a failure prints its seed.
 */
/* levels: once */
#include "fixture.h"

#include "cluster/balance.h"
#include "cluster/coordinator.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

/* single events */

static struct coordinator *c;
static struct coordinator_actions actions;

static void coordinator_begin(int replicas) {
    coordinator_free(c);
    c = coordinator_new(&(struct coordinator_options){.replicas = replicas, .identity = "same"});
    actions.n = 0;
}

static void step(struct coordinator_event e) {
    actions.n = 0;
    coordinator_step(c, &e, &actions);
}

static void node_joins(const char *name, double now) {
    step((struct coordinator_event){
        .kind = EVENT_NODE, .now = now, .node = name, .identity = "same", .threads = 1});
}

static void submit(const char *unit, int priority) {
    step((struct coordinator_event){.kind = EVENT_SUBMIT, .unit = unit, .priority = priority});
}

static void result(const char *node, const char *unit, const char *hash, double now) {
    step((struct coordinator_event){
        .kind = EVENT_RESULT, .now = now, .node = node, .unit = unit, .hash = hash});
}

static void failure(const char *node, const char *unit) {
    step((struct coordinator_event){
        .kind = EVENT_FAILURE, .node = node, .unit = unit, .text = "it failed"});
}

/* The action of this kind, of which there must be n; returns NULL for n = 0. */
static const struct coordinator_action *expect(enum coordinator_action_kind kind, int n) {
    const struct coordinator_action *first = NULL;
    int found = 0;
    for (int i = 0; i < actions.n; i++) {
        if (actions.v[i].kind != kind) continue;
        if (!first) first = &actions.v[i];
        found++;
    }
    assert_int_equal(found, n);
    return first;
}

static void a_unit_is_assigned_and_done(void **state) {
    (void)state;
    coordinator_begin(1);
    submit("u", 0);
    expect(ACTION_ASSIGN, 0);
    node_joins("a", 0);
    assert_string_equal(expect(ACTION_ASSIGN, 1)->node, "a");
    result("a", "u", "h", 1);
    assert_string_equal(expect(ACTION_DONE, 1)->hash, "h");
    assert_int_equal(coordinator_unfinished(c), 0);
    result("a", "u", "h", 2);
    expect(ACTION_DONE, 0);
}

static void units_have_an_order(void **state) {
    (void)state;
    coordinator_begin(1);
    submit("low", 0);
    submit("high", 5);
    submit("low too", 0);
    node_joins("a", 0);
    assert_string_equal(expect(ACTION_ASSIGN, NODE_WINDOW)->unit, "high");
    assert_string_equal(actions.v[actions.n - 1].unit, "low");
    result("a", "high", "h", 1);
    assert_string_equal(expect(ACTION_ASSIGN, 1)->unit, "low too");
}

static void other_identities_get_nothing(void **state) {
    (void)state;
    coordinator_begin(1);
    submit("u", 0);
    step((struct coordinator_event){.kind = EVENT_NODE, .node = "x", .identity = "other"});
    expect(ACTION_ASSIGN, 0);
}

static void lost_nodes_lose_their_units(void **state) {
    (void)state;
    coordinator_begin(1);
    node_joins("a", 0);
    submit("u", 0);
    node_joins("b", 0);
    step((struct coordinator_event){
        .kind = EVENT_NODE_GONE, .now = 1, .node = "a", .text = "it has left"});
    assert_int_equal(expect(ACTION_NODE_STATE, 1)->state, NODE_DEAD);
    assert_string_equal(expect(ACTION_NODE_STATE, 1)->text, "it has left");
    assert_string_equal(expect(ACTION_ASSIGN, 1)->node, "b");
    result("a", "u", "late", 2); // the unit is assigned to another node now
    expect(ACTION_DONE, 0);
    result("b", "u", "h", 3);
    expect(ACTION_DONE, 1);
}

static void silent_nodes_are_suspect_then_dead(void **state) {
    (void)state;
    coordinator_begin(1);
    node_joins("a", 0);
    submit("u", 0);
    step((struct coordinator_event){.kind = EVENT_TICK, .now = NODE_SUSPECT_SECONDS});
    assert_int_equal(expect(ACTION_NODE_STATE, 1)->state, NODE_SUSPECT);
    submit("v", 0);
    expect(ACTION_ASSIGN, 0);
    node_joins("a", 20);
    assert_string_equal(expect(ACTION_ASSIGN, 1)->unit, "v");
    step((struct coordinator_event){.kind = EVENT_TICK, .now = 20 + NODE_DEAD_SECONDS});
    expect(ACTION_NODE_STATE, 2);
    assert_int_equal(actions.v[1].state, NODE_DEAD);
}

static void failures_are_retried_then_given_up(void **state) {
    (void)state;
    coordinator_begin(1);
    node_joins("a", 0);
    node_joins("b", 0);
    submit("u", 0);
    const char *node = expect(ACTION_ASSIGN, 1)->node[0] == 'a' ? "a" : "b";
    for (int i = 1; i < UNIT_FAILURES; i++) {
        failure(node, "u");
        node = expect(ACTION_ASSIGN, 1)->node[0] == 'a' ? "a" : "b";
    }
    failure(node, "u");
    assert_string_equal(expect(ACTION_GIVE_UP, 1)->text, "it failed");
    assert_int_equal(coordinator_unfinished(c), 0);
}

static void a_vote_names_the_faulty_node(void **state) {
    (void)state;
    coordinator_begin(3);
    node_joins("a", 0);
    node_joins("b", 0);
    submit("u", 0);
    node_joins("faulty", 0);
    expect(ACTION_ASSIGN, 1);
    result("faulty", "u", "wrong", 1);
    result("a", "u", "right", 1);
    expect(ACTION_DONE, 0);
    result("b", "u", "right", 1);
    assert_string_equal(expect(ACTION_DONE, 1)->hash, "right");
    const struct coordinator_action *a = expect(ACTION_NODE_STATE, 1);
    assert_string_equal(a->node, "faulty");
    assert_int_equal(a->state, NODE_QUARANTINED);
    assert_string_equal(a->hash, "wrong");
    submit("v", 0);
    expect(ACTION_ASSIGN, 2);
    node_joins("faulty", 2);
    expect(ACTION_ASSIGN, 0);
    expect(ACTION_NODE_STATE, 0);
}

static void a_tie_asks_another_node(void **state) {
    (void)state;
    coordinator_begin(2);
    submit("u", 0);
    node_joins("a", 0);
    node_joins("b", 0);
    result("a", "u", "one", 1);
    result("b", "u", "two", 1);
    expect(ACTION_DONE, 0);
    node_joins("c", 2);
    assert_string_equal(expect(ACTION_ASSIGN, 1)->node, "c");
    result("c", "u", "two", 3);
    assert_string_equal(expect(ACTION_DONE, 1)->hash, "two");
    assert_string_equal(expect(ACTION_NODE_STATE, 1)->node, "a");
}

/* streamed units */

static void stream_begin(int window) {
    coordinator_free(c);
    c = coordinator_new(
        &(struct coordinator_options){.identity = "same", .window = window, .stall_seconds = 1});
    actions.n = 0;
}

static void part(const char *node, const char *unit, double now) {
    step((struct coordinator_event){.kind = EVENT_PART, .now = now, .node = node, .unit = unit});
}

static void tick(double now) {
    step((struct coordinator_event){.kind = EVENT_TICK, .now = now});
}

static void submit_at(const char *unit, double now) {
    step((struct coordinator_event){.kind = EVENT_SUBMIT, .now = now, .unit = unit});
}

static void a_stalled_stream_gets_another_node(void **state) {
    (void)state;
    stream_begin(8);
    node_joins("a", 1);
    submit_at("u", 1);
    node_joins("b", 1);
    part("a", "u", 1.5);
    assert_true(coordinator_runs(c, "a", "u"));
    assert_false(coordinator_runs(c, "b", "u"));
    tick(2.25);
    expect(ACTION_ASSIGN, 0);
    part("a", "u", 2.25); // the longest gap is 0.75 s now
    tick(4);
    expect(ACTION_ASSIGN, 0);
    tick(5.5);
    assert_string_equal(actions.v[0].node, "b");
    result("b", "u", "h", 6);
    expect(ACTION_DONE, 1);
    const struct coordinator_action *a = expect(ACTION_CANCEL, 1);
    assert_string_equal(a->node, "a");
    assert_string_equal(a->unit, "u");
}

static void a_stream_without_nodes_is_given_up(void **state) {
    (void)state;
    stream_begin(1);
    submit_at("u", 1);
    tick(1.5);
    expect(ACTION_GIVE_UP, 0);
    tick(2);
    expect(ACTION_GIVE_UP, 1);
    node_joins("a", 3);
    submit_at("v", 3);
    submit_at("w", 3); // waits for a place
    for (double now = 3.5; now < 9; now += 0.5) part("a", "v", now);
    tick(9);
    expect(ACTION_GIVE_UP, 0);
    tick(10.5); // 'a' hangs, and there is no other node
    expect(ACTION_GIVE_UP, 0);
    tick(11.5);
    assert_string_equal(expect(ACTION_GIVE_UP, 1)->unit, "v");
    assert_string_equal(expect(ACTION_CANCEL, 1)->unit, "v");
}

static void a_window_limits_the_units_of_a_node(void **state) {
    (void)state;
    stream_begin(3);
    node_joins("a", 1);
    for (int i = 0; i < 5; i++) {
        char unit[16];
        snprintf(unit, sizeof unit, "u%d", i);
        submit_at(unit, 1);
        expect(ACTION_ASSIGN, i < 3);
    }
    step((struct coordinator_event){.kind = EVENT_CANCEL, .now = 1.5, .unit = "u0"});
    assert_string_equal(expect(ACTION_CANCEL, 1)->unit, "u0");
    assert_string_equal(expect(ACTION_ASSIGN, 1)->unit, "u3");
}

static void a_wrong_node_is_quarantined(void **state) {
    (void)state;
    stream_begin(8);
    node_joins("a", 1);
    submit_at("u", 1);
    node_joins("b", 1);
    step((struct coordinator_event){.kind = EVENT_WRONG,
                                    .now = 2,
                                    .node = "a",
                                    .unit = "other",
                                    .hash = "",
                                    .text = "wrong tokens"});
    assert_int_equal(expect(ACTION_NODE_STATE, 1)->state, NODE_QUARANTINED);
    assert_string_equal(expect(ACTION_ASSIGN, 1)->node, "b");
    part("a", "u", 3);
    assert_false(coordinator_runs(c, "a", "u"));
}

/* balancers */

static void balancers_choose(void **state) {
    (void)state;
    struct cluster_node nodes[3] = {{.name = "a", .threads = 1, .n_units = 1},
                                    {.name = "b", .threads = 4, .n_units = 1, .load = 0.9},
                                    {.name = "c", .threads = 2}};
    const int may[] = {0, 1, 2};
    const struct balance_unit first = {.turn = 0}, second = {.turn = 1};
    assert_int_equal(balancer_find("round_robin")->choose(nodes, may, 3, &first), 0);
    assert_int_equal(balancer_find("round_robin")->choose(nodes, may, 3, &second), 1);
    assert_int_equal(balancer_find("least_loaded")->choose(nodes, may, 3, &first), 2);
    assert_int_equal(balancer_find("capability")->choose(nodes, may, 3, &first), 1);
    assert_int_equal(balancer_find("hybrid")->choose(nodes, may, 3, &first), 2);
    nodes[0].seconds_per_unit = 1;
    nodes[2].seconds_per_unit = 9; // slower than the number of its threads suggests
    assert_int_equal(balancer_find("hybrid")->choose(nodes, may, 3, &first), 0);
    assert_null(balancer_find("none"));
}

static void affinity_moves_only_lost_keys(void **state) {
    (void)state;
    struct cluster_node nodes[4] = {{.name = "a"}, {.name = "b"}, {.name = "c"}, {.name = "d"}};
    const int all[] = {0, 1, 2, 3}, without_b[] = {0, 2, 3};
    int on[4] = {0};
    for (int i = 0; i < 200; i++) {
        char hash[32];
        snprintf(hash, sizeof hash, "adapter %d", i);
        const struct balance_unit u = {.adapter = hash, .turn = i};
        int node = balancer_find("adapter")->choose(nodes, all, 4, &u);
        on[node]++;
        if (node != 1)
            assert_int_equal(balancer_find("adapter")->choose(nodes, without_b, 3, &u), node);
    }
    for (int i = 0; i < 4; i++) assert_in_range(on[i], 25, 80);
}

/* simulated histories */

enum { SIM_NODES = 7, SIM_UNITS = 40, SIM_EVENTS = 1 << 14 };
struct sim_event {
    double at;
    uint64_t order;
    enum {
        SIM_HEARTBEAT,
        SIM_ARRIVES,
        SIM_RESULT,
        SIM_FAILURE,
        SIM_GONE,
        SIM_KILL,
        SIM_START,
        SIM_TICK,
        SIM_SUBMIT
    } kind;
    int node, unit, life; /* life: of the node, when the event was made */
};
struct sim {
    uint64_t seed;
    struct rng r;
    double now, faults_end;
    int n_nodes, n_units, replicas;
    struct {
        bool alive, faulty, hangs, other; /* other: it has another model */
        int life;
        double speed, dead_since;
    } nodes[SIM_NODES];
    struct sim_event heap[SIM_EVENTS];
    int n_events;
    uint64_t order;
    int done[SIM_UNITS], failures[SIM_UNITS], poison; /* poison: the unit that always fails */
    bool answered[SIM_UNITS][SIM_NODES];
    enum node_state states[SIM_NODES];
    struct coordinator *c;
    struct coordinator_actions actions;
};

static void sim_fail(const struct sim *s, const char *what) {
    fail_msg("history %llu at %.1f s: %s; run with SHOAL_SEED=%llu SHOAL_HISTORIES=1",
             (unsigned long long)s->seed, s->now, what, (unsigned long long)s->seed);
}

static bool chance(struct sim *s, double p) {
    return (double)rng_uniform(&s->r) < p;
}

static void sim_add(struct sim *s, struct sim_event e) {
    assert_true(s->n_events < SIM_EVENTS);
    e.order = s->order++;
    s->heap[s->n_events++] = e;
}

/* Takes the earliest event. */
static struct sim_event sim_next(struct sim *s) {
    int first = 0;
    for (int i = 1; i < s->n_events; i++) {
        const struct sim_event *a = &s->heap[i], *b = &s->heap[first];
        if (a->at < b->at || (a->at <= b->at && a->order < b->order)) first = i;
    }
    struct sim_event e = s->heap[first];
    s->heap[first] = s->heap[--s->n_events];
    return e;
}

/* A message takes 1 to 50 ms; during the faults it may be late, come twice or be lost. */
static void sim_message(struct sim *s, struct sim_event e) {
    bool faults = s->now < s->faults_end;
    int copies = faults && chance(s, 0.05) ? 2 : faults && chance(s, 0.05) ? 0 : 1;
    for (int i = 0; i < copies; i++) {
        e.at = s->now + 0.001 + 0.05 * (double)rng_uniform(&s->r);
        if (faults && chance(s, 0.05)) e.at += 40 * (double)rng_uniform(&s->r);
        sim_add(s, e);
    }
}

static void sim_names(const struct sim_event *e, char node[32], char unit[32]) {
    snprintf(node, 32, "node-%d", e->node);
    snprintf(unit, 32, "unit-%d", e->unit);
}

static void sim_actions(struct sim *s) {
    for (int i = 0; i < s->actions.n; i++) {
        const struct coordinator_action *a = &s->actions.v[i];
        int node = *a->node ? atoi(a->node + 5) : -1, unit = *a->unit ? atoi(a->unit + 5) : -1,
            answers = 0;
        char right[32];
        snprintf(right, sizeof right, "right %d", unit);
        switch (a->kind) {
        case ACTION_ASSIGN:
            if (s->done[unit]) sim_fail(s, "a unit was assigned after its end");
            if (s->states[node] != NODE_UP) sim_fail(s, "a node that is not up got a unit");
            sim_message(s, (struct sim_event){.kind = SIM_ARRIVES, .node = node, .unit = unit});
            break;
        case ACTION_DONE:
            if (s->done[unit]++) sim_fail(s, "a unit was done twice");
            if (strcmp(a->hash, right) != 0) sim_fail(s, "a wrong result was accepted");
            for (int k = 0; k < s->n_nodes; k++) answers += s->answered[unit][k];
            if (2 * answers <= s->replicas) sim_fail(s, "too few nodes decided");
            break;
        case ACTION_GIVE_UP:
            if (s->done[unit]++) sim_fail(s, "a unit was given up after its end");
            if (strstr(a->text, "failed") && s->failures[unit] < UNIT_FAILURES)
                sim_fail(s, "a unit was given up too early");
            break;
        case ACTION_CANCEL:
            if (!s->done[unit]) sim_fail(s, "a unit was cancelled before its end");
            break;
        case ACTION_NODE_STATE:
            if (s->states[node] == NODE_QUARANTINED) sim_fail(s, "a quarantine ended");
            if (a->state == NODE_QUARANTINED && !s->nodes[node].faulty)
                sim_fail(s, "an honest node was quarantined");
            s->states[node] = a->state;
        }
    }
    s->actions.n = 0;
}

static void sim_step(struct sim *s, struct coordinator_event e) {
    e.now = s->now;
    coordinator_step(s->c, &e, &s->actions);
    sim_actions(s);
    int n;
    const struct cluster_node *nodes = coordinator_nodes(s->c, &n);
    for (int i = 0; i < n; i++) {
        int node = atoi(nodes[i].name + 5);
        if (nodes[i].n_units < 0 || nodes[i].n_units > NODE_WINDOW)
            sim_fail(s, "a node has more units than its window, or less than none");
        if (e.kind == EVENT_TICK && nodes[i].state == NODE_UP && !s->nodes[node].alive &&
            s->now - s->nodes[node].dead_since > NODE_DEAD_SECONDS + 50)
            sim_fail(s, "a dead node counts as up");
    }
}

/* A unit arrives at a node, which computes it; a node that hangs never answers. */
static void sim_arrives(struct sim *s, const struct sim_event *e) {
    if (!s->nodes[e->node].alive || (s->nodes[e->node].hangs && s->now < s->faults_end)) return;
    bool fails = e->unit == s->poison || (s->now < s->faults_end && chance(s, 0.02));
    sim_add(s, (struct sim_event){.at = s->now + s->nodes[e->node].speed,
                                  .kind = fails ? SIM_FAILURE : SIM_RESULT,
                                  .node = e->node,
                                  .unit = e->unit,
                                  .life = s->nodes[e->node].life});
}

/* The end of a computation: the message that has its result is sent. The kind of the message is the
 * same with life -1. */
static void sim_answer(struct sim *s, const struct sim_event *e) {
    char node[32], unit[32], hash[32];
    sim_names(e, node, unit);
    if (e->life >= 0) {
        struct sim_event m = *e;
        m.life = -1;
        if (s->nodes[e->node].alive && s->nodes[e->node].life == e->life) sim_message(s, m);
        return;
    }
    bool wrong = s->nodes[e->node].faulty || s->nodes[e->node].other;
    snprintf(hash, sizeof hash, wrong ? "wrong %d of %d" : "right %d", e->unit, e->node);
    if (e->kind == SIM_RESULT)
        s->answered[e->unit][e->node] = true;
    else
        s->failures[e->unit]++;
    sim_step(
        s, (struct coordinator_event){.kind = e->kind == SIM_RESULT ? EVENT_RESULT : EVENT_FAILURE,
                                      .node = node,
                                      .unit = unit,
                                      .hash = hash,
                                      .text = "it failed"});
}

static void sim_event_run(struct sim *s, const struct sim_event *e) {
    char node[32], unit[32];
    sim_names(e, node, unit);
    switch (e->kind) {
    case SIM_HEARTBEAT: // life -1: the message arrives
        if (e->life < 0) {
            sim_step(s, (struct coordinator_event){.kind = EVENT_NODE,
                                                   .node = node,
                                                   .identity =
                                                       s->nodes[e->node].other ? "other" : "same",
                                                   .threads = 1});
            break;
        }
        if (!s->nodes[e->node].alive || s->nodes[e->node].life != e->life) break;
        sim_message(s, (struct sim_event){.kind = SIM_HEARTBEAT, .node = e->node, .life = -1});
        sim_add(s, (struct sim_event){
                       .at = s->now + 5, .kind = SIM_HEARTBEAT, .node = e->node, .life = e->life});
        break;
    case SIM_ARRIVES:
        sim_arrives(s, e);
        break;
    case SIM_RESULT:
    case SIM_FAILURE:
        sim_answer(s, e);
        break;
    case SIM_GONE:
        sim_step(s, (struct coordinator_event){.kind = EVENT_NODE_GONE, .node = node});
        break;
    case SIM_KILL:
        if (!s->nodes[e->node].alive) break;
        s->nodes[e->node].alive = false;
        s->nodes[e->node].dead_since = s->now;
        if (chance(s, 0.5)) sim_message(s, (struct sim_event){.kind = SIM_GONE, .node = e->node});
        sim_add(s, (struct sim_event){.at = s->now + (chance(s, 0.2) ? 400 : 60) *
                                                         (double)rng_uniform(&s->r),
                                      .kind = SIM_START,
                                      .node = e->node});
        break;
    case SIM_START:
        s->nodes[e->node].alive = true;
        s->nodes[e->node].life++;
        sim_add(s, (struct sim_event){.at = s->now,
                                      .kind = SIM_HEARTBEAT,
                                      .node = e->node,
                                      .life = s->nodes[e->node].life});
        break;
    case SIM_TICK:
        sim_step(s, (struct coordinator_event){.kind = EVENT_TICK});
        sim_add(s, (struct sim_event){.at = s->now + 1, .kind = SIM_TICK});
        break;
    case SIM_SUBMIT:
        if (s->done[e->unit]) break;
        sim_step(s, (struct coordinator_event){
                        .kind = EVENT_SUBMIT, .unit = unit, .priority = e->unit % 3});
    }
}

static void sim_begin(struct sim *s, uint64_t seed) {
    *s = (struct sim){.seed = seed, .r = rng_make(seed, RNG_TEST, 27, 0)};
    s->replicas = 1 + (int)rng_below(&s->r, 4);
    s->n_nodes = s->replicas + (int)rng_below(&s->r, (uint32_t)(SIM_NODES - s->replicas));
    s->poison = rng_below(&s->r, 4) ? -1 : 0;
    s->n_units = 1 + (int)rng_below(&s->r, SIM_UNITS);
    s->faults_end = 200 * (double)rng_uniform(&s->r);
    int faulty = s->replicas > 1 && s->n_nodes > s->replicas ? (int)rng_below(&s->r, 2) : 0;
    for (int i = 0; i < s->n_nodes; i++) {
        s->nodes[i].faulty = i < faulty;
        s->nodes[i].hangs = chance(s, 0.1);
        s->nodes[i].speed = 0.1 + 10 * (double)rng_uniform(&s->r) * (double)rng_uniform(&s->r);
        sim_add(s, (struct sim_event){
                       .at = 5 * (double)rng_uniform(&s->r), .kind = SIM_START, .node = i});
        for (int k = (int)rng_below(&s->r, 4); k > 0; k--)
            sim_add(s, (struct sim_event){.at = s->faults_end * (double)rng_uniform(&s->r),
                                          .kind = SIM_KILL,
                                          .node = i});
    }
    s->nodes[s->n_nodes].other = true;
    s->nodes[s->n_nodes].speed = 0.1;
    sim_add(s, (struct sim_event){.at = 1, .kind = SIM_START, .node = s->n_nodes++});
    for (int i = 0; i < SIM_NODES; i++) s->states[i] = NODE_DEAD; // until they have been heard
    for (int i = 0; i < s->n_units; i++)
        for (int copies = 1 + (int)rng_below(&s->r, 2); copies > 0; copies--)
            sim_add(s, (struct sim_event){
                           .at = 20 * (double)rng_uniform(&s->r), .kind = SIM_SUBMIT, .unit = i});
    sim_add(s, (struct sim_event){.kind = SIM_TICK});
    s->c = coordinator_new(&(struct coordinator_options){
        .replicas = s->replicas, .identity = "same", .balancer = &balancers[rng_below(&s->r, 6)]});
}

static void sim_run(uint64_t seed) {
    static struct sim s;
    sim_begin(&s, seed);
    int left = s.n_units;
    while (left > 0) {
        struct sim_event e = sim_next(&s);
        s.now = MAX(s.now, e.at);
        sim_event_run(&s, &e);
        if (s.now > s.faults_end + 4000) sim_fail(&s, "a unit is not done");
        left = 0;
        for (int i = 0; i < s.n_units; i++) left += !s.done[i];
    }
    if (coordinator_unfinished(s.c)) sim_fail(&s, "the coordinator has units that are done");
    int n;
    const struct cluster_node *nodes = coordinator_nodes(s.c, &n);
    for (int i = 0; i < n; i++)
        if (nodes[i].n_units != 0) sim_fail(&s, "a node has units after their end");
    coordinator_free(s.c);
    free(s.actions.v);
}

static void histories_end_well(void **state) {
    const char *count = getenv("SHOAL_HISTORIES"), *first = getenv("SHOAL_SEED");
    uint64_t n = count ? strtoull(count, NULL, 10) : 10000,
             seed = first ? strtoull(first, NULL, 10) : 1;
    (void)state;
    for (uint64_t i = 0; i < n; i++) sim_run(seed + i);
}

static int actions_free(void **state) {
    (void)state;
    coordinator_free(c);
    free(actions.v);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_unit_is_assigned_and_done),
        cmocka_unit_test(units_have_an_order),
        cmocka_unit_test(other_identities_get_nothing),
        cmocka_unit_test(lost_nodes_lose_their_units),
        cmocka_unit_test(silent_nodes_are_suspect_then_dead),
        cmocka_unit_test(failures_are_retried_then_given_up),
        cmocka_unit_test(a_vote_names_the_faulty_node),
        cmocka_unit_test(a_tie_asks_another_node),
        cmocka_unit_test(a_stalled_stream_gets_another_node),
        cmocka_unit_test(a_stream_without_nodes_is_given_up),
        cmocka_unit_test(a_window_limits_the_units_of_a_node),
        cmocka_unit_test(a_wrong_node_is_quarantined),
        cmocka_unit_test(balancers_choose),
        cmocka_unit_test(affinity_moves_only_lost_keys),
        cmocka_unit_test(histories_end_well),
    };
    return cmocka_run_group_tests(tests, NULL, actions_free);
}
