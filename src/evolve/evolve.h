/*
 * evolve: a population of adapters that is evaluated, selected and bred, and the whole experiment
 * around it.
 *
 * The first half is pure: struct population changes only through population_evaluate and
 * population_breed, and what candidates are worth comes from a `landscape`, which is the swarm on
 * an engine in a run and a known function in tests. The second half is a run: recipe in, run folder
 * out, every stage recomputable, so that a killed run is resumed by running it again over what the
 * store already holds.
 */
#ifndef SHOAL_EVOLVE_H
#define SHOAL_EVOLVE_H

#include "adapter/adapter.h"
#include "evolve/fitness.h"
#include "evolve/search.h"
#include "evolve/select.h"
#include "swarm/swarm.h"
#include "train/train.h"

/* population */

struct evolve_options {
    char *search; /* a row of search_methods */
    int64_t generations, population, elites, rank;
    double flops;                         /* that a search may spend; 0: no limit */
    struct strings crossovers, mutations; /* operators, among which credit decides */
    double mutate;                        /* share of children that are mutants of one parent */
    double blend_min, blend_max;          /* share of the second parent */
    bool preserve_norm; /* a child of two has their mean ‖ΔW‖, not what averaging unlike parents
                           leaves */
    double move;        /* divergence of behaviour that mutations aim at; 0: their step stays */
    double harm;        /* operators whose children lose so much on average are dropped; 0: none */
    char *selection;
    double keep, slope; /* as in select_pool */
    int64_t tournament;
    double share;    /* radius of fitness sharing, in divergence of behaviour; 0: none */
    int64_t archive; /* bins an axis of the MAP-Elites archive that parents come from; 0: none */
    bool roles;      /* co-evolution: each founder begins a role */
    bool per_layer;  /* a search over coefficients has one for each layer of each founder */
    char *merge;     /* operator that a search over coefficients makes its candidates with */
    int64_t burst;   /* updates of LoRA gradient that a child gets before it is measured */
    char *learn;     /* conversations of bursts, gradient and es */
};
extern const struct option_row evolve_option_rows[];

struct fitness_options {
    int64_t items; /* dev questions a generation, spread over the tasks */
    bool fresh;    /* other questions in each generation */
    char *measure; /* right: 0 or 1 an item; probability: of the right choice */
    char *apart;   /* of behaviour: js, disagreement, or embedding (of what was written) */
    char *credit;  /* of cooperation: loo, or shapley in the vote */
    bool race;     /* section "race" decides who is asked how much */
    double performance, cooperation, novelty;
};
extern const struct option_row fitness_option_rows[];

enum { MAX_POPULATION = 64, MAX_CANDIDATES = 2 * MAX_POPULATION, N_DESCRIPTORS = 2 };
struct candidate {
    char name[32]; /* unique in its run: "critic", "g1c0" */
    struct adapter *adapter;
    const struct weighted_adapter *mix; /* [n_mix] in the adapter's place; borrowed */
    int n_mix;
    char parents[2][32];                /* "" for founders, and the second of a mutant */
    const struct adapter_operator *how; /* that made it; NULL: a founder */
    double blend, step;                 /* share of the second parent; of the operator; or NAN */
    int role;                           /* 0 without roles */
    bool elite;                         /* carried over unchanged */
    /* What its landscape fills in. */
    struct stats_interval performance, cooperation, novelty;
    double descriptor[N_DESCRIPTORS]; /* of behaviour, each in 0..1 */
    int n_items;                      /* that it was asked: all but in a race */
    /* What follows. */
    struct stats_interval fitness;
    double shared;   /* fitness as selection sees it */
    double expected; /* performance without the winner's curse (fitness_shrink) */
};
/* What the candidates of one generation did, beside their own fields. */
struct evaluation {
    int n_items;
    double *scores;   /* [n][n_items]; NAN: not asked */
    double *distance; /* [n][n] of behaviour, 0..1 */
};
void evaluation_release(struct evaluation *a);
struct fitness_function {
    void *ctx;
    /* Measures all n at once, on the generation's items. The last `witnesses` are only to be
     * compared with: nobody's cooperation or novelty depends on them. Fills an empty assay. */
    int (*evaluate)(void *ctx, int generation, struct candidate *c, int n, int witnesses,
                    struct evaluation *out, struct error *err);
};
/* One kind of operators with their credit and steps. */
struct operator_set {
    struct operator_selector credit;
    const struct adapter_operator *op[MAX_OPERATORS];
    double step[MAX_OPERATORS];
};
struct population {
    const struct evolve_options *o; /* these two change by population_set_options only */
    const struct fitness_options *f;
    uint64_t seed;
    int generation, n;
    int n_roles;
    struct candidate c[MAX_CANDIDATES]; /* [n], after them witnesses */
    int witnesses; /* parents that are not carried over: they are measured beside their children,
                      so that gains are paired and what chose the parents is not what they are
                      measured by; then they go */
    struct evaluation assay; /* of the last evaluation, in the order of its candidates */
    struct operator_set crossovers, mutations;
    struct archive archive;
    struct candidate *hall; /* [n_hall] who is or was in the archive; its id is the index */
    int n_hall;
};
/* ERR_USAGE where the options make no sense, whoever the founders are. */
int population_check_options(const struct evolve_options *o, const struct fitness_options *f,
                             struct error *err);
/* Founders are retained. The options are borrowed. */
int population_init(struct population *p, const struct evolve_options *o,
                    const struct fitness_options *f, uint64_t seed, struct adapter *const *founders,
                    const char *const *names, int n, struct error *err);
void population_release(struct population *p);
/* Other options and seed from the next generation on; operators that are no longer the same begin
 * without credit. */
int population_set_options(struct population *p, const struct evolve_options *o,
                           const struct fitness_options *f, uint64_t seed, struct error *err);
/* Evaluates everybody, computes fitness with its interval, credits operators, adapts steps, fills
 * the archive, lets witnesses go, sorts by fitness (ties: name). */
int population_evaluate(struct population *p, const struct fitness_function *l, struct error *err);
/* The next generation: elites first, unchanged; each child comes from one operator, a crossover of
 * two distinct parents or a mutation of one. Everything random is drawn from (seed, generation,
 * child). */
int population_breed(struct population *p, struct error *err);
/* What the last generation was: {candidates: [...], diversity: {...}, operators: [...], archive}.
 */
json_t *population_json(const struct population *p);
json_t *candidate_json(const struct candidate *c);
/* Fitness and what follows from it, by what a landscape filled in; scores: [n_items] of its
 * performance, or NULL. */
void candidate_fitness(struct candidate *c, const struct fitness_options *f, const double *scores,
                       int n_items);

/* diversity.c */

/* Of n adapters: smallest and mean relative distance and mean cosine of ΔW, mean ‖ΔW‖, and smallest
 * and mean divergence of behaviour. distance: [n][n], or NULL. */
struct diversity {
    double weights_min, weights_mean, cosine_mean, norm_mean, behaviour_min, behaviour_mean;
    int twin[2]; /* whose weights are nearest */
};
struct diversity diversity_compute(struct adapter *const *a, int n, const double *distance);
json_t *diversity_json(const struct diversity *d);
/* ERR_MISMATCH, with the figures, where two founders are copies but for noise: their distance is
 * under a twentieth. */
int diversity_check(const struct diversity *d, const char *const *names, struct error *err);

/* runs */

struct evolve_recipe {
    char *model;
    int64_t seed;
    struct strings personas;    /* "name=conversations.jsonl"; several files are joined by '+'; or
                                   "name=DIR", an adapter that is there */
    struct strings tasks;       /* families */
    struct strings retain;      /* families not trained for, whose accuracy must not suffer */
    int64_t rounds, max_tokens; /* of a debate (0: none), and of one agent's thinking */
    bool working;
    char *vote;
    int64_t test_items, retain_items;
    bool curve; /* the table has all founders and generations, not the first best and the last */
    char *save; /* all candidates, or best: each generation's */
    double temperature; /* of self-consistency's samples */
    bool zero_adapters; /* replace every trained founder by a zero adapter: all effects must vanish
                         */
    struct train_options train;     /* section "train" */
    struct evolve_options evolve;   /* section "evolve" */
    struct fitness_options fitness; /* section "fitness" */
    struct search_options search;   /* section "search": of coefficients */
    struct race_options race;       /* section "race" */
    struct train_options learn;     /* section "learn": of bursts and gradient */
    struct es_options es;           /* section "es" */
    char *text;                     /* the recipe's own bytes */
};
extern const struct option_row evolve_recipe_rows[]; /* the top level */
/* The sections by name; a row without one ends them. */
struct evolve_recipe_section {
    const char *name;
    const struct option_row *rows;
    size_t offset; /* in run_options */
};
extern const struct evolve_recipe_section evolve_recipe_sections[];
int evolve_recipe_load(struct evolve_recipe *o, const char *path, struct error *err);
void evolve_recipe_release(struct evolve_recipe *o);

/* A way to look for a better adapter, from the founders on. */
struct evolve_run;
struct search_method {
    const char *name, *about;
    /* Evaluates and records each generation. */
    int (*go)(struct evolve_run *r, struct error *err);
};
extern const struct search_method search_methods[]; /* a row without name ends it */

struct evolve_env {
    struct pool *pool;
    enum numeric_class cls;
    const char *root;                /* folder of runs: "runs" */
    char *(*find)(const char *path); /* where relative names of models and data are looked for */
    const volatile bool *pause;      /* set from outside: stop at the next step; may be NULL */
};
/* Starts (id NULL: a fresh one is made and written to *id_out) or continues a run; returns its
 * result object: {run, adapters: {name: hash}, generations, table, comparisons, retention, spent}.
 * ERR_STATE where it was paused. */
json_t *evolve_run_execute(const struct evolve_env *env, const struct evolve_recipe *o,
                           const char *id, char **id_out, struct error *err);
/* What that would read, ask and write, the recipe's files having been found and its questions
 * counted. NULL: `err` says what is wrong. */
json_t *evolve_run_plan(const struct evolve_env *env, const struct evolve_recipe *o,
                        struct error *err);
/* Continues runs/ID from its stored recipe. */
json_t *evolve_run_resume(const struct evolve_env *env, const char *id, struct error *err);
/*
 * A new run that is runs/ID up to generation `at` and from there on follows another recipe (NULL:
 * the same) and seed (-1: the same). Nothing of what is shared is computed again. The recipes must
 * have founders and fitness questions in common.
 */
json_t *evolve_run_fork(const struct evolve_env *env, const char *id, int at, const char *recipe,
                        int64_t seed, const char *new_id, struct error *err);
/* Computes generation `at` of a finished or interrupted run anew, without the store's answers, and
 * compares: {generation, equal, candidates: [{name, hash, fitness, equal}]}. */
json_t *evolve_run_replay(const struct evolve_env *env, const char *id, int at, struct error *err);
/* README.md of an adapter's folder, as a hub expects it, from the candidate's JSON. */
int model_card_write(const char *dir, const char *model, const char *run, int generation,
                     const json_t *candidate, struct error *err);
/* The table for people. */
void evolve_run_print(const json_t *result, FILE *f);
/* report.html from the result object: self-contained, plots as SVG. */
int evolve_report_write(const json_t *result, const char *path, struct error *err);
/* The family tree of a run from its ledger, as text; of one candidate's ancestors when `name` is
 * not NULL. */
int lineage_print(const json_t *generations, const char *name, FILE *f, struct error *err);

/*
 * operators: what makes a child from parents, as rows of a table: crossover, PEFT's combination
 * types, mutation.
 *
 * A breeder draws a row by name, calls operator_apply, asks operator_relative_change how far the
 * child went from its parents, and adapts the step that it gives next time within the row's bounds.
 * An operator is pure: the same parents, weights, step, rank and seed give the same adapter, bit
 * for bit. Any thread may apply any operator.
 *
 * All rows take plain LoRA only (DoRA and tables of the vocabulary are refused) and mixed ranks,
 * targets and scalings. Those that work on ΔW = scale · B A use the true scale (alpha / r, or
 * alpha / √r) and give children of scale 1.
 */

#define OPERATOR_PARENTS_MAX 64

/* What an operator is applied to. */
struct operands {
    struct adapter *const *parents; /* [n]; crossover of two calls them a and b */
    const float *weights;           /* [n], or NULL: 1 / n each */
    int n;
    /* Of every module of a child made from ΔW, at most what the module can have; 0: the largest
     * parent's there. Mutations but `rank` and PEFT's rows on A and B keep the parents'. */
    int32_t rank;
    float step; /* see the row; NAN: the row's own */
    uint64_t seed;
};

enum operator_kind { OPERATOR_CROSSOVER, OPERATOR_PEFT, OPERATOR_MUTATION };
/* What weights are to a row, for who breeds with it. */
enum operator_weighting {
    WEIGHTING_DELTA,   /* shares of ΔW */
    WEIGHTING_FACTORS, /* shares of A and B apart: ranks are the parents' */
    WEIGHTING_FITNESS,
    WEIGHTING_NONE /* none are wanted; the first parent should be the fitter */
};
struct adapter_operator {
    const char *name, *about;
    enum operator_kind kind;
    enum operator_weighting shares;
    int least, most;  /* parents */
    const char *unit; /* what the step is; NULL: it has none */
    float step, step_min, step_max;
    /* Operands were checked. `lineage` gets what is particular to this child; the rest is in it. */
    struct adapter *(*make)(const struct operands *x, json_t *lineage, struct error *err);
};
/* In the order in which they are listed; NULL beyond the last. */
const struct adapter_operator *operator_at(int i);
/* ERR_USAGE lists what there is. */
const struct adapter_operator *operator_find(const char *name, struct error *err);
/*
 * The child. Its lineage: operator, parents (hashes), weights, step, rank, seed, and where ΔW was
 * re-factorised "error", the relative norm of what the rank could not hold. ERR_USAGE: operands
 * that the row does not take; ERR_MISMATCH: parents that do not go together; ERR_STATE: nothing of
 * them is left; ERR_NUMERIC: overflow, or a mean that iteration does not reach.
 */
struct adapter *operator_apply(const struct adapter_operator *op, const struct operands *x,
                               struct error *err);
/* ‖ΔW_child - ΔW_parent‖ / ‖ΔW_parent‖, down to about 1e-8; of a zero parent 0 or infinity. */
double operator_relative_change(const struct adapter *child, const struct adapter *parent);

/* The parts of the table, each in its own file; each ends with a row without a name. */
extern const struct adapter_operator crossover_operators[], merge_operators[], peft_operators[],
    mutation_operators[];

/* For rows. */
int32_t operand_modules(const struct operands *x); /* of the parents' shape, with or without ΔW */
double operand_weight(const struct operands *x, int p);
/* The rank wanted of module i, or the largest of the parents', and at most `most` and what its
 * matrix can have. */
int32_t operand_rank(const struct operands *x, int32_t i, int32_t most);
/* Finishes the child of `d`; ERR_STATE when nothing is left of it. */
struct adapter *operator_finish(struct adapter_builder *d, json_t *lineage, struct error *err);
/* Takes over `a` (NULL: so is the result): its content under another lineage, which is borrowed. */
struct adapter *operator_set_lineage(struct adapter *a, json_t *lineage);
/* Takes over `a`: scaled to ‖ΔW‖ = norm, which its lineage tells as "scaled"; as it is where it has
 * no norm or is to have none. */
struct adapter *operator_rescale(struct adapter *a, double norm);
/* coef [L·N_PROJ][n]: child = Σ coef · ΔW in each module, truncated to its rank; a module where
 * only one parent counts is that parent's, as it is, when the rank allows. */
struct adapter *operator_weighted_sum(const struct operands *x, const double *coef, json_t *lineage,
                                      struct error *err);

/*
 * lineage: who descends from whom in a run, from the records of its generations (an array of the
 * lines of evolution.jsonl, also result.json's "generations").
 *
 * A candidate is one node from the generation that it is born in, which is the first that names it,
 * to the last: elites stay the same node. Parents come before children. Who has no parents is a
 * founder. Records are borrowed and outlive the lineage; any thread.
 */

struct lineage_node {
    const char *name;
    const json_t *born; /* the record of its first generation */
    int generation, last;
    int parent[2];   /* nodes; -1: none */
    double share[2]; /* of its ancestry that comes through each: as the blend says, else halves */
};
struct lineage {
    struct lineage_node *v;
    int n, generations;
    int best; /* the fittest of the last generation, -1 before the first */
    json_t *index;
};
/* The next generation; one that is there already takes the place of itself and all later ones, as
 * where a run was continued from an earlier point. After an error the lineage ends before it. */
int lineage_add(struct lineage *l, const json_t *generation, struct error *err);
int lineage_from_json(struct lineage *l, const json_t *generations, struct error *err);
void lineage_release(struct lineage *l);
int lineage_find(const struct lineage *l, const char *name); /* -1 when there is none */
/* in[n]: the node itself and whoever it descends from. */
void lineage_ancestors(const struct lineage *l, int node, bool *in);
/* Lets what is in flow[n] run up to the parents by their shares: of 1 put into a node, each founder
 * ends with its share of that node's ancestry, others with what came through them. */
void lineage_propagate(const struct lineage *l, double *flow);

/* evolution.jsonl as such an array, of lines that lineage_add takes; errors name the line. A last
 * line that is not finished yet is left out. */
json_t *lineage_load(const char *path, struct error *err);
/* Of `name` and its ancestors, or of everybody (NULL): {of, generations, nodes, edges, founders};
 * Graphviz. */
json_t *lineage_json(const json_t *generations, const char *name, struct error *err);
int lineage_dot(const json_t *generations, const char *name, struct buf *out, struct error *err);

/* For those who show records. */
double json_number_or_nan(const json_t *v, const char *key); /* NAN where there is none */
struct stats_interval json_interval(const json_t *v, const char *key);
void buf_add_one_line(struct buf *b, const char *s); /* buf_add_sanitized, and on one line */

#endif
