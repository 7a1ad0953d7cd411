/*
 * emulate/amx: the tile instructions that src/kernel/amx.c uses, in plain C, from Intel's manual.
 *
 * Each thread has eight tiles, shaped by a palette-1 configuration. Conditions that raise an
 * exception on the machine (a configuration out of range, a tile without a shape, operands whose
 * shapes do not match) abort here with a message. TDPBF16PS keeps two sums, of the even and of the
 * odd elements of the pairs, adds them at the end, and reads and writes denormals as zero; its
 * products are exact in f32.
 *
 * With `emulated_strict`, memory is shared between tiles and vectors only at
 * emulated_memory_barrier(), which replaces tile_memory_barrier(): a compiler may move vector
 * stores and loads over tile instructions up to that point. Before it, the data of a tile store is
 * visible to tile loads only, and a tile load of memory that a vector store wrote aborts. (Stores
 * by plain C are not detected.)
 */
#ifndef SHOAL_TEST_EMULATE_AMX_H
#define SHOAL_TEST_EMULATE_AMX_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

struct emulated_tile {
    int rows, row_bytes;
    uint8_t data[16][64];
};

static _Thread_local struct emulated_tile emulated_tiles[8];
static _Thread_local long emulated_loads; /* configurations loaded, for tests that count them */

struct emulated_store {
    char *to;
    int64_t stride;
    struct emulated_tile tile;
};
static bool emulated_strict;
static struct emulated_store emulated_stores[256]; /* not yet visible to vectors */
static const char *emulated_vectors[16384];        /* 64 bytes each, not yet visible to tiles */
static int emulated_n_stores, emulated_n_vectors;

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

EMULATED void tile_write(const struct emulated_tile *tile, char *to, int64_t stride) {
    for (int r = 0; r < tile->rows; r++)
        memcpy(to + r * stride, tile->data[r], (size_t)tile->row_bytes);
}

EMULATED void emulated_memory_barrier(void) {
    for (int i = 0; i < emulated_n_stores; i++)
        tile_write(&emulated_stores[i].tile, emulated_stores[i].to, emulated_stores[i].stride);
    emulated_n_stores = emulated_n_vectors = 0;
}

static void emulated_record_store(const void *p, size_t bytes) {
    if (!emulated_strict) return;
    tile_require(bytes == 64 && emulated_n_vectors < 16384, "few vector stores between publishes");
    emulated_vectors[emulated_n_vectors++] = p;
}

/* Copies what row r of a pending store wrote of the `bytes` bytes at p. */
EMULATED void store_overlay(const struct emulated_store *s, int r, uint8_t *to, const char *p,
                            int bytes) {
    const char *from = s->to + r * s->stride;
    for (int i = 0; i < bytes; i++) {
        if (p + i >= from && p + i < from + s->tile.row_bytes)
            to[i] = s->tile.data[r][p + i - from];
    }
}

/* A row of a tile as the tile unit sees it. */
EMULATED void row_load(uint8_t *to, const char *p, int bytes) {
    memcpy(to, p, (size_t)bytes);
    for (int i = 0; i < emulated_n_vectors; i++) {
        tile_require(p + bytes <= emulated_vectors[i] || emulated_vectors[i] + 64 <= p,
                     "a tile is loaded from vector stores that were not published");
    }
    for (int i = 0; i < emulated_n_stores; i++) {
        const struct emulated_store *s = &emulated_stores[i];
        const char *last = s->to + (s->tile.rows - 1) * s->stride + s->tile.row_bytes;
        if (p >= last || p + bytes <= s->to) continue;
        for (int r = 0; r < s->tile.rows; r++) store_overlay(s, r, to, p, bytes);
    }
}

/* Bytes and rows outside the shape become zero. */
EMULATED void _tile_loadd(int t, const void *p, int64_t stride) {
    struct emulated_tile *tile = tile_at(t);
    memset(tile->data, 0, sizeof tile->data);
    for (int r = 0; r < tile->rows; r++)
        row_load(tile->data[r], (const char *)p + r * stride, tile->row_bytes);
}

EMULATED void _tile_stored(int t, void *p, int64_t stride) {
    const struct emulated_tile *tile = tile_at(t);
    if (!emulated_strict) {
        tile_write(tile, p, stride);
        return;
    }
    tile_require(emulated_n_stores < 256, "few tile stores between publishes");
    emulated_stores[emulated_n_stores++] = (struct emulated_store){p, stride, *tile};
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
