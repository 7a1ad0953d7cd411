/*
 * train_plan: prints the cost of a training and its first samples. The text says which numbers are
 * measured, counted or bounds.
 */
#define _GNU_SOURCE
#include "cli/train_plan.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool uses_rewards(const struct train_request *q) {
    return q->method > METHOD_DPO;
}

static void lengths_print(const char *what, const struct length_stats *l) {
    printf("%s %d to %d tokens (median %d, 95 %% up to %d, in all %lld)", what, l->shortest,
           l->longest, l->median, l->p95, (long long)l->tokens);
}

static double completion_number(const struct rl_plan *plan, const char *name, const char *key) {
    const json_t *v = json_object_get(json_object_get(plan->completions, name), key);
    return json_number_value(v);
}

static void completions_print(const struct rl_plan *plan, const char *name, int n) {
    printf("  its first %lld completions: reward %.4f on average (standard deviation %.4f), it "
           "differs for %.0f %% of the prompts; %.1f tokens on average, %.0f %% end before the "
           "limit, entropy %.3f nats per token\n",
           (long long)plan->sampled / n, completion_number(plan, name, "reward"),
           completion_number(plan, name, "reward_std"),
           100 * completion_number(plan, name, "mixed"), completion_number(plan, name, "length"),
           100 * completion_number(plan, name, "ended"), completion_number(plan, name, "entropy"));
}

static void data_print(const struct train_request *q, const struct rl_plan *plan) {
    for (int i = 0; i < q->n; i++) {
        const struct train_job *job = &q->jobs[i];
        struct buf text = {0};
        lint_text(&job->lint, &text);
        printf("%s ('%s'): %s", job->name, job->data, text.data);
        if (plan->pairs) {
            const struct pair_length_stats *l = &plan->pairs[i];
            printf("  %d pairs: ", l->prompt.n);
            lengths_print("prompts", &l->prompt);
            lengths_print("; learned of chosen", &l->chosen);
            lengths_print(", of rejected", &l->rejected);
            printf("\n");
        }
        if (plan->completions) completions_print(plan, job->name, q->n);
        buf_release(&text);
    }
}

static void size_print(const struct train_request *q, const struct training_plan *p) {
    const char *each = q->n > 1 ? " of each adapter" : "";
    long long updates = p->updates, per = p->samples_per_update, samples = p->samples,
              tokens = p->tokens, passes = p->passes, rows = p->max_rows;
    if (q->method == METHOD_SFT)
        printf("updates: %lld, of %lld samples%s; in all %lld samples and %lld tokens in %lld "
               "passes without padding, at most %lld samples and %lld tokens in one\n",
               updates, per, each, samples, tokens, passes, (long long)p->max_samples, rows);
    else if (q->method == METHOD_ES)
        printf("updates: %lld, of %lld samples%s that %lld members read; in all %lld samples, and "
               "%lld tokens in about %lld passes of at most %lld\n",
               updates, per, each, (long long)q->es->population, samples, tokens, passes, rows);
    else if (q->method == METHOD_DPO)
        printf("updates: %lld, of %lld pairs%s; in all %lld pairs and %lld tokens in %lld passes "
               "without padding, at most %lld pairs and %lld tokens in one\n",
               updates, per / 2, each, samples / 2, tokens, passes, (long long)p->max_samples / 2,
               rows);
    else
        printf("steps: %lld, of %lld prompts%s with %lld completions of at most %lld tokens; "
               "updates per step: %lld; in all %lld completions, and about %lld tokens in %lld "
               "passes of at most %lld\n",
               updates, per / (long long)q->policy->num_generations, each,
               (long long)q->policy->num_generations, (long long)q->policy->max_new_tokens,
               (long long)q->policy->num_iterations, samples, tokens, passes, rows);
}

static void time_print(const struct train_request *q, const struct rl_plan *plan) {
    const struct training_plan *p = &plan->run;
    char time[32];
    printf("time: about %s; ", cli_duration(p->seconds, time));
    if (q->method == METHOD_DPO)
        printf("the reference %s, ", cli_duration(plan->reference_seconds, time));
    if (uses_rewards(q))
        printf("sampling %lld completions took %.3f s, their rewards %.3f s, scoring them by the "
               "reference %.3f s, ",
               (long long)plan->sampled, plan->sampling_seconds, plan->reward_seconds,
               plan->scoring_seconds);
    printf("the first %s of %lld tokens took %.3f s, an update %.3f s\n",
           uses_rewards(q) || q->method == METHOD_ES ? "passes" : "pass", (long long)p->pass_tokens,
           p->pass_seconds, p->update_seconds);
}

static void sample_print(const struct train_request *q, const struct train_sample *s,
                         const char *part, const char *mark_begin, const char *mark_end) {
    struct buf text = {0};
    int64_t marked = 0;
    for (int32_t k = 1; k < s->n; k++) marked += s->mask[k];
    train_sample_render(s, q->m->tok, mark_begin, mark_end, &text);
    printf("--- %s%s, %d tokens, %lld %s\n", q->jobs[s->adapter].name, part, s->n,
           (long long)marked, uses_rewards(q) ? "generated" : "learned");
    /* raw, because of the colours; train_sample_render has sanitised the text */
    terminal_write_raw(text.data ? text.data : "");
    printf("\n");
    buf_release(&text);
}

/* Prints the first samples. For DPO the samples are pairs: chosen, then rejected. */
static void first_samples_print(const struct train_request *q, const struct training_plan *p) {
    bool color = terminal_has_color(STDOUT_FILENO), pairs = q->method == METHOD_DPO;
    const char *mark_begin = color ? TERMINAL_MARK : "⟦", *mark_end = color ? TERMINAL_RESET : "⟧";
    printf("first %s %s:\n",
           uses_rewards(q) ? "prompt, its first completion"
           : pairs         ? "pair, what is learned"
                           : "batch, what is learned",
           color ? "in green" : "in ⟦ ⟧");
    for (int i = 0; i < p->n_first; i++)
        sample_print(q, &p->first[i],
                     !pairs  ? ""
                     : i % 2 ? ", rejected"
                             : ", chosen",
                     mark_begin, mark_end);
}

static void memory_print(const struct train_memory *m) {
    struct buf text = {0};
    train_memory_text(m, &text);
    printf("%s\n", text.data);
    buf_release(&text);
}

static void text_print(const struct train_request *q, const struct rl_plan *plan) {
    const double mb = 1 << 20;
    data_print(q, plan);
    size_print(q, &plan->run);
    printf("memory: %.1f MB beside the model", (double)plan->run.bytes / mb);
    if (uses_rewards(q))
        printf(", %.1f MB of it the engine's that samples", (double)plan->engine_bytes / mb);
    printf("\n");
    memory_print(&plan->run.memory);
    time_print(q, plan);
    first_samples_print(q, &plan->run);
}

int train_plan_print(const struct cli_options *c, const struct train_request *q,
                     struct error *err) {
    struct rl_plan plan;
    int rc = train_plan_make(q, &plan, err);
    if (rc) return rc;
    if (c->json)
        cli_print_json(train_plan_json(q, &plan));
    else
        text_print(q, &plan);
    rl_plan_release(&plan);
    return OK;
}
