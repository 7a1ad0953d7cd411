/*
 * ab: A/B tests of two adapters on live traffic, and the ratings that users give to replies.
 *
 * An experiment belongs to the name of one adapter. While it runs, one of two adapters answers the
 * requests for that name; ratings of the replies are the outcomes, and the i-th outcome of a and
 * the i-th of b are a pair (eval/sequential.h). When the test finds b better, the name refers to
 * b's content from then on; when it finds b worse, to a's. Each change is a publication in the
 * pool, so a request that is being answered keeps the adapter it began with.
 *
 * The test assumes that assignment is random: without a difference, neither side is expected to be
 * ahead. A user who stays on one side is assigned once, so by default only that user's first rating
 * counts; otherwise one generous user would favour one side all day. If the sides have unequal
 * shares, the larger side counts only as many replies as the smaller one receives. Otherwise its
 * i-th outcome would come earlier than the smaller side's, and a change of all users' ratings over
 * time would look like a difference.
 *
 * STATE/ab.db holds: log "ab", the names of the experiments; log "ab/NAME", the events of each; log
 * "feedback", the ids of rated replies in order, and document "feedback"/ID for each; document
 * "promoted"/MODEL, the content that a name was given. All of it is stored before it is
 * acknowledged, so a kill loses nothing. Unrated replies are only in memory: after a restart their
 * ids are unknown. One server owns the file.
 *
 * Locks: `disk` guards the store and the decisions, `table` the fields that requests read. `disk`
 * is taken first, and no thread waits for the disk while it holds `table`. Fields that both guard
 * are changed with both held and read with either.
 */
#ifndef SHOAL_SERVE_AB_H
#define SHOAL_SERVE_AB_H

#include "eval/eval.h"
#include "serve/server.h"
#include "store/store.h"

enum { AB_NAME_LEN = 65 };

/* The arm that answered: the run of an experiment, and side a (0) or b (1). run 0: no experiment.
 * user: a 53-bit number for the user that the request names; 0: it names none. */
struct ab_arm {
    char name[AB_NAME_LEN];
    int64_t run, user;
    int side;
    bool spare; /* ratings of this reply do not count: see above */
};

struct ab_experiment;
struct ab_reply_log;
struct ab {
    struct server *s;
    pthread_mutex_t disk, table;
    struct store *store;
    char *path;
    int64_t n_rated;          /* number of events in the log "feedback" */
    struct ab_experiment **v; /* [n] by age of their names, including deleted ones */
    int n;
    struct ab_reply_log *replies;
};

/* Call it after the adapters and the metrics are open. Resumes the experiments of the state. */
int ab_open(struct server *s, struct error *err);
void ab_close(struct server *s);

/* for requests */

/* If an experiment runs on the target's adapter, replaces it by the assigned one and names that in
 * a header. `user` (may be NULL) stays on one side. */
void ab_assign(struct server *s, struct exchange *x, struct model_ref *t, const char *user,
               struct ab_arm *arm);
/* A client has loaded an adapter under this name: the promotion that an experiment stored for it
 * ends. */
void ab_on_adapter_loaded(struct server *s, const char *name);
struct generation;
/* A reply is complete and about to be sent: its id can be rated from now on. */
void ab_log_reply(const struct generation *g);

/* between ab.c and feedback.c; `disk` is held */

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

int feedback_open(struct ab *ab, struct error *err);
void feedback_close(struct ab *ab);
/* Sends an error of this API: 404 if the object is missing, 409 if the state does not allow the
 * call. */
void ab_reply_error(struct exchange *x, const struct error *err);

#endif
