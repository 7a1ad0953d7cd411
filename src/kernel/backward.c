/*
 * backward: products of a backward pass over a thread pool: dX = dY W, whose sum runs over the
 * outputs of a weight matrix; dW = dYᵀ X in tiles; and gemm_nn.
 *
 * A matrix is packed for y = x Wᵀ only. For dX there are four ways. f32 and bf16 rows are used in
 * place. Tiles read every layout (gemm_tiles_backward). Other packed weights are widened
 * to f32 a tile at a time. If the caller requests int8, quantised weights are transposed in units:
 * a unit is the 32 inputs (q6_k: 16) that share one scale in each output. A unit is transposed once
 * for many rows of dY, so that its quads run along the outputs. The scale differs from output to
 * output, so dY is multiplied by it; the transposed unit then has scales of 1 and is multiplied by
 * the forward slots. The multiplication of dY is repeated for every unit, so it is done in 16 bits.
 * Nothing is allocated.
 *
 * Invariant: a row of dX depends only on the same row of dY, and the sum of each of its values runs
 * over the outputs in one order, however rows and inputs are divided.
 */
#include <string.h>

#include "kernel/internal.h"

enum {
    INT8_ROWS = 32,       /* rows of dY that are quantised for one unit at once */
    TRANSPOSE_ROWS = 256, /* rows of dY per transposed unit; a multiple of INT8_ROWS */
    TILE_ROWS = 512,      /* tiles: rows of dY that are packed in tiles at once; a multiple of 16 */
    OUTPUT_SLICE = 4096,  /* outputs that are summed before the sum is added to dX */
    TILE_OUTPUTS = 256,   /* outputs and inputs of a tile of widened weights */
    TILE_INPUTS = 64,
    MIN_BLOCKS = TILE_INPUTS, /* blocks of inputs whose minima are summed at once */
    MIN_ROWS = 128,           /* rows of dY for which minima are summed at once */
};

struct gemm_nn_job {
    enum dtype e;
    struct gemm_nn_args m;
    bool add;
};

/* Computes rows [m0, m1) and columns [c0, c1) of y. */
static void gemm_nn_part(const struct gemm_nn_job *p, int64_t m0, int64_t m1, int64_t c0,
                         int64_t c1) {
    const struct gemm_nn_args *m = &p->m;
    float *y = m->y + m0 * m->ldy + c0;
    const char *v = (const char *)m->v + c0 * (int64_t)dtype_size(p->e);
    size_t bytes = (size_t)(c1 - c0) * sizeof *y;
    for (int64_t i = 0; !p->add && i < m1 - m0; i++) memset(y + i * m->ldy, 0, bytes);
    gemm_nn(p->e, y, m->ldy, m->t + m0 * m->tm, m->tm, m->tj, m1 - m0, v, m->ldv, m->k, c1 - c0);
}

static void gemm_nn_by_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct gemm_nn_job *p = ctx;
    (void)thread;
    gemm_nn_part(p, begin, end, 0, p->m.n);
}

static void gemm_nn_by_columns(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct gemm_nn_job *p = ctx;
    (void)thread;
    gemm_nn_part(p, 0, p->m.rows, begin, end);
}

void gemm_nn_parallel(enum dtype e, float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
                      int64_t rows, const void *v, int64_t ldv, int64_t k, int64_t n, bool add,
                      struct pool *pool) {
    struct gemm_nn_job p = {e, {y, t, v, ldy, tm, tj, rows, ldv, k, n}, add};
    struct pool *use = matrix_pool_for(pool, rows, n, k);
    if (rows > n)
        pool_run(use, gemm_nn_by_rows, &p, rows, 48);
    else
        pool_run(use, gemm_nn_by_columns, &p, n, 64);
}

/* A product dX = dY W and its scratch. */
struct backward_job {
    float *dx;
    const float *dy;
    int64_t lddx, lddy, rows;
    const struct matrix *w;
    bool add;
    char *scratch;
    size_t thread_bytes;
    /* int8 and tiles: the current slice, outputs [first_output, first_output + n_outputs) and rows
     * [first_row, first_row + n_rows), and its dY, at the start of the scratch */
    int64_t first_output, n_outputs, first_row, n_rows;
    int16_t *q;              /* [n_rows][whole_blocks(n_outputs)]: dY in 16 bits */
    float *d;                /* [n_rows][whole_blocks(n_outputs) / 32]: scales of q times 2^23 */
    struct gemm_input tiles; /* [n_rows][n_outputs]: dY in tiles */
};

/* int8: scratch of one thread, for slices of n outputs (a multiple of 32) and one unit. */
struct transposed_panels {
    int8_t *q;          /* [INT8_ROWS][n]: dY times the scales, quantised */
    float *d;           /* [INT8_ROWS][n / 32] */
    float *scales;      /* [n]: the scales of the current unit */
    int16_t *q_scales;  /* [n]: the same in 16 bits */
    float *d_scales;    /* [n / 32]: the scales of q_scales */
    struct matrix unit; /* transposed unit: 32 (q6_k: 16) outputs × n inputs, scales of 1 */
};

static int64_t whole_blocks(int64_t n) {
    return (n + QK - 1) / QK * QK;
}

/* Bytes of the arrays of n outputs, and of the panels: at most two of int8 with heads. */
static size_t transposed_bytes(int64_t n) {
    const size_t records = (size_t)(n + 63) / 64, head = 20 * PANEL;
    return (size_t)n *
               (INT8_ROWS + INT8_ROWS / QK * sizeof(float) + sizeof(float) + sizeof(int16_t) + 1) +
           2 * ((size_t)n * PANEL + records * head) + 64;
}

/* c, half of the range of the integers of a type with minima, or 0. These integers are not
 * negative, and with them the rounding of dY would cause twice the error as with integers around
 * zero. So the product uses q - c, and c · scale is added to the minimum. */
static int code_centre(const struct matrix *w) {
    return !w->mins ? 0 : w->layout >= LAYOUT_Q4 ? 8 : 16;
}

/* Sets every scale of the unit to 1: f16 scales, or f16 scales of super-blocks and factors, or
 * bytes. */
static void unit_scales_set(const struct matrix *unit) {
    enum { ONE_F16 = 0x3c00 };
    const uint16_t one = ONE_F16;
    for (int64_t g = 0; g < unit->k / layout_group(unit->layout); g += record_groups(unit->layout))
        for (int64_t panel = 0; panel < unit->n / PANEL; panel++) {
            uint8_t *record = (uint8_t *)(uintptr_t)record_at(unit, panel, g);
            memset(record, 1, (size_t)unit->head_bytes);
            for (int i = 0; unit->layout != LAYOUT_NF4 && i < 2 * PANEL; i++)
                memcpy(record + 2 * i, &one, sizeof one);
        }
}

/* The layout of the arrays for slices of n outputs of w at `at`, aligned to 64. `row_scales` makes
 * the factor row_scale / NF4_UNIT equal to 1. */
static struct transposed_panels transposed_panels_layout(char *at, const struct matrix *w,
                                                         int64_t n, const float *row_scales) {
    struct transposed_panels t = {.unit = {.type = w->type,
                                           .layout = w->layout == LAYOUT_Q8_K   ? LAYOUT_Q8
                                                     : w->layout == LAYOUT_Q4_K ? LAYOUT_Q4
                                                                                : w->layout,
                                           .packed = true,
                                           .zero = w->zero,
                                           .n = layout_group(w->layout),
                                           .k = n,
                                           .data = at,
                                           .row_scales = row_scales}};
    if (w->mins) t.unit.type = TENSOR_Q5_0, t.unit.zero = (int8_t)code_centre(w);
    record_sizes_set(&t.unit);
    t.q = (int8_t *)at + t.unit.n / PANEL * t.unit.panel_bytes;
    t.d = (float *)(void *)(t.q + INT8_ROWS * n);
    t.scales = t.d + INT8_ROWS / QK * n;
    t.q_scales = (int16_t *)(void *)(t.scales + n);
    t.d_scales = (float *)(void *)(t.q_scales + n);
    unit_scales_set(&t.unit);
    return t;
}

/* Bytes of the scratch that all threads share: a slice of dY in 16 bits or in tiles. */
static size_t shared_scratch(int64_t n) {
    size_t slice = (size_t)MIN(whole_blocks(n), OUTPUT_SLICE);
    return MAX(TRANSPOSE_ROWS * (slice * sizeof(int16_t) + slice / QK * sizeof(float)),
               kernels_get()->gemm_tiles ? TILE_ROWS * slice * sizeof(uint16_t) + 64 : 0);
}

static size_t thread_scratch(int64_t n) {
    size_t tile = TILE_OUTPUTS * TILE_INPUTS * sizeof(float);
    return (MAX(tile, transposed_bytes(MIN(whole_blocks(n), OUTPUT_SLICE))) + 127) / 64 * 64;
}

size_t matrix_mul_backward_scratch(int64_t max_n, int threads) {
    return 64 + shared_scratch(max_n) + (size_t)threads * thread_scratch(max_n);
}

static char *scratch_of_thread(const struct backward_job *p, int thread) {
    uintptr_t at = (uintptr_t)p->scratch + (size_t)thread * p->thread_bytes;
    return (char *)((at + 63) / 64 * 64);
}

/* f32 path of packed weights: widens a tile of weights, then multiplies all rows of dY with it.
 * Items are blocks of 32 inputs. */
static void backward_widened(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct backward_job *p = ctx;
    const struct matrix *w = p->w;
    float *tile = (float *)(void *)scratch_of_thread(p, thread);
    for (int64_t k = begin * QK; k < MIN(end * QK, w->k); k += TILE_INPUTS) {
        int64_t n_inputs = MIN(MIN(end * QK, w->k) - k, TILE_INPUTS);
        for (int64_t o = 0; o < w->n; o += TILE_OUTPUTS) {
            int64_t n = MIN(w->n - o, TILE_OUTPUTS);
            for (int64_t i = 0; i < n; i++)
                matrix_get_row_part(w, o + i, k, k + n_inputs, tile + i * TILE_INPUTS);
            const struct gemm_nn_job m = {DTYPE_F32,
                                          {p->dx + k, p->dy + o, tile, p->lddx, p->lddy, 1, p->rows,
                                           TILE_INPUTS, n, n_inputs},
                                          p->add || o > 0};
            gemm_nn_part(&m, 0, p->rows, 0, n_inputs);
        }
    }
}

/* Sets out[i][b] to the minimum of output o + i in block b0 + b, plus c · scale (see code_centre),
 * for n outputs and `blocks` blocks. */
static void minima_gather(float *out, const struct matrix *w, int64_t o, int64_t n, int64_t b0,
                          int64_t blocks) {
    const int per_record = record_groups(w->layout);
    float scales[PANEL], mins[PANEL];
    for (int64_t i = 0; i < n; i += PANEL)
        for (int64_t b = 0; b < blocks; b++) {
            kernels_get()->record_read(scales, mins, record_at(w, (o + i) / PANEL, b0 + b),
                                       (int)((b0 + b) % per_record), w->layout);
            for (int64_t j = 0; j < MIN(n - i, PANEL); j++)
                out[(i + j) * MIN_BLOCKS + b] = mins[j] + (float)code_centre(w) * scales[j];
        }
}

/* Sets dX of every input of blocks [b0, b1) to Σ_o dY[m][o] min[o][b], or adds this sum to it. */
static void backward_minima(void *ctx, int64_t b0, int64_t b1, int thread) {
    const struct backward_job *p = ctx;
    float *tile = (float *)(void *)scratch_of_thread(p, thread);
    for (int64_t b = b0; b < b1; b += MIN_BLOCKS)
        for (int64_t m = 0; m < p->rows; m += MIN_ROWS) {
            float sum[MIN_ROWS * MIN_BLOCKS] = {0};
            int64_t rows = MIN(p->rows - m, MIN_ROWS), blocks = MIN(b1 - b, MIN_BLOCKS);
            for (int64_t o = 0; o < p->w->n; o += TILE_OUTPUTS) {
                int64_t n = MIN(p->w->n - o, TILE_OUTPUTS);
                minima_gather(tile, p->w, o, n, b, blocks);
                gemm_nn(DTYPE_F32, sum, MIN_BLOCKS, p->dy + m * p->lddy + o, p->lddy, 1, rows, tile,
                        MIN_BLOCKS, n, blocks);
            }
            for (int64_t i = 0; i < rows; i++)
                for (int64_t k = 0; k < blocks * QK; k++) {
                    float *to = p->dx + (m + i) * p->lddx + b * QK + k;
                    *to = (p->add ? *to : 0.0f) + sum[i * MIN_BLOCKS + k / QK];
                }
        }
}

/* Sets `by` to the scales of unit u for outputs [o, o + n), and the rest of the last block to
 * zeros.
 */
static void scales_gather(float *by, const struct matrix *w, int64_t u, int64_t o, int64_t n) {
    const int g = (int)(u % record_groups(w->layout));
    for (int64_t i = 0; i < n; i += PANEL) {
        // reads all 16 scales of a panel, also beyond n: `by` has room for whole blocks
        kernels_get()->record_read(by + i, NULL, record_at(w, (o + i) / PANEL, u), g, w->layout);
        for (int64_t j = i; w->layout == LAYOUT_NF4 && j < MIN(n, i + PANEL); j++)
            by[j] *= w->row_scales[o + j] / NF4_UNIT;
    }
    memset(by + n, 0, (size_t)(whole_blocks(n) - n) * sizeof *by);
}

/* quads_transpose: byte j of quad i becomes byte i of quad j, for four quads of bytes. It
 * interleaves the two halves twice. An interleaving is written as two SSE2 instructions, because
 * gcc moves single bytes otherwise. */
typedef uint8_t byte_quads __attribute__((vector_size(16)));
typedef uint64_t qword_pair __attribute__((vector_size(16)));
static byte_quads halves_interleave(byte_quads x) {
    byte_quads high = (byte_quads)__builtin_shufflevector((qword_pair)x, (qword_pair)x, 1, 1);
    return __builtin_shufflevector(x, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

static byte_quads quads_transpose(byte_quads x) {
    return halves_interleave(halves_interleave(x));
}

static byte_quads quads_at(const uint8_t *p) {
    byte_quads x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Transposes sixteen outputs of an int8 unit. The source panel has quads of inputs for each output;
 * the transposed panels, `panel` bytes apart, have quads of outputs for each input. With `centred`,
 * 16 is subtracted from each integer. */
static void bytes_transpose(uint8_t *to, size_t panel, const uint8_t *from, int inputs,
                            bool centred) {
    for (int p = 0; p < inputs / 4; p++)
        for (int q = 0; q < 4; q++) {
            byte_quads x = quads_transpose(quads_at(from + (p * PANEL + 4 * q) * 4) -
                                           (uint8_t)(centred ? 16 : 0));
            memcpy(to + (size_t)(p / 4) * panel + (q * PANEL + p % 4 * 4) * 4, &x, sizeof x);
        }
}

/* The same for 32 outputs in nibbles, panels `first` and `second` (NULL: zeros). Low nibbles are
 * inputs 0 to 15 in the source, and outputs 0 to 15 in the transposed unit. */
static void nibbles_transpose(uint8_t *to, size_t panel, const uint8_t *first,
                              const uint8_t *second) {
    for (int p = 0; p < 4; p++)
        for (int q = 0; q < 4; q++) {
            int at = (p * PANEL + 4 * q) * 4, out = (q * PANEL + 4 * p) * 4;
            byte_quads a = quads_at(first + at),
                       b = second ? quads_at(second + at) : (byte_quads){0};
            byte_quads low = quads_transpose((a & 15) | (b & 15) << 4),
                       high = quads_transpose(a >> 4 | (b & 0xf0));
            memcpy(to + out, &low, sizeof low);
            memcpy(to + panel + out, &high, sizeof high);
        }
}

/* Transposes unit u of outputs [o, o + n) of w to `unit`. n is a multiple of 32; outputs that do
 * not exist become zeros. */
static void panels_transpose(const struct matrix *unit, const struct matrix *w, int64_t u,
                             int64_t o, int64_t n) {
    const int group = layout_group(w->layout);
    const int64_t end = (w->n + PANEL - 1) / PANEL;
    const size_t panel = (size_t)unit->panel_bytes;
    for (int64_t i = 0; i < n / PANEL; i++) {
        const int64_t g = o / PANEL + i;
        const uint8_t *from = group_at(w, g, u);
        uint8_t *to =
            (uint8_t *)(uintptr_t)group_at(unit, 0, i * PANEL / group) + i * PANEL % group * PANEL;
        if (w->layout >= LAYOUT_Q4 && i % 2 == 0)
            nibbles_transpose(to, panel, from, g + 1 < end ? group_at(w, g + 1, u) : NULL);
        else if (w->layout < LAYOUT_Q4 && g < end)
            bytes_transpose(to, panel, from, group, w->mins);
        else if (w->layout < LAYOUT_Q4)
            for (int h = 0; h < group / PANEL; h++)
                memset(to + (size_t)h * panel, 0, PANEL * PANEL);
    }
}

/* Prefetches panels [g, end) of unit u, which is transposed next. The parts of a unit in successive
 * panels are pages apart, so the processor's own prefetcher does not load them. */
static void panels_prefetch(const struct matrix *w, int64_t u, int64_t g, int64_t end) {
    for (; g < end; g++) {
        const uint8_t *at = group_at(w, g, u);
        for (int64_t i = 0; i < layout_bytes(w->layout); i += 64) __builtin_prefetch(at + i, 0, 2);
        __builtin_prefetch(record_at(w, g, u), 0, 2);
    }
}

/* Quantises dY of the slice to 16 bits; the last block is padded with zeros. Items are rows. */
static void grad_quantize_i16(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    const struct backward_job *p = ctx;
    const struct kernels *kern = kernels_get();
    int64_t whole = p->n_outputs / QK * QK, padded = whole_blocks(p->n_outputs);
    for (int64_t i = begin; i < end; i++) {
        const float *dy = p->dy + (p->first_row + i) * p->lddy + p->first_output;
        int16_t *q = p->q + i * padded;
        float *d = p->d + i * (padded / QK), tail[QK] = {0};
        kern->quantize_row16(dy, whole, q, d);
        if (whole < p->n_outputs) {
            memcpy(tail, dy + whole, (size_t)(p->n_outputs - whole) * sizeof *tail);
            kern->quantize_row16(tail, QK, q + whole, d + whole / QK);
        }
        for (int64_t b = 0; b < padded / QK; b++) d[b] *= 0x1p23f;
    }
}

/* Sets t->q and t->d to dY times the unit's scales, for rows [m, m + rows) of the slice. */
static void rows_quantize(const struct transposed_panels *t, const struct backward_job *p,
                          int64_t m, int64_t rows) {
    const struct kernels *kern = kernels_get();
    int64_t padded = whole_blocks(p->n_outputs), blocks = padded / QK;
    for (int64_t i = 0; i < rows; i++) {
        const float *d = p->d + (m + i) * blocks;
        kern->multiply_to_int8(p->q + (m + i) * padded, t->q_scales, padded, t->q + i * padded);
        for (int64_t b = 0; b < blocks; b++) t->d[i * blocks + b] = d[b] * t->d_scales[b];
    }
}

/* Computes dX of the slice for units [begin, end) of inputs. */
static void backward_int8(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct backward_job *p = ctx;
    const struct matrix *w = p->w;
    const struct kernels *kern = kernels_get();
    const int group = layout_group(w->layout);
    int64_t padded = whole_blocks(p->n_outputs), first = p->first_output / PANEL,
            panels = (p->n_outputs + PANEL - 1) / PANEL;
    float row_scales[2 * PANEL];
    for (int i = 0; i < 2 * PANEL; i++) row_scales[i] = NF4_UNIT;
    struct transposed_panels t =
        transposed_panels_layout(scratch_of_thread(p, thread), w, padded, row_scales);
    for (int64_t u = begin; u < end; u++) {
        scales_gather(t.scales, w, u, p->first_output, p->n_outputs);
        kern->quantize_row16(t.scales, padded, t.q_scales, t.d_scales);
        panels_transpose(&t.unit, w, u, p->first_output, padded);
        for (int64_t m = 0; m < p->n_rows; m += INT8_ROWS) {
            struct gemm_input in = {.rows = MIN(p->n_rows - m, INT8_ROWS), .k = padded};
            in.q = t.q, in.d = t.d;
            if (u + 1 < end)
                panels_prefetch(w, u + 1, first + panels * m / p->n_rows,
                                first + panels * (m + in.rows) / p->n_rows);
            rows_quantize(&t, p, m, in.rows);
            (w->layout < LAYOUT_Q4 ? kern->gemm_q8 : kern->gemm_q4)(
                p->dx + (p->first_row + m) * p->lddx + u * group, p->lddx, &in, &t.unit, 0, group,
                p->add || w->mins || p->first_output > 0);
        }
    }
}

static void backward_int8_all(struct backward_job *p, struct pool *pool) {
    p->q = (int16_t *)(void *)p->scratch;
    p->scratch += shared_scratch(p->w->n);
    for (p->first_output = 0; p->first_output < p->w->n; p->first_output += OUTPUT_SLICE)
        for (p->first_row = 0; p->first_row < p->rows; p->first_row += TRANSPOSE_ROWS) {
            p->n_outputs = MIN(p->w->n - p->first_output, OUTPUT_SLICE);
            p->n_rows = MIN(p->rows - p->first_row, TRANSPOSE_ROWS);
            p->d = (float *)(void *)(p->q + p->n_rows * whole_blocks(p->n_outputs));
            pool_run(pool, grad_quantize_i16, p, p->n_rows, 8);
            pool_run(pool, backward_int8, p, p->w->k / layout_group(p->w->layout), 1);
        }
}

/* Items are blocks of 32 inputs. */
static void backward_tiles(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct backward_job *p = ctx;
    (void)thread;
    kernels_get()->gemm_tiles_backward(p->dx + p->first_row * p->lddx, p->lddx, &p->tiles, p->w,
                                       p->first_output, begin * QK, MIN(end * QK, p->w->k),
                                       p->add || p->first_output > 0);
}

static void backward_tiles_all(struct backward_job *p, struct pool *pool) {
    for (p->first_output = 0; p->first_output < p->w->n; p->first_output += OUTPUT_SLICE)
        for (p->first_row = 0; p->first_row < p->rows; p->first_row += TILE_ROWS) {
            p->tiles = (struct gemm_input){.rows = MIN(p->rows - p->first_row, TILE_ROWS),
                                           .k = MIN(p->w->n - p->first_output, OUTPUT_SLICE),
                                           .ldx = p->lddy,
                                           .x = p->dy + p->first_row * p->lddy + p->first_output,
                                           .tiles = (uint16_t *)(void *)p->scratch};
            gemm_input_pack_tiles(&p->tiles, pool);
            pool_run(pool, backward_tiles, p, (p->w->k + QK - 1) / QK, 1);
        }
}

void matrix_mul_backward_tiles(float *dx, int64_t lddx, const struct gemm_input *dy,
                               const struct matrix *w, bool add, struct pool *pool) {
    struct backward_job p = {
        .dx = dx, .lddx = lddx, .rows = dy->rows, .w = w, .add = add, .tiles = *dy};
    CHECK(dy->tiles && dy->k == w->n && matrix_uses_tiles(w, ROWS_TRAINING));
    pool_run(matrix_pool_for(pool, dy->rows, w->n, w->k), backward_tiles, &p, (w->k + QK - 1) / QK,
             1);
}

void matrix_mul_backward(float *dx, int64_t lddx, const float *dy, int64_t lddy, int64_t rows,
                         const struct matrix *w, enum grad_path path, bool add, void *scratch,
                         struct pool *pool) {
    const bool tiles = path == GRAD_TILES && matrix_uses_tiles(w, ROWS_TRAINING),
               int8 = path != GRAD_F32 && !tiles && matrix_needs_int8(w);
    if (w->layout == LAYOUT_ROW_MAJOR && !tiles) {
        gemm_nn_parallel(rows_dtype(w), dx, lddx, dy, lddy, 1, rows, w->data, w->k, w->n, w->k, add,
                         pool);
        return;
    }
    struct backward_job p = {.dx = dx,
                             .dy = dy,
                             .lddx = lddx,
                             .lddy = lddy,
                             .rows = rows,
                             .w = w,
                             .add = add,
                             .scratch = (char *)(((uintptr_t)scratch + 63) / 64 * 64),
                             .thread_bytes = thread_scratch(w->n)};
    struct pool *use = matrix_pool_for(pool, rows, w->n, w->k);
    if (int8 && w->mins) pool_run(use, backward_minima, &p, w->k / QK, 16);
    if (tiles)
        backward_tiles_all(&p, use);
    else if (int8)
        backward_int8_all(&p, use);
    else
        pool_run(use, backward_widened, &p, (w->k + QK - 1) / QK, TILE_INPUTS / QK);
}

/* Items are groups of 32 rows. */
static void pairs_range(void *ctx, int64_t begin, int64_t end, int thread) {
    (void)thread;
    for (int64_t i = begin; i < end; i++) kernels_get()->tiles_pack_pairs(ctx, i);
}

/* Items are groups of 32 outputs. */
static void weight_grad_range(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct weight_grad_job *j = ctx;
    (void)thread;
    kernels_get()->gemm_tiles_grad(j, begin * 32, MIN(end * 32, j->n));
}

size_t weight_grad_scratch(int64_t max_rows, int64_t max_k) {
    return 64 + (size_t)((max_rows + 31) / 32 * 32 * ((max_k + 15) / 16 * 16)) * sizeof(uint16_t);
}

void weight_grad_tiles(float *dw, const float *dy, int64_t n, const float *x, int64_t k,
                       int64_t rows, void *scratch, struct pool *pool) {
    uint16_t *pairs = (uint16_t *)(((uintptr_t)scratch + 63) / 64 * 64);
    struct weight_grad_job j = {dw, dy, x, rows, n, k, pairs};
    struct pool *use = matrix_pool_for(pool, rows, n, k);
    pool_run(use, pairs_range, &j, (rows + 31) / 32, 1);
    pool_run(use, weight_grad_range, &j, (n + 31) / 32, 1);
}
