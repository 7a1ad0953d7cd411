/*
 * avx512bf16: the fast class on processors with AVX512_BF16 and without AMX (Zen 4, Zen 5, Cooper
 * Lake): tiles_*.h with VDPBF16PS.
 *
 * The registers of this unit are memory: sums stay in the first-level cache, and operands are read
 * where they are. One step multiplies in vector registers: sixteen rows of sums, of which each step
 * of two inputs adds a broadcast pair of A times sixteen pairs of B.
 *
 * Arithmetic of a step of 32 inputs: for each pair of inputs in ascending order, sum = fma(a[1],
 * b[1], sum), then sum = fma(a[0], b[0], sum), rounded to nearest even, with denormal operands and
 * results replaced by zeros of the same sign. VDPBF16PS ignores the rounding mode and the flags of
 * the thread.
 */
#include "kernel/tiles.h"

struct tile_registers {
    _Alignas(64) float sums[4][16 * PANEL];
    const uint16_t *operands[8]; /* those of registers 4 to 7 */
    int rows[8];
};
/* The registers of the thread's current product, on its stack: the library has no room for them in
 * thread-local memory. */
static _Thread_local struct tile_registers *registers;

INLINE void tile_registers_use(struct tile_registers *r) {
    registers = r;
    for (int i = 4; i < 8; i++) r->rows[i] = 16;
}

/* Called when the variable goes out of scope. */
INLINE void tile_registers_leave(struct tile_registers *r) {
    (void)r;
    registers = NULL;
}

#define tiles_begin()                                                                              \
    struct tile_registers __attribute__((cleanup(tile_registers_leave))) tile_registers_on_stack;  \
    tile_registers_use(&tile_registers_on_stack)

INLINE void tile_memory_barrier(const void *p) {
    (void)p;
}

INLINE void rows_copy(float *to, int64_t to_stride, const float *from, int64_t from_stride) {
    for (int64_t r = 0; r < 16; r++) {
        const char *row = (const char *)from + r * from_stride;
        _mm512_storeu_ps((char *)to + r * to_stride, _mm512_loadu_ps(row));
    }
}

/* acc[r] += the products of row r of a tile of A and a tile of B, for `rows` rows; a constant where
 * this is inlined. */
INLINE void step_multiply(__m512 *acc, const uint16_t *a, const uint16_t *b, int rows) {
#pragma GCC unroll 16
    for (int p = 0; p < 16; p++) {
        const __m512bh pairs = (__m512bh)_mm512_loadu_si512(b + p * 2 * PANEL);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, a + r * 32 + 2 * p, sizeof pair);
            acc[r] = _mm512_dpbf16_ps(acc[r], (__m512bh)_mm512_set1_epi32(pair), pairs);
        }
    }
}

INLINE void rows_multiply(float *sums, const uint16_t *a, const uint16_t *b, int rows) {
    __m512 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r] = _mm512_load_ps(sums + r * PANEL);
    step_multiply(acc, a, b, rows);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(sums + r * PANEL, acc[r]);
}

#define ROWS_MULTIPLY(rows)                                                                        \
    static void rows_multiply_##rows(float *sums, const uint16_t *a, const uint16_t *b) {          \
        rows_multiply(sums, a, b, rows);                                                           \
    }
ROWS_MULTIPLY(1)
ROWS_MULTIPLY(2)
ROWS_MULTIPLY(4)
ROWS_MULTIPLY(8)
ROWS_MULTIPLY(16)

static void tile_multiply(int t, int a, int b) {
    static void (*const multiply[])(float *, const uint16_t *, const uint16_t *) = {
        rows_multiply_1, rows_multiply_2, rows_multiply_4, rows_multiply_8, rows_multiply_16};
    const int rows = registers->rows[a], i = rows > 8 ? 4 : rows > 4 ? 3 : rows > 2 ? 2 : rows > 1;
    multiply[i](registers->sums[t], registers->operands[a], registers->operands[b]);
}

#define tile_load(t, p) (registers->operands[t] = (p))
#define tile_load_sums(t, p, stride) rows_copy(registers->sums[t], 64, p, stride)
#define tile_store(t, p, stride) rows_copy(p, stride, registers->sums[t], 64)
#define tile_zero(t) memset(registers->sums[t], 0, sizeof registers->sums[t])
#define tile_set_rows(t, n) (registers->rows[t] = (int)(n))

/*
 * Eight rows times two panels, with all sums in vector registers: a broadcast serves two products,
 * so that a step has 1.1 instead of 1.6 instructions per product.
 */
static void eight_rows_multiply(float *left, float *right, const uint16_t *a,
                                const uint16_t *const b[2], int64_t s0, int64_t s1) {
    __m512 acc[2][8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        acc[0][r] = _mm512_load_ps(left + r * PANEL);
        acc[1][r] = _mm512_load_ps(right + r * PANEL);
    }
    for (int64_t s = s0; s < s1; s++)
#pragma GCC unroll 16
        for (int p = 0; p < 16; p++) {
            const int64_t at = s * TILE + p * 2 * PANEL;
            const __m512bh pairs[2] = {(__m512bh)_mm512_loadu_si512(b[0] + at),
                                       (__m512bh)_mm512_loadu_si512(b[1] + at)};
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) {
                int32_t pair;
                memcpy(&pair, a + s * TILE + r * 32 + 2 * p, sizeof pair);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                acc[0][r] = _mm512_dpbf16_ps(acc[0][r], x, pairs[0]);
                acc[1][r] = _mm512_dpbf16_ps(acc[1][r], x, pairs[1]);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        _mm512_storeu_ps(left + r * PANEL, acc[0][r]);
        _mm512_storeu_ps(right + r * PANEL, acc[1][r]);
    }
}

static void tiles_multiply_steps(int t, int a, const uint16_t *p, const uint16_t *const b[2],
                                 int64_t s0, int64_t s1) {
    for (int r = 0; r < registers->rows[a] && r < 16; r += 8)
        eight_rows_multiply(registers->sums[t] + r * PANEL, registers->sums[t + 1] + r * PANEL,
                            p + r * 32, b, s0, s1);
}
#define tile_multiply_steps tiles_multiply_steps

#include "kernel/tiles_attention.h"
#include "kernel/tiles_grad.h"
#include "kernel/tiles_product.h"

/*
 * A few rows wait for memory, so they read one panel after the other, in one ascending run of
 * lines, and their sums stay in registers. The steps of a sum are those of a product in tiles.
 */
enum { FEW_ROWS = 8 };

struct few_rows {
    float *y; /* of the first row and output 0 */
    const uint16_t *a;
    int64_t ldy, steps, rows;
    bool add;
};

/* One panel; `rows` is a constant where this is inlined, and at least f->rows. */
INLINE void few_rows_panel(const struct few_rows *f, const uint16_t *panel, int64_t n,
                           __mmask16 mask, int rows) {
    __m512 acc[FEW_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t s = 0; s < f->steps; s++)
        step_multiply(acc, f->a + s * TILE, panel + s * TILE, rows);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        if (r >= f->rows) break;
        float *y = f->y + r * f->ldy + n;
        __m512 v = acc[r];
        if (f->add) v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), v);
        _mm512_mask_storeu_ps(y, mask, v);
    }
}

#define FEW_ROWS_PANEL(rows)                                                                       \
    static void few_rows_panel_##rows(const struct few_rows *f, const uint16_t *panel, int64_t n,  \
                                      __mmask16 mask) {                                            \
        few_rows_panel(f, panel, n, mask, rows);                                                   \
    }
FEW_ROWS_PANEL(1)
FEW_ROWS_PANEL(2)
FEW_ROWS_PANEL(4)
FEW_ROWS_PANEL(8)

static void avx512bf16_gemm(float *y, int64_t ldy, const struct gemm_input *in,
                            const struct matrix *w, int64_t n0, int64_t n1, bool add) {
    static void (*const panel_fns[])(const struct few_rows *, const uint16_t *, int64_t,
                                     __mmask16) = {few_rows_panel_1, few_rows_panel_2,
                                                   few_rows_panel_4, few_rows_panel_8};
    const int64_t rows = in->rows - in->skip;
    if (w->layout != LAYOUT_BF16 || in->low_rank || in->rows > 16 || rows > FEW_ROWS ||
        in->skip > 16 - FEW_ROWS) {
        tiles_gemm(y, ldy, in, w, n0, n1, add);
        return;
    }
    const struct few_rows f = {.y = y + in->skip * ldy,
                               .a = in->tiles + in->skip * 32,
                               .ldy = ldy,
                               .steps = (in->k + 31) / 32,
                               .rows = rows,
                               .add = add};
    const int i = rows > 4 ? 3 : rows > 2 ? 2 : rows > 1;
    prefetch_begin(in->prefetch, (n1 - n0 + PANEL - 1) / PANEL);
    for (int64_t n = n0; n < n1; n += PANEL) {
        panel_fns[i](&f, bf16_panel(w, n / PANEL), n, elems_mask(n1 - n));
        prefetch_step(in->prefetch);
    }
}

void kernels_fill_avx512bf16(struct kernels *k) {
    tiles_fill_product(k);
    k->gemm_tiles = avx512bf16_gemm;
    tiles_fill_grad(k);
    tiles_fill_attention(k);
}
