/*
 * search_methods: methods that search for a better adapter, one table row each. Each method first
 * evaluates the founders, as generation 0, and counts its cost. breed and coefficients stop before
 * a generation that would exceed the recipe's budget; gradient and es make as many updates as the
 * budget allows, at least one; merge ignores the budget. The result is the first candidate of the
 * last recorded generation.
 */
#define _GNU_SOURCE
#include "evolve/run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whether the remaining budget covers this cost. */
static bool is_within_budget(const struct evolve_run *r, double flops) {
    return r->o->evolve.max_flops <= 0 || r->spent.flops + flops <= r->o->evolve.max_flops;
}

static json_t *generation_json(int generation, const struct candidate *c, int n) {
    json_t *list = json_array();
    struct adapter *a[MAX_CANDIDATES];
    int n_adapters = 0;
    for (int i = 0; i < n; i++) {
        json_array_append_new(list, candidate_json(&c[i]));
        if (c[i].adapter) a[n_adapters++] = c[i].adapter;
    }
    struct diversity d = diversity_compute(a, n_adapters, NULL);
    return json_pack("{s:i,s:o,s:o}", "generation", generation, "candidates", list, "diversity",
                     diversity_json(&d));
}

/* Evaluates c [n] and sorts it, fittest first; candidates of equal fitness keep their order. */
static int evaluate_candidates(struct evolve_run *r, int generation, struct candidate *c, int n,
                               struct error *err) {
    const struct fitness_options *f = &evolve_run_recipe_at(r, generation)->fitness;
    struct evaluation a = {0};
    int rc = evolve_run_evaluate(r, generation, c, n, 0, &a, err);
    for (int i = 0; rc == OK && i < n; i++) candidate_fitness(&c[i], f, NULL, a.n_items);
    evaluation_release(&a);
    for (int i = 1; rc == OK && i < n; i++)
        for (int k = i; k > 0 && c[k].fitness.value > c[k - 1].fitness.value; k--) {
            struct candidate swap = c[k];
            c[k] = c[k - 1];
            c[k - 1] = swap;
        }
    return rc;
}

static struct candidate founder_candidate(const struct evolve_run *r, int i) {
    struct candidate c = {.adapter = r->founders[i], .blend = NAN, .step = NAN};
    strcpy(c.name, r->names[i]);
    return c;
}

/* Evaluates generation 0; *best: the index of the fittest founder. */
static int evaluate_founders(struct evolve_run *r, int *best, struct error *err) {
    struct candidate c[MAX_FOUNDERS];
    for (int i = 0; i < r->n_founders; i++) c[i] = founder_candidate(r, i);
    int rc = evaluate_candidates(r, 0, c, r->n_founders, err);
    if (rc == OK)
        rc = evolve_run_record_generation(r, generation_json(0, c, r->n_founders), c, r->n_founders,
                                          err);
    for (int i = 0; i < r->n_founders; i++)
        if (rc == OK && c[0].adapter == r->founders[i]) *best = i;
    return rc;
}

/* Evaluates and records the last generation, whose only candidate is the result "made". Takes
 * ownership of the adapter. */
static int record_result(struct evolve_run *r, int generation, struct adapter *adapter,
                         const char *parent, const struct adapter_operator *op, struct error *err) {
    struct candidate c = {
        .name = "made", .adapter = adapter, .operator= op, .blend = NAN, .step = NAN};
    if (parent) snprintf(c.parents[0], sizeof c.parents[0], "%s", parent);
    int rc = evaluate_candidates(r, generation, &c, 1, err);
    if (rc == OK)
        rc = evolve_run_record_generation(r, generation_json(generation, &c, 1), &c, 1, err);
    adapter_release(adapter);
    return rc;
}

static int method_none(struct evolve_run *r, struct error *err) {
    int best = 0;
    return evaluate_founders(r, &best, err);
}

/* fine-tuning */

/* Sets the mean tokens per sample, from which the cost of training is computed. */
static int count_finetune_tokens(struct evolve_run *r, const struct evolve_recipe *o,
                                 struct error *err) {
    struct dataset d;
    if (r->tokens_per_sample > 0) return OK;
    char *path = r->env->find(o->evolve.finetune_data);
    int rc =
        dataset_load(&d, path, NULL, r->model->tok, (int32_t)r->model->config.max_seq_len, err);
    if (rc == OK) r->tokens_per_sample = (double)d.tokens / d.n;
    if (rc == OK) dataset_release(&d);
    free(path);
    return rc;
}

static double tokens_per_update(const struct evolve_run *r, const struct train_options *o) {
    return r->tokens_per_sample * (double)(o->bsz * o->grad_accum);
}

/* The lineage of a fine-tuned adapter: its earlier lineage, with the training data and the genes
 * added. */
static json_t *finetuned_lineage(const struct adapter *before, const char *data, const char *method,
                                 int64_t updates, int64_t seed, const struct genome *x) {
    json_t *l = before->lineage ? json_copy(before->lineage) : json_object();
    json_object_set_new(l, "before", json_string(before->hash));
    json_object_set_new(l, "learned",
                        json_sprintf("%s, %lld updates of '%s', seed %lld", method,
                                     (long long)updates, data, (long long)seed));
    json_t *genes = genome_json(x);
    evolve_lineage_set_genes(l, genes);
    json_decref(genes);
    return l;
}

/* Trains the adapters a [n] together for `updates` updates, with the hyper-parameters of x, and
 * replaces each by its result; after an error they are unchanged. es: NULL, or the options of
 * gradient estimates. A run of one adapter that is `alone` in its generation has a checkpoint. */
static int finetune(struct evolve_run *r, int generation, struct adapter **a,
                    char (*const names)[32], int n, bool alone, int64_t updates,
                    const struct genome *x, const struct es_options *es, struct error *err) {
    const struct evolve_recipe *o = evolve_run_recipe_at(r, generation);
    struct train_options t = o->finetune;
    t.lr = genome_value(x, GENE_LR, t.lr);
    t.lora_dropout = genome_value(x, GENE_LORA_DROPOUT, t.lora_dropout);
    struct train_job *jobs = xcalloc((size_t)n, sizeof *jobs);
    char *data = r->env->find(o->evolve.finetune_data),
         *checkpoint = alone ? path_join(r->dir, "learn.bin") : NULL;
    bool muted = log_muted;
    t.seed = o->seed + generation;
    t.max_steps = updates;
    for (int i = 0; i < n; i++)
        jobs[i] =
            (struct train_job){.name = names[i], .data = data, .start = a[i], .unmeasured = true};
    log_muted |= !alone; // fine-tuning of many children is a short part of a run
    int rc = r->rehearsal ? evolve_rehearsal_train(r, jobs, n, &t, es, err)
                          : sft_run_with_callbacks(r->model, jobs, n, &t, es, r->env->pool,
                                                   checkpoint, NULL, err);
    log_muted = muted;
    for (int i = 0; i < n && !r->rehearsal; i++) {
        if (rc != OK) {
            adapter_release(jobs[i].result);
            continue;
        }
        json_t *l =
            finetuned_lineage(a[i], o->evolve.finetune_data, es ? "es" : "sft", updates, t.seed, x);
        adapter_release(a[i]);
        a[i] = operator_set_lineage(jobs[i].result, l);
        adapter_offload(a[i], r->dir);
        json_decref(l);
    }
    if (rc == OK && checkpoint) unlink(checkpoint);
    free(checkpoint);
    free(data);
    free(jobs);
    return rc;
}

/* Fine-tunes and saves one adapter, or loads the result that an earlier process saved. */
static int finetune_or_load(struct evolve_run *r, int generation, struct adapter **a,
                            const char *name, int64_t updates, const struct es_options *es,
                            struct error *err) {
    char names[1][32];
    struct adapter *saved = evolve_run_load_adapter(r, generation, name, "before", (*a)->hash);
    snprintf(names[0], sizeof names[0], "%s", name);
    if (saved) {
        adapter_release(*a);
        *a = saved;
        return OK;
    }
    static const struct genome none = {0};
    int rc = finetune(r, generation, a, names, 1, true, updates, &none, es, err);
    return rc == OK ? evolve_run_save_adapter(r, generation, name, *a, NULL, err) : rc;
}

/* Number of updates that the budget allows after the cost of the final evaluation: at least 1, at
 * most finetune.max_steps. Without a budget and max_steps: finetune_steps times generations. */
static int64_t affordable_updates(const struct evolve_run *r, double final_cost,
                                  double update_cost) {
    const struct evolve_options *e = &r->o->evolve;
    double n =
        e->max_flops > 0 ? (e->max_flops - r->spent.flops - final_cost) / update_cost : INFINITY;
    if (r->o->finetune.max_steps > 0) n = fmin(n, (double)r->o->finetune.max_steps);
    if (isinf(n)) n = (double)(MAX(1, e->finetune_steps) * MAX(1, e->generations));
    return (int64_t)fmax(1, floor(n));
}

/* Fine-tunes the best founder with the remaining budget, and records the result. */
static int finetune_best_founder(struct evolve_run *r, const struct es_options *es,
                                 struct error *err) {
    int best = 0, rc = count_finetune_tokens(r, r->o, err);
    if (rc == OK) rc = evaluate_founders(r, &best, err);
    if (rc != OK) return rc;
    struct adapter *a = adapter_retain(r->founders[best]);
    double tokens = tokens_per_update(r, &r->o->finetune), flops = evolve_run_token_flops(r, a);
    int64_t updates = affordable_updates(r, r->spent.flops / r->n_founders,
                                         tokens * flops * (es ? (double)es->population : 2));
    rc = finetune_or_load(r, 1, &a, "made", updates, es, err);
    if (es)
        evolve_cost_add_forward(r, (int64_t)(tokens * (double)es->population * (double)updates),
                                flops);
    else
        evolve_cost_add_training(r, tokens * (double)updates, flops);
    if (rc == OK) return record_result(r, 1, a, r->names[best], NULL, err);
    adapter_release(a);
    return rc;
}

static int method_gradient(struct evolve_run *r, struct error *err) {
    return finetune_best_founder(r, NULL, err);
}

static int method_es(struct evolve_run *r, struct error *err) {
    return finetune_best_founder(r, &r->o->es, err);
}

/* breeding */

static double child_updates(const struct evolve_recipe *o, const struct candidate *c) {
    return genome_value(&c->genome, GENE_MAX_STEPS, (double)o->evolve.finetune_steps);
}

/* Whether children may have different hyper-parameters, so that each is trained separately. */
static bool hyperparameters_evolve(const struct genome_options *o) {
    bool any = false;
    for (int g = GENE_LR; g < N_GENES; g++) any |= genome_evolves(o, (enum gene)g);
    return any;
}

/* The child's result of an earlier process, for this adapter and these genes; NULL: not found. */
static struct adapter *load_finetuned(struct evolve_run *r, int generation,
                                      const struct candidate *c) {
    struct adapter *saved =
        evolve_run_load_adapter(r, generation, c->name, "before", c->adapter->hash);
    json_t *v = genome_json(&c->genome);
    char *genes = genes_text(v);
    bool same =
        saved && strcmp(json_get_string(saved->lineage, LINEAGE_GENES), genes ? genes : "") == 0;
    json_decref(v);
    free(genes);
    if (same) return saved;
    adapter_release(saved);
    return NULL;
}

/* Lamarckian step: fine-tunes children before their evaluation, or loads the results that an
 * earlier process saved. */
static int finetune_children(struct evolve_run *r, struct population *p, struct error *err) {
    struct adapter *a[MAX_POPULATION];
    char names[MAX_POPULATION][32];
    int index[MAX_POPULATION], n = 0, rc = OK;
    const struct evolve_recipe *o = evolve_run_recipe_at(r, p->generation);
    for (int i = 0; i < p->n; i++) {
        struct candidate *c = &p->c[i];
        if (c->elite) continue;
        evolve_cost_add_training(r, tokens_per_update(r, &o->finetune) * child_updates(o, c),
                                 evolve_run_token_flops(r, c->adapter));
        struct adapter *saved = load_finetuned(r, p->generation, c);
        if (saved) {
            adapter_release(c->adapter);
            c->adapter = saved;
            continue;
        }
        strcpy(names[n], c->name);
        a[n] = c->adapter;
        index[n++] = i;
    }
    bool separate = hyperparameters_evolve(&o->evolve.genome);
    int together = n == 0 ? 0 : separate ? 1 : evolve_run_finetuned_together(r, o, n, err);
    if (together < 0) rc = together;
    for (int k = 0, m; rc == OK && k < n; k += m) {
        m = MIN(n - k, together);
        const struct candidate *first = &p->c[index[k]];
        rc = finetune(r, p->generation, a + k, names + k, m, n == 1,
                      (int64_t)child_updates(o, first), &first->genome, NULL, err);
        for (int i = k; i < k + m; i++) p->c[index[i]].adapter = a[i];
        for (int i = k; rc == OK && i < k + m; i++)
            rc = evolve_run_save_adapter(r, p->generation, names[i], a[i], NULL, err);
    }
    return rc;
}

/* Cost of fine-tuning and evaluating the new generation. candidate_cost: cost of evaluating one
 * candidate in the last generation. */
static double generation_cost(const struct evolve_run *r, const struct population *p,
                              double candidate_cost) {
    const struct evolve_recipe *o = evolve_run_recipe_at(r, p->generation);
    double training_flops = 0, tokens = tokens_per_update(r, &o->finetune);
    for (int i = 0; i < p->n; i++)
        if (!p->c[i].elite)
            training_flops +=
                child_updates(o, &p->c[i]) * tokens * evolve_run_token_flops(r, p->c[i].adapter);
    return candidate_cost * (p->n + p->n_reevaluated) + 2 * training_flops;
}

static int breed_next(struct evolve_run *r, struct population *p, struct error *err) {
    const struct evolve_recipe *o = evolve_run_recipe_at(r, p->generation + 1);
    int rc = o->evolve.finetune_steps > 0 ? count_finetune_tokens(r, o, err) : OK;
    if (rc == OK) rc = population_set_options(p, &o->evolve, &o->fitness, (uint64_t)o->seed, err);
    if (rc == OK) rc = population_breed(p, err);
    if (rc == OK && r->rehearsal) evolve_rehearsal_breed(r, p->unbred);
    return rc;
}

/* Evaluates and records the population; *candidate_cost: mean FLOPs per candidate. */
static int evaluate_population(struct evolve_run *r, struct population *p, double *candidate_cost,
                               struct error *err) {
    const struct fitness_function fitness = {r, evolve_run_evaluate};
    double before = r->spent.flops;
    int all = p->n + p->n_reevaluated, rc = population_evaluate(p, &fitness, err);
    *candidate_cost = (r->spent.flops - before) / all;
    return rc == OK ? evolve_run_record_generation(r, population_json(p), p->c, p->n, err) : rc;
}

static int method_breed(struct evolve_run *r, struct error *err) {
    struct population *p = xcalloc(1, sizeof *p);
    const struct evolve_recipe *o = evolve_run_recipe_at(r, 0);
    const char *names[MAX_FOUNDERS];
    struct progress bar;
    double candidate_cost = 0;
    for (int i = 0; i < r->n_founders; i++) names[i] = r->names[i];
    int rc = population_init(p, &o->evolve, &o->fitness, (uint64_t)o->seed, r->founders, names,
                             r->n_founders, err);
    p->offload_dir = r->dir;
    p->rehearses = r->rehearsal != NULL;
    progress_start(&bar, "generations", r->o->evolve.generations + 1);
    for (int g = 0; rc == OK; g++) {
        rc = evaluate_population(r, p, &candidate_cost, err);
        progress_update(&bar, g + 1, p->c[0].name);
        if (rc != OK || g == r->o->evolve.generations) break;
        rc = breed_next(r, p, err);
        if (rc != OK || !is_within_budget(r, generation_cost(r, p, candidate_cost))) break;
        if (evolve_run_recipe_at(r, g + 1)->evolve.finetune_steps > 0 && !r->o->zero_adapters)
            rc = finetune_children(r, p, err);
    }
    if (rc == OK) bar.total = bar.done; // a budget may end the search before
    progress_finish(&bar, NULL);
    population_release(p);
    free(p);
    return rc;
}

/* search over coefficients of founders */

/* A candidate merges the founders by weights, which are the same in all layers or separate for each
 * layer; a vector of the search holds these weights. If the operator has a step, the vector has one
 * more number: 0 is step_min, 1 is step_max. With finetune_steps, the result of the search is
 * fine-tuned before its evaluation.
 */
struct coef_search {
    struct evolve_run *r;
    const struct adapter_operator *op;
    struct search *search;
    int n;             /* numbers per candidate */
    int n_weight_sets; /* 1, or one per layer */
    struct candidate c[MAX_POPULATION];
    struct weighted_adapter mix[MAX_POPULATION][MAX_FOUNDERS];
};

static struct adapter *coef_search_merge_layers(const struct operands *x, const double *v,
                                                struct error *err) {
    int modules = operand_modules(x);
    double *coef = xcalloc((size_t)modules * (size_t)x->n_parents, sizeof *coef);
    json_t *lineage = json_pack("{s:s}", "operator", "delta, layer by layer");
    for (int i = 0; i < modules; i++)
        memcpy(coef + (size_t)i * (size_t)x->n_parents, v + i / N_PROJ * x->n_parents,
               (size_t)x->n_parents * sizeof *coef);
    struct adapter *a = operator_weighted_sum(x, coef, lineage, err);
    json_decref(lineage);
    free(coef);
    return a;
}

static void founder_names(const struct evolve_run *r, const char *names[MAX_FOUNDERS]) {
    for (int i = 0; i < r->n_founders; i++) names[i] = r->names[i];
}

static struct adapter *coef_search_apply(const struct coef_search *h, const double *v,
                                         struct error *err) {
    struct evolve_run *r = h->r;
    float w[MAX_FOUNDERS];
    const char *names[MAX_FOUNDERS];
    founder_names(r, names);
    for (int i = 0; i < r->n_founders; i++) w[i] = (float)v[i];
    struct operands x = {.parents = r->founders,
                         .weights = w,
                         .n_parents = r->n_founders,
                         .rank = (int32_t)r->o->evolve.rank,
                         .step = NAN,
                         .seed = (uint64_t)r->o->seed,
                         .names = names};
    if (h->n_weight_sets > 1) return coef_search_merge_layers(&x, v, err);
    if (h->op->unit)
        x.step = h->op->step_min +
                 (h->op->step_max - h->op->step_min) * fminf(1, fmaxf(0, (float)v[r->n_founders]));
    return operator_apply(h->op, &x, err);
}

/* Offloads the result, and returns the memory of the founders that were read for it. */
static struct adapter *merged_offload(const struct evolve_run *r, struct adapter *a) {
    if (a) adapter_offload(a, r->dir);
    for (int i = 0; i < r->n_founders; i++) adapter_free_pages(r->founders[i]);
    return a;
}

static struct adapter *coef_search_merge(const struct coef_search *h, const double *v,
                                         struct error *err) {
    return merged_offload(h->r, coef_search_apply(h, v, err));
}

/* Makes n candidates from the vectors v [n][h->n]. A candidate of operator delta with the same
 * weights in all layers is a mix of the founders, which is exact without a merge. */
static int coef_search_candidates(struct coef_search *h, const double *v, int n,
                                  struct error *err) {
    bool mixed = h->n_weight_sets == 1 && strcmp(h->op->name, "delta") == 0;
    for (int i = 0; i < n; i++) {
        struct candidate *c = &h->c[i];
        *c = (struct candidate){.operator= h->op, .blend = NAN, .step = NAN, .mix = h->mix[i]};
        snprintf(c->name, sizeof c->name, "g%lldc%d", (long long)search_generation(h->search) + 1,
                 i);
        c->n_mix = h->n_weight_sets == 1 ? h->r->n_founders : 0;
        for (int k = 0; k < c->n_mix; k++)
            h->mix[i][k] = (struct weighted_adapter){.adapter = h->r->founders[k],
                                                     .weight = (float)v[i * h->n + k]};
        if (!mixed && !(c->adapter = coef_search_merge(h, v + i * h->n, err))) return err->code;
    }
    return OK;
}

static int coef_search_check(const struct coef_search *h, struct error *err) {
    const struct evolve_run *r = h->r;
    if (h->op->max_parents < r->n_founders)
        return error_set(err, ERR_USAGE,
                         "operator '%s' takes %d parents, and there are %d founders", h->op->name,
                         h->op->max_parents, r->n_founders);
    if (h->n_weight_sets > 1 && strcmp(h->op->name, "delta") != 0)
        return error_set(err, ERR_USAGE, "per_layer needs merge_operator 'delta', not '%s'",
                         h->op->name);
    return OK;
}

/* Opens the search. Its starting points are the single founders, with the operator's default step.
 */
static int coef_search_open(struct coef_search *h, struct error *err) {
    struct evolve_run *r = h->r;
    if (!(h->op = operator_find(r->o->evolve.merge_operator, err))) return err->code;
    h->n_weight_sets = r->o->evolve.per_layer ? r->model->config.n_layers : 1;
    if (coef_search_check(h, err) != OK) return err->code;
    h->n = r->n_founders * h->n_weight_sets + (h->op->unit != NULL);
    double *starts = xcalloc((size_t)r->n_founders * (size_t)h->n, sizeof *starts);
    for (int i = 0; i < r->n_founders; i++) {
        for (int k = 0; k < h->n_weight_sets; k++) starts[i * h->n + k * r->n_founders + i] = 1;
        if (h->op->unit)
            starts[(i + 1) * h->n - 1] =
                (double)((h->op->step - h->op->step_min) / (h->op->step_max - h->op->step_min));
    }
    h->search = search_new(&r->o->search, starts, r->n_founders, h->n, (uint64_t)r->o->seed, err);
    free(starts);
    if (h->search && search_batch(h->search) > MAX_POPULATION)
        return error_set(err, ERR_USAGE, "a batch of %d candidates is more than %d",
                         search_batch(h->search), MAX_POPULATION);
    return h->search ? OK : err->code;
}

static const double *candidate_weights(struct coef_search *h, const struct candidate *c) {
    int i = 0;
    while (h->mix[i] != c->mix) i++;
    return search_ask(h->search) + i * h->n;
}

static int coef_search_generation(struct coef_search *h, int g, struct error *err) {
    int n = search_batch(h->search), rc = coef_search_candidates(h, search_ask(h->search), n, err);
    double fitness[MAX_POPULATION];
    struct candidate sorted[MAX_POPULATION];
    memcpy(sorted, h->c, sizeof sorted);
    if (rc == OK) rc = evaluate_candidates(h->r, g, sorted, n, err);
    for (int i = 0; rc == OK && i < n; i++)
        for (int k = 0; k < n; k++)
            if (sorted[k].mix == h->c[i].mix) fitness[i] = sorted[k].fitness.value;
    bool mixed = rc == OK && !sorted[0].adapter; // merges the best candidate, to save it
    if (mixed && !(sorted[0].adapter = coef_search_merge(h, candidate_weights(h, &sorted[0]), err)))
        rc = err->code;
    if (rc == OK)
        rc = evolve_run_record_generation(h->r, generation_json(g, sorted, n), sorted, n, err);
    if (rc == OK) search_tell(h->search, fitness);
    if (mixed) adapter_release(sorted[0].adapter);
    for (int i = 0; i < n; i++) adapter_release(h->c[i].adapter);
    return rc;
}

/* *tokens, *flops: training tokens of the result's fine-tuning, and FLOPs per token; 0 without
 * fine-tuning. */
static int coef_search_finetune_cost(struct coef_search *h, double *tokens, double *flops,
                                     struct error *err) {
    struct evolve_run *r = h->r;
    *tokens = *flops = 0;
    if (r->o->evolve.finetune_steps == 0 || r->o->zero_adapters) return OK;
    if (count_finetune_tokens(r, r->o, err) != OK) return err->code;
    // all candidates have the same rank, so any one gives the cost
    struct adapter *a = coef_search_merge(h, search_ask(h->search), err);
    if (!a) return err->code;
    *tokens = (double)r->o->evolve.finetune_steps * tokens_per_update(r, &r->o->finetune);
    *flops = evolve_run_token_flops(r, a);
    adapter_release(a);
    return OK;
}

/* Merges, fine-tunes and records the result of the search. */
static int coef_search_finish(struct coef_search *h, int g, double tokens, double flops,
                              struct error *err) {
    struct evolve_run *r = h->r;
    struct adapter *adapter = coef_search_merge(h, search_center(h->search), err);
    int rc = adapter ? OK : err->code;
    if (rc == OK && tokens > 0)
        rc = finetune_or_load(r, g, &adapter, "made", r->o->evolve.finetune_steps, NULL, err);
    evolve_cost_add_training(r, tokens, flops);
    if (rc == OK) return record_result(r, g, adapter, NULL, h->op, err);
    adapter_release(adapter);
    return rc;
}

static int method_coefficients(struct evolve_run *r, struct error *err) {
    struct coef_search *h = xcalloc(1, sizeof *h);
    struct progress bar;
    double tokens, flops, generation_cost_flops = 0; // FLOPs of the last generation
    int best = 0, g = 1, rc;
    h->r = r;
    rc = coef_search_open(h, err);
    if (rc == OK) rc = coef_search_finetune_cost(h, &tokens, &flops, err);
    if (rc == OK) rc = evaluate_founders(r, &best, err);
    double result_cost = rc == OK ? 2 * tokens * flops + r->spent.flops / r->n_founders : 0;
    progress_start(&bar, "generations", r->o->evolve.generations);
    for (; rc == OK && g <= r->o->evolve.generations &&
           is_within_budget(r, generation_cost_flops + result_cost);
         g++) {
        double before = r->spent.flops;
        rc = coef_search_generation(h, g, err);
        generation_cost_flops = r->spent.flops - before;
        progress_update(&bar, g, NULL);
    }
    if (rc == OK) bar.total = bar.done; // a budget may end the search before
    progress_finish(&bar, NULL);
    if (rc == OK && g == 1) log_warn("evolve.max_flops allows no generation after the founders");
    if (rc == OK && g > 1) rc = coef_search_finish(h, g, tokens, flops, err);
    search_free(h->search);
    free(h);
    return rc;
}

/* Merges all founders with equal weights by one operator, for example delta (a model soup),
 * delta_ties or delta_dare. */
static int method_merge(struct evolve_run *r, struct error *err) {
    int best = 0, rc = evaluate_founders(r, &best, err);
    const char *names[MAX_FOUNDERS];
    const struct adapter_operator *op =
        rc == OK ? operator_find(r->o->evolve.merge_operator, err) : NULL;
    struct operands x = {.parents = r->founders,
                         .n_parents = r->n_founders,
                         .rank = (int32_t)r->o->evolve.rank,
                         .step = NAN,
                         .seed = (uint64_t)r->o->seed,
                         .names = names};
    founder_names(r, names);
    struct adapter *adapter = op ? merged_offload(r, operator_apply(op, &x, err)) : NULL;
    return adapter ? record_result(r, 1, adapter, NULL, op, err) : err->code;
}

const struct search_method search_methods[] = {
    {"breed", "a population of adapters: selection, crossover, mutation, fine-tuning of children",
     method_breed},
    {"coefficients", "the founders' coefficients, by the searcher of section 'search': cma, pso …",
     method_coefficients},
    {"merge", "all founders merged once, with equal weights", method_merge},
    {"gradient", "the best founder is fine-tuned", method_gradient},
    {"es", "the best founder is trained by evolution strategies", method_es},
    {"none", "founders only", method_none},
    {0},
};
