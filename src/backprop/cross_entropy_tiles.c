/*
 * cross_entropy_tiles: logits, cross-entropy and the gradient of the head's inputs in bf16 tiles,
 * without logits in memory (Wijmans et al. 2025, "Cut Your Losses in Large-Vocabulary Language
 * Models").
 *
 * The vocabulary is divided into up to SEGMENTS segments. A thread multiplies ROWS rows by the
 * outputs of a segment and adds the exponentials of each row's logits, which never leave the cache.
 * Their exponents are differences from the largest of the first logits of the segment; if a sum
 * overflows, from the largest of all. A second walk computes the same logits again, COLUMNS at a
 * time, as gradients in tiles, and multiplies these by the same outputs of the head. Computing
 * logits twice takes less time than storing and reading them.
 *
 * Not here: choices, changes of the head by adapters, training of all weights (cross_entropy.c).
 *
 * Invariant: rows are independent, and blocks and segments of outputs are the same for all rows;
 * sums over segments are in their order. So the bits of a row depend neither on other rows nor on
 * threads.
 */
#include <math.h>

#include "backprop/internal.h"

enum { ROWS = 256, COLUMNS = 512, SEGMENTS = 4 };

/* A row's logits in one segment: Σ exp(logit - shift). */
struct segment_sum {
    double shift, sum;
};

/* Arrays of a chunk of N rows, and of each thread. */
struct head_scratch {
    float *dhn;              /* [segments - 1][N][D]: parts of dhn from segments 1, 2, … */
    struct segment_sum *sum; /* [segments][N] */
    float *target_logit;     /* [N] */
    float *shift, *weight; /* [N]: log Σ exp(logit), and the weight of each target; for gradients */
    float *logits;         /* [threads][ROWS][COLUMNS]; later, as tiles, their gradients */
};

struct head_job {
    struct trainer *t;
    struct gemm_input in; /* the rows after the final norm, in tiles */
    int64_t first;        /* first target */
    struct head_scratch s;
};

/* Rows [row, row + rows) of a job, and a segment of the vocabulary. */
struct head_block {
    int segment;
    int64_t row, rows;
    struct gemm_input in;
    float *logits; /* the thread's part of head_scratch.logits */
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
    return MAX(ROWS, MIN(4 * ROWS, ((int64_t)1 << 20) / d_model / ROWS * ROWS)); // dhn: 12 MB
}

/* The vocabulary in blocks of COLUMNS, and the number of segments: one has at least a block. */
static int64_t vocab_blocks(const struct matrix *w) {
    return (w->n + COLUMNS - 1) / COLUMNS;
}

static int segment_count(const struct matrix *w) {
    return (int)MIN(SEGMENTS, vocab_blocks(w));
}

/* The first output of a segment, a multiple of COLUMNS, or V after the last. */
static int64_t segment_begin(const struct matrix *w, int segment) {
    return MIN(w->n, vocab_blocks(w) * segment / segment_count(w) * COLUMNS);
}

/* Floats of each array of head_scratch, in its order; multiples of 16, as head_chunk is one. */
static void scratch_sizes(const struct trainer *t, int64_t floats[6]) {
    const int64_t n = t->head_chunk, segments = segment_count(&t->model->head);
    floats[0] = (segments - 1) * n * t->c.d_model;
    floats[1] = segments * n * (int64_t)(sizeof(struct segment_sum) / sizeof(float));
    floats[2] = floats[3] = floats[4] = n;
    floats[5] = pool_size(t->pool) * block_rows(t) * COLUMNS;
}

size_t cross_entropy_tiles_scratch(const struct trainer *t) {
    int64_t floats[6], n = 0;
    scratch_sizes(t, floats);
    for (int i = 0; i < 6; i++) n += floats[i];
    return (size_t)n * sizeof(float);
}

static struct head_scratch head_scratch_of(const struct trainer *t) {
    int64_t floats[6];
    float *at[6] = {t->head_scratch};
    scratch_sizes(t, floats);
    for (int i = 1; i < 6; i++) at[i] = at[i - 1] + floats[i - 1];
    return (struct head_scratch){at[0], (struct segment_sum *)(void *)at[1], at[2], at[3], at[4],
                                 at[5]};
}

/* logits [rows][COLUMNS] = those of outputs [n0, n1) for rows of the input, times logit_scale. */
static void logits_compute(const struct trainer *t, const struct gemm_input *in, int64_t n0,
                           int64_t n1, float *logits) {
    head_logits(t, in, n0, n1, logits, COLUMNS);
    for (int64_t i = 0; t->logit_scale != 1 && i < in->rows; i++)
        t->k->scale(logits + i * COLUMNS, t->logit_scale, n1 - n0);
}

/* shift[i] = the largest of the logits of outputs [n0, n1) in row i of the block. */
static void shifts_compute(const struct head_job *j, const struct head_block *b, int64_t n0,
                           int64_t n1, float shift[ROWS]) {
    for (int64_t i = 0; i < ROWS; i++) shift[i] = i < b->rows ? -INFINITY : 0;
    for (int64_t n = n0; n < n1; n += COLUMNS) {
        const int64_t end = MIN(n + COLUMNS, n1);
        logits_compute(j->t, &b->in, n, end, b->logits);
        for (int64_t i = 0; i < b->rows; i++)
            shift[i] = fmaxf(shift[i], j->t->k->max(b->logits + i * COLUMNS, end - n));
    }
}

/* Computes the job's segment_sum of the block. Returns false if an exponential may have overflowed:
 * it is then the largest number, about 3e38. */
static bool exponentials_add(const struct head_job *j, const struct head_block *b, int64_t n0,
                             int64_t n1, const float shift[ROWS]) {
    const struct trainer *t = j->t;
    float sums[ROWS][16] = {{0}};
    const struct gemm_softmax job = {.scale = t->logit_scale, .shift = shift, .sums = sums};
    bool exact = true;
    t->k->gemm_tiles_softmax(&job, &b->in, &t->model->head, n0, n1);
    for (int64_t i = 0; i < b->rows; i++) {
        struct segment_sum *s = j->s.sum + b->segment * t->head_chunk + b->row + i;
        *s = (struct segment_sum){.shift = shift[i]};
        for (int l = 0; l < 16; l++) s->sum += sums[i][l];
        exact = exact && s->sum < 1e37;
    }
    return exact;
}

static void block_sums(const struct head_job *j, const struct head_block *b) {
    const struct matrix *w = &j->t->model->head;
    const int64_t n0 = segment_begin(w, b->segment), n1 = segment_begin(w, b->segment + 1);
    float shift[ROWS];
    shifts_compute(j, b, n0, MIN(n0 + COLUMNS, n1), shift);
    if (exponentials_add(j, b, n0, n1, shift)) return;
    shifts_compute(j, b, n0, n1, shift);
    exponentials_add(j, b, n0, n1, shift);
}

/* The part of dhn from the outputs of one segment. */
static void block_backward(const struct head_job *j, const struct head_block *b) {
    const struct trainer *t = j->t;
    const struct matrix *w = &t->model->head;
    const int64_t begin = segment_begin(w, b->segment), n1 = segment_begin(w, b->segment + 1);
    float *dhn = b->segment ? j->s.dhn + (b->segment - 1) * t->head_chunk * w->k : t->dhn;
    dhn += b->row * w->k;
    for (int64_t n = begin; n < n1; n += COLUMNS) {
        const int64_t end = MIN(n + COLUMNS, n1);
        const struct gemm_input grads = {
            .rows = b->rows, .k = end - n, .tiles = (uint16_t *)(void *)b->logits};
        const struct gemm_softmax job = {.scale = t->logit_scale,
                                         .shift = j->s.shift + b->row,
                                         .weight = j->s.weight + b->row,
                                         .grads = grads.tiles};
        t->k->gemm_tiles_softmax(&job, &b->in, w, n, end);
        for (int64_t i = 0; i < b->rows; i++) {
            const int64_t row = b->row + i, target = t->target_token[j->first + row] - n;
            if (target < 0 || target >= end - n) continue;
            const float weight = j->s.weight[row],
                        p = (float)math_exp((double)(j->s.target_logit[row] - j->s.shift[row]));
            gemm_input_tile_row(&grads, i)[target / 32 * 512 + target % 32] =
                f32_to_bf16(weight * p - weight);
        }
        t->k->gemm_tiles_backward(dhn, w->k, &grads, w, n, 0, w->k, n > begin);
    }
}

/* Calls `block` for items [begin, end). An item is a segment and a block of rows. */
static void blocks_each(const struct head_job *j, int64_t begin, int64_t end, int thread,
                        void (*block)(const struct head_job *j, const struct head_block *b)) {
    const int64_t rows = block_rows(j->t), row_blocks = (j->in.rows + rows - 1) / rows;
    for (int64_t i = begin; i < end; i++) {
        struct head_block b = {.segment = (int)(i / row_blocks),
                               .row = i % row_blocks * rows,
                               .logits = j->s.logits + thread * rows * COLUMNS};
        b.rows = MIN(rows, j->in.rows - b.row);
        b.in = gemm_input_rows(&j->in, b.row, b.row + b.rows);
        block(j, &b);
    }
}

static void sum_items(void *ctx, int64_t begin, int64_t end, int thread) {
    blocks_each(ctx, begin, end, thread, block_sums);
}

static void backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    blocks_each(ctx, begin, end, thread, block_backward);
}

/* The logits of the rows' targets, each from the 16 outputs of its panel. Items are rows. */
static void target_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct head_job *j = ctx;
    const struct trainer *t = j->t;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const int32_t target = t->target_token[j->first + i];
        const int64_t n0 = target / CHOICE_PANEL * CHOICE_PANEL;
        const struct gemm_input in = gemm_input_tile_rows(&j->in, i, i + 1);
        float logits[16 * COLUMNS];
        logits_compute(t, &in, n0, MIN(n0 + CHOICE_PANEL, t->model->head.n), logits);
        j->s.target_logit[i] = logits[in.skip * COLUMNS + target - n0];
    }
}

/* Computes target_nll, and the arrays shift and weight. */
static void nll_compute(const struct head_job *j) {
    const struct trainer *t = j->t;
    for (int64_t i = 0; i < (j->in.rows + 15) / 16 * 16; i++) {
        struct segment_sum s = {-INFINITY, 0};
        j->s.shift[i] = j->s.weight[i] = 0;
        if (i >= j->in.rows) continue;
        for (int k = 0; k < segment_count(&t->model->head); k++) {
            const struct segment_sum *part = j->s.sum + k * t->head_chunk + i;
            const double shift = fmax(s.shift, part->shift);
            s.sum = s.sum * math_exp(s.shift - shift) + part->sum * math_exp(part->shift - shift);
            s.shift = shift;
        }
        const double log_sum = math_log(s.sum) + s.shift;
        t->target_nll[j->first + i] = log_sum - (double)j->s.target_logit[i];
        j->s.shift[i] = (float)log_sum;
        j->s.weight[i] = t->target_weight[j->first + i] * t->logit_scale;
    }
}

/* Adds the parts of dhn. Items are rows. */
static void dhn_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct head_job *j = ctx;
    struct trainer *t = j->t;
    const int64_t d = t->c.d_model, at = begin * d, n = (end - begin) * d;
    (void)thread;
    for (int k = 1; k < segment_count(&t->model->head); k++)
        t->k->axpy(t->dhn + at, 1.0f, j->s.dhn + (k - 1) * t->head_chunk * d + at, n);
}

void cross_entropy_tiles(struct trainer *t, int64_t first, const struct gemm_input *in,
                         bool backward) {
    struct head_job j = {.t = t, .in = *in, .first = first, .s = head_scratch_of(t)};
    const int64_t rows = block_rows(t),
                  items = (in->rows + rows - 1) / rows * segment_count(&t->model->head);
    pool_run(t->pool, sum_items, &j, items, 1);
    pool_run(t->pool, target_items, &j, in->rows, 8);
    nll_compute(&j);
    if (!backward) return;
    pool_run(t->pool, backward_items, &j, items, 1);
    pool_run(t->pool, dhn_items, &j, in->rows, 16);
}
