/*
 * test_swarm: votes and contributions on hand-made answers, debates with a scripted client, and the
 * client of a real engine.
 *
 * The scripted client answers from a table and records every call, so the test checks the rules of
 * a debate (which agents see which answers, how often, in what order) on the calls. Expected votes
 * and contributions are computed by hand or by brute force.
 */
#define _GNU_SOURCE
#include "fixture.h"
#include "swarm/swarm.h"

#include <math.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;

static int quiet(void **state) {
    (void)state;
    log_quiet = true;
    return 0;
}

static void close_to(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%.12g is not %.12g ± %.1g", got, want, tolerance);
}

/* An answer whose choice is its most probable one; equal probabilities: the lowest index. */
static struct agent_answer answer_of(float p0, float p1, float p2, float p3) {
    struct agent_answer a = {.prob = {p0, p1, p2, p3}};
    for (int i = 1; i < 4; i++)
        if (a.prob[i] > a.prob[a.choice]) a.choice = i;
    return a;
}

static int decide(const char *vote, const struct agent_answer *a, int n) {
    const struct vote *v = vote_find(vote);
    assert_non_null(v);
    return vote_decide(v, a, n, 4);
}

/* Two agents with low confidence against one with high confidence: each rule decides
 * differently. */
static void test_votes_differ(void **state) {
    (void)state;
    const struct agent_answer a[] = {answer_of(0.40f, 0.05f, 0.30f, 0.25f),
                                     answer_of(0.40f, 0.05f, 0.35f, 0.20f),
                                     answer_of(0.01f, 0.97f, 0.01f, 0.01f)};
    assert_int_equal(decide("majority", a, 3), 0);   /* 2 : 1 */
    assert_int_equal(decide("confidence", a, 3), 1); /* 0.80 : 0.97 */
    assert_int_equal(decide("logprob", a, 3),
                     1); /* .4·.4·.01 = .0016 : .05·.05·.97 = .0024 : .3·.35·.01 = .0011 */
    assert_int_equal(decide("borda", a, 3), 0); /* 3 + 3 + 0 : 0 + 0 + 3 : 2 + 2 + 0 : 1 + 1 + 0 */
}

/* A choice that no agent gave probability 0 wins against a choice that one agent did. */
static void test_logprob_is_a_veto(void **state) {
    (void)state;
    const struct agent_answer a[] = {answer_of(0.6f, 0.4f, 0, 0), answer_of(0.6f, 0.4f, 0, 0),
                                     answer_of(0, 0.4f, 0.6f, 0)};
    assert_int_equal(decide("logprob", a, 3), 1);
    assert_int_equal(decide("majority", a, 3), 0);
}

static void test_borda_counts_ranks(void **state) {
    (void)state;
    /* 3 2 1 0, 3 2 1 0, 0 2 1 3 and 0 2 1 3 (points per choice): 6, 8, 4, 6. Second for all agents
     * wins against first for half of them. */
    const struct agent_answer a[] = {
        answer_of(0.4f, 0.3f, 0.2f, 0.1f), answer_of(0.4f, 0.3f, 0.2f, 0.1f),
        answer_of(0.1f, 0.3f, 0.2f, 0.4f), answer_of(0.1f, 0.3f, 0.2f, 0.4f)};
    assert_int_equal(decide("borda", a, 4), 1);
    assert_int_equal(decide("majority", a, 4), 0);
}

/* Equal scores: the higher summed probability wins; equal sums: the lower index. */
static void test_ties(void **state) {
    (void)state;
    const struct agent_answer mass[] = {answer_of(0.5f, 0.25f, 0.25f, 0),
                                        answer_of(0, 0.25f, 0.75f, 0)};
    assert_int_equal(decide("majority", mass, 2), 2);
    const struct agent_answer even[] = {answer_of(0, 0.25f, 0.25f, 0.5f),
                                        answer_of(0, 0.5f, 0.25f, 0.25f)};
    assert_int_equal(decide("majority", even, 2), 1);
    assert_int_equal(decide("confidence", even, 2), 1);
    const struct agent_answer none[] = {{.choice = 0}, {.choice = 0}};
    assert_int_equal(decide("confidence", none, 2), 0);
    assert_null(vote_find("dictator"));
}

/* With one agent, every rule returns its answer. */
static void test_one_voter(void **state) {
    (void)state;
    for (const struct vote *v = vote_table; v->name; v++) {
        struct agent_answer a = answer_of(0.2f, 0.1f, 0.4f, 0.3f);
        assert_int_equal(vote_decide(v, &a, 1, 4), 2);
    }
}

enum { AGENTS = 4, ITEMS = 60 };

static struct task_item plain_items[ITEMS];

static void items_init(void) {
    static const char *const words[] = {"a", "b", "c", "d"};
    for (int i = 0; i < ITEMS; i++) {
        plain_items[i] = (struct task_item){
            .question = (char *)(uintptr_t) "?", .n_choices = 4, .correct = (i * 7 + 3) % 4};
        for (int c = 0; c < 4; c++) plain_items[i].choices[c] = (char *)(uintptr_t)words[c];
    }
}

/* Pseudo-random distributions. */
static void answers_sample(struct agent_answer *a, uint32_t seed) {
    struct rng r = rng_make(seed, RNG_TEST, 0, 0);
    for (int i = 0; i < AGENTS * ITEMS; i++) {
        float p[4], sum = 0;
        for (int c = 0; c < 4; c++) sum += p[c] = 0.01f + rng_uniform(&r);
        a[i] = answer_of(p[0] / sum, p[1] / sum, p[2] / sum, p[3] / sum);
    }
}

/* The vote's accuracy on all items for the agents in `members`, from the definition. */
static double team_accuracy(const struct vote *v, const struct agent_answer *answers,
                            unsigned members) {
    int right = 0;
    for (int i = 0; i < ITEMS; i++) {
        struct agent_answer team[AGENTS];
        int n = 0;
        for (int a = 0; a < AGENTS; a++)
            if (members >> a & 1) team[n++] = answers[a * ITEMS + i];
        right += vote_decide(v, team, n, 4) == plain_items[i].correct;
    }
    return (double)right / ITEMS;
}

static void test_leave_one_out_of_a_vote(void **state) {
    (void)state;
    struct agent_answer answers[AGENTS * ITEMS];
    struct stats_interval contribution_of[AGENTS];
    double spread = 0;
    items_init();
    for (uint32_t seed = 0; seed < 5; seed++) {
        answers_sample(answers, seed);
        for (const struct vote *v = vote_table; v->name; v++) {
            contribution_leave_one_out_vote(v, answers, AGENTS, plain_items, ITEMS,
                                            contribution_of);
            double all = team_accuracy(v, answers, 15);
            for (int a = 0; a < AGENTS; a++) {
                close_to(contribution_of[a].value, all - team_accuracy(v, answers, 15 & ~(1u << a)),
                         1e-12);
                assert_true(contribution_of[a].lo <= contribution_of[a].value &&
                            contribution_of[a].value <= contribution_of[a].hi);
                spread += fabs(contribution_of[a].value);
            }
        }
    }
    assert_true(spread > 0);
}

/* An agent that is always correct among agents that never are carries the team; with a duplicate of
 * it, its leave-one-out contribution is 0. */
static void test_contribution_of_the_only_correct_agent(void **state) {
    (void)state;
    struct agent_answer answers[AGENTS * ITEMS];
    struct stats_interval contribution_of[AGENTS];
    items_init();
    for (int i = 0; i < AGENTS * ITEMS; i++) {
        bool knows = i / ITEMS == 1;
        struct agent_answer a = {.choice = (plain_items[i % ITEMS].correct + !knows) % 4};
        a.prob[a.choice] = knows ? 1 : 0.3f;
        answers[i] = a;
    }
    contribution_leave_one_out_vote(vote_find("confidence"), answers, AGENTS, plain_items, ITEMS,
                                    contribution_of);
    close_to(contribution_of[0].value, 0, 0);
    close_to(contribution_of[1].value, 1, 0);
    memcpy(answers, answers + ITEMS, ITEMS * sizeof *answers);
    contribution_leave_one_out_vote(vote_find("confidence"), answers, AGENTS, plain_items, ITEMS,
                                    contribution_of);
    close_to(contribution_of[1].value, 0, 0);
}

static void test_novelty(void **state) {
    (void)state;
    struct agent_answer answers[3 * ITEMS];
    struct stats_interval novelty[3];
    double distance[9] = {0};
    items_init();
    const struct behaviour_answers x = {answers, plain_items, ITEMS};
    for (int i = 0; i < 3 * ITEMS; i++) answers[i] = answer_of(0.1f, 0.2f, 0.3f, 0.4f);
    behaviour_novelty(behaviour_js_divergence, &x, 3, 3, ITEMS, novelty, distance);
    for (int a = 0; a < 3; a++) close_to(novelty[a].value, 0, 1e-12);
    for (int i = 0; i < 3 * ITEMS; i++)
        answers[i] = i / ITEMS == 0   ? answer_of(1, 0, 0, 0)
                     : i / ITEMS == 1 ? answer_of(0, 0.5f, 0.5f, 0)
                                      : answer_of(0, 0, 0, 1);
    behaviour_novelty(behaviour_js_divergence, &x, 3, 3, ITEMS, novelty, distance);
    for (int a = 0; a < 3; a++) close_to(novelty[a].value, 1, 1e-12);
    /* (1, 0) and (½, ½): ½·log2(4/3) + ½·(½·log2(2/3) + ½·log2 2) = 0.3112781… */
    for (int i = 0; i < 2 * ITEMS; i++)
        answers[i] = i < ITEMS ? answer_of(1, 0, 0, 0) : answer_of(0.5f, 0.5f, 0, 0);
    behaviour_novelty(behaviour_js_divergence, &x, 2, 2, ITEMS, novelty, distance);
    close_to(novelty[0].value, 0.311278124459133, 1e-12);
    close_to(novelty[1].value, novelty[0].value, 1e-12);
    behaviour_novelty(behaviour_js_divergence, &x, 1, 1, ITEMS, novelty, distance);
    close_to(novelty[0].value, 0, 0);
    /* Two of three agents choose alike; the third is a witness without a vote. */
    for (int i = 0; i < 3 * ITEMS; i++) answers[i].choice = i / ITEMS == 2;
    behaviour_novelty(behaviour_disagreement, &x, 3, 2, ITEMS, novelty, distance);
    close_to(novelty[0].value, 0, 0);
    close_to(novelty[2].value, 1, 0);
    close_to(distance[1], 0, 0);
    close_to(distance[2], 1, 0);
    close_to(distance[5], 1, 0);
}

/* Agents "0" … "9" answer (own number + item) mod 4 in the first round. Later, with `follow`, agent
 * 0 adopts the last answer that it sees; the others repeat theirs. Every call is recorded with its
 * texts, which point into the items. */
struct turn { /* texts of a call in the "brief" workflow */
    const struct agent *agent;
    const struct task_item *item;
    char *own, *others[8]; /* NULL, and no others, in the first round */
    int n_others;
    bool chain_of_thought;
    float temperature;
    uint64_t seed;
    struct agent_answer answer;
};
struct script {
    struct turn turns[4096];
    int n, calls, fail_at;
    bool follow;
};

static int choice_index_of(const struct task_item *it, const char *word) {
    for (int c = 0; c < it->n_choices; c++)
        if (strcmp(it->choices[c], word) == 0) return c;
    fail_msg("'%s' is no choice", word);
    return -1;
}

static struct turn turn_parse(const struct llm_call *c) {
    struct turn t = {.agent = c->agent,
                     .item = c->item,
                     .chain_of_thought = c->chain_of_thought,
                     .temperature = c->temperature,
                     .seed = c->seed};
    int user_index = c->agent->system != NULL;
    assert_string_equal(c->messages[user_index].role, "user");
    assert_string_equal(c->messages[user_index].content, c->item->question);
    assert_true(c->n_messages == user_index + 1 || c->n_messages == user_index + 3);
    if (c->n_messages == user_index + 1) return t;
    t.own = xstrdup(c->messages[user_index + 1].content + strlen("answer: "));
    char *rest = xstrdup(c->messages[user_index + 2].content + strlen("others say ")), *next = rest,
         *end;
    *strstr(rest, ". answer again.") = 0;
    for (; next; next = end ? end + strlen(" and ") : NULL) {
        if ((end = strstr(next, " and "))) *end = 0;
        t.others[t.n_others++] = xstrdup(next);
    }
    free(rest);
    return t;
}

static int script_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    struct script *s = ctx;
    s->calls++;
    if (s->calls == s->fail_at) return error_set(e, ERR_STATE, "the script ends here");
    for (int i = 0; i < n; i++) {
        struct turn turn = turn_parse(&calls[i]), *t = &turn;
        struct llm_call *c = &calls[i];
        int agent = t->agent->name[0] - '0', item = (int)(t->item - plain_items);
        int choice = t->own ? choice_index_of(t->item, t->own) : (agent + item) % 4;
        if (s->follow && agent == 0 && t->n_others > 0)
            choice = choice_index_of(t->item, t->others[t->n_others - 1]);
        c->answer = (struct agent_answer){.choice = choice};
        for (int k = 0; k < 4; k++) c->answer.prob[k] = k == choice ? 0.7f : 0.1f;
        c->n_prefilled = 10;
        c->n_generated = 3;
        c->truncated = agent == 2;
        assert_true(s->n < (int)ARRAY_LEN(s->turns));
        t->answer = c->answer;
        s->turns[s->n++] = *t;
    }
    return OK;
}

static struct script script;
static const struct agent team[] = {
    {.name = "0"}, {.name = "1", .view = 1}, {.name = "2", .view = 2}, {.name = "3", .view = 3}};

/* Clears the recorded calls. */
static void script_clear(void) {
    for (int i = 0; i < script.n; i++) {
        free(script.turns[i].own);
        for (int k = 0; k < script.turns[i].n_others; k++) free(script.turns[i].others[k]);
    }
    script.n = 0;
}

static struct llm_client script_begin(bool follow) {
    script_clear();
    memset(&script, 0, sizeof script);
    script.follow = follow;
    items_init();
    return (struct llm_client){&script, script_ask};
}

static struct debate_options options_make(int rounds, uint64_t seed) {
    return (struct debate_options){.rounds = rounds, .vote = vote_find("majority"), .seed = seed};
}

static struct debate debate_run_team(const struct llm_client *a, int n_agents, int n_items,
                                     int rounds, uint64_t seed) {
    struct debate d;
    struct debate_options o = options_make(rounds, seed);
    if (debate_run(a, team, n_agents, plain_items, n_items, &o, &d, NULL, &err) != OK)
        fail_msg("%s", err.text);
    return d;
}

/* From the second round on, agent `me` sees its own last answer and those of all others, and no
 * more. */
static void turn_check(const struct debate *d, const struct turn *t, int round, int me, int item) {
    const struct agent_answer *last =
        d->answers + (size_t)(round - 1) * (size_t)(d->n_agents * d->n_items);
    int heard[4] = {0}, said[4] = {0};
    assert_string_equal(t->own, plain_items[item].choices[last[me * d->n_items + item].choice]);
    assert_int_equal(t->n_others, d->n_agents - 1);
    for (int i = 0; i < t->n_others; i++) heard[choice_index_of(t->item, t->others[i])]++;
    for (int a = 0; a < d->n_agents; a++)
        if (a != me) said[last[a * d->n_items + item].choice]++;
    assert_memory_equal(heard, said, sizeof heard);
}

static void test_rounds(void **state) {
    (void)state;
    struct llm_client a = script_begin(false);
    struct debate d = debate_run_team(&a, 4, 12, 3, 9);
    assert_int_equal(script.calls, 3); /* a whole round is one batch */
    assert_int_equal(script.n, 3 * 4 * 12);
    for (int i = 0; i < script.n; i++) {
        int round = i / 48, me = i % 4, item = i % 48 / 4;
        const struct turn *t = &script.turns[i];
        assert_ptr_equal(t->agent, &team[me]);
        assert_ptr_equal(t->item, &plain_items[item]);
        assert_true(t->temperature == 0);
        if (round == 0)
            assert_true(t->own == NULL && t->n_others == 0);
        else
            turn_check(&d, t, round, me, item);
    }
    assert_int_equal(d.prefilled, script.n * 10);
    assert_int_equal(d.generated, script.n * 3);
    assert_int_equal(d.truncated, script.n / 4);
    assert_int_equal(d.flips_good, 0);
    assert_int_equal(d.flips_bad, 0);
    debate_release(&d);
}

/* The order of the other agents depends on the item and the seed, and is equal in every run. */
static void test_order_of_other_answers(void **state) {
    (void)state;
    struct llm_client a = script_begin(false);
    struct debate d = debate_run_team(&a, 4, 40, 2, 1);
    debate_release(&d);
    d = debate_run_team(&a, 4, 40, 2, 1);
    debate_release(&d);
    d = debate_run_team(&a, 4, 40, 2, 2);
    debate_release(&d);
    int one_run = script.n / 3, other_seed = 0, first_is[4] = {0};
    for (int i = one_run / 2; i < one_run; i++) {
        const struct turn *x = &script.turns[i], *y = &script.turns[one_run + i],
                          *z = &script.turns[2 * one_run + i];
        for (int k = 0; k < 3; k++) {
            assert_string_equal(x->others[k], y->others[k]);
            other_seed += strcmp(x->others[k], z->others[k]) != 0;
        }
        /* Index of the agent that is shown first; in the first round all four answers differ. */
        int item = (int)(x->item - plain_items);
        first_is[(choice_index_of(x->item, x->others[0]) - item % 4 + 4) % 4]++;
    }
    assert_true(other_seed > 100);
    for (int k = 0; k < 4; k++) assert_true(first_is[k] > 20);
}

/* Agent 0 adopts what it sees: its gains and losses are counted, and the votes change. */
static void test_flips(void **state) {
    (void)state;
    struct llm_client a = script_begin(true);
    struct debate d = debate_run_team(&a, 4, ITEMS, 4, 3);
    int64_t good = 0, bad = 0;
    size_t cells = 4 * ITEMS;
    for (size_t i = cells; i < 4 * cells; i++) {
        int correct = plain_items[i % ITEMS].correct;
        bool now = d.answers[i].choice == correct, before = d.answers[i - cells].choice == correct;
        good += now && !before;
        bad += before && !now;
    }
    assert_true(good > 0 && bad > 0);
    assert_int_equal(d.flips_good, good);
    assert_int_equal(d.flips_bad, bad);
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < ITEMS; i++) {
            struct agent_answer said[4];
            for (int k = 0; k < 4; k++)
                said[k] = d.answers[(size_t)r * cells + (size_t)(k * ITEMS + i)];
            bool right = vote_decide(vote_find("majority"), said, 4, 4) == plain_items[i].correct;
            assert_int_equal(d.vote_correct[r * ITEMS + i], right);
            assert_int_equal(d.first_correct[i], d.answers[i].choice == plain_items[i].correct);
        }
    debate_release(&d);
}

/* The team does not change the first round: agent 1 has the same calls alone and in a team of
 * four. */
static void test_first_round_is_independent(void **state) {
    (void)state;
    struct llm_client a = script_begin(true);
    struct debate d = debate_run_team(&a, 4, 20, 2, 1), alone;
    struct debate_options o = options_make(1, 77);
    int from = script.n;
    assert_int_equal(debate_run(&a, &team[1], 1, plain_items, 20, &o, &alone, NULL, &err), OK);
    for (int i = 0; i < 20; i++) {
        const struct turn *x = &script.turns[4 * i + 1], *y = &script.turns[from + i];
        assert_memory_equal(&x->answer, &y->answer, sizeof x->answer);
        assert_ptr_equal(x->agent, y->agent);
        assert_ptr_equal(x->item, y->item);
        assert_true(!x->own && !y->own && x->n_others == 0 && y->n_others == 0 &&
                    x->seed == y->seed);
    }
    debate_release(&d);
    debate_release(&alone);
}

static void test_invalid_debates_are_refused(void **state) {
    (void)state;
    struct llm_client a = script_begin(false);
    struct debate d;
    struct debate_options o = options_make(0, 1);
    assert_int_equal(debate_run(&a, team, 4, plain_items, 3, &o, &d, NULL, &err), ERR_USAGE);
    debate_release(&d);
    o.rounds = 1;
    assert_int_equal(debate_run(&a, team, 0, plain_items, 3, &o, &d, NULL, &err), ERR_USAGE);
    assert_int_equal(debate_run(&a, team, 18, plain_items, 3, &o, &d, NULL, &err), ERR_USAGE);
    assert_int_equal(script.calls, 0);
    /* An error of the client is returned, and everything allocated before is released. */
    script.fail_at = 2;
    o.rounds = 3;
    assert_int_equal(debate_run(&a, team, 4, plain_items, 3, &o, &d, NULL, &err), ERR_STATE);
    assert_string_equal(err.text, "the script ends here");
    debate_release(&d);
}

static void test_transcript(void **state) {
    (void)state;
    struct llm_client a = script_begin(false);
    struct debate d = debate_run_team(&a, 2, 3, 2, 1);
    struct buf b = {0};
    debate_transcript(&d, team, &plain_items[1], 1, vote_find("majority"), &b);
    assert_string_equal(b.data, "?\n[0][R0] b (0.70)\n[1][R0] c (0.70)\nvote after round 0: b\n"
                                "[0][R1] b (0.70)\n[1][R1] c (0.70)\nvote after round 1: b\n");
    buf_release(&b);
    debate_release(&d);
}

/* Compared with debates that run without each agent. Agent 0 adopts the last answer it sees, so
 * that a debate is more than a vote. */
static void test_leave_one_out_of_a_debate(void **state) {
    (void)state;
    enum { N = 40 };
    struct llm_client a = script_begin(true);
    struct debate_options o = options_make(2, 5);
    struct debate full = debate_run_team(&a, 4, N, 2, 5);
    struct stats_interval contribution_of[4];
    assert_int_equal(contribution_leave_one_out(&a, team, 4, plain_items, N, &o, &full,
                                                contribution_of, NULL, &err),
                     OK);
    bool some = false;
    for (int out = 0; out < 4; out++) {
        struct agent rest[3];
        struct debate d;
        int n = 0, with = 0, without = 0;
        for (int i = 0; i < 4; i++)
            if (i != out) rest[n++] = team[i];
        script_clear();
        assert_int_equal(debate_run(&a, rest, 3, plain_items, N, &o, &d, NULL, &err), OK);
        for (int i = 0; i < N; i++) {
            with += full.vote_correct[N + i];
            without += d.vote_correct[N + i];
        }
        close_to(contribution_of[out].value, (double)(with - without) / N, 1e-12);
        some |= with != without;
        debate_release(&d);
    }
    assert_true(some);
    struct debate one = debate_run_team(&a, 1, N, 2, 5);
    assert_int_equal(contribution_leave_one_out(&a, team, 1, plain_items, N, &o, &one,
                                                contribution_of, NULL, &err),
                     ERR_USAGE);
    debate_release(&one);
    debate_release(&full);
}

/* k samples per item, each with its own seed at temperature above 0, and their majority. */
static void test_self_consistency(void **state) {
    (void)state;
    enum { N = 20, K = 5 };
    struct llm_client a = script_begin(false);
    uint8_t right[N];
    struct self_consistency s;
    assert_int_equal(self_consistency_sample(&a, &team[1], plain_items, N, K, true, 0.7f, 24, 4,
                                             NULL, &s, NULL, &err),
                     OK);
    assert_int_equal(script.n, N * K);
    for (int k = 0; k < K; k++) {
        assert_int_equal(s.generated[k], N * 3);
        assert_int_equal(s.prefilled[k], N * 10);
    }
    for (int i = 0; i < N * K; i++) {
        const struct turn *t = &script.turns[i];
        assert_true(t->chain_of_thought && t->temperature == 0.7f && !t->own);
        for (int j = 0; j < i; j++) assert_true(t->seed != script.turns[j].seed);
    }
    for (int k = 1; k <= K; k++) {
        self_consistency_vote(&s, plain_items, k, right);
        for (int i = 0; i < N; i++)
            assert_int_equal(right[i], (1 + i) % 4 == plain_items[i].correct);
    }
    self_consistency_release(&s);
    uint64_t first = script.turns[0].seed;
    assert_int_equal(self_consistency_sample(&a, &team[1], plain_items, 1, 1, true, 0.7f, 24, 5,
                                             NULL, &s, NULL, &err),
                     OK);
    assert_true(script.turns[script.n - 1].seed != first);
    self_consistency_release(&s);
}

/* The quorum is more than half of all agents, otherwise the vote has no result. */
static void test_quorum(void **state) {
    (void)state;
    const struct agent_answer a[] = {answer_of(1, 0, 0, 0), answer_of(1, 0, 0, 0),
                                     answer_of(0, 1, 0, 0), answer_of(0, 0, 1, 0)};
    const struct vote *v = vote_find("quorum");
    assert_int_equal(vote_decide(v, a, 3, 4), 0);
    assert_int_equal(vote_decide(v, a, 4, 4), -1);
    assert_int_equal(vote_decide(v, a + 2, 2, 4), -1);
    assert_int_equal(vote_decide(v, a, 1, 4), 0);
}

/* A game with a known solution: the glove game. Agents 0 and 1 have left gloves, 2 a right one;
 * a pair has the value 1. Shapley: 1/6, 1/6, 2/3; Banzhaf: 1/4, 1/4, 3/4. Any coalition wins
 * item 1. */
static int glove_play(void *ctx, uint32_t mask, uint8_t *right, struct error *e) {
    int *calls = ctx;
    ++*calls;
    if (mask == 0) return error_set(e, ERR_STATE, "nobody was asked to play");
    right[0] = (mask & 4) && (mask & 3);
    right[1] = 1;
    return OK;
}

static void test_exact_contributions_of_glove_game(void **state) {
    (void)state;
    int calls = 0;
    uint8_t right[8][2], item[8];
    struct contribution w[3];
    struct coalition_game g = {&calls, glove_play, 3, 2};
    assert_int_equal(coalition_game_play_all(&g, &right[0][0], &err), OK);
    assert_int_equal(calls, 7);
    for (int s = 0; s < 8; s++) item[s] = right[s][0];
    contribution_exact(item, 3, 1, w);
    static const double shapley[] = {1.0 / 6, 1.0 / 6, 2.0 / 3}, banzhaf[] = {0.25, 0.25, 0.75},
                        out[] = {0, 0, 1};
    for (int a = 0; a < 3; a++) {
        close_to(w[a].shapley.value, shapley[a], 1e-12);
        close_to(w[a].banzhaf.value, banzhaf[a], 1e-12);
        close_to(w[a].leave_one_out.value, out[a], 1e-12);
    }
    contribution_exact(&right[0][0], 3, 2, w); // efficiency: the values add up to v(N)
    close_to(w[0].shapley.value + w[1].shapley.value + w[2].shapley.value, 1, 1e-12);
    close_to(w[0].shapley.value, (shapley[0] + 1.0 / 3) / 2, 1e-12);
}

/* Sampling plays no coalition twice, its error decreases with the number of samples, and its
 * intervals contain the exact values. The values are votes on existing answers. */
static void test_sampled_contributions(void **state) {
    (void)state;
    enum { N = 60, FIVE = 5 };
    struct agent_answer answers[FIVE * N];
    struct rng rng = rng_make(3, RNG_TEST, 1, 0);
    uint8_t *right = xmalloc(((size_t)1 << FIVE) * N);
    struct contribution exact[FIVE], few[FIVE], many[FIVE];
    double far[2] = {0};
    items_init();
    for (int i = 0; i < FIVE * N; i++) {
        bool knows = rng_uniform(&rng) < 0.3f + 0.1f * (float)(i / N);
        int choice = knows ? plain_items[i % N].correct : (int)rng_below(&rng, 4);
        answers[i] = answer_of(0.1f, 0.1f, 0.1f, 0.1f);
        answers[i].prob[choice] = 0.7f;
        answers[i].choice = choice;
    }
    struct vote_game v = {vote_find("majority"), answers, plain_items, FIVE, N, NULL};
    struct coalition_game g = vote_game(&v);
    assert_int_equal(coalition_game_play_all(&g, right, &err), OK);
    contribution_exact(right, FIVE, N, exact);
    assert_int_equal(contribution_sampled(&g, 8, 1, few, &err), OK);
    assert_int_equal(contribution_sampled(&g, 800, 1, many, &err), OK);
    for (int a = 0; a < FIVE; a++) {
        far[0] += fabs(few[a].shapley.value - exact[a].shapley.value);
        far[1] += fabs(many[a].shapley.value - exact[a].shapley.value);
        assert_true(fabs(many[a].shapley.value - exact[a].shapley.value) < 0.02);
        assert_true(fabs(many[a].banzhaf.value - exact[a].banzhaf.value) < 0.03);
        assert_true(few[a].shapley.lo <= exact[a].shapley.value &&
                    few[a].shapley.hi >= exact[a].shapley.value);
        close_to(many[a].leave_one_out.value, exact[a].leave_one_out.value, 1e-12);
    }
    assert_true(far[1] < far[0] && far[0] > 0);
    free(right);
}

static int share_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    int *whole = ctx;
    (void)e;
    for (int i = 0; i < n; i++) {
        const struct task_item *it = calls[i].item;
        const char *q = calls[i].messages[0].content;
        int member = calls[i].agent->name[0] - '0';
        assert_string_equal(q, it->views[member]);
        *whole += strcmp(q, it->question) == 0;
        /* the highest of its own value and those it was sent */
        int best = -1, values[EVAL_MAX_CHOICES];
        for (int c = 0; c < it->n_choices; c++) values[c] = atoi(it->choices[c]);
        for (int c = 2 * member; c < 2 * member + 2; c++)
            if (best < 0 || values[c] > values[best]) best = c;
        for (int c = 0; calls[i].n_messages > 1 && c < it->n_choices; c++) {
            char *heard = xasprintf(" %s", it->choices[c]);
            const char *at = strstr(calls[i].messages[2].content, heard);
            if (at && strchr(" .", at[strlen(heard)]) && values[c] > values[best]) best = c;
            free(heard);
        }
        calls[i].answer.choice = best;
        calls[i].answer.prob[best] = 1;
    }
    return OK;
}

/* Each agent sees a part. An agent that reads the others knows all; an agent that only votes does
 * not. */
static void test_agents_combine_partial_information(void **state) {
    (void)state;
    enum { N = 120 };
    struct task_item items[N];
    int whole = 0, together = 0, apart = 0;
    for (int i = 0; i < N; i++) {
        split_evidence_item(split_evidence_find("largest"), SPLIT_TEST, 5, (uint32_t)i, &items[i]);
        assert_int_equal(items[i].n_views, 3);
        assert_int_equal(family_split_of(items[i].key), SPLIT_TEST);
        for (int c = 0; c < 6; c++)
            assert_true(strstr(items[i].views[c / 2], items[i].choices[c]) != NULL &&
                        atoi(items[i].choices[c]) <= atoi(items[i].choices[items[i].correct]));
    }
    struct llm_client a = {&whole, share_ask};
    struct debate_options o = {.rounds = 2, .vote = vote_find("majority"), .temperature = -1};
    struct debate d;
    assert_int_equal(debate_run(&a, team, 3, items, N, &o, &d, NULL, &err), OK);
    for (int i = 0; i < N; i++) {
        together += d.decision_correct[i];
        apart += d.vote_correct[i];
    }
    assert_int_equal(whole, 0);
    assert_int_equal(together, N);
    assert_in_range(apart, N / 6, N * 3 / 5);
    debate_release(&d);
    for (int i = 0; i < N; i++) task_item_release(&items[i]);
}

/* A hundred answers with confidence 0.9, 60 of them correct: the calibration error is 0.3, and a
 * fitted temperature removes it. */
static void test_calibration(void **state) {
    (void)state;
    enum { N = ITEMS };
    struct agent_answer answers[N];
    struct debate d = {.n_agents = 1, .n_items = N, .rounds = 1, .answers = answers};
    items_init();
    for (int i = 0; i < N; i++) {
        int choice = i % 5 < 3 ? plain_items[i].correct : (plain_items[i].correct + 1) % 4;
        for (int c = 0; c < 4; c++) answers[i].prob[c] = c == choice ? 0.9f : 0.1f / 3;
        answers[i].choice = choice;
    }
    double share = 0;
    for (int i = 0; i < N; i++) share += (double)(i % 5 < 3) / N;
    struct debate_calibration c = debate_calibration(&d, plain_items, 0);
    assert_int_equal(c.n, N);
    close_to(c.ece, 0.9 - share, 1e-6);
    assert_true(c.temperature > 1.5 && c.ece_fitted < 0.02 && c.nll_fitted < c.nll);
    for (int i = 0; i < N; i++) answers[i].choice = -1; // no prediction to fit
    c = debate_calibration(&d, plain_items, 0);
    assert_true(c.n == 0 && c.temperature == 1 && c.ece == 0);
}

/* The engine client with a small random model and byte tokens: its answers are arbitrary but
 * reproducible. */

struct engine_setup {
    struct model *model;
    struct engine *engine;
    struct adapter *adapter;
    struct engine_client speaker;
    struct task_item items[6];
    struct agent agents[2];
    char path[64];
};

static void setup_open(struct engine_setup *s, bool stored) {
    *s = (struct engine_setup){0};
    snprintf(s->path, sizeof s->path, "/tmp/shoal-test-swarm-%d.db", (int)getpid());
    struct model_config c;
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    c.max_seq_len = 512;
    s->model = model_new_random(&c, 3, NUMERIC_EXACT);
    if (!s->model->tok) s->model->tok = tokenizer_new_bytes(c.vocab_size);
    s->adapter = fixture_adapter(&c, 4, "all-linear", 0.3f, 8);
    struct engine_options eo = {.max_rows = 128, .max_seqs = 16, .max_len = 512};
    s->engine = engine_new(s->model, &eo, &err);
    assert_non_null(s->engine);
    s->speaker = (struct engine_client){.engine = s->engine, .model = s->model};
    s->speaker.store = stored ? store_open(s->path, &err) : NULL;
    for (int i = 0; i < 6; i++)
        family_item(i % fry_count(), SPLIT_DEV, 2, (uint32_t)i, false, &s->items[i]);
    s->agents[0] = (struct agent){.name = "base"};
    s->agents[1] = (struct agent){.name = "other", .system = "be bold", .adapter = s->adapter};
}

static void setup_close(struct engine_setup *s) {
    char side[80];
    for (int i = 0; i < 6; i++) task_item_release(&s->items[i]);
    store_close(s->speaker.store);
    engine_free(s->engine);
    adapter_release(s->adapter);
    model_close(s->model);
    for (int i = 0; i < 3; i++) {
        snprintf(side, sizeof side, "%s%s", s->path, (const char *[]){"", "-wal", "-shm"}[i]);
        unlink(side);
    }
}

static struct debate setup_debate(struct engine_setup *s, int n_agents) {
    struct llm_client a = engine_client_as_llm(&s->speaker);
    struct debate_options o = {.rounds = 2,
                               .chain_of_thought = true,
                               .max_tokens = 3,
                               .vote = vote_find("confidence"),
                               .seed = 6};
    struct debate d;
    if (debate_run(&a, s->agents, n_agents, s->items, 6, &o, &d, NULL, &err) != OK)
        fail_msg("%s", err.text);
    return d;
}

/* Stored results are not computed again and are equal bit by bit, also to those computed without a
 * store. */
static void test_calls_are_cached(void **state) {
    (void)state;
    struct engine_setup s;
    setup_open(&s, true);
    struct debate first = setup_debate(&s, 2);
    assert_int_equal(s.speaker.n_calls, 24);
    assert_int_equal(s.speaker.n_computed, 24);
    struct debate again = setup_debate(&s, 2);
    assert_int_equal(s.speaker.n_calls, 48);
    assert_int_equal(s.speaker.n_computed, 24);
    size_t bytes = 24 * sizeof *first.answers;
    assert_memory_equal(first.answers, again.answers, bytes);
    assert_true(first.prefilled == again.prefilled && first.generated == again.generated &&
                first.truncated == again.truncated);
    assert_true(first.prefilled > 0 && first.generated > 0);
    setup_close(&s);
    setup_open(&s, false);
    struct debate apart = setup_debate(&s, 2);
    assert_memory_equal(first.answers, apart.answers, bytes);
    debate_release(&first);
    debate_release(&again);
    debate_release(&apart);
    setup_close(&s);
}

/* Results with another type of keys and values are other results; those with f32 have the keys of
 * version 0.1, in which the type was not part of the key. */
static void test_kv_changes_calls(void **state) {
    (void)state;
    struct engine_setup s;
    setup_open(&s, true);
    struct debate f32 = setup_debate(&s, 2);
    assert_int_equal(s.speaker.n_computed, 24);
    struct engine *own = s.engine;
    struct engine_options o = {
        .max_len = engine_max_len(own), .max_seqs = engine_max_seqs(own), .kv_elem = DTYPE_I8};
    s.speaker.engine = engine_new(s.model, &o, &err);
    assert_non_null(s.speaker.engine);
    struct debate i8 = setup_debate(&s, 2);
    assert_int_equal(s.speaker.n_computed, 48);
    assert_memory_not_equal(f32.answers, i8.answers, 24 * sizeof *f32.answers);
    engine_free(s.speaker.engine);
    s.speaker.engine = own;
    debate_release(&f32);
    debate_release(&i8);
    setup_close(&s);
}

/* Teams with a common agent share its first answers; an agent without others to read shares all its
 * answers. */
static void test_teams_share_first_answers(void **state) {
    (void)state;
    struct engine_setup s;
    setup_open(&s, true);
    struct debate both = setup_debate(&s, 2);
    int64_t before = s.speaker.n_computed;
    struct debate one = setup_debate(&s, 1);
    assert_int_equal(s.speaker.n_computed, before);
    assert_memory_equal(one.answers, both.answers, 6 * sizeof *one.answers);
    assert_memory_equal(one.answers, one.answers + 6, 6 * sizeof *one.answers);
    assert_int_equal(one.flips_good + one.flips_bad, 0);
    debate_release(&both);
    debate_release(&one);
    setup_close(&s);
}

/* Another adapter or another part of the question is another call. A zero adapter answers like the
 * base model. */
static void test_adapters_change_calls(void **state) {
    (void)state;
    struct engine_setup s;
    setup_open(&s, true);
    struct adapter *zero = adapter_scale(s.adapter, 0);
    s.agents[1] = (struct agent){.name = "zero", .adapter = zero};
    struct debate d = setup_debate(&s, 2);
    assert_memory_equal(d.answers, d.answers + 6, 6 * sizeof *d.answers);
    s.agents[1].adapter = s.adapter;
    struct debate with = setup_debate(&s, 2);
    int differ = 0;
    for (int i = 0; i < 6; i++)
        differ += memcmp(&with.answers[i], &with.answers[6 + i], sizeof *with.answers) != 0;
    assert_int_equal(differ, 6);
    debate_release(&d);
    debate_release(&with);
    adapter_release(zero);
    setup_close(&s);
}

/* Samples with different seeds are different calls; greedy samples are the same call for every
 * seed. */
static void test_sample_seeds(void **state) {
    (void)state;
    struct engine_setup s;
    setup_open(&s, true);
    struct llm_client a = engine_client_as_llm(&s.speaker);
    for (int i = 0; i < 4; i++) {
        struct chat_message chat[2];
        struct llm_call c = llm_call_question(&s.agents[0], &s.items[0], -1, chat);
        c.chain_of_thought = true;
        c.max_tokens = 3;
        c.seed = 1 + (uint64_t)(i % 2);
        c.temperature = i < 2 ? 2.0f : 0.0f;
        assert_int_equal(a.ask(a.ctx, &c, 1, &err), OK);
        llm_call_release(&c);
    }
    assert_int_equal(s.speaker.n_computed, 3);
    setup_close(&s);
}

/* Free text comes with its tokens: their log-probabilities add up to that of the whole reply as one
 * choice. The store returns them; a record of an older version without tokens is completed. */
static void test_free_text_returns_tokens(void **state) {
    (void)state;
    struct engine_setup s;
    setup_open(&s, true);
    struct llm_client a = engine_client_as_llm(&s.speaker);
    static char question[] = "何ですか";
    const struct task_item it = {.question = question, .correct = -1};
    struct llm_call c[3];
    struct chat_message chat[2];
    for (int i = 0; i < 3; i++) {
        c[i] = llm_call_question(&s.agents[1], &it, -1, chat);
        c[i].max_tokens = 12;
        c[i].temperature = i == 2 ? 1.5f : 0;
        c[i].seed = 3;
        assert_int_equal(a.ask(a.ctx, &c[i], 1, &err), OK);
        assert_true(c[i].n_tokens > 0 && c[i].n_tokens <= c[i].n_generated);
        assert_int_equal(c[i].ends[c[i].n_tokens - 1], strlen(c[i].text));
        for (int k = 1; k < c[i].n_tokens; k++) assert_true(c[i].ends[k] >= c[i].ends[k - 1]);
    }
    assert_int_equal(s.speaker.n_computed, 2);
    assert_int_equal(c[0].n_tokens, c[1].n_tokens);
    assert_memory_equal(c[0].ends, c[1].ends, (size_t)c[0].n_tokens * sizeof(int32_t));
    assert_memory_equal(c[0].logprobs, c[1].logprobs, (size_t)c[0].n_tokens * sizeof(float));
    struct token_ids prompt = {0};
    int32_t end = tokenizer_eot(s.model->tok);
    assert_int_equal(chat_encode(s.model->tok, chat, 2, true, &prompt, NULL, &err), OK);
    struct engine_request said = {.prompt = prompt.v,
                                  .n_prompt = prompt.n,
                                  .adapter = s.adapter,
                                  .max_tokens = 12,
                                  .loop_tokens = 16,
                                  .sampling = {.top_p = 1},
                                  .stop = &end,
                                  .n_stop = end >= 0};
    assert_int_equal(engine_run(s.engine, &said, 1, NULL, &err), OK);
    const struct token_seq whole = {said.out, said.n_out};
    struct engine_request judged = {.prompt = prompt.v,
                                    .n_prompt = prompt.n,
                                    .adapter = s.adapter,
                                    .sampling = {.top_p = 1},
                                    .choices = &whole,
                                    .n_choices = 1};
    assert_int_equal(engine_run(s.engine, &judged, 1, NULL, &err), OK);
    double sum = 0;
    for (int i = 0; i < c[0].n_tokens; i++) sum += (double)c[0].logprobs[i];
    assert_int_equal(said.n_out, c[0].n_tokens);
    close_to(sum, (double)judged.choice_logprob[0], 1e-3);
    engine_request_release(&said);
    engine_request_release(&judged);
    token_ids_release(&prompt);
    struct llm_call first = c[0];
    sqlite3 *db;
    assert_int_equal(sqlite3_open(s.path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "DELETE FROM said", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    for (int i = 0; i < 2; i++) {
        llm_call_release(&c[1]);
        c[1] = llm_call_question(&s.agents[1], &it, -1, chat);
        c[1].max_tokens = 12;
        assert_int_equal(a.ask(a.ctx, &c[1], 1, &err), OK);
        assert_int_equal(s.speaker.n_computed, 3);
        assert_memory_equal(first.logprobs, c[1].logprobs, (size_t)first.n_tokens * sizeof(float));
    }
    for (int i = 0; i < 3; i++) llm_call_release(&c[i]);
    setup_close(&s);
}

/* Replies of equal length, whose choices differ from call to call unless `agree`. */
struct replies {
    bool agree;
    int n;
};

static int replies_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    struct replies *s = ctx;
    (void)e;
    for (int i = 0; i < n; i++, s->n++) {
        struct llm_call *c = &calls[i];
        c->text = xasprintf("answer: %s", c->item->choices[s->agree ? 0 : s->n % 4]);
        c->answer.choice = s->agree || c->reply == REPLY_JUDGE ? 0 : s->n % 4;
        c->answer.prob[c->answer.choice] = 1;
        c->n_prefilled = 10;
        c->n_generated = 3;
    }
    return OK;
}

static int replies_embed(void *ctx, const char *const *texts, int n, float **out, int32_t *d,
                         int64_t *n_tokens, struct error *e) {
    (void)ctx, (void)texts, (void)e;
    *d = 1;
    *n_tokens = n;
    *out = xcalloc((size_t)n, sizeof **out);
    return OK;
}

struct progress_seen {
    int64_t first_total, done, total;
    bool exceeded;
};

static bool progress_watch(void *ctx, const struct progress *p, const char *detail) {
    struct progress_seen *s = ctx;
    (void)detail;
    if (s->first_total == 0) s->first_total = p->total;
    s->exceeded |= p->done > p->total;
    s->done = p->done;
    s->total = p->total;
    return false;
}

/* The progress of the report of a debate with the replies. */
static struct progress_seen report_watch(const char *protocol, struct replies *replies,
                                         bool credit_debate) {
    struct progress_seen seen = {0};
    struct log_sink sink = {.progress = progress_watch, .ctx = &seen},
                    *before = log_set_sink(&sink);
    struct workflow *w = workflow_open(protocol, &err);
    struct debate_options o = options_make(3, 1);
    const struct llm_client client = {replies, replies_ask, replies_embed};
    const struct debate_report_options needs = {.name = "watched",
                                                .samples = 64,
                                                .temperature = 1,
                                                .max_tokens = 3,
                                                .credit_debate = credit_debate,
                                                .credit_none = !credit_debate};
    struct progress bar;
    o.workflow = w;
    o.chain_of_thought = true;
    items_init();
    json_t *r = debate_report_run(&client, team, 4, plain_items, ITEMS, &o, &needs, &bar, &err);
    if (!r) fail_msg("%s: %s", protocol, err.text);
    progress_finish(&bar, NULL);
    log_set_sink(before);
    json_decref(r);
    workflow_free(w);
    return seen;
}

/* The progress of a debate has its calls and those of its baselines as the total from the start. A
 * debate that ends early reduces it; no part exceeds it. */
static void test_progress_totals(void **state) {
    (void)state;
    for (int credit = 0; credit < 2; credit++) {
        struct replies differ = {0};
        struct progress_seen seen = report_watch("brief", &differ, credit);
        /* each of the 15 coalitions of 4 agents debates for 3 rounds; one agent ends at once */
        int64_t coalitions = credit ? ITEMS * (4 + (4 * 8 - 4) * 3) : 0;
        assert_int_equal(seen.first_total, ITEMS * 4 * 3 * 2 + coalitions);
        assert_int_equal(seen.done, seen.first_total);
    }
    const char *name;
    for (int i = 0; (name = workflow_builtin(i, NULL)); i++) {
        for (int agree = 0; agree < 2; agree++) {
            struct replies replies = {.agree = agree};
            struct progress_seen seen = report_watch(name, &replies, false);
            if (seen.exceeded || seen.done != seen.total || seen.done != replies.n)
                fail_msg("%s: %d calls, %d of %d done", name, replies.n, (int)seen.done,
                         (int)seen.total);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_progress_totals),
        cmocka_unit_test(test_votes_differ),
        cmocka_unit_test(test_logprob_is_a_veto),
        cmocka_unit_test(test_borda_counts_ranks),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_one_voter),
        cmocka_unit_test(test_leave_one_out_of_a_vote),
        cmocka_unit_test(test_contribution_of_the_only_correct_agent),
        cmocka_unit_test(test_novelty),
        cmocka_unit_test(test_rounds),
        cmocka_unit_test(test_order_of_other_answers),
        cmocka_unit_test(test_flips),
        cmocka_unit_test(test_first_round_is_independent),
        cmocka_unit_test(test_invalid_debates_are_refused),
        cmocka_unit_test(test_transcript),
        cmocka_unit_test(test_leave_one_out_of_a_debate),
        cmocka_unit_test(test_self_consistency),
        cmocka_unit_test(test_quorum),
        cmocka_unit_test(test_exact_contributions_of_glove_game),
        cmocka_unit_test(test_sampled_contributions),
        cmocka_unit_test(test_calibration),
        cmocka_unit_test(test_agents_combine_partial_information),
        cmocka_unit_test(test_calls_are_cached),
        cmocka_unit_test(test_kv_changes_calls),
        cmocka_unit_test(test_teams_share_first_answers),
        cmocka_unit_test(test_adapters_change_calls),
        cmocka_unit_test(test_sample_seeds),
        cmocka_unit_test(test_free_text_returns_tokens),
    };
    int failed = cmocka_run_group_tests(tests, quiet, NULL);
    script_clear();
    return failed;
}
