/*
 * test_flock: the step of a flock against cases computed by hand and against its invariants, and
 * the mixes of adapters that a workflow passes to a scripted client.
 */
/* levels: once */
#define _GNU_SOURCE
#include "fixture.h"
#include "swarm/swarm.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static struct error err;

static void check_row(const double *got, double a, double b, double c) {
    const double want[] = {a, b, c};
    for (int k = 0; k < 3; k++)
        if (fabs(got[k] - want[k]) > 1e-12)
            fail_msg("(%.15g %.15g %.15g), not (%g %g %g)", got[0], got[1], got[2], a, b, c);
}

/* Two agents with the answer 0 and one with 3; the largest distance, 3, is 1 in the formulas. */
static const float zero[] = {0}, three[] = {3};
static const float *const two_and_one[] = {zero, zero, three};

/* Cohesion 1/2. Agent 0: mean (0 (w1 - w0), 1 (w2 - w0)) = (-1/2 0 1/2). Agent 2: mean (w0 - w2,
 * w1 - w2) = (1/2 1/2 -1). The second step starts from these weights. Agent 0: (w2 - w0) / 2 =
 * (-1/4 1/8 1/8). Agent 2: (w0 - w2 + w1 - w2) / 2 = (1/8 1/8 -1/4). */
static void test_cohesion(void **state) {
    (void)state;
    const struct flock_rules rules = {.cohesion = 0.5};
    struct boid_flock f;
    flock_init(&f, 3);
    check_row(f.weights[1], 0, 1, 0);
    check_row(f.velocity[1], -1.0 / 3, 2.0 / 3, -1.0 / 3);
    flock_step(&f, &rules, two_and_one, 1);
    check_row(f.weights[0], 0.75, 0, 0.25);
    check_row(f.weights[1], 0, 0.75, 0.25);
    check_row(f.weights[2], 0.25, 0.25, 0.5);
    check_row(f.velocity[2], 0.25, 0.25, -0.5);
    flock_step(&f, &rules, two_and_one, 1);
    check_row(f.weights[0], 0.625, 0.0625, 0.3125);
    check_row(f.weights[2], 0.3125, 0.3125, 0.375);
}

/* Alignment 1/2: v_j - v_i = w_j - w_i at first, whatever the answers are. Then the velocities are
 * (-1/2 1/4 1/4) and its permutations: agent 0 moves by (v1 + v2) / 2 - v0 = (3/4 -3/8 -3/8), half
 * of it from (1/2 1/4 1/4). */
static void test_alignment(void **state) {
    (void)state;
    const struct flock_rules rules = {.alignment = 0.5};
    struct boid_flock f;
    flock_init(&f, 3);
    flock_step(&f, &rules, two_and_one, 1);
    check_row(f.weights[0], 0.5, 0.25, 0.25);
    check_row(f.weights[2], 0.25, 0.25, 0.5);
    flock_step(&f, &rules, two_and_one, 1);
    check_row(f.weights[0], 0.875, 0.0625, 0.0625);
}

/* Separation 1/2 leaves unit vectors; after the step of test_cohesion agents 0 and 1 have equal
 * answers: agent 0 moves by (w0 - w1) / 4 = (3/16 -3/16 0), is clipped to (15/16 0 1/4) and divided
 * by 19/16. Agent 2 has no near agent. */
static void test_separation(void **state) {
    (void)state;
    const struct flock_rules separation = {.separation = 0.5}, cohesion = {.cohesion = 0.5};
    struct boid_flock f;
    flock_init(&f, 3);
    flock_step(&f, &separation, two_and_one, 1);
    for (int i = 0; i < 3; i++) check_row(f.weights[i], i == 0, i == 1, i == 2);
    check_row(f.velocity[0], 0, 0, 0);
    flock_step(&f, &cohesion, two_and_one, 1);
    flock_step(&f, &separation, two_and_one, 1);
    check_row(f.weights[0], 15.0 / 19, 0, 4.0 / 19);
    check_row(f.weights[1], 0, 15.0 / 19, 4.0 / 19);
    check_row(f.weights[2], 0.25, 0.25, 0.5);
}

/* An intermediate distance, in two dimensions: |x0 - x1| = 3, |x1 - x2| = 4, |x0 - x2| = 5. Agent
 * 0, cohesion 1: mean (3/5 (w1 - w0), w2 - w0) = (-8/10 3/10 5/10). */
static void test_distances(void **state) {
    (void)state;
    static const float x[3][2] = {{0, 0}, {3, 0}, {3, 4}};
    const float *const answers[] = {x[0], x[1], x[2]};
    const struct flock_rules rules = {.cohesion = 1};
    struct boid_flock f;
    flock_init(&f, 3);
    flock_step(&f, &rules, answers, 2);
    check_row(f.weights[0], 0.2, 0.3, 0.5);
}

/* Equal answers and cohesion alone: no agent moves, wherever it is. */
static void test_equal_answers(void **state) {
    (void)state;
    const struct flock_rules all = {0.3, 0.2, 0.4}, cohesion = {.cohesion = 7};
    const float *const equal[] = {three, three, three};
    struct boid_flock f, before;
    flock_init(&f, 3);
    flock_step(&f, &all, two_and_one, 1);
    before = f;
    flock_step(&f, &cohesion, equal, 1);
    for (int i = 0; i < 3; i++) {
        check_row(f.weights[i], before.weights[i][0], before.weights[i][1], before.weights[i][2]);
        for (int k = 0; k < 3; k++) assert_true(fabs(f.velocity[i][k]) < 1e-12);
    }
}

/* An agent without an answer keeps its weights; the others move as a flock of two. */
static void test_no_answer(void **state) {
    (void)state;
    const struct flock_rules rules = {.cohesion = 0.5};
    const float *const answers[] = {zero, NULL, three}, *const one[] = {NULL, NULL, three};
    struct boid_flock f;
    flock_init(&f, 3);
    flock_step(&f, &rules, one, 1);
    for (int i = 0; i < 3; i++) check_row(f.weights[i], i == 0, i == 1, i == 2);
    flock_step(&f, &rules, answers, 1);
    check_row(f.weights[0], 0.5, 0, 0.5);
    check_row(f.weights[1], 0, 1, 0);
    check_row(f.weights[2], 0.5, 0, 0.5);
}

/* Random flocks: weights stay on the simplex, velocities are the changes, and a flock in another
 * order moves in the same way. */
static void test_invariants(void **state) {
    (void)state;
    enum { D = 5, STEPS = 6 };
    for (uint32_t trial = 0; trial < 300; trial++) {
        struct rng rng = rng_make(11, RNG_SAMPLE, trial, 0);
        const int n = 1 + (int)(rng_u64(&rng) % TEAM_MAX);
        const struct flock_rules rules = {2 * (double)rng_uniform(&rng),
                                          2 * (double)rng_uniform(&rng),
                                          2 * (double)rng_uniform(&rng)};
        uint32_t order[TEAM_MAX];
        struct boid_flock f, turned;
        for (int i = 0; i < n; i++) order[i] = (uint32_t)i;
        rng_shuffle(&rng, order, (size_t)n);
        flock_init(&f, n);
        flock_init(&turned, n);
        for (int step = 0; step < STEPS; step++) {
            float x[TEAM_MAX][D];
            const float *answers[TEAM_MAX] = {NULL}, *turned_answers[TEAM_MAX] = {NULL};
            const struct boid_flock before = f;
            for (int i = 0; i < n; i++) {
                for (int k = 0; k < D; k++) x[i][k] = rng_uniform(&rng);
                if (rng_u64(&rng) % 8) answers[i] = x[rng_u64(&rng) % (uint64_t)(i + 1)];
            }
            for (int i = 0; i < n; i++) turned_answers[i] = answers[order[i]];
            flock_step(&f, &rules, answers, D);
            flock_step(&turned, &rules, turned_answers, D);
            for (int i = 0; i < n; i++) {
                double sum = 0;
                for (int k = 0; k < n; k++) {
                    const double w = f.weights[i][k];
                    assert_true(w >= 0 && w <= 1);
                    sum += w;
                    assert_true(f.velocity[i][k] == w - before.weights[i][k]);
                    assert_true(fabs(turned.weights[i][k] - f.weights[order[i]][order[k]]) < 1e-9);
                }
                assert_true(fabs(sum - 1) < 1e-12);
            }
        }
    }
}

/* a workflow with a flock */

/* Agents 0 and 1 answer a, agent 2 answers b, in every round. The mixes of the second and third
 * round are recorded; the embedding of b is 3, that of other texts 0. */
struct script {
    const struct agent *team;
    struct {
        bool mixed;
        int n;
        const struct adapter *adapter[8];
        float weight[8];
    } v[9];
    int n, n_embeds, n_texts;
};

static int script_ask(void *ctx, struct llm_call *calls, int n, struct error *e) {
    struct script *s = ctx;
    (void)e;
    for (int i = 0; i < n; i++, s->n++) {
        struct llm_call *c = &calls[i];
        assert_true(s->n < 9 && c->n_mix <= 8);
        s->v[s->n].mixed = c->mix != NULL;
        s->v[s->n].n = c->n_mix;
        for (int k = 0; k < c->n_mix; k++) {
            s->v[s->n].adapter[k] = c->mix[k].adapter;
            s->v[s->n].weight[k] = c->mix[k].weight;
        }
        c->answer.choice = c->agent - s->team == 2;
        c->answer.prob[c->answer.choice] = 1;
        c->n_prefilled = 10;
    }
    return OK;
}

static int script_embed(void *ctx, const char *const *texts, int n, float **out, int32_t *d,
                        int64_t *n_tokens, struct error *e) {
    struct script *s = ctx;
    (void)e;
    *d = 1;
    *n_tokens = n;
    *out = xcalloc((size_t)n, sizeof **out);
    for (int i = 0; i < n; i++) (*out)[i] = strcmp(texts[i], "b") == 0 ? 3 : 0;
    s->n_embeds++;
    s->n_texts += n;
    return OK;
}

#define TEXT(s) ((char *)(uintptr_t)(s))

/* The protocol's workflow: mixes of an agent with an adapter, one with a mix and the base model. */
static void test_workflow_mixes(void **state) {
    (void)state;
    struct adapter a = {0}, b = {0}, c = {0};
    const struct weighted_adapter mix[] = {{.adapter = &b, .weight = 0.5f},
                                           {.adapter = &c, .weight = 2}};
    const struct agent team[] = {
        {.name = "base"}, {.name = "mix", .mix = mix, .n_mix = 2}, {.name = "a", .adapter = &a}};
    const struct task_item item = {.question = TEXT("which?"),
                                   .choices = {TEXT("a"), TEXT("b")},
                                   .n_choices = 2,
                                   .lang = "en"};
    const struct flock_rules rules = {.separation = 0, .alignment = 0, .cohesion = 0.5};
    struct script s = {.team = team};
    const struct llm_client client = {&s, script_ask, script_embed};
    struct workflow *w = workflow_open("flock", &err);
    struct transcript o = {0};
    struct workflow_options options = {.temperature = -1, .rounds = 2, .flock = &rules};
    if (!w || workflow_run(w, &client, team, 3, &item, 1, &options, &o, NULL, &err) != OK)
        fail_msg("%s", err.text);
    assert_int_equal(s.n, 6);
    assert_int_equal(s.n_embeds, 1);
    assert_int_equal(s.n_texts, 2); // agents 0 and 1 have the same answer
    for (int i = 0; i < 3; i++) assert_false(s.v[i].mixed);
    assert_true(s.v[3].mixed && s.v[3].n == 1); // 3/4 base, 1/4 a
    assert_ptr_equal(s.v[3].adapter[0], &a);
    assert_true(s.v[3].weight[0] == 0.25f);
    assert_int_equal(s.v[4].n, 3); // 3/4 of the mix, 1/4 a
    assert_ptr_equal(s.v[4].adapter[1], &c);
    assert_true(s.v[4].weight[0] == 0.375f && s.v[4].weight[1] == 1.5f &&
                s.v[4].weight[2] == 0.25f);
    assert_int_equal(s.v[5].n, 3); // 1/4 base, 1/4 of the mix, 1/2 a
    assert_true(s.v[5].weight[0] == 0.125f && s.v[5].weight[2] == 0.5f);
    assert_int_equal(o.v[3].n_prefilled, 12); // with the tokens of the embeddings
    assert_int_equal(o.v[4].n_prefilled, 10);
    transcript_release(&o);

    const struct flock_rules none = {.separation = 0, .alignment = 0, .cohesion = 0};
    s = (struct script){.team = team};
    o = (struct transcript){0};
    options.flock = &none;
    assert_int_equal(workflow_run(w, &client, team, 3, &item, 1, &options, &o, NULL, &err), OK);
    assert_true(s.v[3].mixed && s.v[3].n == 0); // the base model
    assert_true(s.v[5].n == 1 && s.v[5].weight[0] == 1 && s.v[5].adapter[0] == &a);
    transcript_release(&o);

    const struct llm_client no_embeddings = {&s, script_ask};
    o = (struct transcript){0};
    assert_int_equal(workflow_run(w, &no_embeddings, team, 3, &item, 1, &options, &o, NULL, &err),
                     ERR_USAGE);
    assert_non_null(strstr(err.text, "has a flock, for which there are no embeddings here"));
    transcript_release(&o);
    workflow_free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cohesion),      cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_separation),    cmocka_unit_test(test_distances),
        cmocka_unit_test(test_equal_answers), cmocka_unit_test(test_no_answer),
        cmocka_unit_test(test_invariants),    cmocka_unit_test(test_workflow_mixes),
    };
    log_quiet = true;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
