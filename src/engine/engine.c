/*
 * engine: continuous batching of requests with different adapters.
 *
 * A step: (1) waiting requests are admitted to free slots, first come first served, and grammar
 * masks are computed, up to a fixed amount of work; (2) every decoding request whose mask is
 * complete gets one row, and the remaining rows go to chunks of prompts, suffixes and choices
 * (schedule.c); (3) the rows are grouped by adapter, in order of first appearance, and run
 * in one forward pass; (4) tokens are sampled from the logits; (5) each request whose phase is
 * complete advances to its next phase.
 *
 * A request is one growing sequence: prompt | out | suffix | current choice. Positions [0, kv) are
 * in the KV cache; positions [kv, end) remain to be run in the current phase:
 *
 *     PREFILL ──┬─> DECODE ──┬─> SUFFIX ──> CHOICES ──> done
 *               └────────────┴─────┘ (a phase with nothing to do is skipped)
 *
 * After a context shift the sequence is the first n_keep tokens of prompt | out, and those after
 * the n_dropped tokens that follow. DECODE becomes SHIFT, which prefills the latter again, and
 * then DECODE.
 *
 * Prefix cache: a slot keeps its tokens and KV pages after its request is done, and a new request
 * reuses the longest prefix that any slot has (prefix_cache_lookup). The positions before the
 * activation of a request are the base model's, and so shared between the base model and all
 * activated adapters; the positions from it on are shared under the same adapters and the same
 * activation only. In the fast numeric class with tiles only positions that were computed as known
 * rows are reused: the keys and values of sampled rows have other bits, and a result must not
 * depend on the state of the cache. There are more slots than active requests; the free slots keep
 * finished sequences. When no page is free, the least recently used finished sequences are evicted.
 *
 * Invariants: kv <= end while rows are scheduled; active[] is in order of admission, so a request
 * comes after its prefix source, and the first request never waits for another one; active requests
 * never reserve more pages than the KV cache has; a request's result does not depend on how its
 * rows are distributed over steps.
 *
 * This file starts no threads (it uses the caller's pool) and reads no clock.
 */
#define _GNU_SOURCE
#include "engine/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    PREFIX_MIN = 4, /* minimum length of a common prefix to share */
    OUT_MIN = 16,   /* minimum of the default max_out */
    DEFAULT_SEQS = 64,
    DEFAULT_LEN = 4096,
    MASK_UNITS = 1 << 17,    /* work units for grammar masks per step: about a millisecond */
    MASK_QUANTUM = 1 << 13,  /* work units for one request before the next request's turn */
    MACHINE_UNITS = 1 << 12, /* work units charged for creating a grammar's machine */
    MACHINE_MIN = 1 << 20,   /* minimum memory of one grammar's machine */
    LOOP_REPEATS = 4,        /* repetitions of a cycle that end a request with loop_tokens */
};

/* Default memory limits: for the machines of all active grammars, and for one machine. */
#define MACHINES_BYTES ((size_t)512 << 20)
#define MACHINE_BYTES ((size_t)64 << 20)

/* Places all arrays of the engine in the memory at `base` and returns the total size. With base =
 * NULL it only computes the size. */
static size_t slab_layout(struct engine *e, const struct engine_options *o, size_t vocab,
                          uint8_t *base) {
    size_t used = 0, rows = (size_t)o->max_rows, seqs = (size_t)o->max_seqs;
    size_t slots = seqs + (size_t)o->max_cached;
    e->max_out = o->max_out;
    size_t outs = (size_t)e->max_out;
    e->logits = bump_alloc(base, &used, outs * vocab * sizeof(float));
    e->scratch = bump_alloc(base, &used,
                            (size_t)pool_size(o->pool) * SAMPLE_SCRATCH * vocab * sizeof(float));
    e->rows = bump_alloc(base, &used, rows * sizeof *e->rows);
    e->segs = bump_alloc(base, &used, seqs * sizeof *e->segs);
    e->out_rows = bump_alloc(base, &used, rows * sizeof *e->out_rows);
    e->logits_rows = bump_alloc(base, &used, outs * sizeof *e->logits_rows);
    e->slots = bump_alloc(base, &used, slots * sizeof *e->slots);
    e->tokens = bump_alloc(base, &used, slots * (size_t)o->max_len * sizeof *e->tokens);
    e->active = bump_alloc(base, &used, seqs * sizeof(struct engine_request *));
    e->chunks = bump_alloc(base, &used, seqs * sizeof *e->chunks);
    e->groups = bump_alloc(base, &used, seqs * sizeof *e->groups);
    e->order = bump_alloc(base, &used, seqs * sizeof *e->order);
    return used;
}

static struct engine_options options_resolve(const struct model_config *c,
                                             const struct engine_options *o) {
    struct engine_options resolved = *o;
    if (resolved.max_rows == 0) resolved.max_rows = ENGINE_DEFAULT_ROWS;
    if (resolved.max_seqs == 0) resolved.max_seqs = DEFAULT_SEQS;
    if (resolved.max_len == 0) resolved.max_len = MIN(c->max_seq_len, DEFAULT_LEN);
    if (resolved.max_out == 0) resolved.max_out = MAX(resolved.max_seqs, OUT_MIN);
    resolved.max_out = MIN(resolved.max_out, resolved.max_rows);
    if (resolved.max_cached == 0) resolved.max_cached = resolved.max_seqs;
    if (resolved.n_pages == 0)
        resolved.n_pages = (int32_t)MIN(
            (int64_t)resolved.max_seqs * kv_cache_pages_for(resolved.max_len), INT32_MAX);
    return resolved;
}

static struct forward_options forward_options_from(const struct engine_options *o) {
    return (struct forward_options){.max_rows = o->max_rows,
                                    .n_slots = o->max_seqs + o->max_cached,
                                    .slot_len = o->max_len,
                                    .n_pages = o->n_pages,
                                    .kv_elem = o->kv_elem,
                                    .max_parts = MIN(o->max_rows, o->max_seqs) * ENGINE_MIX_MAX,
                                    .pool = o->pool};
}

size_t engine_bytes(const struct model_config *c, const struct engine_options *o) {
    struct engine e;
    struct engine_options r = options_resolve(c, o);
    struct forward_options fo = forward_options_from(&r);
    return sizeof e + 64 + slab_layout(&e, &r, (size_t)c->vocab_size, NULL) + forward_bytes(c, &fo);
}

static int options_check(const struct model_config *c, const struct engine_options *o,
                         struct error *err) {
    if (o->max_rows < 1 || o->max_rows > 1 << 16)
        return error_set(err, ERR_USAGE, "max_rows '%d' is not in 1..65536", o->max_rows);
    if (o->max_seqs < 1 || o->max_seqs > 1 << 16)
        return error_set(err, ERR_USAGE, "max_seqs '%d' is not in 1..65536", o->max_seqs);
    if (o->max_len < 1 || o->max_len > c->max_seq_len)
        return error_set(err, ERR_USAGE, "max_len '%d' is not in 1..%d, the model's length",
                         o->max_len, c->max_seq_len);
    if (o->max_cached < 0 || o->max_cached > 1 << 16)
        return error_set(err, ERR_USAGE, "max_cached '%d' is not in 0..65536", o->max_cached);
    if (o->max_out < 1) return error_set(err, ERR_USAGE, "max_out '%d' is below 1", o->max_out);
    if (o->n_pages < 1)
        return error_set(err, ERR_USAGE, "'%d' pages of KV cache; there must be one", o->n_pages);
    size_t need = engine_bytes(c, o);
    size_t have = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    if (need > have)
        return error_set(
            err, ERR_MEMORY,
            "an engine of '%d' sequences of '%d' tokens needs %zu MB and this machine has %zu MB; "
            "use fewer or shorter sequences",
            o->max_seqs, o->max_len, need >> 20, have >> 20);
    return OK;
}

struct engine *engine_new(const struct model *m, const struct engine_options *o,
                          struct error *err) {
    struct engine_options r = options_resolve(&m->config, o);
    if (options_check(&m->config, &r, err) != OK) return NULL;
    struct forward_options fo = forward_options_from(&r);
    struct engine *e = xcalloc(1, sizeof *e);
    e->m = m;
    e->machines_max_bytes = MACHINES_BYTES;
    pthread_mutex_init(&e->vocab_lock, NULL);
    e->o = r;
    e->kern = kernels_get();
    e->vocab = m->config.vocab_size;
    e->slab = try_calloc(1, slab_layout(e, &r, (size_t)e->vocab, NULL) + 64, err);
    if (!e->slab) {
        engine_free(e);
        return NULL;
    }
    slab_layout(e, &r, (size_t)e->vocab, (uint8_t *)(((uintptr_t)e->slab + 63) & ~(uintptr_t)63));
    e->prompt_rows = r.max_rows;
    e->n_slots = r.max_seqs + r.max_cached;
    e->n_pages = r.n_pages;
    for (int32_t i = 0; i < e->n_slots; i++)
        e->slots[i].tokens = e->tokens + (int64_t)i * r.max_len;
    e->f = forward_new(m, &fo);
    if (e->f) return e;
    error_set(
        err, ERR_MEMORY,
        "out of memory: the caches of %d sequences of %d tokens need %zu MB; use fewer or shorter "
        "sequences",
        r.max_seqs, r.max_len, forward_bytes(&m->config, &fo) >> 20);
    engine_free(e);
    return NULL;
}

/* Divides the memory limit equally between the machines. */
static void grammar_memory_distribute(struct engine *e) {
    size_t share = e->n_grammars ? e->machines_max_bytes / (size_t)e->n_grammars : 0;
    for (int32_t i = 0; i < e->n_grammars; i++)
        if (e->grammars[i].machine)
            grammar_machine_set_limit(e->grammars[i].machine,
                                      MIN(MAX(share, (size_t)MACHINE_MIN), MACHINE_BYTES));
}

void engine_set_grammar_memory(struct engine *e, size_t bytes) {
    e->machines_max_bytes = bytes ? bytes : MACHINES_BYTES;
}

static void active_grammar_release(struct engine *e, const struct grammar *g) {
    for (int32_t i = 0; i < e->n_grammars; i++) {
        struct active_grammar *active = &e->grammars[i];
        if (active->grammar != g || --active->users > 0) continue;
        grammar_machine_free(active->machine);
        *active = e->grammars[--e->n_grammars];
        grammar_memory_distribute(e);
        return;
    }
}

static void request_state_free(struct engine *e, struct engine_request *r) {
    if (r->state->allowed) {
        grammar_state_release(&r->state->grammar_state);
        active_grammar_release(e, r->grammar);
        free(r->state->allowed);
    }
    free(r->state->sorted);
    free(r->state->parts);
    mix_sum_release(e, r->state->mix_sum);
    free(r->state);
    r->state = NULL;
}

int32_t engine_max_len(const struct engine *e) {
    return e->o.max_len;
}

enum dtype engine_kv_elem(const struct engine *e) {
    return e->o.kv_elem;
}

enum dtype engine_lora_elem(const struct engine *e) {
    return e->o.lora_elem;
}

int32_t engine_max_seqs(const struct engine *e) {
    return e->o.max_seqs;
}

int32_t engine_max_rows(const struct engine *e) {
    return e->o.max_rows;
}

void engine_set_prompt_rows(struct engine *e, int32_t n) {
    e->prompt_rows = MAX(1, MIN(n, e->o.max_rows));
}

void engine_free(struct engine *e) {
    if (!e) return;
    for (int32_t i = 0; i < e->n_active; i++) request_state_free(e, e->active[i]);
    for (struct engine_request *r = e->head, *next; r; r = next) {
        next = r->state->next;
        request_state_free(e, r);
    }
    grammar_vocab_free(e->grammar_vocab);
    pthread_mutex_destroy(&e->vocab_lock);
    free(e->grammars);
    forward_free(e->f);
    free(e->slab);
    free(e);
}

struct engine_stats engine_stats(const struct engine *e) {
    struct engine_stats s = e->stats;
    s.weight_passes = forward_stats(e->f)->weight_passes;
    s.pages = e->n_pages;
    s.pages_free = e->n_pages - e->reserved_pages;
    return s;
}

void engine_request_release(struct engine_request *r) {
    CHECK(!r->state); // still in an engine
    free(r->out);
    free(r->out_logprob);
    free(r->choice_logprob);
    free(r->choice_prob);
    free(r->top_ids);
    free(r->top_logprob);
    free(r->prompt_logprob);
    free(r->prompt_top_ids);
    free(r->prompt_top_logprob);
    buf_release(&r->text);
    r->out = r->top_ids = r->prompt_top_ids = NULL;
    r->out_logprob = r->choice_logprob = r->choice_prob = NULL;
    r->top_logprob = r->prompt_logprob = r->prompt_top_logprob = NULL;
    r->n_out = 0;
    r->done = false;
}

int engine_check_tokens(const char *what, const int32_t *v, int32_t n, int32_t vocab,
                        struct error *err) {
    if (n < 0) return error_set(err, ERR_USAGE, "%s has '%d' tokens", what, n);
    for (int32_t i = 0; i < n; i++)
        if (v[i] < 0 || v[i] >= vocab)
            return error_set(err, ERR_USAGE,
                             "%s has token '%d' at %d, outside the vocabulary of %d", what, v[i], i,
                             vocab);
    return OK;
}

static int range_check(const char *name, float v, float lo, float hi, const char *off,
                       struct error *err) {
    if (v >= lo && v <= hi) return OK;
    return error_set(err, ERR_USAGE, "%s '%g' is not in %g..%g%s", name, (double)v, (double)lo,
                     (double)hi, off);
}

static int sampling_check(const struct sampling_params *s, int32_t vocab, struct error *err) {
    if (range_check("temperature", s->temperature, 0, 1e6f, "", err) != OK ||
        range_check("repetition_penalty", s->repetition_penalty, 0, 1e3f, "; 1 turns it off",
                    err) != OK ||
        range_check("presence_penalty", s->presence_penalty, -1e3f, 1e3f, "", err) != OK ||
        range_check("frequency_penalty", s->frequency_penalty, -1e3f, 1e3f, "", err) != OK)
        return err->code;
    for (int32_t i = 0; i < s->n_bias; i++) {
        if (engine_check_tokens("logit_bias", &s->bias[i].token, 1, vocab, err) != OK)
            return err->code;
        if (isnan(s->bias[i].bias))
            return error_set(err, ERR_USAGE, "the logit_bias of token '%d' is not a number",
                             s->bias[i].token);
    }
    if (s->temperature == 0.0f) return OK; // greedy: the filters have no effect
    if (s->top_k < 0)
        return error_set(err, ERR_USAGE, "top_k '%d' is negative; 0 turns it off", s->top_k);
    if (!(s->top_p > 0.0f && s->top_p <= 1.0f))
        return error_set(err, ERR_USAGE, "top_p '%g' is not in (0, 1]; 1 turns it off",
                         (double)s->top_p);
    if (range_check("min_p", s->min_p, 0, 1, "; 0 turns it off", err) != OK) return err->code;
    return range_check("typical_p", s->typical_p, 0, 1, "; 1 turns it off", err);
}

int engine_check_adapter(const struct adapter *a, const struct model_config *c, struct error *err) {
    if (!adapter_is_ready(a))
        return error_set(err, ERR_USAGE, "adapter '%.12s' is DoRA and not bound to its base",
                         a->hash);
    if (adapter_fits(a, c)) return OK;
    return error_set(
        err, ERR_USAGE,
        "adapter '%.12s' was made for another shape (%d layers of width %d; the model has "
        "%d of %d)",
        a->hash, a->shape.n_layers, a->shape.d_model, c->n_layers, c->d_model);
}

static int adapters_check(const struct engine_request *r, const struct model_config *c,
                          struct error *err) {
    if (r->adapter && r->n_mix)
        return error_set(err, ERR_USAGE, "a request has an adapter or a mix of them, not both");
    if (r->n_mix < 0 || r->n_mix > ENGINE_MIX_MAX)
        return error_set(err, ERR_USAGE, "a mix of '%d' adapters is not in 0..%d", r->n_mix,
                         ENGINE_MIX_MAX);
    if (r->adapter && engine_check_adapter(r->adapter, c, err) != OK) return err->code;
    for (int32_t i = 0; i < r->n_mix; i++) {
        const struct weighted_adapter *t = &r->mix[i];
        if (!isfinite(t->weight))
            return error_set(err, ERR_USAGE, "weight '%g' of a mix is not a number",
                             (double)t->weight);
        if (!t->adapter && request_mixes_dora(r))
            return error_set(err, ERR_USAGE, "a mix has DoRA adapters or noise, not both");
        if (t->adapter && (engine_check_adapter(t->adapter, c, err) != OK ||
                           adapter_require_layers_only(t->adapter, "mixing", err) != OK))
            return err->code;
    }
    return OK;
}

/* The maximum length of the request's sequence. */
static int64_t request_tokens(const struct engine_request *r) {
    int32_t longest = 0;
    for (int32_t i = 0; i < r->n_choices; i++) longest = MAX(longest, r->choices[i].n);
    int64_t all = (int64_t)r->n_prompt + r->max_tokens + r->suffix.n + longest;
    return r->context_len ? MIN(all, r->context_len) : all;
}

static int context_check(const struct engine_request *r, int32_t max_len, struct error *err) {
    if (r->context_len == 0) return OK;
    if (r->context_len < 2 || r->context_len > max_len)
        return error_set(err, ERR_USAGE, "context_len '%d' is not in 2..%d; 0 turns it off",
                         r->context_len, max_len);
    if (r->n_prompt > r->context_len)
        return error_set(err, ERR_USAGE, "the prompt has %d tokens: more than the context_len '%d'",
                         r->n_prompt, r->context_len);
    if (r->n_keep < 0 || r->n_keep > r->n_prompt || r->n_keep > r->context_len - 2)
        return error_set(err, ERR_USAGE, "n_keep '%d' is not in 0..%d", r->n_keep,
                         MIN(r->n_prompt, r->context_len - 2));
    if (r->n_choices > 0)
        return error_set(err, ERR_USAGE, "a request with choices has no context shift");
    if (r->adapter && r->adapter->config.n_invocation > 0)
        return error_set(err, ERR_USAGE,
                         "a request with an activated adapter has no context shift");
    return OK;
}

int engine_check(const struct engine *e, const struct engine_request *r, struct error *err) {
    if (r->n_prompt < 1) return error_set(err, ERR_USAGE, "the prompt is empty");
    if (r->max_tokens < 0)
        return error_set(err, ERR_USAGE, "max_tokens '%d' is negative", r->max_tokens);
    if (r->n_choices < 0) return error_set(err, ERR_USAGE, "'%d' choices", r->n_choices);
    if (engine_check_tokens("the prompt", r->prompt, r->n_prompt, e->vocab, err) != OK ||
        engine_check_tokens("the list of stop tokens", r->stop, r->n_stop, e->vocab, err) != OK ||
        engine_check_tokens("the suffix", r->suffix.v, r->suffix.n, e->vocab, err) != OK ||
        sampling_check(&r->sampling, e->vocab, err) != OK ||
        range_check("logprob_temperature", r->logprob_temperature, 0, 1e6f, "", err) != OK)
        return err->code;
    if (r->n_top < 0 || r->n_top > MIN(ENGINE_TOP_MAX, e->vocab))
        return error_set(err, ERR_USAGE, "top logprobs '%d' is not in 0..%d", r->n_top,
                         MIN(ENGINE_TOP_MAX, e->vocab));
    if (r->loop_tokens < 0)
        return error_set(err, ERR_USAGE, "loop_tokens '%d' is negative; 0 turns it off",
                         r->loop_tokens);
    if ((r->n_stop_texts > 0 || r->grammar) && !e->m->tok)
        return error_set(err, ERR_USAGE, "stop texts and grammars need a model with a tokenizer");
    for (int32_t i = 0; i < r->n_stop_texts; i++)
        if (!*r->stop_texts[i]) return error_set(err, ERR_USAGE, "stop text %d is empty", i);
    for (int32_t i = 0; i < r->n_choices; i++) {
        const struct token_seq *c = &r->choices[i];
        if (c->n < 1) return error_set(err, ERR_USAGE, "choice '%d' is empty", i);
        if (r->choices_only && c->n > 1)
            return error_set(err, ERR_USAGE, "choice '%d' has %d tokens; choices_only takes one", i,
                             c->n);
        if (engine_check_tokens("a choice", c->v, c->n, e->vocab, err) != OK) return err->code;
    }
    if (r->n_invocation_prompt < 0 || r->n_invocation_prompt > r->n_prompt)
        return error_set(err, ERR_USAGE, "n_invocation_prompt '%d' is not in 0..%d",
                         r->n_invocation_prompt, r->n_prompt);
    if (context_check(r, e->o.max_len, err) != OK) return err->code;
    int64_t total = request_tokens(r);
    if (total > e->o.max_len)
        return error_set(
            err, ERR_USAGE,
            "the prompt has %d tokens and the reply up to %lld: more than the %d of the "
            "context",
            r->n_prompt, (long long)total - r->n_prompt, e->o.max_len);
    if (kv_cache_pages_for((int32_t)total) > e->n_pages)
        return error_set(
            err, ERR_MEMORY,
            "a request of '%lld' tokens needs %d pages of KV cache and the engine has %d; "
            "raise the memory limit or shorten it",
            (long long)total, kv_cache_pages_for((int32_t)total), e->n_pages);
    return adapters_check(r, &e->m->config, err);
}

static int choice_compare(const void *pa, const void *pb) {
    const struct sorted_choice *a = pa, *b = pb;
    for (int32_t i = 0; i < a->n && i < b->n; i++)
        if (a->v[i] != b->v[i]) return a->v[i] < b->v[i] ? -1 : 1;
    if (a->n != b->n) return a->n < b->n ? -1 : 1;
    return a->index < b->index ? -1 : 1;
}

static int32_t common_prefix(const int32_t *a, int32_t n_a, const int32_t *b, int32_t n_b) {
    int32_t n = MIN(n_a, n_b), i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

static struct sorted_choice *choices_sort(const struct engine_request *r) {
    size_t n = (size_t)r->n_choices;
    struct sorted_choice *sorted = xcalloc(n, sizeof *sorted);
    for (int32_t i = 0; i < r->n_choices; i++)
        sorted[i] = (struct sorted_choice){.v = r->choices[i].v, .n = r->choices[i].n, .index = i};
    qsort(sorted, n, sizeof *sorted, choice_compare);
    for (size_t i = 1; i < n; i++)
        sorted[i].shared =
            common_prefix(sorted[i - 1].v, sorted[i - 1].n, sorted[i].v, sorted[i].n);
    return sorted;
}

static void request_state_set_adapters(const struct engine *e, const struct engine_request *r) {
    struct request_state *s = r->state;
    engine_adapters_key(r, s->key);
    s->activation = engine_activation(r);
    s->n_parts = r->adapter ? 1 : r->n_mix;
    s->overrides = r->adapter ? r->adapter->vocab_overrides : NULL;
    s->parts = xcalloc((size_t)MAX(s->n_parts, 1), sizeof *s->parts);
    if (s->mix_sum) {
        s->parts[0] = mix_sum_part(s->mix_sum);
        s->n_parts = 1;
        return;
    }
    for (int32_t i = 0; i < s->n_parts; i++) {
        struct weighted_adapter term =
            r->adapter ? (struct weighted_adapter){.adapter = r->adapter, .weight = 1} : r->mix[i];
        s->parts[i] = (struct lora_part){
            .pack = term.adapter ? adapter_pack(term.adapter, e->o.lora_elem) : NULL,
            .noise = term.noise,
            .weight = term.weight};
    }
}

/* ids and logprobs [n][n_top]. */
static int top_logprobs_alloc(int32_t **ids, float **logprobs, int32_t n, int32_t n_top,
                              struct error *err) {
    if (n_top == 0) return OK;
    *ids = try_calloc((size_t)n * (size_t)n_top, sizeof **ids, err);
    *logprobs = *ids ? try_calloc((size_t)n * (size_t)n_top, sizeof **logprobs, err) : NULL;
    return *logprobs ? OK : err->code;
}

int request_results_alloc(struct engine_request *r, struct error *err) {
    size_t n = (size_t)r->max_tokens;
    if (n > 0 &&
        (!(r->out = try_calloc(n, sizeof *r->out, err)) ||
         !(r->out_logprob = try_calloc(n, sizeof *r->out_logprob, err)) ||
         top_logprobs_alloc(&r->top_ids, &r->top_logprob, r->max_tokens, r->n_top, err) != OK))
        return err->code;
    if (r->prompt_logprobs &&
        (!(r->prompt_logprob = try_calloc((size_t)r->n_prompt, sizeof *r->prompt_logprob, err)) ||
         top_logprobs_alloc(&r->prompt_top_ids, &r->prompt_top_logprob, r->n_prompt, r->n_top,
                            err) != OK))
        return err->code;
    size_t choices = (size_t)MAX(r->n_choices, 0);
    if (choices > 0 && (!(r->choice_logprob = try_calloc(choices, sizeof(float), err)) ||
                        !(r->choice_prob = try_calloc(choices, sizeof(float), err))))
        return err->code;
    return OK;
}

static void active_grammar_acquire(struct engine *e, const struct grammar *g) {
    for (int32_t i = 0; i < e->n_grammars; i++)
        if (e->grammars[i].grammar == g) {
            e->grammars[i].users++;
            return;
        }
    e->grammars = xrealloc(e->grammars, (size_t)(e->n_grammars + 1) * sizeof *e->grammars);
    e->grammars[e->n_grammars++] = (struct active_grammar){.grammar = g, .users = 1};
}

void engine_prepare_grammars(struct engine *e) {
    pthread_mutex_lock(&e->vocab_lock);
    if (!e->grammar_vocab && e->m->tok) e->grammar_vocab = grammar_vocab_new(e->m->tok);
    pthread_mutex_unlock(&e->vocab_lock);
}

/* The machine of an active grammar, created on the first call. */
static struct grammar_machine *grammar_machine_get(struct engine *e, const struct grammar *g,
                                                   int64_t *units) {
    int32_t i = 0;
    while (e->grammars[i].grammar != g) i++;
    struct active_grammar *active = &e->grammars[i];
    if (active->machine) return active->machine;
    engine_prepare_grammars(e);
    active->machine = grammar_machine_new(g, e->grammar_vocab, 0);
    grammar_memory_distribute(e);
    *units -= MACHINE_UNITS;
    return active->machine;
}

/* The first mask is computed after the request is admitted. */
static void request_state_set_grammar(struct engine *e, const struct engine_request *r) {
    struct request_state *s = r->state;
    if (!r->grammar || r->max_tokens == 0) return;
    active_grammar_acquire(e, r->grammar);
    s->allowed = xcalloc((size_t)(e->vocab + 31) / 32, sizeof *s->allowed);
    s->mask_pending = true;
    s->unconsumed_token = -1;
}

static int results_prepare(struct engine_request *r, struct error *err) {
    CHECK(!r->state && !r->out && !r->choice_logprob); // the caller zeroed or released the results
    if (request_results_alloc(r, err) == OK) return OK;
    engine_request_release(r);
    return err->code;
}

static int state_prepare(struct engine *e, struct engine_request *r, struct error *err) {
    struct mix_sum *sum;
    if (mix_sum_acquire(e, r, &sum, err) != OK) return err->code;
    r->state = xcalloc(1, sizeof *r->state);
    r->state->mix_sum = sum;
    return OK;
}

/* Allocates the request's results and state. */
static int request_prepare(struct engine *e, struct engine_request *r, struct error *err) {
    if (results_prepare(r, err) != OK) return err->code;
    if (state_prepare(e, r, err) == OK) return OK;
    engine_request_release(r);
    return err->code;
}

/* Allocates what a request needs before it is added: nothing if a remote that does not stream has
 * it. */
static int request_allocate(struct engine *e, struct engine_request *r, struct error *err) {
    if (!e->remote) return request_prepare(e, r, err);
    return engine_remote_streams(e) ? results_prepare(r, err) : OK;
}

/* Resets the results of a request that has arrays for them. */
static void results_reset(struct engine_request *r) {
    r->n_out = r->n_prefilled = r->n_generated = r->n_cached = r->n_dropped = 0;
    r->choice = -1;
    r->finish = FINISH_NONE;
    r->done = false;
    r->text.len = 0;
}

/* Resets the results of a prepared request and appends it to the waiting ones. */
static void request_enqueue(struct engine *e, struct engine_request *r) {
    r->state->pages = kv_cache_pages_for((int32_t)request_tokens(r));
    request_state_set_adapters(e, r);
    results_reset(r);
    request_state_set_grammar(e, r);
    if (r->n_choices > 0) r->state->sorted = choices_sort(r);
    if (e->tail)
        e->tail->state->next = r;
    else
        e->head = r;
    e->tail = r;
    e->n_waiting++;
}

/* Adds a request that is checked and allocated. */
static void request_add(struct engine *e, struct engine_request *r) {
    if (!e->remote) {
        request_enqueue(e, r);
        return;
    }
    results_reset(r);
    e->n_remote++;
    e->remote->submit(e->remote_ctx, r);
}

int engine_submit(struct engine *e, struct engine_request *r, struct error *err) {
    if (engine_check(e, r, err) != OK) return err->code;
    if (request_allocate(e, r, err) != OK) return err->code;
    request_add(e, r);
    return OK;
}

/* remote */

void engine_set_remote(struct engine *e, const struct engine_remote *remote, void *ctx) {
    CHECK(engine_unfinished(e) == 0);
    e->remote = remote;
    e->remote_ctx = ctx;
}

void engine_remote_finish(struct engine *e, struct engine_request *r) {
    r->done = true;
    e->n_remote--;
    e->stats.finished++;
    e->stats.generated += (uint64_t)r->n_generated;
    if (e->o.on_finished) e->o.on_finished(e->o.on_finished_ctx, r);
}

int engine_remote_return(struct engine *e, struct engine_request *r, struct error *err) {
    if ((engine_remote_streams(e) ? state_prepare : request_prepare)(e, r, err) != OK)
        return err->code;
    e->n_remote--;
    r->state->n_again = engine_remote_streams(e) ? r->n_out : 0;
    request_enqueue(e, r);
    return OK;
}

bool engine_remote_streams(const struct engine *e) {
    return e->remote && e->remote->compared;
}

void engine_wake(const struct engine *e) {
    if (engine_remote_streams(e)) e->remote->wake(e->remote_ctx);
}

/* Ends the comparison of a request that the remote has returned. */
static void returned_finish(const struct engine *e, struct engine_request *r) {
    const struct request_state *s = r->state;
    bool cancelled = r->finish == FINISH_NONE && !s->differs,
         equal = !s->differs && r->n_out >= s->n_again;
    if (!equal) r->finish = FINISH_NONE;
    r->n_out = MAX(r->n_out, s->n_again); // they are known to other threads
    if (cancelled)
        e->remote->cancel(e->remote_ctx, r);
    else
        e->remote->compared(e->remote_ctx, r, equal);
}

/* The number of positions in which slot `s` and request `r` have the same keys and values for the
 * same tokens. */
static int32_t prefix_cache_limit(const struct engine_slot *s, const struct engine_request *r) {
    const struct request_state *to = r->state;
    bool same = s->activation == to->activation && strcmp(s->key, to->key) == 0;
    return same ? INT32_MAX : MIN(s->activation, to->activation);
}

/* The number of prompt tokens of `r` that slot `s` has in the cache, or will have when its owner's
 * prefill ends. It is less than n_prompt, because the last prompt token must be run for its logits.
 */
static int32_t prefix_cache_match(const struct engine_slot *s, const struct engine_request *r) {
    bool prefilling = s->owner && s->owner->state->phase == PHASE_PREFILL;
    const int32_t *v = prefilling ? s->owner->prompt : s->tokens;
    // the last prompt row of an owner with a grammar waits for its mask, for which r must not wait
    int32_t n = prefilling ? s->owner->n_prompt - (s->owner->grammar != NULL) : s->n_known;
    n = MIN(n, prefix_cache_limit(s, r));
    if (n < PREFIX_MIN || r->n_prompt <= PREFIX_MIN || r->prompt_logprobs) return 0;
    int32_t shared = MIN(common_prefix(v, n, r->prompt, r->n_prompt), r->n_prompt - 1);
    return shared >= PREFIX_MIN ? shared : 0;
}

/* The slot whose present or future tokens have the longest common prefix with the prompt, with the
 * same keys and values, or -1; *overlap receives the prefix's length. A free slot wins ties. The
 * request takes over a free slot; it shares the pages of a busy slot, after that slot's owner has
 * prefilled them. */
static int32_t prefix_cache_lookup(const struct engine *e, const struct engine_request *r,
                                   int32_t *overlap) {
    int32_t best = -1;
    *overlap = 0;
    for (int32_t i = 0; i < e->n_slots; i++) {
        int32_t n = prefix_cache_match(&e->slots[i], r);
        if (n > *overlap ||
            (n > 0 && n == *overlap && e->slots[best].owner && !e->slots[i].owner)) {
            best = i;
            *overlap = n;
        }
    }
    return best;
}

int32_t slot_find_lru(const struct engine *e, bool filled) {
    int32_t best = -1;
    for (int32_t i = 0; i < e->n_slots; i++) {
        const struct engine_slot *s = &e->slots[i];
        if (s->owner || (filled && s->n == 0)) continue;
        if (best < 0 ||
            (s->n == 0 ? 0 : s->last_used) < (e->slots[best].n == 0 ? 0 : e->slots[best].last_used))
            best = i;
    }
    return best;
}

static void prefix_cache_share(struct engine *e, int32_t from, int32_t to, int32_t n) {
    struct engine_slot *a = &e->slots[from], *b = &e->slots[to];
    kv_cache_share_prefix(forward_kv_cache(e->f), from, to, n);
    memcpy(b->tokens, a->tokens, (size_t)n * sizeof *a->tokens);
    b->n = b->n_known = n;
}

/* Gives the request a slot with the longest cached prefix of its prompt. The prefix is in the slot
 * already, is shared from another slot, or will be computed by a prefix source. */
static void request_admit(struct engine *e, struct engine_request *r) {
    struct request_state *s = r->state;
    int32_t overlap, best = prefix_cache_lookup(e, r, &overlap);
    bool take_over = best >= 0 && !e->slots[best].owner;
    s->slot = take_over ? best : slot_find_lru(e, false);
    struct engine_slot *slot = &e->slots[s->slot];
    slot->n = slot->n_known = take_over ? overlap : 0;
    kv_cache_truncate(forward_kv_cache(e->f), s->slot, slot->n);
    e->reserved_pages += s->pages;
    if (best >= 0 && !take_over) {
        if (e->slots[best].n >= overlap) {
            prefix_cache_share(e, best, s->slot, overlap);
        } else {
            s->prefix_source = e->slots[best].owner;
            s->shared_prefix_len = overlap;
        }
    }
    slot->owner = r;
    strcpy(slot->key, s->key);
    slot->activation = s->activation;
    s->kv = slot->n;
    r->n_cached = s->prefix_source ? s->shared_prefix_len : s->kv;
    s->end = r->n_prompt;
    s->phase = PHASE_PREFILL;
    e->active[e->n_active++] = r;
}

static void admit_waiting(struct engine *e) {
    while (e->head && e->n_active < e->o.max_seqs &&
           e->reserved_pages + e->head->state->pages <= e->n_pages) {
        struct engine_request *r = e->head;
        e->head = r->state->next;
        if (!e->head) e->tail = NULL;
        e->n_waiting--;
        request_admit(e, r);
    }
}

/* A request that waits for its prefix source shares the source's pages as soon as they are
 * prefilled. This function runs before the source can finish and release its slot. */
static void prefix_sources_resolve(struct engine *e) {
    for (int32_t i = 0; i < e->n_active; i++) {
        struct request_state *s = e->active[i]->state;
        if (!s->prefix_source || s->prefix_source->state->kv < s->shared_prefix_len) continue;
        prefix_cache_share(e, s->prefix_source->state->slot, s->slot, s->shared_prefix_len);
        s->kv = s->shared_prefix_len;
        s->prefix_source = NULL;
    }
}

static int32_t token_at(const struct engine_request *r, int32_t pos) {
    const struct request_state *s = r->state;
    if (pos >= r->n_keep) pos += r->n_dropped;
    if (pos < r->n_prompt) return r->prompt[pos];
    pos -= r->n_prompt;
    if (pos < r->n_out) return r->out[pos];
    pos -= r->n_out;
    if (pos < r->suffix.n && s->phase >= PHASE_SUFFIX) return r->suffix.v[pos];
    return s->sorted[s->choice].v[pos - r->suffix.n];
}

bool request_generates(const struct engine_request *r) {
    return r->max_tokens > 0 && !r->state->empty_only;
}

/* Groups the chunks by adapters; sampled and known rows are in separate groups. Groups of sampled
 * rows come first, because step_schedule starts with their chunks. */
static void chunks_group_by_adapter(struct engine *e) {
    e->n_groups = 0;
    for (int32_t i = 0; i < e->n_chunks; i++) {
        const struct request_state *s = e->chunks[i].r->state;
        int32_t g = 0;
        while (g < e->n_groups && (rows_are_sampled(e->groups[g].state) != rows_are_sampled(s) ||
                                   strcmp(e->groups[g].state->key, s->key) != 0))
            g++;
        if (g == e->n_groups)
            e->groups[e->n_groups++] = (struct adapter_group){.state = s, .first = i, .last = i};
        else
            e->chunks[e->groups[g].last].next = i;
        e->groups[g].last = i;
    }
}

static enum logits_use logits_use_at(const struct engine_request *r, int32_t pos) {
    if (r->state->phase == PHASE_PREFILL && pos + 1 < r->n_prompt) return LOGITS_PROMPT_LOGPROB;
    if (r->state->phase <= PHASE_DECODE && request_generates(r)) return LOGITS_SAMPLE;
    return r->choices_only ? LOGITS_CHOICES : LOGITS_NORMALIZE;
}

static void chunk_add_rows(struct engine *e, struct scheduled_chunk *d) {
    struct engine_request *r = d->r;
    const struct request_state *s = r->state;
    d->out = e->n_out;
    for (int32_t i = 0; i < d->n_rows; i++) {
        int32_t pos = s->kv + i;
        if (i >= d->n_rows - d->n_out) {
            e->logits_rows[e->n_out] =
                (struct logits_row){.r = r, .kind = logits_use_at(r, pos), .pos = pos};
            e->out_rows[e->n_out++] = e->n_rows;
        }
        e->rows[e->n_rows++] = (struct batch_row){
            .token = token_at(r, pos), .pos = pos, .slot = s->slot, .sampled = rows_are_sampled(s)};
    }
}

/* Applies the adapters of a group to the rows of its chunk `d`, which begin at row `begin` of the
 * step, except to those before the activation; they are in no segment. Rows of the group that
 * follow one another are one segment. */
static void segment_add(struct engine *e, const struct request_state *group,
                        const struct scheduled_chunk *d, int32_t begin) {
    struct lora_segment *last = e->n_segs ? &e->segs[e->n_segs - 1] : NULL;
    const struct request_state *s = d->r->state;
    begin += MIN(MAX(s->activation - s->kv, 0), d->n_rows);
    if (begin == e->n_rows) return;
    if (last && last->parts == group->parts && last->end == begin)
        last->end = e->n_rows;
    else
        e->segs[e->n_segs++] = (struct lora_segment){.begin = begin,
                                                     .end = e->n_rows,
                                                     .parts = group->parts,
                                                     .n_parts = group->n_parts,
                                                     .vocab = group->overrides};
}

bool slot_reserve_pages(struct engine *e, int32_t slot, int32_t from, int32_t to) {
    struct kv_cache *kv = forward_kv_cache(e->f);
    while (!kv_cache_reserve(kv, slot, from, to)) {
        int32_t oldest = slot_find_lru(e, true);
        if (oldest < 0) return false;
        kv_cache_truncate(kv, oldest, 0);
        e->slots[oldest].n = e->slots[oldest].n_known = 0;
    }
    return true;
}

void engine_trim(struct engine *e) {
    kv_cache_trim(forward_kv_cache(e->f));
}

/* Runs the scheduled rows in one forward pass. */
static void step_run(struct engine *e) {
    int32_t adapters = 0;
    for (int32_t i = 0; i < e->n_chunks; i++) {
        const struct request_state *s = e->chunks[i].r->state;
        // there are enough pages, because request_admit reserved them
        CHECK(slot_reserve_pages(e, s->slot, s->kv, s->kv + e->chunks[i].n_rows));
    }
    chunks_group_by_adapter(e);
    e->n_rows = e->n_out = e->n_segs = 0;
    for (int32_t g = 0; g < e->n_groups; g++) {
        const struct request_state *s = e->groups[g].state;
        for (int32_t i = e->groups[g].first; i >= 0; i = e->chunks[i].next) {
            int32_t begin = e->n_rows;
            chunk_add_rows(e, &e->chunks[i]);
            segment_add(e, s, &e->chunks[i], begin);
        }
        adapters += s->n_parts > 0;
    }
    forward_run(e->f, e->rows, e->n_rows, e->segs, e->n_segs, e->out_rows, e->n_out, e->logits);
    e->stats.steps++;
    e->stats.rows += (uint64_t)e->n_rows;
    e->stats.max_adapters_in_a_step = MAX(e->stats.max_adapters_in_a_step, adapters);
}

/* Writes the n_top most probable tokens to entry `pos` of ids and logprobs, most probable first. */
static void top_logprobs_write(const struct logits_row *row, const float *logits, int32_t vocab,
                               float lse, int32_t *ids, float *logprobs, int32_t pos,
                               float *scratch) {
    int64_t n = row->r->n_top;
    if (n > 0)
        sample_top_logprobs(logits, vocab, lse, (int32_t)n, ids + pos * n, logprobs + pos * n,
                            scratch);
}

/* Divides the logits of the choices by logprob_temperature and returns their log Σ exp. */
static float choices_normalize(const struct engine *e, const struct engine_request *r,
                               float *logits) {
    float scale = r->logprob_temperature > 0.0f ? 1.0f / r->logprob_temperature : 1.0f;
    float *x = r->choice_prob; // used as scratch; choices_finish writes it
    for (int32_t i = 0; i < r->n_choices; i++) x[i] = logits[r->choices[i].v[0]] * scale;
    for (int32_t i = 0; i < r->n_choices; i++) logits[r->choices[i].v[0]] = x[i];
    float max = e->kern->max(x, r->n_choices);
    return max + (float)math_log((double)e->kern->softmax(x, r->n_choices));
}

/* Sampling uses the original logits; logprob_temperature applies to the reported log-probabilities
 * only. */
static void logits_row_process(const struct engine *e, struct logits_row *row, float *logits,
                               float *scratch) {
    struct engine_request *r = row->r;
    bool choices = row->kind == LOGITS_CHOICES,
         tempered = !choices && r->logprob_temperature > 0.0f;
    float lse = 0;
    if (row->kind == LOGITS_SAMPLE) {
        struct sampling_context context = {
            {r->prompt, r->n_prompt}, {r->out, r->n_out}, r->state->allowed};
        row->token = sample_token(logits, e->vocab, &r->sampling, &context, r->n_out, &row->logprob,
                                  scratch);
    }
    if (tempered) e->kern->scale(logits, 1.0f / r->logprob_temperature, e->vocab);
    if (!choices && (tempered || row->kind != LOGITS_SAMPLE || r->n_top > 0))
        lse = logits_logsumexp(logits, e->vocab, scratch);
    switch (row->kind) {
    case LOGITS_NORMALIZE:
        row->logprob = lse;
        return;
    case LOGITS_CHOICES:
        row->logprob = choices_normalize(e, r, logits);
        return;
    case LOGITS_PROMPT_LOGPROB:
        r->prompt_logprob[row->pos + 1] = logits[r->prompt[row->pos + 1]] - lse;
        top_logprobs_write(row, logits, e->vocab, lse, r->prompt_top_ids, r->prompt_top_logprob,
                           row->pos + 1, scratch);
        return;
    case LOGITS_SAMPLE:
        if (tempered) row->logprob = logits[row->token] - lse;
        if (r->n_out < r->state->n_again) return; // other threads read them
        top_logprobs_write(row, logits, e->vocab, lse, r->top_ids, r->top_logprob, r->n_out,
                           scratch);
        return;
    }
}

static void logits_rows_process(void *ctx, int64_t begin, int64_t end, int thread) {
    struct engine *e = ctx;
    float *scratch = e->scratch + (int64_t)thread * SAMPLE_SCRATCH * e->vocab;
    for (int64_t i = begin; i < end; i++)
        logits_row_process(e, &e->logits_rows[i], e->logits + i * e->vocab, scratch);
}

/* Logits row `out` belongs to the position after the first `depth` tokens of the current choice.
 * Adds the log-probability of the next token to every choice that begins with these tokens: in
 * sorted order, the current choice and its successors. */
static void choice_node_score(const struct engine *e, struct engine_request *r, int32_t out,
                              int32_t depth) {
    const struct request_state *s = r->state;
    const float *logits = e->logits + (int64_t)out * e->vocab;
    for (int32_t i = s->choice; i < r->n_choices; i++) {
        const struct sorted_choice *c = &s->sorted[i];
        if (i > s->choice && c->shared < depth) break;
        if (c->n > depth)
            r->choice_logprob[c->index] += logits[c->v[depth]] - e->logits_rows[out].logprob;
    }
}

static void choices_finish(const struct engine *e, struct engine_request *r) {
    size_t n = (size_t)r->n_choices;
    memcpy(r->choice_prob, r->choice_logprob, n * sizeof(float));
    float sum = e->kern->softmax(r->choice_prob, r->n_choices);
    r->choice = 0;
    for (int32_t i = 0; i < r->n_choices; i++) {
        r->choice_prob[i] /= sum;
        if (r->choice_logprob[i] > r->choice_logprob[r->choice]) r->choice = i;
    }
    r->finish = FINISH_CHOICE;
}

/* Advances to the next choice that has tokens to run. Choices are visited in sorted order, as a
 * depth-first walk over their trie: each distinct prefix is run once, its logits serve all choices
 * that begin with it, and the KV cache keeps the common prefix with the previous choice. The last
 * token of a choice is not run, because no token follows it. */
static void choices_next(const struct engine *e, struct engine_request *r) {
    struct request_state *s = r->state;
    while (++s->choice < r->n_choices) {
        const struct sorted_choice *c = &s->sorted[s->choice];
        s->kv = MIN(s->kv, s->context + c->shared);
        s->end = s->context + c->n - 1;
        if (s->kv < s->end) return;
    }
    choices_finish(e, r);
    r->done = true;
}

/* Starts scoring the choices. `out` is the index of the logits row that follows prompt, output and
 * suffix. */
static void choices_begin(const struct engine *e, struct engine_request *r, int32_t out) {
    struct request_state *s = r->state;
    s->phase = PHASE_CHOICES;
    s->context = s->end;
    s->choice = 0;
    choice_node_score(e, r, out, 0);
    s->choice = -1;
    choices_next(e, r);
}

/* Called after the last generated token, or after the prompt if no token is generated. Ends the
 * request or, if it has choices, starts the suffix. */
static void generation_end(struct engine_request *r, enum finish_reason reason) {
    struct request_state *s = r->state;
    r->finish = reason;
    if (r->n_choices == 0) {
        r->done = true;
        return;
    }
    s->phase = PHASE_SUFFIX;
    s->end = r->n_prompt + r->n_out + r->suffix.n;
    // without a suffix the last row is run again, for its logits
    s->kv = MIN(s->kv, s->end - 1);
}

static bool is_stop(const struct engine_request *r, int32_t token) {
    for (int32_t i = 0; i < r->n_stop; i++)
        if (r->stop[i] == token) return true;
    return false;
}

bool token_cycle_extend(struct token_cycle *c, const int32_t *v, int32_t n, int32_t min_tokens) {
    int32_t last = n - 1;
    bool found = false;
    for (int32_t p = 1; p <= MIN(TOKEN_CYCLE_MAX, last); p++) {
        c->run[p] = v[last] == v[last - p] ? c->run[p] + 1 : 0;
        int32_t span = c->run[p] + p;
        found |= span >= min_tokens && span >= LOOP_REPEATS * p;
    }
    return found;
}

static bool loop_found(struct engine_request *r) {
    return r->loop_tokens && token_cycle_extend(&r->state->cycle, r->out, r->n_out, r->loop_tokens);
}

/* Appends the bytes of the last token to the text. If a stop text is found, truncates the text
 * before it. */
static bool stop_text_found(const struct engine *e, struct engine_request *r) {
    if (r->n_stop_texts == 0) return false;
    size_t old_len = r->text.len, first = SIZE_MAX;
    tokenizer_decode_token(e->m->tok, r->out[r->n_out - 1], false, &r->text);
    for (int32_t i = 0; i < r->n_stop_texts; i++) {
        size_t n = strlen(r->stop_texts[i]), from = old_len >= n ? old_len - n + 1 : 0;
        if (from >= r->text.len) continue;
        const char *match = memmem(r->text.data + from, r->text.len - from, r->stop_texts[i], n);
        if (match) first = MIN(first, (size_t)(match - (const char *)r->text.data));
    }
    if (first == SIZE_MAX) return false;
    r->text.len = first;
    return true;
}

/* Appends the sampled token to the output, or compares it with the one that a remote had filled in
 * there. False: it is another one. */
static bool token_store(struct engine_request *r, const struct logits_row *o) {
    if (r->n_out < r->state->n_again) {
        r->state->differs = r->out[r->n_out] != o->token ||
                            memcmp(&r->out_logprob[r->n_out], &o->logprob, sizeof o->logprob) != 0;
    } else {
        r->out_logprob[r->n_out] = o->logprob;
        r->out[r->n_out] = o->token;
    }
    r->n_out++;
    return !r->state->differs;
}

/* Accepts the sampled token. A stop token or a stop text ends the generation; with a grammar,
 * mask_finish decides about the other reasons to end it. */
static void token_accept(struct engine *e, struct engine_request *r, const struct logits_row *o) {
    struct request_state *s = r->state;
    r->n_generated++;
    e->stats.generated++;
    if (is_stop(r, o->token)) {
        generation_end(r, FINISH_STOP);
        return;
    }
    if (!token_store(r, o)) {
        r->done = true;
        return;
    }
    s->phase = PHASE_DECODE;
    s->end = r->n_prompt + r->n_out - r->n_dropped;
    s->loop_detected = loop_found(r);
    if (stop_text_found(e, r)) {
        generation_end(r, FINISH_STOP);
    } else if (s->allowed) {
        s->mask_pending = true;
        s->unconsumed_token = o->token;
    } else if (s->loop_detected) {
        generation_end(r, FINISH_LOOP);
    } else if (r->n_out == r->max_tokens) {
        generation_end(r, FINISH_LENGTH);
    }
}

/* Called when the mask is complete. Allows stop tokens if the text may end here, and ends the
 * generation if no token may follow. */
static void mask_finish(const struct engine *e, struct engine_request *r) {
    struct request_state *s = r->state;
    int32_t any_allowed = 0;
    bool final = grammar_is_final(&s->grammar_state);
    s->mask_pending = false;
    for (int32_t i = 0; final && i < r->n_stop; i++)
        s->allowed[r->stop[i] / 32] |= 1u << r->stop[i] % 32;
    for (int32_t i = 0; i < (e->vocab + 31) / 32; i++) any_allowed |= s->allowed[i] != 0;
    bool exhausted = !any_allowed || r->n_out == r->max_tokens;
    if (s->unconsumed_token < 0)
        s->empty_only = exhausted;
    else if (exhausted && final)
        generation_end(r, FINISH_STOP);
    else if (s->loop_detected)
        generation_end(r, FINISH_LOOP);
    else if (exhausted)
        generation_end(r, FINISH_LENGTH);
}

/* Continues the computation of the request's mask. True when it is complete; false when the units
 * are used up or the machine computes another request's mask. */
static bool mask_advance(struct engine *e, struct engine_request *r, int64_t *units) {
    struct request_state *s = r->state;
    int32_t left = r->max_tokens - r->n_out;
    if (!s->grammar_state.machine)
        s->grammar_state = grammar_state_new(grammar_machine_get(e, r->grammar, units));
    if (!grammar_advance(&s->grammar_state, s->unconsumed_token, left, left > 0 ? s->allowed : NULL,
                         units))
        return false;
    mask_finish(e, r);
    return true;
}

/*
 * Computes the pending masks of all requests round-robin, up to MASK_UNITS per step, so that a
 * grammar with expensive masks delays only the requests that use it. A mask does not depend on how
 * its computation is divided into steps.
 */
static void masks_advance(struct engine *e) {
    for (int32_t n_pending = 1; n_pending > 0 && e->mask_units > 0;) {
        int32_t first = e->next_mask, i = 0;
        n_pending = 0;
        for (; i < e->n_active && e->mask_units > 0; i++) {
            struct engine_request *r = e->active[(first + i) % e->n_active];
            int64_t units = MASK_QUANTUM;
            if (r->done || !r->state->mask_pending) continue;
            n_pending += !mask_advance(e, r, &units);
            e->mask_units -= MASK_QUANTUM - units;
        }
        e->next_mask = e->n_active ? (first + i) % e->n_active : 0;
    }
}

/* Called when the last row of the phase has been run. */
static void phase_finish(struct engine *e, struct engine_request *r,
                         const struct scheduled_chunk *d) {
    struct request_state *s = r->state;
    int32_t last = d->out + d->n_out - 1;
    switch (s->phase) {
    case PHASE_PREFILL:
        r->n_prefilled += r->n_prompt;
        if (request_generates(r))
            token_accept(e, r, &e->logits_rows[last]);
        else if (r->n_choices > 0 && r->suffix.n == 0)
            choices_begin(e, r, last);
        else
            generation_end(r, r->state->empty_only ? FINISH_STOP : FINISH_LENGTH);
        break;
    case PHASE_SHIFT:
        r->n_prefilled += s->end - r->n_keep;
        token_accept(e, r, &e->logits_rows[last]);
        break;
    case PHASE_DECODE:
        token_accept(e, r, &e->logits_rows[last]);
        break;
    case PHASE_SUFFIX:
        r->n_prefilled += r->suffix.n;
        choices_begin(e, r, last);
        break;
    case PHASE_CHOICES:
        choices_next(e, r);
        break;
    }
}

/* Called when the chunk's rows are in the KV cache. Updates the slot and scores choices. */
static void chunk_commit(struct engine *e, const struct scheduled_chunk *d) {
    struct engine_request *r = d->r;
    struct request_state *s = r->state;
    struct engine_slot *slot = &e->slots[s->slot];
    for (int32_t i = 0; i < d->n_rows; i++) slot->tokens[s->kv + i] = token_at(r, s->kv + i);
    if (s->phase == PHASE_CHOICES) {
        for (int32_t i = 0; i < d->n_out; i++)
            choice_node_score(e, r, d->out + i, s->kv + i - s->context + 1);
        r->n_prefilled += d->n_rows;
    }
    if (s->phase != PHASE_DECODE) e->stats.prefilled += (uint64_t)d->n_rows;
    // with tiles in the fast class, keys and values of sampled rows have other bits than those
    // of known rows
    if (e->m->cls == NUMERIC_FAST && e->kern->gemm_tiles && rows_are_sampled(s))
        slot->n_known = MIN(slot->n_known, s->kv);
    else if (slot->n_known >= s->kv)
        slot->n_known = s->kv + d->n_rows;
    s->kv += d->n_rows;
    slot->n = s->kv;
    slot->last_used = e->stats.steps;
}

static void request_finish(struct engine *e, struct engine_request *r) {
    e->slots[r->state->slot].owner = NULL;
    e->reserved_pages -= r->state->pages;
    e->stats.finished++;
    if (r->state->n_again > 0) returned_finish(e, r);
    request_state_free(e, r);
    if (e->o.on_finished) e->o.on_finished(e->o.on_finished_ctx, r);
}

static void active_remove_finished(struct engine *e) {
    int32_t n = 0;
    for (int32_t i = 0; i < e->n_active; i++) {
        if (e->active[i]->done)
            request_finish(e, e->active[i]);
        else
            e->active[n++] = e->active[i];
    }
    e->n_active = n;
}

/* Requests that wait for prefix source `r` will prefill their prompts themselves. */
static void prefix_waiters_release(const struct engine *e, const struct engine_request *r) {
    for (int32_t i = 0; i < e->n_active; i++) {
        struct engine_request *other = e->active[i];
        if (other->state->prefix_source != r) continue;
        other->state->prefix_source = NULL;
        other->n_cached = other->state->kv;
    }
}

static void waiting_remove(struct engine *e, struct engine_request *r) {
    struct engine_request **link = &e->head, *previous = NULL;
    while (*link != r) {
        previous = *link;
        link = &previous->state->next;
    }
    *link = r->state->next;
    if (e->tail == r) e->tail = previous;
    e->n_waiting--;
}

void engine_cancel(struct engine *e, struct engine_request *r) {
    if (r->done) return;
    if (e->remote && !r->state) {
        e->remote->cancel(e->remote_ctx, r);
        r->finish = FINISH_NONE;
        engine_remote_finish(e, r);
        return;
    }
    r->done = true;
    r->finish = FINISH_NONE;
    for (int32_t i = 0; i < e->n_active; i++)
        if (e->active[i] == r) {
            prefix_waiters_release(e, r);
            active_remove_finished(e);
            return;
        }
    waiting_remove(e, r);
    e->stats.finished++;
    if (r->state->n_again > 0) returned_finish(e, r);
    request_state_free(e, r);
    if (e->o.on_finished) e->o.on_finished(e->o.on_finished_ctx, r);
}

int engine_unfinished(const struct engine *e) {
    return e->n_active + e->n_waiting + e->n_remote;
}

static int step_finish(struct engine *e) {
    active_remove_finished(e);
    return engine_unfinished(e);
}

static const double REMOTE_SECONDS = 0.25; // the longest wait of a step

int engine_step(struct engine *e) {
    bool waits = e->n_remote > 0 && e->n_active + e->n_waiting == 0;
    if (e->n_remote > 0 || engine_remote_streams(e))
        e->remote->step(e->remote_ctx, waits ? REMOTE_SECONDS : 0);
    admit_waiting(e);
    if (e->n_active == 0) return e->n_remote;
    e->mask_units = MASK_UNITS;
    masks_advance(e);
    step_schedule(e);
    if (e->n_rows == 0) return step_finish(e);
    step_run(e);
    pool_run(e->n_out > 1 ? e->o.pool : NULL, logits_rows_process, e, e->n_out, 1);
    for (int32_t i = 0; i < e->n_chunks; i++) chunk_commit(e, &e->chunks[i]);
    prefix_sources_resolve(e);
    for (int32_t i = 0; i < e->n_chunks; i++) {
        struct engine_request *r = e->chunks[i].r;
        if (r->state->kv == r->state->end) phase_finish(e, r, &e->chunks[i]);
    }
    masks_advance(e);
    return step_finish(e);
}

void engine_text_replay(const struct engine *e, struct engine_request *r) {
    int32_t n = r->n_out;
    for (r->n_out = 1; r->n_out <= n; r->n_out++) stop_text_found(e, r);
    r->n_out = n;
}

int engine_run(struct engine *e, struct engine_request *reqs, int n, struct progress *p,
               struct error *err) {
    for (int i = 0; i < n; i++)
        if (engine_check(e, &reqs[i], err) != OK) return error_wrap(err, "request %d", i);
    for (int i = 0; i < n; i++) {
        if (request_allocate(e, &reqs[i], err) == OK) continue;
        while (i-- > 0) {
            if (reqs[i].state) request_state_free(e, &reqs[i]);
            engine_request_release(&reqs[i]);
        }
        return err->code;
    }
    for (int i = 0; i < n; i++) request_add(e, &reqs[i]);
    uint64_t already_finished = e->stats.finished;
    int left, rc = OK;
    do {
        left = engine_step(e);
        if (p)
            progress_update(p, (int64_t)MIN(e->stats.finished - already_finished, (uint64_t)n),
                            NULL);
        if (left > 0) rc = log_check_cancelled(err);
    } while (rc == OK && left > 0);
    for (int i = 0; rc != OK && i < n; i++) {
        engine_cancel(e, &reqs[i]);
        engine_request_release(&reqs[i]);
    }
    return rc;
}
