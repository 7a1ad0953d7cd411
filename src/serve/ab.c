/*
 * ab: experiments, their routes, and the names that were given other content. An experiment is a
 * log of events that is applied to a struct.
 *
 *   start ──> outcome … ──> decided | stop ──> delete ──> start …
 *
 * Invariants. 1. An event is stored before it is applied, and the events determine the state of an
 * experiment. 2. A running experiment holds its adapters: the compared content cannot change,
 * whatever is loaded under their names. 3. "decided" is written when the test has decided; after a
 * kill in between, the next start writes it.
 */
#define _GNU_SOURCE
#include "serve/ab.h"
#include "ops/ops.h"
#include "serve/request_fields.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LIVE_MAX = 64, NAMES_MAX = 4096, PAGE = 256 };

enum state { DELETED, RUNNING, STOPPED, DECIDED };

struct ab_experiment {
    char name[AB_NAME_LEN];
    enum state state;
    int64_t seq, run;   /* events in its log; the index of its start event */
    json_t *spec, *end; /* its start event, and the event that ended it */
    const char *model;  /* borrowed from spec */
    double share;
    bool once; /* one outcome per user counts: `users` [n_users] are those that have one */
    int64_t *users;
    int n_users;
    uint64_t seed;
    struct sequential_test test;
    double *scores[2]; /* [max_pairs] outcomes by side, n of them set */
    int64_t n[2];
    struct adapter *arms[2]; /* both or none; set while it runs */
    char *problem;           /* why it cannot continue, or an error at its end */
    uint64_t drawn, sent[2]; /* requests since the server began */
};

void ab_reply_error(struct exchange *x, const struct error *err) {
    if (err->code == ERR_MISSING)
        api_fail(x, 404, NULL, NULL, "not_found", "%s", err->text);
    else if (err->code == ERR_STATE)
        api_fail(x, 409, NULL, NULL, "conflict", "%s", err->text);
    else
        api_fail_error(x, err, NULL);
}

static struct ab_experiment *experiment_find(const struct ab *ab, const char *name) {
    for (int i = 0; i < ab->n; i++)
        if (strcmp(ab->v[i]->name, name) == 0) return ab->v[i];
    return NULL;
}

static struct ab_experiment *experiment_live(const struct ab *ab, const char *name,
                                             struct error *err) {
    struct ab_experiment *e = experiment_find(ab, name);
    if (e && e->state != DELETED) return e;
    error_set(err, ERR_MISSING, "there is no experiment '%.64s'; GET /v1/ab lists those there are",
              name);
    return NULL;
}

static struct ab_experiment *experiment_on(const struct ab *ab, const char *model) {
    for (int i = 0; i < ab->n; i++)
        if (ab->v[i]->state == RUNNING && strcmp(ab->v[i]->model, model) == 0) return ab->v[i];
    return NULL;
}

static struct ab_experiment *experiment_of(const struct ab *ab, const struct ab_arm *arm) {
    struct ab_experiment *e = arm->run ? experiment_find(ab, arm->name) : NULL;
    return e && e->state != DELETED && e->run == arm->run ? e : NULL;
}

static const char *spec_text(const struct ab_experiment *e, const char *list, int side) {
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
        e->sent[k] = 0;
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
    pthread_mutex_lock(&ab->table);
    free(e->problem);
    e->problem = problem ? xstrdup(problem) : NULL;
    pthread_mutex_unlock(&ab->table);
    if (problem) log_warn("A/B '%s': %s", e->name, problem);
}

/* events */

static json_t *event_new(const char *op) {
    return json_pack("{s:s,s:I}", "op", op, "at", (json_int_t)time(NULL));
}

static bool texts_sound(const json_t *list) {
    return json_is_string_array(list) && json_array_size(list) == 2;
}

static bool start_apply(struct ab_experiment *e, json_t *event) {
    struct sequential_options o;
    json_int_t least, most, seed, at;
    const char *model;
    double share;
    int once;
    bool sound = e->state == DELETED &&
                 json_unpack(event, "{s:s,s:F,s:F,s:I,s:I,s:I,s:I,s:b}", "model", &model, "share",
                             &share, "alpha", &o.alpha, "min_pairs", &least, "max_pairs", &most,
                             "seed", &seed, "at", &at, "once_per_user", &once) == 0 &&
                 share > 0 && share < 1 && o.alpha > 0 && o.alpha < 1 && least >= 1 &&
                 least <= most && most <= SEQUENTIAL_PAIRS_MAX &&
                 texts_sound(json_object_get(event, "names")) &&
                 texts_sound(json_object_get(event, "hashes")) &&
                 texts_sound(json_object_get(event, "paths"));
    if (!sound) return false;
    o.min_pairs = least;
    o.max_pairs = most;
    sequential_init(&e->test, &o);
    for (int k = 0; k < 2; k++) e->scores[k] = xcalloc((size_t)most, sizeof *e->scores[k]);
    e->spec = json_incref(event);
    e->model = model;
    e->share = share;
    e->once = once;
    e->seed = (uint64_t)seed;
    e->run = e->seq + 1;
    e->state = RUNNING;
    return true;
}

static bool user_heard(const struct ab_experiment *e, int64_t user) {
    int i = 0;
    while (i < e->n_users && e->users[i] != user) i++;
    return i < e->n_users;
}

static void user_add(struct ab_experiment *e, int64_t user) {
    if (user == 0 || user_heard(e, user)) return;
    e->users = xrealloc(e->users, sizeof *e->users * (size_t)(e->n_users + 1));
    e->users[e->n_users++] = user;
}

/* Applies a score, and runs the test on all complete pairs. */
static bool outcome_apply(struct ab_experiment *e, json_t *event) {
    json_int_t at, user;
    int side;
    double score;
    if (json_unpack(event, "{s:i,s:I,s:F,s:I}", "side", &side, "place", &at, "score", &score,
                    "user", &user) != 0 ||
        e->state != RUNNING || side < 0 || side > 1 || at < e->test.n || at > e->n[side] ||
        at >= e->test.o.max_pairs || !(score >= 0 && score <= 1))
        return false;
    user_add(e, user);
    e->scores[side][at] = score;
    e->n[side] += at == e->n[side];
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

static bool event_known(struct ab_experiment *e, json_t *event) {
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
    pthread_mutex_lock(&ab->table);
    bool sound = event_known(e, event);
    e->seq += sound;
    pthread_mutex_unlock(&ab->table);
    if (sound) return OK;
    return error_set(err, ERR_FORMAT,
                     "'%s': event %lld of A/B '%s' is damaged; put the file back from a copy, or "
                     "begin with another",
                     ab->path, (long long)e->seq + 1, e->name);
}

/* Appends after the last event of a log that this server knows. An unknown event in that place
 * means that another server writes to the file. */
static int log_add(struct ab *ab, const char *log, int64_t seq, json_t *event, struct error *err) {
    json_t *events = json_pack("[O]", event);
    int rc = store_log_append(ab->store, log, seq + 1, events, err);
    json_decref(events);
    if (rc == ERR_STATE)
        error_wrap(err,
                   "another server has written to '%s', and one at a time may: stop it, and "
                   "start this one again",
                   ab->path);
    return rc;
}

static int event_put(struct ab *ab, const struct ab_experiment *e, json_t *event,
                     struct error *err) {
    char log[AB_NAME_LEN + 3];
    snprintf(log, sizeof log, "ab/%s", e->name);
    return log_add(ab, log, e->seq, event, err);
}

/* Stores the event and applies it to the experiment. Takes the event over. */
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

/* promotions: names that were given other content */

/* The promotion of the name, or NULL. */
static json_t *promoted_get(struct ab *ab, const char *model) {
    struct error none;
    json_t *v = store_document_get(ab->store, "promoted", model, &none);
    if (v && *json_get_string(v, "to")) return v;
    json_decref(v);
    return NULL;
}

/* The adapter with this content: from the pool by name, or else from its path. */
static struct adapter *adapter_like(struct server *s, const char *name, const char *path,
                                    const char *hash, struct error *err) {
    struct adapter *a = adapter_pool_get(s->pool, name, err);
    if (a && strcmp(a->hash, hash) == 0) return a;
    adapter_release(a);
    a = adapter_open(path, s->m, err);
    if (!a || strcmp(a->hash, hash) == 0) return a;
    adapter_release(a);
    error_set(err, ERR_MISMATCH,
              "the adapter '%s' at '%s' has other content than when the experiment began", name,
              path);
    return NULL;
}

/* Restores the promotion unless the model's files were replaced since: then the new files are
 * served. */
static void promotion_restore(struct ab *ab, const char *model, const json_t *v) {
    struct server *s = ab->s;
    struct error err;
    struct adapter *now = adapter_pool_get(s->pool, model, &err), *a = NULL;
    if (now && strcmp(now->hash, json_get_string(v, "from")) == 0) {
        const char *path = json_get_string(v, "path");
        a = adapter_like(s, json_get_string(v, "adapter"), path, json_get_string(v, "to"), &err);
        if (!a || server_adapter_publish(s, model, a, path, &err) != OK)
            log_warn("'%s' is served from its files, without the adapter of A/B '%s': %s", model,
                     json_get_string(v, "experiment"), err.text);
    }
    adapter_release(now);
    adapter_release(a);
}

static void promotions_restore(struct ab *ab) {
    int n;
    struct adapter_entry *list = server_adapters(ab->s, &n);
    for (int i = 0; i < n; i++) {
        json_t *v = promoted_get(ab, list[i].name);
        if (v) promotion_restore(ab, list[i].name, v);
        json_decref(v);
    }
    server_adapters_free(list, n);
}

void ab_on_adapter_loaded(struct server *s, const char *name) {
    struct ab *ab = s->ab;
    struct error err;
    if (!ab) return;
    pthread_mutex_lock(&ab->disk);
    json_t *v = promoted_get(ab, name), *none = json_object();
    if (v && store_document_put(ab->store, "promoted", name, none, &err) != OK)
        log_warn("'%s': %s", name, err.text);
    json_decref(v);
    json_decref(none);
    pthread_mutex_unlock(&ab->disk);
}

/* Stores that the model's name refers to the winner, whose content differs from `now`. "from" is
 * the content of the files before the first of several promotions, which the next start compares
 * with. */
static int promotion_put(struct ab *ab, const struct ab_experiment *e, int winner,
                         const struct adapter *now, struct error *err) {
    json_t *before = promoted_get(ab, e->model);
    bool again = before && strcmp(json_get_string(before, "to"), now->hash) == 0;
    json_t *v = json_pack(
        "{s:s,s:s,s:s,s:s,s:s,s:I}", "from", again ? json_get_string(before, "from") : now->hash,
        "to", e->arms[winner]->hash, "adapter", spec_text(e, "names", winner), "path",
        spec_text(e, "paths", winner), "experiment", e->name, "at", (json_int_t)time(NULL));
    int rc = store_document_put(ab->store, "promoted", e->model, v, err);
    json_decref(v);
    json_decref(before);
    return rc;
}

/* figures */

static json_t *figures_put(const struct ab_experiment *e, json_t *v) {
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
    json_t *v =
        json_pack("{s:s,s:s,s:s,s:s,s:s,s:O,s:O,s:O,s:O,s:O,s:{s:I,s:I},s:{s:I,s:I},s:s?}", "name",
                  e->name, "state", states[e->state], "model", e->model, "a",
                  spec_text(e, "names", 0), "b", spec_text(e, "names", 1), "share",
                  json_object_get(e->spec, "share"), "alpha", json_object_get(e->spec, "alpha"),
                  "min_pairs", json_object_get(e->spec, "min_pairs"), "max_pairs",
                  json_object_get(e->spec, "max_pairs"), "created", json_object_get(e->spec, "at"),
                  "outcomes", "a", (json_int_t)e->n[0], "b", (json_int_t)e->n[1], "requests", "a",
                  (json_int_t)e->sent[0], "b", (json_int_t)e->sent[1], "problem", e->problem);
    json_t *serves = json_object_get(e->end, "serves");
    json_object_set(v, "once_per_user", json_object_get(e->spec, "once_per_user"));
    json_object_set(v, "ended", e->end ? json_object_get(e->end, "at") : json_null());
    json_object_set(v, "serves", serves ? serves : json_null());
    return figures_put(e, v);
}

static void experiment_count(struct ab *ab, const struct ab_experiment *e) {
    const struct sequential_test *t = &e->test;
    metric_set(metric_get(ab->s->metrics, METRIC_AB_PAIRS, e->name), (double)t->n);
    if (t->n)
        metric_set(metric_get(ab->s->metrics, METRIC_AB_DIFFERENCE, e->name),
                   (t->sum[1] - t->sum[0]) / (double)t->n);
}

/* deciding */

/* The side whose content the name gets; -1: it keeps its content. */
static int winning_arm(const struct ab_experiment *e) {
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

/* Ends an experiment whose test has decided. After an error this is tried again with the next
 * rating and at the next start. */
static void experiment_decide(struct ab *ab, struct ab_experiment *e) {
    struct server *s = ab->s;
    struct error err;
    if (e->state != RUNNING || e->test.decision == SEQUENTIAL_CONTINUE || !e->arms[0]) return;
    struct adapter *now = adapter_pool_get(s->pool, e->model, &err);
    int wanted = now ? winning_arm(e) : -1;
    struct adapter *a = wanted >= 0 ? adapter_retain(e->arms[wanted]) : NULL;
    if (a && strcmp(a->hash, now->hash) == 0) wanted = -1;
    json_t *event = figures_put(e, event_new("decided"));
    json_object_set_new(event, "serves", json_string(a ? a->hash : now ? now->hash : ""));
    int rc = decision_put(ab, e, wanted, now, event, &err);
    char *path = xstrdup(spec_text(e, "paths", MAX(wanted, 0)));
    /* Publish before the experiment ends: no request in between gets the loser. */
    if (rc == OK && wanted >= 0) rc = server_adapter_publish(s, e->model, a, path, &err);
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

int64_t ab_outcome_index(struct ab *ab, const struct ab_arm *arm, int64_t at) {
    struct ab_experiment *e = experiment_of(ab, arm);
    if (arm->spare) return -1;
    if (e) experiment_decide(ab, e);
    if (!e || e->state != RUNNING || e->test.decision != SEQUENTIAL_CONTINUE) return -1;
    if (at < 0 && e->once && arm->user && user_heard(e, arm->user)) return -1;
    if (at < 0) at = e->n[arm->side];
    return at < e->test.o.max_pairs ? at : -1;
}

bool ab_outcome_is_used(const struct ab *ab, const struct ab_arm *arm, int64_t at) {
    const struct ab_experiment *e = experiment_of(ab, arm);
    return at >= 0 && (!e || at < e->test.n);
}

json_t *ab_outcome_event(const struct ab_arm *arm, int64_t at, double score, const char *id) {
    json_t *v = event_new("outcome");
    json_object_set_new(v, "side", json_integer(arm->side));
    json_object_set_new(v, "user", json_integer(arm->user));
    json_object_set_new(v, "place", json_integer(at));
    json_object_set_new(v, "score", json_real(score));
    json_object_set_new(v, "id", json_string(id));
    return v;
}

int ab_outcome_put(struct ab *ab, const struct ab_arm *arm, json_t *event, struct error *err) {
    return event_put(ab, experiment_of(ab, arm), event, err);
}

void ab_outcome_apply(struct ab *ab, const struct ab_arm *arm, json_t *event) {
    struct ab_experiment *e = experiment_of(ab, arm);
    struct error err;
    CHECK(event_apply(ab, e, event, &err) == OK); // ab_outcome_index has checked the event
    experiment_decide(ab, e);
    experiment_count(ab, e);
}

/* requests */

static int64_t user_number(const struct ab_experiment *e, const char *user) {
    if (!user || !*user) return 0;
    return (int64_t)((hash_fnv1a(user, strlen(user)) ^ e->seed) >> 11 | 1);
}

/* The side depends on the user, or else on the number of the request since the server began. `at`
 * is in [0, 1); b is below its share. On either side the range next to that border counts, as wide
 * as the smaller side. */
static void arm_assign(const struct ab *ab, struct ab_experiment *e, struct ab_arm *arm) {
    int64_t user = arm->user;
    uint64_t key = user ? (uint64_t)user : e->seed;
    uint32_t id = user ? 0 : (uint32_t)ab->s->started, step = user ? 0 : (uint32_t)e->drawn++;
    struct rng r = rng_make(key, RNG_SELECT, id, step);
    double at = (double)rng_uniform(&r), smaller = fmin(e->share, 1 - e->share);
    arm->side = at < e->share;
    arm->spare = fabs(at - e->share) > smaller;
}

void ab_assign(struct server *s, struct exchange *x, struct model_ref *t, const char *user,
               struct ab_arm *arm) {
    struct ab *ab = s->ab;
    *arm = (struct ab_arm){0};
    if (!ab || t->n != 1 || t->terms[0].weight != 1.0f) return;
    pthread_mutex_lock(&ab->table);
    struct ab_experiment *e = experiment_on(ab, t->label);
    if (e && e->arms[0]) {
        arm->run = e->run;
        arm->user = user_number(e, user);
        arm_assign(ab, e, arm);
        memcpy(arm->name, e->name, sizeof arm->name);
        e->sent[arm->side]++;
        adapter_release(t->terms[0].adapter);
        t->terms[0].adapter = adapter_retain(e->arms[arm->side]);
        free(t->label);
        t->label = xstrdup(spec_text(e, "names", arm->side));
    }
    pthread_mutex_unlock(&ab->table);
    if (!arm->run) return;
    char said[AB_NAME_LEN + 2];
    snprintf(said, sizeof said, "%s/%c", arm->name, "ab"[arm->side]);
    exchange_add_header(x, "X-Shoal-AB", said);
}

/* beginning */

/* The fields of a request for an experiment, and its adapters. */
struct experiment_spec {
    const char *name;
    char *names[3]; /* names of the model, a and b */
    struct adapter *arms[2];
    double share, alpha;
    int64_t min_pairs, max_pairs;
    bool once;
};

static void experiment_spec_release(struct experiment_spec *p) {
    for (int i = 0; i < 3; i++) free(p->names[i]);
    for (int k = 0; k < 2; k++) adapter_release(p->arms[k]);
}

/* Names appear in headers and logs. */
static int name_check(const char *name, struct error *err) {
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t n = strlen(name);
    if (n > 0 && n < AB_NAME_LEN && strspn(name, letters) == n) return OK;
    return error_set(err, ERR_USAGE,
                     "'name' of an experiment must be 1 to %d letters, digits, '.', '_' or '-'",
                     AB_NAME_LEN - 1);
}

/* The name of a single adapter, and its current content if `out` is given. */
static int adapter_read(struct server *s, const json_t *body, const char *key, const char *fallback,
                        char **name, struct adapter **out, struct error *err) {
    const char *model = fallback;
    struct model_ref t;
    if (json_read_string(body, key, &model, err) != OK) return err->code;
    if (!model) return error_set(err, ERR_USAGE, "'%s' must name an adapter", key);
    if (model_ref_resolve(s, model, &t, err) != OK) return error_wrap(err, "'%s'", key);
    if (t.n != 1 || t.terms[0].weight != 1.0f || strcmp(t.label, "mix") == 0) {
        model_ref_release(&t);
        return error_set(err, ERR_USAGE, "'%s' must be one adapter, and '%.140s' is not", key,
                         model);
    }
    *name = xstrdup(t.label);
    if (out) *out = adapter_retain(t.terms[0].adapter);
    model_ref_release(&t);
    return OK;
}

static int experiment_spec_read(struct server *s, const json_t *body, struct experiment_spec *p,
                                struct error *err) {
    *p = (struct experiment_spec){
        .name = "", .share = 0.5, .alpha = 0.05, .min_pairs = 20, .max_pairs = 1000, .once = true};
    if (json_read_name(body, "name", &p->name, err) != OK || name_check(p->name, err) != OK ||
        adapter_read(s, body, "model", NULL, &p->names[0], NULL, err) != OK ||
        adapter_read(s, body, "a", p->names[0], &p->names[1], &p->arms[0], err) != OK ||
        adapter_read(s, body, "b", NULL, &p->names[2], &p->arms[1], err) != OK ||
        json_read_number(body, "share", 0.01, 0.99, &p->share, err) != OK ||
        json_read_bool(body, "once_per_user", &p->once, err) != OK ||
        json_read_number(body, "alpha", 1e-6, 0.5, &p->alpha, err) != OK ||
        json_read_int(body, "max_pairs", 1, SEQUENTIAL_PAIRS_MAX, &p->max_pairs, err) != OK)
        return err->code;
    p->min_pairs = MIN(p->min_pairs, p->max_pairs);
    if (json_read_int(body, "min_pairs", 1, p->max_pairs, &p->min_pairs, err) != OK)
        return err->code;
    if (strcmp(p->arms[0]->hash, p->arms[1]->hash) == 0)
        return error_set(err, ERR_USAGE,
                         "'%s' and '%s' have the same content: there is nothing to find out",
                         p->names[1], p->names[2]);
    return OK;
}

/* The absolute path of the adapter's files, so that the next start may use another working
 * folder. */
static json_t *path_of(struct server *s, const char *name) {
    int n;
    struct adapter_entry *list = server_adapters(s, &n);
    json_t *v = json_string("");
    for (int i = 0; i < n; i++) {
        if (strcmp(list[i].name, name) != 0) continue;
        char *real = realpath(list[i].path, NULL);
        json_t *path = json_string(real ? real : list[i].path);
        free(real);
        if (path) {
            json_decref(v);
            v = path;
        }
    }
    server_adapters_free(list, n);
    return v;
}

static json_t *start_event(struct server *s, const struct experiment_spec *p) {
    json_t *v = event_new("start");
    char *seed = xasprintf("%s %lld %s", p->name, (long long)time(NULL), p->arms[1]->hash);
    json_t *more = json_pack(
        "{s:s,s:[ss],s:[ss],s:[oo],s:f,s:f,s:I,s:I,s:I,s:b}", "model", p->names[0], "names",
        p->names[1], p->names[2], "hashes", p->arms[0]->hash, p->arms[1]->hash, "paths",
        path_of(s, p->names[1]), path_of(s, p->names[2]), "share", p->share, "alpha", p->alpha,
        "min_pairs", (json_int_t)p->min_pairs, "max_pairs", (json_int_t)p->max_pairs, "seed",
        (json_int_t)(hash_fnv1a(seed, strlen(seed)) >> 12), "once_per_user", p->once);
    json_object_update(v, more);
    json_decref(more);
    free(seed);
    return v;
}

/* Adds an experiment to the table; its log may have events already. */
static struct ab_experiment *experiment_new(struct ab *ab, const char *name) {
    struct ab_experiment *e = xcalloc(1, sizeof *e);
    snprintf(e->name, sizeof e->name, "%s", name);
    pthread_mutex_lock(&ab->table);
    ab->v = xrealloc(ab->v, sizeof *ab->v * (size_t)(ab->n + 1));
    ab->v[ab->n++] = e;
    pthread_mutex_unlock(&ab->table);
    return e;
}

static int start_check(const struct ab *ab, const struct experiment_spec *p, struct error *err) {
    const struct ab_experiment *e = experiment_find(ab, p->name);
    int live = 0;
    for (int i = 0; i < ab->n; i++) live += ab->v[i]->state != DELETED;
    if (e && e->state != DELETED)
        return error_set(err, ERR_STATE, "there is an experiment '%s'; delete it first", p->name);
    if ((e = experiment_on(ab, p->names[0])))
        return error_set(err, ERR_STATE, "the experiment '%s' runs on '%s'; stop it first", e->name,
                         p->names[0]);
    if (!e && ab->n >= NAMES_MAX)
        return error_set(err, ERR_STATE,
                         "experiments have had %d names, which are kept; use one of a deleted one",
                         NAMES_MAX);
    if (live >= LIVE_MAX)
        return error_set(err, ERR_STATE, "there are %d experiments; delete some first", LIVE_MAX);
    return OK;
}

static int experiment_start(struct ab *ab, struct experiment_spec *p, json_t **out,
                            struct error *err) {
    json_t *event = start_event(ab->s, p), *name = json_pack("{s:s}", "name", p->name);
    struct ab_experiment *e = experiment_find(ab, p->name), fresh = {0};
    snprintf(fresh.name, sizeof fresh.name, "%s", p->name);
    int rc = start_check(ab, p, err);
    if (rc == OK) rc = store_begin(ab->store, err);
    if (rc == OK && !e) rc = log_add(ab, "ab", ab->n, name, err);
    if (rc == OK) rc = event_put(ab, e ? e : &fresh, event, err);
    if (rc == OK) rc = store_commit(ab->store, err);
    if (rc != OK) store_rollback(ab->store);
    if (rc == OK && !e) e = experiment_new(ab, p->name);
    if (rc == OK) rc = event_apply(ab, e, event, err);
    if (rc == OK) {
        pthread_mutex_lock(&ab->table);
        for (int k = 0; k < 2; k++) e->arms[k] = adapter_retain(p->arms[k]);
        pthread_mutex_unlock(&ab->table);
        experiment_count(ab, e);
        *out = experiment_json(e);
    }
    json_decref(event);
    json_decref(name);
    return rc;
}

/* resuming */

/* Without its adapters an experiment waits, and the name's own content answers all requests. */
static void arms_find(struct ab *ab, struct ab_experiment *e) {
    struct adapter *found[2] = {NULL, NULL};
    struct error err = {0};
    for (int k = 0; k < 2 && err.code == OK; k++) {
        struct error why;
        found[k] = adapter_like(ab->s, spec_text(e, "names", k), spec_text(e, "paths", k),
                                spec_text(e, "hashes", k), &why);
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
            if (rc == OK) rc = name_check(json_get_string(v, "name"), err);
            if (rc == OK) rc = events_read(ab, experiment_new(ab, json_get_string(v, "name")), err);
        }
        n = json_array_size(page);
        json_decref(page);
        if (rc != OK) return rc;
    }
    return OK;
}

int ab_open(struct server *s, struct error *err) {
    struct ab *ab = xcalloc(1, sizeof *ab);
    *ab = (struct ab){.s = s, .path = path_join(s->o->state_dir, "ab.db")};
    pthread_mutex_init(&ab->disk, NULL);
    pthread_mutex_init(&ab->table, NULL);
    s->ab = ab;
    ab->store = store_open(ab->path, err);
    if (!ab->store || experiments_read(ab, err) != OK || feedback_open(ab, err) != OK)
        return err->code;
    promotions_restore(ab);
    for (int i = 0; i < ab->n; i++) {
        struct ab_experiment *e = ab->v[i];
        if (e->state == RUNNING) arms_find(ab, e);
        experiment_decide(ab, e);
        if (e->state != DELETED) experiment_count(ab, e);
    }
    return OK;
}

void ab_close(struct server *s) {
    struct ab *ab = s->ab;
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
    s->ab = NULL;
}

/* routes */

static void start_handle(void *ctx, struct exchange *x) {
    struct server *s = ctx;
    struct experiment_spec p = {0};
    struct error err;
    json_t *body = request_memory_json(ctx, x, &err), *out = NULL;
    int rc = body ? OK : err.code;
    if (rc == OK && !s->ab->replies)
        rc = error_set(&err, ERR_STATE,
                       "an experiment needs ratings: start the server without "
                       "--no-feedback");
    if (rc == OK) rc = experiment_spec_read(s, body, &p, &err);
    if (rc == OK) {
        pthread_mutex_lock(&s->ab->disk);
        rc = experiment_start(s->ab, &p, &out, &err);
        pthread_mutex_unlock(&s->ab->disk);
    }
    if (rc == OK)
        exchange_reply_json(x, 200, out);
    else
        ab_reply_error(x, &err);
    experiment_spec_release(&p);
    json_decref(body);
}

static void list_handle(void *ctx, struct exchange *x) {
    struct ab *ab = ((struct server *)ctx)->ab;
    json_t *list = json_array();
    pthread_mutex_lock(&ab->disk);
    for (int i = 0; i < ab->n; i++)
        if (ab->v[i]->state != DELETED) json_array_append_new(list, experiment_json(ab->v[i]));
    pthread_mutex_unlock(&ab->disk);
    exchange_reply_json(x, 200, json_pack("{s:s,s:o}", "object", "list", "data", list));
}

/* Answers with the experiment after the operation, or before it was deleted. */
static void experiment_answer(struct ab *ab, struct exchange *x, const char *name, const char *op) {
    struct error err;
    json_t *out = NULL;
    pthread_mutex_lock(&ab->disk);
    struct ab_experiment *e = experiment_live(ab, name, &err);
    int rc = e ? OK : err.code;
    bool deleted = op && strcmp(op, "delete") == 0;
    if (rc == OK && op && !deleted && e->state != RUNNING)
        rc = error_set(&err, ERR_STATE, "the experiment '%s' has ended already", name);
    if (rc == OK && deleted) out = experiment_json(e);
    if (rc == OK && op) rc = event_add(ab, e, event_new(op), &err);
    if (rc == OK && deleted)
        for (int i = 0; i < 2; i++)
            metric_remove(
                ab->s->metrics,
                metric_get(ab->s->metrics, i ? METRIC_AB_DIFFERENCE : METRIC_AB_PAIRS, e->name));
    if (rc == OK && !deleted) out = experiment_json(e);
    pthread_mutex_unlock(&ab->disk);
    if (rc == OK) {
        exchange_reply_json(x, 200, out);
        return;
    }
    json_decref(out);
    ab_reply_error(x, &err);
}

static void one_handle(void *ctx, struct exchange *x) {
    experiment_answer(((struct server *)ctx)->ab, x, exchange_wildcard(x), NULL);
}

static void delete_handle(void *ctx, struct exchange *x) {
    experiment_answer(((struct server *)ctx)->ab, x, exchange_wildcard(x), "delete");
}

static void stop_handle(void *ctx, struct exchange *x) {
    const char *rest = exchange_wildcard(x), *verb = strchr(rest, '/');
    if (!verb || strcmp(verb, "/stop") != 0) {
        api_fail(x, 404, NULL, NULL, "not_found", "there is POST /v1/ab and /v1/ab/NAME/stop");
        return;
    }
    char *name = xstrndup(rest, (size_t)(verb - rest));
    experiment_answer(((struct server *)ctx)->ab, x, name, "stop");
    free(name);
}

const struct http_route ab_routes[] = {
    {"POST", "/v1/ab", SCOPE_ADMIN, start_handle},
    {"GET", "/v1/ab", SCOPE_ADMIN, list_handle},
    {"GET", "/v1/ab/*", SCOPE_ADMIN, one_handle},
    {"POST", "/v1/ab/*", SCOPE_ADMIN, stop_handle},
    {"DELETE", "/v1/ab/*", SCOPE_ADMIN, delete_handle},
    {0},
};
