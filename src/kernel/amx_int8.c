/*
 * amx_int8: products of quantised weights with int8 activations in tile registers: the exact class
 * on AMX.
 *
 * One tile step multiplies one block of 32 weights (q6_k: 16). Its integer sums are stored, and
 * AVX-512 instructions multiply them by the scales and accumulate them in block order, so the bits
 * are those of scalar.c. The steps are pipelined: the sums of a step are stored four steps later
 * and accumulated two steps after that, so that the tile unit and the vector units do not wait for
 * each other. Rows are divided into equal tiles. Up to SUPER_TILES tiles are multiplied with a
 * panel before the next panel, so that a panel of nibbles is unpacked once for all of them. Inputs
 * are usually in the order of tiles already (gemm_input.q_tiles); the rows of a view are not, and
 * are copied into that order.
 *
 * Invariant: a row's bits depend only on that row and the weights, because tile rows are
 * independent and the sum of every row runs over K in the same order.
 */
#include <immintrin.h>
#include <string.h>

#include "kernel/amx.h"

enum {
    MIN_TILE_ROWS = 5, /* fewer rows are faster without tiles */
    SUPER_TILES = 8,   /* row tiles that are multiplied with one panel before the next panel */
    SUPER_ROWS = SUPER_TILES * 16,
    RUN = 2048,                    /* inputs of a panel that are unpacked at a time */
    COPY_BYTES = SUPER_ROWS * RUN, /* bytes of the rows that are copied at a time */
    SLOTS = 4,                     /* tile registers of sums, each with a slot in memory */
    NEXT_LINES = 4,                /* cache lines of the next panel that a step prefetches */
    ACCUMULATE_LAG = 6,            /* steps from a product to the accumulation of its sums */
};

/* Configures the tile registers: 0 to 3 are int32 sums, 4 and 5 activations, 6 and 7 weights. */
static void tile_config_int8(int rows, int group) {
    const uint32_t name = (uint32_t)group << 8 | (uint32_t)rows;
    if (amx_configured == name) return;
    struct tile_config s = {.palette = 1};
    for (int i = 0; i < SLOTS; i++) tile_config_set(&s, i, rows, 64);
    for (int i = 4; i < 6; i++) tile_config_set(&s, i, rows, group);
    for (int i = 6; i < 8; i++) tile_config_set(&s, i, group / 4, 64);
    tile_config_load(&s, name);
}

/* One row tile times some blocks of one panel; the pointers are at the first block. */
struct tile_run {
    const int8_t *x;    /* [blocks of 32][rows of the tile][32] */
    const float *dx;    /* [blocks of 32][rows of the tile] */
    const int8_t *w;    /* the first block, [group / 4][16][4]; block_weights gives the others */
    int record_shift;   /* a record has 1 << record_shift blocks */
    int64_t record_gap; /* bytes between the last block of a record and the first one of the next */
    const float *dw;    /* [blocks][16] */
    int64_t count;      /* number of blocks */
    const uint8_t *next; /* memory of which a step prefetches NEXT_LINES lines; or NULL */
    bool first;          /* these are the first blocks of K: the sums start from +0 */
};

/* acc[r] = fma(dot of row r, dw * dx of row r, acc[r]) for block b. */
INLINE void block_accumulate(__m512 *acc, const int32_t (*dots)[PANEL], const struct tile_run *s,
                             int64_t b, int rows, int group) {
    const __m512 scale = _mm512_loadu_ps(s->dw + b * PANEL);
    const float *dx = s->dx + b * group / QK * rows;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(dx[r]));
        acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(dots[r])), both, acc[r]);
    }
}

/* Prefetches into the second-level cache. With more lines per step, the queue of cache misses would
 * be full, and loads would wait. */
INLINE void next_panel_prefetch(const struct tile_run *s, int64_t b) {
    if (!s->next) return;
    for (int i = 0; i < NEXT_LINES; i++)
        __builtin_prefetch(s->next + (b * NEXT_LINES + i) * 64, 0, 2);
}

/* The inputs of block b; for q6_k two blocks share 32 inputs. */
INLINE const int8_t *block_inputs(const struct tile_run *s, int64_t b, int rows, int group) {
    return s->x + b * group / QK * rows * QK + b * group % QK;
}

/* The weights of block b. There is a gap after each record, except in unpacked nibbles. */
INLINE const int8_t *block_weights(const struct tile_run *s, int64_t b, int group) {
    return s->w + b * group * PANEL + (b >> s->record_shift) * s->record_gap;
}

/* Step b: stores the sums of block b - 4 from tile register `sum`, multiplies block b into that
 * register, and accumulates block b - 6, whose sums were stored two steps ago. Without `whole`,
 * each of the three blocks may not exist. */
#define STEP(sum, a, w_, b, whole)                                                                 \
    do {                                                                                           \
        if ((whole) || ((b) >= SLOTS && (b)-SLOTS < s.count)) _tile_stored(sum, ring[sum], 64);    \
        if ((whole) || (b) < s.count) {                                                            \
            _tile_zero(sum);                                                                       \
            _tile_loadd(a, block_inputs(&s, b, rows, group), QK);                                  \
            _tile_loadd(w_, block_weights(&s, b, group), 64);                                      \
            _tile_dpbssd(sum, a, w_);                                                              \
            next_panel_prefetch(&s, b);                                                            \
        }                                                                                          \
        tile_memory_barrier(ring);                                                                 \
        if ((whole) || ((b) >= ACCUMULATE_LAG && (b)-ACCUMULATE_LAG < s.count))                    \
            block_accumulate(acc, (const int32_t(*)[PANEL])ring[((sum) + SLOTS / 2) % SLOTS], &s,  \
                             (b)-ACCUMULATE_LAG, rows, group);                                     \
    } while (0)
#define STEPS(b, whole)                                                                            \
    do {                                                                                           \
        STEP(0, 4, 6, b, whole);                                                                   \
        STEP(1, 5, 7, (b) + 1, whole);                                                             \
        STEP(2, 4, 6, (b) + 2, whole);                                                             \
        STEP(3, 5, 7, (b) + 3, whole);                                                             \
    } while (0)

/* Continues `part` (rows × 16 sums); `rows` and `group` are constants where this is inlined. */
INLINE void blocks_run(float (*part)[PANEL], const struct tile_run *run, int rows, int group) {
    const struct tile_run s =
        *run; // tile_memory_barrier does not affect this copy, so it stays in registers
    const __mmask16 started = s.first ? 0 : 0xFFFF;
    int32_t ring[SLOTS][16][PANEL] __attribute__((aligned(64)));
    __m512 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r] = _mm512_maskz_loadu_ps(started, part[r]);
    int64_t b = 0;
    if (s.count >= 2 * SLOTS) {
        STEPS(0, false); // the compiler knows which blocks exist
        STEPS(SLOTS, false);
        for (b = 2 * SLOTS; b + SLOTS <= s.count; b += SLOTS) STEPS(b, true);
    }
    for (; b < s.count + ACCUMULATE_LAG; b += SLOTS) STEPS(b, false);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(part[r], acc[r]);
}

/* One function for each even number of rows and each group. */
typedef void (*run_fn)(float (*part)[PANEL], const struct tile_run *s);
#define RUN_FN(rows, group)                                                                        \
    static __attribute__((noinline)) void blocks_##rows##x##group(float(*part)[PANEL],             \
                                                                  const struct tile_run *s) {      \
        blocks_run(part, s, rows, group);                                                          \
    }
#define RUN_FNS(group)                                                                             \
    RUN_FN(6, group)                                                                               \
    RUN_FN(8, group)                                                                               \
    RUN_FN(10, group)                                                                              \
    RUN_FN(12, group)                                                                              \
    RUN_FN(14, group)                                                                              \
    RUN_FN(16, group)

RUN_FNS(32)
RUN_FNS(16)

/* [32 / group - 1][rows / 2 - 3] */
static const run_fn run_fns[2][6] = {
    {blocks_6x32, blocks_8x32, blocks_10x32, blocks_12x32, blocks_14x32, blocks_16x32},
    {blocks_6x16, blocks_8x16, blocks_10x16, blocks_12x16, blocks_14x16, blocks_16x16},
};

struct int8_product {
    float *y;
    int64_t ldy;
    const struct gemm_input *in;
    const struct matrix *w;
    int64_t n0, n1;
    int64_t tile, chunk; /* rows of a tile; inputs of a row that are processed at a time */
    bool add;
};

/* Operands in the order in which tile registers load them, and the sums over the chunks so far. */
struct scratch {
    int8_t x[COPY_BYTES];       /* [tiles][blocks of 32][rows of a tile][32] */
    float dx[COPY_BYTES / QK];  /* [tiles][blocks of 32][rows of a tile] */
    int8_t w[RUN * PANEL];      /* blocks of a nibble panel as int8 */
    float dw[RUN / 16 * PANEL]; /* the scales of these blocks (nf4: the scale bytes) */
    float part[GROUP][SUPER_ROWS][PANEL];
} __attribute__((aligned(64)));

/* The int8 code of each nibble value, repeated in every 16 bytes. */
INLINE __m512i codes_load(const struct matrix *w) {
    if (w->layout == LAYOUT_NF4)
        return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)nf4_codes));
    int8_t codes[16];
    for (int i = 0; i < 16; i++) codes[i] = (int8_t)(i - w->zero);
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)codes));
}

/* Unpacks a block of a nibble panel to an int8 tile. The low nibbles become quads 0 … 3, the high
 * nibbles quads 4 … 7. */
INLINE void nibbles_unpack(int8_t *to, const uint8_t *w, __m512i codes) {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int p = 0; p < 4; p++, to += 64) {
        const __m512i raw = _mm512_loadu_si512(w + 64 * p);
        const __m512i lo = _mm512_and_si512(raw, nibble);
        const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
        _mm512_storeu_si512(to, _mm512_shuffle_epi8(codes, lo));
        _mm512_storeu_si512(to + 256, _mm512_shuffle_epi8(codes, hi));
    }
}

/* Widens the scales of `blocks` blocks from a record on, and unpacks their nibbles. `l` is a
 * constant where this is inlined. */
INLINE void records_unpack_as(struct scratch *s, const struct matrix *w, const uint8_t *record,
                              int64_t blocks, enum matrix_layout l) {
    const __m512i codes = l >= LAYOUT_Q4 ? codes_load(w) : _mm512_setzero_si512();
    for (int64_t b = 0; b < blocks; record += w->record_bytes)
        for (int i = 0; i < record_groups(l) && b < blocks; i++, b++) {
            _mm512_storeu_ps(s->dw + b * PANEL, record_scales(record, i, l));
            if (l >= LAYOUT_Q4)
                nibbles_unpack(s->w + b * QK * PANEL, record + w->head_bytes + i * layout_bytes(l),
                               codes);
        }
}

static void records_unpack(struct scratch *s, const struct matrix *w, const uint8_t *record,
                           int64_t blocks) {
    switch (w->layout) {
    case LAYOUT_Q8:
        records_unpack_as(s, w, record, blocks, LAYOUT_Q8);
        return;
    case LAYOUT_Q8_K:
        records_unpack_as(s, w, record, blocks, LAYOUT_Q8_K);
        return;
    case LAYOUT_Q6:
        records_unpack_as(s, w, record, blocks, LAYOUT_Q6);
        return;
    case LAYOUT_Q4:
        records_unpack_as(s, w, record, blocks, LAYOUT_Q4);
        return;
    case LAYOUT_Q4_K:
        records_unpack_as(s, w, record, blocks, LAYOUT_Q4_K);
        return;
    default:
        records_unpack_as(s, w, record, blocks, LAYOUT_NF4);
    }
}

/* A chunk of the inputs of some row tiles. */
struct row_tiles {
    const int8_t *x;
    const float *dx;
    int64_t k; /* inputs of a row in these arrays */
};

/* Copies inputs [k0, k1) of rows [m0, m0 + rows) to s in the order of tiles. The last tile is
 * filled with copies of the last row. */
static void rows_copy(struct scratch *s, const struct int8_product *p, int64_t m0, int64_t rows,
                      int64_t k0, int64_t k1) {
    const struct gemm_input *in = p->in;
    const int64_t k = k1 - k0, tile = p->tile;
    for (int64_t r = 0; r < (rows + tile - 1) / tile * tile; r++) {
        const int64_t from = (m0 + MIN(r, rows - 1)) * in->k + k0, at = r / tile * tile * k;
        int8_row_pack_tile(s->x + at, s->dx + at / QK, in->q + from, in->d + from / QK, k, r % tile,
                           tile);
    }
    tile_memory_barrier(s);
}

/* Returns the same inputs in the order of tiles, in place or copied to s. *copied is the first
 * input of the chunk that is in s, or -1. */
static struct row_tiles row_tiles_get(struct scratch *s, const struct int8_product *p, int64_t m0,
                                      int64_t rows, int64_t k0, int64_t k1, int64_t *copied) {
    const struct gemm_input *in = p->in;
    const int64_t at = m0 * in->k + k0 * p->tile;
    if (in->q_tiles) return (struct row_tiles){in->q_tiles + at, in->d_tiles + at / QK, in->k};
    if (*copied != k0) rows_copy(s, p, m0, rows, k0, k1);
    *copied = k0;
    return (struct row_tiles){s->x, s->dx, k1 - k0};
}

/* The weights of one panel for k inputs from k0 on, a multiple of 256. The scales are widened, and
 * nibbles unpacked, to s. */
static struct tile_run panel_blocks(struct scratch *s, const struct matrix *w, int64_t panel,
                                    int64_t k0, int64_t k) {
    const int64_t group = layout_group(w->layout);
    const uint8_t *record = record_at(w, panel, k0 / group);
    struct tile_run run = {.w = (const int8_t *)record + w->head_bytes,
                           .record_gap = w->head_bytes,
                           .record_shift = __builtin_ctz((unsigned)record_groups(w->layout)),
                           .dw = s->dw,
                           .count = k / group,
                           .first = k0 == 0};
    records_unpack(s, w, record, run.count);
    tile_memory_barrier(s->w);
    if (w->layout < LAYOUT_Q4) return run;
    run.w = s->w;
    run.record_gap = 0;
    return run;
}

/* nf4: multiplies the sums of one panel by the scales of its rows. */
static void sums_scale(float (*sums)[PANEL], int64_t rows, const float *row_scales) {
    const __m512 scale = _mm512_div_ps(_mm512_loadu_ps(row_scales), _mm512_set1_ps(NF4_UNIT));
    for (int64_t r = 0; r < rows; r++)
        _mm512_storeu_ps(sums[r], _mm512_mul_ps(_mm512_loadu_ps(sums[r]), scale));
}

/* Multiplies inputs [k0, k1) of all row tiles with one panel. The first row tiles prefetch the next
 * panel. */
static void panel_run(const struct int8_product *p, struct scratch *s, float (*part)[PANEL],
                      const struct row_tiles *x, int64_t panel, int64_t rows, int64_t k0,
                      int64_t k1) {
    const struct matrix *w = p->w;
    const run_fn run_tile = run_fns[layout_group(w->layout) != QK][p->tile / 2 - 3];
    for (int64_t k = k0; k < k1; k += RUN) {
        struct tile_run run = panel_blocks(s, w, panel, k, MIN(k1 - k, RUN));
        const uint8_t *next = record_at(w, panel + 1, k / layout_group(w->layout));
        const int64_t share = run.count * NEXT_LINES * 64,
                      all = run.count * layout_bytes(w->layout);
        for (int64_t t = 0; t * p->tile < rows; t++) {
            const int64_t at = (t * x->k + k - k0) * p->tile;
            run.x = x->x + at;
            run.dx = x->dx + at / QK;
            run.next = t * share < all ? next + t * share : NULL;
            run_tile(part + t * p->tile, &run);
        }
    }
}

static void panel_store(const struct int8_product *p, float (*part)[PANEL], int64_t panel,
                        int64_t m0, int64_t rows) {
    if (p->w->layout == LAYOUT_NF4) sums_scale(part, rows, p->w->row_scales + panel * PANEL);
    sums_store(p->y + m0 * p->ldy + panel * PANEL, p->ldy, (const float(*)[PANEL])part, rows,
               p->n1 - panel * PANEL, p->add);
    prefetch_step(p->in->prefetch);
}

/* Multiplies rows [m0, m0 + rows) (at most SUPER_TILES tiles) with all panels. If K is longer than
 * a chunk, GROUP panels are multiplied with each chunk before the next chunk. */
static void row_tiles_mul(const struct int8_product *p, struct scratch *s, int64_t m0,
                          int64_t rows) {
    const int64_t k = p->in->k, end = (p->n1 + PANEL - 1) / PANEL, group = p->chunk < k ? GROUP : 1;
    int64_t copied = -1;
    for (int64_t p0 = p->n0 / PANEL; p0 < end; p0 += group) {
        for (int64_t k0 = 0; k0 < k; k0 += p->chunk) {
            const int64_t k1 = MIN(k, k0 + p->chunk);
            const struct row_tiles x = row_tiles_get(s, p, m0, rows, k0, k1, &copied);
            for (int64_t i = 0; i < MIN(end - p0, group); i++) {
                panel_run(p, s, s->part[i], &x, p0 + i, rows, k0, k1);
                if (k1 == k) panel_store(p, s->part[i], p0 + i, m0, rows);
            }
        }
    }
}

/* Divides `rows` rows into equal tiles and returns the rows of a tile, an even number; 0 for fewer
 * than MIN_TILE_ROWS rows. */
static int64_t int8_tile_rows(int64_t rows) {
    if (rows < MIN_TILE_ROWS) return 0;
    const int64_t tiles = (rows + 15) / 16;
    return ((rows + tiles - 1) / tiles + 1) / 2 * 2;
}

static void amx_gemm_q(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                       int64_t n0, int64_t n1, bool add) {
    if (in->rows < MIN_TILE_ROWS) {
        avx512_gemm_q_two_streams(y, ldy, in, w, n0, n1, add);
        return;
    }
    const int64_t tile = int8_tile_rows(in->rows),
                  super_rows = MIN((in->rows + tile - 1) / tile, SUPER_TILES) * tile,
                  panels = (n1 + PANEL - 1) / PANEL - n0 / PANEL;
    const struct int8_product p = {
        y, ldy, in, w, n0, n1, tile, MIN(in->k, COPY_BYTES / super_rows / 256 * 256), add};
    struct scratch s;
    tile_config_int8((int)tile, layout_group(w->layout));
    prefetch_begin(in->prefetch, panels * ((in->rows + super_rows - 1) / super_rows));
    for (int64_t m = 0; m < in->rows; m += super_rows)
        row_tiles_mul(&p, &s, m, MIN(in->rows - m, super_rows));
}

void amx_fill_int8(struct kernels *k) {
    k->int8_tile_rows = int8_tile_rows;
    k->gemm_q8 = amx_gemm_q;
    k->gemm_q4 = amx_gemm_q;
}
