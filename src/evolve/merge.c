/*
 * merge: operators on the elements of several tensors — trimming, dropping, electing signs — as the
 * papers do them on ΔW, and as PEFT does them on A, on B and on ΔW.
 *
 * One routine merges n tensors of equal size; a rule says how. The rows of merge_operators give it
 * ΔW with its true scale, one module of all parents in memory at a time, and bring the result back
 * to its rank: what an element-wise rule leaves is of full rank, so "error" in the lineage is worth
 * a look.
 *
 * PEFT's combination types keep PEFT's arithmetic, with what follows from it: those on A and B have
 * cross terms (the product of sums is not the sum of products) and need equal ranks; those ending
 * in _svd, and svd, count an adapter's scale twice, once in its ΔW and once in its weight; a
 * weighted disjoint mean is divided by the number of parents that agree, not by their weights.
 * Different from PEFT: children have scale 1 also where the first parent is rank-stabilised (PEFT
 * keeps use_rslora with alpha = r and thereby multiplies by √r), singular values are split evenly
 * between A and B, and the dropping is ours, seeded.
 *
 * Which elements are kept is decided by float32 magnitude, equal ones in order of place.
 */
#include "evolve/operators.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum sparse { SPARSE_NONE, SPARSE_TRIM, SPARSE_DROP };
struct rule {
    enum sparse sparse; /* keep the largest; or any, by chance, and rescale */
    bool elect;         /* only elements of the elected sign count; else a weighted sum */
    bool peft;          /* elects and averages as PEFT does */
};

static uint32_t magnitude_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff; /* orders like |x| */
}

/* How many of w's magnitudes have `high` (16 bits, or none asked for) above each lower half. */
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

/* The bin with the k-th largest (k counts from 1); *k becomes its place within. */
static uint32_t bin_find(const uint32_t *count, size_t *k) {
    uint32_t bin = 65535;
    for (; bin > 0 && count[bin] < *k; bin--) *k -= count[bin];
    return bin;
}

/* Keeps the `keep` largest magnitudes; a radix selection, because n is millions. */
static void tensor_trim(float *w, size_t n, size_t keep) {
    if (keep >= n) return;
    if (keep == 0) {
        memset(w, 0, n * sizeof *w);
        return;
    }
    uint32_t *count = xmalloc(65536 * sizeof *count);
    size_t equal = keep;
    magnitudes_count(w, n, -1, count);
    uint32_t high = bin_find(count, &equal);
    magnitudes_count(w, n, high, count);
    uint32_t least = high << 16 | bin_find(count, &equal);
    for (size_t i = 0; i < n; i++) {
        uint32_t m = magnitude_bits(w[i]);
        if (m > least || (m == least && equal > 0 && equal--)) continue;
        w[i] = 0;
    }
    free(count);
}

static void tensor_drop(float *w, size_t n, float density, struct rng *rng) {
    for (size_t i = 0; i < n; i++)
        w[i] = rng_uniform(rng) < density ? (float)((double)w[i] / (double)density) : 0;
}

/* The elements x[k][i], k < n: Σ w x, or the mean of those w x that have the elected sign. TIES
 * elects by the weighted sum and divides by the weights that agree; times the sum of all weights,
 * so that equal weights 1/n give its disjoint mean. */
static double element_merge(float *const *x, size_t i, const double *w, int n, struct rule rule) {
    double sum = 0, elected = 0, agreeing = 0, all = 0;
    for (int k = 0; k < n; k++) {
        double v = (double)x[k][i];
        sum += w[k] * v;
        elected += rule.peft ? v : w[k] * v;
        all += fabs(w[k]);
    }
    if (!rule.elect) return sum;
    sum = 0;
    for (int k = 0; k < n; k++) {
        double v = (double)x[k][i], sign = rule.peft ? v : w[k] * v;
        if (sign == 0 || (sign > 0) != (elected >= 0)) continue;
        sum += w[k] * v;
        agreeing += rule.peft ? 1 : fabs(w[k]);
    }
    if (agreeing == 0) return 0;
    return rule.peft ? sum / agreeing : sum / agreeing * all;
}

/* x[0] := the merge of x[0..n), each of `size`; `id` names the stream. All are changed. */
static void tensors_merge(float **x, const double *w, int n, size_t size, struct rule rule,
                          float density, uint64_t seed, uint32_t id) {
    for (int k = 0; k < n; k++) {
        struct rng rng = rng_make(seed, RNG_MUTATE, id, 16 + (uint32_t)k);
        if (rule.sparse == SPARSE_TRIM)
            tensor_trim(x[k], size, (size_t)((double)density * (double)size));
        if (rule.sparse == SPARSE_DROP) tensor_drop(x[k], size, density, &rng);
    }
    for (size_t i = 0; i < size; i++) x[0][i] = (float)element_merge(x, i, w, n, rule);
}

/* scale · B A [out][in]. */
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

static void tensors_free(float **x, int n) {
    for (int k = 0; k < n; k++) free(x[k]);
}

/* The merged ΔW of module i, brought to its rank. The papers let a parent without the module count
 * as zeros, PEFT leaves it out. */
static int module_merge(const struct operands *x, int32_t i, struct rule rule, struct draft *d,
                        struct error *err) {
    int out = proj_out(d->shape, i % N_PROJ), in = proj_in(d->shape, i % N_PROJ), n = 0, rc = OK;
    size_t size = (size_t)out * (size_t)in;
    float *t[OPERATOR_PARENTS_MAX] = {NULL};
    double w[OPERATOR_PARENTS_MAX] = {0}, total2 = 0;
    struct arena ar = {0};
    int32_t r = operand_rank(x, i, ADAPTER_RANK_MAX);
    for (int p = 0; p < x->n; p++) {
        const struct lora *lo = &x->parents[p]->loras[i];
        if (lo->r == 0 && rule.peft) continue;
        if (!(t[n] = try_calloc(size, sizeof **t, err))) {
            rc = err->code;
            goto out;
        }
        delta_fill(t[n], lo, out, in);
        w[n++] = operand_weight(x, p) * (rule.peft ? (double)lo->scale : 1);
    }
    tensors_merge(t, w, n, size, rule, x->step, x->seed, (uint32_t)(2 * i));
    struct singular sv = dense_svd(t[0], out, in, r, &ar);
    for (size_t k = 0; k < size; k++) total2 += (double)t[0][k] * (double)t[0][k];
    draft_truncate(d, i, &sv, r, total2);
out:
    arena_release(&ar);
    tensors_free(t, n);
    return rc;
}

static bool any_has(const struct operands *x, int32_t i) {
    bool any = false;
    for (int p = 0; p < x->n; p++) any |= x->parents[p]->loras[i].r > 0;
    return any;
}

static struct adapter *merge_delta(const struct operands *x, struct rule rule, json_t *lineage,
                                   struct error *err) {
    const struct adapter *a = x->parents[0];
    struct draft d = draft_make(&a->shape, a->config.dropout);
    for (int32_t i = 0; i < operand_modules(x); i++) {
        if (!any_has(x, i) || module_merge(x, i, rule, &d, err) == OK) continue;
        draft_release(&d);
        return NULL;
    }
    return operator_child(&d, lineage, err);
}

/* As PEFT checks it, but module by module. */
static int ranks_check(const struct operands *x, int32_t i, int32_t *r, struct error *err) {
    *r = 0;
    for (int p = 0; p < x->n; p++) {
        int32_t own = x->parents[p]->loras[i].r;
        if (*r && own && own != *r)
            return error_set(err, ERR_MISMATCH,
                             "the parents' ranks differ (%d and %d in '%s'); merging of tensors "
                             "needs equal ranks (take the operator that ends in _svd)",
                             (int)*r, (int)own, proj_names[i % N_PROJ]);
        *r = own ? own : *r;
    }
    if (*r && x->rank && x->rank != *r)
        return error_set(err, ERR_USAGE, "rank %d asked for, but merging of tensors keeps %d",
                         (int)x->rank, (int)*r);
    return OK;
}

/* All the A or all the B of one module, weighted by the root of weight · scale, the sign on A's
 * side. `to` gets the merge. */
static void factor_merge(const struct operands *x, int32_t i, bool is_b, struct rule rule,
                         size_t size, float *to) {
    float *t[OPERATOR_PARENTS_MAX] = {NULL};
    double w[OPERATOR_PARENTS_MAX] = {0};
    int n = 0;
    for (int p = 0; p < x->n; p++) {
        const struct lora *lo = &x->parents[p]->loras[i];
        if (lo->r == 0) continue;
        double weight = operand_weight(x, p) * (double)lo->scale;
        w[n] = sqrt(fabs(weight)) * (weight < 0 && !is_b ? -1 : 1);
        t[n] = xmalloc(size * sizeof **t);
        memcpy(t[n++], is_b ? lo->b : lo->a, size * sizeof **t);
    }
    tensors_merge(t, w, n, size, rule, x->step, x->seed, (uint32_t)(2 * i + is_b));
    memcpy(to, t[0], size * sizeof *to);
    tensors_free(t, n);
}

static struct adapter *merge_factors(const struct operands *x, struct rule rule, json_t *lineage,
                                     struct error *err) {
    const struct model_config *shape = &x->parents[0]->shape;
    struct draft d = draft_make(shape, x->parents[0]->config.dropout);
    for (int32_t i = 0, r; i < operand_modules(x); i++) {
        if (ranks_check(x, i, &r, err) != OK) {
            draft_release(&d);
            return NULL;
        }
        if (r == 0) continue;
        float *a = draft_add(&d, i, r);
        factor_merge(x, i, false, rule, (size_t)r * (size_t)proj_in(shape, i % N_PROJ), a);
        factor_merge(x, i, true, rule, (size_t)r * (size_t)proj_out(shape, i % N_PROJ),
                     draft_b(&d, i, a));
    }
    return operator_child(&d, lineage, err);
}

static struct adapter *make_cat(const struct operands *x, json_t *lineage, struct error *err) {
    float w[OPERATOR_PARENTS_MAX];
    for (int p = 0; p < x->n; p++) w[p] = (float)operand_weight(x, p);
    return operator_relabel(adapter_stack(x->parents, w, x->n, err), lineage);
}

/* No element is looked at, so this needs no dense matrix. */
static struct adapter *make_svd(const struct operands *x, json_t *lineage, struct error *err) {
    int32_t modules = operand_modules(x);
    double *coef = xcalloc((size_t)modules * (size_t)x->n, sizeof *coef);
    for (int32_t i = 0; i < modules; i++)
        for (int p = 0; p < x->n; p++)
            coef[i * x->n + p] = operand_weight(x, p) * (double)x->parents[p]->loras[i].scale;
    struct adapter *child = operator_sum(x, coef, lineage, err);
    free(coef);
    return child;
}

#define MAKE(name, how, ...)                                                                       \
    static struct adapter *name(const struct operands *x, json_t *lineage, struct error *err) {    \
        return how(x, (struct rule){__VA_ARGS__}, lineage, err);                                   \
    }
MAKE(delta_ties, merge_delta, SPARSE_TRIM, true, false)
MAKE(delta_dare, merge_delta, SPARSE_DROP, false, false)
MAKE(delta_dare_ties, merge_delta, SPARSE_DROP, true, false)
MAKE(delta_prune, merge_delta, SPARSE_TRIM, false, false)
MAKE(make_linear, merge_factors, SPARSE_NONE, false, true)
MAKE(make_ties, merge_factors, SPARSE_TRIM, true, true)
MAKE(make_ties_svd, merge_delta, SPARSE_TRIM, true, true)
MAKE(make_dare_linear, merge_factors, SPARSE_DROP, false, true)
MAKE(make_dare_ties, merge_factors, SPARSE_DROP, true, true)
MAKE(make_dare_linear_svd, merge_delta, SPARSE_DROP, false, true)
MAKE(make_dare_ties_svd, merge_delta, SPARSE_DROP, true, true)
MAKE(make_prune, merge_factors, SPARSE_TRIM, false, true)
MAKE(make_prune_svd, merge_delta, SPARSE_TRIM, false, true)
#undef MAKE

#define MANY 2, OPERATOR_PARENTS_MAX
#define ANY 1, OPERATOR_PARENTS_MAX
#define NO_STEP NULL, 0, 0, 0
#define TRIMMED "share of elements kept", 0.2f, 0, 1
#define DENSITY "share of elements kept", 0.5f, 0.01f, 1
#define PEFT_DENSITY "density", 0.5f, 0.01f, 1
const struct adapter_operator merge_operators[] = {
    {"delta_ties", "TIES on ΔW: trim, elect signs, disjoint mean", OPERATOR_CROSSOVER, MANY,
     TRIMMED, delta_ties},
    {"delta_dare", "DARE on ΔW: drop by chance, rescale, add up", OPERATOR_CROSSOVER, MANY, DENSITY,
     delta_dare},
    {"delta_dare_ties", "DARE on ΔW, then signs elected and the disjoint mean", OPERATOR_CROSSOVER,
     MANY, DENSITY, delta_dare_ties},
    {"delta_prune", "the largest elements of ΔW, added up", OPERATOR_CROSSOVER, ANY, DENSITY,
     delta_prune},
    {0},
};
const struct adapter_operator peft_operators[] = {
    {"linear", "PEFT: A and B added up apart", OPERATOR_PEFT, ANY, NO_STEP, make_linear},
    {"cat", "PEFT: A and B side by side, of the added ranks: exact", OPERATOR_PEFT, ANY, NO_STEP,
     make_cat},
    {"svd", "PEFT: ΔW added up, with scales counted twice", OPERATOR_PEFT, ANY, NO_STEP, make_svd},
    {"ties", "PEFT: TIES on A and on B", OPERATOR_PEFT, ANY, PEFT_DENSITY, make_ties},
    {"ties_svd", "PEFT: TIES on ΔW", OPERATOR_PEFT, ANY, PEFT_DENSITY, make_ties_svd},
    {"dare_linear", "PEFT: DARE on A and on B", OPERATOR_PEFT, ANY, PEFT_DENSITY, make_dare_linear},
    {"dare_ties", "PEFT: DARE on A and on B, then TIES' signs", OPERATOR_PEFT, ANY, PEFT_DENSITY,
     make_dare_ties},
    {"dare_linear_svd", "PEFT: DARE on ΔW", OPERATOR_PEFT, ANY, PEFT_DENSITY, make_dare_linear_svd},
    {"dare_ties_svd", "PEFT: DARE on ΔW, then TIES' signs", OPERATOR_PEFT, ANY, PEFT_DENSITY,
     make_dare_ties_svd},
    {"magnitude_prune", "PEFT: the largest elements of A and of B", OPERATOR_PEFT, ANY,
     PEFT_DENSITY, make_prune},
    {"magnitude_prune_svd", "PEFT: the largest elements of ΔW", OPERATOR_PEFT, ANY, PEFT_DENSITY,
     make_prune_svd},
    {0},
};
