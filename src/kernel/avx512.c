/*
 * avx512: the kernels that are faster with 512-bit registers, for processors with AVX-512 F, BW,
 * VL, DQ and VNNI.
 *
 * A zmm register holds the 16 lanes of a dot product of the exact class, so each output has one
 * accumulator, and the fixed tree is computed for eight outputs at once. In packed products the
 * lanes are the panel's 16 outputs instead, and no sum runs across lanes. Slots that would not be
 * faster keep the AVX2 functions.
 *
 * Invariant: every slot gives the bits of scalar.c, and no result depends on the division of rows
 * or outputs. This file never queries the processor and never allocates.
 * test/kernel/test_emulated.c runs this source with emulated instructions.
 */
#include <math.h>
#include <string.h>

#include "kernel/avx512.h"

enum {
    TILE_ROWS = 3, /* 3 × 8 accumulators, 3 inputs and 1 weight fill 28 of the 32 registers */
    TILE_COLS = 8,
    ROW_BLOCK = 48, /* rows that are multiplied with 8 rows of weights, which stay in L1 */
};

/* acc[r][c] += x[r] * w[c] for the 16 values from i on, lane by lane. */
INLINE void tile_step(__m512 acc[TILE_ROWS][TILE_COLS], const float *x, int64_t ldx, const void *w,
                      int64_t ldw, int64_t i, __mmask16 mask, bool whole, int rows, int cols,
                      enum dtype e) {
    __m512 xs[TILE_ROWS];
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++) {
        xs[r] =
            whole ? _mm512_loadu_ps(x + r * ldx + i) : _mm512_maskz_loadu_ps(mask, x + r * ldx + i);
    }
#pragma GCC unroll 8
    for (int c = 0; c < cols; c++) {
        __m512 ws = weights_load(w, c * ldw + i, mask, whole, e);
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) acc[r][c] = _mm512_fmadd_ps(xs[r], ws, acc[r][c]);
    }
}

/* Adds lanes l and l + 8 of two accumulators: the low half of the result belongs to a, the high
 * half to b. */
INLINE __m512 fold_8(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}

/* Adds lanes l and l + 4 of four accumulators, after fold_8: each quarter of the result belongs to
 * one accumulator, in order. */
INLINE __m512 fold_4(__m512 ab, __m512 cd) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
}

/* The rest of the tree, over the eight lanes of each half of four vectors: element c of the result
 * is the sum of half c % 2 of vector c / 2. */
INLINE __m256 halves_sum8(__m512 ab, __m512 cd, __m512 ef, __m512 gh) {
    __m512 lo = fold_4(ab, cd), hi = fold_4(ef, gh);
    __m512 two = _mm512_add_ps(_mm512_shuffle_ps(lo, hi, 0x44), _mm512_shuffle_ps(lo, hi, 0xEE));
    __m512 one =
        _mm512_add_ps(_mm512_shuffle_ps(two, two, 0x88), _mm512_shuffle_ps(two, two, 0xDD));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, one));
}

/* The fixed tree over eight accumulators: element c of the result is the sum of v[c]'s lanes. */
INLINE __m256 lanes_sum8(const __m512 *v) {
    return halves_sum8(fold_8(v[0], v[1]), fold_8(v[2], v[3]), fold_8(v[4], v[5]),
                       fold_8(v[6], v[7]));
}

/* The same tree over one accumulator. */
INLINE float lanes_sum(__m512 v) {
    __m512 four = fold_4(fold_8(v, v), fold_8(v, v));
    __m512 two = _mm512_add_ps(four, _mm512_shuffle_ps(four, four, 0xEE));
    return _mm512_cvtss_f32(_mm512_add_ps(two, _mm512_shuffle_ps(two, two, 0x55)));
}

/* y[r][c] (+)= x[r]·w[c] for rows × cols outputs; `rows` and `cols` are constants where this is
 * inlined. `ahead` (may be NULL): see STREAM_AHEAD. */
INLINE void tile_mul(float *y, int64_t ldy, const float *x, int64_t ldx, const void *w, int64_t ldw,
                     int64_t k, int rows, int cols, enum dtype e, bool add, const char *ahead) {
    __m512 acc[TILE_ROWS][TILE_COLS];
#pragma GCC unroll 3
    for (int r = 0; r < TILE_ROWS; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < TILE_COLS; c++) acc[r][c] = _mm512_setzero_ps();
    }
    int64_t i = 0;
    for (; i + 16 <= k; i += 16) {
        if (ahead)
#pragma GCC unroll 8
            for (int c = 0; c < 16 * cols * elem_bytes(e); c += 64, ahead += 64)
                __builtin_prefetch(ahead);
        tile_step(acc, x, ldx, w, ldw, i, 0xFFFF, true, rows, cols, e);
    }
    if (i < k) tile_step(acc, x, ldx, w, ldw, i, lanes_mask(k - i), false, rows, cols, e);
    const __mmask8 out = (__mmask8)((1u << cols) - 1);
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++) {
        float *dst = y + r * ldy;
        __m256 sums = lanes_sum8(acc[r]);
        if (add) sums = _mm256_add_ps(_mm256_maskz_loadu_ps(out, dst), sums);
        _mm256_mask_storeu_ps(dst, out, sums);
    }
}

/* One function for each shape of tile: y[r][c] (+)= x[r]·w[c]. The functions are not inlined into
 * one, because the compiler's time grows faster than the size of a function. */
typedef void (*tile_fn)(float *y, int64_t ldy, const float *x, int64_t ldx, const void *w,
                        int64_t ldw, int64_t k, bool add, const char *ahead);
#define TILE(name, rows, cols, e)                                                                  \
    static __attribute__((noinline)) void name(float *y, int64_t ldy, const float *x, int64_t ldx, \
                                               const void *w, int64_t ldw, int64_t k, bool add,    \
                                               const char *ahead) {                                \
        tile_mul(y, ldy, x, ldx, w, ldw, k, rows, cols, e, add, ahead);                            \
    }
#define TILES(kind, rows, e)                                                                       \
    TILE(kind##_##rows##x1, rows, 1, e)                                                            \
    TILE(kind##_##rows##x4, rows, 4, e)                                                            \
    TILE(kind##_##rows##x8, rows, 8, e)

TILES(f32, 1, DTYPE_F32)
TILES(f32, 2, DTYPE_F32)
TILES(f32, 3, DTYPE_F32)
TILES(bf16, 1, DTYPE_BF16)
TILES(bf16, 2, DTYPE_BF16)
TILES(bf16, 3, DTYPE_BF16)
TILES(f16, 1, DTYPE_F16)
TILES(f16, 2, DTYPE_F16)
TILES(f16, 3, DTYPE_F16)
TILES(i8, 1, DTYPE_I8)
TILES(i8, 2, DTYPE_I8)
TILES(i8, 3, DTYPE_I8)

/* [dtype][rows - 1][0, 1, 2: 1, 4, 8 outputs] */
static const tile_fn tile_fns[N_DTYPE][TILE_ROWS][3] = {
    [DTYPE_F32] = {{f32_1x1, f32_1x4, f32_1x8},
                   {f32_2x1, f32_2x4, f32_2x8},
                   {f32_3x1, f32_3x4, f32_3x8}},
    [DTYPE_BF16] = {{bf16_1x1, bf16_1x4, bf16_1x8},
                    {bf16_2x1, bf16_2x4, bf16_2x8},
                    {bf16_3x1, bf16_3x4, bf16_3x8}},
    [DTYPE_F16] = {{f16_1x1, f16_1x4, f16_1x8},
                   {f16_2x1, f16_2x4, f16_2x8},
                   {f16_3x1, f16_3x4, f16_3x8}},
    [DTYPE_I8] = {{i8_1x1, i8_1x4, i8_1x8}, {i8_2x1, i8_2x4, i8_2x8}, {i8_3x1, i8_3x4, i8_3x8}},
};

/* Multiplies blocks of ROW_BLOCK rows, in each block 8 outputs at a time; the remaining outputs are
 * computed 4 at a time, then one at a time. A single row of x is multiplied with one long row of
 * weights after the other, which is one stream in memory; more rows read 8 rows of weights side by
 * side, so the first tile prefetches in the order of addresses (STREAM_AHEAD). */
INLINE void rows_mul(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     const void *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, enum dtype e,
                     bool add) {
    const int64_t size = elem_bytes(e);
    const bool is_long = k * size >= STREAM_ROW, single = rows == 1 && is_long;
    for (int64_t begin = 0; begin < rows; begin += ROW_BLOCK) {
        const int64_t end = MIN(rows, begin + ROW_BLOCK);
        for (int64_t n = n0, cols; n < n1; n += cols) {
            const int shape = single ? 0 : n1 - n >= 8 ? 2 : n1 - n >= 4 ? 1 : 0;
            const char *wn = (const char *)w + n * ldw * size;
            cols = shape == 2 ? 8 : shape == 1 ? 4 : 1;
            for (int64_t m = begin; m < end; m += TILE_ROWS) {
                const tile_fn mul = tile_fns[e][MIN(end - m, TILE_ROWS) - 1][shape];
                mul(y + m * ldy + n, ldy, x + m * ldx, ldx, wn, ldw, k, add,
                    m == 0 && is_long && !single ? wn + STREAM_AHEAD : NULL);
            }
        }
    }
}

static void avx512_gemm_f32(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                            const float *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1,
                            bool add) {
    rows_mul(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, DTYPE_F32, add);
}

static void avx512_gemm_bf16(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                             const uint16_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1,
                             bool add) {
    rows_mul(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, DTYPE_BF16, add);
}

static void avx512_gemm_f16(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                            const uint16_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1,
                            bool add) {
    rows_mul(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, DTYPE_F16, add);
}

static void avx512_gemm_i8(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                           const int8_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1,
                           bool add) {
    rows_mul(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, DTYPE_I8, add);
}

/*
 * The VNNI instructions multiply unsigned by signed bytes. Weights become unsigned by an offset
 * (int8: w + 128, that is w ^ 0x80; q4: the nibble itself is w + zero; nf4: a table of codes +
 * 128), so a block's dot is Σ (w + offset) x - offset Σ x, exact in 32 bits. The term -offset Σ x,
 * the correction, is the start value of the integer accumulator; it is computed once for all
 * panels.
 */
enum {
    Q_ROWS = 4, /* 4 rows × 2 panels: 8 integer and 8 float accumulators */
    Q_PANELS = 2,
    Q_FEW_ROWS = 8,   /* so few rows wait for memory */
    Q_ROW_BLOCK = 32, /* rows whose corrections are on the stack at a time */
    Q_BLOCKS = 256,   /* blocks of these rows: 32 KiB together */
};

struct q_product {
    float *y;
    int64_t ldy;
    const struct gemm_input *in;
    const struct matrix *w;
    int64_t blocks; /* K / layout_group */
    bool add;
    bool one_stream; /* few rows are multiplied with one panel at a time */
};

/* The offset that makes the weights unsigned. */
static int32_t offset_of(const struct matrix *w) {
    return w->layout == LAYOUT_NF4 ? NF4_OFFSET : w->layout >= LAYOUT_Q4 ? w->zero : 128;
}

INLINE __m512 add_integers(__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

/* The sums of 256 bytes in groups, times the offset: 16 sums of 16 bytes, or 8 sums of 32 bytes in
 * the first 8 lanes. 32-bit words are shuffled as floats. */
INLINE __m512i groups_sum(const int8_t *x, int32_t offset, int group) {
    __m512 v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        v[i] = _mm512_castsi512_ps(_mm512_dpbusd_epi32(
            _mm512_set1_epi32(0), _mm512_set1_epi8((char)offset), _mm512_loadu_si512(x + 64 * i)));
    const __m512 a = add_integers(_mm512_shuffle_ps(v[0], v[1], 0x44),
                                  _mm512_shuffle_ps(v[0], v[1], 0xEE)),
                 b = add_integers(_mm512_shuffle_ps(v[2], v[3], 0x44),
                                  _mm512_shuffle_ps(v[2], v[3], 0xEE));
    // word i of quarter q: the 16 bytes of quarter q of vector i
    __m512 sums = add_integers(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
    __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    if (group == QK) {
        sums = add_integers(_mm512_shuffle_f32x4(sums, sums, 0x88),
                            _mm512_shuffle_f32x4(sums, sums, 0xDD));
        order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 0, 0, 0, 0, 0, 0, 0, 0);
    }
    return _mm512_castps_si512(_mm512_permutexvar_ps(order, sums));
}

/* correction[b] = -offset · q_sum[b] for `blocks` blocks; also writes the elements up to the next
 * multiple of 16. */
static void corrections_scale(int32_t *correction, const int32_t *q_sum, int32_t offset,
                              int64_t blocks) {
    const __m512i by = _mm512_set1_epi32(-offset);
    for (int64_t b = 0; b < blocks; b += 16) {
        const __m512 sums = _mm512_maskz_loadu_ps(lanes_mask(blocks - b), q_sum + b);
        _mm512_storeu_si512(correction + b, _mm512_mullo_epi32(_mm512_castps_si512(sums), by));
    }
}

/* correction[b] = -offset · Σ q over block b, for `blocks` blocks; also writes the elements up to
 * the next multiple of 256 / group. */
static void corrections_sum(int32_t *correction, const int8_t *q, int32_t offset, int64_t blocks,
                            int group) {
    const int64_t blocks_per_step = 256 / group;
    for (int64_t b = 0; b < blocks; b += blocks_per_step) {
        int8_t tail[256] = {0};
        const bool whole = b + blocks_per_step <= blocks;
        if (!whole) memcpy(tail, q + b * group, (size_t)((blocks - b) * group));
        const __m512i sums = groups_sum(whole ? q + b * group : tail, offset, group);
        _mm512_mask_storeu_ps(correction + b, lanes_mask(blocks_per_step),
                              _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(0), sums)));
    }
}

/* Sets the corrections of rows [m0, m0 + rows) and blocks [b0, b1). */
static void corrections_fill(int32_t correction[Q_ROW_BLOCK][Q_BLOCKS], const struct q_product *p,
                             int64_t m0, int64_t rows, int64_t b0, int64_t b1) {
    const int group = layout_group(p->w->layout);
    const int32_t offset = offset_of(p->w);
    const struct gemm_input *in = p->in;
    for (int64_t m = m0; m < m0 + rows; m++) {
        if (in->q_sum && group == QK)
            corrections_scale(correction[m - m0], in->q_sum + m * p->blocks + b0, offset, b1 - b0);
        else
            corrections_sum(correction[m - m0], in->q + m * in->k + b0 * group, offset, b1 - b0,
                            group);
    }
}

/* Loads quad p of the first half (lo) and of the second half (hi) of a panel's block, as unsigned
 * bytes. */
INLINE void quads_load(const uint8_t *block, int p, enum matrix_layout l, __m512i *lo,
                       __m512i *hi) {
    __m512i raw = _mm512_loadu_si512(block + 64 * p);
    if (l < LAYOUT_Q4) {
        const __m512i sign = _mm512_set1_epi8((char)0x80);
        const int half = layout_group(l) / 8; /* quads in half a block */
        *lo = _mm512_xor_si512(raw, sign);
        *hi = _mm512_xor_si512(_mm512_loadu_si512(block + 64 * (p + half)), sign);
        return;
    }
    const __m512i nibble = _mm512_set1_epi8(15);
    *lo = _mm512_and_si512(raw, nibble);
    *hi = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
    if (l == LAYOUT_NF4) {
        const __m512i codes = _mm512_xor_si512(
            _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)nf4_codes)),
            _mm512_set1_epi8((char)NF4_OFFSET));
        *lo = _mm512_shuffle_epi8(codes, *lo);
        *hi = _mm512_shuffle_epi8(codes, *hi);
    }
}

/* Broadcasts four bytes to every lane. */
INLINE __m512i quad_spread(const void *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}

/* dots[r][j] += the dot of one block of row r and panel j. x is [rows][K]; panels are `stride`
 * bytes apart. */
INLINE void block_dots(__m512i dots[Q_ROWS][Q_PANELS], const uint8_t *w, int64_t stride,
                       const int8_t *x, int64_t k, int rows, int panels, enum matrix_layout l) {
    const int half = layout_group(l) / 2;
#pragma GCC unroll 4
    for (int p = 0; p < half / 4; p++) {
        __m512i lo[Q_PANELS], hi[Q_PANELS];
#pragma GCC unroll 2
        for (int j = 0; j < panels; j++) quads_load(w + j * stride, p, l, &lo[j], &hi[j]);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const __m512i a = quad_spread(x + r * k + 4 * p),
                          b = quad_spread(x + r * k + half + 4 * p);
#pragma GCC unroll 2
            for (int j = 0; j < panels; j++) {
                dots[r][j] =
                    _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(dots[r][j], lo[j], a), hi[j], b);
            }
        }
    }
}

/* Rows, two panels at most, and the inputs of a run of blocks. */
struct panels_job {
    const int8_t *x; /* [rows][k] */
    const float *dx; /* [rows][k / 32] */
    const int32_t (*correction)[Q_BLOCKS];
    int64_t k, stride; /* from one panel to the next */
    int32_t head_bytes;
};

/* acc[r][j] = fma(dot, scale, acc[r][j]) for group i of a record, block b of the run. */
INLINE void group_run(__m512 acc[Q_ROWS][Q_PANELS], const struct panels_job *p,
                      const uint8_t *record, int64_t i, int64_t b, int rows, int panels,
                      enum matrix_layout l) {
    const int group = layout_group(l);
    __m512i dots[Q_ROWS][Q_PANELS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int j = 0; j < panels; j++) dots[r][j] = _mm512_set1_epi32(p->correction[r][b]);
    }
    block_dots(dots, record + p->head_bytes + i * layout_bytes(l), p->stride, p->x + b * group,
               p->k, rows, panels, l);
#pragma GCC unroll 2
    for (int j = 0; j < panels; j++) {
        const __m512 scale = record_scales(record + j * p->stride, i, l);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const __m512 both =
                _mm512_mul_ps(scale, _mm512_set1_ps(p->dx[r * (p->k / QK) + b * group / QK]));
            acc[r][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][j]), both, acc[r][j]);
        }
    }
}

/* Continues the sums part[r][j] of row m + r and panel `panel` + j over blocks [b0, b1). b0 is the
 * first block of a record. */
INLINE void panels_run(float part[Q_ROWS][Q_PANELS][16], const struct q_product *p, int64_t panel,
                       int64_t m, const int32_t (*correction)[Q_BLOCKS], int64_t b0, int64_t b1,
                       int rows, int panels, enum matrix_layout l) {
    const int per_record = record_groups(l);
    const int64_t k = p->in->k, count = b1 - b0, record_bytes = p->w->record_bytes;
    const struct panels_job job = {.x = p->in->q + m * k + b0 * layout_group(l),
                                   .dx = p->in->d + (m * k + b0 * layout_group(l)) / QK,
                                   .correction = correction,
                                   .k = k,
                                   .stride = p->w->panel_bytes,
                                   .head_bytes = p->w->head_bytes};
    __m512 acc[Q_ROWS][Q_PANELS];
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < panels; j++)
            acc[r][j] = b0 ? _mm512_loadu_ps(part[r][j]) : _mm512_setzero_ps();
    }
    const uint8_t *record = record_at(p->w, panel, b0);
    int64_t b = 0;
    for (; b + per_record <= count; b += per_record, record += record_bytes) {
#pragma GCC unroll 2
        for (int i = 0; i < per_record; i++)
            group_run(acc, &job, record, i, b + i, rows, panels, l);
    }
    for (int i = 0; b < count; i++, b++) group_run(acc, &job, record, i, b, rows, panels, l);
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < panels; j++) _mm512_storeu_ps(part[r][j], acc[r][j]);
    }
}

/* One function for each number of rows and panels; the arguments are those of panels_run. */
typedef void (*panels_fn)(float part[Q_ROWS][Q_PANELS][16], const struct q_product *p,
                          int64_t panel, int64_t m, const int32_t (*correction)[Q_BLOCKS],
                          int64_t b0, int64_t b1);
#define PANELS(name, rows, panels, layout)                                                         \
    static __attribute__((noinline)) void name(                                                    \
        float part[Q_ROWS][Q_PANELS][16], const struct q_product *p, int64_t panel, int64_t m,     \
        const int32_t(*correction)[Q_BLOCKS], int64_t b0, int64_t b1) {                            \
        panels_run(part, p, panel, m, correction, b0, b1, rows, panels, layout);                   \
    }
#define PANEL_KIND(kind, layout)                                                                   \
    PANELS(kind##_1x1, 1, 1, layout)                                                               \
    PANELS(kind##_1x2, 1, 2, layout)                                                               \
    PANELS(kind##_2x1, 2, 1, layout)                                                               \
    PANELS(kind##_2x2, 2, 2, layout)                                                               \
    PANELS(kind##_4x1, 4, 1, layout)                                                               \
    PANELS(kind##_4x2, 4, 2, layout)

PANEL_KIND(q8, LAYOUT_Q8)
PANEL_KIND(q8_k, LAYOUT_Q8_K)
PANEL_KIND(q6, LAYOUT_Q6)
PANEL_KIND(q4, LAYOUT_Q4)
PANEL_KIND(q4_k, LAYOUT_Q4_K)
PANEL_KIND(nf4, LAYOUT_NF4)

/* [layout - LAYOUT_Q8][0, 1, 2: 1, 2, 4 rows][panels - 1] */
static const panels_fn panels_fns[6][3][Q_PANELS] = {
    {{q8_1x1, q8_1x2}, {q8_2x1, q8_2x2}, {q8_4x1, q8_4x2}},
    {{q8_k_1x1, q8_k_1x2}, {q8_k_2x1, q8_k_2x2}, {q8_k_4x1, q8_k_4x2}},
    {{q6_1x1, q6_1x2}, {q6_2x1, q6_2x2}, {q6_4x1, q6_4x2}},
    {{q4_1x1, q4_1x2}, {q4_2x1, q4_2x2}, {q4_4x1, q4_4x2}},
    {{q4_k_1x1, q4_k_1x2}, {q4_k_2x1, q4_k_2x2}, {q4_k_4x1, q4_k_4x2}},
    {{nf4_1x1, nf4_1x2}, {nf4_2x1, nf4_2x2}, {nf4_4x1, nf4_4x2}},
};

/* Stores the sums of `rows` rows and `panels` panels to y, except outputs from n1 on. */
static void part_store(const struct q_product *p, float part[Q_ROWS][Q_PANELS][16], int64_t panel,
                       int64_t m, int64_t n1, int rows, int panels) {
    for (int j = 0; j < panels; j++) {
        const int64_t n = (panel + j) * 16;
        const __mmask16 mask = lanes_mask(n1 - n);
        for (int r = 0; r < rows; r++) {
            float *dst = p->y + (m + r) * p->ldy + n;
            __m512 sums = _mm512_loadu_ps(part[r][j]);
            if (p->w->layout == LAYOUT_NF4)
                sums = _mm512_mul_ps(sums, _mm512_div_ps(_mm512_loadu_ps(p->w->row_scales + n),
                                                         _mm512_set1_ps(NF4_UNIT)));
            if (p->add) sums = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, dst), sums);
            _mm512_mask_storeu_ps(dst, mask, sums);
        }
    }
}

/* Rows m0 … m0 + rows (at most Q_ROW_BLOCK) times all panels. */
static void q_rows_mul(const struct q_product *p, int64_t m0, int64_t rows, int64_t n0,
                       int64_t n1) {
    int32_t correction[Q_ROW_BLOCK][Q_BLOCKS];
    const int64_t end = (n1 + 15) / 16;
    int64_t filled = -1; /* the first block that `correction` describes */
    for (int64_t panel = n0 / 16, panels; panel < end; panel += panels) {
        panels = end - panel < 2 || (p->one_stream && rows <= Q_FEW_ROWS) ? 1 : 2;
        float part[Q_ROW_BLOCK][Q_PANELS][16];
        for (int64_t m = 0; m < rows; m++)
            for (int j = 0; j < panels; j++)
                __builtin_prefetch(p->y + (m0 + m) * p->ldy + (panel + j) * PANEL, 1);
        for (int64_t b0 = 0; b0 < p->blocks; b0 += Q_BLOCKS) {
            const int64_t b1 = MIN(p->blocks, b0 + Q_BLOCKS);
            if (filled != b0) corrections_fill(correction, p, m0, rows, b0, b1);
            filled = b0;
            for (int64_t m = 0, step; m < rows; m += step) {
                step = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
                const panels_fn run = panels_fns[p->w->layout - LAYOUT_Q8][step / 2][panels - 1];
                run(part + m, p, panel, m0 + m, (const int32_t(*)[Q_BLOCKS])correction + m, b0, b1);
                if (b0 == 0) prefetch_step(p->in->prefetch);
            }
        }
        part_store(p, part, panel, m0, n1, (int)rows, (int)panels);
    }
}

static void q_mul(const struct q_product *p, int64_t n0, int64_t n1) {
    prefetch_begin(p->in->prefetch, ((n1 - n0 + 31) / 32) * ((p->in->rows + Q_ROWS - 1) / Q_ROWS));
    for (int64_t m = 0; m < p->in->rows; m += Q_ROW_BLOCK)
        q_rows_mul(p, m, MIN(p->in->rows - m, Q_ROW_BLOCK), n0, n1);
}

/* Few rows wait for memory. A Zen 4 core is fastest with one stream of weights. */
static void avx512_gemm_q(float *y, int64_t ldy, const struct gemm_input *in,
                          const struct matrix *w, int64_t n0, int64_t n1, bool add) {
    const struct q_product p = {y, ldy, in, w, in->k / layout_group(w->layout), add, true};
    q_mul(&p, n0, n1);
}

void avx512_gemm_q_two_streams(float *y, int64_t ldy, const struct gemm_input *in,
                               const struct matrix *w, int64_t n0, int64_t n1, bool add) {
    const struct q_product p = {y, ldy, in, w, in->k / layout_group(w->layout), add, false};
    q_mul(&p, n0, n1);
}

static void mins_read(float *mins, const uint8_t *record, int g, enum matrix_layout l) {
    _mm512_storeu_ps(mins, record_mins(record, g, l));
}

enum {
    MINS_ROWS = 4,       /* rows for which a vector of minima is loaded once */
    MINS_ROW_BLOCK = 64, /* rows whose outputs and sums remain in the caches between two panels */
    MINS_AHEAD = 8,      /* distance of prefetches of outputs, in rows */
};

/* lanes[i][r] += the sums of row r times the minima of blocks l, l + 16, …, where l is first,
 * first + 8, first + 4, first + 12 for i = 0 to 3. n is a multiple of 16. */
INLINE void mins_lanes(__m512 lanes[4][MINS_ROWS], const float *sum, int64_t ld,
                       const float (*mins)[PANEL], int64_t n, int rows, int first) {
    for (int64_t b = first; b < n; b += 16)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int64_t at = b + i % 2 * 8 + i / 2 * 4;
            const __m512 min = _mm512_loadu_ps(mins[at]);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                lanes[i][r] = _mm512_fmadd_ps(_mm512_set1_ps(sum[r * ld + at]), min, lanes[i][r]);
        }
}

/* quarter[r] = four of the sixteen lanes of row r's dot, added in the order of gemm_f32. If K is so
 * long that the minima of a panel are not widened at once, they are widened here. */
INLINE void mins_quarter(__m512 quarter[MINS_ROWS], const float *sum, const float *tail,
                         const struct matrix *w, int64_t panel, float (*mins)[PANEL], int rows,
                         int first) {
    const int64_t blocks = w->k / QK;
    __m512 lanes[4][MINS_ROWS];
    for (int i = 0; i < 4; i++)
        for (int r = 0; r < rows; r++) lanes[i][r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b += MINS_BLOCKS) {
        const int64_t n = MIN(blocks - b, MINS_BLOCKS), whole = n / 16 * 16;
        if (blocks > MINS_BLOCKS) mins_widen_with(mins_read, mins, w, panel, b, n);
        mins_lanes(lanes, sum + b, blocks, (const float(*)[PANEL])mins, whole, rows, first);
        if (whole < n)
            mins_lanes(lanes, tail, 16, (const float(*)[PANEL])mins + whole, 16, rows, first);
    }
    for (int r = 0; r < rows; r++)
        quarter[r] = _mm512_add_ps(_mm512_add_ps(lanes[0][r], lanes[1][r]),
                                   _mm512_add_ps(lanes[2][r], lanes[3][r]));
}

/* Adds to 16 outputs of each of `rows` rows the dot of the row's sums and the minima, by the rule
 * of gemm_f32: its lanes are sixteen vectors, and the last step is padded with zeros. */
INLINE void mins_add(float *dst, int64_t ldy, __mmask16 mask, const float *sum,
                     const struct matrix *w, int64_t panel, float (*mins)[PANEL], int rows) {
    const int64_t blocks = w->k / QK, whole = blocks / 16 * 16;
    float tail[MINS_ROWS][16] = {0};
    __m512 quarter[4][MINS_ROWS];
    for (int r = 0; r < rows && whole < blocks; r++)
        memcpy(tail[r], sum + r * blocks + whole, (size_t)(blocks - whole) * sizeof **tail);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) mins_quarter(quarter[i], sum, tail[0], w, panel, mins, rows, i);
    for (int r = 0; r < rows; r++, dst += ldy) {
        const __m512 dot = _mm512_add_ps(_mm512_add_ps(quarter[0][r], quarter[2][r]),
                                         _mm512_add_ps(quarter[1][r], quarter[3][r]));
        _mm512_mask_storeu_ps(dst, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, dst), dot));
    }
}

#define MINS_ADD(rows)                                                                             \
    static __attribute__((noinline)) void mins_add_##rows(                                         \
        float *dst, int64_t ldy, __mmask16 mask, const float *sum, const struct matrix *w,         \
        int64_t panel, float(*mins)[PANEL]) {                                                      \
        mins_add(dst, ldy, mask, sum, w, panel, mins, rows);                                       \
    }
MINS_ADD(1)
MINS_ADD(4)

/* The outputs of a panel are read at a stride of N floats, mostly a multiple of the page size: they
 * come from an outer cache, and without prefetches waiting for them takes longer than the sums. */
static void panel_mins_add(float *y, int64_t ldy, __mmask16 mask, const float *sum, int64_t rows,
                           const struct matrix *w, int64_t panel) {
    const int64_t blocks = w->k / QK;
    float mins[MINS_BLOCKS][PANEL];
    int64_t m = 0;
    if (blocks <= MINS_BLOCKS) mins_widen_with(mins_read, mins, w, panel, 0, blocks);
    for (; m + MINS_ROWS <= rows; m += MINS_ROWS) {
        for (int64_t r = m + MINS_AHEAD; r < MIN(rows, m + MINS_AHEAD + MINS_ROWS); r++)
            __builtin_prefetch(y + r * ldy, 1);
        mins_add_4(y + m * ldy, ldy, mask, sum + m * blocks, w, panel, mins);
    }
    for (; m < rows; m++) mins_add_1(y + m * ldy, ldy, mask, sum + m * blocks, w, panel, mins);
}

static void avx512_gemm_mins(float *y, int64_t ldy, const struct gemm_input *in,
                             const struct matrix *w, int64_t n0, int64_t n1) {
    for (int64_t m = 0; m < in->rows; m += MINS_ROW_BLOCK)
        for (int64_t n = n0; n < n1; n += PANEL)
            panel_mins_add(y + m * ldy + n, ldy, lanes_mask(n1 - n), in->sum + m * (w->k / QK),
                           MIN(in->rows - m, MINS_ROW_BLOCK), w, n / PANEL);
}

/* 32 int8 weights of row a, then 32 of row b, as unsigned bytes. */
INLINE __m512i halves_load(const int8_t *a, const int8_t *b) {
    const __m256i lo = _mm256_loadu_si256((const __m256i *)(const void *)a),
                  hi = _mm256_loadu_si256((const __m256i *)(const void *)b);
    return _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1),
                            _mm512_set1_epi8((char)0x80));
}

enum {
    GEMM_I8_I8_ROWS = 4,
    GEMM_I8_I8_PAIRS = 4
}; /* rows of x and pairs of rows of w in a tile; a pair's vector has 8 lanes for each row of w */

/* gemm_i8_i8 for `rows` rows of x from m on and `cols` rows of w. The halves of a vector are two
 * rows of w; if cols is 1, both halves are the same row. */
INLINE void gemm_i8_i8_tile(float *y, int64_t ldy, const struct gemm_input *in, int64_t m,
                            const int8_t *w, int64_t ldw, int cols, int rows, int pairs) {
    const int64_t k = in->k, blocks = k / QK;
    const int8_t *q = in->q + m * k;
    const float *d = in->d + m * blocks;
    const int64_t next = cols > 1 ? ldw : 0;
    __m512 acc[GEMM_I8_I8_ROWS][GEMM_I8_I8_PAIRS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < pairs; p++) acc[r][p] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < blocks; b++) {
        __m512i x[GEMM_I8_I8_ROWS], correction[GEMM_I8_I8_ROWS], zero = _mm512_set1_epi32(0);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            x[r] = _mm512_broadcast_i64x4(
                _mm256_loadu_si256((const __m256i *)(const void *)(q + r * k + b * QK)));
            correction[r] = _mm512_sub_epi32(
                zero, _mm512_dpbusd_epi32(zero, _mm512_set1_epi8((char)0x80), x[r]));
        }
#pragma GCC unroll 4
        for (int p = 0; p < pairs; p++) {
            const int8_t *at = w + 2 * p * ldw + b * QK;
            const __m512i u = halves_load(at, at + next);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                acc[r][p] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(correction[r], u, x[r])),
                                    _mm512_set1_ps(d[r * blocks + b]), acc[r][p]);
        }
    }
    const __mmask8 out = (__mmask8)((1u << cols) - 1);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const int last = pairs - 1;
        _mm256_mask_storeu_ps(
            y + (m + r) * ldy, out,
            halves_sum8(acc[r][0], acc[r][MIN(1, last)], acc[r][MIN(2, last)], acc[r][last]));
    }
}

/* The slot of the level below, set by kernels_fill_avx512. It computes products with a single row
 * of w (as in a perturbation), for which this file would use only half of each vector. */
static void (*lower_gemm_i8_i8)(float *y, int64_t ldy, const struct gemm_input *in, const int8_t *w,
                                int64_t ldw, int64_t n0, int64_t n1);

static void avx512_gemm_i8_i8(float *y, int64_t ldy, const struct gemm_input *in, const int8_t *w,
                              int64_t ldw, int64_t n0, int64_t n1) {
    if (n1 - n0 == 1) {
        lower_gemm_i8_i8(y, ldy, in, w, ldw, n0, n1);
        return;
    }
    for (int64_t n = n0, cols; n < n1; n += cols) {
        const int8_t *wn = w + n * ldw;
        cols = n1 - n >= 8 ? 8 : MIN(n1 - n, 2);
        for (int64_t m = 0, rows; m < in->rows; m += rows) {
            rows = in->rows - m >= GEMM_I8_I8_ROWS ? GEMM_I8_I8_ROWS : 1;
            if (rows > 1 && cols == 8)
                gemm_i8_i8_tile(y + n, ldy, in, m, wn, ldw, 8, GEMM_I8_I8_ROWS, GEMM_I8_I8_PAIRS);
            else if (cols == 8)
                gemm_i8_i8_tile(y + n, ldy, in, m, wn, ldw, 8, 1, GEMM_I8_I8_PAIRS);
            else if (rows > 1)
                gemm_i8_i8_tile(y + n, ldy, in, m, wn, ldw, (int)cols, GEMM_I8_I8_ROWS, 1);
            else
                gemm_i8_i8_tile(y + n, ldy, in, m, wn, ldw, (int)cols, 1, 1);
        }
    }
}

/* acc[r][c] += one pair of row r of t times the pairs of the 16 outputs of vector c. The last
 * vector has only the lanes of `tail`. */
INLINE void pairs_step(__m512i acc[8][4], const int16_t *t, int64_t ldt, const int8_t *v, int rows,
                       int vectors, __mmask16 tail) {
    __m512i w[4];
#pragma GCC unroll 4
    for (int c = 0; c < vectors; c++)
        w[c] = _mm512_cvtepi8_epi16(
            _mm256_maskz_loadu_epi16(c == vectors - 1 ? tail : 0xFFFF, v + 32 * c));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const __m512i both = quad_spread(t + r * ldt);
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) acc[r][c] = _mm512_dpwssd_epi32(acc[r][c], w[c], both);
    }
}

/* gemm_nn_i16_i8 for `rows` rows and `vectors` vectors of outputs. The loop is unrolled by four
 * pairs, because gcc copies all sums at the end of an iteration. */
INLINE void pairs_tile(float *y, int64_t ldy, const int16_t *t, int64_t ldt, const float *s,
                       const int8_t *v, int64_t ldv, int64_t pairs, int rows, int vectors,
                       __mmask16 tail) {
    __m512i acc[8][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) acc[r][c] = _mm512_set1_epi32(0);
    }
    int64_t j = 0;
    for (; j + 4 <= pairs; j += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            pairs_step(acc, t + 2 * (j + i), ldt, v + 2 * (j + i) * ldv, rows, vectors, tail);
    }
    for (; j < pairs; j++) pairs_step(acc, t + 2 * j, ldt, v + 2 * j * ldv, rows, vectors, tail);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            const __mmask16 mask = c == vectors - 1 ? tail : 0xFFFF;
            float *out = y + r * ldy + 16 * c;
            _mm512_mask_storeu_ps(out, mask,
                                  _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][c]),
                                                  _mm512_set1_ps(s[r]),
                                                  _mm512_maskz_loadu_ps(mask, out)));
        }
    }
}

/* gemm_nn_i16_i8 for `rows` rows and all outputs, `vectors` vectors at a time. */
INLINE void pairs_rows(float *y, int64_t ldy, const int16_t *t, int64_t ldt, const float *s,
                       const int8_t *v, int64_t ldv, int64_t pairs, int64_t n, int rows,
                       int vectors) {
    int64_t c = 0;
    for (; c + 16 * vectors <= n; c += 16 * vectors)
        pairs_tile(y + c, ldy, t, ldt, s, v + 2 * c, ldv, pairs, rows, vectors, 0xFFFF);
    for (; c < n; c += 16)
        pairs_tile(y + c, ldy, t, ldt, s, v + 2 * c, ldv, pairs, rows, 1, lanes_mask(n - c));
}

static void avx512_gemm_nn_i16_i8(float *y, int64_t ldy, const int16_t *t, int64_t ldt,
                                  const float *s, int64_t rows, const int8_t *v, int64_t ldv,
                                  int64_t pairs, int64_t n) {
    int64_t m = 0;
    for (; m + 8 <= rows; m += 8)
        pairs_rows(y + m * ldy, ldy, t + m * ldt, ldt, s + m, v, ldv, pairs, n, 8, 2);
    for (; m + 4 <= rows; m += 4)
        pairs_rows(y + m * ldy, ldy, t + m * ldt, ldt, s + m, v, ldv, pairs, n, 4, 2);
    for (; m < rows; m++)
        pairs_rows(y + m * ldy, ldy, t + m * ldt, ldt, s + m, v, ldv, pairs, n, 1, 4);
}

static void avx512_multiply_to_int8(const int16_t *x, const int16_t *by, int64_t k, int8_t *q) {
    const __m512i byte = _mm512_set1_epi32(128 << 16 | 128);
    for (int64_t i = 0; i < k; i += 32) {
        const __m512i h =
            _mm512_mulhrs_epi16(_mm512_loadu_si512(x + i), _mm512_loadu_si512(by + i));
        _mm256_storeu_si256((__m256i *)(void *)(q + i),
                            _mm512_cvtepi16_epi8(_mm512_mulhrs_epi16(h, byte)));
    }
}

static float avx512_dot(const float *a, const float *b, int64_t n) {
    __m512 acc = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        acc = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), acc);
    if (i < n) {
        const __mmask16 mask = lanes_mask(n - i);
        acc = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i),
                              _mm512_maskz_loadu_ps(mask, b + i), acc);
    }
    return lanes_sum(acc);
}

static float avx512_sum(const float *a, int64_t n) {
    __m512 acc = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(lanes_mask(n - i), a + i));
    }
    return lanes_sum(acc);
}

static float avx512_max(const float *a, int64_t n) {
    const __m512 low = _mm512_set1_ps(-INFINITY);
    __m512 acc = low;
    for (int64_t i = 0; i < n; i += 16) {
        /* in this order, a NaN does not change acc */
        acc = _mm512_max_ps(_mm512_mask_loadu_ps(low, lanes_mask(n - i), a + i), acc);
    }
    float lanes[16], best = -INFINITY;
    _mm512_storeu_ps(lanes, acc);
    for (int l = 0; l < 16; l++) best = lanes[l] > best ? lanes[l] : best;
    return best + 0.0f;
}

static void avx512_axpy(float *y, float a, const float *x, int64_t n) {
    const __m512 as = _mm512_set1_ps(a);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes_mask(n - i);
        const __m512 xs = _mm512_maskz_loadu_ps(mask, x + i),
                     ys = _mm512_maskz_loadu_ps(mask, y + i);
        _mm512_mask_storeu_ps(y + i, mask, _mm512_fmadd_ps(as, xs, ys));
    }
}

/* 32 bits at a time; their numbers are compared in 16-bit lanes, which are in order. */
static void avx512_mask_random(uint8_t *mask, const uint32_t *random, int64_t n,
                               uint32_t threshold) {
    const __m512i least = _mm512_set1_epi16((short)threshold);
    for (int64_t i = 0; i < n; i += 32) {
        const __mmask16 numbers = lanes_mask((n - i + 1) / 2);
        const __m512i v = _mm512_maskz_loadu_epi32(numbers, random + i / 2);
        uint32_t bits = _mm512_cmpge_epu16_mask(v, least);
        if (n - i < 32) bits &= ((uint32_t)1 << (n - i)) - 1;
        memcpy(mask + i / 8, &bits, (size_t)MIN((n - i + 7) / 8, 4));
    }
}

static void avx512_mask_multiply(float *y, const float *x, const uint8_t *mask, float factor,
                                 int64_t n, bool add) {
    const __m512 factors = _mm512_set1_ps(factor);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 here = lanes_mask(n - i);
        __mmask16 bits = 0;
        memcpy(&bits, mask + i / 8, n - i > 8 ? 2 : 1);
        __m512 v =
            _mm512_mul_ps(_mm512_maskz_loadu_ps(here, x + i), _mm512_maskz_mov_ps(bits, factors));
        if (add) v = _mm512_add_ps(_mm512_maskz_loadu_ps(here, y + i), v);
        _mm512_mask_storeu_ps(y + i, here, v);
    }
}

static void avx512_scale(float *y, float a, int64_t n) {
    const __m512 as = _mm512_set1_ps(a);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes_mask(n - i);
        _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, y + i), as));
    }
}

static void avx512_rmsnorm(float *y, const float *x, const float *g, float eps, int64_t n) {
    const __m512 r = _mm512_set1_ps(1.0f / sqrtf(avx512_dot(x, x, n) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes_mask(n - i);
        const __m512 xs = _mm512_maskz_loadu_ps(mask, x + i),
                     gs = _mm512_maskz_loadu_ps(mask, g + i);
        _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(_mm512_mul_ps(xs, r), gs));
    }
}

static void avx512_rope(float *x, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = lanes_mask(half - i);
        const __m512 a = _mm512_maskz_loadu_ps(mask, x + i),
                     b = _mm512_maskz_loadu_ps(mask, x + half + i);
        const __m512 c = _mm512_maskz_loadu_ps(mask, cosine + i),
                     s = _mm512_maskz_loadu_ps(mask, sine + i);
        _mm512_mask_storeu_ps(x + i, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        _mm512_mask_storeu_ps(x + half + i, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

static void avx512_exp(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes_mask(n - i);
        _mm512_mask_storeu_ps(y + i, mask, lanes_exp(_mm512_maskz_loadu_ps(mask, x + i)));
    }
}

static void avx512_silu_mul(float *y, const float *gate, const float *up, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes_mask(n - i);
        const __m512 g = _mm512_maskz_loadu_ps(mask, gate + i),
                     u = _mm512_maskz_loadu_ps(mask, up + i);
        _mm512_mask_storeu_ps(y + i, mask, lanes_silu_mul(g, u));
    }
}

static void avx512_gelu(float *y, const float *x, int64_t n) {
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes_mask(n - i);
        const __m512 v = _mm512_maskz_loadu_ps(mask, x + i);
        const __m512 cube = _mm512_fmadd_ps(_mm512_mul_ps(v, v), _mm512_set1_ps(GELU_CUBIC),
                                            _mm512_set1_ps(GELU_LINEAR));
        const __m512 u = _mm512_mul_ps(v, cube);
        const __m512 denominator = _mm512_add_ps(one, lanes_exp(_mm512_xor_ps(u, sign)));
        _mm512_mask_storeu_ps(y + i, mask, _mm512_div_ps(v, denominator));
    }
}

/* The formula of act_backward_with. */
static void avx512_act_backward(float *dx, float *dup, const float *dy, const float *x,
                                const float *up, int64_t n, bool gelu) {
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f),
                 line = _mm512_set1_ps(GELU_LINEAR);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes_mask(n - i);
        const __m512 v = _mm512_maskz_loadu_ps(mask, x + i), square = _mm512_mul_ps(v, v);
        __m512 dv = _mm512_maskz_loadu_ps(mask, dy + i), u = _mm512_xor_ps(v, sign);
        if (gelu)
            u = _mm512_mul_ps(
                u, _mm512_add_ps(line, _mm512_mul_ps(_mm512_set1_ps(GELU_CUBIC), square)));
        const __m512 sigma = _mm512_div_ps(one, _mm512_add_ps(one, lanes_exp(u))),
                     y = _mm512_mul_ps(v, sigma);
        __m512 slope = _mm512_mul_ps(y, _mm512_sub_ps(one, sigma));
        if (gelu)
            slope = _mm512_mul_ps(
                slope,
                _mm512_add_ps(line, _mm512_mul_ps(_mm512_set1_ps(3.0f * GELU_CUBIC), square)));
        if (up) {
            _mm512_mask_storeu_ps(dup + i, mask, _mm512_mul_ps(y, dv));
            dv = _mm512_mul_ps(dv, _mm512_maskz_loadu_ps(mask, up + i));
        }
        _mm512_mask_storeu_ps(dx + i, mask, _mm512_mul_ps(_mm512_add_ps(sigma, slope), dv));
    }
}

static float avx512_softmax(float *x, int64_t n) {
    const __m512 top = _mm512_set1_ps(avx512_max(x, n));
    __m512 acc = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes_mask(n - i);
        const __m512 e = lanes_exp(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + i), top));
        _mm512_mask_storeu_ps(x + i, mask, e);
        acc = _mm512_mask_add_ps(acc, mask, acc, e);
    }
    return lanes_sum(acc);
}

/* y += t v for `rows` rows and `vectors` vectors of 16 columns, over all of k. The last vector has
 * only the lanes of `tail`. */
INLINE void gemm_nn_unpacked_tile(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
                                  const void *v, int64_t ldv, int64_t k, int rows, int vectors,
                                  __mmask16 tail, enum dtype e) {
    const __mmask16 full = 0xFFFF;
    __m512 acc[8][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            acc[r][c] = _mm512_maskz_loadu_ps(c == vectors - 1 ? tail : full, y + r * ldy + 16 * c);
        }
    }
    for (int64_t j = 0; j < k; j++) {
        // with 8 rows only two vectors of each row of v are read, so the rows are prefetched
        if (rows == 8)
            for (int c = 0; c < vectors; c++)
                __builtin_prefetch((const char *)v +
                                   ((j + 12) * ldv + 16 * c) * (e == DTYPE_BF16 ? 2 : 4));
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            const __mmask16 mask = c == vectors - 1 ? tail : full;
            const __m512 x = weights_load(v, j * ldv + 16 * c, mask, false, e);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                acc[r][c] = _mm512_fmadd_ps(_mm512_set1_ps(t[r * tm + j * tj]), x, acc[r][c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            _mm512_mask_storeu_ps(y + r * ldy + 16 * c, c == vectors - 1 ? tail : full, acc[r][c]);
        }
    }
}

/* `rows` rows (8, or at most 4) from m on times all n columns. */
INLINE void gemm_nn_rows(const struct gemm_nn_args *p, int64_t m, int rows, enum dtype e) {
    const size_t size = e == DTYPE_BF16 ? sizeof(uint16_t) : sizeof(float);
    const float *t = p->t + m * p->tm;
    float *y = p->y + m * p->ldy;
    const int vectors = rows == 8 ? 2 : 4;
    int64_t c = 0;
    for (; c + 16 * vectors <= p->n; c += 16 * vectors)
        gemm_nn_unpacked_tile(y + c, p->ldy, t, p->tm, p->tj, (const char *)p->v + (size_t)c * size,
                              p->ldv, p->k, rows, vectors, 0xFFFF, e);
    for (; c < p->n; c += 16)
        gemm_nn_unpacked_tile(y + c, p->ldy, t, p->tm, p->tj, (const char *)p->v + (size_t)c * size,
                              p->ldv, p->k, rows, 1, lanes_mask(p->n - c), e);
}

/* `rows` rows by at most eight columns (such as a small rank). It uses 256-bit vectors, because the
 * processor can start twice as many of their operations in a cycle. */
INLINE void gemm_nn_narrow_rows(const struct gemm_nn_args *p, int64_t m, int rows, int64_t tm) {
    const __mmask8 mask = (__mmask8)lanes_mask(p->n);
    const float *t = p->t + m * tm, *t4 = t + 4 * tm, *v = p->v;
    float *y = p->y + m * p->ldy;
    __m256 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r] = _mm256_maskz_loadu_ps(mask, y + r * p->ldy);
    __asm__("" : "+r"(t4)); // addresses of eight rows from two base registers
    for (int64_t j = 0; j < p->k; j++, t += p->tj, t4 += p->tj, v += p->ldv) {
        const __m256 x = _mm256_maskz_loadu_ps(mask, v);
        if (tm == 1) __builtin_prefetch(t + 12 * p->tj);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const float a = r < 4 ? t[r * tm] : t4[(r - 4) * tm];
            acc[r] = _mm256_fmadd_ps(_mm256_set1_ps(a), x, acc[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) _mm256_mask_storeu_ps(y + r * p->ldy, mask, acc[r]);
}

/* Packs k rows of 32 columns of v as panel[k][32] in f32, with zeros from column n on. */
INLINE void gemm_nn_pack_b(float *panel, const void *v, int64_t ldv, int64_t k, int64_t n,
                           enum dtype e) {
    const __mmask16 mask[2] = {lanes_mask(n), n > 16 ? lanes_mask(n - 16) : 0};
    for (int64_t j = 0; j < k; j++, panel += 32) {
        for (int h = 0; h < 2; h++)
            _mm512_storeu_ps(panel + 16 * h, weights_load(v, j * ldv + 16 * h, mask[h], false, e));
    }
}

/* Rows of a tile of two vectors. Its 24 independent sums are three times as many as two arithmetic
 * units with a latency of four cycles need. */
enum { GEMM_NN_TILE_ROWS = 12 };

/* y += t v for `rows` rows and 32 columns of a panel; columns from n on do not exist. */
INLINE void gemm_nn_tile(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
                         const float *panel, int64_t k, int64_t n, int rows) {
    const __mmask16 mask[2] = {lanes_mask(n), n > 16 ? lanes_mask(n - 16) : 0};
    __m512 acc[GEMM_NN_TILE_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int h = 0; h < 2; h++)
            acc[r][h] = _mm512_maskz_loadu_ps(mask[h], y + r * ldy + 16 * h);
    }
    for (int64_t j = 0; j < k; j++, t += tj, panel += 32) {
        const __m512 v0 = _mm512_loadu_ps(panel), v1 = _mm512_loadu_ps(panel + 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const __m512 a = _mm512_set1_ps(t[r * tm]);
            acc[r][0] = _mm512_fmadd_ps(a, v0, acc[r][0]);
            acc[r][1] = _mm512_fmadd_ps(a, v1, acc[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        for (int h = 0; h < 2; h++) _mm512_mask_storeu_ps(y + r * ldy + 16 * h, mask[h], acc[r][h]);
    }
}

static void gemm_nn_tile_run(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
                             const float *panel, int64_t k, int64_t n, int rows) {
#define ROWS(count)                                                                                \
    case count:                                                                                    \
        gemm_nn_tile(y, ldy, t, tm, tj, panel, k, n, count);                                       \
        return;
    switch (rows) {
        ROWS(12)
        ROWS(11)
        ROWS(10)
        ROWS(9)
        ROWS(8)
        ROWS(7)
        ROWS(6)
        ROWS(5)
        ROWS(4)
        ROWS(3)
        ROWS(2)
    default:
        gemm_nn_tile(y, ldy, t, tm, tj, panel, k, n, 1);
    }
#undef ROWS
}

INLINE void gemm_nn_run(const struct gemm_nn_args *p, const struct gemm_nn_tiles *tiles,
                        enum dtype e) {
    if (gemm_nn_is_large(p)) {
        gemm_nn_blocked(p, tiles, e == DTYPE_BF16 ? sizeof(uint16_t) : sizeof(float));
        return;
    }
    int64_t m = 0;
    const bool narrow = p->n <= 8 && e == DTYPE_F32;
    // With tm == 1, 16 rows of a column of t are one cache line.
    for (; narrow && p->tm == 1 && m + 16 <= p->rows; m += 16) gemm_nn_narrow_rows(p, m, 16, 1);
    for (; narrow && m + 8 <= p->rows; m += 8) gemm_nn_narrow_rows(p, m, 8, p->tm);
    for (; m + 8 <= p->rows; m += 8) gemm_nn_rows(p, m, 8, e);
    for (; m + 4 <= p->rows; m += 4) gemm_nn_rows(p, m, 4, e);
    if (m + 3 == p->rows)
        gemm_nn_rows(p, m, 3, e);
    else if (m + 2 == p->rows)
        gemm_nn_rows(p, m, 2, e);
    else if (m < p->rows)
        gemm_nn_rows(p, m, 1, e);
}

#define GEMM_NN(name, type, e)                                                                     \
    static void name##_pack(float *panel, const void *v, int64_t ldv, int64_t k, int64_t n) {      \
        gemm_nn_pack_b(panel, v, ldv, k, n, e);                                                    \
    }                                                                                              \
    static void name(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj, int64_t rows,  \
                     const type *v, int64_t ldv, int64_t k, int64_t n) {                           \
        const struct gemm_nn_args p = {y, t, v, ldy, tm, tj, rows, ldv, k, n};                     \
        const struct gemm_nn_tiles tiles = {GEMM_NN_TILE_ROWS, 32, name##_pack, gemm_nn_tile_run}; \
        gemm_nn_run(&p, &tiles, e);                                                                \
    }
GEMM_NN(avx512_gemm_nn_f32, float, DTYPE_F32)
GEMM_NN(avx512_gemm_nn_bf16, uint16_t, DTYPE_BF16)

/* One k of `rows` rows and `panels` panels, which are `stride` weights apart; half is k % 2. */
INLINE void chains_step(__m512 acc[8][4], const float *x, int64_t ldx, const uint16_t *pairs,
                        int64_t stride, int half, int rows, int panels) {
    __m512 v[4];
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
        const __m512i both = _mm512_loadu_si512(pairs + p * stride);
        v[p] = _mm512_castsi512_ps(half ? _mm512_and_si512(both, _mm512_set1_epi32(-65536))
                                        : _mm512_slli_epi32(both, 16));
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const __m512 a = _mm512_set1_ps(x[r * ldx + half]);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) acc[r][p] = _mm512_fmadd_ps(a, v[p], acc[r][p]);
    }
}

/* `rows` rows by `panels` panels over the whole K. */
INLINE void chains_tile(const struct bf16_gemm *c, int64_t m, int64_t panel, int rows, int panels) {
    const int64_t k = c->w->k, ldx = c->in->ldx;
    const uint16_t *pairs = bf16_panel(c->w, panel);
    const int64_t stride = bf16_panel(c->w, panel + 1) - pairs;
    const float *x = c->in->x + m * ldx;
    __m512 acc[8][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) acc[r][p] = _mm512_setzero_ps();
    }
    for (int64_t i = 0; i + 2 <= k; i += 2, x += 2, pairs += 2 * PANEL) {
        chains_step(acc, x, ldx, pairs, stride, 0, rows, panels);
        chains_step(acc, x, ldx, pairs, stride, 1, rows, panels);
    }
    if (k % 2) chains_step(acc, x, ldx, pairs, stride, 0, rows, panels);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const int64_t n = (panel + p) * PANEL;
            const __mmask16 mask = lanes_mask(c->n1 - n);
            float *y = c->y + (m + r) * c->ldy + n;
            __m512 v = acc[r][p];
            if (c->add) v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), v);
            _mm512_mask_storeu_ps(y, mask, v);
        }
    }
}

#define CHAINS(rows, panels)                                                                       \
    static void chains_##rows##x##panels(const struct bf16_gemm *c, int64_t m, int64_t panel) {    \
        chains_tile(c, m, panel, rows, panels);                                                    \
    }
#define CHAINS_ROWS(rows, panels) CHAINS(rows, panels) CHAINS(rows, 1)
CHAINS_ROWS(1, 4)
CHAINS_ROWS(2, 4)
CHAINS_ROWS(3, 4)
CHAINS_ROWS(4, 4)
CHAINS_ROWS(5, 2)
CHAINS_ROWS(6, 2)
CHAINS_ROWS(7, 2)
CHAINS_ROWS(8, 2)

static void avx512_gemm_bf16_fast(float *y, int64_t ldy, const struct gemm_input *in,
                                  const struct matrix *w, int64_t n0, int64_t n1, bool add) {
    static const struct bf16_gemm_tile tiles[] = {
        {4, chains_1x4, chains_1x1}, {4, chains_2x4, chains_2x1}, {4, chains_3x4, chains_3x1},
        {4, chains_4x4, chains_4x1}, {2, chains_5x2, chains_5x1}, {2, chains_6x2, chains_6x1},
        {2, chains_7x2, chains_7x1}, {2, chains_8x2, chains_8x1}};
    const struct bf16_gemm c = {y, ldy, in, w, n1, add};
    if (in->rows > 0) bf16_gemm_run(&c, n0, tiles, ARRAY_LEN(tiles));
}

static void avx512_adamw(float *w, const float *g, float *m, float *v, int64_t n, float lr,
                         float beta1, float beta2, float eps, float decay, float bc1, float bc2) {
    const __m512 b1 = _mm512_set1_ps(beta1), c1 = _mm512_set1_ps(1.0f - beta1),
                 k1 = _mm512_set1_ps(bc1);
    const __m512 b2 = _mm512_set1_ps(beta2), c2 = _mm512_set1_ps(1.0f - beta2),
                 k2 = _mm512_set1_ps(bc2);
    const __m512 step = _mm512_set1_ps(-lr), keep = _mm512_set1_ps(1.0f - lr * decay),
                 tiny = _mm512_set1_ps(eps);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = lanes_mask(n - i);
        const __m512 gs = _mm512_maskz_loadu_ps(mask, g + i),
                     ws = _mm512_maskz_loadu_ps(mask, w + i);
        __m512 ms = _mm512_maskz_loadu_ps(mask, m + i), vs = _mm512_maskz_loadu_ps(mask, v + i);
        ms = _mm512_fmadd_ps(b1, ms, _mm512_mul_ps(c1, gs));
        vs = _mm512_fmadd_ps(b2, vs, _mm512_mul_ps(c2, _mm512_mul_ps(gs, gs)));
        const __m512 root = _mm512_add_ps(_mm512_sqrt_ps(_mm512_div_ps(vs, k2)), tiny);
        const __m512 change = _mm512_div_ps(_mm512_div_ps(ms, k1), root);
        _mm512_mask_storeu_ps(w + i, mask, _mm512_fmadd_ps(step, change, _mm512_mul_ps(ws, keep)));
        _mm512_mask_storeu_ps(m + i, mask, ms);
        _mm512_mask_storeu_ps(v + i, mask, vs);
    }
}

void kernels_fill_avx512(struct kernels *k) {
    k->gemm_f32 = avx512_gemm_f32;
    k->gemm_bf16 = avx512_gemm_bf16;
    k->gemm_f16 = avx512_gemm_f16;
    k->gemm_i8 = avx512_gemm_i8;
    if (k->gemm_i8_i8 != avx512_gemm_i8_i8) lower_gemm_i8_i8 = k->gemm_i8_i8;
    k->gemm_i8_i8 = avx512_gemm_i8_i8;
    k->gemm_nn_i16_i8 = avx512_gemm_nn_i16_i8;
    k->gemm_q8 = avx512_gemm_q;
    k->gemm_q4 = avx512_gemm_q;
    k->gemm_mins = avx512_gemm_mins;
    k->gemm_bf16_fast = avx512_gemm_bf16_fast;
    k->multiply_to_int8 = avx512_multiply_to_int8;
    k->dot = avx512_dot;
    k->sum = avx512_sum;
    k->max = avx512_max;
    k->axpy = avx512_axpy;
    k->scale = avx512_scale;
    k->mask_random = avx512_mask_random;
    k->mask_multiply = avx512_mask_multiply;
    k->rmsnorm = avx512_rmsnorm;
    k->rope = avx512_rope;
    k->silu_mul = avx512_silu_mul;
    k->gelu = avx512_gelu;
    k->act_backward = avx512_act_backward;
    k->exp = avx512_exp;
    k->softmax = avx512_softmax;
    k->gemm_nn_f32 = avx512_gemm_nn_f32;
    k->gemm_nn_bf16 = avx512_gemm_nn_bf16;
    k->adamw = avx512_adamw;
}
