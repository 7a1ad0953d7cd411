/*
 * cross_entropy_tiles: logits, cross-entropy and the gradient of the head's inputs in bf16 tiles,
 * without logits in memory (Wijmans et al. 2025, "Cut Your Losses in Large-Vocabulary Language
 * Models").
 *
 * The vocabulary is divided into SEGMENTS. A thread multiplies ROWS rows by COLUMNS outputs of the
 * head at a time, in scratch that fits into its L2 cache. A first walk over each segment computes
 * the maximum and the sum of exponentials of each row. A second walk computes the same logits
 * again, replaces them by their gradients, in tiles, and multiplies these by the same outputs of
 * the head. Computing logits twice takes less time than storing and reading them.
 *
 * Not here: choices, changes of the head by adapters, training of all weights (cross_entropy.c).
 *
 * Invariant: rows are independent, and blocks and segments of outputs are the same for all rows;
 * sums over segments are in their order. So the bits of a row depend neither on other rows nor on
 * threads.
 */
#include <math.h>
#include <string.h>

#include "backprop/internal.h"

enum { ROWS = 256, COLUMNS = 512, SEGMENTS = 4 };

/* A row's logits in one segment: their maximum, the sum of exp(logit - max), and the logit of the
 * target if it is in the segment. */
struct segment_statistics {
    double max, sum, target_logit;
};

/* Arrays of a chunk, and of each thread. */
struct head_scratch {
    struct segment_statistics *statistics; /* [SEGMENTS][N] */
    float *dhn;                            /* [SEGMENTS][N][D]: parts of dhn */
    float *logits;                         /* [threads][ROWS][COLUMNS] */
    uint16_t *grads;                       /* [threads][ROWS][COLUMNS], in tiles */
};

struct head_job {
    struct trainer *t;
    struct gemm_input in; /* the rows after the final norm, in tiles */
    int64_t first;        /* first target */
    struct head_scratch s;
};

/* Rows [row, row + rows) of a job and outputs [n0, n0 + n) of the head. */
struct head_block {
    int segment;
    int64_t row, rows, n0, n;
    float *logits;
    struct gemm_input grads;
};

bool cross_entropy_uses_tiles(const struct trainer *t) {
    return !t->full && !t->vocab && t->grad_path == GRAD_TILES &&
           matrix_uses_tiles(&t->model->head, t->row_path);
}

/* Rows that a thread multiplies at a time. */
static int64_t block_rows(const struct trainer *t) {
    return MIN(ROWS, t->head_chunk);
}

int64_t cross_entropy_tiles_rows(int64_t d_model) {
    return MAX(ROWS, MIN(4 * ROWS, ((int64_t)1 << 20) / d_model / ROWS * ROWS)); // dhn: 16 MB
}

size_t cross_entropy_tiles_scratch(const struct trainer *t) {
    const int64_t n = t->head_chunk, threads = pool_size(t->pool);
    return (size_t)(SEGMENTS * n) * sizeof(struct segment_statistics) +
           (size_t)(SEGMENTS * n * t->c.d_model) * sizeof(float) +
           (size_t)(threads * block_rows(t) * COLUMNS) * (sizeof(float) + sizeof(uint16_t));
}

/* The arrays in t->head_scratch. Logits are first and tiles second: both are multiples of 64 bytes,
 * so tiles are aligned. */
static struct head_scratch head_scratch_of(const struct trainer *t) {
    const int64_t n = t->head_chunk, block = pool_size(t->pool) * block_rows(t) * COLUMNS;
    struct head_scratch s = {.logits = t->head_scratch};
    s.grads = (uint16_t *)(void *)(s.logits + block);
    s.statistics = (struct segment_statistics *)(void *)(s.grads + block);
    s.dhn = (float *)(void *)(s.statistics + SEGMENTS * n);
    return s;
}

/* The first output of a segment, a multiple of COLUMNS, or V after the last. */
static int64_t segment_begin(const struct matrix *w, int segment) {
    const int64_t blocks = (w->n + COLUMNS - 1) / COLUMNS;
    return MIN(w->n, (blocks * segment + SEGMENTS - 1) / SEGMENTS * COLUMNS);
}

/* Computes the logits of a block, times logit_scale. */
static void logits_compute(const struct head_job *j, const struct head_block *b) {
    const struct trainer *t = j->t;
    const struct gemm_input in = gemm_input_rows(&j->in, b->row, b->row + b->rows);
    // Output n0 belongs into column 0 of a row, so the matrix begins n0 columns earlier.
    uintptr_t shifted = (uintptr_t)b->logits - (size_t)b->n0 * sizeof *b->logits;
    matrix_mul_range((float *)shifted, COLUMNS, &in, &t->model->head, b->n0, b->n0 + b->n, false);
    for (int64_t i = 0; t->logit_scale != 1 && i < b->rows; i++)
        t->k->scale(b->logits + i * COLUMNS, t->logit_scale, b->n);
}

/* Adds a maximum and a sum of exponentials to those of a row. */
static void statistics_add(struct segment_statistics *s, double max, double sum) {
    if (max > s->max) {
        s->sum = s->sum * math_exp(s->max - max) + sum;
        s->max = max;
    } else if (max > -INFINITY || isnan(sum)) {
        s->sum += sum * math_exp(max - s->max);
    }
}

/* Adds the logits of a block to the statistics of the rows. It overwrites the logits. */
static void block_statistics(const struct head_job *j, const struct head_block *b) {
    const struct trainer *t = j->t;
    for (int64_t i = 0; i < b->rows; i++) {
        float *row = b->logits + i * COLUMNS;
        struct segment_statistics *s = j->s.statistics + b->segment * t->head_chunk + b->row + i;
        const int64_t target = t->target_token[j->first + b->row + i] - b->n0;
        if (target >= 0 && target < b->n) s->target_logit = row[target];
        const double max = t->k->max(row, b->n), sum = t->k->softmax(row, b->n);
        statistics_add(s, max, sum);
    }
}

/* Replaces the logits by their gradients, as in cross_entropy_rows, and writes these to tiles. */
static void block_gradients(const struct head_job *j, const struct head_block *b) {
    const struct trainer *t = j->t;
    for (int64_t i = 0; i < b->rows; i++) {
        float *row = b->logits + i * COLUMNS;
        const struct segment_statistics *s = j->s.statistics + b->row + i; // sums over all segments
        const int64_t at = j->first + b->row + i, target = t->target_token[at] - b->n0;
        const float weight = t->target_weight[at] * t->logit_scale;
        const double max = t->k->max(row, b->n);
        t->k->softmax(row, b->n);
        t->k->scale(row, (float)(weight * math_exp(max - s->max) / s->sum), b->n);
        if (target >= 0 && target < b->n) row[target] -= weight;
        gemm_input_pack_row(&b->grads, i, row);
    }
    gemm_input_pad_tiles(&b->grads);
}

/* Calls `block` for all blocks of items [begin, end), after it has computed their logits. An item
 * is a segment and a block of rows. */
static void blocks_each(const struct head_job *j, int64_t begin, int64_t end, int thread,
                        void (*block)(const struct head_job *j, const struct head_block *b)) {
    const struct trainer *t = j->t;
    const struct matrix *w = &t->model->head;
    const int64_t rows = block_rows(t), row_blocks = (j->in.rows + rows - 1) / rows,
                  at = thread * rows * COLUMNS;
    for (int64_t i = begin; i < end; i++) {
        struct head_block b = {.segment = (int)(i / row_blocks), .row = i % row_blocks * rows};
        b.rows = MIN(rows, j->in.rows - b.row);
        b.logits = j->s.logits + at;
        const int64_t n1 = segment_begin(w, b.segment + 1);
        for (b.n0 = segment_begin(w, b.segment); b.n0 < n1; b.n0 += COLUMNS) {
            b.n = MIN(COLUMNS, n1 - b.n0);
            b.grads = (struct gemm_input){.rows = b.rows, .k = b.n, .tiles = j->s.grads + at};
            logits_compute(j, &b);
            block(j, &b);
        }
    }
}

static void statistics_items(void *ctx, int64_t begin, int64_t end, int thread) {
    blocks_each(ctx, begin, end, thread, block_statistics);
}

static void block_backward(const struct head_job *j, const struct head_block *b) {
    const struct trainer *t = j->t;
    const struct matrix *w = &t->model->head;
    float *dhn = j->s.dhn + (b->segment * t->head_chunk + b->row) * w->k;
    block_gradients(j, b);
    t->k->gemm_tiles_backward(dhn, w->k, &b->grads, w, b->n0, 0, w->k,
                              b->n0 > segment_begin(w, b->segment));
}

static void backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    blocks_each(ctx, begin, end, thread, block_backward);
}

/* Combines the statistics of all segments in those of segment 0, and computes target_nll. */
static void nll_compute(const struct head_job *j) {
    const struct trainer *t = j->t;
    for (int64_t i = 0; i < j->in.rows; i++) {
        struct segment_statistics *s = j->s.statistics + i;
        const struct segment_statistics *part = s;
        for (int k = 1; k < SEGMENTS; k++) {
            part += t->head_chunk;
            statistics_add(s, part->max, part->sum);
            s->target_logit += part->target_logit; // 0 in all segments but one
        }
        t->target_nll[j->first + i] = math_log(s->sum) + s->max - s->target_logit;
    }
}

/* dhn = the sum of its parts. Items are rows. */
static void dhn_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct head_job *j = ctx;
    struct trainer *t = j->t;
    const int64_t d = t->c.d_model, at = begin * d, n = (end - begin) * d;
    (void)thread;
    memcpy(t->dhn + at, j->s.dhn + at, (size_t)n * sizeof *t->dhn);
    for (int k = 1; k < SEGMENTS && segment_begin(&t->model->head, k) < t->model->head.n; k++)
        t->k->axpy(t->dhn + at, 1.0f, j->s.dhn + k * t->head_chunk * d + at, n);
}

void cross_entropy_tiles(struct trainer *t, int64_t first, const struct gemm_input *in,
                         bool backward) {
    struct head_job j = {.t = t, .in = *in, .first = first, .s = head_scratch_of(t)};
    const int64_t rows = block_rows(t), items = (in->rows + rows - 1) / rows * SEGMENTS;
    for (int64_t i = 0; i < SEGMENTS * t->head_chunk; i++)
        j.s.statistics[i] = (struct segment_statistics){.max = -INFINITY};
    pool_run(t->pool, statistics_items, &j, items, 1);
    nll_compute(&j);
    if (!backward) return;
    pool_run(t->pool, backward_items, &j, items, 1);
    pool_run(t->pool, dhn_items, &j, in->rows, 16);
}
