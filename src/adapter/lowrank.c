/*
 * lowrank: low-rank sums, their SVD, and the adapter builder; see adapter.h. Only linalg_qr and
 * matrix products see the large dimensions. The SVD is that of a core matrix whose size is at most
 * the sum of the ranks.
 */
#include "adapter/adapter.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define OVERSAMPLE 8       /* columns of the random range finder beyond the wanted rank */
#define POWER_ITERATIONS 4 /* multiplications by w wᵀ in the range finder */

static double *doubles_alloc(struct arena *ar, int rows, int cols) {
    return arena_alloc(ar, (size_t)rows * (size_t)cols * sizeof(double));
}

/* left [ra][rb] := B_aᵀ B_b, from rows of B. */
static void gram_left(double *left, const struct lora *a, const struct lora *b, int64_t out) {
    memset(left, 0, (size_t)a->r * (size_t)b->r * sizeof *left);
    for (int64_t o = 0; o < out; o++) {
        const float *x = a->b + o * a->r, *y = b->b + o * b->r;
        for (int i = 0; i < a->r; i++)
            for (int j = 0; j < b->r; j++) left[(size_t)i * b->r + j] += (double)x[i] * y[j];
    }
}

/* s [n] := x · y_j for n ≤ ROWS rows y_j of length `len`. The sums are independent, which hides the
 * latency of additions; each sum is in order of k. */
enum { ROWS = 8 };
static void rows_dot(const float *x, const float *y, int n, int64_t len, double *s) {
    const float *row[ROWS];
    double t[ROWS] = {0};
    for (int j = 0; j < ROWS; j++) row[j] = y + MIN(j, n - 1) * len;
    for (int64_t k = 0; k < len; k++)
        for (int j = 0; j < ROWS; j++) t[j] += (double)x[k] * row[j][k];
    memcpy(s, t, (size_t)n * sizeof *s);
}

/* <s_a B_a A_a, s_b B_b A_b> = s_a s_b Σ_ij (B_aᵀ B_b)_ij (A_a A_bᵀ)_ij. */
double lora_dot(const struct lora *a, const struct lora *b, int64_t out, int64_t in) {
    if (a->r == 0 || b->r == 0) return 0;
    double *left = xmalloc((size_t)a->r * (size_t)b->r * sizeof *left), sum = 0;
    gram_left(left, a, b, out);
    for (int i = 0; i < a->r; i++)
        for (int j = 0; j < b->r; j += ROWS) {
            double right[ROWS];
            int n = MIN(ROWS, b->r - j);
            rows_dot(a->a + i * in, b->a + j * in, n, in, right);
            for (int k = 0; k < n; k++) sum += left[(size_t)i * b->r + j + k] * right[k];
        }
    free(left);
    return (double)a->scale * b->scale * sum;
}

struct lowrank_sum lowrank_sum_new(struct arena *ar, int out, int in, int k) {
    return (struct lowrank_sum){.out = out,
                                .in = in,
                                .k = k,
                                .left = doubles_alloc(ar, out, k),
                                .right = doubles_alloc(ar, in, k)};
}

void lowrank_sum_add(struct lowrank_sum *s, const struct lora *lo, double w, int c0) {
    for (int i = 0; i < s->out; i++)
        for (int c = 0; c < lo->r; c++)
            s->left[(size_t)i * s->k + c0 + c] = w * lo->scale * lo->b[(size_t)i * lo->r + c];
    for (int c = 0; c < lo->r; c++)
        for (int j = 0; j < s->in; j++)
            s->right[(size_t)j * s->k + c0 + c] = lo->a[(size_t)c * s->in + j];
}

/* a [m][k] = q [m][p] · r [p][k] with p = min(m, k). If m < k, q is the identity and r is a. */
static void thin_factor(const double *a, int m, int k, double *q, double *r) {
    if (m >= k) {
        linalg_qr(a, m, k, q, r);
        return;
    }
    memcpy(r, a, (size_t)m * k * sizeof *r);
    memset(q, 0, (size_t)m * m * sizeof *q);
    for (int i = 0; i < m; i++) q[(size_t)i * m + i] = 1;
}

/* core [n][n] := r_left [p][k] · r_right [q][k]ᵀ in its upper left corner, zero elsewhere. */
static void core_fill(double *core, int n, const double *rl, int p, const double *rr, int q,
                      int k) {
    memset(core, 0, (size_t)n * n * sizeof *core);
    for (int i = 0; i < p; i++) {
        for (int j = 0; j < q; j++) {
            double sum = 0;
            for (int c = 0; c < k; c++) sum += rl[(size_t)i * k + c] * rr[(size_t)j * k + c];
            core[(size_t)i * n + j] = sum;
        }
    }
}

/* out [m][n] := q [m][p] · basis [p][n], where `basis` is the upper left part of a matrix
 * [stride][stride]. */
static void basis_multiply(const double *q, int m, int p, const double *basis, int stride, int n,
                           double *out) {
    for (int i = 0; i < m; i++) {
        for (int c = 0; c < n; c++) {
            double sum = 0;
            for (int j = 0; j < p; j++) sum += q[(size_t)i * p + j] * basis[(size_t)j * stride + c];
            out[(size_t)i * n + c] = sum;
        }
    }
}

struct svd lowrank_sum_svd(const struct lowrank_sum *s, struct arena *ar) {
    int p = MIN(s->out, s->k), q = MIN(s->in, s->k), n = MAX(p, q);
    struct svd sv = {.out = s->out, .in = s->in, .n = MIN(p, q)};
    struct arena tmp = {0};
    double *ql = doubles_alloc(&tmp, s->out, p), *rl = doubles_alloc(&tmp, p, s->k);
    double *qr = doubles_alloc(&tmp, s->in, q), *rr = doubles_alloc(&tmp, q, s->k);
    double *core = doubles_alloc(&tmp, n, n);
    double *u = doubles_alloc(&tmp, n, n), *v = doubles_alloc(&tmp, n, n);
    sv.u = doubles_alloc(ar, s->out, sv.n);
    sv.v = doubles_alloc(ar, s->in, sv.n);
    sv.s = doubles_alloc(ar, n, 1);
    thin_factor(s->left, s->out, s->k, ql, rl);
    thin_factor(s->right, s->in, s->k, qr, rr);
    core_fill(core, n, rl, p, rr, q, s->k);
    linalg_svd(core, n, u, sv.s, v);
    basis_multiply(ql, s->out, p, u, n, sv.n, sv.u);
    basis_multiply(qr, s->in, q, v, n, sv.n, sv.v);
    arena_release(&tmp);
    return sv;
}

/* y [out][l] := w [out][in] · z [in][l]. */
static void dense_multiply(const float *w, int out, int in, const double *z, int l, double *y) {
    memset(y, 0, (size_t)out * l * sizeof *y);
    for (int i = 0; i < out; i++)
        for (int j = 0; j < in; j++)
            for (int c = 0; c < l; c++)
                y[(size_t)i * l + c] += (double)w[(size_t)i * in + j] * z[(size_t)j * l + c];
}

/* z [in][l] := w [out][in]ᵀ · y [out][l]. */
static void dense_transpose_multiply(const float *w, int out, int in, const double *y, int l,
                                     double *z) {
    memset(z, 0, (size_t)in * l * sizeof *z);
    for (int i = 0; i < out; i++)
        for (int j = 0; j < in; j++)
            for (int c = 0; c < l; c++)
                z[(size_t)j * l + c] += (double)w[(size_t)i * in + j] * y[(size_t)i * l + c];
}

/* Writes q [out][l] with orthonormal columns that span nearly the same space as the l largest left
 * singular vectors of w. */
static void randomized_range_finder(const float *w, int out, int in, int l, double *q) {
    struct rng rng = rng_make(0, RNG_NOISE, (uint32_t)in, (uint32_t)l);
    struct arena tmp = {0};
    double *z = doubles_alloc(&tmp, in, l), *y = doubles_alloc(&tmp, out, l);
    double *t = doubles_alloc(&tmp, in, l), *r = doubles_alloc(&tmp, l, l);
    for (size_t i = 0; i < (size_t)in * (size_t)l; i++) z[i] = rng_normal(&rng);
    for (int round = 0;; round++) {
        dense_multiply(w, out, in, z, l, y);
        linalg_qr(y, out, l, q, r);
        if (round == POWER_ITERATIONS) break;
        dense_transpose_multiply(w, out, in, q, l, t);
        linalg_qr(t, in, l, z, r); /* without it, small singular values are lost to rounding */
    }
    arena_release(&tmp);
}

/* Writes an orthonormal basis of the columns of w to q, which the caller has zeroed. Used instead
 * of randomized_range_finder if l = min(out, in). */
static void range_exact(const float *w, int out, int in, int l, double *q) {
    struct arena tmp = {0};
    double *y = doubles_alloc(&tmp, out, l), *r = doubles_alloc(&tmp, l, l);
    if (out == l) {
        for (int i = 0; i < l; i++) q[(size_t)i * l + i] = 1;
    } else {
        for (size_t i = 0; i < (size_t)out * (size_t)in; i++) y[i] = w[i];
        linalg_qr(y, out, l, q, r);
    }
    arena_release(&tmp);
}

/* w ≈ Q (Qᵀ w), which is a lowrank_sum with left = Q and right = wᵀ Q. */
struct svd randomized_svd(const float *w, int out, int in, int r, struct arena *ar) {
    int l = MIN(r + OVERSAMPLE, MIN(out, in));
    struct arena tmp = {0};
    struct lowrank_sum s = lowrank_sum_new(&tmp, out, in, l);
    if (l < MIN(out, in))
        randomized_range_finder(w, out, in, l, s.left);
    else
        range_exact(w, out, in, l, s.left);
    dense_transpose_multiply(w, out, in, s.left, l, s.right);
    struct svd sv = lowrank_sum_svd(&s, ar);
    arena_release(&tmp);
    return sv;
}

void svd_write_triplet(const struct svd *sv, int c, int r, float *a, float *b) {
    double root = sqrt(sv->s[c]);
    for (int i = 0; i < sv->out; i++)
        b[(size_t)i * r + c] = (float)(sv->u[(size_t)i * sv->n + c] * root);
    for (int j = 0; j < sv->in; j++)
        a[(size_t)c * sv->in + j] = (float)(sv->v[(size_t)j * sv->n + c] * root);
}

void svd_write_factors(const struct svd *sv, int r, float *a, float *b) {
    for (int c = 0; c < MIN(r, sv->n); c++) svd_write_triplet(sv, c, r, a, b);
}

int32_t svd_energy_rank(const struct svd *sv, double total2, double energy, int32_t max_rank) {
    double kept2 = 0;
    for (int32_t c = 0; c < MIN(max_rank, sv->n); c++)
        if ((kept2 += sv->s[c] * sv->s[c]) >= energy * total2) return c + 1;
    return max_rank;
}

struct adapter_builder adapter_builder_init(const struct model_config *shape, float dropout) {
    size_t n = (size_t)shape->n_layers * N_PROJ;
    return (struct adapter_builder){
        .shape = shape, .dropout = dropout, .modules = xcalloc(n, sizeof(struct adapter_module))};
}

float *adapter_builder_add(struct adapter_builder *d, int32_t i, int32_t r) {
    size_t n_new =
        (size_t)r * (size_t)(proj_in(d->shape, i % N_PROJ) + proj_out(d->shape, i % N_PROJ));
    CHECK(r > 0 && d->modules[i].r == 0);
    if (d->n + n_new > d->cap) {
        d->cap = MAX(2 * d->cap, d->n + n_new);
        d->data = xrealloc(d->data, d->cap * sizeof *d->data);
    }
    float *a = d->data + d->n;
    memset(a, 0, n_new * sizeof *a);
    d->n += n_new;
    d->modules[i] = (struct adapter_module){r, (float)r}; /* alpha = r: scale 1 */
    return a;
}

float *adapter_builder_b(const struct adapter_builder *d, int32_t i, float *a) {
    return a + (size_t)d->modules[i].r * (size_t)proj_in(d->shape, i % N_PROJ);
}

void adapter_builder_add_exact(struct adapter_builder *d, int32_t i, const struct lora *lo,
                               double w) {
    float *a = adapter_builder_add(d, i, lo->r), *b = adapter_builder_b(d, i, a);
    size_t n = (size_t)lo->r * (size_t)proj_out(d->shape, i % N_PROJ);
    memcpy(a, lo->a, (size_t)(b - a) * sizeof *a);
    for (size_t k = 0; k < n; k++) b[k] = (float)(w * (double)lo->scale * (double)lo->b[k]);
}

void adapter_builder_add_truncated(struct adapter_builder *d, int32_t i, const struct svd *sv,
                                   int32_t r, double total2) {
    float *a = adapter_builder_add(d, i, r);
    double kept2 = 0;
    for (int c = 0; c < MIN(r, sv->n); c++) kept2 += sv->s[c] * sv->s[c];
    svd_write_factors(sv, r, a, adapter_builder_b(d, i, a));
    d->norm2 += total2;
    d->lost_norm2 += MAX(0, total2 - kept2);
}

double adapter_builder_error(const struct adapter_builder *d) {
    return d->norm2 > 0 ? sqrt(d->lost_norm2 / d->norm2) : 0;
}

void adapter_builder_release(struct adapter_builder *d) {
    free(d->modules);
    free(d->data);
    *d = (struct adapter_builder){0};
}

struct adapter *adapter_builder_finish(struct adapter_builder *d, json_t *lineage) {
    struct adapter_config c = {.r = 1, .dropout = d->dropout, .modules = d->modules};
    struct adapter *a = NULL;
    if (d->n > 0) {
        a = adapter_from_owned_data(d->shape, &c, d->data, lineage);
        d->data = NULL; /* the adapter owns it now */
    }
    adapter_builder_release(d);
    return a;
}
