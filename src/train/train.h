/*
 * train: training runs: LoRA fine-tuning (SFT, ES), preferences (DPO), rewards (REINFORCE, RLOO,
 * GRPO) and full-parameter pretraining; the gate that compares a result with the version before it,
 * and the log of a run. Data is in data/, gradients and updates in backprop/.
 *
 * A run is a function of model, data and options: a kill and resume, or another number of threads,
 * changes no bit. One thread drives a run.
 */
#ifndef SHOAL_TRAIN_H
#define SHOAL_TRAIN_H

#include "backprop/backprop.h"
#include "data/data.h"
#include "eval/eval.h"
#include "store/store.h"

/* options */

/* Sets epochs, lr, bsz and grad_accum that are 0, for supervised fine-tuning on `n` samples (of the
 * largest dataset) and a model of d_model `width`; see defaults.c. */
void train_options_adapt(struct train_options *o, int64_t n, int32_t width);
/* Sets those that are 0 to 1, 2e-4, 1 and 16: the values of the other methods. */
void train_options_fix(struct train_options *o);

/* runs */

/* sft_run fine-tunes n adapters together, one dataset each, with the same options. It saves a
 * checkpoint to the file `checkpoint` (may be NULL) every save_steps and at the end, and resumes
 * from this file if it exists. `log` (may be NULL) receives a JSON line per update. */
struct train_job {
    const char *name, *data;
    const char *format;    /* form of the samples; NULL: by their keys */
    const char *eval_data; /* file of held-out samples, or NULL: lint reports the samples that
                              `data` contains too; training does not use the file */
    struct adapter *start; /* NULL: a new adapter, initialised from a hash of name and seed */
    const struct token_ids *invocation; /* without `start`: NULL, or that of an activated adapter */
    struct adapter *result;             /* set on success; the caller releases it */
    double first_loss, last_loss; /* of the first update and of the last, on their own samples */
    /* Set by a run; NAN: not a quantity of its method. Rewards: means over the completions of the
     * first and of the last step. dpo: share of the last step's pairs whose chosen answer has the
     * higher implicit reward. */
    double first_reward, last_reward, last_accuracy;
    struct lint lint; /* report on `data`; set before training begins */
    /* Whether sft and es set `samples` to some samples of the data, for train_effect_measure; the
     * caller releases them. */
    bool keep_samples;
    struct dataset samples;
    int32_t longest_measured; /* tokens of the longest sample that the gate measures */
    bool unmeasured; /* no result is used before the training's memory is freed: sft and es need
                        less memory */
};
int sft_run(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
            struct pool *pool, const char *checkpoint, FILE *log, struct error *err);
/* A configuration with the invocation of the job's adapter, borrowed from the job. */
struct adapter_config train_job_activation(const struct train_job *job);

/* The argument of `update`, which is called after each step. A step is one update or, with rewards,
 * num_iterations updates. */
struct train_event {
    int64_t step, steps;              /* steps done, total */
    double lr, seconds, tokens_per_s; /* seconds since the run began or continued */
    double joules;                    /* since then, see energy_now; NaN: not known */
    const struct update_stats *stats;
    const struct train_job *jobs; /* their last_loss is the loss of this step's last update */
    int n;
    bool checkpoint_due; /* if the run has a checkpoint file, it is saved after this callback, which
                            should save its own data first */
    const json_t *extra_metrics; /* metrics of the method, {…, adapters: {NAME: {…}}}, or NULL */
};
/* Versions of the adapters during the run: the adapters as they are after every `every`-th step
 * except the last, whose adapters are the results, and after the step at which a resumed run
 * continues. */
struct train_versions {
    int64_t every;
    /* `a` is bound to the model, and has a copy of the trained parameters and the lineage of a
     * result. An error ends the run. */
    int (*publish)(void *ctx, const struct train_job *job, int64_t step, struct adapter *a,
                   struct error *err);
    void *ctx;
};
/* An error that a callback returns ends the run. */
struct train_callbacks {
    /* Called before the first update. `done`: number of steps that a resumed run has completed.
     * `about`: {steps, data: [{name, file, sha256, start, lint}]}. */
    int (*begin)(void *ctx, int64_t done, const json_t *about, struct error *err);
    int (*update)(void *ctx, const struct train_event *e, struct error *err);
    void *ctx;
    const struct train_versions *versions; /* NULL: none */
};
/* Like sft_run, with callbacks instead of the log. `es`: NULL, or the options of gradient
 * estimates. */
int sft_run_with_callbacks(const struct model *m, struct train_job *jobs, int n,
                           const struct train_options *o, const struct es_options *es,
                           struct pool *pool, const char *checkpoint,
                           const struct train_callbacks *callbacks, struct error *err);

/* How a run uses its memory, in bytes. Results do not depend on it. */
struct train_memory {
    size_t limit;  /* of the process (engine.h); 0: none */
    size_t used;   /* model, data, trainer and program */
    size_t passes; /* activations; or, if it needs more, the measuring after the training */
    size_t engine; /* samples completions; 0: none */
    size_t other;  /* results, and memory of the method that cannot be less */
    struct trainer_passes pass;
};
/* One line without its end, and an object of the fields. */
void train_memory_text(const struct train_memory *m, struct buf *out);
json_t *train_memory_json(const struct train_memory *m);

/* Upper bounds of the memory in which sft_run trains n unmeasured adapters on samples of at most
 * `longest` tokens, without model, data and offloaded initial adapters: the smallest, and the one
 * that it uses if memory is sufficient. */
struct train_memory_bounds {
    size_t least, most;
};
int train_memory_bounds(const struct train_options *o, int n, const struct model_size *size,
                        enum numeric_class cls, int64_t longest, struct pool *pool,
                        struct train_memory_bounds *out, struct error *err);
/* Bytes of the longest sample of a file: of .jsonl the longest line, else of the whole file. */
size_t train_longest_sample(const char *path);

/* The work and resources of an sft_run. The samples of a pass are packed without padding. */
struct training_plan {
    int64_t updates, samples_per_update; /* samples_per_update: of each adapter */
    /* totals of the run over all adapters; with es, passes and tokens of all members */
    int64_t passes, samples, tokens;
    /* max_samples, max_rows: largest pass; longest: tokens of the longest sample */
    int64_t max_samples, max_rows, longest;
    size_t bytes; /* bytes of memory, without the model */
    struct train_memory memory;
    /* measured: the first pass, forward and backward; with es all members on a few samples */
    double pass_seconds;
    int64_t pass_tokens;            /* number of tokens in the measured passes */
    double update_seconds, seconds; /* an optimizer step, measured; the whole run, estimated */
    struct train_sample *first;     /* [n_first] the first bsz samples of each adapter */
    int n_first;
};
/* Reads the data, computes one pass, and writes no files. Fills jobs[].lint. */
int sft_plan_make(const struct model *m, struct train_job *jobs, int n,
                  const struct train_options *o, const struct es_options *es, struct pool *pool,
                  struct training_plan *out, struct error *err);
void training_plan_release(struct training_plan *p);

/*
 * rl: training from preferences (DPO) and from rewards (REINFORCE, RLOO, GRPO).
 *
 * With rewards, a run samples completions from the trainer's base weights and current adapters,
 * with the engine, and trains on these completions. The reference is the start adapter. One thread
 * drives a run. Adapters of several jobs share sampling and passes. A run is a function of model,
 * data, options and rewards: the number of threads, or a kill and resume, changes no bit. Dropout
 * is off, because with it the trained policy would differ from the sampled one.
 */

enum train_method { METHOD_SFT, METHOD_ES, METHOD_DPO, METHOD_REINFORCE, METHOD_RLOO, METHOD_GRPO };
int train_method_parse(const char *name, enum train_method *out, struct error *err);
const char *train_method_name(enum train_method method);

struct rl_options {          /* filled from option rows; the numbers are the defaults */
    double beta;             /* 0.1: DPO's strength of the KL constraint */
    int64_t num_generations; /* 8 completions per prompt, k */
    int64_t max_new_tokens;  /* 64 tokens of a completion */
    double temperature; /* 1: the policy is the softmax of the logits divided by the temperature */
    char *prefix;       /* NULL: none; given beginning of each completion, not sampled */
    int64_t num_iterations; /* 1 update per step, that is per sampling */
    double clip_range;      /* 0.2: bound on the ratio of new to old policy (PPO) */
    /* 0.02: weight of the KL in the loss; 0: no bound on the KL after an update */
    double kl_coef, kl_max;
    char *reward;                             /* exact */
    double reward_timeout;                    /* 60 seconds per step, for commands */
    bool reward_sandbox;                      /* true: commands run in a sandbox */
    bool reward_network;                      /* false; true: commands may use the network */
    struct strings reward_read, reward_write; // additional paths for commands
    struct engine_limits limits;              // engine that samples; set by the caller
};
extern const struct option_row rl_option_rows[];

/* rewards */

struct reward_input {
    const json_t *item; /* the whole JSON object of the prompt in the data */
    const char *text;
    bool ended; /* the completion ended with its end token, before max_new_tokens */
};
struct reward_fn {
    /* Reward of one completion. If score_one is NULL, score_batch is used. */
    double (*score_one)(void *ctx, const json_t *item, const char *completion);
    /* Rewards of all completions of a step. For both functions, a reward that is not finite ends
     * the run with an error. */
    int (*score_batch)(void *ctx, const struct reward_input *v, int n, double *out,
                       struct error *err);
    /* Checks, when data is read, whether an item has the fields that the reward needs. May be NULL.
     */
    int (*check)(void *ctx, const json_t *item, struct error *err);
    void *ctx;
};
/*
 * Rewards by name: the kinds of check/check.h that need no model: exact, regex[:PATTERN],
 * json-schema:FILE, calculator, tests[:PYTHON], sql:FILE, command:WORDS, shell:LINE. ERR_STATE or
 * ERR_MISSING: commands cannot run here.
 */
int reward_fn_open(struct reward_fn *r, const struct rl_options *o, struct error *err);
void reward_fn_close(struct reward_fn *r);

/* runs */

/* Like sft_run. `reward` NULL: the reward is p->reward. `method` must not be sft or es. */
int rl_run(const struct model *m, struct train_job *jobs, int n, const struct train_options *o,
           enum train_method method, const struct rl_options *p, const struct reward_fn *reward,
           struct pool *pool, const char *checkpoint, FILE *log, struct error *err);
int rl_run_with_callbacks(const struct model *m, struct train_job *jobs, int n,
                          const struct train_options *o, enum train_method method,
                          const struct rl_options *p, const struct reward_fn *reward,
                          struct pool *pool, const char *checkpoint,
                          const struct train_callbacks *callbacks, struct error *err);

/* The work and resources of an rl_run. For rewards, a plan samples and rewards the first
 * completions of the first step, about as many as the engine holds at once. The run begins with the
 * same completions. */
struct rl_plan {
    /* As for sft_run. Samples are the chosen and rejected answers (two per pair) or, for rewards,
     * the completions. `updates` is the number of steps. For rewards, tokens and passes are
     * estimates from the first completions; `longest`, `max_rows` and `bytes` are upper bounds.
     * `first`: of each adapter the chosen and the rejected answer of the first pair, or the first
     * completion. */
    struct training_plan run;
    struct pair_length_stats {
        struct length_stats prompt, chosen, rejected; /* answers: target tokens */
    } * pairs;                /* [n] dpo: the pairs that were not dropped; else NULL */
    double reference_seconds; /* dpo: the reference pass over all pairs, once per run */
    json_t *completions; /* rewards: metrics of the first completions by adapter, as in the log;
                            else NULL */
    int64_t sampled;     /* number of completions that the plan sampled */
    /* measured on these completions: sampling, rewards, log-probabilities under the reference */
    double sampling_seconds, reward_seconds, scoring_seconds;
    size_t engine_bytes; /* part of run.bytes */
};
int rl_plan_make(const struct model *m, struct train_job *jobs, int n,
                 const struct train_options *o, enum train_method method,
                 const struct rl_options *p, const struct reward_fn *reward, struct pool *pool,
                 struct rl_plan *out, struct error *err);
void rl_plan_release(struct rl_plan *p);

/* runs of any method */

struct train_request {
    struct model *m;
    struct pool *pool;
    struct train_job *jobs; /* [n] */
    int n;
    struct token_ids invocation; /* of the jobs; train_request_close releases it */
    enum train_method method;
    const struct train_options *train;
    const struct rl_options *policy;       /* used by dpo, reinforce, rloo and grpo */
    const struct es_options *es;           /* used by es */
    struct engine_limits limits;           /* engines that sample and measure */
    const struct train_versions *versions; /* NULL: none; used by train_and_publish */
};
int train_run(const struct train_request *q, const char *checkpoint,
              const struct train_callbacks *callbacks, struct error *err);
/* For sft and es, only out->run is filled. */
int train_plan_make(const struct train_request *q, struct rl_plan *out, struct error *err);
/* {plan, data: [{adapter, file, lint, …}], first_batch: [{parts, ids, mask, adapter}]} */
json_t *train_plan_json(const struct train_request *q, const struct rl_plan *plan);

/* losses, for trainer_accumulate_loss */

/*
 * DPO (Rafailov et al. 2023), -log σ(β ((log π(c) - log π_ref(c)) - (log π(r) - log π_ref(r)))), on
 * pairs: sample 2i of a pass is chosen, 2i + 1 rejected. The counts of the loss samples sum to the
 * number of pairs.
 */
struct dpo_stats {
    double margin, chosen; /* sums over pairs of β (log π - log π_ref): margin: chosen minus
                              rejected; chosen: of the chosen */
    double kl;        /* summed ½ (log π - log π_ref)² over tokens: the KL to second order */
    int64_t n, right; /* number of pairs; number of pairs with a positive margin */
    int64_t tokens;
};
struct dpo {
    double beta;
    const struct train_sample *batch; /* samples of the pass */
    const double *const
        *reference; /* for each sample, its [targets] log-probabilities under the reference */
    struct dpo_stats *sums; /* [adapters] dpo_loss adds to them */
};
int dpo_loss(void *ctx, struct loss_sample *v, int n, struct error *err);

/*
 * Policy gradient with a clipped ratio per token (PPO's surrogate): with ρ = π / π_old and
 * advantage A, -Σ min(ρ A, clip(ρ, 1 ± c) A) + kl_coef · k3, k3 = π_ref / π - 1 - log(π_ref / π).
 * If π_old is π, the gradient of the first term is that of -A log π. The loss of a completion is
 * the sum over its tokens or, with `token_mean` (GRPO), the mean. The counts of the loss samples
 * sum to the number of completions.
 */
struct rollout {
    double advantage;
    const float *reference; /* [targets] log-probabilities under the reference */
    double *old;            /* [targets] log-probabilities under the sampling policy */
    double count; /* number of completions that this one represents, because completions without
                     gradient are left out */
};
struct policy_loss_stats {
    double kl;               /* summed k3 */
    int64_t tokens, clipped; /* number of tokens; of tokens whose ratio is clipped */
};
struct policy_loss {
    const struct train_sample *batch; /* samples of the pass */
    const struct rollout *rollouts;   /* for each sample */
    double clip, kl_coef;
    bool token_mean;
    /* the current policy has sampled the completions: policy_loss fills `old` */
    bool is_first_update;
    struct policy_loss_stats *sums; /* [adapters] policy_loss adds to them */
};
int policy_loss(void *ctx, struct loss_sample *v, int n, struct error *err);
/* k3 of one token from its log-probabilities; at least 0. */
double kl_k3(double logp, double reference);

/* Advantages from rewards [n][k] of n prompts. REINFORCE: reward minus `baseline`; RLOO: minus the
 * mean of the prompt's other k - 1; GRPO: minus the prompt's mean, divided by the prompt's standard
 * deviation (0 if that is 0). */
void policy_advantages(enum train_method method, const double *rewards, int64_t n, int64_t k,
                       double baseline, double *out);

/* Pretraining of a small base model from a recipe (pretrain.c). */

struct pretrain_options { /* meanings and defaults: pretrain_option_rows */
    char *shape, *chat_template, *dtype, *kv_cache_dtype, *max_memory;
    int64_t vocab, tokenizer_items, steps, rows, warmup_steps, seed, eval_every, eval_items,
        save_every, final_mix_from;
    double lr, min_lr_ratio, beta2, weight_decay, max_grad_norm, chain_of_thought, think,
        multi_turn, debate, drill, system, final_chain_of_thought;
    struct strings mix, final_mix, special_tokens;
    int64_t prose;
    bool conclusions;
    struct engine_limits limits; /* engine of accuracy lines; set by the caller */
};
extern const struct option_row pretrain_option_rows[];
/* The plan of pretrain_run, with the same checks of mix and shape: {shape, parameters, updates,
 * "tokens, about", …}. "parameters" assumes that the tokenizer gets o->vocab tokens. NULL: `err` is
 * set. */
json_t *pretrain_plan(const struct pretrain_options *o, const char *dir, enum numeric_class cls,
                      struct pool *pool, struct error *err);
/* Trains, and writes the model to the folder `dir` in Hugging Face's format, with log.jsonl.
 * Continues from checkpoint.bin in this folder if it exists. stop_at: 0, or the update after which
 * it saves a checkpoint, writes the model as it is, and returns. tensorboard: the figures of
 * log.jsonl are also written as event files. */
int pretrain_run(const struct pretrain_options *o, const char *dir, int64_t stop_at,
                 bool tensorboard, enum numeric_class cls, struct pool *pool, struct error *err);

/*
 * gate: decides whether a trained adapter is better than the version before it, by a paired test on
 * samples that training did not use. A second test checks that the samples to retain did not become
 * worse.
 *
 * Both tests compare, sample by sample, the mean negative log-likelihood of the targets (nats per
 * token) under the adapters before and after. It is computed by the forward pass that serving uses.
 * gate_compare and gate_decide are pure.
 */

/* Sets nll[i] to the mean over the targets of sample i under an adapter, which is bound to the
 * model (NULL: the base model). kv: type of keys and values. */
int gate_eval_nll(const struct model *m, const struct adapter *a, const struct dataset *d,
                  enum dtype kv, struct pool *pool, double *nll, struct error *err);

/* Bytes that gate_eval_nll needs at most, for samples of at most `longest` tokens. */
size_t gate_eval_bytes(const struct model_config *c, int32_t longest, struct pool *pool);

struct gate_comparison {
    int64_t n;                  /* 0: not measured */
    double before, after;       /* mean nll */
    struct stats_interval gain; /* mean of before - after, 95 % t interval */
    double p;                   /* two-sided sign-flip test */
};
struct gate_comparison gate_compare(const double *before, const double *after, int64_t n);

struct gate {
    struct gate_comparison eval, retain;
    bool publish;
    char why[256]; /* the reason, one line for the user */
};
/* Sets publish and why. Publishes if two conditions hold: nothing was held out, or the gain is
 * above 0 with p <= alpha; retention was not measured, or its interval excludes a loss of more than
 * `tolerance` nats per token. */
void gate_decide(struct gate *g, double alpha, double tolerance);
json_t *gate_json(const struct gate *g);

/*
 * log: the records of a training run: DIR/train.jsonl with one line per step, the same lines as
 * metrics of the run in the store, and DIR/report.html with curves.
 *
 * A log receives the events of a run (train_log_callbacks). The log contains each step once and in
 * order, also if the run was killed and resumed: lines of steps after the checkpoint are removed.
 * The page is rewritten before every checkpoint; at the end the caller adds sections and writes the
 * page once more. One thread may use a log.
 */

/* Callbacks that write each event as a line of `f` and flush it. */
struct train_callbacks train_jsonl_callbacks(FILE *f);

struct train_log;
/* The folder `dir` must exist. `store` may be NULL. `store` and `run` are borrowed until
 * train_log_free. */
struct train_log *train_log_open(const char *dir, const char *title, struct store *store,
                                 const char *run);
void train_log_free(struct train_log *l); /* may be NULL */
struct train_callbacks train_log_callbacks(struct train_log *l);
/* The log also has event files for TensorBoard in its folder; to be called before the run. */
void train_log_write_events(struct train_log *l);
/* Adds a table (see html_table) to the page, or replaces the table with this heading. Takes
 * ownership of `value`. */
void train_log_section(struct train_log *l, const char *heading, json_t *value);
int train_log_report(struct train_log *l, struct error *err); /* writes report.html */

/*
 * run: a recorded training run, with the gate and the publication of its result (run.c).
 *
 * The run's folder RUNS/ID and its rows in RUNS/shoal.db are made before training. After training,
 * each adapter is compared with the version before it. Then the adapter is published or, if the
 * gate rejects it, saved next to its target. DIR/checkpoint.bin exists until every result is on
 * disk, and the same call resumes from it.
 */

/* The name of a run, such as "train-critic-1a2b3c4d": its kind, the last part of its output
 * directory, and a hash of this directory and of the recipe, which has everything that determines
 * the run. malloc'ed. */
char *run_id_make(const char *kind, const char *out, const json_t *recipe);

struct gate_options { /* filled from option rows; meanings: gate_option_rows */
    char *runs, *retain;
    struct strings eval_data, retain_data, tags;
    double alpha, tolerance, points;
    int64_t retain_n;
    bool tensorboard;
};
extern const struct option_row gate_option_rows[];
/* The file for an adapter in a list of FILE and NAME=FILE: the file with the adapter's name, else
 * the last file without a name; NULL: none. */
const char *data_file_for_adapter(const struct strings *list, const char *name);

struct family_result {
    int family; /* index into task_families */
    struct stats_interval before, after;
    struct stats_mcnemar change; /* after - before */
    double p_holm;               /* corrected for the number of families */
};
/* The model before and after a training on the same samples (effect.c). */
struct train_effect {
    int n;                /* samples; 0: not measured */
    double before, after; /* mean over the samples of the loss, in nats per token */
    json_t *replies;      /* [{prompt, answer, before, after}] greedy replies, or NULL */
};
/* Some samples of d, copied. */
struct dataset train_samples_keep(const struct dataset *d);
/* `before`: NULL for the base model. kv: type of keys and values. Replies that do not fit into the
 * context are left out. The caller releases out->replies. */
int train_effect_measure(const struct model *m, const struct dataset *d, struct adapter *before,
                         struct adapter *after, enum dtype kv, const struct engine_limits *limits,
                         struct pool *pool, struct train_effect *out, struct error *err);
/* {samples, before, after, replies}; null if it was not measured. */
json_t *train_effect_json(const struct train_effect *e);

struct train_result {
    const struct train_job *job;
    struct train_effect effect;
    const char *dir;  /* the directory with the adapter: the target, or the directory for rejected
                         adapters */
    struct gate gate; /* gate.publish: whether `dir` is the published version */
    struct family_result families[MAX_FAMILIES];
    int n_families;
    json_t *manifest; /* see manifest_json; during on_result */
};
/* Warns if the training made the losses larger: it went wrong, whatever the log's last lines say.
 */
void train_effect_warn(const struct train_result *r);
/* {adapter, dir, hash, first_loss, last_loss, published, effect, gate, retain_families, manifest};
 * with rewards also first_reward and last_reward, of dpo last_accuracy */
json_t *train_result_json(const struct train_result *r);

struct train_output {
    const char *dir;      /* the target: the directory that the adapter is published in */
    bool subfolders;      /* each adapter has a subfolder with its name */
    bool accept_rejected; /* a rejected adapter is a result like others, not an error */
    const struct gate_options *gate;
    /* Called for each adapter after its files were written. */
    void (*on_result)(void *ctx, const struct train_result *r);
    void *ctx;
};
/* Trains, compares and publishes; holds a lock on o->dir meanwhile. ERR_STATE if an adapter was not
 * published, unless o->accept_rejected. The caller releases the jobs' results. */
int train_and_publish(const struct train_request *q, const struct train_output *o,
                      struct error *err);

/*
 * settings: everything that determines a training except the model, as options (settings.c).
 */

struct train_settings {
    struct strings data; /* FILE or, for several adapters, NAME=FILE each */
    char *format, *out, *method, *init_adapter, *alora_invocation, *max_memory;
    struct engine_limits limits;
    struct gate_options gate;
    struct train_options train;
    struct rl_options policy;
    struct es_options es;
};
extern const struct option_row train_settings_rows[];     /* data, out, method, init-adapter */
extern const struct option_table train_settings_tables[]; /* all options */
/* Checks everything that needs neither a file nor the model. `plan`: no output is needed. */
int train_settings_check(const struct train_settings *s, bool plan, struct error *err);
/* Whether a training of these settings over a model of this size can fit the memory limit at all,
 * before the model and the data are read; `size` comes from model_measure, without bytes for a
 * model that is in memory. The message of ERR_MEMORY has a limit that will do. */
int train_memory_check(const struct train_settings *s, const struct model_size *size,
                       enum numeric_class cls, struct pool *pool, struct error *err);
/* Whether the data files can be read within the memory limit, by their sizes: for a process that
 * must not run out of memory. */
int train_data_check(const struct train_settings *s, struct error *err);
/* Makes a request of checked settings, sets the memory limit unless the caller has done so before
 * it loaded the model, and opens the initial adapter. The request borrows settings, model and pool.
 * Call train_request_close after an error too; it also releases the results and the limit. */
int train_request_open(struct train_request *q, const struct train_settings *s, struct model *m,
                       struct pool *pool, struct error *err);
void train_request_close(struct train_request *q);
struct train_output train_settings_output(const struct train_settings *s);

#endif
