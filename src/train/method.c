/* method: names of the training methods, and runs and plans of any method. */
#include "train/train.h"

#include <string.h>

static const char *const method_names[] = {"sft", "es", "dpo", "reinforce", "rloo", "grpo"};

int train_method_parse(const char *name, enum train_method *out, struct error *err) {
    for (size_t i = 0; i < ARRAY_LEN(method_names); i++)
        if (strcmp(name, method_names[i]) == 0) return *out = (enum train_method)i, OK;
    return error_set(err, ERR_USAGE,
                     "method '%s' is not known; there are sft, es, dpo, reinforce, rloo, grpo",
                     name);
}

const char *train_method_name(enum train_method method) {
    return method_names[method];
}

/* The options of the request's policy, with its limits. */
static struct rl_options policy_options(const struct train_request *q) {
    struct rl_options o = *q->policy;
    o.limits = q->limits;
    return o;
}

int train_run(const struct train_request *q, const char *checkpoint,
              const struct train_callbacks *callbacks, struct error *err) {
    struct rl_options policy = policy_options(q);
    if (q->method >= METHOD_DPO)
        return rl_run_with_callbacks(q->m, q->jobs, q->n, q->train, q->method, &policy, NULL,
                                     q->pool, checkpoint, callbacks, err);
    return sft_run_with_callbacks(q->m, q->jobs, q->n, q->train,
                                  q->method == METHOD_ES ? q->es : NULL, q->pool, checkpoint,
                                  callbacks, err);
}

int train_plan_make(const struct train_request *q, struct rl_plan *out, struct error *err) {
    struct rl_options policy = policy_options(q);
    if (q->method >= METHOD_DPO)
        return rl_plan_make(q->m, q->jobs, q->n, q->train, q->method, &policy, NULL, q->pool, out,
                            err);
    *out = (struct rl_plan){0};
    return sft_plan_make(q->m, q->jobs, q->n, q->train, q->method == METHOD_ES ? q->es : NULL,
                         q->pool, &out->run, err);
}

/* the plan as JSON */

static json_t *lengths_json(const struct length_stats *l) {
    return json_pack("{s:i,s:I,s:i,s:i,s:i,s:i}", "n", l->n, "tokens", (json_int_t)l->tokens, "min",
                     l->shortest, "median", l->median, "p95", l->p95, "max", l->longest);
}

static json_t *plan_object(const struct train_request *q, const struct rl_plan *plan) {
    const struct training_plan *p = &plan->run;
    json_t *v = json_pack(
        "{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:f,s:I,s:f,s:f}", "updates", (json_int_t)p->updates,
        "samples_per_update", (json_int_t)p->samples_per_update, "samples", (json_int_t)p->samples,
        "tokens", (json_int_t)p->tokens, "passes", (json_int_t)p->passes, "max_samples_per_pass",
        (json_int_t)p->max_samples, "max_rows_per_pass", (json_int_t)p->max_rows, "longest",
        (json_int_t)p->longest, "bytes", (json_int_t)p->bytes, "pass_seconds", p->pass_seconds,
        "pass_tokens", (json_int_t)p->pass_tokens, "update_seconds", p->update_seconds, "seconds",
        p->seconds);
    json_object_set_new(v, "memory", train_memory_json(&p->memory));
    if (q->method == METHOD_DPO)
        json_object_set_new(v, "reference_seconds", json_real(plan->reference_seconds));
    if (q->method <= METHOD_DPO) return v;
    json_t *rl_figures =
        json_pack("{s:I,s:f,s:f,s:f,s:I}", "sampled", (json_int_t)plan->sampled, "sampling_seconds",
                  plan->sampling_seconds, "reward_seconds", plan->reward_seconds, "scoring_seconds",
                  plan->scoring_seconds, "engine_bytes", (json_int_t)plan->engine_bytes);
    json_object_update(v, rl_figures);
    json_decref(rl_figures);
    return v;
}

/* The data of one adapter, and metrics of its first completions. */
static json_t *job_data_json(const struct train_request *q, const struct rl_plan *plan, int i) {
    const struct train_job *job = &q->jobs[i];
    json_t *v = json_pack("{s:s,s:o,s:o}", "adapter", job->name, "file", json_from_path(job->data),
                          "lint", lint_json(&job->lint));
    if (plan->pairs) {
        json_object_set_new(v, "prompt", lengths_json(&plan->pairs[i].prompt));
        json_object_set_new(v, "chosen", lengths_json(&plan->pairs[i].chosen));
        json_object_set_new(v, "rejected", lengths_json(&plan->pairs[i].rejected));
    }
    if (plan->completions)
        json_object_set(v, "completions", json_object_get(plan->completions, job->name));
    return v;
}

json_t *train_plan_json(const struct train_request *q, const struct rl_plan *plan) {
    json_t *data = json_array(), *first = json_array();
    for (int i = 0; i < q->n; i++) json_array_append_new(data, job_data_json(q, plan, i));
    for (int i = 0; i < plan->run.n_first; i++) {
        const struct train_sample *s = &plan->run.first[i];
        json_t *sample = train_sample_json(s, q->m->tok);
        json_object_set_new(sample, "adapter", json_string(q->jobs[s->adapter].name));
        json_array_append_new(first, sample);
    }
    return json_pack("{s:o,s:o,s:o}", "plan", plan_object(q, plan), "data", data, "first_batch",
                     first);
}
