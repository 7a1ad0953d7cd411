/*
 * policy: training from preferences (DPO) and from rewards (REINFORCE, RLOO, GRPO).
 *
 * A run samples with the engine from the very weights that are trained, under the trainer's current
 * adapters, and trains on what came out; the reference that it is held to is what training began
 * with. One thread drives a run. Adapters of several jobs share sampling and passes. A run is a
 * function of model, data, options and rewards: the same bits with other threads, and after a kill
 * and resume. Dropout is off, since it would make the trained policy another than the sampled one.
 */
#ifndef SHOAL_POLICY_H
#define SHOAL_POLICY_H

#include "train/train.h"

enum train_method { METHOD_SFT, METHOD_ES, METHOD_DPO, METHOD_REINFORCE, METHOD_RLOO, METHOD_GRPO };
int train_method_parse(const char *name, enum train_method *out, struct error *err);

struct rl_options {                       /* filled from option rows */
    double beta;                              /* 0.1: DPO's */
    int64_t k;                                /* 8 completions a prompt */
    int64_t max_new_tokens;                   /* 64 */
    double temperature;                       /* 1: the policy is the softmax of logits over it */
    char *prefix;                             /* NULL: the assistant's first words, given */
    int64_t inner_updates;                    /* 1 a sampling */
    double clip;                              /* 0.2 */
    double kl_coef, kl_max;                   /* 0.02, 0: no bound */
    char *reward;                             /* exact */
    double reward_timeout;                    /* 60 seconds an update, of commands */
    bool reward_sandbox;                      /* true: commands run in a sandbox, … */
    bool reward_network;                      /* false: with the network, */
    struct strings reward_read, reward_write; // and with these folders too
};
extern const struct option_row rl_option_rows[];

/* rewards */

struct reward_input {
    const json_t *item; /* the data's object, whole */
    const char *text;
    bool ended; /* by itself, not by max_new_tokens */
};
struct reward_fn {
    /* One completion's, or … */
    double (*one)(void *ctx, const json_t *item, const char *completion);
    /* … all of an update at once; used when `one` is NULL. Anything but finite numbers is an error.
     */
    int (*all)(void *ctx, const struct reward_input *v, int n, double *out, struct error *err);
    /* May be NULL: whether an item has what the reward needs; asked when data is read. */
    int (*check)(void *ctx, const json_t *item, struct error *err);
    void *ctx;
};
/*
 * By name. `exact`: 1 where the answer (what follows the last "answer:", or all of the text) is the
 * item's "answer" (a text, or several of which one) but for case, width and white space; of an
 * answer that is a number the text's last number. `regex` or `regex:PATTERN`: 1 where the item's
 * "pattern", or PATTERN, matches. `command:WORDS`: the program reads a line {"item", "completion",
 * "ended"} for each and prints a number for each; no shell, `shell:LINE` is one.
 *
 * A command runs in a sandbox (sandbox/sandbox.h) and is killed with all that it started when it
 * ends. It reads the system, the working folder (unless that is /, /tmp or the home folder), its
 * program's folder, files among its words, and reward_read; it writes /tmp, which is its own, and
 * reward_write. ERR_STATE or ERR_MISSING: commands cannot be run here.
 */
int reward_fn_open(struct reward_fn *r, const struct rl_options *o, struct error *err);
void reward_fn_close(struct reward_fn *r);

/* runs */

/* As sft_run; `reward` NULL: by o->reward. Methods sft and es are not run here. */
int rl_run(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
               enum train_method method, const struct rl_options *p, const struct reward_fn *reward,
               struct pool *pool, const char *checkpoint, FILE *log, struct error *err);
int rl_run_with_callbacks(const struct model *m, struct train_job *jobs, int n,
                       const struct train_options *o, enum train_method method,
                       const struct rl_options *p, const struct reward_fn *reward,
                       struct pool *pool, const char *checkpoint, const struct train_callbacks *watch,
                       struct error *err);

/* What rl_run would do and take. Of rewards, the first step's first completions are sampled and
 * rewarded: so many as the engine holds at once. They are those that the run begins with. */
struct rl_plan {
    /* As of sft_run, its samples chosen and rejected answers (two a pair), or completions.
     * `updates` are steps. Of rewards, tokens and passes are estimates from the first completions,
     * `longest`, `max_rows` and `bytes` are bounds. `first`: chosen and rejected of the first pair
     * of each adapter, or the first completion. */
    struct training_plan run;
    struct pair_length_stats {
        struct length_stats prompt, chosen, rejected; /* the answers: what is learned of them */
    } * pairs;                                   /* [n] dpo's kept pairs, or NULL */
    double reference_seconds;                    /* dpo: of all pairs, once a run */
    json_t *completions; /* rewards: what a step logs, of the first ones, by adapter; or NULL */
    int64_t sampled;     /* how many those are */
    double sampling_seconds, reward_seconds, scoring_seconds; /* of them, measured */
    size_t engine_bytes;                                      /* of run.bytes */
};
int rl_plan_make(const struct model *m, struct train_job *jobs, int n,
                     const struct train_options *o, enum train_method method,
                     const struct rl_options *p, const struct reward_fn *reward, struct pool *pool,
                     struct rl_plan *out, struct error *err);
void rl_plan_release(struct rl_plan *p);

/* losses, for trainer_accumulate_loss */

/*
 * DPO (Rafailov et al. 2023), -log σ(β ((log π(c) - log π_ref(c)) - (log π(r) - log π_ref(r)))), of
 * pairs: sample 2i of a pass is chosen, 2i + 1 rejected. The count is of pairs.
 */
struct dpo_stats {
    double margin, chosen; /* summed implicit rewards: β (log π - log π_ref), chosen - rejected */
    double kl;        /* summed ½ (log π - log π_ref)² of tokens: their KL to second order */
    int64_t n, right; /* pairs; with a positive margin */
    int64_t tokens;
};
struct dpo {
    double beta;
    const struct train_sample *batch;     /* of the pass, and … */
    const double *const *reference; /* … of each sample, [targets] log-probabilities */
    struct dpo_stats *sums;          /* [adapters] added to */
};
int dpo_loss(void *ctx, struct loss_sample *v, int n, struct error *err);

/*
 * Policy gradient by a clipped ratio per token (PPO's surrogate): with ρ = π / π_old and advantage
 * A, -Σ min(ρ A, clip(ρ, 1 ± c) A) + kl_coef · k3, k3 = π_ref / π - 1 - log(π_ref / π); where π_old
 * is π its gradient is that of -A log π. Summed over a completion's tokens, or with `token_mean`
 * (GRPO) their mean. The count is of completions.
 */
struct rollout {
    double advantage;
    const float *reference; /* [targets] log-probabilities */
    double *old;            /* [targets] of the policy that wrote it */
    double count;           /* completions that it stands for; others of them have no gradient */
};
struct policy_loss_stats {
    double kl; /* summed k3 */
    int64_t tokens, clipped;
};
struct policy_loss {
    const struct train_sample *batch;     /* of the pass, and … */
    const struct rollout *rollouts; /* … of each sample */
    double clip, kl_coef;
    bool token_mean;
    bool fresh;               /* the policy wrote them itself: fills `old` */
    struct policy_loss_stats *sums; /* [adapters] added to */
};
int policy_loss(void *ctx, struct loss_sample *v, int n, struct error *err);
/* k3, at least 0. */
double kl_k3(double logp, double reference);

/* From rewards [n][k] of n prompts to advantages. REINFORCE: less `baseline`; RLOO: less the mean
 * of the prompt's other k - 1; GRPO: less the prompt's mean, over its standard deviation. */
void policy_advantages(enum train_method method, const double *rewards, int64_t n, int64_t k,
                       double baseline, double *out);

/* data */

/* {prompt, chosen, rejected}: texts; or lists of messages; or chosen and rejected as whole
 * conversations or texts that begin alike. Of pair i, samples 2i and 2i + 1. */
int dataset_load_preferences(struct dataset *d, const char *path, const struct tokenizer *tok, int32_t max_length,
               struct error *err);
/* {messages} without an answer, or {prompt} (a text, or messages), encoded up to where the answer
 * begins, with `prefix` (may be NULL). "fry:FAMILY[:N]" in place of a file: N (2000) generated
 * questions of the train split. Longer ones are dropped and counted. */
struct prompt_set {
    struct dataset data; /* without targets */
    json_t **items;      /* [data.n] */
};
struct prompt_source {
    const char *path, *prefix;
    const struct tokenizer *tok;
    int32_t max_length;
    const struct reward_fn *reward;
    uint64_t seed;
};
int prompt_set_load(struct prompt_set *p, const struct prompt_source *s, struct error *err);
void prompt_set_release(struct prompt_set *p);

#endif
