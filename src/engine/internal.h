/*
 * What the engine's files share: its state, its slots, and the one normaliser that sampled,
 * generated and chosen tokens' log-probabilities are taken under. A token's log-probability is
 * logit - logits_logsumexp, in float.
 */
#ifndef SHOAL_ENGINE_INTERNAL_H
#define SHOAL_ENGINE_INTERNAL_H

#include "engine/engine.h"

#include <pthread.h>

/* max + log Σ exp(x - max), the sum by the kernel's rule. `scratch` [n]. */
float logits_logsumexp(const float *x, int32_t n, float *scratch);

struct engine_slot {
    struct engine_request *owner; /* NULL: free, but its tokens may serve again */
    char key[HASH_LEN];           /* of the request that filled it */
    int32_t *tokens;              /* [max_len] */
    int32_t n;                    /* positions in the cache */
    uint64_t used;                /* step of the last use */
};

/* What one request contributes to a step. */
struct scheduled_chunk {
    struct engine_request *r;
    int32_t n_rows, out, n_out; /* outs [out, out + n_out) */
    int32_t next;               /* feed of the same adapter, or -1 */
};

/* Requests under the same adapters. */
struct adapter_group {
    const struct request_state *state; /* of the first one */
    int32_t first, last;
};

/* One row of logits and what is read from it: the normaliser only, a drawn token, or how probable
 * the prompt's next token was. */
enum logits_use { LOGITS_NORMALIZE, LOGITS_SAMPLE, LOGITS_PROMPT_LOGPROB };
struct logits_row {
    struct engine_request *r;
    enum logits_use kind;
    int32_t pos; /* LOGITS_PROMPT_LOGPROB: of the row */
    int32_t token;
    float logprob; /* of the token, or log Σ exp(logits) */
};

/* A grammar that requests in flight are held to, with all that has been worked out about it. */
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
    int32_t max_out, vocab, n_active, n_waiting, n_slots;
    int32_t n_pages, promised;          /* pages there are, and that active requests may need */
    struct engine_request *head, *tail; /* waiting */
    void *slab;
    pthread_mutex_t vocab_lock;          /* held while grammar_vocab is made */
    struct grammar_vocab *grammar_vocab; /* NULL before the first grammar */
    struct active_grammar *grammars;     /* [n_grammars] */
    int32_t n_grammars;
    size_t machines_bytes; /* that their machines may hold together */

    float *logits;                  /* [max_out, V] */
    float *scratch;                 /* [threads, SAMPLE_SCRATCH, V] */
    struct batch_row *rows;         /* [max_rows] */
    struct lora_segment *segs;      /* [max_seqs] */
    int32_t *out_rows;              /* [max_rows] */
    struct logits_row *outs;        /* [max_out] */
    struct engine_slot *slots;      /* [n_slots] */
    int32_t *tokens;                /* [n_slots, max_len] */
    struct engine_request **active; /* [max_seqs] */
    struct scheduled_chunk *feeds;  /* [max_seqs] */
    struct adapter_group *groups;   /* [max_seqs] */

    /* the step in progress */
    int32_t n_feeds, n_groups, n_rows, n_out;
    int64_t mask_units; /* of work at masks that are left */
    int32_t mask_turn;  /* which active request's mask is worked at next */
};

/* The free slot whose content was used longest ago, empty ones first (`filled`: not at all), or -1.
 */
int32_t slot_find_lru(const struct engine *e, bool filled);
/* Makes positions [from, to) of a slot writable; finished sequences give their pages when there are
 * no others. False: there are none. */
bool slot_reserve_pages(struct engine *e, int32_t slot, int32_t from, int32_t to);
int engine_check_tokens(const char *what, const int32_t *v, int32_t n, int32_t vocab,
                        struct error *err);
int engine_check_adapter(const struct adapter *a, const struct model_config *c, struct error *err);

#endif
