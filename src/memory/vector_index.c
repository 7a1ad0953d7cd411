/*
 * vector_index: vectors of unit length, their copies in 8 bits, and an exact search in two passes.
 *
 * A copy is s q with q in -127 .. 127 and s = max |v| / 127, so v = s q + e. For a query u of unit
 * length |u·v - u·(s q)| ≤ |e|, which is stored for each vector: about 0.007 at 384 dimensions. The
 * first pass multiplies the query with all copies, a quarter of the bytes; the second compares the
 * vectors exactly that may still be among the best. No vector is missed, unlike with a graph index.
 */
#define _GNU_SOURCE
#include "kernel/kernel.h"
#include "memory/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 32 };              /* copies are padded with zeros to a multiple */
static const float SLACK = 1e-5F; /* above the rounding errors of a sum of float */

struct vector_index {
    int32_t d, padded;
    int64_t n, cap;
    float *v;     /* [n][d] */
    int8_t *q;    /* [n][padded] */
    float *scale; /* [n] s */
    float *error; /* [n] |e| + SLACK */
};

struct vector_index *vector_index_new(int32_t d) {
    struct vector_index *x = xcalloc(1, sizeof *x);
    CHECK(d > 0);
    *x = (struct vector_index){.d = d, .padded = (d + BLOCK - 1) / BLOCK * BLOCK};
    return x;
}

void vector_index_free(struct vector_index *x) {
    if (!x) return;
    free(x->v);
    free(x->q);
    free(x->scale);
    free(x->error);
    free(x);
}

int64_t vector_index_size(const struct vector_index *x) {
    return x->n;
}

static void vector_index_grow(struct vector_index *x) {
    x->cap = MAX(x->cap + x->cap / 2, 256);
    size_t n = (size_t)x->cap;
    x->v = xrealloc(x->v, n * (size_t)x->d * sizeof *x->v);
    x->q = xrealloc(x->q, n * (size_t)x->padded);
    x->scale = xrealloc(x->scale, n * sizeof *x->scale);
    x->error = xrealloc(x->error, n * sizeof *x->error);
}

/* Writes v / |v|, or zeros for a zero vector; false: NaN or Inf. */
static bool vector_normalize(const float *v, int32_t d, float *out) {
    double sum = 0;
    for (int32_t i = 0; i < d; i++) sum += (double)v[i] * v[i];
    if (!isfinite(sum)) return false;
    double scale = sum > 0 ? 1 / sqrt(sum) : 0;
    for (int32_t i = 0; i < d; i++) out[i] = (float)(v[i] * scale);
    return true;
}

int vector_index_add(struct vector_index *x, const float *v, struct error *err) {
    if (x->n == x->cap) vector_index_grow(x);
    float *u = x->v + x->n * x->d;
    int8_t *q = x->q + x->n * x->padded;
    if (!vector_normalize(v, x->d, u))
        return error_set(err, ERR_NUMERIC, "an embedding has a value that is not a number");
    float max = 0;
    for (int32_t i = 0; i < x->d; i++) max = fmaxf(max, fabsf(u[i]));
    float scale = max / 127;
    double error = 0;
    memset(q, 0, (size_t)x->padded);
    for (int32_t i = 0; i < x->d; i++) {
        q[i] = (int8_t)(scale > 0 ? lrintf(u[i] / scale) : 0);
        double e = (double)u[i] - (double)scale * q[i];
        error += e * e;
    }
    x->scale[x->n] = scale;
    x->error[x->n++] = (float)sqrt(error) + SLACK;
    return OK;
}

void vector_index_scan(const struct vector_index *x, const float *query, float *cosine,
                       float *bound) {
    float *u = xcalloc((size_t)x->padded, sizeof *u);
    if (!vector_normalize(query, x->d, u)) memset(u, 0, (size_t)x->padded * sizeof *u);
    if (x->n)
        kernels_get()->gemm_i8(cosine, x->n, u, x->padded, 1, x->q, x->padded, x->padded, 0, x->n,
                               false);
    for (int64_t i = 0; i < x->n; i++) cosine[i] *= x->scale[i];
    memcpy(bound, x->error, (size_t)x->n * sizeof *bound);
    free(u);
}

double vector_index_cosine(const struct vector_index *x, const float *query, int64_t i) {
    return cosine_similarity(query, x->v + i * x->d, x->d);
}
