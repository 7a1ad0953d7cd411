/*
 * tiles_grad: gradients of weights, dW += dYᵀ X, in bf16 tiles: the fast class (tiles.h).
 *
 * The sum runs over the rows of a batch, in groups of 32. The two operands of a tile product hold
 * one group: a row tile holds 16 outputs (columns of dY) by 32 rows, transposed while it is packed;
 * a column tile holds 16 pairs of rows by 16 inputs (columns of X), which needs no transpose. The
 * sums are loaded from the f32 gradient and stored to it without rounding, so the bits of dW do not
 * change if a batch is divided into several calls at multiples of 32 rows.
 *
 * The gradients of low-rank factors are sums of the same kind. Their operands are t [rows][ranks],
 * transposed while it is packed, and x, which exists as tiles of an earlier product already.
 *
 * Not here: dX = dY W (tiles_product.h).
 *
 * Invariant: an element of dW is computed by adding the groups one after the other; the last group
 * is padded with zeros. Its bits do not depend on the range of outputs that a call computes.
 */
#ifndef SHOAL_KERNEL_TILES_GRAD_H
#define SHOAL_KERNEL_TILES_GRAD_H

#include "kernel/tiles.h"

enum {
    GROUP_ROWS = 32,
    GROUPS = 16,             /* groups of rows whose tiles of dY are packed at once */
    DY_PANEL = GROUPS * TILE /* elements of a panel of row tiles: 16 outputs by these groups */
};

/* Packs 16 columns of up to 32 rows x[rows][ld] as a tile: [16 pairs of rows][16 columns][2], or
 * with `transpose` [16 columns][32 rows]. Missing rows, and columns outside of `mask`, become
 * zeros. */
INLINE void group_pack(uint16_t *to, const float *x, int64_t ld, int64_t rows, __mmask16 mask,
                       bool transpose) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = bf16_interleave(
            _mm512_maskz_loadu_ps(2 * i < rows ? mask : 0, x + 2 * i * ld),
            _mm512_maskz_loadu_ps(2 * i + 1 < rows ? mask : 0, x + (2 * i + 1) * ld));
    if (transpose) transpose_16(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + 32 * i, r[i]);
}

/* Packs `columns` columns of a group, 16 per tile. A panel is the tiles of the same 16 columns for
 * successive groups; the tiles of successive panels are `panel` elements apart. */
INLINE void group_pack_columns(uint16_t *to, int64_t panel, const float *x, int64_t ld,
                               int64_t rows, int64_t columns, bool transpose) {
    for (int64_t c = 0; c < columns; c += 16, to += panel)
        if (rows == 32 && columns - c >= 16)
            group_pack(to, x + c, ld, 32, 0xFFFF, transpose);
        else
            group_pack(to, x + c, ld, rows, elems_mask(columns - c), transpose);
}

/* A block of 32 by 32 elements of the gradient, [32][ld], or a copy of it: two row tiles by two
 * column tiles. */
struct grad_block {
    float *data;
    int64_t ld;
};

INLINE float *block_tile(const struct grad_block *b, int i, int j) {
    return b->data + 16 * i * b->ld + 16 * j;
}

#define TILE_STORE(t, b, i, j) tile_store(t, block_tile(b, i, j), 4 * (b)->ld)
/* The first group of a block: stores the sums that tile register t still has of the previous block,
 * if there is one, loads those of the current block into it, and adds the product of tile registers
 * x and y. */
#define ADD_FIRST_GROUP(t, i, j, x, y)                                                             \
    do {                                                                                           \
        if (previous->data) TILE_STORE(t, previous, i, j);                                         \
        tile_load_sums(t, block_tile(current, i, j), 4 * current->ld);                             \
        tile_multiply(t, x, y);                                                                    \
    } while (0)

/* Adds n groups to the block `current`, whose sums stay in tile registers 0 … 3; those of
 * `previous` are stored first. `tall`: the block has a second row tile; `wide`: it has a second
 * column tile. `a`: the row tiles, in panels of DY_PANEL elements; `b`: the column tiles, in panels
 * of `panel` elements. */
INLINE void block_add(const uint16_t *a, const uint16_t *b, int64_t panel, int64_t n,
                      const struct grad_block *current, const struct grad_block *previous,
                      bool tall, bool wide) {
    for (int64_t g = 0; g < n; g++, a += TILE, b += TILE) {
        tile_load(6, b);
        if (wide) tile_load(7, b + panel);
        tile_load(4, a);
        if (tall) tile_load(5, a + DY_PANEL);
        if (g == 0) {
            ADD_FIRST_GROUP(0, 0, 0, 4, 6);
            if (wide) ADD_FIRST_GROUP(1, 0, 1, 4, 7);
            if (tall) ADD_FIRST_GROUP(2, 1, 0, 5, 6);
            if (tall && wide) ADD_FIRST_GROUP(3, 1, 1, 5, 7);
            continue;
        }
        tile_multiply(0, 4, 6);
        if (wide) tile_multiply(1, 4, 7);
        if (tall) tile_multiply(2, 5, 6);
        if (tall && wide) tile_multiply(3, 5, 7);
    }
}

/* Stores the block of 32 by 32 elements whose sums are still in tile registers, unless b->data is
 * NULL, which means none; sets b->data to NULL. */
static void block_store(struct grad_block *b) {
    if (b->data) {
        TILE_STORE(0, b, 0, 0);
        TILE_STORE(1, b, 0, 1);
        TILE_STORE(2, b, 1, 0);
        TILE_STORE(3, b, 1, 1);
        tile_memory_barrier(b->data);
    }
    b->data = NULL;
}

/* Copies the n by k elements that exist of a block to copy [32][32]; the others become zeros. */
INLINE void copy_load(float *copy, const struct grad_block *b, int64_t n, int64_t k) {
    for (int64_t i = 0; i < 32; i++)
        for (int64_t c = 0; c < 32; c += 16)
            _mm512_storeu_ps(copy + 32 * i + c, _mm512_maskz_loadu_ps(i < n ? elems_mask(k - c) : 0,
                                                                      b->data + i * b->ld + c));
}

/* Copies these elements back to the block. */
INLINE void copy_store(const float *copy, const struct grad_block *b, int64_t n, int64_t k) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < k; c += 16)
            _mm512_mask_storeu_ps(b->data + i * b->ld + c, elems_mask(k - c),
                                  _mm512_loadu_ps(copy + 32 * i + c));
}

/* Adds groups to a block with fewer than 32 outputs (n) or inputs (k), through a copy. */
static void block_add_partial(const uint16_t *a, const uint16_t *b, int64_t panel, int64_t groups,
                              struct grad_block block, int64_t n, int64_t k) {
    _Alignas(64) float copy[32 * 32];
    const struct grad_block current = {copy, 32}, none = {0};
    const bool tall = n > 16, wide = k > 16;
    copy_load(copy, &block, n, k);
    tile_memory_barrier(copy);
    if (tall && wide)
        block_add(a, b, panel, groups, &current, &none, true, true);
    else if (tall)
        block_add(a, b, panel, groups, &current, &none, true, false);
    else if (wide)
        block_add(a, b, panel, groups, &current, &none, false, true);
    else
        block_add(a, b, panel, groups, &current, &none, false, false);
    TILE_STORE(0, &current, 0, 0);
    if (wide) TILE_STORE(1, &current, 0, 1);
    if (tall) TILE_STORE(2, &current, 1, 0);
    if (tall && wide) TILE_STORE(3, &current, 1, 1);
    tile_memory_barrier(copy);
    copy_store(copy, &block, n, k);
}

static int64_t groups_of(const struct weight_grad_job *j) {
    return (j->rows + GROUP_ROWS - 1) / GROUP_ROWS;
}

/* Adds groups [g0, g0 + groups) to outputs [n, n + 32) of the gradient. `previous` is the block
 * whose sums are still in tile registers and not stored, before and after the call. */
static void outputs_grad(const struct weight_grad_job *j, int64_t n, int64_t g0, int64_t groups,
                         struct grad_block *previous) {
    _Alignas(64) uint16_t a[2 * DY_PANEL];
    const int64_t outs = MIN(j->n - n, 32), panel = groups_of(j) * TILE;
    for (int64_t g = g0; g < g0 + groups; g++)
        group_pack_columns(a + (g - g0) * TILE, DY_PANEL, j->dy + g * GROUP_ROWS * j->n + n, j->n,
                           MIN(j->rows - g * GROUP_ROWS, GROUP_ROWS), outs, true);
    tile_memory_barrier(a);
    for (int64_t k = 0; k < j->k; k += 32) {
        const uint16_t *b = j->pairs + k / 16 * panel + g0 * TILE;
        const struct grad_block current = {j->dw + n * j->k + k, j->k};
        if (outs == 32 && k + 32 <= j->k) {
            block_add(a, b, panel, groups, &current, previous, true, true);
            *previous = current;
            continue;
        }
        block_store(previous);
        block_add_partial(a, b, panel, groups, current, outs, MIN(j->k - k, 32));
    }
}

static void tiles_gemm_grad(const struct weight_grad_job *j, int64_t n0, int64_t n1) {
    const int64_t groups = groups_of(j);
    struct grad_block previous = {0};
    tiles_begin();
    for (int64_t g = 0; g < groups; g += GROUPS)
        for (int64_t n = n0; n < n1; n += 32)
            outputs_grad(j, n, g, MIN(groups - g, GROUPS), &previous);
    block_store(&previous);
}

static void tiles_pack_pairs(const struct weight_grad_job *j, int64_t g) {
    const int64_t row = g * GROUP_ROWS;
    group_pack_columns(j->pairs + g * TILE, groups_of(j) * TILE, j->x + row * j->k, j->k,
                       MIN(j->rows - row, GROUP_ROWS), j->k, false);
}

/* The gradient of a low-rank factor: tile registers 0 and 1 are the sums of 16 ranks by 32 columns,
 * 4 the t of a group, transposed, 6 and 7 the x of a group as pairs of rows. */

enum { RANK_TILES = 4 }; /* tiles of ranks that are multiplied with the same pairs */

/* Packs up to 32 rows of t, 16 of its columns, as a row tile [16 ranks][32 rows]. */
static void ranks_pack(uint16_t *to, const struct low_rank_grad_job *j, int64_t row, int64_t rank) {
    const __mmask16 mask = elems_mask(j->ranks - rank);
    const __m512 factor = _mm512_set1_ps(j->factor);
    const float *t = j->t + row * j->ldt + rank;
    const int64_t rows = MIN(j->rows - row, GROUP_ROWS);
    __m512i r[16];
    for (int i = 0; i < 16; i++, t += 2 * j->ldt)
        r[i] = bf16_interleave(
            _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(2 * i < rows ? mask : 0, t)),
            _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(2 * i + 1 < rows ? mask : 0, t + j->ldt)));
    transpose_16(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + 32 * i, r[i]);
}

/* Pairs the rows of a group of x, columns [c, c + 32), as two column tiles. */
static void tiles_pair(uint16_t *to, const struct low_rank_grad_job *j, int64_t row, int64_t c) {
    static const uint16_t order[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + 32);
    const int64_t first = j->row + row, rows = MIN(j->rows - row, GROUP_ROWS),
                  tile = (j->x->k + 31) / 32 * TILE; // elements of 16 rows
    const uint16_t *x = j->x->tiles + c / 32 * TILE;
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t i = 0; i < GROUP_ROWS; i += 2, to += 32) {
        const int64_t m = first + i, n = m + 1;
        const __m512i even = i < rows ? _mm512_loadu_si512(x + m / 16 * tile + m % 16 * 32) : zero,
                      odd =
                          i + 1 < rows ? _mm512_loadu_si512(x + n / 16 * tile + n % 16 * 32) : zero;
        _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
        _mm512_store_si512(to + TILE, _mm512_permutex2var_epi16(even, high, odd));
    }
}

/* 16 ranks by 16 columns of a gradient, in memory: up to 16 lines of up to 16 elements, which are
 * ranks, or if transposed columns. */
struct factor_block {
    float *lines;
    int64_t n, ld;
    __mmask16 mask;
    bool transposed;
};

static struct factor_block factor_block_at(const struct low_rank_grad_job *j, int64_t rank,
                                           int64_t c, int64_t columns) {
    const int64_t ranks = MIN(j->ranks - rank, 16);
    if (j->transposed)
        return (struct factor_block){j->g + c * j->ld + rank, columns, j->ld, elems_mask(ranks),
                                     true};
    return (struct factor_block){j->g + rank * j->ld + c, ranks, j->ld, elems_mask(columns), false};
}

/* Copies a block to sums [16 ranks][16 columns]; elements that do not exist become zeros. */
static void factor_load(float *sums, const struct factor_block *b) {
    __m512i r[16];
    for (int64_t i = 0; i < 16; i++)
        r[i] = _mm512_castps_si512(
            _mm512_maskz_loadu_ps(i < b->n ? b->mask : 0, b->lines + i * b->ld));
    if (b->transposed) transpose_16(r);
    for (int i = 0; i < 16; i++) _mm512_store_si512(sums + 16 * i, r[i]);
}

/* Copies sums back to a block. */
static void factor_store(const float *sums, const struct factor_block *b) {
    __m512i r[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(sums + 16 * i);
    if (b->transposed) transpose_16(r);
    for (int64_t i = 0; i < b->n; i++)
        _mm512_mask_storeu_ps(b->lines + i * b->ld, b->mask, _mm512_castsi512_ps(r[i]));
}

/* Adds the groups to 16 ranks from `rank` on by 32 columns from c on. */
static void ranks_add(const struct low_rank_grad_job *j, int64_t rank, int64_t c, int64_t c1,
                      const uint16_t *ranks, const uint16_t *pairs, int64_t groups) {
    _Alignas(64) float sums[2][16 * 16];
    const struct factor_block left = factor_block_at(j, rank, c, MIN(c1 - c, 16)),
                              right = factor_block_at(j, rank, c + 16, MIN(c1 - c - 16, 16));
    factor_load(sums[0], &left);
    factor_load(sums[1], &right);
    tile_memory_barrier(sums);
    tile_load_sums(0, sums[0], 64);
    tile_load_sums(1, sums[1], 64);
    for (int64_t g = 0; g < groups; g++, ranks += TILE, pairs += 2 * TILE) {
        tile_load(4, ranks);
        tile_load(6, pairs);
        tile_load(7, pairs + TILE);
        tile_multiply(0, 4, 6);
        tile_multiply(1, 4, 7);
    }
    tile_store(0, sums[0], 64);
    tile_store(1, sums[1], 64);
    tile_memory_barrier(sums);
    factor_store(sums[0], &left);
    factor_store(sums[1], &right);
}

static void tiles_gemm_low_rank_grad(const struct low_rank_grad_job *j, int64_t c0, int64_t c1) {
    enum { SLAB = GROUPS * GROUP_ROWS };
    _Alignas(64) uint16_t pairs[GROUPS * 2 * TILE], ranks[RANK_TILES][GROUPS * TILE];
    tiles_begin();
    for (int64_t row = 0; row < j->rows; row += SLAB) {
        const int64_t groups = (MIN(j->rows - row, SLAB) + GROUP_ROWS - 1) / GROUP_ROWS;
        for (int64_t rank = 0; rank < j->ranks; rank += 16 * RANK_TILES) {
            const int64_t n = MIN((j->ranks - rank + 15) / 16, RANK_TILES);
            for (int64_t i = 0; i < n * groups; i++)
                ranks_pack(ranks[i / groups] + i % groups * TILE, j, row + i % groups * GROUP_ROWS,
                           rank + i / groups * 16);
            for (int64_t c = c0; c < c1; c += 32) {
                for (int64_t g = 0; g < groups; g++)
                    tiles_pair(pairs + 2 * g * TILE, j, row + g * GROUP_ROWS, c);
                tile_memory_barrier(pairs);
                for (int64_t i = 0; i < n; i++)
                    ranks_add(j, rank + 16 * i, c, c1, ranks[i], pairs, groups);
            }
        }
    }
}

static void tiles_fill_grad(struct kernels *k) {
    k->gemm_tiles_low_rank_grad = tiles_gemm_low_rank_grad;
    k->gemm_tiles_grad = tiles_gemm_grad;
    k->tiles_pack_pairs = tiles_pack_pairs;
}

#endif
