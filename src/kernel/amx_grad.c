/*
 * amx_grad: gradients of weights, dW += dYᵀ X, with bf16 tiles on AMX (numeric class "fast").
 *
 * The sum runs over the rows of a batch, in groups of 32. The two operands of a tile product hold
 * one group: a row tile holds 16 outputs (columns of dY) by 32 rows, transposed while it is packed;
 * a column tile holds 16 pairs of rows by 16 inputs (columns of X), which needs no transpose. The
 * sums are loaded from the f32 gradient and stored to it without rounding, so the bits of dW do not
 * change if a batch is divided into several calls at multiples of 32 rows.
 *
 * Not here: dX = dY W (amx_bf16.c).
 *
 * Invariant: an element of dW is computed by adding the groups one after the other; the last group
 * is padded with zeros. Its bits do not depend on the range of outputs that a call computes.
 */
#include <immintrin.h>

#include "kernel/amx.h"

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

#define TILE_STORE(t, b, i, j) _tile_stored(t, block_tile(b, i, j), 4 * (b)->ld)
/* The first group of a block: stores the sums that tile register t still has of the previous block,
 * if there is one, loads those of the current block into it, and adds the product of tile registers
 * x and y. */
#define ADD_FIRST_GROUP(t, i, j, x, y)                                                             \
    do {                                                                                           \
        if (previous->data) TILE_STORE(t, previous, i, j);                                         \
        _tile_loadd(t, block_tile(current, i, j), 4 * current->ld);                                \
        _tile_dpbf16ps(t, x, y);                                                                   \
    } while (0)

/* Adds n groups to the block `current`, whose sums stay in tile registers 0 … 3; those of
 * `previous` are stored first. `tall`: the block has a second row tile; `wide`: it has a second
 * column tile. `a`: the row tiles, in panels of DY_PANEL elements; `b`: the column tiles, in panels
 * of `panel` elements. */
INLINE void block_add(const uint16_t *a, const uint16_t *b, int64_t panel, int64_t n,
                      const struct grad_block *current, const struct grad_block *previous,
                      bool tall, bool wide) {
    for (int64_t g = 0; g < n; g++, a += TILE, b += TILE) {
        _tile_loadd(6, b, 64);
        if (wide) _tile_loadd(7, b + panel, 64);
        _tile_loadd(4, a, 64);
        if (tall) _tile_loadd(5, a + DY_PANEL, 64);
        if (g == 0) {
            ADD_FIRST_GROUP(0, 0, 0, 4, 6);
            if (wide) ADD_FIRST_GROUP(1, 0, 1, 4, 7);
            if (tall) ADD_FIRST_GROUP(2, 1, 0, 5, 6);
            if (tall && wide) ADD_FIRST_GROUP(3, 1, 1, 5, 7);
            continue;
        }
        _tile_dpbf16ps(0, 4, 6);
        if (wide) _tile_dpbf16ps(1, 4, 7);
        if (tall) _tile_dpbf16ps(2, 5, 6);
        if (tall && wide) _tile_dpbf16ps(3, 5, 7);
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
