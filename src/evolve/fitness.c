/*
 * fitness: combination of terms, racing, the winner's curse and operator credit: arithmetic on
 * given scores.
 *
 * Invariant of a race: all remaining candidates have scores of the same items 0 … n_seen-1; an
 * eliminated candidate keeps its scores. So each comparison uses common items.
 */
#include "evolve/fitness.h"

#include "evolve/select.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double vector_sum(const double *v, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += v[i];
    return sum;
}

struct stats_interval fitness_combine(struct fitness_term *t, int n_terms, int n_items) {
    double *sum = xcalloc((size_t)MAX(n_items, 1), sizeof *sum), constant = 0, lower2 = 0,
           upper2 = 0;
    for (int k = 0; k < n_terms; k++) {
        double w = t[k].weight;
        if (t[k].items) {
            t[k].value = stats_mean_interval(t[k].items, n_items);
            for (int i = 0; i < n_items; i++) sum[i] += w * t[k].items[i];
            continue;
        }
        double lower_width = w * (t[k].value.value - t[k].value.lo),
               upper_width = w * (t[k].value.hi - t[k].value.value);
        constant += w * t[k].value.value;
        lower2 += w < 0 ? upper_width * upper_width : lower_width * lower_width;
        upper2 += w < 0 ? lower_width * lower_width : upper_width * upper_width;
    }
    struct stats_interval v = stats_mean_interval(sum, n_items);
    lower2 += (v.value - v.lo) * (v.value - v.lo);
    upper2 += (v.hi - v.value) * (v.hi - v.value);
    v.value += constant;
    v.lo = v.value - sqrt(lower2);
    v.hi = v.value + sqrt(upper2);
    free(sum);
    return v;
}

/* Quantile of Student's t for the upper tail p, at most 1/2. */
static double t_upper_quantile(double p, int dof) {
    return stats_t_quantile(stats_upper_quantile(p), dof);
}

/* Mean and variance of the differences a - b. */
static void paired_difference(const double *a, const double *b, int n, double *mean,
                              double *variance) {
    double dev = 0;
    *mean = (vector_sum(a, n) - vector_sum(b, n)) / n;
    for (int i = 0; i < n; i++) dev += (a[i] - b[i] - *mean) * (a[i] - b[i] - *mean);
    *variance = n > 1 ? dev / (n - 1) : INFINITY;
}

bool fitness_is_better(const double *a, const double *b, int n, double alpha) {
    double mean, variance;
    if (n < 2) return false;
    paired_difference(a, b, n, &mean, &variance);
    return mean > 0 && mean > t_upper_quantile(alpha, n - 1) * sqrt(variance / n);
}

/* racing */

/* margin: a bound on the error of the mean of n paired differences, which the error exceeds with
 * probability p. */
struct race_rule {
    const char *name;
    double (*margin)(double variance, int n, double p, double range); /* NULL: halving */
};

static double margin_paired(double variance, int n, double p, double range) {
    // the expansion of the quantile needs at least 7 degrees of freedom, and a variance of 0 on a
    // few items may be chance
    if (n < 8) return INFINITY;
    return t_upper_quantile(p, n - 1) * sqrt(fmax(variance, range * range / n / n) / n);
}

/* The difference of two scores has twice the range of a score. */
static double margin_bernstein(double variance, int n, double p, double range) {
    double l = math_log(2 / p);
    return n < 2 ? INFINITY : sqrt(2 * variance * l / n) + 7 * 2 * range * l / (3.0 * (n - 1));
}

static double margin_hoeffding(double variance, int n, double p, double range) {
    (void)variance;
    return 2 * range * sqrt(math_log(1 / p) / (2.0 * n));
}

static const struct race_rule race_rules[] = {{"halving", NULL},
                                              {"paired", margin_paired},
                                              {"bernstein", margin_bernstein},
                                              {"hoeffding", margin_hoeffding}};

#define AT(field) offsetof(struct race_options, field)
const struct option_row race_option_rows[] = {
    {"rule", OPT_STRING, AT(rule), "halving", 0, 0, "NAME",
     "halving, paired, bernstein or hoeffding"},
    {"budget", OPT_INT, AT(budget), "0", 0, 1e12, "N",
     "budget in answers; 0: a tenth of all candidates on all items"},
    {"block", OPT_INT, AT(block), "10", 1, 1e6, "N", "items between two tests"},
    {"alpha", OPT_FLOAT, AT(alpha), "0.05", 1e-9, 0.5, "P",
     "probability of dropping the best candidate"},
    {"range", OPT_FLOAT, AT(range), "1", 0, 1e9, "X", "largest minus smallest score"},
    {0},
};

struct race {
    const struct race_rule *rule;
    struct race_options o; /* `o.rule` is unused: the member `rule` replaces it */
    /* n_left: remaining candidates; looks, n_looks: tests done, and planned by halving; n_seen:
     * items with scores of all remaining candidates */
    int n, n_items, n_left, looks, n_looks, n_seen;
    int64_t spent;
    int *items_seen; /* [N] number of items with scores */
    bool *remaining; /* [N] not eliminated */
    double *scores;  /* [N][n_items] */
};

struct race *race_new(const struct race_options *o, int n, int n_items, struct error *err) {
    const struct race_rule *rule = NULL;
    for (size_t i = 0; i < ARRAY_LEN(race_rules); i++)
        if (strcmp(race_rules[i].name, o->rule) == 0) rule = &race_rules[i];
    int64_t max_budget = (int64_t)n * n_items,
            budget = o->budget ? MIN(o->budget, max_budget) : max_budget / 10;
    CHECK(n >= 1);
    if (!rule)
        error_set(err, ERR_USAGE,
                  "race '%s' is not known; there are halving, paired, bernstein, hoeffding",
                  o->rule);
    else if (budget < n)
        error_set(err, ERR_USAGE,
                  "a race of %d candidates needs %d answers at least, and may cost %lld; give more "
                  "items",
                  n, n, (long long)budget);
    if (!rule || budget < n) return NULL;
    struct race *r = xcalloc(1, sizeof *r);
    *r =
        (struct race){.rule = rule, .o = *o, .n = n, .n_items = n_items, .n_left = n, .n_looks = 1};
    r->o.budget = budget;
    r->o.rule = NULL;
    while (1 << r->n_looks < n) r->n_looks++;
    r->items_seen = xcalloc((size_t)n, sizeof *r->items_seen);
    r->remaining = xcalloc((size_t)n, sizeof *r->remaining);
    r->scores = try_calloc((size_t)max_budget, sizeof *r->scores, err);
    memset(r->remaining, true, (size_t)n * sizeof *r->remaining);
    if (r->scores) return r;
    race_free(r);
    return NULL;
}

void race_free(struct race *r) {
    if (!r) return;
    free(r->items_seen);
    free(r->remaining);
    free(r->scores);
    free(r);
}

static double *candidate_scores(const struct race *r, int i) {
    return r->scores + (size_t)i * (size_t)r->n_items;
}

/* Number of items until the next test. Halving divides the remaining budget equally among the
 * remaining tests. */
static int next_block_size(const struct race *r) {
    int64_t budget_left = r->o.budget - r->spent, items = r->o.block;
    if (!r->rule->margin) items = budget_left / MAX(r->n_looks - r->looks, 1) / r->n_left;
    items = MIN(MAX(items, 1), budget_left / r->n_left);
    return (int)MIN(items, r->n_items - r->n_seen);
}

int race_next(const struct race *r, int *candidates, int *from, int *to) {
    int n = 0;
    *from = *to = r->n_seen;
    if (r->n_left > 1) *to += next_block_size(r);
    if (*to == *from) return 0;
    for (int i = 0; i < r->n; i++)
        if (r->remaining[i]) candidates[n++] = i;
    return n;
}

static double candidate_mean(const struct race *r, int i) {
    return r->items_seen[i]
               ? vector_sum(candidate_scores(r, i), r->items_seen[i]) / r->items_seen[i]
               : 0;
}

int race_winner(const struct race *r) {
    int best = -1;
    for (int i = 0; i < r->n; i++)
        if (r->remaining[i] && (best < 0 || candidate_mean(r, i) > candidate_mean(r, best)))
            best = i;
    return best;
}

static void eliminate_worse_half(struct race *r) {
    int n = r->n_left, k = 0, *index = xcalloc((size_t)n, 2 * sizeof *index), *order = index + n;
    double *mean = xcalloc((size_t)n, sizeof *mean);
    for (int i = 0; i < r->n; i++)
        if (r->remaining[i]) mean[k] = candidate_mean(r, i), index[k++] = i;
    select_argsort(mean, n, order);
    r->n_left = (n + 1) / 2;
    for (k = r->n_left; k < n; k++) r->remaining[index[order[k]]] = false;
    free(index);
    free(mean);
}

static void eliminate_by_test(struct race *r) {
    int leader = race_winner(r);
    double p = r->o.alpha / MAX(r->n - 1, 1) / ((double)r->looks * (r->looks + 1));
    for (int i = 0; i < r->n; i++) {
        double deficit, variance;
        if (!r->remaining[i] || i == leader) continue;
        paired_difference(candidate_scores(r, leader), candidate_scores(r, i), r->n_seen, &deficit,
                          &variance);
        if (!(deficit > r->rule->margin(variance, r->n_seen, p, r->o.range))) continue;
        r->remaining[i] = false;
        r->n_left--;
    }
}

void race_add_scores(struct race *r, const double *scores) {
    int items = r->n_left > 1 ? next_block_size(r) : 0;
    CHECK(items > 0);
    for (int i = 0; i < r->n; i++) {
        if (!r->remaining[i]) continue;
        memcpy(candidate_scores(r, i) + r->n_seen, scores, (size_t)items * sizeof *scores);
        scores += items;
        r->items_seen[i] = r->n_seen + items;
        r->spent += items;
    }
    r->n_seen += items;
    r->looks++;
    if (r->rule->margin)
        eliminate_by_test(r);
    else
        eliminate_worse_half(r);
}

int64_t race_spent(const struct race *r) {
    return r->spent;
}

int race_items_seen(const struct race *r, int candidate) {
    return r->items_seen[candidate];
}

bool race_is_decided(const struct race *r) {
    return r->n_left == 1;
}

/* the winner's curse */

/* Noise is the residual of a score after subtracting the effects of its candidate and its item. So
 * an item that is hard for all candidates shifts all means equally and causes no shrinkage. */
void fitness_shrink(const double *scores, int n, int n_items, double *out) {
    double *item_mean = xcalloc((size_t)n_items, sizeof *item_mean), grand_mean = 0, noise = 0,
           spread = 0;
    for (int c = 0; c < n; c++) {
        const double *s = scores + (size_t)c * (size_t)n_items;
        out[c] = vector_sum(s, n_items) / n_items;
        grand_mean += out[c] / n;
        for (int i = 0; i < n_items; i++) item_mean[i] += s[i] / n;
    }
    for (int c = 0; c < n; c++) {
        const double *s = scores + (size_t)c * (size_t)n_items;
        for (int i = 0; i < n_items; i++) {
            double residual = s[i] - item_mean[i] - out[c] + grand_mean;
            noise += residual * residual;
        }
        spread += (out[c] - grand_mean) * (out[c] - grand_mean);
    }
    noise /= (double)MAX(n - 1, 1) * MAX(n_items - 1, 1) * n_items; // variance of one mean
    double shrinkage = n < 4 ? 1 : spread > 0 ? fmax(0, 1 - (n - 3) * noise / spread) : 0;
    for (int c = 0; c < n; c++) out[c] = grand_mean + shrinkage * (out[c] - grand_mean);
    free(item_mean);
}

/* The candidate with the best sum over items first, first + step, … of scores [N][n_items]. */
static int best_on_items(const double *scores, int n, int n_items, int first, int step) {
    double top = -INFINITY;
    int best = 0;
    for (int c = 0; c < n; c++) {
        double sum = 0;
        for (int i = first; i < n_items; i += step) sum += scores[(size_t)c * (size_t)n_items + i];
        if (sum > top) top = sum, best = c;
    }
    return best;
}

struct stats_interval fitness_split_half(const double *scores, int n, int n_items, int *winner) {
    double *unselected = xcalloc((size_t)MAX(n_items, 1), sizeof *unselected);
    for (int half = 0; half < 2; half++) {
        const double *s =
            scores + (size_t)best_on_items(scores, n, n_items, half, 2) * (size_t)n_items;
        for (int i = 1 - half; i < n_items; i += 2) unselected[i] = s[i];
    }
    struct stats_interval v = stats_mean_interval(unselected, n_items);
    *winner = best_on_items(scores, n, n_items, 0, 1);
    free(unselected);
    return v;
}

/* operators */

void operator_selector_init(struct operator_selector *o, int n, double alpha, double margin) {
    CHECK(n >= 1 && n <= MAX_OPERATORS);
    *o = (struct operator_selector){
        .n = n, .rate = 0.1, .pursuit = 0.1, .alpha = alpha, .margin = margin};
    o->p_min = 0.5 / n;
    for (int i = 0; i < n; i++) o->v[i].p = 1.0 / n;
}

int operator_selector_pick(const struct operator_selector *o, struct rng *r) {
    double p[MAX_OPERATORS];
    for (int i = 0; i < o->n; i++) p[i] = o->v[i].p;
    return select_roulette_wheel(p, 1, o->n, r);
}

/* Moves probability to the operator with the best quality. The others keep at least p_min; the sum
 * stays 1. */
static void adaptive_pursuit(struct operator_selector *o) {
    int best = -1, n_active = 0;
    double sum = 0;
    for (int i = 0; i < o->n; i++) {
        if (o->v[i].dropped) continue;
        n_active++;
        if (best < 0 || o->v[i].quality > o->v[best].quality) best = i;
    }
    for (int i = 0; i < o->n; i++) {
        double target = i == best ? 1 - (n_active - 1) * o->p_min : o->p_min;
        o->v[i].p = o->v[i].dropped ? 0 : o->v[i].p + o->pursuit * (target - o->v[i].p);
        sum += o->v[i].p;
    }
    for (int i = 0; i < o->n; i++) o->v[i].p /= sum;
}

/*
 * Updates the betting martingale that tests whether the mean of g = gain + margin is negative.
 * Wealth is multiplied by 1 - λ g, where λ depends on the earlier gains only (Kelly's fraction,
 * limited to [0, 0.9]). If the mean is not negative, wealth is a supermartingale, and Ville's
 * inequality bounds by α/n the probability that wealth ever exceeds n/α.
 */
static void update_wealth(struct operator_stats *v, double g) {
    double mean = v->used ? v->sum / (double)v->used : 0;
    double mean_square = (v->squares + 1) / ((double)v->used + 1);
    v->wealth += math_log(1 - fmin(0.9, fmax(0, -mean / mean_square)) * g);
    v->sum += g;
    v->squares += g * g;
}

void operator_selector_update(struct operator_selector *o, int which, double gain) {
    struct operator_stats *v = &o->v[which];
    int n_active = 0;
    gain = gain != gain ? -1 : fmin(1, fmax(-1, gain));
    update_wealth(v, fmin(1, gain + o->margin));
    v->used++;
    v->improved += gain > 0;
    v->quality += fmax(o->rate, 1.0 / (double)v->used) * (gain - v->quality);
    for (int i = 0; i < o->n; i++) n_active += !o->v[i].dropped;
    if (n_active > 1 && v->wealth > math_log(o->n / o->alpha)) v->dropped = true;
    adaptive_pursuit(o);
}

static int compare_strings(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

int fitness_check_disjoint(const char *const *fitness_keys, int n, const char *const *test_keys,
                           int m, struct error *err) {
    const char **sorted = xcalloc((size_t)MAX(n, 1), sizeof *sorted), *example = NULL;
    int n_common = 0;
    if (n) memcpy(sorted, fitness_keys, (size_t)n * sizeof *sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, compare_strings);
    for (int i = 0; i < m; i++) {
        if (!bsearch(&test_keys[i], sorted, (size_t)n, sizeof *sorted, compare_strings)) continue;
        example = n_common++ ? example : test_keys[i];
    }
    free(sorted);
    if (!n_common) return OK;
    return error_set(err, ERR_MISMATCH,
                     "%d of %d test items are among those of fitness, '%s' for one; a result would "
                     "measure the items that selection used",
                     n_common, m, example);
}
