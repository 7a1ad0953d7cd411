/*
 * evolve: a population of adapters that is evaluated, selected and bred, and the experiment around
 * it.
 *
 * The first half has no I/O: struct population holds the candidates, and a fitness_function
 * evaluates them. In a run the fitness function asks the engine; in tests it is a known function.
 * The second half is a run: it reads a recipe and writes a run folder. Every stage is
 * deterministic. So a killed run resumes by running again from the start, and it loads each result
 * that the store has.
 */
#ifndef SHOAL_EVOLVE_H
#define SHOAL_EVOLVE_H

#include "adapter/adapter.h"
#include "evolve/fitness.h"
#include "evolve/search.h"
#include "evolve/select.h"
#include "swarm/swarm.h"
#include "train/train.h"

/*
 * genome: the genes that are evolved together with a candidate's weights: a system prompt, the
 * temperature of its chains of thought, and hyper-parameters of its fine-tuning (genome.c).
 *
 * A founder has no genes. A child takes each gene from one of its parents, with equal probability
 * (uniform crossover), or draws it from the recipe's range if both parents lack it; then an
 * inherited gene mutates. The draws use a separate random stream, so a recipe without genes keeps
 * its bits.
 */
enum gene { GENE_PROMPT, GENE_TEMPERATURE, GENE_LR, GENE_MAX_STEPS, GENE_LORA_DROPOUT, N_GENES };
struct genome_options {
    struct strings prompts; /* texts; "": no system prompt. genome_resolve replaces role names */
    /* Ranges of the numbers; a gene is evolved if 0 < min < max. */
    double min[N_GENES], max[N_GENES];
    double mutation_rate; /* probability that an inherited gene mutates */
    double sigma;         /* a mutation multiplies a number by exp(sigma · N(0, 1)) */
    double keep_weights;  /* share of the children that have the weights of their first parent */
};
extern const struct option_row genome_option_rows[];
struct genome {
    unsigned genes;     /* bit 1 << gene: the candidate has this gene */
    const char *prompt; /* one of the options' prompts, borrowed */
    double value[N_GENES];
};

/* population */

struct evolve_options {
    char *search; /* name of a row of search_methods */
    int64_t generations, population, elites, rank;
    double max_flops;                     /* FLOP budget of the search; 0: no limit */
    struct strings crossovers, mutations; /* operators; adaptive pursuit selects among them */
    double mutation_rate;                 /* fraction of children that are mutants of one parent */
    double blend_min, blend_max;          /* range of the second parent's weight */
    bool preserve_norm; /* rescale the child of an operator on shares of ΔW to the weighted mean of
                           its parents' ‖ΔW‖, because mixing reduces the norm */
    double target_step_divergence; /* target behaviour divergence of mutations; 0: fixed step */
    /* drop operators whose children have on average a fitness that is lower than their parents' by
     * more than this; 0: drop none */
    double max_regression;
    char *selection;
    double truncation_ratio, selection_pressure; /* parameters of select_pool */
    int64_t tournament_size;
    /* radius of fitness sharing, as a behaviour distance; 0: no sharing */
    double fitness_sharing_radius;
    int64_t map_elites_bins; /* bins per axis of the MAP-Elites archive of parents; 0: no archive */
    bool roles;              /* co-evolution: each founder starts a role */
    bool per_layer;       /* search over coefficients: one coefficient for each founder and layer */
    char *merge_operator; /* search over coefficients: the operator that merges a candidate */
    int64_t finetune_steps; /* fine-tuning steps of each child before its evaluation (Lamarckian) */
    char *finetune_data;    /* conversations for fine-tuning and for the searches gradient and es */
    struct genome_options genome; /* section "genome" */
};
extern const struct option_row evolve_option_rows[];

struct fitness_options {
    int64_t items;       /* dev questions per generation, in equal parts per task */
    bool resample_items; /* draw new questions in each generation */
    char *metric;        /* score of an item: right (0 or 1), or probability of the right choice */
    char *distance; /* behaviour distance: js, disagreement, or embedding (of generated texts) */
    char *credit;   /* measure of cooperation: loo, or shapley in the vote */
    bool race;      /* evaluate by racing, with the options of section "race" */
    double performance, cooperation, novelty; /* weights of the terms of fitness */
};
extern const struct option_row fitness_option_rows[];

enum { MAX_POPULATION = 64, MAX_CANDIDATES = 2 * MAX_POPULATION, N_DESCRIPTORS = 2 };
struct candidate {
    char name[32]; /* unique in its run: "critic", "g1c0" */
    struct adapter *adapter;
    const struct weighted_adapter *mix; /* [n_mix] evaluated if `adapter` is NULL; borrowed */
    int n_mix;
    char parents[2][32]; /* "" for founders, and for the second parent of a mutant */
    /* operator that made it; NULL: a founder, or a child with its first parent's weights */
    const struct adapter_operator *operator;
    double blend, step; /* weight of the second parent; step of the operator; NAN: not used */
    int role;           /* 0 without roles */
    bool elite;         /* copied unchanged from the previous generation */
    struct genome genome;
    /* Filled by the fitness function. */
    struct stats_interval performance, cooperation, novelty;
    double descriptor[N_DESCRIPTORS]; /* behaviour descriptors, each in 0..1 */
    int n_items; /* number of items that it answered: all items, except in a race */
    /* Computed from the values of the fitness function. */
    struct stats_interval fitness;
    double shared_fitness; /* fitness after sharing, used by selection */
    double expected;       /* performance corrected for the winner's curse (fitness_shrink) */
};
/* Results of a generation that are not in the candidates' fields. n: number of candidates. */
struct evaluation {
    int n_items;
    double *scores;   /* [n][n_items]; NAN: item not evaluated; NULL: no scores */
    double *distance; /* [n][n] behaviour distance, 0..1; NULL after a race */
};
void evaluation_release(struct evaluation *a);
struct fitness_function {
    void *ctx;
    /* Evaluates all n candidates on the generation's items. The last `n_reevaluated` are
     * re-evaluated parents: they do not affect the cooperation or novelty of other candidates.
     * `out` is empty at the call; the caller releases it. */
    int (*evaluate)(void *ctx, int generation, struct candidate *c, int n, int n_reevaluated,
                    struct evaluation *out, struct error *err);
};
/* The operators of one kind, their credit and their current steps. */
struct operator_set {
    struct operator_selector selector;
    const struct adapter_operator *op[MAX_OPERATORS];
    double step[MAX_OPERATORS];
};
struct population {
    const struct evolve_options *o; /* only population_set_options changes o and f */
    const struct fitness_options *f;
    uint64_t seed;
    /* Children are offloaded to this folder (adapter_offload); NULL: they stay in memory. Borrowed;
     * the caller sets it after population_init */
    const char *offload_dir;
    /* To estimate the time of a run: only the first child of a generation is bred, the others are
     * new adapters of its shape. `unbred` is the time in seconds that they saved in the
     * last generation, if each needs as long as the first one. */
    bool rehearses;
    double unbred;
    int generation, n;
    int n_roles;
    struct candidate c[MAX_CANDIDATES]; /* [n] candidates, then the re-evaluated parents */
    int n_reevaluated; /* number of re-evaluated parents: parents of the children that are not
                          elites. They are evaluated again with the children, then released. So a
                          gain compares child and parent on the same items, which did not select the
                          parent if items are resampled */
    /* the last evaluation, in the order of the candidates */
    struct evaluation last_evaluation;
    struct operator_set crossovers, mutations;
    struct archive archive;
    struct candidate *archived; /* [n_archived] candidates that are or were in the archive; the
                                   index is the archive's id */
    int n_archived;
};
/* ERR_USAGE if the options are invalid, whatever the founders are. */
int population_check_options(const struct evolve_options *o, const struct fitness_options *f,
                             struct error *err);
/* ERR_USAGE if an option is set that none of the crossovers uses. Only for new runs: version 0.1
 * ignored these options, and its runs must resume. */
int population_check_unused(const struct evolve_options *o, struct error *err);
/* Whether a name is that of a child, such as "g1c0"; founders cannot have it. */
bool candidate_name_is_child(const char *name);
/* Retains the founders and borrows the options. The founders' names must differ. */
int population_init(struct population *p, const struct evolve_options *o,
                    const struct fitness_options *f, uint64_t seed, struct adapter *const *founders,
                    const char *const *names, int n, struct error *err);
void population_release(struct population *p);
/* Sets options and seed from the next generation on. If the operators or max_regression change, all
 * operators start without credit. ERR_USAGE: invalid options, or another map_elites_bins. */
int population_set_options(struct population *p, const struct evolve_options *o,
                           const struct fitness_options *f, uint64_t seed, struct error *err);
/* Evaluates all candidates, computes fitness with its interval, credits operators, adapts steps,
 * fills the archive, releases the re-evaluated parents, and sorts by fitness (ties: by name). */
int population_evaluate(struct population *p, const struct fitness_function *fitness,
                        struct error *err);
/* Makes the next generation: first the elites, unchanged, then the children. A child comes from one
 * operator: a crossover of two distinct parents, or a mutation of one parent. All random numbers
 * depend on (seed, generation, child). */
int population_breed(struct population *p, struct error *err);
/* The current generation: {generation, candidates: [...], diversity: {...}, operators: [...],
 * archive}. */
json_t *population_json(const struct population *p);
json_t *candidate_json(const struct candidate *c);
/* Sets fitness and the values derived from it; scores: [n_items] of the candidate's performance, or
 * NULL. */
void candidate_fitness(struct candidate *c, const struct fitness_options *f, const double *scores,
                       int n_items);

/* genome.c */

bool genome_evolves(const struct genome_options *o, enum gene g);
int genome_count(const struct genome_options *o); /* number of genes that are evolved */
/* Replaces the prompts "role:NAME" and "none". ERR_USAGE: no role has the name. */
int genome_resolve(struct genome_options *o, struct error *err);
/* Bytes of the longest prompt: at least as many as its tokens. */
size_t genome_prompt_bytes(const struct genome_options *o);
/* The genes of a child; b NULL: it has one parent; a NULL: every gene is drawn from its range. */
struct genome genome_breed(const struct genome_options *o, const struct genome *a,
                           const struct genome *b, struct rng *rng);
bool genome_equal(const struct genome *a, const struct genome *b);
/* Whether prompt and temperature are equal: the same weights then give the same answers. */
bool genome_asks_equally(const struct genome *a, const struct genome *b);
/* The value of a number; `fallback` if the candidate does not have the gene. */
double genome_value(const struct genome *x, enum gene g, double fallback);
/* The candidate as an agent, with its prompt and its temperature. */
struct agent candidate_agent(const struct candidate *c);
/* {prompt, temperature, lr, max_steps, lora_dropout}: those that it has; NULL: no genes. */
json_t *genome_json(const struct genome *x);
/* The same as one line of JSON, for an adapter's lineage; malloc'ed. NULL: no genes. */
char *genes_text(const json_t *genes);
/* Appends the genes of a record for people, on one line: prompt 'Be brief.', lr 0.002. */
void genes_describe(const json_t *genes, struct buf *b);
extern const char *const gene_names[N_GENES]; /* keys of genome_json */

/* diversity.c */

/* Statistics of n adapters: minimum and mean relative distance, mean cosine of ΔW, mean ‖ΔW‖, and
 * minimum and mean behaviour distance. NaN: not known. distance: [n][n], or NULL. */
struct diversity {
    double weights_min, weights_mean, cosine_mean, norm_mean, behaviour_min, behaviour_mean;
    int duplicate_of[2]; /* indices of the pair with the smallest distance of weights */
};
struct diversity diversity_compute(struct adapter *const *a, int n, const double *distance);
json_t *diversity_json(const struct diversity *d);
/* ERR_MISMATCH, with the numbers, if two founders are copies except for noise: a relative distance
 * below 0.05. */
int diversity_check(const struct diversity *d, const char *const *names, struct error *err);

/* runs */

struct evolve_recipe {
    char *model;
    int64_t seed;
    struct strings personas;    /* "name=conversations.jsonl", several files joined by '+'; or
                                   "name=DIR", an existing adapter */
    struct strings tasks;       /* task families or JSONL files */
    struct strings retain;      /* untrained tasks whose accuracy must not drop */
    int64_t rounds, max_tokens; /* rounds of the founders' debate (0: none); maximum tokens of a
                                   chain of thought */
    bool chain_of_thought;
    char *vote;
    int64_t test_items, retain_items; /* held-out questions in all; and per task of `retain` */
    bool curve; /* the final table has all founders and about a dozen generations; otherwise the
                   best founder and the best candidate of the last generation */
    char *kv_cache_dtype; /* auto; keys and values of the engine and in training */
    char *save;           /* adapters kept: all candidates, or best of each generation */
    double temperature;   /* temperature of self-consistency samples */
    bool zero_adapters;   /* control: replace every founder by a zero adapter; a correct run then
                             finds no effect */
    struct train_options train;     /* section "train" */
    struct evolve_options evolve;   /* section "evolve" */
    struct fitness_options fitness; /* section "fitness" */
    struct search_options search;   /* section "search": search over coefficients */
    struct race_options race;       /* section "race" */
    /* section "finetune": for finetune_steps and for the searches gradient and es */
    struct train_options finetune;
    struct es_options es; /* section "es"; section "genome" is a part of `evolve` */
    char *text;           /* contents of the recipe file */
};
extern const struct option_row evolve_recipe_rows[]; /* rows of the top level */
int evolve_recipe_load(struct evolve_recipe *o, const char *path, struct error *err);
/* Sets the type of keys and values of the whole run, by name. */
void evolve_recipe_set_kv(struct evolve_recipe *o, const char *name);
void evolve_recipe_release(struct evolve_recipe *o);

/* A method that searches for a better adapter, starting from the founders. */
struct evolve_run;
struct search_method {
    const char *name, *about;
    /* Evaluates and records each generation. */
    int (*run)(struct evolve_run *r, struct error *err);
};
extern const struct search_method search_methods[]; /* ended by a row without a name */

struct evolve_env {
    struct pool *pool;
    enum numeric_class cls;
    int32_t max_seqs; /* sequences of the engine at once; 0: 192. It changes no results. */
    const char *root; /* folder of runs: "runs" */
    /* Resolves the name of a model or data file; the result is malloc'ed. */
    char *(*find)(const char *path);
    /* May be NULL. Another thread or a signal handler sets it: then the run stops at the next step
     * with ERR_STATE. */
    const volatile bool *pause;
    /* May be NULL. Called when a run has opened its engine: a cluster may replace the runner. */
    int (*engine_opened)(void *ctx, struct engine *e, struct model *m, struct error *err);
    void *engine_ctx;
};
/* OK if a run may have this id, which names a folder: letters, digits, '-' and '_'; else ERR_USAGE.
 * NULL is OK. The functions below check ids themselves. */
int evolve_id_check(const char *id, struct error *err);
/* Starts a run. id NULL: a new id is made. Returns the result object: {run, adapters: {name: hash},
 * generations, table, comparisons, debate, retention, spent, manifest}; debate and retention only
 * if the recipe asks for them. ERR_STATE if the run exists or was paused. */
json_t *evolve_run_execute(const struct evolve_env *env, const struct evolve_recipe *o,
                           const char *id, struct error *err);
/* The inputs, questions and outputs of a run of this recipe; checks that the recipe's files exist
 * and counts the questions. NULL: `err` is set. */
json_t *evolve_run_plan(const struct evolve_env *env, const struct evolve_recipe *o,
                        struct error *err);
/* Continues runs/ID from its stored recipe. Returns the result object, as evolve_run_execute does.
 */
json_t *evolve_run_resume(const struct evolve_env *env, const char *id, struct error *err);
/* The plan of that: as evolve_run_plan, with the number of generations that are recorded. */
json_t *evolve_run_resume_plan(const struct evolve_env *env, const char *id, struct error *err);
/* A new run that equals the run `parent` up to `generation` and then follows another recipe and
 * seed. */
struct evolve_fork {
    const char *parent, *recipe, *id; /* recipe NULL: the parent's; id NULL: a new id is made */
    int generation;
    int64_t seed; /* -1: the parent's */
};
/* The results of the shared generations are loaded, not computed again. ERR_MISMATCH if the recipes
 * differ in base model or personas. */
json_t *evolve_run_fork(const struct evolve_env *env, const struct evolve_fork *fork,
                        struct error *err);
/* The plan of that, as evolve_run_plan. */
json_t *evolve_run_fork_plan(const struct evolve_env *env, const struct evolve_fork *fork,
                             struct error *err);
/* Computes a generation of a finished or interrupted run again, without the answers in the store,
 * and compares it with the log: {generation, equal, candidates: [{name, hash, fitness, equal}]}. */
json_t *evolve_run_replay(const struct evolve_env *env, const char *id, int generation,
                          struct error *err);
/* Writes README.md (a model card) in an adapter's folder, from the candidate's JSON. */
int model_card_write(const char *dir, const char *model, const char *run, int generation,
                     const json_t *candidate, struct error *err);
/* Prints the result object as tables. */
void evolve_run_print(const json_t *result, FILE *f);
/* Writes report.html from the result object: self-contained, plots as SVG. */
int evolve_report_write(const json_t *result, const char *path, struct error *err);
/* Prints the family tree of a run's generations as text; only `name` and its ancestors if `name` is
 * not NULL. Then prints each founder's share of the ancestry of `name` or, if it is NULL, of the
 * fittest candidate. */
int lineage_print(const json_t *generations, const char *name, FILE *f, struct error *err);

/*
 * operators: functions that make a child from its parents, as rows of a table: crossover, PEFT's
 * combination types, mutation.
 *
 * The caller finds a row by name, calls operator_apply, and may adapt the step for the next call
 * within the row's bounds. An operator is pure: the same operands give the same adapter, bit for
 * bit. Any thread may apply any operator.
 *
 * All rows take plain LoRA only: DoRA and embedding tables are refused. Parents may differ in
 * ranks, target modules and scalings, except that factor_blend and PEFT's rows on A and B need
 * equal ranks. Rows that work on ΔW = scale · B A use the true scale (alpha / r, or alpha / √r) and
 * give children of scale 1.
 */

#define OPERATOR_PARENTS_MAX 64

/* Arguments of an operator. */
struct operands {
    /* [n]; comments on a crossover of two parents call them a and b */
    struct adapter *const *parents;
    const float *weights; /* [n], or NULL: 1 / n each */
    int n_parents;
    /* Rank of every module of a child made from ΔW, limited by the module's dimensions; 0: the
     * largest rank of the parents in that module. Mutations except `rank` ignore it. PEFT's rows on
     * A and B keep the parents' rank and refuse another one; `cat` adds the parents' ranks. */
    int32_t rank;
    float step; /* meaning: see the row; NAN: the row's default */
    uint64_t seed;
    const char *const *names; /* [n] the parents' names or paths for the lineage, or NULL */
};

enum operator_kind { OPERATOR_CROSSOVER, OPERATOR_PEFT, OPERATOR_MUTATION };
/* Meaning of the weights of a row. */
enum operator_weighting {
    WEIGHTING_DELTA,   /* shares of ΔW */
    WEIGHTING_FACTORS, /* shares of A and of B, or PEFT's weights: breeding requests no rank */
    WEIGHTING_FITNESS, /* the parents' fitness */
    WEIGHTING_NONE     /* no weights; the caller passes the fitter parent first */
};
/* Operands that a row uses besides its parents; it also uses the step if it has a unit. */
enum operand_option { OPERAND_WEIGHTS = 1, OPERAND_RANK = 2, OPERAND_SEED = 4 };
struct adapter_operator {
    const char *name, *about;
    enum operator_kind kind;
    enum operator_weighting weighting;
    int min_parents, max_parents; /* number of parents */
    const char *unit;             /* meaning of the step; NULL: the row has no step */
    float step, step_min, step_max;
    /* The caller has checked the operands. `lineage` holds the values that all operators record;
     * `make` adds the values of this operator. */
    struct adapter *(*make)(const struct operands *x, json_t *lineage, struct error *err);
    unsigned options; /* bits of enum operand_option */
};
/* In listing order; NULL after the last. */
const struct adapter_operator *operator_at(int i);
/* ERR_USAGE lists the known names. */
const struct adapter_operator *operator_find(const char *name, struct error *err);
/* ERR_USAGE, with the list of the operator's options, if the operator does not have the option
 * `name`: "weights", "rank", "step", "seed", or any other text. */
int operator_check_option(const struct adapter_operator *op, const char *name, struct error *err);
/* Appends the names of the operator's options: "weights, rank, step", or "none". */
void operator_option_list(const struct adapter_operator *op, struct buf *b);
/* The name in lineages and records, which may be an earlier name of the operator. */
const char *operator_stored_name(const struct adapter_operator *op);
/* The current name of the operator that a record stores under this key; "" if it stores none. */
const char *operator_label(const json_t *record, const char *key);
/*
 * Makes the child. Its lineage has operator, parents (hashes), seed, the parents' base (see
 * adapter_lineage_set_base), and, where they apply, parent_names, weights, step and rank. If ΔW was
 * factorised again, it has "error": the relative norm that the truncation to the rank lost.
 * ERR_USAGE: operands that the row does not accept; ERR_MISMATCH: incompatible parents; ERR_STATE:
 * an empty child; ERR_NUMERIC: overflow, or a mean that does not converge.
 */
struct adapter *operator_apply(const struct adapter_operator *op, const struct operands *x,
                               struct error *err);
/* ‖ΔW_child - ΔW_parent‖ / ‖ΔW_parent‖; rounding hides changes below about 1e-8. For a zero parent:
 * 0 if the child is zero too, else infinity. */
double operator_relative_change(const struct adapter *child, const struct adapter *parent);

/* The parts of the table, each in its file; each ends with a row without a name. */
extern const struct adapter_operator crossover_operators[], merge_operators[], peft_operators[],
    mutation_operators[];

/* Helpers for the functions `make` of the rows. */
/* Number of modules of the model, with or without a LoRA. */
int32_t operand_modules(const struct operands *x);
double operand_weight(const struct operands *x, int p);
/* The requested rank of module i, or else the largest rank of its parents, limited by `max_rank`
 * and by the module's dimensions. */
int32_t operand_rank(const struct operands *x, int32_t i, int32_t max_rank);
/* Builds the child from `d`, and records "error" in `lineage` (borrowed). ERR_STATE if the child is
 * empty. */
struct adapter *operator_finish(struct adapter_builder *d, json_t *lineage, struct error *err);
/* Records the names or paths of n parents in a lineage, as a JSON list. */
void operator_lineage_set_names(json_t *lineage, const char *const *names, int n);
/* The lineage of a child to which a mutation was applied before it was saved: `before`, which has
 * its parents, with "mutation" and the mutation's values ("mutation_seed" …). A new reference. */
json_t *operator_mutated_lineage(const json_t *before, const json_t *mutation);
/* Takes ownership of `a`; returns an adapter with the same data and this lineage, which is
 * borrowed. NULL if `a` is NULL. */
struct adapter *operator_set_lineage(struct adapter *a, json_t *lineage);
/* Takes ownership of `a`; returns an adapter that is scaled to ‖ΔW‖ = norm and records the factor
 * in its lineage as "scaled". Returns `a` unchanged if its norm or `norm` is 0. */
struct adapter *operator_rescale(struct adapter *a, double norm);
/* coef [L·N_PROJ][n]: child = Σ coef · ΔW in each module, truncated to its rank. If only one parent
 * contributes to a module and its rank is allowed, the child copies that parent's factors, scaled.
 */
struct adapter *operator_weighted_sum(const struct operands *x, const double *coef, json_t *lineage,
                                      struct error *err);

/*
 * lineage: the family tree of a run, from the records of its generations (an array of the lines of
 * evolution.jsonl, also result.json's "generations", or of the lineage.jsonl of a world's run).
 *
 * A candidate is one node, from the first generation that has its name to the last one: an elite
 * stays the same node. Parents come before children. A node without parents is a founder. Records
 * are borrowed and must outlive the lineage. Threads may use different lineages at the same time.
 */

struct lineage_node {
    const char *name;
    const json_t *birth_record; /* record of its first generation */
    int generation, last_generation;
    int parent[2]; /* node indices; -1: none */
    /* share of the ancestry through each parent: from the blend, or a half each */
    double parent_share[2];
};
struct lineage {
    struct lineage_node *v;
    int n, generations;
    int best;      /* node of the fittest candidate of the last generation; -1 without one */
    json_t *index; /* node of each name */
};
/* Adds the next generation. If its number exists already, it replaces that generation and all later
 * ones, as when a run has resumed at an earlier generation. After an error the lineage has nothing
 * of the new record. */
int lineage_add(struct lineage *l, const json_t *generation, struct error *err);
int lineage_from_json(struct lineage *l, const json_t *generations, struct error *err);
void lineage_release(struct lineage *l);
int lineage_find(const struct lineage *l, const char *name); /* -1 if the name is unknown */
/* in[n]: the node and all of its ancestors. */
void lineage_ancestors(const struct lineage *l, int node, bool *in);
/* Propagates flow[n] from children to parents by the parents' shares. If flow is 1 at one node and
 * 0 elsewhere, each founder ends with its share of that node's ancestry, and each other ancestor
 * with the share that passes through it. */
void lineage_propagate(const struct lineage *l, double *flow);

/* Reads evolution.jsonl or lineage.jsonl as an array of its records, which lineage_add must accept;
 * errors name the line. An unfinished last line is left out. ERR_STATE if there is no generation
 * yet. */
json_t *lineage_load(const char *path, struct error *err);
/* Deletes candidates of the finished run in the folder `dir` by the rule, in the order of fitness,
 * except founders, the last generation, and the fittest candidate of each generation. *out: [{name,
 * generation, score, bytes}]. The records of the run remain. ERR_STATE: the run is not finished, or
 * is in use. */
int evolve_run_prune(const char *dir, const struct prune_rule *rule, json_t **out,
                     struct error *err);
/* The node `name` with its ancestors, or all nodes (NULL), as JSON: {of, generations, nodes, edges,
 * founders}. lineage_dot: the same as a Graphviz graph. */
json_t *lineage_json(const json_t *generations, const char *name, struct error *err);
int lineage_dot(const json_t *generations, const char *name, struct buf *out, struct error *err);

/* Helpers for printing records. */
double json_number_or_nan(const json_t *v, const char *key); /* NAN if missing */
struct stats_interval json_interval(const json_t *v, const char *key);
void buf_add_one_line(struct buf *b, const char *s); /* buf_add_sanitized, on one line */

#endif
