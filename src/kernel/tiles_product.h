/*
 * tiles_product: products in bf16 tiles: the fast class (tiles.h), for every type of weights.
 *
 * Weights are bf16 panels, or are dequantised a panel at a time, w = bf16(matrix_get_row), into
 * scratch that stays in the caches while all rows are multiplied with it. The caller packs inputs
 * in tiles (gemm_input.tiles). A sum stays in a tile register for a slice of SLICE steps of K. The
 * sums of a block of 32 rows by 32 outputs are stored while the next block is multiplied: the tile
 * stores and the vector operations on the sums are interleaved with the tile steps of the next
 * block, so they take no extra time.
 *
 * Not here: attention (tiles_attention.h), the exact class (amx_int8.c).
 *
 * Invariants. An output is one chain over K in tile steps of 32, from +0, zero padded; between
 * slices of K the sum is stored in f32, which is exact. At the end the sum is stored to y, or added
 * to y by one addition. Tile rows are independent and threads never split a sum, so the bits of a
 * row depend only on this row and the weights.
 */
#ifndef SHOAL_KERNEL_TILES_PRODUCT_H
#define SHOAL_KERNEL_TILES_PRODUCT_H

#include <string.h>

#include "kernel/tiles.h"

enum {
    SLICE = 64,      /* tile steps of K for which a pair of panels fits into scratch */
    BLOCKS_MAX = 16, /* row blocks that are multiplied with one pair of panels */
    BLOCK_ROWS = 32, /* two tiles */
    SUMS = 4 * 256,  /* f32 sums of a block: [2 row tiles][2 column tiles][16][16] */
};

/* One product y[rows][n] of the tiles `a` of rows with column tiles of 16 outputs (B tiles). */
struct tile_product {
    float *y;
    int64_t ldy;
    const uint16_t *a; /* [rows / 16 rounded up][steps][16][32] */
    int64_t rows, steps, n;
    int64_t skip; /* number of rows at the start whose outputs are not stored */
    bool add;
    const struct gemm_gated *gated;     /* the outputs, instead of y; or NULL */
    const struct gemm_softmax *softmax; /* the outputs, instead of y; or NULL */
    const struct matrix *w;
    const struct gemm_low_rank *low_rank; /* or NULL */
    int64_t low_rank_row;
    int64_t first_output; /* backward: the first output of step 0; softmax: n0 */
    /* Sets b[0] and b[1] to the B tiles of column tiles c and c + 1, steps [s0, s1); `scratch` has
     * room for them. Sets only b[0] if column tile c + 1 does not exist. If gated, b[0] is column
     * tile c of gate and b[1] that of up. */
    void (*panels)(const struct tile_product *p, int64_t c, int64_t s0, int64_t s1,
                   uint16_t (*scratch)[SLICE * TILE], const uint16_t *b[2]);
    struct prefetch_list *prefetch;
};

/* Rows [tile + skip, tile + rows) of a product; `tile` is a multiple of 16, `rows` at most 32. */
struct row_block {
    int64_t tile, skip, rows;
    const struct low_rank_rows *low_rank; /* the parts of these rows, or NULL */
};

/* A block whose sums are still in tile registers 0 … 3, and the destination of the sums. */
struct tile_block {
    float *sums; /* [SUMS] */
    float *y;
    int64_t out_offset;    /* gated, softmax: the block's first element in the outputs */
    int64_t tile;          /* softmax: its first row */
    int64_t skip, rows;    /* rows [skip, rows) are written to y; rows 0: only `sums` is written */
    __mmask16 left, right; /* outputs that exist in the left and the right column tile */
};

/* The low-rank parts of a range of rows, packed for a pair of column tiles. */
struct low_rank_panels {
    _Alignas(64) uint16_t v[2][LOW_RANK_STEPS * TILE]; /* B tiles of each column tile */
    int64_t steps[2];                                  /* tile steps of each column tile */
    const struct low_rank_rows *rows;                  /* the range of rows */
};

/* Stores one row of a B tile: 16 pairs (even, odd) in bf16. */
INLINE void pairs_store(uint16_t *to, __m512 even, __m512 odd) {
    _mm512_store_si512(to, bf16_interleave(even, odd));
}

/* One panel of quantised weights. */
struct panel_source {
    const struct matrix *w;
    int64_t panel;
    __m512 codes, unit; /* nibbles: the value of each nibble; nf4: row scales / NF4_UNIT */
};

INLINE struct panel_source panel_source_of(const struct matrix *w, int64_t panel) {
    struct panel_source s = {.w = w, .panel = panel};
    if (w->layout == LAYOUT_NF4) {
        s.unit =
            _mm512_div_ps(_mm512_loadu_ps(w->row_scales + panel * PANEL), _mm512_set1_ps(NF4_UNIT));
        s.codes = signed_bytes_widen((const uint8_t *)nf4_codes);
    } else if (w->layout >= LAYOUT_Q4) {
        s.codes = _mm512_sub_ps(_mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                _mm512_set1_ps((float)w->zero));
    }
    return s;
}

/* The weight q · d (nf4: · unit) + min, rounded as in matrix_get_row. */
INLINE __m512 weight_value(__m512 q, __m512 d, __m512 unit, __m512 min, enum matrix_layout l,
                           bool mins) {
    __m512 v = _mm512_mul_ps(q, d);
    if (l == LAYOUT_NF4) v = _mm512_mul_ps(v, unit);
    return mins ? _mm512_add_ps(v, min) : v;
}

/* Byte j of every quad, as a signed number in f32. */
INLINE __m512 quad_byte(__m512i quads, int j) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quads, 24 - 8 * j), 24));
}

/* Writes 32 inputs by 16 outputs, group g of a record (q6_k: groups g and g + 1), as a B tile. `l`
 * and `mins` are constants where this is inlined. */
INLINE void block_dequantize(uint16_t *to, const struct panel_source *s, const uint8_t *record,
                             int64_t g, enum matrix_layout l, bool mins) {
    const uint8_t *data = record + s->w->head_bytes + g * layout_bytes(l);
    const __m512 unit = s->unit, min = mins ? record_mins(record, g, l) : _mm512_setzero_ps();
    __m512 d = record_scales(record, g, l);
    if (l < LAYOUT_Q4) {
#pragma GCC unroll 8
        for (int p = 0; p < 8; p++) {
            if (l == LAYOUT_Q6 && p == 4) d = record_scales(record, g + 1, l);
            const __m512i quads = _mm512_loadu_si512(data + 64 * p);
            for (int j = 0; j < 4; j += 2)
                pairs_store(to + 64 * p + 16 * j,
                            weight_value(quad_byte(quads, j), d, unit, min, l, mins),
                            weight_value(quad_byte(quads, j + 1), d, unit, min, l, mins));
        }
        return;
    }
    // permutexvar reads the low four bits of an index, so a shift selects a nibble
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        const __m512i quads = _mm512_loadu_si512(data + 64 * p);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int shift = 16 * (i % 2) + 4 * (i / 2);
            const __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(quads, shift), s->codes),
                         odd = _mm512_permutexvar_ps(_mm512_srli_epi32(quads, shift + 8), s->codes);
            pairs_store(to + TILE / 2 * (i / 2) + 64 * p + 32 * (i % 2),
                        weight_value(even, d, unit, min, l, mins),
                        weight_value(odd, d, unit, min, l, mins));
        }
    }
}

typedef void (*dequantize_fn)(uint16_t *to, const struct panel_source *s, int64_t b0, int64_t b1);

/* Writes blocks [b0, b1) of 32 inputs as B tiles. */
INLINE void blocks_dequantize(uint16_t *to, const struct panel_source *s, int64_t b0, int64_t b1,
                              enum matrix_layout l, bool mins) {
    const int groups = QK / layout_group(l), per_record = record_groups(l);
    const uint8_t *record = record_at(s->w, s->panel, b0 * groups);
    int64_t g = b0 * groups % per_record;
    for (int64_t b = b0; b < b1; b++, to += TILE) {
        block_dequantize(to, s, record, g, l, mins);
        if ((g += groups) < per_record) continue;
        g = 0;
        record += s->w->record_bytes;
    }
}

#define DEQUANTIZE(name, layout, mins)                                                             \
    static void name(uint16_t *to, const struct panel_source *s, int64_t b0, int64_t b1) {         \
        blocks_dequantize(to, s, b0, b1, layout, mins);                                            \
    }
DEQUANTIZE(dequantize_q8, LAYOUT_Q8, false)
DEQUANTIZE(dequantize_q8_mins, LAYOUT_Q8, true)
DEQUANTIZE(dequantize_q8_k, LAYOUT_Q8_K, true)
DEQUANTIZE(dequantize_q6, LAYOUT_Q6, false)
DEQUANTIZE(dequantize_q4, LAYOUT_Q4, false)
DEQUANTIZE(dequantize_q4_mins, LAYOUT_Q4, true)
DEQUANTIZE(dequantize_q4_k, LAYOUT_Q4_K, true)
DEQUANTIZE(dequantize_nf4, LAYOUT_NF4, false)

static dequantize_fn dequantize_of(const struct matrix *w) {
    switch (w->layout) {
    case LAYOUT_Q8:
        return w->mins ? dequantize_q8_mins : dequantize_q8;
    case LAYOUT_Q8_K:
        return dequantize_q8_k;
    case LAYOUT_Q6:
        return dequantize_q6;
    case LAYOUT_Q4_K:
        return dequantize_q4_k;
    case LAYOUT_NF4:
        return dequantize_nf4;
    default:
        return w->mins ? dequantize_q4_mins : dequantize_q4;
    }
}

/* 32 values from x[i…], of which `left` exist, as bf16. */
INLINE __m512i bf16_load(const void *x, int64_t i, int64_t left, enum dtype e) {
    const __m512 low = weights_load(x, i, elems_mask(left), false, e),
                 high = weights_load(x, i + 16, elems_mask(left - 16), false, e);
    return bf16_join(low, high);
}

/* Packs steps [s0, s1) of the rows of one panel as B tiles: adjacent inputs of a row become a pair,
 * and row i becomes column i of the tile. */
INLINE void panel_pack_as(uint16_t *to, const struct matrix *w, int64_t panel, int64_t s0,
                          int64_t s1, enum dtype e) {
    const int64_t n = MIN(w->n - panel * PANEL, PANEL);
    for (int64_t s = s0; s < s1; s++, to += TILE) {
        __m512i r[16];
        for (int64_t i = 0; i < 16; i++) {
            const int64_t at = (panel * PANEL + i) * w->k + s * QK;
            r[i] = i < n ? bf16_load(w->data, at, w->k - s * QK, e) : _mm512_setzero_si512();
        }
        transpose_16(r);
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + 32 * i, r[i]);
    }
}

static void panel_pack(uint16_t *to, const struct matrix *w, int64_t panel, int64_t s0,
                       int64_t s1) {
    switch (rows_dtype(w)) {
    case DTYPE_F32:
        panel_pack_as(to, w, panel, s0, s1, DTYPE_F32);
        return;
    case DTYPE_BF16:
        panel_pack_as(to, w, panel, s0, s1, DTYPE_BF16);
        return;
    case DTYPE_F16:
        panel_pack_as(to, w, panel, s0, s1, DTYPE_F16);
        return;
    default:
        panel_pack_as(to, w, panel, s0, s1, DTYPE_I8);
    }
}

/* The B tiles of panel c, steps [s0, s1): in place, or written to scratch. */
static const uint16_t *panel_load(const struct matrix *w, int64_t c, int64_t s0, int64_t s1,
                                  uint16_t *scratch) {
    if (w->layout == LAYOUT_BF16) return bf16_panel(w, c) + s0 * TILE;
    if (w->layout == LAYOUT_ROW_MAJOR || w->layout == LAYOUT_ROWS_I8) {
        panel_pack(scratch, w, c, s0, s1);
    } else {
        const struct panel_source s = panel_source_of(w, c);
        dequantize_of(w)(scratch, &s, s0, s1);
    }
    return scratch;
}

static void forward_panels(const struct tile_product *p, int64_t c, int64_t s0, int64_t s1,
                           uint16_t (*scratch)[SLICE * TILE], const uint16_t *b[2]) {
    b[0] = panel_load(p->w, c, s0, s1, scratch[0]);
    if ((c + 1) * PANEL < p->n) b[1] = panel_load(p->w, c + 1, s0, s1, scratch[1]);
}

/* Transposes eight rows [16 outputs][2 inputs] of a panel to eight rows [16 inputs][2 outputs]. */
INLINE void pairs_transpose(uint16_t *to, const uint16_t *from) {
    const __m512i swap =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m512i r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(from + 32 * i), swap);
    for (int i = 0; i < 8; i += 2) { // 8 x 8 qwords
        t[i] = _mm512_unpacklo_epi64(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi64(r[i], r[i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        const __m512i a = t[i], b = t[i + 2], c = t[i + 4], d = t[i + 6];
        const __m512i ab0 = _mm512_shuffle_i64x2(a, b, 0x88),
                      ab1 = _mm512_shuffle_i64x2(a, b, 0xdd),
                      cd0 = _mm512_shuffle_i64x2(c, d, 0x88),
                      cd1 = _mm512_shuffle_i64x2(c, d, 0xdd);
        _mm512_store_si512(to + 32 * (0 + i), _mm512_shuffle_i64x2(ab0, cd0, 0x88));
        _mm512_store_si512(to + 32 * (4 + i), _mm512_shuffle_i64x2(ab0, cd0, 0xdd));
        _mm512_store_si512(to + 32 * (2 + i), _mm512_shuffle_i64x2(ab1, cd1, 0x88));
        _mm512_store_si512(to + 32 * (6 + i), _mm512_shuffle_i64x2(ab1, cd1, 0xdd));
    }
}

/* Transposes inputs [16 c, 16 c + 32) of panel `o` of 16 outputs. The results are half a B tile for
 * column tile c (left) and half a B tile for column tile c + 1 (right). */
static void panel_transpose(const struct tile_product *p, int64_t c, int64_t o, uint16_t *left,
                            uint16_t *right) {
    _Alignas(64) uint16_t tile[TILE];
    if (o * PANEL >= p->w->n) {
        memset(left, 0, TILE / 2 * sizeof *left);
        memset(right, 0, TILE / 2 * sizeof *right);
        return;
    }
    const uint16_t *from = panel_load(p->w, o, c / 2, c / 2 + 1, tile);
    pairs_transpose(left, from);
    pairs_transpose(right, from + TILE / 2);
}

/* Packs columns [k, k + 16) of `pairs` pairs of rows from row o on in the order of B tiles; rows
 * that do not exist become zeros. */
INLINE void rows_pair_as(const struct matrix *w, int64_t o, int64_t pairs, int64_t k, uint16_t *to,
                         enum dtype e) {
    const __mmask16 mask = elems_mask(w->k - k);
    for (int64_t i = 0; i < pairs; i++, o += 2, to += 32)
        pairs_store(to, weights_load(w->data, o * w->k + k, o < w->n ? mask : 0, false, e),
                    weights_load(w->data, (o + 1) * w->k + k, o + 1 < w->n ? mask : 0, false, e));
}

/* The same of int8 rows that are stored in pairs. */
static void pairs_unpack(const struct matrix *w, int64_t o, int64_t pairs, int64_t k,
                         uint16_t *to) {
    const __mmask16 mask = elems_mask(w->k - k);
    for (int64_t i = 0; i < pairs; i++, o += 2, to += 32) {
        const int8_t *from = (const int8_t *)w->data + o * w->k + 2 * k;
        const __m512i v =
            _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(o < w->n ? mask : 0, from));
        pairs_store(to, quad_byte(v, 0), quad_byte(v, 1));
    }
}

static void rows_pair(const struct matrix *w, int64_t o, int64_t pairs, int64_t k, uint16_t *to) {
    if (w->layout == LAYOUT_PAIRS_I8) {
        pairs_unpack(w, o, pairs, k, to);
        return;
    }
    switch (rows_dtype(w)) {
    case DTYPE_F32:
        rows_pair_as(w, o, pairs, k, to, DTYPE_F32);
        return;
    case DTYPE_BF16:
        rows_pair_as(w, o, pairs, k, to, DTYPE_BF16);
        return;
    case DTYPE_F16:
        rows_pair_as(w, o, pairs, k, to, DTYPE_F16);
        return;
    default:
        rows_pair_as(w, o, pairs, k, to, DTYPE_I8);
    }
}

/* tile_product.panels of dX = dY W: columns are inputs, and steps run over outputs. */
static void backward_panels(const struct tile_product *p, int64_t c, int64_t s0, int64_t s1,
                            uint16_t (*scratch)[SLICE * TILE], const uint16_t *b[2]) {
    uint16_t *left = scratch[0], *right = scratch[1];
    b[0] = left, b[1] = right;
    for (int64_t s = s0; s < s1; s++, left += TILE, right += TILE) {
        if (!p->w->packed) {
            rows_pair(p->w, p->first_output + 32 * s, 16, c * PANEL, left);
            rows_pair(p->w, p->first_output + 32 * s, 16, (c + 1) * PANEL, right);
            continue;
        }
        const int64_t o = p->first_output / PANEL + 2 * s;
        panel_transpose(p, c, o, left, right);
        panel_transpose(p, c, o + 1, left + TILE / 2, right + TILE / 2);
    }
}

/* Writes 16 values in bf16 to element `at`, unless `tiles` is NULL. */
INLINE void half_row_store(uint16_t *tiles, int64_t at, __m512 v) {
    if (tiles) _mm256_storeu_si256((__m256i *)(void *)(tiles + at), (__m256i)_mm512_cvtneps_pbh(v));
}

/* Stores rows [r0, r1) of a gated block. Its left column tile is x gateᵀ, its right one x upᵀ. */
INLINE void gated_rows_store(const struct tile_product *p, const struct tile_block *b, int64_t r0,
                             int64_t r1) {
    const struct gemm_gated *g = p->gated;
    const int64_t tile = (p->n + 31) / 32 * TILE;
    for (int64_t r = MAX(r0, b->skip); r < MIN(r1, b->rows); r++) {
        const float *sums = b->sums + r / 16 * 512 + r % 16 * 16;
        const __m512 gate = _mm512_load_ps(sums), up = _mm512_load_ps(sums + 256);
        const int64_t at = b->out_offset + r / 16 * tile + r % 16 * 32;
        half_row_store(g->act, at, lanes_silu_mul(gate, up));
        half_row_store(g->gate_out, at, gate);
        half_row_store(g->up_out, at, up);
    }
}

/* Rows [r0, r1) of a block of logits. */
INLINE void softmax_rows_store(const struct tile_product *p, const struct tile_block *b, int64_t r0,
                               int64_t r1) {
    const struct gemm_softmax *s = p->softmax;
    const int64_t tile = (p->n - p->first_output + 31) / 32 * TILE;
    const __m512 scale = _mm512_set1_ps(s->scale);
    for (int64_t r = r0; r < MIN(r1, b->rows); r++) {
        const float *sums = b->sums + r / 16 * 512 + r % 16 * 16;
        const __m512 shift = _mm512_set1_ps(s->shift[b->tile + r]);
        const __m512 left = lanes_exp(
                         _mm512_sub_ps(_mm512_mul_ps(_mm512_load_ps(sums), scale), shift)),
                     right = lanes_exp(
                         _mm512_sub_ps(_mm512_mul_ps(_mm512_load_ps(sums + 256), scale), shift));
        if (s->sums) {
            __m512 sum = _mm512_loadu_ps(s->sums[b->tile + r]);
            sum = _mm512_mask_add_ps(sum, b->left, sum, left);
            _mm512_storeu_ps(s->sums[b->tile + r], _mm512_mask_add_ps(sum, b->right, sum, right));
        }
        if (s->grads) {
            const __m512 weight = _mm512_set1_ps(s->weight[b->tile + r]);
            _mm512_storeu_si512(s->grads + b->out_offset + r / 16 * tile + r % 16 * 32,
                                bf16_join(_mm512_maskz_mul_ps(b->left, left, weight),
                                          _mm512_maskz_mul_ps(b->right, right, weight)));
        }
    }
}

/* Stores rows [r0, r1) of a block's sums to y. */
INLINE void block_rows_store(const struct tile_product *p, const struct tile_block *b, int64_t r0,
                             int64_t r1) {
    if (p->gated) {
        gated_rows_store(p, b, r0, r1);
        return;
    }
    if (p->softmax) {
        softmax_rows_store(p, b, r0, r1);
        return;
    }
    for (int64_t r = MAX(r0, b->skip); r < MIN(r1, b->rows); r++) {
        const float *sums = b->sums + r / 16 * 512 + r % 16 * 16;
        float *y = b->y + r * p->ldy;
        __m512 left = _mm512_load_ps(sums), right = _mm512_load_ps(sums + 256);
        if (p->add) {
            left = _mm512_add_ps(_mm512_maskz_loadu_ps(b->left, y), left);
            right = _mm512_add_ps(_mm512_maskz_loadu_ps(b->right, y + 16), right);
        }
        _mm512_mask_storeu_ps(y, b->left, left);
        _mm512_mask_storeu_ps(y + 16, b->right, right);
    }
}

/* Stores tile register t of the previous block, and computes the first step of the next block in
 * it, from the partial sums `from`, or from +0 if `from` is NULL. */
#define FIRST_STEP(t, at, a, b)                                                                    \
    do {                                                                                           \
        tile_store(t, previous->sums + (at), 64);                                                  \
        if (from)                                                                                  \
            tile_load_sums(t, from + (at), 64);                                                    \
        else                                                                                       \
            tile_zero(t);                                                                          \
        tile_multiply(t, a, b);                                                                    \
    } while (0)

/* Adds the low-rank steps of a block to tile registers 0 … 3; t[i] are the tiles of gemm_low_rank.t
 * for column tile i of the pair. */
INLINE void low_rank_mul(const struct low_rank_panels *low, const uint16_t *const t[2], bool tall) {
    for (int64_t s = 0; s < low->steps[0]; s++) {
        tile_load(6, low->v[0] + s * TILE);
        tile_load(4, t[0] + s * TILE);
        if (tall) tile_load(5, t[0] + (LOW_RANK_STEPS + s) * TILE);
        tile_multiply(0, 4, 6);
        if (tall) tile_multiply(2, 5, 6);
    }
    for (int64_t s = 0; s < low->steps[1]; s++) {
        tile_load(7, low->v[1] + s * TILE);
        tile_load(4, t[1] + s * TILE);
        if (tall) tile_load(5, t[1] + (LOW_RANK_STEPS + s) * TILE);
        tile_multiply(1, 4, 7);
        if (tall) tile_multiply(3, 5, 7);
    }
}

/* Rows of outputs that a block will write. Cache misses would delay the stores, and prefetches of
 * all rows at once would delay the tile loads, so each tile step prefetches some of them. */
struct output_rows {
    const float *y; /* the next row */
    int64_t ldy, rows;
};

/* Prefetches two rows; the second may be a row too far. */
INLINE void outputs_prefetch(struct output_rows *o) {
    if (o->rows <= 0) return;
    for (int i = 0; i < 2; i++, o->rows--, o->y += o->ldy) {
        __builtin_prefetch(o->y, 1, 3);
        __builtin_prefetch(o->y + PANEL, 1, 3);
    }
}

/* Multiplies 32 rows (`tall`; else 16) by two panels, into tile registers 0 … 3, stores the sums of
 * `previous`, and prefetches the outputs of this block. */
INLINE void block_mul(const struct tile_product *p, const uint16_t *a, const uint16_t *const b[2],
                      int64_t steps, const float *from, const struct tile_block *previous,
                      struct output_rows outputs, bool tall) {
    const uint16_t *lower = a + p->steps * TILE;
    const int64_t rows = previous->rows, each = steps > 2 ? (rows + steps - 3) / (steps - 2) : rows;
    int64_t done = 0;
    while (outputs.rows > 2 * steps - 2) outputs_prefetch(&outputs); // too few steps
    tile_load(6, b[0]);
    tile_load(7, b[1]);
    tile_load(4, a);
    if (tall) tile_load(5, lower);
    FIRST_STEP(0, 0, 4, 6);
    FIRST_STEP(1, 256, 4, 7);
    if (tall) {
        FIRST_STEP(2, 512, 5, 6);
        FIRST_STEP(3, 768, 5, 7);
    } else { // the previous block may have been tall
        tile_store(2, previous->sums + 512, 64);
        tile_store(3, previous->sums + 768, 64);
    }
    tile_memory_barrier(previous->sums);
#ifdef tile_multiply_steps
    (void)each;
    while (outputs.rows > 0) outputs_prefetch(&outputs);
    tile_multiply_steps(0, 4, a, b, 1, steps);
    if (tall) tile_multiply_steps(2, 5, lower, b, 1, steps);
#else
    for (int64_t s = 1; s < steps; s++) {
        tile_load(6, b[0] + s * TILE);
        tile_load(7, b[1] + s * TILE);
        tile_load(4, a + s * TILE);
        if (tall) tile_load(5, lower + s * TILE);
        tile_multiply(0, 4, 6);
        outputs_prefetch(&outputs);
        tile_multiply(1, 4, 7);
        if (s > 1 && done < rows) {
            block_rows_store(p, previous, done, done + each);
            done += each;
        }
        if (tall) {
            tile_multiply(2, 5, 6);
            tile_multiply(3, 5, 7);
        }
    }
#endif
    if (done < rows) block_rows_store(p, previous, done, rows);
}

/* The state of a product between its blocks. */
struct product_run {
    const struct tile_product *p;
    struct tile_block previous;
    struct low_rank_panels *low_panels;
    float *sums, *partial; /* [SUMS] and [BLOCKS_MAX][SUMS] */
    struct row_block blocks[BLOCKS_MAX];
    int n_blocks;
};

/* Sets t->blocks to the blocks from row `row` on, at most BLOCKS_MAX; returns the first row after
 * them. All rows of a block have the same low-rank parts. */
static int64_t blocks_next(struct product_run *t, int64_t row) {
    const struct tile_product *p = t->p;
    const struct gemm_low_rank none = {0}, *low = p->low_rank ? p->low_rank : &none;
    int i = 0;
    while (i < low->n && low->rows[i].end <= row + p->low_rank_row) i++;
    for (t->n_blocks = 0; t->n_blocks < BLOCKS_MAX && row < p->rows;) {
        const bool inside = i < low->n && low->rows[i].begin <= row + p->low_rank_row;
        int64_t end = p->rows;
        if (i < low->n)
            end = MIN(end, (inside ? low->rows[i].end : low->rows[i].begin) - p->low_rank_row);
        struct row_block *b = &t->blocks[t->n_blocks++];
        b->tile = row / 16 * 16;
        b->skip = row - b->tile;
        b->rows = MIN(end - b->tile, BLOCK_ROWS);
        b->low_rank = inside ? &low->rows[i] : NULL;
        row = b->tile + b->rows;
        if (inside && row == end) i++;
    }
    return row;
}

/* Packs columns [16 c, 16 c + 32) of the low-rank parts of `rows` as B tiles; if gated, columns [16
 * c, 16 c + 16) of the parts of gate and of up. */
static void low_rank_panels_pack(struct low_rank_panels *low, const struct tile_product *p,
                                 const struct low_rank_rows *rows, int64_t c) {
    low->rows = rows;
    for (int i = 0; i < 2; i++) {
        const int product = p->gated ? i : 0;
        int64_t end = 0;
        memset(low->v[i], 0, sizeof low->v[i]);
        for (int k = 0; k < rows->n_parts[product]; k++) {
            const struct low_rank_part *part = &rows->parts[product][k];
            rows_pair(&part->v, 0, (part->v.n + 1) / 2, (p->gated ? c : c + i) * PANEL,
                      low->v[i] + part->column * 16);
            end = MAX(end, part->column + part->v.n);
        }
        low->steps[i] = (end + 31) / 32;
    }
    tile_memory_barrier(low->v);
}

/* Adds the low-rank steps of a block's column tiles c and c + 1 (gated: c of gate and of up). */
static void block_add_low_rank(struct product_run *t, const struct row_block *b, int64_t c,
                               bool tall) {
    const struct tile_product *p = t->p;
    if (t->low_panels->rows != b->low_rank) low_rank_panels_pack(t->low_panels, p, b->low_rank, c);
    const int64_t at = (b->tile + p->low_rank_row) * LOW_RANK_MAX;
    const uint16_t *rows[2] = {p->low_rank->t[0] + at, p->low_rank->t[p->gated ? 1 : 0] + at};
    if (tall)
        low_rank_mul(t->low_panels, rows, true);
    else
        low_rank_mul(t->low_panels, rows, false);
}

/* Multiplies the blocks with column tiles c and c + 1, steps [s0, s1). */
static void columns_mul(struct product_run *t, int64_t c, int64_t s0, int64_t s1,
                        const uint16_t *const b[2]) {
    const struct tile_product *p = t->p;
    t->low_panels->rows = NULL;
    for (int i = 0; i < t->n_blocks; i++) {
        const struct row_block *r = &t->blocks[i];
        const uint16_t *a = p->a + (r->tile / 16 * p->steps + s0) * TILE;
        float *partial = t->partial + i * SUMS;
        const float *from = s0 > 0 ? partial : NULL;
        const bool tall = r->rows > 16;
        tile_set_rows(4, MIN(r->rows, 16));
        tile_set_rows(5, r->rows - 16);
        struct output_rows outputs = {.ldy = p->ldy};
        if (p->y && s1 == p->steps) {
            outputs.y = p->y + (r->tile + r->skip) * p->ldy + c * PANEL;
            outputs.rows = r->rows - r->skip;
        }
        if (tall)
            block_mul(p, a, b, s1 - s0, from, &t->previous, outputs, true);
        else
            block_mul(p, a, b, s1 - s0, from, &t->previous, outputs, false);
        t->previous = (struct tile_block){.sums = partial};
        if (s1 < p->steps) continue;
        if (r->low_rank) block_add_low_rank(t, r, c, tall);
        t->previous = (struct tile_block){.sums = t->sums,
                                          .y = p->y + r->tile * p->ldy + c * PANEL,
                                          .skip = r->skip,
                                          .rows = r->rows,
                                          .left = elems_mask(p->n - c * PANEL),
                                          .right = elems_mask(p->n - (c + 1) * PANEL)};
        if (p->gated || p->softmax) {
            const int64_t first = p->softmax ? p->first_output : 0,
                          tiles = (p->n - first + 31) / 32, column = c - first / PANEL;
            t->previous.tile = r->tile;
            t->previous.out_offset =
                (r->tile / 16 * tiles + column / 2) * TILE + column % 2 * PANEL;
            if (r->tile + r->rows == p->rows) t->previous.rows = tall ? 32 : 16; // zero padding
        }
        prefetch_step(p->prefetch);
    }
}

/* Computes column tiles [c0, c1) of all rows. */
static void tile_product_run(const struct tile_product *p, int64_t c0, int64_t c1) {
    _Alignas(64) uint16_t scratch[2][SLICE * TILE];
    _Alignas(64) float sums[SUMS], partial[BLOCKS_MAX * SUMS];
    struct low_rank_panels low;
    struct product_run t = {
        .p = p, .previous = {.sums = sums}, .low_panels = &low, .sums = sums, .partial = partial};
    tiles_begin();
    prefetch_begin(p->prefetch, (c1 - c0 + 1) / 2 * ((p->rows + BLOCK_ROWS - 1) / BLOCK_ROWS));
    for (int64_t row = p->skip; row < p->rows;) {
        row = blocks_next(&t, row);
        for (int64_t c = c0; c < c1; c += p->gated ? 1 : 2)
            for (int64_t s0 = 0; s0 < p->steps; s0 += SLICE) {
                const int64_t s1 = MIN(s0 + SLICE, p->steps);
                const uint16_t *b[2];
                p->panels(p, c, s0, s1, scratch, b);
                if (!p->gated && (c + 1) * PANEL >= p->n) b[1] = b[0];
                tile_memory_barrier(scratch);
                columns_mul(&t, c, s0, s1, b);
            }
    }
    tile_store(0, sums, 64);
    tile_store(1, sums + 256, 64);
    tile_store(2, sums + 512, 64);
    tile_store(3, sums + 768, 64);
    tile_memory_barrier(sums);
    block_rows_store(p, &t.previous, 0, BLOCK_ROWS);
}

static void tiles_gemm(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                       int64_t n0, int64_t n1, bool add) {
    const struct tile_product p = {.y = y,
                                   .ldy = ldy,
                                   .a = in->tiles,
                                   .rows = in->rows,
                                   .skip = in->skip,
                                   .steps = (in->k + 31) / 32,
                                   .n = n1,
                                   .add = add,
                                   .w = w,
                                   .low_rank = in->low_rank,
                                   .low_rank_row = in->low_rank_row,
                                   .panels = forward_panels,
                                   .prefetch = in->prefetch};
    tile_product_run(&p, n0 / PANEL, (n1 + PANEL - 1) / PANEL);
}

static void tiles_gemm_softmax(const struct gemm_softmax *s, const struct gemm_input *in,
                               const struct matrix *w, int64_t n0, int64_t n1) {
    const struct tile_product p = {.softmax = s,
                                   .a = in->tiles,
                                   .rows = in->rows,
                                   .steps = (in->k + 31) / 32,
                                   .n = n1,
                                   .w = w,
                                   .first_output = n0,
                                   .panels = forward_panels,
                                   .prefetch = in->prefetch};
    tile_product_run(&p, n0 / PANEL, (n1 + PANEL - 1) / PANEL);
}

static void gated_panels(const struct tile_product *p, int64_t c, int64_t s0, int64_t s1,
                         uint16_t (*scratch)[SLICE * TILE], const uint16_t *b[2]) {
    b[0] = panel_load(p->gated->gate, c, s0, s1, scratch[0]);
    b[1] = panel_load(p->gated->up, c, s0, s1, scratch[1]);
}

/* Zeroes the second 16 columns of the last tile of outputs, which have no column tile. */
static void half_tile_clear(uint16_t *tiles, int64_t rows, int64_t n) {
    const int64_t tile = (n + 31) / 32 * TILE;
    for (int64_t m = 0; tiles && m < (rows + 15) / 16 * 16; m++)
        memset(tiles + m / 16 * tile + n / 32 * TILE + m % 16 * 32 + PANEL, 0,
               PANEL * sizeof *tiles);
}

static void tiles_gemm_silu(const struct gemm_gated *g, const struct gemm_input *in, int64_t n0,
                            int64_t n1) {
    const struct tile_product p = {.gated = g,
                                   .a = in->tiles,
                                   .rows = in->rows,
                                   .steps = (in->k + 31) / 32,
                                   .n = g->gate->n,
                                   .low_rank = in->low_rank,
                                   .low_rank_row = in->low_rank_row,
                                   .panels = gated_panels,
                                   .prefetch = in->prefetch};
    const int64_t end = (n1 + PANEL - 1) / PANEL;
    tile_product_run(&p, n0 / PANEL, end);
    if (end % 2 == 0) return;
    half_tile_clear(g->act, in->rows, g->gate->n);
    half_tile_clear(g->gate_out, in->rows, g->gate->n);
    half_tile_clear(g->up_out, in->rows, g->gate->n);
}

static void tiles_gemm_backward(float *dx, int64_t lddx, const struct gemm_input *dy,
                                const struct matrix *w, int64_t o0, int64_t k0, int64_t k1,
                                bool add) {
    const struct tile_product p = {.y = dx,
                                   .ldy = lddx,
                                   .a = dy->tiles,
                                   .rows = dy->rows,
                                   .skip = dy->skip,
                                   .steps = (dy->k + 31) / 32,
                                   .n = k1,
                                   .add = add,
                                   .w = w,
                                   .low_rank = dy->low_rank,
                                   .low_rank_row = dy->low_rank_row,
                                   .first_output = o0,
                                   .panels = backward_panels};
    tile_product_run(&p, k0 / PANEL, (k1 + PANEL - 1) / PANEL);
}

static void tiles_pack_row(const float *x, int64_t k, uint16_t *out) {
    for (int64_t i = 0; i < k; i += 32, out += TILE)
        _mm512_storeu_si512(out, bf16_load(x, i, k - i, DTYPE_F32));
}

static void tiles_mask_row(uint16_t *out, const uint16_t *row, const uint8_t *mask, int64_t k) {
    for (int64_t i = 0; i < k; i += 32, out += TILE, row += TILE) {
        uint32_t bits = 0;
        memcpy(&bits, mask + i / 8, (size_t)MIN((k - i + 7) / 8, 4));
        _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(bits, row));
    }
}

/* 16 values in bf16. */
INLINE __m512 half_row_load(const uint16_t *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)from)), 16));
}

/* act, dgate and dup of 16 values. */
struct gated_16 {
    __m512 act, dgate, dup;
};

/* Computes values [i, i + 16) of the row, and stores them in f32 if `f32`. */
INLINE struct gated_16 gated_backward_16(const struct gated_backward_row *r, int64_t i, int64_t n,
                                         bool f32) {
    const int64_t at = i / 32 * TILE + i % 32;
    const __mmask16 mask = elems_mask(n - i);
    const __m512 one = _mm512_set1_ps(1.0f), gate = half_row_load(r->gate + at),
                 up = half_row_load(r->up + at), dact = _mm512_maskz_loadu_ps(mask, r->dact + i);
    const __m512 minus = _mm512_xor_ps(gate, _mm512_set1_ps(-0.0f)),
                 sigma = _mm512_div_ps(one, _mm512_add_ps(one, lanes_exp(minus))),
                 y = _mm512_mul_ps(gate, sigma),
                 slope = _mm512_add_ps(sigma, _mm512_mul_ps(y, _mm512_sub_ps(one, sigma)));
    const struct gated_16 v = {.act = _mm512_mul_ps(y, up),
                               .dgate = _mm512_mul_ps(slope, _mm512_mul_ps(dact, up)),
                               .dup = _mm512_mul_ps(y, dact)};
    if (f32) {
        _mm512_mask_storeu_ps(r->act + i, mask, v.act);
        _mm512_mask_storeu_ps(r->dgate + i, mask, v.dgate);
        _mm512_mask_storeu_ps(r->dup + i, mask, v.dup);
    }
    return v;
}

INLINE void gated_row_run(const struct gated_backward_row *r, int64_t n, bool f32) {
    for (int64_t i = 0, at = 0; i < n; i += 32, at += TILE) {
        const struct gated_16 low = gated_backward_16(r, i, n, f32),
                              high = gated_backward_16(r, i + 16, n, f32);
        _mm512_storeu_si512(r->act_tiles + at, bf16_join(low.act, high.act));
        _mm512_storeu_si512(r->dgate_tiles + at, bf16_join(low.dgate, high.dgate));
        _mm512_storeu_si512(r->dup_tiles + at, bf16_join(low.dup, high.dup));
    }
}

static void tiles_gated_backward(const struct gated_backward_row *r, int64_t n) {
    if (r->act)
        gated_row_run(r, n, true);
    else
        gated_row_run(r, n, false);
}

static void tiles_fill_product(struct kernels *k) {
    k->gated_backward = tiles_gated_backward;
    k->tiles_pack_row = tiles_pack_row;
    k->tiles_mask_row = tiles_mask_row;
    k->gemm_tiles = tiles_gemm;
    k->gemm_tiles_silu = tiles_gemm_silu;
    k->gemm_tiles_softmax = tiles_gemm_softmax;
    k->gemm_tiles_backward = tiles_gemm_backward;
}

#endif
