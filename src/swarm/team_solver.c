/*
 * team_solver: teams as candidates of an evaluation. A team debates the questions of a task; its
 * decision is its answer.
 *
 * Agents receive the question in the prompts of their protocol and in the model's chat template.
 * The prompt format that the task uses for single adapters does not apply.
 */
#include "swarm/swarm.h"

#include "grade/grade.h"

#include <stdlib.h>

enum { GENERATED_TASK_TOKENS = 512, FILE_TASK_TOKENS = 4096 };

int32_t team_max_tokens(const struct eval_task *tasks, int n, int32_t max_seq_len) {
    int32_t max_tokens = GENERATED_TASK_TOKENS;
    for (int i = 0; i < n; i++)
        if (tasks[i].family < 0) max_tokens = FILE_TASK_TOKENS;
    return MIN(max_tokens, max_seq_len);
}

int debate_options_for_task(const struct eval_task *b, const struct debate_options *o,
                            struct debate_options *out, struct error *err) {
    *out = *o;
    if (b->family >= 0 && !b->is_split_evidence && family_check_questions(b->family, err) != OK)
        return err->code;
    if (b->filter)
        return error_set(err, ERR_USAGE,
                         "'%s' filters the whole text of a model, and a team answers in the form "
                         "of its protocol; use a recipe with a grader",
                         b->name);
    if (b->output_type != EVAL_GENERATE) return OK;
    if (!out->max_tokens) out->max_tokens = b->max_tokens;
    return eval_task_grader(b, &out->grader, err);
}

/* n_asked: the number of agents that the question was put to. */
static struct eval_result debate_result(const struct debate *d, int item, int n_asked) {
    const struct transcript *o = &d->transcripts[item];
    struct eval_result out = {.choice = (int16_t)o->answer,
                              .right = d->decision_correct[item],
                              .score = d->decision_correct[item],
                              .no_answer = o->answer < 0};
    const struct agent_answer *last =
        d->answers + (size_t)(d->rounds - 1) * (size_t)d->n_agents * (size_t)d->n_items;
    for (int i = 0; i < o->n; i++) out.truncated |= o->v[i].truncated;
    for (int a = 0; o->answer >= 0 && a < d->n_agents; a++)
        out.prob +=
            (float)(last[(size_t)a * (size_t)d->n_items + (size_t)item].choice == o->answer) /
            (float)n_asked;
    return out;
}

int team_solver_answer(void *ctx, const struct eval_task *b, struct eval_result *out,
                       struct eval_cost *cost, struct progress *p, int64_t done,
                       struct error *err) {
    const struct team_solver *solver = ctx;
    const struct team *t = solver->team;
    struct debate_options o;
    struct debate d = {0};
    double start = clock_now();
    if (b->n_questions > INT32_MAX / TEAM_MAX)
        return error_set(err, ERR_MEMORY, "%lld questions are too many for a team",
                         (long long)b->n_questions);
    int rc = debate_options_for_task(b, &t->options, &o, err);
    if (rc != OK) return rc;
    struct task_item *items = eval_task_items(b);
    o.seed = solver->seed;
    rc = debate_run(solver->llm_client, t->v, t->n, items, (int)b->n_questions, &o, &d, NULL, err);
    for (int i = 0; rc == OK && i < d.n_items; i++)
        out[i] = debate_result(&d, i, o.router ? 1 : t->n);
    if (rc == OK && d.failed)
        log_info("%s, %s: %lld of %lld calls failed: the context has no room for them", t->name,
                 b->name, (long long)d.failed, (long long)d.calls);
    cost->calls += d.calls;
    cost->prefilled += d.prefilled;
    cost->generated += d.generated;
    cost->seconds += clock_now() - start;
    if (p) progress_update(p, done + b->n_questions, b->name);
    debate_release(&d);
    task_items_release(items, b->n_questions);
    return rc;
}
