/*
 * train/course: what runs of different methods share — the order of their data, and the course of a
 * run from its start adapters over updates and checkpoints to its results.
 *
 * A course knows nothing of losses: a struct course_step takes it one step on, which is one or more
 * updates of the trainer. Invariant: what a step does is a function of options, data, the trainer's
 * state and what `state` keeps, so a continued course has the bits of an unbroken one.
 */
#ifndef SHOAL_TRAIN_COURSE_H
#define SHOAL_TRAIN_COURSE_H

#include "train/policy.h"

/* Which of n samples comes when: number p since the run's beginning is entry p mod n of the shuffle
 * of epoch p / n. */
struct order {
    uint32_t *v; /* [n] of `epoch` */
    int n;
    int64_t epoch;
};
int order_init(struct order *o, int n, struct error *err);
uint32_t order_at(struct order *o, int64_t seed, int64_t p);
void order_release(struct order *o);

/* What every run begins and ends with. */

/* Given ones are retained; fresh ones differ by name. */
int starts_make(const struct model *m, const struct sft_job *jobs, int n,
                const struct train_options *o, struct adapter **starts, struct error *err);
/* Adapter j as it is now, ready to run, with its lineage: hashes of data and start adapter. */
int result_make(const struct trainer *t, const struct model *m, int j, const char *method,
                const char *data, const char *start, struct adapter **out, struct error *err);
/* Of the watcher's `about`: a row of data. */
json_t *data_about(const struct sft_job *job, const char *data, const char *start);
/* What a checkpoint keeps beside the trainer, and back; a run of another identity is refused. The
 * caller releases `extra`, in every case. */
json_t *checkpoint_extra(json_t *identity, const struct sft_job *jobs, int n);
int checkpoint_load(struct trainer *t, const char *path, const json_t *identity,
                    struct sft_job *jobs, int n, json_t **extra, struct error *err);
/* Adds to a failure what is kept of the run, if anything is (saved >= 0). "At least": a save whose
 * last flush fails has replaced the file all the same. */
int failure_place(const char *checkpoint, const char *unit, int64_t saved, struct error *err);

/* data.c: a list of {role, content}; `out` is malloc'ed, its texts are the list's. Errors name
 * file, line and field. */
int conversation_take(const char *path, int line, const char *field, const json_t *list,
                      struct message **out, int *n, struct error *err);

struct course {
    const struct model *m;
    const struct train_options *o;
    struct pool *pool;
    struct sft_job *jobs;
    int n;
    const char *method;     /* the results' lineage */
    const char *checkpoint; /* may be NULL, as `watch` */
    const struct sft_watch *watch;
    int64_t steps;     /* of the whole course, each of … */
    int64_t per_step;  /* … so many updates */
    json_t *identity;  /* what a checkpoint must have been made for; course_begin adds to it */
    const char **data; /* [n] hashes */

    struct adapter **starts; /* [n] what training begins with, ready to run */
    struct trainer *trainer;
    enum schedule schedule;
    int64_t saved;             /* the step that `checkpoint` holds; -1: none */
    double started, began;     /* the course, or what is left of it; the step */
    struct update_stats stats; /* of the last update, with the tokens and targets of its step */
    double lr;                 /* of the last update */
};
struct course_step {
    /* Step number `step` from 0, with course_update for its updates; `line` gets the method's own
     * figures for the log. */
    int (*run)(void *ctx, int64_t step, json_t *line, struct error *err);
    json_t *(*state)(void *ctx); /* what a checkpoint keeps beside the trainer */
    void (*restore)(void *ctx, const json_t *state); /* the same, or NULL: from the beginning */
    void *ctx;
};
/* Tokens that a sample may have. */
int32_t course_limit(const struct course *c);
/* Steps of `per_step` for as many epochs of `n` as the options say, or max_steps. */
int64_t course_steps(const struct course *c, int64_t n, int64_t per_step);
/* Start adapters (retained or fresh) and the trainer. */
int course_begin(struct course *c, struct error *err);
void course_data_say(const struct course *c); /* what lint found */
int course_run(struct course *c, const struct course_step *s, struct error *err);
/* The optimizer, at the learning rate of update `u`. */
int course_update(struct course *c, int64_t u, struct error *err);
void course_release(struct course *c);

/* prefer.c and reward.c; the course holds what policy_run was given. */
int prefer_run(const struct course *c, const struct policy_options *o, struct error *err);
int prefer_plan(const struct course *c, const struct policy_options *o, struct policy_plan *out,
                struct error *err);
int reward_run(const struct course *c, enum method method, const struct policy_options *o,
               const struct reward *reward, struct error *err);
int reward_plan(const struct course *c, enum method method, const struct policy_options *o,
                const struct reward *reward, struct policy_plan *out, struct error *err);

/* plan.c: what the plans of all methods are made of. */

/* Tokens that a pass takes at most, unless a sample is longer; no bit depends on it. */
#define PASS_ROWS 2048
static inline bool pass_full(int64_t rows, int64_t more) {
    return rows > 0 && rows + more > PASS_ROWS;
}
/* Adds `n` samples that must share a pass to the plan's counts; `rows` and `samples` of the pass in
 * progress begin at 0 with every update. */
struct pass_count {
    struct sft_plan *plan;
    int64_t rows, samples;
};
void pass_count_add(struct pass_count *c, const struct sample *v, int n);
/* What was counted, from `counted` updates to all of plan->updates. */
void pass_count_scale(struct sft_plan *plan, int64_t counted);
/* Appends a copy to plan->first, which has room for it. */
void plan_show(struct sft_plan *plan, const struct sample *s, int adapter);
/* Runs `fn`, and again where that was short, because the first time its memory is new. */
int plan_time(int (*fn)(void *ctx, struct error *err), void *ctx, double *seconds,
              struct error *err);
/* The optimizer, with a learning rate of 0. */
int plan_time_update(struct trainer *t, struct sft_plan *plan, struct error *err);

#endif
