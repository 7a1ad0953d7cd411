/*
 * train_run: the steps around a training: the run's record before it, the gate and the publication
 * after it.
 *
 * The order matters twice. Every condition that could refuse a result (an unreadable held-out file,
 * an adapter in the way, a folder that cannot be written) is checked before hours are spent. An
 * adapter that the gate refuses is written next to its target before any message reports it.
 */
#define _GNU_SOURCE
#include "cli/train_run.h"

#include "cli/setup.h"

#include <stdlib.h>
#include <string.h>

/* Seed of the questions. They are from the dev split, so that test questions stay unseen. */
enum { RETAIN_SEED = 1000003 };

struct family_result {
    int family;
    struct stats_interval before, after;
    struct stats_mcnemar change; /* after - before */
    double p_holm;
};
struct train_result {
    const char *name;
    char *dir;
    struct adapter *before; /* existing or initial adapter; NULL: the base */
    struct dataset eval, retain;
    struct gate gate;
    struct family_result families[FRY_MAX_FAMILIES];
    int n_families;
    char *where; /* the directory that holds the result */
    json_t *row; /* row of the report */
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
                     const struct train_result *t, const struct model *m, struct error *err) {
    const char *file = data_file_for_adapter(list, t->name);
    if (!file) return OK;
    if (dataset_load(d, file, m->tok, m->config.max_seq_len, err) == OK) return OK;
    return error_wrap(err, "%s of '%s'", what, t->name);
}

/* Opens the adapter that the result is compared with: the existing one, else the one that training
 * starts from, else the base. */
static int before_open(struct train_result *t, const struct train_job *job, struct model *m,
                       struct error *err) {
    json_t *versions = adapter_versions(t->dir, err); // also finishes an interrupted installation
    char *config = path_join(t->dir, "adapter_config.json");
    bool there = path_exists(config);
    int rc = versions ? OK : err->code;
    if (rc == OK && there) t->before = adapter_open(t->dir, m, err);
    if (rc == OK && there && !t->before)
        rc = error_wrap(err, "'%s' holds an adapter that cannot be kept; choose another --out",
                        t->dir);
    if (rc == OK && !there && job->start) t->before = adapter_retain(job->start);
    json_decref(versions);
    free(config);
    return rc;
}

static bool name_is_text(const char *name) {
    json_t *v = json_string(name);
    bool good = v && *name;
    json_decref(v);
    return good;
}

static int trainee_open(struct train_run *r, struct train_result *t, const struct train_job *job,
                        const char *dir, struct error *err) {
    t->name = job->name;
    t->dir = xstrdup(dir);
    if (!name_is_text(job->name))
        return error_set(err, ERR_USAGE, "an adapter's name must be UTF-8 and not empty");
    int rc = before_open(t, job, r->m, err);
    if (rc == OK) rc = data_open(&t->eval, &r->o->eval_data, "eval data", t, r->m, err);
    if (rc == OK) rc = data_open(&t->retain, &r->o->retain_data, "retain data", t, r->m, err);
    return rc;
}

/* "train-critic-1a2b3c4d": the last part of the output directory, and a hash of everything that
 * determines the run except the bytes of its data. */
static char *id_make(const char *out, const json_t *recipe) {
    char *text = json_canonical(recipe), *path = path_absolute(out), slug[25] = "";
    const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
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
    return xasprintf("train-%s%s%.8s", slug, *slug ? "-" : "", hash);
}

static json_t *recipe_json(const struct train_run *r, const json_t *options,
                           const struct train_job *jobs, char *const *dirs, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("{s:s,s:o,s:o}", "name", jobs[i].name, "data",
                                              json_from_path(jobs[i].data), "dir",
                                              json_from_path(dirs[i])));
    return json_pack("{s:s,s:s,s:o,s:o}", "model", r->m->name, "model_sha256", r->m->hash, "jobs",
                     list, "options", json_deep_copy(options));
}

static int store_open_run(struct train_run *r, const json_t *recipe, struct error *err) {
    struct error missing;
    char *path = path_join(r->o->runs, "shoal.db");
    r->store = store_open(path, err);
    free(path);
    if (!r->store) return err->code;
    json_t *old = store_run_get(r->store, r->id, &missing);
    json_decref(old);
    return old ? store_run_status(r->store, r->id, "running", err)
               : store_run_add(r->store, r->id, "train", recipe, err);
}

static int record_open(struct train_run *r, const char *out, const json_t *options,
                       const struct train_job *jobs, char *const *dirs, struct error *err) {
    json_t *recipe = recipe_json(r, options, jobs, dirs, r->n);
    r->id = id_make(out, recipe);
    r->dir = path_join(r->o->runs, r->id);
    int rc = dir_make_private(r->dir, err);
    if (rc == OK) rc = store_open_run(r, recipe, err);
    if (rc != OK) error_wrap(err, "the run cannot be recorded; name a folder with --runs");
    char *title = xasprintf("Shoal training %s", r->id);
    r->log = train_log_open(r->dir, title, r->store, r->id);
    train_log_section(r->log, "Options", json_deep_copy(options));
    free(title);
    json_decref(recipe);
    return rc;
}

int train_run_open(struct train_run *r, const struct cli_options *c,
                   const struct train_gate_options *o, const json_t *options, struct model *m,
                   struct pool *pool, const char *out, const struct train_job *jobs,
                   char *const *dirs, int n, struct error *err) {
    *r = (struct train_run){.c = c, .o = o, .m = m, .pool = pool, .n = n};
    r->trainees = xcalloc((size_t)n, sizeof *r->trainees);
    int rc = o->retain ? fry_parse_families(o->retain, r->pick, err) : OK;
    for (int i = 0; rc == OK && i < n; i++)
        rc = trainee_open(r, &r->trainees[i], &jobs[i], dirs[i], err);
    return rc == OK ? record_open(r, out, options, jobs, dirs, err) : rc;
}

struct train_callbacks train_run_callbacks(struct train_run *r) {
    return train_log_callbacks(r->log);
}

/* measurement */

static int pair_measure(const struct train_run *r, const struct train_result *t,
                        const struct adapter *after, const struct dataset *d,
                        struct gate_comparison *out, struct error *err) {
    if (d->n == 0) return OK;
    double *nll = try_calloc(2 * (size_t)d->n, sizeof *nll, err);
    int rc = nll ? gate_eval_nll(r->m, t->before, d, r->pool, nll, err) : err->code;
    if (rc == OK) rc = gate_eval_nll(r->m, after, d, r->pool, nll + d->n, err);
    if (rc == OK) *out = gate_compare(nll, nll + d->n, d->n);
    free(nll);
    return rc;
}

static int family_measure(struct train_run *r, struct engine *e, struct train_result *t,
                          struct adapter *after, int family, struct error *err) {
    int32_t n = (int32_t)r->o->retain_n;
    uint8_t *right = xcalloc(2 * (size_t)n, 1);
    struct eval_score score[2] = {{0}};
    struct family_result *f = &t->families[t->n_families++];
    int rc = OK;
    for (int k = 0; rc == OK && k < 2; k++)
        rc = eval_run_family(e, r->m->tok, family, SPLIT_DEV, RETAIN_SEED, n, k ? after : t->before,
                             false, right + k * n, &score[k], NULL, err);
    *f = (struct family_result){.family = family,
                                .before = stats_wilson(score[0].correct, n),
                                .after = stats_wilson(score[1].correct, n),
                                .change = stats_mcnemar(right + n, right, n)};
    free(right);
    return rc;
}

static int families_measure(struct train_run *r, struct train_result *t, struct adapter *after,
                            struct error *err) {
    struct engine_options eo = {.max_rows = 512, .max_seqs = 256, .max_len = 256, .pool = r->pool};
    double p[FRY_MAX_FAMILIES], holm[FRY_MAX_FAMILIES];
    if (!r->o->retain) return OK;
    eo.max_len = MIN(eo.max_len, r->m->config.max_seq_len);
    struct engine *e = engine_new(r->m, &eo, err);
    int rc = e ? OK : err->code;
    for (int f = 0; rc == OK && f < fry_count(); f++)
        if (r->pick[f]) rc = family_measure(r, e, t, after, f, err);
    engine_free(e);
    for (int i = 0; i < t->n_families; i++) p[i] = t->families[i].change.p;
    stats_holm(p, t->n_families, holm);
    for (int i = 0; i < t->n_families; i++) t->families[i].p_holm = holm[i];
    return rc;
}

/* Refuses publication if a family lost more than is allowed and the loss is significant. */
static void families_decide(const struct train_run *r, struct train_result *t) {
    if (t->n_families > 0 && t->gate.eval.n == 0 && t->gate.publish)
        snprintf(t->gate.why, sizeof t->gate.why, "no loss on what is to be retained");
    for (int i = 0; i < t->n_families && t->gate.publish; i++) {
        const struct family_result *f = &t->families[i];
        if (100 * f->change.diff.value >= -r->o->points || f->p_holm > r->o->alpha) continue;
        t->gate.publish = false;
        snprintf(t->gate.why, sizeof t->gate.why, "it lost %.1f points of '%s'",
                 -100 * f->change.diff.value, fry_families[f->family].name);
    }
}

static int trainee_measure(struct train_run *r, struct train_result *t, struct adapter *after,
                           struct error *err) {
    int rc = adapter_is_ready(after) ? OK : adapter_bind(after, r->m, err);
    if (rc == OK) rc = pair_measure(r, t, after, &t->eval, &t->gate.eval, err);
    if (rc == OK) rc = pair_measure(r, t, after, &t->retain, &t->gate.retain, err);
    if (rc == OK) rc = families_measure(r, t, after, err);
    gate_decide(&t->gate, r->o->alpha, r->o->tolerance);
    families_decide(r, t);
    return rc;
}

/* reports */

static json_t *families_json(const struct train_result *t) {
    json_t *list = json_array();
    for (int i = 0; i < t->n_families; i++) {
        const struct family_result *f = &t->families[i];
        json_array_append_new(list,
                              json_pack("{s:s,s:I,s:f,s:f,s:f,s:f,s:f,s:f}", "family",
                                        fry_families[f->family].name, "n", (json_int_t)f->change.n,
                                        "before", f->before.value, "after", f->after.value,
                                        "change", f->change.diff.value, "lo", f->change.diff.lo,
                                        "hi", f->change.diff.hi, "p_holm", f->p_holm));
    }
    return list;
}

static json_t *notes_json(const struct train_run *r, const struct train_result *t) {
    json_t *tags = json_array(), *notes;
    for (int i = 0; i < r->o->tags.n; i++)
        json_array_append_new(tags, json_string(r->o->tags.v[i]));
    notes = json_pack("{s:s,s:o,s:o,s:o}", "run", r->id, "tags", tags, "gate", gate_json(&t->gate),
                      "retain_families", families_json(t));
    if (t->gate.eval.n > 0)
        json_object_set_new(notes, "score", json_real(-t->gate.eval.after)); // higher is better
    return notes;
}

static void pair_print(const char *what, const struct gate_comparison *p) {
    if (p->n == 0) return;
    printf("  %s: n = %lld, %.4f to %.4f nats per token, gain %+.4f (%+.4f … %+.4f), p = %.2g\n",
           what, (long long)p->n, p->before, p->after, p->gain.value, p->gain.lo, p->gain.hi, p->p);
}

static void trainee_print(const struct train_result *t, const struct train_job *job) {
    printf("%s: loss %.4f to %.4f, wrote '%s'\n", t->name, job->first_loss, job->last_loss,
           t->where);
    pair_print("held out", &t->gate.eval);
    pair_print("to retain", &t->gate.retain);
    for (int i = 0; i < t->n_families; i++) {
        const struct family_result *f = &t->families[i];
        const struct stats_interval *d = &f->change.diff;
        printf("  %-14s n = %lld, %.1f %% to %.1f %%, %+.1f points (%+.1f … %+.1f), p = %.2g\n",
               fry_families[f->family].name, (long long)f->change.n, 100 * f->before.value,
               100 * f->after.value, 100 * d->value, 100 * d->lo, 100 * d->hi, f->p_holm);
    }
    if (t->gate.eval.n || t->gate.retain.n || t->n_families)
        printf("  %s: %s\n", t->gate.publish ? "published" : "not published", t->gate.why);
}

static int trainee_tell(struct train_run *r, struct train_result *t, const struct train_job *job,
                        struct error *err) {
    t->row =
        json_pack("{s:s,s:o,s:s,s:f,s:f,s:b}", "adapter", t->name, "dir", json_from_path(t->where),
                  "hash", job->result->hash, "first_loss", job->first_loss, "last_loss",
                  job->last_loss, "published", (int)t->gate.publish);
    if (r->c->json) {
        json_t *line = json_deep_copy(t->row);
        json_object_set_new(line, "gate", gate_json(&t->gate));
        json_object_set_new(line, "retain_families", families_json(t));
        cli_print(line);
    } else {
        trainee_print(t, job);
    }
    json_t *scores = gate_json(&t->gate);
    int rc = store_adapter_put(r->store, r->id, 0, t->name, job->result->hash, job->result->lineage,
                               scores, err);
    json_decref(scores);
    return rc;
}

static int trainee_finish(struct train_run *r, struct train_result *t, struct train_job *job,
                          struct error *err) {
    if (trainee_measure(r, t, job->result, err) != OK) return err->code;
    json_t *notes = notes_json(r, t);
    int rc;
    if (t->gate.publish) {
        rc = adapter_publish(job->result, t->dir, r->m->name, notes, err);
        t->where = xstrdup(t->dir);
    } else {
        rc = adapter_save_rejected(job->result, t->dir, r->m->name, notes, &t->where, err);
        r->n_rejected++;
    }
    json_decref(notes);
    return rc == OK ? trainee_tell(r, t, job, err) : rc;
}

/* One row per adapter and test. */
static json_t *gate_table(const struct train_run *r) {
    json_t *rows = json_array(), *v;
    size_t k;
    for (int i = 0; i < r->n; i++) {
        const struct train_result *t = &r->trainees[i];
        json_t *gate = gate_json(&t->gate), *families = families_json(t);
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

static int report_finish(struct train_run *r, struct error *err) {
    json_t *results = json_array(), *gate = gate_table(r);
    for (int i = 0; i < r->n; i++) {
        json_t *row = json_copy(r->trainees[i].row);
        json_object_set_new(row, "why", json_string(r->trainees[i].gate.why));
        json_array_append_new(results, row);
    }
    train_log_section(r->log, "Results", results);
    train_log_section(r->log, "Gate: before and after on the same items", gate);
    return train_log_report(r->log, err);
}

int train_run_finish(struct train_run *r, struct train_job *jobs, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < r->n; i++)
        rc = trainee_finish(r, &r->trainees[i], &jobs[i], err);
    return rc == OK ? report_finish(r, err) : rc;
}

/* Names the adapters that were not published; everything is on disk at this point. */
static int rejected_tell(const struct train_run *r, struct error *err) {
    struct buf list = {0};
    for (int i = 0; i < r->n; i++) {
        const struct train_result *t = &r->trainees[i];
        if (!t->gate.publish)
            buf_printf(&list, "%s'%s' is not published: %s; it is in '%s'", list.len ? "; " : "",
                       t->name, t->gate.why, t->where);
    }
    error_set(err, ERR_STATE, "%s", list.data);
    buf_release(&list);
    return err->code;
}

static void trainee_release(struct train_result *t) {
    adapter_release(t->before);
    dataset_release(&t->eval);
    dataset_release(&t->retain);
    json_decref(t->row);
    free(t->dir);
    free(t->where);
}

int train_run_close(struct train_run *r, int rc, struct error *err) {
    struct error ignored; // only the first error is reported
    if (r->store) store_run_status(r->store, r->id, rc == OK ? "done" : "failed", &ignored);
    if (rc == OK) log_info("'%s/report.html' shows it", r->dir);
    if (rc == OK && r->n_rejected) rc = rejected_tell(r, err);
    for (int i = 0; i < r->n; i++) trainee_release(&r->trainees[i]);
    train_log_free(r->log);
    store_close(r->store);
    free(r->trainees);
    free(r->id);
    free(r->dir);
    return rc;
}
