/*
 * random: the random source of all results, and elementary functions whose bits must not depend on
 * the C library.
 *
 * Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
 * 2011) with the published constants. The elementary functions follow the textbook: they reduce the
 * argument with a constant that is split in parts whose products are exact, then evaluate a Taylor
 * polynomial on the small rest. They are not the fastest: src/kernel has its own versions for
 * vector loops.
 *
 * Invariant: only +, -, *, /, sqrt, floor and fma on doubles, which IEEE 754 defines to the last
 * bit, and no contraction by the compiler (-ffp-contract=off). So equal arguments give equal bits
 * on every machine.
 */
#include "base/base.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MULTIPLIER_0 0xD2511F53u
#define MULTIPLIER_1 0xCD9E8D57u
#define KEY_STEP_0 0x9E3779B9u
#define KEY_STEP_1 0xBB67AE85u
enum { XOR_3 = 0x96 }; /* the truth table of a ^ b ^ c */

static void philox(const uint32_t key[2], const uint32_t ctr[4], uint32_t out[4]) {
    uint32_t k0 = key[0], k1 = key[1];
    uint32_t a = ctr[0], b = ctr[1], c = ctr[2], d = ctr[3];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)MULTIPLIER_0 * a, p1 = (uint64_t)MULTIPLIER_1 * c;
        a = (uint32_t)(p1 >> 32) ^ b ^ k0;
        c = (uint32_t)(p0 >> 32) ^ d ^ k1;
        b = (uint32_t)p1;
        d = (uint32_t)p0;
        k0 += KEY_STEP_0;
        k1 += KEY_STEP_1;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* Key: the seed. Counter: (n, step, id, purpose + 256 * carry of n), where n counts the blocks of
 * four numbers that the stream has used. For one seed Philox is a bijection of the counter, and
 * different arguments give different counters, so two streams never share a counter. */
struct rng rng_make(uint64_t seed, enum rng_purpose purpose, uint32_t id, uint32_t step) {
    CHECK((unsigned)purpose < 256);
    return (struct rng){
        .key = {(uint32_t)seed, (uint32_t)(seed >> 32)},
        .ctr = {0, step, id, (uint32_t)purpose},
    };
}

uint32_t rng_u32(struct rng *r) {
    if (r->have == 0) {
        philox(r->key, r->ctr, r->out);
        if (++r->ctr[0] == 0) r->ctr[3] += 256;
        r->have = 4;
    }
    return r->out[4 - r->have--];
}

void rng_skip(struct rng *r, uint64_t n) {
    CHECK(r->have == 0);
    uint64_t block = r->ctr[0] + n / 4;
    r->ctr[0] = (uint32_t)block;
    r->ctr[3] += 256 * (uint32_t)(block >> 32);
    for (uint64_t i = 0; i < n % 4; i++) rng_u32(r);
}

/* Computes four blocks at once, which is faster than one after another: a single block has to wait
 * for its own multiplications. */
static void philox_four(const uint32_t key[2], const uint32_t ctr[4], uint32_t *out) {
    uint32_t k0 = key[0], k1 = key[1], a[4], b[4], c[4], d[4];
    for (uint32_t i = 0; i < 4; i++) a[i] = ctr[0] + i, b[i] = ctr[1], c[i] = ctr[2], d[i] = ctr[3];
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            uint64_t p0 = (uint64_t)MULTIPLIER_0 * a[i], p1 = (uint64_t)MULTIPLIER_1 * c[i];
            a[i] = (uint32_t)(p1 >> 32) ^ b[i] ^ k0;
            c[i] = (uint32_t)(p0 >> 32) ^ d[i] ^ k1;
            b[i] = (uint32_t)p1;
            d[i] = (uint32_t)p0;
        }
        k0 += KEY_STEP_0;
        k1 += KEY_STEP_1;
    }
    for (int i = 0; i < 4; i++) {
        const uint32_t block[4] = {a[i], b[i], c[i], d[i]};
        memcpy(out + 4 * i, block, sizeof block);
    }
}

#if defined(__x86_64__)
/* Sixteen blocks: four vectors of four counters, each in the low half of 64 bits. The high halves
 * have other bits, which the products ignore. */
__attribute__((target("avx2"))) static void philox_avx2(const uint32_t key[2],
                                                        const uint32_t ctr[4], uint32_t *out) {
    const __m256i m0 = _mm256_set1_epi64x(MULTIPLIER_0), m1 = _mm256_set1_epi64x(MULTIPLIER_1);
    uint32_t k0 = key[0], k1 = key[1];
    __m256i a[4], b[4], c[4], d[4];
    for (int i = 0; i < 4; i++) {
        a[i] = _mm256_add_epi64(_mm256_set1_epi64x((long long)ctr[0] + 4 * i),
                                _mm256_setr_epi64x(0, 1, 2, 3));
        b[i] = _mm256_set1_epi64x(ctr[1]);
        c[i] = _mm256_set1_epi64x(ctr[2]);
        d[i] = _mm256_set1_epi64x(ctr[3]);
    }
    for (int round = 0; round < 10; round++) {
        const __m256i x0 = _mm256_set1_epi64x(k0), x1 = _mm256_set1_epi64x(k1);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m256i p0 = _mm256_mul_epu32(a[i], m0), p1 = _mm256_mul_epu32(c[i], m1);
            a[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), b[i]), x0);
            c[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), d[i]), x1);
            b[i] = p1;
            d[i] = p0;
        }
        k0 += KEY_STEP_0;
        k1 += KEY_STEP_1;
    }
    for (int i = 0; i < 4; i++, out += 16) {
        const __m256i ab = _mm256_blend_epi32(a[i], _mm256_slli_epi64(b[i], 32), 0xAA),
                      cd = _mm256_blend_epi32(c[i], _mm256_slli_epi64(d[i], 32), 0xAA),
                      even = _mm256_unpacklo_epi64(ab, cd), odd = _mm256_unpackhi_epi64(ab, cd);
        _mm256_storeu_si256((__m256i *)(void *)out, _mm256_permute2x128_si256(even, odd, 0x20));
        _mm256_storeu_si256((__m256i *)(void *)(out + 8),
                            _mm256_permute2x128_si256(even, odd, 0x31));
    }
}

/* The same with 32 blocks. */
__attribute__((target("avx512f"))) static void philox_avx512(const uint32_t key[2],
                                                             const uint32_t ctr[4], uint32_t *out) {
    const __m512i m0 = _mm512_set1_epi64(MULTIPLIER_0), m1 = _mm512_set1_epi64(MULTIPLIER_1);
    uint32_t k0 = key[0], k1 = key[1];
    __m512i a[4], b[4], c[4], d[4];
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_add_epi64(_mm512_set1_epi64((long long)ctr[0] + 8 * i),
                                _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
        b[i] = _mm512_set1_epi64(ctr[1]);
        c[i] = _mm512_set1_epi64(ctr[2]);
        d[i] = _mm512_set1_epi64(ctr[3]);
    }
    for (int round = 0; round < 10; round++) {
        const __m512i x0 = _mm512_set1_epi64(k0), x1 = _mm512_set1_epi64(k1);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512i p0 = _mm512_mul_epu32(a[i], m0), p1 = _mm512_mul_epu32(c[i], m1);
            a[i] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), b[i], x0, XOR_3);
            c[i] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), d[i], x1, XOR_3);
            b[i] = p1;
            d[i] = p0;
        }
        k0 += KEY_STEP_0;
        k1 += KEY_STEP_1;
    }
    const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11),
                  second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    for (int i = 0; i < 4; i++, out += 32) {
        const __m512i ab = _mm512_mask_shuffle_epi32(a[i], 0xAAAA, b[i], _MM_PERM_CCAA),
                      cd = _mm512_mask_shuffle_epi32(c[i], 0xAAAA, d[i], _MM_PERM_CCAA);
        _mm512_storeu_si512(out, _mm512_permutex2var_epi64(ab, first, cd));
        _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi64(ab, second, cd));
    }
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2");
}

static bool has_avx512(void) {
    return __builtin_cpu_supports("avx512f");
}
#else
static bool has_avx2(void) {
    return false;
}

static bool has_avx512(void) {
    return false;
}
#define philox_avx2 philox_four
#define philox_avx512 philox_four
#endif

/* Computes groups of `blocks` blocks while at least that many are needed and the counter's lowest
 * word does not overflow. Returns the values computed. */
static size_t blocks_fill(struct rng *r, uint32_t *out, size_t n, uint32_t blocks,
                          void (*compute)(const uint32_t *key, const uint32_t *ctr,
                                          uint32_t *out)) {
    size_t i = 0;
    for (; i + 4 * (size_t)blocks <= n && r->ctr[0] < UINT32_MAX - blocks;
         i += 4 * (size_t)blocks) {
        compute(r->key, r->ctr, out + i);
        r->ctr[0] += blocks;
    }
    return i;
}

void rng_fill(struct rng *r, uint32_t *out, size_t n) {
    size_t i = 0;
    while (i < n && r->have) out[i++] = rng_u32(r);
    if (has_avx512()) i += blocks_fill(r, out + i, n - i, 32, philox_avx512);
    if (has_avx2()) i += blocks_fill(r, out + i, n - i, 16, philox_avx2);
    i += blocks_fill(r, out + i, n - i, 4, philox_four);
    while (i < n) out[i++] = rng_u32(r);
}

uint64_t rng_u64(struct rng *r) {
    uint64_t low = rng_u32(r);
    return low | (uint64_t)rng_u32(r) << 32;
}

/* Lemire's method: the high half of a 32-bit number times n. Products whose low half is below 2^32
 * mod n are rejected, because with them some values would be more frequent. */
uint32_t rng_below(struct rng *r, uint32_t n) {
    CHECK(n > 0);
    uint32_t reject = -n % n;
    uint64_t m;
    do {
        m = (uint64_t)rng_u32(r) * n;
    } while ((uint32_t)m < reject);
    return (uint32_t)(m >> 32);
}

float rng_uniform(struct rng *r) {
    return (float)(rng_u32(r) >> 8) * 0x1p-24f;
}

/* Takes two numbers per value and does not keep Box-Muller's second result, so a stream's position
 * depends only on the number of values taken. */
float rng_normal(struct rng *r) {
    double u = ((double)rng_u32(r) + 1.0) * 0x1p-32; /* (0, 1] */
    double v = (double)rng_u32(r) * 0x1p-32;
    return (float)(sqrt(-2.0 * math_log(u)) * math_cos(6.283185307179586 * v));
}

void rng_shuffle(struct rng *r, uint32_t *v, size_t n) {
    CHECK(n <= UINT32_MAX);
    for (size_t i = n; i > 1; i--) {
        uint32_t j = rng_below(r, (uint32_t)i), t = v[i - 1];
        v[i - 1] = v[j];
        v[j] = t;
    }
}

static double double_from_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static uint64_t double_bits(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

/* The polynomial c[0] + x (c[1] + x (c[2] + ...)) with n coefficients. */
static double horner(const double *c, int n, double x) {
    double y = c[n - 1];
    for (int i = n - 2; i >= 0; i--) y = y * x + c[i];
    return y;
}

/* ln 2 = LN2_HI + LN2_LO; the low 21 bits of LN2_HI are zero, so k * LN2_HI is exact for every
 * exponent k. */
static const double LN2_HI = 0x1.62e42feep-1, LN2_LO = 0x1.a39ef35793c76p-33;

/* e^(x + low), |low| much smaller than |x|; x is clamped to [-708, 708], so that the result is
 * neither infinite nor subnormal. */
static double exp_sum(double x, double low) {
    static const double c[] = {1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,
                               1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                               1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
    if (x != x) return x;
    if (x > 708.0) x = 708.0, low = 0;
    if (x < -708.0) x = -708.0, low = 0;
    double k = floor(x * 1.4426950408889634 + 0.5);
    double hi = x - k * LN2_HI, lo = low - k * LN2_LO;
    double r = hi + lo; /* |r| <= ln2 / 2 */
    lo = (hi - r) + lo; /* plus the rounding error of hi + lo */
    double y = 1.0 + (r + (lo + r * r * horner(c, ARRAY_LEN(c), r)));
    return y * double_from_bits((uint64_t)(1023 + (int64_t)k) << 52);
}

double math_exp(double x) {
    return exp_sum(x, 0.0);
}

/*
 * log x = hi + lo for x > 0 and finite, good to about 2^-60. With x = 2^k m, m in [1/√2, √2), and s
 * = (m-1)/(m+1), |s| < 0.172: log m = 2 atanh s = 2s + 2s (s²/3 + s⁴/5 + ...). 2s is a sum of two
 * doubles; the second comes from the division's remainder.
 */
static double log_sum(double x, double *lo) {
    static const double c[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11, 1.0 / 13,
                               1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23};
    int64_t k = 0;
    if (x < 0x1p-1022) x *= 0x1p54, k = -54;
    uint64_t bits = double_bits(x);
    k += (int64_t)(bits >> 52) - 1023;
    double m = double_from_bits((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);
    if (m > 1.4142135623730951) m *= 0.5, k++;
    double num = m - 1.0, den = m + 1.0; /* num is exact; den may lose one bit, which den_lo has */
    double den_lo = (m - (den - 1.0)) + (1.0 - (den - (den - 1.0)));
    double s = num / den;
    double s_lo = (fma(-s, den, num) - s * den_lo) / den;
    double z = s * s;
    double tail = 2.0 * s_lo + 2.0 * s * (z * horner(c, ARRAY_LEN(c), z));
    /* The rounding error of a + b is exactly (a - sum) + b for k != 0, because |a| > |b|, and 0 for
     * k == 0, because a == 0. */
    double a = (double)k * LN2_HI, b = 2.0 * s;
    double sum = a + b;
    double rest = ((k ? (a - sum) + b : 0.0) + tail) + (double)k * LN2_LO;
    double hi = sum + rest;
    *lo = (sum - hi) + rest;
    return hi;
}

double math_log(double x) {
    if (x != x || x < 0) return NAN;
    if (x == 0) return -INFINITY;
    if (x > 0x1.fffffffffffffp1023) return x;
    double lo, hi = log_sum(x, &lo);
    return hi + lo;
}

double math_pow(double x, double y) {
    if (!(x > 0) || x > 0x1.fffffffffffffp1023 || y != y) return NAN;
    double lo, hi = log_sum(x, &lo);
    double p = y * hi;
    if (!(fabs(p) < 709.0)) return exp_sum(p, 0.0);
    return exp_sum(p, fma(y, hi, -p) + y * lo);
}

/*
 * x = k π/2 + (r + lo), |r| <= π/4. π/2 is the sum of part[0..2] up to 2^-120. The first two parts
 * have 33 bits, so their products with |k| < 2^20 are exact. Returns k mod 4.
 */
static int quarter_reduce(double x, double *r, double *lo) {
    static const double part[3] = {0x1.921fb544p+0, 0x1.0b4611a6p-34, 0x1.3198a2e037073p-69};
    double k = floor(x * 0.6366197723675814 + 0.5);
    double a = x - k * part[0];
    double t = k * part[1];
    double b = a - t;
    double v = b - a;
    double lost = (a - (b - v)) - (t + v);
    double w = lost - k * part[2];
    *r = b + w;
    *lo = (b - *r) + w;
    return (int)((int64_t)k & 3);
}

static double sin_small(double r, double lo) {
    static const double c[] = {
        -1.0 / 6,        1.0 / 120,        -1.0 / 5040,          1.0 / 362880,
        -1.0 / 39916800, 1.0 / 6227020800, -1.0 / 1307674368000, 1.0 / 355687428096000};
    double z = r * r;
    return r + (lo * (1.0 - 0.5 * z) + r * z * horner(c, ARRAY_LEN(c), z));
}

static double cos_small(double r, double lo) {
    static const double c[] = {
        1.0 / 24,        -1.0 / 720,         1.0 / 40320,          -1.0 / 3628800,
        1.0 / 479001600, -1.0 / 87178291200, 1.0 / 20922789888000, -1.0 / 6402373705728000};
    double z = r * r, h = 0.5 * z, w = 1.0 - h;
    return w + (((1.0 - w) - h) + (z * z * horner(c, ARRAY_LEN(c), z) - r * lo));
}

/* sin(x + shift π/2). Quadrant 0: sin, 1: cos, 2: -sin, 3: -cos of the reduced argument. NaN from
 * |x| = 2^40 on: quarter_reduce is exact to |k| = 2^20 only, and just below 2^40 the absolute error
 * is already about 1e-4. */
static double sin_quadrant(double x, int shift) {
    if (!(fabs(x) < 0x1p40)) return NAN;
    double r, lo;
    int q = (quarter_reduce(x, &r, &lo) + shift) & 3;
    double y = q & 1 ? cos_small(r, lo) : sin_small(r, lo);
    return q & 2 ? -y : y;
}

double math_sin(double x) {
    return sin_quadrant(x, 0);
}

double math_cos(double x) {
    return sin_quadrant(x, 1);
}
