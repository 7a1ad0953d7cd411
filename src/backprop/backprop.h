/*
 * backprop: the trainable model: forward and backward pass, optimizers, checkpoints, and gradient
 * estimates without a backward pass (es).
 *
 * A trainer is a step function over explicit state: trainer_accumulate adds the gradients of a
 * packed batch (samples are end to end, attention is block-diagonal), trainer_update applies the
 * optimizer. The state can be saved and loaded between updates; a resumed run has the same bits,
 * and results do not depend on the number of threads. The gradient of each adapter is the mean over
 * its own target tokens, so three adapters that train together get the bits of three separate
 * trainings. The forward pass has the engine's bits. Only one thread may call a trainer; its pool
 * runs the work.
 */
#ifndef SHOAL_BACKPROP_H
#define SHOAL_BACKPROP_H

#include "data/data.h"

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
    bool f32_backward; /* gradients in f32, not in int8 blocks or bf16 tiles */
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
/* Sets `out` to the checked configuration of a new adapter: rank, alpha, dropout, targets and
 * layers. out->modules is malloc'ed; the caller frees it, on errors too. */
int train_adapter_config(const struct train_options *o, const struct model_config *shape,
                         struct adapter_config *out, struct error *err);
float lr_schedule_at(enum lr_schedule s, double lr, double min_ratio, int64_t step, int64_t warmup,
                     int64_t total);

struct trainer;
/* LoRA: trains copies of the adapters over one frozen base, of any weight type and architecture. */
struct trainer *trainer_new_lora(const struct model *m, struct adapter *const *adapters, int n,
                                 const struct train_options *o, struct pool *pool,
                                 struct error *err);
/* Full: trains the weights of a model made by model_new_random, in place. */
struct trainer *trainer_new_full(struct model *m, const struct train_options *o, struct pool *pool,
                                 struct error *err);
void trainer_free(struct trainer *t);
/* Bytes of the trainer, without the model, for passes of `rows` rows (0: without the memory of
 * passes) and samples of at most `longest` tokens. */
size_t trainer_bytes(const struct trainer *t, int64_t rows, int64_t longest);
/* Forward and backward of one micro-batch; losses and target counts are summed until the update.
 * Returns ERR_NUMERIC with the layer's name if a NaN or Inf appears. */
int trainer_accumulate(struct trainer *t, const struct train_sample *samples, int n,
                       struct error *err);
/*
 * A loss that is a function of the targets' log-probabilities, such as preference losses and policy
 * gradients. `fn` receives every sample of a pass with the log-probabilities of its targets. It
 * sets the derivative of the loss by each of them, the loss, and the sample's part of the count by
 * which the update divides the adapter's gradient. Such a loss needs a second forward pass of the
 * head.
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
    /* For a policy over n_choices actions: every target is one of these tokens, and logp has the
     * log-probabilities of all choices, normalised over the choices. NULL: logp has those of the
     * targets, over the whole vocabulary. */
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
/* Forward pass only: the summed negative log-likelihood of the targets, and their number. For
 * held-out loss and tests. */
int trainer_eval_loss(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      int64_t *targets, struct error *err);
/* The same for each sample: nll [n], targets [n]; and (trainer_token_nll) for each target, sample
 * after sample. */
int trainer_sample_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                       int32_t *targets, struct error *err);
int trainer_token_nll(struct trainer *t, const struct train_sample *samples, int n, double *nll,
                      struct error *err);
struct adapter *trainer_export_adapter(const struct trainer *t, int i,
                                       json_t *lineage); /* a snapshot */
/* Functions with which several adapters of the same layout use one slot of a trainer in turn: they
 * read and replace the slot's parameters and optimizer state. moments NULL: a new optimizer state.
 */
const float *trainer_adapter_params(const struct trainer *t,
                                    int i); /* [adapter_param_count], in the adapter's layout */
size_t trainer_optimizer_state_bytes(const struct trainer *t, int i);
void trainer_optimizer_state(const struct trainer *t, int i, uint8_t *out);
void trainer_import_adapter(struct trainer *t, int i, struct adapter *a, const uint8_t *moments,
                            int64_t updates);
/* Frees the memory of passes; the next pass allocates it again. */
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
/* Saves the complete state of training between two updates, in one file with a checksum, which is
 * written atomically. */
int trainer_save(const struct trainer *t, const char *path, const json_t *extra, struct error *err);
int trainer_load(struct trainer *t, const char *path, json_t **extra, struct error *err);

/* snapshot: a copy of the parameters and optimizer state of a trainer's adapters, with which the
 * updates of single adapters can be undone. It does not include accumulated gradients. */
struct trainer_snapshot;
struct trainer_snapshot *trainer_snapshot_new(const struct trainer *t); /* empty */
size_t trainer_snapshot_bytes(const struct trainer_snapshot *s);
void trainer_snapshot_save(struct trainer_snapshot *s, const struct trainer *t, int i);
void trainer_snapshot_restore(const struct trainer_snapshot *s, struct trainer *t, int i);
void trainer_snapshot_free(struct trainer_snapshot *s);

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
 * Only one thread may call it. Its results depend only on the samples, the adapter, the options,
 * the trainer's seed and the adapter's count of updates.
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
/* Adds the estimate for adapter `index` of a LoRA trainer; all members are evaluated on the same
 * samples. The reported loss is the mean over members. Calls between two updates use the same
 * directions. */
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

#endif
