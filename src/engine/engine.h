/*
 * engine: continuous batching of requests; the requests of a batch may have different adapters
 * (multi-LoRA batch).
 *
 * Any number of requests may be submitted. A row of a batch is one token of one request. Each
 * engine_step schedules one row per decoding request and chunks of prompts (chunked prefill),
 * groups the rows by adapter and runs the base model once for all rows. A request's result depends
 * on model, adapter content, prompt, sampling settings and seed only; other requests, the number of
 * threads, the order and the chunk sizes do not change it. Only one thread at a time may call an
 * engine's functions, except where noted. engine_new allocates the memory that the options
 * determine, and engine_submit the results of a request. A step allocates only the text for
 * stop_texts and the cached states and masks of grammars.
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
 * min-p. Each filter renormalises the probabilities that the previous filter left. With temperature
 * 0 the token with the largest logit is chosen.
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
        frequency_penalty; /* subtracted from the logits of tokens in the output: presence once,
                              frequency times the number of occurrences */
    /* All three penalties count only the last n tokens of prompt and output together, as in
     * llama.cpp; 0: all tokens, as described above. */
    int32_t penalty_last_n;
    const struct logit_bias *bias; /* added to the logits of these tokens */
    int32_t n_bias;
};
/* One term of a request's adapter mix: weight · adapter, or weight · noise when adapter is NULL. */
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
 * A request. Its inputs, including the adapters, are borrowed until it is done. Phases: (1) prefill
 * of the prompt; (2) if max_tokens > 0, tokens are generated until one of `stop` (not part of the
 * output) or the limit; (3) if there are choices, `suffix` is appended and every choice is scored:
 * choice_logprob[i] is the exact log-probability of the token sequence of choice i, choice_prob[i]
 * its probability normalised over the choices, and choice the index of the most probable one (the
 * lowest index wins ties). Without choices the suffix is not used. With choices_only every choice
 * is one token, and choice_logprob is normalised over the choices instead of the vocabulary, which
 * is faster. The result fields must be zero, or released by engine_request_release, before a
 * request is submitted.
 */
struct engine_request {
    const int32_t *prompt;
    int32_t n_prompt;
    /* NULL: the base model, or `mix`. An adapter with an invocation applies to the tokens of the
     * request from adapter_activation of the prompt on. */
    struct adapter *adapter;
    /* The invocation is searched in the first n tokens of the prompt; 0: in the whole prompt. For a
     * prompt that ends with an answer, which its adapter generated from these n tokens. */
    int32_t n_invocation_prompt;
    /* or NULL; the terms are summed exactly. If one has DoRA, the engine makes the sum, which is in
     * memory while requests with this mix exist. */
    const struct weighted_adapter *mix;
    int32_t n_mix; /* at most ENGINE_MIX_MAX */
    struct sampling_params sampling;
    int32_t max_tokens;
    const int32_t *stop;
    int32_t n_stop;
    const char *const *stop_texts; /* generation ends when the text contains one of them */
    int32_t n_stop_texts;
    /* Constrains the output to texts of the grammar: tokens that would violate it are never
     * sampled, and `stop` tokens are sampled only where a text may end. Generation stops
     * (FINISH_STOP) when no token can follow. NULL: any text. If the vocabulary has a token for
     * every byte and max_tokens allows a complete text, the output is complete. */
    const struct grammar *grammar;
    /* Context shift: when prompt and output are context_len tokens, half of those after the first
     * n_keep are dropped, the oldest first, and the others are prefilled again at their new
     * positions. The output continues as that of a request whose prompt is what remains. n_keep is
     * at most n_prompt and context_len - 2. 0: off. Not with choices. */
    int32_t context_len, n_keep;
    int32_t loop_tokens;  /* stop (FINISH_LOOP) when n or more tokens at the end repeat a cycle four
                             times; 0: off */
    int32_t n_top;        /* number of most probable tokens to report at each position, at most
                             ENGINE_TOP_MAX */
    bool prompt_logprobs; /* report those of prompt tokens too; disables prefix caching */
    float logprob_temperature; /* divisor of the logits before log-probabilities are taken; 0: 1 */
    struct token_seq suffix;
    const struct token_seq *choices;
    int32_t n_choices;
    bool choices_only;
    void *user; /* not used by the engine */

    /* results; the request owns the arrays, engine_request_release frees them */
    int32_t *out;       /* [n_out] generated ids */
    float *out_logprob; /* [n_out] under the logits before bias, penalties and temperature */
    int32_t n_out;
    int32_t *top_ids;        /* [n_out][n_top], most probable first (lowest id wins ties) */
    float *top_logprob;      /* [n_out][n_top] */
    float *prompt_logprob;   /* [n_prompt]; 0 at position 0 */
    int32_t *prompt_top_ids; /* [n_prompt][n_top], from position 1 on */
    float *prompt_top_logprob;
    struct buf text; /* generated text, cut before the stop text; only with stop_texts */
    float *choice_logprob, *choice_prob; /* [n_choices] */
    int32_t choice;
    enum finish_reason finish; /* FINISH_CHOICE for every completed request with choices */
    int32_t n_prefilled; /* tokens of the prompt, the suffix and the distinct prefixes of choices,
                            and those after each context shift; includes n_cached */
    int32_t n_generated; /* including the stop token */
    int32_t n_cached;    /* prompt tokens found in the prefix cache */
    int32_t n_dropped;   /* tokens dropped by context shifts */
    bool done;

    struct request_state *state; /* owned by the engine */
};
void engine_request_release(struct engine_request *r);
/* Identity of a request: SHA-256 over the model's hash, the hashes of the adapters, the numeric
 * class and all inputs above except `user`. */
void engine_request_key(const struct engine_request *r, const char *model_hash,
                        enum numeric_class cls, char out[HASH_LEN]);

/* Detects cycles of at most TOKEN_CYCLE_MAX tokens at the end of a token sequence. run[p] is the
 * number of tokens at the end that equal the token p positions before them. Zero-initialise it. */
enum { TOKEN_CYCLE_MAX = 64 };
struct token_cycle {
    int32_t run[TOKEN_CYCLE_MAX + 1];
};
/* Updates the state for token v[n - 1]; must be called once for each n from 1 on. True if
 * min_tokens or more tokens at the end repeat a cycle at least four times. */
bool token_cycle_extend(struct token_cycle *c, const int32_t *v, int32_t n, int32_t min_tokens);

#define ENGINE_MIX_MAX 16
/* adapter_mix.c: adapters with weights: "A", "A=0.7,B=0.3", "A,B" (weight 1 each). */
struct adapter_mix {
    struct strings paths;
    float weights[ENGINE_MIX_MAX];
    struct weighted_adapter terms[ENGINE_MIX_MAX]; /* adapter_mix_open sets them; borrowed */
    bool weighted; /* weights were given, or there are several adapters */
};
/* text NULL: no adapter. The caller releases the mix also after an error. */
int adapter_mix_parse(struct adapter_mix *m, const char *text, struct error *err);
/* `open` returns the adapter of a path, which outlives the mix, or NULL and an error. */
typedef struct adapter *adapter_open_fn(void *ctx, const char *path, struct error *err);
int adapter_mix_open(struct adapter_mix *m, adapter_open_fn *open, void *ctx, struct error *err);
void adapter_mix_apply(const struct adapter_mix *m, struct engine_request *r);
void adapter_mix_release(struct adapter_mix *m);

#define ENGINE_TOP_MAX 20
enum { ENGINE_DEFAULT_ROWS = 256 };
struct engine_options {
    int32_t max_rows;   /* rows per step; 0: ENGINE_DEFAULT_ROWS */
    int32_t max_seqs;   /* sequences at once; 0: 64 */
    int32_t max_len;    /* tokens per sequence; 0: the model's max_seq_len, at most 4096 */
    int32_t max_cached; /* finished sequences kept in the prefix cache; 0: max_seqs */
    int32_t max_out; /* rows with logits per step; 0: max_seqs, at least 16; never above max_rows */
    int32_t n_pages; /* pages in the KV cache; 0: max_seqs whole sequences */
    enum dtype kv_elem;   /* of the KV cache; 0: f32; commands use kv_cache_dtype_parse */
    enum dtype lora_elem; /* element type of the adapters' packs; 0: f32 */
    struct pool *pool;
    /* Called once for each finished or cancelled request, with its results, within engine_step or
     * engine_cancel. */
    void (*on_finished)(void *ctx, const struct engine_request *r);
    void *on_finished_ctx;
};
struct engine;
struct engine *engine_new(const struct model *m, const struct engine_options *o, struct error *err);
void engine_free(struct engine *e);
int32_t engine_max_len(const struct engine *e);
enum dtype engine_kv_elem(const struct engine *e);
enum dtype engine_lora_elem(const struct engine *e);
int32_t engine_max_seqs(const struct engine *e);
int32_t engine_max_rows(const struct engine *e);
/* Limits the rows of prompts, suffixes and choices in a step in which a request decodes (1 ..
 * max_rows, the default), so that long prompts do not delay the tokens of other requests. A step in
 * which none decodes runs at most four times as many, or 128: a request that comes meanwhile waits
 * for its end. Call it between steps. It changes no results. */
void engine_set_prompt_rows(struct engine *e, int32_t n);
/* Adds a request to the waiting ones. ERR_USAGE for an invalid request: prompt + max_tokens +
 * suffix + longest choice > max_len (with a context shift: context_len > max_len), an empty prompt,
 * a token out of range, an adapter for another shape. ERR_MISMATCH: an adapter in `mix` changes
 * embedding or head. ERR_NUMERIC: the weights of a mix with DoRA cancel an output (adapter_sum).
 * ERR_MEMORY: the KV cache has too few pages for it, or there is no memory for its results. After
 * an error nothing is submitted. */
int engine_submit(struct engine *e, struct engine_request *r, struct error *err);
/* The checks of engine_submit without submitting. Any thread, also while the engine runs. */
int engine_check(const struct engine *e, const struct engine_request *r, struct error *err);
/* Builds the vocabulary trie that all grammars share; otherwise a step does it for the first
 * request with a grammar. Any thread. */
void engine_prepare_grammars(struct engine *e);
/* Limits the memory for cached states and masks of all active grammars together (0: 512 MiB). Call
 * it before the first request. The limit does not change results. */
void engine_set_grammar_memory(struct engine *e, size_t bytes);
/* Ends an unfinished request with FINISH_NONE and the results so far. Call it between steps. Other
 * requests are not affected. */
void engine_cancel(struct engine *e, struct engine_request *r);
/* Runs one step; returns the number of unfinished requests. Finished requests have `done` set. */
int engine_step(struct engine *e);
int engine_unfinished(const struct engine *e); /* the number of unfinished requests */
/* Submits n requests (those beyond max_seqs wait) and runs steps until the engine has no unfinished
 * request. `p` (may be NULL) shows the number of finished requests. ERR_STATE: cancelled
 * (log_check_cancelled); then no request has results. */
int engine_run(struct engine *e, struct engine_request *reqs, int n, struct progress *p,
               struct error *err);
/*
 * A remote: it computes the requests of an engine elsewhere. The functions above work as before,
 * except that a cancelled request has no results. The engine calls `submit` with each checked
 * request, without results; `step`, which waits for at most `seconds` until something happens; and
 * `cancel`, after which the remote does not touch the request. The remote calls, within `step`,
 * engine_remote_finish for a request whose results it has filled in (record_outputs_parse), or
 * engine_remote_return for one that this engine is to compute itself; after an error of the latter
 * the request is still the remote's.
 *
 * A remote that streams fills in the tokens of a request as they are generated
 * (record_tokens_merge): other threads may read the first n_out of them, so they never move or
 * change. If it returns a request that has tokens, the engine computes them again. If one differs,
 * the request ends with FINISH_NONE and the tokens that it had. The engine then calls `compared`,
 * also if all are equal; instead it calls `cancel` if the request is cancelled before that.
 */
struct engine_remote {
    void (*submit)(void *ctx, struct engine_request *r);
    void (*step)(void *ctx, double seconds);
    void (*cancel)(void *ctx, struct engine_request *r);
    /* NULL, unless the remote streams */
    void (*compared)(void *ctx, const struct engine_request *r, bool equal);
    void (*wake)(void *ctx); /* ends the wait of `step`, or of the next one; any thread */
};
/* While no request is unfinished. remote NULL: none. */
void engine_set_remote(struct engine *e, const struct engine_remote *remote, void *ctx);
void engine_remote_finish(struct engine *e, struct engine_request *r);
int engine_remote_return(struct engine *e, struct engine_request *r, struct error *err);
/* Whether the engine has a remote that streams. Its messages arrive also while no request is
 * unfinished, so call engine_step about once in a second then. */
bool engine_remote_streams(const struct engine *e);
/* Ends the wait of engine_step for such a remote, or of the next step, because there is work for
 * the engine's thread. Any thread; without such a remote it does nothing. */
void engine_wake(const struct engine *e);
/* Returns the memory of KV cache pages that neither a request nor the prefix cache uses to the
 * system. Call it between steps, when other programs need memory. It changes no results. */
void engine_trim(struct engine *e);
struct engine_stats {
    /* prefilled: rows of prompts, suffixes and choices that were run, without cached ones. */
    uint64_t steps, rows, weight_passes, prefilled, generated, finished;
    /* Maximum number of groups of rows with an adapter in one step. Known and sampled rows with the
     * same adapter are two groups. */
    int max_adapters_in_a_step;
    int32_t pages, pages_free; /* KV cache pages: all; those that no active request has reserved */
};
struct engine_stats engine_stats(const struct engine *e);
/* Bytes of an engine with these options, without the memory that depends on requests. */
size_t engine_bytes(const struct model_config *c, const struct engine_options *o);

/*
 * Text embeddings: the mean over a text's tokens of the hidden state after the final norm, [n][D].
 * `adapter` as in a request. Runs immediately, in several forward passes if needed; active requests
 * are not changed. ERR_USAGE as for engine_submit; ERR_STATE: no slot is free; ERR_MEMORY: too few
 * pages are free.
 */
int engine_embed(struct engine *e, const struct token_seq *texts, int32_t n,
                 struct adapter *adapter, float *out, struct error *err);

/*
 * Sessions: the KV cache of one sequence in a file, so that the prompt need not be prefilled again
 * after a restart. A session is identified by its tokens, model, adapter and numeric class; a
 * request reuses it as it would reuse the sequence in the prefix cache. Saving stores the longest
 * prefix of `tokens` that is cached under the adapter (NULL: the base model); ERR_USAGE if none is.
 * Loading puts the session into a free slot; *n_tokens receives its length.
 */
int engine_session_save(struct engine *e, struct token_seq tokens, struct adapter *adapter,
                        const char *model_hash, const char *path, struct error *err);
int engine_session_load(struct engine *e, const char *model_hash, const char *path,
                        int32_t *n_tokens, struct error *err);

/* Appends all tokens of a session: the cached ones, and those after them that were not cached yet,
 * such as the last sampled one. */
int session_read_tokens(const char *path, struct token_ids *out, struct error *err);

/* Inputs of the sampler besides the logits: tokens for the penalties, and the grammar's mask. */
struct sampling_context {
    struct token_seq prompt, out;
    const uint32_t *allowed; /* [(V + 31) / 32] bits of the tokens that may be sampled; NULL: all */
};
/* Samples one token. `scratch` has SAMPLE_SCRATCH · n floats; the logits are not changed. Returns
 * the id; *logprob is its log-probability under the softmax of the unmodified logits. `context` may
 * be NULL if there are no penalties and no grammar. */
#define SAMPLE_SCRATCH 3
int32_t sample_token(const float *logits, int32_t n, const struct sampling_params *s,
                     const struct sampling_context *context, int32_t index, float *logprob,
                     float *scratch);
/* The k most probable tokens and their log-probabilities; `lse` is log Σ exp(logits). `scratch` has
 * n floats. */
void sample_top_logprobs(const float *logits, int32_t n, float lse, int32_t k, int32_t *ids,
                         float *logprobs, float *scratch);

/*
 * memory plan: computes, before anything is loaded, whether model and engine fit into a memory
 * limit, and the largest engine that fits.
 *
 * Pure arithmetic over the sizes in file headers (model_measure, adapter_measure) and the engine's
 * own memory sizes. No state; any thread.
 */

/* Memory of an adapter in bytes. `resident`: its factors in f32 and its pack. `while_loading`:
 * temporary memory while it is loaded. */
struct adapter_size {
    size_t resident, while_loading;
};
/* Adds the adapter at `path` to `sum`: `resident` is summed, `while_loading` is the maximum. `elem`
 * is the element type of its pack. */
int adapter_measure(const char *path, enum dtype elem, struct adapter_size *sum, struct error *err);

/* Sizes of a server's adapters. */
struct adapter_sizes {
    struct adapter_size sum, largest; /* largest: the maximum of each size */
};
void adapter_sizes_add(struct adapter_sizes *all, const struct adapter_size *one);

struct memory_plan_input {
    struct model_size model;
    struct adapter_size adapters; /* sum over all adapters; of a server: those that must fit */
    size_t
        pool_wanted; /* server only: bytes that more adapters would use if memory is sufficient */
    size_t
        caller_bytes; /* bytes that the command itself needs: requests, answers, a session file */
    size_t requests;  /* server only: maximum bytes of client requests and responses */
    size_t limit;     /* 0: none */
    size_t available; /* without a limit: memory that the system can give; 0: unknown */
    bool half; /* beyond its first sequence, the KV cache may grow into half of the rest only, so
                  that a program which plans later, such as a second server, has room as well */
    struct engine_options max_options; /* the engine's options if memory is sufficient; max_rows,
                                          max_seqs and max_len are set */
};
/* Bytes by purpose; `total` is their sum, without `pool`, the part of `adapters` for adapters that
 * are resident; the rest of `adapters` is temporary memory of loading. `engine` has the chosen
 * options. If it has fewer pages than pages_wanted, requests may wait; if max_seqs or max_rows are
 * smaller than wanted, steps are smaller. The results of requests do not change. */
struct memory_plan {
    size_t weights, tokenizer, adapters, kv, activations, requests, other_bytes, total, limit, pool;
    size_t available; /* of the input */
    int32_t pages_wanted;
    struct engine_options engine;
};
/* Plans a pool that evicts adapters: it holds at least the largest one. While it loads another one,
 * which it does one at a time, that adapter is in memory in addition, until others are evicted. */
void memory_plan_add_pool(struct memory_plan_input *in, const struct adapter_sizes *all);
/* A limit of requests is not a need. Without a memory limit, `requests` becomes at most a quarter
 * of the available memory and half of the rest after the smallest plan, but at least 1 MB,
 * whether that fits or not. The smallest plan has max_options.max_len or, if that is 0, the
 * shortest context of memory_plan_context. */
void memory_plan_limit_requests(struct memory_plan_input *in);
/* The longest sequence that the smallest engine can have in half of the memory that a short
 * sequence leaves, at most the model's length: the other half is for more sequences. Up to 4096
 * tokens may use all memory. At least 1024, or the model's length, whether that fits or not.
 * max_options.max_len need not be set. */
int32_t memory_plan_context(const struct memory_plan_input *in);
/* Whether the engine is smaller than it would be with unlimited memory. */
bool memory_plan_is_reduced(const struct memory_plan_input *in, const struct memory_plan *p);
/* ERR_MEMORY when not even one sequence of max_len tokens fits; the message has the sizes and says
 * what to change, and `out` is the smallest possible plan. */
int memory_plan_make(const struct memory_plan_input *in, struct memory_plan *out,
                     struct error *err);
/* The plan as several lines of text, and as JSON. */
void memory_plan_text(const struct memory_plan *p, struct buf *out);
json_t *memory_plan_json(const struct memory_plan *p);
/* Makes max_rows, max_seqs, max_cached and n_pages of `o` smaller, as little as needed, until
 * engine_bytes is at most `bytes`. False: the smallest engine for one sequence of max_len tokens
 * needs more. The results of requests do not change. */
bool engine_options_fit(const struct model_config *c, struct engine_options *o, size_t bytes);
/* The bytes of the smallest engine for one sequence of o->max_len tokens. */
size_t engine_least_bytes(const struct model_config *c, const struct engine_options *o);
/* Most bytes of a model with its tokenizer, also while it is loaded. */
size_t model_loading_bytes(const struct model_size *size);
/* Most bytes of a model that is loaded and then used with `bytes` more. */
size_t model_with_bytes(const struct model_size *size, size_t bytes);

/*
 * limits: sizes of a command's engine that the user names; 0: the command chooses. Commands whose
 * requests have a known length refuse a shorter max_len, and do not use a longer one.
 */
struct engine_limits {
    int64_t max_seqs, max_len;
};
/* Rows of a command whose options struct `type` has an int64_t or a struct engine_limits `field`.
 */
#define ENGINE_SEQS_ROW(type, field)                                                               \
    {                                                                                              \
        "max-num-seqs", OPT_INT, offsetof(type, field), "0", 0, 4096, "N",                         \
            "maximum concurrent sequences (0: 64 of a server, else up to 256)"                     \
    }
#define ENGINE_LIMIT_ROWS(type, field)                                                             \
    ENGINE_SEQS_ROW(type, field.max_seqs), {                                                       \
        "max-model-len", OPT_INT, offsetof(type, field.max_len), "0", 0, 1e9, "N",                 \
            "maximum tokens of prompt and reply (0: as needed or as memory allows)"                \
    }
/* ERR_USAGE: max_len is more than the model's context of `longest` tokens. */
int engine_limits_check(const struct engine_limits *l, int32_t longest, struct error *err);
/* ERR_USAGE: max_len is less than `what`, such as "a prompt of this world", needs. */
int engine_limits_require(const struct engine_limits *l, int64_t tokens, const char *what,
                          struct error *err);

/*
 * memory limit: of commands that need different things one after another, such as training. They
 * ask for the room before each step, and engines and trainers take less if there is little. The
 * limit applies to the resident memory of the whole process; 0 (initially): no limit. Set it while
 * no other thread allocates, and before a model is loaded.
 */
void memory_limit_set(size_t limit);
/* Sets the limit to the size that an option has. NULL: to the memory in use and the available
 * memory (memory_usable), or to 0 if that is not known. */
int memory_limit_parse(const char *size, struct error *err);
/* For work in a process that has other work, too: sets the limit to the memory that is in use with
 * the model m, and `bytes` more. `option` is what sets `bytes`, for messages; borrowed. */
void memory_limit_set_part(const struct model *m, size_t bytes, const char *option);
size_t memory_limit_get(void);
/* The limit if the user named it, else 0: for manifests, and to print plans and peaks. */
size_t memory_limit_named(void);
/* Bytes in use: memory that is allocated, written or not, the weights that m (may be NULL) uses in
 * its file, and a reserve for small allocations. */
size_t memory_used(const struct model *m);
/* limit - memory_used, at least 0; SIZE_MAX without a limit. */
size_t memory_room(const struct model *m);
/* A step of a command, for messages. With the remedy (may be NULL) it needs `saved` bytes less. */
struct memory_step {
    const char *what, *remedy;
    size_t least, saved;
};
/* ERR_MEMORY if the room is less than need->least, or if the process has exceeded a named limit;
 * the message has the limit, or else the available memory, that would do. */
int memory_check(const struct model *m, const struct memory_step *need, struct error *err);
/* Fits the options of an engine over m into the room; without a limit, into the available memory.
 */
int engine_options_limit(const struct model *m, struct engine_options *o, struct error *err);

/*
 * work: the requests of a command, counted before they are computed, and the time that they take on
 * this machine. A counter takes the place of the engine; later it measures a sample of the
 * counted requests with the engine. One thread at a time uses a counter.
 */
struct work_counts {
    int64_t requests;
    int64_t prompt_tokens; /* as engine_request.n_prefilled, at most: prompts may quote replies */
    int64_t cached_tokens; /* those of them that the prefix cache will probably have */
    int64_t max_generated_tokens; /* the sum of max_tokens: replies may end earlier */
    double other_seconds; /* time since the counter was made, for everything but the engine */
};
/* sum += v · times */
void work_counts_add(struct work_counts *sum, const struct work_counts *v, int64_t times);
struct work_counter;
/* Borrows both. Stop texts, tokens and adapters of counted requests are copied or retained. */
struct work_counter *work_counter_new(struct engine *e, const struct model *m);
void work_counter_free(struct work_counter *c);
void work_counter_add(struct work_counter *c, const struct engine_request *r);
struct work_counts work_counter_counts(const struct work_counter *c);
/* In place of engine_run: counts the requests and fills in made-up results of the greatest length.
 * Errors as those of engine_run. */
int work_counter_run(void *counter, struct engine_request *reqs, int n, struct error *err);

/* Measured on a sample of the requests, as many as the engine runs at once. */
struct work_speed {
    int64_t prompt_tokens, generated_tokens; /* number of measured tokens; 0: no measurement */
    double prompt_seconds, generation_seconds;
    bool replies_ended; /* the replies of the sample were generated to their end */
    double reply_share; /* their tokens divided by their max_tokens; 1 if !replies_ended */
};
/* Drops requests from the sample. */
void work_counter_filter(struct work_counter *c,
                         bool (*keep)(void *ctx, const struct engine_request *r), void *ctx);
/* Takes about two seconds at most, of a model that needs longer for one step some steps. */
int work_counter_measure(struct work_counter *c, struct work_speed *out, struct error *err);
/* Adds "work", both structs as one object, "seconds", the estimate, and "max_seconds", the same if
 * every reply has the greatest length. more: seconds of other work, for both. */
void work_plan_add(json_t *plan, const struct work_counts *w, const struct work_speed *s,
                   double more);

/*
 * record: a request and its results as JSON, to store, to replay and to compare.
 *
 * record_key covers everything that the result depends on, so that a replay of the record can be
 * verified. The functions have no side effects, except that a recorder writes each finished request
 * to a store. One thread at a time uses a recorder.
 */

/* The key of a record: engine_request_key, or, if the KV cache or the adapters have an element type
 * other than f32, a hash of it and these types. */
void record_key(const struct engine_request *r, const char *model_hash, enum numeric_class cls,
                enum dtype kv, enum dtype lora, char out[HASH_LEN]);
const char *finish_reason_name(enum finish_reason f);               /* "stop" */
bool finish_reason_find(const char *name, enum finish_reason *out); /* false: unknown */
/* A number, or one of the strings "inf", "-inf" and "nan" for values that JSON numbers cannot
 * express. */
json_t *json_from_float(float v);
bool json_to_float(const json_t *v, float *out); /* the inverse; false: it is neither */

/* All inputs except the adapters; all results. */
json_t *record_inputs_json(const struct engine_request *r);
json_t *record_outputs_json(const struct engine_request *r);
/* The inverse of record_inputs_json. Arrays are allocated in `arena`; the caller frees *grammar
 * (NULL: the record has no grammar). */
int record_inputs_parse(const json_t *inputs, struct arena *arena, struct engine_request *out,
                        struct grammar **grammar, struct error *err);
/* The inverse of record_outputs_json for a request with the same inputs and no results yet; `text`
 * is made again from the tokens. n_cached and n_dropped are 0. ERR_FORMAT: the outputs are not
 * those of such a request. On an error the request has no results. */
int record_outputs_parse(const struct engine *e, const json_t *outputs, struct engine_request *r,
                         struct error *err);
/*
 * The same for a request whose tokens become known one after another (struct engine_remote). Its
 * arrays are allocated. Tokens, log-probabilities and top tokens that it has already are compared,
 * and the others are added.
 *
 * record_tokens_json: those from position `from` on. record_tokens_merge: `tokens` begin at
 * position `at`; if that is after the end of the known tokens, they are ignored.
 * record_outputs_merge: all results; it completes the request. ERR_MISMATCH: they differ from those
 * that the request has; ERR_FORMAT: they are not those of such a request; then the request is not
 * changed.
 */
json_t *record_tokens_json(const struct engine_request *r, int32_t from);
int record_tokens_merge(const struct engine *e, const json_t *tokens, int32_t at,
                        struct engine_request *r, struct error *err);
int record_outputs_merge(const struct engine *e, const json_t *outputs, struct engine_request *r,
                         struct error *err);
/* Compares two results of record_outputs_json and appends their differences to `out`, one line per
 * field; for a list, only the first difference. False: no difference. */
bool record_outputs_diff(const json_t *before, const json_t *after, struct buf *out);

/* The path to record for an adapter. Adapters are compared by hash. */
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
    int64_t n;        /* number of records written */
    struct error err; /* the first error; after it nothing is written */
};
/* For engine_options.on_finished; `recorder` is a struct recorder. */
void recorder_finished(void *recorder, const struct engine_request *r);
/* [{path, hash, weight} or {noise: {seed, member}, weight}]. */
json_t *record_adapters_json(const struct engine_request *r,
                             const struct recorded_adapter *adapters, int n);

/* manifest.c: what a result was computed from: {program, model, adapters, data, template, class,
 * seed}. program, model, template: the SHA-256 of the running program's file (null: it cannot be
 * read), of the model (model_hash) and of its chat template. adapters, data: objects {name:
 * SHA-256}, whose ownership it takes; NULL: empty. m NULL: no model; model, template and class are
 * null. */
json_t *manifest_json(struct model *m, json_t *adapters, json_t *data, int64_t seed);
/* Add a hash; the hash of a value's canonical text; the hash of a file under its path. */
void manifest_add_hash(json_t *hashes, const char *name, const char *hash);
void manifest_add_json(json_t *hashes, const char *name, const json_t *value);
int manifest_add_file(json_t *hashes, const char *path, struct error *err);

#endif
