/*
 * population: selection and breeding, without I/O. All random numbers depend on (seed, generation,
 * child), so a generation is reproducible at any time and on any machine.
 *
 * A child comes from one operator, so its gain and its change of behaviour are attributed to that
 * operator. Gains are measured on the items of the child's generation, on which its parents are
 * evaluated again: a parent that was lucky on the items that selected it has no such advantage on
 * new items.
 */
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistr.h>

#define ROW(type_, name, type, field, fallback, min, max, metavar, help)                           \
    { name, type, offsetof(struct type_, field), fallback, min, max, metavar, help }

const struct option_row evolve_option_rows[] = {
    ROW(evolve_options, "search", OPT_STRING, search, "breed", 0, 0, "NAME",
        "breed, coefficients, merge, gradient, es or none"),
    ROW(evolve_options, "generations", OPT_INT, generations, "3", 0, 100000, "N",
        "generations after the founders"),
    ROW(evolve_options, "population", OPT_INT, population, "6", 2, MAX_POPULATION, "N",
        "candidates per generation"),
    ROW(evolve_options, "elites", OPT_INT, elites, "2", 1, MAX_POPULATION, "N",
        "best candidates that enter the next generation unchanged"),
    ROW(evolve_options, "rank", OPT_INT, rank, "16", 0, 256, "R",
        "LoRA rank of crossover children; 0: the larger parent's"),
    ROW(evolve_options, "max-flops", OPT_FLOAT, max_flops, "0", 0, 1e30, "N",
        "budget of the search in FLOPs; 0: no limit"),
    ROW(evolve_options, "crossovers", OPT_LIST, crossovers,
        "delta,slerp,split,svd_mix,extrapolate,delta_ties", 0, 0, "NAME",
        "crossover operators (see 'shoal adapter operators'); adaptive pursuit chooses among them"),
    ROW(evolve_options, "mutations", OPT_LIST, mutations, "spectrum,rotate,noise", 0, 0, "NAME",
        "mutation operators; adaptive pursuit chooses among them"),
    ROW(evolve_options, "mutation-rate", OPT_FLOAT, mutation_rate, "0.3", 0, 1, "P",
        "fraction of children made by mutation of one parent"),
    ROW(evolve_options, "blend-min", OPT_FLOAT, blend_min, "0.3", -1, 2, "T",
        "crossover: smallest weight of the second parent"),
    ROW(evolve_options, "blend-max", OPT_FLOAT, blend_max, "0.7", -1, 2, "T",
        "crossover: largest weight of the second parent"),
    ROW(evolve_options, "preserve-norm", OPT_BOOL, preserve_norm, "true", 0, 0, NULL,
        "crossover: rescale the child to the weighted mean norm of its parents"),
    ROW(evolve_options, "target-step-divergence", OPT_FLOAT, target_step_divergence, "0.02", 0, 1,
        "D",
        "adapt the step of mutations towards this divergence between parent and child; 0: fixed "
        "step"),
    ROW(evolve_options, "max-regression", OPT_FLOAT, max_regression, "0.02", 0, 1, "D",
        "drop operators whose children lose more fitness than this on average; 0: never"),
    ROW(evolve_options, "selection", OPT_STRING, selection, "tournament", 0, 0, "NAME",
        "parent selection: elite, truncation, tournament, rank, roulette, pareto, lexicase"),
    ROW(evolve_options, "truncation-ratio", OPT_FLOAT, truncation_ratio, "0.5", 0.01, 1, "P",
        "truncation selection: fraction of candidates that may be parents"),
    ROW(evolve_options, "tournament-size", OPT_INT, tournament_size, "2", 1, MAX_POPULATION, "N",
        "tournament selection: candidates per tournament"),
    ROW(evolve_options, "selection-pressure", OPT_FLOAT, selection_pressure, "1.7", 1, 2, "S",
        "linear ranking selection: expected children of the best candidate"),
    ROW(evolve_options, "fitness-sharing-radius", OPT_FLOAT, fitness_sharing_radius, "0", 0, 1, "D",
        "fitness sharing: candidates nearer than this to one another share fitness; 0: off"),
    ROW(evolve_options, "map-elites-bins", OPT_INT, map_elites_bins, "0", 0, 256, "BINS",
        "choose parents from a MAP-Elites archive with this many bins per axis; 0: no archive"),
    ROW(evolve_options, "roles", OPT_BOOL, roles, NULL, 0, 0, NULL,
        "co-evolution: each founder starts a role; fitness is a candidate's contribution to the "
        "best members of the other roles"),
    ROW(evolve_options, "merge-operator", OPT_STRING, merge_operator, "delta", 0, 0, "NAME",
        "search over coefficients: merge operator of a candidate; delta is evaluated without being "
        "built"),
    ROW(evolve_options, "per-layer", OPT_BOOL, per_layer, NULL, 0, 0, NULL,
        "search over coefficients: one coefficient per layer and founder (delta only)"),
    ROW(evolve_options, "finetune-steps", OPT_INT, finetune_steps, "0", 0, 1e6, "N",
        "fine-tune each child, or the result of the coefficient search, for N updates before its "
        "evaluation (Lamarckian step)"),
    ROW(evolve_options, "finetune-data", OPT_STRING, finetune_data, NULL, 0, 0, "FILE",
        "conversations for --finetune-steps and for the searches gradient and es"),
    {0},
};

const struct option_row fitness_option_rows[] = {
    ROW(fitness_options, "items", OPT_INT, items, "200", 1, 1e6, "N",
        "dev questions per generation"),
    ROW(fitness_options, "resample-items", OPT_BOOL, resample_items, "true", 0, 0, NULL,
        "sample new questions in each generation"),
    ROW(fitness_options, "metric", OPT_STRING, metric, "right", 0, 0, "NAME",
        "score of an answer: right (0 or 1), or probability of the right choice"),
    ROW(fitness_options, "race", OPT_BOOL, race, NULL, 0, 0, NULL,
        "drop candidates early by racing (section 'race'); performance only"),
    ROW(fitness_options, "performance", OPT_FLOAT, performance, "0.6", 0, 1, "W",
        "weight of the candidate's own accuracy"),
    ROW(fitness_options, "distance", OPT_STRING, distance, "js", 0, 0, "NAME",
        "behavioural distance: js (Jensen-Shannon divergence of answers), disagreement, or "
        "embedding (of the chains of thought, by the base model)"),
    ROW(fitness_options, "cooperation", OPT_FLOAT, cooperation, "0.3", 0, 1, "W",
        "weight of the candidate's contribution to the vote of all candidates"),
    ROW(fitness_options, "credit", OPT_STRING, credit, "loo", 0, 0, "NAME",
        "estimate of the contribution to the vote: loo (leave-one-out) or shapley (exact for up "
        "to 8 candidates, else sampled)"),
    ROW(fitness_options, "novelty", OPT_FLOAT, novelty, "0.1", 0, 1, "W",
        "weight of the candidate's mean distance from the other candidates"),
    {0},
};

void evaluation_release(struct evaluation *a) {
    free(a->scores);
    free(a->distance);
    *a = (struct evaluation){0};
}

static void candidate_copy(struct candidate *to, const struct candidate *from) {
    *to = *from;
    if (to->adapter) adapter_retain(to->adapter);
}

static void candidates_release(struct candidate *c, int n) {
    for (int i = 0; i < n; i++) adapter_release(c[i].adapter);
}

/* Adds operators of one kind; `list` has one name or several, such as "delta,slerp". */
static int operator_set_add(struct operator_set *s, const char *list, bool mutation,
                            struct error *err) {
    char *names = xstrdup(list), *save = NULL;
    int rc = OK;
    for (char *n = strtok_r(names, ", ", &save); n && rc == OK; n = strtok_r(NULL, ", ", &save)) {
        const struct adapter_operator *op = operator_find(n, err);
        if (!op)
            rc = err->code;
        else if ((op->kind == OPERATOR_MUTATION) != mutation)
            rc = error_set(err, ERR_USAGE, "'%s' is %s", n,
                           mutation ? "no mutation" : "no crossover");
        else if (s->selector.n == MAX_OPERATORS)
            rc = error_set(err, ERR_USAGE, "more than %d operators", MAX_OPERATORS);
        else
            s->op[s->selector.n++] = op;
    }
    free(names);
    return rc;
}

/* needed: an empty set is an error, because the options ask for children of this kind. */
static int operator_set_init(struct operator_set *s, const struct strings *lists, bool mutation,
                             bool needed, double max_regression, struct error *err) {
    int rc = OK;
    *s = (struct operator_set){0};
    for (int i = 0; rc == OK && i < lists->n; i++)
        rc = operator_set_add(s, lists->v[i], mutation, err);
    int n = s->selector.n;
    if (rc == OK && needed && n == 0)
        rc = error_set(err, ERR_USAGE, "no %s is named", mutation ? "mutation" : "crossover");
    /* Without max_regression the margin is 1, the largest possible loss. */
    if (rc == OK && n > 0)
        operator_selector_init(&s->selector, n, 0.05, max_regression > 0 ? max_regression : 1);
    for (int i = 0; i < n; i++) s->step[i] = (double)s->op[i]->step;
    return rc;
}

static int options_check(const struct evolve_options *o, const struct fitness_options *f, int n,
                         struct error *err) {
    if (n < 2 || n > MAX_POPULATION)
        return error_set(err, ERR_USAGE, "evolution needs 2 to %d founders, not %d", MAX_POPULATION,
                         n);
    if (o->elites > o->population)
        return error_set(err, ERR_USAGE, "more elites (%d) than candidates (%d)", (int)o->elites,
                         (int)o->population);
    if (!selection_find(o->selection))
        return error_set(err, ERR_USAGE,
                         "no selection '%s'; there are elite, truncation, tournament, rank, "
                         "roulette, pareto and lexicase",
                         o->selection);
    bool needs_all_items = o->fitness_sharing_radius > 0 || o->map_elites_bins > 0 || o->roles ||
                           f->cooperation > 0 || f->novelty > 0 ||
                           strcmp(o->selection, "lexicase") == 0;
    if (f->race && needs_all_items)
        return error_set(
            err, ERR_USAGE,
            "a race gives candidates different numbers of questions: it works with performance "
            "only, without cooperation, novelty, fitness sharing, archive, roles and lexicase");
    return OK;
}

static int operator_sets_init(struct population *p, struct error *err) {
    const struct evolve_options *o = p->o;
    int rc = operator_set_init(&p->crossovers, &o->crossovers, false, o->mutation_rate < 1,
                               o->max_regression, err);
    return rc ? rc
              : operator_set_init(&p->mutations, &o->mutations, true, o->mutation_rate > 0,
                                  o->max_regression, err);
}

/* Opens the archive, if the options ask for one; its axes are the behaviour descriptors of the
 * fitness function. */
static int archive_open(struct population *p, struct error *err) {
    struct archive_axis axis[N_DESCRIPTORS];
    for (int d = 0; d < N_DESCRIPTORS; d++)
        axis[d] = (struct archive_axis){0, 1, (int)p->o->map_elites_bins};
    return p->o->map_elites_bins ? archive_init(&p->archive, axis, N_DESCRIPTORS, err) : OK;
}

int population_check_options(const struct evolve_options *o, const struct fitness_options *f,
                             struct error *err) {
    struct population p = {.o = o, .f = f};
    return options_check(o, f, 2, err) == OK ? operator_sets_init(&p, err) : err->code;
}

/* Breeding requests no rank of operators on A and B, and passes no weights to the others. */
static bool crossover_uses_rank(const struct adapter_operator *op) {
    return (op->options & OPERAND_RANK) && op->weighting != WEIGHTING_FACTORS;
}

static bool crossover_uses_blend(const struct adapter_operator *op) {
    return op->weighting == WEIGHTING_DELTA || op->weighting == WEIGHTING_FACTORS;
}

static bool crossover_uses_norm(const struct adapter_operator *op) {
    return op->weighting == WEIGHTING_DELTA;
}

static int unused_error(const char *name, const struct operator_set *s, struct error *err) {
    struct buf list = {0};
    for (int i = 0; i < s->selector.n; i++) {
        buf_printf(&list, "%s'%s' has ", i ? "; " : "", s->op[i]->name);
        operator_option_list(s->op[i], &list);
    }
    error_set(err, ERR_USAGE, "no crossover of the recipe uses evolve.%s: %s", name, list.data);
    buf_release(&list);
    return err->code;
}

int population_check_unused(const struct evolve_options *o, struct error *err) {
    static const struct {
        const char *name;
        bool (*is_used)(const struct adapter_operator *op);
    } rows[] = {{"rank", crossover_uses_rank},
                {"blend-min", crossover_uses_blend},
                {"blend-max", crossover_uses_blend},
                {"preserve-norm", crossover_uses_norm}};
    struct evolve_options defaults;
    struct operator_set s;
    int rc = operator_set_init(&s, &o->crossovers, false, false, 0, err);
    if (strcmp(o->search, "breed") != 0 || s.selector.n == 0) return rc;
    options_default(evolve_option_rows, &defaults);
    for (size_t i = 0; rc == OK && i < ARRAY_LEN(rows); i++) {
        const struct option_row *row = option_find(evolve_option_rows, rows[i].name);
        bool used = !option_changed(row, o, &defaults);
        for (int k = 0; !used && k < s.selector.n; k++) used = rows[i].is_used(s.op[k]);
        if (!used) rc = unused_error(rows[i].name, &s, err);
    }
    options_release(evolve_option_rows, &defaults);
    return rc;
}

bool candidate_name_is_child(const char *name) {
    return name[0] == 'g' && name[1] >= '0' && name[1] <= '9';
}

/* Checks the name of the next founder; names become JSON and identify parents. */
static int founder_name_check(const struct population *p, const char *name, struct error *err) {
    if (strlen(name) >= sizeof p->c[0].name)
        return error_set(err, ERR_USAGE, "name '%s' is too long", name);
    if (!*name || u8_check((const uint8_t *)name, strlen(name)) || candidate_name_is_child(name))
        return error_set(
            err, ERR_USAGE,
            "'%s' cannot name a founder: it is empty, not UTF-8 or like a child's (g1c0)", name);
    for (int i = 0; i < p->n; i++)
        if (strcmp(p->c[i].name, name) == 0)
            return error_set(err, ERR_USAGE, "two founders are named '%s'", name);
    return OK;
}

int population_init(struct population *p, const struct evolve_options *o,
                    const struct fitness_options *f, uint64_t seed, struct adapter *const *founders,
                    const char *const *names, int n, struct error *err) {
    *p = (struct population){.o = o, .f = f, .seed = seed, .n_roles = o->roles ? n : 1};
    if (options_check(o, f, n, err) != OK) return err->code;
    if (operator_sets_init(p, err) != OK) return err->code;
    if (archive_open(p, err) != OK) return err->code;
    for (int i = 0; i < n; i++) {
        if (founder_name_check(p, names[i], err) != OK) return err->code;
        strcpy(p->c[i].name, names[i]);
        p->c[i].adapter = adapter_retain(founders[i]);
        p->c[i].step = p->c[i].blend = NAN;
        p->c[i].role = o->roles ? i : 0;
        p->n = i + 1;
    }
    return OK;
}

static bool lists_equal(const struct strings *a, const struct strings *b) {
    bool equal = a->n == b->n;
    for (int i = 0; equal && i < a->n; i++) equal = strcmp(a->v[i], b->v[i]) == 0;
    return equal;
}

int population_set_options(struct population *p, const struct evolve_options *o,
                           const struct fitness_options *f, uint64_t seed, struct error *err) {
    const struct evolve_options *old = p->o;
    p->o = o;
    p->f = f;
    p->seed = seed;
    if (o == old) return OK;
    if (options_check(o, f, MAX(p->n, 2), err) != OK) return err->code;
    bool same_operators = lists_equal(&o->crossovers, &old->crossovers) &&
                          lists_equal(&o->mutations, &old->mutations) &&
                          o->max_regression == old->max_regression;
    int rc = same_operators ? OK : operator_sets_init(p, err);
    if (rc != OK || o->map_elites_bins == old->map_elites_bins) return rc;
    return error_set(err, ERR_USAGE, "the archive of a run cannot be changed");
}

void population_release(struct population *p) {
    candidates_release(p->c, p->n + p->n_reevaluated);
    candidates_release(p->archived, p->n_archived);
    free(p->archived);
    archive_release(&p->archive);
    evaluation_release(&p->last_evaluation);
    *p = (struct population){0};
}

static const struct candidate *find_candidate(const struct population *p, const char *name) {
    for (int i = 0; i < p->n + p->n_reevaluated; i++)
        if (strcmp(p->c[i].name, name) == 0) return &p->c[i];
    return NULL;
}

static bool is_better(const struct candidate *x, const struct candidate *y) {
    if (x->fitness.value != y->fitness.value) return x->fitness.value > y->fitness.value;
    return strcmp(x->name, y->name) < 0;
}

/* evaluation */

void candidate_fitness(struct candidate *c, const struct fitness_options *f, const double *scores,
                       int n_items) {
    struct fitness_term t[] = {{f->performance, scores, c->performance},
                               {f->cooperation, NULL, c->cooperation},
                               {f->novelty, NULL, c->novelty}};
    c->fitness = fitness_combine(t, ARRAY_LEN(t), n_items);
    c->performance = t[0].value;
    c->expected = c->performance.value;
    c->shared_fitness = c->fitness.value;
}

static void compute_fitness(struct population *p, int i) {
    const struct evaluation *a = &p->last_evaluation;
    bool is_complete = a->scores && p->c[i].n_items == a->n_items;
    candidate_fitness(&p->c[i], p->f,
                      is_complete ? a->scores + (size_t)i * (size_t)a->n_items : NULL, a->n_items);
}

/* Corrects performance for the winner's curse. Needs the scores of all candidates on all items. */
static void shrink_performance(struct population *p) {
    double expected[MAX_CANDIDATES];
    int n = p->n + p->n_reevaluated;
    if (!p->last_evaluation.scores) return;
    for (int i = 0; i < n; i++)
        if (p->c[i].n_items < p->last_evaluation.n_items) return;
    fitness_shrink(p->last_evaluation.scores, n, p->last_evaluation.n_items, expected);
    for (int i = 0; i < n; i++) p->c[i].expected = expected[i];
}

static void apply_fitness_sharing(struct population *p) {
    double fitness[MAX_POPULATION], shared[MAX_POPULATION];
    int n = p->n, n_all = n + p->n_reevaluated;
    double *distance = xcalloc((size_t)n * (size_t)n, sizeof *distance);
    for (int i = 0; i < n; i++) {
        fitness[i] = p->c[i].fitness.value;
        for (int j = 0; j < n; j++)
            distance[i * n + j] = p->last_evaluation.distance[i * n_all + j];
    }
    fitness_share(fitness, distance, n, p->o->fitness_sharing_radius, shared);
    for (int i = 0; i < n; i++) p->c[i].shared_fitness = shared[i];
    free(distance);
}

/* Credits the child's operator with its gain, and adapts a mutation's step to its divergence. A
 * child with another prompt or temperature than a parent changes for that reason too: it credits no
 * operator. */
static void credit_operator(struct population *p, int i) {
    const struct candidate *c = &p->c[i], *a = find_candidate(p, c->parents[0]),
                           *b = find_candidate(p, c->parents[1]);
    bool mutant = c->operator->kind == OPERATOR_MUTATION;
    struct operator_set *s = mutant ? &p->mutations : &p->crossovers;
    int which = 0;
    while (which < s->selector.n && s->op[which] != c->operator) which++;
    if (!a || which == s->selector.n || !genome_asks_equally(&c->genome, &a->genome) ||
        (b && !genome_asks_equally(&c->genome, &b->genome)))
        return;
    double parent_fitness = b ? (a->fitness.value + b->fitness.value) / 2 : a->fitness.value;
    operator_selector_update(&s->selector, which, c->fitness.value - parent_fitness);
    if (!mutant || !c->operator->unit ||
                    p->o->target_step_divergence <= 0 || !p->last_evaluation.distance)
        return;
    double divergence = p->last_evaluation.distance[(a - p->c) * (p->n + p->n_reevaluated) + i];
    s->step[which] = fmin(
        (double)c->operator->step_max,
        fmax((double)c->operator->step_min,
             mutation_step_adapt(s->step[which], divergence, p->o->target_step_divergence, 0.3)));
}

/* Adds the new candidates to the archive. A candidate that has lost its cell stays in `archived`
 * without its adapter, because archive ids are indices. */
static void archive_update(struct population *p) {
    for (int i = 0; i < p->n; i++) {
        if (p->c[i].elite ||
            !archive_add(&p->archive, p->c[i].descriptor, p->c[i].fitness.value, p->n_archived))
            continue;
        p->archived = xrealloc(p->archived, (size_t)(p->n_archived + 1) * sizeof *p->archived);
        candidate_copy(&p->archived[p->n_archived++], &p->c[i]);
    }
    for (int i = 0; i < p->n_archived; i++) {
        bool is_archived = false;
        for (int k = 0; k < p->archive.n_cells; k++) is_archived |= p->archive.id[k] == i;
        if (is_archived) continue;
        adapter_release(p->archived[i].adapter);
        p->archived[i].adapter = NULL;
    }
}

/* Sorts the evaluation into the given order of the n candidates, and removes the re-evaluated
 * parents. n_all: number of candidates and re-evaluated parents. */
static void evaluation_reorder(struct evaluation *a, const int *order, int n, int n_all) {
    struct evaluation b = {.n_items = a->n_items};
    size_t row = (size_t)a->n_items;
    if (a->scores) b.scores = xcalloc((size_t)n * row + 1, sizeof *b.scores);
    if (a->distance) b.distance = xcalloc((size_t)n * (size_t)n, sizeof *b.distance);
    for (int i = 0; i < n; i++) {
        if (row && a->scores)
            memcpy(b.scores + (size_t)i * row, a->scores + (size_t)order[i] * row,
                   row * sizeof *b.scores);
        for (int j = 0; a->distance && j < n; j++)
            b.distance[i * n + j] = a->distance[order[i] * n_all + order[j]];
    }
    evaluation_release(a);
    *a = b;
}

static void sort_candidates(struct population *p) {
    struct candidate sorted[MAX_POPULATION];
    int order[MAX_POPULATION], n_all = p->n + p->n_reevaluated;
    for (int i = 0; i < p->n; i++) {
        int rank = i;
        for (; rank > 0 && is_better(&p->c[i], &p->c[order[rank - 1]]); rank--)
            order[rank] = order[rank - 1];
        order[rank] = i;
    }
    for (int i = 0; i < p->n; i++) sorted[i] = p->c[order[i]];
    evaluation_reorder(&p->last_evaluation, order, p->n, n_all);
    candidates_release(p->c + p->n, p->n_reevaluated);
    p->n_reevaluated = 0;
    memcpy(p->c, sorted, (size_t)p->n * sizeof *sorted);
}

int population_evaluate(struct population *p, const struct fitness_function *fitness,
                        struct error *err) {
    int n_all = p->n + p->n_reevaluated;
    evaluation_release(&p->last_evaluation);
    if (fitness->evaluate(fitness->ctx, p->generation, p->c, n_all, p->n_reevaluated,
                          &p->last_evaluation, err) != OK)
        return err->code;
    for (int i = 0; i < n_all; i++) compute_fitness(p, i);
    shrink_performance(p);
    if (p->o->fitness_sharing_radius > 0 && p->last_evaluation.distance) apply_fitness_sharing(p);
    for (int i = 0; i < p->n; i++)
        if (p->c[i].operator&& !p->c[i].elite) credit_operator(p, i);
    if (p->archive.n_cells) archive_update(p);
    sort_candidates(p);
    return OK;
}

/* breeding */

/* Selects a candidate of a role (-1: any), except the one with index `except`, by the recipe's
 * selection. Returns its index; -1: there is no such candidate. */
static int select_one(const struct population *p, int role, int except, struct rng *rng) {
    const struct selection *selection = selection_find(p->o->selection);
    bool objectives = strcmp(selection->name, "pareto") == 0;
    int index[MAX_POPULATION], n = 0, chosen = -1;
    double fitness[MAX_POPULATION];
    size_t m = !selection->by_scores ? 0 : objectives ? 3 : (size_t)p->last_evaluation.n_items;
    double *scores = xcalloc((size_t)p->n * m + 1, sizeof *scores);
    for (int i = 0; i < p->n; i++) {
        const struct candidate *c = &p->c[i];
        if (i == except || (role >= 0 && c->role != role)) continue;
        double *row = scores + (size_t)n * m;
        if (objectives)
            memcpy(row, (double[]){c->performance.value, c->cooperation.value, c->novelty.value},
                   3 * sizeof *row);
        else if (m)
            memcpy(row, p->last_evaluation.scores + (size_t)i * m, m * sizeof *row);
        fitness[n] = c->shared_fitness;
        index[n++] = i;
    }
    struct select_pool pool = {.n = n,
                               .fitness = fitness,
                               .scores = scores,
                               .n_scores = (int)m,
                               .truncation_ratio = p->o->truncation_ratio,
                               .tournament = (int)p->o->tournament_size,
                               .selection_pressure = p->o->selection_pressure};
    if (n > 0) selection->pick(&pool, rng, &chosen, 1);
    free(scores);
    return n > 0 ? index[chosen] : -1;
}

static const struct candidate *first_parent(const struct population *p, int role, struct rng *rng) {
    if (p->archive.n_cells) return &p->archived[archive_pick(&p->archive, rng)];
    int i = select_one(p, role, -1, rng);
    return &p->c[i >= 0 ? i : select_one(p, -1, -1, rng)];
}

/* Selects a candidate of any role other than `a`. If 16 tries select `a` again, selects among the
 * other candidates. */
static const struct candidate *second_parent(const struct population *p, const struct candidate *a,
                                             struct rng *rng) {
    const struct candidate *known = find_candidate(p, a->name);
    int first_index = known ? (int)(known - p->c) : -1, i = first_index;
    for (int try = 0; i == first_index && try < 16; try++) i = select_one(p, -1, -1, rng);
    return &p->c[i != first_index ? i : select_one(p, -1, first_index, rng)];
}

/* Rescales the child to the norm interpolated between its parents at t. t is clamped to 0..1,
 * because an extrapolated norm can be negative, which would reverse the child's sign. */
static struct adapter *preserve_norm(struct adapter *child, const struct adapter *a,
                                     const struct adapter *b, double t) {
    t = fmin(1, fmax(0, t));
    double norm = (1 - t) * sqrt(adapter_dot(a, a)) + t * sqrt(adapter_dot(b, b));
    return operator_rescale(child, norm);
}

/* The weights of two parents for an operator; NULL: the operator takes no weights. */
static const float *weights_for(const struct adapter_operator *op, const struct candidate *a,
                                const struct candidate *b, double t, float w[2]) {
    bool fitness = op->weighting == WEIGHTING_FITNESS;
    w[0] = fitness ? (float)a->fitness.value : (float)(1 - t);
    w[1] = fitness ? (float)b->fitness.value : (float)t;
    return op->weighting == WEIGHTING_NONE ? NULL : w;
}

static int make_crossover(const struct population *p, const struct adapter_operator *op,
                          const struct candidate *a, struct candidate *out, struct rng *rng,
                          struct error *err) {
    const struct candidate *b = second_parent(p, a, rng);
    out->role = a->role;
    if (op->weighting == WEIGHTING_NONE && is_better(b, a)) {
        const struct candidate *fitter = b;
        b = a;
        a = fitter;
    }
    float w[2];
    double t = p->o->blend_min + (p->o->blend_max - p->o->blend_min) * (double)rng_uniform(rng);
    /* With a fixed step, all children of a pair would be equal. */
    float step = op->step * (0.5f + rng_uniform(rng));
    if (op->unit) out->step = (double)fminf(op->step_max, fmaxf(op->step_min, step));
    if (op->weighting != WEIGHTING_NONE) out->blend = t;
    struct adapter *parents[2] = {a->adapter, b->adapter};
    struct operands x = {.parents = parents,
                         .weights = weights_for(op, a, b, t, w),
                         .n_parents = 2,
                         .rank = op->weighting == WEIGHTING_FACTORS ? 0 : (int32_t)p->o->rank,
                         .step = (float)out->step,
                         .seed = rng_u64(rng),
                         .names = (const char *const[]){a->name, b->name}};
    if (!(out->adapter = operator_apply(op, &x, err))) return err->code;
    if (p->o->preserve_norm && op->weighting == WEIGHTING_DELTA)
        out->adapter = preserve_norm(out->adapter, parents[0], parents[1], t);
    strcpy(out->parents[0], a->name);
    strcpy(out->parents[1], b->name);
    return OK;
}

static int make_mutant(const struct operator_set *s, int which, const struct candidate *a,
                       struct candidate *out, struct rng *rng, struct error *err) {
    struct operands x = {.parents = (struct adapter *[]){a->adapter},
                         .n_parents = 1,
                         .step = (float)s->step[which],
                         .seed = rng_u64(rng),
                         .names = (const char *const[]){a->name}};
    out->role = a->role;
    out->step = s->step[which];
    strcpy(out->parents[0], a->name);
    out->adapter = operator_apply(s->op[which], &x, err);
    return out->adapter ? OK : err->code;
}

/* A child with the weights of `a`. Its genes come from another parent too. */
static void make_copy(const struct population *p, const struct candidate *a, struct candidate *out,
                      struct rng *rng) {
    out->role = a->role;
    out->blend = 0;
    out->adapter = adapter_retain(a->adapter);
    strcpy(out->parents[0], a->name);
    strcpy(out->parents[1], second_parent(p, a, rng)->name);
}

static const struct candidate *find_parent(const struct population *p, const char *name) {
    const struct candidate *c = find_candidate(p, name);
    for (int j = 0; !c && j < p->n_archived; j++)
        if (strcmp(p->archived[j].name, name) == 0) c = &p->archived[j];
    return c;
}

static void breed_genes(const struct population *p, struct candidate *child, struct rng *genes) {
    const struct candidate *a = find_parent(p, child->parents[0]),
                           *b = find_parent(p, child->parents[1]);
    child->genome = genome_breed(&p->o->genome, &a->genome, b ? &b->genome : NULL, genes);
}

/* The role of the k-th child, or -1: any. */
static int role_of_child(const struct population *p, int k) {
    return p->o->roles ? k % p->n_roles : -1;
}

static bool has_duplicate(const struct candidate *c, int n, const struct candidate *of) {
    for (int i = 0; i < n; i++)
        if (strcmp(c[i].adapter->hash, of->adapter->hash) == 0 &&
            genome_equal(&c[i].genome, &of->genome))
            return true;
    return false;
}

/* Makes child k as next[n]. If the child is empty (its parents may share no module) or a duplicate,
 * tries again, up to TRIES times in all. After the last try a duplicate is accepted, and an empty
 * child is an error. */
static int make_child(const struct population *p, int generation, int k, struct candidate *next,
                      int n, struct error *err) {
    struct rng rng = rng_make(p->seed, RNG_SELECT, (uint32_t)generation, (uint32_t)k),
               genes = rng_make(p->seed, RNG_MUTATE, (uint32_t)generation, (uint32_t)k);
    struct candidate *out = &next[n];
    enum { TRIES = 8 };
    for (int try = 1;; try++) {
        bool copy = (double)rng_uniform(&genes) < p->o->genome.keep_weights;
        bool mutant = (double)rng_uniform(&rng) < p->o->mutation_rate;
        const struct operator_set *s = mutant ? &p->mutations : &p->crossovers;
        const struct candidate *a = first_parent(p, role_of_child(p, k), &rng);
        int which = operator_selector_pick(&s->selector, &rng);
        *out = (struct candidate){.operator= copy ? NULL : s->op[which], .step = NAN, .blend = NAN};
        snprintf(out->name, sizeof out->name, "g%dc%d", generation, k);
        int rc = OK;
        if (copy)
            make_copy(p, a, out, &rng);
        else
            rc = mutant ? make_mutant(s, which, a, out, &rng, err)
                        : make_crossover(p, s->op[which], a, out, &rng, err);
        if (rc == OK) breed_genes(p, out, &genes);
        bool retry = rc == ERR_STATE ||
                     (rc == OK && (has_duplicate(p->c, p->n, out) || has_duplicate(next, n, out)));
        if (!retry || try == TRIES) return rc;
        adapter_release(out->adapter);
        out->adapter = NULL;
    }
}

/* Copies the elites to `next`: first the best of each role, then the best of all roles. Returns the
 * number of elites. */
static int copy_elites(const struct population *p, struct candidate *next) {
    int n = 0, n_elites = MIN((int)p->o->elites, p->n);
    bool copied[MAX_POPULATION] = {false}, role_filled[MAX_POPULATION] = {false};
    for (int pass = p->n_roles > 1 ? 0 : 1; pass < 2; pass++)
        for (int i = 0; i < p->n && n < n_elites; i++) {
            if (copied[i] || (pass == 0 && role_filled[p->c[i].role])) continue;
            copied[i] = role_filled[p->c[i].role] = true;
            candidate_copy(&next[n], &p->c[i]);
            next[n++].elite = true;
        }
    return n;
}

/* Appends to the n candidates of `next` the parents of children that are not among them. Returns
 * the number of appended parents. */
static int add_reevaluated_parents(const struct population *p, struct candidate *next, int n) {
    int n_all = n;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < 2 && !next[i].elite; k++) {
            bool is_present = !next[i].parents[k][0];
            for (int j = 0; j < n_all; j++)
                is_present |= strcmp(next[j].name, next[i].parents[k]) == 0;
            const struct candidate *c = is_present ? NULL : find_parent(p, next[i].parents[k]);
            if (c && n_all < MAX_CANDIDATES) candidate_copy(&next[n_all++], c);
        }
    return n_all - n;
}

/* Offloads the child, and returns the memory of the parents that were read for it. */
static void offload_child(const struct population *p, struct adapter *child) {
    if (p->offload_dir) adapter_offload(child, p->offload_dir);
    for (int i = 0; i < p->n; i++) adapter_free_pages(p->c[i].adapter);
    for (int i = 0; i < p->n_archived; i++)
        if (p->archived[i].adapter) adapter_free_pages(p->archived[i].adapter);
}

/* A child like `bred`, without breeding, and with new genes. */
static void rehearse_child(const struct population *p, const struct candidate *bred, int k,
                           struct candidate *out) {
    struct rng genes = rng_make(p->seed, RNG_MUTATE, (uint32_t)p->generation + 1, (uint32_t)k);
    *out = *bred;
    out->genome = genome_breed(&p->o->genome, NULL, NULL, &genes);
    snprintf(out->name, sizeof out->name, "g%dc%d", p->generation + 1, k);
    const struct adapter *a = bred->adapter;
    out->adapter = a->magnitude || a->vocab_overrides
                       ? adapter_retain(bred->adapter)
                       : adapter_new(&a->shape, &a->config, (uint64_t)k);
}

int population_breed(struct population *p, struct error *err) {
    struct candidate next[MAX_CANDIDATES];
    int n = copy_elites(p, next), first = n, rc = OK;
    double start = clock_now(), seconds = 0;
    for (int k = 0; rc == OK && n < (int)p->o->population; k++) {
        if (p->rehearses && k > 0)
            rehearse_child(p, &next[first], k, &next[n]);
        else
            rc = make_child(p, p->generation + 1, k, next, n, err);
        if (rc == OK) offload_child(p, next[n++].adapter);
        if (k == 0) seconds = clock_now() - start;
    }
    if (p->rehearses) p->unbred = seconds * (n - first) - (clock_now() - start);
    if (rc != OK) {
        candidates_release(next, n);
        return rc;
    }
    int n_reevaluated = add_reevaluated_parents(p, next, n);
    candidates_release(p->c, p->n);
    memcpy(p->c, next, sizeof *next * (size_t)(n + n_reevaluated));
    p->n = n;
    p->n_reevaluated = n_reevaluated;
    p->generation++;
    return OK;
}

/* as JSON */

json_t *candidate_json(const struct candidate *c) {
    json_t *parents = json_array(), *weights = c->n_mix ? json_array() : NULL;
    for (int k = 0; k < 2 && c->parents[k][0]; k++)
        json_array_append_new(parents, json_string(c->parents[k]));
    for (int i = 0; i < c->n_mix; i++)
        json_array_append_new(weights, json_real((double)c->mix[i].weight));
    json_t *v = json_pack(
        "{s:s,s:s*,s:i,s:b,s:o,s:s*,s:o,s:f,s:o,s:o,s:o,s:i}", "name", c->name, "hash",
        c->adapter ? c->adapter->hash : NULL, "role", c->role, "elite", (int)c->elite, "parents",
        parents, "operator", c->operator? operator_stored_name(c->operator) : NULL, "performance",
        stats_interval_json(c->performance), "expected", c->expected, "cooperation",
        stats_interval_json(c->cooperation), "novelty", stats_interval_json(c->novelty), "fitness",
        stats_interval_json(c->fitness), "items", c->n_items);
    if (!isnan(c->step)) json_object_set_new(v, "step", json_real(c->step));
    if (!isnan(c->blend)) json_object_set_new(v, "blend", json_real(c->blend));
    if (weights) json_object_set_new(v, "weights", weights);
    json_t *genes = genome_json(&c->genome);
    if (genes) json_object_set_new(v, "genes", genes);
    return v;
}

static void operator_set_json(const struct operator_set *s, const char *kind, json_t *out) {
    for (int i = 0; i < s->selector.n; i++) {
        const struct operator_stats *stats = &s->selector.v[i];
        json_t *v = json_pack(
            "{s:s,s:s,s:I,s:I,s:f,s:f,s:b}", "name", operator_stored_name(s->op[i]), "kind", kind,
            "used", (json_int_t)stats->used, "improved", (json_int_t)stats->improved, "quality",
            stats->quality, "p", stats->p, "dropped", (int)stats->dropped);
        if (!isnan(s->step[i]) && s->op[i]->unit)
            json_object_set_new(v, "step", json_real(s->step[i]));
        json_array_append_new(out, v);
    }
}

static json_t *archive_json(const struct population *p) {
    const struct archive *a = &p->archive;
    json_t *cells = json_array();
    for (int k = 0; k < a->n_cells; k++) {
        if (a->id[k] < 0) continue;
        json_array_append_new(cells,
                              json_pack("{s:i,s:i,s:s,s:f}", "x", k / a->axis[1].bins, "y",
                                        k % a->axis[1].bins, "name", p->archived[a->id[k]].name,
                                        "fitness", a->fitness[k]));
    }
    return json_pack("{s:i,s:f,s:f,s:o}", "bins", a->axis[0].bins, "coverage", archive_coverage(a),
                     "qd_score", archive_qd_score(a, 0), "cells", cells);
}

enum { DIVERSITY_MAX_CANDIDATES = 24 };

json_t *population_json(const struct population *p) {
    struct adapter *a[MAX_POPULATION];
    json_t *list = json_array(), *operators = json_array();
    for (int i = 0; i < p->n; i++) {
        a[i] = p->c[i].adapter;
        json_array_append_new(list, candidate_json(&p->c[i]));
    }
    /* Diversity of the fittest candidates only, because the number of pairs is quadratic, and on a
     * large base model a pair takes tens of milliseconds. */
    int n = MIN(p->n, DIVERSITY_MAX_CANDIDATES);
    double *distance =
        p->last_evaluation.distance ? xcalloc((size_t)n * (size_t)n, sizeof *distance) : NULL;
    for (int i = 0; distance && i < n; i++)
        memcpy(distance + i * n, p->last_evaluation.distance + i * p->n,
               (size_t)n * sizeof *distance);
    struct diversity d = diversity_compute(a, n, distance);
    free(distance);
    operator_set_json(&p->crossovers, "crossover", operators);
    operator_set_json(&p->mutations, "mutation", operators);
    json_t *v = json_pack("{s:i,s:o,s:o,s:o}", "generation", p->generation, "candidates", list,
                          "diversity", diversity_json(&d), "operators", operators);
    if (p->archive.n_cells) json_object_set_new(v, "archive", archive_json(p));
    return v;
}
