/*
 * ab: which of two adapters answers better, found out on live traffic, and what people said of
 * replies.
 *
 * An experiment is about one adapter's name. While it runs, requests for that name are answered by
 * one of two adapters; ratings of the replies are the outcomes, the i-th of a and the i-th of b a
 * pair (eval/sequential.h). When b is found better, the name stands for b's content from then on;
 * when it is found worse, for a's. Each is a publication in the pool: who is being answered is
 * answered to the end by whom he was given.
 *
 * What the test assumes of pairs is what drawing lots gives: that without a difference neither side
 * is to be expected ahead. A user who stays on one side draws once, so by default his first rating
 * counts and no other: a generous one would else be ahead for his side all day. Where the sides
 * have unequal shares, of the larger one only so many replies count as the smaller has: else the
 * i-th outcome of the one would come later than the other's, and a day on which everybody grows
 * kinder would look like a difference.
 *
 * What is kept, in STATE/ab.db: log "ab" the experiments' names; log "ab/NAME" what happened to
 * each; log "feedback" the ids of rated replies in order, document "feedback"/ID each; document
 * "promoted"/MODEL the content that a name was given. Everything is there before it is
 * acknowledged, so a kill loses nothing. Replies that nobody has rated are in memory only: after a
 * restart their ids are unknown. One server owns the file.
 *
 * Locks. `disk` is of the store and of what was decided; `table` of what the path of a request
 * reads. `disk` is taken first, nothing waits for the disk with `table` held, and what both guard
 * is changed with both and read with either.
 */
#ifndef SHOAL_SERVE_AB_H
#define SHOAL_SERVE_AB_H

#include "eval/eval.h"
#include "serve/server.h"
#include "store/store.h"

enum { AB_NAME_LEN = 65 };

/* Who answered: the run of an experiment, and a (0) or b (1). run 0: nobody experimented. user: of
 * whom the request said that it is for, a number of 53 bits; 0: it did not say. */
struct ab_arm {
    char name[AB_NAME_LEN];
    int64_t run, user;
    int side;
    bool spare; /* what people say of it does not count: see above */
};

struct ab_experiment;
struct ab_reply_log;
struct ab {
    struct server *s;
    pthread_mutex_t disk, table;
    struct store *store;
    char *path;
    int64_t n_rated;          /* events of the log "feedback" */
    struct ab_experiment **v; /* [n] by age of their names, those deleted too */
    int n;
    struct ab_reply_log *replies;
};

/* After the adapters and the metrics: goes on where the state says. */
int ab_open(struct server *s, struct error *err);
void ab_close(struct server *s);

/* of a request */

/* Where the target's adapter is experimented with, puts the one drawn in its place and says so in a
 * header. `user` (may be NULL) stays on one side. */
void ab_assign(struct server *s, struct exchange *x, struct model_ref *t, const char *user,
               struct ab_arm *arm);
/* Somebody has loaded an adapter under this name: what an experiment put there is over. */
void ab_on_adapter_loaded(struct server *s, const char *name);
struct generation;
/* A reply is whole, and about to be told so: its id can be rated from now on. */
void ab_log_reply(const struct generation *g);

/* between ab.c and feedback.c; `disk` is held */

/* The outcome's place on its side: `at`, or the next where at < 0; -1: it does not count, because
 * the experiment is over, has had enough, or has heard this user. */
int64_t ab_outcome_index(struct ab *ab, const struct ab_arm *arm, int64_t at);
/* Whether the test has had this outcome, or may have had it. */
bool ab_outcome_is_used(const struct ab *ab, const struct ab_arm *arm, int64_t at);
/* An outcome in two steps: `event` into the store, inside the caller's transaction; then, when that
 * is committed, into the experiment, which may decide. */
json_t *ab_outcome_event(const struct ab_arm *arm, int64_t at, double score, const char *id);
int ab_outcome_put(struct ab *ab, const struct ab_arm *arm, json_t *event, struct error *err);
void ab_outcome_apply(struct ab *ab, const struct ab_arm *arm, json_t *event);

int feedback_open(struct ab *ab, struct error *err);
void feedback_close(struct ab *ab);
/* In this API's words, with 404 and 409 for what is missing and what cannot be now. */
void ab_reply_error(struct exchange *x, const struct error *err);

#endif
