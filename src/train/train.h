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
#include "eval/eval.h"

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
    char *optim;     /* adamw; see optim_parse */
    double momentum; /* 0.9, of sgd */
};
extern const struct option_row train_option_rows[];
enum optim { OPTIM_ADAMW, OPTIM_ADAMW_8BIT, OPTIM_SGD, OPTIM_SGD_NO_MOMENTUM /* without momentum */ };
int optim_parse(const char *name, enum optim *out, struct error *err);
int lr_schedule_parse(const char *name, enum lr_schedule *out, struct error *err);
/* Rank, alpha, dropout, targets and layers of a fresh adapter, checked. Its `modules` are malloc'ed:
 * the caller frees them, in every case. */
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
int trainer_accumulate(struct trainer *t, const struct train_sample *samples, int n, struct error *err);
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
struct adapter *trainer_export_adapter(const struct trainer *t, int i, json_t *lineage); /* a snapshot */
/* One slot of a trainer for several adapters of one layout in turn: its numbers, and what the
 * optimizer remembers of them, out and in. moments NULL: nothing yet. */
const float *trainer_adapter_params(const struct trainer *t, int i); /* [adapter_param_count] as in its data */
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
    int64_t cut, dropped;       /* shortened to max_length; those of them without a target left */
    struct sample_digest *facts; /* [n_read] */
    int n_read;
    char hash[HASH_LEN]; /* of the file */
};
/* {messages}, {prompt, completion} or {text}; lines, concatenated objects or an array. A turn of the
 * assistant with "weight": 0 is read and not learned. Errors name
 * file, line, field. Targets are the assistant's own words only (all of it for {text}). */
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
    int64_t tokens, targets;                      /* of what is kept */
    int32_t shortest, median, p95, longest;       /* tokens of all samples, before the cut */
    struct lint_matches exact, near;                /* samples that repeat an earlier one; `near` only
                                                     up to case, width and white space */
    struct lint_matches eval_samples, eval_prompts; /* evaluation samples that are in the data, whole
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
                    const struct train_options *o, const struct es_options *es, struct pool *pool,
                    const char *checkpoint, const struct train_callbacks *watch, struct error *err);

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
    struct train_sample *first;           /* [n_first] the first bsz samples of each adapter */
    int n_first;
};
/* Reads the data and computes one pass; writes nothing. Fills jobs[].lint. */
int sft_plan_make(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
                  const struct es_options *es, struct pool *pool, struct training_plan *out,
                  struct error *err);
void training_plan_release(struct training_plan *p);

#endif
