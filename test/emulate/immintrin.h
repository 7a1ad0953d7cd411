/*
 * emulate/immintrin: the AVX-512 instructions that src/kernel uses, in plain C.
 *
 * It precedes the compiler's <immintrin.h> in the include path of test_emulated.c, so that avx512.c
 * and amx*.c, unchanged, run on machines that lack those instructions. Each function is the
 * operation of Intel's manual (Software Developer's Manual, volume 2) on the sixteen lanes: IEEE
 * arithmetic rounded to nearest even, fused multiply-add as fmaf, min and max return their second
 * operand for NaN and for equal zeros. Masked loads and stores access only the memory of their set
 * lanes, which the address sanitizer then checks. Only used intrinsics exist: a new intrinsic in a
 * kernel is a compile error here until it is added. The emulation is not for measuring speed.
 */
#ifndef SHOAL_TEST_EMULATE_IMMINTRIN_H
#define SHOAL_TEST_EMULATE_IMMINTRIN_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t __mmask8;
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;

typedef struct {
    uint8_t b[16];
} __m128i;
typedef struct {
    float f[8];
} __m256;
typedef struct {
    uint16_t h[16];
} __m256i;
typedef struct {
    float f[16];
} __m512;
typedef union {
    int32_t i[16];
    uint32_t u[16];
    uint64_t q[8];
    uint16_t h[32];
    uint8_t b[64];
} __m512i;

/* Not inlined: the kernels are unrolled for registers, and would take a minute to compile with
 * every operation inlined sixteen times. */
#define EMULATED static __attribute__((noinline, unused))
#define EACH_LANE for (int l = 0; l < 16; l++)

/* Every store of a whole vector is recorded: amx.h. */
static void emulated_record_store(const void *p, size_t bytes);

/* moves */

EMULATED __m512 _mm512_set1_ps(float a) {
    __m512 r;
    EACH_LANE r.f[l] = a;
    return r;
}

EMULATED __m512 _mm512_setzero_ps(void) {
    return _mm512_set1_ps(0.0f);
}

EMULATED __m512i _mm512_set1_epi32(int32_t a) {
    __m512i r;
    EACH_LANE r.i[l] = a;
    return r;
}

EMULATED __m512i _mm512_set1_epi8(char a) {
    __m512i r;
    memset(r.b, a, sizeof r.b);
    return r;
}

#define _mm512_setr_epi32(...) ((__m512i){.i = {__VA_ARGS__}})

EMULATED __m512 _mm512_loadu_ps(const void *p) {
    __m512 r;
    memcpy(&r, p, sizeof r);
    return r;
}

EMULATED __m512i _mm512_loadu_si512(const void *p) {
    __m512i r;
    memcpy(&r, p, sizeof r);
    return r;
}

EMULATED __m128i _mm_loadu_si128(const __m128i *p) {
    __m128i r;
    memcpy(&r, p, sizeof r);
    return r;
}

EMULATED __m512i _mm512_broadcast_i32x4(__m128i a) {
    __m512i r;
    for (int l = 0; l < 64; l++) r.b[l] = a.b[l % 16];
    return r;
}

EMULATED void _mm512_storeu_ps(void *p, __m512 a) {
    memcpy(p, &a, sizeof a);
    emulated_record_store(p, sizeof a);
}
EMULATED void _mm512_storeu_si512(void *p, __m512i a) {
    memcpy(p, &a, sizeof a);
    emulated_record_store(p, sizeof a);
}

EMULATED __m512 _mm512_mask_loadu_ps(__m512 src, __mmask16 k, const void *p) {
    EACH_LANE if (k >> l & 1) memcpy(&src.f[l], (const float *)p + l, sizeof(float));
    return src;
}

EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 k, const void *p) {
    return _mm512_mask_loadu_ps(_mm512_setzero_ps(), k, p);
}

EMULATED void _mm512_mask_storeu_ps(void *p, __mmask16 k, __m512 a) {
    EACH_LANE if (k >> l & 1) memcpy((float *)p + l, &a.f[l], sizeof(float));
}

EMULATED __m256i _mm256_loadu_si256(const __m256i *p) {
    __m256i r;
    memcpy(&r, p, sizeof r);
    return r;
}

EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 k, const void *p) {
    __m256i r = {{0}};
    EACH_LANE if (k >> l & 1) memcpy(&r.h[l], (const uint16_t *)p + l, sizeof(uint16_t));
    return r;
}

EMULATED __m128i _mm_maskz_loadu_epi8(__mmask16 k, const void *p) {
    __m128i r = {{0}};
    EACH_LANE if (k >> l & 1) r.b[l] = ((const uint8_t *)p)[l];
    return r;
}

EMULATED __m256 _mm256_maskz_loadu_ps(__mmask8 k, const void *p) {
    __m256 r = {{0}};
    for (int l = 0; l < 8; l++) {
        if (k >> l & 1) memcpy(&r.f[l], (const float *)p + l, sizeof(float));
    }
    return r;
}

EMULATED void _mm256_mask_storeu_ps(void *p, __mmask8 k, __m256 a) {
    for (int l = 0; l < 8; l++) {
        if (k >> l & 1) memcpy((float *)p + l, &a.f[l], sizeof(float));
    }
}

/* reinterpretation and shuffles */

EMULATED __m512 _mm512_castsi512_ps(__m512i a) {
    return _mm512_loadu_ps(&a);
}
EMULATED __m512i _mm512_castps_si512(__m512 a) {
    return _mm512_loadu_si512(&a);
}
EMULATED float _mm512_cvtss_f32(__m512 a) {
    return a.f[0];
}

EMULATED __m256 _mm512_castps512_ps256(__m512 a) {
    __m256 r;
    memcpy(&r, &a, sizeof r);
    return r;
}

EMULATED __m512i _mm512_castsi256_si512(__m256i a) {
    __m512i r;
    memset(&r, 0xA5, sizeof r); // the upper half is undefined
    memcpy(&r, &a, sizeof a);
    return r;
}

EMULATED __m512i _mm512_inserti64x4(__m512i a, __m256i b, int half) {
    memcpy(a.b + 32 * half, &b, sizeof b);
    return a;
}

EMULATED __m512i _mm512_broadcast_i64x4(__m256i a) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(a), a, 1);
}

/* In every 128-bit part: two elements of a, then two of b. */
EMULATED __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int imm) {
    __m512 r;
    EACH_LANE r.f[l] = (l & 2 ? b : a).f[(l & ~3) + (imm >> 2 * (l & 3) & 3)];
    return r;
}

/* Two 128-bit parts of a, then two of b. */
EMULATED __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int imm) {
    __m512 r;
    EACH_LANE r.f[l] = (l & 8 ? b : a).f[4 * (imm >> 2 * (l >> 2) & 3) + (l & 3)];
    return r;
}

/* In every 128-bit part: the lower (upper) elements of a and b in turn. */
#define EMULATE_UNPACK(name, lanes, field, per_part, from)                                         \
    EMULATED __m512i name(__m512i a, __m512i b) {                                                  \
        __m512i r;                                                                                 \
        for (int l = 0; l < (lanes); l++) {                                                        \
            const int part = l / (per_part) * (per_part);                                          \
            r.field[l] = (l % 2 ? b : a).field[part + (from) + l % (per_part) / 2];                \
        }                                                                                          \
        return r;                                                                                  \
    }
EMULATE_UNPACK(_mm512_unpacklo_epi32, 16, u, 4, 0)
EMULATE_UNPACK(_mm512_unpackhi_epi32, 16, u, 4, 2)
EMULATE_UNPACK(_mm512_unpacklo_epi64, 8, q, 2, 0)
EMULATE_UNPACK(_mm512_unpackhi_epi64, 8, q, 2, 1)

EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int imm) {
    return _mm512_castps_si512(
        _mm512_shuffle_f32x4(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), imm));
}

EMULATED __m512i _mm512_permutexvar_epi16(__m512i index, __m512i a) {
    __m512i r;
    for (int l = 0; l < 32; l++) r.h[l] = a.h[index.h[l] & 31];
    return r;
}

EMULATED __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
    __m512i r;
    for (int l = 0; l < 32; l++) r.h[l] = (index.h[l] & 32 ? b.h : a.h)[index.h[l] & 31];
    return r;
}

EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 a) {
    __m512 r;
    EACH_LANE r.f[l] = a.f[index.u[l] & 15];
    return r;
}

/* arithmetic in f32 */

#define EMULATE_PS(name, expression)                                                               \
    EMULATED __m512 name(__m512 a, __m512 b) {                                                     \
        __m512 r;                                                                                  \
        EACH_LANE r.f[l] = (expression);                                                           \
        return r;                                                                                  \
    }
EMULATE_PS(_mm512_add_ps, a.f[l] + b.f[l])
EMULATE_PS(_mm512_sub_ps, a.f[l] - b.f[l])
EMULATE_PS(_mm512_mul_ps, a.f[l] * b.f[l])
EMULATE_PS(_mm512_div_ps, a.f[l] / b.f[l])
EMULATED __m512 _mm512_maskz_mul_ps(__mmask16 k, __m512 a, __m512 b) {
    EACH_LANE a.f[l] = k >> l & 1 ? a.f[l] * b.f[l] : 0;
    return a;
}
EMULATE_PS(_mm512_min_ps, a.f[l] < b.f[l] ? a.f[l] : b.f[l])
EMULATE_PS(_mm512_max_ps, a.f[l] > b.f[l] ? a.f[l] : b.f[l])

EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    EACH_LANE c.f[l] = fmaf(a.f[l], b.f[l], c.f[l]);
    return c;
}

EMULATED __m512 _mm512_fmsub_ps(__m512 a, __m512 b, __m512 c) {
    EACH_LANE c.f[l] = fmaf(a.f[l], b.f[l], -c.f[l]);
    return c;
}

EMULATED __m512 _mm512_sqrt_ps(__m512 a) {
    EACH_LANE a.f[l] = sqrtf(a.f[l]);
    return a;
}

EMULATED __m512 _mm512_mask_max_ps(__m512 src, __mmask16 k, __m512 a, __m512 b) {
    EACH_LANE if (k >> l & 1) src.f[l] = a.f[l] > b.f[l] ? a.f[l] : b.f[l];
    return src;
}

#define _CMP_GT_OQ 0x1E
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    unsigned k = 0;
    if (how != _CMP_GT_OQ) abort();
    EACH_LANE k |= (unsigned)(a.f[l] > b.f[l]) << l;
    return (__mmask16)k;
}

EMULATED __m512 _mm512_mask_add_ps(__m512 src, __mmask16 k, __m512 a, __m512 b) {
    EACH_LANE if (k >> l & 1) src.f[l] = a.f[l] + b.f[l];
    return src;
}

EMULATED __m256 _mm256_set1_ps(float a) {
    __m256 r;
    for (int l = 0; l < 8; l++) r.f[l] = a;
    return r;
}

EMULATED __m256 _mm256_fmadd_ps(__m256 a, __m256 b, __m256 c) {
    __m256 r;
    for (int l = 0; l < 8; l++) r.f[l] = fmaf(a.f[l], b.f[l], c.f[l]);
    return r;
}

EMULATED __m256 _mm256_add_ps(__m256 a, __m256 b) {
    for (int l = 0; l < 8; l++) a.f[l] += b.f[l];
    return a;
}

/* Every int32 is rounded to nearest even, as the conversion in C does. */
EMULATED __m512 _mm512_cvtepi32_ps(__m512i a) {
    __m512 r;
    EACH_LANE r.f[l] = (float)a.i[l];
    return r;
}

EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
    __m512 r;
    EACH_LANE {
        const int exponent = a.h[l] >> 10 & 31, fraction = a.h[l] & 1023;
        const float f = exponent == 0    ? ldexpf((float)fraction, -24)
                        : exponent == 31 ? (fraction ? NAN : INFINITY)
                                         : ldexpf((float)(fraction | 1024), exponent - 25);
        r.f[l] = a.h[l] >> 15 ? -f : f;
    }
    return r;
}

EMULATED float denormal_flush(float f) {
    return fabsf(f) < 0x1p-126f ? copysignf(0.0f, f) : f;
}

/* To nearest even; denormals are zero, NaN becomes quiet. */
EMULATED uint16_t emulated_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if (isnan(f)) return (uint16_t)(u >> 16 | 64);
    if ((u & 0x7F800000u) == 0) return (uint16_t)(u >> 16 & 0x8000u);
    return (uint16_t)((u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

/* b's values are the lower ones. */
EMULATED __m512i _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {
    __m512i r;
    for (int l = 0; l < 32; l++) r.h[l] = emulated_bf16(l < 16 ? b.f[l] : a.f[l - 16]);
    return r;
}

typedef __m512i __m512bh;

/* The odd value of each pair first; denormals are zero. */
EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    EACH_LANE for (int i = 2 * l + 1; i >= 2 * l; i--) {
        const uint32_t bits[2] = {(uint32_t)a.h[i] << 16, (uint32_t)b.h[i] << 16};
        float v[2];
        memcpy(v, bits, sizeof v);
        sum.f[l] = denormal_flush(
            fmaf(denormal_flush(v[0]), denormal_flush(v[1]), denormal_flush(sum.f[l])));
    }
    return sum;
}

/* integers */

#define EMULATE_INT(name, lanes, field, expression)                                                \
    EMULATED __m512i name(__m512i a, __m512i b) {                                                  \
        __m512i r;                                                                                 \
        for (int l = 0; l < (lanes); l++) r.field[l] = (expression);                               \
        return r;                                                                                  \
    }
EMULATE_INT(_mm512_add_epi32, 16, u, a.u[l] + b.u[l])
EMULATE_INT(_mm512_mullo_epi32, 16, u, a.u[l] * b.u[l])
EMULATE_INT(_mm512_sub_epi32, 16, u, a.u[l] - b.u[l])
/* In every 128-bit part: byte b of it from a's, or zero where b's upper bit is set. */
EMULATE_INT(_mm512_shuffle_epi8, 64, b, b.b[l] & 0x80 ? 0 : a.b[(l & ~15) + (b.b[l] & 15)])
EMULATE_INT(_mm512_and_si512, 16, u, a.u[l] & b.u[l])
EMULATE_INT(_mm512_or_si512, 16, u, a.u[l] | b.u[l])
EMULATE_INT(_mm512_xor_si512, 16, u, a.u[l] ^ b.u[l])

EMULATED __mmask32 _mm512_kunpackw(__mmask32 a, __mmask32 b) {
    return a << 16 | (b & 0xFFFF);
}

EMULATED __m256i _mm512_cvtneps_pbh(__m512 a) {
    __m256i r;
    EACH_LANE r.h[l] = emulated_bf16(a.f[l]);
    return r;
}

EMULATED __m512i _mm512_maskz_add_epi32(__mmask16 k, __m512i a, __m512i b) {
    EACH_LANE a.u[l] = k >> l & 1 ? a.u[l] + b.u[l] : 0;
    return a;
}

EMULATED __mmask16 _mm512_cmpgt_epi32_mask(__m512i a, __m512i b) {
    unsigned k = 0;
    EACH_LANE k |= (unsigned)(a.i[l] > b.i[l]) << l;
    return (__mmask16)k;
}

EMULATED __mmask16 _mm512_mask_cmple_epi32_mask(__mmask16 k, __m512i a, __m512i b) {
    return (__mmask16)(k & ~_mm512_cmpgt_epi32_mask(a, b));
}

EMULATED __m512 _mm512_xor_ps(__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

EMULATED __m512i _mm512_slli_epi32(__m512i a, unsigned n) {
    EACH_LANE a.u[l] = n > 31 ? 0 : a.u[l] << n;
    return a;
}

EMULATED __m512i _mm512_srai_epi32(__m512i a, unsigned n) {
    EACH_LANE a.i[l] >>= n > 31 ? 31 : n;
    return a;
}

EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned n) {
    for (int l = 0; l < 32; l++) a.h[l] = n > 15 ? 0 : (uint16_t)(a.h[l] >> n);
    return a;
}

EMULATED __m512i _mm512_setzero_si512(void) {
    return _mm512_set1_epi32(0);
}

/* Values are given from the highest lane down. */
#define _mm512_set_ps(...) lanes_reversed_ps((const float[16]){__VA_ARGS__})
EMULATED __m512 lanes_reversed_ps(const float *v) {
    __m512 r;
    EACH_LANE r.f[l] = v[15 - l];
    return r;
}

#define _mm_setr_epi8(...) ((__m128i){.b = {__VA_ARGS__}})

/* Aligned: the address is a multiple of 64, else the machine raises an exception. */
EMULATED void alignment_require(const void *p) {
    if ((uintptr_t)p % 64 == 0) return;
    fprintf(stderr, "emulated AVX-512: an aligned access to %p\n", p);
    abort();
}
EMULATED __m512 _mm512_load_ps(const void *p) {
    alignment_require(p);
    return _mm512_loadu_ps(p);
}
EMULATED void _mm512_store_si512(void *p, __m512i a) {
    alignment_require(p);
    _mm512_storeu_si512(p, a);
}

EMULATED __m512 _mm512_i32gather_ps(__m512i index, const void *base, int scale) {
    __m512 r;
    EACH_LANE memcpy(&r.f[l], (const char *)base + (int64_t)index.i[l] * scale, sizeof r.f[l]);
    return r;
}

#define _mm512_shuffle_i64x2 _mm512_shuffle_i32x4

EMULATED __m512i _mm512_srli_epi32(__m512i a, unsigned n) {
    __m512i r;
    EACH_LANE r.u[l] = a.u[l] >> n;
    return r;
}

EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
    __m512i r;
    EACH_LANE r.u[l] = a.h[l];
    return r;
}

EMULATED __m512i _mm512_cvtepi8_epi32(__m128i a) {
    __m512i r;
    EACH_LANE r.i[l] = (int8_t)a.b[l];
    return r;
}

EMULATED __m512i _mm512_cvtepi8_epi16(__m256i a) {
    __m512i r;
    for (int l = 0; l < 32; l++) r.h[l] = (uint16_t)(int8_t)(a.h[l / 2] >> 8 * (l % 2));
    return r;
}

EMULATED __m512i _mm512_cvtepu8_epi32(__m128i a) {
    __m512i r;
    EACH_LANE r.u[l] = a.b[l];
    return r;
}

/* VPDPBUSD: four unsigned bytes of a by four signed bytes of b, added to src without saturation. */
EMULATED __m512i _mm512_dpbusd_epi32(__m512i src, __m512i a, __m512i b) {
    for (int j = 0; j < 64; j++) src.u[j / 4] += (uint32_t)((int32_t)a.b[j] * (int8_t)b.b[j]);
    return src;
}

/* VPDPWSSD: two signed words of a by two of b, added to src without saturation. */
EMULATED __m512i _mm512_dpwssd_epi32(__m512i src, __m512i a, __m512i b) {
    for (int j = 0; j < 32; j++)
        src.u[j / 2] += (uint32_t)((int32_t)(int16_t)a.h[j] * (int16_t)b.h[j]);
    return src;
}

/* (a b + 2^14) >> 15 of signed 16-bit lanes. */
EMULATE_INT(_mm512_mulhrs_epi16, 32, h,
            (uint16_t)(((int16_t)a.h[l] * (int16_t)b.h[l] + (1 << 14)) >> 15))

EMULATED __m256i _mm512_cvtepi16_epi8(__m512i a) {
    uint8_t b[32];
    __m256i r;
    for (int l = 0; l < 32; l++) b[l] = (uint8_t)a.h[l];
    memcpy(&r, b, sizeof r);
    return r;
}

EMULATED void _mm256_storeu_si256(__m256i *p, __m256i a) {
    memcpy(p, &a, sizeof a);
}

EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 k, const void *p) {
    __m512i r = _mm512_setzero_si512();
    for (int l = 0; l < 32; l++)
        if (k >> l & 1) memcpy(&r.h[l], (const uint16_t *)p + l, sizeof(uint16_t));
    return r;
}

EMULATED __m512i _mm512_maskz_loadu_epi32(__mmask16 k, const void *p) {
    __m512i r = _mm512_setzero_si512();
    EACH_LANE if (k >> l & 1) memcpy(&r.i[l], (const int32_t *)p + l, sizeof(int32_t));
    return r;
}

EMULATED __m512i _mm512_set1_epi16(short a) {
    __m512i r;
    for (int l = 0; l < 32; l++) r.h[l] = (uint16_t)a;
    return r;
}

EMULATED __m512 _mm512_maskz_mov_ps(__mmask16 k, __m512 a) {
    EACH_LANE if (!(k >> l & 1)) a.f[l] = 0.0f;
    return a;
}

EMULATED __mmask32 _mm512_cmpge_epu16_mask(__m512i a, __m512i b) {
    uint32_t k = 0;
    for (int l = 0; l < 32; l++) k |= (uint32_t)(a.h[l] >= b.h[l]) << l;
    return k;
}

#include "amx.h"

#endif
