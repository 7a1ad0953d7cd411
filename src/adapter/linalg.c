/*
 * linalg: the two factorisations that adapter algebra needs, in double, for small matrices.
 *
 * Only linalg_qr sees the large dimension m of an m × n matrix, whose n is about a sum of LoRA
 * ranks; the SVD takes an n × n core. Only +, -, ×, ÷ and sqrt are used, in a fixed order, so the
 * bits are the same on every machine. The matrices are too small for blocking or threads.
 *
 * Invariant: the columns of q, u and v are orthonormal to about n·1e-16, even if the input is
 * rank-deficient or zero. Inputs are finite. linalg_qr squares them, so the absolute values of
 * nonzero entries must be between 1e-150 and 1e150; products of float32 values are.
 */
#include "adapter/adapter.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* w -= beta · v (vᵀ w) for rows k.. and columns c0... v has rows k..m-1; `row` [n] is scratch. */
static void reflector_apply(double *restrict w, int m, int n, int k, int c0, const double *v,
                            double beta, double *restrict row) {
    for (int c = c0; c < n; c++) row[c] = 0;
    for (int i = k; i < m; i++)
        for (int c = c0; c < n; c++) row[c] += v[i] * w[(size_t)i * n + c];
    for (int c = c0; c < n; c++) row[c] *= beta;
    for (int i = k; i < m; i++)
        for (int c = c0; c < n; c++) w[(size_t)i * n + c] -= v[i] * row[c];
}

/* Writes to v the Householder reflector that maps column k of w, from row k on, onto the first
 * axis. Returns beta = 2 / vᵀv; 0 for a zero column. */
static double reflector_make(const double *w, int m, int n, int k, double *v) {
    double norm2 = 0;
    for (int i = k; i < m; i++) {
        v[i] = w[(size_t)i * n + k];
        norm2 += v[i] * v[i];
    }
    if (norm2 == 0) return 0;
    /* Add the norm with the sign of v[k], so that the sum does not cancel. */
    v[k] += v[k] < 0 ? -sqrt(norm2) : sqrt(norm2);
    double vtv = 0;
    for (int i = k; i < m; i++) vtv += v[i] * v[i];
    return 2 / vtv;
}

void linalg_qr(const double *a, int m, int n, double *q, double *r) {
    CHECK(n >= 1 && m >= n);
    size_t mn = (size_t)m * (size_t)n;
    double *w = xmalloc(mn * sizeof *w);
    double *vs = xmalloc(mn * sizeof *vs); /* [n][m]: row k is reflector k */
    double *beta = xmalloc((size_t)n * sizeof *beta), *row = xmalloc((size_t)n * sizeof *row);
    memcpy(w, a, mn * sizeof *w);
    for (int k = 0; k < n; k++) {
        double *v = vs + (size_t)k * m;
        beta[k] = reflector_make(w, m, n, k, v);
        if (beta[k] != 0) reflector_apply(w, m, n, k, k, v, beta[k], row);
    }
    for (int i = 0; i < n; i++)
        for (int c = 0; c < n; c++) r[(size_t)i * n + c] = c < i ? 0 : w[(size_t)i * n + c];
    memset(q, 0, mn * sizeof *q);
    for (int k = 0; k < n; k++) q[(size_t)k * n + k] = 1;
    /* Q = H_0 … H_{n-1} I; column c is untouched by reflector k > c. */
    for (int k = n - 1; k >= 0; k--)
        if (beta[k] != 0) reflector_apply(q, m, n, k, k, vs + (size_t)k * m, beta[k], row);
    /* A non-negative diagonal makes the factorisation of a full-rank matrix unique. */
    for (int k = 0; k < n; k++) {
        if (r[(size_t)k * n + k] >= 0) continue;
        for (int c = k; c < n; c++) r[(size_t)k * n + c] = -r[(size_t)k * n + c];
        for (int i = 0; i < m; i++) q[(size_t)i * n + k] = -q[(size_t)i * n + k];
    }
    free(w);
    free(vs);
    free(beta);
    free(row);
}

#define SVD_SWEEPS                                                                                 \
    60 /* 6 to 12 are typical; the limit ends the loop if rounding errors never settle */
#define SVD_ZERO 1e-140 /* a smaller norm, relative to the largest entry, counts as 0 */

static double rows_dot(const double *x, const double *y, int n) {
    double s = 0;
    for (int i = 0; i < n; i++) s += x[i] * y[i];
    return s;
}

static void rows_rotate(double *x, double *y, int n, double c, double s) {
    for (int i = 0; i < n; i++) {
        double xi = x[i], yi = y[i];
        x[i] = c * xi - s * yi;
        y[i] = s * xi + c * yi;
    }
}

/* Rotates columns i and j of the matrix, which are rows of w, so that they are orthogonal. False if
 * they already are, within `tol`. */
static bool pair_rotate(double *w, double *vt, int n, int i, int j, double tol) {
    double *x = w + (size_t)i * n, *y = w + (size_t)j * n;
    double xx = rows_dot(x, x, n), yy = rows_dot(y, y, n), xy = rows_dot(x, y, n);
    if (fabs(xy) <= tol * (sqrt(xx) * sqrt(yy))) return false;
    double zeta = (yy - xx) / (2 * xy);
    double t = (zeta < 0 ? -1 : 1) / (fabs(zeta) + sqrt(1 + zeta * zeta));
    double c = 1 / sqrt(1 + t * t), s = c * t;
    rows_rotate(x, y, n, c, s);
    rows_rotate(vt + (size_t)i * n, vt + (size_t)j * n, n, c, s);
    return true;
}

/* The power of two that brings the largest entry into [0.5, 1); 0 for a zero matrix. */
static double scale_find(const double *a, size_t n) {
    double max = 0;
    for (size_t i = 0; i < n; i++) max = fabs(a[i]) > max ? fabs(a[i]) : max;
    int e = 0;
    if (max == 0) return 0;
    frexp(max, &e);
    return ldexp(1, MAX(-e, -1000));
}

/* Sets column j of u to a unit vector orthogonal to columns 0..j-1, by orthogonalising the
 * coordinate axis with the smallest projection onto these columns. */
static void column_complete(double *u, int n, int j) {
    int axis = 0;
    double min_cover = INFINITY;
    for (int i = 0; i < n; i++) {
        double cover = rows_dot(u + (size_t)i * n, u + (size_t)i * n, j);
        if (cover < min_cover) min_cover = cover, axis = i;
    }
    for (int i = 0; i < n; i++) u[(size_t)i * n + j] = i == axis;
    for (int pass = 0; pass < 2; pass++) { /* two passes of Gram-Schmidt are enough (Kahan) */
        for (int c = 0; c < j; c++) {
            double dot = 0;
            for (int i = 0; i < n; i++) dot += u[(size_t)i * n + c] * u[(size_t)i * n + j];
            for (int i = 0; i < n; i++) u[(size_t)i * n + j] -= dot * u[(size_t)i * n + c];
        }
    }
    double norm2 = 0;
    for (int i = 0; i < n; i++) norm2 += u[(size_t)i * n + j] * u[(size_t)i * n + j];
    for (int i = 0; i < n; i++) u[(size_t)i * n + j] /= sqrt(norm2);
}

/* Fixes the sign of column j of u and v: the entry of u with the largest absolute value (the first
 * of equals) becomes positive. */
static void column_sign(double *u, double *v, int n, int j) {
    int top = 0;
    for (int i = 1; i < n; i++)
        if (fabs(u[(size_t)i * n + j]) > fabs(u[(size_t)top * n + j])) top = i;
    if (u[(size_t)top * n + j] >= 0) return;
    for (int i = 0; i < n; i++) {
        u[(size_t)i * n + j] = -u[(size_t)i * n + j];
        v[(size_t)i * n + j] = -v[(size_t)i * n + j];
    }
}

/* Fills order[0..n) with indices by descending norm; equal norms stay in index order. */
static void sort_descending(const double *norm, int *order, int n) {
    for (int i = 0; i < n; i++) {
        int pos = i;
        for (; pos > 0 && norm[order[pos - 1]] < norm[i]; pos--) order[pos] = order[pos - 1];
        order[pos] = i;
    }
}

/* Computes u, s and v from the rotated columns (rows of w) and the rotations (rows of vt). */
static void svd_collect(const double *w, const double *vt, int n, double unscale, double *u,
                        double *s, double *v) {
    double *norm = xmalloc((size_t)n * sizeof *norm);
    int *order = xmalloc((size_t)n * sizeof *order);
    for (int i = 0; i < n; i++) {
        norm[i] = sqrt(rows_dot(w + (size_t)i * n, w + (size_t)i * n, n));
        if (norm[i] < SVD_ZERO) norm[i] = 0;
    }
    sort_descending(norm, order, n);
    for (int j = 0; j < n; j++) {
        int from = order[j];
        s[j] = norm[from] * unscale;
        for (int i = 0; i < n; i++) {
            u[(size_t)i * n + j] = norm[from] > 0 ? w[(size_t)from * n + i] / norm[from] : 0;
            v[(size_t)i * n + j] = vt[(size_t)from * n + i];
        }
        if (norm[from] == 0) column_complete(u, n, j);
        column_sign(u, v, n, j);
    }
    free(norm);
    free(order);
}

void linalg_svd(const double *a, int n, double *u, double *s, double *v) {
    CHECK(n >= 1);
    size_t nn = (size_t)n * (size_t)n;
    double *w = xmalloc(nn * sizeof *w), *vt = xcalloc(nn, sizeof *vt);
    double scale = scale_find(a, nn), tol = sqrt(n) * 0x1p-52;
    for (int i = 0; i < n; i++) {
        for (int c = 0; c < n; c++) w[(size_t)c * n + i] = a[(size_t)i * n + c] * scale;
        vt[(size_t)i * n + i] = 1;
    }
    bool rotated = true;
    for (int sweep = 0; sweep < SVD_SWEEPS && rotated; sweep++) {
        rotated = false;
        for (int i = 0; i < n; i++)
            for (int j = i + 1; j < n; j++) rotated |= pair_rotate(w, vt, n, i, j, tol);
    }
    svd_collect(w, vt, n, scale == 0 ? 0 : 1 / scale, u, s, v);
    free(w);
    free(vt);
}
