/*
 * run: a recorded training run. Its record is made before the training; the gate and the
 * publication follow the training.
 *
 * RUNS/ID/ holds train.jsonl, report.html and, if requested, event files of TensorBoard;
 * RUNS/shoal.db holds the same as rows. ID is a function of the output directory, the model and the
 * options, so a repeated command resumes its run or, if that is complete, replaces it.
 *
 * Two rules of order. 1. Every condition that could prevent the publication (an unreadable held-out
 * file, an existing adapter that cannot be kept, a folder that cannot be written) is checked before
 * the training. 2. An adapter that the gate rejects is written next to its target before a message
 * reports the rejection.
 */
#define _GNU_SOURCE
#include "hub/hub.h"
#include "train/train_loop.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ROW(name, type, field, fallback, min, max, metavar, ...)                                   \
    { name, type, offsetof(struct gate_options, field), fallback, min, max, metavar, __VA_ARGS__ }

const struct option_row gate_option_rows[] = {
    ROW("runs", OPT_STRING, runs, "runs", 0, 0, "DIR", "folder of runs and of shoal.db",
        JOB_ARG_SERVER_ONLY),
    ROW("tensorboard", OPT_BOOL, tensorboard, NULL, 0, 0, NULL,
        "also write the figures of train.jsonl as event files for TensorBoard, in the run's "
        "folder"),
    ROW("eval-data", OPT_LIST, eval_data, NULL, 0, 0, "FILE",
        "held-out conversations: an adapter is published only if it is better on them than the "
        "current one; NAME=FILE for one of several adapters",
        JOB_ARG_NAMED_FILE),
    ROW("gate-alpha", OPT_FLOAT, alpha, "0.05", 1e-6, 1, "P",
        "largest p-value at which an adapter counts as better"),
    ROW("retain-data", OPT_LIST, retain_data, NULL, 0, 0, "FILE",
        "conversations that must not become worse; NAME=FILE for one of several adapters",
        JOB_ARG_NAMED_FILE),
    ROW("retain-tolerance", OPT_FLOAT, tolerance, "0.05", 0, 100, "X",
        "largest increase of the loss on the retained data, in nats per token"),
    ROW("retain", OPT_STRING, retain, NULL, 0, 0, "LIST",
        "task families that must not become worse: names, starter or fry", JOB_ARG_TEXT),
    ROW("retain-n", OPT_INT, retain_n, "500", 1, 1e6, "N", "questions per family of --retain"),
    ROW("retain-points", OPT_FLOAT, points, "1", 0, 100, "X",
        "accuracy that a family of --retain may lose, in points"),
    ROW("tags", OPT_LIST, tags, NULL, 0, 0, "TAG",
        "tags that are stored with the version, for 'shoal adapter list'", JOB_ARG_TEXT),
    {0},
};

/* Seed of the questions for --retain. The questions are from the dev split, so that test questions
 * stay unused. */
enum { RETAIN_SEED = 1000003 };

struct gated_job { /* a train_job, and the data of its quality gate */
    const char *name;
    char *dir;
    /* the existing adapter, or else the initial one; NULL: the base model */
    struct adapter *baseline;
    struct dataset eval, retain;
    char *where; /* directory that the result was written to; malloc'ed */
    struct train_result result;
};
struct recorded_run {
    const struct train_request *q;
    enum dtype kv; /* type of keys and values, in training and in measurements */
    const struct train_output *o;
    const struct gate_options *gate;
    char *id, *dir;
    int lock; /* of `dir`: the run is not interrupted */
    struct store *store;
    struct train_log *log;
    struct gated_job *gated_jobs; /* [q->n] */
    int n_rejected;
    bool retain_families[MAX_FAMILIES]; /* families of --retain */
};

const char *data_file_for_adapter(const struct strings *list, const char *name) {
    const char *common = NULL;
    size_t len = strlen(name);
    for (int i = 0; i < list->n; i++) {
        const char *v = list->v[i];
        if (strncmp(v, name, len) == 0 && v[len] == '=') return v + len + 1;
        if (!strchr(v, '=')) common = v;
    }
    return common;
}

static int data_open(struct dataset *d, const struct strings *list, const char *what,
                     const struct gated_job *t, const struct model *m, struct error *err) {
    const char *file = data_file_for_adapter(list, t->name);
    if (!file) return OK;
    if (dataset_load(d, file, NULL, m->tok, m->config.max_seq_len, err) == OK) return OK;
    return error_wrap(err, "%s of '%s'", what, t->name);
}

/* Opens the adapter that the result is compared with: the existing adapter, or else the adapter
 * that training starts from. If there is neither, the baseline stays NULL: the base model. */
static int baseline_open(struct gated_job *t, const struct train_job *job, struct model *m,
                         struct error *err) {
    json_t *versions = adapter_versions(t->dir, err); // also finishes an interrupted installation
    bool exists = adapter_exists(t->dir);
    int rc = versions ? OK : err->code;
    if (rc == OK && exists) t->baseline = adapter_open(t->dir, m, err);
    if (rc == OK && exists && !t->baseline)
        rc = error_wrap(err, "'%s' holds an adapter that cannot be kept; choose another --out",
                        t->dir);
    if (rc == OK && !exists && job->start) t->baseline = adapter_retain(job->start);
    json_decref(versions);
    return rc;
}

/* Refuses held-out samples that the adapter which the job continues was trained on. Training has a
 * check of its own data (train_loop_check_data). If only their questions are in that data, or in
 * those of the existing adapter, the comparison is less reliable, which is a warning. */
static int held_out_check(const struct recorded_run *r, const struct gated_job *t,
                          const struct train_job *job, struct error *err) {
    const char *file = data_file_for_adapter(&r->gate->eval_data, t->name);
    const struct adapter *a = job->start ? job->start : t->baseline;
    struct contamination c;
    if (!file || !a || !a->training_data) return OK;
    int rc = contamination_of_file(&c, a->training_data, file, err);
    if (rc == OK && job->start && c.answered)
        rc = error_set(err, ERR_STATE,
                       "%lld of %lld evaluation samples in '%s' are in the data that the adapter "
                       "which '%s' continues was trained on (such as '%s'): nothing can be "
                       "measured on them; hold out other samples, or continue another adapter",
                       (long long)c.answered, (long long)c.of, file, t->name, c.example);
    else if (rc == OK && c.questions)
        log_warn("'%s': the questions of %lld of %lld evaluation samples are in the data that the "
                 "earlier adapter was trained on (such as '%s'), %lld of them with other words",
                 t->name, (long long)c.questions, (long long)c.of, c.example, (long long)c.near);
    contamination_release(&c);
    return rc;
}

static bool name_is_valid(const char *name) {
    json_t *v = json_string(name);
    bool good = v && *name;
    json_decref(v);
    return good;
}

static int gated_job_open(struct recorded_run *r, struct gated_job *t, const struct train_job *job,
                          struct error *err) {
    t->name = job->name;
    t->dir = r->o->subfolders ? path_join(r->o->dir, job->name) : xstrdup(r->o->dir);
    t->result.job = job;
    if (!name_is_valid(job->name))
        return error_set(err, ERR_USAGE, "an adapter's name must be UTF-8 and not empty");
    int rc = baseline_open(t, job, r->q->m, err);
    const struct adapter_config activation = train_job_activation(job);
    if (rc == OK) rc = data_open(&t->eval, &r->gate->eval_data, "eval data", t, r->q->m, err);
    if (rc == OK && dataset_activate(&t->eval, &activation, err))
        rc = error_wrap(err, "eval data of '%s'", t->name);
    if (rc == OK) rc = data_open(&t->retain, &r->gate->retain_data, "retain data", t, r->q->m, err);
    if (rc == OK) rc = held_out_check(r, t, job, err);
    return rc;
}

char *run_id_make(const char *kind, const char *out, const json_t *recipe) {
    char *text = json_canonical(recipe), *path = path_absolute(out), slug[25] = "";
    const char *name = path_name(path);
    struct sha256 h;
    char hash[HASH_LEN];
    size_t n = 0;
    for (const char *p = name; *p && n + 1 < sizeof slug; p++)
        if ((*p >= '0' && *p <= '9') || ((*p | 32) >= 'a' && (*p | 32) <= 'z') || *p == '-' ||
            *p == '_')
            slug[n++] = *p;
    sha256_init(&h);
    sha256_update(&h, path, strlen(path) + 1);
    sha256_update(&h, text, strlen(text));
    sha256_final(&h, hash);
    free(text);
    free(path);
    return xasprintf("%s-%s%s%.8s", kind, slug, *slug ? "-" : "", hash);
}

/* All options that determine the training, including those of the method. Runs of version 0.1 keep
 * their names: options that follow from the data count with the former defaults, and the lists that
 * were added since count only if they are used. Keys and values were f32. */
static json_t *method_options_json(const struct train_request *q) {
    struct train_options named = *q->train;
    train_options_fix(&named);
    json_t *all = options_json(train_option_rows, &named), *method_options;
    json_object_del(all, "activation-memory"); // changes no result
    if (named.modules_to_save.n == 0) json_object_del(all, "modules-to-save");
    if (named.trainable_token_indices.n == 0) json_object_del(all, "trainable-token-indices");
    if (strcmp(named.kv_cache_dtype, "f32") == 0) json_object_del(all, "kv");
    if (q->method == METHOD_SFT) return all;
    method_options = q->method == METHOD_ES ? options_json(es_option_rows, q->es)
                                            : options_json(rl_option_rows, q->policy);
    json_object_set_new(all, "method", json_string(train_method_name(q->method)));
    json_object_update(all, method_options);
    json_decref(method_options);
    return all;
}

static json_t *recipe_json(const struct recorded_run *r, const json_t *options) {
    json_t *list = json_array();
    for (int i = 0; i < r->q->n; i++) {
        const struct train_job *job = &r->q->jobs[i];
        const struct adapter_config activation = train_job_activation(job);
        json_array_append_new(
            list, json_pack("{s:s,s:o,s:o,s:o*}", "name", job->name, "data",
                            json_from_path(job->data), "dir", json_from_path(r->gated_jobs[i].dir),
                            "alora_invocation_tokens", adapter_invocation_json(&activation)));
    }
    return json_pack("{s:s,s:s,s:o,s:o}", "model", r->q->m->name, "model_sha256", r->q->m->hash,
                     "jobs", list, "options", json_deep_copy(options));
}

static int store_open_run(struct recorded_run *r, const json_t *recipe, struct error *err) {
    char *path = path_join(r->gate->runs, "shoal.db");
    r->store = store_open(path, err);
    free(path);
    return r->store ? store_run_begin(r->store, r->id, "train", recipe, err) : err->code;
}

static int record_open(struct recorded_run *r, struct error *err) {
    json_t *options = method_options_json(r->q), *recipe = recipe_json(r, options);
    r->id = run_id_make("train", r->o->dir, recipe);
    r->dir = path_join(r->gate->runs, r->id);
    int rc = dir_make_private(r->dir, err);
    if (rc == OK && (r->lock = dir_lock(r->dir, "run", err)) < 0) rc = r->lock;
    if (rc == OK) rc = store_open_run(r, recipe, err);
    if (rc != OK) error_wrap(err, "the run cannot be recorded; name a folder with --runs");
    char *title = xasprintf("Shoal training %s", r->id);
    r->log = train_log_open(r->dir, title, r->store, r->id);
    if (r->gate->tensorboard) train_log_write_events(r->log);
    train_log_section(r->log, "Options", options);
    free(title);
    json_decref(recipe);
    return rc;
}

/* Tokens of the longest sample, or question, that the gate measures. */
static int32_t longest_measured(const struct recorded_run *r, const struct gated_job *t) {
    int32_t longest = 1;
    for (int i = 0; i < t->eval.n; i++) longest = MAX(longest, t->eval.v[i].n);
    for (int i = 0; i < t->retain.n; i++) longest = MAX(longest, t->retain.v[i].n);
    return MAX(longest, families_max_tokens(r->retain_families, INT32_MAX));
}

/* Checks everything that could prevent the publication later, and makes the record. */
static int run_open(struct recorded_run *r, struct error *err) {
    int n = r->q->n;
    r->gated_jobs = xcalloc((size_t)n, sizeof *r->gated_jobs);
    int rc = r->gate->retain ? families_parse(r->gate->retain, r->retain_families, err) : OK;
    for (int i = 0; rc == OK && i < n; i++) {
        rc = gated_job_open(r, &r->gated_jobs[i], &r->q->jobs[i], err);
        r->q->jobs[i].longest_measured = longest_measured(r, &r->gated_jobs[i]);
    }
    return rc == OK ? record_open(r, err) : rc;
}

/* measurement */

static int comparison_measure(const struct recorded_run *r, const struct gated_job *t,
                              const struct adapter *after, const struct dataset *d,
                              struct gate_comparison *out, struct error *err) {
    if (d->n == 0) return OK;
    double *nll = try_calloc(2 * (size_t)d->n, sizeof *nll, err);
    int rc = nll ? gate_eval_nll(r->q->m, t->baseline, d, r->kv, r->q->pool, nll, err) : err->code;
    if (rc == OK) rc = gate_eval_nll(r->q->m, after, d, r->kv, r->q->pool, nll + d->n, err);
    if (rc == OK) *out = gate_compare(nll, nll + d->n, d->n);
    free(nll);
    return rc;
}

static int family_measure(struct recorded_run *r, struct engine *e, struct gated_job *t,
                          struct adapter *after, int family, struct error *err) {
    int32_t n = (int32_t)r->gate->retain_n;
    uint8_t *right = xcalloc(2 * (size_t)n, 1);
    struct eval_score score[2] = {{0}};
    struct family_result *f = &t->result.families[t->result.n_families++];
    int rc = OK;
    for (int k = 0; rc == OK && k < 2; k++)
        rc = eval_run_family(e, r->q->m->tok, family, SPLIT_DEV, RETAIN_SEED, n,
                             k ? after : t->baseline, false, right + k * n, &score[k], NULL, err);
    *f = (struct family_result){.family = family,
                                .before = stats_wilson(score[0].correct, n),
                                .after = stats_wilson(score[1].correct, n),
                                .change = stats_mcnemar(right + n, right, n)};
    free(right);
    return rc;
}

static int families_measure(struct recorded_run *r, struct gated_job *t, struct adapter *after,
                            struct error *err) {
    const int64_t seqs = r->q->limits.max_seqs;
    struct engine_options eo = {
        .max_rows = 512,
        .max_seqs = seqs ? (int32_t)seqs : 256,
        .max_len = families_max_tokens(r->retain_families, r->q->m->config.max_seq_len),
        .kv_elem = r->kv,
        .pool = r->q->pool};
    double p[MAX_FAMILIES], holm[MAX_FAMILIES];
    if (!r->gate->retain) return OK;
    int rc = engine_options_limit(r->q->m, &eo, err);
    struct engine *e = rc == OK ? engine_new(r->q->m, &eo, err) : NULL;
    if (!e) rc = err->code;
    for (int f = 0; rc == OK && f < family_count(); f++)
        if (r->retain_families[f]) rc = family_measure(r, e, t, after, f, err);
    engine_free(e);
    for (int i = 0; i < t->result.n_families; i++) p[i] = t->result.families[i].change.p;
    stats_holm(p, t->result.n_families, holm);
    for (int i = 0; i < t->result.n_families; i++) {
        struct family_result *f = &t->result.families[i];
        f->p_holm = holm[i];
        f->change.diff = stats_paired_interval(&f->change, t->result.n_families);
    }
    return rc;
}

/* Rejects the adapter if a family lost more than --retain-points and the loss is significant. */
static void families_decide(const struct recorded_run *r, struct gated_job *t) {
    if (t->result.n_families > 0 && t->result.gate.eval.n == 0 && t->result.gate.publish)
        snprintf(t->result.gate.why, sizeof t->result.gate.why,
                 "no loss on what is to be retained");
    for (int i = 0; i < t->result.n_families && t->result.gate.publish; i++) {
        const struct family_result *f = &t->result.families[i];
        if (100 * f->change.diff.value >= -r->gate->points || f->p_holm > r->gate->alpha) continue;
        t->result.gate.publish = false;
        snprintf(t->result.gate.why, sizeof t->result.gate.why, "it lost %.1f points of '%s'",
                 -100 * f->change.diff.value, task_families[f->family]->name);
    }
}

static int gated_job_measure(struct recorded_run *r, struct gated_job *t, struct adapter *after,
                             struct error *err) {
    int rc = adapter_is_ready(after) ? OK : adapter_bind(after, r->q->m, err);
    if (rc == OK) rc = comparison_measure(r, t, after, &t->eval, &t->result.gate.eval, err);
    if (rc == OK) rc = comparison_measure(r, t, after, &t->retain, &t->result.gate.retain, err);
    if (rc == OK) rc = families_measure(r, t, after, err);
    gate_decide(&t->result.gate, r->gate->alpha, r->gate->tolerance);
    families_decide(r, t);
    return rc;
}

/* The effect on held-out samples, if there are any, else on some of the training data. */
static int effect_measure(struct recorded_run *r, struct gated_job *t, struct error *err) {
    struct train_job *job = (struct train_job *)(uintptr_t)t->result.job;
    struct dataset held_out = t->eval.n > 0 ? train_samples_keep(&t->eval) : (struct dataset){0};
    struct train_effect *e = &t->result.effect;
    int rc = train_effect_measure(r->q->m, held_out.n ? &held_out : &job->samples, job->start,
                                  job->result, r->kv, &r->q->limits, r->q->pool, e, err);
    dataset_release(&held_out);
    return rc;
}

/* reports */

static json_t *families_json(const struct train_result *r) {
    json_t *list = json_array();
    for (int i = 0; i < r->n_families; i++) {
        const struct family_result *f = &r->families[i];
        json_array_append_new(list, json_pack("{s:s,s:I,s:f,s:f,s:f,s:f,s:f,s:f}", "family",
                                              task_families[f->family]->name, "n",
                                              (json_int_t)f->change.n, "before", f->before.value,
                                              "after", f->after.value, "change",
                                              f->change.diff.value, "lo", f->change.diff.lo, "hi",
                                              f->change.diff.hi, "p_holm", f->p_holm));
    }
    return list;
}

static json_t *notes_json(const struct recorded_run *r, const struct gated_job *t) {
    json_t *tags = json_array(), *notes;
    for (int i = 0; i < r->gate->tags.n; i++)
        json_array_append_new(tags, json_string(r->gate->tags.v[i]));
    notes = json_pack("{s:s,s:o,s:o,s:o}", "run", r->id, "tags", tags, "gate",
                      gate_json(&t->result.gate), "retain_families", families_json(&t->result));
    if (t->result.gate.eval.n > 0)
        // higher is better
        json_object_set_new(notes, "score", json_real(-t->result.gate.eval.after));
    return notes;
}

static json_t *result_row(const struct train_result *r) {
    json_t *row = json_pack("{s:s,s:o,s:s,s:f,s:f,s:b}", "adapter", r->job->name, "dir",
                            json_from_path(r->dir), "hash", r->job->result->hash, "first_loss",
                            r->job->first_loss, "last_loss", r->job->last_loss, "published",
                            (int)r->gate.publish);
    if (!isnan(r->job->last_reward)) {
        json_object_set_new(row, "first_reward", json_real(r->job->first_reward));
        json_object_set_new(row, "last_reward", json_real(r->job->last_reward));
    }
    if (!isnan(r->job->last_accuracy))
        json_object_set_new(row, "last_accuracy", json_real(r->job->last_accuracy));
    return row;
}

json_t *train_result_json(const struct train_result *r) {
    json_t *v = result_row(r);
    json_object_set_new(v, "effect", train_effect_json(&r->effect));
    json_object_set_new(v, "gate", gate_json(&r->gate));
    json_object_set_new(v, "retain_families", families_json(r));
    json_object_set(v, "manifest", r->manifest);
    return v;
}

/* The hashes of the training data and of the start adapter are those in the result's lineage. */
static json_t *job_manifest(const struct recorded_run *r, const struct gated_job *t) {
    const struct train_job *job = t->result.job;
    const struct strings *files[] = {&r->gate->eval_data, &r->gate->retain_data};
    const struct dataset *sets[] = {&t->eval, &t->retain};
    json_t *data = json_object(), *adapters = json_object();
    manifest_add_hash(data, job->data, json_get_string(job->result->lineage, "data"));
    manifest_add_hash(adapters, "start", json_get_string(job->result->lineage, "start"));
    for (size_t i = 0; i < ARRAY_LEN(files); i++) {
        const char *file = data_file_for_adapter(files[i], t->name);
        if (file) manifest_add_hash(data, file, sets[i]->hash);
    }
    return manifest_json(r->q->m, adapters, data, r->q->train->seed);
}

static int gated_job_report(struct recorded_run *r, struct gated_job *t, struct error *err) {
    const struct adapter *a = t->result.job->result;
    t->result.dir = t->where;
    t->result.manifest = job_manifest(r, t);
    r->o->on_result(r->o->ctx, &t->result);
    json_decref(t->result.manifest);
    t->result.manifest = NULL;
    json_t *scores = gate_json(&t->result.gate);
    int rc = store_adapter_put(r->store, r->id, 0, t->name, a->hash, a->lineage, scores, err);
    json_decref(scores);
    return rc;
}

/* Stores the questions of the data next to the adapter, by which the model auto of a server chooses
 * it. The adapter is complete without them. */
static void profile_store(const struct gated_job *t) {
    struct prompt_profile p = {0};
    struct error err;
    const char *data = t->result.job->data;
    char *path = prompt_profile_path(t->where);
    int rc = train_data_is_generated(data) ? OK : prompt_profile_add_file(&p, data, &err);
    unlink(path);
    if (rc == OK && p.n > 0) rc = prompt_profile_write(&p, path, &err);
    if (rc != OK) log_warn("'%s' has no profile of its training questions: %s", t->name, err.text);
    free(path);
}

static int gated_job_finish(struct recorded_run *r, struct gated_job *t, struct train_job *job,
                            struct error *err) {
    if (gated_job_measure(r, t, job->result, err) != OK || effect_measure(r, t, err) != OK)
        return err->code;
    json_t *notes = notes_json(r, t);
    int rc;
    if (t->result.gate.publish) {
        rc = adapter_publish(job->result, t->dir, r->q->m->name, notes, err);
        t->where = xstrdup(t->dir);
    } else {
        rc = adapter_save_rejected(job->result, t->dir, r->q->m->name, notes, &t->where, err);
        r->n_rejected++;
    }
    json_decref(notes);
    if (rc != OK) return rc;
    profile_store(t);
    return gated_job_report(r, t, err);
}

/* The table of the gate on the page, with one row per adapter and test. */
static json_t *gate_table(const struct recorded_run *r) {
    json_t *rows = json_array(), *v;
    size_t k;
    for (int i = 0; i < r->q->n; i++) {
        const struct gated_job *t = &r->gated_jobs[i];
        json_t *gate = gate_json(&t->result.gate), *families = families_json(&t->result);
        for (int j = 0; j < 2; j++) {
            json_t *pair = json_object_get(gate, j ? "retain" : "eval");
            if (!json_is_object(pair)) continue;
            json_t *row = json_pack("{s:s,s:s}", "adapter", t->name, "test",
                                    j ? "retain data, nats a token" : "held out, nats a token");
            json_object_update(row, pair);
            json_array_append_new(rows, row);
        }
        json_array_foreach (families, k, v) {
            json_t *row =
                json_pack("{s:s,s:O}", "adapter", t->name, "test", json_object_get(v, "family"));
            json_object_del(v, "family");
            json_object_update(row, v);
            json_array_append_new(rows, row);
        }
        json_decref(gate);
        json_decref(families);
    }
    return rows;
}

static int report_finish(struct recorded_run *r, struct error *err) {
    json_t *results = json_array(), *gate = gate_table(r);
    for (int i = 0; i < r->q->n; i++) {
        json_t *row = result_row(&r->gated_jobs[i].result);
        json_object_set_new(row, "why", json_string(r->gated_jobs[i].result.gate.why));
        json_array_append_new(results, row);
    }
    train_log_section(r->log, "Results", results);
    for (int i = 0; i < r->q->n; i++) {
        const struct train_effect *e = &r->gated_jobs[i].result.effect;
        char *title = xasprintf("Replies of %s", r->gated_jobs[i].name);
        if (e->replies) train_log_section(r->log, title, json_incref(e->replies));
        free(title);
    }
    train_log_section(r->log, "Gate: before and after on the same items", gate);
    return train_log_report(r->log, err);
}

/* Measures, decides, and publishes or rejects every adapter. After OK every result is on disk. */
static int run_finish(struct recorded_run *r, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < r->q->n; i++)
        rc = gated_job_finish(r, &r->gated_jobs[i], &r->q->jobs[i], err);
    return rc == OK ? report_finish(r, err) : rc;
}

/* Sets ERR_STATE with the names of the adapters that were not published. */
static int rejected_error(const struct recorded_run *r, struct error *err) {
    struct buf list = {0};
    for (int i = 0; i < r->q->n; i++) {
        const struct gated_job *t = &r->gated_jobs[i];
        if (!t->result.gate.publish)
            buf_printf(&list, "%s'%s' is not published: %s; it is in '%s'", list.len ? "; " : "",
                       t->name, t->result.gate.why, t->where);
    }
    error_set(err, ERR_STATE, "%s", list.data);
    buf_release(&list);
    return err->code;
}

static void gated_job_release(struct gated_job *t) {
    adapter_release(t->baseline);
    dataset_release(&t->eval);
    dataset_release(&t->retain);
    json_decref(t->result.effect.replies);
    free(t->dir);
    free(t->where);
}

/* Sets the run's state in the store and releases everything. Returns rc, or ERR_STATE if rc is OK
 * and an adapter was not published (unless that is accepted). */
static int run_close(struct recorded_run *r, int rc, struct error *err) {
    struct error ignored; // only the first error is reported
    if (r->store) store_run_status(r->store, r->id, rc == OK ? "done" : "failed", &ignored);
    if (rc == OK) log_info("the report is '%s/report.html'", r->dir);
    if (rc == OK && r->n_rejected && !r->o->accept_rejected) rc = rejected_error(r, err);
    for (int i = 0; i < r->q->n; i++) gated_job_release(&r->gated_jobs[i]);
    train_log_free(r->log);
    store_close(r->store);
    if (r->lock >= 0) dir_unlock(r->lock, r->dir);
    free(r->gated_jobs);
    free(r->id);
    free(r->dir);
    return rc;
}

/* Trains and publishes; the caller holds the lock. Removes the checkpoint when every result is on
 * disk. The options of the record have the type of keys and values by name, so that the record
 * does not depend on the meaning of "auto". */
static int run_locked(const struct train_request *request, const struct train_output *o,
                      struct error *err) {
    struct train_options options = *request->train;
    struct train_request named = *request, *q = &named;
    struct recorded_run r = {.q = q, .o = o, .gate = o->gate, .lock = -1};
    char *checkpoint = path_join(o->dir, "checkpoint.bin");
    int rc = train_kv_dtype_parse(&options, q->m->cls, checkpoint, &r.kv, err);
    if (rc != OK) {
        free(checkpoint);
        return rc;
    }
    options.kv_cache_dtype = (char *)(uintptr_t)dtype_name(r.kv);
    named.train = &options;
    rc = run_open(&r, err);
    if (rc == OK) {
        struct train_callbacks callbacks = train_log_callbacks(r.log);
        callbacks.versions = q->versions;
        rc = train_run(q, checkpoint, &callbacks, err);
    }
    if (rc == OK && run_finish(&r, err) != OK)
        rc = error_wrap(err, "training is complete and in '%s', but its result cannot be saved",
                        checkpoint);
    if (rc == OK) unlink(checkpoint);
    rc = run_close(&r, rc, err);
    free(checkpoint);
    return rc;
}

/* Holds a lock on the output folder, because its checkpoint belongs to one run at a time. */
int train_and_publish(const struct train_request *q, const struct train_output *o,
                      struct error *err) {
    int rc = dir_make(o->dir, err), lock = -1;
    if (rc == OK && (lock = dir_lock(o->dir, "folder", err)) < 0) rc = lock;
    if (rc == OK) rc = run_locked(q, o, err);
    dir_unlock(lock, o->dir);
    return rc;
}
