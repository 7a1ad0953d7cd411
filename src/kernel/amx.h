/*
 * amx: code that the files of the AMX level share: the configuration of tile registers, the unit of
 * tiles.h, and the storing of sums. Private to src/kernel/amx*.c.
 *
 * Tile registers and their configuration belong to a thread, and no caller saves them.
 * `amx_configured` is the number of a thread's configuration, so that a product that needs the same
 * configuration does not load it again. No other code in the process uses tiles.
 */
#ifndef SHOAL_KERNEL_AMX_H
#define SHOAL_KERNEL_AMX_H

#include "kernel/tiles.h"

/* Each function sets the slots of the file of its name. */
void amx_fill_int8(struct kernels *k);
void amx_fill_bf16(struct kernels *k);

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

INLINE void tiles_begin(void) {
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

#define tile_load(t, p) _tile_loadd(t, p, 64)
#define tile_load_sums(t, p, stride) _tile_loadd(t, p, stride)
#define tile_store(t, p, stride) _tile_stored(t, p, stride)
#define tile_zero(t) _tile_zero(t)
#define tile_multiply(t, a, b) _tile_dpbf16ps(t, a, b)
#define tile_set_rows(t, n) ((void)0)

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
