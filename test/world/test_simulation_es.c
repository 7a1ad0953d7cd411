/*
 * test_simulation_es: policies that learn by evolution strategies. The mean over directions of the
 * estimate from members' rewards is the gradient that the trainer computes; simulations have the
 * same result for any number of threads and after an interruption; and a policy learns a bandit,
 * with one agent and with eight.
 *
 * The model is tiny and initialised from a seed, with fry's tokenizer. Tests of the estimate use
 * plain gradient descent: the estimate is minus the change over the rate.
 */
/* levels: once */
#define _GNU_SOURCE
#include "fixture.h"
#include "folder.h"
#include "old_defaults.h"
#include "world/world.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

enum { ACTIONS = 6, AGENTS = 4 };

static const char prompt[] = "x o f u o - - e + - n:";
static const char *const words[ACTIONS] = {"north", "south", "east", "west", "pick", "drop"};
static const double reward_of[ACTIONS] = {0.3, -1, 0.7, 0.1, 1.2, -0.4};

static struct model *model;
static struct adapter *start;
static struct error err;
static char folder[64];

/* an environment whose reward is reward_of[action] */

struct bandit {
    struct environment e;
    int tick;
};

static int bandit_reset(void *ctx, uint64_t seed, struct error *e) {
    struct bandit *b = ctx;
    (void)seed, (void)e;
    b->tick = 0;
    return OK;
}

static bool bandit_prompt(void *ctx, int agent, struct buf *out) {
    const struct bandit *b = ctx;
    if (agent == 3 && b->tick >= 11) return false;
    buf_printf(out, "x o %c f%s:", "abc"[b->tick % 3], agent % 2 ? " u" : "");
    return true;
}

static int bandit_step(void *ctx, const int16_t *actions, double *rewards, struct error *e) {
    struct bandit *b = ctx;
    (void)e;
    for (int i = 0; i < b->e.n_agents; i++) rewards[i] = actions[i] < 0 ? 0 : reward_of[actions[i]];
    b->tick++;
    return OK;
}

static void bandit_init(struct bandit *b) {
    *b = (struct bandit){0};
    b->e = (struct environment){.ctx = b,
                                .n_agents = AGENTS,
                                .n_actions = ACTIONS,
                                .actions = words,
                                .reset = bandit_reset,
                                .prompt = bandit_prompt,
                                .step = bandit_step};
}

static int suite_setup(void **state) {
    (void)state;
    struct model_config c;
    if (model_preset_find("tiny-llama", &c, &err) != OK) return -1;
    if (!(model = fixture_model_with_fry_tokenizer(c))) return -1;
    start = fixture_adapter(&model->config, 2, "q_proj,down_proj", 0.15f, 100);
    snprintf(folder, sizeof folder, "/tmp/shoal-simulation-es-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int suite_teardown(void **state) {
    (void)state;
    adapter_release(start);
    model_close(model);
    return folder_remove(folder);
}

/* a learner whose agents get the same prompt in every tick */

struct learner_test {
    struct bandit env;
    struct policy_runner *runner;
    struct learner_options o;
    struct learner *l;
    int n_agents, tick;
    double logp[8][ACTIONS]; /* [n_agents] log-probabilities of the last tick */
};

static void string_set(char **to, const char *name) {
    free(*to);
    *to = xstrdup(name);
}

/* lr: rate of plain gradient descent. */
static struct learner_options options(int window, double sigma, const char *shaping, double lr) {
    struct learner_options o = {0};
    options_default(learner_option_rows, &o);
    learner_options_set_old_defaults(&o);
    string_set(&o.learn, "es");
    string_set(&o.shaping, shaping);
    string_set(&o.train.optim, "sgd");
    o.perturbation_ticks = window;
    o.sigma = sigma;
    o.warmup_steps = 0;
    o.train.momentum = 0;
    o.train.max_grad_norm = 0;
    o.train.lr = lr;
    return o;
}

/* Takes ownership of the options. */
static void learner_test_open_policies(struct learner_test *s, struct learner_options o,
                                       int n_policies, int n_agents, uint64_t seed) {
    struct adapter *adapters[] = {start, start};
    *s = (struct learner_test){.o = o, .n_agents = n_agents};
    struct policy_runner_options ao = {.temperature = 1, .max_len = 64};
    bandit_init(&s->env);
    s->runner = policy_runner_new(model, &s->env.e, &ao, &err);
    struct learner_config b = {.m = model,
                               .policy_runner = s->runner,
                               .temperature = 1,
                               .n_actions = ACTIONS,
                               .n_policies = n_policies,
                               .n_agents = n_agents,
                               .adapters = adapters,
                               .seed = seed};
    s->l = s->runner ? learner_new(&s->o, &b, &err) : NULL;
    if (!s->l) fail_msg("%s", err.text);
}

static void learner_test_open(struct learner_test *s, struct learner_options o, int n_agents,
                              uint64_t seed) {
    learner_test_open_policies(s, o, 1, n_agents, seed);
}

static void learner_test_close(struct learner_test *s) {
    learner_free(s->l);
    policy_runner_free(s->runner);
    options_release(learner_option_rows, &s->o);
}

/* The first `living` agents decide; decisions: [living]. */
static void learner_test_decide(struct learner_test *s, struct policy_decision *decisions,
                                int living) {
    struct buf text = {0};
    buf_puts(&text, prompt);
    for (int b = 0; b < living; b++) {
        decisions[b] =
            (struct policy_decision){.adapter = learner_adapter(s->l, 0),
                                     .rng = rng_make(5, RNG_TEST, (uint32_t)b, (uint32_t)s->tick),
                                     .text_len = text.len};
        learner_perturb(s->l, 0, s->tick, b, &decisions[b]);
    }
    if (policy_runner_act(s->runner, decisions, living, &text, &err) != OK)
        fail_msg("%s", err.text);
    for (int b = 0; b < living; b++) memcpy(s->logp[b], decisions[b].logp, sizeof s->logp[b]);
    buf_release(&text);
}

static void learner_test_end_tick(struct learner_test *s) {
    if (learner_tick(s->l, 0, ++s->tick, &err) != OK) fail_msg("%s", err.text);
}

static double expected_reward(const double *logp) {
    double sum = 0;
    for (int i = 0; i < ACTIONS; i++) sum += exp(logp[i]) * reward_of[i];
    return sum;
}

/* A tick in which an agent's reward is the expected reward of its policy. `rewards`: [living]
 * rewards to use instead, or NULL. */
static void learner_test_step(struct learner_test *s, int living, const double *rewards) {
    struct policy_decision decisions[8];
    learner_test_decide(s, decisions, living);
    for (int b = 0; b < living; b++) {
        learner_observe_action(s->l, b, &decisions[b], -1);
        learner_observe_reward(s->l, b, rewards ? rewards[b] : expected_reward(s->logp[b]), false);
    }
    learner_test_end_tick(s);
}

/* The adapter's change over minus the rate: the gradient of the minimised loss. */
static double *gradient_of_change(const struct adapter *a, double lr) {
    double *g = xcalloc(start->n_data, sizeof *g);
    for (size_t i = 0; i < start->n_data; i++)
        g[i] = ((double)start->data[i] - (double)a->data[i]) / lr;
    return g;
}

static double dot(const double *a, const double *b) {
    double sum = 0;
    for (size_t i = 0; i < start->n_data; i++) sum += a[i] * b[i];
    return sum;
}

/* the estimate */

static int bandit_loss(void *ctx, struct loss_sample *v, int n, struct error *e) {
    (void)ctx, (void)e;
    for (int i = 0; i < n; i++) {
        v[i].count = 1;
        v[i].loss = -expected_reward(v[i].logp);
        for (int k = 0; k < ACTIONS; k++)
            v[i].weight[k] = (float)(-exp(v[i].logp[k]) * reward_of[k]);
    }
    return OK;
}

/* Gradient of minus the fitness, by differentiation. */
static double *true_gradient(void) {
    const double lr = 0.1;
    struct learner_test s;
    learner_test_open(&s, options(1, 0.01, "none", lr), 2, 1);
    struct trainer *t = trainer_new_lora(model, &start, 1, &s.o.train, NULL, &err);
    struct token_ids ids = {0};
    tokenizer_encode(model->tok, prompt, strlen(prompt), TOKENIZER_ADD_BOS, &ids);
    struct train_sample v = {.tokens = xcalloc((size_t)ids.n + 1, sizeof(int32_t)),
                             .mask = xcalloc((size_t)ids.n + 1, 1),
                             .n = ids.n + 1};
    memcpy(v.tokens, ids.v, (size_t)ids.n * sizeof(int32_t));
    v.tokens[ids.n] = policy_runner_choice_tokens(s.runner)[0];
    v.mask[ids.n] = 1;
    struct loss_fn loss = {
        .fn = bandit_loss, .choices = policy_runner_choice_tokens(s.runner), .n_choices = ACTIONS};
    assert_int_equal(trainer_accumulate_loss(t, &v, 1, &loss, &err), OK);
    assert_int_equal(trainer_update(t, (float)lr, NULL, &err), OK);
    struct adapter *a = trainer_export_adapter(t, 0, NULL);
    double *g = gradient_of_change(a, lr);
    adapter_release(a);
    trainer_free(t);
    train_sample_release(&v);
    token_ids_release(&ids);
    learner_test_close(&s);
    return g;
}

/* One round with `n_agents` agents: one window, or two if the number is odd. */
static double *estimate(int n_agents, uint64_t seed) {
    const double lr = 0.1;
    struct learner_test s;
    learner_test_open(&s, options(1, 0.003, "none", lr), n_agents, seed);
    learner_test_step(&s, n_agents, NULL);
    if (n_agents % 2) {
        assert_int_equal(learner_updates(s.l), 0);
        learner_test_step(&s, n_agents, NULL);
    }
    assert_int_equal(learner_updates(s.l), 1);
    double *g = gradient_of_change(learner_adapter(s.l, 0), lr);
    learner_test_close(&s);
    return g;
}

/* Over many seeds: the estimate's mean is 1 along the gradient, and along another vector the
 * gradient's component, both within their standard errors. The cosine of the mean of M estimates in
 * d dimensions is as expected: cos² = M / (M + d + 1). */
static void assert_estimate(int n_agents, int seeds) {
    double *g = true_gradient(), *mean = xcalloc(start->n_data, sizeof *mean);
    double *other = xcalloc(start->n_data, sizeof *other);
    struct rng rng = rng_make(9, RNG_TEST, 0, 0);
    double size = dot(g, g), sum[2] = {0}, squares[2] = {0};
    for (size_t i = 0; i < start->n_data; i++)
        other[i] = sqrt(size / (double)start->n_data) * (double)rng_normal(&rng);
    for (int k = 0; k < seeds; k++) {
        double *e = estimate(n_agents, (uint64_t)k);
        double along[2] = {dot(e, g) / size, dot(e, other) / size};
        for (int i = 0; i < 2; i++) {
            sum[i] += along[i] / seeds;
            squares[i] += along[i] * along[i] / seeds;
        }
        for (size_t i = 0; i < start->n_data; i++) mean[i] += e[i] / seeds;
        free(e);
    }
    for (int i = 0; i < 2; i++) {
        double want = i ? dot(g, other) / size : 1;
        double error = sqrt((squares[i] - sum[i] * sum[i]) / seeds);
        if (fabs(sum[i] - want) > 3 * error || error > 0.25)
            fail_msg("%d agents: %g ± %g, not %g", n_agents, sum[i], error, want);
    }
    double m = (double)seeds * (n_agents % 2 ? n_agents : n_agents / 2), d = (double)start->n_data;
    double cosine = dot(mean, g) / sqrt(dot(mean, mean) * size), want = sqrt(m / (m + d + 1));
    if (fabs(cosine - want) > 0.06)
        fail_msg("%d agents: cosine %g, not %g", n_agents, cosine, want);
    free(g);
    free(mean);
    free(other);
}

static void test_estimate_even_agents(void **state) {
    (void)state;
    assert_estimate(8, 150);
}

static void test_estimate_odd_agents(void **state) {
    (void)state;
    assert_estimate(1, 300);
    assert_estimate(3, 100);
}

/* An absent agent counts as the mean of the others: of the rewards 1, 0 and 1/2 only the first pair
 * contributes, (z₁ - z₀) / (3 σ), while two agents alone would give (z₁ - z₀) / (2 σ). */
static void test_absent_agents(void **state) {
    (void)state;
    static const double rewards[] = {1, 0, 0.5};
    const double lr = 1e-3;
    double *by[2];
    for (int k = 0; k < 2; k++) {
        struct learner_test s;
        learner_test_open(&s, options(1, 0.01, "zscore", lr), 4, 3);
        learner_test_step(&s, k ? 3 : 2, rewards);
        by[k] = gradient_of_change(learner_adapter(s.l, 0), lr);
        learner_test_close(&s);
    }
    double ratio = dot(by[0], by[1]) / dot(by[0], by[0]), want = 2 * sqrt(1.5) / 3;
    assert_true(fabs(ratio - want) < 1e-3);
    assert_true(fabs(dot(by[1], by[1]) / dot(by[0], by[0]) - want * want) < 1e-3);
    free(by[0]);
    free(by[1]);
}

/* The hash of an agent's direction in a tick, and its sign. */
struct direction {
    char hash[HASH_LEN];
    float weight;
};

static struct direction direction_at(struct learner_test *s, int generation, int tick, int agent) {
    struct policy_decision a = {.adapter = start};
    struct direction w;
    learner_perturb(s->l, generation, tick, agent, &a);
    assert_int_equal(a.n_mix, 2);
    assert_true(a.mix[0].adapter == start && a.mix[0].weight == 1);
    strcpy(w.hash, a.mix[1].adapter->hash);
    w.weight = a.mix[1].weight;
    return w;
}

/* A pair shares its direction, with both signs; pairs, rounds, policies, generations and seeds have
 * different directions. */
static void test_directions(void **state) {
    (void)state;
    struct learner_test two, one, other, two_policies;
    learner_test_open(&two, options(5, 0.01, "rank", 1), 4, 3);
    learner_test_open(&one, options(5, 0.01, "rank", 1), 1, 3);
    learner_test_open(&other, options(5, 0.01, "rank", 1), 4, 4);
    learner_test_open_policies(&two_policies, options(5, 0.01, "rank", 1), 2, 4, 3);
    struct direction a = direction_at(&two, 0, 0, 0), b = direction_at(&two, 0, 4, 1);
    assert_string_equal(a.hash, b.hash);
    assert_true(a.weight == 1 && b.weight == -1);
    assert_string_not_equal(a.hash, direction_at(&two, 0, 4, 2).hash);
    assert_string_not_equal(a.hash, direction_at(&two, 0, 5, 0).hash);
    assert_string_not_equal(a.hash, direction_at(&two, 1, 0, 0).hash);
    assert_string_not_equal(a.hash, direction_at(&other, 0, 0, 0).hash);
    assert_string_equal(a.hash, direction_at(&one, 0, 0, 0).hash);
    b = direction_at(&one, 0, 9, 0);
    assert_string_equal(a.hash, b.hash);
    assert_true(b.weight == -1);
    assert_string_not_equal(a.hash, direction_at(&one, 0, 10, 0).hash);
    learner_test_close(&two);
    learner_test_close(&one);
    a = direction_at(&two_policies, 0, 0, 0);
    assert_string_equal(a.hash, direction_at(&two_policies, 0, 0, 2).hash);
    assert_string_not_equal(a.hash, direction_at(&two_policies, 0, 0, 1).hash);
    learner_test_close(&other);
    learner_test_close(&two_policies);
}

static void test_equal_rewards_have_no_gradient(void **state) {
    (void)state;
    static const double rewards[] = {0.5, 0.5, 0.5, 0.5};
    struct learner_test s;
    learner_test_open(&s, options(1, 0.01, "rank", 1), 4, 3);
    learner_test_step(&s, 4, rewards);
    learner_test_step(&s, 1, rewards);
    assert_int_equal(learner_updates(s.l), 0);
    assert_string_equal(learner_adapter(s.l, 0)->hash, start->hash);
    learner_test_close(&s);
}

/* A policy with non-finite numbers is rolled back, and its rewards of that round are discarded. */
static void test_rollback_discards_rewards(void **state) {
    (void)state;
    static const double good[] = {1, 0}, none[] = {0, 0};
    for (int broken = 0; broken < 2; broken++) {
        struct learner_test s;
        struct policy_decision decisions[2];
        learner_test_open(&s, options(2, 0.01, "zscore", 1e-3), 2, 3);
        learner_test_decide(&s, decisions, 2);
        if (broken) decisions[0].logp[1] = NAN;
        for (int b = 0; b < 2; b++) {
            learner_observe_action(s.l, b, &decisions[b], -1);
            learner_observe_reward(s.l, b, good[b], false);
        }
        learner_test_end_tick(&s);
        learner_test_step(&s, 2, none);
        assert_int_equal(learner_health(s.l, 0).rollbacks, broken);
        assert_int_equal(learner_updates(s.l), !broken);
        learner_test_close(&s);
    }
}

/* DoRA magnitudes are not perturbed: such adapters are refused. */
static void test_dora_is_refused(void **state) {
    (void)state;
    struct adapter_config c = {.r = 2, .alpha = 2, .target = {true}, .dora = true};
    struct adapter *a = adapter_new_for_model(model, &c, 1, &err);
    struct learner_options o = options(1, 0.01, "rank", 1);
    struct learner_config b = {
        .m = model, .n_actions = ACTIONS, .n_policies = 1, .n_agents = 1, .adapters = &a};
    assert_null(learner_new(&o, &b, &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    options_release(learner_option_rows, &o);
    adapter_release(a);
}

/* learning */

/* The probability of action 4 after `windows` windows in which no other action has a reward. */
static double bandit_probability(int n_agents, int windows, double lr) {
    struct learner_test s;
    struct learner_options o = options(8, 0.1, "zscore", lr);
    o.train.max_grad_norm = 1;
    string_set(&o.train.optim, "adamw");
    learner_test_open(&s, o, n_agents, 2);
    for (int i = 0; i < windows * 8; i++) {
        struct policy_decision decisions[8];
        learner_test_decide(&s, decisions, n_agents);
        for (int b = 0; b < n_agents; b++) {
            learner_observe_action(s.l, b, &decisions[b], -1);
            learner_observe_reward(s.l, b, decisions[b].action == 4, false);
        }
        learner_test_end_tick(&s);
    }
    struct policy_decision now = {.adapter = learner_adapter(s.l, 0), .text_len = strlen(prompt)};
    struct buf text = {0};
    buf_puts(&text, prompt);
    assert_int_equal(policy_runner_act(s.runner, &now, 1, &text, &err), OK);
    buf_release(&text);
    learner_test_close(&s);
    return exp(now.logp[4]);
}

static void test_bandit(void **state) {
    (void)state;
    double before = bandit_probability(1, 0, 0), one = bandit_probability(1, 200, 0.03),
           eight = bandit_probability(8, 60, 0.03);
    print_message(
        "probability of the rewarded action: %.3f; one agent, 200 windows: %.3f; eight, 60: "
        "%.3f\n",
        before, one, eight);
    assert_true(before < 0.3 && one > 0.7 && eight > 0.8);
    assert_true(bandit_probability(8, 20, 0) == before);
}

/* simulations */

struct simulation_test {
    struct bandit envs[2];
    struct environment *list[2];
    struct simulation_options o;
    struct pool *pool;
    struct simulation *simulation;
};

static void simulation_start(struct simulation_test *p, const char *learn, double lr, int threads) {
    *p = (struct simulation_test){.pool = threads > 1 ? pool_new(threads) : NULL};
    options_default(simulation_option_rows, &p->o);
    simulation_options_set_old_defaults(&p->o);
    struct learner_options lo = options(5, 0.03, "rank", lr);
    string_set(&lo.learn, learn);
    p->o.learn = lo;
    p->o.n_envs = 2;
    p->o.n_adapters = 3; // two with three agents, one with two
    p->o.steps = 23;
    p->o.seed = 4;
    p->o.eval_maps = 2;
    for (int i = 0; i < 2; i++) {
        bandit_init(&p->envs[i]);
        p->list[i] = &p->envs[i].e;
    }
    p->simulation = simulation_new(model, &p->o, p->list, &start, 1, p->pool, &err);
    if (!p->simulation) fail_msg("%s", err.text);
}

static void simulation_stop(struct simulation_test *p) {
    simulation_free(p->simulation);
    pool_free(p->pool);
    options_release(simulation_option_rows, &p->o);
    options_release(learner_option_rows, &p->o.learn);
}

static void simulation_run_ticks(struct simulation_test *p, int generations) {
    for (int g = 0; g < generations; g++) {
        int n = 1;
        assert_int_equal(simulation_begin_generation(p->simulation, NULL, &err), OK);
        while ((n = simulation_step(p->simulation, &err)) > 0) continue;
        if (n < 0) fail_msg("%s", err.text);
        simulation_end_generation(p->simulation);
    }
}

static void simulations_equal(const struct simulation_test *a, const struct simulation_test *b) {
    for (int i = 0; i < simulation_n_policies(a->simulation); i++) {
        const struct policy_record *x = simulation_policy(a->simulation, i),
                                   *y = simulation_policy(b->simulation, i);
        assert_string_equal(x->adapter->hash, y->adapter->hash);
        assert_string_equal(x->name, y->name);
        assert_true(x->outcome.reward == y->outcome.reward);
    }
}

static void test_threads_change_nothing(void **state) {
    (void)state;
    struct simulation_test one, two;
    simulation_start(&one, "es", 0.1, 1);
    simulation_start(&two, "es", 0.1, 2);
    simulation_run_ticks(&one, 2);
    simulation_run_ticks(&two, 2);
    simulations_equal(&one, &two);
    assert_string_not_equal(simulation_policy(one.simulation, 0)->adapter->hash, start->hash);
    simulation_stop(&one);
    simulation_stop(&two);
}

static void test_resume(void **state) {
    (void)state;
    struct simulation_test whole, first, second;
    simulation_start(&whole, "es", 0.1, 1);
    simulation_run_ticks(&whole, 3);
    simulation_start(&first, "es", 0.1, 1);
    simulation_run_ticks(&first, 1);
    json_t *extra = json_object();
    assert_int_equal(simulation_save(first.simulation, folder, extra, &err), OK);
    simulation_stop(&first);
    simulation_start(&second, "es", 0.1, 1);
    json_t *saved = simulation_read_state(folder, &err);
    assert_int_equal(simulation_load(second.simulation, folder, saved, &err), OK);
    simulation_run_ticks(&second, 2);
    simulations_equal(&whole, &second);
    json_decref(saved);
    json_decref(extra);
    simulation_stop(&second);
    simulation_stop(&whole);
}

static void test_no_rate_no_change(void **state) {
    (void)state;
    struct simulation_test still, frozen;
    struct episode_stats a[2], b[2];
    simulation_start(&still, "es", 0, 1);
    simulation_start(&frozen, "none", 0, 1);
    simulation_run_ticks(&still, 1);
    simulation_run_ticks(&frozen, 1);
    for (int i = 0; i < simulation_n_policies(still.simulation); i++)
        assert_string_equal(simulation_policy(still.simulation, i)->adapter->hash, start->hash);
    assert_int_equal(simulation_evaluate(still.simulation, a, &err), OK);
    assert_int_equal(simulation_evaluate(frozen.simulation, b, &err), OK);
    assert_memory_equal(a, b, sizeof a);
    simulation_stop(&still);
    simulation_stop(&frozen);
}

static void test_options(void **state) {
    (void)state;
    struct learner_options o = options(5, 0.01, "rank", 1);
    assert_int_equal(learner_options_check(&o, &err), OK);
    string_set(&o.shaping, "odd");
    assert_int_equal(learner_options_check(&o, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "shaping 'odd' is not known"));
    options_release(learner_option_rows, &o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_estimate_even_agents),
        cmocka_unit_test(test_estimate_odd_agents),
        cmocka_unit_test(test_directions),
        cmocka_unit_test(test_absent_agents),
        cmocka_unit_test(test_equal_rewards_have_no_gradient),
        cmocka_unit_test(test_rollback_discards_rewards),
        cmocka_unit_test(test_dora_is_refused),
        cmocka_unit_test(test_bandit),
        cmocka_unit_test(test_threads_change_nothing),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_no_rate_no_change),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, suite_setup, suite_teardown);
}
