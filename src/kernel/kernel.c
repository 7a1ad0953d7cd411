/*
 * kernel: the choice of the level for this machine, the layout of weights in memory, and products
 * over a thread pool.
 *
 * This file does no heavy arithmetic: it packs, converts, divides work into ranges, and calls the
 * slots. A level is chosen by the processor's feature bits and by the register state that the
 * system saves on a context switch (XCR0, and the permission call that AMX needs), never by the
 * processor's model.
 *
 * Invariant: the division of a product over threads never changes the results, because every output
 * of a slot depends only on one row of x and one row of w.
 */
#include "kernel/kernel.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/internal.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const char *const level_names[CPU_LEVELS] = {"scalar", "avx2",       "avxvnni",
                                                    "avx512", "avx512bf16", "amx"};

const char *cpu_level_name(enum cpu_level level) {
    CHECK((int)level >= 0 && level < CPU_LEVELS);
    return level_names[level];
}

#if defined(__x86_64__)

enum {
    XCR0_AVX = 0x6,     /* SSE and AVX state */
    XCR0_AVX512 = 0xe0, /* opmask and the two parts of ZMM */
    XCR0_AMX = 0x60000, /* tile configuration and tile data */
};

static uint64_t xcr0_read(void) {
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

/* The best level. *vnni: whether the processor has the level avxvnni, which processors with AVX-512
 * may lack. */
static enum cpu_level level_detect(bool *vnni) {
    unsigned a, b, c, d, b7, c7, d7, a71 = 0;
    *vnni = false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return CPU_SCALAR;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return CPU_SCALAR;
    uint64_t xcr0 = xcr0_read();
    unsigned need1 = bit_AVX | bit_FMA | bit_F16C;
    if ((c & need1) != need1 || !(b7 & bit_AVX2) || (xcr0 & XCR0_AVX) != XCR0_AVX)
        return CPU_SCALAR;
    if (a >= 1 && __get_cpuid_count(7, 1, &a71, &b, &c, &d) == 0) a71 = 0;
    *vnni = a71 & 1u << 4; // AVX-VNNI
    unsigned need512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    bool wide =
        (b7 & need512) == need512 && (c7 & bit_AVX512VNNI) && (xcr0 & XCR0_AVX512) == XCR0_AVX512;
    if (!wide) return *vnni ? CPU_AVXVNNI : CPU_AVX2;
    if (!(a71 & 1u << 5)) return CPU_AVX512;         // AVX512_BF16
    unsigned tiles = 1u << 22 | 1u << 24 | 1u << 25; // AMX-BF16, AMX-TILE, AMX-INT8
    bool amx = (d7 & tiles) == tiles && (xcr0 & XCR0_AMX) == XCR0_AMX && amx_request();
    return amx ? CPU_AMX : CPU_AVX512BF16;
}

#else

static enum cpu_level level_detect(bool *vnni) {
    *vnni = false;
    return CPU_SCALAR;
}

#endif

static struct kernels tables[CPU_LEVELS];
static enum cpu_level best_level, chosen_level;
static bool has_level[CPU_LEVELS];

static void tables_fill(void) {
    static void (*const fill[CPU_LEVELS])(struct kernels *) = {
        kernels_fill_scalar, kernels_fill_avx2,       kernels_fill_avxvnni,
        kernels_fill_avx512, kernels_fill_avx512bf16, kernels_fill_amx};
    bool vnni;
    best_level = level_detect(&vnni);
    for (int l = 0; l <= (int)best_level; l++) {
        has_level[l] = l != CPU_AVXVNNI || vnni;
        if (l > 0) tables[l] = tables[l - 1];
        if (has_level[l]) fill[l](&tables[l]);
        tables[l].level = (enum cpu_level)l;
        tables[l].name = level_names[l];
    }
}

static void tables_init(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, tables_fill);
}

/* The level of SHOAL_CPU, or the best one if the variable is not set or invalid. */
static void level_choose(void) {
    tables_init();
    chosen_level = best_level;
    const char *requested = getenv("SHOAL_CPU");
    for (int l = 0; requested && l < CPU_LEVELS; l++)
        if (has_level[l] && strcmp(requested, level_names[l]) == 0)
            chosen_level = (enum cpu_level)l;
}

int kernels_check_level(struct error *err) {
    const char *requested = getenv("SHOAL_CPU");
    if (!requested || !*requested) return OK;
    tables_init();
    for (int l = 0; l < CPU_LEVELS; l++) {
        if (strcmp(requested, level_names[l]) != 0) continue;
        if (has_level[l]) return OK;
        return error_set(
            err, ERR_USAGE,
            "SHOAL_CPU '%s' is not available on this machine; 'shoal doctor' lists its "
            "levels",
            requested);
    }
    return error_set(
        err, ERR_USAGE,
        "unknown SHOAL_CPU '%s'; it is scalar, avx2, avxvnni, avx512, avx512bf16 or amx",
        requested);
}

bool cpu_has_level(enum cpu_level level) {
    tables_init();
    return has_level[level];
}

const struct kernels *kernels_for_level(enum cpu_level level) {
    return cpu_has_level(level) ? &tables[level] : NULL;
}

const struct kernels *kernels_get(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, level_choose);
    return &tables[chosen_level];
}

const char *numeric_class_name(enum numeric_class cls) {
    if (cls == NUMERIC_EXACT) return "exact";
    const struct kernels *k = kernels_get();
    return k->level == CPU_AMX ? "fast-amx" : k->gemm_tiles ? "fast-avx512bf16" : "fast-f32";
}

bool numeric_class_find(const char *name, const char *level, enum numeric_class *out) {
    *out = strncmp(name, "fast", 4) == 0 ? NUMERIC_FAST : NUMERIC_EXACT;
    if (strcmp(name, "fast") == 0) return strcmp(level, kernels_get()->name) == 0;
    return *out == NUMERIC_EXACT || strcmp(name, numeric_class_name(*out)) == 0;
}

enum numeric_class numeric_class_of(bool exact, bool fast) {
    return !exact && (fast || kernels_get()->gemm_tiles) ? NUMERIC_FAST : NUMERIC_EXACT;
}

static uint32_t float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static float bits_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 31) return bits_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) { // zero or a multiple of 2^-24
        float f = (float)mantissa * 0x1p-24f;
        return bits_float(sign | float_bits(f));
    }
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t f32_to_f16(float f) {
    uint32_t u = float_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff)); // quiet NaN
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00); // 65520 and above round to infinity
    if (a < 0x38800000) {
        // Below 2^-14: in units of 2^-24, the last mantissa bit of 0.5; the addition rounds half to
        // even.
        return (uint16_t)(sign | (float_bits(bits_float(a) + 0.5f) - 0x3f000000));
    }
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | (a - 0x38000000) >> 13);
}

float bf16_to_f32(uint16_t h) {
    return bits_float((uint32_t)h << 16);
}

uint16_t f32_to_bf16(float f) {
    uint32_t u = float_bits(f);
    const bool nan = (u & 0x7fffffff) > 0x7f800000;
    return (uint16_t)(nan ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16); // no branch
}

static int64_t panel_count(int64_t n) {
    return (n + PANEL - 1) / PANEL;
}

static int64_t source_row(const int32_t *order, int64_t i) {
    return order ? order[i] : i;
}

/* Writes one output's bytes of a block into its panel: each quad of four bytes is PANEL * 4 bytes
 * after the one before. */
static void quads_write(uint8_t *block, int lane, const uint8_t *bytes, int quads) {
    for (int p = 0; p < quads; p++) memcpy(block + (p * PANEL + lane) * 4, bytes + 4 * p, 4);
}

/* Packs the 32 integers of one output's block at `to`, its group of a panel: as nibbles in the
 * order of q4_0, or as int8. */
static void block_pack(const struct matrix *m, uint8_t *to, int lane, const int8_t *q) {
    uint8_t bytes[QK];
    if (m->layout >= LAYOUT_Q4) {
        for (int i = 0; i < QK / 2; i++)
            bytes[i] = (uint8_t)((q[i] + m->zero) | (uint8_t)(q[i + QK / 2] + m->zero) << 4);
        quads_write(to, lane, bytes, QK / 8);
    } else {
        quads_write(to, lane, (const uint8_t *)q, QK / 4);
    }
}

/* Writes the scales and minima of one output's block to the head of its record: of group g of the
 * record, or of a whole super-block. */
static void head_pack(const struct matrix *m, uint8_t *record, int g, int lane,
                      const struct quant_block *s) {
    const bool blocks = m->layout == LAYOUT_Q8 || m->layout == LAYOUT_Q4;
    memcpy(record + 2 * (g * PANEL + lane), &s->d, sizeof s->d);
    if (m->mins)
        memcpy(record + (blocks ? 4 : 2) * PANEL + 2 * (g * PANEL + lane), &s->m, sizeof s->m);
    for (int i = 0; !blocks && i < record_groups(m->layout); i++)
        record[(4 + i) * PANEL + lane] = s->s[i];
    for (int i = 0; !blocks && m->mins && i < (int)ARRAY_LEN(s->u); i++)
        record[(12 + i) * PANEL + lane] = s->u[i];
}

/* Packs the decoded file block that begins at weight k of output i. Returns ERR_NUMERIC if a scale
 * or minimum is not finite. */
static int quant_block_pack(struct matrix *m, int64_t i, int64_t k,
                            const struct tensor_type_traits *traits, const struct quant_block *s,
                            struct error *err) {
    const int64_t panel = i / PANEL, g = k / traits->group;
    const int lane = (int)(i % PANEL), per_block = QK / traits->group;
    for (int j = 0; j < traits->block / traits->group; j++)
        if (!isfinite(s->scale[j]) || (traits->mins && !isfinite(s->min[j])))
            return error_set(err, ERR_NUMERIC,
                             "row %lld has a %s block whose scale is not a finite number",
                             (long long)i, traits->name);
    head_pack(m, (uint8_t *)(uintptr_t)record_at(m, panel, g),
              traits->block > QK ? 0 : (int)(g % record_groups(m->layout)), lane, s);
    for (int b = 0; b < traits->block / QK; b++)
        block_pack(m, (uint8_t *)(uintptr_t)group_at(m, panel, g + b * per_block), lane,
                   s->q + b * QK);
    return OK;
}

static int nf4_row_pack(struct matrix *m, int64_t i, const uint8_t *row, struct error *err) {
    const int64_t n_scales = (m->k + NF4_BLOCK - 1) / NF4_BLOCK, panel = i / PANEL;
    const int lane = (int)(i % PANEL);
    float *scale = (float *)(uintptr_t)m->row_scales + i;
    memcpy(scale, row, sizeof *scale);
    if (!isfinite(*scale))
        return error_set(err, ERR_NUMERIC, "row %lld has an nf4 scale that is not a finite number",
                         (long long)i);
    row += sizeof *scale;
    for (int64_t b = 0; b < n_scales; b++)
        ((uint8_t *)(uintptr_t)record_at(m, panel, 2 * b))[b % 4 * PANEL + lane] = row[b];
    row += n_scales;
    for (int64_t b = 0; b < m->k / QK; b++, row += QK / 2)
        quads_write((uint8_t *)(uintptr_t)group_at(m, panel, b), lane, row, QK / 8);
    return OK;
}

static void bf16_row_pack(struct matrix *m, int64_t i, const uint8_t *row) {
    int64_t kp = (m->k + 31) / 32 * 32;
    uint16_t *panel = (uint16_t *)(uintptr_t)m->data + i / PANEL * PANEL * kp;
    for (int64_t k = 0; k < m->k; k++)
        memcpy(&panel[(k / 2 * PANEL + i % PANEL) * 2 + k % 2], row + 2 * k, 2);
}

/* Packs one file row as row i. */
static int row_pack(struct matrix *m, int64_t i, const uint8_t *src, struct error *err) {
    const struct tensor_type_traits *traits = tensor_type_traits_find(m->type);
    if (m->layout == LAYOUT_NF4) return nf4_row_pack(m, i, src, err);
    if (m->layout == LAYOUT_BF16) {
        bf16_row_pack(m, i, src);
    } else if (m->layout == LAYOUT_ROW_MAJOR) {
        size_t bytes = tensor_row_bytes(m->type, m->k);
        memcpy((uint8_t *)(uintptr_t)m->data + (size_t)i * bytes, src, bytes);
    } else {
        struct quant_block s;
        for (int64_t k = 0; k < m->k; k += traits->block, src += traits->bytes) {
            traits->decode(src, &s);
            int rc = quant_block_pack(m, i, k, traits, &s, err);
            if (rc != OK) return rc;
        }
    }
    return OK;
}

int matrix_set_row(struct matrix *m, int64_t i, const void *row, struct error *err) {
    CHECK(i >= 0 && i < m->n);
    return row_pack(m, i, row, err);
}

/* Rejects unknown types and impossible shapes before sizes are computed from them. */
static int shape_check(enum tensor_type type, int64_t n, int64_t k, struct error *err) {
    const struct tensor_type_traits *traits = tensor_type_traits_find(type);
    if (!traits) return error_set(err, ERR_FORMAT, "tensor type %d is not supported", (int)type);
    if (n < 1 || k < 1 || n > INT32_MAX || k > INT32_MAX)
        return error_set(err, ERR_FORMAT, "a matrix of %lld x %lld is not possible", (long long)n,
                         (long long)k);
    if (k % traits->block)
        return error_set(err, ERR_FORMAT, "a %s row of %lld values is not a multiple of %d",
                         traits->name, (long long)k, traits->block);
    return OK;
}

static void matrix_set_shape(struct matrix *m, enum tensor_type type, int64_t n, int64_t k,
                             enum numeric_class cls) {
    const struct tensor_type_traits *traits = tensor_type_traits_find(type);
    bool fast = type == TENSOR_BF16 && cls == NUMERIC_FAST;
    *m = (struct matrix){.type = type,
                         .layout = fast ? LAYOUT_BF16 : traits->layout,
                         .zero = traits->zero,
                         .mins = traits->mins,
                         .n = n,
                         .k = k};
    m->packed = m->layout != LAYOUT_ROW_MAJOR;
    if (m->layout >= LAYOUT_Q8) record_sizes_set(m);
}

/* Bytes of rows or panels. */
static size_t data_bytes(const struct matrix *m) {
    size_t panels = (size_t)panel_count(m->n), k = (size_t)m->k;
    if (m->layout == LAYOUT_ROW_MAJOR) return (size_t)m->n * tensor_row_bytes(m->type, m->k);
    return panels *
           (m->layout == LAYOUT_BF16 ? PANEL * ((k + 31) / 32 * 32) * 2 : (size_t)m->panel_bytes);
}

static size_t row_scale_bytes(const struct matrix *m) {
    return m->layout == LAYOUT_NF4 ? (size_t)panel_count(m->n) * PANEL * sizeof(float) : 0;
}

static int matrix_alloc_data(struct matrix *m, struct arena *arena, struct error *err) {
    size_t n = row_scale_bytes(m);
    m->data = arena_try_alloc(arena, data_bytes(m), err);
    if (m->data && n) m->row_scales = arena_try_alloc(arena, n, err);
    return m->data && (!n || m->row_scales) ? OK : err->code;
}

int matrix_alloc(struct matrix *m, enum tensor_type type, int64_t n, int64_t k,
                 enum numeric_class cls, struct arena *arena, struct error *err) {
    int rc = shape_check(type, n, k, err);
    if (rc != OK) return rc;
    matrix_set_shape(m, type, n, k, cls);
    return matrix_alloc_data(m, arena, err);
}

int matrix_init_unpacked(struct matrix *m, enum tensor_type type, int64_t n, int64_t k,
                         const void *rows, struct error *err) {
    int rc = shape_check(type, n, k, err);
    if (rc == OK) *m = (struct matrix){.type = type, .n = n, .k = k, .data = rows};
    return rc;
}

/* Rows that matrix_init packs. */
struct rows_packing {
    struct matrix *m;
    const uint8_t *rows;
    const int32_t *order;
    _Atomic int64_t bad; /* the first row that cannot be packed; n: none */
};

static int packing_row(const struct rows_packing *w, int64_t i, struct error *err) {
    size_t bytes = tensor_row_bytes(w->m->type, w->m->k);
    return row_pack(w->m, i, w->rows + (size_t)source_row(w->order, i) * bytes, err);
}

static void panels_pack(void *ctx, int64_t begin, int64_t end, int thread) {
    struct rows_packing *w = ctx;
    struct error ignored;
    (void)thread;
    for (int64_t i = begin * PANEL; i < MIN(end * PANEL, w->m->n); i++) {
        if (packing_row(w, i, &ignored) == OK) continue;
        int64_t first = atomic_load(&w->bad);
        while (i < first && !atomic_compare_exchange_weak(&w->bad, &first, i)) continue;
        return;
    }
}

int matrix_init(struct matrix *m, enum tensor_type type, int64_t n, int64_t k, const void *rows,
                const int32_t *row_order, enum numeric_class cls, struct pool *pool,
                struct arena *arena, struct error *err) {
    int rc = shape_check(type, n, k, err);
    if (rc != OK) return rc;
    for (int64_t i = 0; row_order && i < n; i++) CHECK(row_order[i] >= 0 && row_order[i] < n);
    matrix_set_shape(m, type, n, k, cls);
    size_t item = type == TENSOR_F32 ? 4 : 2;
    m->data = rows; // used in place if possible
    if (!m->packed && !row_order && (uintptr_t)rows % item == 0) return OK;
    rc = matrix_alloc_data(m, arena, err);
    if (rc != OK) return rc;
    struct rows_packing w = {m, rows, row_order, n};
    pool_run(pool, panels_pack, &w, panel_count(n), 1);
    return w.bad < n ? packing_row(&w, w.bad, err) : OK;
}

/* Unpacks the 32 integers of block b of output i, with the zero point subtracted; for nf4 they are
 * indices of nf4_codes. */
static void block_unpack(const struct matrix *m, int64_t i, int64_t b, int8_t q[QK]) {
    bool nibbles = m->layout >= LAYOUT_Q4;
    int payload = nibbles ? QK / 2 : QK, lane = (int)(i % PANEL);
    const uint8_t *block = group_at(m, i / PANEL, b * (QK / layout_group(m->layout)));
    for (int j = 0; j < payload; j++) {
        uint8_t byte = block[(j / 4 * PANEL + lane) * 4 + j % 4];
        q[j] = (int8_t)(nibbles ? (byte & 15) - m->zero : byte);
        if (nibbles) q[j + payload] = (int8_t)((byte >> 4) - m->zero);
    }
}

static void packed_row_decode(const struct matrix *m, int64_t i, int64_t k0, int64_t k1,
                              float *out) {
    float unit = m->layout == LAYOUT_NF4 ? m->row_scales[i] / NF4_UNIT : 1.0f;
    const int group = layout_group(m->layout);
    for (int64_t k = k0; k < k1; k += QK, out += QK) {
        int8_t q[QK];
        block_unpack(m, i, k / QK, q);
        const float d[2] = {group_scale(m, i, k / group), group_scale(m, i, (k + QK / 2) / group)},
                    min = m->mins ? group_min(m, i, k / QK) : 0.0f;
        for (int j = 0; j < QK; j++) {
            int v = m->layout == LAYOUT_NF4 ? nf4_codes[q[j]] : q[j];
            out[j] = (float)v * d[j / (QK / 2)] * unit;
            if (m->mins) out[j] += min;
        }
    }
}

void matrix_get_row_part(const struct matrix *m, int64_t i, int64_t k0, int64_t k1, float *out) {
    if (!m->packed) {
        size_t bytes = tensor_row_bytes(m->type, m->k),
               skip = k0 ? tensor_row_bytes(m->type, k0) : 0;
        tensor_to_f32(m->type, (const uint8_t *)m->data + (size_t)i * bytes + skip, out, k1 - k0);
    } else if (m->layout == LAYOUT_BF16) {
        int64_t kp = (m->k + 31) / 32 * 32;
        const uint16_t *panel = (const uint16_t *)m->data + i / PANEL * PANEL * kp;
        for (int64_t k = k0; k < k1; k++)
            out[k - k0] = bf16_to_f32(panel[(k / 2 * PANEL + i % PANEL) * 2 + k % 2]);
    } else {
        packed_row_decode(m, i, k0, k1, out);
    }
}

struct matrix matrix_view(enum dtype e, bool pairs, const void *rows, int64_t n, int64_t k) {
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_BF16, TENSOR_F16};
    struct matrix m = {.n = n, .k = k, .data = rows};
    if (e == DTYPE_I8)
        m.layout = pairs ? LAYOUT_PAIRS_I8 : LAYOUT_ROWS_I8;
    else
        m.type = types[e];
    return m;
}

void matrix_get_row(const struct matrix *m, int64_t i, float *out) {
    CHECK(i >= 0 && i < m->n);
    matrix_get_row_part(m, i, 0, m->k, out);
}

static void nf4_row_encode(const struct matrix *m, int64_t i, uint8_t *out) {
    int8_t q[QK];
    memcpy(out, &m->row_scales[i], sizeof(float));
    out += sizeof(float);
    for (int64_t k = 0; k < m->k; k += NF4_BLOCK) *out++ = (uint8_t)group_scale(m, i, k / QK);
    for (int64_t b = 0; b < m->k / QK; b++) {
        block_unpack(m, i, b, q);
        for (int j = 0; j < QK / 2; j++) *out++ = (uint8_t)(q[j] | q[j + QK / 2] << 4);
    }
}

/* Reads the file block of output i that begins with group g: the inverse of quant_block_pack. */
static void quant_block_unpack(const struct matrix *m, int64_t i, int64_t g,
                               const struct tensor_type_traits *traits, struct quant_block *s) {
    const uint8_t *record = record_at(m, i / PANEL, g);
    const int lane = (int)(i % PANEL), n = record_groups(m->layout);
    s->scale[0] = group_scale(m, i, g);
    s->min[0] = m->mins ? group_min(m, i, g) : 0.0f;
    for (int b = 0; b < traits->block / QK; b++)
        block_unpack(m, i, g * traits->group / QK + b, s->q + b * QK);
    if (traits->block == QK) return;
    s->d = half_at(record, lane);
    s->m = half_at(record + 2 * PANEL, lane);
    for (int j = 0; j < n; j++) s->s[j] = record[(4 + j) * PANEL + lane];
    for (int j = 0; m->mins && j < (int)ARRAY_LEN(s->u); j++)
        s->u[j] = record[(12 + j) * PANEL + lane];
}

bool matrix_encode_row(const struct matrix *m, int64_t i, void *out) {
    const struct tensor_type_traits *traits = tensor_type_traits_find(m->type);
    uint8_t *to = out;
    CHECK(i >= 0 && i < m->n);
    if (!m->packed && tensor_type_is_quantized(m->type)) {
        size_t bytes = tensor_row_bytes(m->type, m->k);
        memcpy(out, (const uint8_t *)m->data + (size_t)i * bytes, bytes);
        return true;
    }
    if (m->layout == LAYOUT_NF4) {
        nf4_row_encode(m, i, out);
        return true;
    }
    for (int64_t k = 0; traits->encode && k < m->k; k += traits->block, to += traits->bytes) {
        struct quant_block s;
        quant_block_unpack(m, i, k / traits->group, traits, &s);
        traits->encode(&s, to);
    }
    return traits->encode != NULL;
}

bool matrix_needs_int8(const struct matrix *m) {
    return m->layout >= LAYOUT_Q8;
}

bool matrix_uses_tiles(const struct matrix *m, enum row_path path) {
    if (!kernels_get()->gemm_tiles) return false;
    if (m->layout == LAYOUT_ROW_MAJOR) return path == ROWS_TRAINING && m->type != TENSOR_BF16;
    return m->layout == LAYOUT_BF16 || (path != ROWS_EXACT && kernels_get()->quantized_tiles);
}

size_t matrix_bytes(const struct matrix *m) {
    return data_bytes(m) + row_scale_bytes(m);
}

size_t matrix_bytes_of(enum tensor_type type, int64_t n, int64_t k, enum numeric_class cls) {
    struct matrix m;
    matrix_set_shape(&m, type, n, k, cls);
    return matrix_bytes(&m);
}

static size_t align_64(size_t n) {
    return (n + 63) & ~(size_t)63;
}

enum { INPUT_PARTS = 7 };

/* Offsets in the scratch of a gemm_input, from a 64-byte boundary, of q, d, sum, q_sum, tiles,
 * q_tiles and d_tiles; at[INPUT_PARTS] is the size. */
static void gemm_input_layout(int64_t rows, int64_t k, size_t at[INPUT_PARTS + 1]) {
    size_t r = (size_t)rows, tiled = (r + 15) / 16 * 16, kp = (size_t)(k + 31) / 32 * 32,
           packed = kernels_get()->int8_tile_rows ? tiled : 0;
    at[0] = 0;
    at[1] = align_64(r * kp);
    at[2] = at[1] + align_64(r * (kp / 32) * sizeof(float));
    at[3] = at[2] + align_64(r * (kp / 32) * sizeof(float));
    at[4] = at[3] + align_64(r * (kp / 32) * sizeof(int32_t));
    at[5] = at[4] + align_64(tiled * kp * sizeof(uint16_t));
    at[6] = at[5] + align_64(packed * kp);
    at[7] = at[6] + align_64(packed * (kp / 32) * sizeof(float));
}

size_t dtype_size(enum dtype e) {
    return (size_t)elem_bytes(e);
}

static const char *const dtype_names[N_DTYPE] = {"f32", "bf16", "f16", "i8"};

const char *dtype_name(enum dtype e) {
    return dtype_names[e];
}

int dtype_parse(const char *name, enum dtype *out, struct error *err) {
    for (int e = 0; e < N_DTYPE; e++)
        if (strcmp(name, dtype_names[e]) == 0) {
            *out = (enum dtype)e;
            return OK;
        }
    return error_set(err, ERR_USAGE, "no element '%s'; there are f32, bf16, f16 and i8", name);
}

float row_amax(const float *x, int64_t n) {
    float amax = 0;
    for (int64_t i = 0; i < n; i++) amax = MAX(amax, fabsf(x[i]));
    return amax;
}

void i8_from_f32(const float *src, float d, int8_t *dst, int64_t n) {
    float inverse = d > 0.0f ? 1.0f / d : 0.0f;
    for (int64_t i = 0; i < n; i++) {
        float u = src[i] * inverse;
        u = u > 127.0f ? 127.0f : u > -127.0f ? u : u == u ? -127.0f : 0.0f;
        dst[i] = (int8_t)round_even(u);
    }
}

float dtype_from_f32(enum dtype e, const float *src, void *dst, int64_t n) {
    if (e == DTYPE_F32) memcpy(dst, src, (size_t)n * sizeof *src);
    if (e == DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) ((uint16_t *)dst)[i] = f32_to_bf16(src[i]);
    if (e == DTYPE_F16)
        for (int64_t i = 0; i < n; i++) ((uint16_t *)dst)[i] = f32_to_f16(src[i]);
    if (e != DTYPE_I8) return 1.0f;
    float d = MIN(row_amax(src, n), FLT_MAX) / 127.0f;
    if (d < FLT_MIN) d = 0.0f;
    i8_from_f32(src, d, dst, n);
    return d;
}

void gemm_nt(enum dtype e, float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows,
             const void *w, int64_t ldw, int64_t k, int64_t n0, int64_t n1, bool add) {
    const struct kernels *kern = kernels_get();
    switch (e) {
    case DTYPE_F32:
        kern->gemm_f32(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, add);
        return;
    case DTYPE_BF16:
        kern->gemm_bf16(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, add);
        return;
    case DTYPE_F16:
        kern->gemm_f16(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, add);
        return;
    default:
        kern->gemm_i8(y, ldy, x, ldx, rows, w, ldw, k, n0, n1, add);
    }
}

void gemm_nn(enum dtype e, float *y, int64_t ldy, const float *t, int64_t tm, int64_t tj,
             int64_t rows, const void *v, int64_t ldv, int64_t k, int64_t n) {
    const struct kernels *kern = kernels_get();
    switch (e) {
    case DTYPE_F32:
        kern->gemm_nn_f32(y, ldy, t, tm, tj, rows, v, ldv, k, n);
        return;
    case DTYPE_BF16:
        kern->gemm_nn_bf16(y, ldy, t, tm, tj, rows, v, ldv, k, n);
        return;
    case DTYPE_F16:
        kern->gemm_nn_f16(y, ldy, t, tm, tj, rows, v, ldv, k, n);
        return;
    default:
        kern->gemm_nn_i8(y, ldy, t, tm, tj, rows, v, ldv, k, n);
    }
}

/* Quantises a row to 16 bits: writes t / s, rounded half to even, and returns s, the row's largest
 * magnitude over 32767. If a value is not finite, it returns NaN, so that the products are NaN too.
 */
static float row_quantize_i16(const float *t, int64_t n, int16_t *out) {
    float s = row_amax(t, n) / 32767.0f;
    bool in_range = s >= FLT_MIN && s <= FLT_MAX;
    float nan = 0;
    for (int64_t i = 0; i < n; i++) {
        float u = in_range ? t[i] / s : 0.0f;
        u = u < -32767.0f ? -32767.0f : u > 32767.0f ? 32767.0f : u == u ? u : 0.0f;
        out[i] = (int16_t)round_even(u);
        nan += t[i] - t[i];
    }
    return in_range ? s + nan : nan;
}

void gemm_nn_i8_pairs(float *y, int64_t ldy, const float *t, int64_t ldt, int64_t rows,
                      const int8_t *v, int64_t ldv, int64_t n, int64_t width) {
    enum { ROWS = 16, RANKS = 64 };
    int16_t q[ROWS][RANKS];
    float s[ROWS];
    CHECK(n % 2 == 0 && n <= RANKS);
    for (int64_t m = 0; m < rows; m += ROWS) {
        int64_t n_rows = MIN(rows - m, ROWS);
        for (int64_t i = 0; i < n_rows; i++) s[i] = row_quantize_i16(t + (m + i) * ldt, n, q[i]);
        kernels_get()->gemm_nn_i16_i8(y + m * ldy, ldy, q[0], RANKS, s, n_rows, v, ldv, n / 2,
                                      width);
    }
}

size_t gemm_input_scratch(int64_t max_rows, int64_t max_k) {
    size_t at[INPUT_PARTS + 1];
    gemm_input_layout(max_rows, max_k, at);
    return at[INPUT_PARTS] + 64;
}

uint16_t *gemm_input_tile_row(const struct gemm_input *in, int64_t m) {
    return in->tiles + m / 16 * 16 * ((in->k + 31) / 32 * 32) + m % 16 * 32;
}

void gemm_low_rank_pack(uint16_t *tiles, int64_t at, const float *t, int64_t ld, int64_t rows,
                        int64_t ranks) {
    const struct gemm_input to = {.k = LOW_RANK_MAX, .tiles = tiles};
    for (int64_t m = 0; m < rows; m++)
        kernels_get()->tiles_pack_row(t + m * ld, ranks, gemm_input_tile_row(&to, at + m));
}

void gemm_input_pack_row(const struct gemm_input *in, int64_t row, const float *x) {
    kernels_get()->tiles_pack_row(x, in->k, gemm_input_tile_row(in, row));
}

void gemm_input_pad_tiles(const struct gemm_input *in) {
    for (int64_t m = in->rows; m % 16 != 0; m++)
        for (int64_t k = 0; k < in->k; k += 32) memset(gemm_input_tile_row(in, m) + k * 16, 0, 64);
}

static void pack_tiles_range(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct gemm_input *in = ctx;
    (void)thread;
    for (int64_t m = begin; m < end; m++) gemm_input_pack_row(in, m, in->x + m * in->ldx);
}

void gemm_input_pack_tiles(struct gemm_input *in, struct pool *pool) {
    gemm_input_pad_tiles(in);
    pool_run(pool, pack_tiles_range, in, in->rows, 16);
}

/* Rows per tile of gemm_input.q_tiles; 0 if the products read q. */
static int64_t int8_tile_rows(int64_t rows) {
    const struct kernels *k = kernels_get();
    return k->int8_tile_rows ? k->int8_tile_rows(rows) : 0;
}

static void int8_row_to_tiles(const struct gemm_input *in, int64_t m, const int8_t *q,
                              const float *d) {
    const int64_t tile = int8_tile_rows(in->rows), at = m / tile * tile * in->k;
    int8_row_pack_tile(in->q_tiles + at, in->d_tiles + at / QK, q, d, in->k, m % tile, tile);
}

/* Fills the last tile with zeros; the caller packs its rows afterwards. */
static void int8_tiles_pad(const struct gemm_input *in) {
    const int64_t tile = int8_tile_rows(in->rows), last = (in->rows - 1) / tile * tile * in->k;
    memset(in->q_tiles + last, 0, (size_t)(tile * in->k));
    memset(in->d_tiles + last / QK, 0, (size_t)(tile * in->k / QK) * sizeof *in->d_tiles);
}

static void quantize_rows_range(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct gemm_input *in = ctx;
    int64_t blocks = in->k / QK;
    (void)thread;
    for (int64_t m = begin; m < end; m++) {
        int8_t *q = in->q + m * in->k;
        float *d = in->d + m * blocks;
        kernels_get()->quantize_row(in->x + m * in->ldx, in->k, q, d);
        kernels_get()->block_sums(in->q_sum + m * blocks, in->sum + m * blocks, q, d, blocks);
        if (in->q_tiles) int8_row_to_tiles(in, m, q, d);
    }
}

/* The address of the bf16 tiles in a scratch of gemm_input_scratch bytes. */
static uint16_t *tiles_in_scratch(int64_t rows, int64_t k, void *scratch) {
    size_t at[INPUT_PARTS + 1];
    gemm_input_layout(rows, k, at);
    return (uint16_t *)(void *)((uint8_t *)align_64((uintptr_t)scratch) + at[4]);
}

void gemm_input_prepare(struct gemm_input *in, const float *x, int64_t ldx, int64_t rows, int64_t k,
                        bool int8, bool tiles, void *scratch, struct pool *pool) {
    *in = (struct gemm_input){.rows = rows, .k = k, .ldx = ldx, .x = x};
    if (!int8 && !tiles) return;
    CHECK(!int8 || k % QK == 0);
    size_t at[INPUT_PARTS + 1];
    gemm_input_layout(rows, k, at);
    uint8_t *base = (uint8_t *)align_64((uintptr_t)scratch);
    if (int8) {
        in->q = (int8_t *)(base + at[0]);
        in->d = (float *)(void *)(base + at[1]);
        in->sum = (float *)(void *)(base + at[2]);
        in->q_sum = (int32_t *)(void *)(base + at[3]);
    }
    if (int8 && int8_tile_rows(rows)) {
        in->q_tiles = (int8_t *)(base + at[5]);
        in->d_tiles = (float *)(void *)(base + at[6]);
        if (rows % int8_tile_rows(rows)) int8_tiles_pad(in);
    }
    if (tiles) in->tiles = tiles_in_scratch(rows, k, scratch);
    struct pool *use = rows * k < 8192 ? NULL : pool;
    // Each tile is packed by one thread, because rows of a tile share cache lines.
    if (int8) pool_run(use, quantize_rows_range, in, rows, MAX(int8_tile_rows(rows), 1));
    if (tiles) gemm_input_pack_tiles(in, use);
}

struct gemm_input gemm_input_tiles(int64_t rows, int64_t k, enum row_path path, void *scratch) {
    const struct gemm_input in = {
        .path = path, .rows = rows, .k = k, .ldx = k, .tiles = tiles_in_scratch(rows, k, scratch)};
    gemm_input_pad_tiles(&in);
    return in;
}

struct gemm_input gemm_input_for(const struct matrix *w, int n, const float *x, int64_t rows,
                                 enum row_path path, void *scratch, struct pool *pool) {
    struct gemm_input in;
    bool int8 = false, tiles = false;
    for (int i = 0; i < n; i++) {
        bool uses_tiles = matrix_uses_tiles(&w[i], path);
        tiles |= uses_tiles;
        int8 |= !uses_tiles && matrix_needs_int8(&w[i]);
    }
    gemm_input_prepare(&in, x, w->k, rows, w->k, int8, tiles, scratch, pool);
    in.path = path;
    return in;
}

struct gemm_input gemm_input_rows(const struct gemm_input *in, int64_t begin, int64_t end) {
    struct gemm_input part = *in;
    part.rows = end - begin;
    if (part.x) part.x += begin * part.ldx;
    if (part.q) part.q += begin * part.k;
    if (part.d) part.d += begin * (part.k / QK);
    if (part.sum) part.sum += begin * (part.k / QK);
    if (part.q_sum) part.q_sum += begin * (part.k / QK);
    part.q_tiles = NULL;
    part.d_tiles = NULL;
    part.tiles = part.tiles && begin % 16 == 0 ? gemm_input_tile_row(in, begin) : NULL;
    part.low_rank_row += begin;
    return part;
}

struct gemm_input gemm_input_tile_rows(const struct gemm_input *in, int64_t begin, int64_t end) {
    struct gemm_input part = gemm_input_rows(in, begin / 16 * 16, end);
    part.skip = begin % 16;
    return part;
}

#define SERIAL_OPS 65536 /* with fewer multiply-adds, waking threads takes longer than it saves */

struct pool *matrix_pool_for(struct pool *pool, int64_t rows, int64_t n, int64_t k) {
    return rows * n < SERIAL_OPS / MAX(k, 1) ? NULL : pool;
}

struct gemm_product {
    const struct kernels *kern;
    float *y;
    int64_t ldy, n;
    const struct gemm_input *in;
    const struct matrix *w;
    /* plain f32 products, instead of `in` and `w` */
    const float *x, *rows_w;
    int64_t ldx, ldw, rows, k;
    bool add;
};

/* Outputs of a quantised matrix in panels that remain in the caches between the product and the
 * addition of the minima; all if there are many rows, which read panels less often than inputs. */
static int64_t outputs_at_once(const struct matrix *w, int64_t rows, int64_t n) {
    enum { CACHE_BYTES = 131072, FEW_ROWS = 16 };
    if (!w->mins || rows > FEW_ROWS) return n;
    return MAX(CACHE_BYTES / w->panel_bytes, 1) * PANEL;
}

static void quantized_mul_range(float *y, int64_t ldy, const struct gemm_input *in,
                                const struct matrix *w, int64_t n0, int64_t n1, bool add) {
    const struct kernels *k = kernels_get();
    const int64_t step = outputs_at_once(w, in->rows, n1 - n0);
    for (int64_t n = n0; n < n1; n += step) {
        const int64_t end = MIN(n1, n + step);
        (w->layout < LAYOUT_Q4 ? k->gemm_q8 : k->gemm_q4)(y, ldy, in, w, n, end, add);
        if (w->mins) k->gemm_mins(y, ldy, in, w, n, end);
    }
}

void matrix_mul_range(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                      int64_t n0, int64_t n1, bool add) {
    const struct kernels *k = kernels_get();
    if (matrix_uses_tiles(w, in->path))
        k->gemm_tiles(y, ldy, in, w, n0, n1, add);
    else if (matrix_needs_int8(w))
        quantized_mul_range(y, ldy, in, w, n0, n1, add);
    else if (w->layout == LAYOUT_BF16)
        k->gemm_bf16_fast(y, ldy, in, w, n0, n1, add);
    else
        gemm_nt(rows_dtype(w), y, ldy, in->x, in->ldx, in->rows, w->data, w->k, w->k, n0, n1, add);
}

static void matrix_mul_outputs(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct gemm_product *p = ctx;
    (void)thread;
    matrix_mul_range(p->y, p->ldy, p->in, p->w, begin * PANEL, MIN(end * PANEL, p->n), p->add);
}

static void matrix_mul_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct gemm_product *p = ctx;
    struct gemm_input part = gemm_input_rows(p->in, begin, end);
    (void)thread;
    matrix_mul_range(p->y + begin * p->ldy, p->ldy, &part, p->w, 0, p->n, p->add);
}

void matrix_mul(float *y, int64_t ldy, const struct gemm_input *in, const struct matrix *w,
                bool add, struct pool *pool) {
    struct gemm_product p = {
        .kern = kernels_get(), .y = y, .ldy = ldy, .n = w->n, .in = in, .w = w, .add = add};
    CHECK(in->k == w->k);
    if (matrix_uses_tiles(w, in->path))
        CHECK(in->tiles);
    else
        CHECK((!matrix_needs_int8(w) || (in->q && in->d)) && (!w->mins || in->sum));
    struct pool *use = matrix_pool_for(pool, in->rows, w->n, w->k);
    // With few outputs and many rows (a LoRA's A), threads would be idle unless rows are divided.
    if (panel_count(w->n) < 4 * pool_size(use) && in->rows > w->n)
        pool_run(use, matrix_mul_rows, &p, in->rows, 16);
    else
        pool_run(use, matrix_mul_outputs, &p, panel_count(w->n), 1);
}

static void gemm_outputs(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct gemm_product *p = ctx;
    (void)thread;
    p->kern->gemm_f32(p->y, p->ldy, p->x, p->ldx, p->rows, p->rows_w, p->ldw, p->k, begin, end,
                      p->add);
}

static void gemm_rows(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct gemm_product *p = ctx;
    (void)thread;
    p->kern->gemm_f32(p->y + begin * p->ldy, p->ldy, p->x + begin * p->ldx, p->ldx, end - begin,
                      p->rows_w, p->ldw, p->k, 0, p->n, p->add);
}

void gemm(float *y, int64_t ldy, const float *x, int64_t ldx, int64_t rows, const float *w,
          int64_t ldw, int64_t k, int64_t n, bool add, struct pool *pool) {
    struct gemm_product p = {.kern = kernels_get(),
                             .y = y,
                             .ldy = ldy,
                             .n = n,
                             .x = x,
                             .ldx = ldx,
                             .rows = rows,
                             .rows_w = w,
                             .ldw = ldw,
                             .k = k,
                             .add = add};
    struct pool *use = matrix_pool_for(pool, rows, n, k);
    if (rows >= n)
        pool_run(use, gemm_rows, &p, rows, 8);
    else
        pool_run(use, gemm_outputs, &p, n, 12);
}

struct transpose_job {
    float *dst;
    const float *src;
    int64_t ld_dst, ld_src, rows;
};

static void transpose_range(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct transpose_job *t = ctx;
    (void)thread;
    kernels_get()->transpose(t->dst + begin * t->ld_dst, t->ld_dst, t->src + begin, t->ld_src,
                             t->rows, end - begin);
}

void transpose(float *dst, int64_t ld_dst, const float *src, int64_t ld_src, int64_t rows,
               int64_t cols, struct pool *pool) {
    struct transpose_job t = {
        .dst = dst, .src = src, .ld_dst = ld_dst, .ld_src = ld_src, .rows = rows};
    pool_run(matrix_pool_for(pool, rows, cols, 1), transpose_range, &t, cols, 16);
}
