/*
 * engine: declarations shared by the engine's source files. Private to this folder. The
 * log-probability of a token (sampled, of the prompt or of a choice) is logit - logits_logsumexp,
 * in float; with choices_only the sum is over the choices.
 */
#ifndef SHOAL_ENGINE_INTERNAL_H
#define SHOAL_ENGINE_INTERNAL_H

#include "engine/engine.h"

#include <pthread.h>

/* max + log Σ exp(x - max); the kernel defines the order of the sum. `scratch` [n]. */
float logits_logsumexp(const float *x, int32_t n, float *scratch);

enum request_phase { PHASE_PREFILL, PHASE_SHIFT, PHASE_DECODE, PHASE_SUFFIX, PHASE_CHOICES };

/* A choice of a request; the choices are sorted by their tokens. */
struct sorted_choice {
    const int32_t *v;
    int32_t n, index; /* index: in engine_request.choices */
    int32_t shared;   /* length of the common prefix with the previous choice */
};

struct request_state {
    struct engine_request *next; /* waiting list */
    enum request_phase phase;
    int32_t slot, kv, end;
    int32_t context;              /* in PHASE_CHOICES: number of tokens in prompt | out | suffix */
    int32_t choice;               /* index in `sorted` */
    struct sorted_choice *sorted; /* [n_choices] */
    struct engine_request *prefix_source; /* request that prefills the first shared_prefix_len
                                             tokens, for which this request waits; NULL: none */
    int32_t shared_prefix_len;
    int32_t pages;           /* KV pages reserved on admission: the maximum that it can need */
    char key[HASH_LEN];      /* engine_adapters_key */
    int32_t activation;      /* engine_activation */
    struct lora_part *parts; /* [n_parts] its adapters */
    struct mix_sum *mix_sum; /* the sum of a mix with DoRA, or NULL */
    int32_t n_parts;
    const struct vocab_overrides *overrides; /* its adapter's embedding and head, or NULL */
    struct grammar_state grammar_state;      /* after the tokens generated so far */
    uint32_t *allowed;        /* [(V + 31) / 32] grammar mask; NULL without a grammar */
    bool mask_pending;        /* `allowed` is incomplete: the request waits */
    bool loop_detected;       /* see loop_tokens */
    int32_t unconsumed_token; /* token that grammar_state has not consumed yet, or -1 */
    bool empty_only;          /* the grammar matches the empty text only: no token is generated */
    struct token_cycle cycle; /* of `out`, if loop_tokens is set */
    int32_t n_again;          /* tokens of `out` that a remote had filled in */
    bool differs;             /* one of them is another token now */
};

struct engine_slot {
    struct engine_request *owner; /* NULL: free; the tokens remain in the prefix cache */
    char key[HASH_LEN];           /* engine_adapters_key of its last request */
    int32_t activation;           /* engine_activation of its last request */
    int32_t *tokens;              /* [max_len] */
    int32_t n;                    /* number of positions in the KV cache */
    int32_t n_known;    /* length of the prefix that other requests may share; see chunk_commit */
    uint64_t last_used; /* step of the last use */
};

/* The rows of one request in a step. */
struct scheduled_chunk {
    struct engine_request *r;
    int32_t n_rows, out, n_out; /* logits_rows [out, out + n_out) */
    int32_t next;               /* chunk with the same adapter, or -1 */
};

/* The chunks of a step that have the same adapters and are all sampled or all known rows: a linked
 * list. */
struct adapter_group {
    const struct request_state *state; /* of the first request */
    int32_t first, last;
};

/* One row of logits and its use, in the order of the enum: log Σ exp over the vocabulary (to score
 * choices of any length), the same over the choices (choices_only), sampling a token, and the
 * log-probability of the prompt's next token. */
enum logits_use { LOGITS_NORMALIZE, LOGITS_CHOICES, LOGITS_SAMPLE, LOGITS_PROMPT_LOGPROB };
struct logits_row {
    struct engine_request *r;
    enum logits_use kind;
    int32_t pos; /* LOGITS_PROMPT_LOGPROB: position of the row */
    int32_t token;
    float logprob; /* log-probability of the token, or log Σ exp(logits) */
};

/* A request with known rows to run: prompt, suffix or choices. */
struct prompt_order {
    int32_t left;   /* rows that remain in its phase */
    int32_t active; /* index in `active` */
};

/* A grammar that waiting or active requests use, with its cached states and masks. */
struct active_grammar {
    const struct grammar *grammar;
    struct grammar_machine *machine; /* NULL before the first mask */
    int32_t users;
};

struct engine {
    const struct model *m;
    const struct kernels *kern;
    struct engine_options o;
    struct forward *f;
    struct engine_stats stats;
    const struct engine_remote *remote; /* or NULL */
    void *remote_ctx;
    int32_t n_remote; /* requests that the remote has */
    int32_t max_out, vocab, n_active, n_waiting, n_slots;
    int32_t n_pages, reserved_pages;    /* KV cache pages: total, reserved by active requests */
    struct engine_request *head, *tail; /* waiting requests: a linked list */
    struct mix_sum *mix_sums;           /* a linked list; see mix.c */
    void *slab;
    pthread_mutex_t vocab_lock;          /* held while grammar_vocab is created */
    struct grammar_vocab *grammar_vocab; /* NULL before the first grammar */
    struct active_grammar *grammars;     /* [n_grammars] */
    int32_t n_grammars;
    size_t machines_max_bytes; /* limit for all grammar machines together */

    float *logits;                  /* [max_out, V] */
    float *scratch;                 /* [threads, SAMPLE_SCRATCH, V] */
    struct batch_row *rows;         /* [max_rows] */
    struct lora_segment *segs;      /* [n_segs], at most one for each chunk: [max_seqs] */
    int32_t *out_rows;              /* [max_rows] */
    struct logits_row *logits_rows; /* [max_out] */
    struct engine_slot *slots;      /* [n_slots] */
    int32_t *tokens;                /* [n_slots, max_len] */
    struct engine_request **active; /* [max_seqs] */
    struct scheduled_chunk *chunks; /* [max_seqs] */
    struct adapter_group *groups;   /* [max_seqs] */
    struct prompt_order *order;     /* [max_seqs] */
    int32_t prompt_rows;            /* see engine_set_prompt_rows */

    /* the step in progress */
    int32_t n_chunks, n_groups, n_segs, n_rows, n_out;
    int64_t mask_units; /* work units left for masks */
    int32_t next_mask;  /* index in `active` of the request whose mask is computed next */
};

static inline bool rows_are_sampled(const struct request_state *s) {
    return s->phase == PHASE_DECODE;
}
bool request_generates(const struct engine_request *r);

/* schedule.c: chooses the rows of the step, as e->chunks; none if every request waits for its mask.
 */
void step_schedule(struct engine *e);

/* request_inputs.c */

enum request_input_type {
    INPUT_FLOAT,
    INPUT_INT,  /* int32_t */
    INPUT_SEED, /* uint64_t */
    INPUT_BOOL,
    INPUT_TOKENS,      /* list of int32_t */
    INPUT_TEXTS,       /* list of const char * */
    INPUT_TOKEN_LISTS, /* list of struct token_seq */
    INPUT_BIAS,        /* list of struct logit_bias */
    INPUT_GRAMMAR,     /* const struct grammar *, may be NULL */
};
/* An input of a request. Every row of the table is part of the key and of the record. */
struct request_input {
    const char *name; /* key in the JSON of a record */
    enum request_input_type type;
    size_t value_offset, count_offset; /* offsets in struct engine_request; count_offset is that of
                                          a list's int32_t length, 0 for other types */
    int32_t min, max;                  /* INPUT_INT: allowed values in a record */
    bool in_sampling; /* in the JSON of a record, the input is a member of "sampling" */
    bool optional;    /* INPUT_INT, INPUT_BOOL: the value 0 is omitted from the key and the JSON */
};
extern const struct request_input request_inputs[]; /* ends with a NULL name */

/* Identifies the adapters of a request and their weights. The content of the KV cache depends on
 * this key, the activation and the tokens only. */
void engine_adapters_key(const struct engine_request *r, char out[HASH_LEN]);
/* The first position that the request's adapters change (adapter_activation); ADAPTER_INACTIVE for
 * the base model. The positions before it are those of every request with the same tokens. */
int32_t engine_activation(const struct engine_request *r);
json_t *json_from_tokens(const int32_t *v, int32_t n);

/* The least recently used free slot, or -1. Empty slots are preferred; with `filled` they are
 * skipped. */
int32_t slot_find_lru(const struct engine *e, bool filled);
/* Allocates pages for positions [from, to) of a slot. When no page is free, evicts finished
 * sequences, least recently used first. False: there are not enough pages. */
bool slot_reserve_pages(struct engine *e, int32_t slot, int32_t from, int32_t to);
/* Allocates the results of a request. */
int request_results_alloc(struct engine_request *r, struct error *err);
/* Makes r->text from the output. */
void engine_text_replay(const struct engine *e, struct engine_request *r);
int engine_check_tokens(const char *what, const int32_t *v, int32_t n, int32_t vocab,
                        struct error *err);
int engine_check_adapter(const struct adapter *a, const struct model_config *c, struct error *err);

/* mix.c */
/* Whether a term of the request's mix has DoRA. */
bool request_mixes_dora(const struct engine_request *r);
/* Sets *out to the sum of such a mix, else to NULL; the caller calls mix_sum_release. */
int mix_sum_acquire(struct engine *e, const struct engine_request *r, struct mix_sum **out,
                    struct error *err);
struct lora_part mix_sum_part(const struct mix_sum *s);
void mix_sum_release(struct engine *e, struct mix_sum *s); /* NULL is allowed */

#endif
