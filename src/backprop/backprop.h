/*
 * backprop: the trainable model: forward and backward pass, optimizers, checkpoints, and gradient
 * estimates without a backward pass (es).
 *
 * A trainer holds the parameters, gradients and optimizer state. trainer_accumulate adds the
 * gradients of a packed batch (samples are end to end, attention is block-diagonal); trainer_update
 * applies the optimizer. The state can be saved and loaded between updates, and a resumed run has
 * the bits of an uninterrupted one. Results do not depend on the number of threads. The gradient of
 * each adapter is the mean over its own target tokens, so three adapters that train together get
 * the bits of three separate trainings. The forward pass has the bits of an engine with the same
 * type of keys and values (kv_cache_dtype). An activated
 * adapter changes the rows from train_sample_activation on, and only they have a gradient; a sample
 * without its invocation is refused (ERR_MISMATCH). Only one thread at a time may use a trainer;
 * its pool runs the work.
 */
#ifndef SHOAL_BACKPROP_H
#define SHOAL_BACKPROP_H

#include "data/data.h"

enum lr_schedule { LR_COSINE, LR_LINEAR, LR_CONSTANT };
/* Filled from train_option_rows; the comments are the defaults. Names as in PEFT and TRL. epochs,
 * lr, bsz and grad_accum are 0 until train/defaults.c has set them. */
struct train_options {
    int64_t r;           /* 32 */
    double lora_alpha;   /* 0: 2·r */
    double lora_dropout; /* 0.05 */
    double epochs;       /* 0: by the data */
    int64_t max_steps;   /* 0: from epochs */
    double lr;           /* 0: by the model */
    int64_t bsz;         /* 0: by the data; samples per adapter and micro-batch */
    int64_t grad_accum;  /* 0: by the data */
    char *lr_scheduler;  /* cosine */
    double warmup_ratio; /* 0.03 */
    double min_lr_ratio; /* 0 */
    double beta1, beta2, eps, weight_decay, max_grad_norm; /* 0.9 0.999 1e-8 0 1.0 */
    int64_t max_length;    /* 0: the model's length; longer samples are cut, counted and reported */
    int64_t seed;          /* 0 */
    int64_t save_steps;    /* 200 */
    struct strings target; /* all-linear; each string is a name or a list "q_proj,k_proj" */
    /* none; embed_tokens and lm_head */
    struct strings modules_to_save;
    struct strings trainable_token_indices; /* none; see adapter_token_indices_parse */
    struct strings layers; /* all; each string is a number "4", a range "4-7" or a list of these */
    bool use_rslora, use_dora, gradient_checkpointing;
    bool f32_backward; /* gradients in f32, not in int8 blocks or bf16 tiles */
    /* auto; NULL: f32. Keys and values of the forward pass are rounded to it */
    char *kv_cache_dtype;
    char *optim; /* adamw; see optim_parse */
    /* auto; see activation_memory_parse and trainer_activation_memory */
    char *activation_memory;
    double momentum; /* 0.9, for sgd */
};
extern const struct option_row train_option_rows[];
enum optim {
    OPTIM_ADAMW,
    OPTIM_ADAMW_8BIT,
    OPTIM_SGD,
    OPTIM_SGD_NO_MOMENTUM /* sgd with momentum 0 */
};
/* Return OK, or ERR_USAGE for an unknown name. "sgd" gives OPTIM_SGD. */
int optim_parse(const char *name, enum optim *out, struct error *err);
int lr_schedule_parse(const char *name, enum lr_schedule *out, struct error *err);
/* Sets *out to the type of the option kv_cache_dtype, for the trainer and for the engines of its
 * run. A run keeps the type that it began with: if the option is auto and the file `checkpoint`
 * (NULL: none) exists, the type is that of the checkpoint; those of version 0.1 have f32. */
int train_kv_dtype_parse(const struct train_options *o, enum numeric_class cls,
                         const char *checkpoint, enum dtype *out, struct error *err);
/* "auto" or NULL gives 0, "all" SIZE_MAX; else ERR_USAGE or the size. */
int activation_memory_parse(const char *text, size_t *out, struct error *err);
/* Sets `out` to the checked configuration of a new adapter: rank, alpha, dropout, targets, layers,
 * changes of embedding and head. The caller calls adapter_config_release, after an error too. */
int train_adapter_config(const struct train_options *o, const struct model_config *shape,
                         struct adapter_config *out, struct error *err);
/* ERR_USAGE if the options describe an adapter that is not plain (adapter.h), which `operation`
 * ("method es") needs. */
int train_options_require_plain(const struct train_options *o, const char *operation,
                                struct error *err);
/* The learning rate of update `step` (from 0) of `total`: it rises linearly to lr during `warmup`
 * updates, then follows the schedule down to lr · min_ratio (LR_CONSTANT: stays lr). */
float lr_schedule_at(enum lr_schedule s, double lr, double min_ratio, int64_t step, int64_t warmup,
                     int64_t total);

struct trainer;
/* LoRA: trains copies of the n adapters' parameters over one frozen base model, of any weight type
 * and architecture. Parameters are everything in adapter.data: also replacement tables and rows of
 * embedding and head. If embedding and head are tied, rows of the embedding are rows of both, and
 * tables are separate, as in PEFT. The model and the pool must outlive the trainer. Returns NULL on
 * an error. */
struct trainer *trainer_new_lora(const struct model *m, struct adapter *const *adapters, int n,
                                 const struct train_options *o, struct pool *pool,
                                 struct error *err);
/* Full training: changes the weights of m in place. They must be f32 in memory, as model_new_random
 * makes them; else ERR_STATE. */
struct trainer *trainer_new_full(struct model *m, const struct train_options *o, struct pool *pool,
                                 struct error *err);
void trainer_free(struct trainer *t);
/* Bytes of the trainer, without the model, for passes of `rows` rows and samples of at most
 * `longest` tokens. With rows 0 the memory of passes is not counted. */
size_t trainer_bytes(const struct trainer *t, int64_t rows, int64_t longest);
/* The passes into which calls are divided. Results do not depend on them. */
struct trainer_passes {
    int64_t rows;       /* most tokens of a pass, unless one sample or call of a loss has more */
    bool checkpointing; /* gradient checkpointing */
    size_t bytes;       /* memory of a pass */
};
/* Tokens that a training packs into a pass if memory is sufficient. */
#define PACK_MAX_TOKENS 2048
/* Bounds the memory of passes to `bytes`: chooses the largest passes that fit, of at most `rows`
 * tokens, and gradient checkpointing if only small ones would fit without it. Samples have at most
 * `longest` tokens, and `together` tokens must be in one pass; in full training, all `rows` of a
 * call. False: `bytes` are too few, and *out has the smallest passes. */
bool trainer_limit_passes(struct trainer *t, size_t bytes, int64_t rows, int64_t together,
                          int64_t longest, struct trainer_passes *out);
/* The `bytes` of trainer_limit_passes that checked options name: "auto" is a third of the weights,
 * at least 256 MB, so that large models need little more memory than their weights, and small ones
 * keep all activations. With gradient_checkpointing, "auto" is one pass of PACK_MAX_TOKENS tokens
 * of which only the inputs of layers are kept. */
size_t trainer_activation_memory(const struct trainer *t, const struct train_options *o,
                                 int64_t longest);
/* An upper bound of the memory of a trainer with passes of at most `rows` tokens, or with those that
 * fit into `bytes` with it, before model and trainer exist: of LoRA with n adapters of
 * configuration `a`, for samples of at most `longest` tokens. out->bytes is that of all; if it is
 * more than `bytes`, the passes are the smallest. */
void trainer_passes_bound(const struct model_config *c, enum numeric_class cls,
                          const struct adapter_config *a, int n, const struct train_options *o,
                          struct pool *pool, size_t bytes, int64_t rows, int64_t longest,
                          struct trainer_passes *out);
/* An upper bound of the memory of a trainer with the smallest passes, for samples of at most
 * `longest` tokens, before model and trainer exist: of LoRA with n adapters of configuration `a`,
 * or with a = NULL of full training with calls of at most n tokens. */
size_t trainer_least_bytes(const struct model_config *c, enum numeric_class cls,
                           const struct adapter_config *a, int n, const struct train_options *o,
                           struct pool *pool, int64_t longest);
/* The same with the passes of trainer_activation_memory, for a model with `weights` bytes. */
size_t trainer_most_bytes(const struct model_config *c, enum numeric_class cls,
                          const struct adapter_config *a, int n, const struct train_options *o,
                          struct pool *pool, int64_t longest, size_t weights);
/* Forward and backward pass of one micro-batch. Losses and target counts are summed until the
 * update. If a NaN or Inf appears, returns ERR_NUMERIC with the name of the layer or the head.
 * ERR_STATE: it was cancelled (log_check_cancelled) between two layers. */
int trainer_accumulate(struct trainer *t, const struct train_sample *samples, int n,
                       struct error *err);
/*
 * A loss that is a function of the targets' log-probabilities, such as preference losses and policy
 * gradients. trainer_accumulate_loss runs all its samples in one pass and calls `fn` once, with the
 * samples that have a target. For each sample, `fn` sets the derivative of the loss by each
 * log-probability, the loss, and the sample's part of the count by which the update divides the
 * adapter's gradient. Such a loss needs a second forward pass of the head.
 */
struct loss_sample {
    const struct train_sample *sample;
    const double *logp; /* [n] of the targets, in order; for a loss over choices [n][n_choices] */
    float *weight;      /* same shape, set by fn: d loss / d logp */
    int32_t n;          /* number of targets */
    double loss, count; /* set by fn */
};
struct loss_fn {
    int (*fn)(void *ctx, struct loss_sample *samples, int n, struct error *err);
    void *ctx;
    float temperature; /* divisor of the logits before the softmax; 0: 1 */
    /* A loss over choices, for a policy over n_choices actions: every target must be one of these
     * tokens, and logp has the log-probabilities of all choices, normalised over the choices. NULL:
     * logp has the log-probabilities of the targets, normalised over the vocabulary. Adapters that
     * change the embedding or the head have no losses over choices (ERR_MISMATCH). */
    const int32_t *choices;
    int32_t n_choices;
};
int trainer_accumulate_loss(struct trainer *t, const struct train_sample *samples, int n,
                            const struct loss_fn *loss, struct error *err);
struct update_stats {
    double loss;      /* sum of losses / sum of counts since the last update: mean over targets */
    double grad_norm; /* before clipping; the largest over adapters */
    int64_t tokens, targets;
};
/* Clips the gradient of each adapter, applies the optimizer with learning rate `lr`, and clears the
 * gradients. ERR_STATE without a target since the last update; ERR_NUMERIC if a gradient's norm is
 * not finite. After an error the parameters are unchanged. `out` may be NULL. */
int trainer_update(struct trainer *t, float lr, struct update_stats *out, struct error *err);
/* `fn` is called after each layer of a pass, by the thread that uses the trainer, with the number of
 * tokens since the last update that are computed; NULL: no call. */
void trainer_on_progress(struct trainer *t, void (*fn)(void *ctx, int64_t tokens), void *ctx);
/* Discards the gradients that were added since the last update. */
void trainer_zero_grad(struct trainer *t);
int64_t trainer_update_count(const struct trainer *t);
double trainer_adapter_loss(const struct trainer *t, int i); /* mean loss of the last update */
/* Forward pass only, without dropout: sets *nll to the summed negative log-likelihood of the
 * targets, and *targets to their number. */
int trainer_eval_loss(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      int64_t *targets, struct error *err);
/* trainer_sample_nll: the same for each sample, nll [n] and targets [n]. trainer_token_nll: the
 * negative log-likelihood of each target, sample after sample. */
int trainer_sample_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                       int32_t *targets, struct error *err);
int trainer_token_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      struct error *err);
/* Returns a new adapter with a copy of adapter i's current parameters. `lineage` is borrowed. */
struct adapter *trainer_export_adapter(const struct trainer *t, int i, json_t *lineage);
/* With these functions several adapters of the same layout use adapter i of a trainer in turn: they
 * read and replace its parameters and optimizer state. */
/* Borrowed: [adapter_param_count], in the order of adapter.data. */
const float *trainer_adapter_params(const struct trainer *t, int i);
size_t trainer_optimizer_state_bytes(const struct trainer *t, int i);
/* Copies the optimizer state to `out`, trainer_optimizer_state_bytes bytes. */
void trainer_optimizer_state(const struct trainer *t, int i, uint8_t *out);
/* Replaces adapter i by `a` (retained): copies its parameters, and sets the optimizer state to
 * `moments` and the adapter's count of updates to `updates`. If `moments` is NULL, the optimizer
 * state is new and the count is 0. `a` must not have DoRA. */
void trainer_import_adapter(struct trainer *t, int i, struct adapter *a, const uint8_t *moments,
                            int64_t updates);
/* Frees the memory of passes; the next pass allocates it again. */
void trainer_free_activations(struct trainer *t);
/* Parameters and their gradients as flat arrays: trainer_tensor returns tensor i of
 * trainer_n_tensors. */
struct train_tensor {
    const char *name;
    float *w, *g;
    int64_t n;
    bool decay; /* weight decay: not for norms, biases, token and position tables, nor for an
                   adapter's tables and rows */
};
int trainer_n_tensors(const struct trainer *t);
struct train_tensor *trainer_tensor(struct trainer *t, int i);
/* Saves the complete state of training in one file with a checksum, written atomically. ERR_STATE
 * if there are samples since the last update. `extra` (may be NULL) is the caller's data. */
int trainer_save(const struct trainer *t, const char *path, const json_t *extra, struct error *err);
/* Loads such a file. ERR_MISMATCH if it belongs to other tensors, another base or other options.
 * After an error the trainer is unchanged. *extra becomes the saved `extra`, a new reference;
 * `extra` may be NULL. */
int trainer_load(struct trainer *t, const char *path, json_t **extra, struct error *err);

/* snapshot: a copy of the parameters and optimizer state of a trainer's adapters, with which the
 * updates of single adapters can be undone. It does not include accumulated gradients.
 * trainer_snapshot_save copies adapter i; trainer_snapshot_restore needs an earlier save of i. */
struct trainer_snapshot;
struct trainer_snapshot *trainer_snapshot_new(const struct trainer *t); /* nothing is saved yet */
size_t trainer_snapshot_bytes(const struct trainer_snapshot *s);
void trainer_snapshot_save(struct trainer_snapshot *s, const struct trainer *t, int i);
void trainer_snapshot_restore(const struct trainer_snapshot *s, struct trainer *t, int i);
void trainer_snapshot_free(struct trainer_snapshot *s);

/*
 * es: estimates an adapter's gradient from forward passes alone (evolution strategies), for a
 * trainer that then updates as usual.
 *
 * A population of N members, N/2 antithetic pairs, is evaluated on the same samples. A member
 * differs from the adapter by a map of rank 2, which is generated from the seed and the number of
 * its pair. The estimate
 *
 *     -1/(N σ) Σ_i f_i E_i       f_i fitness, shaped; E_i the member's direction in A and B
 *
 * is added to the trainer's gradient. For unshaped fitness it is an unbiased estimate of -∇f up to
 * O(σ²). It needs no derivative, so any base and any fitness function can be used.
 *
 * Only one thread at a time may use a struct es. The results depend only on the samples, the
 * adapter, the options, the trainer's seed and the adapter's count of updates.
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
/* The options must have passed es_options_check. Options, model and pool must outlive the result.
 */
struct es *es_new(const struct model *m, const struct es_options *o, struct pool *pool);
void es_free(struct es *e);
/* Adds the estimate for adapter `index` of a LoRA trainer over the model of es_new. The loss that
 * the trainer reports is the mean over members. Calls between two updates use the same directions.
 * Without a target in the samples it does nothing. ERR_MISMATCH for an adapter that is not plain.
 */
int es_accumulate(struct es *e, struct trainer *t, int index, const struct train_sample *samples,
                  int n, struct error *err);
/* Mean and standard deviation of the members' fitness in the last call, before shaping. */
double es_fitness_mean(const struct es *e);
double es_fitness_std(const struct es *e);
/* Peak memory in bytes, excluding the trainer. */
size_t es_bytes(const struct es *e);
/* An upper bound of es_bytes for adapters of configuration `a`, samples of at most `longest` tokens
 * and calls of at most `tokens`. pass_rows is the option that changes it and no result. */
size_t es_bytes_bound(const struct model_config *c, const struct es_options *o,
                      const struct adapter_config *a, int64_t longest, int64_t tokens);

/*
 * For callers that evaluate members themselves: a member is the current adapter `index` plus or
 * minus the map of rank 2 that es_perturbation generates from z. With shaped fitness f, a pair's
 * coefficient is (f₊ - f₋) / (N σ).
 */
struct adapter *es_perturbation(const struct trainer *t, int index,
                                const struct lora_perturbation *z, double sigma);
int es_fitness_shaping_check(const char *name, struct error *err);
void es_shape_fitness(const char *shaping, double *f,
                      int n); /* in place; `shaping` must be a known name, n > 1 */
/* Adds -Σ coef[i] E_i to the gradient of adapter `index`, with E_i the direction of {seed, i}, i in
 * [0, n), and adds 1 to the adapter's count. */
void es_add_gradient(struct trainer *t, int index, uint64_t seed, const double *coef, int n);

#endif
