/*
 * comparison: candidates that answer the same questions of several tasks, and the statistics of
 * their differences.
 *
 * Statistics are computed at the end, because Holm's correction needs all comparisons.
 */
#include "eval/eval.h"

#include <math.h>
#include <stdlib.h>

/* Runs every candidate on every task. */
static int answers_collect(struct eval_comparison *c, struct error *err) {
    struct progress p;
    int64_t total = 0, done = 0;
    int rc = OK;
    for (int i = 0; i < c->n_tasks; i++) total += c->tasks[i].n_questions * c->n_candidates;
    progress_start(&p, "questions", total);
    for (int i = 0; rc == OK && i < c->n_tasks; i++)
        for (int k = 0; rc == OK && k < c->n_candidates; k++) {
            const struct eval_task *t = &c->tasks[i];
            const struct eval_candidate *candidate = &c->candidates[k];
            int slot = i * c->n_candidates + k;
            c->results[slot] = try_calloc((size_t)t->n_questions, sizeof **c->results, err);
            if (!c->results[slot]) return err->code;
            double joules = energy_now();
            rc = candidate->answer(candidate->ctx, t, c->results[slot], &c->summaries[slot].cost,
                                   &p, done, err);
            c->summaries[slot].cost.joules = energy_now() - joules;
            done += t->n_questions;
        }
    if (rc == OK) progress_finish(&p, NULL);
    return rc;
}

static void task_summarize(struct eval_comparison *c, int task_index, uint64_t seed) {
    const struct eval_task *t = &c->tasks[task_index];
    int32_t *clusters = xcalloc((size_t)t->n_questions, sizeof *clusters),
            n = eval_task_clusters(t, clusters);
    for (int k = 0; k < c->n_candidates; k++) {
        int first = task_index * c->n_candidates, slot = first + k;
        struct eval_cost cost = c->summaries[slot].cost;
        c->summaries[slot] =
            eval_summarize(c->results[slot], c->results[first], t->n_questions, clusters, n, seed);
        c->summaries[slot].cost = cost;
    }
    free(clusters);
}

/* Corrects the p values (Holm) and the intervals of all comparisons. */
static void holm_correct(struct eval_comparison *c) {
    int n = c->n_tasks * (c->n_candidates - 1), slot = 0;
    double *p = xcalloc((size_t)MAX(n, 1), 2 * sizeof *p), *adjusted = p + n;
    for (int i = 0; i < c->n_tasks * c->n_candidates; i++)
        if (i % c->n_candidates) p[slot++] = c->summaries[i].versus.p;
    stats_holm(p, n, adjusted);
    for (int i = c->n_tasks * c->n_candidates; i-- > 0;) {
        struct eval_summary *s = &c->summaries[i];
        if (i % c->n_candidates == 0) continue;
        s->p_holm = adjusted[--slot];
        s->versus.diff = stats_paired_interval(&s->versus, n);
    }
    free(p);
}

int eval_comparison_run(struct eval_comparison *c, uint64_t seed, struct error *err) {
    size_t n = (size_t)(c->n_tasks * c->n_candidates);
    c->results = xcalloc(n, sizeof *c->results);
    c->summaries = xcalloc(n, sizeof *c->summaries);
    if (answers_collect(c, err) != OK) return err->code;
    for (int i = 0; i < c->n_tasks; i++) task_summarize(c, i, seed);
    holm_correct(c);
    return OK;
}

void eval_comparison_release(struct eval_comparison *c) {
    for (int i = 0; c->results && i < c->n_tasks * c->n_candidates; i++) free(c->results[i]);
    free(c->results);
    free(c->summaries);
}

json_t *eval_summary_json(const struct eval_task *b, const char *candidate, const char *kind,
                          const struct eval_summary *s, bool first) {
    const struct eval_cost *c = &s->cost;
    json_t *v = json_pack("{s:s,s:s,s:I,s:f,s:f,s:f}", "task", b->name, "adapter", candidate, "n",
                          (json_int_t)s->n, "acc", s->acc.value, "lo", s->acc.lo, "hi", s->acc.hi);
    json_t *cluster = json_pack("{s:I,s:f,s:f}", "n", (json_int_t)s->n_clusters, "lo",
                                s->clustered.lo, "hi", s->clustered.hi);
    json_object_set_new(v, "clusters", cluster);
    if (b->form) json_object_set_new(v, "form", json_string(b->form));
    if (b->output_type == EVAL_LOGLIKELIHOOD)
        json_object_set_new(v, "acc_norm", stats_interval_json(s->acc_norm));
    if (b->output_type == EVAL_GENERATE)
        json_object_update_new(v, json_pack("{s:s,s:f,s:I}", "grader", b->grader, "score", s->score,
                                            "no_answer", (json_int_t)s->no_answer));
    json_object_update_new(v, json_pack("{s:I,s:I,s:I,s:I,s:I,s:f}", "cut",
                                        (json_int_t)s->prompts_truncated, "truncated",
                                        (json_int_t)s->truncated, "calls", (json_int_t)c->calls,
                                        "prefilled", (json_int_t)c->prefilled, "generated",
                                        (json_int_t)c->generated, "seconds", c->seconds));
    energy_add_json(v, c->joules, c->prefilled + c->generated);
    if (!isnan(c->joules))
        json_object_set_new(v, "joules_per_answer", json_real(c->joules / (double)MAX(s->n, 1)));
    json_object_set_new(v, "detectable",
                        json_real(stats_min_detectable_effect(s->n, EVAL_DISCORDANT)));
    json_object_set_new(v, "kind", json_string(kind));
    if (!first) {
        json_t *d = stats_interval_json(s->versus.diff);
        json_object_update_new(d, json_pack("{s:I,s:I,s:f,s:f,s:b,s:o}", "only_this",
                                            (json_int_t)s->versus.only_a, "only_base",
                                            (json_int_t)s->versus.only_b, "p", s->versus.p,
                                            "p_holm", s->p_holm, "equivalent", s->equivalent,
                                            "clustered", stats_interval_json(s->versus_clustered)));
        json_object_set_new(v, "difference", d);
    }
    return v;
}
