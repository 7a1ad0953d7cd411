/*
 * algebra: operators on adapters as matrices ΔW = scale · B A.
 *
 * The factors of a LoRA are defined only up to an invertible R × R matrix M: (B M) (M⁻¹ A) = B A.
 * Averaging the A matrices and the B matrices of two adapters therefore mixes unrelated
 * coordinates. The other operators work on ΔW. They never form ΔW: they use stacked factors, thin
 * QR and Gram matrices, whose size is that of the ranks. Only BLEND_LEGACY averages A and B, for
 * compatibility (docs/COMPATIBILITY.md).
 *
 * Sums over ΔW are in double, in a fixed order, and rounded to float32 once; BLEND_LEGACY, mutation
 * and scaling compute each element in float32. Every operator writes its lineage: the parents'
 * hashes, its own name and its arguments as text.
 */
#include "adapter/adapter.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void lineage_set(json_t *o, const char *key, const char *value) {
    json_object_set_new(o, key, json_string(value));
}

/* Writes the fewest digits that parse as the same float. */
static void lineage_set_float(json_t *o, const char *key, float f) {
    char text[32];
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)f);
        if (strtof(text, NULL) == f) break;
    }
    lineage_set(o, key, text);
}

/* The lineage of a child; `b` may be NULL. */
static json_t *lineage_make(const char *operator, const struct adapter * a,
                            const struct adapter *b) {
    char parents[2 * HASH_LEN];
    snprintf(parents, sizeof parents, "%s%s%s", a->hash, b ? " " : "", b ? b->hash : "");
    json_t *o = json_object();
    lineage_set(o, "operator", operator);
    lineage_set(o, "parents", parents);
    adapter_lineage_set_base(o, (const struct adapter *const[]){a, b}, b ? 2 : 1);
    return o;
}

/* Takes ownership of `data` and `lineage`. The child of `a` and `b` (may be NULL) inherits the
 * hashes of their training data. */
static struct adapter *child_new(const struct adapter *a, const struct adapter *b,
                                 const struct adapter_config *c, float *data, json_t *lineage) {
    struct adapter *out = adapter_from_data(&a->shape, c, data, lineage);
    adapter_add_training_data(out, a->training_data);
    if (b) adapter_add_training_data(out, b->training_data);
    free(data);
    json_decref(lineage);
    return out;
}

static const struct lora *lora_at(const struct adapter *a, int32_t i) {
    CHECK(a->data); // NULL after adapter_pack_only
    return &a->loras[i];
}

static int32_t module_count(const struct adapter *a) {
    return a->shape.n_layers * N_PROJ;
}

/* Writes (1-t) ΔW_a + t ΔW_b of one projection, as factors of rank r, to `data`: A, then B. One
 * parent may lack the projection (r = 0). */
static void module_blend(const struct lora *a, const struct lora *b, float t, int out, int in,
                         int r, float *data) {
    struct arena ar = {0};
    struct lowrank_sum s = lowrank_sum_new(&ar, out, in, a->r + b->r);
    memset(data, 0, (size_t)r * ((size_t)out + in) * sizeof *data);
    lowrank_sum_add(&s, a, 1.0 - t, 0);
    lowrank_sum_add(&s, b, t, a->r);
    struct svd sv = lowrank_sum_svd(&s, &ar);
    svd_write_factors(&sv, r, data, data + (size_t)r * in);
    arena_release(&ar);
}

/* The rank of the child's module i: `requested`, or, if that is 0, the larger rank of the parents.
 * If neither parent has mixed ranks, a parent's rank is that of its config, else that of its module
 * i. */
static int32_t blend_rank(const struct adapter *a, const struct adapter *b, int32_t i,
                          int32_t requested) {
    int32_t ra = lora_at(a, i)->r, rb = lora_at(b, i)->r;
    if (ra == 0 && rb == 0) return 0;
    if (requested > 0) return requested;
    bool mixed = a->config.modules || b->config.modules;
    return mixed ? MAX(ra, rb) : MAX(a->config.r, b->config.r);
}

/* The child has the targets of both parents. Its alpha is r, so its scale is 1, and its factors
 * include the parents' scales. */
static struct adapter *blend_delta(const struct adapter *a, const struct adapter *b, float t,
                                   int32_t r, json_t *lineage) {
    int32_t n = module_count(a);
    struct adapter_module *modules = xcalloc((size_t)n, sizeof *modules);
    struct adapter_config c = {.r = 1, .dropout = a->config.dropout, .modules = modules};
    for (int32_t i = 0; i < n; i++) {
        int32_t ri = blend_rank(a, b, i, r);
        modules[i] = (struct adapter_module){ri, (float)ri};
    }
    float *data = xmalloc(adapter_param_count(&a->shape, &c) * sizeof *data), *dst = data;
    for (int32_t i = 0; i < n; i++) {
        int in = proj_in(&a->shape, i % N_PROJ), out = proj_out(&a->shape, i % N_PROJ);
        if (modules[i].r == 0) continue;
        module_blend(lora_at(a, i), lora_at(b, i), t, out, in, modules[i].r, dst);
        dst += (size_t)modules[i].r * ((size_t)in + out);
    }
    struct adapter *child = child_new(a, b, &c, data, lineage);
    free(modules);
    return child;
}

/* OK if the parents share a module, the ranks of all shared modules are equal, and `r` is 0 or that
 * rank. */
static int legacy_check(const struct adapter *a, const struct adapter *b, int32_t r,
                        struct error *err) {
    int32_t shared = 0;
    for (int32_t i = 0; i < module_count(a); i++) {
        int32_t ra = lora_at(a, i)->r, rb = lora_at(b, i)->r;
        if (ra == 0 || rb == 0) continue;
        shared++;
        if (ra != rb)
            return error_set(err, ERR_MISMATCH,
                             "the parents' ranks differ (%d and %d in '%s'); a blend of tensors "
                             "needs equal ranks "
                             "(blend ΔW instead)",
                             (int)ra, (int)rb, proj_names[i % N_PROJ]);
        if (r != 0 && r != ra)
            return error_set(err, ERR_USAGE,
                             "rank %d requested, but a blend of tensors keeps the parents' rank %d",
                             (int)r, (int)ra);
    }
    return shared > 0 ? OK
                      : error_set(err, ERR_MISMATCH, "the parents have no projection in common");
}

/* Blends the modules that both parents have; the other settings are a's. */
static struct adapter *blend_legacy(const struct adapter *a, const struct adapter *b, float t,
                                    json_t *lineage) {
    int32_t n = module_count(a);
    struct adapter_module *modules = xcalloc((size_t)n, sizeof *modules);
    struct adapter_config c = a->config;
    c.modules = modules;
    for (int32_t i = 0; i < n; i++)
        if (lora_at(b, i)->r > 0)
            modules[i] = adapter_module_at(&a->config, i / N_PROJ, i % N_PROJ);
    float *data = xmalloc(adapter_param_count(&a->shape, &c) * sizeof *data), *dst = data;
    for (int32_t i = 0; i < n; i++) {
        const struct lora *la = lora_at(a, i), *lb = lora_at(b, i);
        size_t in = (size_t)proj_in(&a->shape, i % N_PROJ),
               out = (size_t)proj_out(&a->shape, i % N_PROJ);
        size_t n_a = in * (size_t)modules[i].r, n_b = out * (size_t)modules[i].r;
        for (size_t k = 0; k < n_a; k++) *dst++ = (1 - t) * la->a[k] + t * lb->a[k];
        for (size_t k = 0; k < n_b; k++) *dst++ = (1 - t) * la->b[k] + t * lb->b[k];
    }
    struct adapter *child = child_new(a, b, &c, data, lineage);
    free(modules);
    return child;
}

struct adapter *adapter_blend(const struct adapter *a, const struct adapter *b, float t, int32_t r,
                              enum blend_kind kind, struct error *err) {
    if (adapter_require_plain(a, "blending", err) || adapter_require_plain(b, "blending", err))
        return NULL;
    if (!adapter_fits(a, &b->shape)) {
        error_set(err, ERR_MISMATCH, "the parents belong to models of different shapes");
        return NULL;
    }
    if (!isfinite(t) || r < 0 || r > ADAPTER_RANK_MAX) {
        error_set(err, ERR_USAGE,
                  "cannot blend at %g to rank %d (ranks go from 1 to %d, 0: the parents')",
                  (double)t, (int)r, ADAPTER_RANK_MAX);
        return NULL;
    }
    if (kind == BLEND_LEGACY && legacy_check(a, b, r, err)) return NULL;
    json_t *lineage = lineage_make(kind == BLEND_LEGACY ? "blend-seed" : "blend-delta", a, b);
    lineage_set_float(lineage, "t", t);
    struct adapter *child =
        kind == BLEND_LEGACY ? blend_legacy(a, b, t, lineage) : blend_delta(a, b, t, r, lineage);
    for (size_t i = 0; i < child->n_data; i++) {
        if (isfinite(child->data[i])) continue;
        adapter_release(child);
        error_set(err, ERR_NUMERIC, "the blend at %g overflows", (double)t);
        return NULL;
    }
    return child;
}

struct adapter *adapter_blend_bound(const struct model *m, const struct adapter *a,
                                    const struct adapter *b, float t, int32_t r,
                                    enum blend_kind kind, struct pool *pool, struct error *err) {
    struct adapter *list[] = {(struct adapter *)(uintptr_t)a, (struct adapter *)(uintptr_t)b};
    if (!adapters_have_dora(list, 2)) return adapter_blend(a, b, t, r, kind, err);
    if (r != 0 || kind == BLEND_LEGACY) {
        error_set(err, ERR_USAGE,
                  "a blend with a DoRA adapter is exact and has the sum of the ranks: leave %s out",
                  r ? "--rank" : "--compat");
        return NULL;
    }
    struct adapter *child = adapter_sum(m, list, (const float[]){1 - t, t}, 2, pool, err);
    if (!child) return NULL;
    child->lineage = lineage_make("blend-dora", a, b);
    lineage_set_float(child->lineage, "t", t);
    return child;
}

/* Population standard deviation. */
static double tensor_deviation(const float *w, size_t n) {
    double mean = 0, var = 0;
    for (size_t i = 0; i < n; i++) mean += w[i];
    mean /= (double)n;
    for (size_t i = 0; i < n; i++) var += (w[i] - mean) * (w[i] - mean);
    return sqrt(var / (double)n);
}

/*
 * Mutates one tensor in place. `index`, its position in the model, selects the random stream, so
 * its noise does not depend on the adapter's other modules. Unless `absolute`, a constant tensor,
 * such as the zero B of a new adapter, does not change, because its standard deviation is 0.
 */
static void tensor_mutate(float *w, size_t n, float p, float std, bool absolute, uint64_t seed,
                          uint32_t index) {
    struct rng rng = rng_make(seed, RNG_MUTATE, index, 0);
    if (!(rng_uniform(&rng) < p)) return;
    float s = absolute ? std : (float)(std * tensor_deviation(w, n));
    if (s == 0) return;
    for (size_t i = 0; i < n; i++) w[i] = fmaf(s, rng_normal(&rng), w[i]);
}

static float *data_copy(const struct adapter *a) {
    CHECK(a->data);
    float *data = xmalloc(a->n_data * sizeof *data);
    memcpy(data, a->data, a->n_data * sizeof *data);
    return data;
}

struct adapter *adapter_mutate(const struct adapter *a, float p, float std, bool absolute,
                               uint64_t seed) {
    CHECK(isfinite(p) && isfinite(std) && std >= 0 && !a->magnitude && !a->vocab_overrides);
    float *data = data_copy(a);
    for (int32_t i = 0; i < module_count(a); i++) {
        const struct lora *lo = lora_at(a, i);
        size_t in = (size_t)proj_in(&a->shape, i % N_PROJ),
               out = (size_t)proj_out(&a->shape, i % N_PROJ);
        if (lo->r == 0) continue;
        float *w = data + (lo->a - a->data);
        tensor_mutate(w, in * (size_t)lo->r, p, std, absolute, seed, 2 * (uint32_t)i);
        tensor_mutate(w + in * (size_t)lo->r, out * (size_t)lo->r, p, std, absolute, seed,
                      2 * (uint32_t)i + 1);
    }
    char number[24];
    snprintf(number, sizeof number, "%llu", (unsigned long long)seed);
    json_t *lineage = lineage_make(absolute ? "mutate-absolute" : "mutate-relative", a, NULL);
    lineage_set_float(lineage, "p", p);
    lineage_set_float(lineage, "std", std);
    lineage_set(lineage, "seed", number);
    return child_new(a, NULL, &a->config, data, lineage);
}

/* Scales B and keeps alpha. With s = 0, B becomes 0, as in a new adapter, which can be trained;
 * alpha = 0 could not. */
struct adapter *adapter_scale(const struct adapter *a, float s) {
    CHECK(isfinite(s) && !a->magnitude && !a->vocab_overrides);
    float *data = data_copy(a);
    for (int32_t i = 0; i < module_count(a); i++) {
        const struct lora *lo = lora_at(a, i);
        if (lo->r == 0) continue;
        float *b = data + (lo->b - a->data);
        size_t n = (size_t)lo->r * (size_t)proj_out(&a->shape, i % N_PROJ);
        for (size_t k = 0; k < n; k++) b[k] = s == 0 ? 0 : b[k] * s;
    }
    json_t *lineage = lineage_make("scale", a, NULL);
    lineage_set_float(lineage, "s", s);
    return child_new(a, NULL, &a->config, data, lineage);
}

double adapter_dot(const struct adapter *a, const struct adapter *b) {
    CHECK(adapter_fits(a, &b->shape));
    double sum = 0;
    for (int32_t i = 0; i < module_count(a); i++) {
        int64_t out = proj_out(&a->shape, i % N_PROJ), in = proj_in(&a->shape, i % N_PROJ);
        sum += lora_dot(lora_at(a, i), lora_at(b, i), out, in);
    }
    return sum;
}

/* The argument is a squared norm, but rounding errors in a sum that cancels may make it slightly
 * negative. */
static double sqrt_or_zero(double x) {
    return x > 0 ? sqrt(x) : 0;
}

double adapter_cosine(const struct adapter *a, const struct adapter *b) {
    double norms = sqrt_or_zero(adapter_dot(a, a)) * sqrt_or_zero(adapter_dot(b, b));
    if (norms == 0) return 0;
    double c = adapter_dot(a, b) / norms;
    return MAX(-1.0, MIN(1.0, c));
}

/* Computed from three inner products. Equal adapters have distance exactly 0; distances below about
 * 1e-8 are rounding errors. */
double adapter_distance(const struct adapter *a, const struct adapter *b) {
    double aa = adapter_dot(a, a), bb = adapter_dot(b, b),
           mean = (sqrt_or_zero(aa) + sqrt_or_zero(bb)) / 2;
    return mean == 0 ? 0 : sqrt_or_zero(aa + bb - 2 * adapter_dot(a, b)) / mean;
}
