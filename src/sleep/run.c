/*
 * run: one sleep of a user: training lines, measurements, training, gate, publication.
 *
 *     OUT/.sleep/recipe          hash of everything that determines the training
 *     OUT/.sleep/lines.jsonl     its training lines, mode 0600
 *     OUT/.sleep/checkpoint.bin  its state
 *
 * The folder exists while a run is unfinished. A run with another recipe, because memories or
 * options have changed, replaces it.
 */
#define _GNU_SOURCE
#include "hub/hub.h"
#include "sleep/internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct sleep_work {
    const struct sleep_env *env;
    const struct sleep_options *o;
    struct sleep_facts facts;
    struct sleep_start start;
    struct sleep_rehearsal rehearsal;
    struct sleep_measure measure;
    char *dir;                                     /* OUT/.sleep */
    struct adapter *trained_from, *before, *after; /* of the training; of the measurements */
    json_t *result;
};

/* training */

static void recipe_hash(const struct sleep_work *w, const struct buf *lines, char out[HASH_LEN]) {
    json_t *options = options_json(train_option_rows, &w->o->learn.train);
    char *text = json_canonical(options);
    struct sha256 h;
    sha256_init(&h);
    sha256_update(&h, lines->data, lines->len + 1);
    sha256_update(&h, text, strlen(text) + 1);
    sha256_update(&h, w->start.hash, strlen(w->start.hash) + 1);
    sha256_update(&h, w->env->m->hash, HASH_LEN);
    sha256_final(&h, out);
    free(text);
    json_decref(options);
}

static bool recipe_is(const char *path, const char *hash) {
    struct buf text = {0};
    struct error ignored;
    const bool same = path_exists(path) && file_read(path, HASH_LEN, &text, &ignored) == OK &&
                      text.data && strcmp(text.data, hash) == 0;
    buf_release(&text);
    return same;
}

/* Writes the training lines, *all of them, and deletes the state of a run with another recipe. */
static int lines_write(struct sleep_work *w, int64_t *all, struct error *err) {
    struct buf lines = {0};
    char hash[HASH_LEN], *recipe = path_join(w->dir, "recipe"),
                         *path = path_join(w->dir, "lines.jsonl");
    sleep_facts_write(&w->facts, &lines);
    const int64_t n = sleep_rehearsal_write(&w->rehearsal, w->o, &lines);
    recipe_hash(w, &lines, hash);
    if (!recipe_is(recipe, hash)) tree_delete(w->dir);
    int rc = dir_make_private(w->dir, err);
    if (rc == OK) rc = file_write_private(recipe, hash, strlen(hash), err);
    if (rc == OK) rc = file_write_private(path, lines.data, lines.len, err);
    *all = SLEEP_QUESTIONS * (int64_t)w->facts.n + n;
    json_object_set_new(w->result, "lines", json_integer(SLEEP_QUESTIONS * w->facts.n));
    json_object_set_new(w->result, "rehearsal", json_integer((json_int_t)n));
    buf_release(&lines);
    free(recipe);
    free(path);
    return rc;
}

static int request_run(struct sleep_work *w, struct train_request *q, struct error *err) {
    char *checkpoint = path_join(w->dir, "checkpoint.bin");
    struct train_job *job = &q->jobs[0];
    job->keep_samples = false;
    job->longest_measured = w->measure.longest;
    if (w->trained_from) job->start = adapter_retain(w->trained_from);
    int rc = train_run(q, checkpoint, NULL, err);
    if (rc == OK) {
        w->after = adapter_retain(job->result);
        json_object_set_new(w->result, "first_loss", json_real(job->first_loss));
        json_object_set_new(w->result, "last_loss", json_real(job->last_loss));
    }
    free(checkpoint);
    return rc;
}

/* Unless the user sets them: more passes over the n lines than `shoal train` makes, because a fact
 * must be known word for word, and a lower learning rate, because other tasks then change less. */
static void schedule_set(struct train_options *o, int64_t n, const struct model *m) {
    enum { MIN_PASSES = 7, MAX_PASSES = 25, MIN_UPDATES = 200 };
    const double lr_share = 0.4;
    struct train_options usual = *o;
    train_options_adapt(&usual, n, m->config.d_model);
    const int64_t passes = MIN_UPDATES * usual.bsz * usual.grad_accum / n;
    if (o->lr == 0) o->lr = lr_share * usual.lr;
    if (o->epochs == 0 && o->max_steps == 0)
        o->epochs = (double)MIN(MAX(passes, MIN_PASSES), MAX_PASSES);
}

static int adapter_train(struct sleep_work *w, struct error *err) {
    const size_t limit = memory_limit_get();
    char *file = xasprintf("adapter=%s/lines.jsonl", w->dir), *files[] = {file};
    const struct strings data = {files, 1};
    struct train_settings s = sleep_train_settings(w->o, &data);
    struct train_request q = {0};
    int64_t n;
    int rc = lines_write(w, &n, err);
    if (rc == OK) {
        schedule_set(&s.train, n, w->env->m);
        rc = train_request_open(&q, &s, w->env->m, w->env->pool, err);
        if (rc == OK) rc = request_run(w, &q, err);
        train_request_close(&q);
        memory_limit_set(limit);
    }
    if (rc == OK && !adapter_is_ready(w->after)) rc = adapter_bind(w->after, w->env->exact, err);
    free(file);
    return rc;
}

/* gate */

static int64_t count(const uint8_t *right, int64_t n) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += right[i];
    return sum;
}

/* Whether the result may be published; sets the reason. */
static bool gate_passes(struct sleep_work *w) {
    const struct sleep_measure *q = &w->measure;
    const int64_t n = q->n_recall, before = count(q->recall[0], n), after = count(q->recall[1], n);
    const int64_t lost = count(q->retain[0], q->n_retain) - count(q->retain[1], q->n_retain);
    const double points = q->n_retain ? 100 * (double)lost / (double)q->n_retain : 0;
    char *why;
    bool passes = false;
    if (after <= before)
        why = xasprintf("recall did not improve: %lld of %lld answers before, %lld after",
                        (long long)before, (long long)n, (long long)after);
    else if (points > w->o->points)
        why = xasprintf("the accuracy on '%s' fell by %.1f points, more than %g", w->rehearsal.name,
                        points, w->o->points);
    else {
        why = xstrdup(q->n_retain ? "recall improved, and other tasks are retained"
                                  : "recall improved; other tasks were not measured");
        passes = true;
    }
    json_object_set_new(w->result, "why", json_string(why));
    free(why);
    return passes;
}

/* The members of version.json about the run. */
static json_t *notes_make(const struct sleep_work *w) {
    const int64_t n = w->measure.n_recall;
    return json_pack("{s:f,s:{s:s,s:s,s:s,s:O,s:O,s:O}}", "score",
                     (double)count(w->measure.recall[1], n) / (double)MAX(n, 1), "sleep", "user",
                     w->o->user, "start", w->start.hash, "base", w->start.base, "memories",
                     json_object_get(w->result, "learned"), "recall",
                     json_object_get(w->result, "recall"), "retention",
                     json_object_get(w->result, "retention"));
}

/* Publishes the result. The initial adapter of a first sleep becomes a version before it, so that a
 * rollback restores it, and a later run finds it. */
static int result_publish(struct sleep_work *w, struct error *err) {
    const char *out = w->o->learn.out, *base = w->env->m->name;
    json_t *notes = notes_make(w);
    int rc = OK;
    if (!adapter_exists(out) && w->trained_from)
        rc = adapter_publish(w->trained_from, out, base, NULL, err);
    if (rc == OK) rc = adapter_publish(w->after, out, base, notes, err);
    if (rc == OK) {
        json_object_set_new(w->result, "published", json_true());
        json_object_set_new(w->result, "dir", json_from_path(out));
        json_object_set_new(w->result, "hash", json_string(w->after->hash));
    }
    json_decref(notes);
    return rc;
}

/* the run */

static int phase_measure(struct sleep_work *w, struct adapter *a, int phase, struct error *err) {
    return sleep_measure_run(&w->measure, w->env, &w->o->learn.limits, &w->facts, a, phase, err);
}

static int learn(struct sleep_work *w, struct error *err) {
    const struct sleep_env *env = w->env;
    const char *dir = w->start.dir;
    int rc = sleep_measure_open(&w->measure, env->m, w->o, &w->facts, &w->rehearsal, err);
    if (rc == OK && dir && !(w->trained_from = adapter_open(dir, env->m, err))) rc = err->code;
    if (rc == OK && dir && !(w->before = adapter_open(dir, env->exact, err))) rc = err->code;
    if (rc == OK) rc = phase_measure(w, w->before, 0, err);
    if (rc == OK) rc = adapter_train(w, err);
    if (rc == OK) rc = phase_measure(w, w->after, 1, err);
    if (rc != OK) return rc;
    json_object_set_new(w->result, "recall", sleep_recall_json(&w->measure));
    json_object_set_new(w->result, "retention", sleep_retention_json(&w->measure));
    json_object_set_new(w->result, "learned",
                        sleep_learned_json(&w->measure, &w->facts, w->start.unlearned));
    if (gate_passes(w)) rc = result_publish(w, err);
    if (rc == OK) tree_delete(w->dir);
    return rc;
}

/* Nothing can be learned. If the current version knows forgotten memories, the base replaces it. */
static int without_memories(struct sleep_work *w, struct error *err) {
    const char *out = w->o->learn.out;
    char hash[HASH_LEN];
    if (!w->start.knows_forgotten)
        return error_set(err, ERR_STATE,
                         "user '%s' has no memories to learn; 'shoal memory learn TEXT' adds some",
                         w->o->user);
    if (!w->start.dir)
        return error_set(err, ERR_STATE,
                         "the memories that '%s' has learned are all forgotten, and there was no "
                         "adapter before it; delete this directory",
                         out);
    if (adapter_rollback(out, &w->env->m->config, w->start.base, hash, err) != OK) return err->code;
    json_object_set_new(w->result, "why",
                        json_string("no memories are left; the adapter before the first sleep is "
                                    "restored"));
    json_object_set_new(w->result, "published", json_true());
    json_object_set_new(w->result, "dir", json_from_path(out));
    json_object_set_new(w->result, "hash", json_string(hash));
    return OK;
}

static json_t *result_new(const struct sleep_work *w) {
    return json_pack("{s:s,s:i,s:i,s:s,s:s,s:O,s:b,s:b,s:s}", "user", w->o->user, "memories",
                     w->facts.n_memories, "facts", w->facts.n, "start", w->start.hash, "base",
                     w->start.base, "versions", w->start.versions, "up_to_date",
                     (int)w->start.up_to_date, "published", 0, "why",
                     "the current version has learned all memories");
}

static int run_locked(struct sleep_work *w, struct error *err) {
    int rc = sleep_facts_open(w->o, &w->facts, err);
    if (rc == OK) rc = sleep_start_find(w->o, &w->facts, &w->env->m->config, &w->start, err);
    if (rc == OK) rc = sleep_rehearsal_open(w->o, &w->rehearsal, err);
    if (rc != OK) return rc;
    w->result = result_new(w);
    if (w->facts.n == 0) return without_memories(w, err);
    if (w->start.up_to_date) return OK;
    return learn(w, err);
}

static void work_release(struct sleep_work *w) {
    adapter_release(w->trained_from);
    adapter_release(w->before);
    adapter_release(w->after);
    sleep_measure_release(&w->measure);
    sleep_rehearsal_release(&w->rehearsal);
    sleep_start_release(&w->start);
    sleep_facts_release(&w->facts);
    free(w->dir);
}

json_t *sleep_run(const struct sleep_env *env, const struct sleep_options *o, struct error *err) {
    const char *out = o->learn.out;
    struct sleep_work w = {.env = env, .o = o, .dir = path_join(out, ".sleep")};
    int rc = dir_make(out, err), lock = -1;
    if (rc == OK && (lock = dir_lock(out, "folder", err)) < 0) rc = lock;
    if (rc == OK) rc = run_locked(&w, err);
    work_release(&w);
    dir_unlock(lock, out);
    rmdir(out); // succeeds only if it is empty: nothing was published
    if (rc == OK) return w.result;
    json_decref(w.result);
    return NULL;
}

/* report */

static void paired_print(const char *what, const json_t *v, FILE *f) {
    const json_t *before = json_object_get(v, "before"), *after = json_object_get(v, "after");
    if (!json_is_object(v)) return;
    fprintf(f, "%-16s n = %lld, %.1f %% to %.1f %% (%.1f … %.1f), %+.1f points (%+.1f … %+.1f)\n",
            what, (long long)json_get_number(v, "n"), 100 * json_get_number(before, "value"),
            100 * json_get_number(after, "value"), 100 * json_get_number(after, "lo"),
            100 * json_get_number(after, "hi"), 100 * json_get_number(v, "change"),
            100 * json_get_number(v, "lo"), 100 * json_get_number(v, "hi"));
}

void sleep_print(const json_t *result, FILE *f) {
    const json_t *retention = json_object_get(result, "retention"), *set;
    const char *start = json_get_string(result, "start");
    size_t i;
    fprintf(f, "user '%s': %lld memories, starting from %.*s\n", json_get_string(result, "user"),
            (long long)json_get_number(result, "memories"), *start ? 12 : -1,
            *start ? start : "a new adapter");
    sleep_forgotten_print(json_object_get(result, "versions"), f);
    paired_print("recall", json_object_get(result, "recall"), f);
    paired_print("retention", retention, f);
    if (json_array_size(json_object_get(retention, "sets")) > 1)
        json_array_foreach (json_object_get(retention, "sets"), i, set) {
            char *name = xasprintf("  %s", json_get_string(set, "name"));
            paired_print(name, set, f);
            free(name);
        }
    if (json_is_true(json_object_get(result, "published")))
        fprintf(f, "published '%s', %.12s: %s\n", json_get_string(result, "dir"),
                json_get_string(result, "hash"), json_get_string(result, "why"));
    else
        fprintf(f, "nothing is published: %s\n", json_get_string(result, "why"));
}
