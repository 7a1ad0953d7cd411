/*
 * evolution: the functions for evolution of include/shoal.h: `shoal evolve` and `shoal resume` as
 * calls, and a population with the caller's fitness.
 *
 * States of a population: a generation is new, then evaluated; breeding makes a new one. Selection
 * uses the mean score only: the terms of a recipe's fitness that need answers (cooperation,
 * novelty) and the options that need distances of behaviour do not exist here.
 */
#include "lib/internal.h"

#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* runs */

struct run_options {
    char *runs, *id;
    int64_t seed, threads;
    bool exact, fast;
};
#define ROW(name, type, field, fallback, min, max)                                                 \
    { name, type, offsetof(struct run_options, field), fallback, min, max, NULL, NULL }
static const struct option_row run_rows[] = {
    ROW("runs", OPT_STRING, runs, "runs", 0, 0),
    ROW("threads", OPT_INT, threads, "0", 0, 1024),
    ROW("id", OPT_STRING, id, NULL, 0, 0),
    ROW("seed", OPT_INT, seed, "-1", -1, 9e15),
    ROW("exact", OPT_BOOL, exact, NULL, 0, 0),
    ROW("fast", OPT_BOOL, fast, NULL, 0, 0),
    {0},
};
#undef ROW

static json_t *recipe_run(const struct evolve_env *env, const char *recipe,
                          const struct run_options *o, struct error *err) {
    struct evolve_recipe r;
    json_t *result = NULL;
    int rc = evolve_recipe_load(&r, recipe, err);
    if (rc == OK && o->seed >= 0) r.seed = o->seed;
    if (rc == OK) result = evolve_run_execute(env, &r, o->id, err);
    evolve_recipe_release(&r);
    return result;
}

/* recipe NULL: resumes the run `id`. A cancelled call sets the pause flag of the run. */
static char *run_call(const char *recipe, const char *id, const struct option_row *rows,
                      const char *const *options, const struct shoal_callbacks *callbacks,
                      struct shoal_error *err) {
    struct error inner = {0};
    struct run_options o = {0};
    struct call c;
    struct evolve_env env = {.find = xstrdup, .pause = &c.sink.cancelled};
    json_t *result = NULL;
    call_begin(&c, callbacks);
    int rc = recipe || id ? OK : error_set(&inner, ERR_USAGE, "no recipe or run is named");
    if (rc == OK) rc = call_options_parse(rows, &o, options, &inner);
    if (rc == OK) rc = numeric_class_choose(o.exact, o.fast, &env.cls, &inner);
    if (rc == OK) {
        env.root = o.runs;
        env.pool = pool_new((int)o.threads);
        result =
            recipe ? recipe_run(&env, recipe, &o, &inner) : evolve_run_resume(&env, id, &inner);
        rc = result ? OK : inner.code;
        pool_free(env.pool);
    }
    options_release(run_rows, &o);
    call_end(&c, rc, &inner, err);
    return json_result(result);
}

char *shoal_evolve(const char *recipe, const char *const *options,
                   const struct shoal_callbacks *callbacks, struct shoal_error *err) {
    return run_call(recipe, NULL, run_rows, options, callbacks, err);
}

char *shoal_evolve_resume(const char *id, const char *const *options,
                          const struct shoal_callbacks *callbacks, struct shoal_error *err) {
    struct option_row *rows =
        options_select(run_rows, (const char *const[]){"runs", "threads", NULL});
    char *result = run_call(NULL, id, rows, options, callbacks, err);
    free(rows);
    return result;
}

/* populations */

struct population_options {
    struct evolve_options evolve; /* first: its rows have their own offsets */
    int64_t seed;
};
static const char *const selected_options[] = {
    "population",         "elites",          "rank",      "crossovers",
    "mutations",          "mutation-rate",   "blend-min", "blend-max",
    "preserve-norm",      "max-regression",  "selection", "truncation-ratio",
    "selection-pressure", "tournament-size", NULL};
static const struct option_row seed_rows[] = {
    {"seed", OPT_INT, offsetof(struct population_options, seed), "1", 0, 9e15, NULL, NULL},
    {0},
};
static const struct fitness_options fitness_by_scores = {.performance = 1};

struct shoal_population {
    struct population p;
    struct population_options options;
    bool evaluated; /* the present generation */
};

static int options_fill(struct population_options *o, const char *const *options,
                        struct error *err) {
    struct option_row *selected = options_select(evolve_option_rows, selected_options),
                      *rows =
                          options_join(selected, (const struct option_table[]){{seed_rows}, {0}});
    int rc = call_options_parse(rows, o, options, err);
    free(rows);
    free(selected);
    return rc;
}

static int founders_check(const struct shoal *s, const struct shoal_adapter *const *founders,
                          const char *const *names, int n, struct error *err) {
    if (n > 0 && (!founders || !names)) return error_set(err, ERR_USAGE, "no founders or names");
    for (int i = 0; i < n; i++) {
        if (!founders[i] || !names[i])
            return error_set(err, ERR_USAGE, "founder %d or its name is NULL", i);
        const struct adapter *a = adapter_unwrap(founders[i]);
        if (!adapter_fits(a, &s->model->config))
            return error_set(err, ERR_MISMATCH, "founder '%s' does not fit the shape of model '%s'",
                             names[i], s->model->name);
        if (adapter_require_plain(a, "evolution", err) != OK) return err->code;
    }
    return OK;
}

struct shoal_population *shoal_population_new(struct shoal *s,
                                              const struct shoal_adapter *const *founders,
                                              const char *const *names, int n,
                                              const char *const *options, struct shoal_error *err) {
    struct error inner = {0};
    struct shoal_population *p = xcalloc(1, sizeof *p);
    int rc = model_check_idle(s, &inner);
    if (rc == OK) rc = founders_check(s, founders, names, n, &inner);
    if (rc == OK) rc = options_fill(&p->options, options, &inner);
    if (rc == OK)
        rc = population_init(&p->p, &p->options.evolve, &fitness_by_scores,
                             (uint64_t)p->options.seed, (struct adapter *const *)founders, names, n,
                             &inner);
    if (rc == OK) return p;
    error_copy(err, &inner);
    shoal_population_free(p);
    return NULL;
}

void shoal_population_free(struct shoal_population *p) {
    if (!p) return;
    population_release(&p->p);
    options_release(evolve_option_rows, &p->options.evolve);
    free(p);
}

/* evaluation */

struct caller_fitness {
    shoal_fitness_fn fn;
    void *ctx;
    int n_items;
};

static int score_check(double score, const char *name, int item, struct error *err) {
    if (score >= 0 && score <= 1) return OK;
    return error_set(err, isfinite(score) ? ERR_USAGE : ERR_NUMERIC,
                     "candidate '%s' has score %g for item %d; scores are from 0 to 1", name, score,
                     item);
}

/* Calls the caller's function with all candidates. Scores that it does not set stay NaN. */
static int scores_fill(const struct caller_fitness *f, const struct candidate *c, int n,
                       double *scores, struct error *err) {
    const struct shoal_adapter *adapters[MAX_CANDIDATES];
    const char *names[MAX_CANDIDATES];
    for (int i = 0; i < n; i++) {
        adapters[i] = adapter_wrap(c[i].adapter);
        names[i] = c[i].name;
    }
    for (int i = 0; i < n * f->n_items; i++) scores[i] = NAN;
    int stop = f->fn(f->ctx, n, adapters, names, f->n_items, scores);
    int rc = stop ? error_set(err, ERR_STATE, "the fitness function returned %d", stop) : OK;
    for (int i = 0; rc == OK && i < n * f->n_items; i++)
        rc = score_check(scores[i], names[i / f->n_items], i % f->n_items, err);
    return rc;
}

static int scores_evaluate(void *ctx, int generation, struct candidate *c, int n, int n_reevaluated,
                           struct evaluation *out, struct error *err) {
    const struct caller_fitness *f = ctx;
    (void)generation;
    (void)n_reevaluated;
    out->scores = try_calloc((size_t)n * (size_t)f->n_items, sizeof *out->scores, err);
    int rc = out->scores ? scores_fill(f, c, n, out->scores, err) : err->code;
    if (rc != OK) return rc;
    out->n_items = f->n_items;
    for (int i = 0; i < n; i++) {
        c[i].performance = stats_mean_interval(out->scores + i * f->n_items, f->n_items);
        c[i].n_items = f->n_items;
    }
    return OK;
}

enum { MAX_ITEMS = 1000000 };

int shoal_population_evaluate(struct shoal_population *p, shoal_fitness_fn fitness, void *ctx,
                              int n_items, struct shoal_error *err) {
    struct error inner = {0};
    struct caller_fitness f = {fitness, ctx, n_items};
    const struct fitness_function function = {&f, scores_evaluate};
    int rc = OK;
    if (p->evaluated)
        rc = error_set(&inner, ERR_STATE, "the generation is evaluated; breed the next one");
    else if (!fitness || n_items < 1 || n_items > MAX_ITEMS)
        rc = error_set(&inner, ERR_USAGE, "a fitness function and 1 to %d items are needed",
                       MAX_ITEMS);
    if (rc == OK) rc = population_evaluate(&p->p, &function, &inner);
    if (rc != OK) return error_copy(err, &inner);
    p->evaluated = true;
    return OK;
}

int shoal_population_breed(struct shoal_population *p, struct shoal_error *err) {
    struct error inner = {0};
    int rc = p->evaluated ? population_breed(&p->p, &inner)
                          : error_set(&inner, ERR_STATE, "evaluate the generation first");
    if (rc != OK) return error_copy(err, &inner);
    p->evaluated = false;
    return OK;
}

/* the generation */

int shoal_population_size(const struct shoal_population *p) {
    return p->p.n;
}

const char *shoal_population_name(const struct shoal_population *p, int i) {
    return i >= 0 && i < p->p.n ? p->p.c[i].name : NULL;
}

const struct shoal_adapter *shoal_population_adapter(const struct shoal_population *p, int i) {
    return i >= 0 && i < p->p.n ? adapter_wrap(p->p.c[i].adapter) : NULL;
}

char *shoal_population_info(const struct shoal_population *p) {
    return p->evaluated ? json_result(population_json(&p->p)) : NULL;
}
