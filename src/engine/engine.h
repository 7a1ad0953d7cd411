/*
 * engine: one running batch in which every row names its own adapter.
 *
 * Any number of requests may be submitted. Each engine_step takes rows from as many requests as fit
 * — one row of each request that decodes, chunks of the prompts of those that start —, sorts them
 * by adapter and runs the base once for all. A request's result is a function of model, adapter
 * content, prompt, sampling settings and seed only: neighbours, threads, order and chunking do not
 * change it. Exactly one thread drives an engine. The options determine its memory, which
 * engine_new allocates; a step allocates nothing but the outputs of the requests.
 */
#ifndef SHOAL_ENGINE_H
#define SHOAL_ENGINE_H

#include "adapter/adapter.h"
#include "grammar/grammar.h"
#include "store/store.h"

struct logit_bias {
    int32_t token;
    float bias;
};
/*
 * How one token is sampled. The order is: bias, penalties, temperature, top-k, typical, top-p,
 * min-p. Each filter works on the renormalised output of the previous one. Temperature 0 is greedy:
 * the lowest id of the largest logit.
 */
struct sampling_params {
    float temperature; /* 0: greedy (lowest id wins ties) */
    int32_t top_k;     /* 0: off */
    float top_p;       /* 1: off; must be set when temperature > 0 */
    float min_p;       /* 0: off */
    uint64_t seed;     /* token i is sampled with rng (seed, RNG_SAMPLE, 0, i) */
    float typical_p;   /* locally typical sampling (Meister et al. 2022); 0 or 1: off */
    /* Divisor of positive logits and factor of negative ones, for tokens in the prompt or the
     * output (Keskar et al. 2019); 0 or 1: off. */
    float repetition_penalty;
    float presence_penalty,
        frequency_penalty; /* subtracted for tokens of the output: once, and by count */
    /* All three penalties count only the last n tokens of prompt and output together, as in
     * llama.cpp; 0: the ranges described above. */
    int32_t penalty_last_n;
    const struct logit_bias *bias; /* added to logits */
    int32_t n_bias;
};
/* One term of a request's adapter mix: weight · adapter, or of a perturbation when adapter is NULL.
 */
struct weighted_adapter {
    struct adapter *adapter;
    struct lora_perturbation noise;
    float weight;
};
struct token_seq {
    const int32_t *v;
    int32_t n;
};
enum finish_reason { FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_CHOICE, FINISH_LOOP };

/*
 * One call. Inputs are borrowed until it is done. Phases: (1) prefill of the prompt; (2) if
 * max_tokens > 0, tokens are generated until one of `stop` (not part of the output) or the limit;
 * (3) if there are choices, `suffix` is appended and exactly one choice is decoded:
 * choice_logprob[i] is the exact log-probability of the whole token sequence of choice i at that
 * point, choice_prob the same normalised over the choices, choice the most probable (lowest index
 * wins ties). Without choices the suffix is not used. With choices_only every choice is one token,
 * and choice_logprob is normalised over the choices, which spares the sum over the vocabulary.
 * Result fields are zero (or released) before a request is submitted.
 */
struct engine_request {
    const int32_t *prompt;
    int32_t n_prompt;
    struct adapter *adapter;            /* NULL: the base model, or the mix */
    const struct weighted_adapter *mix; /* exact sum of low-rank terms, nothing merged; or NULL */
    int32_t n_mix;                      /* at most ENGINE_MIX_MAX */
    struct sampling_params sampling;
    int32_t max_tokens;
    const int32_t *stop;
    int32_t n_stop;
    const char *const
        *stop_texts; /* generation also ends where the text first contains one of them */
    int32_t n_stop_texts;
    /* Constrains the output to texts of the grammar: tokens that would violate it are never
     * sampled, `stop` tokens only at a point where a text may end. Generation stops when nothing
     * can follow (FINISH_STOP). NULL: any text. If the vocabulary has every byte and max_tokens has
     * room for a whole text, the output is whole. */
    const struct grammar *grammar;
    int32_t loop_tokens; /* ends when the last n tokens repeat a cycle four times; 0: off */
    int32_t n_top; /* most probable tokens reported at each position, at most ENGINE_TOP_MAX */
    bool prompt_logprobs; /* report the prompt's tokens as well; its prefix is then not taken from
                             the cache */
    float logprob_temperature; /* divisor of the logits before log-probabilities are taken; 0: 1 */
    struct token_seq suffix;
    const struct token_seq *choices;
    int32_t n_choices;
    bool choices_only;
    void *user; /* for the caller */

    /* results; the request owns the arrays, engine_request_release frees them */
    int32_t *out;       /* [n_out] generated ids */
    float *out_logprob; /* [n_out] of the logits before sampling changed them */
    int32_t n_out;
    int32_t *top_ids;        /* [n_out][n_top], most probable first (lowest id wins ties) */
    float *top_logprob;      /* [n_out][n_top] */
    float *prompt_logprob;   /* [n_prompt]; 0 at position 0, which nothing precedes */
    int32_t *prompt_top_ids; /* [n_prompt][n_top], from position 1 on */
    float *prompt_top_logprob;
    struct buf text; /* generated text, cut before the stop text; only with stop_texts */
    float *choice_logprob, *choice_prob; /* [n_choices] */
    int32_t choice;
    enum finish_reason finish; /* FINISH_CHOICE whenever there are choices */
    int32_t n_prefilled; /* prefilled tokens: prompt, suffix, distinct prefixes of choices; prefix
                            sharing does not change it */
    int32_t n_generated; /* the stop token included */
    int32_t n_cached;    /* prefix cache hits: prompt tokens that other requests had prefilled */
    bool done;

    struct request_state *state; /* owned by the engine */
};
void engine_request_release(struct engine_request *r);
/* Identity of a call: SHA-256 over model hash, adapter hash, numeric class and every input above.
 */
void engine_request_key(const struct engine_request *r, const char *model_hash,
                        enum numeric_class cls, char out[HASH_LEN]);

/* Cycles at the end of a sequence of tokens: run[p] is the number of last tokens that equal the
 * token p before them. All zero before the first token. */
enum { TOKEN_CYCLE_MAX = 64 };
struct token_cycle {
    int32_t run[TOKEN_CYCLE_MAX + 1];
};
/* Adds the last of the tokens v[0..n). True if the last tokens, `min_tokens` or more, repeat one
 * cycle at least four times. */
bool token_cycle_extend(struct token_cycle *c, const int32_t *v, int32_t n, int32_t min_tokens);

#define ENGINE_MIX_MAX 16
#define ENGINE_TOP_MAX 20
struct engine_options {
    int32_t max_rows;     /* rows per step; 0: 256 */
    int32_t max_seqs;     /* sequences at once; 0: 64 */
    int32_t max_len;      /* tokens per sequence; 0: the model's max_seq_len, at most 4096 */
    int32_t max_cached;   /* finished sequences kept for their prefixes; 0: as max_seqs */
    int32_t max_out;      /* rows with logits per step; 0: max_seqs, at least 16 */
    int32_t n_pages;      /* pages in the KV cache; 0: max_seqs whole sequences */
    enum dtype kv_elem;   /* of the KV cache, 0: f32; callers choose kv_cache_default_dtype */
    enum dtype lora_elem; /* element type of the loaded adapters; default f32 */
    struct pool *pool;
    /* Called once for each finished request, with its results, by the thread that calls
     * engine_step. */
    void (*on_finished)(void *ctx, const struct engine_request *r);
    void *on_finished_ctx;
};
struct engine;
struct engine *engine_new(const struct model *m, const struct engine_options *o, struct error *err);
void engine_free(struct engine *e);
int32_t engine_max_len(const struct engine *e);
int32_t engine_max_seqs(const struct engine *e);
/* Refuses (ERR_USAGE) a request that cannot fit: prompt + max_tokens + suffix + longest choice >
 * max_len, empty prompt, token out of range, an adapter for another shape. ERR_MEMORY: no memory
 * for its results. After an error nothing is submitted. */
int engine_submit(struct engine *e, struct engine_request *r, struct error *err);
/* The same checks without submitting. Any thread, also while the engine runs. */
int engine_check(const struct engine *e, const struct engine_request *r, struct error *err);
/* Builds the state that all grammars share, so that the first request with a grammar does not wait
 * for it in a step. Any thread. */
void engine_prepare_grammars(struct engine *e);
/* Limit in bytes for the cached state of the grammars in flight (0: 512 MiB). Call it before the
 * first request. State beyond the limit is dropped; results stay the same. */
void engine_set_grammar_memory(struct engine *e, size_t bytes);
/* Between steps: ends an unfinished request with FINISH_NONE and its results so far. Other requests
 * are not affected. */
void engine_cancel(struct engine *e, struct engine_request *r);
/* One step; returns the number of unfinished requests. Finished ones have `done` set. */
int engine_step(struct engine *e);
/* Submits all (excess requests queue) and steps until all are done. `p` (may be NULL) counts
 * finished requests. */
int engine_run(struct engine *e, struct engine_request *reqs, int n, struct progress *p,
               struct error *err);
struct engine_stats {
    uint64_t steps, rows, weight_passes, prefilled /* rows really run */, generated, finished;
    int max_adapters_in_a_step;
    int32_t pages, pages_free; /* pages in the KV cache, and those not reserved */
};
struct engine_stats engine_stats(const struct engine *e);
size_t engine_bytes(const struct model_config *c, const struct engine_options *o);

/*
 * Text embeddings: the mean over a text's tokens of the hidden state after the final norm, [n][D].
 * `adapter` as in a request. Runs immediately, in as many steps as needed; sequences in flight are
 * not changed. ERR_USAGE as engine_submit.
 */
int engine_embed(struct engine *e, const struct token_seq *texts, int32_t n,
                 struct adapter *adapter, float *out, struct error *err);

/*
 * Sessions: the KV cache of one sequence in a file, so that a restart need not prefill the prompt
 * again. Its key is tokens, model, adapters and numeric class; only a request that begins with
 * those tokens reuses it. Saving finds the longest cached prefix of `tokens` under the adapter (0
 * tokens: ERR_USAGE).
 */
int engine_session_save(struct engine *e, struct token_seq tokens, struct adapter *adapter,
                        const char *model_hash, const char *path, struct error *err);
int engine_session_load(struct engine *e, const char *model_hash, const char *path,
                        int32_t *n_tokens, struct error *err);

/* Inputs of sampling other than the logits; the penalties count these tokens. */
struct sampling_context {
    struct token_seq prompt, out;
    const uint32_t *allowed; /* [(V + 31) / 32] bits of the tokens that may be sampled; NULL: all */
};
/* The sampler alone; `scratch` holds SAMPLE_SCRATCH · n floats, the logits are not changed. Returns
 * the id and its log-probability under the softmax of the unmodified logits. `history` may be NULL
 * without penalties. */
#define SAMPLE_SCRATCH 3
int32_t sample_token(const float *logits, int32_t n, const struct sampling_params *s,
                     const struct sampling_context *context, int32_t index, float *logprob,
                     float *scratch);
/* The k most probable tokens and their log-probabilities; `lse` is log Σ exp(logits). */
void sample_top_logprobs(const float *logits, int32_t n, float lse, int32_t k, int32_t *ids,
                         float *logprobs, float *scratch);

/*
 * plan: does it fit, and how large may the engine be? The answer comes before anything is loaded.
 *
 * Pure arithmetic over sizes from headers (model_measure, adapter files) and over the memory sizes
 * that the engine computes. Owns nothing; any thread.
 */

/* Memory of an adapter. `held`: its factors in f32 and in the element of the forward pass.
 * `passing`: temporary memory while it is loaded. */
struct adapter_size {
    size_t held, passing;
};
/* Adds one adapter: `held` is summed, `passing` is the maximum. */
int adapter_measure(const char *path, enum dtype elem, struct adapter_size *sum, struct error *err);

struct memory_plan_input {
    struct model_size model;
    struct adapter_size adapters; /* sum over all adapters */
    size_t work;                  /* memory for the caller: requests, answers, a session file */
    size_t requests;              /* server only: bytes of client requests and responses, at most */
    size_t limit;                 /* 0: none */
    struct engine_options want;   /* options to use if memory did not matter */
};
/* Bytes by purpose; `total` is their sum. `engine` holds the chosen options: fewer pages than
 * required make requests wait, smaller max_seqs and max_rows make steps smaller; no result changes.
 */
struct memory_plan {
    size_t weights, tokenizer, adapters, kv, activations, requests, work, total, limit;
    int32_t pages_wanted;
    struct engine_options engine;
};
/* ERR_MEMORY, with the figures and what to change, when not even one sequence of max_len tokens
 * fits; `out` then is the smallest possible plan. */
int memory_plan_make(const struct memory_plan_input *in, struct memory_plan *out,
                     struct error *err);
/* Several lines of text for people; and the same as JSON. */
void memory_plan_text(const struct memory_plan *p, struct buf *out);
json_t *memory_plan_json(const struct memory_plan *p);

/*
 * record: a call as JSON, to store it, to replay it and to report differences.
 *
 * A call's identity (record_key) covers everything its result depends on, so that replaying a
 * record can verify it. Pure except for the recorder, which writes each finished request to a store
 * when the engine reports it; one thread.
 */

/* engine_request_key; if the KV cache or the adapters are held in elements other than f32, a hash
 * that covers these too. */
void record_key(const struct engine_request *r, const char *model_hash, enum numeric_class cls,
                enum dtype kv, enum dtype lora, char out[HASH_LEN]);
const char *finish_reason_name(enum finish_reason f); /* "stop" */
const char *numeric_class_name(enum numeric_class cls);
const char *dtype_name(enum dtype e);
/* A number, or one of the strings "inf", "-inf" and "nan", because JSON has no such numbers. */
json_t *json_from_float(float v);

/* All inputs of the caller except adapters; all outputs of the engine. */
json_t *record_inputs_json(const struct engine_request *r);
json_t *record_outputs_json(const struct engine_request *r);
/* The inverse of record_inputs_json: arrays come from `arena`, the caller frees the grammar (or
 * NULL). The error says what is wrong. */
int record_inputs_parse(const json_t *inputs, struct arena *arena, struct engine_request *out,
                        struct grammar **grammar, struct error *err);
/* The differences between two results of record_outputs_json, one per line: fields, and the first
 * token and log-probability of a list. False: no difference. */
bool record_outputs_diff(const json_t *before, const json_t *after, struct buf *out);

/* Adapters by their content, so that a record can name their paths. */
struct recorded_adapter {
    const char *path;
    struct adapter *adapter;
};
struct recorder {
    struct store *store;
    const struct model *model;
    const char *model_path, *model_hash;
    enum dtype kv, lora;
    const struct recorded_adapter *adapters;
    int n_adapters;
    int64_t n;        /* calls written */
    struct error err; /* the first that failed; nothing is written after it */
};
/* For engine_options.finished. */
void recorder_finished(void *recorder, const struct engine_request *r);
/* [{path, hash, weight} or {noise: {seed, member}, weight}]. */
json_t *record_adapters_json(const struct engine_request *r,
                             const struct recorded_adapter *adapters, int n);

#endif
