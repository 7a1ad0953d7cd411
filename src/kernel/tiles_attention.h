/*
 * tiles_attention: causal attention in bf16 tiles, forward and backward: the fast class (tiles.h).
 *
 * A query is one head of one row: query r * n_heads + h. Products are computed transposed, [keys or
 * elements of a head][16 queries], so the lanes of a vector are 16 queries. Maxima, sums and masks
 * then need no operation across lanes, and probabilities are stored in the order in which the
 * second product reads them. Only queries, values and results are transposed, never the matrix of
 * scores.
 *
 * Blocks of KEY_BLOCK keys are packed once for up to QUERY_BLOCK queries. Between blocks each query
 * has a running maximum, a sum and an unnormalized output (online softmax, Milakov and Gimelshein
 * 2018).
 *
 * Invariant: a query's result does not depend on other queries. Key tiles and blocks begin at fixed
 * positions. A tile in which a query attends to no key leaves the bits of this query's sums
 * unchanged.
 */
#ifndef SHOAL_KERNEL_TILES_ATTENTION_H
#define SHOAL_KERNEL_TILES_ATTENTION_H

#include <math.h>
#include <string.h>

#include "kernel/tiles.h"

enum {
    KEY_TILE = 32,     /* keys of one tile of values or probabilities */
    KEY_BLOCK = 128,   /* keys between two updates of the running maximum */
    QUERY_BLOCK = 512, /* queries that share the packed keys */
};

/* 2^r on |r| <= 1/2 as 1 + r (C1 + r (C2 + r (C3 + r C4))), minimax fit, 2.8e-6 relative. */
#define EXP2_C1 0x1.62e12cp-1f
#define EXP2_C2 0x1.ec0378p-3f
#define EXP2_C3 0x1.c9fc4ap-5f
#define EXP2_C4 0x1.3a02d0p-7f
#define EXP2_LO (-126.0f) /* replaces smaller arguments */
#define LOG2_E 0x1.715476p+0f

/* Forward pass: up to QUERY_BLOCK queries and the packed keys of one block. */
struct query_block {
    const struct attention_job *job;
    int64_t e, ep;        /* E, and rounded up to 32 */
    int64_t begin, n;     /* queries [begin, begin + n) of the job */
    uint16_t *q;          /* [QUERY_BLOCK/16][Ep/32][16 pairs of elements][16 queries][2] */
    uint16_t *k;          /* [KEY_BLOCK/16][Ep/32][16 keys][32 elements] */
    uint16_t *v;          /* [KEY_BLOCK/32][Ep/16][16 elements][32 keys] */
    float *s;             /* [KEY_BLOCK][16 queries] scores of one tile of queries */
    uint16_t *p;          /* [KEY_BLOCK/32][16 pairs of keys][16 queries][2] their probabilities */
    float *out;           /* [QUERY_BLOCK/16][Ep][16 queries] unnormalized outputs */
    float *max, *sum;     /* [QUERY_BLOCK] running maximum of score · scale · log2(e), and sum */
    int32_t *first, *end; /* [QUERY_BLOCK] keys [first, end) that the query attends to */
};

/* Places the arrays in `base` and returns their size in bytes. If `base` is NULL, it only computes
 * the size. */
static size_t query_block_layout(struct query_block *b, int64_t e, uint8_t *base) {
    size_t used = 0;
    b->e = e;
    b->ep = (e + 31) / 32 * 32;
    b->q = bump_alloc(base, &used, (size_t)(QUERY_BLOCK * b->ep * 2));
    b->k = bump_alloc(base, &used, (size_t)(KEY_BLOCK * b->ep * 2));
    b->v = bump_alloc(base, &used, (size_t)(KEY_BLOCK * b->ep * 2));
    b->s = bump_alloc(base, &used, (size_t)(KEY_BLOCK * PANEL * 4));
    b->p = bump_alloc(base, &used, (size_t)(KEY_BLOCK * PANEL * 2));
    b->out = bump_alloc(base, &used, (size_t)(QUERY_BLOCK * b->ep * 4));
    b->max = bump_alloc(base, &used, (size_t)(QUERY_BLOCK * 4));
    b->sum = bump_alloc(base, &used, (size_t)(QUERY_BLOCK * 4));
    b->first = bump_alloc(base, &used, (size_t)(QUERY_BLOCK * 4));
    b->end = bump_alloc(base, &used, (size_t)(QUERY_BLOCK * 4));
    return used;
}

/* The row of a query, and the column at which its elements begin. */
struct query_position {
    int64_t row, column;
};

static struct query_position query_position(int64_t query, int64_t n_heads, int64_t e) {
    return (struct query_position){query / n_heads, query % n_heads * e};
}

/* vectors */

/* Elements i … i + 15 of a row; those outside of the mask are +0 and are not read. int8 values are
 * multiplied by `scale`. */
INLINE __m512 elems_load(const void *row, int64_t i, __mmask16 mask, __m512 scale,
                         enum dtype type) {
    const __m512 v = weights_load(row, i, mask, false, type);
    return type == DTYPE_I8 ? _mm512_mul_ps(v, scale) : v;
}

/* 2^x for x <= 0; +0 in lanes outside of the mask. NaN stays NaN. */
INLINE __m512 exp2_masked(__m512 x, __mmask16 mask) {
    const __m512 magic = _mm512_set1_ps(EXP_MAGIC);
    x = _mm512_max_ps(_mm512_set1_ps(EXP2_LO), x);
    const __m512 t = _mm512_add_ps(x, magic), r = _mm512_sub_ps(x, _mm512_sub_ps(t, magic));
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(EXP2_C4), r, _mm512_set1_ps(EXP2_C3));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(EXP2_C2));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(EXP2_C1));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    // The low bits of t are the integer part of x, which is added to the exponent of y.
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(mask, _mm512_castps_si512(y), exponent));
}

/* packing */

/* Packs 16 rows of n floats as [Ep/32][16 pairs of elements][16 rows][2]. This and the other
 * packing functions round to bf16 and write zeros for elements from n on. */
static void rows_pack_pairs(uint16_t *to, const float *const rows[PANEL], int64_t n, int64_t ep) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t e = 0; e < ep; e += 32, to += TILE) {
        const __mmask16 low = elems_mask(n - e), high = elems_mask(n - e - PANEL);
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < PANEL; i++)
            r[i] = bf16_join(elems_load(rows[i], e, low, one, DTYPE_F32),
                             elems_load(rows[i], e + PANEL, high, one, DTYPE_F32));
        transpose_16(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * 32, r[i]);
    }
}

/* The rows of 32 positions; `mask` is all ones where the position exists, else 0. */
struct tile_rows {
    const void *row[KEY_TILE];
    float scale[KEY_TILE];
    __mmask16 mask[KEY_TILE];
};

/* Sets r to the rows of the 32 positions from `at` on. Rows are `bytes` apart; row 0 begins at
 * `base`. Positions outside of [begin, end) do not exist; the range is not empty. */
static void tile_rows_set(struct tile_rows *r, const void *base, const uint16_t *scales,
                          int64_t bytes, int64_t at, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < KEY_TILE; i++) {
        const int64_t row = MIN(MAX(at + i, begin), end - 1);
        r->row[i] = (const char *)base + row * bytes;
        r->mask[i] = row == at + i ? 0xFFFF : 0;
        r->scale[i] = scales ? f16_to_f32(scales[row]) : 1.0f;
    }
}

INLINE __m512 tile_row_load(const struct tile_rows *r, int i, int64_t e, __mmask16 mask,
                            enum dtype type) {
    return elems_load(r->row[i], e, mask & r->mask[i], _mm512_set1_ps(r->scale[i]), type);
}

/* Elements e … e + 31 of row i as bf16. */
INLINE __m512i tile_row_join(const struct tile_rows *r, int i, int64_t e, int64_t n,
                             enum dtype type) {
    const __mmask16 low = elems_mask(n - e), high = elems_mask(n - e - PANEL);
    if (type == DTYPE_BF16) {
        const __mmask32 both = _mm512_kunpackw(high & r->mask[i], low & r->mask[i]);
        return _mm512_maskz_loadu_epi16(both, (const uint16_t *)r->row[i] + e);
    }
    return bf16_join(tile_row_load(r, i, e, low, type), tile_row_load(r, i, e + PANEL, high, type));
}

/* Elements e … e + 15 of rows i and i + 1 as 16 pairs of bf16. */
INLINE __m512i tile_rows_interleave(const struct tile_rows *r, int i, int64_t e, int64_t n,
                                    enum dtype type) {
    const __mmask16 mask = elems_mask(n - e);
    if (type == DTYPE_BF16) {
        const __m256i even = _mm256_maskz_loadu_epi16(mask & r->mask[i],
                                                      (const uint16_t *)r->row[i] + e),
                      odd = _mm256_maskz_loadu_epi16(mask & r->mask[i + 1],
                                                     (const uint16_t *)r->row[i + 1] + e);
        return _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                               _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
    }
    return bf16_interleave(tile_row_load(r, i, e, mask, type),
                           tile_row_load(r, i + 1, e, mask, type));
}

/* Packs 32 rows of n elements as [2][Ep/32][16 rows][32 elements]. */
INLINE void rows_pack(uint16_t *to, const struct tile_rows *r, int64_t n, int64_t ep,
                      enum dtype type) {
    for (int64_t e = 0; e < ep; e += 32) {
#pragma GCC unroll 4
        for (int i = 0; i < KEY_TILE; i++)
            _mm512_storeu_si512(to + (i / 16 * (ep / 32) + e / 32) * TILE + i % 16 * 32,
                                tile_row_join(r, i, e, n, type));
    }
}

/* Packs 32 rows of n elements as [Ep/16][16 elements][32 rows]. */
INLINE void rows_pack_transposed(uint16_t *to, const struct tile_rows *r, int64_t n, int64_t ep,
                                 enum dtype type) {
    for (int64_t e = 0; e < ep; e += 16, to += TILE) {
        __m512i t[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) t[i] = tile_rows_interleave(r, 2 * i, e, n, type);
        transpose_16(t);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * 32, t[i]);
    }
}

/* Packs the 16 queries of tile `tile` and initialises their maxima, sums and outputs. Lanes after
 * the last query are copies of the last query. */
static void queries_pack(const struct query_block *b, int64_t tile) {
    const struct attention_job *j = b->job;
    const float *rows[PANEL];
    for (int64_t i = tile * PANEL; i < (tile + 1) * PANEL; i++) {
        const struct query_position at =
            query_position(b->begin + MIN(i, b->n - 1), j->n_heads, b->e);
        rows[i % PANEL] = j->q + at.row * j->ldq + at.column;
        b->first[i] = j->first[at.row];
        b->end[i] = j->end[at.row];
    }
    rows_pack_pairs(b->q + tile * PANEL * b->ep, rows, b->e, b->ep);
    _mm512_storeu_ps(b->max + tile * PANEL, _mm512_set1_ps(-INFINITY));
    _mm512_storeu_ps(b->sum + tile * PANEL, _mm512_setzero_ps());
    memset(b->out + tile * b->ep * PANEL, 0, (size_t)(b->ep * PANEL) * sizeof *b->out);
}

INLINE void keys_pack_as(const struct query_block *b, int64_t at, const struct tile_rows *k,
                         const struct tile_rows *v, enum dtype type) {
    rows_pack(b->k + at % KEY_BLOCK * b->ep, k, b->e, b->ep, type);
    rows_pack_transposed(b->v + at % KEY_BLOCK * b->ep, v, b->e, b->ep, type);
}

/* Prefetches the keys and values of at most 32 positions [begin, end) of one page. */
static void keys_prefetch(const struct query_block *b, int64_t begin, int64_t end) {
    const struct attention_keys *keys = &b->job->keys;
    const struct attention_page page = keys->get_page(keys->ctx, begin / keys->page);
    const int64_t size = (int64_t)dtype_size(keys->dtype), bytes = keys->ld * size,
                  first = begin % keys->page * bytes, used = b->e * size;
    for (int64_t row = first; row < first + (end - begin) * bytes; row += bytes)
        for (int64_t i = row; i < row + used; i += 64) {
            __builtin_prefetch((const char *)page.k + i, 0, 3);
            __builtin_prefetch((const char *)page.v + i, 0, 3);
        }
}

/* Packs the keys and values of 32 positions from `at` on; positions outside of [begin, end) become
 * zeros. */
static void keys_pack(const struct query_block *b, int64_t at, int64_t begin, int64_t end) {
    const struct attention_keys *keys = &b->job->keys;
    const struct attention_page page = keys->get_page(keys->ctx, at / keys->page);
    const int64_t bytes = keys->ld * (int64_t)dtype_size(keys->dtype), row = at % keys->page;
    const bool scaled = keys->dtype == DTYPE_I8;
    struct tile_rows k, v;
    begin += row - at, end += row - at; // now relative to the page
    tile_rows_set(&k, page.k, scaled ? page.k_scale : NULL, bytes, row, begin, end);
    tile_rows_set(&v, page.v, scaled ? page.v_scale : NULL, bytes, row, begin, end);
    switch (keys->dtype) {
    case DTYPE_BF16:
        keys_pack_as(b, at, &k, &v, DTYPE_BF16);
        break;
    case DTYPE_F16:
        keys_pack_as(b, at, &k, &v, DTYPE_F16);
        break;
    case DTYPE_I8:
        keys_pack_as(b, at, &k, &v, DTYPE_I8);
        break;
    default:
        keys_pack_as(b, at, &k, &v, DTYPE_F32);
    }
}

/* products */

/* Adds products to the sums in the tile registers 0 … 3 (without `four`: 0 and 1): four (or two)
 * tiles of rows, which are `stride` elements apart, times one tile of columns. */
INLINE void sums_add(const uint16_t *rows, int64_t stride, const uint16_t *columns, bool four) {
    tile_load(4, columns);
    tile_load(5, rows);
    tile_load(6, rows + stride);
    if (four) tile_load(7, rows + 2 * stride);
    tile_multiply(0, 5, 4);
    if (four) tile_load(5, rows + 3 * stride);
    tile_multiply(1, 6, 4);
    if (four) tile_multiply(2, 7, 4);
    if (four) tile_multiply(3, 5, 4);
}

INLINE void sums_zero(bool four) {
    tile_zero(0);
    tile_zero(1);
    if (four) tile_zero(2);
    if (four) tile_zero(3);
}

INLINE void sums_load(const float *from, bool four) {
    tile_load_sums(0, from, 64);
    tile_load_sums(1, from + 16 * PANEL, 64);
    if (four) tile_load_sums(2, from + 32 * PANEL, 64);
    if (four) tile_load_sums(3, from + 48 * PANEL, 64);
}

INLINE void sums_store_to(float *to, bool four) {
    tile_store(0, to, 64);
    tile_store(1, to + 16 * PANEL, 64);
    if (four) tile_store(2, to + 32 * PANEL, 64);
    if (four) tile_store(3, to + 48 * PANEL, 64);
}

INLINE void scores_block(float *s, const uint16_t *rows, const uint16_t *queries, int64_t ep,
                         bool four) {
    const int64_t step = ep / 32 * TILE;
    sums_zero(four);
    for (int64_t i = 0; i < step; i += TILE) sums_add(rows + i, step, queries + i, four);
    sums_store_to(s, four);
}

/* s [KEY_BLOCK][16] = rows times 16 queries, for the tiles [t0, t1) of 32 rows. The rows are keys,
 * or values (dP). A tile of rows is [2][Ep/32][16][32]; queries: [Ep/32][16 pairs][16][2]. */
INLINE void scores_compute(float *s, const uint16_t *rows, const uint16_t *queries, int64_t ep,
                           int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; t += 2) {
        float *to = s + t * KEY_TILE * PANEL;
        if (t + 1 < t1)
            scores_block(to, rows + t * KEY_TILE * ep, queries, ep, true);
        else
            scores_block(to, rows + t * KEY_TILE * ep, queries, ep, false);
    }
}

INLINE void outputs_block(float *out, const uint16_t *v, const uint16_t *p, int64_t ep, int64_t t0,
                          int64_t t1, bool four) {
    sums_load(out, four);
    for (int64_t t = t0; t < t1; t++) sums_add(v + t * (ep / 16 * TILE), TILE, p + t * TILE, four);
    sums_store_to(out, four);
}

/* out [Ep][16] += v times p, summed over the key tiles [t0, t1). v: [tile][Ep/16][16 elements][32
 * keys]; p: [tile][16 pairs of keys][16 queries][2]. */
INLINE void outputs_add(float *out, const uint16_t *v, const uint16_t *p, int64_t ep, int64_t t0,
                        int64_t t1) {
    for (int64_t e = 0; e < ep; e += 64) {
        if (e + 32 < ep)
            outputs_block(out + e * PANEL, v + e / 16 * TILE, p, ep, t0, t1, true);
        else
            outputs_block(out + e * PANEL, v + e / 16 * TILE, p, ep, t0, t1, false);
    }
}

/* softmax */

/* The key ranges of 16 queries, and the keys [all_first, all_end) to which all 16 attend. `first`
 * and `end` ascend with the query. */
struct key_ranges {
    __m512i first, end;
    int32_t all_first, all_end;
};

static struct key_ranges key_ranges_load(const int32_t first[PANEL], const int32_t end[PANEL]) {
    return (struct key_ranges){.first = _mm512_loadu_si512(first),
                               .end = _mm512_loadu_si512(end),
                               .all_first = first[PANEL - 1],
                               .all_end = end[0]};
}

/* Whether at least one of the 16 queries does not attend to all of the 32 keys from `key` on. */
INLINE bool keys_need_mask(const struct key_ranges *r, int32_t key) {
    return key < r->all_first || key + KEY_TILE > r->all_end;
}

/* The queries that attend to this key; without `masked` all 16. */
INLINE __mmask16 key_mask(const struct key_ranges *r, int32_t key, bool masked) {
    const __m512i at = _mm512_set1_epi32(key);
    if (!masked) return 0xFFFF;
    return _mm512_mask_cmple_epi32_mask(_mm512_cmpgt_epi32_mask(r->end, at), r->first, at);
}

/* The maximum, per query, of m and the scores of 32 keys; NaN is ignored. */
INLINE __m512 keys_max(__m512 m, const float *s, const struct key_ranges *r, int32_t key,
                       bool masked) {
    __m512 part[4] = {m, m, m, m};
#pragma GCC unroll 32
    for (int j = 0; j < KEY_TILE; j++) {
        const __m512 v = _mm512_loadu_ps(s + j * PANEL);
        __m512 *to = &part[j % 4];
        *to = masked ? _mm512_mask_max_ps(*to, key_mask(r, key + j, true), v, *to)
                     : _mm512_max_ps(v, *to);
    }
    return _mm512_max_ps(_mm512_max_ps(part[0], part[1]), _mm512_max_ps(part[2], part[3]));
}

/* p = 2^(s scale - max) of 32 keys; adds p of key j to sum[j % 2]. */
INLINE void keys_exp(uint16_t *p, __m512 sum[2], const float *s, __m512 scale, __m512 minus_max,
                     const struct key_ranges *r, int32_t key, bool masked) {
#pragma GCC unroll 4
    for (int j = 0; j < KEY_TILE; j += 2) {
        __m512 pair[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m512 v = _mm512_loadu_ps(s + (j + i) * PANEL);
            pair[i] =
                exp2_masked(_mm512_fmadd_ps(v, scale, minus_max), key_mask(r, key + j + i, masked));
            sum[i] = _mm512_add_ps(sum[i], pair[i]);
        }
        _mm512_storeu_si512(p + j * PANEL, bf16_interleave(pair[0], pair[1]));
    }
}

/* Sets the running maximum of 16 queries to `max`, and rescales their sums and outputs to it. */
static void running_max_update(const struct query_block *b, int64_t tile, __m512 max) {
    const __m512 old = _mm512_loadu_ps(b->max + tile * PANEL);
    if (_mm512_cmp_ps_mask(max, old, _CMP_GT_OQ) == 0) return;
    // For a query without keys so far, old - max may be -Inf - -Inf = NaN. Then max_ps returns its
    // second operand, and the sums of this query are 0.
    const __m512 factor =
        exp2_masked(_mm512_max_ps(_mm512_sub_ps(old, max), _mm512_set1_ps(EXP2_LO)), 0xFFFF);
    float *out = b->out + tile * b->ep * PANEL, *sum = b->sum + tile * PANEL;
    for (int64_t i = 0; i < b->ep * PANEL; i += PANEL)
        _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(out + i), factor));
    _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), factor));
    _mm512_storeu_ps(b->max + tile * PANEL, max);
}

/* Computes b->p from the scores b->s of 16 queries, for the key tiles [t0, t1) of a block, and
 * updates the queries' maxima and sums. */
static void probabilities_compute(const struct query_block *b, int64_t tile, int64_t block,
                                  int64_t t0, int64_t t1) {
    const struct key_ranges r = key_ranges_load(b->first + tile * PANEL, b->end + tile * PANEL);
    const float *s = b->s;
    uint16_t *p = b->p;
    const __m512 scale = _mm512_set1_ps(b->job->scale * LOG2_E);
    __m512 max = _mm512_set1_ps(-INFINITY), sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    bool masked[KEY_BLOCK / KEY_TILE];
    for (int64_t t = t0; t < t1; t++) {
        const int32_t key = (int32_t)(block + t * KEY_TILE);
        masked[t] = keys_need_mask(&r, key);
        max = masked[t] ? keys_max(max, s + t * KEY_TILE * PANEL, &r, key, true)
                        : keys_max(max, s + t * KEY_TILE * PANEL, &r, key, false);
    }
    max = _mm512_max_ps(_mm512_mul_ps(max, scale), _mm512_loadu_ps(b->max + tile * PANEL));
    running_max_update(b, tile, max);
    const __m512 minus_max = _mm512_sub_ps(_mm512_setzero_ps(), max);
    for (int64_t t = t0; t < t1; t++) {
        const int32_t key = (int32_t)(block + t * KEY_TILE);
        if (masked[t])
            keys_exp(p + t * TILE, sum, s + t * KEY_TILE * PANEL, scale, minus_max, &r, key, true);
        else
            keys_exp(p + t * TILE, sum, s + t * KEY_TILE * PANEL, scale, minus_max, &r, key, false);
    }
    float *total = b->sum + tile * PANEL;
    _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), _mm512_add_ps(sum[0], sum[1])));
}

/* Adds one block of keys to the results of 16 queries. */
static void tile_attend(const struct query_block *b, int64_t tile, int64_t block) {
    const int64_t ep = b->ep, t0 = MAX(b->first[tile * PANEL] - block, 0) / KEY_TILE,
                  end = MIN(b->end[(tile + 1) * PANEL - 1] - block, KEY_BLOCK),
                  t1 = (end + KEY_TILE - 1) / KEY_TILE;
    if (t0 >= t1) return;
    scores_compute(b->s, b->k, b->q + tile * PANEL * ep, ep, t0, t1);
    tile_memory_barrier(b->s);
    probabilities_compute(b, tile, block, t0, t1);
    tile_memory_barrier(b->p);
    outputs_add(b->out + tile * PANEL * ep, b->v, b->p, ep, t0, t1);
    tile_memory_barrier(b->out);
}

/* Element i of 16 queries of x [Ep][16], times `factor`. */
INLINE __m512 output_load(const float *x, int64_t i, __m512 factor) {
    // + 0: a sum that underflowed may be -0
    return _mm512_fmadd_ps(_mm512_loadu_ps(x + i * PANEL), factor, _mm512_setzero_ps());
}

/* Writes n elements of the rows of 16 queries from x [Ep][16], times `factor`. Lanes with the same
 * row have the same values. */
static void queries_write(float *const rows[PANEL], const float *x, __m512 factor, int64_t n) {
    for (int64_t e = 0; e < n; e += 16) {
        const __mmask16 mask = elems_mask(n - e);
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = _mm512_castps_si512(output_load(x, e + i, factor));
        transpose_16(r);
#pragma GCC unroll 16
        for (int i = 0; i < PANEL; i++)
            _mm512_mask_storeu_ps(rows[i] + e, mask, _mm512_castsi512_ps(r[i]));
    }
}

/* The same for rows in bf16 tiles (gemm_input.tiles); n is a multiple of 32. */
static void queries_write_tiles(uint16_t *const rows[PANEL], const float *x, __m512 factor,
                                int64_t n) {
    for (int64_t e = 0; e < n; e += 32) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            r[i] = bf16_interleave(output_load(x, e + 2 * i, factor),
                                   output_load(x, e + 2 * i + 1, factor));
        transpose_16(r);
#pragma GCC unroll 16
        for (int i = 0; i < PANEL; i++) _mm512_storeu_si512(rows[i] + e / 32 * TILE, r[i]);
    }
}

/* Writes the results of 16 queries, b->out divided by b->sum, and their statistics. */
static void outputs_write(const struct query_block *b, int64_t tile) {
    const struct attention_job *j = b->job;
    const __m512 factor =
        _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_loadu_ps(b->sum + tile * PANEL));
    const float *sums = b->out + tile * b->ep * PANEL;
    float *rows[PANEL], inverse_sums[PANEL];
    uint16_t *tiles[PANEL];
    _mm512_storeu_ps(inverse_sums, factor);
    for (int64_t i = 0; i < PANEL; i++) {
        const int64_t query = MIN(tile * PANEL + i, b->n - 1);
        const struct query_position at = query_position(b->begin + query, j->n_heads, b->e);
        if (j->tiles)
            tiles[i] = gemm_input_tile_row(j->tiles, j->tiles_row + at.row) +
                       (j->tiles_column + at.column) / 32 * TILE;
        else
            rows[i] = j->out + at.row * j->ldo + at.column;
        if (!j->stats) continue;
        float *stats = j->stats + at.row * j->ld_stats + at.column / b->e * 2;
        stats[0] = b->max[query];
        stats[1] = inverse_sums[i];
    }
    if (j->tiles)
        queries_write_tiles(tiles, sums, factor, b->e);
    else
        queries_write(rows, sums, factor, b->e);
}

static void queries_attend(struct query_block *b) {
    const int64_t tiles = (b->n + PANEL - 1) / PANEL;
    for (int64_t i = 0; i < tiles; i++) queries_pack(b, i);
    const int64_t first = b->first[0], end = b->end[b->n - 1];
    for (int64_t block = first / KEY_BLOCK * KEY_BLOCK; block < end; block += KEY_BLOCK) {
        for (int64_t at = MAX(block, first / KEY_TILE * KEY_TILE); at < MIN(block + KEY_BLOCK, end);
             at += KEY_TILE) {
            const int64_t next = at + KEY_BLOCK; // packed after this block's products
            if (next < end) keys_prefetch(b, next, MIN(next + KEY_TILE, end));
            keys_pack(b, at, first, end);
        }
        tile_memory_barrier(b->k);
        for (int64_t i = 0; i < tiles; i++) tile_attend(b, i, block);
    }
    for (int64_t i = 0; i < tiles; i++) outputs_write(b, i);
}

static void tiles_attention(const struct attention_job *job) {
    struct query_block b = {.job = job};
    const int64_t queries = job->rows * job->n_heads;
    query_block_layout(&b, job->head_dim, job->scratch);
    tiles_begin();
    for (b.begin = 0; b.begin < queries; b.begin += QUERY_BLOCK) {
        b.n = MIN(queries - b.begin, QUERY_BLOCK);
        queries_attend(&b);
    }
}

static size_t tiles_attention_scratch(int64_t head_dim) {
    struct query_block b;
    return query_block_layout(&b, head_dim, NULL);
}

/*
 * Backward pass; ' is the transpose. The scores S = K Q' are computed again. With the maxima of the
 * forward pass, P = 2^(S scale log2(e) - max) are probabilities before the division by their sum.
 * Each query has factor = scale / sum and delta = (dO · O) factor. Then
 *
 *     dV += P (dO / sum)       dP = V dO'       dS = P (dP factor - delta)
 *     dK += dS Q               dQ' += K' dS
 *
 * The code writes dout and out for dO and O. P and dS are stored as [keys][32 queries], the first
 * operand of the products dV and dK. dS is also stored as [pairs of keys][16 queries][2], the
 * second operand of dQ'. Sums over queries run in blocks of BACKWARD_QUERIES at fixed positions, in
 * the order of queries.
 */
enum { BACKWARD_QUERIES = 128, GROUP_QUERIES = 32 };

static const float zeros[ATTENTION_MAX_DIM];

/* Backward pass: all keys of the sequence, and up to BACKWARD_QUERIES queries. */
struct backward_block {
    const struct attention_backward_job *job;
    int64_t e, ep;
    int64_t begin, n;               /* queries [begin, begin + n) of the job */
    int64_t keys;                   /* job->rows rounded up to 32 */
    uint16_t *k, *v;                /* [keys/16][Ep/32][16 keys][32 elements] */
    uint16_t *kt;                   /* [keys/32][Ep/16][16 elements][32 keys] */
    float *dk, *dv;                 /* [keys/32][Ep/32][2][2][16 keys][16 elements] */
    uint16_t *q, *dout;             /* [BACKWARD_QUERIES/16][Ep/32][16 pairs of elements][16][2] */
    uint16_t *q_pairs, *dout_pairs; /* [BACKWARD_QUERIES/32][Ep/16][16 pairs of queries][16][2] */
    float *dq;                      /* [BACKWARD_QUERIES/16][Ep][16] */
    float *s, *dp;                  /* [2][KEY_BLOCK][16] */
    uint16_t *p, *ds;               /* [KEY_BLOCK/16][BACKWARD_QUERIES/32][16 keys][32 queries] */
    uint16_t *ds_pairs;             /* [2][KEY_BLOCK/32][16 pairs of keys][16 queries][2] */
    float *max, *factor, *delta;    /* [BACKWARD_QUERIES] see the formulas above */
    int32_t *first, *end;           /* [BACKWARD_QUERIES] keys [first, end) of each query */
};

static size_t backward_block_layout(struct backward_block *b, int64_t e, int64_t rows,
                                    uint8_t *base) {
    size_t used = 0;
    b->e = e;
    b->ep = (e + 31) / 32 * 32;
    b->keys = (rows + KEY_TILE - 1) / KEY_TILE * KEY_TILE;
    uint16_t **whole[] = {&b->k, &b->v, &b->kt};
    for (size_t i = 0; i < ARRAY_LEN(whole); i++)
        *whole[i] = bump_alloc(base, &used, (size_t)(b->keys * b->ep * 2));
    b->dk = bump_alloc(base, &used, (size_t)(b->keys * b->ep * 4));
    b->dv = bump_alloc(base, &used, (size_t)(b->keys * b->ep * 4));
    uint16_t **queries[] = {&b->q, &b->dout, &b->q_pairs, &b->dout_pairs};
    for (size_t i = 0; i < ARRAY_LEN(queries); i++)
        *queries[i] = bump_alloc(base, &used, (size_t)(BACKWARD_QUERIES * b->ep * 2));
    b->dq = bump_alloc(base, &used, (size_t)(BACKWARD_QUERIES * b->ep * 4));
    b->s = bump_alloc(base, &used, (size_t)(2 * KEY_BLOCK * PANEL * 4));
    b->dp = bump_alloc(base, &used, (size_t)(2 * KEY_BLOCK * PANEL * 4));
    b->p = bump_alloc(base, &used, (size_t)(KEY_BLOCK * BACKWARD_QUERIES * 2));
    b->ds = bump_alloc(base, &used, (size_t)(KEY_BLOCK * BACKWARD_QUERIES * 2));
    b->ds_pairs = bump_alloc(base, &used, (size_t)(2 * KEY_BLOCK * PANEL * 2));
    float **stats[] = {&b->max, &b->factor, &b->delta};
    for (size_t i = 0; i < ARRAY_LEN(stats); i++)
        *stats[i] = bump_alloc(base, &used, (size_t)(BACKWARD_QUERIES * 4));
    b->first = bump_alloc(base, &used, (size_t)(BACKWARD_QUERIES * 4));
    b->end = bump_alloc(base, &used, (size_t)(BACKWARD_QUERIES * 4));
    return used;
}

static void backward_keys_pack(const struct backward_block *b) {
    const struct attention_backward_job *j = b->job;
    const int64_t bytes = j->ldk * (int64_t)sizeof *j->k;
    struct tile_rows r;
    for (int64_t at = 0; at < j->rows; at += KEY_TILE) {
        tile_rows_set(&r, j->k, NULL, bytes, at, 0, j->rows);
        rows_pack(b->k + at * b->ep, &r, b->e, b->ep, DTYPE_F32);
        rows_pack_transposed(b->kt + at * b->ep, &r, b->e, b->ep, DTYPE_F32);
        tile_rows_set(&r, j->v, NULL, bytes, at, 0, j->rows);
        rows_pack(b->v + at * b->ep, &r, b->e, b->ep, DTYPE_F32);
    }
    memset(b->dk, 0, (size_t)(b->keys * b->ep) * sizeof *b->dk);
    memset(b->dv, 0, (size_t)(b->keys * b->ep) * sizeof *b->dv);
}

/* Packs 32 rows as [Ep/16][16 pairs of rows][16 elements][2]; row i is multiplied by factor[i]. */
static void rows_pack_scaled(uint16_t *to, const float *const rows[GROUP_QUERIES],
                             const float *factor, int64_t n, int64_t ep) {
    for (int64_t e = 0; e < ep; e += 16, to += TILE) {
        const __mmask16 mask = elems_mask(n - e);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP_QUERIES; i += 2) {
            const __m512 even = _mm512_maskz_loadu_ps(mask, rows[i] + e),
                         odd = _mm512_maskz_loadu_ps(mask, rows[i + 1] + e);
            _mm512_storeu_si512(to + i * PANEL,
                                bf16_interleave(_mm512_mul_ps(even, _mm512_set1_ps(factor[i])),
                                                _mm512_mul_ps(odd, _mm512_set1_ps(factor[i + 1]))));
        }
    }
}

/* dout · out of a query. dout is rounded to bf16, as it is for dP, so that dS is 0 for a query with
 * only one key. */
static float dout_dot_out(const float *dout, const float *out, int64_t n) {
    const __m512 zero = _mm512_setzero_ps();
    __m512 sum = zero;
    float lanes[PANEL], total = 0.0f;
    for (int64_t e = 0; e < n; e += PANEL) {
        const __mmask16 mask = elems_mask(n - e);
        const __m512 rounded =
            _mm512_castsi512_ps(bf16_interleave(zero, _mm512_maskz_loadu_ps(mask, dout + e)));
        sum = _mm512_fmadd_ps(rounded, _mm512_maskz_loadu_ps(mask, out + e), sum);
    }
    _mm512_storeu_ps(lanes, sum);
    for (int i = 0; i < PANEL; i++) total += lanes[i];
    return total;
}

/* Sets the statistics, the key range and the rows *q and *dout of query i of the block. Queries
 * after the last one have rows of zeros and contribute nothing. Returns the inverse of the query's
 * sum (0 for such a query). */
static float backward_query(const struct backward_block *b, int64_t i, const float **q,
                            const float **dout) {
    const struct attention_backward_job *j = b->job;
    const struct query_position at = query_position(b->begin + MIN(i, b->n - 1), j->n_heads, b->e);
    const int64_t offset = at.row * j->ldq + at.column;
    const float *stats = j->stats + at.row * j->ld_stats + at.column / b->e * 2;
    b->end[i] = (int32_t)at.row + 1;
    b->first[i] = (int32_t)MAX(at.row + 1 - j->window, 0);
    *q = *dout = zeros;
    b->max[i] = b->factor[i] = b->delta[i] = 0.0f;
    if (i >= b->n) return 0.0f;
    *q = j->q + offset;
    *dout = j->dout + offset;
    b->max[i] = stats[0];
    b->factor[i] = stats[1] * j->scale;
    b->delta[i] = dout_dot_out(*dout, j->out + offset, b->e) * b->factor[i];
    return stats[1];
}

static void backward_queries_pack(const struct backward_block *b, int64_t group) {
    const float *q[GROUP_QUERIES], *dout[GROUP_QUERIES];
    float inverse_sums[GROUP_QUERIES], one[GROUP_QUERIES];
    const int64_t at = group * GROUP_QUERIES * b->ep;
    for (int64_t i = 0; i < GROUP_QUERIES; i++) {
        inverse_sums[i] = backward_query(b, group * GROUP_QUERIES + i, &q[i], &dout[i]);
        one[i] = 1.0f;
    }
    for (int64_t i = 0; i < GROUP_QUERIES; i += PANEL) {
        rows_pack_pairs(b->q + at + i * b->ep, q + i, b->e, b->ep);
        rows_pack_pairs(b->dout + at + i * b->ep, dout + i, b->e, b->ep);
    }
    rows_pack_scaled(b->q_pairs + at, q, one, b->e, b->ep);
    rows_pack_scaled(b->dout_pairs + at, dout, inverse_sums, b->e, b->ep);
    memset(b->dq + at, 0, (size_t)(GROUP_QUERIES * b->ep) * sizeof *b->dq);
}

/* Per-query constants of P and dS, for 16 queries. */
struct query_constants {
    struct key_ranges r;
    __m512 minus_max, factor, minus_delta;
};

static struct query_constants query_constants_load(const struct backward_block *b, int64_t i) {
    const __m512 zero = _mm512_setzero_ps();
    return (struct query_constants){
        .r = key_ranges_load(b->first + i, b->end + i),
        .minus_max = _mm512_sub_ps(zero, _mm512_loadu_ps(b->max + i)),
        .factor = _mm512_loadu_ps(b->factor + i),
        .minus_delta = _mm512_sub_ps(zero, _mm512_loadu_ps(b->delta + i)),
    };
}

/* Computes P and dS of 32 keys and 32 queries. s and dp begin at the first key. In p and ds the
 * tile of the second 16 keys is BACKWARD_QUERIES/32 tiles after that of the first 16. In ds_pairs
 * the tile of the second 16 queries is KEY_BLOCK * PANEL elements after that of the first 16. */
INLINE void score_gradients_compute(const struct query_constants constants[2], const float *s,
                                    const float *dp, uint16_t *p, uint16_t *ds, uint16_t *ds_pairs,
                                    __m512 scale, int32_t key, bool masked) {
#pragma GCC unroll 2
    for (int j = 0; j < KEY_TILE; j += 2) {
        __m512 prob[2][2], grad[2][2]; // [2 keys][2 times 16 queries]
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const struct query_constants *l = &constants[i % 2];
            const int64_t at = (j + i / 2) * PANEL + i % 2 * KEY_BLOCK * PANEL;
            const __m512 x = _mm512_fmadd_ps(_mm512_loadu_ps(s + at), scale, l->minus_max);
            const __m512 d = _mm512_fmadd_ps(_mm512_loadu_ps(dp + at), l->factor, l->minus_delta);
            const __m512 e = exp2_masked(x, key_mask(&l->r, key + j + i / 2, masked));
            prob[i / 2][i % 2] = e;
            grad[i / 2][i % 2] = _mm512_mul_ps(e, d);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const int64_t at =
                j / 16 * (BACKWARD_QUERIES / GROUP_QUERIES) * TILE + (j % 16 + i) * 32;
            _mm512_storeu_si512(p + at, bf16_join(prob[i][0], prob[i][1]));
            _mm512_storeu_si512(ds + at, bf16_join(grad[i][0], grad[i][1]));
            _mm512_storeu_si512(ds_pairs + i * KEY_BLOCK * PANEL + j * PANEL,
                                bf16_interleave(grad[0][i], grad[1][i]));
        }
    }
}

/* Sets t so that [t[0], t[1]) are the tiles of the key block at `block` that have keys to which a
 * query of the group attends. */
static void group_tile_range(const struct backward_block *b, int64_t group, int64_t block,
                             int64_t t[2]) {
    const int32_t *first = b->first + group * GROUP_QUERIES, *end = b->end + group * GROUP_QUERIES;
    t[0] = MAX(first[0] - block, 0) / KEY_TILE;
    t[1] = (MIN(end[GROUP_QUERIES - 1] - block, KEY_BLOCK) + KEY_TILE - 1) / KEY_TILE;
}

/* Computes P and dS of 32 queries and a block of keys, and adds K' dS to the queries' dQ'. */
static void group_backward(const struct backward_block *b, int64_t group, int64_t block) {
    const int64_t at = group * GROUP_QUERIES * b->ep;
    const struct query_constants constants[2] = {
        query_constants_load(b, group * GROUP_QUERIES),
        query_constants_load(b, group * GROUP_QUERIES + PANEL),
    };
    const __m512 scale = _mm512_set1_ps(b->job->scale * LOG2_E);
    int64_t t[2];
    group_tile_range(b, group, block, t);
    if (t[0] >= t[1]) return;
    for (int64_t i = 0; i < 2; i++) {
        const int64_t half = i * KEY_BLOCK * PANEL, tile = at + i * PANEL * b->ep;
        scores_compute(b->s + half, b->k + block * b->ep, b->q + tile, b->ep, t[0], t[1]);
        scores_compute(b->dp + half, b->v + block * b->ep, b->dout + tile, b->ep, t[0], t[1]);
    }
    tile_memory_barrier(b->s);
    for (int64_t i = t[0]; i < t[1]; i++) {
        const int32_t key = (int32_t)(block + i * KEY_TILE);
        const float *s = b->s + i * KEY_TILE * PANEL, *dp = b->dp + i * KEY_TILE * PANEL;
        uint16_t *ds_pairs = b->ds_pairs + i * TILE,
                 *p = b->p + i * KEY_TILE * BACKWARD_QUERIES + group * TILE, *ds = p - b->p + b->ds;
        if (keys_need_mask(&constants[0].r, key) || keys_need_mask(&constants[1].r, key))
            score_gradients_compute(constants, s, dp, p, ds, ds_pairs, scale, key, true);
        else
            score_gradients_compute(constants, s, dp, p, ds, ds_pairs, scale, key, false);
    }
    tile_memory_barrier(b->ds);
    for (int64_t i = 0; i < 2; i++)
        outputs_add(b->dq + at + i * PANEL * b->ep, b->kt + block * b->ep,
                    b->ds_pairs + i * KEY_BLOCK * PANEL, b->ep, t[0], t[1]);
}

/* Adds a0 b0, a0 b1, a1 b0 and a1 b1 to the sums in the tile registers 0 … 3. */
INLINE void tiles_step(const uint16_t *a0, const uint16_t *a1, const uint16_t *b0,
                       const uint16_t *b1) {
    tile_load(6, b0);
    tile_load(7, b1);
    tile_load(4, a0);
    tile_load(5, a1);
    tile_multiply(0, 4, 6);
    tile_multiply(1, 4, 7);
    tile_multiply(2, 5, 6);
    tile_multiply(3, 5, 7);
}

/* d [Ep/32][2][2][16 keys][16 elements] += p times x, summed over the groups [g0, g1), for 32
 * keys. */
static void key_grads_add(float *d, const uint16_t *p, const uint16_t *x, int64_t ep, int64_t g0,
                          int64_t g1) {
    const int64_t second = BACKWARD_QUERIES / GROUP_QUERIES * TILE;
    for (int64_t e = 0; e < ep; e += 32, d += 4 * PANEL * PANEL) {
        sums_load(d, true);
        for (int64_t g = g0; g < g1; g++) {
            const uint16_t *right = x + (g * ep + e) / 16 * TILE;
            tiles_step(p + g * TILE, p + second + g * TILE, right, right + TILE);
        }
        sums_store_to(d, true);
    }
}

/* Adds a block of keys to dQ, dK and dV for the queries of the current block. */
static void key_block_backward(const struct backward_block *b, int64_t block, int64_t groups) {
    for (int64_t g = 0; g < groups; g++) group_backward(b, g, block);
    for (int64_t i = 0; i < KEY_BLOCK / KEY_TILE && block + i * KEY_TILE < b->keys; i++) {
        int64_t t[2], g0 = groups, g1 = 0; // the groups that attend to this tile
        for (int64_t g = 0; g < groups; g++) {
            group_tile_range(b, g, block, t);
            if (i < t[0] || i >= t[1]) continue;
            g0 = MIN(g0, g);
            g1 = g + 1;
        }
        if (g0 >= g1) continue;
        const int64_t at = (block + i * KEY_TILE) * b->ep, tile = i * KEY_TILE * BACKWARD_QUERIES;
        key_grads_add(b->dv + at, b->p + tile, b->dout_pairs, b->ep, g0, g1);
        key_grads_add(b->dk + at, b->ds + tile, b->q_pairs, b->ep, g0, g1);
    }
}

static void query_grads_write(const struct backward_block *b, int64_t tile) {
    const struct attention_backward_job *j = b->job;
    float *rows[PANEL], unused[ATTENTION_MAX_DIM];
    for (int64_t i = 0; i < PANEL; i++) {
        const int64_t query = tile * PANEL + i;
        const struct query_position at = query_position(b->begin + query, j->n_heads, b->e);
        rows[i] = query < b->n ? j->dq + at.row * j->ldq + at.column : unused;
    }
    queries_write(rows, b->dq + tile * PANEL * b->ep, _mm512_set1_ps(1.0f), b->e);
}

static void queries_backward(const struct backward_block *b) {
    const int64_t groups = (b->n + GROUP_QUERIES - 1) / GROUP_QUERIES;
    for (int64_t g = 0; g < groups; g++) backward_queries_pack(b, g);
    tile_memory_barrier(b->q);
    for (int64_t block = b->first[0] / KEY_BLOCK * KEY_BLOCK; block < b->end[b->n - 1];
         block += KEY_BLOCK)
        key_block_backward(b, block, groups);
    tile_memory_barrier(b->dq);
    for (int64_t i = 0; i * PANEL < b->n; i++) query_grads_write(b, i);
}

/* Writes dK or dV as rows of `ld` elements; d is b->dk or b->dv. */
static void key_grads_write(float *to, int64_t ld, const float *d, const struct backward_block *b) {
    for (int64_t row = 0; row < b->job->rows; row++) {
        const float *from = d + row / KEY_TILE * KEY_TILE * b->ep + row % 16 * PANEL +
                            row % KEY_TILE / 16 * 2 * PANEL * PANEL;
        for (int64_t e = 0; e < b->e; e += PANEL) {
            const __m512 x = _mm512_loadu_ps(from + (e / 32 * 4 + e % 32 / PANEL) * PANEL * PANEL);
            _mm512_mask_storeu_ps(to + row * ld + e, elems_mask(b->e - e), x);
        }
    }
}

static void tiles_attention_backward(const struct attention_backward_job *job) {
    struct backward_block b = {.job = job};
    const int64_t queries = job->rows * job->n_heads;
    backward_block_layout(&b, job->head_dim, job->rows, job->scratch);
    tiles_begin();
    backward_keys_pack(&b);
    for (b.begin = 0; b.begin < queries; b.begin += BACKWARD_QUERIES) {
        b.n = MIN(queries - b.begin, BACKWARD_QUERIES);
        queries_backward(&b);
    }
    key_grads_write(job->dk, job->ldk, b.dk, &b);
    key_grads_write(job->dv, job->ldk, b.dv, &b);
}

static size_t tiles_attention_backward_scratch(int64_t head_dim, int64_t rows) {
    struct backward_block b;
    return backward_block_layout(&b, head_dim, rows, NULL);
}

static void tiles_fill_attention(struct kernels *k) {
    k->attention = tiles_attention;
    k->attention_scratch = tiles_attention_scratch;
    k->attention_backward = tiles_attention_backward;
    k->attention_backward_scratch = tiles_attention_backward_scratch;
}

#endif
