/*
 * train: the backward pass and what stands on it — LoRA fine-tuning of many adapters in one base
 * pass, and full-parameter pretraining.
 *
 * A trainer is a step function over explicit state: trainer_accumulate adds the gradients of a
 * packed batch (samples lie end to end, attention is block-diagonal), trainer_update applies AdamW.
 * State can be saved and loaded at every update, to the same bits; results do not depend on
 * threads. Every adapter's gradient is the mean over its own target tokens, so training three
 * together gives the bits of training each alone on its own samples. The forward pass is the
 * engine's, to the bit.
 */
#ifndef SHOAL_TRAIN_H
#define SHOAL_TRAIN_H

#include "adapter/adapter.h"
#include "engine/engine.h"
#include "eval/eval.h"
#include "store/store.h"

struct train_sample {
    int32_t *tokens;
    uint8_t *mask; /* 1: this token is a target (predicted from those before it) */
    int32_t n;
    int32_t adapter; /* index into the trainer's adapters; ignored in full training */
};
void train_sample_release(struct train_sample *s);

struct es_options;
enum lr_schedule { LR_COSINE, LR_LINEAR, LR_CONSTANT };
struct train_options {   /* filled from option rows; names as in PEFT/TRL */
    int64_t r;           /* 32 */
    double lora_alpha;   /* 0: 2·r */
    double lora_dropout; /* 0.05 */
    double epochs;       /* 1 */
    int64_t max_steps;   /* 0: by epochs */
    double lr;           /* 2e-4 */
    int64_t bsz;         /* 1 sample an adapter a micro-batch */
    int64_t grad_accum;  /* 16 */
    char *lr_scheduler;  /* cosine */
    double warmup_ratio; /* 0.03 */
    double min_lr_ratio; /* 0 */
    double beta1, beta2, eps, weight_decay, max_grad_norm; /* 0.9 0.999 1e-8 0 1.0 */
    int64_t max_length;    /* 0: the model's; longer samples are cut, counted and said */
    int64_t seed;          /* 0 */
    int64_t save_steps;    /* 200 */
    struct strings target; /* all-linear; names, each of which may be a list "q_proj,k_proj" */
    struct strings layers; /* all; numbers "4", ranges "4-7" and lists of them */
    bool use_rslora, use_dora, gradient_checkpointing;
    bool f32_backward; /* quantised bases: gradients of activations not in int8 blocks */
    char *optim;       /* adamw; see optim_parse */
    double momentum;   /* 0.9, of sgd */
};
extern const struct option_row train_option_rows[];
enum optim {
    OPTIM_ADAMW,
    OPTIM_ADAMW_8BIT,
    OPTIM_SGD,
    OPTIM_SGD_NO_MOMENTUM /* without momentum */
};
int optim_parse(const char *name, enum optim *out, struct error *err);
int lr_schedule_parse(const char *name, enum lr_schedule *out, struct error *err);
/* Rank, alpha, dropout, targets and layers of a fresh adapter, checked. Its `modules` are
 * malloc'ed: the caller frees them, in every case. */
int train_adapter_config(const struct train_options *o, const struct model_config *shape,
                         struct adapter_config *out, struct error *err);
float lr_schedule_at(enum lr_schedule s, double lr, double min_ratio, int64_t step, int64_t warmup,
                     int64_t total);

struct trainer;
/* LoRA: copies of the adapters are trained over the one frozen base, of any weight type and
 * architecture. */
struct trainer *trainer_new_lora(const struct model *m, struct adapter *const *adapters, int n,
                                 const struct train_options *o, struct pool *pool,
                                 struct error *err);
/* Full: trains the weights of a model made by model_new, in place. */
struct trainer *trainer_new_full(struct model *m, const struct train_options *o, struct pool *pool,
                                 struct error *err);
void trainer_free(struct trainer *t);
/* Bytes that it takes, besides the model, with passes of that many rows (0: without any) and
 * samples that long. */
size_t trainer_bytes(const struct trainer *t, int64_t rows, int64_t longest);
/* Forward and backward of one micro-batch; losses and target counts add up until the update.
 * Returns ERR_NUMERIC with the layer's name when a NaN or Inf appears. */
int trainer_accumulate(struct trainer *t, const struct train_sample *samples, int n,
                       struct error *err);
/*
 * Any loss that is a function of the targets' log-probabilities: `fn` is given every sample of a
 * pass with its targets' and fills in the derivative of the loss by each, the loss itself, and what
 * this sample adds to the count that the adapter's gradient is divided by at the update. Preference
 * losses and policy gradients are that. Costs the head's forward pass once more.
 */
struct loss_sample {
    const struct train_sample *sample;
    const double *logp; /* [n] of its targets, in order; of a loss over choices [n][n_choices] */
    float *weight;      /* the same, to be filled: d loss / d logp */
    int32_t n;
    double loss, count; /* to be filled */
};
struct loss_fn {
    int (*fn)(void *ctx, struct loss_sample *samples, int n, struct error *err);
    void *ctx;
    float temperature; /* the log-probabilities are of logits over it; 0: over 1 */
    /* A target is one of these tokens, and the log-probabilities are of them all, normalised over
     * them alone: a policy over so many actions. NULL: of the targets in the whole vocabulary. */
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
/* Clips (per adapter), AdamW at learning rate `lr`, clears gradients. */
int trainer_update(struct trainer *t, float lr, struct update_stats *out, struct error *err);
/* Gradients that were added since the last update are gone. */
void trainer_zero_grad(struct trainer *t);
int64_t trainer_update_count(const struct trainer *t);
double trainer_adapter_loss(const struct trainer *t, int i); /* of the last update */
/* Forward only: summed negative log-likelihood of the targets, and their count. For held-out loss
 * and tests. */
int trainer_eval_loss(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      int64_t *targets, struct error *err);
/* The same sample by sample: nll [n], targets [n]; and target by target, sample after sample. */
int trainer_sample_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                       int32_t *targets, struct error *err);
int trainer_token_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      struct error *err);
struct adapter *trainer_export_adapter(const struct trainer *t, int i,
                                       json_t *lineage); /* a snapshot */
/* One slot of a trainer for several adapters of one layout in turn: its numbers, and what the
 * optimizer remembers of them, out and in. moments NULL: nothing yet. */
const float *trainer_adapter_params(const struct trainer *t,
                                    int i); /* [adapter_param_count] as in its data */
size_t trainer_optimizer_state_bytes(const struct trainer *t, int i);
void trainer_optimizer_state(const struct trainer *t, int i, uint8_t *out);
void trainer_import_adapter(struct trainer *t, int i, struct adapter *a, const uint8_t *moments,
                            int64_t updates);
/* Lets go of what passes need, until the next one. */
void trainer_free_activations(struct trainer *t);
/* Parameters and their gradients as flat views, for tests and optimizers: tensor i of
 * trainer_n_tensors. */
struct train_tensor {
    const char *name;
    float *w, *g;
    int64_t n;
    bool decay; /* matrices yes, norms and embeddings no */
};
int trainer_n_tensors(const struct trainer *t);
struct train_tensor *trainer_tensor(struct trainer *t, int i);
/* Everything that the next update depends on, in one file with a checksum; written atomically. */
int trainer_save(const struct trainer *t, const char *path, const json_t *extra, struct error *err);
int trainer_load(struct trainer *t, const char *path, json_t **extra, struct error *err);

/* undo: a copy of what updates change in each adapter of a trainer, so that they may be taken back
 * for one and not for others. Gradients that had been added are not in it. */
struct trainer_snapshot;
struct trainer_snapshot *trainer_snapshot_new(const struct trainer *t); /* holds nothing yet */
size_t trainer_snapshot_bytes(const struct trainer_snapshot *u);
void trainer_snapshot_save(struct trainer_snapshot *u, const struct trainer *t, int i);
void trainer_snapshot_restore(const struct trainer_snapshot *u, struct trainer *t, int i);
void trainer_snapshot_free(struct trainer_snapshot *u);

/* data */

/* What is remembered of every sample that was read, kept or not, for lint. */
struct sample_digest {
    int32_t line, tokens; /* where it begins in its file; before the cut */
    uint64_t whole;       /* hash of its roles and texts */
    uint64_t near;        /* the same without differences of case, width and white space */
    uint64_t prompt;      /* what is asked before the last answer, compared like `near`; 0: none */
};
struct dataset {
    struct train_sample *v;
    int n;
    int64_t tokens, targets;
    int64_t cut, dropped;        /* shortened to max_length; those of them without a target left */
    struct sample_digest *facts; /* [n_read] */
    int n_read;
    char hash[HASH_LEN]; /* of the file */
};
/* {messages}, {prompt, completion} or {text}; lines, concatenated objects or an array. A turn of
 * the assistant with "weight": 0 is read and not learned. Errors name file, line, field. Targets
 * are the assistant's own words only (all of it for {text}). */
int dataset_load(struct dataset *d, const char *path, const struct tokenizer *tok,
                 int32_t max_length, struct error *err);
void dataset_release(struct dataset *d);

/* lint: what a file holds, before time is spent on it */

/* `n` samples; the first of them begins in `line`, its twin in `other`. */
struct lint_matches {
    int n;
    int32_t line, other;
};
struct lint {
    int read, kept, cut, dropped, n_eval;
    int64_t tokens, targets;                /* of what is kept */
    int32_t shortest, median, p95, longest; /* tokens of all samples, before the cut */
    struct lint_matches exact, near;        /* samples that repeat an earlier one; `near` only
                                             up to case, width and white space */
    struct lint_matches eval_samples,
        eval_prompts; /* evaluation samples that are in the data, whole
                       or by their prompt; `line` is the data's */
};
/* `eval` may be NULL. */
int lint_dataset(const struct dataset *d, const struct dataset *eval, struct lint *out,
                 struct error *err);
json_t *lint_json(const struct lint *l);
void lint_text(const struct lint *l, struct buf *out); /* whole, a few lines */
void lint_log(const struct lint *l, const char *name); /* notes and warnings */
/* Fills the hashes. A prompt and its completion count as a user's and the assistant's message, a
 * text as the assistant's. */
int sample_digest_compute(const struct chat_message *msgs, int n, struct sample_digest *out,
                          struct error *err);

/* The sample as text, special tokens too, with what is learned between `on` and `off`. Control
 * characters but newline and tab, and what is no UTF-8, become U+FFFD. */
void train_sample_render(const struct train_sample *s, const struct tokenizer *tok, const char *on,
                         const char *off, struct buf *out);
/* [{"text", "learned"}, …], "ids" and "mask" (1 where learned). */
json_t *train_sample_json(const struct train_sample *s, const struct tokenizer *tok);

/* runs */

/* Fine-tunes n adapters together, one dataset each, from the same options; checkpoints to
 * `checkpoint` (a file path; may be NULL) every save_steps and continues from it when it exists.
 * `log` (may be NULL) receives a JSON line an update. */
struct train_job {
    const char *name, *data;
    const char *eval_data;  /* NULL, or what `data` must not hold; only compared */
    struct adapter *start;  /* NULL: a fresh one, seeded by hash of name and the seed */
    struct adapter *result; /* set on success; the caller releases */
    double first_loss, last_loss;
    struct lint lint; /* of `data`; set before training begins */
};
int sft_run(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
            struct pool *pool, const char *checkpoint, FILE *log, struct error *err);

/* What an update did, or of rewards a step of several, for who watches the run. */
struct train_event {
    int64_t step, steps;              /* done, of */
    double lr, seconds, tokens_per_s; /* seconds since the run began or continued */
    const struct update_stats *stats;
    const struct train_job *jobs; /* last_loss is of this update */
    int n;
    bool due;           /* a checkpoint follows: what the watcher keeps should be safe first */
    const json_t *more; /* the method's own figures, or NULL: {…, adapters: {NAME: {…}}} */
};
/* An error of either ends the run. */
struct train_callbacks {
    /* Before the first update: how many are behind, of a run that is continued, and {steps, data:
     * [{name, file, sha256, start, lint}]}. */
    int (*begin)(void *ctx, int64_t done, const json_t *about, struct error *err);
    int (*update)(void *ctx, const struct train_event *e, struct error *err);
    void *ctx;
};
/* The same with a watcher in place of the log; `es`: NULL, or gradients are estimates (es.h). */
int sft_run_with_callbacks(const struct model *m, struct train_job *jobs, int n,
                           const struct train_options *o, const struct es_options *es,
                           struct pool *pool, const char *checkpoint,
                           const struct train_callbacks *watch, struct error *err);

/* Of a number of token counts. */
struct length_stats {
    int n;
    int64_t tokens;
    int32_t shortest, median, p95, longest;
};
struct length_stats length_stats_compute(int32_t *v, int n); /* puts them in order */

/* What sft_run would do and take. Samples lie end to end in a pass, so there is no padding. */
struct training_plan {
    int64_t updates, samples_per_update;    /* of each adapter */
    int64_t passes, samples, tokens;        /* of the whole run, all adapters; of es, members too */
    int64_t max_samples, max_rows, longest; /* of the largest pass; of a sample */
    size_t bytes;                           /* of memory beside the model's own */
    double pass_seconds; /* measured: the first pass, forward and backward, or of es members … */
    int64_t pass_tokens; /* … which had so many tokens */
    double update_seconds, seconds; /* measured: the optimizer; all of the run */
    struct train_sample *first;     /* [n_first] the first bsz samples of each adapter */
    int n_first;
};
/* Reads the data and computes one pass; writes nothing. Fills jobs[].lint. */
int sft_plan_make(const struct model *m, struct train_job *jobs, int n,
                  const struct train_options *o, const struct es_options *es, struct pool *pool,
                  struct training_plan *out, struct error *err);
void training_plan_release(struct training_plan *p);

/*
 * policy: training from preferences (DPO) and from rewards (REINFORCE, RLOO, GRPO).
 *
 * A run samples with the engine from the very weights that are trained, under the trainer's current
 * adapters, and trains on what came out; the reference that it is held to is what training began
 * with. One thread drives a run. Adapters of several jobs share sampling and passes. A run is a
 * function of model, data, options and rewards: the same bits with other threads, and after a kill
 * and resume. Dropout is off, since it would make the trained policy another than the sampled one.
 */

enum train_method { METHOD_SFT, METHOD_ES, METHOD_DPO, METHOD_REINFORCE, METHOD_RLOO, METHOD_GRPO };
int train_method_parse(const char *name, enum train_method *out, struct error *err);

struct rl_options {                           /* filled from option rows */
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
                          struct pool *pool, const char *checkpoint,
                          const struct train_callbacks *watch, struct error *err);

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
    } * pairs;                                        /* [n] dpo's kept pairs, or NULL */
    double reference_seconds;                         /* dpo: of all pairs, once a run */
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
    const struct train_sample *batch; /* of the pass, and … */
    const double *const *reference;   /* … of each sample, [targets] log-probabilities */
    struct dpo_stats *sums;           /* [adapters] added to */
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
    const struct train_sample *batch; /* of the pass, and … */
    const struct rollout *rollouts;   /* … of each sample */
    double clip, kl_coef;
    bool token_mean;
    bool fresh;                     /* the policy wrote them itself: fills `old` */
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
int dataset_load_preferences(struct dataset *d, const char *path, const struct tokenizer *tok,
                             int32_t max_length, struct error *err);
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

/*
 * es: gradients of an adapter estimated from forward passes alone (evolution strategies), for a
 * trainer that then updates as ever.
 *
 * A population of N members, N/2 antithetic pairs, is evaluated on the same samples; a member
 * differs from the adapter by a rank-2 map made from a counter. What is added to the trainer is
 *
 *     -1/(N σ) Σ_i f_i E_i       f_i fitness, shaped; E_i the member's direction in A and B
 *
 * which for unshaped fitness is an unbiased estimate of -∇f up to O(σ²). Nothing is differentiated:
 * any base and any fitness will do.
 *
 * One thread drives it; its results depend on the samples, the adapter, the options, the trainer's
 * seed and the adapter's count of updates, and on nothing else.
 */

struct es_options {     /* filled from option rows */
    int64_t population; /* 32: N, even */
    double sigma;       /* 0.01 */
    char *fitness;      /* loss */
    char *shaping;      /* zscore */
    int64_t pass_rows;  /* 1024 */
};
extern const struct option_row es_option_rows[];
/* ERR_USAGE where one of them is wrong, or the training options ask for what ES has not. */
int es_options_check(const struct es_options *o, const struct train_options *train,
                     struct error *err);

struct es;
/* The options are checked and outlive it, as the model and the pool do. */
struct es *es_new(const struct model *m, const struct es_options *o, struct pool *pool);
void es_free(struct es *e);
/* Adds the estimate for adapter `index` of a LoRA trainer; the samples are shared by all members.
 * The loss it reports is the members' mean. Calls between two updates share their directions. */
int es_accumulate(struct es *e, struct trainer *t, int index, const struct train_sample *samples,
                  int n, struct error *err);
/* The members' fitness of the last call before it was shaped: its mean, and standard deviation. */
double es_fitness_mean(const struct es *e);
double es_fitness_std(const struct es *e);
/* The most bytes that it has held besides the trainer's. */
size_t es_bytes(const struct es *e);

/*
 * For who evaluates members elsewhere: they are adapter `index` as it is plus and minus a map of
 * rank 2, es_perturbation, made from the counter. Of fitness f, shaped, a pair's coefficient is
 * (f₊ - f₋) / (N σ).
 */
struct adapter *es_perturbation(const struct trainer *t, int index,
                                const struct lora_perturbation *z, double sigma);
int es_fitness_shaping_check(const char *name, struct error *err);
void es_shape_fitness(const char *shaping, double *f,
                      int n); /* in place, by a name that there is; n > 1 */
/* Adds -Σ coef E of directions (seed, 0 … n - 1) to the adapter's gradient, counted as one. */
void es_add_gradient(struct trainer *t, int index, uint64_t seed, const double *coef, int n);

/* Pretraining of a small base from a recipe: see pretrain.c. */

struct pretrain_options {
    char *shape;
    int64_t vocab, tokenizer_items, steps, rows, warmup, seed, eval_every, eval_items, save_every;
    double lr, min_lr_ratio, beta2, weight_decay, max_grad_norm, working, debate, drill, system;
    struct strings mix;
};
extern const struct option_row pretrain_option_rows[];
/* What that would take, checked as it would be: {shape, parameters, updates, done, tokens, ...};
 * "parameters" is for the whole vocabulary. NULL: `err` says what is wrong. */
json_t *pretrain_plan(const struct pretrain_options *o, const char *dir, struct error *err);
/* Writes the finished model as a Hugging Face directory, with log.jsonl; continues from
 * DIR/checkpoint.bin if there. */
int pretrain_run(const struct pretrain_options *o, const char *dir, struct pool *pool,
                 struct error *err);

/*
 * synth: training data that the model writes itself — answers to prompts, filtered, each with the
 * call that made it.
 *
 * Four steps: prompts are read, synth_generate has k answers to each written in batches of an
 * engine, synth_filter decides which stay, synth_format_jsonl gives those as lines for `shoal
 * train`. The lines are a function of model, adapters, prompts and options: not of threads, batches
 * or the place in the file at which a prompt stands. One thread; everything is the caller's struct
 * synth.
 *
 * Filters are rows of one table in synth_filter.c, run in its order, each on what the one before it
 * left. They look at texts and at numbers that stand in the samples; only the judge runs a model.
 */

struct synth_options {
    char *template, *system; /* what topics become; system message of prompts without one */
    int64_t samples, n, top_k, seed;
    double temp, top_p, min_p;
    bool unfinished;
    int64_t min_chars, max_chars; /* 0: no bound */
    char *language;               /* "ja"; NULL: any */
    double language_share;
    struct strings require, forbid; /* regular expressions */
    char *json_schema;              /* a file */
    char *answer;                   /* what stands before the answer proper */
    double min_agreement;
    char *held_out;                        /* a file of samples */
    char *min_perplexity, *max_perplexity; /* "20", or "90%": a quantile */
};
extern const struct option_row synth_option_rows[];

/* prompts */

struct synth_prompt {
    json_t *messages; /* [{role, content}], the last one not the assistant's */
    int line;         /* of its file */
    struct token_ids tokens;
};
struct synth_prompts {
    struct synth_prompt *v;
    int n;
    size_t longest; /* tokens that one can have at most, before they are known */
};
/* JSON objects {prompt} or {messages}; other fields are let pass, and a conversation that ends with
 * the assistant's words is asked again without them: training files are prompts too. */
int synth_prompts_read(struct synth_prompts *p, const char *path, const struct synth_options *o,
                       struct error *err);
/* A topic a line, put in the template's place of {topic}. */
int synth_topics_read(struct synth_prompts *p, const char *path, const struct synth_options *o,
                      struct error *err);
void synth_prompts_release(struct synth_prompts *p);
/* Borrowed texts in an array of the caller's; `answer` (may be NULL) becomes the last message. */
struct chat_message *synth_messages(const struct synth_prompt *p, const char *answer, int *n);

/* samples */

enum {
    SYNTH_KEPT = -1,
    SYNTH_MAX_FILTERS = 16,   /* rows of the table at most */
    SYNTH_MAX_SAMPLES = 4096, /* answers to a prompt at most */
    SYNTH_BATCH_SIZE = 1024,  /* calls that are in memory as requests */
};
struct synth_sample {
    int prompt, index; /* answer `index` to prompt `prompt` */
    uint64_t seed;
    char call[HASH_LEN];  /* identity of the call that wrote it */
    struct buf text;      /* any bytes */
    struct token_ids out; /* its tokens */
    enum finish_reason finish;
    double logprob;    /* mean of its tokens' under what wrote it */
    double agreement;  /* share of the prompt's answers that give the same answer */
    double perplexity; /* under the judge; 0: not known */
    int filter;        /* that dropped it, or SYNTH_KEPT */
};
struct synth_filter_stats {
    bool on;
    int dropped, first; /* the first of them: a sample, and what the filter says of it */
    char why[160];
};
struct synth {
    const struct synth_options *o;
    struct synth_prompts prompts;
    struct model *model;
    struct adapter *adapter, *judge; /* NULL: the base */
    struct engine *engine;           /* may be NULL where nothing is generated or judged */
    enum dtype kv, lora;             /* of the engine */
    int32_t max_len;                 /* tokens of a sequence; synth_tokenize_prompts's */
    struct store *calls;             /* recorded ones are read instead of made again; or NULL */
    int n_reused;

    struct synth_sample *v; /* [n], those of a prompt together */
    int n;
    struct synth_filter_stats tally[SYNTH_MAX_FILTERS];
};
/* Prompts as tokens, and max_len. */
int synth_tokenize_prompts(struct synth *s, struct error *err);
int synth_generate(struct synth *s, struct error *err);
/* Perplexities that are not known of samples that are still kept. */
int synth_score_perplexity(struct synth *s, struct error *err);
/* One JSON line for each kept sample: {messages, source}. */
int synth_format_jsonl(const struct synth *s, struct buf *out, struct error *err);
void synth_release(struct synth *s); /* prompts and samples */

/* filters */

struct synth_filter_set; /* the options, made ready; refuses wrong ones */
/* `tok` is for the held-out data; may be NULL without. */
struct synth_filter_set *synth_filter_set_new(const struct synth_options *o,
                                              const struct tokenizer *tok, struct error *err);
void synth_filter_set_free(struct synth_filter_set *r);
int synth_filter(struct synth *s, struct synth_filter_set *r, struct error *err);
int synth_count_kept(const struct synth *s);
const char *synth_filter_name(int filter); /* NULL beyond the last */
/* What was dropped by which filter, with the first example of each. */
void synth_report_text(const struct synth *s, struct buf *out);
json_t *synth_report_json(const struct synth *s);

/* An answer as it is compared: what stands behind the last `marker` up to the line's end (without
 * one: all of it), folded, without a full stop at its end. */
void synth_extract_answer(const char *text, const char *marker, struct buf *out);

/*
 * gate: is a trained adapter better than what it would replace? A paired test on samples that
 * training did not see decides, and another keeps what must not be lost.
 *
 * Both compare, sample by sample, the mean negative log-likelihood of the targets before and after
 * (nats a token), as the serving forward pass computes it. gate_compare and gate_decide are pure.
 */

/* nll[i]: mean over the targets of sample i, under an adapter (ready; NULL: the bare base). */
int gate_eval_nll(const struct model *m, const struct adapter *a, const struct dataset *d,
                  struct pool *pool, double *nll, struct error *err);

struct gate_comparison {
    int64_t n; /* 0: nothing was measured */
    double before, after;
    struct stats_interval gain; /* of before - after, 95 % t interval */
    double p;                   /* two-sided, sign flips */
};
struct gate_comparison gate_compare(const double *before, const double *after, int64_t n);

struct gate {
    struct gate_comparison eval, retain;
    bool publish;
    char why[256]; /* one line, for people */
};
/* Publishes when the gain is above 0 with p <= alpha, and, where retention was measured, a loss
 * of more than `tolerance` nats a token is excluded by its interval. Sets publish and why. */
void gate_decide(struct gate *g, double alpha, double tolerance);
json_t *gate_json(const struct gate *g);

/*
 * log: what a training run leaves for people and programs — DIR/train.jsonl with a line an update,
 * the same lines as metrics of a run in the store, and DIR/report.html with curves.
 *
 * A log watches a run (train_log_callbacks). Each update is in it once and in order, also when the
 * run was killed and continued: lines of updates that the checkpoint had not seen are cut. The page
 * is rewritten before every checkpoint; the caller adds sections and writes it once more at the
 * end. One thread.
 */

/* {step, loss, lr, grad_norm, tokens, targets, tokens_per_s, seconds, rss, peak, losses} and what
 * the method adds; a number that is not finite is null. */
json_t *train_event_json(const struct train_event *e);
/* Writes the events as lines, each through to the system. */
struct train_callbacks train_jsonl_callbacks(FILE *f);

struct train_log;
/* DIR exists; store may be NULL and, like the texts, is used until the end. */
struct train_log *train_log_open(const char *dir, const char *title, struct store *store,
                                 const char *run);
void train_log_free(struct train_log *l); /* NULL is fine */
struct train_callbacks train_log_callbacks(struct train_log *l);
/* A table of the page (see html_table); `value` is taken over. The same heading again replaces. */
void train_log_section(struct train_log *l, const char *heading, json_t *value);
int train_log_report(struct train_log *l, struct error *err);
/* A table's options as an object, in its order. */
json_t *options_json(const struct option_row *rows, const void *options);

#endif
