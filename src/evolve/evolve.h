/*
 * evolve: a population of adapters that is evaluated, selected and bred, and the whole experiment
 * around it.
 *
 * The first half is pure: struct population changes only through population_breed, and fitness
 * comes from a `landscape`, which is the swarm on an engine in a run and a known function in tests.
 * The second half is a run: recipe in, run folder out, every stage recomputable, so that a killed
 * run is resumed by running it again over what the store already holds.
 */
#ifndef SHOAL_EVOLVE_H
#define SHOAL_EVOLVE_H

#include "swarm/swarm.h"
#include "train/train.h"

/* population */

struct evolve_options {
    int64_t generations, population, elites, rank;
    double blend_min, blend_max; /* share of the second parent */
    double mutate, mutate_std;   /* probability a tensor, and size relative to its deviation */
    double gain_max;             /* a child's ΔW is drawn up to so many times larger */
    bool preserve_norm; /* a child's ‖ΔW‖ is the parents' mean, not what averaging unlike parents
                           leaves */
    char *crossover;    /* "delta" or "seed" */
};
extern const struct option_row evolve_option_rows[];

struct fitness_options {
    int64_t items; /* dev questions, spread over the tasks */
    double performance, cooperation, novelty;
};
extern const struct option_row fitness_option_rows[];

struct candidate {
    char name[32]; /* unique in its run: "critic", "g1c0" */
    struct adapter *adapter;
    char parents[2][32]; /* "" for founders */
    double blend;
    bool elite; /* carried over unchanged */
    struct interval performance, cooperation;
    double novelty, fitness;
};
struct landscape {
    void *ctx;
    /* Fills performance, cooperation and novelty of all n at once. */
    int (*evaluate)(void *ctx, struct candidate *c, int n, struct error *err);
};
#define MAX_POPULATION 64
struct population {
    struct evolve_options o;
    struct fitness_options f;
    uint64_t seed;
    int generation, n;
    struct candidate c[MAX_POPULATION];
};
/* Founders are retained. */
int population_init(struct population *p, const struct evolve_options *o,
                    const struct fitness_options *f, uint64_t seed, struct adapter *const *founders,
                    const char *const *names, int n, struct error *err);
void population_release(struct population *p);
/* Evaluates everybody, computes fitness, sorts by it (ties: name). */
int population_evaluate(struct population *p, const struct landscape *l, struct error *err);
/* The next generation: elites first, unchanged; each child blends two distinct parents of the
 * better half and mutates. */
int population_breed(struct population *p, struct error *err);

/* runs */

struct run_options {
    char *model;
    int64_t seed;
    struct strings personas;    /* "name=conversations.jsonl"; several files are joined by '+' */
    struct strings tasks;       /* families */
    int64_t rounds, max_tokens; /* of a debate, and of one agent's thinking */
    bool working;
    char *vote;
    int64_t test_items;
    double temperature; /* of self-consistency's samples */
    bool zero_adapters; /* replace every trained founder by a zero adapter: all effects must vanish
                         */
    struct train_options train;     /* section "train" */
    struct evolve_options evolve;   /* section "evolve" */
    struct fitness_options fitness; /* section "fitness" */
    char *text;                     /* the recipe's own bytes */
};
extern const struct option_row run_option_rows[];
int run_recipe_load(struct run_options *o, const char *path, struct error *err);
void run_options_release(struct run_options *o);

struct run_env {
    struct pool *pool;
    enum numeric_class cls;
    const char *root;                /* folder of runs: "runs" */
    char *(*find)(const char *path); /* where relative names of models and data are looked for */
};
/* Starts (id NULL: a fresh one is made and written to *id_out) or continues a run; returns its
 * result object: {run, adapters: {name: hash}, table: [...], comparisons: [...]}. */
json_t *run_execute(const struct run_env *env, const struct run_options *o, const char *id,
                    char **id_out, struct error *err);
/* Continues runs/ID from its stored recipe. */
json_t *run_resume(const struct run_env *env, const char *id, struct error *err);
/* The table for people. */
void run_print(const json_t *result, FILE *f);
/* report.html from the result object: self-contained, plots as SVG. */
int report_write(const json_t *result, const char *path, struct error *err);

#endif
