/*
 * gate: the paired test that decides whether a trained adapter is published.
 *
 * The test needs only forward passes, not a trainer, and measures the model as it will be served.
 * Samples are computed one after another in file order, so neither the number of threads nor other
 * samples change a bit of a result.
 */
#include "train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 64 }; /* rows of a forward pass; the logits of all of them are in memory */

struct gate_scores {
    struct forward *f;
    const struct adapter *a;
    float *logits; /* [ROWS][V] */
    int32_t vocab;
    int32_t next[ROWS]; /* the target token of each row of logits */
    double nll[ROWS];   /* nll of each target */
};

static void targets_score(void *ctx, int64_t begin, int64_t end, int thread) {
    struct gate_scores *c = ctx;
    const struct kernels *k = kernels_get();
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        float *x = c->logits + i * c->vocab, target_logit = x[c->next[i]];
        double max = (double)k->max(x, c->vocab), total = (double)k->softmax(x, c->vocab);
        c->nll[i] = max + math_log(total) - (double)target_logit;
    }
}

/* Runs rows [from, from + n) of a sample. Adds the negative log-likelihood of the rows' targets to
 * *sum, and the number of targets to *targets. */
static void rows_run(struct gate_scores *c, const struct train_sample *s, int32_t from, int32_t n,
                     struct pool *pool, double *sum, int64_t *targets) {
    struct batch_row rows[ROWS];
    int32_t out[ROWS], n_out = 0;
    struct lora_part part;
    // `active`: the first of the rows that the adapter changes
    int32_t activation = c->a ? train_sample_activation(s, &c->a->config) : 0,
            active = MIN(MAX(activation - from, 0), n);
    struct lora_segment seg = adapter_lora_segment(c->a, active, n, &part);
    for (int32_t i = 0; i < n; i++) {
        int32_t position = from + i;
        rows[i] = (struct batch_row){s->tokens[position], position, 0};
        if (!s->mask[position + 1]) continue;
        c->next[n_out] = s->tokens[position + 1];
        out[n_out++] = i;
    }
    forward_run(c->f, rows, n, &seg, active < n, out, n_out, c->logits);
    pool_run(pool, targets_score, c, n_out, 1);
    for (int32_t i = 0; i < n_out; i++) *sum += c->nll[i];
    *targets += n_out;
}

static struct forward_options forward_options_for(int32_t longest, enum dtype kv,
                                                  struct pool *pool) {
    return (struct forward_options){
        .max_rows = ROWS, .n_slots = 1, .slot_len = MAX(longest, 1), .kv_elem = kv, .pool = pool};
}

size_t gate_eval_bytes(const struct model_config *c, int32_t longest, struct pool *pool) {
    struct forward_options o = forward_options_for(longest, DTYPE_F32, pool);
    return forward_bytes(c, &o) + (size_t)ROWS * (size_t)c->vocab_size * sizeof(float);
}

int gate_eval_nll(const struct model *m, const struct adapter *a, const struct dataset *d,
                  enum dtype kv, struct pool *pool, double *nll, struct error *err) {
    struct gate_scores c = {.a = a, .vocab = m->config.vocab_size};
    int32_t longest = 1;
    for (int i = 0; i < d->n; i++) longest = MAX(longest, d->v[i].n);
    struct forward_options o = forward_options_for(longest, kv, pool);
    CHECK(o.slot_len <= m->config.max_seq_len && (!a || adapter_is_ready(a)));
    c.f = forward_new(m, &o);
    c.logits = try_calloc((size_t)ROWS * (size_t)c.vocab, sizeof *c.logits, err);
    int rc = !c.logits ? err->code : c.f ? OK : error_set(err, ERR_MEMORY, "no memory to measure");
    for (int i = 0; rc == OK && i < d->n; i++) {
        const struct train_sample *s = &d->v[i];
        double sum = 0;
        int64_t targets = 0;
        for (int32_t from = 0; from < s->n - 1; from += ROWS)
            rows_run(&c, s, from, MIN(ROWS, s->n - 1 - from), pool, &sum, &targets);
        nll[i] = sum / (double)MAX(targets, 1);
        if (!isfinite(nll[i]))
            rc = error_set(err, ERR_NUMERIC, "the loss of held-out sample %d is not finite", i + 1);
    }
    forward_free(c.f);
    free(c.logits);
    return rc;
}

struct gate_comparison gate_compare(const double *before, const double *after, int64_t n) {
    struct gate_comparison g = {.n = n, .p = 1};
    double *gain = xcalloc((size_t)MAX(n, 1), sizeof *gain);
    for (int64_t i = 0; i < n; i++) {
        g.before += before[i] / (double)n;
        g.after += after[i] / (double)n;
        gain[i] = before[i] - after[i];
    }
    g.gain = stats_mean_interval(gain, n);
    if (n > 0) g.p = stats_sign_flip_test(gain, n);
    free(gain);
    return g;
}

/* NULL if the new adapter is better, or if nothing was held out; else the reason why it is not
 * published. */
static const char *reason_not_better(const struct gate_comparison *g, double alpha) {
    if (g->n == 0) return NULL;
    if (g->n < 32 && ldexp(1, 1 - (int)g->n) > alpha)
        return "so few held-out samples cannot be significant at this alpha; give more";
    if (g->gain.value <= 0) return "it is not better on the held-out samples";
    if (g->p > alpha) return "it is better on the held-out samples, but not beyond chance";
    return NULL;
}

void gate_decide(struct gate *g, double alpha, double tolerance) {
    const char *refusal = reason_not_better(&g->eval, alpha);
    /* A single sample has no interval. */
    bool is_retained = g->retain.n == 0 || (g->retain.n > 1 && g->retain.gain.lo >= -tolerance);
    g->publish = !refusal && is_retained;
    if (refusal)
        snprintf(g->why, sizeof g->why, "%s", refusal);
    else if (!is_retained)
        snprintf(g->why, sizeof g->why,
                 "on the samples to retain it may lose %.4g nats per token, more than %.4g%s",
                 g->retain.n > 1 ? -g->retain.gain.lo : (double)INFINITY, tolerance,
                 g->retain.gain.value >= -tolerance ? "; more samples would narrow the interval"
                                                    : "");
    else
        snprintf(g->why, sizeof g->why, "%s",
                 g->eval.n     ? "it is better on the held-out samples"
                 : g->retain.n ? "no loss on what is to be retained"
                               : "nothing was held out to compare on");
}

static json_t *comparison_json(const struct gate_comparison *p) {
    if (p->n == 0) return json_null();
    return json_pack("{s:I,s:f,s:f,s:f,s:f,s:f,s:f}", "n", (json_int_t)p->n, "before", p->before,
                     "after", p->after, "gain", p->gain.value, "lo", p->gain.lo, "hi", p->gain.hi,
                     "p", p->p);
}

json_t *gate_json(const struct gate *g) {
    return json_pack("{s:b,s:s,s:o,s:o}", "published", (int)g->publish, "why", g->why, "eval",
                     comparison_json(&g->eval), "retain", comparison_json(&g->retain));
}
