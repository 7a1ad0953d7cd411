/*
 * test_reward: preference and reward training: data, rewards, losses, runs and their plans.
 *
 * Losses are compared with their central differences, implemented here a second time with libm over
 * trainer_sample_nll's log-probabilities. Runs use a tiny model of random weights with the byte
 * tokenizer; rewards there depend on bytes. The test runs at one processor level only: no result
 * depends on it, and sampling at the scalar level takes minutes.
 */
/* levels: once */
#define _GNU_SOURCE /* fopencookie */
#include "sandbox/sandbox.h"
#include "train/train.h"

#include "fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;
static struct model *model;
static char path[64], state_path[64];
static bool sandboxed; /* whether reward commands run in the sandbox */

static int set_up(void **state) {
    (void)state;
    log_quiet = true;
    snprintf(path, sizeof path, "/tmp/shoal-test-reward-%d.jsonl", (int)getpid());
    snprintf(state_path, sizeof state_path, "/tmp/shoal-test-reward-%d.state", (int)getpid());
    model = fixture_model("tiny-llama", false, TENSOR_F32, NUMERIC_EXACT);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    model_close(model);
    unlink(path);
    unlink(state_path);
    return 0;
}

static struct train_options options(void) {
    struct train_options o;
    options_default(train_option_rows, &o);
    free(o.kv_cache_dtype);
    o.kv_cache_dtype = NULL; // f32: losses are differentiated numerically
    o.r = 4;
    o.lora_dropout = 0;
    o.lr = 0.02;
    o.bsz = 4;
    o.grad_accum = 1;
    o.warmup_ratio = 0;
    o.save_steps = 1;
    return o;
}

static struct rl_options policy(void) {
    struct rl_options p = {.limits = {0}};
    options_default(rl_option_rows, &p);
    p.num_generations = 4;
    p.max_new_tokens = 6;
    return p;
}

static void options_free(struct train_options *o, struct rl_options *p) {
    options_release(train_option_rows, o);
    options_release(rl_option_rows, p);
}

static const char *write_data(const char *text) {
    if (file_write(path, text, strlen(text), &err) != OK) fail_msg("%s", err.text);
    return path;
}

/* losses */

enum { N = 4, LEN = 14, FIRST = 6 };

/* Samples whose last tokens are targets; odd ones have one more. */
static void samples_make(struct train_sample v[N]) {
    struct rng r = rng_make(9, RNG_TEST, 0, 0);
    for (int i = 0; i < N; i++) {
        v[i] = (struct train_sample){.n = LEN};
        v[i].tokens = xcalloc(LEN, sizeof *v[i].tokens);
        v[i].mask = xcalloc(LEN, 1);
        for (int k = 0; k < LEN; k++)
            v[i].tokens[k] = (int32_t)rng_below(&r, (uint32_t)model->config.vocab_size);
        for (int k = FIRST - i % 2; k < LEN; k++) v[i].mask[k] = 1;
    }
}

static struct trainer *trainer_make(struct train_sample v[N]) {
    struct train_options o = options();
    struct adapter *a = fixture_adapter(&model->config, 3, "all-linear", 0.2f, 4);
    struct trainer *t = trainer_new_lora(model, &a, 1, &o, NULL, &err);
    if (!t) fail_msg("%s", err.text);
    samples_make(v);
    adapter_release(a);
    options_release(train_option_rows, &o);
    return t;
}

/* Log-probabilities of sample i's targets, from the sample with one target at a time. */
static int target_logprobs(struct trainer *t, const struct train_sample *s, double out[LEN]) {
    int n = 0;
    for (int k = 0; k < LEN; k++) {
        uint8_t mask[LEN] = {0};
        struct train_sample one = *s;
        int32_t targets;
        double nll;
        if (!s->mask[k]) continue;
        mask[k] = 1;
        one.mask = mask;
        assert_int_equal(trainer_sample_nll(t, &one, 1, &nll, &targets, &err), OK);
        assert_int_equal(targets, 1);
        out[n++] = -nll;
    }
    return n;
}

struct oracle {
    double (*loss)(struct trainer *t, const struct train_sample *v, const void *ctx);
    const void *ctx;
};

/* Checks some of the parameters; single precision of the forward pass limits the agreement. */
static void check_gradients(struct trainer *t, const struct train_sample *v,
                            const struct oracle *o) {
    double worst = 0, dot = 0, own = 0, far = 0;
    for (int i = 0; i < trainer_n_tensors(t); i += 3) {
        struct train_tensor *x = trainer_tensor(t, i);
        for (int64_t e = i % 5; e < x->n; e += 97) {
            float keep = x->w[e], h = 4e-3f;
            trainer_tensor(t, i)->w[e] = keep + h;
            double up = o->loss(t, v, o->ctx);
            trainer_tensor(t, i)->w[e] = keep - h;
            double down = o->loss(t, v, o->ctx);
            trainer_tensor(t, i)->w[e] = keep;
            double want = (up - down) / (2 * (double)h), got = (double)x->g[e];
            worst = MAX(worst, fabs(want - got));
            dot += want * got, own += got * got, far += want * want;
        }
    }
    assert_true(own > 1e-6);
    if (dot / sqrt(own * far) < 0.9999 || worst > 0.02 * sqrt(own))
        fail_msg("cosine %.7f, worst %g of %g", dot / sqrt(own * far), worst, sqrt(own));
}

/* Sum over LEN targets; missing reference log-probabilities count as 0. */
static double sum_logprobs(const double *reference) {
    double sum = 0;
    for (int k = 0; k < LEN; k++) sum += reference[k];
    return sum;
}

static double dpo_oracle(struct trainer *t, const struct train_sample *v, const void *ctx) {
    const struct dpo *d = ctx;
    double loss = 0, lp[N];
    int32_t targets[N];
    assert_int_equal(trainer_sample_nll(t, v, N, lp, targets, &err), OK);
    for (int i = 0; i < N; i += 2) {
        double h = d->beta * ((-lp[i] - sum_logprobs(d->reference[i])) -
                              (-lp[i + 1] - sum_logprobs(d->reference[i + 1])));
        loss += log(1 + exp(-h));
    }
    return loss;
}

static void test_dpo_gradient(void **state) {
    (void)state;
    struct train_sample v[N];
    struct trainer *t = trainer_make(v);
    double own_reference[N][LEN] = {{0}}, lp[LEN], moved = 0;
    const double *reference[N];
    for (int i = 0; i < N; i++) {
        int n = target_logprobs(t, &v[i], lp);
        for (int k = 0; k < n; k++) {
            double by = 0.25 * (i + 1) * (k % 3 - 1);
            own_reference[i][k] = lp[k] + by;
            moved += by * by / 2;
        }
        reference[i] = own_reference[i];
    }
    struct dpo_stats sums = {0};
    struct dpo d = {.beta = 0.3, .batch = v, .reference = reference, .sums = &sums};
    const struct loss_fn loss = {.fn = dpo_loss, .ctx = &d};
    struct update_stats st;
    assert_int_equal(trainer_accumulate_loss(t, v, N, &loss, &err), OK);
    double own = dpo_oracle(t, v, &d);
    check_gradients(t, v, &(struct oracle){dpo_oracle, &d});
    assert_int_equal(trainer_update(t, 0, &st, &err), OK);
    assert_true(fabs(st.loss - own / 2) < 1e-5); /* two pairs */
    assert_int_equal(sums.n, 2);
    assert_int_equal(sums.tokens, 2 * (LEN - FIRST) + 2 * (LEN - FIRST + 1));
    assert_float_equal(sums.kl, moved, 1e-6 * moved);
    assert_true(sums.right >= 0 && sums.right <= 2);
    for (int i = 0; i < N; i++) train_sample_release(&v[i]);
    trainer_free(t);
}

static double policy_oracle(struct trainer *t, const struct train_sample *v, const void *ctx) {
    const struct policy_loss *l = ctx;
    double sum = 0;
    for (int i = 0; i < N; i++) {
        const struct rollout *r = &l->rollouts[i];
        double lp[LEN], loss = 0, a = r->advantage;
        int n = target_logprobs(t, &v[i], lp);
        for (int k = 0; k < n; k++) {
            double ratio = exp(lp[k] - r->old[k]), d = (double)r->reference[k] - lp[k];
            double bound = fmin(fmax(ratio, 1 - l->clip), 1 + l->clip);
            loss += -fmin(ratio * a, bound * a) + l->kl_coef * (exp(d) - d - 1);
        }
        sum += l->token_mean ? loss / n : loss;
    }
    return sum;
}

/* Off-policy: some ratios are beyond the clip range, none near its boundary. */
static void test_policy_gradient(void **state) {
    (void)state;
    for (int mean = 0; mean < 2; mean++) {
        struct train_sample v[N];
        struct trainer *t = trainer_make(v);
        static const double advantages[N] = {1.5, -0.5, -1, 0.75}, shift[] = {0.4, -0.1, -0.4, 0.1};
        float reference[N][LEN];
        double old[N][LEN], lp[LEN];
        struct rollout rollouts[N];
        struct policy_loss_stats sums = {0};
        for (int i = 0; i < N; i++) {
            int n = target_logprobs(t, &v[i], lp);
            for (int k = 0; k < n; k++) {
                old[i][k] = lp[k] + shift[(i + k) % 4];
                reference[i][k] = (float)(lp[k] + 0.3 * ((k % 3) - 1));
            }
            rollouts[i] = (struct rollout){advantages[i], reference[i], old[i], 1};
        }
        struct policy_loss l = {.batch = v,
                                .rollouts = rollouts,
                                .clip = 0.2,
                                .kl_coef = 0.5,
                                .token_mean = mean,
                                .sums = &sums};
        const struct loss_fn loss = {.fn = policy_loss, .ctx = &l};
        struct update_stats st;
        assert_int_equal(trainer_accumulate_loss(t, v, N, &loss, &err), OK);
        double own = policy_oracle(t, v, &l);
        check_gradients(t, v, &(struct oracle){policy_oracle, &l});
        assert_int_equal(trainer_update(t, 0, &st, &err), OK);
        assert_true(fabs(st.loss - own / N) < 1e-4);
        assert_true(sums.clipped > 4 && sums.clipped < sums.tokens);
        assert_int_equal(sums.tokens, 2 * (LEN - FIRST) + 2 * (LEN - FIRST + 1));
        for (int i = 0; i < N; i++) train_sample_release(&v[i]);
        trainer_free(t);
    }
}

/* Moves the gradient of each tensor to a copy, and sets it to zero. */
static float **gradients_move(struct trainer *t) {
    float **got = xcalloc((size_t)trainer_n_tensors(t), sizeof *got);
    for (int i = 0; i < trainer_n_tensors(t); i++) {
        struct train_tensor *x = trainer_tensor(t, i);
        got[i] = xmalloc((size_t)x->n * sizeof(float));
        memcpy(got[i], x->g, (size_t)x->n * sizeof(float));
        memset(x->g, 0, (size_t)x->n * sizeof(float));
    }
    return got;
}

static double likelihood_scores[N];
static int likelihood_loss(void *ctx, struct loss_sample *v, int n, struct error *e) {
    (void)ctx, (void)e;
    for (int i = 0; i < n; i++) {
        likelihood_scores[i] = 0;
        for (int k = 0; k < v[i].n; k++) {
            likelihood_scores[i] += v[i].logp[k];
            v[i].weight[k] = -0.5f;
        }
        v[i].count = 1;
    }
    return OK;
}

/* Temperature 4 scales every logit by 1/4, as a quarter of the final norm does: the same bits. */
static void test_tempered_gradient(void **state) {
    (void)state;
    struct train_sample v[N];
    double scores[N];
    struct loss_fn loss = {.fn = likelihood_loss, .temperature = 4};
    struct trainer *t = trainer_make(v);
    assert_int_equal(trainer_accumulate_loss(t, v, N, &loss, &err), OK);
    memcpy(scores, likelihood_scores, sizeof scores);
    int n = trainer_n_tensors(t);
    float **got = gradients_move(t);
    float *norm = (float *)(uintptr_t)model->final_norm;
    for (int i = 0; i < model->config.d_model; i++) norm[i] *= 0.25f;
    loss.temperature = 0;
    assert_int_equal(trainer_accumulate_loss(t, v, N, &loss, &err), OK);
    for (int i = 0; i < model->config.d_model; i++) norm[i] *= 4;
    assert_memory_equal(scores, likelihood_scores, sizeof scores);
    for (int i = 0; i < n; i++) {
        struct train_tensor *x = trainer_tensor(t, i);
        assert_memory_equal(got[i], x->g, (size_t)x->n * sizeof(float));
        free(got[i]);
    }
    free(got);
    for (int i = 0; i < N; i++) train_sample_release(&v[i]);
    trainer_free(t);
}

/* A policy over three tokens: -A log π(a) - β H(π) of each sample's last token. */
enum { CHOICES = 3 };
static const int32_t choices[CHOICES] = {11, 200, 5};
static const double choice_advantage[N] = {1.5, -0.5, 2, -1}, choice_beta = 0.3;

static double choice_terms(const double logp[CHOICES], int32_t token, double advantage,
                           double *entropy) {
    double at = 0;
    *entropy = 0;
    for (int k = 0; k < CHOICES; k++) {
        *entropy -= exp(logp[k]) * logp[k];
        if (choices[k] == token) at = logp[k];
    }
    return -advantage * at - choice_beta * *entropy;
}

static int choice_loss(void *ctx, struct loss_sample *v, int n, struct error *e) {
    const struct train_sample *batch = ctx;
    (void)e;
    for (int i = 0; i < n; i++) {
        double a = choice_advantage[v[i].sample - batch], entropy;
        int32_t token = v[i].sample->tokens[LEN - 1];
        v[i].loss = choice_terms(v[i].logp, token, a, &entropy);
        for (int k = 0; k < CHOICES; k++) {
            double p = exp(v[i].logp[k]);
            v[i].weight[k] = (float)(choice_beta * p * (v[i].logp[k] + 1));
            if (choices[k] == token) v[i].weight[k] -= (float)a;
        }
        v[i].count = 1;
    }
    return OK;
}

/* The same from log-probabilities over the whole vocabulary, one token at a time. */
static double choice_oracle(struct trainer *t, const struct train_sample *v, const void *ctx) {
    double loss = 0;
    (void)ctx;
    for (int i = 0; i < N; i++) {
        double logp[CHOICES], lp[LEN], sum = 0, entropy;
        int32_t tokens[LEN];
        struct train_sample one = v[i];
        memcpy(tokens, v[i].tokens, sizeof tokens);
        one.tokens = tokens;
        for (int k = 0; k < CHOICES; k++) {
            tokens[LEN - 1] = choices[k];
            assert_int_equal(target_logprobs(t, &one, lp), 1);
            logp[k] = lp[0];
            sum += exp(lp[0]);
        }
        for (int k = 0; k < CHOICES; k++) logp[k] -= log(sum);
        loss += choice_terms(logp, v[i].tokens[LEN - 1], choice_advantage[i], &entropy);
    }
    return loss;
}

static void test_choices_gradient(void **state) {
    (void)state;
    struct train_sample v[N];
    struct trainer *t = trainer_make(v);
    struct update_stats st;
    for (int i = 0; i < N; i++) {
        memset(v[i].mask, 0, LEN);
        v[i].mask[LEN - 1] = 1;
        v[i].tokens[LEN - 1] = choices[i % CHOICES];
    }
    const struct loss_fn loss = {
        .fn = choice_loss, .ctx = v, .choices = choices, .n_choices = CHOICES};
    assert_int_equal(trainer_accumulate_loss(t, v, N, &loss, &err), OK);
    double own = choice_oracle(t, v, NULL);
    check_gradients(t, v, &(struct oracle){choice_oracle, NULL});
    assert_int_equal(trainer_update(t, 0, &st, &err), OK);
    assert_true(fabs(st.loss - own / N) < 1e-5);
    /* and the next pass is over the whole vocabulary again */
    double before, after;
    int32_t targets;
    assert_int_equal(trainer_sample_nll(t, v, 1, &before, &targets, &err), OK);
    assert_int_equal(trainer_accumulate(t, v, 1, &err), OK);
    assert_int_equal(trainer_update(t, 0, &st, &err), OK);
    after = st.loss;
    assert_float_equal(before, after, 1e-9);
    for (int i = 0; i < N; i++) train_sample_release(&v[i]);
    trainer_free(t);
}

/* On-policy and without KL, the gradient is that of -A log π. */
static void test_fresh_gradient(void **state) {
    (void)state;
    struct train_sample v[N];
    struct trainer *t = trainer_make(v);
    float reference[LEN] = {0};
    double old[N][LEN];
    struct rollout rollouts[N];
    struct policy_loss_stats sums = {0};
    for (int i = 0; i < N; i++)
        rollouts[i] = (struct rollout){i == 1 ? 2.0 : 0.0, reference, old[i], 1};
    struct policy_loss l = {
        .batch = v, .rollouts = rollouts, .clip = 0.2, .is_first_update = true, .sums = &sums};
    const struct loss_fn loss = {.fn = policy_loss, .ctx = &l};
    assert_int_equal(trainer_accumulate_loss(t, v, N, &loss, &err), OK);
    int n = trainer_n_tensors(t);
    float **got = gradients_move(t);
    assert_int_equal(trainer_accumulate(t, v + 1, 1, &err), OK);
    double worst = 0, most = 0;
    for (int i = 0; i < n; i++) {
        const struct train_tensor *x = trainer_tensor(t, i);
        for (int64_t e = 0; e < x->n; e++) {
            worst = fmax(worst, fabs((double)got[i][e] - 2 * (double)x->g[e]));
            most = fmax(most, fabs((double)x->g[e]));
        }
        free(got[i]);
    }
    assert_true(most > 1e-4 && worst < 1e-5 * most);
    free(got);
    for (int i = 0; i < N; i++) train_sample_release(&v[i]);
    trainer_free(t);
}

static void test_advantages(void **state) {
    (void)state;
    static const double rewards[6] = {1, 0, 2, 3, 3, 3};
    static const struct {
        enum train_method method;
        double baseline, want[6];
    } cases[] = {
        {METHOD_REINFORCE, 0.5, {0.5, -0.5, 1.5, 2.5, 2.5, 2.5}},
        {METHOD_RLOO, 9, {0, -1.5, 1.5, 0, 0, 0}}, /* others' means: 1, 1.5, 0.5 */
        {METHOD_GRPO, 9, {0, -1.224744871391589, 1.224744871391589, 0, 0, 0}},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        double got[6];
        policy_advantages(cases[i].method, rewards, 2, 3, cases[i].baseline, got);
        for (int k = 0; k < 6; k++) assert_true(fabs(got[k] - cases[i].want[k]) < 1e-12);
    }
    assert_true(kl_k3(-1, -1) == 0);
    assert_true(kl_k3(-1, -3) > 0 && kl_k3(-3, -1) > 0);
}

/* rewards */

static struct rl_options reward_options(const char *spec, double timeout) {
    struct rl_options p = {.limits = {0}};
    options_default(rl_option_rows, &p);
    free(p.reward);
    p.reward = xstrdup(spec);
    p.reward_timeout = timeout;
    p.reward_sandbox = sandboxed;
    return p;
}

static int reward_open_by_name(struct reward_fn *r, const char *spec, double timeout) {
    struct rl_options p = reward_options(spec, timeout);
    int rc = reward_fn_open(r, &p, &err);
    options_release(rl_option_rows, &p);
    return rc;
}

static double reward_of(const char *spec, const char *item, const char *said) {
    struct reward_fn r;
    double got = NAN;
    json_t *v = json_parse(item, strlen(item), "item", &err);
    assert_non_null(v);
    if (reward_open_by_name(&r, spec, 10) != OK) fail_msg("%s", err.text);
    const struct reward_input c[2] = {{v, said, true}, {v, "", false}};
    double both[2] = {NAN, NAN};
    if (r.check && r.check(r.ctx, v, &err) != OK) fail_msg("%s", err.text);
    if (r.score_one)
        got = r.score_one(r.ctx, v, said);
    else if (r.score_batch(r.ctx, c, 2, both, &err) == OK)
        got = both[0];
    reward_fn_close(&r);
    json_decref(v);
    return got;
}

/* Once without the sandbox, and once with it if it is available. */
static bool next_sandbox_mode(int i) {
    sandboxed = i == 1;
    if (i == 1 && sandbox_available(&err) != OK) {
        print_message("# skipped in the sandbox: %s\n", err.text);
        return false;
    }
    return i < 2;
}

static void check_rewards(void) {
    static const struct {
        const char *spec, *item, *said;
        double want;
    } cases[] = {
        {"exact", "{\"answer\": \"12\"}", " 12", 1},
        {"exact", "{\"answer\": \"12\"}", " 112", 0},
        {"exact", "{\"answer\": \"12\"}", "work: 6 + 6\nanswer: 12\n", 1},
        {"exact", "{\"answer\": \"12\"}", "answer: 12 answer: 13", 0},
        {"exact", "{\"answer\": [\"yes\", \"はい\"]}", "はい", 1},
        {"exact", "{\"answer\": [\"yes\", \"はい\"]}", "YES", 1},
        {"exact", "{\"answer\": [\"yes\", \"はい\"]}", "いいえ", 0},
        {"exact", "{\"answer\": \"东京\"}", "东 京", 1},
        {"exact", "{\"answer\": 12}", "答えは１２ではなく 12.0 です", 1},
        {"exact", "{\"answer\": -3}", "so it is -3.", 1},
        {"exact", "{\"answer\": 3}", "5-3", 1},
        {"exact", "{\"answer\": 3}", "no number", 0},
        {"regex:^答え", "{}", "答えは三", 1},
        {"regex:^答え", "{}", "三が答え", 0},
        {"regex:[", "{}", "", -1},
        {"regex", "{\"pattern\": \"(?i)tokyo$\"}", "In TOKYO", 1},
        {"regex:a", "{}", "\xff a", 0}, /* no UTF-8 */
        /* millions of steps are too many, a hundred thousand are not */
        {"regex:^(a|aa)+$|!$", "{}", "aaaaaaaaaaaaaaaaaaaaaaaaaaaa!", 0},
        {"regex:^(a|aa)+$|!$", "{}", "aaaaaaaaaaaaaaaaaaaaa!", 1},
        {"command:sed 's/.*/0.25/'", "{}", "はい", 0.25},
        {"command:sed -e 's/.*東京.*/1/' -e 't' -e 's/.*/0/'", "{}", "東京", 1},
        {"shell:sed s/.*/1/ | sed s/1/-2e0/", "{}", "x", -2},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct reward_fn r;
        if (cases[i].want == -1 && cases[i].spec[0] == 'r') {
            assert_int_equal(reward_open_by_name(&r, cases[i].spec, 1), ERR_FORMAT);
            continue;
        }
        double got = reward_of(cases[i].spec, cases[i].item, cases[i].said);
        if (got != cases[i].want)
            fail_msg("%s of '%s' is %g: %s", cases[i].spec, cases[i].said, got, err.text);
    }
}

static void test_rewards(void **state) {
    (void)state;
    for (int i = 0; next_sandbox_mode(i); i++) check_rewards();
}

static void check_refusals(void) {
    static const struct {
        const char *spec, *why;
        double timeout;
    } cases[] = {
        {"fame", "is not known", 1},
        {"command:", "is empty", 1},
        {"command:a 'b", "unclosed quote", 1},
        {"command:/no/such/program", "cannot run", 1},
        {"command:true", "expected a number", 5},
        {"command:cat", "expected a number", 5},
        {"command:false", "status 1", 5},
        {"shell:echo 1; echo 2; echo 3", "more than 2 numbers", 5},
        {"shell:echo 1; echo nan", "expected a number", 5},
        {"shell:yes 1", "more than its numbers", 5},
        {"command:sleep 100", "in time", 0.1},
        {"shell:echo 1; echo 2; exec >&-; sleep 100", "in time", 0.1},
    };
    json_t *item = json_object();
    const struct reward_input c[2] = {{item, "a", true}, {item, "b", true}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct reward_fn r;
        double out[2], start = clock_now();
        int rc = reward_open_by_name(&r, cases[i].spec, cases[i].timeout);
        if (rc == OK) rc = r.score_batch(r.ctx, c, 2, out, &err);
        assert_int_not_equal(rc, OK);
        if (!strstr(err.text, cases[i].why)) fail_msg("%s: %s", cases[i].spec, err.text);
        assert_true(clock_now() - start < 60);
        reward_fn_close(&r);
    }
    json_decref(item);
}

static void test_reward_refusals(void **state) {
    (void)state;
    for (int i = 0; next_sandbox_mode(i); i++) check_refusals();
}

/* The first number that a command in the sandbox prints for two completions; or NaN. */
static double first_sandbox_number(const struct rl_options *p) {
    struct reward_fn r;
    double out[2] = {NAN, NAN};
    json_t *item = json_object();
    const struct reward_input c[2] = {{item, "a", true}, {item, "b", true}};
    int rc = reward_fn_open(&r, p, &err);
    if (rc == OK) rc = r.score_batch(r.ctx, c, 2, out, &err);
    reward_fn_close(&r);
    json_decref(item);
    return rc == OK ? out[0] : NAN;
}

/* The exit status of a shell command in the sandbox. */
static double sandbox_exit_status(const char *line, const char *writes) {
    char *spec = xasprintf("shell:{ %s; } >/dev/null 2>&1; echo $?; echo 0", line);
    struct rl_options p = reward_options(spec, 20);
    p.reward_sandbox = true;
    if (writes) strings_add(&p.reward_write, writes);
    double got = first_sandbox_number(&p);
    options_release(rl_option_rows, &p);
    free(spec);
    return got;
}

static void test_reward_sandbox(void **state) {
    (void)state;
    char folder[] = "/tmp/shoal-test-rewards-XXXXXX", *here = realpath(".", NULL);
    if (sandbox_available(&err) != OK) {
        print_message("# skipped: %s\n", err.text);
        skip();
    }
    assert_non_null(mkdtemp(folder));
    setenv("SHOAL_API_KEY", "secret", 1);
    char *beside = xasprintf("ls %s", folder), *at = xasprintf("cd %s && echo 1 >a", folder);
    /* the working directory can be read, and only /tmp written */
    assert_int_equal((int)sandbox_exit_status("test -r Makefile", NULL), 0);
    assert_int_equal((int)sandbox_exit_status("echo 1 >/tmp/a && cat /tmp/a", NULL), 0);
    assert_int_not_equal((int)sandbox_exit_status("echo 1 >written-by-a-reward", NULL), 0);
    assert_int_not_equal((int)sandbox_exit_status("echo 1 >/usr/written-by-a-reward", NULL), 0);
    assert_int_not_equal((int)sandbox_exit_status(beside, NULL), 0);
    assert_int_equal((int)sandbox_exit_status(at, folder), 0);
    assert_int_not_equal((int)sandbox_exit_status("env | grep -q SHOAL_API_KEY", NULL), 0);
    assert_int_equal((int)sandbox_exit_status("test $(tail -n +3 /proc/net/dev | wc -l) = 1", NULL),
                     0);
    /* background processes are killed, and the numbers count */
    assert_int_equal((int)sandbox_exit_status("sleep 987 & setsid sleep 987 & true", NULL), 0);
    char *file = path_join(folder, "a");
    assert_true(path_exists(file));
    free(file);
    free(beside);
    free(at);
    free(here);
    dir_delete(folder);
    unsetenv("SHOAL_API_KEY");
}

/* In a folder that the sandbox does not show as a whole: a file that an argument names is shown. */
static void test_reward_file_arguments(void **state) {
    (void)state;
    char folder[] = "/tmp/shoal-test-rewards-XXXXXX", *here = realpath(".", NULL);
    const char *home = getenv("HOME");
    char *old = home ? xstrdup(home) : NULL;
    static const char script[] = "import os\nprint(len(os.listdir('.')))\nprint(0)\n";
    if (sandbox_available(&err) != OK || access("/usr/bin/python3", X_OK) != 0) {
        print_message("# skipped: no sandbox or no /usr/bin/python3\n");
        skip();
    }
    assert_non_null(mkdtemp(folder));
    setenv("HOME", folder, 1);
    assert_int_equal(chdir(folder), 0);
    assert_int_equal(file_write("reward.py", script, strlen(script), &err), OK);
    assert_int_equal(file_write("secret", "x", 1, &err), OK);
    struct rl_options p = reward_options("command:/usr/bin/python3 reward.py", 20);
    p.reward_sandbox = true;
    assert_true(first_sandbox_number(&p) == 1);
    strings_add(&p.reward_read, folder);
    assert_true(first_sandbox_number(&p) == 2);
    options_release(rl_option_rows, &p);
    assert_int_equal(chdir(here), 0);
    if (old) setenv("HOME", old, 1);
    dir_delete(folder);
    free(old);
    free(here);
}

/* Forbidden commands are refused with and without the sandbox; other rewards are not. */
static void test_reward_forbidden(void **state) {
    (void)state;
    pid_t pid = fork();
    if (pid == 0) {
        struct reward_fn r;
        int bad = 0;
        sandbox_forbid_commands("no commands in a test");
        for (int i = 0; i < 2; i++) {
            sandboxed = i;
            bad += reward_open_by_name(&r, "command:true", 1) != ERR_STATE;
            bad += reward_open_by_name(&r, "shell:true", 1) != ERR_STATE;
            bad += strcmp(err.text, "no commands in a test") != 0;
        }
        bad += reward_open_by_name(&r, "exact", 1) != OK;
        reward_fn_close(&r);
        _exit(bad);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
}

/* data */

/* Targets of a sample as text, with the rest as dots. */
static char *targets_as_text(const struct train_sample *s) {
    struct buf b = {0};
    train_sample_render(s, model->tok, "[", "]", &b);
    return b.data;
}

static void test_pairs(void **state) {
    (void)state;
    static const struct {
        const char *line, *chosen, *rejected; /* the targets; NULL: refused */
    } cases[] = {
        {"{\"prompt\": \"2+2=\", \"chosen\": \"4\", \"rejected\": \"5\"}", "4", "5"},
        {"{\"prompt\": \"東京は\", \"chosen\": \"都\", \"rejected\": \"県\"}", "都", "県"},
        {"{\"chosen\": \"2+2=4\", \"rejected\": \"2+2=5\"}", "4", "5"},
        {"{\"prompt\": [{\"role\": \"user\", \"content\": \"hi\"}], \"chosen\": [{\"role\": "
         "\"assistant\", \"content\": \"yes\"}], \"rejected\": [{\"role\": \"assistant\", "
         "\"content\": \"no\"}]}",
         "yes", "no"},
        {"{\"prompt\": [{\"role\": \"user\", \"content\": \"hi\"}], \"chosen\": \"yes\", "
         "\"rejected\": \"no\"}",
         "yes", "no"},
        {"{\"chosen\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
         "\"content\": \"shared\"}, {\"role\": \"user\", \"content\": \"b\"}, {\"role\": "
         "\"assistant\", \"content\": \"yes\"}], \"rejected\": [{\"role\": \"user\", \"content\": "
         "\"a\"}, {\"role\": \"assistant\", \"content\": \"shared\"}, {\"role\": \"user\", "
         "\"content\": \"b\"}, {\"role\": \"assistant\", \"content\": \"no\"}]}",
         "yes", "no"},
        {"{\"prompt\": \"hi\", \"chosen\": [{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": "
         "\"assistant\", \"content\": \"yes\"}], \"rejected\": [{\"role\": \"user\", \"content\": "
         "\"hi\"}, {\"role\": \"assistant\", \"content\": \"no\"}]}",
         "yes", "no"},
        {"{\"prompt\": \"a\", \"chosen\": \"b\"}", NULL, "'rejected' is missing"},
        {"{\"prompt\": 3, \"chosen\": \"b\", \"rejected\": \"c\"}", NULL, "'prompt' must be"},
        {"{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": []}", NULL, "the form of 'chosen'"},
        {"{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"chosen\": [], \"rejected\": "
         "[]}",
         NULL, "no assistant turn after the shared prompt"},
        {"{\"prompt\": [{\"role\": \"user\"}], \"chosen\": \"b\", \"rejected\": \"c\"}", NULL,
         "'prompt[0].content' is missing"},
        {"[]", NULL, "holds no pair"},
        {"3", NULL, "must be an object"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct dataset d;
        int rc = dataset_load_preferences(&d, write_data(cases[i].line), model->tok, 0, &err);
        if (!cases[i].chosen) {
            assert_int_equal(rc, ERR_FORMAT);
            if (!strstr(err.text, cases[i].rejected)) fail_msg("%s", err.text);
            continue;
        }
        if (rc != OK) fail_msg("%zu: %s", i, err.text);
        assert_int_equal(d.n, 2);
        for (int k = 0; k < 2; k++) {
            char *text = targets_as_text(&d.v[k]), *on = strchr(text, '['),
                 *off = strchr(text, ']');
            const char *want = k ? cases[i].rejected : cases[i].chosen;
            if (!on || !off || strncmp(on + 1, want, strlen(want)) != 0 || strchr(off, '['))
                fail_msg("%zu: '%s' is not learned in '%s'", i, want, text);
            assert_null(memmem(on, (size_t)(off - on), "shared", 6));
            free(text);
        }
        dataset_release(&d);
    }
}

static void test_cut_pairs(void **state) {
    (void)state;
    struct dataset d;
    write_data("{\"prompt\": \"abcdefgh\", \"chosen\": \"ij\", \"rejected\": \"klmno\"}\n"
               "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"cccccccccccccc\"}\n");
    assert_int_equal(dataset_load_preferences(&d, path, model->tok, 8, &err), OK);
    assert_int_equal(d.n, 2); /* the first pair has no target in its first 8 */
    assert_int_equal(d.n_read, 4);
    assert_int_equal(d.dropped, 2);
    assert_int_equal(d.v[1].n, 8);
    dataset_release(&d);
}

static void test_prompts(void **state) {
    (void)state;
    struct prompt_set p;
    struct reward_fn exact;
    assert_int_equal(reward_open_by_name(&exact, "exact", 1), OK);
    struct prompt_source from = {.path = path,
                                 .tok = model->tok,
                                 .prefix = "so:",
                                 .max_length = 100,
                                 .check = exact.check,
                                 .check_ctx = exact.ctx};
    static const struct {
        const char *line, *why; /* NULL: fine */
    } cases[] = {
        {"{\"prompt\": \"2+2=\", \"answer\": 4}", NULL},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"首都は？\"}], \"answer\": \"東京\"}",
         NULL},
        {"{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"answer\": [\"b\", 1]}", NULL},
        {"{\"prompt\": \"a\"}", "'answer' is missing"},
        {"{\"prompt\": \"a\", \"answer\": [true]}", "'answer' must be"},
        {"{\"answer\": \"a\"}", "messages or prompt"},
        {"{\"messages\": [], \"answer\": \"a\"}", "'messages' is empty"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
         "\"content\": \"b\"}], \"answer\": \"b\"}",
         "which is to be written"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        write_data(cases[i].line);
        int rc = prompt_set_load(&p, &from, &err);
        if (cases[i].why) {
            assert_int_equal(rc, ERR_FORMAT);
            if (!strstr(err.text, cases[i].why)) fail_msg("%s", err.text);
            continue;
        }
        if (rc != OK) fail_msg("%s", err.text);
        uint8_t mask[200] = {0};
        const struct train_sample *first = &p.data.v[0];
        char *text = targets_as_text(
            &(struct train_sample){.tokens = first->tokens, .mask = mask, .n = first->n});
        assert_string_equal(text + strlen(text) - 3, "so:");
        free(text);
        prompt_set_release(&p);
    }
    from.path = "fry:pick:20";
    from.max_length = 4;
    assert_int_equal(prompt_set_load(&p, &from, &err), ERR_FORMAT); /* all too long */
    from.max_length = 4000;
    assert_int_equal(prompt_set_load(&p, &from, &err), OK);
    assert_int_equal(p.data.n, 20);
    prompt_set_release(&p);
    from.path = "fry:nothing";
    assert_int_equal(prompt_set_load(&p, &from, &err), ERR_USAGE);
    reward_fn_close(&exact);
}

/* runs */

static const char *const questions = "{\"prompt\": \"one\"}\n{\"prompt\": \"二つ\"}\n"
                                     "{\"prompt\": \"three\"}\n{\"prompt\": \"四\"}\n"
                                     "{\"prompt\": \"five\"}\n";

/* The fraction of even bytes, at first one half. */
static double even_byte_fraction(void *ctx, const json_t *item, const char *text) {
    int n = 0, good = 0;
    (void)ctx, (void)item;
    for (; text[n]; n++) good += text[n] % 2 == 0;
    return n ? (double)good / n : 0;
}

static json_t *log_lines(const char *text) {
    json_t *list = json_array();
    for (const char *p = text, *end; (end = strchr(p, '\n')); p = end + 1)
        json_array_append_new(list, json_parse(p, (size_t)(end - p), "log", &err));
    return list;
}

static double log_number(const json_t *list, size_t i, const char *name) {
    return json_number_value(json_object_get(json_array_get(list, i), name));
}

static void test_reward_rises(void **state) {
    (void)state;
    static const enum train_method methods[] = {METHOD_RLOO, METHOD_REINFORCE, METHOD_GRPO};
    const struct reward_fn reward = {.score_one = even_byte_fraction};
    write_data(questions);
    for (size_t i = 0; i < ARRAY_LEN(methods); i++) {
        struct train_options o = options();
        struct rl_options p = policy();
        struct train_job job = {.name = "a", .data = path};
        char *text = NULL;
        size_t size;
        FILE *log = open_memstream(&text, &size);
        o.max_steps = 100;
        o.lr = 0.02;
        p.num_generations = 16;
        p.kl_coef = 0;
        p.num_iterations = methods[i] == METHOD_GRPO ? 2 : 1;
        int rc = rl_run(model, &job, 1, &o, methods[i], &p, &reward, NULL, NULL, log, &err);
        fclose(log);
        if (rc != OK) fail_msg("%s", err.text);
        json_t *lines = log_lines(text);
        double first = 0, last = 0;
        assert_int_equal(json_array_size(lines), 100);
        for (size_t k = 0; k < 3; k++) {
            first += log_number(lines, k, "reward") / 3;
            last += log_number(lines, 97 + k, "reward") / 3;
        }
        if (last < first + 0.2) fail_msg("method %zu: reward %g to %g", i, first, last);
        assert_true(log_number(lines, 0, "kl") <
                    1e-9); /* the initial adapter generated the samples */
        assert_true(log_number(lines, 99, "kl") > 1e-3);
        assert_float_equal(job.first_reward, log_number(lines, 0, "reward"), 1e-8);
        assert_float_equal(job.last_reward, log_number(lines, 99, "reward"), 1e-8);
        assert_true(isnan(job.last_accuracy));
        json_decref(lines);
        free(text);
        adapter_release(job.result);
        options_free(&o, &p);
    }
}

/* A log that ends the process at its n-th line, like a power failure. */
struct exit_at_line {
    int lines, limit;
};
static ssize_t stopper_write(void *cookie, const char *text, size_t n) {
    struct exit_at_line *s = cookie;
    (void)text;
    if (++s->lines == s->limit) _exit(9);
    return (ssize_t)n;
}

static void run_until(struct train_job *jobs, int n, const struct train_options *o,
                      enum train_method method, const struct rl_options *p,
                      const struct reward_fn *reward, int limit) {
    pid_t child = fork();
    int status;
    if (child == 0) {
        struct exit_at_line s = {.limit = limit};
        FILE *log = fopencookie(&s, "w", (cookie_io_functions_t){.write = stopper_write});
        rl_run(model, jobs, n, o, method, p, reward, NULL, state_path, log, &err);
        _exit(0);
    }
    waitpid(child, &status, 0);
    assert_int_equal(WEXITSTATUS(status), 9);
}

/* Three runs have the same bits: an uninterrupted one, one that is killed and resumed with two
 * threads, and one of its adapters alone. */
static void assert_same_bits(enum train_method method, const char *data) {
    const struct reward_fn reward = {.score_one = even_byte_fraction};
    struct train_options o = options();
    struct rl_options p = policy();
    struct pool *pool = pool_new(2);
    write_data(data);
    struct train_job whole[2] = {{.name = "a", .data = path}, {.name = "b", .data = path}},
                     again[2], alone = whole[1];
    memcpy(again, whole, sizeof again);
    o.max_steps = 5;
    p.num_iterations = 2;
    p.kl_max = 100;
    unlink(state_path);
    if (rl_run(model, whole, 2, &o, method, &p, &reward, NULL, NULL, NULL, &err) != OK)
        fail_msg("%s", err.text);
    run_until(again, 2, &o, method, &p, &reward, 4); /* saved after 3 */
    assert_true(path_exists(state_path));
    assert_int_equal(rl_run(model, again, 2, &o, method, &p, &reward, pool, state_path, NULL, &err),
                     OK);
    assert_int_equal(rl_run(model, &alone, 1, &o, method, &p, &reward, pool, NULL, NULL, &err), OK);
    for (int j = 0; j < 2; j++) {
        assert_string_equal(whole[j].result->hash, again[j].result->hash);
        assert_true(whole[j].last_loss == again[j].last_loss);
        if (method == METHOD_DPO)
            assert_true(whole[j].last_accuracy == again[j].last_accuracy);
        else
            assert_true(whole[j].first_reward == again[j].first_reward &&
                        whole[j].last_reward == again[j].last_reward);
    }
    assert_string_equal(whole[1].result->hash, alone.result->hash);
    assert_string_not_equal(whole[0].result->hash, whole[1].result->hash);
    o.lr = 0.01;
    struct train_job other[2] = {whole[0], whole[1]};
    assert_int_equal(rl_run(model, other, 2, &o, method, &p, &reward, NULL, state_path, NULL, &err),
                     ERR_MISMATCH);
    for (int j = 0; j < 2; j++) adapter_release(whole[j].result), adapter_release(again[j].result);
    adapter_release(alone.result);
    options_free(&o, &p);
    pool_free(pool);
}

static const char *const preferences =
    "{\"prompt\": \"one\", \"chosen\": \"yes\", \"rejected\": \"no\"}\n"
    "{\"prompt\": \"二\", \"chosen\": \"はい\", \"rejected\": \"いいえ\"}\n"
    "{\"prompt\": \"three\", \"chosen\": \"certainly\", \"rejected\": \"never\"}\n";

static void test_same_bits(void **state) {
    (void)state;
    assert_same_bits(METHOD_REINFORCE, questions); /* which must save its baseline */
    assert_same_bits(METHOD_GRPO, questions);
    assert_same_bits(METHOD_DPO, preferences);
}

/* A reward that fails ends the run; the checkpoint continues it. */
static double constant_reward(void *ctx, const json_t *item, const char *text) {
    (void)item, (void)text;
    return *(const double *)ctx;
}

static void count_warning(void *ctx, const char *text) {
    *(int *)ctx += strstr(text, "could not learn: in every group") != NULL;
}

/* Number of warnings that nothing could be learned, in a run that is killed and resumed. */
static int same_reward_warnings(enum train_method method, const struct reward_fn *reward) {
    struct train_options o = options();
    struct rl_options p = policy();
    struct train_job job = {.name = "a", .data = write_data(questions)};
    int n = 0;
    struct log_sink sink = {.message = count_warning, .ctx = &n}, *before = log_set_sink(&sink);
    o.max_steps = 4;
    unlink(state_path);
    run_until(&job, 1, &o, method, &p, reward, 4);
    assert_int_equal(rl_run(model, &job, 1, &o, method, &p, reward, NULL, state_path, NULL, &err),
                     OK);
    log_set_sink(before);
    adapter_release(job.result);
    options_free(&o, &p);
    return n;
}

static void test_same_rewards(void **state) {
    (void)state;
    static const enum train_method methods[] = {METHOD_RLOO, METHOD_REINFORCE, METHOD_GRPO};
    double one = 1;
    const struct reward_fn constant = {.score_one = constant_reward, .ctx = &one},
                           varied = {.score_one = even_byte_fraction};
    for (size_t i = 0; i < ARRAY_LEN(methods); i++) {
        assert_int_equal(same_reward_warnings(methods[i], &constant), 1);
        assert_int_equal(same_reward_warnings(methods[i], &varied), 0);
    }
}

static double failing_reward(void *ctx, const json_t *item, const char *text) {
    int *left = ctx;
    return --*left < 0 ? NAN : even_byte_fraction(NULL, item, text);
}

static void test_failed_reward(void **state) {
    (void)state;
    struct train_options o = options();
    struct rl_options p = policy();
    int left = 2 * 4 * 4;
    const struct reward_fn reward = {.score_one = failing_reward, .ctx = &left};
    struct train_job job = {.name = "a", .data = write_data(questions)};
    o.max_steps = 3;
    unlink(state_path);
    assert_int_equal(
        rl_run(model, &job, 1, &o, METHOD_RLOO, &p, &reward, NULL, state_path, NULL, &err),
        ERR_NUMERIC);
    assert_non_null(strstr(err.text, "holds at least step 2"));
    left = 1000;
    assert_int_equal(
        rl_run(model, &job, 1, &o, METHOD_RLOO, &p, &reward, NULL, state_path, NULL, &err), OK);
    adapter_release(job.result);
    options_free(&o, &p);
}

static void test_kl_bound(void **state) {
    (void)state;
    struct train_options o = options();
    struct rl_options p = policy();
    const struct reward_fn reward = {.score_one = even_byte_fraction};
    struct train_job job = {.name = "a", .data = write_data(questions)};
    char *text = NULL;
    size_t size;
    FILE *log = open_memstream(&text, &size);
    job.start = fixture_adapter(&model->config, 3, "all-linear", 0.05f, 4);
    o.max_steps = 2;
    p.kl_max = 1e-9; /* a bound that every policy exceeds */
    assert_int_equal(rl_run(model, &job, 1, &o, METHOD_RLOO, &p, &reward, NULL, NULL, log, &err),
                     OK);
    fclose(log);
    json_t *lines = log_lines(text);
    for (size_t i = 0; i < 2; i++) assert_true(log_number(lines, i, "not_applied") == 1);
    assert_string_equal(job.result->hash, job.start->hash);
    adapter_release(job.result);
    adapter_release(job.start);
    json_decref(lines);
    free(text);
    options_free(&o, &p);
}

static void test_dpo_run(void **state) {
    (void)state;
    struct train_options o = options();
    struct rl_options p = policy();
    struct train_job job = {.name = "a", .data = write_data(preferences)};
    char *text = NULL;
    size_t size;
    FILE *log = open_memstream(&text, &size);
    o.max_steps = 20;
    o.bsz = 3;
    assert_int_equal(rl_run(model, &job, 1, &o, METHOD_DPO, &p, NULL, NULL, NULL, log, &err), OK);
    fclose(log);
    json_t *lines = log_lines(text);
    assert_true(fabs(log_number(lines, 0, "loss") - log1p(1)) <
                1e-6); /* the policy equals the reference */
    assert_true(log_number(lines, 19, "loss") < 0.3);
    assert_true(log_number(lines, 19, "margin") > 1);
    assert_true(log_number(lines, 19, "accuracy") == 1);
    assert_true(job.last_accuracy == 1 && isnan(job.last_reward));
    assert_int_equal(job.lint.kept, 6);
    json_decref(lines);
    free(text);
    adapter_release(job.result);
    options_free(&o, &p);
}

/* plans */

static int64_t log_sum(const json_t *lines, const char *name) {
    double sum = 0;
    for (size_t i = 0; i < json_array_size(lines); i++) sum += log_number(lines, i, name);
    return (int64_t)sum;
}

/* The plan's counts are those of the run. */
static void test_dpo_plan(void **state) {
    (void)state;
    struct train_options o = options();
    struct rl_options p = policy();
    struct rl_plan plan;
    struct train_job jobs[2] = {{.name = "a", .data = write_data(preferences)},
                                {.name = "b", .data = path}};
    int64_t end = tokenizer_eos(model->tok) >= 0;
    char *text = NULL;
    size_t size;
    o.bsz = 3;
    o.epochs = 4;
    assert_int_equal(rl_plan_make(model, jobs, 2, &o, METHOD_DPO, &p, NULL, NULL, &plan, &err), OK);
    const struct pair_length_stats *l = &plan.pairs[1];
    assert_int_equal(l->prompt.n, 3);
    assert_int_equal(l->chosen.tokens, strlen("yesはいcertainly") + 3 * end);
    assert_int_equal(l->rejected.tokens, strlen("noいいえnever") + 3 * end);
    assert_int_equal(l->rejected.median, strlen("never") + end);
    assert_int_equal(l->chosen.longest, strlen("certainly") + end);
    assert_int_equal(l->prompt.tokens + l->chosen.tokens + l->prompt.tokens + l->rejected.tokens,
                     jobs[1].lint.tokens);
    assert_int_equal(plan.run.updates, 4);
    assert_int_equal(plan.run.samples, 4 * 2 * 3 * 2);
    assert_int_equal(plan.run.passes, 4);
    assert_int_equal(plan.run.max_samples, 12);
    assert_int_equal(plan.run.n_first, 4);
    for (int k = 0; k < 2; k++) {
        const struct train_sample *s = &plan.run.first[2 + k];
        char *as_read = targets_as_text(s);
        assert_int_equal(s->adapter, 1);
        assert_non_null(strstr(as_read, "["));
        assert_memory_equal(s->tokens, plan.run.first[2].tokens, 3 * sizeof *s->tokens);
        free(as_read);
    }
    assert_true(plan.run.bytes > 1000 && plan.run.pass_seconds > 0 && plan.reference_seconds > 0);
    assert_true(plan.run.seconds >= plan.reference_seconds + plan.run.pass_seconds);
    FILE *log = open_memstream(&text, &size);
    assert_int_equal(rl_run(model, jobs, 2, &o, METHOD_DPO, &p, NULL, NULL, NULL, log, &err), OK);
    fclose(log);
    json_t *lines = log_lines(text);
    assert_int_equal(json_array_size(lines), plan.run.updates);
    assert_int_equal(log_sum(lines, "tokens"), plan.run.tokens); /* epochs are whole updates here */
    assert_true(log_number(lines, 0, "kl") == 0 && log_number(lines, 3, "kl") > 1e-6);
    json_decref(lines);
    rl_plan_release(&plan);
    for (int j = 0; j < 2; j++) adapter_release(jobs[j].result);
    free(text);
    options_free(&o, &p);
}

/* The plan's samples are those with which the run begins. */
static void test_reward_plan(void **state) {
    (void)state;
    static const char *const figures[] = {"reward",  "reward_std", "mixed",
                                          "entropy", "length",     "ended"};
    const struct reward_fn reward = {.score_one = even_byte_fraction};
    struct train_options o = options();
    struct rl_options p = policy();
    struct rl_plan plan;
    struct train_job job = {.name = "a", .data = write_data(questions)};
    char *text = NULL;
    size_t size;
    o.max_steps = 3;
    p.num_iterations = 2;
    assert_int_equal(rl_plan_make(model, &job, 1, &o, METHOD_GRPO, &p, &reward, NULL, &plan, &err),
                     OK);
    FILE *log = open_memstream(&text, &size);
    assert_int_equal(rl_run(model, &job, 1, &o, METHOD_GRPO, &p, &reward, NULL, NULL, log, &err),
                     OK);
    fclose(log);
    adapter_release(job.result);
    json_t *lines = log_lines(text);
    const json_t *own = json_object_get(plan.completions, "a"),
                 *run = json_object_get(json_object_get(json_array_get(lines, 0), "adapters"), "a");
    for (size_t i = 0; i < ARRAY_LEN(figures); i++) {
        const json_t *v = json_object_get(own, figures[i]);
        assert_true(json_is_real(v));
        assert_float_equal(json_number_value(v),
                           json_number_value(json_object_get(run, figures[i])), 1e-6);
    }
    assert_int_equal(plan.sampled, 16);
    assert_int_equal(plan.run.updates, json_array_size(lines));
    assert_int_equal(plan.run.samples, 48);
    assert_int_equal(plan.run.first[0].n > plan.run.longest, false);
    assert_in_range(plan.run.tokens, log_sum(lines, "tokens") / 2, 2 * log_sum(lines, "tokens"));
    assert_true(plan.engine_bytes > 0 && plan.run.bytes > plan.engine_bytes);
    assert_true(plan.run.seconds > 3 * plan.sampling_seconds);
    rl_plan_release(&plan);
    o.bsz = 100; /* more than the engine can process at once: a part of them suffices */
    assert_int_equal(rl_plan_make(model, &job, 1, &o, METHOD_RLOO, &p, &reward, NULL, &plan, &err),
                     OK);
    assert_int_equal(plan.sampled, 128);
    assert_int_equal(plan.run.samples, 3 * 400);
    rl_plan_release(&plan);
    json_decref(lines);
    free(text);
    options_free(&o, &p);
}

/* Of the policy's first token after "one", over the whole vocabulary. */
static double entropy_exact(double temperature) {
    struct train_options o = options();
    struct adapter *a = fixture_adapter(&model->config, 3, "all-linear", 0.0f, 4);
    struct trainer *t = trainer_new_lora(model, &a, 1, &o, NULL, &err);
    int32_t n_vocab = model->config.vocab_size, tokens[16], targets;
    double *logit = xcalloc((size_t)n_vocab, sizeof *logit), sum = 0, entropy = 0;
    uint8_t mask[16] = {0};
    struct token_ids ids = {0};
    tokenizer_encode(model->tok, "one", 3, TOKENIZER_ADD_BOS | TOKENIZER_PARSE_SPECIAL, &ids);
    assert_true(ids.n < 16);
    memcpy(tokens, ids.v, (size_t)ids.n * sizeof *tokens);
    mask[ids.n] = 1;
    for (int32_t v = 0; v < n_vocab; v++) {
        const struct train_sample s = {.tokens = tokens, .mask = mask, .n = ids.n + 1};
        tokens[ids.n] = v;
        assert_int_equal(trainer_sample_nll(t, &s, 1, &logit[v], &targets, &err), OK);
        logit[v] = -logit[v] / temperature;
        sum += exp(logit[v]);
    }
    for (int32_t v = 0; v < n_vocab; v++) {
        double prob = exp(logit[v]) / sum;
        entropy -= prob * log(prob);
    }
    assert_true(entropy < log(n_vocab) - 0.05); /* not uniform */
    free(logit);
    token_ids_release(&ids);
    trainer_free(t);
    adapter_release(a);
    options_release(train_option_rows, &o);
    return entropy;
}

static void test_entropy(void **state) {
    (void)state;
    const struct reward_fn reward = {.score_one = even_byte_fraction};
    struct train_options o = options();
    struct rl_options p = policy();
    struct train_job job = {.name = "a", .data = write_data("{\"prompt\": \"one\"}")};
    char *text = NULL;
    size_t size;
    o.bsz = 1;
    o.max_steps = 1;
    p.num_generations = 512;
    p.max_new_tokens = 1;
    p.temperature = 0.25;
    FILE *log = open_memstream(&text, &size);
    assert_int_equal(rl_run(model, &job, 1, &o, METHOD_RLOO, &p, &reward, NULL, NULL, log, &err),
                     OK);
    fclose(log);
    json_t *lines = log_lines(text);
    const json_t *own = json_object_get(json_object_get(json_array_get(lines, 0), "adapters"), "a");
    double want = entropy_exact(p.temperature);
    assert_float_equal(json_number_value(json_object_get(own, "entropy")), want, 0.1);
    json_decref(lines);
    adapter_release(job.result);
    free(text);
    options_free(&o, &p);
}

static void test_refusals(void **state) {
    (void)state;
    struct train_options o = options();
    struct rl_options p = policy();
    struct train_job job = {.name = "a", .data = write_data(questions)};
    enum train_method method;
    assert_int_equal(train_method_parse("ppo", &method, &err), ERR_USAGE);
    p.num_generations = 1;
    assert_int_equal(rl_run(model, &job, 1, &o, METHOD_RLOO, &p, NULL, NULL, NULL, NULL, &err),
                     ERR_USAGE);
    p.num_generations = 4;
    assert_int_equal(rl_run(model, &job, 1, &o, METHOD_RLOO, &p, NULL, NULL, NULL, NULL, &err),
                     ERR_FORMAT);
    assert_non_null(strstr(err.text, "line 1: 'answer' is missing"));
    p.max_new_tokens = model->config.max_seq_len;
    assert_int_equal(rl_run(model, &job, 1, &o, METHOD_RLOO, &p, NULL, NULL, NULL, NULL, &err),
                     ERR_USAGE);
    options_free(&o, &p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dpo_gradient),      cmocka_unit_test(test_policy_gradient),
        cmocka_unit_test(test_tempered_gradient), cmocka_unit_test(test_fresh_gradient),
        cmocka_unit_test(test_choices_gradient),  cmocka_unit_test(test_advantages),
        cmocka_unit_test(test_rewards),           cmocka_unit_test(test_reward_refusals),
        cmocka_unit_test(test_reward_sandbox),    cmocka_unit_test(test_reward_file_arguments),
        cmocka_unit_test(test_reward_forbidden),  cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_cut_pairs),         cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_reward_rises),      cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_same_rewards),      cmocka_unit_test(test_failed_reward),
        cmocka_unit_test(test_kl_bound),          cmocka_unit_test(test_dpo_run),
        cmocka_unit_test(test_refusals),          cmocka_unit_test(test_dpo_plan),
        cmocka_unit_test(test_reward_plan),       cmocka_unit_test(test_entropy),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
