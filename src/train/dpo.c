/*
 * dpo: DPO on pairs of a chosen and a rejected answer. The loss depends on the log-probabilities of
 * the two answers, minus their log-probabilities under the reference.
 *
 * The reference is the start adapter. Its log-probabilities are computed once per run for all
 * pairs, by the trainer before the first update. The two answers of a pair are always in the same
 * forward and backward pass, because the loss needs both.
 */
#include "train/train_loop.h"

#include <stdlib.h>

struct preference_data { /* the pairs of one job */
    struct dataset data;
    struct epoch_shuffle order;
    double *reference_logp;   /* [data.targets] log-probabilities under the reference */
    const double **reference; /* [data.n] the first target of each sample in reference_logp */
};
struct dpo_trainer {
    struct train_loop c;
    struct preference_data *jobs; /* [n] */
    int64_t per_update;           /* pairs of each adapter in an update */
    struct train_sample *batch;   /* [n_batch] samples of the next pass, borrowed */
    const double **reference;     /* reference log-probabilities of each sample in the batch */
    int n_batch;
    int64_t rows; /* tokens of the batch; each is one row of the pass */
    struct dpo dpo;
};

static void reference_logprobs_index(struct preference_data *q) {
    const double *next = q->reference_logp;
    for (int i = 0; i < q->data.n; i++) {
        const struct train_sample *s = &q->data.v[i];
        q->reference[i] = next;
        for (int32_t k = 1; k < s->n; k++) next += s->mask[k];
    }
    CHECK(next == q->reference_logp + q->data.targets);
}

static int reference_logprobs_compute(struct dpo_trainer *p, int job, struct error *err) {
    struct preference_data *q = &p->jobs[job];
    double *out = q->reference_logp;
    struct progress bar;
    int rc = OK;
    progress_start(&bar, "reference", q->data.n);
    for (int i = 0, n; !rc && i < q->data.n; i += n) {
        int64_t rows = 0;
        for (n = 0; i + n < q->data.n && !pack_is_full(rows, q->data.v[i + n].n, p->c.pass_tokens);
             n++) {
            q->data.v[i + n].adapter = job;
            rows += q->data.v[i + n].n;
        }
        rc = trainer_token_nll(p->c.trainer, q->data.v + i, n, out, err);
        const double *end =
            i + n < q->data.n ? q->reference[i + n] : q->reference_logp + q->data.targets;
        for (; !rc && out < end; out++) *out = -*out;
        progress_update(&bar, i + n, NULL);
    }
    progress_finish(&bar, NULL);
    return rc ? error_wrap(err, "the reference of '%s'", p->c.jobs[job].name) : OK;
}

static int batch_run(void *ctx, struct error *err) {
    struct dpo_trainer *p = ctx;
    const struct loss_fn loss = {.fn = dpo_loss, .ctx = &p->dpo};
    return trainer_accumulate_loss(p->c.trainer, p->batch, p->n_batch, &loss, err);
}

static int batch_flush(struct dpo_trainer *p, struct error *err) {
    int rc = p->n_batch ? batch_run(p, err) : OK;
    p->n_batch = 0;
    p->rows = 0;
    return rc;
}

/* Index of the i-th pair of update u. */
static int pair_at(struct dpo_trainer *p, int job, int64_t u, int64_t i) {
    return (int)epoch_shuffle_at(&p->jobs[job].order, p->c.o->seed, u * p->per_update + i);
}

static int64_t pair_rows(const struct preference_data *q, int pair) {
    return q->data.v[2 * pair].n + q->data.v[2 * pair + 1].n;
}

static void pair_add(struct dpo_trainer *p, int job, int pair) {
    const struct preference_data *q = &p->jobs[job];
    for (int k = 2 * pair; k < 2 * pair + 2; k++) {
        p->reference[p->n_batch] = q->reference[k];
        p->batch[p->n_batch] = q->data.v[k];
        p->batch[p->n_batch++].adapter = job;
        p->rows += q->data.v[k].n;
    }
}

static void dpo_stats_log(const struct dpo_trainer *p, json_t *line) {
    json_t *adapters = json_object();
    double margin = 0, accuracy = 0, kl = 0;
    for (int j = 0; j < p->c.n; j++) {
        const struct dpo_stats *s = &p->dpo.sums[j];
        double n = (double)s->n, kl_per_token = s->kl / (double)s->tokens;
        p->c.jobs[j].last_accuracy = (double)s->right / n;
        margin += s->margin / n / p->c.n;
        accuracy += (double)s->right / n / p->c.n;
        kl += kl_per_token / p->c.n;
        json_object_set_new(adapters, p->c.jobs[j].name,
                            json_pack("{s:f,s:f,s:f,s:f,s:f}", "margin", s->margin / n,
                                      "reward_chosen", s->chosen / n, "reward_rejected",
                                      (s->chosen - s->margin) / n, "accuracy", (double)s->right / n,
                                      "kl", kl_per_token));
    }
    json_object_set_new(line, "margin", json_real(margin));
    json_object_set_new(line, "accuracy", json_real(accuracy));
    json_object_set_new(line, "kl", json_real(kl));
    json_object_set_new(line, "adapters", adapters);
}

static int dpo_step(void *ctx, int64_t step, json_t *line, struct error *err) {
    struct dpo_trainer *p = ctx;
    int rc = OK;
    for (int j = 0; j < p->c.n; j++) p->dpo.sums[j] = (struct dpo_stats){0};
    for (int64_t i = 0; !rc && i < p->per_update; i++)
        for (int j = 0; !rc && j < p->c.n; j++) {
            int pair = pair_at(p, j, step, i);
            if (pack_is_full(p->rows, pair_rows(&p->jobs[j], pair), p->c.pass_tokens))
                rc = batch_flush(p, err);
            pair_add(p, j, pair);
        }
    if (!rc) rc = batch_flush(p, err);
    if (!rc) rc = train_loop_optimizer_step(&p->c, step, err);
    if (!rc) dpo_stats_log(p, line);
    return rc;
}

/* The accuracies of the last step. They are results only: no later step depends on them. */
static json_t *dpo_state(void *ctx) {
    const struct dpo_trainer *p = ctx;
    json_t *list = json_array();
    for (int j = 0; j < p->c.n; j++)
        json_array_append_new(list, json_real(p->c.jobs[j].last_accuracy));
    return list;
}

/* Checkpoints of version 0.1 have no accuracies. */
static void dpo_restore(void *ctx, const json_t *state) {
    struct dpo_trainer *p = ctx;
    for (int j = 0; j < p->c.n; j++) {
        const json_t *v = json_array_get(state, (size_t)j);
        if (v) p->c.jobs[j].last_accuracy = json_number_value(v);
    }
}

static int pairs_open(struct dpo_trainer *p, int j, struct error *err) {
    struct preference_data *q = &p->jobs[j];
    struct train_job *job = &p->c.jobs[j];
    const struct tokenizer *tok = p->c.m->tok;
    struct dataset eval = {0};
    int32_t limit = train_loop_max_length(&p->c);
    const struct adapter_config activation = train_job_activation(job);
    int rc = dataset_load_preferences(&q->data, job->data, tok, limit, err);
    if (!rc) rc = dataset_activate(&q->data, &activation, err);
    if (rc) return error_wrap(err, "data of '%s'", job->name);
    if (job->eval_data && (rc = dataset_load_preferences(&eval, job->eval_data, tok, 0, err)))
        return error_wrap(err, "evaluation data of '%s'", job->name);
    p->c.data[j] = q->data.hash;
    rc = lint_dataset(&q->data, job->eval_data ? &eval : NULL, &job->lint, err);
    dataset_release(&eval);
    if (!rc) rc = epoch_shuffle_init(&q->order, q->data.n / 2, err);
    if (!rc)
        q->reference_logp = try_calloc((size_t)q->data.targets, sizeof *q->reference_logp, err);
    if (q->reference_logp) q->reference = try_calloc((size_t)q->data.n, sizeof *q->reference, err);
    if (!q->reference) return err->code;
    reference_logprobs_index(q);
    return OK;
}

/* The two samples of a pair must be in one pass. */
static int memory_plan(struct dpo_trainer *p, struct error *err) {
    struct train_memory_needs needs = {0};
    for (int j = 0; j < p->c.n; j++) {
        const struct preference_data *q = &p->jobs[j];
        for (int i = 0; i < q->data.n; i++) needs.longest = MAX(needs.longest, q->data.v[i].n);
        for (int i = 0; i < q->data.n / 2; i++)
            needs.together = MAX(needs.together, pair_rows(q, i));
    }
    return train_loop_plan_memory(&p->c, &needs, err);
}

static int dpo_open(struct dpo_trainer *p, struct error *err) {
    int64_t max_pairs = 1;
    int rc = OK;
    for (int j = 0; !rc && j < p->c.n; j++) rc = pairs_open(p, j, err);
    if (rc) return rc;
    for (int j = 0; j < p->c.n; j++) max_pairs = MAX(max_pairs, p->jobs[j].data.n / 2);
    p->c.steps = train_loop_count_steps(&p->c, max_pairs, p->per_update);
    p->c.per_step = 1;
    size_t room = 2 * (size_t)p->per_update * (size_t)p->c.n;
    p->batch = try_calloc(room, sizeof *p->batch, err);
    p->reference = p->batch ? try_calloc(room, sizeof *p->reference, err) : NULL;
    if (!p->reference) return err->code;
    p->dpo.batch = p->batch;
    p->dpo.reference = p->reference;
    p->c.identity = rl_identity(&p->c);
    json_object_set_new(p->c.identity, "beta", json_real(p->dpo.beta));
    rc = train_loop_begin(&p->c, err);
    return rc ? rc : memory_plan(p, err);
}

static struct dpo_trainer dpo_make(const struct train_loop *c, const struct rl_options *o) {
    struct dpo_trainer p = {.c = *c, .dpo = {.beta = o->beta}};
    p.per_update = c->o->bsz * c->o->grad_accum;
    p.jobs = xcalloc((size_t)c->n, sizeof *p.jobs);
    p.dpo.sums = xcalloc((size_t)c->n, sizeof *p.dpo.sums);
    return p;
}

static void dpo_release(struct dpo_trainer *p) {
    for (int j = 0; j < p->c.n; j++) {
        dataset_release(&p->jobs[j].data);
        epoch_shuffle_release(&p->jobs[j].order);
        free(p->jobs[j].reference_logp);
        free(p->jobs[j].reference);
    }
    train_loop_release(&p->c);
    free(p->jobs);
    free(p->dpo.sums);
    free(p->batch);
    free(p->reference);
}

int dpo_run(const struct train_loop *c, const struct rl_options *o, struct error *err) {
    struct dpo_trainer p = dpo_make(c, o);
    int rc = dpo_open(&p, err);
    if (!rc) rc = train_loop_check_data(&p.c, err);
    for (int j = 0; !rc && j < c->n; j++) rc = reference_logprobs_compute(&p, j, err);
    const struct train_loop_ops step = {dpo_step, dpo_state, dpo_restore, &p};
    if (!rc) rc = train_loop_run(&p.c, &step, err);
    dpo_release(&p);
    return rc;
}

/* the plan */

/* Adds the passes of the run to the plan. Packs the first epoch (of the job with most pairs) as
 * dpo_step does, counts its passes, and scales the counts to all updates of the run. */
static void passes_count(struct dpo_trainer *p, struct training_plan *plan) {
    int64_t max_pairs = 0;
    for (int j = 0; j < p->c.n; j++) max_pairs = MAX(max_pairs, p->jobs[j].data.n / 2);
    int64_t counted = MIN(p->c.steps, (max_pairs + p->per_update - 1) / p->per_update);
    for (int64_t u = 0; u < counted; u++) {
        struct pack_counter count = {.plan = plan, .most = p->c.pass_tokens};
        for (int64_t i = 0; i < p->per_update; i++)
            for (int j = 0; j < p->c.n; j++)
                pack_counter_add(&count, &p->jobs[j].data.v[2 * pair_at(p, j, u, i)], 2);
    }
    training_plan_scale(plan, counted);
}

/* Lengths of the prompts or of the answers on one side of all pairs; side 0: chosen, 1: rejected.
 */
static struct length_stats pair_lengths(const struct preference_data *q, int side, bool prompt) {
    int n = q->data.n / 2;
    int32_t *v = xcalloc((size_t)n, sizeof *v);
    for (int i = 0; i < n; i++) {
        const struct train_sample *s = &q->data.v[2 * i + side];
        int32_t first = 1;
        while (!s->mask[first]) first++;
        if (prompt)
            v[i] = first;
        else
            for (int32_t k = first; k < s->n; k++) v[i] += s->mask[k];
    }
    struct length_stats l = length_stats_compute(v, n);
    free(v);
    return l;
}

static void plan_add_data(struct dpo_trainer *p, struct rl_plan *out) {
    out->pairs = xcalloc((size_t)p->c.n, sizeof *out->pairs);
    out->run.first = xcalloc(2 * (size_t)p->c.n, sizeof *out->run.first);
    for (int j = 0; j < p->c.n; j++) {
        const struct preference_data *q = &p->jobs[j];
        const struct train_sample *pair = &q->data.v[2 * pair_at(p, j, 0, 0)];
        out->pairs[j] = (struct pair_length_stats){
            pair_lengths(q, 0, true), pair_lengths(q, 0, false), pair_lengths(q, 1, false)};
        for (int k = 0; k < 2; k++) training_plan_add_example(&out->run, &pair[k], j);
    }
}

static int batch_forward(void *ctx, struct error *err) {
    struct dpo_trainer *p = ctx;
    double nll;
    int64_t targets;
    return trainer_eval_loss(p->c.trainer, p->batch, p->n_batch, &nll, &targets, err);
}

/* Measures the first pass of the run twice: only forward, as for the reference, and as a training
 * pass. Estimates the time of the run from both. The reference log-probabilities are still 0; their
 * values do not affect the time. */
static int times_measure(struct dpo_trainer *p, struct rl_plan *out, struct error *err) {
    struct training_plan *plan = &out->run;
    double forward_seconds;
    int64_t data_tokens = 0;
    for (int64_t k = 0; k < p->per_update * p->c.n; k++) {
        int j = (int)(k % p->c.n), pair = pair_at(p, j, 0, k / p->c.n);
        if (pack_is_full(p->rows, pair_rows(&p->jobs[j], pair), p->c.pass_tokens)) break;
        pair_add(p, j, pair);
    }
    plan->pass_tokens = p->rows;
    for (int j = 0; j < p->c.n; j++) data_tokens += p->jobs[j].data.tokens;
    int rc = training_plan_time(batch_forward, p, &forward_seconds, err);
    if (!rc) rc = training_plan_time(batch_run, p, &plan->pass_seconds, err);
    if (!rc) rc = training_plan_time_update(p->c.trainer, plan, err);
    if (rc) return rc;
    out->reference_seconds = forward_seconds * (double)data_tokens / (double)plan->pass_tokens;
    plan->seconds = out->reference_seconds +
                    plan->pass_seconds * (double)plan->tokens / (double)plan->pass_tokens +
                    plan->update_seconds * (double)plan->updates;
    return OK;
}

int dpo_plan(const struct train_loop *c, const struct rl_options *o, struct rl_plan *out,
             struct error *err) {
    struct dpo_trainer p = dpo_make(c, o);
    struct training_plan *plan = &out->run;
    int rc = dpo_open(&p, err);
    if (!rc) {
        plan->memory = p.c.memory;
        plan->updates = p.c.steps;
        plan->samples_per_update = 2 * p.per_update;
        plan->samples = p.c.steps * 2 * p.per_update * c->n;
        passes_count(&p, plan);
        plan_add_data(&p, out);
        train_loop_show_tokens(&p.c, "first pass, tokens");
        rc = times_measure(&p, out, err);
        progress_finish(&p.c.bar, NULL);
    }
    if (!rc) plan->bytes = trainer_bytes(p.c.trainer, plan->max_rows, plan->longest);
    for (int j = 0; !rc && j < c->n; j++)
        plan->bytes += (size_t)p.jobs[j].data.targets * sizeof(double);
    dpo_release(&p);
    return rc;
}
