/*
 * train_loop: functions shared by runs of different methods: the order of their data, and the loop
 * from start adapters over updates and checkpoints to results.
 *
 * A train_loop is independent of the loss: the method's struct train_loop_ops runs one step, which
 * is one or more updates of the trainer. Invariant: a step is a function of options, data, the
 * trainer's state and the method's `state`, so a resumed run has the bits of an uninterrupted one.
 */
#ifndef SHOAL_TRAIN_TRAIN_LOOP_H
#define SHOAL_TRAIN_TRAIN_LOOP_H

#include "train/train.h"

/* The order of n samples: the p-th sample of the run is entry p mod n of the shuffle of epoch p /
 * n. */
struct epoch_shuffle {
    uint32_t *v; /* [n] the permutation of `epoch` */
    int n;
    int64_t epoch;
};
int epoch_shuffle_init(struct epoch_shuffle *o, int n, struct error *err);
uint32_t epoch_shuffle_at(struct epoch_shuffle *o, int64_t seed, int64_t p);
void epoch_shuffle_release(struct epoch_shuffle *o);

struct train_loop {
    const struct model *m;
    const struct train_options *o;
    struct pool *pool;
    struct train_job *jobs;
    int n;
    const char *method;     /* the method's name in the lineage of results */
    const char *unit;       /* name of a step in messages: "step", or "update" for sft and es */
    const char *checkpoint; /* NULL: no checkpoints */
    const struct train_callbacks *callbacks; /* may be NULL */
    int64_t steps;                           /* number of steps of the run */
    int64_t per_step;                        /* number of updates of a step */
    json_t *identity;  /* everything that determines the run: a checkpoint with another identity is
                          refused. The method sets its part; train_loop_begin adds the part that all
                          methods have */
    const char **data; /* [n] hashes of the data files */

    struct adapter **initial_adapters; /* [n] adapters at the start of training, ready to run */
    struct trainer *trainer;
    enum dtype kv; /* type of keys and values, of the trainer and of the run's engine */
    enum lr_schedule schedule;
    int64_t saved; /* the step that `checkpoint` holds; -1: none */
    /* times of clock_now: when the run was begun or resumed, and when the step began */
    double run_started, step_started, run_joules; /* run_joules: energy_now at the start */
    /* statistics of the last update, with the tokens and targets of the whole step */
    struct update_stats stats;
    double lr;                            /* learning rate of the last update */
    struct training_data **training_data; /* [n] hashes of each job's data; NULL: generated */
    /* Maximum number of tokens of a pass, unless a sample is longer: PACK_MAX_TOKENS, or less by
     * the plan of the memory. It affects speed only, not the bits of a result. */
    int64_t pass_tokens;
    struct train_memory memory;
    struct progress bar; /* without a title, none is drawn */
    char detail[64];     /* of the bar: the loss or reward of the last step */
};
struct train_loop_ops {
    /* Runs step `step`, counted from 0: calls train_loop_optimizer_step for each update, and adds
     * the method's metrics for the log to `line`. */
    int (*run)(void *ctx, int64_t step, json_t *line, struct error *err);
    /* Save and restore the method's part of a checkpoint; NULL if the method has none. A run
     * without a checkpoint calls restore with NULL. */
    json_t *(*state)(void *ctx);
    void (*restore)(void *ctx, const json_t *state);
    void *ctx;
};
/* Arguments are borrowed; train_loop_release frees the loop's own memory. */
struct train_loop train_loop_make(const struct model *m, struct train_job *jobs, int n,
                                  const struct train_options *o, enum train_method method,
                                  struct pool *pool);
/* Whether a job's data are questions of families. These make similar prompts for training and test
 * by design, from different splits. */
bool train_data_is_generated(const char *path);
/* Maximum number of tokens of a sample. */
int32_t train_loop_max_length(const struct train_loop *c);
/* Number of steps: the option max_steps or, if that is 0, enough for the option epochs, with `n`
 * samples per epoch and `per_step` samples per step. */
int64_t train_loop_count_steps(const struct train_loop *c, int64_t n, int64_t per_step);
/* Sets c->kv, and makes the trainer and the initial adapters: those of the jobs, or new ones. */
int train_loop_begin(struct train_loop *c, struct error *err);
/* Logs the findings of lint. Refuses a run whose held-out samples are in its training data: no
 * comparison on them could publish the result. */
int train_loop_check_data(const struct train_loop *c, struct error *err);
/* Resumes from the checkpoint if it exists, runs the remaining steps, and sets the jobs' results.
 */
int train_loop_run(struct train_loop *c, const struct train_loop_ops *s, struct error *err);
/* memory.c: needs of a method, besides its trainer. */
struct train_memory_needs {
    int64_t longest;  /* tokens of the longest sample */
    int64_t together; /* tokens that must be in one pass */
    /* The engine that is in memory with the trainer, or NULL; its options are made to fit. */
    struct engine_options *engine;
    size_t other; /* bytes that have no smaller form */
};
/* Bytes of n completions of at most `longest` tokens with their prompts, for `other`. */
size_t train_completions_bytes(int64_t n, int64_t longest);
/* Bounds the passes of c->trainer and the engine by the options, and by what the memory limit
 * leaves; sets c->pass_tokens and c->memory. ERR_MEMORY: the limit is too small. */
int train_loop_plan_memory(struct train_loop *c, const struct train_memory_needs *needs,
                           struct error *err);
/* Runs the optimizer with the learning rate of update `u`, and sets the losses of the jobs. */
int train_loop_optimizer_step(struct train_loop *c, int64_t u, struct error *err);
/* Draws the bar within a step. A log sink gets one report per step, and none of this. */
void train_loop_show(struct train_loop *c, int64_t done, const char *detail);
/* Draws a bar with this title until progress_finish, for the work of a plan before its run; its
 * unit is a token. */
void train_loop_show_tokens(struct train_loop *c, const char *title);
void train_loop_release(struct train_loop *c);

/* dpo.c and policy_gradient.c. `c` holds the arguments of rl_run. */
/* The part of the identity that dpo and the methods with rewards have. */
json_t *rl_identity(const struct train_loop *c);
int dpo_run(const struct train_loop *c, const struct rl_options *o, struct error *err);
int dpo_plan(const struct train_loop *c, const struct rl_options *o, struct rl_plan *out,
             struct error *err);
int policy_gradient_run(const struct train_loop *c, enum train_method method,
                        const struct rl_options *o, const struct reward_fn *reward,
                        struct error *err);
int policy_gradient_plan(const struct train_loop *c, enum train_method method,
                         const struct rl_options *o, const struct reward_fn *reward,
                         struct rl_plan *out, struct error *err);

/* log.c: rewrites a log of JSON lines with those for which `keep` returns true. Drops other lines,
 * and an incomplete last one. A missing log becomes an empty one. */
int log_lines_keep(const char *path, bool (*keep)(void *ctx, const json_t *line), void *ctx,
                   struct error *err);

/* tensorboard.c: figures as event files of TensorBoard. One thread may use an event_file. */
struct event_file;
/* Makes an event file in the folder `dir` for the steps after `done`. Cuts later steps from the
 * files of earlier processes of the run. NULL: `err` is set. */
struct event_file *event_file_open(const char *dir, int64_t done, struct error *err);
/* Adds the numbers of an object, which may be nested, as figures of one step, and flushes. */
int event_file_add(struct event_file *e, int64_t step, const json_t *figures, struct error *err);
void event_file_close(struct event_file *e); /* may be NULL */

/* plan.c: functions shared by the plans of all methods. */

/* Whether samples of `more` tokens begin a new pass; most: train_loop.pass_tokens. */
static inline bool pack_is_full(int64_t rows, int64_t more, int64_t most) {
    return rows > 0 && rows + more > most;
}
/* Counts the passes of a plan. rows, samples: of the current pass; 0 at the start of every update.
 */
struct pack_counter {
    struct training_plan *plan;
    int64_t most; /* train_loop.pass_tokens */
    int64_t rows, samples;
};
/* Adds `n` samples that must be in the same pass. */
void pack_counter_add(struct pack_counter *c, const struct train_sample *v, int n);
/* Scales passes and tokens, which were counted for `counted` updates, to plan->updates. */
void training_plan_scale(struct training_plan *plan, int64_t counted);
/* Appends a copy of the sample to plan->first, which has room for it. */
void training_plan_add_example(struct training_plan *plan, const struct train_sample *s,
                               int adapter);
/* Measures the seconds of a call of `fn`. If the call took less than 2 seconds, it is repeated and
 * only the second call counts, because the first call also touches new memory. */
int training_plan_time(int (*fn)(void *ctx, struct error *err), void *ctx, double *seconds,
                       struct error *err);
/* Measures the seconds of an optimizer step, with a learning rate of 0. */
int training_plan_time_update(struct trainer *t, struct training_plan *plan, struct error *err);

#endif
