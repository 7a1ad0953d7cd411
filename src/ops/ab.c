/*
 * ab: experiments and promotions. The state of an experiment is the result of applying the events
 * of its log, in order, to a struct ab_experiment.
 *
 *   start ──> outcome … ──> decided | stop ──> delete ──> start …
 *
 * Invariants. 1. An event is stored before it is applied, and the events determine the state of an
 * experiment. 2. A running experiment retains its adapters: the compared content cannot change,
 * whatever is loaded under their names. 3. "decided" is written when the test has decided. If the
 * server was killed between the deciding outcome and this event, the next start writes the event.
 */
#define _GNU_SOURCE
#include "adapter/adapter.h"
#include "eval/eval.h"
#include "ops/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Limits: experiments that exist, names of experiments (also deleted ones), events read at once. */
enum { MAX_EXPERIMENTS = 64, MAX_NAMES = 4096, PAGE = 256 };

enum state { DELETED, RUNNING, STOPPED, DECIDED };

struct ab_experiment {
    char name[AB_NAME_LEN];
    enum state state;
    int64_t seq, run;   /* seq: number of events in its log; run: number of its start event */
    json_t *spec, *end; /* the start event, and the event that ended it */
    const char *model;  /* borrowed from spec */
    double share;
    bool once; /* only one outcome per user counts; users [n_users]: those with an outcome */
    int64_t *users;
    int n_users;
    uint64_t seed;
    struct sequential_test test;
    double *scores[2]; /* [max_pairs] outcomes by side, of which n are set */
    int64_t n[2];
    struct adapter *arms[2]; /* both or none; set while the experiment runs */
    /* why the experiment cannot continue, or the error of its decision; NULL: none */
    char *problem;
    uint64_t n_assigned;    /* requests without a user that got an arm since the server began */
    uint64_t n_requests[2]; /* by side, since the server began */
};

static struct ab_experiment *experiment_find(const struct ab *ab, const char *name) {
    for (int i = 0; i < ab->n; i++)
        if (strcmp(ab->v[i]->name, name) == 0) return ab->v[i];
    return NULL;
}

static struct ab_experiment *experiment_find_existing(const struct ab *ab, const char *name,
                                                      struct error *err) {
    struct ab_experiment *e = experiment_find(ab, name);
    if (e && e->state != DELETED) return e;
    error_set(err, ERR_MISSING, "there is no experiment '%.64s'; GET /v1/ab lists all", name);
    return NULL;
}

static struct ab_experiment *experiment_running_on(const struct ab *ab, const char *model) {
    for (int i = 0; i < ab->n; i++)
        if (ab->v[i]->state == RUNNING && strcmp(ab->v[i]->model, model) == 0) return ab->v[i];
    return NULL;
}

static struct ab_experiment *experiment_of_arm(const struct ab *ab, const struct ab_arm *arm) {
    struct ab_experiment *e = arm->run ? experiment_find(ab, arm->name) : NULL;
    return e && e->state != DELETED && e->run == arm->run ? e : NULL;
}

static const char *spec_string(const struct ab_experiment *e, const char *list, int side) {
    const char *text =
        json_string_value(json_array_get(json_object_get(e->spec, list), (size_t)side));
    return text ? text : "";
}

static void arms_release(struct ab_experiment *e) {
    for (int k = 0; k < 2; k++) {
        adapter_release(e->arms[k]);
        e->arms[k] = NULL;
    }
}

static void experiment_clear(struct ab_experiment *e) {
    arms_release(e);
    sequential_release(&e->test);
    for (int k = 0; k < 2; k++) {
        free(e->scores[k]);
        e->scores[k] = NULL;
        e->n[k] = 0;
        e->n_requests[k] = 0;
    }
    json_decref(e->spec);
    json_decref(e->end);
    free(e->problem);
    free(e->users);
    e->users = NULL;
    e->n_users = 0;
    e->spec = e->end = NULL;
    e->model = e->problem = NULL;
    e->state = DELETED;
}

static void problem_set(struct ab *ab, struct ab_experiment *e, const char *problem) {
    pthread_mutex_lock(&ab->table_lock);
    free(e->problem);
    e->problem = problem ? xstrdup(problem) : NULL;
    pthread_mutex_unlock(&ab->table_lock);
    if (problem) log_warn("A/B '%s': %s", e->name, problem);
}

/* events */

static json_t *event_new(const char *op) {
    return json_pack("{s:s,s:I}", "op", op, "at", (json_int_t)time(NULL));
}

static bool is_string_pair(const json_t *list) {
    return json_is_string_array(list) && json_array_size(list) == 2;
}

static bool start_apply(struct ab_experiment *e, json_t *event) {
    struct sequential_options o;
    json_int_t min_pairs, max_pairs, seed, created;
    const char *model;
    double share;
    int once;
    bool valid =
        e->state == DELETED &&
        json_unpack(event, "{s:s,s:F,s:F,s:I,s:I,s:I,s:I,s:b}", "model", &model, "share", &share,
                    "alpha", &o.alpha, "min_pairs", &min_pairs, "max_pairs", &max_pairs, "seed",
                    &seed, "at", &created, "once_per_user", &once) == 0 &&
        share > 0 && share < 1 && o.alpha > 0 && o.alpha < 1 && min_pairs >= 1 &&
        min_pairs <= max_pairs && max_pairs <= SEQUENTIAL_PAIRS_MAX &&
        is_string_pair(json_object_get(event, "names")) &&
        is_string_pair(json_object_get(event, "hashes")) &&
        is_string_pair(json_object_get(event, "paths"));
    if (!valid) return false;
    o.min_pairs = min_pairs;
    o.max_pairs = max_pairs;
    sequential_init(&e->test, &o);
    for (int k = 0; k < 2; k++) e->scores[k] = xcalloc((size_t)max_pairs, sizeof *e->scores[k]);
    e->spec = json_incref(event);
    e->model = model;
    e->share = share;
    e->once = once;
    e->seed = (uint64_t)seed;
    e->run = e->seq + 1;
    e->state = RUNNING;
    return true;
}

static bool user_has_outcome(const struct ab_experiment *e, int64_t user) {
    int i = 0;
    while (i < e->n_users && e->users[i] != user) i++;
    return i < e->n_users;
}

static void user_add(struct ab_experiment *e, int64_t user) {
    if (user == 0 || user_has_outcome(e, user)) return;
    e->users = xrealloc(e->users, sizeof *e->users * (size_t)(e->n_users + 1));
    e->users[e->n_users++] = user;
}

/* Adds or replaces an outcome, and runs the test on the new complete pairs. */
static bool outcome_apply(struct ab_experiment *e, json_t *event) {
    json_int_t index, user;
    int side;
    double score;
    if (json_unpack(event, "{s:i,s:I,s:F,s:I}", "side", &side, "place", &index, "score", &score,
                    "user", &user) != 0 ||
        e->state != RUNNING || side < 0 || side > 1 || index < e->test.n || index > e->n[side] ||
        index >= e->test.o.max_pairs || !(score >= 0 && score <= 1))
        return false;
    user_add(e, user);
    e->scores[side][index] = score;
    e->n[side] += index == e->n[side];
    while (e->test.decision == SEQUENTIAL_CONTINUE && e->test.n < MIN(e->n[0], e->n[1]))
        sequential_add(&e->test, e->scores[0][e->test.n], e->scores[1][e->test.n]);
    return true;
}

static bool end_apply(struct ab_experiment *e, json_t *event, enum state state) {
    if (e->state != RUNNING) return false;
    e->end = json_incref(event);
    e->state = state;
    arms_release(e);
    return true;
}

static bool event_dispatch(struct ab_experiment *e, json_t *event) {
    const char *op = json_get_string(event, "op");
    if (strcmp(op, "start") == 0) return start_apply(e, event);
    if (strcmp(op, "outcome") == 0) return outcome_apply(e, event);
    if (strcmp(op, "stop") == 0) return end_apply(e, event, STOPPED);
    if (strcmp(op, "decided") == 0) return end_apply(e, event, DECIDED);
    if (strcmp(op, "delete") != 0 || e->state == DELETED) return false;
    experiment_clear(e);
    return true;
}

static int event_apply(struct ab *ab, struct ab_experiment *e, json_t *event, struct error *err) {
    pthread_mutex_lock(&ab->table_lock);
    bool valid = event_dispatch(e, event);
    e->seq += valid;
    pthread_mutex_unlock(&ab->table_lock);
    if (valid) return OK;
    return error_set(err, ERR_FORMAT,
                     "'%s': event %lld of A/B '%s' is damaged; put the file back from a copy, or "
                     "begin with another",
                     ab->path, (long long)e->seq + 1, e->name);
}

/* Appends an event to the log as number seq + 1. ERR_STATE: the store has an event with this
 * number, so another server writes to the file. */
static int log_add(struct ab *ab, const char *log, int64_t seq, json_t *event, struct error *err) {
    json_t *events = json_pack("[O]", event);
    int rc = store_log_append(ab->store, log, seq + 1, events, err);
    json_decref(events);
    if (rc == ERR_STATE)
        error_wrap(err,
                   "another server has written to '%s', which only one may use: stop it, and "
                   "restart this one",
                   ab->path);
    return rc;
}

static int event_put(struct ab *ab, const struct ab_experiment *e, json_t *event,
                     struct error *err) {
    char log[AB_NAME_LEN + 3];
    snprintf(log, sizeof log, "ab/%s", e->name);
    return log_add(ab, log, e->seq, event, err);
}

/* Stores the event and applies it to the experiment. Takes ownership of the event. */
static int event_add(struct ab *ab, struct ab_experiment *e, json_t *event, struct error *err) {
    int rc = event_put(ab, e, event, err);
    if (rc == OK) rc = event_apply(ab, e, event, err);
    json_decref(event);
    return rc;
}

static int events_read(struct ab *ab, struct ab_experiment *e, struct error *err) {
    char log[AB_NAME_LEN + 3];
    snprintf(log, sizeof log, "ab/%s", e->name);
    for (size_t n = PAGE; n == PAGE;) {
        json_t *page = store_log_list(ab->store, log, e->seq, PAGE, err), *event;
        size_t i;
        int rc = page ? OK : err->code;
        json_array_foreach (page, i, event)
            if ((rc = event_apply(ab, e, event, err)) != OK) break;
        n = json_array_size(page);
        json_decref(page);
        if (rc != OK) return rc;
    }
    return OK;
}

/* promotions: names that refer to the winner of an experiment */

/* The stored promotion of the name, or NULL. */
static json_t *promotion_get(struct ab *ab, const char *model) {
    struct error none;
    json_t *v = store_document_get(ab->store, "promoted", model, &none);
    if (v && *json_get_string(v, "to")) return v;
    json_decref(v);
    return NULL;
}

/* The adapter with this hash: from the pool by name, or else from its path. */
static struct adapter *adapter_find_by_hash(const struct ab *ab, const char *name, const char *path,
                                            const char *hash, struct error *err) {
    struct adapter *a = adapter_pool_get(ab->o.pool, name, err);
    if (a && strcmp(a->hash, hash) == 0) return a;
    adapter_release(a);
    a = adapter_open(path, ab->o.model, err);
    if (!a || strcmp(a->hash, hash) == 0) return a;
    adapter_release(a);
    error_set(err, ERR_MISMATCH,
              "the adapter '%s' at '%s' has other content than when the experiment began", name,
              path);
    return NULL;
}

/* Publishes the promoted adapter. If the model's files were replaced since the promotion, does
 * nothing, so that the new files are served. */
static void promotion_restore(struct ab *ab, const char *model, const json_t *v) {
    struct error err;
    struct adapter *now = adapter_pool_get(ab->o.pool, model, &err), *a = NULL;
    if (now && strcmp(now->hash, json_get_string(v, "from")) == 0) {
        const char *path = json_get_string(v, "path");
        a = adapter_find_by_hash(ab, json_get_string(v, "adapter"), path, json_get_string(v, "to"),
                                 &err);
        if (!a || ab->o.publish(ab->o.ctx, model, a, path, &err) != OK)
            log_warn("'%s' is served from its files, without the adapter of A/B '%s': %s", model,
                     json_get_string(v, "experiment"), err.text);
    }
    adapter_release(now);
    adapter_release(a);
}

static void promotions_restore(struct ab *ab, const struct strings *models) {
    for (int i = 0; i < models->n; i++) {
        json_t *v = promotion_get(ab, models->v[i]);
        if (v) promotion_restore(ab, models->v[i], v);
        json_decref(v);
    }
}

void ab_end_promotion(struct ab *ab, const char *name) {
    struct error err;
    pthread_mutex_lock(&ab->store_lock);
    json_t *v = promotion_get(ab, name), *none = json_object();
    if (v && store_document_put(ab->store, "promoted", name, none, &err) != OK)
        log_warn("'%s': %s", name, err.text);
    json_decref(v);
    json_decref(none);
    pthread_mutex_unlock(&ab->store_lock);
}

/* Stores that the model's name refers to the winner, whose content differs from `now`. "from" is
 * the hash of the model's files, also after several promotions, because the next start compares the
 * files with this hash. */
static int promotion_put(struct ab *ab, const struct ab_experiment *e, int winner,
                         const struct adapter *now, struct error *err) {
    json_t *earlier = promotion_get(ab, e->model);
    bool is_chained = earlier && strcmp(json_get_string(earlier, "to"), now->hash) == 0;
    json_t *v = json_pack("{s:s,s:s,s:s,s:s,s:s,s:I}", "from",
                          is_chained ? json_get_string(earlier, "from") : now->hash, "to",
                          e->arms[winner]->hash, "adapter", spec_string(e, "names", winner), "path",
                          spec_string(e, "paths", winner), "experiment", e->name, "at",
                          (json_int_t)time(NULL));
    int rc = store_document_put(ab->store, "promoted", e->model, v, err);
    json_decref(v);
    json_decref(earlier);
    return rc;
}

/* figures */

static json_t *test_stats_add(const struct ab_experiment *e, json_t *v) {
    const struct sequential_test *t = &e->test;
    double n = (double)MAX(t->n, 1);
    json_object_set_new(v, "decision", json_string(sequential_decision_name(t->decision)));
    json_object_set_new(v, "pairs", json_integer(t->n));
    json_object_set_new(v, "mean", json_pack("{s:f,s:f}", "a", t->sum[0] / n, "b", t->sum[1] / n));
    json_object_set_new(v, "difference", stats_interval_json(sequential_difference(t)));
    json_object_set_new(v, "e_value",
                        json_pack("{s:f,s:f,s:f}", "b_better", sequential_e_value(t, 0), "b_worse",
                                  sequential_e_value(t, 1), "decides_at", sequential_threshold(t)));
    return v;
}

static json_t *experiment_json(const struct ab_experiment *e) {
    static const char *const states[] = {"deleted", "running", "stopped", "decided"};
    json_t *v = json_pack(
        "{s:s,s:s,s:s,s:s,s:s,s:O,s:O,s:O,s:O,s:O,s:{s:I,s:I},s:{s:I,s:I},s:s?}", "name", e->name,
        "state", states[e->state], "model", e->model, "a", spec_string(e, "names", 0), "b",
        spec_string(e, "names", 1), "share", json_object_get(e->spec, "share"), "alpha",
        json_object_get(e->spec, "alpha"), "min_pairs", json_object_get(e->spec, "min_pairs"),
        "max_pairs", json_object_get(e->spec, "max_pairs"), "created",
        json_object_get(e->spec, "at"), "outcomes", "a", (json_int_t)e->n[0], "b",
        (json_int_t)e->n[1], "requests", "a", (json_int_t)e->n_requests[0], "b",
        (json_int_t)e->n_requests[1], "problem", e->problem);
    json_t *serves = json_object_get(e->end, "serves");
    json_object_set(v, "once_per_user", json_object_get(e->spec, "once_per_user"));
    json_object_set(v, "ended", e->end ? json_object_get(e->end, "at") : json_null());
    json_object_set(v, "serves", serves ? serves : json_null());
    return test_stats_add(e, v);
}

static void experiment_update_metrics(struct ab *ab, const struct ab_experiment *e) {
    const struct sequential_test *t = &e->test;
    metric_set(metric_get(ab->o.metrics, METRIC_AB_PAIRS, e->name), (double)t->n);
    if (t->n)
        metric_set(metric_get(ab->o.metrics, METRIC_AB_DIFFERENCE, e->name),
                   (t->sum[1] - t->sum[0]) / (double)t->n);
}

/* deciding */

/* The side whose content the name gets by the test's decision; -1: the name keeps its content. */
static int winning_side(const struct ab_experiment *e) {
    return e->test.decision == SEQUENTIAL_B_BETTER  ? 1
           : e->test.decision == SEQUENTIAL_B_WORSE ? 0
                                                    : -1;
}

static int decision_put(struct ab *ab, struct ab_experiment *e, int winner,
                        const struct adapter *now, json_t *event, struct error *err) {
    int rc = store_begin(ab->store, err);
    if (rc != OK) return rc;
    if (winner >= 0) rc = promotion_put(ab, e, winner, now, err);
    if (rc == OK) rc = event_put(ab, e, event, err);
    if (rc == OK) rc = store_commit(ab->store, err);
    if (rc != OK) store_rollback(ab->store);
    return rc;
}

/* Ends an experiment whose test has decided. After an error, the next rating or the next start
 * tries again. */
static void experiment_decide(struct ab *ab, struct ab_experiment *e) {
    struct error err;
    if (e->state != RUNNING || e->test.decision == SEQUENTIAL_CONTINUE || !e->arms[0]) return;
    struct adapter *now = adapter_pool_get(ab->o.pool, e->model, &err);
    int winner = now ? winning_side(e) : -1;
    struct adapter *a = winner >= 0 ? adapter_retain(e->arms[winner]) : NULL;
    if (a && strcmp(a->hash, now->hash) == 0) winner = -1;
    json_t *event = test_stats_add(e, event_new("decided"));
    json_object_set_new(event, "serves", json_string(a ? a->hash : now ? now->hash : ""));
    int rc = decision_put(ab, e, winner, now, event, &err);
    char *path = xstrdup(spec_string(e, "paths", MAX(winner, 0)));
    /* Publishes before the experiment ends, so that no request gets the loser between the two. */
    if (rc == OK && winner >= 0) rc = ab->o.publish(ab->o.ctx, e->model, a, path, &err);
    problem_set(ab, e, rc == OK ? NULL : err.text);
    if (rc == OK) rc = event_apply(ab, e, event, &err);
    if (rc == OK)
        log_info("A/B '%s': %s after %lld pairs; '%s' serves %.12s", e->name,
                 sequential_decision_name(e->test.decision), (long long)e->test.n, e->model,
                 json_get_string(event, "serves"));
    free(path);
    json_decref(event);
    adapter_release(a);
    adapter_release(now);
}

/* outcomes */

int64_t ab_outcome_index(struct ab *ab, const struct ab_arm *arm, int64_t index) {
    struct ab_experiment *e = experiment_of_arm(ab, arm);
    if (arm->ignored) return -1;
    if (e) experiment_decide(ab, e);
    if (!e || e->state != RUNNING || e->test.decision != SEQUENTIAL_CONTINUE) return -1;
    if (index < 0 && e->once && arm->user && user_has_outcome(e, arm->user)) return -1;
    if (index < 0) index = e->n[arm->side];
    return index < e->test.o.max_pairs ? index : -1;
}

bool ab_outcome_is_used(const struct ab *ab, const struct ab_arm *arm, int64_t index) {
    const struct ab_experiment *e = experiment_of_arm(ab, arm);
    return index >= 0 && (!e || index < e->test.n);
}

json_t *ab_outcome_event(const struct ab_arm *arm, int64_t index, double score, const char *id) {
    json_t *v = event_new("outcome");
    json_object_set_new(v, "side", json_integer(arm->side));
    json_object_set_new(v, "user", json_integer(arm->user));
    json_object_set_new(v, "place", json_integer(index));
    json_object_set_new(v, "score", json_real(score));
    json_object_set_new(v, "id", json_string(id));
    return v;
}

int ab_outcome_put(struct ab *ab, const struct ab_arm *arm, json_t *event, struct error *err) {
    return event_put(ab, experiment_of_arm(ab, arm), event, err);
}

void ab_outcome_apply(struct ab *ab, const struct ab_arm *arm, json_t *event) {
    struct ab_experiment *e = experiment_of_arm(ab, arm);
    struct error err;
    CHECK(event_apply(ab, e, event, &err) == OK); // ab_outcome_index has checked it before
    experiment_decide(ab, e);
    experiment_update_metrics(ab, e);
}

/* requests */

static int64_t user_number(const struct ab_experiment *e, const char *user) {
    if (!user || !*user) return 0;
    return (int64_t)((hash_fnv1a(user, strlen(user)) ^ e->seed) >> 11 | 1);
}

/* Assigns the side by a random number in [0, 1): side b if the number is below b's share. The
 * number depends on the user or, without a user, on the number of the request since the server
 * began. Ratings count if the distance of the number from b's share is at most the smaller share,
 * so that both sides count equally many. */
static void assign_side(const struct ab *ab, struct ab_experiment *e, struct ab_arm *arm) {
    int64_t user = arm->user;
    uint64_t key = user ? (uint64_t)user : e->seed;
    uint32_t id = user ? 0 : (uint32_t)ab->o.started, step = user ? 0 : (uint32_t)e->n_assigned++;
    struct rng r = rng_make(key, RNG_SELECT, id, step);
    double u = (double)rng_uniform(&r), smaller = fmin(e->share, 1 - e->share);
    arm->side = u < e->share;
    arm->ignored = fabs(u - e->share) > smaller;
}

struct adapter *ab_assign(struct ab *ab, const char *model, const char *user, struct ab_arm *arm,
                          char **name) {
    struct adapter *assigned = NULL;
    *arm = (struct ab_arm){0};
    pthread_mutex_lock(&ab->table_lock);
    struct ab_experiment *e = experiment_running_on(ab, model);
    if (e && e->arms[0]) {
        arm->run = e->run;
        arm->user = user_number(e, user);
        assign_side(ab, e, arm);
        memcpy(arm->name, e->name, sizeof arm->name);
        e->n_requests[arm->side]++;
        assigned = adapter_retain(e->arms[arm->side]);
        *name = xstrdup(spec_string(e, "names", arm->side));
    }
    pthread_mutex_unlock(&ab->table_lock);
    return assigned;
}

/* start */

/* Names appear in HTTP headers and logs, so few characters are allowed. */
int ab_name_check(const char *name, struct error *err) {
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t n = strlen(name);
    if (n > 0 && n < AB_NAME_LEN && strspn(name, letters) == n) return OK;
    return error_set(err, ERR_USAGE,
                     "'name' of an experiment must be 1 to %d letters, digits, '.', '_' or '-'",
                     AB_NAME_LEN - 1);
}

static json_t *path_json(const char *path) {
    json_t *v = json_string(path);
    return v ? v : json_string("");
}

static json_t *start_event(const struct ab_spec *p) {
    json_t *v = event_new("start");
    char *seed = xasprintf("%s %lld %s", p->name, (long long)time(NULL), p->arms[1]->hash);
    json_t *fields = json_pack(
        "{s:s,s:[ss],s:[ss],s:[oo],s:f,s:f,s:I,s:I,s:I,s:b}", "model", p->model, "names",
        p->names[0], p->names[1], "hashes", p->arms[0]->hash, p->arms[1]->hash, "paths",
        path_json(p->paths[0]), path_json(p->paths[1]), "share", p->share, "alpha", p->alpha,
        "min_pairs", (json_int_t)p->min_pairs, "max_pairs", (json_int_t)p->max_pairs, "seed",
        (json_int_t)(hash_fnv1a(seed, strlen(seed)) >> 12), "once_per_user", p->once_per_user);
    json_object_update(v, fields);
    json_decref(fields);
    free(seed);
    return v;
}

/* Adds an experiment to the table, with no events applied. */
static struct ab_experiment *experiment_new(struct ab *ab, const char *name) {
    struct ab_experiment *e = xcalloc(1, sizeof *e);
    snprintf(e->name, sizeof e->name, "%s", name);
    pthread_mutex_lock(&ab->table_lock);
    ab->v = xrealloc(ab->v, sizeof *ab->v * (size_t)(ab->n + 1));
    ab->v[ab->n++] = e;
    pthread_mutex_unlock(&ab->table_lock);
    return e;
}

static int start_check(const struct ab *ab, const struct ab_spec *p, struct error *err) {
    const struct ab_experiment *e = experiment_find(ab, p->name), *running;
    int n_experiments = 0;
    for (int i = 0; i < ab->n; i++) n_experiments += ab->v[i]->state != DELETED;
    if (e && e->state != DELETED)
        return error_set(err, ERR_STATE, "there is an experiment '%s'; delete it first", p->name);
    if ((running = experiment_running_on(ab, p->model)))
        return error_set(err, ERR_STATE, "the experiment '%s' runs on '%s'; stop it first",
                         running->name, p->model);
    if (!e && ab->n >= MAX_NAMES)
        return error_set(err, ERR_STATE,
                         "there have been experiments of %d names, which is the limit; reuse the "
                         "name of a deleted one",
                         MAX_NAMES);
    if (n_experiments >= MAX_EXPERIMENTS)
        return error_set(err, ERR_STATE, "there are %d experiments; delete some first",
                         MAX_EXPERIMENTS);
    return OK;
}

/* Stores and applies the start event. Takes ownership of the event. *out: the experiment as JSON.
 */
static int experiment_start(struct ab *ab, const struct ab_spec *p, json_t *event, json_t **out,
                            struct error *err) {
    json_t *name = json_pack("{s:s}", "name", p->name);
    struct ab_experiment *e = experiment_find(ab, p->name), new_experiment = {0};
    snprintf(new_experiment.name, sizeof new_experiment.name, "%s", p->name);
    int rc = start_check(ab, p, err);
    if (rc == OK) rc = store_begin(ab->store, err);
    if (rc == OK && !e) rc = log_add(ab, "ab", ab->n, name, err);
    if (rc == OK) rc = event_put(ab, e ? e : &new_experiment, event, err);
    if (rc == OK) rc = store_commit(ab->store, err);
    if (rc != OK) store_rollback(ab->store);
    if (rc == OK && !e) e = experiment_new(ab, p->name);
    if (rc == OK) rc = event_apply(ab, e, event, err);
    if (rc == OK) {
        pthread_mutex_lock(&ab->table_lock);
        for (int k = 0; k < 2; k++) e->arms[k] = adapter_retain(p->arms[k]);
        pthread_mutex_unlock(&ab->table_lock);
        experiment_update_metrics(ab, e);
        *out = experiment_json(e);
    }
    json_decref(event);
    json_decref(name);
    return rc;
}

json_t *ab_start(struct ab *ab, const struct ab_spec *p, struct error *err) {
    json_t *out = NULL;
    if (strcmp(p->arms[0]->hash, p->arms[1]->hash) == 0) {
        error_set(err, ERR_USAGE,
                  "'%s' and '%s' have the same content: there is nothing to compare", p->names[0],
                  p->names[1]);
        return NULL;
    }
    pthread_mutex_lock(&ab->store_lock);
    experiment_start(ab, p, start_event(p), &out, err);
    pthread_mutex_unlock(&ab->store_lock);
    return out;
}

/* resuming */

/* Loads the adapters of a running experiment. If one cannot be loaded, the experiment is suspended,
 * and the name's own content answers all requests. */
static void arms_load(struct ab *ab, struct ab_experiment *e) {
    struct adapter *found[2] = {NULL, NULL};
    struct error err = {0};
    for (int k = 0; k < 2 && err.code == OK; k++) {
        struct error why;
        found[k] = adapter_find_by_hash(ab, spec_string(e, "names", k), spec_string(e, "paths", k),
                                        spec_string(e, "hashes", k), &why);
        if (!found[k]) err = why;
    }
    if (err.code == OK) {
        e->arms[0] = found[0];
        e->arms[1] = found[1];
        return;
    }
    adapter_release(found[0]);
    adapter_release(found[1]);
    problem_set(ab, e, err.text);
}

static int experiments_read(struct ab *ab, struct error *err) {
    for (size_t n = PAGE; n == PAGE;) {
        json_t *page = store_log_list(ab->store, "ab", ab->n, PAGE, err), *v;
        size_t i;
        int rc = page ? OK : err->code;
        json_array_foreach (page, i, v) {
            if (rc == OK) rc = ab_name_check(json_get_string(v, "name"), err);
            if (rc == OK) rc = events_read(ab, experiment_new(ab, json_get_string(v, "name")), err);
        }
        n = json_array_size(page);
        json_decref(page);
        if (rc != OK) return rc;
    }
    return OK;
}

struct ab *ab_open(const struct ab_options *o, struct error *err) {
    struct ab *ab = xcalloc(1, sizeof *ab);
    *ab = (struct ab){.o = *o, .path = xstrdup(o->path)};
    ab->o.path = ab->path;
    pthread_mutex_init(&ab->store_lock, NULL);
    pthread_mutex_init(&ab->table_lock, NULL);
    ab->store = store_open(ab->path, err);
    if (ab->store && experiments_read(ab, err) == OK && feedback_open(ab, err) == OK) return ab;
    ab_close(ab);
    return NULL;
}

void ab_resume(struct ab *ab, const struct strings *models) {
    promotions_restore(ab, models);
    for (int i = 0; i < ab->n; i++) {
        struct ab_experiment *e = ab->v[i];
        if (e->state == RUNNING) arms_load(ab, e);
        experiment_decide(ab, e);
        if (e->state != DELETED) experiment_update_metrics(ab, e);
    }
}

void ab_close(struct ab *ab) {
    if (!ab) return;
    feedback_close(ab);
    for (int i = 0; i < ab->n; i++) {
        experiment_clear(ab->v[i]);
        free(ab->v[i]);
    }
    free(ab->v);
    store_close(ab->store);
    free(ab->path);
    free(ab);
}

/* operations on experiments */

json_t *ab_list(struct ab *ab) {
    json_t *list = json_array();
    pthread_mutex_lock(&ab->store_lock);
    for (int i = 0; i < ab->n; i++)
        if (ab->v[i]->state != DELETED) json_array_append_new(list, experiment_json(ab->v[i]));
    pthread_mutex_unlock(&ab->store_lock);
    return list;
}

json_t *ab_get(struct ab *ab, const char *name, struct error *err) {
    pthread_mutex_lock(&ab->store_lock);
    const struct ab_experiment *e = experiment_find_existing(ab, name, err);
    json_t *out = e ? experiment_json(e) : NULL;
    pthread_mutex_unlock(&ab->store_lock);
    return out;
}

json_t *ab_stop(struct ab *ab, const char *name, struct error *err) {
    json_t *out = NULL;
    pthread_mutex_lock(&ab->store_lock);
    struct ab_experiment *e = experiment_find_existing(ab, name, err);
    if (e && e->state != RUNNING)
        error_set(err, ERR_STATE, "the experiment '%s' has ended already", name);
    else if (e && event_add(ab, e, event_new("stop"), err) == OK)
        out = experiment_json(e);
    pthread_mutex_unlock(&ab->store_lock);
    return out;
}

json_t *ab_delete(struct ab *ab, const char *name, struct error *err) {
    json_t *out = NULL;
    struct metrics *m = ab->o.metrics;
    pthread_mutex_lock(&ab->store_lock);
    struct ab_experiment *e = experiment_find_existing(ab, name, err);
    if (e) out = experiment_json(e);
    if (e && event_add(ab, e, event_new("delete"), err) == OK) {
        metric_remove(m, metric_get(m, METRIC_AB_PAIRS, e->name));
        metric_remove(m, metric_get(m, METRIC_AB_DIFFERENCE, e->name));
    } else {
        json_decref(out);
        out = NULL;
    }
    pthread_mutex_unlock(&ab->store_lock);
    return out;
}
