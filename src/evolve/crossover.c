/*
 * crossover: operators that weight, select or interpolate whole modules of their parents.
 *
 * Nearly all of them compute one coefficient for each parent in each module. The coefficients are
 * given, random, or computed from the angles between the parents' ΔW. operator_weighted_sum then
 * computes the exact weighted sum and its best rank-R approximation. Operators on the elements of
 * ΔW are in merge.c.
 */
#include "evolve/evolve.h"
#include "evolve/select.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool has_module(const struct adapter *a, int32_t i) {
    return a->loras[i].r > 0;
}

static double *coefs_alloc(const struct operands *x) {
    return xcalloc((size_t)operand_modules(x) * (size_t)x->n_parents, sizeof(double));
}

/* operator_weighted_sum; takes ownership of `coef`. */
static struct adapter *weighted_sum_free_coefs(const struct operands *x, double *coef,
                                               json_t *lineage, struct error *err) {
    struct adapter *child = operator_weighted_sum(x, coef, lineage, err);
    free(coef);
    return child;
}

/* The weighted sum with the same n coefficients w in all modules. */
static struct adapter *weighted_sum_uniform(const struct operands *x, const double *w,
                                            json_t *lineage, struct error *err) {
    double *coef = coefs_alloc(x);
    for (int32_t i = 0; i < operand_modules(x); i++)
        memcpy(coef + (size_t)i * (size_t)x->n_parents, w, (size_t)x->n_parents * sizeof *w);
    return weighted_sum_free_coefs(x, coef, lineage, err);
}

/* The blend of option `--compat legacy`, with the lineage that operators record. */
static struct adapter *make_factor_blend(const struct operands *x, json_t *lineage,
                                         struct error *err) {
    struct adapter *child = adapter_blend(x->parents[0], x->parents[1], (float)operand_weight(x, 1),
                                          x->rank, BLEND_LEGACY, err);
    return operator_set_lineage(child, lineage);
}

static struct adapter *make_delta(const struct operands *x, json_t *lineage, struct error *err) {
    double w[OPERATOR_PARENTS_MAX];
    for (int p = 0; p < x->n_parents; p++) w[p] = operand_weight(x, p);
    return weighted_sum_uniform(x, w, lineage, err);
}

/* Weights are fitness. If one is negative, the lowest is subtracted from all, so that a worse
 * parent never has a larger share; equal weights give equal shares. */
static struct adapter *make_ratio(const struct operands *x, json_t *lineage, struct error *err) {
    double w[OPERATOR_PARENTS_MAX], low = 0, sum = 0;
    for (int p = 0; p < x->n_parents; p++) low = MIN(low, operand_weight(x, p));
    for (int p = 0; p < x->n_parents; p++) sum += w[p] = operand_weight(x, p) - low;
    for (int p = 0; p < x->n_parents; p++) w[p] = sum > 0 ? w[p] / sum : 1.0 / x->n_parents;
    return weighted_sum_uniform(x, w, lineage, err);
}

/* a + step · (a - b): beyond a, away from b. */
static struct adapter *make_extrapolate(const struct operands *x, json_t *lineage,
                                        struct error *err) {
    double w[2] = {1 + (double)x->step, -(double)x->step};
    return weighted_sum_uniform(x, w, lineage, err);
}

/* Bisects math_cos, because acos of libm gives different bits on different machines. */
static double arc_cosine(double c) {
    double low = 0, high = 3.14159265358979323846;
    for (int i = 0; i < 60; i++) {
        double mid = (low + high) / 2;
        if (math_cos(mid) > c)
            low = mid;
        else
            high = mid;
    }
    return (low + high) / 2;
}

/* Above this |cosine|, slerp interpolates linearly: parallel directions give a straight line up to
 * rounding, and opposite directions define no plane. */
#define PARALLEL 0.999999

/* Coefficients of a and b at t along the arc between their directions; norms are interpolated
 * linearly. */
static void slerp_coefs(double aa, double bb, double ab, double t, double w[2]) {
    double na = aa > 0 ? sqrt(aa) : 0, nb = bb > 0 ? sqrt(bb) : 0;
    double c = na > 0 && nb > 0 ? ab / (na * nb) : 1;
    w[0] = 1 - t;
    w[1] = t;
    if (fabs(c) > PARALLEL) return;
    double theta = arc_cosine(c), size = (1 - t) * na + t * nb;
    w[0] = math_sin((1 - t) * theta) / math_sin(theta) * size / na;
    w[1] = math_sin(t * theta) / math_sin(theta) * size / nb;
}

/* g [n][n]: the inner products <ΔW_a, ΔW_b> of all pairs of parents in module i. */
static void module_gram(const struct operands *x, int32_t i, double *g) {
    const struct model_config *shape = &x->parents[0]->shape;
    int64_t in = proj_in(shape, i % N_PROJ), out = proj_out(shape, i % N_PROJ);
    for (int a = 0; a < x->n_parents; a++)
        for (int b = 0; b <= a; b++)
            g[a * x->n_parents + b] = g[b * x->n_parents + a] =
                lora_dot(&x->parents[b]->loras[i], &x->parents[a]->loras[i], out, in);
}

static void module_slerp(const struct operands *x, int32_t i, double t, double w[2]) {
    double g[4];
    module_gram(x, i, g);
    slerp_coefs(g[0], g[3], g[1], t, w);
}

/* *share: the second weight divided by the sum of the two weights. ERR_USAGE if the sum is 0. */
static int second_parent_share(const struct operands *x, double *share, struct error *err) {
    double a = operand_weight(x, 0), b = operand_weight(x, 1);
    if (a + b == 0) return error_set(err, ERR_USAGE, "weights %g and %g cancel", a, b);
    *share = b / (a + b);
    return OK;
}

static struct adapter *make_slerp(const struct operands *x, json_t *lineage, struct error *err) {
    double t;
    if (second_parent_share(x, &t, err) != OK) return NULL;
    double *coef = coefs_alloc(x);
    for (int32_t i = 0; i < operand_modules(x); i++) module_slerp(x, i, t, coef + 2 * i);
    return weighted_sum_free_coefs(x, coef, lineage, err);
}

/* Replaces the inner products g [n][n] by cosines (0 for a zero ΔW), and sets norm [n]. */
static void gram_normalise(double *g, int n, double *norm) {
    for (int k = 0; k < n; k++) norm[k] = g[k * n + k] > 0 ? sqrt(g[k * n + k]) : 0;
    for (int k = 0; k < n; k++)
        for (int j = 0; j < n; j++)
            g[k * n + j] = norm[k] > 0 && norm[j] > 0 ? g[k * n + j] / (norm[k] * norm[j]) : 0;
}

/* ‖Σ c u‖ from the inner products g of the u. */
static double combination_norm(const double *g, const double *c, int n) {
    double sum = 0;
    for (int k = 0; k < n; k++)
        for (int j = 0; j < n; j++) sum += c[k] * c[j] * g[k * n + j];
    return sqrt(MAX(0, sum));
}

static void vector_scale(double *c, int n, double factor) {
    for (int k = 0; k < n; k++) c[k] *= factor;
}

/* A length that is computed from inner products has half of their digits. */
#define SPHERE_EPSILON 1e-7
#define SPHERE_MAX_STEPS 1000

/* Sets `to` to the coefficients of Σ share · log_m(u) with m = Σ c u: the weighted sum of the
 * tangent vectors at m towards the unit vectors u. A vector opposite to m has no tangent vector and
 * is skipped. */
static void sphere_tangent_sum(const double *g, const double *share, const double *c, int n,
                               double *to) {
    memset(to, 0, (size_t)n * sizeof *to);
    for (int k = 0; k < n; k++) {
        double d = 0;
        for (int j = 0; j < n; j++) d += c[j] * g[k * n + j];
        double sine = sqrt(MAX(0, 1 - d * d));
        if (share[k] == 0 || sine < SPHERE_EPSILON) continue;
        double w = share[k] * arc_cosine(d) / sine;
        to[k] += w;
        for (int j = 0; j < n; j++) to[j] -= w * d * c[j];
    }
}

/*
 * Sets c to the coefficients of the Riemannian mean on the sphere (Karcher 1977) of unit vectors
 * with inner products g [n][n]. At the mean the weighted tangent vectors sum to 0. Takes gradient
 * steps from the normalised weighted mean or, if the weighted mean is 0, from the first vector with
 * a share. False: no convergence, which is possible with shares below 0.
 */
static bool karcher_mean(const double *g, const double *share, int n, double *c) {
    int first = 0;
    while (first < n - 1 && share[first] == 0) first++;
    memcpy(c, share, (size_t)n * sizeof *c);
    if (combination_norm(g, c, n) < SPHERE_EPSILON)
        for (int k = 0; k < n; k++) c[k] = k == first;
    for (int round = 0; round < SPHERE_MAX_STEPS; round++) {
        double tangent[OPERATOR_PARENTS_MAX];
        vector_scale(c, n, 1 / combination_norm(g, c, n));
        sphere_tangent_sum(g, share, c, n, tangent);
        double distance = combination_norm(g, tangent, n);
        if (distance < SPHERE_EPSILON) return true;
        for (int k = 0; k < n; k++)
            c[k] = math_cos(distance) * c[k] + math_sin(distance) / distance * tangent[k];
    }
    return false;
}

/* Generalises slerp to n parents: coefficients of the mean direction with the mean norm of the
 * parents. */
static int module_karcher(const struct operands *x, int32_t i, const double *share, double *coef,
                          struct error *err) {
    double g[OPERATOR_PARENTS_MAX * OPERATOR_PARENTS_MAX], norm[OPERATOR_PARENTS_MAX];
    double direction_share[OPERATOR_PARENTS_MAX], sum = 0, size = 0;
    module_gram(x, i, g);
    gram_normalise(g, x->n_parents, norm);
    for (int p = 0; p < x->n_parents; p++) {
        direction_share[p] = norm[p] > 0 ? share[p] : 0;
        sum += direction_share[p];
        size += share[p] * norm[p];
    }
    if (sum == 0) return OK; /* no parent has a direction, or the shares cancel */
    vector_scale(direction_share, x->n_parents, 1 / sum);
    if (!karcher_mean(g, direction_share, x->n_parents, coef))
        return error_set(err, ERR_NUMERIC,
                         "the spherical mean of '%s' does not converge; use weights that differ "
                         "less, none below 0",
                         proj_names[i % N_PROJ]);
    for (int p = 0; p < x->n_parents; p++) coef[p] = norm[p] > 0 ? coef[p] * size / norm[p] : 0;
    return OK;
}

static struct adapter *make_karcher(const struct operands *x, json_t *lineage, struct error *err) {
    double share[OPERATOR_PARENTS_MAX], sum = 0;
    for (int p = 0; p < x->n_parents; p++) sum += share[p] = operand_weight(x, p);
    if (sum == 0) {
        error_set(err, ERR_USAGE, "the weights cancel");
        return NULL;
    }
    vector_scale(share, x->n_parents, 1 / sum);
    double *coef = coefs_alloc(x);
    for (int32_t i = 0; i < operand_modules(x); i++) {
        if (module_karcher(x, i, share, coef + (size_t)i * (size_t)x->n_parents, err) == OK)
            continue;
        free(coef);
        return NULL;
    }
    return weighted_sum_free_coefs(x, coef, lineage, err);
}

/*
 * Model Stock (Jang, Yun and Han 2024): the parents' mean, moved towards the base model (no ΔW) by
 * t = N cosθ / (1 + (N - 1) cosθ), where cosθ is the mean over the pairs of parents, as in
 * mergekit. If cosθ is below 0, the paper's triangle does not exist, and the result is the base
 * model.
 */
static void module_stock(const struct operands *x, int32_t i, double *coef) {
    double g[OPERATOR_PARENTS_MAX * OPERATOR_PARENTS_MAX], norm[OPERATOR_PARENTS_MAX], c = 0;
    int n = x->n_parents;
    module_gram(x, i, g);
    gram_normalise(g, n, norm);
    for (int a = 0; a < n; a++)
        for (int b = 0; b < a; b++)
            c += g[a * n + b] * (operand_weight(x, a) * operand_weight(x, b) < 0 ? -1 : 1);
    c = MAX(0, c / (n * (n - 1) / 2.0));
    for (int p = 0; p < n; p++) coef[p] = operand_weight(x, p) * n * c / (1 + (n - 1) * c);
}

static struct adapter *make_stock(const struct operands *x, json_t *lineage, struct error *err) {
    double *coef = coefs_alloc(x);
    for (int32_t i = 0; i < operand_modules(x); i++)
        module_stock(x, i, coef + (size_t)i * (size_t)x->n_parents);
    return weighted_sum_free_coefs(x, coef, lineage, err);
}

/* Samples one of the eligible parents in proportion to its weight. A negative weight counts as 0.
 * If all weights are 0, samples uniformly. */
static int sample_parent(const struct operands *x, const bool *eligible, struct rng *rng) {
    double w[OPERATOR_PARENTS_MAX], sum = 0;
    for (int p = 0; p < x->n_parents; p++)
        sum += w[p] = eligible[p] ? MAX(0, operand_weight(x, p)) : 0;
    bool uniform = sum == 0;
    for (int p = 0; uniform && p < x->n_parents; p++) sum += w[p] = eligible[p];
    return select_roulette_wheel(w, sum, x->n_parents, rng);
}

/* Copies modules [begin, begin + n) from one parent, sampled among the parents that have any of
 * these modules. */
static void choose_group_parent(const struct operands *x, int32_t begin, int32_t n, double *coef) {
    struct rng rng = rng_make(x->seed, RNG_MUTATE, (uint32_t)begin, 1);
    bool eligible[OPERATOR_PARENTS_MAX] = {false};
    for (int p = 0; p < x->n_parents; p++)
        for (int32_t i = begin; i < begin + n; i++) eligible[p] |= has_module(x->parents[p], i);
    int parent = sample_parent(x, eligible, &rng);
    for (int32_t i = begin; i < begin + n; i++) coef[i * x->n_parents + parent] = 1;
}

static struct adapter *uniform_crossover(const struct operands *x, int32_t n, json_t *lineage,
                                         struct error *err) {
    double *coef = coefs_alloc(x);
    for (int32_t i = 0; i < operand_modules(x); i += n) choose_group_parent(x, i, n, coef);
    return weighted_sum_free_coefs(x, coef, lineage, err);
}

static struct adapter *make_layer(const struct operands *x, json_t *lineage, struct error *err) {
    return uniform_crossover(x, N_PROJ, lineage, err);
}

static struct adapter *make_module(const struct operands *x, json_t *lineage, struct error *err) {
    return uniform_crossover(x, 1, lineage, err);
}

/*
 * Picks a random point in the flat order of the modules that either parent has. Modules before the
 * point have the given shares, modules after it the swapped shares. Without weights the shares are
 * 1 for a and 0 for b, because equal shares would have no effect. Within a window of `step` times
 * the number of modules around the point, the shares change linearly.
 */
static struct adapter *single_point_crossover(const struct operands *x, bool arc, json_t *lineage,
                                              struct error *err) {
    double t = 0, index = 0, n = 0;
    if (x->weights && second_parent_share(x, &t, err) != OK) return NULL;
    for (int32_t i = 0; i < operand_modules(x); i++)
        n += has_module(x->parents[0], i) || has_module(x->parents[1], i);
    struct rng rng = rng_make(x->seed, RNG_MUTATE, 0, 2);
    double point = 1 + rng_below(&rng, (uint32_t)MAX(1, n - 1)), half = (double)x->step * n / 2;
    if (!x->weights) json_object_set_new(lineage, "weights", json_string("1 0"));
    json_object_set_new(lineage, "split", json_sprintf("%g of %g", point, n));
    double *coef = coefs_alloc(x);
    for (int32_t i = 0; i < operand_modules(x); i++) {
        if (!has_module(x->parents[0], i) && !has_module(x->parents[1], i)) continue;
        double distance = index++ + 0.5 - point, swapped = distance > 0 ? 1 : 0;
        if (half > 0) swapped = MIN(1, MAX(0, 0.5 + distance / (2 * half)));
        double share = t + (1 - 2 * t) * swapped;
        coef[2 * i] = 1 - share;
        coef[2 * i + 1] = share;
        if (arc) module_slerp(x, i, share, coef + 2 * i);
    }
    return weighted_sum_free_coefs(x, coef, lineage, err);
}

static struct adapter *make_split(const struct operands *x, json_t *lineage, struct error *err) {
    return single_point_crossover(x, true, lineage, err);
}

static struct adapter *make_split_linear(const struct operands *x, json_t *lineage,
                                         struct error *err) {
    return single_point_crossover(x, false, lineage, err);
}

/* For each rank c of the child, copies the c-th largest singular triplet of one parent, sampled by
 * weight among the parents with more than c triplets. */
static void choose_triplets(const struct operands *x, const struct svd *sv, int32_t i,
                            struct adapter_builder *d) {
    struct rng rng = rng_make(x->seed, RNG_MUTATE, (uint32_t)i, 3);
    int max_rank = 0;
    for (int p = 0; p < x->n_parents; p++) max_rank = MAX(max_rank, sv[p].n);
    int32_t r = operand_rank(x, i, max_rank);
    float *a = adapter_builder_add(d, i, r), *b = adapter_builder_b(d, i, a);
    for (int32_t c = 0; c < r; c++) {
        bool eligible[OPERATOR_PARENTS_MAX] = {false};
        for (int p = 0; p < x->n_parents; p++) eligible[p] = c < sv[p].n;
        svd_write_triplet(&sv[sample_parent(x, eligible, &rng)], c, r, a, b);
    }
}

static struct adapter *make_svd(const struct operands *x, json_t *lineage, struct error *err) {
    const struct model_config *shape = &x->parents[0]->shape;
    struct adapter_builder d = adapter_builder_init(shape, x->parents[0]->config.dropout);
    for (int32_t i = 0; i < operand_modules(x); i++) {
        struct svd sv[OPERATOR_PARENTS_MAX];
        struct arena ar = {0};
        int in = proj_in(shape, i % N_PROJ), out = proj_out(shape, i % N_PROJ), is_adapted = 0;
        for (int p = 0; p < x->n_parents; p++) {
            const struct lora *lo = &x->parents[p]->loras[i];
            sv[p] = (struct svd){.out = out, .in = in};
            if (lo->r == 0) continue;
            struct lowrank_sum s = lowrank_sum_new(&ar, out, in, lo->r);
            lowrank_sum_add(&s, lo, 1, 0);
            sv[p] = lowrank_sum_svd(&s, &ar);
            is_adapted = 1;
        }
        if (is_adapted) choose_triplets(x, sv, i, &d);
        arena_release(&ar);
    }
    return operator_finish(&d, lineage, err);
}

#define MANY 2, OPERATOR_PARENTS_MAX
#define TWO 2, 2
#define NO_STEP NULL, 0, 0, 0
const struct adapter_operator crossover_operators[] = {
    {"delta", "the weighted sum of ΔW (task arithmetic)", OPERATOR_CROSSOVER, WEIGHTING_DELTA, MANY,
     NO_STEP, make_delta, OPERAND_WEIGHTS | OPERAND_RANK},
    {"factor_blend", "A with A and B with B, by the second parent's weight (as --compat legacy)",
     OPERATOR_CROSSOVER, WEIGHTING_FACTORS, TWO, NO_STEP, make_factor_blend, OPERAND_WEIGHTS},
    {"ratio", "the sum of ΔW in the ratio of weights that are fitness", OPERATOR_CROSSOVER,
     WEIGHTING_FITNESS, MANY, NO_STEP, make_ratio, OPERAND_WEIGHTS | OPERAND_RANK},
    {"extrapolate", "beyond the first parent, away from the second", OPERATOR_CROSSOVER,
     WEIGHTING_NONE, TWO, "fraction of their distance", 0.3f, -2, 2, make_extrapolate,
     OPERAND_RANK},
    {"slerp", "ΔW along the arc between the parents, module by module", OPERATOR_CROSSOVER,
     WEIGHTING_DELTA, TWO, NO_STEP, make_slerp, OPERAND_WEIGHTS | OPERAND_RANK},
    {"karcher", "ΔW's mean direction on the sphere, module by module: slerp of many",
     OPERATOR_CROSSOVER, WEIGHTING_DELTA, MANY, NO_STEP, make_karcher,
     OPERAND_WEIGHTS | OPERAND_RANK},
    {"model_stock", "the sum of ΔW, smaller in each module the less the parents' directions agree",
     OPERATOR_CROSSOVER, WEIGHTING_DELTA, MANY, NO_STEP, make_stock,
     OPERAND_WEIGHTS | OPERAND_RANK},
    {"layer", "each layer from one parent, sampled by weight", OPERATOR_CROSSOVER, WEIGHTING_DELTA,
     MANY, NO_STEP, make_layer, OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"module", "each projection from one parent, sampled by weight", OPERATOR_CROSSOVER,
     WEIGHTING_DELTA, MANY, NO_STEP, make_module, OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"split", "single point: shares before a random module, swapped after it; along the arc",
     OPERATOR_CROSSOVER, WEIGHTING_NONE, TWO,
     "width of the transition, as a fraction of all modules", 0, 0, 1, make_split,
     OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"split_linear", "split along the straight line", OPERATOR_CROSSOVER, WEIGHTING_NONE, TWO,
     "width of the transition, as a fraction of all modules", 0, 0, 1, make_split_linear,
     OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"svd_mix", "singular triplets of ΔW, each from one parent, sampled by weight",
     OPERATOR_CROSSOVER, WEIGHTING_DELTA, MANY, NO_STEP, make_svd,
     OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {0},
};
