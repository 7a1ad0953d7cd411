/*
 * estimate: the work of a run and the time that it takes, before the run.
 *
 * A rehearsal runs the search and the held-out test with untrained founders, and a counter in place
 * of the engine (engine.h: work). Replies are made up and adapters are not trained, so the numbers
 * of a rehearsal mean nothing; but it asks what the run will ask. It stops after one generation of
 * children, of which it breeds one: the others, and later generations, cost as much. Training is
 * measured by its own plan. A rehearsal writes nothing that stays: it is a replay of a generation
 * that does not come, with a store in memory. Its own time, for breeding and prompts, is part of
 * the time of a run.
 */
#define _GNU_SOURCE
#include "evolve/run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { REHEARSED = 1, MAX_RECORDED = REHEARSED + 2 }; /* generations after the founders */

/* The sum of all work so far. */
struct rehearsed_work {
    struct work_counts counts;
    int64_t trainings, updates, trained_tokens, evaluations;
    double training_seconds, flops;
};
struct evolve_rehearsal {
    struct work_counter *counter;
    struct rehearsed_work sum, at[MAX_RECORDED]; /* at[g]: at the end of generation g */
    int n;                                       /* number of generations recorded */
    double planning; /* seconds in which training was measured, which the run does not need, less
                        those of breeding that only the run needs */
};

static void counts_read(struct evolve_rehearsal *h) {
    h->sum.counts = work_counter_counts(h->counter);
    h->sum.counts.other_seconds -= h->planning;
}

void evolve_rehearsal_record(struct evolve_run *r, int n) {
    struct evolve_rehearsal *h = r->rehearsal;
    counts_read(h);
    h->sum.flops = r->spent.flops;
    h->sum.evaluations += n;
    if (h->n < MAX_RECORDED) h->at[h->n++] = h->sum;
}

void evolve_rehearsal_breed(struct evolve_run *r, double unbred) {
    r->rehearsal->planning -= unbred;
}

int evolve_rehearsal_train(struct evolve_run *r, struct train_job *jobs, int n,
                           const struct train_options *o, const struct es_options *es,
                           struct error *err) {
    struct rehearsed_work *sum = &r->rehearsal->sum;
    struct training_plan plan;
    double start = clock_now();
    int rc = sft_plan_make(r->model, jobs, n, o, es, r->env->pool, &plan, err);
    if (rc != OK) return rc;
    sum->trainings++;
    sum->updates += plan.updates;
    sum->trained_tokens += plan.tokens;
    sum->training_seconds += plan.seconds;
    training_plan_release(&plan);
    r->rehearsal->planning += clock_now() - start;
    return OK;
}

/* sum += (b - a) · times */
static void work_add(struct rehearsed_work *sum, const struct rehearsed_work *b,
                     const struct rehearsed_work *a, int64_t times) {
    work_counts_add(&sum->counts, &b->counts, times);
    work_counts_add(&sum->counts, &a->counts, -times);
    sum->trainings += (b->trainings - a->trainings) * times;
    sum->updates += (b->updates - a->updates) * times;
    sum->trained_tokens += (b->trained_tokens - a->trained_tokens) * times;
    sum->evaluations += (b->evaluations - a->evaluations) * times;
    sum->training_seconds += (b->training_seconds - a->training_seconds) * (double)times;
}

/* An untrained adapter like those that `o` trains. */
static struct adapter *untrained(const struct evolve_run *r, const struct train_options *o,
                                 uint64_t seed, struct error *err) {
    struct adapter_config c;
    struct adapter *a = NULL;
    if (train_adapter_config(o, &r->model->config, &c, err) == OK)
        a = adapter_new(&r->model->config, &c, seed);
    adapter_config_release(&c);
    return a;
}

/* Founders from adapters are loaded; the training of the others is measured. */
static int founders_rehearse(struct evolve_run *r, bool trained, struct error *err) {
    struct train_options o = r->o->train;
    struct train_job jobs[MAX_FOUNDERS] = {{0}};
    int n = 0;
    o.seed = r->o->seed;
    for (int i = 0; i < r->n_founders; i++) {
        r->founders[i] = r->is_adapter[i] ? adapter_open(r->data[i], r->model, err)
                                          : untrained(r, &o, (uint64_t)i + 1, err);
        if (!r->founders[i]) return err->code;
        adapter_offload(r->founders[i], r->dir);
        if (!r->is_adapter[i])
            jobs[n++] = (struct train_job){.name = r->names[i],
                                           .data = r->data[i],
                                           .start = r->founders[i],
                                           .unmeasured = true};
    }
    return n == 0 || trained ? OK : evolve_rehearsal_train(r, jobs, n, &o, NULL, err);
}

static int search_rehearse(struct evolve_run *r, struct error *err) {
    const struct search_method *s = search_methods;
    while (strcmp(s->name, r->o->evolve.search) != 0) s++;
    return s->run(r, err);
}

/* Whether a search has as many generations as the recipe says; the others have one at most. */
static bool has_generations(const struct evolve_recipe *o) {
    return strcmp(o->evolve.search, "breed") == 0 || strcmp(o->evolve.search, "coefficients") == 0;
}

/* Generations after the rehearsed ones; fewer if the budget of the recipe ends before. */
static int64_t later_generations(const struct evolve_recipe *o, const struct evolve_rehearsal *h,
                                 int64_t generations) {
    int64_t n = generations - REHEARSED;
    if (!has_generations(o) || n <= 0 || h->n <= REHEARSED) return 0;
    double left = o->evolve.max_flops - h->at[REHEARSED].flops,
           one = h->at[REHEARSED].flops - h->at[REHEARSED - 1].flops;
    if (o->evolve.max_flops > 0) n = MIN(n, (int64_t)fmax(0, left / fmax(one, 1)));
    return n;
}

/* Adds candidates in place of the best ones of later generations, so that the held-out test has as
 * many as in the run. */
static int best_extend(struct evolve_run *r, int64_t n, struct error *err) {
    struct train_options o = r->o->train;
    if (r->o->evolve.rank > 0) o.r = r->o->evolve.rank;
    r->best = xrealloc(r->best, (size_t)(r->n_best + n) * sizeof *r->best);
    for (int64_t i = 0; i < n; i++) {
        struct candidate c = {.adapter = untrained(r, &o, (uint64_t)r->n_best + 1000, err)};
        if (!c.adapter) return err->code;
        adapter_offload(c.adapter, r->dir);
        snprintf(c.name, sizeof c.name, "g%d", r->n_best);
        r->best[r->n_best++] = c;
    }
    return OK;
}

/* The work of the run. generations, recorded: those of the recipe; those that need no work. */
static int run_rehearse(struct evolve_run *r, int64_t generations, int recorded,
                        struct rehearsed_work *out, struct error *err) {
    struct evolve_rehearsal *h = r->rehearsal;
    int rc = founders_rehearse(r, recorded > 0, err);
    counts_read(h);
    struct rehearsed_work start = h->sum;
    *out = start;
    if (rc == OK) rc = search_rehearse(r, err);
    if (rc != OK) return rc;
    int64_t later = later_generations(r->o, h, generations);
    for (int g = 0; g < h->n; g++)
        if (g >= recorded) work_add(out, &h->at[g], g ? &h->at[g - 1] : &start, 1);
    if (later > 0)
        work_add(out, &h->at[REHEARSED], &h->at[REHEARSED - 1],
                 MIN(later, MAX(0, generations + 1 - recorded)));
    rc = best_extend(r, later, err);
    if (rc != OK) return rc;
    counts_read(h);
    const struct rehearsed_work search = h->sum;
    rc = evolve_run_evaluate_heldout(r, err);
    counts_read(h);
    work_add(out, &h->sum, &search, 1);
    return rc;
}

static int rehearsal_open(struct evolve_run *r, struct evolve_rehearsal *h, struct error *err) {
    if (!(r->store = store_open(":memory:", err)) || evolve_run_open_model(r, err) != OK)
        return err->code;
    h->counter = work_counter_new(r->engine, r->model);
    r->engine_client.run = work_counter_run;
    r->engine_client.run_ctx = h->counter;
    return OK;
}

static void plan_add(json_t *plan, const struct rehearsed_work *w, const struct work_speed *s) {
    work_plan_add(plan, &w->counts, s, w->training_seconds);
    json_object_update_new(json_object_get(plan, "work"),
                           json_pack("{s:I,s:I,s:I,s:f,s:I}", "trainings", (json_int_t)w->trainings,
                                     "updates", (json_int_t)w->updates, "trained_tokens",
                                     (json_int_t)w->trained_tokens, "training_seconds",
                                     w->training_seconds, "evaluations",
                                     (json_int_t)w->evaluations));
}

int evolve_run_estimate(const struct evolve_env *env, const struct evolve_recipe *o, int recorded,
                        json_t *plan, struct error *err) {
    char folder[] = "/tmp/shoal-plan-XXXXXX";
    struct evolve_rehearsal h = {0};
    struct evolve_recipe few = *o; // borrows all but the number of generations
    struct evolve_run r = {
        .env = env, .o = &few, .id = "plan", .replay_generation = INT32_MAX, .rehearsal = &h};
    struct rehearsed_work work;
    struct work_speed speed;
    bool muted = log_muted;
    if (has_generations(o)) few.evolve.generations = MIN(o->evolve.generations, REHEARSED);
    if (!mkdtemp(folder)) return error_errno(err, "cannot make a folder in '/tmp'");
    r.dir = xstrdup(folder); // for offloaded adapters and the joined files of a persona
    r.result = json_object();
    log_muted = true; // a rehearsal shows no progress
    int rc = rehearsal_open(&r, &h, err);
    if (rc == OK) rc = run_rehearse(&r, o->evolve.generations, recorded, &work, err);
    // a run evaluates groups of adapters whose packs fit
    if (rc == OK) evolve_run_fit_sample(&r, h.counter);
    if (rc == OK) rc = work_counter_measure(h.counter, &speed, err);
    log_muted = muted;
    if (rc == OK) plan_add(plan, &work, &speed);
    work_counter_free(h.counter);
    json_decref(r.result);
    evolve_run_close(&r);
    dir_delete(folder);
    return rc;
}
