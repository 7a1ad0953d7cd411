/*
 * mutation: operators on one parent.
 *
 * noise and noise_absolute add noise to A and B directly. reinit initialises modules again. The
 * other operators change the singular values, the directions or the rank of ΔW, which do not depend
 * on its factorisation. They do not change a module whose ΔW is zero, such as a newly initialised
 * one, because it has no directions. The random numbers for a module depend on (seed, module) only.
 * Two choices are common to the adapter: the module that reinit always changes, and whether rank
 * grows or shrinks. drop changes every module of rank 2 or more, and reinit at least one module.
 * The noise operators may by chance change nothing.
 */
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Streams of a seed, numbered after those of crossover. */
enum { STREAM_SPECTRUM = 4, STREAM_ROTATE, STREAM_DROP, STREAM_RANK, STREAM_REINIT };

#define NOISE_SHARE 0.3f /* share of tensors that get noise */

static struct adapter *make_noise(const struct operands *x, json_t *lineage, struct error *err) {
    (void)err;
    return operator_set_lineage(adapter_mutate(x->parents[0], NOISE_SHARE, x->step, false, x->seed),
                                lineage);
}

static struct adapter *make_noise_absolute(const struct operands *x, json_t *lineage,
                                           struct error *err) {
    (void)err;
    return operator_set_lineage(adapter_mutate(x->parents[0], NOISE_SHARE, x->step, true, x->seed),
                                lineage);
}

/* The squared Frobenius norm, Σ s². */
static double energy(const struct svd *sv) {
    double sum = 0;
    for (int c = 0; c < sv->n; c++) sum += sv->s[c] * sv->s[c];
    return sum;
}

/* Fills the rows of A and the columns of B from old_rank on, in the module that was added last,
 * with random numbers. The product of these rows and columns has norm `size` (root mean square). */
static void add_random_components(const struct operands *x, const struct adapter_builder *d,
                                  int32_t i, int32_t old_rank, double size) {
    struct rng rng = rng_make(x->seed, RNG_MUTATE, (uint32_t)i + 1, STREAM_RANK);
    int64_t in = proj_in(d->shape, i % N_PROJ), out = proj_out(d->shape, i % N_PROJ);
    int64_t r = d->modules[i].r;
    float *a = d->data + d->n - r * (in + out), *b = a + r * in;
    /* Entries with standard deviation e give rows and columns of lengths e√in and e√out. */
    double e = sqrt(size / sqrt((double)((r - old_rank) * in * out)));
    for (int64_t k = old_rank * in; k < r * in; k++) a[k] = (float)(e * (double)rng_normal(&rng));
    for (int64_t o = 0; o < out; o++)
        for (int64_t c = old_rank; c < r; c++) b[o * r + c] = (float)(e * (double)rng_normal(&rng));
}

/* Changes the singular values and directions of one module in place, and its rank *r. If the rank
 * grows, change_modules adds random components, whose norm is `step` times the module's norm. */
typedef void module_change(const struct operands *x, int32_t i, struct svd *sv, int32_t *r);

static struct adapter *change_modules(const struct operands *x, module_change *change,
                                      json_t *lineage, struct error *err) {
    const struct adapter *a = x->parents[0];
    struct adapter_builder d = adapter_builder_init(&a->shape, a->config.dropout);
    for (int32_t i = 0; i < operand_modules(x); i++) {
        const struct lora *lo = &a->loras[i];
        struct arena ar = {0};
        if (lo->r == 0) continue;
        struct lowrank_sum s = lowrank_sum_new(&ar, proj_out(&a->shape, i % N_PROJ),
                                               proj_in(&a->shape, i % N_PROJ), lo->r);
        lowrank_sum_add(&s, lo, 1, 0);
        struct svd sv = lowrank_sum_svd(&s, &ar);
        int32_t r = sv.n;
        if (sv.s[0] == 0) {
            adapter_builder_add_exact(&d, i, lo, 1);
        } else {
            change(x, i, &sv, &r);
            adapter_builder_add_truncated(&d, i, &sv, r, energy(&sv));
            if (r > sv.n)
                add_random_components(x, &d, i, sv.n, (double)x->step * sqrt(energy(&sv)));
        }
        arena_release(&ar);
    }
    return operator_finish(&d, lineage, err);
}

/* s · exp(N(0, step²)), rescaled to the earlier norm. */
static void spectrum_change(const struct operands *x, int32_t i, struct svd *sv, int32_t *r) {
    (void)r;
    struct rng rng = rng_make(x->seed, RNG_MUTATE, (uint32_t)i, STREAM_SPECTRUM);
    double before = energy(sv);
    for (int c = 0; c < sv->n; c++) sv->s[c] *= math_exp((double)(x->step * rng_normal(&rng)));
    double scale = sqrt(before / energy(sv));
    for (int c = 0; c < sv->n; c++) sv->s[c] *= scale;
}

static struct adapter *make_spectrum(const struct operands *x, json_t *lineage, struct error *err) {
    return change_modules(x, spectrum_change, lineage, err);
}

/*
 * Rotates either the left or the right directions: adds noise of `step` times their length and
 * orthonormalises them, so the singular values and the norm stay unchanged.
 */
static void rotate_change(const struct operands *x, int32_t i, struct svd *sv, int32_t *r) {
    (void)r;
    struct rng rng = rng_make(x->seed, RNG_MUTATE, (uint32_t)i, STREAM_ROTATE);
    bool left = rng_below(&rng, 2) == 0;
    int m = left ? sv->out : sv->in;
    double *basis = left ? sv->u : sv->v, size = (double)x->step / sqrt(m);
    size_t n = (size_t)m * (size_t)sv->n;
    double *noisy = xmalloc(n * sizeof *noisy);
    double *core = xmalloc((size_t)sv->n * (size_t)sv->n * sizeof *core);
    for (size_t k = 0; k < n; k++) noisy[k] = basis[k] + size * (double)rng_normal(&rng);
    linalg_qr(noisy, m, sv->n, basis, core);
    free(noisy);
    free(core);
}

static struct adapter *make_rotate(const struct operands *x, json_t *lineage, struct error *err) {
    return change_modules(x, rotate_change, lineage, err);
}

static void copy_column(double *w, int m, int n, int from, int to) {
    for (int i = 0; i < m; i++) w[(size_t)i * n + to] = w[(size_t)i * n + from];
}

/* Drops each component with probability `step`: at least one if there are two or more, never all.
 */
static void drop_change(const struct operands *x, int32_t i, struct svd *sv, int32_t *r) {
    struct rng rng = rng_make(x->seed, RNG_MUTATE, (uint32_t)i, STREAM_DROP);
    int kept = 0, always_kept = (int)rng_below(&rng, (uint32_t)sv->n), forced = -1;
    bool any = false, *dropped = xcalloc((size_t)sv->n, sizeof *dropped);
    for (int c = 0; c < sv->n; c++)
        any |= dropped[c] = rng_uniform(&rng) < x->step && c != always_kept;
    if (!any && sv->n > 1) forced = (always_kept + 1) % sv->n;
    for (int c = 0; c < sv->n; c++) {
        if (dropped[c] || c == forced) continue;
        copy_column(sv->u, sv->out, sv->n, c, kept);
        copy_column(sv->v, sv->in, sv->n, c, kept);
        sv->s[kept++] = sv->s[c];
    }
    for (int c = kept; c < sv->n; c++) sv->s[c] = 0;
    *r = kept;
    free(dropped);
}

static struct adapter *make_drop(const struct operands *x, json_t *lineage, struct error *err) {
    return change_modules(x, drop_change, lineage, err);
}

/* The new rank: x->rank or, if x->rank is 0, r plus or minus a quarter of r. One random bit selects
 * plus or minus for the whole adapter. */
static int32_t target_rank(const struct operands *x, int32_t i, int32_t r) {
    struct rng rng = rng_make(x->seed, RNG_MUTATE, 0, STREAM_RANK);
    int32_t step = MAX(1, r / 4);
    if (x->rank) return operand_rank(x, i, ADAPTER_RANK_MAX);
    struct operands wide = *x;
    wide.rank = MIN(r + step, ADAPTER_RANK_MAX);
    return rng_below(&rng, 2) ? operand_rank(&wide, i, ADAPTER_RANK_MAX) : MAX(1, r - step);
}

static void rank_change(const struct operands *x, int32_t i, struct svd *sv, int32_t *r) {
    *r = target_rank(x, i, sv->n);
}

static struct adapter *make_rank(const struct operands *x, json_t *lineage, struct error *err) {
    return change_modules(x, rank_change, lineage, err);
}

/* Initialises random modules again: A as PEFT does, B = 0, so that these modules have no effect
 * before training. */
static struct adapter *make_reinit(const struct operands *x, json_t *lineage, struct error *err) {
    (void)err;
    const struct adapter *a = x->parents[0];
    struct adapter *initialised = adapter_new(&a->shape, &a->config, x->seed);
    struct rng rng_forced = rng_make(x->seed, RNG_MUTATE, 0, STREAM_REINIT);
    uint32_t adapted = 0;
    for (int32_t i = 0; i < operand_modules(x); i++) adapted += a->loras[i].r > 0;
    uint32_t forced = rng_below(&rng_forced, adapted);
    float *data = xmalloc(a->n_data * sizeof *data);
    memcpy(data, a->data, a->n_data * sizeof *data);
    for (int32_t i = 0, index = 0; i < operand_modules(x); i++) {
        const struct lora *lo = &a->loras[i];
        struct rng rng = rng_make(x->seed, RNG_MUTATE, (uint32_t)i + 1, STREAM_REINIT);
        if (lo->r == 0) continue;
        bool hit = rng_uniform(&rng) < x->step;
        if (hit || (uint32_t)index == forced) {
            size_t n = (size_t)lo->r *
                       (size_t)(proj_in(&a->shape, i % N_PROJ) + proj_out(&a->shape, i % N_PROJ));
            memcpy(data + (lo->a - a->data), initialised->loras[i].a, n * sizeof *data);
        }
        index++;
    }
    adapter_release(initialised);
    return adapter_from_owned_data(&a->shape, &a->config, data, lineage);
}

#define ONE OPERATOR_MUTATION, WEIGHTING_NONE, 1, 1
const struct adapter_operator mutation_operators[] = {
    {"noise", "noise on three tensors in ten, relative to the tensor's standard deviation", ONE,
     "standard deviation, relative to the tensor's", 0.1f, 0, 10, make_noise, OPERAND_SEED},
    {"noise_absolute", "noise on three tensors in ten, not relative to the tensor", ONE,
     "deviation", 0.01f, 0, 10, make_noise_absolute, OPERAND_SEED},
    {"spectrum", "singular values times exp of noise; keeps the norm", ONE, "deviation of the log",
     0.2f, 0, 4, make_spectrum, OPERAND_SEED},
    {"rotate", "rotates left or right singular directions; keeps the norm", ONE,
     "noise, relative to a direction's length", 0.1f, 0, 4, make_rotate, OPERAND_SEED},
    {"drop", "random singular components are removed", ONE, "probability of a component", 0.1f, 0,
     1, make_drop, OPERAND_SEED},
    {"rank", "changes the rank to the given one, or by a quarter; new components are random", ONE,
     "norm of the new components, relative to the module's", 0.05f, 0, 1, make_rank,
     OPERAND_RANK | OPERAND_SEED},
    {"reinit", "random modules are initialised again, without effect at first", ONE,
     "probability of a module", 0.1f, 0, 1, make_reinit, OPERAND_SEED},
    {0},
};
