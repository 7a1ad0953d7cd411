/*
 * tiles: bf16 tiles, the arithmetic of the fast class: code that the levels with tiles share.
 * Private to src/kernel/amx*.c, avx512bf16.c and tiles_*.h.
 *
 * A tile has 16 rows of 64 bytes. An operand holds bf16: A [16 rows][32 inputs], B [16 pairs of
 * inputs][16 outputs][2]. A tile of sums holds f32 [16 rows][16 outputs]. The bodies in tiles_*.h
 * are compiled for each unit that multiplies tiles: that of AMX (amx_bf16.c), and vectors with
 * AVX512_BF16 (avx512bf16.c). A unit has eight registers, 0 to 3 for sums and 4 to 7 for operands,
 * and defines these operations, in which registers are constants:
 *
 *   tiles_begin()                 prepares the unit for the calling thread and function; may
 * declare a variable tile_load(t, p)               operand t = the tile at p; p is not written
 * before its last use tile_load_sums(t, p, stride)  sums t = the 16 rows at p, `stride` bytes apart
 *   tile_store(t, p, stride)      writes sums t there
 *   tile_zero(t)                  sums t = 0
 *   tile_multiply(t, a, b)        sums t += A times B: a step of 32 inputs
 *   tile_set_rows(t, n)           from now on only the first n rows of operand t can differ from 0;
 *                                 16 after tiles_begin(); a unit may ignore it
 *   tile_memory_barrier(p)        between vector and tile accesses to the memory at p
 *   tile_multiply_steps(t, a, p, b, s0, s1)  optional: sums t and t + 1 += steps [s0, s1) of the
 *                                 tiles at p times those at b[0] and at b[1]; a: the operand whose
 *                                 number of rows holds for p
 */
#ifndef SHOAL_KERNEL_TILES_H
#define SHOAL_KERNEL_TILES_H

#include "kernel/avx512.h"

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

#endif
