/*
 * train: the backward pass and what stands on it — LoRA fine-tuning of many adapters in one base
 * pass, and full-parameter pretraining.
 *
 * A trainer is a step function over explicit state: trainer_accumulate adds the gradients of a
 * packed batch (samples lie end to end, attention is block-diagonal), trainer_update applies AdamW.
 * State can be saved and loaded at every update, to the same bits; results do not depend on
 * threads. Every adapter's gradient is the mean over its own target tokens, so training three
 * together gives the bits of training each alone on its own samples. All arithmetic is f32, exact
 * class.
 */
#ifndef SHOAL_TRAIN_H
#define SHOAL_TRAIN_H

#include "adapter/adapter.h"
#include "eval/eval.h"

struct sample {
    int32_t *tokens;
    uint8_t *mask; /* 1: this token is a target (predicted from those before it) */
    int32_t n;
    int32_t adapter; /* index into the trainer's adapters; ignored in full training */
};
void sample_release(struct sample *s);

enum schedule { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT };
struct train_options {   /* filled from option rows; names as in PEFT/TRL */
    int64_t r;           /* 32 */
    double lora_alpha;   /* 0: 2·r */
    double lora_dropout; /* 0.05 */
    char *target;        /* "q_proj,k_proj,…": all seven */
    double epochs;       /* 1 */
    int64_t max_steps;   /* 0: by epochs */
    double lr;           /* 2e-4 */
    int64_t bsz;         /* 1 sample an adapter a micro-batch */
    int64_t grad_accum;  /* 16 */
    char *lr_scheduler;  /* cosine */
    double warmup_ratio; /* 0.03 */
    double min_lr_ratio; /* 0 */
    double beta1, beta2, eps, weight_decay, max_grad_norm; /* 0.9 0.999 1e-8 0 1.0 */
    int64_t max_length; /* 0: the model's; longer samples are cut, counted and said */
    int64_t seed;       /* 0 */
    int64_t save_steps; /* 200 */
};
extern const struct option_row train_option_rows[];
/* Rank, alpha, dropout and targets of a fresh adapter. */
int train_adapter_config(const struct train_options *o, struct adapter_config *out,
                         struct error *err);
float schedule_lr(enum schedule s, double lr, double min_ratio, int64_t step, int64_t warmup,
                  int64_t total);

struct trainer;
/* LoRA: the adapters' copies are trained, the base is frozen (f32 copies of its weights are made
 * for the two passes). */
struct trainer *trainer_new_lora(const struct model *m, struct adapter *const *adapters, int n,
                                 const struct train_options *o, struct pool *pool,
                                 struct error *err);
/* Full: trains the weights of a model made by model_new, in place. */
struct trainer *trainer_new_full(struct model *m, const struct train_options *o, struct pool *pool,
                                 struct error *err);
void trainer_free(struct trainer *t);
/* Forward and backward of one micro-batch; losses and target counts add up until the update.
 * Returns ERR_NUMERIC with the layer's name when a NaN or Inf appears. */
int trainer_accumulate(struct trainer *t, const struct sample *samples, int n, struct error *err);
struct update_stats {
    double loss;      /* mean over all targets since the last update */
    double grad_norm; /* before clipping; the largest over adapters */
    int64_t tokens, targets;
};
/* Clips (per adapter), AdamW at learning rate `lr`, clears gradients. */
int trainer_update(struct trainer *t, float lr, struct update_stats *out, struct error *err);
int64_t trainer_updates(const struct trainer *t);
double trainer_adapter_loss(const struct trainer *t, int i); /* of the last update */
/* Forward only: summed negative log-likelihood of the targets, and their count. For held-out loss
 * and tests. */
int trainer_loss(struct trainer *t, const struct sample *samples, int n, double *nll,
                 int64_t *targets, struct error *err);
struct adapter *trainer_adapter(const struct trainer *t, int i, json_t *lineage); /* a snapshot */
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

/* data */

struct dataset {
    struct sample *v;
    int n;
    int64_t tokens, targets,
        cut; /* cut: samples shortened to max_length, or dropped where no target was left */
    char hash[HASH_LEN]; /* of the file */
};
/* {messages}, {prompt, completion} or {text}; lines, concatenated objects or an array. Errors name
 * file, line, field. Targets are the assistant's own words only (all of it for {text}). */
int dataset_load(struct dataset *d, const char *path, const struct tokenizer *tok,
                 int32_t max_length, struct error *err);
void dataset_release(struct dataset *d);

/* runs */

/* Fine-tunes n adapters together, one dataset each, from the same options; checkpoints to
 * `checkpoint` (a file path; may be NULL) every save_steps and continues from it when it exists.
 * `log` (may be NULL) receives a JSON line an update. */
struct sft_job {
    const char *name, *data;
    struct adapter *start;  /* NULL: a fresh one, seeded by hash of name and the seed */
    struct adapter *result; /* set on success; the caller releases */
    double first_loss, last_loss;
};
int sft_run(const struct model *m, struct sft_job *jobs, int n, const struct train_options *o,
            struct pool *pool, const char *checkpoint, FILE *log, struct error *err);

/* What an update did, for who watches the run. */
struct sft_event {
    int64_t step, steps;              /* updates done, of */
    double lr, seconds, tokens_per_s; /* seconds since the run began or continued */
    const struct update_stats *stats;
    const struct sft_job *jobs; /* last_loss is of this update */
    int n;
    bool due; /* a checkpoint follows: what the watcher keeps should be safe first */
};
/* An error of either ends the run. */
struct sft_watch {
    /* Before the first update: how many are behind, of a run that is continued, and {steps, data:
     * [{name, file, sha256, samples, tokens, targets, cut, start}]}. */
    int (*begin)(void *ctx, int64_t done, const json_t *about, struct error *err);
    int (*update)(void *ctx, const struct sft_event *e, struct error *err);
    void *ctx;
};
/* The same with a watcher in place of the log. */
int sft_run_watched(const struct model *m, struct sft_job *jobs, int n,
                    const struct train_options *o, struct pool *pool, const char *checkpoint,
                    const struct sft_watch *watch, struct error *err);

#endif
