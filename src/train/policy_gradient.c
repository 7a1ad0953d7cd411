/*
 * policy_gradient: training on rewards. A step samples completions with the engine under the
 * trainer's adapters, computes their rewards, and trains on them.
 *
 * A step samples num_generations (k) completions of each of its prompts and makes num_iterations
 * updates with these completions. The policy is the softmax of all logits divided by the
 * temperature. Sampling, ratios and KL use this policy, so the gradient is that of the sampled
 * policy. The forward passes of the engine and of the trainer have the same bits, and both run on
 * one copy of the model. The reference of the KL is the initial adapter; the engine computes its
 * log-probabilities.
 *
 * Invariants: the seed of a completion is a function of the options' seed, the adapter's name, the
 * step and the completion's slot. So a completion depends only on its seed, its prompt and its
 * adapter. Steps are atomic: no checkpoint is made between the sampling and the last update of a
 * step.
 */
#include "train/train_loop.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BASELINE_DECAY 0.9
#define MAX_SEQS 128 /* most completions that the engine samples at once */

struct rl_policy { /* state of one adapter */
    struct prompt_set prompts;
    struct epoch_shuffle order;
    struct adapter *policy; /* copy of the trainer's adapter after the last update */
    double baseline; /* REINFORCE: exponential moving average of the steps' mean rewards, started at
                        0 */
    double first_reward, last_reward; /* mean rewards of the first and the last step */
    bool rewards_differed; /* false: no step so far had rewards from which the method can learn */
};
struct rl_completion {
    int job;
    const struct train_sample *prompt;
    const json_t *item;
    int32_t end; /* the end token, or -1 */
    struct engine_request request;
    struct train_sample sample; /* prompt and completion; the completion is the target */
    int32_t n;                  /* number of target tokens */
    float *reference;           /* [n] log-probabilities under the reference */
    double *old; /* [n] log-probabilities under the sampling policy: first the engine's; the first
                    update replaces them by the trainer's */
    int32_t sampled; /* number of sampled tokens, without the end token */
    struct buf text;
    double count; /* number of completions that it represents in the loss; 0: skipped */
};
struct rl_trainer {
    struct train_loop c;
    enum train_method method;
    const struct rl_options *o;
    struct reward_fn reward, owned_reward; /* owned_reward: opened by name in this file; empty if
                                              the caller gave a reward */
    struct engine_options engine_options;
    struct engine *engine;
    struct rl_policy *policies; /* [n] */
    int64_t per_update;         /* prompts of each adapter in a step; in a plan, a part of them */
    int32_t longest;            /* tokens of the longest prompt with its completion */
    struct trainer_snapshot *snapshot; /* NULL without kl_max */

    /* state of a step; arrays of completions are [n][per_update][k] */
    int n_completions;
    struct rl_completion *completions;
    double *rewards, *advantages;
    struct train_sample *batch;
    struct rollout *rollouts;
    struct policy_loss_stats *sums; /* [n] sums over an update */
    /* [n] kl and tokens of a step's completions under the sampling policy */
    struct policy_loss_stats *sampled;
};

/* sampling */

/* Seed of the completion in slot `slot` of an adapter, independent of the other adapters. Slots
 * count from 1 in the generator's id, so that the stream differs from others of the same seed. */
static uint64_t rl_completion_seed(const struct rl_trainer *l, int job, int64_t step,
                                   int64_t slot) {
    const char *name = l->c.jobs[job].name;
    uint64_t seed = (uint64_t)l->c.o->seed ^ hash_fnv1a(name, strlen(name));
    struct rng r = rng_make(seed, RNG_SAMPLE, (uint32_t)slot + 1, (uint32_t)step);
    return rng_u64(&r);
}

static void rl_completion_begin(struct rl_trainer *l, int64_t step, int i) {
    struct rl_completion *p = &l->completions[i];
    int64_t per_adapter = l->per_update * l->o->num_generations, slot = i % per_adapter;
    *p = (struct rl_completion){.job = (int)(i / per_adapter)};
    struct rl_policy *t = &l->policies[p->job];
    uint32_t index = epoch_shuffle_at(&t->order, l->c.o->seed,
                                      step * l->per_update + slot / l->o->num_generations);
    const struct tokenizer *tok = l->c.m->tok;
    p->prompt = &t->prompts.data.v[index];
    p->item = t->prompts.items[index];
    p->end = json_is_string(json_object_get(p->item, "prompt")) ? tokenizer_eos(tok)
                                                                : tokenizer_eot(tok);
    p->request =
        (struct engine_request){.prompt = p->prompt->tokens,
                                .n_prompt = p->prompt->n,
                                .adapter = t->policy,
                                .sampling = {.temperature = (float)l->o->temperature,
                                             .top_p = 1,
                                             .seed = rl_completion_seed(l, p->job, step, slot)},
                                .logprob_temperature = (float)l->o->temperature,
                                .max_tokens = (int32_t)l->o->max_new_tokens,
                                .stop = &p->end,
                                .n_stop = p->end >= 0};
}

/* Makes the training sample of a completion. If the completion ended, its end token is a target
 * too. */
static void rl_completion_finish(const struct rl_trainer *l, struct rl_completion *p) {
    const struct engine_request *r = &p->request;
    bool ended = r->finish == FINISH_STOP;
    int32_t n_prompt = r->n_prompt;
    p->n = r->n_out + ended;
    p->sample = (struct train_sample){.n = n_prompt + p->n, .adapter = p->job};
    p->sample.tokens = xmalloc((size_t)p->sample.n * sizeof *p->sample.tokens);
    p->sample.mask = xcalloc((size_t)p->sample.n, 1);
    memcpy(p->sample.tokens, r->prompt, (size_t)n_prompt * sizeof *r->prompt);
    memcpy(p->sample.tokens + n_prompt, r->out, (size_t)r->n_out * sizeof *r->out);
    if (ended) p->sample.tokens[n_prompt + r->n_out] = p->end;
    memset(p->sample.mask + n_prompt, 1, (size_t)p->n);
    p->reference = xcalloc((size_t)p->n, sizeof *p->reference);
    p->old = xcalloc((size_t)p->n, sizeof *p->old);
    p->sampled = r->n_out;
    for (int32_t i = 0; i < r->n_out; i++) p->old[i] = (double)r->out_logprob[i];
    buf_puts(&p->text, "");
    tokenizer_decode(l->c.m->tok, r->out, r->n_out, false, &p->text);
}

static void rl_completion_release(struct rl_completion *p) {
    engine_request_release(&p->request);
    train_sample_release(&p->sample);
    buf_release(&p->text);
    free(p->reference);
    free(p->old);
    *p = (struct rl_completion){0};
}

/* `what`: the work on the completions, for the detail of the bar. */
static int requests_run(struct rl_trainer *l, const char *what, struct error *err) {
    char detail[128];
    int rc = OK;
    for (int i = 0; !rc && i < l->n_completions; i++)
        rc = engine_submit(l->engine, &l->completions[i].request, err);
    for (int left; (left = engine_step(l->engine)) > 0;) {
        snprintf(detail, sizeof detail, "%s %d of %d%s%s", what, l->n_completions - left,
                 l->n_completions, *l->c.detail ? ", " : "", l->c.detail);
        train_loop_show(&l->c, l->c.bar.done, detail);
    }
    return rc;
}

static int generate_completions(struct rl_trainer *l, int64_t step, struct error *err) {
    memset(l->sampled, 0, (size_t)l->c.n * sizeof *l->sampled);
    for (int i = 0; i < l->n_completions; i++) rl_completion_begin(l, step, i);
    int rc = requests_run(l, "sampled", err);
    for (int i = 0; !rc && i < l->n_completions; i++) rl_completion_finish(l, &l->completions[i]);
    return rc;
}

/* Computes log-probabilities of the completions and adds up a KL from the reference. under_current
 * false: under the reference; stores them, and adds the KL of the sampling policy to `sampled`.
 * under_current true: under the current policies; adds their KL to `sums`. */
static int compute_logprobs(struct rl_trainer *l, bool under_current, struct error *err) {
    for (int i = 0; i < l->n_completions; i++) {
        struct rl_completion *p = &l->completions[i];
        engine_request_release(&p->request);
        p->request = (struct engine_request){
            .prompt = p->sample.tokens,
            .n_prompt = p->sample.n,
            .adapter = under_current ? l->policies[p->job].policy : l->c.initial_adapters[p->job],
            .n_invocation_prompt = p->prompt->n,
            .sampling = {.top_p = 1},
            .prompt_logprobs = true,
            .logprob_temperature = (float)l->o->temperature};
    }
    int rc = requests_run(l, "scored", err);
    for (int i = 0; !rc && i < l->n_completions; i++) {
        struct rl_completion *p = &l->completions[i];
        const float *logp = p->request.prompt_logprob + p->sample.n - p->n;
        struct policy_loss_stats *s = under_current ? &l->sums[p->job] : &l->sampled[p->job];
        if (!under_current) memcpy(p->reference, logp, (size_t)p->n * sizeof *logp);
        for (int32_t k = 0; k < p->sampled; k++)
            s->kl += kl_k3(under_current ? (double)logp[k] : p->old[k], (double)p->reference[k]);
        s->tokens += p->sampled;
    }
    return rc;
}

/* rewards */

static int compute_rewards(struct rl_trainer *l, struct error *err) {
    const struct reward_fn *r = &l->reward;
    struct reward_input *v = xcalloc((size_t)l->n_completions, sizeof *v);
    int rc = OK;
    for (int i = 0; i < l->n_completions; i++) {
        const struct rl_completion *p = &l->completions[i];
        v[i] = (struct reward_input){p->item, p->text.data, p->request.finish == FINISH_STOP};
        if (r->score_one) l->rewards[i] = r->score_one(r->ctx, p->item, p->text.data);
    }
    if (!r->score_one) rc = r->score_batch(r->ctx, v, l->n_completions, l->rewards, err);
    for (int i = 0; !rc && i < l->n_completions; i++)
        if (!isfinite(l->rewards[i]))
            rc = error_set(err, ERR_NUMERIC,
                           "the reward of completion '%.60s' is not a finite number", v[i].text);
    free(v);
    return rc;
}

/* The moving average of the rewards of earlier steps, corrected for its start at 0 as Adam's
 * moments are; 0 in the first step. */
static double baseline_value(const struct rl_policy *t, int64_t step) {
    return step ? t->baseline / (1 - math_pow(BASELINE_DECAY, (double)step)) : 0;
}

/* The fraction of prompts whose completions differ in reward; RLOO and GRPO learn only from these
 * prompts. */
static double nonzero_variance_share(const struct rl_trainer *l, int j) {
    const double *r = l->rewards + j * l->per_update * l->o->num_generations;
    int64_t mixed = 0;
    for (int64_t i = 0; i < l->per_update; i++, r += l->o->num_generations)
        for (int64_t k = 1; k < l->o->num_generations; k++)
            if (r[k] != r[0]) {
                mixed++;
                break;
            }
    return (double)mixed / (double)l->per_update;
}

/* Whether rewards that the method compares differ: of RLOO and GRPO those of one prompt, of
 * REINFORCE all of the step, and the means of this step and the first one. */
static bool rewards_differ(const struct rl_trainer *l, int j) {
    int64_t per_adapter = l->per_update * l->o->num_generations;
    const double *r = l->rewards + j * per_adapter;
    if (l->method != METHOD_REINFORCE) return nonzero_variance_share(l, j) > 0;
    for (int64_t i = 1; i < per_adapter; i++)
        if (r[i] != r[0]) return true;
    return l->policies[j].last_reward != l->policies[j].first_reward;
}

static void compute_advantages(struct rl_trainer *l, int64_t step) {
    int64_t per_adapter = l->per_update * l->o->num_generations;
    for (int j = 0; j < l->c.n; j++) {
        struct rl_policy *t = &l->policies[j];
        const double *r = l->rewards + j * per_adapter;
        double sum = 0;
        policy_advantages(l->method, r, l->per_update, l->o->num_generations,
                          baseline_value(t, step), l->advantages + j * per_adapter);
        for (int64_t i = 0; i < per_adapter; i++) sum += r[i];
        t->last_reward = sum / (double)per_adapter;
        if (step == 0) t->first_reward = t->last_reward;
        t->rewards_differed |= rewards_differ(l, j);
        t->baseline = BASELINE_DECAY * t->baseline + (1 - BASELINE_DECAY) * t->last_reward;
    }
}

/* updates */

/* Without KL in the loss, a completion with advantage 0 has no gradient. */
static bool has_no_gradient(const struct rl_trainer *l, int i) {
    return l->o->kl_coef == 0 && l->advantages[i] == 0;
}

/* Sets `count` of the completions. A completion without gradient gets 0 and is skipped; each other
 * one represents the same share of the adapter's completions. If no completion has a gradient, none
 * is skipped. */
static void compute_loss_weights(struct rl_trainer *l) {
    int64_t per_adapter = l->per_update * l->o->num_generations;
    for (int j = 0; j < l->c.n; j++) {
        int64_t active = 0;
        for (int64_t i = j * per_adapter; i < (j + 1) * per_adapter; i++)
            active += !has_no_gradient(l, (int)i);
        for (int64_t i = j * per_adapter; i < (j + 1) * per_adapter; i++)
            l->completions[i].count = !active ? 1
                                      : has_no_gradient(l, (int)i)
                                          ? 0
                                          : (double)per_adapter / (double)active;
    }
}

/* Packs completions from *i on into the next pass: their samples and the inputs of their loss.
 * Advances *i. Returns the number of packed completions. */
static int pack_completions(struct rl_trainer *l, int *i) {
    int64_t rows = 0;
    int n = 0;
    for (; *i < l->n_completions; ++*i) {
        const struct rl_completion *p = &l->completions[*i];
        if (p->count == 0) continue;
        if (pack_is_full(rows, p->sample.n, l->c.pass_tokens)) break;
        rows += p->sample.n;
        l->batch[n] = p->sample;
        l->rollouts[n++] = (struct rollout){l->advantages[*i], p->reference, p->old, p->count};
    }
    return n;
}

static int accumulate_gradients(struct rl_trainer *l, bool is_first_update, struct error *err) {
    struct policy_loss pl = {.batch = l->batch,
                             .rollouts = l->rollouts,
                             .clip = l->o->clip_range,
                             .kl_coef = l->o->kl_coef,
                             .token_mean = l->method == METHOD_GRPO,
                             .is_first_update = is_first_update,
                             .sums = l->sums};
    const struct loss_fn loss = {
        .fn = policy_loss, .ctx = &pl, .temperature = (float)l->o->temperature};
    int rc = OK;
    for (int i = 0, n; !rc && (n = pack_completions(l, &i)) > 0;)
        rc = trainer_accumulate_loss(l->c.trainer, l->batch, n, &loss, err);
    return rc;
}

static int sync_policies(struct rl_trainer *l, struct error *err) {
    int rc = OK;
    for (int j = 0; !rc && j < l->c.n; j++) {
        adapter_release(l->policies[j].policy);
        l->policies[j].policy = trainer_export_adapter(l->c.trainer, j, NULL);
        rc = adapter_bind(l->policies[j].policy, l->c.m, err);
    }
    return rc;
}

static void sums_clear(struct rl_trainer *l) {
    memset(l->sums, 0, (size_t)l->c.n * sizeof *l->sums);
}

static double sums_kl(const struct policy_loss_stats *s) {
    return s->tokens ? s->kl / (double)s->tokens : 0;
}

/* Undoes the update of every adapter whose KL exceeds kl_max. *undone: number of adapters whose
 * update was undone. */
static int kl_rollback(struct rl_trainer *l, int64_t update, int *undone, struct error *err) {
    *undone = 0;
    if (!l->snapshot) return OK;
    sums_clear(l);
    int rc = compute_logprobs(l, true, err);
    for (int j = 0; !rc && j < l->c.n; j++) {
        double kl = sums_kl(&l->sums[j]);
        if (kl <= l->o->kl_max) continue;
        log_warn(
            "update %lld of '%s' is not applied: with it the KL would be %.4f, above --kl-max %g",
            (long long)update + 1, l->c.jobs[j].name, kl, l->o->kl_max);
        trainer_snapshot_restore(l->snapshot, l->c.trainer, j);
        ++*undone;
    }
    return rc || !*undone ? rc : sync_policies(l, err);
}

static double std_deviation(const double *v, int64_t n, double mean) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (v[i] - mean) * (v[i] - mean);
    return sqrt(sum / (double)n);
}

/* Metrics of adapter j for the log. Clipping is reported only if a step has several updates: in the
 * first update all ratios are 1. The entropy is estimated as the mean of -log π over the sampled
 * tokens. */
static json_t *policy_stats_json(const struct rl_trainer *l, int j) {
    int64_t per_adapter = l->per_update * l->o->num_generations, tokens = 0, sampled = 0, ended = 0;
    const struct policy_loss_stats *s = &l->sums[j];
    double entropy = 0;
    for (int64_t i = j * per_adapter; i < (j + 1) * per_adapter; i++) {
        const struct rl_completion *p = &l->completions[i];
        tokens += p->n;
        sampled += p->sampled;
        ended += p->end >= 0 && p->sample.tokens[p->sample.n - 1] == p->end;
        for (int32_t k = 0; k < p->sampled; k++) entropy -= p->old[k];
    }
    json_t *v = json_pack(
        "{s:f,s:f,s:f,s:f,s:f,s:f,s:f}", "reward", l->policies[j].last_reward, "reward_std",
        std_deviation(l->rewards + j * per_adapter, per_adapter, l->policies[j].last_reward),
        "mixed", nonzero_variance_share(l, j), "kl", sums_kl(&l->sampled[j]), "entropy",
        sampled ? entropy / (double)sampled : 0, "length", (double)tokens / (double)per_adapter,
        "ended", (double)ended / (double)per_adapter);
    if (l->o->num_iterations > 1)
        json_object_set_new(v, "clipped",
                            json_real(s->tokens ? (double)s->clipped / (double)s->tokens : 0));
    return v;
}

static void step_log(const struct rl_trainer *l, json_t *line) {
    json_t *list = json_object();
    double reward = 0, kl = 0;
    for (int j = 0; j < l->c.n; j++) {
        reward += l->policies[j].last_reward / l->c.n;
        kl += sums_kl(&l->sampled[j]) / l->c.n;
        json_object_set_new(list, l->c.jobs[j].name, policy_stats_json(l, j));
    }
    json_object_set_new(line, "reward", json_real(reward));
    json_object_set_new(line, "kl", json_real(kl));
    json_object_set_new(line, "adapters", list);
}

static int inner_update(struct rl_trainer *l, int64_t update, bool is_first_update, json_t *line,
                        int *undone, struct error *err) {
    sums_clear(l);
    for (int i = 0; l->snapshot && i < l->c.n; i++)
        trainer_snapshot_save(l->snapshot, l->c.trainer, i);
    int rc = accumulate_gradients(l, is_first_update, err);
    if (!rc) rc = train_loop_optimizer_step(&l->c, update, err);
    if (!rc) step_log(l, line);
    if (!rc) rc = sync_policies(l, err);
    return rc ? rc : kl_rollback(l, update, undone, err);
}

static void completions_release(struct rl_trainer *l) {
    for (int i = 0; i < l->n_completions; i++) rl_completion_release(&l->completions[i]);
}

static int rl_trainer_step(void *ctx, int64_t step, json_t *line, struct error *err) {
    struct rl_trainer *l = ctx;
    int undone = 0, n_undone = 0, rc = generate_completions(l, step, err);
    if (!rc) rc = compute_rewards(l, err);
    if (!rc) rc = compute_logprobs(l, false, err);
    if (rc == OK) {
        compute_advantages(l, step);
        compute_loss_weights(l);
    }
    for (int64_t i = 0; !rc && i < l->c.per_step; i++, n_undone += undone)
        rc = inner_update(l, step * l->c.per_step + i, i == 0, line, &undone, err);
    if (l->snapshot) json_object_set_new(line, "not_applied", json_integer(n_undone));
    completions_release(l);
    return rc;
}

/* The state of a checkpoint, in full precision (the log is rounded). */
static json_t *rl_trainer_state(void *ctx) {
    const struct rl_trainer *l = ctx;
    json_t *list = json_array();
    for (int j = 0; j < l->c.n; j++)
        json_array_append_new(
            list, json_pack("[f,f,f,b]", l->policies[j].baseline, l->policies[j].first_reward,
                            l->policies[j].last_reward, (int)l->policies[j].rewards_differed));
    return list;
}

static void rl_trainer_restore(void *ctx, const json_t *state) {
    struct rl_trainer *l = ctx;
    struct error err;
    for (int j = 0; state && j < l->c.n; j++) {
        const json_t *v = json_array_get(state, (size_t)j);
        l->policies[j].baseline = json_number_value(json_array_get(v, 0));
        l->policies[j].first_reward = json_number_value(json_array_get(v, 1));
        l->policies[j].last_reward = json_number_value(json_array_get(v, 2));
        // checkpoints of version 0.1 do not have it
        l->policies[j].rewards_differed = !json_is_false(json_array_get(v, 3));
    }
    CHECK(sync_policies(l, &err) == OK); // this can only fail for a DoRA norm of 0, which would
                                         // have failed the step before the checkpoint
}

/* opening */

static int rl_policy_open(struct rl_trainer *l, int j, struct error *err) {
    struct train_job *job = &l->c.jobs[j];
    struct rl_policy *t = &l->policies[j];
    struct prompt_source source = {.path = job->data,
                                   .prefix = l->o->prefix,
                                   .tok = l->c.m->tok,
                                   .seed = (uint64_t)l->c.o->seed,
                                   .check = l->reward.check,
                                   .check_ctx = l->reward.ctx};
    struct prompt_set eval = {0};
    source.max_length = train_loop_max_length(&l->c) - (int32_t)l->o->max_new_tokens;
    const struct adapter_config activation = train_job_activation(job);
    int rc = prompt_set_load(&t->prompts, &source, err);
    if (!rc) rc = dataset_activate(&t->prompts.data, &activation, err);
    if (rc) return error_wrap(err, "data of '%s'", job->name);
    for (int i = 0; i < t->prompts.data.n; i++)
        l->longest = MAX(l->longest, t->prompts.data.v[i].n + (int32_t)l->o->max_new_tokens);
    if (job->eval_data) {
        source.path = job->eval_data;
        source.check = NULL;
        if ((rc = prompt_set_load(&eval, &source, err)))
            return error_wrap(err, "evaluation data of '%s'", job->name);
    }
    l->c.data[j] = t->prompts.data.hash;
    rc = lint_dataset(&t->prompts.data, job->eval_data ? &eval.data : NULL, &job->lint, err);
    prompt_set_release(&eval);
    return rc ? rc : epoch_shuffle_init(&t->order, t->prompts.data.n, err);
}

static int completions_alloc(struct rl_trainer *l, struct error *err) {
    size_t n = (size_t)(l->c.n * l->per_update * l->o->num_generations);
    l->n_completions = (int)n;
    l->completions = try_calloc(n, sizeof *l->completions, err);
    if (l->completions) l->rewards = try_calloc(n, sizeof *l->rewards, err);
    if (l->rewards) l->advantages = try_calloc(n, sizeof *l->advantages, err);
    if (l->advantages) l->batch = try_calloc(n, sizeof *l->batch, err);
    if (l->batch) l->rollouts = try_calloc(n, sizeof *l->rollouts, err);
    return l->rollouts ? OK : err->code;
}

/* Number of completions of a whole step, over all adapters. */
static int64_t completions_per_step(const struct rl_trainer *l) {
    return l->c.o->bsz * l->c.o->grad_accum * l->o->num_generations * l->c.n;
}

static int options_check(const struct rl_trainer *l, struct error *err) {
    if (l->method != METHOD_REINFORCE && l->o->num_generations < 2)
        return error_set(err, ERR_USAGE,
                         "'num_generations' is 1; this method compares completions of one prompt, "
                         "so it needs at least 2");
    if (l->o->max_new_tokens >= train_loop_max_length(&l->c))
        return error_set(err, ERR_USAGE,
                         "'max_tokens' is %lld; a sample has room for %d tokens in all",
                         (long long)l->o->max_new_tokens, train_loop_max_length(&l->c));
    if (completions_per_step(l) > 1 << 24)
        return error_set(err, ERR_USAGE, "'%lld' completions an update are too many",
                         (long long)completions_per_step(l));
    return OK;
}

static json_t *identity_json(const struct rl_trainer *l) {
    const struct rl_options *o = l->o;
    json_t *id = rl_identity(&l->c);
    json_object_update_new(
        id, json_pack("{s:I,s:I,s:f,s:s,s:f,s:f,s:f,s:s}", "k", (json_int_t)o->num_generations,
                      "max_new_tokens", (json_int_t)o->max_new_tokens, "temperature",
                      o->temperature, "prefix", o->prefix ? o->prefix : "", "clip", o->clip_range,
                      "kl_coef", o->kl_coef, "kl_max", o->kl_max, "reward",
                      l->owned_reward.ctx ? o->reward : "a function"));
    return id;
}

static struct engine_options engine_options_for(const struct rl_trainer *l) {
    int64_t most = l->o->limits.max_seqs ? l->o->limits.max_seqs : MAX_SEQS;
    return (struct engine_options){.max_seqs = (int32_t)MIN(completions_per_step(l), most),
                                   .max_rows = 512,
                                   .max_len = l->longest,
                                   .kv_elem = l->c.kv,
                                   .pool = l->c.pool};
}

/* The policies are copies of the trainer's adapters, packed for the engine. */
static int memory_plan(struct rl_trainer *l, struct error *err) {
    struct train_memory_needs needs = {
        .longest = l->longest,
        .together = l->longest,
        .engine = &l->engine_options,
        .other = train_completions_bytes(completions_per_step(l), l->longest)};
    for (int j = 0; j < l->c.n; j++)
        needs.other += 2 * l->c.initial_adapters[j]->n_data * sizeof(float);
    return train_loop_plan_memory(&l->c, &needs, err);
}

static int rl_trainer_open(struct rl_trainer *l, struct error *err) {
    int64_t max_prompts = 1;
    int rc = options_check(l, err);
    for (int j = 0; !rc && j < l->c.n; j++) rc = rl_policy_open(l, j, err);
    if (!rc)
        rc = engine_limits_require(&l->o->limits, l->longest, "the longest prompt with its reply",
                                   err);
    if (!rc) rc = completions_alloc(l, err);
    if (rc) return rc;
    for (int j = 0; j < l->c.n; j++) max_prompts = MAX(max_prompts, l->policies[j].prompts.data.n);
    l->c.per_step = l->o->num_iterations;
    l->c.steps = train_loop_count_steps(&l->c, max_prompts, l->c.o->bsz * l->c.o->grad_accum);
    l->c.identity = identity_json(l);
    rc = train_loop_begin(&l->c, err);
    if (rc) return rc;
    if (l->o->kl_max > 0) l->snapshot = trainer_snapshot_new(l->c.trainer);
    l->engine_options = engine_options_for(l);
    if ((rc = memory_plan(l, err))) return rc;
    l->engine = engine_new(l->c.m, &l->engine_options, err);
    return l->engine ? OK : err->code;
}

static void rl_trainer_release(struct rl_trainer *l) {
    engine_free(l->engine);
    if (l->rollouts) completions_release(l);
    for (int j = 0; j < l->c.n; j++) {
        prompt_set_release(&l->policies[j].prompts);
        epoch_shuffle_release(&l->policies[j].order);
        adapter_release(l->policies[j].policy);
    }
    train_loop_release(&l->c);
    trainer_snapshot_free(l->snapshot);
    reward_fn_close(&l->owned_reward);
    free(l->policies);
    free(l->completions);
    free(l->rewards);
    free(l->advantages);
    free(l->batch);
    free(l->rollouts);
    free(l->sums);
    free(l->sampled);
}

static int rl_trainer_init(struct rl_trainer *l, const struct train_loop *c,
                           enum train_method method, const struct rl_options *o,
                           const struct reward_fn *reward, struct error *err) {
    *l = (struct rl_trainer){.c = *c, .method = method, .o = o};
    l->per_update = c->o->bsz * c->o->grad_accum;
    l->policies = xcalloc((size_t)c->n, sizeof *l->policies);
    l->sums = xcalloc((size_t)c->n, sizeof *l->sums);
    l->sampled = xcalloc((size_t)c->n, sizeof *l->sampled);
    int rc = reward ? OK : reward_fn_open(&l->owned_reward, o, err);
    l->reward = reward ? *reward : l->owned_reward;
    return rc;
}

/* Sets the rewards of the job, and warns if they could not teach anything. */
static void rewards_report(const struct rl_policy *t, struct train_job *job) {
    job->first_reward = t->first_reward;
    job->last_reward = t->last_reward;
    if (!t->rewards_differed)
        log_warn("'%s' could not learn: in every group all completions had the same reward; try a "
                 "higher --temperature, more --num-generations, or another --reward",
                 job->name);
}

int policy_gradient_run(const struct train_loop *c, enum train_method method,
                        const struct rl_options *o, const struct reward_fn *reward,
                        struct error *err) {
    struct rl_trainer l;
    int rc = rl_trainer_init(&l, c, method, o, reward, err);
    if (!rc) rc = rl_trainer_open(&l, err);
    if (!rc) rc = train_loop_check_data(&l.c, err);
    const struct train_loop_ops step = {rl_trainer_step, rl_trainer_state, rl_trainer_restore, &l};
    if (!rc) rc = train_loop_run(&l.c, &step, err);
    for (int j = 0; !rc && j < c->n; j++) rewards_report(&l.policies[j], &c->jobs[j]);
    rl_trainer_release(&l);
    return rc;
}

/* the plan */

/* Runs the first step on the plan's completions and measures the time of each part. */
static int measure_first_step(struct rl_trainer *l, struct rl_plan *out, struct error *err) {
    struct training_plan *plan = &out->run;
    double times[5];
    times[0] = clock_now();
    int rc = generate_completions(l, 0, err);
    times[1] = clock_now();
    if (!rc) rc = compute_rewards(l, err);
    times[2] = clock_now();
    if (!rc) rc = compute_logprobs(l, false, err);
    times[3] = clock_now();
    if (rc) return rc;
    compute_advantages(l, 0);
    compute_loss_weights(l);
    rc = accumulate_gradients(l, true, err);
    times[4] = clock_now();
    out->sampling_seconds = times[1] - times[0];
    out->reward_seconds = times[2] - times[1];
    out->scoring_seconds = times[3] - times[2];
    plan->pass_seconds = times[4] - times[3];
    return rc ? rc : training_plan_time_update(l->c.trainer, plan, err);
}

static void plan_add_completions(struct rl_trainer *l, struct rl_plan *out) {
    struct pack_counter count = {.plan = &out->run, .most = l->c.pass_tokens};
    out->completions = json_object();
    out->sampled = l->n_completions;
    out->run.first = xcalloc((size_t)l->c.n, sizeof *out->run.first);
    for (int j = 0; j < l->c.n; j++) {
        const struct rl_completion *first =
            &l->completions[j * l->per_update * l->o->num_generations];
        json_object_set_new(out->completions, l->c.jobs[j].name, policy_stats_json(l, j));
        training_plan_add_example(&out->run, &first->sample, j);
    }
    for (int i = 0; i < l->n_completions; i++)
        if (l->completions[i].count > 0) pack_counter_add(&count, &l->completions[i].sample, 1);
}

/* Extrapolates from the sampled completions to the whole run. */
static void plan_extrapolate(const struct rl_trainer *l, struct rl_plan *out) {
    struct training_plan *plan = &out->run;
    double scale = (double)completions_per_step(l) / l->n_completions,
           inner = (double)l->o->num_iterations;
    double sampling = out->sampling_seconds + out->reward_seconds + out->scoring_seconds;
    double update = scale * plan->pass_seconds + plan->update_seconds;
    if (l->snapshot) update += scale * out->scoring_seconds;
    plan->pass_tokens = plan->tokens;
    plan->seconds = (double)plan->updates * (scale * sampling + inner * update);
    double scale_to_run = (double)plan->updates * inner * scale;
    plan->tokens = (int64_t)((double)plan->tokens * scale_to_run + 0.5);
    plan->passes = (int64_t)((double)plan->passes * scale_to_run + 0.5);
}

static void plan_bound_memory(const struct rl_trainer *l, struct rl_plan *out) {
    struct training_plan *plan = &out->run;
    plan->longest = l->longest;
    plan->max_rows = MAX(l->longest, MIN(l->c.pass_tokens, l->longest * completions_per_step(l)));
    out->engine_bytes = engine_bytes(&l->c.m->config, &l->engine_options);
    plan->bytes = trainer_bytes(l->c.trainer, plan->max_rows, plan->longest) + out->engine_bytes;
    if (l->snapshot) plan->bytes += trainer_snapshot_bytes(l->snapshot);
}

int policy_gradient_plan(const struct train_loop *c, enum train_method method,
                         const struct rl_options *o, const struct reward_fn *reward,
                         struct rl_plan *out, struct error *err) {
    struct rl_trainer l;
    struct training_plan *plan = &out->run;
    int rc = rl_trainer_init(&l, c, method, o, reward, err);
    plan->samples_per_update = l.per_update * o->num_generations;
    l.per_update = MIN(l.per_update, MAX(MAX_SEQS / (o->num_generations * c->n), 1));
    if (!rc) rc = rl_trainer_open(&l, err);
    if (!rc) rc = sync_policies(&l, err);
    train_loop_show_tokens(&l.c, "first step, tokens");
    if (!rc) rc = measure_first_step(&l, out, err);
    progress_finish(&l.c.bar, NULL);
    if (!rc) {
        plan->memory = l.c.memory;
        plan->updates = l.c.steps;
        plan->samples = l.c.steps * completions_per_step(&l);
        plan_add_completions(&l, out);
        plan_extrapolate(&l, out);
        plan_bound_memory(&l, out);
    }
    rl_trainer_release(&l);
    return rc;
}
