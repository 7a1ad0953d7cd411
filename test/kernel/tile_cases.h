/*
 * tile_cases: products in bf16 tiles against a naive twin, bit by bit. test_kernels runs them on
 * the machine's instructions, test_emulated on emulated ones.
 *
 * The twin multiplies one output at a time, from the definitions of the instructions. TDPBF16PS: in
 * a step of 32 inputs one chain of fused multiply-adds over the even inputs and one over the odd
 * ones; their sum is added to the output. VDPBF16PS: one chain, which starts from the output; of
 * each pair of inputs the odd one first. Both read and write denormals as zero.
 */
#ifndef SHOAL_TEST_TILE_CASES_H
#define SHOAL_TEST_TILE_CASES_H

#include "kernel/internal.h"

#define TILE_GUARD 0x1.234p+99f

static bool tile_twin_by_pairs; /* the twin of VDPBF16PS, not of TDPBF16PS */

static float tile_flush(float f) {
    return fabsf(f) < 0x1p-126f ? copysignf(0.0f, f) : f;
}

static float tile_round(float f) {
    return tile_flush(bf16_to_f32(f32_to_bf16(tile_flush(f))));
}

/* One step: sum + Σ a[i lda] b[i ldb] over n <= 32 values that are bf16 already. */
static float tile_group(float sum, const float *a, int64_t lda, const float *b, int64_t ldb,
                        int64_t n) {
    float part[2] = {0, 0};
    for (int64_t i = 0; tile_twin_by_pairs && i < n; i += 2)
        for (int64_t j = MIN(i + 1, n - 1); j >= i; j--)
            sum = tile_flush(fmaf(a[j * lda], b[j * ldb], tile_flush(sum)));
    if (tile_twin_by_pairs) return sum;
    for (int64_t i = 0; i < n; i++)
        part[i & 1] = tile_flush(fmaf(a[i * lda], b[i * ldb], part[i & 1]));
    return tile_flush(tile_flush(sum) + tile_flush(part[0] + part[1]));
}

/* Σ a[i] b[i] over n such values. */
static float tile_chain(const float *a, const float *b, int64_t n) {
    float sum = 0;
    for (int64_t s = 0; s < n; s += 32) sum = tile_group(sum, a + s, 1, b + s, 1, MIN(n - s, 32));
    return sum;
}

static bool tile_same(float a, float b) {
    return a == b || (isnan(a) && isnan(b));
}

struct tile_case {
    enum tensor_type type;
    int64_t rows, n, k;
    struct matrix w;
    struct arena arena;
    uint8_t *file;
    float *weights; /* [n][k] rounded to bf16 */
};

static void tile_case_make(struct tile_case *c, struct rng *r, enum tensor_type type, int64_t rows,
                           int64_t n, int64_t k) {
    struct error err;
    const size_t bytes = tensor_row_bytes(type, k);
    *c = (struct tile_case){.type = type, .rows = rows, .n = n, .k = k};
    c->file = xmalloc(bytes * (size_t)n);
    c->weights = xmalloc((size_t)(n * k) * sizeof(float));
    for (int64_t i = 0; i < n; i++) {
        float *row = c->weights + i * k;
        for (int64_t j = 0; j < k; j++) row[j] = rng_normal(r);
        tensor_from_f32(type, row, c->file + bytes * (size_t)i, k);
    }
    assert_int_equal(
        matrix_init(&c->w, type, n, k, c->file, NULL, NUMERIC_FAST, NULL, &c->arena, &err), OK);
    for (int64_t i = 0; i < n; i++) {
        matrix_get_row(&c->w, i, c->weights + i * k);
        for (int64_t j = 0; j < k; j++) c->weights[i * k + j] = tile_round(c->weights[i * k + j]);
    }
}

static void tile_case_free(struct tile_case *c) {
    free(c->file);
    free(c->weights);
    arena_release(&c->arena);
}

/* Rows of `width` random values, packed, in an allocation of exactly their size. Unpacked they are
 * rounded to bf16. */
static struct gemm_input tile_inputs(const struct kernels *k, struct rng *r, int64_t rows,
                                     int64_t width) {
    const int64_t steps = (width + 31) / 32;
    float *x = xmalloc((size_t)(rows * width) * sizeof *x);
    struct gemm_input in = {.path = ROWS_TRAINING, .rows = rows, .k = width, .ldx = width, .x = x};
    in.tiles = aligned_alloc(64, (size_t)((rows + 15) / 16 * steps * 1024));
    memset(in.tiles, 0, (size_t)((rows + 15) / 16 * steps * 1024));
    for (int64_t m = 0; m < rows; m++) {
        for (int64_t i = 0; i < width; i++) x[m * width + i] = rng_normal(r);
        k->tiles_pack_row(x + m * width, width, in.tiles + m / 16 * steps * 512 + m % 16 * 32);
        for (int64_t i = 0; i < width; i++) x[m * width + i] = tile_round(x[m * width + i]);
    }
    return in;
}

static void tile_inputs_free(struct gemm_input *in) {
    free((float *)(uintptr_t)in->x);
    free(in->tiles);
}

/* Runs `backward` or forward on outputs [n0, n1), stored and added, and compares every value. */
static void tile_case_check(const struct kernels *k, struct rng *r, const struct tile_case *c,
                            bool backward, int64_t n0, int64_t n1) {
    const int64_t n = backward ? c->k : c->n, width = backward ? c->n : c->k, ldy = n + 3;
    struct gemm_input in = tile_inputs(k, r, c->rows, width);
    float *y = xmalloc((size_t)(c->rows * ldy) * sizeof *y),
          *column = xmalloc((size_t)width * sizeof *column);
    for (int add = 0; add < 2; add++) {
        for (int64_t i = 0; i < c->rows * ldy; i++) y[i] = add ? (float)(i % 17) : TILE_GUARD;
        if (backward)
            k->gemm_tiles_backward(y, ldy, &in, &c->w, 0, n0, n1, add);
        else
            k->gemm_tiles(y, ldy, &in, &c->w, n0, n1, add);
        for (int64_t o = 0; o < ldy; o++) {
            for (int64_t i = 0; o < n && i < width; i++)
                column[i] = backward ? c->weights[i * n + o] : c->weights[o * width + i];
            for (int64_t m = 0; m < c->rows; m++) {
                const int64_t at = m * ldy + o;
                float want = add ? (float)(at % 17) : TILE_GUARD;
                if (o >= n0 && o < n1)
                    want = (add ? want : 0) + tile_chain(in.x + m * width, column, width);
                if (!tile_same(y[at], want))
                    fail_msg("%s%s rows %lld n %lld k %lld: [%lld][%lld] is %a, not %a",
                             tensor_type_name(c->type), backward ? " backward" : "",
                             (long long)c->rows, (long long)c->n, (long long)c->k, (long long)m,
                             (long long)o, (double)y[at], (double)want);
            }
        }
    }
    free(y), free(column);
    tile_inputs_free(&in);
}

static void tile_case_run(const struct kernels *k, struct rng *r, enum tensor_type type,
                          int64_t rows, int64_t n, int64_t width) {
    struct tile_case c;
    tile_case_make(&c, r, type, rows, n, width);
    tile_case_check(k, r, &c, false, 0, n);
    tile_case_check(k, r, &c, true, 0, width);
    if (n > 16) tile_case_check(k, r, &c, false, 16, n);
    if (width > 32) tile_case_check(k, r, &c, true, 32, width);
    tile_case_free(&c);
}

/* A gated MLP gives the bits of its parts. */
static void tile_gated_case(const struct kernels *k, struct rng *r, enum tensor_type type,
                            int64_t rows, int64_t n, int64_t width) {
    struct tile_case gate, up;
    tile_case_make(&gate, r, type, rows, n, width);
    tile_case_make(&up, r, type, rows, n, width);
    struct gemm_input in = tile_inputs(k, r, rows, width);
    const int64_t tiles = (n + 31) / 32, padded = (rows + 15) / 16 * 16;
    const size_t bytes = (size_t)(padded * tiles * 32) * sizeof(uint16_t);
    uint16_t *out[3], *want[3]; // activations, gates, ups
    float *y[2];
    for (int i = 0; i < 3; i++) out[i] = memset(xmalloc(bytes), 0x55, bytes);
    for (int i = 0; i < 3; i++) want[i] = xcalloc(1, bytes);
    for (int i = 0; i < 2; i++) {
        y[i] = xcalloc((size_t)(rows * n), sizeof(float));
        k->gemm_tiles(y[i], n, &in, i ? &up.w : &gate.w, 0, n, false);
    }
    for (int64_t m = 0; m < rows; m++) {
        const int64_t at = m / 16 * tiles * 512 + m % 16 * 32;
        for (int i = 0; i < 2; i++) k->tiles_pack_row(y[i] + m * n, n, want[1 + i] + at);
        k->silu_mul(y[0] + m * n, y[0] + m * n, y[1] + m * n, n);
        k->tiles_pack_row(y[0] + m * n, n, want[0] + at);
    }
    const struct gemm_gated g = {&gate.w, &up.w, out[0], out[1], out[2]};
    for (int64_t o = 0; o < n; o += 32) k->gemm_tiles_silu(&g, &in, o, MIN(o + 32, n));
    for (int i = 0; i < 3; i++) assert_memory_equal(out[i], want[i], bytes);
    const struct gemm_gated alone = {&gate.w, &up.w, out[0], NULL, NULL};
    memset(out[0], 0x55, bytes);
    for (int64_t o = 0; o < n; o += 32) k->gemm_tiles_silu(&alone, &in, o, MIN(o + 32, n));
    assert_memory_equal(out[0], want[0], bytes);
    for (int i = 0; i < 2; i++) free(y[i]);
    for (int i = 0; i < 3; i++) free(out[i]), free(want[i]);
    tile_inputs_free(&in);
    tile_case_free(&gate);
    tile_case_free(&up);
}

/* The backward pass of a gated row gives the bits of act_backward. */
static void tile_gated_backward_case(const struct kernels *k, struct rng *r, int64_t n) {
    float *v[9];        // gate, up, dact, ones; act, dgate, dup; two wanted
    uint16_t *tiles[8]; // gate, up; act, dgate, dup; the same without f32
    const int64_t steps = (n + 31) / 32;
    for (int i = 0; i < 9; i++) v[i] = xcalloc((size_t)n + 1, sizeof(float));
    for (int i = 0; i < 8; i++) tiles[i] = xcalloc((size_t)steps * 512, sizeof(uint16_t));
    for (int64_t i = 0; i < n; i++) {
        for (int j = 0; j < 3; j++) v[j][i] = 3 * rng_normal(r);
        for (int j = 0; j < 2; j++) v[j][i] = tile_round(v[j][i]);
        v[3][i] = 1;
    }
    for (int j = 0; j < 2; j++) k->tiles_pack_row(v[j], n, tiles[j]);
    const struct gated_backward_row row = {tiles[0], tiles[1], v[2], tiles[2], tiles[3],
                                           tiles[4], v[4],     v[5], v[6]},
                                    only_tiles = {tiles[0], tiles[1], v[2], tiles[5], tiles[6],
                                                  tiles[7], NULL,     NULL, NULL};
    for (int j = 4; j < 7; j++) v[j][n] = TILE_GUARD;
    k->gated_backward(&row, n);
    k->gated_backward(&only_tiles, n);
    for (int j = 2; j < 5; j++) assert_memory_equal(tiles[j], tiles[j + 3], (size_t)steps * 1024);
    k->act_backward(v[7], v[8], v[3], v[0], v[1], n, false); // v[8] = y
    for (int64_t i = 0; i < n; i++) assert_true(v[4][i] == v[8][i] * v[1][i]);
    k->act_backward(v[7], v[8], v[2], v[0], v[1], n, false);
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i / 32 * 512 + i % 32;
        assert_true(v[5][i] == v[7][i] && v[6][i] == v[8][i]);
        for (int j = 2; j < 5; j++)
            assert_true(bf16_to_f32(tiles[j][at]) == tile_round(v[j + 2][i]));
    }
    for (int j = 4; j < 7; j++) assert_true(v[j][n] == TILE_GUARD);
    for (int i = 0; i < 9; i++) free(v[i]);
    for (int i = 0; i < 8; i++) free(tiles[i]);
}

enum { LOW_RANK_PARTS = 3 };

/* Low-rank parts of three ranges of rows, of which the second has two; rows between them have none.
 * t and v hold values that every element type holds exactly. */
struct low_rank_case {
    struct low_rank_part parts[LOW_RANK_PARTS];
    struct low_rank_rows rows[2];
    struct gemm_low_rank low;
    uint16_t *tiles;
    float *t;                 /* [rows][LOW_RANK_MAX] */
    float *v[LOW_RANK_PARTS]; /* [ranks][n] */
    char *views[LOW_RANK_PARTS];
};

static void low_rank_case_make(struct low_rank_case *c, const struct kernels *kern, struct rng *r,
                               int64_t rows, int64_t n) {
    static const int64_t ranks[] = {8, 3, 33}, at[] = {0, 0, 4};
    static const enum dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I8};
    const size_t bytes = (size_t)((rows + 15) / 16 * 16 * LOW_RANK_MAX) * sizeof(uint16_t);
    *c = (struct low_rank_case){.tiles = memset(xmalloc(bytes), 0, bytes),
                                .t = xcalloc((size_t)(rows * LOW_RANK_MAX), sizeof(float))};
    for (int64_t i = 0; i < rows * LOW_RANK_MAX; i++)
        c->t[i] = i % LOW_RANK_MAX < 37 ? tile_round(rng_normal(r)) : 0;
    for (int64_t m = 0; m < rows; m++)
        kern->tiles_pack_row(c->t + m * LOW_RANK_MAX, LOW_RANK_MAX,
                             c->tiles + m / 16 * 16 * LOW_RANK_MAX + m % 16 * 32);
    for (int k = 0; k < LOW_RANK_PARTS; k++) {
        const bool pairs = types[k] == DTYPE_I8;
        const int64_t stored = (ranks[k] + 1) / 2 * 2;
        c->v[k] = xcalloc((size_t)(stored * n), sizeof(float));
        c->views[k] = xcalloc((size_t)(stored * n), dtype_size(types[k]));
        for (int64_t i = 0; i < ranks[k] * n; i++) {
            const int64_t o = i / n, to = pairs ? (o / 2 * n + i % n) * 2 + o % 2 : i;
            c->v[k][i] = (float)((int)rng_below(r, 255) - 127);
            if (pairs)
                c->views[k][to] = (char)(int)c->v[k][i];
            else
                dtype_from_f32(types[k], &c->v[k][i],
                               c->views[k] + to * (int64_t)dtype_size(types[k]), 1);
        }
        c->parts[k] =
            (struct low_rank_part){matrix_view(types[k], pairs, c->views[k], ranks[k], n), at[k]};
    }
    c->rows[0] = (struct low_rank_rows){0, rows / 3, {1, 1}, {&c->parts[0], &c->parts[1]}};
    c->rows[1] = (struct low_rank_rows){rows / 2, rows, {2, 1}, {&c->parts[1], &c->parts[0]}};
    c->low = (struct gemm_low_rank){{c->tiles, c->tiles}, c->rows, 2};
}

static void low_rank_case_free(struct low_rank_case *c) {
    for (int k = 0; k < LOW_RANK_PARTS; k++) free(c->v[k]), free(c->views[k]);
    free(c->tiles), free(c->t);
}

/* Output (m, o) of x wᵀ with the parts of list `of`, as one chain. */
static float low_rank_case_want(const struct low_rank_case *c, const struct gemm_input *in,
                                const float *weights, int64_t n, int64_t m, int64_t o, int of) {
    const int64_t k = (in->k + 31) / 32 * 32;
    float *x = xcalloc((size_t)(k + LOW_RANK_MAX), sizeof *x),
          *w = xcalloc((size_t)(k + LOW_RANK_MAX), sizeof *w);
    memcpy(x, in->x + m * in->ldx, (size_t)in->k * sizeof *x);
    memcpy(w, weights, (size_t)in->k * sizeof *w);
    memcpy(x + k, c->t + m * LOW_RANK_MAX, LOW_RANK_MAX * sizeof *x);
    for (int i = 0; i < c->low.n; i++)
        for (int p = 0; m >= c->rows[i].begin && m < c->rows[i].end && p < c->rows[i].n_parts[of];
             p++) {
            const struct low_rank_part *part = &c->rows[i].parts[of][p];
            for (int64_t r = 0; r < part->v.n; r++)
                w[k + part->column + r] = c->v[part - c->parts][r * n + o];
        }
    const float sum = tile_chain(x, w, k + LOW_RANK_MAX);
    free(x), free(w);
    return sum;
}

/* Forward, backward and gated products with low-rank parts. */
static void tile_low_rank_case(const struct kernels *k, struct rng *r, int64_t rows, int64_t n,
                               int64_t width) {
    struct tile_case c;
    tile_case_make(&c, r, TENSOR_BF16, rows, n, width);
    for (int backward = 0; backward < 2; backward++) {
        const int64_t outs = backward ? width : n, inner = backward ? n : width;
        struct low_rank_case low;
        struct gemm_input in = tile_inputs(k, r, rows, inner);
        float *y = xmalloc((size_t)(rows * outs) * sizeof *y),
              *column = xmalloc((size_t)inner * sizeof *column);
        low_rank_case_make(&low, k, r, rows, outs);
        in.low_rank = &low.low;
        if (backward)
            k->gemm_tiles_backward(y, outs, &in, &c.w, 0, 0, outs, false);
        else
            k->gemm_tiles(y, outs, &in, &c.w, 0, outs, false);
        for (int64_t i = 0; i < rows * outs; i++) {
            for (int64_t j = 0; j < inner; j++)
                column[j] = c.weights[backward ? j * outs + i % outs : i % outs * inner + j];
            const float want = low_rank_case_want(&low, &in, column, outs, i / outs, i % outs, 0);
            if (!tile_same(y[i], want))
                fail_msg("low-rank, backward %d: [%lld][%lld] is %a, not %a", backward,
                         (long long)(i / outs), (long long)(i % outs), (double)y[i], (double)want);
        }
        free(y), free(column);
        low_rank_case_free(&low);
        tile_inputs_free(&in);
    }
    tile_case_free(&c);
}

/* A gated product with parts gives the bits of two products, each with its own. */
static void tile_gated_low_rank_case(const struct kernels *k, struct rng *r, int64_t rows,
                                     int64_t n, int64_t width) {
    struct tile_case w[2];
    struct low_rank_case low;
    struct gemm_input in = tile_inputs(k, r, rows, width);
    const int64_t tiles = (n + 31) / 32;
    const size_t bytes = (size_t)((rows + 15) / 16 * 16 * tiles * 32) * sizeof(uint16_t);
    uint16_t *out[3];
    float *y = xmalloc((size_t)(rows * n) * sizeof *y);
    low_rank_case_make(&low, k, r, rows, n);
    for (int i = 0; i < 3; i++) out[i] = memset(xmalloc(bytes), 0x55, bytes);
    for (int i = 0; i < 2; i++) tile_case_make(&w[i], r, TENSOR_Q8_0, rows, n, width);
    in.low_rank = &low.low;
    const struct gemm_gated g = {&w[0].w, &w[1].w, out[0], out[1], out[2]};
    k->gemm_tiles_silu(&g, &in, 0, n);
    for (int i = 0; i < 2; i++) {
        struct low_rank_rows rows_of[2] = {low.rows[0], low.rows[1]};
        struct gemm_low_rank one = {{low.tiles, NULL}, rows_of, 2};
        for (int j = 0; j < 2; j++) rows_of[j].parts[0] = low.rows[j].parts[i];
        for (int j = 0; j < 2; j++) rows_of[j].n_parts[0] = low.rows[j].n_parts[i];
        in.low_rank = &one;
        k->gemm_tiles(y, n, &in, &w[i].w, 0, n, false);
        for (int64_t m = 0; m < rows; m++)
            for (int64_t o = 0; o < n; o++) {
                const int64_t at = ((m / 16 * tiles + o / 32) * 16 + m % 16) * 32 + o % 32;
                assert_true(tile_same(bf16_to_f32(out[1 + i][at]), tile_round(y[m * n + o])));
            }
    }
    for (int i = 0; i < 3; i++) free(out[i]);
    for (int i = 0; i < 2; i++) tile_case_free(&w[i]);
    free(y);
    low_rank_case_free(&low);
    tile_inputs_free(&in);
}

/* Rows of an adapter that are used in place: [r][n], values that every element type holds exactly.
 * y[m] = Σ over n of x and the row; z[m] = Σ over ranks. The first rows of y are not wanted. */
static void tile_view_case(const struct kernels *k, struct rng *r, enum dtype e, bool pairs,
                           int64_t rows, int64_t ranks, int64_t n) {
    const int64_t skip = rows > 4 ? 3 : 0;
    float *values = xmalloc((size_t)(ranks * n) * sizeof *values);
    char *view = xmalloc((size_t)(ranks * n) * dtype_size(e));
    for (int64_t i = 0; i < ranks * n; i++) {
        values[i] = (float)((int)rng_below(r, 255) - 127);
        const int64_t o = i / n, at = pairs ? (o / 2 * n + i % n) * 2 + o % 2 : i;
        if (e == DTYPE_I8)
            view[at] = (char)(int)values[i];
        else
            dtype_from_f32(e, &values[i], view + at * (int64_t)dtype_size(e), 1);
    }
    const struct matrix w = matrix_view(e, pairs, view, ranks, n);
    for (int backward = pairs; backward < 2; backward++) {
        const int64_t width = backward ? ranks : n, outs = backward ? n : ranks;
        struct gemm_input in = tile_inputs(k, r, rows, width);
        float *y = xmalloc((size_t)(rows * outs) * sizeof *y), column[256];
        for (int64_t i = 0; i < rows * outs; i++) y[i] = TILE_GUARD;
        in.skip = skip;
        if (backward)
            k->gemm_tiles_backward(y, outs, &in, &w, 0, 0, outs, false);
        else
            k->gemm_tiles(y, outs, &in, &w, 0, outs, false);
        for (int64_t i = 0; i < rows * outs; i++) {
            const int64_t m = i / outs, o = i % outs;
            for (int64_t j = 0; j < width; j++)
                column[j] = backward ? values[j * n + o] : values[o * n + j];
            const float want = m < skip ? TILE_GUARD : tile_chain(in.x + m * width, column, width);
            if (!tile_same(y[i], want))
                fail_msg("view %d backward %d: %a, not %a", (int)e, backward, (double)y[i],
                         (double)want);
        }
        free(y);
        tile_inputs_free(&in);
    }
    free(values), free(view);
}

/* n random values; `rounded` gets them in bf16. */
static float *tile_values(struct rng *r, int64_t n, float **rounded) {
    float *v = xmalloc((size_t)n * sizeof *v);
    *rounded = xmalloc((size_t)n * sizeof *v);
    for (int64_t i = 0; i < n; i++) {
        v[i] = rng_normal(r);
        (*rounded)[i] = tile_round(v[i]);
    }
    return v;
}

/* A gradient of weights: outputs from n0 on, all arrays of exactly their size. */
static void tile_weight_grad_case(const struct kernels *k, struct rng *r, int64_t rows, int64_t n0,
                                  int64_t n, int64_t width) {
    const int64_t groups = (rows + 31) / 32;
    float *y, *x, *dw = xmalloc((size_t)(n * width) * sizeof *dw),
                  *dy = tile_values(r, rows * n, &y), *in = tile_values(r, rows * width, &x);
    uint16_t *pairs = aligned_alloc(64, (size_t)((width + 15) / 16 * groups * 1024));
    const struct weight_grad_job job = {dw, dy, in, rows, n, width, pairs};
    for (int64_t i = 0; i < n * width; i++) dw[i] = (float)(i % 17) - 8;
    for (int64_t g = 0; g < groups; g++) k->tiles_pack_pairs(&job, g);
    k->gemm_tiles_grad(&job, n0, n);
    for (int64_t i = 0; i < n * width; i++) {
        float want = (float)(i % 17) - 8;
        for (int64_t m = 0; i / width >= n0 && m < rows; m += 32)
            want = tile_group(want, y + m * n + i / width, n, x + m * width + i % width, width,
                              MIN(rows - m, 32));
        if (!tile_same(dw[i], want))
            fail_msg("gradient of %lld outputs, %lld inputs, %lld rows: [%lld][%lld] is %a, not %a",
                     (long long)n, (long long)width, (long long)rows, (long long)(i / width),
                     (long long)(i % width), (double)dw[i], (double)want);
    }
    free(dw), free(dy), free(in), free(y), free(x), free(pairs);
}

/* Whole blocks and parts of them; more groups than are held at once. */
static void tile_weight_grad_cases(const struct kernels *k) {
    static const int64_t ns[] = {64, 5, 80, 70, 32}, widths[] = {96, 40, 72, 8, 32},
                         rows[] = {1, 31, 32, 33, 70, 97};
    struct rng r = rng_make(22, RNG_TEST, 0, 0);
    for (size_t i = 0; i < ARRAY_LEN(ns); i++)
        for (size_t j = 0; j < ARRAY_LEN(widths); j++)
            tile_weight_grad_case(k, &r, rows[(i + j) % ARRAY_LEN(rows)], ns[i] > 64 ? 32 : 0,
                                  ns[i], widths[j]);
    tile_weight_grad_case(k, &r, 1056, 0, 32, 32);
    tile_weight_grad_case(k, &r, 530, 0, 48, 70);
}

/* Sums of exponentials and gradients of logits, from those that gemm_tiles gives. */
/* Values of a row in tiles whose bit of the mask is 0 become 0; the last tile stays zero padded. */
static void tile_mask_case(const struct kernels *k, struct rng *r, int64_t width) {
    const int64_t steps = (width + 31) / 32, bytes = (width + 7) / 8;
    struct gemm_input in = tile_inputs(k, r, 5, width);
    uint8_t *mask = xmalloc((size_t)bytes);
    uint16_t *out = xcalloc((size_t)steps * 512, sizeof *out);
    const uint16_t *row = gemm_input_tile_row(&in, 3);
    for (int64_t i = 0; i < bytes; i++) mask[i] = (uint8_t)rng_u32(r);
    if (width % 8) mask[bytes - 1] &= (uint8_t)((1 << width % 8) - 1);
    k->tiles_mask_row(out, row, mask, width);
    for (int64_t i = 0; i < 32 * steps; i++) {
        const int64_t at = i / 32 * 512 + i % 32;
        const bool kept = i < width && (mask[i / 8] >> i % 8 & 1);
        assert_int_equal(out[at], kept ? row[at] : 0);
    }
    free(mask), free(out);
    tile_inputs_free(&in);
}

static void tile_softmax_case(const struct kernels *k, struct rng *r, enum tensor_type type,
                              int64_t rows, int64_t n0, int64_t n, int64_t width) {
    const int64_t all = (rows + 15) / 16 * 16, tiles = (n - n0 + 31) / 32, size = all * tiles * 32;
    struct tile_case c;
    tile_case_make(&c, r, type, rows, n, width);
    struct gemm_input in = tile_inputs(k, r, rows, width);
    float *y = xcalloc((size_t)(rows * n), sizeof *y), *shift = xcalloc((size_t)all, sizeof *shift),
          *weight = xcalloc((size_t)all, sizeof *weight), *e = xcalloc((size_t)n, sizeof *e);
    float(*sums)[16] = xcalloc((size_t)all, sizeof *sums), want[16];
    uint16_t *grads = aligned_alloc(64, (size_t)size * sizeof *grads);
    for (int64_t m = 0; m < rows; m++) {
        shift[m] = rng_normal(r);
        weight[m] = 0.25f + rng_normal(r);
        for (int l = 0; l < 16; l++) sums[m][l] = (float)l;
    }
    const struct gemm_softmax job = {0.5f, shift, sums, weight, grads};
    k->gemm_tiles(y, n, &in, &c.w, 0, n, false);
    k->gemm_tiles_softmax(&job, &in, &c.w, n0, n);
    for (int64_t m = 0; m < all; m++) {
        for (int64_t i = n0; m < rows && i < n; i++) e[i] = y[m * n + i] * 0.5f - shift[m];
        k->exp(e, e, n);
        for (int l = 0; l < 16; l++) want[l] = (float)l;
        for (int64_t i = n0; i < n0 + tiles * 32; i++) {
            const float g = m < rows && i < n ? tile_round(weight[m] * e[i]) : 0.0f;
            const int64_t at = (m / 16 * tiles + (i - n0) / 32) * 512 + m % 16 * 32 + (i - n0) % 32;
            if (i < n) want[(i - n0) % 16] += e[i];
            assert_true(tile_same(bf16_to_f32(grads[at]), g));
        }
        for (int l = 0; m < rows && l < 16; l++) assert_true(tile_same(sums[m][l], want[l]));
    }
    free(y), free(shift), free(weight), free(e), free(sums), free(grads);
    tile_inputs_free(&in);
    tile_case_free(&c);
}

/* The gradient of a low-rank factor: rows [row, row + rows) of the tiles of x, columns from c0 on,
 * all arrays of exactly their size. */
static void tile_low_rank_grad_case(const struct kernels *k, struct rng *r, int64_t row,
                                    int64_t rows, int64_t ranks, int64_t c0, int64_t columns,
                                    bool transposed) {
    const int64_t all = row + rows, tile_rows = (all + 15) / 16 * 16,
                  width = (columns + 31) / 32 * 32, ld = (transposed ? ranks : columns) + 3,
                  lines = transposed ? columns : ranks, n = (lines - 1) * ld + ld - 3;
    float *x, *in = tile_values(r, all * columns, &x), *t, *raw = tile_values(r, rows * ranks, &t),
              *g = xmalloc((size_t)n * sizeof *g);
    struct gemm_input tiles = {.rows = all, .k = columns, .ldx = columns, .x = in};
    tiles.tiles = aligned_alloc(64, (size_t)(tile_rows * width) * sizeof(uint16_t));
    for (int64_t m = 0; m < all; m++)
        k->tiles_pack_row(in + m * columns, columns, gemm_input_tile_row(&tiles, m));
    for (int64_t i = 0; i < rows * ranks; i++) t[i] = tile_round(0.5f * raw[i]);
    for (int64_t i = 0; i < n; i++) g[i] = (float)(i % 17) - 8;
    const struct low_rank_grad_job job = {g,     ld,   ranks,  transposed, raw,
                                          ranks, 0.5f, &tiles, row,        rows};
    k->gemm_tiles_low_rank_grad(&job, c0, columns);
    for (int64_t i = 0; i < n; i++) {
        const int64_t rank = transposed ? i % ld : i / ld, c = transposed ? i / ld : i % ld;
        const bool computed = rank < ranks && c >= c0 && c < columns;
        float want = (float)(i % 17) - 8;
        for (int64_t m = 0; computed && m < rows; m += 32)
            want = tile_group(want, t + m * ranks + rank, ranks, x + (row + m) * columns + c,
                              columns, MIN(rows - m, 32));
        if (!tile_same(g[i], want))
            fail_msg(
                "low-rank gradient of %lld ranks, %lld columns, rows %lld + %lld: [%lld][%lld] "
                "is %a, not %a",
                (long long)ranks, (long long)columns, (long long)row, (long long)rows,
                (long long)rank, (long long)c, (double)g[i], (double)want);
    }
    free(x), free(in), free(t), free(raw), free(g), free(tiles.tiles);
}

/* Rows that begin inside a tile; ranks and columns that do not fill one; more groups of rows and
 * more ranks than are packed at once. */
static void tile_low_rank_grad_cases(const struct kernels *k) {
    static const int64_t rows[] = {1, 31, 32, 33, 70, 97}, ranks[] = {1, 8, 16, 17, 33, 70};
    struct rng r = rng_make(23, RNG_TEST, 0, 0);
    for (int64_t i = 0; i < 24; i++)
        tile_low_rank_grad_case(k, &r, 7 * i % 40, rows[i % 6], ranks[i * 5 % 6],
                                i % 3 == 2 ? 32 : 0, 33 + 11 * i % 64, i / 2 % 2);
    tile_low_rank_grad_case(k, &r, 3, 1100, 8, 0, 40, false);
    tile_low_rank_grad_case(k, &r, 0, 530, 70, 0, 20, true);
}

/* Every type; row counts around whole tiles and blocks; outputs that do not fill a tile; inputs and
 * outputs longer than a slice; more rows than a chunk. */
static void tile_cases_run(const struct kernels *k, bool all) {
    static const enum tensor_type of[] = {TENSOR_F32,  TENSOR_BF16, TENSOR_Q8_0, TENSOR_Q4_0,
                                          TENSOR_Q4_1, TENSOR_Q5_0, TENSOR_Q5_1, TENSOR_Q4_K,
                                          TENSOR_Q5_K, TENSOR_Q6_K, TENSOR_NF4};
    static const int64_t rows[] = {1, 15, 16, 17, 32, 33, 70}, ns[] = {16, 5, 33, 48, 100};
    struct rng r = rng_make(21, RNG_TEST, 0, 0);
    for (size_t i = 0; i < ARRAY_LEN(of); i++)
        for (size_t j = 0; j < (all ? 2 * ARRAY_LEN(rows) : 2); j++) {
            const int64_t block = tensor_type_block_size(of[i]);
            const int64_t width =
                block == 1 ? 20 + 37 * (int64_t)j : block * (1 + (int64_t)j % (256 / block));
            tile_case_run(k, &r, of[i], rows[(i + j) % ARRAY_LEN(rows)],
                          ns[(i + 2 * j) % ARRAY_LEN(ns)], width);
        }
    for (int i = 0; i < 5; i++)
        for (int64_t j = 1; j < 4; j++)
            tile_view_case(k, &r, i < 4 ? (enum dtype)i : DTYPE_I8, i == 4, 17 * j - 14,
                           i == 4 ? 10 * j : 11 * j, 40 * j - 7);
    tile_weight_grad_cases(k);
    tile_low_rank_grad_cases(k);
    for (int64_t width = 1; width < 140; width += 6) tile_mask_case(k, &r, width);
    tile_softmax_case(k, &r, TENSOR_BF16, 33, 32, 112, 70);
    tile_softmax_case(k, &r, TENSOR_Q8_0, 16, 0, 75, 64);
    tile_softmax_case(k, &r, TENSOR_Q4_0, 5, 64, 80, 2080);
    tile_softmax_case(k, &r, TENSOR_F32, 70, 0, 64, 20);
    tile_gated_case(k, &r, TENSOR_Q4_0, 33, 48, 64);
    tile_gated_case(k, &r, TENSOR_BF16, 5, 70, 100);
    tile_gated_case(k, &r, TENSOR_Q8_0, 48, 33, 2080);
    tile_gated_backward_case(k, &r, 77);
    tile_gated_backward_case(k, &r, 96);
    tile_low_rank_case(k, &r, 5, 18, 40);
    tile_low_rank_case(k, &r, 70, 35, 33);
    tile_gated_low_rank_case(k, &r, 50, 40, 64);
    tile_case_run(k, &r, TENSOR_Q8_0, 35, 18, 2112);
    tile_case_run(k, &r, TENSOR_F32, 17, 2100, 40);
    if (all) tile_case_run(k, &r, TENSOR_Q4_0, 530, 40, 4160);
    if (all) tile_low_rank_case(k, &r, 560, 2112, 50);
}

#endif
