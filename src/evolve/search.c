/*
 * search: CMA-ES, particle swarm, a genetic algorithm, and random search.
 *
 * Invariants: `state` holds everything that is kept between calls, so `ask` is a pure function of
 * state, seed and generation: a searcher that is loaded between ask and tell computes the same
 * batch. Only + - × ÷ sqrt and math_* modify the state, in a fixed order. For every searcher the
 * first 1 + n doubles of the state are the best fitness and its vector. The function `*_view` of a
 * searcher defines the layout of the rest.
 */
#include "evolve/search.h"
#include "evolve/select.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct search_algorithm {
    const char *name;
    int max_n;
    size_t (*state_size)(int n, int batch); /* number of doubles of state after the best vector */
    /* first: [batch][n] initial members; center: [n] mean of the starts */
    void (*init)(struct search *s, const double *first, const double *center);
    void (*ask)(struct search *s);                                           /* fills x */
    void (*tell)(struct search *s, const double *fitness, const int *order); /* order: best first */
};

struct search {
    const struct search_algorithm *kind;
    struct search_options o; /* `searcher` is unused: `kind` is the algorithm */
    int n, batch;
    uint64_t seed;
    int64_t generation;
    bool has_batch; /* x holds the batch of this generation */
    size_t n_state;
    double *state, *x;    /* x: [batch][n] */
    double *basis, *axis; /* cma, computed by ask: [n][n] columns are axes, [n] their lengths */
};

#define AT(field) offsetof(struct search_options, field)
const struct option_row search_option_rows[] = {
    {"searcher", OPT_STRING, AT(searcher), "cma", 0, 0, "NAME", "cma, pso, ga or random"},
    {"batch", OPT_INT, AT(batch), "0", 0, SEARCH_MAX_BATCH, "N",
     "points per generation; 0: the searcher's default"},
    {"sigma", OPT_FLOAT, AT(sigma), "0.3", 1e-12, 1e6, "X", "initial step size"},
    {"sigma-min", OPT_FLOAT, AT(sigma_min), "1e-12", 0, 1e6, "X", "cma: smallest step size"},
    {"lower-bound", OPT_FLOAT, AT(lower_bound), "0", -1e9, 1e9, "X",
     "smallest value of a coordinate; bounds apply if lower < upper"},
    {"upper-bound", OPT_FLOAT, AT(upper_bound), "0", -1e9, 1e9, "X",
     "largest value of a coordinate"},
    {"inertia", OPT_FLOAT, AT(inertia), "0.2", 0, 10, "W",
     "pso: weight of the particle's velocity"},
    {"cognitive", OPT_FLOAT, AT(cognitive), "0.3", 0, 10, "W",
     "pso: weight of the particle's best point"},
    {"social", OPT_FLOAT, AT(social), "0.4", 0, 10, "W", "pso: weight of the swarm's best point"},
    {"repel", OPT_FLOAT, AT(repel), "0.05", 0, 10, "W",
     "pso: repulsion from the swarm's worst point"},
    {"step", OPT_FLOAT, AT(step), "0.5", 0, 10, "X",
     "pso: fraction of the velocity that is added to the position"},
    {"step-decay", OPT_FLOAT, AT(step_decay), "0.95", 0, 1, "X",
     "pso: factor of the step per round"},
    {"step-min", OPT_FLOAT, AT(step_min), "0.1", 0, 10, "X", "pso: smallest step"},
    {"patience", OPT_INT, AT(patience), "3", 1, 1e6, "N",
     "pso: rounds without progress before a particle restarts at its best point"},
    {"blx-alpha", OPT_FLOAT, AT(blx_alpha), "0.5", 0, 10, "A",
     "ga: alpha of blend crossover (BLX-alpha)"},
    {"mutation-rate", OPT_FLOAT, AT(mutation_rate), "0.1", 0, 1, "P",
     "ga: mutation probability per coordinate"},
    {"tournament-size", OPT_INT, AT(tournament_size), "2", 1, 1000, "N",
     "ga: candidates per tournament"},
    {0},
};

static struct rng member_rng(const struct search *s, int member) {
    return rng_make(s->seed, RNG_MUTATE, (uint32_t)s->generation, (uint32_t)member);
}

static double dot(const double *a, const double *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static size_t vector_bytes(const struct search *s) {
    return (size_t)s->n * sizeof(double);
}

static double *algorithm_state(const struct search *s) {
    return s->state + 1 + s->n;
}

static double *row(const struct search *s, double *rows, int i) {
    return rows + (size_t)i * (size_t)s->n;
}

/* CMA-ES (Hansen, "The CMA evolution strategy: a tutorial", 2016), with the tutorial's default
 * parameters and without negative weights. */

struct cma {
    double *sigma, *mean, *path_sigma, *path_c, *cov; /* 1, [n], [n], [n], [n][n] */
};

static struct cma cma_view(const struct search *s) {
    double *p = algorithm_state(s);
    int n = s->n;
    return (struct cma){p, p + 1, p + 1 + n, p + 1 + 2 * n, p + 1 + 3 * n};
}

static size_t cma_size(int n, int batch) {
    (void)batch;
    return 1 + 3 * (size_t)n + (size_t)n * (size_t)n;
}

static void cma_init(struct search *s, const double *first, const double *center) {
    (void)first;
    struct cma c = cma_view(s);
    *c.sigma = s->o.sigma;
    memcpy(c.mean, center, vector_bytes(s));
    for (int i = 0; i < s->n; i++) row(s, c.cov, i)[i] = 1;
}

/* One Jacobi rotation: rotates rows and columns i and j of `a`, so that a[i][j] becomes 0, and
 * columns i and j of v. */
static void jacobi_rotate(double *a, double *v, int n, int i, int j) {
    double theta = (a[j * n + j] - a[i * n + i]) / (2 * a[i * n + j]);
    double t = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(1 + theta * theta));
    double c = 1 / sqrt(1 + t * t), s = t * c;
    for (int k = 0; k < n; k++) {
        double x = a[k * n + i], y = a[k * n + j];
        a[k * n + i] = c * x - s * y;
        a[k * n + j] = s * x + c * y;
    }
    for (int k = 0; k < n; k++) {
        double x = a[i * n + k], y = a[j * n + k];
        a[i * n + k] = c * x - s * y;
        a[j * n + k] = s * x + c * y;
        x = v[k * n + i], y = v[k * n + j];
        v[k * n + i] = c * x - s * y;
        v[k * n + j] = s * x + c * y;
    }
    a[i * n + j] = a[j * n + i] = 0;
}

/* Eigendecomposition of the symmetric matrix a by cyclic Jacobi rotations in a fixed order. The
 * columns of v become the eigenvectors, and the diagonal of `a` the eigenvalues. */
static void jacobi_eigen(double *a, double *v, int n) {
    for (int i = 0; i < n * n; i++) v[i] = i % (n + 1) == 0;
    bool rotated = true;
    for (int sweep = 0; sweep < 40 && rotated; sweep++) {
        rotated = false;
        for (int i = 0; i < n; i++)
            for (int j = i + 1; j < n; j++) {
                double size = sqrt(fabs(a[i * n + i])) * sqrt(fabs(a[j * n + j]));
                if (!(fabs(a[i * n + j]) > 0x1p-50 * size)) continue;
                jacobi_rotate(a, v, n, i, j);
                rotated = true;
            }
    }
}

/* Computes the axes of the sampling ellipsoid. A lower bound prevents that rounding gives an axis
 * of length 0. */
static void cma_compute_axes(struct search *s) {
    int n = s->n;
    double *a = xcalloc((size_t)n * (size_t)n, sizeof *a), longest = 0;
    memcpy(a, cma_view(s).cov, (size_t)n * vector_bytes(s));
    jacobi_eigen(a, s->basis, n);
    for (int i = 0; i < n; i++) longest = fmax(longest, a[i * n + i]);
    for (int i = 0; i < n; i++) s->axis[i] = sqrt(fmax(a[i * n + i], 1e-14 * longest));
    free(a);
}

/* Samples mean + σ C^(1/2) z with the symmetric root of C. Unlike other roots, it does not depend
 * on the directions of axes of equal length, which rounding determines. */
static void cma_ask(struct search *s) {
    struct cma c = cma_view(s);
    int n = s->n;
    double z[SEARCH_MAX_DIM_CMA];
    cma_compute_axes(s);
    for (int m = 0; m < s->batch; m++) {
        struct rng r = member_rng(s, m);
        double *x = row(s, s->x, m);
        memcpy(x, c.mean, vector_bytes(s));
        for (int i = 0; i < n; i++) z[i] = *c.sigma * (double)rng_normal(&r);
        for (int k = 0; k < n; k++) {
            double projection = 0;
            for (int i = 0; i < n; i++) projection += s->basis[i * n + k] * z[i];
            for (int i = 0; i < n; i++) x[i] += s->basis[i * n + k] * s->axis[k] * projection;
        }
    }
}

/* Learning rates, from n and the recombination weights. */
struct cma_rates {
    int mu;
    double *weight;                                 /* [mu] */
    double mu_eff;                                  /* effective number of selected points */
    double c_sigma, d_sigma, c_c, c_1, c_mu, chi_n; /* names of the tutorial */
};

static struct cma_rates cma_rates(int n_int, int batch) {
    double n = n_int, sum = 0, squares = 0;
    struct cma_rates r = {.mu = MAX(batch / 2, 1)};
    r.weight = xcalloc((size_t)r.mu, sizeof *r.weight);
    for (int i = 0; i < r.mu; i++) {
        r.weight[i] = math_log((batch + 1) / 2.0) - math_log(i + 1);
        sum += r.weight[i];
    }
    for (int i = 0; i < r.mu; i++) r.weight[i] /= sum, squares += r.weight[i] * r.weight[i];
    r.mu_eff = 1 / squares;
    r.c_sigma = (r.mu_eff + 2) / (n + r.mu_eff + 5);
    r.d_sigma = 1 + 2 * fmax(0, sqrt((r.mu_eff - 1) / (n + 1)) - 1) + r.c_sigma;
    r.c_c = (4 + r.mu_eff / n) / (n + 4 + 2 * r.mu_eff / n);
    r.c_1 = 2 / ((n + 1.3) * (n + 1.3) + r.mu_eff);
    r.c_mu = fmin(1 - r.c_1, 2 * (r.mu_eff - 2 + 1 / r.mu_eff) / ((n + 2) * (n + 2) + r.mu_eff));
    r.chi_n = sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n)); // E‖N(0, I)‖
    return r;
}

/* Updates the evolution path of σ, p = (1 - c_σ) p + √(c_σ (2 - c_σ) μ_eff) C^(-1/2) step. Returns
 * its length. */
static double cma_update_sigma_path(struct search *s, const struct cma_rates *r,
                                    const double *step) {
    struct cma c = cma_view(s);
    int n = s->n;
    double gain = sqrt(r->c_sigma * (2 - r->c_sigma) * r->mu_eff);
    for (int i = 0; i < n; i++) c.path_sigma[i] *= 1 - r->c_sigma;
    for (int k = 0; k < n; k++) {
        double z = 0;
        for (int i = 0; i < n; i++) z += s->basis[i * n + k] * step[i];
        z *= gain / s->axis[k];
        for (int i = 0; i < n; i++) c.path_sigma[i] += s->basis[i * n + k] * z;
    }
    return sqrt(dot(c.path_sigma, c.path_sigma, n));
}

static void cma_update_covariance(struct search *s, const struct cma_rates *r, double keep,
                                  const double *const *y) {
    struct cma c = cma_view(s);
    int n = s->n;
    for (int i = 0; i < n; i++)
        for (int j = 0; j <= i; j++) {
            double sum = 0;
            for (int k = 0; k < r->mu; k++) sum += r->weight[k] * y[k][i] * y[k][j];
            double v = keep * c.cov[i * n + j] + r->c_1 * c.path_c[i] * c.path_c[j] + r->c_mu * sum;
            c.cov[i * n + j] = c.cov[j * n + i] = v;
        }
}

/* Sets y[mu] to the steps of the better half of the points, in units of σ; the steps overwrite the
 * points. Adds the weighted mean of the steps to `step`. */
static void cma_selected_steps(struct search *s, const struct cma_rates *r, const int *order,
                               const double **y, double *step) {
    struct cma c = cma_view(s);
    for (int k = 0; k < r->mu; k++) {
        double *v = row(s, s->x, order[k]);
        for (int i = 0; i < s->n; i++) {
            v[i] = (v[i] - c.mean[i]) / *c.sigma;
            step[i] += r->weight[k] * v[i];
        }
        y[k] = v;
    }
}

static void cma_tell(struct search *s, const double *fitness, const int *order) {
    (void)fitness;
    struct cma c = cma_view(s);
    struct cma_rates r = cma_rates(s->n, s->batch);
    int n = s->n;
    double step[SEARCH_MAX_DIM_CMA] = {0}, longest = 0;
    const double **y = xcalloc((size_t)r.mu, sizeof *y);
    cma_selected_steps(s, &r, order, y, step);
    for (int i = 0; i < n; i++) c.mean[i] += *c.sigma * step[i];
    double length = cma_update_sigma_path(s, &r, step);
    // h_σ of the tutorial: while σ still grows fast, path_c gets no step, because the step would
    // stretch C too much
    double path_norm2 = 1 - math_pow(1 - r.c_sigma, 2.0 * (double)(s->generation + 1));
    bool stalled = !(length / sqrt(path_norm2) < (1.4 + 2 / (n + 1.0)) * r.chi_n);
    double gain = stalled ? 0 : sqrt(r.c_c * (2 - r.c_c) * r.mu_eff);
    for (int i = 0; i < n; i++) c.path_c[i] = (1 - r.c_c) * c.path_c[i] + gain * step[i];
    double keep = 1 - r.c_1 - r.c_mu + (stalled ? r.c_1 * r.c_c * (2 - r.c_c) : 0);
    cma_update_covariance(s, &r, keep, y);
    *c.sigma *= math_exp(fmin(1, r.c_sigma / r.d_sigma * (length / r.chi_n - 1)));
    for (int i = 0; i < n; i++) longest = fmax(longest, s->axis[i]);
    *c.sigma = fmax(*c.sigma, s->o.sigma_min / longest);
    free(r.weight);
    free(y);
}

/*
 * Particle swarm as in Model Swarms (Feng et al. 2025). With weights w = coefficient × uniform,
 * divided by their sum,
 *     v ← w_v v + w_p (personal best - x) + w_g (swarm's best - x) + w_r (x - swarm's worst)
 *     x ← x + step v
 * and the step shrinks. A particle without a new personal best for `patience` rounds restarts at
 * its best point with zero velocity.
 */

struct pso {
    double *step, *worst_fitness, *worst; /* 1, 1, [n] */
    double *stale, *fitness; /* [batch] rounds since the last new personal best; its fitness */
    double *x, *v, *best;    /* [batch][n] */
};

static struct pso pso_view(const struct search *s) {
    double *p = algorithm_state(s);
    size_t n = (size_t)s->n, b = (size_t)s->batch;
    struct pso o = {.step = p, .worst_fitness = p + 1, .worst = p + 2};
    o.stale = o.worst + n;
    o.fitness = o.stale + b;
    o.x = o.fitness + b;
    o.v = o.x + b * n;
    o.best = o.v + b * n;
    return o;
}

static size_t pso_size(int n, int batch) {
    return 2 + (size_t)n + 2 * (size_t)batch + 3 * (size_t)batch * (size_t)n;
}

/* The initial velocity is the difference between a random particle and the particle itself. */
static void pso_init(struct search *s, const double *first, const double *center) {
    (void)center;
    struct pso p = pso_view(s);
    *p.step = s->o.step;
    *p.worst_fitness = INFINITY;
    memcpy(p.x, first, (size_t)s->batch * vector_bytes(s));
    memcpy(p.best, first, (size_t)s->batch * vector_bytes(s));
    for (int m = 0; m < s->batch; m++) {
        struct rng r = rng_make(s->seed, RNG_MUTATE, UINT32_MAX, (uint32_t)m);
        const double *target = row(s, p.x, (int)rng_below(&r, (uint32_t)s->batch));
        for (int i = 0; i < s->n; i++) row(s, p.v, m)[i] = target[i] - row(s, p.x, m)[i];
        p.fitness[m] = -INFINITY;
    }
}

static void pso_ask(struct search *s) {
    memcpy(s->x, pso_view(s).x, (size_t)s->batch * vector_bytes(s));
}

static void pso_move(struct search *s, struct pso *p, int m) {
    struct rng r = member_rng(s, m);
    const double *best = row(s, p->best, m), *swarm_best = s->state + 1;
    double *x = row(s, p->x, m), *v = row(s, p->v, m), sum = 0;
    double w[4] = {s->o.inertia, s->o.cognitive, s->o.social, s->o.repel};
    for (int k = 0; k < 4; k++) w[k] *= (double)rng_uniform(&r), sum += w[k];
    for (int k = 0; k < 4; k++) w[k] /= sum > 0 ? sum : 1;
    for (int i = 0; i < s->n; i++) {
        v[i] = w[0] * v[i] + w[1] * (best[i] - x[i]) + w[2] * (swarm_best[i] - x[i]) +
               w[3] * (x[i] - p->worst[i]);
        x[i] += *p->step * v[i];
    }
}

static void pso_tell(struct search *s, const double *fitness, const int *order) {
    struct pso p = pso_view(s);
    int last = order[s->batch - 1];
    memcpy(p.x, s->x, (size_t)s->batch * vector_bytes(s)); // after clipping to the box
    if (fitness[last] < *p.worst_fitness) {
        *p.worst_fitness = fitness[last];
        memcpy(p.worst, row(s, p.x, last), vector_bytes(s));
    }
    for (int m = 0; m < s->batch; m++) {
        if (fitness[m] > p.fitness[m]) {
            p.fitness[m] = fitness[m];
            p.stale[m] = 0;
            memcpy(row(s, p.best, m), row(s, p.x, m), vector_bytes(s));
        } else if (++p.stale[m] >= (double)s->o.patience) {
            p.stale[m] = 0;
            memcpy(row(s, p.x, m), row(s, p.best, m), vector_bytes(s));
            memset(row(s, p.v, m), 0, vector_bytes(s));
        }
    }
    for (int m = 0; m < s->batch; m++) pso_move(s, &p, m);
    *p.step = fmax(*p.step * s->o.step_decay, s->o.step_min);
}

/* A genetic algorithm: parents by tournament, BLX-α (Eshelman & Schaffer 1993), noise of a tenth of
 * the pool's range, and survival of the best of parents and children. */

struct ga {
    double *fitness, *x; /* [batch], [batch][n] */
};

static struct ga ga_view(const struct search *s) {
    return (struct ga){algorithm_state(s), algorithm_state(s) + s->batch};
}

static size_t ga_size(int n, int batch) {
    return (size_t)batch + (size_t)batch * (size_t)n;
}

static void ga_init(struct search *s, const double *first, const double *center) {
    (void)center;
    memcpy(ga_view(s).x, first, (size_t)s->batch * vector_bytes(s));
}

static void ga_child(struct search *s, const struct ga *g, const double *range, int m) {
    struct rng r = member_rng(s, m);
    struct select_pool pool = {
        .n = s->batch, .fitness = g->fitness, .tournament = (int)s->o.tournament_size};
    int parents[2];
    selection_find("tournament")->pick(&pool, &r, parents, 2);
    const double *a = row(s, g->x, parents[0]), *b = row(s, g->x, parents[1]);
    for (int i = 0; i < s->n; i++) {
        double t = (1 + 2 * s->o.blx_alpha) * (double)rng_uniform(&r) - s->o.blx_alpha;
        double v = a[i] + t * (b[i] - a[i]);
        if ((double)rng_uniform(&r) < s->o.mutation_rate)
            v += 0.1 * range[i] * (double)rng_normal(&r);
        row(s, s->x, m)[i] = v;
    }
}

static void ga_ask(struct search *s) {
    struct ga g = ga_view(s);
    double *range = xcalloc((size_t)s->n, sizeof *range);
    for (int i = 0; i < s->n; i++) {
        double lo = INFINITY, hi = -INFINITY;
        for (int m = 0; m < s->batch; m++) {
            lo = fmin(lo, row(s, g.x, m)[i]);
            hi = fmax(hi, row(s, g.x, m)[i]);
        }
        range[i] = hi - lo;
    }
    if (s->generation == 0) memcpy(s->x, g.x, (size_t)s->batch * vector_bytes(s));
    for (int m = 0; s->generation && m < s->batch; m++) ga_child(s, &g, range, m);
    free(range);
}

static void ga_tell(struct search *s, const double *fitness, const int *order) {
    (void)order;
    struct ga g = ga_view(s);
    int old = s->generation ? s->batch : 0, all = old + s->batch;
    double *x = xcalloc((size_t)all, vector_bytes(s)), *f = xcalloc((size_t)all, sizeof *f);
    int *order_of_all = xcalloc((size_t)all, sizeof *order_of_all);
    memcpy(x, g.x, (size_t)old * vector_bytes(s));
    memcpy(f, g.fitness, (size_t)old * sizeof *f);
    memcpy(x + (size_t)old * (size_t)s->n, s->x, (size_t)s->batch * vector_bytes(s));
    memcpy(f + old, fitness, (size_t)s->batch * sizeof *f);
    select_argsort(f, all, order_of_all);
    for (int m = 0; m < s->batch; m++) {
        g.fitness[m] = f[order_of_all[m]];
        memcpy(row(s, g.x, m), row(s, x, order_of_all[m]), vector_bytes(s));
    }
    free(x);
    free(f);
    free(order_of_all);
}

/* Random search, the baseline of the other searchers. */

static size_t random_size(int n, int batch) {
    (void)batch;
    return (size_t)n;
}

static void random_init(struct search *s, const double *first, const double *center) {
    (void)first;
    memcpy(algorithm_state(s), center, vector_bytes(s));
}

static void random_ask(struct search *s) {
    for (int m = 0; m < s->batch; m++) {
        struct rng r = member_rng(s, m);
        for (int i = 0; i < s->n; i++)
            row(s, s->x, m)[i] = s->o.upper_bound > s->o.lower_bound
                                     ? s->o.lower_bound + (s->o.upper_bound - s->o.lower_bound) *
                                                              (double)rng_uniform(&r)
                                     : algorithm_state(s)[i] + s->o.sigma * (double)rng_normal(&r);
    }
}

static void random_tell(struct search *s, const double *fitness, const int *order) {
    (void)s, (void)fitness, (void)order;
}

static const struct search_algorithm search_algorithms[] = {
    {"cma", SEARCH_MAX_DIM_CMA, cma_size, cma_init, cma_ask, cma_tell},
    {"pso", SEARCH_MAX_DIM, pso_size, pso_init, pso_ask, pso_tell},
    {"ga", SEARCH_MAX_DIM, ga_size, ga_init, ga_ask, ga_tell},
    {"random", SEARCH_MAX_DIM, random_size, random_init, random_ask, random_tell},
};

static const struct search_algorithm *search_algorithm_find(const char *name) {
    for (size_t i = 0; name && i < ARRAY_LEN(search_algorithms); i++)
        if (strcmp(search_algorithms[i].name, name) == 0) return &search_algorithms[i];
    return NULL;
}

/* Checks the options and allocates a searcher with a zero state. */
static struct search *search_alloc(const struct search_options *o, int n, uint64_t seed,
                                   struct error *err) {
    const struct search_algorithm *kind = search_algorithm_find(o->searcher);
    if (!kind) {
        error_set(err, ERR_USAGE, "searcher '%s' is not known; there are cma, pso, ga, random",
                  o->searcher ? o->searcher : "");
        return NULL;
    }
    if (n < 1 || n > kind->max_n) {
        error_set(err, ERR_USAGE, "searcher '%s' takes 1 to %d numbers, not %d", kind->name,
                  kind->max_n, n);
        return NULL;
    }
    int batch = o->batch ? (int)o->batch : 4 + (int)(3 * math_log(n));
    if (batch < 2 || batch > SEARCH_MAX_BATCH) {
        error_set(err, ERR_USAGE, "a batch has 2 to %d points, not %d", SEARCH_MAX_BATCH, batch);
        return NULL;
    }
    struct search *s = xcalloc(1, sizeof *s);
    *s = (struct search){.kind = kind, .o = *o, .n = n, .batch = batch, .seed = seed};
    s->o.searcher = NULL;
    s->o.batch = batch;
    s->n_state = 1 + (size_t)n + kind->state_size(n, batch);
    s->state = try_calloc(s->n_state, sizeof(double), err);
    s->x = try_calloc((size_t)batch * (size_t)n, sizeof(double), err);
    s->basis = try_calloc(kind->ask == cma_ask ? (size_t)n * (size_t)n : 1, sizeof(double), err);
    s->axis = try_calloc((size_t)n, sizeof(double), err);
    if (s->state && s->x && s->basis && s->axis) return s;
    search_free(s);
    return NULL;
}

/* Sets first [batch][n]: the initial members of pso and ga. */
static void initial_members(const struct search *s, const double *starts, int n_starts,
                            double *first) {
    for (int m = 0; m < s->batch; m++) {
        struct rng r = rng_make(s->seed, RNG_INIT, 0, (uint32_t)m);
        int a = m, b = m;
        if (m >= n_starts) {
            a = (int)rng_below(&r, (uint32_t)n_starts);
            b = n_starts > 1 ? (int)rng_below(&r, (uint32_t)n_starts - 1) : a;
            b += n_starts > 1 && b >= a;
        }
        double t = (double)rng_uniform(&r), noise = m && n_starts == 1 ? s->o.sigma : 0;
        for (int i = 0; i < s->n; i++) {
            double from = starts[(size_t)a * (size_t)s->n + (size_t)i],
                   to = starts[(size_t)b * (size_t)s->n + (size_t)i];
            first[(size_t)m * (size_t)s->n + (size_t)i] =
                from + t * (to - from) + (noise > 0 ? noise * (double)rng_normal(&r) : 0);
        }
    }
}

struct search *search_new(const struct search_options *o, const double *starts, int n_starts, int n,
                          uint64_t seed, struct error *err) {
    CHECK(n_starts >= 1);
    struct search *s = search_alloc(o, n, seed, err);
    if (!s) return NULL;
    double *first = xcalloc((size_t)s->batch, vector_bytes(s)),
           *center = xcalloc(1, vector_bytes(s));
    initial_members(s, starts, n_starts, first);
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < n_starts; k++) center[i] += starts[(size_t)k * (size_t)n + (size_t)i];
        center[i] /= n_starts;
    }
    s->state[0] = -INFINITY;
    s->kind->init(s, first, center);
    free(first);
    free(center);
    return s;
}

void search_free(struct search *s) {
    if (!s) return;
    free(s->state);
    free(s->x);
    free(s->basis);
    free(s->axis);
    free(s);
}

int search_batch(const struct search *s) {
    return s->batch;
}

int64_t search_generation(const struct search *s) {
    return s->generation;
}

const double *search_ask(struct search *s) {
    if (s->has_batch) return s->x;
    s->kind->ask(s);
    for (int i = 0; s->o.upper_bound > s->o.lower_bound && i < s->batch * s->n; i++)
        s->x[i] = fmin(s->o.upper_bound, fmax(s->o.lower_bound, s->x[i]));
    s->has_batch = true;
    return s->x;
}

void search_tell(struct search *s, const double *fitness) {
    double *f = xcalloc((size_t)s->batch, sizeof *f);
    int *order = xcalloc((size_t)s->batch, sizeof *order);
    search_ask(s); // a searcher that was loaded after ask computes its batch again
    for (int m = 0; m < s->batch; m++) f[m] = fitness[m] != fitness[m] ? -INFINITY : fitness[m];
    select_argsort(f, s->batch, order);
    if (f[order[0]] > s->state[0]) {
        s->state[0] = f[order[0]];
        memcpy(s->state + 1, row(s, s->x, order[0]), vector_bytes(s));
    }
    s->kind->tell(s, f, order);
    s->generation++;
    s->has_batch = false;
    free(f);
    free(order);
}

const double *search_best(const struct search *s, double *fitness) {
    if (fitness) *fitness = s->state[0];
    return s->state[0] > -INFINITY ? s->state + 1 : NULL;
}

const double *search_center(const struct search *s) {
    return s->kind->ask == cma_ask ? cma_view(s).mean : search_best(s, NULL);
}

double mutation_step_adapt(double step, double measured, double target, double gain) {
    CHECK(step > 0 && target > 0 && gain > 0);
    if (!(measured > 0)) return 2 * step;
    return step * fmin(2, fmax(0.5, math_pow(target / measured, gain)));
}

/* saving: options by their rows; infinite fitness as strings, because JSON has no infinity */

static json_t *number_json(double v) {
    return isfinite(v) ? json_real(v) : json_string(v > 0 ? "inf" : "-inf");
}

static bool number_parse(const json_t *v, double *out) {
    const char *text = json_string_value(v);
    *out = json_number_value(v);
    if (text) *out = strcmp(text, "inf") == 0 ? INFINITY : -INFINITY;
    return json_is_number(v) || (text && (*out > 0 || strcmp(text, "-inf") == 0));
}

json_t *search_save(const struct search *s) {
    json_t *options = json_object(), *state = json_array();
    for (const struct option_row *r = search_option_rows; r->name; r++) {
        const void *field = (const char *)&s->o + r->offset;
        if (r->type == OPT_INT)
            json_object_set_new(options, r->name, json_integer(*(const int64_t *)field));
        if (r->type == OPT_FLOAT)
            json_object_set_new(options, r->name, number_json(*(const double *)field));
    }
    for (size_t i = 0; i < s->n_state; i++) json_array_append_new(state, number_json(s->state[i]));
    return json_pack("{s:s,s:i,s:I,s:I,s:o,s:o}", "searcher", s->kind->name, "numbers", s->n,
                     "seed", (json_int_t)s->seed, "generation", (json_int_t)s->generation,
                     "options", options, "state", state);
}

static int options_load(const json_t *v, struct search_options *o, struct error *err) {
    for (const struct option_row *r = search_option_rows; r->name; r++) {
        const json_t *x = json_object_get(v, r->name);
        void *field = (char *)o + r->offset;
        if (r->type == OPT_STRING) continue;
        bool integer = r->type == OPT_INT && json_is_integer(x);
        double d = json_number_value(x);
        if (!(integer || (r->type == OPT_FLOAT && json_is_number(x))) || d < r->min || d > r->max)
            return error_set(err, ERR_FORMAT, "a saved search has no valid '%s'", r->name);
        if (integer)
            *(int64_t *)field = json_integer_value(x);
        else
            *(double *)field = d;
    }
    return OK;
}

struct search *search_load(const json_t *v, struct error *err) {
    const char *name;
    json_int_t n, seed, generation;
    json_t *options, *state;
    struct search_options o = {0};
    if (json_unpack((json_t *)(uintptr_t)v, "{s:s,s:I,s:I,s:I,s:o,s:o}", "searcher", &name,
                    "numbers", &n, "seed", &seed, "generation", &generation, "options", &options,
                    "state", &state)) {
        error_set(
            err, ERR_FORMAT,
            "a saved search lacks one of searcher, numbers, seed, generation, options, state");
        return NULL;
    }
    if (options_load(options, &o, err) != OK) return NULL;
    if (n < 1 || n > SEARCH_MAX_DIM || generation < 0 || generation > INT32_MAX) {
        error_set(err, ERR_FORMAT, "a saved search has %lld numbers and generation %lld",
                  (long long)n, (long long)generation);
        return NULL;
    }
    o.searcher = (char *)(uintptr_t)name;
    struct search *s = search_alloc(&o, (int)n, (uint64_t)seed, err);
    if (!s) return NULL;
    s->generation = generation;
    bool fits = json_array_size(state) == s->n_state;
    for (size_t i = 0; fits && i < s->n_state; i++)
        fits = number_parse(json_array_get(state, i), &s->state[i]);
    if (fits) return s;
    error_set(err, ERR_FORMAT, "the state of a saved search is not %zu numbers", s->n_state);
    search_free(s);
    return NULL;
}
