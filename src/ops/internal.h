/* ops: declarations that the experiments (ab.c) and the ratings (feedback.c) share. */
#ifndef SHOAL_OPS_INTERNAL_H
#define SHOAL_OPS_INTERNAL_H

#include "ops/ops.h"
#include "store/store.h"

#include <pthread.h>

struct ab_experiment;
struct feedback_log;
/* store_lock protects the store and the decisions; table_lock protects the fields that requests
 * read. store_lock is locked before table_lock, and no thread waits for the disk while it holds
 * table_lock. Fields that both locks protect are changed with both locks held, and read with either
 * lock held. */
struct ab {
    struct ab_options o;
    pthread_mutex_t store_lock, table_lock;
    struct store *store;
    char *path;
    int64_t n_rated; /* number of events in the log "feedback" */
    struct ab_experiment *
        *v; /* [n] in the order in which names were first used; includes deleted experiments */
    int n;
    struct feedback_log *replies; /* NULL: replies cannot be rated */
};

/* ab.c: the caller of these functions holds store_lock. */

/* The index, on its side, of the outcome that a rating becomes: `index` if the rating replaces an
 * outcome, or the next index if index < 0. -1: the rating does not count, because its reply is to
 * be ignored, or the experiment has ended, has enough outcomes, or has one of this user. */
int64_t ab_outcome_index(struct ab *ab, const struct ab_arm *arm, int64_t index);
/* Whether the test has used the outcome with this index (< 0: none). True also if the experiment
 * was deleted, because then this is unknown. */
bool ab_outcome_is_used(const struct ab *ab, const struct ab_arm *arm, int64_t index);
/* An outcome is added in two steps: ab_outcome_put stores `event` inside the caller's transaction;
 * after the commit, ab_outcome_apply adds the outcome to the experiment, which may then decide. */
json_t *ab_outcome_event(const struct ab_arm *arm, int64_t index, double score, const char *id);
int ab_outcome_put(struct ab *ab, const struct ab_arm *arm, json_t *event, struct error *err);
void ab_outcome_apply(struct ab *ab, const struct ab_arm *arm, json_t *event);

/* feedback.c */

int feedback_open(struct ab *ab, struct error *err);
void feedback_close(struct ab *ab);

#endif
