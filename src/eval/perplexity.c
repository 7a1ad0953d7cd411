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

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROWS = 64 }; /* positions per forward pass */

/* The result of one position. */
struct position {
    double nll[2], kl;
    bool same_top;
};

struct divergence_run {
    struct forward *f[2]; /* [0] NULL: its logits are in a file; [1] NULL: they are written to it */
    float *logits[2];     /* [ROWS][vocab] of the scored rows */
    float *scratch;       /* [threads][vocab] */
    float *from_file;     /* [threads][vocab]: a row of the file */
    int fd;               /* the file */
    _Atomic bool unread;  /* a row of the file could not be read */
    int64_t first;        /* index in the file of the first scored row */
    int32_t next[ROWS];   /* the token that follows each scored row */
    struct position out[ROWS]; /* their results */
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
static void position_compare(struct divergence_run *c, int64_t row, const float *a,
                             float *scratch) {
    int32_t n = c->vocab, next = c->next[row];
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

static int64_t row_offset(const struct divergence_run *c, int64_t row) {
    return (c->first + row) * c->vocab * (int64_t)sizeof(float);
}

static void positions_compare(void *ctx, int64_t begin, int64_t end, int thread) {
    struct divergence_run *c = ctx;
    const size_t n = (size_t)c->vocab, at = (size_t)thread * n;
    struct error err;
    for (int64_t i = begin; i < end; i++) {
        const float *a = c->f[0] ? c->logits[0] + (size_t)i * n : c->from_file + at;
        if (!c->f[0] &&
            file_read_at(c->fd, c->from_file + at, sizeof *a * n, row_offset(c, i), &err) != OK)
            atomic_store(&c->unread, true);
        else
            position_compare(c, i, a, c->scratch + at);
    }
}

/* Runs tokens [from, from + n) of a passage through the models; logits of the rows in `out`. */
static void rows_forward(struct divergence_run *c, const int32_t *tokens, int32_t from, int32_t n,
                         const int32_t *out, int32_t n_out) {
    struct batch_row rows[ROWS];
    const struct lora_segment no_adapter = {.end = n};
    for (int32_t i = 0; i < n; i++) rows[i] = (struct batch_row){tokens[from + i], from + i, 0};
    for (int i = 0; i < 2; i++)
        if (c->f[i]) forward_run(c->f[i], rows, n, &no_adapter, 1, out, n_out, c->logits[i]);
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

/* Whether the prediction of token `position` counts. */
static bool is_scored(const struct scored_sequence *s, int32_t position) {
    return position < s->n && (!s->scored || s->scored[position]);
}

/* The last token is not scored as a position, because its successor is unknown. */
static int64_t scored_count(const struct scored_sequence *s) {
    int64_t n = 0;
    for (int32_t i = 1; i < s->n; i++) n += is_scored(s, i);
    return n;
}

/* Writes the results of the scored positions of one passage to `out`, or the first model's logits
 * to the file. *done is the number of earlier scored positions, and grows. */
static int passage_run(struct divergence_run *c, const struct scored_sequence *s, struct pool *pool,
                       struct position *out, int64_t *done, struct error *err) {
    int rc = OK;
    for (int32_t from = 0; rc == OK && from < s->n; from += ROWS) {
        int32_t rows = MIN(ROWS, s->n - from), scored[ROWS], n = 0;
        for (int32_t i = 0; i < rows; i++) {
            if (!is_scored(s, from + i + 1)) continue;
            c->next[n] = s->v[from + i + 1];
            scored[n++] = i;
        }
        rows_forward(c, s->v, from, rows, scored, n);
        if (c->f[1])
            pool_run(pool, positions_compare, c, n, 1);
        else
            rc = file_write_at(c->fd, c->logits[0], sizeof(float) * (size_t)(n * (int64_t)c->vocab),
                               row_offset(c, 0), err);
        if (atomic_load(&c->unread)) rc = error_set(err, ERR_IO, "cannot read a temporary file");
        for (int32_t i = 0; c->f[1] && i < n; i++) out[*done + i] = c->out[i];
        c->first += n;
        *done += n;
    }
    return rc;
}

/* The longest sequence and the sum of the lengths. */
static int32_t seqs_longest(const struct scored_sequence *seqs, int n, int64_t *tokens) {
    int32_t longest = 1;
    *tokens = 0;
    for (int i = 0; i < n; i++) {
        *tokens += seqs[i].n;
        longest = MAX(longest, seqs[i].n);
    }
    return longest;
}

static void run_begin(struct divergence_run *c, int which, const struct model *m, enum dtype kv,
                      int32_t longest, struct pool *pool) {
    const struct forward_options o = {
        .max_rows = ROWS, .n_slots = 1, .slot_len = longest, .kv_elem = kv, .pool = pool};
    CHECK(longest <= m->config.max_seq_len && m->config.vocab_size == c->vocab);
    c->f[which] = forward_new(m, &o);
    CHECK(c->f[which]); // one sequence always fits
    c->logits[which] = xmalloc(sizeof(float) * ROWS * (size_t)c->vocab);
}

static void run_end(struct divergence_run *c) {
    for (int i = 0; i < 2; i++) {
        forward_free(c->f[i]);
        free(c->logits[i]);
        c->f[i] = NULL;
        c->logits[i] = NULL;
    }
}

struct model_divergence model_divergence_measure(const struct model *const m[2],
                                                 const enum dtype kv[2],
                                                 const struct scored_sequence *seqs, int n,
                                                 struct pool *pool, struct progress *p) {
    struct divergence_run c = {.vocab = m[0]->config.vocab_size};
    struct error none;
    int64_t tokens, done = 0, read = 0;
    int32_t longest = seqs_longest(seqs, n, &tokens);
    for (int i = 0; i < 2; i++) run_begin(&c, i, m[i], kv[i], longest, pool);
    c.scratch = xmalloc(sizeof(float) * (size_t)c.vocab * (size_t)pool_size(pool));
    struct position *positions = xcalloc((size_t)tokens + 1, sizeof *positions);
    for (int i = 0; i < n; i++) {
        passage_run(&c, &seqs[i], pool, positions, &done, &none); // uses no file, so it succeeds
        read += seqs[i].n;
        if (p) progress_update(p, read, NULL);
    }
    struct model_divergence d = positions_sum(positions, done);
    run_end(&c);
    free(c.scratch);
    free(positions);
    return d;
}

/* The end of the sequences from `begin` on that have at most `rows` scored positions; at least one
 * sequence. */
static int part_end(const struct scored_sequence *seqs, int begin, int n, int64_t rows) {
    int end = begin;
    while (end < n && (rows -= scored_count(&seqs[end])) >= 0) end++;
    return MAX(end, begin + 1);
}

/* One of the models on sequences [begin, end). */
static int part_run(struct divergence_run *c, int which, const struct model *m, enum dtype kv,
                    const struct scored_sequence *seqs, int begin, int end, struct pool *pool,
                    struct position *out, int64_t done, struct error *err) {
    static const char *const titles[2] = {"comparison: original", "comparison: copy"};
    struct progress bar;
    int64_t tokens, read = 0;
    int rc = OK;
    run_begin(c, which, m, kv, seqs_longest(seqs + begin, end - begin, &tokens), pool);
    c->first = 0;
    progress_start(&bar, titles[which], tokens);
    for (int i = begin; rc == OK && i < end; i++) {
        rc = passage_run(c, &seqs[i], pool, out, &done, err);
        progress_update(&bar, read += seqs[i].n, NULL);
    }
    progress_finish(&bar, NULL);
    run_end(c);
    return rc;
}

static int part_compare(struct divergence_run *c, const char *const models[2],
                        enum numeric_class cls, const enum dtype kv[2],
                        const struct scored_sequence *seqs, int begin, int end, struct pool *pool,
                        struct position *out, int64_t done, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < 2; i++) {
        struct model *m = model_open(models[i], cls, err);
        int64_t tokens;
        if (!m) return err->code;
        if (c->vocab != m->config.vocab_size ||
            seqs_longest(seqs, end, &tokens) > m->config.max_seq_len)
            rc = error_set(err, ERR_MISMATCH, "'%s' has another vocabulary or context", m->name);
        if (rc == OK) rc = part_run(c, i, m, kv[i], seqs, begin, end, pool, out, done, err);
        model_close(m);
    }
    return rc;
}

int model_divergence_measure_in_turn(const char *const models[2], enum numeric_class cls,
                                     const enum dtype kv[2], int32_t vocab,
                                     const struct scored_sequence *seqs, int n, const char *path,
                                     int64_t file_bytes, struct pool *pool,
                                     struct model_divergence *out, struct error *err) {
    struct divergence_run c = {.vocab = vocab, .fd = file_open_unnamed(path, err)};
    int64_t tokens, done = 0;
    if (c.fd < 0) return err->code;
    seqs_longest(seqs, n, &tokens);
    const size_t row_bytes = sizeof(float) * (size_t)vocab;
    c.scratch = xmalloc(row_bytes * (size_t)pool_size(pool));
    c.from_file = xmalloc(row_bytes * (size_t)pool_size(pool));
    struct position *positions = xcalloc((size_t)tokens + 1, sizeof *positions);
    int rc = OK;
    for (int begin = 0, end; rc == OK && begin < n; begin = end) {
        end = part_end(seqs, begin, n, file_bytes / (int64_t)row_bytes);
        rc = part_compare(&c, models, cls, kv, seqs, begin, end, pool, positions, done, err);
        for (int i = begin; i < end; i++) done += scored_count(&seqs[i]);
    }
    if (rc == OK) *out = positions_sum(positions, done);
    close(c.fd);
    free(c.scratch);
    free(c.from_file);
    free(positions);
    return rc;
}

size_t model_divergence_bytes(const struct model_config *c, int32_t longest, int64_t tokens,
                              struct pool *pool) {
    const struct forward_options o = {
        .max_rows = ROWS, .n_slots = 1, .slot_len = longest, .pool = pool};
    const size_t rows = ROWS + 2 * (size_t)pool_size(pool);
    return forward_bytes(c, &o) + rows * (size_t)c->vocab_size * sizeof(float) +
           (size_t)tokens * (sizeof(struct position) + sizeof(double));
}
