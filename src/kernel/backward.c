/*
 * kernel/backward: products along the outputs of a weight matrix, dX = dY W, and over a pool the
 * plain sums of rows that the rest of a backward pass is made of.
 *
 * A matrix is packed for y = x Wᵀ only. Here its rows serve as they lie, or are widened a tile at a
 * time, or (quantised types, when the caller wants int8) one block of inputs is turned over: the
 * same numbers with quads along the outputs, one turn for all rows of dY. What differs from output
 * to output, the scale, goes into dY before it is quantised, so that the turned block has unit
 * scales and the forward slots multiply it. Nothing is allocated and no level is named.
 *
 * Invariant: a row of dX depends on its own row of dY only, and the sum of each of its values runs
 * over the outputs in one order, however rows and inputs are cut.
 */
#include <string.h>

#include "kernel/internal.h"

enum {
    BACK_ROWS = 32,    /* of dY that are quantised at once */
    BACK_SLICE = 4096, /* outputs that are summed before the next ones are added */
    TILE_OUTPUTS = 256,
    TILE_INPUTS = 64,
    MIN_BLOCKS = TILE_INPUTS, /* blocks of inputs whose minima are summed at once */
    MIN_ROWS = 128,
};

struct mixing {
    enum elem e;
    struct mix m;
    bool add;
};

/* Rows [m0, m1) and columns [c0, c1). */
static void mix_part(const struct mixing *p, int64_t m0, int64_t m1, int64_t c0, int64_t c1) {
    const struct mix *m = &p->m;
    float *y = m->y + m0 * m->ldy + c0;
    const char *v = (const char *)m->v + c0 * (int64_t)elem_size(p->e);
    size_t bytes = (size_t)(c1 - c0) * sizeof *y;
    for (int64_t i = 0; !p->add && i < m1 - m0; i++) memset(y + i * m->ldy, 0, bytes);
    rows_mix(p->e, y, m->ldy, m->t + m0 * m->tm, m->tm, m->tj, m1 - m0, v, m->ldv, m->k, c1 - c0);
}

static void mix_by_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct mixing *p = ctx;
    (void)thread;
    mix_part(p, begin, end, 0, p->m.n);
}

static void mix_by_columns(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct mixing *p = ctx;
    (void)thread;
    mix_part(p, 0, p->m.rows, begin, end);
}

void mix_pool(enum elem e, float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
              int64_t rows, const void *v, int64_t ldv, int64_t k, int64_t n, bool add,
              struct pool *pool) {
    struct mixing p = {e, {y, t, v, ldy, tm, tj, rows, ldv, k, n}, add};
    struct pool *use = pool_for(pool, rows, n, k);
    if (rows > n)
        pool_run(use, mix_by_rows, &p, rows, 48);
    else
        pool_run(use, mix_by_columns, &p, n, 64);
}

/* One product, and where the threads' scratch lies. */
struct back {
    float *dx;
    const float *dy;
    int64_t lddx, lddy, rows;
    const struct matrix *w;
    bool add;
    char *scratch;
    size_t each;
};

/* Of one thread, for slices of n outputs (a multiple of 32). */
struct turned {
    int8_t *q;         /* [BACK_ROWS][n]: dY times the scales, quantised */
    float *d;          /* [BACK_ROWS][n / 32] */
    float *by;         /* [n]: the scales of the block at hand */
    uint8_t *panels;   /* [2][n][16], in LAYOUT_Q4 and LAYOUT_NF4 half of that */
    float *ones;       /* [2][n / 32][16], in LAYOUT_Q6 [n / 16][16] */
    uint8_t *one_byte; /* LAYOUT_NF4: [2][n / 64 rounded up][16] */
};

static int64_t whole_blocks(int64_t n) {
    return (n + QK - 1) / QK * QK;
}

/* Per output: q, panels, then d (a 32nd of BACK_ROWS floats), by, ones and one_byte. */
enum { TURNED_BYTES = BACK_ROWS + 2 * PANEL + 4 * (BACK_ROWS / QK) + 4 + 4 + 1 };

static struct turned turned_layout(char *at, int64_t n) {
    struct turned t = {.q = (int8_t *)at};
    t.panels = (uint8_t *)at + BACK_ROWS * n;
    t.d = (float *)(void *)(t.panels + 2 * PANEL * n);
    t.by = t.d + BACK_ROWS / QK * n;
    t.ones = t.by + n;
    t.one_byte = (uint8_t *)(t.ones + n);
    return t;
}

size_t matrix_back_scratch(int64_t max_n) {
    size_t tile = TILE_OUTPUTS * TILE_INPUTS * sizeof(float);
    size_t turned = TURNED_BYTES * (size_t)MIN(whole_blocks(max_n), BACK_SLICE);
    return (MAX(tile, turned) + 127) / 64 * 64;
}

static char *scratch_of(const struct back *p, int thread) {
    uintptr_t at = (uintptr_t)p->scratch + (size_t)thread * p->each;
    return (char *)((at + 63) / 64 * 64);
}

/* Inputs [begin, end), in units of 32. */
static void back_widened(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct back *p = ctx;
    const struct matrix *w = p->w;
    float *tile = (float *)(void *)scratch_of(p, thread);
    for (int64_t k = begin * QK; k < MIN(end * QK, w->k); k += TILE_INPUTS) {
        int64_t some = MIN(MIN(end * QK, w->k) - k, TILE_INPUTS);
        for (int64_t o = 0; o < w->n; o += TILE_OUTPUTS) {
            int64_t n = MIN(w->n - o, TILE_OUTPUTS);
            for (int64_t i = 0; i < n; i++)
                matrix_row_part(w, o + i, k, k + some, tile + i * TILE_INPUTS);
            const struct mixing m = {
                ELEM_F32,
                {p->dx + k, p->dy + o, tile, p->lddx, p->lddy, 1, p->rows, TILE_INPUTS, n, some},
                p->add || o > 0};
            mix_part(&m, 0, p->rows, 0, some);
        }
    }
}

/* Numbers of types with minima are not negative. Rounding dY would cost twice as much with them as
 * with numbers around zero, so that half their range moves over to the minimum. */
static int centre(const struct matrix *w) {
    return !w->mins ? 0 : w->layout == LAYOUT_Q4 ? 8 : 16;
}

/* out[i][b]: the minima of outputs [o, o + n), blocks [b0, b0 + blocks), of centred numbers. */
static void minima_gather(float *out, const struct matrix *w, int64_t o, int64_t n, int64_t b0,
                          int64_t blocks) {
    int64_t stride = layout_scales(w->layout, w->k);
    for (int64_t i = 0; i < n; i++) {
        const float *scales = w->scales + (o + i) / PANEL * stride + (o + i) % PANEL;
        const float *mins = w->mins + (o + i) * (w->k / QK);
        for (int64_t b = 0; b < blocks; b++)
            out[i * MIN_BLOCKS + b] = mins[b0 + b] + (float)centre(w) * scales[(b0 + b) * PANEL];
    }
}

/* dX of every input of blocks [b0, b1) begins with, or is raised by, Σ_o dY[m][o] min[o][b]. */
static void back_minima(void *ctx, int64_t b0, int64_t b1, int thread) {
    const struct back *p = ctx;
    float *tile = (float *)(void *)scratch_of(p, thread);
    for (int64_t b = b0; b < b1; b += MIN_BLOCKS)
        for (int64_t m = 0; m < p->rows; m += MIN_ROWS) {
            float sum[MIN_ROWS * MIN_BLOCKS] = {0};
            int64_t rows = MIN(p->rows - m, MIN_ROWS), blocks = MIN(b1 - b, MIN_BLOCKS);
            for (int64_t o = 0; o < p->w->n; o += TILE_OUTPUTS) {
                int64_t n = MIN(p->w->n - o, TILE_OUTPUTS);
                minima_gather(tile, p->w, o, n, b, blocks);
                rows_mix(ELEM_F32, sum, MIN_BLOCKS, p->dy + m * p->lddy + o, p->lddy, 1, rows, tile,
                         MIN_BLOCKS, n, blocks);
            }
            for (int64_t i = 0; i < rows; i++)
                for (int64_t k = 0; k < blocks * QK; k++) {
                    float *to = p->dx + (m + i) * p->lddx + b * QK + k;
                    *to = (p->add ? *to : 0.0f) + sum[i * MIN_BLOCKS + k / QK];
                }
        }
}

/* The scales of unit u (a block's inputs under one scale) for outputs [o, o + n), zeros behind. */
static void scales_gather(float *by, const struct matrix *w, int64_t u, int64_t o, int64_t n) {
    int64_t stride = layout_scales(w->layout, w->k);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = (o + i) / PANEL * stride + (o + i) % PANEL;
        by[i] = w->layout == LAYOUT_NF4 ? (float)w->scale_bytes[at + u * QK / NF4_BLOCK * PANEL] *
                                              (w->row_scales[o + i] / NF4_UNIT)
                                        : w->scales[at + u * PANEL];
    }
    memset(by + n, 0, (size_t)(whole_blocks(n) - n) * sizeof *by);
}

/* Four quads of bytes, one word each: byte j of quad i becomes byte i of quad j. x holds quads 0
 * and 1, y 2 and 3. */
static void quads_turn(uint8_t *to, uint64_t x, uint64_t y) {
    const uint64_t odd = 0xff00ff00, low = 0x0000ffff0000ffff;
    uint64_t a = (x ^ x >> 24) & odd, b = (y ^ y >> 24) & odd;
    x ^= a ^ a << 24;
    y ^= b ^ b << 24;
    uint64_t c = (x >> 16 ^ y) & low;
    x ^= c << 16;
    y ^= c;
    memcpy(to, &x, sizeof x);
    memcpy(to + sizeof x, &y, sizeof y);
}

static uint64_t word_at(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* q - 16 of eight numbers in 0..31. */
static uint64_t bytes_centred(uint64_t q) {
    uint64_t x = q ^ 0x1010101010101010;
    return x | (x & 0x1010101010101010) * 0xe;
}

/* Sixteen outputs of an int8 unit. A panel of the source has quads of inputs under each output, the
 * turned ones quads of outputs under each input; `panel` bytes apart. */
static void bytes_turn(uint8_t *to, size_t panel, const uint8_t *from, int inputs, bool centred) {
    for (int p = 0; p < inputs / 4; p++)
        for (int q = 0; q < 4; q++) {
            const uint8_t *at = from + (p * PANEL + 4 * q) * 4;
            uint64_t x = word_at(at), y = word_at(at + 8);
            quads_turn(to + (size_t)(p / 4) * panel + (q * PANEL + p % 4 * 4) * 4,
                       centred ? bytes_centred(x) : x, centred ? bytes_centred(y) : y);
        }
}

/* The same of 32 outputs in nibbles: a low nibble is of inputs 0 to 15, and in the turned block of
 * outputs 0 to 15. */
static void nibbles_turn(uint8_t *to, size_t panel, const uint8_t *first, const uint8_t *second) {
    const uint64_t low = 0x0f0f0f0f0f0f0f0f;
    for (int p = 0; p < 4; p++)
        for (int q = 0; q < 4; q++) {
            int at = (p * PANEL + 4 * q) * 4, out = (q * PANEL + 4 * p) * 4;
            uint64_t a = word_at(first + at), b = word_at(first + at + 8);
            uint64_t c = second ? word_at(second + at) : 0,
                     d = second ? word_at(second + at + 8) : 0;
            quads_turn(to + out, (a & low) | (c & low) << 4, (b & low) | (d & low) << 4);
            quads_turn(to + panel + out, (a >> 4 & low) | (c & ~low), (b >> 4 & low) | (d & ~low));
        }
}

/* Unit u of outputs [o, o + n), n a multiple of 32 with what is missing as zeros. */
static void panels_turn(const struct turned *t, const struct matrix *w, int64_t u, int64_t o,
                        int64_t n) {
    int group = layout_group(w->layout), bytes = layout_bytes(w->layout);
    int64_t stride = w->k / group * bytes, end = (w->n + PANEL - 1) / PANEL;
    bool nibbles = w->layout >= LAYOUT_Q4;
    size_t panel = (size_t)n * PANEL / (nibbles ? 2 : 1);
    for (int64_t i = 0; i < n / PANEL; i++) {
        int64_t g = o / PANEL + i;
        const uint8_t *from = (const uint8_t *)w->data + g * stride + u * bytes;
        if (nibbles && i % 2 == 0)
            nibbles_turn(t->panels + i * bytes / 2, panel, from,
                         g + 1 < end ? from + stride : NULL);
        else if (!nibbles && g < end)
            bytes_turn(t->panels + i * PANEL * PANEL, panel, from, group, w->mins);
        else if (!nibbles)
            for (int h = 0; h < group / PANEL; h++)
                memset(t->panels + (size_t)h * panel + i * PANEL * PANEL, 0, PANEL * PANEL);
    }
}

/* q and d of dY[m][o…] times the scales; outputs that only fill the last block are zeros. */
static void rows_quantize(const struct turned *t, const struct back *p, int64_t m, int64_t rows,
                          int64_t o, int64_t n) {
    const struct kernels *kern = kernels_get();
    int64_t whole = n / QK * QK, padded = whole_blocks(n);
    for (int64_t i = 0; i < rows; i++) {
        const float *dy = p->dy + (m + i) * p->lddy + o;
        int8_t *q = t->q + i * padded;
        float *d = t->d + i * (padded / QK), tail[QK] = {0};
        kern->quantize_by(dy, t->by, whole, q, d);
        if (whole == n) continue;
        memcpy(tail, dy + whole, (size_t)(n - whole) * sizeof *tail);
        kern->quantize_by(tail, t->by + whole, QK, q + whole, d + whole / QK);
    }
}

/* Units [begin, end) of inputs. */
static void back_int8(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct back *p = ctx;
    const struct matrix *w = p->w;
    const struct kernels *kern = kernels_get();
    int group = layout_group(w->layout);
    float unit[2 * PANEL];
    int64_t most = MIN(whole_blocks(w->n), BACK_SLICE);
    struct turned t = turned_layout(scratch_of(p, thread), most);
    struct matrix turned = *w;
    turned.n = group;
    if (w->mins) turned.type = TENSOR_Q5_0, turned.zero = (int8_t)centre(w);
    turned.data = t.panels, turned.scales = t.ones, turned.scale_bytes = t.one_byte;
    turned.row_scales = unit;
    for (int i = 0; i < 2 * PANEL; i++) unit[i] = NF4_UNIT;
    for (int64_t i = 0; i < most; i++) t.ones[i] = 1.0f;
    memset(t.one_byte, 1, (size_t)most);
    for (int64_t u = begin; u < end; u++)
        for (int64_t o = 0; o < w->n; o += BACK_SLICE) {
            int64_t n = MIN(w->n - o, BACK_SLICE);
            turned.k = whole_blocks(n);
            scales_gather(t.by, w, u, o, n);
            panels_turn(&t, w, u, o, turned.k);
            for (int64_t m = 0; m < p->rows; m += BACK_ROWS) {
                struct inputs in = {.rows = MIN(p->rows - m, BACK_ROWS), .k = turned.k};
                in.q = t.q, in.d = t.d;
                rows_quantize(&t, p, m, in.rows, o, n);
                (w->layout < LAYOUT_Q4 ? kern->gemm_q8 : kern->gemm_q4)(
                    p->dx + m * p->lddx + u * group, p->lddx, &in, &turned, 0, group,
                    p->add || w->mins || o > 0);
            }
        }
}

void matrix_mul_back(float *dx, int64_t lddx, const float *dy, int64_t lddy, int64_t rows,
                     const struct matrix *w, bool int8, bool add, void *scratch,
                     struct pool *pool) {
    if (w->layout == LAYOUT_ROWS) {
        mix_pool(w->type == TENSOR_BF16 ? ELEM_BF16 : ELEM_F32, dx, lddx, dy, lddy, 1, rows,
                 w->data, w->k, w->n, w->k, add, pool);
        return;
    }
    struct back p = {.dx = dx,
                     .dy = dy,
                     .lddx = lddx,
                     .lddy = lddy,
                     .rows = rows,
                     .w = w,
                     .add = add,
                     .scratch = scratch,
                     .each = matrix_back_scratch(w->n)};
    struct pool *use = pool_for(pool, rows, w->n, w->k);
    int8 = int8 && matrix_int8(w);
    if (int8 && w->mins) pool_run(use, back_minima, &p, w->k / QK, 16);
    if (int8)
        pool_run(use, back_int8, &p, w->k / layout_group(w->layout), 1);
    else
        pool_run(use, back_widened, &p, (w->k + QK - 1) / QK, TILE_INPUTS / QK);
}
