/*
 * amx_grad: gradients of weights in bf16 tiles, dW += dYᵀ X: the fast class on AMX.
 *
 * The sum runs over the rows of a batch. A row tile is 16 outputs of dY by 32 rows, transposed
 * while it is packed; a column tile is 16 inputs of X by 16 pairs of rows, which needs no
 * transpose. The sums are loaded from the f32 gradient and stored to it, which is exact, so a batch
 * may be divided into several calls at multiples of 32 rows.
 *
 * Not here: dX = dY W (amx_bf16.c).
 *
 * Invariant: an element of dW is one chain over groups of 32 rows in their order; the last group is
 * padded with zeros. It does not depend on the range of outputs that a call computes.
 */
#include <immintrin.h>

#include "kernel/amx.h"

enum {
    GROUP_ROWS = 32,
    GROUPS = 16,           /* groups of rows whose tiles of dY are packed at once */
    COLUMN = GROUPS * TILE /* elements of the tiles of 16 outputs and these groups */
};

/* Packs 16 columns of up to 32 rows x[rows][ld] as a tile: [16 pairs of rows][16 columns][2], or
 * with `transpose` [16 columns][32 rows]. Columns outside of `mask` become zeros. */
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

/* The same for `left` columns of a group; the tiles of adjacent columns are `column` elements
 * apart. */
INLINE void group_pack_columns(uint16_t *to, int64_t column, const float *x, int64_t ld,
                               int64_t rows, int64_t left, bool transpose) {
    for (int64_t c = 0; c < left; c += 16, to += column)
        if (rows == 32 && left - c >= 16)
            group_pack(to, x + c, ld, 32, 0xFFFF, transpose);
        else
            group_pack(to, x + c, ld, rows, elems_mask(left - c), transpose);
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

#define TILE_STORE(t, b, i, j) _tile_stored(t, block_tile(b, i, j), 4 * (b)->ld)
/* Stores tile register t of the previous block, if there is one, and computes the first step of the
 * current block in it. */
#define GRAD_STEP(t, i, j, x, y)                                                                   \
    do {                                                                                           \
        if (previous->data) TILE_STORE(t, previous, i, j);                                         \
        _tile_loadd(t, block_tile(current, i, j), 4 * current->ld);                                \
        _tile_dpbf16ps(t, x, y);                                                                   \
    } while (0)

/* Adds n groups to the block `current`, in tile registers 0 … 3. `tall`: the second row tile
 * exists; `wide`: the second column tile exists. `a` has the row tiles, the second COLUMN elements
 * after the first; `b` the column tiles, the second `column` elements after the first. */
INLINE void block_add(const uint16_t *a, const uint16_t *b, int64_t column, int64_t n,
                      const struct grad_block *current, const struct grad_block *previous,
                      bool tall, bool wide) {
    for (int64_t g = 0; g < n; g++, a += TILE, b += TILE) {
        _tile_loadd(6, b, 64);
        if (wide) _tile_loadd(7, b + column, 64);
        _tile_loadd(4, a, 64);
        if (tall) _tile_loadd(5, a + COLUMN, 64);
        if (g == 0) {
            GRAD_STEP(0, 0, 0, 4, 6);
            if (wide) GRAD_STEP(1, 0, 1, 4, 7);
            if (tall) GRAD_STEP(2, 1, 0, 5, 6);
            if (tall && wide) GRAD_STEP(3, 1, 1, 5, 7);
            continue;
        }
        _tile_dpbf16ps(0, 4, 6);
        if (wide) _tile_dpbf16ps(1, 4, 7);
        if (tall) _tile_dpbf16ps(2, 5, 6);
        if (tall && wide) _tile_dpbf16ps(3, 5, 7);
    }
}

/* Stores a whole block that is still in tile registers (b->data), and clears b->data. */
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
static void block_add_partial(const uint16_t *a, const uint16_t *b, int64_t column, int64_t groups,
                              struct grad_block block, int64_t n, int64_t k) {
    _Alignas(64) float copy[32 * 32];
    const struct grad_block current = {copy, 32}, none = {0};
    const bool tall = n > 16, wide = k > 16;
    copy_load(copy, &block, n, k);
    tile_memory_barrier(copy);
    if (tall && wide)
        block_add(a, b, column, groups, &current, &none, true, true);
    else if (tall)
        block_add(a, b, column, groups, &current, &none, true, false);
    else if (wide)
        block_add(a, b, column, groups, &current, &none, false, true);
    else
        block_add(a, b, column, groups, &current, &none, false, false);
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
 * that is still in tile registers, before and after the call. */
static void outputs_grad(const struct weight_grad_job *j, int64_t n, int64_t g0, int64_t groups,
                         struct grad_block *previous) {
    _Alignas(64) uint16_t a[2 * COLUMN];
    const int64_t outs = MIN(j->n - n, 32), column = groups_of(j) * TILE;
    for (int64_t g = g0; g < g0 + groups; g++)
        group_pack_columns(a + (g - g0) * TILE, COLUMN, j->dy + g * GROUP_ROWS * j->n + n, j->n,
                           MIN(j->rows - g * GROUP_ROWS, GROUP_ROWS), outs, true);
    tile_memory_barrier(a);
    for (int64_t k = 0; k < j->k; k += 32) {
        const uint16_t *b = j->pairs + k / 16 * column + g0 * TILE;
        const struct grad_block current = {j->dw + n * j->k + k, j->k};
        if (outs == 32 && k + 32 <= j->k) {
            block_add(a, b, column, groups, &current, previous, true, true);
            *previous = current;
            continue;
        }
        block_store(previous);
        block_add_partial(a, b, column, groups, current, outs, MIN(j->k - k, 32));
    }
}

static void amx_gemm_tiles_grad(const struct weight_grad_job *j, int64_t n0, int64_t n1) {
    const int64_t groups = groups_of(j);
    struct grad_block previous = {0};
    tile_config_full();
    for (int64_t g = 0; g < groups; g += GROUPS)
        for (int64_t n = n0; n < n1; n += 32)
            outputs_grad(j, n, g, MIN(groups - g, GROUPS), &previous);
    block_store(&previous);
}

static void amx_pack_pairs(const struct weight_grad_job *j, int64_t g) {
    const int64_t row = g * GROUP_ROWS;
    group_pack_columns(j->pairs + g * TILE, groups_of(j) * TILE, j->x + row * j->k, j->k,
                       MIN(j->rows - row, GROUP_ROWS), j->k, false);
}

void amx_fill_grad(struct kernels *k) {
    k->gemm_tiles_grad = amx_gemm_tiles_grad;
    k->tiles_pack_pairs = amx_pack_pairs;
}
