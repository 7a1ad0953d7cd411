/*
 * layer_ops: the row-wise operations of a transformer between its products, forward with the
 * engine's bits, and backward.
 *
 * Norms (Zhang & Sennrich 2019; Ba, Kiros & Hinton 2016), biases, the rotary embedding (Su et al.
 * 2021) and the gated activation. Values that are cheap to recompute are not kept: roots of mean
 * squares, normed rows, activations.
 *
 * Invariant: threads split rows or, if sums run over rows, columns; every sum is in the order of
 * the rows. So results do not depend on the number of threads or on chunks.
 */
#include "backprop/internal.h"

#include <math.h>
#include <string.h>

struct rows_job {
    struct trainer *t;
    float *y, *z;
    const float *x, *u;
    struct norm_params n;
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

/* Fills t->mean (0 for an RMS norm) and t->rstd: a normed row is (x - mean) · rstd. */
static void rstd_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    const struct kernels *k = j->t->k;
    float n = (float)j->width;
    for (int64_t i = begin; i < end; i++) {
        const float *x = j->x + i * j->width;
        float mean = j->n.b ? k->sum(x, j->width) / n : 0, squares = 0;
        if (j->n.b)
            for (int64_t c = 0; c < j->width; c++) squares += (x[c] - mean) * (x[c] - mean);
        else
            squares = k->dot(x, x, j->width);
        j->t->mean[i] = mean;
        j->t->rstd[i] = 1.0f / sqrtf(squares / n + j->t->c.rms_norm_eps);
    }
}

/* Items are columns; each iterates over all rows in order. */
static void gain_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    float *restrict dg = j->n.dg, *restrict db = j->n.db;
    for (int64_t i = 0; i < j->rows; i++) {
        const float *x = j->x + i * j->width, *dy = j->z + i * j->width;
        float rstd = j->t->rstd[i], mean = j->t->mean[i];
        for (int64_t c = begin; c < end; c++) dg[c] += dy[c] * ((x[c] - mean) * rstd);
        for (int64_t c = begin; db && c < end; c++) db[c] += dy[c];
    }
}

/* With u = dy ⊙ g and x̂ the normed row: dx = rstd · (u - mean(u) - x̂ · mean(u ⊙ x̂)); mean(u) is
 * 0 for an RMS norm. */
static void norm_backward_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    const struct kernels *k = j->t->k;
    float n = (float)j->width;
    for (int64_t i = begin; i < end; i++) {
        const float *x = j->x + i * j->width;
        float *u = j->z + i * j->width, *dx = j->y + i * j->width;
        float rstd = j->t->rstd[i], mean = j->t->mean[i];
        for (int64_t c = 0; c < j->width; c++) u[c] *= j->n.g[c];
        float level = j->n.b ? k->sum(u, j->width) / n : 0;
        float along = k->dot(u, x, j->width) - mean * (level * n);
        along = along / n * rstd * rstd * rstd;
        float flat = rstd * level - along * mean; // constant subtracted from all columns
        if (j->add)
            for (int64_t c = 0; c < j->width; c++) dx[c] += rstd * u[c] - along * x[c] - flat;
        else
            for (int64_t c = 0; c < j->width; c++) dx[c] = rstd * u[c] - along * x[c] - flat;
    }
}

void norm_backward(struct trainer *t, float *dx, float *dy, const float *x, struct norm_params n,
                   int64_t rows, int64_t width, bool add) {
    struct rows_job j = {
        .t = t, .y = dx, .z = dy, .x = x, .n = n, .rows = rows, .width = width, .add = add};
    pool_run(t->pool, rstd_items, &j, rows, 8);
    if (n.dg) pool_run(t->pool, gain_items, &j, width, 16);
    pool_run(t->pool, norm_backward_items, &j, rows, 8);
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

static void activation_items(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct rows_job *j = ctx;
    for (int64_t i = begin; i < end; i++) {
        float *y = j->y + i * j->width;
        if (j->x) memcpy(y, j->x + i * j->width, (size_t)j->width * sizeof *y);
        // without biases, `up` is not modified
        activation_row(j->t->k, j->t->c.arch, y, (float *)j->u + i * j->width, NULL, NULL,
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
            t->k->act_back(t->dgate + at, t->dup + at, t->dact + at, j->x + at, j->u + at, j->width,
                           gelu);
        else
            t->k->act_back(t->dup + at, NULL, t->dact + at, j->u + at, NULL, j->width, gelu);
    }
}

void activation_backward(struct trainer *t, const float *gate, const float *up, int64_t rows) {
    struct rows_job j = {.t = t, .x = gate, .u = up, .width = t->c.d_ff};
    pool_run(t->pool, activation_backward_items, &j, rows, 8);
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

void rope_rotate(struct trainer *t, int l, float *y, int64_t width, bool back) {
    bool local = t->local_cos && layer_is_sliding(&t->c, l);
    struct rows_job j = {.t = t,
                         .y = y,
                         .width = width,
                         .x = local ? t->local_cos : t->rope_cos,
                         .u = local ? (back ? t->local_neg : t->local_sin)
                                    : (back ? t->rope_neg : t->rope_sin)};
    if (!t->c.arch->learned_pos) pool_run(t->pool, rope_items, &j, t->rows, 8);
}
