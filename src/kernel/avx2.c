/*
 * avx2: the slots for processors with AVX2, FMA and F16C; eight floats at a time.
 *
 * In the f32 products of few rows, an output keeps its sixteen lanes in two registers, a block of 2
 * rows × 3 outputs fills twelve of the sixteen registers, and shuffles compute the fixed tree of
 * kernel.h for several outputs at once. Blocks of outputs stay in the second-level cache, blocks of
 * rows in the first. Blocking never changes the order of the sum in a lane, so it cannot change a
 * bit. Many rows are multiplied with transposed weights (gemm_lanes). This file exports only
 * kernels_fill_avx2 and kernels_fill_avxvnni, the level above, which has VPDPBUSD with eight lanes.
 *
 * Invariant: tails are loaded under a mask as zeros and go through the same operations as full
 * vectors; nothing outside the caller's arrays is read or written.
 */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernel/internal.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
/* Keeps v in its register at this place, and the steps around it in the order of the source.
 * Without this macro gcc moves the additions of eight accumulators after all products, has too few
 * registers and spills. */
#define KEEP_IN_REGISTER(v) __asm__ volatile("" : "+x"(v))

static const int32_t mask_table[16] = {-1, -1, -1, -1, -1, -1, -1, -1};

/* A mask of the first n of 8 lanes: no lane if n is below 0, all if n is above 8. */
INLINE __m256i tail_mask(int64_t n) {
    int64_t c = n < 0 ? 0 : n > 8 ? 8 : n;
    return _mm256_loadu_si256((const __m256i *)(mask_table + 8 - c));
}

/* Loads or stores the first n of 8 floats; the other lanes are loaded as +0. */
INLINE __m256 tail_load(const float *p, int64_t n) {
    return _mm256_maskload_ps(p, tail_mask(n));
}

INLINE void tail_store(float *p, __m256 v, int64_t n) {
    _mm256_maskstore_ps(p, tail_mask(n), v);
}

/* A full load when at least 8 floats remain at p (n is their number), else a masked one. */
INLINE __m256 load_up_to_8(const float *p, int64_t n) {
    return n >= 8 ? _mm256_loadu_ps(p) : tail_load(p, n);
}

INLINE void store_up_to_8(float *p, __m256 v, int64_t n) {
    if (n >= 8)
        _mm256_storeu_ps(p, v);
    else
        tail_store(p, v, n);
}

/* a and b are two dots after the addition of lanes l and l+8. Adds lanes l and l+4: the lower half
 * of the result belongs to a, the upper half to b. */
INLINE __m256 tree_halves(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/* The rest of the tree for four results of tree_halves. The lower half of the result has the dots
 * of the lower halves of p, q, r and s, the upper half those of their upper halves. */
INLINE __m256 tree_finish(__m256 p, __m256 q, __m256 r, __m256 s) {
    __m256 pq = _mm256_add_ps(_mm256_shuffle_ps(p, q, 0x44), _mm256_shuffle_ps(p, q, 0xee));
    __m256 rs = _mm256_add_ps(_mm256_shuffle_ps(r, s, 0x44), _mm256_shuffle_ps(r, s, 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(pq, rs, 0x88), _mm256_shuffle_ps(pq, rs, 0xdd));
}

/* The rest of the tree, after lanes l and l+8, for one dot. */
INLINE float tree_one(__m256 v) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}

/* Eight elements from index i of a row, widened; bf16 is the upper half of an f32. */
INLINE __m256 weights_load(const void *w, int64_t i, enum dtype e) {
    if (e == DTYPE_F32) return _mm256_loadu_ps((const float *)w + i);
    if (e == DTYPE_I8) {
        __m128i b = _mm_loadl_epi64((const __m128i *)((const int8_t *)w + i));
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
    }
    __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)w + i));
    if (e == DTYPE_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* The first n of eight elements from index i (none if n is negative, all if it is above 8), then
 * zeros. */
INLINE __m256 weights_tail(const void *w, int64_t i, int64_t n, enum dtype e) {
    if (e == DTYPE_F32) return tail_load((const float *)w + i, n);
    uint16_t h[8] = {0};
    if (e == DTYPE_I8)
        for (int l = 0; l < 8 && l < n; l++) ((int8_t *)h)[l] = ((const int8_t *)w)[i + l];
    else
        for (int l = 0; l < 8 && l < n; l++) h[l] = ((const uint16_t *)w)[i + l];
    return weights_load(h, 0, e);
}

/* Row `row` of w, whose rows are ldw elements apart. */
INLINE const void *weights_row(const void *w, int64_t row, int64_t ldw, enum dtype e) {
    return (const char *)w + row * ldw * elem_bytes(e);
}

/* One step of 16 values of K for R rows and C outputs: acc[r * C + c] has lanes 0..7, acc[R * C + r
 * * C + c] lanes 8..15. `left` values remain; `tail`: they are fewer than 16. */
INLINE void block_step(__m256 *acc, const float *x, int64_t ldx, const void *const *w, int64_t i,
                       int64_t left, int R, int C, enum dtype e, bool tail) {
    UNROLL for (int half = 0; half < 2; half++) {
        int64_t at = i + 8 * half, n = left - 8 * half;
        __m256 wv[4], xv;
        UNROLL for (int c = 0; c < C; c++) {
            wv[c] = tail ? weights_tail(w[c], at, n, e) : weights_load(w[c], at, e);
            if (R > 1) __asm__("" : "+x"(wv[c])); // else gcc loads it again for each row
        }
        UNROLL for (int r = 0; r < R; r++) {
            xv = tail ? tail_load(x + r * ldx + at, n) : _mm256_loadu_ps(x + r * ldx + at);
            UNROLL for (int c = 0; c < C; c++) {
                int o = (half * R + r) * C + c;
                acc[o] = _mm256_fmadd_ps(xv, wv[c], acc[o]);
            }
        }
    }
}

/* The dots of R rows of x and C rows of w: v[r * C + c] has lane l + lane l+8. (R, C) is (2, 3),
 * (1, 4) or (1, 1). `stream`: prefetches weights that are not in the caches (STREAM_AHEAD). */
INLINE void block_dots(__m256 *v, const float *x, int64_t ldx, const void *w, int64_t ldw,
                       int64_t k, int R, int C, enum dtype e, bool stream) {
    __m256 acc[12];
    const void *rows[4];
    UNROLL for (int c = 0; c < C; c++) rows[c] = weights_row(w, c, ldw, e);
    UNROLL for (int o = 0; o < 2 * R * C; o++) acc[o] = _mm256_setzero_ps();
    int64_t i = 0;
    const char *ahead = (const char *)w + STREAM_AHEAD;
    for (; i + 16 <= k; i += 16) {
        if (stream)
            for (int64_t b = 0; b < 16 * C * elem_bytes(e); b += 64, ahead += 64)
                __builtin_prefetch(ahead);
        block_step(acc, x, ldx, rows, i, 16, R, C, e, false);
    }
    if (i < k) block_step(acc, x, ldx, rows, i, k - i, R, C, e, true);
    UNROLL for (int o = 0; o < R * C; o++) v[o] = _mm256_add_ps(acc[o], acc[R * C + o]);
}

/* y[0..2] (+)= the first three lanes of v. */
INLINE void store_3(float *y, __m128 v, bool add) {
    if (add) {
        __m128 old =
            _mm_movelh_ps(_mm_loadl_pi(_mm_setzero_ps(), (const __m64 *)y), _mm_load_ss(y + 2));
        v = _mm_add_ps(old, v);
    }
    _mm_storel_pi((__m64 *)y, v);
    _mm_store_ss(y + 2, _mm_movehl_ps(v, v));
}

INLINE void block_2x3(float *y, int64_t ldy, const float *x, int64_t ldx, const void *w,
                      int64_t ldw, int64_t k, bool add, enum dtype e, bool stream) {
    __m256 v[6];
    block_dots(v, x, ldx, w, ldw, k, 2, 3, e, stream);
    __m256 c = tree_halves(v[2], v[5]);
    __m256 t = tree_finish(tree_halves(v[0], v[3]), tree_halves(v[1], v[4]), c, c);
    store_3(y, _mm256_castps256_ps128(t), add);
    store_3(y + ldy, _mm256_extractf128_ps(t, 1), add);
}

/* The rest of the tree, after lanes l and l+8, for four dots. */
INLINE __m128 tree_four(const __m256 v[4]) {
    __m256 ac = tree_halves(v[0], v[2]), bd = tree_halves(v[1], v[3]);
    __m256 t = tree_finish(ac, bd, ac, bd); // [a b a b | c d c d]
    return _mm_movelh_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

INLINE void block_1x4(float *y, const float *x, const void *w, int64_t ldw, int64_t k, bool add,
                      enum dtype e) {
    __m256 v[4];
    block_dots(v, x, 0, w, ldw, k, 1, 4, e, false);
    __m128 s = tree_four(v);
    _mm_storeu_ps(y, add ? _mm_add_ps(_mm_loadu_ps(y), s) : s);
}

INLINE void block_1x1(float *y, const float *x, const void *w, int64_t k, bool add, enum dtype e) {
    __m256 v[1];
    block_dots(v, x, 0, w, 0, k, 1, 1, e, false);
    float s = tree_one(v[0]);
    *y = add ? *y + s : s;
}

/* One row times outputs n0..n1. `stream`: the weights are long rows that are not in the caches; one
 * after the other they are one stream in memory. */
INLINE void row_dots(float *y, const float *x, const void *w, int64_t ldw, int64_t k, int64_t n0,
                     int64_t n1, bool add, enum dtype e, bool stream) {
    int64_t n = n0;
    for (; !stream && n + 4 <= n1; n += 4)
        block_1x4(y + n, x, weights_row(w, n, ldw, e), ldw, k, add, e);
    for (; n < n1; n++) block_1x1(y + n, x, weights_row(w, n, ldw, e), k, add, e);
}

/* Rows m0..m1 (few enough for the first-level cache) times outputs n0..n1. The first rows read long
 * rows of weights from memory, the others from the caches. */
INLINE void tile_dots(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t m0, int64_t m1,
                      const void *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add,
                      enum dtype e) {
    const bool stream = m0 == 0 && k * elem_bytes(e) >= STREAM_ROW;
    int64_t n = n0, even = m0 + (m1 - m0) / 2 * 2;
    for (; n + 3 <= n1; n += 3)
        for (int64_t m = m0; m < even; m += 2)
            block_2x3(y + m * ldy + n, ldy, x + m * ldx, ldx, weights_row(w, n, ldw, e), ldw, k,
                      add, e, stream && m == 0);
    for (int64_t m = m0; m < even && n < n1; m++)
        row_dots(y + m * ldy, x + m * ldx, w, ldw, k, n, n1, add, e, false);
    if (even < m1)
        row_dots(y + even * ldy, x + even * ldx, w, ldw, k, n0, n1, add, e, stream && even == 0);
}

/* Transposes eight rows of 8: vector c of the result holds column c of each row. */
INLINE void transpose_8(__m256 *v) {
    __m256 t[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        v[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        v[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        v[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        v[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++) v[i] = t[i];
}

/* Packs sixteen rows of w as panel[lane][k / 16][output]. */
INLINE void lanes_pack(float *panel, const void *w, int64_t ldw, int64_t k, enum dtype e) {
    for (int64_t i = 0; i < k; i += 8)
        for (int o = 0; o < 16; o += 8) {
            __m256 v[8];
            UNROLL for (int c = 0; c < 8; c++) v[c] =
                weights_load(weights_row(w, o + c, ldw, e), i, e);
            transpose_8(v);
            float *to = panel + i % 16 * k + i / 16 * 16 + o;
            UNROLL for (int l = 0; l < 8; l++) _mm256_store_ps(to + l * k, v[l]);
        }
}

#define LANES_ROWS 48   /* with fewer rows, gemm_lanes is slower than tile_dots */
#define LANES_K 3072    /* largest K of gemm_lanes: 192 KiB of transposed weights */
#define LANES_BLOCK 768 /* part of K for which six rows stay in the first-level cache */

/* Continues one lane of R rows × 16 outputs over k / 16 more steps. */
INLINE void lane_sums(__m256 *acc, const float *x, int64_t ldx, const float *panel, int64_t k,
                      int R) {
    const float *end = panel + k, *x3 = x + 3 * ldx;
    __asm__("" : "+r"(x3)); // addresses of six rows from two base registers
    for (; panel < end; panel += 32, x += 32, x3 += 32) UNROLL for (int i = 0; i < 32; i += 16) {
            __m256 w0 = _mm256_load_ps(panel + i), w1 = _mm256_load_ps(panel + i + 8);
            UNROLL for (int r = 0; r < R; r++) {
                __m256 a = _mm256_broadcast_ss((r < 3 ? x + r * ldx : x3 + (r - 3) * ldx) + i);
                acc[2 * r] = _mm256_fmadd_ps(a, w0, acc[2 * r]);
                acc[2 * r + 1] = _mm256_fmadd_ps(a, w1, acc[2 * r + 1]);
            }
        }
}

/* y of R rows × 16 outputs. The lanes are computed in the order in which the tree adds them, l and
 * l + 8 first, so that only five sums exist at a time, one for each level of the tree. */
INLINE void lanes_block(float *y, int64_t ldy, const float *x, int64_t ldx, const float *panel,
                        int64_t k, bool add, int R) {
    static const uint8_t lanes[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
    __m256 kept[16][12], sums[5][12], acc[12];
    for (int64_t i = 0; i < k; i += LANES_BLOCK)
        for (int t = 0; t < 16; t++) {
            UNROLL for (int o = 0; o < 2 * R; o++) acc[o] = i ? kept[t][o] : _mm256_setzero_ps();
            lane_sums(acc, x + i + lanes[t], ldx, panel + lanes[t] * k + i, MIN(k - i, LANES_BLOCK),
                      R);
            if (i + LANES_BLOCK < k) {
                UNROLL for (int o = 0; o < 2 * R; o++) kept[t][o] = acc[o];
                continue;
            }
            int d = 0;
            for (; t >> d & 1; d++)
                UNROLL for (int o = 0; o < 2 * R; o++) acc[o] = _mm256_add_ps(sums[d][o], acc[o]);
            UNROLL for (int o = 0; o < 2 * R; o++) sums[d][o] = acc[o];
        }
    UNROLL for (int o = 0; o < 2 * R; o++) {
        float *to = y + o / 2 * ldy + o % 2 * 8;
        __m256 v = sums[4][o];
        _mm256_storeu_ps(to, add ? _mm256_add_ps(_mm256_loadu_ps(to), v) : v);
    }
}

/* Not inlined, because gcc would then keep other values in registers that the inner loop needs. */
static __attribute__((noinline)) void lanes_block_6(float *y, int64_t ldy, const float *x,
                                                    int64_t ldx, const float *panel, int64_t k,
                                                    bool add) {
    lanes_block(y, ldy, x, ldx, panel, k, add, 6);
}

/* Sixteen outputs of many rows, for a K that is a multiple of 32. A vector holds one lane of eight
 * outputs, and the lanes are computed one after the other. So a dot needs no shuffles at its end,
 * which take a fifth of its time if K is small. The weights are widened once for all rows, and stay
 * in the caches while all rows are multiplied. */
INLINE void gemm_lanes(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                       const void *w, int64_t ldw, int64_t k, bool add, enum dtype e) {
    _Alignas(32) float panel[16 * LANES_K];
    lanes_pack(panel, w, ldw, k, e);
    int64_t m = 0;
    for (; m + 6 <= rows; m += 6) lanes_block_6(y + m * ldy, ldy, x + m * ldx, ldx, panel, k, add);
    for (; m + 2 <= rows; m += 2) lanes_block(y + m * ldy, ldy, x + m * ldx, ldx, panel, k, add, 2);
    if (m < rows) lanes_block(y + m * ldy, ldy, x + m * ldx, ldx, panel, k, add, 1);
}

#define L1_FLOATS 3072  /* floats of x in one tile of rows */
#define L2_FLOATS 65536 /* floats of w in one block of outputs */

INLINE void gemm_blocked(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                         const void *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add,
                         enum dtype e) {
    int64_t width = MAX(k, 1), step_m = MAX(L1_FLOATS / width / 2 * 2, 8),
            step_n = MAX(L2_FLOATS / width / 12 * 12, 12);
    if (rows >= LANES_ROWS && k % 32 == 0 && 0 < k && k <= LANES_K)
        for (; n0 + 16 <= n1; n0 += 16)
            gemm_lanes(y + n0, ldy, x, ldx, rows, weights_row(w, n0, ldw, e), ldw, k, add, e);
    for (int64_t n = n0; n < n1; n += step_n)
        for (int64_t m = 0; m < rows; m += step_m)
            tile_dots(y, ldy, x, ldx, m, MIN(m + step_m, rows), w, ldw, k, n, MIN(n + step_n, n1),
                      add, e);
}

static void gemm_f32(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     const float *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add) {
    gemm_blocked(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, add, DTYPE_F32);
}

static void gemm_bf16(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                      const uint16_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add) {
    gemm_blocked(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, add, DTYPE_BF16);
}

static void gemm_f16(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                     const uint16_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add) {
    gemm_blocked(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, add, DTYPE_F16);
}

static void gemm_i8(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
                    const int8_t *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add) {
    gemm_blocked(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, add, DTYPE_I8);
}

/* Transposes eight rows of eight: interleaves pairs of rows, then pairs of these pairs, then
 * exchanges the halves. */
static void transpose_8x8(float *dst, int64_t ld_dst, const float *src, int64_t ld_src) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(src + i * ld_src);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(dst + i * ld_dst, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(dst + (i + 4) * ld_dst, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

static void transpose_blocks(float *dst, int64_t ld_dst, const float *src, int64_t ld_src,
                             int64_t rows, int64_t cols) {
    int64_t whole_rows = rows / 8 * 8, whole_cols = cols / 8 * 8;
    for (int64_t c = 0; c < whole_cols; c += 8)
        for (int64_t r = 0; r < whole_rows; r += 8)
            transpose_8x8(dst + c * ld_dst + r, ld_dst, src + r * ld_src + c, ld_src);
    for (int64_t c = 0; c < cols; c++)
        for (int64_t r = c < whole_cols ? whole_rows : 0; r < rows; r++)
            dst[c * ld_dst + r] = src[r * ld_src + c];
}

/* y += t v for R rows and C vectors of 8 columns, over all of k. If C is 1, only n exist. */
INLINE void gemm_nn_unpacked_tile(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
                                  const void *v, int64_t ldv, int64_t k, int64_t n, int R, int C,
                                  enum dtype e) {
    __m256 acc[8];
    bool part = C == 1 && n < 8;
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) acc[r * C + c] =
        part ? tail_load(y + r * ldy, n) : _mm256_loadu_ps(y + r * ldy + 8 * c);
    for (int64_t j = 0; j < k; j++) {
        const void *row = weights_row(v, j, ldv, e);
        UNROLL for (int c = 0; c < C; c++) {
            __m256 x = part ? weights_tail(row, 0, n, e) : weights_load(row, 8 * c, e);
            UNROLL for (int r = 0; r < R; r++) acc[r * C + c] =
                _mm256_fmadd_ps(_mm256_broadcast_ss(t + r * tm + j * tj), x, acc[r * C + c]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
        store_up_to_8(y + r * ldy + 8 * c, acc[r * C + c], part ? n : 8);
}

/* R rows from m on times all n columns, with 8 accumulators at a time. */
INLINE void gemm_nn_rows(const struct gemm_nn_args *p, int64_t m, int R, enum dtype e) {
    float *y = p->y + m * p->ldy;
    const float *t = p->t + m * p->tm;
    int64_t c = 0;
    for (; c + 64 / R <= p->n; c += 64 / R)
        gemm_nn_unpacked_tile(y + c, p->ldy, t, p->tm, p->tj, weights_row(p->v, 1, c, e), p->ldv,
                              p->k, 8, R, 8 / R, e);
    for (; c < p->n; c += 8)
        gemm_nn_unpacked_tile(y + c, p->ldy, t, p->tm, p->tj, weights_row(p->v, 1, c, e), p->ldv,
                              p->k, MIN(p->n - c, 8), R, 1, e);
}

/* Packs k rows of 16 columns of v as panel[k][16] in f32, with zeros from column n on. */
INLINE void gemm_nn_pack_b(float *panel, const void *v, int64_t ldv, int64_t k, int64_t n,
                           enum dtype e) {
    for (int64_t j = 0; j < k; j++, panel += 16) {
        const void *row = weights_row(v, j, ldv, e);
        UNROLL for (int h = 0; h < 2; h++)
            _mm256_store_ps(panel + 8 * h, n >= 8 * h + 8 ? weights_load(row, 8 * h, e)
                                                          : weights_tail(row, 8 * h, n - 8 * h, e));
    }
}

/* y += t v for R rows by 16 columns. R = 6 uses fifteen registers: twelve accumulators, two vectors
 * of v and one of t. */
INLINE void gemm_nn_tile(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
                         const float *panel, int64_t k, int64_t n, int R) {
    __m256 acc[12];
    UNROLL for (int o = 0; o < 2 * R; o++) acc[o] =
        load_up_to_8(y + o / 2 * ldy + o % 2 * 8, n - o % 2 * 8);
    UNROLL for (int r = 0; r < R; r++) __builtin_prefetch(y + (R + r) * ldy, 1);
    for (int64_t j = 0; j < k; j++, t += tj, panel += 16) {
        __m256 v0 = _mm256_load_ps(panel), v1 = _mm256_load_ps(panel + 8);
        UNROLL for (int r = 0; r < R; r++) {
            __m256 a = _mm256_broadcast_ss(t + r * tm);
            acc[2 * r] = _mm256_fmadd_ps(a, v0, acc[2 * r]);
            acc[2 * r + 1] = _mm256_fmadd_ps(a, v1, acc[2 * r + 1]);
        }
    }
    UNROLL for (int o = 0; o < 2 * R; o++)
        store_up_to_8(y + o / 2 * ldy + o % 2 * 8, acc[o], n - o % 2 * 8);
}

static void gemm_nn_tile_run(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
                             const float *panel, int64_t k, int64_t n, int rows) {
    switch (rows) {
    case 6:
        gemm_nn_tile(y, ldy, t, tm, tj, panel, k, n, 6);
        return;
    case 5:
        gemm_nn_tile(y, ldy, t, tm, tj, panel, k, n, 5);
        return;
    case 4:
        gemm_nn_tile(y, ldy, t, tm, tj, panel, k, n, 4);
        return;
    case 3:
        gemm_nn_tile(y, ldy, t, tm, tj, panel, k, n, 3);
        return;
    case 2:
        gemm_nn_tile(y, ldy, t, tm, tj, panel, k, n, 2);
        return;
    default:
        gemm_nn_tile(y, ldy, t, tm, tj, panel, k, n, 1);
    }
}

INLINE void gemm_nn_run(const struct gemm_nn_args *p, const struct gemm_nn_tiles *tiles,
                        int64_t size, enum dtype e) {
    int64_t m = 0;
    if (gemm_nn_is_large(p)) {
        gemm_nn_blocked(p, tiles, size);
        return;
    }
    // Few columns, such as a small rank: eight rows give eight independent sums.
    for (; p->n <= 8 && m + 8 <= p->rows; m += 8) gemm_nn_rows(p, m, 8, e);
    for (; m + 4 <= p->rows; m += 4) gemm_nn_rows(p, m, 4, e);
    for (; m < p->rows; m++) gemm_nn_rows(p, m, 1, e);
}

#define GEMM_NN(name, type, e)                                                                     \
    static void name##_pack(float *panel, const void *v, int64_t ldv, int64_t k, int64_t n) {      \
        gemm_nn_pack_b(panel, v, ldv, k, n, e);                                                    \
    }                                                                                              \
    static void name(float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj, int64_t rows,  \
                     const type *v, int64_t ldv, int64_t k, int64_t n) {                           \
        const struct gemm_nn_args p = {y, t, v, ldy, tm, tj, rows, ldv, k, n};                     \
        const struct gemm_nn_tiles tiles = {6, 16, name##_pack, gemm_nn_tile_run};                 \
        gemm_nn_run(&p, &tiles, sizeof(type), e);                                                  \
    }
GEMM_NN(gemm_nn_f32, float, DTYPE_F32)
GEMM_NN(gemm_nn_bf16, uint16_t, DTYPE_BF16)
GEMM_NN(gemm_nn_f16, uint16_t, DTYPE_F16)
GEMM_NN(gemm_nn_i8, int8_t, DTYPE_I8)

INLINE __m256i quad_broadcast(const void *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

/* One row of int8 blocks times R rows of int8 weights: acc[r] has the eight lanes of gemm_i8_i8.
 * All integers are at least -127. */
INLINE void lanes_i8(__m256 *acc, const int8_t *q, const float *d, const int8_t *w, int64_t ldw,
                     int64_t k, int R) {
    const __m256i ones = _mm256_set1_epi16(1);
    UNROLL for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_ps();
    for (int64_t i = 0; i < k; i += 32) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(q + i)), a = _mm256_abs_epi8(x);
        __m256 scale = _mm256_broadcast_ss(d + i / 32);
        UNROLL for (int r = 0; r < R; r++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(w + r * ldw + i));
            __m256i p = _mm256_madd_epi16(_mm256_maddubs_epi16(a, _mm256_sign_epi8(v, x)), ones);
            acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(p), scale, acc[r]);
        }
    }
}

static void gemm_i8_i8(float *y, int64_t ldy, const struct gemm_input *in, const int8_t *w,
                       int64_t ldw, int64_t n0, int64_t n1) {
    for (int64_t m = 0; m < in->rows; m++) {
        const int8_t *q = in->q + m * in->k;
        const float *d = in->d + m * (in->k / 32);
        __m256 v[4];
        int64_t n = n0;
        for (; n + 4 <= n1; n += 4) {
            lanes_i8(v, q, d, w + n * ldw, ldw, in->k, 4);
            _mm_storeu_ps(y + m * ldy + n, tree_four(v));
        }
        for (; n < n1; n++) {
            lanes_i8(v, q, d, w + n * ldw, ldw, in->k, 1);
            y[m * ldy + n] = tree_one(v[0]);
        }
    }
}

/* gemm_nn_i16_i8 for R rows by C · 8 outputs. With C == 1 and n below 8, only the first n outputs
 * exist. */
INLINE void pairs_block(float *y, int64_t ldy, const int16_t *t, int64_t ldt, const float *s,
                        const int8_t *v, int64_t ldv, int64_t pairs, int64_t n, int R, int C) {
    __m256i acc[8];
    bool part = C == 1 && n < 8;
    UNROLL for (int o = 0; o < R * C; o++) acc[o] = _mm256_setzero_si256();
    for (int64_t j = 0; j < pairs; j++) {
        UNROLL for (int c = 0; c < C; c++) {
            int8_t tail[16] = {0};
            const int8_t *at = v + 2 * (j * ldv + 8 * c);
            if (part) memcpy(tail, at, 2 * (size_t)n);
            __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(part ? tail : at)));
            UNROLL for (int r = 0; r < R; r++) acc[r * C + c] = _mm256_add_epi32(
                acc[r * C + c], _mm256_madd_epi16(w, quad_broadcast(t + r * ldt + 2 * j)));
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++) {
        float *out = y + r * ldy + 8 * c;
        store_up_to_8(out,
                      _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r * C + c]),
                                      _mm256_broadcast_ss(s + r), load_up_to_8(out, part ? n : 8)),
                      part ? n : 8);
    }
}

/* gemm_nn_i16_i8 for R rows and all n outputs. */
INLINE void pairs_rows(float *y, int64_t ldy, const int16_t *t, int64_t ldt, const float *s,
                       const int8_t *v, int64_t ldv, int64_t pairs, int64_t n, int R) {
    int64_t c = 0;
    for (; c + 64 / R <= n; c += 64 / R)
        pairs_block(y + c, ldy, t, ldt, s, v + 2 * c, ldv, pairs, 0, R, 8 / R);
    for (; c < n; c += 8) pairs_block(y + c, ldy, t, ldt, s, v + 2 * c, ldv, pairs, n - c, R, 1);
}

static void gemm_nn_i16_i8(float *y, int64_t ldy, const int16_t *t, int64_t ldt, const float *s,
                           int64_t rows, const int8_t *v, int64_t ldv, int64_t pairs, int64_t n) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4)
        pairs_rows(y + m * ldy, ldy, t + m * ldt, ldt, s + m, v, ldv, pairs, n, 4);
    for (; m < rows; m++)
        pairs_rows(y + m * ldy, ldy, t + m * ldt, ldt, s + m, v, ldv, pairs, n, 1);
}

#define SUM_GROUPS 512     /* groups of K whose activation sums are stored at once */
#define PANEL_BYTES 262144 /* bytes of weights in a block of panels: half the L2 cache */

/*
 * How int8 activations x are multiplied with weights w. The instruction MADDUBS multiplies unsigned
 * by signed bytes and adds pairs of products in 16 bits with saturation.
 *
 * SIGNED: w is any int8. |w| is multiplied with x that has the sign of w applied. The sum of a pair
 * is at most 2 * 128 * 127, so it does not saturate; it is widened to 32 bits immediately.
 *
 * NARROW: u = w + c is in 0..63, so a pair cannot saturate. A 16-bit lane starts from -c Σx and
 * adds the products u x of half a group. It may wrap around in between, but the result Σ w x fits
 * into 16 bits: 16 products of at most 16 * 127, or for q6_k 8 products of at most 32 * 127.
 *
 * NARROW_CENTRED: w is in 0..31. Σ w x does not fit into 16 bits, but Σ (w - 16) x does: it is
 * computed as in NARROW with u = w and c = 16, and 16 Σx is added in 32 bits.
 *
 * UNSIGNED (AVX-VNNI): u = w + c is in 0..255. VPDPBUSD multiplies four unsigned with four signed
 * bytes and adds the products to a 32-bit lane, which starts from -c Σx. Nothing saturates.
 */
enum int8_product_kind { SIGNED, NARROW, NARROW_CENTRED, UNSIGNED };

/* R rows times some blocks of one panel. All pointers are at the first row and the first block. */
struct panel_job {
    const int8_t *x;     /* [R][K] */
    const float *dx;     /* [R][K/32] */
    const int32_t *bias; /* [R][SUM_GROUPS], each two 16-bit lanes of -c Σx, in UNSIGNED one of 32
                            bits; unused in SIGNED */
    const uint8_t *record; /* the panel's record of the first block, which is the record's first */
    int64_t k, blocks;
    int32_t head_bytes, record_bytes;
    int8_t c; /* the offset of NARROW; of UNSIGNED as an unsigned byte */
};

/* sum[i] += Σ u[4 i + j] x[4 i + j] over j. As assembly, so that this file needs no other
 * instruction set than AVX2 where it is not executed. */
INLINE __m256i dot_u8(__m256i sum, __m256i u, __m256i x) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(x));
    return sum;
}

/* The weights that the low nibbles of v mean: for nf4 int8 codes, in UNSIGNED plus 128; for q4 the
 * u of NARROW. */
INLINE __m256i nibble_weights(__m256i v, enum matrix_layout l, enum int8_product_kind kind) {
    v = _mm256_and_si256(v, _mm256_set1_epi8(15));
    if (l != LAYOUT_NF4) return v;
    __m128i codes = _mm_loadu_si128((const __m128i *)nf4_codes);
    if (kind == UNSIGNED) codes = _mm_xor_si128(codes, _mm_set1_epi8(-128));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), v);
}

/* s[2r], s[2r + 1] += the products of one quad of every row with outputs 0..7 and 8..15. */
INLINE void quad_dots(__m256i *s, __m256i w0, __m256i w1, const int8_t *x, int64_t k, int R,
                      enum int8_product_kind kind) {
    const __m256i ones = _mm256_set1_epi16(1), w[2] = {w0, w1};
    __m256i a[2] = {_mm256_abs_epi8(w0), _mm256_abs_epi8(w1)};
    UNROLL for (int r = 0; r < R; r++) {
        __m256i xr = quad_broadcast(x + r * k);
        UNROLL for (int h = 0; h < 2; h++) {
            __m256i *sum = s + 2 * r + h;
            if (kind == UNSIGNED) {
                *sum = dot_u8(*sum, w[h], xr);
                continue;
            }
            if (kind == SIGNED) {
                __m256i t = _mm256_maddubs_epi16(a[h], _mm256_sign_epi8(xr, w[h]));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(t, ones));
            } else {
                *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(w[h], xr));
            }
            KEEP_IN_REGISTER(*sum);
        }
    }
}

/* The exact dots of block b, which is at `block`: s[2r] and s[2r + 1] are row r with outputs 0..7
 * and 8..15. */
INLINE void block_dots_q(__m256i *s, const struct panel_job *j, const uint8_t *block, int64_t b,
                         int R, enum matrix_layout l, enum int8_product_kind kind) {
    const int group = layout_group(l);
    const bool nibbles = l >= LAYOUT_Q4;
    const __m256i ones = _mm256_set1_epi16(1), offset = _mm256_set1_epi8(j->c);
    __m256i bias[4];
    UNROLL for (int r = 0; r < R; r++) {
        bias[r] =
            kind == SIGNED ? _mm256_setzero_si256() : quad_broadcast(j->bias + r * SUM_GROUPS + b);
        s[2 * r] = s[2 * r + 1] = bias[r];
    }
    for (int p = 0; p < (nibbles ? 4 : group / 4); p++) {
        const int8_t *x = j->x + b * group + 4 * p;
        __m256i w0 = _mm256_loadu_si256((const __m256i *)block + 2 * p),
                w1 = _mm256_loadu_si256((const __m256i *)block + 2 * p + 1);
        if (nibbles) {
            quad_dots(s, nibble_weights(w0, l, kind), nibble_weights(w1, l, kind), x, j->k, R,
                      kind);
            quad_dots(s, nibble_weights(_mm256_srli_epi16(w0, 4), l, kind),
                      nibble_weights(_mm256_srli_epi16(w1, 4), l, kind), x + QK / 2, j->k, R, kind);
        } else if (kind == NARROW || kind == UNSIGNED) {
            quad_dots(s, _mm256_add_epi8(w0, offset), _mm256_add_epi8(w1, offset), x, j->k, R,
                      kind);
        } else {
            quad_dots(s, w0, w1, x, j->k, R, kind);
        }
    }
    if (kind == SIGNED || kind == UNSIGNED) return;
    UNROLL for (int o = 0; o < 2 * R; o++) {
        s[o] = _mm256_madd_epi16(s[o], ones);
        if (kind == NARROW_CENTRED)
            s[o] = _mm256_sub_epi32(s[o], _mm256_madd_epi16(bias[o / 2], ones));
    }
}

/* 8 f16 values, unsigned bytes and signed bytes as f32. */
INLINE __m256 halves_widen(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
INLINE __m256 bytes_widen(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE __m256 signed_bytes_widen(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

/* The scales (nf4: the scale bytes) and the minima of outputs 8 · half … 8 · half + 7 in group i of
 * a record; see struct matrix. */
INLINE __m256 record_scales(const uint8_t *record, int64_t i, int half, enum matrix_layout l) {
    const int64_t at = i * PANEL + 8 * half;
    if (l == LAYOUT_NF4) return bytes_widen(record + i / 2 * PANEL + 8 * half);
    if (l == LAYOUT_Q8 || l == LAYOUT_Q4) return halves_widen(record + 2 * at);
    const uint8_t *s = record + 4 * PANEL + at;
    return _mm256_mul_ps(halves_widen(record + 16 * half),
                         l == LAYOUT_Q6 ? signed_bytes_widen(s) : bytes_widen(s));
}
INLINE __m256 record_mins(const uint8_t *record, int64_t i, int half, enum matrix_layout l) {
    const int64_t at = i * PANEL + 8 * half;
    if (l == LAYOUT_Q8 || l == LAYOUT_Q4) return halves_widen(record + 4 * PANEL + 2 * at);
    return _mm256_xor_ps(_mm256_mul_ps(halves_widen(record + 2 * PANEL + 16 * half),
                                       bytes_widen(record + 12 * PANEL + at)),
                         _mm256_set1_ps(-0.0f));
}

/* acc[R][PANEL] = fma((float)s_b, dw_b * dx_b, acc), blocks in order. */
INLINE void panel_dots(float *acc, const struct panel_job *j, int R, enum matrix_layout l,
                       enum int8_product_kind kind) {
    const int group = layout_group(l), per_record = record_groups(l);
    const uint8_t *record = j->record;
    for (int64_t b = 0; b < j->blocks; record += j->record_bytes) {
        const uint8_t *block = record + j->head_bytes;
        for (int64_t i = 0, n = MIN(per_record, j->blocks - b); i < n;
             i++, b++, block += layout_bytes(l)) {
            __m256i s[8];
            block_dots_q(s, j, block, b, R, l, kind);
            // before the stores, which could change the record as far as gcc knows
            const __m256 scales[2] = {record_scales(record, i, 0, l),
                                      record_scales(record, i, 1, l)};
            UNROLL for (int o = 0; o < 2 * R; o++) {
                __m256 dx = _mm256_broadcast_ss(j->dx + o / 2 * (j->k / QK) + b * group / QK);
                __m256 d = _mm256_mul_ps(scales[o % 2], dx), f = _mm256_loadu_ps(acc + 8 * o);
                _mm256_storeu_ps(acc + 8 * o, _mm256_fmadd_ps(_mm256_cvtepi32_ps(s[o]), d, f));
            }
        }
    }
}

/* Reduces the eight dwords of each of eight vectors with `op`: dword g is the result of vector
 * g. */
#define REDUCE_8(name, op)                                                                         \
    INLINE __m256i name(const __m256i m[8]) {                                                      \
        __m256i t[4], u[2];                                                                        \
        UNROLL for (int i = 0; i < 4; i++) t[i] =                                                  \
            op(_mm256_unpacklo_epi32(m[2 * i], m[2 * i + 1]),                                      \
               _mm256_unpackhi_epi32(m[2 * i], m[2 * i + 1]));                                     \
        UNROLL for (int i = 0; i < 2; i++) u[i] =                                                  \
            op(_mm256_unpacklo_epi64(t[2 * i], t[2 * i + 1]),                                      \
               _mm256_unpackhi_epi64(t[2 * i], t[2 * i + 1]));                                     \
        return op(_mm256_permute2x128_si256(u[0], u[1], 0x20),                                     \
                  _mm256_permute2x128_si256(u[0], u[1], 0x31));                                    \
    }
REDUCE_8(sum_of_8, _mm256_add_epi16) // each dword two 16-bit lanes
REDUCE_8(max_of_8, _mm256_max_epi32)

/* Computes the values -c Σx from which the 16-bit lanes of NARROW start. Of every quad of bytes,
 * the first pair belongs to one lane and the second pair to the other lane. */
static void bias_compute_narrow(int32_t *bias, const int8_t *x, int64_t groups, int group,
                                int8_t c) {
    const __m256i offset_32 = _mm256_set1_epi8(c);
    const __m128i offset_16 = _mm_set1_epi8(c);
    int64_t g = 0;
    for (; group == QK && g + 8 <= groups; g += 8) {
        __m256i m[8];
        UNROLL for (int i = 0; i < 8; i++) m[i] = _mm256_maddubs_epi16(
            offset_32, _mm256_loadu_si256((const __m256i *)(x + (g + i) * QK)));
        _mm256_storeu_si256((__m256i *)(bias + g),
                            _mm256_sub_epi16(_mm256_setzero_si256(), sum_of_8(m)));
    }
    for (x += g * group; g < groups; g++, x += group) {
        __m128i h = _mm_maddubs_epi16(offset_16, _mm_loadu_si128((const __m128i *)x));
        if (group == QK)
            h = _mm_add_epi16(
                h, _mm_maddubs_epi16(offset_16, _mm_loadu_si128((const __m128i *)(x + QK / 2))));
        h = _mm_add_epi16(h, _mm_shuffle_epi32(h, 0x4e));
        h = _mm_add_epi16(h, _mm_shuffle_epi32(h, 0xb1));
        bias[g] = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), h));
    }
}

/* Computes the values -c Σx of UNSIGNED. */
static void bias_compute_unsigned(int32_t *bias, const int8_t *x, int64_t groups, int group,
                                  int8_t c) {
    for (int64_t g = 0; g < groups; g++, x += group) {
        __m128i h = _mm_setzero_si128();
        for (int i = 0; i < group; i += 16) {
            __m128i v = _mm_loadu_si128((const __m128i *)(x + i)), ones = _mm_set1_epi16(1);
            h = _mm_add_epi32(h, _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), v), ones));
        }
        h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
        h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1));
        bias[g] = -(uint8_t)c * _mm_cvtsi128_si32(h);
    }
}

/* Stores the sums `acc` of a row and one panel to outputs n … n + 15, except those from n1 on. */
INLINE void panel_store(float *y, const float *acc, const struct matrix *w, int64_t n, int64_t n1,
                        bool add, enum matrix_layout l) {
    for (int half = 0; half < 2 && n + 8 * half < n1; half++) {
        int64_t at = n + 8 * half, left = n1 - at;
        __m256 v = _mm256_loadu_ps(acc + 8 * half);
        if (l == LAYOUT_NF4)
            v = _mm256_mul_ps(
                v, _mm256_div_ps(_mm256_loadu_ps(w->row_scales + at), _mm256_set1_ps(NF4_UNIT)));
        store_up_to_8(y + at, add ? _mm256_add_ps(load_up_to_8(y + at, left), v) : v, left);
    }
}

/* The offset c of NARROW and NARROW_CENTRED, and as an unsigned byte that of UNSIGNED. */
static int8_t offset_of(const struct matrix *w, enum int8_product_kind kind) {
    if (kind == UNSIGNED && (w->layout < LAYOUT_Q4 || w->layout == LAYOUT_NF4)) return -128;
    return w->layout == LAYOUT_Q6 ? 32 : w->layout >= LAYOUT_Q4 ? w->zero : 16;
}

/* Rows m..m+R times panels p0..p1. Outputs from n1 on (the padding of a panel) are computed but not
 * stored. `biased` is the first block that `bias` describes. */
INLINE void rows_packed(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                        int64_t m, int64_t p0, int64_t p1, int64_t n1, bool add, int R,
                        enum matrix_layout l, enum int8_product_kind kind) {
    int32_t bias[4 * SUM_GROUPS];
    const int64_t group = layout_group(l), blocks = w->k / group;
    const int8_t c = offset_of(w, kind);
    int64_t biased = -1;
    for (int64_t p = p0; p < p1; p++) {
        float acc[4 * PANEL] = {0};
        for (int64_t b = 0; b < blocks; b += SUM_GROUPS) {
            struct panel_job j = {.x = in->q + m * w->k + b * group,
                                  .dx = in->d + m * (w->k / QK) + b * group / QK,
                                  .bias = bias,
                                  .record = record_at(w, p, b),
                                  .k = w->k,
                                  .blocks = MIN(blocks - b, SUM_GROUPS),
                                  .head_bytes = w->head_bytes,
                                  .record_bytes = w->record_bytes,
                                  .c = c};
            for (int r = 0; kind != SIGNED && biased != b && r < R; r++)
                (kind == UNSIGNED ? bias_compute_unsigned : bias_compute_narrow)(
                    bias + r * SUM_GROUPS, j.x + r * w->k, j.blocks, (int)group, c);
            biased = b;
            panel_dots(acc, &j, R, l, kind);
        }
        for (int r = 0; r < R; r++)
            panel_store(y + (m + r) * ldy, acc + r * PANEL, w, p * PANEL, n1, add, l);
        prefetch_step(in->prefetch);
    }
}

INLINE void gemm_packed(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                        int64_t n0, int64_t n1, bool add, enum matrix_layout l,
                        enum int8_product_kind kind) {
    int64_t step = MAX(PANEL_BYTES / w->panel_bytes, 1);
    int64_t end = (n1 + PANEL - 1) / PANEL;
    prefetch_begin(in->prefetch, (end - n0 / PANEL) * ((in->rows + 3) / 4));
    for (int64_t p0 = n0 / PANEL; p0 < end; p0 += step) {
        int64_t p1 = MIN(p0 + step, end), m = 0;
        for (; m + 4 <= in->rows; m += 4)
            rows_packed(y, ldy, in, w, m, p0, p1, n1, add, 4, l, kind);
        for (; m + 2 <= in->rows; m += 2)
            rows_packed(y, ldy, in, w, m, p0, p1, n1, add, 2, l, kind);
        for (; m < in->rows; m++) rows_packed(y, ldy, in, w, m, p0, p1, n1, add, 1, l, kind);
    }
}

/* The products over the layouts with 8 and with 4 bits. `vnni`: all of them are UNSIGNED. */
INLINE void gemm_bytes(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                       int64_t n0, int64_t n1, bool add, bool vnni) {
    if (w->layout == LAYOUT_Q6)
        gemm_packed(y, ldy, in, w, n0, n1, add, LAYOUT_Q6, vnni ? UNSIGNED : NARROW);
    else if (w->layout == LAYOUT_Q8_K)
        gemm_packed(y, ldy, in, w, n0, n1, add, LAYOUT_Q8_K, vnni ? UNSIGNED : NARROW_CENTRED);
    else if (vnni)
        gemm_packed(y, ldy, in, w, n0, n1, add, LAYOUT_Q8, UNSIGNED);
    else if (w->type == TENSOR_Q5_0)
        gemm_packed(y, ldy, in, w, n0, n1, add, LAYOUT_Q8, NARROW);
    else if (w->type == TENSOR_Q8_0)
        gemm_packed(y, ldy, in, w, n0, n1, add, LAYOUT_Q8, SIGNED);
    else
        gemm_packed(y, ldy, in, w, n0, n1, add, LAYOUT_Q8, NARROW_CENTRED);
}

INLINE void gemm_nibbles(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                         int64_t n0, int64_t n1, bool add, bool vnni) {
    if (w->layout == LAYOUT_NF4)
        gemm_packed(y, ldy, in, w, n0, n1, add, LAYOUT_NF4, vnni ? UNSIGNED : SIGNED);
    else if (w->layout == LAYOUT_Q4_K)
        gemm_packed(y, ldy, in, w, n0, n1, add, LAYOUT_Q4_K, vnni ? UNSIGNED : NARROW);
    else
        gemm_packed(y, ldy, in, w, n0, n1, add, LAYOUT_Q4, vnni ? UNSIGNED : NARROW);
}

#define GEMM_Q(name, gemm, vnni)                                                                   \
    static void name(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,   \
                     int64_t n0, int64_t n1, bool add) {                                           \
        gemm(y, ldy, in, w, n0, n1, add, vnni);                                                    \
    }
GEMM_Q(gemm_q8, gemm_bytes, false)
GEMM_Q(gemm_q4, gemm_nibbles, false)
GEMM_Q(avxvnni_gemm_q8, gemm_bytes, true)
GEMM_Q(avxvnni_gemm_q4, gemm_nibbles, true)

static void mins_read(float *mins, const uint8_t *record, int g, enum matrix_layout l) {
    for (int half = 0; half < 2; half++)
        _mm256_storeu_ps(mins + 8 * half, record_mins(record, g, half, l));
}

static void record_read(float *scales, float *mins, const uint8_t *record, int g,
                        enum matrix_layout l) {
    for (int half = 0; half < 2; half++)
        _mm256_storeu_ps(scales + 8 * half, record_scales(record, g, half, l));
    if (mins) mins_read(mins, record, g, l);
}

/* lanes[l] += the products of the n activation sums and minima of blocks first + l, first + l + 16,
 * … for l < 8 and 8 outputs; the last step is padded with zeros. */
INLINE void mins_dot(__m256 lanes[8], const float *sum, const float (*mins)[PANEL], int64_t n,
                     int first, int half) {
    for (int64_t b = 0; b < n; b += 16) {
        float tail[16] = {0};
        const bool whole = b + 16 <= n;
        if (!whole) memcpy(tail, sum + b, (size_t)(n - b) * sizeof *tail);
        const float *at = (whole ? sum + b : tail) + first;
        UNROLL for (int l = 0; l < 8; l++) lanes[l] = _mm256_fmadd_ps(
            _mm256_broadcast_ss(at + l), _mm256_loadu_ps(mins[b + first + l] + 8 * half), lanes[l]);
    }
}

/* The dot of one row and 8 outputs of a panel. The lanes of the rule of gemm_f32 are sixteen
 * vectors, of which eight are in registers at a time. */
INLINE __m256 row_mins(const struct matrix *w, int64_t panel, const float *sum,
                       float (*mins)[PANEL], int half, bool widened) {
    const int64_t blocks = w->k / QK;
    __m256 lanes[16];
    UNROLL for (int l = 0; l < 16; l++) lanes[l] = _mm256_setzero_ps();
    for (int64_t b = 0; b < blocks; b += MINS_BLOCKS) {
        const int64_t n = MIN(blocks - b, MINS_BLOCKS);
        if (!widened) mins_widen_with(mins_read, mins, w, panel, b, n);
        for (int first = 0; first < 16; first += 8)
            mins_dot(lanes + first, sum + b, (const float(*)[PANEL])mins, n, first, half);
    }
    UNROLL for (int step = 8; step > 0; step /= 2) UNROLL for (int l = 0; l < step; l++) lanes[l] =
        _mm256_add_ps(lanes[l], lanes[l + step]);
    return lanes[0];
}

/* Few rows, or a K so long that the minima of a panel are widened again for each row. */
static void panel_mins(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                       int64_t panel, float (*mins)[PANEL], int64_t n) {
    const int64_t blocks = w->k / QK;
    for (int64_t m = 0; m < in->rows; m++)
        for (int half = 0; half < 2 && 8 * half < n; half++) {
            float *dst = y + m * ldy + 8 * half;
            const int64_t left = n - 8 * half;
            __m256 v = row_mins(w, panel, in->sum + m * blocks, mins, half, blocks <= MINS_BLOCKS);
            store_up_to_8(dst, _mm256_add_ps(load_up_to_8(dst, left), v), left);
        }
}

/* For several rows, the minima of a panel become rows of an f32 matrix. */
static void gemm_mins(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                      int64_t n0, int64_t n1) {
    enum { FEW_ROWS = 3 };
    const int64_t blocks = w->k / QK;
    float mins[MINS_BLOCKS][PANEL], rows[PANEL * MINS_BLOCKS];
    for (int64_t n = n0; n < n1; n += PANEL) {
        if (blocks <= MINS_BLOCKS) mins_widen_with(mins_read, mins, w, n / PANEL, 0, blocks);
        if (in->rows <= FEW_ROWS || blocks > MINS_BLOCKS) {
            panel_mins(y + n, ldy, in, w, n / PANEL, mins, MIN(n1 - n, PANEL));
            continue;
        }
        transpose_blocks(rows, blocks, mins[0], PANEL, blocks, PANEL);
        gemm_f32(y + n, ldy, in->sum, blocks, in->rows, rows, blocks, blocks, 0, MIN(n1 - n, PANEL),
                 true);
    }
}

/* The weights of sixteen outputs for the even k (half 0) or the odd k of a pair, as two vectors of
 * f32. */
INLINE void pair_load(__m256 v[2], const uint16_t *pairs, int half) {
    UNROLL for (int h = 0; h < 2; h++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(pairs + 16 * h));
        v[h] = _mm256_castsi256_ps(half ? _mm256_and_si256(both, _mm256_set1_epi32(-65536))
                                        : _mm256_slli_epi32(both, 16));
    }
}

/* One k of R rows and P panels, which are `stride` weights apart. */
INLINE void chains_step(__m256 *acc, const float *x, int64_t ldx, const uint16_t *pairs,
                        int64_t stride, int half, int R, int P) {
    UNROLL for (int p = 0; p < P; p++) {
        __m256 v[2];
        pair_load(v, pairs + p * stride, half);
        UNROLL for (int r = 0; r < R; r++) {
            __m256 a = _mm256_broadcast_ss(x + r * ldx + half);
            UNROLL for (int h = 0; h < 2; h++) {
                int o = (p * R + r) * 2 + h;
                acc[o] = _mm256_fmadd_ps(a, v[h], acc[o]);
            }
        }
    }
}

/* R rows and P panels over the whole K. R · P is at most 5, which takes ten accumulators, two
 * vectors of weights, one of x and a mask. With 6, gcc spills and is a third slower. */
INLINE void chains_tile(const struct bf16_gemm *c, int64_t m, int64_t panel, int R, int P) {
    const int64_t k = c->w->k, ldx = c->in->ldx;
    const uint16_t *pairs = bf16_panel(c->w, panel);
    const int64_t stride = bf16_panel(c->w, panel + 1) - pairs;
    const float *x = c->in->x + m * ldx;
    float sums[PANEL];
    __m256 acc[10];
    UNROLL for (int o = 0; o < 2 * R * P; o++) acc[o] = _mm256_setzero_ps();
    for (int64_t i = 0; i + 2 <= k; i += 2, x += 2, pairs += 2 * PANEL) {
        chains_step(acc, x, ldx, pairs, stride, 0, R, P);
        __asm__("" : "+r"(pairs)); // else gcc keeps the pairs in registers that the sums need
        chains_step(acc, x, ldx, pairs, stride, 1, R, P);
    }
    if (k % 2) chains_step(acc, x, ldx, pairs, stride, 0, R, P);
    UNROLL for (int o = 0; o < R * P; o++) {
        _mm256_storeu_ps(sums, acc[2 * o]);
        _mm256_storeu_ps(sums + 8, acc[2 * o + 1]);
        panel_store(c->y + (m + o % R) * c->ldy, sums, c->w, (panel + o / R) * PANEL, c->n1, c->add,
                    LAYOUT_BF16);
    }
}

#define CHAINS(R, P)                                                                               \
    static void chains_##R##x##P(const struct bf16_gemm *c, int64_t m, int64_t panel) {            \
        chains_tile(c, m, panel, R, P);                                                            \
    }
CHAINS(1, 4)
CHAINS(1, 1)
CHAINS(2, 2)
CHAINS(2, 1)
CHAINS(3, 1)
CHAINS(4, 1)
CHAINS(5, 1)

static void gemm_bf16_fast(float *y, int64_t ldy, const struct gemm_input *in,
                           const struct matrix *w, int64_t n0, int64_t n1, bool add) {
    static const struct bf16_gemm_tile tiles[] = {{4, chains_1x4, chains_1x1},
                                                  {2, chains_2x2, chains_2x1},
                                                  {1, chains_3x1, chains_3x1},
                                                  {1, chains_4x1, chains_4x1},
                                                  {1, chains_5x1, chains_5x1}};
    const struct bf16_gemm c = {y, ldy, in, w, n1, add};
    if (in->rows > 0) bf16_gemm_run(&c, n0, tiles, ARRAY_LEN(tiles));
}

/* Each lane of the result is the largest |v[i]| of this lane, as bits. Magnitudes compare like
 * integers, and a NaN is larger than all numbers. */
INLINE __m256i lanes_amax(const __m256 v[4]) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i m = _mm256_and_si256(_mm256_castps_si256(v[0]), magnitude);
    UNROLL for (int i = 1; i < 4; i++) m =
        _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    return m;
}

/* The largest of 32 magnitudes, as quantize_row defines it: NaN is ignored, at most FLT_MAX. */
INLINE float block_amax(const __m256 v[4]) {
    __m256 sign = _mm256_set1_ps(-0.0f), m = _mm256_setzero_ps();
    UNROLL for (int i = 0; i < 4; i++) m = _mm256_max_ps(_mm256_andnot_ps(sign, v[i]), m);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_min_ss(_mm_max_ss(h, _mm_movehdup_ps(h)), _mm_set_ss(FLT_MAX)));
}

INLINE __m256i lanes_quantize(__m256 x, __m256 inverse, bool finite) {
    __m256 u = _mm256_mul_ps(x, inverse);
    if (finite) return _mm256_cvtps_epi32(u); // |u| is 127 plus rounding errors at most
    __m256 real = _mm256_cmp_ps(u, u, _CMP_ORD_Q);
    u = _mm256_max_ps(_mm256_set1_ps(-127.0f), _mm256_min_ps(_mm256_set1_ps(127.0f), u));
    return _mm256_cvtps_epi32(_mm256_and_ps(u, real));
}

INLINE void lanes_store_i8(int8_t *q, const __m256 v[4], __m256 inverse, bool finite) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i a[4];
    UNROLL for (int i = 0; i < 4; i++) a[i] = lanes_quantize(v[i], inverse, finite);
    __m256i words =
        _mm256_packs_epi16(_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3]));
    _mm256_storeu_si256((__m256i *)q, _mm256_permutevar8x32_epi32(words, order));
}

INLINE void block_load(__m256 v[4], const float *x, int64_t b) {
    UNROLL for (int i = 0; i < 4; i++) v[i] = _mm256_loadu_ps(x + b * QK + 8 * i);
}

INLINE void block_quantize(const float *x, int64_t b, int8_t *q, float *d) {
    __m256 v[4];
    block_load(v, x, b);
    float scale = block_amax(v) / 127.0f;
    bool tiny = scale < FLT_MIN;
    d[b] = tiny ? 0.0f : scale;
    lanes_store_i8(q + b * QK, v, _mm256_set1_ps(tiny ? 0.0f : 1.0f / scale), false);
}

/* Computes the scales of eight blocks and their inverses with two divisions for all eight. Returns
 * false if a value is not finite; the scale of its block is then wrong. */
INLINE bool scales_compute(const float *x, int64_t b, float max, float *d, float *inverse) {
    __m256 v[4];
    __m256i m[8];
    UNROLL for (int i = 0; i < 8; i++) {
        block_load(v, x, b + i);
        m[i] = lanes_amax(v);
    }
    __m256i amax = max_of_8(m),
            not_finite = _mm256_cmpgt_epi32(amax, _mm256_set1_epi32(0x7f7fffff));
    __m256 scale = _mm256_div_ps(_mm256_castsi256_ps(amax), _mm256_set1_ps(max)),
           tiny = _mm256_cmp_ps(scale, _mm256_set1_ps(FLT_MIN), _CMP_LT_OQ);
    _mm256_storeu_ps(d + b, _mm256_andnot_ps(tiny, scale));
    _mm256_storeu_ps(inverse, _mm256_andnot_ps(tiny, _mm256_div_ps(_mm256_set1_ps(1.0f), scale)));
    return _mm256_testz_si256(not_finite, not_finite);
}

/* Computes the scales of up to MANY blocks before it quantises the first of them, so that the
 * divisions overlap. */
static void quantize_row(const float *x, int64_t k, int8_t *q, float *d) {
    enum { MANY = 64 };
    int64_t b = 0, blocks = k / QK;
    for (int64_t n; b + 8 <= blocks; b += n) {
        float inverse[MANY];
        bool finite[MANY / 8];
        n = MIN(blocks - b, MANY) / 8 * 8;
        for (int64_t i = 0; i < n; i += 8)
            finite[i / 8] = scales_compute(x, b + i, 127.0f, d, inverse + i);
        for (int64_t i = 0; i < n; i++) {
            __m256 v[4];
            if (!finite[i / 8]) {
                block_quantize(x, b + i, q, d);
                continue;
            }
            block_load(v, x, b + i);
            lanes_store_i8(q + (b + i) * QK, v, _mm256_broadcast_ss(inverse + i), true);
        }
    }
    for (; b < blocks; b++) block_quantize(x, b, q, d);
}

/* The four sums of eight bytes each of a block, after adding 128 to each byte. */
INLINE __m256i bytes_sum(const int8_t *q) {
    return _mm256_sad_epu8(
        _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)q), _mm256_set1_epi8(-128)),
        _mm256_setzero_si256());
}

/* Adds the 64-bit halves of each half of a and b: [a b | a b]. */
INLINE __m256i pairs_add(__m256i a, __m256i b) {
    return _mm256_add_epi64(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

static void block_sums(int32_t *q_sum, float *sum, const int8_t *q, const float *d,
                       int64_t blocks) {
    const __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    int64_t b = 0;
    for (; b + 4 <= blocks; b += 4, q += 4 * QK) {
        const __m256i ab = pairs_add(bytes_sum(q), bytes_sum(q + QK)),
                      cd = pairs_add(bytes_sum(q + 2 * QK), bytes_sum(q + 3 * QK)),
                      all = _mm256_add_epi64(_mm256_permute2x128_si256(ab, cd, 0x20),
                                             _mm256_permute2x128_si256(ab, cd, 0x31));
        const __m128i s =
            _mm_sub_epi32(_mm256_castsi256_si128(_mm256_permutevar8x32_epi32(all, even)),
                          _mm_set1_epi32(QK * 128));
        _mm_storeu_si128((__m128i *)(q_sum + b), s);
        _mm_storeu_ps(sum + b, _mm_mul_ps(_mm_loadu_ps(d + b), _mm_cvtepi32_ps(s)));
    }
    for (; b < blocks; b++, q += QK) {
        q_sum[b] = block_sum(q);
        sum[b] = d[b] * (float)q_sum[b];
    }
}

/* Packs four vectors of 32-bit integers as 16-bit integers, in order. */
INLINE void words_store(int16_t *q, const __m256i a[4]) {
    UNROLL for (int i = 0; i < 4; i += 2) {
        __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a[i], a[i + 1]), 0xd8);
        _mm256_storeu_si256((__m256i *)(q + 8 * i), words);
    }
}

static void block_quantize16(const float *x, int64_t b, int16_t *q, float *d) {
    const __m256 limit = _mm256_set1_ps(QUANTIZED16_MAX);
    __m256 v[4];
    __m256i a[4];
    block_load(v, x, b);
    float scale = block_amax(v) / QUANTIZED16_MAX;
    bool tiny = scale < FLT_MIN;
    __m256 inverse = _mm256_set1_ps(tiny ? 0.0f : 1.0f / scale);
    d[b] = tiny ? 0.0f : scale;
    UNROLL for (int i = 0; i < 4; i++) {
        __m256 u = _mm256_mul_ps(v[i], inverse), real = _mm256_cmp_ps(u, u, _CMP_ORD_Q);
        u = _mm256_max_ps(_mm256_sub_ps(_mm256_setzero_ps(), limit), _mm256_min_ps(limit, u));
        a[i] = _mm256_cvtps_epi32(_mm256_and_ps(u, real));
    }
    words_store(q + b * QK, a);
}

static void quantize_row16(const float *x, int64_t k, int16_t *q, float *d) {
    int64_t b = 0, blocks = k / QK;
    for (; b + 8 <= blocks; b += 8) {
        float inverse[8];
        bool finite = scales_compute(x, b, QUANTIZED16_MAX, d, inverse);
        for (int i = 0; i < 8; i++) {
            __m256 v[4], by = _mm256_broadcast_ss(inverse + i);
            __m256i a[4];
            if (!finite) {
                block_quantize16(x, b + i, q, d);
                continue;
            }
            block_load(v, x, b + i);
            UNROLL for (int h = 0; h < 4; h++) a[h] = _mm256_cvtps_epi32(_mm256_mul_ps(v[h], by));
            words_store(q + (b + i) * QK, a);
        }
    }
    for (; b < blocks; b++) block_quantize16(x, b, q, d);
}

static void multiply_to_int8(const int16_t *x, const int16_t *by, int64_t k, int8_t *q) {
    const __m256i byte = _mm256_set1_epi16(128);
    for (int64_t i = 0; i < k; i += QK) {
        __m256i h[2];
        UNROLL for (int j = 0; j < 2; j++) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(x + i + 16 * j)),
                    b = _mm256_loadu_si256((const __m256i *)(by + i + 16 * j));
            h[j] = _mm256_mulhrs_epi16(_mm256_mulhrs_epi16(a, b), byte);
        }
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(h[0], h[1]), 0xd8);
        _mm256_storeu_si256((__m256i *)(q + i), bytes);
    }
}

static float dot_row(const float *a, const float *b, int64_t n) {
    float s;
    block_1x1(&s, a, b, n, false, DTYPE_F32);
    return s;
}

static float sum_row(const float *a, int64_t n) {
    __m256 lo = _mm256_setzero_ps(), hi = lo;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        lo = _mm256_add_ps(lo, _mm256_loadu_ps(a + i));
        hi = _mm256_add_ps(hi, _mm256_loadu_ps(a + i + 8));
    }
    lo = _mm256_add_ps(lo, tail_load(a + i, n - i));
    hi = _mm256_add_ps(hi, tail_load(a + i + 8, n - i - 8));
    return tree_one(_mm256_add_ps(lo, hi));
}

static float max_row(const float *a, int64_t n) {
    __m256 none = _mm256_set1_ps(-INFINITY), m = none, m2 = none;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) { // MAXPS gives its second operand when the first is NaN
        m = _mm256_max_ps(_mm256_loadu_ps(a + i), m);
        m2 = _mm256_max_ps(_mm256_loadu_ps(a + i + 8), m2);
    }
    for (; i < n; i += 8) {
        __m256 keep = _mm256_castsi256_ps(tail_mask(n - i));
        m = _mm256_max_ps(_mm256_blendv_ps(none, tail_load(a + i, n - i), keep), m);
    }
    m = _mm256_max_ps(m, m2);
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h))) + 0.0f;
}

static void axpy_row(float *y, float a, const float *x, int64_t n) {
    __m256 av = _mm256_set1_ps(a);
    for (int64_t i = 0; i < n; i += 8)
        store_up_to_8(y + i,
                      _mm256_fmadd_ps(av, load_up_to_8(x + i, n - i), load_up_to_8(y + i, n - i)),
                      n - i);
}

static void scale_row(float *y, float a, int64_t n) {
    __m256 av = _mm256_set1_ps(a);
    for (int64_t i = 0; i < n; i += 8)
        store_up_to_8(y + i, _mm256_mul_ps(load_up_to_8(y + i, n - i), av), n - i);
}

/* 32 bits at a time; their numbers are compared in 16-bit lanes, which are in order. */
static void mask_random_row(uint8_t *mask, const uint32_t *random, int64_t n, uint32_t threshold) {
    const __m256i least = _mm256_set1_epi16((short)threshold);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i *v = (const __m256i *)(const void *)(random + i / 2);
        const __m256i a = _mm256_loadu_si256(v), b = _mm256_loadu_si256(v + 1),
                      kept_a = _mm256_cmpeq_epi16(_mm256_max_epu16(a, least), a),
                      kept_b = _mm256_cmpeq_epi16(_mm256_max_epu16(b, least), b),
                      bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(kept_a, kept_b), 0xD8);
        const int bits = _mm256_movemask_epi8(bytes);
        memcpy(mask + i / 8, &bits, sizeof bits);
    }
    mask_random_from(mask, random, i, n, threshold);
}

static void mask_multiply_row(float *y, const float *x, const uint8_t *mask, float factor,
                              int64_t n, bool add) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 factors = _mm256_set1_ps(factor);
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(mask[i / 8]), bit),
                      kept = _mm256_cmpeq_epi32(bits, bit);
        __m256 v = _mm256_mul_ps(load_up_to_8(x + i, n - i),
                                 _mm256_and_ps(_mm256_castsi256_ps(kept), factors));
        if (add) v = _mm256_add_ps(load_up_to_8(y + i, n - i), v);
        store_up_to_8(y + i, v, n - i);
    }
}

static void rmsnorm_row(float *y, const float *x, const float *g, float eps, int64_t n) {
    __m256 r = _mm256_set1_ps(1.0f / sqrtf(dot_row(x, x, n) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_mul_ps(load_up_to_8(x + i, n - i), r);
        store_up_to_8(y + i, _mm256_mul_ps(v, load_up_to_8(g + i, n - i)), n - i);
    }
}

static void rope_row(float *x, const float *cosine, const float *sine, int64_t half) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    for (int64_t i = 0; i < half; i += 8) {
        int64_t n = half - i;
        __m256 a = load_up_to_8(x + i, n), b = load_up_to_8(x + half + i, n);
        __m256 c = load_up_to_8(cosine + i, n), s = load_up_to_8(sine + i, n);
        store_up_to_8(x + i, _mm256_fmadd_ps(a, c, _mm256_xor_ps(_mm256_mul_ps(b, s), sign)), n);
        store_up_to_8(x + half + i, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)), n);
    }
}

/* 2^n for n in -126..127; the result for other n (only after a NaN) is unspecified. */
INLINE __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

/* The exp of internal.h. The instructions MINPS and MAXPS return their second operand if an operand
 * is NaN. */
INLINE __m256 exp_lanes(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(EXP_LO), _mm256_min_ps(_mm256_set1_ps(EXP_HI), x));
    __m256 magic = _mm256_set1_ps(EXP_MAGIC);
    __m256 t = _mm256_fmadd_ps(x, _mm256_set1_ps(EXP_LOG2E), magic), z = _mm256_sub_ps(t, magic);
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_castps_si256(magic));
    __m256 r = _mm256_fmadd_ps(z, _mm256_set1_ps(-EXP_LN2_HI), x);
    r = _mm256_fmadd_ps(z, _mm256_set1_ps(-EXP_LN2_LO), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(EXP_C6), r, _mm256_set1_ps(EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    __m256i half = _mm256_srai_epi32(n, 1);
    p = _mm256_mul_ps(_mm256_mul_ps(p, power_of_two(half)),
                      power_of_two(_mm256_sub_epi32(n, half)));
    return _mm256_min_ps(_mm256_set1_ps(FLT_MAX), p);
}

static void silu_mul_row(float *y, const float *gate, const float *up, int64_t n) {
    __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 g = load_up_to_8(gate + i, n - i), e = exp_lanes(_mm256_xor_ps(g, sign));
        __m256 v = _mm256_div_ps(g, _mm256_add_ps(one, e));
        store_up_to_8(y + i, _mm256_mul_ps(v, load_up_to_8(up + i, n - i)), n - i);
    }
}

static void gelu_row(float *y, const float *x, int64_t n) {
    __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 v = load_up_to_8(x + i, n - i);
        __m256 u = _mm256_mul_ps(v, _mm256_fmadd_ps(_mm256_mul_ps(v, v), _mm256_set1_ps(GELU_CUBIC),
                                                    _mm256_set1_ps(GELU_LINEAR)));
        __m256 denominator = _mm256_add_ps(one, exp_lanes(_mm256_xor_ps(u, sign)));
        store_up_to_8(y + i, _mm256_div_ps(v, denominator), n - i);
    }
}

static void exp_row(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += 8)
        store_up_to_8(y + i, exp_lanes(load_up_to_8(x + i, n - i)), n - i);
}

static void act_backward(float *dx, float *dup, const float *dy, const float *x, const float *up,
                         int64_t n, bool gelu) {
    act_backward_with(exp_row, dx, dup, dy, x, up, n, gelu);
}

static void softmax_backward(float *dp, const float *p, float mean, float scale, int64_t n) {
    softmax_backward_with(dp, p, mean, scale, n);
}

static void norm_gain_backward(const struct norm_rows *rows, float *dg, float *db) {
    norm_gain_backward_with(rows, dg, db);
}

static void norm_backward(float *dx, float *dy, const float *x, const float *g, float mean,
                          float rstd, bool centred, int64_t n, bool add) {
    norm_backward_with(dot_row, sum_row, dx, dy, x, g, mean, rstd, centred, n, add);
}

static float softmax_row(float *x, int64_t n) {
    __m256 m = _mm256_set1_ps(max_row(x, n));
    for (int64_t i = 0; i < n; i += 8)
        store_up_to_8(x + i, exp_lanes(_mm256_sub_ps(load_up_to_8(x + i, n - i), m)), n - i);
    return sum_row(x, n);
}

static void adamw_row(float *w, const float *g, float *m, float *v, int64_t n, float lr,
                      float beta1, float beta2, float eps, float decay, float bc1, float bc2) {
    __m256 keep = _mm256_set1_ps(1.0f - lr * decay), b1 = _mm256_set1_ps(beta1),
           b2 = _mm256_set1_ps(beta2);
    __m256 rest1 = _mm256_set1_ps(1.0f - beta1), rest2 = _mm256_set1_ps(1.0f - beta2),
           step = _mm256_set1_ps(-lr);
    __m256 c1 = _mm256_set1_ps(bc1), c2 = _mm256_set1_ps(bc2), ev = _mm256_set1_ps(eps);
    for (int64_t i = 0; i < n; i += 8) {
        int64_t left = n - i;
        __m256 gv = load_up_to_8(g + i, left), wv = load_up_to_8(w + i, left);
        __m256 mv = _mm256_fmadd_ps(b1, load_up_to_8(m + i, left), _mm256_mul_ps(rest1, gv));
        __m256 vv = _mm256_fmadd_ps(b2, load_up_to_8(v + i, left),
                                    _mm256_mul_ps(rest2, _mm256_mul_ps(gv, gv)));
        __m256 root = _mm256_add_ps(_mm256_sqrt_ps(_mm256_div_ps(vv, c2)), ev);
        __m256 move = _mm256_div_ps(_mm256_div_ps(mv, c1), root);
        store_up_to_8(m + i, mv, left);
        store_up_to_8(v + i, vv, left);
        store_up_to_8(w + i, _mm256_fmadd_ps(step, move, _mm256_mul_ps(wv, keep)), left);
    }
}

/* Rounds as round_to_int, clips to lo..hi, and converts back to f32. */
INLINE __m256 lanes_round(__m256 v, __m256i lo, __m256i hi) {
    const __m256i bits = _mm256_castps_si256(_mm256_add_ps(v, _mm256_set1_ps(0x1.8p+23f)));
    const __m256i n = _mm256_sub_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)),
                                       _mm256_set1_epi32(0x400000));
    return _mm256_cvtepi32_ps(_mm256_min_epi32(_mm256_max_epi32(n, lo), hi));
}

INLINE __m256 lanes_abs(__m256 v) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
}

/* The integers of eight blocks of n weights, one block per lane, to q [8][n]. */
INLINE void lanes_store_bytes(int8_t *q, const __m256 *v, int n) {
    for (int i = 0; i < n; i++) {
        int32_t lane[8];
        _mm256_storeu_si256((__m256i *)lane, _mm256_cvttps_epi32(v[i]));
        for (int l = 0; l < 8; l++) q[l * n + i] = (int8_t)lane[l];
    }
}

/* Eight blocks x [8][n] with one block per lane. */
INLINE void lanes_load_blocks(__m256 *x, const float *blocks, int n) {
    float columns[QK * 8];
    transpose_blocks(columns, 8, blocks, n, 8, n);
    for (int i = 0; i < n; i++) x[i] = _mm256_loadu_ps(columns + i * 8);
}

/* Eight blocks of affine_fit, one per lane. */
struct affine_lanes {
    __m256 x[QK], w[QK], q[QK];
    __m256 sum_w, sum_x; /* Σ w, Σ w x */
    __m256 lo, hi;       /* the range */
    __m256i top;
};

static void affine_lanes_init(struct affine_lanes *a, const float *blocks, int top) {
    lanes_load_blocks(a->x, blocks, QK);
    __m256 squares = _mm256_setzero_ps();
    a->lo = a->hi = a->x[0];
    for (int i = 0; i < QK; i++) {
        a->lo = _mm256_min_ps(a->x[i], a->lo); // x < lo ? x : lo
        a->hi = _mm256_max_ps(a->x[i], a->hi);
        squares = _mm256_add_ps(squares, _mm256_mul_ps(a->x[i], a->x[i]));
    }
    const __m256 zero = _mm256_setzero_ps();
    a->lo = _mm256_andnot_ps(_mm256_cmp_ps(a->lo, zero, _CMP_GT_OQ), a->lo);
    const __m256 mean = _mm256_sqrt_ps(_mm256_div_ps(squares, _mm256_set1_ps(QK)));
    for (int i = 0; i < QK; i++) {
        a->w[i] = _mm256_add_ps(mean, lanes_abs(a->x[i]));
        const __m256 wx = _mm256_mul_ps(a->w[i], a->x[i]);
        a->sum_w = i ? _mm256_add_ps(a->sum_w, a->w[i]) : a->w[i];
        a->sum_x = i ? _mm256_add_ps(a->sum_x, wx) : wx;
    }
    a->top = _mm256_set1_epi32(top);
}

INLINE void affine_lanes_round(struct affine_lanes *a, __m256 inverse, __m256 lo) {
    for (int i = 0; i < QK; i++)
        a->q[i] = lanes_round(_mm256_mul_ps(inverse, _mm256_sub_ps(a->x[i], lo)),
                              _mm256_setzero_si256(), a->top);
}

INLINE __m256 affine_lanes_error(const struct affine_lanes *a, __m256 scale, __m256 min) {
    __m256 error = _mm256_setzero_ps();
    for (int i = 0; i < QK; i++) {
        const __m256 diff =
            _mm256_sub_ps(_mm256_add_ps(_mm256_mul_ps(scale, a->q[i]), min), a->x[i]);
        error = _mm256_add_ps(error, _mm256_mul_ps(a->w[i], _mm256_mul_ps(diff, diff)));
    }
    return error;
}

/* The scale and minimum with the smallest error for a->q; returns the lanes that have a unique
 * solution. */
INLINE __m256 affine_lanes_solve(const struct affine_lanes *a, __m256 *scale, __m256 *min) {
    const __m256 zero = _mm256_setzero_ps();
    __m256 l = zero, l2 = zero, xl = zero;
    for (int i = 0; i < QK; i++) {
        const __m256 wq = _mm256_mul_ps(a->w[i], a->q[i]);
        l = _mm256_add_ps(l, wq);
        l2 = _mm256_add_ps(l2, _mm256_mul_ps(wq, a->q[i]));
        xl = _mm256_add_ps(xl, _mm256_mul_ps(wq, a->x[i]));
    }
    const __m256 det = _mm256_sub_ps(_mm256_mul_ps(a->sum_w, l2), _mm256_mul_ps(l, l));
    *scale =
        _mm256_div_ps(_mm256_sub_ps(_mm256_mul_ps(a->sum_w, xl), _mm256_mul_ps(a->sum_x, l)), det);
    *min = _mm256_div_ps(_mm256_sub_ps(_mm256_mul_ps(l2, a->sum_x), _mm256_mul_ps(l, xl)), det);
    const __m256 above = _mm256_cmp_ps(*min, zero, _CMP_GT_OQ);
    *scale = _mm256_blendv_ps(*scale, _mm256_div_ps(xl, l2), above);
    *min = _mm256_andnot_ps(above, *min);
    return _mm256_cmp_ps(det, zero, _CMP_GT_OQ);
}

static void affine_fit(const float *x, const struct affine_search *s, float *scale, float *min,
                       int8_t *q) {
    struct affine_lanes a;
    affine_lanes_init(&a, x, s->top);
    const __m256 top = _mm256_set1_ps((float)s->top),
                 active = _mm256_cmp_ps(a.hi, a.lo, _CMP_NEQ_UQ);
    // The best candidate; its integers are computed again from `inverse` and `from` at the end.
    __m256 inverse = _mm256_div_ps(top, _mm256_sub_ps(a.hi, a.lo)), from = a.lo, best_min = a.lo;
    __m256 best_scale = _mm256_and_ps(active, _mm256_div_ps(_mm256_set1_ps(1), inverse));
    affine_lanes_round(&a, inverse, from);
    __m256 error = affine_lanes_error(&a, best_scale, best_min);
    for (int step = 0; step <= s->steps; step++) {
        __m256 new_scale, new_min;
        const __m256 range = _mm256_set1_ps(s->from + s->by * (float)step + (float)s->top),
                     new_inverse = _mm256_div_ps(range, _mm256_sub_ps(a.hi, best_min));
        affine_lanes_round(&a, new_inverse, best_min);
        const __m256 solved = affine_lanes_solve(&a, &new_scale, &new_min),
                     new_error = affine_lanes_error(&a, new_scale, new_min),
                     better = _mm256_and_ps(_mm256_and_ps(active, solved),
                                            _mm256_cmp_ps(new_error, error, _CMP_LT_OQ));
        inverse = _mm256_blendv_ps(inverse, new_inverse, better);
        from = _mm256_blendv_ps(from, best_min, better);
        best_scale = _mm256_blendv_ps(best_scale, new_scale, better);
        best_min = _mm256_blendv_ps(best_min, new_min, better);
        error = _mm256_blendv_ps(error, new_error, better);
    }
    affine_lanes_round(&a, inverse, from);
    for (int i = 0; i < QK; i++) a.q[i] = _mm256_and_ps(active, a.q[i]);
    lanes_store_bytes(q, a.q, QK);
    _mm256_storeu_ps(scale, best_scale);
    _mm256_storeu_ps(min, best_min);
}

INLINE __m256 symmetric_lanes_round(__m256 x, __m256 inverse) {
    return lanes_round(_mm256_mul_ps(inverse, x), _mm256_set1_epi32(-32), _mm256_set1_epi32(31));
}

/* symmetric_fit of eight groups, one per lane. */
INLINE void symmetric_fit_lanes(const float *groups, float *scale, int8_t *q) {
    const __m256 zero = _mm256_setzero_ps();
    __m256 x[Q6_GROUP], w[Q6_GROUP], wx[Q6_GROUP], amax = zero, extreme = zero, best = zero;
    lanes_load_blocks(x, groups, Q6_GROUP);
    for (int i = 0; i < Q6_GROUP; i++) {
        const __m256 larger = _mm256_cmp_ps(lanes_abs(x[i]), amax, _CMP_GT_OQ);
        amax = _mm256_blendv_ps(amax, lanes_abs(x[i]), larger);
        extreme = _mm256_blendv_ps(extreme, x[i], larger);
        w[i] = _mm256_mul_ps(x[i], x[i]);
        wx[i] = _mm256_mul_ps(w[i], x[i]);
    }
    const __m256 near_zero = _mm256_cmp_ps(amax, _mm256_set1_ps(1e-15f), _CMP_LT_OQ);
    __m256 inverse = zero, best_scale = zero;
    for (int t = 0; t < SYMMETRIC_RANGES; t++) {
        const __m256 tried = _mm256_div_ps(_mm256_set1_ps(-symmetric_range(t)), extreme);
        __m256 xl = zero, l2 = zero;
        for (int i = 0; i < Q6_GROUP; i++) {
            const __m256 l = symmetric_lanes_round(x[i], tried);
            xl = _mm256_add_ps(xl, _mm256_mul_ps(wx[i], l));
            l2 = _mm256_add_ps(l2, _mm256_mul_ps(_mm256_mul_ps(w[i], l), l));
        }
        __m256 better = _mm256_and_ps(
            _mm256_cmp_ps(l2, zero, _CMP_GT_OQ),
            _mm256_cmp_ps(_mm256_mul_ps(xl, xl), _mm256_mul_ps(best, l2), _CMP_GT_OQ));
        if (t == 0) better = _mm256_cmp_ps(zero, zero, _CMP_EQ_OQ);
        const __m256 new_scale =
            _mm256_and_ps(_mm256_cmp_ps(l2, zero, _CMP_NEQ_UQ), _mm256_div_ps(xl, l2));
        inverse = _mm256_blendv_ps(inverse, tried, better);
        best_scale = _mm256_blendv_ps(best_scale, new_scale, better);
        best = _mm256_blendv_ps(best, _mm256_mul_ps(new_scale, xl), better);
    }
    for (int i = 0; i < Q6_GROUP; i++)
        x[i] =
            _mm256_blendv_ps(symmetric_lanes_round(x[i], inverse), _mm256_set1_ps(-32), near_zero);
    lanes_store_bytes(q, x, Q6_GROUP);
    _mm256_storeu_ps(scale, _mm256_andnot_ps(near_zero, best_scale));
}

static void symmetric_fit(const float *x, float *scale, int8_t *q) {
    for (int j = 0; j < Q6_GROUPS; j += 8)
        symmetric_fit_lanes(x + j * Q6_GROUP, scale + j, q + j * Q6_GROUP);
}

void kernels_fill_avx2(struct kernels *k) {
    k->gemm_f32 = gemm_f32;
    k->gemm_bf16 = gemm_bf16;
    k->gemm_f16 = gemm_f16;
    k->gemm_i8 = gemm_i8;
    k->gemm_nn_f32 = gemm_nn_f32;
    k->gemm_nn_bf16 = gemm_nn_bf16;
    k->gemm_nn_f16 = gemm_nn_f16;
    k->gemm_nn_i8 = gemm_nn_i8;
    k->gemm_i8_i8 = gemm_i8_i8;
    k->gemm_nn_i16_i8 = gemm_nn_i16_i8;
    k->gemm_q8 = gemm_q8;
    k->gemm_q4 = gemm_q4;
    k->gemm_mins = gemm_mins;
    k->record_read = record_read;
    k->gemm_bf16_fast = gemm_bf16_fast;
    k->quantize_row = quantize_row;
    k->block_sums = block_sums;
    k->quantize_row16 = quantize_row16;
    k->multiply_to_int8 = multiply_to_int8;
    k->affine_fit = affine_fit;
    k->symmetric_fit = symmetric_fit;
    k->transpose = transpose_blocks;
    k->dot = dot_row;
    k->sum = sum_row;
    k->max = max_row;
    k->axpy = axpy_row;
    k->scale = scale_row;
    k->mask_random = mask_random_row;
    k->mask_multiply = mask_multiply_row;
    k->rmsnorm = rmsnorm_row;
    k->rope = rope_row;
    k->silu_mul = silu_mul_row;
    k->gelu = gelu_row;
    k->exp = exp_row;
    k->softmax = softmax_row;
    k->act_backward = act_backward;
    k->softmax_backward = softmax_backward;
    k->norm_gain_backward = norm_gain_backward;
    k->norm_backward = norm_backward;
    k->adamw = adamw_row;
}

void kernels_fill_avxvnni(struct kernels *k) {
    k->gemm_q8 = avxvnni_gemm_q8;
    k->gemm_q4 = avxvnni_gemm_q4;
}
