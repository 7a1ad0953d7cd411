/*
 * engine: one running batch in which every row names its own adapter.
 *
 * Requests are submitted in any number; each engine_step takes rows from as many as fit — one row
 * of each that decodes, chunks of prompts of those that start — sorts them by adapter and runs the
 * base once for all. A request's result is a function of model, adapter content, prompt, sampling
 * settings and seed only: not of neighbours, threads, order, chunking. Exactly one thread drives an
 * engine. Memory is computed from the options and allocated when it is made; a step allocates
 * nothing but the requests' own outputs.
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
 * How one token is drawn. In this order: bias, penalties, temperature, top-k, typical, top-p,
 * min-p, each on what the one before it left, renormalised. Temperature 0 is greedy: the lowest id
 * of the largest logit.
 */
struct sampling_params {
    float temperature; /* 0: greedy (lowest id wins ties) */
    int32_t top_k;     /* 0: off */
    float top_p;       /* 1: off; must be set when temperature > 0 */
    float min_p;       /* 0: off */
    uint64_t seed;     /* token i is drawn with rng (seed, RNG_SAMPLE, 0, i) */
    float typical_p;   /* locally typical sampling (Meister et al. 2022); 0 or 1: off */
    /* Of tokens in the prompt or the output, positive logits are divided by it and negative
     * multiplied (Keskar et al. 2019); 0 or 1: off. */
    float repetition_penalty;
    float presence_penalty,
        frequency_penalty; /* subtracted for tokens of the output: once, and by count */
    /* All three look at the last so many tokens of prompt and output as one text, as llama.cpp's
     * do; 0: as said above. */
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
 * One call. Inputs are borrowed until it is done. Phases: (1) the prompt is read; (2) if max_tokens
 * > 0, tokens are generated until one of `stop` (kept out of the output) or the limit; (3) if there
 * are choices, `suffix` is appended and exactly one of them is decoded: choice_logprob[i] is the
 * exact log-probability of choice i's whole token sequence there, choice_prob the same normalised
 * over the choices, choice the most probable (lowest index wins ties). Without choices the suffix
 * is not used. Result fields are zero (or released) before a request is submitted.
 */
struct engine_request {
    const int32_t *prompt;
    int32_t n_prompt;
    struct adapter *adapter;            /* NULL: the bare base, or the mix */
    const struct weighted_adapter *mix; /* exact sum of low-rank terms, nothing merged; or NULL */
    int32_t n_mix;                      /* at most ENGINE_MIX_MAX */
    struct sampling_params sampling;
    int32_t max_tokens;
    const int32_t *stop;
    int32_t n_stop;
    const char *const
        *stop_texts; /* generation also ends where the text first contains one of them */
    int32_t n_stop_texts;
    /* What is generated is a text of it: tokens that would leave it are never drawn, the `stop`
     * tokens only where a text may end; it ends by itself where nothing can follow (FINISH_STOP).
     * NULL: any text. What max_tokens has room for is always whole, if the vocabulary has every
     * byte. */
    const struct grammar *grammar;
    int32_t loop_tokens; /* ends when the last so many repeat a cycle four times; 0: off */
    int32_t n_top; /* most probable tokens reported at each position, at most ENGINE_TOP_MAX */
    bool prompt_logprobs; /* report the prompt's tokens as well; its prefix is then read anew */
    float logprob_temperature; /* log-probabilities are of logits over it; 0: over 1 */
    struct token_seq suffix;
    const struct token_seq *choices;
    int32_t n_choices;
    void *user; /* the caller's own */

    /* results; arrays are the request's own: engine_request_release frees them */
    int32_t *out;       /* [n_out] generated ids */
    float *out_logprob; /* [n_out] whatever sampling made of the logits */
    int32_t n_out;
    int32_t *top_ids;        /* [n_out][n_top], most probable first (lowest id wins ties) */
    float *top_logprob;      /* [n_out][n_top] */
    float *prompt_logprob;   /* [n_prompt]; 0 at position 0, which nothing precedes */
    int32_t *prompt_top_ids; /* [n_prompt][n_top], from position 1 on */
    float *prompt_top_logprob;
    struct buf text; /* with stop_texts: what was generated, cut before the stop */
    float *choice_logprob, *choice_prob; /* [n_choices] */
    int32_t choice;
    enum finish_reason finish; /* FINISH_CHOICE whenever there are choices */
    int32_t n_prefilled;       /* tokens read in: prompt, suffix, distinct prefixes of choices;
                                  the same whatever was shared with other requests */
    int32_t n_generated;       /* the stop token included */
    int32_t n_cached;          /* tokens of the prompt that other requests had read already */
    bool done;

    struct request_state *state; /* the engine's */
};
void engine_request_release(struct engine_request *r);
/* Identity of a call: SHA-256 over model hash, adapter hash, numeric class and every input above.
 */
void engine_request_key(const struct engine_request *r, const char *model_hash,
                        enum numeric_class cls, char out[HASH_LEN]);

#define ENGINE_MIX_MAX 16
#define ENGINE_TOP_MAX 20
struct engine_options {
    int32_t max_rows;     /* rows a step; 0: 256 */
    int32_t max_seqs;     /* sequences at once; 0: 64 */
    int32_t max_len;      /* tokens a sequence; 0: the model's max_seq_len, at most 4096 */
    int32_t max_cached;   /* finished sequences that stay for their prefixes; 0: as max_seqs */
    int32_t max_out;      /* rows with logits a step; 0: max_seqs, at least 16 */
    int32_t n_pages;      /* of the KV cache; 0: max_seqs whole sequences */
    enum dtype kv_elem;   /* of the KV cache; f32 unless asked */
    enum dtype lora_elem; /* adapters are held as; f32 unless asked */
    struct pool *pool;
    /* Called once for each request when it is done, results in place, by the thread that steps. */
    void (*finished)(void *ctx, const struct engine_request *r);
    void *finished_ctx;
};
struct engine;
struct engine *engine_new(const struct model *m, const struct engine_options *o, struct error *err);
void engine_free(struct engine *e);
int32_t engine_max_len(const struct engine *e);
int32_t engine_max_seqs(const struct engine *e);
/* Refuses (ERR_USAGE) a request that cannot fit: prompt + max_tokens + suffix + longest choice >
 * max_len, empty prompt, token out of range, an adapter of another shape. ERR_MEMORY: there is no
 * memory for its results. Nothing was submitted then. */
int engine_submit(struct engine *e, struct engine_request *r, struct error *err);
/* The same without submitting. Any thread, also while the engine runs. */
int engine_check(const struct engine *e, const struct engine_request *r, struct error *err);
/* Makes what all grammars share, so that the first request with one need not wait for it in a step.
 * Any thread. */
void engine_prepare_grammars(struct engine *e);
/* Before the first request: bytes that what is worked out about the grammars in flight may take (0:
 * 512 MiB). Beyond it is forgotten; results stay the same. */
void engine_set_grammar_memory(struct engine *e, size_t bytes);
/* Between steps: an unfinished request is done now, with FINISH_NONE and what it has so far. The
 * others do not notice. */
void engine_cancel(struct engine *e, struct engine_request *r);
/* One step; returns the number of unfinished requests. Finished ones have `done` set. */
int engine_step(struct engine *e);
/* Submits all (waiting ones queue) and steps until done. `p` (may be NULL) is updated with finished
 * requests. */
int engine_run(struct engine *e, struct engine_request *reqs, int n, struct progress *p,
               struct error *err);
struct engine_stats {
    uint64_t steps, rows, weight_passes, prefilled /* rows really run */, generated, finished;
    int max_adapters_in_a_step;
    int32_t pages, pages_free; /* of the KV cache: all, and what nobody who runs was promised */
};
struct engine_stats engine_stats(const struct engine *e);
size_t engine_bytes(const struct model_config *c, const struct engine_options *o);

/*
 * Text embeddings: the mean over a text's tokens of the hidden state after the final norm, [n][D].
 * `adapter` as in a request. Runs at once, in as many steps as needed; sequences in flight are not
 * touched. ERR_USAGE as engine_submit.
 */
int engine_embed(struct engine *e, const struct token_seq *texts, int32_t n,
                 struct adapter *adapter, float *out, struct error *err);

/*
 * Sessions: the cached state of one sequence as a file, so that a restart need not read the prompt
 * again. It is keyed by tokens, model, adapters and numeric class; a request that begins with those
 * tokens then reuses it, any other simply does not. Saving finds the longest cached prefix of
 * `tokens` under the adapter (0 tokens: ERR_USAGE).
 */
int engine_session_save(struct engine *e, struct token_seq tokens, struct adapter *adapter,
                        const char *model_hash, const char *path, struct error *err);
int engine_session_load(struct engine *e, const char *model_hash, const char *path,
                        int32_t *n_tokens, struct error *err);

/* What a draw depends on beside the logits: penalties look at it. */
struct sampling_context {
    struct token_seq prompt, out;
    const uint32_t *allowed; /* [(V + 31) / 32] bits of the tokens that may be drawn; NULL: all */
};
/* The sampler by itself; `scratch` holds SAMPLE_SCRATCH · n floats, the logits stay. Returns the id
 * and its log-probability under the softmax of the logits as they are. `history` may be NULL
 * without penalties. */
#define SAMPLE_SCRATCH 3
int32_t sample_token(const float *logits, int32_t n, const struct sampling_params *s,
                     const struct sampling_context *history, int32_t index, float *logprob,
                     float *scratch);
/* The k most probable tokens and their log-probabilities; `lse` is log Σ exp(logits). */
void sample_top_logprobs(const float *logits, int32_t n, float lse, int32_t k, int32_t *ids,
                         float *logprobs, float *scratch);

/*
 * plan: does it fit, and how large may the engine be? Asked before anything is loaded.
 *
 * Pure arithmetic over sizes that are known from headers (model_measure, adapter files) and over
 * what the engine computes of its own memory. Owns nothing; any thread.
 */

/* What an adapter takes: its factors in f32 and as the forward pass reads them; and what passes
 * while it is loaded. */
struct adapter_size {
    size_t held, passing;
};
/* Adds one to the sum: `held` adds up, `passing` is the largest. */
int adapter_measure(const char *path, enum dtype elem, struct adapter_size *sum, struct error *err);

struct memory_plan_input {
    struct model_size model;
    struct adapter_size adapters; /* of all */
    size_t work;                  /* the caller's own: requests, answers, a session file */
    size_t requests;              /* of a server: what clients send and are sent, at most */
    size_t limit;                 /* 0: none */
    struct engine_options want;   /* what would be used if memory did not matter */
};
/* Bytes by purpose; `total` is their sum. What was chosen stands in `engine`: fewer pages than
 * wanted make requests wait, smaller max_seqs and max_rows make steps smaller; no result changes.
 */
struct memory_plan {
    size_t weights, tokenizer, adapters, kv, activations, requests, work, total, limit;
    int32_t pages_wanted;
    struct engine_options engine;
};
/* ERR_MEMORY, with the figures and what to change, when not even one sequence of max_len tokens
 * fits; `out` then is the smallest that there is. */
int memory_plan_make(const struct memory_plan_input *in, struct memory_plan *out,
                     struct error *err);
/* For people, several lines; and the same as JSON. */
void memory_plan_text(const struct memory_plan *p, struct buf *out);
json_t *memory_plan_json(const struct memory_plan *p);

/*
 * record: a call as JSON, for keeping, for running again, and for saying what differs.
 *
 * A call's identity (record_key) covers everything its result depends on, so that a record can be
 * proved by running it anew. Pure but for the recorder, which writes finished requests to a store
 * as the engine hands them over; one thread.
 */

/* engine_request_key, and where the KV cache or adapters are held in other elements than f32, a
 * hash that covers these too. */
void record_key(const struct engine_request *r, const char *model_hash, enum numeric_class cls,
                enum dtype kv, enum dtype lora, char out[HASH_LEN]);
const char *finish_reason_name(enum finish_reason f); /* "stop" */
const char *numeric_class_name(enum numeric_class cls);
const char *dtype_name(enum dtype e);
/* A number, or "inf", "-inf" or "nan", which JSON's numbers leave out. */
json_t *json_from_float(float v);

/* Everything a caller sets but adapters; everything the engine answers. */
json_t *record_inputs_json(const struct engine_request *r);
json_t *record_outputs_json(const struct engine_request *r);
/* The inverse of record_inputs_json: arrays come from `arena`, the grammar (or NULL) is the
 * caller's to free. The error says what is wrong. */
int record_inputs_parse(const json_t *inputs, struct arena *arena, struct engine_request *out,
                        struct grammar **grammar, struct error *err);
/* What differs between two record_outputs_json, a line each: fields, and the first token and
 * log-probability of a list. False: nothing. */
bool record_outputs_diff(const json_t *was, const json_t *now, struct buf *what);

/* Adapters by their content, so that a record can say where they were. */
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
json_t *record_adapters_json(const struct engine_request *r, const struct recorded_adapter *named,
                             int n);

#endif
