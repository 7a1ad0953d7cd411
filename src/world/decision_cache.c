/*
 * decision_cache: log-probabilities of actions that a policy runner has computed before.
 *
 * The engine's result is a function of the adapter's content and the prompt alone (which also
 * determines the choices: actions, or words to say), so a repeated
 * prompt under the same adapter needs no forward pass. Compact observations repeat often. The table
 * is a direct-mapped cache: a new decision replaces the one in its slot. Prompts of more than
 * MAX_PROMPT_TOKENS tokens are not cached; they contain positions and numbers, so they hardly ever
 * repeat.
 *
 * Invariant: an entry is found only if its adapter's hash and all its tokens are equal. A cache is
 * used by one thread at a time.
 */
#include "world/internal.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_PROMPT_TOKENS = 24 };

struct cached_decision {
    char adapter[HASH_LEN]; /* "" for the base model */
    uint8_t n;              /* number of tokens; 0: the slot is empty */
    int32_t tokens[MAX_PROMPT_TOKENS];
};
struct decision_cache {
    uint32_t n; /* number of slots */
    int max_choices;
    struct cached_decision *v; /* [n] */
    float *logprob;            /* [n][max_choices] */
};

struct decision_cache *decision_cache_new(int n, int max_choices) {
    struct decision_cache *c = xmalloc(sizeof *c);
    *c = (struct decision_cache){.n = (uint32_t)n, .max_choices = max_choices};
    c->v = xcalloc((size_t)n, sizeof *c->v);
    c->logprob = xcalloc((size_t)n * (size_t)max_choices, sizeof *c->logprob);
    return c;
}

size_t decision_cache_bytes(int n, int max_choices) {
    return (size_t)n * (sizeof(struct cached_decision) + (size_t)max_choices * sizeof(float));
}

void decision_cache_free(struct decision_cache *c) {
    if (!c) return;
    free(c->v);
    free(c->logprob);
    free(c);
}

static const char *adapter_hash(const struct adapter *a) {
    return a ? a->hash : "";
}

/* The slot of a decision, or `n` if decisions of this length are not cached. */
static uint32_t slot_index(const struct decision_cache *c, const struct adapter *a,
                           struct token_seq prompt) {
    const char *hash = adapter_hash(a);
    if (prompt.n < 1 || prompt.n > MAX_PROMPT_TOKENS) return c->n;
    uint64_t h = hash_fnv1a(hash, strlen(hash)),
             t = hash_fnv1a(prompt.v, (size_t)prompt.n * sizeof *prompt.v);
    return (uint32_t)((h ^ t) % c->n);
}

const float *decision_cache_find(const struct decision_cache *c, const struct adapter *a,
                                 struct token_seq prompt) {
    uint32_t slot = slot_index(c, a, prompt);
    if (slot == c->n) return NULL;
    const struct cached_decision *d = &c->v[slot];
    bool same = d->n == prompt.n && strcmp(d->adapter, adapter_hash(a)) == 0 &&
                memcmp(d->tokens, prompt.v, (size_t)prompt.n * sizeof *prompt.v) == 0;
    return same ? c->logprob + (size_t)slot * (size_t)c->max_choices : NULL;
}

void decision_cache_put(struct decision_cache *c, const struct adapter *a, struct token_seq prompt,
                        const float *logprob, int n_choices) {
    uint32_t slot = slot_index(c, a, prompt);
    if (slot == c->n) return;
    struct cached_decision *d = &c->v[slot];
    strcpy(d->adapter, adapter_hash(a));
    d->n = (uint8_t)prompt.n;
    memcpy(d->tokens, prompt.v, (size_t)prompt.n * sizeof *prompt.v);
    memcpy(c->logprob + (size_t)slot * (size_t)c->max_choices, logprob,
           (size_t)n_choices * sizeof *logprob);
}
