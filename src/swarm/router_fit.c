/*
 * router_fit: fits the weights of a router, and its nested cross-validation.
 *
 * An agent's weights w minimise Σ log(1 + exp(-y z)) + l2/2 |w|², z = w·x, with the intercept w[0]
 * outside of the penalty; one right and one wrong answer of weight 1/2 to a question without
 * features bound it. The problem is convex; Newton steps whose equations are solved by conjugate
 * gradients reach its minimum (Lin, Weng & Keerthi 2008, "Trust Region Newton Method for Logistic
 * Regression", here with a line search).
 *
 * Every sum has a fixed order, and one thread does one fit, so that the bits do not depend on the
 * number of threads. Invariant: fit (f, g) has used no answer to a question of fold f or g; (f, f)
 * leaves out fold f only; the last fit leaves out none.
 */
#define _GNU_SOURCE
#include "swarm/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    N_PAIRS = ROUTER_FOLDS * (ROUTER_FOLDS + 1) / 2, /* f <= g */
    NEWTON_STEPS = 30,
    CG_STEPS = 100,
    HALVINGS = 20
};
/* From strong to weak: each fit begins at the one before, and of equally good ones the strongest is
 * chosen. The first leaves only the intercepts, which choose the most accurate agent. */
static const double l2_values[] = {1e6, 30, 10, 3, 1, 0.3, 0.1};
enum { N_L2 = ARRAY_LEN(l2_values) };

int router_fold(const char *question) {
    return (int)(hash_fnv1a(question, strlen(question)) % ROUTER_FOLDS);
}

/* one agent */

/* The questions that a fit uses, with y 1 for a right answer of the agent; and its scratch. */
struct fit_problem {
    const struct question_features *x; /* [n] */
    const uint8_t *y;                  /* [n] */
    const int *items;                  /* [n] their indices in x and y */
    int n;
    double l2;
    double *curvature; /* [n] p (1 - p) of each question */
    double prior;      /* the same of the two answers that bound the intercept */
};

/* log(1 + exp(z)) */
static double softplus(double z) {
    return fmax(z, 0) + math_log(1 + math_exp(-fabs(z)));
}

static double dot(const double *a, const double *b) {
    double sum = 0;
    for (int j = 0; j < ROUTER_WEIGHTS; j++) sum += a[j] * b[j];
    return sum;
}

static double objective(const struct fit_problem *p, const double *w) {
    double sum = (softplus(w[0]) + softplus(-w[0])) / 2 + p->l2 / 2 * (dot(w, w) - w[0] * w[0]);
    for (int i = 0; i < p->n; i++) {
        double z = router_logit(w, &p->x[p->items[i]]);
        sum += softplus(p->y[p->items[i]] ? -z : z);
    }
    return sum;
}

static void features_add(double *out, const struct question_features *f, double factor) {
    out[0] += factor;
    for (int k = 0; k < f->n; k++) out[f->v[k].index] += factor * (double)f->v[k].value;
}

/* The gradient at w; also sets the curvatures, for hessian_times. */
static void gradient(struct fit_problem *p, const double *w, double *out) {
    double prob = 1 / (1 + math_exp(-w[0]));
    for (int j = 1; j < ROUTER_WEIGHTS; j++) out[j] = p->l2 * w[j];
    out[0] = prob - 0.5;
    p->prior = prob * (1 - prob);
    for (int i = 0; i < p->n; i++) {
        const struct question_features *x = &p->x[p->items[i]];
        prob = 1 / (1 + math_exp(-router_logit(w, x)));
        p->curvature[i] = prob * (1 - prob);
        features_add(out, x, prob - p->y[p->items[i]]);
    }
}

static void hessian_times(const struct fit_problem *p, const double *v, double *out) {
    for (int j = 1; j < ROUTER_WEIGHTS; j++) out[j] = p->l2 * v[j];
    out[0] = p->prior * v[0];
    for (int i = 0; i < p->n; i++) {
        const struct question_features *x = &p->x[p->items[i]];
        features_add(out, x, p->curvature[i] * router_logit(v, x));
    }
}

/* The Newton step: solves H step = -g approximately, by conjugate gradients. */
static void newton_step(const struct fit_problem *p, const double *g, double *step) {
    double r[ROUTER_WEIGHTS], d[ROUTER_WEIGHTS], h[ROUTER_WEIGHTS];
    double norm = dot(g, g), left = norm;
    memset(step, 0, sizeof r);
    for (int j = 0; j < ROUTER_WEIGHTS; j++) d[j] = r[j] = -g[j];
    for (int i = 0; i < CG_STEPS && left > 1e-6 * norm; i++) {
        hessian_times(p, d, h);
        double alpha = left / dot(d, h), before = left;
        for (int j = 0; j < ROUTER_WEIGHTS; j++) {
            step[j] += alpha * d[j];
            r[j] -= alpha * h[j];
        }
        left = dot(r, r);
        for (int j = 0; j < ROUTER_WEIGHTS; j++) d[j] = r[j] + left / before * d[j];
    }
}

/* Moves w[ROUTER_WEIGHTS] to the minimum. */
static void minimise(struct fit_problem *p, double *w) {
    double g[ROUTER_WEIGHTS], step[ROUTER_WEIGHTS], next[ROUTER_WEIGHTS];
    double value = objective(p, w), before = 0, t;
    for (int it = 0; it < NEWTON_STEPS; it++) {
        gradient(p, w, g);
        if (dot(g, g) < 1e-10 * (1 + p->n)) return;
        newton_step(p, g, step);
        double slope = dot(g, step);
        int halved = 0;
        for (t = 1, before = value; halved <= HALVINGS; t /= 2, halved++) {
            for (int j = 0; j < ROUTER_WEIGHTS; j++) next[j] = w[j] + t * step[j];
            value = objective(p, next);
            if (value <= before + 1e-4 * t * slope) break;
        }
        if (halved > HALVINGS) return; // the step is below the rounding errors
        memcpy(w, next, sizeof next);
    }
}

/* all fits */

struct fit_work {
    const struct router_data *d;
    const struct question_features *x; /* [n] */
    const int *fold;                   /* [n] */
    double *w;                         /* [N_PAIRS + 1][n_agents][N_L2][ROUTER_WEIGHTS] */
};

static int pair_index(int f, int g) {
    int lo = MIN(f, g), hi = MAX(f, g);
    return hi * (hi + 1) / 2 + lo;
}

static double *weights_at(const struct fit_work *k, int pair, int agent, int l2) {
    size_t fit = (size_t)pair * (size_t)k->d->n_agents + (size_t)agent;
    return k->w + (fit * N_L2 + (size_t)l2) * ROUTER_WEIGHTS;
}

/* The questions that are in neither fold of the pair. Returns their number. */
static int pair_items(const struct fit_work *k, int pair, int *items) {
    int n = 0;
    for (int i = 0; i < k->d->n; i++) {
        bool left_out = false;
        for (int g = 0; g < ROUTER_FOLDS; g++) left_out |= pair == pair_index(k->fold[i], g);
        if (!left_out) items[n++] = i;
    }
    return n;
}

/* Fits begin … end - 1 of all pairs and agents, each with all regularisations. */
static void fits_run(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct fit_work *k = ctx;
    const struct router_data *d = k->d;
    int *items = xmalloc((size_t)MAX(d->n, 1) * sizeof *items);
    double *curvature = xmalloc((size_t)MAX(d->n, 1) * sizeof *curvature);
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int pair = (int)(i / d->n_agents), agent = (int)(i % d->n_agents);
        struct fit_problem p = {.x = k->x,
                                .y = d->right + (size_t)agent * (size_t)d->n,
                                .items = items,
                                .n = pair_items(k, pair, items),
                                .curvature = curvature};
        for (int l = 0; l < N_L2; l++) {
            double *w = weights_at(k, pair, agent, l);
            if (l > 0) memcpy(w, weights_at(k, pair, agent, l - 1), ROUTER_WEIGHTS * sizeof *w);
            p.l2 = l2_values[l];
            minimise(&p, w);
        }
    }
    free(items);
    free(curvature);
}

/* selection */

static int route_by(const struct fit_work *k, int pair, int l2, int item) {
    double best_logit = 0;
    int best = 0;
    for (int a = 0; a < k->d->n_agents; a++) {
        double z = router_logit(weights_at(k, pair, a, l2), &k->x[item]);
        if (a > 0 && !(z > best_logit)) continue;
        best = a;
        best_logit = z;
    }
    return best;
}

/* The index of the regularisation with the most right routes of the questions outside fold f, each
 * by the fit without their fold and f. f -1: of all questions. */
static int l2_select(const struct fit_work *k, int f) {
    const struct router_data *d = k->d;
    int best = 0;
    int64_t best_right = -1;
    for (int l = 0; l < N_L2; l++) {
        int64_t right = 0;
        for (int i = 0; i < d->n; i++) {
            int g = k->fold[i];
            if (g == f) continue;
            int agent = route_by(k, pair_index(f < 0 ? g : f, g), l, i);
            right += d->right[(size_t)agent * (size_t)d->n + (size_t)i];
        }
        if (right > best_right) best = l;
        best_right = MAX(best_right, right);
    }
    return best;
}

static struct router *final_router(const struct fit_work *k, int l2) {
    struct router *r = xcalloc(1, sizeof *r);
    r->n_agents = k->d->n_agents;
    r->l2 = l2_values[l2];
    r->weights = xcalloc((size_t)r->n_agents * ROUTER_WEIGHTS, sizeof *r->weights);
    for (int a = 0; a < r->n_agents; a++)
        memcpy(r->weights + (size_t)a * ROUTER_WEIGHTS, weights_at(k, N_PAIRS, a, l2),
               ROUTER_WEIGHTS * sizeof *r->weights);
    return r;
}

void router_fit(const struct router_data *d, struct pool *pool, struct router_fit *out) {
    size_t n = (size_t)MAX(d->n, 1), fits = (N_PAIRS + 1) * (size_t)d->n_agents;
    struct question_features *x = xcalloc(n, sizeof *x);
    int *fold = xcalloc(n, sizeof *fold);
    struct fit_work k = {d, x, fold, xcalloc(fits * N_L2 * ROUTER_WEIGHTS, sizeof *k.w)};
    CHECK(d->n_agents >= 1 && d->n_agents <= TEAM_MAX);
    for (int i = 0; i < d->n; i++) {
        question_features_init(&x[i], d->questions[i]);
        fold[i] = router_fold(d->questions[i]);
    }
    pool_run(pool, fits_run, &k, (int64_t)fits, 1);
    out->route = xcalloc(n, sizeof *out->route);
    for (int f = 0; f < ROUTER_FOLDS; f++) {
        int l2 = l2_select(&k, f);
        out->fold_l2[f] = l2_values[l2];
        for (int i = 0; i < d->n; i++)
            if (fold[i] == f) out->route[i] = route_by(&k, pair_index(f, f), l2, i);
    }
    out->router = final_router(&k, l2_select(&k, -1));
    for (int i = 0; i < d->n; i++) free(x[i].v);
    free(x);
    free(fold);
    free(k.w);
}

void router_fit_release(struct router_fit *f) {
    router_free(f->router);
    free(f->route);
    *f = (struct router_fit){0};
}
