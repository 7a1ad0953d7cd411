/*
 * run: the state of a run, which the following files share. run.c opens, continues and ends it;
 * fitness_eval.c evaluates candidates, search_methods.c searches for better ones, heldout.c
 * evaluates the result on questions that fitness never used.
 *
 * A run is a function of its recipe, seed, base model, data and numeric class. A run stores no
 * position. The results of model calls are in the store, and trained adapters are in the run's
 * folder, with a row in the store's ledger. A resumed run computes everything from the start and
 * loads each result that exists. So a run that was killed and resumed ends with the same hashes.
 */
#ifndef SHOAL_EVOLVE_RUN_H
#define SHOAL_EVOLVE_RUN_H

#include "eval/eval.h"
#include "evolve/evolve.h"

enum { MAX_FOUNDERS = 16, MAX_SEGMENTS = 16 };

/* The options of the generations up to `until`, inclusive. */
struct evolve_segment {
    int until;
    struct evolve_recipe o;
};

/* The results of one adapter on the held-out questions. */
struct heldout_result {
    char name[80];
    uint8_t *right;               /* [test items] 0 or 1 */
    int64_t prefilled, generated; /* tokens */
};

/* Work that a run has done. */
struct evolve_cost {
    int64_t forward_tokens, trained_tokens;
    double flops;
};

struct evolve_run {
    const struct evolve_env *env;
    /* options of the generations after `forks`, and of the held-out evaluation */
    const struct evolve_recipe *o;
    /* [n_forks] options of the generations that a fork shares with its parent */
    struct evolve_segment *forks;
    int n_forks;
    const char *id;
    char *dir, *parent_id; /* parent_id: the run that was forked, or NULL */
    struct store *store;
    struct model *model;
    struct engine *engine;
    size_t packs_bytes; /* limit: bytes of the adapters' packs in an evaluation */
    struct engine_client engine_client;
    struct llm_client llm_client;
    struct task_source *sources; /* questions of the tasks: fitness_eval.c */
    struct task_item *test;
    int n_test, n_founders;
    struct adapter *founders[MAX_FOUNDERS];
    char names[MAX_FOUNDERS][24];
    char *data[MAX_FOUNDERS];      /* paths of conversation files or adapter directories */
    bool is_adapter[MAX_FOUNDERS]; /* data is an adapter directory; no training is needed */
    /* [n_best] fittest candidate of each recorded generation; adapters retained */
    struct candidate *best;
    int n_best;
    struct evolve_cost spent, tests; /* of the search; of the held-out tests */
    double tokens_per_sample;        /* mean of evolve.finetune_data; 0: not counted yet */
    struct heldout_result *rows;     /* [n_rows] */
    int n_rows, max_rows;
    json_t *result, *adapters, *generations;
    FILE *log;             /* evolution.jsonl */
    int replay_generation; /* the generation that a replay computes again; -1: not a replay */
    struct evolve_rehearsal *rehearsal; /* see estimate.c; NULL: this is a run */
};

/* Opens model, engine, founders' data and tasks. The caller calls evolve_run_close even after an
 * error. */
int evolve_run_open_model(struct evolve_run *r, struct error *err);
void evolve_run_close(struct evolve_run *r);

/* The options of generation g. */
const struct evolve_recipe *evolve_run_recipe_at(const struct evolve_run *r, int g);
/* ERR_STATE if the pause flag is set. */
int evolve_run_check_pause(const struct evolve_run *r, struct error *err);
/* Writes an adapter's folder with its model card (if `scores` is not NULL), adds its ledger row,
 * and adds its hash to the result. Does nothing in a replay. */
int evolve_run_save_adapter(struct evolve_run *r, int generation, const char *name,
                            const struct adapter *a, const json_t *scores, struct error *err);
/* Sets the genes in an adapter's lineage, as text; NULL: no genes. */
#define LINEAGE_GENES "genes"
void evolve_lineage_set_genes(json_t *lineage, const json_t *genes);
/* Loads an adapter that an earlier process of this run saved, or the parent run in a shared
 * generation: in later ones the options of its training may differ. Its files must
 * have the ledger's hash, and its lineage the value `value` at `key` (key NULL: any lineage). NULL:
 * not found, or a replay computes this generation again. */
struct adapter *evolve_run_load_adapter(struct evolve_run *r, int generation, const char *name,
                                        const char *key, const char *value);
/* Records an evaluated generation in the ledger, the adapters' folders and the log. Takes ownership
 * of `v`; c [n] is sorted, fittest first. A replay writes nothing, and gets ERR_STATE at its
 * generation, which ends the search. */
int evolve_run_record_generation(struct evolve_run *r, json_t *v, const struct candidate *c, int n,
                                 struct error *err);

/* memory.c */

/* The type of keys and values of a run; the recipe's value is valid. */
enum dtype evolve_run_kv_dtype(const struct evolve_env *env, const struct evolve_recipe *o);
/* ERR_MEMORY if the limit is too small for a run of the recipe; before its model is read and its
 * folder made. */
int evolve_run_check_memory(const struct evolve_env *env, const struct evolve_recipe *o,
                            struct error *err);
/* Bytes of the process: an upper bound for a run, and the smallest limit in which one works. */
struct evolve_memory {
    size_t total, least;
};
int evolve_run_plan_memory(const struct evolve_env *env, const struct evolve_recipe *o,
                           struct evolve_memory *out, struct error *err);
/* Sets the options of the run's engine, and r->packs_bytes, within the limit. The model is loaded.
 */
int evolve_run_fit_memory(struct evolve_run *r, struct engine_options *out, struct error *err);
/* How many of n children (at least 1) are fine-tuned together, so that their training fits into the
 * limit. Below 0: an error. */
int evolve_run_finetuned_together(const struct evolve_run *r, const struct evolve_recipe *o, int n,
                                  struct error *err);
/* engine_run on the engine of the run `ctx`, in groups of requests whose adapters' packs fit into
 * r->packs_bytes; the packs are freed after their group. The `run` of engine_client. */
int evolve_run_requests(void *ctx, struct engine_request *reqs, int n, struct error *err);
/* Leaves requests of one such group in the counter's sample. */
void evolve_run_fit_sample(const struct evolve_run *r, struct work_counter *c);

/* fitness_eval.c */

/* The fitness function of a run; ctx is the run. */
int evolve_run_evaluate(void *ctx, int generation, struct candidate *c, int n, int n_reevaluated,
                        struct evaluation *out, struct error *err);
/* Opens the tasks' files, each once. */
int evolve_run_open_tasks(struct evolve_run *r, const struct strings *tasks, struct error *err);
void evolve_run_close_tasks(struct evolve_run *r);
/* `n`, or fewer if the tasks' files have fewer questions, in equal parts per task. */
int evolve_run_count_items(const struct evolve_run *r, const struct strings *tasks,
                           enum data_split split, int64_t n);
/* n questions, alternating over the tasks, from index `begin` of each task on; release with
 * task_items_release. */
struct task_item *evolve_run_task_items(const struct evolve_run *r, const struct strings *tasks,
                                        enum data_split split, uint64_t seed, uint32_t begin,
                                        int n);
/* The *n fitness questions of a generation; release with task_items_release. */
struct task_item *evolve_run_generation_items(const struct evolve_run *r, int generation, int *n);
/* FLOPs of one token's forward pass through the base model and an adapter (NULL: none). A training
 * token costs twice as much, for a forward and a backward pass without gradients of the base
 * weights. */
double evolve_run_token_flops(const struct evolve_run *r, const struct adapter *a);
/* Adds the cost of these tokens. flops: FLOPs of a forward pass per token. */
void evolve_cost_add_forward(struct evolve_run *r, int64_t tokens, double flops);
void evolve_cost_add_training(struct evolve_run *r, double tokens, double flops);
json_t *evolve_cost_json(const struct evolve_cost *c);

/* estimate.c */

/* Adds "work", "seconds" and "max_seconds" to the plan of a run that need not compute its first
 * `recorded` generations. It loads the model; it writes nothing. */
int evolve_run_estimate(const struct evolve_env *env, const struct evolve_recipe *o, int recorded,
                        json_t *plan, struct error *err);
/* Called in a rehearsal: at the end of a generation of n candidates; after breeding that needs
 * `unbred` seconds more in the run; and in place of training n adapters together, with the options
 * of sft_run_with_callbacks. */
void evolve_rehearsal_record(struct evolve_run *r, int n);
void evolve_rehearsal_breed(struct evolve_run *r, double unbred);
int evolve_rehearsal_train(struct evolve_run *r, struct train_job *jobs, int n,
                           const struct train_options *o, const struct es_options *es,
                           struct error *err);

/* heldout.c */

/* Evaluates on the held-out questions and stores everything in `result`. */
int evolve_run_evaluate_heldout(struct evolve_run *r, struct error *err);

#endif
