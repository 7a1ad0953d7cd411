/*
 * select: selections, fitness sharing, the archive and the schedule of partners. Algorithms may be
 * quadratic in the population if that is simpler: populations have hundreds of members.
 */
#include "evolve/select.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Replaces NaN by the worst fitness. */
static double fitness_or_worst(double f) {
    return f != f ? -INFINITY : f;
}

struct sort_key {
    double key, tie_break;
    int index;
};

static int compare_sort_keys(const void *a, const void *b) {
    const struct sort_key *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? 1 : -1;
    if (x->tie_break != y->tie_break) return x->tie_break < y->tie_break ? 1 : -1;
    return x->index - y->index;
}

static void sort_and_free(struct sort_key *v, int n, int *order) {
    qsort(v, (size_t)n, sizeof *v, compare_sort_keys);
    for (int i = 0; i < n; i++) order[i] = v[i].index;
    free(v);
}

void select_argsort(const double *fitness, int n, int *order) {
    struct sort_key *v = xcalloc((size_t)n, sizeof *v);
    for (int i = 0; i < n; i++)
        v[i] = (struct sort_key){.key = fitness_or_worst(fitness[i]), .index = i};
    sort_and_free(v, n, order);
}

int select_roulette_wheel(const double *weight, double sum, int n, struct rng *r) {
    double rest = (double)rng_uniform(r) * sum;
    for (int i = 0; i < n; i++) {
        rest -= weight[i];
        if (rest < 0) return i;
    }
    for (int i = n; i-- > 0;) // rounding has left a remainder
        if (weight[i] > 0) return i;
    return 0;
}

static void pick_elite(const struct select_pool *p, struct rng *r, int *out, int k) {
    (void)r;
    int *order = xcalloc((size_t)p->n, sizeof *order);
    select_argsort(p->fitness, p->n, order);
    for (int i = 0; i < k; i++) out[i] = order[i % p->n];
    free(order);
}

static void pick_truncation(const struct select_pool *p, struct rng *r, int *out, int k) {
    int *order = xcalloc((size_t)p->n, sizeof *order), best = (int)ceil(p->truncation_ratio * p->n);
    best = MIN(MAX(best, 1), p->n);
    select_argsort(p->fitness, p->n, order);
    for (int i = 0; i < k; i++) out[i] = order[rng_below(r, (uint32_t)best)];
    free(order);
}

/* The lower index wins a tie, so that the result does not depend on the order in which candidates
 * are sampled. */
static void pick_tournament(const struct select_pool *p, struct rng *r, int *out, int k) {
    for (int i = 0; i < k; i++) {
        int best = p->n;
        for (int j = 0; j < MAX(p->tournament, 1); j++) {
            int challenger = (int)rng_below(r, (uint32_t)p->n);
            double gain = best < p->n ? fitness_or_worst(p->fitness[challenger]) -
                                            fitness_or_worst(p->fitness[best])
                                      : 1;
            if (gain > 0 || (!(gain < 0) && challenger < best)) best = challenger;
        }
        out[i] = best;
    }
}

/* Linear ranking (Baker 1985); equal candidates share their ranks. */
static void pick_rank(const struct select_pool *p, struct rng *r, int *out, int k) {
    double *weight = xcalloc((size_t)p->n, sizeof *weight), sum = 0;
    double slope = fmin(2, fmax(1, p->selection_pressure));
    for (int i = 0; i < p->n; i++) {
        double rank = 0, f = fitness_or_worst(p->fitness[i]);
        for (int j = 0; j < p->n; j++) {
            double g = fitness_or_worst(p->fitness[j]);
            rank += g < f ? 1 : j != i && g == f ? 0.5 : 0;
        }
        sum += weight[i] = 2 - slope + 2 * (slope - 1) * rank / MAX(p->n - 1, 1);
    }
    for (int i = 0; i < k; i++) out[i] = select_roulette_wheel(weight, sum, p->n, r);
    free(weight);
}

/* Subtracts from each value a bit less than the worst finite value: the worst becomes 1/N of the
 * range. If all values are equal, they become 1. A value that is not finite becomes 0. */
static void offset_from_worst(const double *fitness, int n, double *out) {
    double lo = INFINITY, hi = -INFINITY;
    for (int i = 0; i < n; i++) {
        if (!isfinite(fitness[i])) continue;
        lo = fmin(lo, fitness[i]);
        hi = fmax(hi, fitness[i]);
    }
    double step = hi > lo ? (hi - lo) / n : 1;
    for (int i = 0; i < n; i++) out[i] = isfinite(fitness[i]) ? fitness[i] - lo + step : 0;
}

static void pick_roulette(const struct select_pool *p, struct rng *r, int *out, int k) {
    double *weight = xcalloc((size_t)p->n, sizeof *weight), sum = 0;
    offset_from_worst(p->fitness, p->n, weight);
    for (int i = 0; i < p->n; i++) sum += weight[i];
    for (int i = 0; i < k; i++) out[i] = select_roulette_wheel(weight, sum, p->n, r);
    free(weight);
}

/* Whether a is at least as good as b in all objectives and better in one. */
static bool dominates(const double *a, const double *b, int m) {
    bool better = false;
    for (int i = 0; i < m; i++) {
        if (fitness_or_worst(a[i]) < fitness_or_worst(b[i])) return false;
        better |= fitness_or_worst(a[i]) > fitness_or_worst(b[i]);
    }
    return better;
}

/* Adds one objective's term of the crowding distance in one front. */
static void add_crowding_distance(const double *scores, int m, int objective, const int *front,
                                  int front_index, int n, double *crowding) {
    double *value = xcalloc((size_t)n, sizeof *value);
    int *order = xcalloc((size_t)n, sizeof *order), *member = xcalloc((size_t)n, sizeof *member);
    int c = 0;
    for (int i = 0; i < n; i++)
        if (front[i] == front_index)
            member[c] = i, value[c++] = scores[(size_t)i * (size_t)m + objective];
    select_argsort(value, c, order);
    double spread = c ? value[order[0]] - value[order[c - 1]] : 0;
    for (int i = 0; i < c; i++) {
        double *d = &crowding[member[order[i]]];
        if (i == 0 || i == c - 1)
            *d = INFINITY;
        else if (spread > 0 && isfinite(spread))
            *d += (value[order[i - 1]] - value[order[i + 1]]) / spread;
    }
    free(value);
    free(order);
    free(member);
}

void pareto_sort(const double *scores, int n, int m, int *front, double *crowding) {
    int n_assigned = 0, f = 0;
    for (int i = 0; i < n; i++) front[i] = -1, crowding[i] = 0;
    for (; n_assigned < n; f++) {
        // -2: in this front; such a candidate still dominates others in this round
        for (int i = 0; i < n; i++) {
            bool dominated = front[i] >= 0;
            for (int j = 0; j < n && !dominated; j++)
                dominated = (front[j] < 0) && dominates(scores + (size_t)j * (size_t)m,
                                                        scores + (size_t)i * (size_t)m, m);
            if (!dominated) front[i] = -2;
        }
        for (int i = 0; i < n; i++)
            if (front[i] == -2) front[i] = f, n_assigned++;
        for (int o = 0; o < m; o++) add_crowding_distance(scores, m, o, front, f, n, crowding);
    }
}

void pareto_order(const double *scores, int n, int m, int *order) {
    int *front = xcalloc((size_t)n, sizeof *front);
    double *crowding = xcalloc((size_t)n, sizeof *crowding);
    struct sort_key *v = xcalloc((size_t)n, sizeof *v);
    pareto_sort(scores, n, m, front, crowding);
    for (int i = 0; i < n; i++)
        v[i] = (struct sort_key){.key = -front[i], .tie_break = crowding[i], .index = i};
    sort_and_free(v, n, order);
    free(front);
    free(crowding);
}

/* NSGA-II's tournament of two candidates: the one that is earlier in pareto_order wins. */
static void pick_pareto(const struct select_pool *p, struct rng *r, int *out, int k) {
    int *order = xcalloc((size_t)p->n, sizeof *order);
    pareto_order(p->scores, p->n, p->n_scores, order);
    for (int i = 0; i < k; i++) {
        uint32_t a = rng_below(r, (uint32_t)p->n), b = rng_below(r, (uint32_t)p->n);
        out[i] = order[MIN(a, b)];
    }
    free(order);
}

static double median(double *v, int n) {
    int *order = xcalloc((size_t)n, sizeof *order);
    select_argsort(v, n, order);
    double mid = (v[order[(n - 1) / 2]] + v[order[n / 2]]) / 2;
    free(order);
    return mid;
}

/* epsilon[M]: the median absolute deviation of each item, below which score differences count as
 * noise (La Cava et al. 2016). With scores 0 and 1, epsilon is below 1 and has no effect. */
static void lexicase_epsilons(const struct select_pool *p, double *epsilon) {
    double *v = xcalloc((size_t)p->n, sizeof *v);
    for (int m = 0; m < p->n_scores; m++) {
        for (int i = 0; i < p->n; i++)
            v[i] = p->scores[(size_t)i * (size_t)p->n_scores + (size_t)m];
        double mid = median(v, p->n);
        for (int i = 0; i < p->n; i++) v[i] = fabs(v[i] - mid);
        epsilon[m] = median(v, p->n);
    }
    free(v);
}

/* Epsilon-lexicase selection: goes through the items in random order and keeps the candidates
 * within epsilon of the item's best score. */
static int lexicase_select(const struct select_pool *p, const double *epsilon, uint32_t *items,
                           int *candidates, struct rng *r) {
    int n = p->n;
    for (int i = 0; i < n; i++) candidates[i] = i;
    for (int m = 0; m < p->n_scores; m++) items[m] = (uint32_t)m;
    rng_shuffle(r, items, (size_t)p->n_scores);
    for (int m = 0; m < p->n_scores && n > 1; m++) {
        const double *s = p->scores + items[m];
        double best = -INFINITY;
        int n_kept = 0;
        for (int i = 0; i < n; i++)
            best = fmax(best, s[(size_t)candidates[i] * (size_t)p->n_scores]);
        for (int i = 0; i < n; i++) {
            double v = fitness_or_worst(s[(size_t)candidates[i] * (size_t)p->n_scores]);
            if (!(v < best - epsilon[items[m]])) candidates[n_kept++] = candidates[i];
        }
        n = n_kept;
    }
    return candidates[n > 1 ? rng_below(r, (uint32_t)n) : 0];
}

static void pick_lexicase(const struct select_pool *p, struct rng *r, int *out, int k) {
    double *epsilon = xcalloc((size_t)MAX(p->n_scores, 1), sizeof *epsilon);
    uint32_t *items = xcalloc((size_t)MAX(p->n_scores, 1), sizeof *items);
    int *candidates = xcalloc((size_t)p->n, sizeof *candidates);
    lexicase_epsilons(p, epsilon);
    for (int i = 0; i < k; i++) out[i] = lexicase_select(p, epsilon, items, candidates, r);
    free(epsilon);
    free(items);
    free(candidates);
}

const struct selection selections[] = {
    {"elite", false, pick_elite},           {"truncation", false, pick_truncation},
    {"tournament", false, pick_tournament}, {"rank", false, pick_rank},
    {"roulette", false, pick_roulette},     {"pareto", true, pick_pareto},
    {"lexicase", true, pick_lexicase},      {NULL, false, NULL},
};

const struct selection *selection_find(const char *name) {
    for (const struct selection *s = selections; s->name; s++)
        if (strcmp(s->name, name) == 0) return s;
    return NULL;
}

void fitness_share(const double *fitness, const double *distance, int n, double radius,
                   double *out) {
    CHECK(radius > 0);
    offset_from_worst(fitness, n, out);
    for (int i = 0; i < n; i++) {
        double niche = 1; // the candidate itself, whatever the diagonal
        for (int j = 0; j < n; j++)
            if (j != i) niche += fmax(0, 1 - distance[(size_t)i * (size_t)n + (size_t)j] / radius);
        out[i] /= niche;
    }
}

int archive_init(struct archive *a, const struct archive_axis *axis, int dims, struct error *err) {
    *a = (struct archive){.dims = dims};
    int64_t cells = 1;
    if (dims < 1 || dims > ARCHIVE_DIMS)
        return error_set(err, ERR_USAGE, "an archive has 1 to %d axes, not %d", ARCHIVE_DIMS, dims);
    for (int d = 0; d < dims; d++) {
        a->axis[d] = axis[d];
        if (axis[d].bins < 1 || axis[d].bins > 1 << 20 || !(axis[d].hi > axis[d].lo))
            return error_set(err, ERR_USAGE, "axis %d of the archive has %d bins from %g to %g",
                             d + 1, axis[d].bins, axis[d].lo, axis[d].hi);
        cells = MIN(cells * axis[d].bins, (int64_t)1 << 40);
    }
    if (cells > 1 << 20)
        return error_set(err, ERR_USAGE, "an archive has at most %d cells", 1 << 20);
    a->n_cells = (int)cells;
    a->id = xcalloc((size_t)cells, sizeof *a->id);
    a->fitness = xcalloc((size_t)cells, sizeof *a->fitness);
    for (int i = 0; i < a->n_cells; i++) a->id[i] = -1;
    return OK;
}

void archive_release(struct archive *a) {
    free(a->id);
    free(a->fitness);
    *a = (struct archive){0};
}

bool archive_add(struct archive *a, const double *descriptor, double fitness, int64_t id) {
    int cell = 0;
    if (fitness != fitness) return false;
    for (int d = 0; d < a->dims; d++) {
        const struct archive_axis *x = &a->axis[d];
        double position = (descriptor[d] - x->lo) / (x->hi - x->lo) * x->bins;
        if (position != position) return false;
        cell = cell * x->bins + (int)fmin(x->bins - 1, fmax(0, floor(position)));
    }
    bool better = a->id[cell] < 0 || fitness > a->fitness[cell] ||
                  (fitness == a->fitness[cell] && id < a->id[cell]);
    if (better) a->id[cell] = id, a->fitness[cell] = fitness;
    return better;
}

static int archive_count_filled(const struct archive *a) {
    int n = 0;
    for (int i = 0; i < a->n_cells; i++) n += a->id[i] >= 0;
    return n;
}

double archive_coverage(const struct archive *a) {
    return (double)archive_count_filled(a) / a->n_cells;
}

double archive_qd_score(const struct archive *a, double floor) {
    double sum = 0;
    for (int i = 0; i < a->n_cells; i++)
        if (a->id[i] >= 0) sum += a->fitness[i] - floor;
    return sum;
}

int64_t archive_pick(const struct archive *a, struct rng *r) {
    int n_filled = archive_count_filled(a), i = 0;
    if (!n_filled) return -1;
    for (uint32_t skip = rng_below(r, (uint32_t)n_filled);; i++)
        if (a->id[i] >= 0 && skip-- == 0) return a->id[i];
}

void coevolve_partners(const int *const *ranked, const int *size, int n_roles, int role, int slot,
                       uint64_t seed, int generation, int *partner) {
    for (int q = 0; q < n_roles; q++) {
        CHECK(size[q] > 0);
        partner[q] = slot ? 0 : ranked[q][0];
        if (slot) {
            int cycle = (slot - 1) / size[q];
            struct rng r = rng_make(seed, RNG_SELECT, (uint32_t)generation,
                                    UINT32_MAX - (uint32_t)(cycle * n_roles + q));
            uint32_t *order = xcalloc((size_t)size[q], sizeof *order);
            for (int i = 0; i < size[q]; i++) order[i] = (uint32_t)i;
            rng_shuffle(&r, order, (size_t)size[q]);
            partner[q] = ranked[q][order[(slot - 1) % size[q]]];
            free(order);
        }
        if (q == role) partner[q] = -1;
    }
}
