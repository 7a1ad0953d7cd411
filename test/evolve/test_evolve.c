/*
 * test_evolve: breeding with known fitness functions, and whole runs on a model so small that a run
 * takes seconds.
 *
 * A synthetic fitness function is known (the distance of a candidate's ΔW to a target, or a number
 * for each name), so the best candidate is known too. Whole runs check the guarantees of a run:
 * equal bits with one thread and two, and after kill -9 at several moments, and no effect of zero
 * adapters. The model is made here: its tokenizer is trained on the task families, and its weights
 * are random. Its accuracy does not matter, only that results are equal.
 */
#define _GNU_SOURCE
#include "evolve/evolve.h"
#include "fixture.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static struct error err;

static void assert_close(double got, double want, double tolerance) {
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%.12g is not %.12g ± %.1g", got, want, tolerance);
}

/* A fitness function: minus the distance to a target, or numbers by name. Counts its calls. */
struct known_fitness {
    const struct adapter *target;
    struct {
        const char *name;
        double performance, cooperation, novelty;
    } values[8]; /* by candidate; the last has no name */
    int calls, last_n;
};

static int known_fitness_evaluate(void *ctx, int generation, struct candidate *c, int n,
                                  int n_reevaluated, struct evaluation *out, struct error *e) {
    struct known_fitness *k = ctx;
    (void)e;
    (void)out;
    (void)generation;
    k->calls++;
    k->last_n = n - n_reevaluated;
    for (int i = 0; i < n; i++) {
        c[i].performance = c[i].cooperation = c[i].novelty = (struct stats_interval){0};
        if (k->target) c[i].performance.value = -adapter_distance(c[i].adapter, k->target);
        for (int j = 0; !k->target && j < 8 && k->values[j].name; j++) {
            if (strcmp(k->values[j].name, c[i].name) != 0) continue;
            c[i].performance.value = k->values[j].performance;
            c[i].cooperation.value = k->values[j].cooperation;
            c[i].novelty.value = k->values[j].novelty;
        }
    }
    return OK;
}

enum { FOUNDERS = 6 };
static const char *const names[FOUNDERS] = {"ann", "bea", "cid", "dee", "eve", "fay"};

/* Six random founders, and a target; founder 2 is placed next to it. */
struct breeding {
    struct adapter *founders[FOUNDERS], *target;
    struct evolve_options o;
    struct fitness_options f;
    struct population p;
    struct known_fitness known_fitness;
};

static void set_operators(struct breeding *g, const char *crossovers, const char *mutations) {
    strings_release(&g->o.crossovers);
    strings_release(&g->o.mutations);
    strings_add(&g->o.crossovers, crossovers);
    strings_add(&g->o.mutations, mutations);
}

static void breeding_open(struct breeding *g, bool plant) {
    struct model_config c;
    *g = (struct breeding){0};
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    g->target = fixture_adapter(&c, 4, "q_proj,v_proj", 0.1f, 100);
    for (int i = 0; i < FOUNDERS; i++)
        g->founders[i] = fixture_adapter(&c, 4, "q_proj,v_proj", 0.1f, (uint64_t)i);
    if (plant) {
        struct adapter *near = adapter_blend(g->founders[2], g->target, 0.8f, 8, BLEND_DELTA, &err);
        adapter_release(g->founders[2]);
        g->founders[2] = near;
    }
    options_default(evolve_option_rows, &g->o);
    options_default(fitness_option_rows, &g->f);
    set_operators(g, "delta", "noise");
    free(g->o.selection);
    g->o.selection = xstrdup("truncation");
    g->known_fitness.target = g->target;
}

static void breeding_begin(struct breeding *g, uint64_t seed) {
    population_release(&g->p);
    if (population_init(&g->p, &g->o, &g->f, seed, g->founders, names, FOUNDERS, &err) != OK)
        fail_msg("%s", err.text);
}

static void breeding_evaluate(struct breeding *g) {
    const struct fitness_function l = {&g->known_fitness, known_fitness_evaluate};
    assert_int_equal(population_evaluate(&g->p, &l, &err), OK);
}

static void breeding_next(struct breeding *g) {
    if (population_breed(&g->p, &err) != OK) fail_msg("%s", err.text);
}

static void breeding_close(struct breeding *g) {
    population_release(&g->p);
    for (int i = 0; i < FOUNDERS; i++) adapter_release(g->founders[i]);
    adapter_release(g->target);
    options_release(evolve_option_rows, &g->o);
    options_release(fitness_option_rows, &g->f);
}

/* Elites are kept, so the best fitness never decreases from one generation to the next. */
static void test_best_fitness_never_decreases(void **state) {
    (void)state;
    struct breeding g;
    breeding_open(&g, false);
    for (uint64_t seed = 1; seed <= 3; seed++) {
        breeding_begin(&g, seed);
        double best = -1e9;
        for (int t = 0; t < 6; t++) {
            breeding_evaluate(&g);
            assert_true(g.p.c[0].fitness.value >= best);
            best = g.p.c[0].fitness.value;
            for (int i = 1; i < g.p.n; i++)
                assert_true(g.p.c[i - 1].fitness.value >= g.p.c[i].fitness.value);
            breeding_next(&g);
        }
    }
    breeding_close(&g);
}

/* Two founders on opposite sides of the target: their children are nearer to it than either. */
static void test_crossover_improves(void **state) {
    (void)state;
    struct breeding g;
    breeding_open(&g, false);
    for (int i = 0; i < 2; i++) {
        struct adapter *to =
            adapter_blend(g.target, g.founders[5], i ? 0.6f : -0.6f, 8, BLEND_DELTA, &err);
        adapter_release(g.founders[i]);
        g.founders[i] = to;
    }
    g.o.rank = 8;
    g.o.mutation_rate = 0;
    breeding_begin(&g, 1);
    breeding_evaluate(&g);
    double founders = g.p.c[0].fitness.value;
    for (int t = 0; t < 3; t++) {
        breeding_next(&g);
        breeding_evaluate(&g);
    }
    assert_true(g.p.c[0].fitness.value > founders + 0.05);
    assert_true(g.p.c[0].parents[0][0] != 0);
    breeding_close(&g);
}

/* Whether c is one of the candidates line[n], or a child of one. */
static bool is_descendant(const char *const *line, int n, const struct candidate *c) {
    for (int i = 0; i < n; i++)
        if (strcmp(line[i], c->name) == 0 || strcmp(line[i], c->parents[0]) == 0 ||
            strcmp(line[i], c->parents[1]) == 0)
            return true;
    return false;
}

static void test_planted_founder_wins(void **state) {
    (void)state;
    struct breeding g;
    breeding_open(&g, true);
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct strings line = {0};
        strings_add(&line, "cid");
        breeding_begin(&g, seed);
        breeding_evaluate(&g);
        assert_string_equal(g.p.c[0].name, "cid");
        for (int t = 0; t < 5; t++) {
            breeding_next(&g);
            breeding_evaluate(&g);
            for (int i = 0; i < g.p.n; i++)
                if (is_descendant((const char *const *)line.v, line.n, &g.p.c[i]))
                    strings_add(&line, g.p.c[i].name);
        }
        for (int i = 0; i < (g.p.n + 1) / 2; i++)
            assert_true(is_descendant((const char *const *)line.v, line.n, &g.p.c[i]));
        assert_true(adapter_distance(g.p.c[0].adapter, g.target) <=
                    adapter_distance(g.founders[2], g.target));
        strings_release(&line);
    }
    breeding_close(&g);
}

static void record_history(struct breeding *g, uint64_t seed, struct buf *out) {
    breeding_begin(g, seed);
    for (int t = 0; t < 4; t++) {
        breeding_evaluate(g);
        for (int i = 0; i < g->p.n; i++)
            buf_printf(out, "%s %s %.17g\n", g->p.c[i].name, g->p.c[i].adapter->hash,
                       g->p.c[i].fitness.value);
        breeding_next(g);
    }
}

static void test_seed_determines_history(void **state) {
    (void)state;
    struct breeding g;
    struct buf a = {0}, again = {0}, other = {0};
    breeding_open(&g, false);
    record_history(&g, 5, &a);
    record_history(&g, 5, &again);
    record_history(&g, 6, &other);
    assert_string_equal(a.data, again.data);
    assert_string_not_equal(a.data, other.data);
    buf_release(&a);
    buf_release(&again);
    buf_release(&other);
    breeding_close(&g);
}

/* The rank of a candidate in the generation before. */
static int rank_of(const char order[][32], int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (strcmp(order[i], name) == 0) return i;
    fail_msg("'%s' was no candidate", name);
    return -1;
}

/* The rules of breeding: the best two are copied, children have one or two different parents from
 * the better half, there is one evaluation per generation, and parents are evaluated again with
 * their children. */
static void test_breeding_rules(void **state) {
    (void)state;
    struct breeding g;
    int mutants = 0;
    breeding_open(&g, false);
    breeding_begin(&g, 1);
    for (int t = 0; t < 4; t++) {
        char order[MAX_POPULATION][32], hash[MAX_POPULATION][HASH_LEN];
        breeding_evaluate(&g);
        assert_int_equal(g.known_fitness.calls, t + 1);
        assert_int_equal(g.known_fitness.last_n, g.p.n);
        const struct adapter *best[2] = {g.p.c[0].adapter, g.p.c[1].adapter};
        int n = g.p.n;
        for (int i = 0; i < n; i++) strcpy(order[i], g.p.c[i].name);
        for (int i = 0; i < n; i++) strcpy(hash[i], g.p.c[i].adapter->hash);
        breeding_next(&g);
        assert_int_equal(g.p.generation, t + 1);
        assert_int_equal(g.p.n, 6);
        for (int i = 0; i < g.p.n; i++) {
            const struct candidate *c = &g.p.c[i];
            assert_int_equal(c->elite, i < 2);
            if (i < 2) assert_ptr_equal(c->adapter, best[i]);
            if (i < 2) assert_string_equal(c->name, order[i]);
            if (i < 2) continue;
            bool mutant = c->operator->kind == OPERATOR_MUTATION;
            mutants += mutant;
            assert_int_equal(!mutant, c->parents[1][0] != 0);
            assert_string_not_equal(c->parents[0], c->parents[1]);
            for (int k = 0; k < 2 - mutant; k++)
                assert_true(rank_of((const char(*)[32])order, n, c->parents[k]) < 3);
            assert_true(mutant || (c->blend >= 0.3 && c->blend <= 0.7));
            const json_t *lineage = c->adapter->lineage;
            const char *parents = json_string_value(json_object_get(lineage, "parents"));
            for (int k = 0; k < 2 - mutant; k++)
                assert_memory_equal(parents + k * HASH_LEN,
                                    hash[rank_of((const char(*)[32])order, n, c->parents[k])],
                                    HASH_LEN - 1);
            assert_string_equal(json_string_value(json_object_get(lineage, "operator")),
                                mutant ? "noise" : "delta");
            for (int j = 0; j < n; j++) assert_string_not_equal(c->name, order[j]);
            for (int k = 0; k < 2 - mutant; k++) {
                bool is_present = false;
                for (int j = 0; j < g.p.n + g.p.n_reevaluated; j++)
                    is_present |= j != i && strcmp(g.p.c[j].name, c->parents[k]) == 0;
                assert_true(is_present);
            }
        }
    }
    assert_true(mutants > 0);
    breeding_close(&g);
}

static const struct candidate *candidate_find(const struct population *p, const char *name) {
    for (int i = 0; i < p->n; i++)
        if (strcmp(p->c[i].name, name) == 0) return &p->c[i];
    fail_msg("no candidate '%s'", name);
    return NULL;
}

static void test_weights(void **state) {
    (void)state;
    struct breeding g;
    breeding_open(&g, false);
    g.known_fitness.target = NULL;
    g.known_fitness.values[0].name = "ann", g.known_fitness.values[0].performance = 0.9;
    g.known_fitness.values[1].name = "bea", g.known_fitness.values[1].cooperation = 0.5;
    g.known_fitness.values[2].name = "cid", g.known_fitness.values[2].novelty = 0.8;
    g.known_fitness.values[3].name = "dee", g.known_fitness.values[3].performance = 0.5,
    g.known_fitness.values[3].cooperation = 0.4, g.known_fitness.values[3].novelty = 0.25;
    breeding_begin(&g, 1);
    breeding_evaluate(&g);
    assert_close(candidate_find(&g.p, "ann")->fitness.value, 0.6 * 0.9, 1e-15);
    assert_close(candidate_find(&g.p, "bea")->fitness.value, 0.3 * 0.5, 1e-15);
    assert_close(candidate_find(&g.p, "cid")->fitness.value, 0.1 * 0.8, 1e-15);
    assert_close(candidate_find(&g.p, "dee")->fitness.value, 0.6 * 0.5 + 0.3 * 0.4 + 0.1 * 0.25,
                 1e-15);
    assert_string_equal(g.p.c[0].name, "ann");
    assert_string_equal(g.p.c[4].name, "eve"); /* equal fitness: by name */
    assert_string_equal(g.p.c[5].name, "fay");
    static const char *const winner[3] = {"ann", "bea", "cid"};
    for (int i = 0; i < 3; i++) {
        g.f.performance = i == 0, g.f.cooperation = i == 1, g.f.novelty = i == 2;
        breeding_begin(&g, 1);
        breeding_evaluate(&g);
        assert_string_equal(g.p.c[0].name, winner[i]);
    }
    breeding_close(&g);
}

/* Without mutation a child of the crossover factor_blend is the blend of its parents' factors,
 * tensor by tensor. */
static void test_factor_blend(void **state) {
    (void)state;
    struct breeding g;
    breeding_open(&g, false);
    set_operators(&g, "factor_blend", "noise");
    g.o.mutation_rate = 0;
    breeding_begin(&g, 1);
    breeding_evaluate(&g);
    struct candidate before[FOUNDERS];
    memcpy(before, g.p.c, sizeof before);
    breeding_next(&g);
    for (int i = 2; i < g.p.n; i++) {
        const struct candidate *c = &g.p.c[i], *a = NULL, *b = NULL;
        for (int k = 0; k < 3; k++) {
            if (strcmp(before[k].name, c->parents[0]) == 0) a = &before[k];
            if (strcmp(before[k].name, c->parents[1]) == 0) b = &before[k];
        }
        assert_true(a && b);
        assert_int_equal(c->adapter->n_data, a->adapter->n_data);
        for (size_t k = 0; k < c->adapter->n_data; k++) {
            float x = a->adapter->data[k], y = b->adapter->data[k];
            assert_close((double)c->adapter->data[k],
                         (1 - c->blend) * (double)x + c->blend * (double)y, 1e-6);
        }
    }
    /* Founder 2 has another rank, so its tensors cannot be averaged with the others'. The error
     * does not change the population. */
    breeding_close(&g);
    breeding_open(&g, true);
    set_operators(&g, "factor_blend", "noise");
    breeding_begin(&g, 1);
    breeding_evaluate(&g);
    assert_int_equal(population_breed(&g.p, &err), ERR_MISMATCH);
    assert_non_null(strstr(err.text, "ranks differ"));
    assert_int_equal(g.p.n, FOUNDERS);
    assert_int_equal(g.p.generation, 0);
    breeding_close(&g);
}

/* An operator whose children regress is dropped; the children of other operators do not count. The
 * other operator stays, and its step adapts to the measured divergence. */
static void test_regressing_operator_is_dropped(void **state) {
    (void)state;
    struct breeding g;
    breeding_open(&g, false);
    set_operators(&g, "delta", "reinit,noise");
    g.o.mutation_rate = 1;
    g.o.population = 12;
    breeding_begin(&g, 1);
    g.p.mutations.step[0] = 1; /* full replacement: the child has nothing of the parent */
    const struct operator_set *s = &g.p.mutations;
    int64_t used = 0;
    for (int t = 0; t < 40 && !s->selector.v[0].dropped; t++) {
        breeding_evaluate(&g);
        breeding_next(&g);
        g.p.mutations.step[0] = 0.9;
        used = s->selector.v[0].used;
    }
    assert_true(s->selector.v[0].dropped);
    assert_true(s->selector.v[0].quality < -0.02);
    assert_false(s->selector.v[1].dropped);
    for (int t = 0; t < 3; t++) {
        breeding_evaluate(&g);
        breeding_next(&g);
        for (int i = g.p.o->elites; i < g.p.n; i++)
            assert_string_equal(g.p.c[i].operator->name, "noise");
    }
    assert_true(s->selector.v[0].used - used <= 12); /* children that were already bred */
    breeding_close(&g);
}

/* A fitness function over items: candidate i is correct on the items of its name's letter, and
 * answers accordingly. */
static int letters_evaluate(void *ctx, int generation, struct candidate *c, int n,
                            int n_reevaluated, struct evaluation *out, struct error *e) {
    enum { ITEMS = 6 };
    (void)ctx;
    (void)generation;
    (void)n_reevaluated;
    (void)e;
    *out = (struct evaluation){.n_items = ITEMS,
                               .scores = xcalloc((size_t)n * ITEMS, sizeof(double)),
                               .distance = xcalloc((size_t)n * (size_t)n, sizeof(double))};
    for (int i = 0; i < n; i++) {
        c[i].n_items = ITEMS;
        c[i].cooperation = c[i].novelty = (struct stats_interval){0};
        c[i].descriptor[0] = c[i].descriptor[1] = 0.1 + 0.1 * (c[i].adapter->hash[0] % 8);
        for (int k = 0; k < ITEMS; k++)
            out->scores[i * ITEMS + k] = (c[i].adapter->hash[k] + k) % 2;
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++)
            for (int k = 0; k < ITEMS; k++)
                out->distance[i * n + j] +=
                    fabs(out->scores[i * ITEMS + k] - out->scores[j * ITEMS + k]) / ITEMS;
    return OK;
}

/* With every selection, and with sharing, roles and an archive: the same history from the same
 * seed, candidates ordered by fitness, evaluations in the candidates' order, a child in every role.
 */
static void test_every_selection(void **state) {
    (void)state;
    struct breeding g;
    const struct fitness_function l = {NULL, letters_evaluate};
    breeding_open(&g, false);
    for (const struct selection *sel = selections; sel->name; sel++)
        for (int kind = 0; kind < 4; kind++) {
            free(g.o.selection);
            g.o.selection = xstrdup(sel->name);
            g.o.fitness_sharing_radius = kind == 1 ? 0.5 : 0;
            g.o.roles = kind == 2;
            g.o.map_elites_bins = kind == 3 ? 5 : 0;
            g.o.population = 14;
            g.o.elites = kind == 2 ? FOUNDERS : 2;
            char last[2][HASH_LEN];
            for (int again = 0; again < 2; again++) {
                breeding_begin(&g, 7);
                for (int t = 0; t < 3; t++) {
                    assert_int_equal(population_evaluate(&g.p, &l, &err), OK);
                    for (int i = 0; i < g.p.n; i++) {
                        const double *row =
                            g.p.last_evaluation.scores + i * g.p.last_evaluation.n_items;
                        double mean = 0;
                        for (int k = 0; k < g.p.last_evaluation.n_items; k++)
                            mean += row[k] / g.p.last_evaluation.n_items;
                        assert_close(g.p.c[i].performance.value, mean, 1e-12);
                        assert_true(i == 0 || g.p.c[i - 1].fitness.value >= g.p.c[i].fitness.value);
                    }
                    json_t *v = population_json(&g.p);
                    assert_int_equal(json_is_object(json_object_get(v, "archive")), kind == 3);
                    json_decref(v);
                    breeding_next(&g);
                    bool seen[FOUNDERS] = {false};
                    for (int i = 0; i < g.p.n; i++) seen[g.p.c[i].role] = true;
                    for (int q = 0; kind == 2 && q < FOUNDERS; q++) assert_true(seen[q]);
                }
                strcpy(last[again], g.p.c[g.p.n - 1].adapter->hash);
            }
            assert_string_equal(last[0], last[1]);
        }
    breeding_close(&g);
}

/* Averaging dissimilar parents reduces the norm; preserve_norm restores the mean of their norms,
 * also for extrapolated blends. */
static void test_preserve_norm(void **state) {
    (void)state;
    static const double ranges[][2] = {{0.3, 0.7}, {-1, -0.9}, {1.9, 2}};
    struct breeding g;
    breeding_open(&g, false);
    g.o.mutation_rate = 0;
    g.o.rank = 8;
    struct adapter *large = adapter_scale(g.founders[0], 5);
    adapter_release(g.founders[0]);
    g.founders[0] = large;
    for (size_t k = 0; k < ARRAY_LEN(ranges); k++) {
        g.o.blend_min = ranges[k][0];
        g.o.blend_max = ranges[k][1];
        breeding_begin(&g, 1);
        breeding_evaluate(&g);
        struct candidate before[FOUNDERS];
        memcpy(before, g.p.c, sizeof before);
        breeding_next(&g);
        for (int i = 2; i < g.p.n; i++) {
            const struct candidate *c = &g.p.c[i];
            double t = fmin(1, fmax(0, c->blend)), norm[2] = {0};
            for (int p = 0; p < 2; p++)
                for (int j = 0; j < FOUNDERS; j++)
                    if (strcmp(before[j].name, c->parents[p]) == 0)
                        norm[p] = sqrt(adapter_dot(before[j].adapter, before[j].adapter));
            double want = (1 - t) * norm[0] + t * norm[1];
            assert_close(sqrt(adapter_dot(c->adapter, c->adapter)), want, 1e-4 * want);
        }
    }
    breeding_close(&g);
}

static void test_invalid_populations_are_refused(void **state) {
    (void)state;
    struct breeding g;
    struct population p;
    breeding_open(&g, false);
    const char *const long_names[2] = {"ann", "a name of more than thirty-one letters"};
    assert_int_equal(population_init(&p, &g.o, &g.f, 1, g.founders, names, 1, &err), ERR_USAGE);
    population_release(&p);
    assert_int_equal(population_init(&p, &g.o, &g.f, 1, g.founders, long_names, 2, &err),
                     ERR_USAGE);
    assert_non_null(strstr(err.text, long_names[1]));
    population_release(&p);
    g.o.elites = 7;
    assert_int_equal(population_init(&p, &g.o, &g.f, 1, g.founders, names, FOUNDERS, &err),
                     ERR_USAGE);
    population_release(&p);
    breeding_close(&g);
}

/* genes */

/* Options with two prompts, a learning rate and a number of updates. */
static void set_genes(struct genome_options *x, double mutation_rate) {
    strings_release(&x->prompts);
    strings_add(&x->prompts, "Be brief.");
    strings_add(&x->prompts, "none");
    x->min[GENE_LR] = 1e-3, x->max[GENE_LR] = 1e-1;
    x->min[GENE_MAX_STEPS] = 1, x->max[GENE_MAX_STEPS] = 40;
    x->mutation_rate = mutation_rate;
    x->sigma = 0.3;
    assert_int_equal(genome_resolve(x, &err), OK);
}

static bool has_prompt(const struct genome *x) {
    return *x->prompt != 0;
}

/* A founder's child draws each gene from its range: prompts and the logarithm of a number are
 * uniform. */
static void test_genes_are_drawn(void **state) {
    (void)state;
    enum { N = 4000 };
    struct genome_options x = {0};
    const struct genome founder = {0};
    int prompts = 0, below = 0;
    set_genes(&x, 0);
    assert_int_equal(genome_count(&x), 3);
    assert_false(genome_evolves(&x, GENE_TEMPERATURE));
    for (uint32_t i = 0; i < N; i++) {
        struct rng r = rng_make(1, RNG_TEST, i, 0);
        struct genome g = genome_breed(&x, &founder, i % 2 ? &founder : NULL, &r);
        double lr = genome_value(&g, GENE_LR, 0), steps = genome_value(&g, GENE_MAX_STEPS, 0);
        assert_true(lr >= 1e-3 && lr <= 1e-1);
        assert_true(steps >= 1 && steps <= 40 && steps == floor(steps));
        assert_close(genome_value(&g, GENE_TEMPERATURE, -5), -5, 0);
        prompts += has_prompt(&g);
        below += lr < 1e-2;
    }
    /* four standard errors */
    assert_close(prompts, N / 2, 4 * sqrt(N) / 2);
    assert_close(below, N / 2, 4 * sqrt(N) / 2);
    strings_release(&x.prompts);
}

/* Each gene comes from either parent with equal probability, independently of the others; a gene
 * that one parent lacks comes from the other one. */
static void test_genes_are_inherited(void **state) {
    (void)state;
    enum { N = 4000, ALL = 1 << GENE_PROMPT | 1 << GENE_LR | 1 << GENE_MAX_STEPS };
    struct genome_options x = {0};
    int counts[8] = {0};
    set_genes(&x, 0);
    const struct genome founder = {0},
                        a = {ALL, x.prompts.v[0], {[GENE_LR] = 0.002, [GENE_MAX_STEPS] = 3}},
                        b = {ALL, x.prompts.v[1], {[GENE_LR] = 0.05, [GENE_MAX_STEPS] = 30}};
    for (uint32_t i = 0; i < N; i++) {
        struct rng r = rng_make(2, RNG_TEST, i, 0);
        struct genome g = genome_breed(&x, &a, &b, &r), h = genome_breed(&x, &founder, &a, &r);
        bool lr = g.value[GENE_LR] == 0.05, steps = g.value[GENE_MAX_STEPS] == 30;
        assert_true(lr || g.value[GENE_LR] == 0.002);
        assert_true(steps || g.value[GENE_MAX_STEPS] == 3);
        counts[!has_prompt(&g) + 2 * lr + 4 * steps]++;
        assert_true(genome_equal(&h, &a));
    }
    for (int k = 0; k < 8; k++) assert_close(counts[k], N / 8, 4 * sqrt(N / 8));
    /* after a fork: a prompt that the options lack is drawn again, a number is moved into its range
     */
    struct genome old = a;
    old.prompt = "forgotten";
    x.max[GENE_LR] = 0.0015;
    struct rng r = rng_make(3, RNG_TEST, 0, 0);
    struct genome g = genome_breed(&x, &old, NULL, &r);
    assert_true(g.prompt == x.prompts.v[0] || g.prompt == x.prompts.v[1]);
    assert_close(g.value[GENE_LR], 0.0015, 0);
    strings_release(&x.prompts);
}

/* A mutated prompt is another one; the logarithm of a mutated number has the standard deviation
 * sigma; a mutated number of updates is another one. */
static void test_genes_mutate(void **state) {
    (void)state;
    enum { N = 4000, ALL = 1 << GENE_PROMPT | 1 << GENE_LR | 1 << GENE_MAX_STEPS };
    struct genome_options x = {0};
    double sum = 0, squares = 0;
    int changed = 0;
    set_genes(&x, 1);
    const struct genome a = {ALL, x.prompts.v[0], {[GENE_LR] = 0.01, [GENE_MAX_STEPS] = 2}};
    for (uint32_t i = 0; i < N; i++) {
        struct rng r = rng_make(4, RNG_TEST, i, 0);
        struct genome g = genome_breed(&x, &a, NULL, &r);
        double log_ratio = log(g.value[GENE_LR] / 0.01);
        assert_false(has_prompt(&g));
        assert_true(g.value[GENE_MAX_STEPS] != 2 && g.value[GENE_MAX_STEPS] >= 1);
        sum += log_ratio;
        squares += log_ratio * log_ratio;
    }
    assert_close(sum / N, 0, 4 * 0.3 / sqrt(N));
    assert_close(sqrt(squares / N), 0.3, 0.02);
    x.mutation_rate = 0.25;
    for (uint32_t i = 0; i < N; i++) {
        struct rng r = rng_make(5, RNG_TEST, i, 0);
        struct genome g = genome_breed(&x, &a, NULL, &r);
        changed += g.value[GENE_LR] != 0.01;
    }
    assert_close(changed, N / 4, 4 * sqrt(N * 0.25 * 0.75));
    strings_release(&x.prompts);
}

/* Roles are those of 'shoal ask', in any language. */
static void test_prompts_of_roles(void **state) {
    (void)state;
    struct genome_options x = {0};
    strings_add(&x.prompts, "role:Critical Thinking");
    strings_add(&x.prompts, "role: 専門知識AI");
    assert_int_equal(genome_resolve(&x, &err), OK);
    assert_non_null(strstr(x.prompts.v[0], "where the reasoning is weak"));
    assert_non_null(strstr(x.prompts.v[1], "専門家の知識"));
    assert_int_equal(genome_prompt_bytes(&x), strlen(x.prompts.v[0]));
    strings_add(&x.prompts, "role:Guessing");
    assert_int_equal(genome_resolve(&x, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "no role 'Guessing'"));
    strings_release(&x.prompts);
}

/* Genes use a separate random stream: a fitness that does not depend on them sees the same
 * weights with genes and without. */
static void test_genes_leave_weights_alone(void **state) {
    (void)state;
    struct breeding g;
    struct buf plain = {0}, with = {0};
    breeding_open(&g, false);
    record_history(&g, 5, &plain);
    set_genes(&g.o.genome, 0.5);
    record_history(&g, 5, &with);
    assert_string_equal(plain.data, with.data);
    for (int i = 0; i < g.p.n; i++)
        assert_int_equal(g.p.c[i].genome.genes != 0, candidate_name_is_child(g.p.c[i].name));
    strings_release(&g.o.genome.prompts);
    buf_release(&plain);
    buf_release(&with);
    breeding_close(&g);
}

/* With keep_weights 1 every child has the weights of its first parent and other genes than any
 * candidate with these weights. */
static void test_keep_weights(void **state) {
    (void)state;
    struct breeding g;
    breeding_open(&g, false);
    set_genes(&g.o.genome, 0.5);
    g.o.genome.keep_weights = 1;
    breeding_begin(&g, 1);
    for (int t = 0; t < 3; t++) {
        struct candidate before[FOUNDERS];
        breeding_evaluate(&g);
        memcpy(before, g.p.c, sizeof before);
        breeding_next(&g);
        for (int i = 2; i < g.p.n; i++) {
            const struct candidate *c = &g.p.c[i], *a = NULL;
            for (int k = 0; k < FOUNDERS; k++)
                if (strcmp(before[k].name, c->parents[0]) == 0) a = &before[k];
            assert_non_null(a);
            assert_null(c->operator);
            assert_string_equal(c->adapter->hash, a->adapter->hash);
            assert_true(c->parents[1][0] != 0);
            assert_close(c->blend, 0, 0);
            for (int k = 0; k < i; k++)
                assert_true(strcmp(c->adapter->hash, g.p.c[k].adapter->hash) != 0 ||
                            !genome_equal(&c->genome, &g.p.c[k].genome));
        }
    }
    for (int i = 0; i < g.p.crossovers.selector.n; i++)
        assert_int_equal(g.p.crossovers.selector.v[i].used, 0);
    strings_release(&g.o.genome.prompts);
    breeding_close(&g);
}

/* A child whose prompt differs from that of its parents does not credit its operator. */
static void test_credit_needs_equal_prompts(void **state) {
    (void)state;
    struct breeding g;
    int64_t used[2] = {0};
    breeding_open(&g, false);
    for (int pass = 0; pass < 2; pass++) {
        strings_release(&g.o.genome.prompts);
        strings_add(&g.o.genome.prompts, pass ? "Be brief." : ""); // founders have no prompt
        breeding_begin(&g, 1);
        breeding_evaluate(&g);
        breeding_next(&g);
        breeding_evaluate(&g);
        used[pass] = g.p.crossovers.selector.v[0].used + g.p.mutations.selector.v[0].used;
    }
    assert_int_equal(used[0], 4);
    assert_int_equal(used[1], 0);
    strings_release(&g.o.genome.prompts);
    breeding_close(&g);
}

/* Whole runs. All files are in one temporary folder: the model, two conversation files, a recipe,
 * and run roots. */

static char dir[64], recipe_path[96];
static json_t *reference; /* result of an uninterrupted run with one thread */
static double reference_seconds;

static char *find_as_is(const char *path) {
    return xstrdup(path);
}

static void make_model(void) {
    static const char *specials[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    struct model_config c;
    struct buf text = {0};
    for (int i = 0; i < 300; i++) {
        struct task_item it;
        family_item(i % fry_count(), SPLIT_TRAIN, 1, (uint32_t)i, false, &it);
        buf_printf(&text,
                   "user\n%s\nassistant\nwork: %s\nanswer: %s\nothers say %s. answer again.\n",
                   it.question, it.work, it.choices[it.correct], it.choices[0]);
        task_item_release(&it);
    }
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    struct tokenizer *tok =
        tokenizer_train_bpe(text.data, text.len, 420, "smollm", specials, 3, 3, &err);
    buf_release(&text);
    if (!tok) fail_msg("%s", err.text);
    c.vocab_size = tokenizer_vocab_size(tok);
    c.max_seq_len = 256;
    struct model *m = model_new_random(&c, 1, NUMERIC_EXACT);
    tokenizer_free(m->tok);
    m->tok = tok;
    char *path = path_join(dir, "tiny");
    if (model_write_hf(m, path, TENSOR_F32, &err) != OK) fail_msg("%s", err.text);
    free(path);
    model_close(m);
}

static void make_data(void) {
    for (int i = 0; i < 2; i++) {
        char *path = path_join(dir, i ? "b.jsonl" : "a.jsonl");
        assert_int_equal(persona_write(&built_in_personas[i], 12 + 12 * i, 1, path, &err), OK);
        free(path);
    }
}

/* Writes a task file. */
static void make_task_file(void) {
    struct buf b = {0};
    for (int i = 0; i < 24; i++)
        buf_printf(&b,
                   "{\"question\": \"%dの次の数は?\", \"choices\": [\"%d\", \"%d\", \"%d\"], "
                   "\"answer\": 1}\n",
                   i, i + 2, i + 1, i + 3);
    char *path = path_join(dir, "own.jsonl");
    assert_int_equal(file_write(path, b.data, b.len, &err), OK);
    free(path);
    buf_release(&b);
}

/* The recipe; the founder "all" is trained on both files. */
static char *recipe_text(void) {
    return xasprintf(
        "model: %s/tiny\nseed: 3\npersonas:\n  - a=%s/a.jsonl\n  - b=%s/b.jsonl\n  - "
        "all=%s/a.jsonl+%s/b.jsonl\n"
        "tasks: [copy, pick, order]\nrounds: 2\nmax_tokens: 4\ntest_items: 9\n"
        "train: {r: 2, max_steps: 6, lr: 0.02, bsz: 2, grad_accum: 1, lora_dropout: 0, save_steps: "
        "2}\n"
        "evolve: {generations: 2, population: 4, elites: 2, rank: 4, finetune_steps: 2, "
        "finetune_data: %s/a.jsonl}\n"
        "finetune: {bsz: 2, grad_accum: 1, lr: 0.01, lora_dropout: 0}\nfitness: {items: 6}\n"
        "retain: [sort]\nretain_items: 4\n",
        dir, dir, dir, dir, dir, dir);
}

static int runs_open(void **state) {
    (void)state;
    log_quiet = true;
    snprintf(dir, sizeof dir, "/tmp/shoal-test-evolve-XXXXXX");
    if (!mkdtemp(dir)) return -1;
    snprintf(recipe_path, sizeof recipe_path, "%s/recipe.yaml", dir);
    make_model();
    make_data();
    make_task_file();
    char *text = recipe_text();
    int rc = file_write(recipe_path, text, strlen(text), &err);
    free(text);
    return rc;
}

static int runs_close(void **state) {
    (void)state;
    json_decref(reference);
    return folder_remove(dir);
}

static struct evolve_env env_open(const char *root, int threads) {
    return (struct evolve_env){.pool = pool_new(threads),
                               .cls = NUMERIC_EXACT,
                               .root = path_join(dir, root),
                               .find = find_as_is};
}

static void env_release(struct evolve_env *e) {
    pool_free(e->pool);
    free((char *)e->root);
}

/* Starts or continues run ROOT/r. */
static json_t *run_once(const char *root, bool resume, bool zero, int threads, struct error *e) {
    struct evolve_recipe o;
    struct evolve_env env = env_open(root, threads);
    json_t *result = NULL;
    if (resume) {
        result = evolve_run_resume(&env, "r", e);
    } else {
        if (evolve_recipe_load(&o, recipe_path, e) == OK) {
            o.zero_adapters |= zero;
            result = evolve_run_execute(&env, &o, "r", e);
        }
        evolve_recipe_release(&o);
    }
    env_release(&env);
    return result;
}

static json_t *run_expect_ok(const char *root, bool resume, bool zero, int threads) {
    json_t *result = run_once(root, resume, zero, threads, &err);
    if (!result) fail_msg("%s", err.text);
    return result;
}

static const json_t *reference_run(void) {
    double start = clock_now();
    if (!reference) {
        reference = run_expect_ok("ref", false, false, 1);
        reference_seconds = clock_now() - start;
    }
    return reference;
}

static void assert_results_equal(const json_t *a, const json_t *b) {
    static const char *const parts[] = {"adapters", "generations", "table", "comparisons",
                                        "debate",   "retention",   "spent", "spent_on_tests"};
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) {
        if (!json_object_get(a, parts[i]) && !json_object_get(b, parts[i])) continue;
        char *x = json_canonical(json_object_get(a, parts[i])),
             *y = json_canonical(json_object_get(b, parts[i]));
        assert_string_equal(x, y);
        free(x);
        free(y);
    }
}

static bool run_file_exists(const char *root, const char *name) {
    char *path = xasprintf("%s/%s/r/%s", dir, root, name);
    bool there = path_exists(path);
    free(path);
    return there;
}

/* Number of lines of a file of the run. */
static int run_lines(const char *root, const char *name) {
    char *path = xasprintf("%s/%s/r/%s", dir, root, name);
    struct buf b = {0};
    int n = 0;
    assert_int_equal(file_read(path, 1 << 24, &b, &err), OK);
    for (size_t i = 0; i < b.len; i++) n += b.data[i] == '\n' && i > 0 && b.data[i - 1] != '\n';
    buf_release(&b);
    free(path);
    return n;
}

static char *run_status(const char *root) {
    char *path = xasprintf("%s/%s/shoal.db", dir, root);
    struct store *s = path_exists(path) ? store_open(path, &err) : NULL;
    json_t *row = s ? store_run_get(s, "r", &err) : NULL;
    char *status = row ? xstrdup(json_string_value(json_object_get(row, "status"))) : NULL;
    json_decref(row);
    store_close(s);
    free(path);
    return status;
}

static void assert_run_status(const char *root, const char *want) {
    char *status = run_status(root);
    assert_non_null(status);
    assert_string_equal(status, want);
    free(status);
}

static const json_t *table_row(const json_t *result, const char *name) {
    size_t i;
    json_t *row;
    json_array_foreach (json_object_get(result, "table"), i, row)
        if (strncmp(json_string_value(json_object_get(row, "name")), name, strlen(name)) == 0)
            return row;
    fail_msg("no row '%s'", name);
    return NULL;
}

static double json_number_of(const json_t *v, const char *key) {
    return json_number_value(json_object_get(v, key));
}

static double value_of(const json_t *v, const char *key) {
    return json_number_of(json_object_get(v, key), "value");
}

/* The files of an uninterrupted run, and that training and adapters had an effect. */
static void test_run(void **state) {
    (void)state;
    const json_t *result = reference_run();
    static const char *const files[] = {"recipe.yaml",
                                        "manifest.json",
                                        "result.json",
                                        "report.html",
                                        "train.jsonl",
                                        "evolution.jsonl",
                                        "adapters/gen_1/g1c0/README.md",
                                        "adapters/gen_0/a/adapter_model.safetensors",
                                        "adapters/gen_2"};
    for (size_t i = 0; i < ARRAY_LEN(files); i++) assert_true(run_file_exists("ref", files[i]));
    assert_false(run_file_exists("ref", "checkpoint.bin"));
    assert_run_status("ref", "done");
    assert_int_equal(json_array_size(json_object_get(result, "table")), 1 + 3 + 2 + 1 + 3);
    assert_int_equal(json_array_size(json_object_get(result, "comparisons")), 6);
    assert_int_equal(json_array_size(json_object_get(result, "generations")), 3);
    assert_int_equal(json_object_size(json_object_get(result, "adapters")), 3 + 4 + 4);
    const json_t *first =
        json_object_get(json_array_get(json_object_get(result, "generations"), 0), "candidates");
    for (size_t i = 0; i < 3; i++) assert_true(value_of(json_array_get(first, i), "novelty") > 0);
    /* The comparisons use the best founder's row, not that of a name with the same prefix. */
    const json_t *compared = json_array_get(json_object_get(result, "comparisons"), 0);
    const char *best = json_string_value(json_object_get(json_array_get(first, 0), "name"));
    assert_string_equal(json_string_value(json_object_get(compared, "a")), best);
    assert_string_equal(json_string_value(json_object_get(compared, "b")), "base");
    assert_int_equal(run_lines("ref", "train.jsonl"), 6);
    assert_int_equal(run_lines("ref", "all.jsonl"), 36); /* 12 + 24 */
    for (size_t i = 0; i < json_array_size(json_object_get(result, "table")); i++) {
        const json_t *row = json_array_get(json_object_get(result, "table"), i);
        assert_true(json_number_of(row, "lo") <= json_number_of(row, "acc") &&
                    json_number_of(row, "acc") <= json_number_of(row, "hi"));
        assert_int_equal((int)json_number_of(row, "n"), 9);
    }
}

/* The tests cost what their rows cost (the first-round vote counts the founders' answers again) and
 * the debates without one founder. */
static void test_costs(void **state) {
    (void)state;
    const json_t *result = reference_run(), *tests = json_object_get(result, "spent_on_tests"),
                 *row;
    double tokens = 0;
    size_t i;
    json_array_foreach (json_object_get(result, "table"), i, row)
        if (strcmp(json_get_string(row, "name"), "first-round vote") != 0)
            tokens += json_number_of(row, "prefilled") + json_number_of(row, "generated");
    assert_true(json_number_of(tests, "forward_tokens") > tokens);
    assert_true(json_number_of(tests, "flops") > 0);
    assert_true(json_number_of(json_object_get(result, "spent_on_founders"), "trained_tokens") > 0);
}

static bool hash_is_saved(const char *hash, size_t n) {
    const char *key;
    json_t *saved;
    json_object_foreach (json_object_get(reference, "adapters"), key, saved)
        if (strncmp(json_string_value(saved), hash, n) == 0) return true;
    return false;
}

/* A saved candidate has its base, its fitness of this generation and, as a child, parents that are
 * saved too. */
static void assert_saved_lineage(int generation, const json_t *c,
                                 const struct model_config *shape) {
    const char *name = json_get_string(c, "name");
    char *path = xasprintf("%s/ref/r/adapters/gen_%d/%s", dir, generation, name);
    struct adapter *a = adapter_load(path, shape, &err);
    if (!a) fail_msg("%s", err.text);
    const char *base = json_get_string(json_object_get(reference, "manifest"), "base"),
               *parents = json_get_string(a->lineage, "parents");
    assert_string_equal(json_get_string(a->lineage, ADAPTER_BASE_HASH), base);
    assert_float_equal(atof(json_get_string(a->lineage, "fitness")), value_of(c, "fitness"), 1e-8);
    assert_int_equal(*parents != 0, candidate_name_is_child(name));
    for (size_t n; (n = strcspn(parents, " ")); parents += n + (parents[n] == ' '))
        assert_true(hash_is_saved(parents, n));
    adapter_release(a);
    free(path);
}

static void test_saved_lineage(void **state) {
    (void)state;
    struct model_config shape;
    const json_t *generations = json_object_get(reference_run(), "generations"), *g, *c;
    size_t i, k;
    assert_int_equal(model_preset_find("tiny-llama", &shape, &err), OK);
    json_array_foreach (generations, i, g)
        json_array_foreach (json_object_get(g, "candidates"), k, c)
            assert_saved_lineage((int)i, c, &shape);
}

/* The adapters on disk are those in the result. */
static void test_published_adapters(void **state) {
    (void)state;
    struct model_config c;
    const char *key;
    json_t *hash;
    reference_run();
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    json_object_foreach (json_object_get(reference, "adapters"), key, hash) {
        char *path = xasprintf("%s/ref/r/adapters/%s", dir, key);
        struct adapter *a = adapter_load(path, &c, &err);
        if (!a) fail_msg("%s", err.text);
        assert_string_equal(a->hash, json_string_value(hash));
        adapter_release(a);
        free(path);
    }
}

static void test_threads_change_nothing(void **state) {
    (void)state;
    json_t *two = run_expect_ok("two", false, false, 2);
    assert_results_equal(reference_run(), two);
    json_decref(two);
}

/* With zero adapters no candidate differs from the base in accuracy, answers or contribution. */
static void test_zero_adapters_have_no_effect(void **state) {
    (void)state;
    json_t *result = run_expect_ok("zero", false, true, 1), *generation, *list, *c;
    const json_t *base = table_row(result, "base");
    static const char *const solos[] = {
        "a", "b", "all", "generation 0", "generation 1", "generation 2", "first-round vote"};
    for (size_t i = 0; i < ARRAY_LEN(solos); i++) {
        const json_t *row = table_row(result, solos[i]);
        assert_close(json_number_of(row, "acc"), json_number_of(base, "acc"), 0);
        if (i < 6)
            assert_close(json_number_of(row, "generated"), json_number_of(base, "generated"), 0);
    }
    size_t g, i;
    json_array_foreach (json_object_get(result, "generations"), g, generation) {
        list = json_object_get(generation, "candidates");
        json_array_foreach (list, i, c) {
            assert_close(value_of(c, "novelty"), 0, 0);
            assert_close(value_of(c, "cooperation"), 0, 0);
            assert_close(value_of(c, "fitness"), value_of(json_array_get(list, 0), "fitness"), 0);
        }
    }
    int compared = 0;
    json_array_foreach (json_object_get(result, "comparisons"), i, c) {
        const char *a = json_string_value(json_object_get(c, "a")),
                   *b = json_string_value(json_object_get(c, "b"));
        bool adapters_only = strcmp(b, "base") == 0 ||
                             (strncmp(a, "generation", 10) == 0 && strncmp(b, "self", 4) != 0);
        if (!adapters_only) continue;
        assert_close(json_number_of(c, "diff"), 0, 0);
        assert_close(json_number_of(c, "hi"), -json_number_of(c, "lo"), 1e-12);
        assert_close(json_number_of(c, "p"), 1, 0);
        assert_false(json_is_true(json_object_get(c, "significant")));
        compared++;
    }
    assert_int_equal(compared, 2);
    json_decref(result);
}

/* A child process that starts the run, or continues it if the store has it. */
static pid_t run_child(const char *root) {
    pid_t child = fork();
    if (child != 0) return child;
    struct error e;
    char *status = run_status(root);
    json_t *result = run_once(root, status != NULL, false, 1, &e);
    if (!result) fprintf(stderr, "child: %s\n", e.text);
    _exit(result ? 0 : 1);
}

/* True if the child was still running. */
static bool child_kill(pid_t child) {
    int status = 0;
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    if (WIFEXITED(status)) assert_int_equal(WEXITSTATUS(status), 0);
    return WIFSIGNALED(status);
}

static void assert_killed_run_resumes(const char *root) {
    char *status = run_status(root);
    json_t *result = run_expect_ok(root, status != NULL, false, 2);
    free(status);
    assert_results_equal(reference_run(), result);
    assert_false(run_file_exists(root, "checkpoint.bin"));
    assert_run_status(root, "done");
    json_decref(result);
}

static bool has_child_ended(pid_t child) {
    siginfo_t info = {0};
    return waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid != 0;
}

static const char *const stages[] = {"checkpoint.bin", "adapters/gen_0/a", "adapters/gen_1/g1c0",
                                     "adapters/gen_2/g2c0"};

/* A checkpoint is removed in a later stage, so a later stage counts too. */
static bool has_reached_stage(const char *root, size_t i) {
    for (; i < ARRAY_LEN(stages); i++)
        if (run_file_exists(root, stages[i])) return true;
    return false;
}

/* Killed as soon as it has reached a stage: training, publishing, the first generation, the
 * second. */
static void test_kill_at_every_stage(void **state) {
    (void)state;
    int killed = 0;
    reference_run();
    for (size_t i = 0; i < ARRAY_LEN(stages); i++) {
        pid_t child = run_child("stages");
        while (!has_reached_stage("stages", i) && !has_child_ended(child)) usleep(300);
        bool at_work = child_kill(child);
        char *status = run_status("stages");
        killed += at_work && status && strcmp(status, "running") == 0;
        free(status);
    }
    assert_true(killed >= 3);
    assert_killed_run_resumes("stages");
}

/* Kills the run at random moments and resumes it each time. Returns the number of kills during the
 * run. */
static int kill_repeatedly(const char *root, int times, double seconds) {
    struct rng r = rng_make(20, RNG_TEST, 0, 0);
    int killed = 0;
    for (; killed < times; killed++) {
        pid_t child = run_child(root);
        usleep((unsigned)(1e6 * seconds * (double)rng_uniform(&r)));
        if (!child_kill(child)) break;
    }
    return killed;
}

/* Twenty kills in one run. If the run ends before, tries again with shorter times. */
static void test_kill_at_any_moment(void **state) {
    (void)state;
    char root[] = "moments0";
    reference_run();
    double seconds = reference_seconds / 2;
    for (; kill_repeatedly(root, 20, seconds) < 20 && root[7] < '9'; root[7]++) seconds /= 2;
    assert_true(root[7] < '9');
    assert_killed_run_resumes(root);
}

/* Resuming a finished run returns the same result and trains nothing. */
static void test_resume_of_a_finished_run(void **state) {
    (void)state;
    reference_run();
    json_t *again = run_expect_ok("ref", true, false, 1);
    assert_results_equal(reference, again);
    assert_int_equal(run_lines("ref", "train.jsonl"), 6);
    json_decref(again);
}

static bool is_in_generation(const char *name, int generation) {
    const json_t *c,
        *g = json_array_get(json_object_get(reference, "generations"), (size_t)generation);
    size_t i;
    json_array_foreach (json_object_get(g, "candidates"), i, c)
        if (strcmp(json_get_string(c, "name"), name) == 0) return true;
    return false;
}

/* Only candidates of generation 1 may be deleted that are neither its fittest nor in the last
 * generation. The run can be resumed afterwards. */
static void test_prune(void **state) {
    (void)state;
    struct prune_rule rule = {.keep = 0, .min_age = -1, .min_score = NAN};
    reference_run();
    char *command = xasprintf("cp -r %s/ref %s/pruned", dir, dir),
         *run = xasprintf("%s/pruned/r", dir), *result = path_join(run, "result.json");
    const json_t *g = json_array_get(json_object_get(reference, "generations"), 1), *c,
                 *list = json_object_get(g, "candidates");
    json_t *out = NULL;
    size_t i, n_dead = 0;
    assert_int_equal(system(command), 0);
    for (int pass = 0; pass < 3; pass++) { // listed, deleted, gone
        rule.delete_matches = pass > 0;
        assert_int_equal(evolve_run_prune(run, &rule, &out, &err), OK);
        if (pass == 0) n_dead = json_array_size(out);
        assert_int_equal(json_array_size(out), pass < 2 ? n_dead : 0);
        json_decref(out);
        json_array_foreach (list, i, c) {
            const char *name = json_get_string(c, "name");
            char *path = xasprintf("adapters/gen_1/%s", name);
            bool dead = i > 0 && !is_in_generation(name, 2);
            if (!is_in_generation(name, 0)) // a founder's folder of generation 1 is a copy
                assert_int_equal(run_file_exists("pruned", path), !dead || pass == 0);
            free(path);
        }
    }
    assert_true(n_dead > 0);
    assert_true(run_file_exists("pruned", "adapters/gen_0/a"));
    json_t *again = run_expect_ok("pruned", true, false, 1);
    assert_results_equal(reference, again);
    json_decref(again);

    int lock = dir_lock(run, "run", &err);
    assert_int_equal(evolve_run_prune(run, &rule, &out, &err), ERR_STATE);
    json_decref(out);
    dir_unlock(lock, run);
    assert_int_equal(unlink(result), 0);
    assert_int_equal(evolve_run_prune(run, &rule, &out, &err), ERR_STATE);
    assert_non_null(strstr(err.text, "not finished"));
    json_decref(out);
    free(command), free(run), free(result);
}

/* Names in result.json lead to no other folder. */
static void test_prune_hostile(void **state) {
    static const char text[] =
        "{\"generations\": [{\"generation\": 0, \"candidates\": [{\"name\": \"a\", "
        "\"fitness\": {\"value\": 1}, \"parents\": []}]}, {\"generation\": 1, "
        "\"candidates\": [{\"name\": \"a\", \"fitness\": {\"value\": 1}, \"parents\": "
        "[]}, {\"name\": \"../victim\", \"fitness\": {\"value\": 0}, \"parents\": []}, "
        "{\"name\": \"..\", \"fitness\": {\"value\": 0}, \"parents\": []}, {\"name\": "
        "\"link\", \"fitness\": {\"value\": 0}, \"parents\": []}]}, {\"generation\": 2, "
        "\"candidates\": [{\"name\": \"a\", \"fitness\": {\"value\": 1}, \"parents\": "
        "[]}]}]}";
    (void)state;
    struct prune_rule rule = {.keep = 0, .min_age = -1, .min_score = NAN, .delete_matches = true};
    char *run = xasprintf("%s/hostile", dir), *gen = path_join(run, "adapters/gen_1"),
         *victim = path_join(run, "adapters/victim"), *link = path_join(gen, "link"),
         *file = path_join(victim, "file"), *result = path_join(run, "result.json");
    json_t *out = NULL;
    assert_int_equal(dir_make(gen, &err), OK);
    assert_int_equal(dir_make(victim, &err), OK);
    assert_int_equal(file_write(file, "x", 1, &err), OK);
    assert_int_equal(file_write(result, text, sizeof text - 1, &err), OK);
    assert_int_equal(symlink(victim, link), 0);
    assert_int_equal(evolve_run_prune(run, &rule, &out, &err), OK);
    assert_int_equal(json_array_size(out), 0);
    assert_true(path_exists(file) && path_exists(link));
    json_decref(out);
    free(run), free(gen), free(victim), free(link), free(file), free(result);
}

/* Appends text to a file; the caller restores it from `old`. */
static void file_append(const char *path, const char *text, struct buf *old) {
    struct buf now = {0};
    assert_int_equal(file_read(path, 1 << 24, old, &err), OK);
    buf_add(&now, old->data, old->len);
    buf_puts(&now, text);
    assert_int_equal(file_write(path, now.data, now.len, &err), OK);
    buf_release(&now);
}

static void file_restore(const char *path, struct buf *old) {
    assert_int_equal(file_write(path, old->data, old->len, &err), OK);
    buf_release(old);
}

static void assert_resume_refused(const char *path, const char *appended, int code,
                                  const char *want) {
    struct buf old = {0};
    file_append(path, appended, &old);
    assert_null(run_once("ref", true, false, 1, &err));
    assert_int_equal(err.code, code);
    if (!strstr(err.text, want)) fail_msg("'%s' does not say '%s'", err.text, want);
    assert_run_status("ref", "done");
    file_restore(path, &old);
}

static void test_resume_with_other_inputs(void **state) {
    (void)state;
    reference_run();
    char *data = path_join(dir, "a.jsonl"), *model = path_join(dir, "tiny/config.json");
    char *recipe = path_join(dir, "ref/r/recipe.yaml"),
         *manifest = path_join(dir, "ref/r/manifest.json");
    assert_resume_refused(data, "{\"text\": \"more\"}\n", ERR_MISMATCH, "another data");
    assert_resume_refused(recipe, "vote: majority\n", ERR_MISMATCH, "another recipe");
    assert_resume_refused(model, "\n", ERR_MISMATCH, "another base");
    assert_resume_refused(manifest, "}", ERR_FORMAT, "run 'r'");
    json_t *again = run_expect_ok("ref", true, false, 1);
    assert_results_equal(reference, again);
    json_decref(again);
    free(data);
    free(model);
    free(recipe);
    free(manifest);
}

/* A persona is one adapter or files of conversations, not both. */
static void test_persona_of_adapter_and_file(void **state) {
    (void)state;
    struct evolve_recipe o;
    struct evolve_env env = env_open("mixed", 1);
    char *path = path_join(dir, "mixed.yaml"),
         *text = xasprintf("model: %s/tiny\npersonas: [p=%s+%s/a.jsonl, q=%s/a.jsonl]\n"
                           "tasks: [copy]\n",
                           dir, dir, dir, dir);
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    assert_int_equal(evolve_recipe_load(&o, path, &err), OK);
    assert_null(evolve_run_execute(&env, &o, "r", &err));
    assert_int_equal(err.code, ERR_USAGE);
    assert_non_null(strstr(err.text, "persona 'p' must be either one adapter or files"));
    evolve_recipe_release(&o);
    env_release(&env);
    free(path);
    free(text);
}

/* A second run of the same name is refused and changes no file of the first. */
static void test_existing_run_is_refused(void **state) {
    (void)state;
    reference_run();
    struct buf old = {0}, kept = {0};
    char *recipe = path_join(dir, "ref/r/recipe.yaml");
    file_append(recipe_path, "vote: majority\n", &old);
    assert_null(run_once("ref", false, false, 1, &err));
    assert_int_equal(err.code, ERR_STATE);
    assert_non_null(strstr(err.text, "'r' already exists"));
    file_restore(recipe_path, &old);
    assert_int_equal(file_read(recipe, 1 << 20, &kept, &err), OK);
    assert_null(strstr(kept.data, "vote"));
    buf_release(&kept);
    free(recipe);
    assert_run_status("ref", "done");
}

static void test_unknown_runs(void **state) {
    (void)state;
    reference_run();
    assert_null(run_once("nowhere", true, false, 1, &err));
    assert_int_equal(err.code, ERR_MISSING);
    char *root = path_join(dir, "ref");
    struct evolve_env env = {.cls = NUMERIC_EXACT, .root = root, .find = find_as_is};
    assert_null(evolve_run_resume(&env, "other", &err));
    assert_int_equal(err.code, ERR_MISSING);
    assert_non_null(strstr(err.text, "other"));
    free(root);
}

/* A run of the fast class without a recorded level was made with AMX, whose bits no other level
 * reproduces. */
static void test_resume_without_amx(void **state) {
    (void)state;
    if (kernels_get()->level == CPU_AMX) skip();
    char *root = path_join(dir, "amx"), *own = path_join(root, "f"),
         *db = path_join(root, "shoal.db");
    char *recipe = path_join(own, "recipe.yaml"), *text = recipe_text();
    assert_int_equal(dir_make(own, &err), OK);
    assert_int_equal(file_write(recipe, text, strlen(text), &err), OK);
    struct store *s = store_open(db, &err);
    assert_non_null(s);
    json_t *how = json_pack("{s:s}", "class", "fast");
    assert_int_equal(store_run_add(s, "f", "evolve", how, &err), OK);
    store_close(s);
    struct evolve_env env = {.cls = NUMERIC_EXACT, .root = root, .find = find_as_is};
    assert_null(evolve_run_resume(&env, "f", &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    assert_non_null(strstr(err.text, "amx"));
    json_decref(how);
    free(text);
    free(recipe);
    free(db);
    free(own);
    free(root);
}

/* A missing data file is an error before the run is registered. */
static void test_missing_data(void **state) {
    (void)state;
    char *a = path_join(dir, "a.jsonl"), *away = path_join(dir, "away.jsonl");
    assert_int_equal(rename(a, away), 0);
    assert_null(run_once("missing", false, false, 1, &err));
    assert_int_equal(err.code, ERR_MISSING);
    assert_non_null(strstr(err.text, a));
    assert_null(run_status("missing"));
    assert_int_equal(rename(away, a), 0);
    free(a);
    free(away);
}

/* Data that are not conversations are an error after it, and the run's status in the store is
 * "failed". */
static void test_failed_run(void **state) {
    (void)state;
    struct buf old = {0};
    char *a = path_join(dir, "a.jsonl");
    file_append(a, "{\"messages\": 3}\n", &old);
    assert_null(run_once("failed", false, false, 1, &err));
    assert_non_null(strstr(err.text, "line 13"));
    assert_run_status("failed", "failed");
    file_restore(a, &old);
    free(a);
}

/* Other search methods, over the founders of the reference run. */
static const char *const methods[] = {
    "evolve: {search: breed, generations: 2, population: 5, elites: 3, roles: true, mutation_rate: "
    "0.5, "
    "rank: 0, selection: lexicase, fitness_sharing_radius: 0.1, mutations: [spectrum, drop, rank, "
    "reinit]}\n",
    "evolve: {search: breed, generations: 1, population: 10, elites: 3}\n",
    "fitness: {items: 6, distance: embedding}\nevolve: {generations: 1}\n",
    "fitness: {items: 6, distance: disagreement}\nevolve: {generations: 1}\n",
    "evolve: {search: breed, generations: 3, population: 5, map_elites_bins: 4, selection: "
    "pareto}\n"
    "save: best\n",
    "evolve: {search: breed, generations: 2, population: 6}\n"
    "fitness: {items: 8, race: true, performance: 1, cooperation: 0, novelty: 0}\n"
    "race: {rule: halving, budget: 24}\n",
    "evolve: {search: coefficients, generations: 3}\nsearch: {searcher: cma, batch: 6}\n",
    "evolve: {search: coefficients, generations: 2, merge_operator: delta_ties}\n"
    "search: {searcher: pso, batch: 4}\n",
    "evolve: {search: coefficients, generations: 2, per_layer: true}\n"
    "search: {searcher: ga, batch: 4}\n",
    "evolve: {search: coefficients, generations: 9, max_flops: 4e8, finetune_steps: 2, "
    "finetune_data: LEARN}\n"
    "search: {searcher: cma, batch: 4}\n",
    "evolve: {search: merge, merge_operator: delta_dare_ties}\n",
    "evolve: {search: gradient, max_flops: 3e8, finetune_data: LEARN}\n",
    "evolve: {search: es, finetune_steps: 2, generations: 1, finetune_data: LEARN}\nes: "
    "{population: 4}\n",
    "evolve: {search: none}\n",
};

/* The founders' directories as personas, search method `method`, and no debate. */
static char *method_recipe(const char *method) {
    char *learn = path_join(dir, "b.jsonl");
    struct buf b = {0};
    buf_printf(&b,
               "model: %s/tiny\nseed: 5\nrounds: 0\nmax_tokens: 4\ntest_items: 8\n"
               "tasks: [pick, %s/own.jsonl]\npersonas:\n",
               dir, dir);
    for (int i = 0; i < 3; i++) {
        const char *name = (const char *[]){"a", "b", "all"}[i];
        buf_printf(&b, "  - %s=%s/ref/r/adapters/gen_0/%s\n", name, dir, name);
    }
    if (!strstr(method, "fitness:"))
        buf_puts(&b, "fitness: {items: 6, metric: probability, credit: shapley}\n");
    const char *at = strstr(method, "LEARN");
    buf_add(&b, method, at ? (size_t)(at - method) : strlen(method));
    if (at) buf_printf(&b, "%s%s", learn, at + 5);
    free(learn);
    return b.data;
}

static json_t *method_run(const char *root, const char *text, int threads) {
    struct evolve_recipe o;
    struct evolve_env env = env_open(root, threads);
    char *path = path_join(dir, "way.yaml");
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    if (evolve_recipe_load(&o, path, &err) != OK) fail_msg("%s", err.text);
    json_t *result = evolve_run_execute(&env, &o, "r", &err);
    if (!result) fail_msg("%s\n%s", err.text, text);
    evolve_recipe_release(&o);
    env_release(&env);
    free(path);
    return result;
}

/* Every method ends, writes an adapter, has the same bits with one thread and two, and returns the
 * same result when it is resumed. */
static void test_every_search_method(void **state) {
    (void)state;
    reference_run();
    for (size_t i = 0; i < ARRAY_LEN(methods); i++) {
        char one[16], two[16];
        snprintf(one, sizeof one, "way%zu", i);
        snprintf(two, sizeof two, "two%zu", i);
        char *text = method_recipe(methods[i]);
        json_t *a = method_run(one, text, 1), *b = method_run(two, text, 2);
        assert_results_equal(a, b);
        json_t *again = run_expect_ok(one, true, false, 1);
        assert_results_equal(a, again);
        const json_t *list = json_object_get(a, "generations"),
                     *last = json_array_get(list, json_array_size(list) - 1);
        const json_t *best = json_array_get(json_object_get(last, "candidates"), 0);
        char *key = xasprintf("gen_%d/%s", (int)json_array_size(list) - 1,
                              json_string_value(json_object_get(best, "name")));
        assert_string_equal(json_string_value(json_object_get(json_object_get(a, "adapters"), key)),
                            json_string_value(json_object_get(best, "hash")));
        assert_true(json_number_of(json_object_get(a, "spent"), "flops") > 0);
        assert_int_equal(json_array_size(json_object_get(a, "comparisons")), 2);
        free(key);
        free(text);
        json_decref(a);
        json_decref(b);
        json_decref(again);
    }
}

/* The budget is not exceeded, except by questions that are longer than the last ones. */
static void test_flop_budget(void **state) {
    (void)state;
    static const char *const searches[] = {
        "evolve: {search: breed, generations: 50, population: 4, max_flops: 1e9}\n",
        "evolve: {search: coefficients, generations: 50, finetune_steps: 2, max_flops: 1e9, "
        "finetune_data: LEARN}\n"
        "search: {batch: 4}\n"};
    reference_run();
    for (size_t i = 0; i < ARRAY_LEN(searches); i++) {
        char root[16], *text = method_recipe(searches[i]);
        snprintf(root, sizeof root, "budget%zu", i);
        json_t *v = method_run(root, text, 1);
        double flops = json_number_of(json_object_get(v, "spent"), "flops");
        if (!(flops > 7e8 && flops <= 1.01e9)) fail_msg("%g FLOPs", flops);
        assert_true(json_array_size(json_object_get(v, "generations")) < 51);
        json_decref(v);
        free(text);
    }
}

static json_t *fork_run(const struct evolve_env *env, const char *parent, int generation,
                        const char *recipe, int64_t seed, const char *id) {
    const struct evolve_fork fork = {
        .parent = parent, .recipe = recipe, .id = id, .generation = generation, .seed = seed};
    return evolve_run_fork(env, &fork, &err);
}

/* A fork without a change equals the run; with another seed it is equal up to the fork. A
 * generation computed again has the same bits. */
static void test_fork_and_replay(void **state) {
    (void)state;
    struct evolve_env env = env_open("ref", 1);
    reference_run();
    json_t *same = fork_run(&env, "r", 1, NULL, -1, "same");
    if (!same) fail_msg("%s", err.text);
    assert_results_equal(reference, same);
    json_t *other = fork_run(&env, "r", 1, NULL, 77, "other");
    if (!other) fail_msg("%s", err.text);
    const json_t *g = json_object_get(reference, "generations"),
                 *h = json_object_get(other, "generations");
    for (size_t i = 0; i < 2; i++)
        assert_true(json_equal(json_array_get(g, i), json_array_get(h, i)));
    assert_false(json_equal(json_array_get(g, 2), json_array_get(h, 2)));
    /* other hyper-parameters of the fine-tuning: the parent's results are not loaded */
    char *text = recipe_text(), *path = path_join(dir, "way.yaml"),
         *rate = strstr(text, "lr: 0.01");
    memcpy(rate, "lr: 0.07", strlen("lr: 0.07"));
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    json_t *faster = fork_run(&env, "r", 1, path, -1, "faster");
    if (!faster) fail_msg("%s", err.text);
    const json_t *slow_hashes = json_object_get(reference, "adapters"),
                 *fast_hashes = json_object_get(faster, "adapters");
    for (int i = 0; i < 2; i++) {
        const char *key = i ? "gen_2/g2c0" : "gen_1/g1c0";
        const json_t *a = json_object_get(slow_hashes, key), *b = json_object_get(fast_hashes, key);
        assert_int_equal(json_equal(a, b), i == 0);
    }
    json_decref(faster);
    free(text);
    free(path);
    json_t *far = fork_run(&env, "other", 2, NULL, -1, "far");
    if (!far) fail_msg("%s", err.text);
    assert_true(json_equal(h, json_object_get(far, "generations")));
    for (int at = 0; at <= 2; at++) {
        json_t *r = evolve_run_replay(&env, at ? "other" : "r", at, &err);
        if (!r) fail_msg("%s", err.text);
        assert_true(json_is_true(json_object_get(r, "equal")));
        assert_int_equal(json_array_size(json_object_get(r, "candidates")), at ? 4 : 3);
        json_decref(r);
    }
    assert_null(evolve_run_replay(&env, "r", 9, &err));
    assert_non_null(strstr(err.text, "no generation 9"));
    assert_null(fork_run(&env, "r", 1, NULL, -1, "same"));
    assert_int_equal(err.code, ERR_STATE);
    text = method_recipe(methods[0]);
    path = path_join(dir, "way.yaml");
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    assert_null(fork_run(&env, "r", 1, path, -1, "stranger"));
    assert_int_equal(err.code, ERR_MISMATCH);
    json_decref(same);
    json_decref(other);
    json_decref(far);
    free(text);
    free(path);
    env_release(&env);
}

/* A recipe with all genes; the second one has nothing but prompts and zero adapters. */
static char *genes_recipe(void) {
    return xasprintf(
        "model: %s/tiny\nseed: 3\nrounds: 0\nmax_tokens: 4\ntest_items: 6\ntasks: [copy, pick]\n"
        "personas: [a=%s/ref/r/adapters/gen_0/a, b=%s/ref/r/adapters/gen_0/b]\n"
        "evolve: {generations: 3, population: 5, elites: 2, rank: 4, finetune_steps: 2, "
        "finetune_data: %s/a.jsonl}\n"
        "finetune: {bsz: 2, grad_accum: 1, lr: 0.01, lora_dropout: 0}\nfitness: {items: 6}\n"
        "retain: [sort]\nretain_items: 4\n"
        "genome: {prompts: [none, 'Say *only* the answer.', 'role:Facts'], temperature_min: 0.2, "
        "temperature_max: 1.5, lr_min: 0.001, lr_max: 0.1, max_steps_min: 1, max_steps_max: 4, "
        "lora_dropout_min: 0.01, lora_dropout_max: 0.3, mutation_rate: 0.5, keep_weights: 0.6}\n",
        dir, dir, dir, dir);
}

/* Runs ROOT/r of the recipe with genes, or continues it. */
static json_t *genes_run(const char *root, bool resume, int threads) {
    char *text = genes_recipe();
    json_t *v =
        resume ? run_expect_ok(root, true, false, threads) : method_run(root, text, threads);
    free(text);
    return v;
}

static pid_t genes_child(const char *root) {
    pid_t child = fork();
    if (child != 0) return child;
    char *status = run_status(root);
    json_decref(genes_run(root, status != NULL, 1));
    _exit(0);
}

/* The candidates of the last generation with the key of a gene. */
static int candidates_with(const json_t *result, int generation, const char *gene) {
    const json_t *g = json_array_get(json_object_get(result, "generations"), (size_t)generation),
                 *c;
    size_t i;
    int n = 0;
    json_array_foreach (json_object_get(g, "candidates"), i, c)
        n += json_object_get(json_object_get(c, "genes"), gene) != NULL;
    return n;
}

/* Trains the child again from its parent, outside the run, with the numbers of its genes. */
static void assert_trained_with_genes(const json_t *c) {
    struct evolve_recipe o;
    char *recipe = path_join(dir, "way.yaml"), *model_dir = path_join(dir, "tiny"),
         *data = path_join(dir, "a.jsonl"),
         *start = xasprintf("%s/ref/r/adapters/gen_0/%s", dir,
                            json_string_value(json_array_get(json_object_get(c, "parents"), 0)));
    const json_t *genes = json_object_get(c, "genes");
    struct pool *pool = pool_new(1);
    struct model *m = model_open(model_dir, NUMERIC_EXACT, &err);
    if (!m || evolve_recipe_load(&o, recipe, &err) != OK) fail_msg("%s", err.text);
    evolve_recipe_set_kv(&o, "f16");
    struct train_options t = o.finetune;
    t.lr = json_number_of(genes, "lr");
    t.lora_dropout = json_number_of(genes, "lora_dropout");
    t.max_steps = (int64_t)json_number_of(genes, "max_steps");
    t.seed = o.seed + 1; // generation 1
    struct train_job job = {.name = json_get_string(c, "name"), .data = data};
    if (!(job.start = adapter_open(start, m, &err))) fail_msg("%s", err.text);
    if (sft_run(m, &job, 1, &t, pool, NULL, NULL, &err) != OK) fail_msg("%s", err.text);
    assert_string_equal(job.result->hash, json_get_string(c, "hash"));
    adapter_release(job.result);
    adapter_release(job.start);
    model_close(m);
    pool_free(pool);
    evolve_recipe_release(&o);
    free(recipe), free(model_dir), free(data), free(start);
}

/* Children have all genes, founders none; the card and the lineage of a saved adapter name them; a
 * child of generation 1 that kept its weights was trained with its own hyper-parameters. */
static void test_genes_of_a_run(void **state) {
    (void)state;
    reference_run();
    json_t *v = genes_run("genes", false, 1);
    for (int g = 0; g < N_GENES; g++) {
        assert_int_equal(candidates_with(v, 0, gene_names[g]), 0);
        assert_true(candidates_with(v, 1, gene_names[g]) >= 3);
    }
    const json_t *list = json_object_get(json_array_get(json_object_get(v, "generations"), 1),
                                         "candidates"),
                 *c;
    size_t i;
    int prompts = 0, trained = 0;
    json_array_foreach (list, i, c) {
        const json_t *genes = json_object_get(c, "genes");
        const char *prompt = json_get_string(genes, "prompt"), *name = json_get_string(c, "name");
        char *folder = xasprintf("%s/genes/r/adapters/gen_1/%s", dir, name),
             *card_path = path_join(folder, "README.md");
        struct model_config shape;
        struct buf card = {0};
        assert_int_equal(model_preset_find("tiny-llama", &shape, &err), OK);
        assert_int_equal(file_read(card_path, 1 << 20, &card, &err), OK);
        struct adapter *a = adapter_load(folder, &shape, &err);
        const char *stored = json_get_string(a->lineage, "genes");
        assert_int_equal(*stored != 0, genes != NULL);
        assert_true(!*prompt || strstr(stored, prompt));
        assert_int_equal(strstr(card.data, "--system '") != NULL, *prompt != 0);
        prompts += *prompt != 0;
        bool kept_weights = genes && !json_object_get(c, "operator");
        if (kept_weights) assert_trained_with_genes(c);
        trained += kept_weights;
        adapter_release(a);
        buf_release(&card);
        free(folder), free(card_path);
    }
    assert_true(prompts > 0);
    assert_true(trained > 0);
    char *page_path = path_join(dir, "genes/r/report.html");
    struct buf page = {0};
    assert_int_equal(file_read(page_path, 1 << 24, &page, &err), OK);
    assert_non_null(strstr(page.data, "<th>lora_dropout<th>made by"));
    assert_non_null(strstr(page.data, "Say *only* the answer."));
    buf_release(&page);
    free(page_path);
    json_t *two = genes_run("genes2", false, 2);
    assert_results_equal(v, two);
    json_decref(two);
    json_decref(v);
}

/* A run with genes that was killed many times ends with the same bytes, and its generations can be
 * computed again; a fork with other genes differs after the fork only. */
static void test_genes_survive_kills(void **state) {
    (void)state;
    reference_run();
    double start = clock_now();
    json_t *whole = genes_run("genes3", false, 1);
    double seconds = clock_now() - start;
    struct rng r = rng_make(21, RNG_TEST, 0, 0);
    int killed = 0;
    for (; killed < 8; killed++) {
        pid_t child = genes_child("genes4");
        usleep((unsigned)(1e6 * seconds / 2 * (double)rng_uniform(&r)));
        if (!child_kill(child)) break;
    }
    assert_true(killed > 1);
    char *status = run_status("genes4");
    json_t *again = genes_run("genes4", status != NULL, 2);
    free(status);
    assert_results_equal(whole, again);
    struct evolve_env env = env_open("genes4", 1);
    for (int g = 1; g <= 3; g++) {
        json_t *replayed = evolve_run_replay(&env, "r", g, &err);
        if (!replayed) fail_msg("%s", err.text);
        assert_true(json_is_true(json_object_get(replayed, "equal")));
        json_decref(replayed);
    }
    char *text = genes_recipe(), *path = path_join(dir, "fork.yaml"),
         *range = strstr(text, "lr_min: 0.001");
    memcpy(range, "lr_min: 0.050", strlen("lr_min: 0.050"));
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    json_t *other = fork_run(&env, "r", 1, path, -1, "higher");
    if (!other) fail_msg("%s", err.text);
    const json_t *g = json_object_get(whole, "generations"),
                 *h = json_object_get(other, "generations"), *c;
    for (size_t i = 0; i < 2; i++)
        assert_true(json_equal(json_array_get(g, i), json_array_get(h, i)));
    size_t i;
    json_array_foreach (json_object_get(json_array_get(h, 3), "candidates"), i, c)
        if (strncmp(json_get_string(c, "name"), "g3", 2) == 0)
            assert_true(json_number_of(json_object_get(c, "genes"), "lr") >= 0.05);
    env_release(&env);
    json_decref(other);
    json_decref(again);
    json_decref(whole);
    free(text);
    free(path);
}

/* The performance of the candidates of generation 1 with this prompt, which is the same for all,
 * because their weights are zero; NAN: there is none. */
static double performance_with(const json_t *result, const char *prompt) {
    const json_t *g = json_array_get(json_object_get(result, "generations"), 1), *c;
    double found = NAN;
    size_t i;
    json_array_foreach (json_object_get(g, "candidates"), i, c) {
        if (strcmp(json_get_string(json_object_get(c, "genes"), "prompt"), prompt) != 0) continue;
        if (!isnan(found)) assert_close(value_of(c, "performance"), found, 0);
        found = value_of(c, "performance");
    }
    return found;
}

static json_t *prompts_run(const char *root, int population, const char *prompts) {
    char
        *method = xasprintf(
            "zero_adapters: true\nevolve: {generations: 1, population: %d, elites: 1}\n"
            "fitness: {items: 6, metric: probability, performance: 1, cooperation: 0, novelty: 0}\n"
            "genome: {prompts: %s, keep_weights: 1}\n",
            population, prompts),
        *text = method_recipe(method);
    json_t *v = method_run(root, text, 1);
    free(method);
    free(text);
    return v;
}

/* With zero adapters and no training, the performance is a function of the prompt: the same for all
 * candidates, in a population of other prompts, and in one where all have this prompt. */
static void test_prompts_are_used(void **state) {
    (void)state;
    static const char *const prompts[] = {"", "Answer like a pirate.", "Be very brief."};
    double performance[3];
    reference_run();
    json_t *mixed = prompts_run("prompts", 12, "[none, 'Answer like a pirate.', 'Be very brief.']");
    for (int k = 0; k < 3; k++) {
        performance[k] = performance_with(mixed, prompts[k]);
        assert_false(isnan(performance[k]));
        for (int j = 0; j < k; j++) assert_true(performance[j] != performance[k]);
    }
    for (int k = 1; k < 3; k++) {
        char root[24], *list = xasprintf("['%s']", prompts[k]);
        snprintf(root, sizeof root, "prompts%d", k);
        json_t *v = prompts_run(root, 4, list);
        assert_close(performance_with(v, prompts[k]), performance[k], 0);
        free(list);
        json_decref(v);
    }
    /* the table's row uses the prompt */
    const json_t *row = table_row(mixed, "generation 1"), *base = table_row(mixed, "base");
    bool has = *json_get_string(json_object_get(json_object_get(mixed, "best"), "genes"), "prompt");
    assert_int_equal(json_number_of(row, "prefilled") > json_number_of(base, "prefilled"), has);
    json_decref(mixed);
}

static void test_pause(void **state) {
    (void)state;
    volatile bool pause = true;
    struct evolve_recipe o;
    struct evolve_env env = env_open("paused", 1);
    reference_run();
    env.pause = &pause;
    assert_int_equal(evolve_recipe_load(&o, recipe_path, &err), OK);
    assert_null(evolve_run_execute(&env, &o, "r", &err));
    assert_int_equal(err.code, ERR_STATE);
    assert_non_null(strstr(err.text, "shoal resume r"));
    assert_run_status("paused", "paused");
    evolve_recipe_release(&o);
    env_release(&env);
    assert_killed_run_resumes("paused");
}

/* Founders that are equal except for noise are refused, because breeding them has no effect. */
static void test_copies_are_refused(void **state) {
    (void)state;
    struct model_config c;
    struct evolve_recipe o;
    struct evolve_env env = env_open("copies", 1);
    reference_run();
    assert_int_equal(model_preset_find("tiny-llama", &c, &err), OK);
    char *from = path_join(dir, "ref/r/adapters/gen_0/a"), *to = path_join(dir, "copy"),
         *path = path_join(dir, "way.yaml");
    struct adapter *a = adapter_load(from, &c, &err);
    struct adapter *copy = adapter_mutate(a, 1, 0.005f, false, 3);
    assert_int_equal(adapter_save(copy, to, "tiny", &err), OK);
    char *text = xasprintf("model: %s/tiny\nrounds: 0\npersonas: [\"first=%s\", \"second=%s\"]\n"
                           "tasks: [pick]\n",
                           dir, from, to);
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    assert_int_equal(evolve_recipe_load(&o, path, &err), OK);
    assert_null(evolve_run_execute(&env, &o, "r", &err));
    assert_int_equal(err.code, ERR_MISMATCH);
    assert_non_null(strstr(err.text, "first"));
    assert_non_null(strstr(err.text, "second"));
    evolve_recipe_release(&o);
    adapter_release(a);
    adapter_release(copy);
    env_release(&env);
    free(from);
    free(to);
    free(path);
    free(text);
}

/* The text is an invalid recipe; the error message must contain `want`. */
static void assert_recipe_refused(const char *text, const char *want) {
    struct evolve_recipe o;
    char *path = path_join(dir, "bad.yaml");
    assert_int_equal(file_write(path, text, strlen(text), &err), OK);
    int rc = evolve_recipe_load(&o, path, &err);
    evolve_recipe_release(&o);
    free(path);
    if (rc == OK) fail_msg("accepted: %s", text);
    if (!strstr(err.text, want) || !strstr(err.text, "bad.yaml"))
        fail_msg("'%s' does not say '%s'", err.text, want);
}

#define TWO "personas: [a=x, b=y]\n"
#define TASK "tasks: [pick]\n"

/* Options of breeding that none of the crossovers uses. A stored recipe with them loads, because
 * version 0.1 ignored them. */
static void test_unused_options(void **state) {
    (void)state;
    static const struct {
        const char *options, *want;
    } rows[] = {
        {"blend_min: 0.2, crossovers: [extrapolate, split]",
         "no crossover of the recipe uses evolve.blend-min: 'extrapolate' has rank, step; 'split' "
         "has weights, rank, seed, step"},
        {"rank: 8, crossovers: [linear]", "evolve.rank: 'linear' has weights"},
        {"preserve_norm: false, crossovers: [ratio]", "evolve.preserve-norm: 'ratio' has"},
        {"rank: 8, blend_max: 0.6, preserve_norm: false, crossovers: [linear, delta]", NULL},
        {"rank: 8, search: none, crossovers: [linear]", NULL}};
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct evolve_recipe o;
        char *path = path_join(dir, "unused.yaml"),
             *text = xasprintf(TWO TASK "evolve: {%s}\n", rows[i].options);
        assert_int_equal(file_write(path, text, strlen(text), &err), OK);
        if (evolve_recipe_load(&o, path, &err) != OK) fail_msg("%s", err.text);
        assert_int_equal(population_check_unused(&o.evolve, &err), rows[i].want ? ERR_USAGE : OK);
        if (rows[i].want && !strstr(err.text, rows[i].want)) fail_msg("%s", err.text);
        evolve_recipe_release(&o);
        free(path);
        free(text);
    }
}

static void test_bad_recipes(void **state) {
    (void)state;
    assert_recipe_refused(TWO TASK "\nround: 3\n", "line 4");
    assert_recipe_refused(TWO TASK "\nround: 3\n", "'round'");
    assert_recipe_refused(TWO TASK "evolve:\n  population: 4\n  populaton: 5\n", "line 5");
    assert_recipe_refused(TWO TASK "train:\n  rank: 5\n", "line 4");
    assert_recipe_refused(TWO TASK "fitness:\n  items: none\n", "line 4");
    assert_recipe_refused(TWO TASK "rounds: -1\n", "line 3");
    assert_recipe_refused(TASK, "two personas");
    assert_recipe_refused("personas: [a=x]\n" TASK, "two personas");
    assert_recipe_refused(TWO, "no tasks");
    assert_recipe_refused(TWO "tasks: [pick, knitting]\n", "knitting");
    assert_recipe_refused(TWO TASK "vote: loudest\n", "loudest");
    assert_recipe_refused(TWO TASK "evolve: {crossovers: [slerp, wild]}\n", "no operator 'wild'");
    assert_recipe_refused(TWO TASK "evolve: {mutations: [slerp]}\n", "'slerp' is no mutation");
    assert_recipe_refused(TWO TASK "evolve: {crossovers: []}\n", "no crossover");
    assert_recipe_refused(TWO TASK "evolve: {selection: luck}\n", "luck");
    assert_recipe_refused(TWO TASK "evolve: {search: guess}\n", "guess");
    assert_recipe_refused(TWO TASK "evolve: {elites: 7}\n", "more elites");
    assert_recipe_refused(TWO TASK "evolve: {finetune_steps: 3}\n", "evolve.finetune_data");
    assert_recipe_refused(TWO TASK "evolve: {search: es, finetune_data: x}\nes: {population: 3}\n",
                          "odd");
    assert_recipe_refused(TWO TASK "fitness: {race: true}\n", "performance only");
    assert_recipe_refused(TWO TASK "fitness: {metric: feeling}\n", "feeling");
    assert_recipe_refused(TWO TASK "fitness: {distance: far}\n", "js, disagreement or embedding");
    assert_recipe_refused(TWO TASK "chain_of_thought: false\nfitness: {distance: embedding}\n",
                          "chain_of_thought");
    assert_recipe_refused(TWO TASK "fitness: {credit: all}\n", "loo or shapley");
    assert_recipe_refused(TWO TASK "genome: {prompts: ['role:Guessing']}\n", "no role 'Guessing'");
    assert_recipe_refused(TWO TASK "genome: {lr_min: 0.01, lr_max: 0.001}\n", "genome.lr needs");
    assert_recipe_refused(TWO TASK "genome: {lr_max: 0.001}\n", "0 < min < max");
    assert_recipe_refused(TWO TASK "genome: {lr_min: 0.001, lr_max: 0.01}\n",
                          "set evolve.finetune_steps");
    assert_recipe_refused(TWO TASK "chain_of_thought: false\n"
                                   "genome: {temperature_min: 0.1, temperature_max: 1}\n",
                          "chain_of_thought");
    assert_recipe_refused(TWO TASK "genome: {prompts: [x]}\nevolve: {search: merge}\n",
                          "needs search 'breed'");
    assert_recipe_refused(TWO TASK "genome: {keep_weights: 1}\n", "is a copy of its parent");
    assert_recipe_refused(TWO TASK "retain: [knitting]\n", "knitting");
    assert_recipe_refused(TWO TASK "save: none\n", "save is all or best");
    assert_recipe_refused("personas: [a=x, b]\n" TASK, "'b' is not name=file");
    assert_recipe_refused("personas: [a=x, b=]\n" TASK, "'b=' is not name=file");
    assert_recipe_refused("personas: [a=x, b=+]\n" TASK, "'b=+' is not name=file");
    assert_recipe_refused("personas: [a=x, =y]\n" TASK, "'=y' is not name=file");
    assert_recipe_refused("personas: [a=x, a=y]\n" TASK, "two personas are named 'a'");
    static const char *const bad_names[] = {
        "..",   "a/b",    "a.b",  "<b>",        "b c",
        "base", "debate", "g1c0", "generation", "averyveryverylongname"};
    for (size_t i = 0; i < ARRAY_LEN(bad_names); i++) {
        char *text = xasprintf("personas: [a=x, \"%s=y\"]\n" TASK, bad_names[i]);
        assert_recipe_refused(text, "cannot name a persona");
        free(text);
    }
    struct buf many = {0};
    buf_puts(&many, TASK "personas: [p0=x");
    for (int i = 1; i < 17; i++) buf_printf(&many, ", p%d=x", i);
    buf_puts(&many, "]\n");
    assert_recipe_refused(many.data, "more than 16");
    buf_release(&many);
}

static void test_report_is_self_contained(void **state) {
    (void)state;
    reference_run();
    char *path = path_join(dir, "ref/r/report.html"), *other = path_join(dir, "other.html");
    struct buf page = {0};
    assert_int_equal(file_read(path, 1 << 24, &page, &err), OK);
    static const char *const outside[] = {"http:", "https:", "src=", "<script", "@import", "url("};
    for (size_t i = 0; i < ARRAY_LEN(outside); i++) assert_null(strstr(page.data, outside[i]));
    assert_non_null(strstr(page.data, "first-round vote"));
    buf_release(&page);
    /* The page of a result with hostile names contains none of them as markup. */
    json_t *copy = json_deep_copy(reference);
    json_object_set_new(json_array_get(json_object_get(copy, "table"), 0), "name",
                        json_string("<script>x</script>"));
    assert_int_equal(evolve_report_write(copy, other, &err), OK);
    assert_int_equal(file_read(other, 1 << 24, &page, &err), OK);
    assert_null(strstr(page.data, "<script"));
    assert_non_null(strstr(page.data, "&lt;script&gt;x"));
    buf_release(&page);
    json_decref(copy);
    free(path);
    free(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_best_fitness_never_decreases),
        cmocka_unit_test(test_crossover_improves),
        cmocka_unit_test(test_planted_founder_wins),
        cmocka_unit_test(test_seed_determines_history),
        cmocka_unit_test(test_breeding_rules),
        cmocka_unit_test(test_weights),
        cmocka_unit_test(test_factor_blend),
        cmocka_unit_test(test_regressing_operator_is_dropped),
        cmocka_unit_test(test_every_selection),
        cmocka_unit_test(test_preserve_norm),
        cmocka_unit_test(test_invalid_populations_are_refused),
        cmocka_unit_test(test_genes_are_drawn),
        cmocka_unit_test(test_genes_are_inherited),
        cmocka_unit_test(test_genes_mutate),
        cmocka_unit_test(test_prompts_of_roles),
        cmocka_unit_test(test_genes_leave_weights_alone),
        cmocka_unit_test(test_keep_weights),
        cmocka_unit_test(test_credit_needs_equal_prompts),
        cmocka_unit_test(test_run),
        cmocka_unit_test(test_costs),
        cmocka_unit_test(test_saved_lineage),
        cmocka_unit_test(test_unused_options),
        cmocka_unit_test(test_published_adapters),
        cmocka_unit_test(test_threads_change_nothing),
        cmocka_unit_test(test_zero_adapters_have_no_effect),
        cmocka_unit_test(test_kill_at_every_stage),
        cmocka_unit_test(test_kill_at_any_moment),
        cmocka_unit_test(test_resume_of_a_finished_run),
        cmocka_unit_test(test_prune),
        cmocka_unit_test(test_prune_hostile),
        cmocka_unit_test(test_resume_with_other_inputs),
        cmocka_unit_test(test_persona_of_adapter_and_file),
        cmocka_unit_test(test_resume_without_amx),
        cmocka_unit_test(test_existing_run_is_refused),
        cmocka_unit_test(test_unknown_runs),
        cmocka_unit_test(test_missing_data),
        cmocka_unit_test(test_failed_run),
        cmocka_unit_test(test_every_search_method),
        cmocka_unit_test(test_flop_budget),
        cmocka_unit_test(test_fork_and_replay),
        cmocka_unit_test(test_genes_of_a_run),
        cmocka_unit_test(test_genes_survive_kills),
        cmocka_unit_test(test_prompts_are_used),
        cmocka_unit_test(test_pause),
        cmocka_unit_test(test_copies_are_refused),
        cmocka_unit_test(test_bad_recipes),
        cmocka_unit_test(test_report_is_self_contained),
    };
    return cmocka_run_group_tests(tests, runs_open, runs_close);
}
