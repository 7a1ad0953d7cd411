/*
 * perplexity: measures how the predictions of two models differ on the same tokens.
 *
 * Typical use: a model and its quantised copy. The perplexity of each model measures how well it
 * predicts a text. The Kullback-Leibler divergence per position measures the effect of
 * quantisation: for any text it is zero only if the two distributions are equal. The same shows the
 * effect of the type of keys and values in one model.
 *
 * Invariant: the results depend on models and tokens only. Positions are computed separately and
 * summed in order, so the number of threads does not change any bit.
 */
#include "eval/eval.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = 64 }; /* positions per forward pass */

/* The result of one position. */
struct position {
    double nll[2], kl;
    bool same_top;
};

struct divergence_run {
    struct forward *f[2];
    float *logits[2];          /* [ROWS][vocab] */
    float *scratch;            /* [threads][vocab] */
    int32_t next[ROWS];        /* the token that follows each row; -1: not scored */
    struct position out[ROWS]; /* results of the rows */
    int32_t vocab;
};

static int32_t argmax(const float *v, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (v[i] > v[best]) best = i;
    return best;
}

/* Returns log Σ exp(x) of a row, replaces each x by exp(x - max), and sets *total to their sum. */
static double row_normalise(float *x, int32_t n, double *total) {
    const struct kernels *k = kernels_get();
    double max = (double)k->max(x, n);
    *total = (double)k->softmax(x, n);
    return max + math_log(*total);
}

/* Compares the logits a and b of one row. With e_i = exp(a_i - max a) and lse = log Σ exp:
 * KL = Σ e_i (a_i - b_i) / Σ e_i - lse(a) + lse(b). Overwrites b. */
static void position_compare(struct divergence_run *c, int64_t row, float *scratch) {
    int32_t n = c->vocab, next = c->next[row];
    const float *a = c->logits[0] + row * n;
    float *b = c->logits[1] + row * n;
    double total_a, weighted_difference = 0, total_b;
    struct position *p = &c->out[row];
    *p = (struct position){.same_top = argmax(a, n) == argmax(b, n)};
    double logit[2] = {(double)a[next], (double)b[next]};
    memcpy(scratch, a, sizeof *scratch * (size_t)n);
    double lse_a = row_normalise(scratch, n, &total_a);
    for (int32_t i = 0; i < n; i++)
        weighted_difference += (double)scratch[i] * ((double)a[i] - (double)b[i]);
    double lse_b = row_normalise(b, n, &total_b);
    p->kl = MAX(weighted_difference / total_a - lse_a + lse_b, 0.0);
    p->nll[0] = lse_a - logit[0];
    p->nll[1] = lse_b - logit[1];
}

static void positions_compare(void *ctx, int64_t begin, int64_t end, int thread) {
    struct divergence_run *c = ctx;
    for (int64_t i = begin; i < end; i++)
        if (c->next[i] >= 0) position_compare(c, i, c->scratch + (size_t)thread * (size_t)c->vocab);
}

/* Runs tokens [from, from + n) of a passage through both models. */
static void rows_forward(struct divergence_run *c, const int32_t *tokens, int32_t from, int32_t n) {
    struct batch_row rows[ROWS];
    int32_t out[ROWS];
    const struct lora_segment no_adapter = {.end = n};
    for (int32_t i = 0; i < n; i++) {
        rows[i] = (struct batch_row){tokens[from + i], from + i, 0};
        out[i] = i;
    }
    for (int i = 0; i < 2; i++) forward_run(c->f[i], rows, n, &no_adapter, 1, out, n, c->logits[i]);
}

static struct model_divergence positions_sum(const struct position *p, int64_t n) {
    struct model_divergence d = {.n = n};
    double *kl = xcalloc((size_t)MAX(n, 1), sizeof *kl), nll[2] = {0}, n_same_top = 0;
    for (int64_t i = 0; i < n; i++) {
        for (int j = 0; j < 2; j++) nll[j] += p[i].nll[j];
        d.kl_mean += p[i].kl / (double)n;
        n_same_top += p[i].same_top;
        kl[i] = p[i].kl;
    }
    qsort(kl, (size_t)n, sizeof *kl, double_compare);
    if (n > 0) {
        for (int j = 0; j < 2; j++) d.perplexity[j] = math_exp(nll[j] / (double)n);
        d.same_top = n_same_top / (double)n;
        d.kl_p99 = kl[(99 * n + 99) / 100 - 1];
    }
    free(kl);
    return d;
}

/* Writes the results of the scored positions of one passage to `out` and returns their number. The
 * last token is not scored as a position, because its successor is unknown. */
static int64_t passage_run(struct divergence_run *c, const struct scored_sequence *s,
                           struct pool *pool, struct position *out) {
    int64_t done = 0;
    for (int32_t from = 0; from < s->n; from += ROWS) {
        int32_t rows = MIN(ROWS, s->n - from);
        for (int32_t i = 0; i < rows; i++) {
            int32_t position = from + i + 1;
            bool scored = position < s->n && (!s->scored || s->scored[position]);
            c->next[i] = scored ? s->v[position] : -1;
        }
        rows_forward(c, s->v, from, rows);
        pool_run(pool, positions_compare, c, rows, 1);
        for (int32_t i = 0; i < rows; i++)
            if (c->next[i] >= 0) out[done++] = c->out[i];
    }
    return done;
}

size_t model_divergence_bytes(const struct model_config *c, int32_t longest, int64_t tokens,
                              struct pool *pool) {
    struct forward_options o = {.max_rows = ROWS, .n_slots = 1, .slot_len = longest, .pool = pool};
    size_t rows = 2 * ROWS + (size_t)pool_size(pool);
    return 2 * forward_bytes(c, &o) + rows * (size_t)c->vocab_size * sizeof(float) +
           (size_t)tokens * (sizeof(struct position) + sizeof(double));
}

struct model_divergence model_divergence_measure(const struct model *const m[2],
                                                 const enum dtype kv[2],
                                                 const struct scored_sequence *seqs, int n,
                                                 struct pool *pool, struct progress *p) {
    struct divergence_run c = {.vocab = m[0]->config.vocab_size};
    struct forward_options o = {.max_rows = ROWS, .n_slots = 1, .slot_len = 1, .pool = pool};
    int64_t tokens = 0, done = 0, read = 0;
    for (int i = 0; i < n; i++) {
        tokens += seqs[i].n;
        o.slot_len = MAX(o.slot_len, seqs[i].n);
    }
    CHECK(m[1]->config.vocab_size == c.vocab);
    for (int i = 0; i < 2; i++) {
        CHECK(o.slot_len <= m[i]->config.max_seq_len);
        o.kv_elem = kv[i];
        c.f[i] = forward_new(m[i], &o);
        CHECK(c.f[i]); // one sequence always fits
        c.logits[i] = xmalloc(sizeof(float) * ROWS * (size_t)c.vocab);
    }
    c.scratch = xmalloc(sizeof(float) * (size_t)c.vocab * (size_t)pool_size(pool));
    struct position *positions = xcalloc((size_t)tokens + 1, sizeof *positions);
    for (int i = 0; i < n; i++) {
        done += passage_run(&c, &seqs[i], pool, positions + done);
        read += seqs[i].n;
        if (p) progress_update(p, read, NULL);
    }
    struct model_divergence d = positions_sum(positions, done);
    for (int i = 0; i < 2; i++) {
        forward_free(c.f[i]);
        free(c.logits[i]);
    }
    free(c.scratch);
    free(positions);
    return d;
}
