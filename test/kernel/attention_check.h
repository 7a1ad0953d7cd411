/*
 * attention_check: the attention kernels of a table compared with plain loops in double, and with
 * themselves on other divisions of the same work. test_kernels runs it on compiled instructions,
 * test_emulated on emulated ones.
 *
 * Invariant: keys, values and queries are in allocations of exactly their size, outputs are between
 * guard values, and scratch is filled with NaN before every call.
 */
#ifndef SHOAL_TEST_ATTENTION_CHECK_H
#define SHOAL_TEST_ATTENTION_CHECK_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/kernel.h"

#define ATTENTION_GUARD 0x1.234p+99f
/* Root of the mean square, relative to that of the result. Few values vary more. */
#define ATTENTION_ERROR(values) ((values) < 1024 ? 1e-2 : 5e-3)
#define ATTENTION_BACKWARD_ERROR(rows) ((rows) < 8 ? 3e-2 : 8e-3)

struct attention_case {
    int64_t head_dim, n_heads, rows;
    int32_t at, window; /* position of the first row; a row attends to `window` positions */
    enum dtype dtype;
    int64_t page;
};

/* The positions of one kv head in pages; the last page has only as many rows as exist. */
struct attention_pages {
    enum dtype dtype;
    int64_t e, ld, page, n, count;
    void *k[64], *v[64];
    uint16_t *k_scale[64], *v_scale[64];
};

static inline void attention_row_store(void *rows, uint16_t *scales, int64_t row, int64_t ld,
                                       enum dtype dtype, const float *x, int64_t e) {
    char *to = (char *)rows + row * ld * (int64_t)dtype_size(dtype);
    if (dtype != DTYPE_I8) {
        dtype_from_f32(dtype, x, to, e);
        return;
    }
    scales[row] = f32_to_f16(row_amax(x, e) / 127.0f);
    i8_from_f32(x, f16_to_f32(scales[row]), (int8_t *)to, e);
}

/* Of n positions with keys and values of e floats. */
static inline struct attention_pages *attention_pages_new(enum dtype dtype, int64_t page,
                                                          const float *k, const float *v, int64_t n,
                                                          int64_t e) {
    struct attention_pages *p = xcalloc(1, sizeof *p);
    *p = (struct attention_pages){.dtype = dtype, .e = e, .ld = e + 3, .page = page, .n = n};
    p->count = (n + page - 1) / page;
    assert_true(p->count <= (int64_t)ARRAY_LEN(p->k));
    for (int64_t i = 0; i < p->count; i++) {
        const int64_t rows = MIN(page, n - i * page);
        const size_t bytes = (size_t)((rows - 1) * p->ld + e) * dtype_size(dtype);
        p->k[i] = xmalloc(bytes), p->v[i] = xmalloc(bytes);
        p->k_scale[i] = xmalloc((size_t)rows * 2), p->v_scale[i] = xmalloc((size_t)rows * 2);
        for (int64_t r = 0; r < rows; r++) {
            attention_row_store(p->k[i], p->k_scale[i], r, p->ld, dtype, k + (i * page + r) * e, e);
            attention_row_store(p->v[i], p->v_scale[i], r, p->ld, dtype, v + (i * page + r) * e, e);
        }
    }
    return p;
}

static inline void attention_pages_free(struct attention_pages *p) {
    for (int64_t i = 0; i < p->count; i++)
        free(p->k[i]), free(p->v[i]), free(p->k_scale[i]), free(p->v_scale[i]);
    free(p);
}

static inline struct attention_page attention_page_at(const void *ctx, int64_t page) {
    const struct attention_pages *p = ctx;
    assert_true(page >= 0 && page < p->count);
    return (struct attention_page){p->k[page], p->v[page], p->k_scale[page], p->v_scale[page]};
}

/* Element i of a stored row. */
static inline double attention_value(const struct attention_pages *p, int64_t pos, int64_t i,
                                     bool values) {
    const int64_t page = pos / p->page, row = pos % p->page, at = row * p->ld + i;
    const void *rows = values ? p->v[page] : p->k[page];
    const uint16_t *scales = values ? p->v_scale[page] : p->k_scale[page];
    switch (p->dtype) {
    case DTYPE_BF16:
        return (double)bf16_to_f32(((const uint16_t *)rows)[at]);
    case DTYPE_F16:
        return (double)f16_to_f32(((const uint16_t *)rows)[at]);
    case DTYPE_I8:
        return (double)((const int8_t *)rows)[at] * (double)f16_to_f32(scales[row]);
    default:
        return (double)((const float *)rows)[at];
    }
}

struct attention_data {
    struct attention_case c;
    int64_t n, ldq, ldo;  /* n: positions */
    float *q, *k, *v;     /* [rows][ldq], [n][E] */
    int32_t *first, *end; /* [rows] */
};

static inline float *attention_numbers(struct rng *r, int64_t n) {
    float *x = xmalloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = rng_normal(r);
    return x;
}

static inline struct attention_data attention_data_make(struct rng *r, struct attention_case c) {
    struct attention_data d = {.c = c, .n = c.at + c.rows};
    d.ldq = c.n_heads * c.head_dim + 1;
    d.ldo = c.n_heads * c.head_dim + 2;
    d.q = attention_numbers(r, (c.rows - 1) * d.ldq + c.n_heads * c.head_dim);
    d.k = attention_numbers(r, d.n * c.head_dim);
    d.v = attention_numbers(r, d.n * c.head_dim);
    d.first = xmalloc((size_t)c.rows * sizeof *d.first);
    d.end = xmalloc((size_t)c.rows * sizeof *d.end);
    for (int32_t i = 0; i < c.rows; i++) {
        d.end[i] = c.at + i + 1;
        d.first[i] = MAX(d.end[i] - c.window, 0);
    }
    return d;
}

static inline void attention_data_free(struct attention_data *d) {
    free(d->q), free(d->k), free(d->v), free(d->first), free(d->end);
}

static inline int64_t attention_out_size(const struct attention_data *d) {
    return d->c.rows * d->ldo;
}

static inline float *attention_guards(int64_t n) {
    float *x = xmalloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = ATTENTION_GUARD;
    return x;
}

static inline float *attention_out_new(const struct attention_data *d) {
    return attention_guards(attention_out_size(d));
}

static inline void *attention_scratch_new(size_t bytes) {
    void *scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(scratch);
    return memset(scratch, 0xFF, bytes);
}

/* The job of rows [begin, end) of the case, which go to their places in `out`. */
static inline struct attention_job attention_job_of(const struct kernels *k,
                                                    const struct attention_data *d,
                                                    const struct attention_pages *p, int64_t begin,
                                                    int64_t end, float *out) {
    return (struct attention_job){
        .head_dim = d->c.head_dim,
        .n_heads = d->c.n_heads,
        .rows = end - begin,
        .q = d->q + begin * d->ldq,
        .out = out ? out + begin * d->ldo : NULL,
        .ldq = d->ldq,
        .ldo = d->ldo,
        .first = d->first + begin,
        .end = d->end + begin,
        .scale = 1.0f / sqrtf((float)d->c.head_dim),
        .keys = {p->dtype, p->page, p->ld, attention_page_at, p},
        .scratch = attention_scratch_new(k->attention_scratch(d->c.head_dim)),
    };
}

static inline void attention_run(const struct kernels *k, const struct attention_data *d,
                                 const struct attention_pages *p, int64_t begin, int64_t end,
                                 float *out) {
    struct attention_job job = attention_job_of(k, d, p, begin, end, out);
    k->attention(&job);
    free(job.scratch);
}

static inline float *attention_run_all(const struct kernels *k, const struct attention_data *d,
                                       enum dtype dtype, int64_t page) {
    struct attention_pages *p = attention_pages_new(dtype, page, d->k, d->v, d->n, d->c.head_dim);
    float *out = attention_out_new(d);
    attention_run(k, d, p, 0, d->c.rows, out);
    attention_pages_free(p);
    return out;
}

/* One query in double: out[E]. */
static inline void attention_naive(const struct attention_data *d, const struct attention_pages *p,
                                   int64_t row, int64_t head, double *out) {
    const int64_t e = d->c.head_dim, first = d->first[row], end = d->end[row];
    const float *q = d->q + row * d->ldq + head * e;
    double *s = xcalloc((size_t)(end - first), sizeof *s), max = -INFINITY, sum = 0.0;
    for (int64_t j = first; j < end; j++) {
        for (int64_t i = 0; i < e; i++)
            s[j - first] += (double)q[i] * attention_value(p, j, i, false);
        s[j - first] /= sqrt((double)e);
        max = fmax(max, s[j - first]);
    }
    for (int64_t j = 0; j < end - first; j++) sum += s[j] = exp(s[j] - max);
    for (int64_t i = 0; i < e; i++) {
        out[i] = 0.0;
        for (int64_t j = first; j < end; j++)
            out[i] += s[j - first] / sum * attention_value(p, j, i, true);
    }
    free(s);
}

/* The error of all rows; the guard values between rows are untouched. */
static inline void attention_near(const struct attention_data *d, const struct attention_pages *p,
                                  const float *out) {
    const int64_t e = d->c.head_dim, width = d->c.n_heads * e;
    double want[256], error = 0.0, square = 0.0;
    for (int64_t r = 0; r < d->c.rows; r++) {
        for (int64_t h = 0; h < d->c.n_heads; h++) {
            attention_naive(d, p, r, h, want);
            for (int64_t i = 0; i < e; i++) {
                const double off = (double)out[r * d->ldo + h * e + i] - want[i];
                assert_true(fabs(off) <= 0.04);
                error += off * off;
                square += want[i] * want[i];
            }
        }
        for (int64_t i = width; i < d->ldo; i++)
            assert_true(out[r * d->ldo + i] == ATTENTION_GUARD);
    }
    if (!(sqrt(error / square) <= ATTENTION_ERROR(d->c.rows * e)))
        fail_msg("attention: relative error %g, E %d, %d rows at %d", sqrt(error / square), (int)e,
                 (int)d->c.rows, d->c.at);
}

static inline void attention_case_check(const struct kernels *k, struct rng *r,
                                        struct attention_case c) {
    struct attention_data d = attention_data_make(r, c);
    struct attention_pages *p = attention_pages_new(c.dtype, c.page, d.k, d.v, d.n, c.head_dim);
    float *out = attention_out_new(&d);
    attention_run(k, &d, p, 0, c.rows, out);
    attention_near(&d, p, out);
    attention_pages_free(p);
    attention_data_free(&d);
    free(out);
}

static inline void attention_same(const struct attention_data *d, const float *a, const float *b,
                                  const char *what) {
    if (memcmp(a, b, (size_t)attention_out_size(d) * sizeof *a) != 0)
        fail_msg("attention: other bits %s, %d rows at %d", what, (int)d->c.rows, d->c.at);
}

/* The bits do not depend on how rows are divided into jobs, on the pages, and on whether keys are
 * rounded to bf16 when they are stored or by the kernel. */
static inline void attention_division_check(const struct kernels *k, struct rng *r,
                                            struct attention_case c, int64_t step) {
    struct attention_data d = attention_data_make(r, c);
    float *want = attention_run_all(k, &d, DTYPE_F32, d.n), *got;
    struct attention_pages *p = attention_pages_new(DTYPE_F32, 64, d.k, d.v, d.n, c.head_dim);
    got = attention_out_new(&d);
    for (int64_t i = 0; i < c.rows; i += step)
        attention_run(k, &d, p, i, MIN(i + step, c.rows), got);
    attention_same(&d, got, want, "in parts and pages");
    free(got);
    got = attention_run_all(k, &d, DTYPE_BF16, 32);
    attention_same(&d, got, want, "from keys in bf16");
    free(got), free(want);
    attention_pages_free(p);
    attention_data_free(&d);
}

/* Rows in tiles are the rows in floats, packed; around them the tiles are untouched. */
static inline void attention_tiles_check(const struct kernels *k, struct rng *r,
                                         struct attention_case c, int64_t step) {
    enum { ROW = 3, FIRST = 32 }; // of the first output in the tiles
    if (c.head_dim % 32 != 0) return;
    struct attention_data d = attention_data_make(r, c);
    struct attention_pages *p = attention_pages_new(c.dtype, c.page, d.k, d.v, d.n, c.head_dim);
    const int64_t width = FIRST + c.n_heads * c.head_dim;
    const size_t bytes = gemm_input_scratch(ROW + c.rows, width);
    void *scratch = attention_scratch_new(bytes), *expected = attention_scratch_new(bytes);
    struct gemm_input in = gemm_input_tiles(ROW + c.rows, width, ROWS_KNOWN, scratch),
                      want = gemm_input_tiles(ROW + c.rows, width, ROWS_KNOWN, expected);
    float *out = attention_run_all(k, &d, c.dtype, c.page);
    for (int64_t i = 0; i < c.rows; i += step) {
        struct attention_job job = attention_job_of(k, &d, p, i, MIN(i + step, c.rows), NULL);
        job.tiles = &in;
        job.tiles_row = ROW + i;
        job.tiles_column = FIRST;
        k->attention(&job);
        free(job.scratch);
    }
    for (int64_t i = 0; i < c.rows; i++)
        k->tiles_pack_row(out + i * d.ldo, width - FIRST,
                          gemm_input_tile_row(&want, ROW + i) + FIRST * 16);
    assert_memory_equal(scratch, expected, bytes);
    free(scratch), free(expected), free(out);
    attention_pages_free(p);
    attention_data_free(&d);
}

/* When the key and value of position `pos` become large, rows that do not attend to it have the
 * same bits as before. When the query of `row` becomes NaN, all other rows have the same bits. */
static inline void attention_neighbour_check(const struct kernels *k, struct rng *r,
                                             struct attention_case c, int64_t pos, int64_t row) {
    struct attention_data d = attention_data_make(r, c);
    const int64_t width = c.n_heads * c.head_dim;
    float *want = attention_run_all(k, &d, c.dtype, c.page), *got;
    for (int64_t i = 0; i < width; i++) d.q[row * d.ldq + i] = i % 3 ? NAN : INFINITY;
    for (int64_t i = 0; i < c.head_dim; i++) {
        d.k[pos * c.head_dim + i] *= 0x1p+60f;
        d.v[pos * c.head_dim + i] = 0x1p+120f;
    }
    got = attention_run_all(k, &d, c.dtype, c.page);
    for (int64_t i = 0; i < c.rows; i++) {
        const bool sees = d.first[i] <= pos && pos < d.end[i];
        const bool same = !memcmp(got + i * d.ldo, want + i * d.ldo, (size_t)width * sizeof *got);
        assert_true(same == (!sees && i != row));
    }
    free(got), free(want);
    attention_data_free(&d);
}

/* The keys and values of positions outside of the ranges of all rows of a job do not affect the
 * results. */
static inline void attention_outside_check(const struct kernels *k, struct rng *r,
                                           struct attention_case c) {
    struct attention_data d = attention_data_make(r, c);
    float *want = attention_run_all(k, &d, c.dtype, c.page), *got;
    const int64_t half = c.rows / 2;
    for (int64_t j = 0; j < d.n; j++) {
        for (int64_t i = 0; i < c.head_dim && (j < d.first[0] || j >= d.end[half - 1]); i++)
            d.k[j * c.head_dim + i] = d.v[j * c.head_dim + i] = j % 2 ? NAN : INFINITY;
    }
    struct attention_pages *p = attention_pages_new(c.dtype, c.page, d.k, d.v, d.n, c.head_dim);
    got = attention_out_new(&d);
    attention_run(k, &d, p, 0, half, got);
    assert_memory_equal(got, want, (size_t)(half * d.ldo) * sizeof *got);
    for (int64_t i = half * d.ldo; i < attention_out_size(&d); i++)
        assert_true(got[i] == ATTENTION_GUARD);
    free(got), free(want);
    attention_pages_free(p);
    attention_data_free(&d);
}

/* One query in double: adds to dq [E], dk and dv [n][E]. */
static inline void attention_naive_backward(const struct attention_data *d, const float *dout,
                                            int64_t row, int64_t head, double *dq, double *dk,
                                            double *dv) {
    const int64_t e = d->c.head_dim, first = d->first[row], end = d->end[row];
    const float *q = d->q + row * d->ldq + head * e, *g = dout + row * d->ldq + head * e;
    double *p = xcalloc((size_t)end, sizeof *p), *dp = xcalloc((size_t)end, sizeof *dp);
    double max = -INFINITY, sum = 0.0, mean = 0.0;
    for (int64_t j = first; j < end; j++) {
        for (int64_t i = 0; i < e; i++) p[j] += (double)q[i] * (double)d->k[j * e + i];
        for (int64_t i = 0; i < e; i++) dp[j] += (double)g[i] * (double)d->v[j * e + i];
        max = fmax(max, p[j] /= sqrt((double)e));
    }
    for (int64_t j = first; j < end; j++) sum += p[j] = exp(p[j] - max);
    for (int64_t j = first; j < end; j++) mean += (p[j] /= sum) * dp[j];
    for (int64_t j = first; j < end; j++) {
        const double ds = p[j] * (dp[j] - mean) / sqrt((double)e);
        for (int64_t i = 0; i < e; i++) {
            dq[i] += ds * (double)d->k[j * e + i];
            dk[j * e + i] += ds * (double)q[i];
            dv[j * e + i] += p[j] * (double)g[i];
        }
    }
    free(p), free(dp);
}

/* Rows of `width` with stride ld; guard values follow each. `floor` is added to the norm: a single
 * key has a gradient of exactly zero. */
static inline void attention_gradient_near(const float *got, int64_t ld, const double *want,
                                           int64_t rows, int64_t width, double floor,
                                           const char *what) {
    double error = 0.0, square = floor * floor * (double)(rows * width);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < width; i++) {
            const double off = (double)got[r * ld + i] - want[r * width + i];
            error += off * off;
            square += want[r * width + i] * want[r * width + i];
        }
        for (int64_t i = width; i < ld; i++) assert_true(got[r * ld + i] == ATTENTION_GUARD);
    }
    if (!(sqrt(error / square) <= ATTENTION_BACKWARD_ERROR(rows)))
        fail_msg("attention: relative error %g of %s, %d rows of %d", sqrt(error / square), what,
                 (int)rows, (int)width);
}

struct attention_gradients {
    float *dq, *dk, *dv; /* [rows][ldq], [rows][E + 1] twice */
};

/* Forward and backward of the case, whose first row is at position 0. */
static inline struct attention_gradients attention_gradients_make(const struct kernels *k,
                                                                  const struct attention_data *d,
                                                                  const float *dout) {
    const int64_t e = d->c.head_dim, heads = d->c.n_heads, rows = d->c.rows, ld = e + 1;
    struct attention_pages *p = attention_pages_new(DTYPE_F32, d->n, d->k, d->v, d->n, e);
    float *out = attention_guards(rows * d->ldq), *stats = attention_guards(rows * 2 * heads);
    struct attention_gradients g = {attention_guards(rows * d->ldq), attention_guards(rows * ld),
                                    attention_guards(rows * ld)};
    struct attention_job forward = attention_job_of(k, d, p, 0, rows, out);
    forward.ldo = d->ldq;
    forward.stats = stats;
    forward.ld_stats = 2 * heads;
    k->attention(&forward);
    free(forward.scratch);
    float *keys = xmalloc((size_t)(rows * ld) * sizeof *keys),
          *values = xmalloc((size_t)(rows * ld) * sizeof *values);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(keys + i * ld, d->k + i * e, (size_t)e * sizeof *keys);
        memcpy(values + i * ld, d->v + i * e, (size_t)e * sizeof *values);
    }
    const struct attention_backward_job job = {
        .head_dim = e,
        .n_heads = heads,
        .rows = rows,
        .window = d->c.window,
        .q = d->q,
        .out = out,
        .dout = dout,
        .dq = g.dq,
        .ldq = d->ldq,
        .k = keys,
        .v = values,
        .dk = g.dk,
        .dv = g.dv,
        .ldk = ld,
        .stats = stats,
        .ld_stats = 2 * heads,
        .scale = forward.scale,
        .scratch = attention_scratch_new(k->attention_backward_scratch(e, rows)),
    };
    k->attention_backward(&job);
    free(job.scratch), free(keys), free(values), free(out), free(stats);
    attention_pages_free(p);
    return g;
}

static inline void attention_backward_check(const struct kernels *k, struct rng *r,
                                            struct attention_case c) {
    struct attention_data d = attention_data_make(r, c);
    const int64_t e = c.head_dim, width = e * c.n_heads;
    float *dout = attention_numbers(r, c.rows * d.ldq);
    struct attention_gradients g = attention_gradients_make(k, &d, dout);
    double *dq = xcalloc((size_t)(c.rows * width), sizeof *dq),
           *dk = xcalloc((size_t)(c.rows * e), sizeof *dk),
           *dv = xcalloc((size_t)(c.rows * e), sizeof *dv);
    for (int64_t i = 0; i < c.rows * c.n_heads; i++)
        attention_naive_backward(&d, dout, i / c.n_heads, i % c.n_heads, dq + i * e, dk, dv);
    attention_gradient_near(g.dq, d.ldq, dq, c.rows, width, 0.01, "dq");
    attention_gradient_near(g.dk, e + 1, dk, c.rows, e, 0.01, "dk");
    attention_gradient_near(g.dv, e + 1, dv, c.rows, e, 0.01, "dv");
    free(dout), free(dq), free(dk), free(dv), free(g.dq), free(g.dk), free(g.dv);
    attention_data_free(&d);
}

#endif
