/*
 * digest: the two hashes that a hub lists: SHA-256 of large files, and git's blob hash of small
 * ones, which is the SHA-1 of "blob SIZE", a zero byte and the content (FIPS 180-4; git's object
 * format).
 *
 * SHA-1, by which git identifies small files, detects damage in them. Against forgery it does not
 * protect; the verified TLS connection does.
 *
 * Invariant: sha1.len counts all bytes added; the last len % 64 of them are in sha1.block.
 */
#include "hub/internal.h"

#include <string.h>

static uint32_t rotl(uint32_t x, int n) {
    return x << n | x >> (32 - n);
}

/* SHA-1 has 20 rounds of each of four kinds. Returns the function of b, c and d of this round's
 * kind, plus its constant. */
static uint32_t sha1_mix(int round, uint32_t b, uint32_t c, uint32_t d) {
    switch (round / 20) {
    case 0:
        return ((b & c) | (~b & d)) + 0x5A827999u;
    case 1:
        return (b ^ c ^ d) + 0x6ED9EBA1u;
    case 2:
        return ((b & c) | (b & d) | (c & d)) + 0x8F1BBCDCu;
    default:
        return (b ^ c ^ d) + 0xCA62C1D6u;
    }
}

static void sha1_block(uint32_t state[5], const uint8_t block[64]) {
    uint32_t w[80];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 80; i++) w[i] = rotl(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
    for (int i = 0; i < 80; i++) {
        uint32_t next = rotl(a, 5) + sha1_mix(i, b, c, d) + e + w[i];
        e = d, d = c, c = rotl(b, 30), b = a, a = next;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e;
}

static void sha1_add(struct hub_digest *d, const uint8_t *p, size_t n) {
    while (n > 0) {
        size_t at = d->sha1.len % 64, take = MIN(n, 64 - at);
        memcpy(d->sha1.block + at, p, take);
        d->sha1.len += take;
        if (at + take == 64) sha1_block(d->sha1.state, d->sha1.block);
        p += take, n -= take;
    }
}

static void sha1_final(struct hub_digest *d, char hex[41]) {
    uint64_t bits = 8 * d->sha1.len;
    static const uint8_t pad[64] = {0x80};
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(bits >> (56 - 8 * i));
    sha1_add(d, pad, 1 + (119 - d->sha1.len % 64) % 64);
    sha1_add(d, length, 8);
    for (int i = 0; i < 5; i++) snprintf(hex + 8 * i, 9, "%08x", (unsigned)d->sha1.state[i]);
}

void hub_digest_init(struct hub_digest *d, const struct hub_file *f) {
    *d = (struct hub_digest){
        .git = strlen(f->hash) == 40,
        .sha1.state = {0x67452301u, 0xEFCDAB89u, 0x98BADCFEu, 0x10325476u, 0xC3D2E1F0u}};
    sha256_init(&d->sha256);
    char head[40];
    int n = snprintf(head, sizeof head, "blob %lld", (long long)f->size);
    if (d->git) sha1_add(d, (uint8_t *)head, (size_t)n + 1); // git's header ends in its NUL
}

void hub_digest_add(struct hub_digest *d, const void *p, size_t n) {
    if (d->git)
        sha1_add(d, p, n);
    else
        sha256_update(&d->sha256, p, n);
}

bool hub_digest_matches(struct hub_digest *d, const struct hub_file *f) {
    char hex[HASH_LEN];
    if (d->git)
        sha1_final(d, hex);
    else
        sha256_final(&d->sha256, hex);
    return strcmp(hex, f->hash) == 0;
}
