/*
 * diversity: differences between adapters, in weights and in behaviour. Evolution needs
 * differences: every crossover of two copies is a copy.
 */
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>

/* Below this relative distance, adapters differ by no more than a mutation would. */
static const double COPY_DISTANCE = 0.05;

/* relative_distance and cosine_from_products give the results of adapter_distance and
 * adapter_cosine from inner products that are computed only once. */
static double relative_distance(double aa, double bb, double ab) {
    double mean = (sqrt(aa) + sqrt(bb)) / 2;
    return mean == 0 ? 0 : sqrt(fmax(0, aa + bb - 2 * ab)) / mean;
}

static double cosine_from_products(double aa, double bb, double ab) {
    double norms = sqrt(aa) * sqrt(bb);
    return norms == 0 ? 0 : fmax(-1, fmin(1, ab / norms));
}

static void diversity_add_pair(struct diversity *d, int i, int j, double distance, double cosine) {
    if (!(distance >= d->weights_min)) {
        d->weights_min = distance;
        d->duplicate_of[0] = i;
        d->duplicate_of[1] = j;
    }
    d->weights_mean += distance;
    d->cosine_mean += cosine;
}

/* Two adapters are in memory at a time. */
struct diversity diversity_compute(struct adapter *const *a, int n, const double *distance) {
    struct diversity d = {.weights_min = NAN, .behaviour_min = NAN};
    double *square = xcalloc((size_t)n + 1, sizeof *square), pairs = n * (n - 1) / 2.0;
    for (int i = 0; i < n; i++) {
        square[i] = fmax(0, adapter_dot(a[i], a[i]));
        d.norm_mean += sqrt(square[i]) / n;
        adapter_free_pages(a[i]);
    }
    for (int i = 0; i < n; i++) {
        for (int j = i + 1; j < n; j++) {
            double dot = adapter_dot(a[i], a[j]), behaviour = distance ? distance[i * n + j] : NAN;
            diversity_add_pair(&d, i, j, relative_distance(square[i], square[j], dot),
                               cosine_from_products(square[i], square[j], dot));
            adapter_free_pages(a[j]);
            d.behaviour_min = fmin(d.behaviour_min, behaviour);
            d.behaviour_mean += behaviour;
        }
        adapter_free_pages(a[i]);
    }
    d.weights_mean /= pairs; // NaN for a single adapter
    d.cosine_mean /= pairs;
    d.behaviour_mean /= pairs;
    free(square);
    return d;
}

static void number_set(json_t *v, const char *key, double x) {
    json_object_set_new(v, key, isfinite(x) ? json_real(x) : json_null());
}

json_t *diversity_json(const struct diversity *d) {
    json_t *v = json_object();
    number_set(v, "weights_min", d->weights_min);
    number_set(v, "weights_mean", d->weights_mean);
    number_set(v, "cosine_mean", d->cosine_mean);
    number_set(v, "norm_mean", d->norm_mean);
    number_set(v, "behaviour_min", d->behaviour_min);
    number_set(v, "behaviour_mean", d->behaviour_mean);
    return v;
}

int diversity_check(const struct diversity *d, const char *const *names, struct error *err) {
    if (!(d->weights_min < COPY_DISTANCE)) return OK;
    return error_set(
        err, ERR_MISMATCH,
        "founders '%s' and '%s' are copies except for noise: they differ by %.2g %% of their norm, "
        "and should by %.0f %% or more; train them on different conversations, or leave one out",
        names[d->duplicate_of[0]], names[d->duplicate_of[1]], 100 * d->weights_min,
        100 * COPY_DISTANCE);
}
