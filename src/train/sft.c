/*
 * sft: a fine-tuning run: several adapters, one dataset each, trained together.
 *
 * The samples of an update are a function of the options and the update's number only: sample
 * number p of a job is entry p mod n of the shuffle of epoch p / n. So a checkpoint needs no
 * positions, and a continued run has the bits of an uninterrupted one. The packing of samples into
 * passes changes no bits either (see internal.h): a pass takes as many as fit PACK_MAX_TOKENS. The
 * longest job determines the number of updates; shorter ones begin another epoch.
 *
 * A run that fails, because of a full disk, a NaN or any other error, leaves the last checkpoint
 * intact, reports it, and continues from it when called again. The caller removes the checkpoint of
 * the last update once the result is safe.
 */
#include "train/train.h"
#include "train/train_loop.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct feed { /* samples of one job */
    struct dataset data;
    struct epoch_shuffle order;
};

struct sft_trainer {
    const struct train_options *o;
    struct train_job *jobs;
    int n;
    struct feed *feeds;
    struct adapter **starts;
    struct trainer *trainer;
    struct es *es; /* source of gradients instead of backward passes, or NULL */
    json_t *more;  /* fitness of the update's members, or NULL */
    const struct es_options *estimates;
    json_t *identity; /* a checkpoint must have the same identity */
    const char *checkpoint;
    int64_t saved; /* the update that `checkpoint` holds; -1: none */
    const struct train_callbacks *watch;
    enum lr_schedule schedule;
    int64_t per_update, steps;
    double started, began;      /* start of this process's part of the run; start of the update */
    struct train_sample *batch; /* copies of the samples in the next pass; they share its tokens */
    int n_batch;
    int64_t rows;
};

/* Sample number p, counted from the start of the run. */
static const struct train_sample *feed_at(struct feed *f, int64_t seed, int64_t p) {
    return &f->data.v[epoch_shuffle_at(&f->order, seed, p)];
}

static int batch_flush(struct sft_trainer *r, struct error *err) {
    int rc = r->n_batch ? trainer_accumulate(r->trainer, r->batch, r->n_batch, err) : OK;
    r->n_batch = 0;
    r->rows = 0;
    return rc;
}

static int batch_add(struct sft_trainer *r, int job, const struct train_sample *s,
                     struct error *err) {
    int rc = pack_is_full(r->rows, s->n) ? batch_flush(r, err) : OK;
    r->batch[r->n_batch] = *s;
    r->batch[r->n_batch++].adapter = job;
    r->rows += s->n;
    return rc;
}

/* Whether a checkpoint is due after `step` updates. */
static bool save_due(const struct sft_trainer *r, int64_t step) {
    return step == r->steps || (r->o->save_steps > 0 && step % r->o->save_steps == 0);
}

static int sft_report_step(const struct sft_trainer *r, int64_t step, float lr,
                           const struct update_stats *st, struct error *err) {
    double now = clock_now(), speed = now > r->began ? (double)st->tokens / (now - r->began) : 0;
    process_metrics_report((const struct process_metric[]){{"train_step", (double)step},
                                                           {"train_loss", st->loss},
                                                           {"train_tokens_per_second", speed}},
                           3);
    if (!r->watch) return OK;
    struct train_event e = {.step = step,
                            .steps = r->steps,
                            .lr = (double)lr,
                            .seconds = now - r->started,
                            .tokens_per_s = speed,
                            .stats = st,
                            .jobs = r->jobs,
                            .n = r->n,
                            .due = save_due(r, step),
                            .more = r->more};
    return r->watch->update(r->watch->ctx, &e, err);
}

static float update_lr(const struct sft_trainer *r, int64_t step) {
    int64_t warmup = (int64_t)ceil(r->o->warmup_ratio * (double)r->steps);
    return lr_schedule_at(r->schedule, r->o->lr, r->o->min_lr_ratio, step, warmup, r->steps);
}

static int sft_accumulate(struct sft_trainer *r, int64_t step, struct error *err) {
    int rc = OK;
    for (int64_t i = 0; !rc && i < r->per_update; i++)
        for (int j = 0; !rc && j < r->n; j++)
            rc = batch_add(r, j, feed_at(&r->feeds[j], r->o->seed, step * r->per_update + i), err);
    return rc ? rc : batch_flush(r, err);
}

static int es_estimate_gradients(struct sft_trainer *r, int64_t step, struct error *err) {
    json_t *list = json_object();
    int rc = OK;
    json_decref(r->more);
    r->more = json_pack("{s:o}", "adapters", list);
    for (int j = 0; !rc && j < r->n; j++) {
        for (int64_t i = 0; i < r->per_update; i++)
            r->batch[i] = *feed_at(&r->feeds[j], r->o->seed, step * r->per_update + i);
        rc = es_accumulate(r->es, r->trainer, j, r->batch, (int)r->per_update, err);
        json_object_set_new(list, r->jobs[j].name,
                            json_pack("{s:f,s:f}", "fitness", es_fitness_mean(r->es), "fitness_std",
                                      es_fitness_std(r->es)));
    }
    return rc;
}

static int sft_step(struct sft_trainer *r, int64_t step, struct update_stats *st,
                    struct error *err) {
    r->began = clock_now();
    int rc = r->es ? es_estimate_gradients(r, step, err) : sft_accumulate(r, step, err);
    if (!rc) rc = trainer_update(r->trainer, update_lr(r, step), st, err);
    if (rc) return error_wrap(err, "update %lld", (long long)step + 1);
    for (int j = 0; j < r->n; j++) {
        r->jobs[j].last_loss = trainer_adapter_loss(r->trainer, j);
        if (step == 0) r->jobs[j].first_loss = r->jobs[j].last_loss;
    }
    return OK;
}

static json_t *identity_make(const struct sft_trainer *r) {
    const struct train_options *o = r->o;
    json_t *jobs = json_array();
    for (int j = 0; j < r->n; j++)
        json_array_append_new(
            jobs, json_pack("[s,s,s]", r->jobs[j].name, r->feeds[j].data.hash, r->starts[j]->hash));
    json_t *id =
        json_pack("{s:I,s:I,s:I,s:f,s:f,s:f,s:i,s:o}", "steps", (json_int_t)r->steps,
                  "samples_per_update", (json_int_t)r->per_update, "max_length",
                  (json_int_t)o->max_length, "lr", o->lr, "warmup_ratio", o->warmup_ratio,
                  "min_lr_ratio", o->min_lr_ratio, "schedule", (int)r->schedule, "jobs", jobs);
    if (r->estimates)
        json_object_set_new(id, "es",
                            json_pack("[I,f,s,s]", (json_int_t)r->estimates->population,
                                      r->estimates->sigma, r->estimates->fitness,
                                      r->estimates->shaping));
    return id;
}

static int sft_save_checkpoint(struct sft_trainer *r, struct error *err) {
    json_t *extra = checkpoint_extra(r->identity, r->jobs, r->n);
    int rc = trainer_save(r->trainer, r->checkpoint, extra, err);
    if (!rc) r->saved = trainer_update_count(r->trainer);
    json_decref(extra);
    return rc;
}

static int sft_resume(struct sft_trainer *r, struct error *err) {
    json_t *extra = NULL;
    int rc = checkpoint_load(r->trainer, r->checkpoint, r->identity, r->jobs, r->n, &extra, err);
    if (!rc) {
        r->saved = trainer_update_count(r->trainer);
        log_info("continuing '%s' after update %lld", r->checkpoint, (long long)r->saved);
    }
    json_decref(extra);
    return rc;
}

/* Lint of job j's data, already loaded. `eval` holds the evaluation data of the previous job and is
 * reused if the file is the same. */
static int job_lint(struct sft_trainer *r, int j, const struct model *m, struct dataset *eval,
                    struct error *err) {
    struct train_job *job = &r->jobs[j];
    bool same = j > 0 && job->eval_data && r->jobs[j - 1].eval_data &&
                strcmp(job->eval_data, r->jobs[j - 1].eval_data) == 0;
    int rc = OK;
    if (job->eval_data && !same) {
        dataset_release(eval);
        rc = dataset_load(eval, job->eval_data, m->tok, 0, err);
    }
    if (rc) return error_wrap(err, "evaluation data of '%s'", job->name);
    return lint_dataset(&r->feeds[j].data, job->eval_data ? eval : NULL, &job->lint, err);
}

static int run_load_data(struct sft_trainer *r, const struct model *m, struct error *err) {
    int64_t limit = m->config.max_seq_len;
    struct dataset eval = {0};
    int rc = OK;
    if (!m->tok)
        return error_set(err, ERR_STATE, "model '%s' has no tokenizer to read training data with",
                         m->name);
    if (r->o->max_length > 0) limit = MIN(limit, r->o->max_length);
    for (int j = 0; !rc && j < r->n; j++) {
        struct feed *f = &r->feeds[j];
        rc = dataset_load(&f->data, r->jobs[j].data, m->tok, (int32_t)limit, err);
        if (rc) {
            error_wrap(err, "data of '%s'", r->jobs[j].name);
            break;
        }
        rc = epoch_shuffle_init(&f->order, f->data.n, err);
        if (!rc) rc = job_lint(r, j, m, &eval, err);
    }
    dataset_release(&eval);
    return rc;
}

static int64_t steps_count(const struct sft_trainer *r) {
    int64_t most = 1;
    if (r->o->max_steps > 0) return r->o->max_steps;
    for (int j = 0; j < r->n; j++) {
        double exact = r->o->epochs * (double)r->feeds[j].data.n / (double)r->per_update;
        most = MAX(most, (int64_t)ceil(exact - 1e-9));
    }
    return most;
}

/* One update, its report and, if due, its checkpoint. */
static int step_run(struct sft_trainer *r, int64_t step, struct update_stats *st,
                    struct error *err) {
    int rc = sft_step(r, step, st, err);
    if (!rc) rc = sft_report_step(r, step + 1, update_lr(r, step), st, err);
    if (!rc && r->checkpoint && save_due(r, step + 1)) rc = sft_save_checkpoint(r, err);
    return rc;
}

static int watch_begin(const struct sft_trainer *r, struct error *err) {
    json_t *data = json_array();
    for (int j = 0; j < r->n; j++)
        json_array_append_new(
            data, dataset_info_json(&r->jobs[j], r->feeds[j].data.hash, r->starts[j]->hash));
    json_t *about = json_pack("{s:I,s:o}", "steps", (json_int_t)r->steps, "data", data);
    int rc = r->watch->begin(r->watch->ctx, trainer_update_count(r->trainer), about, err);
    json_decref(about);
    return rc;
}

static int run_train(struct sft_trainer *r, struct error *err) {
    struct progress bar;
    struct update_stats st = {0};
    char detail[64] = "";
    int rc = OK;
    progress_start(&bar, "training", r->steps);
    for (int64_t u = trainer_update_count(r->trainer); !rc && u < r->steps; u++) {
        rc = step_run(r, u, &st, err);
        snprintf(detail, sizeof detail, "loss %.4f", st.loss);
        progress_update(&bar, u + 1, detail);
    }
    progress_finish(&bar, detail);
    return rc ? error_add_resume_hint(r->checkpoint, "update", r->saved, err) : OK;
}

static int run_results(struct sft_trainer *r, const struct model *m, struct error *err) {
    int rc = OK;
    for (int j = 0; !rc && j < r->n; j++)
        rc = result_adapter_make(r->trainer, m, j, r->es ? "es" : "sft", r->feeds[j].data.hash,
                                 r->starts[j]->hash, &r->jobs[j].result, err);
    return rc;
}

static int run_open(struct sft_trainer *r, const struct model *m, struct error *err) {
    enum optim optim;
    int rc = lr_schedule_parse(r->o->lr_scheduler, &r->schedule, err);
    if (!rc) rc = optim_parse(r->o->optim, &optim, err);
    if (!rc) rc = run_load_data(r, m, err);
    if (!rc) rc = start_adapters_make(m, r->jobs, r->n, r->o, r->starts, err);
    if (rc) return rc;
    r->per_update = r->o->bsz * r->o->grad_accum;
    r->steps = steps_count(r);
    r->batch = try_calloc((size_t)r->per_update * (size_t)r->n, sizeof *r->batch, err);
    return r->batch ? OK : err->code;
}

static int run_begin(struct sft_trainer *r, const struct model *m, struct pool *pool,
                     struct error *err) {
    for (int j = 0; j < r->n; j++) lint_log(&r->jobs[j].lint, r->jobs[j].name);
    r->identity = identity_make(r);
    r->trainer = trainer_new_lora(m, r->starts, r->n, r->o, pool, err);
    if (!r->trainer) return err->code;
    if (r->estimates) r->es = es_new(m, r->estimates, pool);
    return r->checkpoint && path_exists(r->checkpoint) ? sft_resume(r, err) : OK;
}

static struct sft_trainer run_make(struct train_job *jobs, int n, const struct train_options *o) {
    struct sft_trainer r = {.o = o, .jobs = jobs, .n = n, .saved = -1, .started = clock_now()};
    CHECK(n > 0 && o->bsz > 0 && o->grad_accum > 0);
    r.feeds = xcalloc((size_t)n, sizeof *r.feeds);
    r.starts = xcalloc((size_t)n, sizeof *r.starts);
    for (int j = 0; j < n; j++) jobs[j].result = NULL;
    return r;
}

static void run_release(struct sft_trainer *r) {
    for (int j = 0; j < r->n; j++) {
        dataset_release(&r->feeds[j].data);
        epoch_shuffle_release(&r->feeds[j].order);
        adapter_release(r->starts[j]);
    }
    es_free(r->es);
    trainer_free(r->trainer);
    json_decref(r->identity);
    json_decref(r->more);
    free(r->feeds);
    free(r->starts);
    free(r->batch);
}

int sft_run_with_callbacks(const struct model *m, struct train_job *jobs, int n,
                           const struct train_options *o, const struct es_options *es,
                           struct pool *pool, const char *checkpoint,
                           const struct train_callbacks *watch, struct error *err) {
    struct sft_trainer r = run_make(jobs, n, o);
    r.estimates = es;
    r.checkpoint = checkpoint;
    r.watch = watch;
    int rc = run_open(&r, m, err);
    if (!rc) rc = run_begin(&r, m, pool, err);
    if (!rc && watch) rc = watch_begin(&r, err);
    if (!rc) rc = run_train(&r, err);
    if (!rc) rc = run_results(&r, m, err);
    run_release(&r);
    return rc;
}

int sft_run(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
            struct pool *pool, const char *checkpoint, FILE *log, struct error *err) {
    const struct train_callbacks watch = train_jsonl_callbacks(log);
    return sft_run_with_callbacks(m, jobs, n, o, NULL, pool, checkpoint, log ? &watch : NULL, err);
}

/* the plan */

static int64_t longest_data(const struct sft_trainer *r) {
    int64_t most = 0;
    for (int j = 0; j < r->n; j++) most = MAX(most, r->feeds[j].data.n);
    return most;
}

/* Counts the passes of the longest job's first epoch as batch_add makes them. */
static void passes_count(struct sft_trainer *r, struct training_plan *p) {
    int64_t counted = MIN(r->steps, (longest_data(r) + r->per_update - 1) / r->per_update);
    for (int64_t u = 0; u < counted; u++) {
        struct pack_counter count = {.plan = p};
        for (int64_t i = 0; i < r->per_update; i++)
            for (int j = 0; j < r->n; j++)
                pack_counter_add(&count, feed_at(&r->feeds[j], r->o->seed, u * r->per_update + i),
                                 1);
    }
    training_plan_scale(p, counted);
}

static int pass_run(void *ctx, struct error *err) {
    struct sft_trainer *r = ctx;
    return trainer_accumulate(r->trainer, r->batch, r->n_batch, err);
}

/* Computes and times the first pass of the first update. */
static int pass_measure(struct sft_trainer *r, struct training_plan *p, struct error *err) {
    for (int64_t k = 0; k < r->per_update * r->n; k++) {
        const struct train_sample *s = feed_at(&r->feeds[k % r->n], r->o->seed, k / r->n);
        if (pack_is_full(p->pass_tokens, s->n)) break;
        r->batch[r->n_batch] = *s;
        r->batch[r->n_batch++].adapter = (int32_t)(k % r->n);
        p->pass_tokens += s->n;
    }
    int rc = training_plan_time(pass_run, r, &p->pass_seconds, err);
    if (!rc) p->bytes = trainer_bytes(r->trainer, p->max_rows, p->longest);
    return rc;
}

static int members_run(void *ctx, struct error *err) {
    struct sft_trainer *r = ctx;
    return es_accumulate(r->es, r->trainer, 0, r->batch, r->n_batch, err);
}

static const struct train_sample *longest_sample(const struct sft_trainer *r) {
    const struct train_sample *longest = &r->feeds[0].data.v[0];
    for (int j = 0; j < r->n; j++)
        for (int i = 0; i < r->feeds[j].data.n; i++)
            if (r->feeds[j].data.v[i].n > longest->n) longest = &r->feeds[j].data.v[i];
    return longest;
}

/* Times all members of one adapter on a few samples: the longest one, which determines the memory,
 * and as many of the first ones as fill four passes. */
static int members_measure(struct sft_trainer *r, struct training_plan *p, struct error *err) {
    int64_t members = r->estimates->population, enough = 4 * r->estimates->pass_rows;
    for (int64_t i = 0; i < r->per_update && (i == 0 || p->pass_tokens < enough); i++) {
        const struct train_sample *s = i ? feed_at(&r->feeds[0], r->o->seed, i) : longest_sample(r);
        r->batch[r->n_batch++] = *s;
        p->pass_tokens += members * s->n;
    }
    int rc = training_plan_time(members_run, r, &p->pass_seconds, err);
    p->tokens *= members;
    p->max_rows = MAX(r->estimates->pass_rows, p->longest);
    p->passes = (p->tokens + p->max_rows - 1) / p->max_rows;
    p->max_samples = 0;
    p->bytes = trainer_bytes(r->trainer, 0, 0) + es_bytes(r->es);
    return rc;
}

static int plan_measure(struct sft_trainer *r, const struct model *m, struct pool *pool,
                        struct training_plan *p, struct error *err) {
    r->trainer = trainer_new_lora(m, r->starts, r->n, r->o, pool, err);
    if (!r->trainer) return err->code;
    if (r->estimates) r->es = es_new(m, r->estimates, pool);
    int rc = r->es ? members_measure(r, p, err) : pass_measure(r, p, err);
    if (!rc) rc = training_plan_time_update(r->trainer, p, err);
    if (!rc)
        p->seconds = p->pass_seconds * (double)p->tokens / (double)p->pass_tokens +
                     p->update_seconds * (double)p->updates;
    return rc;
}

int sft_plan_make(const struct model *m, struct train_job *jobs, int n,
                  const struct train_options *o, const struct es_options *es, struct pool *pool,
                  struct training_plan *out, struct error *err) {
    struct sft_trainer r = run_make(jobs, n, o);
    *out = (struct training_plan){0};
    r.estimates = es;
    int rc = run_open(&r, m, err);
    if (!rc) {
        out->updates = r.steps;
        out->samples_per_update = r.per_update;
        out->samples = r.steps * r.per_update * n;
        passes_count(&r, out);
        out->first = xcalloc((size_t)(o->bsz * n), sizeof *out->first);
        for (int64_t i = 0; i < o->bsz; i++)
            for (int j = 0; j < n; j++)
                training_plan_add_example(out, feed_at(&r.feeds[j], o->seed, i), j);
        rc = plan_measure(&r, m, pool, out, err);
    }
    if (rc) training_plan_release(out);
    run_release(&r);
    return rc;
}
