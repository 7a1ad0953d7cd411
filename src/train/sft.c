/*
 * sft: a fine-tuning run: several adapters, one dataset each, trained together.
 *
 * The samples of an update are a function of the options and the update's number only: the p-th
 * sample of a job is entry p mod n of the shuffle of epoch p / n. So a checkpoint stores no
 * positions, and a resumed run has the bits of an uninterrupted one. A pass packs as many samples
 * as fit train_loop.pass_tokens; the packing changes no bits of the result. The job with the
 * largest dataset determines the number of updates; jobs with smaller datasets begin another epoch.
 */
#include "train/train_loop.h"

#include <stdlib.h>
#include <string.h>

struct job_data { /* the data of one job */
    struct dataset data;
    struct epoch_shuffle order;
};

struct sft_trainer {
    struct train_loop c;
    struct train_options options; /* of the run: c.o, with the values that follow from the data */
    struct job_data *job_data;    /* [c.n] */
    const struct es_options *estimates; /* options of `es`, or NULL */
    struct es_options es_options;       /* these, with passes that fit the memory limit */
    /* estimates gradients, instead of backward passes; NULL if `estimates` is NULL */
    struct es *es;
    int64_t per_update; /* samples of each job in an update */
    /* samples of the next pass; their tokens are borrowed from job_data */
    struct train_sample *batch;
    int n_batch;
    int64_t rows; /* tokens in the batch */
};

/* The p-th sample of the job in the run. */
static const struct train_sample *sample_at(struct job_data *f, int64_t seed, int64_t p) {
    return &f->data.v[epoch_shuffle_at(&f->order, seed, p)];
}

static int batch_flush(struct sft_trainer *r, struct error *err) {
    int rc = r->n_batch ? trainer_accumulate(r->c.trainer, r->batch, r->n_batch, err) : OK;
    r->n_batch = 0;
    r->rows = 0;
    return rc;
}

static int batch_add(struct sft_trainer *r, int job, const struct train_sample *s,
                     struct error *err) {
    int rc = pack_is_full(r->rows, s->n, r->c.pass_tokens) ? batch_flush(r, err) : OK;
    r->batch[r->n_batch] = *s;
    r->batch[r->n_batch++].adapter = job;
    r->rows += s->n;
    return rc;
}

static int sft_accumulate(struct sft_trainer *r, int64_t step, struct error *err) {
    int rc = OK;
    for (int64_t i = 0; !rc && i < r->per_update; i++)
        for (int j = 0; !rc && j < r->c.n; j++)
            rc = batch_add(r, j, sample_at(&r->job_data[j], r->c.o->seed, step * r->per_update + i),
                           err);
    return rc ? rc : batch_flush(r, err);
}

static int es_estimate_gradients(struct sft_trainer *r, int64_t step, json_t *line,
                                 struct error *err) {
    json_t *list = json_object();
    int rc = OK;
    json_object_set_new(line, "adapters", list);
    for (int j = 0; !rc && j < r->c.n; j++) {
        for (int64_t i = 0; i < r->per_update; i++)
            r->batch[i] = *sample_at(&r->job_data[j], r->c.o->seed, step * r->per_update + i);
        rc = es_accumulate(r->es, r->c.trainer, j, r->batch, (int)r->per_update, err);
        json_object_set_new(list, r->c.jobs[j].name,
                            json_pack("{s:f,s:f}", "fitness", es_fitness_mean(r->es), "fitness_std",
                                      es_fitness_std(r->es)));
    }
    return rc;
}

static int sft_step(void *ctx, int64_t step, json_t *line, struct error *err) {
    struct sft_trainer *r = ctx;
    int rc = r->es ? es_estimate_gradients(r, step, line, err) : sft_accumulate(r, step, err);
    return rc ? rc : train_loop_optimizer_step(&r->c, step, err);
}

static json_t *identity_json(const struct sft_trainer *r) {
    json_t *id = json_pack("{s:I}", "samples_per_update", (json_int_t)r->per_update);
    if (r->estimates)
        json_object_set_new(id, "es",
                            json_pack("[I,f,s,s]", (json_int_t)r->estimates->population,
                                      r->estimates->sigma, r->estimates->fitness,
                                      r->estimates->shaping));
    return id;
}

/* Sets the lint of job j, whose data is loaded. `eval` holds the evaluation data of an earlier job;
 * it is used again if job j has the same file, else replaced. */
static int job_lint(struct sft_trainer *r, int j, struct dataset *eval, struct error *err) {
    struct train_job *job = &r->c.jobs[j];
    bool same = j > 0 && job->eval_data && r->c.jobs[j - 1].eval_data &&
                strcmp(job->eval_data, r->c.jobs[j - 1].eval_data) == 0;
    int rc = OK;
    if (job->eval_data && !same) {
        dataset_release(eval);
        rc = dataset_load(eval, job->eval_data, NULL, r->c.m->tok, 0, err);
    }
    if (rc) return error_wrap(err, "evaluation data of '%s'", job->name);
    return lint_dataset(&r->job_data[j].data, job->eval_data ? eval : NULL, &job->lint, err);
}

static int data_open(struct sft_trainer *r, struct error *err) {
    const struct model *m = r->c.m;
    struct dataset eval = {0};
    int rc = OK;
    if (!m->tok)
        return error_set(err, ERR_STATE, "model '%s' has no tokenizer to read training data with",
                         m->name);
    for (int j = 0; !rc && j < r->c.n; j++) {
        struct job_data *f = &r->job_data[j];
        rc = dataset_load(&f->data, r->c.jobs[j].data, r->c.jobs[j].format, m->tok,
                          train_loop_max_length(&r->c), err);
        const struct adapter_config activation = train_job_activation(&r->c.jobs[j]);
        if (!rc) rc = dataset_activate(&f->data, &activation, err);
        if (rc) {
            error_wrap(err, "data of '%s'", r->c.jobs[j].name);
            break;
        }
        r->c.data[j] = f->data.hash;
        if (r->c.jobs[j].keep_samples) r->c.jobs[j].samples = train_samples_keep(&f->data);
        rc = epoch_shuffle_init(&f->order, f->data.n, err);
        if (!rc) rc = job_lint(r, j, &eval, err);
    }
    dataset_release(&eval);
    return rc;
}

static int64_t largest_dataset_size(const struct sft_trainer *r) {
    int64_t max = 0;
    for (int j = 0; j < r->c.n; j++) max = MAX(max, r->job_data[j].data.n);
    return max;
}

/* Sets the options that the user left to the data, and prints them. */
static void options_adapt(struct sft_trainer *r) {
    struct train_options *o = &r->options;
    int64_t n = largest_dataset_size(r);
    bool adapted =
        o->bsz == 0 || o->grad_accum == 0 || o->lr == 0 || (o->epochs == 0 && o->max_steps == 0);
    if (r->estimates)
        train_options_fix(o);
    else
        train_options_adapt(o, n, r->c.m->config.d_model);
    r->c.o = o;
    r->per_update = o->bsz * o->grad_accum;
    if (adapted)
        log_info(
            "%lld updates of %lld samples, learning rate %.2g; --epochs or --max-steps, --bsz, "
            "--grad-accum and --lr choose others",
            (long long)train_loop_count_steps(&r->c, n, r->per_update), (long long)r->per_update,
            o->lr);
}

static const struct train_sample *longest_sample(const struct sft_trainer *r) {
    const struct train_sample *longest = &r->job_data[0].data.v[0];
    for (int j = 0; j < r->c.n; j++)
        for (int i = 0; i < r->job_data[j].data.n; i++)
            if (r->job_data[j].data.v[i].n > longest->n) longest = &r->job_data[j].data.v[i];
    return longest;
}

/* Bytes of `es` with the passes of es_options. */
static size_t es_bytes_needed(const struct sft_trainer *r, int64_t longest) {
    size_t bytes = 0;
    for (int j = 0; j < r->c.n; j++)
        bytes = MAX(bytes, es_bytes_bound(&r->c.m->config, &r->es_options,
                                          &r->c.initial_adapters[j]->config, longest,
                                          r->per_update * longest));
    return bytes;
}

static int memory_plan(struct sft_trainer *r, struct error *err) {
    enum { LEAST_ROWS = 64 };
    struct train_memory_needs needs = {.longest = longest_sample(r)->n};
    needs.together = needs.longest;
    if (!r->estimates) return train_loop_plan_memory(&r->c, &needs, err);
    needs.together = 0;
    for (;; r->es_options.pass_rows /= 2) {
        needs.other = es_bytes_needed(r, needs.longest);
        if (train_loop_plan_memory(&r->c, &needs, err) == OK) return OK;
        if (err->code != ERR_MEMORY || r->es_options.pass_rows <= LEAST_ROWS) return err->code;
    }
}

/* Checks the options, reads the data, and makes the trainer; in this order, because reading may
 * take long. */
static int sft_open(struct sft_trainer *r, struct error *err) {
    enum optim optim;
    int rc = lr_schedule_parse(r->c.o->lr_scheduler, &r->c.schedule, err);
    if (!rc) rc = optim_parse(r->c.o->optim, &optim, err);
    if (!rc) rc = data_open(r, err);
    if (rc) return rc;
    options_adapt(r);
    r->c.per_step = 1;
    r->c.steps = train_loop_count_steps(&r->c, largest_dataset_size(r), r->per_update);
    r->batch = try_calloc((size_t)r->per_update * (size_t)r->c.n, sizeof *r->batch, err);
    if (!r->batch) return err->code;
    r->c.identity = identity_json(r);
    rc = train_loop_begin(&r->c, err);
    if (!rc) rc = memory_plan(r, err);
    if (!rc && r->estimates) r->es = es_new(r->c.m, &r->es_options, r->c.pool);
    return rc;
}

static struct sft_trainer sft_make(const struct model *m, struct train_job *jobs, int n,
                                   const struct train_options *o, const struct es_options *es,
                                   struct pool *pool) {
    return (struct sft_trainer){
        .c = train_loop_make(m, jobs, n, o, es ? METHOD_ES : METHOD_SFT, pool),
        .job_data = xcalloc((size_t)n, sizeof(struct job_data)),
        .estimates = es,
        .es_options = es ? *es : (struct es_options){0},
        .options = *o};
}

static void sft_release(struct sft_trainer *r) {
    for (int j = 0; j < r->c.n; j++) {
        dataset_release(&r->job_data[j].data);
        epoch_shuffle_release(&r->job_data[j].order);
    }
    es_free(r->es);
    train_loop_release(&r->c);
    free(r->job_data);
    free(r->batch);
}

int sft_run_with_callbacks(const struct model *m, struct train_job *jobs, int n,
                           const struct train_options *o, const struct es_options *es,
                           struct pool *pool, const char *checkpoint,
                           const struct train_callbacks *callbacks, struct error *err) {
    struct sft_trainer r = sft_make(m, jobs, n, o, es, pool);
    const struct train_loop_ops ops = {.run = sft_step, .ctx = &r};
    r.c.checkpoint = checkpoint;
    r.c.callbacks = callbacks;
    int rc = sft_open(&r, err);
    if (!rc) rc = train_loop_check_data(&r.c, err);
    if (!rc) rc = train_loop_run(&r.c, &ops, err);
    sft_release(&r);
    return rc;
}

int sft_run(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
            struct pool *pool, const char *checkpoint, FILE *log, struct error *err) {
    const struct train_callbacks callbacks = train_jsonl_callbacks(log);
    return sft_run_with_callbacks(m, jobs, n, o, NULL, pool, checkpoint, log ? &callbacks : NULL,
                                  err);
}

/* the plan */

/* Counts the passes of the first epoch of the job with most samples, packed as batch_add does, and
 * scales the counts to the run. */
static void passes_count(struct sft_trainer *r, struct training_plan *p) {
    int64_t counted =
        MIN(r->c.steps, (largest_dataset_size(r) + r->per_update - 1) / r->per_update);
    for (int64_t u = 0; u < counted; u++) {
        struct pack_counter count = {.plan = p, .most = r->c.pass_tokens};
        for (int64_t i = 0; i < r->per_update; i++)
            for (int j = 0; j < r->c.n; j++)
                pack_counter_add(
                    &count, sample_at(&r->job_data[j], r->c.o->seed, u * r->per_update + i), 1);
    }
    training_plan_scale(p, counted);
}

static int pass_run(void *ctx, struct error *err) {
    struct sft_trainer *r = ctx;
    return trainer_accumulate(r->c.trainer, r->batch, r->n_batch, err);
}

/* Runs the first pass of the first update and measures its time. */
static int pass_measure(struct sft_trainer *r, struct training_plan *p, struct error *err) {
    for (int64_t k = 0; k < r->per_update * r->c.n; k++) {
        const struct train_sample *s =
            sample_at(&r->job_data[k % r->c.n], r->c.o->seed, k / r->c.n);
        if (pack_is_full(p->pass_tokens, s->n, r->c.pass_tokens)) break;
        r->batch[r->n_batch] = *s;
        r->batch[r->n_batch++].adapter = (int32_t)(k % r->c.n);
        p->pass_tokens += s->n;
    }
    int rc = training_plan_time(pass_run, r, &p->pass_seconds, err);
    if (!rc) p->bytes = trainer_bytes(r->c.trainer, p->max_rows, p->longest);
    return rc;
}

static int es_members_run(void *ctx, struct error *err) {
    struct sft_trainer *r = ctx;
    return es_accumulate(r->es, r->c.trainer, 0, r->batch, r->n_batch, err);
}

/* Measures the time of all ES members of one adapter on a few samples: the longest sample, which
 * determines the memory, and further samples of the first update until four passes are full. */
static int es_members_measure(struct sft_trainer *r, struct training_plan *p, struct error *err) {
    int64_t members = r->estimates->population, enough = 4 * r->es_options.pass_rows;
    for (int64_t i = 0; i < r->per_update && (i == 0 || p->pass_tokens < enough); i++) {
        const struct train_sample *s =
            i ? sample_at(&r->job_data[0], r->c.o->seed, i) : longest_sample(r);
        r->batch[r->n_batch++] = *s;
        p->pass_tokens += members * s->n;
    }
    int rc = training_plan_time(es_members_run, r, &p->pass_seconds, err);
    p->tokens *= members;
    p->max_rows = MAX(r->es_options.pass_rows, p->longest);
    p->passes = (p->tokens + p->max_rows - 1) / p->max_rows;
    p->max_samples = 0;
    p->bytes = trainer_bytes(r->c.trainer, 0, 0) + es_bytes(r->es);
    return rc;
}

static int plan_measure(struct sft_trainer *r, struct training_plan *p, struct error *err) {
    int rc = r->es ? es_members_measure(r, p, err) : pass_measure(r, p, err);
    if (!rc) rc = training_plan_time_update(r->c.trainer, p, err);
    if (!rc)
        p->seconds = p->pass_seconds * (double)p->tokens / (double)p->pass_tokens +
                     p->update_seconds * (double)p->updates;
    return rc;
}

int sft_plan_make(const struct model *m, struct train_job *jobs, int n,
                  const struct train_options *o, const struct es_options *es, struct pool *pool,
                  struct training_plan *out, struct error *err) {
    struct sft_trainer r = sft_make(m, jobs, n, o, es, pool);
    *out = (struct training_plan){0};
    int rc = sft_open(&r, err);
    if (!rc) {
        out->memory = r.c.memory;
        out->updates = r.c.steps;
        out->samples_per_update = r.per_update;
        out->samples = r.c.steps * r.per_update * n;
        passes_count(&r, out);
        out->first = xcalloc((size_t)(r.options.bsz * n), sizeof *out->first);
        for (int64_t i = 0; i < r.options.bsz; i++)
            for (int j = 0; j < n; j++)
                training_plan_add_example(out, sample_at(&r.job_data[j], o->seed, i), j);
        train_loop_show_tokens(&r.c, "first pass, tokens");
        rc = plan_measure(&r, out, err);
        progress_finish(&r.c.bar, NULL);
    }
    if (rc) training_plan_release(out);
    sft_release(&r);
    return rc;
}
