/*
 * memory: the plan of a simulation's memory, from the shape of the model and the options, before
 * the model is read.
 *
 * It is an upper bound of the peak: the allocations of a run without a limit, or the limit, which
 * the run keeps with smaller engines and passes. The shares of both under a limit are those of the
 * run: engines get at most half of the room, passes the rest.
 */
#include "world/internal.h"

#include <string.h>

enum {
    ADAPTER_EXTRA_BYTES = 64 << 10, /* structs and lineage of an adapter */
    AGENT_BYTES = 16 << 10,         /* decisions and requests of an agent */
};

/* Bytes of one adapter with its pack; low_memory stores f16. */
static size_t policy_bytes(const struct simulation_options *o, size_t params,
                           enum dtype lora_elem) {
    return params * (dtype_size(o->low_memory ? DTYPE_F16 : DTYPE_F32) + dtype_size(lora_elem)) +
           ADAPTER_EXTRA_BYTES;
}

/* Bytes of the directions of es: pairs of factors of rank 2 for each agent. */
static size_t direction_bytes(const struct simulation_options *o, int n_agents, size_t params) {
    if (strcmp(o->learn.learn, "es") != 0) return 0;
    return (size_t)n_agents * (params / (size_t)o->learn.train.r * 16 + ADAPTER_EXTRA_BYTES);
}

/* Snapshots, or the optimizer states of the policies that are not in the trainer. */
static size_t state_bytes(const struct simulation_options *o, int n, size_t params) {
    bool swaps = o->low_memory || learner_group(&o->learn, n) < n;
    return (size_t)n * params * (swaps ? 2 : 3) * sizeof(float);
}

/* Everything besides program, model, engines and trainer. Two generations of adapters exist at
 * once, and a new one for each thread that refreshes a policy. */
static size_t other_bytes(const struct simulation_options *o, int agents, int n_initial,
                          const struct policy_runner_options *runner, size_t params) {
    const bool learns = strcmp(o->learn.learn, "none") != 0;
    const int n_agents = agents * (int)o->n_envs, n = simulation_policy_count(o, agents);
    size_t adapters = 2 * (size_t)n + (size_t)n_initial + (size_t)pool_size(runner->pool),
           bytes = WORK_BYTES + adapters * policy_bytes(o, params, runner->lora_elem) +
                   (size_t)n_agents * AGENT_BYTES + (size_t)o->n_envs * sizeof(struct grid_env);
    if (runner->cached_decisions && !runner->text)
        bytes += decision_cache_bytes(runner->cached_decisions, ENV_MAX_ACTIONS);
    if (!learns) return bytes;
    return bytes + learner_buffer_bytes(&o->learn, n, n_agents, policy_max_len(o)) +
           2 * (size_t)n * learner_critic_bytes(&o->learn) + state_bytes(o, n, params) +
           direction_bytes(o, n_agents, params);
}

/* The trainer with its passes, in at most `bytes`. */
static void passes_plan(const struct model_config *c, enum numeric_class cls,
                        const struct simulation_options *o, const struct adapter_config *a, int n,
                        enum dtype kv, struct pool *pool, size_t bytes,
                        struct trainer_passes *out) {
    struct train_options to = o->learn.train;
    const int64_t longest = MIN(policy_max_len(o), c->max_seq_len);
    const int group = learner_group(&o->learn, n);
    to.kv_cache_dtype = (char *)(uintptr_t)dtype_name(kv);
    to.gradient_checkpointing |= o->low_memory;
    trainer_passes_bound(c, cls, a, group, &to, pool, bytes,
                         learner_pass_rows(&o->learn, o->low_memory, group, longest), longest, out);
}

int simulation_memory_plan(const struct model_config *c, enum numeric_class cls,
                           const struct simulation_options *o, int agents, int n_initial,
                           size_t used, struct pool *pool, struct train_memory *out,
                           struct error *err) {
    const size_t limit = memory_limit_get();
    struct policy_runner_options runner;
    struct engine_options engine;
    struct adapter_config a;
    enum dtype training;
    if (simulation_runner_options(o, cls, agents * (int)o->n_envs, pool, &runner, &training, err) !=
            OK ||
        train_adapter_config(&o->learn.train, c, &a, err) != OK)
        return err->code;
    *out = (struct train_memory){
        .limit = limit,
        .used = used,
        .other = other_bytes(o, agents, n_initial, &runner, adapter_param_count(c, &a))};
    size_t n = (size_t)policy_runner_engines(c, &runner, &engine), fixed = used + out->other,
           room = !limit          ? SIZE_MAX
                  : limit > fixed ? limit - fixed
                                  : 0;
    out->engine = n * engine_bytes(c, &engine);
    if (out->engine > room / 2)
        out->engine = MIN(out->engine, MAX(n * engine_least_bytes(c, &engine), room / 2));
    room -= MIN(room, out->engine);
    if (strcmp(o->learn.learn, "none") != 0)
        passes_plan(c, cls, o, &a, simulation_policy_count(o, agents), training, pool, room,
                    &out->pass);
    out->passes = MIN(out->pass.bytes, room);
    adapter_config_release(&a);
    return OK;
}
