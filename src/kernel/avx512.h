/*
 * avx512: code that the level files of AVX-512 and above share. Private to src/kernel/avx512*.c,
 * amx*.c and tiles_*.h.
 */
#ifndef SHOAL_KERNEL_AVX512_H
#define SHOAL_KERNEL_AVX512_H

#include <immintrin.h>

#include "kernel/internal.h"

#define INLINE static inline __attribute__((always_inline))

/* gemm_q8 and gemm_q4 of the AMX level for few rows, which wait for memory: two panels side by side.
 * Cores with AMX read two streams of weights faster than one. */
void avx512_gemm_q_two_streams(float *y, int64_t ldy, const struct gemm_input *in,
                               const struct matrix *w, int64_t n0, int64_t n1, bool add);

/* Mask of the first `left` of 16 lanes. */
INLINE __mmask16 lanes_mask(int64_t left) {
    return left >= 16 ? 0xFFFF : (__mmask16)((1u << left) - 1);
}

/* The 16 weights w[i] … w[i + 15] as f32; lanes outside of `mask` are +0 and are not read. `whole`:
 * the mask has all lanes. */
INLINE __m512 weights_load(const void *w, int64_t i, __mmask16 mask, bool whole, enum dtype e) {
    if (e == DTYPE_I8) {
        const int8_t *b = (const int8_t *)w + i;
        __m128i bytes = whole ? _mm_loadu_si128((const __m128i *)(const void *)b)
                              : _mm_maskz_loadu_epi8(mask, b);
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    }
    if (e == DTYPE_BF16 || e == DTYPE_F16) {
        const uint16_t *h = (const uint16_t *)w + i;
        __m256i half = whole ? _mm256_loadu_si256((const __m256i *)(const void *)h)
                             : _mm256_maskz_loadu_epi16(mask, h);
        if (e == DTYPE_F16) return _mm512_cvtph_ps(half);
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    const float *f = (const float *)w + i;
    return whole ? _mm512_loadu_ps(f) : _mm512_maskz_loadu_ps(mask, f);
}

/* 16 f16 values, unsigned bytes and signed bytes as f32. */
INLINE __m512 halves_widen(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
INLINE __m512 bytes_widen(const uint8_t *p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
INLINE __m512 signed_bytes_widen(const uint8_t *p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}

/* The scales (nf4: the scale bytes) and the minima of group i of a record, one lane per output; see
 * struct matrix. */
INLINE __m512 record_scales(const uint8_t *record, int64_t i, enum matrix_layout l) {
    if (l == LAYOUT_NF4) return bytes_widen(record + i / 2 * PANEL);
    if (l == LAYOUT_Q8 || l == LAYOUT_Q4) return halves_widen(record + i * 2 * PANEL);
    const uint8_t *s = record + (4 + i) * PANEL;
    return _mm512_mul_ps(halves_widen(record),
                         l == LAYOUT_Q6 ? signed_bytes_widen(s) : bytes_widen(s));
}
INLINE __m512 record_mins(const uint8_t *record, int64_t i, enum matrix_layout l) {
    if (l == LAYOUT_Q8 || l == LAYOUT_Q4) return halves_widen(record + (4 + i * 2) * PANEL);
    return _mm512_xor_ps(
        _mm512_mul_ps(halves_widen(record + 2 * PANEL), bytes_widen(record + (12 + i) * PANEL)),
        _mm512_set1_ps(-0.0f));
}

/* 2^n for n in -126 … 127; the result for other n is unspecified. */
INLINE __m512 power_of_2(__m512i n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}

/* The exp of internal.h. The min and max instructions return their second operand if an operand is
 * NaN. */
INLINE __m512 lanes_exp(__m512 x) {
    const __m512 magic = _mm512_set1_ps(EXP_MAGIC), one = _mm512_set1_ps(1.0f);
    x = _mm512_max_ps(_mm512_set1_ps(EXP_LO), _mm512_min_ps(_mm512_set1_ps(EXP_HI), x));
    const __m512 t = _mm512_fmadd_ps(x, _mm512_set1_ps(EXP_LOG2E), magic),
                 z = _mm512_sub_ps(t, magic);
    const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(t), _mm512_castps_si512(magic));
    __m512 r = _mm512_fmadd_ps(z, _mm512_set1_ps(-EXP_LN2_HI), x);
    r = _mm512_fmadd_ps(z, _mm512_set1_ps(-EXP_LN2_LO), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(EXP_C6), r, _mm512_set1_ps(EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C2));
    p = _mm512_fmadd_ps(_mm512_fmadd_ps(p, r, one), r, one);
    const __m512i half = _mm512_srai_epi32(n, 1);
    p = _mm512_mul_ps(_mm512_mul_ps(p, power_of_2(half)), power_of_2(_mm512_sub_epi32(n, half)));
    return _mm512_min_ps(_mm512_set1_ps(FLT_MAX), p);
}

/* The formula of silu_mul. */
INLINE __m512 lanes_silu_mul(__m512 gate, __m512 up) {
    const __m512 minus = _mm512_xor_ps(gate, _mm512_set1_ps(-0.0f)),
                 denominator = _mm512_add_ps(_mm512_set1_ps(1.0f), lanes_exp(minus));
    return _mm512_mul_ps(_mm512_div_ps(gate, denominator), up);
}

#endif
