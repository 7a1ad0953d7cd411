/* ops: declarations that the experiments (ab.c) and the ratings (feedback.c) share. */
#ifndef SHOAL_OPS_INTERNAL_H
#define SHOAL_OPS_INTERNAL_H

#include "ops/ops.h"
#include "store/store.h"

#include <pthread.h>

struct ab_experiment;
struct feedback_log;
/* `disk` guards the store and the decisions, `table` the fields that requests read. `disk` is taken
 * first, and no thread waits for the disk while it holds `table`. Fields that both guard are
 * changed with both held and read with either. */
struct ab {
    struct ab_options o;
    pthread_mutex_t store_lock, table_lock;
    struct store *store;
    char *path;
    int64_t n_rated;          /* number of events in the log "feedback" */
    struct ab_experiment **v; /* [n] by age of their names, including deleted ones */
    int n;
    struct feedback_log *replies; /* NULL: replies cannot be rated */
};

/* ab.c; `disk` is held */

/* The index of the outcome on its side: `at`, or the next one if at < 0. -1: it does not count,
 * because the experiment has ended, has enough outcomes, or has one of this user. */
int64_t ab_outcome_index(struct ab *ab, const struct ab_arm *arm, int64_t at);
/* Whether the test has used this outcome, or may have. */
bool ab_outcome_is_used(const struct ab *ab, const struct ab_arm *arm, int64_t at);
/* An outcome is added in two steps: ab_outcome_put stores `event` inside the caller's transaction;
 * after the commit, ab_outcome_apply adds it to the experiment, which may decide. */
json_t *ab_outcome_event(const struct ab_arm *arm, int64_t at, double score, const char *id);
int ab_outcome_put(struct ab *ab, const struct ab_arm *arm, json_t *event, struct error *err);
void ab_outcome_apply(struct ab *ab, const struct ab_arm *arm, json_t *event);

/* feedback.c */

int feedback_open(struct ab *ab, struct error *err);
void feedback_close(struct ab *ab);

#endif
