/*
 * rl_loss: options, losses and advantages of preference and reward training, which dpo.c and
 * policy_gradient.c use. No function does I/O.
 */
#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct rl_options, field)
const struct option_row rl_option_rows[] = {
    {"beta", OPT_FLOAT, AT(beta), "0.1", 1e-6, 1e3, "X",
     "dpo: strength of the KL constraint to the initial adapter"},
    {"num-generations", OPT_INT, AT(num_generations), "8", 1, 4096, "N",
     "rewards: completions per prompt"},
    {"max-tokens", OPT_INT, AT(max_new_tokens), "64", 1, 1e6, "N",
     "rewards: maximum tokens of a completion"},
    {"temperature", OPT_FLOAT, AT(temperature), "1", 0.01, 100, "X",
     "rewards: sampling temperature of the policy; above 1 explores more"},
    {"prefix", OPT_STRING, AT(prefix), NULL, 0, 0, "TEXT",
     "rewards: given beginning of each completion", JOB_ARG_TEXT},
    {"num-iterations", OPT_INT, AT(num_iterations), "1", 1, 64, "N",
     "rewards: updates per batch of completions"},
    {"clip-range", OPT_FLOAT, AT(clip_range), "0.2", 0, 1, "X",
     "rewards: clip range of the ratio of new to old policy (PPO)"},
    {"kl-coef", OPT_FLOAT, AT(kl_coef), "0.02", 0, 1e3, "X",
     "rewards: coefficient of the KL divergence to the initial adapter"},
    {"kl-max", OPT_FLOAT, AT(kl_max), "0", 0, 1e6, "X",
     "rewards: undo an update after which the KL divergence is above X nats per token (0: never)"},
    {"reward", OPT_STRING, AT(reward), "exact", 0, 0, "NAME",
     "exact, calculator, tests, regex:PATTERN, sql:FILE, command:WORDS …", JOB_ARG_REWARD},
    {"reward-timeout", OPT_FLOAT, AT(reward_timeout), "60", 0.001, 1e6, "S",
     "timeout of a reward command in seconds per step"},
    {"reward-sandbox", OPT_BOOL, AT(reward_sandbox), "true", 0, 0, NULL,
     "run reward commands in a sandbox without network that can write only its own /tmp",
     JOB_ARG_FORBIDDEN},
    {"reward-network", OPT_BOOL, AT(reward_network), NULL, 0, 0, NULL,
     "reward commands may use the network", JOB_ARG_FORBIDDEN},
    {"reward-read", OPT_LIST, AT(reward_read), NULL, 0, 0, "PATH",
     "files and folders that reward commands may read, in addition to the working folder",
     JOB_ARG_FORBIDDEN},
    {"reward-write", OPT_LIST, AT(reward_write), NULL, 0, 0, "DIR",
     "folders that reward commands may write", JOB_ARG_FORBIDDEN},
    {"max-completion-length", OPT_ALIAS, 0, "max-tokens", 0, 0, NULL, NULL},
    {0},
};

/* log(1 + exp(-x)) */
static double softplus_neg(double x) {
    return math_log(1 + math_exp(-fabs(x))) + MAX(-x, 0.0);
}

/* σ(-x) */
static double sigmoid_neg(double x) {
    return x > 0 ? math_exp(-x) / (1 + math_exp(-x)) : 1 / (1 + math_exp(x));
}

static double logp_sum(const double *logp, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += logp[i];
    return sum;
}

static void weights_set(struct loss_sample *s, double w) {
    for (int32_t i = 0; i < s->n; i++) s->weight[i] = (float)w;
}

/* The implicit reward of an answer, β (log π - log π_ref). Adds its KL and its tokens to *sums. */
static double implicit_reward(const struct dpo *d, const struct loss_sample *s,
                              struct dpo_stats *sums) {
    const double *reference = d->reference[s->sample - d->batch];
    for (int32_t i = 0; i < s->n; i++) {
        double log_ratio = s->logp[i] - reference[i];
        sums->kl += log_ratio * log_ratio / 2;
    }
    sums->tokens += s->n;
    return d->beta * (logp_sum(s->logp, s->n) - logp_sum(reference, s->n));
}

static void pair_loss(struct dpo *d, struct loss_sample *c, struct loss_sample *r) {
    struct dpo_stats *sums = &d->sums[c->sample->adapter];
    double chosen = implicit_reward(d, c, sums), rejected = implicit_reward(d, r, sums),
           margin = chosen - rejected, w = d->beta * sigmoid_neg(margin);
    weights_set(c, -w);
    weights_set(r, w);
    c->loss = softplus_neg(margin);
    c->count = 1;
    sums->n++;
    sums->right += margin > 0;
    sums->margin += margin;
    sums->chosen += chosen;
}

int dpo_loss(void *ctx, struct loss_sample *v, int n, struct error *err) {
    struct dpo *d = ctx;
    struct loss_sample **in_batch_order =
        xcalloc((size_t)n, sizeof *in_batch_order); // index: that of the sample in the batch
    (void)err;
    for (int i = 0; i < n; i++) {
        CHECK(v[i].sample >= d->batch && v[i].sample < d->batch + n);
        in_batch_order[v[i].sample - d->batch] = &v[i];
    }
    CHECK(n % 2 == 0);
    for (int i = 0; i < n; i += 2) pair_loss(d, in_batch_order[i], in_batch_order[i + 1]);
    free(in_batch_order);
    return OK;
}

double kl_k3(double logp, double reference) {
    double d = reference - logp;
    return math_exp(d) - 1 - d;
}

static void clipped_surrogate_loss(struct policy_loss *l, struct loss_sample *s) {
    const struct rollout *r = &l->rollouts[s->sample - l->batch];
    struct policy_loss_stats *sums = &l->sums[s->sample->adapter];
    double a = r->advantage, token_weight = l->token_mean ? 1.0 / s->n : 1;
    if (l->is_first_update) memcpy(r->old, s->logp, (size_t)s->n * sizeof *r->old);
    for (int32_t i = 0; i < s->n; i++) {
        double ratio = math_exp(s->logp[i] - r->old[i]), kl = kl_k3(s->logp[i], r->reference[i]),
               reference_ratio = math_exp((double)r->reference[i] - s->logp[i]);
        bool clipped = a >= 0 ? ratio > 1 + l->clip : ratio < 1 - l->clip;
        double bound = a >= 0 ? 1 + l->clip : 1 - l->clip;
        s->loss += token_weight * (-a * (clipped ? bound : ratio) + l->kl_coef * kl);
        s->weight[i] = (float)(token_weight *
                               ((clipped ? 0 : -a * ratio) + l->kl_coef * (1 - reference_ratio)));
        sums->kl += kl;
        sums->clipped += clipped;
    }
    sums->tokens += s->n;
    s->count = r->count;
}

int policy_loss(void *ctx, struct loss_sample *v, int n, struct error *err) {
    struct policy_loss *l = ctx;
    (void)err;
    for (int i = 0; i < n; i++) clipped_surrogate_loss(l, &v[i]);
    return OK;
}

static void group_moments(const double *r, int64_t k, double *mean, double *std) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < k; i++) sum += r[i];
    *mean = sum / (double)k;
    for (int64_t i = 0; i < k; i++) squares += (r[i] - *mean) * (r[i] - *mean);
    *std = sqrt(squares / (double)k);
}

void policy_advantages(enum train_method method, const double *rewards, int64_t n, int64_t k,
                       double baseline, double *out) {
    CHECK(method == METHOD_REINFORCE || k > 1);
    for (int64_t g = 0; g < n; g++) {
        const double *r = rewards + g * k;
        double mean, std;
        group_moments(r, k, &mean, &std);
        for (int64_t i = 0; i < k; i++) {
            double *a = &out[g * k + i];
            if (method == METHOD_REINFORCE)
                *a = r[i] - baseline;
            else if (method == METHOD_RLOO)
                *a = (r[i] - mean) * (double)k / (double)(k - 1);
            else // a standard deviation within rounding error counts as zero
                *a = std > 1e-9 * (fabs(mean) + 1) ? (r[i] - mean) / std : 0;
        }
    }
}
