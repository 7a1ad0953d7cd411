/*
 * amx: products of packed matrices in tile registers, for processors with AMX (tile, int8, bf16)
 * and AVX-512.
 *
 * A tile step multiplies up to 16 rows by one panel of 16 outputs. Int8 belongs to the exact class:
 * one step covers one block of 32 weights, its integers leave the tile at once and AVX-512 folds
 * the scales in block order, so the bits are those of scalar.c. bf16 is the fast class's product:
 * whole dot products stay in the tiles. This file holds only these products; the remaining slots
 * are those of the AVX-512 level.
 *
 * Invariants: a row's bits depend on that row and the weights only, because tile rows are
 * independent and every row walks K in the same order. `configured` names a thread's tile
 * configuration; no other code in the process uses tiles.
 */
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernel/internal.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    XFEATURE_TILE_DATA = 18,
    REQUEST_PERMISSION = 0x1023, /* ARCH_REQ_XCOMP_PERM */
    GROUP = 8, /* panels done with one shape of tiles before the next: they stay in L2 */
};

bool amx_request(void) {
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, XFEATURE_TILE_DATA) == 0;
}

/* The operand of ldtilecfg, palette 1: eight tiles of up to 16 rows of up to 64 bytes. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_shapes) == 64, "ldtilecfg reads 64 bytes");

/* The tile shapes that this thread has configured; 0: none yet. */
static _Thread_local uint32_t configured;

static void tile_shape(struct tile_shapes *s, int tile, int rows, int row_bytes) {
    s->rows[tile] = (uint8_t)rows;
    s->row_bytes[tile] = (uint16_t)row_bytes;
}

static void shapes_load(const struct tile_shapes *s, uint32_t name) {
    // gcc 12 declares only the first 8 bytes as read, and would drop the stores of the others.
    __asm__ volatile("" : : "r"(s) : "memory");
    _tile_loadconfig(s);
    configured = name;
}

/* gcc 12 does not tell the compiler that a tile load reads memory: scratch must be written before
 * this point. */
INLINE void scratch_publish(const void *p) {
    __asm__ volatile("" : : "r"(p) : "memory");
}

/* Tiles 0 and 1 int32 sums, 2 and 3 activations, 4 and 5 weights: two blocks are in flight at a
 * time. */
static void shapes_int8(int rows, int group) {
    const uint32_t name = (uint32_t)group << 8 | (uint32_t)rows;
    if (configured == name) return;
    struct tile_shapes s = {.palette = 1};
    for (int i = 0; i < 2; i++) {
        tile_shape(&s, i, rows, 64);
        tile_shape(&s, 2 + i, rows, group);
        tile_shape(&s, 4 + i, group / 4, 64);
    }
    shapes_load(&s, name);
}

/* Tiles 0 … 3 sums [upper, lower rows] × [left, right panel], 4 and 5 activations, 6 and 7 weights.
 */
static void shapes_bf16(int upper, int lower) {
    const uint32_t name = 0x10000u | (uint32_t)(upper << 8) | (uint32_t)lower;
    if (configured == name) return;
    struct tile_shapes s = {.palette = 1};
    for (int i = 0; i < 2; i++) {
        tile_shape(&s, i, upper, 64);
        tile_shape(&s, 2 + i, lower, 64);
        tile_shape(&s, 6 + i, 16, 64);
    }
    tile_shape(&s, 4, upper, 64);
    tile_shape(&s, 5, lower, 64);
    shapes_load(&s, name);
}

/* y[r] (+)= sums[r] for `rows` rows of one panel, of which `left` outputs exist. */
static void sums_store(float *y, int64_t ldy, const float (*sums)[PANEL], int64_t rows,
                       int64_t left, bool add) {
    const __mmask16 mask = left >= PANEL ? 0xFFFF : (__mmask16)((1u << left) - 1);
    for (int64_t r = 0; r < rows; r++) {
        __m512 v = _mm512_loadu_ps(sums[r]);
        if (add) v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y + r * ldy), v);
        _mm512_mask_storeu_ps(y + r * ldy, mask, v);
    }
}

enum {
    Q_SUPER = 64, /* rows that share one unpacked panel */
    Q_CHUNK = 32, /* blocks of a panel that are unpacked at a time: 16 KiB */
    BLOCK_BYTES = QK * PANEL,
};

struct int8_product {
    float *y;
    int64_t ldy;
    const struct gemm_input *in;
    const struct matrix *w;
    int64_t blocks, n1; /* K / layout_group */
    bool add;
};

/* The int8 code of each nibble value, repeated in every 16 bytes. */
INLINE __m512i codes_load(const struct matrix *w) {
    if (w->layout == LAYOUT_NF4)
        return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)nf4_codes));
    int8_t codes[16];
    for (int i = 0; i < 16; i++) codes[i] = (int8_t)(i - w->zero);
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)codes));
}

/* Blocks of one nibble panel as int8 tiles: quads 0 … 3 are the low nibbles, 4 … 7 the high ones.
 */
static void nibbles_unpack(int8_t *out, const uint8_t *w, int64_t blocks, __m512i codes) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int64_t b = 0; b < blocks; b++) {
        for (int p = 0; p < 4; p++) {
            const __m512i raw = _mm512_loadu_si512(w + b * 256 + 64 * p);
            const __m512i lo = _mm512_and_si512(raw, nibble);
            const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
            int8_t *to = out + b * BLOCK_BYTES + 64 * p;
            _mm512_storeu_si512(to, _mm512_shuffle_epi8(codes, lo));
            _mm512_storeu_si512(to + 256, _mm512_shuffle_epi8(codes, hi));
        }
    }
}

/* One range of blocks of one panel; pointers are at its first block. */
struct int8_blocks {
    const int8_t *x, *w;
    const float *dx, *dw;
    const uint8_t *dw8; /* nf4 */
    int64_t k, ndx, count;
};

INLINE __m512 tile_scales(const struct int8_blocks *s, int64_t b, enum matrix_layout l) {
    if (l != LAYOUT_NF4) return _mm512_loadu_ps(s->dw + b * PANEL);
    const void *bytes = s->dw8 + b * QK / NF4_BLOCK * PANEL;
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
}

/* acc[r] = fma(dot of row r, dw * dx of row r, acc[r]) for block b. */
INLINE void block_fold(__m512 *acc, const int32_t (*dots)[PANEL], const struct int8_blocks *s,
                       int64_t b, int rows, enum matrix_layout l) {
    const __m512 scale = tile_scales(s, b, l);
    const float *dx = s->dx + b * layout_group(l) / QK;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(dx[r * s->ndx]));
        acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(dots[r])), both, acc[r]);
    }
}

/* The integer dots of one block of `rows` rows and one panel, in tiles `sum`, `a` and `b`. */
#define BLOCK_DOTS(sum, a, b, dots, x, k, w)                                                       \
    do {                                                                                           \
        _tile_zero(sum);                                                                           \
        _tile_loadd(a, x, k);                                                                      \
        _tile_loadd(b, w, 64);                                                                     \
        _tile_dpbssd(sum, a, b);                                                                   \
        _tile_stored(sum, dots, 64);                                                               \
    } while (0)

/* Continues `part` (rows × 16 sums); `rows` and `l` are constants where this is inlined. */
INLINE void blocks_run(float (*part)[PANEL], const struct int8_blocks *s, int rows,
                       enum matrix_layout l) {
    const int group = layout_group(l), bytes = group * PANEL;
    int32_t even[16][PANEL] __attribute__((aligned(64))),
        odd[16][PANEL] __attribute__((aligned(64)));
    __m512 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r] = _mm512_loadu_ps(part[r]);
    int64_t b = 0;
    for (; b + 2 <= s->count; b += 2) {
        BLOCK_DOTS(0, 2, 4, even, s->x + b * group, s->k, s->w + b * bytes);
        BLOCK_DOTS(1, 3, 5, odd, s->x + (b + 1) * group, s->k, s->w + (b + 1) * bytes);
        block_fold(acc, even, s, b, rows, l);
        block_fold(acc, odd, s, b + 1, rows, l);
    }
    if (b < s->count) {
        BLOCK_DOTS(0, 2, 4, even, s->x + b * group, s->k, s->w + b * bytes);
        block_fold(acc, even, s, b, rows, l);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(part[r], acc[r]);
}

/* nf4: the sums of one panel times its rows' scales. */
static void sums_scale(float (*sums)[PANEL], int64_t rows, const float *row_scales) {
    const __m512 scale = _mm512_div_ps(_mm512_loadu_ps(row_scales), _mm512_set1_ps(NF4_UNIT));
    for (int64_t r = 0; r < rows; r++)
        _mm512_storeu_ps(sums[r], _mm512_mul_ps(_mm512_loadu_ps(sums[r]), scale));
}

/* Rows m0 … m0 + rows (at most Q_SUPER, a multiple of `tile`) of one panel. */
INLINE void panel_run(const struct int8_product *p, int64_t panel, int64_t m0, int64_t rows,
                      int tile, enum matrix_layout l) {
    const struct matrix *w = p->w;
    const int64_t nb = p->blocks, k = p->in->k, chunk = l >= LAYOUT_Q4 ? Q_CHUNK : nb,
                  scales = panel * layout_scales(l, k);
    const uint8_t *packed = (const uint8_t *)w->data + panel * nb * layout_bytes(l);
    int8_t unpacked[Q_CHUNK * BLOCK_BYTES] __attribute__((aligned(64)));
    float part[Q_SUPER][PANEL] __attribute__((aligned(64)));
    memset(part, 0, sizeof part[0] * (size_t)rows);
    for (int64_t b = 0; b < nb; b += chunk) {
        struct int8_blocks s = {.w = (const int8_t *)packed + b * layout_bytes(l),
                                .k = k,
                                .ndx = k / QK,
                                .count = MIN(chunk, nb - b)};
        if (l == LAYOUT_NF4)
            s.dw8 = w->scale_bytes + scales + b * QK / NF4_BLOCK * PANEL;
        else
            s.dw = w->scales + scales + b * PANEL;
        if (l >= LAYOUT_Q4) {
            nibbles_unpack(unpacked, (const uint8_t *)s.w, s.count, codes_load(w));
            scratch_publish(unpacked);
            s.w = unpacked;
        }
        for (int64_t m = 0; m < rows; m += tile) {
            s.x = p->in->q + (m0 + m) * k + b * layout_group(l);
            s.dx = p->in->d + (m0 + m) * s.ndx + b * layout_group(l) / QK;
            blocks_run(part + m, &s, tile, l);
        }
    }
    if (l == LAYOUT_NF4) sums_scale(part, rows, w->row_scales + panel * PANEL);
    sums_store(p->y + m0 * p->ldy + panel * PANEL, p->ldy, (const float(*)[PANEL])part, rows,
               p->n1 - panel * PANEL, p->add);
}

/* Panels p0 … p1, rows m0 … m1 (whole tiles). */
INLINE void panels_tiled(const struct int8_product *p, int64_t p0, int64_t p1, int64_t m0,
                         int64_t m1, int tile, enum matrix_layout l) {
    if (m0 == m1) return;
    shapes_int8(tile, layout_group(l));
    for (int64_t panel = p0; panel < p1; panel++) {
        for (int64_t m = m0; m < m1; m += Q_SUPER) {
            panel_run(p, panel, m, MIN(m1 - m, Q_SUPER), tile, l);
            prefetch_step(p->in->ahead);
        }
    }
}

typedef void (*packed_fn)(float *y, int64_t ldy, const struct gemm_input *in,
                          const struct matrix *w, int64_t n0, int64_t n1, bool add);

/* `narrow` multiplies the rows that do not fill the smallest tile; it gives the same bits. */
INLINE void int8_mul(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                     int64_t n0, int64_t n1, bool add, enum matrix_layout l, packed_fn narrow) {
    const struct int8_product p = {.y = y,
                                   .ldy = ldy,
                                   .in = in,
                                   .w = w,
                                   .blocks = in->k / layout_group(l),
                                   .n1 = n1,
                                   .add = add};
    const int64_t m16 = in->rows / 16 * 16, m8 = m16 + (in->rows & 8), m4 = m8 + (in->rows & 4);
    const int64_t end = (n1 + PANEL - 1) / PANEL;
    prefetch_begin(in->ahead, (end - n0 / PANEL) * (in->rows / Q_SUPER + 1));
    for (int64_t p0 = n0 / PANEL; m4 > 0 && p0 < end; p0 += GROUP) {
        const int64_t p1 = MIN(end, p0 + GROUP);
        panels_tiled(&p, p0, p1, 0, m16, 16, l);
        panels_tiled(&p, p0, p1, m16, m8, 8, l);
        panels_tiled(&p, p0, p1, m8, m4, 4, l);
    }
    if (m4 == in->rows) return;
    struct gemm_input rest = *in;
    rest.rows = in->rows - m4;
    rest.q = in->q + m4 * in->k;
    rest.d = in->d + m4 * (in->k / QK);
    if (in->total) rest.total = in->total + m4 * (in->k / QK);
    narrow(y + m4 * ldy, ldy, &rest, w, n0, n1, add);
}

/* Set once, when the table is filled. */
static packed_fn narrow_q8, narrow_q4;

static void amx_gemm_q8(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                        int64_t n0, int64_t n1, bool add) {
    if (w->layout == LAYOUT_Q6)
        int8_mul(y, ldy, in, w, n0, n1, add, LAYOUT_Q6, narrow_q8);
    else
        int8_mul(y, ldy, in, w, n0, n1, add, LAYOUT_Q8, narrow_q8);
}

static void amx_gemm_q4(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                        int64_t n0, int64_t n1, bool add) {
    if (w->layout == LAYOUT_NF4)
        int8_mul(y, ldy, in, w, n0, n1, add, LAYOUT_NF4, narrow_q4);
    else
        int8_mul(y, ldy, in, w, n0, n1, add, LAYOUT_Q4, narrow_q4);
}

struct bf16_product {
    float *y;
    int64_t ldy;
    const struct gemm_input *in;
    const struct matrix *w;
    int64_t kp, n1; /* K rounded up to 32 */
    bool add;
};

/* Stores one sum tile in y: directly when nothing is added and all 16 outputs exist. */
#define SUMS_PUT(tile, p, m, rows, panel)                                                          \
    do {                                                                                           \
        float *dst_ = (p)->y + (m) * (p)->ldy + (panel)*PANEL;                                     \
        if (!(p)->add && (p)->n1 - (panel)*PANEL >= PANEL) {                                       \
            _tile_stored(tile, dst_, (p)->ldy *(int64_t)sizeof(float));                            \
        } else {                                                                                   \
            float sums_[16][PANEL] __attribute__((aligned(64)));                                   \
            _tile_stored(tile, sums_, 64);                                                         \
            sums_store(dst_, (p)->ldy, (const float(*)[PANEL])sums_, rows,                         \
                       (p)->n1 - (panel)*PANEL, (p)->add);                                         \
        }                                                                                          \
    } while (0)

/* Rows m … m + upper + lower by one or two panels; lower is 0 where `tall` is false. 2 × 2 tiles
 * use each load twice. */
INLINE void tiles_mul(const struct bf16_product *p, int64_t panel, int64_t m, int upper, int lower,
                      bool tall, bool wide) {
    const int64_t stride = p->kp * 2, panel_bytes = p->kp * PANEL * 2;
    const uint16_t *x = p->in->bf16 + m * p->kp, *below = x + upper * p->kp;
    const char *w = (const char *)p->w->data + panel * panel_bytes;
    _tile_zero(0);
    if (wide) _tile_zero(1);
    if (tall) _tile_zero(2);
    if (tall && wide) _tile_zero(3);
    for (int64_t i = 0; i < p->kp; i += 32) {
        _tile_loadd(4, x + i, stride);
        _tile_loadd(6, w + i * PANEL * 2, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (wide) _tile_loadd(7, w + panel_bytes + i * PANEL * 2, 64);
        if (wide) _tile_dpbf16ps(1, 4, 7);
        if (tall) _tile_loadd(5, below + i, stride);
        if (tall) _tile_dpbf16ps(2, 5, 6);
        if (tall && wide) _tile_dpbf16ps(3, 5, 7);
    }
    SUMS_PUT(0, p, m, upper, panel);
    if (wide) SUMS_PUT(1, p, m, upper, panel + 1);
    if (tall) SUMS_PUT(2, p, m + upper, lower, panel);
    if (tall && wide) SUMS_PUT(3, p, m + upper, lower, panel + 1);
}

/* Panels p0 … p1 by rows m0 … m1 in steps of upper + lower rows. */
static void panels_bf16(const struct bf16_product *p, int64_t p0, int64_t p1, int64_t m0,
                        int64_t m1, int upper, int lower) {
    if (m0 == m1) return;
    shapes_bf16(upper, lower > 0 ? lower : upper);
    for (int64_t panel = p0; panel < p1; panel += 2) {
        const bool wide = panel + 1 < p1;
        for (int64_t m = m0; m < m1; m += upper + lower) {
            if (lower > 0 && wide)
                tiles_mul(p, panel, m, upper, lower, true, true);
            else if (lower > 0)
                tiles_mul(p, panel, m, upper, lower, true, false);
            else if (wide)
                tiles_mul(p, panel, m, upper, 0, false, true);
            else
                tiles_mul(p, panel, m, upper, 0, false, false);
        }
    }
}

static void amx_gemm_bf16_fast(float *y, int64_t ldy, const struct gemm_input *in,
                               const struct matrix *w, int64_t n0, int64_t n1, bool add) {
    const struct bf16_product p = {
        .y = y,
        .ldy = ldy,
        .in = in,
        .w = w,
        .kp = (in->k + 31) / 32 * 32,
        .n1 = n1,
        .add = add,
    };
    const int64_t whole = in->rows / 32 * 32, end = (n1 + PANEL - 1) / PANEL;
    const int left = (int)(in->rows - whole), upper = MIN(left, 16), lower = left - upper;
    for (int64_t p0 = n0 / PANEL; p0 < end; p0 += GROUP) {
        const int64_t p1 = MIN(end, p0 + GROUP);
        panels_bf16(&p, p0, p1, 0, whole, 16, 16);
        panels_bf16(&p, p0, p1, whole, in->rows, upper, lower);
    }
}

void kernels_fill_amx(struct kernels *k) {
    narrow_q8 = k->gemm_q8;
    narrow_q4 = k->gemm_q4;
    k->gemm_q8 = amx_gemm_q8;
    k->gemm_q4 = amx_gemm_q4;
    k->gemm_bf16_fast = amx_gemm_bf16_fast;
}
