/*
 * amx: code that the files of the AMX level share: the configuration of tile registers, transposes,
 * and the storing of sums. Private to src/kernel/amx*.c.
 *
 * Tile registers and their configuration belong to a thread, and no caller saves them.
 * `amx_configured` is the number of a thread's configuration, so that a product that needs the same
 * configuration does not load it again. No other code in the process uses tiles.
 */
#ifndef SHOAL_KERNEL_AMX_H
#define SHOAL_KERNEL_AMX_H

#include "kernel/avx512.h"

/* Each function sets the slots of the file of its name. */
void amx_fill_int8(struct kernels *k);
void amx_fill_bf16(struct kernels *k);
void amx_fill_grad(struct kernels *k);
void amx_fill_attention(struct kernels *k);

/* The operand of ldtilecfg, palette 1: eight tiles of up to 16 rows of up to 64 bytes. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "ldtilecfg reads 64 bytes");

/* Numbers of configurations: TILE_CONFIG_FULL has eight tiles of 16 rows of 64 bytes; the numbers
 * that amx_int8.c uses are smaller than it. */
enum { TILE_CONFIG_FULL = 1 << 16 };

enum { GROUP = 8 }; /* panels that are multiplied with one chunk of the rows, in the L2 cache */

/* The number of the configuration that this thread has loaded; 0: none yet. */
extern _Thread_local uint32_t amx_configured;

INLINE void tile_config_set(struct tile_config *s, int tile, int rows, int row_bytes) {
    s->rows[tile] = (uint8_t)rows;
    s->row_bytes[tile] = (uint16_t)row_bytes;
}

INLINE void tile_config_load(const struct tile_config *s, uint32_t name) {
    // For gcc 12 the intrinsic reads only 8 bytes, so gcc would drop the stores to the other bytes.
    __asm__ volatile("" : : "r"(s) : "memory");
    _tile_loadconfig(s);
    amx_configured = name;
}

INLINE void tile_config_full(void) {
    if (amx_configured == TILE_CONFIG_FULL) return;
    struct tile_config s = {.palette = 1};
    for (int i = 0; i < 8; i++) tile_config_set(&s, i, 16, 64);
    tile_config_load(&s, TILE_CONFIG_FULL);
}

/* A compiler barrier between vector and tile accesses to the memory at p. In gcc 12 the intrinsics
 * do not declare that a tile load reads memory, nor that a tile store writes it. */
INLINE void tile_memory_barrier(const void *p) {
    __asm__ volatile("" : : "r"(p) : "memory");
}

enum { TILE = 512 }; /* bf16 elements of a tile: 16 x 32 */

/* Mask of the first n of 16 lanes: no lane if n is below 0, all if it is above 16. */
INLINE __mmask16 elems_mask(int64_t n) {
    return n > 0 ? lanes_mask(n) : 0;
}

/* 32 values as bf16: those of `low`, then those of `high`. */
INLINE __m512i bf16_join(__m512 low, __m512 high) {
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* 16 pairs (even[l], odd[l]) as bf16. */
INLINE __m512i bf16_interleave(__m512 even, __m512 odd) {
    static const uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), bf16_join(even, odd));
}

/* Transposes: lane j of r[i] becomes lane i of r[j]. */
INLINE void transpose_16(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
}

/* y[r] (+)= sums[r] for `rows` rows of one panel; only its first `left` outputs exist. */
static inline void sums_store(float *y, int64_t ldy, const float (*sums)[PANEL], int64_t rows,
                              int64_t left, bool add) {
    const __mmask16 mask = left >= PANEL ? 0xFFFF : (__mmask16)((1u << left) - 1);
    for (int64_t r = 0; r < rows; r++) {
        __m512 v = _mm512_loadu_ps(sums[r]);
        if (add) v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y + r * ldy), v);
        _mm512_mask_storeu_ps(y + r * ldy, mask, v);
    }
}

#endif
