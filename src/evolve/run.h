/*
 * run: what the files of a run share. run.c opens, continues and ends it; fitness_eval.c measures
 * candidates, search_methods.c looks for better ones, heldout.c measures what came of it on
 * questions that fitness never saw.
 *
 * A run is a function of its recipe, seed, base, data and numeric class. It keeps no cursor: calls
 * are in the store, what was trained is in the run's folder with its ledger row, so continuing a
 * run means computing it again from the start, where all that was done before is found instead of
 * computed. That is why a killed run ends with the same hashes.
 */
#ifndef SHOAL_EVOLVE_RUN_H
#define SHOAL_EVOLVE_RUN_H

#include "eval/eval.h"
#include "evolve/evolve.h"

enum { MAX_FOUNDERS = 16, MAX_SEGMENTS = 16 };

/* Generations up to `until` follow these options. */
struct evolve_segment {
    int until;
    struct evolve_recipe o;
};

/* Of one adapter on the held-out questions. */
struct heldout_result {
    char name[80];
    uint8_t *right; /* [test items] */
    int64_t prefilled, generated;
};

struct evolve_cost {
    int64_t forward_tokens, trained_tokens;
    double flops;
};

struct evolve_run {
    const struct evolve_env *env;
    const struct evolve_recipe *o; /* of the last segment: what is measured at the end */
    struct evolve_segment *forks;  /* [n_forks] what a fork's earlier generations follow */
    int n_forks;
    const char *id;
    char *dir, *from; /* of a fork: the run that it left; else NULL */
    struct store *store;
    struct model *model;
    struct engine *engine;
    struct engine_client speaker;
    struct llm_client asker;
    struct source *sources; /* questions of the tasks: fitness_eval.c */
    struct task_item *test;
    int n_test, n_founders;
    struct adapter *founders[MAX_FOUNDERS];
    char names[MAX_FOUNDERS][24];
    char *data[MAX_FOUNDERS]; /* conversation files, or adapters' directories, as found */
    bool ready[MAX_FOUNDERS]; /* data is an adapter */
    struct candidate *best;   /* [n_best] the fittest of each generation, retained */
    int n_best;
    struct evolve_cost spent;
    double learn_tokens;         /* of a sample of evolve.learn; 0: not counted yet */
    struct heldout_result *rows; /* [n_rows] */
    int n_rows, max_rows;
    json_t *result, *adapters, *generations;
    FILE *log; /* evolution.jsonl */
    int only;  /* replay: the generation that is computed anew; -1: none */
};

/* The options that generation g follows. */
const struct evolve_recipe *evolve_run_recipe_at(const struct evolve_run *r, int g);
/* ERR_STATE when somebody asked for a pause. */
int evolve_run_check_pause(const struct evolve_run *r, struct error *err);
/* Writes an adapter's folder with its card, ledger row and the result's hash. */
int evolve_run_save_adapter(struct evolve_run *r, int generation, const char *name,
                            const struct adapter *a, const json_t *scores, struct error *err);
/* What an earlier, killed process left: its folder must hold what the ledger says, and the
 * lineage's `key` must be `value` (key NULL: any). NULL: there is none. */
struct adapter *evolve_run_load_adapter(struct evolve_run *r, int generation, const char *name,
                                        const char *key, const char *value);
/* A generation that was measured: ledger, folders, log. Takes `v` over; c [n] is fittest first. */
int evolve_run_record_generation(struct evolve_run *r, json_t *v, const struct candidate *c, int n,
                                 struct error *err);

/* fitness_eval.c */

/* The landscape of a run: ctx is the run. */
int evolve_run_evaluate(void *ctx, int generation, struct candidate *c, int n, int witnesses,
                        struct evaluation *out, struct error *err);
/* Opens the tasks' files, once each. */
int evolve_run_open_tasks(struct evolve_run *r, const struct strings *tasks, struct error *err);
void evolve_run_close_tasks(struct evolve_run *r);
/* `n`, or as many as the tasks' files have, in equal parts. */
int evolve_run_count_items(const struct evolve_run *r, const struct strings *tasks,
                           enum data_split split, int64_t n);
/* n questions from `begin` on, task by task in turn; for task_items_release. */
struct task_item *evolve_run_task_items(const struct evolve_run *r, const struct strings *tasks,
                                        enum data_split split, uint64_t seed, uint32_t begin,
                                        int n);
/* What fitness asks in a generation: [*n]. */
struct task_item *evolve_run_generation_items(const struct evolve_run *r, int generation, int *n);
/* FLOPs of a token forward through the base and an adapter (NULL: none); training's are twice that.
 */
double evolve_run_token_flops(const struct evolve_run *r, const struct adapter *a);
/* `flops` are those of a token forward. */
void evolve_cost_add_forward(struct evolve_run *r, int64_t tokens, double flops);
void evolve_cost_add_training(struct evolve_run *r, double tokens, double flops);
json_t *evolve_cost_json(const struct evolve_run *r);

/* heldout.c */

/* Everything on the held-out questions, as `result` holds it. */
int evolve_run_evaluate_heldout(struct evolve_run *r, struct error *err);

#endif
