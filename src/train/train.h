/*
 * train: the backward pass and its users: LoRA fine-tuning of many adapters in one base pass, and
 * full-parameter pretraining.
 *
 * A trainer is a step function over explicit state: trainer_accumulate adds the gradients of a
 * packed batch (samples are end to end, attention is block-diagonal), trainer_update applies the
 * optimizer. The state can be saved and loaded at every update, to the same bits; results do not
 * depend on threads. Every adapter's gradient is the mean over its target tokens, so three adapters
 * that train together get the bits of three separate trainings. The forward pass has the engine's
 * bits.
 */
#ifndef SHOAL_TRAIN_H
#define SHOAL_TRAIN_H

#include "adapter/adapter.h"
#include "data/data.h"
#include "engine/engine.h"
#include "eval/eval.h"
#include "store/store.h"

struct es_options;
enum lr_schedule { LR_COSINE, LR_LINEAR, LR_CONSTANT };
struct train_options {   /* filled from option rows; names as in PEFT/TRL */
    int64_t r;           /* 32 */
    double lora_alpha;   /* 0: 2·r */
    double lora_dropout; /* 0.05 */
    double epochs;       /* 1 */
    int64_t max_steps;   /* 0: from epochs */
    double lr;           /* 2e-4 */
    int64_t bsz;         /* 1 sample per adapter and micro-batch */
    int64_t grad_accum;  /* 16 */
    char *lr_scheduler;  /* cosine */
    double warmup_ratio; /* 0.03 */
    double min_lr_ratio; /* 0 */
    double beta1, beta2, eps, weight_decay, max_grad_norm; /* 0.9 0.999 1e-8 0 1.0 */
    int64_t max_length;    /* 0: the model's; longer samples are cut, counted and reported */
    int64_t seed;          /* 0 */
    int64_t save_steps;    /* 200 */
    struct strings target; /* all-linear; names, each of which may be a list "q_proj,k_proj" */
    struct strings layers; /* all; numbers "4", ranges "4-7" and lists of them */
    bool use_rslora, use_dora, gradient_checkpointing;
    bool f32_backward; /* quantised bases: activation gradients in f32, not int8 blocks */
    char *optim;       /* adamw; see optim_parse */
    double momentum;   /* 0.9, for sgd */
};
extern const struct option_row train_option_rows[];
enum optim {
    OPTIM_ADAMW,
    OPTIM_ADAMW_8BIT,
    OPTIM_SGD,
    OPTIM_SGD_NO_MOMENTUM /* sgd with momentum 0 */
};
int optim_parse(const char *name, enum optim *out, struct error *err);
int lr_schedule_parse(const char *name, enum lr_schedule *out, struct error *err);
/* Checked configuration of a fresh adapter: rank, alpha, dropout, targets and layers. Its `modules`
 * are malloc'ed; the caller frees them in every case. */
int train_adapter_config(const struct train_options *o, const struct model_config *shape,
                         struct adapter_config *out, struct error *err);
float lr_schedule_at(enum lr_schedule s, double lr, double min_ratio, int64_t step, int64_t warmup,
                     int64_t total);

struct trainer;
/* LoRA: trains copies of the adapters over one frozen base, of any weight type and architecture. */
struct trainer *trainer_new_lora(const struct model *m, struct adapter *const *adapters, int n,
                                 const struct train_options *o, struct pool *pool,
                                 struct error *err);
/* Full: trains the weights of a model made by model_new, in place. */
struct trainer *trainer_new_full(struct model *m, const struct train_options *o, struct pool *pool,
                                 struct error *err);
void trainer_free(struct trainer *t);
/* Bytes of the trainer, besides the model, for passes of that many rows (0: without passes) and
 * samples of that length. */
size_t trainer_bytes(const struct trainer *t, int64_t rows, int64_t longest);
/* Forward and backward of one micro-batch; losses and target counts are summed until the update.
 * Returns ERR_NUMERIC with the layer's name if a NaN or Inf appears. */
int trainer_accumulate(struct trainer *t, const struct train_sample *samples, int n,
                       struct error *err);
/*
 * A loss that is a function of the targets' log-probabilities. `fn` receives every sample of a pass
 * with the log-probabilities of its targets. It sets the derivative of the loss by each of them,
 * the loss, and the sample's share of the count by which the update divides the adapter's gradient.
 * Preference losses and policy gradients have this form. Costs a second forward pass of the head.
 */
struct loss_sample {
    const struct train_sample *sample;
    const double *logp; /* [n] of the targets, in order; for a loss over choices [n][n_choices] */
    float *weight;      /* same shape, set by fn: d loss / d logp */
    int32_t n;
    double loss, count; /* set by fn */
};
struct loss_fn {
    int (*fn)(void *ctx, struct loss_sample *samples, int n, struct error *err);
    void *ctx;
    float temperature; /* divisor of the logits before the softmax; 0: 1 */
    /* A policy over n_choices actions: every target is one of these tokens, and the
     * log-probabilities are those of all choices, normalised over the choices. NULL: those of the
     * targets in the whole vocabulary. */
    const int32_t *choices;
    int32_t n_choices;
};
int trainer_accumulate_loss(struct trainer *t, const struct train_sample *samples, int n,
                            const struct loss_fn *loss, struct error *err);
struct update_stats {
    double loss;      /* mean over all targets since the last update */
    double grad_norm; /* before clipping; the largest over adapters */
    int64_t tokens, targets;
};
/* Clips (per adapter), applies the optimizer at learning rate `lr`, clears gradients. */
int trainer_update(struct trainer *t, float lr, struct update_stats *out, struct error *err);
/* Discards the gradients that were added since the last update. */
void trainer_zero_grad(struct trainer *t);
int64_t trainer_update_count(const struct trainer *t);
double trainer_adapter_loss(const struct trainer *t, int i); /* mean loss of the last update */
/* Forward only: summed negative log-likelihood of the targets, and their number. For held-out loss
 * and tests. */
int trainer_eval_loss(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      int64_t *targets, struct error *err);
/* The same per sample: nll [n], targets [n]; and per target, sample after sample. */
int trainer_sample_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                       int32_t *targets, struct error *err);
int trainer_token_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      struct error *err);
struct adapter *trainer_export_adapter(const struct trainer *t, int i,
                                       json_t *lineage); /* a snapshot */
/* Lets several adapters of one layout share one slot of a trainer: read and replace the slot's
 * parameters and optimizer state. moments NULL: no state yet. */
const float *trainer_adapter_params(const struct trainer *t,
                                    int i); /* [adapter_param_count], in the adapter's layout */
size_t trainer_optimizer_state_bytes(const struct trainer *t, int i);
void trainer_optimizer_state(const struct trainer *t, int i, uint8_t *out);
void trainer_import_adapter(struct trainer *t, int i, struct adapter *a, const uint8_t *moments,
                            int64_t updates);
/* Frees the memory of passes until the next one. */
void trainer_free_activations(struct trainer *t);
/* Parameters and their gradients as flat arrays, for tests and optimizers: tensor i of
 * trainer_n_tensors. */
struct train_tensor {
    const char *name;
    float *w, *g;
    int64_t n;
    bool decay; /* weight decay: true for matrices, false for norms and embeddings */
};
int trainer_n_tensors(const struct trainer *t);
struct train_tensor *trainer_tensor(struct trainer *t, int i);
/* The complete state for the next update, in one file with a checksum; written atomically. */
int trainer_save(const struct trainer *t, const char *path, const json_t *extra, struct error *err);
int trainer_load(struct trainer *t, const char *path, json_t **extra, struct error *err);

/* snapshot: a copy of the state that updates change in each adapter of a trainer, to undo them for
 * single adapters. It does not include accumulated gradients. */
struct trainer_snapshot;
struct trainer_snapshot *trainer_snapshot_new(const struct trainer *t); /* empty */
size_t trainer_snapshot_bytes(const struct trainer_snapshot *u);
void trainer_snapshot_save(struct trainer_snapshot *u, const struct trainer *t, int i);
void trainer_snapshot_restore(const struct trainer_snapshot *u, struct trainer *t, int i);
void trainer_snapshot_free(struct trainer_snapshot *u);

/* runs */

/* Fine-tunes n adapters together, one dataset each, with the same options. Saves a checkpoint to
 * the file `checkpoint` (may be NULL) every save_steps, and continues from it if it exists. `log`
 * (may be NULL) receives a JSON line per update. */
struct train_job {
    const char *name, *data;
    const char *eval_data;  /* NULL, or samples that `data` must not contain; only compared */
    struct adapter *start;  /* NULL: a fresh one, seeded by hash of name and the seed */
    struct adapter *result; /* set on success; the caller releases */
    double first_loss, last_loss;
    struct lint lint; /* report on `data`; set before training begins */
};
int sft_run(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
            struct pool *pool, const char *checkpoint, FILE *log, struct error *err);

/* An update, or for rewards a step of several updates, as reported to callbacks. */
struct train_event {
    int64_t step, steps;              /* steps done, total */
    double lr, seconds, tokens_per_s; /* seconds since the run began or continued */
    const struct update_stats *stats;
    const struct train_job *jobs; /* last_loss is the loss of this update */
    int n;
    bool due;           /* a checkpoint follows: the callback should first save its data */
    const json_t *more; /* figures of the method, or NULL: {…, adapters: {NAME: {…}}} */
};
/* An error of a callback ends the run. */
struct train_callbacks {
    /* Called before the first update. `done`: updates of a continued run that are complete.
     * `about`: {steps, data: [{name, file, sha256, start, lint}]}. */
    int (*begin)(void *ctx, int64_t done, const json_t *about, struct error *err);
    int (*update)(void *ctx, const struct train_event *e, struct error *err);
    void *ctx;
};
/* Like sft_run, with callbacks instead of the log. `es`: NULL, or the options of gradient
 * estimates. */
int sft_run_with_callbacks(const struct model *m, struct train_job *jobs, int n,
                           const struct train_options *o, const struct es_options *es,
                           struct pool *pool, const char *checkpoint,
                           const struct train_callbacks *watch, struct error *err);

/* The work and resources of an sft_run. Samples of a pass are end to end, so there is no
 * padding. */
struct training_plan {
    int64_t updates, samples_per_update; /* samples of each adapter */
    int64_t passes, samples, tokens;     /* totals of the run, all adapters; for es, all members */
    int64_t max_samples, max_rows, longest; /* maxima of a pass; tokens of the longest sample */
    size_t bytes;                           /* memory besides the model */
    double pass_seconds; /* measured: the first pass, forward and backward, or some es members, … */
    int64_t pass_tokens;            /* … and its number of tokens */
    double update_seconds, seconds; /* measured: the optimizer; estimated: the whole run */
    struct train_sample *first;     /* [n_first] the first bsz samples of each adapter */
    int n_first;
};
/* Reads the data and computes one pass; writes nothing. Fills jobs[].lint. */
int sft_plan_make(const struct model *m, struct train_job *jobs, int n,
                  const struct train_options *o, const struct es_options *es, struct pool *pool,
                  struct training_plan *out, struct error *err);
void training_plan_release(struct training_plan *p);

/*
 * rl: training from preferences (DPO) and from rewards (REINFORCE, RLOO, GRPO).
 *
 * A run samples with the engine from the weights that it trains, under the trainer's current
 * adapters, and trains on the completions. The reference is the start adapter. One thread
 * drives a run. Adapters of several jobs share sampling and passes. A run is a function of model,
 * data, options and rewards: the number of threads, or a kill and resume, changes no bit. Dropout
 * is off, because it would make the trained policy differ from the sampled one.
 */

enum train_method { METHOD_SFT, METHOD_ES, METHOD_DPO, METHOD_REINFORCE, METHOD_RLOO, METHOD_GRPO };
int train_method_parse(const char *name, enum train_method *out, struct error *err);

struct rl_options {         /* filled from option rows */
    double beta;            /* 0.1: for DPO */
    int64_t k;              /* 8 completions per prompt */
    int64_t max_new_tokens; /* 64 */
    double temperature;     /* 1: the policy is the softmax of the logits divided by it */
    char *prefix;           /* NULL; first words of the assistant, not sampled */
    int64_t inner_updates;  /* 1 update per sampling */
    double clip;            /* 0.2 */
    double kl_coef, kl_max; /* 0.02; 0: no bound */
    char *reward;           /* exact */
    double reward_timeout;  /* 60 seconds per update, for commands */
    bool reward_sandbox;    /* true: commands run in a sandbox */
    bool reward_network;    /* false; true: commands may use the network */
    struct strings reward_read, reward_write; // additional paths for commands
};
extern const struct option_row rl_option_rows[];

/* rewards */

struct reward_input {
    const json_t *item; /* the whole JSON object from the data */
    const char *text;
    bool ended; /* the completion has ended before max_new_tokens */
};
struct reward_fn {
    /* Reward of one completion, or … */
    double (*one)(void *ctx, const json_t *item, const char *completion);
    /* … rewards of all completions of an update; used if `one` is NULL. A number that is not finite
     * is an error. */
    int (*all)(void *ctx, const struct reward_input *v, int n, double *out, struct error *err);
    /* May be NULL: checks, when data is read, whether an item has the fields that the reward
     * needs. */
    int (*check)(void *ctx, const json_t *item, struct error *err);
    void *ctx;
};
/*
 * Rewards by name. `exact`: 1 if the answer (the text after the last "answer:", or the whole text)
 * equals the item's "answer", a text or one of several, except for case, width and white space. If
 * the item's answer is a number, grader `number` compares. `regex` or `regex:PATTERN`: 1 if the
 * item's "pattern", or PATTERN, matches. `command:WORDS`: the program reads a line {"item",
 * "completion", "ended"} for each completion and prints a number for each; without a shell.
 * `shell:LINE` uses a shell.
 *
 * A command runs in a sandbox (sandbox/sandbox.h) and, when it ends, is killed with all processes
 * that it started. It reads the system, the working folder (unless that is /, /tmp or the home
 * folder), its program's folder, files among its arguments, and reward_read; it writes a private
 * /tmp and reward_write. ERR_STATE or ERR_MISSING: commands cannot run here.
 */
int reward_fn_open(struct reward_fn *r, const struct rl_options *o, struct error *err);
void reward_fn_close(struct reward_fn *r);

/* runs */

/* Like sft_run. `reward` NULL: use o->reward. Methods sft and es are not accepted. */
int rl_run(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
           enum train_method method, const struct rl_options *p, const struct reward_fn *reward,
           struct pool *pool, const char *checkpoint, FILE *log, struct error *err);
int rl_run_with_callbacks(const struct model *m, struct train_job *jobs, int n,
                          const struct train_options *o, enum train_method method,
                          const struct rl_options *p, const struct reward_fn *reward,
                          struct pool *pool, const char *checkpoint,
                          const struct train_callbacks *watch, struct error *err);

/* The work and resources of an rl_run. For rewards, the first completions of the first step are
 * sampled and rewarded, as many as the engine holds at once. The run begins with the same ones. */
struct rl_plan {
    /* As for sft_run; its samples are chosen and rejected answers (two per pair), or completions.
     * `updates` are steps. For rewards, tokens and passes are estimates from the first completions;
     * `longest`, `max_rows` and `bytes` are bounds. `first`: chosen and rejected answer of the
     * first pair of each adapter, or its first completion. */
    struct training_plan run;
    struct pair_length_stats {
        struct length_stats prompt, chosen, rejected; /* answers: target tokens */
    } * pairs;                                        /* [n] dpo: kept pairs, or NULL */
    double reference_seconds;                         /* dpo: all pairs, once per run */
    json_t *completions; /* rewards: log figures of the first completions by adapter, or NULL */
    int64_t sampled;     /* number of these completions */
    double sampling_seconds, reward_seconds, scoring_seconds; /* measured on these completions */
    size_t engine_bytes;                                      /* part of run.bytes */
};
int rl_plan_make(const struct model *m, struct train_job *jobs, int n,
                 const struct train_options *o, enum train_method method,
                 const struct rl_options *p, const struct reward_fn *reward, struct pool *pool,
                 struct rl_plan *out, struct error *err);
void rl_plan_release(struct rl_plan *p);

/* losses, for trainer_accumulate_loss */

/*
 * DPO (Rafailov et al. 2023), -log σ(β ((log π(c) - log π_ref(c)) - (log π(r) - log π_ref(r)))), on
 * pairs: sample 2i of a pass is chosen, 2i + 1 rejected. The count is the number of pairs.
 */
struct dpo_stats {
    double margin, chosen; /* sums of β (log π - log π_ref): chosen - rejected; chosen */
    double kl;        /* summed ½ (log π - log π_ref)² over tokens: the KL to second order */
    int64_t n, right; /* number of pairs; number with a positive margin */
    int64_t tokens;
};
struct dpo {
    double beta;
    const struct train_sample *batch; /* samples of the pass, and … */
    const double *const *reference; /* … their [targets] log-probabilities under the reference */
    struct dpo_stats *sums;         /* [adapters] sums, added to */
};
int dpo_loss(void *ctx, struct loss_sample *v, int n, struct error *err);

/*
 * Policy gradient with a clipped ratio per token (PPO's surrogate): with ρ = π / π_old and
 * advantage A, -Σ min(ρ A, clip(ρ, 1 ± c) A) + kl_coef · k3, k3 = π_ref / π - 1 - log(π_ref / π).
 * If π_old is π, its gradient is that of -A log π. Summed over a completion's tokens, or with
 * `token_mean` (GRPO) their mean. The count is the number of completions.
 */
struct rollout {
    double advantage;
    const float *reference; /* [targets] log-probabilities under the reference */
    double *old;            /* [targets] log-probabilities under the sampling policy */
    double count;           /* completions that it represents; the others have no gradient */
};
struct policy_loss_stats {
    double kl; /* summed k3 */
    int64_t tokens, clipped;
};
struct policy_loss {
    const struct train_sample *batch; /* samples of the pass, and … */
    const struct rollout *rollouts;   /* … their rollouts */
    double clip, kl_coef;
    bool token_mean;
    bool fresh;                     /* the current policy has sampled them: fills `old` */
    struct policy_loss_stats *sums; /* [adapters] sums, added to */
};
int policy_loss(void *ctx, struct loss_sample *v, int n, struct error *err);
/* k3, at least 0. */
double kl_k3(double logp, double reference);

/* Advantages from rewards [n][k] of n prompts. REINFORCE: reward minus `baseline`; RLOO: minus the
 * mean of the prompt's other k - 1; GRPO: minus the prompt's mean, divided by its standard
 * deviation. */
void policy_advantages(enum train_method method, const double *rewards, int64_t n, int64_t k,
                       double baseline, double *out);

/*
 * es: estimates an adapter's gradient from forward passes alone (evolution strategies), for a
 * trainer that then updates as usual.
 *
 * A population of N members, N/2 antithetic pairs, is evaluated on the same samples; a member
 * differs from the adapter by a rank-2 map generated from a counter. The estimate
 *
 *     -1/(N σ) Σ_i f_i E_i       f_i fitness, shaped; E_i the member's direction in A and B
 *
 * is added to the trainer's gradient. For unshaped fitness it is an unbiased estimate of -∇f up to
 * O(σ²). It needs no derivative: any base and any fitness function can be used.
 *
 * One thread drives it. Its results depend only on the samples, the adapter, the options, the
 * trainer's seed and the adapter's count of updates.
 */

struct es_options {     /* filled from option rows */
    int64_t population; /* 32: N, even */
    double sigma;       /* 0.01 */
    char *fitness;      /* loss */
    char *shaping;      /* zscore */
    int64_t pass_rows;  /* 1024 */
};
extern const struct option_row es_option_rows[];
/* ERR_USAGE if an option is wrong, or if a training option does not apply to ES. */
int es_options_check(const struct es_options *o, const struct train_options *train,
                     struct error *err);

struct es;
/* The options must be checked and, like the model and the pool, must outlive it. */
struct es *es_new(const struct model *m, const struct es_options *o, struct pool *pool);
void es_free(struct es *e);
/* Adds the estimate for adapter `index` of a LoRA trainer; all members share the samples. The
 * reported loss is the mean over members. Calls between two updates use the same directions. */
int es_accumulate(struct es *e, struct trainer *t, int index, const struct train_sample *samples,
                  int n, struct error *err);
/* Mean and standard deviation of the members' fitness in the last call, before shaping. */
double es_fitness_mean(const struct es *e);
double es_fitness_std(const struct es *e);
/* Peak memory in bytes, excluding the trainer. */
size_t es_bytes(const struct es *e);

/*
 * For callers that evaluate members elsewhere: a member is the current adapter `index` plus or
 * minus a map of rank 2, es_perturbation, generated from the counter. With shaped fitness f, a
 * pair's coefficient is (f₊ - f₋) / (N σ).
 */
struct adapter *es_perturbation(const struct trainer *t, int index,
                                const struct lora_perturbation *z, double sigma);
int es_fitness_shaping_check(const char *name, struct error *err);
void es_shape_fitness(const char *shaping, double *f,
                      int n); /* in place; `shaping` must be a known name, n > 1 */
/* Adds -Σ coef E of directions (seed, 0 … n - 1) to the adapter's gradient, with a count of 1. */
void es_add_gradient(struct trainer *t, int index, uint64_t seed, const double *coef, int n);

/* Pretraining of a small base from a recipe: see pretrain.c. */

struct pretrain_options {
    char *shape;
    int64_t vocab, tokenizer_items, steps, rows, warmup, seed, eval_every, eval_items, save_every;
    double lr, min_lr_ratio, beta2, weight_decay, max_grad_norm, working, debate, drill, system;
    struct strings mix;
};
extern const struct option_row pretrain_option_rows[];
/* The plan of pretrain_run, with the same checks: {shape, parameters, updates, done, tokens, ...};
 * "parameters" is for the whole vocabulary. Returns NULL and an error if a check fails. */
json_t *pretrain_plan(const struct pretrain_options *o, const char *dir, struct error *err);
/* Writes the finished model as a Hugging Face directory, with log.jsonl; continues from
 * DIR/checkpoint.bin if it exists. */
int pretrain_run(const struct pretrain_options *o, const char *dir, struct pool *pool,
                 struct error *err);

/*
 * gate: is a trained adapter better than its predecessor? A paired test on samples that training
 * did not use decides; a second one checks the samples to retain.
 *
 * Both compare, sample by sample, the mean negative log-likelihood of the targets before and after
 * (nats per token), as the serving forward pass computes it. gate_compare and gate_decide are pure.
 */

/* nll[i]: mean over the targets of sample i, under an adapter (ready; NULL: the base model). */
int gate_eval_nll(const struct model *m, const struct adapter *a, const struct dataset *d,
                  struct pool *pool, double *nll, struct error *err);

struct gate_comparison {
    int64_t n; /* 0: not measured */
    double before, after;
    struct stats_interval gain; /* gain before - after, 95 % t interval */
    double p;                   /* two-sided, sign flips */
};
struct gate_comparison gate_compare(const double *before, const double *after, int64_t n);

struct gate {
    struct gate_comparison eval, retain;
    bool publish;
    char why[256]; /* one line of text for the user */
};
/* Publishes if the gain is above 0 with p <= alpha and, if retention was measured, its interval
 * excludes a loss of more than `tolerance` nats per token. Sets publish and why. */
void gate_decide(struct gate *g, double alpha, double tolerance);
json_t *gate_json(const struct gate *g);

/*
 * log: the records of a training run: DIR/train.jsonl with one line per update, the same lines as
 * metrics of a run in the store, and DIR/report.html with curves.
 *
 * A log observes a run (train_log_callbacks). It contains each update once and in order, also when
 * the run was killed and continued: lines of updates after the checkpoint are removed. The page is
 * rewritten before every checkpoint; the caller adds sections and writes it once more at the end.
 * One thread.
 */

/* Writes the events as lines and flushes each. */
struct train_callbacks train_jsonl_callbacks(FILE *f);

struct train_log;
/* DIR must exist. store may be NULL; store and texts must outlive the log. */
struct train_log *train_log_open(const char *dir, const char *title, struct store *store,
                                 const char *run);
void train_log_free(struct train_log *l); /* may be NULL */
struct train_callbacks train_log_callbacks(struct train_log *l);
/* A table of the page (see html_table); takes ownership of `value`. The same heading replaces the
 * earlier table. */
void train_log_section(struct train_log *l, const char *heading, json_t *value);
int train_log_report(struct train_log *l, struct error *err);
/* The options of a table as an object, in the table's order. */
json_t *options_json(const struct option_row *rows, const void *options);

#endif
