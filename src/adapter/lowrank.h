/*
 * lowrank: singular values of what an adapter does to one matrix, and adapters built from them
 * matrix by matrix. This is what operators are made of; blending in algebra.c uses it too.
 *
 * Everything is in double and rounded to float32 once, when a draft is written. Memory is the
 * caller's arena; nothing is shared, so any thread may do anything with its own.
 *
 * Letters: R rank, k = Σ R of what is stacked, n singular values.
 */
#ifndef SHOAL_LOWRANK_H
#define SHOAL_LOWRANK_H

#include "adapter/adapter.h"

/* <ΔW_a, ΔW_b> of one module, out × in; 0 where either has none. */
double lora_dot(const struct lora *a, const struct lora *b, int64_t out, int64_t in);

/* Σ of weighted low-rank maps: left · rightᵀ. */
struct lowrank_sum {
    int out, in, k;
    double *left;  /* [out][k] */
    double *right; /* [in][k] */
};
/* All k columns are to be put. */
struct lowrank_sum lowrank_sum_new(struct arena *ar, int out, int in, int k);
/* Puts w · scale · B and A at columns c0 .. c0 + R. */
void lowrank_sum_put(struct lowrank_sum *s, const struct lora *lo, double w, int c0);

/* u diag(s) vᵀ; columns of u and v are orthonormal, s descends. */
struct svd {
    int out, in, n;
    double *u; /* [out][n] */
    double *s; /* [n] */
    double *v; /* [in][n] */
};
/* Exact: thin QR of both sides, SVD of the small core; n = min(k, out, in). */
struct svd lowrank_sum_svd(const struct lowrank_sum *s, struct arena *ar);
/*
 * Of a dense matrix w [out][in]. Exact when it has no more than r + 8 singular values; else those
 * r + 8 that a random range finder with power iterations holds (Halko, Martinsson and Tropp 2011,
 * algorithm 4.4), its noise the same in every call: of the truncation to rank r, the error is
 * within a few per cent of the best possible also where singular values hardly fall, and equal to
 * it where they do.
 */
struct svd randomized_svd(const float *w, int out, int in, int r, struct arena *ar);
/* The triplet c: √s v to row c of a [r][in], √s u to column c of b [out][r]. */
void svd_put_triplet(const struct svd *sv, int c, int r, float *a, float *b);
/* The first r: A = √S Vᵀ to a [r][in], B = U √S to b [out][r]. What lies beyond n stays as it is.
 * By Eckart and Young the error is the norm of the values left out. */
void svd_write_factors(const struct svd *sv, int r, float *a, float *b);

/* How many of the singular values, the largest first, hold `share` of a whole whose ‖·‖² is total2:
 * 1 to `most`, `most` also where they do not. */
int32_t svd_energy_rank(const struct svd *sv, double total2, double share, int32_t most);

/*
 * An adapter in the making: modules are added in order of layer and projection, each with its own
 * rank and scale 1.
 */
struct adapter_builder {
    const struct model_config *shape; /* borrowed */
    struct adapter_module *modules;   /* [L][N_PROJ] */
    float dropout;
    float *data;
    size_t n, cap;       /* floats */
    double size2, lost2; /* ‖what was meant‖², and of it what the ranks could not hold */
};
struct adapter_builder adapter_builder_init(const struct model_config *shape, float dropout);
/* A [r][in] of the new module i, zeros, with B [out][r] after it; good until the next is added. */
float *adapter_builder_add(struct adapter_builder *d, int32_t i, int32_t r);
/* B of what adapter_builder_add gave. */
float *adapter_builder_b(const struct adapter_builder *d, int32_t i, float *a);
/* Adds w · scale · B A as it is. */
void adapter_builder_add_exact(struct adapter_builder *d, int32_t i, const struct lora *lo, double w);
/* Adds the best rank r; what is left out is counted. `total2` is the whole's ‖·‖². */
void adapter_builder_add_truncated(struct adapter_builder *d, int32_t i, const struct svd *sv, int32_t r,
                    double total2);
/* Relative error, 0 of nothing. */
double adapter_builder_error(const struct adapter_builder *d);
/* The draft is released. NULL: it has no module (an adapter has one at least). Lineage is borrowed
 * (incref'ed). */
struct adapter *adapter_builder_finish(struct adapter_builder *d, json_t *lineage);
void adapter_builder_release(struct adapter_builder *d);

#endif
