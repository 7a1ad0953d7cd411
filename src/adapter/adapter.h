/*
 * adapter: LoRA adapters as immutable, reference-counted values named by the hash of their content,
 * their PEFT files, and algebra on ΔW = scale · B A that never forms the full matrix.
 *
 * An adapter belongs to a model shape, not to a model object. Once made it is never changed; every
 * operator returns a new one. Retain/release are atomic; everything else here is pure and may run
 * in any thread.
 */
#ifndef SHOAL_ADAPTER_H
#define SHOAL_ADAPTER_H

#include "model/model.h"

#define ADAPTER_DROPOUT_DEFAULT 0.05
#define ADAPTER_RANK_MAX 4096

/* Rank and alpha of one projection of one layer; r = 0: not adapted. */
struct adapter_module {
    int32_t r;
    float alpha;
};
struct adapter_config {
    int32_t r;
    float alpha, dropout;
    bool target[N_PROJ];
    bool rslora; /* scale = alpha / sqrt(r) instead of alpha / r */
    /* NULL: every target has (r, alpha) in every layer. Else [L][N_PROJ], and it decides instead of
     * `target`: mixed ranks, some layers only. Borrowed: a config copied out of an adapter is good
     * while that adapter lives. */
    const struct adapter_module *modules;
};

struct adapter {
    int refs;
    char hash[HASH_LEN]; /* of config and tensors, not of lineage */
    struct adapter_config config;
    struct model_config shape;
    struct lora
        *loras;    /* [L][N_PROJ]; r = 0 where not targeted. What the engine's segments point at. */
    float *data;   /* all A and B, in layer, projection, A-then-B order */
    size_t n_data; /* floats */
    json_t *lineage; /* object of strings (parents, operator, seed …) or NULL */
};

/* "q_proj,v_proj" or "all-linear" → targets. */
int adapter_targets_parse(const char *list, bool target[N_PROJ], struct error *err);
/* A ~ U(±1/sqrt(in)), B = 0 (PEFT's initialisation), from (seed, RNG_INIT). */
struct adapter *adapter_new(const struct model_config *shape, const struct adapter_config *c,
                            uint64_t seed);
/* Same layout, tensors taken from `data` (copied, n = adapter_floats). Lineage is borrowed
 * (incref'ed). */
struct adapter *adapter_from_data(const struct model_config *shape, const struct adapter_config *c,
                                  const float *data, json_t *lineage);
size_t adapter_floats(const struct model_config *shape, const struct adapter_config *c);
/* ERR_USAGE when no target is a projection of this architecture: there is no such adapter. */
int adapter_config_check(const struct model_config *shape, const struct adapter_config *c,
                         struct error *err);
struct adapter_module adapter_module_at(const struct adapter_config *c, int32_t layer, enum proj p);
bool adapter_fits(const struct adapter *a,
                  const struct model_config *shape); /* layers and projections of equal size */
struct adapter *adapter_retain(struct adapter *a);
void adapter_release(struct adapter *a); /* NULL is fine */

/*
 * PEFT directory: adapter_config.json and adapter_model.safetensors, in the byte-stable form of the
 * reference. Strict: every tensor must map to a projection of `shape` with the right dimensions and
 * every targeted projection must be there; all offenders are listed in one error (ERR_MISMATCH).
 * adapter_model.bin is refused with the conversion to use. F32, F16 and BF16 tensors are read; F32
 * is written. `base` is written as base_model_name_or_path.
 */
struct adapter *adapter_load(const char *dir, const struct model_config *shape, struct error *err);
int adapter_save(const struct adapter *a, const char *dir, const char *base, struct error *err);

/* algebra */

enum blend_kind { BLEND_DELTA, BLEND_SEED };
/* (1-t)·a + t·b. BLEND_DELTA: of ΔW, re-factorised to rank `r` (0: max of the parents') by thin QR
 * of the stacked factors and an SVD of the small core, split as B = U√S, A = √S Vᵀ; exact when r ≥
 * r_a + r_b. BLEND_SEED: A and B separately per tensor, config of a, ranks must be equal (the
 * predecessor's rule). */
struct adapter *adapter_blend(const struct adapter *a, const struct adapter *b, float t, int32_t r,
                              enum blend_kind kind, struct error *err);
/* Each tensor with probability p gets N(0, s) added to each element; s = std × the tensor's own
 * standard deviation, or std itself when `absolute` (the predecessor's rule). */
struct adapter *adapter_mutate(const struct adapter *a, float p, float std, bool absolute,
                               uint64_t seed);
struct adapter *adapter_scale(const struct adapter *a,
                              float s); /* ΔW × s; 0 gives a zero adapter */
/* Inner product <ΔW_a, ΔW_b> summed over layers; norm² is adapter_dot(a, a). In double, through the
 * R×R Gram matrices. */
double adapter_dot(const struct adapter *a, const struct adapter *b);
double adapter_cosine(const struct adapter *a, const struct adapter *b); /* 0 when either is zero */
double adapter_distance(const struct adapter *a,
                        const struct adapter *b); /* ‖ΔW_a - ΔW_b‖ / ((‖a‖+‖b‖)/2) */

/* Thin QR (Householder) of m×n, m ≥ n, row-major, in double: q [m][n], r [n][n]. */
void linalg_qr(const double *a, int m, int n, double *q, double *r);
/* One-sided Jacobi SVD of an n×n matrix: a = u diag(s) vᵀ, s descending, signs fixed (largest |u|
 * entry positive). */
void linalg_svd(const double *a, int n, double *u, double *s, double *v);

#endif
