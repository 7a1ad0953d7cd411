/*
 * Selection and breeding: the decisions, without any I/O. Everything random is drawn from (seed,
 * generation, child), so a generation is the same whoever computes it and whenever.
 */
#include "evolve/evolve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ROW(type_, name, type, field, fallback, min, max, metavar, help)                           \
    { name, type, offsetof(struct type_, field), fallback, min, max, metavar, help }

const struct option_row evolve_option_rows[] = {
    ROW(evolve_options, "generations", OPT_INT, generations, "3", 0, 1000, "N",
        "generations bred after the founders"),
    ROW(evolve_options, "population", OPT_INT, population, "6", 2, MAX_POPULATION, "N",
        "candidates a generation"),
    ROW(evolve_options, "elites", OPT_INT, elites, "2", 1, MAX_POPULATION, "N",
        "best ones kept unchanged"),
    ROW(evolve_options, "rank", OPT_INT, rank, "16", 1, 256, "R", "rank of children"),
    ROW(evolve_options, "blend-min", OPT_FLOAT, blend_min, "0.3", -1, 2, "T",
        "least share of the second parent"),
    ROW(evolve_options, "blend-max", OPT_FLOAT, blend_max, "0.7", -1, 2, "T",
        "largest share of the second parent"),
    ROW(evolve_options, "mutate", OPT_FLOAT, mutate, "0.3", 0, 1, "P",
        "probability that a tensor mutates"),
    ROW(evolve_options, "mutate-std", OPT_FLOAT, mutate_std, "0.1", 0, 10, "S",
        "noise over the tensor's own deviation"),
    ROW(evolve_options, "gain-max", OPT_FLOAT, gain_max, "1", 1, 10, "X",
        "a child's ΔW times 1 to X, drawn evenly: above 1 it extrapolates"),
    ROW(evolve_options, "preserve-norm", OPT_BOOL, preserve_norm, "true", 0, 0, NULL,
        "rescale a child to its parents' mean norm"),
    ROW(evolve_options, "crossover", OPT_STRING, crossover, "delta", 0, 0, "NAME",
        "delta (blend of ΔW) or seed (A and B apart, as the predecessor)"),
    {0},
};

const struct option_row fitness_option_rows[] = {
    ROW(fitness_options, "items", OPT_INT, items, "200", 1, 1e6, "N", "dev questions"),
    ROW(fitness_options, "performance", OPT_FLOAT, performance, "0.6", 0, 1, "W",
        "weight of own accuracy"),
    ROW(fitness_options, "cooperation", OPT_FLOAT, cooperation, "0.3", 0, 1, "W",
        "weight of leave-one-out worth"),
    ROW(fitness_options, "novelty", OPT_FLOAT, novelty, "0.1", 0, 1, "W",
        "weight of difference from the others"),
    {0},
};

int population_init(struct population *p, const struct evolve_options *o,
                    const struct fitness_options *f, uint64_t seed, struct adapter *const *founders,
                    const char *const *names, int n, struct error *err) {
    *p = (struct population){.o = *o, .f = *f, .seed = seed};
    if (n < 2 || n > MAX_POPULATION)
        return error_set(err, ERR_USAGE, "evolution needs 2 to %d founders, not %d", MAX_POPULATION,
                         n);
    if (o->elites > o->population)
        return error_set(err, ERR_USAGE, "more elites (%d) than candidates (%d)", (int)o->elites,
                         (int)o->population);
    for (int i = 0; i < n; i++) {
        if (strlen(names[i]) >= sizeof p->c[i].name)
            return error_set(err, ERR_USAGE, "name '%s' is too long", names[i]);
        strcpy(p->c[i].name, names[i]);
        p->c[i].adapter = adapter_retain(founders[i]);
        p->n = i + 1;
    }
    return OK;
}

static void candidates_release(struct candidate *c, int n) {
    for (int i = 0; i < n; i++) adapter_release(c[i].adapter);
}

void population_release(struct population *p) {
    candidates_release(p->c, p->n);
    p->n = 0;
}

static int by_fitness(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->fitness != y->fitness) return x->fitness < y->fitness ? 1 : -1;
    return strcmp(x->name, y->name);
}

int population_evaluate(struct population *p, const struct landscape *l, struct error *err) {
    int rc = l->evaluate(l->ctx, p->c, p->n, err);
    for (int i = 0; rc == OK && i < p->n; i++) {
        struct candidate *c = &p->c[i];
        c->fitness = p->f.performance * c->performance.value +
                     p->f.cooperation * c->cooperation.value + p->f.novelty * c->novelty;
    }
    if (rc == OK) qsort(p->c, (size_t)p->n, sizeof *p->c, by_fitness);
    return rc;
}

/* Beyond a parent (t outside 0..1) that parent's own norm is kept: a negative one would turn the
 * child round. */
static struct adapter *replaced(struct adapter *old, struct adapter *new) {
    adapter_release(old);
    return new;
}

static struct adapter *preserve_norm(struct adapter *child, const struct adapter *a,
                                     const struct adapter *b, double t) {
    t = fmin(1, fmax(0, t));
    double want = (1 - t) * sqrt(adapter_dot(a, a)) + t * sqrt(adapter_dot(b, b));
    double have = sqrt(adapter_dot(child, child));
    if (!(have > 0)) return child;
    return replaced(child, adapter_scale(child, (float)(want / have)));
}

/* The child under its parents' own hashes: the blend between them is nowhere kept. */
static struct adapter *with_lineage(struct adapter *child, const struct candidate *a,
                                    const struct candidate *b, const struct evolve_options *o,
                                    double t, float gain, uint64_t seed) {
    char *parents = xasprintf("%s %s", a->adapter->hash, b->adapter->hash);
    char *how = xasprintf("blend %.9g, gain %.9g, mutate %.9g × %.9g, seed %llu", t, (double)gain,
                          o->mutate, o->mutate_std, (unsigned long long)seed);
    json_t *lineage =
        json_pack("{s:s,s:s,s:s}", "parents", parents, "operator", o->crossover, "settings", how);
    struct adapter *named = adapter_from_data(&child->shape, &child->config, child->data, lineage);
    json_decref(lineage);
    adapter_release(child);
    free(parents);
    free(how);
    return named;
}

/* Two distinct parents of the better half (of three at least, so that few founders all count), a
 * blend, a mutation. */
static int make_child(const struct population *p, int generation, int k, struct candidate *out,
                      struct error *err) {
    struct rng r = rng_make(p->seed, RNG_SELECT, (uint32_t)generation, (uint32_t)k);
    uint32_t half = (uint32_t)MIN(p->n, MAX(3, (p->n + 1) / 2));
    uint32_t i = rng_below(&r, half), j = rng_below(&r, half - 1);
    const struct candidate *a = &p->c[i], *b = &p->c[j + (j >= i)];
    double t = p->o.blend_min + (p->o.blend_max - p->o.blend_min) * (double)rng_uniform(&r);
    bool seed_kind = strcmp(p->o.crossover, "seed") == 0;
    struct adapter *child =
        adapter_blend(a->adapter, b->adapter, (float)t, seed_kind ? 0 : (int32_t)p->o.rank,
                      seed_kind ? BLEND_SEED : BLEND_DELTA, err);
    if (!child) return err->code;
    if (p->o.preserve_norm && !seed_kind) child = preserve_norm(child, a->adapter, b->adapter, t);
    uint64_t seed = rng_u64(&r);
    float gain = 1 + (float)(p->o.gain_max - 1) * rng_uniform(&r);
    if (gain != 1 && !seed_kind) child = replaced(child, adapter_scale(child, gain));
    struct adapter *mutant =
        adapter_mutate(child, (float)p->o.mutate, (float)p->o.mutate_std, seed_kind, seed);
    adapter_release(child);
    *out =
        (struct candidate){.adapter = with_lineage(mutant, a, b, &p->o, t, gain, seed), .blend = t};
    snprintf(out->name, sizeof out->name, "g%dc%d", generation, k);
    strcpy(out->parents[0], a->name);
    strcpy(out->parents[1], b->name);
    return OK;
}

int population_breed(struct population *p, struct error *err) {
    struct candidate next[MAX_POPULATION];
    int n = 0, rc = OK, keep = MIN((int)p->o.elites, p->n);
    for (; n < keep; n++) {
        next[n] = p->c[n];
        next[n].elite = true;
        adapter_retain(next[n].adapter);
    }
    for (int k = 0; rc == OK && n < (int)p->o.population; k++)
        if ((rc = make_child(p, p->generation + 1, k, &next[n], err)) == OK) n++;
    if (rc != OK) {
        candidates_release(next, n);
        return rc;
    }
    candidates_release(p->c, p->n);
    memcpy(p->c, next, sizeof *next * (size_t)n);
    p->n = n;
    p->generation++;
    return OK;
}
