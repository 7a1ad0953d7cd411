/*
 * emulate/amx: the tile instructions that src/kernel/amx.c uses, in plain C, from Intel's manual.
 *
 * Each thread has eight tiles, shaped by a palette-1 configuration. Conditions that raise an
 * exception on the machine (a configuration out of range, a tile without a shape, operands whose
 * shapes do not match) abort here with a message. TDPBF16PS keeps two sums, of the even and of the
 * odd elements of the pairs, adds them at the end, and reads and writes denormals as zero; its
 * products are exact in f32.
 */
#ifndef SHOAL_TEST_EMULATE_AMX_H
#define SHOAL_TEST_EMULATE_AMX_H

#include <stdio.h>
#include <stdlib.h>

struct emulated_tile {
    int rows, row_bytes;
    uint8_t data[16][64];
};

static _Thread_local struct emulated_tile emulated_tiles[8];
static _Thread_local long emulated_loads; /* configurations loaded, for tests that count them */

EMULATED void tile_require(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "emulated tiles: %s\n", what);
    abort();
}

EMULATED struct emulated_tile *tile_at(int t) {
    tile_require(t >= 0 && t < 8, "no such tile");
    tile_require(emulated_tiles[t].rows > 0, "a tile is used without a shape");
    return &emulated_tiles[t];
}

/* Byte 0 palette, 1 start row, 2-15 zero, 16-47 row bytes of sixteen tiles, 48-63 rows; tiles 8-15
 * must be zero. */
EMULATED void _tile_loadconfig(const void *config) {
    uint8_t c[64];
    memcpy(c, config, sizeof c);
    tile_require(c[0] == 1 && c[1] == 0, "the palette is 1 and no instruction is restarted");
    for (int i = 2; i < 16; i++) tile_require(c[i] == 0, "reserved bytes are zero");
    for (int t = 0; t < 16; t++) {
        int row_bytes = c[16 + 2 * t] | c[17 + 2 * t] << 8, rows = c[48 + t];
        tile_require((rows == 0) == (row_bytes == 0), "rows and bytes are both zero or neither");
        tile_require(rows <= (t < 8 ? 16 : 0) && row_bytes <= 64,
                     "at most 16 rows of 64 bytes, in 8 tiles");
        if (t < 8) emulated_tiles[t] = (struct emulated_tile){.rows = rows, .row_bytes = row_bytes};
    }
    emulated_loads++;
}

EMULATED void _tile_zero(int t) {
    memset(tile_at(t)->data, 0, sizeof emulated_tiles[t].data);
}

/* Bytes and rows outside the shape become zero. */
EMULATED void _tile_loadd(int t, const void *p, int64_t stride) {
    struct emulated_tile *tile = tile_at(t);
    memset(tile->data, 0, sizeof tile->data);
    for (int r = 0; r < tile->rows; r++)
        memcpy(tile->data[r], (const char *)p + r * stride, (size_t)tile->row_bytes);
}

EMULATED void _tile_stored(int t, void *p, int64_t stride) {
    const struct emulated_tile *tile = tile_at(t);
    for (int r = 0; r < tile->rows; r++)
        memcpy((char *)p + r * stride, tile->data[r], (size_t)tile->row_bytes);
}

/* sum is M × 4N bytes, a M × 4K, b K × 4N. */
EMULATED void product_shapes_require(int sum, int a, int b) {
    const struct emulated_tile *s = tile_at(sum), *x = tile_at(a), *w = tile_at(b);
    tile_require(sum != a && sum != b && a != b, "the three tiles differ");
    tile_require(s->row_bytes % 4 == 0 && x->row_bytes % 4 == 0, "rows hold whole quads");
    tile_require(s->rows == x->rows && s->row_bytes == w->row_bytes && x->row_bytes == 4 * w->rows,
                 "shapes match");
}

EMULATED void _tile_dpbssd(int sum, int a, int b) {
    product_shapes_require(sum, a, b);
    struct emulated_tile *s = &emulated_tiles[sum], *x = &emulated_tiles[a],
                         *w = &emulated_tiles[b];
    for (int m = 0; m < s->rows; m++) {
        for (int n = 0; n < s->row_bytes / 4; n++) {
            uint32_t acc;
            memcpy(&acc, &s->data[m][4 * n], sizeof acc);
            for (int k = 0; k < x->row_bytes; k++) {
                acc += (uint32_t)((int8_t)x->data[m][k] * (int8_t)w->data[k / 4][4 * n + k % 4]);
            }
            memcpy(&s->data[m][4 * n], &acc, sizeof acc);
        }
    }
}

EMULATED float denormal_flush(float f) {
    return fabsf(f) < 0x1p-126f ? copysignf(0.0f, f) : f;
}

EMULATED float tile_bf16(const struct emulated_tile *t, int row, int i) {
    uint16_t half;
    memcpy(&half, &t->data[row][2 * i], sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return denormal_flush(f);
}

EMULATED void _tile_dpbf16ps(int sum, int a, int b) {
    product_shapes_require(sum, a, b);
    struct emulated_tile *s = &emulated_tiles[sum], *x = &emulated_tiles[a],
                         *w = &emulated_tiles[b];
    for (int m = 0; m < s->rows; m++) {
        for (int n = 0; n < s->row_bytes / 4; n++) {
            float acc, part[2] = {0, 0};
            memcpy(&acc, &s->data[m][4 * n], sizeof acc);
            for (int k = 0; k < x->row_bytes / 2; k++) {
                const float xk = tile_bf16(x, m, k), wk = tile_bf16(w, k / 2, 2 * n + (k & 1));
                part[k & 1] = denormal_flush(fmaf(xk, wk, part[k & 1]));
            }
            acc = denormal_flush(denormal_flush(acc) + denormal_flush(part[0] + part[1]));
            memcpy(&s->data[m][4 * n], &acc, sizeof acc);
        }
    }
}

#endif
