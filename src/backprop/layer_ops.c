/*
 * layer_ops: the row-wise operations of a transformer between its products. The forward functions
 * have the engine's bits.
 *
 * The operations are norms (RMS norm: Zhang & Sennrich 2019; LayerNorm: Ba, Kiros & Hinton 2016),
 * biases, the rotary embedding (Su et al. 2021) and the activation. The backward functions compute
 * the statistics of norms and the sigmoid of activations again, so that these are not stored.
 *
 * Invariant: threads divide rows, or columns if a sum runs over rows. Every sum is in the order of
 * the rows. So results do not depend on the number of threads or on chunks.
 */
#include "backprop/internal.h"

#include <math.h>
#include <string.h>

/* An operation on `rows` rows of `width` values. y is the output, x and u are inputs, z is the dy
 * of norm_backward. */
struct rows_job {
    struct trainer *t;
    float *y, *z;
    const float *x, *u;
    struct norm_params n;
    struct gemm_input tiles;
    int64_t rows, width;
    bool add;
};

static void norm_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = begin; i < end; i++)
        norm_row(j->t->k, j->y + i * j->width, j->x + i * j->width, j->n.g, j->n.b,
                 j->t->c.rms_norm_eps, j->width);
}

void norm_forward(struct trainer *t, float *y, const float *x, const float *g, const float *b,
                  int64_t rows, int64_t width) {
    struct rows_job j = {.t = t, .y = y, .x = x, .n = {.g = g, .b = b}, .width = width};
    pool_run(t->pool, norm_items, &j, rows, 8);
}

static void norm_tiles_items(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct rows_job *j = ctx;
    float *row = j->t->xn + thread * j->width;
    for (int64_t i = begin; i < end; i++) {
        norm_row(j->t->k, row, j->x + i * j->width, j->n.g, j->n.b, j->t->c.rms_norm_eps, j->width);
        gemm_input_pack_row(&j->tiles, i, row);
    }
}

struct gemm_input norm_tiles_forward(struct trainer *t, const float *x, const float *g,
                                     const float *b, int64_t rows, int64_t width) {
    struct rows_job j = {.t = t, .x = x, .n = {.g = g, .b = b}, .width = width};
    j.tiles = gemm_input_tiles(rows, width, t->row_path, t->input_scratch);
    pool_run(t->pool, norm_tiles_items, &j, rows, 8);
    return j.tiles;
}

/* Sets t->mean[i] (0 for an RMS norm) and t->rstd[i]: normed row i is (x - mean) · rstd. */
static void row_stats(const struct rows_job *j, int64_t i) {
    const struct kernels *k = j->t->k;
    const float *x = j->x + i * j->width;
    const float n = (float)j->width;
    float mean = j->n.b ? k->sum(x, j->width) / n : 0, squares = 0;
    if (j->n.b)
        for (int64_t c = 0; c < j->width; c++) squares += (x[c] - mean) * (x[c] - mean);
    else
        squares = k->dot(x, x, j->width);
    j->t->mean[i] = mean;
    j->t->rstd[i] = 1.0f / sqrtf(squares / n + j->t->c.rms_norm_eps);
}

static void rstd_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    for (int64_t i = begin; i < end; i++) row_stats(ctx, i);
}

/* Adds to dg and db. Items are columns; each is summed over all rows in order. */
static void gain_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    const struct trainer *t = j->t;
    const struct norm_rows rows = {j->x + begin, j->z + begin, t->mean,    t->rstd,
                                   j->width,     j->rows,      end - begin};
    t->k->norm_gain_backward(&rows, j->n.dg + begin, j->n.db ? j->n.db + begin : NULL);
}

static void norm_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = begin; i < end; i++) {
        const int64_t at = i * j->width;
        if (!j->n.dg) row_stats(j, i);
        j->t->k->norm_backward(j->y + at, j->z + at, j->x + at, j->n.g, j->t->mean[i],
                               j->t->rstd[i], j->n.b != NULL, j->width, j->add);
    }
}

void norm_backward(struct trainer *t, float *dx, float *dy, const float *x, struct norm_params n,
                   int64_t rows, int64_t width, bool add) {
    struct rows_job j = {
        .t = t, .y = dx, .z = dy, .x = x, .n = n, .rows = rows, .width = width, .add = add};
    if (n.dg) pool_run(t->pool, rstd_items, &j, rows, 8);
    if (n.dg) pool_run(t->pool, gain_items, &j, width, 16);
    pool_run(t->pool, norm_backward_items, &j, rows, 8);
}

static void copy_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    memcpy(j->y + begin * j->width, j->x + begin * j->width,
           (size_t)((end - begin) * j->width) * sizeof *j->y);
}

void rows_copy(struct trainer *t, float *y, const float *x, int64_t rows, int64_t width) {
    struct rows_job j = {.t = t, .y = y, .x = x, .width = width};
    pool_run(t->pool, copy_items, &j, rows, 16);
}

static void add_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = begin; i < end; i++)
        j->t->k->axpy(j->y + i * j->width, 1.0f, j->u ? j->u : j->x + i * j->width, j->width);
}

void bias_forward(struct trainer *t, float *y, const float *bias, int64_t rows, int64_t width) {
    struct rows_job j = {.t = t, .y = y, .u = bias, .width = width};
    if (bias) pool_run(t->pool, add_items, &j, rows, 8);
}

void residual_forward(struct trainer *t, float *y, const float *x, int64_t rows, int64_t width) {
    struct rows_job j = {.t = t, .y = y, .x = x, .width = width};
    pool_run(t->pool, add_items, &j, rows, 8);
}

static void bias_grad_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = 0; i < j->rows; i++)
        j->t->k->axpy(j->y + begin, 1.0f, j->x + i * j->width + begin, end - begin);
}

void bias_backward(struct trainer *t, float *db, const float *dy, int64_t rows, int64_t width) {
    struct rows_job j = {.t = t, .y = db, .x = dy, .rows = rows, .width = width};
    if (db) pool_run(t->pool, bias_grad_items, &j, width, 16);
}

void weight_grad_add(struct trainer *t, float *dw, const float *dy, int64_t n, const float *x,
                     int64_t k, int64_t rows) {
    if (t->grad_path == GRAD_TILES)
        weight_grad_tiles(dw, dy, n, x, k, rows, t->grad_scratch, t->pool);
    else
        gemm_nn_parallel(DTYPE_F32, dw, k, dy, 1, n, n, x, k, rows, k, true, t->pool);
}

static void activation_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = begin; i < end; i++) {
        const int64_t at = i * j->width;
        activation_row(j->t->k, j->t->c.arch, j->y + at, j->x ? j->x + at : NULL, j->u + at,
                       j->width);
    }
}

void activation_forward(struct trainer *t, const float *gate, const float *up, int64_t rows) {
    struct rows_job j = {.t = t, .y = t->act_buf, .x = gate, .u = up, .width = t->c.d_ff};
    pool_run(t->pool, activation_items, &j, rows, 8);
}

static void activation_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    const struct trainer *t = j->t;
    bool gelu = t->c.arch->gelu;
    for (int64_t i = begin; i < end; i++) {
        int64_t at = i * j->width;
        if (j->x)
            t->k->act_backward(t->dgate + at, t->dup + at, t->dact + at, j->x + at, j->u + at,
                               j->width, gelu);
        else
            t->k->act_backward(t->dup + at, NULL, t->dact + at, j->u + at, NULL, j->width, gelu);
    }
}

void activation_backward(struct trainer *t, const float *gate, const float *up, int64_t rows) {
    struct rows_job j = {.t = t, .x = gate, .u = up, .width = t->c.d_ff};
    pool_run(t->pool, activation_backward_items, &j, rows, 8);
}

struct gated_backward_job {
    const struct trainer *t;
    const struct gemm_gated *g;
    struct gemm_input dgate, dup;
    bool f32;
};

static void gated_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct gated_backward_job *j = ctx;
    const struct trainer *t = j->t;
    const int64_t f = t->c.d_ff;
    for (int64_t i = begin; i < end; i++) {
        uint16_t *dgate_tiles = gemm_input_tile_row(&j->dgate, i);
        /* the same offset in all four arrays of tiles */
        const int64_t at = dgate_tiles - j->dgate.tiles;
        const struct gated_backward_row row = {.gate = j->g->gate_out + at,
                                               .up = j->g->up_out + at,
                                               .dact = t->dact + i * f,
                                               .act = j->f32 ? t->act_buf + i * f : NULL,
                                               .dgate = j->f32 ? t->dgate + i * f : NULL,
                                               .dup = j->f32 ? t->dup + i * f : NULL,
                                               .act_tiles = t->act_tiles + at,
                                               .dgate_tiles = dgate_tiles,
                                               .dup_tiles = j->dup.tiles + at};
        t->k->gated_backward(&row, f);
    }
}

void gated_backward(struct trainer *t, const struct gemm_gated *g, int64_t rows, bool f32) {
    struct gated_backward_job j = {.t = t, .g = g, .f32 = f32};
    j.dgate = (struct gemm_input){.rows = rows, .k = t->c.d_ff, .tiles = t->dgate_tiles};
    j.dup = (struct gemm_input){.rows = rows, .k = t->c.d_ff, .tiles = t->dup_tiles};
    gemm_input_pad_tiles(&j.dgate);
    gemm_input_pad_tiles(&j.dup);
    pool_run(t->pool, gated_backward_items, &j, rows, 16);
}

static void rope_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    int64_t e = j->t->c.head_dim, half = e / 2;
    for (int64_t i = begin; i < end; i++) {
        int64_t at = j->t->pos[i] * half;
        for (int64_t c = 0; c < j->width; c += e)
            j->t->k->rope(j->y + i * j->width + c, j->x + at, j->u + at, half);
    }
}

void rope_rotate(struct trainer *t, int l, float *y, int64_t width, bool inverse) {
    bool local = t->local_cos && layer_is_sliding(&t->c, l);
    struct rows_job j = {.t = t,
                         .y = y,
                         .width = width,
                         .x = local ? t->local_cos : t->rope_cos,
                         .u = local ? (inverse ? t->local_neg : t->local_sin)
                                    : (inverse ? t->rope_neg : t->rope_sin)};
    if (!t->c.arch->learned_pos) pool_run(t->pool, rope_items, &j, t->rows, 8);
}
