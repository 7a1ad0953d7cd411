/*
 * train/course: what runs of different methods share — the order of their data, and the course of a
 * run from its start adapters over updates and checkpoints to its results.
 *
 * A course knows nothing of losses: a struct train_loop_ops takes it one step on, which is one or
 * more updates of the trainer. Invariant: what a step does is a function of options, data, the
 * trainer's state and what `state` keeps, so a continued course has the bits of an unbroken one.
 */
#ifndef SHOAL_TRAIN_COURSE_H
#define SHOAL_TRAIN_COURSE_H

#include "train/train.h"

/* Which of n samples comes when: number p since the run's beginning is entry p mod n of the shuffle
 * of epoch p / n. */
struct epoch_shuffle {
    uint32_t *v; /* [n] of `epoch` */
    int n;
    int64_t epoch;
};
int epoch_shuffle_init(struct epoch_shuffle *o, int n, struct error *err);
uint32_t epoch_shuffle_at(struct epoch_shuffle *o, int64_t seed, int64_t p);
void epoch_shuffle_release(struct epoch_shuffle *o);

/* What every run begins and ends with. */

/* Given ones are retained; fresh ones differ by name. */
int start_adapters_make(const struct model *m, const struct train_job *jobs, int n,
                        const struct train_options *o, struct adapter **starts, struct error *err);
/* Adapter j as it is now, ready to run, with its lineage: hashes of data and start adapter. */
int result_adapter_make(const struct trainer *t, const struct model *m, int j, const char *method,
                        const char *data, const char *start, struct adapter **out,
                        struct error *err);
/* Of the watcher's `about`: a row of data. */
json_t *dataset_info_json(const struct train_job *job, const char *data, const char *start);
/* What a checkpoint keeps beside the trainer, and back; a run of another identity is refused. The
 * caller releases `extra`, in every case. */
json_t *checkpoint_extra(json_t *identity, const struct train_job *jobs, int n);
int checkpoint_load(struct trainer *t, const char *path, const json_t *identity,
                    struct train_job *jobs, int n, json_t **extra, struct error *err);
/* Adds to a failure what is kept of the run, if anything is (saved >= 0). "At least": a save whose
 * last flush fails has replaced the file all the same. */
int error_add_resume_hint(const char *checkpoint, const char *unit, int64_t saved,
                          struct error *err);

/* data.c: a list of {role, content}; `out` is malloc'ed, its texts are the list's. Errors name
 * file, line and field. */
int conversation_parse(const char *path, int line, const char *field, const json_t *list,
                       struct chat_message **out, int *n, struct error *err);

struct train_loop {
    const struct model *m;
    const struct train_options *o;
    struct pool *pool;
    struct train_job *jobs;
    int n;
    const char *method;     /* the results' lineage */
    const char *checkpoint; /* may be NULL, as `watch` */
    const struct train_callbacks *watch;
    int64_t steps;     /* of the whole course, each of … */
    int64_t per_step;  /* … so many updates */
    json_t *identity;  /* what a checkpoint must have been made for; train_loop_begin adds to it */
    const char **data; /* [n] hashes */

    struct adapter **starts; /* [n] what training begins with, ready to run */
    struct trainer *trainer;
    enum lr_schedule schedule;
    int64_t saved;             /* the step that `checkpoint` holds; -1: none */
    double started, began;     /* the course, or what is left of it; the step */
    struct update_stats stats; /* of the last update, with the tokens and targets of its step */
    double lr;                 /* of the last update */
};
struct train_loop_ops {
    /* Step number `step` from 0, with train_loop_optimizer_step for its updates; `line` gets the
     * method's own figures for the log. */
    int (*run)(void *ctx, int64_t step, json_t *line, struct error *err);
    json_t *(*state)(void *ctx); /* what a checkpoint keeps beside the trainer */
    void (*restore)(void *ctx, const json_t *state); /* the same, or NULL: from the beginning */
    void *ctx;
};
/* Tokens that a sample may have. */
int32_t train_loop_max_length(const struct train_loop *c);
/* Steps of `per_step` for as many epochs of `n` as the options say, or max_steps. */
int64_t train_loop_count_steps(const struct train_loop *c, int64_t n, int64_t per_step);
/* Start adapters (retained or fresh) and the trainer. */
int train_loop_begin(struct train_loop *c, struct error *err);
void train_loop_log_lint(const struct train_loop *c); /* what lint found */
int train_loop_run(struct train_loop *c, const struct train_loop_ops *s, struct error *err);
/* The optimizer, at the learning rate of update `u`. */
int train_loop_optimizer_step(struct train_loop *c, int64_t u, struct error *err);
void train_loop_release(struct train_loop *c);

/* dpo.c and policy_gradient.c; the course holds what rl_run was given. */
int dpo_run(const struct train_loop *c, const struct rl_options *o, struct error *err);
int dpo_plan(const struct train_loop *c, const struct rl_options *o, struct rl_plan *out,
             struct error *err);
int policy_gradient_run(const struct train_loop *c, enum train_method method,
                        const struct rl_options *o, const struct reward_fn *reward,
                        struct error *err);
int policy_gradient_plan(const struct train_loop *c, enum train_method method,
                         const struct rl_options *o, const struct reward_fn *reward,
                         struct rl_plan *out, struct error *err);

/* plan.c: what the plans of all methods are made of. */

/* Tokens that a pass takes at most, unless a sample is longer; no bit depends on it. */
#define PACK_MAX_TOKENS 2048
static inline bool pack_is_full(int64_t rows, int64_t more) {
    return rows > 0 && rows + more > PACK_MAX_TOKENS;
}
/* Adds `n` samples that must share a pass to the plan's counts; `rows` and `samples` of the pass in
 * progress begin at 0 with every update. */
struct pack_counter {
    struct training_plan *plan;
    int64_t rows, samples;
};
void pack_counter_add(struct pack_counter *c, const struct train_sample *v, int n);
/* What was counted, from `counted` updates to all of plan->updates. */
void training_plan_scale(struct training_plan *plan, int64_t counted);
/* Appends a copy to plan->first, which has room for it. */
void training_plan_add_example(struct training_plan *plan, const struct train_sample *s,
                               int adapter);
/* Runs `fn`, and again where that was short, because the first time its memory is new. */
int training_plan_time(int (*fn)(void *ctx, struct error *err), void *ctx, double *seconds,
                       struct error *err);
/* The optimizer, with a learning rate of 0. */
int training_plan_time_update(struct trainer *t, struct training_plan *plan, struct error *err);

#endif
