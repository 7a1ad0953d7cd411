/*
 * merge: element-wise operators on several tensors (pruning, dropping, sign election), on ΔW as in
 * the papers, and on A, on B and on ΔW as in PEFT.
 *
 * One routine merges n tensors of equal size by a rule. The rows of merge_operators pass ΔW with
 * its true scale to this routine, one module of all parents at a time, and truncate the result to
 * the child's rank. The result of an element-wise rule has full rank; "error" in the lineage is
 * what the truncation lost.
 *
 * Sources: TIES (Yadav et al. 2023), DARE (Yu et al. 2023), Model Breadcrumbs (Davari and
 * Belilovsky 2023), DELLA (Deep, Bhardwaj and Poria 2024), SCE (Wan et al. 2024, FuseChat), with
 * mergekit's constants if a paper leaves them open. Differences from mergekit: DELLA divides each
 * kept element by its keep probability, as in the paper, and narrows the band of probabilities near
 * 0 and 1, where mergekit refuses. Every sign election is followed by the disjoint mean of
 * delta_ties.
 *
 * PEFT's combination types keep PEFT's arithmetic and its consequences. Types on A and B have cross
 * terms (the product of sums is not the sum of products) and need equal ranks. svd, and types that
 * end in _svd, count an adapter's scale twice: once in its ΔW and once in its weight. A weighted
 * disjoint mean is divided by the number of parents that agree, not by the sum of their weights.
 * Differences from PEFT: children have scale 1 even if the first parent is rank-stabilised (PEFT
 * keeps use_rslora with alpha = r and thereby multiplies by √r), singular values are split evenly
 * between A and B, and dropping uses this program's seeded generator.
 *
 * The float32 magnitude decides which elements are kept; of equal magnitudes the earlier positions
 * are kept.
 */
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum sparsification {
    SPARSIFY_NONE,
    SPARSIFY_MAGNITUDE,          /* keep the largest magnitudes */
    SPARSIFY_MAGNITUDE_OUTLIERS, /* drop the largest magnitudes, a share OUTLIERS, and keep the
                                    largest of the rest (breadcrumbs) */
    SPARSIFY_RANDOM,             /* keep a random subset, and rescale */
    SPARSIFY_MAGPRUNE, /* keep a random subset, larger elements of a row with a higher probability,
                          and rescale (MAGPRUNE) */
    SPARSIFY_SCE, /* keep elements with the largest variance, and weight parents by Σ x² (SCE) */
};
struct merge_rule {
    enum sparsification sparse;
    bool elect; /* true: only elements of the elected sign count; false: a weighted sum */
    bool peft;  /* elects and averages as PEFT does */
};
#define OUTLIERS 0.01  /* share of elements that breadcrumbs drops */
#define RANK_BAND 0.15 /* range of keep probabilities on either side of the density */

/* Tensors of equal size, with weights w[n]. A merge changes all of the tensors and writes its
 * result to the first. */
struct tensors {
    float *x[OPERATOR_PARENTS_MAX]; /* [n][rows][cols] */
    double w[OPERATOR_PARENTS_MAX];
    int n;
    size_t rows, cols;
};

static uint32_t magnitude_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff; /* orders like |x| */
}

/* Counts the magnitudes of w by their upper 16 bits or, if high >= 0, counts the magnitudes with
 * the upper bits `high` by their lower 16 bits. */
static void magnitudes_count(const float *w, size_t n, int64_t high, uint32_t *count) {
    memset(count, 0, 65536 * sizeof *count);
    for (size_t i = 0; i < n; i++) {
        uint32_t m = magnitude_bits(w[i]);
        if (high < 0)
            count[m >> 16]++;
        else if (m >> 16 == (uint32_t)high)
            count[m & 0xffff]++;
    }
}

/* The bin of the k-th largest value (k counts from 1); *k becomes its rank within the bin. */
static uint32_t bin_find(const uint32_t *count, size_t *k) {
    uint32_t bin = 65535;
    for (; bin > 0 && count[bin] < *k; bin--) *k -= count[bin];
    return bin;
}

/* The k-th largest magnitude (k counts from 1), by radix selection, because n is in the millions.
 * *equal: how many of the k largest magnitudes are equal to it. */
static uint32_t magnitude_at(const float *w, size_t n, size_t k, size_t *equal) {
    uint32_t *count = xmalloc(65536 * sizeof *count);
    *equal = k;
    magnitudes_count(w, n, -1, count);
    uint32_t high = bin_find(count, equal);
    magnitudes_count(w, n, high, count);
    uint32_t low = bin_find(count, equal);
    free(count);
    return high << 16 | low;
}

/* Zeroes the `top` largest magnitudes, and all except the `keep` largest of the rest. */
static void tensor_prune_magnitude(float *w, size_t n, size_t top, size_t keep) {
    size_t n_top_ties = 0, n_kept_ties = 0;
    if (keep >= n) return;
    if (keep == 0) {
        memset(w, 0, n * sizeof *w);
        return;
    }
    top = MIN(top, n - keep);
    uint32_t top_threshold = top > 0 ? magnitude_at(w, n, top, &n_top_ties) : UINT32_MAX;
    uint32_t kept_threshold = magnitude_at(w, n, top + keep, &n_kept_ties);
    for (size_t i = 0; i < n; i++) {
        uint32_t m = magnitude_bits(w[i]);
        bool is_top = m > top_threshold || (m == top_threshold && n_top_ties > 0 && n_top_ties--);
        bool is_kept =
            m > kept_threshold || (m == kept_threshold && n_kept_ties > 0 && n_kept_ties--);
        if (is_top || !is_kept) w[i] = 0;
    }
}

static void tensor_prune_random(float *w, size_t n, float density, struct rng *rng) {
    for (size_t i = 0; i < n; i++)
        w[i] = rng_uniform(rng) < density ? (float)((double)w[i] / (double)density) : 0;
}

static int ascending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Keeps an element with probability density - band + 2 band j / (n - 1), where j is the rank of its
 * magnitude in the row, 0 for the smallest, and divides it by this probability. */
static void row_magprune(float *w, size_t n, double density, uint64_t *order, struct rng *rng) {
    double band = MIN(RANK_BAND, MIN(density / 2, 1 - density));
    for (size_t j = 0; j < n; j++) order[j] = (uint64_t)magnitude_bits(w[j]) << 32 | j;
    qsort(order, n, sizeof *order, ascending);
    for (size_t j = 0; j < n; j++) {
        double keep = density + (n > 1 ? band * (2 * (double)j / (double)(n - 1) - 1) : 0);
        float *v = w + (uint32_t)order[j];
        *v = (double)rng_uniform(rng) < keep ? (float)((double)*v / keep) : 0;
    }
}

static void tensor_magprune(float *w, size_t rows, size_t cols, float density, struct rng *rng) {
    uint64_t *order = xmalloc(cols * sizeof *order);
    for (size_t r = 0; r < rows; r++) row_magprune(w + r * cols, cols, (double)density, order, rng);
    free(order);
}

/* Standard deviation of element i over the parents; it orders elements as their variance does. */
static float parents_deviation(const struct tensors *t, size_t i) {
    double mean = 0, square = 0;
    for (int k = 0; k < t->n; k++) mean += (double)t->x[k][i] / t->n;
    for (int k = 0; k < t->n; k++) {
        double off = (double)t->x[k][i] - mean;
        square += off * off / t->n;
    }
    return (float)sqrt(square);
}

/* Zeroes all elements except those with the largest deviation between parents. Keeps a fraction
 * `density` of the elements that differ between parents. */
static void tensors_mask(struct tensors *t, double density) {
    size_t size = t->rows * t->cols, n = 0;
    float *s = xmalloc(size * sizeof *s);
    for (size_t i = 0; i < size; i++) n += (s[i] = parents_deviation(t, i)) > 0;
    tensor_prune_magnitude(s, size, 0, (size_t)(density * (double)n));
    for (int k = 0; k < t->n; k++)
        for (size_t i = 0; i < size; i++)
            if (s[i] == 0) t->x[k][i] = 0;
    free(s);
}

/* Sets SCE's weights, which are proportional to Σ x² of the kept elements of a parent. First
 * multiplies a parent's elements by n times its given weight, which is 1 for equal weights. */
static void tensors_sce(struct tensors *t, double density) {
    size_t size = t->rows * t->cols;
    double sum_squares = 0;
    for (int k = 0; k < t->n; k++)
        for (size_t i = 0; i < size; i++) t->x[k][i] = (float)(t->n * t->w[k] * (double)t->x[k][i]);
    if (density < 1) tensors_mask(t, density);
    for (int k = 0; k < t->n; k++) {
        t->w[k] = 0;
        for (size_t i = 0; i < size; i++) t->w[k] += (double)t->x[k][i] * (double)t->x[k][i];
        sum_squares += t->w[k];
    }
    for (int k = 0; k < t->n; k++) t->w[k] = sum_squares > 0 ? t->w[k] / sum_squares : 1.0 / t->n;
}

/* Element i of the result: Σ w x, or the mean of the w x with the elected sign. TIES elects the
 * sign by the weighted sum and divides by the weights that agree, times the sum of all weights, so
 * that equal weights 1/n give its disjoint mean. SCE and PEFT elect the sign by the plain sum. */
static double element_merge(const struct tensors *t, size_t i, struct merge_rule rule) {
    bool unweighted = rule.peft || rule.sparse == SPARSIFY_SCE;
    double sum = 0, elected = 0, agreeing = 0, weight_sum = 0;
    for (int k = 0; k < t->n; k++) {
        double v = (double)t->x[k][i], w = t->w[k];
        sum += w * v;
        elected += unweighted ? v : w * v;
        weight_sum += fabs(w);
    }
    if (!rule.elect) return sum;
    sum = 0;
    for (int k = 0; k < t->n; k++) {
        double v = (double)t->x[k][i], w = t->w[k], sign = unweighted ? v : w * v;
        if (sign == 0 || (sign > 0) != (elected >= 0)) continue;
        sum += w * v;
        agreeing += rule.peft ? 1 : fabs(w);
    }
    if (agreeing == 0) return 0;
    return rule.peft ? sum / agreeing : sum / agreeing * weight_sum;
}

static void tensor_sparsify(float *w, const struct tensors *t, enum sparsification sparse,
                            float density, struct rng *rng) {
    size_t n = t->rows * t->cols, keep = (size_t)((double)density * (double)n);
    if (sparse == SPARSIFY_MAGNITUDE) tensor_prune_magnitude(w, n, 0, keep);
    if (sparse == SPARSIFY_MAGNITUDE_OUTLIERS)
        tensor_prune_magnitude(w, n, (size_t)(OUTLIERS * (double)n), keep);
    if (sparse == SPARSIFY_RANDOM) tensor_prune_random(w, n, density, rng);
    if (sparse == SPARSIFY_MAGPRUNE) tensor_magprune(w, t->rows, t->cols, density, rng);
}

/* Merges the tensors by the rule; the result is in the first tensor. `id` selects the random
 * stream. */
static void tensors_merge(struct tensors *t, const struct operands *x, struct merge_rule rule,
                          uint32_t id) {
    for (int k = 0; k < t->n; k++) {
        struct rng rng = rng_make(x->seed, RNG_MUTATE, id, 16 + (uint32_t)k);
        tensor_sparsify(t->x[k], t, rule.sparse, x->step, &rng);
    }
    if (rule.sparse == SPARSIFY_SCE) tensors_sce(t, (double)x->step);
    for (size_t i = 0; i < t->rows * t->cols; i++) t->x[0][i] = (float)element_merge(t, i, rule);
}

/* Sets w [out][in] to scale · B A. */
static void delta_fill(float *w, const struct lora *lo, int out, int in) {
    double *row = xmalloc((size_t)in * sizeof *row);
    for (int o = 0; o < out; o++) {
        memset(row, 0, (size_t)in * sizeof *row);
        for (int c = 0; c < lo->r; c++)
            for (int j = 0; j < in; j++)
                row[j] += (double)lo->b[o * lo->r + c] * (double)lo->a[(size_t)c * in + j];
        for (int j = 0; j < in; j++) w[(size_t)o * in + j] = (float)((double)lo->scale * row[j]);
    }
    free(row);
}

static void tensors_release(struct tensors *t) {
    for (int k = 0; k < t->n; k++) free(t->x[k]);
}

/* Fills `t` with ΔW of module i of all parents. A parent without the module counts as zeros, as in
 * the papers; with `peft` it is left out, as PEFT does. */
static int deltas_fill(struct tensors *t, const struct operands *x, int32_t i, bool peft,
                       struct error *err) {
    for (int p = 0; p < x->n_parents; p++) {
        const struct lora *lo = &x->parents[p]->loras[i];
        if (lo->r == 0 && peft) continue;
        if (!(t->x[t->n] = try_calloc(t->rows * t->cols, sizeof *t->x[0], err))) return err->code;
        delta_fill(t->x[t->n], lo, (int)t->rows, (int)t->cols);
        t->w[t->n++] = operand_weight(x, p) * (peft ? (double)lo->scale : 1);
    }
    return OK;
}

/* Adds the merged ΔW of module i, truncated to the child's rank, to `d`. */
static int module_merge(const struct operands *x, int32_t i, struct merge_rule rule,
                        struct adapter_builder *d, struct error *err) {
    int out = proj_out(d->shape, i % N_PROJ), in = proj_in(d->shape, i % N_PROJ);
    struct tensors t = {.rows = (size_t)out, .cols = (size_t)in};
    int rc = deltas_fill(&t, x, i, rule.peft, err);
    if (rc == OK) {
        struct arena ar = {0};
        int32_t r = operand_rank(x, i, ADAPTER_RANK_MAX);
        double total2 = 0;
        tensors_merge(&t, x, rule, (uint32_t)(2 * i));
        struct svd sv = randomized_svd(t.x[0], out, in, r, &ar);
        for (size_t k = 0; k < t.rows * t.cols; k++)
            total2 += (double)t.x[0][k] * (double)t.x[0][k];
        adapter_builder_add_truncated(d, i, &sv, r, total2);
        arena_release(&ar);
    }
    tensors_release(&t);
    return rc;
}

static bool any_parent_has_module(const struct operands *x, int32_t i) {
    bool any = false;
    for (int p = 0; p < x->n_parents; p++) any |= x->parents[p]->loras[i].r > 0;
    return any;
}

static struct adapter *merge_delta(const struct operands *x, struct merge_rule rule,
                                   json_t *lineage, struct error *err) {
    const struct adapter *a = x->parents[0];
    struct adapter_builder d = adapter_builder_init(&a->shape, a->config.dropout);
    for (int32_t i = 0; i < operand_modules(x); i++) {
        if (!any_parent_has_module(x, i) || module_merge(x, i, rule, &d, err) == OK) continue;
        adapter_builder_release(&d);
        return NULL;
    }
    return operator_finish(&d, lineage, err);
}

/* Checks as PEFT does that the ranks are equal, but separately for each module. *r: that rank, 0 if
 * no parent has the module. */
static int ranks_check(const struct operands *x, int32_t i, int32_t *r, struct error *err) {
    *r = 0;
    for (int p = 0; p < x->n_parents; p++) {
        int32_t parent_rank = x->parents[p]->loras[i].r;
        if (*r && parent_rank && parent_rank != *r)
            return error_set(err, ERR_MISMATCH,
                             "the parents' ranks differ (%d and %d in '%s'); merging A and B needs "
                             "equal ranks (use the operator that ends in _svd)",
                             (int)*r, (int)parent_rank, proj_names[i % N_PROJ]);
        *r = parent_rank ? parent_rank : *r;
    }
    if (*r && x->rank && x->rank != *r)
        return error_set(err, ERR_USAGE, "rank %d is requested, but merging A and B keeps rank %d",
                         (int)x->rank, (int)*r);
    return OK;
}

/* Merges the parents' A, or their B, of one module into `to`. The weights are the root of |weight ·
 * scale|; the sign of the weight is applied to A. */
static void factor_merge(const struct operands *x, int32_t i, bool is_b, struct merge_rule rule,
                         size_t size, float *to) {
    struct tensors t = {.rows = 1, .cols = size};
    for (int p = 0; p < x->n_parents; p++) {
        const struct lora *lo = &x->parents[p]->loras[i];
        if (lo->r == 0) continue;
        double weight = operand_weight(x, p) * (double)lo->scale;
        t.w[t.n] = sqrt(fabs(weight)) * (weight < 0 && !is_b ? -1 : 1);
        t.x[t.n] = xmalloc(size * sizeof *to);
        memcpy(t.x[t.n++], is_b ? lo->b : lo->a, size * sizeof *to);
    }
    tensors_merge(&t, x, rule, (uint32_t)(2 * i + is_b));
    memcpy(to, t.x[0], size * sizeof *to);
    tensors_release(&t);
}

static struct adapter *merge_factors(const struct operands *x, struct merge_rule rule,
                                     json_t *lineage, struct error *err) {
    const struct model_config *shape = &x->parents[0]->shape;
    struct adapter_builder d = adapter_builder_init(shape, x->parents[0]->config.dropout);
    for (int32_t i = 0, r; i < operand_modules(x); i++) {
        if (ranks_check(x, i, &r, err) != OK) {
            adapter_builder_release(&d);
            return NULL;
        }
        if (r == 0) continue;
        float *a = adapter_builder_add(&d, i, r);
        factor_merge(x, i, false, rule, (size_t)r * (size_t)proj_in(shape, i % N_PROJ), a);
        factor_merge(x, i, true, rule, (size_t)r * (size_t)proj_out(shape, i % N_PROJ),
                     adapter_builder_b(&d, i, a));
    }
    return operator_finish(&d, lineage, err);
}

static struct adapter *make_cat(const struct operands *x, json_t *lineage, struct error *err) {
    float w[OPERATOR_PARENTS_MAX];
    for (int p = 0; p < x->n_parents; p++) w[p] = (float)operand_weight(x, p);
    return operator_set_lineage(adapter_concat(x->parents, w, x->n_parents, err), lineage);
}

/* PEFT's svd: a weighted sum of ΔW, which needs no dense matrix. */
static struct adapter *make_svd(const struct operands *x, json_t *lineage, struct error *err) {
    int32_t modules = operand_modules(x);
    double *coef = xcalloc((size_t)modules * (size_t)x->n_parents, sizeof *coef);
    for (int32_t i = 0; i < modules; i++)
        for (int p = 0; p < x->n_parents; p++)
            coef[i * x->n_parents + p] =
                operand_weight(x, p) * (double)x->parents[p]->loras[i].scale;
    struct adapter *child = operator_weighted_sum(x, coef, lineage, err);
    free(coef);
    return child;
}

#define MAKE(name, how, ...)                                                                       \
    static struct adapter *name(const struct operands *x, json_t *lineage, struct error *err) {    \
        return how(x, (struct merge_rule){__VA_ARGS__}, lineage, err);                             \
    }
MAKE(delta_ties, merge_delta, SPARSIFY_MAGNITUDE, true, false)
MAKE(delta_dare, merge_delta, SPARSIFY_RANDOM, false, false)
MAKE(delta_dare_ties, merge_delta, SPARSIFY_RANDOM, true, false)
MAKE(delta_prune, merge_delta, SPARSIFY_MAGNITUDE, false, false)
MAKE(delta_breadcrumbs, merge_delta, SPARSIFY_MAGNITUDE_OUTLIERS, false, false)
MAKE(delta_breadcrumbs_ties, merge_delta, SPARSIFY_MAGNITUDE_OUTLIERS, true, false)
MAKE(delta_della, merge_delta, SPARSIFY_MAGPRUNE, true, false)
MAKE(delta_della_linear, merge_delta, SPARSIFY_MAGPRUNE, false, false)
MAKE(delta_sce, merge_delta, SPARSIFY_SCE, true, false)
MAKE(make_linear, merge_factors, SPARSIFY_NONE, false, true)
MAKE(make_ties, merge_factors, SPARSIFY_MAGNITUDE, true, true)
MAKE(make_ties_svd, merge_delta, SPARSIFY_MAGNITUDE, true, true)
MAKE(make_dare_linear, merge_factors, SPARSIFY_RANDOM, false, true)
MAKE(make_dare_ties, merge_factors, SPARSIFY_RANDOM, true, true)
MAKE(make_dare_linear_svd, merge_delta, SPARSIFY_RANDOM, false, true)
MAKE(make_dare_ties_svd, merge_delta, SPARSIFY_RANDOM, true, true)
MAKE(make_prune, merge_factors, SPARSIFY_MAGNITUDE, false, true)
MAKE(make_prune_svd, merge_delta, SPARSIFY_MAGNITUDE, false, true)
#undef MAKE

#define MANY 2, OPERATOR_PARENTS_MAX
#define ANY 1, OPERATOR_PARENTS_MAX
#define NO_STEP NULL, 0, 0, 0
#define TRIMMED "share of elements kept", 0.2f, 0, 1
#define DENSITY "share of elements kept", 0.5f, 0.01f, 1
#define PEFT_DENSITY "density", 0.5f, 0.01f, 1
const struct adapter_operator merge_operators[] = {
    {"delta_ties", "TIES on ΔW: trim, elect signs, disjoint mean", OPERATOR_CROSSOVER,
     WEIGHTING_DELTA, MANY, TRIMMED, delta_ties, OPERAND_WEIGHTS | OPERAND_RANK},
    {"delta_dare", "DARE on ΔW: drop at random, rescale, sum", OPERATOR_CROSSOVER, WEIGHTING_DELTA,
     MANY, DENSITY, delta_dare, OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"delta_dare_ties", "DARE on ΔW, then sign election and the disjoint mean", OPERATOR_CROSSOVER,
     WEIGHTING_DELTA, MANY, DENSITY, delta_dare_ties,
     OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"delta_prune", "the sum of the largest elements of ΔW", OPERATOR_CROSSOVER, WEIGHTING_DELTA,
     ANY, DENSITY, delta_prune, OPERAND_WEIGHTS | OPERAND_RANK},
    {"delta_breadcrumbs", "the sum of ΔW without its largest 1 % and its smallest elements",
     OPERATOR_CROSSOVER, WEIGHTING_DELTA, MANY, DENSITY, delta_breadcrumbs,
     OPERAND_WEIGHTS | OPERAND_RANK},
    {"delta_breadcrumbs_ties", "delta_breadcrumbs, with sign election and the disjoint mean",
     OPERATOR_CROSSOVER, WEIGHTING_DELTA, MANY, DENSITY, delta_breadcrumbs_ties,
     OPERAND_WEIGHTS | OPERAND_RANK},
    {"delta_della",
     "DELLA on ΔW: drop at random, small ones more often, rescale, elect signs, disjoint mean",
     OPERATOR_CROSSOVER, WEIGHTING_DELTA, MANY, DENSITY, delta_della,
     OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"delta_della_linear", "DELLA's dropping on ΔW, then the sum", OPERATOR_CROSSOVER,
     WEIGHTING_DELTA, MANY, DENSITY, delta_della_linear,
     OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"delta_sce", "SCE on ΔW: elements that differ most, weights by squares, minority signs erased",
     OPERATOR_CROSSOVER, WEIGHTING_DELTA, MANY, "share of differing elements kept", 0.5f, 0.01f, 1,
     delta_sce, OPERAND_WEIGHTS | OPERAND_RANK},
    {0},
};
const struct adapter_operator peft_operators[] = {
    {"linear", "PEFT: A and B summed separately", OPERATOR_PEFT, WEIGHTING_FACTORS, ANY, NO_STEP,
     make_linear, OPERAND_WEIGHTS},
    {"cat", "PEFT: A and B concatenated, ranks add up: exact", OPERATOR_PEFT, WEIGHTING_FACTORS,
     ANY, NO_STEP, make_cat, OPERAND_WEIGHTS},
    {"svd", "PEFT: the sum of ΔW, with scales counted twice", OPERATOR_PEFT, WEIGHTING_FACTORS, ANY,
     NO_STEP, make_svd, OPERAND_WEIGHTS | OPERAND_RANK},
    {"ties", "PEFT: TIES on A and on B", OPERATOR_PEFT, WEIGHTING_FACTORS, ANY, PEFT_DENSITY,
     make_ties, OPERAND_WEIGHTS},
    {"ties_svd", "PEFT: TIES on ΔW", OPERATOR_PEFT, WEIGHTING_FACTORS, ANY, PEFT_DENSITY,
     make_ties_svd, OPERAND_WEIGHTS | OPERAND_RANK},
    {"dare_linear", "PEFT: DARE on A and on B", OPERATOR_PEFT, WEIGHTING_FACTORS, ANY, PEFT_DENSITY,
     make_dare_linear, OPERAND_WEIGHTS | OPERAND_SEED},
    {"dare_ties", "PEFT: DARE on A and on B, then TIES' signs", OPERATOR_PEFT, WEIGHTING_FACTORS,
     ANY, PEFT_DENSITY, make_dare_ties, OPERAND_WEIGHTS | OPERAND_SEED},
    {"dare_linear_svd", "PEFT: DARE on ΔW", OPERATOR_PEFT, WEIGHTING_FACTORS, ANY, PEFT_DENSITY,
     make_dare_linear_svd, OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"dare_ties_svd", "PEFT: DARE on ΔW, then TIES' signs", OPERATOR_PEFT, WEIGHTING_FACTORS, ANY,
     PEFT_DENSITY, make_dare_ties_svd, OPERAND_WEIGHTS | OPERAND_RANK | OPERAND_SEED},
    {"magnitude_prune", "PEFT: the largest elements of A and of B", OPERATOR_PEFT,
     WEIGHTING_FACTORS, ANY, PEFT_DENSITY, make_prune, OPERAND_WEIGHTS},
    {"magnitude_prune_svd", "PEFT: the largest elements of ΔW", OPERATOR_PEFT, WEIGHTING_FACTORS,
     ANY, PEFT_DENSITY, make_prune_svd, OPERAND_WEIGHTS | OPERAND_RANK},
    {0},
};
