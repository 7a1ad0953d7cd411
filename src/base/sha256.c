/*
 * sha256: SHA-256 (FIPS 180-4). libsodium computes it, except that on processors with the SHA
 * extensions the code here compresses whole blocks with these instructions, about six times as
 * fast.
 *
 * Invariant: the state is libsodium's own struct, so that libsodium and the code here can take
 * turns in one message. The code here compresses blocks only when libsodium's buffer is empty.
 */
#include "base/base.h"

#include <sodium.h>
#include <stdatomic.h>

enum { BLOCK = 64 };

_Static_assert(sizeof(crypto_hash_sha256_state) <= sizeof(((struct sha256 *)0)->opaque),
               "hasher too small");
_Static_assert(_Alignof(crypto_hash_sha256_state) <= _Alignof(struct sha256), "hasher misaligned");

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

static const _Alignas(16) uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static bool has_sha_extensions(void) {
    static _Atomic int known; // 0: unknown, 1: no, 2: yes
    unsigned a, b, c, d;
    int v = atomic_load_explicit(&known, memory_order_relaxed);
    if (v == 0) {
        bool sse41 = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1);
        v = sse41 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA) ? 2 : 1;
        atomic_store_explicit(&known, v, memory_order_relaxed);
    }
    return v == 2;
}

/* Compresses n blocks of 64 bytes. The instructions keep the eight words of the state as (a, b, e,
 * f) and (c, d, g, h), highest first. `w` holds the last 16 words of the message schedule. */
__attribute__((target("sha,sse4.1"))) static void blocks_compress(uint32_t state[8],
                                                                  const uint8_t *p, size_t n) {
    const __m128i bytes = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(void *)state), 0xB1),
            high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(void *)(state + 4)), 0x1B),
            abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
    for (; n > 0; n--, p += BLOCK) {
        const __m128i was_abef = abef, was_cdgh = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i)),
                                    bytes);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) { // four rounds each
            __m128i k = _mm_add_epi32(
                w[i % 4], _mm_load_si128((const __m128i *)(const void *)(round_constants + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, k);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(k, 0x0E));
            if (i >= 12) continue;
            const __m128i last = w[(i + 3) % 4], before = w[(i + 2) % 4];
            w[i % 4] = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]),
                                     _mm_alignr_epi8(last, before, 4));
            w[i % 4] = _mm_sha256msg2_epu32(w[i % 4], last);
        }
        abef = _mm_add_epi32(abef, was_abef);
        cdgh = _mm_add_epi32(cdgh, was_cdgh);
    }
    low = _mm_shuffle_epi32(abef, 0x1B);
    high = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(high, low, 8));
}
#else
static bool has_sha_extensions(void) {
    return false;
}

static void blocks_compress(uint32_t state[8], const uint8_t *p, size_t n) {
    (void)state, (void)p, (void)n;
}
#endif

static crypto_hash_sha256_state *libsodium_state(struct sha256 *h) {
    return (crypto_hash_sha256_state *)(void *)h->opaque;
}

void sha256_init(struct sha256 *h) {
    crypto_hash_sha256_init(libsodium_state(h));
}

void sha256_update(struct sha256 *h, const void *p, size_t n) {
    crypto_hash_sha256_state *s = libsodium_state(h);
    const uint8_t *bytes = p;
    size_t buffered = s->count / 8 % BLOCK, fill = buffered ? MIN(BLOCK - buffered, n) : 0;
    if (n < 2 * BLOCK || !has_sha_extensions()) {
        if (n) crypto_hash_sha256_update(s, bytes, n);
        return;
    }
    if (fill) crypto_hash_sha256_update(s, bytes, fill);
    size_t whole = (n - fill) / BLOCK * BLOCK, rest = n - fill - whole;
    blocks_compress(s->state, bytes + fill, whole / BLOCK);
    s->count += 8 * (uint64_t)whole; // in bits
    if (rest) crypto_hash_sha256_update(s, bytes + fill + whole, rest);
}

void sha256_final(struct sha256 *h, char out[HASH_LEN]) {
    uint8_t digest[crypto_hash_sha256_BYTES];
    crypto_hash_sha256_final(libsodium_state(h), digest);
    static const char hex[] = "0123456789abcdef";
    for (size_t i = 0; i < sizeof(digest); i++) {
        out[2 * i] = hex[digest[i] >> 4];
        out[2 * i + 1] = hex[digest[i] & 15];
    }
    out[HASH_LEN - 1] = '\0';
}
