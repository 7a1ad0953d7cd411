/*
 * train_loop: updates, log lines and checkpoints of a run, for all methods.
 *
 * A run that fails, because of a full disk, a NaN or any other error, leaves its last checkpoint
 * intact, names it in the error, and resumes from it when called again. The caller removes the last
 * checkpoint when the result is on disk.
 */
#include "train/train_loop.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int epoch_shuffle_init(struct epoch_shuffle *o, int n, struct error *err) {
    *o = (struct epoch_shuffle){.n = n, .epoch = -1};
    o->v = try_calloc((size_t)n, sizeof *o->v, err);
    return o->v ? OK : err->code;
}

uint32_t epoch_shuffle_at(struct epoch_shuffle *o, int64_t seed, int64_t p) {
    if (o->epoch != p / o->n) {
        o->epoch = p / o->n;
        struct rng r = rng_make((uint64_t)seed, RNG_SHUFFLE, 0, (uint32_t)o->epoch);
        for (int i = 0; i < o->n; i++) o->v[i] = (uint32_t)i;
        rng_shuffle(&r, o->v, (size_t)o->n);
    }
    return o->v[p % o->n];
}

void epoch_shuffle_release(struct epoch_shuffle *o) {
    free(o->v);
    *o = (struct epoch_shuffle){0};
}

struct train_loop train_loop_make(const struct model *m, struct train_job *jobs, int n,
                                  const struct train_options *o, enum train_method method,
                                  struct pool *pool) {
    CHECK(n > 0);
    for (int j = 0; j < n; j++) {
        jobs[j].result = NULL;
        jobs[j].first_reward = jobs[j].last_reward = jobs[j].last_accuracy = NAN;
    }
    return (struct train_loop){.m = m,
                               .o = o,
                               .pool = pool,
                               .jobs = jobs,
                               .n = n,
                               .method = train_method_name(method),
                               .unit = method >= METHOD_DPO ? "step" : "update",
                               .data = xcalloc((size_t)n, sizeof(char *)),
                               .saved = -1,
                               .pass_tokens = PACK_MAX_TOKENS,
                               .run_started = clock_now(),
                               .run_joules = energy_now()};
}

int32_t train_loop_max_length(const struct train_loop *c) {
    int32_t limit = c->m->config.max_seq_len;
    return c->o->max_length > 0 ? (int32_t)MIN(limit, c->o->max_length) : limit;
}

int64_t train_loop_count_steps(const struct train_loop *c, int64_t n, int64_t per_step) {
    double exact = c->o->epochs * (double)n / (double)per_step;
    return c->o->max_steps > 0 ? c->o->max_steps : MAX((int64_t)ceil(exact - 1e-9), 1);
}

struct adapter_config train_job_activation(const struct train_job *job) {
    struct adapter_config c = {0};
    if (job->start) return job->start->config;
    if (job->invocation) c.invocation = job->invocation->v, c.n_invocation = job->invocation->n;
    return c;
}

/* Sets the initial adapter of each job: its `start`, if it has one (retained), or a new adapter
 * whose values depend on the job's name and the seed. */
static int initial_adapters_make(struct train_loop *c, struct error *err) {
    struct adapter_config a;
    int rc = train_adapter_config(c->o, &c->m->config, &a, err);
    for (int j = 0; !rc && j < c->n; j++) {
        const struct train_job *job = &c->jobs[j];
        const struct adapter_config activation = train_job_activation(job);
        char *key = xasprintf("%s %lld", job->name, (long long)c->o->seed);
        a.invocation = activation.invocation;
        a.n_invocation = activation.n_invocation;
        c->initial_adapters[j] =
            job->start ? adapter_retain(job->start)
                       : adapter_new_for_model(c->m, &a, hash_fnv1a(key, strlen(key)), err);
        free(key);
        if (!c->initial_adapters[j]) rc = err->code;
    }
    adapter_config_release(&a);
    return rc;
}

/* Adds the step of the checkpoint, if there is one, to the error's text. The text says "at least",
 * because a save whose last flush fails has already replaced the file. */
static int error_add_resume_hint(const struct train_loop *c, struct error *err) {
    if (c->saved < 0) return err->code;
    char *what = xstrdup(err->text);
    error_set(err, err->code, "%s; '%s' holds at least %s %lld, the same command continues it",
              what, c->checkpoint, c->unit, (long long)c->saved);
    free(what);
    return err->code;
}

bool train_data_is_generated(const char *path) {
    return strncmp(path, "fry:", 4) == 0;
}

/* Computes the hashes of each job's data, which its result will have; jobs with one file share
 * them. */
static int training_data_init(struct train_loop *c, struct error *err) {
    c->training_data = xcalloc((size_t)c->n, sizeof *c->training_data);
    for (int j = 0; j < c->n; j++) {
        const struct train_job *job = &c->jobs[j], *last = j ? job - 1 : NULL;
        if (train_data_is_generated(job->data)) continue;
        bool same = last && strcmp(last->data, job->data) == 0 && last->format == job->format;
        c->training_data[j] = same ? training_data_retain(c->training_data[j - 1])
                                   : training_data_of_file(job->data, job->format, err);
        if (!c->training_data[j]) return err->code;
    }
    return OK;
}

static void identity_add_common(struct train_loop *c) {
    const struct train_options *o = c->o;
    json_t *jobs = json_array();
    for (int j = 0; j < c->n; j++)
        json_array_append_new(
            jobs, json_pack("[s,s,s]", c->jobs[j].name, c->data[j], c->initial_adapters[j]->hash));
    json_t *common =
        json_pack("{s:I,s:I,s:f,s:f,s:f,s:i,s:o}", "steps", (json_int_t)c->steps, "max_length",
                  (json_int_t)o->max_length, "lr", o->lr, "warmup_ratio", o->warmup_ratio,
                  "min_lr_ratio", o->min_lr_ratio, "schedule", (int)c->schedule, "jobs", jobs);
    json_object_update(c->identity, common);
    json_decref(common);
}

json_t *rl_identity(const struct train_loop *c) {
    return json_pack("{s:s,s:I,s:I,s:I}", "method", c->method, "per_step", (json_int_t)c->per_step,
                     "bsz", (json_int_t)c->o->bsz, "grad_accum", (json_int_t)c->o->grad_accum);
}

void train_loop_show(struct train_loop *c, int64_t done, const char *detail) {
    struct log_sink *sink = log_set_sink(NULL);
    log_set_sink(sink);
    if (c->bar.title && !sink) progress_update(&c->bar, done, detail);
}

/* The bar of a run has steps, and tokens of the step in progress as its detail; the bar of a plan
 * has tokens. */
static void pass_progress(void *ctx, int64_t tokens) {
    struct train_loop *c = ctx;
    char detail[128];
    snprintf(detail, sizeof detail, "%lld tokens%s%s", (long long)tokens, *c->detail ? ", " : "",
             c->detail);
    if (c->bar.total == 0)
        train_loop_show(c, tokens, NULL);
    else
        train_loop_show(c, c->bar.done, detail);
}

void train_loop_show_tokens(struct train_loop *c, const char *title) {
    progress_start(&c->bar, title, 0);
}

int train_loop_begin(struct train_loop *c, struct error *err) {
    c->initial_adapters = xcalloc((size_t)c->n, sizeof *c->initial_adapters);
    int rc = lr_schedule_parse(c->o->lr_scheduler, &c->schedule, err);
    if (!rc) rc = initial_adapters_make(c, err);
    if (!rc) rc = training_data_init(c, err);
    if (rc) return rc;
    if ((rc = train_kv_dtype_parse(c->o, c->m->cls, c->checkpoint, &c->kv, err))) return rc;
    identity_add_common(c);
    struct train_options o = *c->o;
    o.kv_cache_dtype = (char *)(uintptr_t)dtype_name(c->kv);
    c->trainer = trainer_new_lora(c->m, c->initial_adapters, c->n, &o, c->pool, err);
    if (!c->trainer) return err->code;
    for (int j = 0; j < c->n; j++) adapter_free_pages(c->initial_adapters[j]); // it has copies
    trainer_on_progress(c->trainer, pass_progress, c);
    return OK;
}

/* Warns of evaluation samples whose questions differ from those of the data in some words. lint
 * finds equal ones. */
static int near_duplicates_check(const struct train_loop *c, int j, struct error *err) {
    const struct train_job *job = &c->jobs[j];
    struct contamination found;
    if (!job->eval_data || !c->training_data[j] || train_data_is_generated(job->eval_data))
        return OK;
    int rc = contamination_of_file(&found, c->training_data[j], job->eval_data, err);
    if (rc == OK && found.near)
        log_warn("%s: the questions of %lld of %lld evaluation samples are in the data with other "
                 "words",
                 job->name, (long long)found.near, (long long)found.of);
    contamination_release(&found);
    return rc;
}

int train_loop_check_data(const struct train_loop *c, struct error *err) {
    int rc = OK;
    for (int j = 0; j < c->n; j++) lint_log(&c->jobs[j].lint, c->jobs[j].name);
    for (int j = 0; !rc && j < c->n; j++) rc = near_duplicates_check(c, j, err);
    for (int j = 0; !rc && j < c->n; j++) {
        const struct lint_matches *same = &c->jobs[j].lint.eval_samples;
        if (same->n > 0)
            rc =
                error_set(err, ERR_STATE,
                          "%d of %d evaluation samples are in the data of '%s' (line %d is line %d "
                          "of '%s'): nothing can be measured on them; take them out of one of the "
                          "files",
                          same->n, c->jobs[j].lint.n_eval, c->jobs[j].name, same->other, same->line,
                          c->jobs[j].data);
    }
    return rc;
}

static float lr_of_update(const struct train_loop *c, int64_t u) {
    int64_t total = c->steps * c->per_step,
            warmup = (int64_t)ceil(c->o->warmup_ratio * (double)total);
    return lr_schedule_at(c->schedule, c->o->lr, c->o->min_lr_ratio, u, warmup, total);
}

int train_loop_optimizer_step(struct train_loop *c, int64_t u, struct error *err) {
    int64_t tokens = c->stats.tokens, targets = c->stats.targets;
    float lr = lr_of_update(c, u);
    int rc = trainer_update(c->trainer, lr, &c->stats, err);
    if (rc) return rc;
    c->lr = (double)lr;
    c->stats.tokens += tokens;
    c->stats.targets += targets;
    for (int j = 0; j < c->n; j++) {
        struct train_job *job = &c->jobs[j];
        job->last_loss = trainer_adapter_loss(c->trainer, j);
        if (u == 0) job->first_loss = job->last_loss;
    }
    return OK;
}

/* Whether a checkpoint is due after `done` steps. */
static bool is_save_due(const struct train_loop *c, int64_t done) {
    return done == c->steps || (c->o->save_steps > 0 && done % c->o->save_steps == 0);
}

static int train_loop_report_step(const struct train_loop *c, int64_t done,
                                  const json_t *extra_metrics, struct error *err) {
    double now = clock_now(),
           speed = now > c->step_started ? (double)c->stats.tokens / (now - c->step_started) : 0;
    const json_t *reward = json_object_get(extra_metrics, "reward");
    process_metrics_report(
        (const struct process_metric[]){
            {"train_step", (double)done},
            {"train_tokens_per_second", speed},
            reward ? (struct process_metric){"train_reward", json_number_value(reward)}
                   : (struct process_metric){"train_loss", c->stats.loss}},
        3);
    if (!c->callbacks) return OK;
    struct train_event e = {.step = done,
                            .steps = c->steps,
                            .lr = c->lr,
                            .seconds = now - c->run_started,
                            .joules = energy_now() - c->run_joules,
                            .tokens_per_s = speed,
                            .stats = &c->stats,
                            .jobs = c->jobs,
                            .n = c->n,
                            .checkpoint_due = is_save_due(c, done),
                            .extra_metrics =
                                json_object_size(extra_metrics) ? extra_metrics : NULL};
    return c->callbacks->update(c->callbacks->ctx, &e, err);
}

static int train_loop_save(struct train_loop *c, const struct train_loop_ops *s, int64_t done,
                           struct error *err) {
    json_t *losses = json_array();
    for (int j = 0; j < c->n; j++)
        json_array_append_new(losses,
                              json_pack("[f,f]", c->jobs[j].first_loss, c->jobs[j].last_loss));
    json_t *extra = json_pack("{s:O,s:o}", "run", c->identity, "losses", losses);
    if (s->state) json_object_set_new(extra, "state", s->state(s->ctx));
    int rc = trainer_save(c->trainer, c->checkpoint, extra, err);
    if (!rc) c->saved = done;
    json_decref(extra);
    return rc;
}

/* Loads the checkpoint; ERR_MISMATCH if it was saved by a run with another identity. */
static int train_loop_resume(struct train_loop *c, const struct train_loop_ops *s,
                             struct error *err) {
    json_t *extra = NULL;
    int rc = trainer_load(c->trainer, c->checkpoint, &extra, err);
    if (!rc && !json_equal(json_object_get(extra, "run"), c->identity))
        rc = error_set(err, ERR_MISMATCH,
                       "checkpoint '%s' belongs to a run with other data, adapters or options; "
                       "remove it to start again",
                       c->checkpoint);
    for (int j = 0; !rc && j < c->n; j++) {
        const json_t *pair = json_array_get(json_object_get(extra, "losses"), (size_t)j);
        c->jobs[j].first_loss = json_number_value(json_array_get(pair, 0));
        c->jobs[j].last_loss = json_number_value(json_array_get(pair, 1));
    }
    if (!rc) {
        if (s->restore) s->restore(s->ctx, json_object_get(extra, "state"));
        c->saved = trainer_update_count(c->trainer) / c->per_step;
        log_info("continuing '%s' after %s %lld", c->checkpoint, c->unit, (long long)c->saved);
    }
    json_decref(extra);
    return rc;
}

/* A copy of adapter j as it is now, bound to the model. Its lineage has the method and the hashes
 * of data, initial adapter and model. NULL: `err` is set. */
static struct adapter *adapter_export(const struct train_loop *c, int j, struct error *err) {
    json_t *lineage = json_pack("{s:s,s:s,s:s}", "operator", c->method, "data", c->data[j], "start",
                                c->initial_adapters[j]->hash);
    adapter_lineage_set_model(lineage, c->m);
    if (c->kv != DTYPE_F32)
        json_object_set_new(lineage, "kv_cache_dtype", json_string(dtype_name(c->kv)));
    struct adapter *a = trainer_export_adapter(c->trainer, j, lineage);
    json_decref(lineage);
    adapter_add_training_data(a, c->initial_adapters[j]->training_data);
    adapter_add_training_data(a, c->training_data[j]);
    if (adapter_bind(a, c->m, err) == OK) return a;
    adapter_release(a);
    return NULL;
}

static int versions_publish(const struct train_loop *c, int64_t done, struct error *err) {
    const struct train_versions *v = c->callbacks ? c->callbacks->versions : NULL;
    int rc = OK;
    for (int j = 0; v && rc == OK && j < c->n; j++) {
        struct adapter *a = adapter_export(c, j, err);
        rc = a ? v->publish(v->ctx, &c->jobs[j], done, a, err) : err->code;
        adapter_release(a);
    }
    return rc;
}

/* Whether the adapters after `done` steps are a version. */
static bool is_version(const struct train_loop *c, int64_t done) {
    const struct train_versions *v = c->callbacks ? c->callbacks->versions : NULL;
    return v && done < c->steps && done % v->every == 0;
}

/* Runs one step, reports it, and saves a checkpoint and publishes a version if they are due. */
static int step_run(struct train_loop *c, const struct train_loop_ops *s, int64_t step,
                    struct error *err) {
    int64_t done = step + 1;
    json_t *line = json_object();
    c->step_started = clock_now();
    c->stats = (struct update_stats){.loss = c->stats.loss};
    int rc = s->run(s->ctx, step, line, err);
    if (rc) error_wrap(err, "%s %lld", c->unit, (long long)done);
    if (!rc) rc = train_loop_report_step(c, done, line, err);
    const json_t *reward = json_object_get(line, "reward");
    snprintf(c->detail, sizeof c->detail, "%s %.4f", reward ? "reward" : "loss",
             reward ? json_number_value(reward) : c->stats.loss);
    if (!rc && c->checkpoint && is_save_due(c, done)) rc = train_loop_save(c, s, done, err);
    if (!rc && is_version(c, done)) rc = versions_publish(c, done, err);
    json_decref(line);
    return rc;
}

static int callbacks_begin(const struct train_loop *c, struct error *err) {
    if (!c->callbacks) return OK;
    json_t *data = json_array();
    for (int j = 0; j < c->n; j++)
        json_array_append_new(data, json_pack("{s:s,s:o,s:s,s:s,s:o}", "name", c->jobs[j].name,
                                              "file", json_from_path(c->jobs[j].data), "sha256",
                                              c->data[j], "start", c->initial_adapters[j]->hash,
                                              "lint", lint_json(&c->jobs[j].lint)));
    json_t *about = json_pack("{s:I,s:o}", "steps", (json_int_t)c->steps, "data", data);
    int rc = c->callbacks->begin(c->callbacks->ctx, trainer_update_count(c->trainer) / c->per_step,
                                 about, err);
    json_decref(about);
    return rc;
}

static void memory_log(const struct train_loop *c) {
    struct buf text = {0};
    train_memory_text(&c->memory, &text);
    log_info("%s", text.data);
    buf_release(&text);
}

/* After the first step of a process: how long a step takes, and when the run will end. */
static void time_log(const struct train_loop *c, int64_t steps_left) {
    enum { SHORT_SECONDS = 10 };
    double each = clock_now() - c->step_started, left = each * (double)steps_left;
    time_t end = time(NULL) + (time_t)left;
    struct tm local;
    char text[32] = "";
    if (left < SHORT_SECONDS || !localtime_r(&end, &local)) return;
    strftime(text, sizeof text, left < 86400 / 2 ? "%H:%M" : "%Y-%m-%d %H:%M", &local);
    log_info("%.1f s a %s; %lld more take about %.0f min, until %s", each, c->unit,
             (long long)steps_left, ceil(left / 60), text);
}

int train_loop_run(struct train_loop *c, const struct train_loop_ops *s, struct error *err) {
    int rc = OK;
    if (c->checkpoint && path_exists(c->checkpoint))
        rc = train_loop_resume(c, s, err);
    else if (s->restore)
        s->restore(s->ctx, NULL);
    if (!rc) rc = callbacks_begin(c, err);
    if (rc) return error_add_resume_hint(c, err);
    memory_log(c);
    int64_t first = trainer_update_count(c->trainer) / c->per_step;
    if (first > 0 && first < c->steps && versions_publish(c, first, err) != OK)
        return error_add_resume_hint(c, err);
    progress_start(&c->bar, "training", c->steps);
    progress_resume(&c->bar, first);
    for (int64_t i = first; !rc && i < c->steps; i++) {
        rc = step_run(c, s, i, err);
        progress_update(&c->bar, i + 1, c->detail);
        if (!rc && i == first) time_log(c, c->steps - i - 1);
        if (!rc) rc = log_check_cancelled(err);
    }
    progress_finish(&c->bar, c->detail);
    c->bar.title = NULL;
    if (rc) return error_add_resume_hint(c, err);
    trainer_free_activations(c->trainer);
    for (int j = 0; !rc && j < c->n; j++)
        if (!(c->jobs[j].result = adapter_export(c, j, err))) rc = err->code;
    return rc;
}

void train_loop_release(struct train_loop *c) {
    for (int j = 0; c->initial_adapters && j < c->n; j++) adapter_release(c->initial_adapters[j]);
    for (int j = 0; c->training_data && j < c->n; j++) training_data_release(c->training_data[j]);
    trainer_free(c->trainer);
    json_decref(c->identity);
    free(c->training_data);
    free(c->initial_adapters);
    free(c->data);
}

static int tokenizer_check(const struct model *m, struct error *err) {
    if (m->tok) return OK;
    return error_set(err, ERR_STATE, "model '%s' has no tokenizer to read training data with",
                     m->name);
}

int rl_run_with_callbacks(const struct model *m, struct train_job *jobs, int n,
                          const struct train_options *o, enum train_method method,
                          const struct rl_options *p, const struct reward_fn *reward,
                          struct pool *pool, const char *checkpoint,
                          const struct train_callbacks *callbacks, struct error *err) {
    struct train_options no_dropout = *o;
    no_dropout.lora_dropout = 0;
    train_options_fix(&no_dropout);
    CHECK(method >= METHOD_DPO);
    if (tokenizer_check(m, err)) return err->code;
    struct train_loop c = train_loop_make(m, jobs, n, &no_dropout, method, pool);
    c.checkpoint = checkpoint;
    c.callbacks = callbacks;
    return method == METHOD_DPO ? dpo_run(&c, p, err)
                                : policy_gradient_run(&c, method, p, reward, err);
}

int rl_run(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
           enum train_method method, const struct rl_options *p, const struct reward_fn *reward,
           struct pool *pool, const char *checkpoint, FILE *log, struct error *err) {
    const struct train_callbacks callbacks = train_jsonl_callbacks(log);
    return rl_run_with_callbacks(m, jobs, n, o, method, p, reward, pool, checkpoint,
                                 log ? &callbacks : NULL, err);
}

int rl_plan_make(const struct model *m, struct train_job *jobs, int n,
                 const struct train_options *o, enum train_method method,
                 const struct rl_options *p, const struct reward_fn *reward, struct pool *pool,
                 struct rl_plan *out, struct error *err) {
    struct train_options no_dropout = *o;
    no_dropout.lora_dropout = 0;
    train_options_fix(&no_dropout);
    *out = (struct rl_plan){0};
    CHECK(method >= METHOD_DPO);
    if (tokenizer_check(m, err)) return err->code;
    struct train_loop c = train_loop_make(m, jobs, n, &no_dropout, method, pool);
    int rc = method == METHOD_DPO ? dpo_plan(&c, p, out, err)
                                  : policy_gradient_plan(&c, method, p, reward, out, err);
    if (rc) rl_plan_release(out);
    return rc;
}
