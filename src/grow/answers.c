/*
 * answers: an engine with the check and its model, and samples of a team's answers, for proposals,
 * gate and comparison.
 */
#define _GNU_SOURCE
#include "grade/grade.h"
#include "grow/internal.h"

#include <stdlib.h>

int answering_open(struct answering *a, const struct grow_run *r, const struct grow_questions *q,
                   struct error *err) {
    const struct grow_env *env = r->env;
    const int64_t seqs = r->o->learn.limits.max_seqs;
    struct engine_options eo = {.max_rows = 512,
                                .max_seqs = seqs ? (int32_t)seqs : 256,
                                .max_len = round_longest(r->o, q, env->m->config.max_seq_len),
                                .kv_elem = r->kv,
                                .pool = env->pool};
    const struct check_options co = {.sandbox = r->o->check_sandbox, .model = &a->model};
    *a = (struct answering){.r = r, .questioner.agent.name = "base"};
    a->grader = grader_find(r->o->grader, err);
    if (!a->grader || engine_options_limit(env->m, &eo, err) != OK ||
        !(a->engine = engine_new(env->m, &eo, err)))
        return err->code;
    a->client = (struct engine_client){.engine = a->engine, .model = env->m, .store = r->store};
    a->llm = engine_client_as_llm(&a->client);
    a->questioner.client = a->llm;
    a->model = check_questioner_as_model(&a->questioner);
    if (r->labels == LABELS_CHECK && !(a->check = check_open_filter(r->o->check, &co, err)))
        return err->code;
    return OK;
}

void answering_close(struct answering *a) {
    check_free(a->check);
    engine_free(a->engine);
    *a = (struct answering){0};
}

int answers_sample(struct answering *a, const struct agent *team, int n_team,
                   const struct task_item *items, int n, const struct sampling_plan *plan,
                   struct checked_samples *out, struct progress *p, struct error *err) {
    const struct grow_options *o = a->r->o;
    const struct checked_options so = {.check = plan->checked ? a->check : NULL,
                                       .max_samples = plan->samples,
                                       .passes = plan->checked ? plan->passes : 0,
                                       .chain_of_thought = o->chain_of_thought,
                                       .temperature = (float)o->temperature,
                                       .max_tokens = (int32_t)o->max_tokens,
                                       .seed = (uint64_t)o->learn.train.seed + plan->round,
                                       .grader = a->grader};
    return checked_samples_run(&a->llm, team, n_team, items, n, &so, out, p, err);
}
